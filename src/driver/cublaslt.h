// ---- cuBLASLt: FP8 products ---------------------------------------------------------------------
//
// Only models in FP8 mode use cuBLASLt; the first of them opens it. A product takes the first
// algorithm that cuBLASLt suggests for its shape, never the result of a measurement, so that its
// bits repeat.

// clang-format off
// Values from cublasLt.h and library_types.h; a test compares them with NVIDIA's headers if those
// are installed.
#define QLORA__CUDA_R_8F_E4M3 28
#define QLORA__CUBLASLT_MATMUL_DESC_TRANSA 3
#define QLORA__CUBLASLT_MATMUL_DESC_A_SCALE_POINTER 17
#define QLORA__CUBLASLT_MATMUL_DESC_B_SCALE_POINTER 18
#define QLORA__CUBLASLT_MATMUL_DESC_FAST_ACCUM 25
#define QLORA__CUBLASLT_MATMUL_DESC_A_SCALE_MODE 31
#define QLORA__CUBLASLT_MATMUL_DESC_B_SCALE_MODE 32
#define QLORA__CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F 3
#define QLORA__CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES 1

// required, result type, field, symbol, parameters
#define QLORA__CUBLASLT_SYMBOLS(X)                                                                 \
    X(1, qlora__cublasStatus, Create, "cublasLtCreate", (void**))                                  \
    X(1, qlora__cublasStatus, Destroy, "cublasLtDestroy", (void*))                                 \
    X(1, size_t, GetVersion, "cublasLtGetVersion", (void))                                         \
    X(1, qlora__cublasStatus, MatmulDescCreate, "cublasLtMatmulDescCreate", (void**, int, int))    \
    X(1, qlora__cublasStatus, MatmulDescDestroy, "cublasLtMatmulDescDestroy", (void*))             \
    X(1, qlora__cublasStatus, MatmulDescSetAttribute, "cublasLtMatmulDescSetAttribute",            \
      (void*, int, const void*, size_t))                                                           \
    X(1, qlora__cublasStatus, MatrixLayoutCreate, "cublasLtMatrixLayoutCreate",                    \
      (void**, int, uint64_t, uint64_t, int64_t))                                                  \
    X(1, qlora__cublasStatus, MatrixLayoutDestroy, "cublasLtMatrixLayoutDestroy", (void*))         \
    X(1, qlora__cublasStatus, MatmulPreferenceCreate, "cublasLtMatmulPreferenceCreate", (void**))  \
    X(1, qlora__cublasStatus, MatmulPreferenceDestroy, "cublasLtMatmulPreferenceDestroy", (void*)) \
    X(1, qlora__cublasStatus, MatmulPreferenceSetAttribute,                                        \
      "cublasLtMatmulPreferenceSetAttribute", (void*, int, const void*, size_t))                   \
    X(1, qlora__cublasStatus, MatmulAlgoGetHeuristic, "cublasLtMatmulAlgoGetHeuristic",            \
      (void*, void*, void*, void*, void*, void*, void*, int, void*, int*))                         \
    X(1, qlora__cublasStatus, Matmul, "cublasLtMatmul",                                            \
      (void*, void*, const void*, const void*, void*, const void*, void*, const void*,             \
       const void*, void*, void*, void*, const void*, void*, size_t, void*))
// clang-format on

// cublasLtMatmulHeuristicResult_t
typedef struct qlora__lt_choice {
    uint64_t algo[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
} qlora__lt_choice;

#define QLORA__X(required, type, field, symbol, args) type(QLORA__CUDAAPI* field) args;
typedef struct qlora__lt_table {
    QLORA__CUBLASLT_SYMBOLS(QLORA__X)
} qlora__lt_table;
#undef QLORA__X

#define QLORA__X(required, type, field, symbol, args)                                              \
    {symbol, offsetof(qlora__lt_table, field), required},
static const qlora__symbol qlora__lt_symbols[] = {QLORA__CUBLASLT_SYMBOLS(QLORA__X)};
#undef QLORA__X

// Y[n,m] = beta Y + scales[n] X[n,:] W[m,:]^T in row-major terms: rows of Y are columns of cuBLAS.
typedef struct qlora__lt_shape {
    int64_t m;
    int64_t n;
    int64_t k; // and the pitch of X and W
    int64_t ldy;
    int64_t adds;      // beta is 1
    int64_t workspace; // bytes that the algorithm may use
} qlora__lt_shape;

typedef struct qlora__lt_product {
    qlora__lt_shape shape;
    void* desc; // NULL in an empty slot
    void* w;
    void* x;
    void* y;
    qlora__lt_choice choice;
} qlora__lt_product;

#define QLORA__LT_PRODUCTS 128   // more shapes than that replace the oldest ones
#define QLORA__LT_VERSION 120900 // the first one with a scale per row

struct qlora__lt {
    qlora__lt_table call;
    void* handle;
    size_t version;
    qlora__lt_product products[QLORA__LT_PRODUCTS];
    int next; // the slot that the next new shape takes
};

static void qlora__lt_product_free(qlora__lt* lt, qlora__lt_product* p) {
    void* const layouts[] = {p->w, p->x, p->y};
    for (size_t i = 0; i < sizeof layouts / sizeof layouts[0]; i++) {
        if (layouts[i] != NULL) {
            lt->call.MatrixLayoutDestroy(layouts[i]);
        }
    }
    if (p->desc != NULL) {
        lt->call.MatmulDescDestroy(p->desc);
    }
    memset(p, 0, sizeof *p);
}

static void qlora__lt_close(qlora_ctx* ctx) {
    qlora__lt* lt = ctx->gpu->lt;
    if (lt == NULL) {
        return;
    }
    for (int i = 0; i < QLORA__LT_PRODUCTS; i++) {
        qlora__lt_product_free(lt, &lt->products[i]);
    }
    if (lt->handle != NULL) {
        lt->call.Destroy(lt->handle);
    }
    qlora__free(ctx, lt, sizeof *lt);
    ctx->gpu->lt = NULL;
}

static qlora_result qlora__lt_load(qlora_ctx* ctx, qlora__lt* lt) {
#define QLORA__X(name) name,
    static const char* const names[] = {QLORA__CUBLASLT_NAMES(QLORA__X)};
#undef QLORA__X
    char why[256] = "";
    void* library =
        qlora__library_first(NULL, names, sizeof names / sizeof names[0], why, sizeof why);
    if (library == NULL) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "FP8 needs cuBLASLt, which was not found: %s", why);
    }
    if (!qlora__symbols_load(library, qlora__lt_symbols,
                             sizeof qlora__lt_symbols / sizeof qlora__lt_symbols[0], &lt->call, why,
                             sizeof why)) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "FP8 needs cuBLASLt, which is too old or damaged: it lacks %s", why);
    }
    lt->version = lt->call.GetVersion();
    if (lt->version < QLORA__LT_VERSION) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "FP8 needs cuBLASLt 12.9 or later; this one is %d.%d",
                           (int)(lt->version / 10000), (int)(lt->version / 100 % 100));
    }
    return qlora__blas(ctx, lt->call.Create(&lt->handle), "cublasLtCreate");
}

// Opens cuBLASLt unless that has been done. cuBLAS itself comes with it, and its workspaces are
// used.
static QLORA__UNUSED qlora_result qlora__lt_open(qlora_ctx* ctx) {
    qlora__gpu* gpu = ctx->gpu;
    if (gpu->lt != NULL) {
        return QLORA_OK;
    }
    if (gpu->cublas == NULL) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED, "FP8 needs cuBLAS: %s", gpu->cublas_note);
    }
    gpu->lt = (qlora__lt*)qlora__alloc_zero(ctx, sizeof *gpu->lt);
    if (gpu->lt == NULL) {
        return QLORA_ERR_MEMORY;
    }
    qlora_result r = qlora__lt_load(ctx, gpu->lt);
    if (r != QLORA_OK) {
        qlora__lt_close(ctx);
    }
    return r;
}

static qlora_result qlora__lt_set(qlora_ctx* ctx, void* desc, int attribute, const void* value,
                                  size_t bytes) {
    char what[64];
    snprintf(what, sizeof what, "cublasLtMatmulDescSetAttribute(%d)", attribute);
    return qlora__blas(
        ctx, ctx->gpu->lt->call.MatmulDescSetAttribute(desc, attribute, value, bytes), what);
}

// Sums stay in the tensor cores, which keep about 14 bits, instead of being added to f32 registers
// every few products. Measured on an H200: an error of 0.3 % (4096 terms) to 0.5 % (28672 terms)
// instead of 0.25 %, next to 3.5 % by rounding the operands, and products are 5 to 12 % faster.
#define QLORA__LT_FAST_ACCUM 1

// Describes a product. Both operands are contiguous along the sum, as Hopper wants FP8 operands: W
// is cuBLAS' A, transposed, and X its B.
static qlora_result qlora__lt_describe(qlora_ctx* ctx, qlora__lt_product* p) {
    qlora__lt* lt = ctx->gpu->lt;
    const qlora__lt_shape* s = &p->shape;
    const int32_t transposed = QLORA__CUBLAS_OP_T;
    const int32_t mode = QLORA__CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    const int8_t fast = QLORA__LT_FAST_ACCUM;
    QLORA__TRY(qlora__blas(
        ctx, lt->call.MatmulDescCreate(&p->desc, QLORA__CUBLAS_COMPUTE_32F, QLORA__CUDA_R_32F),
        "cublasLtMatmulDescCreate"));
    QLORA__TRY(qlora__lt_set(ctx, p->desc, QLORA__CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                             sizeof transposed));
    QLORA__TRY(
        qlora__lt_set(ctx, p->desc, QLORA__CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast));
    QLORA__TRY(
        qlora__lt_set(ctx, p->desc, QLORA__CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &mode, sizeof mode));
    QLORA__TRY(
        qlora__lt_set(ctx, p->desc, QLORA__CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &mode, sizeof mode));
    const struct {
        void** out;
        int type;
        int64_t rows;
        int64_t cols;
        int64_t ld;
    } layouts[] = {{&p->w, QLORA__CUDA_R_8F_E4M3, s->k, s->m, s->k},
                   {&p->x, QLORA__CUDA_R_8F_E4M3, s->k, s->n, s->k},
                   {&p->y, QLORA__CUDA_R_16BF, s->m, s->n, s->ldy}};
    for (size_t i = 0; i < sizeof layouts / sizeof layouts[0]; i++) {
        QLORA__TRY(qlora__blas(
            ctx,
            lt->call.MatrixLayoutCreate(layouts[i].out, layouts[i].type, (uint64_t)layouts[i].rows,
                                        (uint64_t)layouts[i].cols, layouts[i].ld),
            "cublasLtMatrixLayoutCreate"));
    }
    return QLORA_OK;
}

// Asks for the algorithm of a product whose scales have been set.
static qlora_result qlora__lt_choose(qlora_ctx* ctx, qlora__lt_product* p) {
    qlora__lt* lt = ctx->gpu->lt;
    const qlora__lt_shape* s = &p->shape;
    const uint64_t workspace = (uint64_t)s->workspace;
    void* preference = NULL;
    int found = 0;
    QLORA__TRY(qlora__blas(ctx, lt->call.MatmulPreferenceCreate(&preference),
                           "cublasLtMatmulPreferenceCreate"));
    int status = lt->call.MatmulPreferenceSetAttribute(
        preference, QLORA__CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace);
    const char* what = "cublasLtMatmulPreferenceSetAttribute";
    if (status == 0) {
        what = "cublasLtMatmulAlgoGetHeuristic";
        status = lt->call.MatmulAlgoGetHeuristic(lt->handle, p->desc, p->w, p->x, p->y, p->y,
                                                 preference, 1, &p->choice, &found);
    }
    lt->call.MatmulPreferenceDestroy(preference);
    if (status == 15 || (status == 0 && found == 0)) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "cuBLASLt %d.%d has no e4m3 product with a scale per row for %lld x "
                           "%lld x %lld on this device",
                           (int)(lt->version / 10000), (int)(lt->version / 100 % 100),
                           (long long)s->n, (long long)s->k, (long long)s->m);
    }
    return qlora__blas(ctx, status, what);
}

// Returns the product of a shape with its scales set: w_scales has m values, x_scales n.
static QLORA__UNUSED qlora_result qlora__lt_find(qlora_ctx* ctx, const qlora__lt_shape* shape,
                                                 const float* w_scales, const float* x_scales,
                                                 qlora__lt_product** out) {
    qlora__lt* lt = ctx->gpu->lt;
    qlora__lt_product* p = NULL;
    for (int i = 0; i < QLORA__LT_PRODUCTS && p == NULL; i++) {
        bool same = lt->products[i].desc != NULL &&
                    memcmp(&lt->products[i].shape, shape, sizeof *shape) == 0;
        p = same ? &lt->products[i] : NULL;
    }
    bool known = p != NULL;
    qlora_result r = QLORA_OK;
    if (!known) {
        p = &lt->products[lt->next];
        lt->next = (lt->next + 1) % QLORA__LT_PRODUCTS;
        qlora__lt_product_free(lt, p);
        p->shape = *shape;
        r = qlora__lt_describe(ctx, p);
    }
    const struct {
        int attribute;
        const float* scales;
    } scales[] = {{QLORA__CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, w_scales},
                  {QLORA__CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, x_scales}};
    for (int i = 0; i < 2 && r == QLORA_OK; i++) {
        r = qlora__lt_set(ctx, p->desc, scales[i].attribute, &scales[i].scales,
                          sizeof scales[i].scales);
    }
    r = r == QLORA_OK && !known ? qlora__lt_choose(ctx, p) : r;
    if (r != QLORA_OK) {
        qlora__lt_product_free(lt, p);
        return r;
    }
    *out = p;
    return QLORA_OK;
}
