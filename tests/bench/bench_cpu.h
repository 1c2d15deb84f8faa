// bench_cpu.h - what the CPU can do and what the CPU kernels reach of it, by tier and number of
// threads.
//
//     build/bench cpu [--tier NAME] [--threads N] [--quick] [--kinds] [--json]
//
// With --kinds, only where a step goes is measured; see bench_kinds.h.
// Without --quick, and not in the portable tier, a whole step of 4 x 256 tokens is also measured,
// in the shape of SmolLM2 135M; the operations counted are those of products with frozen weights.
// The peak is measured with the multiply-adds of each tier, in a loop that also loads, and again in
// turn with each product, because a processor's speed changes from one second to the next; the copy
// bandwidth with memcpy of 32 MiB. Times are the best of several. With one thread CPU time is
// measured, which other programs on the machine disturb less than the wall clock.
#ifndef QLORA_BENCH_CPU_H
#define QLORA_BENCH_CPU_H

#include "qlora.h"

#include "bench_peak.h"

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct cpu_bench {
    int tier;    // 0 = all
    int threads; // 0 = one, then all
    bool quick;
    bool kinds;
    bool json;
    bool started; // the JSON array has an element
    qlora_ctx* ctx;
    int on; // threads of the context
    qlora_cpu_tier of;
    double peak; // FLOP/s of one thread in the tier
    double copy; // bytes per second of one thread
    double last; // seconds of the last product
} cpu_bench;

// ---- ceilings -----------------------------------------------------------------------------------

// Bytes copied per second by one thread; the memory moves twice that.
static double cpu_copy(int rounds) {
    const size_t bytes = (size_t)32 << 20;
    char* from = (char*)malloc(bytes);
    char* to = (char*)malloc(bytes);
    double best = 0.0;
    if (from != NULL && to != NULL) {
        memset(from, 1, bytes);
        for (int i = 0; i < rounds + 1; i++) {
            double start = cpu_seconds(false);
            memcpy(to, from, bytes);
            double rate = (double)bytes / (cpu_seconds(false) - start);
            best = i > 0 && rate > best ? rate : best; // the first touches the pages
        }
    }
    free(from);
    free(to);
    return best;
}

// ---- rows ---------------------------------------------------------------------------------------

static void cpu_print(cpu_bench* b, const char* name, double seconds, double flops) {
    qlora_ctx_info info;
    memset(&info, 0, sizeof info);
    const char* tier = b->ctx != NULL && qlora_ctx_query(b->ctx, &info) == QLORA_OK
                           ? qlora_cpu_tier_name(info.desc->cpu_tier)
                           : "-";
    double share = b->peak > 0.0 ? flops / seconds / (b->peak * b->on) : 0.0;
    if (b->json) {
        printf("%s\n{\"name\": \"%s\", \"tier\": \"%s\", \"threads\": %d, \"us\": %.2f, "
               "\"gflops\": %.2f, \"peak_percent\": %.1f}",
               b->started ? "," : "", name, tier, b->on, seconds * 1e6, flops / seconds * 1e-9,
               100.0 * share);
        b->started = true;
    } else {
        printf("  %-9s %2d  %-38s %10.1f us %8.2f GFLOP/s %5.1f %%\n", tier, b->on, name,
               seconds * 1e6, flops / seconds * 1e-9, 100.0 * share);
    }
    fflush(stdout);
}

typedef struct cpu_product {
    const char* name;
    int64_t m;
    int64_t n;
    int64_t k;
    int form; // 0: x W^T, 1: dy W, 2: u^T x
    int base; // 0: f32, 1: bf16 operands, 2: NF4 weight
    bool x16; // x is bf16, next to an NF4 weight
} cpu_product;

static const cpu_product cpu_products[] = {
    {"y = x W^T 1024 x 1536 x 576 f32", 1024, 1536, 576, 0, 0, false},
    {"y = x W^T 1024 x 576 x 1536 f32", 1024, 576, 1536, 0, 0, false},
    {"dx = dy W 1024 x 576 x 1536 f32", 1024, 576, 1536, 1, 0, false},
    {"y = x W^T 1024 x 1536 x 576 bf16", 1024, 1536, 576, 0, 1, false},
    {"y = x W^T 1024 x 1536 x 576 NF4", 1024, 1536, 576, 0, 2, false},
    {"y = x W^T 1024 x 576 x 1536 NF4", 1024, 576, 1536, 0, 2, false},
    {"dx = dy W 1024 x 576 x 1536 NF4", 1024, 576, 1536, 1, 2, false},
    {"y = x W^T 1024 x 1536 x 576 NF4, bf16 x", 1024, 1536, 576, 0, 2, true},
    {"y = x W^T 1024 x 576 x 1536 NF4, bf16 x", 1024, 576, 1536, 0, 2, true},
    {"dx = dy W 1024 x 576 x 1536 NF4, bf16 dy", 1024, 576, 1536, 1, 2, true},
    {"z = x A^T 1024 x 16 x 576 f32", 1024, 16, 576, 0, 0, false},
    {"dA = u^T x 16 x 576 x 1024 f32", 16, 576, 1024, 2, 0, false},
    {"decode 1 x 1536 x 576 NF4", 1, 1536, 576, 0, 2, false},
    {"decode 1 x 576 x 1536 NF4", 1, 576, 1536, 0, 2, false},
    {"decode 1 x 49152 x 576 bf16", 1, 49152, 576, 0, 1, false},
    {"decode 4 x 1536 x 576 NF4", 4, 1536, 576, 0, 2, false},
};

typedef struct cpu_set {
    qlora_tensor a;
    qlora_tensor b;
    qlora_tensor c;
    qlora_nf4 w;
} cpu_set;

static bool cpu_fill(cpu_bench* b, qlora_dtype dtype, int64_t rows, int64_t cols, qlora_tensor* t) {
    int64_t n = rows * cols;
    qlora_tensor f32;
    float* values = (float*)malloc((size_t)n * sizeof *values);
    uint64_t state = 12345;
    memset(t, 0, sizeof *t);
    if (values == NULL || qlora_tensor_create(b->ctx, dtype, rows, cols, t) != QLORA_OK ||
        qlora_tensor_create(b->ctx, QLORA_F32, rows, cols, &f32) != QLORA_OK) {
        free(values);
        return false;
    }
    for (int64_t i = 0; i < n; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        values[i] = (float)(state >> 40) * (2.0f / 16777216.0f) - 1.0f;
    }
    bool ok = qlora_tensor_write(b->ctx, &f32, values, (size_t)n * sizeof *values) == QLORA_OK &&
              (dtype == QLORA_F32
                   ? qlora_tensor_write(b->ctx, t, values, (size_t)n * sizeof *values) == QLORA_OK
                   : qlora_cast(b->ctx, &f32, t) == QLORA_OK);
    qlora_tensor_destroy(b->ctx, &f32);
    free(values);
    return ok;
}

static bool cpu_set_make(cpu_bench* b, const cpu_product* p, cpu_set* s) {
    memset(s, 0, sizeof *s);
    qlora_dtype dtype = p->base == 1 ? QLORA_BF16 : QLORA_F32;
    bool transposed = p->form == 0; // B is stored [n, k]
    bool ok = cpu_fill(b, p->x16 ? QLORA_BF16 : dtype, p->form == 2 ? p->k : p->m,
                       p->form == 2 ? p->m : p->k, &s->a) &&
              cpu_fill(b, dtype, transposed ? p->n : p->k, transposed ? p->k : p->n, &s->b) &&
              cpu_fill(b, QLORA_F32, p->m, p->n, &s->c);
    if (ok && p->base == 2) {
        qlora_nf4_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.rows = s->b.rows;
        desc.cols = s->b.cols;
        ok = qlora_nf4_create(b->ctx, &desc, &s->w) == QLORA_OK &&
             qlora_nf4_quantise(b->ctx, &s->b, &s->w) == QLORA_OK;
    }
    return ok;
}

static bool cpu_multiply(cpu_bench* b, const cpu_product* p, const cpu_set* s) {
    if (p->base == 2) {
        return (p->form == 0 ? qlora_nf4_gemm_forward(b->ctx, &s->a, &s->w, &s->c, 0)
                             : qlora_nf4_gemm_backward(b->ctx, &s->a, &s->w, &s->c, 0)) == QLORA_OK;
    }
    qlora_gemm_desc d;
    memset(&d, 0, sizeof d);
    d.trans_a = p->form == 2;
    d.trans_b = p->form == 0;
    d.alpha = 1.0f;
    return qlora_gemm(b->ctx, &d, &s->a, &s->b, &s->c) == QLORA_OK;
}

static bool cpu_product_run(cpu_bench* b, const cpu_product* p) {
    cpu_set s;
    double flops = 2.0 * (double)p->m * (double)p->n * (double)p->k;
    int64_t calls = 1 + (int64_t)(2e7 / flops);
    double best = 1e30;
    double peak = 0.0;
    bool ok = cpu_set_make(b, p, &s) && cpu_multiply(b, p, &s);
    for (int i = 0; ok && i < (b->quick ? 3 : 15); i++) {
        peak = fmax(peak, cpu_peak(b->of, p->x16 || p->base == 1, 1, 100000));
        double start = cpu_seconds(b->on > 1);
        for (int64_t j = 0; j < calls && ok; j++) {
            ok = cpu_multiply(b, p, &s);
        }
        double seconds = (cpu_seconds(b->on > 1) - start) / (double)calls;
        best = seconds < best ? seconds : best;
    }
    b->last = best;
    if (ok) {
        double start_peak = b->peak;
        b->peak = peak;
        cpu_print(b, p->name, best, flops);
        b->peak = start_peak;
    } else {
        fprintf(stderr, "bench cpu: %s: %s\n", p->name, qlora_last_error(b->ctx));
    }
    qlora_nf4_destroy(b->ctx, &s.w);
    qlora_tensor_destroy(b->ctx, &s.a);
    qlora_tensor_destroy(b->ctx, &s.b);
    qlora_tensor_destroy(b->ctx, &s.c);
    return ok;
}

#include "bench_decode.h"
#include "bench_rows.h"

#include "bench_kinds.h"

// All products, and how much longer those with NF4 weights take than those with f32 weights.
static bool cpu_products_run(cpu_bench* b) {
    enum { COUNT = sizeof cpu_products / sizeof cpu_products[0] };
    double seconds[COUNT];
    bool ok = true;
    for (int i = 0; ok && i < COUNT; i++) {
        const cpu_product* p = &cpu_products[i];
        ok = cpu_product_run(b, p);
        seconds[i] = b->last;
        for (int j = 0; ok && j < i; j++) {
            const cpu_product* q = &cpu_products[j];
            bool pair = p->base == 2 && !p->x16 && q->base == 0 && p->m == q->m && p->n == q->n &&
                        p->k == q->k && p->form == q->form;
            double percent = 100.0 * (seconds[i] / seconds[j] - 1.0);
            if (pair && b->json) {
                printf(",\n{\"name\": \"%s costs\", \"percent\": %.1f}", p->name, percent);
            } else if (pair) {
                printf("                %-38s %+10.1f %% against f32\n", p->name, percent);
            }
        }
    }
    return ok;
}

// Whole steps; two operations for each weight, forward and for dx.
static bool cpu_steps_run(cpu_bench* b) {
    const double weights = 30.0 * (2 * 576 * 576 + 2 * 192 * 576 + 3 * 576 * 1536) + 49152.0 * 576;
    static const struct {
        const char* name;
        int base;
        int mode;
    } bases[] = {{"step smollm2-135m 4 x 256 NF4", 0, 0},
                 {"step smollm2-135m 4 x 256 f32", 2, 0},
                 {"step smollm2-135m 4 x 256 NF4, mode bf16", 0, 3},
                 {"step smollm2-135m 4 x 256 f32, mode bf16", 2, 3}};
    bool ok = true;
    for (size_t i = 0; ok && i < sizeof bases / sizeof bases[0]; i++) {
        double seconds = 0.0;
        ok = step_seconds_of(b->ctx, "smollm2-135m", bases[i].base, bases[i].mode, 4, 256,
                             b->on > 1, &seconds);
        if (ok) {
            cpu_print(b, bases[i].name, seconds, 4.0 * 1024 * weights);
        }
    }
    return ok;
}

// All rows in one tier with one number of threads.
static bool cpu_bench_on(cpu_bench* b, qlora_cpu_tier tier, int threads) {
    char why[512] = "";
    qlora_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.require_backend = QLORA_BACKEND_CPU;
    desc.cpu_tier = tier;
    desc.threads = threads;
    desc.error_text = why;
    desc.error_text_size = sizeof why;
    if (qlora_ctx_create(&desc, &b->ctx) != QLORA_OK) {
        fprintf(stderr, "bench cpu: %s\n", why);
        return false;
    }
    qlora_ctx_info info;
    bool ok = qlora_ctx_query(b->ctx, &info) == QLORA_OK;
    b->on = ok ? info.desc->threads : 1;
    b->of = tier;
    b->peak = cpu_peak(tier, true, b->quick ? 3 : 10, 2000000);
    if (tier == QLORA_CPU_TIER_NEON_BF16 || tier == QLORA_CPU_TIER_AVX512_BF16 ||
        tier == QLORA_CPU_TIER_AMX) {
        cpu_print(b, "peak of one thread, bf16", 1e-6, b->peak * 1e-6);
    }
    b->peak = cpu_peak(tier, false, b->quick ? 3 : 10, 2000000);
    cpu_print(b, "peak of one thread", 1e-6, b->peak * 1e-6);
    if (b->kinds) {
        ok = ok && cpu_kinds_run(b, true) && cpu_kinds_run(b, false);
    } else {
        ok = ok && cpu_products_run(b) && cpu_rows_run(b) && cpu_decode_run(b);
    }
    ok = ok && (b->quick || b->kinds || tier == QLORA_CPU_TIER_PORTABLE || cpu_steps_run(b));
    ok = qlora_ctx_destroy(b->ctx) == QLORA_OK && ok;
    b->ctx = NULL;
    return ok;
}

static bool cpu_bench_parse(cpu_bench* b, int argc, char** argv) {
    memset(b, 0, sizeof *b);
    for (int i = 1; i < argc; i++) {
        const char* value = i + 1 < argc ? argv[i + 1] : "";
        bool known = strcmp(argv[i], "--json") == 0 || strcmp(argv[i], "--quick") == 0 ||
                     strcmp(argv[i], "--kinds") == 0;
        b->kinds = b->kinds || strcmp(argv[i], "--kinds") == 0;
        b->json = b->json || strcmp(argv[i], "--json") == 0;
        b->quick = b->quick || strcmp(argv[i], "--quick") == 0;
        if (strcmp(argv[i], "--threads") == 0) {
            b->threads = atoi(value);
            known = b->threads > 0 && b->threads <= 64;
            i++;
        } else if (strcmp(argv[i], "--tier") == 0) {
            for (int t = 1; t < QLORA_CPU_TIER_COUNT; t++) {
                b->tier = strcmp(value, qlora_cpu_tier_name((qlora_cpu_tier)t)) == 0 ? t : b->tier;
            }
            known = b->tier != 0;
            i++;
        }
        if (!known) {
            fprintf(stderr,
                    "usage: bench cpu [--tier NAME] [--threads N] [--quick] [--kinds] [--json]\n");
            return false;
        }
    }
    return true;
}

static int bench_cpu_main(int argc, char** argv) {
    cpu_bench b;
    if (!cpu_bench_parse(&b, argc, argv)) {
        return 2;
    }
    bool ok = true;
    b.copy = cpu_copy(b.quick ? 3 : 10);
    if (b.json) {
        printf("[{\"name\": \"copy\", \"gb_per_s\": %.2f}", b.copy * 1e-9);
        b.started = true;
    } else {
        printf("copy, one thread: %.2f GB/s\n", b.copy * 1e-9);
    }
    for (int t = 1; t < QLORA_CPU_TIER_COUNT && ok; t++) {
        qlora_cpu_tier tier = (qlora_cpu_tier)t;
        if ((b.tier != 0 && b.tier != t) || (b.tier == 0 && !qlora_cpu_tier_usable(tier))) {
            continue;
        }
        ok = (b.threads > 1 || cpu_bench_on(&b, tier, 1)) &&
             (b.threads == 1 || cpu_bench_on(&b, tier, b.threads));
    }
    printf(b.json ? "\n]\n" : "\n");
    return ok ? 0 : 1;
}

#endif
