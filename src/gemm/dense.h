// ---- slices of scratch memory -------------------------------------------------------------------

// Returns in *slice how many of `count` rows or columns, `bytes` each, fit in the free scratch, at
// least `unit` or all of them, and takes the memory for them.
static qlora_result qlora__scratch_slice(qlora_ctx* ctx, int64_t count, size_t bytes, int64_t unit,
                                         int64_t* slice, void** memory) {
    size_t free_bytes = qlora__scratch_free(ctx);
    int64_t fit = bytes > 0 ? (int64_t)(free_bytes / bytes) : count;
    if (fit < count) {
        fit = qlora__max(fit / unit * unit,
                         qlora__min(unit, count)); // if it does not fit, qlora__scratch fails
    }
    *slice = qlora__min(fit, count);
    size_t all = 0;
    if (!qlora__mul((size_t)*slice, bytes, &all)) {
        return qlora__fail(ctx, QLORA_ERR_LIMIT, "the size in bytes of an operand overflows");
    }
    return qlora__scratch(ctx, all, memory);
}

// ---- dense products: the built-in kernels -------------------------------------------------------

#ifndef QLORA_NO_CUDA

// The tile that a block computes, and the kernels with this tile.
typedef struct qlora__gemm_tile {
    int64_t side;
    qlora__kernel_id f32;
    qlora__kernel_id half;
} qlora__gemm_tile;

static const qlora__gemm_tile qlora__gemm_tiles[] = {
    {16, QLORA__K_gemm_skinny_f32, QLORA__K_gemm_skinny_half},
    {64, QLORA__K_gemm_mid_f32, QLORA__K_gemm_mid_half},
    {128, QLORA__K_gemm_big_f32, QLORA__K_gemm_big_half},
};

// Returns a row of qlora__gemm_tiles. With few rows or columns and a long K, K is split inside the
// block. With a short K, or fewer than 96 big tiles, smaller tiles use more of the device.
static int qlora__gemm_choose(const qlora__gemm* g) {
    int64_t big_tiles = qlora__ceil_div(g->M, 128) * qlora__ceil_div(g->N, 128) * g->batch;
    if (qlora__min(g->M, g->N) <= 32 && g->K >= 128) {
        return 0;
    }
    return g->K <= 32 || big_tiles < 96 ? 1 : 2;
}

// Returns whether the tensor-core kernels can be used: they need 16-bit operands that are not both
// transposed, a device with tensor cores, and rows aligned to 16 bytes.
static bool qlora__gemm_takes_tensor_cores(const qlora_ctx* ctx, const qlora__gemm* g) {
    uintptr_t address = (uintptr_t)g->A | (uintptr_t)g->B;
    int64_t strides = g->lda | g->ldb | (g->batch > 1 ? g->sA | g->sB : 0);
    return g->a_type != QLORA_F32 && !(g->ta && g->tb) && qlora__gpu_takes(ctx, 80) &&
           address % 16 == 0 && strides % 8 == 0;
}

// How a product is launched: a block of `threads` computes side x side of C.
typedef struct qlora__gemm_launch {
    qlora__kernel_id kernel;
    int64_t side;
    uint32_t threads;
} qlora__gemm_launch;

// With few rows or columns, K is split inside the block: on tensor cores for bf16 only.
static qlora__gemm_launch qlora__gemm_launch_of(const qlora_ctx* ctx, const qlora__gemm* g) {
    static const qlora__kernel_id tensor[] = {QLORA__K_gemm_tc_nn, QLORA__K_gemm_tc_nt,
                                              QLORA__K_gemm_tc_tn};
    int row = qlora__gemm_choose(g);
    const qlora__gemm_tile* tile = &qlora__gemm_tiles[row];
    qlora__gemm_launch l = {g->a_type == QLORA_F32 ? tile->f32 : tile->half, tile->side, 256};
    if (qlora__gemm_takes_tensor_cores(ctx, g)) {
        bool fits = qlora__ceil_div(g->N, 64) <= 65535; // blocks along the second dimension
        if (g->a_type == QLORA_BF16 && qlora__min(g->M, g->N) <= 64 && fits) {
            l.kernel = QLORA__K_gemm_tc_narrow;
            l.side = 64;
            l.threads = 128;
        } else if (row != 0) {
            l.kernel = tensor[g->ta ? 2 : g->tb ? 1 : 0];
            l.side = 128;
            l.threads = 128;
        }
    }
    return l;
}

static qlora_result qlora__gemm_ptx(qlora_ctx* ctx, const qlora__gemm* g) {
    if (qlora__gemm_takes_warpgroups(ctx, g)) {
        return qlora__gemm_warpgroups(ctx, g);
    }
    qlora__gemm_launch l = qlora__gemm_launch_of(ctx, g);
    int32_t M = (int32_t)g->M;
    int32_t N = (int32_t)g->N;
    int32_t K = (int32_t)g->K;
    int32_t flags = (g->out == QLORA_BF16 ? 1 : 0) | (g->ta ? 2 : 0) | (g->tb ? 4 : 0) |
                    (g->a_type == QLORA_F16 ? 8 : 0);
    size_t in_size = qlora_dtype_bytes(g->a_type);
    size_t out_size = qlora_dtype_bytes(g->out);
    qlora__gemm c = *g; // parameters are passed by address
    for (int64_t done = 0; done < g->batch; done += 65535) {
        int64_t now = qlora__min(g->batch - done, 65535);
        const void* A = (const char*)g->A + (size_t)(done * g->sA) * in_size;
        const void* B = (const char*)g->B + (size_t)(done * g->sB) * in_size;
        void* C = (char*)g->C + (size_t)(done * g->sC) * out_size;
        void* args[] = {&A,     &B,    &C,    &M,    &N,           &K,       &c.lda,  &c.ldb,
                        &c.ldc, &c.sA, &c.sB, &c.sC, &c.alpha_dev, &c.alpha, &c.beta, &flags};
        QLORA__TRY(qlora__launch(ctx, l.kernel, qlora__ceil_div(g->M, l.side),
                                 qlora__ceil_div(g->N, l.side), now, l.threads,
                                 qlora__kernel_rows[l.kernel].shared, args));
    }
    return QLORA_OK;
}

// ---- cuBLAS -------------------------------------------------------------------------------------

static int qlora__cublas_type(qlora_dtype dtype) {
    return dtype == QLORA_F32    ? QLORA__CUDA_R_32F
           : dtype == QLORA_BF16 ? QLORA__CUDA_R_16BF
                                 : QLORA__CUDA_R_16F;
}

// Records the shapes that pre-warm runs, and counts unknown shapes once the cache is sealed.
static void qlora__cublas_count(qlora_ctx* ctx, const qlora__gemm* g) {
    int64_t shape[] = {g->M,           g->N,     g->K,      g->ta ? 1 : 0,
                       g->tb ? 1 : 0,  g->batch, g->a_type, (int64_t)g->out,
                       g->tf32 ? 1 : 0};
    qlora__cache_count_shape(ctx, qlora__fnv(shape, sizeof shape, 0));
}

// cuBLAS is column-major, so it computes C^T = op(B)^T op(A)^T, which has the same memory layout.
static qlora_result qlora__gemm_cublas(qlora_ctx* ctx, const qlora__gemm* g) {
    qlora__gpu* gpu = ctx->gpu;
    QLORA__TRY(qlora__cublas_bind(ctx, qlora__beside_workspace(ctx)));
    qlora__cublas_count(ctx, g);
    int op_a = g->ta ? QLORA__CUBLAS_OP_T : QLORA__CUBLAS_OP_N;
    int op_b = g->tb ? QLORA__CUBLAS_OP_T : QLORA__CUBLAS_OP_N;
    int in = qlora__cublas_type(g->a_type);
    int out = qlora__cublas_type(g->out);
    int compute = g->tf32 ? QLORA__CUBLAS_COMPUTE_32F_FAST_TF32 : QLORA__CUBLAS_COMPUTE_32F;
    // cuBLAS rejects a leading dimension of 0 even if no element is read.
    int lda = (int)qlora__max(g->lda, 1);
    int ldb = (int)qlora__max(g->ldb, 1);
    int ldc = (int)qlora__max(g->ldc, 1);
    int M = (int)g->M;
    int N = (int)g->N;
    int K = (int)g->K;
    const void* alpha = &g->alpha;
    const void* beta = &g->beta;
    if (g->alpha_dev != NULL) {
        alpha = g->alpha_dev;
        beta = g->beta_dev;
        QLORA__TRY(qlora__blas(
            ctx, gpu->blas.SetPointerMode(gpu->cublas, QLORA__CUBLAS_POINTER_MODE_DEVICE),
            "cublasSetPointerMode"));
    }
    int status = 0;
    const char* what = "cublasGemmEx";
    if (g->batch == 1) {
        status = gpu->blas.GemmEx(gpu->cublas, op_b, op_a, N, M, K, alpha, g->B, in, ldb, g->A, in,
                                  lda, beta, g->C, out, ldc, compute, QLORA__CUBLAS_GEMM_DEFAULT);
    } else {
        what = "cublasGemmStridedBatchedEx";
        status = gpu->blas.GemmStridedBatchedEx(
            gpu->cublas, op_b, op_a, N, M, K, alpha, g->B, in, ldb, g->sB, g->A, in, lda, g->sA,
            beta, g->C, out, ldc, g->sC, (int)g->batch, compute, QLORA__CUBLAS_GEMM_DEFAULT);
    }
    if (g->alpha_dev != NULL) {
        int reset = gpu->blas.SetPointerMode(gpu->cublas, QLORA__CUBLAS_POINTER_MODE_HOST);
        status = status != 0 ? status : reset;
    }
    return qlora__blas(ctx, status, what);
}

// ---- mixed operands -----------------------------------------------------------------------------

// Writes to scale[0] the power of two that brings an f32 matrix into the range of f16, and to
// scale[1] alpha divided by it.
static qlora_result qlora__cast_scale(qlora_ctx* ctx, const void* data, int64_t rows, int64_t cols,
                                      int64_t ld, float alpha, float* scale) {
    int64_t blocks = qlora__min(qlora__max(rows * qlora__ceil_div(cols, 2048), 1), 1024);
    int32_t count = (int32_t)blocks;
    void* partials = NULL;
    QLORA__TRY(qlora__scratch(ctx, (size_t)blocks * 4, &partials));
    void* absmax_args[] = {(void*)&data, &rows, &cols, &ld, &partials};
    QLORA__TRY(qlora__launch(ctx, QLORA__K_cast_absmax_f32, blocks, 1, 1, 256, 0, absmax_args));
    void* scale_args[] = {&partials, &count, &alpha, &scale};
    return qlora__launch(ctx, QLORA__K_cast_scale, 1, 1, 1, 256, 0, scale_args);
}

// The f32 operand of a mixed product, as it is stored: `lines` are the rows or columns of the
// result that it contributes to, which can be computed independently of each other.
typedef struct qlora__mixed {
    bool is_a;
    bool lines_are_rows; // of the stored matrix
    int64_t lines;
    const float* data;
    int64_t ld;
    qlora_dtype type; // of the other operand
    float* factors;   // f16: scale, alpha / scale, beta
} qlora__mixed;

static qlora__mixed qlora__mixed_of(const qlora__gemm* g) {
    qlora__mixed x;
    memset(&x, 0, sizeof x);
    x.is_a = g->a_type == QLORA_F32;
    x.lines_are_rows = x.is_a ? !g->ta : g->tb;
    x.lines = x.is_a ? g->M : g->N;
    x.data = (const float*)(x.is_a ? g->A : g->B);
    x.ld = x.is_a ? g->lda : g->ldb;
    x.type = x.is_a ? g->b_type : g->a_type;
    return x;
}

// Chooses the scale of an f16 product and makes the product use it.
static qlora_result qlora__mixed_scale(qlora_ctx* ctx, qlora__gemm* g, qlora__mixed* x) {
    void* factors = NULL;
    QLORA__TRY(qlora__scratch(ctx, 3 * sizeof(float), &factors));
    float* f = (float*)factors;
    QLORA__TRY(qlora__cast_scale(ctx, x->data, x->lines_are_rows ? x->lines : g->K,
                                 x->lines_are_rows ? g->K : x->lines, x->ld, g->alpha, f));
    qlora__CUdeviceptr beta = (qlora__CUdeviceptr)(uintptr_t)(f + 2);
    int code = ctx->gpu->cu.MemsetD32Async(beta, qlora__bits(g->beta), 1, ctx->gpu->stream);
    QLORA__TRY(qlora__cu(ctx, code, "cuMemsetD32Async"));
    x->factors = f;
    g->alpha = 1.0f;
    g->alpha_dev = f + 1;
    g->beta_dev = f + 2;
    return QLORA_OK;
}

// Computes `now` lines of the result, starting at `first`, with a copy of the f32 operand in the
// type of the other one.
static qlora_result qlora__mixed_slice(qlora_ctx* ctx, const qlora__gemm* g, const qlora__mixed* x,
                                       int64_t first, int64_t now, void* copy, qlora_path path) {
    int64_t rows = x->lines_are_rows ? now : g->K;
    int64_t cols = x->lines_are_rows ? g->K : now;
    int64_t ld = x->ld;
    int64_t new_ld = (int64_t)qlora__align_up((size_t)cols, 8);
    const float* data = x->data + (x->lines_are_rows ? first * x->ld : first);
    const float* scale = x->factors;
    void* args[] = {(void*)&data, &copy, &rows, &cols, &ld, &new_ld, (void*)&scale};
    int64_t pieces = rows * qlora__ceil_div(cols, 2048);
    QLORA__TRY(qlora__launch(ctx,
                             x->type == QLORA_F16 ? QLORA__K_cast_f32_f16 : QLORA__K_cast_f32_bf16,
                             qlora__min(pieces, 4096), 1, 1, 256, 0, args));
    qlora__gemm part = *g;
    size_t out = qlora_dtype_bytes(g->out);
    part.a_type = x->type;
    part.b_type = x->type;
    if (x->is_a) {
        part.M = now;
        part.A = copy;
        part.lda = new_ld;
        part.C = (char*)g->C + (size_t)(first * g->ldc) * out;
    } else {
        part.N = now;
        part.B = copy;
        part.ldb = new_ld;
        part.C = (char*)g->C + (size_t)first * out;
    }
    return path == QLORA_PATH_CUBLAS ? qlora__gemm_cublas(ctx, &part) : qlora__gemm_ptx(ctx, &part);
}

// One operand is f32 and is cast in scratch; where that does not hold all of it, the result is
// computed in slices. No sum is ever split.
static qlora_result qlora__gemm_mixed(qlora_ctx* ctx, qlora__gemm* g, qlora_path path) {
    if (g->batch > 1) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "a batched product of an f32 and a 16-bit operand is not supported; "
                           "cast one of them");
    }
    qlora__mixed x = qlora__mixed_of(g);
    if (x.type == QLORA_F16) {
        QLORA__TRY(qlora__mixed_scale(ctx, g, &x));
    }
    // Rows of the copy start at multiples of 16 bytes, and so do slices of its columns.
    size_t depth = x.lines_are_rows ? qlora__align_up((size_t)g->K, 8) : (size_t)g->K;
    int64_t lines = x.lines_are_rows ? x.lines : (int64_t)qlora__align_up((size_t)x.lines, 8);
    int64_t slice = 0;
    void* copy = NULL;
    QLORA__TRY(qlora__scratch_slice(ctx, lines, depth * 2, 64, &slice, &copy));
    for (int64_t done = 0; done < x.lines; done += slice) {
        int64_t now = qlora__min(slice, x.lines - done);
        QLORA__TRY(qlora__mixed_slice(ctx, g, &x, done, now, copy, path));
    }
    return QLORA_OK;
}

static qlora_result qlora__gemm_gpu(qlora_ctx* ctx, qlora__gemm* g, qlora_path path) {
    if (g->K == 0) { // the product is empty, and cuBLAS would not clear C
        size_t size = qlora_dtype_bytes(g->out);
        for (int64_t i = 0; i < g->batch && g->beta == 0.0f; i++) {
            QLORA__TRY(qlora__zero(ctx, (char*)g->C + (size_t)(i * g->sC) * size,
                                   (size_t)g->ldc * size, (size_t)g->N * size, (size_t)g->M));
        }
        if (g->beta == 0.0f || g->beta == 1.0f) {
            return QLORA_OK;
        }
    }
    if (g->a_type != g->b_type) {
        return qlora__gemm_mixed(ctx, g, path);
    }
    return path == QLORA_PATH_CUBLAS ? qlora__gemm_cublas(ctx, g) : qlora__gemm_ptx(ctx, g);
}

static bool qlora__has_cublas(const qlora_ctx* ctx) {
    return ctx->gpu != NULL && ctx->gpu->cublas != NULL;
}

#else

static qlora_result qlora__gemm_gpu(qlora_ctx* ctx, qlora__gemm* g, qlora_path path) {
    (void)g;
    (void)path;
    return qlora__no_kernels(ctx);
}

static bool qlora__has_cublas(const qlora_ctx* ctx) {
    (void)ctx;
    return false;
}

#endif // QLORA_NO_CUDA

// ---- the operator -------------------------------------------------------------------------------

const char* qlora_path_name(qlora_path path) {
    static const char* const names[] = {"auto", "CPU", "PTX", "cuBLAS", "NF4"};
    return (int)path >= 0 && path <= QLORA_PATH_NF4 ? names[path] : "unknown";
}

static qlora_result qlora__gemm_choose_path(qlora_ctx* ctx, qlora_path wanted, qlora_path* out) {
    bool cpu = qlora__on_cpu(ctx);
    if ((int)wanted < 0 || wanted > QLORA_PATH_CUBLAS) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "path is %d; it must be one of qlora_path",
                           (int)wanted);
    }
    if ((wanted == QLORA_PATH_CPU && !cpu) ||
        (cpu && wanted != QLORA_PATH_CPU && wanted != QLORA_PATH_AUTO)) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED, "path %s is not available on a %s context",
                           qlora_path_name(wanted), cpu ? "CPU" : "CUDA");
    }
    if (wanted == QLORA_PATH_CUBLAS && !qlora__has_cublas(ctx)) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "path cuBLAS is not available; qlora_describe reports the reason");
    }
    *out = wanted != QLORA_PATH_AUTO ? wanted
           : cpu                     ? QLORA_PATH_CPU
           : qlora__has_cublas(ctx)  ? QLORA_PATH_CUBLAS
                                     : QLORA_PATH_PTX;
    return QLORA_OK;
}

static qlora_result qlora__gemm_check_types(qlora_ctx* ctx, const qlora_tensor* a,
                                            const qlora_tensor* b, const qlora_tensor* c) {
    bool mixed = (a->dtype == QLORA_F32) != (b->dtype == QLORA_F32);
    bool fits = a->dtype == b->dtype || mixed;
    if (c->dtype == QLORA_BF16) {
        fits = a->dtype == QLORA_BF16 && b->dtype == QLORA_BF16;
    }
    if (!fits || c->dtype == QLORA_F16) {
        return qlora__fail(
            ctx, QLORA_ERR_UNSUPPORTED, "a product of %s and %s into %s is not supported",
            qlora_dtype_name(a->dtype), qlora_dtype_name(b->dtype), qlora_dtype_name(c->dtype));
    }
    return QLORA_OK;
}

// The matrices of a batched output may be next to each other in the same rows (heads), but they
// must not overlap.
static bool qlora__batch_disjoint(const qlora_tensor* c) {
    int64_t span = (c->rows - 1) * c->ld + c->cols;
    return c->batch <= 1 || c->rows == 0 || c->batch_stride >= span ||
           (c->batch_stride >= c->cols && c->batch_stride * c->batch <= c->ld);
}

static qlora_result qlora__gemm_check(qlora_ctx* ctx, const qlora_gemm_desc* d,
                                      const qlora_tensor* a, const qlora_tensor* b,
                                      const qlora_tensor* c, qlora__gemm* g) {
    QLORA__TRY(qlora__need_batch(ctx, c, "C", QLORA__IS_FLOAT, -1, -1, -1));
    int64_t batch = c->batch;
    QLORA__TRY(qlora__need_batch(ctx, a, "A", QLORA__IS_FLOAT,
                                 a != NULL && a->batch == 1 ? 1 : batch, -1, -1));
    g->K = d->trans_a ? a->rows : a->cols;
    QLORA__TRY(qlora__need_batch(ctx, a, "A", QLORA__IS_FLOAT, -1, d->trans_a ? -1 : c->rows,
                                 d->trans_a ? c->rows : -1));
    QLORA__TRY(qlora__need_batch(ctx, b, "B", QLORA__IS_FLOAT,
                                 b != NULL && b->batch == 1 ? 1 : batch,
                                 d->trans_b ? c->cols : g->K, d->trans_b ? g->K : c->cols));
    QLORA__TRY(qlora__gemm_check_types(ctx, a, b, c));
    QLORA__TRY(qlora__need_apart(ctx, "C", c, "A", a));
    QLORA__TRY(qlora__need_apart(ctx, "C", c, "B", b));
    if (!qlora__batch_disjoint(c)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "C.batch_stride is %lld; the matrices of C overlap",
                           (long long)c->batch_stride);
    }
    static const char* const names[] = {"C.rows", "C.cols", "K", "A.ld", "B.ld", "C.ld", "C.batch"};
    const int64_t sizes[] = {c->rows, c->cols, g->K, a->ld, b->ld, c->ld, batch};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        if (sizes[i] > INT32_MAX - 256) {
            return qlora__fail(ctx, QLORA_ERR_LIMIT, "%s is %lld; the maximum is %d", names[i],
                               (long long)sizes[i], INT32_MAX - 256);
        }
    }
    g->ta = d->trans_a;
    g->tb = d->trans_b;
    g->M = c->rows;
    g->N = c->cols;
    g->A = a->data;
    g->B = b->data;
    g->C = c->data;
    g->lda = a->ld;
    g->ldb = b->ld;
    g->ldc = c->ld;
    g->batch = batch;
    g->sA = a->batch == 1 ? 0 : a->batch_stride;
    g->sB = b->batch == 1 ? 0 : b->batch_stride;
    g->sC = c->batch_stride;
    g->a_type = a->dtype;
    g->b_type = b->dtype;
    g->out = c->dtype;
    g->alpha = d->alpha;
    g->beta = d->beta;
    return QLORA_OK;
}

// Returns whether a product of two f32 matrices may use TF32; backward products only with TF32_ALL.
static bool qlora__math_takes_tf32(qlora_math math, bool backward) {
    return math == QLORA_MATH_TF32_ALL || (math == QLORA_MATH_TF32 && !backward);
}

static qlora_result qlora__gemm_run(qlora_ctx* ctx, qlora_math math, bool backward,
                                    const qlora_gemm_desc* desc, const qlora_tensor* a,
                                    const qlora_tensor* b, const qlora_tensor* c) {
    if (desc == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "desc is NULL");
    }
    qlora__gemm g;
    memset(&g, 0, sizeof g);
    qlora_path path = QLORA_PATH_AUTO;
    QLORA__TRY(qlora__gemm_choose_path(ctx, desc->path, &path));
    QLORA__TRY(qlora__gemm_check(ctx, desc, a, b, c, &g));
    g.tf32 =
        qlora__math_takes_tf32(math, backward) && a->dtype == QLORA_F32 && b->dtype == QLORA_F32;
    g.bf16 = math == QLORA__MATH_BF16;
    ctx->last_path = path;
    if (g.M == 0 || g.N == 0 || g.batch == 0) {
        return QLORA_OK;
    }
    return path == QLORA_PATH_CPU ? qlora__gemm_cpu(ctx, &g) : qlora__gemm_gpu(ctx, &g, path);
}

qlora_result qlora_gemm(qlora_ctx* ctx, const qlora_gemm_desc* desc, const qlora_tensor* a,
                        const qlora_tensor* b, const qlora_tensor* c) {
    QLORA__ENTER(ctx, "qlora_gemm");
    return qlora__leave(ctx, qlora__gemm_run(ctx, ctx->desc.math, false, desc, a, b, c));
}

// Rejects flags that are unknown, do not apply, or exclude each other.
static qlora_result qlora__product_flags_check(qlora_ctx* ctx, uint32_t flags, bool nf4) {
    static const char* const names[] = {"ACCUMULATE", "PTX", "CUBLAS", "FUSED", "UNFUSED"};
    static const int apart[][2] = {{1, 2}, {3, 4}, {0, 3}, {1, 3}, {2, 3}};
    if (flags > 31) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "flags is %u, with bits that are not in qlora_product_flags", flags);
    }
    for (int i = 3; i < 5 && !nf4; i++) {
        if ((flags >> i & 1u) != 0) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "flags: QLORA_PRODUCT_%s is for NF4 weights only", names[i]);
        }
    }
    for (size_t i = 0; i < sizeof apart / sizeof apart[0]; i++) {
        if ((flags >> apart[i][0] & flags >> apart[i][1] & 1u) != 0) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "flags: QLORA_PRODUCT_%s and QLORA_PRODUCT_%s exclude each other",
                               names[apart[i][0]], names[apart[i][1]]);
        }
    }
    return QLORA_OK;
}

static qlora_path qlora__product_path(uint32_t flags) {
    return (flags & QLORA_PRODUCT_PTX) != 0      ? QLORA_PATH_PTX
           : (flags & QLORA_PRODUCT_CUBLAS) != 0 ? QLORA_PATH_CUBLAS
                                                 : QLORA_PATH_AUTO;
}

// The three named products.
static qlora_result qlora__gemm_named(qlora_ctx* ctx, bool trans_a, bool trans_b, bool backward,
                                      uint32_t flags, const qlora_tensor* a, const qlora_tensor* b,
                                      const qlora_tensor* c) {
    QLORA__TRY(qlora__product_flags_check(ctx, flags, false));
    qlora_gemm_desc d;
    memset(&d, 0, sizeof d);
    d.trans_a = trans_a;
    d.trans_b = trans_b;
    d.alpha = 1.0f;
    d.beta = (flags & QLORA_PRODUCT_ACCUMULATE) != 0 ? 1.0f : 0.0f;
    d.path = qlora__product_path(flags);
    return qlora__gemm_run(ctx, ctx->desc.math, backward, &d, a, b, c);
}

qlora_result qlora_gemm_forward(qlora_ctx* ctx, const qlora_tensor* a, const qlora_tensor* b,
                                const qlora_tensor* c, uint32_t flags) {
    QLORA__ENTER(ctx, "qlora_gemm_forward");
    return qlora__leave(ctx, qlora__gemm_named(ctx, false, false, false, flags, a, b, c));
}

qlora_result qlora_gemm_backward_a(qlora_ctx* ctx, const qlora_tensor* dc, const qlora_tensor* b,
                                   const qlora_tensor* da, uint32_t flags) {
    QLORA__ENTER(ctx, "qlora_gemm_backward_a");
    return qlora__leave(ctx, qlora__gemm_named(ctx, false, true, true, flags, dc, b, da));
}

qlora_result qlora_gemm_backward_b(qlora_ctx* ctx, const qlora_tensor* a, const qlora_tensor* dc,
                                   const qlora_tensor* db, uint32_t flags) {
    QLORA__ENTER(ctx, "qlora_gemm_backward_b");
    return qlora__leave(ctx, qlora__gemm_named(ctx, true, false, true, flags, a, dc, db));
}
