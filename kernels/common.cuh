// common.cuh - shared by all kernels: 16-bit storage types, conversions, reductions.
//
// No CUDA headers are used: the conversions are written out, so that the PTX stays within the
// instructions of its target (.version 6.3 for sm_75, 7.0 for sm_80) whatever the toolkit's headers
// would emit.
#ifndef QLORA_COMMON_CUH
#define QLORA_COMMON_CUH

#include <stdint.h>

#define QLORA_KERNEL extern "C" __global__ void
#define QLORA_FULL_WARP 0xffffffffu

struct bf16 {
    uint16_t bits;
};

struct f16 {
    uint16_t bits;
};

__device__ __forceinline__ float to_float(float x) {
    return x;
}

__device__ __forceinline__ float to_float(bf16 x) {
    return __uint_as_float((uint32_t)x.bits << 16);
}

__device__ __forceinline__ float to_float(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

// Rounds to nearest even; a NaN stays a NaN.
__device__ __forceinline__ bf16 to_bf16(float x) {
    bf16 y;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
    uint32_t u = __float_as_uint(x);
    uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    y.bits = (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded);
#endif
    return y;
}

// lo goes into the low half, which holds the element with the smaller index.
__device__ __forceinline__ uint32_t pack_bf16(float lo, float hi) {
#if __CUDA_ARCH__ >= 800
    uint32_t y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
    return y;
#else
    return (uint32_t)to_bf16(lo).bits | (uint32_t)to_bf16(hi).bits << 16;
#endif
}

__device__ __forceinline__ f16 to_f16(float x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

__device__ __forceinline__ void store(float* p, float x) {
    *p = x;
}

__device__ __forceinline__ void store(bf16* p, float x) {
    *p = to_bf16(x);
}

__device__ __forceinline__ void store(f16* p, float x) {
    *p = to_f16(x);
}

__device__ __forceinline__ float warp_sum(float v) {
    for (int o = 16; o > 0; o >>= 1) {
        v += __shfl_xor_sync(QLORA_FULL_WARP, v, o);
    }
    return v;
}

__device__ __forceinline__ float warp_max(float v) {
    for (int o = 16; o > 0; o >>= 1) {
        v = fmaxf(v, __shfl_xor_sync(QLORA_FULL_WARP, v, o));
    }
    return v;
}

#endif
