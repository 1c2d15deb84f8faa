// decode_many_attention.cu - attention of one query per text over the cache, for many texts.
// targets: 80 90
// groups: bf16
#include "../attention/attn_mma.cuh"
#include "decode_args.cuh"
#include "../early.cuh"
#include "../vec.cuh"

// The formula is that of decode_attention (decode.cu), and so are the arguments: q, k and v of the
// new position are in a row of qkv, and k and v are stored in the cache. A row of qkv may be left
// in partial sums, which are added in their order and rounded to bf16.
//
// A block takes a span of `each` pages of a text and up to 8 query heads of a key head. Its warps
// take tiles of 16 positions in turn, each with stages of its own in shared memory, so that none
// waits for another one. The positions are the rows of the first product, S^T = K q^T, and the
// columns of the second one, O^T = V^T P^T: m16n8k16 with the heads as its eight columns. P is
// rounded to bf16, as in training. The sums of the warps are joined in their order at the end; so
// are the spans, by the block that arrives last.
//
// The adapter of the next product comes with it: z[block][n][r] is the sum over the block's columns
// of o[n, k] A[r, k].
//
// What steps before have stored is requested before the kernel before has ended; the new position
// never comes from memory.
//
// Launch: grid (kv_heads * groups, spans, rows), 128 threads, with one group for every 8 query
// heads of a key head. Dynamic shared memory: MANY_WARPS * MANY_STAGES stages of 64 dim bytes.
enum { MANY_WARPS = 4, MANY_STAGES = 3, MANY_HEADS = 8, MANY_TILE = 16 };

struct decode_many_attention {
    decode_attention p;
    int32_t each; // pages of a span
    int32_t all_pages;
    int32_t rows;
    int32_t splits;
    const float* sums; // [splits, rows, ld], instead of qkv; null = none
};

template <int DIM> struct __align__(16) many_shared {
    uint32_t q[MANY_HEADS][DIM / 2 + 4]; // pairs of bf16; no bank conflicts
    uint32_t key[DIM / 2];
    uint32_t value[DIM / 2];
    float rstd[MANY_HEADS + 1];
    float top[MANY_WARPS][MANY_HEADS];
    float total[MANY_WARPS][MANY_HEADS];
    int32_t last;
};

// What a block works on.
struct many_place {
    int64_t n;
    int32_t position;
    int32_t begin; // first position of the span that counts
    int32_t end;   // after the last one
    int32_t first_span;
    int32_t last_span;
    int32_t kv;
    int32_t first_head;
    int32_t heads;
    bool inside;
    bool newest; // has the new position
};

__device__ __forceinline__ many_place many_find(const decode_many_attention& m) {
    const decode_attention& p = m.p;
    many_place w;
    w.n = blockIdx.z;
    w.position = p.texts[w.n].position;
    int32_t wide = m.each * p.chunk;
    int32_t begin = p.window > 0 && w.position + 1 > p.window ? w.position + 1 - p.window : 0;
    int32_t span = (int32_t)blockIdx.y;
    w.first_span = begin / wide;
    w.last_span = w.position / wide;
    w.begin = begin > span * wide ? begin : span * wide;
    w.end = w.position + 1 < (span + 1) * wide ? w.position + 1 : (span + 1) * wide;
    int32_t group = p.heads / p.kv_heads;
    int32_t groups = (group + MANY_HEADS - 1) / MANY_HEADS;
    int32_t skipped = (int32_t)blockIdx.x % groups * MANY_HEADS;
    w.kv = (int32_t)blockIdx.x / groups;
    w.first_head = w.kv * group + skipped;
    w.heads = group - skipped < MANY_HEADS ? group - skipped : MANY_HEADS;
    w.inside = span >= w.first_span && span <= w.last_span && p.texts[w.n].alive != 0;
    w.newest = span == w.last_span;
    return w;
}

// Requests the keys and values of a tile. Positions that do not count become zeros, and so does the
// new one, which follows later.
template <int DIM>
__device__ __forceinline__ void many_request(const decode_many_attention& m, const many_place& w,
                                             uint32_t stage, int32_t tile) {
    const decode_attention& p = m.p;
    constexpr int CHUNKS = DIM / 8;
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t first = tile * MANY_TILE;
    if (first < w.end) {
        int64_t page = p.pages[w.n * m.all_pages + first / p.chunk];
        const bf16* keys = p.cache + (page * p.chunk + first % p.chunk) * p.ld_cache +
                           (int64_t)w.kv * DIM + lane % CHUNKS * 8;
        int64_t kv_width = (int64_t)p.kv_heads * DIM;
#pragma unroll
        for (int i = 0; i < MANY_TILE * CHUNKS / 32; i++) {
            int32_t row = lane / CHUNKS + i * (32 / CHUNKS);
            int32_t at = first + row;
            int32_t bytes = at >= w.begin && at < w.end && at != w.position ? 16 : 0;
            const bf16* from = keys + row * p.ld_cache;
            uint32_t to = stage + tile_at<DIM>(row, lane % CHUNKS);
            copy16_or_zero(to, bytes != 0 ? from : p.cache, bytes);
            copy16_or_zero(to + MANY_TILE * DIM * 2, bytes != 0 ? from + kv_width : p.cache,
                           bytes);
        }
    }
    copy_commit();
}

// Where q, k and v of a block's heads are.
struct many_row {
    const bf16* q;
    const bf16* k;
    const bf16* v;
    int32_t stride; // from head to head of q
};

// In the row of qkv, or, if it was left in partial sums, where their results will be.
template <int DIM>
__device__ __forceinline__ many_row many_source(const decode_many_attention& m,
                                                const many_place& w, many_shared<DIM>* s) {
    const decode_attention& p = m.p;
    int64_t places[3] = {(int64_t)w.first_head * DIM, (int64_t)(p.heads + w.kv) * DIM,
                         (int64_t)(p.heads + p.kv_heads + w.kv) * DIM};
    many_row r;
    if (!m.sums) {
        const bf16* x = p.qkv + w.n * p.ld;
        r.q = x + places[0];
        r.k = x + places[1];
        r.v = x + places[2];
        r.stride = DIM;
        return r;
    }
    int32_t heads = w.heads + (w.newest ? 2 : 0);
#pragma unroll 1
    for (int32_t i = (int32_t)threadIdx.x; i < heads * (DIM / 4); i += MANY_WARPS * 32) {
        int32_t h = i / (DIM / 4);
        int64_t column = h < w.heads ? places[0] + h * DIM : h == w.heads ? places[1] : places[2];
        const float* from = m.sums + w.n * p.ld + column + i % (DIM / 4) * 4;
        float4 v = *(const float4*)from;
#pragma unroll 4
        for (int32_t j = 1; j < m.splits; j++) {
            float4 more = *(const float4*)(from + (int64_t)j * m.rows * p.ld);
            v = make_float4(v.x + more.x, v.y + more.y, v.z + more.z, v.w + more.w);
        }
        uint32_t* to = h < w.heads ? s->q[h] : h == w.heads ? s->key : s->value;
        *(uint2*)(to + i % (DIM / 4) * 2) = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
    }
    __syncthreads();
    r.q = (const bf16*)s->q[0];
    r.k = (const bf16*)s->key;
    r.v = (const bf16*)s->value;
    r.stride = DIM + 8;
    return r;
}

// rstd of q's heads and of k, if there is a norm. One of whole rows needs the row of qkv.
template <int DIM>
__device__ __forceinline__ void many_squares(const decode_attention& p, const many_place& w,
                                             const many_row& row, many_shared<DIM>* s) {
#pragma unroll 1
    for (int32_t h = (int32_t)threadIdx.x / 32; h < w.heads + 1; h += MANY_WARPS) {
        bool is_key = h == w.heads;
        const bf16* from = is_key ? row.k : row.q + h * row.stride;
        int32_t width = DIM;
        if (p.norm_heads == 0) {
            from = p.qkv + w.n * p.ld + (is_key ? (int64_t)p.heads * DIM : 0);
            width = (is_key ? p.kv_heads : p.heads) * DIM;
        }
        if (is_key && !w.newest) {
            continue; // k belongs to another block
        }
        float squares = 0.0f;
#pragma unroll 1
        for (int32_t c = (int32_t)threadIdx.x % 32; c < width; c += 32) {
            float v = to_float(from[c]);
            squares += v * v;
        }
        squares = warp_sum(squares);
        if (threadIdx.x % 32 == 0) {
            s->rstd[h] = 1.0f / sqrtf(squares / (float)width + p.eps);
        }
    }
    __syncthreads();
}

// A pair of columns of a head of q (or k, as head number w.heads): norm or bias, and rotation.
template <int DIM>
__device__ __forceinline__ void many_turn(const decode_attention& p, const many_place& w,
                                          const many_row& row, int32_t h, int32_t k,
                                          many_shared<DIM>* s) {
    bool is_key = h == w.heads;
    // Of a head, the first 2 half columns are rotated; the pairs after them are neighbours.
    bool apart = p.neighbours == 0 && k < p.half;
    int32_t at[2] = {apart ? k : 2 * k, apart ? k + p.half : 2 * k + 1};
    int32_t number = is_key ? w.kv : w.first_head + h;
    int64_t head = (is_key ? (int64_t)p.heads * DIM : 0) + (int64_t)number * DIM;
    const float* norm = is_key ? p.k_norm : p.q_norm;
    float v[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        v[j] = to_float((is_key ? row.k : row.q + h * row.stride)[at[j]]);
        if (norm) {
            float gain = norm[(p.norm_heads != 0 ? 0 : number * DIM) + at[j]];
            v[j] = to_float(to_bf16(v[j] * s->rstd[h] * gain));
        } else if (p.bias) {
            v[j] += to_float(p.bias[head + at[j]]);
        }
    }
    if (p.turn && k < p.half) {
        const float* turn = (is_key ? p.turn : p.turn_q) + (int64_t)w.position * 2 * p.half;
        float cosine = turn[k];
        float sine = turn[p.half + k];
        float a = __fmaf_rn(v[0], cosine, -__fmul_rn(v[1], sine));
        v[1] = __fmaf_rn(v[1], cosine, __fmul_rn(v[0], sine));
        v[0] = a;
    }
    bf16* out = (bf16*)(is_key ? s->key : s->q[h]);
    store(out + at[0], v[0]);
    store(out + at[1], v[1]);
}

// The queries and, where the new position belongs to the block, k and v, which go to the cache.
template <int DIM>
__device__ __forceinline__ void many_begin(const decode_many_attention& m, const many_place& w,
                                           many_shared<DIM>* s) {
    const decode_attention& p = m.p;
    many_row row = many_source(m, w, s);
    if (p.q_norm) {
        many_squares(p, w, row, s);
    }
    int32_t all = w.heads + (w.newest ? 1 : 0);
#pragma unroll 1
    for (int32_t i = (int32_t)threadIdx.x; i < all * (DIM / 2); i += MANY_WARPS * 32) {
        many_turn(p, w, row, i / (DIM / 2), i % (DIM / 2), s);
    }
    int64_t column = (int64_t)(p.heads + p.kv_heads + w.kv) * DIM;
#pragma unroll 1
    for (int32_t c = (int32_t)threadIdx.x; w.newest && c < DIM; c += MANY_WARPS * 32) {
        float v = to_float(row.v[c]) + (p.bias ? to_float(p.bias[column + c]) : 0.0f);
        store((bf16*)s->value + c, v);
    }
#pragma unroll 1
    for (int32_t i = w.heads * (DIM / 2 + 4) + (int32_t)threadIdx.x;
         i < MANY_HEADS * (DIM / 2 + 4); i += MANY_WARPS * 32) {
        s->q[0][i] = 0; // heads that do not exist
    }
    __syncthreads();
    if (w.newest && threadIdx.x < DIM / 4) {
        int64_t page = p.pages[w.n * m.all_pages + w.position / p.chunk];
        bf16* to = p.cache + (page * p.chunk + w.position % p.chunk) * p.ld_cache +
                   (int64_t)w.kv * DIM;
        int32_t i = (int32_t)threadIdx.x % (DIM / 8);
        bool values = threadIdx.x >= DIM / 8;
        to += values ? (int64_t)p.kv_heads * DIM : 0;
        *(uint4*)(to + i * 8) = *(const uint4*)((values ? s->value : s->key) + i * 4);
    }
}

// Puts the new position into its tile.
template <int DIM>
__device__ __forceinline__ void many_newest(const many_place& w, const many_shared<DIM>* s,
                                            uint8_t* stage) {
    constexpr int CHUNKS = DIM / 8;
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t row = w.position % MANY_TILE;
    if (lane < 2 * CHUNKS) {
        int32_t chunk = lane % CHUNKS;
        const uint32_t* from = (lane < CHUNKS ? s->key : s->value) + chunk * 4;
        uint8_t* to = stage + (lane < CHUNKS ? 0 : MANY_TILE * DIM * 2);
        *(uint4*)(to + tile_at<DIM>(row, chunk)) = *(const uint4*)from;
    }
    __syncwarp();
}

// A warp's share of the result: heads 2 t and 2 t + 1 in lanes 4 g + t.
template <int DIM> struct many_state {
    float acc[DIM / 16][4]; // columns g and g + 8 of each 16
    float top[2];
    float total[2]; // of this lane's positions
};

// Chances of the 16 positions of a tile, not divided by their total, as the second operand.
template <int DIM>
__device__ __forceinline__ void many_scores(const decode_attention& p, const many_place& w,
                                            uint32_t stage, const uint32_t (*q)[2], int32_t first,
                                            many_state<DIM>* state, float* factor, float (&c)[4]) {
    int32_t lane = (int32_t)threadIdx.x % 32;
    float other[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    float turns = p.cap > 0.0f ? 2.0f * 1.4426950408889634f / p.cap : 0.0f;
#pragma unroll
    for (int k = 0; k < DIM / 16; k++) {
        uint32_t a[4];
        load_fragment(a, stage + tile_at<DIM>(lane % 16, 2 * k + lane / 16));
        mma(k % 2 == 0 ? c : other, a, q[k][0], q[k][1]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int32_t at = first + lane / 4 + i / 2 * 8;
        float v = (c[i] + other[i]) * p.scale;
        v = p.cap > 0.0f ? p.cap * tanh_fast(v * turns) : v;
        c[i] = at >= w.begin && at < w.end ? v : -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float top = fmaxf(c[i], c[i + 2]);
        top = fmaxf(top, __shfl_xor_sync(QLORA_FULL_WARP, top, 4));
        top = fmaxf(top, __shfl_xor_sync(QLORA_FULL_WARP, top, 8));
        top = fmaxf(top, __shfl_xor_sync(QLORA_FULL_WARP, top, 16));
        top = fmaxf(top, state->top[i]); // finite: a tile has a position that counts
        factor[i] = exp2_fast((state->top[i] - top) * 1.4426950408889634f);
        state->top[i] = top;
        c[i] = exp2_fast((c[i] - top) * 1.4426950408889634f);
        c[i + 2] = exp2_fast((c[i + 2] - top) * 1.4426950408889634f);
        state->total[i] = state->total[i] * factor[i] + (c[i] + c[i + 2]);
    }
}

template <int DIM>
__device__ __forceinline__ void many_tile(const decode_attention& p, const many_place& w,
                                          uint8_t* tile, const uint32_t (*q)[2], int32_t first,
                                          many_state<DIM>* state) {
    uint32_t stage = shared_address(tile);
    uint32_t* chances = (uint32_t*)tile; // in the place of the keys
    int32_t lane = (int32_t)threadIdx.x % 32;
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    float factor[2];
    many_scores(p, w, stage, q, first, state, factor, c);
    __syncwarp();
    chances[lane] = pack_bf16(c[0], c[1]);
    chances[32 + lane] = pack_bf16(c[2], c[3]);
    __syncwarp();
    uint32_t b[2];
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(b[0]), "=r"(b[1])
                 : "r"(stage + lane % 16 * 16)
                 : "memory");
#pragma unroll
    for (int d = 0; d < DIM / 16; d++) {
        uint32_t a[4];
        load_fragment_transposed(a, stage + MANY_TILE * DIM * 2 +
                                        tile_at<DIM>(lane % 8 + lane / 16 * 8,
                                                     2 * d + lane / 8 % 2));
        state->acc[d][0] *= factor[0];
        state->acc[d][1] *= factor[1];
        state->acc[d][2] *= factor[0];
        state->acc[d][3] *= factor[1];
        mma(state->acc[d], a, b[0], b[1]);
    }
}

// A result: column i of the block's heads.
__device__ __forceinline__ void many_result(const decode_attention& p, const many_place& w,
                                            int32_t i, float v, float* results) {
    bf16 rounded = to_bf16(v);
    p.o[w.n * p.ldo + (int64_t)w.first_head * p.dim + i] = rounded;
    results[i] = to_float(rounded);
}

// The sums of the warps, in their order; a warp that has no positions does not count.
template <int DIM>
__device__ __forceinline__ void many_join_warps(const decode_many_attention& m,
                                                const many_place& w, const many_shared<DIM>* s,
                                                const float* sums, float* results) {
    const decode_attention& p = m.p;
    bool alone = w.first_span == w.last_span;
#pragma unroll 1
    for (int32_t i = (int32_t)threadIdx.x; i < w.heads * DIM; i += MANY_WARPS * 32) {
        int32_t h = i / DIM;
        int32_t c = i % DIM;
        float top = -INFINITY;
        float total = 0.0f;
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < MANY_WARPS; j++) {
            top = fmaxf(top, s->top[j][h]);
        }
#pragma unroll
        for (int j = 0; j < MANY_WARPS; j++) {
            float factor = exp2_fast((s->top[j][h] - top) * 1.4426950408889634f);
            total += s->total[j][h] * factor;
            sum += sums[(j * MANY_HEADS + h) * (DIM + 4) + c] * factor;
        }
        if (alone) {
            many_result(p, w, i, sum / total, results);
            continue;
        }
        int64_t at = ((w.n * p.heads + w.first_head + h) * gridDim.y + blockIdx.y) * (DIM + 2);
        p.partials[at + 2 + c] = sum;
        if (c == 0) {
            p.partials[at] = top;
            p.partials[at + 1] = total;
        }
    }
}

// The spans of a text, in their order.
__device__ __forceinline__ void many_join_spans(const decode_attention& p, const many_place& w,
                                                float* results) {
    int32_t width = p.dim + 2;
#pragma unroll 1
    for (int32_t i = (int32_t)threadIdx.x; i < w.heads * p.dim; i += MANY_WARPS * 32) {
        int32_t h = w.first_head + i / p.dim;
        int32_t c = i % p.dim;
        const float* from = p.partials + (w.n * p.heads + h) * (int64_t)gridDim.y * width;
        float top = -INFINITY;
        float total = 0.0f;
        float sum = 0.0f;
#pragma unroll 1
        for (int32_t j = w.first_span; j <= w.last_span; j++) {
            float t = __ldcg(from + j * width);
            float higher = fmaxf(top, t);
            float old = exp2_fast((top - higher) * 1.4426950408889634f);
            float fresh = exp2_fast((t - higher) * 1.4426950408889634f);
            total = total * old + __ldcg(from + j * width + 1) * fresh;
            sum = sum * old + __ldcg(from + j * width + 2 + c) * fresh;
            top = higher;
        }
        many_result(p, w, i, sum / total, results);
    }
}

// z of the next product, over the block's columns: a warp per row of A.
template <int DIM>
__device__ __forceinline__ void many_low(const decode_many_attention& m, const many_place& w,
                                         const float* results) {
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t width = m.p.heads * DIM;
    const bf16* a = m.p.a + w.first_head * DIM;
#pragma unroll 2
    for (int32_t r = (int32_t)threadIdx.x / 32; r < m.p.a_rank; r += MANY_WARPS) {
        float sum = 0.0f;
#pragma unroll 2
        for (int32_t k = lane * 8; k < w.heads * DIM; k += 256) {
            float v[8];
            unpack(__ldg((const uint4*)(a + (int64_t)r * width + k)), v);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                sum += v[i] * results[k + i];
            }
        }
        sum = warp_sum(sum);
        if (lane == 0) {
            m.p.z[((int64_t)blockIdx.x * m.rows + w.n) * m.p.a_rank + r] = sum;
        }
    }
}

// Joins the spans, if this block is the last one of the text; false if it is not.
__device__ __forceinline__ bool many_last(const decode_many_attention& m, const many_place& w,
                                          int32_t* last, float* results) {
    uint32_t* counter = m.p.counters + w.n * gridDim.x + blockIdx.x;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        *last = atomicAdd(counter, 1u) == (uint32_t)(w.last_span - w.first_span) ? 1 : 0;
    }
    __syncthreads();
    if (*last == 0) {
        return false;
    }
    __threadfence();
    many_join_spans(m.p, w, results);
    if (threadIdx.x == 0) {
        *counter = 0; // for the next layer
    }
    return true;
}

// All tiles of a warp.
template <int DIM>
__device__ __forceinline__ void many_walk(const decode_many_attention& m, const many_place& w,
                                          many_shared<DIM>* s, uint8_t* stages, int32_t tile,
                                          many_state<DIM>* state) {
    int32_t lane = (int32_t)threadIdx.x % 32;
    uint32_t q[DIM / 16][2];
#pragma unroll
    for (int k = 0; k < DIM / 16; k++) {
        q[k][0] = s->q[lane / 4][k * 8 + lane % 4];
        q[k][1] = s->q[lane / 4][k * 8 + lane % 4 + 4];
    }
    uint32_t base = shared_address(stages);
    int32_t stage = 0;
    int32_t ahead = MANY_STAGES - 1;
#pragma unroll 1
    for (; tile * MANY_TILE < w.end; tile += MANY_WARPS) {
        copy_wait<MANY_STAGES - 2>();
        __syncwarp(); // the tile is there, and the stage of the last one is free
        many_request<DIM>(m, w, base + ahead * MANY_TILE * DIM * 4,
                          tile + (MANY_STAGES - 1) * MANY_WARPS);
        if (w.newest && tile == w.position / MANY_TILE) {
            many_newest(w, s, stages + stage * MANY_TILE * DIM * 4);
        }
        many_tile(m.p, w, stages + stage * MANY_TILE * DIM * 4, q, tile * MANY_TILE, state);
        stage = stage + 1 < MANY_STAGES ? stage + 1 : 0;
        ahead = ahead + 1 < MANY_STAGES ? ahead + 1 : 0;
    }
    copy_wait<0>();
    __syncwarp(); // the stages are free
}

// A warp's results, where they are joined.
template <int DIM>
__device__ __forceinline__ void many_leave(many_shared<DIM>* s, float* sums,
                                           many_state<DIM>* state) {
    int32_t warp = (int32_t)threadIdx.x / 32;
    int32_t lane = (int32_t)threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float total = state->total[i];
        total += __shfl_xor_sync(QLORA_FULL_WARP, total, 4);
        total += __shfl_xor_sync(QLORA_FULL_WARP, total, 8);
        total += __shfl_xor_sync(QLORA_FULL_WARP, total, 16);
        int32_t h = lane % 4 * 2 + i;
        if (lane < 4) {
            s->top[warp][h] = state->top[i];
            s->total[warp][h] = total;
        }
        float* to = sums + (warp * MANY_HEADS + h) * (DIM + 4) + lane / 4;
#pragma unroll
        for (int d = 0; d < DIM / 16; d++) {
            to[d * 16] = state->acc[d][i];
            to[d * 16 + 8] = state->acc[d][i + 2];
        }
    }
}

template <int DIM>
__device__ __forceinline__ void many_run(const decode_many_attention& m, uint8_t* shared) {
    __shared__ many_shared<DIM> s;
    many_place w = many_find(m);
    int32_t warp = (int32_t)threadIdx.x / 32;
    uint8_t* stages = shared + warp * (MANY_STAGES * MANY_TILE * DIM * 4);
    int32_t tile = w.begin / MANY_TILE + warp;
    if (w.inside) {
        int32_t lines = w.heads * DIM / 64; // of A, as far as L2
        int32_t pieces = m.p.a ? m.p.a_rank * lines : 0;
#pragma unroll 1
        for (int32_t i = (int32_t)threadIdx.x; i < pieces; i += MANY_WARPS * 32) {
            const bf16* a = m.p.a + (int64_t)(i / lines) * m.p.heads * DIM + w.first_head * DIM;
            asm volatile("prefetch.global.L2 [%0];" ::"l"(a + i % lines * 64));
        }
#pragma unroll 1
        for (int i = 0; i < MANY_STAGES - 1; i++) {
            many_request<DIM>(m, w, shared_address(stages) + i * MANY_TILE * DIM * 4,
                              tile + i * MANY_WARPS);
        }
    }
    early_wait();
    if (!w.inside) {
        return;
    }
    many_begin(m, w, &s);
    many_state<DIM> state;
#pragma unroll
    for (int d = 0; d < DIM / 16; d++) {
        state.acc[d][0] = 0.0f;
        state.acc[d][1] = 0.0f;
        state.acc[d][2] = 0.0f;
        state.acc[d][3] = 0.0f;
    }
    state.top[0] = state.top[1] = -INFINITY;
    state.total[0] = state.total[1] = 0.0f;
    many_walk(m, w, &s, stages, tile, &state);
    __syncthreads(); // the sums take the place of all stages
    many_leave(&s, (float*)shared, &state);
    __syncthreads();
    float* results = (float*)shared + MANY_WARPS * MANY_HEADS * (DIM + 4);
    many_join_warps(m, w, &s, (const float*)shared, results);
    if (w.first_span != w.last_span && !many_last(m, w, &s.last, results)) {
        return;
    }
    __syncthreads();
    if (m.p.a) {
        many_low<DIM>(m, w, results);
    }
}

QLORA_KERNEL __launch_bounds__(MANY_WARPS * 32, 2)
    qlora_decode_many_attention_64(const __grid_constant__ decode_many_attention m) {
    extern __shared__ __align__(128) uint8_t shared[];
    early_next();
    many_run<64>(m, shared);
}

QLORA_KERNEL __launch_bounds__(MANY_WARPS * 32, 2)
    qlora_decode_many_attention_128(const __grid_constant__ decode_many_attention m) {
    extern __shared__ __align__(128) uint8_t shared[];
    early_next();
    many_run<128>(m, shared);
}
