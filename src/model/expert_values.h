// ---- values of experts from adapter files -------------------------------------------------------

// Brings the values of a file into the order that they have in memory: A as peft, B [E, out, r]. Of
// exchanged roles, those of A come from B and those of B from A.
static qlora_result qlora__layout_arrange(qlora_ctx* ctx, const qlora_model* m,
                                          const qlora__trained* t, int layout, float* values) {
    int64_t experts = m->plan.config.experts;
    int64_t rank = (t->is_b ? t->cols : t->rows) / experts;
    int64_t size = t->is_b ? t->rows : t->cols; // out of B, in of A
    bool exchanged = layout == QLORA_EXPERT_LAYOUT_PEFT_018;
    if (layout == QLORA_EXPERT_LAYOUT_PEFT || (!t->is_b && !exchanged)) {
        return qlora__trained_mix(ctx, t, false, values);
    }
    size_t bytes = (size_t)(t->rows * t->cols) * sizeof *values;
    float* copy = (float*)qlora__alloc(ctx, bytes);
    if (copy == NULL) {
        return QLORA_ERR_MEMORY;
    }
    memcpy(copy, values, bytes);
    for (int64_t i = 0; i < experts * rank * size; i++) {
        int64_t e = i / (rank * size);
        int64_t j = t->is_b ? i % rank : i / size % rank;
        int64_t k = t->is_b ? i / rank % size : i % size; // row of B, column of A
        values[i] = !exchanged ? copy[k * experts * rank + e * rank + j]
                    : t->is_b  ? copy[(e * rank + j) * size + k]
                               : copy[k * experts * rank + j * experts + e];
    }
    qlora__free(ctx, copy, bytes);
    return QLORA_OK;
}

// Reads A or B of a unit from those of its experts: A = [A_gate; A_up], and B has theirs on its
// diagonal. With `values` NULL, only checks that all of them are there.
static qlora_result qlora__numbered_read(qlora_ctx* ctx, const qlora_model* m,
                                         const qlora__peft* peft, const qlora__trained* t,
                                         float* values) {
    const qlora__layer* layer = &m->layers[t->layer];
    int first = (int)(t->projection - layer->projections);
    int parts = qlora__numbered_parts(layer, first);
    int64_t rank = t->projection->rank / parts;
    if (values != NULL) {
        memset(values, 0, (size_t)(t->rows * t->cols) * sizeof *values);
    }
    for (int64_t k = 0; k < m->plan.config.experts * parts; k++) {
        int64_t part = k % parts;
        int i = first + (int)(k / parts) * layer->layout->experts->count + (int)part;
        const qlora__projection* p = &layer->projections[i];
        const qlora__st_tensor* from = NULL;
        char module[160];
        char key[320];
        qlora__base_module(m, t->layer, i, module, sizeof module);
        QLORA__TRY(qlora__peft_key(&ctx->env, module, t->is_b ? 'B' : 'A', key));
        QLORA__TRY(qlora__folder_need(&ctx->env, &peft->tensors, key, t->is_b ? p->out : rank,
                                      t->is_b ? rank : p->in, &from));
        if (values == NULL) {
            continue;
        }
        if (!t->is_b) {
            qlora__st_read_f32(from, 0, (uint64_t)(rank * p->in), values + k * rank * p->in);
        }
        for (int64_t row = 0; t->is_b && row < p->out; row++) {
            int64_t to = (k * p->out + row) * parts * rank + part * rank;
            qlora__st_read_f32(from, (uint64_t)(row * rank), (uint64_t)rank, values + to);
        }
    }
    return QLORA_OK;
}
