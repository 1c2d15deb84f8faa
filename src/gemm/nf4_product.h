// ---- NF4 products: y = x W^T, dx = dy W ---------------------------------------------------------
//
// W[n,k] is bf16(level[code] * absmax) on every path. The unfused path dequantises parts of W in
// scratch: rows of W for y, columns for dx, so that no sum is ever split. The fused path
// (nf4_gemm.cu) dequantises the weights on the way to the tensor cores. It is faster as long as
// reading W costs more than multiplying, up to 32 rows (on an H200 at 64 rows: 71 us against 77).

#define QLORA__NF4_FUSED_ROWS 32 // also in the message of qlora__nf4_fused_lacks

#ifndef QLORA_NO_CUDA

// Returns the first requirement of the fused kernels that is not met, or NULL.
static const char* qlora__nf4_fused_lacks(const qlora_ctx* ctx, const qlora_tensor* x,
                                          const qlora_nf4* w) {
    if (!qlora__gpu_takes(ctx, 80)) {
        return "a GPU of compute capability 8.0 or later";
    }
    if (x->dtype != QLORA_BF16) {
        return "x in bf16";
    }
    if (x->rows > QLORA__NF4_FUSED_ROWS) {
        return "at most 32 rows of x";
    }
    if (x->cols % 32 != 0) {
        return "the columns of x to be a multiple of 32";
    }
    if (x->cols > INT32_MAX - 4096 || w->rows > INT32_MAX - 4096) {
        return "at most 2147479551 rows and columns of W";
    }
    if (w->rows * (x->cols / 32) > INT32_MAX) {
        return "fewer than 2^36 elements in W";
    }
    if (x->ld % 8 != 0 || (uintptr_t)x->data % 16 != 0) {
        return "rows of x that are aligned to 16 bytes";
    }
    return (uintptr_t)w->codes % 16 != 0 ? "codes that are aligned to 16 bytes" : NULL;
}

// How the blocks of a fused product share the work: blocks[] of them over the rows of each weight,
// and `splits` ranges of K. The order of the sums, and with it every bit of the result, depends
// only on M and K, not on the GPU.
typedef struct qlora__nf4_share {
    qlora__kernel_id kernel;
    int64_t blocks[2];
    int64_t splits;
    int32_t range;
    uint32_t threads;
    uint32_t shared;
} qlora__nf4_share;

// Shared memory for the table with which the fused kernels dequantise codes.
#define QLORA__NF4_TABLE_BYTES (256u * 16 * 8 + 256 * 4)

// Up to 16 rows: 256 columns per warp, up to 16 warps per block, and as many blocks as run at once.
static void qlora__nf4_share_columns(const qlora_ctx* ctx, int64_t K, const qlora_nf4* w,
                                     qlora__nf4_share* s) {
    int64_t steps = qlora__max(1, qlora__ceil_div(K, 256));
    int64_t warps = qlora__ceil_div(steps, qlora__ceil_div(steps, 16));
    int64_t tiles[2] = {qlora__ceil_div(w[0].rows, 8), qlora__ceil_div(w[1].rows, 8)};
    s->kernel = QLORA__K_nf4_gemm_16;
    s->splits = qlora__ceil_div(steps, warps);
    s->range = (int32_t)(warps * 256);
    s->threads = (uint32_t)warps * 32;
    s->shared = QLORA__NF4_TABLE_BYTES + (uint32_t)warps * 2 * 2 * (128 + 16) * 4;
    int64_t together = qlora__min(16 / warps, 4); // limited by the tables in shared memory
    int64_t blocks = qlora__max(2, ctx->gpu->sm_count * together / s->splits);
    int64_t first = tiles[1] > 0 ? blocks * tiles[0] / (tiles[0] + tiles[1]) : blocks;
    first = tiles[0] > 0 ? qlora__max(1, first) : 0;
    s->blocks[0] = qlora__min(first, tiles[0]);
    s->blocks[1] = qlora__min(qlora__max(1, blocks - first), tiles[1]);
}

// Up to 32 rows: 128 rows of W per block, with K in about as many ranges as fill 132
// multiprocessors.
static void qlora__nf4_share_rows(int64_t K, const qlora_nf4* w, qlora__nf4_share* s) {
    int64_t steps = qlora__max(1, qlora__ceil_div(K, 256));
    s->kernel = QLORA__K_nf4_gemm_32;
    s->blocks[0] = qlora__ceil_div(w[0].rows, 128);
    s->blocks[1] = qlora__ceil_div(w[1].rows, 128);
    int64_t most = qlora__min(8, qlora__max(1, 264 / (s->blocks[0] + s->blocks[1])));
    int64_t each = qlora__ceil_div(steps, most);
    s->splits = qlora__ceil_div(steps, each);
    s->range = (int32_t)(each * 256);
    s->threads = 256;
    s->shared = QLORA__NF4_TABLE_BYTES + 32u * 512 * 2;
}

static qlora_result qlora__nf4_fused(qlora_ctx* ctx, const qlora_tensor* x, const qlora_nf4* w1,
                                     const qlora_nf4* w2, const qlora_tensor* y1,
                                     const qlora_tensor* y2) {
    qlora_nf4 w[2];
    memset(w, 0, sizeof w);
    w[0] = *w1;
    if (w2 != NULL) {
        w[1] = *w2;
    }
    int64_t width = w[0].rows + w[1].rows;
    int32_t M = (int32_t)x->rows;
    int32_t K = (int32_t)x->cols;
    if (M == 0 || width == 0) {
        return QLORA_OK;
    }
    qlora__nf4_share share;
    if (M <= 16) {
        qlora__nf4_share_columns(ctx, K, w, &share);
    } else {
        qlora__nf4_share_rows(K, w, &share);
    }
    void* partials = NULL;
    if (share.splits > 1) {
        QLORA__TRY(qlora__scratch(ctx, (size_t)(share.splits * M * width) * 4, &partials));
    }
    void* source = x->data;
    int64_t ldx = x->ld;
    int32_t is_bf16 = y1->dtype == QLORA_BF16 ? 1 : 0;
    int32_t blocks1 = (int32_t)share.blocks[0];
    int32_t shift[4] = {qlora__log2(w[0].block), qlora__log2(w[0].block2), qlora__log2(w[1].block),
                        qlora__log2(w[1].block2)};
    int32_t N[2] = {(int32_t)w[0].rows, (int32_t)w[1].rows};
    void* y[2] = {y1->data, y2 != NULL ? y2->data : NULL};
    int64_t ldy[2] = {y1->ld, y2 != NULL ? y2->ld : 0};
    void* args[30] = {&source, &ldx, &M, &K, &share.range, &is_bf16, &partials, &blocks1};
    for (int i = 0; i < 2; i++) {
        void* own[11] = {&w[i].codes,
                         &w[i].absmax,
                         &w[i].absmax_codes,
                         &w[i].absmax_scales,
                         &w[i].offset,
                         &w[i].maps,
                         &shift[2 * i],
                         &shift[2 * i + 1],
                         &N[i],
                         &y[i],
                         &ldy[i]};
        memcpy(args + 8 + 11 * i, own, sizeof own);
    }
    QLORA__TRY(qlora__launch(ctx, share.kernel, share.blocks[0] + share.blocks[1], share.splits, 1,
                             share.threads, share.shared, args));
    if (share.splits == 1) {
        return QLORA_OK;
    }
    int32_t count = (int32_t)share.splits;
    void* sum[] = {&partials, &count, &M, &N[0], &y[0], &ldy[0], &N[1], &y[1], &ldy[1], &is_bf16};
    return qlora__launch(ctx, QLORA__K_nf4_gemm_reduce, qlora__ceil_div(width, 256), M, 1, 256, 0,
                         sum);
}

#else

static const char* qlora__nf4_fused_lacks(const qlora_ctx* ctx, const qlora_tensor* x,
                                          const qlora_nf4* w) {
    (void)ctx;
    (void)x;
    (void)w;
    return "a GPU of compute capability 8.0 or later";
}

static qlora_result qlora__nf4_fused(qlora_ctx* ctx, const qlora_tensor* x, const qlora_nf4* w1,
                                     const qlora_nf4* w2, const qlora_tensor* y1,
                                     const qlora_tensor* y2) {
    (void)x;
    (void)w1;
    (void)w2;
    (void)y1;
    (void)y2;
    return qlora__no_kernels(ctx);
}

#endif

// Checks one product; x is [rows, cols of W] forward and [rows, rows of W] backward.
static qlora_result qlora__nf4_gemm_check(qlora_ctx* ctx, bool backward, const qlora_tensor* x,
                                          const qlora_nf4* w, const qlora_tensor* y,
                                          uint32_t flags) {
    QLORA__TRY(qlora__nf4_need(ctx, w, "W"));
    int64_t in = backward ? w->rows : w->cols;
    int64_t out = backward ? w->cols : w->rows;
    QLORA__TRY(qlora__need(ctx, x, backward ? "dy" : "x", QLORA__IS_F32 | QLORA__IS_BF16, -1, in));
    QLORA__TRY(
        qlora__need(ctx, y, backward ? "dx" : "y", QLORA__IS_F32 | QLORA__IS_BF16, x->rows, out));
    QLORA__TRY(qlora__gemm_check_types(ctx, x, x, y));
    QLORA__TRY(qlora__need_apart(ctx, backward ? "dx" : "y", y, backward ? "dy" : "x", x));
    QLORA__TRY(qlora__product_flags_check(ctx, flags, true));
    if ((flags & QLORA_PRODUCT_FUSED) != 0) {
        const char* lacks = backward ? "a forward product" : qlora__nf4_fused_lacks(ctx, x, w);
        if (lacks != NULL) {
            return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED, "flags: QLORA_PRODUCT_FUSED needs %s",
                               lacks);
        }
    }
    return QLORA_OK;
}

static bool qlora__nf4_wants_fused(const qlora_ctx* ctx, const qlora_tensor* x, const qlora_nf4* w,
                                   uint32_t flags) {
    uint32_t other =
        QLORA_PRODUCT_UNFUSED | QLORA_PRODUCT_ACCUMULATE | QLORA_PRODUCT_PTX | QLORA_PRODUCT_CUBLAS;
    return (flags & other) == 0 && qlora__nf4_fused_lacks(ctx, x, w) == NULL;
}

static qlora_result qlora__nf4_multiply(qlora_ctx* ctx, const qlora__coded_way* way,
                                        const qlora_tensor* x, const qlora_nf4* w,
                                        const qlora_tensor* y) {
    QLORA__TRY(qlora__nf4_gemm_check(ctx, way->backward, x, w, y, way->flags));
    bool plain = way->alpha == 1.0f && !way->backward;
    if (plain && qlora__nf4_wants_fused(ctx, x, w, way->flags)) {
        ctx->last_path = QLORA_PATH_NF4;
        return qlora__nf4_fused(ctx, x, w, NULL, y, NULL);
    }
    return qlora__coded_product(ctx, way, x, qlora__coded_of(w, NULL), y);
}

static qlora_result qlora__nf4_gemm(qlora_ctx* ctx, qlora_math math, bool backward,
                                    const qlora_tensor* x, const qlora_nf4* w,
                                    const qlora_tensor* y, uint32_t flags) {
    const qlora__coded_way way = {math, backward, flags, 1.0f, NULL};
    return qlora__nf4_multiply(ctx, &way, x, w, y);
}

qlora_result qlora_nf4_gemm_forward(qlora_ctx* ctx, const qlora_tensor* x, const qlora_nf4* w,
                                    const qlora_tensor* y, uint32_t flags) {
    QLORA__ENTER(ctx, "qlora_nf4_gemm_forward");
    return qlora__leave(ctx, qlora__nf4_gemm(ctx, ctx->desc.math, false, x, w, y, flags));
}

qlora_result qlora_nf4_gemm_backward(qlora_ctx* ctx, const qlora_tensor* dy, const qlora_nf4* w,
                                     const qlora_tensor* dx, uint32_t flags) {
    QLORA__ENTER(ctx, "qlora_nf4_gemm_backward");
    return qlora__leave(ctx, qlora__nf4_gemm(ctx, ctx->desc.math, true, dy, w, dx, flags));
}

static qlora_result qlora__nf4_gemm2(qlora_ctx* ctx, const qlora_tensor* x, const qlora_nf4* w1,
                                     const qlora_nf4* w2, const qlora_tensor* y1,
                                     const qlora_tensor* y2, uint32_t flags) {
    QLORA__TRY(qlora__nf4_gemm_check(ctx, false, x, w1, y1, flags));
    QLORA__TRY(qlora__nf4_gemm_check(ctx, false, x, w2, y2, flags));
    QLORA__TRY(qlora__need_apart(ctx, "y1", y1, "y2", y2));
    if (y1->dtype == y2->dtype && qlora__nf4_wants_fused(ctx, x, w1, flags) &&
        qlora__nf4_wants_fused(ctx, x, w2, flags)) {
        ctx->last_path = QLORA_PATH_NF4;
        return qlora__nf4_fused(ctx, x, w1, w2, y1, y2);
    }
    size_t before = qlora__scratch_mark(ctx);
    QLORA__TRY(qlora__nf4_gemm(ctx, ctx->desc.math, false, x, w1, y1, flags));
    qlora__scratch_release(ctx, before);
    return qlora__nf4_gemm(ctx, ctx->desc.math, false, x, w2, y2, flags);
}

qlora_result qlora_nf4_gemm_forward2(qlora_ctx* ctx, const qlora_tensor* x, const qlora_nf4* w1,
                                     const qlora_nf4* w2, const qlora_tensor* y1,
                                     const qlora_tensor* y2, uint32_t flags) {
    QLORA__ENTER(ctx, "qlora_nf4_gemm_forward2");
    return qlora__leave(ctx, qlora__nf4_gemm2(ctx, x, w1, w2, y1, y2, flags));
}
