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
    bool is_b;
} qlora__trained;

// Norm number `norm` of a layer, under its name in the base; false if it is not trained.
static bool qlora__trained_norm(const qlora_model* m, int64_t layer, int norm,
                                qlora__trained* out) {
    const qlora_model_config* c = &m->plan.config;
    const char* module = qlora__arch_norm(m->arch, c, norm);
    if (!m->desc.train_norms || module == NULL) {
        return false;
    }
    snprintf(out->name, sizeof out->name, "model.%slayers.%lld.%s.weight",
             c->wrapped ? "language_model." : "", (long long)layer, module);
    out->at = m->layers[layer].norms_at[norm];
    out->rows = 1;
    out->cols = qlora__arch_norm_width(m->arch, c, norm);
    out->shadow_scale = 1.0f;
    return true;
}

// The trained tensor number `index`, in PEFT's order; false past the last one.
static bool qlora__trained_at(const qlora_model* m, int64_t index, qlora__trained* out) {
    const qlora_model_config* c = &m->plan.config;
    int64_t at = 0;
    memset(out, 0, sizeof *out);
    for (int64_t l = 0; l < c->layers; l++) {
        for (int i = 0; i < m->arch->layout->count; i++) {
            const qlora__projection* p = &m->layers[l].projections[i];
            if (p->rank == 0) {
                continue;
            }
            if (index < at + 2) {
                char module[160];
                out->is_b = index == at + 1;
                qlora__module_of(m, l, i, module, sizeof module);
                snprintf(out->name, sizeof out->name, "%s.lora_%c.weight", module,
                         out->is_b ? 'B' : 'A');
                out->at = out->is_b ? p->b_at : p->a_at;
                out->rows = out->is_b ? p->out : p->rank;
                out->cols = out->is_b ? p->rank : p->in;
                out->shadow_scale = out->is_b ? p->scale : 1.0f;
                out->decays = true;
                out->projection = p;
                out->layer = l;
                return true;
            }
            at += 2;
        }
        for (int i = 0; i < QLORA__NORMS; i++) {
            if (qlora__trained_norm(m, l, i, out) && index == at++) {
                return true;
            }
        }
    }
    if (m->desc.train_norms && index == at) {
        snprintf(out->name, sizeof out->name, "model.%snorm.weight",
                 c->wrapped ? "language_model." : "");
        out->at = m->final_norm_at;
        out->rows = 1;
        out->cols = c->hidden;
        out->shadow_scale = 1.0f;
        return true;
    }
    return false;
}

// If the layer has its own operand, AdamW also writes A and s B to their places in it.
static void qlora__range_copy(const qlora_model* m, const qlora__trained* t,
                              qlora_adamw_range* range) {
    const qlora__layer* layer = &m->layers[t->layer];
    if (t->projection == NULL || !layer->cached) {
        return;
    }
    int number = (int)(t->projection - layer->projections);
    int group = m->arch->layout->rows[number].group;
    const qlora_linear_desc* linear = &layer->linears[group];
    qlora_tensor a;
    qlora_tensor sb;
    int64_t row = 0;
    int64_t at = 0;
    for (int i = 0; i < number - m->arch->layout->groups[group].first; i++) {
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

static qlora_result qlora__ranges_upload(qlora_ctx* ctx, qlora_model* m) {
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
    args.m = &m->moment1;
    args.v = &m->moment2;
    args.shadow = &m->shadow;
    args.ranges = &m->ranges;
    args.state = &m->adamw;
    args.longest_range = m->longest_range;
    return args;
}

// Brings the shadow and the operands of cached layers up to date with the parameters.
static qlora_result qlora__parameters_changed(qlora_ctx* ctx, qlora_model* m) {
    qlora_adamw_desc args = qlora__adamw_desc_of(m);
    return m->range_count > 0 ? qlora_adamw_shadow(ctx, &args) : QLORA_OK;
}

// Initialises A uniformly in +-1/sqrt(in), as PEFT's Kaiming initialisation, and B with zero; equal
// on both backends.
static qlora_result qlora__adapters_start(qlora_ctx* ctx, qlora_model* m) {
    qlora__trained t;
    for (int64_t i = 0; i < m->range_count && qlora__trained_at(m, i, &t); i++) {
        int64_t n = t.rows * t.cols;
        if (t.projection == NULL) {
            continue; // norms have been loaded
        }
        size_t bytes = (size_t)n * sizeof(QLORA__REAL);
        QLORA__REAL* values = (QLORA__REAL*)qlora__alloc_zero(ctx, bytes);
        if (values == NULL) {
            return QLORA_ERR_MEMORY;
        }
        const uint32_t key[2] = {(uint32_t)m->desc.seed,
                                 (uint32_t)(m->desc.seed >> 32) ^ 0x4c6f5241u};
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
    return QLORA_OK;
}
