// rope.cu - rotary position embedding on packed rows, half-split (NeoX) pairs, in place.
#include "vec.cuh"

// x is [rows, heads * head_dim]; heads 0 .. rotated-1 (the q and k heads) are rotated, the others
// (v) only take the bias. With half = head_dim / 2, p = positions[row], (c, s) = table[p][i],
// table[p][half + i]:
//   a = x[i] + bias[i], b = x[i + half] + bias[i + half]
//   x[i] = a c - b s * sign, x[i + half] = b c + a s * sign
// sign = 1 forward, -1 backward (rotation by the negative angle). bias [heads * head_dim] may be
// null, then the caller passes heads = rotated. A position outside [0, max_pos) leaves the row as
// it is and sets *bad to 1. Launch: grid.x = rows; threads a multiple of 32 up to 512, a block
// walks the pieces of its row (N pairs a piece, N = 4 for f32, 8 for bf16). Each element has one
// writer.
template <class T>
__device__ __forceinline__ void rope(T* x, int64_t ld, const int32_t* positions, const float* table,
                                     int64_t ld_table, int32_t max_pos, const void* bias,
                                     int32_t bias_bf16, int32_t heads, int32_t rotated,
                                     int32_t half, float sign, int32_t* bad) {
    const int N = lanes<T>::N;
    int64_t row = blockIdx.x;
    int32_t position = positions[row];
    if (position < 0 || position >= max_pos) {
        if (threadIdx.x == 0) {
            *bad = 1;
        }
        return;
    }
    const float* turn = table + position * ld_table;
    bool vec = rows_aligned(x, ld) && rows_aligned(table, ld_table) &&
               rows_aligned((const float*)bias, 0) && half % N == 0;
    uint32_t pieces = (uint32_t)(half + N - 1) / N;
    uint32_t items = pieces * (uint32_t)heads;
    for (uint32_t item = threadIdx.x; item < items; item += blockDim.x) {
        uint32_t head = item / pieces;
        int32_t i = (int32_t)(item - head * pieces) * N;
        int64_t at = (int64_t)head * 2 * half + i;
        T* lo = x + row * ld + at;
        T* hi = lo + half;
        int32_t left = half - i;
        uint4 raw_lo = load_raw(lo, left, vec);
        uint4 raw_hi = load_raw(hi, left, vec);
        float a[N];
        float b[N];
        unpack(raw_lo, a);
        unpack(raw_hi, b);
        if (bias != 0) {
            float add[N];
            load_either<N>(bias, bias_bf16, at, left, vec, add);
#pragma unroll
            for (int k = 0; k < N; k++) {
                a[k] += add[k];
            }
            load_either<N>(bias, bias_bf16, at + half, left, vec, add);
#pragma unroll
            for (int k = 0; k < N; k++) {
                b[k] += add[k];
            }
        }
        if (head < (uint32_t)rotated) {
            float c[N];
            float s[N];
            load_either<N>(turn, 0, i, left, vec, c);
            load_either<N>(turn, 0, half + i, left, vec, s);
#pragma unroll
            for (int k = 0; k < N; k++) {
                float sine = s[k] * sign;
                float turned = a[k] * c[k] - b[k] * sine;
                b[k] = b[k] * c[k] + a[k] * sine;
                a[k] = turned;
            }
        }
        store_raw(lo, pack(a), left, vec);
        store_raw(hi, pack(b), left, vec);
    }
}

QLORA_KERNEL __launch_bounds__(512)
    qlora_rope_f32(float* x, int64_t ld, const int32_t* positions, const float* table,
                   int64_t ld_table, int32_t max_pos, const void* bias, int32_t bias_bf16,
                   int32_t heads, int32_t rotated, int32_t half, float sign, int32_t* bad) {
    rope(x, ld, positions, table, ld_table, max_pos, bias, bias_bf16, heads, rotated, half, sign,
         bad);
}

QLORA_KERNEL __launch_bounds__(512)
    qlora_rope_bf16(bf16* x, int64_t ld, const int32_t* positions, const float* table,
                    int64_t ld_table, int32_t max_pos, const void* bias, int32_t bias_bf16,
                    int32_t heads, int32_t rotated, int32_t half, float sign, int32_t* bad) {
    rope(x, ld, positions, table, ld_table, max_pos, bias, bias_bf16, heads, rotated, half, sign,
         bad);
}
