// expert_place.cuh - the operands of all experts: W with s B to its right and A below it.
#ifndef QLORA_EXPERT_PLACE_CUH
#define QLORA_EXPERT_PLACE_CUH

#include "../nf4/nf4.cuh"

enum { EXPERT_PARTS = 2, ADAPTER_BLOCK = 2048 /* elements */, STEPS = 4 /* of 4 rows each */ };

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
    void* operand;         // [height, in + pad] for each expert
    const int32_t* starts; // see routing.cu
    const void* a;         // [rank, in] for each
    const void* sb;        // [out, rank]
    int64_t in;
    int32_t out;
    int32_t rank;
    int32_t pad;
    int32_t width;
    int32_t across;   // blocks of a row
    int32_t adapters; // block of an expert from which on they write the adapters
    int32_t via_bf16; // f32 values are those of bf16
    int32_t height;   // out + pad, or more: zeros then
};

template <class T> __device__ __forceinline__ const T* at_expert(const T* p, int64_t bytes) {
    return p ? (const T*)((const char*)p + bytes) : p;
}

// What a thread reads of four rows.
struct coded_rows {
    uint32_t w[4];
    uint32_t code[4];
    float s[4];
};

// The rows are `high` apart. Those after the last one are not read.
__device__ __forceinline__ coded_rows read_rows(const expert_weight& w, const uint8_t* codes,
                                                const uint8_t* q, const float* source,
                                                int32_t source_shift, int64_t row, int64_t col,
                                                int64_t in, int32_t high) {
    coded_rows r;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        int64_t x = (row + j * high) * in + col;
        bool inside = row + j * high < w.out && col < in;
        r.w[j] = inside ? *(const uint32_t*)(codes + (x >> 1)) : 0;
        r.s[j] = inside ? source[x >> source_shift] : 0.0f;
        r.code[j] = inside && q ? q[x >> w.block_shift] : 0;
    }
    return r;
}

// Writes them; the values are those of nf4_dequantise.
template <class T>
__device__ __forceinline__ void write_rows(const coded_rows& r, const float* level,
                                           const float* map, float middle, T* to, int64_t step,
                                           int32_t count, bool narrow) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (j < count) {
            float scale = __fadd_rn(__fmul_rn(map[r.code[j]], r.s[j]), middle);
            uint32_t even = r.w[j] >> 2 & 0x3c3c3c3cu; // bytes: offsets into the table of levels
            uint32_t odd = r.w[j] << 2 & 0x3c3c3c3cu;
            float v[8];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                uint32_t at = __byte_perm(i % 2 == 0 ? even : odd, 0, 0x4440 + i / 2);
                float value = __fmul_rn(*(const float*)((const char*)level + at), scale);
                v[i] = narrow ? to_float(to_bf16(value)) : value;
            }
            store_eight(to + j * step, v);
        }
    }
}

// Block (down, right) of a matrix whose rows are whole pieces of eight: as nf4_dequantise, but with
// STEPS times as many rows, so that the tables are read less often and the next rows are on their
// way while these are written.
template <class T>
__device__ __forceinline__ void place_coded(const expert_operand& p, const expert_weight& w,
                                            int64_t bytes, T* out, int64_t ld, uint32_t down,
                                            uint32_t right) {
    __shared__ float level[16];
    __shared__ float map[256];
    const uint8_t* codes = at_expert(w.codes, bytes);
    const float* absmax = at_expert(w.absmax, bytes);
    const uint8_t* q = absmax ? 0 : at_expert(w.q, bytes);
    const float* source = absmax ? absmax : at_expert(w.scales, bytes);
    const float* maps = at_expert(w.maps, bytes);
    int32_t shift = absmax ? w.block_shift : w.block_shift + w.group_shift;
    int32_t high = 256 / p.width;
    int64_t row = (int64_t)down * STEPS * 4 * high + (int32_t)threadIdx.x / p.width;
    int64_t col = ((int64_t)right * p.width + (int32_t)threadIdx.x % p.width) * 8;
    bool narrow = sizeof(T) == 4 && p.via_bf16 != 0;
    coded_rows now = read_rows(w, codes, q, source, shift, row, col, p.in, high);
    if (threadIdx.x < 16) {
        level[threadIdx.x] = maps[threadIdx.x];
    }
    map[threadIdx.x] = absmax ? 1.0f : maps[16 + threadIdx.x];
    float middle = absmax ? 0.0f : *at_expert(w.offset, bytes);
    __syncthreads();
#pragma unroll 1
    for (int step = 0; step < STEPS; step++) {
        int64_t next = row + 4 * high;
        coded_rows later = now;
        if (step + 1 < STEPS) {
            later = read_rows(w, codes, q, source, shift, next, col, p.in, high);
        }
        int64_t left = (w.out - row + high - 1) / high;
        int32_t count = col < p.in ? (int32_t)(left < 4 ? left : 4) : 0;
        write_rows(now, level, map, middle, out + row * ld + col, high * ld, count, narrow);
        now = later;
        row = next;
    }
}

// The same for rows that are not whole pieces, element by element.
template <class T>
__device__ __forceinline__ void place_ragged(const expert_operand& p, const expert_weight& w,
                                             int64_t bytes, T* out, int64_t ld, uint32_t down,
                                             uint32_t right) {
    const uint8_t* codes = at_expert(w.codes, bytes);
    const float* absmax = at_expert(w.absmax, bytes);
    const float* maps = at_expert(w.maps, bytes);
    int32_t high = 256 / p.width;
    int64_t row = (int64_t)down * STEPS * 4 * high + (int32_t)threadIdx.x / p.width;
    int64_t col = ((int64_t)right * p.width + (int32_t)threadIdx.x % p.width) * 8;
#pragma unroll 1
    for (int i = 0; i < STEPS * 4 * 8; i++) {
        int64_t r = row + i / 8 * high;
        int64_t c = col + i % 8;
        if (r < w.out && c < p.in) {
            int64_t x = r * p.in + c;
            float scale = absmax ? absmax[x >> w.block_shift] : 0.0f;
            if (!absmax) {
                float factor = maps[16 + at_expert(w.q, bytes)[x >> w.block_shift]];
                float s = at_expert(w.scales, bytes)[x >> (w.block_shift + w.group_shift)];
                scale = __fadd_rn(__fmul_rn(factor, s), *at_expert(w.offset, bytes));
            }
            uint32_t half = (x & 1) != 0 ? codes[x >> 1] & 15 : codes[x >> 1] >> 4;
            float value = __fmul_rn(maps[half], scale);
            bool narrow = sizeof(T) == 4 && p.via_bf16 != 0;
            store(out + r * ld + c, narrow ? to_float(to_bf16(value)) : value);
        }
    }
}

// A block of the dense matrix of an expert, as nf4_dequantise has them.
template <class T>
__device__ __forceinline__ void copy_dense(const T* from, int64_t in, T* to, int64_t ld,
                                           int32_t out, int32_t width, uint32_t down,
                                           uint32_t right) {
    int32_t high = 256 / width;
    int64_t row = (int64_t)down * STEPS * 4 * high + (int32_t)threadIdx.x / width;
    int64_t col = ((int64_t)right * width + (int32_t)threadIdx.x % width) * 8;
#pragma unroll 1
    for (int j = 0; j < STEPS * 4; j++) {
        int64_t r = row + j * high;
        for (int i = 0; i < 8 && r < out && col + i < in; i++) {
            to[r * ld + col + i] = from[r * in + col + i];
        }
    }
}

// Elements of s B, [out, pad], and then of the rows of A, [pad, in + pad], with zeros beside and
// below them.
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
        } else if (at < right + ((uint32_t)p.height - (uint32_t)p.out) * ld) {
            uint32_t k = (at - right) / ld;
            uint32_t c = at - right - k * ld;
            bool inside = k < rank && c < in;
            operand[((int64_t)p.out + k) * ld + c] = inside ? a[(int64_t)k * in + c] : zero;
        }
    }
}

// Launch: 256 threads, grid (blocks of an expert, experts): those of the first matrix, with STEPS
// times the rows of nf4_dequantise's, a row of blocks after the other, of the second one, and of
// the adapters. Element-wise, one writer per output. The operand of an expert without rows is not
// written.
template <class T> __device__ __forceinline__ void place_expert(const expert_operand& p) {
    int64_t expert = blockIdx.y;
    int64_t ld = p.in + p.pad;
    T* operand = (T*)p.operand + expert * p.height * ld;
    int32_t block = (int32_t)blockIdx.x;
    if (p.starts[expert + 1] == p.starts[expert]) {
        return;
    }
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
    if ((p.in & 7) == 0 && (ld & 7) == 0 && ((uintptr_t)to & 15) == 0) {
        place_coded(p, w, bytes, to, ld, down, right);
        return;
    }
    place_ragged(p, w, bytes, to, ld, down, right);
}

#define EXPERT_PLACE(name, T)                                                                      \
    QLORA_KERNEL __launch_bounds__(256)                                                            \
        qlora_expert_place_##name(const __grid_constant__ expert_operand p) {                      \
        place_expert<T>(p);                                                                        \
    }

#endif
