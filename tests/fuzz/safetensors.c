// safetensors.c - libFuzzer target: any bytes as a safetensors file.

#include "formats_world.h"

static int fuzz_safetensors(const uint8_t* data, size_t size) {
    static world w;
    static qlora__st st;
    world_begin(&w);
    if (qlora__st_parse(&w.env, "fuzz", data, size, &st) == QLORA_OK) {
        uint64_t sum = 0;
        uint64_t bytes = 0;
        for (uint32_t i = 0; i < st.count; i++) {
            const qlora__st_tensor* t = &st.tensors[i];
            for (uint64_t k = 0; k < t->bytes; k++) {
                sum += t->data[k];
            }
            bytes += t->bytes;
            if (qlora__st_find(&st, t->name) != t) {
                abort();
            }
            float value = 0.0f;
            if (qlora__st_is_float(t) && t->bytes > 0) {
                qlora__st_read_f32(t, qlora__st_elements(t) - 1, 1, &value);
            }
        }
        if (bytes + 8 + qlora__load_u64(data) != size || sum > bytes * 255) {
            abort();
        }
        char text[16];
        qlora__st_metadata(&st, "format", text, sizeof text);
        (void)(qlora__st_verify(&w.env, &st) == QLORA_OK);
        qlora__st_close(&w.env, &st);
    } else if (w.env.error[0] == '\0') {
        abort();
    }
    if (!world_end(&w)) {
        abort();
    }
    return 0;
}
