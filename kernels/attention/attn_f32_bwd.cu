// attn_f32_bwd.cu - the gradients of attn_f32.cuh.
// targets: 75
// groups: headany train
#include "attn_f32.cuh"

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
