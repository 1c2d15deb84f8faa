// bench_peak.h - clocks, and the multiply-adds that bound the products of a CPU tier.
#ifndef QLORA_BENCH_PEAK_H
#define QLORA_BENCH_PEAK_H

#include "qlora.h"

#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__x86_64__)
#include <immintrin.h>
#endif

// CPU time of this thread alone: the others of a context may still be waiting for work.
static double cpu_own_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double cpu_seconds(bool wall) {
    struct timespec t;
    clock_gettime(wall ? CLOCK_MONOTONIC : CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

// Multiply-adds in n rounds; returns a value that depends on all.
typedef float (*cpu_fma_fn)(const float* data, int64_t n);

#define FMA_ROUND(fma, a, b)                                                                       \
    s0 = fma(s0, a, b), s1 = fma(s1, a, b), s2 = fma(s2, a, b), s3 = fma(s3, a, b),                \
    s4 = fma(s4, a, b), s5 = fma(s5, a, b), s6 = fma(s6, a, b), s7 = fma(s7, a, b),                \
    s8 = fma(s8, a, b), s9 = fma(s9, a, b)

#if defined(__aarch64__)

// Some processors begin four multiply-adds per cycle and end them four cycles later, so that ten
// sums are too few: there are 24, as in a tile. They start with different values, and the
// instructions are written out, because compilers compute equal sums once.
#define FMA_SUMS 24
#define FMA_EACH(X)                                                                                \
    X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15) X(16)    \
    X(17) X(18) X(19) X(20) X(21) X(22) X(23)
#define FMA_START(i) float32x4_t s##i = vdupq_n_f32(data[i]);
#define FMA_F32(i) __asm__("fmla %0.4s, %1.4s, %2.4s" : "+w"(s##i) : "w"(a), "w"(b));
#define FMA_BF16(i) __asm__("bfmmla %0.4s, %1.8h, %2.8h" : "+w"(s##i) : "w"(a), "w"(b));
#define FMA_SUM(i) all = vaddq_f32(all, s##i);

static float cpu_fma_neon(const float* data, int64_t n) {
    float32x4_t all = vdupq_n_f32(0.0f);
    FMA_EACH(FMA_START)
    for (int64_t i = 0; i < n; i++) {
        float32x4_t a = vld1q_f32(data + i % 16 * 8);
        float32x4_t b = vld1q_f32(data + i % 16 * 8 + 4);
        FMA_EACH(FMA_F32)
    }
    FMA_EACH(FMA_SUM)
    return vgetq_lane_f32(all, 0);
}

#if defined(__clang__)
__attribute__((target("bf16")))
#else
__attribute__((target("+bf16")))
#endif
static float
cpu_fma_neon_bf16(const float* data, int64_t n) {
    float32x4_t all = vdupq_n_f32(0.0f);
    FMA_EACH(FMA_START)
    for (int64_t i = 0; i < n; i++) {
        float32x4_t a = vld1q_f32(data + i % 16 * 8);
        float32x4_t b = vld1q_f32(data + i % 16 * 8 + 4);
        FMA_EACH(FMA_BF16)
    }
    FMA_EACH(FMA_SUM)
    return vgetq_lane_f32(all, 0);
}

#undef FMA_EACH
#undef FMA_START
#undef FMA_F32
#undef FMA_BF16
#undef FMA_SUM

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

// FLOP/s of one thread, the best of some rounds of n loops; 0 if the tier has no vectors of its
// own. bf16: of products whose operands are bf16.
static double cpu_peak(qlora_cpu_tier tier, bool bf16, int rounds, int64_t n) {
    float data[256];
    cpu_fma_fn fma = NULL;
    int64_t each = 0; // multiply-adds per loop
    double best = 0.0;
    volatile float kept = 0.0f;
    for (int i = 0; i < 256; i++) {
        data[i] = 1e-3f * (float)i;
    }
#if defined(__aarch64__)
    bool has = bf16 && tier == QLORA_CPU_TIER_NEON_BF16;
    fma = has ? cpu_fma_neon_bf16 : cpu_fma_neon; // the portable tier uses the same registers
    each = FMA_SUMS * (has ? 16 : 4);
#elif defined(__x86_64__)
    (void)bf16;
    fma = tier == QLORA_CPU_TIER_AVX512 ? cpu_fma_avx512 : cpu_fma_avx2;
    each = 10 * (tier == QLORA_CPU_TIER_AVX512 ? 16 : 8);
    if (!qlora_cpu_tier_usable(QLORA_CPU_TIER_AVX2)) {
        return 0.0;
    }
#else
    (void)tier;
    (void)bf16;
#endif
    for (int i = 0; i < rounds && fma != NULL; i++) {
        double start = cpu_own_seconds();
        kept = fma(data, n);
        double rate = (double)(n * each * 2) / (cpu_own_seconds() - start);
        best = rate > best ? rate : best;
    }
    (void)kept;
    return best;
}

#endif
