// text.c - qlora_text.h: tokenizers, chat formats and data files.
//
// The small tokenizers in tests/golden are always present. The real ones, llama.cpp's
// vectors, the JSON test suite and the texts are looked for in the folder $QLORA_SHARED, or
// shared, or ../shared.

#include "test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

// Allocations are counted, and one of them can be made to fail.
static size_t alloc_live;
static size_t alloc_left = SIZE_MAX; // this many succeed, the next one fails

static void* counted_realloc(void* p, size_t size) {
    if (alloc_left != SIZE_MAX && alloc_left-- == 0) {
        alloc_left = 0;
        return NULL;
    }
    void* moved = realloc(p, size);
    alloc_live += moved && !p ? 1 : 0;
    return moved;
}

static void counted_free(void* p) {
    alloc_live -= p ? 1 : 0;
    free(p);
}

#define TEXT_REALLOC(p, n) counted_realloc(p, n)
#define TEXT_FREE(p) counted_free(p)
#define TEXT_IMPLEMENTATION
#include "qlora_text.h"

#define GOLDEN "tests/golden/"

static text_error why;

// ---- helpers ----

static const char* shared_path(const char* name) {
    static char path[1024];
    const char* folder = getenv("QLORA_SHARED");
    if (!folder) {
        FILE* file = fopen("shared/README.md", "rb");
        folder = file ? "shared" : "../shared";
        if (file) {
            fclose(file);
        }
    }
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    return path;
}

static bool shared_is_there(const char* name) {
    FILE* file = fopen(shared_path(name), "rb");
    if (file) {
        fclose(file);
    }
    return file != NULL;
}

// A gzipped tokenizer in the shared folder; NULL if it or gzip is missing.
static text_tok* shared_tok(const char* name) {
    char command[2400];
    char from[64];
    text_tok* tok = NULL;
    snprintf(from, sizeof(from), "tokenizers/%s/tokenizer.json.gz", name);
    if (!shared_is_there(from)) {
        return NULL;
    }
    char to[64];
    snprintf(to, sizeof(to), "build/test_text_%s.json", name);
    snprintf(command, sizeof(command), "gzip -dc '%s' > %s", shared_path(from), to);
    if (system(command) != 0 || !text_tok_open(to, &tok, &why)) {
        printf("%s: %s\n", name, why.text);
    }
    remove(to);
    return tok;
}

static text_tok* golden_tok(const char* name) {
    char path[64];
    text_tok* tok = NULL;
    snprintf(path, sizeof(path), GOLDEN "%s.json", name);
    if (!text_tok_open(path, &tok, &why)) {
        printf("%s\n", why.text);
    }
    return tok;
}

static bool json_read(const char* path, text_bytes* file, text__json* json) {
    memset(file, 0, sizeof(*file));
    memset(json, 0, sizeof(*json));
    bool good = text_file_read(path, file, &why) &&
                text__json_open(json, path, file->data, file->count, &why);
    if (!good) {
        printf("%s\n", why.text);
    }
    return good;
}

static void json_close(text_bytes* file, text__json* json) {
    text__json_free(json);
    text_bytes_free(file);
}

static bool same_ids(const text_ids* got, const text__json* json, const text__node* want) {
    text_ids ids = {0};
    bool same = text__json_ids(json, want, &ids, &why) && ids.count == got->count &&
                (ids.count == 0 || memcmp(ids.data, got->data, ids.count * sizeof(int32_t)) == 0);
    if (!same) {
        printf("ids differ: expected %zu, got %zu\n", ids.count, got->count);
    }
    text_ids_free(&ids);
    return same;
}

static bool same_text(const text_bytes* got, const char* want, size_t size) {
    bool same = got->count == size && (size == 0 || memcmp(got->data, want, size) == 0);
    if (!same) {
        printf("texts differ: want %.*s got %.*s\n", (int)size, want, (int)got->count, got->data);
    }
    return same;
}

// Encodes every string and compares it with golden[kind]; counts the correct ones.
static size_t golden_encode(text_tok* tok, const text__json* json, const text__node* strings,
                            const text__node* want, unsigned flags) {
    size_t right = 0;
    const text__node* string = strings + 1;
    const text__node* ids = want + 1;
    for (uint32_t i = 0; i < strings->size; i++) {
        text_ids got = {0};
        if (text_encode(tok, text__json_text(json, string), string->size, flags, &got, &why) &&
            same_ids(&got, json, ids)) {
            right++;
        } else {
            printf("string %u\n", i);
        }
        text_ids_free(&got);
        string = text__json_next(json, string);
        ids = text__json_next(json, ids);
    }
    return right;
}

// Decodes the golden ids (without `cut` ids at both ends), all at once and as a stream.
static size_t golden_decode(text_tok* tok, const text__json* json, const text__node* ids,
                            const text__node* want, unsigned flags, size_t cut) {
    size_t right = 0;
    size_t count = ids->size;
    ids++;
    want++;
    for (size_t i = 0; i < count; i++) {
        text_ids list = {0};
        text_bytes got = {0};
        bool good = text__json_ids(json, ids, &list, &why);
        size_t begin = list.count < cut ? list.count : cut;
        size_t end = list.count < 2 * cut ? begin : list.count - cut;
        const int32_t* first = list.count ? list.data + begin : NULL;
        good = good && text_decode(tok, first, end - begin, flags, &got, &why) &&
               same_text(&got, text__json_text(json, want), want->size);
        right += good ? 1 : 0;
        text_ids_free(&list);
        text_bytes_free(&got);
        ids = text__json_next(json, ids);
        want = text__json_next(json, want);
    }
    return right;
}

// ---- the reader and the tables ----

TEST json_table(void) {
    static const struct {
        const char* text;
        bool good;
    } rows[] = {{"[]", true},
                {" {\"a\":[1,-2,3.5e+1,true,false,null]} ", true},
                {"\"\\u00e9\\ud83d\\ude00\\n\"", true},
                {"{\"a\":1,\"a\":2}", true},
                {"\xEF\xBB\xBF[]", true},
                {"", false},
                {"[", false},
                {"[1,]", false},
                {"[,1]", false},
                {"{\"a\"}", false},
                {"{\"a\":}", false},
                {"{a:1}", false},
                {"[1 2]", false},
                {"[01]", false},
                {"[1.]", false},
                {"[.5]", false},
                {"[1e]", false},
                {"[-]", false},
                {"[+1]", false},
                {"[nul]", false},
                {"\"a", false},
                {"\"\\x\"", false},
                {"\"\\u12\"", false},
                {"\"\\ud800\"", false},
                {"\"\\ude00\"", false},
                {"\"\\ud800\\u0041\"", false},
                {"\"\n\"", false},
                {"\"\xC3\"", false},
                {"\"\xC0\x80\"", false},
                {"\"\xED\xA0\x80\"", false},
                {"[] []", false},
                {"[]x", false}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        text__json json;
        why.text[0] = 0;
        bool good = text__json_open(&json, "x", rows[i].text, strlen(rows[i].text), &why);
        text__json_free(&json);
        ASSERT_EQm(rows[i].text, rows[i].good, good);
        ASSERT_EQm(rows[i].text, rows[i].good, why.text[0] == 0);
    }
    PASS();
}

TEST json_depth_and_lines(void) {
    char text[600];
    text__json json;
    memset(text, '[', 256);
    memset(text + 256, ']', 256);
    ASSERT(text__json_open(&json, "x", text, 512, &why));
    text__json_free(&json);
    memset(text, '[', 257);
    memset(text + 257, ']', 257);
    ASSERT_FALSE(text__json_open(&json, "x", text, 514, &why));
    text__json_free(&json);
    ASSERT_STR_EQ("x:1:258: bad JSON: nested too deep", why.text);
    ASSERT_FALSE(text__json_open(&json, "name.json", "[1,\n2,\n  ?]", 11, &why));
    text__json_free(&json);
    ASSERT_STR_EQ("name.json:3:3: bad JSON: a value was expected", why.text);
    PASS();
}

// JSONTestSuite: the file names give the expected outcome.
TEST json_suite_files(void) {
    char list[1100];
    snprintf(list, sizeof(list), "ls '%s' > build/test_text_list.txt 2>/dev/null",
             shared_path("json/test_parsing"));
    if (system(list) != 0) {
        SKIPm("no shared folder");
    }
    text_bytes names = {0};
    ASSERT(text_file_read("build/test_text_list.txt", &names, &why));
    remove("build/test_text_list.txt");
    size_t tried = 0;
    for (char* name = strtok(names.data, "\n"); name; name = strtok(NULL, "\n")) {
        char path[300];
        snprintf(path, sizeof(path), "json/test_parsing/%.200s", name);
        text_bytes file = {0};
        text__json json;
        if (!strstr(name, ".json") || !text_file_read(shared_path(path), &file, &why)) {
            continue;
        }
        bool good = text__json_open(&json, name, file.data, file.count, &why);
        text__json_free(&json);
        text_bytes_free(&file);
        ASSERTm(name, name[0] == 'i' || good == (name[0] == 'y'));
        tried++;
    }
    text_bytes_free(&names);
    ASSERT(tried > 100);
    PASS();
}

TEST normal_forms(void) {
    static const char* const rows[][3] = {
        // text, NFC, NFD
        {"cafe\xCC\x81", "caf\xC3\xA9", "cafe\xCC\x81"},
        {"\xE2\x84\xAB", "\xC3\x85", "A\xCC\x8A"},               // Angstrom sign
        {"\xE1\x84\x80\xE1\x85\xA1\xE1\x86\xA8", "\xEA\xB0\x81", // Hangul
         "\xE1\x84\x80\xE1\x85\xA1\xE1\x86\xA8"},
        {"q\xCC\x87\xCC\xA3", "q\xCC\xA3\xCC\x87", "q\xCC\xA3\xCC\x87"}, // reordered
        {"\xE1\xB8\x8A\xCC\xA3", "\xE1\xB8\x8C\xCC\x87", "D\xCC\xA3\xCC\x87"},
        {"\xE0\xA5\x98", "\xE0\xA4\x95\xE0\xA4\xBC", "\xE0\xA4\x95\xE0\xA4\xBC"}, // excluded
        {"\xCC\x81"
         "a\xFF"
         "e\xCC\x81\xC3",
         "\xCC\x81"
         "a\xFF\xC3\xA9\xC3",
         "\xCC\x81"
         "a\xFF"
         "e\xCC\x81\xC3"}, // invalid bytes are unchanged
        {"plain ASCII", "plain ASCII", "plain ASCII"}};
    text__marks marks = {0};
    uint8_t* classes = text__classes_make(&why);
    ASSERT(classes);
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        for (size_t form = 1; form <= 2; form++) {
            text_bytes out = {0};
            ASSERT(text__normalize(classes, form == 1, rows[i][0], strlen(rows[i][0]), &marks, &out,
                                   &why));
            ASSERTm(rows[i][form], same_text(&out, rows[i][form], strlen(rows[i][form])));
            text_bytes_free(&out);
        }
    }
    counted_free(classes);
    counted_free(marks.data);
    counted_free(marks.sorted);
    PASS();
}

// NFC of random texts, compared with the reference library.
TEST normal_forms_golden(void) {
    text_bytes file;
    text__json json;
    text__marks marks = {0};
    uint8_t* classes = text__classes_make(&why);
    ASSERT(classes && json_read(GOLDEN "text_golden.json", &file, &json));
    const text__node* in = text__json_get(&json, json.nodes, "nfc") + 1;
    const text__node* want = text__json_next(&json, in) + 1;
    size_t count = in->size;
    in++;
    ASSERT(count > 100);
    for (size_t i = 0; i < count; i++) {
        text_bytes out = {0};
        ASSERT(text__normalize(classes, true, text__json_text(&json, in), in->size, &marks, &out,
                               &why));
        ASSERT(same_text(&out, text__json_text(&json, want), want->size));
        text_bytes_free(&out);
        in = text__json_next(&json, in);
        want = text__json_next(&json, want);
    }
    json_close(&file, &json);
    counted_free(classes);
    counted_free(marks.data);
    counted_free(marks.sorted);
    PASS();
}

// One pattern on one text: the ends of the pieces, in characters.
static bool split_is_right(const text__step* step, const uint8_t* classes, const text__json* json,
                           const text__node* text, const text__node* ends) {
    text__view view = {(const unsigned char*)text__json_text(json, text), text->size, classes,
                       NULL};
    text__pieces pieces = {0};
    bool right = text__step_find(step, &view, 0, &pieces, &why) && pieces.count == ends->size;
    const text__node* end = ends + 1;
    int64_t characters = 0;
    size_t at = 0;
    for (size_t i = 0; right && i < pieces.count; i++) {
        for (; at < pieces.data[i].end; at++) {
            characters += (view.s[at] & 0xC0) != 0x80 ? 1 : 0;
        }
        right = end->integer == characters;
        end = text__json_next(json, end);
    }
    counted_free(pieces.data);
    return right;
}

TEST patterns(void) {
    text_bytes file;
    text__json json;
    uint8_t* classes = text__classes_make(&why);
    ASSERT(classes && json_read(GOLDEN "text_golden.json", &file, &json));
    const text__node* splits = text__json_get(&json, json.nodes, "splits");
    const text__node* texts = text__json_get(&json, splits, "texts");
    const text__node* list = text__json_get(&json, splits, "patterns");
    const text__node* row = list + 1;
    ASSERT(list->size > 10 && texts->size > 100);
    for (uint32_t i = 0; i < list->size; i++) {
        const char* regex = text__json_cstring(&json, text__json_get(&json, row, "regex"));
        text__step step = {0};
        step.kind = TEXT__P_REGEX;
        step.pattern = text__pattern_find(regex);
        ASSERTm(regex, step.pattern);
        const text__node* text = texts + 1;
        const text__node* ends = text__json_get(&json, row, "ends") + 1;
        for (uint32_t k = 0; k < texts->size; k++) {
            ASSERTm(regex, split_is_right(&step, classes, &json, text, ends));
            text = text__json_next(&json, text);
            ends = text__json_next(&json, ends);
        }
        row = text__json_next(&json, row);
    }
    json_close(&file, &json);
    counted_free(classes);
    PASS();
}

TEST utf8_repair(void) {
#define BAD "\xEF\xBF\xBD"
    static const char* const rows[][2] = {{"abc", "abc"},
                                          {"\xED\xA0\x80", BAD BAD BAD},
                                          {"\xE2\x82", BAD},
                                          {"\xE2\x82x", BAD "x"},
                                          {"\xF0\x9F\x98", BAD},
                                          {"\xF0\x80\x80\x80", BAD BAD BAD BAD},
                                          {"\xF4\x90\x80\x80", BAD BAD BAD BAD},
                                          {"\xC0\xAF\xC3\xA9", BAD BAD "\xC3\xA9"},
                                          {"\xE0\x9F\x80", BAD BAD BAD}};
#undef BAD
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        text_bytes out = {0};
        size_t used;
        ASSERT(text__utf8_repair(rows[i][0], strlen(rows[i][0]), false, &used, &out, &why));
        ASSERT(same_text(&out, rows[i][1], strlen(rows[i][1])));
        ASSERT_EQ(strlen(rows[i][0]), used);
        text_bytes_free(&out);
    }
    PASS();
}

// A long run of marks in the worst order costs no more than a sorted one.
TEST normal_forms_are_linear(void) {
    text__marks marks = {0};
    uint8_t* classes = text__classes_make(&why);
    ASSERT(classes);
    size_t pairs = 200000;
    text_bytes text = {0};
    text_bytes out = {0};
    for (size_t i = 0; i < pairs; i++) {
        ASSERT(text_bytes_add(&text, "\xCC\x81\xCC\xA3", 4, &why)); // 230 before 220
    }
    clock_t start = clock();
    ASSERT(text__normalize(classes, true, text.data, text.count, &marks, &out, &why));
    ASSERT((double)(clock() - start) / CLOCKS_PER_SEC < 5.0);
    ASSERT_EQ(text.count, out.count);
    ASSERT_EQ(0, memcmp(out.data, "\xCC\xA3\xCC\xA3", 4));
    ASSERT_EQ(0, memcmp(out.data + out.count - 4, "\xCC\x81\xCC\x81", 4));
    text_bytes_free(&text);
    text_bytes_free(&out);
    counted_free(classes);
    counted_free(marks.data);
    counted_free(marks.sorted);
    PASS();
}

// ---- agreement with the reference library ----

TEST mini_golden(const char* name) {
    text_bytes file;
    text__json json;
    text_tok* tok = golden_tok(name);
    ASSERT(tok && json_read(GOLDEN "text_golden.json", &file, &json));
    const text__node* strings = text__json_get(&json, json.nodes, "strings");
    const text__node* all = text__json_get(&json, json.nodes, name);
    const text__node* plain = text__json_get(&json, all, "plain");
    size_t count = strings->size;
    ASSERT(count > 30);
    ASSERT_EQ(count, golden_encode(tok, &json, strings, plain, 0));
    ASSERT_EQ(count, golden_encode(tok, &json, strings, text__json_get(&json, all, "special"),
                                   TEXT_SPECIAL));
    ASSERT_EQ(count, golden_decode(tok, &json, plain, text__json_get(&json, all, "decoded"),
                                   TEXT_REPLACE, 0));
    ASSERT_EQ(count, golden_decode(tok, &json, plain, text__json_get(&json, all, "skipped"),
                                   TEXT_REPLACE | TEXT_SKIP, 0));
    ASSERT_EQ(count,
              golden_decode(tok, &json, plain, text__json_get(&json, all, "cut"), TEXT_REPLACE, 1));
    json_close(&file, &json);
    text_tok_close(tok);
    PASS();
}

TEST shared_golden(const char* name) {
    text_bytes file;
    text__json json;
    text_tok* tok = shared_tok(name);
    if (!tok) {
        SKIPm("no shared folder, or no gzip");
    }
    ASSERT(json_read(shared_path("tokenizers/golden.json"), &file, &json));
    const text__node* strings = text__json_get(&json, json.nodes, "strings");
    const text__node* all = text__json_get(&json, text__json_get(&json, json.nodes, "ids"), name);
    const text__node* plain = text__json_get(&json, all, "plain");
    size_t count = strings->size;
    ASSERT(count == 59);
    ASSERT_EQ(count, golden_encode(tok, &json, strings, plain, 0));
    ASSERT_EQ(count, golden_encode(tok, &json, strings, text__json_get(&json, all, "special"),
                                   TEXT_SPECIAL));
    ASSERT_EQ(count, golden_decode(tok, &json, plain, text__json_get(&json, all, "decoded"), 0, 0));
    json_close(&file, &json);
    text_tok_close(tok);
    PASS();
}

// Texts are separated as in llama.cpp's .inp; its .out has one line of ids for each.
static bool vector_is_right(text_tok* tok, const char* text, size_t size, const char* line) {
    text_ids got = {0};
    bool right = text_encode(tok, text, size, 0, &got, &why);
    size_t count = 0;
    char* end;
    for (long id = strtol(line, &end, 10); end != line && right; id = strtol(line, &end, 10)) {
        right = count < got.count && got.data[count] == id;
        count++;
        line = end + strspn(end, " ");
        if (*line == '\n' || *line == 0) {
            break;
        }
    }
    right = right && count == got.count;
    text_ids_free(&got);
    return right;
}

TEST llama_cpp_vectors(const char* vocab, const char* name) {
    static const char separator[] = "\n__ggml_vocab_test__\n";
    char path[100];
    text_bytes in = {0};
    text_bytes out = {0};
    text_tok* tok = shared_tok(name);
    snprintf(path, sizeof(path), "tokenizers/vectors/ggml-vocab-%s.gguf.inp", vocab);
    if (!tok || !text_file_read(shared_path(path), &in, &why)) {
        text_tok_close(tok);
        SKIPm("no shared folder, or no gzip");
    }
    snprintf(path, sizeof(path), "tokenizers/vectors/ggml-vocab-%s.gguf.out", vocab);
    ASSERT(text_file_read(shared_path(path), &out, &why));
    const char* text = in.data;
    const char* line = out.data;
    size_t right = 0;
    size_t count = 0;
    for (bool more = true; more; count++) {
        const char* stop = strstr(text, separator);
        more = stop != NULL;
        size_t size = more ? (size_t)(stop - text) : strlen(text);
        bool empty = *line == '\n';
        right += vector_is_right(tok, text, size, empty ? "" : line) ? 1 : 0;
        text += size + (more ? strlen(separator) : 0);
        line = strchr(line, '\n');
        line = line ? line + 1 : "";
    }
    ASSERT_EQ((size_t)47, count);
    ASSERT_EQ(count, right);
    text_bytes_free(&in);
    text_bytes_free(&out);
    text_tok_close(tok);
    PASS();
}

// ---- round trips ----

static bool round_trips(text_tok* tok, const char* text, size_t size) {
    text_ids ids = {0};
    text_bytes back = {0};
    bool good = text_encode(tok, text, size, TEXT_LITERAL, &ids, &why) &&
                text_decode(tok, ids.data, ids.count, 0, &back, &why) && back.count == size &&
                (size == 0 || memcmp(back.data, text, size) == 0);
    text_ids_free(&ids);
    text_bytes_free(&back);
    return good;
}

TEST random_bytes(text_tok* (*open)(const char*), const char* name, bool normalizes) {
    test_random random = test_random_start(name);
    text_tok* tok = open(name);
    if (!tok) {
        SKIPm("no shared folder, or no gzip");
    }
    char text[3000];
    for (size_t i = 0; i < 200; i++) {
        size_t size = (size_t)test_random_below(&random, sizeof(text));
        uint64_t kind = test_random_below(&random, 3);
        for (size_t k = 0; k < size; k++) {
            uint64_t byte = test_random_below(&random, 256);
            text[k] = (char)(unsigned char)(kind == 0   ? byte
                                            : kind == 1 ? byte & 0x7F
                                                        : byte | 0x80);
            // NFC makes its own changes; bytes below 0x80 and above 0xF4 are not affected
            if (normalizes && (unsigned char)text[k] >= 0x80) {
                text[k] = (char)(unsigned char)(0xF8 | (byte & 7));
            }
        }
        ASSERT(round_trips(tok, text, size));
    }
    text_tok_close(tok);
    PASS();
}

static text_tok* model_tok(const char* name) {
    text_tok* tok = NULL;
    return text_tok_open(shared_path(name), &tok, &why) ? tok : NULL;
}

TEST shakespeare(text_tok* (*open)(const char*), const char* name) {
    text_bytes file = {0};
    text_tok* tok = open(name);
    if (!tok || !text_file_read(shared_path("data/tinyshakespeare.txt"), &file, &why)) {
        text_tok_close(tok);
        SKIPm("no shared folder, or no gzip");
    }
    text_ids ids = {0};
    clock_t start = clock();
    ASSERT(text_encode(tok, file.data, file.count, 0, &ids, &why));
    double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
    printf("%s: %zu tokens, %.1f M tokens/s\n", name, ids.count, (double)ids.count / seconds / 1e6);
    ASSERT(round_trips(tok, file.data, file.count));
    text_ids_free(&ids);
    text_bytes_free(&file);
    text_tok_close(tok);
    PASS();
}

// A million equal letters are one word: encoding must not be quadratic.
TEST long_word(const char* name) {
    size_t size = 1000000;
    text_tok* tok = golden_tok(name);
    char* text = (char*)malloc(size);
    text_ids ids = {0};
    ASSERT(tok && text);
    memset(text, 'l', size);
    clock_t start = clock();
    ASSERT(text_encode(tok, text, size, 0, &ids, &why));
    ASSERT((double)(clock() - start) / CLOCKS_PER_SEC < 10.0);
    ASSERT(ids.count > 100000);
    ASSERT(round_trips(tok, text, size));
    text_ids_free(&ids);
    free(text);
    text_tok_close(tok);
    PASS();
}

// Splitting at word marks, the cache, and the two ways to merge do not change the result.
TEST shortcuts_change_nothing(void) {
    test_random random = test_random_start("shortcuts");
    text_tok* tok = golden_tok("text_spm");
    text_tok* slow = golden_tok("text_spm");
    ASSERT(tok && slow);
    ASSERT(tok->cut_safe);
    slow->cut_safe = false;
    static const char* const parts[] = {"the", " ",   "world", "\xE2\x96\x81", "ing ", "\n",
                                        "l",   "sen", "tence", "\xC3\xA9",     "  ",   "there"};
    for (size_t i = 0; i < 500; i++) {
        text_bytes text = {0};
        text_ids a = {0};
        text_ids b = {0};
        size_t count = (size_t)test_random_below(&random, 60);
        for (size_t k = 0; k < count; k++) {
            const char* part = parts[test_random_below(&random, 12)];
            ASSERT(text_bytes_add(&text, part, strlen(part), &why));
        }
        ASSERT(text_encode(tok, text.data, text.count, 0, &a, &why));
        ASSERT(text_encode(slow, text.data, text.count, 0, &b, &why));
        ASSERT_EQ(a.count, b.count);
        ASSERT(a.count == 0 || memcmp(a.data, b.data, a.count * sizeof(int32_t)) == 0);
        text_bytes_free(&text);
        text_ids_free(&a);
        text_ids_free(&b);
    }
    text_tok_close(tok);
    text_tok_close(slow);
    PASS();
}

TEST streams(const char* name) {
    test_random random = test_random_start(name);
    text_tok* tok = golden_tok(name);
    ASSERT(tok);
    for (size_t i = 0; i < 300; i++) {
        text_stream stream;
        text_bytes whole = {0};
        text_bytes parts = {0};
        int32_t ids[40];
        memset(&stream, 0, sizeof(stream));
        size_t count = (size_t)test_random_below(&random, 40);
        for (size_t k = 0; k < count; k++) {
            ids[k] = (int32_t)test_random_below(&random, (uint64_t)text_tok_count(tok));
            size_t before = parts.count;
            ASSERT(text_stream_push(tok, &stream, ids[k], 0, &parts, &why));
            // the output is always complete UTF-8
            size_t used;
            text_bytes checked = {0};
            const char* fresh = parts.count > before ? parts.data + before : "";
            ASSERT(text__utf8_repair(fresh, parts.count - before, false, &used, &checked, &why));
            ASSERT_EQ(parts.count - before, checked.count);
            text_bytes_free(&checked);
        }
        ASSERT(text_stream_end(&stream, &parts, &why));
        // the same as decoding everything and then repairing it
        ASSERT(text_decode(tok, ids, count, 0, &whole, &why));
        text_bytes repaired = {0};
        size_t used;
        ASSERT(text__utf8_repair(whole.data, whole.count, false, &used, &repaired, &why));
        ASSERT(same_text(&parts, repaired.data, repaired.count));
        text_bytes_free(&whole);
        text_bytes_free(&parts);
        text_bytes_free(&repaired);
    }
    text_tok_close(tok);
    PASS();
}

// TEXT_LITERAL: special tokens are ordinary text. The id in the vocabulary takes precedence.
TEST added_tokens(void) {
    static const char json[] =
        "{\"added_tokens\":[{\"id\":9,\"content\":\"ab\",\"special\":true},{\"id\":7,\"content\":"
        "\"<x>\",\"special\":true}],\"model\":{\"vocab\":{\"a\":0,\"b\":1,\"ab\":2,\"<\":3,\"x\":4,"
        "\">\":5},\"merges\":[]}}";
    text_tok* tok = NULL;
    text_ids ids = {0};
    ASSERT(text_tok_load("t", json, strlen(json), &tok, &why));
    ASSERT(text_encode(tok, "ab<x>", 5, 0, &ids, &why));
    ASSERT(text_encode(tok, "ab<x>", 5, TEXT_LITERAL, &ids, &why));
    static const int32_t want[] = {2, 7, 0, 1, 3, 4, 5};
    ASSERT_EQ(sizeof(want) / sizeof(want[0]), ids.count);
    ASSERT_EQ(0, memcmp(want, ids.data, sizeof(want)));
    ASSERT_EQ(7, text_tok_find(tok, "<x>"));
    ASSERT_EQ(8, text_tok_count(tok));
    ASSERT(text_tok_is_special(tok, 2) && !text_tok_is_special(tok, 0));
    size_t length;
    ASSERT(text_tok_name(tok, 6, &length) == NULL && text_tok_name(tok, -1, &length) == NULL);
    text_ids_free(&ids);
    text_tok_close(tok);
    PASS();
}

// Characters missing from the vocabulary: one <unk> each, or one for a run of them; dropped
// without <unk>.
TEST unknown_characters(void) {
    static const struct {
        const char* options;
        size_t count;
    } rows[] = {{"\"unk_token\":\"u\",\"fuse_unk\":true", 4},
                {"\"unk_token\":\"u\",\"fuse_unk\":false", 6},
                {"\"unk_token\":null", 2}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        char json[200];
        text_tok* tok = NULL;
        text_ids ids = {0};
        snprintf(json, sizeof(json), "{\"model\":{\"vocab\":{\"u\":0,\"a\":1},\"merges\":[],%s}}",
                 rows[i].options);
        ASSERT(text_tok_load("t", json, strlen(json), &tok, &why));
        ASSERT(text_encode(tok,
                           "??a\xC3\xA9\xFF"
                           "a",
                           7, 0, &ids, &why));
        ASSERT_EQ(rows[i].count, ids.count);
        text_ids_free(&ids);
        text_tok_close(tok);
    }
    PASS();
}

// ---- invalid files ----

#define MINI(rest)                                                                                 \
    "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"ab\":2},\"merges\":[]}," rest "}"

TEST refused_tokenizers(void) {
    static const char* const rows[][2] = {
        {"", "ends too early"},
        {"{}", "no \"model\""},
        {"[]", "not a JSON object"},
        {"{\"model\":{\"type\":\"Unigram\",\"vocab\":[]}}", "Unigram"},
        {"{\"model\":{\"type\":\"WordPiece\",\"vocab\":{}}}", "WordPiece"},
        {"{\"model\":{\"vocab\":{\"a\":-1},\"merges\":[]}}", "id -1"},
        {"{\"model\":{\"vocab\":{\"a\":99999999999},\"merges\":[]}}", "id 99999999999"},
        {"{\"model\":{\"vocab\":{\"a\":0.5},\"merges\":[]}}", "not a whole number"},
        {"{\"model\":{\"vocab\":{\"a\":0}}}", "merges is not an array"},
        {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[\"a b\"]}}",
         "\"b\" is not in the vocabulary"},
        {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[\"a a\"]}}", "what it makes"},
        {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[\"aa\"]}}", "neither"},
        {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[[\"a\"]]}}", "neither"},
        {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[],\"unk_token\":\"x\"}}", "unk_token"},
        {"{\"model\":{\"vocab\":{},\"merges\":[],\"end_of_word_suffix\":\"</w>\"}}",
         "end_of_word_suffix"},
        {"{\"model\":{\"vocab\":{},\"merges\":[],\"dropout\":0.1}}", "dropout"},
        {MINI("\"normalizer\":{\"type\":\"Lowercase\"}"), "Lowercase"},
        {MINI("\"normalizer\":{\"type\":\"Replace\",\"pattern\":{\"Regex\":\"x+\"},\"content\":"
              "\"\"}"),
         "x+"},
        {MINI("\"pre_tokenizer\":{\"type\":\"UnicodeScripts\"}"), "UnicodeScripts"},
        {MINI("\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"[a-z]+\"},"
              "\"behavior\":\"Isolated\",\"invert\":false}"),
         "unknown regular expression: [a-z]+"},
        {MINI("\"pre_tokenizer\":{\"type\":\"Sequence\"}"), "Sequence"},
        {MINI("\"decoder\":{\"type\":\"CTC\"}"), "CTC"},
        {MINI("\"post_processor\":{\"type\":\"Other\"}"), "Other"},
        {MINI("\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[],"
              "\"special_tokens\":{}}"),
         "no text"},
        {MINI("\"added_tokens\":[{\"content\":\"x\"}]"), "added_tokens"}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        text_tok* tok = NULL;
        why.text[0] = 0;
        ASSERT_FALSEm(rows[i][0],
                      text_tok_load("bad.json", rows[i][0], strlen(rows[i][0]), &tok, &why));
        ASSERTm(rows[i][0], tok == NULL);
        ASSERTm(why.text, strstr(why.text, rows[i][1]) != NULL);
        ASSERTm(why.text, strncmp(why.text, "bad.json:", 9) == 0);
    }
    PASS();
}

TEST bin_format(void) {
    // longest 3; <unk> <s> </s>; then " ", "a", "b", "ab" (-1), " a" (-2)
    static const struct {
        float score;
        const char* token;
    } rows[] = {{0, "<unk>"}, {0, "\n<s>\n"}, {0, "\n</s>\n"}, {-9, " "},     {-9, "a"},
                {-9, "b"},    {-1, "ab"},     {-2, " a"},      {-3, "<0x0A>"}};
    unsigned char data[256] = {3, 0, 0, 0};
    size_t size = 4;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        size_t length = strlen(rows[i].token);
        memcpy(data + size, &rows[i].score, 4);
        data[size + 4] = (unsigned char)length;
        memcpy(data + size + 8, rows[i].token, length);
        size += 8 + length;
    }
    text_tok* tok = NULL;
    ASSERT(text_tok_load("t.bin", data, size, &tok, &why));
    static const int32_t want[] = {1, 3, 6, 7, 8};
    text_ids ids = {0};
    text_bytes back = {0};
    ASSERT(text_encode(tok, "ab a\n", 5, TEXT_SPECIAL, &ids, &why));
    ASSERT_EQ((size_t)5, ids.count);
    ASSERT_EQ(0, memcmp(want, ids.data, sizeof(want)));
    ASSERT(text_decode(tok, ids.data, ids.count, TEXT_SKIP, &back, &why));
    ASSERT(same_text(&back, "ab a\n", 5));
    ASSERT_EQ(2, text_tok_find(tok, "</s>"));
    ASSERT_EQ(1, text_tok_bos(tok));
    text_ids_free(&ids);
    text_bytes_free(&back);
    text_tok_close(tok);
    for (size_t cut = 0; cut < size; cut++) { // a truncated file is rejected or has whole tokens
        tok = NULL;
        bool good = text_tok_load("t.bin", data, cut, &tok, &why);
        ASSERT(good == (tok != NULL));
        text_tok_close(tok);
    }
    PASS();
}

// ---- chat and data ----

typedef struct data_world {
    text_tok* tok;
    text_chat* chat;
    text_data* data;
    text_data_desc desc;
} data_world;

static bool world_open(data_world* w, const char* tok, const char* folder, const char* format) {
    memset(w, 0, sizeof(*w));
    w->tok = golden_tok(tok);
    bool good = w->tok && text_chat_open(w->tok, folder, format, &w->chat, &why);
    w->desc.tok = w->tok;
    w->desc.chat = w->chat;
    return good;
}

static bool world_load(data_world* w, const char* name, const char* text) {
    text_data_close(w->data);
    w->data = NULL;
    why.text[0] = 0;
    return text_data_load(&w->desc, name, text, strlen(text), &w->data, &why);
}

static void world_close(data_world* w) {
    text_data_close(w->data);
    text_chat_close(w->chat);
    text_tok_close(w->tok);
}

// A sample as text, with the trained part in {braces}.
static const char* sample_text(const data_world* w, size_t index) {
    static char out[4096];
    text_sample sample = text_data_get(w->data, index);
    text_bytes text = {0};
    bool open = false;
    for (size_t i = 0; i < sample.count; i++) {
        bool trained = sample.labels[i] != -100;
        if (trained && sample.labels[i] != sample.ids[i]) {
            return "a label that is not the id";
        }
        if (trained != open) {
            text_bytes_add(&text, open ? "}" : "{", 1, &why);
            open = trained;
        }
        text_decode(w->tok, sample.ids + i, 1, 0, &text, &why);
    }
    snprintf(out, sizeof(out), "%.*s%s", (int)text.count, text.data ? text.data : "",
             open ? "}" : "");
    text_bytes_free(&text);
    return out;
}

TEST records(void) {
    static const struct {
        const char* format;
        const char* json;
        const char* want;
    } rows[] = {
        {"chatml", "{\"text\":\"hi you\"}", "<s>{hi you</s>}"},
        {"chatml", "{\"text\":\"<s>you</s>\"}", "<s>{you</s>}"},
        {"chatml", "{\"text\":\"<s>hi\"}", "<s>{<s>hi</s>}"}, // <s>h is a separate token
        {"chatml", "{\"text\":\"\"}", ""},
        {"chatml", "{\"prompt\":\"Q: 1\",\"completion\":\" A\"}", "<s>Q: 1{ A</s>}"},
        {"chatml",
         "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"},{\"role\":\"assistant\","
         "\"content\":"
         "\"ho\"},{\"role\":\"user\",\"content\":\"x\"},{\"role\":\"assistant\",\"content\":\"y\"}]"
         "}",
         "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{ho<|im_end|>}\n"
         "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n{y<|im_end|>}"},
        {"chatml",
         "{\"messages\":[{\"role\":\"assistant\",\"content\":\"no\",\"weight\":0},{\"role\":"
         "\"assistant\",\"content\":[{\"type\":\"text\",\"text\":\"y\"},{\"text\":\"es\"}]}]}",
         "<s><|im_start|>assistant\nno<|im_end|>\n<|im_start|>assistant\n{yes<|im_end|>}"},
        {"chatml",
         "{\"prompt\":[{\"role\":\"user\",\"content\":\"q\"},{\"role\":\"assistant\",\"content\":"
         "\"o"
         "\"}],\"completion\":[{\"role\":\"assistant\",\"content\":\"a\"}]}",
         "<s><|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\no<|im_end|>\n"
         "<|im_start|>assistant\n{a<|im_end|>}"},
        {"chatml",
         "{\"system\":\"S\",\"conversations\":[{\"from\":\"human\",\"value\":\"h\"},{\"from\":\"gpt"
         "\",\"value\":\"g\"}]}",
         "<s><|im_start|>system\nS<|im_end|>\n<|im_start|>user\nh<|im_end|>\n"
         "<|im_start|>assistant\n{g<|im_end|>}"},
        {"chatml",
         "{\"instruction\":\"I\",\"input\":\"N\",\"output\":\"O\",\"history\":[[\"u\",\"v\"]]}",
         "<s><|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n{v<|im_end|>}\n"
         "<|im_start|>user\nI\nN<|im_end|>\n<|im_start|>assistant\n{O<|im_end|>}"},
        {"chatml", "{\"question\":\"I\",\"answer\":\"O\"}",
         "<s><|im_start|>user\nI<|im_end|>\n<|im_start|>assistant\n{O<|im_end|>}"},
        {"alpaca", "{\"instruction\":\"I\",\"input\":\"\",\"output\":\"O\"}",
         "<s>Below is an instruction that describes a task. Write a response that appropriately "
         "completes the request.\n\n### Instruction:\nI\n\n### Response:\n{O</s>}"},
        {"alpaca", "{\"instruction\":\"I\",\"input\":\"N\",\"output\":\"O\"}",
         "<s>Below is an instruction that describes a task, paired with an input that provides "
         "further context. Write a response that appropriately completes the request.\n\n"
         "### Instruction:\nI\n\n### Input:\nN\n\n### Response:\n{O</s>}"},
        {"mistral",
         "{\"messages\":[{\"role\":\"system\",\"content\":\"S\"},{\"role\":\"user\",\"content\":\"q"
         "\"},{\"role\":\"assistant\",\"content\":\"a\"}]}",
         "<s>[INST] S\n\nq [/INST]{ a</s>}"},
        {"plain", "{\"instruction\":\"I\",\"input\":\"N\",\"output\":\"O\"}", "<s>I\nN\n{O</s>}"},
        {"llama3", "{\"question\":\" I \",\"answer\":\" O \"}",
         "<s><|start_header_id|>user<|end_header_id|>\n\nI<|eot_id|><|start_header_id|>assistant"
         "<|end_header_id|>\n\n{O<|eot_id|></s>}"},
        {"plain", "{\"input_ids\":[1,2,3],\"labels\":[-100,2,3]}", NULL}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        data_world w;
        ASSERT(world_open(&w, "text_byte", NULL, rows[i].format));
        ASSERTm(why.text, world_load(&w, "x.jsonl", rows[i].json));
        ASSERT_EQ((size_t)1, text_data_count(w.data));
        if (rows[i].want) {
            ASSERT_STR_EQm(rows[i].json, rows[i].want, sample_text(&w, 0));
        } else {
            ASSERT_EQ((size_t)2, text_data_get(w.data, 0).trained);
        }
        world_close(&w);
    }
    PASS();
}

TEST records_sentencepiece(void) {
    data_world w;
    ASSERT(world_open(&w, "text_spm", NULL, "mistral"));
    ASSERT(world_load(&w, "x.jsonl", "{\"question\":\"the\",\"answer\":\"and\"}"));
    // one text except for the boundary: no second space after it, and the same ids as in one go
    static const char text[] = "[INST] the [/INST] and";
    text_ids whole = {0};
    ASSERT(text_encode(w.tok, text, strlen(text), 0, &whole, &why));
    text_sample sample = text_data_get(w.data, 0);
    ASSERT_EQ(whole.count + 2, sample.count);
    ASSERT_EQ(0, memcmp(whole.data, sample.ids + 1, whole.count * sizeof(int32_t)));
    ASSERT_EQ(text_tok_find(w.tok, "<s>"), sample.ids[0]);
    ASSERT_EQ(text_tok_find(w.tok, "</s>"), sample.ids[sample.count - 1]);
    text_ids_free(&whole);
    world_close(&w);
    PASS();
}

TEST record_options(void) {
    static const char json[] =
        "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"assistant\",\"content\":"
        "\"b\"},{\"role\":\"user\",\"content\":\"c\"},{\"role\":\"assistant\",\"content\":\"d\"}]}";
    data_world w;
    ASSERT(world_open(&w, "text_byte", NULL, "plain"));
    w.desc.last_turn_only = true;
    ASSERT(world_load(&w, "x.jsonl", json));
    ASSERT_STR_EQ("<s>a\nb</s>\nc\n{d</s>}", sample_text(&w, 0));
    w.desc.last_turn_only = false;
    w.desc.train_prompt = true;
    ASSERT(world_load(&w, "x.jsonl", json));
    ASSERT_STR_EQ("<s>{a\nb</s>\nc\nd</s>}", sample_text(&w, 0));
    world_close(&w);
    PASS();
}

TEST bad_data(void) {
    static const char* const rows[][3] = {
        {"x.jsonl", "{\"text\":\"a\"}\n{\"text\":\"b\"\n", "x.jsonl:3:1: bad JSON"},
        {"x.jsonl", "{\"text\":\"a\"}\n\n{\"text\":3}\n", "x.jsonl:3: a record needs text"},
        {"x.jsonl", "{\"text\":\"a\"} {\"text\":\"b\"}\n", "x.jsonl:1:14: bad JSON: more text"},
        {"x.jsonl", "{\"txt\":\"a\",\"b\":1}", "has: txt, b"},
        {"x.jsonl", "3\n", "must be an object"},
        {"x.jsonl", "\n\n", "no records"},
        {"x.jsonl", "", "no records"},
        {"x.json", "[]", "no records"},
        {"x.json", "[{\"text\":\"a\"},\n 5]", "x.json:2: a record must be"},
        {"x.json", "[{\"text\":\"a\"}] x", "more text"},
        {"x.jsonl", "{\"messages\":[{\"role\":\"tool\",\"content\":\"\"}]}",
         "message 1 is of the role"},
        {"x.jsonl", "{\"messages\":[{\"content\":\"\"}]}", "message 1 has no \"role\""},
        {"x.jsonl", "{\"messages\":[{\"role\":\"user\"}]}", "message 1 has no text"},
        {"x.jsonl", "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image\"}]}]}",
         "not text"},
        {"x.jsonl", "{\"messages\":{}}", "not a list"},
        {"x.jsonl", "{\"prompt\":\"a\",\"completion\":3}", "two strings"},
        {"x.jsonl", "{\"input_ids\":[1,2],\"labels\":[1]}", "\"labels\" has 1"},
        {"x.jsonl", "{\"input_ids\":[-1]}", "negative"},
        {"x.jsonl", "{\"input_ids\":[1.5]}", "element 0"},
        {"x.jsonl", "{\"text\":\"\xFF\"}", "not UTF-8"},
        {"x.txt", "good\nbad \xFF\n", "x.txt:2: not UTF-8"},
        {"x.txt", "", "no records"},
        {"x.csv", "a,b", "x.csv: what is it?"}};
    data_world w;
    ASSERT(world_open(&w, "text_byte", NULL, "plain"));
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        ASSERT_FALSEm(rows[i][1], world_load(&w, rows[i][0], rows[i][1]));
        ASSERTm(why.text, strstr(why.text, rows[i][2]) != NULL);
    }
    ASSERT(world_load(&w, "x.json", "[{\"text\":\"a\"},\n\n{\"text\":\"b\"}]"));
    ASSERT_EQ((size_t)3, text_data_get(w.data, 1).line);
    ASSERT(world_load(&w, "x.jsonl",
                      "\n{\"text\":\"a\"}\r\n\n{\n\"text\":\n\"b\"}\n{\"text\":\"c\"}"));
    ASSERT_EQ((size_t)2, text_data_get(w.data, 0).line);
    ASSERT_EQ((size_t)4, text_data_get(w.data, 1).line);
    ASSERT_EQ((size_t)7, text_data_get(w.data, 2).line);
    world_close(&w);
    PASS();
}

TEST text_files(void) {
    data_world w;
    ASSERT(world_open(&w, "text_byte", NULL, "plain"));
    ASSERT(world_load(&w, "x.txt", "one\n\ntwo\n"));
    ASSERT_EQ((size_t)1, text_data_count(w.data));
    ASSERT_STR_EQ("<s>{one\n\ntwo\n</s>}", sample_text(&w, 0));
    ASSERT(world_load(&w, "x.txt", "one\n<|endoftext|>\n\ntwo <|endoftext|>\n<|endoftext|>\n"));
    ASSERT_EQ((size_t)2, text_data_count(w.data));
    ASSERT_STR_EQ("<s>{one</s>}", sample_text(&w, 0));
    ASSERT_STR_EQ("<s>{two <|endoftext|></s>}", sample_text(&w, 1));
    ASSERT_EQ((size_t)4, text_data_get(w.data, 1).line);
    ASSERT(world_load(&w, "x.txt", "<s>one</s>"));
    ASSERT_STR_EQ("<s>{one</s>}", sample_text(&w, 0));
    // split into samples of at most 5: every token once, BOS at the start of each
    static const char text[] = "the world and the people of the land";
    text_ids whole = {0};
    ASSERT(text_encode(w.tok, text, strlen(text), 0, &whole, &why));
    for (int bos = 0; bos < 2; bos++) {
        w.chat->bos = bos ? text_tok_find(w.tok, "<s>") : -1;
        w.desc.chunk_tokens = 5;
        ASSERT(world_load(&w, "x.txt", text));
        size_t targets = 0;
        for (size_t i = 0; i < text_data_count(w.data); i++) {
            text_sample sample = text_data_get(w.data, i);
            ASSERT(sample.count <= 5);
            ASSERT(!bos || sample.ids[0] == w.chat->bos);
            for (size_t k = 1; k < sample.count; k++) {
                size_t at = targets + (bos ? 0 : 1);
                int32_t want = at < whole.count ? whole.data[at] : w.chat->eos;
                ASSERT_EQ(want, sample.labels[k]);
                targets++;
            }
        }
        ASSERT_EQ(whole.count + (bos ? 1 : 0), targets);
    }
    text_ids_free(&whole);
    world_close(&w);
    PASS();
}

// A model folder is a few files; the chat formats are recognised by their contents.
static bool folder_write(const char* name, const char* text) {
    char path[100];
    snprintf(path, sizeof(path), "build/%s", name);
    FILE* file = fopen(path, "wb");
    bool good = file && fputs(text, file) >= 0;
    return file && fclose(file) == 0 && good;
}

TEST templates(void) {
    static const char* const rows[][3] = {
        {"{\"eos_token\":\"</s>\",\"chat_template\":\"x <|im_start|>system\\\\nBe good.<|im_end|> "
         "y\"}",
         "chatml", "<s><|im_start|>system\nBe good.<|im_end|>\n<|im_start|>user\n"},
        {"{\"chat_template\":[{\"name\":\"t\",\"template\":\"\"},{\"name\":\"default\","
         "\"template\":"
         "\"<|start_header_id|> Cutting Knowledge Date: December 2023\"}]}",
         "llama3",
         "<s><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: "
         "December 2023\nToday Date: 26 Jul 2024\n\n<|eot_id|><|start_header_id|>user"},
        {"{\"chat_template\":\"{{ '[INST]' + x + '[/INST]' }}{{ c + eos_token }}\"}", "mistral",
         "<s>[INST]hi[/INST]"},
        {"{\"eos_token\":{\"content\":\"<|im_end|>\"}}", "chatml", "<s><|im_start|>user\n"}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        data_world w;
        ASSERT(folder_write("tokenizer_config.json", rows[i][0]));
        bool good = world_open(&w, "text_byte", "build", NULL);
        remove("build/tokenizer_config.json");
        ASSERTm(why.text, good);
        ASSERT_STR_EQ(rows[i][1], text_chat_name(w.chat));
        text_message message = {"user", "hi", 2, false};
        text_ids ids = {0};
        text_bytes text = {0};
        ASSERT(text_chat_encode(w.chat, w.tok, &message, 1, true, &ids, NULL, &why));
        ASSERT(text_decode(w.tok, ids.data, ids.count, 0, &text, &why));
        ASSERT(text_bytes_add(&text, "", 1, &why));
        ASSERT_EQm(text.data, 0, strncmp(text.data, rows[i][2], strlen(rows[i][2])));
        text_bytes_free(&text);
        text_ids_free(&ids);
        if (strcmp(rows[i][1], "mistral") == 0) {
            ASSERT(world_load(&w, "x.jsonl", "{\"question\":\"q\",\"answer\":\"a\"}"));
            ASSERT_STR_EQ("<s>[INST]q[/INST]{a</s>}", sample_text(&w, 0));
        }
        world_close(&w);
    }
    data_world w;
    ASSERT(folder_write("tokenizer_config.json", "{\"chat_template\":\"something else\"}"));
    bool good = world_open(&w, "text_byte", "build", NULL);
    remove("build/tokenizer_config.json");
    ASSERT_FALSE(good);
    ASSERT(strstr(why.text, "--template") != NULL);
    text_tok_close(w.tok);
    ASSERT_FALSE(world_open(&w, "text_byte", NULL, "nothing"));
    ASSERT(strstr(why.text, "\"nothing\"") != NULL);
    text_tok_close(w.tok);
    PASS();
}

// ---- memory ----

static bool everything(const text_bytes* file) {
    data_world w;
    text_ids ids = {0};
    text_bytes text = {0};
    memset(&w, 0, sizeof(w));
    bool good = text_tok_load("t", file->data, file->count, &w.tok, &why) &&
                text_chat_open(w.tok, NULL, "chatml", &w.chat, &why);
    w.desc.tok = w.tok;
    w.desc.chat = w.chat;
    good =
        good &&
        text_encode(w.tok, "the e\xCC\xA3\xCC\x81 <mask> world's 12345", 30, TEXT_SPECIAL, &ids,
                    &why) &&
        text_decode(w.tok, ids.data, ids.count, TEXT_REPLACE, &text, &why) &&
        world_load(&w, "x.jsonl", "{\"question\":\"the\",\"answer\":\"and\"}\n{\"text\":\"x\"}") &&
        world_load(&w, "x.txt", "some text");
    text_ids_free(&ids);
    text_bytes_free(&text);
    world_close(&w);
    return good;
}

// Whichever allocation fails, the result is false with a message, and nothing leaks.
TEST every_allocation(const char* name) {
    char path[64];
    text_bytes file = {0};
    snprintf(path, sizeof(path), GOLDEN "%s.json", name);
    ASSERT(text_file_read(path, &file, &why));
    size_t live = alloc_live;
    bool good = false;
    size_t tried = 0;
    for (; !good && tried < 100000; tried++) {
        alloc_left = tried;
        why.text[0] = 0;
        good = everything(&file);
        bool used_up = alloc_left == 0 || alloc_left == SIZE_MAX;
        alloc_left = SIZE_MAX;
        ASSERT_EQ(live, alloc_live);
        ASSERTm("it failed without an allocation failing", good || used_up);
        ASSERTm("no message", good || strstr(why.text, "memory") != NULL);
    }
    ASSERT(good && tried > 50);
    text_bytes_free(&file);
    PASS();
}

SUITE(text_suite) {
    if (!test_wants("cpu")) {
        return;
    }
    size_t live = alloc_live;
    RUN_TEST(json_table);
    RUN_TEST(json_depth_and_lines);
    RUN_TEST(json_suite_files);
    RUN_TEST(normal_forms);
    RUN_TEST(normal_forms_golden);
    RUN_TEST(normal_forms_are_linear);
    RUN_TEST(utf8_repair);
    RUN_TEST(patterns);
    RUN_TESTp(mini_golden, "text_byte");
    RUN_TESTp(mini_golden, "text_spm");
    RUN_TESTp(mini_golden, "text_meta");
    RUN_TESTp(shared_golden, "gpt2");
    RUN_TESTp(shared_golden, "llama3_2");
    RUN_TESTp(shared_golden, "qwen2_5");
    RUN_TESTp(shared_golden, "mistral_v1");
    RUN_TESTp(llama_cpp_vectors, "gpt-2", "gpt2");
    RUN_TESTp(llama_cpp_vectors, "llama-bpe", "llama3_2");
    RUN_TESTp(llama_cpp_vectors, "qwen2", "qwen2_5");
    RUN_TESTp(random_bytes, golden_tok, "text_byte", true);
    RUN_TESTp(random_bytes, golden_tok, "text_spm", false);
    RUN_TESTp(random_bytes, shared_tok, "gpt2", false);
    RUN_TESTp(random_bytes, shared_tok, "mistral_v1", false);
    RUN_TESTp(random_bytes, model_tok, "models/stories260K", false);
    RUN_TESTp(shakespeare, shared_tok, "qwen2_5");
    RUN_TESTp(shakespeare, shared_tok, "llama3_2");
    RUN_TESTp(shakespeare, shared_tok, "mistral_v1");
    RUN_TESTp(shakespeare, model_tok, "models/stories260K");
    RUN_TESTp(long_word, "text_byte");
    RUN_TESTp(long_word, "text_spm");
    RUN_TEST(shortcuts_change_nothing);
    RUN_TESTp(streams, "text_byte");
    RUN_TESTp(streams, "text_spm");
    RUN_TEST(added_tokens);
    RUN_TEST(unknown_characters);
    RUN_TEST(refused_tokenizers);
    RUN_TEST(bin_format);
    RUN_TEST(records);
    RUN_TEST(records_sentencepiece);
    RUN_TEST(record_options);
    RUN_TEST(bad_data);
    RUN_TEST(text_files);
    RUN_TEST(templates);
    RUN_TESTp(every_allocation, "text_byte");
    RUN_TESTp(every_allocation, "text_spm");
    if (alloc_live != live) {
        printf("text: %zu allocations were not freed (or a test failed)\n", alloc_live - live);
    }
}
