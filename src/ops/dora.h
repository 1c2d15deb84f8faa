// ---- DoRA ---------------------------------------------------------------------------------------
//
// y = (m / n) (x W^T + s x A^T B^T), column by column of y, where n is the norm of a row of
// W + s B A. n is computed when the parameters change and is a constant in the backward pass:
//   dm = sum over the tokens of dy (y before the factor) / n; everything else gets dy m / n.

// For each row of w: gain = magnitude / norm, inverse = 1 / norm; with `start`, magnitude = norm
// before that. All are f32 vectors.
static qlora_result qlora__row_norms(qlora_ctx* ctx, const qlora_tensor* w,
                                     const qlora_tensor* magnitude, const qlora_tensor* gain,
                                     const qlora_tensor* inverse, bool start) {
    if (!qlora__on_cpu(ctx)) {
        int32_t starts = start ? 1 : 0;
        void* args[] = {
            (void*)&w->data,    (void*)&w->ld,         (void*)&w->cols, (void*)&magnitude->data,
            (void*)&gain->data, (void*)&inverse->data, &starts};
        return qlora__launch(ctx,
                             w->dtype == QLORA_F32 ? QLORA__K_methods_row_norms_f32
                                                   : QLORA__K_methods_row_norms_bf16,
                             w->rows, 1, 1, 256, 0, args);
    }
    for (int64_t row = 0; row < w->rows; row++) {
        double sum = 0.0;
        for (int64_t c = 0; c < w->cols; c++) {
            double x = (double)qlora__at(w, row, c);
            sum += x * x;
        }
        double n = sqrt(sum);
        if (start) {
            qlora__put(magnitude, 0, row, (QLORA__REAL)n);
        }
        qlora__put(gain, 0, row, (QLORA__REAL)((double)qlora__at(magnitude, 0, row) / n));
        qlora__put(inverse, 0, row, (QLORA__REAL)(1.0 / n));
    }
    return QLORA_OK;
}

typedef struct qlora__columns_job {
    const qlora_tensor* x;
    const qlora_tensor* gain;
} qlora__columns_job;

static void qlora__scale_columns_rows(void* user, int64_t begin, int64_t end) {
    const qlora__columns_job* job = (const qlora__columns_job*)user;
    const qlora_tensor* x = job->x;
    const qlora__cpu_rows* rows = qlora__rows_of(x->owner);
    const QLORA__REAL* gain = (const QLORA__REAL*)job->gain->data;
    QLORA__REAL room[QLORA__ROW_CHUNK];
    for (int64_t row = begin; row < end; row++) {
        for (int64_t c = 0; c < x->cols; c += QLORA__ROW_CHUNK) {
            int64_t n = qlora__min(QLORA__ROW_CHUNK, x->cols - c);
            const QLORA__REAL* from = qlora__row_in(rows, x, row, c, n, room);
            QLORA__REAL* to = qlora__row_target(x, row, c, room);
            rows->point[QLORA__POINT_MUL](from, gain + c, 0, n, to);
            qlora__row_done(rows, x, row, c, n, to);
        }
    }
}

// x[r, c] *= gain[c].
static qlora_result qlora__scale_columns(qlora_ctx* ctx, const qlora_tensor* gain,
                                         const qlora_tensor* x) {
    if (!qlora__on_cpu(ctx)) {
        void* args[] = {(void*)&x->data, (void*)&x->ld, (void*)&x->rows, (void*)&x->cols,
                        (void*)&gain->data};
        return qlora__launch(ctx,
                             x->dtype == QLORA_F32 ? QLORA__K_methods_scale_columns_f32
                                                   : QLORA__K_methods_scale_columns_bf16,
                             qlora__ceil_div(x->cols, 256), qlora__min(x->rows, 65535), 1, 256, 0,
                             args);
    }
    qlora__columns_job job;
    job.x = x;
    job.gain = gain;
    qlora__parallel(ctx, x->rows, 1 + 4096 / (1 + x->cols), qlora__scale_columns_rows, &job);
    return QLORA_OK;
}

// d[c] += inverse[c] * (sum over r of a[r, c] b[r, c]), summed in double on the CPU.
static qlora_result qlora__dot_columns(qlora_ctx* ctx, const qlora_tensor* a, const qlora_tensor* b,
                                       const qlora_tensor* inverse, const qlora_tensor* d) {
    if (!qlora__on_cpu(ctx)) {
        void* args[] = {(void*)&a->data, (void*)&a->ld,   (void*)&b->data,       (void*)&b->ld,
                        (void*)&a->rows, (void*)&a->cols, (void*)&inverse->data, (void*)&d->data};
        return qlora__launch(ctx,
                             a->dtype == QLORA_F32 ? QLORA__K_methods_dot_columns_f32
                                                   : QLORA__K_methods_dot_columns_bf16,
                             qlora__ceil_div(a->cols, 32), 1, 1, 256, 0, args);
    }
    for (int64_t c = 0; c < a->cols; c++) {
        double sum = 0.0;
        for (int64_t r = 0; r < a->rows; r++) {
            sum += (double)qlora__at(a, r, c) * (double)qlora__at(b, r, c);
        }
        double before = (double)qlora__at(d, 0, c);
        qlora__put(d, 0, c, (QLORA__REAL)(before + sum * (double)qlora__at(inverse, 0, c)));
    }
    return QLORA_OK;
}
