// ---- a GGUF file from a model folder ------------------------------------------------------------

static void qlora__merge_put_f32(qlora__merge_file* f, const char* key, double value) {
    uint32_t bits = qlora__bits((float)value);
    qlora__merge_key(f, key, QLORA__GGUF_F32);
    qlora__gguf_u32(&f->values, bits);
}

static const char* qlora__merge_arch(const qlora__merge_file* f) {
    return qlora__arch_gguf(f->g->m->arch, &f->g->m->plan.config);
}

// The name of a key of the architecture.
static const char* qlora__merge_arch_key(const qlora__merge_file* f, const char* name,
                                         char out[128]) {
    snprintf(out, 128, "%s.%s", qlora__merge_arch(f), name);
    return out;
}

// The period n of a pattern in which all layers but every n-th have a window, which is the only
// form of it that llama.cpp reads; 0 if there is none. Without one, the file is refused when it is
// read back, unless the pattern is llama.cpp's own.
static int64_t qlora__merge_period(const qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    bool pattern = c->window > 0 && m->arch->window == QLORA__WINDOW_PATTERN;
    for (int64_t n = 1; pattern && n <= c->layers + 1; n++) {
        bool fits = true;
        for (int64_t i = 0; i < c->layers; i++) {
            fits = fits && (c->sliding[i] != 0) == ((i + 1) % n != 0);
        }
        if (fits) {
            return n;
        }
    }
    return 0;
}

// What qlora__gguf_config_experts reads besides the sizes.
static void qlora__merge_put_experts(qlora__merge_file* f) {
    const qlora_model_config* c = &f->g->m->plan.config;
    const qlora__layout* layout = f->g->m->arch->experts;
    bool sigmoid = layout->experts->score == QLORA__ROUTER_SIGMOID;
    bool shared = c->shared_intermediate > 0;
    char key[128];
    int64_t dense = 0;
    while (dense < c->layers && c->dense[dense] != 0) {
        dense++;
    }
    const struct {
        const char* name;
        int64_t value;
        bool put;
    } values[] = {
        {"expert_shared_feed_forward_length", c->shared_intermediate, shared && !sigmoid},
        {"expert_shared_count", c->shared_intermediate / c->expert_intermediate, sigmoid},
        {"leading_dense_block_count", dense, sigmoid},
        {"expert_gating_func", 2, sigmoid},
        {"expert_group_count", c->expert_groups, sigmoid && c->expert_groups > 1},
        {"expert_group_used_count", c->expert_groups_used, sigmoid && c->expert_groups > 1}};
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        if (values[i].put) {
            qlora__merge_put_u32(f, qlora__merge_arch_key(f, values[i].name, key), values[i].value);
        }
    }
    if (sigmoid) {
        qlora__merge_put_f32(f, qlora__merge_arch_key(f, "expert_weights_scale", key),
                             c->routed_scale);
        qlora__merge_put_bool(f, qlora__merge_arch_key(f, "expert_weights_norm", key),
                              c->renormalise);
    }
}

// What qlora__gguf_config_sizes and its neighbours read. A number that is 0 is left out.
static void qlora__merge_put_config(qlora__merge_file* f) {
    const qlora_model_config* c = &f->g->m->plan.config;
    char key[128];
    const qlora__arch* arch = f->g->m->arch;
    // the width of an MLP beside the experts has a key of its own
    bool shared = (arch->reads & QLORA__READS_HYBRID) != 0 && c->experts > 0;
    const struct {
        const char* name;
        int64_t value;
    } sizes[] = {{"block_count", c->layers},
                 {"context_length", c->max_positions},
                 {"embedding_length", c->hidden},
                 {"feed_forward_length", shared ? c->expert_intermediate : c->intermediate},
                 {"attention.head_count", c->heads},
                 {"attention.head_count_kv", c->kv_heads},
                 {"attention.key_length", c->head_dim},
                 {"attention.value_length", c->head_dim},
                 {"vocab_size", c->vocab},
                 {"rope.dimension_count", c->rope_dims},
                 {"attention.sliding_window", c->window},
                 {"attention.sliding_window_pattern", qlora__merge_period(f->g->m)},
                 {"expert_count", c->experts},
                 {"expert_used_count", c->experts_per_token},
                 {"expert_feed_forward_length", c->expert_intermediate}};
    bool scaled = (arch->reads & QLORA__READS_MULTIPLIERS) != 0;
    bool factor = (arch->reads & QLORA__READS_LOGIT_SCALE) != 0;
    const char* eps = (arch->has & QLORA__HAS_MEAN_NORM) != 0 ? "attention.layer_norm_epsilon"
                                                              : "attention.layer_norm_rms_epsilon";
    const struct {
        const char* name;
        double value;
    } numbers[] = {{eps, c->rms_eps},
                   {"rope.freq_base", c->rope.theta},
                   {"attn_logit_softcapping", c->attention_cap},
                   {"final_logit_softcapping", c->logits_cap},
                   {"attention.temperature_scale", c->query_beta},
                   {"attention.scale", scaled ? c->attention_scale : 0.0},
                   {"embedding_scale", scaled ? c->embedding_scale : 0.0},
                   {"residual_scale", scaled ? c->residual_scale : 0.0},
                   {"logit_scale", scaled   ? c->logits_divisor
                                   : factor ? 1.0 / c->logits_divisor
                                            : 0.0}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        if (sizes[i].value > 0) {
            qlora__merge_put_u32(f, qlora__merge_arch_key(f, sizes[i].name, key), sizes[i].value);
        }
    }
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        if (numbers[i].value > 0.0) {
            qlora__merge_put_f32(f, qlora__merge_arch_key(f, numbers[i].name, key),
                                 numbers[i].value);
        }
    }
    if (scaled && c->no_rope[0] != 0) { // all layers, or the file is refused when it is read back
        qlora__merge_put_bool(f, qlora__merge_arch_key(f, "rope.scaling.finetuned", key), false);
    }
}

// A tensor of divisors of the frequencies.
static void qlora__merge_add_factors(qlora__merge_file* f, int which, const char* name) {
    qlora__merge_part* part =
        qlora__merge_part_add(f, name, NULL, 1, f->g->m->plan.config.rope_dims / 2, 1);
    part->raw = f->factors[which];
}

static void qlora__merge_put_rope(qlora__merge_file* f) {
    const qlora_model_config* c = &f->g->m->plan.config;
    const qlora_rope_desc* rope = &c->rope;
    char key[128];
    bool yarn = rope->type == QLORA_ROPE_YARN;
    if (yarn || rope->type == QLORA_ROPE_LINEAR) {
        qlora__merge_key(f, qlora__merge_arch_key(f, "rope.scaling.type", key), QLORA__GGUF_STRING);
        qlora__gguf_string(&f->values, yarn ? "yarn" : "linear");
        qlora__merge_put_f32(f, qlora__merge_arch_key(f, "rope.scaling.factor", key), rope->factor);
    }
    // one key for both; if they differ, the file is refused when it is read back
    double original = c->query_period > 0.0 ? c->query_period : rope->original_max_position;
    if (original > 0.0) {
        qlora__merge_put_u32(f,
                             qlora__merge_arch_key(f, "rope.scaling.original_context_length", key),
                             (int64_t)original);
    }
    if (yarn) {
        qlora__merge_put_f32(f, qlora__merge_arch_key(f, "rope.scaling.yarn_beta_fast", key),
                             rope->beta_fast > 0.0 ? rope->beta_fast : 32.0);
        qlora__merge_put_f32(f, qlora__merge_arch_key(f, "rope.scaling.yarn_beta_slow", key),
                             rope->beta_slow > 0.0 ? rope->beta_slow : 1.0);
        if (rope->mscale > 0.0 && rope->mscale_all_dim > 0.0) {
            qlora__merge_put_f32(f,
                                 qlora__merge_arch_key(f, "rope.scaling.yarn_log_multiplier", key),
                                 rope->mscale_all_dim);
        }
    }
    if ((f->g->m->arch->gguf_rule.flags & QLORA__GGUF_LOCAL_THETA) != 0) {
        qlora__merge_put_f32(f, qlora__merge_arch_key(f, "rope.freq_base_swa", key),
                             c->rope_sliding.theta);
    }
    for (int64_t i = 0; rope->type == QLORA_ROPE_LLAMA3 && i < c->rope_dims / 2; i++) {
        qlora_rope_desc plain = *rope;
        plain.type = QLORA_ROPE_DEFAULT;
        f->factors[0][i] = qlora__rope_frequency(&plain, i, c->rope_dims) /
                           qlora__rope_frequency(rope, i, c->rope_dims);
    }
    if (rope->type == QLORA_ROPE_LLAMA3) {
        qlora__merge_add_factors(f, 0, "rope_freqs.weight");
    }
    if (rope->type == QLORA_ROPE_LONGROPE) {
        memcpy(f->factors[0], rope->short_factor, sizeof f->factors[0]);
        memcpy(f->factors[1], rope->long_factor, sizeof f->factors[1]);
        qlora__merge_put_f32(f, qlora__merge_arch_key(f, "rope.scaling.attn_factor", key),
                             (double)qlora__rope_attention_factor(rope));
        qlora__merge_add_factors(f, 0, "rope_factors_short.weight");
        qlora__merge_add_factors(f, 1, "rope_factors_long.weight");
    }
}

// ---- tensors ------------------------------------------------------------------------------------

static qlora_result qlora__merge_unknown(const qlora__merge_file* f,
                                         const qlora__merge_item* item) {
    return qlora__fail(f->g->ctx, QLORA_ERR_UNSUPPORTED,
                       "%s: %s has no place in a GGUF file of architecture %s", f->g->m->dir,
                       item->tensor->name, qlora__merge_arch(f));
}

// A tensor of a layer: `rest` is its name after the number, such as "mlp.up_proj.weight".
static qlora_result qlora__merge_add_layer(qlora__merge_file* f, const qlora__merge_item* item,
                                           uint32_t rank, long layer, const char* rest) {
    const qlora__arch* arch = f->g->m->arch;
    const qlora_model_config* c = &f->g->m->plan.config;
    const char* last = strrchr(rest, '.');
    size_t size = last != NULL ? (size_t)(last - rest) : 0;
    int64_t rows = rank == 1 ? item->rows * item->cols : item->rows;
    int64_t cols = rank == 1 ? 1 : item->cols;
    char name[QLORA__GGUF_NAME];
    const qlora__layer* own = &f->g->m->layers[layer];
    const qlora__expert_rows* experts = own->layout->experts;
    int count = experts != NULL ? qlora__first_expert(own->layout) : own->layout->count;
    if (experts != NULL && experts->correction != NULL && strcmp(rest, experts->correction) == 0) {
        snprintf(name, sizeof name, "blk.%ld.exp_probs_b.bias", layer);
        qlora__merge_part_add(f, name, item, 1, rows, cols);
        return QLORA_OK;
    }
    for (int i = 0; i < count; i++) {
        const qlora__projection_row* row = qlora__row_of(own, i);
        if (!qlora__gguf_is(rest, size, row->module)) {
            continue;
        }
        bool rotated = row->rotated && (arch->has & QLORA__HAS_PERMUTED_GGUF) != 0;
        int halves = row->gguf_second != NULL ? 2 : 1;
        for (int h = 0; h < halves; h++) {
            snprintf(name, sizeof name, "blk.%ld.%s%s", layer,
                     h == 0 ? row->gguf : row->gguf_second, last);
            qlora__merge_part* part =
                qlora__merge_part_add(f, name, item, rank, rows / halves, cols);
            part->first = h * (rows / halves);
            part->head_dim = rotated ? c->head_dim : 0;
        }
        return QLORA_OK;
    }
    const char* norm = NULL;
    for (int i = 0; i < 4; i++) {
        bool is =
            arch->norms->module[i] != NULL && qlora__gguf_is(rest, size, arch->norms->module[i]);
        norm = is ? arch->norms->gguf[i] : norm;
    }
    norm = qlora__gguf_is(rest, size, "self_attn.q_norm")   ? "attn_q_norm"
           : qlora__gguf_is(rest, size, "self_attn.k_norm") ? "attn_k_norm"
                                                            : norm;
    if (norm == NULL) {
        return qlora__merge_unknown(f, item);
    }
    snprintf(name, sizeof name, "blk.%ld.%s%s", layer, norm, last);
    qlora__merge_part* part = qlora__merge_part_add(f, name, item, rank, rows, cols);
    part->plus_one = (arch->has & QLORA__HAS_NORM_OFFSET) != 0;
    return QLORA_OK;
}

// The item of a tensor, NULL if the folder has none.
static const qlora__merge_item* qlora__merge_find_item(const qlora__merge* g, const char* name) {
    uint32_t low = 0;
    uint32_t high = g->count; // in the order of their plain names
    const char* plain = qlora__plain_name(name);
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        int order = strcmp(qlora__plain_name(g->items[middle].tensor->name), plain);
        if (order == 0) {
            return &g->items[middle];
        }
        low = order < 0 ? middle + 1 : low;
        high = order < 0 ? high : middle;
    }
    return NULL;
}

// The tensors that the matrices of projection `number`, that of the first expert, become. `item`
// has it, or the matrices of all experts, of which it is number `k`.
static qlora_result qlora__merge_add_stack(qlora__merge_file* f, const qlora__merge_item* item,
                                           long l, int number, int k) {
    const qlora__layer* layer = &f->g->m->layers[l];
    const qlora__projection_row* row = qlora__row_of(layer, number);
    const qlora__projection* p = &layer->projections[number];
    int halves = row->gguf_second != NULL ? 2 : 1;
    for (int h = 0; h < halves; h++) {
        for (int64_t e = 0; e < f->g->m->plan.config.experts; e++) {
            const qlora__merge_item* own = item;
            char name[224];
            char tensor[QLORA__GGUF_NAME];
            if (item->layer < 0) {
                int i = number + (int)e * layer->layout->experts->count;
                qlora__base_weight(f->g->m, l, i, ".weight", name, sizeof name);
                own = qlora__merge_find_item(f->g, name);
            }
            if (own == NULL || own->layer != item->layer) {
                return qlora__fail(f->g->ctx, QLORA_ERR_FORMAT, "%s: tensor %s is missing",
                                   f->g->m->dir, name);
            }
            snprintf(tensor, sizeof tensor, "blk.%ld.%s.weight", l,
                     h == 0 ? row->gguf : row->gguf_second);
            qlora__merge_part* part =
                qlora__merge_part_add(f, tensor, own, 3, p->out / halves, p->in);
            part->first = h * part->rows;
            part->experts = f->g->m->plan.config.experts;
            part->expert = e;
            part->matrix = item->layer < 0 ? -1 : e * item->parts + k;
        }
    }
    return QLORA_OK;
}

// A matrix of an expert, or those of all experts. *done is false if the item is neither. The
// matrices of other experts are added with that of the first.
static qlora_result qlora__merge_add_expert(qlora__merge_file* f, const qlora__merge_item* item,
                                            long l, bool* done) {
    const qlora__layer* layer = &f->g->m->layers[l];
    *done = item->layer >= 0;
    for (int k = 0; item->layer >= 0 && k < item->parts; k++) {
        QLORA__TRY(qlora__merge_add_stack(f, item, l, item->stack + k, k));
    }
    if (*done || item->projection == NULL || layer->experts == NULL) {
        return QLORA_OK;
    }
    int number = (int)(item->projection - layer->projections);
    int expert = qlora__expert_of(layer, number);
    *done = expert >= 0;
    return expert == 0 ? qlora__merge_add_stack(f, item, l, number, 0) : QLORA_OK;
}

static qlora_result qlora__merge_add_item(qlora__merge_file* f, const qlora__merge_item* item) {
    static const char* const names[][2] = {{"embed_tokens.weight", "token_embd.weight"},
                                           {"norm.weight", "output_norm.weight"},
                                           {"lm_head.weight", "output.weight"}};
    const char* plain = qlora__plain_name(item->tensor->name);
    bool matrix = item->projection != NULL || item->tensor->rank == 2;
    if (strncmp(plain, "layers.", 7) == 0) {
        char* end = NULL;
        long layer = strtol(plain + 7, &end, 10);
        if (*end == '.' && layer >= 0 && layer < f->g->m->plan.config.layers) {
            bool done = false;
            QLORA__TRY(qlora__merge_add_expert(f, item, layer, &done));
            if (done) {
                return QLORA_OK;
            }
            return qlora__merge_add_layer(f, item, matrix ? 2 : 1, layer, end + 1);
        }
    }
    for (int i = 0; i < 3; i++) {
        if (strcmp(plain, names[i][0]) == 0) {
            int64_t rows = matrix ? item->rows : item->rows * item->cols;
            qlora__merge_part* part = qlora__merge_part_add(f, names[i][1], item, matrix ? 2 : 1,
                                                            rows, matrix ? item->cols : 1);
            part->plus_one = i == 1 && (f->g->m->arch->has & QLORA__HAS_NORM_OFFSET) != 0;
            return QLORA_OK;
        }
    }
    return qlora__merge_unknown(f, item);
}

static qlora_result qlora__merge_from_folder(qlora__merge_file* f) {
    const qlora__merge* g = f->g;
    const char* slash = strrchr(g->m->dir, '/');
    uint64_t parts = 2;
    for (uint32_t i = 0; i < g->count; i++) {
        bool stack = g->items[i].layer >= 0;
        parts += 2 * (uint64_t)(stack ? g->m->plan.config.experts * g->items[i].parts : 1);
    }
    QLORA__TRY(qlora__merge_parts_reserve(f, parts));
    qlora__merge_key(f, "general.architecture", QLORA__GGUF_STRING);
    qlora__gguf_string(&f->values, qlora__merge_arch(f));
    qlora__merge_key(f, "general.type", QLORA__GGUF_STRING);
    qlora__gguf_string(&f->values, "model");
    qlora__merge_key(f, "general.name", QLORA__GGUF_STRING);
    qlora__gguf_string(&f->values, slash != NULL && slash[1] != '\0' ? slash + 1 : g->m->dir);
    qlora__merge_put_config(f);
    if (g->m->plan.config.experts > 0) {
        qlora__merge_put_experts(f);
    }
    qlora__merge_put_rope(f);
    if (g->m->plan.config.window > 0 && g->m->arch->window != QLORA__WINDOW_PATTERN) {
        QLORA__LOG(g->ctx, WARN, MODEL,
                   "llama.cpp ignores the window of %lld tokens of this architecture (%s): it "
                   "computes longer texts differently",
                   (long long)g->m->plan.config.window, qlora__merge_arch(f));
    }
    for (uint32_t i = 0; i < g->count; i++) {
        QLORA__TRY(qlora__merge_add_item(f, &g->items[i]));
    }
    return qlora__merge_put_tokenizer(f);
}

// ---- what the file means ------------------------------------------------------------------------

static bool qlora__merge_near(double a, double b) {
    double most = fabs(a) > fabs(b) ? fabs(a) : fabs(b);
    return fabs(a - b) <= 1e-6 * most;
}

static bool qlora__merge_same_rope(const qlora_rope_desc* a, const qlora_rope_desc* b,
                                   int64_t dims) {
    for (int i = 0; i < 2 * (int)(dims / 2); i++) {
        qlora_rope_desc x = *a;
        qlora_rope_desc y = *b;
        x.use_long = i % 2 != 0;
        y.use_long = i % 2 != 0;
        if (!qlora__merge_near((double)qlora__rope_frequency(&x, i / 2, dims),
                               (double)qlora__rope_frequency(&y, i / 2, dims))) {
            return false;
        }
    }
    return qlora__merge_near((double)qlora__rope_attention_factor(a),
                             (double)qlora__rope_attention_factor(b));
}

// The file is read back: whatever GGUF cannot express would make another model of it. Returns what
// differs, or NULL.
static const char* qlora__merge_differs(const qlora_model* m, qlora_model_config* file) {
    const qlora_model_config* c = &m->plan.config;
    qlora__config_resolve(file);
    double root = 1.0 / sqrt((double)c->head_dim);
    const struct {
        const char* name;
        double ours;
        double theirs;
    } numbers[] = {
        {"the attention scale", c->attention_scale > 0.0 ? c->attention_scale : root,
         file->attention_scale > 0.0 ? file->attention_scale : root},
        {"the scale of embeddings", c->embedding_scale, file->embedding_scale},
        {"the scale of residuals", c->residual_scale, file->residual_scale},
        {"the scale of logits", c->logits_divisor, file->logits_divisor},
        {"the cap of scores", c->attention_cap, file->attention_cap},
        {"the cap of logits", c->logits_cap, file->logits_cap},
        {"the scale by position", c->query_beta, file->query_beta},
        {"the period of that scale", c->query_beta > 0.0 ? c->query_period : 0.0,
         file->query_period},
        {"the norm's epsilon", c->rms_eps, file->rms_eps},
        {"the rotated width", (double)c->rope_dims, (double)file->rope_dims},
        {"the number of experts", (double)c->experts, (double)file->experts},
        {"the experts of a token", (double)c->experts_per_token, (double)file->experts_per_token},
        {"the width of experts", (double)c->expert_intermediate, (double)file->expert_intermediate},
        {"the width beside the experts", (double)c->shared_intermediate,
         (double)file->shared_intermediate},
        {"norm_topk_prob", c->renormalise ? 1.0 : 0.0, file->renormalise ? 1.0 : 0.0},
        {"the scale of experts", c->routed_scale, file->routed_scale},
        {"groups of experts", (double)c->expert_groups, (double)file->expert_groups},
        {"groups of experts that are used", (double)c->expert_groups_used,
         (double)file->expert_groups_used},
        {"the head", c->tied ? 1.0 : 0.0, file->tied ? 1.0 : 0.0}};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        if (!qlora__merge_near(numbers[i].ours, numbers[i].theirs)) {
            return numbers[i].name;
        }
    }
    for (int64_t l = 0; l < c->layers; l++) {
        if (c->no_rope[l] != file->no_rope[l]) {
            return "layers without rotation";
        }
        if (c->dense[l] != file->dense[l]) {
            return "layers without experts";
        }
        // llama.cpp ignores the windows of the other architectures; so does its converter
        if (m->arch->window == QLORA__WINDOW_PATTERN && c->sliding[l] != file->sliding[l]) {
            return "layers with a window";
        }
    }
    if (!qlora__merge_same_rope(&c->rope, &file->rope, c->rope_dims) ||
        (c->window > 0 && file->window > 0 &&
         !qlora__merge_same_rope(&c->rope_sliding, &file->rope_sliding, c->rope_dims))) {
        return "the rotation";
    }
    return NULL;
}

static qlora_result qlora__merge_check(const qlora__merge* g, const char* path) {
    qlora_model_config* file =
        (qlora_model_config*)qlora__alloc(g->ctx, sizeof(qlora_model_config));
    if (file == NULL) {
        return QLORA_ERR_MEMORY;
    }
    qlora_result r = qlora__config_read(&g->ctx->env, path, file);
    const char* what = r == QLORA_OK ? qlora__merge_differs(g->m, file) : NULL;
    if (what != NULL) {
        r = qlora__fail(g->ctx, QLORA_ERR_UNSUPPORTED,
                        "%s: llama.cpp would compute this model differently (%s), because a GGUF "
                        "file cannot express it; nothing was written",
                        g->m->dir, what);
    }
    qlora__free(g->ctx, file, sizeof *file);
    if (r != QLORA_OK) {
        g->ctx->env.files.remove(path, g->ctx->env.files.user);
    }
    return r;
}

// The whole export.
static qlora_result qlora__merge_gguf(qlora__merge* g, const char* path,
                                      const qlora__gguf_type* type) {
    qlora_ctx* ctx = g->ctx;
    qlora__merge_file f;
    memset(&f, 0, sizeof f);
    f.g = g;
    f.type = type;
    QLORA__TRY(qlora__merge_open(g, UINT64_MAX));
    QLORA__TRY(qlora__merge_tell(g));
    f.room_bytes = (size_t)qlora__max(4 * g->most_cols, (int64_t)1 << 20);
    f.buffer = (uint8_t*)qlora__alloc(ctx, f.room_bytes);
    qlora_result r = f.buffer != NULL ? QLORA_OK : QLORA_ERR_MEMORY;
    qlora__string_begin(&ctx->env, &f.values);
    bool copied = g->folder.gguf.count > 0;
    bool found = false;
    r = r == QLORA_OK ? qlora__merge_put_template(&f, &found) : r;
    if (r == QLORA_OK && copied) {
        qlora__merge_values_copy(&f, found);
        r = qlora__merge_parts_copy(&f);
    } else if (r == QLORA_OK) {
        r = qlora__merge_from_folder(&f);
    }
    r = r == QLORA_OK ? qlora__merge_file_write(&f, path) : r;
    r = r == QLORA_OK && !copied ? qlora__merge_check(g, path) : r;
    qlora__string_free(&f.values);
    qlora__free(ctx, f.buffer, f.room_bytes);
    qlora__free(ctx, f.parts, f.room * sizeof *f.parts);
    return r;
}
