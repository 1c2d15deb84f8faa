// attn_f32.cu - attn_f32.cuh forward.
// targets: 75
// groups: headany
#include "attn_f32.cuh"

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
