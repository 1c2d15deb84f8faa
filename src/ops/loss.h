// ---- embedding: y[t] = table[ids[t]] ------------------------------------------------------------

typedef struct qlora__embed_job {
    const qlora_tensor* table;
    const qlora_tensor* ids;
    const qlora_tensor* y;
    const qlora_tensor* flag;
} qlora__embed_job;

static void qlora__embed_rows(void* user, int64_t begin, int64_t end) {
    const qlora__embed_job* job = (const qlora__embed_job*)user;
    const qlora__cpu_rows* rows = qlora__rows_of(job->y->owner);
    for (int64_t row = begin; row < end; row++) {
        qlora__row_convert(rows, job->table, qlora__index_at(job->ids, row), 0, job->y->cols,
                           job->y, row, 0);
    }
}

static qlora_result qlora__embed(qlora_ctx* ctx, qlora__embed_job* job) {
    const qlora_tensor* table = job->table;
    const qlora_tensor* y = job->y;
    QLORA__TRY(qlora__need(ctx, y, "y", QLORA__IS_F32_BF16, -1, -1));
    QLORA__TRY(qlora__need(ctx, table, "table", QLORA__IS_FLOAT, -1, y->cols));
    QLORA__TRY(qlora__need_vector(ctx, job->ids, "ids", QLORA__IS_I32, y->rows));
    QLORA__TRY(qlora__need_flag(ctx, job->flag));
    QLORA__TRY(qlora__need_apart(ctx, "y", y, "table", table));
    QLORA__TRY(qlora__need_apart(ctx, "y", y, "ids", job->ids));
    if (qlora__on_cpu(ctx)) {
        for (int64_t row = 0; row < y->rows; row++) {
            int32_t id = qlora__index_at(job->ids, row);
            if (id < 0 || id >= table->rows) {
                return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                                   "ids[%lld] is %d; the table has %lld rows", (long long)row,
                                   (int)id, (long long)table->rows);
            }
        }
        qlora__parallel(ctx, y->rows, 1 + 4096 / (1 + y->cols), qlora__embed_rows, job);
        return QLORA_OK;
    }
    static const qlora__kernel_id kernels[3][2] = {
        {QLORA__K_elementwise_gather_f32_f32, QLORA__K_elementwise_gather_f32_bf16},
        {QLORA__K_elementwise_gather_bf16_f32, QLORA__K_elementwise_gather_bf16_bf16},
        {QLORA__K_elementwise_gather_f16_f32, QLORA__K_elementwise_gather_f16_bf16}};
    void* flag = NULL;
    QLORA__TRY(qlora__flag_pointer(ctx, job->flag, &flag));
    qlora__point_shape shape = qlora__point_shape_of(y->cols, qlora__piece(y->dtype));
    void* args[] = {
        (void*)&table->data, (void*)&table->ld, (void*)&table->rows, (void*)&job->ids->data,
        (void*)&y->data,     (void*)&y->ld,     (void*)&y->cols,     &flag};
    return qlora__launch(ctx, kernels[table->dtype][y->dtype], y->cols > 0 ? y->rows : 0, 1, 1,
                         shape.threads, 0, args);
}

qlora_result qlora_embed(qlora_ctx* ctx, const qlora_tensor* table, const qlora_tensor* ids,
                         const qlora_tensor* y, const qlora_tensor* flag) {
    QLORA__ENTER(ctx, "qlora_embed");
    qlora__embed_job job;
    job.table = table;
    job.ids = ids;
    job.y = y;
    job.flag = flag;
    return qlora__leave(ctx, qlora__embed(ctx, &job));
}

// ---- cross-entropy ------------------------------------------------------------------------------
//
// For each row x of the logits, with p = softmax(x):
//   loss = weight (log sum e^x - x[label]),   x = (p - onehot(label)) scale weight  (in place)
// With a cap, y = cap tanh(x / cap) takes the place of x, and the gradient gets the factor
// dy/dx = 1 - (y / cap)^2. Rows labelled -100 have loss 0 and gradient 0. For the sum of the
// losses, see qlora_cross_entropy_desc.total.

#define QLORA__NO_LABEL -100

// Rows that belong to several adapters, each with a scale and a total of its own.
typedef struct qlora__loss_owners {
    const qlora_tensor* rows; // I32 [1, rows]: the adapter
    int32_t count;            // of adapters
    int64_t stride;           // elements from the total of one to that of the next
} qlora__loss_owners;

typedef struct qlora__loss_job {
    const qlora_cross_entropy_desc* a;
    const qlora__loss_owners* owners; // NULL = one adapter
} qlora__loss_job;

// Columns [c, c + n) of a row of logits, limited if there is a cap.
static const QLORA__REAL* qlora__logits_in(const qlora__cpu_rows* rows,
                                           const qlora_cross_entropy_desc* a, int64_t row,
                                           int64_t c, int64_t n, QLORA__REAL* room) {
    const QLORA__REAL* x = qlora__row_in(rows, a->logits, row, c, n, room);
    if (a->cap > 0.0f) {
        rows->point[QLORA__POINT_CAP](x, NULL, (QLORA__REAL)a->cap, n, room);
        return room;
    }
    return x;
}

// The softmax of a row: its largest logit, the sum of e^(x - top), and the logit of the label.
typedef struct qlora__row_sum {
    QLORA__REAL top;
    double sum;
    QLORA__REAL own;
} qlora__row_sum;

static qlora__row_sum qlora__cross_entropy_sum(const qlora__cpu_rows* rows,
                                               const qlora_cross_entropy_desc* a, int64_t row,
                                               int64_t label) {
    QLORA__REAL room[QLORA__ROW_CHUNK];
    int64_t cols = a->logits->cols;
    qlora__row_sum r;
    r.top = *qlora__logits_in(rows, a, row, 0, 1, room);
    r.own = *qlora__logits_in(rows, a, row, label, 1, room);
    r.sum = 0;
    for (int64_t c = 0; c < cols; c += QLORA__ROW_CHUNK) {
        int64_t n = qlora__min(QLORA__ROW_CHUNK, cols - c);
        r.top = rows->top(qlora__logits_in(rows, a, row, c, n, room), n, r.top);
    }
    for (int64_t c = 0; c < cols; c += QLORA__ROW_CHUNK) {
        int64_t n = qlora__min(QLORA__ROW_CHUNK, cols - c);
        r.sum = rows->exps(qlora__logits_in(rows, a, row, c, n, room), r.top, n, NULL, r.sum);
    }
    return r;
}

// Replaces the logits by their gradients; scale is that of the loss.
static void qlora__cross_entropy_gradient(const qlora__cpu_rows* rows,
                                          const qlora_cross_entropy_desc* a, int64_t row,
                                          int64_t label, const qlora__row_sum* r, QLORA__REAL scale,
                                          QLORA__REAL weight) {
    QLORA__REAL room[QLORA__ROW_CHUNK];
    QLORA__REAL y_room[QLORA__ROW_CHUNK];
    const qlora_tensor* x = a->logits;
    for (int64_t c = 0; c < x->cols; c += QLORA__ROW_CHUNK) {
        int64_t n = qlora__min(QLORA__ROW_CHUNK, x->cols - c);
        const QLORA__REAL* y = qlora__logits_in(rows, a, row, c, n, y_room);
        QLORA__REAL* g = qlora__row_target(x, row, c, room);
        rows->exps(y, r->top, n, g, 0);
        QLORA__REAL own = label >= c && label < c + n ? g[label - c] : 0;
        rows->shares(g, (QLORA__REAL)r->sum, scale, weight, n, g);
        if (label >= c && label < c + n) {
            g[label - c] = (own / (QLORA__REAL)r->sum - 1) * scale * weight;
        }
        if (a->cap > 0.0f) {
            rows->cap_grad(y, (QLORA__REAL)a->cap, n, g);
        }
        qlora__row_done(rows, x, row, c, n, g);
    }
}

static void qlora__cross_entropy_rows(void* user, int64_t begin, int64_t end) {
    const qlora__loss_job* job = (const qlora__loss_job*)user;
    const qlora_cross_entropy_desc* a = job->a;
    const qlora__cpu_rows* rows = qlora__rows_of(a->logits->owner);
    for (int64_t row = begin; row < end; row++) {
        int32_t owner = job->owners != NULL ? qlora__index_at(job->owners->rows, row) : 0;
        QLORA__REAL scale = a->scale != NULL ? qlora__at(a->scale, 0, owner) : 1;
        int64_t label = qlora__index_at(a->labels, row);
        QLORA__REAL weight = a->weights != NULL ? qlora__at(a->weights, 0, row) : 1;
        QLORA__REAL loss = 0;
        if (label != QLORA__NO_LABEL) {
            qlora__row_sum r = qlora__cross_entropy_sum(rows, a, row, label);
            loss = weight * (r.top + (QLORA__REAL)log(r.sum) - r.own);
            if (!a->forward_only) {
                qlora__cross_entropy_gradient(rows, a, row, label, &r, scale, weight);
            }
        } else if (!a->forward_only) {
            size_t size = qlora_dtype_bytes(a->logits->dtype);
            memset((char*)a->logits->data + (size_t)(row * a->logits->ld) * size, 0,
                   (size_t)a->logits->cols * size);
        }
        qlora__put(a->losses, 0, row, loss);
    }
}

// total += {losses, rounding error of their sum, weights}; summed in double, by ascending row: all
// rows, or those of adapter number `owner`.
static void qlora__cross_entropy_total(const qlora__loss_job* job, int32_t owner) {
    const qlora_cross_entropy_desc* a = job->a;
    int64_t at = job->owners != NULL ? owner * job->owners->stride : 0;
    double loss = (double)qlora__at(a->total, 0, at) + (double)qlora__at(a->total, 0, at + 1);
    double weight = (double)qlora__at(a->total, 0, at + 2);
    for (int64_t row = 0; row < a->logits->rows; row++) {
        bool own = job->owners == NULL || qlora__index_at(job->owners->rows, row) == owner;
        if (own && qlora__index_at(a->labels, row) != QLORA__NO_LABEL) {
            loss += (double)qlora__at(a->losses, 0, row);
            weight += a->weights != NULL ? (double)qlora__at(a->weights, 0, row) : 1;
        }
    }
    QLORA__REAL high = (QLORA__REAL)loss;
    qlora__put(a->total, 0, at, high);
    qlora__put(a->total, 0, at + 1, (QLORA__REAL)(loss - (double)high));
    qlora__put(a->total, 0, at + 2, (QLORA__REAL)weight);
}

static qlora_result qlora__cross_entropy_check(qlora_ctx* ctx, const qlora_cross_entropy_desc* a,
                                               const qlora__loss_owners* owners) {
    if (a == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "args is NULL");
    }
    const qlora_tensor* x = a->logits;
    QLORA__TRY(qlora__need(ctx, x, "logits", QLORA__IS_F32_BF16, -1, -1));
    QLORA__TRY(qlora__need_real(ctx, "args.cap", (double)a->cap, 0.0, 1e30));
    QLORA__TRY(qlora__need_vector(ctx, a->labels, "labels", QLORA__IS_I32, x->rows));
    QLORA__TRY(qlora__need_vector(ctx, a->losses, "losses", QLORA__IS_F32, x->rows));
    QLORA__TRY(qlora__need_apart(ctx, "losses", a->losses, "logits", x));
    if (a->weights != NULL) {
        QLORA__TRY(qlora__need_vector(ctx, a->weights, "weights", QLORA__IS_F32, x->rows));
        QLORA__TRY(qlora__need_apart(ctx, "losses", a->losses, "weights", a->weights));
    }
    if (a->scale != NULL) {
        QLORA__TRY(qlora__need_vector(ctx, a->scale, "scale", QLORA__IS_F32,
                                      owners != NULL ? owners->count : 1));
    }
    if (a->total != NULL) {
        QLORA__TRY(qlora__need_vector(ctx, a->total, "total", QLORA__IS_F32, 3));
        QLORA__TRY(qlora__need_apart(ctx, "total", a->total, "losses", a->losses));
    }
    QLORA__TRY(qlora__need_flag(ctx, a->flag));
    if (x->cols > INT32_MAX) {
        return qlora__fail(ctx, QLORA_ERR_LIMIT, "logits.cols is %lld; the maximum is %d",
                           (long long)x->cols, INT32_MAX);
    }
    for (int64_t row = 0; qlora__on_cpu(ctx) && row < x->rows; row++) {
        int32_t label = qlora__index_at(a->labels, row);
        if ((label < 0 || label >= x->cols) && label != QLORA__NO_LABEL) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "labels[%lld] is %d; it must be -100, or from 0 to %lld",
                               (long long)row, (int)label, (long long)x->cols - 1);
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__cross_entropy(qlora_ctx* ctx, const qlora_cross_entropy_desc* a,
                                         const qlora__loss_owners* owners) {
    QLORA__TRY(qlora__cross_entropy_check(ctx, a, owners));
    const qlora_tensor* x = a->logits;
    int32_t count = owners != NULL ? owners->count : 1;
    if (qlora__on_cpu(ctx)) {
        qlora__loss_job job;
        job.a = a;
        job.owners = owners;
        qlora__parallel(ctx, x->rows, 1 + 1024 / (1 + x->cols), qlora__cross_entropy_rows, &job);
        for (int32_t k = 0; k < count && a->total != NULL; k++) {
            qlora__cross_entropy_total(&job, k);
        }
        return QLORA_OK;
    }
    void* rows_of = owners != NULL ? owners->rows->data : NULL;
    int64_t stride = owners != NULL ? owners->stride : 0;
    void* weights = a->weights != NULL ? a->weights->data : NULL;
    void* scale = a->scale != NULL ? a->scale->data : NULL;
    int32_t gradient = a->forward_only ? 0 : 1;
    float cap = a->cap;
    void* flag = NULL;
    QLORA__TRY(qlora__flag_pointer(ctx, a->flag, &flag));
    int64_t wanted = qlora__ceil_div(x->cols, 4 * qlora__piece(x->dtype) * 32) * 32;
    uint32_t threads = (uint32_t)qlora__max(32, qlora__min(wanted, 1024));
    void* args[] = {(void*)&x->data,
                    (void*)&x->ld,
                    (void*)&a->labels->data,
                    &weights,
                    &scale,
                    &rows_of,
                    (void*)&a->losses->data,
                    (void*)&x->cols,
                    &gradient,
                    &flag,
                    &cap};
    static const qlora__kernel_id kernels[2][2] = {
        {QLORA__K_loss_cross_entropy_f32, QLORA__K_loss_cross_entropy_bf16},
        {QLORA__K_loss_capped_f32, QLORA__K_loss_capped_bf16}};
    QLORA__TRY(qlora__launch(ctx, kernels[cap > 0.0f ? 1 : 0][x->dtype == QLORA_F32 ? 0 : 1],
                             x->rows, 1, 1, threads, 0, args));
    if (a->total == NULL) {
        return QLORA_OK;
    }
    void* sum[] = {(void*)&a->losses->data, (void*)&a->labels->data, &weights, (void*)&x->rows,
                   (void*)&x->cols,         (void*)&a->total->data,  &rows_of, &stride};
    return qlora__launch(ctx, QLORA__K_loss_sum, x->rows > 0 ? count : 0, 1, 1, 256, 0, sum);
}

qlora_result qlora_cross_entropy(qlora_ctx* ctx, const qlora_cross_entropy_desc* args) {
    QLORA__ENTER(ctx, "qlora_cross_entropy");
    return qlora__leave(ctx, qlora__cross_entropy(ctx, args, NULL));
}

// ---- arg max ------------------------------------------------------------------------------------
//
// ids[r] is the column of the largest value in row r, the first one if several are equal. A NaN is
// never the largest.

typedef struct qlora__argmax_job {
    const qlora_tensor* x;
    const qlora_tensor* ids;
} qlora__argmax_job;

static void qlora__argmax_rows(void* user, int64_t begin, int64_t end) {
    const qlora__argmax_job* job = (const qlora__argmax_job*)user;
    const qlora__cpu_rows* rows = qlora__rows_of(job->x->owner);
    QLORA__REAL room[QLORA__ROW_CHUNK];
    for (int64_t row = begin; row < end; row++) {
        int64_t best = -1;
        QLORA__REAL most = 0;
        for (int64_t c = 0; c < job->x->cols; c += QLORA__ROW_CHUNK) {
            int64_t n = qlora__min(QLORA__ROW_CHUNK, job->x->cols - c);
            const QLORA__REAL* x = qlora__row_in(rows, job->x, row, c, n, room);
            for (int64_t i = 0; i < n; i++) {
                if (x[i] == x[i] && (best < 0 || x[i] > most)) {
                    best = c + i;
                    most = x[i];
                }
            }
        }
        ((int32_t*)job->ids->data)[row] = (int32_t)(best < 0 ? 0 : best);
    }
}

static qlora_result qlora__argmax(qlora_ctx* ctx, qlora__argmax_job* job) {
    const qlora_tensor* x = job->x;
    QLORA__TRY(qlora__need(ctx, x, "x", QLORA__IS_F32_BF16, -1, -1));
    QLORA__TRY(qlora__need_vector(ctx, job->ids, "ids", QLORA__IS_I32, x->rows));
    QLORA__TRY(qlora__need_apart(ctx, "ids", job->ids, "x", x));
    QLORA__TRY(qlora__need_whole(ctx, "x.cols", x->cols, x->rows > 0 ? 1 : 0, INT32_MAX));
    if (qlora__on_cpu(ctx)) {
        qlora__parallel(ctx, x->rows, 1 + 4096 / (1 + x->cols), qlora__argmax_rows, job);
        return QLORA_OK;
    }
    void* args[] = {(void*)&x->data, (void*)&x->ld, (void*)&job->ids->data, (void*)&x->cols};
    return qlora__launch(
        ctx, x->dtype == QLORA_F32 ? QLORA__K_loss_arg_max_f32 : QLORA__K_loss_arg_max_bf16,
        x->rows, 1, 1, 256, 0, args);
}

qlora_result qlora_argmax(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* ids) {
    QLORA__ENTER(ctx, "qlora_argmax");
    qlora__argmax_job job;
    job.x = x;
    job.ids = ids;
    return qlora__leave(ctx, qlora__argmax(ctx, &job));
}
