// tokenizer.c - libFuzzer target: any bytes as a tokenizer file, and any text through a valid one.
//
// If the first byte is even, the rest is a tokenizer file, which is loaded and used on a fixed
// text; if it is odd, the rest is text for the small tokenizers in tests/golden (run it in the root
// of the repository), and the byte-exact one must return it unchanged.

static void use(qlora_text_tok* tok, const char* text, size_t size, uint32_t flags, bool exact) {
    qlora_text_ids ids = {0};
    qlora_text_bytes back = {0};
    qlora_text_bytes parts = {0};
    qlora_text_stream stream;
    qlora_text_tok_info info;
    memset(&stream, 0, sizeof(stream));
    must(qlora_text_tok_query(tok, &info));
    must(qlora_text_encode(tok, text, size, flags, &ids));
    for (size_t i = 0; i < ids.count; i++) {
        // ids that a post-processor adds need not exist
        if (!(flags & QLORA_TEXT_SPECIAL) && (ids.data[i] < 0 || ids.data[i] >= info.count)) {
            abort();
        }
        must(qlora_text_stream_push(tok, &stream, ids.data[i], 0, &parts));
    }
    must(qlora_text_stream_end(tok, &stream, &parts));
    must(qlora_text_decode(tok, ids.data, ids.count, flags & QLORA_TEXT_REPLACE, &back));
    if (exact && (back.count != size || (size > 0 && memcmp(back.data, text, size) != 0))) {
        abort();
    }
    qlora_text_ids_free(lib(), &ids);
    qlora_text_bytes_free(lib(), &back);
    qlora_text_bytes_free(lib(), &parts);
}

static void use_file(const uint8_t* data, size_t size) {
    static const char text[] =
        "The caf\xC3\xA9's e\xCC\x81 <s>\xE2\x96\x81 12345\r\n\t x \xFF\xF0\x9F";
    uint64_t before = lib()->env.host_bytes;
    qlora_text_tok* tok = NULL;
    if (qlora_text_tok_load(lib(), "fuzz", data, size, &tok) != QLORA_OK) {
        if (tok != NULL || qlora_text_last_error(lib())[0] == 0) {
            abort();
        }
    } else {
        for (uint32_t flags = 0; flags < 32; flags += 5) {
            use(tok, text, sizeof(text) - 1, flags, false);
        }
        must(qlora_text_tok_close(tok));
    }
    if (lib()->env.host_bytes != before) {
        abort();
    }
}

static int fuzz_tokenizer(const uint8_t* data, size_t size) {
    static qlora_text_tok* toks[2];
    static const char* const names[2] = {"tests/golden/text_byte.json",
                                         "tests/golden/text_spm.json"};
    if (size == 0) {
        return 0;
    }
    if (data[0] % 2 == 0) {
        use_file(data + 1, size - 1);
        return 0;
    }
    size_t which = data[0] / 2 % 2;
    if (toks[which] == NULL) {
        must(qlora_text_tok_open(lib(), names[which], &toks[which]));
    }
    uint32_t flags = (uint32_t)data[0] >> 3;
    // literal text without a leading space is returned unchanged; the first tokenizer normalises
    bool exact = which == 1 && flags == QLORA_TEXT_LITERAL;
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
