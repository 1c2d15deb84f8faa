// ---- embedding: y[t] = table[ids[t]] ------------------------------------------------------------

typedef struct qlora__embed_job {
    const qlora_tensor* table;
    const qlora_tensor* ids;
    const qlora_tensor* y;
    const qlora_tensor* flag;
} qlora__embed_job;

static void qlora__embed_rows(void* user, int64_t begin, int64_t end) {
    const qlora__embed_job* job = (const qlora__embed_job*)user;
    for (int64_t row = begin; row < end; row++) {
        int64_t id = qlora__index_at(job->ids, row);
        for (int64_t c = 0; c < job->y->cols; c++) {
            qlora__put(job->y, row, c, qlora__at(job->table, id, c));
        }
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

// A logit, limited if there is a cap.
static QLORA__REAL qlora__logit_at(const qlora_cross_entropy_desc* a, int64_t row, int64_t c) {
    QLORA__REAL x = qlora__at(a->logits, row, c);
    return a->cap > 0.0f ? (QLORA__REAL)a->cap * qlora__tanh(x / (QLORA__REAL)a->cap) : x;
}

static void qlora__cross_entropy_rows(void* user, int64_t begin, int64_t end) {
    const qlora_cross_entropy_desc* a = (const qlora_cross_entropy_desc*)user;
    const qlora_tensor* x = a->logits;
    QLORA__REAL scale = a->scale != NULL ? qlora__at(a->scale, 0, 0) : 1;
    for (int64_t row = begin; row < end; row++) {
        int64_t label = qlora__index_at(a->labels, row);
        bool counted = label != QLORA__NO_LABEL;
        QLORA__REAL weight = a->weights != NULL ? qlora__at(a->weights, 0, row) : 1;
        QLORA__REAL top = counted ? qlora__logit_at(a, row, 0) : 0;
        for (int64_t c = 0; counted && c < x->cols; c++) {
            QLORA__REAL v = qlora__logit_at(a, row, c);
            top = v > top ? v : top;
        }
        double sum = 0;
        for (int64_t c = 0; counted && c < x->cols; c++) {
            sum += (double)qlora__exp(qlora__logit_at(a, row, c) - top);
        }
        QLORA__REAL loss = 0;
        if (counted) {
            loss = weight * (top + (QLORA__REAL)log(sum) - qlora__logit_at(a, row, label));
        }
        qlora__put(a->losses, 0, row, loss);
        for (int64_t c = 0; !a->forward_only && c < x->cols; c++) {
            QLORA__REAL gradient = 0;
            if (counted) {
                QLORA__REAL y = qlora__logit_at(a, row, c);
                gradient = qlora__exp(y - top) / (QLORA__REAL)sum;
                gradient = (gradient - (c == label ? 1 : 0)) * scale * weight;
                if (a->cap > 0.0f) {
                    gradient *= 1 - y / (QLORA__REAL)a->cap * (y / (QLORA__REAL)a->cap);
                }
            }
            qlora__put(x, row, c, gradient);
        }
    }
}

// total += {losses, rounding error of their sum, weights}; summed in double, by ascending row.
static void qlora__cross_entropy_total(const qlora_cross_entropy_desc* a) {
    double loss = (double)qlora__at(a->total, 0, 0) + (double)qlora__at(a->total, 0, 1);
    double weight = (double)qlora__at(a->total, 0, 2);
    for (int64_t row = 0; row < a->logits->rows; row++) {
        if (qlora__index_at(a->labels, row) != QLORA__NO_LABEL) {
            loss += (double)qlora__at(a->losses, 0, row);
            weight += a->weights != NULL ? (double)qlora__at(a->weights, 0, row) : 1;
        }
    }
    QLORA__REAL high = (QLORA__REAL)loss;
    qlora__put(a->total, 0, 0, high);
    qlora__put(a->total, 0, 1, (QLORA__REAL)(loss - (double)high));
    qlora__put(a->total, 0, 2, (QLORA__REAL)weight);
}

static qlora_result qlora__cross_entropy_check(qlora_ctx* ctx, const qlora_cross_entropy_desc* a) {
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
        QLORA__TRY(qlora__need_vector(ctx, a->scale, "scale", QLORA__IS_F32, 1));
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

static qlora_result qlora__cross_entropy(qlora_ctx* ctx, const qlora_cross_entropy_desc* a) {
    QLORA__TRY(qlora__cross_entropy_check(ctx, a));
    const qlora_tensor* x = a->logits;
    if (qlora__on_cpu(ctx)) {
        qlora__parallel(ctx, x->rows, 1 + 1024 / (1 + x->cols), qlora__cross_entropy_rows,
                        (void*)a);
        if (a->total != NULL) {
            qlora__cross_entropy_total(a);
        }
        return QLORA_OK;
    }
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
                    (void*)&a->losses->data,
                    (void*)&x->cols,
                    &gradient,
                    &flag,
                    &cap};
    QLORA__TRY(qlora__launch(ctx,
                             x->dtype == QLORA_F32 ? QLORA__K_loss_cross_entropy_f32
                                                   : QLORA__K_loss_cross_entropy_bf16,
                             x->rows, 1, 1, threads, 0, args));
    if (a->total == NULL) {
        return QLORA_OK;
    }
    void* sum[] = {(void*)&a->losses->data, (void*)&a->labels->data, &weights,
                   (void*)&x->rows,         (void*)&x->cols,         (void*)&a->total->data};
    return qlora__launch(ctx, QLORA__K_loss_sum, x->rows > 0 ? 1 : 0, 1, 1, 256, 0, sum);
}

qlora_result qlora_cross_entropy(qlora_ctx* ctx, const qlora_cross_entropy_desc* args) {
    QLORA__ENTER(ctx, "qlora_cross_entropy");
    return qlora__leave(ctx, qlora__cross_entropy(ctx, args));
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
    for (int64_t row = begin; row < end; row++) {
        int64_t best = -1;
        for (int64_t c = 0; c < job->x->cols; c++) {
            QLORA__REAL v = qlora__at(job->x, row, c);
            if (v == v && (best < 0 || v > qlora__at(job->x, row, best))) {
                best = c;
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
