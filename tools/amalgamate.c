// amalgamate - assembles a header from its parts.
//
//   amalgamate FRAME OUTPUT         write OUTPUT from FRAME (e.g. src/qlora.h)
//   amalgamate --check FRAME OUTPUT check that OUTPUT matches FRAME
//   amalgamate --where LINE FRAME   print the part and line that a line of the output comes from
//
// A line of the frame that starts with #include "x.h" is replaced by the text of that part, once
// per part; everything else is copied. A banner (//@@ path) marks where the text of another file
// starts, and the last line contains a checksum of all lines above it. If the checksum does not
// match, the output has been edited: it is left unchanged, and the parts to edit are printed.
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_PARTS = 400, MAX_PATH = 512, END_BYTES = 26 };

typedef struct text {
    char* data;
    size_t size;
} text;

// Where a run of output lines comes from.
typedef struct run {
    char path[MAX_PATH];
    size_t line;     // line in the source
    size_t out_line; // line in the output
} run;

static text output;
static size_t lines; // in the output so far
static run runs[2 * MAX_PARTS];
static int run_count;
static char included[MAX_PARTS][MAX_PATH];
static int included_count;

static void die(const char* what, const char* name) {
    fprintf(stderr, "amalgamate: %s %s\n", what, name);
    exit(1);
}

// Reads a whole file; data is NULL if it cannot be opened.
static text file_read(const char* path) {
    text t = {NULL, 0};
    FILE* file = fopen(path, "rb");
    if (file == NULL) {
        return t;
    }
    size_t room = 1 << 16;
    t.data = malloc(room + 1);
    for (size_t n = 1; t.data != NULL && n > 0;) {
        n = fread(t.data + t.size, 1, room - t.size, file);
        t.size += n;
        if (t.size == room) {
            room *= 2;
            t.data = realloc(t.data, room + 1);
        }
    }
    if (t.data == NULL || ferror(file)) {
        die("cannot read", path);
    }
    fclose(file);
    t.data[t.size] = 0;
    return t;
}

static void put(const char* data, size_t size) {
    output.data = realloc(output.data, output.size + size + 1);
    if (output.data == NULL) {
        die("out of memory at", "a part");
    }
    memcpy(output.data + output.size, data, size);
    output.size += size;
    output.data[output.size] = 0;
    for (size_t i = 0; i < size; i++) {
        lines += data[i] == '\n';
    }
}

// The first text has none: before the check of the language, a // comment would be an error.
static void banner(const char* path, size_t line) {
    char mark[MAX_PATH + 16];
    int size = snprintf(mark, sizeof mark, "\n//@@ %s\n\n", path);
    put(mark, run_count > 0 ? (size_t)size : 0);
    if (run_count == 2 * MAX_PARTS) {
        die("too many parts at", path);
    }
    run* r = &runs[run_count++];
    snprintf(r->path, sizeof r->path, "%s", path);
    r->line = line;
    r->out_line = lines + 1;
}

static void inline_part(const char* path) {
    for (int i = 0; i < included_count; i++) {
        if (strcmp(included[i], path) == 0) {
            return;
        }
    }
    if (included_count == MAX_PARTS) {
        die("too many parts at", path);
    }
    snprintf(included[included_count++], MAX_PATH, "%s", path);
    text part = file_read(path);
    if (part.data == NULL) {
        die("cannot open the part", path);
    }
    if (part.size == 0 || part.data[part.size - 1] != '\n') {
        die("no newline at the end of", path);
    }
    if (strncmp(part.data, "#include \"", 10) == 0 || strstr(part.data, "\n#include \"") != NULL) {
        die("only the frame may include parts, not", path);
    }
    banner(path, 1);
    put(part.data, part.size);
    free(part.data);
}

static void frame_assemble(const char* frame) {
    text t = file_read(frame);
    if (t.data == NULL) {
        die("cannot open the frame", frame);
    }
    const char* slash = strrchr(frame, '/');
    int dir = slash == NULL ? 0 : (int)(slash + 1 - frame);
    bool in_frame = false;
    size_t line = 0;
    for (char* at = t.data; *at != 0;) {
        char* end = strchr(at, '\n');
        if (end == NULL) {
            die("no newline at the end of", frame);
        }
        line++;
        char name[MAX_PATH / 2];
        if (sscanf(at, "#include \"%255[^\"\n]\"", name) == 1 && strncmp(at, "#include", 8) == 0) {
            char path[MAX_PATH];
            snprintf(path, sizeof path, "%.*s%s", dir, frame, name);
            inline_part(path);
            in_frame = false;
        } else if (in_frame || end > at) { // no banner for a blank line between two parts
            if (!in_frame) {
                banner(frame, line);
                in_frame = true;
            }
            put(at, (size_t)(end + 1 - at));
        }
        at = end + 1;
    }
    free(t.data);
}

// FNV-1a over everything but the line that holds it.
static unsigned long long checksum(const char* data, size_t size) {
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < size; i++) {
        hash = (hash ^ (unsigned char)data[i]) * 1099511628211u;
    }
    return hash;
}

static void end_line(char line[END_BYTES + 1], const char* data, size_t size) {
    snprintf(line, END_BYTES + 1, "//@@ end %16.16llx\n", checksum(data, size));
}

// Returns true if the old output ends with the checksum of its own text.
static bool untouched(const text* old) {
    char line[END_BYTES + 1];
    if (old->size < END_BYTES) {
        return false;
    }
    end_line(line, old->data, old->size - END_BYTES);
    return memcmp(old->data + old->size - END_BYTES, line, END_BYTES) == 0;
}

// The source of an output line.
static const run* source_of(size_t line) {
    const run* r = NULL;
    for (int i = 0; i < run_count && runs[i].out_line <= line; i++) {
        r = &runs[i];
    }
    return r;
}

// The text after a part's banner, up to the next banner.
static text region(const char* data, const char* path, int number) {
    text t = {NULL, 0};
    char mark[MAX_PATH + 8];
    snprintf(mark, sizeof mark, "//@@ %s\n\n", path);
    const char* at = data;
    bool first = strcmp(runs[0].path, path) == 0;
    for (int i = first ? 1 : 0; at != NULL && i <= number; i++) {
        at = strstr(at, mark);
        at = at == NULL ? NULL : at + strlen(mark);
    }
    if (at != NULL) {
        const char* next = strstr(at, "\n//@@ ");
        t.data = (char*)(uintptr_t)at;
        t.size = next == NULL ? strlen(at) : (size_t)(next + 1 - at);
    }
    return t;
}

// Prints the parts whose text differs in an output that was edited.
static void edits_print(const text* old, const char* path) {
    fprintf(stderr, "amalgamate: %s is generated but was edited; make the change in:\n", path);
    for (int i = 0; i < run_count; i++) {
        int number = 0;
        for (int k = 0; k < i; k++) {
            number += strcmp(runs[k].path, runs[i].path) == 0;
        }
        text mine = region(output.data, runs[i].path, number);
        text theirs = region(old->data, runs[i].path, number);
        size_t line = runs[i].line;
        size_t n = 0;
        while (n < mine.size && n < theirs.size && mine.data[n] == theirs.data[n]) {
            line += mine.data[n++] == '\n';
        }
        if (theirs.data == NULL || n < mine.size || n < theirs.size) {
            fprintf(stderr, "  %s:%zu\n", runs[i].path, line);
        }
    }
    fprintf(stderr, "then discard the edit (git checkout -- %s) and run make again\n", path);
}

// Writes a new file under a temporary name and renames it over the old one.
static void output_write(const char* path) {
    char temporary[MAX_PATH];
    snprintf(temporary, sizeof temporary, "%s.new", path);
    FILE* file = fopen(temporary, "wb");
    if (file == NULL) {
        die("cannot write", temporary);
    }
    bool ok = fwrite(output.data, 1, output.size, file) == output.size;
    ok = fclose(file) == 0 && ok;
    // On Windows, rename does not replace an existing file.
    ok =
        ok && (rename(temporary, path) == 0 || (remove(path) == 0 && rename(temporary, path) == 0));
    if (!ok) {
        remove(temporary);
        die("cannot write", path);
    }
}

int main(int argc, char** argv) {
    bool where = argc == 4 && strcmp(argv[1], "--where") == 0;
    bool check = argc == 4 && strcmp(argv[1], "--check") == 0;
    if (!where && !check && argc != 3) {
        fprintf(stderr, "usage: amalgamate [--check] FRAME OUTPUT | --where LINE FRAME\n");
        return 2;
    }
    frame_assemble(argv[where ? 3 : argc - 2]);
    if (where) {
        size_t line = (size_t)strtoul(argv[2], NULL, 10);
        const run* r = source_of(line);
        if (r == NULL || line > lines) {
            die("the output has no line", argv[2]);
        }
        printf("%s:%zu\n", r->path, r->line + (line - r->out_line));
        return 0;
    }
    char last[END_BYTES + 1];
    end_line(last, output.data, output.size);
    put(last, END_BYTES);
    const char* path = argv[argc - 1];
    text old = file_read(path);
    if (old.data != NULL && old.size == output.size &&
        memcmp(old.data, output.data, old.size) == 0) {
        return 0;
    }
    if (old.data != NULL && !untouched(&old)) {
        edits_print(&old, path);
        return 1;
    }
    if (check) {
        die("out of date, because its parts have changed; run make headers:", path);
    }
    output_write(path);
    printf("%s: %zu lines from %d parts\n", path, lines, included_count);
    return 0;
}
