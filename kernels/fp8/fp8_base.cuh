// fp8_base.cuh - frozen weights in e4m3 with a scale per block of 128 x 128 elements.
//
// codes is [rows, cols], scales is [ceil(rows / 128), ceil(cols / 128)]; blocks at the right and
// lower edges are smaller.
#ifndef QLORA_FP8_BASE_CUH
#define QLORA_FP8_BASE_CUH

#include "../common.cuh"

#define FP8_BASE_MOST 448.0f
#define FP8_BASE_SMALLEST 1e-30f // of a scale, so that its inverse is finite

// Rounds to nearest even and saturates at 448, in integer arithmetic; x is finite.
__device__ __forceinline__ uint32_t to_e4m3(float x) {
    uint32_t u = __float_as_uint(x);
    uint32_t sign = u >> 24 & 0x80u;
    uint32_t a = u & 0x7fffffffu;
    // Below the smallest normal number, 2^-6, the addition rounds: 16384 has an ulp of 2^-9.
    uint32_t low = __float_as_uint(__fadd_rn(__uint_as_float(a), 16384.0f)) - 0x46800000u;
    uint32_t high = (a + 0x7ffffu + (a >> 20 & 1u) - 0x3c000000u) >> 20;
    return sign | (a < 0x3c800000u ? low : a >= 0x43e00000u ? 0x7eu : high);
}

// The value of a code times 2^-8: its bits are those of an f16, subnormal numbers included. A NaN
// does not occur: models refuse it.
__device__ __forceinline__ float from_e4m3(uint32_t code) {
    f16 x;
    x.bits = (uint16_t)((code & 0x80u) << 8 | (code & 0x7fu) << 7);
    return to_float(x);
}

//   scale = max(max |w| of the block / 448, 1e-30), code = e4m3(w * (1 / scale))
//
// w is [rows, cols] with leading dimension ld. If a value of the block is not finite, its scale is
// a NaN. Launch: 256 threads, grid (ceil(cols / 128), ceil(rows / 128)). Each thread has one column
// of every second row. A maximum does not depend on the order; one writer per output.
template <typename T>
__device__ __forceinline__ void fp8_base_quantise(const T* w, int64_t ld, int64_t rows,
                                                  int64_t cols, uint8_t* codes, float* scales) {
    __shared__ uint32_t shared[8];
    int64_t col = (int64_t)blockIdx.x * 128 + threadIdx.x % 128;
    int64_t row0 = (int64_t)blockIdx.y * 128 + threadIdx.x / 128;
    // The bits of magnitudes have the order of their values, and those of a NaN come last.
    uint32_t most = 0;
#pragma unroll 4
    for (int i = 0; i < 128; i += 2) {
        if (col < cols && row0 + i < rows) {
            uint32_t size = __float_as_uint(to_float(w[(row0 + i) * ld + col])) & 0x7fffffffu;
            most = size > most ? size : most;
        }
    }
    for (int o = 16; o > 0; o >>= 1) {
        uint32_t other = __shfl_xor_sync(QLORA_FULL_WARP, most, o);
        most = other > most ? other : most;
    }
    if (threadIdx.x % 32 == 0) {
        shared[threadIdx.x / 32] = most;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; i++) {
        most = shared[i] > most ? shared[i] : most;
    }
    bool finite = most < 0x7f800000u;
    float scale = fmaxf(__fmul_rn(__uint_as_float(most), 1.0f / FP8_BASE_MOST), FP8_BASE_SMALLEST);
    float inverse = finite ? __frcp_rn(scale) : 0.0f;
#pragma unroll 4
    for (int i = 0; i < 128; i += 2) {
        if (finite && col < cols && row0 + i < rows) {
            float x = to_float(w[(row0 + i) * ld + col]);
            codes[(row0 + i) * cols + col] = (uint8_t)to_e4m3(__fmul_rn(x, inverse));
        }
    }
    if (threadIdx.x == 0) {
        scales[(int64_t)blockIdx.y * gridDim.x + blockIdx.x] =
            finite ? scale : __uint_as_float(0x7fc00000u);
    }
}

#define FP8_BASE_QUANTISE(name, type)                                                              \
    QLORA_KERNEL __launch_bounds__(256) qlora_fp8_base_quantise_##name(                            \
        const type* w, int64_t ld, int64_t rows, int64_t cols, uint8_t* codes, float* scales) {    \
        fp8_base_quantise(w, ld, rows, cols, codes, scales);                                       \
    }

__device__ __forceinline__ void store_bf16_values(bf16* p, const float* v) {
    *(uint4*)p = make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]),
                            pack_bf16(v[6], v[7]));
}

__device__ __forceinline__ void store_bf16_values(float* p, const float* v) {
    float r[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        r[i] = to_float(to_bf16(v[i]));
    }
    ((float4*)p)[0] = make_float4(r[0], r[1], r[2], r[3]);
    ((float4*)p)[1] = make_float4(r[4], r[5], r[6], r[7]);
}

// out[r, c] = bf16(code * scale) of element (row0 + r, col0 + c), for an output of
// [out_rows, out_cols] with leading dimension ld; an f32 output has the same values. A thread
// handles eight consecutive elements in each of four rows, with one 8-byte load and one 16-byte
// store (two for f32) each. A block of 256 threads is `width` threads wide (a power of two, 1 ...
// 256) and 256 / width rows high, four times. Launch: 256 threads, grid
// (ceil(out_rows / (4 * 256 / width)), ceil(out_cols / (8 * width))). One writer per output.
template <typename T>
__device__ __forceinline__ void fp8_base_dequantise(const uint8_t* codes, const float* scales,
                                                    int64_t cols, int64_t row0, int64_t col0,
                                                    T* out, int64_t out_rows, int64_t out_cols,
                                                    int64_t ld, int32_t width) {
    int32_t high = 256 / width;
    int64_t row = (int64_t)blockIdx.x * 4 * high + (int32_t)threadIdx.x / width;
    int64_t col = ((int64_t)blockIdx.y * width + (int32_t)threadIdx.x % width) * 8;
    int64_t across = (cols + 127) >> 7;
    bool whole = ((uintptr_t)codes & 7) == 0 && ((uintptr_t)out & 15) == 0 && (cols & 7) == 0 &&
                 (col0 & 7) == 0 && (ld & 7) == 0 && out_cols - col >= 8;
    if (col >= out_cols) {
        return;
    }
    if (whole) {
        uint2 raw[4];
        float scale[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int64_t r = row0 + row + j * high;
            raw[j] = make_uint2(0, 0);
            scale[j] = 0.0f;
            if (row + j * high < out_rows) {
                raw[j] = *(const uint2*)(codes + r * cols + col0 + col);
                scale[j] = __fmul_rn(scales[(r >> 7) * across + ((col0 + col) >> 7)], 256.0f);
            }
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float v[8];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                uint32_t code = (i < 4 ? raw[j].x : raw[j].y) >> 8 * (i & 3) & 255u;
                v[i] = __fmul_rn(from_e4m3(code), scale[j]);
            }
            if (row + j * high < out_rows) {
                store_bf16_values(out + (row + j * high) * ld + col, v);
            }
        }
        return;
    }
#pragma unroll 1
    for (int j = 0; j < 4 && row + j * high < out_rows; j++) {
        int64_t r = row0 + row + j * high;
#pragma unroll 1
        for (int i = 0; i < 8 && i < out_cols - col; i++) {
            int64_t c = col0 + col + i;
            float scale = __fmul_rn(scales[(r >> 7) * across + (c >> 7)], 256.0f);
            float value = __fmul_rn(from_e4m3(codes[r * cols + c]), scale);
            store(out + (row + j * high) * ld + col + i, to_float(to_bf16(value)));
        }
    }
}

#define FP8_BASE_DEQUANTISE(name, type)                                                            \
    QLORA_KERNEL __launch_bounds__(256) qlora_fp8_base_dequantise_##name(                          \
        const uint8_t* codes, const float* scales, int64_t cols, int64_t row0, int64_t col0,       \
        type* out, int64_t out_rows, int64_t out_cols, int64_t ld, int32_t width) {                \
        fp8_base_dequantise(codes, scales, cols, row0, col0, out, out_rows, out_cols, ld, width);  \
    }

#endif
