// ---- trained tensors ----------------------------------------------------------------------------

typedef struct qlora__trained {
    char name[192]; // PEFT's name without base_model.model.
    int64_t at;     // first element in the parameter arena
    int64_t rows;
    int64_t cols;
    float shadow_scale;
    bool decays;
    const qlora__projection* projection; // NULL for a norm
    int64_t layer;                       // of the projection
    int64_t experts; // B of so many experts, whose columns PEFT mixes; 0 = anything else
    bool is_b;
    bool is_magnitude;
    bool is_norm; // a factor; what the base stores may be that minus 1
} qlora__trained;

// Norm number `norm` of a layer, under its name in the base; false if it is not trained.
static bool qlora__trained_norm(const qlora_model* m, int64_t layer, int norm,
                                qlora__trained* out) {
    const qlora_model_config* c = &m->plan.config;
    const char* module = qlora__arch_norm(m->arch, c, norm);
    if (!m->desc.train_norms || module == NULL) {
        return false;
    }
    qlora__norm_name(m, layer, norm, out->name);
    out->at = m->layers[layer].norms_at[norm];
    out->rows = 1;
    out->cols = qlora__arch_norm_width(m->arch, c, norm);
    out->shadow_scale = 1.0f;
    out->is_norm = true;
    return true;
}

// A (0), B (1) or the magnitude (2) of what projection number `i` of a layer stands for.
static void qlora__trained_part(const qlora_model* m, int64_t layer, int i, int part,
                                qlora__trained* out) {
    static const char* const names[] = {"lora_A.weight", "lora_B.weight", "lora_magnitude_vector"};
    const qlora__projection* p = &m->layers[layer].projections[i];
    bool stack = qlora__is_stack(&m->layers[layer], i) != 0;
    int64_t experts = stack ? m->plan.config.experts : 1;
    int64_t height = qlora__unit_out(&m->layers[layer], i);
    const int64_t at[3] = {p->a_at, p->b_at, p->m_at};
    const int64_t rows[3] = {experts * p->rank, height, 1};
    const int64_t cols[3] = {p->in, experts * p->rank, height};
    char module[160];
    qlora__matrices_of(m, layer, i, module, sizeof module);
    out->experts = stack && part == 1 ? experts : 0;
    snprintf(out->name, sizeof out->name, "%s.%s", module, names[part]);
    out->is_b = part == 1;
    out->is_magnitude = part == 2;
    out->at = at[part];
    out->rows = rows[part];
    out->cols = cols[part];
    out->shadow_scale = out->is_b ? p->scale : 1.0f;
    out->decays = true;
    out->projection = p;
    out->layer = layer;
}

// The whole trained matrices, number `index` of them; false past the last one.
static bool qlora__trained_saved(const qlora_model* m, int64_t index, qlora__trained* out) {
    const qlora_model_config* c = &m->plan.config;
    const char* prefix = c->wrapped ? "language_model." : "";
    const struct {
        bool has;
        int64_t at;
        int64_t rows;
        const char* name;
    } all[] = {{m->tables.saved_embed, m->tables.embed_at, c->vocab, "embed_tokens.weight"},
               {m->tables.saved_head, m->tables.head_at, c->vocab, "lm_head.weight"},
               {m->tables.token_count > 0, m->tables.tokens_at, m->tables.token_count,
                "embed_tokens.token_adapter.trainable_tokens_delta"},
               {m->tables.head_rows, m->tables.head_tokens_at, m->tables.token_count,
                "lm_head.token_adapter.trainable_tokens_delta"}};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        if (all[i].has && index-- == 0) {
            bool head = i % 2 == 1;
            snprintf(out->name, sizeof out->name, "%s%s%s", head ? "" : "model.",
                     head ? "" : prefix, all[i].name);
            out->at = all[i].at;
            out->rows = all[i].rows;
            out->cols = c->hidden;
            out->shadow_scale = 1.0f;
            out->decays = true;
            return true;
        }
    }
    return false;
}

// The trained tensor number `index`, in PEFT's order; false past the last one.
static bool qlora__trained_at(const qlora_model* m, int64_t index, qlora__trained* out) {
    const qlora_model_config* c = &m->plan.config;
    int64_t at = 0;
    memset(out, 0, sizeof *out);
    for (int64_t l = 0; l < c->layers; l++) {
        for (int u = 0; u < qlora__unit_count(&m->layers[l]); u++) {
            int i = qlora__unit_at(&m->layers[l], u);
            const qlora__projection* p = &m->layers[l].projections[i];
            if (p->rank == 0) {
                continue;
            }
            int64_t parts = m->dora ? 3 : 2;
            if (index < at + parts) {
                qlora__trained_part(m, l, i, (int)(index - at), out);
                return true;
            }
            at += parts;
        }
        for (int i = 0; i < QLORA__NORMS; i++) {
            if (m->desc.train_norms && qlora__has_norm(m, i) && index == at++) {
                return qlora__trained_norm(m, l, i, out);
            }
        }
    }
    if (m->desc.train_norms && index == at) {
        qlora__norm_name(m, -1, 0, out->name);
        out->at = m->tables.final_norm_at;
        out->rows = 1;
        out->cols = c->hidden;
        out->shadow_scale = 1.0f;
        out->is_norm = true;
        return true;
    }
    return qlora__trained_saved(m, index - at - (m->desc.train_norms ? 1 : 0), out);
}

// B of experts: in memory, the matrices [out, r] follow each other; PEFT has one matrix, in which
// column j E + e is column j of expert e.
static qlora_result qlora__trained_mix(qlora_ctx* ctx, const qlora__trained* t, bool to_peft,
                                       float* values) {
    if (t->experts == 0) {
        return QLORA_OK;
    }
    int64_t rank = t->cols / t->experts;
    size_t bytes = (size_t)(t->rows * t->cols) * sizeof *values;
    float* copy = (float*)qlora__alloc(ctx, bytes);
    if (copy == NULL) {
        return QLORA_ERR_MEMORY;
    }
    memcpy(copy, values, bytes);
    for (int64_t e = 0; e < t->experts; e++) {
        for (int64_t i = 0; i < t->rows * rank; i++) {
            int64_t own = e * t->rows * rank + i;
            int64_t mixed = i / rank * t->cols + i % rank * t->experts + e;
            values[to_peft ? mixed : own] = copy[to_peft ? own : mixed];
        }
    }
    qlora__free(ctx, copy, bytes);
    return QLORA_OK;
}

// The place of A or s B of the current adapter among those of all adapters.
static void qlora__range_copy_wide(const qlora_model* m, const qlora__trained* t,
                                   qlora_adamw_range* range) {
    int number = (int)(t->projection - m->layers[t->layer].projections);
    const qlora__lora* all = &m->wide[t->layer].loras[number];
    const qlora_tensor* to = t->is_b ? &all->sb : &all->a;
    int64_t column = qlora__wide_first(m, m->adapter, t->layer, number);
    size_t at = (size_t)(t->is_b ? column : column * to->ld) * qlora_dtype_bytes(to->dtype);
    range->copy = (char*)to->data + at;
    range->copy_cols = t->cols;
    range->copy_ld = to->ld;
}

// If the layer has its own operand, AdamW also writes A and s B to their places in it.
static void qlora__range_copy(const qlora_model* m, const qlora__trained* t,
                              qlora_adamw_range* range) {
    const qlora__layer* layer = &m->layers[t->layer];
    if (m->wide != NULL && t->projection != NULL) {
        qlora__range_copy_wide(m, t, range);
        return;
    }
    int number = t->projection != NULL ? (int)(t->projection - layer->projections) : 0;
    if (t->projection == NULL || t->is_magnitude || !layer->cached || qlora__has_several(m) ||
        number >= layer->layout->count) {
        return; // several adapters, and those of experts, are placed when they are used
    }
    int group = layer->layout->rows[number].group;
    const qlora_linear_desc* linear = &layer->linears[group];
    qlora_tensor a;
    qlora_tensor sb;
    int64_t row = 0;
    int64_t at = 0;
    for (int i = 0; i < number - layer->layout->groups[group].first; i++) {
        row += linear->parts[i].out;
        at += linear->parts[i].rank;
    }
    if (qlora__linear_joined(linear, layer->pads[group], &a, &sb)) {
        const qlora_tensor* to = t->is_b ? &sb : &a;
        int64_t first = t->is_b ? row * to->ld + at : at * to->ld;
        range->copy = (char*)to->data + (size_t)first * qlora_dtype_bytes(to->dtype);
        range->copy_cols = t->cols;
        range->copy_ld = to->ld;
    }
}

// The factor for the learning rate of a trained tensor. As in PEFT, vectors go with B in LoRA+.
static double qlora__range_lr(const qlora_model* m, const qlora__trained* t, double loraplus_ratio,
                              const double* factors) {
    bool matrix = !t->is_norm && !t->is_magnitude;
    double ratio = t->is_b || !matrix ? loraplus_ratio : 1.0;
    if (factors == NULL) {
        return ratio;
    }
    int which = t->is_norm ? QLORA_LR_NORMS : QLORA_LR_EMBEDDINGS;
    if (t->projection != NULL) {
        const qlora__layer* layer = &m->layers[t->layer];
        which = qlora__row_of(layer, (int)(t->projection - layer->projections))->bit;
    }
    return ratio * factors[which];
}

// factors NULL = all 1.
static qlora_result qlora__ranges_upload(qlora_ctx* ctx, qlora_model* m, double loraplus_ratio,
                                         const double* factors) {
    size_t bytes = (size_t)m->range_count * sizeof(qlora_adamw_range);
    qlora_adamw_range* ranges = (qlora_adamw_range*)qlora__alloc_zero(ctx, bytes);
    if (ranges == NULL) {
        return QLORA_ERR_MEMORY;
    }
    qlora__trained t;
    for (int64_t i = 0; i < m->range_count && qlora__trained_at(m, i, &t); i++) {
        ranges[i].begin = t.at;
        ranges[i].count = t.rows * t.cols;
        ranges[i].decay = t.decays ? 1.0f : 0.0f;
        ranges[i].shadow_scale = t.shadow_scale;
        ranges[i].lr = qlora__range_lr(m, &t, loraplus_ratio, factors);
        qlora__range_copy(m, &t, &ranges[i]);
    }
    qlora_result r = qlora__copy_in(ctx, m->ranges.data, ranges, bytes);
    qlora__free(ctx, ranges, bytes);
    return r;
}

static qlora_adamw_desc qlora__adamw_desc_of(const qlora_model* m) {
    qlora_adamw_desc args;
    memset(&args, 0, sizeof args);
    args.param = &m->parameters;
    args.grad = &m->gradients;
    bool coded = m->desc.optimizer == QLORA_OPTIMIZER_ADAMW_8BIT;
    args.m = coded ? NULL : &m->moment1;
    args.v = coded ? NULL : &m->moment2;
    args.shadow = &m->shadow;
    args.ranges = &m->ranges;
    args.state = &m->adamw;
    args.longest_range = m->longest_range;
    return args;
}

// Brings the shadow and the operands of cached layers up to date with the parameters.
static qlora_result qlora__parameters_changed(qlora_ctx* ctx, qlora_model* m) {
    qlora_adamw_desc args = qlora__adamw_desc_of(m);
    if (m->range_count > 0) {
        QLORA__TRY(qlora_adamw_shadow(ctx, &args));
    }
    return qlora__dora_refresh(ctx, m, false);
}

// Copies a row of the embedding or the head, through the host, to the parameters.
static qlora_result qlora__saved_row(qlora_ctx* ctx, const qlora_model* m,
                                     const qlora_tensor* table, int64_t row, int64_t at,
                                     QLORA__REAL* values) {
    int64_t n = table->cols;
    size_t size = qlora_dtype_bytes(table->dtype);
    const char* from = (const char*)table->data + (size_t)(row * n) * size;
    qlora_tensor to;
    QLORA__TRY(qlora__copy_out(ctx, values, from, (size_t)n * size));
    for (int64_t i = n - 1; i >= 0 && table->dtype != QLORA_F32; i--) { // widened in place
        values[i] = (QLORA__REAL)qlora__load(values, table->dtype, i);
    }
    qlora__arena_window(&m->parameters, at, 1, n, &to);
    return qlora__copy_in(ctx, to.data, values, (size_t)n * sizeof *values);
}

// Copies a row of the embedding or the head, through the host, to row i of `kept`.
static qlora_result qlora__token_keep(qlora_ctx* ctx, const qlora_tensor* table, int64_t row,
                                      const qlora_tensor* kept, int64_t i, QLORA__REAL* values) {
    size_t bytes = (size_t)table->cols * qlora_dtype_bytes(table->dtype);
    QLORA__TRY(qlora__copy_out(ctx, values, (const char*)table->data + (size_t)row * bytes, bytes));
    return qlora__copy_in(ctx, (char*)kept->data + (size_t)i * bytes, values, bytes);
}

// Keeps the base's rows of trained tokens, and starts the trained ones with them.
static qlora_result qlora__token_start(qlora_ctx* ctx, const qlora_model* m, int64_t i,
                                       QLORA__REAL* values) {
    int64_t id = m->tables.token_ids[i];
    int64_t at = i * m->plan.config.hidden;
    QLORA__TRY(qlora__token_keep(ctx, &m->base.embed, id, &m->tables.base_tokens, i, values));
    QLORA__TRY(qlora__saved_row(ctx, m, &m->base.embed, id, m->tables.tokens_at + at, values));
    if (m->tables.tokens_twice || m->tables.head_rows) {
        QLORA__TRY(qlora__token_keep(ctx, &m->base.head, id, &m->tables.head_tokens, i, values));
    }
    return m->tables.head_rows
               ? qlora__saved_row(ctx, m, &m->base.head, id, m->tables.head_tokens_at + at, values)
               : QLORA_OK;
}

// Starts trained matrices and rows with the values of the base, and keeps the base's rows.
static qlora_result qlora__saved_start(qlora_ctx* ctx, qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    if (!qlora__computes(m)) {
        return QLORA_OK;
    }
    size_t bytes = (size_t)c->hidden * sizeof(QLORA__REAL);
    QLORA__REAL* values = (QLORA__REAL*)qlora__alloc(ctx, bytes);
    qlora_result r = values != NULL ? QLORA_OK : QLORA_ERR_MEMORY;
    r = r == QLORA_OK ? qlora__new_rows_start(ctx, m, false) : r;
    for (int64_t i = 0; i < c->vocab && m->tables.saved_embed && r == QLORA_OK; i++) {
        r = qlora__saved_row(ctx, m, &m->base.embed, i, m->tables.embed_at + i * c->hidden, values);
    }
    for (int64_t i = 0; i < c->vocab && m->tables.saved_head && r == QLORA_OK; i++) {
        r = qlora__saved_row(ctx, m, &m->base.head, i, m->tables.head_at + i * c->hidden, values);
    }
    if (m->tables.token_count > 0 && r == QLORA_OK) {
        r = qlora__copy_in(ctx, m->tables.token_rows.data, m->tables.token_ids,
                           (size_t)m->tables.token_count * sizeof *m->tables.token_ids);
    }
    for (int64_t i = 0; i < m->tables.token_count && r == QLORA_OK; i++) {
        r = qlora__token_start(ctx, m, i, values);
    }
    qlora__free(ctx, values, bytes);
    return r == QLORA_OK ? qlora__new_rows_start(ctx, m, true) : r;
}

// Initialises A uniformly in +-1/sqrt(in), as PEFT's Kaiming initialisation, and B with zero; equal
// on both backends.
static qlora_result qlora__adapters_start(qlora_ctx* ctx, qlora_model* m) {
    qlora__trained t;
    for (int64_t i = 0; i < m->range_count && qlora__trained_at(m, i, &t); i++) {
        int64_t n = t.rows * t.cols;
        if (t.projection == NULL || t.is_magnitude) {
            continue; // from the base
        }
        size_t bytes = (size_t)n * sizeof(QLORA__REAL);
        QLORA__REAL* values = (QLORA__REAL*)qlora__alloc_zero(ctx, bytes);
        if (values == NULL) {
            return QLORA_ERR_MEMORY;
        }
        const uint32_t key[2] = {(uint32_t)m->adapter_seed,
                                 (uint32_t)(m->adapter_seed >> 32) ^ 0x4c6f5241u};
        float bound = 1.0f / sqrtf((float)t.cols);
        for (int64_t j = 0; j < n && !t.is_b; j += 4) {
            const uint32_t counter[4] = {(uint32_t)(j / 4), (uint32_t)i,
                                         (uint32_t)((uint64_t)i >> 32), 0};
            uint32_t words[4];
            qlora__philox(counter, key, words);
            for (int64_t k = j; k < j + 4 && k < n; k++) {
                float unit = (float)(words[k - j] >> 8) * (1.0f / 16777216.0f);
                values[k] = (QLORA__REAL)((2.0f * unit - 1.0f) * bound);
            }
        }
        qlora_tensor window;
        qlora__arena_window(&m->parameters, t.at, t.rows, t.cols, &window);
        qlora_result r = qlora__copy_in(ctx, window.data, values, bytes);
        qlora__free(ctx, values, bytes);
        QLORA__TRY(r);
    }
    QLORA__TRY(qlora__saved_start(ctx, m));
    return qlora__dora_refresh(ctx, m, true); // B is zero, so the magnitudes are those of the base
}
