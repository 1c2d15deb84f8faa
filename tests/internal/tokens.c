// tokens.c - the regular expressions of pre-tokenizers, and the tokenizers inside GGUF files.

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
            snprintf(out, room, "! %.500s", lib->env.error);
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
        {"(?i:ass)", "two letters that one character can stand for"}, // U+00DF
        {"(?i:Stop)", "two letters that one character can stand for"},
        {"(?i:of(?:FI))", "two letters that one character can stand for"},
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

// ---- tokenizers in GGUF files ----

typedef struct bytes {
    char data[8192];
    size_t size;
    uint64_t values;
} bytes;

static void put(bytes* b, const void* data, size_t size) {
    memcpy(b->data + b->size, data, size);
    b->size += size;
}

static void put_number(bytes* b, uint64_t value, size_t size) {
    for (size_t i = 0; i < size; i++) {
        b->data[b->size++] = (char)(unsigned char)(value >> (8 * i));
    }
}

static void put_text(bytes* b, const char* text) {
    put_number(b, strlen(text), 8);
    put(b, text, strlen(text));
}

static void put_key(bytes* b, const char* key, uint32_t kind) {
    put_text(b, key);
    put_number(b, kind, 4);
    b->values++;
}

static void put_string(bytes* b, const char* key, const char* text) {
    put_key(b, key, 8);
    put_text(b, text);
}

static void put_strings(bytes* b, const char* key, const char* const* texts, size_t count) {
    put_key(b, key, 9);
    put_number(b, 8, 4);
    put_number(b, count, 8);
    for (size_t i = 0; i < count; i++) {
        put_text(b, texts[i]);
    }
}

static void put_array(bytes* b, const char* key, uint32_t kind, const float* values, size_t count) {
    put_key(b, key, 9);
    put_number(b, kind, 4);
    put_number(b, count, 8);
    for (size_t i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)(int32_t)values[i];
        if (kind == 6) {
            memcpy(&bits, &values[i], 4);
        }
        put_number(b, bits, 4);
    }
}

static void put_begin(bytes* b) {
    memset(b, 0, sizeof *b);
    put(b, "GGUF", 4);
    put_number(b, 3, 4);
    put_number(b, 0, 8);
    put_number(b, 0, 8);
}

static void put_end(bytes* b) {
    size_t end = b->size;
    b->size = 16;
    put_number(b, b->values, 8);
    b->size = end;
}

#define SPACE "\xE2\x96\x81"
static const char* const spm_tokens[] = {"<unk>", "<s>",     "</s>",   SPACE, "a",      "b",
                                         "ab",    SPACE "a", "<0x21>", "<x>", "<0xC3>", "<0xA4>"};
static const float spm_scores[] = {0, 0, 0, -1, -2, -3, -5, -4, 0, 0, 0, 0};
static const float spm_types[] = {2, 3, 3, 1, 1, 1, 1, 1, 6, 4, 6, 6};

// `without` leaves out one key.
static void spm_file(bytes* b, const char* without, uint32_t score_kind) {
    put_begin(b);
    put_string(b, "tokenizer.ggml.model", "llama");
    if (strcmp(without, "tokens") != 0) {
        put_strings(b, "tokenizer.ggml.tokens", spm_tokens, 12);
    }
    if (strcmp(without, "scores") != 0) {
        put_array(b, "tokenizer.ggml.scores", score_kind, spm_scores, 12);
    }
    put_array(b, "tokenizer.ggml.token_type", 5, spm_types,
              strcmp(without, "types") == 0 ? 11 : 12);
    put_string(b, "tokenizer.chat_template", "{{ bos_token }}{{ messages[0]['content'] }}");
    put_key(b, "tokenizer.ggml.eos_token_id", 4);
    put_number(b, strcmp(without, "eos") == 0 ? 77 : 2, 4);
    put_key(b, "tokenizer.ggml.add_eos_token", 7);
    put_number(b, 1, 1);
    put_end(b);
}

static void bpe_file(bytes* b, const char* pre, const char* const* merges, size_t count) {
    static const char* const tokens[] = {"a",         "b", "ab", "\xC4\xA0", "\xC4\xA0\141\142",
                                         "<|im_end|>"};
    static const float types[] = {1, 1, 1, 1, 1, 3};
    put_begin(b);
    put_string(b, "tokenizer.ggml.model", "gpt2");
    put_string(b, "tokenizer.ggml.pre", pre);
    put_strings(b, "tokenizer.ggml.tokens", tokens, 6);
    put_array(b, "tokenizer.ggml.token_type", 5, types, 6);
    put_strings(b, "tokenizer.ggml.merges", merges, count);
    put_end(b);
}

// The ids of a text, as words.
static const char* ids_of(qlora_text_tok* tok, const char* text, uint32_t flags, char* out,
                          size_t room) {
    qlora_text_ids ids = {0};
    size_t used = 0;
    out[0] = '\0';
    if (!OK(qlora_text_encode(tok, text, strlen(text), flags, &ids))) {
        return qlora_text_last_error(lib);
    }
    for (size_t i = 0; i < ids.count; i++) {
        qlora__append(out, room, &used, "%s%d", i > 0 ? " " : "", (int)ids.data[i]);
    }
    qlora_text_ids_free(lib, &ids);
    return out;
}

TEST gguf_pieces(void) {
    static bytes b;
    char out[200];
    qlora_text_tok* tok = NULL;
    spm_file(&b, "", 6);
    ASSERT(OK(qlora_text_tok_load(lib, "f.gguf", b.data, b.size, &tok)));
    ASSERT_STR_EQ("7 5", ids_of(tok, "ab", 0, out, sizeof out)); // _a is better than ab
    ASSERT_STR_EQ("3 5 6", ids_of(tok, "bab", 0, out, sizeof out));
    ASSERT_STR_EQ("6", ids_of(tok, "ab", QLORA_TEXT_CONTINUE, out, sizeof out));
    ASSERT_STR_EQ("1 7 5 2", ids_of(tok, "ab", QLORA_TEXT_SPECIAL, out, sizeof out));
    ASSERT_STR_EQ("1 7 5", ids_of(tok, "ab", QLORA_TEXT_BOS, out, sizeof out));
    ASSERT_STR_EQ("1 7", ids_of(tok, "<s>a", QLORA_TEXT_BOS, out, sizeof out)); // its own
    ASSERT_STR_EQ("7 9 7 8", ids_of(tok, "a<x>a!", 0, out, sizeof out));
    ASSERT_STR_EQ("7 2 7", ids_of(tok, "a</s>a", 0, out, sizeof out));
    ASSERT_STR_EQ("3 10 11", ids_of(tok, "\xC3\xA4", 0, out, sizeof out));
    ASSERT_STR_EQ("3 0", ids_of(tok, "q", 0, out, sizeof out));
    qlora_text_bytes back = {0};
    const int32_t ids[] = {7, 5, 10, 11, 3, 4};
    ASSERT(OK(qlora_text_decode(tok, ids, 6, 0, &back)));
    ASSERT_EQ(6, back.count);
    ASSERT_EQ(0, memcmp(back.data, "ab\xC3\xA4 a", 6));
    qlora_text_bytes_free(lib, &back);
    ASSERT(OK(qlora_text_tok_close(tok)));
    PASS();
}

TEST gguf_bytes(void) {
    static const char* const merges[] = {"a b", "\xC4\xA0 ab"};
    static bytes b;
    char out[200];
    qlora_text_tok* tok = NULL;
    bpe_file(&b, "smollm", merges, 2);
    ASSERT(OK(qlora_text_tok_load(lib, "f.gguf", b.data, b.size, &tok)));
    ASSERT_STR_EQ("2 4 3 4", ids_of(tok, "ab ab  ab", 0, out, sizeof out));
    ASSERT_STR_EQ("0 5 1", ids_of(tok, "a<|im_end|>b", 0, out, sizeof out));
    ASSERT(OK(qlora_text_tok_close(tok)));
    bpe_file(&b, "no-such-name", merges, 2);
    ASSERT_FALSE(OK(qlora_text_tok_load(lib, "f.gguf", b.data, b.size, &tok)));
    ASSERT(strstr(lib->env.error, "f.gguf: tokenizer.ggml.pre \"no-such-name\" is not known"));
    static const char* const broken[] = {"ab"};
    bpe_file(&b, "gpt-2", broken, 1);
    ASSERT_FALSE(OK(qlora_text_tok_load(lib, "f.gguf", b.data, b.size, &tok)));
    ASSERT(strstr(lib->env.error, "tokenizer.ggml.merges[0] has no blank"));
    static const char* const strange[] = {"b a"};
    bpe_file(&b, "gpt-2", strange, 1);
    ASSERT_FALSE(OK(qlora_text_tok_load(lib, "f.gguf", b.data, b.size, &tok)));
    ASSERT(strstr(lib->env.error, "tokenizer.ggml.merges[0] joins to a token that is not"));
    PASS();
}

// Every name of a pre-tokenizer has patterns that compile.
TEST gguf_pre_tokenizers(void) {
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__gguf_pres); i++) {
        for (int k = 0; k < QLORA__GGUF_PATTERNS && qlora__gguf_pres[i].patterns[k]; k++) {
            const char* text = qlora__gguf_pres[i].patterns[k];
            qlora__pattern* p = NULL;
            ASSERTm(text, OK(qlora__pattern_compile(&lib->env, text, strlen(text), classes, &p)));
            qlora__pattern_free(&lib->env, p);
        }
    }
    ASSERT(qlora__gguf_pre_find("llama-bpe", 9) == &qlora__gguf_pres[0]);
    ASSERT(qlora__gguf_pre_find("lfm2", 4) == &qlora__gguf_pres[0]);
    ASSERT(qlora__gguf_pre_find("lfm", 3) == NULL);
    PASS();
}

TEST gguf_tokenizer_faults(void) {
    static const char* const rows[][2] = {
        {"tokens", "f.gguf: tokenizer.ggml.tokens is missing"},
        {"scores", "f.gguf: tokenizer.ggml.scores is missing"},
        {"types", "f.gguf: tokenizer.ggml.token_type must be an array with one number for each of "
                  "the 12 tokens"},
        {"eos", "tokenizer.ggml.eos_token_id is 77; it must be an integer from 0 to 11"}};
    static bytes b;
    qlora_text_tok* tok = NULL;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        spm_file(&b, rows[i][0], 6);
        ASSERT_FALSE(OK(qlora_text_tok_load(lib, "f.gguf", b.data, b.size, &tok)));
        ASSERTm(lib->env.error, strstr(lib->env.error, rows[i][1]) != NULL);
    }
    spm_file(&b, "", 5); // integers are scores, too
    ASSERT(OK(qlora_text_tok_load(lib, "f.gguf", b.data, b.size, &tok)));
    ASSERT(OK(qlora_text_tok_close(tok)));
    put_begin(&b);
    put_string(&b, "tokenizer.ggml.model", "bert");
    put_end(&b);
    ASSERT_FALSE(OK(qlora_text_tok_load(lib, "f.gguf", b.data, b.size, &tok)));
    ASSERT(strstr(lib->env.error, "tokenizer.ggml.model \"bert\" is not supported") != NULL);
    PASS();
}

// The chat template and the special tokens of a file on disk.
TEST gguf_chat(void) {
    static bytes b;
    const char* path = test_path("tokens.gguf");
    qlora_text_bytes text = {0};
    bool found = false;
    spm_file(&b, "", 6);
    FILE* file = fopen(path, "wb");
    ASSERT(file && fwrite(b.data, 1, b.size, file) == b.size);
    fclose(file);
    ASSERT(OK(qlora__text_folder_read(&lib->env, path, "chat_template.jinja", &text, &found)));
    ASSERT(found && text.count == 43 && memcmp(text.data, "{{ bos_token }}", 15) == 0);
    text.count = 0;
    ASSERT(OK(qlora__text_folder_read(&lib->env, path, "config.json", &text, &found)));
    ASSERT(found && text.count > 0);
    text.data[text.count - 1] = '\0';
    ASSERT(strstr(text.data, "\"eos_token_id\"") && strstr(text.data, "2"));
    text.count = 0;
    ASSERT(OK(qlora__text_folder_read(&lib->env, path, "tokenizer_config.json", &text, &found)));
    text.data[text.count - 1] = '\0';
    ASSERT(strstr(text.data, "\"eos_token\": \"</s>\""));
    ASSERT(OK(qlora__text_folder_read(&lib->env, path, "tokenizer.json", &text, &found)));
    ASSERT_FALSE(found);
    qlora_text_bytes_free(lib, &text);
    remove(path);
    PASS();
}

TEST tokens_leave_nothing(void) {
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
    RUN_TEST(gguf_pieces);
    RUN_TEST(gguf_bytes);
    RUN_TEST(gguf_pre_tokenizers);
    RUN_TEST(gguf_tokenizer_faults);
    RUN_TEST(gguf_chat);
    RUN_TEST(tokens_leave_nothing);
    qlora__env_free(&lib->env, classes, QLORA__TEXT_CODES);
    qlora_text_destroy(lib);
}

#include "internal/parquet.c"
