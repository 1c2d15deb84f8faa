// bench_peak.h - clocks, and the multiply-adds that bound the products of a CPU tier.
#ifndef QLORA_BENCH_PEAK_H
#define QLORA_BENCH_PEAK_H

#include "qlora.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>
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

// Sums that start with different values, with the instructions written out, because compilers
// compute equal sums once.
#if defined(__aarch64__)

// Some processors begin four multiply-adds per cycle and end them four cycles later, so that ten
// sums are too few: there are 24, as in a tile.
#define FMA_SUMS 24
#define FMA_EACH(X)                                                                                \
    X(0)                                                                                           \
    X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15) X(16) X(17)   \
        X(18) X(19) X(20) X(21) X(22) X(23)
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

// Processors begin two multiply-adds per cycle and end them at most five cycles later. There are 12
// sums in the 16 registers of AVX2 and 24 in the 32 of AVX-512, as in a tile.
#define FMA_12(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#define FMA_24(X)                                                                                  \
    FMA_12(X)                                                                                      \
    X(12) X(13) X(14) X(15) X(16) X(17) X(18) X(19) X(20) X(21) X(22) X(23)
#define FMA_START_256(i) __m256 s##i = _mm256_set1_ps(data[i]);
#define FMA_START_512(i) __m512 s##i = _mm512_set1_ps(data[i]);
#define FMA_F32(i) __asm__("vfmadd231ps %1, %2, %0" : "+v"(s##i) : "v"(a), "v"(b));
#define FMA_BF16(i) __asm__("vdpbf16ps %1, %2, %0" : "+v"(s##i) : "v"(a), "v"(b));
#define FMA_SUM_256(i) all = _mm256_add_ps(all, s##i);
#define FMA_SUM_512(i) all = _mm512_add_ps(all, s##i);

__attribute__((target("avx2,fma"))) static float cpu_fma_avx2(const float* data, int64_t n) {
    __m256 all = _mm256_setzero_ps();
    float out[8];
    FMA_12(FMA_START_256)
    for (int64_t i = 0; i < n; i++) {
        __m256 a = _mm256_loadu_ps(data + i % 16 * 8);
        __m256 b = _mm256_loadu_ps(data + i % 16 * 8 + 8);
        FMA_12(FMA_F32)
    }
    FMA_12(FMA_SUM_256)
    _mm256_storeu_ps(out, all);
    return out[0];
}

#define FMA_AVX512(name, EACH)                                                                     \
    __attribute__((target("avx512f"))) static float name(const float* data, int64_t n) {           \
        __m512 all = _mm512_setzero_ps();                                                          \
        float out[16];                                                                             \
        FMA_24(FMA_START_512)                                                                      \
        for (int64_t i = 0; i < n; i++) {                                                          \
            __m512 a = _mm512_loadu_ps(data + i % 16 * 8);                                         \
            __m512 b = _mm512_loadu_ps(data + i % 16 * 8 + 16);                                    \
            FMA_24(EACH)                                                                           \
        }                                                                                          \
        FMA_24(FMA_SUM_512)                                                                        \
        _mm512_storeu_ps(out, all);                                                                \
        return out[0];                                                                             \
    }

FMA_AVX512(cpu_fma_avx512, FMA_F32)
FMA_AVX512(cpu_fma_avx512_bf16, FMA_BF16)

// Six sums of 16 x 16, as many as there are tiles left. The context has asked for the permission.
static float cpu_fma_amx(const float* data, int64_t n) {
    uint8_t config[64];
    uint16_t bytes[8] = {64, 64, 64, 64, 64, 64, 64, 64};
    memset(config, 0, sizeof config);
    config[0] = 1;
    memcpy(config + 16, bytes, sizeof bytes);
    memset(config + 48, 16, 8);
    __asm__ volatile("ldtilecfg %0\n\t"
                     "tilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\t"
                     "tilezero %%tmm3\n\ttilezero %%tmm4\n\ttilezero %%tmm5\n\t"
                     "tileloadd (%1,%2,1), %%tmm6\n\ttileloadd (%1,%2,1), %%tmm7" ::"m"(config),
                     "r"(data), "r"((int64_t)16)
                     : "memory");
    for (int64_t i = 0; i < n; i++) {
        __asm__ volatile("tdpbf16ps %%tmm7, %%tmm6, %%tmm0\n\ttdpbf16ps %%tmm7, %%tmm6, %%tmm1\n\t"
                         "tdpbf16ps %%tmm7, %%tmm6, %%tmm2\n\ttdpbf16ps %%tmm7, %%tmm6, %%tmm3\n\t"
                         "tdpbf16ps %%tmm7, %%tmm6, %%tmm4\n\ttdpbf16ps %%tmm7, %%tmm6, %%tmm5" ::
                             : "memory");
    }
    __asm__ volatile("tilerelease" ::: "memory");
    return data[0];
}

// What a tier multiplies with, and multiply-adds per loop.
static cpu_fma_fn cpu_fma_of(qlora_cpu_tier tier, bool bf16, int64_t* each) {
    if (!qlora_cpu_tier_usable(QLORA_CPU_TIER_AVX2)) {
        return NULL;
    }
    if (bf16 && tier == QLORA_CPU_TIER_AMX) {
        *each = 6 * 16 * 16 * 32;
        return cpu_fma_amx;
    }
    if (bf16 && tier == QLORA_CPU_TIER_AVX512_BF16) {
        *each = 24 * 32;
        return cpu_fma_avx512_bf16;
    }
    bool wide = tier == QLORA_CPU_TIER_AVX512 || tier == QLORA_CPU_TIER_AVX512_BF16 ||
                tier == QLORA_CPU_TIER_AMX;
    *each = wide ? 24 * 16 : 12 * 8;
    return wide ? cpu_fma_avx512 : cpu_fma_avx2;
}

#undef FMA_12
#undef FMA_24
#undef FMA_START_256
#undef FMA_START_512
#undef FMA_F32
#undef FMA_BF16
#undef FMA_SUM_256
#undef FMA_SUM_512
#undef FMA_AVX512
#endif

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
    fma = cpu_fma_of(tier, bf16, &each);
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
