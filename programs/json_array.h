// json_array.h - JSON arrays on the command line: the elements of one, whole numbers, strings.
//
// A reader stands at a place in a text that ends with a zero byte. Every function returns false
// after a fault and says in `wrong` what was expected there.
#ifndef JSON_ARRAY_H
#define JSON_ARRAY_H

#include "blob.h"

#include <limits.h>
#include <stdint.h>

typedef struct json_reader {
    const char* at;
    const char* end;
    const char* wrong;
} json_reader;

static inline json_reader json_start(const char* text, size_t size) {
    json_reader r = {text, text + size, NULL};
    if (size >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0) { // a byte order mark
        r.at += 3;
    }
    return r;
}

static inline bool json_wrong(json_reader* r, const char* what) {
    r->wrong = what;
    return false;
}

static inline void json_space(json_reader* r) {
    while (r->at < r->end && strchr(" \t\r\n", *r->at) != NULL && *r->at != 0) {
        r->at++;
    }
}

static inline bool json_take(json_reader* r, char c) {
    json_space(r);
    if (r->at < r->end && *r->at == c) {
        r->at++;
        return true;
    }
    return false;
}

// Before element `index` of an array, or past its end: *more says which.
static inline bool json_next(json_reader* r, size_t index, bool* more) {
    *more = false;
    if (index == 0 && !json_take(r, '[')) {
        return json_wrong(r, "an array was expected");
    }
    if (json_take(r, ']')) {
        return true;
    }
    if (index > 0 && !json_take(r, ',')) {
        return json_wrong(r, "',' or ']' was expected");
    }
    json_space(r);
    *more = true;
    return true;
}

static inline bool json_end(json_reader* r) {
    json_space(r);
    return r->at == r->end || json_wrong(r, "something follows the array");
}

static inline bool json_int32(json_reader* r, int32_t* out) {
    bool minus = r->at < r->end && *r->at == '-';
    const char* digits = r->at + (minus ? 1 : 0);
    const char* p = digits;
    int64_t value = 0;
    for (; p < r->end && *p >= '0' && *p <= '9' && value <= INT32_MAX; p++) {
        value = value * 10 + (*p - '0');
    }
    bool whole = p == r->end || strchr(",] \t\r\n", *p) != NULL;
    if (p == digits || !whole || (*digits == '0' && p > digits + 1) || value > INT32_MAX) {
        return json_wrong(r, "a whole number of 32 bits was expected");
    }
    *out = (int32_t)(minus ? -value : value);
    r->at = p;
    return true;
}

// Four hexadecimal digits, or 0x10000.
static inline uint32_t json_hex(const json_reader* r) {
    uint32_t value = 0;
    for (int i = 0; i < 4; i++) {
        const char* digits = "0123456789abcdefABCDEF";
        const char* digit = r->at + i < r->end && r->at[i] != 0 ? strchr(digits, r->at[i]) : NULL;
        if (digit == NULL) {
            return 0x10000u;
        }
        uint32_t d = (uint32_t)(digit - digits);
        value = value * 16 + (d > 15 ? d - 6 : d);
    }
    return value;
}

static inline bool json_code(json_reader* r, blob* out) {
    uint32_t code = json_hex(r);
    bool digits = code < 0x10000u;
    r->at += digits ? 4 : 0;
    if (code >= 0xD800 && code < 0xDC00 && r->end - r->at >= 6 && memcmp(r->at, "\\u", 2) == 0) {
        r->at += 2;
        uint32_t low = json_hex(r);
        r->at += low < 0x10000u ? 4 : 0;
        code = low >= 0xDC00 && low < 0xE000 ? 0x10000u + ((code - 0xD800) << 10) + (low - 0xDC00)
                                             : 0xD800;
    }
    if (!digits || (code >= 0xD800 && code < 0xE000)) {
        return json_wrong(r, "\\u without a character");
    }
    char bytes[4];
    size_t n = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    static const unsigned char lead[5] = {0, 0, 0xC0, 0xE0, 0xF0};
    for (size_t i = n; i > 1; i--) {
        bytes[i - 1] = (char)(unsigned char)(0x80 | (code & 0x3F));
        code >>= 6;
    }
    bytes[0] = (char)(unsigned char)(lead[n] | code);
    return blob_add(out, bytes, n) || json_wrong(r, "out of memory");
}

// Appends the bytes of a string. They are taken as they are: UTF-8 is not checked here.
static inline bool json_string(json_reader* r, blob* out) {
    if (r->at >= r->end || *r->at != '"') {
        return json_wrong(r, "a string was expected");
    }
    r->at++;
    while (r->at < r->end && *r->at != '"') {
        static const char from[] = "\"\\/bfnrt";
        static const char to[] = "\"\\/\b\f\n\r\t";
        char c = *r->at++;
        if ((unsigned char)c < 0x20) {
            return json_wrong(r, "control character in a string");
        }
        if (c == '\\') {
            char kind = r->at < r->end ? *r->at++ : '\0';
            const char* escape = kind != '\0' ? strchr(from, kind) : NULL;
            if (kind == 'u') {
                if (!json_code(r, out)) {
                    return false;
                }
                continue;
            }
            if (escape == NULL) {
                return json_wrong(r, "unknown escape in a string");
            }
            c = to[escape - from];
        }
        if (!blob_add(out, &c, 1)) {
            return json_wrong(r, "out of memory");
        }
    }
    return r->at < r->end ? (r->at++, true) : json_wrong(r, "string without its closing quote");
}

// Passes over a value of any kind. What is inside arrays and objects is not checked.
static inline bool json_skip(json_reader* r) {
    size_t depth = 0;
    do {
        json_space(r);
        if (r->at == r->end || (depth == 0 && strchr("]},:", *r->at) != NULL)) {
            return json_wrong(r, "a value was expected");
        }
        char c = *r->at;
        if (c == '"') {
            blob ignored;
            memset(&ignored, 0, sizeof ignored);
            bool ok = json_string(r, &ignored);
            blob_free(&ignored);
            if (!ok) {
                return false;
            }
        } else if (strchr("[]{},:", c) != NULL) {
            depth += c == '[' || c == '{' ? 1 : 0;
            depth -= c == ']' || c == '}' ? 1 : 0;
            r->at++;
        } else { // a number, true, false or null
            while (r->at < r->end && strchr(" \t\r\n[]{},:\"", *r->at) == NULL) {
                r->at++;
            }
        }
    } while (depth > 0);
    return true;
}

// Writes one string. False when out of memory.
static inline bool json_quote(const char* text, size_t size, blob* out) {
    bool ok = blob_add(out, "\"", 1);
    for (size_t i = 0; ok && i < size; i++) {
        unsigned char c = (unsigned char)text[i];
        char escape[8];
        if (c == '"' || c == '\\') {
            ok = blob_add(out, "\\", 1) && blob_add(out, text + i, 1);
        } else if (c < 0x20 || c == 0x7F) {
            snprintf(escape, sizeof escape, "\\u%04x", c);
            ok = blob_add(out, escape, 6);
        } else {
            ok = blob_add(out, text + i, 1);
        }
    }
    return ok && blob_add(out, "\"", 1);
}

#endif
