// ---- RMSNorm ------------------------------------------------------------------------------------
//
// A row of x consists of x->cols / w->cols heads of n = w->cols columns (one head for a plain
// norm). For each head:
//   forward   x = h + delta, rounded to storage (only with delta);  r = 1 / sqrt(mean(x^2) + eps);
//             y = x r w
//   backward  dx = dres + r (w dy - x r^2 mean(w dy x));  dw += sum over rows and heads of dy x r

typedef struct qlora__norm_job {
    const qlora_tensor* x;     // input, to which delta is added
    const qlora_tensor* delta; // or NULL
    const qlora_tensor* sum;   // receives x + delta
    const qlora_tensor* w;
    const qlora_tensor* y;
    const qlora_tensor* dy;
    const qlora_tensor* dres; // or NULL
    const qlora_tensor* dx;
    const qlora_tensor* dw; // or NULL
    float eps;
    QLORA__REAL* rstd; // [rows * heads], scratch for the gradient of w
    const qlora_tensor* rstd_out; // f32 [1, rows * heads] on a GPU: receives r; or NULL
    const qlora__fp8* fp8; // on a GPU, where the codes and scales of y or dx go as well; or NULL
} qlora__norm_job;

// Returns 1 / sqrt(mean(x^2) + eps) over n columns from `first` on.
static QLORA__REAL qlora__norm_rstd(const qlora__cpu_rows* rows, const qlora_tensor* x, int64_t row,
                                    int64_t first, int64_t n, float eps) {
    QLORA__REAL room[QLORA__ROW_CHUNK];
    double squares = 0;
    for (int64_t c = 0; c < n; c += QLORA__ROW_CHUNK) {
        int64_t part = qlora__min(QLORA__ROW_CHUNK, n - c);
        squares = rows->squares(qlora__row_in(rows, x, row, first + c, part, room), part, squares);
    }
    return (QLORA__REAL)(1 / sqrt(squares / (double)n + (double)eps));
}

// sum = x + delta in one row.
static void qlora__norm_add(const qlora__cpu_rows* rows, const qlora__norm_job* job, int64_t row) {
    QLORA__REAL x_room[QLORA__ROW_CHUNK];
    QLORA__REAL d_room[QLORA__ROW_CHUNK];
    for (int64_t c = 0; c < job->x->cols; c += QLORA__ROW_CHUNK) {
        int64_t n = qlora__min(QLORA__ROW_CHUNK, job->x->cols - c);
        const QLORA__REAL* x = qlora__row_in(rows, job->x, row, c, n, x_room);
        const QLORA__REAL* delta = qlora__row_in(rows, job->delta, row, c, n, d_room);
        QLORA__REAL* sum = qlora__row_target(job->sum, row, c, x_room);
        rows->point[QLORA__POINT_ADD](x, delta, 0, n, sum);
        qlora__row_done(rows, job->sum, row, c, n, sum);
    }
}

static void qlora__norm_forward_rows(void* user, int64_t begin, int64_t end) {
    const qlora__norm_job* job = (const qlora__norm_job*)user;
    const qlora__cpu_rows* rows = qlora__rows_of(job->x->owner);
    QLORA__REAL x_room[QLORA__ROW_CHUNK];
    QLORA__REAL w_room[QLORA__ROW_CHUNK];
    int64_t heads = job->w->cols;
    for (int64_t row = begin; row < end; row++) {
        const qlora_tensor* x = job->x;
        if (job->delta != NULL) {
            qlora__norm_add(rows, job, row);
            x = job->sum;
        }
        for (int64_t first = 0; first < x->cols; first += heads) {
            QLORA__REAL rstd = qlora__norm_rstd(rows, x, row, first, heads, job->eps);
            for (int64_t c = 0; c < heads; c += QLORA__ROW_CHUNK) {
                int64_t n = qlora__min(QLORA__ROW_CHUNK, heads - c);
                const QLORA__REAL* in = qlora__row_in(rows, x, row, first + c, n, x_room);
                const QLORA__REAL* w = qlora__row_in(rows, job->w, 0, c, n, w_room);
                QLORA__REAL* y = qlora__row_target(job->y, row, first + c, x_room);
                rows->norm(in, rstd, w, n, y);
                qlora__row_done(rows, job->y, row, first + c, n, y);
            }
        }
    }
}

// The rooms of the backward pass of one head: dy, w, x, dres.
typedef struct qlora__norm_rooms {
    QLORA__REAL at[4][QLORA__ROW_CHUNK];
} qlora__norm_rooms;

static void qlora__norm_chunk(const qlora__cpu_rows* rows, const qlora__norm_job* job, int64_t row,
                              int64_t first, int64_t c, qlora__norm_rooms* rooms,
                              qlora__norm_row* out) {
    out->n = qlora__min(QLORA__ROW_CHUNK, job->w->cols - c);
    out->dy = qlora__row_in(rows, job->dy, row, first + c, out->n, rooms->at[0]);
    out->w = qlora__row_in(rows, job->w, 0, c, out->n, rooms->at[1]);
    out->x = qlora__row_in(rows, job->x, row, first + c, out->n, rooms->at[2]);
}

// Computes dx of one head, and returns its rstd.
static QLORA__REAL qlora__norm_backward_head(const qlora__cpu_rows* rows,
                                             const qlora__norm_job* job, int64_t row,
                                             int64_t first) {
    qlora__norm_rooms rooms;
    qlora__norm_row r;
    memset(&r, 0, sizeof r);
    int64_t cols = job->w->cols;
    double dot = 0;
    r.rstd = qlora__norm_rstd(rows, job->x, row, first, cols, job->eps);
    for (int64_t c = 0; c < cols; c += QLORA__ROW_CHUNK) {
        qlora__norm_chunk(rows, job, row, first, c, &rooms, &r);
        dot = rows->dot3(r.dy, r.w, r.x, r.n, dot);
    }
    r.pull = (QLORA__REAL)(dot / (double)cols) * r.rstd * r.rstd;
    for (int64_t c = 0; c < cols; c += QLORA__ROW_CHUNK) {
        qlora__norm_chunk(rows, job, row, first, c, &rooms, &r);
        if (job->dres != NULL) {
            r.dres = qlora__row_in(rows, job->dres, row, first + c, r.n, rooms.at[3]);
        }
        r.dx = qlora__row_target(job->dx, row, first + c, rooms.at[0]);
        rows->norm_grad(&r);
        qlora__row_done(rows, job->dx, row, first + c, r.n, r.dx);
    }
    return r.rstd;
}

static void qlora__norm_backward_rows(void* user, int64_t begin, int64_t end) {
    const qlora__norm_job* job = (const qlora__norm_job*)user;
    const qlora__cpu_rows* rows = qlora__rows_of(job->x->owner);
    int64_t heads = job->x->cols / job->w->cols;
    for (int64_t row = begin; row < end; row++) {
        for (int64_t head = 0; head < heads; head++) {
            QLORA__REAL rstd = qlora__norm_backward_head(rows, job, row, head * job->w->cols);
            if (job->rstd != NULL) {
                job->rstd[row * heads + head] = rstd;
            }
        }
    }
}

// Computes columns [begin, end) of dw.
static void qlora__norm_weight_columns(void* user, int64_t begin, int64_t end) {
    const qlora__norm_job* job = (const qlora__norm_job*)user;
    int64_t n = job->w->cols;
    int64_t heads = job->x->cols / n;
    for (int64_t c = begin; c < end; c++) {
        double sum = 0;
        for (int64_t row = 0; row < job->x->rows; row++) {
            for (int64_t head = 0; head < heads; head++) {
                sum += (double)qlora__at(job->dy, row, head * n + c) *
                       (double)qlora__at(job->x, row, head * n + c) *
                       (double)job->rstd[row * heads + head];
            }
        }
        qlora__put(job->dw, 0, c, qlora__at(job->dw, 0, c) + (QLORA__REAL)sum);
    }
}

// Checks the weight: one row, whose length divides the columns of x.
static qlora_result qlora__norm_need_weight(qlora_ctx* ctx, const qlora_tensor* x,
                                            const qlora_tensor* w) {
    QLORA__TRY(qlora__need_vector(ctx, w, "w", QLORA__IS_F32_BF16, -1));
    if (w->cols == 0 ? x->cols != 0 : x->cols % w->cols != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "x.cols is %lld; it must be a multiple of w.cols (%lld)",
                           (long long)x->cols, (long long)w->cols);
    }
    QLORA__TRY(qlora__need_whole(ctx, "w.cols", w->cols, 0, (int64_t)1 << 30));
    if (w->cols > 0 && x->cols / w->cols > 65535) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "x has %lld heads of %lld columns; the maximum is 65535 heads",
                           (long long)(x->cols / w->cols), (long long)w->cols);
    }
    return QLORA_OK;
}

// Two pieces per thread, as in the kernels.
static qlora__row_shape qlora__norm_shape(const qlora_tensor* w, qlora_dtype dtype) {
    return qlora__row_shape_of(w->cols, 2 * qlora__piece(dtype), 512);
}

#define QLORA__NORM_CODED 8192 // columns, at most, of a row whose codes are written

// Sets the last four parameters of the kernels that write codes; their memory is `to` and pitch.
static void qlora__norm_codes(const qlora__fp8* f, qlora__fp8* to, int64_t* pitch, void** args) {
    *to = *f;
    args[0] = &to->factors.data;
    args[1] = &to->codes.data;
    args[2] = pitch;
    args[3] = &to->scales.data;
}

static bool qlora__norm_aligned(const qlora_tensor* t) {
    return t == NULL || ((uintptr_t)t->data % 16 == 0 && t->ld % 8 == 0);
}

// Whether the kernels that write codes take a row of the job.
static bool qlora__norm_takes_codes(const qlora__norm_job* job) {
    const qlora_tensor* x = job->x;
    return x->dtype == QLORA_BF16 && job->w->dtype == QLORA_F32 && x->cols == job->w->cols &&
           x->cols % 8 == 0 && x->cols <= QLORA__NORM_CODED && qlora__norm_aligned(x) &&
           qlora__norm_aligned(job->w) && qlora__norm_aligned(job->delta) &&
           qlora__norm_aligned(job->sum) && qlora__norm_aligned(job->y) &&
           qlora__norm_aligned(job->dy) && qlora__norm_aligned(job->dres) &&
           qlora__norm_aligned(job->dx);
}

// The kernel of a job. The last four parameters say where to write codes.
static qlora__kernel_id qlora__norm_kernel(const qlora__norm_job* job, bool backward,
                                           qlora__fp8* to, int64_t* pitch, void** args) {
    if (job->fp8 != NULL) {
        QLORA_ASSERT(qlora__norm_takes_codes(job));
        qlora__norm_codes(job->fp8, to, pitch, args);
        return backward ? QLORA__K_fp8_norm_bwd : QLORA__K_fp8_norm_fwd;
    }
    if (job->x->dtype == QLORA_F32) {
        return backward ? QLORA__K_norm_rms_bwd_f32 : QLORA__K_norm_rms_fwd_f32;
    }
    return backward ? QLORA__K_norm_rms_bwd_bf16 : QLORA__K_norm_rms_fwd_bf16;
}

static qlora_result qlora__norm_forward(qlora_ctx* ctx, qlora__norm_job* job) {
    const qlora_tensor* x = job->x;
    QLORA__TRY(qlora__need(ctx, x, job->delta != NULL ? "h" : "x", QLORA__IS_F32_BF16, -1, -1));
    unsigned type = qlora__is(x->dtype);
    QLORA__TRY(qlora__norm_need_weight(ctx, x, job->w));
    QLORA__TRY(qlora__need(ctx, job->y, "y", type, x->rows, x->cols));
    QLORA__TRY(qlora__need_apart(ctx, "y", job->y, "w", job->w));
    if (job->delta != NULL) {
        QLORA__TRY(qlora__need(ctx, job->delta, "delta", type, x->rows, x->cols));
        QLORA__TRY(qlora__need(ctx, job->sum, "sum", type, x->rows, x->cols));
        QLORA__TRY(qlora__need_same_or_apart(ctx, "sum", job->sum, "h", x));
        QLORA__TRY(qlora__need_same_or_apart(ctx, "sum", job->sum, "delta", job->delta));
        QLORA__TRY(qlora__need_apart(ctx, "sum", job->sum, "w", job->w));
        QLORA__TRY(qlora__need_apart(ctx, "y", job->y, "sum", job->sum));
        QLORA__TRY(qlora__need_same_or_apart(ctx, "y", job->y, "delta", job->delta));
    }
    QLORA__TRY(qlora__need_same_or_apart(ctx, "y", job->y, "x", x));
    if (qlora__on_cpu(ctx)) {
        qlora__parallel(ctx, x->rows, 1 + 4096 / (1 + x->cols), qlora__norm_forward_rows, job);
        return QLORA_OK;
    }
    void* delta = job->delta != NULL ? job->delta->data : NULL;
    int64_t ld_delta = job->delta != NULL ? job->delta->ld : 0;
    void* sum = job->delta != NULL ? job->sum->data : NULL;
    int64_t ld_sum = job->delta != NULL ? job->sum->ld : 0;
    int32_t w_bf16 = job->w->dtype == QLORA_BF16;
    int32_t cols = (int32_t)job->w->cols;
    qlora__row_shape shape = qlora__norm_shape(job->w, x->dtype);
    void* args[] = {(void*)&x->data,
                    (void*)&x->ld,
                    &delta,
                    &ld_delta,
                    &sum,
                    &ld_sum,
                    (void*)&job->w->data,
                    &w_bf16,
                    (void*)&job->y->data,
                    (void*)&job->y->ld,
                    (void*)&x->rows,
                    &cols,
                    &job->eps,
                    &shape.width,
                    NULL,
                    NULL,
                    NULL,
                    NULL};
    qlora__fp8 to;
    int64_t pitch = qlora__fp8_pitch(x->cols);
    qlora__kernel_id kernel = qlora__norm_kernel(job, false, &to, &pitch, args + 14);
    return qlora__launch(ctx, kernel, (uint32_t)qlora__ceil_div(x->rows, shape.rows),
                         cols > 0 ? (uint32_t)(x->cols / cols) : 0, 1, shape.threads, 0, args);
}

// Runs the two stages of dw on the device, with the rstd from the first launch.
static qlora_result qlora__norm_weight_launch(qlora_ctx* ctx, const qlora__norm_job* job,
                                              void* rstd) {
    const qlora_tensor* x = job->x;
    int64_t chunk_rows = x->rows <= 64 * 128 ? 64 : qlora__ceil_div(x->rows, 128);
    int32_t chunks = (int32_t)qlora__ceil_div(x->rows, chunk_rows);
    int32_t cols = (int32_t)job->w->cols;
    int32_t heads = (int32_t)(x->cols / cols);
    int32_t accumulate = 1;
    void* partial = NULL;
    QLORA__TRY(qlora__scratch(ctx, (size_t)chunks * (size_t)cols * sizeof(float), &partial));
    void* first[] = {(void*)&job->dy->data,
                     (void*)&job->dy->ld,
                     (void*)&x->data,
                     (void*)&x->ld,
                     &rstd,
                     &partial,
                     (void*)&x->rows,
                     &cols,
                     &heads,
                     &chunk_rows};
    QLORA__TRY(qlora__launch(
        ctx, x->dtype == QLORA_F32 ? QLORA__K_norm_rms_dw_f32 : QLORA__K_norm_rms_dw_bf16,
        (uint32_t)qlora__ceil_div(cols, 32), (uint32_t)chunks, 1, 256, 0, first));
    void* second[] = {&partial, (void*)&job->dw->data, &cols, &chunks, &accumulate};
    return qlora__launch(ctx, QLORA__K_norm_rms_dw_sum, (uint32_t)qlora__ceil_div(cols, 128), 1, 1,
                         128, 0, second);
}

static qlora_result qlora__norm_need_backward(qlora_ctx* ctx, const qlora__norm_job* job) {
    const qlora_tensor* x = job->x;
    QLORA__TRY(qlora__need(ctx, x, "x", QLORA__IS_F32_BF16, -1, -1));
    unsigned type = qlora__is(x->dtype);
    QLORA__TRY(qlora__norm_need_weight(ctx, x, job->w));
    QLORA__TRY(qlora__need(ctx, job->dy, "dy", type, x->rows, x->cols));
    QLORA__TRY(qlora__need(ctx, job->dx, "dx", type, x->rows, x->cols));
    QLORA__TRY(qlora__need_apart(ctx, "dx", job->dx, "w", job->w));
    QLORA__TRY(qlora__need_apart(ctx, "dx", job->dx, "x", x));
    if (job->dres != NULL) {
        QLORA__TRY(qlora__need(ctx, job->dres, "dres", type, x->rows, x->cols));
        QLORA__TRY(qlora__need_same_or_apart(ctx, "dx", job->dx, "dres", job->dres));
    }
    if (job->dw == NULL) {
        return qlora__need_same_or_apart(ctx, "dx", job->dx, "dy", job->dy);
    }
    QLORA__TRY(qlora__need_vector(ctx, job->dw, "dw", QLORA__IS_F32, job->w->cols));
    QLORA__TRY(qlora__need_apart(ctx, "dw", job->dw, "w", job->w));
    QLORA__TRY(qlora__need_apart(ctx, "dw", job->dw, "dx", job->dx));
    return qlora__need_apart(ctx, "dx", job->dx, "dy", job->dy);
}

static qlora_result qlora__norm_backward(qlora_ctx* ctx, qlora__norm_job* job) {
    QLORA__TRY(qlora__norm_need_backward(ctx, job));
    const qlora_tensor* x = job->x;
    if (x->rows == 0 || x->cols == 0) {
        return QLORA_OK;
    }
    void* rstd = NULL;
    if (job->rstd_out != NULL) {
        rstd = job->rstd_out->data;
    } else if (job->dw != NULL) {
        size_t count = (size_t)x->rows * (size_t)(x->cols / job->w->cols);
        QLORA__TRY(qlora__scratch(ctx, count * sizeof(QLORA__REAL), &rstd));
    }
    if (qlora__on_cpu(ctx)) {
        job->rstd = (QLORA__REAL*)rstd;
        qlora__parallel(ctx, x->rows, 1 + 4096 / (1 + x->cols), qlora__norm_backward_rows, job);
        if (job->dw != NULL) {
            qlora__parallel(ctx, job->dw->cols, 1 + 4096 / (1 + x->rows),
                            qlora__norm_weight_columns, job);
        }
        return QLORA_OK;
    }
    void* dres = job->dres != NULL ? job->dres->data : NULL;
    int64_t ld_dres = job->dres != NULL ? job->dres->ld : 0;
    int32_t w_bf16 = job->w->dtype == QLORA_BF16;
    int32_t cols = (int32_t)job->w->cols;
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
                    &rstd,
                    (void*)&x->rows,
                    &cols,
                    &job->eps,
                    &shape.width,
                    NULL,
                    NULL,
                    NULL,
                    NULL};
    qlora__fp8 to;
    int64_t pitch = qlora__fp8_pitch(x->cols);
    qlora__kernel_id kernel = qlora__norm_kernel(job, true, &to, &pitch, args + 15);
    QLORA__TRY(qlora__launch(ctx, kernel, (uint32_t)qlora__ceil_div(x->rows, shape.rows),
                             (uint32_t)(x->cols / cols), 1, shape.threads, 0, args));
    return job->dw != NULL ? qlora__norm_weight_launch(ctx, job, rstd) : QLORA_OK;
}

qlora_result qlora_rmsnorm_forward(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* w,
                                   float eps, const qlora_tensor* y) {
    QLORA__ENTER(ctx, "qlora_rmsnorm_forward");
    qlora__norm_job job;
    memset(&job, 0, sizeof job);
    job.x = x;
    job.w = w;
    job.y = y;
    job.eps = eps;
    return qlora__leave(ctx, qlora__norm_forward(ctx, &job));
}

qlora_result qlora_rmsnorm_residual_forward(qlora_ctx* ctx, const qlora_tensor* h,
                                            const qlora_tensor* delta, const qlora_tensor* w,
                                            float eps, const qlora_tensor* sum,
                                            const qlora_tensor* y) {
    QLORA__ENTER(ctx, "qlora_rmsnorm_residual_forward");
    if (delta == NULL) {
        return qlora__leave(
            ctx, qlora__fail(ctx, QLORA_ERR_ARGUMENT, "delta is NULL; use qlora_rmsnorm_forward"));
    }
    qlora__norm_job job;
    memset(&job, 0, sizeof job);
    job.x = h;
    job.delta = delta;
    job.sum = sum;
    job.w = w;
    job.y = y;
    job.eps = eps;
    return qlora__leave(ctx, qlora__norm_forward(ctx, &job));
}

qlora_result qlora_rmsnorm_backward(qlora_ctx* ctx, const qlora_tensor* dy, const qlora_tensor* x,
                                    const qlora_tensor* w, float eps, const qlora_tensor* dres,
                                    const qlora_tensor* dx, const qlora_tensor* dw) {
    QLORA__ENTER(ctx, "qlora_rmsnorm_backward");
    qlora__norm_job job;
    memset(&job, 0, sizeof job);
    job.x = x;
    job.w = w;
    job.dy = dy;
    job.dres = dres;
    job.dx = dx;
    job.dw = dw;
    job.eps = eps;
    return qlora__leave(ctx, qlora__norm_backward(ctx, &job));
}
