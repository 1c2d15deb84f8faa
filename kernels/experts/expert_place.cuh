// expert_place.cuh - the operands of all experts: W with s B to its right and A below it.
#ifndef QLORA_EXPERT_PLACE_CUH
#define QLORA_EXPERT_PLACE_CUH

#include "../nf4/nf4.cuh"

enum { EXPERT_PARTS = 2, ADAPTER_BLOCK = 2048 /* elements */ };

// Same layout as qlora__expert_weight: a matrix of the first expert. Those of the next one are
// `stride` bytes further.
struct expert_weight {
    const uint8_t* codes; // null: the matrix is dense
    const float* absmax;  // null if the scales are double-quantised
    const uint8_t* q;
    const float* scales;
    const float* offset;
    const float* maps;
    const void* dense;
    int64_t stride;
    int32_t out;
    int32_t block_shift; // log2
    int32_t group_shift;
    int32_t first; // block of the expert
};

// Same layout as qlora__expert_operand.
struct expert_operand {
    expert_weight parts[EXPERT_PARTS];
    void* operand;  // [out + pad, in + pad] for each expert
    const void* a;  // [rank, in] for each
    const void* sb; // [out, rank]
    int64_t in;
    int32_t out;
    int32_t rank;
    int32_t pad;
    int32_t width;
    int32_t across;   // blocks of a row
    int32_t adapters; // block of an expert from which on they write the adapters
    int32_t via_bf16; // f32 values are those of bf16
    int32_t unused;
};

template <class T> __device__ __forceinline__ const T* at_expert(const T* p, int64_t bytes) {
    return p ? (const T*)((const char*)p + bytes) : p;
}

// A block of the dense matrix of an expert, as nf4_dequantise has them.
template <class T>
__device__ __forceinline__ void copy_dense(const T* from, int64_t in, T* to, int64_t ld,
                                           int32_t out, int32_t width, uint32_t down,
                                           uint32_t right) {
    int32_t high = 256 / width;
    int64_t row = (int64_t)down * 4 * high + (int32_t)threadIdx.x / width;
    int64_t col = ((int64_t)right * width + (int32_t)threadIdx.x % width) * 8;
#pragma unroll 1
    for (int j = 0; j < 4; j++) {
        int64_t r = row + j * high;
        for (int i = 0; i < 8 && r < out && col + i < in; i++) {
            to[r * ld + col + i] = from[r * in + col + i];
        }
    }
}

// Elements of s B, [out, pad], and then of the rows of A, [pad, in + pad], with zeros beside them.
template <class T>
__device__ __forceinline__ void place_adapters(const expert_operand& p, T* operand, int64_t expert,
                                               int32_t block) {
    const T* a = (const T*)p.a + expert * p.rank * p.in;
    const T* sb = (const T*)p.sb + expert * p.out * p.rank;
    uint32_t in = (uint32_t)p.in;
    uint32_t pad = (uint32_t)p.pad;
    uint32_t rank = (uint32_t)p.rank;
    uint32_t ld = in + pad;
    uint32_t right = (uint32_t)p.out * pad; // below 2^31, as the host checks
    T zero;
    store(&zero, 0.0f);
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < ADAPTER_BLOCK; i += 256) {
        uint32_t at = (uint32_t)block * ADAPTER_BLOCK + i;
        if (at < right) {
            uint32_t row = at / pad;
            uint32_t k = at - row * pad;
            operand[(int64_t)row * ld + in + k] = k < rank ? sb[(int64_t)row * rank + k] : zero;
        } else if (at < right + pad * ld) {
            uint32_t k = (at - right) / ld;
            uint32_t c = at - right - k * ld;
            bool inside = k < rank && c < in;
            operand[((int64_t)p.out + k) * ld + c] = inside ? a[(int64_t)k * in + c] : zero;
        }
    }
}

// Launch: 256 threads, grid (blocks of an expert, experts): those of the first matrix, as many as
// for nf4_dequantise, a row of blocks after the other, of the second one, and of the adapters.
// Element-wise, one writer per output.
template <class T> __device__ __forceinline__ void place_expert(const expert_operand& p) {
    int64_t expert = blockIdx.y;
    int64_t ld = p.in + p.pad;
    T* operand = (T*)p.operand + expert * (p.out + p.pad) * ld;
    int32_t block = (int32_t)blockIdx.x;
    if (block >= p.adapters) {
        place_adapters(p, operand, expert, block - p.adapters);
        return;
    }
    bool second = block >= p.parts[1].first;
    const expert_weight& w = p.parts[second ? 1 : 0];
    T* to = operand + (second ? p.parts[0].out * ld : 0);
    int64_t bytes = expert * w.stride;
    block -= w.first;
    uint32_t down = (uint32_t)(block / p.across);
    uint32_t right = (uint32_t)(block % p.across);
    if (w.codes == 0) {
        copy_dense(at_expert((const T*)w.dense, bytes), p.in, to, ld, w.out, p.width, down, right);
        return;
    }
    nf4_dequantise(at_expert(w.codes, bytes), at_expert(w.absmax, bytes), at_expert(w.q, bytes),
                   at_expert(w.scales, bytes), at_expert(w.offset, bytes),
                   at_expert(w.maps, bytes), p.in, 0, 0, to, w.out, p.in, ld, w.block_shift,
                   w.group_shift, p.width, p.via_bf16, down, right);
}

#define EXPERT_PLACE(name, T)                                                                      \
    QLORA_KERNEL __launch_bounds__(256)                                                            \
        qlora_expert_place_##name(const __grid_constant__ expert_operand p) {                      \
        place_expert<T>(p);                                                                        \
    }

#endif
