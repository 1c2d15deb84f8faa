// ---- config.json of a model in a GGUF file ------------------------------------------------------

// The config of a folder that is made from a GGUF file: every key of its family, whatever the
// defaults of transformers are.
typedef struct qlora__merge_config {
    const qlora_model* m;
    const qlora_model_config* c;
    const qlora__arch* arch; // that of the folder
    const char* dtype;
    qlora_rope_desc rope; // as config.json has it
    bool sets;            // the rotation is in rope_parameters, as only newer files have it
    qlora__json_writer w;
} qlora__merge_config;

// The shortest decimal number that is the same F32, for a value that is one: GGUF files hold
// 0.00001 as 0.0000099999997.
static double qlora__merge_short(double value) {
    double unit = 1.0;
    uint32_t bits = qlora__bits((float)value);
    if (fabs(value - (double)(float)value) > 0.0 || fabs(value) > 1e6) {
        return value;
    }
    for (int digits = 0; digits <= 20; digits++) { // up to here, powers of ten are exact
        double rounded = floor(value * unit + 0.5) / unit;
        if (qlora__bits((float)rounded) == bits) {
            return rounded;
        }
        unit *= 10.0;
    }
    return value;
}

static void qlora__merge_put_number(qlora__merge_config* f, const char* key, double value) {
    char digits[32];
    double number = qlora__merge_short(value);
    if (fabs(number) < 1e15 && !(floor(number) < number)) { // 50.0, not 5e+01
        snprintf(digits, sizeof digits, "%lld.0", (long long)number);
        qlora__json_write_word(&f->w, key, digits);
    } else {
        qlora__json_write_double(&f->w, key, number);
    }
}

static void qlora__merge_put_flag(qlora__merge_config* f, const char* key, bool value) {
    qlora__json_write_word(&f->w, key, value ? "true" : "false");
}

static void qlora__merge_put_sizes(qlora__merge_config* f) {
    const qlora_model_config* c = f->c;
    bool hybrid = (f->arch->reads & QLORA__READS_HYBRID) != 0;
    const struct {
        const char* name;
        int64_t value;
    } sizes[] = {{"vocab_size", c->vocab},
                 {"hidden_size", c->hidden},
                 {"intermediate_size", hybrid ? c->expert_intermediate : c->intermediate},
                 {"num_hidden_layers", c->layers},
                 {"num_attention_heads", c->heads},
                 {"num_key_value_heads", c->kv_heads},
                 {"head_dim", c->head_dim},
                 {"max_position_embeddings", c->max_positions}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        qlora__json_write_int(&f->w, sizes[i].name, sizes[i].value);
    }
    bool mean = (f->arch->has & QLORA__HAS_MEAN_NORM) != 0;
    bool gelu = (f->arch->has & QLORA__HAS_GELU) != 0;
    const char* own = qlora__ffn_plans[qlora__arch_first(f->arch)->ffn].activation;
    qlora__merge_put_number(f, mean ? "layer_norm_eps" : "rms_norm_eps", c->rms_eps);
    qlora__json_write_string(&f->w, "hidden_act",
                             own != NULL ? own
                             : gelu      ? "gelu_pytorch_tanh"
                                         : "silu");
    if (gelu) {
        qlora__json_write_string(&f->w, "hidden_activation", "gelu_pytorch_tanh");
    }
    qlora__merge_put_flag(f, "tie_word_embeddings", c->tied);
}

static void qlora__merge_put_biases(qlora__merge_config* f) {
    uint32_t reads = f->arch->reads;
    qlora__json_write_double(&f->w, "attention_dropout", 0.0);
    if ((reads & (QLORA__READS_ATTENTION_BIAS | QLORA__READS_ATTENTION_BIAS_3 |
                  QLORA__READS_BIAS_3_OFF)) != 0) {
        qlora__merge_put_flag(f, "attention_bias", f->c->qkv_bias);
    }
    if ((reads & QLORA__READS_OUT_BIAS) != 0) {
        qlora__merge_put_flag(f, "attention_out_bias", f->c->o_bias);
    }
    if ((reads & QLORA__READS_MLP_BIAS) != 0) {
        qlora__merge_put_flag(f, "mlp_bias", f->c->mlp_bias);
    }
}

// Layers with a window, and layers that are not rotated.
static void qlora__merge_put_layers(qlora__merge_config* f) {
    const qlora_model_config* c = f->c;
    const qlora__arch* arch = f->arch;
    bool pattern = arch->window == QLORA__WINDOW_PATTERN;
    // These classes prepare a window even if no layer has one.
    int64_t window = c->window == 0 && pattern && arch->nope != QLORA__NOPE_FULL
                         ? arch->defaults.window
                         : c->window;
    int64_t period = qlora__merge_period(f->m);
    if (arch->window == QLORA__WINDOW_QWEN || arch->window == QLORA__WINDOW_NOPE ||
        arch->window == QLORA__WINDOW_USED || arch->window == QLORA__WINDOW_LISTED) {
        qlora__merge_put_flag(f, "use_sliding_window", c->window > 0);
    }
    if (arch->window == QLORA__WINDOW_QWEN) {
        qlora__json_write_int(&f->w, "max_window_layers", c->layers);
    }
    if (arch->window != QLORA__WINDOW_NONE && window > 0) {
        qlora__json_write_int(&f->w, "sliding_window", window);
    } else if (arch->window != QLORA__WINDOW_NONE) {
        qlora__json_write_word(&f->w, "sliding_window", "null");
    }
    if ((arch->reads & QLORA__READS_PATTERN) != 0 && period > 0) {
        qlora__json_write_int(&f->w, "sliding_window_pattern", period);
    }
    if (pattern) {
        qlora__json_write_open(&f->w, "layer_types", '[');
        for (int64_t i = 0; i < c->layers; i++) {
            qlora__json_write_string(&f->w, NULL,
                                     c->sliding[i] != 0 ? "sliding_attention" : "full_attention");
        }
        qlora__json_write_close(&f->w, ']');
    }
    if (arch->nope == QLORA__NOPE_LISTED) {
        qlora__json_write_int(&f->w, "no_rope_layer_interval", 4);
        qlora__json_write_open(&f->w, "no_rope_layers", '[');
        for (int64_t i = 0; i < c->layers; i++) {
            qlora__json_write_int(&f->w, NULL, c->no_rope[i] != 0 ? 0 : 1);
        }
        qlora__json_write_close(&f->w, ']');
    }
}

// ---- experts ------------------------------------------------------------------------------------

// Which layers have experts, and what kinds of layers there are.
static void qlora__merge_put_kinds(qlora__merge_config* f) {
    const qlora_model_config* c = f->c;
    const qlora__expert_rows* experts = f->arch->experts->experts;
    bool sigmoid = experts->score == QLORA__ROUTER_SIGMOID;
    int64_t dense = 0;
    for (int64_t i = 0; i < c->layers; i++) {
        dense += c->dense[i];
    }
    if (sigmoid) { // the first ones, or the file is refused when it is read back
        qlora__json_write_int(&f->w, "first_k_dense_replace", dense);
        qlora__merge_put_flag(f, "use_qk_norm", c->qk_norm);
    } else if (f->arch->layout != NULL && (f->arch->reads & QLORA__READS_OWN_WIDTH) != 0) {
        qlora__json_write_int(&f->w, "decoder_sparse_step", 1);
        qlora__json_write_open(&f->w, "mlp_only_layers", '[');
        for (int64_t i = 0; i < c->layers; i++) {
            if (c->dense[i] != 0) {
                qlora__json_write_int(&f->w, NULL, i);
            }
        }
        qlora__json_write_close(&f->w, ']');
    }
    if ((f->arch->reads & QLORA__READS_HYBRID) != 0) {
        qlora__json_write_open(&f->w, "layer_types", '[');
        for (int64_t i = 0; i < c->layers; i++) {
            qlora__json_write_string(&f->w, NULL, "attention");
        }
        qlora__json_write_close(&f->w, ']');
        if (c->no_rope[0] == 0) {
            qlora__json_write_string(&f->w, "position_embedding_type", "rope");
        }
    }
}

static void qlora__merge_put_mixture(qlora__merge_config* f) {
    const qlora_model_config* c = f->c;
    const qlora__layout* layout = f->arch->experts;
    if (c->experts == 0) {
        return;
    }
    uint32_t reads = f->arch->reads;
    bool sigmoid = layout->experts->score == QLORA__ROUTER_SIGMOID;
    bool chosen = layout->experts->score == QLORA__ROUTER_SOFTMAX_CHOSEN;
    bool hybrid = (reads & QLORA__READS_HYBRID) != 0;
    bool gate = layout->experts->shared_gate.module != NULL;
    const struct {
        const char* name;
        int64_t value;
        bool put;
    } sizes[] = {
        {sigmoid  ? "n_routed_experts"
         : chosen ? "num_local_experts"
                  : "num_experts",
         c->experts, true},
        {"num_experts_per_tok", c->experts_per_token, true},
        {"moe_intermediate_size", c->expert_intermediate, (reads & QLORA__READS_OWN_WIDTH) != 0},
        {"shared_intermediate_size", c->shared_intermediate, hybrid},
        {"shared_expert_intermediate_size", c->shared_intermediate, gate},
        {"n_shared_experts", c->shared_intermediate / c->expert_intermediate, sigmoid},
        {"n_group", c->expert_groups, sigmoid},
        {"topk_group", c->expert_groups_used, sigmoid}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        if (sizes[i].put) {
            qlora__json_write_int(&f->w, sizes[i].name, sizes[i].value);
        }
    }
    if ((reads & QLORA__READS_RENORMALISE) != 0) {
        qlora__merge_put_flag(f, "norm_topk_prob", c->renormalise);
    }
    if (sigmoid) {
        qlora__merge_put_number(f, "routed_scaling_factor", c->routed_scale);
    }
    qlora__merge_put_kinds(f);
}

// ---- the rotation -------------------------------------------------------------------------------

// The parameters of rope_type llama3 that give the divisors of a file; false if none do. Only
// ratios of three of them count, and all models have 1 and 4 for two.
static bool qlora__merge_find_llama3(const qlora_rope_desc* from, int64_t dims,
                                     qlora_rope_desc* out) {
    float most = 1.0f;
    for (int64_t i = 0; i < dims / 2; i++) {
        most = from->short_factor[i] > most ? from->short_factor[i] : most;
    }
    for (double original = 16.0; original <= 1048576.0; original *= 2.0) {
        memset(out, 0, sizeof *out);
        out->type = QLORA_ROPE_LLAMA3;
        out->theta = from->theta;
        out->factor = qlora__merge_short((double)most);
        out->low_freq_factor = 1.0;
        out->high_freq_factor = 4.0;
        out->original_max_position = original;
        if (qlora__merge_same_rope(out, from, dims)) {
            return true;
        }
    }
    return false;
}

// A list of divisors of longrope.
static void qlora__merge_put_list(qlora__merge_config* f, const char* key, const float* list) {
    qlora__json_write_open(&f->w, key, '[');
    for (int64_t i = 0; i < f->c->rope_dims / 2; i++) {
        qlora__merge_put_number(f, NULL, (double)list[i]);
    }
    qlora__json_write_close(&f->w, ']');
}

static void qlora__merge_put_longrope(qlora__merge_config* f) {
    const qlora_rope_desc* rope = &f->rope;
    qlora_rope_desc usual = *rope;
    usual.attention_factor = 0.0;
    usual.factor = (double)f->c->max_positions / rope->original_max_position;
    qlora__merge_put_list(f, "short_factor", rope->short_factor);
    qlora__merge_put_list(f, "long_factor", rope->long_factor);
    // older versions accept no other member than these
    if (!qlora__merge_near((double)qlora__rope_attention_factor(&usual),
                           (double)qlora__rope_attention_factor(rope))) {
        qlora__merge_put_number(f, "attention_factor", rope->attention_factor);
    }
}

static void qlora__merge_put_llama3(qlora__merge_config* f) {
    qlora__merge_put_number(f, "low_freq_factor", f->rope.low_freq_factor);
    qlora__merge_put_number(f, "high_freq_factor", f->rope.high_freq_factor);
    qlora__json_write_int(&f->w, "original_max_position_embeddings",
                          (int64_t)f->rope.original_max_position);
}

static void qlora__merge_put_yarn(qlora__merge_config* f) {
    const qlora_rope_desc* rope = &f->rope;
    qlora__json_write_int(&f->w, "original_max_position_embeddings",
                          (int64_t)rope->original_max_position);
    qlora__merge_put_number(f, "beta_fast", rope->beta_fast);
    qlora__merge_put_number(f, "beta_slow", rope->beta_slow);
    if (rope->mscale > 0.0 && rope->mscale_all_dim > 0.0) {
        qlora__merge_put_number(f, "mscale", rope->mscale);
        qlora__merge_put_number(f, "mscale_all_dim", rope->mscale_all_dim);
    }
}

// The members of one set of parameters, but theta.
static void qlora__merge_put_set(qlora__merge_config* f) {
    const qlora_rope_desc* rope = &f->rope;
    bool longrope = rope->type == QLORA_ROPE_LONGROPE;
    qlora__json_write_string(&f->w, longrope ? "type" : "rope_type", qlora__rope_name(rope->type));
    if (rope->type != QLORA_ROPE_DEFAULT && !longrope) {
        qlora__merge_put_number(f, "factor", rope->factor);
    }
    if (longrope) {
        qlora__merge_put_longrope(f);
    } else if (rope->type == QLORA_ROPE_LLAMA3) {
        qlora__merge_put_llama3(f);
    } else if (rope->type == QLORA_ROPE_YARN) {
        qlora__merge_put_yarn(f);
    }
    if (f->c->query_beta > 0.0) {
        qlora__merge_put_number(f, "llama_4_scaling_beta", f->c->query_beta);
    }
    if (f->c->query_beta > 0.0 && rope->type != QLORA_ROPE_YARN) {
        qlora__json_write_int(&f->w, "original_max_position_embeddings",
                              (int64_t)f->c->query_period);
    }
}

// rope_parameters: one set, or one for each kind of layers.
static void qlora__merge_put_ropes(qlora__merge_config* f) {
    bool kinds = (f->arch->reads & QLORA__READS_ROPE_PER_KIND) != 0;
    qlora__json_write_open(&f->w, "rope_parameters", '{');
    if (kinds) {
        qlora__json_write_open(&f->w, "full_attention", '{');
    }
    qlora__merge_put_set(f);
    qlora__merge_put_number(f, "rope_theta", f->rope.theta);
    if (kinds) {
        qlora__json_write_close(&f->w, '}');
        qlora__json_write_open(&f->w, "sliding_attention", '{');
        qlora__json_write_string(&f->w, "rope_type", "default");
        qlora__merge_put_number(f, "rope_theta", f->c->rope_sliding.theta);
        qlora__json_write_close(&f->w, '}');
    }
    qlora__json_write_close(&f->w, '}');
}

// The older keys, which all versions of transformers read, wherever they can say it.
static void qlora__merge_put_rotation(qlora__merge_config* f) {
    const qlora_model_config* c = f->c;
    if ((f->arch->reads & QLORA__READS_PARTIAL) != 0) {
        qlora__json_write_double(&f->w, "partial_rotary_factor",
                                 (double)c->rope_dims / (double)c->head_dim);
    }
    if (f->sets) {
        qlora__merge_put_ropes(f);
        return;
    }
    qlora__merge_put_number(f, "rope_theta", f->rope.theta);
    if ((f->arch->reads & QLORA__READS_LOCAL_THETA) != 0) {
        qlora__merge_put_number(f, "rope_local_base_freq", c->rope_sliding.theta);
    }
    if (f->rope.type == QLORA_ROPE_LONGROPE) {
        qlora__json_write_int(&f->w, "original_max_position_embeddings",
                              (int64_t)f->rope.original_max_position);
    }
    if (f->rope.type == QLORA_ROPE_DEFAULT) {
        qlora__json_write_word(&f->w, "rope_scaling", "null");
        return;
    }
    qlora__json_write_open(&f->w, "rope_scaling", '{');
    qlora__merge_put_set(f);
    qlora__json_write_close(&f->w, '}');
}

// ---- the whole file -----------------------------------------------------------------------------

static void qlora__merge_put_scalars(qlora__merge_config* f) {
    const qlora_model_config* c = f->c;
    uint32_t reads = f->arch->reads;
    double scale = c->attention_scale > 0.0 ? c->attention_scale : 1.0 / sqrt((double)c->head_dim);
    if ((reads & QLORA__READS_MULTIPLIERS) != 0) {
        qlora__merge_put_number(f, "embedding_multiplier", c->embedding_scale);
        qlora__merge_put_number(f, "residual_multiplier", c->residual_scale);
        qlora__merge_put_number(f, "attention_multiplier", scale);
        qlora__merge_put_number(f, "logits_scaling", c->logits_divisor);
    }
    if ((reads & QLORA__READS_LOGIT_SCALE) != 0) {
        qlora__merge_put_number(f, "logit_scale", 1.0 / c->logits_divisor);
    }
    if ((reads & QLORA__READS_QUERY_SCALAR) != 0) {
        qlora__json_write_int(&f->w, "query_pre_attn_scalar",
                              (int64_t)floor(1.0 / (scale * scale) + 0.5));
    }
    const struct {
        uint32_t reads;
        const char* name;
        double value;
    } caps[] = {
        {QLORA__READS_CAPS, "attn_logit_softcapping", c->attention_cap},
        {QLORA__READS_CAPS | QLORA__READS_FINAL_CAP, "final_logit_softcapping", c->logits_cap}};
    for (int i = 0; i < 2; i++) {
        if ((reads & caps[i].reads) != 0 && caps[i].value > 0.0) {
            qlora__merge_put_number(f, caps[i].name, caps[i].value);
        } else if ((reads & caps[i].reads) != 0) {
            qlora__json_write_word(&f->w, caps[i].name, "null");
        }
    }
}

static void qlora__merge_put_special(qlora__merge_config* f) {
    const qlora_model_config* c = f->c;
    const struct {
        const char* name;
        int32_t id;
    } ids[] = {{"bos_token_id", c->bos_id}, {"pad_token_id", c->pad_id}};
    for (int i = 0; i < 2; i++) {
        if (ids[i].id >= 0) {
            qlora__json_write_int(&f->w, ids[i].name, ids[i].id);
        } else {
            qlora__json_write_word(&f->w, ids[i].name, "null");
        }
    }
    if (c->stop_count == 1) {
        qlora__json_write_int(&f->w, "eos_token_id", c->stop_ids[0]);
    } else if (c->stop_count > 1) {
        qlora__json_write_open(&f->w, "eos_token_id", '[');
        for (int32_t i = 0; i < c->stop_count; i++) {
            qlora__json_write_int(&f->w, NULL, c->stop_ids[i]);
        }
        qlora__json_write_close(&f->w, ']');
    } else {
        qlora__json_write_word(&f->w, "eos_token_id", "null");
    }
}

static void qlora__merge_put_all(qlora__merge_config* f, qlora__string* text) {
    qlora__json_write_begin(&f->w, text, 2);
    qlora__json_write_open(&f->w, NULL, '{');
    qlora__json_write_open(&f->w, "architectures", '[');
    qlora__json_write_string(&f->w, NULL, f->arch->architecture);
    qlora__json_write_close(&f->w, ']');
    qlora__json_write_string(&f->w, "model_type", f->arch->model_type);
    qlora__json_write_string(&f->w, "torch_dtype", f->dtype);
    qlora__merge_put_sizes(f);
    qlora__merge_put_biases(f);
    qlora__merge_put_layers(f);
    qlora__merge_put_mixture(f);
    qlora__merge_put_rotation(f);
    qlora__merge_put_scalars(f);
    qlora__merge_put_special(f);
    qlora__json_write_close(&f->w, '}');
    qlora__string_add(text, "\n", 1);
}

// What makes another model of a config that was read back, or NULL.
static const char* qlora__merge_reads_as(const qlora_model* m, qlora_model_config* file) {
    const qlora_model_config* c = &m->plan.config;
    const struct {
        const char* name;
        int64_t ours;
        int64_t theirs;
    } sizes[] = {{"the vocabulary", c->vocab, file->vocab},
                 {"the hidden size", c->hidden, file->hidden},
                 {"the inner size", c->intermediate, file->intermediate},
                 {"the layers", c->layers, file->layers},
                 {"the heads", c->heads, file->heads},
                 {"the k and v heads", c->kv_heads, file->kv_heads},
                 {"the size of heads", c->head_dim, file->head_dim},
                 {"the positions", c->max_positions, file->max_positions},
                 {"the window", c->window, file->window},
                 {"biases of q, k and v", c->qkv_bias, file->qkv_bias},
                 {"biases of attention's output", c->o_bias, file->o_bias},
                 {"biases of the MLP", c->mlp_bias, file->mlp_bias},
                 {"norms of q and k", c->qk_norm, file->qk_norm},
                 {"BOS", c->bos_id, file->bos_id},
                 {"padding", c->pad_id, file->pad_id},
                 {"the stop ids", c->stop_count, file->stop_count}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        if (sizes[i].ours != sizes[i].theirs) {
            return sizes[i].name;
        }
    }
    bool switches = file->rope.type == QLORA_ROPE_LONGROPE;
    if (switches &&
        !qlora__merge_near(c->rope.original_max_position, file->rope.original_max_position)) {
        return "the rotation of long texts";
    }
    return qlora__merge_differs(m, file);
}

// Writes one form of the file, and reads it back. *differs: what config.json cannot express, or
// NULL.
static qlora_result qlora__merge_try_config(qlora__merge_config* f, qlora__string* text,
                                            const char** differs) {
    qlora__env* env = text->env;
    text->size = 0;
    qlora__merge_put_all(f, text);
    QLORA__TRY(text->result);
    qlora_model_config* file =
        (qlora_model_config*)qlora__env_alloc(env, sizeof(qlora_model_config));
    if (file == NULL) {
        return QLORA_ERR_MEMORY;
    }
    qlora_result r = qlora__config_parse(env, "config.json", text->data, text->size, file);
    *differs = r == QLORA_OK ? qlora__merge_reads_as(f->m, file) : NULL;
    qlora__env_free(env, file, sizeof *file);
    return r;
}

// The config.json of a model in a GGUF file whose weights are exported as `dtype`.
static qlora_result qlora__merge_make_config(qlora_ctx* ctx, const qlora_model* m,
                                             const char* dtype, qlora__string* text) {
    qlora__merge_config f;
    const char* differs = NULL;
    memset(&f, 0, sizeof f);
    f.m = m;
    f.c = &m->plan.config;
    f.arch = qlora__arch_of_text(f.c);
    f.dtype = dtype;
    f.rope = f.c->rope;
    f.sets = (f.arch->reads & QLORA__READS_QUERY_BETA) != 0;
    bool divisors = f.rope.type == QLORA_ROPE_LONGROPE;
    if (divisors && (f.arch->reads & QLORA__READS_LONGROPE) == 0 &&
        !qlora__merge_find_llama3(&f.c->rope, f.c->rope_dims, &f.rope)) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "%s: rope_freqs.weight is not what rope_type llama3 gives, so that "
                           "config.json cannot express it",
                           m->dir);
    }
    QLORA__TRY(qlora__merge_try_config(&f, text, &differs));
    if (differs != NULL && !f.sets) { // what only the newer keys can say
        f.sets = true;
        QLORA__TRY(qlora__merge_try_config(&f, text, &differs));
    }
    if (differs != NULL) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "%s: config.json of model_type %s cannot express this model (%s)",
                           m->dir, f.arch->model_type, differs);
    }
    if (f.arch != m->arch) {
        QLORA__LOG(ctx, WARN, MODEL, "%s has only the language part of a model: the folder is a %s",
                   m->dir, f.arch->model_type);
    }
    return QLORA_OK;
}
