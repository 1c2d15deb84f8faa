// bench_cpu.h - what the CPU can do and what the CPU kernels reach of it, by tier and number of
// threads.
//
//     build/bench cpu [--tier NAME] [--threads N] [--quick] [--json]
//
// The peak is measured with the multiply-adds of each tier, in a loop that also loads; the copy
// bandwidth with memcpy of 32 MiB. Times are the best of several. With one thread CPU time is
// measured, which other programs on the machine disturb less than the wall clock.
#ifndef QLORA_BENCH_CPU_H
#define QLORA_BENCH_CPU_H

#include "qlora.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__x86_64__)
#include <immintrin.h>
#endif

typedef struct cpu_bench {
    int tier;    // 0 = all
    int threads; // 0 = one, then all
    bool quick;
    bool json;
    bool started; // the JSON array has an element
    qlora_ctx* ctx;
    int on;      // threads of the context
    double peak; // FLOP/s of one thread in the tier
    double copy; // bytes per second of one thread
} cpu_bench;

static double cpu_seconds(bool wall) {
    struct timespec t;
    clock_gettime(wall ? CLOCK_MONOTONIC : CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

// ---- ceilings -----------------------------------------------------------------------------------

// 16 multiply-adds in each of n rounds, `width` floats each; returns a value that depends on all.
typedef float (*cpu_fma_fn)(const float* data, int64_t n);

#define FMA_ROUND(fma, a, b)                                                                       \
    s0 = fma(s0, a, b), s1 = fma(s1, a, b), s2 = fma(s2, a, b), s3 = fma(s3, a, b),                \
    s4 = fma(s4, a, b), s5 = fma(s5, a, b), s6 = fma(s6, a, b), s7 = fma(s7, a, b),                \
    s8 = fma(s8, a, b), s9 = fma(s9, a, b)

#if defined(__aarch64__)

static float cpu_fma_neon(const float* data, int64_t n) {
    float32x4_t s0 = vdupq_n_f32(0.0f), s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0, s6 = s0;
    float32x4_t s7 = s0, s8 = s0, s9 = s0;
    for (int64_t i = 0; i < n; i++) {
        const float* at = data + i % 16 * 8;
        float32x4_t a = vld1q_f32(at);
        float32x4_t b = vld1q_f32(at + 4);
        FMA_ROUND(vfmaq_f32, a, b);
    }
    s0 = vaddq_f32(vaddq_f32(vaddq_f32(s0, s1), vaddq_f32(s2, s3)), vaddq_f32(s4, s5));
    s0 = vaddq_f32(vaddq_f32(s0, s6), vaddq_f32(vaddq_f32(s7, s8), s9));
    return vgetq_lane_f32(s0, 0);
}

#elif defined(__x86_64__)

#define FMA_256(s, a, b) _mm256_fmadd_ps(a, b, s)
#define FMA_512(s, a, b) _mm512_fmadd_ps(a, b, s)

__attribute__((target("avx2,fma"))) static float cpu_fma_avx2(const float* data, int64_t n) {
    __m256 s0 = _mm256_setzero_ps(), s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0, s6 = s0;
    __m256 s7 = s0, s8 = s0, s9 = s0;
    float out[8];
    for (int64_t i = 0; i < n; i++) {
        const float* at = data + i % 16 * 8;
        __m256 a = _mm256_loadu_ps(at);
        __m256 b = _mm256_loadu_ps(at + 8);
        FMA_ROUND(FMA_256, a, b);
    }
    s0 = _mm256_add_ps(_mm256_add_ps(_mm256_add_ps(s0, s1), _mm256_add_ps(s2, s3)), s4);
    s5 = _mm256_add_ps(_mm256_add_ps(_mm256_add_ps(s5, s6), _mm256_add_ps(s7, s8)), s9);
    _mm256_storeu_ps(out, _mm256_add_ps(s0, s5));
    return out[0];
}

__attribute__((target("avx512f"))) static float cpu_fma_avx512(const float* data, int64_t n) {
    __m512 s0 = _mm512_setzero_ps(), s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0, s6 = s0;
    __m512 s7 = s0, s8 = s0, s9 = s0;
    float out[16];
    for (int64_t i = 0; i < n; i++) {
        const float* at = data + i % 16 * 8;
        __m512 a = _mm512_loadu_ps(at);
        __m512 b = _mm512_loadu_ps(at + 16);
        FMA_ROUND(FMA_512, a, b);
    }
    s0 = _mm512_add_ps(_mm512_add_ps(_mm512_add_ps(s0, s1), _mm512_add_ps(s2, s3)), s4);
    s5 = _mm512_add_ps(_mm512_add_ps(_mm512_add_ps(s5, s6), _mm512_add_ps(s7, s8)), s9);
    _mm512_storeu_ps(out, _mm512_add_ps(s0, s5));
    return out[0];
}

#undef FMA_256
#undef FMA_512
#endif

#undef FMA_ROUND

// FLOP/s of one thread; 0 if the tier has no vectors of its own.
static double cpu_peak(qlora_cpu_tier tier, int rounds) {
    float data[256];
    cpu_fma_fn fma = NULL;
    int64_t width = 0;
    double best = 0.0;
    volatile float kept = 0.0f;
    for (int i = 0; i < 256; i++) {
        data[i] = 1e-3f * (float)i;
    }
#if defined(__aarch64__)
    fma = cpu_fma_neon; // the compiler uses the same registers in the portable tier
    width = 4;
    (void)tier;
#elif defined(__x86_64__)
    fma = tier == QLORA_CPU_TIER_AVX512 ? cpu_fma_avx512 : cpu_fma_avx2;
    width = tier == QLORA_CPU_TIER_AVX512 ? 16 : 8;
    if (!qlora_cpu_tier_usable(QLORA_CPU_TIER_AVX2)) {
        return 0.0;
    }
#else
    (void)tier;
#endif
    for (int i = 0; i < rounds && fma != NULL; i++) {
        const int64_t n = 4000000;
        double start = cpu_seconds(false);
        kept = fma(data, n);
        double rate = (double)(n * 10 * 2 * width) / (cpu_seconds(false) - start);
        best = rate > best ? rate : best;
    }
    (void)kept;
    return best;
}

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
} cpu_product;

static const cpu_product cpu_products[] = {
    {"y = x W^T 1024 x 1536 x 576 f32", 1024, 1536, 576, 0, 0},
    {"y = x W^T 1024 x 576 x 1536 f32", 1024, 576, 1536, 0, 0},
    {"dx = dy W 1024 x 576 x 1536 f32", 1024, 576, 1536, 1, 0},
    {"y = x W^T 1024 x 1536 x 576 bf16", 1024, 1536, 576, 0, 1},
    {"y = x W^T 1024 x 1536 x 576 NF4", 1024, 1536, 576, 0, 2},
    {"y = x W^T 1024 x 576 x 1536 NF4", 1024, 576, 1536, 0, 2},
    {"dx = dy W 1024 x 576 x 1536 NF4", 1024, 576, 1536, 1, 2},
    {"z = x A^T 1024 x 16 x 576 f32", 1024, 16, 576, 0, 0},
    {"dA = u^T x 16 x 576 x 1024 f32", 16, 576, 1024, 2, 0},
    {"decode 1 x 1536 x 576 NF4", 1, 1536, 576, 0, 2},
    {"decode 1 x 576 x 1536 NF4", 1, 576, 1536, 0, 2},
    {"decode 1 x 49152 x 576 bf16", 1, 49152, 576, 0, 1},
    {"decode 4 x 1536 x 576 NF4", 4, 1536, 576, 0, 2},
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
    bool turned = p->form == 0; // B is stored [n, k]
    bool ok = cpu_fill(b, dtype, p->form == 2 ? p->k : p->m, p->form == 2 ? p->m : p->k, &s->a) &&
              cpu_fill(b, dtype, turned ? p->n : p->k, turned ? p->k : p->n, &s->b) &&
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
    bool ok = cpu_set_make(b, p, &s) && cpu_multiply(b, p, &s);
    for (int i = 0; ok && i < (b->quick ? 3 : 15); i++) {
        double start = cpu_seconds(b->on > 1);
        for (int64_t j = 0; j < calls && ok; j++) {
            ok = cpu_multiply(b, p, &s);
        }
        double seconds = (cpu_seconds(b->on > 1) - start) / (double)calls;
        best = seconds < best ? seconds : best;
    }
    if (ok) {
        cpu_print(b, p->name, best, flops);
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
    b->peak = cpu_peak(tier, b->quick ? 3 : 10);
    cpu_print(b, "peak of one thread", 1e-6, b->peak * 1e-6);
    for (size_t i = 0; ok && i < sizeof cpu_products / sizeof cpu_products[0]; i++) {
        ok = cpu_product_run(b, &cpu_products[i]);
    }
    ok = ok && cpu_rows_run(b) && cpu_decode_run(b);
    ok = qlora_ctx_destroy(b->ctx) == QLORA_OK && ok;
    b->ctx = NULL;
    return ok;
}

static bool cpu_bench_parse(cpu_bench* b, int argc, char** argv) {
    memset(b, 0, sizeof *b);
    for (int i = 1; i < argc; i++) {
        const char* value = i + 1 < argc ? argv[i + 1] : "";
        bool known = strcmp(argv[i], "--json") == 0 || strcmp(argv[i], "--quick") == 0;
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
            fprintf(stderr, "usage: bench cpu [--tier NAME] [--threads N] [--quick] [--json]\n");
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
