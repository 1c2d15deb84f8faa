// options.h - the command lines of generate, merge and plan: a table of options, read and printed.
//
// Define PROGRAM, the program's name, and include qlora.h before including this file.
#ifndef OPTIONS_H
#define OPTIONS_H

#include <ctype.h>
#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "messages.h"

#if defined(__GNUC__)
#define PRINTF(a, b) __attribute__((format(printf, a, b)))
#else
#define PRINTF(a, b)
#endif

// Prints an error message; returns false, so that a function can end with it.
PRINTF(1, 2)
static bool fail(const char* format, ...) {
    va_list args;
    va_start(args, format);
    fprintf(stderr, PROGRAM ": ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    return false;
}

typedef struct option {
    const char* name;
    const char* words; // choices a|b|c, or the value's name in the help; NULL for a flag
    bool* flag;        // exactly one of these four is set
    const char** text;
    int* choice;
    double* number;
    double low; // range of a number
    double high;
    const char* help;
} option;

#define FLAG(name, at, help)                                                                       \
    { name, NULL, at, NULL, NULL, NULL, 0, 0, help }
#define TEXT(name, words, at, help)                                                                \
    { name, words, NULL, at, NULL, NULL, 0, 0, help }
#define CHOICE(name, words, at, help)                                                              \
    { name, words, NULL, NULL, at, NULL, 0, 0, help }
#define NUMBER(name, words, at, low, high, help)                                                   \
    { name, words, NULL, NULL, NULL, at, low, high, help }

// X: any number; SIZE: an integer with an optional suffix K, M, G or T; otherwise an integer.
static bool number_read(const option* row, const char* value, double* out) {
    char* end = NULL;
    double x = strtod(value, &end);
    const char* units = "KMGT";
    const char* unit = strcmp(row->words, "SIZE") == 0 && end != value && *end != '\0'
                           ? strchr(units, toupper((unsigned char)*end))
                           : NULL;
    if (unit != NULL) {
        x *= pow(1024.0, (double)(unit - units + 1));
        end++;
    }
    bool whole = strcmp(row->words, "X") != 0;
    if (end == value || *end != '\0' || !(x >= row->low && x <= row->high) ||
        (whole && x != floor(x))) {
        return false;
    }
    *out = x;
    return true;
}

static bool choice_read(const option* row, const char* value, int* out) {
    const char* at = row->words;
    for (int i = 0; *at != '\0'; i++) {
        size_t length = strcspn(at, "|");
        if (strlen(value) == length && strncmp(at, value, length) == 0) {
            *out = i;
            return true;
        }
        at += length + (at[length] == '|' ? 1 : 0);
    }
    return false;
}

static bool option_read(const option* row, const char* value) {
    if (row->text != NULL) {
        *row->text = value;
        return true;
    }
    return row->choice != NULL ? choice_read(row, value, row->choice)
                               : number_read(row, value, row->number);
}

static bool value_refuse(const option* row, const char* value) {
    if (row->number == NULL) {
        return fail("--%s: '%s' is not one of %s", row->name, value, row->words);
    }
    char low[32];
    char high[32];
    bool size = strcmp(row->words, "SIZE") == 0;
    return fail("--%s: '%s' is not a %s from %s to %s", row->name, value,
                size                           ? "size"
                : strcmp(row->words, "X") == 0 ? "number"
                                               : "whole number",
                limit_text(row->low, size, low), limit_text(row->high, size, high));
}

static bool options_read(const option* table, size_t count, int argc, char** argv) {
    for (int i = 1; i < argc; i++) {
        const char* word = strcmp(argv[i], "-h") == 0 ? "--help" : argv[i];
        const option* row = NULL;
        for (size_t j = 0; j < count; j++) {
            row = strncmp(word, "--", 2) == 0 && strcmp(word + 2, table[j].name) == 0 ? &table[j]
                                                                                      : row;
        }
        if (row == NULL && strcmp(word, "--version") == 0) {
            printf(PROGRAM " (qlora.h) " QLORA_VERSION_STRING "\n");
            exit(0);
        }
        if (row == NULL) {
            return fail(word[0] == '-' ? "unknown option %s; see --help"
                                       : "unexpected argument '%s'; options start with --",
                        word);
        }
        if (row->flag != NULL) {
            *row->flag = true;
            continue;
        }
        if (i + 1 == argc) {
            return fail("%s needs a value: %s", word, row->words);
        }
        if (!option_read(row, argv[++i])) {
            return value_refuse(row, argv[i]);
        }
    }
    return true;
}

static void options_print(const option* table, size_t count) {
    for (size_t i = 0; i < count; i++) {
        char left[64];
        snprintf(left, sizeof left, "--%s %s", table[i].name,
                 table[i].words != NULL ? table[i].words : "");
        help_row(left, 31, table[i].help);
    }
    printf("  %-28s %s\n", "--version", "print the version");
}

#endif
