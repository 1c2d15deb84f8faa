// faults.c - the n-th call fails: driver calls, cuBLAS calls, allocations, kernels. After each
// fault, the result is an error with a message, nothing has leaked, and repeating the work gives
// the same bytes; or the device is lost, every later call reports that, and everything can still
// be destroyed.
#define _POSIX_C_SOURCE 200809L

#include "machines.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

// ---- an allocator that counts and can fail ----------------------------------------------------

typedef struct host_memory {
    int64_t live;
    uint64_t calls;
    uint64_t fail_at; // 0 = never
    uint64_t failed;
} host_memory;

static host_memory host;

static void* host_alloc(size_t bytes, size_t align, void* user) {
    host_memory* h = (host_memory*)user;
    if (++h->calls == h->fail_at) {
        h->failed++;
        return NULL;
    }
    void* p = test_alloc_aligned(bytes, align);
    if (p == NULL) {
        return NULL;
    }
    memset(p, 0xCB, bytes);
    h->live += (int64_t)bytes;
    return p;
}

static void host_free(void* pointer, size_t bytes, void* user) {
    memset(pointer, 0xCB, bytes);
    ((host_memory*)user)->live -= (int64_t)bytes;
    test_free_aligned(pointer);
}

// ---- the work: everything once ----------------------------------------------------------------

enum { MAX_VALUES = 4096 };

typedef struct outcome {
    qlora_result result;
    const char* stage; // the call that failed
    char text[1024];
    float values[MAX_VALUES]; // everything that was read back
    size_t count;
} outcome;

typedef struct world {
    qlora_tensor a, b, c;      // f32: c [6,5] = a [6,8] b [8,5]
    qlora_tensor ha, hb, hc;   // bf16
    qlora_tensor fb;           // f16 [8,5]
    qlora_tensor w;            // f32 [1,5]
    qlora_tensor d;            // f32 [6,5]
    qlora_tensor pa, pc;       // batches of two: [6,8], [6,6]
    qlora_tensor o, lse, seqs; // for attention
    qlora_nf4 nf4;
    qlora_clip* clip;
    qlora_graph* graph;
    qlora_result (*inside)(qlora_ctx* ctx, void* user);
} world;

// In static storage, because a copy that a fault left in the queue must not write to a dead
// stack frame.
static outcome got;
static outcome good;
static world now;

#define STEP(CALL)                                                                                 \
    do {                                                                                           \
        if (o->result == QLORA_OK) {                                                               \
            o->result = (CALL);                                                                    \
            o->stage = #CALL;                                                                      \
            if (o->result != QLORA_OK) {                                                           \
                snprintf(o->text, sizeof o->text, "%s", qlora_last_error(ctx));                    \
            }                                                                                      \
        }                                                                                          \
    } while (0)

static void outcome_begin(outcome* o) {
    memset(o, 0, sizeof *o);
    o->stage = "";
}

static qlora_result keep(qlora_ctx* ctx, outcome* o, const qlora_tensor* t) {
    size_t n = (size_t)(t->rows * t->cols * t->batch);
    size_t bytes = n * qlora_dtype_bytes(t->dtype);
    if (o->count + n > MAX_VALUES) {
        return QLORA_ERR_LIMIT;
    }
    qlora_result r = qlora_tensor_read(ctx, t, &o->values[o->count], bytes);
    o->count += r == QLORA_OK ? n : 0;
    return r;
}

static qlora_result make(qlora_ctx* ctx, qlora_dtype dtype, int64_t rows, int64_t cols, float scale,
                         qlora_tensor* out) {
    float values[64];
    for (int i = 0; i < 64; i++) {
        values[i] = scale * (float)(i * 37 % 23 - 11) / 7.0f;
    }
    return test_tensor(ctx, dtype, rows, cols, values, out);
}

// The captured work: a product, a sum, the clip.
static qlora_result recorded(qlora_ctx* ctx, void* user) {
    world* w = (world*)user;
    qlora_result r = qlora_gemm_forward(ctx, &w->a, &w->b, &w->c, 0);
    r = r == QLORA_OK ? qlora_add(ctx, &w->c, &w->d, &w->c) : r;
    return r == QLORA_OK ? qlora_clip_apply(w->clip) : r;
}

// The small work, with few calls and one module: tensors, a product, the clip, a graph.
static void small_work(qlora_ctx* ctx, world* w, outcome* o) {
    qlora_clip_info info;
    memset(&info, 0, sizeof info);
    STEP(make(ctx, QLORA_F32, 6, 8, 1.0f, &w->a));
    STEP(make(ctx, QLORA_F32, 8, 5, 1.0f, &w->b));
    STEP(qlora_tensor_create(ctx, QLORA_F32, 6, 5, &w->c));
    STEP(make(ctx, QLORA_F32, 6, 5, 0.5f, &w->d));
    const qlora_tensor* list[] = {&w->c, &w->d};
    STEP(qlora_clip_create(ctx, list, NULL, 2, &w->clip));
    STEP(recorded(ctx, w));
    STEP(keep(ctx, o, &w->c));
    STEP(qlora_graph_capture(ctx, 9, recorded, w, &w->graph));
    STEP(qlora_clip_set(w->clip, 0.25f));
    STEP(qlora_graph_replay(w->graph, 9));
    STEP(qlora_clip_query(w->clip, 0, &info));
    STEP(keep(ctx, o, &w->c));
    STEP(keep(ctx, o, &w->d));
    STEP(qlora_tensor_zero(ctx, &w->c));
    STEP(qlora_ctx_sync(ctx));
    if (o->result == QLORA_OK) {
        o->values[o->count++] = info.norm;
        o->values[o->count++] = info.scale;
    }
}

// A quantised weight and attention, after the rest of the large work.
static void model_work(qlora_ctx* ctx, world* w, outcome* o) {
    static const int32_t sequences[] = {0, 2, 6};
    qlora_nf4_desc weight;
    qlora_attention_desc attention;
    memset(&weight, 0, sizeof weight);
    memset(&attention, 0, sizeof attention);
    weight.rows = 8;
    weight.cols = 5;
    attention.heads = 2;
    attention.kv_heads = 2;
    attention.head_dim = 4;
    STEP(qlora_nf4_create(ctx, &weight, &w->nf4));
    STEP(qlora_nf4_quantise(ctx, &w->b, &w->nf4));
    STEP(qlora_nf4_dequantise(ctx, &w->nf4, &w->b, false));
    STEP(keep(ctx, o, &w->b));
    STEP(qlora_nf4_gemm_forward(ctx, &w->c, &w->nf4, &w->a, 0));
    STEP(qlora_tensor_create(ctx, QLORA_F32, 6, 8, &w->o));
    STEP(qlora_tensor_create(ctx, QLORA_F32, 2, 6, &w->lse));
    STEP(qlora_tensor_create(ctx, QLORA_I32, 1, 3, &w->seqs));
    STEP(qlora_tensor_write(ctx, &w->seqs, sequences, sizeof sequences));
    STEP(qlora_attention_forward(ctx, &attention, &w->a, &w->a, &w->a, &w->seqs, &w->o, &w->lse));
    STEP(keep(ctx, o, &w->o));
    STEP(keep(ctx, o, &w->lse));
}

static const qlora_prewarm_desc SHAPE = {32, 48, 4, 2, 8, 4, 2, QLORA_BASE_32BIT,
                                         QLORA_F32, NULL, 0};

// The large work: all types of products, and operators, after a pre-warm.
static void large_work(qlora_ctx* ctx, world* w, outcome* o) {
    STEP(qlora_cache_unseal(ctx));
    STEP(qlora_prewarm(ctx, &SHAPE));
    STEP(qlora_cache_unseal(ctx)); // the work differs from that of the pre-warmed model
    STEP(make(ctx, QLORA_BF16, 6, 8, 1.0f, &w->ha));
    STEP(make(ctx, QLORA_BF16, 8, 5, 1.0f, &w->hb));
    STEP(make(ctx, QLORA_F16, 8, 5, 1.0f, &w->fb));
    STEP(make(ctx, QLORA_F32, 1, 5, 1.0f, &w->w));
    STEP(qlora_tensor_create(ctx, QLORA_BF16, 6, 5, &w->hc));
    STEP(qlora_tensor_create_batched(ctx, QLORA_F32, 2, 6, 8, &w->pa));
    STEP(qlora_tensor_create_batched(ctx, QLORA_F32, 2, 6, 6, &w->pc));
    static float pair_values[2 * 6 * 8];
    for (int i = 0; i < 2 * 6 * 8; i++) {
        pair_values[i] = (float)(i % 13) - 6.0f;
    }
    STEP(qlora_tensor_write(ctx, &w->pa, pair_values, sizeof pair_values));
    small_work(ctx, w, o);
    STEP(qlora_gemm_forward(ctx, &w->a, &w->b, &w->c, QLORA_PRODUCT_PTX));
    STEP(qlora_gemm_backward_b(ctx, &w->a, &w->c, &w->b, QLORA_PRODUCT_ACCUMULATE));
    STEP(qlora_gemm_backward_a(ctx, &w->c, &w->b, &w->a, 0));
    STEP(qlora_gemm_forward(ctx, &w->a, &w->fb, &w->c, 0)); // f16 weights: scaled cast
    STEP(keep(ctx, o, &w->c));
    STEP(qlora_gemm_forward(ctx, &w->a, &w->hb, &w->c, QLORA_PRODUCT_ACCUMULATE));
    STEP(qlora_gemm_forward(ctx, &w->ha, &w->hb, &w->hc, 0));
    STEP(keep(ctx, o, &w->hc));
    qlora_gemm_desc pair;
    memset(&pair, 0, sizeof pair);
    pair.trans_b = true;
    pair.alpha = 0.5f;
    STEP(qlora_gemm(ctx, &pair, &w->pa, &w->pa, &w->pc));
    STEP(keep(ctx, o, &w->pc));
    STEP(qlora_rmsnorm_forward(ctx, &w->c, &w->w, 1e-5f, &w->c));
    STEP(qlora_softmax_forward(ctx, &w->c, &w->c));
    STEP(qlora_swiglu_forward(ctx, &w->c, &w->d, &w->c));
    STEP(keep(ctx, o, &w->c));
    STEP(keep(ctx, o, &w->b));
    model_work(ctx, w, o);
}

// Returns false if something could not be destroyed; the remaining objects can be tried again.
static bool clear(qlora_ctx* ctx, world* w) {
    qlora_tensor* all[] = {&w->a, &w->b, &w->c,  &w->ha, &w->hb, &w->hc,  &w->fb,
                           &w->w, &w->d, &w->pa, &w->pc, &w->o,  &w->lse, &w->seqs};
    bool ok = true;
    if (qlora_graph_destroy(w->graph) == QLORA_OK) {
        w->graph = NULL;
    } else {
        ok = false;
    }
    ok = qlora_nf4_destroy(ctx, &w->nf4) == QLORA_OK && ok;
    if (qlora_clip_destroy(w->clip) == QLORA_OK) {
        w->clip = NULL;
    } else {
        ok = false;
    }
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        ok = qlora_tensor_destroy(ctx, all[i]) == QLORA_OK && ok;
    }
    if (ok) {
        memset(w, 0, sizeof *w);
    }
    return ok;
}

typedef void (*work_fn)(qlora_ctx* ctx, world* w, outcome* o);

// ---- one lifetime of a context, with one fault ------------------------------------------------

static void (*change_desc)(qlora_ctx_desc* desc); // for tests of hooks in the desc

static qlora_result open_ctx(outcome* o, qlora_ctx** ctx) {
    qlora_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.require_backend = QLORA_BACKEND_CUDA;
    desc.scratch_bytes = (size_t)256 << 10;
    desc.workspace_bytes = (size_t)64 << 10;
    desc.allocator.alloc = host_alloc;
    desc.allocator.free = host_free;
    desc.allocator.user = &host;
    desc.error_text = o->text;
    desc.error_text_size = sizeof o->text;
    if (change_desc != NULL) {
        change_desc(&desc);
    }
    o->stage = "qlora_ctx_create";
    *ctx = NULL;
    return qlora_ctx_create(&desc, ctx);
}

// A fresh machine without faults.
static void start(void) {
    test_fake()->reset(NULL);
    memset(&host, 0, sizeof host);
}

static bool say(const char* what, uint64_t n, const char* why) {
    fprintf(stderr, "%s %llu: %s (%s, %s: %s)\n", what, (unsigned long long)n, why, got.stage,
            qlora_result_name(got.result), got.text);
    return false;
}

static bool same_as_good(const outcome* o) {
    return o->result == QLORA_OK && o->count == good.count && o->count > 0 &&
           memcmp(o->values, good.values, o->count * sizeof o->values[0]) == 0;
}

// The results that a kind of fault may have. create: the result of qlora_ctx_create.
typedef struct fault_kind {
    const char* what;
    int code;
    qlora_result results[4]; // besides ERR_CAPTURE while capturing, and ERR_BACKEND at creation
} fault_kind;

static bool allowed(const fault_kind* kind, const outcome* o) {
    bool creating = strcmp(o->stage, "qlora_ctx_create") == 0;
    bool capturing = strncmp(o->stage, "qlora_graph_", 12) == 0;
    for (int i = 0; i < 4; i++) {
        if (kind->results[i] != QLORA_OK && o->result == kind->results[i]) {
            return true;
        }
    }
    return (creating && o->result == QLORA_ERR_BACKEND) ||
           (capturing && o->result == QLORA_ERR_CAPTURE);
}

// cublasCreate failed and the context works without cuBLAS, and reports it: acceptable, but the
// numbers differ.
static bool lacks_cublas(qlora_ctx* ctx) {
    char text[2048];
    qlora_describe(ctx, text, sizeof text);
    return strstr(text, "cublasCreate failed") != NULL;
}

// After a fault: checks the message, the retry and the end. ctx NULL: creation failed.
static bool recover(const char* what, uint64_t n, work_fn work, qlora_ctx* ctx) {
    const fake_api* fake = test_fake();
    if (got.result != QLORA_OK && strlen(got.text) < 20) {
        return say(what, n, "no message");
    }
    fake->fail_clear();
    host.fail_at = 0;
    if (ctx != NULL && lacks_cublas(ctx)) {
        if (got.result != QLORA_OK || qlora_ctx_destroy(ctx) != QLORA_OK) {
            return say(what, n, "it does not work without cuBLAS");
        }
        ctx = NULL;
    } else if (got.result == QLORA_OK && !same_as_good(&got)) {
        return say(what, n, "an ignored fault changed the result");
    }
    if (ctx == NULL) {
        if (fake->done() != NULL || host.live != 0) {
            return say(what, n, fake->done() != NULL ? fake->done() : "host memory leaked");
        }
        outcome_begin(&got);
        got.result = open_ctx(&got, &ctx);
    }
    outcome_begin(&got);
    if (ctx != NULL) {
        work(ctx, &now, &got);
    }
    if (!same_as_good(&got)) {
        return say(what, n, "the retry and an undisturbed run give different results");
    }
    if (!clear(ctx, &now) || qlora_ctx_destroy(ctx) != QLORA_OK) {
        return say(what, n, "something cannot be destroyed");
    }
    if (fake->done() != NULL || host.live != 0) {
        return say(what, n, fake->done() != NULL ? fake->done() : "host memory leaked");
    }
    return true;
}

typedef enum verdict { NEVER_FIRED, SURVIVED, BROKEN } verdict;

static uint64_t fired(void) {
    return test_fake()->stats().faults + host.failed;
}

// One lifetime with the fault that has already been armed.
static verdict live(const fault_kind* kind, uint64_t n, work_fn work) {
    qlora_ctx* ctx = NULL;
    outcome_begin(&got);
    got.result = open_ctx(&got, &ctx);
    if (ctx != NULL) {
        work(ctx, &now, &got);
    }
    bool in_work = fired() > 0;
    if (got.result != QLORA_OK && (!in_work || !allowed(kind, &got))) {
        say(kind->what, n, in_work ? "the wrong result" : "failed without a fault");
        return BROKEN;
    }
    // A fault in a release is ignored, or nothing is destroyed and a second attempt succeeds.
    bool cleared = ctx == NULL || clear(ctx, &now) || (fired() > 0 && clear(ctx, &now));
    if (!cleared) {
        say(kind->what, n, "something cannot be destroyed");
        return BROKEN;
    }
    if (in_work) {
        return recover(kind->what, n, work, ctx) ? SURVIVED : BROKEN;
    }
    bool same = same_as_good(&got);
    uint64_t before = fired();
    if (qlora_ctx_destroy(ctx) != QLORA_OK &&
        (fired() == before || qlora_ctx_destroy(ctx) != QLORA_OK)) {
        say(kind->what, n, "the context cannot be destroyed");
        return BROKEN;
    }
    if (!same || host.live != 0 || test_fake()->done() != NULL) {
        say(kind->what, n, !same ? "a different result without a fault" : "not cleanly destroyed");
        return BROKEN;
    }
    return fired() > 0 ? SURVIVED : NEVER_FIRED;
}

// An undisturbed run; all other results are compared with its results.
static bool undisturbed(work_fn work) {
    qlora_ctx* ctx = NULL;
    start();
    outcome_begin(&got);
    got.result = open_ctx(&got, &ctx);
    if (ctx != NULL) {
        work(ctx, &now, &got);
    }
    good = got;
    if (ctx == NULL || !same_as_good(&got)) {
        return say("undisturbed", 0, "fails");
    }
    bool ok = clear(ctx, &now) && qlora_ctx_destroy(ctx) == QLORA_OK && host.live == 0 &&
              test_fake()->done() == NULL;
    return ok ? true : say("undisturbed", 0, "the run is not clean");
}

// n = 1, 2, 3, ... until the fault no longer occurs; beyond `dense`, every `stride`-th.
static bool every_nth(const fault_kind* kind, work_fn work, uint64_t dense, uint64_t stride,
                      uint64_t* survived) {
    for (uint64_t n = 1;; n += n < dense ? 1 : stride) {
        start();
        test_fake()->fail_at(kind->what, n, kind->code, false);
        verdict v = live(kind, n, work);
        if (v != SURVIVED) {
            return v == NEVER_FIRED;
        }
        ++*survived;
    }
}

// ---- tests ------------------------------------------------------------------------------------

TEST faults_every_driver_call(const test_machine* machine) {
    (void)machine;
    static const fault_kind kinds[] = {
        {"ANY", 2, {QLORA_ERR_DEVICE_MEMORY, QLORA_ERR_CUBLAS, QLORA_OK, QLORA_OK}},
        {"ANY", 1, {QLORA_ERR_CUDA, QLORA_ERR_CUBLAS, QLORA_ERR_KERNEL, QLORA_ERR_DEVICE_MEMORY}},
    };
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        uint64_t survived = 0;
        ASSERT(undisturbed(small_work));
        uint64_t calls = test_fake()->calls("ANY");
        ASSERT(every_nth(&kinds[i], small_work, 1000, 1, &survived));
        ASSERT(survived >= calls); // every single call of a lifetime has failed once
    }
    PASS();
}

TEST faults_every_class(const test_machine* machine) {
    (void)machine;
    static const struct {
        fault_kind kind;
        uint64_t dense;
        uint64_t stride;
        uint64_t least; // the minimum number that must have fired
    } rows[] = {
        {{"ALLOC", 2, {QLORA_ERR_DEVICE_MEMORY}}, 100, 3, 15},
        {{"LOAD", 218, {QLORA_ERR_KERNEL, QLORA_ERR_CUDA}}, 12, 17, 15},
        {{"LAUNCH", 701, {QLORA_ERR_CUDA}}, 100, 3, 15},
        {{"COPY", 1, {QLORA_ERR_CUDA}}, 100, 3, 15},
        {{"SYNC", 1, {QLORA_ERR_CUDA}}, 12, 5, 10},
        {{"STREAM", 1, {QLORA_ERR_CUDA}}, 100, 1, 2},
        {{"GRAPH", 1, {QLORA_ERR_CUDA}}, 100, 1, 4},
        {{"CAPTURE", 901, {QLORA_ERR_CAPTURE}}, 100, 1, 2},
        {{"CAPTURE", 900, {QLORA_ERR_CAPTURE}}, 100, 1, 2},
        {{"CUBLAS", 13, {QLORA_ERR_CUBLAS}}, 20, 7, 15},
        {{"CUBLAS", 14, {QLORA_ERR_CUBLAS}}, 20, 11, 15},
        {{"cublasSetPointerMode_v2", 13, {QLORA_ERR_CUBLAS}}, 100, 1, 3},
        {{"cuCtxPushCurrent_v2", 1, {QLORA_ERR_CUDA}}, 4, 13, 5},
    };
    ASSERT(undisturbed(large_work));
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        uint64_t survived = 0;
        ASSERT(every_nth(&rows[i].kind, large_work, rows[i].dense, rows[i].stride, &survived));
        if (survived < rows[i].least) {
            fprintf(stderr, "%s %d: %d faults\n", rows[i].kind.what, rows[i].kind.code,
                    (int)survived);
            FAILm("fewer faults than calls of that class");
        }
    }
    PASS();
}

TEST faults_every_host_allocation(const test_machine* machine) {
    (void)machine;
    static const fault_kind kind = {"host allocation", 0, {QLORA_ERR_MEMORY}};
    ASSERT(undisturbed(large_work));
    uint64_t calls = host.calls;
    for (uint64_t n = 1; n <= calls; n += n < 40 ? 1 : 3) {
        start();
        host.fail_at = n;
        ASSERT_EQ(SURVIVED, live(&kind, n, large_work));
    }
    PASS();
}

// The message names the module, the driver's error and, if there is one, contains the JIT log.
TEST faults_load_says_which_module(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    ASSERT(ctx != NULL);
    const qlora_kernel* kernel = NULL;
    test_fake()->fail_at("cuModuleLoadDataEx", 1, 218, false);
    ASSERT_EQ(QLORA_ERR_KERNEL, qlora_cache_compile(ctx, "clip_squares", &kernel));
    ASSERT(strstr(qlora_last_error(ctx), "clip") != NULL);
    ASSERT(strstr(qlora_last_error(ctx), "CUDA_ERROR_INVALID_PTX (218)") != NULL);
    test_fake()->fail_at("cuModuleGetFunction", 1, 500, false);
    ASSERT_EQ(QLORA_ERR_KERNEL, qlora_cache_compile(ctx, "clip_squares", &kernel));
    ASSERT(strstr(qlora_last_error(ctx), "qlora_clip_") != NULL);
    ASSERT_EQ(NULL, kernel);
    qlora_cache_info info;
    ASSERT_EQ(QLORA_OK, qlora_cache_query(ctx, &info));
    ASSERT_EQ(0u, info.modules);
    ASSERT_EQ(0u, info.kernels);
    ASSERT_EQ(QLORA_OK, qlora_cache_compile(ctx, "clip_squares", &kernel));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// ---- the device is lost -----------------------------------------------------------------------

// Every call returns DEVICE_LOST with the reason; everything can be destroyed.
static bool lost_for_good(qlora_ctx* ctx) {
    float x[30];
    qlora_tensor t;
    qlora_clip_info info;
    memset(&t, 0, sizeof t);
    const qlora_result results[] = {
        qlora_ctx_sync(ctx),
        qlora_tensor_create(ctx, QLORA_F32, 1, 1, &t),
        qlora_prewarm(ctx, &SHAPE),
        now.c.data != NULL ? qlora_tensor_read(ctx, &now.c, x, sizeof x) : QLORA_ERR_DEVICE_LOST,
        now.clip != NULL ? qlora_clip_query(now.clip, 0, &info) : QLORA_ERR_DEVICE_LOST,
        now.graph != NULL ? qlora_graph_replay(now.graph, 9) : QLORA_ERR_DEVICE_LOST,
    };
    for (size_t i = 0; i < sizeof results / sizeof results[0]; i++) {
        if (results[i] != QLORA_ERR_DEVICE_LOST) {
            fprintf(stderr, "call %d gives %s\n", (int)i, qlora_result_name(results[i]));
            return false;
        }
    }
    return qlora_ctx_sync(ctx) == QLORA_ERR_DEVICE_LOST &&
           strstr(qlora_last_error(ctx), "lost in an earlier call") != NULL;
}

static bool dies_honestly(const char* what, uint64_t n, int code, work_fn work, bool* died) {
    const fake_api* fake = test_fake();
    qlora_ctx* ctx = NULL;
    start();
    fake->fail_at(what, n, code, true);
    outcome_begin(&got);
    got.result = open_ctx(&got, &ctx);
    if (ctx != NULL) {
        work(ctx, &now, &got);
    }
    *died = fired() > 0;
    if (ctx != NULL && *died && got.result == QLORA_OK) { // at the very end, after the last result
        got.result = qlora_ctx_sync(ctx);
        snprintf(got.text, sizeof got.text, "%s", qlora_last_error(ctx));
    }
    if (ctx != NULL && *died) {
        char number[16];
        snprintf(number, sizeof number, "(%d)", code);
        if (got.result != QLORA_ERR_DEVICE_LOST || strstr(got.text, number) == NULL ||
            strstr(got.text, "launched earlier") == NULL) {
            return say(what, n, "a lost device is not reported as an earlier kernel's fault");
        }
        if (!lost_for_good(ctx)) {
            return say(what, n, "a lost device does not stay lost");
        }
    }
    if (ctx == NULL && strlen(got.text) < 20) {
        return say(what, n, "no message");
    }
    if (ctx != NULL && (!clear(ctx, &now) || qlora_ctx_destroy(ctx) != QLORA_OK)) {
        return say(what, n, "something cannot be destroyed");
    }
    if (host.live != 0 || fake->done() != NULL) {
        return say(what, n, fake->done() != NULL ? fake->done() : "host memory leaked");
    }
    if (!*died) {
        return true;
    }
    start(); // like a new process, which has a new CUDA context
    outcome_begin(&got);
    got.result = open_ctx(&got, &ctx);
    if (ctx != NULL) {
        work(ctx, &now, &got);
    }
    bool ok = same_as_good(&got);
    return (clear(ctx, &now) && qlora_ctx_destroy(ctx) == QLORA_OK && ok)
               ? true
               : say(what, n, "a new context does not work");
}

TEST faults_lost_device(const test_machine* machine) {
    (void)machine;
    static const int codes[] = {700, 716, 719};
    for (int i = 0; i < 3; i++) {
        // In a kernel: the error surfaces at some later call.
        ASSERT(undisturbed(large_work));
        uint64_t deaths = 0;
        bool died = true;
        for (uint64_t n = 1; died; n += i == 0 ? 3 : 9) {
            ASSERT(dies_honestly("RUN", n, codes[i], large_work, &died));
            deaths += died;
        }
        ASSERT(deaths >= 4);
        // At any call of the driver.
        ASSERT(undisturbed(small_work));
        deaths = 0;
        died = true;
        for (uint64_t n = 1 + (uint64_t)i; died; n += 3) {
            ASSERT(dies_honestly("ANY", n, codes[i], small_work, &died));
            deaths += died;
        }
        ASSERT(deaths >= 20);
    }
    PASS();
}

// If only cuBLAS calls follow the fault, cuBLAS reports "execution failed" and the library must
// give the cause.
TEST faults_lost_device_seen_by_cublas(const test_machine* machine) {
    (void)machine;
    qlora_ctx* ctx = NULL;
    start();
    outcome* o = &got;
    outcome_begin(o);
    o->result = open_ctx(o, &ctx);
    STEP(make(ctx, QLORA_F32, 6, 8, 1.0f, &now.a));
    STEP(make(ctx, QLORA_F32, 8, 5, 1.0f, &now.b));
    STEP(qlora_tensor_create(ctx, QLORA_F32, 6, 5, &now.c));
    ASSERT_EQ(QLORA_OK, o->result);
    test_fake()->fail_at("cublasGemmEx", 2, 13, true);
    ASSERT_EQ(QLORA_OK, qlora_gemm_forward(ctx, &now.a, &now.b, &now.c, 0));
    ASSERT_EQ(QLORA_ERR_DEVICE_LOST, qlora_gemm_forward(ctx, &now.a, &now.b, &now.c, 0));
    ASSERT(strstr(qlora_last_error(ctx), "(719)") != NULL);
    ASSERT(clear(ctx, &now));
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
    ASSERT_EQ(NULL, test_fake()->done());
    PASS();
}

// Destroying must not change the context that the caller has made current, even if the library's
// own can no longer be made current.
TEST faults_destroy_leaves_current_context_alone(const test_machine* machine) {
    (void)machine;
    const fake_cu* cu = &test_fake()->cu;
    qlora_ctx* ctx = NULL;
    void* mine = NULL;
    void* current = NULL;
    start();
    outcome_begin(&got);
    ASSERT_EQ(QLORA_OK, open_ctx(&got, &ctx));
    ASSERT_EQ(QLORA_OK, make(ctx, QLORA_F32, 6, 8, 1.0f, &now.a));
    ASSERT_EQ(0, cu->cuCtxCreate_v2(&mine, 0, 0));
    test_fake()->fail_at("cuCtxPushCurrent_v2", 1, 1, false);
    qlora_tensor_destroy(ctx, &now.a);
    ASSERT_EQ(0, cu->cuCtxGetCurrent(&current));
    ASSERT_EQ(mine, current);
    ASSERT(clear(ctx, &now));
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
    ASSERT_EQ(0, cu->cuCtxGetCurrent(&current));
    ASSERT_EQ(mine, current);
    ASSERT_EQ(0, cu->cuCtxDestroy_v2(mine));
    ASSERT_EQ(NULL, test_fake()->done());
    PASS();
}

// ---- libraries and hooks ----------------------------------------------------------------------

// A library that the Makefile built next to the tests.
static const char* built(const char* name) {
    static char path[512];
    const char* folder = getenv("B");
    char here[256];
    folder = folder != NULL ? folder : "build";
    if (getcwd(here, sizeof here) == NULL || folder[0] == '/') {
        here[0] = '\0';
    }
    snprintf(path, sizeof path, "%s%s%s/%s", here, here[0] != '\0' ? "/" : "", folder, name);
    return path;
}

static char library[512];
static void with_cuda(qlora_ctx_desc* desc) {
    desc->cuda_library = library;
}
static void with_cublas(qlora_ctx_desc* desc) {
    desc->cublas_library = library;
}
static void without_cublas(qlora_ctx_desc* desc) {
    desc->cublas_library = "none";
}

TEST faults_other_libraries(const test_machine* machine) {
    (void)machine;
    static const struct {
        const char* name;
        const char* needles[2];
    } rows[] = {
        {"fake-stub/libcuda.so.1", {"stub", "desc.cuda_library"}},
        {"fake-omit/libcuda.so.1", {"cuGraphInstantiateWithFlags", "cuStreamBeginCapture_v2"}},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        snprintf(library, sizeof library, "%s", built(rows[i].name));
        qlora_ctx* ctx = NULL;
        start();
        outcome_begin(&got);
        change_desc = with_cuda;
        got.result = open_ctx(&got, &ctx);
        change_desc = NULL;
        ASSERT_EQ_FMT((int)QLORA_ERR_BACKEND, (int)got.result, "%d");
        for (int j = 0; j < 2; j++) {
            if (strstr(got.text, rows[i].needles[j]) == NULL) {
                fprintf(stderr, "%s\n", got.text);
                FAILm(rows[i].needles[j]);
            }
        }
        ASSERT_EQ(NULL, ctx);
        ASSERT_EQ(0, host.live);
    }
    PASS();
}

// cuBLAS missing, incomplete, or failing to start: the built-in kernels give the same numbers, with
// a note.
TEST faults_without_cublas(const test_machine* machine) {
    (void)machine;
    static const char* const notes[] = {"cublas_library \"none\"", "cublasGemmStridedBatchedEx",
                                        "CUBLAS_STATUS_ALLOC_FAILED"};
    for (int i = 0; i < 3; i++) {
        fake_config config = test_fake()->defaults();
        config.cublas_create = i == 2 ? 3 : 0;
        start();
        test_fake()->reset(&config);
        snprintf(library, sizeof library, "%s", built("fake-omit/libcublas.so.13"));
        change_desc = i == 0 ? without_cublas : i == 1 ? with_cublas : NULL;
        qlora_ctx* ctx = NULL;
        outcome_begin(&got);
        got.result = open_ctx(&got, &ctx);
        change_desc = NULL;
        ASSERT(ctx != NULL);
        char text[2048];
        qlora_describe(ctx, text, sizeof text);
        if (strstr(text, notes[i]) == NULL) {
            fprintf(stderr, "%s\n", text);
            FAILm(notes[i]);
        }
        qlora_native native;
        ASSERT_EQ(QLORA_OK, qlora_ctx_native(ctx, &native));
        ASSERT_EQ(NULL, native.cublas);
        large_work(ctx, &now, &got);
        ASSERT_EQ_FMT((int)QLORA_OK, (int)got.result, "%d");
        ASSERT_EQ(QLORA_PATH_PTX, test_last_path(ctx));
        if (i == 0) {
            good = got; // the built-in kernels give the same bytes, whatever the reason
        }
        ASSERT(same_as_good(&got));
        ASSERT_EQ(0u, (unsigned)test_fake()->stats().gemms);
        ASSERT(clear(ctx, &now));
        ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
        ASSERT_EQ(0, host.live);
        ASSERT_EQ(NULL, test_fake()->done());
    }
    PASS();
}

typedef struct device_memory {
    uint64_t calls;
    uint64_t fail_at;
    int64_t live;
} device_memory;

static device_memory device;

static void* device_alloc(size_t bytes, void* user) {
    device_memory* d = (device_memory*)user;
    uint64_t address = 0;
    if (++d->calls == d->fail_at || test_fake()->cu.cuMemAlloc_v2(&address, bytes) != 0) {
        return NULL;
    }
    d->live += (int64_t)bytes;
    return (void*)(uintptr_t)address;
}

static void device_free(void* pointer, size_t bytes, void* user) {
    ((device_memory*)user)->live -= (int64_t)bytes;
    test_fake()->cu.cuMemFree_v2((uint64_t)(uintptr_t)pointer);
}

static void with_device_allocator(qlora_ctx_desc* desc) {
    desc->device_allocator.alloc = device_alloc;
    desc->device_allocator.free = device_free;
    desc->device_allocator.user = &device;
}

TEST faults_device_allocator(const test_machine* machine) {
    (void)machine;
    static const fault_kind kind = {"device_allocator", 0, {QLORA_ERR_DEVICE_MEMORY}};
    ASSERT(undisturbed(large_work));
    change_desc = with_device_allocator;
    bool more = true;
    uint64_t n = 0;
    while (more) {
        start();
        memset(&device, 0, sizeof device);
        device.fail_at = ++n;
        qlora_ctx* ctx = NULL;
        outcome_begin(&got);
        got.result = open_ctx(&got, &ctx);
        if (ctx != NULL) {
            large_work(ctx, &now, &got);
        }
        more = device.calls >= n;
        ASSERT_EQ(more, got.result != QLORA_OK);
        if (more) {
            ASSERT(allowed(&kind, &got));
            ASSERT(strstr(got.text, "device_allocator") != NULL);
        }
        ASSERT(ctx == NULL || clear(ctx, &now));
        device.fail_at = 0;
        if (ctx != NULL) { // again, with memory
            outcome_begin(&got);
            large_work(ctx, &now, &got);
            ASSERT(same_as_good(&got) || say("device_allocator", n, "the retry differs"));
            ASSERT(clear(ctx, &now));
            ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
        }
        ASSERT_EQ(0, device.live);
        ASSERT_EQ(0, host.live);
        ASSERT_EQ(NULL, test_fake()->done());
    }
    change_desc = NULL;
    ASSERT(n > 10);
    PASS();
}

// A graph that clips depends on the gradients, even though only the clip refers to them.
static qlora_result only_clip(qlora_ctx* ctx, void* user) {
    (void)ctx;
    return qlora_clip_apply(((world*)user)->clip);
}

TEST faults_graph_with_freed_gradient(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    ASSERT(ctx != NULL);
    ASSERT_EQ(QLORA_OK, make(ctx, QLORA_F32, 6, 8, 1.0f, &now.a));
    ASSERT_EQ(QLORA_OK, make(ctx, QLORA_F32, 8, 5, 1.0f, &now.b));
    const qlora_tensor* list[] = {&now.a, &now.b};
    ASSERT_EQ(QLORA_OK, qlora_clip_create(ctx, list, NULL, 2, &now.clip));
    ASSERT_EQ(QLORA_OK, only_clip(ctx, &now)); // compiles
    ASSERT_EQ(QLORA_OK, qlora_graph_capture(ctx, 1, only_clip, &now, &now.graph));
    ASSERT_EQ(QLORA_OK, qlora_graph_replay(now.graph, 1));
    ASSERT_EQ(QLORA_OK, qlora_ctx_sync(ctx));
    ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &now.b));
    ASSERT_EQ(QLORA_ERR_STATE, qlora_graph_replay(now.graph, 1));
    ASSERT(strstr(qlora_last_error(ctx), "freed") != NULL);
    ASSERT(clear(ctx, &now));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

SUITE(faults_suite) {
    RUN_ON(TEST_ONE_FAKE, faults_every_driver_call);
    RUN_ON(TEST_ONE_FAKE, faults_every_class);
    RUN_ON(TEST_ONE_FAKE, faults_every_host_allocation);
    RUN_ON(TEST_ONE_FAKE, faults_load_says_which_module);
    RUN_ON(TEST_ONE_FAKE, faults_lost_device);
    RUN_ON(TEST_ONE_FAKE, faults_lost_device_seen_by_cublas);
    RUN_ON(TEST_ONE_FAKE, faults_destroy_leaves_current_context_alone);
    RUN_ON(TEST_ONE_FAKE, faults_other_libraries);
    RUN_ON(TEST_ONE_FAKE, faults_without_cublas);
    RUN_ON(TEST_ONE_FAKE, faults_device_allocator);
    RUN_ON(TEST_ONE_FAKE, faults_graph_with_freed_gradient);
}
