// ---- FP8 weights (formulas: numbers/fp8_weight.h) -----------------------------------------------

// Bytes up to the scales, and in all.
static size_t qlora__fp8_weight_codes(int64_t rows, int64_t cols) {
    return qlora__align_up((size_t)rows * (size_t)cols, 256);
}

static size_t qlora__fp8_weight_scales(int64_t rows, int64_t cols) {
    return (size_t)(qlora__fp8_blocks(rows) * qlora__fp8_blocks(cols)) * sizeof(float);
}

static QLORA__UNUSED size_t qlora__fp8_weight_bytes(int64_t rows, int64_t cols) {
    return qlora__fp8_weight_codes(rows, cols) +
           qlora__align_up(qlora__fp8_weight_scales(rows, cols), 256);
}

// Places a weight in memory of qlora__fp8_weight_bytes bytes, aligned to 16 bytes.
static QLORA__UNUSED void qlora__fp8_weight_wrap(qlora_ctx* ctx, int64_t rows, int64_t cols,
                                                 const qlora_tensor* memory,
                                                 qlora__fp8_weight* out) {
    char* base = (char*)memory->data;
    qlora_tensor own = *memory; // may be that of `out`
    memset(out, 0, sizeof *out);
    out->codes = (uint8_t*)base;
    out->scales = (float*)(void*)(base + qlora__fp8_weight_codes(rows, cols));
    out->rows = rows;
    out->cols = cols;
    out->memory = own;
    out->owner = ctx;
}

typedef struct qlora__fp8_weight_job {
    const qlora__fp8_weight* w;
    const qlora_tensor* source;
    const qlora_tensor* out; // only for dequantise: the part of the weight
    int64_t row0;
    int64_t col0;
} qlora__fp8_weight_job;

static void qlora__fp8_quantise_blocks(void* user, int64_t begin, int64_t end) {
    const qlora__fp8_weight_job* job = (const qlora__fp8_weight_job*)user;
    int64_t across = qlora__fp8_blocks(job->w->cols);
    for (int64_t b = begin; b < end; b++) {
        qlora__fp8_quantise_block(job->source, job->w, b / across, b % across);
    }
}

static void qlora__fp8_dequantise_rows(void* user, int64_t begin, int64_t end) {
    const qlora__fp8_weight_job* job = (const qlora__fp8_weight_job*)user;
    const qlora_tensor* out = job->out;
    float values[256];
    for (int64_t r = begin; r < end; r++) {
        for (int64_t c = 0; c < out->cols; c += 256) {
            int64_t n = qlora__min(256, out->cols - c);
            qlora__fp8_widen(job->w, job->row0 + r, job->col0 + c, n, values);
            for (int64_t i = 0; i < n; i++) {
                qlora__put(out, r, c + i, (QLORA__REAL)values[i]);
            }
        }
    }
}

#ifndef QLORA_NO_CUDA

static qlora_result qlora__fp8_weight_quantise_gpu(qlora_ctx* ctx,
                                                   const qlora__fp8_weight_job* job) {
    qlora__fp8_weight w = *job->w; // parameters are passed by address
    qlora_tensor from = *job->source;
    qlora__kernel_id kernel = from.dtype == QLORA_F32    ? QLORA__K_fp8_base_quantise_f32
                              : from.dtype == QLORA_BF16 ? QLORA__K_fp8_base_quantise_bf16
                                                         : QLORA__K_fp8_base_quantise_f16;
    void* args[] = {&from.data, &from.ld, &w.rows, &w.cols, &w.codes, &w.scales};
    return qlora__launch(ctx, kernel, qlora__fp8_blocks(w.cols), qlora__fp8_blocks(w.rows), 1, 256,
                         0, args);
}

static qlora_result qlora__fp8_weight_dequantise_gpu(qlora_ctx* ctx,
                                                     const qlora__fp8_weight_job* job) {
    qlora__fp8_weight w = *job->w;
    qlora_tensor out = *job->out;
    int64_t row0 = job->row0;
    int64_t col0 = job->col0;
    int32_t width = 1; // threads per row, eight columns each
    while (width < 256 && 8 * width < out.cols) {
        width *= 2;
    }
    void* args[] = {&w.codes,  &w.scales, &w.cols,   &row0,   &col0,
                    &out.data, &out.rows, &out.cols, &out.ld, &width};
    return qlora__launch(ctx,
                         out.dtype == QLORA_F32 ? QLORA__K_fp8_base_dequantise_f32
                                                : QLORA__K_fp8_base_dequantise_bf16,
                         qlora__ceil_div(out.rows, 4 * 256 / width),
                         qlora__ceil_div(out.cols, 8 * width), 1, 256, 0, args);
}

#else

static qlora_result qlora__fp8_weight_quantise_gpu(qlora_ctx* ctx,
                                                   const qlora__fp8_weight_job* job) {
    (void)job;
    return qlora__no_kernels(ctx);
}

static qlora_result qlora__fp8_weight_dequantise_gpu(qlora_ctx* ctx,
                                                     const qlora__fp8_weight_job* job) {
    (void)job;
    return qlora__no_kernels(ctx);
}

#endif // QLORA_NO_CUDA

// Quantises an f32, bf16 or f16 matrix. A block with a value that is not finite gets a NaN as its
// scale: qlora__fp8_weight_check finds it.
static QLORA__UNUSED qlora_result qlora__fp8_weight_quantise(qlora_ctx* ctx,
                                                             const qlora_tensor* source,
                                                             const qlora__fp8_weight* w) {
    qlora__fp8_weight_job job;
    memset(&job, 0, sizeof job);
    job.w = w;
    job.source = source;
    if (!qlora__on_cpu(ctx)) {
        return qlora__fp8_weight_quantise_gpu(ctx, &job);
    }
    qlora__parallel(ctx, qlora__fp8_blocks(w->rows) * qlora__fp8_blocks(w->cols), 1,
                    qlora__fp8_quantise_blocks, &job);
    return QLORA_OK;
}

// Dequantises the part of the weight that starts at (row0, col0) and has the size of out, which is
// f32 or bf16.
static qlora_result qlora__fp8_weight_window(qlora_ctx* ctx, const qlora__fp8_weight* w,
                                             int64_t row0, int64_t col0, const qlora_tensor* out) {
    qlora__fp8_weight_job job;
    memset(&job, 0, sizeof job);
    job.w = w;
    job.out = out;
    job.row0 = row0;
    job.col0 = col0;
    QLORA__TRY(qlora__capture_note(ctx, w->memory.data));
    if (out->rows == 0 || out->cols == 0) {
        return QLORA_OK;
    }
    if (!qlora__on_cpu(ctx)) {
        return qlora__fp8_weight_dequantise_gpu(ctx, &job);
    }
    qlora__parallel(ctx, out->rows, 1 + 4096 / out->cols, qlora__fp8_dequantise_rows, &job);
    return QLORA_OK;
}

// ---- weights with codes -------------------------------------------------------------------------

// A frozen weight whose elements are codes with scales; one of the two is not NULL. Products
// dequantise it to bf16 values.
typedef struct qlora__coded {
    const qlora_nf4* nf4;
    const qlora__fp8_weight* fp8;
} qlora__coded;

static qlora__coded qlora__coded_of(const qlora_nf4* nf4, const qlora__fp8_weight* fp8) {
    qlora__coded w;
    w.nf4 = nf4;
    w.fp8 = fp8;
    return w;
}

// Dequantises the part that starts at (row0, col0) and has the size of out.
static qlora_result qlora__coded_window(qlora_ctx* ctx, qlora__coded w, int64_t row0, int64_t col0,
                                        const qlora_tensor* out) {
    return w.nf4 != NULL ? qlora__nf4_window(ctx, w.nf4, row0, col0, out, out->dtype == QLORA_F32)
                         : qlora__fp8_weight_window(ctx, w.fp8, row0, col0, out);
}

// How a product is computed.
typedef struct qlora__coded_way {
    qlora_math math;
    bool backward; // dx = dy W instead of y = x W^T
    uint32_t flags;
    float alpha; // a factor of the result
    // Memory for dequantised weights, of the type of x, that is used instead of scratch where it
    // holds more; may be NULL.
    const qlora_tensor* room;
} qlora__coded_way;

// On the CPU: the tiers with kernels of their own dequantise while they pack.
static qlora_result qlora__coded_packed(qlora_ctx* ctx, const qlora__coded_way* way,
                                        const qlora_tensor* x, qlora__coded w,
                                        const qlora_tensor* y) {
    qlora_path path = QLORA_PATH_AUTO;
    QLORA__TRY(qlora__gemm_choose_path(ctx, qlora__product_path(way->flags), &path));
    qlora__gemm g;
    memset(&g, 0, sizeof g);
    g.tb = !way->backward;
    g.M = x->rows;
    g.N = y->cols;
    g.K = x->cols;
    g.A = x->data;
    g.C = y->data;
    g.lda = x->ld;
    g.ldc = y->ld;
    g.batch = 1;
    g.a_type = x->dtype;
    g.b_type = QLORA_BF16;
    g.nf4 = w.nf4;
    g.fp8 = w.fp8;
    g.bf16 = way->math == QLORA__MATH_BF16;
    g.out = y->dtype;
    g.alpha = way->alpha;
    g.beta = (way->flags & QLORA_PRODUCT_ACCUMULATE) != 0 ? 1.0f : 0.0f;
    ctx->last_path = path;
    return qlora__gemm_cpu(ctx, &g);
}

// Finds memory for dequantised weights: `slice` of `count` rows or columns of `bytes` each.
static qlora_result qlora__coded_room(qlora_ctx* ctx, const qlora_tensor* room, int64_t count,
                                      size_t bytes, int64_t* slice, void** data) {
    int64_t fit = room != NULL && bytes > 0 ? (int64_t)(room->bytes / bytes) : 0;
    fit = fit >= count ? count : fit / 64 * 64;
    if (fit > 0 && (fit == count || fit >= (int64_t)(qlora__scratch_free(ctx) / bytes))) {
        *slice = fit;
        *data = room->data;
        return qlora__capture_note(ctx, room->data);
    }
    return qlora__scratch_slice(ctx, count, bytes, 64, slice, data);
}

// With parts of W that are dequantised first: rows for y, columns for dx, so that no sum is ever
// split.
static qlora_result qlora__coded_unfused(qlora_ctx* ctx, const qlora__coded_way* way,
                                         const qlora_tensor* x, qlora__coded w,
                                         const qlora_tensor* y) {
    bool backward = way->backward;
    int64_t count = y->cols;
    int64_t other = x->cols;
    int64_t slice = 0;
    qlora_tensor window;
    QLORA__TRY(qlora__tensor_shape(ctx, x->dtype, 1, 0, 0, 0, &window));
    QLORA__TRY(qlora__coded_room(ctx, way->room, count,
                                 (size_t)other * qlora_dtype_bytes(x->dtype), &slice,
                                 &window.data));
    qlora_gemm_desc d;
    memset(&d, 0, sizeof d);
    d.trans_b = !backward;
    d.alpha = way->alpha;
    d.beta = (way->flags & QLORA_PRODUCT_ACCUMULATE) != 0 ? 1.0f : 0.0f;
    d.path = qlora__product_path(way->flags);
    for (int64_t done = 0; done < count; done += slice) {
        int64_t now = qlora__min(slice, count - done);
        window.rows = backward ? other : now;
        window.cols = backward ? now : other;
        window.ld = window.cols;
        window.bytes = (size_t)(now * other) * qlora_dtype_bytes(x->dtype);
        QLORA__TRY(qlora__coded_window(ctx, w, backward ? 0 : done, backward ? done : 0, &window));
        qlora_tensor part;
        QLORA__TRY(qlora__tensor_view(ctx, y, 0, y->rows, done, now, &part));
        QLORA__TRY(qlora__gemm_run(ctx, way->math, backward, &d, x, &window, &part));
    }
    return QLORA_OK;
}

static qlora_result qlora__coded_product(qlora_ctx* ctx, const qlora__coded_way* way,
                                         const qlora_tensor* x, qlora__coded w,
                                         const qlora_tensor* y) {
    return qlora__on_cpu(ctx) && ctx->cpu->gemm != NULL ? qlora__coded_packed(ctx, way, x, w, y)
                                                        : qlora__coded_unfused(ctx, way, x, w, y);
}
