// ---- Hugging Face config.json -------------------------------------------------------------------

static const struct {
    const char* model_type;
    qlora_family family;
    const char* architecture;
    const char* gguf_name;
} qlora__families[] = {{"llama", QLORA_FAMILY_LLAMA, "LlamaForCausalLM", "llama"},
                       {"mistral", QLORA_FAMILY_MISTRAL, "MistralForCausalLM", "llama"},
                       {"qwen2", QLORA_FAMILY_QWEN2, "Qwen2ForCausalLM", "qwen2"},
                       {"qwen3", QLORA_FAMILY_QWEN3, "Qwen3ForCausalLM", "qwen3"}};
#define QLORA__FAMILY_COUNT ((int)(sizeof qlora__families / sizeof qlora__families[0]))

// One object of a config file, with the environment for its messages.
typedef struct qlora__config_reader {
    qlora__env* env;
    const qlora__json* json;
    uint32_t object;
} qlora__config_reader;

// The value of a key; null counts as absent, as in transformers.
static uint32_t qlora__config_find(const qlora__config_reader* r, const char* key) {
    uint32_t value = qlora__json_find(r->json, r->object, key);
    return value != 0 && qlora__json_kind_of(r->json, value) == QLORA__JSON_NULL ? 0 : value;
}

// The value as written in the file, for messages.
static const char* qlora__config_show(const qlora__config_reader* r, uint32_t value, char out[48]) {
    const qlora__json_token* t = &r->json->tokens[value];
    uint32_t n = t->end - t->begin < 44 ? t->end - t->begin : 44;
    memcpy(out, r->json->text + t->begin, n);
    memcpy(out + n, t->end - t->begin > n ? "..." : "", t->end - t->begin > n ? 4 : 1);
    return out;
}

// An integer within [least, most]. If it is absent, the result is `fallback`; a negative fallback
// makes that an error.
static qlora_result qlora__config_int(const qlora__config_reader* r, const char* key,
                                      int64_t fallback, int64_t least, int64_t most, int64_t* out) {
    char shown[48];
    uint32_t value = qlora__config_find(r, key);
    if (value == 0) {
        if (fallback < 0) {
            return qlora__env_fail(r->env, QLORA_ERR_FORMAT, "%s: %s is missing", r->json->label,
                                   key);
        }
        *out = fallback;
        return QLORA_OK;
    }
    int64_t number = 0;
    if (!qlora__json_int(r->json, value, &number) || number < least || number > most) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT,
                               "%s: %s is %s; it must be an integer from %lld to %lld",
                               r->json->label, key, qlora__config_show(r, value, shown),
                               (long long)least, (long long)most);
    }
    *out = number;
    return QLORA_OK;
}

// A positive number. If it is absent, the result is `fallback`; a negative fallback makes that an
// error.
static qlora_result qlora__config_positive(const qlora__config_reader* r, const char* key,
                                           double fallback, double* out) {
    char shown[48];
    uint32_t value = qlora__config_find(r, key);
    if (value == 0) {
        if (fallback < 0.0) {
            return qlora__env_fail(r->env, QLORA_ERR_FORMAT, "%s: %s is missing", r->json->label,
                                   key);
        }
        *out = fallback;
        return QLORA_OK;
    }
    double number = 0.0;
    if (!qlora__json_double(r->json, value, &number) || !(number > 0.0) || number > 1e30) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT,
                               "%s: %s is %s; it must be positive and at most 1e30", r->json->label,
                               key, qlora__config_show(r, value, shown));
    }
    *out = number;
    return QLORA_OK;
}

static qlora_result qlora__config_bool(const qlora__config_reader* r, const char* key,
                                       bool fallback, bool* out) {
    char shown[48];
    uint32_t value = qlora__config_find(r, key);
    qlora__json_kind kind = value != 0 ? qlora__json_kind_of(r->json, value) : QLORA__JSON_NULL;
    if (value != 0 && kind != QLORA__JSON_TRUE && kind != QLORA__JSON_FALSE) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT, "%s: %s is %s; it must be true or false",
                               r->json->label, key, qlora__config_show(r, value, shown));
    }
    *out = value != 0 ? kind == QLORA__JSON_TRUE : fallback;
    return QLORA_OK;
}

// A token id below `vocab`, or -1 if it is absent; some old files contain -1 itself.
static qlora_result qlora__config_id(const qlora__config_reader* r, const char* key, int64_t vocab,
                                     int32_t* out) {
    int64_t id = -1;
    if (qlora__config_find(r, key) != 0) {
        QLORA__TRY(qlora__config_int(r, key, -1, -1, vocab - 1, &id));
    }
    *out = (int32_t)id;
    return QLORA_OK;
}

typedef char qlora__config_stop_ids_fit[QLORA__MAX_STOP_IDS <= QLORA_MAX_STOP_IDS ? 1 : -1];

// eos_token_id: one id or a list of ids.
static qlora_result qlora__config_stops(const qlora__config_reader* r, qlora_model_config* c) {
    qlora__stop_ids ids;
    ids.count = 0;
    QLORA__TRY(qlora__stop_ids_read(r->env, r->json, r->object, c->vocab, &ids));
    if (ids.count > 0) {
        memcpy(c->stop_ids, ids.id, sizeof ids.id);
        c->stop_count = ids.count;
    }
    return QLORA_OK;
}

static qlora_result qlora__config_refuse(const qlora__config_reader* r, const char* key,
                                         uint32_t value, const char* advice) {
    char shown[48];
    return qlora__env_fail(r->env, QLORA_ERR_UNSUPPORTED, "%s: %s \"%s\" is not supported; %s",
                           r->json->label, key, qlora__config_show(r, value, shown), advice);
}

static qlora_result qlora__config_yarn(const qlora__config_reader* r,
                                       const qlora__config_reader* top, const qlora_model_config* c,
                                       qlora_rope_desc* rope) {
    bool truncate = true;
    double fallback = (double)c->max_positions;
    QLORA__TRY(
        qlora__config_positive(top, "original_max_position_embeddings", fallback, &fallback));
    QLORA__TRY(qlora__config_positive(r, "original_max_position_embeddings", fallback,
                                      &rope->original_max_position));
    double stretch = (double)c->max_positions / rope->original_max_position;
    QLORA__TRY(qlora__config_positive(r, "factor", stretch > 1.0 ? stretch : -1.0, &rope->factor));
    QLORA__TRY(qlora__config_positive(r, "beta_fast", 32.0, &rope->beta_fast));
    QLORA__TRY(qlora__config_positive(r, "beta_slow", 1.0, &rope->beta_slow));
    QLORA__TRY(qlora__config_positive(r, "mscale", 0.0, &rope->mscale));
    QLORA__TRY(qlora__config_positive(r, "mscale_all_dim", 0.0, &rope->mscale_all_dim));
    QLORA__TRY(qlora__config_positive(r, "attention_factor", 0.0, &rope->attention_factor));
    QLORA__TRY(qlora__config_bool(r, "truncate", true, &truncate));
    rope->no_truncate = !truncate;
    return QLORA_OK;
}

static qlora_result qlora__config_llama3(const qlora__config_reader* r,
                                         const qlora__config_reader* top, qlora_rope_desc* rope) {
    double fallback = -1.0;
    if (qlora__config_find(top, "original_max_position_embeddings") != 0) {
        QLORA__TRY(
            qlora__config_positive(top, "original_max_position_embeddings", -1.0, &fallback));
    }
    QLORA__TRY(qlora__config_positive(r, "factor", -1.0, &rope->factor));
    QLORA__TRY(qlora__config_positive(r, "low_freq_factor", -1.0, &rope->low_freq_factor));
    QLORA__TRY(qlora__config_positive(r, "high_freq_factor", -1.0, &rope->high_freq_factor));
    QLORA__TRY(qlora__config_positive(r, "original_max_position_embeddings", fallback,
                                      &rope->original_max_position));
    if (!(rope->high_freq_factor > rope->low_freq_factor)) {
        return qlora__env_fail(
            r->env, QLORA_ERR_FORMAT,
            "%s: high_freq_factor is %g; it must be greater than low_freq_factor (%g)",
            r->json->label, rope->high_freq_factor, rope->low_freq_factor);
    }
    return QLORA_OK;
}

// One set of rotary parameters from the object `dict` (0 = none: all defaults). Keys that it does
// not contain are looked up at the top of the file.
static qlora_result qlora__config_rope(const qlora__config_reader* top, uint32_t dict,
                                       const qlora_model_config* c, qlora_rope_desc* rope) {
    static const struct {
        const char* name;
        qlora_rope_type type;
    } kinds[4] = {{"default", QLORA_ROPE_DEFAULT},
                  {"linear", QLORA_ROPE_LINEAR},
                  {"llama3", QLORA_ROPE_LLAMA3},
                  {"yarn", QLORA_ROPE_YARN}};
    qlora__config_reader r = *top;
    double theta = 10000.0;
    double partial = 1.0;
    memset(rope, 0, sizeof *rope);
    rope->factor = 1.0;
    QLORA__TRY(qlora__config_positive(top, "rope_theta", theta, &rope->theta));
    QLORA__TRY(qlora__config_positive(top, "partial_rotary_factor", partial, &partial));
    if (dict != 0) {
        r.object = dict;
        QLORA__TRY(qlora__config_positive(&r, "rope_theta", rope->theta, &rope->theta));
        QLORA__TRY(qlora__config_positive(&r, "partial_rotary_factor", partial, &partial));
        uint32_t type = qlora__config_find(&r, "rope_type");
        type = type != 0 ? type : qlora__config_find(&r, "type");
        int k = 0;
        while (type != 0 && k < 4 && !qlora__json_is(r.json, type, kinds[k].name)) {
            k++;
        }
        if (k == 4) {
            return qlora__config_refuse(&r, "rope_type", type,
                                        "supported values: default, linear, llama3, yarn");
        }
        rope->type = kinds[k].type;
    }
    if (!(rope->theta > 1.0)) {
        return qlora__env_fail(r.env, QLORA_ERR_FORMAT,
                               "%s: rope_theta is %g; it must be greater than 1", r.json->label,
                               rope->theta);
    }
    if (partial < 1.0 || partial > 1.0) {
        return qlora__env_fail(r.env, QLORA_ERR_UNSUPPORTED,
                               "%s: partial_rotary_factor is %g; only 1 is supported",
                               r.json->label, partial);
    }
    switch (rope->type) {
    case QLORA_ROPE_LINEAR:
        return qlora__config_positive(&r, "factor", -1.0, &rope->factor);
    case QLORA_ROPE_LLAMA3:
        return qlora__config_llama3(&r, top, rope);
    case QLORA_ROPE_YARN:
        return qlora__config_yarn(&r, top, c, rope);
    case QLORA_ROPE_DEFAULT:
        break;
    }
    return QLORA_OK;
}

static qlora_result qlora__config_need_object(const qlora__config_reader* r, const char* key,
                                              uint32_t value) {
    char shown[48];
    if (qlora__json_kind_of(r->json, value) != QLORA__JSON_OBJECT) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT, "%s: %s is %s; it must be an object",
                               r->json->label, key, qlora__config_show(r, value, shown));
    }
    return QLORA_OK;
}

// rope_parameters (new files: one set, or one per layer type) or rope_scaling (old files).
static qlora_result qlora__config_ropes(const qlora__config_reader* r, qlora_model_config* c) {
    const char* key = "rope_parameters";
    uint32_t dict = qlora__config_find(r, key);
    if (dict == 0) {
        key = "rope_scaling";
        dict = qlora__config_find(r, key);
    }
    uint32_t full = dict;
    uint32_t slide = dict;
    const char* full_key = key;
    const char* slide_key = key;
    if (dict != 0) {
        uint32_t per_full = qlora__json_find(r->json, dict, "full_attention");
        uint32_t per_slide = qlora__json_find(r->json, dict, "sliding_attention");
        if (per_full != 0 || per_slide != 0) {
            full = per_full != 0 ? per_full : per_slide;
            slide = per_slide != 0 ? per_slide : per_full;
            full_key = per_full != 0 ? "full_attention" : "sliding_attention";
            slide_key = per_slide != 0 ? "sliding_attention" : "full_attention";
        }
        QLORA__TRY(qlora__config_need_object(r, key, dict));
        QLORA__TRY(qlora__config_need_object(r, full_key, full));
        QLORA__TRY(qlora__config_need_object(r, slide_key, slide));
    }
    QLORA__TRY(qlora__config_rope(r, full, c, &c->rope));
    return qlora__config_rope(r, slide, c, &c->rope_sliding);
}

// The family from model_type, checked against the name of the architecture if there is one.
static qlora_result qlora__config_family(const qlora__config_reader* r, bool nested,
                                         qlora_model_config* c) {
    uint32_t type = qlora__config_find(r, "model_type");
    uint32_t names = qlora__config_find(r, "architectures");
    uint32_t architecture = names != 0 ? qlora__json_at(r->json, names, 0) : 0;
    if (type == 0 && architecture == 0) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT, "%s: model_type is missing",
                               r->json->label);
    }
    int k = 0;
    for (; k < QLORA__FAMILY_COUNT; k++) {
        if (qlora__json_is(r->json, type != 0 ? type : architecture,
                           type != 0 ? qlora__families[k].model_type
                                     : qlora__families[k].architecture)) {
            break;
        }
    }
    const char* advice = "supported families: llama, mistral, qwen2, qwen3";
    if (k == QLORA__FAMILY_COUNT) {
        return qlora__config_refuse(r, type != 0 ? "model_type" : "architecture",
                                    type != 0 ? type : architecture, advice);
    }
    if (architecture != 0 && !nested &&
        !qlora__json_is(r->json, architecture, qlora__families[k].architecture) &&
        !qlora__json_is(r->json, architecture, "LLaMAForCausalLM")) {
        return qlora__config_refuse(r, "architecture", architecture,
                                    "only causal language models are supported");
    }
    c->family = qlora__families[k].family;
    return QLORA_OK;
}

// The sizes, each with its own limits, and the relations between them.
static qlora_result qlora__config_sizes(const qlora__config_reader* r, qlora_model_config* c) {
    QLORA__TRY(qlora__config_int(r, "vocab_size", -1, 1, 1 << 24, &c->vocab));
    QLORA__TRY(qlora__config_int(r, "hidden_size", -1, 1, 1 << 20, &c->hidden));
    QLORA__TRY(qlora__config_int(r, "intermediate_size", -1, 1, 1 << 22, &c->intermediate));
    QLORA__TRY(qlora__config_int(r, "num_hidden_layers", -1, 1, QLORA_MAX_LAYERS, &c->layers));
    QLORA__TRY(qlora__config_int(r, "num_attention_heads", -1, 1, 1 << 14, &c->heads));
    QLORA__TRY(qlora__config_int(r, "num_key_value_heads", c->heads, 1, 1 << 14, &c->kv_heads));
    QLORA__TRY(
        qlora__config_int(r, "max_position_embeddings", 2048, 1, INT32_MAX, &c->max_positions));
    QLORA__TRY(qlora__config_positive(r, "rms_norm_eps", 1e-6, &c->rms_eps));
    if (c->heads % c->kv_heads != 0) {
        return qlora__env_fail(
            r->env, QLORA_ERR_FORMAT,
            "%s: num_attention_heads (%lld) is not a multiple of num_key_value_heads (%lld)",
            r->json->label, (long long)c->heads, (long long)c->kv_heads);
    }
    bool given = qlora__config_find(r, "head_dim") != 0;
    if (!given && c->family != QLORA_FAMILY_QWEN3 && c->hidden % c->heads != 0) {
        return qlora__env_fail(
            r->env, QLORA_ERR_FORMAT,
            "%s: head_dim is missing, and hidden_size (%lld) is not a multiple of "
            "num_attention_heads (%lld)",
            r->json->label, (long long)c->hidden, (long long)c->heads);
    }
    int64_t fallback = c->family == QLORA_FAMILY_QWEN3 ? 128 : c->hidden / c->heads;
    QLORA__TRY(qlora__config_int(r, "head_dim", fallback, 1, 1 << 14, &c->head_dim));
    if (c->head_dim % 2 != 0) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT, "%s: head_dim is %lld; it must be even",
                               r->json->label, (long long)c->head_dim);
    }
    if (c->head_dim > 256) {
        return qlora__env_fail(r->env, QLORA_ERR_UNSUPPORTED,
                               "%s: head_dim is %lld; the maximum is 256", r->json->label,
                               (long long)c->head_dim);
    }
    return QLORA_OK;
}

// Which layers have a sliding window, and how wide it is.
static qlora_result qlora__config_window(const qlora__config_reader* r, qlora_model_config* c) {
    int64_t first = 0;
    bool use = true;
    bool qwen = c->family == QLORA_FAMILY_QWEN2 || c->family == QLORA_FAMILY_QWEN3;
    uint32_t types = qlora__config_find(r, "layer_types");
    if (qwen) {
        QLORA__TRY(qlora__config_bool(r, "use_sliding_window", false, &use));
        QLORA__TRY(qlora__config_int(r, "max_window_layers", 28, 0, INT32_MAX, &first));
    } else if (c->family == QLORA_FAMILY_LLAMA) {
        use = false; // a llama file may contain the key, but the architecture has no window
    }
    if (use) {
        QLORA__TRY(qlora__config_int(r, "sliding_window", 0, 1, INT32_MAX, &c->window));
    }
    if (types != 0 && qlora__json_kind_of(r->json, types) != QLORA__JSON_ARRAY) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT, "%s: layer_types must be a list",
                               r->json->label);
    }
    if (types != 0 && r->json->tokens[types].count != c->layers) {
        return qlora__env_fail(
            r->env, QLORA_ERR_FORMAT,
            "%s: layer_types has length %u; it must have one entry per layer (%lld)",
            r->json->label, r->json->tokens[types].count, (long long)c->layers);
    }
    bool any = false;
    for (int64_t i = 0; i < c->layers; i++) {
        uint32_t type = types != 0 ? qlora__json_at(r->json, types, (uint32_t)i) : 0;
        bool slides = type != 0 ? qlora__json_is(r->json, type, "sliding_attention") : i >= first;
        if (type != 0 && !slides && !qlora__json_is(r->json, type, "full_attention")) {
            return qlora__config_refuse(r, "layer type", type,
                                        "supported types: full_attention, sliding_attention");
        }
        if (type != 0 && slides && c->family == QLORA_FAMILY_LLAMA) {
            return qlora__config_refuse(r, "layer type", type,
                                        "llama layers always have full attention");
        }
        c->sliding[i] = slides && c->window > 0 ? 1 : 0;
        any = any || c->sliding[i] != 0;
    }
    c->window = any ? c->window : 0;
    return QLORA_OK;
}

// quantization_config: bitsandbytes 4-bit is read tensor by tensor; everything else is rejected by
// name.
static qlora_result qlora__config_quantized(const qlora__config_reader* r, qlora_model_config* c) {
    uint32_t dict = qlora__config_find(r, "quantization_config");
    if (dict == 0) {
        return QLORA_OK;
    }
    qlora__config_reader q = *r;
    bool eight = false;
    q.object = dict;
    uint32_t method = qlora__config_find(&q, "quant_method");
    if (method != 0 && !qlora__json_is(r->json, method, "bitsandbytes")) {
        return qlora__config_refuse(r, "quant_method", method,
                                    "use the 16-bit model or one in bitsandbytes 4-bit format");
    }
    QLORA__TRY(qlora__config_bool(&q, "load_in_8bit", false, &eight));
    if (eight) {
        return qlora__env_fail(
            r->env, QLORA_ERR_UNSUPPORTED,
            "%s: quantization_config: load_in_8bit is not supported; use the 16-bit "
            "model or a 4-bit one",
            r->json->label);
    }
    c->quantized = true;
    return QLORA_OK;
}

static qlora_result qlora__config_switches(const qlora__config_reader* r, qlora_model_config* c) {
    static const struct {
        const char* name;
        qlora_dtype dtype;
    } dtypes[6] = {{"float32", QLORA_F32},         {"bfloat16", QLORA_BF16},
                   {"float16", QLORA_F16},         {"torch.float32", QLORA_F32},
                   {"torch.bfloat16", QLORA_BF16}, {"torch.float16", QLORA_F16}};
    bool attention = false;
    QLORA__TRY(qlora__config_bool(r, "tie_word_embeddings", false, &c->tied));
    if (c->family == QLORA_FAMILY_LLAMA || c->family == QLORA_FAMILY_QWEN3) {
        QLORA__TRY(qlora__config_bool(r, "attention_bias", false, &attention));
    }
    if (c->family == QLORA_FAMILY_LLAMA) {
        QLORA__TRY(qlora__config_bool(r, "mlp_bias", false, &c->mlp_bias));
    }
    c->qkv_bias = attention || c->family == QLORA_FAMILY_QWEN2;
    c->o_bias = attention;
    c->qk_norm = c->family == QLORA_FAMILY_QWEN3;
    uint32_t act = qlora__config_find(r, "hidden_act");
    act = act != 0 ? act : qlora__config_find(r, "hidden_activation");
    if (act != 0 && !qlora__json_is(r->json, act, "silu") &&
        !qlora__json_is(r->json, act, "swish")) {
        return qlora__config_refuse(r, "hidden_act", act, "only silu is supported");
    }
    uint32_t dtype = qlora__config_find(r, "dtype");
    dtype = dtype != 0 ? dtype : qlora__config_find(r, "torch_dtype");
    c->dtype = -1;
    for (int i = 0; i < 6; i++) {
        if (dtype != 0 && qlora__json_is(r->json, dtype, dtypes[i].name)) {
            c->dtype = (int32_t)dtypes[i].dtype;
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__config_from_json(qlora__env* env, const qlora__json* json,
                                            qlora_model_config* c) {
    qlora__config_reader r;
    r.env = env;
    r.json = json;
    r.object = 0;
    memset(c, 0, sizeof *c);
    if (qlora__json_kind_of(json, 0) != QLORA__JSON_OBJECT) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: expected a JSON object", json->label);
    }
    QLORA__TRY(qlora__config_quantized(&r, c));
    // A multimodal model keeps the parameters of its language model here.
    uint32_t text = qlora__config_find(&r, "text_config");
    bool nested = text != 0 && qlora__json_kind_of(json, text) == QLORA__JSON_OBJECT;
    r.object = nested ? text : 0;
    QLORA__TRY(qlora__config_family(&r, nested, c));
    QLORA__TRY(qlora__config_sizes(&r, c));
    QLORA__TRY(qlora__config_ropes(&r, c));
    QLORA__TRY(qlora__config_window(&r, c));
    QLORA__TRY(qlora__config_switches(&r, c));
    QLORA__TRY(qlora__config_id(&r, "bos_token_id", c->vocab, &c->bos_id));
    QLORA__TRY(qlora__config_id(&r, "pad_token_id", c->vocab, &c->pad_id));
    return qlora__config_stops(&r, c);
}

// Parses config.json from memory into *out.
static qlora_result qlora__config_parse(qlora__env* env, const char* label, const void* text,
                                        uint64_t size, qlora_model_config* out) {
    qlora__json json;
    qlora_model_config config;
    QLORA__TRY(qlora__json_parse(env, label, text, size, 0, &json));
    qlora_result result = qlora__config_from_json(env, &json, &config);
    qlora__json_free(env, &json);
    if (result == QLORA_OK) {
        *out = config;
    }
    return result;
}

// generation_config.json: its stop ids replace those of config.json.
static qlora_result qlora__config_parse_generation(qlora__env* env, const char* label,
                                                   const void* text, uint64_t size,
                                                   qlora_model_config* config) {
    qlora__json json;
    qlora__config_reader r;
    QLORA__TRY(qlora__json_parse(env, label, text, size, 0, &json));
    r.env = env;
    r.json = &json;
    r.object = 0;
    qlora_result result = qlora__config_stops(&r, config);
    qlora__json_free(env, &json);
    return result;
}

// Reads config.json of a model folder and, if it exists, generation_config.json.
static QLORA__UNUSED qlora_result qlora__config_read_dir(qlora__env* env, const char* dir,
                                                         qlora_model_config* out) {
    char path[QLORA__PATH_ROOM];
    qlora__map map;
    qlora_model_config config;
    QLORA__TRY(qlora__path_join(env, dir, "config.json", path));
    QLORA__TRY(qlora__map_open(env, path, &map));
    qlora_result result = qlora__config_parse(env, path, map.data, map.size, &config);
    qlora__map_close(env, &map);
    QLORA__TRY(result);
    QLORA__TRY(qlora__path_join(env, dir, "generation_config.json", path));
    bool exists = false;
    QLORA__TRY(qlora__file_exists(env, path, &exists));
    if (exists) {
        QLORA__TRY(qlora__map_open(env, path, &map));
        result = qlora__config_parse_generation(env, path, map.data, map.size, &config);
        qlora__map_close(env, &map);
        QLORA__TRY(result);
    }
    *out = config;
    return QLORA_OK;
}
