// data.c - libFuzzer target: any bytes as a data file, and as the configuration of a model.
//
// The first byte selects the kind of file, the chat format and the options. Run it in the root of
// the repository: it uses the small tokenizers in tests/golden.

#define TEXT_IMPLEMENTATION
#include "qlora_text.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

// Checks all guarantees of a sample.
static void check(const text_data_desc* desc, const text_data* data) {
    for (size_t i = 0; i < text_data_count(data); i++) {
        text_sample sample = text_data_get(data, i);
        size_t trained = 0;
        for (size_t k = 0; k < sample.count; k++) {
            if (sample.ids[k] < 0 || (sample.labels[k] < 0 && sample.labels[k] != -100)) {
                abort();
            }
            trained += k > 0 && sample.labels[k] != -100 ? 1 : 0;
        }
        if (trained != sample.trained || sample.line == 0) {
            abort();
        }
        (void)desc;
    }
}

static void fuzz_template(text_tok* tok, const char* text, size_t size) {
    text_error error;
    text_chat* chat = NULL;
    if (!text_chat_open(tok, NULL, "chatml", &chat, &error)) {
        abort();
    }
    TEXT_FREE(chat->default_system);
    chat->default_system = NULL;
    if (text__chat_recognise(chat, text, size, &error)) {
        text_message message = {"user", text, size, false};
        text_ids ids = {0};
        if (!text_chat_encode(chat, tok, &message, 1, true, &ids, NULL, &error)) {
            abort();
        }
        text_ids_free(&ids);
    }
    text_chat_close(chat);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static text_tok* toks[2];
    static const char* const files[2] = {"tests/golden/text_byte.json",
                                         "tests/golden/text_spm.json"};
    static const char* const kinds[] = {"x.jsonl", "x.json", "x.txt"};
    text_error error;
    error.text[0] = 0;
    if (size < 2) {
        return 0;
    }
    size_t which = data[0] % 2;
    if (toks[which] == NULL && !text_tok_open(files[which], &toks[which], &error)) {
        abort();
    }
    const char* text = (const char*)data + 2;
    size -= 2;
    if (data[0] / 2 % 8 == 7) {
        fuzz_template(toks[which], text, size);
        return 0;
    }
    text_data_desc desc;
    text_chat* chat = NULL;
    text_data* out = NULL;
    memset(&desc, 0, sizeof(desc));
    if (!text_chat_open(toks[which], NULL, text_chat_names(data[1] % 8), &chat, &error)) {
        abort();
    }
    desc.tok = toks[which];
    desc.chat = chat;
    desc.chunk_tokens = data[1] & 32 ? 2 + data[0] / 16 : 0;
    desc.train_prompt = (data[1] & 64) != 0;
    desc.last_turn_only = (data[1] & 128) != 0;
    if (text_data_load(&desc, kinds[data[0] / 2 % 8 % 3], text, size, &out, &error)) {
        check(&desc, out);
    } else if (out != NULL || error.text[0] == 0) {
        abort();
    }
    text_data_close(out);
    text_chat_close(chat);
    return 0;
}
