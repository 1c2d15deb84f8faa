// bench.c - measures the kernels on the current GPU and compares them with the project's targets.
//
//     build/bench [ops|long|gemm|products|clip|graph|prewarm|all] [--json] [--quick] [--dry]
//     build/bench step ...    bench_step.h
//     build/bench cpu ...     bench_cpu.h
//     build/bench data ...    bench_data.h
//     build/bench generate ...  bench_generate.h
//     build/bench slices ...  bench_slices.h
//
// Every row of ROWS is one measurement: tensors, a step, the amount of data or work of the step,
// and the target (bar). A step runs as nodes of a captured graph over sets of random data that
// together exceed twice the L2 cache; the time is the median over replays, measured by events on
// the stream. Rates are compared with ceilings measured in the same run: a device copy, and cuBLAS
// on a large product.
#define _POSIX_C_SOURCE 200809L

#include "qlora.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bench_step.h"
#include "bench_generate.h"

#include "bench_cpu.h"
#include "bench_slices.h"
#include "bench_data.h"

enum { MAX_TENSORS = 8, MAX_SETS = 64, MAX_REPLAYS = 25, CLIP_BUFFERS = 448 };
static const double TOUCHED = 256e6; // minimum bytes that the sets of a row cover together
static const size_t HOST_BLOCK = (size_t)32 << 20;

// ---- the clock: events of the driver ----------------------------------------------------------

typedef struct events {
    int (*push)(void* context);
    int (*pop)(void** context);
    int (*create)(void** event, unsigned flags);
    int (*record)(void* event, void* stream);
    int (*wait)(void* event);
    int (*elapsed)(float* ms, void* from, void* to);
    void* from;
    void* to;
    qlora_native native;
} events;

typedef struct bench {
    qlora_ctx* ctx;
    events clock;
    uint16_t* host_bf16; // random blocks that tensors are filled from
    float* host_f32;
    uint64_t random;
    double copy_rate; // bytes per second; 0 until measured
    double bf16_rate; // FLOP/s
    double f32_rate;
    double first_rate; // of the latest row that is only reported
    bool json;
    bool quick;
    bool dry;
    int printed;
    int failed;
    int below;
} bench;

static bool symbol(void* library, const char* name, void* out) {
    void* address = library != NULL ? dlsym(library, name) : NULL;
    memcpy(out, &address, sizeof address);
    return address != NULL;
}

static bool events_open(bench* b) {
    events* e = &b->clock;
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    bool ok = symbol(library, "cuCtxPushCurrent_v2", &e->push) &&
              symbol(library, "cuCtxPopCurrent_v2", &e->pop) &&
              symbol(library, "cuEventCreate", &e->create) &&
              symbol(library, "cuEventRecord", &e->record) &&
              symbol(library, "cuEventSynchronize", &e->wait) &&
              symbol(library, "cuEventElapsedTime", &e->elapsed);
    void* ignored = NULL;
    ok = ok && qlora_ctx_native(b->ctx, &e->native) == QLORA_OK &&
         e->push(e->native.cu_context) == 0;
    ok = ok && e->create(&e->from, 0) == 0 && e->create(&e->to, 0) == 0;
    return ok && e->pop(&ignored) == 0;
}

static void event_record(bench* b, void* event) {
    void* ignored = NULL;
    b->clock.push(b->clock.native.cu_context);
    b->clock.record(event, b->clock.native.cu_stream);
    b->clock.pop(&ignored);
}

// Microseconds between the two events; waits for the second. Negative if the driver fails.
static double events_us(bench* b) {
    float ms = -1.0f;
    void* ignored = NULL;
    b->clock.push(b->clock.native.cu_context);
    if (b->clock.wait(b->clock.to) != 0 || b->clock.elapsed(&ms, b->clock.from, b->clock.to) != 0) {
        ms = -1.0f;
    }
    b->clock.pop(&ignored);
    return (double)ms * 1e3;
}

static double wall_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static int compare_double(const void* a, const void* b) {
    double x = *(const double*)a;
    double y = *(const double*)b;
    return x < y ? -1 : x > y;
}

static double median(double* values, int n) {
    qsort(values, (size_t)n, sizeof *values, compare_double);
    return n % 2 == 1 ? values[n / 2] : 0.5 * (values[n / 2 - 1] + values[n / 2]);
}

// ---- rows -------------------------------------------------------------------------------------

typedef enum fill { FILL_RANDOM, FILL_ZERO, FILL_COUNT, FILL_LABELS, FILL_SEQUENCES } fill;

typedef struct plan { // one tensor of a set
    qlora_dtype dtype;
    int64_t rows;
    int64_t cols;
    fill fill;
} plan;

typedef enum against {
    AGAINST_NOTHING, // reported only
    AGAINST_COPY,    // bar: fraction of the copy bandwidth
    AGAINST_BF16,    // bar: fraction of the rate of the large bf16 product
    AGAINST_F32,
    AGAINST_REFERENCE, // bar: reference time / own time
    AGAINST_TFLOPS,    // bar: TFLOP/s
    AGAINST_FIRST      // bar: fraction of the rate of the latest row that is only reported
} against;

typedef struct row row;
typedef struct set {
    qlora_tensor t[MAX_TENSORS];
    qlora_tensor ranges;
    qlora_tensor state;
    qlora_clip* clip;
    qlora_nf4 nf4;
} set;
typedef qlora_result (*step_fn)(qlora_ctx* ctx, const row* r, set* s);

struct row {
    const char* group;
    const char* name;
    int64_t m;
    int64_t n;
    int64_t k; // 0 if there are only two sizes
    qlora_dtype dtype;
    int (*plan)(const row* r, plan* out);                        // number of tensors
    qlora_result (*setup)(qlora_ctx* ctx, const row* r, set* s); // may be NULL
    step_fn step;
    step_fn reference; // cuBLAS or similar, or NULL
    double per;        // FLOPs or bytes, times m n k
    against against;
    double bar;           // 0 = none
    uint32_t option;      // argument of the row's own step
    bool minus_reference; // the reference is a preparation whose time is subtracted
    int sets;             // minimum number, for when the plan does not show what is accessed
};

// The amount of data or work of a row.
static double row_work(const row* r) {
    return r->per * (double)r->m * (double)r->n * (double)(r->k > 0 ? r->k : 1);
}

static bool row_counts_flops(const row* r) {
    return r->k > 0;
}

// ---- element-wise, norm, rope, cross-entropy --------------------------------------------------

static int plan_same(const row* r, plan* out) { // option: number of tensors of m x n
    for (uint32_t i = 0; i < r->option; i++) {
        const plan p = {r->dtype, r->m, r->n, FILL_RANDOM};
        out[i] = p;
    }
    return (int)r->option;
}

static qlora_result step_copy(qlora_ctx* ctx, const row* r, set* s) {
    (void)r;
    return qlora_scale(ctx, 1.0f, &s->t[0], &s->t[1]);
}

static qlora_result step_swiglu_forward(qlora_ctx* ctx, const row* r, set* s) {
    (void)r;
    return qlora_swiglu_forward(ctx, &s->t[0], &s->t[1], &s->t[2]);
}

static qlora_result step_swiglu_backward(qlora_ctx* ctx, const row* r, set* s) {
    (void)r;
    return qlora_swiglu_backward(ctx, &s->t[0], &s->t[1], &s->t[2], &s->t[3], &s->t[4], &s->t[5]);
}

static int plan_norm(const row* r, plan* out) {
    int n = plan_same(r, out);
    const plan weight = {r->dtype, 1, r->n, FILL_RANDOM};
    out[n] = weight;
    return n + 1;
}

static qlora_result step_norm_forward(qlora_ctx* ctx, const row* r, set* s) {
    (void)r;
    return qlora_rmsnorm_residual_forward(ctx, &s->t[0], &s->t[1], &s->t[4], 1e-6f, &s->t[2],
                                          &s->t[3]);
}

static qlora_result step_norm_backward(qlora_ctx* ctx, const row* r, set* s) {
    (void)r;
    return qlora_rmsnorm_backward(ctx, &s->t[0], &s->t[1], &s->t[4], 1e-6f, &s->t[2], &s->t[3],
                                  NULL);
}

static int plan_rope(const row* r, plan* out) { // option: head_dim
    const plan plans[] = {{r->dtype, r->m, r->n, FILL_RANDOM},
                          {QLORA_I32, 1, r->m, FILL_COUNT},
                          {QLORA_F32, r->m, (int64_t)r->option, FILL_RANDOM}};
    memcpy(out, plans, sizeof plans);
    return 3;
}

static qlora_result step_rope(qlora_ctx* ctx, const row* r, set* s) {
    return qlora_rope_forward(ctx, &s->t[0], r->n / (int64_t)r->option, &s->t[1], &s->t[2], NULL,
                              NULL);
}

static int plan_cross_entropy(const row* r, plan* out) {
    const plan plans[] = {{r->dtype, r->m, r->n, FILL_RANDOM},
                          {QLORA_I32, 1, r->m, FILL_LABELS},
                          {QLORA_F32, 1, r->m, FILL_ZERO}};
    memcpy(out, plans, sizeof plans);
    return 3;
}

static qlora_result step_cross_entropy(qlora_ctx* ctx, const row* r, set* s) {
    (void)r;
    qlora_cross_entropy_desc args;
    memset(&args, 0, sizeof args);
    args.logits = &s->t[0];
    args.labels = &s->t[1];
    args.losses = &s->t[2];
    return qlora_cross_entropy(ctx, &args);
}

// ---- clip and AdamW ---------------------------------------------------------------------------

// Each row of the arena is a separate gradient.
static qlora_result setup_clip(qlora_ctx* ctx, const row* r, set* s) {
    qlora_tensor views[CLIP_BUFFERS];
    const qlora_tensor* list[CLIP_BUFFERS];
    for (int i = 0; i < (int)r->m; i++) {
        qlora_result result = qlora_tensor_view(ctx, &s->t[0], i, 1, 0, r->n, &views[i]);
        if (result != QLORA_OK) {
            return result;
        }
        list[i] = &views[i];
    }
    qlora_result result = qlora_clip_create(ctx, list, NULL, (size_t)r->m, &s->clip);
    // scale = 1e-6 / (norm + 1e-6) stays below 1 however often it is applied, so clipping is
    // always active.
    return result == QLORA_OK ? qlora_clip_set(s->clip, 1e-6f) : result;
}

static qlora_result step_clip(qlora_ctx* ctx, const row* r, set* s) {
    (void)ctx;
    (void)r;
    return qlora_clip_apply(s->clip);
}

static int plan_adamw(const row* r,
                      plan* out) { // gradient, source of gradients, param, m, v, shadow
    const plan plans[] = {
        {QLORA_F32, r->m, r->n, FILL_RANDOM},     {QLORA_F32, r->m, r->n, FILL_RANDOM},
        {QLORA_F32, 1, r->m * r->n, FILL_RANDOM}, {QLORA_F32, 1, r->m * r->n, FILL_ZERO},
        {QLORA_F32, 1, r->m * r->n, FILL_ZERO},   {QLORA_BF16, 1, r->m * r->n, FILL_ZERO}};
    memcpy(out, plans, sizeof plans);
    return 6;
}

static qlora_result setup_adamw(qlora_ctx* ctx, const row* r, set* s) {
    qlora_adamw_range range = {0, r->m * r->n, 1.0f, 1.0f, NULL, 0, 0, 0.0};
    qlora_adamw_state state;
    memset(&state, 0, sizeof state);
    state.lr = 1e-4;
    state.beta1 = 0.9;
    state.beta2 = 0.999;
    state.eps = 1e-8;
    qlora_result result = setup_clip(ctx, r, s);
    if (result == QLORA_OK) {
        result = qlora_tensor_create(ctx, QLORA_U8, 1, (int64_t)sizeof range, &s->ranges);
    }
    if (result == QLORA_OK) {
        result = qlora_tensor_create(ctx, QLORA_U8, 1, (int64_t)sizeof state, &s->state);
    }
    if (result == QLORA_OK) {
        result = qlora_tensor_write(ctx, &s->ranges, &range, sizeof range);
    }
    return result == QLORA_OK ? qlora_tensor_write(ctx, &s->state, &state, sizeof state) : result;
}

// AdamW zeroes the gradient, which would make clipping too easy, so it is filled again each time.
static qlora_result step_gradient(qlora_ctx* ctx, const row* r, set* s) {
    (void)r;
    return qlora_scale(ctx, 1.0f, &s->t[1], &s->t[0]);
}

static qlora_result step_adamw(qlora_ctx* ctx, const row* r, set* s) {
    qlora_tensor gradient = s->t[0];
    gradient.rows = 1;
    gradient.cols = r->m * r->n;
    gradient.ld = gradient.cols;
    qlora_adamw_desc args;
    memset(&args, 0, sizeof args);
    args.param = &s->t[2];
    args.grad = &gradient;
    args.m = &s->t[3];
    args.v = &s->t[4];
    args.shadow = &s->t[5];
    args.ranges = &s->ranges;
    args.state = &s->state;
    qlora_result result = step_gradient(ctx, r, s);
    result = result == QLORA_OK ? qlora_clip_apply(s->clip) : result;
    return result == QLORA_OK ? qlora_adamw_step(ctx, &args) : result;
}

// ---- attention --------------------------------------------------------------------------------

// heads times head_dim is 2048, or a little less
#define ATTENTION_HEADS(HD) (2048 / (HD))

// LIKE_8B: the heads of Llama-3.1-8B, four queries to a key
enum { CAPPED = 1, LIKE_8B = 2, HEADS_8B = 32, KV_HEADS_8B = 8 };

static qlora_attention_desc attention_desc(const row* r) { // m tokens, sequences of n, head_dim k
    bool grouped = (r->option & LIKE_8B) != 0;
    qlora_attention_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.head_dim = r->k;
    desc.heads = grouped ? HEADS_8B : ATTENTION_HEADS(r->k);
    desc.kv_heads = grouped ? KV_HEADS_8B : desc.heads;
    desc.cap = (r->option & CAPPED) != 0 ? 50.0f : 0.0f;
    return desc;
}

static int plan_attention(const row* r, plan* out) { // q k v o, seqs, lse, then backward in place
    qlora_attention_desc desc = attention_desc(r);
    int64_t width = desc.heads * r->k;
    int64_t kv_width = desc.kv_heads * r->k;
    for (int i = 0; i < 4; i++) {
        const plan p = {r->dtype, r->m, i == 1 || i == 2 ? kv_width : width, FILL_RANDOM};
        out[i] = p;
    }
    const plan seqs = {QLORA_I32, 1, r->m / r->n + 1, FILL_SEQUENCES};
    const plan lse = {QLORA_F32, desc.heads, r->m, FILL_ZERO};
    const plan gradient = {r->dtype, r->m, 2 * (width + kv_width), FILL_RANDOM};
    out[4] = seqs;
    out[5] = lse;
    out[6] = gradient;
    return 7;
}

static qlora_result step_attention_forward(qlora_ctx* ctx, const row* r, set* s) {
    qlora_attention_desc desc = attention_desc(r);
    return qlora_attention_forward(ctx, &desc, &s->t[0], &s->t[1], &s->t[2], &s->t[4], &s->t[3],
                                   &s->t[5]);
}

static qlora_result step_attention_backward(qlora_ctx* ctx, const row* r, set* s) {
    qlora_attention_desc desc = attention_desc(r);
    qlora_tensor d[4]; // dO, dQ, dK, dV: views of one packed buffer
    int64_t at = 0;
    for (int i = 0; i < 4; i++) {
        int64_t width = (i < 2 ? desc.heads : desc.kv_heads) * r->k;
        qlora_result result = qlora_tensor_view(ctx, &s->t[6], 0, r->m, at, width, &d[i]);
        if (result != QLORA_OK) {
            return result;
        }
        at += width;
    }
    return qlora_attention_backward(ctx, &desc, &s->t[0], &s->t[1], &s->t[2], &s->t[4], &s->t[3],
                                    &s->t[5], &d[0], &d[1], &d[2], &d[3]);
}

// ---- products ---------------------------------------------------------------------------------

enum { TRANS_A = 1, TRANS_B = 2, TO_F32 = 4 /* the result */ };

static int plan_gemm(const row* r, plan* out) {
    bool ta = (r->option & TRANS_A) != 0;
    bool tb = (r->option & TRANS_B) != 0;
    const plan plans[] = {
        {r->dtype, ta ? r->k : r->m, ta ? r->m : r->k, FILL_RANDOM},
        {r->dtype, tb ? r->n : r->k, tb ? r->k : r->n, FILL_RANDOM},
        {(r->option & TO_F32) != 0 ? QLORA_F32 : r->dtype, r->m, r->n, FILL_ZERO}};
    memcpy(out, plans, sizeof plans);
    return 3;
}

static qlora_result gemm_on(qlora_ctx* ctx, const row* r, set* s, qlora_path path) {
    qlora_gemm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.trans_a = (r->option & TRANS_A) != 0;
    desc.trans_b = (r->option & TRANS_B) != 0;
    desc.alpha = 1.0f;
    desc.path = path;
    return qlora_gemm(ctx, &desc, &s->t[0], &s->t[1], &s->t[2]);
}

static qlora_result step_gemm_ptx(qlora_ctx* ctx, const row* r, set* s) {
    return gemm_on(ctx, r, s, QLORA_PATH_PTX);
}

static qlora_result step_gemm_cublas(qlora_ctx* ctx, const row* r, set* s) {
    return gemm_on(ctx, r, s, QLORA_PATH_CUBLAS);
}

// ---- NF4 --------------------------------------------------------------------------------------

// The matrix that is quantised; dequantising overwrites it. For a product, x and y follow it.
static int plan_nf4(const row* r, plan* out) {
    bool product = r->k > 0;
    const plan plans[] = {{QLORA_BF16, product ? r->n : r->m, product ? r->k : r->n, FILL_RANDOM},
                          {QLORA_BF16, r->m, r->k, FILL_RANDOM},
                          {QLORA_BF16, r->m, r->n, FILL_ZERO}};
    memcpy(out, plans, sizeof plans);
    return product ? 3 : 1;
}

static qlora_result setup_nf4(qlora_ctx* ctx, const row* r, set* s) {
    (void)r;
    qlora_nf4_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rows = s->t[0].rows;
    desc.cols = s->t[0].cols;
    qlora_result result = qlora_nf4_create(ctx, &desc, &s->nf4);
    return result == QLORA_OK ? qlora_nf4_quantise(ctx, &s->t[0], &s->nf4) : result;
}

static qlora_result step_dequantise(qlora_ctx* ctx, const row* r, set* s) {
    (void)r;
    return qlora_nf4_dequantise(ctx, &s->nf4, &s->t[0], false);
}

static qlora_result step_nf4_fused(qlora_ctx* ctx, const row* r, set* s) {
    (void)r;
    return qlora_nf4_gemm_forward(ctx, &s->t[1], &s->nf4, &s->t[2], QLORA_PRODUCT_FUSED);
}

static qlora_result step_nf4_unfused(qlora_ctx* ctx, const row* r, set* s) {
    (void)r;
    return qlora_nf4_gemm_forward(ctx, &s->t[1], &s->nf4, &s->t[2], QLORA_PRODUCT_UNFUSED);
}

// ---- LoRA linear: m tokens, n outputs in all, k inputs, option parts of rank 16 each ----------

enum { RANK = 16 };
enum { LINEAR_X, LINEAR_Y, LINEAR_OPERAND, LINEAR_A, LINEAR_SB, LINEAR_DA, LINEAR_DB, LINEAR_DX };

static int plan_linear(const row* r, plan* out) {
    int64_t rank = RANK * (int64_t)r->option; // a multiple of 8, as the padding requires
    const plan plans[] = {{r->dtype, r->m, r->k + rank, FILL_RANDOM},
                          {r->dtype, r->m, r->n + rank, FILL_RANDOM},
                          {r->dtype, r->n + rank, r->k + rank, FILL_RANDOM},
                          {r->dtype, rank, r->k, FILL_RANDOM},
                          {r->dtype, r->n, RANK, FILL_RANDOM},
                          {QLORA_F32, rank, r->k, FILL_ZERO},
                          {QLORA_F32, r->n, RANK, FILL_ZERO},
                          {r->dtype, r->m, r->k, FILL_ZERO}};
    memcpy(out, plans, sizeof plans);
    return 8;
}

typedef struct linear_views {
    qlora_tensor dense[QLORA_LINEAR_PARTS];
    qlora_tensor a[QLORA_LINEAR_PARTS];
    qlora_tensor sb[QLORA_LINEAR_PARTS];
    qlora_tensor da[QLORA_LINEAR_PARTS];
    qlora_tensor db[QLORA_LINEAR_PARTS];
} linear_views;

// q, k, v of a model with 4 query heads per key head; gate and up; or a single projection.
static qlora_result linear_make(qlora_ctx* ctx, const row* r, set* s, linear_views* v,
                                qlora_linear_desc* l) {
    memset(l, 0, sizeof *l);
    l->in = r->k;
    l->count = (int32_t)r->option;
    l->operand = &s->t[LINEAR_OPERAND];
    int64_t at = 0;
    for (int32_t i = 0; i < l->count; i++) {
        int64_t out = l->count == 3 ? (i == 0 ? r->n / 6 * 4 : r->n / 6) : r->n / l->count;
        const struct {
            int from;
            int64_t first;
            int64_t rows;
            int64_t cols;
            qlora_tensor* to;
        } views[] = {{LINEAR_OPERAND, at, out, r->k, &v->dense[i]},
                     {LINEAR_A, i * RANK, RANK, r->k, &v->a[i]},
                     {LINEAR_SB, at, out, RANK, &v->sb[i]},
                     {LINEAR_DA, i * RANK, RANK, r->k, &v->da[i]},
                     {LINEAR_DB, at, out, RANK, &v->db[i]}};
        for (size_t j = 0; j < sizeof views / sizeof views[0]; j++) {
            qlora_result result = qlora_tensor_view(ctx, &s->t[views[j].from], views[j].first,
                                                    views[j].rows, 0, views[j].cols, views[j].to);
            if (result != QLORA_OK) {
                return result;
            }
        }
        qlora_linear_part* p = &l->parts[i];
        p->out = out;
        p->rank = RANK;
        p->scale = 1.0f;
        p->dense = &v->dense[i];
        p->a = &v->a[i];
        p->sb = &v->sb[i];
        p->da = &v->da[i];
        p->db = &v->db[i];
        at += out;
    }
    return QLORA_OK;
}

static qlora_result setup_linear(qlora_ctx* ctx, const row* r, set* s) {
    linear_views v;
    qlora_linear_desc l;
    qlora_result result = linear_make(ctx, r, s, &v, &l);
    return result == QLORA_OK ? qlora_linear_place(ctx, &l, QLORA_LINEAR_ADAPTERS) : result;
}

static qlora_result step_linear_forward(qlora_ctx* ctx, const row* r, set* s) {
    linear_views v;
    qlora_linear_desc l;
    qlora_tensor y;
    qlora_result result = linear_make(ctx, r, s, &v, &l);
    result =
        result == QLORA_OK ? qlora_tensor_view(ctx, &s->t[LINEAR_Y], 0, r->m, 0, r->n, &y) : result;
    return result == QLORA_OK ? qlora_linear_forward(ctx, &l, &s->t[LINEAR_X], &y) : result;
}

static qlora_result step_linear_backward(qlora_ctx* ctx, const row* r, set* s) {
    linear_views v;
    qlora_linear_desc l;
    qlora_result result = linear_make(ctx, r, s, &v, &l);
    return result == QLORA_OK ? qlora_linear_backward(ctx, &l, &s->t[LINEAR_X], &s->t[LINEAR_Y],
                                                      &s->t[LINEAR_DX], QLORA_LINEAR_OVERWRITE)
                              : result;
}

// Only the product with W, in the same memory but without gaps between rows: the best case
// for cuBLAS.
static qlora_result linear_bare(qlora_ctx* ctx, const row* r, set* s, bool backward) {
    const struct {
        int from;
        int64_t rows;
        int64_t cols;
    } parts[] = {{backward ? LINEAR_Y : LINEAR_X, r->m, backward ? r->n : r->k},
                 {LINEAR_OPERAND, r->n, r->k},
                 {backward ? LINEAR_DX : LINEAR_Y, r->m, backward ? r->k : r->n}};
    qlora_tensor t[3];
    for (int i = 0; i < 3; i++) {
        const qlora_tensor* from = &s->t[parts[i].from];
        qlora_result result = qlora_tensor_wrap(ctx, from->data, from->bytes, from->dtype,
                                                parts[i].rows, parts[i].cols, 0, &t[i]);
        if (result != QLORA_OK) {
            return result;
        }
    }
    qlora_gemm_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.trans_b = !backward;
    desc.alpha = 1.0f;
    desc.path = QLORA_PATH_CUBLAS;
    return qlora_gemm(ctx, &desc, &t[0], &t[1], &t[2]);
}

static qlora_result step_bare_forward(qlora_ctx* ctx, const row* r, set* s) {
    return linear_bare(ctx, r, s, false);
}

static qlora_result step_bare_backward(qlora_ctx* ctx, const row* r, set* s) {
    return linear_bare(ctx, r, s, true);
}

// ---- the table --------------------------------------------------------------------------------

// clang-format off
#define EW(NAME, M, N, PLAN, STEP, TENSORS, PER, BAR)                                              \
    {"ops", NAME, M, N, 0, QLORA_BF16, PLAN, NULL, STEP, NULL, PER, AGAINST_COPY, BAR, TENSORS,    \
     false, 0}
#define ATTENTION_LIKE(NAME, SEQ, HD, STEP, PER, BAR, OPTION)                                      \
    {"ops", NAME, 16384, SEQ, HD, QLORA_BF16, plan_attention, step_attention_forward, STEP, NULL,  \
     PER * (double)ATTENTION_HEADS(HD), AGAINST_TFLOPS, BAR, OPTION, false, 0}
#define ATTENTION(NAME, SEQ, HD, STEP, PER, BAR)                                                   \
    ATTENTION_LIKE(NAME, SEQ, HD, STEP, PER, BAR, 0)
#define ATTENTION_BOTH(HD, FORWARD, BACKWARD)                                                      \
    ATTENTION("attention forward hd" #HD " seq 2048", 2048, HD, step_attention_forward, 2.0,       \
              FORWARD),                                                                            \
    ATTENTION("attention backward hd" #HD " seq 2048", 2048, HD, step_attention_backward, 5.0,     \
              BACKWARD)
#define LONG(NAME, TOKENS, SEQ, STEP, PER, AGAINST, BAR)                                           \
    {"long", NAME, TOKENS, SEQ, 128, QLORA_BF16, plan_attention, step_attention_forward, STEP,     \
     NULL, PER * (double)HEADS_8B, AGAINST, BAR, LIKE_8B, false, 0}
#define LINEAR(NAME, N, K, PARTS, STEP, BARE)                                                      \
    {"ops", NAME, 8192, N, K, QLORA_BF16, plan_linear, setup_linear, STEP, BARE, 2.0,              \
     AGAINST_REFERENCE, 0.0, PARTS, false, 0}
#define LINEAR_FORWARD(NAME, N, K, PARTS)                                                          \
    LINEAR("LoRA linear forward " NAME, N, K, PARTS, step_linear_forward, step_bare_forward)
#define LINEAR_BACKWARD(NAME, N, K, PARTS)                                                         \
    LINEAR("LoRA linear backward " NAME, N, K, PARTS, step_linear_backward, step_bare_backward)
#define SUM(NAME, ROWS_BEFORE, BAR) SUM_OF("ops", NAME, ROWS_BEFORE, BAR)
#define SUM_OF(GROUP, NAME, ROWS_BEFORE, BAR)                                                      \
    {GROUP, NAME, 0, 0, 0, QLORA_BF16, NULL, NULL, NULL, NULL, 0.0, AGAINST_REFERENCE, BAR,        \
     ROWS_BEFORE, false, 0}
#define GEMM(NAME, M, N, K, DTYPE, TRANS, BAR)                                                     \
    {"gemm", NAME, M, N, K, DTYPE, plan_gemm, NULL, step_gemm_ptx, step_gemm_cublas, 2.0,          \
     AGAINST_REFERENCE, BAR, TRANS, false, 0}
#define PRODUCT(NAME, M, N, K, TRANS, BAR)                                                         \
    {"products", NAME, M, N, K, QLORA_BF16, plan_gemm, NULL, step_gemm_ptx, step_gemm_cublas, 2.0, \
     AGAINST_REFERENCE, BAR, TRANS, false, 0}
#define GEMM_BOTH(NAME, M, N, K, TRANS)                                                            \
    GEMM(NAME " f32", M, N, K, QLORA_F32, TRANS, 0.0),                                             \
    GEMM(NAME " bf16", M, N, K, QLORA_BF16, TRANS, 0.0)

static const row CEILINGS[] = {
    {"", "copy (scale by 1)", 16384, 8192, 0, QLORA_F32, plan_same, NULL, step_copy, NULL, 8.0,
     AGAINST_NOTHING, 0.0, 2, false, 0},
    {"", "cuBLAS bf16", 8192, 8192, 8192, QLORA_BF16, plan_gemm, NULL, step_gemm_cublas, NULL, 2.0,
     AGAINST_NOTHING, 0.0, TRANS_B, false, 0},
    {"", "cuBLAS exact f32", 4096, 4096, 4096, QLORA_F32, plan_gemm, NULL, step_gemm_cublas, NULL,
     2.0, AGAINST_NOTHING, 0.0, TRANS_B, false, 0},
};

static const row ROWS[] = {
    // A 4-bit value, one byte of scale per 64 of them, one float per 256 of those; 2 bytes out.
    {"ops", "NF4 dequantise to bf16", 28672, 4096, 0, QLORA_BF16, plan_nf4, setup_nf4,
     step_dequantise, NULL, 2.5 + 1.0 / 64 + 4.0 / 64 / 256, AGAINST_COPY, 0.80, 0, false, 2},
    EW("rmsnorm + residual forward",  8192,  4096, plan_norm, step_norm_forward,    4,  8.0, 0.80),
    EW("rmsnorm + residual backward", 8192,  4096, plan_norm, step_norm_backward,   4,  8.0, 0.80),
    EW("rope in place 40x128",        8192,  5120, plan_rope, step_rope,          128,  4.0, 0.75),
    EW("swiglu forward",              8192, 14336, plan_same, step_swiglu_forward,  3,  6.0, 0.85),
    EW("swiglu backward with h",      8192, 14336, plan_same, step_swiglu_backward, 6, 12.0, 0.80),
    EW("cross-entropy in place", 1024, 128256, plan_cross_entropy, step_cross_entropy, 0, 4.0, 0.7),
    {"ops", "clip + adamw", CLIP_BUFFERS, 93752, 0, QLORA_F32, plan_adamw, setup_adamw, step_adamw,
     step_gradient, 46.0, AGAINST_COPY, 0.75, 0, true, 0},
    {"clip", "clip, active, 448 buffers", CLIP_BUFFERS, 93752, 0, QLORA_F32, plan_same, setup_clip,
     step_clip, NULL, 12.0, AGAINST_COPY, 0.70, 1, false, 0},

    // Llama-3.1-8B; the share is the time of the bare product with W divided by the total time.
    LINEAR_FORWARD("q,k,v",    6144,  4096, 3),
    LINEAR_FORWARD("o",        4096,  4096, 1),
    LINEAR_FORWARD("gate,up", 28672,  4096, 2),
    LINEAR_FORWARD("down",     4096, 14336, 1),
    SUM("LoRA linear forward, all four", 4, 0.90),
    LINEAR_BACKWARD("q,k,v",    6144,  4096, 3),
    LINEAR_BACKWARD("o",        4096,  4096, 1),
    LINEAR_BACKWARD("gate,up", 28672,  4096, 2),
    LINEAR_BACKWARD("down",     4096, 14336, 1),
    SUM("LoRA linear backward, all four", 4, 0.85),
    // The reference here is dequantise + cuBLAS.
    {"ops", "NF4 GEMM fused, 16 rows", 16, 14336, 4096, QLORA_BF16, plan_nf4, setup_nf4,
     step_nf4_fused, step_nf4_unfused, 2.0, AGAINST_REFERENCE, 3.0, 0, false, 8},

    ATTENTION("attention forward hd128 seq 2048",  2048, 128, step_attention_forward,  2.0, 450.0),
    ATTENTION("attention forward hd128 seq 8192",  8192, 128, step_attention_forward,  2.0, 500.0),
    ATTENTION("attention backward hd128 seq 2048", 2048, 128, step_attention_backward, 5.0, 260.0),
    ATTENTION("attention backward hd128 seq 8192", 8192, 128, step_attention_backward, 5.0, 300.0),
    ATTENTION("attention forward hd64 seq 2048",   2048,  64, step_attention_forward,  2.0, 330.0),
    ATTENTION("attention forward hd64 seq 8192",   8192,  64, step_attention_forward,  2.0, 360.0),
    ATTENTION("attention backward hd64 seq 2048",  2048,  64, step_attention_backward, 5.0, 220.0),
    ATTENTION("attention backward hd64 seq 8192",  8192,  64, step_attention_backward, 5.0, 240.0),
    ATTENTION_BOTH(256, 400.0, 300.0),
    ATTENTION_LIKE("attention forward hd256 capped",  2048, 256, step_attention_forward,  2.0, 0.0,
                   CAPPED),
    ATTENTION_LIKE("attention backward hd256 capped", 2048, 256, step_attention_backward, 5.0, 0.0,
                   CAPPED),
    ATTENTION_BOTH(192, 0.0, 0.0),
    ATTENTION_BOTH(96, 350.0, 260.0),
    ATTENTION_BOTH(80, 0.0, 0.0),
    ATTENTION_BOTH(32, 0.0, 0.0),

    LONG("8B attention forward, 8 texts",  16384, 2048, step_attention_forward, 2.0,
         AGAINST_NOTHING, 0.0),
    LONG("8B attention forward, one text", 32768, 32768, step_attention_forward, 2.0,
         AGAINST_FIRST, 0.9),
    LONG("8B attention forward, one text", 131072, 131072, step_attention_forward, 2.0,
         AGAINST_FIRST, 0.9),
    LONG("8B attention backward, 8 texts",  16384, 2048, step_attention_backward, 5.0,
         AGAINST_NOTHING, 0.0),
    LONG("8B attention backward, one text", 32768, 32768, step_attention_backward, 5.0,
         AGAINST_FIRST, 0.9),
    LONG("8B attention backward, one text", 131072, 131072, step_attention_backward, 5.0,
         AGAINST_FIRST, 0.9),

    GEMM("PTX f32 projection",       2048, 1536, 1536, QLORA_F32, 0,       0.25),
    GEMM("PTX f32 LoRA X A",         2048,   16, 1536, QLORA_F32, 0,       0.60),
    GEMM("PTX f32 LoRA H B",         2048, 1536,   16, QLORA_F32, 0,       0.60),
    GEMM("PTX f32 LoRA A^T dC",      1536,   16, 2048, QLORA_F32, TRANS_A, 0.60),
    // Qwen2.5-1.5B, 2048 tokens: x W^T, dy W, and the pair of rank 16 with its gradients.
    GEMM_BOTH("q, o forward",        2048, 1536, 1536, TRANS_B),
    GEMM_BOTH("q, o input gradient", 2048, 1536, 1536, 0),
    GEMM_BOTH("k, v forward",        2048,  256, 1536, TRANS_B),
    GEMM_BOTH("gate, up forward",    2048, 8960, 1536, TRANS_B),
    GEMM_BOTH("gate, up input grad", 2048, 1536, 8960, 0),
    GEMM_BOTH("down forward",        2048, 1536, 8960, TRANS_B),
    GEMM_BOTH("LoRA x A^T",          2048,   16, 1536, TRANS_B),
    GEMM_BOTH("LoRA x A^T, down",    2048,   16, 8960, TRANS_B),
    GEMM_BOTH("LoRA h B^T",          2048, 1536,   16, TRANS_B),
    GEMM_BOTH("LoRA h B^T, gate",    2048, 8960,   16, TRANS_B),
    GEMM_BOTH("LoRA dA = dH^T x",      16, 1536, 2048, TRANS_A),
    GEMM_BOTH("LoRA dB = dY^T h",    1536,   16, 2048, TRANS_A),

    // The products of a step without cuBLAS: Llama-3.1-8B at 8192 tokens, Qwen2.5-0.5B at 2048,
    // rank 16 on every projection, whose columns are next to those of the weights.
    PRODUCT("8B q,k,v",        8192,  6144,  4144, TRANS_B, 0.85),
    PRODUCT("8B o",            8192,  4096,  4112, TRANS_B, 0.85),
    PRODUCT("8B gate,up",      8192, 28672,  4128, TRANS_B, 0.85),
    PRODUCT("8B down",         8192,  4096, 14352, TRANS_B, 0.85),
    PRODUCT("8B dX q,k,v",     8192,  4096,  6192, 0,       0.85),
    PRODUCT("8B dX o",         8192,  4096,  4112, 0,       0.85),
    PRODUCT("8B dX gate,up",   8192,  4096, 28704, 0,       0.85),
    PRODUCT("8B dX down",      8192, 14336,  4112, 0,       0.85),
    SUM_OF("products", "8B, all eight", 8, 0.85),
    PRODUCT("8B z q,k,v",      8192,    48,  4096, TRANS_B, 0.0),
    PRODUCT("8B z down",       8192,    16, 14336, TRANS_B, 0.0),
    PRODUCT("8B u q,k,v",      8192,    48,  6144, 0,       0.0),
    PRODUCT("8B u gate,up",    8192,    32, 28672, 0,       0.0),
    PRODUCT("8B dA q,k,v",       48,  4096,  8192, TRANS_A | TO_F32, 0.0),
    PRODUCT("8B dA down",        16, 14336,  8192, TRANS_A | TO_F32, 0.0),
    PRODUCT("8B dB o",         4096,    16,  8192, TRANS_A | TO_F32, 0.0),
    PRODUCT("8B dB gate",     14336,    16,  8192, TRANS_A | TO_F32, 0.0),
    SUM_OF("products", "8B, adapters", 8, 0.0),
    PRODUCT("0.5B q,k,v",      2048,  1152,   944, TRANS_B, 0.0),
    PRODUCT("0.5B o",          2048,   896,   912, TRANS_B, 0.0),
    PRODUCT("0.5B gate,up",    2048,  9728,   928, TRANS_B, 0.0),
    PRODUCT("0.5B down",       2048,   896,  4880, TRANS_B, 0.0),
    PRODUCT("0.5B dX q,k,v",   2048,   896,  1200, 0,       0.0),
    PRODUCT("0.5B dX o",       2048,   896,   912, 0,       0.0),
    PRODUCT("0.5B dX gate,up", 2048,   896,  9760, 0,       0.0),
    PRODUCT("0.5B dX down",    2048,  4864,   912, 0,       0.0),
    SUM_OF("products", "0.5B, all eight", 8, 0.0),
    PRODUCT("0.5B z q,k,v",    2048,    48,   896, TRANS_B, 0.0),
    PRODUCT("0.5B z down",     2048,    16,  4864, TRANS_B, 0.0),
    PRODUCT("0.5B u gate,up",  2048,    32,  9728, 0,       0.0),
    PRODUCT("0.5B dA q,k,v",     48,   896,  2048, TRANS_A | TO_F32, 0.0),
    PRODUCT("0.5B dB gate",    4864,    16,  2048, TRANS_A | TO_F32, 0.0),
    PRODUCT("0.5B head",       1024, 151936,  896, TRANS_B, 0.0),
};
// clang-format on

// ---- filling ----------------------------------------------------------------------------------

static uint32_t next_random(bench* b) {
    b->random = b->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(b->random >> 33);
}

static bool host_blocks(bench* b) {
    b->host_f32 = (float*)malloc(HOST_BLOCK);
    b->host_bf16 = (uint16_t*)malloc(HOST_BLOCK);
    if (b->host_f32 == NULL || b->host_bf16 == NULL) {
        return false;
    }
    for (size_t i = 0; i < HOST_BLOCK / 4; i++) {
        b->host_f32[i] = (float)next_random(b) / 1073741824.0f - 1.0f;
    }
    for (size_t i = 0; i < HOST_BLOCK / 2; i++) { // the upper half of a float is a bf16
        uint32_t bits;
        memcpy(&bits, &b->host_f32[i % (HOST_BLOCK / 4)], sizeof bits);
        b->host_bf16[i] = (uint16_t)(bits >> 16);
    }
    return true;
}

// Copies whole rows at a time from the random block; a row longer than the block is copied
// in pieces.
static qlora_result fill_random(bench* b, const qlora_tensor* t) {
    size_t size = qlora_dtype_bytes(t->dtype);
    const void* block = t->dtype == QLORA_F32 ? (const void*)b->host_f32 : b->host_bf16;
    int64_t fit = (int64_t)(HOST_BLOCK / size);
    int64_t rows = t->cols <= fit ? fit / (t->cols > 0 ? t->cols : 1) : 1;
    for (int64_t first = 0; first < t->rows; first += rows) {
        int64_t n = t->rows - first < rows ? t->rows - first : rows;
        for (int64_t col = 0; col < t->cols; col += fit) {
            int64_t width = t->cols - col < fit ? t->cols - col : fit;
            qlora_tensor view;
            qlora_result r = qlora_tensor_view(b->ctx, t, first, n, col, width, &view);
            r = r == QLORA_OK ? qlora_tensor_write(b->ctx, &view, block, (size_t)(n * width) * size)
                              : r;
            if (r != QLORA_OK) {
                return r;
            }
        }
    }
    return QLORA_OK;
}

static qlora_result fill_integers(bench* b, const row* r, const plan* p, const qlora_tensor* t) {
    int32_t* values = (int32_t*)malloc((size_t)p->cols * sizeof *values + 1);
    if (values == NULL) {
        return QLORA_ERR_MEMORY;
    }
    for (int64_t i = 0; i < p->cols; i++) {
        values[i] = (int32_t)(p->fill == FILL_COUNT       ? i
                              : p->fill == FILL_SEQUENCES ? i * r->n
                                                          : (int64_t)next_random(b) % r->n);
    }
    qlora_result result = qlora_tensor_write(b->ctx, t, values, (size_t)p->cols * sizeof *values);
    free(values);
    return result;
}

static void set_destroy(bench* b, set* s) {
    qlora_clip_destroy(s->clip);
    qlora_nf4_destroy(b->ctx, &s->nf4);
    qlora_tensor_destroy(b->ctx, &s->ranges);
    qlora_tensor_destroy(b->ctx, &s->state);
    for (int i = 0; i < MAX_TENSORS; i++) {
        qlora_tensor_destroy(b->ctx, &s->t[i]);
    }
}

static qlora_result set_create(bench* b, const row* r, const plan* plans, int count, set* s) {
    qlora_result result = QLORA_OK;
    for (int i = 0; i < count && result == QLORA_OK; i++) {
        const plan* p = &plans[i];
        result = qlora_tensor_create(b->ctx, p->dtype, p->rows, p->cols, &s->t[i]);
        if (result != QLORA_OK) {
            break;
        }
        result = p->fill == FILL_RANDOM ? fill_random(b, &s->t[i])
                 : p->fill == FILL_ZERO ? qlora_tensor_zero(b->ctx, &s->t[i])
                                        : fill_integers(b, r, p, &s->t[i]);
    }
    return result == QLORA_OK && r->setup != NULL ? r->setup(b->ctx, r, s) : result;
}

// ---- measuring --------------------------------------------------------------------------------

typedef struct pass {
    const row* r;
    set* sets;
    int count;
    int steps;
    step_fn step;
} pass;

static qlora_result pass_run(qlora_ctx* ctx, void* user) {
    pass* p = (pass*)user;
    qlora_result r = QLORA_OK;
    for (int i = 0; i < p->steps && r == QLORA_OK; i++) {
        r = p->step(ctx, p->r, &p->sets[i % p->count]);
    }
    return r;
}

// Microseconds per step, as nodes of a graph.
static qlora_result measure(bench* b, pass* p, double* us) {
    double times[MAX_REPLAYS];
    int replays = b->quick ? 7 : MAX_REPLAYS;
    p->steps = p->count;
    qlora_result r = pass_run(b->ctx, p); // compiles, and gives a first estimate of the time
    event_record(b, b->clock.from);
    r = r == QLORA_OK ? pass_run(b->ctx, p) : r;
    event_record(b, b->clock.to);
    r = r == QLORA_OK ? qlora_ctx_sync(b->ctx) : r;
    if (r != QLORA_OK) {
        return r;
    }
    double rough = b->dry ? 1e9 : events_us(b) / p->count;
    bool slow = rough > 1e5 && !b->dry; // a tenth of a second needs neither warm-up nor repeats
    replays = slow ? 3 : replays;
    while (p->steps < 256 && p->steps * rough < 2000.0) {
        p->steps += p->count; // long enough that the start of a graph is negligible
    }
    qlora_graph* graph = NULL;
    r = qlora_graph_capture(b->ctx, 1, pass_run, p, &graph);
    for (int i = slow ? 0 : -3; i < replays && r == QLORA_OK && !b->dry; i++) {
        event_record(b, b->clock.from);
        r = qlora_graph_replay(graph, 1);
        event_record(b, b->clock.to);
        double time = events_us(b) / p->steps;
        times[i < 0 ? 0 : i] = time;
        r = r == QLORA_OK && time < 0.0 ? QLORA_ERR_CUDA : r;
    }
    if (r == QLORA_OK && b->dry) {
        r = qlora_graph_replay(graph, 1);
        r = r == QLORA_OK ? qlora_ctx_sync(b->ctx) : r;
    }
    *us = r == QLORA_OK && !b->dry ? median(times, replays) : 0.0;
    qlora_result destroyed = graph != NULL ? qlora_graph_destroy(graph) : QLORA_OK;
    return r != QLORA_OK ? r : destroyed;
}

static qlora_result row_measure(bench* b, const row* r, double* us, double* reference) {
    plan plans[MAX_TENSORS];
    int tensors = r->plan(r, plans);
    double bytes = 0.0;
    for (int i = 0; i < tensors; i++) {
        bytes += (double)plans[i].rows * (double)plans[i].cols *
                 (double)qlora_dtype_bytes(plans[i].dtype);
    }
    static set sets[MAX_SETS];
    memset(sets, 0, sizeof sets);
    pass p = {r, sets, 1, 0, r->step};
    while (p.count < (b->dry ? 2 : MAX_SETS) &&
           (b->dry || p.count < r->sets || p.count * bytes < TOUCHED)) {
        p.count++;
    }
    qlora_result result = QLORA_OK;
    int made = 0;
    while (made < p.count && result == QLORA_OK) {
        result = set_create(b, r, plans, tensors, &sets[made++]);
    }
    result = result == QLORA_OK ? measure(b, &p, us) : result;
    *reference = 0.0;
    if (result == QLORA_OK && r->reference != NULL &&
        (r->minus_reference || b->clock.native.cublas != NULL)) {
        p.step = r->reference;
        result = measure(b, &p, reference);
    }
    char why[512];
    snprintf(why, sizeof why, "%s", qlora_last_error(b->ctx));
    for (int i = 0; i < made; i++) {
        set_destroy(b, &sets[i]);
    }
    if (result != QLORA_OK) {
        printf("%s%s: %s: %s\n", b->json ? "# " : "", r->name, qlora_result_name(result), why);
        b->failed++;
    }
    return result;
}

// ---- printing ---------------------------------------------------------------------------------

typedef struct line {
    const char* group;
    const char* name;
    char size[48];
    double us;
    double work;
    const char* unit; // unit of work; the rate is in this unit per second: "FLOP", "B"
    double share;     // fraction of the rate it is compared with; negative = none
    const char* of;
    double bar; // for share, or for the rate in TFLOP/s
    bool bar_is_tflops;
    bool bar_is_most; // an upper limit, on the time in microseconds
} line;

static void line_print(bench* b, const line* l) {
    double rate = l->us > 0.0 ? l->work / (l->us * 1e-6) : 0.0;
    double value = l->bar_is_tflops ? rate * 1e-12 : l->bar_is_most ? l->us : l->share;
    bool good = l->bar_is_most ? value <= l->bar : value >= l->bar;
    const char* verdict = b->dry ? "dry" : l->bar <= 0.0 ? "-" : good ? "PASS" : "below";
    b->below += !b->dry && l->bar > 0.0 && !good;
    if (b->json) {
        printf("%s{\"group\": \"%s\", \"name\": \"%s\", \"size\": \"%s\", \"us\": %.3f, "
               "\"work\": %.6g, \"unit\": \"%s\", \"rate\": %.6g, \"share\": %.4f, \"of\": \"%s\", "
               "\"bar\": %g, \"verdict\": \"%s\"}",
               b->printed++ > 0 ? ",\n" : "", l->group, l->name, l->size, l->us, l->work, l->unit,
               rate, l->share, l->of, l->bar, verdict);
        return;
    }
    char share[48] = "";
    char bar[32] = "";
    if (l->share >= 0.0) {
        snprintf(share, sizeof share, "%.1f%% of %s", l->share * 100.0, l->of);
    }
    if (l->bar > 0.0 && l->bar_is_most) {
        snprintf(bar, sizeof bar, "<= %g us", l->bar);
    } else if (l->bar > 0.0) {
        snprintf(bar, sizeof bar, l->bar_is_tflops ? ">= %g TFLOP/s" : ">= %g%%",
                 l->bar_is_tflops ? l->bar : l->bar * 100.0);
    }
    bool flops = l->unit[0] == 'F';
    printf("%-34s %-18s %11.2f us %9.3f %-5s %9.2f %-7s  %-20s %-15s %s\n", l->name, l->size, l->us,
           l->work * 1e-9, flops ? "GFLOP" : "GB", rate * (flops ? 1e-12 : 1e-9),
           flops ? "TFLOP/s" : "GB/s", share, bar, verdict);
    fflush(stdout);
}

static void row_line(const bench* b, const row* r, double us, double reference, line* l) {
    memset(l, 0, sizeof *l);
    l->group = r->group;
    l->name = r->name;
    if (r->k > 0) {
        snprintf(l->size, sizeof l->size, "%lldx%lldx%lld", (long long)r->m, (long long)r->n,
                 (long long)r->k);
    } else {
        snprintf(l->size, sizeof l->size, "%lldx%lld", (long long)r->m, (long long)r->n);
    }
    l->us = r->minus_reference ? us - reference : us;
    l->work = row_work(r);
    l->unit = row_counts_flops(r) ? "FLOP" : "B";
    l->bar = r->bar;
    l->bar_is_tflops = r->against == AGAINST_TFLOPS;
    double rate = l->us > 0.0 ? l->work / (l->us * 1e-6) : 0.0;
    const struct {
        double ceiling;
        const char* name;
    } ceilings[] = {{0.0, ""},
                    {b->copy_rate, "copy"},
                    {b->bf16_rate, "cuBLAS bf16"},
                    {b->f32_rate, "cuBLAS f32"},
                    {reference > 0.0 ? l->work / (reference * 1e-6) : 0.0,
                     r->reference == step_nf4_unfused ? "unfused" : "cuBLAS"},
                    {b->bf16_rate, "cuBLAS bf16"},
                    {b->first_rate, "8 x 2048"}};
    double ceiling = ceilings[r->against].ceiling;
    l->share = ceiling > 0.0 ? rate / ceiling : -1.0;
    l->of = ceilings[r->against].name;
    if (ceiling <= 0.0 && !l->bar_is_tflops) {
        l->bar = 0.0; // there is no reference
    }
}

// In a dry run, every size is small, so that an emulated device can run it.
static row row_for(const bench* b, const row* r) {
    row small = *r;
    if (b->dry) {
        bool attention = r->plan == plan_attention;
        small.m = r->m < 64 ? r->m : 64;
        small.n = attention              ? 32
                  : r->plan == plan_rope ? 2 * (int64_t)r->option
                  : r->n < 48            ? r->n
                                         : 48;
        small.k = attention || r->k < 64 ? r->k : 64;
    }
    return small;
}

// The latest rows, for a row that is their sum.
enum { LAST_ROWS = 8 };
typedef struct last_rows {
    double us[LAST_ROWS];
    double reference[LAST_ROWS];
    double work[LAST_ROWS];
    unsigned count;
} last_rows;

static void sums_add(last_rows* sums, double us, double reference, double work) {
    unsigned at = sums->count++ % LAST_ROWS;
    sums->us[at] = us;
    sums->reference[at] = reference;
    sums->work[at] = work;
}

static void sums_line(const bench* b, const row* r, const last_rows* sums, line* l) {
    double us = 0.0;
    double reference = 0.0;
    double work = 0.0;
    bool complete = sums->count >= r->option;
    for (unsigned i = 0; i < r->option && complete; i++) {
        unsigned at = (sums->count - 1 - i) % LAST_ROWS;
        complete = sums->us[at] > 0.0;
        us += sums->us[at];
        reference += sums->reference[at];
        work += sums->work[at];
    }
    row_line(b, r, us, complete ? reference : 0.0, l);
    snprintf(l->size, sizeof l->size, "sum of %u", r->option);
    l->work = work;
    l->unit = "FLOP";
    l->share = complete && reference > 0.0 ? reference / us : -1.0;
    l->bar = l->share >= 0.0 ? r->bar : 0.0;
}

static void rows_run(bench* b, const row* rows, size_t count, const char* group) {
    double* ceilings[] = {&b->copy_rate, &b->bf16_rate, &b->f32_rate};
    last_rows sums;
    memset(&sums, 0, sizeof sums);
    for (size_t i = 0; i < count; i++) {
        if (strcmp(group, "all") != 0 && strcmp(group, rows[i].group) != 0) {
            continue;
        }
        row r = row_for(b, &rows[i]);
        if (r.step == step_gemm_cublas && b->clock.native.cublas == NULL) {
            continue;
        }
        double us = 0.0;
        double reference = 0.0;
        line l;
        if (r.step == NULL) { // the sum of the preceding rows
            sums_line(b, &r, &sums, &l);
        } else if (row_measure(b, &r, &us, &reference) == QLORA_OK) {
            row_line(b, &r, us, reference, &l);
            sums_add(&sums, us, reference, l.work);
            b->first_rate = r.against == AGAINST_NOTHING && us > 0.0 ? l.work / (us * 1e-6)
                                                                     : b->first_rate;
        } else {
            sums_add(&sums, 0.0, 0.0, 0.0);
            continue;
        }
        line_print(b, &l);
        if (rows == CEILINGS && us > 0.0) {
            *ceilings[i] = l.work / (us * 1e-6);
        }
    }
}

// ---- measurements that are not rows: a graph of tiny nodes, pre-warm --------------------------

static qlora_result step_tiny(qlora_ctx* ctx, const row* r, set* s) {
    (void)r;
    return qlora_scale(ctx, 1.0f, &s->t[0], &s->t[0]);
}

static void graph_run(bench* b) {
    enum { NODES = 1000 };
    row r;
    memset(&r, 0, sizeof r);
    set s;
    memset(&s, 0, sizeof s);
    pass p = {&r, &s, 1, NODES, step_tiny};
    double times[MAX_REPLAYS];
    qlora_graph* graph = NULL;
    qlora_result result = qlora_tensor_create(b->ctx, QLORA_F32, 1, 32, &s.t[0]);
    result = result == QLORA_OK ? qlora_tensor_zero(b->ctx, &s.t[0]) : result;
    result = result == QLORA_OK ? step_tiny(b->ctx, &r, &s) : result; // compiles
    result = result == QLORA_OK ? qlora_graph_capture(b->ctx, 1, pass_run, &p, &graph) : result;
    for (int i = -3; i < MAX_REPLAYS && result == QLORA_OK; i++) {
        event_record(b, b->clock.from);
        result = qlora_graph_replay(graph, 1);
        event_record(b, b->clock.to);
        times[i < 0 ? 0 : i] = b->dry ? 0.0 : events_us(b) / NODES;
    }
    result = result == QLORA_OK ? qlora_ctx_sync(b->ctx) : result;
    if (result != QLORA_OK) {
        printf("%sgraph: %s\n", b->json ? "# " : "", qlora_last_error(b->ctx));
        b->failed++;
    } else {
        line l;
        memset(&l, 0, sizeof l);
        l.group = "graph";
        l.name = "graph replay, per node of 1,000";
        snprintf(l.size, sizeof l.size, "1x32");
        l.us = median(times, MAX_REPLAYS);
        l.work = 256.0;
        l.unit = "B";
        l.share = -1.0;
        l.of = "";
        line_print(b, &l);
    }
    if (graph != NULL) {
        qlora_graph_destroy(graph);
    }
    qlora_tensor_destroy(b->ctx, &s.t[0]);
}

// Uses a separate context. Whether the driver's cache is cold or warm is up to the caller: run it
// twice with the same initially empty CUDA_CACHE_PATH.
static void prewarm_run(bench* b) {
    static const qlora_prewarm_desc shapes[] = {
        {1536, 8960, 12, 2, 128, 2048, 16, QLORA_BASE_NF4, QLORA_BF16, NULL, 0},
        {64, 96, 4, 2, 16, 8, 4, QLORA_BASE_NF4, QLORA_BF16, NULL, 0}, // dry
    };
    const struct {
        const char* name;
        double bar_ms;
    } bars[] = {{"pre-warm, driver's cache warm", 500.0},
                {"pre-warm, driver's cache cold", 3000.0}};
    qlora_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.require_backend = QLORA_BACKEND_CUDA;
    qlora_ctx* ctx = NULL;
    double start = wall_ms();
    qlora_result r = qlora_ctx_create(&desc, &ctx);
    double created = wall_ms();
    r = r == QLORA_OK ? qlora_prewarm(ctx, &shapes[b->dry ? 1 : 0]) : r;
    double ms = wall_ms() - created;
    qlora_cache_info info;
    r = r == QLORA_OK ? qlora_cache_query(ctx, &info) : r;
    if (r != QLORA_OK) {
        printf("%spre-warm: %s: %s\n", b->json ? "# " : "", qlora_result_name(r),
               qlora_last_error(ctx));
        b->failed++;
        qlora_ctx_destroy(ctx);
        return;
    }
    int cold = info.jit_ms > 500.0 ? 1 : 0; // with a warm cache it takes a few
    line l;
    memset(&l, 0, sizeof l);
    l.group = "prewarm";
    l.name = bars[cold].name;
    snprintf(l.size, sizeof l.size, "Qwen2.5-1.5B");
    l.us = b->dry ? 0.0 : ms * 1e3;
    l.unit = "B";
    l.share = -1.0;
    l.of = "";
    l.bar = bars[cold].bar_ms * 1e3;
    l.bar_is_most = true;
    line_print(b, &l);
    if (!b->json && !b->dry) {
        printf(
            "    context %.0f ms; %u modules, %u kernels, %.0f ms in the JIT, %u cuBLAS shapes\n",
            created - start, info.modules, info.kernels, info.jit_ms, info.cublas_shapes);
    }
    qlora_ctx_destroy(ctx);
}

// ---- main -------------------------------------------------------------------------------------

static int cpu_only(qlora_ctx* ctx) {
    enum { N = 384 };
    printf("no GPU: %s\n", qlora_ctx_reason(ctx));
    static float values[N * N];
    for (int i = 0; i < N * N; i++) {
        values[i] = (float)(i % 17) - 8.0f;
    }
    qlora_tensor t[3];
    memset(t, 0, sizeof t);
    qlora_result r = QLORA_OK;
    for (int i = 0; i < 3 && r == QLORA_OK; i++) {
        r = qlora_tensor_create(ctx, QLORA_F32, N, N, &t[i]);
        r = r == QLORA_OK ? qlora_tensor_write(ctx, &t[i], values, sizeof values) : r;
    }
    double times[5];
    for (int i = 0; i < 5 && r == QLORA_OK; i++) {
        double start = wall_ms();
        r = qlora_gemm_forward(ctx, &t[0], &t[1], &t[2], 0);
        times[i] = wall_ms() - start;
    }
    if (r == QLORA_OK) {
        double ms = median(times, 5);
        printf("CPU GEMM f32 %dx%dx%d: %.2f ms, %.2f GFLOP/s\n", N, N, N, ms,
               2e-6 * (double)N * (double)N * (double)N / ms);
    } else {
        printf("%s\n", qlora_last_error(ctx));
    }
    for (int i = 0; i < 3; i++) {
        qlora_tensor_destroy(ctx, &t[i]);
    }
    qlora_ctx_destroy(ctx);
    return r == QLORA_OK ? 0 : 1;
}

static const char* const GROUPS[] = {"ops",  "long",  "gemm",    "products",
                                     "clip", "graph", "prewarm", "all"};

// 0: continue; otherwise the exit status plus 1.
static int arguments(bench* b, int argc, char** argv, const char** group) {
    *group = "all";
    for (int i = 1; i < argc; i++) {
        bool known = false;
        for (size_t j = 0; j < sizeof GROUPS / sizeof GROUPS[0]; j++) {
            if (strcmp(argv[i], GROUPS[j]) == 0) {
                *group = GROUPS[j];
                known = true;
            }
        }
        b->json = b->json || strcmp(argv[i], "--json") == 0;
        b->quick = b->quick || strcmp(argv[i], "--quick") == 0;
        b->dry = b->dry || strcmp(argv[i], "--dry") == 0;
        bool help = strcmp(argv[i], "--help") == 0;
        known = known || help || strcmp(argv[i], "--json") == 0 ||
                strcmp(argv[i], "--quick") == 0 || strcmp(argv[i], "--dry") == 0;
        if (help || !known) {
            fprintf(known ? stdout : stderr,
                    "usage: bench [ops|long|gemm|products|clip|graph|prewarm|all] [--json]\n"
                    "             [--quick] [--dry]\n"
                    "       bench step --shape NAME --batch B --seq S ... (bench step --help)\n"
                    "       bench cpu [--tier NAME] [--threads N] [--quick] [--json]\n"
                    "       bench decode [--model PATH] [--threads N] ... (bench decode --help)\n"
                    "       bench slices [--budget MS] [--tokens N] ... (bench slices --help)\n"
                    "       bench generate --shape NAME --prompt P --new N ... (... --help)\n"
                    "  --json   print a JSON array of objects\n"
                    "  --quick  use 7 replays instead of 25\n"
                    "  --dry    run every row once, small and untimed, to check that it works\n");
            return known ? 1 : 3;
        }
    }
    return 0;
}

static bool wants(const char* group, const char* name) {
    return strcmp(group, "all") == 0 || strcmp(group, name) == 0;
}

static int gpu_run(bench* b, const char* group) {
    if (!b->json) {
        char text[2048];
        qlora_describe(b->ctx, text, sizeof text);
        printf("%s\n", text);
    } else {
        printf("[");
    }
    if (wants(group, "prewarm")) {
        prewarm_run(b); // first: nothing is compiled yet
    }
    if (!host_blocks(b) || !events_open(b)) {
        fprintf(stderr, "bench: out of memory, or the driver has no events\n");
        return 1;
    }
    if (strcmp(group, "prewarm") != 0 && strcmp(group, "graph") != 0) {
        rows_run(b, CEILINGS, sizeof CEILINGS / sizeof CEILINGS[0], "all");
        rows_run(b, ROWS, sizeof ROWS / sizeof ROWS[0], group);
    }
    if (wants(group, "graph")) {
        graph_run(b);
    }
    if (b->json) {
        printf("]\n");
    } else {
        printf("%d below their bar, %d failed\n", b->below, b->failed);
    }
    return b->failed > 0 ? 1 : 0;
}

int main(int argc, char** argv) {
    if (argc > 1 && strcmp(argv[1], "step") == 0) {
        return bench_step_main(argc - 1, argv + 1);
    }
    if (argc > 1 && strcmp(argv[1], "cpu") == 0) {
        return bench_cpu_main(argc - 1, argv + 1);
    }
    if (argc > 1 && strcmp(argv[1], "decode") == 0) {
        return bench_decode_main(argc - 1, argv + 1);
    }
    if (argc > 1 && strcmp(argv[1], "slices") == 0) {
        return bench_slices_main(argc - 1, argv + 1);
    }
    if (argc > 1 && strcmp(argv[1], "generate") == 0) {
        return bench_generate_main(argc - 1, argv + 1);
    }
    if (argc > 1 && strcmp(argv[1], "data") == 0) {
        return bench_data_main(argc - 1, argv + 1);
    }
    bench b;
    memset(&b, 0, sizeof b);
    b.random = 1;
    const char* group = NULL;
    int stop = arguments(&b, argc, argv, &group);
    if (stop != 0) {
        return stop - 1;
    }
    char why[512] = "";
    qlora_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.scratch_bytes = b.dry ? 0 : (size_t)1 << 30; // holds a whole weight in 16 bits
    desc.error_text = why;
    desc.error_text_size = sizeof why;
    if (qlora_ctx_create(&desc, &b.ctx) != QLORA_OK) {
        fprintf(stderr, "bench: %s\n", why);
        return 1;
    }
    if (qlora_ctx_backend(b.ctx) != QLORA_BACKEND_CUDA) {
        return cpu_only(b.ctx);
    }
    if (strstr(qlora_ctx_reason(b.ctx), "Fake GPU") != NULL && !b.dry) {
        fprintf(stderr, "bench: this is the tests' fake GPU, an interpreter on the CPU: its "
                        "times mean nothing (--dry runs every row without timing)\n");
        qlora_ctx_destroy(b.ctx);
        return 1;
    }
    int status = gpu_run(&b, group);
    free(b.host_f32);
    free(b.host_bf16);
    return qlora_ctx_destroy(b.ctx) == QLORA_OK ? status : 1;
}
