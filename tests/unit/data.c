// data.c - training data: the forms of a record, what is refused, formats of files, memory.
#include "qlora.h"
#include "qlora_text.h"

#include "test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct rig {
    qlora_text* text;
    qlora_text_tok* tok;
    qlora_text_chat* chat;
    qlora_text_data* data;
    qlora_text_data_desc desc;
    char shown[2048];
} rig;

static size_t memory_now;
static size_t memory_peak;

static void* counting_alloc(size_t bytes, size_t align, void* user) {
    (void)align;
    (void)user;
    memory_now += bytes;
    memory_peak = memory_now > memory_peak ? memory_now : memory_peak;
    return malloc(bytes);
}

static void counting_free(void* pointer, size_t bytes, void* user) {
    (void)user;
    memory_now -= bytes;
    free(pointer);
}

static bool rig_open(rig* r, const char* format) {
    qlora_text_desc text;
    qlora_text_chat_desc chat;
    memset(r, 0, sizeof *r);
    memset(&text, 0, sizeof text);
    memset(&chat, 0, sizeof chat);
    text.allocator.alloc = counting_alloc;
    text.allocator.free = counting_free;
    chat.name = format;
    bool ok = qlora_text_create(&text, &r->text) == QLORA_OK &&
              qlora_text_tok_open(r->text, "tests/golden/text_byte.json", &r->tok) == QLORA_OK;
    chat.tok = r->tok;
    ok = ok && qlora_text_chat_open(r->text, &chat, &r->chat) == QLORA_OK;
    r->desc.chat = r->chat;
    return ok;
}

static void rig_close(rig* r) {
    qlora_text_data_close(r->data);
    qlora_text_chat_close(r->chat);
    qlora_text_tok_close(r->tok);
    qlora_text_destroy(r->text);
}

static bool rig_load(rig* r, const char* path, const char* data) {
    qlora_text_data_close(r->data);
    r->data = NULL;
    r->desc.path = path;
    return qlora_text_data_load(r->text, &r->desc, data, strlen(data), &r->data) == QLORA_OK;
}

// A sample as text, with the trained part in {braces}.
static const char* rig_sample(rig* r, size_t index) {
    qlora_text_sample sample;
    qlora_text_bytes text;
    bool open = false;
    memset(&text, 0, sizeof text);
    if (qlora_text_sample_read(r->data, index, &sample) != QLORA_OK) {
        return "no such sample";
    }
    for (size_t i = 0; i < sample.count; i++) {
        bool trained = sample.labels[i] != -100;
        if (trained != open) {
            qlora_text_bytes_add(r->text, &text, open ? "}" : "{", 1);
            open = trained;
        }
        qlora_text_decode(r->tok, &sample.ids[i], 1, 0, &text);
    }
    snprintf(r->shown, sizeof r->shown, "%.*s%s", (int)text.count,
             text.data != NULL ? text.data : "", open ? "}" : "");
    qlora_text_bytes_free(r->text, &text);
    return r->shown;
}

#define SAID(r) qlora_text_last_error((r).text)
#define ANSWER(extra) "{\"messages\":[{\"role\":\"assistant\",\"content\":\"a\"," extra "}]}"

// Records of well-known data sets, in full.
TEST forms(void) {
    static const char* const rows[][3] = {
        {"plain", "{\"instruction\":\"I\",\"context\":\"C\",\"response\":\"R\"}",
         "<s>I\nC\n{R</s>}"}, // Dolly
        {"plain", "{\"question\":\"Q\",\"context\":\"C\",\"answer\":\"A\"}", "<s>Q\nC\n{A</s>}"},
        {"plain", "{\"question\":\"Q\",\"context\":\"\",\"input\":\"N\",\"answer\":\"A\"}",
         "<s>Q\nN\n{A</s>}"},
        {"plain", "{\"question\":\"Q\",\"response\":\"A\"}", "<s>Q\n{A</s>}"},
        {"plain", "{\"input\":\"Q\",\"output\":\"A\"}", "<s>Q\n{A</s>}"},
        {"plain", "{\"prompt\":\"Q\",\"response\":\"A\"}", "<s>Q{A</s>}"},
        {"plain",
         "{\"system\":\"S\",\"messages\":[{\"role\":\"user\",\"content\":\"u\"},"
         "{\"role\":\"assistant\",\"content\":\"a\"}]}",
         "<s>S\nu\n{a</s>}"},
        {"plain",
         "{\"system\":\"S\",\"prompt\":[{\"role\":\"user\",\"content\":\"u\"}],"
         "\"completion\":[{\"role\":\"assistant\",\"content\":\"a\"}]}",
         "<s>S\nu\n{a</s>}"},
        {"plain", "{\"text\":\"t\",\"messages\":null,\"input\":null}", "<s>{t</s>}"},
        {"plain", ANSWER("\"weight\":0.0"), "<s>a</s>"},
        {"plain", ANSWER("\"weight\":false"), "<s>a</s>"},
        {"plain", ANSWER("\"train\":0"), "<s>a</s>"},
        {"plain", ANSWER("\"train\":false"), "<s>a</s>"},
        {"plain", ANSWER("\"weight\":1.0"), "<s>{a</s>}"},
        {"plain", ANSWER("\"train\":true,\"weight\":null"), "<s>{a</s>}"},
        {"plain", ANSWER("\"tool_calls\":[],\"reasoning_content\":\"\""), "<s>{a</s>}"}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        rig r;
        ASSERT(rig_open(&r, rows[i][0]));
        bool loaded = rig_load(&r, "x.jsonl", rows[i][1]);
        ASSERTm(SAID(r), loaded);
        ASSERT_STR_EQm(rows[i][1], rows[i][2], rig_sample(&r, 0));
        rig_close(&r);
    }
    PASS();
}

// What would be trained wrongly is refused, with its line and its name.
TEST refused(void) {
    static const char* const rows[][2] = {
        {ANSWER("\"weight\":0.5"),
         "x.jsonl:1: \"messages\": message 1 has the \"weight\" 0.5; only"},
        {ANSWER("\"weight\":\"no\""), "message 1 has a \"weight\" that is neither a number"},
        {ANSWER("\"train\":2"), "message 1 has the \"train\" 2; only"},
        {ANSWER("\"reasoning_content\":\"hm\""),
         "has \"reasoning_content\", which is not supported"},
        {ANSWER("\"tool_calls\":[1]"), "has \"tool_calls\", which is not supported"},
        {ANSWER("\"train_detail\":[{}]"), "has \"train_detail\", which is not supported"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"value\":\"v\"}]}]}",
         "message 1 has a content part without a string in \"text\""},
        {"{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image\",\"text\":\"v\"}]}]}",
         "has a content part of the type \"image\"; only \"text\""},
        {"{\"instruction\":5,\"output\":\"o\"}", "x.jsonl:1: \"instruction\" is not a string"},
        {"{\"instruction\":\"i\",\"input\":[],\"output\":\"o\"}", "\"input\" is not a string"},
        {"{\"instruction\":\"i\",\"context\":1,\"response\":\"o\"}", "\"context\" is not a string"},
        {"{\"instruction\":\"i\",\"output\":\"o\",\"system\":5}", "\"system\" is not a string"},
        {"{\"messages\":[],\"system\":5}", "\"system\" is not a string"},
        {"{\"prompt\":\"p\",\"completion\":\"c\",\"system\":\"s\"}", "\"system\" cannot be used"},
        {"{\"system\":\"s\",\"messages\":[{\"role\":\"system\",\"content\":\"t\"}]}",
         "\"system\" is given beside a system message"},
        {"{\"instruction\":\"i\",\"input\":\"n\",\"context\":\"c\",\"output\":\"o\"}",
         "both \"input\" and \"context\""},
        {"{\"text\":\"t\",\"messages\":[]}", "both \"messages\" and \"text\"; set the format"},
        {"{\"instruction\":\"i\",\"output\":\"o\",\"text\":\"t\"}", "both \"output\" and \"text\""},
        {"{\"instruction\":\"i\",\"output\":\"o\",\"response\":\"r\"}",
         "both \"output\" and \"response\""},
        {"{\"text\":3}", "\"text\" is not a string"},
        {"{\"prompt\":null,\"completion\":\"c\"}", "found prompt (null), completion"},
        {"{\"input_ids\":[1,2,3],\"attention_mask\":[1,0,1]}",
         "\"attention_mask\": element 1 is 0"},
        {"{\"input_ids\":[1,2,3],\"attention_mask\":[1,1]}", "\"attention_mask\" has 2 elements"},
        {"{\"input_ids\":[1,2],\"labels\":[1,2],\"attention_mask\":[1,0]}",
         "element 1 is 0, but its label is not -100"},
        {"{\"input_ids\":[1,2],\"position_ids\":[0,0]}", "\"position_ids\": element 1 is 0"},
        {"{\"input_ids\":[1,2],\"completion_mask\":[0,1]}", "\"completion_mask\" is not supported"},
        {"{\"text\":\"a\"\n{\"text\":\"b\"}\n", "x.jsonl:1:12: invalid JSON"},
        {"\n{\"text\":\"a", "x.jsonl:2:11: invalid JSON"}};
    rig r;
    ASSERT(rig_open(&r, "plain"));
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        ASSERT_FALSEm(rows[i][0], rig_load(&r, "x.jsonl", rows[i][0]));
        ASSERTm(SAID(r), strstr(SAID(r), rows[i][1]) != NULL);
    }
    rig_close(&r);
    PASS();
}

TEST padding(void) {
    rig r;
    qlora_text_sample sample;
    ASSERT(rig_open(&r, "plain"));
    ASSERT(rig_load(&r, "x.jsonl",
                    "{\"input_ids\":[0,5,6,7,0],\"attention_mask\":[0,1,1,1,0]}\n"
                    "{\"input_ids\":[5,6],\"labels\":[-100,6],\"attention_mask\":[1,1],"
                    "\"position_ids\":[0,1]}"));
    ASSERT_EQ(QLORA_OK, qlora_text_sample_read(r.data, 0, &sample));
    ASSERT_EQ((size_t)3, sample.count);
    ASSERT_EQ(5, sample.ids[0]);
    ASSERT_EQ(7, sample.labels[2]);
    ASSERT_EQ((size_t)2, sample.trained);
    ASSERT_EQ(QLORA_OK, qlora_text_sample_read(r.data, 1, &sample));
    ASSERT_EQ((size_t)2, sample.count);
    ASSERT_EQ(6, sample.ids[1]);
    rig_close(&r);
    PASS();
}

// Each name that had no effect is listed once; empty values and null are not.
TEST ignored_names(void) {
    rig r;
    qlora_text_data_info info;
    ASSERT(rig_open(&r, "plain"));
    ASSERT(rig_load(&r, "x.jsonl",
                    "{\"text\":\"a\",\"id\":1,\"source\":\"s\",\"none\":null,\"empty\":\"\"}\n"
                    "{\"text\":\"b\",\"id\":2}\n"
                    "{\"messages\":[{\"role\":\"user\",\"content\":\"c\",\"name\":\"n\"}]}\n"));
    ASSERT_EQ(QLORA_OK, qlora_text_data_query(r.data, &info));
    ASSERT_STR_EQ("id, source, messages/name", info.ignored);
    ASSERT_EQ((size_t)3, info.count);
    ASSERT(rig_load(&r, "x.jsonl", "{\"question\":\"q\",\"answer\":\"a\",\"context\":\"c\"}"));
    ASSERT_EQ(QLORA_OK, qlora_text_data_query(r.data, &info));
    ASSERT_STR_EQ("", info.ignored);
    rig_close(&r);
    PASS();
}

TEST file_formats(void) {
    static const struct {
        const char* path;
        const char* format; // or NULL
        const char* data;
        const char* want; // the first sample, or a part of the message
    } rows[] = {
        {"X.JSONL", NULL, "{\"text\":\"a\"}", "<s>{a</s>}"},
        {"x.Txt", NULL, "a", "<s>{a</s>}"},
        {"x.JSON", NULL, "[{\"text\":\"a\"}]", "<s>{a</s>}"},
        {"-", NULL, "{\"text\":\"a\"}", "<s>{a</s>}"},
        {"-", NULL, "[{\"text\":\"a\"}]", "<s>{a</s>}"},
        {"-", "txt", "{", "<s>{{</s>}"},
        {"-", NULL, "{", "standard input:1:2: invalid JSON"},
        {"x.data", "jsonl", "{\"text\":\"a\"}", "<s>{a</s>}"},
        {"x.txt", "text", "{\"text\":\"a\"}", "<s>{a</s>}"},
        {"x.json", NULL, "{\"version\":1,\"data\":[{\"text\":\"a\"},\n{\"text\":\"b\"}]}",
         "<s>{a</s>}"},
        {"x.json", NULL, "{\"data\":[{\"text\":\"a\"},\n\n{\"txt\":\"b\"}]}", "x.json:3: unrecog"},
        {"x.json", "text", "{\"text\":\"a\",\"messages\":[]}", "<s>{a</s>}"},
        {"x.json", "instruction",
         "{\"instruction\":\"i\",\"input\":\"n\",\"output\":\"o\",\"text\":\"t\"}",
         "<s>i\nn\n{o</s>}"},
        {"x.json", "messages", "{\"text\":\"a\"}", "does not have the format \"messages\""},
        {"x.json", "csv", "a", "unknown data format \"csv\"; use one of jsonl, "},
        {"x.csv", NULL, "a", "must end in .jsonl, .json or .txt, or the format must be given"}};
    rig r;
    ASSERT(rig_open(&r, "plain"));
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        r.desc.format = rows[i].format;
        bool loaded = rig_load(&r, rows[i].path, rows[i].data);
        const char* got = loaded ? rig_sample(&r, 0) : SAID(r);
        ASSERTm(got, strstr(got, rows[i].want) != NULL);
        ASSERTm(got, loaded == (rows[i].want[0] == '<'));
    }
    size_t count = 0;
    while (qlora_text_data_formats(count) != NULL) {
        count++;
    }
    ASSERT_EQ((size_t)12, count);
    ASSERT_STR_EQ("input", qlora_text_data_formats(11));
    rig_close(&r);
    PASS();
}

// A plain text must not need much more than its ids and labels, 8 bytes per token.
TEST text_memory(void) {
    const size_t size = 3000000;
    rig r;
    char* data = (char*)malloc(size + 1);
    ASSERT(data != NULL && rig_open(&r, "plain"));
    for (size_t i = 0; i < size; i++) {
        data[i] = (i * 2654435761u >> 7) % 6 == 0 ? ' ' : (char)('a' + (i * 40503u >> 5) % 26);
    }
    data[size] = '\0';
    r.desc.chunk_tokens = 64;
    size_t before = memory_now;
    memory_peak = memory_now;
    ASSERTm(SAID(r), rig_load(&r, "x.txt", data));
    size_t tokens = 0;
    for (size_t i = 0; i < qlora_text_data_count(r.data); i++) {
        qlora_text_sample sample;
        ASSERT_EQ(QLORA_OK, qlora_text_sample_read(r.data, i, &sample));
        tokens += sample.count;
    }
    double per_token = (double)(memory_peak - before) / (double)tokens;
    ASSERT_IN_RANGEm("peak bytes per token", 11.0, per_token, 3.0);
    free(data);
    rig_close(&r);
    ASSERT_EQ((size_t)0, memory_now);
    PASS();
}

// A long text is split in windows of 64 KiB. Of a text that repeats, the ids repeat as well,
// wherever a window ends.
TEST windows(void) {
    static const char unit[] = "the world  \n\n   and 12 people's \xC3\xA9t\xC3\xA9 ,\n";
    const size_t length = sizeof unit - 1;
    const size_t repeats = 9000;
    rig r;
    qlora_text_ids ids[3];
    memset(ids, 0, sizeof ids);
    char* text = (char*)malloc(length * repeats);
    ASSERT(text != NULL && rig_open(&r, "plain"));
    for (size_t i = 0; i < repeats; i++) {
        memcpy(text + i * length, unit, length);
    }
    const size_t parts[3] = {10, 11, repeats};
    for (int i = 0; i < 3; i++) {
        ASSERT_EQ(QLORA_OK, qlora_text_encode(r.tok, text, parts[i] * length, 0, &ids[i]));
    }
    size_t period = ids[1].count - ids[0].count;
    ASSERT_EQ(ids[0].count + (repeats - 10) * period, ids[2].count);
    for (size_t i = period; i + period < ids[2].count; i++) {
        ASSERT_EQ(ids[2].data[i], ids[2].data[i + period]);
    }
    for (int i = 0; i < 3; i++) {
        qlora_text_ids_free(r.text, &ids[i]);
    }
    free(text);
    rig_close(&r);
    PASS();
}

SUITE(data_suite) {
    RUN_TEST(forms);
    RUN_TEST(refused);
    RUN_TEST(padding);
    RUN_TEST(ignored_names);
    RUN_TEST(file_formats);
    RUN_TEST(text_memory);
    RUN_TEST(windows);
}
