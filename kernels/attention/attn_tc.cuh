// attn_tc.cuh - flash attention on tensor cores: bf16 storage, f32 softmax and sums. attn32.cu to
// attn256.cu instantiate the kernels for head sizes HD; they also take every smaller head size hd
// that is a multiple of 8: the missing columns are zeros in shared memory and are never stored.
//
//   s[i][j] = scale * q[i] . k[j]       for the keys j that query i may see, in its own sequence:
//                                       j <= i, and i - j < window when window > 0
//             with a cap: cap tanh(scale q[i] . k[j] / cap)
//   o[i]    = sum_j exp(s[i][j] - lse[i]) v[j],      lse[i] = log sum_j exp(s[i][j])
//   p = exp(s - lse), D[i] = do[i] . o[i], ds = p (do[i] . v[j] - D[i]) (1 - (s / cap)^2)
//   dv[j] = sum_i p[i][j] do[i],   dk[j] = scale sum_i ds[i][j] q[i],
//   dq[i] = scale sum_j ds[i][j] k[j]
//
// Layout: token-major rows [tokens, heads * hd] with a row stride in elements (a multiple of 8,
// data 16-byte aligned); query head h reads key/value head h / (heads / kv_heads). cu holds
// n_seqs + 1 ascending token offsets; sequence s is [cu[s], cu[s + 1]) and unused entries repeat
// the last one. Tokens from cu[n_seqs] on are a tail: every output there is zero. Forward, `before`
// keys may precede the first query; then there is one sequence, and query i is at the place of key
// before + i.
//
// Determinism: one writer per output, and every sum in a fixed order that depends only on the
// positions within the sequence and, for dk and dv, on how many blocks share the query heads of a
// group. Packing the same number of tokens differently does not change a single bit. No atomics.
#ifndef QLORA_ATTN_TC_CUH
#define QLORA_ATTN_TC_CUH

#include "attn.cuh"
#include "attn_mma.cuh"
#include "attn_rows.cuh"

#define LN2 0.6931471805599453f
// Below every score but finite, so that a row that has not seen a key yet gives 0 and not NaN.
#define NO_SCORE (-1e30f)
#define MINUS_INF __int_as_float((int)0xff800000u)

struct attn_args {
    const bf16* q;
    const bf16* k;
    const bf16* v;
    const bf16* d_o;
    int64_t ld_q;
    int64_t ld_k;
    int64_t ld_v;
    int64_t ld_do;
    const int32_t* cu;
    int32_t n_seqs;
    int32_t tokens;
    int32_t heads;
    int32_t kv_heads;
    int32_t hd;
    int32_t window;
    float scale;
    float cap;      // 0: none
    int32_t before; // keys before the first query of the only sequence; forward only
};

// Scores are kept as s * score_factor, in powers of two. With a cap, s is tanh(scale q.k / cap).
__device__ __forceinline__ float score_factor(const attn_args& a) {
    return (a.cap > 0.0f ? a.cap : a.scale) * LOG2E;
}

// --- forward ---

// Masks the scores of a tile: s[..][..][c] belongs to row row0 + m * 16 + lane / 4 (+ 8) and column
// col0 + n * 8 + lane % 4 * 2 (+ 1). With QUERY_ROWS, rows are queries, otherwise keys.
template <int MT, int NT, bool QUERY_ROWS>
__device__ __forceinline__ void scores_mask(float (&s)[MT][NT][4], int32_t row0, int32_t col0,
                                            int32_t window) {
    int32_t lane = thread_again() & 31;
    uint32_t reach = window > 0 ? (uint32_t)window : 0x80000000u;
    int32_t base = (row0 + (lane >> 2)) - (col0 + (lane & 3) * 2);
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                int32_t difference = base + m * 16 + (c >> 1) * 8 - n * 8 - (c & 1);
                // distance query - key; a negative one wraps around and is not visible either
                uint32_t distance = (uint32_t)(QUERY_ROWS ? difference : -difference);
                if (distance >= reach) {
                    s[m][n][c] = MINUS_INF;
                }
            }
        }
    }
}

// s = tanh(scale s / cap).
template <int MT, int NT>
__device__ __forceinline__ void scores_cap(float (&s)[MT][NT][4], const attn_args& a) {
    float factor = __fdividef(2.0f * LOG2E * a.scale, a.cap);
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                s[m][n][c] = tanh_fast(s[m][n][c] * factor);
            }
        }
    }
}

// The derivative of a capped score; 0 for a masked one.
__device__ __forceinline__ float cap_slope(float s) {
    float x = fmaxf(s, -1.0f);
    return fmaf(-x, x, 1.0f);
}

template <int MT>
__device__ __forceinline__ void softmax_start(float (&top)[MT][2], float (&sum)[MT][2]) {
#pragma unroll
    for (int m = 0; m < MT; m++) {
        top[m][0] = top[m][1] = NO_SCORE;
        sum[m][0] = sum[m][1] = 0.0f;
    }
}

// p = 2^(s - top), packed as the A operand of the next product; sum and acc are rescaled when top
// changes. Scores are in powers of two. top, the running maximum, is raised only when a score
// exceeds it by 8: sums stay far from overflow, and most tiles need no rescaling.
template <int HD, int MT, int NT>
__device__ __forceinline__ void
softmax_step(const float (&s)[MT][NT][4], float factor, float (&top)[MT][2], float (&sum)[MT][2],
             float (&acc)[MT][HD / 8][4], uint32_t (&p)[MT][NT / 2][4]) {
    float peak[MT][2];
    bool passed = false;
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float x = fmaxf(s[m][0][2 * h], s[m][0][2 * h + 1]);
#pragma unroll
            for (int i = 1; i < NT; i++) {
                x = fmaxf(x, fmaxf(s[m][i][2 * h], s[m][i][2 * h + 1]));
            }
            peak[m][h] = x;
            passed = passed || fmaf(x, factor, -top[m][h]) > 8.0f;
        }
    }
    if (__any_sync(QLORA_FULL_WARP, passed)) {
#pragma unroll
        for (int m = 0; m < MT; m++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float x = peak[m][h];
                x = fmaxf(x, __shfl_xor_sync(QLORA_FULL_WARP, x, 1));
                x = fmaxf(x, __shfl_xor_sync(QLORA_FULL_WARP, x, 2));
                x = fmaxf(x * factor, top[m][h]);
                float shrink = exp2_fast(top[m][h] - x);
                top[m][h] = x;
                sum[m][h] *= shrink;
#pragma unroll
                for (int i = 0; i < HD / 8; i++) {
                    acc[m][i][2 * h] *= shrink;
                    acc[m][i][2 * h + 1] *= shrink;
                }
            }
        }
    }
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int i = 0; i < NT; i++) {
            float p0 = exp2_fast(fmaf(s[m][i][0], factor, -top[m][0]));
            float p1 = exp2_fast(fmaf(s[m][i][1], factor, -top[m][0]));
            float p2 = exp2_fast(fmaf(s[m][i][2], factor, -top[m][1]));
            float p3 = exp2_fast(fmaf(s[m][i][3], factor, -top[m][1]));
            sum[m][0] += p0 + p1;
            sum[m][1] += p2 + p3;
            p[m][i / 2][i % 2 * 2] = pack_bf16(p0, p1);
            p[m][i / 2][i % 2 * 2 + 1] = pack_bf16(p2, p3);
        }
    }
}

// Computes the log-sum-exp of the rows and the divisors of their sums.
template <int MT>
__device__ __forceinline__ void softmax_finish(const float (&top)[MT][2], const float (&sum)[MT][2],
                                               float* lse, int32_t row0, int32_t length,
                                               float (&inverse)[MT][2]) {
    int32_t lane = (int32_t)threadIdx.x & 31;
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float x = sum[m][h];
            x += __shfl_xor_sync(QLORA_FULL_WARP, x, 1);
            x += __shfl_xor_sync(QLORA_FULL_WARP, x, 2);
            inverse[m][h] = 1.0f / x;
            int32_t row = row0 + m * 16 + h * 8 + (lane >> 2);
            if ((lane & 3) == 0 && row < length) {
                lse[row] = fmaf(top[m][h], LN2, logf(x));
            }
        }
    }
}

template <int HD, int ROWS, int THREADS>
__device__ __forceinline__ void forward_tail(bf16* o, int64_t ld_o, int32_t hd, float* lse,
                                             const attn_tile& t) {
    rows_zero<HD, ROWS, THREADS>(o, ld_o, hd, t.first, t.length);
    for (int32_t i = t.first + (int32_t)threadIdx.x; i < t.first + ROWS && i < t.length;
         i += THREADS) {
        lse[i] = 0.0f;
    }
}

// Shared memory: q [BM][HD], then STAGES times k, v [BN][HD].
// With STAGES 2, the next key and value tiles are loaded during the whole of the current one; with
// STAGES 1, values are loaded during the scores and the next keys during the sums (two barriers, a
// third less memory).
template <int HD, int WARPS, int MT, int BN, int STAGES>
__device__ __forceinline__ void attn_forward(const attn_args& a, bf16* o, int64_t ld_o,
                                             float* lse) {
    // long because one loop contains both ways of loading
    constexpr int THREADS = WARPS * 32;
    constexpr int BM = WARPS * MT * 16;
    constexpr int NT = BN / 8;
    extern __shared__ __align__(128) unsigned char shared[];
    int32_t head = (int32_t)blockIdx.y;
    attn_tile t = attn_find(a.cu, a.n_seqs, a.tokens, BM, (int32_t)(gridDim.x - 1 - blockIdx.x));
    if (t.first >= t.length) {
        return;
    }
    if (t.tail) {
        forward_tail<HD, BM, THREADS>(o + (int64_t)t.begin * ld_o + head * a.hd, ld_o, a.hd,
                                      lse + (int64_t)head * a.tokens + t.begin, t);
        return;
    }
    int32_t kv_head = head / (a.heads / a.kv_heads);
    int32_t keys = a.before + t.length;
    int32_t n_end = (min(a.before + t.first + BM, keys) + BN - 1) / BN;
    int32_t n = a.window > 0 ? max(a.before + t.first - a.window + 1, 0) / BN : 0;
    const bf16* q = tile_source<HD>(a.q, a.ld_q, a.hd, head, t.begin + t.first);
    const bf16* k = tile_source<HD>(a.k, a.ld_k, a.hd, kv_head, t.begin + n * BN);
    const bf16* v = tile_source<HD>(a.v, a.ld_v, a.hd, kv_head, t.begin + n * BN);

    uint32_t q_tile = shared_address(shared);
    uint32_t kv_tile = q_tile + BM * tile<HD>::PITCH;
    constexpr uint32_t STAGE = 2 * BN * tile<HD>::PITCH;
    int32_t warp_row = (int32_t)(threadIdx.x >> 5) * MT * 16;
    int32_t row0 = a.before + t.first + warp_row; // as a key
    uint32_t q_lane = lane_rows16<HD>(q_tile, warp_row);
    uint32_t k_lane = lane_cols16<HD>(kv_tile, 0);
    uint32_t v_lane = lane_rows16<HD>(kv_tile + BN * tile<HD>::PITCH, 0);

    float acc[MT][HD / 8][4];
    float top[MT][2];
    float sum[MT][2];
    clear(acc);
    softmax_start<MT>(top, sum);
    const float factor = score_factor(a);

    tile_load<HD, BM, THREADS>(q_tile, q, a.ld_q, a.hd, t.length - t.first, a.q);
    tile_load<HD, BN, THREADS>(kv_tile, k, a.ld_k, a.hd, keys - n * BN, a.k);
    if (STAGES == 2) {
        tile_load<HD, BN, THREADS>(kv_tile + BN * tile<HD>::PITCH, v, a.ld_v, a.hd,
                                   keys - n * BN, a.v);
    }
    copy_commit();
    uint32_t stage = 0;
    for (; n < n_end; n++) {
        copy_wait();
        __syncthreads();
        k += BN * a.ld_k;
        int32_t rows_left = keys - n * BN;
        if (STAGES == 1) {
            tile_load<HD, BN, THREADS>(kv_tile + BN * tile<HD>::PITCH, v, a.ld_v, a.hd, rows_left,
                                       a.v);
            copy_commit();
            v += BN * a.ld_v;
        } else {
            v += BN * a.ld_v;
            if (n + 1 < n_end) {
                uint32_t next = kv_tile + (stage ^ STAGE);
                tile_load<HD, BN, THREADS>(next, k, a.ld_k, a.hd, rows_left - BN, a.k);
                tile_load<HD, BN, THREADS>(next + BN * tile<HD>::PITCH, v, a.ld_v, a.hd,
                                           rows_left - BN, a.v);
                copy_commit();
            }
        }
        bool visible = n * BN <= row0 + MT * 16 - 1;
        forget(q_lane);
        forget(v_lane);
        float s[MT][NT][4];
        if (STAGES == 1 || visible) {
            product_rows<HD, MT, NT>(s, q_lane, k_lane + stage);
        }
        if (STAGES == 1) {
            copy_wait();
            __syncthreads();
            if (n + 1 < n_end) {
                tile_load<HD, BN, THREADS>(kv_tile, k, a.ld_k, a.hd, rows_left - BN, a.k);
                copy_commit();
            }
        }
        if (visible) {
            if (a.cap > 0.0f) {
                scores_cap(s, a);
            }
            if (n * BN + BN - 1 > row0 ||
                (a.window > 0 && row0 + MT * 16 - 1 - n * BN >= a.window)) {
                scores_mask<MT, NT, true>(s, row0, n * BN, a.window);
            }
            uint32_t p[MT][NT / 2][4];
            softmax_step<HD, MT, NT>(s, factor, top, sum, acc, p);
            product_columns<HD, MT, NT / 2>(acc, p, v_lane + stage);
        }
        if (STAGES == 2) {
            stage ^= STAGE;
        }
    }

    o += (int64_t)t.begin * ld_o + (int32_t)blockIdx.y * a.hd;
    lse += (int64_t)(int32_t)blockIdx.y * a.tokens + t.begin;
    float inverse[MT][2];
    row0 -= a.before;
    softmax_finish<MT>(top, sum, lse, row0, t.length, inverse);
    rows_store<HD, MT>(acc, inverse, q_tile, warp_row, o, ld_o, a.hd, row0, t.length);
}

// --- backward, pass 2: dk, dv (pass 1, the statistics, is in attn_rows.cuh) ---

// Iterates over query tiles m_begin .. m_end - 1 of one query head after another.
struct query_cursor {
    const bf16* q;
    const bf16* d_o;
    const float2* stats;
    int32_t m;
};

template <int HD, int BQ, int THREADS>
__device__ __forceinline__ void cursor_load(query_cursor& c, const attn_args& a, int32_t length,
                                            uint32_t tiles, uint32_t stat_tile, int32_t m_begin,
                                            int32_t m_end) {
    int32_t rows_left = length - c.m * BQ;
    tile_load<HD, BQ, THREADS>(tiles, c.q, a.ld_q, a.hd, rows_left, a.q);
    tile_load<HD, BQ, THREADS>(tiles + BQ * tile<HD>::PITCH, c.d_o, a.ld_do, a.hd, rows_left,
                               a.d_o);
    for (int32_t i = (int32_t)threadIdx.x; i < BQ; i += THREADS) {
        bool inside = i < rows_left;
        copy8(stat_tile + (uint32_t)i * 8, inside ? c.stats + c.m * BQ + i : c.stats,
              inside ? 8 : 0);
    }
    copy_commit();
    c.q += BQ * a.ld_q;
    c.d_o += BQ * a.ld_do;
    if (++c.m == m_end) {
        c.m = m_begin;
        c.q += a.hd - (m_end - m_begin) * BQ * a.ld_q;
        c.d_o += a.hd - (m_end - m_begin) * BQ * a.ld_do;
        c.stats += a.tokens;
    }
}

// First warp of a pair: computes p from the scores, keeps it as an A operand and passes it to the
// second warp, with a cap times the slope of the score. stat_lane is the address of this lane's
// statistics: { lse, D } of two adjacent queries, for every group of 8.
template <int MT, int NT>
__device__ __forceinline__ void pair_give(const float (&s)[MT][NT][4], float factor, bool capped,
                                          uint32_t stat_lane, uint32_t p_lane,
                                          uint32_t (&p)[MT][NT / 2][4]) {
#pragma unroll
    for (int i = 0; i < NT; i++) {
        float lse0, d0, lse1, d1;
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(lse0), "=f"(d0), "=f"(lse1), "=f"(d1)
                     : "r"(stat_lane + (uint32_t)i * 64));
#pragma unroll
        for (int r = 0; r < MT; r++) {
            p[r][i / 2][i % 2 * 2] = pack_bf16(exp2_fast(fmaf(s[r][i][0], factor, -lse0)),
                                               exp2_fast(fmaf(s[r][i][1], factor, -lse1)));
            p[r][i / 2][i % 2 * 2 + 1] = pack_bf16(exp2_fast(fmaf(s[r][i][2], factor, -lse0)),
                                                   exp2_fast(fmaf(s[r][i][3], factor, -lse1)));
        }
    }
#pragma unroll
    for (int r = 0; r < MT; r++) {
#pragma unroll
        for (int i = 0; i < NT / 2; i++) {
            uint32_t x[4] = {p[r][i][0], p[r][i][1], p[r][i][2], p[r][i][3]};
            if (capped) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float(&g)[4] = s[r][2 * i + (j >> 1)];
                    x[j] = pack_bf16(__uint_as_float(x[j] << 16) * cap_slope(g[(j & 1) * 2]),
                                     __uint_as_float(x[j] & 0xffff0000u) *
                                         cap_slope(g[(j & 1) * 2 + 1]));
                }
            }
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(
                             p_lane + (uint32_t)(r * (NT / 2) + i) * 512),
                         "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                         : "memory");
        }
    }
}

// Second warp: receives p and, with its own do.v in dp, turns it into ds.
template <int MT, int NT>
__device__ __forceinline__ void pair_take(const float (&dp)[MT][NT][4], uint32_t stat_lane,
                                          uint32_t p_lane, uint32_t (&p)[MT][NT / 2][4]) {
#pragma unroll
    for (int i = 0; i < NT / 2; i++) {
        float d[4];
#pragma unroll
        for (int c = 0; c < 4; c++) {
            asm volatile("ld.shared.f32 %0, [%1];"
                         : "=f"(d[c])
                         : "r"(stat_lane + (uint32_t)(i * 128 + (c >> 1) * 64 + (c & 1) * 8 + 4)));
        }
#pragma unroll
        for (int r = 0; r < MT; r++) {
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(p[r][i][0]), "=r"(p[r][i][1]), "=r"(p[r][i][2]), "=r"(p[r][i][3])
                         : "r"(p_lane + (uint32_t)(r * (NT / 2) + i) * 512)
                         : "memory");
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float(&g)[4] = dp[r][2 * i + (j >> 1)];
                uint32_t x = p[r][i][j];
                p[r][i][j] = pack_bf16(
                    __uint_as_float(x << 16) * (g[(j & 1) * 2] - d[(j >> 1) * 2]),
                    __uint_as_float(x & 0xffff0000u) * (g[(j & 1) * 2 + 1] - d[(j >> 1) * 2 + 1]));
            }
        }
    }
}

// The rows starting at token `begin` of this block's kv head and share: of dv (0) or dk (1).
__device__ __forceinline__ float* part_at(const attn_args& a, float* parts, int64_t begin,
                                          int which) {
    int64_t share = (int64_t)which * gridDim.z + blockIdx.z;
    return parts + (share * a.tokens + begin) * a.kv_heads * a.hd + blockIdx.y * a.hd;
}

// One block per tile of BKV = 16 MT PAIRS keys, kv head and share of the group's query heads
// (gridDim.z shares of `each` heads); it loops over the heads of its share and their query tiles. A
// single share is the final result; several shares go to parts, dv first and then dk, each
// [share][tokens][kv_heads hd] f32, and attn_sum adds them.
//
// Warps work in pairs on the same 16 MT keys: the first computes scores and dv, the second do.v and
// dk; p is passed from the first to the second through shared memory, in the layout that both need.
// Shared memory: k, v [BKV][HD], 2 x (q, do [BQ][HD]), p [PAIRS][MT][BQ / 16][32 lanes] x 16 bytes,
// 2 x stats [BQ].
template <int HD, int PAIRS, int MT, int BQ>
__device__ __forceinline__ void attn_backward_kv(const attn_args& a, const float2* stats, bf16* dk,
                                                 int64_t ld_dk, bf16* dv, int64_t ld_dv,
                                                 float* parts, int32_t each) {
    // long because every address of the loop is computed before it
    constexpr int THREADS = PAIRS * 64;
    constexpr int BKV = PAIRS * MT * 16;
    constexpr int NT = BQ / 8;
    constexpr uint32_t STAGE = 2 * BQ * tile<HD>::PITCH;
    extern __shared__ __align__(128) unsigned char shared[];
    int32_t kv_head = (int32_t)blockIdx.y;
    attn_tile t = attn_find(a.cu, a.n_seqs, a.tokens, BKV, (int32_t)blockIdx.x);
    if (t.first >= t.length) {
        return;
    }
    if (t.tail) {
        int64_t begin = t.begin;
        if (gridDim.z > 1) {
            float* to = part_at(a, parts, begin, 0);
            rows_zero<HD, BKV, THREADS>(to, a.kv_heads * a.hd, a.hd, t.first, t.length);
            to = part_at(a, parts, begin, 1);
            rows_zero<HD, BKV, THREADS>(to, a.kv_heads * a.hd, a.hd, t.first, t.length);
            return;
        }
        rows_zero<HD, BKV, THREADS>(dk + begin * ld_dk + kv_head * a.hd, ld_dk, a.hd, t.first,
                                    t.length);
        rows_zero<HD, BKV, THREADS>(dv + begin * ld_dv + kv_head * a.hd, ld_dv, a.hd, t.first,
                                    t.length);
        return;
    }
    int32_t group = a.heads / a.kv_heads;
    int32_t share = (int32_t)blockIdx.z * each; // index of its first head in the group
    int32_t head = kv_head * group + share;
    int32_t m_begin = t.first / BQ;
    query_cursor next; // the tile to load next
    next.q = tile_source<HD>(a.q, a.ld_q, a.hd, head, t.begin + m_begin * BQ);
    next.d_o = tile_source<HD>(a.d_o, a.ld_do, a.hd, head, t.begin + m_begin * BQ);
    next.stats = stats + (int64_t)head * a.tokens + t.begin;
    next.m = m_begin;
    int32_t last = a.window > 0 ? min(t.length, t.first + BKV - 1 + a.window) : t.length;
    int32_t m_end = (last + BQ - 1) / BQ;

    uint32_t k_tile = shared_address(shared);
    uint32_t v_tile = k_tile + BKV * tile<HD>::PITCH;
    uint32_t q_tile = v_tile + BKV * tile<HD>::PITCH;
    uint32_t p_tile = q_tile + 2 * STAGE;
    uint32_t stat_tile = p_tile + PAIRS * MT * (BQ / 16) * 512;
    int32_t warp = (int32_t)threadIdx.x >> 5;
    int32_t lane = (int32_t)threadIdx.x & 31;
    bool second = warp >= PAIRS;
    int32_t pair = second ? warp - PAIRS : warp;
    int32_t row0 = t.first + pair * MT * 16;
    uint32_t own_tile = second ? v_tile : k_tile;
    uint32_t own_lane = lane_rows16<HD>(own_tile, pair * MT * 16);
    uint32_t other = BQ * tile<HD>::PITCH;
    uint32_t rows_lane = lane_cols16<HD>(q_tile + (second ? other : 0), 0);
    uint32_t cols_lane = lane_rows16<HD>(q_tile + (second ? 0 : other), 0);
    uint32_t p_lane = p_tile + (uint32_t)(pair * MT * (BQ / 16) * 512 + lane * 16);
    const float factor = score_factor(a);

    float acc[MT][HD / 8][4];
    clear(acc);
    tile_load<HD, BKV, THREADS>(k_tile,
                                tile_source<HD>(a.k, a.ld_k, a.hd, kv_head, t.begin + t.first),
                                a.ld_k, a.hd, t.length - t.first, a.k);
    tile_load<HD, BKV, THREADS>(v_tile,
                                tile_source<HD>(a.v, a.ld_v, a.hd, kv_head, t.begin + t.first),
                                a.ld_v, a.hd, t.length - t.first, a.v);
    int32_t steps = (m_end - m_begin) * min(each, group - share);
    int32_t m = m_begin; // the tile being computed
    for (int32_t step = -1; step < steps; step++) {
        uint32_t now = (uint32_t)(step & 1);
        if (step >= 0) {
            copy_wait();
            __syncthreads();
        }
        if (step + 1 < steps) {
            cursor_load<HD, BQ, THREADS>(next, a, t.length, q_tile + (now ^ 1) * STAGE,
                                         stat_tile + (now ^ 1) * BQ * 8, m_begin, m_end);
        }
        if (step < 0) {
            continue;
        }
        forget(own_lane);
        int32_t q0 = m * BQ; // if all keys come after the tile's queries, they get nothing
        bool visible = row0 <= q0 + BQ - 1;
        float s[MT][NT][4];
        uint32_t p[MT][NT / 2][4];
        if (visible) {
            product_rows<HD, MT, NT>(s, own_lane, rows_lane + now * STAGE);
        }
        uint32_t stat_lane = stat_tile + now * BQ * 8 + (uint32_t)(lane & 3) * 16;
        if (visible && !second) {
            if (a.cap > 0.0f) {
                scores_cap(s, a);
            }
            if (row0 + MT * 16 - 1 > q0 || (a.window > 0 && q0 + BQ - 1 - row0 >= a.window)) {
                scores_mask<MT, NT, false>(s, row0, q0, a.window);
            }
            pair_give<MT, NT>(s, factor, a.cap > 0.0f, stat_lane, p_lane, p);
        }
        __syncthreads();
        if (visible && second) {
            pair_take<MT, NT>(s, stat_lane, p_lane, p);
        }
        if (visible) {
            product_columns<HD, MT, NT / 2>(acc, p, cols_lane + now * STAGE);
        }
        m = m + 1 == m_end ? m_begin : m + 1;
    }
    float f = second ? a.scale : 1.0f;
    if (gridDim.z > 1) {
        rows_store_f32<HD, MT>(acc, f, part_at(a, parts, t.begin, second), a.kv_heads * a.hd, a.hd,
                               row0, t.length);
        return;
    }
    float factors[MT][2];
#pragma unroll
    for (int r = 0; r < MT; r++) {
        factors[r][0] = factors[r][1] = f;
    }
    int64_t ld = second ? ld_dk : ld_dv;
    bf16* out = (second ? dk : dv) + (int64_t)t.begin * ld + (int32_t)blockIdx.y * a.hd;
    rows_store<HD, MT>(acc, factors, own_tile, pair * MT * 16, out, ld, a.hd, row0, t.length);
}

// --- backward, pass 3: dq ---

// { lse, D } of this thread's rows.
template <int MT>
__device__ __forceinline__ void stats_load(float2 (&stat)[MT][2], const float2* stats, int32_t lane,
                                           int32_t row0, int32_t length) {
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int32_t row = row0 + m * 16 + h * 8 + (lane >> 2);
            stat[m][h] = row < length ? stats[row] : make_float2(0.0f, 0.0f);
        }
    }
}

// ds = p (do.v - D), packed as an A operand; stat holds { lse, D } of this thread's rows.
template <int MT, int NT>
__device__ __forceinline__ void
score_gradients(const float (&s)[MT][NT][4], const float (&dp)[MT][NT][4], float factor,
                const float2 (&stat)[MT][2], uint32_t (&ds)[MT][NT / 2][4]) {
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int i = 0; i < NT; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float p0 = exp2_fast(fmaf(s[m][i][2 * h], factor, -stat[m][h].x));
                float p1 = exp2_fast(fmaf(s[m][i][2 * h + 1], factor, -stat[m][h].x));
                ds[m][i / 2][i % 2 * 2 + h] = pack_bf16(p0 * (dp[m][i][2 * h] - stat[m][h].y),
                                                        p1 * (dp[m][i][2 * h + 1] - stat[m][h].y));
            }
        }
    }
}

// With a cap, do.v - D becomes (do.v - D) times the slope of the score.
template <int MT, int NT>
__device__ __forceinline__ void cap_gradients(const float (&s)[MT][NT][4], float (&dp)[MT][NT][4],
                                              const float2 (&stat)[MT][2]) {
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int i = 0; i < NT; i++) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                float d = stat[m][c >> 1].y;
                dp[m][i][c] = fmaf(dp[m][i][c] - d, cap_slope(s[m][i][c]), d);
            }
        }
    }
}

// Adds to acc what the keys from col0 on give to dq; s holds q.k and dp holds do.v of these keys,
// and the lane address points to the first of them.
template <int HD, int MT, int NT>
__device__ __forceinline__ void gradients_add(float (&acc)[MT][HD / 8][4], float (&s)[MT][NT][4],
                                              float (&dp)[MT][NT][4], const attn_args& a,
                                              float factor, const float2 (&stat)[MT][2],
                                              uint32_t k_cols_lane, int32_t row0, int32_t col0) {
    if (a.cap > 0.0f) {
        scores_cap(s, a);
    }
    if (col0 + NT * 8 - 1 > row0 || (a.window > 0 && row0 + MT * 16 - 1 - col0 >= a.window)) {
        scores_mask<MT, NT, true>(s, row0, col0, a.window);
    }
    if (a.cap > 0.0f) {
        cap_gradients(s, dp, stat);
    }
    uint32_t ds[MT][NT / 2][4];
    score_gradients<MT, NT>(s, dp, factor, stat, ds);
    product_columns<HD, MT, NT / 2>(acc, ds, k_cols_lane);
}

// One block per tile of BM = 16 MT WARPS queries and query head; it loops over the key tiles.
// Shared memory: q, do [BM][HD], STAGES x (k, v [BN][HD]).
// With STAGES 2, the next key and value tiles are loaded during the whole of the current one, which
// is processed SUB keys at a time. With STAGES 1, the next values are loaded once do.v is computed,
// and the next keys are loaded during the next do.v (three barriers, less memory).
template <int HD, int WARPS, int MT, int BN, int SUB, int STAGES>
__device__ __forceinline__ void attn_backward_q(const attn_args& a, const float2* stats, bf16* dq,
                                                int64_t ld_dq) {
    // long because one loop contains both ways of loading
    constexpr int THREADS = WARPS * 32;
    constexpr int BM = WARPS * MT * 16;
    constexpr int NT = SUB / 8;
    constexpr int PITCH = tile<HD>::PITCH;
    constexpr uint32_t STAGE = STAGES == 2 ? 2 * BN * PITCH : 0;
    static_assert(STAGES == 2 || SUB == BN, "one stage has no parts");
    extern __shared__ __align__(128) unsigned char shared[];
    int32_t head = (int32_t)blockIdx.y;
    attn_tile t = attn_find(a.cu, a.n_seqs, a.tokens, BM, (int32_t)(gridDim.x - 1 - blockIdx.x));
    if (t.first >= t.length) {
        return;
    }
    if (t.tail) {
        dq += (int64_t)t.begin * ld_dq + head * a.hd;
        rows_zero<HD, BM, THREADS>(dq, ld_dq, a.hd, t.first, t.length);
        return;
    }
    int32_t kv_head = head / (a.heads / a.kv_heads);
    stats += (int64_t)head * a.tokens + t.begin;
    int32_t n_end = (min(t.first + BM, t.length) + BN - 1) / BN;
    int32_t n = a.window > 0 ? max(t.first - a.window + 1, 0) / BN : 0;
    const bf16* k = tile_source<HD>(a.k, a.ld_k, a.hd, kv_head, t.begin + n * BN);
    const bf16* v = tile_source<HD>(a.v, a.ld_v, a.hd, kv_head, t.begin + n * BN);

    uint32_t q_tile = shared_address(shared);
    uint32_t do_tile = q_tile + BM * PITCH;
    uint32_t k_tile = do_tile + BM * PITCH;
    uint32_t v_tile = k_tile + BN * PITCH;
    int32_t lane = (int32_t)threadIdx.x & 31;
    int32_t warp_row = (int32_t)(threadIdx.x >> 5) * MT * 16;
    int32_t row0 = t.first + warp_row;
    uint32_t q_lane = lane_rows16<HD>(q_tile, warp_row);
    uint32_t do_lane = lane_rows16<HD>(do_tile, warp_row);
    uint32_t k_lane = lane_cols16<HD>(k_tile, 0);
    uint32_t v_lane = lane_cols16<HD>(v_tile, 0);
    uint32_t k_cols_lane = lane_rows16<HD>(k_tile, 0);
    const float factor = score_factor(a);

    tile_load<HD, BM, THREADS>(q_tile, tile_source<HD>(a.q, a.ld_q, a.hd, head, t.begin + t.first),
                               a.ld_q, a.hd, t.length - t.first, a.q);
    tile_load<HD, BM, THREADS>(do_tile,
                               tile_source<HD>(a.d_o, a.ld_do, a.hd, head, t.begin + t.first),
                               a.ld_do, a.hd, t.length - t.first, a.d_o);
    if (STAGES == 1) {
        tile_load<HD, BN, THREADS>(v_tile, v, a.ld_v, a.hd, t.length - n * BN, a.v);
        copy_commit();
    }
    tile_load<HD, BN, THREADS>(k_tile, k, a.ld_k, a.hd, t.length - n * BN, a.k);
    if (STAGES == 2) {
        tile_load<HD, BN, THREADS>(v_tile, v, a.ld_v, a.hd, t.length - n * BN, a.v);
    }
    copy_commit();
    float acc[MT][HD / 8][4];
    clear(acc);
    float2 stat[MT][2];
    stats_load<MT>(stat, stats, lane, row0, t.length);
    uint32_t stage = 0;
    for (; n < n_end; n++) {
        copy_wait<2 - STAGES>();
        __syncthreads();
        k += BN * a.ld_k;
        v += BN * a.ld_v;
        forget(q_lane);
        forget(do_lane);
        if (STAGES == 2 && n + 1 < n_end) {
            uint32_t next = k_tile + (stage ^ STAGE);
            int32_t rows_left = t.length - (n + 1) * BN;
            tile_load<HD, BN, THREADS>(next, k, a.ld_k, a.hd, rows_left, a.k);
            tile_load<HD, BN, THREADS>(next + BN * PITCH, v, a.ld_v, a.hd, rows_left, a.v);
            copy_commit();
        }
#pragma unroll
        for (int part = 0; part < BN / SUB; part++) {
            int32_t col0 = n * BN + part * SUB;
            uint32_t at = stage + (uint32_t)(part * SUB * PITCH);
            bool visible = col0 <= row0 + MT * 16 - 1;
            if (STAGES == 2 && !visible) {
                break;
            }
            float s[MT][NT][4];
            float dp[MT][NT][4];
            if (STAGES == 2) {
                product_rows<HD, MT, NT>(s, q_lane, k_lane + at);
                product_rows<HD, MT, NT>(dp, do_lane, v_lane + at);
            } else {
                if (visible) {
                    product_rows<HD, MT, NT>(dp, do_lane, v_lane);
                }
                copy_wait();
                __syncthreads();
                if (n + 1 < n_end) {
                    tile_load<HD, BN, THREADS>(v_tile, v, a.ld_v, a.hd, t.length - (n + 1) * BN,
                                               a.v);
                    copy_commit();
                }
                if (visible) {
                    product_rows<HD, MT, NT>(s, q_lane, k_lane);
                }
            }
            if (visible) {
                gradients_add<HD, MT, NT>(acc, s, dp, a, factor, stat, k_cols_lane + at, row0,
                                          col0);
            }
        }
        if (STAGES == 1 && n + 1 < n_end) {
            __syncthreads();
            tile_load<HD, BN, THREADS>(k_tile, k, a.ld_k, a.hd, t.length - (n + 1) * BN, a.k);
            copy_commit();
        }
        stage ^= STAGE;
    }
    float factors[MT][2];
#pragma unroll
    for (int m = 0; m < MT; m++) {
        factors[m][0] = factors[m][1] = a.scale;
    }
    dq += (int64_t)t.begin * ld_dq + (int32_t)blockIdx.y * a.hd;
    rows_store<HD, MT>(acc, factors, q_tile, warp_row, dq, ld_dq, a.hd, row0, t.length);
}

// --- entry points ---

// The five kernels of a module. KIND says which head sizes and scores they take; what is not taken
// costs nothing, because it is a constant. half exists for the common launch code, which also
// launches attn_f32.cu; here it is 1. PITCH is the number of bytes of a row in shared memory:
// 2 HD, or 2 HD + 16 if HD is not a multiple of 64.

#define EXACT 0  // head size HD, no cap
#define PADDED 1 // any head size up to HD that is a multiple of 8, no cap
#define CAPPED 2 // the same, with or without a cap
#define SIZE_OF(KIND, HD) ((KIND) == EXACT ? (HD) : hd)
#define CAP_OF(KIND) ((KIND) == CAPPED ? cap : 0.0f)

// Forward. Grid (floor(tokens / (16 MT WARPS)) + n_seqs + 1, heads), 32 WARPS threads,
// (16 MT WARPS + 2 STAGES BN) PITCH bytes of dynamic shared memory.
#define ATTN_FORWARD(KIND, NAME, HD, WARPS, MT, BN, STAGES, BLOCKS)                                \
    QLORA_KERNEL __launch_bounds__(WARPS * 32, BLOCKS) qlora_attn##NAME##_fwd(                     \
        const bf16* q, int64_t ld_q, const bf16* k, int64_t ld_k, const bf16* v, int64_t ld_v,     \
        bf16* o, int64_t ld_o, float* lse, const int32_t* cu, int32_t n_seqs, int32_t tokens,      \
        int32_t heads, int32_t kv_heads, int32_t hd, int32_t window, float scale, int32_t half,    \
        float cap, int32_t before) {                                                               \
        attn_args a = {q,      k,     v,           nullptr, ld_q,  ld_k,     ld_v,                 \
                       0,      cu,    n_seqs,      tokens,  heads, kv_heads, SIZE_OF(KIND, HD),    \
                       window, scale, CAP_OF(KIND), before};                                       \
        attn_forward<HD, WARPS, MT, BN, STAGES>(a, o, ld_o, lse);                                  \
    }

// Grid (ceil(tokens / (256 / LANES)), heads), 256 threads; LANES is 16 for HD 128 and 256, 8 for 64
// and 192, 4 for 32 and 96, 2 for 80.
#define ATTN_STATS(KIND, NAME, HD)                                                                 \
    QLORA_KERNEL __launch_bounds__(256) qlora_attn##NAME##_stats(                                  \
        const bf16* o, int64_t ld_o, const bf16* d_o, int64_t ld_do, const float* lse,             \
        float2* stats, int32_t tokens, int32_t hd, int32_t half) {                                 \
        attn_stats<HD, tile<HD>::LANES>(o, ld_o, d_o, ld_do, lse, stats, tokens,                   \
                                        SIZE_OF(KIND, HD));                                        \
    }

// Grid (floor(tokens / (16 MT PAIRS)) + n_seqs + 1, kv_heads, shares), 64 PAIRS threads,
// (32 MT PAIRS + 4 BQ) PITCH + 32 MT PAIRS BQ + 16 BQ bytes of dynamic shared memory.
#define ATTN_BACKWARD_KV(KIND, NAME, HD, PAIRS, MT, BQ, BLOCKS)                                    \
    QLORA_KERNEL __launch_bounds__(PAIRS * 64, BLOCKS) qlora_attn##NAME##_bwd_kv(                  \
        const bf16* q, int64_t ld_q, const bf16* k, int64_t ld_k, const bf16* v, int64_t ld_v,     \
        const bf16* d_o, int64_t ld_do, const float2* stats, bf16* dk, int64_t ld_dk, bf16* dv,    \
        int64_t ld_dv, const int32_t* cu, int32_t n_seqs, int32_t tokens, int32_t heads,           \
        int32_t kv_heads, int32_t hd, int32_t window, float scale, int32_t half, float* parts,     \
        int32_t each, float cap) {                                                                 \
        attn_args a = {q,      k,     v,           d_o,    ld_q,  ld_k,     ld_v,                  \
                       ld_do,  cu,    n_seqs,      tokens, heads, kv_heads, SIZE_OF(KIND, HD),     \
                       window, scale, CAP_OF(KIND), 0};                                            \
        attn_backward_kv<HD, PAIRS, MT, BQ>(a, stats, dk, ld_dk, dv, ld_dv, parts, each);          \
    }

// Grid (floor(tokens / (16 MT WARPS)) + n_seqs + 1, heads), 32 WARPS threads,
// (32 MT WARPS + 2 STAGES BN) PITCH bytes of dynamic shared memory.
#define ATTN_BACKWARD_Q(KIND, NAME, HD, WARPS, MT, BN, SUB, STAGES, BLOCKS)                        \
    QLORA_KERNEL __launch_bounds__(WARPS * 32, BLOCKS) qlora_attn##NAME##_bwd_q(                   \
        const bf16* q, int64_t ld_q, const bf16* k, int64_t ld_k, const bf16* v, int64_t ld_v,     \
        const bf16* d_o, int64_t ld_do, const float2* stats, bf16* dq, int64_t ld_dq,              \
        const int32_t* cu, int32_t n_seqs, int32_t tokens, int32_t heads, int32_t kv_heads,        \
        int32_t hd, int32_t window, float scale, int32_t half, float cap) {                        \
        attn_args a = {q,      k,     v,           d_o,    ld_q,  ld_k,     ld_v,                  \
                       ld_do,  cu,    n_seqs,      tokens, heads, kv_heads, SIZE_OF(KIND, HD),     \
                       window, scale, CAP_OF(KIND), 0};                                            \
        attn_backward_q<HD, WARPS, MT, BN, SUB, STAGES>(a, stats, dq, ld_dq);                      \
    }

#endif
