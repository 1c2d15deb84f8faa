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

// One entry per compilation, with the module's name and bytes, and none for a hit. Failures are
// logged as well.
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
    ASSERT(strstr(book.last[QLORA_LOG_ITEM_KERNEL_COMPILE], "clip") != NULL);
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
    static const qlora_prewarm_desc shape = {64, 96, 4, 2, 16, 8, 4, QLORA_BASE_NF4, QLORA_F32};
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

SUITE(contracts_suite) {
    RUN_ON(TEST_ONE_FAKE, log_one_item_per_compile);
    RUN_ON(TEST_FAKES, load_by_capability);
    RUN_ON(TEST_FAKES, load_is_not_blamed);
    RUN_ON(TEST_ONE_FAKE, operators_neither_wait_nor_allocate);
    RUN_ON(TEST_ONE_FAKE, cublas_is_bound_again);
    RUN_ON(TEST_ONE_FAKE, prewarm_fails_and_goes_on);
}
