// same_models.c - writes small models with random weights, for tests/gates/same_bits.sh: one of
// each row of src/arch.h, and variants of Llama.
//
//   build/same_models tiny|small DIR
//
// DIR/NAME gets config.json and model.safetensors; the script adds a tokenizer of 257 tokens. The
// names of tensors come from src/arch.h, so a new row gives a new folder without a change here,
// unless its config needs keys that no other row has. The numbers are integers scaled by a power of
// two: any compiler writes the same files.
#define QLORA_STATIC
#define QLORA_IMPLEMENTATION
#include "qlora.h"

enum { VOCAB = 272, WINDOW = 6 };

typedef struct sizes {
    int hidden; // heads * head_dim: not every family can say how wide a head is
    int intermediate;
    int layers;
    int heads;
    int kv_heads;
} sizes;

typedef struct maker {
    qlora_ctx* ctx;
    sizes size;
    qlora_model_config config;
    char text[4096]; // config.json
    size_t used;
    FILE* data;
    char header[65536];
    size_t header_used;
    long long bytes;
    uint32_t state;
    bool failed;
} maker;

static void put(maker* m, const char* text) {
    size_t length = strlen(text);
    m->failed = m->failed || m->used + length >= sizeof m->text;
    if (!m->failed) {
        memcpy(m->text + m->used, text, length + 1);
        m->used += length;
    }
}

static void put_number(maker* m, const char* key, long long value) {
    char line[128];
    snprintf(line, sizeof line, ",\n \"%s\": %lld", key, value);
    put(m, line);
}

// The types of the layers: every second one has a window, if there are any.
static void put_layers(maker* m, const char* odd, const char* even) {
    put(m, ",\n \"layer_types\": [");
    for (int i = 0; i < m->size.layers; i++) {
        char line[64];
        snprintf(line, sizeof line, "%s\"%s\"", i > 0 ? ", " : "", i % 2 == 0 ? odd : even);
        put(m, line);
    }
    put(m, "]");
}

static void put_rope(maker* m, const qlora__arch* arch) {
    if ((arch->reads & QLORA__READS_QUERY_BETA) != 0) {
        put(m, ",\n \"rope_parameters\": {\"rope_type\": \"yarn\", \"rope_theta\": 10000.0,"
               " \"factor\": 4.0, \"beta_fast\": 32.0, \"beta_slow\": 1.0, \"mscale\": 1.0,"
               " \"mscale_all_dim\": 1.0, \"llama_4_scaling_beta\": 0.125,"
               " \"original_max_position_embeddings\": 16}");
    } else if ((arch->reads & QLORA__READS_LONGROPE) != 0) {
        put(m, ",\n \"original_max_position_embeddings\": 16,\n \"rope_theta\": 10000.0,\n"
               " \"rope_scaling\": {\"type\": \"longrope\"");
        for (int k = 0; k < 2; k++) {
            put(m, k == 0 ? ", \"short_factor\": [" : "], \"long_factor\": [");
            for (int i = 0; i < m->size.hidden / m->size.heads / 2; i++) {
                char line[32];
                snprintf(line, sizeof line, "%s%d.5", i > 0 ? ", " : "", 1 + k * i);
                put(m, line);
            }
        }
        put(m, "]}");
    } else if ((arch->reads & QLORA__READS_ROPE_PER_KIND) == 0) {
        put(m, ",\n \"rope_theta\": 10000.0");
    }
}

// The keys that a row of src/arch.h reads; all that changes the arithmetic is away from its
// neutral value.
static void put_family(maker* m, const qlora__arch* arch) {
    if ((arch->reads & QLORA__READS_MULTIPLIERS) != 0) {
        put(m, ",\n \"embedding_multiplier\": 3.0, \"residual_multiplier\": 0.75,"
               " \"attention_multiplier\": 0.25, \"logits_scaling\": 2.0");
    }
    if ((arch->reads & QLORA__READS_QUERY_SCALAR) != 0) {
        put_number(m, "query_pre_attn_scalar", m->size.hidden / m->size.heads); // as in GGUF
    }
    if ((arch->reads & QLORA__READS_CAPS) != 0) {
        put(m, ",\n \"attn_logit_softcapping\": 5.0, \"final_logit_softcapping\": 10.0");
    }
    if ((arch->reads & QLORA__READS_HYBRID) != 0) {
        put_number(m, "num_local_experts", 0);
        put_number(m, "shared_intermediate_size", m->size.intermediate);
        put(m, ",\n \"position_embedding_type\": \"rope\"");
        put_layers(m, "attention", "attention");
    }
    if (arch->nope == QLORA__NOPE_LISTED) {
        put(m, ",\n \"no_rope_layers\": [1, 0");
        put(m, m->size.layers > 2 ? ", 1]" : "]");
    }
    if (arch->window == QLORA__WINDOW_PATTERN) {
        put_layers(m, "sliding_attention", "full_attention");
    }
    if (arch->window == QLORA__WINDOW_QWEN) {
        put(m, ",\n \"use_sliding_window\": true, \"max_window_layers\": 1");
    }
    if (arch->window != QLORA__WINDOW_NONE && arch->window != QLORA__WINDOW_NOPE) {
        put_number(m, "sliding_window", WINDOW);
    }
    put_rope(m, arch);
}

static void put_config(maker* m, const qlora__arch* arch, const char* more) {
    bool gelu = (arch->has & QLORA__HAS_GELU) != 0;
    char line[256];
    m->used = 0;
    snprintf(line, sizeof line, "{\"model_type\": \"%s\",\n \"architectures\": [\"%s\"],\n",
             arch->model_type, arch->architecture);
    put(m, line);
    put(m, " \"torch_dtype\": \"bfloat16\", \"rms_norm_eps\": 1e-05,\n");
    const char* act = arch->layout->ffn == QLORA__FFN_PLAIN ? "relu2"
                      : gelu                                ? "gelu_pytorch_tanh"
                                                            : "silu";
    snprintf(line, sizeof line, " \"hidden_act\": \"%s\"", act);
    put(m, line);
    put_number(m, "vocab_size", VOCAB);
    put_number(m, "hidden_size", m->size.hidden);
    put_number(m, "intermediate_size", m->size.intermediate);
    put_number(m, "num_hidden_layers", m->size.layers);
    put_number(m, "num_attention_heads", m->size.heads);
    put_number(m, "num_key_value_heads", m->size.kv_heads);
    put_number(m, "head_dim", m->size.hidden / m->size.heads);
    put_number(m, "max_position_embeddings", 256);
    put_number(m, "bos_token_id", 256);
    put_number(m, "eos_token_id", 256);
    put_family(m, arch);
    put(m, more);
    put(m, "}\n");
}

static uint32_t random_bits(maker* m) {
    m->state = m->state * 1664525u + 1013904223u;
    return m->state >> 16;
}

// Adds the row of a tensor to the header of the safetensors file; its data must follow.
static void describe(maker* m, const char* name, const char* dtype, int64_t rows, int64_t cols,
                     int64_t bytes) {
    char shape[48];
    snprintf(shape, sizeof shape, cols > 0 ? "%lld,%lld" : "%lld", (long long)rows,
             (long long)cols);
    int n = snprintf(m->header + m->header_used, sizeof m->header - m->header_used,
                     "%c\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%lld,%lld]}",
                     m->header_used == 0 ? '{' : ',', name, dtype, shape, m->bytes,
                     m->bytes + (long long)bytes);
    m->failed = m->failed || n < 0 || (size_t)n >= sizeof m->header - m->header_used - 16;
    m->header_used += m->failed ? 0 : (size_t)n;
    m->bytes += (long long)bytes;
}

// A tensor in bf16: `middle` plus a number from -1/4 to 1/4. cols 0: a vector.
static void tensor(maker* m, const char* name, int64_t rows, int64_t cols, float middle) {
    int64_t count = rows * (cols > 0 ? cols : 1);
    describe(m, name, "BF16", rows, cols, count * 2);
    for (int64_t i = 0; i < count; i++) {
        uint16_t half =
            qlora__bf16_from(middle + ((float)(random_bits(m) & 0x3ff) - 511.5f) / 2048.0f);
        m->failed = m->failed || fwrite(&half, 2, 1, m->data) != 1;
    }
}

// A matrix in FP8: codes without NaNs, and a scale for each block of 128 x 128.
static void tensor_fp8(maker* m, const char* name, int64_t rows, int64_t cols) {
    char scales[200];
    int64_t down = (rows + 127) / 128;
    int64_t across = (cols + 127) / 128;
    describe(m, name, "F8_E4M3", rows, cols, rows * cols);
    for (int64_t i = 0; i < rows * cols; i++) {
        m->failed = m->failed || fputc((int)(random_bits(m) & 0xbf), m->data) == EOF;
    }
    snprintf(scales, sizeof scales, "%s_scale_inv", name);
    describe(m, scales, "F32", down, across, down * across * 4);
    for (int64_t i = 0; i < down * across; i++) {
        float scale = 0.125f / (float)(1 + i);
        m->failed = m->failed || fwrite(&scale, 4, 1, m->data) != 1;
    }
}

static void projection(maker* m, const qlora__projection_row* row, const char* prefix) {
    const qlora_model_config* c = &m->config;
    int64_t q = c->heads * c->head_dim;
    int64_t k = c->kv_heads * c->head_dim;
    const int64_t size[9][2] = {{q, c->hidden},
                                {k, c->hidden},
                                {k, c->hidden},
                                {c->hidden, q},
                                {c->intermediate, c->hidden},
                                {c->intermediate, c->hidden},
                                {c->hidden, c->intermediate},
                                {q + 2 * k, c->hidden},
                                {2 * c->intermediate, c->hidden}};
    bool bias = row->group == QLORA__QKV ? c->qkv_bias
                : row->group == QLORA__O ? c->o_bias
                                         : c->mlp_bias;
    char name[160];
    snprintf(name, sizeof name, "%s.%s.weight", prefix, row->module);
    if (c->quantized) {
        tensor_fp8(m, name, size[row->bit][0], size[row->bit][1]);
    } else {
        tensor(m, name, size[row->bit][0], size[row->bit][1], 0.0f);
    }
    if (bias) {
        snprintf(name, sizeof name, "%s.%s.bias", prefix, row->module);
        tensor(m, name, size[row->bit][0], 0, 0.0f);
    }
}

static void weights(maker* m, const qlora__arch* arch) {
    const qlora_model_config* c = &m->config;
    float one = (arch->has & QLORA__HAS_NORM_OFFSET) != 0 ? 0.0f : 1.0f;
    tensor(m, "model.embed_tokens.weight", c->vocab, c->hidden, 0.0f);
    tensor(m, "model.norm.weight", c->hidden, 0, one);
    for (int64_t l = 0; l < c->layers; l++) {
        char prefix[64];
        char name[160];
        snprintf(prefix, sizeof prefix, "model.layers.%lld", (long long)l);
        for (int i = 0; i < arch->layout->count; i++) {
            projection(m, &arch->layout->rows[i], prefix);
        }
        for (int i = 0; i < QLORA__NORMS; i++) {
            const char* module = qlora__arch_norm(arch, c, i);
            if (module != NULL) {
                snprintf(name, sizeof name, "%s.%s.weight", prefix, module);
                tensor(m, name, qlora__arch_norm_width(arch, c, i), 0, one);
            }
        }
    }
    if (!c->tied) {
        tensor(m, "lm_head.weight", c->vocab, c->hidden, 0.0f);
    }
}

static bool file_write(const char* path, const void* header, size_t size, FILE* body) {
    FILE* f = fopen(path, "wb");
    bool ok = f != NULL && fwrite(header, 1, size, f) == size;
    for (int c = body != NULL && ok ? fgetc(body) : EOF; c != EOF; c = fgetc(body)) {
        ok = ok && fputc(c, f) != EOF;
    }
    return f != NULL && fclose(f) == 0 && ok;
}

static bool model_write(maker* m, const qlora__arch* arch, const char* dir) {
    char path[4200];
    unsigned char length[8];
    snprintf(path, sizeof path, "%s/config.json", dir);
    if (m->failed || !file_write(path, m->text, m->used, NULL) ||
        qlora_config_read(m->ctx, dir, &m->config) != QLORA_OK) {
        return false;
    }
    memset(m->header, 0, sizeof m->header);
    m->header_used = 8; // the length
    m->header[m->header_used++] = '{';
    m->bytes = 0;
    m->state = 7;
    m->data = tmpfile();
    if (m->data == NULL) {
        return false;
    }
    weights(m, arch);
    m->header[9] = ' '; // instead of the first comma
    m->header[m->header_used++] = '}';
    while (m->header_used % 8 != 0) {
        m->header[m->header_used++] = ' ';
    }
    for (int i = 0; i < 8; i++) {
        length[i] = (unsigned char)((uint64_t)(m->header_used - 8) >> (8 * i));
    }
    memcpy(m->header, length, 8);
    rewind(m->data);
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    bool ok = !m->failed && file_write(path, m->header, m->header_used, m->data);
    fclose(m->data);
    return ok;
}

// Makes DIR/NAME, which must exist or be possible to make.
static bool make(maker* m, const qlora__arch* arch, const char* dir, const char* name,
                 const char* more) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    int made = qlora__os_make_dir(path, NULL);
    put_config(m, arch, more);
    if (made != 0 || !model_write(m, arch, path)) {
        fprintf(stderr, "same_models: %s: %s\n", path, qlora_last_error(m->ctx));
        return false;
    }
    puts(name);
    return true;
}

// Llama with what no family has by itself.
static const struct {
    const char* name;
    const char* more;
} variants[] = {{"llama-bias", ",\n \"attention_bias\": true, \"mlp_bias\": true"},
                {"llama-tied", ",\n \"tie_word_embeddings\": true"},
                {"llama-rope", ",\n \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 4.0,"
                               " \"low_freq_factor\": 1.0, \"high_freq_factor\": 4.0,"
                               " \"original_max_position_embeddings\": 32}"},
                {"llama-fp8",
                 ",\n \"quantization_config\": {\"quant_method\": \"fp8\", \"fmt\": \"e4m3\","
                 " \"activation_scheme\": \"dynamic\", \"weight_block_size\": [128, 128],"
                 " \"modules_to_not_convert\": [\"lm_head\"]}"}};

int main(int argc, char** argv) {
    static maker m;
    static const sizes tiny = {32, 64, 2, 2, 1};
    static const sizes small = {96, 160, 3, 3, 1};
    static const sizes wide = {256, 448, 2, 4, 2}; // several tiles of every product
    qlora_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.require_backend = QLORA_BACKEND_CPU;
    if (argc != 3 || (strcmp(argv[1], "tiny") != 0 && strcmp(argv[1], "small") != 0)) {
        fprintf(stderr, "usage: same_models tiny|small DIR\n");
        return 2;
    }
    bool has_wide = strcmp(argv[1], "small") == 0;
    m.size = has_wide ? small : tiny;
    bool ok = qlora_ctx_create(&desc, &m.ctx) == QLORA_OK;
    for (int i = 0; i < QLORA__ARCH_COUNT && ok; i++) {
        if ((qlora__archs[i].reads & QLORA__READS_EXPERTS) != 0) {
            continue; // golden folders have those
        }
        ok = make(&m, &qlora__archs[i], argv[2], qlora__archs[i].model_type, "");
    }
    for (size_t i = 0; i < sizeof variants / sizeof variants[0] && ok; i++) {
        ok = make(&m, &qlora__archs[0], argv[2], variants[i].name, variants[i].more);
    }
    if (has_wide && ok) {
        m.size = wide;
        ok = make(&m, &qlora__archs[0], argv[2], "llama-wide", "");
    }
    qlora_ctx_destroy(m.ctx);
    return ok ? 0 : 1;
}
