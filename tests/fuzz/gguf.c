// gguf.c - libFuzzer target: any bytes as a GGUF file.

#include "formats_world.h"

// Every value through every reader; each must fail with a message or give a value.
static void fuzz_gguf_values(qlora__env* env, const qlora__gguf* g) {
    for (uint32_t i = 0; i < g->count; i++) {
        const qlora__gguf_value* v = &g->values[i];
        char key[128];
        int64_t number = 0;
        double real = 0.0;
        bool flag = false;
        const char* text = NULL;
        size_t length = 0;
        snprintf(key, sizeof key, "%.*s", v->key_size < 127 ? (int)v->key_size : 127, v->key);
        if (v->key_size < 127 && qlora__gguf_find(g, key) != v) {
            abort();
        }
        (void)(qlora__gguf_get_int(env, g, key, 0, 0, 100, &number) == QLORA_OK);
        (void)(qlora__gguf_get_positive(env, g, key, 1.0, &real) == QLORA_OK);
        (void)(qlora__gguf_get_bool(env, g, key, false, &flag) == QLORA_OK);
        if (qlora__gguf_get_string(env, g, key, false, &text, &length) == QLORA_OK &&
            text != NULL && memchr(text, 1, length) == text + length) { // reads all of it
            abort();
        }
        uint64_t at = 0;
        for (uint64_t k = 0; v->kind == QLORA__GGUF_ARRAY && k < v->count; k++) {
            if (v->element == QLORA__GGUF_STRING) {
                qlora__gguf_next_string(v, &at, &length);
            } else {
                qlora__gguf_integer(v, k, &number);
                qlora__gguf_real(v, k, &real);
            }
        }
        if (at > v->bytes) {
            abort();
        }
    }
}

static int fuzz_gguf(const uint8_t* data, size_t size) {
    static world w;
    static qlora__gguf_file f;
    static float out[256];
    world_begin(&w);
    if (qlora__gguf_file_parse(&w.env, "fuzz", data, size, &f) == QLORA_OK) {
        fuzz_gguf_values(&w.env, &f.meta);
        uint64_t bytes = 0;
        for (uint32_t i = 0; i < f.count; i++) {
            const qlora__gguf_tensor* t = &f.tensors[i];
            uint64_t last = t->bytes - t->type->bytes;
            qlora__gguf_widen(t->type, t->data, t->type->block, out);
            qlora__gguf_widen(t->type, t->data + last, t->type->block, out);
            bytes += t->bytes;
            if (qlora__gguf_tensor_find(&f, t->name) != t) {
                abort();
            }
        }
        if (bytes > size) {
            abort();
        }
        qlora__gguf_close(&w.env, &f);
    } else if (w.env.error[0] == '\0') {
        abort();
    }
    if (!world_end(&w)) {
        abort();
    }
    return 0;
}
