// tokenizer.c - libFuzzer target: any bytes as a tokenizer file, and any text through a valid one.
//
// If the first byte is even, the rest is a tokenizer file, which is loaded and used on a fixed
// text; if it is odd, the rest is text for the small tokenizers in tests/golden (run it in the root
// of the repository), and the byte-exact one must return it unchanged.

#define TEXT_IMPLEMENTATION
#include "qlora_text.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

static void use(text_tok* tok, const char* text, size_t size, unsigned flags, bool exact) {
    text_error error;
    text_ids ids = {0};
    text_bytes back = {0};
    text_bytes parts = {0};
    text_stream stream;
    memset(&stream, 0, sizeof(stream));
    if (!text_encode(tok, text, size, flags, &ids, &error)) {
        abort(); // running out of memory is the only error allowed here
    }
    for (size_t i = 0; i < ids.count; i++) {
        // ids added by a post-processor need not exist
        if (!(flags & TEXT_SPECIAL) && (ids.data[i] < 0 || ids.data[i] >= text_tok_count(tok))) {
            abort();
        }
        if (!text_stream_push(tok, &stream, ids.data[i], 0, &parts, &error)) {
            abort();
        }
    }
    if (!text_stream_end(&stream, &parts, &error) ||
        !text_decode(tok, ids.data, ids.count, flags & TEXT_REPLACE, &back, &error)) {
        abort();
    }
    if (exact && (back.count != size || (size > 0 && memcmp(back.data, text, size) != 0))) {
        abort();
    }
    text_ids_free(&ids);
    text_bytes_free(&back);
    text_bytes_free(&parts);
}

static void fuzz_file(const uint8_t* data, size_t size) {
    static const char text[] =
        "The caf\xC3\xA9's e\xCC\x81 <s>\xE2\x96\x81 12345\r\n\t x \xFF\xF0\x9F";
    text_error error;
    text_tok* tok = NULL;
    error.text[0] = 0;
    if (!text_tok_load("fuzz", data, size, &tok, &error)) {
        if (tok != NULL || error.text[0] == 0) {
            abort();
        }
        return;
    }
    for (unsigned flags = 0; flags < 32; flags += 5) {
        use(tok, text, sizeof(text) - 1, flags, false);
    }
    text_tok_close(tok);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static text_tok* toks[2];
    static const char* const names[2] = {"tests/golden/text_byte.json",
                                         "tests/golden/text_spm.json"};
    if (size == 0) {
        return 0;
    }
    if (data[0] % 2 == 0) {
        fuzz_file(data + 1, size - 1);
        return 0;
    }
    size_t which = data[0] / 2 % 2;
    text_error error;
    if (toks[which] == NULL && !text_tok_open(names[which], &toks[which], &error)) {
        abort();
    }
    unsigned flags = (unsigned)data[0] >> 3;
    // literal text without a leading space is returned unchanged; the first tokenizer normalises
    bool exact = which == 1 && flags == TEXT_LITERAL;
    bool added = false; // stripped white space is lost
    for (size_t i = 1; i < size; i++) {
        added = added || data[i] == '<' || data[i] == '[' || data[i] == 'h';
    }
    // the replacement for a space is decoded as a space
    for (size_t i = 3; i < size; i++) {
        added = added || (data[i - 2] == 0xE2 && data[i - 1] == 0x96 && data[i] == 0x81);
    }
    use(toks[which], (const char*)data + 1, size - 1, flags, exact && !added);
    return 0;
}
