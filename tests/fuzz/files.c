// files.c - libFuzzer target: a valid data or tokenizer file with one change.
//
// The first byte selects the file, the others the change (see mutate.h). Loading must succeed or
// fail with a message, leak nothing, and need at most ten times the size of the file beyond what
// the valid one needs. Run it in the root of the repository, with -timeout=5.
#define QLORA_STATIC // the compiler leaves out what is not used
#define QLORA_TEXT_IMPLEMENTATION
#include "qlora_text.h"

#include "fuzz/mutate.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

static const char lines[] =
    "{\"text\":\"some text\",\"id\":7}\n"
    "{\"prompt\":\"2 and 3 is\",\"completion\":\" 5\"}\n"
    "{\"messages\":[{\"role\":\"system\",\"content\":\"S\"},{\"role\":\"user\",\"content\":[{"
    "\"type\":\"text\",\"text\":\"hi\"}]},{\"role\":\"assistant\",\"content\":\"ho\",\"weight\":1}]"
    "}"
    "\n{\"conversations\":[{\"from\":\"human\",\"value\":\"h\"},{\"from\":\"gpt\",\"value\":\"g\"}]"
    ",\"system\":\"S\"}\n"
    "{\"instruction\":\"I\",\"context\":\"C\",\"response\":\"R\",\"history\":[[\"u\",\"v\"]]}\n"
    "{\"question\":\"Q\",\"answer\":\"A\",\"input\":\"\"}\n"
    "{\"input_ids\":[1,2,3,0],\"labels\":[-100,2,3,-100],\"attention_mask\":[1,1,1,0]}\n"
    "{\"prompt\":[{\"role\":\"user\",\"content\":\"q\"}],\"completion\":[{\"role\":\"assistant\","
    "\"content\":\"a\",\"train\":true}]}\n";

static size_t memory_now;
static size_t memory_peak;

static void* counted_alloc(size_t bytes, size_t align, void* user) {
    (void)align;
    (void)user;
    memory_now += bytes;
    memory_peak = memory_now > memory_peak ? memory_now : memory_peak;
    return malloc(bytes);
}

static void counted_free(void* pointer, size_t bytes, void* user) {
    (void)user;
    memory_now -= bytes;
    free(pointer);
}

static void must(bool ok) {
    if (!ok) {
        abort();
    }
}

static qlora_text* text_open(void) {
    qlora_text_desc d;
    qlora_text* text = NULL;
    memset(&d, 0, sizeof d);
    d.allocator.alloc = counted_alloc;
    d.allocator.free = counted_free;
    must(qlora_text_create(&d, &text) == QLORA_OK);
    return text;
}

static void data_try(const buffer* b, const char* path) {
    static const char* const names[] = {"chatml", "plain", "alpaca", "llama3"};
    static qlora_text* text;
    static qlora_text_tok* tok;
    qlora_text_chat_desc cd;
    qlora_text_data_desc dd;
    qlora_text_data* data = NULL;
    memset(&cd, 0, sizeof cd);
    memset(&dd, 0, sizeof dd);
    if (text == NULL) {
        text = text_open();
        must(qlora_text_tok_open(text, "tests/golden/text_byte.json", &tok) == QLORA_OK);
    }
    cd.tok = tok;
    cd.name = names[b->size % 4];
    must(qlora_text_chat_open(text, &cd, &dd.chat) == QLORA_OK);
    dd.path = path;
    memory_peak = memory_now;
    size_t before = memory_now;
    qlora_result r = qlora_text_data_load(text, &dd, b->data, b->size, &data);
    must((r == QLORA_OK) == (qlora_text_last_error(text)[0] == '\0'));
    must((r == QLORA_OK) == (data != NULL));
    must(memory_peak - before <= 10 * b->size + 65536); // and the smallest arrays
    for (size_t i = 0; i < qlora_text_data_count(data); i++) {
        qlora_text_sample s;
        must(qlora_text_sample_read(data, i, &s) == QLORA_OK && s.line > 0);
        for (size_t k = 0; k < s.count; k++) {
            must(s.ids[k] >= 0 && (s.labels[k] >= 0 || s.labels[k] == -100));
        }
    }
    must(qlora_text_data_close(data) == QLORA_OK);
    must(qlora_text_chat_close(dd.chat) == QLORA_OK);
}

// Returns the memory that was needed.
static size_t tokenizer_try(const buffer* b) {
    static const char sample[] = "The caf\xC3\xA9's e\xCC\x81 <s> 12345\r\n\t x \xFF";
    size_t started = memory_now;
    qlora_text* text = text_open();
    qlora_text_tok* tok = NULL;
    qlora_text_ids ids;
    qlora_text_bytes back;
    memset(&ids, 0, sizeof ids);
    memset(&back, 0, sizeof back);
    memory_peak = memory_now;
    size_t before = memory_now;
    qlora_result r = qlora_text_tok_load(text, "fuzz", b->data, b->size, &tok);
    must((r == QLORA_OK) == (qlora_text_last_error(text)[0] == '\0'));
    if (r == QLORA_OK) {
        must(qlora_text_encode(tok, sample, sizeof sample - 1, QLORA_TEXT_SPECIAL, &ids) ==
             QLORA_OK);
        must(qlora_text_decode(tok, ids.data, ids.count, QLORA_TEXT_REPLACE, &back) == QLORA_OK);
    }
    size_t used = memory_peak - before;
    qlora_text_ids_free(text, &ids);
    qlora_text_bytes_free(text, &back);
    must(qlora_text_tok_close(tok) == QLORA_OK && qlora_text_destroy(text) == QLORA_OK);
    must(memory_now == started);
    return used;
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const char* const names[] = {"tests/golden/text_byte.json",
                                        "tests/golden/text_spm.json"};
    static buffer files[2];
    static size_t valid[2];
    qlora_text* text = NULL;
    if (size < 4) {
        return 0;
    }
    choices c = choices_of(data + 1, size - 1);
    size_t kind = data[0] % 4;
    must(qlora_text_create(NULL, &text) == QLORA_OK); // for its env
    if (kind < 2) {
        buffer b = buffer_make(lines, sizeof lines - 1);
        mutate_file(&text->env, &c, kind == 0 ? "x.jsonl" : "x.txt", &b);
        data_try(&b, kind == 0 ? "x.jsonl" : "x.txt");
        free(b.data);
    } else {
        size_t i = kind - 2;
        if (files[i].data == NULL) {
            must(buffer_file(names[i], &files[i]));
            valid[i] = tokenizer_try(&files[i]);
        }
        buffer b = buffer_make(files[i].data, files[i].size);
        mutate_file(&text->env, &c, "tokenizer.json", &b);
        // and tables of 9 bytes for each of the 4096 ids that a file may leave out, which grow by
        // half and are copied
        must(tokenizer_try(&b) <= valid[i] + 10 * b.size + 3 * 9 * 4096);
        free(b.data);
    }
    must(qlora_text_destroy(text) == QLORA_OK);
    return 0;
}
