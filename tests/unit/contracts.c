// contracts.c - guarantees of the runtime that are visible in the driver's calls and in the log:
// how modules are loaded, what waits, what allocates, what cuBLAS is bound to.
#define _POSIX_C_SOURCE 200809L

#include "machines.h"

#include <stdio.h>
#include <stdlib.h>

// ---- the log ----------------------------------------------------------------------------------

typedef struct log_book {
    int count[QLORA_LOG_ITEM_COUNT];
    char last[QLORA_LOG_ITEM_COUNT][256];
    qlora_log_level level[QLORA_LOG_ITEM_COUNT];
} log_book;

static log_book book;

static void log_keep(void* user, qlora_log_level level, qlora_log_item item, const char* text,
                     const char* file, int line) {
    log_book* b = (log_book*)user;
    (void)file;
    (void)line;
    b->count[item]++;
    b->level[item] = level;
    snprintf(b->last[item], sizeof b->last[item], "%s", text);
}

static void with_log(qlora_ctx_desc* desc) {
    desc->log = log_keep;
    desc->log_user = &book;
}

// One entry per compilation, with the module's name, kernels and bytes, and none for a hit.
// Failures are logged as well.
TEST log_one_item_per_compile(const test_machine* machine) {
    memset(&book, 0, sizeof book);
    qlora_ctx* ctx = test_open(machine, with_log);
    if (!ctx)
        SKIPm(test_open_reason());
    ASSERT_EQ(1, book.count[QLORA_LOG_ITEM_BACKEND]);
    ASSERT_EQ(1, book.count[QLORA_LOG_ITEM_CUBLAS]);
    ASSERT_EQ(0, book.count[QLORA_LOG_ITEM_KERNEL_COMPILE]);
    const qlora_kernel* kernel = NULL;
    for (int i = 0; i < 3; i++) {
        ASSERT_EQ(QLORA_OK, qlora_cache_compile(ctx, "clip_squares", &kernel));
        ASSERT_EQ(1, book.count[QLORA_LOG_ITEM_KERNEL_COMPILE]);
    }
    ASSERT(strstr(book.last[QLORA_LOG_ITEM_KERNEL_COMPILE], "clip: 1 kernel, ") != NULL);
    ASSERT(strstr(book.last[QLORA_LOG_ITEM_KERNEL_COMPILE], "bytes") != NULL);
    ASSERT(strstr(book.last[QLORA_LOG_ITEM_KERNEL_COMPILE], qlora_ctx_target(ctx)) != NULL);
    qlora_cache_info info;
    ASSERT_EQ(QLORA_OK, qlora_cache_query(ctx, &info));
    ASSERT_EQ(1u, info.modules);
    ASSERT_EQ(2u, (unsigned)info.hits);
    ASSERT_EQ(1u, (unsigned)info.misses);
    test_fake()->fail_at("LOAD", 1, 218, false);
    ASSERT_EQ(QLORA_ERR_KERNEL, qlora_cache_compile(ctx, "cast_f32_bf16", &kernel));
    ASSERT_EQ(2, book.count[QLORA_LOG_ITEM_KERNEL_COMPILE]);
    ASSERT_EQ(QLORA_LOG_ERROR, book.level[QLORA_LOG_ITEM_KERNEL_COMPILE]);
    // Destroying a parent with live children fails and reports them.
    qlora_tensor t;
    ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, QLORA_F32, 1, 1, &t));
    ASSERT_EQ(QLORA_ERR_STATE, qlora_ctx_destroy(ctx));
    ASSERT_EQ(1, book.count[QLORA_LOG_ITEM_LEAK]);
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &t));
    ASSERT_EQ(0, book.count[QLORA_LOG_ITEM_DEVICE_LOST]);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// ---- how modules are loaded -------------------------------------------------------------------

// Below compute capability 12, modules are loaded with buffers for the JIT log; from 12 on, without
// options; never with CU_JIT_TARGET. (The fake driver records options from 12 on and CU_JIT_TARGET
// as broken rules, which test_close_ctx reports.)
TEST load_by_capability(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    const qlora_kernel* kernel = NULL;
    ASSERT_EQ(QLORA_OK, qlora_cache_compile(ctx, "clip_squares", &kernel));
    bool plain = machine->cc >= 120;
    ASSERT_EQ(plain ? 1u : 0u, (unsigned)test_fake()->calls("cuModuleLoadData"));
    ASSERT_EQ(plain ? 0u : 1u, (unsigned)test_fake()->calls("cuModuleLoadDataEx"));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// A kernel's fault that surfaces at a load is attributed to the kernel, and the load is
// not attempted.
TEST load_is_not_blamed(const test_machine* machine) {
    memset(&book, 0, sizeof book);
    qlora_ctx* ctx = test_open(machine, with_log);
    if (!ctx)
        SKIPm(test_open_reason());
    qlora_tensor t;
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, 1, 8, NULL, &t));
    ASSERT_EQ(QLORA_OK, qlora_fill(ctx, 1.0f, &t));
    ASSERT_EQ(QLORA_OK, qlora_ctx_sync(ctx));
    test_fake()->fail_at("RUN", 1, 716, true);
    ASSERT_EQ(QLORA_OK, qlora_fill(ctx, 2.0f, &t));
    uint64_t loads = test_fake()->calls("LOAD");
    const qlora_kernel* kernel = NULL;
    ASSERT_EQ(QLORA_ERR_DEVICE_LOST, qlora_cache_compile(ctx, "clip_squares", &kernel));
    ASSERT_EQ(loads, test_fake()->calls("LOAD"));
    ASSERT(strstr(qlora_last_error(ctx), "launched earlier") != NULL);
    ASSERT(strstr(qlora_last_error(ctx), "CUDA_ERROR_MISALIGNED_ADDRESS (716)") != NULL);
    ASSERT_EQ(1, book.count[QLORA_LOG_ITEM_DEVICE_LOST]);
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &t));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// ---- operators neither wait nor allocate ------------------------------------------------------

typedef struct quiet_work {
    qlora_tensor a;
    qlora_tensor b;
    qlora_tensor c;
    qlora_tensor half;
    qlora_clip* clip;
} quiet_work;

static qlora_result quiet_step(qlora_ctx* ctx, quiet_work* w) {
    qlora_result r = qlora_gemm_forward(ctx, &w->a, &w->b, &w->c, 0);
    r = r == QLORA_OK ? qlora_gemm_forward(ctx, &w->a, &w->half, &w->c, QLORA_PRODUCT_ACCUMULATE)
                      : r;
    r = r == QLORA_OK ? qlora_gemm_forward(ctx, &w->a, &w->b, &w->c, QLORA_PRODUCT_PTX) : r;
    r = r == QLORA_OK ? qlora_softmax_forward(ctx, &w->c, &w->c) : r;
    r = r == QLORA_OK ? qlora_clip_set(w->clip, 0.5f) : r;
    return r == QLORA_OK ? qlora_clip_apply(w->clip) : r;
}

TEST operators_neither_wait_nor_allocate(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    float values[64];
    for (int i = 0; i < 64; i++) {
        values[i] = (float)(i % 7) - 3.0f;
    }
    quiet_work w;
    memset(&w, 0, sizeof w);
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, 6, 8, values, &w.a));
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, 8, 5, values, &w.b));
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F16, 8, 5, values, &w.half));
    ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, QLORA_F32, 6, 5, &w.c));
    const qlora_tensor* list[] = {&w.c};
    ASSERT_EQ(QLORA_OK, qlora_clip_create(ctx, list, NULL, 1, &w.clip));
    ASSERT_EQ(QLORA_OK, quiet_step(ctx, &w)); // compiles
    ASSERT_EQ(QLORA_OK, qlora_ctx_sync(ctx));
    static const char* const classes[] = {"SYNC", "ALLOC", "LOAD"};
    uint64_t before[3];
    qlora_memory_info memory;
    ASSERT_EQ(QLORA_OK, test_memory(ctx, &memory));
    uint64_t host_bytes = memory.host_bytes;
    for (int i = 0; i < 3; i++) {
        before[i] = test_fake()->calls(classes[i]);
    }
    for (int i = 0; i < 3; i++) {
        ASSERT_EQ(QLORA_OK, quiet_step(ctx, &w));
    }
    for (int i = 0; i < 3; i++) {
        ASSERT_EQ(before[i], test_fake()->calls(classes[i]));
    }
    ASSERT_EQ(QLORA_OK, test_memory(ctx, &memory));
    ASSERT_EQ(host_bytes, memory.host_bytes);
    ASSERT_EQ(QLORA_OK, qlora_clip_destroy(w.clip));
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &w.a));
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &w.b));
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &w.c));
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &w.half));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// ---- cublasSetStream resets the workspace, so the workspace is set after the stream -----------

// Whether the calls since log_clear include these, in this order.
static bool calls_in_order(const char* const* names, int count) {
    const char* at = test_fake()->log();
    for (int i = 0; i < count && at != NULL; i++) {
        at = strstr(at, names[i]);
    }
    return at != NULL;
}

TEST cublas_is_bound_again(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    static const char* const bind[] = {"cublasSetStream_v2", "cublasSetWorkspace_v2",
                                       "cublasSetMathMode", "cublasGemmEx"};
    const float one[1] = {3.0f};
    qlora_tensor a, c;
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, 1, 1, one, &a));
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, 1, 1, NULL, &c));
    ASSERT(calls_in_order(bind, 3)); // at creation
    test_fake()->log_clear();
    ASSERT_EQ(QLORA_OK, qlora_gemm_forward(ctx, &a, &a, &c, 0));
    ASSERT(!calls_in_order(bind, 1)); // nothing can have changed it
    // Another stream of the same context.
    qlora_native native;
    const fake_cu* cu = &test_fake()->cu;
    void* stream = NULL;
    void* popped = NULL;
    test_fake()->log_clear();
    ASSERT_EQ(QLORA_OK, qlora_ctx_set_stream(ctx, NULL));
    ASSERT_EQ(QLORA_OK, qlora_gemm_forward(ctx, &a, &a, &c, 0));
    ASSERT(calls_in_order(bind, 4));
    // Once the caller has the handle, it is bound before every use.
    ASSERT_EQ(QLORA_OK, qlora_ctx_native(ctx, &native));
    ASSERT_EQ(0, cu->cuCtxPushCurrent_v2(native.cu_context));
    ASSERT_EQ(0, cu->cuStreamCreate(&stream, 1));
    for (int i = 0; i < 2; i++) {
        test_fake()->log_clear();
        ASSERT_EQ(QLORA_OK, qlora_gemm_forward(ctx, &a, &a, &c, 0));
        ASSERT(calls_in_order(bind, 4));
    }
    // After a fault in the middle of binding, the handle is bound again at the next use.
    ASSERT_EQ(QLORA_OK, qlora_ctx_set_stream(ctx, stream));
    test_fake()->fail_at("cublasSetWorkspace_v2", 1, 13, false);
    ASSERT_EQ(QLORA_ERR_CUBLAS, qlora_gemm_forward(ctx, &a, &a, &c, 0));
    test_fake()->log_clear();
    ASSERT_EQ(QLORA_OK, qlora_gemm_forward(ctx, &a, &a, &c, 0));
    ASSERT(calls_in_order(bind, 4));
    float got[1] = {0.0f};
    ASSERT(test_read(ctx, &c, got));
    ASSERT_EQ_FMT(9.0, (double)got[0], "%g");
    ASSERT_EQ(QLORA_OK, qlora_ctx_set_stream(ctx, NULL));
    ASSERT_EQ(0, cu->cuStreamDestroy_v2(stream));
    ASSERT_EQ(0, cu->cuCtxPopCurrent_v2(&popped));
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &a));
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &c));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// ---- pre-warm ---------------------------------------------------------------------------------

// A pre-warm that fails leaves the cache unchanged, and the next one completes it.
TEST prewarm_fails_and_goes_on(const test_machine* machine) {
    static const qlora_prewarm_desc shape = {64,        96,   4, 2, 16, 8, 4, QLORA_BASE_NF4,
                                             QLORA_F32, NULL, 0};
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    qlora_cache_info info;
    test_fake()->fail_at("cuModuleLoadDataEx", 3, 218, false);
    ASSERT_EQ(QLORA_ERR_KERNEL, qlora_prewarm(ctx, &shape));
    ASSERT_EQ(QLORA_OK, qlora_cache_query(ctx, &info));
    ASSERT(!info.sealed);
    ASSERT_EQ(2u, info.modules);
    ASSERT_EQ(QLORA_OK, qlora_prewarm(ctx, &shape));
    ASSERT_EQ(QLORA_OK, qlora_cache_query(ctx, &info));
    ASSERT(info.sealed);
    ASSERT_EQ(0u, info.jit_after_seal);
    // A sealed cache stays sealed if a second model's pre-warm fails.
    test_fake()->fail_at("ALLOC", 1, 2, false);
    ASSERT_EQ(QLORA_ERR_DEVICE_MEMORY, qlora_prewarm(ctx, &shape));
    ASSERT_EQ(QLORA_OK, qlora_cache_query(ctx, &info));
    ASSERT(info.sealed);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// A kernel that fails leaves those of its module that are ready.
TEST failed_kernel_leaves_others(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    qlora_cache_info info;
    const qlora_kernel* kernel = NULL;
    ASSERT_EQ(QLORA_OK, qlora_cache_compile(ctx, "clip_squares", &kernel));
    test_fake()->fail_at("cuModuleGetFunction", 1, 500, false);
    ASSERT_EQ(QLORA_ERR_KERNEL, qlora_cache_compile(ctx, "clip_scale", NULL));
    ASSERT_EQ(QLORA_OK, qlora_cache_query(ctx, &info));
    ASSERT_EQ(1u, info.modules);
    ASSERT_EQ(1u, info.kernels);
    ASSERT_EQ(QLORA_OK, qlora_cache_get(ctx, "clip_squares", &kernel));
    ASSERT_EQ(QLORA_OK, qlora_cache_compile(ctx, "clip_scale", NULL));
    ASSERT_EQ(QLORA_OK, qlora_cache_query(ctx, &info));
    ASSERT_EQ(2u, info.modules);
    ASSERT_EQ(2u, info.kernels);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// One product of a program's own list: the kind and the sizes m, k, n.
typedef struct seed_product {
    int kind; // 0 forward, 1 backward_a, 2 backward_b
    int64_t m;
    int64_t k;
    int64_t n;
} seed_product;

enum { S = 8, HID = 64, QD = 48, KV = 16, MID = 96, RANK = 4, HEADS = 3, DIM = 16 };

// The products that the systems in which this library has its origin warm up: LoRA's, ...
static const seed_product lora_products[] = {
    {0, S, HID, RANK}, {0, S, RANK, QD},  {0, S, RANK, KV},  {0, RANK, S, QD},  {0, RANK, S, KV},
    {0, S, QD, RANK},  {0, S, KV, RANK},  {0, HID, S, RANK}, {0, S, RANK, HID}, {2, S, RANK, QD},
    {2, S, RANK, KV},  {2, S, HID, RANK}, {1, S, QD, RANK},  {1, S, KV, RANK},  {1, S, RANK, HID},
};

// ... and those of a base that is not quantised, with the gradients of its weights.
static const seed_product base_products[] = {
    {0, S, HID, HID}, {0, S, HID, QD},  {0, S, QD, HID},  {0, S, HID, KV},  {0, S, HID, MID},
    {0, S, MID, HID}, {1, S, HID, HID}, {1, S, KV, HID},  {1, S, HID, MID}, {1, S, MID, HID},
    {2, S, HID, HID}, {2, S, KV, HID},  {2, S, HID, MID}, {2, S, MID, HID}, {1, S, HID, KV},
    {2, S, HID, KV},  {1, S, HID, QD},  {2, S, QD, HID},
};

// Runs one product through the public call of its kind. weight: the type of B.
static qlora_result seed_run(qlora_ctx* ctx, const seed_product* p, qlora_dtype type,
                             qlora_dtype weight, qlora_dtype out) {
    qlora_tensor t[3]; // A or its gradient, B, C
    const int64_t sizes[3][2] = {{p->m, p->k}, {p->k, p->n}, {p->m, p->n}};
    memset(t, 0, sizeof t);
    qlora_result r = QLORA_OK;
    for (int i = 0; i < 3 && r == QLORA_OK; i++) {
        bool result = i == (p->kind == 0 ? 2 : p->kind == 1 ? 0 : 1);
        r = qlora_tensor_create(ctx,
                                result   ? out
                                : i == 1 ? weight
                                         : type,
                                sizes[i][0], sizes[i][1], &t[i]);
        r = r == QLORA_OK ? qlora_tensor_zero(ctx, &t[i]) : r;
    }
    r = r != QLORA_OK  ? r
        : p->kind == 0 ? qlora_gemm_forward(ctx, &t[0], &t[1], &t[2], 0)
        : p->kind == 1 ? qlora_gemm_backward_a(ctx, &t[2], &t[1], &t[0], 0)
                       : qlora_gemm_backward_b(ctx, &t[0], &t[2], &t[1], 0);
    if (r != QLORA_OK) {
        fprintf(stderr, "%d %d %d %d: %s\n", p->kind, (int)p->m, (int)p->k, (int)p->n,
                qlora_last_error(ctx));
    }
    for (int i = 0; i < 3; i++) {
        r = qlora_tensor_destroy(ctx, &t[i]) == QLORA_OK ? r : QLORA_ERR_STATE;
    }
    return r;
}

// The 4-bit products of every projection, and a batched one for each step of attention.
static qlora_result seed_others(qlora_ctx* ctx, qlora_dtype type) {
    static const int64_t weights[][2] = {{HID, QD}, {QD, HID}, {HID, KV}, {HID, MID}, {MID, HID}};
    static const int64_t heads[3][3] = {{S, DIM, S}, {S, S, DIM}, {DIM, S, S}};
    qlora_result r = QLORA_OK;
    for (int i = 0; i < 5 && r == QLORA_OK; i++) {
        qlora_nf4_desc desc;
        qlora_nf4 w;
        qlora_tensor x, y, other;
        memset(&desc, 0, sizeof desc);
        desc.rows = weights[i][1];
        desc.cols = weights[i][0];
        r = qlora_nf4_create(ctx, &desc, &w);
        r = r == QLORA_OK ? test_tensor(ctx, type, S, desc.cols, NULL, &x) : r;
        r = r == QLORA_OK ? test_tensor(ctx, type, S, desc.rows, NULL, &y) : r;
        r = r == QLORA_OK ? test_tensor(ctx, type, S, desc.rows, NULL, &other) : r;
        r = r == QLORA_OK ? qlora_tensor_zero(ctx, &x) : r;
        r = r == QLORA_OK ? qlora_tensor_zero(ctx, &w.memory) : r;
        for (int fused = 0; fused < 2 && r == QLORA_OK; fused++) {
            uint32_t flags = fused ? 0 : QLORA_PRODUCT_UNFUSED;
            r = qlora_nf4_gemm_forward(ctx, &x, &w, &y, flags);
            r = r == QLORA_OK ? qlora_nf4_gemm_forward2(ctx, &x, &w, &w, &y, &other, flags) : r;
        }
        r = r == QLORA_OK ? qlora_nf4_gemm_backward(ctx, &y, &w, &x, 0) : r;
        r = r == QLORA_OK ? qlora_tensor_destroy(ctx, &x) : r;
        r = r == QLORA_OK ? qlora_tensor_destroy(ctx, &y) : r;
        r = r == QLORA_OK ? qlora_tensor_destroy(ctx, &other) : r;
        r = r == QLORA_OK ? qlora_nf4_destroy(ctx, &w) : r;
    }
    for (int i = 0; i < 3 && r == QLORA_OK; i++) {
        qlora_tensor a, b, c;
        qlora_gemm_desc d;
        memset(&d, 0, sizeof d);
        d.alpha = 1.0f;
        r = qlora_tensor_create_batched(ctx, type, HEADS, heads[i][0], heads[i][1], &a);
        r = r == QLORA_OK
                ? qlora_tensor_create_batched(ctx, type, HEADS, heads[i][1], heads[i][2], &b)
                : r;
        r = r == QLORA_OK
                ? qlora_tensor_create_batched(ctx, type, HEADS, heads[i][0], heads[i][2], &c)
                : r;
        r = r == QLORA_OK ? qlora_tensor_zero(ctx, &a) : r;
        r = r == QLORA_OK ? qlora_tensor_zero(ctx, &b) : r;
        r = r == QLORA_OK ? qlora_gemm(ctx, &d, &a, &b, &c) : r;
        r = r == QLORA_OK ? qlora_tensor_destroy(ctx, &a) : r;
        r = r == QLORA_OK ? qlora_tensor_destroy(ctx, &b) : r;
        r = r == QLORA_OK ? qlora_tensor_destroy(ctx, &c) : r;
    }
    return r;
}

// The operators that those systems warm up: all that a layer runs between its products, and the
// start values of the weights.
enum { X, Y, Z, U, NORM, DNORM, BATCH, TURNED, PLACES, TABLE, FLAG, OPERANDS };

static qlora_result seed_layer(qlora_ctx* ctx, const qlora_tensor* t) {
    qlora_result r = qlora_random_normal(ctx, 1, 2, 0.1f, &t[X]);
    r = r == QLORA_OK ? qlora_rmsnorm_forward(ctx, &t[X], &t[NORM], 1e-5f, &t[Y]) : r;
    r = r == QLORA_OK
            ? qlora_rmsnorm_residual_forward(ctx, &t[X], &t[Y], &t[NORM], 1e-5f, &t[X], &t[Z])
            : r;
    r = r == QLORA_OK
            ? qlora_rmsnorm_backward(ctx, &t[Y], &t[X], &t[NORM], 1e-5f, &t[Z], &t[U], &t[DNORM])
            : r;
    r = r == QLORA_OK ? qlora_rope_forward(ctx, &t[X], HEADS, &t[PLACES], &t[TABLE], NULL, &t[FLAG])
                      : r;
    r = r == QLORA_OK ? qlora_rope_backward(ctx, &t[X], HEADS, &t[PLACES], &t[TABLE], &t[FLAG]) : r;
    r = r == QLORA_OK ? qlora_swiglu_forward(ctx, &t[X], &t[Y], &t[Z]) : r;
    r = r == QLORA_OK ? qlora_swiglu_backward(ctx, &t[Z], &t[X], &t[Y], &t[X], &t[Y], NULL) : r;
    r = r == QLORA_OK ? qlora_silu_forward(ctx, &t[X], &t[Y]) : r;
    r = r == QLORA_OK ? qlora_silu_backward(ctx, &t[X], &t[Y], &t[Z]) : r;
    r = r == QLORA_OK ? qlora_add(ctx, &t[X], &t[Y], &t[Z]) : r;
    r = r == QLORA_OK ? qlora_mul(ctx, &t[X], &t[Y], &t[Z]) : r;
    r = r == QLORA_OK ? qlora_scale(ctx, 0.5f, &t[X], &t[Y]) : r;
    r = r == QLORA_OK ? qlora_heads_split(ctx, &t[X], &t[BATCH]) : r;
    r = r == QLORA_OK ? qlora_transpose(ctx, &t[BATCH], &t[TURNED]) : r;
    r = r == QLORA_OK ? qlora_heads_join(ctx, &t[BATCH], &t[Y]) : r;
    r = r == QLORA_OK ? qlora_scores_mask(ctx, &t[BATCH], 0.25f, true, 0) : r;
    r = r == QLORA_OK ? qlora_softmax_forward(ctx, &t[X], &t[Y]) : r;
    return r == QLORA_OK ? qlora_softmax_backward(ctx, &t[Y], &t[X], &t[Z]) : r;
}

static qlora_result seed_operators(qlora_ctx* ctx, qlora_dtype type) {
    const struct {
        qlora_dtype type;
        int64_t batch;
        int64_t rows;
        int64_t cols;
    } sizes[OPERANDS] = {{type, 1, S, QD},       {type, 1, S, QD},      {type, 1, S, QD},
                         {type, 1, S, QD},       {QLORA_F32, 1, 1, QD}, {QLORA_F32, 1, 1, QD},
                         {type, HEADS, S, DIM},  {type, HEADS, DIM, S}, {QLORA_I32, 1, 1, S},
                         {QLORA_F32, 1, S, DIM}, {QLORA_I32, 1, 1, 1}};
    qlora_tensor t[OPERANDS];
    memset(t, 0, sizeof t);
    qlora_result r = QLORA_OK;
    for (int i = 0; i < OPERANDS && r == QLORA_OK; i++) {
        r = qlora_tensor_create_batched(ctx, sizes[i].type, sizes[i].batch, sizes[i].rows,
                                        sizes[i].cols, &t[i]);
        r = r == QLORA_OK ? qlora_tensor_zero(ctx, &t[i]) : r;
    }
    r = r == QLORA_OK ? seed_layer(ctx, t) : r;
    if (r != QLORA_OK) {
        fprintf(stderr, "operators: %s\n", qlora_last_error(ctx));
    }
    for (int i = 0; i < OPERANDS; i++) {
        r = qlora_tensor_destroy(ctx, &t[i]) == QLORA_OK ? r : QLORA_ERR_STATE;
    }
    return r;
}

// After pre-warm, everything that the public products and operators run has been planned, in every
// precision, and nothing is compiled.
TEST prewarm_covers_the_products(const test_machine* machine) {
    static const qlora_base_format bases[] = {QLORA_BASE_NF4, QLORA_BASE_16BIT, QLORA_BASE_32BIT};
    for (int k = 0; k < 6; k++) {
        qlora_dtype type = k < 3 ? QLORA_F32 : QLORA_BF16;
        qlora_base_format base = bases[k % 3];
        if (type == QLORA_BF16 && !test_has_bf16(machine)) {
            continue;
        }
        qlora_ctx* ctx = test_open(machine, NULL);
        if (!ctx)
            SKIPm(test_open_reason());
        const qlora_prewarm_product mine[] = {
            {QLORA_PREWARM_FORWARD, 5, 6, 7, 0, QLORA_F32, QLORA_F32, QLORA_F32},
            {QLORA_PREWARM_BACKWARD_B, 5, 6, 7, 1, QLORA_F32, QLORA_F32, QLORA_F32}};
        const qlora_prewarm_desc shape = {HID, MID, HEADS, 1, DIM, S, RANK, base, type, mine, 2};
        ASSERT_EQ(QLORA_OK, qlora_prewarm(ctx, &shape));
        for (int math = 0; math < 3; math++) {
            ASSERT_EQ(QLORA_OK, qlora_ctx_set_math(ctx, (qlora_math)math));
            for (size_t i = 0; i < sizeof lora_products / sizeof lora_products[0]; i++) {
                ASSERT_EQ(QLORA_OK, seed_run(ctx, &lora_products[i], type, type, QLORA_F32));
            }
            for (size_t i = 0; i < sizeof base_products / sizeof base_products[0]; i++) {
                const seed_product* p = &base_products[i];
                if (base == QLORA_BASE_NF4) {
                    break;
                }
                ASSERT_EQ(QLORA_OK, seed_run(ctx, p, type, type, QLORA_F32));
                ASSERT_EQ(QLORA_OK, seed_run(ctx, p, type, type, type));
                if (base == QLORA_BASE_16BIT && type == QLORA_F32 && p->kind < 2) {
                    ASSERT_EQ(QLORA_OK, seed_run(ctx, p, QLORA_F32, QLORA_F16, QLORA_F32));
                    ASSERT_EQ(QLORA_OK, seed_run(ctx, p, QLORA_F32, QLORA_BF16, QLORA_F32));
                }
            }
            static const seed_product own[] = {{0, 5, 6, 7}, {2, 5, 6, 7}};
            ASSERT_EQ(QLORA_OK, seed_run(ctx, &own[0], QLORA_F32, QLORA_F32, QLORA_F32));
            ASSERT_EQ(QLORA_OK, seed_run(ctx, &own[1], QLORA_F32, QLORA_F32, QLORA_F32));
            if (base == QLORA_BASE_NF4) {
                ASSERT_EQm(qlora_last_error(ctx), QLORA_OK, seed_others(ctx, type));
            }
            ASSERT_EQ(QLORA_OK, seed_operators(ctx, type));
        }
        qlora_cache_info info;
        ASSERT_EQ(QLORA_OK, qlora_cache_query(ctx, &info));
        ASSERT_EQ_FMT(0, (int)info.cublas_unplanned, "%d");
        ASSERT_EQ(0u, info.jit_after_seal);
        ASSERT(test_close_ctx(machine, ctx));
    }
    PASS();
}

TEST prewarm_lists_are_checked(const test_machine* machine) {
    static const struct {
        qlora_prewarm_product product;
        const char* says;
    } bad[] = {
        {{(qlora_prewarm_kind)3, 1, 1, 1, 0, QLORA_F32, QLORA_F32, QLORA_F32}, "products[0].kind"},
        {{QLORA_PREWARM_FORWARD, 0, 1, 1, 0, QLORA_F32, QLORA_F32, QLORA_F32},
         "products[0].m is 0"},
        {{QLORA_PREWARM_FORWARD, 1, 1, 1, -1, QLORA_F32, QLORA_F32, QLORA_F32},
         "products[0].batch"},
        {{QLORA_PREWARM_FORWARD, 1, 1, 1, 0, QLORA_U8, QLORA_F32, QLORA_F32}, "type u8"},
        {{QLORA_PREWARM_FORWARD, 1, 1, 1, 0, QLORA_F16, QLORA_BF16, QLORA_F32}, "not supported"},
        {{QLORA_PREWARM_FORWARD, 1, 1, 1, 2, QLORA_F32, QLORA_BF16, QLORA_F32}, "batched"},
    };
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    qlora_prewarm_desc shape = {64, 96, 4, 2, 16, 8, 4, QLORA_BASE_NF4, QLORA_F32, NULL, 1};
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_prewarm(ctx, &shape));
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        shape.products = &bad[i].product;
        ASSERT(qlora_prewarm(ctx, &shape) != QLORA_OK);
        ASSERTm(qlora_last_error(ctx), strstr(qlora_last_error(ctx), bad[i].says) != NULL);
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

SUITE(contracts_suite) {
    RUN_ON(TEST_ONE_FAKE, log_one_item_per_compile);
    RUN_ON(TEST_FAKES, load_by_capability);
    RUN_ON(TEST_FAKES, load_is_not_blamed);
    RUN_ON(TEST_ONE_FAKE, operators_neither_wait_nor_allocate);
    RUN_ON(TEST_ONE_FAKE, cublas_is_bound_again);
    RUN_ON(TEST_ONE_FAKE, prewarm_fails_and_goes_on);
    RUN_ON(TEST_ONE_FAKE, failed_kernel_leaves_others);
    RUN_ON(TEST_FAKES, prewarm_covers_the_products);
    RUN_ON(TEST_EVERYWHERE, prewarm_lists_are_checked);
}
