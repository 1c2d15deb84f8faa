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

// Files in memory: one, whatever its name is.
typedef struct memory_file {
    const char* data;
    size_t size;
    size_t at;
    int open;
    int maps;
    bool piped;
} memory_file;

static int memory_open(const char* path, qlora_file_mode mode, void** file, void* user) {
    memory_file* m = (memory_file*)user;
    (void)path;
    if (m->data == NULL || mode != QLORA_FILE_READ) {
        return 2; // ENOENT
    }
    m->at = 0;
    m->open++;
    *file = m;
    return 0;
}

static int64_t memory_read(void* file, void* buffer, size_t bytes, void* user) {
    memory_file* m = (memory_file*)file;
    size_t size = m->size - m->at < bytes ? m->size - m->at : bytes;
    (void)user;
    size = size > 5000 ? 5000 : size; // as a pipe does
    memcpy(buffer, m->data + m->at, size);
    m->at += size;
    return (int64_t)size;
}

static int64_t memory_read_at(void* file, void* buffer, size_t bytes, uint64_t offset, void* user) {
    memory_file* m = (memory_file*)file;
    size_t at = offset < m->size ? (size_t)offset : m->size;
    size_t size = m->size - at < bytes ? m->size - at : bytes;
    (void)user;
    size = size > 5000 ? 5000 : size;
    memcpy(buffer, m->data + at, size);
    return m->piped ? -29 : (int64_t)size; // ESPIPE
}

static int memory_close(void* file, void* user) {
    (void)user;
    ((memory_file*)file)->open--;
    return 0;
}

static int memory_map(const char* path, const void** data, uint64_t* bytes, void** handle,
                      void* user) {
    memory_file* m = (memory_file*)user;
    (void)path;
    *data = m->data;
    *bytes = m->size;
    *handle = NULL;
    m->maps++;
    return 0;
}

static void memory_unmap(const void* data, uint64_t bytes, void* handle, void* user) {
    (void)data;
    (void)bytes;
    (void)handle;
    ((memory_file*)user)->maps--;
}

static int64_t no_write(void* file, const void* data, size_t bytes, void* user) {
    (void)file;
    (void)data;
    (void)bytes;
    (void)user;
    return -1;
}

static int no_file(void* file, void* user) {
    (void)file;
    (void)user;
    return 1;
}

static int no_path(const char* path, void* user) {
    (void)path;
    (void)user;
    return 1;
}

static int no_rename(const char* from, const char* to, void* user) {
    (void)from;
    (void)to;
    (void)user;
    return 1;
}

static bool rig_open_files(rig* r, const char* format, memory_file* file) {
    qlora_text_desc text;
    qlora_text_chat_desc chat;
    memset(r, 0, sizeof *r);
    memset(&text, 0, sizeof text);
    memset(&chat, 0, sizeof chat);
    if (file != NULL) {
        qlora_files files = {memory_open, memory_read,  memory_read_at, no_write,
                             no_file,     memory_close, no_rename,      no_path,
                             no_path,     no_path,      memory_map,     memory_unmap,
                             NULL};
        text.files = files;
        text.files.user = file;
    }
    text.allocator.alloc = counting_alloc;
    text.allocator.free = counting_free;
    chat.name = format;
    bool ok = qlora_text_create(&text, &r->text) == QLORA_OK;
    FILE* tokens = fopen("tests/golden/text_byte.json", "rb");
    char* json = (char*)malloc(1 << 20);
    size_t size = tokens != NULL && json != NULL ? fread(json, 1, 1 << 20, tokens) : 0;
    ok = ok && qlora_text_tok_load(r->text, "text_byte.json", json, size, &r->tok) == QLORA_OK;
    if (tokens != NULL) {
        fclose(tokens);
    }
    free(json);
    chat.tok = r->tok;
    ok = ok && qlora_text_chat_open(r->text, &chat, &r->chat) == QLORA_OK;
    r->desc.chat = r->chat;
    return ok;
}

static bool rig_open(rig* r, const char* format) {
    return rig_open_files(r, format, NULL);
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
        {"plain",
         "{\"conversations\":[{\"from\":\"input\",\"value\":\"u\"},{\"from\":\"bing\",\"value\":"
         "\"a\"},"
         "{\"from\":\"human\",\"value\":\"v\"},{\"from\":\"output\",\"value\":\"b\"}]}",
         "<s>u\n{a</s>}\nv\n{b</s>}"},
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

#define TALK(more)                                                                                 \
    "{\"messages\":[{\"role\":\"user\",\"content\":\"u\"},{\"role\":\"assistant\",\"content\":"    \
    "\"a\"},{\"role\":\"user\",\"content\":\"v\"}" more "]}"

// Prompts: a record without its answer, which is the reference. Columns: how a prompt that is a
// string is meant, the record, the prompt, the reference ("-" if there is none).
TEST asked(void) {
    static const struct {
        qlora_text_prompts how;
        const char* record;
        const char* want;
        const char* reference;
    } rows[] = {
        {QLORA_TEXT_ASK, "{\"prompt\":\"p\"}", "<s>p", "-"},
        {QLORA_TEXT_ASK, "{\"prompt\":\"p\",\"completion\":\"c\"}", "<s>p", "c"},
        {QLORA_TEXT_ASK, "{\"prompt\":\"\",\"response\":\"\"}", "<s>", ""},
        {QLORA_TEXT_ASK_CHAT, "{\"prompt\":\"p\",\"completion\":\"c\"}", "<s>p\n", "c"},
        {QLORA_TEXT_ASK_CHAT, "{\"prompt\":\"p\"}", "<s>p\n", "-"},
        {QLORA_TEXT_ASK, "{\"question\":\"q\",\"answer\":\"a\"}", "<s>q\n", "a"},
        {QLORA_TEXT_ASK, "{\"question\":\"q\",\"context\":\"c\"}", "<s>q\nc\n", "-"},
        {QLORA_TEXT_ASK, "{\"instruction\":\"i\",\"input\":\"n\",\"output\":\"o\"}", "<s>i\nn\n",
         "o"},
        {QLORA_TEXT_ASK, "{\"instruction\":\"i\",\"input\":\"n\"}", "<s>i\nn\n", "-"},
        {QLORA_TEXT_ASK, "{\"prompt\":\"p\",\"chosen\":\"c\",\"rejected\":\"r\"}", "<s>p", "c"},
        {QLORA_TEXT_ASK, "{\"prompt\":\"p\",\"completion\":\"c\",\"label\":false}", "<s>p", "-"},
        {QLORA_TEXT_ASK, "{\"prompt\":\"p\",\"completion\":\"c\",\"label\":true}", "<s>p", "c"},
        {QLORA_TEXT_ASK, "{\"prompt\":[{\"role\":\"user\",\"content\":\"u\"}]}", "<s>u\n", "-"},
        {QLORA_TEXT_ASK, TALK(",{\"role\":\"assistant\",\"content\":\"secret\"}"),
         "<s>u\na</s>\nv\n", "secret"},
        {QLORA_TEXT_ASK, TALK(""), "<s>u\na</s>\nv\n", "-"},
        {QLORA_TEXT_ASK,
         "{\"conversations\":[{\"from\":\"human\",\"value\":\"u\"},{\"from\":\"gpt\",\"value\":[{"
         "\"type\":\"text\",\"text\":\"two \"},{\"type\":\"text\",\"text\":\"parts\"}]}]}",
         "<s>u\n", "two parts"},
        {QLORA_TEXT_ASK, "!{\"text\":\"t\"}", "expected prompt, messages,", ""},
        {QLORA_TEXT_ASK, "!{\"input_ids\":[1]}", "found input_ids", ""},
        {QLORA_TEXT_ASK, "!{\"prompt\":\"p\",\"question\":\"q\"}",
         "both \"prompt\" and \"question\"", ""},
        {QLORA_TEXT_ASK, "!" ANSWER("\"n\":1"), "has an answer, but nothing before it", ""},
        {QLORA_TEXT_ASK, "!{\"prompt\":3}", "\"prompt\" is neither a string nor a list", ""}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        rig r;
        bool wrong = rows[i].record[0] == '!';
        ASSERT(rig_open(&r, "plain"));
        r.desc.prompts = rows[i].how;
        r.desc.stream = true; // has no effect
        bool loaded = rig_load(&r, "x.jsonl", rows[i].record + (wrong ? 1 : 0));
        if (wrong) {
            ASSERTm(rows[i].record, !loaded && strstr(SAID(r), rows[i].want) != NULL);
        } else {
            qlora_text_sample s;
            ASSERTm(SAID(r), loaded);
            ASSERT_STR_EQm(rows[i].record, rows[i].want, rig_sample(&r, 0));
            ASSERT_EQ(QLORA_OK, qlora_text_sample_read(r.data, 0, &s));
            const char* want = rows[i].reference;
            size_t size = strlen(want);
            bool none = strcmp(want, "-") == 0;
            ASSERT_EQm(rows[i].record, none, s.reference == NULL);
            ASSERTm(rows[i].record,
                    none || (s.reference_size == size && memcmp(s.reference, want, size) == 0));
            size_t length = strlen(rows[i].want);
            ASSERT_EQm(rows[i].record, rows[i].want[length - 1] == '\n', s.chat);
        }
        rig_close(&r);
    }
    PASS();
}

// A system message for conversations that have none.
TEST asked_system(void) {
    rig r;
    ASSERT(rig_open(&r, "plain"));
    r.desc.prompts = QLORA_TEXT_ASK;
    r.desc.system = "S";
    ASSERTm(SAID(r), rig_load(&r, "x.jsonl", "{\"question\":\"q\"}\n" TALK("")));
    ASSERT_STR_EQ("<s>S\nq\n", rig_sample(&r, 0));
    ASSERT_STR_EQ("<s>S\nu\na</s>\nv\n", rig_sample(&r, 1));
    ASSERT(!rig_load(&r, "x.jsonl", "{\"question\":\"q\",\"system\":\"T\"}"));
    ASSERTm(SAID(r), strstr(SAID(r), "the record has a \"system\", and desc.system") != NULL);
    ASSERT(!rig_load(&r, "x.jsonl", "{\"prompt\":\"p\"}"));
    ASSERTm(SAID(r), strstr(SAID(r), "x.jsonl:1: desc.system cannot be used with a \"prompt\" that "
                                     "is a string; use desc.prompts ASK_CHAT, or messages"));
    ASSERT(!rig_load(&r, "x.jsonl", "{\"messages\":[{\"role\":\"system\",\"content\":\"T\"},"
                                    "{\"role\":\"user\",\"content\":\"u\"}]}"));
    ASSERTm(SAID(r), strstr(SAID(r), "desc.system is given beside a system message in \"mess"));
    r.desc.system = NULL;
    ASSERT(!rig_load(&r, "x.jsonl", "{\"prompt\":\"p\",\"system\":\"T\"}"));
    ASSERTm(SAID(r), strstr(SAID(r), "1: \"system\" cannot be used with a \"prompt\" that is a "
                                     "string; use messages"));
    r.desc.system = "S";
    ASSERT(!rig_load(&r, "x.txt", "p"));
    ASSERTm(SAID(r), strstr(SAID(r), "plain text, which has no prompts") != NULL);
    r.desc.preference = QLORA_TEXT_PAIRS;
    ASSERT(!rig_load(&r, "x.jsonl", "{\"question\":\"q\"}"));
    ASSERTm(SAID(r), strstr(SAID(r), "cannot be used together") != NULL);
    rig_close(&r);
    PASS();
}

// Regular expressions: the first match from a place on, and the group to keep in it.
TEST patterns(void) {
    static const struct {
        const char* pattern;
        const char* text;
        const char* want; // whole|group; "-": none; "!": part of the error
    } rows[] = {{"\\d+", "a 12 b", "12|12"},
                {"#### (-?[\\d,.]+)", "x #### -1,000", "#### -1,000|-1,000"},
                {"(a)|b", "xb", "b|b"},
                {"(?:(a)x|ab)", "ab", "ab|ab"},
                {"(a+)(b)", "caab", "aab|aa"},
                {"(?:(\\w),?)+", "a,b", "a,b|b"},
                {"x(y)?z", "xz", "xz|xz"},
                {"x*", "aa", "-"},
                {"\xC3\xA9(.)", "a\xC3\xA9\xE2\x82\xAC", "\xC3\xA9\xE2\x82\xAC|\xE2\x82\xAC"},
                {"(", "", "!an unmatched '('"},
                {"(?>(a))", "", "!the group to keep inside"},
                {"(a)++", "", "!a possessive repetition of the group to keep"}};
    rig r;
    ASSERT(rig_open(&r, "plain"));
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        qlora_text_pattern* p = NULL;
        qlora_text_match m;
        char got[64] = "-";
        const char* text = rows[i].text;
        qlora_result result =
            qlora_text_pattern_compile(r.text, rows[i].pattern, strlen(rows[i].pattern), &p);
        if (rows[i].want[0] == '!') {
            ASSERTm(SAID(r), result != QLORA_OK && strstr(SAID(r), rows[i].want + 1) != NULL);
            continue;
        }
        ASSERT_EQm(SAID(r), QLORA_OK, result);
        ASSERT_EQ(QLORA_OK, qlora_text_pattern_find(p, text, strlen(text), 0, &m));
        if (m.found) {
            snprintf(got, sizeof got, "%.*s|%.*s", (int)(m.whole.end - m.whole.begin),
                     text + m.whole.begin, (int)(m.group.end - m.group.begin),
                     text + m.group.begin);
        }
        ASSERT_STR_EQm(rows[i].pattern, rows[i].want, got);
        if (m.found) {
            ASSERT_EQ(QLORA_OK, qlora_text_pattern_find(p, text, strlen(text), m.whole.end, &m));
            ASSERTm(rows[i].pattern, !m.found);
        }
        ASSERT_EQ(QLORA_ERR_STATE, qlora_text_destroy(r.text));
        qlora_text_pattern_close(p);
    }
    rig_close(&r);
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
        {"{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":5,\"text\":\"v\"}]}]}",
         "message 1 has a content part of the type \"(not a string)\"; only \"text\""},
        {ANSWER("\"from\":\"human\""), "message 1 has both \"role\" and \"from\""},
        {ANSWER("\"value\":\"b\""), "message 1 has both \"content\" and \"value\""},
        {"{\"messages\":[{\"role\":\"user\\u0000x\",\"content\":\"c\"}]}",
         "message 1 has the role \"user\", which is not supported"},
        {"{\"system\":\"s\",\"prompt\":[{\"role\":\"system\",\"content\":\"t\"}],\"completion\":"
         "[]}",
         "\"system\" is given beside a system message in \"prompt\""},
        {"{\"instruction\":5,\"output\":\"o\"}", "x.jsonl:1: \"instruction\" is not a string"},
        {"{\"instruction\":\"i\",\"input\":[],\"output\":\"o\"}", "\"input\" is not a string"},
        {"{\"instruction\":\"i\",\"context\":1,\"response\":\"o\"}", "\"context\" is not a string"},
        {"{\"instruction\":\"i\",\"output\":\"o\",\"system\":5}", "\"system\" is not a string"},
        {"{\"messages\":[],\"system\":5}", "\"system\" is not a string"},
        {"{\"conversations\":[],\"system\":5}", "x.jsonl:1: \"system\" is not a string"},
        {"{\"prompt\":\"p\",\"completion\":\"c\",\"system\":5}", "\"system\" is not a string"},
        {"{\"prompt\":[],\"completion\":[],\"system\":[]}", "\"system\" is not a string"},
        {"{\"question\":\"q\",\"answer\":\"a\",\"system\":5}", "\"system\" is not a string"},
        {"{\"input\":\"q\",\"output\":\"a\",\"system\":{}}", "\"system\" is not a string"},
        {"\n{\"text\":\"t\",\"system\":5}", "x.jsonl:2: \"system\" is not a string"},
        {"{\"text\":\"t\",\"system\":false}", "x.jsonl:1: \"system\" is not a string"},
        {"{\"input_ids\":[1,2],\"system\":5}", "x.jsonl:1: \"system\" is not a string"},
        {"{\"instruction\":\"i\",\"output\":5}", "x.jsonl:1: \"output\" is not a string"},
        {"{\"instruction\":\"i\",\"response\":[]}", "\"response\" is not a string"},
        {"{\"question\":5,\"answer\":\"a\"}", "\"question\" is not a string"},
        {"{\"question\":\"q\",\"answer\":true}", "\"answer\" is not a string"},
        {"{\"question\":\"q\",\"response\":{}}", "\"response\" is not a string"},
        {"{\"input\":5,\"output\":\"a\"}", "\"input\" is not a string"},
        {"{\"prompt\":\"p\",\"response\":5}", "\"prompt\" and \"response\" must be two strings"},
        {"{\"conversations\":\"c\"}", "\"conversations\" is not a list"},
        {"{\"instruction\":\"i\",\"output\":\"o\",\"history\":5}", "\"history\" is not a list of"},
        {"{\"instruction\":\"i\",\"output\":\"o\",\"history\":[[\"u\",5]]}",
         "\"history\" is not a list of [user, assistant]"},
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
        {"{\"prompt\":\"p\",\"chosen\":\"c\",\"rejected\":\"r\"}",
         "x.jsonl:1: the record is a preference pair (\"chosen\" and \"rejected\"), and"},
        {"{\"chosen\":[],\"rejected\":[]}", "the record is a preference pair"},
        {"{\"prompt\":\"p\",\"completion\":\"c\",\"label\":false}",
         "the record is a judged answer (\"label\" is true or false), and"},
        {"{\"conversations\":[{\"from\":\"function_call\",\"value\":\"{}\"}]}",
         "message 1 has the role \"function_call\", a tool call as plain text"},
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

// Pairs and judged answers, read as such. The kind is a qlora_text_preference.
TEST preferences(void) {
    static const struct {
        const char* chat;
        qlora_text_preference kind;
        const char* record;
        const char* first; // a sample, or a part of the message
        const char* second;
    } rows[] = {{"plain", QLORA_TEXT_PAIRS,
                 "{\"prompt\":\"p\",\"chosen\":\"c\",\"rejected\":\"r\"}", "<s>p{c</s>}",
                 "<s>p{r</s>}"},
                {"plain", QLORA_TEXT_PAIRS,
                 "{\"prompt\":[{\"role\":\"user\",\"content\":\"p\"}],"
                 "\"chosen\":[{\"role\":\"assistant\",\"content\":\"c\"}],"
                 "\"rejected\":[{\"role\":\"assistant\",\"content\":\"r\"}]}",
                 "<s>p\n{c</s>}", "<s>p\n{r</s>}"},
                {"plain", QLORA_TEXT_PAIRS,
                 "{\"chosen\":[{\"role\":\"user\",\"content\":\"p\"},"
                 "{\"role\":\"assistant\",\"content\":\"c\"}],"
                 "\"rejected\":[{\"role\":\"user\",\"content\":\"p\"},"
                 "{\"role\":\"assistant\",\"content\":\"r\"}]}",
                 "<s>p\n{c</s>}", "<s>p\n{r</s>}"},
                {"plain", QLORA_TEXT_JUDGED,
                 "{\"prompt\":\"p\",\"completion\":\"c\",\"label\":true}\n"
                 "{\"prompt\":\"p\",\"completion\":\"d\",\"label\":false}",
                 "<s>p{c</s>}", "<s>p{d</s>}"},
                {"plain", QLORA_TEXT_PAIRS, "{\"chosen\":\"c\",\"rejected\":\"r\"}",
                 "x.jsonl:1: \"prompt\" and \"chosen\" must be two strings", NULL},
                {"plain", QLORA_TEXT_PAIRS, "{\"prompt\":\"p\",\"chosen\":\"c\",\"rejected\":[]}",
                 "\"prompt\" and \"rejected\" must be", NULL},
                {"plain", QLORA_TEXT_PAIRS,
                 "{\"prompt\":\"p\",\"chosen\":\"c\",\"rejected\":\"r\",\"system\":5}",
                 "x.jsonl:1: \"system\" is not a string", NULL},
                {"plain", QLORA_TEXT_PAIRS, "{\"text\":\"t\"}", "the record is not a pair", NULL},
                {"plain", QLORA_TEXT_JUDGED, "{\"text\":\"t\",\"label\":true}",
                 "not a judged answer", NULL},
                {"plain", QLORA_TEXT_JUDGED, "{\"prompt\":\"p\",\"completion\":\"c\",\"label\":1}",
                 "not a judged answer", NULL}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        rig r;
        ASSERT(rig_open(&r, rows[i].chat));
        r.desc.preference = rows[i].kind;
        bool loaded = rig_load(&r, "x.jsonl", rows[i].record);
        if (rows[i].second == NULL) {
            ASSERT_FALSEm(rows[i].record, loaded);
            ASSERTm(SAID(r), strstr(SAID(r), rows[i].first) != NULL);
            rig_close(&r);
            continue;
        }
        ASSERTm(SAID(r), loaded);
        ASSERT_EQ((size_t)2, qlora_text_data_count(r.data));
        for (size_t k = 0; k < 2; k++) {
            qlora_text_sample sample;
            ASSERT_STR_EQm(rows[i].record, k == 0 ? rows[i].first : rows[i].second,
                           rig_sample(&r, k));
            ASSERT_EQ(QLORA_OK, qlora_text_sample_read(r.data, k, &sample));
            ASSERT_EQ(k == 0, sample.desirable);
        }
        rig_close(&r);
    }
    rig r;
    ASSERT(rig_open(&r, "plain"));
    r.desc.preference = QLORA_TEXT_PAIRS;
    ASSERT_FALSE(rig_load(&r, "x.txt", "text"));
    ASSERTm(SAID(r), strstr(SAID(r), "plain text") != NULL);
    r.desc.preference = (qlora_text_preference)3;
    ASSERT_FALSE(rig_load(&r, "x.jsonl", "{}"));
    ASSERTm(SAID(r), strstr(SAID(r), "preference is 3") != NULL);
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
                    "{\"text\":\"b\",\"id\":2,\"system\":\"y\"}\n"
                    "{\"messages\":[{\"role\":\"user\",\"content\":\"c\",\"name\":\"n\"}]}\n"));
    ASSERT_EQ(QLORA_OK, qlora_text_data_query(r.data, &info));
    ASSERT_STR_EQ("id, source, system, messages/name", info.ignored);
    ASSERT_EQ((size_t)3, info.count);
    ASSERT(info.chat);
    ASSERT(rig_load(&r, "x.jsonl", "{\"question\":\"q\",\"answer\":\"a\",\"context\":\"c\"}"));
    ASSERT_EQ(QLORA_OK, qlora_text_data_query(r.data, &info));
    ASSERT_STR_EQ("", info.ignored);
    ASSERT(rig_load(&r, "x.jsonl",
                    "{\"text\":\"a\"}\n{\"prompt\":\"b\",\"completion\":\"c\"}\n"));
    ASSERT_EQ(QLORA_OK, qlora_text_data_query(r.data, &info));
    ASSERT(!info.chat);
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
        {"x.json", "prompt", "{\"prompt\":\"p\",\"completion\":\"c\",\"label\":true}",
         "<s>p{c</s>}"},
        {"x.json", "messages", "{\"text\":\"a\"}", "does not have the format \"messages\""},
        {"x.json", "xls", "a", "unknown data format \"xls\"; use one of jsonl, "},
        {"x.xls", NULL, "a", "must end in one of .jsonl, .ndjson, .json, .txt, .csv, .tsv"},
        {"x.CSV", NULL, "text\na", "<s>{a</s>}"},
        {"x.Tsv", NULL, "question\tanswer\nq\ta", "<s>q\n{a</s>}"},
        {"x.json", "csv", "text\na", "<s>{a</s>}"},
        {"x.csv", "question", "question,answer,text\nq,a,t", "<s>q\n{a</s>}"}};
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
    ASSERT_EQ((size_t)16, count);
    ASSERT_STR_EQ("input", qlora_text_data_formats(15));
    rig_close(&r);
    PASS();
}

// A plain text must not need much more than its ids, twice, and a bit per token.
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

// RFC 4180: quotes, line ends inside them, doubled quotes, a byte order mark, CRLF.
TEST csv(void) {
    static const struct {
        const char* path;
        const char* data;
        const char* want[3]; // the samples
        size_t lines[3];
    } rows[] = {
        {"x.csv", "question,answer\nq,a\nr,b\n", {"<s>q\n{a</s>}", "<s>r\n{b</s>}"}, {2, 3}},
        {"x.csv", "\xEF\xBB\xBFquestion,answer\r\nq,a\r\n", {"<s>q\n{a</s>}"}, {2}},
        {"x.csv",
         "answer,question\n\"a \"\"b\"\",\nc\",q\n\n\r\nb,\"\"\n",
         {"<s>q\n{a \"b\",\nc</s>}", "<s>\n{b</s>}"},
         {2, 6}},
        {"x.csv", "\"text\"\n\"a\"\n\"\"\nb\"c", {"<s>{a</s>}", "", "<s>{b\"c</s>}"}, {2, 3, 4}},
        {"x.csv", "text\ra\rb", {"<s>{a</s>}", "<s>{b</s>}"}, {2, 3}},
        {"x.csv", "text\r\n\"a\r\nb\"\r\nc", {"<s>{a\r\nb</s>}", "<s>{c</s>}"}, {2, 4}},
        {"x.csv", ",text\n0,NA\n1,null", {"<s>{NA</s>}", "<s>{null</s>}"}, {2, 3}},
        {"x.tsv", "prompt\tcompletion\n\"a\tb\"\tc, d\n", {"<s>a\tb{c, d</s>}"}, {2}}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        rig r;
        qlora_text_sample sample;
        ASSERT(rig_open(&r, "plain"));
        ASSERTm(SAID(r), rig_load(&r, rows[i].path, rows[i].data));
        size_t count = 0;
        for (; count < 3 && rows[i].want[count] != NULL; count++) {
            ASSERT_STR_EQm(rows[i].data, rows[i].want[count], rig_sample(&r, count));
            ASSERT_EQ(QLORA_OK, qlora_text_sample_read(r.data, count, &sample));
            ASSERT_EQ_FMT(rows[i].lines[count], sample.line, "%zu");
        }
        ASSERT_EQ(count, qlora_text_data_count(r.data));
        rig_close(&r);
    }
    PASS();
}

TEST csv_refused(void) {
    static const char* const rows[][2] = {
        {"text,id\na,1\n\nb\n", "x.csv:4: the row has 1 field, the header 2"},
        {"text\n\"a\nb\"\nc,d\n", "x.csv:4: the row has 2 fields, the header 1"},
        {"text\n\"a\"b\n", "x.csv:2: text after the closing quote"},
        {"text\na\n\"b\n\n", "x.csv:3: a field has no closing quote"},
        {"text,text\na,b\n", "x.csv:1: the header has two columns \"text\""},
        {"text\n\xFF\n", "x.csv:2: not UTF-8"},
        {"text\n", "contains no records"},
        {"", "contains no records"},
        {"question;answer\nq;a\n", "x.csv:2: unrecognised record"},
        {"messages\n[]\n", "x.csv:2: \"messages\" is not a list"}};
    rig r;
    ASSERT(rig_open(&r, "plain"));
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        ASSERT_FALSEm(rows[i][0], rig_load(&r, "x.csv", rows[i][0]));
        ASSERTm(SAID(r), strstr(SAID(r), rows[i][1]) != NULL);
    }
    static const char zero[] = "text\0x\na\n"; // not the column "text"
    ASSERT_EQ(QLORA_ERR_FORMAT,
              qlora_text_data_load(r.text, &r.desc, zero, sizeof zero - 1, &r.data));
    ASSERTm(SAID(r), strstr(SAID(r), "x.csv:1: the name of column 1 has a zero byte") != NULL);
    rig_close(&r);
    PASS();
}

// desc.columns: names of the file for those of a record, in every kind of file.
TEST columns(void) {
    static const struct {
        const char* path;
        const char* columns;
        const char* data;
        const char* want; // the first sample, or a part of the message
    } rows[] = {
        {"x.csv", "prompt=q,completion=a", "a,q,id\n1,2,3", "<s>2{1</s>}"},
        {"x.jsonl", "prompt=q,completion=a", "{\"a\":\"1\",\"q\":\"2\"}", "<s>2{1</s>}"},
        {"x.json", "prompt=q,completion=a", "[{\"a\":\"1\",\"q\":\"2\"}]", "<s>2{1</s>}"},
        {"x.json", "text=a rather long name", "{\"data\":[{\"a rather long name\":\"1\"}]}",
         "<s>{1</s>}"},
        {"x.jsonl", "messages=m", "{\"m\":[{\"role\":\"assistant\",\"content\":\"a\"}]}",
         "<s>{a</s>}"},
        // exchanged names, and one of the file that is not the one that is meant
        {"x.csv", "prompt=completion,completion=prompt", "prompt,completion\n1,2", "<s>2{1</s>}"},
        {"x.csv", "text=body", "text,body\n1,2", "<s>{2</s>}"},
        {"x.csv", "completion=chosen", "prompt,chosen,rejected\n1,2,3", "<s>1{2</s>}"},
        {"x.csv", "texts=body", "text,body\n1,2", "columns: \"texts\" is not a name of a record"},
        {"x.csv", "text=bodies", "text,body\n1,2", "x.csv: no record has the column \"bodies\""},
        {"x.jsonl", "text=bodies", "{\"body\":\"1\",\"text\":\"a\"}", "found body, text (of"},
        {"x.jsonl", "system=sys", "{\"text\":\"a\"}", "no record has the column \"sys\""},
        {"x.jsonl", "text", "{\"text\":\"a\"}", "columns: \"text\" is not of the form"},
        {"x.jsonl", "text=a,", "{\"text\":\"a\"}", "columns: \"\" is not of the form"},
        {"x.jsonl", "text=a,text=b", "{\"text\":\"a\"}", "columns: \"text\" occurs twice"},
        {"x.jsonl", "text=a,prompt=a", "{\"text\":\"a\"}", "columns: \"a\" occurs twice"}};
    rig r;
    qlora_text_data_info info;
    ASSERT(rig_open(&r, "plain"));
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        r.desc.columns = rows[i].columns;
        bool loaded = rig_load(&r, rows[i].path, rows[i].data);
        const char* got = loaded ? rig_sample(&r, 0) : SAID(r);
        ASSERTm(got, strstr(got, rows[i].want) != NULL);
        ASSERTm(got, loaded == (rows[i].want[0] == '<'));
    }
    r.desc.columns = "text=body";
    ASSERT(rig_load(&r, "x.csv", "text,body,id\n1,2,3"));
    ASSERT_EQ(QLORA_OK, qlora_text_data_query(r.data, &info));
    ASSERT_STR_EQ("text (of the file), id", info.ignored);
    rig_close(&r);
    PASS();
}

typedef struct bad_list {
    size_t lines[16];
    size_t count;
    bool go_on;
} bad_list;

static bool bad_note(void* user, size_t line, const char* what) {
    bad_list* bad = (bad_list*)user;
    if (what[0] != 0 && bad->count < 16) {
        bad->lines[bad->count++] = line;
    }
    return bad->go_on;
}

// desc.bad: the records that cannot be used are reported, and the others are read.
TEST bad_records(void) {
    static const struct {
        const char* path;
        const char* data;
        size_t samples;
        size_t lines[4];
    } rows[] = {
        {"x.jsonl", "{\"text\":\"a\"}\n{\"text\":5}\n{\"text\":}\n{\"text\":\"b\"}", 2, {2, 3}},
        {"x.jsonl", "{\"text\":\"a\n{\"text\":\n\"b\"}\n{\"text\"\n:5}\n", 1, {1, 4}},
        {"x.json",
         "[{\"text\":5},\n{\"text\":\"a\"},\n{\"text\":},\n{\"text\":\"b\"} 5]",
         2,
         {1, 3, 4}},
        {"x.json", "{\"data\":[{\"text\":\"a\"},\n{\"text\":5}]}", 1, {2}},
        {"x.csv", "text,id\na,1\nb\nc,3\n", 2, {3}},
        {"x.csv", "text\na\n\"b", 1, {3}},
        {"x.txt", "a\n<|endoftext|>\n\xFF\n<|endoftext|>\nb", 2, {3}},
        {"x.json", "[{\"text\":\"a\"}},\n{\"text\":\"b\"}]", 2, {1}},
        {"x.jsonl", "[", 0, {1}}};
    rig r;
    bad_list bad;
    ASSERT(rig_open(&r, "plain"));
    r.desc.bad = bad_note;
    r.desc.bad_user = &bad;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        memset(&bad, 0, sizeof bad);
        ASSERT_FALSE(rig_load(&r, rows[i].path, rows[i].data));
        ASSERT_EQ((size_t)1, bad.count);
        memset(&bad, 0, sizeof bad);
        bad.go_on = true;
        ASSERTm(SAID(r), rig_load(&r, rows[i].path, rows[i].data));
        ASSERT_EQ_FMT(rows[i].samples, qlora_text_data_count(r.data), "%zu");
        for (size_t k = 0; k < 4 && rows[i].lines[k] != 0; k++) {
            ASSERT_EQ_FMT(rows[i].lines[k], bad.lines[k], "%zu");
        }
        ASSERT(bad.count == 4 || rows[i].lines[bad.count] == 0);
    }
    rig_close(&r);
    PASS();
}

// The record number i of a file: JSON over several lines at times, or a row of a table.
static int record_print(char* out, size_t size, int kind, int i) {
    char words[200];
    int length = snprintf(words, sizeof words, "%.*s", 20 + i * 37 % 150,
                          "the quick brown fox jumps over the lazy dog and runs away from a rather "
                          "large number of other animals, which is what foxes do whenever they are "
                          "seen in the open field by");
    (void)length;
    if (kind == 2) {
        return snprintf(out, size, "\"%s\n%d\",%d,\"a \"\"%s\"\n", words, i, i * i, words + 5);
    }
    if (i % 3 == 0) {
        return snprintf(out, size,
                        "{\"messages\":[{\"role\":\"user\",\"content\":\"%s\"},%s"
                        "{\"role\":\"assistant\",\"content\":\"%d\"}]}",
                        words, i % 2 == 0 ? "\n" : "", i);
    }
    return snprintf(out, size,
                    i % 5 == 0 ? "{\"input_ids\":[%d,2,3],\"labels\":[-100,7,3],\"x\":\"%s\"}"
                               : "{\"prompt\":\"%d\",\"completion\":\"%s\"}",
                    i % 100, words);
}

enum { LINES, ARRAY, TABLE, DOCUMENTS, OBJECT, LONG_DOCUMENTS, ONE_DOCUMENT, KINDS };

// A file of several windows: JSON lines, an array, a table, documents, an array in an object, long
// documents, or a text without separators.
static size_t file_print(char* out, size_t size, int kind, int records) {
    static const char* const starts[KINDS] = {
        "", "[\n", "question,id,answer\n", "", "{\"version\": [1, {}],\n\"data\" : [\n", "", ""};
    static const char* const ends[KINDS] = {"",   "]", "", "", "], \"note\": {\"a\": []}}\n",
                                            "\n", ""};
    size_t used = (size_t)snprintf(out, size, "%s", starts[kind]);
    for (int i = 0; i < records; i++) {
        bool list = (kind == ARRAY || kind == OBJECT) && i + 1 < records;
        bool line = kind == LONG_DOCUMENTS || kind == ONE_DOCUMENT;
        used += (size_t)record_print(out + used, size - used, kind, i);
        const char* end = kind == TABLE                              ? ""
                          : kind == DOCUMENTS                        ? "\n<|endoftext|>\n"
                          : kind == LONG_DOCUMENTS && i % 900 == 899 ? "\n\n<|endoftext|>\n"
                          : list                                     ? ",\n"
                          : line && i % 3 == 0                       ? "\n\nParagraph\n"
                          : line                                     ? "\nthen "
                                                                     : "\n";
        used += (size_t)snprintf(out + used, size - used, "%s", end);
    }
    used += (size_t)snprintf(out + used, size - used, "%s", ends[kind]);
    return used;
}

static bool samples_same(qlora_text_data* a, qlora_text_data* b) {
    bool same = qlora_text_data_count(a) == qlora_text_data_count(b);
    for (size_t i = qlora_text_data_count(a); i-- > 0 && same;) {
        size_t at = i * 7919 % qlora_text_data_count(a);
        qlora_text_sample x;
        qlora_text_sample y;
        same = qlora_text_sample_read(a, at, &x) == QLORA_OK &&
               qlora_text_sample_read(b, at, &y) == QLORA_OK && x.count == y.count &&
               x.line == y.line && x.trained == y.trained &&
               memcmp(x.ids, y.ids, x.count * sizeof *x.ids) == 0 &&
               memcmp(x.labels, y.labels, x.count * sizeof *x.labels) == 0;
    }
    return same;
}

// A file read through windows, and one of which only an index is kept, give the samples that the
// same bytes in memory give. The index takes 40 bytes per sample.
TEST streams(void) {
    static const char* const paths[KINDS] = {"x.jsonl", "x.json", "x.csv", "x.txt",
                                             "x.json",  "x.txt",  "x.txt"};
    const size_t room = 1500000;
    memory_file file;
    rig r;
    char* text = (char*)malloc(room);
    ASSERT(text != NULL && rig_open_files(&r, "plain", &file));
    r.desc.chunk_tokens = 40;
    for (int kind = 0; kind < KINDS; kind++) {
        qlora_text_data* opened = NULL;
        memset(&file, 0, sizeof file);
        file.data = text;
        file.size = file_print(text, room, kind, 3600);
        ASSERT(file.size > 400000 && file.size + 400 < room);
        r.desc.stream = false;
        ASSERTm(SAID(r), rig_load(&r, paths[kind], text));
        for (int stream = 0; stream < 2; stream++) {
            r.desc.stream = stream == 1;
            size_t before = memory_now;
            memory_peak = memory_now;
            ASSERTm(SAID(r), qlora_text_data_open(r.text, &r.desc, &opened) == QLORA_OK);
            size_t count = qlora_text_data_count(opened);
            ASSERTm(paths[kind], stream == 0 || memory_now - before < 40 * count + 80000);
            ASSERTm(paths[kind], stream == 0 || memory_peak - before < 120 * count + 800000);
            ASSERTm(paths[kind], samples_same(r.data, opened));
            if (stream == 1) {
                qlora_text_sample sample;
                ASSERT_EQ(QLORA_ERR_STATE, qlora_text_chat_close(r.chat));
                file.size /= 2;
                memset(text, strstr(paths[kind], "txt") != NULL ? 'x' : '{', file.size);
                ASSERT_EQ(QLORA_ERR_FILE, qlora_text_sample_read(opened, count / 4, &sample));
                ASSERTm(SAID(r), strstr(SAID(r), "has changed since it was opened") != NULL);
            }
            ASSERT_EQ(QLORA_OK, qlora_text_data_close(opened));
        }
        ASSERT_EQ(0, file.open);
        ASSERT_EQ(0, file.maps);
    }
    free(text);
    rig_close(&r);
    ASSERT_EQ((size_t)0, memory_now);
    PASS();
}

// {"data": [...]} that is longer than a window: its records are read one by one, with the faults
// that those of a short one have, and the object around them is checked as well.
TEST long_lists(void) {
    static const struct {
        const char* start;
        const char* after; // the records
        const char* want;  // a part of the message, or NULL
        size_t samples;    // beside the many
    } rows[] = {
        {"{\"data\":[", "]}", NULL, 0},
        {"{\"a\":1,\"b\":\"]}\",\"data\":[", "],\"c\":{\"data\":[]}}", NULL, 0},
        {"{\"data\":[", "]}\n{\"text\":\"x\"}\n{\"data\":[{\"text\":\"y\"},{\"text\":\"z\"}]}",
         NULL, 3},
        {"{\"data\":[", ",{\"data\":[{\"text\":\"x\"}]}]}", "unrecognised record", 0},
        {"{\"data\":[", ",{\"text\":5}]}", "\"text\" is not a string", 0},
        {"{\"data\":[", ",{\"text\":}]}", "x.json:20001:10: invalid JSON: expected a value", 0},
        {"{\"data\":[", "],\"text\":\"x\"}", "x.json:20001: \"text\" beside \"data\"", 0},
        {"{\"data\":[", "],\"data\":[]}", "\"data\" beside \"data\"", 0},
        {"{\"data\":[", "],}", "expected", 0},
        {"{\"data\":[", "] 5}", "x.json:20001:3: invalid JSON: expected ',' or '}'", 0},
        {"{\"data\":[", "]} 5", "unexpected text after the value", 0},
        {"{\"data\":[", "]", "expected ',' or '}'", 0},
        {"{\"text\":\"x\",\"data\":[", "]}", NULL, 1}};
    const int many = 20000;
    const size_t room = 1 << 20;
    memory_file file;
    rig r;
    char* text = (char*)malloc(room);
    ASSERT(text != NULL && rig_open_files(&r, "plain", &file));
    r.desc.path = "x.json";
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        size_t used = (size_t)snprintf(text, room, "%s", rows[i].start);
        for (int k = 0; k < many; k++) {
            used += (size_t)snprintf(text + used, room - used, "{\"text\":\"%d\"}%s", k,
                                     k + 1 < many ? ",\n" : "\n");
        }
        used += (size_t)snprintf(text + used, room - used, "%s", rows[i].after);
        memset(&file, 0, sizeof file);
        file.data = text;
        file.size = used;
        for (int stream = 0; stream < 2; stream++) {
            qlora_text_sample sample;
            r.desc.stream = stream == 1;
            qlora_text_data_close(r.data);
            r.data = NULL;
            bool opened = qlora_text_data_open(r.text, &r.desc, &r.data) == QLORA_OK;
            ASSERTm(SAID(r), opened == (rows[i].want == NULL));
            ASSERTm(SAID(r), opened || strstr(SAID(r), rows[i].want) != NULL);
            size_t count =
                i == sizeof rows / sizeof rows[0] - 1 ? 1 : (size_t)many + rows[i].samples;
            for (size_t k = 0; opened && k < count; k += 997) {
                ASSERT_EQ_FMT(count, qlora_text_data_count(r.data), "%zu");
                ASSERT_EQ(QLORA_OK, qlora_text_sample_read(r.data, k, &sample));
                ASSERT_EQ_FMT(k + 1, sample.line, "%zu");
            }
        }
        ASSERT_EQ(0, file.open);
    }
    free(text);
    rig_close(&r);
    ASSERT_EQ((size_t)0, memory_now);
    PASS();
}

// A long document is read in parts. A fault in a later one takes back what came before it, and a
// stream refuses a document that it would have to hold.
TEST long_documents(void) {
    const size_t room = 20 << 20;
    memory_file file;
    bad_list bad;
    rig r;
    char* text = (char*)malloc(room);
    ASSERT(text != NULL && rig_open_files(&r, "plain", &file));
    memset(&bad, 0, sizeof bad);
    memset(&file, 0, sizeof file);
    bad.go_on = true;
    r.desc.path = "x.txt";
    r.desc.chunk_tokens = 64;
    r.desc.stream = true;
    r.desc.bad = bad_note;
    r.desc.bad_user = &bad;
    file.data = text;
    file.size = (size_t)snprintf(text, room, "one\n<|endoftext|>\n");
    for (int i = 0; i < 8000; i++) {
        file.size += (size_t)snprintf(text + file.size, room - file.size,
                                      i == 6000 ? "l\xFFne\n" : "line number %d\n", i);
    }
    file.size += (size_t)snprintf(text + file.size, room - file.size, "<|endoftext|>\ntwo\n");
    ASSERTm(SAID(r), qlora_text_data_open(r.text, &r.desc, &r.data) == QLORA_OK);
    ASSERT_EQ((size_t)1, bad.count);
    ASSERT_EQ_FMT((size_t)3, bad.lines[0], "%zu");
    ASSERT_EQ_FMT((size_t)2, qlora_text_data_count(r.data), "%zu");
    ASSERT_STR_EQ("<s>{two</s>}", rig_sample(&r, 1));
    qlora_text_data_close(r.data);
    r.data = NULL;
    r.desc.bad = NULL;
    ASSERT_EQ(QLORA_ERR_FORMAT, qlora_text_data_open(r.text, &r.desc, &r.data));
    ASSERTm(SAID(r), strstr(SAID(r), "x.txt:6003: not UTF-8") != NULL);
    if (!test_brief()) {
        memset(text, ' ', room);
        file.size = room;
        ASSERT_EQ(QLORA_ERR_UNSUPPORTED, qlora_text_data_open(r.text, &r.desc, &r.data));
        ASSERTm(SAID(r), strstr(SAID(r), "x.txt:1: a document of more than 16 MiB that has no line "
                                         "that starts with a letter") != NULL);
    }
    ASSERT_EQ(0, file.open);
    free(text);
    rig_close(&r);
    PASS();
}

// Another process makes the file of a stream shorter: an error, not a signal that ends the process.
TEST shortened(void) {
    const char* path = test_path("shortened.jsonl");
    rig r;
    qlora_text_sample sample;
    FILE* file = fopen(path, "wb");
    ASSERT(file != NULL && rig_open(&r, "plain"));
    for (int i = 0; i < 20000; i++) {
        fprintf(file, "{\"text\":\"%d\"}\n", i);
    }
    ASSERT_EQ(0, fclose(file));
    r.desc.path = path;
    r.desc.stream = true;
    ASSERTm(SAID(r), qlora_text_data_open(r.text, &r.desc, &r.data) == QLORA_OK);
    ASSERT_EQ(QLORA_OK, qlora_text_sample_read(r.data, 10000, &sample));
    file = fopen(path, "wb");
    ASSERT(file != NULL && fputs("{\"text\":\"0\"}\n", file) >= 0);
    ASSERT_EQ(0, fclose(file));
    ASSERT_EQ(QLORA_OK, qlora_text_sample_read(r.data, 0, &sample));
    ASSERT_EQ(QLORA_ERR_FILE, qlora_text_sample_read(r.data, 19999, &sample));
    ASSERTm(SAID(r), strstr(SAID(r), "has changed since it was opened") != NULL);
    ASSERT_EQ(0, remove(path));
    ASSERT_EQ(QLORA_ERR_FILE, qlora_text_sample_read(r.data, 0, &sample));
    rig_close(&r);
    PASS();
}

// desc.columns_partial: names that the file lacks are left alone, and listed.
TEST columns_of_some(void) {
    static const struct {
        const char* path;
        const char* data;
        const char* want; // the first sample, or a part of the message
        const char* lacking;
    } rows[] = {
        {"x.csv", "q,a\n1,2", "<s>1{2</s>}", ""},
        {"x.csv", "prompt,completion\n1,2", "<s>1{2</s>}", "q, a"},
        {"x.csv", "prompt,a\n1,2", "<s>1{2</s>}", "q"},
        {"x.jsonl", "{\"prompt\":\"1\",\"completion\":\"2\"}", "<s>1{2</s>}", "q, a"},
        // one record has it: then it counts for all
        {"x.jsonl", "{\"prompt\":\"1\",\"completion\":\"2\"}\n{\"q\":\"1\",\"a\":\"2\"}",
         "(of the file)", ""},
        {"x.json", "{\"data\":[{\"text\":\"1\"},{\"q\":\"1\",\"a\":\"2\"}]}", "<s>{1</s>}", ""},
        {"x.json", "{\"data\":[{\"prompt\":\"1\",\"a\":\"2\"}]}", "<s>1{2</s>}", "q"},
        {"x.jsonl", "{\"text\":}", "expected a value", ""},
        {"x.txt", "text", "<s>{text</s>}", "q, a"}};
    rig r;
    memory_file file;
    qlora_text_data_info info;
    memset(&file, 0, sizeof file);
    ASSERT(rig_open_files(&r, "plain", &file));
    r.desc.columns = "prompt=q,completion=a";
    r.desc.columns_partial = true;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        bool loaded = rig_load(&r, rows[i].path, rows[i].data);
        const char* got = loaded ? rig_sample(&r, 0) : SAID(r);
        ASSERTm(got, strstr(got, rows[i].want) != NULL);
        ASSERTm(got, loaded == (rows[i].want[0] == '<'));
        if (loaded) {
            ASSERT_EQ(QLORA_OK, qlora_text_data_query(r.data, &info));
            ASSERT_STR_EQ(rows[i].lacking, info.lacking);
        }
        // the same as a file, and as a pipe, which cannot be read twice
        for (int piped = 0; piped < 2; piped++) {
            file.data = rows[i].data;
            file.size = strlen(file.data);
            file.piped = piped == 1;
            qlora_text_data_close(r.data);
            r.data = NULL;
            bool opened = qlora_text_data_open(r.text, &r.desc, &r.data) == QLORA_OK;
            ASSERT_EQ(loaded && (piped == 0 || rows[i].lacking[0] == 0), opened);
            ASSERT_EQ(0, file.open);
        }
    }
    rig_close(&r);
    ASSERT_EQ((size_t)0, memory_now);
    PASS();
}

// A built-in format has no place for other contents: as text they would be Python's notation.
TEST contents_of_a_format(void) {
    static const char* const rows[] = {
        "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image\"}]}]}",
        "{\"messages\":[{\"role\":\"user\",\"content\":5}]}",
        "{\"messages\":[{\"role\":\"user\"}]}"};
    static const char* const formats[] = {"chatml", "llama3", "plain", "alpaca"};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        rig r;
        qlora_text_ids ids;
        memset(&ids, 0, sizeof ids);
        ASSERT(rig_open(&r, formats[i]));
        ASSERT_EQ(QLORA_ERR_FORMAT, qlora_text_chat_encode_json(r.chat, rows[i], strlen(rows[i]),
                                                                true, NULL, &ids, NULL));
        ASSERTm(SAID(r), strstr(SAID(r), "a content that is not a string") != NULL);
        rig_close(&r);
    }
    PASS();
}

// The ids of a conversation, decoded: as training reads it, and as a prompt of generate.
static const char* talk_shown(rig* r, const char* record, bool trained) {
    static char shown[1024];
    qlora_text_ids ids;
    qlora_text_bytes text;
    memset(&ids, 0, sizeof ids);
    memset(&text, 0, sizeof text);
    bool ok = trained ? rig_load(r, "x.jsonl", record)
                      : qlora_text_chat_encode_json(r->chat, record, strlen(record), false, NULL,
                                                    &ids, NULL) == QLORA_OK;
    qlora_text_sample sample;
    memset(&sample, 0, sizeof sample);
    ok = ok && (!trained || qlora_text_sample_read(r->data, 0, &sample) == QLORA_OK);
    ok = ok && qlora_text_decode(r->tok, trained ? sample.ids : ids.data,
                                 trained ? sample.count : ids.count, 0, &text) == QLORA_OK;
    snprintf(shown, sizeof shown, "%.*s", ok ? (int)text.count : 200, ok ? text.data : SAID(*r));
    qlora_text_ids_free(r->text, &ids);
    qlora_text_bytes_free(r->text, &text);
    return shown;
}

#define OPENED(first)                                                                              \
    "{\"messages\":[{" first "},{\"role\":\"assistant\",\"content\":\"a\",\"tool_calls\":[{"       \
    "\"arguments\":\"{\\\"x\\\":1}\"}],\"own\":\"k\"}]}"

// What a template sees is the same in training and in a prompt: roles and names as they are.
TEST messages_as_they_are(void) {
    static const char source[] =
        "{% for m in messages %}[{{ m.role }}]{{ m.content if m.content is string else 'list' }}"
        "{{ m.own }}{% for c in m.tool_calls or [] %}{{ c.arguments | tojson }}{% endfor %}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}";
    static const char end[] = "[assistant]ak{\"x\": 1}</s>";
    static const char* const rows[][2] = {
        {OPENED("\"role\":\"developer\",\"content\":\"d\""), "[developer]d"},
        {OPENED("\"role\":\"ipython\",\"content\":\"d\""), "[ipython]d"},
        {OPENED("\"role\":\"bot\",\"content\":\"d\""), "[bot]d"},
        {OPENED("\"from\":\"human\",\"value\":\"d\""), "[user]d"},
        {OPENED("\"from\":\"observation\",\"value\":\"d\""), "[tool]d"},
        {OPENED(
             "\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"d\"},{\"text\":\"e\"}]"),
         "[user]de"}};
    const char* path = test_path("as.jinja");
    qlora_text_chat_desc desc;
    rig r;
    FILE* file = fopen(path, "wb");
    ASSERT(file != NULL && fputs(source, file) >= 0 && fclose(file) == 0);
    ASSERT(rig_open(&r, "plain"));
    ASSERT_EQ(QLORA_OK, qlora_text_chat_close(r.chat));
    memset(&desc, 0, sizeof desc);
    desc.tok = r.tok;
    desc.template_file = path;
    ASSERT_EQm(SAID(r), QLORA_OK, qlora_text_chat_open(r.text, &desc, &r.chat));
    remove(path);
    r.desc.chat = r.chat;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char want[256];
        snprintf(want, sizeof want, "<s>%s%s", rows[i][1], end);
        ASSERT_STR_EQm(rows[i][0], want, talk_shown(&r, rows[i][0], true));
        want[strlen(want) - 4] = '\0'; // a rendering alone is not given an end
        ASSERT_STR_EQm(rows[i][0], want, talk_shown(&r, rows[i][0], false));
    }
    ASSERT_FALSE(
        rig_load(&r, "x.jsonl",
                 "{\"messages\":[{\"role\":\"user\",\"content\":\"u\"},{\"role\":\"model\","
                 "\"content\":\"m\"}]}"));
    ASSERTm(SAID(r), strstr(SAID(r), "message 2 has the \"role\" \"model\", and none is") != NULL);
    rig_close(&r);
    PASS();
}

// Whether the end of the last answer is trained: a template may leave its end marker out.
TEST endless_answers(void) {
    static const struct {
        const char* source;
        bool endless;
    } rows[] = {{"{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}</s>{% "
                 "endfor %}",
                 true},
                {"{% for m in messages %}{% generation %}{{ m.content }}</s>\n\n{% endgeneration "
                 "%}{% endfor "
                 "%}",
                 false},
                {"{% for m in messages %}{{ m.content }}|{% endfor %}", false}}; // EOS is added
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const char* path = test_path("endless.jinja");
        qlora_text_chat_desc desc;
        qlora_text_sample sample;
        rig r;
        FILE* file = fopen(path, "wb");
        ASSERT(file != NULL && fputs(rows[i].source, file) >= 0 && fclose(file) == 0);
        ASSERT(rig_open(&r, "plain"));
        ASSERT_EQ(QLORA_OK, qlora_text_chat_close(r.chat));
        memset(&desc, 0, sizeof desc);
        desc.tok = r.tok;
        desc.template_file = path;
        ASSERT_EQm(SAID(r), QLORA_OK, qlora_text_chat_open(r.text, &desc, &r.chat));
        remove(path);
        r.desc.chat = r.chat;
        ASSERTm(SAID(r), rig_load(&r, "x.jsonl", ANSWER("\"train\":true")));
        ASSERT_EQ(QLORA_OK, qlora_text_sample_read(r.data, 0, &sample));
        ASSERT_EQ(rows[i].endless, sample.endless);
        rig_close(&r);
    }
    PASS();
}

SUITE(data_suite) {
    RUN_TEST(messages_as_they_are);
    RUN_TEST(endless_answers);
    RUN_TEST(contents_of_a_format);
    RUN_TEST(long_lists);
    RUN_TEST(long_documents);
    RUN_TEST(shortened);
    RUN_TEST(columns_of_some);
    RUN_TEST(csv);
    RUN_TEST(csv_refused);
    RUN_TEST(columns);
    RUN_TEST(bad_records);
    RUN_TEST(streams);
    RUN_TEST(forms);
    RUN_TEST(asked);
    RUN_TEST(asked_system);
    RUN_TEST(patterns);
    RUN_TEST(refused);
    RUN_TEST(preferences);
    RUN_TEST(padding);
    RUN_TEST(ignored_names);
    RUN_TEST(file_formats);
    RUN_TEST(text_memory);
    RUN_TEST(windows);
}
