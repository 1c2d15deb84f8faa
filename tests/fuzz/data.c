// data.c - libFuzzer target: any bytes as a data file.
//
// The first byte selects the kind of file, the chat format and the options. Run it in the root of
// the repository: it uses the small tokenizers in tests/golden.

// Everything that a sample promises.
static void check(qlora_text_data* data, bool asks) {
    for (size_t i = 0; i < qlora_text_data_count(data); i++) {
        qlora_text_sample sample;
        size_t trained = 0;
        must(qlora_text_sample_read(data, i, &sample));
        for (size_t k = 0; k < sample.count; k++) {
            if (sample.ids[k] < 0 || (sample.labels[k] < 0 && sample.labels[k] != -100)) {
                abort();
            }
            trained += k > 0 && sample.labels[k] != -100 ? 1 : 0;
        }
        if (trained != sample.trained || sample.line == 0 || (i == 0 && sample.continues)) {
            abort();
        }
        if (asks ? trained > 0 || sample.continues : sample.reference != NULL) {
            abort();
        }
        qlora_text_bytes copy; // all of the reference can be read
        memset(&copy, 0, sizeof copy);
        must(qlora_text_bytes_add(lib(), &copy, sample.reference, sample.reference_size));
        qlora_text_bytes_free(lib(), &copy);
    }
}

static bool bad(void* user, size_t line, const char* what) {
    (void)user;
    if (line == 0 || what[0] == 0) {
        abort();
    }
    return true;
}

static qlora_text_chat* chat_open(qlora_text_tok* tok, const char* name) {
    qlora_text_chat* chat = NULL;
    qlora_text_chat_desc desc;
    memset(&desc, 0, sizeof(desc));
    desc.tok = tok;
    desc.name = name;
    must(qlora_text_chat_open(lib(), &desc, &chat));
    return chat;
}

static int fuzz_data(const uint8_t* data, size_t size) {
    static qlora_text_tok* toks[2];
    static const char* const files[2] = {"tests/golden/text_byte.json",
                                         "tests/golden/text_spm.json"};
    static const char* const kinds[] = {"x.jsonl", "x.json", "x.txt", "x.csv", "x.tsv"};
    if (size < 2) {
        return 0;
    }
    size_t which = data[0] % 2;
    if (toks[which] == NULL) {
        must(qlora_text_tok_open(lib(), files[which], &toks[which]));
    }
    const char* text = (const char*)data + 2;
    size -= 2;
    qlora_text_data_desc desc;
    qlora_text_data* out = NULL;
    memset(&desc, 0, sizeof(desc));
    desc.path = kinds[data[0] / 2 % 8 % 5];
    desc.chat = chat_open(toks[which], qlora_text_chat_names(data[1] % 8));
    desc.chunk_tokens = data[1] & 32 ? 2 + data[0] / 16 : 0;
    desc.train_prompt = (data[1] & 64) != 0;
    desc.last_turn_only = (data[1] & 128) != 0;
    desc.columns = data[1] & 16 ? "text=question" : NULL;
    desc.prompts = (qlora_text_prompts)(data[0] / 64 % 3);
    desc.system = desc.prompts != QLORA_TEXT_LEARN && (data[0] & 32) ? "S" : NULL;
    desc.bad = data[1] & 8 ? bad : NULL;
    if (qlora_text_data_load(lib(), &desc, text, size, &out) == QLORA_OK) {
        check(out, desc.prompts != QLORA_TEXT_LEARN);
    } else if (out != NULL || qlora_text_last_error(lib())[0] == 0) {
        abort();
    }
    must(qlora_text_data_close(out));
    must(qlora_text_chat_close(desc.chat));
    return 0;
}
