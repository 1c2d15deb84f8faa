// ---- DoRA's norms and trained rows of the embedding ---------------------------------------------

static bool qlora__is_dora(const qlora_model* m, const qlora__projection* p) {
    return m->dora && p->rank > 0;
}

// Whether a stack has a projection with a magnitude.
static bool qlora__stack_is_dora(const qlora_model* m, const qlora__layer* layer, int group) {
    bool any = false;
    for (int i = 0; i < layer->layout->groups[group].count; i++) {
        any =
            any || qlora__is_dora(m, &layer->projections[layer->layout->groups[group].first + i]);
    }
    return any;
}

// W + s B A of a projection, in the memory of the shared operand.
static qlora_result qlora__dora_weight(qlora_ctx* ctx, const qlora_model* m,
                                       const qlora__projection* p, qlora_tensor* w) {
    qlora__arena_window(&m->work.operand, 0, p->out, p->in, w);
    QLORA__TRY(qlora__is_coded(p)
                   ? qlora__coded_window(ctx, qlora__codes_of(p), 0, 0, w)
                   : qlora__point(ctx, QLORA__POINT_SCALE, &p->dense, NULL, 1.0f, w));
    return qlora__linear_gemm(ctx, m->math, QLORA__LINEAR_WEIGHT, 1.0f, 1.0f, &p->sb, &p->a, w);
}

// Computes the norms and gains of all projections anew; with `start`, the magnitudes as well, which
// then are the norms.
static qlora_result qlora__dora_refresh(qlora_ctx* ctx, qlora_model* m, bool start) {
    for (int64_t l = 0; l < m->plan.config.layers && m->dora && qlora__computes(m); l++) {
        qlora__layer* layer = &m->layers[l];
        for (int g = 0; g < QLORA__GROUPS; g++) {
            int64_t at = 0;
            for (int i = 0; i < layer->layout->groups[g].count; i++) {
                qlora__projection* p = &layer->projections[layer->layout->groups[g].first + i];
                qlora_tensor w;
                qlora_tensor gain;
                qlora_tensor inverse;
                qlora__arena_window(&layer->gains[g], at, 1, p->out, &gain);
                qlora__arena_window(&layer->inverses[g], at, 1, p->out, &inverse);
                at += p->out;
                if (!qlora__is_dora(m, p)) {
                    QLORA__TRY(qlora_fill(ctx, 1.0f, &gain));
                    continue;
                }
                size_t scratch = qlora__scratch_mark(ctx);
                QLORA__TRY(qlora__dora_weight(ctx, m, p, &w));
                QLORA__TRY(qlora__row_norms(ctx, &w, &p->magnitude, &gain, &inverse, start));
                qlora__scratch_release(ctx, scratch);
            }
        }
    }
    return QLORA_OK;
}

// The embedding and the head that a pass uses.
static const qlora_tensor* qlora__embed_table(const qlora_model* m) {
    return m->use_adapters && m->tables.saved_embed ? &m->tables.own_embed : &m->base.embed;
}

static const qlora_tensor* qlora__head_table(const qlora_model* m) {
    if (!m->use_adapters) {
        return &m->base.head;
    }
    return m->tables.saved_head   ? &m->tables.own_head
           : m->tables.saved_tied ? &m->tables.own_embed
                                  : &m->base.head;
}

// Whether the gradient of the residual stream below layer 0 is needed.
static bool qlora__trains_embedding(const qlora_model* m) {
    return m->tables.saved_embed || m->tables.token_count > 0;
}

// Writes the trained rows, or those of the base, into the embedding and a head that also has them,
// before a pass reads it.
static qlora_result qlora__tokens_place(qlora_ctx* ctx, qlora_model* m) {
    const qlora_tensor* head =
        m->tables.head_rows ? &m->tables.own_head_tokens : &m->tables.own_tokens;
    if (m->tables.tokens_twice || m->tables.head_rows) {
        QLORA__TRY(qlora__put_rows(ctx, m->use_adapters ? head : &m->tables.head_tokens,
                                   &m->tables.token_rows, &m->base.head));
    }
    return m->tables.token_count > 0
               ? qlora__put_rows(ctx,
                                 m->use_adapters ? &m->tables.own_tokens : &m->tables.base_tokens,
                                 &m->tables.token_rows, &m->base.embed)
               : QLORA_OK;
}
