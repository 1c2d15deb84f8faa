// attn_f32.cu - flash attention in plain f32 arithmetic, any head size up to 256.
// targets: 75
// groups: headany
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

// Grid (floor(tokens / 64) + n_seqs + 1, heads), 256 threads, no dynamic shared memory.
QLORA_KERNEL __launch_bounds__(256, 1)
    qlora_attn_f32_fwd(char* q_data, int64_t ld_q, char* k_data, int64_t ld_k, char* v_data,
                       int64_t ld_v, char* o_data, int64_t ld_o, float* lse, const int32_t* cu,
                       int32_t n_seqs, int32_t tokens, int32_t heads, int32_t kv_heads, int32_t hd,
                       int32_t window, float scale, int32_t half, float cap, int32_t before) {
    // long because the running softmax touches everything a thread holds
    __shared__ __align__(16) attn_shared s;
    int ty = (int)threadIdx.x / 16;
    int tx = (int)threadIdx.x % 16;
    int32_t head = (int32_t)blockIdx.y;
    attn_tile t = attn_find(cu, n_seqs, tokens, TILE, (int32_t)(gridDim.x - 1 - blockIdx.x));
    if (t.first >= t.length) {
        return;
    }
    int32_t rows = t.length - t.first;
    int64_t token = t.begin + t.first;
    matrix o = matrix_at({o_data, ld_o, half}, token, (int64_t)head * hd);
    lse += (int64_t)head * tokens + token;
    if (t.tail) {
        tile_zero(o, rows, hd);
        if ((int32_t)threadIdx.x < min(rows, TILE)) {
            lse[threadIdx.x] = 0.0f;
        }
        return;
    }
    int64_t kv_column = (int64_t)(head / (heads / kv_heads)) * hd;
    matrix q = matrix_at({q_data, ld_q, half}, token, (int64_t)head * hd);
    matrix k = matrix_at({k_data, ld_k, half}, t.begin, kv_column);
    matrix v = matrix_at({v_data, ld_v, half}, t.begin, kv_column);
    float acc[SLICES][4][4];
    slices_clear(acc);
    float top[4] = {NO_SCORE, NO_SCORE, NO_SCORE, NO_SCORE};
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    int32_t own = before + t.first; // the first query, as a key
    int32_t keys = before + t.length;
    int32_t end = min(own + TILE, keys);
    int32_t n0 = window > 0 ? max(own - window + 1, 0) / TILE * TILE : 0;
#pragma unroll 1
    for (; n0 < end; n0 += TILE) {
        float c[4][4];
        tile_product(c, s, q, rows, matrix_at(k, n0, 0), keys - n0, hd);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float peak = top[i];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                bool visible = key_visible(own + 4 * ty + i, n0 + 4 * tx + j, window);
                c[i][j] = visible ? score_of(c[i][j], scale, cap) : MINUS_INF;
                peak = fmaxf(peak, c[i][j]);
            }
            for (int x = 8; x > 0; x >>= 1) {
                peak = fmaxf(peak, __shfl_xor_sync(QLORA_FULL_WARP, peak, x));
            }
            float shrink = expf(top[i] - peak);
            top[i] = peak;
            sum[i] *= shrink;
#pragma unroll
            for (int slice = 0; slice < SLICES; slice++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    acc[slice][i][j] *= shrink;
                }
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                c[i][j] = expf(c[i][j] - peak);
                sum[i] += c[i][j];
                s.p[4 * tx + j][4 * ty + i] = c[i][j];
            }
        }
        tile_accumulate(acc, s, matrix_at(v, n0, 0), keys - n0, hd);
    }
    float inverse[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        for (int x = 8; x > 0; x >>= 1) {
            sum[i] += __shfl_xor_sync(QLORA_FULL_WARP, sum[i], x);
        }
        inverse[i] = 1.0f / sum[i];
        if (tx == 0 && 4 * ty + i < rows) {
            lse[4 * ty + i] = top[i] + logf(sum[i]);
        }
    }
    tile_store(acc, inverse, s, o, rows, hd);
}

// stats[head][token] = { lse, D }. Grid (ceil(tokens / 8), heads), 256 threads, one warp per row.
QLORA_KERNEL __launch_bounds__(256)
    qlora_attn_f32_stats(char* o_data, int64_t ld_o, char* do_data, int64_t ld_do, const float* lse,
                         float2* stats, int32_t tokens, int32_t hd, int32_t half) {
    int32_t token = (int32_t)(blockIdx.x * 8 + threadIdx.x / 32);
    if (token >= tokens) {
        return;
    }
    matrix o = matrix_at({o_data, ld_o, half}, token, (int64_t)blockIdx.y * hd);
    matrix d_o = matrix_at({do_data, ld_do, half}, token, (int64_t)blockIdx.y * hd);
    float d = 0.0f;
#pragma unroll 1
    for (int32_t i = (int32_t)threadIdx.x % 32; i < hd; i += 32) {
        d = fmaf(matrix_get(o, 0, i), matrix_get(d_o, 0, i), d);
    }
    d = warp_sum(d);
    if (threadIdx.x % 32 == 0) {
        int64_t at = (int64_t)blockIdx.y * tokens + token;
        stats[at] = make_float2(lse[at], d);
    }
}

// Computes p and ds of the tile with queries m0 .. and keys n0 ..; on entry c holds q.k and dp
// holds do.v. With KEY_ROWS, the rows of the products are keys and the statistics belong
// to columns.
template <bool KEY_ROWS>
__device__ __forceinline__ void
scores_to_gradients(float (&c)[4][4], float (&dp)[4][4], const float2* stats, int32_t m0,
                    int32_t n0, int32_t length, int32_t window, float scale, float cap) {
    int ty = (int)threadIdx.x / 16;
    int tx = (int)threadIdx.x % 16;
    float2 stat[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int32_t query = m0 + 4 * (KEY_ROWS ? tx : ty) + i;
        stat[i] = query < length ? stats[query] : make_float2(0.0f, 0.0f);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int32_t query = m0 + (KEY_ROWS ? 4 * tx + j : 4 * ty + i);
            int32_t key = n0 + (KEY_ROWS ? 4 * ty + i : 4 * tx + j);
            float2 x = stat[KEY_ROWS ? j : i];
            bool visible = query < length && key_visible(query, key, window);
            float capped = cap > 0.0f ? score_of(c[i][j], scale, cap) : 0.0f;
            float above = cap > 0.0f ? capped - x.x : fmaf(c[i][j], scale, -x.x);
            float slope = cap > 0.0f ? 1.0f - capped / cap * (capped / cap) : 1.0f;
            float p = visible ? expf(above) : 0.0f;
            c[i][j] = p;
            dp[i][j] = visible ? p * (dp[i][j] - x.y) * slope : 0.0f;
        }
    }
}

// s.p[column][row] = c, once every thread has finished with the previous contents.
__device__ __forceinline__ void tile_publish(attn_shared& s, const float (&c)[4][4]) {
    int ty = (int)threadIdx.x / 16;
    int tx = (int)threadIdx.x % 16;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 4; j++) {
        *(float4*)&s.p[4 * tx + j][4 * ty] = make_float4(c[0][j], c[1][j], c[2][j], c[3][j]);
    }
}

// Grid (floor(tokens / 64) + n_seqs + 1, kv_heads), 256 threads: one block per 64 keys loops over
// the query heads of its group, so the group's sum stays in registers. The two parameters without a
// name are those of attn_tc.cuh for shared groups.
QLORA_KERNEL __launch_bounds__(256, 1)
    qlora_attn_f32_bwd_kv(char* q_data, int64_t ld_q, char* k_data, int64_t ld_k, char* v_data,
                          int64_t ld_v, char* do_data, int64_t ld_do, const float2* stats,
                          char* dk_data, int64_t ld_dk, char* dv_data, int64_t ld_dv,
                          const int32_t* cu, int32_t n_seqs, int32_t tokens, int32_t heads,
                          int32_t kv_heads, int32_t hd, int32_t window, float scale, int32_t half,
                          float*, int32_t, float cap) {
    __shared__ __align__(16) attn_shared s;
    int32_t kv_head = (int32_t)blockIdx.y;
    attn_tile t = attn_find(cu, n_seqs, tokens, TILE, (int32_t)blockIdx.x);
    if (t.first >= t.length) {
        return;
    }
    int32_t rows = t.length - t.first;
    int64_t token = t.begin + t.first;
    matrix dk = matrix_at({dk_data, ld_dk, half}, token, (int64_t)kv_head * hd);
    matrix dv = matrix_at({dv_data, ld_dv, half}, token, (int64_t)kv_head * hd);
    if (t.tail) {
        tile_zero(dk, rows, hd);
        tile_zero(dv, rows, hd);
        return;
    }
    int32_t group = heads / kv_heads;
    matrix k = matrix_at({k_data, ld_k, half}, token, (int64_t)kv_head * hd);
    matrix v = matrix_at({v_data, ld_v, half}, token, (int64_t)kv_head * hd);
    int32_t end = t.length;
    if (window > 0) {
        end = (int32_t)min((int64_t)end, (int64_t)t.first + TILE - 1 + window);
    }
    float acc_k[SLICES][4][4];
    float acc_v[SLICES][4][4];
    slices_clear(acc_k);
    slices_clear(acc_v);
#pragma unroll 1
    for (int32_t head = kv_head * group; head < kv_head * group + group; head++) {
        const float2* stats_head = stats + (int64_t)head * tokens + t.begin;
#pragma unroll 1
        for (int32_t m0 = t.first; m0 < end; m0 += TILE) {
            matrix q = matrix_at({q_data, ld_q, half}, t.begin + m0, (int64_t)head * hd);
            matrix d_o = matrix_at({do_data, ld_do, half}, t.begin + m0, (int64_t)head * hd);
            float c[4][4];
            float dp[4][4];
            tile_product(c, s, k, rows, q, t.length - m0, hd);
            tile_product(dp, s, v, rows, d_o, t.length - m0, hd);
            scores_to_gradients<true>(c, dp, stats_head, m0, t.first, t.length, window, scale, cap);
            tile_publish(s, c);
            tile_accumulate(acc_v, s, d_o, t.length - m0, hd);
            tile_publish(s, dp);
            tile_accumulate(acc_k, s, q, t.length - m0, hd);
        }
    }
    const float one[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    const float scales[4] = {scale, scale, scale, scale};
    tile_store(acc_v, one, s, dv, rows, hd);
    tile_store(acc_k, scales, s, dk, rows, hd);
}

// Grid (floor(tokens / 64) + n_seqs + 1, heads), 256 threads.
QLORA_KERNEL __launch_bounds__(256, 1)
    qlora_attn_f32_bwd_q(char* q_data, int64_t ld_q, char* k_data, int64_t ld_k, char* v_data,
                         int64_t ld_v, char* do_data, int64_t ld_do, const float2* stats,
                         char* dq_data, int64_t ld_dq, const int32_t* cu, int32_t n_seqs,
                         int32_t tokens, int32_t heads, int32_t kv_heads, int32_t hd,
                         int32_t window, float scale, int32_t half, float cap) {
    __shared__ __align__(16) attn_shared s;
    int32_t head = (int32_t)blockIdx.y;
    attn_tile t = attn_find(cu, n_seqs, tokens, TILE, (int32_t)(gridDim.x - 1 - blockIdx.x));
    if (t.first >= t.length) {
        return;
    }
    int32_t rows = t.length - t.first;
    int64_t token = t.begin + t.first;
    matrix dq = matrix_at({dq_data, ld_dq, half}, token, (int64_t)head * hd);
    if (t.tail) {
        tile_zero(dq, rows, hd);
        return;
    }
    int64_t kv_column = (int64_t)(head / (heads / kv_heads)) * hd;
    matrix q = matrix_at({q_data, ld_q, half}, token, (int64_t)head * hd);
    matrix d_o = matrix_at({do_data, ld_do, half}, token, (int64_t)head * hd);
    stats += (int64_t)head * tokens + t.begin;
    float acc[SLICES][4][4];
    slices_clear(acc);
    int32_t end = min(t.first + TILE, t.length);
    int32_t n0 = window > 0 ? max(t.first - window + 1, 0) / TILE * TILE : 0;
#pragma unroll 1
    for (; n0 < end; n0 += TILE) {
        matrix k = matrix_at({k_data, ld_k, half}, t.begin + n0, kv_column);
        matrix v = matrix_at({v_data, ld_v, half}, t.begin + n0, kv_column);
        float c[4][4];
        float dp[4][4];
        tile_product(c, s, q, rows, k, t.length - n0, hd);
        tile_product(dp, s, d_o, rows, v, t.length - n0, hd);
        scores_to_gradients<false>(c, dp, stats, t.first, n0, t.length, window, scale, cap);
        tile_publish(s, dp);
        tile_accumulate(acc, s, k, t.length - n0, hd);
    }
    const float scales[4] = {scale, scale, scale, scale};
    tile_store(acc, scales, s, dq, rows, hd);
}
