// ---- LayerNorm ----------------------------------------------------------------------------------
//
// The norm of rows from which their mean m is subtracted, with a weight and without a bias. With
// d = x - m, r = 1 / sqrt(mean(d^2) + eps), g = w dy:
//   forward   y = d r w
//   backward  dx = dres + r (g - mean(g) - d r^2 mean(g d));  dw += sum over rows of dy d r

typedef struct qlora__mean_norm {
    const qlora_tensor* x;
    const qlora_tensor* w;
    const qlora_tensor* y;    // forward; may be x
    const qlora_tensor* dy;   // backward, like everything that follows
    const qlora_tensor* dres; // or NULL
    const qlora_tensor* dx;   // may be dres and, unless there is dw, dy
    const qlora_tensor* dw;   // or NULL
    float eps;
    QLORA__REAL* stats; // [rows][2]: m and r, scratch for dw
} qlora__mean_norm;

typedef struct qlora__mean_stats {
    QLORA__REAL mean;
    QLORA__REAL rstd;
} qlora__mean_stats;

static qlora__mean_stats qlora__mean_stats_of(const qlora__mean_norm* job,
                                              const qlora__cpu_rows* rows, int64_t row) {
    QLORA__REAL room[QLORA__ROW_CHUNK];
    int64_t cols = job->x->cols;
    double sum = 0;
    double squares = 0;
    for (int64_t c = 0; c < cols; c += QLORA__ROW_CHUNK) {
        int64_t n = qlora__min(QLORA__ROW_CHUNK, cols - c);
        const QLORA__REAL* x = qlora__row_in(rows, job->x, row, c, n, room);
        for (int64_t i = 0; i < n; i++) {
            sum += (double)x[i];
        }
    }
    double mean = sum / (double)cols;
    for (int64_t c = 0; c < cols; c += QLORA__ROW_CHUNK) {
        int64_t n = qlora__min(QLORA__ROW_CHUNK, cols - c);
        const QLORA__REAL* x = qlora__row_in(rows, job->x, row, c, n, room);
        for (int64_t i = 0; i < n; i++) {
            double d = (double)x[i] - mean;
            squares += d * d;
        }
    }
    qlora__mean_stats stats;
    stats.mean = (QLORA__REAL)mean;
    stats.rstd = (QLORA__REAL)(1 / sqrt(squares / (double)cols + (double)job->eps));
    return stats;
}

static void qlora__mean_norm_rows(void* user, int64_t begin, int64_t end) {
    const qlora__mean_norm* job = (const qlora__mean_norm*)user;
    const qlora__cpu_rows* rows = qlora__rows_of(job->x->owner);
    QLORA__REAL room[2][QLORA__ROW_CHUNK];
    int64_t cols = job->x->cols;
    for (int64_t row = begin; row < end; row++) {
        qlora__mean_stats s = qlora__mean_stats_of(job, rows, row);
        for (int64_t c = 0; c < cols; c += QLORA__ROW_CHUNK) {
            int64_t n = qlora__min(QLORA__ROW_CHUNK, cols - c);
            const QLORA__REAL* x = qlora__row_in(rows, job->x, row, c, n, room[0]);
            const QLORA__REAL* w = qlora__row_in(rows, job->w, 0, c, n, room[1]);
            QLORA__REAL* y = qlora__row_target(job->y, row, c, room[0]);
            for (int64_t i = 0; i < n; i++) {
                y[i] = (x[i] - s.mean) * s.rstd * w[i];
            }
            qlora__row_done(rows, job->y, row, c, n, y);
        }
    }
}

// A chunk of a row of the backward pass: dy, w, x.
typedef struct qlora__mean_chunk {
    QLORA__REAL rooms[4][QLORA__ROW_CHUNK];
    const QLORA__REAL* dy;
    const QLORA__REAL* w;
    const QLORA__REAL* x;
    int64_t n;
} qlora__mean_chunk;

static void qlora__mean_chunk_at(const qlora__mean_norm* job, const qlora__cpu_rows* rows,
                                 int64_t row, int64_t c, qlora__mean_chunk* at) {
    at->n = qlora__min(QLORA__ROW_CHUNK, job->x->cols - c);
    at->dy = qlora__row_in(rows, job->dy, row, c, at->n, at->rooms[0]);
    at->w = qlora__row_in(rows, job->w, 0, c, at->n, at->rooms[1]);
    at->x = qlora__row_in(rows, job->x, row, c, at->n, at->rooms[2]);
}

static void qlora__mean_norm_backward_row(const qlora__mean_norm* job, const qlora__cpu_rows* rows,
                                          int64_t row, qlora__mean_stats s) {
    qlora__mean_chunk at;
    int64_t cols = job->x->cols;
    double all = 0;
    double dot = 0;
    for (int64_t c = 0; c < cols; c += QLORA__ROW_CHUNK) {
        qlora__mean_chunk_at(job, rows, row, c, &at);
        for (int64_t i = 0; i < at.n; i++) {
            double g = (double)at.dy[i] * (double)at.w[i];
            all += g;
            dot += g * ((double)at.x[i] - (double)s.mean);
        }
    }
    QLORA__REAL lift = (QLORA__REAL)(all / (double)cols);
    QLORA__REAL pull = (QLORA__REAL)(dot / (double)cols) * s.rstd * s.rstd;
    for (int64_t c = 0; c < cols; c += QLORA__ROW_CHUNK) {
        qlora__mean_chunk_at(job, rows, row, c, &at);
        const QLORA__REAL* dres =
            job->dres != NULL ? qlora__row_in(rows, job->dres, row, c, at.n, at.rooms[3]) : NULL;
        QLORA__REAL* dx = qlora__row_target(job->dx, row, c, at.rooms[0]);
        for (int64_t i = 0; i < at.n; i++) {
            QLORA__REAL d = s.rstd * (at.dy[i] * at.w[i] - lift - (at.x[i] - s.mean) * pull);
            dx[i] = dres != NULL ? dres[i] + d : d;
        }
        qlora__row_done(rows, job->dx, row, c, at.n, dx);
    }
}

static void qlora__mean_norm_backward_rows(void* user, int64_t begin, int64_t end) {
    const qlora__mean_norm* job = (const qlora__mean_norm*)user;
    const qlora__cpu_rows* rows = qlora__rows_of(job->x->owner);
    for (int64_t row = begin; row < end; row++) {
        qlora__mean_stats s = qlora__mean_stats_of(job, rows, row);
        qlora__mean_norm_backward_row(job, rows, row, s);
        if (job->stats != NULL) {
            job->stats[2 * row] = s.mean;
            job->stats[2 * row + 1] = s.rstd;
        }
    }
}

// Computes columns [begin, end) of dw.
static void qlora__mean_norm_weight_columns(void* user, int64_t begin, int64_t end) {
    const qlora__mean_norm* job = (const qlora__mean_norm*)user;
    for (int64_t c = begin; c < end; c++) {
        double sum = 0;
        for (int64_t row = 0; row < job->x->rows; row++) {
            const QLORA__REAL* s = job->stats + 2 * row;
            sum += (double)qlora__at(job->dy, row, c) *
                   ((double)qlora__at(job->x, row, c) - (double)s[0]) * (double)s[1];
        }
        qlora__put(job->dw, 0, c, qlora__at(job->dw, 0, c) + (QLORA__REAL)sum);
    }
}

static QLORA__UNUSED qlora_result qlora__mean_norm_forward(qlora_ctx* ctx,
                                                           const qlora__mean_norm* job) {
    const qlora_tensor* x = job->x;
    QLORA__TRY(qlora__need(ctx, x, "x", QLORA__IS_F32_BF16, -1, -1));
    QLORA__TRY(qlora__need_vector(ctx, job->w, "w", QLORA__IS_F32_BF16, x->cols));
    QLORA__TRY(qlora__need(ctx, job->y, "y", qlora__is(x->dtype), x->rows, x->cols));
    QLORA__TRY(qlora__need_same_or_apart(ctx, "y", job->y, "x", x));
    if (qlora__on_cpu(ctx)) {
        qlora__mean_norm own = *job;
        qlora__parallel(ctx, x->rows, 1 + 4096 / (1 + x->cols), qlora__mean_norm_rows, &own);
        return QLORA_OK;
    }
    int32_t w_bf16 = job->w->dtype == QLORA_BF16;
    int32_t cols = (int32_t)x->cols;
    float eps = job->eps;
    qlora__row_shape shape = qlora__norm_shape(job->w, x->dtype);
    void* args[] = {(void*)&x->data,
                    (void*)&x->ld,
                    (void*)&job->w->data,
                    &w_bf16,
                    (void*)&job->y->data,
                    (void*)&job->y->ld,
                    (void*)&x->rows,
                    &cols,
                    &eps,
                    &shape.width};
    return qlora__launch(
        ctx, x->dtype == QLORA_F32 ? QLORA__K_mean_norm_fwd_f32 : QLORA__K_mean_norm_fwd_bf16,
        (uint32_t)qlora__ceil_div(x->rows, shape.rows), 1, 1, shape.threads, 0, args);
}

// Runs the two stages of dw on the device, with the statistics from the first launch.
static qlora_result qlora__mean_norm_weight_launch(qlora_ctx* ctx, const qlora__mean_norm* job,
                                                   void* stats) {
    const qlora_tensor* x = job->x;
    int64_t chunk_rows = x->rows <= 64 * 128 ? 64 : qlora__ceil_div(x->rows, 128);
    int32_t chunks = (int32_t)qlora__ceil_div(x->rows, chunk_rows);
    int32_t cols = (int32_t)x->cols;
    int32_t accumulate = 1;
    void* partial = NULL;
    QLORA__TRY(qlora__scratch(ctx, (size_t)chunks * (size_t)cols * sizeof(float), &partial));
    void* first[] = {(void*)&job->dy->data,
                     (void*)&job->dy->ld,
                     (void*)&x->data,
                     (void*)&x->ld,
                     &stats,
                     &partial,
                     (void*)&x->rows,
                     &cols,
                     &chunk_rows};
    QLORA__TRY(qlora__launch(
        ctx, x->dtype == QLORA_F32 ? QLORA__K_mean_norm_dw_f32 : QLORA__K_mean_norm_dw_bf16,
        (uint32_t)qlora__ceil_div(cols, 32), (uint32_t)chunks, 1, 256, 0, first));
    void* second[] = {&partial, (void*)&job->dw->data, &cols, &chunks, &accumulate};
    return qlora__launch(ctx, QLORA__K_norm_rms_dw_sum, (uint32_t)qlora__ceil_div(cols, 128), 1, 1,
                         128, 0, second);
}

static qlora_result qlora__mean_norm_need_backward(qlora_ctx* ctx, const qlora__mean_norm* job) {
    const qlora_tensor* x = job->x;
    QLORA__TRY(qlora__need(ctx, x, "x", QLORA__IS_F32_BF16, -1, -1));
    unsigned type = qlora__is(x->dtype);
    QLORA__TRY(qlora__need_vector(ctx, job->w, "w", QLORA__IS_F32_BF16, x->cols));
    QLORA__TRY(qlora__need(ctx, job->dy, "dy", type, x->rows, x->cols));
    QLORA__TRY(qlora__need(ctx, job->dx, "dx", type, x->rows, x->cols));
    QLORA__TRY(qlora__need_apart(ctx, "dx", job->dx, "x", x));
    if (job->dres != NULL) {
        QLORA__TRY(qlora__need(ctx, job->dres, "dres", type, x->rows, x->cols));
        QLORA__TRY(qlora__need_same_or_apart(ctx, "dx", job->dx, "dres", job->dres));
    }
    if (job->dw == NULL) {
        return qlora__need_same_or_apart(ctx, "dx", job->dx, "dy", job->dy);
    }
    QLORA__TRY(qlora__need_vector(ctx, job->dw, "dw", QLORA__IS_F32, x->cols));
    return qlora__need_apart(ctx, "dx", job->dx, "dy", job->dy);
}

// Takes scratch if there is dw.
static QLORA__UNUSED qlora_result qlora__mean_norm_backward(qlora_ctx* ctx,
                                                            const qlora__mean_norm* job) {
    QLORA__TRY(qlora__mean_norm_need_backward(ctx, job));
    const qlora_tensor* x = job->x;
    void* stats = NULL;
    if (x->rows == 0 || x->cols == 0) {
        return QLORA_OK;
    }
    if (job->dw != NULL) {
        QLORA__TRY(qlora__scratch(ctx, 2 * (size_t)x->rows * sizeof(QLORA__REAL), &stats));
    }
    if (qlora__on_cpu(ctx)) {
        qlora__mean_norm own = *job;
        own.stats = (QLORA__REAL*)stats;
        qlora__parallel(ctx, x->rows, 1 + 4096 / (1 + x->cols), qlora__mean_norm_backward_rows,
                        &own);
        if (job->dw != NULL) {
            qlora__parallel(ctx, x->cols, 1 + 4096 / (1 + x->rows), qlora__mean_norm_weight_columns,
                            &own);
        }
        return QLORA_OK;
    }
    void* dres = job->dres != NULL ? job->dres->data : NULL;
    int64_t ld_dres = job->dres != NULL ? job->dres->ld : 0;
    int32_t w_bf16 = job->w->dtype == QLORA_BF16;
    int32_t cols = (int32_t)x->cols;
    float eps = job->eps;
    qlora__row_shape shape = qlora__norm_shape(job->w, x->dtype);
    void* args[] = {(void*)&job->dy->data,
                    (void*)&job->dy->ld,
                    (void*)&x->data,
                    (void*)&x->ld,
                    (void*)&job->w->data,
                    &w_bf16,
                    &dres,
                    &ld_dres,
                    (void*)&job->dx->data,
                    (void*)&job->dx->ld,
                    &stats,
                    (void*)&x->rows,
                    &cols,
                    &eps,
                    &shape.width};
    QLORA__TRY(qlora__launch(
        ctx, x->dtype == QLORA_F32 ? QLORA__K_mean_norm_bwd_f32 : QLORA__K_mean_norm_bwd_bf16,
        (uint32_t)qlora__ceil_div(x->rows, shape.rows), 1, 1, shape.threads, 0, args));
    return job->dw != NULL ? qlora__mean_norm_weight_launch(ctx, job, stats) : QLORA_OK;
}
