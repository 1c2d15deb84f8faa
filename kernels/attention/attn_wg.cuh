// attn_wg.cuh - flash attention with the warpgroup instructions of compute capability 9.0: bf16
// storage, f32 softmax and sums; attn64_wg.cu, attn96_wg.cu and so on instantiate it.
//
// Formulas, layouts, offsets of sequences and the tail are those of attn_tc.cuh; only heads of more
// than 128 take a cap.
// Matrices come as tensor maps with boxes of 64 columns and as many rows as a tile of the kernel
// has. A tile may contain rows of the next sequence: their scores are masked, and where they would
// be multiplied by a zero, they are zeroed first, so that nothing leaks between sequences.
//
// Blocks have 384 threads: a warpgroup that copies and two that compute, 64 rows each. Dynamic
// shared memory is 5 tiles of TILE rows forward, 4 backward, and 1,024 bytes; with heads of more
// than 128, whose sums fill the registers, 3, 3 (kv) and 3.5 (q).
//
// Columns are copied by the 64: with heads of 96, the second half of the second panel is part of
// the next head, or zero, and no product reads it.
//
// Determinism: as in attn_tc.cuh: one writer per output, and fixed orders of sums.
#ifndef QLORA_ATTN_WG_CUH
#define QLORA_ATTN_WG_CUH

#include "attn.cuh"
#include "attn_rows.cuh"
#include "../hopper.cuh"

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
    float cap; // 0: none
};

// --- shared by all kernels ---

// A row of a matrix in shared memory: panels of 64 columns, ROWS rows each.
template <int ROWS> __device__ __forceinline__ constexpr uint32_t panel_bytes() {
    return ROWS * PANEL_ROW;
}

// Panels of a head, and the bytes of a tile.
template <int HD> __device__ __forceinline__ constexpr int panels() {
    return (HD + PANEL - 1) / PANEL;
}

template <int HD, int ROWS> __device__ __forceinline__ constexpr uint32_t tile_bytes() {
    return panels<HD>() * panel_bytes<ROWS>();
}

template <int HD, int ROWS>
__device__ __forceinline__ void copy_rows(uint32_t to, const tensor_map* map, uint32_t barrier,
                                          int32_t head, int32_t row) {
#pragma unroll
    for (int i = 0; i < panels<HD>(); i++) {
        copy_box(to + i * panel_bytes<ROWS>(), map, barrier, head * HD + i * PANEL, row);
    }
}

// Zeroes the rows of a tile from `from` on, by the computing threads together.
template <int HD, int ROWS> __device__ __forceinline__ void zero_rows(uint32_t tile, int32_t from) {
#pragma unroll 1
    for (int32_t i = threadIdx.x - 128; i < (ROWS - from) * panels<HD>() * 8;
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

// Scores count in powers of two. With a cap, s becomes tanh(scale s / cap), otherwise it stays.
__device__ __forceinline__ float score_scale(const attn_shape& a) {
    return a.cap > 0.0f ? a.cap : a.scale;
}

template <int N> __device__ __forceinline__ void scores_cap(float (&s)[N], const attn_shape& a) {
    float factor = __fdividef(2.0f * LOG2E * a.scale, a.cap);
#pragma unroll
    for (int i = 0; i < N; i++) {
        float y;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(exp2_fast(s[i] * factor) + 1.0f));
        s[i] = fmaf(y, -2.0f, 1.0f);
    }
}

// Keeps what is computed from an address inside a loop: descriptors of large heads are so many that
// they would take the registers of the sums.
template <int HD> __device__ __forceinline__ uint32_t address_here(uint32_t address) {
    if (HD > 128) {
        asm volatile("" : "+r"(address));
    }
    return address;
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
        product_registers(d, p + 4 * i, operand(b + i * 2 * SWIZZLE_BYTES, panel_bytes<DEPTH>()));
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

// Zeroes rows of the tail, columns of one head, by `threads` threads.
template <int HD, int ROWS = TILE>
__device__ __forceinline__ void zero_tail(bf16* to, int64_t ld, const attn_tile& t, int32_t head,
                                          int32_t thread, int32_t threads) {
#pragma unroll 1
    for (int32_t i = thread; i < ROWS * (HD / 8); i += threads) {
        int32_t row = t.first + i / (HD / 8);
        if (row < t.length) {
            *(uint4*)(to + (int64_t)(t.begin + row) * ld + head * HD + i % (HD / 8) * 8) =
                make_uint4(0, 0, 0, 0);
        }
    }
}

// Barriers: of the kept tiles; streamed tiles are full, and empty, by stage.
struct attn_barriers {
    uint32_t kept;
    uint32_t full;
    uint32_t empty;
};

enum { BARRIERS = 1 + 2 * STAGES, COMPUTE_WARPS = COMPUTE_THREADS / 32 };

// `kept` threads announce what the first barrier stands for, `arrivals` threads a full stage, apart
// from the bytes of its copies, and `readers` threads an empty one.
__device__ __forceinline__ attn_barriers barriers_make(uint64_t* memory, uint32_t kept,
                                                       uint32_t arrivals, uint32_t readers) {
    attn_barriers b;
    b.kept = shared_address(memory);
    b.full = b.kept + 8;
    b.empty = b.full + 8 * STAGES;
    if (threadIdx.x == 0) {
        barrier_init(b.kept, kept);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(b.full + 8 * i, arrivals);
            barrier_init(b.empty + 8 * i, readers);
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

// Announces that this warp no longer reads a tile: one lane does, after all of them.
__device__ __forceinline__ void tile_release(uint32_t barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        barrier_arrive(barrier);
    }
}

__device__ __forceinline__ void stage_release(const attn_barriers& b, const attn_stream& at) {
    tile_release(b.empty + 8 * at.stage);
}

// The same; after the last streamed tile, also releases the kept one.
__device__ __forceinline__ void stage_release(const attn_barriers& b, const attn_stream& at,
                                              bool last, uint32_t kept) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        barrier_arrive(b.empty + 8 * at.stage);
        if (last) {
            barrier_arrive(kept);
        }
    }
}

// The first key that the queries of a tile see, rounded down to a streamed tile.
__device__ __forceinline__ int32_t first_key_of(const attn_tile& t, int32_t window, int32_t rows) {
    int32_t first = window > 0 ? max(t.first - window + 1, 0) : 0;
    return t.first % rows + (first - t.first % rows) / rows * rows;
}

// --- forward ---
//
// Shared memory: Q, then STAGES times K and V, tiles of TILE rows, or of half as many with large
// heads. The copying thread draws the block's next tile of a head from a counter while an earlier
// one is computed: its copies overlap the end of the tile before it, and no block is left with
// several long tiles while others are idle. Which block computes a tile does not change the result.
// Scores of the next keys are computed in parallel with the sums of the current ones. Of the
// barriers, `kept` of k: Q and `work` are full; `kept` of v: they are empty.

// Tiles handed out, not counting the first of each block, and blocks that found none left; both are
// 0 between launches. Launches from one module must not overlap: a context launches them on one
// stream.
static __device__ uint32_t forward_taken;
static __device__ uint32_t forward_ended;

// Keys of a streamed tile.
template <int HD> __device__ __forceinline__ constexpr int forward_keys() {
    return HD > 128 ? HALF_TILE : TILE;
}

// Whether Q is released once the last scores are computed, so that the next Q arrives while the
// last values are summed, or at the end of the tile. Early release pays with small heads; with
// large ones it slows the loop over keys by more than it saves (on an H200, early and late, in
// TFLOP/s: heads of 64, 96 and 128 in sequences of 2,048: 381 and 356, 446 and 430, 505 and 509;
// heads of 64 and 128 in sequences of 8,192: 459 and 445, 615 and 645).
template <int HD> __device__ __forceinline__ constexpr bool forward_early() {
    return HD < 128;
}

struct forward_work {
    attn_tile t;
    int32_t head;      // negative: there is no more work
    int32_t first_key; // of the streamed tiles, which are used backwards
    int32_t last_key;
};

__device__ __forceinline__ int32_t forward_count(const attn_shape& a) {
    return (a.tokens / TILE + a.n_seqs + 1) * a.heads;
}

// The work with number i. Late tiles see the most keys: they come first. Heads that share keys are
// neighbours.
template <int HD>
__device__ __forceinline__ forward_work forward_at(const attn_shape& a, int32_t i) {
    const int keys = forward_keys<HD>();
    forward_work w;
    int32_t last = a.tokens / TILE + a.n_seqs;
    w.t = attn_find(a.cu, a.n_seqs, a.tokens, TILE, last - i / a.heads);
    w.head = i % a.heads;
    w.first_key = keys < TILE && w.t.first + keys < w.t.length ? w.t.first + keys : w.t.first;
    w.last_key = first_key_of(w.t, a.window, keys);
    return w;
}

// Work is handed to the computing threads as seven numbers in shared memory.
enum { WORK_HEAD = 4, WORK_NUMBERS = 7 };

__device__ __forceinline__ void work_put(volatile int32_t* to, const forward_work& w) {
    to[0] = w.t.begin;
    to[1] = w.t.length;
    to[2] = w.t.first;
    to[3] = w.t.tail ? 1 : 0;
    to[WORK_HEAD] = w.head;
    to[5] = w.first_key;
    to[6] = w.last_key;
}

// Only lane 0 reads the numbers, because it is the one that releases them.
__device__ __forceinline__ forward_work work_get(const volatile int32_t* from) {
    int32_t n[WORK_NUMBERS];
#pragma unroll
    for (int i = 0; i < WORK_NUMBERS; i++) {
        n[i] = threadIdx.x % 32 == 0 ? from[i] : 0;
    }
#pragma unroll
    for (int i = 0; i < WORK_NUMBERS; i++) {
        n[i] = __shfl_sync(QLORA_FULL_WARP, n[i], 0);
    }
    forward_work w;
    w.t.begin = n[0];
    w.t.length = n[1];
    w.t.first = n[2];
    w.t.tail = n[3] != 0;
    w.head = n[WORK_HEAD];
    w.first_key = n[5];
    w.last_key = n[6];
    return w;
}

// The number of the block's next work.
__device__ __forceinline__ int32_t forward_next() {
    return (int32_t)(gridDim.x + atomicAdd(&forward_taken, 1u));
}

// The last block to run out of work resets the counters.
__device__ __forceinline__ void forward_end() {
    __threadfence();
    if (atomicAdd(&forward_ended, 1u) == gridDim.x - 1) {
        __threadfence();
        forward_taken = 0;
        forward_ended = 0;
    }
}

template <int HD>
__device__ __forceinline__ void
forward_copy(const tensor_map* q, const tensor_map* k, const tensor_map* v, uint32_t tiles,
             const attn_barriers& kb, const attn_barriers& vb, const attn_shape& a,
             volatile int32_t* work) {
    const int keys = forward_keys<HD>();
    const uint32_t kept = tile_bytes<HD, TILE>();
    const uint32_t bytes = tile_bytes<HD, keys>();
    const int32_t count = forward_count(a);
    uint32_t q_parity = 1;
    attn_stream s = {0, 1};
    for (int32_t i = blockIdx.x, next; i < count; i = next) {
        forward_work w = forward_at<HD>(a, i);
        int32_t kv_head = w.head / (a.heads / a.kv_heads);
        next = forward_next(); // the copies hide its latency, if there are any
        if (w.t.first >= w.t.length) {
            continue;
        }
        barrier_wait(vb.kept, q_parity);
        q_parity ^= 1;
        work_put(work, w);
        barrier_expect(kb.kept, w.t.tail ? 0 : kept);
        if (w.t.tail) {
            continue;
        }
        copy_rows<HD, TILE>(tiles, q, kb.kept, w.head, w.t.begin + w.t.first);
        for (int32_t key = w.first_key; key >= w.last_key; key -= keys, s.next()) {
            uint32_t to = tiles + kept + s.stage * 2 * bytes;
            barrier_wait(kb.empty + 8 * s.stage, s.parity);
            barrier_expect(kb.full + 8 * s.stage, bytes);
            copy_rows<HD, keys>(to, k, kb.full + 8 * s.stage, kv_head, w.t.begin + key);
            barrier_wait(vb.empty + 8 * s.stage, s.parity);
            barrier_expect(vb.full + 8 * s.stage, bytes);
            copy_rows<HD, keys>(to + bytes, v, vb.full + 8 * s.stage, kv_head, w.t.begin + key);
        }
    }
    barrier_wait(vb.kept, q_parity);
    work[WORK_HEAD] = -1;
    barrier_arrive(kb.kept);
    forward_end();
}

// Masks the scores of 64 queries from `query` on and 2 N keys from `key` on.
template <int N>
__device__ __forceinline__ void forward_mask(float (&s)[N], int32_t query, int32_t key,
                                             uint32_t reach) {
    int32_t base = query + own_row() % HALF_TILE - key - own_col();
#pragma unroll
    for (int i = 0; i < N; i++) {
        int32_t distance = base + i / 2 % 2 * 8 - i / 4 * 8 - i % 2;
        s[i] = visible(distance, reach) ? s[i] : MINUS_INF;
    }
}

// p = 2^(factor (s - top)), packed as an operand. top and sum are updated; rescale is what the
// earlier sums have to be multiplied by.
template <int N>
__device__ __forceinline__ void softmax_step(const float (&s)[N], float factor, float (&top)[2],
                                             float (&sum)[2], float (&rescale)[2],
                                             uint32_t (&p)[N / 2]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float peak = top[h];
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            peak = fmaxf(peak, fmaxf(s[i * 4 + h * 2], s[i * 4 + h * 2 + 1]));
        }
        peak = fmaxf(peak, __shfl_xor_sync(QLORA_FULL_WARP, peak, 1));
        peak = fmaxf(peak, __shfl_xor_sync(QLORA_FULL_WARP, peak, 2));
        rescale[h] = exp2_fast((top[h] - peak) * factor);
        top[h] = peak;
        float all = 0.0f;
        float shift = peak * factor;
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            float x = exp2_fast(fmaf(s[i * 4 + h * 2], factor, -shift));
            float y = exp2_fast(fmaf(s[i * 4 + h * 2 + 1], factor, -shift));
            all += x + y;
            p[i * 2 + h] = pack_bf16(x, y);
        }
        sum[h] = sum[h] * rescale[h] + all;
    }
}

// Leaves out keys that this warpgroup's queries do not see.
template <int HD>
__device__ __forceinline__ void forward_skip(uint32_t v, const attn_barriers& kb,
                                             const attn_barriers& vb, attn_stream& at,
                                             int32_t length, int32_t& key) {
    barrier_wait(kb.full + 8 * at.stage, at.parity);
    stage_release(kb, at);
    barrier_wait(vb.full + 8 * at.stage, at.parity);
    if (key + forward_keys<HD>() > length) {
        zero_rows<HD, forward_keys<HD>()>(v, length - key);
        zero_done();
    }
    stage_release(vb, at);
    key -= forward_keys<HD>();
    at.next();
}

// The scores of the first keys.
template <int HD, int N>
__device__ __forceinline__ void forward_first(float (&s)[N], uint32_t q, uint32_t first,
                                              const attn_barriers& kb, const attn_stream& at,
                                              const attn_shape& a, bool last, uint32_t kept) {
    const uint32_t bytes = tile_bytes<HD, forward_keys<HD>()>();
    barrier_wait(kb.full + 8 * at.stage, at.parity);
    products_begin();
    scores<HD, TILE, forward_keys<HD>()>(s, q, first + at.stage * 2 * bytes);
    products_commit();
    products_wait<0>();
    products_hold(s);
    stage_release(kb, at, last, kept);
    if (a.cap > 0.0f) {
        scores_cap(s, a);
    }
}

// One tile; `at` is the stage of its first keys, and then of the next tile's.
template <int HD>
__device__ __forceinline__ void
forward_tile(uint32_t tiles, const attn_barriers& kb, const attn_barriers& vb, attn_stream& at,
             const forward_work& w, const attn_shape& a, float (&acc)[HD / 2], float (&top)[2],
             float (&sum)[2]) {
    const int keys = forward_keys<HD>();
    const uint32_t bytes = tile_bytes<HD, keys>();
    const uint32_t reach = reach_of(a.window);
    const float factor = score_scale(a) * LOG2E;
    const int32_t own = (threadIdx.x / 128 - 1) * HALF_TILE;
    uint32_t q = tiles + own * PANEL_ROW;
    uint32_t first = tiles + tile_bytes<HD, TILE>();
    int32_t key = w.first_key;
    float s[keys / 2];
    if (keys < TILE && own == 0 && key > w.t.first) {
        forward_skip<HD>(first + bytes + at.stage * 2 * bytes, kb, vb, at, w.t.length, key);
    }
    forward_first<HD>(s, q, first, kb, at, a, forward_early<HD>() && key - keys < w.last_key,
                      vb.kept);
    forward_mask(s, w.t.first + own, key, reach);
    for (; key >= w.last_key; key -= keys) {
        const bool more = key - keys >= w.last_key;
        uint32_t v = first + bytes + at.stage * 2 * bytes;
        float rescale[2];
        uint32_t p[keys / 4];
        softmax_step(s, factor, top, sum, rescale, p);
        attn_stream now = at;
        at.next();
        if (more) {
            barrier_wait(kb.full + 8 * at.stage, at.parity);
            products_begin();
            scores<HD, TILE, keys>(s, address_here<HD>(q), first + at.stage * 2 * bytes);
            products_commit();
        }
#pragma unroll
        for (int i = 0; i < HD / 2; i++) {
            acc[i] *= rescale[i / 2 % 2];
        }
        barrier_wait(vb.full + 8 * now.stage, now.parity);
        if (key + keys > w.t.length) {
            zero_rows<HD, keys>(v, w.t.length - key);
            zero_done();
        }
        products_begin();
        weighted_sum<keys>(acc, p, v);
        products_commit();
        if (more) {
            products_wait<1>();
            products_hold(s);
            stage_release(kb, at, forward_early<HD>() && key - 2 * keys < w.last_key, vb.kept);
        }
        products_wait<0>();
        products_hold(acc);
        stage_release(vb, now);
        if (more && a.cap > 0.0f) {
            scores_cap(s, a);
        }
        if (more && (uint32_t)(w.t.first + TILE + keys - key) > reach) {
            forward_mask(s, w.t.first + own, key - keys, reach);
        }
    }
}

template <int HD>
__device__ __forceinline__ void forward_store(const forward_work& w, const attn_shape& a,
                                              const float (&acc)[HD / 2], const float (&top)[2],
                                              float (&sum)[2], bf16* o, int64_t ld_o, float* lse) {
    int32_t row = w.t.first + own_row();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        sum[h] += __shfl_xor_sync(QLORA_FULL_WARP, sum[h], 1);
        sum[h] += __shfl_xor_sync(QLORA_FULL_WARP, sum[h], 2);
        if (threadIdx.x % 4 == 0 && row + 8 * h < w.t.length) {
            lse[(int64_t)w.head * a.tokens + w.t.begin + row + 8 * h] =
                top[h] * score_scale(a) + __log2f(sum[h]) * LN2;
        }
    }
    store_rows<HD>(acc, 1.0f / sum[0], 1.0f / sum[1], o + (int64_t)w.t.begin * ld_o + w.head * HD,
                   ld_o, row, w.t.length);
}

template <int HD>
__device__ __forceinline__ void forward_tail(const forward_work& w, const attn_shape& a, bf16* o,
                                             int64_t ld_o, float* lse) {
    int32_t thread = threadIdx.x - 128;
    zero_tail<HD>(o, ld_o, w.t, w.head, thread, COMPUTE_THREADS);
    if (thread < TILE && w.t.first + thread < w.t.length) {
        lse[(int64_t)w.head * a.tokens + w.t.begin + w.t.first + thread] = 0.0f;
    }
}

template <int HD>
__device__ __forceinline__ void forward_compute(uint32_t tiles, const attn_barriers& kb,
                                                const attn_barriers& vb, const attn_shape& a,
                                                const volatile int32_t* work, bf16* o,
                                                int64_t ld_o, float* lse) {
    uint32_t q_parity = 0;
    attn_stream at = {0, 0};
    for (;; q_parity ^= 1) {
        barrier_wait(kb.kept, q_parity);
        forward_work w = work_get(work);
        if (w.head < 0) {
            break;
        }
        if (w.t.tail) {
            tile_release(vb.kept);
            forward_tail<HD>(w, a, o, ld_o, lse);
            continue;
        }
        float acc[HD / 2];
        float top[2] = {MINUS_INF, MINUS_INF};
        float sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < HD / 2; j++) {
            acc[j] = 0.0f;
        }
        forward_tile<HD>(tiles, kb, vb, at, w, a, acc, top, sum);
        if (!forward_early<HD>()) {
            tile_release(vb.kept);
        }
        forward_store<HD>(w, a, acc, top, sum, o, ld_o, lse);
    }
}

// --- backward ---
//
// Two kernels, as in attn_tc.cuh, after the pass over rows (stats): a block of backward_kv keeps K
// and V of TILE keys and streams Q, dO and stats of HALF_TILE queries; a block of backward_q keeps
// Q and dO and streams K and V. Shared memory: the kept tiles, then STAGES times the streamed ones,
// then STAGES times the stats.
//
// With large heads, a block of backward_kv keeps HALF_TILE keys; one warpgroup computes dv, the
// other dk, and both the scores. A block of backward_q has STAGES tiles of K, which is used twice,
// and one of V, which is copied while dq is computed.

// Keys of a block of backward_kv.
template <int HD> __device__ __forceinline__ constexpr int kept_keys() {
    return HD > 128 ? HALF_TILE : TILE;
}

// Copies two streamed tiles of HALF_TILE rows.
template <int HD>
__device__ __forceinline__ void stream_copy(uint32_t to, const tensor_map* x, const tensor_map* y,
                                            uint32_t barrier, int32_t head, int32_t row) {
    const uint32_t bytes = tile_bytes<HD, HALF_TILE>();
    barrier_expect(barrier, 2 * bytes);
    copy_rows<HD, HALF_TILE>(to, x, barrier, head, row);
    copy_rows<HD, HALF_TILE>(to + bytes, y, barrier, head, row);
}

// The queries that see the keys of a tile of `rows`: [first, end), in steps of HALF_TILE.
__device__ __forceinline__ int32_t last_query(const attn_tile& t, int32_t window, int32_t rows) {
    return window > 0 && window < t.length - t.first - rows ? t.first + rows + window - 1
                                                            : t.length;
}

// One warp copies: its lanes bring the stats, lane 0 the tiles.
template <int HD>
__device__ __forceinline__ void
backward_kv_copy(const tensor_map* q, const tensor_map* k, const tensor_map* v,
                 const tensor_map* d_o, const float2* stats, uint32_t tiles, uint32_t room,
                 const attn_barriers& b, const attn_tile& t, const attn_shape& a, int32_t kv_head,
                 int32_t first_head, int32_t end_head) {
    const int rows = kept_keys<HD>();
    const uint32_t kept = tile_bytes<HD, rows>();
    const uint32_t streamed = 2 * tile_bytes<HD, HALF_TILE>();
    int32_t lane = threadIdx.x;
    int32_t end = last_query(t, a.window, rows);
    attn_stream s = {0, 1};
    if (lane == 0) {
        barrier_expect(b.kept, 2 * kept);
        copy_rows<HD, rows>(tiles, k, b.kept, kv_head, t.begin + t.first);
        copy_rows<HD, rows>(tiles + kept, v, b.kept, kv_head, t.begin + t.first);
    }
    for (int32_t head = first_head; head < end_head; head++) {
        for (int32_t query = t.first; query < end; query += HALF_TILE, s.next()) {
            barrier_wait(b.empty + 8 * s.stage, s.parity);
#pragma unroll
            for (int i = 0; i < HALF_TILE; i += 32) {
                int32_t row = query + i + lane;
                float2 x = row < t.length ? stats[(int64_t)head * a.tokens + t.begin + row]
                                          : make_float2(0.0f, 0.0f);
                uint32_t at = room + s.stage * HALF_TILE * 8 + (i + lane) * 8;
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(x.x), "f"(x.y)
                             : "memory");
            }
            if (lane == 0) {
                stream_copy<HD>(tiles + 2 * kept + s.stage * streamed, q, d_o, b.full + 8 * s.stage,
                                head, t.begin + query);
            } else {
                barrier_arrive(b.full + 8 * s.stage);
            }
        }
    }
}

// The stats of queries c and c + 1 of a streamed tile: lse and D of each.
__device__ __forceinline__ float4 stats_pair(uint32_t room, int32_t c) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(room + c * 8));
    return x;
}

// From scores and dO V^T of 64 keys (rows) and HALF_TILE queries: p and ds, packed as operands.
template <bool CAPPED>
__device__ __forceinline__ void backward_kv_weights(const float (&s)[32], const float (&dp)[32],
                                                    float factor, int32_t distance, uint32_t reach,
                                                    int32_t queries, uint32_t room,
                                                    uint32_t (&p)[16], uint32_t (&ds)[16]) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float4 stat = stats_pair(room, i * 8 + own_col());
        float x[4];
        float y[4];
#pragma unroll
        for (int c = 0; c < 4; c++) {
            int32_t query = i * 8 + own_col() + c % 2;
            bool seen = visible(distance + i * 8 + c % 2 - c / 2 * 8, reach) && query < queries;
            x[c] = seen ? exp2_fast(fmaf(s[i * 4 + c], factor, -(c % 2 ? stat.z : stat.x))) : 0.0f;
            float slope = CAPPED ? fmaf(-s[i * 4 + c], s[i * 4 + c], 1.0f) : 1.0f;
            y[c] = seen ? x[c] * slope * (dp[i * 4 + c] - (c % 2 ? stat.w : stat.y)) : 0.0f;
        }
        p[i * 2] = pack_bf16(x[0], x[1]);
        p[i * 2 + 1] = pack_bf16(x[2], x[3]);
        ds[i * 2] = pack_bf16(y[0], y[1]);
        ds[i * 2 + 1] = pack_bf16(y[2], y[3]);
    }
}

// Waits for streamed queries and starts their scores, and dO V^T.
template <int HD>
__device__ __forceinline__ void backward_kv_scores(float (&s)[32], float (&dp)[32], uint32_t tiles,
                                                   const attn_barriers& b, const attn_stream& at,
                                                   int32_t query, int32_t length) {
    const uint32_t kept = tile_bytes<HD, TILE>();
    const uint32_t bytes = tile_bytes<HD, HALF_TILE>();
    const uint32_t own = tiles + (threadIdx.x / 128 - 1) * HALF_TILE * PANEL_ROW;
    uint32_t q = tiles + 2 * kept + at.stage * 2 * bytes;
    barrier_wait(b.full + 8 * at.stage, at.parity);
    if (query + HALF_TILE > length) {
        zero_rows<HD, HALF_TILE>(q, length - query);
        zero_rows<HD, HALF_TILE>(q + bytes, length - query);
        zero_done();
    }
    products_begin();
    scores<HD, TILE, HALF_TILE>(s, own, q);
    scores<HD, TILE, HALF_TILE>(dp, own + kept, q + bytes);
    products_commit();
}

// From these, the weights; starts the sums.
template <int HD>
__device__ __forceinline__ void
backward_kv_sums(float (&dk)[HD / 2], float (&dv)[HD / 2], const float (&s)[32],
                 const float (&dp)[32], uint32_t tiles, uint32_t room, const attn_stream& at,
                 const attn_tile& t, const attn_shape& a, int32_t query) {
    const uint32_t bytes = tile_bytes<HD, HALF_TILE>();
    const uint32_t q = tiles + 2 * tile_bytes<HD, TILE>() + at.stage * 2 * bytes;
    uint32_t p[HALF_TILE / 4];
    uint32_t ds[HALF_TILE / 4];
    backward_kv_weights<false>(s, dp, a.scale * LOG2E, query + own_col() - t.first - own_row(),
                               reach_of(a.window), t.length - query,
                               room + at.stage * HALF_TILE * 8, p, ds);
    products_begin();
    weighted_sum<HALF_TILE>(dv, p, q + bytes);
    weighted_sum<HALF_TILE>(dk, ds, q);
    products_commit();
}

// The same of one of the sums: of dk, or of dv.
template <int HD, bool DK>
__device__ __forceinline__ void
backward_one_step(float (&sum)[HD / 2], uint32_t k, uint32_t v, uint32_t q, uint32_t room,
                  const attn_shape& a, int32_t distance, uint32_t reach, int32_t queries) {
    const uint32_t d_o = q + tile_bytes<HD, HALF_TILE>();
    float s[HALF_TILE / 2];
    float dp[HALF_TILE / 2];
    uint32_t p[HALF_TILE / 4];
    uint32_t ds[HALF_TILE / 4];
    products_begin();
    scores<HD, HALF_TILE, HALF_TILE>(s, k, q);
    if (DK) {
        scores<HD, HALF_TILE, HALF_TILE>(dp, v, d_o);
    }
    products_commit();
    products_wait<0>();
    products_hold(s);
    if (DK) {
        products_hold(dp);
    }
    if (a.cap > 0.0f) {
        scores_cap(s, a);
        backward_kv_weights<true>(s, DK ? dp : s, a.cap * LOG2E, distance, reach, queries, room, p,
                                  ds);
    } else {
        backward_kv_weights<false>(s, DK ? dp : s, a.scale * LOG2E, distance, reach, queries, room,
                                   p, ds);
    }
    products_begin();
    weighted_sum<HALF_TILE>(sum, DK ? ds : p, DK ? q : d_o);
    products_commit();
    products_wait<0>();
    products_hold(sum);
}

template <int HD>
__device__ __forceinline__ void
backward_kv_plain(uint32_t tiles, uint32_t room, const attn_barriers& b, const attn_tile& t,
                  const attn_shape& a, int32_t heads, float (&dk)[HD / 2], float (&dv)[HD / 2]) {
    int32_t end = last_query(t, a.window, TILE);
    attn_stream at = {0, 0};
    barrier_wait(b.kept, 0);
    for (int32_t head = 0; head < heads; head++) {
        for (int32_t query = t.first; query < end; query += HALF_TILE, at.next()) {
            float s[HALF_TILE / 2];
            float dp[HALF_TILE / 2];
            backward_kv_scores<HD>(s, dp, tiles, b, at, query, t.length);
            products_wait<0>();
            products_hold(s);
            products_hold(dp);
            backward_kv_sums<HD>(dk, dv, s, dp, tiles, room, at, t, a, query);
            products_wait<0>();
            products_hold(dv);
            products_hold(dk);
            barrier_arrive(b.empty + 8 * at.stage); // every thread: each has read statistics
        }
    }
}

// The same for small heads, which leave registers for the scores of the next queries beside the
// sums of these: half as many waits. With heads of 128, those registers would be spilled.
template <int HD>
__device__ __forceinline__ void
backward_kv_ahead(uint32_t tiles, uint32_t room, const attn_barriers& b, const attn_tile& t,
                  const attn_shape& a, int32_t heads, float (&dk)[HD / 2], float (&dv)[HD / 2]) {
    int32_t end = last_query(t, a.window, TILE);
    int32_t left = heads * ((end - t.first + HALF_TILE - 1) / HALF_TILE);
    int32_t query = t.first;
    attn_stream at = {0, 0};
    float s[HALF_TILE / 2];
    float dp[HALF_TILE / 2];
    barrier_wait(b.kept, 0);
    backward_kv_scores<HD>(s, dp, tiles, b, at, query, t.length);
    products_wait<0>();
    products_hold(s);
    products_hold(dp);
    for (; left > 0; left--) {
        uint32_t empty = b.empty + 8 * at.stage;
        backward_kv_sums<HD>(dk, dv, s, dp, tiles, room, at, t, a, query);
        query = query + HALF_TILE < end ? query + HALF_TILE : t.first;
        at.next();
        if (left > 1) {
            backward_kv_scores<HD>(s, dp, tiles, b, at, query, t.length);
        }
        products_wait<0>();
        products_hold(dv);
        products_hold(dk);
        products_hold(s);
        products_hold(dp);
        barrier_arrive(empty); // every thread: each has read statistics
    }
}

template <int HD>
__device__ __forceinline__ void
backward_kv_compute(uint32_t tiles, uint32_t room, const attn_barriers& b, const attn_tile& t,
                    const attn_shape& a, int32_t heads, float (&dk)[HD / 2], float (&dv)[HD / 2]) {
    if (HD <= 64) {
        backward_kv_ahead<HD>(tiles, room, b, t, a, heads, dk, dv);
    } else {
        backward_kv_plain<HD>(tiles, room, b, t, a, heads, dk, dv);
    }
}

template <int HD, bool DK>
__device__ __forceinline__ void
backward_one_compute(uint32_t tiles, uint32_t room, const attn_barriers& b, const attn_tile& t,
                     const attn_shape& a, int32_t heads, float (&sum)[HD / 2]) {
    const uint32_t kept = tile_bytes<HD, HALF_TILE>();
    const int32_t end = last_query(t, a.window, HALF_TILE);
    const int32_t base = own_col() - own_row() % HALF_TILE;
    attn_stream at = {0, 0};
    barrier_wait(b.kept, 0);
    for (int32_t head = 0; head < heads; head++) {
        for (int32_t query = t.first; query < end; query += HALF_TILE, at.next()) {
            uint32_t q = tiles + 2 * kept + at.stage * 2 * kept;
            barrier_wait(b.full + 8 * at.stage, at.parity);
            if (query + HALF_TILE > t.length) {
                zero_rows<HD, HALF_TILE>(q, t.length - query);
                zero_rows<HD, HALF_TILE>(q + kept, t.length - query);
                zero_done();
            }
            backward_one_step<HD, DK>(sum, tiles, tiles + kept, q, room + at.stage * HALF_TILE * 8,
                                      a, query - t.first + base, reach_of(a.window),
                                      t.length - query);
            barrier_arrive(b.empty + 8 * at.stage); // every thread: each has read statistics
        }
    }
}

// The place of a streamed tile of K; V is behind it or, with large heads, behind all of them.
template <int HD> __device__ __forceinline__ uint32_t key_place(uint32_t tiles, uint32_t stage) {
    const uint32_t bytes = tile_bytes<HD, HALF_TILE>();
    return tiles + 2 * tile_bytes<HD, TILE>() + stage * (HD > 128 ? bytes : 2 * bytes);
}

template <int HD> __device__ __forceinline__ uint32_t value_place(uint32_t tiles, uint32_t stage) {
    return key_place<HD>(tiles, HD > 128 ? STAGES - 1 : stage) + tile_bytes<HD, HALF_TILE>();
}

template <int HD>
__device__ __forceinline__ void backward_q_copy(const tensor_map* q, const tensor_map* k,
                                                const tensor_map* v, const tensor_map* d_o,
                                                uint32_t tiles, const attn_barriers& b,
                                                const attn_barriers& vb, const attn_tile& t,
                                                int32_t head, int32_t kv_head, int32_t first_key) {
    const uint32_t kept = tile_bytes<HD, TILE>();
    const uint32_t bytes = tile_bytes<HD, HALF_TILE>();
    uint32_t v_parity = 1;
    attn_stream s = {0, 1};
    barrier_expect(b.kept, 2 * kept);
    copy_rows<HD, TILE>(tiles, q, b.kept, head, t.begin + t.first);
    copy_rows<HD, TILE>(tiles + kept, d_o, b.kept, head, t.begin + t.first);
    for (int32_t key = first_key; key < min(t.first + TILE, t.length); key += HALF_TILE, s.next()) {
        barrier_wait(b.empty + 8 * s.stage, s.parity);
        if (HD <= 128) {
            stream_copy<HD>(key_place<HD>(tiles, s.stage), k, v, b.full + 8 * s.stage, kv_head,
                            t.begin + key);
            continue;
        }
        barrier_expect(b.full + 8 * s.stage, bytes);
        copy_rows<HD, HALF_TILE>(key_place<HD>(tiles, s.stage), k, b.full + 8 * s.stage, kv_head,
                                 t.begin + key);
        barrier_wait(vb.empty, v_parity);
        v_parity ^= 1;
        barrier_expect(vb.full, bytes);
        copy_rows<HD, HALF_TILE>(value_place<HD>(tiles, 0), v, vb.full, kv_head, t.begin + key);
    }
}

// ds of 64 queries and HALF_TILE keys, packed as an operand.
template <bool CAPPED>
__device__ __forceinline__ void
backward_q_weights(const float (&s)[32], const float (&dp)[32], const float2 (&stat)[2],
                   float factor, int32_t distance, uint32_t reach, uint32_t (&ds)[16]) {
#pragma unroll
    for (int i = 0; i < 16; i++) { // pairs of neighbouring keys
        float2 x = stat[i % 2];
        float y[2];
#pragma unroll
        for (int c = 0; c < 2; c++) {
            bool seen = visible(distance + i % 2 * 8 - i / 2 * 8 - c, reach);
            float p = exp2_fast(fmaf(s[i * 2 + c], factor, -x.x));
            float slope = CAPPED ? fmaf(-s[i * 2 + c], s[i * 2 + c], 1.0f) : 1.0f;
            y[c] = seen ? (CAPPED ? p * slope : p) * (dp[i * 2 + c] - x.y) : 0.0f;
        }
        ds[i] = pack_bf16(y[0], y[1]);
    }
}

template <int HD>
__device__ __forceinline__ void
backward_q_compute(const float2* stats, uint32_t tiles, const attn_barriers& b,
                   const attn_barriers& vb, const attn_tile& t, const attn_shape& a, int32_t head,
                   int32_t first_key, float (&dq)[HD / 2]) {
    const int32_t own = (threadIdx.x / 128 - 1) * HALF_TILE;
    const uint32_t kept = tile_bytes<HD, TILE>();
    const uint32_t reach = reach_of(a.window);
    const float factor = a.scale * LOG2E;
    int32_t row = t.first + own_row();
    float2 stat[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        stat[h] = row + 8 * h < t.length ? stats[(int64_t)head * a.tokens + t.begin + row + 8 * h]
                                         : make_float2(0.0f, 0.0f);
    }
    uint32_t v_parity = 0;
    attn_stream at = {0, 0};
    barrier_wait(b.kept, 0);
    for (int32_t key = first_key; key < min(t.first + TILE, t.length);
         key += HALF_TILE, at.next()) {
        uint32_t k = key_place<HD>(tiles, at.stage);
        float s[HALF_TILE / 2];
        float dp[HALF_TILE / 2];
        uint32_t ds[HALF_TILE / 4];
        barrier_wait(b.full + 8 * at.stage, at.parity);
        if (key + HALF_TILE > t.length) {
            zero_rows<HD, HALF_TILE>(k, t.length - key);
            zero_done();
        }
        products_begin();
        scores<HD, TILE, HALF_TILE>(s, tiles + own * PANEL_ROW, k);
        if (HD > 128) {
            products_commit();
            barrier_wait(vb.full, v_parity);
            v_parity ^= 1;
            products_begin();
        }
        scores<HD, TILE, HALF_TILE>(dp, tiles + kept + own * PANEL_ROW,
                                    HD > 128 ? value_place<HD>(tiles, 0)
                                             : k + tile_bytes<HD, HALF_TILE>());
        products_commit();
        products_wait<0>();
        products_hold(s);
        products_hold(dp);
        if (HD > 128) {
            tile_release(vb.empty);
        }
        if (a.cap > 0.0f) {
            scores_cap(s, a);
            backward_q_weights<true>(s, dp, stat, a.cap * LOG2E, row - key - own_col(), reach, ds);
        } else {
            backward_q_weights<false>(s, dp, stat, factor, row - key - own_col(), reach, ds);
        }
        products_begin();
        weighted_sum<HALF_TILE>(dq, ds, k);
        products_commit();
        products_wait<0>();
        products_hold(dq);
        stage_release(b, at);
    }
}

// --- kernels ---

template <int HD>
__device__ __forceinline__ void attn_forward(const tensor_map* q, const tensor_map* k,
                                             const tensor_map* v, bf16* o, int64_t ld_o, float* lse,
                                             const attn_shape& a) {
    extern __shared__ __align__(1024) char memory[];
    __shared__ __align__(16) uint64_t barriers[2 * BARRIERS];
    __shared__ __align__(16) int32_t work[WORK_NUMBERS];
    attn_barriers kb = barriers_make(barriers, 1, 1, COMPUTE_WARPS);
    attn_barriers vb = barriers_make(barriers + BARRIERS, COMPUTE_WARPS, 1, COMPUTE_WARPS);
    uint32_t tiles = first_tile(memory);
    if (threadIdx.x < 128) {
        registers_few<HD <= 128 ? 40 : 24>();
        if (threadIdx.x == 0) {
            forward_copy<HD>(q, k, v, tiles, kb, vb, a, work);
        }
    } else {
        registers_many<HD <= 128 ? 232 : 240>();
        forward_compute<HD>(tiles, kb, vb, a, work, o, ld_o, lse);
    }
}

// Stores rows of accumulators as f32, contiguous rows of `width`.
template <int HD>
__device__ __forceinline__ void store_part(const float (&d)[HD / 2], float factor, float* to,
                                           int32_t width, int32_t row, int32_t length) {
#pragma unroll
    for (int i = 0; i < HD / 4; i++) {
        int32_t r = row + i % 2 * 8;
        if (r < length) {
            *(float2*)(to + (int64_t)r * width + i / 2 * 8 + own_col()) =
                make_float2(d[i * 2] * factor, d[i * 2 + 1] * factor);
        }
    }
}

template <int HD, int ROWS>
__device__ __forceinline__ void zero_tail_part(float* to, int32_t width, const attn_tile& t) {
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < ROWS * HD; i += blockDim.x) {
        int32_t row = t.first + i / HD;
        if (row < t.length) {
            to[(int64_t)row * width + i % HD] = 0.0f;
        }
    }
}

template <int HD>
__device__ __forceinline__ void
attn_backward_kv(const tensor_map* q, const tensor_map* k, const tensor_map* v,
                 const tensor_map* d_o, const float2* stats, bf16* dk, int64_t ld_dk, bf16* dv,
                 int64_t ld_dv, float* parts, int32_t each, const attn_shape& a) {
    extern __shared__ __align__(1024) char memory[];
    __shared__ __align__(8) uint64_t barriers[BARRIERS];
    __shared__ __align__(16) float2 room[STAGES * HALF_TILE];
    int32_t kv_head = blockIdx.y;
    int32_t group = a.heads / a.kv_heads;
    int32_t first_head = kv_head * group + blockIdx.z * each;
    int32_t end_head = min(first_head + each, kv_head * group + group);
    attn_tile t = attn_find(a.cu, a.n_seqs, a.tokens, TILE, blockIdx.x);
    if (t.first >= t.length) {
        return;
    }
    int32_t width = a.kv_heads * HD;
    int64_t part = (int64_t)a.tokens * width;
    float* own_parts = parts + blockIdx.z * part + (int64_t)t.begin * width + (int64_t)kv_head * HD;
    if (t.tail) {
        if (parts == nullptr) {
            zero_tail<HD>(dk, ld_dk, t, kv_head, threadIdx.x, blockDim.x);
            zero_tail<HD>(dv, ld_dv, t, kv_head, threadIdx.x, blockDim.x);
        } else {
            zero_tail_part<HD, TILE>(own_parts, width, t);
            zero_tail_part<HD, TILE>(own_parts + gridDim.z * part, width, t);
        }
        return;
    }
    attn_barriers b = barriers_make(barriers, 1, 32, COMPUTE_THREADS);
    uint32_t tiles = first_tile(memory);
    if (threadIdx.x < 128) {
        registers_few();
        if (threadIdx.x < 32) {
            backward_kv_copy<HD>(q, k, v, d_o, stats, tiles, shared_address(room), b, t, a, kv_head,
                                 first_head, end_head);
        }
        return;
    }
    registers_many();
    float acc_k[HD / 2];
    float acc_v[HD / 2];
#pragma unroll
    for (int i = 0; i < HD / 2; i++) {
        acc_k[i] = acc_v[i] = 0.0f;
    }
    backward_kv_compute<HD>(tiles, shared_address(room), b, t, a, end_head - first_head, acc_k,
                            acc_v);
    int32_t row = t.first + own_row();
    if (parts != nullptr) {
        store_part<HD>(acc_v, 1.0f, own_parts, width, row, t.length);
        store_part<HD>(acc_k, a.scale, own_parts + gridDim.z * part, width, row, t.length);
        return;
    }
    store_rows<HD>(acc_k, a.scale, a.scale, dk + (int64_t)t.begin * ld_dk + kv_head * HD, ld_dk,
                   row, t.length);
    store_rows<HD>(acc_v, 1.0f, 1.0f, dv + (int64_t)t.begin * ld_dv + kv_head * HD, ld_dv, row,
                   t.length);
}

// Large heads: dk or dv, by one warpgroup.
template <int HD, bool DK>
__device__ __forceinline__ void backward_one(bf16* to, int64_t ld, const float* parts, float* part,
                                             int32_t width, uint32_t tiles, uint32_t room,
                                             const attn_barriers& b, const attn_tile& t,
                                             const attn_shape& a, int32_t heads) {
    float sum[HD / 2];
#pragma unroll
    for (int i = 0; i < HD / 2; i++) {
        sum[i] = 0.0f;
    }
    backward_one_compute<HD, DK>(tiles, room, b, t, a, heads, sum);
    const float factor = DK ? a.scale : 1.0f;
    const int32_t row = t.first + own_row() % HALF_TILE;
    if (parts != nullptr) {
        store_part<HD>(sum, factor, part, width, row, t.length);
    } else {
        store_rows<HD>(sum, factor, factor, to + (int64_t)t.begin * ld, ld, row, t.length);
    }
}

template <int HD>
__device__ __forceinline__ void
attn_backward_each(const tensor_map* q, const tensor_map* k, const tensor_map* v,
                   const tensor_map* d_o, const float2* stats, bf16* dk, int64_t ld_dk, bf16* dv,
                   int64_t ld_dv, float* parts, int32_t each, const attn_shape& a) {
    extern __shared__ __align__(1024) char memory[];
    __shared__ __align__(8) uint64_t barriers[BARRIERS];
    __shared__ __align__(16) float2 room[STAGES * HALF_TILE];
    int32_t kv_head = blockIdx.y;
    int32_t group = a.heads / a.kv_heads;
    int32_t first_head = kv_head * group + blockIdx.z * each;
    int32_t heads = min(each, kv_head * group + group - first_head);
    attn_tile t = attn_find(a.cu, a.n_seqs, a.tokens, HALF_TILE, blockIdx.x);
    if (t.first >= t.length) {
        return;
    }
    int32_t width = a.kv_heads * HD;
    int64_t part = (int64_t)a.tokens * width;
    float* part_v = parts + blockIdx.z * part + (int64_t)t.begin * width + (int64_t)kv_head * HD;
    float* part_k = part_v + gridDim.z * part;
    if (t.tail && parts == nullptr) {
        zero_tail<HD, HALF_TILE>(dk, ld_dk, t, kv_head, threadIdx.x, blockDim.x);
        zero_tail<HD, HALF_TILE>(dv, ld_dv, t, kv_head, threadIdx.x, blockDim.x);
        return;
    }
    if (t.tail) {
        zero_tail_part<HD, HALF_TILE>(part_v, width, t);
        zero_tail_part<HD, HALF_TILE>(part_k, width, t);
        return;
    }
    attn_barriers b = barriers_make(barriers, 1, 32, COMPUTE_THREADS);
    uint32_t tiles = first_tile(memory);
    if (threadIdx.x < 128) {
        registers_few<24>();
        if (threadIdx.x < 32) {
            backward_kv_copy<HD>(q, k, v, d_o, stats, tiles, shared_address(room), b, t, a, kv_head,
                                 first_head, first_head + heads);
        }
        return;
    }
    registers_many<240>();
    if (threadIdx.x < 256) {
        backward_one<HD, false>(dv + kv_head * HD, ld_dv, parts, part_v, width, tiles,
                                shared_address(room), b, t, a, heads);
    } else {
        backward_one<HD, true>(dk + kv_head * HD, ld_dk, parts, part_k, width, tiles,
                               shared_address(room), b, t, a, heads);
    }
}

template <int HD>
__device__ __forceinline__ void attn_backward_q(const tensor_map* q, const tensor_map* k,
                                                const tensor_map* v, const tensor_map* d_o,
                                                const float2* stats, bf16* dq, int64_t ld_dq,
                                                const attn_shape& a) {
    extern __shared__ __align__(1024) char memory[];
    __shared__ __align__(8) uint64_t barriers[(HD > 128 ? 2 : 1) * BARRIERS];
    int32_t head = blockIdx.y;
    attn_tile t = attn_find(a.cu, a.n_seqs, a.tokens, TILE, gridDim.x - 1 - blockIdx.x);
    if (t.first >= t.length) {
        return;
    }
    if (t.tail) {
        zero_tail<HD>(dq, ld_dq, t, head, threadIdx.x, blockDim.x);
        return;
    }
    attn_barriers b = barriers_make(barriers, 1, 1, COMPUTE_WARPS);
    attn_barriers vb = b;
    if (HD > 128) {
        vb = barriers_make(barriers + BARRIERS, 1, 1, COMPUTE_WARPS);
    }
    uint32_t tiles = first_tile(memory);
    int32_t first_key = first_key_of(t, a.window, HALF_TILE);
    if (threadIdx.x < 128) {
        registers_few<HD <= 128 ? 40 : 24>();
        if (threadIdx.x == 0) {
            backward_q_copy<HD>(q, k, v, d_o, tiles, b, vb, t, head, head / (a.heads / a.kv_heads),
                                first_key);
        }
        return;
    }
    registers_many<HD <= 128 ? 232 : 240>();
    float acc[HD / 2];
#pragma unroll
    for (int i = 0; i < HD / 2; i++) {
        acc[i] = 0.0f;
    }
    backward_q_compute<HD>(stats, tiles, b, vb, t, a, head, first_key, acc);
    store_rows<HD>(acc, a.scale, a.scale, dq + (int64_t)t.begin * ld_dq + head * HD, ld_dq,
                   t.first + own_row(), t.length);
}

// Statistics as in attn_rows.cuh, LANES threads per row.
#define ATTN_WG_STATS(HD, LANES)                                                                   \
    QLORA_KERNEL __launch_bounds__(256) qlora_attn##HD##_wg_stats(                                 \
        const bf16* o, int64_t ld_o, const bf16* d_o, int64_t ld_do, const float* lse,             \
        float2* stats, int32_t tokens, int32_t hd, int32_t half) {                                 \
        attn_stats<HD, LANES>(o, ld_o, d_o, ld_do, lse, stats, tokens, HD);                        \
    }

#define ATTN_MAP const __grid_constant__ tensor_map

// CAP is 0.0f or, if a parameter follows (", float cap"), that one.

// Grid (any number; the blocks that run at once, or one per tile), 384 threads.
#define ATTN_WG_FORWARD(HD, CAP, ...)                                                              \
    QLORA_KERNEL __launch_bounds__(384, 1) qlora_attn##HD##_wg_fwd(                                \
        ATTN_MAP q, ATTN_MAP k, ATTN_MAP v, bf16* o, int64_t ld_o, float* lse, const int32_t* cu,  \
        int32_t n_seqs, int32_t tokens, int32_t heads, int32_t kv_heads, int32_t window,           \
        float scale __VA_ARGS__) {                                                                 \
        attn_shape a = {cu, n_seqs, tokens, heads, kv_heads, window, scale, CAP};                  \
        attn_forward<HD>(&q, &k, &v, o, ld_o, lse, a);                                             \
    }

// Grid (floor(tokens / kept_keys<HD>()) + n_seqs + 1, kv_heads, shares), 384 threads. PASS is
// attn_backward_kv or, for large heads, attn_backward_each.
#define ATTN_WG_BACKWARD_KV(HD, PASS, CAP, ...)                                                    \
    QLORA_KERNEL __launch_bounds__(384, 1) qlora_attn##HD##_wg_bwd_kv(                             \
        ATTN_MAP q, ATTN_MAP k, ATTN_MAP v, ATTN_MAP d_o, const float2* stats, bf16* dk,           \
        int64_t ld_dk, bf16* dv, int64_t ld_dv, const int32_t* cu, int32_t n_seqs, int32_t tokens, \
        int32_t heads, int32_t kv_heads, int32_t window, float scale, float* parts,                \
        int32_t each __VA_ARGS__) {                                                                \
        attn_shape a = {cu, n_seqs, tokens, heads, kv_heads, window, scale, CAP};                  \
        PASS<HD>(&q, &k, &v, &d_o, stats, dk, ld_dk, dv, ld_dv, parts, each, a);                   \
    }

// Grid (floor(tokens / TILE) + n_seqs + 1, heads), 384 threads.
#define ATTN_WG_BACKWARD_Q(HD, CAP, ...)                                                           \
    QLORA_KERNEL __launch_bounds__(384, 1) qlora_attn##HD##_wg_bwd_q(                              \
        ATTN_MAP q, ATTN_MAP k, ATTN_MAP v, ATTN_MAP d_o, const float2* stats, bf16* dq,           \
        int64_t ld_dq, const int32_t* cu, int32_t n_seqs, int32_t tokens, int32_t heads,           \
        int32_t kv_heads, int32_t window, float scale __VA_ARGS__) {                               \
        attn_shape a = {cu, n_seqs, tokens, heads, kv_heads, window, scale, CAP};                  \
        attn_backward_q<HD>(&q, &k, &v, &d_o, stats, dq, ld_dq, a);                                \
    }

#endif
