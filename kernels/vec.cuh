// vec.cuh - 16-byte pieces of rows, shared by the element-wise and row-wise modules.
//
// A thread always owns `lanes<T>::N` consecutive columns (4 of f32, 8 of bf16). If every pointer
// and leading dimension is a multiple of 16 bytes, the piece is one vector access; otherwise the
// same columns are accessed one by one. Which thread sums which column never depends on alignment,
// so neither do the bits of a result.
#ifndef QLORA_VEC_CUH
#define QLORA_VEC_CUH

#include "common.cuh"

template <class T> struct lanes;

template <> struct lanes<float> { static const int N = 4; };

template <> struct lanes<bf16> { static const int N = 8; };

// Rows of p start at multiples of 16 bytes (ld in elements).
template <class T> __device__ __forceinline__ bool rows_aligned(const T* p, int64_t ld) {
    return (((uint64_t)p | (uint64_t)ld * sizeof(T)) & 15u) == 0;
}

__device__ __forceinline__ void unpack(uint4 raw, float (&v)[4]) {
    v[0] = __uint_as_float(raw.x);
    v[1] = __uint_as_float(raw.y);
    v[2] = __uint_as_float(raw.z);
    v[3] = __uint_as_float(raw.w);
}

__device__ __forceinline__ void unpack_pair(uint32_t pair, float& lo, float& hi) {
    lo = __uint_as_float(pair << 16);
    hi = __uint_as_float(pair & 0xffff0000u);
}

__device__ __forceinline__ void unpack(uint4 raw, float (&v)[8]) {
    unpack_pair(raw.x, v[0], v[1]);
    unpack_pair(raw.y, v[2], v[3]);
    unpack_pair(raw.z, v[4], v[5]);
    unpack_pair(raw.w, v[6], v[7]);
}

__device__ __forceinline__ uint4 pack(const float (&v)[4]) {
    return make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                      __float_as_uint(v[3]));
}

__device__ __forceinline__ uint4 pack(const float (&v)[8]) {
    return make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]),
                      pack_bf16(v[6], v[7]));
}

// Loads the first `count` of N columns (at most N are read); the others are set to `fill`.
template <class T>
__device__ __forceinline__ uint4 load_raw(const T* p, int64_t count, bool vec, float fill = 0.0f) {
    const int N = lanes<T>::N;
    if (vec && count >= N) {
        return *(const uint4*)p;
    }
    float v[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        v[i] = fill;
        if (i < count) {
            v[i] = to_float(p[i]);
        }
    }
    return pack(v);
}

template <class T>
__device__ __forceinline__ void store_raw(T* p, uint4 raw, int64_t count, bool vec) {
    const int N = lanes<T>::N;
    if (vec && count >= N) {
        *(uint4*)p = raw;
        return;
    }
    float v[N];
    unpack(raw, v);
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (i < count) {
            store(p + i, v[i]);
        }
    }
}

// N floats from a vector of f32 or bf16 (weights and biases may be either).
template <int N>
__device__ __forceinline__ void load_either(const void* p, int is_bf16, int64_t at, int64_t count,
                                            bool vec, float (&v)[N]) {
    if (vec && count >= N) {
        if (is_bf16) {
            const bf16* q = (const bf16*)p + at;
#pragma unroll
            for (int i = 0; i < N; i += 4) {
                uint2 raw = *(const uint2*)(q + i);
                unpack_pair(raw.x, v[i], v[i + 1]);
                unpack_pair(raw.y, v[i + 2], v[i + 3]);
            }
        } else {
            const float* q = (const float*)p + at;
#pragma unroll
            for (int i = 0; i < N; i += 4) {
                float4 raw = *(const float4*)(q + i);
                v[i] = raw.x;
                v[i + 1] = raw.y;
                v[i + 2] = raw.z;
                v[i + 3] = raw.w;
            }
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        v[i] = 0.0f;
        if (i < count) {
            v[i] = is_bf16 ? to_float(((const bf16*)p)[at + i]) : ((const float*)p)[at + i];
        }
    }
}

// Position of a thread in a row kernel. A row has `width` threads: a power of two up to 32, with
// blockDim.x / width rows in the block, or the whole block (a multiple of 32) with one row in it.
struct row_place {
    int32_t lane;
    int64_t row;
};

__device__ __forceinline__ row_place place_row(int32_t width) {
    uint32_t in_block = threadIdx.x / (uint32_t)width;
    uint32_t rows = blockDim.x / (uint32_t)width;
    row_place p;
    p.lane = (int32_t)(threadIdx.x - in_block * (uint32_t)width);
    p.row = (int64_t)blockIdx.x * rows + in_block;
    return p;
}

// Sum over the threads of one row; each of them gets the same value. `shared` holds 32 floats; all
// threads of the block must take part.
__device__ __forceinline__ float row_sum(float v, float* shared, int32_t width) {
    if (width <= 32) {
        for (int o = width >> 1; o > 0; o >>= 1) {
            v += __shfl_xor_sync(QLORA_FULL_WARP, v, o);
        }
        return v;
    }
    v = warp_sum(v);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) {
        shared[threadIdx.x >> 5] = v;
    }
    __syncthreads();
    v = (threadIdx.x & 31) < blockDim.x >> 5 ? shared[threadIdx.x & 31] : 0.0f;
    return warp_sum(v);
}

// Two such sums for the price of one pair of barriers; `shared` holds 64 floats.
__device__ __forceinline__ void row_sum_two(float& a, float& b, float* shared, int32_t width) {
    if (width <= 32) {
        a = row_sum(a, shared, width);
        b = row_sum(b, shared, width);
        return;
    }
    a = warp_sum(a);
    b = warp_sum(b);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) {
        shared[threadIdx.x >> 5] = a;
        shared[32 + (threadIdx.x >> 5)] = b;
    }
    __syncthreads();
    bool used = (threadIdx.x & 31) < blockDim.x >> 5;
    a = warp_sum(used ? shared[threadIdx.x & 31] : 0.0f);
    b = warp_sum(used ? shared[32 + (threadIdx.x & 31)] : 0.0f);
}

__device__ __forceinline__ float row_max(float v, float* shared, int32_t width) {
    if (width <= 32) {
        for (int o = width >> 1; o > 0; o >>= 1) {
            v = fmaxf(v, __shfl_xor_sync(QLORA_FULL_WARP, v, o));
        }
        return v;
    }
    v = warp_max(v);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) {
        shared[threadIdx.x >> 5] = v;
    }
    __syncthreads();
    v = shared[(threadIdx.x & 31) < blockDim.x >> 5 ? threadIdx.x & 31 : 0];
    return warp_max(v);
}

// e^x for bf16 results: about 2 ulp of f32 near zero, with one multiply and one ex2. f32 results
// use expf.
__device__ __forceinline__ float exp_of(float x, const bf16*) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
    return y;
}

__device__ __forceinline__ float exp_of(float x, const float*) {
    return expf(x);
}

#endif
