// ---- the files of a model folder, made from a GGUF file -----------------------------------------

// config.json: the ids at which generation ends.
static void qlora__text_gguf_stops(const qlora__gguf* g, qlora__json_writer* w) {
    static const char* const keys[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                                       "tokenizer.ggml.eom_token_id"};
    qlora__json_write_open(w, "eos_token_id", '[');
    int64_t seen[3] = {-1, -1, -1};
    for (int i = 0; i < 3; i++) {
        const qlora__gguf_value* v = qlora__gguf_find(g, keys[i]);
        int64_t id = -1;
        bool is_id = v != NULL && qlora__gguf_integer(v, 0, &id) && id >= 0 && id <= INT32_MAX;
        if (is_id && id != seen[0] && id != seen[1]) {
            qlora__json_write_int(w, NULL, id);
            seen[i] = id;
        }
    }
    qlora__json_write_close(w, ']');
}

// What a file of a model folder would contain, made from the metadata.
static qlora_result qlora__text_gguf_make(qlora__env* env, const qlora__gguf* g, const char* name,
                                          qlora_text_bytes* out, bool* found) {
    qlora__string text;
    qlora__json_writer w;
    bool config = strcmp(name, "tokenizer_config.json") == 0;
    if (strcmp(name, "chat_template.jinja") == 0) {
        const char* chat = NULL;
        size_t size = 0;
        QLORA__TRY(qlora__gguf_get_string(env, g, "tokenizer.chat_template", false, &chat, &size));
        *found = chat != NULL;
        return *found ? qlora__text_bytes_add(env, out, chat, size) : QLORA_OK;
    }
    *found = config || strcmp(name, "config.json") == 0;
    if (!*found) {
        return QLORA_OK;
    }
    qlora__string_begin(env, &text);
    qlora__json_write_begin(&w, &text, 2);
    qlora__json_write_open(&w, NULL, '{');
    if (config) {
        qlora__gguf_named_tokens(g, &w);
    } else {
        qlora__text_gguf_stops(g, &w);
    }
    qlora__json_write_close(&w, '}');
    qlora_result r = text.result;
    r = r == QLORA_OK ? qlora__text_bytes_add(env, out, text.data, text.size) : r;
    qlora__string_free(&text);
    return r;
}

static qlora_result qlora__text_gguf_read(qlora__env* env, const char* path, const char* name,
                                          qlora_text_bytes* out, bool* found) {
    qlora__map map;
    qlora__gguf g;
    QLORA__TRY(qlora__map_open(env, path, &map));
    qlora_result r = qlora__gguf_parse(env, path, map.data, map.size, &g);
    if (r == QLORA_OK) {
        r = qlora__text_gguf_make(env, &g, name, out, found);
        qlora__gguf_free(env, &g);
    }
    qlora__map_close(env, &map);
    return r;
}
