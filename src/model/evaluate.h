// ---- evaluation ---------------------------------------------------------------------------------

static qlora_result qlora__eval_out(qlora_ctx* ctx, const void* out) {
    return out != NULL ? QLORA_OK : qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL");
}

// Checks a batch and sends it to the device.
static qlora_result qlora__eval_send(qlora_ctx* ctx, qlora_model* m, const qlora_batch* batch,
                                     qlora__micro* micro) {
    int64_t tokens = 0;
    QLORA__TRY(qlora__model_has_weights(ctx, m, "evaluating"));
    QLORA__TRY(qlora__model_idle(ctx, m, "evaluating"));
    QLORA__TRY(qlora__batch_check(ctx, m, batch, &tokens));
    qlora__micro_desc desc = {1.0, 0, 0, NULL, m->chosen, NULL, 0.0};
    return qlora__batch_send(ctx, m, batch, &desc, micro);
}

// Sends a batch and runs the forward pass; the output of the final norm is then in m->work.x.
// labelled: rows without a label are not needed.
static qlora_result qlora__eval_forward(qlora_ctx* ctx, qlora_model* m, const qlora_batch* batch,
                                        const void* out, bool labelled, qlora__micro* micro) {
    QLORA__TRY(qlora__eval_out(ctx, out));
    QLORA__TRY(qlora__eval_send(ctx, m, batch, micro));
    micro->labelled = labelled ? micro->labelled : 0;
    qlora__pass pass = qlora__pass_of_micro(m, micro, false);
    return qlora__forward(&pass);
}

static qlora_result qlora__flag_read(qlora_ctx* ctx, const qlora_model* m) {
    int32_t flag = 0;
    QLORA__TRY(qlora__copy_out(ctx, &flag, m->flag.data, sizeof flag));
    return qlora__flag_check(ctx, flag);
}

// The loss of a batch after the forward pass.
static qlora_result qlora__eval_head(qlora_ctx* ctx, qlora_model* m, const qlora__micro* micro,
                                     qlora_eval_info* out) {
    qlora_tensor totals = qlora__window(&m->totals, 1, 4, 3);
    QLORA__TRY(qlora__tensor_zero(ctx, &totals));
    qlora__pass pass = qlora__pass_of_micro(m, micro, false);
    QLORA__TRY(qlora__head(&pass, micro->chunks, &totals, false));
    float sums[3];
    QLORA__TRY(qlora__floats_out(ctx, totals.data, 3, sums));
    QLORA__TRY(qlora__flag_read(ctx, m));
    out->loss = (double)sums[0] + (double)sums[1];
    out->labels = (double)sums[2];
    out->tokens = micro->tokens;
    out->share = 1.0;
    return QLORA_OK;
}

static qlora_result qlora__eval(qlora_ctx* ctx, qlora_model* m, const qlora_batch* batch,
                                qlora_eval_info* out) {
    qlora__micro micro;
    QLORA__TRY(qlora__eval_forward(ctx, m, batch, out, true, &micro));
    return qlora__eval_head(ctx, m, &micro, out);
}

qlora_result qlora_eval(qlora_model* model, const qlora_batch* batch, qlora_eval_info* out) {
    qlora_ctx* ctx = qlora__model_ctx(model);
    QLORA__ENTER(ctx, "qlora_eval");
    return qlora__leave(ctx, qlora__eval(ctx, model, batch, out));
}

// The log-probabilities of a batch after the losses of its rows.
static qlora_result qlora__eval_logps(qlora_ctx* ctx, qlora_model* m, int64_t count, double* out) {
    const qlora_tensor* logps = &m->work.preference.logps;
    QLORA__TRY(qlora__preference_logps(ctx, &m->work.preference, &m->work.losses, logps));
    QLORA__TRY(qlora__copy_out(ctx, out, logps->data, (size_t)count * sizeof *out));
    return qlora__flag_read(ctx, m);
}

static qlora_result qlora__eval_sequences(qlora_ctx* ctx, qlora_model* m, const qlora_batch* batch,
                                          double* out) {
    qlora__micro micro;
    QLORA__TRY(qlora__eval_forward(ctx, m, batch, out, true, &micro));
    qlora__pass pass = qlora__pass_of_micro(m, &micro, false);
    QLORA__TRY(qlora__head(&pass, micro.chunks, NULL, false));
    return qlora__eval_logps(ctx, m, batch->count, out);
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

// ---- evaluation in slices -----------------------------------------------------------------------

static qlora_result qlora__eval_begin(qlora_ctx* ctx, qlora_model* m, const qlora_batch* batch) {
    qlora__evaluation* v = &m->evaluation;
    qlora__micro micro;
    QLORA__TRY(qlora__eval_send(ctx, m, batch, &micro));
    v->micro = micro;
    v->sequences = batch->count;
    v->begun = true;
    m->flow.passed = 0;
    return QLORA_OK;
}

qlora_result qlora_eval_begin(qlora_model* model, const qlora_batch* batch) {
    qlora_ctx* ctx = qlora__model_ctx(model);
    QLORA__ENTER(ctx, "qlora_eval_begin");
    return qlora__leave(ctx, qlora__eval_begin(ctx, model, batch));
}

// The whole evaluation: an errand, or what a single slice does.
static qlora_result qlora__eval_all(void* user) {
    qlora_model* m = (qlora_model*)user;
    qlora__evaluation* v = &m->evaluation;
    qlora__pass pass = qlora__pass_of_micro(m, &v->micro, false);
    QLORA__TRY(qlora__forward(&pass));
    return qlora__eval_head(m->ctx, m, &v->micro, &v->info);
}

// What has been computed of an evaluation.
static double qlora__eval_share(const qlora_model* m) {
    int64_t all = m->plan.config.layers + m->evaluation.micro.chunks;
    return (double)m->flow.passed / (double)all;
}

static qlora_result qlora__eval_turn(qlora_model* m, double until, bool* done) {
    qlora__evaluation* v = &m->evaluation;
    if (v->errand == NULL) {
        QLORA__TRY(qlora__model_errand(m, qlora__eval_all, m, &v->errand));
    }
    if (v->errand == NULL) {
        *done = true;
        return qlora__eval_all(m);
    }
    qlora__model_slice(m, v->errand, until);
    *done = !v->errand->under_way;
    return *done ? v->errand->result : QLORA_OK;
}

static qlora_result qlora__eval_slice(qlora_model* m, double milliseconds, qlora_eval_info* out,
                                      double* sequences, bool* done) {
    double start = qlora__clock_ms();
    qlora_ctx* ctx = m->ctx;
    qlora__evaluation* v = &m->evaluation;
    qlora_eval_info info;
    memset(&info, 0, sizeof info);
    QLORA__TRY(qlora__eval_out(ctx, out));
    if (done == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "done is NULL");
    }
    if (!v->begun) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "no evaluation has been started; call qlora_eval_begin first");
    }
    QLORA__TRY(qlora__not_in_capture(ctx, "evaluating"));
    bool ended = false;
    qlora_result r = qlora__eval_turn(m, start + milliseconds, &ended);
    if (r == QLORA_OK && ended && sequences != NULL) {
        r = qlora__eval_logps(ctx, m, v->sequences, sequences);
    }
    info.share = qlora__eval_share(m);
    info = ended ? v->info : info;
    if (ended || r != QLORA_OK) {
        qlora__evaluation_end(m);
    }
    QLORA__TRY(r);
    *out = info;
    *done = ended;
    return QLORA_OK;
}

qlora_result qlora_eval_slice(qlora_model* model, double milliseconds, qlora_eval_info* out,
                              double* sequences, bool* done) {
    qlora_ctx* ctx = qlora__model_ctx(model);
    QLORA__ENTER(ctx, "qlora_eval_slice");
    return qlora__leave(ctx, qlora__eval_slice(model, milliseconds, out, sequences, done));
}

static qlora_result qlora__eval_cancel(qlora_ctx* ctx, qlora_model* m) {
    QLORA__TRY(qlora__not_in_capture(ctx, "evaluating"));
    qlora__evaluation_end(m);
    return QLORA_OK;
}

qlora_result qlora_eval_cancel(qlora_model* model) {
    qlora_ctx* ctx = qlora__model_ctx(model);
    QLORA__ENTER(ctx, "qlora_eval_cancel");
    return qlora__leave(ctx, qlora__eval_cancel(ctx, model));
}
