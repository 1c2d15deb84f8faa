// second.h - a second reader of JSON and CSV that shares nothing with the library, to judge what it
// accepted. It accepts RFC 8259 and nothing else, and keeps names that occur twice: as in
// Python, the last one counts. A row of a CSV file is an object whose values are strings.
#ifndef QLORA_FUZZ_SECOND_H
#define QLORA_FUZZ_SECOND_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum second_kind {
    SECOND_NULL,
    SECOND_FALSE,
    SECOND_TRUE,
    SECOND_NUMBER,
    SECOND_STRING,
    SECOND_ARRAY,
    SECOND_OBJECT
} second_kind;

// A value, and its name if it is a member of an object.
typedef struct second {
    second_kind kind;
    char* name; // of a member, decoded; ends with a zero
    size_t name_size;
    size_t line; // of a record, from 1
    char* text;  // a string, decoded, or the digits of a number; ends with a zero
    size_t size;
    bool odd; // a string with a half of a pair of surrogates, a zero, or bytes that are not UTF-8
    struct second* first; // of the elements or members
    struct second* next;
} second;

typedef struct second_reader {
    const unsigned char* at;
    const unsigned char* end;
    int depth;
} second_reader;

static void second_free(second* v) {
    while (v != NULL) {
        second* next = v->next;
        second_free(v->first);
        free(v->name);
        free(v->text);
        free(v);
        v = next;
    }
}

static second* second_new(void) {
    second* v = (second*)calloc(1, sizeof *v);
    if (v == NULL) {
        abort();
    }
    return v;
}

static void second_space(second_reader* r) {
    while (r->at < r->end && memchr(" \t\r\n", *r->at, 4) != NULL) {
        r->at++;
    }
}

static bool second_take(second_reader* r, char c) {
    bool there = r->at < r->end && *r->at == (unsigned char)c;
    r->at += there ? 1 : 0;
    return there;
}

// The four digits of \uXXXX; -1 if they are not digits.
static long second_hex(second_reader* r) {
    long value = 0;
    if (r->end - r->at < 4) {
        return -1;
    }
    for (int i = 0; i < 4; i++) {
        static const char digits[] = "0123456789abcdef";
        int c = *r->at++;
        const char* digit = c != 0 ? strchr(digits, c >= 'A' && c <= 'F' ? c + 32 : c) : NULL;
        if (digit == NULL) {
            return -1;
        }
        value = value * 16 + (digit - digits);
    }
    return value;
}

static size_t second_utf8(long code, char* out) {
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    size_t n = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (size_t i = n - 1; i > 0; i--) {
        out[i] = (char)(0x80 | (code & 0x3f));
        code >>= 6;
    }
    out[0] = (char)((0xf00 >> n & 0xff) | code);
    return n;
}

// Whether the bytes are UTF-8 without surrogates and overlong forms.
static bool second_is_utf8(const char* text, size_t size) {
    const unsigned char* s = (const unsigned char*)text;
    for (size_t i = 0; i < size;) {
        size_t n = s[i] < 0x80 ? 1 : s[i] >= 0xc2 && s[i] < 0xe0 ? 2 : s[i] >> 4 == 14 ? 3 : 4;
        long code = n == 1 ? s[i] : s[i] & (0x7f >> n);
        if ((n == 4 && (s[i] < 0xf0 || s[i] > 0xf4)) || i + n > size) {
            return false;
        }
        for (size_t k = 1; k < n; k++) {
            if (s[i + k] >> 6 != 2) {
                return false;
            }
            code = code << 6 | (s[i + k] & 0x3f);
        }
        if ((n == 3 && (code < 0x800 || (code >= 0xd800 && code < 0xe000))) ||
            (n == 4 && (code < 0x10000 || code > 0x10ffff))) {
            return false;
        }
        i += n;
    }
    return true;
}

static bool second_escape(second_reader* r, char* out, size_t* size, bool* odd) {
    static const char from[] = "\"\\/bfnrt";
    static const char to[] = "\"\\/\b\f\n\r\t";
    if (r->at == r->end) {
        return false;
    }
    char c = (char)*r->at++;
    const char* plain = c != '\0' ? strchr(from, c) : NULL;
    if (plain != NULL) {
        out[(*size)++] = to[plain - from];
        return true;
    }
    long code = c == 'u' ? second_hex(r) : -1;
    if (code < 0) {
        return false;
    }
    if (code >= 0xd800 && code < 0xdc00 && r->end - r->at >= 6 && r->at[0] == '\\' &&
        r->at[1] == 'u') {
        second_reader ahead = *r;
        ahead.at += 2;
        long low = second_hex(&ahead);
        if (low >= 0xdc00 && low < 0xe000) {
            code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
            *r = ahead;
        }
    }
    *odd = *odd || code == 0 || (code >= 0xd800 && code < 0xe000);
    *size += second_utf8(code, out + *size);
    return true;
}

static char* second_string(second_reader* r, size_t* size, bool* odd) {
    char* out = (char*)malloc((size_t)(r->end - r->at) + 8); // decoding never makes it longer
    *size = 0;
    if (out == NULL) {
        abort();
    }
    while (r->at < r->end && *r->at != '"' && *r->at >= 0x20) {
        if (*r->at != '\\') {
            out[(*size)++] = (char)*r->at++;
            continue;
        }
        r->at++;
        if (!second_escape(r, out, size, odd)) {
            break;
        }
    }
    if (!second_take(r, '"')) {
        free(out);
        return NULL;
    }
    out[*size] = '\0';
    *odd = *odd || !second_is_utf8(out, *size);
    return out;
}

static size_t second_digits(second_reader* r) {
    const unsigned char* begin = r->at;
    while (r->at < r->end && *r->at >= '0' && *r->at <= '9') {
        r->at++;
    }
    return (size_t)(r->at - begin);
}

static char* second_copy(const void* text, size_t size) {
    char* copy = (char*)calloc(size + 1, 1);
    if (copy == NULL) {
        abort();
    }
    memcpy(copy, text, size);
    return copy;
}

static bool second_number(second_reader* r, second* v) {
    const unsigned char* begin = r->at;
    (void)second_take(r, '-');
    bool zero = r->at < r->end && *r->at == '0';
    size_t digits = second_digits(r);
    bool ok = digits > 0 && !(zero && digits > 1);
    if (ok && second_take(r, '.')) {
        ok = second_digits(r) > 0;
    }
    if (ok && (second_take(r, 'e') || second_take(r, 'E'))) {
        (void)(second_take(r, '+') || second_take(r, '-'));
        ok = second_digits(r) > 0;
    }
    v->size = (size_t)(r->at - begin);
    v->text = second_copy(begin, v->size);
    return ok;
}

static bool second_value(second_reader* r, second* v);

static bool second_members(second_reader* r, second* v, char close) {
    second** last = &v->first;
    second_space(r);
    if (second_take(r, close)) {
        return true;
    }
    do {
        second* member = second_new();
        *last = member;
        last = &member->next;
        second_space(r);
        if (close == '}') {
            bool odd = false;
            member->name = second_take(r, '"') ? second_string(r, &member->name_size, &odd) : NULL;
            second_space(r);
            if (member->name == NULL || !second_take(r, ':')) {
                return false;
            }
        }
        if (!second_value(r, member)) {
            return false;
        }
        v->size++;
        second_space(r);
    } while (second_take(r, ','));
    return second_take(r, close);
}

static bool second_value(second_reader* r, second* v) {
    static const char* const words[] = {"null", "false", "true"};
    second_space(r);
    for (int i = 0; i < 3; i++) {
        size_t n = strlen(words[i]);
        if ((size_t)(r->end - r->at) >= n && memcmp(r->at, words[i], n) == 0) {
            v->kind = (second_kind)i;
            r->at += n;
            return true;
        }
    }
    if (second_take(r, '"')) {
        v->kind = SECOND_STRING;
        v->text = second_string(r, &v->size, &v->odd);
        return v->text != NULL;
    }
    if (r->depth < 500 && (second_take(r, '[') || second_take(r, '{'))) {
        bool object = r->at[-1] == '{';
        v->kind = object ? SECOND_OBJECT : SECOND_ARRAY;
        r->depth++;
        bool ok = second_members(r, v, object ? '}' : ']');
        r->depth--;
        return ok;
    }
    v->kind = SECOND_NUMBER;
    return second_number(r, v);
}

// NULL if the text is not JSON.
static second* second_read(const void* text, size_t size) {
    second_reader r = {(const unsigned char*)text, (const unsigned char*)text + size, 0};
    second* v = second_new();
    bool ok = second_value(&r, v);
    second_space(&r);
    if (!ok || r.at != r.end) {
        second_free(v);
        return NULL;
    }
    return v;
}

static size_t second_lines(const unsigned char* from, const unsigned char* to) {
    size_t lines = 0;
    for (; from < to; from++) {
        lines += *from == '\n' ? 1 : 0;
    }
    return lines;
}

// The records of JSON lines, of a list, or of the list "data" of an object, one after another; NULL
// if there are none, and *ok = false if the text is something else.
static second* second_records(const void* text, size_t size, bool* ok) {
    const unsigned char* begin = (const unsigned char*)text;
    bool mark = size >= 3 && memcmp(begin, "\xEF\xBB\xBF", 3) == 0;
    second_reader r = {begin + (mark ? 3 : 0), begin + size, 0};
    second* all = NULL;
    second** last = &all;
    bool list = false;
    second_space(&r);
    list = second_take(&r, '[');
    *ok = true;
    second_space(&r);
    while (*ok && r.at < r.end && !(list && *r.at == ']')) {
        second* v = second_new();
        v->line = 1 + second_lines(begin, r.at);
        *last = v;
        last = &v->next;
        *ok = second_value(&r, v);
        second_space(&r);
        if (list && *ok && r.at < r.end && *r.at != ']') {
            *ok = second_take(&r, ',');
            second_space(&r);
            *ok = *ok && r.at < r.end && *r.at != ']';
        }
    }
    if (list && *ok) {
        *ok = second_take(&r, ']');
        second_space(&r);
        *ok = *ok && r.at == r.end;
    }
    return all;
}

// ---- CSV

// One field; *more = false after the last one of its row.
static char* second_field(second_reader* r, size_t* size, bool* more) {
    char* out = second_copy(r->at, (size_t)(r->end - r->at));
    bool quoted = second_take(r, '"');
    *size = 0;
    while (r->at < r->end) {
        if (quoted && *r->at == '"') {
            r->at++;
            if (!second_take(r, '"')) {
                break;
            }
            out[(*size)++] = '"';
        } else if (!quoted && memchr(",\r\n", *r->at, 3) != NULL) {
            break;
        } else {
            out[(*size)++] = (char)*r->at++;
        }
    }
    out[*size] = '\0';
    *more = second_take(r, ',');
    if (!*more && second_take(r, '\r')) {
        (void)second_take(r, '\n');
    } else if (!*more) {
        (void)second_take(r, '\n');
    }
    return out;
}

// A row of the text that starts at `begin`, its fields without names. Empty lines are skipped; NULL
// at the end.
static second* second_row(second_reader* r, const unsigned char* begin) {
    second* row = second_new();
    second** last = &row->first;
    bool more = true;
    while (r->at < r->end && memchr("\r\n", *r->at, 2) != NULL) {
        r->at++;
    }
    row->line = 1 + second_lines(begin, r->at);
    for (const unsigned char* c = begin; c < r->at; c++) {
        row->line += *c == '\r' && c[1] != '\n' ? 1 : 0;
    }
    if (r->at == r->end) {
        second_free(row);
        return NULL;
    }
    row->kind = SECOND_OBJECT;
    while (more) {
        second* v = second_new();
        v->kind = SECOND_STRING;
        v->text = second_field(r, &v->size, &more);
        v->odd = !second_is_utf8(v->text, v->size);
        *last = v;
        last = &v->next;
        row->size++;
    }
    return row;
}

// The rows of a CSV file as records; *ok = false if a row does not fit the header.
static second* second_rows(const void* text, size_t size, bool* ok) {
    const unsigned char* begin = (const unsigned char*)text;
    bool mark = size >= 3 && memcmp(begin, "\xEF\xBB\xBF", 3) == 0;
    second_reader r = {begin + (mark ? 3 : 0), begin + size, 0};
    second* header = second_row(&r, begin);
    second* all = NULL;
    second** last = &all;
    *ok = true;
    second* row = header != NULL ? second_row(&r, begin) : NULL;
    for (; row != NULL; row = second_row(&r, begin)) {
        second* v = row->first;
        for (second* name = header->first; name != NULL && v != NULL; name = name->next) {
            v->name = second_copy(name->text, name->size);
            v->name_size = name->size;
            v = v->next;
        }
        *ok = *ok && row->size == header->size;
        *last = row;
        last = &row->next;
    }
    second_free(header);
    return all;
}

// ---- looking

// The last member of this name, unless it is null; NULL if there is none.
static second* second_find(second* object, const char* name) {
    second* found = NULL;
    second* v = object != NULL && object->kind == SECOND_OBJECT ? object->first : NULL;
    for (; v != NULL; v = v->next) {
        found = v->name_size == strlen(name) && strcmp(v->name, name) == 0 ? v : found;
    }
    return found != NULL && found->kind != SECOND_NULL ? found : NULL;
}

static bool second_is(const second* v, second_kind kind) {
    return v != NULL && v->kind == kind;
}

// A whole number, written as one.
static bool second_int(const second* v, long long* out) {
    if (!second_is(v, SECOND_NUMBER) || strpbrk(v->text, ".eE") != NULL || v->size > 18) {
        return false;
    }
    *out = strtoll(v->text, NULL, 10);
    return true;
}

#endif
