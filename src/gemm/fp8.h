// ---- FP8 products -------------------------------------------------------------------------------
//
//   y = x W^T:  y[t,n] += sx[t] sw * sum over k of e4m3(x[t,k] / sx[t]) e4m3(W[n,k] / sw)
//   dx = dy W:  the same with dy and the transposed W
//
// sx is one scale per row of x, its largest magnitude / 448; sw is one scale per stack of weights,
// the largest scale of their NF4 blocks / 448, or that of their FP8 blocks: the sum of dx runs over
// the rows of W, so they must share it. FP8 codes are rounded again, to the shared scale. Both
// operands are contiguous along the sum, so W exists in two forms. Zeros fill rows up to a multiple
// of 16 bytes. The loops for the CPU are the specification: products of rounded operands, summed
// without further rounding. On a GPU, cuBLASLt sums in f32.

// Everything that the FP8 products of a stack use.
typedef struct qlora_fp8_operand qlora__fp8;
struct qlora_fp8_operand {
    qlora_tensor weights; // U8 [out, in rounded up], for y
    qlora_tensor transposed;  // U8 [in rounded up, out rounded up], for dx; may be the same memory
    qlora_tensor factors; // f32 [1, 2]: sw and 1 / sw
    qlora_tensor a;       // [pad, in]: the A_i below each other, in the type of x
    qlora_tensor sb;      // [out, pad]: the s B_i along the diagonal, in the type of x
    // shared by all stacks
    qlora_tensor codes;  // U8, one row: the rows of x or dy in e4m3
    qlora_tensor scales; // f32 [1, rows]: sx sw
    qlora_tensor most;   // f32 [1, rows]: largest magnitudes, where they come before the codes
    qlora_tensor ones;   // f32 [1, most columns of a result]
};

// Columns of a result, in multiples of 16 bytes. Those between cols and this are written as well.
static QLORA__UNUSED int64_t qlora__fp8_width(int64_t cols) {
    return (int64_t)qlora__align_up((size_t)cols, 8);
}

// Bytes of a row of codes.
static QLORA__UNUSED int64_t qlora__fp8_pitch(int64_t cols) {
    return (int64_t)qlora__align_up((size_t)cols, 16);
}

typedef struct qlora__fp8_job {
    const qlora_tensor* x;
    qlora__coded w;
    int64_t rows; // of w
    int64_t cols;
    uint8_t* codes;
    int64_t pitch;
    int64_t until; // of a transposed weight: columns to fill with zeros
    bool transposed;
    const QLORA__REAL* factors;
    QLORA__REAL* scales;
    const qlora_tensor* weights;
    const qlora_tensor* y;
    bool adds;
} qlora__fp8_job;

// ---- on the CPU ----

static void qlora__fp8_quantise_rows(void* user, int64_t begin, int64_t end) {
    const qlora__fp8_job* job = (const qlora__fp8_job*)user;
    const qlora_tensor* x = job->x;
    for (int64_t r = begin; r < end; r++) {
        float most = 0.0f;
        uint8_t* to = job->codes + r * job->pitch;
        for (int64_t c = 0; c < x->cols; c++) {
            float size = fabsf((float)qlora__at(x, r, c));
            most = size > most ? size : most;
        }
        float scale = qlora__fp8_scale(most);
        float inverse = 1.0f / scale;
        memset(to, 0, (size_t)job->pitch);
        for (int64_t c = 0; c < x->cols; c++) {
            to[c] = qlora__e4m3_from((float)qlora__at(x, r, c) * inverse);
        }
        job->scales[r] = (QLORA__REAL)(scale * (float)job->factors[0]);
    }
}

// Element (r, c) of a weight / sw.
static float qlora__fp8_element(const qlora__fp8_job* job, const float* levels, int64_t r,
                                int64_t c) {
    int64_t e = r * job->cols + c;
    const qlora_nf4* w = job->w.nf4;
    if (w != NULL) {
        return levels[qlora__nf4_code_at(w->codes, e)] * qlora__nf4_absmax(w, e / w->block);
    }
    int64_t block = r / QLORA__FP8_BLOCK * qlora__fp8_blocks(job->cols) + c / QLORA__FP8_BLOCK;
    float scale = job->w.fp8->scales[block] * (float)job->factors[1];
    return qlora__e4m3_to(job->w.fp8->codes[e]) * scale;
}

static void qlora__fp8_widen_rows(void* user, int64_t begin, int64_t end) {
    const qlora__fp8_job* job = (const qlora__fp8_job*)user;
    float levels[16];
    for (int i = 0; i < 16; i++) {
        levels[i] = job->w.nf4 != NULL ? job->w.nf4->maps[i] * (float)job->factors[1] : 0.0f;
    }
    for (int64_t r = begin; r < end; r++) {
        for (int64_t c = 0; c < job->cols; c++) {
            job->codes[job->transposed ? c * job->pitch + r : r * job->pitch + c] =
                qlora__e4m3_from(qlora__fp8_element(job, levels, r, c));
        }
        for (int64_t c = job->cols; c < job->pitch && !job->transposed; c++) {
            job->codes[r * job->pitch + c] = 0;
        }
    }
}

static void qlora__fp8_product_rows(void* user, int64_t begin, int64_t end) {
    const qlora__fp8_job* job = (const qlora__fp8_job*)user;
    const qlora_tensor* y = job->y;
    float values[256];
    for (int i = 0; i < 256; i++) {
        values[i] = qlora__e4m3_to((uint8_t)i);
    }
    for (int64_t r = begin; r < end; r++) {
        const uint8_t* x = job->codes + r * job->pitch;
        for (int64_t n = 0; n < y->cols; n++) {
            const uint8_t* w = (const uint8_t*)job->weights->data + n * job->pitch;
            double sum = 0.0;
            for (int64_t k = 0; k < job->pitch; k++) {
                sum += (double)values[x[k]] * (double)values[w[k]];
            }
            sum *= (double)job->scales[r];
            sum += job->adds ? (double)qlora__at(y, r, n) : 0.0;
            qlora__put(y, r, n, (QLORA__REAL)sum);
        }
    }
}

// The largest magnitude that a weight may have: the largest scale times the largest level.
static float qlora__fp8_most(const qlora_linear_part* p) {
    const qlora_nf4* w = p->nf4;
    const qlora__fp8_weight* eight = p->fp8;
    int64_t blocks = w != NULL ? qlora__ceil_div(w->rows * w->cols, w->block)
                               : qlora__fp8_blocks(eight->rows) * qlora__fp8_blocks(eight->cols);
    float most = 0.0f;
    float level = w != NULL ? 0.0f : QLORA__E4M3_MOST;
    for (int64_t b = 0; b < blocks; b++) {
        float size = fabsf(w != NULL ? qlora__nf4_absmax(w, b) : eight->scales[b]);
        most = size > most ? size : most;
    }
    for (int k = 0; k < 16 && w != NULL; k++) {
        float size = fabsf(w->maps[k]);
        level = size > level ? size : level;
    }
    return most * level;
}

static void qlora__fp8_measure_cpu(const qlora_linear_desc* l, QLORA__REAL* factors) {
    float most = 0.0f;
    for (int32_t i = 0; i < l->count; i++) {
        float own = qlora__fp8_most(&l->parts[i]);
        most = own > most ? own : most;
    }
    factors[0] = (QLORA__REAL)qlora__fp8_scale(most);
    factors[1] = (QLORA__REAL)(1.0f / qlora__fp8_scale(most));
}

// ---- on the GPU ----

#ifndef QLORA_NO_CUDA

static qlora_result qlora__fp8_quantise_gpu(qlora_ctx* ctx, const qlora__fp8* f,
                                            const qlora_tensor* x) {
    qlora_tensor from = *x; // parameters are passed by address
    void* factors = f->factors.data;
    void* codes = f->codes.data;
    void* scales = f->scales.data;
    int64_t pitch = qlora__fp8_pitch(x->cols);
    void* args[] = {&from.data, &from.ld, &from.cols, &factors, &codes, &pitch, &scales};
    int64_t warps = qlora__min(qlora__ceil_div(pitch, 32 * 64), 16); // 64 columns per thread
    return qlora__launch(ctx, QLORA__K_fp8_quantise, x->rows, 1, 1, (uint32_t)warps * 32, 0, args);
}

// The first ten parameters of the kernels that read a weight. A block shift of -1 stands for FP8.
typedef struct qlora__fp8_source {
    qlora_nf4 w;
    int32_t block_shift;
    int32_t group_shift;
} qlora__fp8_source;

static void qlora__fp8_source_args(qlora__coded w, qlora__fp8_source* s, void** args) {
    memset(s, 0, sizeof *s);
    if (w.nf4 != NULL) {
        s->w = *w.nf4;
        s->block_shift = qlora__log2(s->w.block);
        s->group_shift = qlora__log2(s->w.block2);
    } else {
        s->w.codes = w.fp8->codes;
        s->w.absmax_scales = w.fp8->scales;
        s->w.rows = w.fp8->rows;
        s->w.cols = w.fp8->cols;
        s->block_shift = -1;
    }
    void* own[] = {&s->w.codes,     &s->w.absmax,   &s->w.absmax_codes, &s->w.absmax_scales,
                   &s->w.offset,    &s->w.maps,     &s->w.rows,         &s->w.cols,
                   &s->block_shift, &s->group_shift};
    memcpy(args, own, sizeof own);
}

static qlora_result qlora__fp8_measure_gpu(qlora_ctx* ctx, const qlora_linear_desc* l,
                                           void* factors) {
    for (int32_t i = 0; i < l->count; i++) {
        qlora__fp8_source source;
        int32_t flags = (i == 0 ? 1 : 0) | (i == l->count - 1 ? 2 : 0);
        void* args[12];
        qlora__fp8_source_args(qlora__coded_of(l->parts[i].nf4, l->parts[i].fp8), &source, args);
        args[10] = &flags;
        args[11] = &factors;
        QLORA__TRY(qlora__launch(ctx, QLORA__K_fp8_measure, 1, 1, 1, 1024, 0, args));
    }
    return QLORA_OK;
}

static qlora_result qlora__fp8_widen_gpu(qlora_ctx* ctx, const qlora__fp8_job* job) {
    qlora__fp8_source source;
    const void* factors = job->factors;
    void* codes = job->codes;
    int64_t pitch = job->pitch;
    int64_t until = job->until;
    void* args[14];
    qlora__fp8_source_args(job->w, &source, args);
    args[10] = (void*)&factors;
    args[11] = &codes;
    args[12] = &pitch;
    args[13] = &until;
    return job->transposed
               ? qlora__launch(ctx, QLORA__K_fp8_widen_turned, qlora__ceil_div(until, 64),
                               qlora__ceil_div(job->cols, 256), 1, 256, 0, args)
               : qlora__launch(ctx, QLORA__K_fp8_widen, qlora__ceil_div(job->rows, 4),
                               qlora__ceil_div(pitch, 1024), 1, 256, 0, args);
}

static qlora_result qlora__fp8_product_gpu(qlora_ctx* ctx, const qlora__fp8* f,
                                           const qlora_tensor* weights, const qlora_tensor* y,
                                           bool adds) {
    int64_t width = qlora__fp8_width(y->cols);
    if (y->dtype != QLORA_BF16 || ((uintptr_t)y->data | (size_t)y->ld * 2) % 16 != 0 ||
        y->ld < width) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "the result of an FP8 product must be bf16, with rows that are aligned "
                           "to 16 bytes; it is %s with an ld of %lld",
                           qlora_dtype_name(y->dtype), (long long)y->ld);
    }
    qlora__lt_shape shape;
    memset(&shape, 0, sizeof shape);
    shape.m = width;
    shape.n = y->rows;
    shape.k = weights->cols;
    shape.ldy = y->ld;
    shape.adds = adds ? 1 : 0;
    shape.workspace = (int64_t)ctx->desc.workspace_bytes;
    qlora__lt_product* p = NULL;
    QLORA__TRY(qlora__lt_open(ctx));
    QLORA__TRY(
        qlora__lt_find(ctx, &shape, (const float*)f->ones.data, (const float*)f->scales.data, &p));
    qlora__cache_count_shape(ctx, qlora__fnv(&shape, sizeof shape, QLORA__CUDA_R_8F_E4M3));
    const float one = 1.0f;
    const float beta = adds ? 1.0f : 0.0f;
    qlora__lt* lt = ctx->gpu->lt;
    ctx->last_path = QLORA_PATH_CUBLAS;
    return qlora__blas(ctx,
                       lt->call.Matmul(lt->handle, p->desc, &one, weights->data, p->w,
                                       f->codes.data, p->x, &beta, y->data, p->y, y->data, p->y,
                                       p->choice.algo, qlora__beside_workspace(ctx),
                                       ctx->desc.workspace_bytes, ctx->gpu->stream),
                       "cublasLtMatmul");
}

#else

static qlora_result qlora__fp8_quantise_gpu(qlora_ctx* ctx, const qlora__fp8* f,
                                            const qlora_tensor* x) {
    (void)f;
    (void)x;
    return qlora__no_kernels(ctx);
}

static qlora_result qlora__fp8_measure_gpu(qlora_ctx* ctx, const qlora_linear_desc* l,
                                           void* factors) {
    (void)l;
    (void)factors;
    return qlora__no_kernels(ctx);
}

static qlora_result qlora__fp8_widen_gpu(qlora_ctx* ctx, const qlora__fp8_job* job) {
    (void)job;
    return qlora__no_kernels(ctx);
}

static qlora_result qlora__fp8_product_gpu(qlora_ctx* ctx, const qlora__fp8* f,
                                           const qlora_tensor* weights, const qlora_tensor* y,
                                           bool adds) {
    (void)f;
    (void)weights;
    (void)y;
    (void)adds;
    return qlora__no_kernels(ctx);
}

#endif // QLORA_NO_CUDA

// ---- the operators ----

// Computes the factors of a stack of weights.
static QLORA__UNUSED qlora_result qlora__fp8_measure(qlora_ctx* ctx, const qlora_linear_desc* l) {
    const qlora__fp8* f = l->fp8;
    if (!qlora__on_cpu(ctx)) {
        return qlora__fp8_measure_gpu(ctx, l, f->factors.data);
    }
    qlora__fp8_measure_cpu(l, (QLORA__REAL*)f->factors.data);
    return QLORA_OK;
}

// Writes the weights of a stack in one of their two forms.
static QLORA__UNUSED qlora_result qlora__fp8_place(qlora_ctx* ctx, const qlora_linear_desc* l,
                                                   bool transposed) {
    const qlora__fp8* f = l->fp8;
    const qlora_tensor* out = transposed ? &f->transposed : &f->weights;
    int64_t row = 0;
    if (transposed && qlora__on_cpu(ctx)) { // the kernel writes the columns that fill rows up
        memset(out->data, 0, (size_t)(out->rows * out->ld));
    }
    for (int32_t i = 0; i < l->count; i++) {
        qlora__fp8_job job;
        memset(&job, 0, sizeof job);
        job.w = qlora__coded_of(l->parts[i].nf4, l->parts[i].fp8);
        job.rows = l->parts[i].out;
        job.cols = l->in;
        job.pitch = out->ld;
        job.transposed = transposed;
        job.until = i == l->count - 1 ? out->ld - row : job.rows;
        job.codes = (uint8_t*)out->data + (transposed ? row : row * out->ld);
        job.factors = (const QLORA__REAL*)f->factors.data;
        if (!qlora__on_cpu(ctx)) {
            QLORA__TRY(qlora__fp8_widen_gpu(ctx, &job));
        } else {
            qlora__parallel(ctx, job.rows, 1 + 4096 / (1 + job.cols), qlora__fp8_widen_rows, &job);
        }
        row += job.rows;
    }
    return QLORA_OK;
}

// y (+)= x W^T, or, transposed, y (+)= x W. coded: the codes and scales of x are there, on a GPU.
static QLORA__UNUSED qlora_result qlora__fp8_product(qlora_ctx* ctx, const qlora__fp8* f,
                                                     bool transposed, bool coded,
                                                     const qlora_tensor* x, const qlora_tensor* y,
                                                     bool adds) {
    const qlora_tensor* weights = transposed ? &f->transposed : &f->weights;
    QLORA__TRY(qlora__capture_note(ctx, weights->data));
    QLORA__TRY(qlora__capture_note(ctx, f->codes.data));
    if (x->rows == 0 || y->cols == 0) {
        return QLORA_OK;
    }
    if (!qlora__on_cpu(ctx)) {
        if (!coded) {
            QLORA__TRY(qlora__fp8_quantise_gpu(ctx, f, x));
        }
        return qlora__fp8_product_gpu(ctx, f, weights, y, adds);
    }
    qlora__fp8_job job;
    memset(&job, 0, sizeof job);
    job.x = x;
    job.codes = (uint8_t*)f->codes.data;
    job.pitch = qlora__fp8_pitch(x->cols);
    job.factors = (const QLORA__REAL*)f->factors.data;
    job.scales = (QLORA__REAL*)f->scales.data;
    job.weights = weights;
    job.y = y;
    job.adds = adds;
    qlora__parallel(ctx, x->rows, 1 + 4096 / (1 + x->cols), qlora__fp8_quantise_rows, &job);
    qlora__parallel(ctx, y->rows, 1, qlora__fp8_product_rows, &job);
    ctx->last_path = QLORA_PATH_CPU;
    return QLORA_OK;
}
