// folder_models.h - valid model and adapter folders, as small as possible, for folders.c.
//
// Every value that a config can leave out differs from its default, so that ignoring one changes
// the results.
#ifndef QLORA_FUZZ_FOLDER_MODELS_H
#define QLORA_FUZZ_FOLDER_MODELS_H

#include "fuzz/mutate.h"

// What a change of a value must do, unless the folder is refused:
//   matters    the results change
//   refused    the value may be left out, but not be another one
//   may        either
// Names are separated and followed by spaces, levels by '/'.
typedef struct folder_rules {
    const char* matters;
    const char* refused;
    const char* may;
} folder_rules;

typedef struct folder_config {
    const char* text;
    folder_rules rules;
    bool extras; // the adapter has DoRA's magnitudes and trained norms
} folder_config;

#define CONFIG_SIZES                                                                               \
    "\"vocab_size\":24,\"hidden_size\":16,\"intermediate_size\":24,\"num_hidden_layers\":2,"       \
    "\"num_attention_heads\":2,\"rms_norm_eps\":0.03,\"max_position_embeddings\":64,"              \
    "\"initializer_range\":0.02,\"use_cache\":true,\"transformers_version\":\"5.0.0\","
#define MATTERS_SIZES                                                                              \
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "              \
    "rms_norm_eps num_key_value_heads "

static const folder_config folder_configs[] = {
    {"{\"model_type\":\"llama\",\"architectures\":[\"LlamaForCausalLM\"]," CONFIG_SIZES
     "\"num_key_value_heads\":1,\"head_dim\":12,\"attention_bias\":true,\"mlp_bias\":true,"
     "\"rope_theta\":300.0,\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":4.0,"
     "\"low_freq_factor\":1.0,\"high_freq_factor\":4.0,\"original_max_position_embeddings\":32},"
     "\"tie_word_embeddings\":false,\"hidden_act\":\"silu\",\"dtype\":\"float32\"}",
     {MATTERS_SIZES "head_dim attention_bias mlp_bias rope_theta rope_scaling/factor "
                    "rope_scaling/low_freq_factor rope_scaling/high_freq_factor "
                    "rope_scaling/rope_type rope_scaling/original_max_position_embeddings ",
      "hidden_act ", "tie_word_embeddings rope_parameters "},
     false},
    {"{\"model_type\":\"qwen3\",\"architectures\":[\"Qwen3ForCausalLM\"]," CONFIG_SIZES
     "\"num_key_value_heads\":1,\"head_dim\":8,\"use_sliding_window\":true,\"sliding_window\":3,"
     "\"max_window_layers\":1,\"rope_parameters\":{\"rope_type\":\"yarn\",\"rope_theta\":300.0,"
     "\"factor\":4.0,\"beta_fast\":4.0,\"beta_slow\":0.25,\"attention_factor\":1.3,"
     "\"original_max_position_embeddings\":32},\"tie_word_embeddings\":true}",
     {MATTERS_SIZES
      "head_dim use_sliding_window sliding_window max_window_layers rope_parameters/rope_theta "
      "rope_parameters/factor rope_parameters/attention_factor rope_parameters/rope_type ",
      "",
      "tie_word_embeddings rope_parameters/beta_fast rope_parameters/beta_slow " // rounded
      "rope_parameters/original_max_position_embeddings "},
     false},
    {"{\"model_type\":\"gemma2\",\"architectures\":[\"Gemma2ForCausalLM\"]," CONFIG_SIZES
     "\"num_key_value_heads\":1,\"head_dim\":8,\"query_pre_attn_scalar\":5,"
     "\"attn_logit_softcapping\":0.7,\"final_logit_softcapping\":3.0,\"sliding_window\":3,"
     "\"layer_types\":[\"full_attention\",\"sliding_attention\"],\"rope_theta\":300.0,"
     "\"hidden_activation\":\"gelu_pytorch_tanh\"}",
     {MATTERS_SIZES "head_dim query_pre_attn_scalar attn_logit_softcapping sliding_window "
                    "final_logit_softcapping layer_types rope_theta ",
      "hidden_activation ", ""},
     false},
    {"{\"model_type\":\"granite\",\"architectures\":[\"GraniteForCausalLM\"]," CONFIG_SIZES
     "\"num_key_value_heads\":1,\"embedding_multiplier\":1.7,\"residual_multiplier\":0.6,"
     "\"attention_multiplier\":0.4,\"logits_scaling\":1.9,\"rope_theta\":300.0,"
     "\"rope_scaling\":{\"type\":\"linear\",\"factor\":2.5}}",
     {MATTERS_SIZES "embedding_multiplier residual_multiplier attention_multiplier "
                    "logits_scaling rope_theta rope_scaling/type rope_scaling/factor ",
      "", ""},
     false},
    {"{\"model_type\":\"phi3\",\"architectures\":[\"Phi3ForCausalLM\"]," CONFIG_SIZES
     "\"num_key_value_heads\":1,\"partial_rotary_factor\":0.5,\"sliding_window\":4,"
     "\"original_max_position_embeddings\":8,\"rope_theta\":300.0,\"rope_scaling\":"
     "{\"type\":\"longrope\",\"short_factor\":[1.5,1.25],\"long_factor\":[3.5,2.5]}}",
     {MATTERS_SIZES "partial_rotary_factor sliding_window original_max_position_embeddings "
                    "rope_theta rope_scaling/type rope_scaling/long_factor ",
      "", "rope_scaling/short_factor max_position_embeddings "},
     false},
    {"{\"model_type\":\"llama\",\"architectures\":[\"LlamaForCausalLM\"]," CONFIG_SIZES
     "\"num_key_value_heads\":1,\"head_dim\":12,\"rope_theta\":300.0,"
     "\"tie_word_embeddings\":false,\"quantization_config\":{\"quant_method\":\"fp8\","
     "\"fmt\":\"e4m3\",\"activation_scheme\":\"dynamic\",\"weight_block_size\":[128,128],"
     "\"modules_to_not_convert\":[\"lm_head\"]}}",
     {MATTERS_SIZES "head_dim rope_theta ",
      "quantization_config/quant_method quantization_config/fmt "
      "quantization_config/activation_scheme quantization_config/weight_block_size ",
      "tie_word_embeddings "},
     false},
    {"{\"model_type\":\"qwen3\",\"architectures\":[\"Qwen3ForCausalLM\"]," CONFIG_SIZES
     "\"num_key_value_heads\":1,\"head_dim\":8,\"rope_theta\":300.0,\"tie_word_embeddings\":true}",
     {MATTERS_SIZES "head_dim rope_theta ", "", "tie_word_embeddings rope_parameters "},
     true},
};
#define FOLDER_CONFIGS (sizeof folder_configs / sizeof folder_configs[0])

#define ADAPTER_TEXT(dora)                                                                         \
    "{\"peft_type\":\"LORA\",\"task_type\":\"CAUSAL_LM\",\"base_model_name_or_path\":\"x\","       \
    "\"bias\":\"none\",\"fan_in_fan_out\":false,\"inference_mode\":true,"                          \
    "\"init_lora_weights\":true,\"r\":2,\"lora_alpha\":5,\"lora_dropout\":0.0,"                    \
    "\"use_rslora\":true,\"use_dora\":" dora ",\"lora_bias\":false,\"modules_to_save\":null,"      \
    "\"target_modules\":[\"o_proj\",\"down_proj\"],\"exclude_modules\":[\"up_proj\"],"             \
    "\"rank_pattern\":{\"down_proj\":3},\"alpha_pattern\":{\"down_proj\":7},"                      \
    "\"layers_to_transform\":[1],\"peft_version\":\"0.21.2\"}"
#define ADAPTER_MATTERS "r lora_alpha use_rslora rank_pattern/down_proj alpha_pattern/down_proj "
#define ADAPTER_REFUSED "peft_type bias fan_in_fan_out lora_bias modules_to_save "
#define ADAPTER_MAY "target_modules exclude_modules layers_to_transform "

// Without extras and with them.
static const char* const adapter_texts[2] = {ADAPTER_TEXT("false"), ADAPTER_TEXT("true")};
static const folder_rules adapter_rules[2] = {
    {ADAPTER_MATTERS, ADAPTER_REFUSED "use_dora ", ADAPTER_MAY},
    {ADAPTER_MATTERS "use_dora ", ADAPTER_REFUSED, ADAPTER_MAY}};

// A safetensors file in the making.
typedef struct tensors {
    char header[8192];
    size_t used;
    unsigned char data[65536];
    size_t bytes;
    uint32_t state;
} tensors;

// Random numbers from -0.5 to 0.5; every second tensor is stored in bfloat16.
static void tensors_add(tensors* t, const char* name, int64_t rows, int64_t cols) {
    bool half = t->used % 2 != 0;
    size_t begin = t->bytes;
    for (int64_t i = 0; i < rows * (cols > 0 ? cols : 1); i++) {
        t->state = t->state * 1664525u + 1013904223u;
        float value = (float)(t->state >> 16) / 65536.0f - 0.5f;
        uint32_t bits = 0;
        memcpy(&bits, &value, 4);
        bits = half ? bits >> 16 : bits;
        for (int k = 0; k < (half ? 2 : 4); k++) {
            t->data[t->bytes++] = (unsigned char)(bits >> (8 * k));
        }
    }
    int n = snprintf(t->header + t->used, sizeof t->header - t->used,
                     "%c\"%s\":{\"dtype\":\"%s\",\"shape\":[%d", t->used == 0 ? '{' : ',', name,
                     half ? "BF16" : "F32", (int)rows);
    t->used += (size_t)n;
    n = cols > 0 ? snprintf(t->header + t->used, sizeof t->header - t->used, ",%d", (int)cols) : 0;
    t->used += (size_t)n;
    n = snprintf(t->header + t->used, sizeof t->header - t->used, "],\"data_offsets\":[%d,%d]}",
                 (int)begin, (int)t->bytes);
    t->used += (size_t)n;
}

// A weight in FP8: codes without NaNs, and one scale per block, of which there is one.
static void tensors_add_fp8(tensors* t, const char* name, int64_t rows, int64_t cols) {
    size_t begin = t->bytes;
    const float scale = 0.3f;
    for (int64_t i = 0; i < rows * cols; i++) {
        t->state = t->state * 1664525u + 1013904223u;
        t->data[t->bytes++] = (unsigned char)(t->state >> 24 & 0xbfu);
    }
    size_t middle = t->bytes;
    memcpy(t->data + t->bytes, &scale, sizeof scale);
    t->bytes += sizeof scale;
    int n = snprintf(
        t->header + t->used, sizeof t->header - t->used,
        ",\"%s\":{\"dtype\":\"F8_E4M3\",\"shape\":[%d,%d],\"data_offsets\":[%d,%d]},"
        "\"%s_scale_inv\":{\"dtype\":\"F32\",\"shape\":[1,1],\"data_offsets\":[%d,%d]}",
        name, (int)rows, (int)cols, (int)begin, (int)middle, name, (int)middle, (int)t->bytes);
    t->used += (size_t)n;
}

static buffer tensors_file(tensors* t) {
    unsigned char length[8];
    t->header[t->used++] = '}';
    for (int i = 0; i < 8; i++) {
        length[i] = (unsigned char)((uint64_t)t->used >> (8 * i));
    }
    buffer b = buffer_make(length, 8);
    buffer_splice(&b, 8, 8, t->header, t->used);
    buffer_splice(&b, b.size, b.size, t->data, t->bytes);
    return b;
}

// The size of a projection, by its number in qlora_target.
static void projection_size(const qlora_model_config* c, int bit, int64_t* rows, int64_t* cols) {
    int64_t q = c->heads * c->head_dim;
    int64_t k = c->kv_heads * c->head_dim;
    const int64_t sizes[9][2] = {{q, c->hidden},
                                 {k, c->hidden},
                                 {k, c->hidden},
                                 {c->hidden, q},
                                 {c->intermediate, c->hidden},
                                 {c->intermediate, c->hidden},
                                 {c->hidden, c->intermediate},
                                 {q + 2 * k, c->hidden},
                                 {2 * c->intermediate, c->hidden}};
    *rows = sizes[bit][0];
    *cols = sizes[bit][1];
}

static void norms_add(tensors* t, const qlora_model_config* c, int layer) {
    const qlora__arch* arch = qlora__arch_of(c->family);
    char name[128];
    for (int i = 0; i < QLORA__NORMS; i++) {
        if (qlora__arch_norm(arch, c, i) != NULL) {
            snprintf(name, sizeof name, "model.layers.%d.%s.weight", layer,
                     qlora__arch_norm(arch, c, i));
            tensors_add(t, name, qlora__arch_norm_width(arch, c, i), 0);
        }
    }
}

static buffer model_file(const qlora_model_config* c) {
    static tensors t;
    const qlora__arch* arch = qlora__arch_of(c->family);
    char name[128];
    memset(&t, 0, sizeof t);
    tensors_add(&t, "model.embed_tokens.weight", c->vocab, c->hidden);
    tensors_add(&t, "model.norm.weight", c->hidden, 0);
    for (int l = 0; l < (int)c->layers; l++) {
        const qlora__layout* layout = qlora__arch_layout(arch, c, l);
        for (int i = 0; i < layout->count; i++) {
            const qlora__projection_row* row = &layout->rows[i];
            int64_t rows = 0;
            int64_t cols = 0;
            bool bias = row->group == QLORA__QKV ? c->qkv_bias
                        : row->group == QLORA__O ? c->o_bias
                                                 : c->mlp_bias;
            projection_size(c, row->bit, &rows, &cols);
            snprintf(name, sizeof name, "model.layers.%d.%s.weight", l, row->module);
            if (c->quantized) {
                tensors_add_fp8(&t, name, rows, cols);
            } else {
                tensors_add(&t, name, rows, cols);
            }
            if (bias) {
                snprintf(name, sizeof name, "model.layers.%d.%s.bias", l, row->module);
                tensors_add(&t, name, rows, 0);
            }
        }
        norms_add(&t, c, l);
    }
    if (!c->tied) {
        tensors_add(&t, "lm_head.weight", c->vocab, c->hidden);
    }
    return tensors_file(&t);
}

// The adapter that adapter_texts describes: layer 1 only, o_proj and down_proj.
static buffer adapter_file(const qlora_model_config* c, bool dora) {
    static const struct {
        const char* module;
        int bit;
        int rank;
    } rows[] = {{"self_attn.o_proj", 3, 2}, {"mlp.down_proj", 6, 3}};
    static tensors t;
    char name[128];
    memset(&t, 0, sizeof t);
    for (int i = 0; i < 2; i++) {
        int64_t out = 0;
        int64_t in = 0;
        projection_size(c, rows[i].bit, &out, &in);
        for (int b = 0; b < 2; b++) {
            snprintf(name, sizeof name, "base_model.model.model.layers.1.%s.lora_%c.weight",
                     rows[i].module, b ? 'B' : 'A');
            tensors_add(&t, name, b ? out : rows[i].rank, b ? rows[i].rank : in);
        }
        if (dora) {
            snprintf(name, sizeof name, "base_model.model.model.layers.1.%s.lora_magnitude_vector",
                     rows[i].module);
            tensors_add(&t, name, out, 0);
        }
    }
    return tensors_file(&t);
}

// Every norm of the model, trained.
static buffer norms_file(const qlora_model_config* c) {
    static tensors t;
    memset(&t, 0, sizeof t);
    t.state = 1;
    tensors_add(&t, "model.norm.weight", c->hidden, 0);
    for (int l = 0; l < (int)c->layers; l++) {
        norms_add(&t, c, l);
    }
    return tensors_file(&t);
}

#endif
