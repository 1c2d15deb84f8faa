// mutate.c - injects a bug into a kernel: edits the PTX of a module before it is parsed.
#include "mutate.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PARTS = 4, HOLES = 8, TEXT = 512 };

typedef struct edit {
    char kernel[TEXT];
    int which;
    char find[TEXT];
    char replace[TEXT];
} edit;

typedef struct piece {
    const char* begin;
    size_t length;
} piece;

static bool edit_read(edit* e) {
    const char* p = getenv("FAKECUDA_MUTATE");
    char which[TEXT];
    char* parts[PARTS] = {e->kernel, which, e->find, e->replace};
    for (int i = 0; i < PARTS; i++) {
        size_t n = p ? strcspn(p, "\n") : TEXT;
        if (n >= TEXT) {
            return false;
        }
        memcpy(parts[i], p, n);
        parts[i][n] = 0;
        p = p[n] ? p + n + 1 : p + n;
    }
    e->which = atoi(which);
    return true;
}

// Each * matches as little as possible; the last piece of the pattern must end the statement.
static bool line_matches(const char* line, size_t length, const char* pattern, piece* holes) {
    const char* end = line + length;
    const char* at = line;
    for (int hole = 0;; hole++) {
        size_t n = strcspn(pattern, "*");
        if (hole == 0) {
            if (n > length || memcmp(at, pattern, n) != 0) {
                return false;
            }
        } else {
            const char* begin = at;
            bool last = !pattern[n];
            while (at + n <= end && (memcmp(at, pattern, n) != 0 || (last && at + n != end))) {
                at++;
            }
            if (at + n > end || hole > HOLES) {
                return false;
            }
            holes[hole - 1].begin = begin;
            holes[hole - 1].length = (size_t)(at - begin);
        }
        at += n;
        if (!pattern[n]) {
            return at == end;
        }
        pattern += n + 1;
    }
}

static char* line_write(char* out, const char* replace, const piece* holes) {
    for (int hole = 0; *replace; replace++) {
        if (*replace == '*') {
            memcpy(out, holes[hole].begin, holes[hole].length);
            out += holes[hole].length;
            hole++;
        } else if (*replace == '^') { // the first one once more
            memcpy(out, holes[0].begin, holes[0].length);
            out += holes[0].length;
        } else if (*replace == '~') { // leaves one out
            hole++;
        } else {
            *out++ = *replace;
        }
    }
    return out;
}

// The length of a statement, label or brace at the beginning of a text, or of a directive's line.
static size_t statement_length(const char* text) {
    if (*text == '{' || *text == '}') {
        return 1;
    }
    size_t n = strcspn(text, *text == '$' ? ":\n" : ";\n");
    return n + (text[n] == ';' || text[n] == ':');
}

char* mutate_text(const char* ptx) {
    edit e;
    if (!edit_read(&e)) {
        return NULL;
    }
    char* text = (char*)malloc(2 * strlen(ptx) + TEXT);
    char* out = text;
    bool inside = false;
    int seen = 0;
    int edits = 0;
    for (const char* line = ptx; *line;) {
        size_t n = statement_length(line);
        static const char entry[] = ".visible .entry ";
        size_t head = sizeof entry - 1;
        if (strncmp(line, entry, head) == 0) {
            size_t name = strlen(e.kernel);
            inside = strncmp(line + head, e.kernel, name) == 0 && line[head + name] == '(';
        }
        piece holes[HOLES];
        bool matches = inside && line_matches(line, n, e.find, holes);
        seen += matches ? 1 : 0;
        if (matches && (e.which == 0 || e.which == seen)) {
            out = line_write(out, e.replace, holes);
            edits++;
        } else {
            memcpy(out, line, n);
            out += n;
        }
        *out++ = '\n';
        line += n + (line[n] == '\n');
    }
    *out = 0;
    if (edits == 0) {
        free(text);
        return NULL;
    }
    fprintf(stderr, "fakecuda: %d edits in %s\n", edits, e.kernel);
    return text;
}
