// formats.c - the file formats of qlora.h, on files built in memory; if the shared folder is
// present (QLORA_SHARED, else ../shared), also on real ones.

#include "formats_world.h"
#include "test.h"

#include <stdio.h>

// The fuzz targets, so that past findings are tested again.
#include "fuzz/json.c"
#include "fuzz/safetensors.c"
#include "fuzz/config.c"

SUITE_EXTERN(formats_suite);

// True if a call was refused with `part` in its message; otherwise prints the actual message.
static bool refused(world* w, qlora_result result, const char* part) {
    bool good = result != QLORA_OK && strstr(w->env.error, part) != NULL;
    if (!good) {
        printf("\nexpected a refusal with \"%s\", got %s \"%s\"\n", part, qlora_result_name(result),
               w->env.error);
    }
    return good;
}

// ---- JSON ----

static const struct {
    const char* text;
    const char* message;
} json_bad[] = {
    {"", "expected a value"},
    {" ", "expected a value"},
    {"[1,]", "expected a value"},
    {"[1 2]", "expected ',' or ']'"},
    {"[1", "expected ',' or ']'"},
    {"[", "expected a value"},
    {"]", "expected a value"},
    {"{\"a\":1", "expected ',' or '}'"},
    {"{\"a\":1]", "expected ',' or '}'"},
    {"{\"a\":1,}", "expected a key in quotes"},
    {"{a:1}", "expected a key in quotes"},
    {"{1:1}", "expected a key in quotes"},
    {"{,}", "expected a key in quotes"},
    {"{\"a\" 1}", "expected ':'"},
    {"{\"a\":}", "expected a value"},
    {"{\"a\":1 \"b\":2}", "expected ',' or '}'"},
    {"1 2", "unexpected text after the value"},
    {"{} x", "unexpected text after the value"},
    {"[]]", "unexpected text after the value"},
    {"nul", "expected a value"},
    {"True", "expected a value"},
    {"truex", "unexpected text after the value"},
    {"01", "leading zero"},
    {"-01", "leading zero"},
    {"-", "expected a value"},
    {"+1", "expected a value"},
    {".5", "expected a value"},
    {"1.", "after the decimal point"},
    {"1.e3", "after the decimal point"},
    {"1e", "in the exponent"},
    {"1e+", "in the exponent"},
    {"0x10", "unexpected text after the value"},
    {"NaN", "expected a value"},
    {"Infinity", "expected a value"},
    {"-Infinity", "expected a value"},
    {"'a'", "expected a value"},
    {"\"a", "closing quote"},
    {"\"a\\", "invalid escape"},
    {"\"\\x41\"", "invalid escape"},
    {"\"\\u12\"", "four hexadecimal digits"},
    {"\"\\u12g4\"", "four hexadecimal digits"},
    {"\"\\ud800\"", "surrogate"},
    {"\"\\ud800\\u0041\"", "surrogate"},
    {"\"\\ud800\\ud800\"", "surrogate"},
    {"\"\\udc00\"", "surrogate"},
    {"\"\\udc00\\ud800\"", "surrogate"},
    {"\"\t\"", "control character"},
    {"\"\x1f\"", "control character"},
    {"\"\x80\"", "invalid UTF-8"},
    {"\"\xc0\xaf\"", "invalid UTF-8"},
    {"\"\xc1\xbf\"", "invalid UTF-8"},
    {"\"\xe0\x9f\xbf\"", "invalid UTF-8"},
    {"\"\xed\xa0\x80\"", "invalid UTF-8"},
    {"\"\xf0\x8f\xbf\xbf\"", "invalid UTF-8"},
    {"\"\xf4\x90\x80\x80\"", "invalid UTF-8"},
    {"\"\xf8\x88\x80\x80\x80\"", "invalid UTF-8"},
    {"\"\xe2\x82\"", "invalid UTF-8"},
    {"\xef\xbb\xbf{}", "expected a value"},
    {"/**/1", "expected a value"},
    {"[1,//\n2]", "expected a value"},
};

static const char* const json_good[] = {
    "0",
    "-0",
    "-1.5e-3",
    "1E+2",
    "null",
    " true ",
    "\t[\n]\r",
    "{}",
    "{\"\":[]}",
    "\"\\u0000\"",
    "\"\\ud83d\\ude00\"",
    "\"\xf4\x8f\xbf\xbf\"",
    "\"\x7f\"",
    "[[],{},[{}]]",
    "{\"a\":1,\"a\":2}",
    "\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"",
    "1e400",
    "123456789012345678901234567890",
};

TEST json_refuses_malformed_text(void) {
    world w;
    world_begin(&w);
    for (size_t i = 0; i < sizeof json_bad / sizeof json_bad[0]; i++) {
        qlora__json json;
        qlora_result r = qlora__json_parse(&w.env, "here.json", json_bad[i].text,
                                           strlen(json_bad[i].text), 0, &json);
        ASSERTm(json_bad[i].text, refused(&w, r, json_bad[i].message));
        ASSERTm("the message names the file", strncmp(w.env.error, "here.json:1:", 12) == 0);
    }
    ASSERT(world_end(&w));
    PASS();
}

TEST json_accepts_wellformed_text(void) {
    world w;
    world_begin(&w);
    for (size_t i = 0; i < sizeof json_good / sizeof json_good[0]; i++) {
        qlora__json json;
        ASSERT_EQm(json_good[i], QLORA_OK,
                   qlora__json_parse(&w.env, "t", json_good[i], strlen(json_good[i]), 0, &json));
        qlora__json_free(&w.env, &json);
    }
    ASSERT(world_end(&w));
    PASS();
}

TEST json_messages_give_the_place(void) {
    world w;
    qlora__json json;
    world_begin(&w);
    ASSERT(refused(&w, qlora__json_parse(&w.env, "t", "{\n \"a\": 1,\n  oh}", 16, 0, &json),
                   "t:3:3: invalid JSON: expected a key in quotes"));
    ASSERT(world_end(&w));
    PASS();
}

static size_t most_bytes; // the largest block

static void* noted_alloc(size_t bytes, size_t align, void* user) {
    most_bytes = bytes > most_bytes ? bytes : most_bytes;
    return world_alloc(bytes, align, user);
}

TEST json_limits_the_depth(void) {
    world w;
    qlora__json json;
    char text[2 * QLORA__JSON_MAX_DEPTH + 2];
    world_begin(&w);
    for (size_t depth = QLORA__JSON_MAX_DEPTH; depth <= QLORA__JSON_MAX_DEPTH + 1; depth++) {
        memset(text, '[', depth);
        memset(text + depth, ']', depth);
        qlora_result r = qlora__json_parse(&w.env, "t", text, 2 * depth, 0, &json);
        if (depth == QLORA__JSON_MAX_DEPTH) {
            ASSERT_EQ(QLORA_OK, r);
            qlora__json_free(&w.env, &json);
        } else {
            ASSERT(refused(&w, r, "nested too deeply; the limit is 256 levels"));
        }
    }
    ASSERT(world_end(&w));
    PASS();
}

// The memory of a parsed text stays below ten times its size, the text included, and is taken at
// once, whatever the text is made of; damaged texts cost no more.
TEST json_memory_is_bounded(void) {
    static const struct {
        const char* head;
        const char* repeated;
        const char* tail;
        bool good;
    } texts[] = {
        {"[0", ",0", "]", true},       {"[[]", ",[]", "]", true},
        {"[{}", ",{}", "]", true},     {"{\"a\":[1", ",2", "]}", true},
        {"[\"\"", ",\"\"", "]", true}, {"{\"\":0", ",\"\":0", "}", true},
        {"[", "[", "", false},         {"[", ",", "", false},
        {",", ",", "", false},         {"[0", ",0", "", false},
        {"[:", ":", "", false},        {"[\"", "\\\"", "", false},
    };
    enum { REPEATS = 50000 };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        size_t head = strlen(texts[i].head);
        size_t each = strlen(texts[i].repeated);
        size_t size = head + REPEATS * each + strlen(texts[i].tail);
        char* text = (char*)malloc(size + 1);
        memcpy(text, texts[i].head, head);
        for (size_t k = 0; k < REPEATS; k++) {
            memcpy(text + head + k * each, texts[i].repeated, each);
        }
        memcpy(text + size - strlen(texts[i].tail), texts[i].tail, strlen(texts[i].tail) + 1);
        world w;
        qlora__json json;
        world_begin(&w);
        most_bytes = 0;
        w.env.allocator.alloc = noted_alloc;
        qlora_result r = qlora__json_parse(&w.env, "t", text, size, 0, &json);
        ASSERT_EQm(texts[i].head, texts[i].good, r == QLORA_OK);
        ASSERTm(texts[i].repeated, most_bytes + size <= 10 * size);
        if (texts[i].good) {
            ASSERT_EQ_FMT(1L, w.operations, "%ld");
            qlora__json_free(&w.env, &json);
        }
        free(text);
        ASSERT(world_end(&w));
    }
    PASS();
}

TEST json_finds_duplicate_keys(void) {
    static const char* const twice[] = {"{\"a\":1,\"a\":2}", "{\"a\":1,\"b\":0,\"\\u0061\":2}",
                                        "[{\"x\":{\"k\":1,\"l\":2,\"k\":3}}]", "{\"\":1,\"\":2}"};
    world w;
    qlora__json json;
    world_begin(&w);
    for (size_t i = 0; i < sizeof twice / sizeof twice[0]; i++) {
        ASSERTm(twice[i], refused(&w,
                                  qlora__json_parse(&w.env, "t", twice[i], strlen(twice[i]),
                                                    QLORA__JSON_UNIQUE, &json),
                                  "duplicate key"));
    }
    const char* once = "{\"a\":{\"a\":1},\"ab\":{\"a\":1},\"b\":[{\"a\":1},{\"a\":1}]}";
    ASSERT_EQ(QLORA_OK,
              qlora__json_parse(&w.env, "t", once, strlen(once), QLORA__JSON_UNIQUE, &json));
    qlora__json_free(&w.env, &json);
    ASSERT(world_end(&w));
    PASS();
}

TEST json_answers_queries(void) {
    static const char text[] =
        "{\"n\":null,\"t\":true,\"i\":-9223372036854775808,\"big\":9223372036854775808,"
        "\"f\":2.5,\"e\":4.096e3,\"w\":16.0,\"list\":[1,[2,3],{\"x\":4},5],"
        "\"deep\":{\"er\":{\"st\":\"yes\"}},\"k\\u00e9y\":\"\\u20ac\\ud83d\\ude00\\u0000!\","
        "\"t\":false}";
    world w;
    qlora__json json;
    world_begin(&w);
    ASSERT_EQ(QLORA_OK, qlora__json_parse(&w.env, "t", text, sizeof text - 1, 0, &json));
    int64_t n = 0;
    double x = 0.0;
    char out[16];
    ASSERT_EQ(0u, qlora__json_find(&json, 0, "absent"));
    ASSERT_EQ(QLORA__JSON_NULL, qlora__json_kind_of(&json, qlora__json_find(&json, 0, "n")));
    ASSERT_EQ(QLORA__JSON_FALSE, qlora__json_kind_of(&json, qlora__json_find(&json, 0, "t")));
    ASSERT(qlora__json_int(&json, qlora__json_find(&json, 0, "i"), &n));
    ASSERT_EQ(INT64_MIN, n);
    ASSERT_FALSE(qlora__json_int(&json, qlora__json_find(&json, 0, "big"), &n));
    ASSERT_FALSE(qlora__json_int(&json, qlora__json_find(&json, 0, "f"), &n));
    ASSERT_FALSE(qlora__json_int(&json, qlora__json_find(&json, 0, "n"), &n));
    ASSERT(qlora__json_int(&json, qlora__json_find(&json, 0, "e"), &n));
    ASSERT_EQ(4096, n);
    ASSERT(qlora__json_int(&json, qlora__json_find(&json, 0, "w"), &n));
    ASSERT_EQ(16, n);
    ASSERT_FALSE(qlora__json_offset(&json, qlora__json_find(&json, 0, "w"), &n));
    ASSERT(qlora__json_double(&json, qlora__json_find(&json, 0, "f"), &x));
    ASSERT(x == 2.5);
    uint32_t list = qlora__json_find(&json, 0, "list");
    ASSERT_EQ(4u, json.tokens[list].count);
    ASSERT(qlora__json_int(&json, qlora__json_at(&json, list, 3), &n));
    ASSERT_EQ(5, n);
    ASSERT_EQ(0u, qlora__json_at(&json, list, 4));
    ASSERT(qlora__json_is(&json, qlora__json_find_path(&json, 0, "deep/er/st"), "yes"));
    ASSERT_EQ(0u, qlora__json_find_path(&json, 0, "deep/no/st"));
    uint32_t key = qlora__json_find(&json, 0, "k\xc3\xa9y");
    ASSERT(key != 0);
    ASSERT_EQ(9u, qlora__json_string(&json, key, out, sizeof out));
    ASSERT_MEM_EQ("\xe2\x82\xac\xf0\x9f\x98\x80\0!", out, 10);
    ASSERT_EQ(9u, qlora__json_string(&json, key, out, 5)); // truncated, but terminated
    ASSERT_EQ('\0', out[4]);
    ASSERT(qlora__json_equals(&json, key, "\xe2\x82\xac\xf0\x9f\x98\x80\0!", 9));
    ASSERT_FALSE(qlora__json_equals(&json, key, "\xe2\x82\xac\xf0\x9f\x98\x80\0?", 9));
    ASSERT_FALSE(qlora__json_equals(&json, key, "\xe2\x82\xac\xf0\x9f\x98\x80", 7));
    qlora__json_free(&w.env, &json);
    ASSERT(world_end(&w));
    PASS();
}

static bool same_double(const char* text) {
    double want = strtod(text, NULL);
    double got = qlora__number_parse(text, strlen(text));
    if (memcmp(&want, &got, sizeof want) != 0) {
        printf("\n%s: %.17g, not %.17g\n", text, got, want);
        return false;
    }
    return true;
}

// The C library is the reference: it rounds correctly and, in the "C" locale, reads the same text.
TEST numbers_are_read_to_the_nearest_double(void) {
    static const char* const hard[] = {"0",
                                       "-0.0",
                                       "0.1",
                                       "0.3",
                                       "1e22",
                                       "1e23",
                                       "8.5e22",
                                       "9007199254740993",
                                       "9007199254740992.99999999999999999999999999",
                                       "9007199254740993.00000000000000000000000001",
                                       "4.9406564584124654e-324",
                                       "2.4703282292062327e-324",
                                       "2.4703282292062328e-324",
                                       "2.2250738585072011e-308",
                                       "2.2250738585072014e-308",
                                       "2.2250738585072009e-308",
                                       "1.7976931348623157e308",
                                       "1.7976931348623158e308",
                                       "1.7976931348623159e308",
                                       "1e309",
                                       "1e-400",
                                       "1e99999999999",
                                       "1e-99999999999",
                                       "0.500000000000000166533453693773481063544750213623046875",
                                       "3.518437208883201171875e13",
                                       "6929495644600919.5",
                                       "3.2378839133029012895883524125015321748630094845598e-319",
                                       "100000000000000016777215",
                                       "100000000000000016777216",
                                       "0.000000000000000000000000000000000000123",
                                       "-9.0608011534336e15",
                                       "4.708356024711512e18",
                                       "9.409340012568248e18",
                                       "1.2345678901234567e-5"};
    for (size_t i = 0; i < sizeof hard / sizeof hard[0]; i++) {
        ASSERT(same_double(hard[i]));
    }
    test_random random = test_random_start("numbers");
    for (int i = 0; i < 20000; i++) {
        char text[64];
        uint64_t bits = test_random_u64(&random);
        double x = 0.0;
        memcpy(&x, &bits, sizeof x);
        if ((bits >> 52 & 0x7ff) == 0x7ff) {
            continue;
        }
        snprintf(text, sizeof text, "%.*g", 1 + (int)test_random_below(&random, 20), x);
        ASSERT(same_double(text));
    }
    PASS();
}

// Below a power of two, doubles are twice as dense: tests both sides of it, and the midpoints.
TEST numbers_near_powers_of_two(void) {
#ifdef _WIN32
    SKIPm("mingw-w64's strtod is one unit off near powers of two");
#else
    for (int power = -1070; power < 1023; power++) {
        double x = ldexp(1.0, power);
        uint64_t bits = 0;
        memcpy(&bits, &x, sizeof bits);
        for (int step = -2; step <= 1; step++) {
            uint64_t near_bits = bits + (uint64_t)step;
            double near_x = 0.0;
            char text[64];
            memcpy(&near_x, &near_bits, sizeof near_x);
            for (int digits = 15; digits < 30; digits += 2) {
                snprintf(text, sizeof text, "%.*e", digits, near_x);
                ASSERT(same_double(text));
                text[digits] = (char)(text[digits] == '9' ? '1' : text[digits] + 1);
                ASSERT(same_double(text));
            }
        }
    }
    PASS();
#endif
}

// 900 digits: the last ones decide on which side of a midpoint the number is.
TEST numbers_may_be_long(void) {
    char text[1100] = "9007199254740993.";
    memset(text + 17, '0', 900);
    text[17 + 900] = '\0';
    ASSERT(qlora__number_parse(text, strlen(text)) == 9007199254740992.0);
    strcat(text, "1");
    ASSERT(qlora__number_parse(text, strlen(text)) == 9007199254740994.0);
    memset(text, '7', 1000);
    text[1000] = '\0';
    strcat(text, "e-900");
    ASSERT(same_double(text));
    PASS();
}

TEST json_is_written(void) {
    static const char expected[] =
        "{\n  \"s\": \"a\\\"\\\\\\u000a\xc3\xa9\\ufffd\",\n  \"i\": -7,\n"
        "  \"d\": 0.05,\n  \"whole\": 16.0,\n  \"tiny\": 1e-05,\n"
        "  \"list\": [\n    1,\n    []\n  ],\n  \"none\": {},\n"
        "  \"b\": true\n}";
    world w;
    qlora__string text;
    qlora__json_writer j;
    world_begin(&w);
    qlora__string_begin(&w.env, &text);
    qlora__json_write_begin(&j, &text, 2);
    qlora__json_write_open(&j, NULL, '{');
    qlora__json_write_string(&j, "s", "a\"\\\n\xc3\xa9\xff");
    qlora__json_write_int(&j, "i", -7);
    qlora__json_write_double(&j, "d", 0.05);
    qlora__json_write_double(&j, "whole", 16.0);
    qlora__json_write_double(&j, "tiny", 1e-5);
    qlora__json_write_open(&j, "list", '[');
    qlora__json_write_int(&j, NULL, 1);
    qlora__json_write_open(&j, NULL, '[');
    qlora__json_write_close(&j, ']');
    qlora__json_write_close(&j, ']');
    qlora__json_write_open(&j, "none", '{');
    qlora__json_write_close(&j, '}');
    qlora__json_write_word(&j, "b", "true");
    qlora__json_write_close(&j, '}');
    ASSERT_EQ(QLORA_OK, text.result);
    ASSERT_EQ(sizeof expected - 1, text.size);
    ASSERT_MEM_EQ(expected, text.data, text.size);
    uint64_t bits = 0x7FF8000000000000u;
    double nan = 0.0;
    memcpy(&nan, &bits, sizeof nan);
    qlora__json_write_double(&j, "lr", nan);
    ASSERT(refused(&w, text.result, "lr is not a finite number"));
    qlora__string_free(&text);
    ASSERT(world_end(&w));
    PASS();
}

// ---- safetensors ----

// Builds a file from the text of its header and `size` bytes of data.
static unsigned char* st_make(const char* header, size_t size, size_t* total) {
    size_t n = strlen(header);
    unsigned char* file = malloc(8 + n + size);
    qlora__store_u64(file, n);
    memcpy(file + 8, header, n);
    memset(file + 8 + n, 0x5a, size);
    *total = 8 + n + size;
    return file;
}

#define ENTRY(dtype, shape, offsets)                                                               \
    "{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

static const struct {
    const char* header;
    size_t data;
    const char* message;
} st_bad[] = {
    {"", 0, "does not start with '{'"},
    {" {}", 0, "does not start with '{'"},
    {"[]", 0, "does not start with '{'"},
    {"{}\n", 0, "may only be padded with spaces"},
    {"{}\t ", 0, "may only be padded with spaces"},
    {"{", 0, "expected a key in quotes"},
    {"{}}", 0, "unexpected text after the value"},
    {"{\"a\xff\":1}", 0, "invalid UTF-8"},
    {"{}", 1, "the tensors need 0 bytes but the file contains 1"},
    {"{\"a\":" ENTRY("F32", "[1]", "[0,4]") "}", 3, "it is truncated"},
    {"{\"a\":" ENTRY("F32", "[1]", "[0,4]") "}", 5,
     "the tensors need 4 bytes but the file contains 5"},
    {"{\"a\":" ENTRY("F32", "[1]", "[0,4]") ",\"a\":" ENTRY("F32", "[1]", "[4,8]") "}", 8,
     "duplicate key \"a\""},
    {"{\"a\":" ENTRY("F32", "[1]", "[0,4]") ",\"\\u0061\":" ENTRY("F32", "[1]", "[4,8]") "}", 8,
     "duplicate key"},
    {"{\"__metadata__\":{\"a\":\"1\",\"a\":\"2\"}}", 0, "duplicate key"},
    {"{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
     "duplicate key \"dtype\""},
    {"{\"__metadata__\":{\"a\":1}}", 0, "__metadata__ must map strings to strings"},
    {"{\"__metadata__\":[]}", 0, "__metadata__ must map strings to strings"},
    {"{\"__metadata__\":{\"a\":{}}}", 0, "__metadata__ must map strings to strings"},
    {"{\"a\":1}", 0, "a: dtype is missing"},
    {"{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "a: dtype is missing"},
    {"{\"a\":{\"dtype\":7,\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "a: dtype must be a string"},
    {"{\"a\":" ENTRY("F33", "[1]", "[0,4]") "}", 4, "a: unknown dtype \"F33\""},
    {"{\"a\":" ENTRY("f32", "[1]", "[0,4]") "}", 4, "unknown dtype"},
    {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "a: shape is missing"},
    {"{\"a\":" ENTRY("F32", "{}", "[0,4]") "}", 4, "a: shape must be a list of integers"},
    {"{\"a\":" ENTRY("F32", "[-1]", "[0,4]") "}", 4, "a: shape must contain non-negative integers"},
    {"{\"a\":" ENTRY("F32", "[1.0]", "[0,4]") "}", 4,
     "a: shape must contain non-negative integers"},
    {"{\"a\":" ENTRY("F32", "[1e0]", "[0,4]") "}", 4,
     "a: shape must contain non-negative integers"},
    {"{\"a\":" ENTRY("F32", "[\"1\"]", "[0,4]") "}", 4,
     "a: shape must contain non-negative integers"},
    {"{\"a\":" ENTRY("F32", "[[1]]", "[0,4]") "}", 4,
     "a: shape must contain non-negative integers"},
    {"{\"a\":" ENTRY("F32", "[9223372036854775808]", "[0,4]") "}", 4,
     "a: shape must contain non-negative integers"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "a: data_offsets is missing"},
    {"{\"a\":" ENTRY("F32", "[1]", "[0]") "}", 4, "a: data_offsets must be two"},
    {"{\"a\":" ENTRY("F32", "[1]", "[0,4,8]") "}", 4, "a: data_offsets must be two"},
    {"{\"a\":" ENTRY("F32", "[1]", "[-4,0]") "}", 4, "a: data_offsets must be two"},
    {"{\"a\":" ENTRY("F32", "[1]", "[0,4.0]") "}", 4, "a: data_offsets must be two"},
    {"{\"a\":" ENTRY("F32", "[1]", "[4,0]") "}", 4, "a: data_offsets: the end is before the start"},
    {"{\"a\":" ENTRY("F32", "[2]", "[0,4]") "}", 4, "a: the shape needs 8 bytes"},
    {"{\"a\":" ENTRY("F32", "[]", "[0,8]") "}", 8, "a: the shape needs 4 bytes"},
    {"{\"a\":" ENTRY("F32", "[0]", "[0,4]") "}", 4, "a: the shape needs 0 bytes"},
    {"{\"a\":" ENTRY("F4", "[3]", "[0,1]") "}", 1, "12 bits are not a whole number of bytes"},
    {"{\"a\":" ENTRY("F32", "[4611686018427387904,4]", "[0,0]") "}", 0,
     "a: the size of the shape overflows"},
    {"{\"a\":" ENTRY("U8", "[4294967296,4294967296]", "[0,0]") "}", 0,
     "a: the size of the shape overflows"},
    {"{\"a\":" ENTRY("F32", "[1]", "[4,8]") "}", 8,
     "a: data_offsets start at 4, leaving a gap after 0"},
    {"{\"a\":" ENTRY("F32", "[1]", "[0,4]") ",\"b\":" ENTRY("F32", "[1]", "[8,12]") "}", 12,
     "b: data_offsets start at 8, leaving a gap after 4"},
    {"{\"a\":" ENTRY("F32", "[1]", "[0,4]") ",\"b\":" ENTRY("F32", "[1]", "[2,6]") "}", 6,
     "b: data_offsets start at 2, before the previous tensor ends at 4"},
    {"{\"a\":" ENTRY("F32", "[1]", "[0,4]") ",\"b\":" ENTRY("F32", "[1]", "[0,4]") "}", 4,
     "before the previous tensor ends at 4"},
    {"{\"a\":" ENTRY("F32", "[2]", "[0,8]") ",\"e\":" ENTRY("F32", "[0]", "[4,4]") "}", 8,
     "e: data_offsets start at 4, before the previous tensor ends at 8"},
    {"{\"a\\u0000b\":" ENTRY("F32", "[1]", "[0,4]") "}", 4,
     "the name of a tensor contains a NUL byte"},
};

TEST safetensors_refuses_each_fault(void) {
    world w;
    static qlora__st st;
    world_begin(&w);
    for (size_t i = 0; i < sizeof st_bad / sizeof st_bad[0]; i++) {
        size_t size = 0;
        unsigned char* file = st_make(st_bad[i].header, st_bad[i].data, &size);
        qlora_result r = qlora__st_parse(&w.env, "x.safetensors", file, size, &st);
        free(file);
        ASSERTm(st_bad[i].header, refused(&w, r, st_bad[i].message));
        ASSERTm("the message names the file", strncmp(w.env.error, "x.safetensors", 13) == 0);
        ASSERT_EQ_FMT(0L, w.blocks, "%ld");
    }
    ASSERT(world_end(&w));
    PASS();
}

// False lengths: files that are too short, a header beyond the end, beyond the limit,
// beyond everything.
TEST safetensors_refuses_wrong_lengths(void) {
    world w;
    static qlora__st st;
    unsigned char file[64];
    world_begin(&w);
    for (size_t size = 0; size < 8; size++) {
        memset(file, 0, sizeof file);
        ASSERT(refused(&w, qlora__st_parse(&w.env, "x", file, size, &st),
                       "is too short for safetensors"));
    }
    static const struct {
        uint64_t length;
        const char* message;
    } lies[] = {{57, "it is truncated"},
                {100000000, "it is truncated"},
                {100000001, "the limit of the format is 100000000"},
                {UINT64_MAX, "the limit of the format is 100000000"},
                {UINT64_MAX - 7, "the limit of the format is 100000000"}};
    for (size_t i = 0; i < sizeof lies / sizeof lies[0]; i++) {
        qlora__store_u64(file, lies[i].length);
        ASSERT(refused(&w, qlora__st_parse(&w.env, "x", file, sizeof file, &st), lies[i].message));
    }
    ASSERT(world_end(&w));
    PASS();
}

TEST safetensors_accepts_what_is_legal(void) {
    static const char header[] = "{\"z\":" ENTRY("F32", "[2]", "[2,10]") ",\"none\":" ENTRY(
        "I64", "[3,0,2]",
        "[2,2]") ",\"scalar\":" ENTRY("BF16", "[]",
                                      "[0,2]") ",\"q\":" ENTRY("F6_E2M3", "[4]",
                                                               "[10,13]") ",\"__metadata__\":{"
                                                                          "\"format\":\"pt\","
                                                                          "\"k\\u00e9\":\"v\"},"
                                                                          "\"last\":"
                                                                          "{\"shape\":[1,1,1,1,1,1,"
                                                                          "1,1,1,1],\"extra\":null,"
                                                                          "\"data_offsets\":[13,14]"
                                                                          ",\"dtype\":\"U8\"}}   ";
    world w;
    static qlora__st st;
    size_t size = 0;
    char text[8];
    world_begin(&w);
    unsigned char* file = st_make(header, 14, &size);
    ASSERT_EQ(QLORA_OK, qlora__st_parse(&w.env, "x", file, size, &st));
    ASSERT_EQ(5u, st.count);
    const qlora__st_tensor* t = qlora__st_find(&st, "z");
    ASSERT(t != NULL && t->rank == 1 && t->shape[0] == 2 && t->bytes == 8 &&
           t->dtype == QLORA__ST_F32);
    ASSERT(t->data == file + size - 14 + 2);
    t = qlora__st_find(&st, "none");
    ASSERT(t != NULL && t->rank == 3 && t->shape[1] == 0 && t->bytes == 0);
    t = qlora__st_find(&st, "scalar");
    ASSERT(t != NULL && t->rank == 0 && qlora__st_elements(t) == 1);
    float value = 0.0f;
    qlora__st_read_f32(t, 0, 1, &value);
    ASSERT(value == qlora__bf16_to(0x5a5a));
    t = qlora__st_find(&st, "last");
    ASSERT(t != NULL && t->rank == 10 && t->data == file + size - 1);
    ASSERT(qlora__st_find(&st, "") == NULL);
    ASSERT(qlora__st_find(&st, "zz") == NULL);
    ASSERT(qlora__st_metadata(&st, "k\xc3\xa9", text, sizeof text));
    ASSERT_STR_EQ("v", text);
    ASSERT_FALSE(qlora__st_metadata(&st, "other", text, sizeof text));
    ASSERT(refused(&w, qlora__st_verify(&w.env, &st),
                   "the checksum at the end of the file is missing"));
    qlora__st_close(&w.env, &st);
    free(file);
    file = st_make("{}", 0, &size);
    ASSERT_EQ(QLORA_OK, qlora__st_parse(&w.env, "x", file, size, &st));
    ASSERT_EQ(0u, st.count);
    qlora__st_close(&w.env, &st);
    free(file);
    ASSERT(world_end(&w));
    PASS();
}

TEST safetensors_knows_every_dtype(void) {
    static const char* const names[] = {
        "BOOL",    "F4",          "F6_E2M3",     "F6_E3M2", "U8",  "I8",  "F8_E5M2", "F8_E4M3",
        "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I16",     "U16", "F16", "BF16",    "I32",
        "U32",     "F32",         "C64",         "F64",     "I64", "U64"};
    static const int bytes_of_4[] = {4, 2, 3, 3, 4,  4,  4,  4,  4,  4,  4,
                                     8, 8, 8, 8, 16, 16, 16, 32, 32, 32, 32};
    world w;
    static qlora__st st;
    world_begin(&w);
    ASSERT_EQ(sizeof names / sizeof names[0], (size_t)QLORA__ST_DTYPE_COUNT);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char header[128];
        size_t size = 0;
        snprintf(header, sizeof header,
                 "{\"a\":{\"dtype\":\"%s\",\"shape\":[4],\"data_offsets\":[0,%d]}}", names[i],
                 bytes_of_4[i]);
        unsigned char* file = st_make(header, (size_t)bytes_of_4[i], &size);
        ASSERT_EQm(names[i], QLORA_OK, qlora__st_parse(&w.env, "x", file, size, &st));
        ASSERT_EQ(4u, qlora__st_elements(&st.tensors[0]));
        qlora__st_close(&w.env, &st);
        free(file);
    }
    ASSERT(world_end(&w));
    PASS();
}

// Four tensors in an order that the writer must change.
static const int64_t shape_23[2] = {2, 3};
static const int64_t shape_5[1] = {5};
static const qlora__st_entry four_entries[4] = {{"b", shape_5, QLORA__ST_U8, 1},
                                                {"z", shape_23, QLORA__ST_F32, 2},
                                                {"c", shape_5, QLORA__ST_BF16, 1},
                                                {"a", shape_23, QLORA__ST_F32, 2}};
static const size_t four_bytes[4] = {5, 24, 10, 24};

static qlora_result write_four(world* w, const char* path, unsigned char fill, bool checksum) {
    static const char* const pairs[] = {"step", "7", NULL};
    unsigned char bytes[32];
    qlora__st_writer writer;
    QLORA__TRY(qlora__st_write_begin(&w->env, path, four_entries, 4, pairs, checksum, &writer));
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t e = writer.order[i];
        memset(bytes, fill + (int)e, sizeof bytes);
        qlora_result r = qlora__st_write(&w->env, &writer, bytes, 3);
        r = r == QLORA_OK ? qlora__st_write(&w->env, &writer, bytes, four_bytes[e] - 3) : r;
        if (r != QLORA_OK) {
            qlora__st_write_abort(&w->env, &writer);
            return r;
        }
    }
    return qlora__st_write_commit(&w->env, &writer);
}

TEST safetensors_are_written(void) {
    static const char header[] =
        "{\"__metadata__\":{\"format\":\"pt\",\"step\":\"7\"},"
        "\"a\":" ENTRY("F32", "[2,3]", "[0,24]") ",\"z\":" ENTRY(
            "F32", "[2,3]", "[24,48]") ",\"c\":" ENTRY("BF16", "[5]",
                                                       "[48,58]") ",\"b\":" ENTRY("U8", "[5]",
                                                                                  "[58,63]") "}";
    world w;
    static qlora__st st;
    world_begin(&w);
    ASSERT_EQ(QLORA_OK, write_four(&w, "d/f", 10, false));
    world_file* f = world_slot(w.files, "d/f");
    ASSERT(f != NULL && world_slot(w.files, "d/f.tmp") == NULL);
    size_t length = (sizeof header - 1 + 7) / 8 * 8;
    ASSERT_EQ(length, qlora__load_u64(f->data));
    ASSERT_MEM_EQ(header, f->data + 8, sizeof header - 1);
    for (size_t i = sizeof header - 1; i < length; i++) {
        ASSERT_EQ(' ', f->data[8 + i]);
    }
    ASSERT_EQ(QLORA_OK, qlora__st_open(&w.env, "d/f", &st));
    for (int i = 0; i < 4; i++) {
        const qlora__st_tensor* t = qlora__st_find(&st, four_entries[i].name);
        ASSERT(t != NULL && t->dtype == four_entries[i].dtype && t->bytes == four_bytes[i]);
        for (size_t k = 0; k < t->bytes; k++) {
            ASSERT_EQ(10 + i, t->data[k]);
        }
    }
    qlora__st_close(&w.env, &st);
    ASSERT(world_end(&w));
    PASS();
}

TEST safetensors_writer_counts_bytes(void) {
    world w;
    qlora__st_writer writer;
    unsigned char bytes[64] = {0};
    world_begin(&w);
    ASSERT_EQ(QLORA_OK, qlora__st_write_begin(&w.env, "f", four_entries, 4, NULL, false, &writer));
    ASSERT_EQ(QLORA_OK, qlora__st_write(&w.env, &writer, bytes, 62));
    ASSERT(refused(&w, qlora__st_write(&w.env, &writer, bytes, 2),
                   "1 bytes more than the header declares"));
    ASSERT(refused(&w, qlora__st_write_commit(&w.env, &writer),
                   "only 62 of 63 bytes have been written"));
    ASSERT(world_slot(w.files, "f") == NULL && world_slot(w.files, "f.tmp") == NULL);
    ASSERT(world_end(&w));
    PASS();
}

// Every bit of a file with a checksum matters.
TEST safetensors_checksum_sees_every_bit(void) {
    world w;
    static qlora__st st;
    world_begin(&w);
    ASSERT_EQ(QLORA_OK, write_four(&w, "f", 1, true));
    ASSERT_EQ(QLORA_OK, qlora__st_open(&w.env, "f", &st));
    ASSERT_EQ(QLORA_OK, qlora__st_verify(&w.env, &st));
    qlora__st_close(&w.env, &st);
    world_file* f = world_slot(w.files, "f");
    for (size_t bit = 0; bit < 8 * f->size; bit++) {
        f->data[bit / 8] = (unsigned char)(f->data[bit / 8] ^ 1u << bit % 8);
        qlora_result r = qlora__st_open(&w.env, "f", &st);
        if (r == QLORA_OK) {
            r = qlora__st_verify(&w.env, &st);
            qlora__st_close(&w.env, &st);
        }
        ASSERT_NEQ(QLORA_OK, r);
        f->data[bit / 8] = (unsigned char)(f->data[bit / 8] ^ 1u << bit % 8);
    }
    ASSERT(world_end(&w));
    PASS();
}

// The sum does not depend on how the bytes are divided between calls.
TEST checksum_is_the_same_in_pieces(void) {
    unsigned char bytes[100];
    test_random random = test_random_start("checksum");
    for (size_t i = 0; i < sizeof bytes; i++) {
        bytes[i] = (unsigned char)test_random_below(&random, 256);
    }
    qlora__hash whole;
    qlora__hash_begin(&whole);
    qlora__hash_add(&whole, bytes, sizeof bytes);
    for (int round = 0; round < 200; round++) {
        qlora__hash h;
        qlora__hash_begin(&h);
        for (size_t at = 0; at < sizeof bytes;) {
            size_t n = (size_t)test_random_below(&random, 20);
            n = n < sizeof bytes - at ? n : sizeof bytes - at;
            qlora__hash_add(&h, bytes + at, n);
            at += n;
        }
        ASSERT(qlora__hash_end(&h) == qlora__hash_end(&whole));
    }
    qlora__hash shorter;
    qlora__hash_begin(&shorter);
    bytes[99] = 0;
    qlora__hash_add(&shorter, bytes, 99); // a missing zero byte is also a difference
    qlora__hash_begin(&whole);
    qlora__hash_add(&whole, bytes, 100);
    ASSERT(qlora__hash_end(&shorter) != qlora__hash_end(&whole));
    PASS();
}

// ---- config.json ----

static const char* const config_keys[][2] = {{"model_type", "\"llama\""},
                                             {"architectures", "[\"LlamaForCausalLM\"]"},
                                             {"vocab_size", "512"},
                                             {"hidden_size", "128"},
                                             {"intermediate_size", "352"},
                                             {"num_hidden_layers", "3"},
                                             {"num_attention_heads", "4"},
                                             {"num_key_value_heads", "2"},
                                             {"max_position_embeddings", "256"},
                                             {"rms_norm_eps", "1e-05"}};

// A small llama config with different values for some keys: key, value, key, value, ... NULL. A
// value of NULL omits the key.
static const char* config_text(char* out, size_t size, const char* const* changes) {
    size_t n = (size_t)snprintf(out, size, "{");
    for (size_t i = 0; i < sizeof config_keys / sizeof config_keys[0]; i++) {
        bool changed = false;
        for (size_t k = 0; changes[k]; k += 2) {
            changed = changed || strcmp(changes[k], config_keys[i][0]) == 0;
        }
        if (!changed) {
            n += (size_t)snprintf(out + n, size - n, "%s\"%s\": %s", n > 1 ? ", " : "",
                                  config_keys[i][0], config_keys[i][1]);
        }
    }
    for (size_t k = 0; changes[k]; k += 2) {
        if (changes[k + 1]) {
            n += (size_t)snprintf(out + n, size - n, ", \"%s\": %s", changes[k], changes[k + 1]);
        }
    }
    snprintf(out + n, size - n, "}");
    return out;
}

static qlora_result config_try(world* w, const char* const* changes, qlora_model_config* out) {
    char text[2048];
    config_text(text, sizeof text, changes);
    return qlora__config_parse(&w->env, "config.json", text, strlen(text), out);
}

static const struct {
    const char* changes[9];
    const char* message;
} config_bad[] = {
    {{"model_type", NULL, "architectures", NULL, NULL}, "model_type is missing"},
    {{"model_type", "\"mixtral\"", "architectures", "[\"MixtralForCausalLM\"]", "num_local_experts",
      "0", NULL},
     "the number of experts is 0; use a file of the dense family"},
    {{"model_type", "\"mixtral\"", "architectures", "[\"MixtralForCausalLM\"]", "num_local_experts",
      "2000", NULL},
     "num_local_experts is 2000; it must be an integer from 0 to 1024"},
    {{"model_type", "\"mixtral\"", "architectures", "[\"MixtralForCausalLM\"]",
      "num_experts_per_tok", "9", NULL},
     "num_experts_per_tok is 9; it must be an integer from 1 to 8"},
    {{"model_type", "\"mixtral\"", "architectures", "[\"MixtralForCausalLM\"]",
      "router_jitter_noise", "0.1", NULL},
     "router_jitter_noise \"0.1\" is not supported"},
    {{"model_type", "\"olmoe\"", "architectures", "[\"OlmoeForCausalLM\"]", "clip_qkv", "8", NULL},
     "clip_qkv \"8\" is not supported"},
    {{"model_type", "\"qwen3_moe\"", "architectures", "[\"Qwen3MoeForCausalLM\"]",
      "mlp_only_layers", "3", NULL},
     "mlp_only_layers must be a list"},
    {{"model_type", "\"qwen3_moe\"", "architectures", "[\"Qwen3MoeForCausalLM\"]",
      "mlp_only_layers", "[-1]", NULL},
     "mlp_only_layers[0] must be the number of a layer"},
    {{"model_type", "\"qwen2_moe\"", "architectures", "[\"Qwen2MoeForCausalLM\"]",
      "mlp_layer_types", "[]", NULL},
     "mlp_layer_types \"[]\" is not supported"},
    {{"model_type", "\"glm4_moe\"", "architectures", "[\"Glm4MoeForCausalLM\"]", "n_group", "3",
      NULL},
     "n_group is 3; it must divide the 128 experts into groups of at least two"},
    {{"model_type", "\"glm4_moe\"", "architectures", "[\"Glm4MoeForCausalLM\"]", "topk_group", "2",
      NULL},
     "topk_group is 2; it must be an integer from 1 to 1"},
    {{"model_type", "\"phimoe\"", NULL},
     "model_type \"phimoe\" is not supported; it is a mixture of experts"},
    {{"model_type", "\"qwen3_5_moe\"", NULL}, "model_type \"qwen3_5_moe\" is not supported"},
    {{"model_type", "\"gemma3n\"", NULL}, "\"gemma3n\" is not supported; it has per-layer emb"},
    {{"model_type", "\"cohere\"", NULL}, "\"cohere\" is not supported; it has LayerNorm and"},
    {{"model_type", "\"deepseek_v3\"", NULL}, "is not supported; it has multi-head latent att"},
    {{"model_type", "\"olmo\"", NULL}, "\"olmo\" is not supported; it has LayerNorm instead"},
    {{"model_type", "\"ol\"", NULL}, "\"ol\" is not supported; supported families: llama,"},
    {{"model_type", "\"other\"", NULL}, "\"other\" is not supported; supported families: llama,"},
    {{"model_type", "\"llava\"", "text_config", "{}", NULL},
     "\"llava\" is not supported; the names of the text part of this multimodal folder"},
    {{"model_type", "\"mistral3\"", "architectures", NULL, "text_config",
      "{\"model_type\":\"qwen3\"}", NULL},
     "model_type of text_config \"qwen3\" is not supported"},
    {{"use_bidirectional_attention", "true", NULL}, "use_bidirectional_attention is true"},
    {{"is_encoder_decoder", "true", NULL}, "is_encoder_decoder is true"},
    {{"model_type", "\"granitemoehybrid\"", "architectures", NULL, NULL},
     "layer_types is missing, so all layers are recurrent"},
    {{"model_type", "\"granitemoehybrid\"", "architectures", NULL, "num_local_experts", "0", NULL},
     "layer_types is missing, so all layers are recurrent"},
    {{"model_type", "\"phi3\"", "architectures", NULL, "rope_scaling",
      "{\"type\":\"linear\",\"factor\":2}", NULL},
     "rope_type \"linear\" is not supported; supported values in this family: default, longrope"},
    {{"model_type", "\"phi3\"", "architectures", NULL, "rope_scaling", "{\"type\":\"su\"}", NULL},
     "short_factor is missing"},
    {{"model_type", "\"phi3\"", "architectures", NULL, "rope_scaling",
      "{\"type\":\"su\",\"short_factor\":[1,2]}", NULL},
     "short_factor must be a list of 16 numbers"},
    {{"model_type", "\"glm\"", "architectures", NULL, "partial_rotary_factor", "1.5", NULL},
     "partial_rotary_factor is 1.5, which rotates"},
    {{"model_type", "\"ministral3\"", "architectures", NULL, NULL}, "rope_parameters is missing"},
    {{"model_type", "\"ministral3\"", "architectures", NULL, "rope_parameters", "{}", NULL},
     "llama_4_scaling_beta is missing"},
    {{"model_type", "\"gemma3_text\"", "architectures", NULL, "hidden_activation", "\"gelu\"",
      NULL},
     "hidden_activation \"gelu\" is not supported"},
    {{"model_type", "\"gemma3_text\"", "architectures", NULL, "rope_parameters",
      "{\"rope_theta\":1e4}", NULL},
     "rope_parameters must contain full_attention and sliding_attention"},
    {{"model_type", "\"gemma3_text\"", "architectures", NULL, "rope_scaling",
      "{\"type\":\"linear\",\"factor\":8}", NULL},
     "rope_scaling with the type \"linear\" is not supported; transformers ignores it"},
    {{"model_type", "\"olmo3\"", "architectures", NULL, "rope_scaling",
      "{\"rope_type\":\"linear\",\"factor\":8}", "rope_parameters",
      "{\"full_attention\":{\"rope_type\":\"default\"}}", NULL},
     "rope_scaling and rope_parameters are both given"},
    {{"model_type", "\"olmo3\"", "architectures", NULL, "rope_parameters",
      "{\"full_attention\":{\"rope_type\":\"yarn\",\"factor\":8,\"truncate\":false}}", NULL},
     "truncate \"false\" is not supported; only true"},
    {{"model_type", "\"olmo3\"", "architectures", NULL, "rope_parameters",
      "{\"full_attention\":{},\"truncate\":false}", NULL},
     "truncate \"false\" is not supported; only true"},
    {{"model_type", "\"gemma3_text\"", "architectures", NULL, "rope_scaling",
      "{\"rope_type\":\"yarn\",\"factor\":8,\"truncate\":false}", NULL},
     "truncate \"false\" is not supported; only true"},
    {{"model_type", "\"smollm3\"", "architectures", NULL, "no_rope_layers", "[1]", NULL},
     "no_rope_layers must be a list with at least one entry per layer (3)"},
    {{"model_type", "\"smollm3\"", "architectures", NULL, "no_rope_layers", "[1,2,1]", NULL},
     "no_rope_layers[1] must be 0 (no rotation) or 1"},
    {{"model_type", "\"exaone4\"", "architectures", NULL, "sliding_window_pattern", "\"LXG\"",
      NULL},
     "sliding_window_pattern \"LXG\" is not supported"},
    {{"model_type", NULL, "architectures", "[\"FalconForCausalLM\"]", NULL},
     "architecture \"FalconForCausalLM\" is not supported"},
    {{"architectures", "[\"LlamaForSequenceClassification\"]", NULL},
     "architecture \"LlamaForSequenceClassification\" is not supported"},
    {{"vocab_size", NULL, NULL}, "vocab_size is missing"},
    {{"vocab_size", "0", NULL}, "vocab_size is 0;"},
    {{"vocab_size", "-5", NULL}, "vocab_size is -5;"},
    {{"vocab_size", "1e30", NULL}, "vocab_size is 1e30;"},
    {{"vocab_size", "\"512\"", NULL}, "vocab_size is 512; it must be an integer"},
    {{"hidden_size", NULL, NULL}, "hidden_size is missing"},
    {{"hidden_size", "128.5", NULL}, "hidden_size is 128.5;"},
    {{"hidden_size", "9223372036854775807", NULL}, "hidden_size is 9223372036854775807;"},
    {{"hidden_size", "130", NULL},
     "hidden_size (130) is not a multiple of num_attention_heads (4)"},
    {{"intermediate_size", "-1", NULL}, "intermediate_size is -1;"},
    {{"intermediate_size", NULL, NULL}, "intermediate_size is missing"},
    {{"num_hidden_layers", "0", NULL}, "num_hidden_layers is 0;"},
    {{"num_hidden_layers", "257", NULL}, "num_hidden_layers is 257;"},
    {{"num_hidden_layers", NULL, NULL}, "num_hidden_layers is missing"},
    {{"num_attention_heads", "0", NULL}, "num_attention_heads is 0;"},
    {{"num_attention_heads", NULL, NULL}, "num_attention_heads is missing"},
    {{"num_key_value_heads", "3", NULL},
     "num_attention_heads (4) is not a multiple of num_key_value_heads (3)"},
    {{"num_key_value_heads", "0", NULL}, "num_key_value_heads is 0;"},
    {{"head_dim", "33", NULL}, "head_dim is 33; it must be even"},
    {{"head_dim", "0", NULL}, "head_dim is 0;"},
    {{"head_dim", "512", NULL}, "head_dim is 512; the maximum is 256"},
    {{"max_position_embeddings", "0", NULL}, "max_position_embeddings is 0;"},
    {{"rms_norm_eps", "0", NULL}, "rms_norm_eps is 0;"},
    {{"rms_norm_eps", "\"small\"", NULL}, "rms_norm_eps is small;"},
    {{"rope_theta", "-1.0", NULL}, "rope_theta is -1.0;"},
    {{"rope_theta", "1e999", NULL}, "rope_theta is 1e999;"},
    {{"rope_theta", "0.5", NULL}, "rope_theta is 0.5; it must be greater than 1"},
    {{"partial_rotary_factor", "0.5", NULL}, "partial_rotary_factor is 0.5; only 1 is supported"},
    {{"rope_scaling", "\"yes\"", NULL}, "rope_scaling is yes; it must be an object"},
    {{"rope_parameters", "[]", NULL}, "rope_parameters is []; it must be an object"},
    {{"model_type", "\"olmo3\"", "architectures", NULL, "rope_parameters",
      "{\"full_attention\":{},\"sliding_attention\":7}", NULL},
     "sliding_attention is 7; it must be an object"},
    {{"model_type", "\"olmo3\"", "architectures", NULL, "rope_parameters",
      "{\"sliding_attention\":7}", NULL},
     "sliding_attention is 7; it must be an object"},
    {{"model_type", "\"olmo3\"", "architectures", NULL, "rope_parameters",
      "{\"full_attention\":7,\"sliding_attention\":{}}", NULL},
     "full_attention is 7; it must be an object"},
    {{"rope_parameters", "{\"full_attention\":{\"rope_type\":\"linear\",\"factor\":8}}", NULL},
     "rope_parameters \"full_attention\" is not supported; all layers of this family are rotated"},
    {{"model_type", "\"qwen3\"", "architectures", NULL, "rope_scaling",
      "{\"rope_type\":\"default\",\"sliding_attention\":{\"rope_theta\":1e4}}", NULL},
     "rope_scaling \"sliding_attention\" is not supported; all layers of this family"},
    {{"rope_scaling", "{\"type\":\"dynamic\",\"factor\":2.0}", NULL},
     "rope_type \"dynamic\" is not supported"},
    {{"rope_scaling", "{\"rope_type\":\"longrope\"}", NULL},
     "rope_type \"longrope\" is not supported"},
    {{"rope_scaling", "{\"type\":\"linear\"}", NULL}, "factor is missing"},
    {{"rope_scaling", "{\"type\":\"linear\",\"factor\":0}", NULL}, "factor is 0;"},
    {{"rope_scaling", "{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":1}", NULL},
     "high_freq_factor is missing"},
    {{"rope_scaling",
      "{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":1,\"high_freq_factor\":4}", NULL},
     "original_max_position_embeddings is missing"},
    {{"rope_scaling",
      "{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":4,\"high_freq_factor\":4,"
      "\"original_max_position_embeddings\":64}",
      NULL},
     "high_freq_factor is 4; it must be greater than low_freq_factor (4)"},
    {{"rope_scaling", "{\"type\":\"yarn\"}", NULL}, "factor is missing"},
    {{"rope_scaling", "{\"type\":\"yarn\",\"factor\":4,\"beta_fast\":-1}", NULL},
     "beta_fast is -1;"},
    {{"hidden_act", "\"gelu\"", NULL}, "hidden_act \"gelu\" is not supported"},
    {{"tie_word_embeddings", "1", NULL}, "tie_word_embeddings is 1; it must be true or false"},
    {{"attention_bias", "\"no\"", NULL}, "attention_bias is no;"},
    {{"layer_types", "[\"full_attention\"]", NULL},
     "layer_types has length 1; it must have one entry per layer (3)"},
    {{"layer_types", "7", NULL}, "layer_types must be a list"},
    {{"model_type", "\"qwen2\"", "architectures", NULL, "layer_types",
      "[\"full_attention\",\"linear_attention\",\"full_attention\"]", NULL},
     "layer type \"linear_attention\" is not supported"},
    {{"layer_types", "[\"full_attention\",\"sliding_attention\",\"full_attention\"]", NULL},
     "llama layers always have full attention"},
    {{"model_type", "\"phi3\"", "architectures", NULL, "sliding_window", "64", "layer_types",
      "[\"sliding_attention\",\"full_attention\",\"full_attention\"]", NULL},
     "layer type \"full_attention\" is not supported; phi3 layers always have the window"},
    {{"model_type", "\"mistral\"", "architectures", NULL, "sliding_window", "0", NULL},
     "sliding_window is 0;"},
    {{"model_type", "\"smollm3\"", "architectures", NULL, "sliding_window", "64", "layer_types",
      "[\"sliding_attention\",\"full_attention\",\"full_attention\"]", NULL},
     "layer type \"sliding_attention\" is not supported; sliding_window is missing, or "
     "use_sliding_window"},
    {{"model_type", "\"gemma2\"", "architectures", NULL, "sliding_window", "null", "layer_types",
      "[\"full_attention\",\"sliding_attention\",\"full_attention\"]", NULL},
     "layer type \"sliding_attention\" is not supported; sliding_window is missing"},
    {{"bos_token_id", "512", NULL}, "bos_token_id is 512;"},
    {{"eos_token_id", "[1,512]", NULL},
     "eos_token_id is [1,512]; ids must be from 0 to vocab_size - 1 (511)"},
    {{"eos_token_id", "-1", NULL}, "eos_token_id is -1;"},
    {{"eos_token_id", "[[1]]", NULL}, "eos_token_id is [[1]];"},
    {{"eos_token_id", "[0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0]", NULL}, "eos_token_id lists 17 ids"},
    {{"quantization_config", "{\"quant_method\":\"gptq\"}", NULL},
     "quant_method \"gptq\" is not supported"},
    {{"quantization_config", "{\"quant_method\":\"bitsandbytes\",\"load_in_8bit\":true}", NULL},
     "load_in_8bit is not supported"},
    {{"quantization_config", "{\"quant_method\":\"fp8\",\"fmt\":\"e4m3\"}", NULL},
     "quantization_config: weight_block_size is missing; only [128, 128] is supported"},
    {{"quantization_config", "{\"quant_method\":\"fp8\",\"weight_block_size\":[64,128]}", NULL},
     "weight_block_size is [64,128]; only [128, 128] is supported"},
    {{"quantization_config", "{\"quant_method\":\"fp8\",\"weight_block_size\":[128]}", NULL},
     "weight_block_size is [128]; only [128, 128] is supported"},
    {{"quantization_config", "{\"quant_method\":\"fp8\",\"weight_block_size\":[128,128,1]}", NULL},
     "weight_block_size is [128,128,1]; only [128, 128] is supported"},
    {{"quantization_config",
      "{\"quant_method\":\"fp8\",\"weight_block_size\":[128,128],\"fmt\":\"e5m2\"}", NULL},
     "quantization_config: fmt is e5m2; only e4m3 is supported"},
    {{"quantization_config",
      "{\"quant_method\":\"fp8\",\"weight_block_size\":[128,128],\"activation_scheme\":"
      "\"static\"}",
      NULL},
     "quantization_config: activation_scheme is static; only dynamic is supported"},
    {{"quantization_config",
      "{\"quant_method\":\"fp8\",\"weight_block_size\":[128,128],\"scale_fmt\":\"ue8m0\"}", NULL},
     "quantization_config: scale_fmt is ue8m0; only float is supported"},
    {{"quantization_config",
      "{\"quant_method\":\"fp8\",\"weight_block_size\":[128,128],\"kv_cache_scheme\":{}}", NULL},
     "quantization_config: kv_cache_scheme is not supported with quant_method fp8"},
};

TEST config_reads_fp8(void) {
    static const char* const good[] = {
        "{\"quant_method\":\"fp8\",\"weight_block_size\":[128,128]}",
        "{\"activation_scheme\":\"dynamic\",\"fmt\":\"e4m3\",\"quant_method\":\"fp8\","
        "\"weight_block_size\":[128,128],\"modules_to_not_convert\":[\"lm_head\"],"
        "\"dequantize\":false}"};
    world w;
    world_begin(&w);
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        const char* const changes[] = {"quantization_config", good[i], NULL};
        qlora_model_config config;
        ASSERT_EQ(QLORA_OK, config_try(&w, changes, &config));
        ASSERT(config.quantized);
    }
    ASSERT(world_end(&w));
    PASS();
}

TEST config_names_each_impossible_value(void) {
    world w;
    world_begin(&w);
    qlora_model_config config;
    for (size_t i = 0; i < sizeof config_bad / sizeof config_bad[0]; i++) {
        qlora_result r = config_try(&w, config_bad[i].changes, &config);
        ASSERTm(config_bad[i].message, refused(&w, r, config_bad[i].message));
        ASSERTm("the message names the file", strncmp(w.env.error, "config.json: ", 13) == 0);
    }
    ASSERT(
        refused(&w, qlora__config_parse(&w.env, "c", "[]", 2, &config), "expected a JSON object"));
    ASSERT(world_end(&w));
    PASS();
}

// Llama 3.1 8B in the old style of config.json.
TEST config_reads_the_old_dialect(void) {
    static const char text[] =
        "{\"architectures\":[\"LlamaForCausalLM\"],\"attention_bias\":false,\"bos_token_id\":"
        "128000,"
        "\"eos_token_id\":[128001,128008,128009],\"hidden_act\":\"silu\",\"hidden_size\":4096,"
        "\"intermediate_size\":14336,\"max_position_embeddings\":131072,\"mlp_bias\":false,"
        "\"model_type\":\"llama\",\"num_attention_heads\":32,\"num_hidden_layers\":32,"
        "\"num_key_value_heads\":8,\"rms_norm_eps\":1e-05,\"rope_scaling\":{\"factor\":8.0,"
        "\"low_freq_factor\":1.0,\"high_freq_factor\":4.0,\"original_max_position_embeddings\":"
        "8192,"
        "\"rope_type\":\"llama3\"},\"rope_theta\":500000.0,\"tie_word_embeddings\":false,"
        "\"torch_dtype\":\"bfloat16\",\"vocab_size\":128256}";
    world w;
    qlora_model_config c;
    world_begin(&w);
    ASSERT_EQ(QLORA_OK, qlora__config_parse(&w.env, "c", text, sizeof text - 1, &c));
    ASSERT(c.family == QLORA_FAMILY_LLAMA && c.vocab == 128256 && c.hidden == 4096);
    ASSERT(c.intermediate == 14336 && c.layers == 32 && c.heads == 32 && c.kv_heads == 8);
    ASSERT(c.head_dim == 128 && c.max_positions == 131072 && c.rms_eps == 1e-5);
    ASSERT(c.rope.type == QLORA_ROPE_LLAMA3 && c.rope.theta == 500000.0 && c.rope.factor == 8.0);
    ASSERT(c.rope.low_freq_factor == 1.0 && c.rope.high_freq_factor == 4.0);
    ASSERT(c.rope.original_max_position == 8192.0 && c.rope.attention_factor == 0.0);
    ASSERT(memcmp(&c.rope, &c.rope_sliding, sizeof c.rope) == 0);
    ASSERT(!c.tied && !c.qkv_bias && !c.o_bias && !c.mlp_bias && !c.qk_norm && !c.quantized);
    ASSERT(c.dtype == QLORA_BF16 && c.bos_id == 128000 && c.pad_id == -1 && c.window == 0);
    ASSERT(c.stop_count == 3 && c.stop_ids[0] == 128001 && c.stop_ids[2] == 128009);
    ASSERT(world_end(&w));
    PASS();
}

// New style: rope_parameters, dtype, layer_types. The sizes are those of Qwen3 0.6B.
TEST config_reads_the_new_dialect(void) {
    static const char text[] =
        "{\"architectures\":[\"Qwen3ForCausalLM\"],\"dtype\":\"float16\",\"eos_token_id\":151645,"
        "\"hidden_size\":1024,\"intermediate_size\":3072,\"layer_types\":[\"full_attention\","
        "\"sliding_attention\"],\"max_position_embeddings\":40960,\"model_type\":\"qwen3\","
        "\"num_attention_heads\":16,\"num_hidden_layers\":2,\"num_key_value_heads\":8,"
        "\"rope_parameters\":{\"rope_type\":\"linear\",\"factor\":8,\"rope_theta\":1000000},"
        "\"sliding_window\":512,\"use_sliding_window\":true,"
        "\"tie_word_embeddings\":true,\"pad_token_id\":null,\"vocab_size\":151936}";
    world w;
    qlora_model_config c;
    world_begin(&w);
    ASSERT_EQ(QLORA_OK, qlora__config_parse(&w.env, "c", text, sizeof text - 1, &c));
    ASSERT(c.family == QLORA_FAMILY_QWEN3 && c.head_dim == 128 && c.qk_norm && !c.qkv_bias &&
           c.tied);
    ASSERT(c.rope.type == QLORA_ROPE_LINEAR && c.rope.theta == 1e6 && c.rope.factor == 8.0);
    ASSERT(c.rope_sliding.type == QLORA_ROPE_LINEAR && c.rope_sliding.theta == 1e6);
    ASSERT(c.window == 512 && c.sliding[0] == 0 && c.sliding[1] == 1 && c.dtype == QLORA_F16);
    ASSERT(c.rms_eps == 1e-6 && c.pad_id == -1 && c.bos_id == -1 && c.stop_count == 1);
    ASSERT(world_end(&w));
    PASS();
}

TEST config_resolves_yarn(void) {
    world w;
    qlora_model_config c;
    world_begin(&w);
    const char* plain[] = {
        "rope_scaling",
        "{\"type\":\"yarn\",\"factor\":4.0,\"original_max_position_embeddings\":64}", "rope_theta",
        "1e6", NULL};
    ASSERT_EQ(QLORA_OK, config_try(&w, plain, &c));
    ASSERT(c.rope.type == QLORA_ROPE_YARN && c.rope.factor == 4.0 && c.rope.beta_fast == 32.0);
    ASSERT(c.rope.beta_slow == 1.0 && c.rope.original_max_position == 64.0 && !c.rope.no_truncate);
    ASSERT(c.rope.theta == 1e6 && c.rope.attention_factor == 0.0 && c.rope.mscale == 0.0);
    const char* scaled[] = {
        "rope_scaling",
        "{\"rope_type\":\"yarn\",\"factor\":40,\"mscale\":0.7,\"mscale_all_dim\":2,"
        "\"beta_fast\":16,\"beta_slow\":2,\"truncate\":false}",
        "original_max_position_embeddings", "32", NULL};
    ASSERT_EQ(QLORA_OK, config_try(&w, scaled, &c));
    ASSERT(c.rope.beta_fast == 16.0 && c.rope.beta_slow == 2.0 && c.rope.no_truncate);
    ASSERT(c.rope.original_max_position == 32.0);
    ASSERT(c.rope.mscale == 0.7 && c.rope.mscale_all_dim == 2.0);
    const char* given[] = {"rope_scaling",
                           "{\"rope_type\":\"yarn\",\"factor\":2,\"attention_factor\":1.25}", NULL};
    ASSERT_EQ(QLORA_OK, config_try(&w, given, &c));
    ASSERT(c.rope.attention_factor == 1.25 && c.rope.original_max_position == 256.0);
    ASSERT(world_end(&w));
    PASS();
}

TEST config_knows_the_families(void) {
    world w;
    qlora_model_config c;
    world_begin(&w);
    const char* llama[] = {"attention_bias", "true", "mlp_bias", "true",
                           "sliding_window", "16",   NULL};
    ASSERT_EQ(QLORA_OK, config_try(&w, llama, &c));
    ASSERT(c.qkv_bias && c.o_bias && c.mlp_bias && c.window == 0 && c.dtype == -1);
    const char* mistral[] = {
        "model_type", "\"mistral\"", "architectures", "[\"MistralForCausalLM\"]", "sliding_window",
        "16",         NULL};
    ASSERT_EQ(QLORA_OK, config_try(&w, mistral, &c));
    ASSERT(c.family == QLORA_FAMILY_MISTRAL && c.window == 16 && c.sliding[0] && c.sliding[2]);
    mistral[5] = "null";
    ASSERT_EQ(QLORA_OK, config_try(&w, mistral, &c));
    ASSERT(c.window == 0 && !c.sliding[0]);
    mistral[4] = NULL; // transformers' default, without the key
    ASSERT_EQ(QLORA_OK, config_try(&w, mistral, &c));
    ASSERT(c.window == 4096 && c.sliding[0]);
    const char* qwen2[] = {"model_type", "\"qwen2\"", "architectures", NULL, "sliding_window",
                           "16",         NULL};
    ASSERT_EQ(QLORA_OK, config_try(&w, qwen2, &c));
    ASSERT(c.qkv_bias && !c.o_bias && !c.qk_norm && c.window == 0);
    // use_sliding_window defaults to false
    const char* unused[] = {"model_type",
                            "\"qwen2\"",
                            "architectures",
                            NULL,
                            "sliding_window",
                            "16",
                            "max_window_layers",
                            "0",
                            NULL};
    ASSERT_EQ(QLORA_OK, config_try(&w, unused, &c));
    ASSERT(c.window == 0 && !c.sliding[2]);
    const char* window[] = {"model_type",
                            "\"qwen2\"",
                            "architectures",
                            NULL,
                            "sliding_window",
                            "16",
                            "use_sliding_window",
                            "true",
                            "max_window_layers",
                            "2",
                            NULL};
    ASSERT_EQ(QLORA_OK, config_try(&w, window, &c));
    ASSERT(c.window == 16 && !c.sliding[1] && c.sliding[2]);
    window[5] = "null";
    ASSERT_EQ(QLORA_OK, config_try(&w, window, &c));
    ASSERT(c.window == 0 && !c.sliding[2]);
    window[4] = "use_cache";
    ASSERT_EQ(QLORA_OK, config_try(&w, window, &c));
    ASSERT(c.window == 4096 && !c.sliding[1] && c.sliding[2]);
    window[1] = "\"qwen3\"";
    ASSERT_EQ(QLORA_OK, config_try(&w, window, &c));
    ASSERT(c.window == 4096 && !c.sliding[1] && c.sliding[2]);
    const char* heads[] = {"num_key_value_heads", NULL, "head_dim", "64", NULL};
    ASSERT_EQ(QLORA_OK, config_try(&w, heads, &c));
    ASSERT(c.kv_heads == 4 && c.head_dim == 64);
    const char* old[] = {"architectures", "[\"LLaMAForCausalLM\"]", "bos_token_id", "-1", NULL};
    ASSERT_EQ(QLORA_OK, config_try(&w, old, &c));
    ASSERT(c.bos_id == -1);
    const char* nameless[] = {"model_type", NULL, NULL};
    ASSERT_EQ(QLORA_OK, config_try(&w, nameless, &c));
    ASSERT(c.family == QLORA_FAMILY_LLAMA);
    ASSERT(world_end(&w));
    PASS();
}

// A config of only the keys that are given: the class defaults of the family fill in the rest.
static qlora_result family_try(world* w, const char* text, qlora_model_config* out) {
    return qlora__config_parse(&w->env, "config.json", text, strlen(text), out);
}

TEST config_fills_in_class_defaults(void) {
    world w;
    qlora_model_config c;
    world_begin(&w);
    ASSERT_EQ(QLORA_OK, family_try(&w, "{\"model_type\":\"gemma2\"}", &c));
    ASSERT(c.vocab == 256000 && c.hidden == 2304 && c.intermediate == 9216 && c.layers == 26);
    ASSERT(c.heads == 8 && c.kv_heads == 4 && c.head_dim == 256 && c.window == 4096 && c.tied);
    ASSERT(c.sliding[0] == 1 && c.sliding[1] == 0 && c.sliding[24] == 1 && c.norm_offset == 1.0);
    ASSERT(c.attention_cap == 50.0 && c.logits_cap == 30.0 && c.attention_scale == 0.0625);
    ASSERT(c.embedding_scale == 48.0 && c.rms_eps == 1e-6 && c.rope_dims == 256);
    ASSERT_EQ(QLORA_OK, family_try(&w,
                                   "{\"model_type\":\"gemma2\",\"attn_logit_softcapping\":null,"
                                   "\"final_logit_softcapping\":null}",
                                   &c));
    ASSERT(c.attention_cap == 0.0 && c.logits_cap == 0.0);
    ASSERT_EQ(QLORA_OK, family_try(&w,
                                   "{\"model_type\":\"gemma3_text\",\"rope_scaling\":{"
                                   "\"rope_type\":\"linear\",\"factor\":8},"
                                   "\"attn_logit_softcapping\":50,"
                                   "\"final_logit_softcapping\":30}",
                                   &c));
    ASSERT(c.qk_norm && c.vocab == 262208 && c.rope.theta == 1e6 && c.rope_sliding.theta == 1e4);
    ASSERT(c.rope.type == QLORA_ROPE_LINEAR && c.rope_sliding.type == QLORA_ROPE_DEFAULT);
    ASSERT(c.sliding[4] == 1 && c.sliding[5] == 0 && c.sliding[6] == 1 && !c.wrapped);
    ASSERT(c.attention_cap == 0.0 && c.logits_cap == 30.0); // the first is never applied
    ASSERT_EQ(QLORA_OK, family_try(&w,
                                   "{\"model_type\":\"gemma3\",\"text_config\":{\"model_type\":"
                                   "\"gemma3_text\",\"final_logit_softcapping\":30}}",
                                   &c));
    ASSERT(c.wrapped && c.tied && c.logits_cap == 0.0);
    ASSERT_EQ(QLORA_OK, family_try(&w, "{\"model_type\":\"glm\"}", &c));
    ASSERT(c.qkv_bias && !c.o_bias && c.rope_dims == 64 && c.rms_eps == 1.5625e-7);
    ASSERT(c.kv_heads == 2 && c.head_dim == 128 && !c.tied);
    ASSERT_EQ(QLORA_OK, family_try(&w, "{\"model_type\":\"seed_oss\"}", &c));
    ASSERT(c.qkv_bias && !c.o_bias && !c.mlp_bias && c.heads == 80 && c.head_dim == 128);
    ASSERT_EQ(QLORA_OK, family_try(&w, "{\"model_type\":\"arcee\"}", &c));
    ASSERT(c.heads == 32 && c.kv_heads == 32 && c.rms_eps == 1e-5 && !c.tied && !c.mlp_bias);
    ASSERT(refused(&w, family_try(&w, "{\"model_type\":\"arcee\",\"hidden_act\":\"silu\"}", &c),
                   "only relu2 is supported"));
    ASSERT(refused(&w, family_try(&w, "{\"model_type\":\"seed_oss\",\"hidden_act\":\"relu2\"}", &c),
                   "only silu is supported"));
    ASSERT_EQ(QLORA_OK, family_try(&w,
                                   "{\"model_type\":\"cohere2\",\"logit_scale\":0.25,"
                                   "\"layer_norm_eps\":0.5,\"rms_norm_eps\":0.25}",
                                   &c));
    ASSERT(c.tied && c.rms_eps == 0.5 && c.logits_divisor == 4.0 && c.kv_heads == 64);
    ASSERT(refused(&w, family_try(&w, "{\"model_type\":\"cohere2\",\"head_dim\":64}", &c),
                   "head_dim is 64"));
    ASSERT_EQ(QLORA_OK, family_try(&w, "{\"model_type\":\"granite\"}", &c));
    ASSERT(c.attention_scale == 1.0 && c.residual_scale == 1.0 && c.logits_divisor == 1.0);
    ASSERT_EQ(QLORA_OK, family_try(&w,
                                   "{\"model_type\":\"phi3\",\"num_attention_heads\":24,"
                                   "\"num_key_value_heads\":null}",
                                   &c));
    ASSERT(c.kv_heads == 24 && c.head_dim == 128 && c.window == 0);
    ASSERT(world_end(&w));
    PASS();
}

TEST config_knows_layers_and_rotation_of_the_families(void) {
    world w;
    qlora_model_config c;
    world_begin(&w);
    // exaone4: with a window, the layers without one are not rotated; without, all are.
    ASSERT_EQ(QLORA_OK, family_try(&w, "{\"model_type\":\"exaone4\",\"head_dim\":128}", &c));
    ASSERT(c.window == 4096 && c.sliding[2] == 1 && c.sliding[3] == 0);
    ASSERT(c.no_rope[2] == 0 && c.no_rope[3] == 1 && c.qk_norm);
    // cohere2: those without a window never are.
    ASSERT_EQ(QLORA_OK, family_try(&w, "{\"model_type\":\"cohere2\"}", &c));
    ASSERT(c.window == 4096 && c.sliding[2] == 1 && c.sliding[3] == 0);
    ASSERT(c.no_rope[2] == 0 && c.no_rope[3] == 1);
    ASSERT_EQ(QLORA_OK, family_try(&w, "{\"model_type\":\"cohere2\",\"sliding_window\":null}", &c));
    ASSERT(c.window == 0 && c.no_rope[2] == 1 && c.no_rope[3] == 1);
    ASSERT_EQ(QLORA_OK, family_try(&w, "{\"model_type\":\"exaone4\",\"sliding_window\":null}", &c));
    ASSERT(c.window == 0 && c.no_rope[3] == 0);
    ASSERT_EQ(QLORA_OK, family_try(&w,
                                   "{\"model_type\":\"exaone4\",\"sliding_window\":null,"
                                   "\"sliding_window_pattern\":0}",
                                   &c));
    ASSERT(c.window == 0 && c.sliding[0] == 0 && c.no_rope[3] == 0);
    ASSERT_EQ(QLORA_OK,
              family_try(&w, "{\"model_type\":\"exaone4\",\"sliding_window_pattern\":\"LG\"}", &c));
    ASSERT(c.sliding[0] == 1 && c.sliding[1] == 0 && c.sliding[2] == 1 && c.no_rope[1] == 1);
    // smollm3: 1 means rotation; windows are on the other layers.
    ASSERT_EQ(QLORA_OK, family_try(&w, "{\"model_type\":\"smollm3\"}", &c));
    ASSERT(c.no_rope[2] == 0 && c.no_rope[3] == 1 && c.no_rope[4] == 0 && c.window == 0);
    ASSERT_EQ(QLORA_OK, family_try(&w,
                                   "{\"model_type\":\"smollm3\",\"num_hidden_layers\":2,"
                                   "\"no_rope_layers\":[0,1,1],\"use_sliding_window\":true,"
                                   "\"sliding_window\":64}",
                                   &c));
    ASSERT(c.no_rope[0] == 1 && c.no_rope[1] == 0 && c.sliding[0] == 1 && c.sliding[1] == 0);
    // olmo3: a theta at the top does not reach the layers with a window.
    ASSERT_EQ(QLORA_OK, family_try(&w, "{\"model_type\":\"olmo3\",\"rope_theta\":1e4}", &c));
    ASSERT(c.rope.theta == 1e4 && c.rope_sliding.theta == 5e5 && c.sliding[3] == 0);
    // nor does the key for that of gemma3.
    ASSERT_EQ(QLORA_OK, family_try(&w,
                                   "{\"model_type\":\"olmo3\",\"rope_local_base_freq\":1e3,"
                                   "\"rope_scaling\":{},\"rope_parameters\":{\"full_attention\":"
                                   "{\"type\":\"linear\",\"factor\":2,\"truncate\":true}}}",
                                   &c));
    ASSERT(c.rope.type == QLORA_ROPE_LINEAR && c.rope_sliding.theta == 5e5);
    // granite 4: no rotation unless it is asked for.
    static const char hybrid[] = "{\"model_type\":\"granitemoehybrid\",\"num_local_experts\":0,"
                                 "\"num_hidden_layers\":2,\"layer_types\":[\"attention\","
                                 "\"full_attention\"],\"position_embedding_type\":%s}";
    char text[300];
    snprintf(text, sizeof text, hybrid, "\"rope\"");
    ASSERT_EQ(QLORA_OK, family_try(&w, text, &c));
    ASSERT(c.no_rope[0] == 0 && c.no_rope[1] == 0 && c.intermediate == 1024);
    snprintf(text, sizeof text, hybrid, "null");
    ASSERT_EQ(QLORA_OK, family_try(&w, text, &c));
    ASSERT(c.no_rope[0] == 1 && c.no_rope[1] == 1);
    // phi3: the original maximum stands at the top; one inside the dictionary is ignored.
    ASSERT_EQ(QLORA_OK,
              family_try(&w,
                         "{\"model_type\":\"phi3\",\"hidden_size\":32,"
                         "\"num_attention_heads\":4,\"partial_rotary_factor\":0.75,"
                         "\"max_position_embeddings\":8192,\"rope_scaling\":{\"type\":\"su\","
                         "\"original_max_position_embeddings\":64,\"short_factor\":[1,2,3],"
                         "\"long_factor\":[4,5,6]}}",
                         &c));
    ASSERT(c.rope_dims == 6 && c.rope.type == QLORA_ROPE_LONGROPE && c.rope.factor == 2.0);
    ASSERT(c.rope.original_max_position == 4096.0 && c.rope.long_factor[2] == 6.0f);
    // rope_scaling counts before rope_parameters, and the top of the file before both.
    ASSERT_EQ(QLORA_OK,
              family_try(&w,
                         "{\"model_type\":\"granite\",\"original_max_position_embeddings\":99,"
                         "\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4,"
                         "\"original_max_position_embeddings\":64},"
                         "\"rope_parameters\":{\"rope_theta\":7e5}}",
                         &c));
    ASSERT(c.rope.type == QLORA_ROPE_YARN && c.rope.original_max_position == 99.0);
    ASSERT(c.rope.theta == 1e4);
    ASSERT(world_end(&w));
    PASS();
}

// Keys that are left out, null, or of another family, as transformers 5.23 reads them.
TEST config_knows_the_defaults_of_transformers(void) {
    static const char* const families[3] = {"mistral", "qwen2", "qwen3"};
    world w;
    qlora_model_config c;
    char text[400];
    world_begin(&w);
    for (int i = 0; i < 3; i++) {
        snprintf(text, sizeof text,
                 "{\"model_type\":\"%s\",\"vocab_size\":512,\"hidden_size\":64,"
                 "\"intermediate_size\":96,\"num_hidden_layers\":2,\"num_attention_heads\":32}",
                 families[i]);
        ASSERT_EQ(QLORA_OK, family_try(&w, text, &c));
        ASSERT(c.kv_heads == (i == 0 ? 8 : 32) && c.max_positions == (i == 0 ? 131072 : 32768));
        ASSERT(c.head_dim == (i == 2 ? 128 : 2));
    }
    ASSERT_EQ(QLORA_OK, family_try(&w,
                                   "{\"model_type\":\"seed_oss\",\"hidden_size\":5120,"
                                   "\"head_dim\":null}",
                                   &c));
    ASSERT(c.head_dim == 64);
    ASSERT(refused(&w,
                   family_try(&w,
                              "{\"model_type\":\"seed_oss\",\"hidden_size\":5000,"
                              "\"head_dim\":null}",
                              &c),
                   "head_dim is missing"));
    // only gemma3 and exaone4 have a pattern of their own
    ASSERT_EQ(QLORA_OK,
              family_try(&w, "{\"model_type\":\"gemma2\",\"sliding_window_pattern\":3}", &c));
    ASSERT(c.sliding[0] == 1 && c.sliding[1] == 0 && c.sliding[2] == 1);
    ASSERT_EQ(QLORA_OK,
              family_try(&w, "{\"model_type\":\"olmo3\",\"sliding_window_pattern\":1}", &c));
    ASSERT(c.sliding[0] == 1 && c.sliding[2] == 1 && c.sliding[3] == 0);
    ASSERT_EQ(QLORA_OK, family_try(&w,
                                   "{\"model_type\":\"gemma3_text\","
                                   "\"sliding_window_pattern\":3}",
                                   &c));
    ASSERT(c.sliding[1] == 1 && c.sliding[2] == 0);
    // sets for kinds of layers do not see the original maximum at the top
    ASSERT_EQ(QLORA_OK,
              family_try(&w,
                         "{\"model_type\":\"olmo3\",\"original_max_position_embeddings\":99,"
                         "\"rope_parameters\":{\"full_attention\":{\"rope_type\":\"yarn\","
                         "\"factor\":4,\"original_max_position_embeddings\":64}}}",
                         &c));
    ASSERT(c.rope.original_max_position == 64.0);
    ASSERT(world_end(&w));
    PASS();
}

// Python writes such numbers, which JSON does not have. A key that is read needs a finite one.
TEST config_may_have_infinities(void) {
    static const char* const words[] = {"Infinity", "-Infinity", "NaN"};
    world w;
    qlora_model_config c;
    qlora__json json;
    world_begin(&w);
    for (int i = 0; i < 3; i++) {
        char list[40];
        char said[64];
        snprintf(list, sizeof list, "[0.0, %s]", words[i]);
        const char* unread[] = {"time_step_limit", list, NULL};
        const char* eps[] = {"rms_norm_eps", words[i], NULL};
        const char* size[] = {"hidden_size", words[i], NULL};
        ASSERT_EQm(w.env.error, QLORA_OK, config_try(&w, unread, &c));
        snprintf(said, sizeof said, "rms_norm_eps is %s", words[i]);
        ASSERT(refused(&w, config_try(&w, eps, &c), said));
        snprintf(said, sizeof said, "hidden_size is %s", words[i]);
        ASSERT(refused(&w, config_try(&w, size, &c), said));
        ASSERT(refused(&w, qlora__json_parse(&w.env, "j", list, strlen(list), 0, &json),
                       "invalid JSON: expected a value"));
        char text[2048];
        config_text(text, sizeof text, unread);
        world_put(&w, "m/config.json", text, strlen(text));
        ASSERT_EQ(QLORA_OK, qlora__config_export(&w.env, "m", "o", "float32", 0, NULL));
        const world_file* f = world_slot(w.files, "o/config.json");
        ASSERT(f != NULL && f->size < sizeof text);
        memcpy(text, f->data, f->size);
        text[f->size] = '\0';
        ASSERT(strstr(text, list) != NULL);
    }
    ASSERT(world_end(&w));
    PASS();
}

TEST config_reads_the_folder(void) {
    char text[2048];
    char nested[2400];
    world w;
    qlora_model_config c;
    world_begin(&w);
    const char* changes[] = {"eos_token_id", "2", NULL};
    config_text(text, sizeof text, changes);
    ASSERT(refused(&w, qlora__config_read(&w.env, "m", &c), "m/config.json"));
    world_put(&w, "m/config.json", text, strlen(text));
    ASSERT_EQ(QLORA_OK, qlora__config_read(&w.env, "m/", &c));
    ASSERT(c.stop_count == 1 && c.stop_ids[0] == 2);
    world_put(&w, "m/generation_config.json", "{\"eos_token_id\":[3,4]}", 22);
    ASSERT_EQ(QLORA_OK, qlora__config_read(&w.env, "m", &c));
    ASSERT(c.stop_count == 2 && c.stop_ids[0] == 3 && c.stop_ids[1] == 4);
    // A file that names none means none, as in transformers.
    world_put(&w, "m/generation_config.json", "{}", 2);
    ASSERT_EQ(QLORA_OK, qlora__config_read(&w.env, "m", &c));
    ASSERT_EQ(0, c.stop_count);
    world_put(&w, "m/generation_config.json", "{\"eos_token_id\":null}", 21);
    ASSERT_EQ(QLORA_OK, qlora__config_read(&w.env, "m", &c));
    ASSERT_EQ(0, c.stop_count);
    world_put(&w, "m/generation_config.json", "{", 1);
    c.vocab = 77; // outputs are written only on success
    ASSERT(refused(&w, qlora__config_read(&w.env, "m", &c), "m/generation_config.json:1:"));
    ASSERT_EQ(77, c.vocab);
    const char* mistral[] = {"model_type", "\"mistral\"", "architectures", NULL, "eos_token_id",
                             "2",          NULL};
    config_text(text, sizeof text, mistral);
    snprintf(nested, sizeof nested, "{\"model_type\":\"mistral3\",\"text_config\":%s}", text);
    ASSERT_EQ(QLORA_OK, qlora__config_parse(&w.env, "c", nested, strlen(nested), &c));
    ASSERT(c.hidden == 128 && c.stop_ids[0] == 2 && c.wrapped && c.tied);
    ASSERT(world_end(&w));
    PASS();
}

// ---- model folders ----

// One tensor per line: name, dtype, rows, cols (0 = one dimension), bytes or NULL for zeros.
typedef struct plan {
    const char* name;
    qlora__st_dtype dtype;
    int64_t rows;
    int64_t cols;
    const void* bytes;
} plan;

static qlora_result put_tensors(world* w, const char* path, const plan* plans, uint32_t count) {
    qlora__st_entry entries[16];
    int64_t shapes[16][2];
    static const unsigned char zeros[8192];
    qlora__st_writer writer;
    memset(entries, 0, sizeof entries);
    for (uint32_t i = 0; i < count; i++) {
        shapes[i][0] = plans[i].rows;
        shapes[i][1] = plans[i].cols;
        entries[i].name = plans[i].name;
        entries[i].shape = shapes[i];
        entries[i].dtype = plans[i].dtype;
        entries[i].rank = plans[i].cols > 0 ? 2 : 1;
    }
    QLORA__TRY(qlora__st_write_begin(&w->env, path, entries, count, NULL, false, &writer));
    for (uint32_t i = 0; i < count; i++) {
        const plan* p = &plans[writer.order[i]];
        size_t n = (size_t)qlora__st_entry_bytes(&entries[writer.order[i]]);
        QLORA__TRY(qlora__st_write(&w->env, &writer, p->bytes ? p->bytes : zeros, n));
    }
    return qlora__st_write_commit(&w->env, &writer);
}

TEST folder_single_file(void) {
    static const plan plans[] = {
        {"language_model.model.embed_tokens.weight", QLORA__ST_BF16, 8, 4, NULL},
        {"language_model.lm_head.weight", QLORA__ST_F16, 8, 4, NULL},
        {"model.language_model.norm.weight", QLORA__ST_F32, 4, 0, NULL},
        {"model.layers.0.mlp.up_proj.weight", QLORA__ST_I32, 4, 4, NULL},
        {"layers.1.mlp.up_proj.weight", QLORA__ST_F32, 4, 4, NULL}};
    world w;
    static qlora__folder f;
    const qlora__st_tensor* t = NULL;
    world_begin(&w);
    ASSERT(refused(&w, qlora__folder_open(&w.env, "m", &f), "found neither model.safetensors nor"));
    ASSERT_EQ(QLORA_OK, put_tensors(&w, "m/model.safetensors", plans, 5));
    ASSERT_EQ(QLORA_OK, qlora__folder_open(&w.env, "m", &f));
    ASSERT_EQ(QLORA_OK, qlora__folder_need(&w.env, &f, "model.embed_tokens.weight", 8, 4, &t));
    ASSERT(t->dtype == QLORA__ST_BF16);
    ASSERT_EQ(QLORA_OK, qlora__folder_need(&w.env, &f, "lm_head.weight", 8, 4, &t));
    ASSERT_EQ(QLORA_OK, qlora__folder_need(&w.env, &f, "model.norm.weight", 4, -1, &t));
    ASSERT_EQ(QLORA_OK,
              qlora__folder_need(&w.env, &f, "model.layers.1.mlp.up_proj.weight", 4, 4, &t));
    ASSERT(qlora__folder_find(&f, "model.norm.bias") == NULL);
    ASSERT(refused(&w, qlora__folder_need(&w.env, &f, "model.norm.bias", 4, -1, &t),
                   "tensor model.norm.bias is missing"));
    ASSERT(refused(&w, qlora__folder_need(&w.env, &f, "model.norm.weight", 5, -1, &t),
                   "model.norm.weight has shape [4]; it must be [5]"));
    ASSERT(refused(&w, qlora__folder_need(&w.env, &f, "lm_head.weight", 8, 5, &t),
                   "lm_head.weight has shape [8,4]; it must be [8,5]"));
    ASSERT(refused(&w, qlora__folder_need(&w.env, &f, "lm_head.weight", 8, -1, &t),
                   "has shape [8,4]; it must be [8]"));
    ASSERT(refused(&w,
                   qlora__folder_need(&w.env, &f, "model.layers.0.mlp.up_proj.weight", 4, 4, &t),
                   "has dtype I32; supported are F32, BF16 and F16"));
    qlora__folder_close(&w.env, &f);
    static const plan twice[] = {{"model.norm.weight", QLORA__ST_F32, 4, 0, NULL},
                                 {"norm.weight", QLORA__ST_F32, 4, 0, NULL}};
    ASSERT_EQ(QLORA_OK, put_tensors(&w, "m/model.safetensors", twice, 2));
    ASSERT(refused(&w, qlora__folder_open(&w.env, "m", &f), "are the same tensor"));
    ASSERT(world_end(&w));
    PASS();
}

static const plan shard_1[] = {{"model.a", QLORA__ST_F32, 4, 0, NULL},
                               {"model.b", QLORA__ST_F32, 2, 2, NULL}};
static const plan shard_2[] = {{"model.c", QLORA__ST_BF16, 4, 0, NULL},
                               {"model.unlisted", QLORA__ST_F32, 4, 0, NULL}};

TEST folder_shards(void) {
    static const char index[] =
        "{\"metadata\":{\"total_size\":1},\"weight_map\":{\"model.a\":\"s1\","
        "\"model.c\":\"s2\",\"model.b\":\"s1\"}}";
    world w;
    static qlora__folder f;
    const qlora__st_tensor* t = NULL;
    world_begin(&w);
    world_put(&w, "m/model.safetensors.index.json", index, sizeof index - 1);
    ASSERT_EQ(QLORA_OK, put_tensors(&w, "m/s1", shard_1, 2));
    ASSERT(refused(&w, qlora__folder_open(&w.env, "m", &f),
                   "m/s2: this shard is listed in the index but does not exist"));
    ASSERT_EQ(QLORA_OK, put_tensors(&w, "m/s2", shard_2, 2));
    ASSERT_EQ(QLORA_OK, qlora__folder_open(&w.env, "m", &f));
    ASSERT_EQ(2u, f.shard_count);
    ASSERT_EQ(QLORA_OK, qlora__folder_need(&w.env, &f, "model.b", 2, 2, &t));
    ASSERT_EQ(QLORA_OK, qlora__folder_need(&w.env, &f, "model.c", 4, -1, &t));
    ASSERT(qlora__folder_find(&f, "model.unlisted") == NULL);
    qlora__folder_close(&w.env, &f);
    world_file* s2 = world_slot(w.files, "m/s2");
    s2->size -= 3;
    ASSERT(refused(&w, qlora__folder_open(&w.env, "m", &f), "m/s2: the tensors need 24 bytes"));
    ASSERT(strstr(w.env.error, "it is truncated") != NULL);
    ASSERT_EQ(QLORA_OK, put_tensors(&w, "m/s2", shard_1, 2));
    ASSERT(refused(&w, qlora__folder_open(&w.env, "m", &f),
                   "m/s2: tensor model.c is listed in the index but missing from this shard"));
    ASSERT(world_end(&w));
    PASS();
}

TEST folder_refuses_bad_indexes(void) {
    static const struct {
        const char* text;
        const char* message;
    } bad[] = {{"", "expected a value"},
               {"{}", "weight_map is missing"},
               {"[]", "weight_map is missing"},
               {"{\"weight_map\":{}}", "weight_map is empty"},
               {"{\"weight_map\":[\"a\"]}", "weight_map must be an object"},
               {"{\"weight_map\":{\"a\":7}}", "must map tensor names to file names"},
               {"{\"weight_map\":{\"a\":\"s1\",\"a\":\"s1\"}}", "duplicate key"},
               {"{\"weight_map\":{\"a\":\"\"}}", "must be a plain file name"},
               {"{\"weight_map\":{\"a\":\"../s1\"}}", "\"../s1\" must be a plain file name"},
               {"{\"weight_map\":{\"a\":\"/etc/passwd\"}}", "must be a plain file name"},
               {"{\"weight_map\":{\"a\":\"c:x\"}}", "must be a plain file name"},
               {"{\"weight_map\":{\"a\":\"..\"}}", "must be a plain file name"},
               {"{\"weight_map\":{\"a\":\"x\\\\y\"}}", "must be a plain file name"},
               {"{\"weight_map\":{\"a\":\"x\\u0000y\"}}", "must be a plain file name"}};
    world w;
    static qlora__folder f;
    world_begin(&w);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        world_put(&w, "m/model.safetensors.index.json", bad[i].text, strlen(bad[i].text));
        ASSERTm(bad[i].text, refused(&w, qlora__folder_open(&w.env, "m", &f), bad[i].message));
        ASSERT(strncmp(w.env.error, "m/model.safetensors.index.json:", 31) == 0);
        ASSERT_EQ_FMT(0L, w.blocks + w.handles, "%ld");
    }
    ASSERT(world_end(&w));
    PASS();
}

TEST folder_limits_the_shards(void) {
    static char text[64 * (QLORA__MAX_SHARDS + 2)];
    size_t n = (size_t)snprintf(text, sizeof text, "{\"weight_map\":{");
    world w;
    static qlora__folder f;
    for (int i = 0; i <= QLORA__MAX_SHARDS; i++) {
        n += (size_t)snprintf(text + n, sizeof text - n, "%s\"t%d\":\"s%d\"", i ? "," : "", i, i);
    }
    n += (size_t)snprintf(text + n, sizeof text - n, "}}");
    world_begin(&w);
    world_put(&w, "m/model.safetensors.index.json", text, n);
    ASSERT(refused(&w, qlora__folder_open(&w.env, "m", &f),
                   "weight_map names 4097 shards; the limit is 4096"));
    ASSERT(world_end(&w));
    PASS();
}

TEST folder_is_exported(void) {
    static const char from[] =
        "{\n  \"model_type\": \"llama\",\n  \"quantization_config\": {\"a\": [1]},"
        "\n  \"torch_dtype\": null, \"k\\u00e9y\": [1,\n 2], \"last\": {}}";
    static const char to[] = "{\n  \"model_type\": \"llama\",\n  \"torch_dtype\": \"bfloat16\",\n"
                             "  \"k\\u00e9y\": [1,\n 2],\n  \"last\": {}\n}";
    static const char index[] =
        "{\n  \"metadata\": {\n    \"total_size\": 40\n  },\n  \"weight_map\": {\n"
        "    \"model.a\": \"s1\",\n    \"model.c\": \"s2\"\n  }\n}";
    static const char* const names[] = {"model.a", "model.c"};
    static const char* const shards[] = {"s1", "s2"};
    static const uint32_t shard_of[] = {0, 1};
    world w;
    static qlora__folder f;
    world_begin(&w);
    ASSERT(
        refused(&w, qlora__config_export(&w.env, "m", "n", "bfloat16", 0, NULL), "m/config.json"));
    world_put(&w, "m/config.json", from, sizeof from - 1);
    ASSERT_EQ(QLORA_OK, qlora__config_export(&w.env, "m", "n", "bfloat16", 0, NULL));
    world_file* file = world_slot(w.files, "n/config.json");
    ASSERT_EQ(sizeof to - 1, file->size);
    ASSERT_MEM_EQ(to, file->data, file->size);
    world_put(&w, "m/config.json", "[]", 2);
    ASSERT(refused(&w, qlora__config_export(&w.env, "m", "n", "bfloat16", 0, NULL),
                   "expected a JSON object"));
    ASSERT_EQ(QLORA_OK, put_tensors(&w, "n/s1", shard_1, 2));
    ASSERT_EQ(QLORA_OK, put_tensors(&w, "m/s2", shard_2, 2));
    ASSERT_EQ(QLORA_OK, qlora__file_copy(&w.env, "m/s2", "n/s2"));
    ASSERT(refused(&w, qlora__file_copy(&w.env, "m/s3", "n/s3"), "m/s3: no such file"));
    ASSERT_EQ(QLORA_OK, qlora__index_write(&w.env, "n", names, shard_of, 2, shards, 40));
    file = world_slot(w.files, "n/model.safetensors.index.json");
    ASSERT_EQ(sizeof index - 1, file->size);
    ASSERT_MEM_EQ(index, file->data, file->size);
    ASSERT_EQ(QLORA_OK, qlora__folder_open(&w.env, "n", &f));
    ASSERT_EQ(2u, f.count);
    qlora__folder_close(&w.env, &f);
    ASSERT(world_end(&w));
    PASS();
}

// ---- bitsandbytes ----

#define STATE(rest)                                                                                \
    "{\"quant_type\":\"nf4\",\"blocksize\":64,\"dtype\":\"bfloat16\",\"shape\":[6,65]" rest "}"
#define NESTED ",\"nested_blocksize\":256,\"nested_dtype\":\"float32\",\"nested_offset\":0.0625"

// A folder with one 4-bit matrix of 6 x 65: 195 bytes of codes, 7 blocks.
static qlora_result put_bnb(world* w, const char* state, qlora__st_dtype absmax, int64_t blocks,
                            int64_t packed, const float* book) {
    plan plans[] = {{"model.work.x.weight", QLORA__ST_U8, packed, 1, NULL},
                    {"model.work.x.weight.absmax", absmax, blocks, 0, NULL},
                    {"model.work.x.weight.quant_map", QLORA__ST_F32, 16, 0, book},
                    {"model.work.x.weight.nested_absmax", QLORA__ST_F32, 1, 0, NULL},
                    {"model.work.x.weight.nested_quant_map", QLORA__ST_F32, 256, 0, NULL},
                    {"model.work.x.weight.quant_state.bitsandbytes__nf4", QLORA__ST_U8,
                     (int64_t)strlen(state), 0, state},
                    {"model.y.weight", QLORA__ST_F32, 6, 65, NULL}};
    return put_tensors(w, "m/model.safetensors", plans, 7);
}

static qlora_result try_bnb(world* w, const char* state, qlora__st_dtype absmax, int64_t blocks,
                            int64_t packed, const float* book, qlora__linear_source* out) {
    static qlora__folder f;
    QLORA__TRY(put_bnb(w, state, absmax, blocks, packed, book));
    QLORA__TRY(qlora__folder_open(&w->env, "m", &f));
    qlora_result r = qlora__folder_linear(&w->env, &f, "model.work.x.weight", 6, 65, out);
    qlora__folder_close(&w->env, &f);
    return r;
}

TEST bnb_reads_both_kinds(void) {
    world w;
    static qlora__folder f;
    qlora__linear_source s;
    world_begin(&w);
    ASSERT_EQ(QLORA_OK, put_bnb(&w, STATE(NESTED), QLORA__ST_U8, 7, 195, qlora__nf4_levels));
    ASSERT_EQ(QLORA_OK, qlora__folder_open(&w.env, "m", &f));
    ASSERT_EQ(QLORA_OK, qlora__folder_linear(&w.env, &f, "model.work.x.weight", 6, 65, &s));
    ASSERT(s.nf4 && s.nested && s.rows == 6 && s.cols == 65 && s.block == 64 && s.block2 == 256);
    ASSERT(s.offset == 0.0625f && s.dtype == QLORA_BF16 && s.weight->bytes == 195);
    ASSERT(s.absmax->bytes == 7 && s.absmax2->bytes == 4 && s.map2->bytes == 1024);
    ASSERT_EQ(QLORA_OK, qlora__folder_linear(&w.env, &f, "model.y.weight", 6, 65, &s));
    ASSERT(!s.nf4 && s.dtype == QLORA_F32 && s.weight->bytes == 6 * 65 * 4);
    ASSERT(refused(&w, qlora__folder_linear(&w.env, &f, "model.work.x.weight", 65, 6, &s),
                   "has shape [6,65]; it must be [65,6]"));
    ASSERT(
        refused(&w, qlora__folder_linear(&w.env, &f, "model.z.weight", 6, 65, &s), "is missing"));
    qlora__folder_close(&w.env, &f);
    ASSERT_EQ(QLORA_OK, try_bnb(&w, STATE(""), QLORA__ST_F32, 7, 195, qlora__nf4_levels, &s));
    ASSERT(s.nf4 && !s.nested);
    ASSERT_EQ(QLORA_OK, try_bnb(&w, STATE(""), QLORA__ST_BF16, 7, 196, qlora__nf4_levels, &s));
    ASSERT(world_end(&w));
    PASS();
}

TEST bnb_refuses_each_fault(void) {
    static const struct {
        const char* state;
        const char* message;
    } bad[] = {
        {"{", "quant_state.bitsandbytes__nf4:1:"},
        {"{}", "quant_type is missing"},
        {"{\"quant_type\":\"fp4\"}", "quant_type \"fp4\" is not supported; only nf4 is supported"},
        {"{\"quant_type\":\"nf4\",\"blocksize\":64,\"dtype\":\"bfloat16\"}", "shape is missing"},
        {"{\"quant_type\":\"nf4\",\"blocksize\":64,\"dtype\":\"bfloat16\",\"shape\":[6]}",
         "shape is [6]; it must be two integers"},
        {"{\"quant_type\":\"nf4\",\"blocksize\":64,\"dtype\":\"bfloat16\",\"shape\":[0,65]}",
         "shape is [0,65]; it must be two integers"},
        {"{\"quant_type\":\"nf4\",\"dtype\":\"bfloat16\",\"shape\":[6,65]}",
         "blocksize is missing"},
        {"{\"quant_type\":\"nf4\",\"blocksize\":0,\"dtype\":\"bfloat16\",\"shape\":[6,65]}",
         "blocksize is 0;"},
        {"{\"quant_type\":\"nf4\",\"blocksize\":96,\"dtype\":\"bfloat16\",\"shape\":[6,65]}",
         "blocksize is 96; it must be a power of two"},
        {"{\"quant_type\":\"nf4\",\"blocksize\":64,\"dtype\":\"int8\",\"shape\":[6,65]}",
         "dtype is int8; it must be bfloat16, float16 or float32"},
        {STATE(",\"nested_blocksize\":256"), "nested_offset is missing"},
        {STATE(",\"nested_blocksize\":0"), "nested_blocksize is 0;"},
        {STATE(",\"nested_blocksize\":96"), "nested_blocksize is 96; it must be a power of two"},
        {STATE(",\"nested_blocksize\":256,\"nested_offset\":1e39"),
         "nested_offset is 1e39; it must be a number from"},
        {STATE(""), "model.work.x.weight.absmax has dtype U8; the quant_state requires F32"}};
    world w;
    qlora__linear_source s;
    float other[16];
    world_begin(&w);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        ASSERTm(bad[i].state,
                refused(&w, try_bnb(&w, bad[i].state, QLORA__ST_U8, 7, 195, qlora__nf4_levels, &s),
                        bad[i].message));
    }
    ASSERT(refused(&w, try_bnb(&w, STATE(NESTED), QLORA__ST_U8, 6, 195, qlora__nf4_levels, &s),
                   "absmax has 6 elements; the quant_state requires 7"));
    ASSERT(refused(&w, try_bnb(&w, STATE(NESTED), QLORA__ST_F32, 7, 195, qlora__nf4_levels, &s),
                   "absmax has dtype F32; the quant_state requires U8"));
    ASSERT(refused(&w, try_bnb(&w, STATE(NESTED), QLORA__ST_U8, 7, 194, qlora__nf4_levels, &s),
                   "has 194 bytes; 6 x 65 codes need 195"));
    ASSERT(refused(&w, try_bnb(&w, STATE(NESTED), QLORA__ST_U8, 7, 203, qlora__nf4_levels, &s),
                   "has 203 bytes"));
    memcpy(other, qlora__nf4_levels, sizeof other);
    other[3] += 1e-4f;
    ASSERT(refused(&w, try_bnb(&w, STATE(NESTED), QLORA__ST_U8, 7, 195, other, &s),
                   "is not the NF4 code book"));
    uint32_t nan = 0x7fc00000u;
    memcpy(&other[3], &nan, 4);
    ASSERT(refused(&w, try_bnb(&w, STATE(NESTED), QLORA__ST_U8, 7, 195, other, &s),
                   "is not the NF4 code book"));
    ASSERT(world_end(&w));
    PASS();
}

TEST bnb_refuses_fp4_by_name(void) {
    static const plan plans[] = {
        {"model.work.x.weight", QLORA__ST_U8, 195, 1, NULL},
        {"model.work.x.weight.quant_state.bitsandbytes__fp4", QLORA__ST_U8, 2, 0, "{}"}};
    world w;
    static qlora__folder f;
    qlora__linear_source s;
    world_begin(&w);
    ASSERT_EQ(QLORA_OK, put_tensors(&w, "m/model.safetensors", plans, 2));
    ASSERT_EQ(QLORA_OK, qlora__folder_open(&w.env, "m", &f));
    ASSERT(refused(&w, qlora__folder_linear(&w.env, &f, "model.work.x.weight", 6, 65, &s),
                   "fp4 format"));
    qlora__folder_close(&w.env, &f);
    ASSERT(world_end(&w));
    PASS();
}

// ---- PEFT ----

static const struct {
    const char* pattern;
    const char* text;
    bool match;
} pattern_table[] = {
    {"abc", "abc", true},
    {"abc", "abcd", false},
    {"abc", "ab", false},
    {"", "", true},
    {"", "a", false},
    {"a.c", "axc", true},
    {"a\\.c", "axc", false},
    {"a|bc|d", "bc", true},
    {"a|bc|d", "d", true},
    {"a|bc|d", "abc", false},
    {"a|bc|d", "c", false},
    {"x(a|bc)*y", "xabcay", true},
    {"x(a|bc)*y", "xy", true},
    {"x(a|bc)*y", "xaby", false},
    {"x(?:a|b)+y", "xy", false},
    {"x(?:a|b)+?y", "xbay", true},
    {"colou?r", "color", true},
    {"colou?r", "colouur", false},
    {"(a|)b", "b", true},
    {"(|a)*b", "aab", true},
    {"((a*)*)*b", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaac", false},
    {".*", "", true},
    {".*\\.(q|v)_proj", "model.layers.0.self_attn.v_proj", true},
    {".*\\.(q|v)_proj", "model.layers.0.self_attn.k_proj", false},
    {"[a-c]+", "abcabc", true},
    {"[a-c]+", "abcd", false},
    {"[^.]+\\.x", "ab.x", true},
    {"[^.]+\\.x", "a.b.x", false},
    {"[]a]+", "a]", true},
    {"[a\\]]+", "]a", true},
    {"[a-]+", "-a", true},
    {"[\\d_]+", "1_2", true},
    {"\\d{1,}", "123", true},
    {"\\d{1,}", "", false},
    {"a{0,1}b{0,}c{1}", "bbc", true},
    {"\\D\\w\\W", "a1.", true},
    {"^a$", "a", true},
    {"b^a", "ba", false},
    {"a$b", "ab", false},
    {"\\bq_proj\\b", "q_proj", true},
    {"q\\b_proj", "q_proj", false},
    {".*\\bq.*", "a.q", true},
    // as written by Unsloth
    {"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|up_proj).*?)|"
     "(?:\\bmodel\\.layers\\.[\\d]{1,}\\.(?:self_attn|mlp)\\.(?:(?:q_proj|up_proj)))",
     "model.layers.11.mlp.up_proj", true},
    {"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|up_proj).*?)|"
     "(?:\\bmodel\\.layers\\.[\\d]{1,}\\.(?:self_attn|mlp)\\.(?:(?:q_proj|up_proj)))",
     "model.layers.11.mlp.down_proj", false},
};

TEST patterns_match_as_python_does(void) {
    for (size_t i = 0; i < sizeof pattern_table / sizeof pattern_table[0]; i++) {
        static qlora__re re;
        qlora__re_compile(&re, pattern_table[i].pattern);
        ASSERTm(pattern_table[i].pattern, re.wrong == NULL);
        ASSERTm(pattern_table[i].pattern,
                qlora__re_match(&re, pattern_table[i].text) == pattern_table[i].match);
    }
    PASS();
}

TEST patterns_refuse_the_rest_by_name(void) {
    static const struct {
        const char* pattern;
        const char* wrong;
    } table[] = {
        {"a{2}", "a counted repetition"},
        {"a{2,3}", "a counted repetition"},
        {"(?=a)", "a (?...) group other than (?:...)"},
        {"(?!a)", "a (?...) group other than (?:...)"},
        {"(?P<n>a)", "a (?...) group other than (?:...)"},
        {"(a)\\1", "an escape other than"},
        {"\\p", "an escape other than"},
        {"a\\", "an escape other than"},
        {"(a", "an unmatched '('"},
        {"a)", "an unmatched ')'"},
        {"[a", "a set without a closing ']'"},
        {"[", "a set without a closing ']'"},
        {"[a\\", "a set without a closing ']'"},
        {"*a", "with nothing before it"},
        {"a|*", "with nothing before it"},
        {"(+)", "with nothing before it"},
        {"a**", "a quantifier after a quantifier"},
        {"((((((((((((((((((((((((((((((((a))))))))))))))))))))))))))))))))", "too many groups"}};
    static qlora__re re;
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        qlora__re_compile(&re, table[i].pattern);
        ASSERTm(table[i].pattern, re.wrong != NULL && strstr(re.wrong, table[i].wrong) != NULL);
    }
    char many[2 * QLORA__RE_MAX];
    memset(many, 'a', sizeof many - 1);
    many[sizeof many - 1] = '\0';
    qlora__re_compile(&re, many);
    ASSERT(re.wrong != NULL);
    many[0] = '\0';
    for (int i = 0; i < 40; i++) {
        strcat(many, "[ab]");
    }
    qlora__re_compile(&re, many);
    ASSERT(re.wrong != NULL);
    PASS();
}

// What a config specifies for one module: its rank and, through `scale`, its scale.
static int64_t peft_rank(world* w, const char* config, const char* module, double* scale) {
    static qlora__peft p;
    qlora__peft_module m;
    if (qlora__peft_parse(&w->env, "adapter_config.json", config, strlen(config), &p) != QLORA_OK) {
        printf("\n%s\n", w->env.error);
        return -1;
    }
    qlora_result r = qlora__peft_lookup(&w->env, &p, module, &m);
    qlora__peft_close(&w->env, &p);
    *scale = m.scale;
    return r == QLORA_OK ? m.rank : -1;
}

#define LORA(rest) "{\"peft_type\":\"LORA\",\"r\":8,\"lora_alpha\":16," rest "}"
#define Q0 "model.layers.0.self_attn.q_proj"
#define Q12 "model.layers.12.self_attn.q_proj"

TEST peft_selects_modules(void) {
    static const struct {
        const char* config;
        const char* module;
        int64_t rank;
        double scale;
    } table[] = {
        {LORA("\"target_modules\":[\"q_proj\",\"v_proj\"]"), Q0, 8, 2.0},
        {LORA("\"target_modules\":[\"k_proj\"]"), Q0, 0, 0.0},
        {LORA("\"target_modules\":[\"proj\"]"), Q0, 0, 0.0},
        {LORA("\"target_modules\":[\"self_attn.q_proj\"]"), Q0, 8, 2.0},
        {LORA("\"target_modules\":[\"" Q0 "\"]"), Q0, 8, 2.0},
        {LORA("\"target_modules\":[\"" Q0 "\"]"), Q12, 0, 0.0},
        {LORA("\"target_modules\":[]"), Q0, 0, 0.0},
        {LORA("\"target_modules\":\"all-linear\""), Q0, 8, 2.0},
        {LORA("\"target_modules\":\"all-linear\""), "lm_head", 0, 0.0},
        {LORA("\"target_modules\":\".*\\\\.(q|v)_proj\""), Q0, 8, 2.0},
        {LORA("\"target_modules\":\"q_proj\""), Q0, 0, 0.0},
        {LORA("\"target_modules\":[\"q_proj\"],\"exclude_modules\":[\"0.self_attn.q_proj\"]"), Q0,
         0, 0.0},
        {LORA("\"target_modules\":[\"q_proj\"],\"exclude_modules\":[\"0.self_attn.q_proj\"]"), Q12,
         8, 2.0},
        {LORA("\"target_modules\":[\"q_proj\"],\"exclude_modules\":\".*layers\\\\.1.*\""), Q12, 0,
         0.0},
        {LORA("\"target_modules\":[\"q_proj\"],\"exclude_modules\":\"all-linear\""), Q0, 8, 2.0},
        {LORA("\"target_modules\":[\"q_proj\"],\"layers_to_transform\":[1,12]"), Q12, 8, 2.0},
        {LORA("\"target_modules\":[\"q_proj\"],\"layers_to_transform\":[1,12]"), Q0, 0, 0.0},
        {LORA("\"target_modules\":[\"q_proj\"],\"layers_to_transform\":0,\"layers_pattern\":"
              "\"layers\""),
         Q0, 8, 2.0},
        {LORA("\"target_modules\":[\"q_proj\"],\"use_rslora\":true"), Q0, 8, 5.65685424949238},
        {LORA("\"target_modules\":[\"q_proj\"],\"rank_pattern\":{\"q_proj\":4}"), Q0, 4, 4.0},
        {LORA("\"target_modules\":[\"q_proj\"],\"rank_pattern\":{\"roj\":4}"), Q0, 8, 2.0},
        {LORA("\"target_modules\":[\"q_proj\"],\"rank_pattern\":{\"q_pro\":4}"), Q0, 8, 2.0},
        {LORA("\"target_modules\":[\"q_proj\"],\"rank_pattern\":{\"layers\\\\.12\\\\..*\":4}"), Q12,
         4, 4.0},
        {LORA("\"target_modules\":[\"q_proj\"],\"rank_pattern\":{\"layers\\\\.12\\\\..*\":4}"), Q0,
         8, 2.0},
        {LORA("\"target_modules\":[\"q_proj\"],\"rank_pattern\":{\"^layers.*\":4}"), Q0, 8, 2.0},
        {LORA("\"target_modules\":[\"q_proj\"],\"rank_pattern\":{\"^model.*\":4,\"q_proj\":2}"), Q0,
         4, 4.0},
        {LORA("\"target_modules\":[\"q_proj\"],\"alpha_pattern\":{\"q_proj\":4.5}"), Q0, 8, 0.5625},
        {"{\"peft_type\":\"LORA\",\"target_modules\":[\"q_proj\"]}", Q0, 8, 1.0},
        // PEFT applies layers_to_transform only to names that are not complete, and not if empty.
        {LORA("\"target_modules\":[\"" Q0 "\"],\"layers_to_transform\":[3]"), Q0, 8, 2.0},
        {LORA("\"target_modules\":[\"q_proj\",\"" Q0 "\"],\"layers_to_transform\":[3]"), Q0, 8,
         2.0},
        {LORA("\"target_modules\":[\"q_proj\"],\"layers_to_transform\":[]"), Q0, 8, 2.0},
        {LORA("\"target_modules\":\"All-Linear\""), Q0, 8, 2.0},
        // Ways of initialising that leave the base alone, and fields without effect.
        {LORA("\"init_lora_weights\":true,\"target_modules\":[\"q_proj\"]"), Q0, 8, 2.0},
        {LORA("\"init_lora_weights\":false,\"target_modules\":[\"q_proj\"]"), Q0, 8, 2.0},
        {LORA("\"init_lora_weights\":\"gaussian\",\"target_modules\":[\"q_proj\"]"), Q0, 8, 2.0},
        {LORA("\"init_lora_weights\":\"eva\",\"eva_config\":{\"rho\":2.0},"
              "\"target_modules\":[\"q_proj\"]"),
         Q0, 8, 2.0},
        {LORA("\"init_lora_weights\":\"orthogonal\",\"target_modules\":[\"q_proj\"]"), Q0, 8, 2.0},
        {LORA("\"init_lora_weights\":\"mica\",\"target_modules\":[\"q_proj\"]"), Q0, 8, 2.0},
        {LORA("\"megatron_core\":\"megatron.core\",\"qalora_group_size\":16,\"peft_version\":\"9\","
              "\"auto_mapping\":{\"a\":1},\"revision\":\"x\",\"loftq_config\":{\"b\":4},"
              "\"corda_config\":{\"cache_file\":\"c\"},\"lora_ga_config\":{\"direction\":\"x\"},"
              "\"runtime_config\":{\"ephemeral_gpu_offload\":true},"
              "\"new_switch\":false,\"new_list\":[],\"target_modules\":[\"q_proj\"]"),
         Q0, 8, 2.0},
    };
    world w;
    world_begin(&w);
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        double scale = -1.0;
        ASSERT_EQ_FMTm(table[i].config, (long)table[i].rank,
                       (long)peft_rank(&w, table[i].config, table[i].module, &scale), "%ld");
        ASSERTm(table[i].config, fabs(scale - table[i].scale) < 1e-12);
    }
    ASSERT(world_end(&w));
    PASS();
}

static const struct {
    const char* config;
    const char* message;
} peft_bad[] = {
    {"", "expected a value"},
    {"[]", "expected a JSON object"},
    {"{\"target_modules\":[\"q\"]}", "peft_type is missing"},
    {"{\"peft_type\":\"IA3\",\"target_modules\":[\"q\"]}", "peft_type \"IA3\" is not supported"},
    {"{\"peft_type\":\"LORA\"}", "target_modules is missing"},
    {"{\"peft_type\":\"LORA\",\"target_modules\":null}", "target_modules is missing"},
    {"{\"peft_type\":\"LORA\",\"target_modules\":7}", "target_modules is 7; it must be"},
    {"{\"peft_type\":\"LORA\",\"target_modules\":[7]}", "target_modules is [7]; it must be"},
    {"{\"peft_type\":\"LORA\",\"r\":1,\"r\":2,\"target_modules\":[\"q\"]}", "duplicate key \"r\""},
    {"{\"peft_type\":\"LORA\",\"r\":0,\"target_modules\":[\"q\"]}", "r is 0;"},
    {"{\"peft_type\":\"LORA\",\"r\":2.5,\"target_modules\":[\"q\"]}", "r is 2.5;"},
    {"{\"peft_type\":\"LORA\",\"lora_alpha\":-1,\"target_modules\":[\"q\"]}", "lora_alpha is -1;"},
    {LORA("\"lora_dropout\":1.0,\"target_modules\":[\"q\"]"), "lora_dropout is 1.0;"},
    {LORA("\"use_dora\":7,\"target_modules\":[\"q\"]"), "use_dora is 7"},
    {LORA("\"bias\":\"all\",\"target_modules\":[\"q\"]"), "bias \"all\" is not supported"},
    {LORA("\"modules_to_save\":[\"lm_head\",\"mlp\"],\"target_modules\":[\"q\"]"),
     "modules_to_save \"mlp\" is not supported; only embed_tokens, lm_head and norms"},
    {LORA("\"modules_to_save\":[\"norms\"],\"target_modules\":[\"q\"]"),
     "modules_to_save \"norms\" is not supported; only embed_tokens, lm_head and norms"},
    {LORA("\"modules_to_save\":\"lm_head\",\"target_modules\":[\"q\"]"),
     "modules_to_save \"lm_head\" is not supported; it must be a list"},
    {LORA("\"fan_in_fan_out\":true,\"target_modules\":[\"q\"]"), "fan_in_fan_out"},
    {LORA("\"lora_bias\":true,\"target_modules\":[\"q\"]"), "lora_bias"},
    {LORA("\"trainable_token_indices\":[-1],\"target_modules\":[\"q\"]"),
     "trainable_token_indices \"[-1]\" is not supported; it must be a list of token ids"},
    {LORA("\"trainable_token_indices\":{\"lm_head\":[1]},\"target_modules\":[\"q\"]"),
     "only embed_tokens is supported"},
    {LORA("\"trainable_token_indices\":[1],\"modules_to_save\":[\"embed_tokens\"],"
          "\"target_modules\":[\"q\"]"),
     "modules_to_save already trains the whole embedding"},
    {LORA("\"layer_replication\":[[0,1]],\"target_modules\":[\"q\"]"), "layer_replication"},
    {LORA("\"target_parameters\":\"x\",\"target_modules\":[\"q\"]"), "it must be a list"},
    {LORA("\"target_parameters\":[\"x\"],\"target_modules\":[\"q\"],\"lora_dropout\":0.1"),
     "target_parameters together with lora_dropout"},
    {LORA("\"target_parameters\":[\"x\"],\"target_modules\":[\"q\"],\"use_dora\":true"),
     "target_parameters together with use_dora"},
    {LORA("\"target_parameters\":[\"x\"],\"target_modules\":[\"q\"],\"exclude_modules\":[\"k\"]"),
     "target_parameters together with exclude_modules"},
    {LORA("\"target_parameters\":[\"x\"],\"target_modules\":[\"q\"],\"layers_to_transform\":[0]"),
     "target_parameters together with layers_to_transform"},
    {LORA("\"layers_pattern\":\"h\",\"target_modules\":[\"q\"]"), "layers_pattern \"h\""},
    {LORA("\"layers_pattern\":[\"h\"],\"target_modules\":[\"q\"]"), "layers_pattern \"h\""},
    {LORA("\"init_lora_weights\":\"pissa\",\"target_modules\":[\"q\"]"),
     "init_lora_weights \"pissa\" is not supported; it changes the base"},
    {LORA("\"init_lora_weights\":\"pissa_niter_16\",\"target_modules\":[\"q\"]"), "pissa_niter_16"},
    {LORA("\"init_lora_weights\":\"olora\",\"target_modules\":[\"q\"]"), "\"olora\""},
    {LORA("\"init_lora_weights\":\"OLoRA\",\"target_modules\":[\"q\"]"), "\"OLoRA\""},
    {LORA("\"init_lora_weights\":\"corda\",\"target_modules\":[\"q\"]"), "\"corda\""},
    {LORA("\"init_lora_weights\":\"loftq\",\"target_modules\":[\"q\"]"), "\"loftq\""},
    {LORA("\"init_lora_weights\":\"lora_ga\",\"target_modules\":[\"q\"]"), "\"lora_ga\""},
    {LORA("\"init_lora_weights\":\"next year\",\"target_modules\":[\"q\"]"), "\"next year\""},
    {LORA("\"init_lora_weights\":7,\"target_modules\":[\"q\"]"), "init_lora_weights"},
    {LORA("\"alora_invocation_tokens\":[1],\"target_modules\":[\"q\"]"), "alora_invocation_tokens"},
    {LORA("\"arrow_config\":{\"a\":1},\"target_modules\":[\"q\"]"), "arrow_config"},
    {LORA("\"kasa_config\":{\"a\":1},\"target_modules\":[\"q\"]"), "kasa_config"},
    {LORA("\"monteclora_config\":{\"a\":1},\"target_modules\":[\"q\"]"), "monteclora_config"},
    {LORA("\"velora_config\":{\"a\":1},\"target_modules\":[\"q\"]"), "velora_config"},
    {LORA("\"megatron_config\":{\"a\":1},\"target_modules\":[\"q\"]"), "megatron_config"},
    {LORA("\"use_qalora\":true,\"target_modules\":[\"q\"]"), "use_qalora"},
    {LORA("\"use_bdlora\":{\"a\":1},\"target_modules\":[\"q\"]"), "use_bdlora"},
    {LORA("\"use_zlora\":true,\"target_modules\":[\"q\"]"),
     "use_zlora \"true\" is not supported; the field is not known"},
    {LORA("\"layers_to_transform\":[1],\"target_modules\":\"q.*\""),
     "layers_to_transform is set, but target_modules is not a list"},
    {LORA("\"layers_to_transform\":[\"1\"],\"target_modules\":[\"q\"]"),
     "layers_to_transform is [\"1\"]; it must be"},
    {LORA("\"layers_to_transform\":1.5,\"target_modules\":[\"q\"]"), "layers_to_transform is 1.5"},
    {LORA("\"rank_pattern\":[],\"target_modules\":[\"q\"]"),
     "rank_pattern is []; it must be an object"},
    {LORA("\"alpha_pattern\":7,\"target_modules\":[\"q\"]"),
     "alpha_pattern is 7; it must be an object"},
};

static const struct {
    const char* config;
    const char* message;
} peft_bad_lookup[] = {
    {LORA("\"target_modules\":\"(?=x)\""), "the pattern \"(?=x)\" has a (?...) group"},
    {LORA("\"target_modules\":[\"q_proj\"],\"rank_pattern\":{\"q_{2}\":1}"),
     "the pattern \"q_{2}\" has a counted repetition"},
    {LORA("\"target_modules\":[\"q_proj\"],\"rank_pattern\":{\"q_proj\":0}"),
     "rank 0 must be an integer from 1 to 65536"},
    {LORA("\"target_modules\":[\"q_proj\"],\"rank_pattern\":{\"q_proj\":\"4\"}"),
     "rank 4 must be an integer from 1 to 65536"},
    {LORA("\"target_modules\":[\"q_proj\"],\"alpha_pattern\":{\"q_proj\":0}"),
     "alpha 0 must be greater than 0"},
};

TEST peft_refuses_each_fault(void) {
    world w;
    static qlora__peft p;
    qlora__peft_module m;
    world_begin(&w);
    for (size_t i = 0; i < sizeof peft_bad / sizeof peft_bad[0]; i++) {
        qlora_result r = qlora__peft_parse(&w.env, "adapter_config.json", peft_bad[i].config,
                                           strlen(peft_bad[i].config), &p);
        ASSERTm(peft_bad[i].config, refused(&w, r, peft_bad[i].message));
        ASSERT(strncmp(w.env.error, "adapter_config.json:", 20) == 0);
    }
    for (size_t i = 0; i < sizeof peft_bad_lookup / sizeof peft_bad_lookup[0]; i++) {
        ASSERT_EQ(QLORA_OK,
                  qlora__peft_parse(&w.env, "adapter_config.json", peft_bad_lookup[i].config,
                                    strlen(peft_bad_lookup[i].config), &p));
        ASSERTm(peft_bad_lookup[i].config,
                refused(&w, qlora__peft_lookup(&w.env, &p, Q0, &m), peft_bad_lookup[i].message));
        qlora__peft_close(&w.env, &p);
    }
    ASSERT(world_end(&w));
    PASS();
}

static const char* const qv[] = {"q_proj", "v_proj"};

static qlora__peft_desc peft_desc(void) {
    static const qlora__peft_override overrides[] = {{"layers.0.self_attn.v_proj", 4, 8.0}};
    qlora__peft_desc d;
    memset(&d, 0, sizeof d);
    d.base_name = "org/base \"x\"";
    d.rank = 8;
    d.alpha = 16.0;
    d.dropout = 0.05;
    d.rslora = true;
    d.targets = qv;
    d.target_count = 2;
    d.overrides = overrides;
    d.override_count = 1;
    return d;
}

// The matrices of q_proj (rank 8) and v_proj (rank 4) of layer 0, out 6, in 5.
static qlora_result put_adapter(world* w, int64_t a_rank, const char* extra) {
    float a[40];
    for (int i = 0; i < 40; i++) {
        a[i] = (float)i;
    }
    plan plans[] = {{"base_model.model." Q0 ".lora_A.weight", QLORA__ST_F32, a_rank, 5, a},
                    {"base_model.model." Q0 ".lora_B.weight", QLORA__ST_F32, 6, 8, NULL},
                    {"base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight",
                     QLORA__ST_F32, 4, 5, NULL},
                    {"base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight",
                     QLORA__ST_F32, 6, 4, NULL},
                    {extra, QLORA__ST_F32, 6, 0, NULL}};
    return put_tensors(w, "a/adapter_model.safetensors", plans, extra ? 5 : 4);
}

TEST peft_round_trip(void) {
    static const char expected[] =
        "{\n  \"alpha_pattern\": {\n    \"layers\\\\.0\\\\.self_attn\\\\.v_proj\": 8\n  },\n"
        "  \"base_model_name_or_path\": \"org/base \\\"x\\\"\",\n  \"bias\": \"none\",\n"
        "  \"fan_in_fan_out\": false,\n  \"inference_mode\": true,\n  \"init_lora_weights\": "
        "true,\n"
        "  \"layers_pattern\": null,\n  \"layers_to_transform\": null,\n  \"lora_alpha\": 16,\n"
        "  \"lora_dropout\": 0.05,\n  \"modules_to_save\": null,\n  \"peft_type\": \"LORA\",\n"
        "  \"r\": 8,\n  \"rank_pattern\": {\n    \"layers\\\\.0\\\\.self_attn\\\\.v_proj\": 4\n  "
        "},\n"
        "  \"revision\": null,\n  \"target_modules\": [\n    \"q_proj\",\n    \"v_proj\"\n  ],\n"
        "  \"task_type\": \"CAUSAL_LM\",\n  \"use_dora\": false,\n  \"use_rslora\": true\n}";
    world w;
    static qlora__peft p;
    qlora__peft_module m;
    float row[5];
    qlora__peft_desc d = peft_desc();
    world_begin(&w);
    ASSERT_EQ(QLORA_OK, put_adapter(&w, 8, NULL));
    ASSERT_EQ(QLORA_OK, qlora__peft_write_config(&w.env, "a", &d));
    world_file* f = world_slot(w.files, "a/adapter_config.json");
    ASSERT_EQ(sizeof expected - 1, f->size);
    ASSERT_MEM_EQ(expected, f->data, f->size);
    ASSERT_EQ(QLORA_OK, qlora__peft_open(&w.env, "a", &p));
    ASSERT(p.rslora && p.dropout == 0.05 && p.rank == 8 && p.alpha == 16.0);
    ASSERT_EQ(QLORA_OK, qlora__peft_find(&w.env, &p, Q0, 6, 5, &m));
    ASSERT(m.rank == 8 && fabs(m.scale - 16.0 / sqrt(8.0)) < 1e-12 && m.b->shape[0] == 6);
    qlora__st_read_f32(m.a, 5, 5, row);
    ASSERT(row[0] == 5.0f && row[4] == 9.0f);
    ASSERT_EQ(QLORA_OK, qlora__peft_find(&w.env, &p, "model.layers.0.self_attn.v_proj", 6, 5, &m));
    ASSERT(m.rank == 4 && m.alpha == 8.0 && m.scale == 4.0);
    ASSERT_EQ(QLORA_OK, qlora__peft_find(&w.env, &p, "model.layers.0.self_attn.k_proj", 6, 5, &m));
    ASSERT(m.rank == 0 && m.a == NULL);
    ASSERT(refused(&w, qlora__peft_find(&w.env, &p, Q0, 7, 5, &m),
                   "has shape [6,8]; it must be [7,8]"));
    ASSERT(refused(&w, qlora__peft_find(&w.env, &p, Q12, 6, 5, &m), "is missing"));
    qlora__peft_close(&w.env, &p);
    ASSERT(world_end(&w));
    PASS();
}

TEST peft_checks_the_tensors(void) {
    static const struct {
        const char* extra;
        const char* message;
    } bad[] = {
        {"base_model.model." Q0 ".lora_magnitude_vector", "only lora_A and lora_B matrices"},
        {"base_model.model.lm_head.weight", "only lora_A and lora_B matrices"},
        {"base_model.model.model.embed_tokens.lora_embedding_A", "only lora_A and lora_B matrices"},
        {"base_model.model." Q12 ".lora_A.weight", Q12 ".lora_B.weight is missing"},
        {"base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight",
         "is not targeted by adapter_config.json"},
    };
    world w;
    static qlora__peft p;
    qlora__peft_desc d = peft_desc();
    world_begin(&w);
    ASSERT(refused(&w, qlora__peft_open(&w.env, "a", &p), "a/adapter_config.json: no such file"));
    ASSERT_EQ(QLORA_OK, qlora__peft_write_config(&w.env, "a", &d));
    ASSERT(refused(&w, qlora__peft_open(&w.env, "a", &p),
                   "a/adapter_model.safetensors: no such file"));
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        ASSERT_EQ(QLORA_OK, put_adapter(&w, 8, bad[i].extra));
        ASSERTm(bad[i].extra, refused(&w, qlora__peft_open(&w.env, "a", &p), bad[i].message));
    }
    ASSERT_EQ(QLORA_OK, put_adapter(&w, 7, NULL));
    ASSERT(refused(&w, qlora__peft_open(&w.env, "a", &p),
                   "has shape [7,5]; adapter_config.json gives it rank 8"));
    ASSERT(world_end(&w));
    PASS();
}

// ---- GGUF ----

// Reads the writer's output field by field, following the format's own specification.
typedef struct cursor {
    const unsigned char* at;
} cursor;

static uint64_t take(cursor* c, int bytes) {
    uint64_t value = 0;
    for (int i = bytes - 1; i >= 0; i--) {
        value = value << 8 | c->at[i];
    }
    c->at += bytes;
    return value;
}

static bool take_string(cursor* c, const char* expected) {
    uint64_t n = take(c, 8);
    bool same = n == strlen(expected) && memcmp(c->at, expected, (size_t)n) == 0;
    c->at += n;
    return same;
}

TEST gguf_layout(void) {
    qlora__gguf_entry entries[2];
    memset(entries, 0, sizeof entries);
    qlora__gguf_writer g;
    world w;
    float a[12];
    float b[10];
    world_begin(&w);
    for (int i = 0; i < 12; i++) {
        a[i] = (float)i;
        b[i % 10] = -(float)(i % 10);
    }
    qlora__gguf_name(12, "attn_q", 'a', entries[0].name);
    qlora__gguf_name(12, "attn_q", 'b', entries[1].name);
    entries[0].rows = 2;
    entries[0].cols = 6;
    entries[1].rows = 5;
    entries[1].cols = 2;
    ASSERT_EQ(QLORA_OK, qlora__gguf_begin(&w.env, "l.gguf", "llama", 16.0, entries, 2, &g));
    ASSERT_EQ(QLORA_OK, qlora__gguf_write(&w.env, &g, a, 20));
    ASSERT_EQ(QLORA_OK, qlora__gguf_write(&w.env, &g, (char*)a + 20, 28));
    ASSERT_EQ(QLORA_OK, qlora__gguf_write(&w.env, &g, b, 40));
    ASSERT(refused(&w, qlora__gguf_write(&w.env, &g, b, 1), "more bytes than the header declares"));
    ASSERT_EQ(QLORA_OK, qlora__gguf_commit(&w.env, &g));
    world_file* f = world_slot(w.files, "l.gguf");
    cursor c = {f->data};
    ASSERT(memcmp(c.at, "GGUF", 4) == 0);
    c.at += 4;
    ASSERT(take(&c, 4) == 3 && take(&c, 8) == 2 && take(&c, 8) == 5);
    ASSERT(take_string(&c, "general.architecture") && take(&c, 4) == 8 && take_string(&c, "llama"));
    ASSERT(take_string(&c, "general.type") && take(&c, 4) == 8 && take_string(&c, "adapter"));
    ASSERT(take_string(&c, "adapter.type") && take(&c, 4) == 8 && take_string(&c, "lora"));
    ASSERT(take_string(&c, "adapter.lora.alpha") && take(&c, 4) == 6 && take(&c, 4) == 0x41800000u);
    ASSERT(take_string(&c, "general.alignment") && take(&c, 4) == 4 && take(&c, 4) == 32);
    ASSERT(take_string(&c, "blk.12.attn_q.weight.lora_a") && take(&c, 4) == 2);
    ASSERT(take(&c, 8) == 6 && take(&c, 8) == 2 && take(&c, 4) == 0 && take(&c, 8) == 0);
    ASSERT(take_string(&c, "blk.12.attn_q.weight.lora_b") && take(&c, 4) == 2);
    ASSERT(take(&c, 8) == 2 && take(&c, 8) == 5 && take(&c, 4) == 0 && take(&c, 8) == 64);
    size_t start = ((size_t)(c.at - f->data) + 31) / 32 * 32;
    ASSERT_EQ(start + 64 + 64, f->size);
    ASSERT_MEM_EQ(a, f->data + start, 48);
    ASSERT_MEM_EQ(b, f->data + start + 64, 40);
    ASSERT_EQ(QLORA_OK, qlora__gguf_begin(&w.env, "m.gguf", "llama", 16.0, entries, 2, &g));
    ASSERT_EQ(QLORA_OK, qlora__gguf_write(&w.env, &g, a, 48));
    ASSERT(
        refused(&w, qlora__gguf_commit(&w.env, &g), "blk.12.attn_q.weight.lora_b was not written"));
    ASSERT(world_slot(w.files, "m.gguf") == NULL);
    ASSERT(world_end(&w));
    PASS();
}

// Every projection of every family has a name in GGUF files, no two of a family the same.
TEST gguf_names(void) {
    char name[QLORA__GGUF_NAME];
    for (int i = 0; i < QLORA__ARCH_COUNT; i++) {
        const qlora__arch* arch = &qlora__archs[i];
        const char* seen[2 * QLORA__PROJECTIONS];
        int count = 0;
        const qlora__layout* layout = qlora__arch_first(arch);
        for (int k = 0; k < layout->count; k++) {
            seen[count++] = layout->rows[k].gguf;
            if (layout->rows[k].gguf_second != NULL) {
                seen[count++] = layout->rows[k].gguf_second;
            }
        }
        for (int a = 0; a < count; a++) {
            for (int b = 0; b < a; b++) {
                ASSERTm(arch->model_type, strcmp(seen[a], seen[b]) != 0);
            }
        }
        ASSERTm(arch->model_type, qlora__arch_of(arch->family) == arch);
    }
    qlora__gguf_name(101, "attn_output", 'a', name);
    ASSERT_STR_EQ("blk.101.attn_output.weight.lora_a", name);
    ASSERT_STR_EQ("llama", qlora__arch_of(QLORA_FAMILY_MISTRAL)->gguf);
    ASSERT_STR_EQ("qwen3", qlora__arch_of(QLORA_FAMILY_QWEN3)->gguf);
    ASSERT_STR_EQ("olmo2", qlora__arch_of(QLORA_FAMILY_OLMO3)->gguf);
    ASSERT_STR_EQ("granite", qlora__arch_of(QLORA_FAMILY_GRANITE4)->gguf);
    PASS();
}

// The permutation as the converter defines it: each head [2][half] read as [half][2]. And its
// purpose: rotating adjacent pairs after it is the same as rotating halves before it.
TEST gguf_permutes_llama_rows(void) {
    enum { HEADS = 3, DIM = 8 };
    for (int h = 0; h < HEADS; h++) {
        for (int i = 0; i < DIM / 2; i++) {
            for (int j = 0; j < 2; j++) {
                int64_t row = h * DIM + 2 * i + j;
                ASSERT_EQ(h * DIM + j * (DIM / 2) + i,
                          qlora__gguf_source_row(qlora__arch_of(QLORA_FAMILY_LLAMA), row, DIM));
                ASSERT_EQ(h * DIM + j * (DIM / 2) + i,
                          qlora__gguf_source_row(qlora__arch_of(QLORA_FAMILY_MISTRAL), row, DIM));
                ASSERT_EQ(row,
                          qlora__gguf_source_row(qlora__arch_of(QLORA_FAMILY_QWEN2), row, DIM));
                ASSERT_EQ(row,
                          qlora__gguf_source_row(qlora__arch_of(QLORA_FAMILY_QWEN3), row, DIM));
            }
        }
    }
    PASS();
}

// llama.cpp multiplies B A by alpha / rank, with one alpha for the file.
TEST gguf_alpha_gives_our_scale(void) {
    ASSERT(qlora__gguf_alpha(16.0, 8, false) == 16.0);
    ASSERT(fabs(qlora__gguf_alpha(32.0, 16, true) / 16.0 - 32.0 / sqrt(16.0)) < 1e-12);
    double file_alpha = qlora__gguf_alpha(16.0, 8, false);
    double scale = 8.0 / 4.0; // a module of rank 4 and alpha 8
    ASSERT(fabs(qlora__gguf_fold(scale, file_alpha, 4) * file_alpha / 4.0 - scale) < 1e-12);
    ASSERT(qlora__gguf_fold(2.0, file_alpha, 8) == 1.0);
    PASS();
}

// ---- faults ----

static qlora_result do_write_four(world* w) {
    return write_four(w, "d/f", 20, true);
}

static qlora_result do_read_folder(world* w) {
    static qlora__folder f;
    qlora_model_config c;
    qlora__linear_source s;
    QLORA__TRY(qlora__config_read(&w->env, "m", &c));
    QLORA__TRY(qlora__folder_open(&w->env, "m", &f));
    qlora_result r = qlora__folder_linear(&w->env, &f, "model.work.x.weight", 6, 65, &s);
    qlora__folder_close(&w->env, &f);
    return r;
}

static qlora_result do_read_shards(world* w) {
    static qlora__folder f;
    QLORA__TRY(qlora__folder_open(&w->env, "s", &f));
    qlora__folder_close(&w->env, &f);
    return QLORA_OK;
}

static qlora_result do_write_adapter(world* w) {
    static qlora__peft p;
    qlora__peft_desc d = peft_desc();
    QLORA__TRY(qlora__peft_write_config(&w->env, "a", &d));
    QLORA__TRY(qlora__peft_open(&w->env, "a", &p));
    qlora__peft_close(&w->env, &p);
    return QLORA_OK;
}

static qlora_result do_export(world* w) {
    static const char* const names[] = {"model.a"};
    static const char* const shards[] = {"s1"};
    static const uint32_t shard_of[] = {0};
    QLORA__TRY(qlora__config_export(&w->env, "m", "d", "bfloat16", 0, NULL));
    QLORA__TRY(qlora__file_copy(&w->env, "m/config.json", "d/f"));
    return qlora__index_write(&w->env, "d", names, shard_of, 1, shards, 40);
}

static qlora_result do_write_gguf(world* w) {
    static const qlora__gguf_entry entry = {"x", 2, 6, 0};
    static const float zeros[12];
    qlora__gguf_writer g;
    QLORA__TRY(qlora__gguf_begin(&w->env, "d/g", "llama", 16.0, &entry, 1, &g));
    qlora_result r = qlora__gguf_write(&w->env, &g, zeros, sizeof zeros);
    if (r != QLORA_OK) {
        qlora__gguf_abort(&w->env, &g);
        return r;
    }
    return qlora__gguf_commit(&w->env, &g);
}

static void put_everything(world* w) {
    char text[2048];
    static const char index[] = "{\"weight_map\":{\"model.a\":\"s1\",\"model.c\":\"s2\"}}";
    const char* changes[] = {NULL};
    config_text(text, sizeof text, changes);
    world_put(w, "m/config.json", text, strlen(text));
    world_put(w, "m/generation_config.json", "{\"eos_token_id\":[3]}", 20);
    put_bnb(w, STATE(NESTED), QLORA__ST_U8, 7, 195, qlora__nf4_levels);
    world_put(w, "s/model.safetensors.index.json", index, sizeof index - 1);
    put_tensors(w, "s/s1", shard_1, 2);
    put_tensors(w, "s/s2", shard_2, 2);
    put_adapter(w, 8, NULL);
    world_put(w, "a/adapter_config.json", "old", 3);
    world_put(w, "d/f", "old", 3);
    world_put(w, "d/g", "old", 3);
}

// Every allocation and file call fails once, alone and with all later ones: an error with a
// message, nothing left open or allocated, and a file is either the old one or the complete
// new one.
TEST faults_are_survived(const char* name, qlora_result (*action)(world*), const char* target) {
    static world w;
    for (int persistent = 0; persistent < 2; persistent++) {
        long points = 0;
        for (long n = 1;; n++) {
            world_begin(&w);
            put_everything(&w);
            w.operations = 0;
            w.fail_at = n;
            w.fail_on = persistent == 1;
            qlora_result r = action(&w);
            bool reached = w.operations >= n;
            if (!reached) {
                ASSERT_EQm(name, QLORA_OK, r);
                points = n - 1;
                ASSERTm(name, world_end(&w));
                break;
            }
            ASSERTm(name, r == QLORA_OK || w.env.error[0] != '\0');
            // failing to close a file that was only read does no harm
            ASSERTm(name, r != QLORA_OK || (target == NULL && w.close_failed));
            world_file* f = target ? world_slot(w.files, target) : NULL;
            ASSERTm(name, !target || (f && (memcmp(f->data, "old", 3) != 0 || f->size == 3)));
            ASSERTm(name, world_end(&w));
        }
        ASSERTm("implausibly few points of failure", points >= 5);
    }
    PASS();
}

// The power fails before any operation: the disk then holds the complete old file or the complete
// new one.
TEST power_cuts_are_survived(void) {
    static world w;
    static qlora__st st;
    long last = 1000;
    int old_files = 0;
    int new_files = 0;
    for (long cut = 1; cut <= last + 1; cut++) {
        world_begin(&w);
        ASSERT_EQ(QLORA_OK, write_four(&w, "d/f", 1, true));
        w.operations = 0;
        w.cut_at = cut;
        ASSERT_EQ(QLORA_OK, write_four(&w, "d/f", 50, true));
        last = w.operations;
        world_file* f = world_slot(w.disk, "d/f");
        ASSERT(f != NULL);
        ASSERT_EQ(QLORA_OK, qlora__st_parse(&w.env, "disk", f->data, f->size, &st));
        ASSERT_EQ(QLORA_OK, qlora__st_verify(&w.env, &st));
        int fill = qlora__st_find(&st, "b")->data[0];
        old_files += fill == 1;
        new_files += fill == 50;
        qlora__st_close(&w.env, &st);
        ASSERT(world_end(&w));
    }
    ASSERT(old_files > 5 && new_files > 0 && old_files + new_files == last + 1);
    PASS();
}

TEST long_paths_are_refused(void) {
    char path[2 * QLORA__PATH_ROOM];
    world w;
    static qlora__folder f;
    qlora_model_config c;
    memset(path, 'p', sizeof path);
    path[sizeof path - 1] = '\0';
    world_begin(&w);
    ASSERT(refused(&w, qlora__folder_open(&w.env, path, &f), "is longer than"));
    ASSERT(refused(&w, qlora__config_read(&w.env, path, &c), "is longer than"));
    ASSERT(world_end(&w));
    PASS();
}

// ---- the shared folder ----

#ifndef _WIN32
#include <dirent.h>

static const char* shared_path(char* out, size_t size, const char* rest) {
    const char* root = getenv("QLORA_SHARED");
    snprintf(out, size, "%s/%s", root ? root : "../shared", rest);
    return out;
}

// An environment on the real files.
static void world_real(world* w) {
    world_begin(w);
    qlora_files* f = &w->env.files;
    f->open = qlora__os_open;
    f->read = qlora__os_read;
    f->read_at = qlora__os_read_at;
    f->write = qlora__os_write;
    f->sync = qlora__os_sync;
    f->close = qlora__os_close;
    f->rename = qlora__os_rename;
    f->remove = qlora__os_remove;
    f->make_dir = qlora__os_make_dir;
    f->sync_dir = qlora__os_sync_dir;
    f->map = qlora__os_map;
    f->unmap = qlora__os_unmap;
}

TEST json_test_suite(void) {
    char path[512];
    world w;
    int counts[3] = {0, 0, 0};
    DIR* dir = opendir(shared_path(path, sizeof path, "json/test_parsing"));
    if (!dir) {
        SKIPm("the shared folder was not found");
    }
    world_real(&w);
    for (struct dirent* entry = readdir(dir); entry; entry = readdir(dir)) {
        char file[300];
        qlora__map map;
        qlora__json json;
        if (strlen(entry->d_name) < 6 || strlen(entry->d_name) > 250 || entry->d_name[1] != '_') {
            continue;
        }
        snprintf(file, sizeof file, "json/test_parsing/%s", entry->d_name);
        ASSERT_EQ(QLORA_OK, qlora__map_open(&w.env, shared_path(path, sizeof path, file), &map));
        qlora_result r = qlora__json_parse(&w.env, entry->d_name, map.data, map.size, 0, &json);
        if (r == QLORA_OK) {
            qlora__json_free(&w.env, &json);
        }
        qlora__map_close(&w.env, &map);
        counts[entry->d_name[0] == 'y' ? 0 : entry->d_name[0] == 'n' ? 1 : 2]++;
        if ((entry->d_name[0] == 'y' && r != QLORA_OK) ||
            (entry->d_name[0] == 'n' && r == QLORA_OK)) {
            printf("\n%s: %s\n", entry->d_name, w.env.error);
            closedir(dir);
            FAILm("JSONTestSuite");
        }
    }
    closedir(dir);
    ASSERT(counts[0] > 90 && counts[1] > 180 && counts[2] > 30);
    ASSERT(world_end(&w));
    PASS();
}

static const struct {
    const char* module;
    int rows; // 0 hidden, 1 heads, 2 kv heads, 3 intermediate
    int cols;
} linears[] = {{"self_attn.q_proj", 1, 0}, {"self_attn.k_proj", 2, 0}, {"self_attn.v_proj", 2, 0},
               {"self_attn.o_proj", 0, 1}, {"mlp.gate_proj", 3, 0},    {"mlp.up_proj", 3, 0},
               {"mlp.down_proj", 0, 3}};

// Finds every tensor that a model with this config must have; returns how many linears are 4-bit.
static int check_model(world* w, const qlora_model_config* c, const qlora__folder* f) {
    char name[128];
    const qlora__st_tensor* t = NULL;
    qlora__linear_source s;
    int64_t sizes[4] = {c->hidden, c->heads * c->head_dim, c->kv_heads * c->head_dim,
                        c->intermediate};
    int nf4 = 0;
    if (qlora__folder_need(&w->env, f, "model.embed_tokens.weight", c->vocab, c->hidden, &t) ||
        qlora__folder_need(&w->env, f, "model.norm.weight", c->hidden, -1, &t) ||
        (!c->tied && qlora__folder_need(&w->env, f, "lm_head.weight", c->vocab, c->hidden, &t))) {
        return -1;
    }
    for (int64_t layer = 0; layer < c->layers; layer++) {
        for (int k = 0; k < 7; k++) {
            snprintf(name, sizeof name, "model.layers.%d.%s.weight", (int)layer, linears[k].module);
            if (qlora__folder_linear(&w->env, f, name, sizes[linears[k].rows],
                                     sizes[linears[k].cols], &s)) {
                return -1;
            }
            nf4 += s.nf4 ? 1 : 0;
            snprintf(name, sizeof name, "model.layers.%d.%s.bias", (int)layer, linears[k].module);
            bool bias = k < 3 ? c->qkv_bias : k == 3 ? c->o_bias : c->mlp_bias;
            if (bias ? qlora__folder_need(&w->env, f, name, sizes[linears[k].rows], -1, &t) !=
                           QLORA_OK
                     : qlora__folder_find(f, name) != NULL) {
                return -1;
            }
        }
        snprintf(name, sizeof name, "model.layers.%d.self_attn.q_norm.weight", (int)layer);
        if (c->qk_norm != (qlora__folder_find(f, name) != NULL)) {
            return -1;
        }
    }
    return nf4;
}

static const struct {
    const char* name;
    qlora_family family;
    int64_t window;
    int64_t rank;
    bool rslora;
    bool all;
} fixture_table[] = {{"llama", QLORA_FAMILY_LLAMA, 0, 8, false, true},
                     {"llama-hd128", QLORA_FAMILY_LLAMA, 0, 0, false, true},
                     {"llama3-rope", QLORA_FAMILY_LLAMA, 0, 4, false, true},
                     {"qwen2", QLORA_FAMILY_QWEN2, 0, 16, false, false},
                     {"qwen3", QLORA_FAMILY_QWEN3, 0, 8, true, true},
                     {"mistral", QLORA_FAMILY_MISTRAL, 16, 8, false, true},
                     {"stories260K", QLORA_FAMILY_LLAMA, 0, 8, false, true}};

TEST fixture_folders(void) {
    static const char* const parts[] = {"model", "model-bnb4"};
    static const char* const adapters[] = {"adapter0", "adapter20"};
    char path[512];
    char rest[128];
    world w;
    static qlora__folder f;
    static qlora__peft p;
    qlora_model_config c;
    DIR* dir = opendir(shared_path(path, sizeof path, "fixtures"));
    if (!dir) {
        SKIPm("the shared folder was not found");
    }
    closedir(dir);
    world_real(&w);
    for (size_t i = 0; i < sizeof fixture_table / sizeof fixture_table[0]; i++) {
        for (int k = 0; k < 2; k++) {
            snprintf(rest, sizeof rest, "fixtures/%s/%s", fixture_table[i].name, parts[k]);
            shared_path(path, sizeof path, rest);
            ASSERT_EQm(w.env.error, QLORA_OK, qlora__config_read(&w.env, path, &c));
            ASSERT(c.family == fixture_table[i].family && c.window == fixture_table[i].window);
            ASSERT(c.quantized == (k == 1) && c.dtype == QLORA_BF16 && c.stop_ids[0] == 2);
            ASSERT_EQm(w.env.error, QLORA_OK, qlora__folder_open(&w.env, path, &f));
            ASSERT_EQ_FMTm(w.env.error, k == 1 ? (int)c.layers * 7 : 0, check_model(&w, &c, &f),
                           "%d");
            qlora__folder_close(&w.env, &f);
        }
        for (int k = 0; k < 2; k++) {
            qlora__peft_module m;
            snprintf(rest, sizeof rest, "fixtures/%s/%s", fixture_table[i].name, adapters[k]);
            ASSERT_EQm(w.env.error, QLORA_OK,
                       qlora__peft_open(&w.env, shared_path(path, sizeof path, rest), &p));
            ASSERT(p.rslora == fixture_table[i].rslora &&
                   (fixture_table[i].rank == 0 || p.rank == fixture_table[i].rank));
            ASSERT_EQ(QLORA_OK,
                      qlora__peft_find(&w.env, &p, Q0, c.heads * c.head_dim, c.hidden, &m));
            ASSERT_EQ(p.rank, m.rank);
            ASSERT_EQ(QLORA_OK, qlora__peft_lookup(&w.env, &p, "model.layers.0.mlp.up_proj", &m));
            ASSERT_EQ(fixture_table[i].all ? p.rank : 0, m.rank);
            ASSERT_EQ((uint32_t)(c.layers * (fixture_table[i].all ? 14 : 4)), p.tensors.count);
            qlora__peft_close(&w.env, &p);
        }
    }
    shared_path(path, sizeof path, "models/stories260K");
    ASSERT_EQ(QLORA_OK, qlora__config_read(&w.env, path, &c));
    ASSERT(c.dtype == QLORA_F32 && c.rope.theta == 10000.0 && c.tied);
    ASSERT_EQ(QLORA_OK, qlora__folder_open(&w.env, path, &f));
    ASSERT_EQ(0, check_model(&w, &c, &f));
    qlora__folder_close(&w.env, &f);
    ASSERT(world_end(&w));
    PASS();
}

// Inputs that once broke a parser, or that a fuzzer found interesting: golden/formats/TARGET.NAME.
TEST found_inputs_stay_harmless(void) {
    static const struct {
        const char* target;
        int (*run)(const uint8_t*, size_t);
    } targets[] = {{"json.", fuzz_json},
                   {"safetensors.", fuzz_safetensors},
                   {"config.", fuzz_config}};
    int runs = 0;
    DIR* dir = opendir("tests/golden/formats");
    if (!dir) {
        SKIPm("run it from the repository's root");
    }
    for (struct dirent* entry = readdir(dir); entry; entry = readdir(dir)) {
        for (int i = 0; i < 3; i++) {
            char path[300];
            static unsigned char bytes[65536];
            if (strncmp(entry->d_name, targets[i].target, strlen(targets[i].target)) != 0) {
                continue;
            }
            snprintf(path, sizeof path, "tests/golden/formats/%.200s", entry->d_name);
            FILE* file = fopen(path, "rb");
            ASSERT(file != NULL);
            size_t n = fread(bytes, 1, sizeof bytes, file);
            fclose(file);
            // exactly its size, so that a sanitizer detects reads beyond it
            unsigned char* copy = malloc(n > 0 ? n : 1);
            memcpy(copy, bytes, n);
            targets[i].run(copy, n);
            free(copy);
            runs++;
        }
    }
    closedir(dir);
    ASSERT(runs >= 3);
    PASS();
}
#endif

SUITE(formats_suite) {
    RUN_TEST(json_refuses_malformed_text);
    RUN_TEST(json_accepts_wellformed_text);
    RUN_TEST(json_messages_give_the_place);
    RUN_TEST(json_limits_the_depth);
    RUN_TEST(json_memory_is_bounded);
    RUN_TEST(json_finds_duplicate_keys);
    RUN_TEST(json_answers_queries);
    RUN_TEST(numbers_are_read_to_the_nearest_double);
    RUN_TEST(numbers_near_powers_of_two);
    RUN_TEST(numbers_may_be_long);
    RUN_TEST(json_is_written);
    RUN_TEST(safetensors_refuses_each_fault);
    RUN_TEST(safetensors_refuses_wrong_lengths);
    RUN_TEST(safetensors_accepts_what_is_legal);
    RUN_TEST(safetensors_knows_every_dtype);
    RUN_TEST(safetensors_are_written);
    RUN_TEST(safetensors_writer_counts_bytes);
    RUN_TEST(safetensors_checksum_sees_every_bit);
    RUN_TEST(checksum_is_the_same_in_pieces);
    RUN_TEST(config_reads_fp8);
    RUN_TEST(config_names_each_impossible_value);
    RUN_TEST(config_reads_the_old_dialect);
    RUN_TEST(config_reads_the_new_dialect);
    RUN_TEST(config_resolves_yarn);
    RUN_TEST(config_knows_the_families);
    RUN_TEST(config_fills_in_class_defaults);
    RUN_TEST(config_knows_layers_and_rotation_of_the_families);
    RUN_TEST(config_knows_the_defaults_of_transformers);
    RUN_TEST(config_may_have_infinities);
    RUN_TEST(config_reads_the_folder);
    RUN_TEST(folder_single_file);
    RUN_TEST(folder_shards);
    RUN_TEST(folder_refuses_bad_indexes);
    RUN_TEST(folder_limits_the_shards);
    RUN_TEST(folder_is_exported);
    RUN_TEST(bnb_reads_both_kinds);
    RUN_TEST(bnb_refuses_each_fault);
    RUN_TEST(bnb_refuses_fp4_by_name);
    RUN_TEST(patterns_match_as_python_does);
    RUN_TEST(patterns_refuse_the_rest_by_name);
    RUN_TEST(peft_selects_modules);
    RUN_TEST(peft_refuses_each_fault);
    RUN_TEST(peft_round_trip);
    RUN_TEST(peft_checks_the_tensors);
    RUN_TEST(gguf_layout);
    RUN_TEST(gguf_names);
    RUN_TEST(gguf_permutes_llama_rows);
    RUN_TEST(gguf_alpha_gives_our_scale);
    RUN_TESTp(faults_are_survived, "writing safetensors", do_write_four, "d/f");
    RUN_TESTp(faults_are_survived, "reading a folder", do_read_folder, NULL);
    RUN_TESTp(faults_are_survived, "reading shards", do_read_shards, NULL);
    RUN_TESTp(faults_are_survived, "writing an adapter", do_write_adapter, "a/adapter_config.json");
    RUN_TESTp(faults_are_survived, "exporting", do_export, "d/f");
    RUN_TESTp(faults_are_survived, "writing GGUF", do_write_gguf, "d/g");
    RUN_TEST(power_cuts_are_survived);
    RUN_TEST(long_paths_are_refused);
#ifndef _WIN32
    RUN_TEST(json_test_suite);
    RUN_TEST(fixture_folders);
    RUN_TEST(found_inputs_stay_harmless);
#endif
}
