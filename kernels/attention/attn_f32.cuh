// attn_f32.cuh - flash attention in plain f32 arithmetic, any head size up to 256.
//
// Uses the formulas, layout and tail of attn_tc.cuh; rows may have any stride, and scores may have
// a cap: s = cap tanh(scale q.k / cap), ds = p (do.v - D) (1 - (s / cap)^2). This is the kernel
// for F32 mode, the reference for accuracy, and for head sizes that the tensor-core kernels do
// not support.
//
// A block of 256 threads works on 64 x 64 tiles; thread (ty, tx) = (thread / 16, thread % 16) holds
// rows 4 ty .. 4 ty + 3 and columns 4 tx .. 4 tx + 3 of every product, so the columns of a row are
// all in one half-warp. Head columns are processed 64 at a time for results and 32 at a time
// for sums.
//
// Determinism: one writer per output, a fixed order for every sum, no atomics.
#ifndef QLORA_ATTN_F32_CUH
#define QLORA_ATTN_F32_CUH

#include "attn.cuh"

#define TILE 64
#define DEPTH 32
#define PITCH 68 // floats; keeps rows of four 16-byte aligned and spreads them over the banks
#define SLICES 4 // slices of 64 head columns: 256 in total
#define NO_SCORE (-1e30f)
#define MINUS_INF __int_as_float((int)0xff800000u)

typedef float panel[DEPTH][PITCH];

// A matrix in global memory: f32, or bf16 when half is set. It is accessed element by element, so
// any stride works.
struct matrix {
    char* data;
    int64_t ld;
    int32_t half;
};

__device__ __forceinline__ matrix matrix_at(const matrix& m, int64_t row, int64_t column) {
    matrix x = {m.data + (row * m.ld + column) * (m.half ? 2 : 4), m.ld, m.half};
    return x;
}

__device__ __forceinline__ float matrix_get(const matrix& m, int64_t row, int32_t column) {
    int64_t i = row * m.ld + column;
    return m.half ? to_float(((const bf16*)m.data)[i]) : ((const float*)m.data)[i];
}

__device__ __forceinline__ void matrix_put(const matrix& m, int64_t row, int32_t column, float x) {
    int64_t i = row * m.ld + column;
    if (m.half) {
        store((bf16*)m.data + i, x);
    } else {
        store((float*)m.data + i, x);
    }
}

struct attn_shared {
    panel a;
    panel b;
    float p[TILE][PITCH];
};

// c += a^T b over the depth of two panels: a holds 64 rows, b 64 columns.
__device__ __forceinline__ void panels_multiply(float (&c)[4][4], const float (*a)[PITCH],
                                                const float (*b)[PITCH]) {
    int ty = (int)threadIdx.x / 16;
    int tx = (int)threadIdx.x % 16;
#pragma unroll 2
    for (int k = 0; k < DEPTH; k++) {
        float4 x = *(const float4*)&a[k][4 * ty];
        float4 y = *(const float4*)&b[k][4 * tx];
        const float xs[4] = {x.x, x.y, x.z, x.w};
        const float ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                c[i][j] = fmaf(xs[i], ys[j], c[i][j]);
            }
        }
    }
}

// panel[d][r] = x[r][d0 + d] for 64 rows, of which the first rows_left exist; zeros elsewhere.
__device__ __forceinline__ void panel_load_transposed(panel& to, const matrix& x, int32_t rows_left,
                                                      int32_t d0, int32_t hd) {
    int lane = (int)threadIdx.x % 32;
    bool column = d0 + lane < hd;
#pragma unroll 2
    for (int r = (int)threadIdx.x / 32; r < TILE; r += 8) {
        to[lane][r] = column && r < rows_left ? matrix_get(x, r, d0 + lane) : 0.0f;
    }
}

// panel[r][c] = x[r][c0 + c] for 32 rows and 64 columns; zeros outside.
__device__ __forceinline__ void panel_load(panel& to, const matrix& x, int32_t rows_left,
                                           int32_t c0, int32_t hd) {
    int c = (int)threadIdx.x % TILE;
    bool column = c0 + c < hd;
#pragma unroll 2
    for (int r = (int)threadIdx.x / TILE; r < DEPTH; r += 4) {
        to[r][c] = column && r < rows_left ? matrix_get(x, r, c0 + c) : 0.0f;
    }
}

// c[64 x 64] = x y^T over the whole head; x and y point to the first row of their tiles.
__device__ __forceinline__ void tile_product(float (&c)[4][4], attn_shared& s, const matrix& x,
                                             int32_t x_rows, const matrix& y, int32_t y_rows,
                                             int32_t hd) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        c[i][0] = c[i][1] = c[i][2] = c[i][3] = 0.0f;
    }
#pragma unroll 1
    for (int32_t d0 = 0; d0 < hd; d0 += DEPTH) {
        __syncthreads();
        panel_load_transposed(s.a, x, x_rows, d0, hd);
        panel_load_transposed(s.b, y, y_rows, d0, hd);
        __syncthreads();
        panels_multiply(c, s.a, s.b);
    }
}

// acc[64 x hd] += p^T y, p[64 k][64 rows] in shared memory, y [64 k][hd] in global memory. Starts
// with a barrier, so p may be written immediately before the call.
__device__ __forceinline__ void tile_accumulate(float (&acc)[SLICES][4][4], attn_shared& s,
                                                const matrix& y, int32_t rows, int32_t hd) {
#pragma unroll
    for (int slice = 0; slice < SLICES; slice++) {
        if (slice * TILE < hd) {
#pragma unroll 1
            for (int half = 0; half < TILE; half += DEPTH) {
                __syncthreads();
                panel_load(s.b, matrix_at(y, half, 0), rows - half, slice * TILE, hd);
                __syncthreads();
                panels_multiply(acc[slice], &s.p[half], s.b);
            }
        }
    }
}

// to[row][..] = acc * factor[row], staged in shared memory so that a warp writes along a row.
__device__ __forceinline__ void tile_store(const float (&acc)[SLICES][4][4],
                                           const float (&factor)[4], attn_shared& s,
                                           const matrix& to, int32_t rows, int32_t hd) {
    int ty = (int)threadIdx.x / 16;
    int tx = (int)threadIdx.x % 16;
#pragma unroll
    for (int slice = 0; slice < SLICES; slice++) {
        if (slice * TILE < hd) {
            __syncthreads();
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float(&x)[4] = acc[slice][i];
                *(float4*)&s.p[4 * ty + i][4 * tx] = make_float4(
                    x[0] * factor[i], x[1] * factor[i], x[2] * factor[i], x[3] * factor[i]);
            }
            __syncthreads();
            int32_t column = (int32_t)threadIdx.x % TILE;
#pragma unroll 1
            for (int32_t r = (int32_t)threadIdx.x / TILE; r < min(rows, TILE); r += 4) {
                if (slice * TILE + column < hd) {
                    matrix_put(to, r, slice * TILE + column, s.p[r][column]);
                }
            }
        }
    }
}

__device__ __forceinline__ void tile_zero(const matrix& to, int32_t rows, int32_t hd) {
#pragma unroll 1
    for (int32_t r = (int32_t)threadIdx.x / 32; r < min(rows, TILE); r += 8) {
#pragma unroll 1
        for (int32_t c = (int32_t)threadIdx.x % 32; c < hd; c += 32) {
            matrix_put(to, r, c, 0.0f);
        }
    }
}

__device__ __forceinline__ void slices_clear(float (&acc)[SLICES][4][4]) {
#pragma unroll
    for (int slice = 0; slice < SLICES; slice++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            acc[slice][i][0] = acc[slice][i][1] = acc[slice][i][2] = acc[slice][i][3] = 0.0f;
        }
    }
}

// A score, limited to -cap .. cap if cap is not 0.
__device__ __forceinline__ float score_of(float product, float scale, float cap) {
    float s = product * scale;
    return cap > 0.0f ? cap * tanhf(s / cap) : s;
}

__device__ __forceinline__ bool key_visible(int32_t query, int32_t key, int32_t window) {
    return key <= query && (window <= 0 || query - key < window);
}

#endif
