// ---- the config of a model from the metadata of a GGUF file -------------------------------------

typedef struct qlora__gguf_reader {
    qlora__env* env;
    const qlora__gguf_model* m;
    const qlora__gguf* g;
    qlora__gguf_facts facts;
} qlora__gguf_reader;

static qlora_result qlora__gguf_config_int(const qlora__gguf_reader* r, const char* name,
                                           int64_t fallback, int64_t least, int64_t most,
                                           int64_t* out) {
    qlora__gguf_key key = qlora__gguf_key_of(&r->facts, name);
    return qlora__gguf_get_int(r->env, r->g, key.text, fallback, least, most, out);
}

static qlora_result qlora__gguf_config_positive(const qlora__gguf_reader* r, const char* name,
                                                double fallback, double* out) {
    qlora__gguf_key key = qlora__gguf_key_of(&r->facts, name);
    return qlora__gguf_get_positive(r->env, r->g, key.text, fallback, out);
}

// The sizes, by the names of their keys. A fallback of -1 means that the key is required.
static qlora_result qlora__gguf_config_sizes(const qlora__gguf_reader* r, qlora_model_config* c) {
    const struct {
        const char* name;
        int64_t fallback;
        int64_t most;
        int64_t* out;
    } sizes[] = {{"embedding_length", -1, 1 << 20, &c->hidden},
                 {"feed_forward_length", -1, 1 << 22, &c->intermediate},
                 {"context_length", -1, INT32_MAX, &c->max_positions}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        QLORA__TRY(qlora__gguf_config_int(r, sizes[i].name, sizes[i].fallback, 1, sizes[i].most,
                                          sizes[i].out));
    }
    c->layers = r->facts.layers;
    c->heads = r->facts.heads;
    c->kv_heads = r->facts.kv_heads;
    c->head_dim = r->facts.head_dim;
    if (c->heads % c->kv_heads != 0) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT,
                               "%s: head_count (%lld) is not a multiple of head_count_kv (%lld)",
                               r->g->label, (long long)c->heads, (long long)c->kv_heads);
    }
    if (c->head_dim > 256) {
        return qlora__env_fail(r->env, QLORA_ERR_UNSUPPORTED,
                               "%s: key_length is %lld; the maximum is 256", r->g->label,
                               (long long)c->head_dim);
    }
    bool mean = (r->facts.arch->has & QLORA__HAS_MEAN_NORM) != 0;
    return qlora__gguf_config_positive(
        r, mean ? "attention.layer_norm_epsilon" : "attention.layer_norm_rms_epsilon", -1.0,
        &c->rms_eps);
}

// The vocabulary has as many tokens as the embedding has rows, whatever vocab_size says: converters
// cut the embedding to the tokenizer.
static qlora_result qlora__gguf_config_vocab(const qlora__gguf_reader* r, qlora_model_config* c) {
    const qlora__gguf_tensor* embed = qlora__gguf_model_find(r->m, "token_embd.weight");
    if (embed == NULL || embed->rank != 2 || embed->shape[1] > (1u << 24)) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT, "%s: token_embd.weight %s", r->g->label,
                               embed == NULL ? "is missing" : "must be a matrix");
    }
    c->vocab = (int64_t)embed->shape[1];
    const qlora__gguf_value* tokens = qlora__gguf_find(r->g, "tokenizer.ggml.tokens");
    if (tokens != NULL && (int64_t)tokens->count != c->vocab) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT,
                               "%s: tokenizer.ggml.tokens has %llu tokens, but token_embd.weight "
                               "has %lld rows",
                               r->g->label, (unsigned long long)tokens->count, (long long)c->vocab);
    }
    return QLORA_OK;
}

static qlora_result qlora__gguf_config_yarn(const qlora__gguf_reader* r, qlora_rope_desc* rope) {
    QLORA__TRY(
        qlora__gguf_config_positive(r, "rope.scaling.yarn_beta_fast", 32.0, &rope->beta_fast));
    QLORA__TRY(
        qlora__gguf_config_positive(r, "rope.scaling.yarn_beta_slow", 1.0, &rope->beta_slow));
    double all = 0.0;
    const qlora__gguf_value* v = qlora__gguf_find(
        r->g, qlora__gguf_key_of(&r->facts, "rope.scaling.yarn_log_multiplier").text);
    if (v != NULL && !qlora__gguf_real(v, 0, &all)) {
        return qlora__gguf_wrong(r->env, r->g, "rope.scaling.yarn_log_multiplier", v, "F32");
    }
    if (all > 0.0) {
        rope->mscale = 1.0;
        rope->mscale_all_dim = all;
    }
    return QLORA_OK;
}

// The scaling of the rotation by its keys.
static qlora_result qlora__gguf_config_rope(const qlora__gguf_reader* r, qlora_model_config* c) {
    qlora_rope_desc* rope = &c->rope;
    const char* type = NULL;
    size_t size = 0;
    int64_t original = 0;
    double factor = 1.0;
    QLORA__TRY(qlora__gguf_config_positive(r, "rope.freq_base", 10000.0, &rope->theta));
    if (!(rope->theta > 1.0)) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT,
                               "%s: rope.freq_base is %g; it must be greater than 1", r->g->label,
                               rope->theta);
    }
    QLORA__TRY(qlora__gguf_config_positive(r, "rope.scale_linear", 1.0, &factor)); // old name
    QLORA__TRY(qlora__gguf_config_positive(r, "rope.scaling.factor", factor, &factor));
    QLORA__TRY(qlora__gguf_config_int(r, "rope.scaling.original_context_length", c->max_positions,
                                      1, INT32_MAX, &original));
    QLORA__TRY(qlora__gguf_get_string(r->env, r->g,
                                      qlora__gguf_key_of(&r->facts, "rope.scaling.type").text,
                                      false, &type, &size));
    rope->factor = 1.0;
    if (qlora__gguf_is(type, size, "yarn")) {
        rope->type = QLORA_ROPE_YARN;
        rope->factor = factor;
        rope->original_max_position = (double)original;
        QLORA__TRY(qlora__gguf_config_yarn(r, rope));
    } else if (type == NULL || qlora__gguf_is(type, size, "linear")) {
        rope->type = factor > 1.0 || factor < 1.0 ? QLORA_ROPE_LINEAR : QLORA_ROPE_DEFAULT;
        rope->factor = factor;
    } else if (!qlora__gguf_is(type, size, "none")) {
        return qlora__env_fail(r->env, QLORA_ERR_UNSUPPORTED,
                               "%s: rope.scaling.type \"%.*s\" is not supported; supported are "
                               "none, linear and yarn",
                               r->g->label, qlora__gguf_shown(size), type);
    }
    return QLORA_OK;
}

// The divisors of the frequencies in a tensor of F32; *found is false if there is none.
static qlora_result qlora__gguf_config_list(const qlora__gguf_reader* r, const char* name,
                                            const qlora_model_config* c, float* out, bool* found) {
    const qlora__gguf_tensor* t = qlora__gguf_model_find(r->m, name);
    *found = t != NULL;
    if (t == NULL) {
        return QLORA_OK;
    }
    if (t->elements != (uint64_t)(c->rope_dims / 2) || t->elements > QLORA_MAX_ROPE_FACTORS ||
        t->type->block > 1) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT,
                               "%s: %s has %llu values; it must have %lld, one for each pair of "
                               "rotated columns",
                               r->g->label, name, (unsigned long long)t->elements,
                               (long long)c->rope_dims / 2);
    }
    qlora__gguf_widen(t->type, t->data, t->elements, out);
    for (uint64_t i = 0; i < t->elements; i++) {
        if (!(out[i] > 0.0f && out[i] < 1e30f)) {
            return qlora__env_fail(r->env, QLORA_ERR_FORMAT,
                                   "%s: %s[%llu] is %g; it must be positive and less than 1e30",
                                   r->g->label, name, (unsigned long long)i, (double)out[i]);
        }
    }
    return QLORA_OK;
}

// Files with Llama 3's scaling have one list, those with longrope two.
static qlora_result qlora__gguf_config_factors(const qlora__gguf_reader* r, qlora_model_config* c) {
    qlora_rope_desc* rope = &c->rope;
    bool one = false;
    bool shorter = false;
    bool longer = false;
    int64_t original = 0;
    QLORA__TRY(qlora__gguf_config_list(r, "rope_freqs.weight", c, rope->short_factor, &one));
    if (one) {
        memcpy(rope->long_factor, rope->short_factor, sizeof rope->long_factor);
    } else {
        QLORA__TRY(qlora__gguf_config_list(r, "rope_factors_short.weight", c, rope->short_factor,
                                           &shorter));
        QLORA__TRY(
            qlora__gguf_config_list(r, "rope_factors_long.weight", c, rope->long_factor, &longer));
    }
    if (shorter != longer) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT, "%s: rope_factors_%s.weight is missing",
                               r->g->label, shorter ? "long" : "short");
    }
    if (!one && !shorter) {
        return QLORA_OK;
    }
    if (rope->type != QLORA_ROPE_DEFAULT) {
        return qlora__env_fail(r->env, QLORA_ERR_UNSUPPORTED,
                               "%s: rope.scaling.type and factors of the rotation are not "
                               "supported together",
                               r->g->label);
    }
    QLORA__TRY(qlora__gguf_config_int(r, "rope.scaling.original_context_length", c->max_positions,
                                      1, INT32_MAX, &original));
    rope->type = QLORA_ROPE_LONGROPE;
    rope->original_max_position = (double)original;
    rope->attention_factor = 1.0;
    return one ? QLORA_OK
               : qlora__gguf_config_positive(r, "rope.scaling.attn_factor", 1.0,
                                             &rope->attention_factor);
}

// The rotation of layers with a window, where it differs: without scaling. Of some
// architectures it has a base of its own, which llama.cpp ignores elsewhere.
static qlora_result qlora__gguf_config_sliding(const qlora__gguf_reader* r, qlora_model_config* c) {
    const qlora__arch* arch = r->facts.arch;
    c->rope_sliding = c->rope;
    if ((arch->reads & QLORA__READS_ROPE_PER_KIND) == 0) {
        return QLORA_OK;
    }
    memset(&c->rope_sliding, 0, sizeof c->rope_sliding);
    c->rope_sliding.factor = 1.0;
    c->rope_sliding.theta = c->rope.theta;
    return (arch->gguf_rule.flags & QLORA__GGUF_LOCAL_THETA) != 0
               ? qlora__gguf_config_positive(r, "rope.freq_base_swa", arch->defaults.theta_sliding,
                                             &c->rope_sliding.theta)
               : QLORA_OK;
}

// A list of booleans instead of a period. llama.cpp does not read it and keeps its own pattern.
static qlora_result qlora__gguf_config_listed(const qlora__gguf_reader* r,
                                              const qlora_model_config* c, const char* key,
                                              const qlora__gguf_value* list) {
    int64_t period = r->facts.arch->defaults.pattern;
    if (list->element != QLORA__GGUF_BOOL || list->count < (uint64_t)c->layers) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT,
                               "%s: %s must be a number, or a BOOL for each layer", r->g->label,
                               key);
    }
    for (int64_t i = 0; i < c->layers && c->window > 0; i++) {
        if ((list->data[i] != 0) != ((i + 1) % period != 0)) {
            return qlora__env_fail(r->env, QLORA_ERR_UNSUPPORTED,
                                   "%s: %s[%lld] is %s; llama.cpp does not read the list: all "
                                   "layers but every %lld-th have a window",
                                   r->g->label, key, (long long)i,
                                   list->data[i] != 0 ? "true" : "false", (long long)period);
        }
    }
    return QLORA_OK;
}

// llama.cpp ignores the window of architectures without a pattern.
static qlora_result qlora__gguf_config_ignored(const qlora__gguf_reader* r,
                                               const qlora_model_config* c) {
    int64_t window = 0;
    QLORA__TRY(qlora__gguf_config_int(r, "attention.sliding_window", 0, 0, INT32_MAX, &window));
    if (window > 0 && window < c->max_positions) {
        qlora__env_log(r->env, QLORA_LOG_WARN, QLORA_LOG_ITEM_MODEL, "qlora.h", __LINE__,
                       "%s: its window of %lld tokens is ignored, as llama.cpp does; longer texts "
                       "are computed differently than by the original model",
                       r->g->label, (long long)window);
    }
    return QLORA_OK;
}

// Which layers have a window: all but every n-th.
static qlora_result qlora__gguf_config_window(const qlora__gguf_reader* r, qlora_model_config* c) {
    const qlora__arch* arch = r->facts.arch;
    qlora__gguf_key key = qlora__gguf_key_of(&r->facts, "attention.sliding_window_pattern");
    const qlora__gguf_value* list = qlora__gguf_find(r->g, key.text);
    bool listed = list != NULL && list->kind == QLORA__GGUF_ARRAY;
    int64_t period = arch->defaults.pattern;
    if (arch->window != QLORA__WINDOW_PATTERN) {
        return qlora__gguf_config_ignored(r, c);
    }
    int32_t large = arch->gguf_rule.window_layers;
    if (large > 0 && c->layers != large) {
        return QLORA_OK;
    }
    bool has_default = (arch->gguf_rule.flags & QLORA__GGUF_OWN_WINDOW) != 0;
    int64_t fallback = has_default ? arch->defaults.window : 0;
    bool required = arch->nope == QLORA__NOPE_ALL_FULL; // it decides what is rotated
    QLORA__TRY(qlora__gguf_config_int(r, "attention.sliding_window", required ? -1 : fallback,
                                      required, INT32_MAX, &c->window));
    if (listed) {
        QLORA__TRY(qlora__gguf_config_listed(r, c, key.text, list));
    } else {
        QLORA__TRY(qlora__gguf_get_int(r->env, r->g, key.text, period, 1, INT32_MAX, &period));
    }
    for (int64_t i = 0; i < c->layers && c->window > 0; i++) {
        c->sliding[i] = (i + 1) % period != 0 ? 1 : 0;
        if (arch->nope == QLORA__NOPE_FULL || arch->nope == QLORA__NOPE_ALL_FULL) {
            c->no_rope[i] = c->sliding[i] == 0 ? 1 : 0;
        }
    }
    return QLORA_OK;
}

// Layers that are not rotated: every fourth of SmolLM 3; all, if a Granite file says so.
static qlora_result qlora__gguf_config_nope(const qlora__gguf_reader* r, qlora_model_config* c) {
    const qlora__arch* arch = r->facts.arch;
    bool rotated = true;
    for (int64_t i = 0; arch->nope == QLORA__NOPE_LISTED && i < c->layers; i++) {
        c->no_rope[i] = (i + 1) % 4 == 0 ? 1 : 0;
    }
    if ((arch->reads & QLORA__READS_MULTIPLIERS) != 0) {
        QLORA__TRY(qlora__gguf_get_bool(
            r->env, r->g, qlora__gguf_key_of(&r->facts, "rope.scaling.finetuned").text, true,
            &rotated));
    }
    if (!rotated) {
        memset(c->no_rope, 1, (size_t)c->layers);
    }
    return QLORA_OK;
}

// The factors and limits by which architectures differ from Llama's block.
static qlora_result qlora__gguf_config_scalars(const qlora__gguf_reader* r, qlora_model_config* c) {
    const qlora__arch* arch = r->facts.arch;
    const struct {
        uint32_t reads;
        const char* name;
        double fallback;
        double* out;
    } scalars[] = {{QLORA__READS_MULTIPLIERS, "attention.scale", 0.0, &c->attention_scale},
                   {QLORA__READS_MULTIPLIERS, "embedding_scale", 1.0, &c->embedding_scale},
                   {QLORA__READS_MULTIPLIERS, "residual_scale", 1.0, &c->residual_scale},
                   {QLORA__READS_MULTIPLIERS, "logit_scale", 1.0, &c->logits_divisor},
                   {QLORA__READS_CAPS, "attn_logit_softcapping", 50.0, &c->attention_cap},
                   {QLORA__READS_CAPS, "final_logit_softcapping", 30.0, &c->logits_cap},
                   {QLORA__READS_FINAL_CAP, "final_logit_softcapping", 0.0, &c->logits_cap},
                   {QLORA__READS_QUERY_BETA, "attention.temperature_scale", 0.0, &c->query_beta}};
    for (size_t i = 0; i < sizeof scalars / sizeof scalars[0]; i++) {
        if ((arch->reads & scalars[i].reads) != 0) {
            QLORA__TRY(qlora__gguf_config_positive(r, scalars[i].name, scalars[i].fallback,
                                                   scalars[i].out));
        }
    }
    if ((arch->reads & QLORA__READS_LOGIT_SCALE) != 0) { // elsewhere the key is a divisor
        double scale = 1.0;
        QLORA__TRY(qlora__gguf_config_positive(r, "logit_scale", -1.0, &scale));
        c->logits_divisor = 1.0 / scale;
    }
    if (c->query_beta > 0.0) {
        int64_t original = 0;
        QLORA__TRY(qlora__gguf_config_int(r, "rope.scaling.original_context_length",
                                          c->max_positions, 1, INT32_MAX, &original));
        c->query_period = (double)original;
    }
    // The file does not hold query_pre_attn_scalar; llama.cpp knows the largest models by their
    // number of layers.
    bool large = c->layers == arch->gguf_rule.scalar_layers;
    if ((arch->reads & QLORA__READS_QUERY_SCALAR) != 0) {
        c->attention_scale =
            1.0 / sqrt(large ? (double)(c->hidden / c->heads) : (double)c->head_dim);
    }
    c->norm_offset = (arch->has & QLORA__HAS_NORM_OFFSET) != 0 ? 1.0 : 0.0;
    return QLORA_OK;
}

// The ids of special tokens. Generation ends at the end of the text and of a turn.
static qlora_result qlora__gguf_config_ids(const qlora__gguf_reader* r, qlora_model_config* c) {
    static const struct {
        const char* key;
        int role; // 0: begin, 1: padding, 2: stop
    } ids[] = {{"tokenizer.ggml.bos_token_id", 0},
               {"tokenizer.ggml.padding_token_id", 1},
               {"tokenizer.ggml.eos_token_id", 2},
               {"tokenizer.ggml.eot_token_id", 2},
               {"tokenizer.ggml.eom_token_id", 2}};
    c->bos_id = -1;
    c->pad_id = -1;
    for (size_t i = 0; i < sizeof ids / sizeof ids[0]; i++) {
        int64_t id = 0;
        if (qlora__gguf_find(r->g, ids[i].key) == NULL) {
            continue;
        }
        QLORA__TRY(qlora__gguf_get_int(r->env, r->g, ids[i].key, -1, 0, c->vocab - 1, &id));
        bool there = false;
        for (int32_t k = 0; k < c->stop_count; k++) {
            there = there || c->stop_ids[k] == (int32_t)id;
        }
        if (ids[i].role == 2 && !there) {
            c->stop_ids[c->stop_count++] = (int32_t)id;
        } else if (ids[i].role < 2) {
            *(ids[i].role == 0 ? &c->bos_id : &c->pad_id) = (int32_t)id;
        }
    }
    return QLORA_OK;
}

// ---- experts ------------------------------------------------------------------------------------

// Keys about experts that are not known here, or that llama.cpp does not read in this architecture
// although their value would matter.
static qlora_result qlora__gguf_config_expert_keys(const qlora__gguf_reader* r, bool sigmoid) {
    static const struct {
        const char* name;
        int kind; // 0: read; 1: read with sigmoids, else at most 1; 2: the same, a number
    } known[] = {{"expert_count", 0},
                 {"expert_used_count", 0},
                 {"expert_feed_forward_length", 0},
                 {"expert_shared_feed_forward_length", 0},
                 {"expert_shared_count", 0},
                 {"expert_gating_func", 0},
                 {"expert_weights_norm", 0},
                 {"expert_group_count", 1},
                 {"expert_group_used_count", 1},
                 {"expert_weights_scale", 2}};
    for (uint32_t i = 0; i < r->g->count; i++) {
        const qlora__gguf_value* v = &r->g->values[i];
        size_t prefix = r->facts.prefix_size + 1;
        if (v->key_size <= prefix || memcmp(v->key, r->facts.prefix, prefix - 1) != 0 ||
            v->key[prefix - 1] != '.') {
            continue;
        }
        const char* name = v->key + prefix;
        size_t size = v->key_size - prefix;
        int kind = -1;
        for (size_t k = 0; k < sizeof known / sizeof known[0]; k++) {
            kind = qlora__gguf_is(name, size, known[k].name) ? known[k].kind : kind;
        }
        int64_t count = 0;
        double scale = 0.0;
        bool plain =
            sigmoid || kind == 0 ||
            (kind == 1 && qlora__gguf_integer(v, 0, &count) && count <= 1) ||
            (kind == 2 && qlora__gguf_real(v, 0, &scale) && (scale == 1.0 || scale == 0.0));
        bool about = size > 6 && (memcmp(name, "expert", 6) == 0 || memcmp(name, "moe_", 4) == 0);
        if (about && (kind < 0 || !plain)) {
            return qlora__env_fail(
                r->env, QLORA_ERR_UNSUPPORTED, "%s: %.*s %s in this architecture", r->g->label,
                (int)v->key_size, v->key, kind < 0 ? "is not known" : "must be 1, or absent,");
        }
    }
    return QLORA_OK;
}

// What becomes of the scores. Most of it follows from the architecture, whatever the file says.
static qlora_result qlora__gguf_config_router(const qlora__gguf_reader* r, qlora_model_config* c) {
    const qlora__arch* arch = r->facts.arch;
    bool sigmoid = arch->experts->experts->score == QLORA__ROUTER_SIGMOID;
    bool chosen = arch->experts->experts->score == QLORA__ROUTER_SOFTMAX_CHOSEN;
    bool sums = (arch->gguf_rule.flags & QLORA__GGUF_RENORMALISES) != 0;
    int64_t gating = 0;
    bool norm = false;
    c->routed_scale = 1.0;
    c->expert_groups = 1;
    c->expert_groups_used = 1;
    c->renormalise = sums;
    QLORA__TRY(qlora__gguf_config_expert_keys(r, sigmoid));
    QLORA__TRY(qlora__gguf_config_int(r, "expert_gating_func", sigmoid ? 2 : 1, sigmoid ? 2 : 1,
                                      sigmoid ? 2 : 1, &gating));
    const char* key = "expert_weights_norm";
    QLORA__TRY(qlora__gguf_get_bool(r->env, r->g, qlora__gguf_key_of(&r->facts, key).text,
                                    !sigmoid && (sums || chosen), &norm));
    if (!sigmoid) {
        return norm == (sums || chosen)
                   ? QLORA_OK
                   : qlora__env_fail(r->env, QLORA_ERR_UNSUPPORTED,
                                     "%s: %s is %s, which llama.cpp does not read in this "
                                     "architecture: it computes the opposite",
                                     r->g->label, qlora__gguf_key_of(&r->facts, key).text,
                                     norm ? "true" : "false");
    }
    c->renormalise = norm;
    QLORA__TRY(qlora__gguf_config_positive(r, "expert_weights_scale", 1.0, &c->routed_scale));
    QLORA__TRY(
        qlora__gguf_config_int(r, "expert_group_count", 1, 1, c->experts, &c->expert_groups));
    QLORA__TRY(qlora__gguf_config_int(r, "expert_group_used_count", c->expert_groups, 1,
                                      c->expert_groups, &c->expert_groups_used));
    int64_t each = c->experts / c->expert_groups;
    if (c->experts % c->expert_groups != 0 || (c->expert_groups > 1 && each < 2) ||
        c->experts_per_token > each * c->expert_groups_used) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT,
                               "%s: expert_group_count is %lld, of which %lld are used; that does "
                               "not fit %lld experts, of which %lld are used",
                               r->g->label, (long long)c->expert_groups,
                               (long long)c->expert_groups_used, (long long)c->experts,
                               (long long)c->experts_per_token);
    }
    return QLORA_OK;
}

// The widths of experts, and of the MLP beside them.
static qlora_result qlora__gguf_config_experts(const qlora__gguf_reader* r, qlora_model_config* c) {
    const qlora__arch* arch = r->facts.arch;
    c->experts = r->facts.experts;
    if (c->experts == 0) {
        return QLORA_OK;
    }
    QLORA__TRY(
        qlora__gguf_config_int(r, "expert_used_count", -1, 1, c->experts, &c->experts_per_token));
    bool own = (arch->reads & QLORA__READS_OWN_WIDTH) != 0;
    int64_t width = own ? c->intermediate / c->experts_per_token : c->intermediate;
    QLORA__TRY(qlora__gguf_config_int(r, "expert_feed_forward_length", width > 0 ? width : -1, 1,
                                      1 << 22, &c->expert_intermediate));
    bool gate = arch->experts->experts->shared_gate.module != NULL;
    bool hybrid = (arch->reads & QLORA__READS_HYBRID) != 0;
    if (gate || hybrid) {
        QLORA__TRY(qlora__gguf_config_int(r, "expert_shared_feed_forward_length",
                                          gate ? c->intermediate : -1, 1, 1 << 22,
                                          &c->shared_intermediate));
    } else if (arch->experts->groups[QLORA__DOWN].count > 0) {
        int64_t count = 0;
        QLORA__TRY(qlora__gguf_config_int(r, "expert_shared_count", -1, 1, 1 << 10, &count));
        c->shared_intermediate = count * c->expert_intermediate;
    }
    if (hybrid) {
        c->intermediate = c->shared_intermediate;
    } else if (arch->layout == NULL) {
        c->intermediate = c->expert_intermediate;
    }
    for (int64_t l = 0; l < c->layers && l < r->facts.dense; l++) {
        c->dense[l] = 1;
    }
    return qlora__gguf_config_router(r, c);
}

// What the presence of tensors says.
static void qlora__gguf_config_tensors(qlora__gguf_reader* r, qlora_model_config* c) {
    qlora__gguf_get_biases(r->m, &r->facts);
    c->tied = qlora__gguf_model_find(r->m, "output.weight") == NULL;
    c->qkv_bias = r->facts.bias[QLORA__QKV];
    c->o_bias = r->facts.bias[QLORA__O];
    c->mlp_bias = r->facts.bias[QLORA__DOWN];
    c->qk_norm = (r->facts.arch->has & QLORA__HAS_QK_NORM) != 0 ||
                 qlora__gguf_model_find(r->m, "blk.0.attn_q_norm.weight") != NULL;
    c->dtype = -1;
}

static qlora_result qlora__gguf_config_fill(qlora__gguf_reader* r, qlora_model_config* c) {
    memset(c, 0, sizeof *c);
    QLORA__TRY(qlora__gguf_get_facts(r->env, r->g, &r->facts));
    c->family = r->facts.arch->family;
    QLORA__TRY(qlora__gguf_config_sizes(r, c));
    QLORA__TRY(qlora__gguf_config_experts(r, c));
    QLORA__TRY(qlora__gguf_config_vocab(r, c));
    QLORA__TRY(qlora__gguf_config_rope(r, c));
    QLORA__TRY(
        qlora__gguf_config_int(r, "rope.dimension_count", c->head_dim, 2, 1 << 14, &c->rope_dims));
    bool partial = (r->facts.arch->reads & QLORA__READS_PARTIAL) != 0;
    if (c->rope_dims % 2 != 0 || c->rope_dims > c->head_dim ||
        (!partial && c->rope_dims != c->head_dim)) {
        return qlora__env_fail(r->env, QLORA_ERR_UNSUPPORTED,
                               "%s: rope.dimension_count is %lld, which this architecture does not "
                               "support with heads of %lld",
                               r->g->label, (long long)c->rope_dims, (long long)c->head_dim);
    }
    QLORA__TRY(qlora__gguf_config_factors(r, c));
    QLORA__TRY(qlora__gguf_config_sliding(r, c));
    QLORA__TRY(qlora__gguf_config_window(r, c));
    QLORA__TRY(qlora__gguf_config_nope(r, c));
    QLORA__TRY(qlora__gguf_config_scalars(r, c));
    qlora__gguf_config_tensors(r, c);
    return qlora__gguf_config_ids(r, c);
}

static qlora_result qlora__config_read_gguf(qlora__env* env, const char* path,
                                            qlora_model_config* out) {
    qlora__gguf_model m;
    qlora__gguf_reader r;
    qlora_model_config config;
    QLORA__TRY(qlora__gguf_model_open(env, path, &m));
    memset(&r, 0, sizeof r);
    r.env = env;
    r.m = &m;
    r.g = &m.files[0].meta;
    qlora_result result = qlora__gguf_config_fill(&r, &config);
    qlora__gguf_model_close(env, &m);
    if (result == QLORA_OK) {
        *out = config;
    }
    return result;
}

// The config of a model folder or a GGUF file.
static QLORA__UNUSED qlora_result qlora__config_read(qlora__env* env, const char* dir,
                                                     qlora_model_config* out) {
    if (!qlora__gguf_path(dir)) {
        return qlora__config_read_dir(env, dir, out);
    }
    return QLORA__GGUF ? qlora__config_read_gguf(env, dir, out) : qlora__gguf_refuse(env, dir);
}
