// attn_rows.cuh - the passes of the backward attention that work on rows: the statistics that the
// others read, and the sum of shares of dk and dv. Used by attn_tc.cuh and attn_wg.cuh.
#ifndef QLORA_ATTN_ROWS_CUH
#define QLORA_ATTN_ROWS_CUH

#include "../common.cuh"

#define LOG2E 1.4426950408889634f

// stats[head][token] = { lse * log2(e), D }. One row per group of LANES lanes; grid
// (ceil(tokens / (256 / LANES)), heads), 256 threads.
template <int HD, int LANES>
__device__ __forceinline__ void attn_stats(const bf16* o, int64_t ld_o, const bf16* d_o,
                                           int64_t ld_do, const float* lse, float2* stats,
                                           int32_t tokens, int32_t hd) {
    int32_t row = (int32_t)(blockIdx.x * (256 / LANES) + threadIdx.x / LANES);
    int32_t lane = (int32_t)threadIdx.x % LANES;
    int32_t head = (int32_t)blockIdx.y;
    int64_t token = min(row, tokens - 1); // surplus lanes repeat the last row for the shuffles
    float d = 0.0f;
#pragma unroll
    for (int c = 0; c < HD / 8; c += LANES) {
        int32_t chunk = lane + c;
        if (hd == HD || chunk * 8 < hd) {
            uint4 x = *(const uint4*)(o + token * ld_o + head * hd + chunk * 8);
            uint4 y = *(const uint4*)(d_o + token * ld_do + head * hd + chunk * 8);
            const uint32_t xs[4] = {x.x, x.y, x.z, x.w};
            const uint32_t ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                d += __uint_as_float(xs[j] << 16) * __uint_as_float(ys[j] << 16);
                d += __uint_as_float(xs[j] & 0xffff0000u) * __uint_as_float(ys[j] & 0xffff0000u);
            }
        }
    }
#pragma unroll
    for (int j = LANES / 2; j > 0; j >>= 1) {
        d += __shfl_xor_sync(QLORA_FULL_WARP, d, j);
    }
    if (lane == 0 && row < tokens) {
        int64_t at = (int64_t)head * tokens + token;
        stats[at] = make_float2(lse[at] * LOG2E, d);
    }
}

// dv (blockIdx.y 0) or dk (1) = the sum of its shares, in order; width = kv_heads hd, and each
// thread handles 8 columns of a row.
__device__ __forceinline__ void attn_sum(const float* parts, int32_t shares, int32_t tokens,
                                         int32_t width, bf16* dk, int64_t ld_dk, bf16* dv,
                                         int64_t ld_dv) {
    int64_t piece = (int64_t)blockIdx.x * 256 + threadIdx.x;
    int64_t row = piece / (width / 8);
    int64_t col = piece % (width / 8) * 8;
    if (row >= tokens) {
        return;
    }
    int64_t size = (int64_t)tokens * width;
    const float* from = parts + blockIdx.y * shares * size + row * width + col;
    float sum[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
    for (int32_t i = 0; i < shares; i++, from += size) {
        float4 low = *(const float4*)from;
        float4 high = *(const float4*)(from + 4);
        const float v[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int k = 0; k < 8; k++) {
            sum[k] += v[k];
        }
    }
    bf16* to = blockIdx.y == 0 ? dv + row * ld_dv : dk + row * ld_dk;
    *(uint4*)(to + col) = make_uint4(pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]),
                                     pack_bf16(sum[4], sum[5]), pack_bf16(sum[6], sum[7]));
}

// Grid (ceil(tokens width / 2048), 2), 256 threads.
#define ATTN_SUM(NAME)                                                                             \
    QLORA_KERNEL __launch_bounds__(256) qlora_attn##NAME##_bwd_sum(                                \
        const float* parts, int32_t shares, int32_t tokens, int32_t width, bf16* dk,               \
        int64_t ld_dk, bf16* dv, int64_t ld_dv) {                                                  \
        attn_sum(parts, shares, tokens, width, dk, ld_dk, dv, ld_dv);                              \
    }

#endif
