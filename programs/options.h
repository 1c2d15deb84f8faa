// options.h - the command lines of all programs: one table per program, read and printed.
//
// A row names an option, its kind and its place in the program's struct of options. Every program
// takes --name value and --name=value, suggests the nearest option for an unknown one, and reads
// sizes in the same way. Errors are written into a buffer of 1024 bytes; the caller prints them.
#ifndef OPTIONS_H
#define OPTIONS_H

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "messages.h"
#include "other_names.h"

// What --length max and the like give, if the words of an OPT_WHOLE are "N|max".
#define OPTION_MAX ((int64_t)1 << 53)

#define OPTION_TEXTS 64 // how often an option of the kind OPT_TEXTS can be given

typedef struct option_texts {
    const char* items[OPTION_TEXTS];
    int64_t count;
} option_texts;

typedef enum option_kind { // and the type of the field
    OPT_HEADING,           // a heading in the help
    OPT_ARGUMENT,          // const char*: the argument without a name
    OPT_TEXT,              // const char*: not empty
    OPT_ANY_TEXT,          // const char*: may be empty
    OPT_TEXTS,             // option_texts: may be repeated
    OPT_WHOLE,             // int64_t
    OPT_SIZE,              // int64_t: bytes, see size_read
    OPT_REAL,              // double
    OPT_FLAG,              // bool
    OPT_CHOICE,            // int64_t: the index of one of `words`
    OPT_TARGETS            // int64_t: the bits of qlora_target
} option_kind;

typedef struct option {
    const char* name;
    option_kind kind;
    size_t offset; // of the field in the struct of options
    bool fixed;    // finetune: a resumed run must use the same value
    double low;    // range of a number
    double high;
    const char* words; // the choices a|b|c, or the value's name in the help
    const char* help;
} option;

// The table of one program and the struct that it fills.
typedef struct option_set {
    const option* rows;
    size_t count;
    void* values;
} option_set;

// Words for bits of qlora_target, which programs without qlora.h do not know: finetune compares
// them. The last one stands for several of the others.
#define OPTION_ALL_TARGETS 6655

static const struct {
    const char* name;
    int64_t bits;
} option_targets[] = {{"q", 1},
                      {"k", 2},
                      {"v", 4},
                      {"o", 8},
                      {"gate", 16},
                      {"up", 32},
                      {"down", 64},
                      {"qkv", 128},
                      {"gate_up", 256},
                      {"experts", 6144},
                      {"router", 8192},
                      {"shared_gate", 16384},
                      {"attention", 32768}};
#define OPTION_TARGETS ((int)(sizeof option_targets / sizeof option_targets[0]))

static inline const option* option_find(const option_set* set, const char* name, size_t length) {
    for (size_t i = 0; i < set->count; i++) {
        const option* row = &set->rows[i];
        if (row->kind != OPT_HEADING && row->kind != OPT_ARGUMENT && strlen(row->name) == length &&
            strncmp(row->name, name, length) == 0) {
            return row;
        }
    }
    return NULL;
}

// ---- an unknown option ------------------------------------------------------------------------

// The cost of getting from one word to the other: 2 for a letter that is changed, added or dropped,
// 1 for two neighbours that are exchanged, so that --modle is nearer to --model than to --mode.
static inline size_t word_distance(const char* a, const char* b) {
    size_t rows[3][32];
    size_t width = strlen(b) < 31 ? strlen(b) : 31;
    for (size_t j = 0; j <= width; j++) {
        rows[0][j] = 2 * j;
    }
    for (size_t i = 1; a[i - 1] != '\0'; i++) {
        size_t* now = rows[i % 3];
        const size_t* before = rows[(i + 2) % 3];
        const size_t* two_before = rows[(i + 1) % 3];
        now[0] = 2 * i;
        for (size_t j = 1; j <= width; j++) {
            size_t best = before[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 2);
            best = before[j] + 2 < best ? before[j] + 2 : best;
            best = now[j - 1] + 2 < best ? now[j - 1] + 2 : best;
            bool exchanged = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
            now[j] = exchanged && two_before[j - 2] + 1 < best ? two_before[j - 2] + 1 : best;
        }
    }
    return rows[strlen(a) % 3][width];
}

// The name that is nearest to a word, or NULL if none is near: one letter in four may differ, but
// at least one. A word that begins with a name, or the other way round, is also near.
static inline const char* option_nearest(const option_set* set, const char* word) {
    const char* nearest = NULL;
    size_t length = strlen(word);
    size_t allowed = length < 8 ? 2 : 4;
    size_t distance = allowed + 1;
    for (size_t i = 0; i < set->count; i++) {
        const option* row = &set->rows[i];
        size_t name = row->kind == OPT_HEADING || row->kind == OPT_ARGUMENT ? 0 : strlen(row->name);
        size_t shorter = name < length ? name : length;
        size_t d = name > 0 ? word_distance(word, row->name) : SIZE_MAX;
        if (shorter >= 3 && d > allowed && strncmp(word, row->name, shorter) == 0) {
            d = allowed;
        }
        if (d < distance) {
            nearest = row->name;
            distance = d;
        }
    }
    return nearest;
}

// Advice about a name that is no option: ours, if others use it, or the nearest; "" if there is
// none. `dashes` stands before our name.
static inline const char* option_advice(const option_set* set, const char* given,
                                        const char* dashes, char out[256]) {
    char word[64];
    snprintf(word, sizeof word, "%s", given);
    for (size_t i = 0; word[i] != '\0'; i++) {
        word[i] = word[i] == '_' ? '-' : word[i];
    }
    const char* ours = option_find(set, word, strlen(word)) != NULL ? word : NULL;
    for (size_t i = 0; i < OTHER_NAMES && ours == NULL; i++) {
        const other_name* row = &other_names[i];
        if (strcmp(row->theirs, word) == 0 && option_find(set, row->ours, strlen(row->ours))) {
            ours = row->ours;
            if (row->note != NULL) {
                snprintf(out, 256, "; %s", row->note);
                return out;
            }
        }
    }
    ours = ours != NULL ? ours : option_nearest(set, word);
    snprintf(out, 256, "; did you mean %s%s?", dashes, ours != NULL ? ours : "");
    return ours != NULL ? out : "";
}

static inline bool option_unknown(const option_set* set, const char* word, char error[1024]) {
    char name[64];
    char hint[256];
    if (word[0] != '-' || word[1] == '\0') {
        return error_set(error, "unexpected argument '%s'; options start with --", word);
    }
    snprintf(name, sizeof name, "%.*s", (int)strcspn(word, "="), word);
    // -model is meant as --model
    const char* found = option_advice(set, name + strspn(name, "-"), "--", hint);
    return error_set(error, "unknown option %s%s", name, found[0] != '\0' ? found : "; see --help");
}

// ---- values -----------------------------------------------------------------------------------

// The unit after a number, in any case: K, M, G, T and KiB, MiB, ... are powers of 1024, and KB,
// MB, ... powers of 1000. B is one byte. False for anything else.
static inline bool size_unit(const char* unit, double* factor) {
    static const char letters[] = "kmgt";
    *factor = 1.0;
    if (tolower((unsigned char)unit[0]) == 'b' && unit[1] == '\0') {
        return true;
    }
    const char* letter = strchr(letters, tolower((unsigned char)unit[0]));
    if (unit[0] == '\0' || letter == NULL) {
        return unit[0] == '\0';
    }
    char rest[3] = {0, 0, 0};
    for (size_t i = 0; i < 2 && unit[1 + i] != '\0'; i++) {
        rest[i] = (char)tolower((unsigned char)unit[1 + i]);
    }
    bool decimal = strcmp(rest, "b") == 0;
    bool binary = rest[0] == '\0' || strcmp(rest, "ib") == 0;
    *factor = pow(decimal ? 1000.0 : 1024.0, (double)(letter - letters + 1));
    return (decimal || binary) && strlen(unit) <= 3;
}

static inline bool number_read(const option* row, const char* text, double* out, char error[1024]) {
    char* end = NULL;
    double factor = 1.0;
    bool size = row->kind == OPT_SIZE;
    if (row->kind == OPT_WHOLE && strcmp(text, "max") == 0 && strcmp(row->words, "N|max") == 0) {
        *out = (double)OPTION_MAX;
        return true;
    }
    errno = 0;
    double value = strtod(text, &end);
    while (size && end != text && *end == ' ') {
        end++;
    }
    bool read = end != text && errno == 0 && (size ? size_unit(end, &factor) : *end == '\0');
    if (!read) {
        return error_set(error,
                         size ? "--%s: '%s' is not a size such as 8G, 8GiB or 8GB"
                              : "--%s: '%s' is not a number",
                         row->name, text);
    }
    value *= factor;
    value = size ? floor(value) : value; // 1.5G is fine
    if (row->kind == OPT_WHOLE && value != floor(value)) {
        return error_set(error, "--%s: '%s' is not a whole number", row->name, text);
    }
    if (!(value >= row->low && value <= row->high)) {
        char low[32];
        char high[32];
        return error_set(error, "--%s: %s is out of range; use %s to %s", row->name, text,
                         limit_text(row->low, size, low), limit_text(row->high, size, high));
    }
    *out = value;
    return true;
}

static inline bool choice_read(const option* row, const char* text, int64_t* out,
                               char error[1024]) {
    const char* at = row->words;
    for (int64_t number = 0; *at != '\0'; number++) {
        size_t length = strcspn(at, "|");
        if (strlen(text) == length && strncmp(at, text, length) == 0) {
            *out = number;
            return true;
        }
        at += length;
        at += *at == '|' ? 1 : 0;
    }
    return error_set(error, "--%s: '%s' is not one of %s", row->name, text, row->words);
}

static inline bool targets_read(const option* row, const char* text, int64_t* out,
                                char error[1024]) {
    const int64_t all = OPTION_ALL_TARGETS;
    int64_t bits = strcmp(text, "all") == 0 ? all : 0;
    for (const char* at = text; bits != all && *at != '\0';) {
        size_t length = strcspn(at, ",");
        size_t stem = length > 5 && strncmp(at + length - 5, "_proj", 5) == 0 ? length - 5 : length;
        int64_t bit = 0;
        for (int i = 0; i < OPTION_TARGETS; i++) {
            const char* name = option_targets[i].name;
            bool same = strlen(name) == stem && strncmp(name, at, stem) == 0;
            bit |= same ? option_targets[i].bits : 0;
        }
        if (bit == 0) {
            return error_set(error,
                             "--%s: '%.*s' is not one of q, k, v, o, gate, up, down, qkv, gate_up, "
                             "attention, experts, router, shared_gate; all stands for all of them "
                             "but the last two",
                             row->name, (int)length, at);
        }
        bits |= bit;
        at += length;
        at += *at == ',' ? 1 : 0;
    }
    *out = bits;
    return bits != 0 ||
           error_set(error, "--%s needs a value: all, or some of q,k,v,o,gate,up,down,qkv,gate_up",
                     row->name);
}

static inline void* option_at(const option_set* set, const option* row) {
    return (char*)set->values + row->offset;
}

// Stores a value that is given as text.
static inline bool option_store(const option_set* set, const option* row, const char* text,
                                char error[1024]) {
    void* at = option_at(set, row);
    option_texts* list = (option_texts*)at;
    double number = 0.0;
    if (text[0] == '\0' && row->kind != OPT_ANY_TEXT) {
        return error_set(error, "--%s needs a non-empty value", row->name);
    }
    switch (row->kind) {
    case OPT_ARGUMENT:
    case OPT_TEXT:
    case OPT_ANY_TEXT:
        *(const char**)at = text;
        return true;
    case OPT_TEXTS:
        if (list->count == OPTION_TEXTS) {
            return error_set(error, "--%s can be given at most %d times", row->name, OPTION_TEXTS);
        }
        list->items[list->count++] = text;
        return true;
    case OPT_CHOICE:
        return choice_read(row, text, (int64_t*)at, error);
    case OPT_TARGETS:
        return targets_read(row, text, (int64_t*)at, error);
    case OPT_REAL:
        return number_read(row, text, (double*)at, error);
    default:
        if (!number_read(row, text, &number, error)) {
            return false;
        }
        *(int64_t*)at = (int64_t)number;
        return true;
    }
}

// ---- the command line -------------------------------------------------------------------------

// The argument without a name, if the program takes one and has not been given it yet.
static inline const option* option_argument(const option_set* set, const char* word) {
    for (size_t i = 0; i < set->count && (word[0] != '-' || word[1] == '\0'); i++) {
        const option* row = &set->rows[i];
        if (row->kind == OPT_ARGUMENT && *(const char**)option_at(set, row) == NULL) {
            return row;
        }
    }
    return NULL;
}

// Reads the words from `first` on.
static inline bool options_read(const option_set* set, int first, int argc, char** argv,
                                char error[1024]) {
    for (int i = first; i < argc; i++) {
        const char* word = strcmp(argv[i], "-h") == 0 ? "--help" : argv[i];
        const option* argument = option_argument(set, word);
        if (argument != NULL) {
            if (!option_store(set, argument, word, error)) {
                return false;
            }
            continue;
        }
        const char* equals = strchr(word, '=');
        size_t length = equals != NULL ? (size_t)(equals - word) : strlen(word);
        const option* row = length > 2 && strncmp(word, "--", 2) == 0
                                ? option_find(set, word + 2, length - 2)
                                : NULL;
        if (row == NULL) {
            return option_unknown(set, word, error);
        }
        if (row->kind == OPT_FLAG) {
            if (equals != NULL) {
                return error_set(error, "--%s does not take a value", row->name);
            }
            *(bool*)option_at(set, row) = true;
            continue;
        }
        if (equals == NULL && i + 1 == argc) {
            return error_set(error, "--%s needs a value: %s", row->name, row->words);
        }
        if (!option_store(set, row, equals != NULL ? equals + 1 : argv[++i], error)) {
            return false;
        }
    }
    return true;
}

static inline void option_print(const option* row, int indent) {
    char left[64];
    bool named = row->kind != OPT_ARGUMENT;
    snprintf(left, sizeof left, "%s%s%s%s", named ? "--" : "", named ? row->name : "",
             named && row->words[0] != '\0' ? " " : "", row->words);
    help_row(left, indent, row->help);
}

static inline bool name_in(const char* const* names, const char* name) { // NULL ends the names
    for (; names != NULL && *names != NULL; names++) {
        if (strcmp(*names, name) == 0) {
            return true;
        }
    }
    return false;
}

// The rows of --help, with the descriptions from column `indent` on: first those that matter most,
// in their own order, if there are any, then the others.
static inline void options_print(const option_set* set, const char* const* first, int indent) {
    for (const char* const* name = first; name != NULL && *name != NULL; name++) {
        const option* row = option_find(set, *name, strlen(*name));
        if (row != NULL) {
            option_print(row, indent);
        }
    }
    for (size_t i = 0; i < set->count; i++) {
        const option* row = &set->rows[i];
        if (row->kind == OPT_HEADING) {
            printf("\n%s\n", row->name);
        } else if (!name_in(first, row->name)) {
            option_print(row, indent);
        }
    }
}

#endif
