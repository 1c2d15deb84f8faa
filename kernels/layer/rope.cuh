// rope.cuh - rotary position embedding on packed rows, in place.
#ifndef QLORA_ROPE_CUH
#define QLORA_ROPE_CUH

#include "../vec.cuh"

// x is [rows, heads * dim]; heads 0 .. rotated-1 (the q and k heads) are rotated, the others (v)
// only get the bias. Of a head, the first 2 half columns are rotated, the rest only get the bias.
// Pair i is (i, i + half), or (2 i, 2 i + 1) with neighbours != 0. With p = positions[row] and
// (c, s) = (table[p][i], table[p][half + i]), the pair (a, b) at columns (u, v):
//   a = x[u] + bias[u], b = x[v] + bias[v];   x[u] = a c - b s * sign, x[v] = b c + a s * sign
// sign = 1 forward, -1 backward (rotation by the negative angle). bias [heads * dim] may be
// null; then the caller passes heads = rotated. A position outside [0, max_pos) leaves the row
// unchanged and sets *bad to 1. Launch: grid.x = rows; threads a multiple of 32 up to 256. A block
// iterates over the pieces of its row: N pairs (N = 4 for f32, 8 for bf16) of each of ROPE_HEADS
// heads, which share the cosines and sines. Each element has one writer.
#define ROPE_HEADS 2

template <class T> struct rope_row {
    T* x;
    const float* turn; // cosines, then sines
    const void* bias;
    int32_t bias_bf16;
    int32_t dim;
    int32_t half;
    int32_t neighbours;
    uint32_t heads;
    uint32_t groups; // ceil(heads / ROPE_HEADS): the stride between a thread's heads
    uint32_t rotated;
    float sign;
    bool inside;
};

// Rounds explicitly, whatever the surrounding code: the vector and the scalar path below must agree
// in every bit.
__device__ __forceinline__ void rotate(float& a, float& b, float cosine, float sine) {
    float turned = __fmaf_rn(a, cosine, -__fmul_rn(b, sine));
    b = __fmaf_rn(b, cosine, __fmul_rn(a, sine));
    a = turned;
}

template <class T, int N>
__device__ __forceinline__ void rope_bias(const rope_row<T>& r, uint32_t at, float (&v)[N]) {
    float add[N];
    load_either<N>(r.bias, r.bias_bf16, at, N, true, add);
#pragma unroll
    for (int k = 0; k < N; k++) {
        v[k] += add[k];
    }
}

// Columns i .. i + N - 1 of both halves of heads group, group + groups ..., 16-byte aligned. All of
// x is requested before the table, whose address depends on the position. A head past the last one
// reads the first of the group again and writes nothing.
template <class T>
__device__ __forceinline__ void rope_piece(const rope_row<T>& r, uint32_t group, int32_t i) {
    const int N = lanes<T>::N;
    uint32_t at[ROPE_HEADS];
    uint4 lo[ROPE_HEADS];
    uint4 hi[ROPE_HEADS];
#pragma unroll
    for (int h = 0; h < ROPE_HEADS; h++) {
        uint32_t head = group + (uint32_t)h * r.groups;
        at[h] = (head < r.heads ? head : group) * (uint32_t)r.dim + (uint32_t)i;
        lo[h] = *(const uint4*)(r.x + at[h]);
        hi[h] = *(const uint4*)(r.x + at[h] + r.half);
    }
    float c[N];
    float s[N];
#pragma unroll
    for (int q = 0; q < N; q += 4) {
        *(float4*)(c + q) = *(const float4*)(r.turn + i + q);
        *(float4*)(s + q) = *(const float4*)(r.turn + r.half + i + q);
    }
#pragma unroll
    for (int h = 0; h < ROPE_HEADS; h++) {
        uint32_t head = group + (uint32_t)h * r.groups;
        float a[N];
        float b[N];
        unpack(lo[h], a);
        unpack(hi[h], b);
        if (r.bias != 0) {
            rope_bias(r, at[h], a);
            rope_bias(r, at[h] + (uint32_t)r.half, b);
        }
        if (head < r.rotated) {
#pragma unroll
            for (int k = 0; k < N; k++) {
                rotate(a[k], b[k], c[k], s[k] * r.sign);
            }
        }
        if (r.inside && head < r.heads) {
            *(uint4*)(r.x + at[h]) = pack(a);
            *(uint4*)(r.x + at[h] + r.half) = pack(b);
        }
    }
}

// One column with its bias.
template <class T> __device__ __forceinline__ float rope_column(const rope_row<T>& r, int64_t at) {
    float x = to_float(r.x[at]);
    if (r.bias != 0) {
        x += r.bias_bf16 ? to_float(((const bf16*)r.bias)[at]) : ((const float*)r.bias)[at];
    }
    return x;
}

// One pair, for any alignment.
template <class T>
__device__ __forceinline__ void rope_pair(const rope_row<T>& r, uint32_t head, int32_t i) {
    int64_t first = (int64_t)head * r.dim + (r.neighbours ? 2 * i : i);
    int64_t second = first + (r.neighbours ? 1 : r.half);
    float a = rope_column(r, first);
    float b = rope_column(r, second);
    if (head < r.rotated) {
        rotate(a, b, r.turn[i], r.turn[r.half + i] * r.sign);
    }
    if (r.inside) {
        store(r.x + first, a);
        store(r.x + second, b);
    }
}

// Adds the bias to the columns that are not rotated.
template <class T> __device__ __forceinline__ void rope_rest(const rope_row<T>& r) {
    uint32_t rest = (uint32_t)(r.dim - 2 * r.half);
    for (uint32_t k = threadIdx.x; k < rest * r.heads; k += blockDim.x) {
        int64_t at = (int64_t)(k / rest) * r.dim + 2 * r.half + k % rest;
        float x = rope_column(r, at);
        if (r.inside) {
            store(r.x + at, x);
        }
    }
}

// The position is read only where it is needed, so that the loads of x do not wait for it.
template <class T>
__device__ __forceinline__ void
rope(T* x, int64_t ld, const int32_t* positions, const float* table, int64_t ld_table,
     int32_t max_pos, const void* bias, int32_t bias_bf16, int32_t heads, int32_t rotated,
     int32_t half, float sign, int32_t* bad, int32_t dim, int32_t neighbours) {
    const int N = lanes<T>::N;
    int64_t row = blockIdx.x;
    int32_t position = positions[row];
    rope_row<T> r;
    r.inside = position >= 0 && position < max_pos;
    if (!r.inside && threadIdx.x == 0) {
        *bad = 1;
    }
    if (max_pos <= 0) {
        return;
    }
    r.x = x + row * ld;
    r.turn = table + (r.inside ? position : 0) * ld_table;
    r.bias = bias;
    r.bias_bf16 = bias_bf16;
    r.dim = dim;
    r.half = half;
    r.neighbours = neighbours;
    r.heads = (uint32_t)heads;
    r.groups = (r.heads + ROPE_HEADS - 1) / ROPE_HEADS;
    r.rotated = (uint32_t)rotated;
    r.sign = sign;
    bool vec = rows_aligned(x, ld) && rows_aligned(table, ld_table) &&
               rows_aligned((const float*)bias, 0) && half % N == 0 && dim % N == 0 && !neighbours;
    uint32_t pieces = (uint32_t)(half + N - 1) / N;
    uint32_t items = pieces * r.groups;
    for (uint32_t item = threadIdx.x; item < items; item += blockDim.x) {
        uint32_t group = item / pieces;
        int32_t i = (int32_t)(item - group * pieces) * N;
        if (vec) {
            rope_piece(r, group, i);
            continue;
        }
        for (uint32_t head = group; head < r.heads; head += r.groups) {
            for (int32_t k = i; k < i + N && k < half; k++) {
                rope_pair(r, head, k);
            }
        }
    }
    if (bias != 0 && dim > 2 * half) {
        rope_rest(r);
    }
}

#endif
