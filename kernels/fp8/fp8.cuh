// fp8.cuh - rows in e4m3, shared by the modules that write them.
//
// e4m3 has 1 bit of sign, 4 of exponent (bias 7) and 3 of mantissa, 448 at most and no infinity.
// Conversions round to nearest even and saturate; a NaN stays a NaN. Rows of codes have a pitch of
// a multiple of 16 bytes and are filled up with zeros.
#ifndef QLORA_FP8_CUH
#define QLORA_FP8_CUH

#include "../vec.cuh"

#define FP8_MOST 448.0f
#define FP8_SMALLEST 1e-30f // of a scale, so that its inverse is finite

// lo goes into the low byte, which holds the element with the smaller index.
__device__ __forceinline__ uint32_t pack_e4m3(float lo, float hi) {
    uint16_t y;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(hi), "f"(lo));
    return y;
}

__device__ __forceinline__ float fp8_scale(float most) {
    return fmaxf(__fmul_rn(most, 1.0f / FP8_MOST), FP8_SMALLEST);
}

__device__ __forceinline__ float largest_of(uint4 raw, float most) {
    float v[8];
    unpack(raw, v);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        most = fmaxf(most, fabsf(v[i]));
    }
    return most;
}

__device__ __forceinline__ uint2 codes_of(uint4 raw, float inverse) {
    float v[8];
    unpack(raw, v);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        v[i] = __fmul_rn(v[i], inverse);
    }
    return make_uint2(pack_e4m3(v[0], v[1]) | pack_e4m3(v[2], v[3]) << 16,
                      pack_e4m3(v[4], v[5]) | pack_e4m3(v[6], v[7]) << 16);
}

#endif
