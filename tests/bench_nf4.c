// bench_nf4.c - NF4 and LoRA linear on the GPU at hand, against their bars.
//
//     build/bench_nf4 [--small]
//
// Every measurement is a captured graph of several steps over buffers that together exceed the L2
// cache, replayed; the time of a step is the median over replays. --small shrinks the shapes: a
// check that everything runs, not a measurement.
#define _POSIX_C_SOURCE 200809L

#include "../qlora.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { STEPS = 6, REPLAYS = 15, PARTS = QLORA_LINEAR_PARTS };

typedef struct bench {
    qlora_ctx* ctx;
    uint16_t* noise; // random bf16
    size_t noise_count;
    uint64_t key;
    int failed;
} bench;

static void must(bench* b, qlora_result r) {
    if (r != QLORA_OK) {
        fprintf(stderr, "%s: %s\n", qlora_result_name(r), qlora_last_error(b->ctx));
        exit(1);
    }
}

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static int ascending(const void* a, const void* b) {
    double x = *(const double*)a;
    double y = *(const double*)b;
    return x < y ? -1 : x > y;
}

// Microseconds of one of the STEPS that fn runs.
static double measure(bench* b, qlora_graph_fn fn, void* user) {
    qlora_graph* graph = NULL;
    double times[REPLAYS];
    must(b, fn(b->ctx, user)); // everything is loaded before the capture
    must(b, qlora_ctx_sync(b->ctx));
    must(b, qlora_graph_capture(b->ctx, ++b->key, fn, user, &graph));
    for (int i = 0; i < 3; i++) {
        must(b, qlora_graph_replay(b->ctx, graph, b->key));
    }
    for (int i = 0; i < REPLAYS; i++) {
        must(b, qlora_ctx_sync(b->ctx));
        double start = now_us();
        must(b, qlora_graph_replay(b->ctx, graph, b->key));
        must(b, qlora_graph_replay(b->ctx, graph, b->key));
        must(b, qlora_ctx_sync(b->ctx));
        times[i] = (now_us() - start) / (2.0 * STEPS);
    }
    must(b, qlora_graph_destroy(b->ctx, graph));
    qsort(times, REPLAYS, sizeof times[0], ascending);
    return times[REPLAYS / 2];
}

static void matrix(bench* b, qlora_dtype dtype, int64_t rows, int64_t cols, qlora_tensor* out) {
    must(b, qlora_tensor_create(b->ctx, dtype, rows, cols, out));
    size_t size = out->bytes;
    char* image = (char*)malloc(size + 1);
    for (size_t at = 0; at < size; at += b->noise_count * 2) {
        size_t left = size - at < b->noise_count * 2 ? size - at : b->noise_count * 2;
        memcpy(image + at, b->noise, left);
    }
    if (dtype == QLORA_F32) {
        memset(image, 0, size); // gradients
    }
    must(b, qlora_tensor_upload(b->ctx, out, image, size));
    free(image);
}

static void weight(bench* b, int64_t rows, int64_t cols, qlora_nf4* out) {
    qlora_nf4_desc desc;
    qlora_tensor source;
    memset(&desc, 0, sizeof desc);
    desc.rows = rows;
    desc.cols = cols;
    matrix(b, QLORA_BF16, rows, cols, &source);
    must(b, qlora_nf4_create(b->ctx, &desc, out));
    must(b, qlora_nf4_quantise(b->ctx, &source, out));
    must(b, qlora_tensor_destroy(b->ctx, &source));
}

static void report(bench* b, const char* name, double got, double bar, const char* unit) {
    printf("%-58s %8.2f %s (bar %.2f)%s\n", name, got, unit, bar, got >= bar ? "" : "  BELOW");
    b->failed += got < bar;
}

// ---- dequantise
// -------------------------------------------------------------------------------------

typedef struct widening {
    qlora_nf4 w[2];
    qlora_tensor out[2];
    qlora_tensor copy[2];
} widening;

static qlora_result step_copy(qlora_ctx* ctx, void* user) {
    widening* s = (widening*)user;
    qlora_result r = QLORA_OK;
    for (int i = 0; i < STEPS && r == QLORA_OK; i++) {
        r = qlora_scale(ctx, 1.0f, &s->copy[i % 2], &s->out[i % 2]);
    }
    return r;
}

static qlora_result step_widen(qlora_ctx* ctx, void* user) {
    widening* s = (widening*)user;
    qlora_result r = QLORA_OK;
    for (int i = 0; i < STEPS && r == QLORA_OK; i++) {
        r = qlora_nf4_dequantise(ctx, &s->w[i % 2], &s->out[i % 2], false);
    }
    return r;
}

static void bench_widen(bench* b, int64_t rows, int64_t cols) {
    widening s;
    for (int i = 0; i < 2; i++) {
        weight(b, rows, cols, &s.w[i]);
        matrix(b, QLORA_BF16, rows, cols, &s.out[i]);
        matrix(b, QLORA_BF16, rows, cols, &s.copy[i]);
    }
    double elements = (double)rows * (double)cols;
    double copy = elements * 4.0 / measure(b, step_copy, &s);
    double widen = elements * 2.516 / measure(b, step_widen, &s);
    printf("%-58s %8.2f GB/s\n", "copy (read and write), bf16", copy * 1e-3);
    printf("%-58s %8.2f GB/s\n", "NF4 dequantise to bf16", widen * 1e-3);
    report(b, "NF4 dequantise, part of copy", widen / copy, 0.80, "");
    for (int i = 0; i < 2; i++) {
        must(b, qlora_nf4_destroy(b->ctx, &s.w[i]));
        must(b, qlora_tensor_destroy(b->ctx, &s.out[i]));
        must(b, qlora_tensor_destroy(b->ctx, &s.copy[i]));
    }
}

// ---- fused product
// ----------------------------------------------------------------------------------

typedef struct product {
    qlora_nf4 w[STEPS]; // all of them are touched, so that none stays in the cache
    qlora_tensor x;
    qlora_tensor y;
    uint32_t flags;
} product;

static qlora_result step_product(qlora_ctx* ctx, void* user) {
    product* s = (product*)user;
    qlora_result r = QLORA_OK;
    for (int i = 0; i < STEPS && r == QLORA_OK; i++) {
        r = qlora_nf4_gemm_forward(ctx, &s->x, &s->w[i], &s->y, s->flags);
    }
    return r;
}

static void bench_product(bench* b, int64_t rows, int64_t out, int64_t in) {
    product s;
    for (int i = 0; i < STEPS; i++) {
        weight(b, out, in, &s.w[i]);
    }
    matrix(b, QLORA_BF16, rows, in, &s.x);
    matrix(b, QLORA_BF16, rows, out, &s.y);
    s.flags = QLORA_NF4_FUSED;
    double fused = measure(b, step_product, &s);
    s.flags = QLORA_NF4_UNFUSED;
    double unfused = measure(b, step_product, &s);
    char name[128];
    snprintf(name, sizeof name, "fused NF4, %d rows, W %d x %d: %.1f us, unfused %.1f us; factor",
             (int)rows, (int)out, (int)in, fused, unfused);
    report(b, name, unfused / fused, rows <= 16 ? 3.0 : 1.0, "x");
    for (int i = 0; i < STEPS; i++) {
        must(b, qlora_nf4_destroy(b->ctx, &s.w[i]));
    }
    must(b, qlora_tensor_destroy(b->ctx, &s.x));
    must(b, qlora_tensor_destroy(b->ctx, &s.y));
}

// ---- LoRA linear
// ------------------------------------------------------------------------------------

typedef struct projection {
    qlora_linear linear;
    qlora_tensor operand;
    qlora_tensor weight[PARTS];
    qlora_tensor a[PARTS];
    qlora_tensor sb[PARTS];
    qlora_tensor da[PARTS];
    qlora_tensor db[PARTS];
    qlora_tensor x;
    qlora_tensor y;
    qlora_tensor dy;
    qlora_tensor dx;
    qlora_tensor plain_w; // W alone, contiguous
    qlora_tensor plain_x;
    qlora_tensor plain_dy;
} projection;

static qlora_result step_forward(qlora_ctx* ctx, void* user) {
    projection* p = (projection*)user;
    qlora_result r = QLORA_OK;
    for (int i = 0; i < STEPS && r == QLORA_OK; i++) {
        r = qlora_linear_forward(ctx, &p->linear, &p->x, &p->y);
    }
    return r;
}

static qlora_result step_backward(qlora_ctx* ctx, void* user) {
    projection* p = (projection*)user;
    qlora_result r = QLORA_OK;
    for (int i = 0; i < STEPS && r == QLORA_OK; i++) {
        r = qlora_linear_backward(ctx, &p->linear, &p->x, &p->dy, &p->dx, 0);
    }
    return r;
}

static qlora_result bare(qlora_ctx* ctx, bool trans_b, const qlora_tensor* a, const qlora_tensor* b,
                         const qlora_tensor* c) {
    qlora_gemm_desc d;
    memset(&d, 0, sizeof d);
    d.trans_b = trans_b;
    d.alpha = 1.0f;
    return qlora_gemm(ctx, &d, a, b, c);
}

static qlora_result step_bare_forward(qlora_ctx* ctx, void* user) {
    projection* p = (projection*)user;
    qlora_result r = QLORA_OK;
    for (int i = 0; i < STEPS && r == QLORA_OK; i++) {
        r = bare(ctx, true, &p->plain_x, &p->plain_w, &p->y);
    }
    return r;
}

static qlora_result step_bare_backward(qlora_ctx* ctx, void* user) {
    projection* p = (projection*)user;
    qlora_result r = QLORA_OK;
    for (int i = 0; i < STEPS && r == QLORA_OK; i++) {
        r = bare(ctx, false, &p->plain_dy, &p->plain_w, &p->dx);
    }
    return r;
}

// times gets forward, bare forward, backward, bare backward added.
static void bench_projection(bench* b, int64_t T, int64_t in, const int64_t* outs, int32_t count,
                             double* times) {
    projection p;
    memset(&p, 0, sizeof p);
    p.linear.in = in;
    p.linear.count = count;
    for (int32_t i = 0; i < count; i++) {
        qlora_linear_part* part = &p.linear.parts[i];
        part->out = outs[i];
        part->rank = 16;
        part->scale = 2.0f;
        matrix(b, QLORA_BF16, outs[i], in, &p.weight[i]);
        matrix(b, QLORA_BF16, 16, in, &p.a[i]);
        matrix(b, QLORA_BF16, outs[i], 16, &p.sb[i]);
        matrix(b, QLORA_F32, 16, in, &p.da[i]);
        matrix(b, QLORA_F32, outs[i], 16, &p.db[i]);
        part->dense = &p.weight[i];
        part->a = &p.a[i];
        part->sb = &p.sb[i];
        part->da = &p.da[i];
        part->db = &p.db[i];
    }
    int64_t out = qlora_linear_out(&p.linear);
    int64_t pad = qlora_linear_pad(&p.linear);
    // Rows of 128 bytes' multiples; the operator takes any.
    qlora_tensor operand, x, dy;
    matrix(b, QLORA_BF16, out + pad, in + 64, &operand);
    matrix(b, QLORA_BF16, T, in + 64, &x);
    matrix(b, QLORA_BF16, T, out + 64, &dy);
    must(b, qlora_tensor_view(&operand, 0, out + pad, 0, in + pad, &p.operand));
    must(b, qlora_tensor_view(&x, 0, T, 0, in + pad, &p.x));
    must(b, qlora_tensor_view(&dy, 0, T, 0, out + pad, &p.dy));
    matrix(b, QLORA_BF16, T, out, &p.y);
    matrix(b, QLORA_BF16, T, in, &p.dx);
    matrix(b, QLORA_BF16, out, in, &p.plain_w);
    matrix(b, QLORA_BF16, T, in, &p.plain_x);
    matrix(b, QLORA_BF16, T, out, &p.plain_dy);
    p.linear.operand = &p.operand;
    must(b, qlora_linear_place(b->ctx, &p.linear, QLORA_LINEAR_WEIGHTS | QLORA_LINEAR_ADAPTERS));
    qlora_graph_fn steps[4] = {step_forward, step_bare_forward, step_backward, step_bare_backward};
    double us[4];
    for (int i = 0; i < 4; i++) {
        us[i] = measure(b, steps[i], &p);
        times[i] += us[i];
    }
    printf("  %6d -> %6d: forward %8.1f us (bare %8.1f), backward %8.1f us (bare %8.1f)\n", (int)in,
           (int)out, us[0], us[1], us[2], us[3]);
    qlora_tensor* all[] = {&operand, &x, &dy, &p.y, &p.dx, &p.plain_w, &p.plain_x, &p.plain_dy};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        must(b, qlora_tensor_destroy(b->ctx, all[i]));
    }
    for (int32_t i = 0; i < count; i++) {
        qlora_tensor* own[] = {&p.weight[i], &p.a[i], &p.sb[i], &p.da[i], &p.db[i]};
        for (size_t k = 0; k < sizeof own / sizeof own[0]; k++) {
            must(b, qlora_tensor_destroy(b->ctx, own[k]));
        }
    }
}

static void bench_linear(bench* b, int64_t T, int64_t shrink) {
    static const int64_t outs[4][3] = {
        {4096, 1024, 1024}, {4096, 0, 0}, {14336, 14336, 0}, {4096, 0, 0}};
    static const int64_t ins[4] = {4096, 4096, 4096, 14336};
    static const int32_t counts[4] = {3, 1, 2, 1};
    double times[4] = {0.0, 0.0, 0.0, 0.0};
    printf("LoRA linear, 8B shapes, rank 16, %d tokens\n", (int)T);
    for (int i = 0; i < 4; i++) {
        int64_t out[3] = {outs[i][0] / shrink, outs[i][1] / shrink, outs[i][2] / shrink};
        bench_projection(b, T, ins[i] / shrink, out, counts[i], times);
    }
    report(b, "LoRA linear forward with x A^T, part of bare cuBLAS", times[1] / times[0], 0.90, "");
    report(b, "LoRA linear backward with u, dA, dB, part of bare dX", times[3] / times[2], 0.85,
           "");
}

int main(int argc, char** argv) {
    bool small = argc > 1 && strcmp(argv[1], "--small") == 0;
    bench b;
    memset(&b, 0, sizeof b);
    char why[256] = "";
    qlora_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.require_backend = QLORA_BACKEND_CUDA;
    desc.scratch_bytes = small ? (size_t)16 << 20 : (size_t)320 << 20;
    desc.error_text = why;
    desc.error_text_size = sizeof why;
    if (qlora_ctx_create(&desc, &b.ctx) != QLORA_OK) {
        printf("bench_nf4: no GPU: %s\n", why);
        return 0;
    }
    b.noise_count = (size_t)1 << (small ? 16 : 24);
    b.noise = (uint16_t*)malloc(b.noise_count * 2);
    uint64_t state = 88172645463325252u;
    for (size_t i = 0; i < b.noise_count; i++) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        float x = ((float)((state >> 32) & 0xffffu) + (float)((state >> 16) & 0xffffu) - 65535.0f) *
                  1e-6f; // about a normal weight's size
        uint32_t u;
        memcpy(&u, &x, sizeof u);
        b.noise[i] = (uint16_t)(u >> 16);
    }
    int64_t shrink = small ? 64 : 1;
    bench_widen(&b, 28672 / shrink, 4096 / shrink);
    bench_product(&b, 1, 4096 / shrink, 14336 / shrink);
    bench_product(&b, 16, 4096 / shrink, 14336 / shrink);
    bench_product(&b, 16, 14336 / shrink, 4096 / shrink);
    bench_product(&b, 64, 14336 / shrink, 4096 / shrink);
    bench_linear(&b, small ? 24 : 8192, shrink);
    must(&b, qlora_ctx_destroy(b.ctx));
    free(b.noise);
    printf("bench_nf4: %d below their bar\n", b.failed);
    return 0;
}
