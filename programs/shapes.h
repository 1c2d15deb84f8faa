// shapes.h - the shapes of public models, for plan and the benchmark of a step.
#ifndef SHAPES_H
#define SHAPES_H

#include <ctype.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef struct model_shape {
    const char* name;
    qlora_family family;
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
    int64_t window;       // 0 = none
    int64_t period;       // every n-th layer has no window
} model_shape;

// clang-format off
#define F(name) QLORA_FAMILY_##name
static const model_shape model_shapes[] = {
    {"smollm2-135m", F(LLAMA), 576, 30, 9, 3, 64, 1536, 49152, true, 1e5, 0, 0, 0},
    {"qwen2.5-0.5b", F(QWEN2), 896, 24, 14, 2, 64, 4864, 151936, true, 1e6, 0, 0, 0},
    {"llama-3.2-1b", F(LLAMA), 2048, 16, 32, 8, 64, 8192, 128256, true, 5e5, 32, 0, 0},
    {"qwen2.5-1.5b", F(QWEN2), 1536, 28, 12, 2, 128, 8960, 151936, true, 1e6, 0, 0, 0},
    {"qwen2.5-7b", F(QWEN2), 3584, 28, 28, 4, 128, 18944, 152064, false, 1e6, 0, 0, 0},
    {"llama-3.1-8b", F(LLAMA), 4096, 32, 32, 8, 128, 14336, 128256, false, 5e5, 8, 0, 0},
    {"llama-3.1-70b", F(LLAMA), 8192, 80, 64, 8, 128, 28672, 128256, false, 5e5, 8, 0, 0},
    {"qwen3-4b", F(QWEN3), 2560, 36, 32, 8, 128, 9728, 151936, true, 1e6, 0, 0, 0},
    {"gemma-2-2b", F(GEMMA2), 2304, 26, 8, 4, 256, 9216, 256000, true, 1e4, 0, 4096, 2},
    {"gemma-2-9b", F(GEMMA2), 3584, 42, 16, 8, 256, 14336, 256000, true, 1e4, 0, 4096, 2},
    {"gemma-3-270m", F(GEMMA3), 640, 18, 4, 1, 256, 2048, 262144, true, 1e6, 0, 512, 6},
    {"gemma-3-1b", F(GEMMA3), 1152, 26, 4, 1, 256, 6912, 262144, true, 1e6, 0, 512, 6},
    {"gemma-3-4b", F(GEMMA3), 2560, 34, 8, 4, 256, 10240, 262208, true, 1e6, 0, 1024, 6},
    {"gemma-3-12b", F(GEMMA3), 3840, 48, 16, 8, 256, 15360, 262208, true, 1e6, 0, 1024, 6},
    {"gemma-3-27b", F(GEMMA3), 5376, 62, 32, 16, 128, 21504, 262208, true, 1e6, 0, 1024, 6},
    {"phi-3.5-mini", F(PHI3), 3072, 32, 32, 32, 96, 8192, 32064, false, 1e4, 0, 0, 0},
    {"phi-4", F(PHI3), 5120, 40, 40, 10, 128, 17920, 100352, false, 2.5e5, 0, 0, 0},
    {"phi-4-mini", F(PHI3), 3072, 32, 24, 8, 128, 8192, 200064, true, 1e4, 0, 0, 0},
    {"smollm3-3b", F(SMOLLM3), 2048, 36, 16, 4, 128, 11008, 128256, true, 5e6, 0, 0, 0},
    {"olmo-2-1b", F(OLMO2), 2048, 16, 16, 16, 128, 8192, 100352, false, 5e5, 0, 0, 0},
    {"olmo-2-7b", F(OLMO2), 4096, 32, 32, 32, 128, 11008, 100352, false, 5e5, 0, 0, 0},
    {"olmo-3-7b", F(OLMO3), 4096, 32, 32, 32, 128, 11008, 100278, false, 5e5, 0, 4096, 4},
    {"olmo-3-32b", F(OLMO3), 5120, 64, 40, 8, 128, 27648, 100278, false, 5e5, 0, 4096, 4},
    {"granite-3.3-2b", F(GRANITE), 2048, 40, 32, 8, 64, 8192, 49159, true, 1e7, 0, 0, 0},
    {"granite-3.3-8b", F(GRANITE), 4096, 40, 32, 8, 128, 12800, 49159, true, 1e7, 0, 0, 0},
    {"granite-4.0-350m", F(GRANITE4), 1024, 28, 16, 4, 64, 2048, 100352, true, 1e7, 0, 0, 0},
    {"granite-4.0-1b", F(GRANITE4), 2048, 40, 16, 4, 128, 4096, 100352, true, 1e7, 0, 0, 0},
    {"granite-4.0-micro", F(GRANITE4), 2560, 40, 40, 8, 64, 8192, 100352, true, 1e7, 0, 0, 0},
    {"glm-4-9b-0414", F(GLM4), 4096, 40, 32, 2, 128, 13696, 151552, false, 1e4, 0, 0, 0},
    {"ministral-3-3b", F(MINISTRAL3), 3072, 26, 32, 8, 128, 9216, 131072, true, 1e6, 0, 0, 0},
    {"ministral-3-8b", F(MINISTRAL3), 4096, 34, 32, 8, 128, 14336, 131072, false, 1e6, 0, 0, 0},
    {"ministral-3-14b", F(MINISTRAL3), 5120, 40, 32, 8, 128, 16384, 131072, false, 1e9, 0, 0, 0},
    {"mistral-small-3.1-24b", F(MISTRAL), 5120, 40, 32, 8, 128, 32768, 131072, false, 1e9, 0, 0, 0},
    {"exaone-4.0-1.2b", F(EXAONE4), 2048, 30, 32, 8, 64, 4096, 102400, true, 1e6, 16, 0, 0},
    {"exaone-4.0-32b", F(EXAONE4), 5120, 64, 40, 8, 128, 27392, 102400, false, 1e6, 16, 4096, 4},
    {"seed-oss-36b", F(SEED_OSS), 5120, 64, 80, 8, 128, 27648, 155136, false, 1e7, 0, 0, 0},
    {"afm-4.5b", F(ARCEE), 2560, 36, 20, 4, 128, 18432, 128005, false, 1e4, 0, 0, 0},
    {"command-r7b", F(COHERE2), 4096, 32, 32, 8, 128, 14336, 256000, true, 5e4, 0, 4096, 4},
    {"command-a", F(COHERE2), 12288, 64, 96, 8, 128, 36864, 256000, true, 5e4, 0, 4096, 4},
    {"mixtral-8x7b", F(MIXTRAL), 4096, 32, 32, 8, 128, 14336, 32000, false, 1e6, 0, 0, 0},
    {"qwen3-30b-a3b", F(QWEN3_MOE), 2048, 48, 32, 4, 128, 6144, 151936, false, 1e6, 0, 0, 0},
    {"olmoe-1b-7b", F(OLMOE), 2048, 16, 16, 16, 128, 1024, 50304, false, 1e4, 0, 0, 0},
    {"granite-3.1-3b-a800m", F(GRANITE_MOE), 1536, 32, 24, 8, 64, 512, 49155, true, 5e6, 0, 0, 0},
    {"glm-4.5-air", F(GLM4_MOE), 4096, 46, 96, 8, 128, 10944, 151552, false, 1e6, 0, 0, 0},
};
#undef F

// The experts of those that have some: how many, how many a token uses, the width of one, that of
// an MLP beside them, and the first layers, which have an MLP instead.
static const struct {
    const char* name;
    int64_t experts;
    int64_t chosen;
    int64_t width;
    int64_t shared;
    int64_t dense;
} shape_experts[] = {
    {"mixtral-8x7b", 8, 2, 14336, 0, 0},
    {"qwen3-30b-a3b", 128, 8, 768, 0, 0},
    {"olmoe-1b-7b", 64, 8, 1024, 0, 0},
    {"granite-3.1-3b-a800m", 40, 8, 512, 0, 0},
    {"glm-4.5-air", 128, 8, 1408, 1408, 1},
    {"tiny-experts", 8, 2, 32, 48, 1},
};
// clang-format on
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

// The first `layers` layers of a shape, or all of them if that is 0. Returns what is wrong, or
// NULL.
static inline const char* shape_cut(const model_shape* from, int64_t layers, model_shape* out,
                                    char why[128]) {
    *out = *from;
    if (layers < 0 || layers > from->layers) {
        snprintf(why, 128, "--layers is %lld; %s has %lld layers", (long long)layers, from->name,
                 (long long)from->layers);
        return why;
    }
    out->layers = layers > 0 ? layers : from->layers;
    return NULL;
}

static inline void shape_mixture(const model_shape* s, qlora_model_config* c) {
    for (size_t i = 0; i < sizeof shape_experts / sizeof shape_experts[0]; i++) {
        if (strcmp(s->name, shape_experts[i].name) != 0) {
            continue;
        }
        c->experts = shape_experts[i].experts;
        c->experts_per_token = shape_experts[i].chosen;
        c->expert_intermediate = shape_experts[i].width;
        c->shared_intermediate = shape_experts[i].shared;
        c->qk_norm = s->family == QLORA_FAMILY_QWEN3_MOE || s->family == QLORA_FAMILY_OLMOE;
        c->renormalise = s->family == QLORA_FAMILY_QWEN3_MOE || s->family == QLORA_FAMILY_GLM4_MOE;
        c->rope_dims = s->family == QLORA_FAMILY_GLM4_MOE ? s->head_dim / 2 : 0;
        for (int64_t l = 0; l < shape_experts[i].dense; l++) {
            c->dense[l] = 1;
        }
    }
}

// What a family adds to the columns of the table, where it matters for memory or time.
static inline void shape_family(const model_shape* s, qlora_model_config* c) {
    bool granite = s->family == QLORA_FAMILY_GRANITE || s->family == QLORA_FAMILY_GRANITE4 ||
                   s->family == QLORA_FAMILY_GRANITE_MOE;
    c->qkv_bias = s->family == QLORA_FAMILY_QWEN2 || s->family == QLORA_FAMILY_GLM4 ||
                  s->family == QLORA_FAMILY_SEED_OSS || s->family == QLORA_FAMILY_GLM4_MOE;
    shape_mixture(s, c);
    if (s->family == QLORA_FAMILY_GEMMA2) {
        c->attention_cap = 50.0;
        c->logits_cap = 30.0;
    } else if (s->family == QLORA_FAMILY_GEMMA3) {
        c->rope_sliding.theta = 1e4;
    } else if (granite) {
        c->embedding_scale = 12.0;
        c->residual_scale = 0.22;
        c->attention_scale = 1.0 / (double)s->head_dim;
        c->logits_divisor = 8.0;
    } else if (s->family == QLORA_FAMILY_COHERE2) {
        c->logits_divisor = 4.0;
    } else if (strcmp(s->name, "phi-4-mini") == 0) {
        c->rope_dims = 96;
    }
    for (int64_t i = 0; i < s->layers; i++) {
        bool last = s->period > 0 && (i + 1) % s->period == 0;
        c->sliding[i] = s->window > 0 && !last ? 1 : 0;
        c->no_rope[i] = (s->family == QLORA_FAMILY_SMOLLM3 && (i + 1) % 4 == 0) ||
                                (s->family == QLORA_FAMILY_EXAONE4 && s->window > 0 && last) ||
                                (s->family == QLORA_FAMILY_COHERE2 && last)
                            ? 1
                            : 0;
    }
}

static inline qlora_model_config shape_config(const model_shape* s) {
    qlora_model_config c;
    memset(&c, 0, sizeof c);
    c.family = s->family;
    c.vocab = s->vocab;
    c.hidden = s->hidden;
    c.intermediate = s->intermediate;
    c.layers = s->layers;
    c.heads = s->heads;
    c.kv_heads = s->kv_heads;
    c.head_dim = s->head_dim;
    c.max_positions = s->family == QLORA_FAMILY_LLAMA ? 131072 : 32768;
    c.rms_eps = s->family == QLORA_FAMILY_LLAMA ? 1e-5 : 1e-6;
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
    c.window = s->window;
    c.tied = s->tied;
    c.dtype = QLORA_BF16;
    c.bos_id = -1;
    c.pad_id = -1;
    shape_family(s, &c);
    return c;
}

#endif
