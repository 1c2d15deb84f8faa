// ---- attention as separate operators ------------------------------------------------------------
//
//   heads      y[h, s, c] = x[s, h d + c] and back        transpose  y[b, c, r] = x[b, r, c]
//   scores     s = scale s, or -3e38 if the query may not see the key
//   softmax    y = e^(x - max) / sum e^(x - max);  dx = y (dy - sum(y dy))

// Finite, so that arithmetic on it never gives NaN; e^(QLORA__MASKED - max) is 0.
#define QLORA__MASKED -3.0e38f

// Copies elements between two batches of the same size, with or without a transpose.
typedef struct qlora__copy_job {
    qlora_tensor x;
    qlora_tensor y;
    bool transpose;
} qlora__copy_job;

static void qlora__copy_rows(void* user, int64_t begin, int64_t end) {
    const qlora__copy_job* job = (const qlora__copy_job*)user;
    size_t size = qlora_dtype_bytes(job->x.dtype);
    for (int64_t i = begin; i < end; i++) {
        int64_t b = i / job->x.rows;
        int64_t row = i % job->x.rows;
        if (!job->transpose) {
            memcpy((char*)job->y.data + (size_t)(b * job->y.batch_stride + row * job->y.ld) * size,
                   (const char*)job->x.data +
                       (size_t)(b * job->x.batch_stride + row * job->x.ld) * size,
                   (size_t)job->x.cols * size);
            continue;
        }
        for (int64_t c = 0; c < job->x.cols; c++) {
            int64_t from = b * job->x.batch_stride + row * job->x.ld + c;
            int64_t to = b * job->y.batch_stride + c * job->y.ld + row;
            memcpy((char*)job->y.data + (size_t)to * size,
                   (const char*)job->x.data + (size_t)from * size, size);
        }
    }
}

static qlora_result qlora__copy(qlora_ctx* ctx, qlora__copy_job* job) {
    const qlora_tensor* x = &job->x;
    const qlora_tensor* y = &job->y;
    if (qlora__on_cpu(ctx)) {
        qlora__parallel(ctx, x->batch * x->rows, 1 + 4096 / (1 + x->cols), qlora__copy_rows, job);
        return QLORA_OK;
    }
    bool wide = qlora_dtype_bytes(x->dtype) == 4;
    void* args[] = {(void*)&x->data,  (void*)&x->batch_stride, (void*)&x->ld,
                    (void*)&y->data,  (void*)&y->batch_stride, (void*)&y->ld,
                    (void*)&x->batch, (void*)&x->rows,         (void*)&x->cols};
    if (job->transpose) {
        return qlora__launch(
            ctx, wide ? QLORA__K_softmax_transpose_b32 : QLORA__K_softmax_transpose_b16,
            qlora__ceil_div(x->cols, 32), qlora__min(qlora__ceil_div(x->rows, 32), 65535),
            qlora__min(x->batch, 65535), 256, 0, args);
    }
    qlora__point_shape shape = qlora__point_shape_of(x->cols, qlora__piece(x->dtype));
    return qlora__launch(ctx, wide ? QLORA__K_softmax_copy_b32 : QLORA__K_softmax_copy_b16,
                         shape.blocks, qlora__min(x->rows, 65535), qlora__min(x->batch, 65535),
                         shape.threads, 0, args);
}

#define QLORA__IS_COPIED (QLORA__IS_F32 | QLORA__IS_BF16 | QLORA__IS_F16 | QLORA__IS_I32)

// rows is [S, H*d], heads a batch of H matrices [S, d]. Copies rows to heads if split is true,
// otherwise heads to rows.
static qlora_result qlora__heads_copy(qlora_ctx* ctx, const qlora_tensor* rows,
                                      const qlora_tensor* heads, bool split) {
    QLORA__TRY(qlora__need(ctx, rows, split ? "x" : "y", QLORA__IS_COPIED, -1, -1));
    QLORA__TRY(qlora__need_batch(ctx, heads, split ? "y" : "x", qlora__is(rows->dtype), -1,
                                 rows->rows, -1));
    if (heads->batch < 0 || heads->batch * heads->cols != rows->cols) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "%s.cols is %lld; expected %lld heads of %lld columns",
                           split ? "x" : "y", (long long)rows->cols, (long long)heads->batch,
                           (long long)heads->cols);
    }
    QLORA__TRY(qlora__need_apart(ctx, "y", heads, "x", rows));
    qlora_tensor cut = *rows;
    cut.batch = heads->batch;
    cut.batch_stride = heads->cols;
    cut.cols = heads->cols;
    qlora__copy_job job;
    job.x = split ? cut : *heads;
    job.y = split ? *heads : cut;
    job.transpose = false;
    return qlora__copy(ctx, &job);
}

static qlora_result qlora__transpose(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* y) {
    QLORA__TRY(qlora__need_batch(ctx, x, "x", QLORA__IS_COPIED, -1, -1, -1));
    QLORA__TRY(qlora__need_batch(ctx, y, "y", qlora__is(x->dtype), x->batch, x->cols, x->rows));
    QLORA__TRY(qlora__need_apart(ctx, "y", y, "x", x));
    qlora__copy_job job;
    job.x = *x;
    job.y = *y;
    job.transpose = true;
    return qlora__copy(ctx, &job);
}

qlora_result qlora_heads_split(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* y) {
    QLORA__ENTER(ctx, "qlora_heads_split");
    return qlora__leave(ctx, qlora__heads_copy(ctx, x, y, true));
}

qlora_result qlora_heads_join(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* y) {
    QLORA__ENTER(ctx, "qlora_heads_join");
    return qlora__leave(ctx, qlora__heads_copy(ctx, y, x, false));
}

qlora_result qlora_transpose(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* y) {
    QLORA__ENTER(ctx, "qlora_transpose");
    return qlora__leave(ctx, qlora__transpose(ctx, x, y));
}

typedef struct qlora__scores_job {
    const qlora_tensor* s;
    float scale;
    int32_t causal;
    int64_t window;
} qlora__scores_job;

static void qlora__scores_rows(void* user, int64_t begin, int64_t end) {
    const qlora__scores_job* job = (const qlora__scores_job*)user;
    for (int64_t i = begin; i < end; i++) {
        qlora_tensor s = qlora__batch_at(job->s, i / job->s->rows);
        int64_t q = i % s.rows;
        int64_t position = q + s.cols - s.rows;
        for (int64_t k = 0; k < s.cols; k++) {
            bool later = job->causal && k > position;
            bool gone = job->window > 0 && k <= position - job->window;
            QLORA__REAL v = qlora__at(&s, q, k) * (QLORA__REAL)job->scale;
            qlora__put(&s, q, k, later || gone ? (QLORA__REAL)QLORA__MASKED : v);
        }
    }
}

static qlora_result qlora__scores(qlora_ctx* ctx, qlora__scores_job* job) {
    const qlora_tensor* s = job->s;
    QLORA__TRY(qlora__need_batch(ctx, s, "s", QLORA__IS_F32_BF16, -1, -1, -1));
    if (qlora__on_cpu(ctx)) {
        qlora__parallel(ctx, s->batch * s->rows, 1 + 4096 / (1 + s->cols), qlora__scores_rows, job);
        return QLORA_OK;
    }
    uint32_t threads = s->cols < 256 ? (uint32_t)qlora__ceil_div(s->cols, 32) * 32 : 256;
    void* args[] = {(void*)&s->data, (void*)&s->batch_stride, (void*)&s->ld, (void*)&s->batch,
                    (void*)&s->rows, (void*)&s->cols,         &job->scale,   &job->causal,
                    &job->window};
    return qlora__launch(
        ctx, s->dtype == QLORA_F32 ? QLORA__K_softmax_scores_f32 : QLORA__K_softmax_scores_bf16,
        threads > 0 ? qlora__ceil_div(s->cols, threads) : 0, qlora__min(s->rows, 65535),
        qlora__min(s->batch, 65535), threads, 0, args);
}

qlora_result qlora_scores_mask(qlora_ctx* ctx, const qlora_tensor* s, float scale, bool causal,
                               int64_t window) {
    QLORA__ENTER(ctx, "qlora_scores_mask");
    qlora__scores_job job;
    job.s = s;
    job.scale = scale;
    job.causal = causal ? 1 : 0;
    job.window = window;
    return qlora__leave(ctx, qlora__scores(ctx, &job));
}

typedef struct qlora__softmax_job {
    const qlora_tensor* x;  // forward: the input; backward: the softmax
    const qlora_tensor* dy; // backward only
    const qlora_tensor* y;  // forward: the softmax; backward: dx
} qlora__softmax_job;

static void qlora__softmax_rows(void* user, int64_t begin, int64_t end) {
    const qlora__softmax_job* job = (const qlora__softmax_job*)user;
    const qlora__cpu_rows* rows = qlora__rows_of(job->x->owner);
    QLORA__REAL room[QLORA__ROW_CHUNK];
    for (int64_t i = begin; i < end; i++) {
        qlora_tensor x = qlora__batch_at(job->x, i / job->x->rows);
        qlora_tensor y = qlora__batch_at(job->y, i / job->x->rows);
        int64_t row = i % x.rows;
        QLORA__REAL top = (QLORA__REAL)QLORA__MASKED;
        double sum = 0;
        for (int64_t c = 0; c < x.cols; c += QLORA__ROW_CHUNK) {
            int64_t n = qlora__min(QLORA__ROW_CHUNK, x.cols - c);
            top = rows->top(qlora__row_in(rows, &x, row, c, n, room), n, top);
        }
        for (int64_t c = 0; c < x.cols; c += QLORA__ROW_CHUNK) {
            int64_t n = qlora__min(QLORA__ROW_CHUNK, x.cols - c);
            sum = rows->exps(qlora__row_in(rows, &x, row, c, n, room), top, n, NULL, sum);
        }
        for (int64_t c = 0; c < x.cols; c += QLORA__ROW_CHUNK) {
            int64_t n = qlora__min(QLORA__ROW_CHUNK, x.cols - c);
            const QLORA__REAL* in = qlora__row_in(rows, &x, row, c, n, room);
            QLORA__REAL* out = qlora__row_target(&y, row, c, room);
            rows->exps(in, top, n, out, 0);
            rows->shares(out, (QLORA__REAL)sum, 1, 1, n, out);
            qlora__row_done(rows, &y, row, c, n, out);
        }
    }
}

static void qlora__softmax_backward_rows(void* user, int64_t begin, int64_t end) {
    const qlora__softmax_job* job = (const qlora__softmax_job*)user;
    const qlora__cpu_rows* rows = qlora__rows_of(job->x->owner);
    QLORA__REAL y_room[QLORA__ROW_CHUNK];
    QLORA__REAL dy_room[QLORA__ROW_CHUNK];
    for (int64_t i = begin; i < end; i++) {
        int64_t b = i / job->x->rows;
        qlora_tensor y = qlora__batch_at(job->x, b);
        qlora_tensor dy = qlora__batch_at(job->dy, b);
        qlora_tensor dx = qlora__batch_at(job->y, b);
        int64_t row = i % y.rows;
        double dot = 0;
        for (int64_t c = 0; c < y.cols; c += QLORA__ROW_CHUNK) {
            int64_t n = qlora__min(QLORA__ROW_CHUNK, y.cols - c);
            dot = rows->dot(qlora__row_in(rows, &y, row, c, n, y_room),
                            qlora__row_in(rows, &dy, row, c, n, dy_room), n, dot);
        }
        for (int64_t c = 0; c < y.cols; c += QLORA__ROW_CHUNK) {
            int64_t n = qlora__min(QLORA__ROW_CHUNK, y.cols - c);
            const QLORA__REAL* p = qlora__row_in(rows, &y, row, c, n, y_room);
            const QLORA__REAL* d = qlora__row_in(rows, &dy, row, c, n, dy_room);
            QLORA__REAL* out = qlora__row_target(&dx, row, c, y_room);
            rows->softmax_grad(p, d, (QLORA__REAL)dot, n, out);
            qlora__row_done(rows, &dx, row, c, n, out);
        }
    }
}

static qlora_result qlora__softmax(qlora_ctx* ctx, qlora__softmax_job* job, bool backward) {
    const qlora_tensor* x = job->x;
    const qlora_tensor* y = job->y;
    const qlora_tensor* dy = job->dy;
    const char* x_name = backward ? "y" : "x";
    const char* y_name = backward ? "dx" : "y";
    QLORA__TRY(qlora__need_batch(ctx, x, x_name, QLORA__IS_F32_BF16, -1, -1, -1));
    unsigned type = qlora__is(x->dtype);
    QLORA__TRY(qlora__need_batch(ctx, y, y_name, type, x->batch, x->rows, x->cols));
    QLORA__TRY(qlora__need_same_or_apart(ctx, y_name, y, x_name, x));
    if (backward) {
        QLORA__TRY(qlora__need_batch(ctx, dy, "dy", type, x->batch, x->rows, x->cols));
        QLORA__TRY(qlora__need_same_or_apart(ctx, y_name, y, "dy", dy));
    }
    if (qlora__on_cpu(ctx)) {
        qlora__parallel(ctx, x->batch * x->rows, 1 + 4096 / (1 + x->cols),
                        backward ? qlora__softmax_backward_rows : qlora__softmax_rows, job);
        return QLORA_OK;
    }
    qlora__row_shape shape = qlora__row_shape_of(x->cols, qlora__piece(x->dtype), 256);
    void* args[13];
    int n = 0;
    const qlora_tensor* all[3];
    all[0] = x;
    all[1] = dy;
    all[2] = y;
    for (int i = 0; i < 3; i++) {
        if (all[i] != NULL) {
            args[n++] = (void*)&all[i]->data;
            args[n++] = (void*)&all[i]->batch_stride;
            args[n++] = (void*)&all[i]->ld;
        }
    }
    args[n++] = (void*)&x->batch;
    args[n++] = (void*)&x->rows;
    args[n++] = (void*)&x->cols;
    args[n++] = &shape.width;
    static const qlora__kernel_id kernels[2][2] = {
        {QLORA__K_softmax_fwd_f32, QLORA__K_softmax_fwd_bf16},
        {QLORA__K_softmax_bwd_f32, QLORA__K_softmax_bwd_bf16}};
    return qlora__launch(ctx, kernels[backward][x->dtype == QLORA_BF16],
                         x->cols > 0 ? qlora__ceil_div(x->rows, shape.rows) : 0,
                         qlora__min(x->batch, 65535), 1, shape.threads, 0, args);
}

qlora_result qlora_softmax_forward(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* y) {
    QLORA__ENTER(ctx, "qlora_softmax_forward");
    qlora__softmax_job job;
    job.x = x;
    job.dy = NULL;
    job.y = y;
    return qlora__leave(ctx, qlora__softmax(ctx, &job, false));
}

qlora_result qlora_softmax_backward(qlora_ctx* ctx, const qlora_tensor* y, const qlora_tensor* dy,
                                    const qlora_tensor* dx) {
    QLORA__ENTER(ctx, "qlora_softmax_backward");
    qlora__softmax_job job;
    job.x = y;
    job.dy = dy;
    job.y = dx;
    return qlora__leave(ctx, qlora__softmax(ctx, &job, true));
}
