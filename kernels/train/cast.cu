// cast.cu - conversions between f32, bf16 and f16, and the scaled cast that keeps gradients within
// the range of f16.
// targets: 75
//
//   dst[r,c] = round_to_nearest_even(src[r,c] * scale)      scale read from device memory, or 1
//
// src and dst are [rows, cols] with leading dimensions src_ld and dst_ld, and any alignment.
// Launch: 256 threads, grid (min(ceil(cols / 2048), 65535), min(rows, 65535)); the kernels loop, so
// a smaller grid gives the same result. A matrix without gaps is cast faster as a single row.
// Determinism: element-wise.
#include "../common.cuh"

struct four {
    float v[4];
};

__device__ __forceinline__ four load_four(const float* p) {
    float4 x = *(const float4*)p;
    four y = {{x.x, x.y, x.z, x.w}};
    return y;
}

__device__ __forceinline__ four load_four(const bf16* p) {
    uint2 x = *(const uint2*)p;
    four y = {{__uint_as_float(x.x << 16), __uint_as_float(x.x & 0xffff0000u),
               __uint_as_float(x.y << 16), __uint_as_float(x.y & 0xffff0000u)}};
    return y;
}

__device__ __forceinline__ four load_four(const f16* p) {
    uint2 x = *(const uint2*)p;
    f16 h[4];
    h[0].bits = (uint16_t)x.x;
    h[1].bits = (uint16_t)(x.x >> 16);
    h[2].bits = (uint16_t)x.y;
    h[3].bits = (uint16_t)(x.y >> 16);
    four y = {{to_float(h[0]), to_float(h[1]), to_float(h[2]), to_float(h[3])}};
    return y;
}

__device__ __forceinline__ void store_four(float* p, const four& x) {
    *(float4*)p = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
}

__device__ __forceinline__ void store_four(bf16* p, const four& x) {
    *(uint2*)p = make_uint2(pack_bf16(x.v[0], x.v[1]), pack_bf16(x.v[2], x.v[3]));
}

__device__ __forceinline__ uint32_t pack_f16(float lo, float hi) {
    return (uint32_t)to_f16(lo).bits | (uint32_t)to_f16(hi).bits << 16;
}

__device__ __forceinline__ void store_four(f16* p, const four& x) {
    *(uint2*)p = make_uint2(pack_f16(x.v[0], x.v[1]), pack_f16(x.v[2], x.v[3]));
}

template <typename S, typename D>
__device__ __forceinline__ void cast_rows(const S* src, D* dst, int64_t rows, int64_t cols,
                                          int64_t src_ld, int64_t dst_ld,
                                          const float* scale_device) {
    float scale = scale_device ? *scale_device : 1.0f;
    bool aligned = (uintptr_t)src % (4 * sizeof(S)) == 0 && (uintptr_t)dst % (4 * sizeof(D)) == 0;
    aligned = aligned && (rows <= 1 || (src_ld % 4 == 0 && dst_ld % 4 == 0));
    for (int64_t r = blockIdx.y; r < rows; r += gridDim.y) {
        const S* from = src + r * src_ld;
        D* to = dst + r * dst_ld;
        for (int64_t c0 = (int64_t)blockIdx.x * 2048; c0 < cols; c0 += (int64_t)gridDim.x * 2048) {
            if (aligned && cols - c0 >= 2048) {
                four x[2];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    x[j] = load_four(from + c0 + 1024 * j + 4 * threadIdx.x);
                }
#pragma unroll
                for (int j = 0; j < 2; j++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        x[j].v[i] *= scale;
                    }
                    store_four(to + c0 + 1024 * j + 4 * threadIdx.x, x[j]);
                }
                continue;
            }
            int64_t end = cols - c0 < 2048 ? cols : c0 + 2048;
#pragma unroll 1
            for (int64_t c = c0 + threadIdx.x; c < end; c += 256) {
                store(to + c, to_float(from[c]) * scale);
            }
        }
    }
}

#define CAST(from, to, S, D)                                                                       \
    QLORA_KERNEL __launch_bounds__(256)                                                            \
        qlora_cast_##from##_##to(const S* src, D* dst, int64_t rows, int64_t cols, int64_t src_ld, \
                                 int64_t dst_ld, const float* scale_device) {                      \
        cast_rows(src, dst, rows, cols, src_ld, dst_ld, scale_device);                             \
    }
CAST(f32, bf16, float, bf16)
CAST(f32, f16, float, f16)
CAST(bf16, f32, bf16, float)
CAST(f16, f32, f16, float)
CAST(bf16, f16, bf16, f16)
CAST(f16, bf16, f16, bf16)

__device__ __forceinline__ uint32_t block_max(uint32_t v, uint32_t* shared) {
    shared[threadIdx.x] = v;
    __syncthreads();
    for (int o = 128; o > 0; o >>= 1) {
        if (threadIdx.x < o) {
            uint32_t other = shared[threadIdx.x + o];
            shared[threadIdx.x] = other > shared[threadIdx.x] ? other : shared[threadIdx.x];
        }
        __syncthreads();
    }
    return shared[0];
}

// partials[block] = largest |x| in the block's share, compared as bit patterns: those of NaN and
// infinity are larger than those of any finite number, so either one reaches the result. Launch:
// 256 threads, grid at most 1024.
QLORA_KERNEL __launch_bounds__(256)
    qlora_cast_absmax_f32(const float* x, int64_t rows, int64_t cols, int64_t ld,
                          uint32_t* partials) {
    __shared__ uint32_t shared[256];
    uint32_t best = 0;
    int64_t per_row = (cols + 2047) / 2048;
    int64_t pieces = rows * per_row;
    for (int64_t piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
        int64_t c0 = piece % per_row * 2048;
        int64_t end = cols - c0 < 2048 ? cols : c0 + 2048;
        const float* from = x + piece / per_row * ld;
#pragma unroll 4
        for (int64_t c = c0 + threadIdx.x; c < end; c += 256) {
            uint32_t u = __float_as_uint(from[c]) & 0x7fffffffu;
            best = u > best ? u : best;
        }
    }
    best = block_max(best, shared);
    if (threadIdx.x == 0) {
        partials[blockIdx.x] = best;
    }
}

// scale[0] = the power of two that brings the largest |x| into [2^13, 2^14), or 1 if the maximum is
// zero or not finite; scale[1] = alpha / scale[0], the factor that undoes the scaling in a product.
// Both powers stay normal numbers. count = number of partials. Launch: one block of 256 threads.
QLORA_KERNEL __launch_bounds__(256)
    qlora_cast_scale(const uint32_t* partials, int32_t count, float alpha, float* scale) {
    __shared__ uint32_t shared[256];
    uint32_t best = 0;
#pragma unroll 1
    for (int32_t i = (int32_t)threadIdx.x; i < count; i += 256) {
        best = partials[i] > best ? partials[i] : best;
    }
    best = block_max(best, shared);
    if (threadIdx.x == 0) {
        int32_t e = 0;
        if (best != 0 && best < 0x7f800000u) {
            e = 13 - ((int32_t)(best >> 23) - 127);
            e = e > 126 ? 126 : e;
        }
        scale[0] = __uint_as_float((uint32_t)(127 + e) << 23);
        scale[1] = alpha * __uint_as_float((uint32_t)(127 - e) << 23);
    }
}
