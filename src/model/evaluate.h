// ---- evaluation ---------------------------------------------------------------------------------

// Checks a batch and runs the forward pass; the output of the final norm is then in m->work.x.
// labelled: rows without a label are not needed.
static qlora_result qlora__eval_forward(qlora_ctx* ctx, qlora_model* m, const qlora_batch* batch,
                                        const void* out, bool labelled, qlora__micro* micro) {
    int64_t tokens = 0;
    if (out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    QLORA__TRY(qlora__model_has_weights(ctx, m, "evaluating"));
    QLORA__TRY(qlora__model_idle(ctx, m, "evaluating"));
    QLORA__TRY(qlora__batch_check(ctx, m, batch, &tokens));
    qlora__micro_desc desc = {1.0, 0, 0, NULL, m->chosen, NULL};
    QLORA__TRY(qlora__batch_send(ctx, m, batch, &desc, micro));
    micro->labelled = labelled ? micro->labelled : 0;
    qlora__pass pass = qlora__pass_of_micro(m, micro, false);
    return qlora__forward(&pass);
}

static qlora_result qlora__flag_read(qlora_ctx* ctx, const qlora_model* m) {
    int32_t flag = 0;
    QLORA__TRY(qlora__copy_out(ctx, &flag, m->flag.data, sizeof flag));
    return qlora__flag_check(ctx, flag);
}

static qlora_result qlora__eval(qlora_ctx* ctx, qlora_model* m, const qlora_batch* batch,
                                qlora_eval_info* out) {
    qlora__micro micro;
    QLORA__TRY(qlora__eval_forward(ctx, m, batch, out, true, &micro));
    qlora_tensor totals = qlora__window(&m->totals, 1, 3, 3);
    QLORA__TRY(qlora__tensor_zero(ctx, &totals));
    qlora__pass pass = qlora__pass_of_micro(m, &micro, false);
    QLORA__TRY(qlora__head(&pass, micro.chunks, &totals, false));
    float sums[3];
    QLORA__TRY(qlora__floats_out(ctx, totals.data, 3, sums));
    QLORA__TRY(qlora__flag_read(ctx, m));
    out->loss = (double)sums[0] + (double)sums[1];
    out->labels = (double)sums[2];
    out->tokens = micro.tokens;
    return QLORA_OK;
}

qlora_result qlora_eval(qlora_model* model, const qlora_batch* batch, qlora_eval_info* out) {
    qlora_ctx* ctx = qlora__model_ctx(model);
    QLORA__ENTER(ctx, "qlora_eval");
    return qlora__leave(ctx, qlora__eval(ctx, model, batch, out));
}

static qlora_result qlora__eval_sequences(qlora_ctx* ctx, qlora_model* m, const qlora_batch* batch,
                                          double* out) {
    qlora__micro micro;
    QLORA__TRY(qlora__eval_forward(ctx, m, batch, out, true, &micro));
    qlora__pass pass = qlora__pass_of_micro(m, &micro, false);
    const qlora_tensor* logps = &m->work.preference.logps;
    QLORA__TRY(qlora__head(&pass, micro.chunks, NULL, false));
    QLORA__TRY(qlora__preference_logps(ctx, &m->work.preference, &m->work.losses, logps));
    QLORA__TRY(qlora__copy_out(ctx, out, logps->data, (size_t)batch->count * sizeof *out));
    return qlora__flag_read(ctx, m);
}

qlora_result qlora_eval_sequences(qlora_model* model, const qlora_batch* batch, double* out) {
    qlora_ctx* ctx = qlora__model_ctx(model);
    QLORA__ENTER(ctx, "qlora_eval_sequences");
    return qlora__leave(ctx, qlora__eval_sequences(ctx, model, batch, out));
}

// Copies rows of logits as floats, through a host buffer if they are 16-bit.
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

static qlora_result qlora__eval_logits(qlora_ctx* ctx, qlora_model* m, const qlora_batch* batch,
                                       float* out) {
    qlora__micro micro;
    QLORA__TRY(qlora__eval_forward(ctx, m, batch, out, false, &micro));
    qlora__pass pass = qlora__pass_of_micro(m, &micro, false);
    for (int64_t row = 0; row < micro.tokens; row += m->plan.head_chunk) {
        int64_t rows = qlora__min(m->plan.head_chunk, micro.tokens - row);
        QLORA__TRY(qlora__head_logits(&pass, row, rows));
        qlora_tensor logits = qlora__window(&m->work.logits, rows, 0, m->plan.config.vocab);
        QLORA__TRY(qlora__logits_out(ctx, &logits, rows, out + row * m->plan.config.vocab));
    }
    return qlora__flag_read(ctx, m);
}

qlora_result qlora_eval_logits(qlora_model* model, const qlora_batch* batch, float* out) {
    qlora_ctx* ctx = qlora__model_ctx(model);
    QLORA__ENTER(ctx, "qlora_eval_logits");
    return qlora__leave(ctx, qlora__eval_logits(ctx, model, batch, out));
}
