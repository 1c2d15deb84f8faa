// ---- casts --------------------------------------------------------------------------------------
//
//   y = x converted to the type of y, rounded to nearest even

typedef struct qlora__pair {
    const qlora_tensor* x;
    const qlora_tensor* y;
} qlora__pair;

static void qlora__cast_rows(void* user, int64_t begin, int64_t end) {
    const qlora__pair* p = (const qlora__pair*)user;
    const qlora__cpu_rows* rows = qlora__rows_of(p->x->owner);
    for (int64_t i = begin; i < end; i++) {
        qlora__row_convert(rows, p->x, i, 0, p->x->cols, p->y, i, 0);
    }
}

static qlora_result qlora__cast(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* y) {
    static const qlora__kernel_id kernels[3][3] = {
        // from f32, bf16, f16 to f32, bf16, f16; copies need no kernel
        {QLORA__K_COUNT, QLORA__K_cast_f32_bf16, QLORA__K_cast_f32_f16},
        {QLORA__K_cast_bf16_f32, QLORA__K_COUNT, QLORA__K_cast_bf16_f16},
        {QLORA__K_cast_f16_f32, QLORA__K_cast_f16_bf16, QLORA__K_COUNT}};
    QLORA__TRY(qlora__need(ctx, x, "x", QLORA__IS_FLOAT, -1, -1));
    QLORA__TRY(qlora__need(ctx, y, "y", QLORA__IS_FLOAT, x->rows, x->cols));
    QLORA__TRY(qlora__need_apart(ctx, "y", y, "x", x));
    if (qlora__on_cpu(ctx)) {
        qlora__pair pair = {x, y};
        qlora__parallel(ctx, x->rows, 1 + 16384 / (1 + x->cols), qlora__cast_rows, &pair);
        return QLORA_OK;
    }
    qlora__kernel_id kernel = kernels[x->dtype][y->dtype];
    if (kernel == QLORA__K_COUNT) {
        return x->dtype == QLORA_F16
                   ? qlora__fail(ctx, QLORA_ERR_UNSUPPORTED, "copies of f16 are not supported")
                   : qlora__point(ctx, QLORA__POINT_SCALE, x, NULL, 1.0f, y);
    }
    qlora_tensor from = *x; // parameters are passed by address
    qlora_tensor to = *y;
    const float* no_scale = NULL;
    void* args[] = {&from.data, &to.data, &from.rows,      &from.cols,
                    &from.ld,   &to.ld,   (void*)&no_scale};
    int64_t pieces = x->rows * qlora__ceil_div(x->cols, 2048);
    return qlora__launch(ctx, kernel, qlora__min(pieces, 4096), 1, 1, 256, 0, args);
}

qlora_result qlora_cast(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* y) {
    QLORA__ENTER(ctx, "qlora_cast");
    return qlora__leave(ctx, qlora__cast(ctx, x, y));
}

// ---- random weights -----------------------------------------------------------------------------
//
//   y[i] = deviation * (sum of twelve 16-bit random numbers - 393210) / 65536
//
// The distribution is close enough to normal for weights, and both backends give the same bits
// (kernels/train/random.cu explains why).

typedef struct qlora__random_job {
    const qlora_tensor* y;
    uint32_t key[2];
    uint32_t stream;
    float step;
} qlora__random_job;

static void qlora__random_pairs(void* user, int64_t begin, int64_t end) {
    const qlora__random_job* job = (const qlora__random_job*)user;
    int64_t n = job->y->rows * job->y->cols;
    for (int64_t pair = begin; pair < end; pair++) {
        int32_t sum[2] = {-393210, -393210};
        for (uint32_t call = 0; call < 3; call++) {
            const uint32_t counter[4] = {(uint32_t)pair, (uint32_t)((uint64_t)pair >> 32),
                                         job->stream, call};
            uint32_t words[4];
            qlora__philox(counter, job->key, words);
            for (uint32_t i = 0; i < 4; i++) {
                sum[(4 * call + i) / 6] +=
                    (int32_t)(words[i] & 0xffffu) + (int32_t)(words[i] >> 16);
            }
        }
        for (int64_t i = 2 * pair; i < 2 * pair + 2 && i < n; i++) {
            float x = (float)sum[i & 1] * job->step;
            qlora__store(job->y->data, job->y->dtype, i, (QLORA__REAL)x);
        }
    }
}

// y is contiguous and f32 or bf16. The streams of one seed are independent of each other.
static qlora_result qlora__random_normal(qlora_ctx* ctx, uint64_t seed, uint32_t stream,
                                         float deviation, const qlora_tensor* y) {
    QLORA__TRY(qlora__need(ctx, y, "y", QLORA__IS_F32 | QLORA__IS_BF16, -1, -1));
    if (y->ld != y->cols && y->rows > 1) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "y.ld is %lld; it must be equal to cols (%lld)",
                           (long long)y->ld, (long long)y->cols);
    }
    qlora__random_job job;
    job.y = y;
    job.key[0] = (uint32_t)seed;
    job.key[1] = (uint32_t)(seed >> 32);
    job.stream = stream;
    job.step = deviation / 65536.0f;
    int64_t n = y->rows * y->cols;
    int64_t pairs = qlora__ceil_div(n, 2);
    if (qlora__on_cpu(ctx)) {
        qlora__parallel(ctx, pairs, 4096, qlora__random_pairs, &job);
        return QLORA_OK;
    }
    void* data = y->data;
    void* args[] = {&data, &n, &job.key[0], &job.key[1], &job.stream, &job.step};
    return qlora__launch(
        ctx, y->dtype == QLORA_F32 ? QLORA__K_random_normal_f32 : QLORA__K_random_normal_bf16,
        qlora__ceil_div(pairs, 256), 1, 1, 256, 0, args);
}

qlora_result qlora_random_normal(qlora_ctx* ctx, uint64_t seed, uint32_t stream, float deviation,
                                 const qlora_tensor* y) {
    QLORA__ENTER(ctx, "qlora_random_normal");
    return qlora__leave(ctx, qlora__random_normal(ctx, seed, stream, deviation, y));
}
