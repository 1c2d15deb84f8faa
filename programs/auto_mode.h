// auto_mode.h - what --mode auto is on the CPU, for the programs that train and generate.
#ifndef AUTO_MODE_H
#define AUTO_MODE_H

#include <stdbool.h>
#include <string.h>

// The line of qlora_describe that begins with `name`, after it; "" if there is none.
static inline void described(const char* text, const char* name, char out[64]) {
    const char* at = strstr(text, name);
    size_t size = 0;
    if (at != NULL) {
        at += strlen(name);
        size = strcspn(at, "\n(");
        while (size > 0 && at[size - 1] == ' ') {
            size--;
        }
        size = size < 63 ? size : 63;
        memcpy(out, at, size);
    }
    out[size] = '\0';
}

// Whether products of bf16 operands have instructions of their own, which makes them faster than
// those of f32. `text` is what qlora_describe says of the context.
static inline bool tier_has_bf16(const char* text) {
    static const char* const tiers[] = {"neon_bf16", "avx512_bf16", "amx"};
    char tier[64];
    described(text, "CPU tier: ", tier);
    for (size_t i = 0; i < sizeof tiers / sizeof tiers[0]; i++) {
        if (strcmp(tier, tiers[i]) == 0) {
            return true;
        }
    }
    return false;
}

static inline bool cpu_has_bf16(const qlora_ctx* ctx) {
    char text[4096];
    qlora_describe(ctx, text, sizeof text);
    return qlora_ctx_backend(ctx) == QLORA_BACKEND_CPU && tier_has_bf16(text);
}

#endif
