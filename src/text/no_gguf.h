// ---- GGUF files in a build without them ---------------------------------------------------------

static qlora_result qlora__text_gguf_fail(qlora__env* env, const char* path) {
    return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                           "%s: GGUF files are not in this build: they were left out by "
                           "QLORA_TEXT_NO_GGUF",
                           path);
}

static qlora_result qlora__text_gguf_read(qlora__env* env, const char* path, const char* name,
                                          qlora_text_bytes* out, bool* found) {
    (void)name;
    (void)out;
    (void)found;
    return qlora__text_gguf_fail(env, path);
}

static qlora_result qlora__text_load_gguf(qlora__env* env, qlora_text_tok* tok, const char* label,
                                          const void* data, uint64_t size) {
    (void)tok;
    (void)data;
    (void)size;
    return qlora__text_gguf_fail(env, label);
}
