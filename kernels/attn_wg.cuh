// attn_wg.cuh - flash attention with the warpgroup instructions of compute capability 9.0: bf16
// storage, f32 softmax and sums; attn64_wg.cu and attn128_wg.cu instantiate it.
//
// Formulas, layouts, offsets of sequences and the tail are those of attn_tc.cuh, without a cap.
// Matrices come as tensor maps with boxes of 64 columns and as many rows as a tile of the kernel
// has. A tile may contain rows of the next sequence: their scores are masked, and where they would
// be multiplied by a zero, they are zeroed first, so that nothing leaks between sequences.
//
// Blocks have 384 threads: a warpgroup that copies and two that compute, 64 rows each. Dynamic
// shared memory is ATTN_WG_SHARED(HD) bytes.
//
// Determinism: as in attn_tc.cuh: one writer per output, and fixed orders of sums.
#ifndef QLORA_ATTN_WG_CUH
#define QLORA_ATTN_WG_CUH

#include "attn.cuh"
#include "hopper.cuh"

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define MINUS_INF __int_as_float((int)0xff800000u)

enum {
    TILE = 128,     // rows of the tile that a block keeps
    HALF_TILE = 64, // rows of a warpgroup; rows of a streamed tile of the backward kernels
    STAGES = 2,     // streamed tiles in flight
    COMPUTE_THREADS = 256
};

struct attn_shape {
    const int32_t* cu;
    int32_t n_seqs;
    int32_t tokens;
    int32_t heads;
    int32_t kv_heads;
    int32_t window;
    float scale;
};

// --- shared by all kernels ---

// A row of a matrix in shared memory: panels of 64 columns, ROWS rows each.
template <int ROWS> __device__ __forceinline__ constexpr uint32_t panel_bytes() {
    return ROWS * PANEL_ROW;
}

template <int HD, int ROWS>
__device__ __forceinline__ void copy_rows(uint32_t to, const tensor_map* map, uint32_t barrier,
                                          int32_t head, int32_t row) {
#pragma unroll
    for (int i = 0; i < HD / PANEL; i++) {
        copy_box(to + i * panel_bytes<ROWS>(), map, barrier, head * HD + i * PANEL, row);
    }
}

// Zeroes the rows of a tile from `from` on, by the computing threads together.
template <int HD, int ROWS> __device__ __forceinline__ void zero_rows(uint32_t tile, int32_t from) {
    for (int32_t i = threadIdx.x - 128; i < (ROWS - from) * (HD / PANEL) * 8;
         i += COMPUTE_THREADS) {
        int32_t row = from + i / 8 % (ROWS - from);
        int32_t panel = i / 8 / (ROWS - from);
        uint32_t at = tile + panel * panel_bytes<ROWS>() + row * PANEL_ROW + i % 8 * 16;
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
    }
}

// Makes zeroed rows visible to products.
__device__ __forceinline__ void zero_done() {
    barrier_publish();
    asm volatile("bar.sync 1, 256;" ::: "memory");
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Keeps scores of visible pairs; `distance` is query minus key.
__device__ __forceinline__ bool visible(int32_t distance, uint32_t reach) {
    return (uint32_t)distance < reach; // a negative distance wraps around
}

__device__ __forceinline__ uint32_t reach_of(int32_t window) {
    return window > 0 ? (uint32_t)window : 0x80000000u;
}

// d = a b^T: 64 rows of a, N rows of b, over HD columns of both.
template <int HD, int A_ROWS, int B_ROWS, int N>
__device__ __forceinline__ void scores(float (&d)[N], uint32_t a, uint32_t b) {
#pragma unroll
    for (int i = 0; i < HD / 16; i++) {
        uint32_t inside = i % 4 * 32;
        product<0, 0>(d, operand(a + i / 4 * panel_bytes<A_ROWS>() + inside, 16),
                      operand(b + i / 4 * panel_bytes<B_ROWS>() + inside, 16), i > 0);
    }
}

// d += p b: p is in registers, 64 rows by DEPTH columns; b has DEPTH rows of 2 N columns.
template <int DEPTH, int N>
__device__ __forceinline__ void weighted_sum(float (&d)[N], const uint32_t* p, uint32_t b) {
#pragma unroll
    for (int i = 0; i < DEPTH / 16; i++) {
        product_registers(d, p + 4 * i,
                          operand(b + i * 2 * SWIZZLE_BYTES, panel_bytes<DEPTH>()));
    }
}

// The row of a tile that the first of this thread's accumulators belongs to, and its column.
__device__ __forceinline__ int32_t own_row() {
    int32_t thread = threadIdx.x - 128;
    return thread / 32 * 16 + thread % 32 / 4;
}

__device__ __forceinline__ int32_t own_col() {
    return threadIdx.x % 4 * 2;
}

// Stores rows of accumulators as bf16; rows from `length` on are left alone.
template <int HD>
__device__ __forceinline__ void store_rows(const float (&d)[HD / 2], float upper, float lower,
                                           bf16* to, int64_t ld, int32_t row, int32_t length) {
    bf16* first = to + row * ld + own_col();
#pragma unroll
    for (int i = 0; i < HD / 8; i++) {
        if (row < length) {
            *(uint32_t*)(first + i * 8) = pack_bf16(d[i * 4] * upper, d[i * 4 + 1] * upper);
        }
        if (row + 8 < length) {
            *(uint32_t*)(first + 8 * ld + i * 8) =
                pack_bf16(d[i * 4 + 2] * lower, d[i * 4 + 3] * lower);
        }
    }
}

// Zeroes rows of the tail: columns of one head.
template <int HD>
__device__ __forceinline__ void zero_tail(bf16* to, int64_t ld, const attn_tile& t, int32_t head) {
    for (int32_t i = threadIdx.x; i < TILE * (HD / 8); i += blockDim.x) {
        int32_t row = t.first + i / (HD / 8);
        if (row < t.length) {
            *(uint4*)(to + (int64_t)(t.begin + row) * ld + head * HD + i % (HD / 8) * 8) =
                make_uint4(0, 0, 0, 0);
        }
    }
}

// Barriers: the kept tiles are full; streamed tiles are full, and empty, by stage.
struct attn_barriers {
    uint32_t kept;
    uint32_t full;
    uint32_t empty;
};

// `arrivals` threads announce a full stage, apart from the bytes of its copies.
__device__ __forceinline__ attn_barriers barriers_make(uint64_t* memory, uint32_t arrivals) {
    attn_barriers b;
    b.kept = shared_address(memory);
    b.full = b.kept + 8;
    b.empty = b.full + 8 * STAGES;
    if (threadIdx.x == 0) {
        barrier_init(b.kept, 1);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(b.full + 8 * i, arrivals);
            barrier_init(b.empty + 8 * i, 2);
        }
        barrier_publish();
    }
    __syncthreads();
    return b;
}

__device__ __forceinline__ uint32_t first_tile(const void* memory) {
    return (shared_address(memory) + SWIZZLE_BYTES - 1) & ~(SWIZZLE_BYTES - 1u);
}

// The streamed tile being used: its stage, and the parity of its barriers.
struct attn_stream {
    uint32_t stage;
    uint32_t parity;
    __device__ __forceinline__ void next() {
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        parity ^= stage == 0;
    }
};

// --- forward ---
//
// Shared memory: Q, then STAGES times K and V, tiles of TILE rows.

template <int HD>
__device__ __forceinline__ void forward_copy(const tensor_map* q, const tensor_map* k,
                                             const tensor_map* v, uint32_t tiles,
                                             const attn_barriers& b, const attn_tile& t,
                                             int32_t head, int32_t kv_head, int32_t last_key) {
    const uint32_t bytes = TILE * HD * 2;
    attn_stream s = {0, 1};
    barrier_expect(b.kept, bytes);
    copy_rows<HD, TILE>(tiles, q, b.kept, head, t.begin + t.first);
    for (int32_t key = t.first; key >= last_key; key -= TILE, s.next()) {
        uint32_t to = tiles + bytes + s.stage * 2 * bytes;
        barrier_wait(b.empty + 8 * s.stage, s.parity);
        barrier_expect(b.full + 8 * s.stage, 2 * bytes);
        copy_rows<HD, TILE>(to, k, b.full + 8 * s.stage, kv_head, t.begin + key);
        copy_rows<HD, TILE>(to + bytes, v, b.full + 8 * s.stage, kv_head, t.begin + key);
    }
}

// Masks the scores of 64 queries from `query` on and TILE keys from `key` on.
__device__ __forceinline__ void forward_mask(float (&s)[TILE / 2], int32_t query, int32_t key,
                                             uint32_t reach) {
    int32_t base = query + own_row() % HALF_TILE - key - own_col();
#pragma unroll
    for (int i = 0; i < TILE / 2; i++) {
        int32_t distance = base + i / 2 % 2 * 8 - i / 4 * 8 - i % 2;
        s[i] = visible(distance, reach) ? s[i] : MINUS_INF;
    }
}

// p = 2^(factor (s - top)), packed as an operand. top and sum are updated; rescale is what the
// earlier sums have to be multiplied by.
__device__ __forceinline__ void softmax_step(const float (&s)[TILE / 2], float factor,
                                             float (&top)[2], float (&sum)[2], float (&rescale)[2],
                                             uint32_t (&p)[TILE / 4]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float peak = top[h];
#pragma unroll
        for (int i = 0; i < TILE / 8; i++) {
            peak = fmaxf(peak, fmaxf(s[i * 4 + h * 2], s[i * 4 + h * 2 + 1]));
        }
        peak = fmaxf(peak, __shfl_xor_sync(QLORA_FULL_WARP, peak, 1));
        peak = fmaxf(peak, __shfl_xor_sync(QLORA_FULL_WARP, peak, 2));
        rescale[h] = exp2_fast((top[h] - peak) * factor);
        top[h] = peak;
        float all = 0.0f;
        float shift = peak * factor;
#pragma unroll
        for (int i = 0; i < TILE / 8; i++) {
            float x = exp2_fast(fmaf(s[i * 4 + h * 2], factor, -shift));
            float y = exp2_fast(fmaf(s[i * 4 + h * 2 + 1], factor, -shift));
            all += x + y;
            p[i * 2 + h] = pack_bf16(x, y);
        }
        sum[h] = sum[h] * rescale[h] + all;
    }
}

template <int HD>
__device__ __forceinline__ void forward_compute(uint32_t tiles, const attn_barriers& b,
                                                const attn_tile& t, const attn_shape& a,
                                                int32_t head, int32_t last_key, bf16* o,
                                                int64_t ld_o, float* lse) {
    const uint32_t bytes = TILE * HD * 2;
    const uint32_t reach = reach_of(a.window);
    const float factor = a.scale * LOG2E;
    const int32_t own = (threadIdx.x / 128 - 1) * HALF_TILE;
    const bool first_thread = threadIdx.x % 128 == 0;
    uint32_t q = tiles + own * PANEL_ROW;
    float acc[HD / 2];
    float s[TILE / 2];
    float top[2] = {MINUS_INF, MINUS_INF};
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < HD / 2; i++) {
        acc[i] = 0.0f;
    }
    attn_stream at = {0, 0};
    barrier_wait(b.kept, 0);
    for (int32_t key = t.first; key >= last_key; key -= TILE, at.next()) {
        uint32_t k = tiles + bytes + at.stage * 2 * bytes;
        barrier_wait(b.full + 8 * at.stage, at.parity);
        if (key + TILE > t.length) {
            zero_rows<HD, TILE>(k + bytes, t.length - key);
            zero_done();
        }
        products_begin();
        scores<HD, TILE, TILE>(s, q, k);
        products_commit();
        products_wait<0>();
        products_hold(s);
        if (key == t.first || (uint32_t)(t.first + TILE - key) > reach) {
            forward_mask(s, t.first + own, key, reach);
        }
        float rescale[2];
        uint32_t p[TILE / 4];
        softmax_step(s, factor, top, sum, rescale, p);
#pragma unroll
        for (int i = 0; i < HD / 2; i++) {
            acc[i] *= rescale[i / 2 % 2];
        }
        products_begin();
        weighted_sum<TILE>(acc, p, k + bytes);
        products_commit();
        products_wait<0>();
        products_hold(acc);
        if (first_thread) {
            barrier_arrive(b.empty + 8 * at.stage);
        }
    }
    int32_t row = t.first + own_row();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        sum[h] += __shfl_xor_sync(QLORA_FULL_WARP, sum[h], 1);
        sum[h] += __shfl_xor_sync(QLORA_FULL_WARP, sum[h], 2);
        if (threadIdx.x % 4 == 0 && row + 8 * h < t.length) {
            lse[(int64_t)head * a.tokens + t.begin + row + 8 * h] =
                top[h] * a.scale + __log2f(sum[h]) * LN2;
        }
    }
    store_rows<HD>(acc, 1.0f / sum[0], 1.0f / sum[1], o + (int64_t)t.begin * ld_o + head * HD, ld_o,
                   row, t.length);
}

#endif
