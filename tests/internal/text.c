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

// Allocations and file calls are counted, and one of them can be made to fail.
static size_t alloc_live;
static size_t alloc_left = SIZE_MAX; // this many succeed, the next ones fail
static size_t file_live;
static size_t file_left = SIZE_MAX;

static void* counted_alloc(size_t bytes, size_t align, void* user) {
    (void)user;
    if (alloc_left != SIZE_MAX && alloc_left-- == 0) {
        alloc_left = 0;
        return NULL;
    }
    void* block = qlora__os_alloc(bytes, align, NULL);
    alloc_live += block != NULL ? bytes : 0;
    return block;
}

static void counted_free(void* pointer, size_t bytes, void* user) {
    (void)user;
    alloc_live -= bytes; // a wrong size shows in the end
    qlora__os_free(pointer, bytes, NULL);
}

static bool file_fails(void) {
    if (file_left != SIZE_MAX && file_left-- == 0) {
        file_left = 0;
        return true;
    }
    return false;
}

static int counted_open(const char* path, qlora_file_mode mode, void** file, void* user) {
    int code = file_fails() ? EIO : qlora__os_open(path, mode, file, user);
    file_live += code == 0 ? 1 : 0;
    return code;
}

// Short reads, as a pipe gives them.
static int64_t counted_read(void* file, void* buffer, size_t bytes, void* user) {
    return file_fails() ? -EIO : qlora__os_read(file, buffer, bytes < 5000 ? bytes : 5000, user);
}

static int counted_close(void* file, void* user) {
    file_live--;
    return qlora__os_close(file, user);
}

static qlora_text* lib;
#define ENV (&lib->env)
#define WHY qlora_text_last_error(lib)
#define OK(call) ((call) == QLORA_OK)

// The error text without the name of the call.
static const char* reason(void) {
    return qlora__env_reason(ENV);
}

static bool lib_open(void) {
    qlora_text_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.allocator.alloc = counted_alloc;
    desc.allocator.free = counted_free;
    qlora__hooks_default(&desc.allocator, &desc.files);
    desc.files.open = counted_open;
    desc.files.read = counted_read;
    desc.files.close = counted_close;
    return OK(qlora_text_create(&desc, &lib));
}

#define GOLDEN "tests/golden/"
#define FOLDER test_path("text")

// ---- helpers ----

// A whole file, with a zero byte after its end that is not counted.
static bool file_read(const char* path, qlora_text_bytes* out) {
    bool good = OK(qlora__text_file_read(ENV, path, out, NULL)) &&
                OK(qlora__text_bytes_add(ENV, out, "", 1));
    out->count -= good ? 1 : 0;
    return good;
}

static void marks_free(qlora__text_marks* marks) {
    qlora__env_free(ENV, marks->data, marks->capacity * sizeof *marks->data);
    qlora__env_free(ENV, marks->sorted, marks->sorted_capacity * sizeof *marks->sorted);
}

static qlora_text_token_info token_info(qlora_text_tok* tok, int32_t id) {
    qlora_text_token_info info;
    memset(&info, 0, sizeof info);
    (void)qlora_text_token_query(tok, id, &info);
    return info;
}

static qlora_text_tok_info tok_info(qlora_text_tok* tok) {
    qlora_text_tok_info info;
    memset(&info, 0, sizeof info);
    (void)qlora_text_tok_query(tok, &info);
    return info;
}

static qlora_text_sample sample_at(qlora_text_data* data, size_t index) {
    qlora_text_sample sample;
    memset(&sample, 0, sizeof sample);
    (void)qlora_text_sample_read(data, index, &sample);
    return sample;
}

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
static qlora_text_tok* shared_tok(const char* name) {
    char command[2400];
    char from[64];
    qlora_text_tok* tok = NULL;
    snprintf(from, sizeof(from), "tokenizers/%s/tokenizer.json.gz", name);
    if (!shared_is_there(from)) {
        return NULL;
    }
    char to[64];
    snprintf(to, sizeof(to), "%s-%s.json", test_path("text"), name);
    snprintf(command, sizeof(command), "gzip -dc '%s' > %s", shared_path(from), to);
    if (system(command) != 0 || !OK(qlora_text_tok_open(lib, to, &tok))) {
        printf("%s: %s\n", name, WHY);
    }
    remove(to);
    return tok;
}

static qlora_text_tok* golden_tok(const char* name) {
    char path[64];
    qlora_text_tok* tok = NULL;
    snprintf(path, sizeof(path), GOLDEN "%s.json", name);
    if (!OK(qlora_text_tok_open(lib, path, &tok))) {
        printf("%s\n", WHY);
    }
    return tok;
}

static bool json_read(const char* path, qlora_text_bytes* file, qlora__json* json) {
    memset(file, 0, sizeof(*file));
    memset(json, 0, sizeof(*json));
    bool good =
        file_read(path, file) && OK(qlora__text_json(ENV, path, file->data, file->count, json));
    if (!good) {
        printf("%s\n", WHY);
    }
    return good;
}

static void json_close(qlora_text_bytes* file, qlora__json* json) {
    qlora__json_free(ENV, json);
    qlora_text_bytes_free(lib, file);
}

static bool same_ids(const qlora_text_ids* got, const qlora__json* json,
                     const qlora__json_token* want) {
    qlora_text_ids ids = {0};
    bool same = OK(qlora__text_json_ids(ENV, json, want, &ids)) && ids.count == got->count &&
                (ids.count == 0 || memcmp(ids.data, got->data, ids.count * sizeof(int32_t)) == 0);
    if (!same) {
        printf("ids differ: expected %zu, got %zu\n", ids.count, got->count);
    }
    qlora_text_ids_free(lib, &ids);
    return same;
}

static bool same_text(const qlora_text_bytes* got, const char* want, size_t size) {
    bool same = got->count == size && (size == 0 || memcmp(got->data, want, size) == 0);
    if (!same) {
        printf("texts differ: want %.*s got %.*s\n", (int)size, want, (int)got->count, got->data);
    }
    return same;
}

// Encodes every string and compares it with golden[kind]; counts the correct ones.
static size_t golden_encode(qlora_text_tok* tok, const qlora__json* json,
                            const qlora__json_token* strings, const qlora__json_token* want,
                            unsigned flags) {
    size_t right = 0;
    const qlora__json_token* string = strings + 1;
    const qlora__json_token* ids = want + 1;
    for (uint32_t i = 0; i < strings->count; i++) {
        qlora_text_ids got = {0};
        if (OK(qlora_text_encode(tok, qlora__text_json_text(json, string),
                                 qlora__text_json_size(string), flags, &got)) &&
            same_ids(&got, json, ids)) {
            right++;
        } else {
            printf("string %u\n", i);
        }
        qlora_text_ids_free(lib, &got);
        string = qlora__text_json_next(json, string);
        ids = qlora__text_json_next(json, ids);
    }
    return right;
}

// Decodes the golden ids (without `cut` ids at both ends), all at once and as a stream.
static size_t golden_decode(qlora_text_tok* tok, const qlora__json* json,
                            const qlora__json_token* ids, const qlora__json_token* want,
                            unsigned flags, size_t cut) {
    size_t right = 0;
    size_t count = ids->count;
    ids++;
    want++;
    for (size_t i = 0; i < count; i++) {
        qlora_text_ids list = {0};
        qlora_text_bytes got = {0};
        bool good = OK(qlora__text_json_ids(ENV, json, ids, &list));
        size_t begin = list.count < cut ? list.count : cut;
        size_t end = list.count < 2 * cut ? begin : list.count - cut;
        const int32_t* first = list.count ? list.data + begin : NULL;
        good = good && OK(qlora_text_decode(tok, first, end - begin, flags, &got)) &&
               same_text(&got, qlora__text_json_text(json, want), qlora__text_json_size(want));
        right += good ? 1 : 0;
        qlora_text_ids_free(lib, &list);
        qlora_text_bytes_free(lib, &got);
        ids = qlora__text_json_next(json, ids);
        want = qlora__text_json_next(json, want);
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
        qlora__json json;
        lib->env.error[0] = 0;
        bool good = OK(qlora__text_json(ENV, "x", rows[i].text, strlen(rows[i].text), &json));
        qlora__json_free(ENV, &json);
        ASSERT_EQm(rows[i].text, rows[i].good, good);
        ASSERT_EQm(rows[i].text, rows[i].good, WHY[0] == 0);
    }
    PASS();
}

TEST json_depth_and_lines(void) {
    char text[600];
    qlora__json json;
    memset(text, '[', 256);
    memset(text + 256, ']', 256);
    ASSERT(OK(qlora__text_json(ENV, "x", text, 512, &json)));
    qlora__json_free(ENV, &json);
    memset(text, '[', 257);
    memset(text + 257, ']', 257);
    ASSERT_FALSE(OK(qlora__text_json(ENV, "x", text, 514, &json)));
    qlora__json_free(ENV, &json);
    ASSERT_STR_EQ("x:1:257: invalid JSON: nested too deeply; the limit is 256 levels", reason());
    ASSERT_FALSE(OK(qlora__text_json(ENV, "name.json", "[1,\n2,\n  ?]", 11, &json)));
    qlora__json_free(ENV, &json);
    ASSERT_STR_EQ("name.json:3:3: invalid JSON: expected a value", reason());
    PASS();
}

// JSONTestSuite: the file names give the expected outcome.
TEST json_suite_files(void) {
    const char* all = test_path("list");
    char list[1200];
    snprintf(list, sizeof(list), "ls '%s' > %s 2>/dev/null", shared_path("json/test_parsing"), all);
    if (system(list) != 0) {
        SKIPm("no shared folder");
    }
    qlora_text_bytes names = {0};
    ASSERT(file_read(all, &names));
    remove(all);
    size_t tried = 0;
    for (char* name = strtok(names.data, "\n"); name; name = strtok(NULL, "\n")) {
        char path[300];
        snprintf(path, sizeof(path), "json/test_parsing/%.200s", name);
        qlora_text_bytes file = {0};
        qlora__json json;
        if (!strstr(name, ".json") || !file_read(shared_path(path), &file)) {
            continue;
        }
        bool good = OK(qlora__text_json(ENV, name, file.data, file.count, &json));
        qlora__json_free(ENV, &json);
        qlora_text_bytes_free(lib, &file);
        ASSERTm(name, name[0] == 'i' || good == (name[0] == 'y'));
        tried++;
    }
    qlora_text_bytes_free(lib, &names);
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
    qlora__text_marks marks = {0};
    uint8_t* classes = qlora__text_classes_make(ENV);
    ASSERT(classes);
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        for (size_t form = 1; form <= 2; form++) {
            qlora_text_bytes out = {0};
            ASSERT(OK(qlora__text_normalize(ENV, classes, form == 1, rows[i][0], strlen(rows[i][0]),
                                            &marks, &out)));
            ASSERTm(rows[i][form], same_text(&out, rows[i][form], strlen(rows[i][form])));
            qlora_text_bytes_free(lib, &out);
        }
    }
    qlora__env_free(ENV, classes, QLORA__TEXT_CODES);
    marks_free(&marks);
    PASS();
}

// NFC of random texts, compared with the reference library.
TEST normal_forms_golden(void) {
    qlora_text_bytes file;
    qlora__json json;
    qlora__text_marks marks = {0};
    uint8_t* classes = qlora__text_classes_make(ENV);
    ASSERT(classes && json_read(GOLDEN "text_golden.json", &file, &json));
    const qlora__json_token* in = qlora__text_json_get(&json, json.tokens, "nfc") + 1;
    const qlora__json_token* want = qlora__text_json_next(&json, in) + 1;
    size_t count = in->count;
    in++;
    ASSERT(count > 100);
    for (size_t i = 0; i < count; i++) {
        qlora_text_bytes out = {0};
        ASSERT(OK(qlora__text_normalize(ENV, classes, true, qlora__text_json_text(&json, in),
                                        qlora__text_json_size(in), &marks, &out)));
        ASSERT(same_text(&out, qlora__text_json_text(&json, want), qlora__text_json_size(want)));
        qlora_text_bytes_free(lib, &out);
        in = qlora__text_json_next(&json, in);
        want = qlora__text_json_next(&json, want);
    }
    json_close(&file, &json);
    qlora__env_free(ENV, classes, QLORA__TEXT_CODES);
    marks_free(&marks);
    PASS();
}

// One pattern on one text: the ends of the pieces, in characters.
static bool split_is_right(const qlora__text_step* step, const uint8_t* classes,
                           const qlora__json* json, const qlora__json_token* text,
                           const qlora__json_token* ends) {
    qlora__text_view view = {(const unsigned char*)qlora__text_json_text(json, text),
                             qlora__text_json_size(text), classes, NULL};
    qlora__text_pieces pieces = {0};
    size_t begin = 0;
    bool right = OK(qlora__text_step_find(ENV, step, &view, begin, &begin, view.end, &pieces)) &&
                 pieces.count == ends->count;
    const qlora__json_token* end = ends + 1;
    int64_t characters = 0;
    size_t at = 0;
    for (size_t i = 0; right && i < pieces.count; i++) {
        for (; at < pieces.data[i].end; at++) {
            characters += (view.s[at] & 0xC0) != 0x80 ? 1 : 0;
        }
        int64_t wanted = -1;
        right = qlora__text_json_integer(json, end, &wanted) && wanted == characters;
        end = qlora__text_json_next(json, end);
    }
    qlora__env_free(ENV, pieces.data, pieces.capacity * sizeof *pieces.data);
    return right;
}

TEST patterns(void) {
    qlora_text_bytes file;
    qlora__json json;
    uint8_t* classes = qlora__text_classes_make(ENV);
    ASSERT(classes && json_read(GOLDEN "text_golden.json", &file, &json));
    const qlora__json_token* splits = qlora__text_json_get(&json, json.tokens, "splits");
    const qlora__json_token* texts = qlora__text_json_get(&json, splits, "texts");
    const qlora__json_token* list = qlora__text_json_get(&json, splits, "patterns");
    const qlora__json_token* row = list + 1;
    ASSERT(list->count > 10 && texts->count > 100);
    for (uint32_t i = 0; i < list->count; i++) {
        const char* regex =
            qlora__text_json_cstring(&json, qlora__text_json_get(&json, row, "regex"));
        qlora__text_step step = {0};
        step.kind = QLORA__TEXT_P_REGEX;
        step.pattern = qlora__text_pattern_find(regex);
        ASSERTm(regex, step.pattern);
        const qlora__json_token* text = texts + 1;
        const qlora__json_token* ends = qlora__text_json_get(&json, row, "ends") + 1;
        for (uint32_t k = 0; k < texts->count; k++) {
            ASSERTm(regex, split_is_right(&step, classes, &json, text, ends));
            text = qlora__text_json_next(&json, text);
            ends = qlora__text_json_next(&json, ends);
        }
        row = qlora__text_json_next(&json, row);
    }
    json_close(&file, &json);
    qlora__env_free(ENV, classes, QLORA__TEXT_CODES);
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
        qlora_text_bytes out = {0};
        size_t used;
        ASSERT(
            OK(qlora__text_utf8_repair(ENV, rows[i][0], strlen(rows[i][0]), false, &used, &out)));
        ASSERT(same_text(&out, rows[i][1], strlen(rows[i][1])));
        ASSERT_EQ(strlen(rows[i][0]), used);
        qlora_text_bytes_free(lib, &out);
    }
    PASS();
}

// A long run of marks in the worst order costs no more than a sorted one.
TEST normal_forms_are_linear(void) {
    qlora__text_marks marks = {0};
    uint8_t* classes = qlora__text_classes_make(ENV);
    ASSERT(classes);
    size_t pairs = 200000;
    qlora_text_bytes text = {0};
    qlora_text_bytes out = {0};
    for (size_t i = 0; i < pairs; i++) {
        ASSERT(OK(qlora_text_bytes_add(lib, &text, "\xCC\x81\xCC\xA3", 4))); // 230 before 220
    }
    clock_t start = clock();
    ASSERT(OK(qlora__text_normalize(ENV, classes, true, text.data, text.count, &marks, &out)));
    ASSERT((double)(clock() - start) / CLOCKS_PER_SEC < 5.0);
    ASSERT_EQ(text.count, out.count);
    ASSERT_EQ(0, memcmp(out.data, "\xCC\xA3\xCC\xA3", 4));
    ASSERT_EQ(0, memcmp(out.data + out.count - 4, "\xCC\x81\xCC\x81", 4));
    qlora_text_bytes_free(lib, &text);
    qlora_text_bytes_free(lib, &out);
    qlora__env_free(ENV, classes, QLORA__TEXT_CODES);
    marks_free(&marks);
    PASS();
}

// ---- agreement with the reference library ----

TEST mini_golden(const char* name) {
    qlora_text_bytes file;
    qlora__json json;
    qlora_text_tok* tok = golden_tok(name);
    bool unigram = strcmp(name, "text_unigram") == 0;
    ASSERT(tok && json_read(unigram ? GOLDEN "text_unigram_golden.json" : GOLDEN "text_golden.json",
                            &file, &json));
    const qlora__json_token* strings = qlora__text_json_get(&json, json.tokens, "strings");
    const qlora__json_token* all = qlora__text_json_get(&json, json.tokens, name);
    const qlora__json_token* plain = qlora__text_json_get(&json, all, "plain");
    size_t count = strings->count;
    ASSERT(count > 30);
    ASSERT_EQ(count, golden_encode(tok, &json, strings, plain, 0));
    ASSERT_EQ(count, golden_encode(tok, &json, strings, qlora__text_json_get(&json, all, "special"),
                                   QLORA_TEXT_SPECIAL));
    ASSERT_EQ(count, golden_decode(tok, &json, plain, qlora__text_json_get(&json, all, "decoded"),
                                   QLORA_TEXT_REPLACE, 0));
    ASSERT_EQ(count, golden_decode(tok, &json, plain, qlora__text_json_get(&json, all, "skipped"),
                                   QLORA_TEXT_REPLACE | QLORA_TEXT_SKIP, 0));
    ASSERT_EQ(count, golden_decode(tok, &json, plain, qlora__text_json_get(&json, all, "cut"),
                                   QLORA_TEXT_REPLACE, 1));
    json_close(&file, &json);
    qlora_text_tok_close(tok);
    PASS();
}

// Replaces the functions of known patterns by compiled expressions; the ids must not change.
static bool compile_patterns(qlora_text_tok* tok) {
    for (size_t i = 0; i < tok->splitter.count; i++) {
        qlora__text_step* step = &tok->splitter.data[i];
        if (step->pattern == NULL || strcmp(step->pattern->regex, "Whitespace") == 0) {
            continue;
        }
        const char* regex = step->pattern->regex;
        if (!OK(qlora__pattern_compile(&lib->env, regex, strlen(regex), tok->classes,
                                       &step->program))) {
            return false;
        }
    }
    memset(tok->cache, 0, QLORA__TEXT_CACHE_PLACES * sizeof(*tok->cache));
    return true;
}

TEST shared_golden(const char* name) {
    static const struct {
        const char* file;
        size_t count;
    } files[] = {{"tokenizers/golden.json", 59}, {"tokenizers/golden_more.json", 111}};
    qlora_text_tok* tok = shared_tok(name);
    if (!tok) {
        SKIPm("no shared folder, or no gzip");
    }
    for (int i = 0; i < 4; i++) {
        qlora_text_bytes file;
        qlora__json json;
        if (i == 2) {
            ASSERT(compile_patterns(tok));
        }
        ASSERT(json_read(shared_path(files[i % 2].file), &file, &json));
        const qlora__json_token* strings = qlora__text_json_get(&json, json.tokens, "strings");
        const qlora__json_token* all =
            qlora__text_json_get(&json, qlora__text_json_get(&json, json.tokens, "ids"), name);
        const qlora__json_token* plain = qlora__text_json_get(&json, all, "plain");
        const qlora__json_token* special = qlora__text_json_get(&json, all, "special");
        const qlora__json_token* decoded = qlora__text_json_get(&json, all, "decoded");
        size_t count = strings->count;
        ASSERT_EQ(files[i % 2].count, count);
        ASSERT_EQ(count, golden_encode(tok, &json, strings, plain, 0));
        ASSERT_EQ(count, golden_encode(tok, &json, strings, special, QLORA_TEXT_SPECIAL));
        ASSERT_EQ(count, golden_decode(tok, &json, plain, decoded, 0, 0));
        json_close(&file, &json);
    }
    qlora_text_tok_close(tok);
    PASS();
}

// A text may be split wherever qlora__text_lines_cut says: the ids of the parts are those of the
// whole. `kind` is what this tokenizer should allow.
TEST split_lines(qlora_text_tok* (*open)(const char*), const char* name,
                 qlora__text_lines_kind kind) {
    static const char* const pieces[] = {"\n",
                                         "\n",
                                         "\n\n",
                                         "\r\n",
                                         " ",
                                         "  ",
                                         "\t",
                                         "a",
                                         "The",
                                         "it's",
                                         "'s",
                                         ".",
                                         "!",
                                         "/x",
                                         "12",
                                         "\xC3\xA9",
                                         "\xE4\xB8\xAD\xE6\x96\x87",
                                         "e\xCC\x81",
                                         "\xF0\x9F\x98\x80",
                                         "<s>",
                                         "</s>",
                                         "<|endoftext|>",
                                         "\n \n",
                                         "word\n",
                                         "\xE2\x96\x81",
                                         "\xC2\xA0",
                                         "(\n"};
    char text[400];
    qlora_text_ids whole = {0};
    qlora_text_ids parts = {0};
    qlora_text_tok* tok = open(name);
    if (!tok) {
        SKIPm("no shared folder, or no gzip");
    }
    ASSERT_EQ_FMT((int)kind, (int)qlora__text_lines_of(tok), "%d");
    test_random random = test_random_start(name);
    size_t cuts = 0;
    for (int i = 0; i < (test_brief() ? 40 : 400); i++) {
        size_t size = 0;
        for (size_t n = 1 + test_random_below(&random, 30); n > 0; n--) {
            const char* piece =
                pieces[test_random_below(&random, sizeof pieces / sizeof pieces[0])];
            memcpy(text + size, piece, strlen(piece));
            size += strlen(piece);
        }
        whole.count = 0;
        ASSERT(OK(qlora_text_encode(tok, text, size, 0, &whole)));
        for (size_t cut = qlora__text_lines_cut(tok, kind, text, size, 1); cut < size;
             cut = qlora__text_lines_cut(tok, kind, text, size, cut + 1)) {
            parts.count = 0;
            cuts++;
            ASSERT(OK(qlora_text_encode(tok, text, cut, 0, &parts)));
            ASSERT(OK(qlora_text_encode(tok, text + cut, size - cut, QLORA_TEXT_CONTINUE, &parts)));
            ASSERT_EQ_FMT(whole.count, parts.count, "%zu");
            ASSERT_MEM_EQ(whole.data, parts.data, whole.count * sizeof(int32_t));
        }
    }
    ASSERT(kind == QLORA__TEXT_LINES_NONE || cuts > 100 || test_brief());
    qlora_text_ids_free(lib, &whole);
    qlora_text_ids_free(lib, &parts);
    qlora_text_tok_close(tok);
    PASS();
}

// Texts are separated as in llama.cpp's .inp; its .out has one line of ids for each.
static bool vector_is_right(qlora_text_tok* tok, const char* text, size_t size, const char* line) {
    qlora_text_ids got = {0};
    bool right = OK(qlora_text_encode(tok, text, size, 0, &got));
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
    qlora_text_ids_free(lib, &got);
    return right;
}

TEST llama_cpp_vectors(const char* vocab, const char* name) {
    static const char separator[] = "\n__ggml_vocab_test__\n";
    char path[100];
    qlora_text_bytes in = {0};
    qlora_text_bytes out = {0};
    qlora_text_tok* tok = shared_tok(name);
    snprintf(path, sizeof(path), "tokenizers/vectors/ggml-vocab-%s.gguf.inp", vocab);
    if (!tok || !file_read(shared_path(path), &in)) {
        qlora_text_tok_close(tok);
        SKIPm("no shared folder, or no gzip");
    }
    snprintf(path, sizeof(path), "tokenizers/vectors/ggml-vocab-%s.gguf.out", vocab);
    ASSERT(file_read(shared_path(path), &out));
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
    qlora_text_bytes_free(lib, &in);
    qlora_text_bytes_free(lib, &out);
    qlora_text_tok_close(tok);
    PASS();
}

// ---- tokenizers in GGUF files ----

// A vocabulary of llama.cpp in the shared folder; NULL if it or gzip is missing.
static qlora_text_tok* gguf_tok(const char* name) {
    char command[2400];
    char from[80];
    char to[80];
    qlora_text_tok* tok = NULL;
    snprintf(from, sizeof(from), "gguf/vocabs/ggml-vocab-%s.gguf.gz", name);
    if (!shared_is_there(from)) {
        return NULL;
    }
    snprintf(to, sizeof(to), "%s-%s.gguf", test_path("text"), name);
    snprintf(command, sizeof(command), "gzip -dc '%s' > %s", shared_path(from), to);
    if (system(command) != 0 || !OK(qlora_text_tok_open(lib, to, &tok))) {
        printf("%s: %s\n", name, WHY);
    }
    remove(to);
    return tok;
}

// llama.cpp's ids.
TEST gguf_vocabulary(const char* name) {
    qlora_text_bytes file;
    qlora__json json;
    qlora_text_tok* tok = gguf_tok(name);
    if (!tok) {
        SKIPm("no shared folder, or no gzip");
    }
    ASSERT(json_read(shared_path("gguf/vocabs/golden.json"), &file, &json));
    const qlora__json_token* strings = qlora__text_json_get(&json, json.tokens, "strings");
    const qlora__json_token* all =
        qlora__text_json_get(&json, qlora__text_json_get(&json, json.tokens, "ids"), name);
    size_t count = strings->count;
    ASSERT_EQ((size_t)170, count);
    ASSERT_EQ(count, golden_encode(tok, &json, strings, qlora__text_json_get(&json, all, "raw"),
                                   QLORA_TEXT_LITERAL));
    ASSERT_EQ(count,
              golden_encode(tok, &json, strings, qlora__text_json_get(&json, all, "plain"), 0));
    ASSERT_EQ(count, golden_encode(tok, &json, strings, qlora__text_json_get(&json, all, "special"),
                                   QLORA_TEXT_SPECIAL));
    json_close(&file, &json);
    qlora_text_tok_close(tok);
    PASS();
}

// The tokenizers inside the GGUF models.
TEST gguf_model_tokens(const char* name) {
    qlora_text_bytes file;
    qlora__json json;
    qlora_text_tok* tok = NULL;
    char path[1024];
    snprintf(path, sizeof(path), "gguf/%s/%s.gguf", strstr(name, "gemma") ? "extra" : "models",
             name);
    if (!shared_is_there(path)) {
        SKIPm("no shared folder");
    }
    char whole[1100];
    snprintf(whole, sizeof whole, "%s", shared_path(path));
    ASSERT(OK(qlora_text_tok_open(lib, whole, &tok)));
    ASSERT(json_read(shared_path("gguf/models/tokens.json"), &file, &json));
    const qlora__json_token* strings = qlora__text_json_get(&json, json.tokens, "strings");
    const qlora__json_token* all =
        qlora__text_json_get(&json, qlora__text_json_get(&json, json.tokens, "ids"), name);
    const qlora__json_token* front =
        qlora__text_json_get(&json, qlora__text_json_get(&json, json.tokens, "front"), name);
    ASSERT_EQ((size_t)strings->count, golden_encode(tok, &json, strings, all, 0));
    ASSERT(same_ids(&tok->prefix, &json, front));
    json_close(&file, &json);
    qlora_text_tok_close(tok);
    PASS();
}

// Files whose tokenizer is broken; those of the list that the library may read are left out.
TEST gguf_hostile_tokenizers(void) {
    static const char* const rows[][2] = {
        {"scores-short", "tokenizer.ggml.scores must be an array with one number for each"},
        {"scores-nan", "is not a finite number"},
        {"tokens-numbers", "tokenizer.ggml.tokens has type ARRAY of"},
        {"token-type", "is 77; it must be 1 to 6"},
        {"tokenizer-unknown", "tokenizer.ggml.model \"rwkv\" is not supported"},
        {"merges-broken", "tokenizer.ggml.merges"},
        {"key-length", "a key has 18446744073709551615 bytes"},
        {"array-nested", "is an array of arrays"}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        qlora_text_tok* tok = NULL;
        char name[100];
        snprintf(name, sizeof(name), "gguf/hostile/%s.gguf", rows[i][0]);
        if (!shared_is_there(name)) {
            SKIPm("no shared folder");
        }
        ASSERT_FALSEm(rows[i][0], OK(qlora_text_tok_open(lib, shared_path(name), &tok)));
        ASSERTm(WHY, strstr(WHY, rows[i][1]) != NULL);
    }
    PASS();
}

// ---- round trips ----

static bool round_trips(qlora_text_tok* tok, const char* text, size_t size) {
    qlora_text_ids ids = {0};
    qlora_text_bytes back = {0};
    bool good = OK(qlora_text_encode(tok, text, size, QLORA_TEXT_LITERAL, &ids)) &&
                OK(qlora_text_decode(tok, ids.data, ids.count, 0, &back)) && back.count == size &&
                (size == 0 || memcmp(back.data, text, size) == 0);
    qlora_text_ids_free(lib, &ids);
    qlora_text_bytes_free(lib, &back);
    return good;
}

TEST random_bytes(qlora_text_tok* (*open)(const char*), const char* name, bool normalizes) {
    test_random random = test_random_start(name);
    qlora_text_tok* tok = open(name);
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
    qlora_text_tok_close(tok);
    PASS();
}

static qlora_text_tok* model_tok(const char* name) {
    qlora_text_tok* tok = NULL;
    return OK(qlora_text_tok_open(lib, shared_path(name), &tok)) ? tok : NULL;
}

TEST shakespeare(qlora_text_tok* (*open)(const char*), const char* name) {
    qlora_text_bytes file = {0};
    qlora_text_tok* tok = open(name);
    if (!tok || !file_read(shared_path("data/tinyshakespeare.txt"), &file)) {
        qlora_text_tok_close(tok);
        SKIPm("no shared folder, or no gzip");
    }
    qlora_text_ids ids = {0};
    clock_t start = clock();
    ASSERT(OK(qlora_text_encode(tok, file.data, file.count, 0, &ids)));
    double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
    printf("%s: %zu tokens, %.1f M tokens/s\n", name, ids.count, (double)ids.count / seconds / 1e6);
    ASSERT(round_trips(tok, file.data, file.count));
    qlora_text_ids_free(lib, &ids);
    qlora_text_bytes_free(lib, &file);
    qlora_text_tok_close(tok);
    PASS();
}

// A million equal letters are one word: encoding must not be quadratic.
TEST long_word(const char* name) {
    size_t size = 1000000;
    qlora_text_tok* tok = golden_tok(name);
    char* text = (char*)malloc(size);
    qlora_text_ids ids = {0};
    ASSERT(tok && text);
    memset(text, 'l', size);
    clock_t start = clock();
    ASSERT(OK(qlora_text_encode(tok, text, size, 0, &ids)));
    ASSERT((double)(clock() - start) / CLOCKS_PER_SEC < 10.0);
    ASSERT(ids.count > 100000);
    ASSERT(round_trips(tok, text, size));
    qlora_text_ids_free(lib, &ids);
    free(text);
    qlora_text_tok_close(tok);
    PASS();
}

// Splitting at word marks, the cache, and the two ways to merge do not change the result.
TEST shortcuts_change_nothing(void) {
    test_random random = test_random_start("shortcuts");
    qlora_text_tok* tok = golden_tok("text_spm");
    qlora_text_tok* slow = golden_tok("text_spm");
    ASSERT(tok && slow);
    ASSERT(tok->cut_safe);
    slow->cut_safe = false;
    static const char* const parts[] = {"the", " ",   "world", "\xE2\x96\x81", "ing ", "\n",
                                        "l",   "sen", "tence", "\xC3\xA9",     "  ",   "there"};
    for (size_t i = 0; i < 500; i++) {
        qlora_text_bytes text = {0};
        qlora_text_ids a = {0};
        qlora_text_ids b = {0};
        size_t count = (size_t)test_random_below(&random, 60);
        for (size_t k = 0; k < count; k++) {
            const char* part = parts[test_random_below(&random, 12)];
            ASSERT(OK(qlora_text_bytes_add(lib, &text, part, strlen(part))));
        }
        ASSERT(OK(qlora_text_encode(tok, text.data, text.count, 0, &a)));
        ASSERT(OK(qlora_text_encode(slow, text.data, text.count, 0, &b)));
        ASSERT_EQ(a.count, b.count);
        ASSERT(a.count == 0 || memcmp(a.data, b.data, a.count * sizeof(int32_t)) == 0);
        qlora_text_bytes_free(lib, &text);
        qlora_text_ids_free(lib, &a);
        qlora_text_ids_free(lib, &b);
    }
    qlora_text_tok_close(tok);
    qlora_text_tok_close(slow);
    PASS();
}

TEST streams(const char* name) {
    test_random random = test_random_start(name);
    qlora_text_tok* tok = golden_tok(name);
    ASSERT(tok);
    for (size_t i = 0; i < 300; i++) {
        qlora_text_stream stream;
        qlora_text_bytes whole = {0};
        qlora_text_bytes parts = {0};
        int32_t ids[40];
        memset(&stream, 0, sizeof(stream));
        size_t count = (size_t)test_random_below(&random, 40);
        for (size_t k = 0; k < count; k++) {
            ids[k] = (int32_t)test_random_below(&random, (uint64_t)tok_info(tok).count);
            size_t before = parts.count;
            ASSERT(OK(qlora_text_stream_push(tok, &stream, ids[k], 0, &parts)));
            // the output is always complete UTF-8
            size_t used;
            qlora_text_bytes checked = {0};
            const char* fresh = parts.count > before ? parts.data + before : "";
            ASSERT(OK(
                qlora__text_utf8_repair(ENV, fresh, parts.count - before, false, &used, &checked)));
            ASSERT_EQ(parts.count - before, checked.count);
            qlora_text_bytes_free(lib, &checked);
        }
        ASSERT(OK(qlora_text_stream_end(tok, &stream, &parts)));
        // the same as decoding everything and then repairing it
        ASSERT(OK(qlora_text_decode(tok, ids, count, 0, &whole)));
        qlora_text_bytes repaired = {0};
        size_t used;
        ASSERT(OK(qlora__text_utf8_repair(ENV, whole.data, whole.count, false, &used, &repaired)));
        ASSERT(same_text(&parts, repaired.data, repaired.count));
        qlora_text_bytes_free(lib, &whole);
        qlora_text_bytes_free(lib, &parts);
        qlora_text_bytes_free(lib, &repaired);
    }
    qlora_text_tok_close(tok);
    PASS();
}

// QLORA_TEXT_LITERAL: special tokens are ordinary text. The id in the vocabulary takes precedence;
// others are numbered after the words, also where an id is free before.
TEST added_tokens(void) {
    static const char json[] =
        "{\"added_tokens\":[{\"id\":9,\"content\":\"ab\",\"special\":true},{\"id\":6,\"content\":"
        "\"<x>\",\"special\":true},{\"id\":6,\"content\":\"<x>\",\"special\":true}],\"model\":{"
        "\"vocab\":{\"a\":0,\"b\":1,\"ab\":2,\"<\":3,\"x\":4,\">\":7},\"merges\":[]}}";
    qlora_text_tok* tok = NULL;
    qlora_text_ids ids = {0};
    ASSERT(OK(qlora_text_tok_load(lib, "t", json, strlen(json), &tok)));
    ASSERT(OK(qlora_text_encode(tok, "ab<x>", 5, 0, &ids)));
    ASSERT(OK(qlora_text_encode(tok, "ab<x>", 5, QLORA_TEXT_LITERAL, &ids)));
    static const int32_t want[] = {2, 6, 0, 1, 3, 4, 7};
    ASSERT_EQ(sizeof(want) / sizeof(want[0]), ids.count);
    ASSERT_EQ(0, memcmp(want, ids.data, sizeof(want)));
    ASSERT_EQ(6, qlora_text_tok_find(tok, "<x>"));
    ASSERT_EQ(8, tok_info(tok).count);
    ASSERT(token_info(tok, 2).special && !token_info(tok, 0).special);
    ASSERT(token_info(tok, 6).added && !token_info(tok, 0).added);
    ASSERT(token_info(tok, 6).length == 3 && memcmp(token_info(tok, 6).name, "<x>", 3) == 0);
    qlora_text_token_info info;
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_text_token_query(tok, 5, &info));
    ASSERT_STR_EQ("qlora_text_token_query: the tokenizer has no token with id 5", WHY);
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_text_token_query(tok, -1, &info));
    qlora_text_ids_free(lib, &ids);
    qlora_text_tok_close(tok);
    PASS();
}

// An added token that takes the white space around it, after one that took it: nothing is left of
// it. Without lstrip, it is found again in that space.
TEST stripped_tokens(void) {
    static const struct {
        const char* options;
        const char* text;
        const char* want;
    } rows[] = {{"\"lstrip\":true,\"rstrip\":true", "\n\n\n\n\n\na", "1 0"},
                {"\"lstrip\":true,\"rstrip\":true", "a \n\n \n\na", "0 1 0"},
                {"\"lstrip\":false,\"rstrip\":true", "\n\n\n\n\na", "1 1 0"},
                {"\"lstrip\":true,\"rstrip\":false", "a  \n\n\n\na", "0 1 1 0"}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char json[300];
        char got[100] = "";
        size_t used = 0;
        qlora_text_tok* tok = NULL;
        qlora_text_ids ids = {0};
        snprintf(json, sizeof json,
                 "{\"added_tokens\":[{\"id\":1,\"content\":\"\\n\\n\",%s}],\"model\":{"
                 "\"vocab\":{\"a\":0},\"merges\":[]}}",
                 rows[i].options);
        ASSERTm(WHY, OK(qlora_text_tok_load(lib, "t", json, strlen(json), &tok)));
        ASSERT(OK(qlora_text_encode(tok, rows[i].text, strlen(rows[i].text), 0, &ids)));
        for (size_t k = 0; k < ids.count; k++) {
            qlora__append(got, sizeof got, &used, "%s%d", k > 0 ? " " : "", (int)ids.data[k]);
        }
        ASSERT_STR_EQm(rows[i].options, rows[i].want, got);
        qlora_text_ids_free(lib, &ids);
        qlora_text_tok_close(tok);
    }
    PASS();
}

// Added tokens that normalizing makes equal: the first one is found, special ones before others.
TEST equal_added_tokens(void) {
#define ADDED(id, name, special)                                                                   \
    "{\"id\":" id ",\"content\":\"" name "\",\"normalized\":true,\"special\":" special "}"
    static const struct {
        const char* added;
        int32_t want;
    } rows[] = {{ADDED("1", "X", "false") "," ADDED("2", "x", "false"), 1},
                {ADDED("1", "X", "false") "," ADDED("2", "x", "true"), 2},
                {ADDED("1", "X", "true") "," ADDED("2", "x", "true"), 1},
                {ADDED("1", "X", "true") "," ADDED("2", "x", "false"), 1},
                {ADDED("1", "x", "false") "," ADDED("1", "x", "true"), 1}};
#undef ADDED
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char json[400];
        qlora_text_tok* tok = NULL;
        qlora_text_ids ids = {0};
        snprintf(json, sizeof json,
                 "{\"added_tokens\":[%s],\"normalizer\":{\"type\":\"Lowercase\"},\"model\":{"
                 "\"vocab\":{\"a\":0},\"merges\":[]}}",
                 rows[i].added);
        ASSERTm(WHY, OK(qlora_text_tok_load(lib, "t", json, strlen(json), &tok)));
        ASSERT(OK(qlora_text_encode(tok, "X", 1, 0, &ids)));
        ASSERT_EQ(1, ids.count);
        ASSERT_EQm(rows[i].added, rows[i].want, ids.data[0]);
        qlora_text_ids_free(lib, &ids);
        qlora_text_tok_close(tok);
    }
    PASS();
}

// Characters that the steps of the library know but its regular expressions do not: with "_" before
// every piece, the number of ids tells the number of pieces.
TEST step_characters(void) {
#define PIECES(step)                                                                               \
    "{\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[" step ",{\"type\":"             \
    "\"Metaspace\",\"replacement\":\"_\",\"prepend_scheme\":\"always\",\"split\":false}]},"        \
    "\"model\":{\"vocab\":{\"a\":0,\"_\":1},\"merges\":[]}}"
#define LOWER(to)                                                                                  \
    "{\"normalizer\":{\"type\":\"Lowercase\"},\"model\":{\"vocab\":{\"a\":0,\"" to                 \
    "\":1},\"merges\":[]}}"
    static const struct {
        const char* json;
        const char* text;
        size_t count;
    } rows[] = {// joiners are word characters
                {PIECES("{\"type\":\"Whitespace\"}"),
                 "a\xE2\x80\x8D"
                 "a",
                 3},
                {PIECES("{\"type\":\"Whitespace\"}"),
                 "a\xE2\x80\x8B"
                 "a",
                 5},
                // U+11DE0 and U+16FF5, U+16FF7
                {PIECES("{\"type\":\"Digits\",\"individual_digits\":true}"),
                 "a\xF0\x91\xB7\xA0"
                 "a",
                 5},
                {PIECES("{\"type\":\"Digits\",\"individual_digits\":true}"),
                 "a\xF0\x96\xBF\xB5"
                 "a",
                 5},
                {PIECES("{\"type\":\"Digits\",\"individual_digits\":true}"),
                 "a\xF0\x96\xBF\xB7"
                 "a",
                 3},
                // U+111C9
                {PIECES("{\"type\":\"Punctuation\"}"),
                 "a\xF0\x91\x87\x89"
                 "a",
                 5},
                {PIECES("{\"type\":\"Punctuation\"}"),
                 "a\xF0\x91\x87\x8A"
                 "a",
                 3},
                // U+1C89, U+A7DC, U+10D65, U+16EA0, U+16EB8; U+16EB9 has no case
                {LOWER("\\u1c8a"), "a\xE1\xB2\x89", 2},
                {LOWER("\\u019b"), "a\xEA\x9F\x9C", 2},
                {LOWER("\\ud803\\udd85"), "a\xF0\x90\xB5\xA5", 2},
                {LOWER("\\ud81b\\udebb"), "a\xF0\x96\xBA\xA0", 2},
                {LOWER("\\ud81b\\uded3"), "a\xF0\x96\xBA\xB8", 2},
                {LOWER("\\ud81b\\uded4"), "a\xF0\x96\xBA\xB9", 1}};
#undef PIECES
#undef LOWER
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        qlora_text_tok* tok = NULL;
        qlora_text_ids ids = {0};
        ASSERTm(WHY, OK(qlora_text_tok_load(lib, "t", rows[i].json, strlen(rows[i].json), &tok)));
        ASSERT(OK(qlora_text_encode(tok, rows[i].text, strlen(rows[i].text), 0, &ids)));
        ASSERT_EQm(rows[i].json, rows[i].count, ids.count);
        qlora_text_ids_free(lib, &ids);
        qlora_text_tok_close(tok);
    }
    PASS();
}

// A prefix for the start of a text only: none if the start was dropped, as in `tokenizers`.
TEST dropped_start(void) {
#define STEPS(steps)                                                                               \
    "{\"normalizer\":" steps ",\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"_\","   \
    "\"prepend_scheme\":\"first\",\"split\":false},\"model\":{\"vocab\":{\"a\":0,\"_\":1,\"x\":2}" \
    ","                                                                                            \
    "\"merges\":[]}}"
    static const struct {
        const char* json;
        const char* text;
        size_t count;
    } rows[] = {
        {STEPS("{\"type\":\"Strip\",\"strip_left\":true,\"strip_right\":false}"), "a", 2},
        {STEPS("{\"type\":\"Strip\",\"strip_left\":true,\"strip_right\":false}"), " a", 1},
        {STEPS("{\"type\":\"Nmt\"}"),
         "\x01"
         "a",
         1},
        {STEPS("{\"type\":\"Replace\",\"pattern\":{\"Regex\":\" +\"},\"content\":\"x\"}"), " a", 3},
        {STEPS("{\"type\":\"Replace\",\"pattern\":{\"Regex\":\" +\"},\"content\":\"x\"}"), "  a",
         2},
        {STEPS("{\"type\":\"Replace\",\"pattern\":{\"String\":\"  \"},\"content\":\"x\"}"), "  a",
         2},
        {"{\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":"
         "\"WhitespaceSplit\"},"
         "{\"type\":\"Metaspace\",\"replacement\":\"_\",\"prepend_scheme\":\"first\",\"split\":"
         "false}"
         "]},\"model\":{\"vocab\":{\"a\":0,\"_\":1},\"merges\":[]}}",
         " a", 1}};
#undef STEPS
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        qlora_text_tok* tok = NULL;
        qlora_text_ids ids = {0};
        ASSERT(OK(qlora_text_tok_load(lib, "t", rows[i].json, strlen(rows[i].json), &tok)));
        ASSERT(OK(qlora_text_encode(tok, rows[i].text, strlen(rows[i].text), 0, &ids)));
        ASSERT_EQm(rows[i].json, rows[i].count, ids.count);
        qlora_text_ids_free(lib, &ids);
        qlora_text_tok_close(tok);
    }
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
        qlora_text_tok* tok = NULL;
        qlora_text_ids ids = {0};
        snprintf(json, sizeof(json), "{\"model\":{\"vocab\":{\"u\":0,\"a\":1},\"merges\":[],%s}}",
                 rows[i].options);
        ASSERT(OK(qlora_text_tok_load(lib, "t", json, strlen(json), &tok)));
        ASSERT(OK(qlora_text_encode(tok,
                                    "??a\xC3\xA9\xFF"
                                    "a",
                                    7, 0, &ids)));
        ASSERT_EQ(rows[i].count, ids.count);
        qlora_text_ids_free(lib, &ids);
        qlora_text_tok_close(tok);
    }
    PASS();
}

// ---- invalid files ----

#define MINI(rest)                                                                                 \
    "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"ab\":2},\"merges\":[]}," rest "}"

#define UNIGRAM(steps, vocab, unknown)                                                             \
    "{" steps "\"model\":{\"type\":\"Unigram\",\"vocab\":" vocab ",\"unk_id\":" unknown "}}"
#define MAP(map)                                                                                   \
    UNIGRAM("\"normalizer\":{\"type\":\"Precompiled\",\"precompiled_charsmap\":" map "},",         \
            "[[\"a\",0]]", "0")

// Unigram models by hand: ids of texts, or the message.
TEST unigram(void) {
    static const struct {
        const char* file;
        const char* text;
        const char* want;
    } rows[] = {
        {UNIGRAM("", "[[\"a\",-1],[\"b\",-1],[\"ab\",-3]]", "null"), "abab", "0 1 0 1"},
        {UNIGRAM("", "[[\"a\",-1],[\"b\",-1],[\"ab\",-1.5]]", "null"), "abab", "2 2"},
        {UNIGRAM("", "[[\"a\",-1],[\"b\",-1],[\"ab\",-2]]", "null"), "ab", "2"}, // first come
        {UNIGRAM("", "[[\"a\",-1],[\"b\",-1],[\"a\",-3],[\"ab\",-3]]", "null"), "ab", "3"},
        {UNIGRAM("", "[[\"?\",0],[\"a\",-1]]", "0"), "xaxx?a", "0 1 0 1"}, // unknown, also "?"
        {UNIGRAM("", "[[\"?\",0],[\"a\",-1],[\"<0x78>\",-2]]", "0,\"byte_fallback\":true"),
         "axxaxy", "1 2 2 1 0"},
        {UNIGRAM("", "[[\"\",0],[\"a\",-1]]", "0"), "a", "1"},
        {UNIGRAM("", "[[\"a\",-1]]", "null"), "a\xC3\xA9",
         "neither a token for \"\xC3\xA9\" nor an unknown token"},
        {UNIGRAM("\"normalizer\":{\"type\":\"Lowercase\"},",
                 "[[\"?\",0],[\"a\",-1],[\"i\\u0307\",-1]]", "0"),
         "A\xC4\xB0", "1 2"},
        {UNIGRAM("\"normalizer\":{\"type\":\"Nmt\"},", "[[\"a\",-1],[\" \",-1]]", "null"),
         "a\x01\x7F\t\xE2\x80\x8B"
         "a",
         "0 1 1 0"},
        {UNIGRAM("\"normalizer\":{\"type\":\"Replace\",\"pattern\":{\"Regex\":\"x+y?\"},"
                 "\"content\":\"ba\"},",
                 "[[\"a\",-1],[\"b\",-1]]", "null"),
         "axxyxa", "0 1 0 1 0 0"}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        qlora_text_tok* tok = NULL;
        qlora_text_ids ids = {0};
        char got[256] = "";
        size_t used = 0;
        ASSERTm(WHY,
                OK(qlora_text_tok_load(lib, "x.json", rows[i].file, strlen(rows[i].file), &tok)));
        if (!OK(qlora_text_encode(tok, rows[i].text, strlen(rows[i].text), 0, &ids))) {
            snprintf(got, sizeof got, "%.200s", reason());
        }
        for (size_t k = 0; k < ids.count; k++) {
            qlora__append(got, sizeof got, &used, "%s%d", k > 0 ? " " : "", (int)ids.data[k]);
        }
        ASSERTm(rows[i].want, strstr(got, rows[i].want) != NULL);
        ASSERTm(rows[i].want, ids.count == 0 || strlen(got) == strlen(rows[i].want));
        qlora_text_ids_free(lib, &ids);
        qlora_text_tok_close(tok);
    }
    PASS();
}

// What decides between words of equal sums is the rounding of the scores, as `tokenizers` reads
// them: the digits are rounded first, then their quotient by a power of ten.
TEST unigram_scores(void) {
    static const struct {
        const char* text;
        double want;
    } rows[] = {{"-7.5141257771397605", -7.51412577713976},
                {"-7.3219128751894935", -7.321912875189493},
                {"-7.1687547306821005", -7.1687547306821005},
                {"-3", -3},
                {"-1.5e1", -15},
                {"2E-1", 0.2},
                {"123456789012345678901234567890", 123456789012345678901234567890.0},
                {"0.1234567890123456789012345", 0.1234567890123456789},
                {"1e-400", 0},
                {"0e999999999999999999999", 0}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char json[100];
        qlora_text_tok* tok = NULL;
        snprintf(json, sizeof json, UNIGRAM("", "[[\"a\",%s]]", "0"), rows[i].text);
        ASSERTm(WHY, OK(qlora_text_tok_load(lib, "t", json, strlen(json), &tok)));
        ASSERTm(rows[i].text, tok->scores[0] == rows[i].want);
        qlora_text_tok_close(tok);
    }
    static const char huge[] = UNIGRAM("", "[[\"a\",1e400]]", "0");
    qlora_text_tok* tok = NULL;
    ASSERT_EQ(QLORA_ERR_FORMAT, qlora_text_tok_load(lib, "t", huge, strlen(huge), &tok));
    PASS();
}

// Steps that the library accepts, but whose outcome differs from what their order suggests.
TEST refused_chains(void) {
    static const char* const rows[][2] = {
        {MINI("\"normalizer\":{\"type\":\"Prepend\",\"prepend\":\"\"}"),
         "Prepend: the text is empty"},
        {MINI("\"normalizer\":{\"type\":\"Strip\",\"strip_left\":true},\"added_tokens\":[{\"id\":3,"
              "\"content\":\"\\t\",\"normalized\":true}]"),
         "added_tokens: the token with id 3 is empty when it is normalized"},
        {MINI("\"post_processor\":{\"type\":\"Sequence\",\"processors\":[{\"type\":"
              "\"BertProcessing\","
              "\"cls\":[\"a\",0],\"sep\":[\"b\",1]},{\"type\":\"ByteLevel\"},{\"type\":"
              "\"RobertaProcessing\",\"cls\":[\"a\",0],\"sep\":[\"b\",1]}]}"),
         "post_processor: RobertaProcessing after a step that adds tokens"},
        {MINI("\"decoder\":{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"ByteFallback\"},{"
              "\"type\":"
              "\"Strip\",\"content\":\" \",\"start\":1,\"stop\":0}]}"),
         "decoder: only Fuse and Metaspace are supported after ByteFallback"}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        qlora_text_tok* tok = NULL;
        ASSERT_EQ(QLORA_ERR_UNSUPPORTED,
                  qlora_text_tok_load(lib, "t", rows[i][0], strlen(rows[i][0]), &tok));
        ASSERTm(rows[i][1], strstr(reason(), rows[i][1]) != NULL);
    }
    PASS();
}

TEST refused_tokenizers(void) {
    static const char* const rows[][2] = {
        {"", "expected a value"},
        {"{}", "missing \"model\""},
        {"[]", "a JSON object was expected"},
        {UNIGRAM("", "[]", "null"), "model.vocab is not a list of tokens"},
        {UNIGRAM("", "[[\"a\"]]", "null"), "model.vocab[0] is not [token, score]"},
        {UNIGRAM("", "[[\"a\",0],[\"b\",\"c\"]]", "null"), "model.vocab[1] is not [token, score]"},
        {UNIGRAM("", "[[\"a\",0]]", "1"), "model.unk_id is not in the vocabulary"},
        {UNIGRAM("", "[[\"a\",0]]", "0,\"alpha\":0.1"), "model.alpha is not supported"},
        {UNIGRAM("\"pre_tokenizer\":{\"type\":\"ByteLevel\"},", "[[\"a\",0]]", "0"),
         "after ByteLevel"},
        {MAP("null"), "precompiled_charsmap is not a string"},
        {MAP("\"AAAA!AAA\""), "precompiled_charsmap is not base64"},
        {MAP("\"AAAA\""), "precompiled_charsmap is too short"},
        {MAP("\"AwAAAAAAAAAA\""), "precompiled_charsmap has a trie of the wrong size"},
        {MAP("\"IAAAAAAAAAAA\""), "precompiled_charsmap has a trie of the wrong size"},
        {"{\"model\":{\"type\":\"WordPiece\",\"vocab\":{}}}", "WordPiece"},
        {"{\"model\":{\"vocab\":{\"a\":-1},\"merges\":[]}}", "id -1"},
        {"{\"model\":{\"vocab\":{\"a\":99999999999},\"merges\":[]}}", "id 99999999999"},
        {"{\"model\":{\"vocab\":{\"a\":16000000},\"merges\":[]}}",
         "has id 16000000; ids must be 0 to 4"}, // a table for them would be 10,000 times the file
        {MINI("\"added_tokens\":[{\"id\":4,\"content\":\"x\"}]"),
         "added_tokens: \"x\" has id 4, but added tokens are numbered in their order, and this one "
         "would be 3"},
        {"{\"model\":{\"vocab\":{\"a\":0,\"b\":1,\"c\":1},\"merges\":[]}}",
         "model.vocab: \"c\" has id 1, as another token does"},
        {MINI("\"version\":\"2.0\""), "the version is \"2.0\"; only \"1.0\""},
        {"{\"model\":{\"vocab\":{\"a\":0.5},\"merges\":[]}}", "not a whole number"},
        {"{\"model\":{\"vocab\":{\"a\":0}}}", "merges is not an array"},
        {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[\"a b\"]}}",
         "model.merges[0] uses \"b\", which is not in the vocabulary"},
        {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[\"a a\"]}}", "joins to a token"},
        {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[\"aa\"]}}", "neither"},
        {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[[\"a\"]]}}", "neither"},
        {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[],\"unk_token\":\"x\"}}", "unk_token"},
        {"{\"model\":{\"vocab\":{},\"merges\":[],\"end_of_word_suffix\":\"</w>\"}}",
         "end_of_word_suffix"},
        {"{\"model\":{\"vocab\":{},\"merges\":[],\"dropout\":0.1}}", "dropout"},
        {MINI("\"normalizer\":{\"type\":\"NFKC\"}"), "NFKC"},
        {MINI("\"decoder\":{\"type\":\"Replace\",\"pattern\":{\"Regex\":\"x+\"},\"content\":"
              "\"\"}"),
         "a decoder with a regular expression"},
        {MINI("\"pre_tokenizer\":{\"type\":\"UnicodeScripts\"}"), "UnicodeScripts"},
        {MINI("\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a(?<=b)c\"},"
              "\"behavior\":\"Isolated\",\"invert\":false}"),
         "the regular expression a(?<=b)c has, at byte 2, a (?..) group other than"},
        {MINI("\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a|b*\"},"
              "\"behavior\":\"Isolated\",\"invert\":false}"),
         "the regular expression a|b* can match between two characters"},
        {MINI("\"pre_tokenizer\":{\"type\":\"Sequence\"}"), "Sequence"},
        {MINI("\"decoder\":{\"type\":\"CTC\"}"), "CTC"},
        {MINI("\"post_processor\":{\"type\":\"Other\"}"), "Other"},
        {MINI("\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[],"
              "\"special_tokens\":{}}"),
         "no text"},
        {MINI("\"added_tokens\":[{\"id\":1,\"content\":\"x\",\"special\":1}]"),
         "\"special\" is neither true nor false"},
        {MINI("\"added_tokens\":[{\"id\":1,\"content\":\"x\",\"lstrip\":\"true\"}]"),
         "\"lstrip\" is neither"},
        {MINI("\"added_tokens\":[{\"id\":1,\"content\":\"x\",\"normalized\":[]}]"),
         "\"normalized\" is neither"},
        {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[],\"byte_fallback\":1}}",
         "\"byte_fallback\" is neither"},
        {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[],\"ignore_merges\":\"no\"}}",
         "\"ignore_merges\" is neither"},
        {MINI("\"normalizer\":{\"type\":\"Strip\",\"strip_left\":0,\"strip_right\":true}"),
         "\"strip_left\" is neither"},
        {MINI("\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a\"},"
              "\"behavior\":\"Isolated\",\"invert\":1}"),
         "\"invert\" is neither"},
        {MINI("\"pre_tokenizer\":{\"type\":\"Digits\",\"individual_digits\":2}"),
         "\"individual_digits\" is neither"},
        {MINI("\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":0}"),
         "\"add_prefix_space\" is neither"},
        {MINI("\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"use_regex\":\"x\"}"),
         "\"use_regex\" is neither"},
        {MINI("\"added_tokens\":[{\"content\":\"x\"}]"), "added_tokens"}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        qlora_text_tok* tok = NULL;
        lib->env.error[0] = 0;
        ASSERT_FALSEm(rows[i][0], OK(qlora_text_tok_load(lib, "bad.json", rows[i][0],
                                                         strlen(rows[i][0]), &tok)));
        ASSERTm(rows[i][0], tok == NULL);
        ASSERTm(WHY, strstr(WHY, rows[i][1]) != NULL);
        ASSERTm(WHY, strncmp(reason(), "bad.json:", 9) == 0);
    }
    PASS();
}

// A tokenizer.bin with 9 tokens; returns its size.
static size_t bin_write(unsigned char data[256]) {
    // longest 3; <unk> <s> </s>; then " ", "a", "b", "ab" (-1), " a" (-2)
    static const struct {
        float score;
        const char* token;
    } rows[] = {{0, "<unk>"}, {0, "\n<s>\n"}, {0, "\n</s>\n"}, {-9, " "},     {-9, "a"},
                {-9, "b"},    {-1, "ab"},     {-2, " a"},      {-3, "<0x0A>"}};
    size_t size = 4;
    memset(data, 0, 256);
    data[0] = 3;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        size_t length = strlen(rows[i].token);
        memcpy(data + size, &rows[i].score, 4);
        data[size + 4] = (unsigned char)length;
        memcpy(data + size + 8, rows[i].token, length);
        size += 8 + length;
    }
    return size;
}

TEST bin_format(void) {
    unsigned char data[256];
    size_t size = bin_write(data);
    qlora_text_tok* tok = NULL;
    ASSERT(OK(qlora_text_tok_load(lib, "t.bin", data, size, &tok)));
    static const int32_t want[] = {1, 3, 6, 7, 8};
    qlora_text_ids ids = {0};
    qlora_text_bytes back = {0};
    ASSERT(OK(qlora_text_encode(tok, "ab a\n", 5, QLORA_TEXT_SPECIAL, &ids)));
    ASSERT_EQ((size_t)5, ids.count);
    ASSERT_EQ(0, memcmp(want, ids.data, sizeof(want)));
    ASSERT(OK(qlora_text_decode(tok, ids.data, ids.count, QLORA_TEXT_SKIP, &back)));
    ASSERT(same_text(&back, "ab a\n", 5));
    ASSERT_EQ(2, qlora_text_tok_find(tok, "</s>"));
    ASSERT_EQ(1, tok_info(tok).bos);
    qlora_text_ids_free(lib, &ids);
    qlora_text_bytes_free(lib, &back);
    qlora_text_tok_close(tok);
    for (size_t cut = 0; cut < size; cut++) { // a truncated file is rejected or has whole tokens
        tok = NULL;
        bool good = OK(qlora_text_tok_load(lib, "t.bin", data, cut, &tok));
        ASSERT(good == (tok != NULL));
        qlora_text_tok_close(tok);
    }
    PASS();
}

// ---- chat and data ----

typedef struct data_world {
    qlora_text_tok* tok;
    qlora_text_chat* chat;
    qlora_text_data* data;
    qlora_text_data_desc desc;
} data_world;

static bool world_chat(data_world* w, const char* folder, const char* format) {
    qlora_text_chat_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.tok = w->tok;
    desc.folder = folder;
    desc.name = format;
    bool good = OK(qlora_text_chat_open(lib, &desc, &w->chat));
    w->desc.chat = w->chat;
    return good;
}

static bool world_open(data_world* w, const char* tok, const char* folder, const char* format) {
    memset(w, 0, sizeof(*w));
    w->tok = golden_tok(tok);
    return w->tok && world_chat(w, folder, format);
}

static bool world_load(data_world* w, const char* name, const char* text) {
    qlora_text_data_close(w->data);
    w->data = NULL;
    w->desc.path = name;
    return OK(qlora_text_data_load(lib, &w->desc, text, strlen(text), &w->data));
}

static void world_close(data_world* w) {
    qlora_text_data_close(w->data);
    qlora_text_chat_close(w->chat);
    qlora_text_tok_close(w->tok);
}

// A sample as text, with the trained part in {braces}.
static const char* sample_text(const data_world* w, size_t index) {
    static char out[4096];
    qlora_text_sample sample = sample_at(w->data, index);
    qlora_text_bytes text = {0};
    bool open = false;
    for (size_t i = 0; i < sample.count; i++) {
        bool trained = sample.labels[i] != -100;
        if (trained && sample.labels[i] != sample.ids[i]) {
            return "a label that is not the id";
        }
        if (trained != open) {
            qlora_text_bytes_add(lib, &text, open ? "}" : "{", 1);
            open = trained;
        }
        qlora_text_decode(w->tok, sample.ids + i, 1, 0, &text);
    }
    snprintf(out, sizeof(out), "%.*s%s", (int)text.count, text.data ? text.data : "",
             open ? "}" : "");
    qlora_text_bytes_free(lib, &text);
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
        ASSERTm(WHY, world_load(&w, "x.jsonl", rows[i].json));
        ASSERT_EQ((size_t)1, qlora_text_data_count(w.data));
        if (rows[i].want) {
            ASSERT_STR_EQm(rows[i].json, rows[i].want, sample_text(&w, 0));
        } else {
            ASSERT_EQ((size_t)2, sample_at(w.data, 0).trained);
        }
        world_close(&w);
    }
    PASS();
}

static const char two_turns[] =
    "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"assistant\",\"content\":"
    "\"b\"},{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"assistant\",\"content\":\"b\"}]}";

// The ids of two_turns, those of answers in [brackets].
static const char* turns_text(const data_world* w) {
    static char out[512];
    qlora_text_ids ids = {0};
    qlora_text_ids labels = {0};
    size_t used = 0;
    out[0] = 0;
    if (!OK(qlora_text_chat_encode_json(w->chat, two_turns, strlen(two_turns), false, NULL, &ids,
                                        &labels)) ||
        ids.count != labels.count) {
        return "failed";
    }
    for (size_t i = 0; i < ids.count; i++) {
        used += (size_t)snprintf(out + used, sizeof out - used,
                                 labels.data[i] != -100 ? "[%d]" : " %d ", (int)ids.data[i]);
    }
    qlora_text_ids_free(lib, &ids);
    qlora_text_ids_free(lib, &labels);
    return out;
}

// The end token of a format is its id, also where the tokenizer would not find it in a text.
TEST end_tokens_are_ids(void) {
    static const char json[] =
        "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"\\n\":2,\"<\":3,\"/\":4,"
        "\"s\":5,\">\":6,\"</s>\":7,\"|\":8,\"u\":9,\"e\":10,\"r\":11,\"i\":12,\"t\":13,"
        "\"n\":14},\"merges\":[]}}";
    unsigned char bin[256];
    size_t size = bin_write(bin);
    data_world w;
    memset(&w, 0, sizeof w);
    // llama2.c: the file calls it "\n</s>\n"
    ASSERT(OK(qlora_text_tok_load(lib, "t.bin", bin, size, &w.tok)));
    ASSERT(world_chat(&w, NULL, "plain"));
    ASSERT_STR_EQ(" 1  7  8 [5][2] 3  8  4  8 [5][2] 3  8 ", turns_text(&w));
    world_close(&w);
    // a word of the vocabulary, which is not among the added tokens
    memset(&w, 0, sizeof w);
    ASSERT(OK(qlora_text_tok_load(lib, "t.json", json, strlen(json), &w.tok)));
    ASSERT(world_chat(&w, NULL, "plain"));
    ASSERT_STR_EQ(" 0  2 [1][7] 2  0  2 [1][7] 2 ", turns_text(&w));
    qlora_text_chat_info info;
    ASSERT(OK(qlora_text_chat_query(w.chat, &info)) && info.missing == NULL);
    qlora_text_chat_close(w.chat);
    ASSERT(world_chat(&w, NULL, "gemma"));
    ASSERT(OK(qlora_text_chat_query(w.chat, &info)));
    ASSERT_STR_EQ("<end_of_turn>", info.missing);
    qlora_text_chat_close(w.chat);
    ASSERT(world_chat(&w, NULL, "zephyr")); // it also ends what the user says
    ASSERT_STR_EQ(" 3  8  9  5  10  11  8  6  2  0  7  2  3  8  0  5  5  12  5  13  0  14  13  8 "
                  " 6  2 [1][7] 2  3  8  9  5  10  11  8  6  2  0  7  2  3  8  0  5  5  12  5  13 "
                  " 0  14  13  8  6  2 [1][7] 2 ",
                  turns_text(&w));
    world_close(&w);
    PASS();
}

// Ids without labels are those with labels: also where a format's end marker is missing.
TEST ids_without_labels(void) {
    static const char* const toks[] = {"text_byte", "text_spm"};
    for (size_t t = 0; t < sizeof(toks) / sizeof(toks[0]); t++) {
        for (size_t i = 0; qlora_text_chat_names(i) != NULL; i++) {
            const char* name = qlora_text_chat_names(i);
            data_world w;
            qlora_text_ids ids[2] = {{0}, {0}};
            qlora_text_ids labels = {0};
            ASSERT(world_open(&w, toks[t], NULL, name));
            for (int k = 0; k < 2; k++) {
                ASSERT(OK(qlora_text_chat_encode_json(w.chat, two_turns, strlen(two_turns), false,
                                                      NULL, &ids[k], k == 0 ? &labels : NULL)));
            }
            ASSERT_EQm(name, ids[0].count, labels.count);
            ASSERT_EQm(name, ids[0].count, ids[1].count);
            ASSERTm(name, memcmp(ids[0].data, ids[1].data, ids[0].count * sizeof(int32_t)) == 0);
            qlora_text_ids_free(lib, &ids[0]);
            qlora_text_ids_free(lib, &ids[1]);
            qlora_text_ids_free(lib, &labels);
            world_close(&w);
        }
    }
    PASS();
}

TEST records_sentencepiece(void) {
    data_world w;
    ASSERT(world_open(&w, "text_spm", NULL, "mistral"));
    ASSERT(world_load(&w, "x.jsonl", "{\"question\":\"the\",\"answer\":\"and\"}"));
    // one text except for the boundary: no second space after it, and the same ids as in one go
    static const char text[] = "[INST] the [/INST] and";
    qlora_text_ids whole = {0};
    ASSERT(OK(qlora_text_encode(w.tok, text, strlen(text), 0, &whole)));
    qlora_text_sample sample = sample_at(w.data, 0);
    ASSERT_EQ(whole.count + 2, sample.count);
    ASSERT_EQ(0, memcmp(whole.data, sample.ids + 1, whole.count * sizeof(int32_t)));
    ASSERT_EQ(qlora_text_tok_find(w.tok, "<s>"), sample.ids[0]);
    ASSERT_EQ(qlora_text_tok_find(w.tok, "</s>"), sample.ids[sample.count - 1]);
    qlora_text_ids_free(lib, &whole);
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
        {"x.jsonl", "{\"text\":\"a\"}\n{\"text\":\"b\"\n", "x.jsonl:2:12: invalid JSON"},
        {"x.jsonl", "{\"text\":\"a\"}\n\n{\"text\":3}\n", "x.jsonl:3: \"text\" is not a string"},
        {"x.jsonl", "{\"text\":\"a\"} {\"text\":\"b\"}\n",
         "x.jsonl:1:14: invalid JSON: unexpected text after the value"},
        {"x.jsonl", "{\"txt\":\"a\",\"b\":1}", "found txt, b"},
        {"x.jsonl", "3\n", "must be an object"},
        {"x.jsonl", "\n\n", "no records"},
        {"x.jsonl", "", "no records"},
        {"x.json", "[]", "no records"},
        {"x.json", "[{\"text\":\"a\"},\n 5]", "x.json:2: a record must be"},
        {"x.json", "[{\"text\":\"a\"}] x", "unexpected text after the value"},
        {"x.jsonl", "{\"messages\":[{\"role\":\"tool\",\"content\":\"\"}]}",
         "message 1 has the role"},
        {"x.jsonl", "{\"messages\":[{\"content\":\"\"}]}", "message 1 has no \"role\""},
        {"x.jsonl", "{\"messages\":[{\"role\":\"user\"}]}", "message 1 has no text"},
        {"x.jsonl", "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image\"}]}]}",
         "the type \"image\""},
        {"x.jsonl", "{\"messages\":{}}", "not a list"},
        {"x.jsonl", "{\"prompt\":\"a\",\"completion\":3}", "two strings"},
        {"x.jsonl", "{\"input_ids\":[1,2],\"labels\":[1]}", "\"labels\" has 1"},
        {"x.jsonl", "{\"input_ids\":[-1]}", "negative"},
        {"x.jsonl", "{\"input_ids\":[1.5]}", "element 0"},
        {"x.jsonl", "{\"text\":\"\xFF\"}", "invalid UTF-8"},
        {"x.txt", "good\nbad \xFF\n", "x.txt:2: not UTF-8"},
        {"x.txt", "", "no records"},
        {"x.xls", "a,b", "x.xls: unknown data format"}};
    data_world w;
    ASSERT(world_open(&w, "text_byte", NULL, "plain"));
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        ASSERT_FALSEm(rows[i][1], world_load(&w, rows[i][0], rows[i][1]));
        ASSERTm(WHY, strstr(WHY, rows[i][2]) != NULL);
    }
    ASSERT(world_load(&w, "x.json", "[{\"text\":\"a\"},\n\n{\"text\":\"b\"}]"));
    ASSERT_EQ((size_t)3, sample_at(w.data, 1).line);
    ASSERT(world_load(&w, "x.jsonl",
                      "\n{\"text\":\"a\"}\r\n\n{\n\"text\":\n\"b\"}\n{\"text\":\"c\"}"));
    ASSERT_EQ((size_t)2, sample_at(w.data, 0).line);
    ASSERT_EQ((size_t)4, sample_at(w.data, 1).line);
    ASSERT_EQ((size_t)7, sample_at(w.data, 2).line);
    world_close(&w);
    PASS();
}

TEST text_files(void) {
    data_world w;
    ASSERT(world_open(&w, "text_byte", NULL, "plain"));
    ASSERT(world_load(&w, "x.txt", "one\n\ntwo\n"));
    ASSERT_EQ((size_t)1, qlora_text_data_count(w.data));
    ASSERT_STR_EQ("<s>{one\n\ntwo\n</s>}", sample_text(&w, 0));
    ASSERT(world_load(&w, "x.txt", "one\n<|endoftext|>\n\ntwo <|endoftext|>\n<|endoftext|>\n"));
    ASSERT_EQ((size_t)2, qlora_text_data_count(w.data));
    ASSERT_STR_EQ("<s>{one</s>}", sample_text(&w, 0));
    ASSERT_STR_EQ("<s>{two <|endoftext|></s>}", sample_text(&w, 1));
    ASSERT_EQ((size_t)4, sample_at(w.data, 1).line);
    ASSERT(world_load(&w, "x.txt", "<s>one</s>"));
    ASSERT_STR_EQ("<s>{one</s>}", sample_text(&w, 0));
    // split into samples of at most 5: every token once, BOS at the start of each
    static const char text[] = "the world and the people of the land";
    qlora_text_ids whole = {0};
    ASSERT(OK(qlora_text_encode(w.tok, text, strlen(text), 0, &whole)));
    for (int bos = 0; bos < 2; bos++) {
        w.chat->bos = bos ? qlora_text_tok_find(w.tok, "<s>") : -1;
        w.desc.chunk_tokens = 5;
        ASSERT(world_load(&w, "x.txt", text));
        size_t targets = 0;
        for (size_t i = 0; i < qlora_text_data_count(w.data); i++) {
            qlora_text_sample sample = sample_at(w.data, i);
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
    qlora_text_ids_free(lib, &whole);
    world_close(&w);
    PASS();
}

// A model folder is a few files; the chat formats are recognised by their contents.
static bool folder_write(const char* name, const char* text) {
    char path[100];
    snprintf(path, sizeof(path), "%s/%s", FOLDER, name);
    FILE* file = qlora__os_make_dir(FOLDER, NULL) == 0 ? fopen(path, "wb") : NULL;
    bool good = file && fputs(text, file) >= 0;
    return file && fclose(file) == 0 && good;
}

static void folder_clear(void) {
    static const char* const names[] = {"data.txt",
                                        "config.json",
                                        "generation_config.json",
                                        "chat_template.jinja",
                                        "tokenizer_config.json",
                                        "bad.txt"};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        char path[100];
        snprintf(path, sizeof(path), "%s/%s", FOLDER, names[i]);
        remove(path);
    }
    remove(FOLDER);
}

// Where a chat's template comes from, and what it renders.
TEST templates(void) {
    static const char* const rows[][3] = {
        {"{\"eos_token\":\"</s>\",\"chat_template\":\"{% for m in messages %}<|im_start|>"
         "{{ m.role }}|{{ m.content }}<|im_end|>{% endfor %}\"}",
         "model", "<s><|im_start|>user|hi<|im_end|>"},
        {"{\"chat_template\":[{\"name\":\"t\",\"template\":\"\"},{\"name\":\"default\","
         "\"template\":\"{{ messages[0].content }}, {{ strftime_now('%d %b %Y') }}\"}]}",
         "model", "<s>hi, 26 Jul 2024"},
        {"{\"chat_template\":\"{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + "
         "m.content + '[/INST]' }}{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}\"}",
         "model", "<s>[INST]hi[/INST]"},
        {"{\"bos_token\":\"<s>\",\"chat_template\":\"{{ bos_token }}x\"}", "model", "<s>x"},
        {"{\"eos_token\":{\"content\":\"<|im_end|>\"}}", "chatml", "<s><|im_start|>user\n"}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        data_world w;
        ASSERT(folder_write("tokenizer_config.json", rows[i][0]));
        bool good = world_open(&w, "text_byte", FOLDER, NULL);
        folder_clear();
        ASSERTm(WHY, good);
        qlora_text_chat_info info;
        ASSERT(OK(qlora_text_chat_query(w.chat, &info)));
        ASSERT_STR_EQ(rows[i][1], info.name);
        qlora_text_message message = {"user", "hi", 2, false};
        qlora_text_ids ids = {0};
        qlora_text_bytes text = {0};
        ASSERT(OK(qlora_text_chat_encode(w.chat, &message, 1, true, &ids, NULL)));
        ASSERT(OK(qlora_text_decode(w.tok, ids.data, ids.count, 0, &text)));
        ASSERT(OK(qlora_text_bytes_add(lib, &text, "", 1)));
        ASSERT_EQm(text.data, 0, strncmp(text.data, rows[i][2], strlen(rows[i][2])));
        qlora_text_bytes_free(lib, &text);
        qlora_text_ids_free(lib, &ids);
        if (i == 2) {
            ASSERT(world_load(&w, "x.jsonl", "{\"question\":\"q\",\"answer\":\"a\"}"));
            ASSERT_STR_EQ("<s>[INST]q[/INST]{a</s>}", sample_text(&w, 0));
        }
        world_close(&w);
    }
    data_world w;
    ASSERT(folder_write("tokenizer_config.json", "{\"chat_template\":\"a\\n{% nothing %}\"}"));
    bool good = world_open(&w, "text_byte", FOLDER, NULL);
    folder_clear();
    ASSERT_FALSE(good);
    ASSERTm(WHY, strstr(WHY, "line 2: unknown tag \"nothing\"") != NULL);
    qlora_text_tok_close(w.tok);
    ASSERT_FALSE(world_open(&w, "text_byte", NULL, "nothing"));
    ASSERT(strstr(WHY, "\"nothing\"") != NULL);
    qlora_text_tok_close(w.tok);
    PASS();
}

// The ids that end a text: those of generation_config.json if it exists, else those of config.json.
// The rows are what transformers 5.22 does.
TEST stop_ids(void) {
    static const struct {
        const char* config;
        const char* generation;
        const char* want;
    } rows[] = {{"{\"eos_token_id\":5}", NULL, "5 421"},
                {"{\"eos_token_id\":5}", "{}", "421"},
                {"{\"eos_token_id\":5}", "{\"eos_token_id\":null}", "421"},
                {"{\"eos_token_id\":5}", "{\"eos_token_id\":[]}", "421"},
                {"{\"eos_token_id\":5}", "{\"eos_token_id\":[7,8]}", "7 8 421"},
                {"{\"eos_token_id\":[5,6]}", "{\"eos_token_id\":7}", "7 421"},
                {NULL, "{\"eos_token_id\":7}", "7 421"},
                {"{\"text_config\":{\"eos_token_id\":4}}", NULL, "4 421"},
                {"{\"eos_token_id\":5}", "{\"eos_token_id\":[421,9999]}", "421"},
                {"{}", NULL, "421"}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        data_world w;
        char got[64] = "";
        size_t used = 0;
        ASSERT(folder_write("tokenizer_config.json", "{\"eos_token\":\"</s>\"}"));
        ASSERT(!rows[i].config || folder_write("config.json", rows[i].config));
        ASSERT(!rows[i].generation || folder_write("generation_config.json", rows[i].generation));
        bool good = world_open(&w, "text_byte", FOLDER, "plain");
        folder_clear();
        ASSERTm(WHY, good);
        qlora_text_chat_info info;
        ASSERT(OK(qlora_text_chat_query(w.chat, &info)));
        ASSERT_EQ(qlora_text_tok_find(w.tok, "</s>"), info.eos);
        for (size_t k = 0; k < info.stop_count; k++) {
            used += (size_t)snprintf(got + used, sizeof(got) - used, "%s%d", k > 0 ? " " : "",
                                     (int)info.stops[k]);
        }
        ASSERT_STR_EQ(rows[i].want, got);
        world_close(&w);
    }
    data_world w;
    ASSERT(folder_write("config.json", "{\"eos_token_id\":\"x\"}"));
    bool good = world_open(&w, "text_byte", FOLDER, "plain");
    folder_clear();
    ASSERT_FALSE(good);
    ASSERT(strstr(WHY, "config.json: eos_token_id is x;") != NULL);
    qlora_text_tok_close(w.tok);
    PASS();
}

// ---- objects and errors ----

TEST objects(void) {
    char text[200] = "?";
    qlora_text_desc desc;
    qlora_text* other = NULL;
    memset(&desc, 0, sizeof desc);
    desc.error_text = text;
    desc.error_text_size = sizeof text;
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_text_create(&desc, NULL));
    ASSERT_STR_EQ("qlora_text_create: out is NULL", text);
    desc.reserved_must_be_zero0 = 1;
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_text_create(&desc, &other));
    ASSERT(strstr(text, "not zeroed") != NULL && other == NULL);
    desc.reserved_must_be_zero0 = 0;
    desc.allocator.alloc = counted_alloc;
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_text_create(&desc, &other));
    ASSERT(strstr(text, "desc.allocator needs both") != NULL);
    desc.allocator.free = counted_free;
    desc.files.open = counted_open;
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_text_create(&desc, &other));
    ASSERT(strstr(text, "desc.files needs all") != NULL);
    desc.files.open = NULL;
    alloc_left = 0;
    ASSERT_EQ(QLORA_ERR_MEMORY, qlora_text_create(&desc, &other));
    alloc_left = SIZE_MAX;
    ASSERT(strstr(text, "qlora_text_create: cannot allocate") != NULL);
    ASSERT_EQ(QLORA_OK, qlora_text_create(&desc, &other));
    ASSERT_STR_EQ("", text);
    ASSERT_STR_EQ("", qlora_text_last_error(other));
    ASSERT_EQ(QLORA_OK, qlora_text_destroy(other));
    ASSERT_EQ(QLORA_OK, qlora_text_create(NULL, &other));
    ASSERT_EQ(QLORA_OK, qlora_text_destroy(other));
    ASSERT_EQ(QLORA_OK, qlora_text_destroy(NULL));
    ASSERT(strlen(qlora_text_last_error(NULL)) > 0);
    ASSERT_EQ(QLORA_VERSION, qlora_text_version());
    PASS();
}

// Parents with open children refuse to go.
TEST children_first(void) {
    data_world w;
    ASSERT(world_open(&w, "text_byte", NULL, "plain"));
    ASSERT(world_load(&w, "x.txt", "text"));
    ASSERT_EQ(QLORA_ERR_STATE, qlora_text_destroy(lib));
    ASSERT_STR_EQ("qlora_text_destroy: still open: tokenizers 1, chats 1, data files 1, "
                  "templates 0, patterns 0; close them first",
                  WHY);
    ASSERT_EQ(QLORA_ERR_STATE, qlora_text_tok_close(w.tok));
    ASSERT_STR_EQ(
        "qlora_text_tok_close: chats that use this tokenizer are still open: 1; close them first",
        WHY);
    world_close(&w);
    PASS();
}

TEST arguments(void) {
    data_world w;
    qlora_text_ids ids = {0};
    qlora_text_bytes bytes = {0};
    qlora_text_message message = {NULL, "x", 1, false};
    qlora_text_tok* tok = NULL;
    qlora_text_data* data = NULL;
    qlora_text_chat_desc chat;
    memset(&chat, 0, sizeof chat);
    ASSERT(world_open(&w, "text_byte", NULL, "plain"));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_text_tok_open(NULL, "x", &tok));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_text_tok_open(lib, NULL, &tok));
    ASSERT_STR_EQ("qlora_text_tok_open: path is NULL", WHY);
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_text_tok_load(lib, "x", NULL, 4, &tok));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_text_chat_open(lib, &chat, &w.chat));
    ASSERT_STR_EQ("qlora_text_chat_open: desc->tok is NULL", WHY);
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_text_encode(NULL, "x", 1, 0, &ids));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_text_encode(w.tok, NULL, 1, 0, &ids));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_text_decode(w.tok, NULL, 1, 0, &bytes));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_text_chat_encode(w.chat, &message, 1, true, &ids, NULL));
    ASSERT_STR_EQ("qlora_text_chat_encode: message 0: role is NULL", WHY);
    message.role = "cook";
    ASSERT_EQ(QLORA_ERR_FORMAT, qlora_text_chat_encode(w.chat, &message, 1, true, &ids, NULL));
    ASSERTm(WHY, strstr(WHY, "the role \"cook\" is not supported") != NULL);
    ASSERT_EQ((size_t)0, ids.count); // BOS was appended and taken back
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_text_data_open(lib, &w.desc, &data));
    ASSERT_STR_EQ("qlora_text_data_open: desc->path is NULL", WHY);
    w.desc.chunk_tokens = 1;
    ASSERT_FALSE(world_load(&w, "x.txt", "text"));
    ASSERT(strstr(WHY, "chunk_tokens is 1; it must be 0 or at least 2") != NULL);
    w.desc.chunk_tokens = 0;
    ASSERT(world_load(&w, "x.txt", "text"));
    qlora_text_sample sample;
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_text_sample_read(w.data, 1, &sample));
    ASSERT_STR_EQ("qlora_text_sample_read: index is 1; it must be below 1", WHY);
    ASSERT_EQ((size_t)0, qlora_text_data_count(NULL));
    ASSERT_EQ(QLORA_OK, qlora_text_sample_read(w.data, 0, &sample));
    ASSERT_STR_EQ("", WHY); // a success clears the text
    ASSERT_EQ(QLORA_ERR_FILE, qlora_text_tok_open(lib, "build/no such file", &tok));
    ASSERT_STR_EQ("qlora_text_tok_open: cannot read build/no such file: no such file or folder (2)",
                  WHY);
    ASSERT_EQ(QLORA_ERR_FILE, qlora_text_tok_open(lib, "tests", &tok));
    ASSERT_STR_EQ(
        "qlora_text_tok_open: tests: no tokenizer found (tokenizer.json, tokenizer.bin or "
        "tok512.bin)",
        WHY);
    qlora_text_ids_free(lib, &ids);
    world_close(&w);
    PASS();
}

// Messages quote files: one line, valid UTF-8, whole characters.
TEST clean_messages(void) {
    static const char json[] = "{\"model\":{\"type\":\"A\\n\\t\\u007f%s\"}}";
    char text[2000];
    char name[700];
    qlora_text_tok* tok = NULL;
    memset(name, 'n', sizeof(name));
    for (size_t i = 600; i + 2 < sizeof(name); i += 2) {
        memcpy(name + i, "\xC3\xA9", 2);
    }
    for (size_t size = 690; size < sizeof(name); size++) {
        char cut[700];
        memcpy(cut, name, size);
        cut[size] = 0;
        snprintf(text, sizeof(text), json, "\xC3\xA9");
        ASSERT_EQ(QLORA_ERR_UNSUPPORTED, qlora_text_tok_load(lib, cut, text, strlen(text), &tok));
        for (size_t at = 0; at < strlen(WHY);) {
            uint32_t step = qlora__utf8_size(WHY + at, (uint32_t)(strlen(WHY) - at));
            ASSERTm(WHY, step > 0 && (unsigned char)WHY[at] >= 0x20 && WHY[at] != 0x7F);
            at += step;
        }
    }
    ASSERT_EQ(QLORA_ERR_UNSUPPORTED, qlora_text_tok_load(lib, "t", text, strlen(text), &tok));
    ASSERT_STR_EQ("qlora_text_tok_load: t: the model type is A???\xC3\xA9; only BPE and Unigram "
                  "are supported",
                  WHY);
    PASS();
}

static void log_keep(void* user, qlora_log_level level, qlora_log_item item, const char* text,
                     const char* file, int line) {
    bool ours = item == QLORA_LOG_ITEM_TEXT && level == QLORA_LOG_INFO && line > 0 &&
                strcmp(file, "qlora_text.h") == 0;
    snprintf((char*)user, 100, "%s%s", ours ? "" : "not ours: ", text);
}

TEST log_items(void) {
    char text[100] = "";
    qlora_text_desc desc;
    qlora_text* other = NULL;
    qlora_text_tok* tok = NULL;
    memset(&desc, 0, sizeof desc);
    desc.log = log_keep;
    desc.log_user = text;
    ASSERT(OK(qlora_text_create(&desc, &other)));
    ASSERT(OK(qlora_text_tok_open(other, GOLDEN "text_spm.json", &tok)));
    ASSERTm(text, strncmp(text, GOLDEN "text_spm.json: ", strlen(GOLDEN "text_spm.json: ")) == 0);
    ASSERT(OK(qlora_text_tok_close(tok)));
    ASSERT(OK(qlora_text_destroy(other)));
    PASS();
}

// ---- memory ----

// Uses all of the library once. `path` is a tokenizer, `folder` a model's folder.
static qlora_result everything(const char* path, const char* folder) {
    static const char text[] = "the e\xCC\xA3\xCC\x81 <mask> world's 12345";
    static const char lines[] = "{\"question\":\"the\",\"answer\":\"and\"}\n{\"text\":\"x\"}";
    data_world w;
    qlora_text_ids ids = {0};
    qlora_text_bytes bytes = {0};
    qlora_text_stream stream;
    qlora_text_chat_desc chat;
    memset(&w, 0, sizeof(w));
    memset(&stream, 0, sizeof(stream));
    memset(&chat, 0, sizeof(chat));
    qlora_result r = qlora_text_tok_open(lib, path, &w.tok);
    chat.tok = w.tok;
    chat.folder = folder;
    r = r == QLORA_OK ? qlora_text_chat_open(lib, &chat, &w.chat) : r;
    r = r == QLORA_OK ? qlora_text_chat_set_clock(w.chat, 1) : r;
    w.desc.chat = w.chat;
    w.desc.path = "x.jsonl";
    r = r == QLORA_OK ? qlora_text_encode(w.tok, text, strlen(text), QLORA_TEXT_SPECIAL, &ids) : r;
    r = r == QLORA_OK ? qlora_text_decode(w.tok, ids.data, ids.count, QLORA_TEXT_REPLACE, &bytes)
                      : r;
    for (size_t i = 0; r == QLORA_OK && i < ids.count; i++) {
        r = qlora_text_stream_push(w.tok, &stream, ids.data[i], 0, &bytes);
    }
    r = r == QLORA_OK ? qlora_text_stream_end(w.tok, &stream, &bytes) : r;
    r = r == QLORA_OK ? qlora_text_data_load(lib, &w.desc, lines, strlen(lines), &w.data) : r;
    (void)qlora_text_data_close(r == QLORA_OK ? w.data : NULL);
    w.data = NULL;
    char data[100];
    snprintf(data, sizeof data, "%s/data.txt", folder);
    w.desc.path = data;
    r = r == QLORA_OK ? qlora_text_data_open(lib, &w.desc, &w.data) : r;
    char message[QLORA__ERROR_SIZE];
    snprintf(message, sizeof message, "%s", WHY);
    qlora_text_ids_free(lib, &ids);
    qlora_text_bytes_free(lib, &bytes);
    world_close(&w);
    snprintf(lib->env.error, sizeof lib->env.error, "%s", message); // closing cleared it
    return r;
}

static const char* const everything_names[][2] = {
    {"data.txt", "some text"},
    {"config.json", "{\"eos_token_id\":1}"},
    {"generation_config.json", "{\"eos_token_id\":[2,3]}"},
    {"chat_template.jinja", "{% for m in messages %}{{ m.content }}|{% endfor %}"},
    {"tokenizer_config.json", "{\"eos_token\":\"</s>\"}"}};

static bool everything_files(void) {
    bool good = true;
    for (size_t i = 0; i < sizeof(everything_names) / sizeof(everything_names[0]); i++) {
        good = good && folder_write(everything_names[i][0], everything_names[i][1]);
    }
    return good;
}

// Whichever allocation fails, the result is false with a message, and nothing leaks.
TEST every_allocation(const char* name) {
    char path[64];
    snprintf(path, sizeof(path), GOLDEN "%s.json", name);
    ASSERT(everything_files());
    size_t live = alloc_live;
    qlora_result r = QLORA_ERR_MEMORY;
    size_t tried = 0;
    for (; r != QLORA_OK && tried < 100000; tried++) {
        alloc_left = tried;
        r = everything(path, FOLDER);
        bool used_up = alloc_left == 0 || alloc_left == SIZE_MAX;
        alloc_left = SIZE_MAX;
        ASSERT_EQ(live, alloc_live);
        ASSERT_EQ((size_t)0, file_live);
        ASSERTm("it failed without an allocation failing", r == QLORA_OK || used_up);
        ASSERTm(WHY, r == QLORA_OK || (r == QLORA_ERR_MEMORY && strstr(WHY, "memory") != NULL));
    }
    ASSERT(r == QLORA_OK && tried > 50);
    folder_clear();
    PASS();
}

// The same for file calls: opening and reading.
TEST every_file_call(const char* name) {
    char path[64];
    snprintf(path, sizeof(path), GOLDEN "%s.json", name);
    ASSERT(everything_files());
    size_t live = alloc_live;
    qlora_result r = QLORA_ERR_FILE;
    size_t tried = 0;
    for (; r != QLORA_OK && tried < 10000; tried++) {
        file_left = tried;
        r = everything(path, FOLDER);
        bool used_up = file_left == 0 || file_left == SIZE_MAX;
        file_left = SIZE_MAX;
        ASSERT_EQ(live, alloc_live);
        ASSERT_EQ((size_t)0, file_live);
        ASSERTm("it failed without a file call failing", r == QLORA_OK || used_up);
        ASSERTm(WHY, r == QLORA_OK || r == QLORA_ERR_FILE);
        ASSERTm(WHY, r == QLORA_OK || strstr(WHY, "input/output error") != NULL ||
                         strstr(WHY, "no tokenizer found") != NULL);
    }
    ASSERT(r == QLORA_OK && tried > 15);
    folder_clear();
    PASS();
}

TEST nothing_is_left(void) {
    ASSERT_EQ(QLORA_OK, qlora_text_destroy(lib));
    lib = NULL;
    ASSERT_EQ((size_t)0, alloc_live);
    ASSERT_EQ((size_t)0, file_live);
    PASS();
}

SUITE(text_suite) {
    if (!test_wants("cpu")) {
        return;
    }
    if (!lib_open()) {
        printf("text: no memory for the tests\n");
        return;
    }
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
    RUN_TESTp(mini_golden, "text_unigram");
    RUN_TEST(unigram);
    RUN_TEST(unigram_scores);
    RUN_TESTp(shared_golden, "gpt2");
    RUN_TESTp(shared_golden, "llama3_2");
    RUN_TESTp(shared_golden, "qwen2_5");
    RUN_TESTp(shared_golden, "mistral_v1");
    RUN_TESTp(shared_golden, "qwen3");
    RUN_TESTp(shared_golden, "mistral_nemo");
    RUN_TESTp(shared_golden, "deepseek_v3");
    RUN_TESTp(shared_golden, "yi");
    RUN_TESTp(shared_golden, "gemma");
    RUN_TESTp(split_lines, golden_tok, "text_byte", QLORA__TEXT_LINES_AFTER);
    RUN_TESTp(split_lines, golden_tok, "text_spm", QLORA__TEXT_LINES_AFTER);
    RUN_TESTp(split_lines, shared_tok, "gpt2", QLORA__TEXT_LINES_BEFORE);
    RUN_TESTp(split_lines, shared_tok, "qwen3", QLORA__TEXT_LINES_AFTER);
    RUN_TESTp(split_lines, shared_tok, "mistral_nemo", QLORA__TEXT_LINES_AFTER);
    RUN_TESTp(split_lines, shared_tok, "deepseek_v3", QLORA__TEXT_LINES_AFTER);
    RUN_TESTp(split_lines, shared_tok, "gemma", QLORA__TEXT_LINES_AFTER);
    RUN_TESTp(split_lines, shared_tok, "mistral_v1", QLORA__TEXT_LINES_AFTER);
    RUN_TESTp(llama_cpp_vectors, "gpt-2", "gpt2");
    RUN_TESTp(llama_cpp_vectors, "llama-bpe", "llama3_2");
    RUN_TESTp(llama_cpp_vectors, "qwen2", "qwen2_5");
    RUN_TESTp(gguf_vocabulary, "llama-spm");
    RUN_TESTp(gguf_vocabulary, "phi-3");
    RUN_TESTp(gguf_vocabulary, "gpt-2");
    RUN_TESTp(gguf_vocabulary, "llama-bpe");
    RUN_TESTp(gguf_vocabulary, "qwen2");
    RUN_TESTp(gguf_vocabulary, "deepseek-llm");
    RUN_TESTp(gguf_vocabulary, "starcoder");
    RUN_TEST(gguf_hostile_tokenizers);
    RUN_TESTp(gguf_model_tokens, "llama-q8_0");
    RUN_TESTp(gguf_model_tokens, "phi3-longrope-bf16");
    RUN_TESTp(gguf_model_tokens, "llama3-rope-bf16");
    RUN_TESTp(gguf_model_tokens, "qwen2-f16");
    RUN_TESTp(gguf_model_tokens, "qwen3-bf16-00001-of-00002");
    RUN_TESTp(gguf_model_tokens, "gemma3-bf16");
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
    RUN_TEST(stripped_tokens);
    RUN_TEST(equal_added_tokens);
    RUN_TEST(step_characters);
    RUN_TEST(dropped_start);
    RUN_TEST(unknown_characters);
    RUN_TEST(refused_tokenizers);
    RUN_TEST(refused_chains);
    RUN_TEST(bin_format);
    RUN_TEST(records);
    RUN_TEST(end_tokens_are_ids);
    RUN_TEST(ids_without_labels);
    RUN_TEST(records_sentencepiece);
    RUN_TEST(record_options);
    RUN_TEST(bad_data);
    RUN_TEST(text_files);
    RUN_TEST(templates);
    RUN_TEST(stop_ids);
    RUN_TEST(objects);
    RUN_TEST(children_first);
    RUN_TEST(arguments);
    RUN_TEST(clean_messages);
    RUN_TEST(log_items);
    RUN_TESTp(every_allocation, "text_byte");
    RUN_TESTp(every_allocation, "text_spm");
    RUN_TESTp(every_allocation, "text_unigram");
    RUN_TESTp(every_file_call, "text_byte");
    RUN_TESTp(every_file_call, "text_spm");
    RUN_TEST(nothing_is_left);
}
