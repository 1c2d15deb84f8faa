// ---- Hugging Face config.json -------------------------------------------------------------------

// Why a model_type that has no row is refused.
static const char* qlora__config_reason(const qlora__config_reader* r, uint32_t type,
                                        char out[512]) {
    char word[80];
    size_t length = qlora__json_string(r->json, type, word + 1, sizeof word - 2);
    word[0] = ' ';
    for (size_t i = 0; length > 0 && length < sizeof word - 2 &&
                       i < sizeof qlora__refused_archs / sizeof qlora__refused_archs[0];
         i++) {
        memcpy(word + 1 + length, " ", 2);
        if (strstr(qlora__refused_archs[i].model_types, word) != NULL) {
            return qlora__refused_archs[i].reason;
        }
    }
    size_t used = 0;
    qlora__append(out, 512, &used, "supported families:");
    for (int i = 0; i < QLORA__ARCH_COUNT; i++) {
        qlora__append(out, 512, &used, "%s %s", i > 0 ? "," : "", qlora__archs[i].model_type);
    }
    return out;
}

// The row of the value of model_type, or of architectures if there is no model_type.
static const qlora__arch* qlora__config_row(const qlora__config_reader* r, uint32_t type,
                                            uint32_t architecture) {
    for (int k = 0; k < QLORA__ARCH_COUNT; k++) {
        if (qlora__json_is(r->json, type != 0 ? type : architecture,
                           type != 0 ? qlora__archs[k].model_type : qlora__archs[k].architecture)) {
            return &qlora__archs[k];
        }
    }
    return NULL;
}

// The wrapper of a multimodal folder; NULL if it is none that is known.
static const qlora__wrapper* qlora__config_wrapper(const qlora__config_reader* r, uint32_t type,
                                                   uint32_t architecture) {
    for (int k = 0; k < QLORA__WRAPPER_COUNT; k++) {
        if (qlora__json_is(r->json, type != 0 ? type : architecture,
                           type != 0 ? qlora__wrappers[k].model_type
                                     : qlora__wrappers[k].architecture)) {
            return &qlora__wrappers[k];
        }
    }
    return NULL;
}

// The text part of a multimodal folder: r is moved to it.
static qlora_result qlora__config_text_part(qlora__config_reader* r, const qlora__wrapper* wrapper,
                                            const qlora__arch** out) {
    uint32_t text = qlora__config_find(r, "text_config");
    uint32_t type = 0;
    const char* name = wrapper->texts[0];
    if (text != 0) {
        QLORA__TRY(qlora__config_need_object(r, "text_config", text));
        r->object = text;
        type = qlora__config_find(r, "model_type");
    }
    for (int i = 0; type != 0 && i < 2; i++) {
        if (wrapper->texts[i] != NULL && qlora__json_is(r->json, type, wrapper->texts[i])) {
            name = wrapper->texts[i];
            type = 0;
        }
    }
    if (type != 0) {
        char reason[512];
        return qlora__config_refuse(r, "model_type of text_config", type,
                                    qlora__config_reason(r, type, reason));
    }
    for (int k = 0; k < QLORA__ARCH_COUNT; k++) {
        *out = strcmp(qlora__archs[k].model_type, name) == 0 ? &qlora__archs[k] : *out;
    }
    return QLORA_OK;
}

// The family from model_type, checked against the name of the architecture if there is one. In a
// multimodal folder, r is moved to the text part.
static qlora_result qlora__config_family(qlora__config_reader* r, const qlora__arch** out,
                                         qlora_model_config* c) {
    char reason[512];
    uint32_t type = qlora__config_find(r, "model_type");
    uint32_t names = qlora__config_find(r, "architectures");
    uint32_t architecture = names != 0 ? qlora__json_at(r->json, names, 0) : 0;
    if (type == 0 && architecture == 0) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT, "%s: model_type is missing",
                               r->json->label);
    }
    const qlora__wrapper* wrapper = qlora__config_wrapper(r, type, architecture);
    const qlora__arch* arch = qlora__config_row(r, type, architecture);
    const char* key = type != 0 ? "model_type" : "architecture";
    uint32_t value = type != 0 ? type : architecture;
    if (wrapper == NULL && qlora__config_find(r, "text_config") != 0) {
        return qlora__config_refuse(r, key, value,
                                    "the names of the text part of this multimodal folder are not "
                                    "known");
    }
    if (wrapper == NULL && arch == NULL) {
        return qlora__config_refuse(r, key, value, qlora__config_reason(r, value, reason));
    }
    const char* wanted = wrapper != NULL ? wrapper->architecture : arch->architecture;
    if (architecture != 0 && !qlora__json_is(r->json, architecture, wanted) &&
        !qlora__json_is(r->json, architecture, "LLaMAForCausalLM")) {
        return qlora__config_refuse(r, "architecture", architecture,
                                    "only causal language models are supported");
    }
    if (wrapper != NULL) {
        QLORA__TRY(qlora__config_text_part(r, wrapper, &arch));
    }
    c->wrapped = wrapper != NULL;
    c->family = arch->family;
    *out = arch;
    return QLORA_OK;
}

// A size, with the default of the family if there is one.
static qlora_result qlora__config_size(const qlora__config_reader* r, const char* key,
                                       int32_t fallback, int64_t most, int64_t* out) {
    return qlora__config_int(r, key, fallback > 0 ? fallback : -1, 1, most, out);
}

// The sizes, each with its own limits, and the relations between them.
static qlora_result qlora__config_sizes(const qlora__config_reader* r, const qlora__arch* arch,
                                        qlora_model_config* c) {
    const qlora__arch_defaults* d = &arch->defaults;
    bool hybrid = (arch->reads & QLORA__READS_HYBRID) != 0;
    const char* inner = hybrid ? "shared_intermediate_size" : "intermediate_size";
    QLORA__TRY(qlora__config_size(r, "vocab_size", d->vocab, 1 << 24, &c->vocab));
    QLORA__TRY(qlora__config_size(r, "hidden_size", d->hidden, 1 << 20, &c->hidden));
    QLORA__TRY(qlora__config_size(r, inner, d->intermediate, 1 << 22, &c->intermediate));
    QLORA__TRY(qlora__config_size(r, "num_hidden_layers", d->layers, QLORA_MAX_LAYERS, &c->layers));
    QLORA__TRY(qlora__config_size(r, "num_attention_heads", d->heads, 1 << 14, &c->heads));
    bool given = d->kv_heads == 0 || qlora__config_has(r, "num_key_value_heads"); // null = heads
    int64_t kv_heads = given ? c->heads : d->kv_heads;
    QLORA__TRY(qlora__config_int(r, "num_key_value_heads", kv_heads, 1, 1 << 14, &c->kv_heads));
    QLORA__TRY(qlora__config_int(r, "max_position_embeddings", d->max_positions, 1, INT32_MAX,
                                 &c->max_positions));
    bool mean = (arch->has & QLORA__HAS_MEAN_NORM) != 0;
    const char* eps = mean ? "layer_norm_eps" : "rms_norm_eps";
    QLORA__TRY(qlora__config_positive(r, eps, d->eps, &c->rms_eps));
    if (c->heads % c->kv_heads != 0) {
        return qlora__env_fail(
            r->env, QLORA_ERR_FORMAT,
            "%s: num_attention_heads (%lld) is not a multiple of num_key_value_heads (%lld)",
            r->json->label, (long long)c->heads, (long long)c->kv_heads);
    }
    given = d->head_dim == 0 || qlora__config_has(r, "head_dim"); // null = hidden / heads
    if (given && qlora__config_find(r, "head_dim") == 0 && c->hidden % c->heads != 0) {
        return qlora__env_fail(
            r->env, QLORA_ERR_FORMAT,
            "%s: head_dim is missing, and hidden_size (%lld) is not a multiple of "
            "num_attention_heads (%lld)",
            r->json->label, (long long)c->hidden, (long long)c->heads);
    }
    int64_t fallback = given ? c->hidden / c->heads : d->head_dim;
    QLORA__TRY(qlora__config_int(r, "head_dim", fallback, 1, 1 << 14, &c->head_dim));
    if ((arch->reads & QLORA__READS_NO_HEAD_DIM) != 0 && c->head_dim * c->heads != c->hidden) {
        return qlora__env_fail(
            r->env, QLORA_ERR_UNSUPPORTED,
            "%s: head_dim is %lld; transformers ignores it in this family, whose "
            "heads have hidden_size / num_attention_heads columns",
            r->json->label, (long long)c->head_dim);
    }
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

// The period of the layers without a window: the n-th, 2n-th, ... have full attention. It may also
// be a string with one letter per layer, which repeats: L = window, G = full attention.
static qlora_result qlora__config_pattern(const qlora__config_reader* r, const qlora__arch* arch,
                                          const qlora_model_config* c, uint8_t* slides) {
    int64_t period = arch->defaults.pattern;
    char letters[QLORA_MAX_LAYERS];
    const char* key = "sliding_window_pattern";
    bool reads = (arch->reads & QLORA__READS_PATTERN) != 0;
    uint32_t value = reads ? qlora__config_find(r, key) : 0;
    size_t length = 0;
    memset(slides, 0, (size_t)c->layers);
    if (c->window == 0) {
        return QLORA_OK; // files without a window may say 0
    }
    if (value != 0 && qlora__json_kind_of(r->json, value) == QLORA__JSON_STRING) {
        length = qlora__json_string(r->json, value, letters, sizeof letters);
        if (length == 0 || length >= sizeof letters || strspn(letters, "LG") != length) {
            return qlora__config_refuse(r, key, value, "it must consist of the letters L and G");
        }
    } else if (value != 0) {
        QLORA__TRY(qlora__config_int(r, key, period, 1, INT32_MAX, &period));
    }
    for (int64_t i = 0; i < c->layers; i++) {
        slides[i] = length > 0 ? letters[(size_t)i % length] == 'L' : (i + 1) % period != 0;
    }
    return QLORA_OK;
}

// The width of the window, if the model uses one, and the layers that would have it.
static qlora_result qlora__config_window_rule(const qlora__config_reader* r,
                                              const qlora__arch* arch, qlora_model_config* c,
                                              uint8_t* slides) {
    int64_t first = 0;
    bool use = arch->window != QLORA__WINDOW_NONE; // a file may have the key, the block no window
    if (arch->window == QLORA__WINDOW_QWEN || arch->window == QLORA__WINDOW_NOPE ||
        arch->window == QLORA__WINDOW_USED || arch->window == QLORA__WINDOW_LISTED) {
        QLORA__TRY(qlora__config_bool(r, "use_sliding_window", false, &use));
    }
    if (arch->window == QLORA__WINDOW_QWEN) {
        QLORA__TRY(qlora__config_int(r, "max_window_layers", 28, 0, INT32_MAX, &first));
    }
    if (use && arch->window == QLORA__WINDOW_LISTED && qlora__config_find(r, "layer_types") == 0) {
        return qlora__env_fail(r->env, QLORA_ERR_UNSUPPORTED,
                               "%s: use_sliding_window is true, but layer_types is missing",
                               r->json->label);
    }
    if (use) {
        int64_t fallback = qlora__config_has(r, "sliding_window") ? 0 : arch->defaults.window;
        QLORA__TRY(qlora__config_int(r, "sliding_window", fallback, 1, INT32_MAX, &c->window));
    }
    for (int64_t i = 0; i < c->layers; i++) {
        slides[i] = arch->window == QLORA__WINDOW_NOPE ? c->no_rope[i] : i >= first;
    }
    return arch->window == QLORA__WINDOW_PATTERN ? qlora__config_pattern(r, arch, c, slides)
                                                 : QLORA_OK;
}

// Checks the entry `type` of layer_types: known, and one that the block really has.
static qlora_result qlora__config_layer_type(const qlora__config_reader* r, const qlora__arch* arch,
                                             uint32_t type, bool full, bool slides,
                                             int64_t window) {
    bool hybrid = (arch->reads & QLORA__READS_HYBRID) != 0;
    if (!slides && !full) {
        return qlora__config_refuse(r, "layer type", type,
                                    hybrid ? "recurrent (state-space) layers are not supported"
                                           : "supported types: full_attention, "
                                             "sliding_attention");
    }
    bool fixed =
        slides ? arch->window == QLORA__WINDOW_NONE
               : (arch->window == QLORA__WINDOW_EVERY || arch->window == QLORA__WINDOW_USED) &&
                     window > 0;
    if (fixed) { // transformers does not look at the list
        char advice[96];
        snprintf(advice, sizeof advice, "%s layers always have %s", arch->model_type,
                 slides ? "full attention" : "the window");
        return qlora__config_refuse(r, "layer type", type, advice);
    }
    if (slides && window == 0) { // transformers refuses it, or takes the window that is off
        return qlora__config_refuse(r, "layer type", type,
                                    "sliding_window is missing, or use_sliding_window is not true");
    }
    return QLORA_OK;
}

// Which layers have a sliding window, and how wide it is.
static qlora_result qlora__config_window(const qlora__config_reader* r, const qlora__arch* arch,
                                         qlora_model_config* c) {
    uint8_t slides[QLORA_MAX_LAYERS];
    bool hybrid = (arch->reads & QLORA__READS_HYBRID) != 0;
    uint32_t types = qlora__config_find(r, "layer_types");
    QLORA__TRY(qlora__config_window_rule(r, arch, c, slides));
    if (types == 0 && hybrid) {
        types = qlora__config_find(r, "layers_block_type");
    }
    if (types == 0 && hybrid) {
        return qlora__env_fail(r->env, QLORA_ERR_UNSUPPORTED,
                               "%s: layer_types is missing, so all layers are recurrent "
                               "(state-space), which is not supported",
                               r->json->label);
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
        bool full = type != 0 && (qlora__json_is(r->json, type, "full_attention") ||
                                  (hybrid && qlora__json_is(r->json, type, "attention")));
        if (type != 0) {
            slides[i] = qlora__json_is(r->json, type, "sliding_attention");
        }
        if (type != 0) {
            QLORA__TRY(qlora__config_layer_type(r, arch, type, full, slides[i] != 0, c->window));
        }
        c->sliding[i] = slides[i] && c->window > 0 ? 1 : 0;
        any = any || c->sliding[i] != 0;
        if (arch->nope == QLORA__NOPE_FULL || arch->nope == QLORA__NOPE_ALL_FULL) {
            bool some = c->window > 0 || arch->nope == QLORA__NOPE_ALL_FULL;
            c->no_rope[i] = some && c->sliding[i] == 0 ? 1 : 0;
        }
    }
    c->window = any ? c->window : 0;
    return QLORA_OK;
}

// The layers that are not rotated, where they do not follow from the windows.
static qlora_result qlora__config_nope(const qlora__config_reader* r, const qlora__arch* arch,
                                       qlora_model_config* c) {
    if (arch->nope == QLORA__NOPE_UNNAMED) {
        uint32_t type = qlora__config_find(r, "position_embedding_type");
        bool rope = type != 0 && qlora__json_is(r->json, type, "rope");
        if (type != 0 && !rope && !qlora__json_is(r->json, type, "nope")) {
            return qlora__config_refuse(r, "position_embedding_type", type,
                                        "supported values: rope, nope");
        }
        memset(c->no_rope, rope ? 0 : 1, (size_t)c->layers);
    }
    if (arch->nope != QLORA__NOPE_LISTED) {
        return QLORA_OK;
    }
    int64_t period = 4;
    uint32_t list = qlora__config_find(r, "no_rope_layers");
    QLORA__TRY(qlora__config_int(r, "no_rope_layer_interval", period, 1, INT32_MAX, &period));
    if (list != 0 &&
        (qlora__json_kind_of(r->json, list) != QLORA__JSON_ARRAY ||
         (r->json->tokens[list].count > 0 && r->json->tokens[list].count < c->layers))) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT,
                               "%s: no_rope_layers must be a list with at least one entry per "
                               "layer (%lld)",
                               r->json->label, (long long)c->layers);
    }
    bool listed = list != 0 && r->json->tokens[list].count > 0;
    for (int64_t i = 0; i < c->layers; i++) {
        int64_t rotated = (i + 1) % period != 0;
        if (listed &&
            (!qlora__json_int(r->json, qlora__json_at(r->json, list, (uint32_t)i), &rotated) ||
             rotated < 0 || rotated > 1)) {
            return qlora__env_fail(r->env, QLORA_ERR_FORMAT,
                                   "%s: no_rope_layers[%lld] must be 0 (no rotation) or 1",
                                   r->json->label, (long long)i);
        }
        c->no_rope[i] = rotated == 0 ? 1 : 0;
    }
    return QLORA_OK;
}

// An FP8 quantization_config: e4m3 with one scale per 128 x 128 block. What it says beyond that
// could change the meaning of the weights and is rejected by name, unless it is null. Its lists of
// modules that are converted or not are not read: their tensors say so.
static qlora_result qlora__config_fp8(const qlora__config_reader* q) {
    static const char* const keys[] = {"quant_method",      "fmt",        "activation_scheme",
                                       "weight_block_size", "dequantize", "modules_to_not_convert",
                                       "ignored_layers",    "scale_fmt",  "expert_dtype"};
    const qlora__json* json = q->json;
    const struct {
        const char* key;
        const char* only;
    } texts[] = {{"fmt", "e4m3"},
                 {"activation_scheme", "dynamic"},
                 {"scale_fmt", "float"},
                 {"expert_dtype", "fp8"}};
    uint32_t end = json->tokens[q->object].next;
    for (uint32_t k = q->object + 1; k < end; k = json->tokens[k + 1].next) {
        bool known = qlora__json_kind_of(json, k + 1) == QLORA__JSON_NULL;
        for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
            known = known || qlora__json_is(json, k, keys[i]);
        }
        if (!known) {
            char shown[48];
            return qlora__env_fail(q->env, QLORA_ERR_UNSUPPORTED,
                                   "%s: quantization_config: %s is not supported with "
                                   "quant_method fp8",
                                   json->label, qlora__config_show(q, k, shown));
        }
    }
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        uint32_t value = qlora__config_find(q, texts[i].key);
        if (value != 0 && !qlora__json_is(json, value, texts[i].only)) {
            char shown[48];
            return qlora__env_fail(q->env, QLORA_ERR_UNSUPPORTED,
                                   "%s: quantization_config: %s is %s; only %s is supported",
                                   json->label, texts[i].key, qlora__config_show(q, value, shown),
                                   texts[i].only);
        }
    }
    uint32_t block = qlora__config_find(q, "weight_block_size");
    int64_t size[2] = {0, 0};
    bool pair = block != 0 && qlora__json_kind_of(json, block) == QLORA__JSON_ARRAY &&
                json->tokens[block].count == 2 && qlora__json_int(json, block + 1, &size[0]) &&
                qlora__json_int(json, block + 2, &size[1]);
    if (!pair || size[0] != QLORA__FP8_BLOCK || size[1] != QLORA__FP8_BLOCK) {
        char shown[48];
        return qlora__env_fail(q->env, QLORA_ERR_UNSUPPORTED,
                               "%s: quantization_config: weight_block_size is %s; only [128, 128] "
                               "is supported",
                               json->label,
                               block == 0 ? "missing" : qlora__config_show(q, block, shown));
    }
    return QLORA_OK;
}

// quantization_config: bitsandbytes 4-bit and FP8 are read tensor by tensor; everything else is
// rejected by name.
static qlora_result qlora__config_quantized(const qlora__config_reader* r, qlora_model_config* c) {
    uint32_t dict = qlora__config_find(r, "quantization_config");
    if (dict == 0) {
        return QLORA_OK;
    }
    qlora__config_reader q = *r;
    bool eight = false;
    q.object = dict;
    uint32_t method = qlora__config_find(&q, "quant_method");
    if (method != 0 && qlora__json_is(r->json, method, "fp8")) {
        c->quantized = true;
        return qlora__config_fp8(&q);
    }
    if (method != 0 && !qlora__json_is(r->json, method, "bitsandbytes")) {
        return qlora__config_refuse(r, "quant_method", method,
                                    "use the 16-bit model, or one in bitsandbytes 4-bit format or "
                                    "in FP8");
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

// A soft cap: null means none, which is not the same as leaving the key out.
static qlora_result qlora__config_cap(const qlora__config_reader* r, const char* key,
                                      double fallback, double* out) {
    *out = 0.0;
    return qlora__config_has(r, key) && qlora__config_find(r, key) == 0
               ? QLORA_OK
               : qlora__config_positive(r, key, fallback, out);
}

// The factors and limits by which families differ from Llama's block.
static qlora_result qlora__config_scalars(const qlora__config_reader* r, const qlora__arch* arch,
                                          qlora_model_config* c) {
    if ((arch->reads & QLORA__READS_MULTIPLIERS) != 0) {
        QLORA__TRY(qlora__config_positive(r, "embedding_multiplier", 1.0, &c->embedding_scale));
        QLORA__TRY(qlora__config_positive(r, "residual_multiplier", 1.0, &c->residual_scale));
        QLORA__TRY(qlora__config_positive(r, "attention_multiplier", 1.0, &c->attention_scale));
        QLORA__TRY(qlora__config_positive(r, "logits_scaling", 1.0, &c->logits_divisor));
    }
    if ((arch->reads & QLORA__READS_QUERY_SCALAR) != 0) {
        double scalar = 256.0;
        QLORA__TRY(qlora__config_positive(r, "query_pre_attn_scalar", scalar, &scalar));
        c->attention_scale = 1.0 / sqrt(scalar);
    }
    if ((arch->reads & QLORA__READS_CAPS) != 0) {
        QLORA__TRY(qlora__config_cap(r, "attn_logit_softcapping", 50.0, &c->attention_cap));
        QLORA__TRY(qlora__config_cap(r, "final_logit_softcapping", 30.0, &c->logits_cap));
    }
    // transformers reads the cap of this family's scores but never applies it, and that of the
    // logits only in the text model.
    if ((arch->reads & QLORA__READS_FINAL_CAP) != 0 && !c->wrapped) {
        QLORA__TRY(qlora__config_cap(r, "final_logit_softcapping", 0.0, &c->logits_cap));
    }
    if ((arch->reads & QLORA__READS_LOGIT_SCALE) != 0) {
        double scale = 0.0625;
        QLORA__TRY(qlora__config_positive(r, "logit_scale", scale, &scale));
        c->logits_divisor = 1.0 / scale;
    }
    c->norm_offset = (arch->has & QLORA__HAS_NORM_OFFSET) != 0 ? 1.0 : 0.0;
    return QLORA_OK;
}

static qlora_result qlora__config_biases(const qlora__config_reader* r, const qlora__arch* arch,
                                         qlora_model_config* c) {
    bool all = false;
    bool three = (arch->reads & QLORA__READS_ATTENTION_BIAS_3) != 0;
    if ((arch->reads & QLORA__READS_ATTENTION_BIAS) != 0) {
        QLORA__TRY(qlora__config_bool(r, "attention_bias", false, &all));
    }
    if (three) {
        QLORA__TRY(qlora__config_bool(r, "attention_bias", true, &three));
    }
    c->o_bias = all;
    if ((arch->reads & QLORA__READS_BIAS_3_OFF) != 0) {
        QLORA__TRY(qlora__config_bool(r, "attention_bias", false, &three));
    }
    if ((arch->reads & QLORA__READS_OUT_BIAS) != 0) {
        QLORA__TRY(qlora__config_bool(r, "attention_out_bias", false, &c->o_bias));
    }
    if ((arch->reads & QLORA__READS_MLP_BIAS) != 0) {
        QLORA__TRY(qlora__config_bool(r, "mlp_bias", false, &c->mlp_bias));
    }
    c->qkv_bias = all || three || (arch->reads & QLORA__READS_QKV_BIAS) != 0;
    c->qk_norm = (arch->has & QLORA__HAS_QK_NORM) != 0;
    return (arch->reads & QLORA__READS_QK_NORM) != 0
               ? qlora__config_bool(r, "use_qk_norm", false, &c->qk_norm)
               : QLORA_OK;
}

// Older Gemma files say "gelu" and mean the tanh form.
static qlora_result qlora__config_activation(const qlora__config_reader* r,
                                             const qlora__arch* arch) {
    bool plain = qlora__arch_first(arch)->ffn == QLORA__FFN_PLAIN;
    int kind = plain ? 2 : (arch->has & QLORA__HAS_GELU) != 0;
    bool newer = (arch->reads & QLORA__READS_ACTIVATION) != 0;
    uint32_t act = newer ? 0 : qlora__config_find(r, "hidden_act");
    act = act != 0 ? act : qlora__config_find(r, "hidden_activation");
    static const struct {
        const char* names[4];
        const char* advice;
    } kinds[3] = {
        {{"silu", "swish", NULL, NULL}, "only silu is supported"},
        {{"gelu_pytorch_tanh", "gelu_new", "gelu", NULL}, "only gelu_pytorch_tanh is supported"},
        {{"relu2", NULL, NULL, NULL}, "only relu2 is supported"}};
    bool known = act == 0;
    for (int i = 0; act != 0 && kinds[kind].names[i] != NULL; i++) {
        known = known || (qlora__json_is(r->json, act, kinds[kind].names[i]) && !(newer && i == 2));
    }
    return known ? QLORA_OK
                 : qlora__config_refuse(r, newer ? "hidden_activation" : "hidden_act", act,
                                        kinds[kind].advice);
}

// What a model may not have: keys that change the block in ways its description does not cover.
static qlora_result qlora__config_refusals(const qlora__config_reader* r) {
    static const char* const switches[] = {"use_bidirectional_attention", "is_encoder_decoder"};
    for (size_t i = 0; i < sizeof switches / sizeof switches[0]; i++) {
        bool on = false;
        QLORA__TRY(qlora__config_bool(r, switches[i], false, &on));
        if (on) {
            return qlora__env_fail(r->env, QLORA_ERR_UNSUPPORTED,
                                   "%s: %s is true, which is not supported", r->json->label,
                                   switches[i]);
        }
    }
    return QLORA_OK;
}

// dtype and the tied head, which a multimodal folder has at its top.
static qlora_result qlora__config_storage(const qlora__config_reader* top,
                                          const qlora__config_reader* r, const qlora__arch* arch,
                                          qlora_model_config* c) {
    static const struct {
        const char* name;
        qlora_dtype dtype;
    } dtypes[6] = {{"float32", QLORA_F32},         {"bfloat16", QLORA_BF16},
                   {"float16", QLORA_F16},         {"torch.float32", QLORA_F32},
                   {"torch.bfloat16", QLORA_BF16}, {"torch.float16", QLORA_F16}};
    bool tied = c->wrapped || arch->defaults.tied;
    if (c->wrapped) {
        QLORA__TRY(qlora__config_bool(r, "tie_word_embeddings", tied, &tied));
    }
    QLORA__TRY(qlora__config_bool(top, "tie_word_embeddings", tied, &c->tied));
    c->dtype = -1;
    const qlora__config_reader* places[2] = {r, top};
    for (int p = 0; p < 2 && c->dtype < 0; p++) {
        uint32_t dtype = qlora__config_find(places[p], "dtype");
        dtype = dtype != 0 ? dtype : qlora__config_find(places[p], "torch_dtype");
        for (int i = 0; i < 6; i++) {
            if (dtype != 0 && qlora__json_is(r->json, dtype, dtypes[i].name)) {
                c->dtype = (int32_t)dtypes[i].dtype;
            }
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__config_from_json(qlora__env* env, const qlora__json* json,
                                            qlora_model_config* c) {
    qlora__config_reader top;
    const qlora__arch* arch = NULL;
    top.env = env;
    top.json = json;
    top.object = 0;
    memset(c, 0, sizeof *c);
    if (qlora__json_kind_of(json, 0) != QLORA__JSON_OBJECT) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: expected a JSON object", json->label);
    }
    QLORA__TRY(qlora__config_quantized(&top, c));
    qlora__config_reader r = top;
    QLORA__TRY(qlora__config_family(&r, &arch, c));
    QLORA__TRY(qlora__config_refusals(&r));
    QLORA__TRY(qlora__config_sizes(&r, arch, c));
    QLORA__TRY(qlora__config_experts(&r, arch, c));
    QLORA__TRY(qlora__config_ropes(&r, arch, c));
    QLORA__TRY(qlora__config_nope(&r, arch, c));
    QLORA__TRY(qlora__config_window(&r, arch, c));
    QLORA__TRY(qlora__config_biases(&r, arch, c));
    QLORA__TRY(qlora__config_activation(&r, arch));
    QLORA__TRY(qlora__config_scalars(&r, arch, c));
    QLORA__TRY(qlora__config_storage(&top, &r, arch, c));
    QLORA__TRY(qlora__config_id(&r, "bos_token_id", c->vocab, &c->bos_id));
    QLORA__TRY(qlora__config_id(&r, "pad_token_id", c->vocab, &c->pad_id));
    QLORA__TRY(qlora__config_stops(&r, c));
    qlora__config_resolve(c);
    bool outside = c->wrapped && qlora__config_find(&top, "eos_token_id") != 0;
    return outside ? qlora__config_stops(&top, c) : QLORA_OK;
}

// Parses config.json from memory into *out.
static qlora_result qlora__config_parse(qlora__env* env, const char* label, const void* text,
                                        uint64_t size, qlora_model_config* out) {
    qlora__json json;
    qlora_model_config config;
    QLORA__TRY(qlora__json_parse(env, label, text, size, QLORA__JSON_WORDS, &json));
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
    QLORA__TRY(qlora__json_parse(env, label, text, size, QLORA__JSON_WORDS, &json));
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
