// tokens.c - how texts are split: the regular expressions of pre-tokenizers.

#define QLORA_STATIC
#define QLORA_TEXT_IMPLEMENTATION
#include "qlora_text.h"

#include "test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

SUITE_EXTERN(tokens_suite);

#define OK(call) ((call) == QLORA_OK)

static qlora_text* lib;
static uint8_t* classes;

static qlora__text_view view_of(const char* text, size_t size) {
    qlora__text_view view;
    memset(&view, 0, sizeof view);
    view.s = (const unsigned char*)text;
    view.end = size;
    view.classes = classes;
    return view;
}

// ---- what an expression matches ----

// The matches of a pattern in a text, joined with '|'; "!" and the message if it is refused.
static const char* matches_of(const char* pattern, const char* text, char* out, size_t room) {
    qlora__pattern* p = NULL;
    qlora__text_view view = view_of(text, strlen(text));
    size_t used = 0;
    out[0] = '\0';
    lib->env.call = NULL;
    if (!OK(qlora__pattern_compile(&lib->env, pattern, strlen(pattern), classes, &p))) {
        snprintf(out, room, "! %.500s", lib->env.error);
        return out;
    }
    qlora__pattern_allow(p, view.end);
    for (size_t at = 0; at < view.end;) {
        size_t end = at;
        if (!OK(qlora__pattern_match(&lib->env, p, &view, 0, at, &end))) {
            snprintf(out, room, "! %s", lib->env.error);
            break;
        }
        if (end > at) {
            qlora__append(out, room, &used, "%s%.*s", used > 0 ? "|" : "", (int)(end - at),
                          text + at);
        }
        at = end > at ? end : at + 1;
    }
    qlora__pattern_free(&lib->env, p);
    return out;
}

TEST expressions(void) {
    static const char* const rows[][3] = {
        {"a", "banana", "a|a|a"},
        {"an|ana", "banana", "an|an"}, // the first alternative that fits, not the longest
        {"ana|an", "banana", "ana"},
        {"a+", "aaab", "aaa"},
        {"a+?", "aaab", "a|a|a"},
        {"a*b", "aaab", "aaab"},
        {"a*?b", "aaab", "aaab"},
        {"a{2}", "aaaaa", "aa|aa"},
        {"a{2,3}", "aaaaa", "aaa|aa"},
        {"a{2,3}?", "aaaaa", "aa|aa"},
        {"a{,2}b", "aaab", "aab"},
        {"a{2,}", "abaaa", "aaa"},
        {"a{x}", "a{x}", "a{x}"}, // not a count: literal
        {"(?:ab)+", "ababa", "abab"},
        {"(?:ab){2}", "abababab", "abab|abab"},
        {"(ab|c){2,3}", "abcabc", "abcab"},
        {"(?:ab)*c", "ababc", "ababc"},
        {"(?:ab)?c", "abcc", "abc|c"},
        {"(?:ab)+?c", "ababc", "ababc"},
        {"(?:a|ab)(?:c|bcd)", "abcd", "abcd"},
        {"(?>a|ab)c", "abc", ""}, // no way back into an atomic group
        {"(?:a|ab)c", "abc", "abc"},
        {"a++a", "aaa", ""},
        {"a?+a", "a", ""},
        {"(?:ab)*+ab", "abab", ""},
        {"[^b]+", "aabca", "aa|ca"},
        {"[a-c]+", "abdc", "ab|c"},
        {"[]a]+", "a]b", "a]"},
        {"[a-]+", "-a-b", "-a-"},
        {"[\\d\\s]+", "1 2a3", "1 2|3"},
        {".+", "ab\ncd", "ab|cd"},
        {"\\s+(?!\\S)", "a   b  ", "  |  "},
        {"\\w+(?=!)", "hey! you", "hey"},
        {"a(?!b)", "abac", "a"},
        {"a(?!b|c)", "abacad", "a"},
        {"\\d{1,3}(?=(?:\\d{3})*\\b)", "1234567 12", "1|234|567|12"},
        {"(?=(?:\\d{3})+(?!\\d))\\d{3}", "1234567", "234|567"},
        {"(?i:'S|'re)", "it's IT'RE", "'s|'RE"},
        {"(?i:k)", "\xE2\x84\xAAk", "\xE2\x84\xAA|k"}, // the Kelvin sign
        {"^a", "aa\na", "a|a"},
        {"a$", "aa\na", "a|a"},
        {"\\Aa", "aa\na", "a"},
        {"a\\z", "aa\na", "a"},
        {"\\bb\\w*", "ab bc", "bc"},
        {"\\Bb", "ab b", "b"},
        {"\\x41|\\u0042|\\x{43}", "ABC", "A|B|C"},
        {"\\p{Lu}+", "ABc\xC7\x85", "AB"}, // U+01C5 is Lt
        {"[\\p{Lu}\\p{Lt}]+", "ABc\xC7\x85", "AB|\xC7\x85"},
        {"\\d+", "12\xE2\x85\xA3", "12"}, // U+2163 is a number, not a digit
        {"\\p{N}+", "12\xE2\x85\xA3", "12\xE2\x85\xA3"},
        {"\\P{L}+", "ab12 c", "12 "},
        {"\\p{^L}+", "ab12 c", "12 "},
        {"[^\\P{L}]+", "ab12 c", "ab|c"},
        {"\\p{Z}+", " \t ", " | "},
        {"[\xE4\xB8\x80-\xE9\xBE\xA5]+", "a\xE4\xB8\xAD\xE5\x9B\xBD b", "\xE4\xB8\xAD\xE5\x9B\xBD"},
        {"\xFF", "a",
         "! the regular expression ? has, at byte 0, bytes that are not UTF-8, "
         "which is not supported"},
    };
    char out[600];
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        ASSERT_STR_EQm(rows[i][0], rows[i][2] + 0,
                       matches_of(rows[i][0], rows[i][1], out, sizeof out));
    }
    PASS();
}

TEST refused_expressions(void) {
    static const char* const rows[][2] = {
        {"(?<=a)b", "a (?..) group other than"},
        {"(?P<x>a)", "a (?..) group other than"},
        {"a**", "a quantifier after a quantifier"},
        {"a{2}+", "a quantifier after a quantifier"},
        {"*a", "a quantifier with nothing before it"},
        {"(?:a?)*", "a repetition of what may be empty"},
        {"(?:a|)+", "a repetition of what may be empty"},
        {"(?!a)*", "a repetition of what may be empty"},
        {"(a", "an unmatched '('"},
        {"a)", "an unmatched ')'"},
        {"[a", "a set without a closing ']'"},
        {"[[:alpha:]]", "a set inside a set"},
        {"[a&&b]", "a set inside a set"},
        {"[b-a]", "a range whose end is before its start"},
        {"[a-\\d]", "a range that ends in a class"},
        {"\\p{Han}", "the property Han"},
        {"\\pL", "\\p without a name in braces"},
        {"\\p{Lo}", "one of \\p{Lm} and \\p{Lo} without the other"},
        {"\\1", "the escape \\1"},
        {"\\k", "the escape \\k"},
        {"a\\", "a backslash at its end"},
        {"a{5,2}", "a repetition that is not within 0 to 1000"},
        {"a{2000}", "a repetition that is not within 0 to 1000"},
        {"(?:ab){900}(?:ab){900}(?:ab){900}", "more than 4096 steps"},
        {"(?i:\xC3\xA4)", "a character beyond ASCII where case is ignored"},
        {"\\x{110000}", "a hexadecimal escape that is not a code point"},
    };
    char out[600];
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        matches_of(rows[i][0], "", out, sizeof out);
        if (strstr(out, rows[i][1]) == NULL) {
            printf("\n%s: %s\n", rows[i][0], out);
        }
        ASSERTm(rows[i][0], strstr(out, rows[i][1]) != NULL);
    }
    PASS();
}

// A pattern that would take exponential time stops with a message instead.
TEST expressions_do_not_hang(void) {
    static char text[4001];
    char out[600];
    memset(text, 'a', 4000);
    ASSERT(strstr(matches_of("(?:a+a+)+b", text, out, sizeof out), "too many steps") != NULL);
    ASSERT(strstr(matches_of("(?:a|aa)+b", text, out, sizeof out), "too many steps") != NULL);
    PASS();
}

// ---- the functions and the expressions ----

// Characters that these patterns tell apart, and broken ones.
static const char* const pieces[] = {" ",
                                     " ",
                                     "  ",
                                     "\t",
                                     "\n",
                                     "\r",
                                     "\r\n",
                                     "\n\n",
                                     "a",
                                     "b",
                                     "Z",
                                     "QX",
                                     "word",
                                     "Word",
                                     "0",
                                     "7",
                                     "123",
                                     "4567",
                                     "'",
                                     "'s",
                                     "'S",
                                     "'re",
                                     "'RE",
                                     "'ll",
                                     "'d",
                                     "'\xC5\xBF",
                                     "\xC5\xBF",
                                     "!",
                                     "?!",
                                     ".",
                                     "-",
                                     "/",
                                     "//",
                                     "_",
                                     "$",
                                     "+",
                                     "<",
                                     "(",
                                     "#",
                                     "\xC3\xA4",
                                     "\xC3\x84",
                                     "\xC7\x85",
                                     "\xCA\xB0",
                                     "\xE4\xB8\xAD",
                                     "\xE3\x81\x82",
                                     "\xE3\x82\xA2",
                                     "\xCC\x81",
                                     "\xE0\xA4\xBF",
                                     "\xE2\x85\xA3",
                                     "\xC2\xB2",
                                     "\xD9\xA3",
                                     "\xC2\xA0",
                                     "\xE3\x80\x80",
                                     "\xE2\x80\xA8",
                                     "\xE2\x80\x8D",
                                     "\xF0\x9F\x98\x80",
                                     "\xE2\x82\xAC",
                                     "\xC2\xA7",
                                     "\xE2\x80\x94",
                                     "\xFF",
                                     "\xC3",
                                     "\xE4\xB8",
                                     "\x80",
                                     "\xED\xA0\x80",
                                     "\x01",
                                     "\x7F"};

static size_t random_text(test_random* random, char* out, size_t room) {
    size_t size = 0;
    size_t count = (size_t)test_random_below(random, 24);
    for (size_t i = 0; i < count; i++) {
        const char* piece = pieces[test_random_below(random, sizeof pieces / sizeof pieces[0])];
        size_t n = strlen(piece);
        if (size + n < room) {
            memcpy(out + size, piece, n);
            size += n;
        }
    }
    return size;
}

// Every pattern that has a function of its own gives the same matches when it is compiled.
TEST functions_equal_their_expressions(void) {
    test_random random = test_random_start("functions_equal_their_expressions");
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__text_patterns); i++) {
        const qlora__text_pattern* known = &qlora__text_patterns[i];
        qlora__pattern* p = NULL;
        if (strcmp(known->regex, "Whitespace") == 0) {
            continue; // a step, not an expression
        }
        ASSERT_EQm(
            known->regex, QLORA_OK,
            qlora__pattern_compile(&lib->env, known->regex, strlen(known->regex), classes, &p));
        for (int k = 0; k < 4000; k++) {
            char text[256];
            size_t size = random_text(&random, text, sizeof text);
            qlora__text_view view = view_of(text, size);
            qlora__pattern_allow(p, size);
            for (size_t at = 0; at < size;) {
                size_t length = 0;
                size_t end = at;
                size_t want = known->match(&view, at, known->option);
                ASSERT_EQ(QLORA_OK, qlora__pattern_match(&lib->env, p, &view, 0, at, &end));
                if (want != end) {
                    printf("\n\"%.*s\" at %d: function %d, expression %d\n", (int)size, text,
                           (int)at, (int)want, (int)end);
                }
                ASSERT_EQm(known->regex, want, end);
                // from every position, not only from those that a text is split at
                (void)qlora__text_class_at(&view, at, &length);
                at += length;
            }
        }
        qlora__pattern_free(&lib->env, p);
    }
    PASS();
}

TEST nothing_is_left(void) {
    uint64_t before = lib->env.host_bytes;
    char out[600];
    matches_of("(?:ab)+\\s(?!x)", "abab ", out, sizeof out);
    matches_of("(?:ab)+\\s(?!x", "abab ", out, sizeof out);
    ASSERT_EQ(before, lib->env.host_bytes);
    PASS();
}

SUITE(tokens_suite) {
    if (!OK(qlora_text_create(NULL, &lib))) {
        return;
    }
    classes = qlora__text_classes_make(&lib->env);
    RUN_TEST(expressions);
    RUN_TEST(refused_expressions);
    RUN_TEST(expressions_do_not_hang);
    RUN_TEST(functions_equal_their_expressions);
    RUN_TEST(nothing_is_left);
    qlora__env_free(&lib->env, classes, QLORA__TEXT_CODES);
    qlora_text_destroy(lib);
}
