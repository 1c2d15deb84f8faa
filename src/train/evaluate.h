// ---- evaluation ---------------------------------------------------------------------------------

static qlora_result qlora__eval(qlora_trainer* t, const qlora_batch* batch, qlora_eval_info* out) {
    qlora_ctx* ctx = t->ctx;
    qlora_model* m = t->m;
    if (out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    QLORA__TRY(qlora__trainer_need(ctx, t, false));
    int64_t tokens_before = t->tokens; // evaluation in the middle of a step changes nothing there
    QLORA__TRY(qlora__batch_send(t, batch, 1.0));
    int64_t tokens = t->tokens - tokens_before;
    t->tokens = tokens_before;
    qlora_tensor totals = qlora__window(&m->totals, 1, 3, 3);
    QLORA__TRY(qlora__tensor_zero(ctx, &totals));
    qlora__pass pass = qlora__pass_of(m, t->rows, false);
    QLORA__TRY(qlora__forward(&pass));
    QLORA__TRY(qlora__head(&pass, t->chunks, &totals, false));
    float sums[3];
    QLORA__TRY(qlora__floats_out(ctx, totals.data, 3, sums));
    QLORA__TRY(qlora__flag_check(ctx, m));
    out->loss = (double)sums[0] + (double)sums[1];
    out->labels = (double)sums[2];
    out->tokens = tokens;
    return QLORA_OK;
}

qlora_result qlora_eval(qlora_trainer* trainer, const qlora_batch* batch, qlora_eval_info* out) {
    QLORA__ENTER(qlora__trainer_ctx(trainer), "qlora_eval");
    return qlora__leave(trainer->ctx, qlora__eval(trainer, batch, out));
}

// Rows of logits as floats, through a host buffer when they are 16-bit.
static qlora_result qlora__logits_out(qlora_ctx* ctx, const qlora_tensor* logits, int64_t rows,
                                      float* out) {
    int64_t n = rows * logits->cols;
    if (logits->dtype == QLORA_F32) {
        return qlora__floats_out(ctx, logits->data, n, out);
    }
    uint16_t* half = (uint16_t*)qlora__alloc(ctx, (size_t)n * 2);
    if (half == NULL) {
        return QLORA_ERR_MEMORY;
    }
    qlora_result r = qlora__copy_out(ctx, half, logits->data, (size_t)n * 2);
    for (int64_t i = 0; i < n && r == QLORA_OK; i++) {
        out[i] = qlora__bf16_to(half[i]);
    }
    qlora__free(ctx, half, (size_t)n * 2);
    return r;
}

static qlora_result qlora__eval_logits(qlora_trainer* t, const qlora_batch* batch, float* out) {
    qlora_ctx* ctx = t->ctx;
    qlora_model* m = t->m;
    if (out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    QLORA__TRY(qlora__trainer_need(ctx, t, false));
    int64_t tokens_before = t->tokens;
    QLORA__TRY(qlora__batch_send(t, batch, 1.0));
    int64_t tokens = t->tokens - tokens_before;
    t->tokens = tokens_before;
    qlora__pass pass = qlora__pass_of(m, t->rows, false);
    QLORA__TRY(qlora__forward(&pass));
    for (int64_t row = 0; row < tokens; row += m->plan.head_chunk) {
        int64_t rows = qlora__min(m->plan.head_chunk, tokens - row);
        qlora_tensor x;
        QLORA__TRY(qlora__tensor_view(ctx, &m->x, row, rows, 0, m->plan.config.hidden, &x));
        qlora_tensor logits = qlora__window(&m->logits, rows, 0, m->plan.config.vocab);
        QLORA__TRY(qlora__gemm_named(ctx, pass.math, false, true, false, 0, &x, &m->head, &logits));
        QLORA__TRY(qlora__logits_out(ctx, &logits, rows, out + row * m->plan.config.vocab));
    }
    return qlora__flag_check(ctx, m);
}

qlora_result qlora_eval_logits(qlora_trainer* trainer, const qlora_batch* batch, float* out) {
    QLORA__ENTER(qlora__trainer_ctx(trainer), "qlora_eval_logits");
    return qlora__leave(trainer->ctx, qlora__eval_logits(trainer, batch, out));
}
