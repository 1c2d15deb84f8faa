// ---- AdamW --------------------------------------------------------------------------------------
//
// Decoupled weight decay over ranges of one flat arena; t is the number of updates applied so far.
// For each element, with g the gradient times the clip scale:
//   p -= lr weight_decay decay p;  m += (1 - beta1) (g - m);  v = beta2 v + (1 - beta2) g^2
//   p -= lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//   shadow = shadow_scale p, also in the range's copy if it has one;  gradient = 0
// lr is that of the state times the factor of the range.
// If the gradient is not finite, p, m, v, t and shadow stay unchanged, and the gradient becomes 0.

// Computes x^n by squaring, with the same products as the kernel.
static double qlora__power(double x, int64_t n) {
    double y = 1;
    for (; n > 0; n >>= 1) {
        if ((n & 1) != 0) {
            y *= x;
        }
        x *= x;
    }
    return y;
}

typedef struct qlora__adamw_job {
    const qlora_adamw_desc* args;
    qlora_adamw_range range;
    QLORA__REAL clip;
    QLORA__REAL lr_decay;
    QLORA__REAL beta2;
    QLORA__REAL one_minus_beta1;
    QLORA__REAL one_minus_beta2;
    QLORA__REAL step_size;
    QLORA__REAL root_correction;
    QLORA__REAL eps;
    bool skip;
} qlora__adamw_job;

// Counts the update or the skipped step, and computes the bias corrections in double.
static void qlora__adamw_advance(qlora__adamw_job* job, qlora_adamw_state* state) {
    state->skip = job->skip ? 1 : 0;
    state->skipped += job->skip ? 1 : 0;
    state->updates += job->skip ? 0 : 1;
    double t1 = qlora__power(state->beta1, state->updates);
    double t2 = qlora__power(state->beta2, state->updates);
    job->lr_decay = (QLORA__REAL)(state->lr * state->weight_decay);
    job->beta2 = (QLORA__REAL)state->beta2;
    job->one_minus_beta1 = (QLORA__REAL)(1 - state->beta1);
    job->one_minus_beta2 = (QLORA__REAL)(1 - state->beta2);
    job->step_size = (QLORA__REAL)(state->lr / (1 - t1));
    job->root_correction = (QLORA__REAL)sqrt(1 - t2);
    job->eps = (QLORA__REAL)state->eps;
}

// Writes the shadow of parameters [begin, end) of the range, and its copy: rows of copy_cols
// elements, copy_ld apart.
static void qlora__adamw_shade(const qlora__cpu_rows* rows, const qlora__adamw_job* job,
                               int64_t begin, int64_t end) {
    const qlora_adamw_range* r = &job->range;
    const qlora_tensor* shadow = job->args->shadow;
    const QLORA__REAL* p = (const QLORA__REAL*)job->args->param->data + r->begin;
    QLORA__REAL room[QLORA__ROW_CHUNK];
    int64_t n = 0;
    for (int64_t at = begin; at < end; at += n) {
        n = qlora__min(QLORA__ROW_CHUNK, end - at);
        if (r->copy != NULL) { // not beyond the end of a row of the copy
            n = qlora__min(n, r->copy_cols - at % r->copy_cols);
        }
        QLORA__REAL* x = qlora__row_target(shadow, 0, r->begin + at, room);
        rows->point[QLORA__POINT_SCALE](p + at, NULL, (QLORA__REAL)r->shadow_scale, n, x);
        qlora__row_done(rows, shadow, 0, r->begin + at, n, x);
        if (r->copy != NULL) {
            size_t size = qlora_dtype_bytes(shadow->dtype);
            int64_t to = at / r->copy_cols * r->copy_ld + at % r->copy_cols;
            memcpy((char*)r->copy + (size_t)to * size,
                   (const char*)shadow->data + (size_t)(r->begin + at) * size, (size_t)n * size);
        }
    }
}

// Elements [begin, end) of the range, whose moments are at m and v.
static qlora__adamw_row qlora__adamw_row_of(const qlora__adamw_job* job, int64_t begin, int64_t end,
                                            QLORA__REAL* m, QLORA__REAL* v) {
    int64_t first = job->range.begin + begin;
    QLORA__REAL lr = job->range.lr > 0 ? (QLORA__REAL)job->range.lr : 1;
    qlora__adamw_row r;
    r.param = (QLORA__REAL*)job->args->param->data + first;
    r.grad = (QLORA__REAL*)job->args->grad->data + first;
    r.m = m;
    r.v = v;
    r.n = end - begin;
    r.clip = job->clip;
    r.decay = job->lr_decay * (QLORA__REAL)job->range.decay * lr;
    r.beta2 = job->beta2;
    r.one_minus_beta1 = job->one_minus_beta1;
    r.one_minus_beta2 = job->one_minus_beta2;
    r.step_size = job->step_size * lr;
    r.root_correction = job->root_correction;
    r.eps = job->eps;
    return r;
}

static void qlora__adamw_elements(void* user, int64_t begin, int64_t end) {
    const qlora__adamw_job* job = (const qlora__adamw_job*)user;
    const qlora_adamw_desc* a = job->args;
    const qlora__cpu_rows* rows = qlora__rows_of(a->param->owner);
    int64_t first = job->range.begin + begin;
    if (job->skip) {
        QLORA__REAL* grad = (QLORA__REAL*)a->grad->data + first;
        rows->point[QLORA__POINT_FILL](NULL, NULL, 0, end - begin, grad);
        return;
    }
    qlora__adamw_row r = qlora__adamw_row_of(job, begin, end, (QLORA__REAL*)a->m->data + first,
                                             (QLORA__REAL*)a->v->data + first);
    rows->adamw(&r);
    if (a->shadow != NULL) {
        qlora__adamw_shade(rows, job, begin, end);
    }
}

static void qlora__adamw_shadow_elements(void* user, int64_t begin, int64_t end) {
    const qlora__adamw_job* job = (const qlora__adamw_job*)user;
    qlora__adamw_shade(qlora__rows_of(job->args->param->owner), job, begin, end);
}

// Returns range i of the table, which is in host memory.
static qlora_adamw_range qlora__adamw_range_at(const qlora_tensor* ranges, int64_t i) {
    qlora_adamw_range range;
    memcpy(&range, (const char*)ranges->data + (size_t)i * sizeof range, sizeof range);
    return range;
}

// Checks param, shadow and ranges, which both calls use.
static qlora_result qlora__adamw_check(qlora_ctx* ctx, const qlora_adamw_desc* a,
                                       int64_t* range_count) {
    if (a == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "args is NULL");
    }
    QLORA__TRY(qlora__need_vector(ctx, a->param, "param", QLORA__IS_F32, -1));
    QLORA__TRY(qlora__need_vector(ctx, a->ranges, "ranges", QLORA__IS_U8, -1));
    if (a->shadow != NULL) {
        QLORA__TRY(
            qlora__need_vector(ctx, a->shadow, "shadow", QLORA__IS_F32_BF16, a->param->cols));
        QLORA__TRY(qlora__need_apart(ctx, "shadow", a->shadow, "param", a->param));
    }
    if (a->ranges->cols % (int64_t)sizeof(qlora_adamw_range) != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "ranges has %lld bytes; expected a multiple of %d",
                           (long long)a->ranges->cols, (int)sizeof(qlora_adamw_range));
    }
    *range_count = a->ranges->cols / (int64_t)sizeof(qlora_adamw_range);
    for (int64_t i = 0; qlora__on_cpu(ctx) && i < *range_count; i++) {
        qlora_adamw_range r = qlora__adamw_range_at(a->ranges, i);
        if (r.begin < 0 || r.count < 0 || r.begin > a->param->cols ||
            r.count > a->param->cols - r.begin) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "range %lld has %lld elements from %lld on; the arena has %lld",
                               (long long)i, (long long)r.count, (long long)r.begin,
                               (long long)a->param->cols);
        }
        if (!(r.lr >= 0.0 && r.lr <= 1e30)) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "range %lld: lr is %g; it must be finite and not negative",
                               (long long)i, r.lr);
        }
        if (r.copy != NULL && r.copy_cols < 1) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "range %lld: copy_cols is %lld; it must be at least 1", (long long)i,
                               (long long)r.copy_cols);
        }
        if (r.copy != NULL && r.copy_ld < r.copy_cols) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "range %lld: copy_ld is %lld; it must be at least copy_cols (%lld)",
                               (long long)i, (long long)r.copy_ld, (long long)r.copy_cols);
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__adamw_check_step(qlora_ctx* ctx, const qlora_adamw_desc* a) {
    int64_t n = a->param->cols;
    QLORA__TRY(qlora__need_vector(ctx, a->grad, "grad", QLORA__IS_F32, n));
    QLORA__TRY(qlora__need_vector(ctx, a->m, "m", QLORA__IS_F32, n));
    QLORA__TRY(qlora__need_vector(ctx, a->v, "v", QLORA__IS_F32, n));
    QLORA__TRY(qlora__need_vector(ctx, a->state, "state", QLORA__IS_U8,
                                  (int64_t)sizeof(qlora_adamw_state)));
    if (a->clip_scale != NULL) {
        QLORA__TRY(qlora__need_vector(ctx, a->clip_scale, "clip_scale", QLORA__IS_F32, 1));
    }
    if (a->not_finite != NULL) {
        QLORA__TRY(qlora__need_vector(ctx, a->not_finite, "not_finite", QLORA__IS_I32, 1));
    }
    QLORA__TRY(qlora__need_apart(ctx, "param", a->param, "grad", a->grad));
    QLORA__TRY(qlora__need_apart(ctx, "param", a->param, "m", a->m));
    QLORA__TRY(qlora__need_apart(ctx, "param", a->param, "v", a->v));
    QLORA__TRY(qlora__need_apart(ctx, "grad", a->grad, "m", a->m));
    QLORA__TRY(qlora__need_apart(ctx, "grad", a->grad, "v", a->v));
    return qlora__need_apart(ctx, "m", a->m, "v", a->v);
}

// Calls fn for every range in turn.
static void qlora__adamw_ranges(qlora_ctx* ctx, qlora__adamw_job* job, int64_t range_count,
                                qlora__range_fn fn) {
    for (int64_t i = 0; i < range_count; i++) {
        job->range = qlora__adamw_range_at(job->args->ranges, i);
        qlora__parallel(ctx, job->range.count, 4096, fn, job);
    }
}

// Starts an update on the CPU.
static void qlora__adamw_begin(qlora__adamw_job* job, const qlora_adamw_desc* a) {
    qlora_adamw_state state;
    memset(job, 0, sizeof *job);
    job->args = a;
    job->clip = a->clip_scale != NULL ? qlora__at(a->clip_scale, 0, 0) : 1;
    job->skip = a->not_finite != NULL && qlora__index_at(a->not_finite, 0) != 0;
    memcpy(&state, a->state->data, sizeof state);
    qlora__adamw_advance(job, &state);
    memcpy(a->state->data, &state, sizeof state);
}

// Returns the number of blocks per range: enough for the longest range with `per_block` elements
// each, but about 8192 in all.
static int64_t qlora__adamw_blocks(const qlora_adamw_desc* a, int64_t range_count,
                                   int64_t per_block) {
    int64_t longest = a->longest_range > 0 ? a->longest_range : a->param->cols;
    int64_t wanted = qlora__ceil_div(longest, per_block);
    return qlora__min(wanted, qlora__max(8192 / qlora__max(range_count, 1), 8));
}

static qlora_result qlora__adamw_step(qlora_ctx* ctx, const qlora_adamw_desc* a) {
    int64_t range_count = 0;
    QLORA__TRY(qlora__adamw_check(ctx, a, &range_count));
    QLORA__TRY(qlora__adamw_check_step(ctx, a));
    if (qlora__on_cpu(ctx)) {
        qlora__adamw_job job;
        qlora__adamw_begin(&job, a);
        qlora__adamw_ranges(ctx, &job, range_count, qlora__adamw_elements);
        return QLORA_OK;
    }
    void* not_finite = a->not_finite != NULL ? a->not_finite->data : NULL;
    void* clip = a->clip_scale != NULL ? a->clip_scale->data : NULL;
    void* shadow = a->shadow != NULL ? a->shadow->data : NULL;
    void* advance[] = {(void*)&a->state->data, &not_finite};
    QLORA__TRY(qlora__launch(ctx, QLORA__K_optim_advance, 1, 1, 1, 32, 0, advance));
    void* args[] = {(void*)&a->param->data,
                    (void*)&a->grad->data,
                    (void*)&a->m->data,
                    (void*)&a->v->data,
                    &shadow,
                    (void*)&a->ranges->data,
                    &range_count,
                    (void*)&a->state->data,
                    &clip};
    bool wide = a->shadow != NULL && a->shadow->dtype == QLORA_F32;
    return qlora__launch(ctx, wide ? QLORA__K_optim_adamw_f32 : QLORA__K_optim_adamw_bf16,
                         qlora__adamw_blocks(a, range_count, 1024), qlora__min(range_count, 65535),
                         1, 256, 0, args);
}

static qlora_result qlora__adamw_shadow(qlora_ctx* ctx, const qlora_adamw_desc* a) {
    int64_t range_count = 0;
    QLORA__TRY(qlora__adamw_check(ctx, a, &range_count));
    if (a->shadow == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "shadow is NULL");
    }
    if (qlora__on_cpu(ctx)) {
        qlora__adamw_job job;
        memset(&job, 0, sizeof job);
        job.args = a;
        qlora__adamw_ranges(ctx, &job, range_count, qlora__adamw_shadow_elements);
        return QLORA_OK;
    }
    void* args[] = {(void*)&a->param->data, (void*)&a->shadow->data, (void*)&a->ranges->data,
                    &range_count};
    return qlora__launch(
        ctx, a->shadow->dtype == QLORA_F32 ? QLORA__K_optim_shadow_f32 : QLORA__K_optim_shadow_bf16,
        qlora__adamw_blocks(a, range_count, 256), qlora__min(range_count, 65535), 1, 256, 0, args);
}

qlora_result qlora_adamw_step(qlora_ctx* ctx, const qlora_adamw_desc* args) {
    QLORA__ENTER(ctx, "qlora_adamw_step");
    return qlora__leave(ctx, qlora__adamw_step(ctx, args));
}

qlora_result qlora_adamw_shadow(qlora_ctx* ctx, const qlora_adamw_desc* args) {
    QLORA__ENTER(ctx, "qlora_adamw_shadow");
    return qlora__leave(ctx, qlora__adamw_shadow(ctx, args));
}
