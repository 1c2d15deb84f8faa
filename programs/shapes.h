// shapes.h - the shapes of public models, for plan and the benchmark of a step.
#ifndef SHAPES_H
#define SHAPES_H

#include <ctype.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

typedef struct model_shape {
    const char* name;
    bool qwen; // q, k and v have biases
    int64_t hidden;
    int64_t layers;
    int64_t heads;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t intermediate;
    int64_t vocab;
    bool tied;
    double theta;
    double llama3_factor; // 0 = no scaling
} model_shape;

static const model_shape model_shapes[] = {
    {"qwen2.5-0.5b", true, 896, 24, 14, 2, 64, 4864, 151936, true, 1e6, 0},
    {"llama-3.2-1b", false, 2048, 16, 32, 8, 64, 8192, 128256, true, 5e5, 32},
    {"qwen2.5-1.5b", true, 1536, 28, 12, 2, 128, 8960, 151936, true, 1e6, 0},
    {"qwen2.5-7b", true, 3584, 28, 28, 4, 128, 18944, 152064, false, 1e6, 0},
    {"llama-3.1-8b", false, 4096, 32, 32, 8, 128, 14336, 128256, false, 5e5, 8},
    {"llama-3.1-70b", false, 8192, 80, 64, 8, 128, 28672, 128256, false, 5e5, 8},
};
enum { MODEL_SHAPES = sizeof model_shapes / sizeof model_shapes[0] };

// The shape of this name, in any case, or NULL.
static inline const model_shape* shape_find(const char* name) {
    for (int i = 0; i < MODEL_SHAPES; i++) {
        const char* a = model_shapes[i].name;
        const char* b = name;
        while (*a != '\0' && *a == tolower((unsigned char)*b)) {
            a++;
            b++;
        }
        if (*a == '\0' && *b == '\0') {
            return &model_shapes[i];
        }
    }
    return NULL;
}

static inline qlora_model_config shape_config(const model_shape* s) {
    qlora_model_config c;
    memset(&c, 0, sizeof c);
    c.family = s->qwen ? QLORA_FAMILY_QWEN2 : QLORA_FAMILY_LLAMA;
    c.vocab = s->vocab;
    c.hidden = s->hidden;
    c.intermediate = s->intermediate;
    c.layers = s->layers;
    c.heads = s->heads;
    c.kv_heads = s->kv_heads;
    c.head_dim = s->head_dim;
    c.max_positions = s->qwen ? 32768 : 131072;
    c.rms_eps = s->qwen ? 1e-6 : 1e-5;
    c.rope.theta = s->theta;
    c.rope.factor = 1.0;
    if (s->llama3_factor > 0.0) {
        c.rope.type = QLORA_ROPE_LLAMA3;
        c.rope.factor = s->llama3_factor;
        c.rope.low_freq_factor = 1.0;
        c.rope.high_freq_factor = 4.0;
        c.rope.original_max_position = 8192.0;
    }
    c.rope_sliding = c.rope;
    c.tied = s->tied;
    c.qkv_bias = s->qwen;
    c.dtype = QLORA_BF16;
    c.bos_id = -1;
    c.pad_id = -1;
    return c;
}

#endif
