// linear.cuh - helpers of the LoRA linear operator, apart from its matrix products.
//
// The operand of a stack of up to three projections is one matrix of [out + pad, in + pad],
//
//     [ W1   sB1  0    0    0 ]      W_i [out_i, in] the frozen weights, sB_i [out_i, rank_i] and
//     [ W2   0    sB2  0    0 ]      A_i [rank_i, in] the adapters, pad = sum of ranks rounded up
//     [ W3   0    0    sB3  0 ]      to a multiple of 8
//     [ A1   0    0    0    0 ]
//     [ A2   ...              ]
//     [ A3                    ]
//     [ 0                     ]
//
// so that y = [x z] [W sB]^T and dx = [dy u] [W ; A] are one product each.
#ifndef QLORA_LINEAR_CUH
#define QLORA_LINEAR_CUH

#include "../common.cuh"

#define LINEAR_PART(n)                                                                             \
    const void *a##n, int64_t lda##n, const void *sb##n, int64_t ldsb##n, int64_t out##n,          \
        int32_t rank##n

// Writes eight consecutive elements with one store, zeros if `from` is null. Returns false, and
// writes nothing, if the type or an address does not allow it.
template <typename T>
__device__ __forceinline__ bool place_eight(const T* from, T* to) {
    if (sizeof(T) != 2 || (((uintptr_t)from | (uintptr_t)to) & 15) != 0) {
        return false;
    }
    *(uint4*)to = from ? *(const uint4*)from : make_uint4(0, 0, 0, 0);
    return true;
}

// Writes the whole operand except the W_i. A part without an adapter has rank 0; an absent part
// also has out 0. A thread writes eight columns of the short piece to the right of a row of W, a
// block 2048 columns of a row below W; `block` is its number. Launch: 256 threads, grid
// ceil(out * pad / 2048) + pad * ceil((in + pad) / 2048). Element-wise, one writer per output.
template <typename T>
__device__ __forceinline__ void place(T* operand, int64_t ld, int64_t in, int32_t pad,
                                      LINEAR_PART(1), LINEAR_PART(2), LINEAR_PART(3),
                                      uint32_t block) {
    int64_t out = out1 + out2 + out3;
    uint32_t eights = (uint32_t)pad / 8;
    int64_t beside = (out * pad + 2047) / 2048;
    T zero;
    store(&zero, 0.0f);
    if (block < beside) {
        uint32_t number = block * 256 + threadIdx.x; // of out * eights
        int64_t row = number / eights;
        if (row >= out) {
            return;
        }
        int32_t col = (int32_t)(number % eights) * 8;
        T* to = operand + row * ld + in + col;
        int32_t part = row < out1 ? 0 : row < out1 + out2 ? 1 : 2;
        int64_t r = part == 0 ? row : part == 1 ? row - out1 : row - out1 - out2;
        int32_t first = part == 0 ? 0 : part == 1 ? rank1 : rank1 + rank2;
        int32_t rank = part == 0 ? rank1 : part == 1 ? rank2 : rank3;
        const T* sb = (const T*)(part == 0 ? sb1 : part == 1 ? sb2 : sb3);
        sb += r * (part == 0 ? ldsb1 : part == 1 ? ldsb2 : ldsb3) + col - first;
        bool none = col + 8 <= first || col >= first + rank;
        bool all = col >= first && col + 8 <= first + rank;
        if ((none || all) && place_eight(all ? sb : nullptr, to)) {
            return;
        }
#pragma unroll
        for (int32_t k = 0; k < 8; k++) {
            to[k] = col + k >= first && col + k < first + rank ? sb[k] : zero;
        }
        return;
    }
    uint32_t pieces = (uint32_t)((in + pad + 2047) / 2048);
    uint32_t below = (uint32_t)(block - beside);
    int64_t r = below / pieces;
    int64_t c = (int64_t)(below % pieces) * 2048 + threadIdx.x;
    T* to = operand + (out + r) * ld;
    int32_t part = r < rank1 ? 0 : r < rank1 + rank2 ? 1 : r < rank1 + rank2 + rank3 ? 2 : 3;
    const T* a = (const T*)(part == 0 ? a1 : part == 1 ? a2 : part == 2 ? a3 : nullptr);
    r -= part == 0 ? 0 : part == 1 ? rank1 : rank1 + rank2;
    a += part == 3 ? 0 : r * (part == 0 ? lda1 : part == 1 ? lda2 : lda3);
#pragma unroll
    for (int k = 0; k < 8; k++, c += 256) {
        if (c < in + pad) {
            to[c] = part < 3 && c < in ? a[c] : zero;
        }
    }
}

#define LINEAR_PLACE(name, type)                                                                   \
    QLORA_KERNEL __launch_bounds__(256)                                                            \
        qlora_linear_place_##name(type* operand, int64_t ld, int64_t in, int32_t pad,              \
                                  LINEAR_PART(1), LINEAR_PART(2), LINEAR_PART(3)) {                \
        place(operand, ld, in, pad, a1, lda1, sb1, ldsb1, out1, rank1, a2, lda2, sb2, ldsb2, out2, \
              rank2, a3, lda3, sb3, ldsb3, out3, rank3, blockIdx.x);                               \
    }

// y[r,c] = bias[c], for a product to be accumulated into, or y[r,c] += bias[c] with add != 0; y is
// [rows, cols] with leading dimension ld.
// Launch: 256 threads, grid (ceil(cols / 256), min(rows, 65535)). Element-wise.
template <typename T>
__device__ __forceinline__ void spread(const T* bias, T* y, int64_t rows, int64_t cols, int64_t ld,
                                       int32_t add) {
    int64_t c = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (c < cols) {
        float value = to_float(bias[c]);
#pragma unroll 1
        for (int64_t r = blockIdx.y; r < rows; r += gridDim.y) {
            T* p = y + r * ld + c;
            store(p, add != 0 ? to_float(*p) + value : value);
        }
    }
}

#define LINEAR_BIAS(name, type)                                                                    \
    QLORA_KERNEL __launch_bounds__(256) qlora_linear_bias_##name(                                  \
        const type* bias, type* y, int64_t rows, int64_t cols, int64_t ld, int32_t add) {          \
        spread(bias, y, rows, cols, ld, add);                                                      \
    }

// Several adapters stand side by side in the columns of z and u. Sets to zero what belongs to
// another adapter than the row: x [rows, cols] with leading dimension ld, x[r,c] = 0 unless
// columns[c] == owners[r]. cols is a multiple of 8, and columns is aligned to 16 bytes. Zeros are
// stored, not multiplied, so that nothing of the other adapters remains.
// x is what the first `width` columns of the same rows, at `inner`, were multiplied to. In a
// product over all rows, a zero does not stop a value there that is not finite. With state, such a
// row, which has a value that is not finite in its own columns, is set to zero as a whole, and
// state[owners[r]] = 2; several threads may write the same.
// Launch: 256 threads, grid ceil(rows cols / 2048): a thread has 8 columns of a row.
// Element-wise, one writer per output.
template <typename T>
__device__ __forceinline__ void keep_own(T* x, int64_t ld, int64_t rows, int32_t cols,
                                         const int32_t* owners, const int32_t* columns, T* inner,
                                         int64_t width, int32_t* state) {
    int64_t piece = (int64_t)blockIdx.x * 256 + threadIdx.x;
    int64_t row = piece / (cols / 8);
    int32_t c = (int32_t)(piece - row * (cols / 8)) * 8;
    if (row >= rows) {
        return;
    }
    int32_t own = owners[row];
    T* to = x + row * ld + c;
    T zero;
    store(&zero, 0.0f);
    int4 low = *(const int4*)(columns + c);
    int4 high = *(const int4*)(columns + c + 4);
    const int32_t whose[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    bool none = true;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        none = none && whose[i] != own;
    }
    if (none && ((uint64_t)to & 15) == 0) {
#pragma unroll
        for (int i = 0; i < (int)sizeof(T) / 2; i++) {
            ((uint4*)to)[i] = make_uint4(0, 0, 0, 0);
        }
        return;
    }
    bool bad = false;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (whose[i] != own) {
            to[i] = zero;
        } else if (state != 0 && !(fabsf(to_float(to[i])) <= 3.4028235e38f)) {
            to[i] = zero;
            bad = true;
        }
    }
    if (bad) {
        state[own] = 2;
        for (int64_t k = 0; k < width; k++) {
            inner[row * ld + k] = zero;
        }
    }
}

#define LINEAR_KEEP_OWN(name, type)                                                                \
    QLORA_KERNEL __launch_bounds__(256)                                                            \
        qlora_linear_keep_own_##name(type* x, int64_t ld, int64_t rows, int32_t cols,              \
                                     const int32_t* owners, const int32_t* columns, type* inner,   \
                                     int64_t width, int32_t* state) {                              \
        keep_own(x, ld, rows, cols, owners, columns, inner, width, state);                         \
    }

#endif
