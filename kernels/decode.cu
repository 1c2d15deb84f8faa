// decode.cu - a step of decoding: products with bf16 weights, the norms between the stacks, and
// attention over the cache.
// targets: 80 90
// groups: bf16
#include "decode.cuh"
#include "decode_text.cuh"

// Dynamic shared memory: (2 * warps + 1) * 512 bytes.
QLORA_KERNEL __launch_bounds__(DECODE_WARPS * 32, 1)
    qlora_decode_dense(const __grid_constant__ decode_product p) {
    extern __shared__ __align__(128) float sums[];
    early_next();
    decode_run<decode_dense, decode_x128>(p, 0, sums, 0.0f, 0.0f, 0.0f);
}

// ---- between two stacks
//
//   d = y + z (sB)^T, rounded; with `after`, d = d / rms(d) * after; d *= scale
//   h' = h + d        x = h' / rms(h') w        z'[r] = x A[r]
//
// Without y, h' is h; without h, it is the row of the embedding that belongs to the text's token,
// multiplied by scale. z has up to DECODE_SLICES partial sums, which are added in order. Every
// value is rounded to bf16 where the operators of training round it.
//
// Launch: grid (at least 1, rows), 1024 threads, or fewer if there is no z; (hidden + z_rank) * 4
// bytes of dynamic shared memory. Every block computes x; the blocks of a row share z', block 0
// writes h' and x. h and h' are different memory. hidden is a multiple of 8, rows are 16-byte
// aligned.
struct decode_norm {
    const bf16* h;
    bf16* h_out;
    const bf16* embed;
    const decode_text* texts;
    const float* y;
    const bf16* sb; // [hidden, z_rank]
    const float* z;
    const float* after;
    const float* w;
    bf16* x;
    const bf16* a[3]; // [ranks[i], hidden]
    int64_t ld_embed;
    int64_t ldx;
    int32_t ranks[3];
    int32_t z_rank;
    int32_t hidden;
    int32_t rows;
    float scale;
    float eps;
    int32_t slices; // of z: DECODE_SLICES or 1
    int32_t unused;
};

// z of a row, summed over the slices in their order, in zs; `room` holds DECODE_SLICES * 16 floats.
__device__ __forceinline__ void decode_join(const decode_norm& p, float* room, float* zs) {
    int32_t t = (int32_t)threadIdx.x;
    int64_t n = blockIdx.y;
#pragma unroll 1
    for (int32_t first = 0; first < p.z_rank; first += 16) {
        int32_t r = first + t % 16; // 1024 threads: 16 columns of 64 slices
        bool there = r < p.z_rank && t / 16 < p.slices;
        room[t] = there ? p.z[((int64_t)(t / 16) * p.rows + n) * p.z_rank + r] : 0.0f;
        __syncthreads();
        if (t < 16 && r < p.z_rank) {
            float sum = 0.0f;
#pragma unroll 16
            for (int32_t i = 0; i < DECODE_SLICES; i++) {
                sum += room[i * 16 + t];
            }
            zs[r] = to_float(to_bf16(sum));
        }
        __syncthreads();
    }
}

// What a thread requests for four of its columns before z is there, and how many times.
struct decode_columns {
    float h[4];
    float y[4];
};

enum { NORM_AHEAD = 2 };

__device__ __forceinline__ void decode_request(const decode_norm& p, int32_t c, decode_columns* v) {
    int64_t n = blockIdx.y;
    const bf16* from = p.h ? p.h + n * p.hidden : p.embed + p.texts[n].token * p.ld_embed;
    uint2 raw = *(const uint2*)(from + c);
    unpack_pair(raw.x, v->h[0], v->h[1]);
    unpack_pair(raw.y, v->h[2], v->h[3]);
    if (p.y) {
        *(float4*)v->y = *(const float4*)(p.y + n * p.hidden + c);
    }
}

// Whether decode_lift can take the rank.
__device__ __forceinline__ bool decode_lifts(const decode_norm& p) {
    return p.y && (p.z_rank == 8 || p.z_rank == 16 || p.z_rank == 32);
}

// z (sB)^T for all columns, in `row`. Neighbouring lanes read neighbouring pieces of sB; those of a
// column are added by shuffles.
__device__ __forceinline__ void decode_lift(const decode_norm& p, const float* zs, float* row) {
    int32_t pieces = p.z_rank / 8;
    int32_t total = p.hidden * pieces;
#pragma unroll 4
    for (int32_t i = (int32_t)threadIdx.x; i / 32 * 32 < total; i += 1024) {
        float dot = 0.0f;
        if (i < total) {
            float v[8];
            const float* z = zs + i % pieces * 8;
            unpack(*(const uint4*)(p.sb + (int64_t)i * 8), v);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                dot += v[k] * z[k];
            }
        }
#pragma unroll 1
        for (int o = 1; o < pieces; o <<= 1) {
            dot += __shfl_xor_sync(QLORA_FULL_WARP, dot, o);
        }
        if (i < total && i % pieces == 0) {
            row[i / pieces] = dot;
        }
    }
    __syncthreads();
}

// Output of the stack before, with its adapter, for column c.
__device__ __forceinline__ float decode_delta(const decode_norm& p, float d, int32_t c,
                                              const float* zs) {
    const bf16* b = p.sb + (int64_t)c * p.z_rank;
    int32_t r = 0;
#pragma unroll 2
    for (; p.z_rank % 8 == 0 && r < p.z_rank; r += 8) {
        float v[8];
        unpack(*(const uint4*)(b + r), v);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            d += v[k] * zs[r + k];
        }
    }
#pragma unroll 1
    for (; r < p.z_rank; r++) {
        d += to_float(b[r]) * zs[r];
    }
    return to_float(to_bf16(d));
}

// The stream before the norm, in `row` and, from block 0, in memory; with `after`, first the output
// of the stack in `row`. Returns the thread's share of the sum of squares.
__device__ __forceinline__ float decode_stream(const decode_norm& p, const float* zs, float* row,
                                               const decode_columns* ahead, float rstd,
                                               bool first) {
    int64_t n = blockIdx.y;
    bool lifted = decode_lifts(p);
    float squares = 0.0f;
    int32_t turn = 0;
#pragma unroll 1
    for (int32_t c = (int32_t)threadIdx.x * 4; c < p.hidden; c += (int32_t)blockDim.x * 4) {
        decode_columns v = turn == 0 ? ahead[0] : ahead[1];
        if (turn++ >= NORM_AHEAD) {
            decode_request(p, c, &v);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) { // the loads of all four are independent
            float x = v.h[i];
            if (p.y) {
                float d = row[c + i]; // the adapter's part, or the whole after the first pass
                if (first || !p.after) {
                    d = lifted ? to_float(to_bf16(v.y[i] + d)) : decode_delta(p, v.y[i], c + i, zs);
                }
                d = first || !p.after ? d : to_float(to_bf16(d * rstd * p.after[c + i]));
                float scaled = p.scale != 1.0f ? to_float(to_bf16(p.scale * d)) : d;
                x = first ? d : to_float(to_bf16(x + scaled));
            } else if (!p.h && p.scale != 1.0f) {
                x = to_float(to_bf16(p.scale * x));
            }
            squares += x * x;
            row[c + i] = x;
            v.h[i] = x;
        }
        if (blockIdx.x == 0 && p.h_out && !first) {
            *(uint2*)(p.h_out + n * p.hidden + c) =
                make_uint2(pack_bf16(v.h[0], v.h[1]), pack_bf16(v.h[2], v.h[3]));
        }
    }
    return squares;
}

// z'[r] = x A[r] for the rows of A of this block; `ahead` has the first four columns of the first.
__device__ __forceinline__ const bf16* decode_row_of(const decode_norm& p, int32_t r) {
    if (r >= p.ranks[0] + p.ranks[1]) {
        return p.a[2] + (int64_t)(r - p.ranks[0] - p.ranks[1]) * p.hidden;
    }
    return r >= p.ranks[0] ? p.a[1] + (int64_t)(r - p.ranks[0]) * p.hidden
                           : p.a[0] + (int64_t)r * p.hidden;
}

QLORA_KERNEL __maxnreg__(56) qlora_decode_norm(const __grid_constant__ decode_norm p) {
    extern __shared__ __align__(16) float row[];
    __shared__ float sums[32];
    __shared__ float room[DECODE_SLICES * 16];
    float* zs = row + p.hidden;
    int64_t n = blockIdx.y;
    int32_t own = (int32_t)threadIdx.x * 4;
    int32_t ranks = p.ranks[0] + p.ranks[1] + p.ranks[2];
    // It is long because what does not depend on z is requested before z is there, and the weights
    // before the kernel before has ended; the adapter's come as far as L2.
    decode_columns ahead[NORM_AHEAD];
    float4 gain[NORM_AHEAD];
    uint2 first[NORM_AHEAD];
    early_next();
#pragma unroll
    for (int i = 0; i < NORM_AHEAD; i++) {
        int32_t c = own + i * (int32_t)blockDim.x * 4;
        gain[i] = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
        first[i] = make_uint2(0, 0);
        if (c < p.hidden && p.w) {
            gain[i] = *(const float4*)(p.w + c);
        }
        if (c < p.hidden && (int32_t)blockIdx.x < ranks) {
            first[i] = *(const uint2*)(decode_row_of(p, (int32_t)blockIdx.x) + c);
        }
        if (c < p.hidden && p.y && p.z_rank > 0) {
            asm volatile("prefetch.global.L2 [%0];" ::"l"(p.sb + (int64_t)c * p.z_rank));
        }
    }
    early_wait();
#pragma unroll
    for (int i = 0; i < NORM_AHEAD; i++) {
        int32_t c = own + i * (int32_t)blockDim.x * 4;
        if (c < p.hidden) {
            decode_request(p, c, &ahead[i]);
        }
    }
    if (p.y) {
        decode_join(p, room, zs);
    }
    if (decode_lifts(p)) {
        decode_lift(p, zs, row);
    }
    float rstd = 1.0f;
    if (p.y && p.after) {
        float d = row_sum(decode_stream(p, zs, row, ahead, 1.0f, true), sums, (int32_t)blockDim.x);
        rstd = 1.0f / sqrtf(d / (float)p.hidden + p.eps);
    }
    float squares = decode_stream(p, zs, row, ahead, rstd, false);
    squares = row_sum(squares, sums, (int32_t)blockDim.x);
    rstd = 1.0f / sqrtf(squares / (float)p.hidden + p.eps);
#pragma unroll 1
    for (int32_t r = (int32_t)blockIdx.x; r == (int32_t)blockIdx.x || r < ranks;
         r += (int32_t)gridDim.x) {
        bool begins = r == (int32_t)blockIdx.x;
        float dot = 0.0f;
        int32_t turn = 0;
#pragma unroll 1
        for (int32_t c = own; c < p.hidden; c += (int32_t)blockDim.x * 4, turn++) {
            float v[4];
            *(float4*)v = *(const float4*)(row + c);
            if (begins) {
                float4 w = turn == 0 ? gain[0] : gain[1];
                w = turn < NORM_AHEAD || !p.w ? w : *(const float4*)(p.w + c);
                v[0] = p.w ? v[0] * rstd * w.x : v[0];
                v[1] = p.w ? v[1] * rstd * w.y : v[1];
                v[2] = p.w ? v[2] * rstd * w.z : v[2];
                v[3] = p.w ? v[3] * rstd * w.w : v[3];
            }
            uint2 x = make_uint2(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]));
            unpack_pair(x.x, v[0], v[1]);
            unpack_pair(x.y, v[2], v[3]);
            if (begins) {
                *(float4*)(row + c) = *(float4*)v;
                if (blockIdx.x == 0) {
                    *(uint2*)(p.x + n * p.ldx + c) = x;
                }
            }
            if (r < ranks) {
                uint2 raw = turn == 0 ? first[0] : first[1];
                if (!begins || turn >= NORM_AHEAD) {
                    raw = *(const uint2*)(decode_row_of(p, r) + c);
                }
                float b[4];
                unpack_pair(raw.x, b[0], b[1]);
                unpack_pair(raw.y, b[2], b[3]);
                dot += v[0] * b[0] + v[1] * b[1] + v[2] * b[2] + v[3] * b[3];
            }
        }
        dot = row_sum(dot, sums, (int32_t)blockDim.x);
        if (threadIdx.x == 0 && r < ranks) {
            p.x[n * p.ldx + p.hidden + r] = to_bf16(dot);
        }
    }
}

// ---- attention of one query over the cache
//
//   s = scale q K^T, with the cap; o = softmax(s) V over the positions within the window
//
// q, k and v of the new position are in a row of qkv; bias, norm and rotation come first. k and v
// are stored in the cache, whose rows are in pages of `chunk` positions: row i of page pages[i].
// Each block takes one page and up to 8 query heads of a key head; the block that arrives last
// joins the pages in their order, so timing does not matter. With `a`, it also leaves its part of z
// of the stack that follows, z[block][r] = sum over its columns of o of o A[r]. Keys and values
// come to shared memory a tile at a time, those of the first tile before the kernel before has
// ended: they are older.
//
// Launch: grid (kv_heads * groups, pages of a text, rows), 256 threads, with one group for every 8
// query heads of a key head; dynamic shared memory: keys and values of a tile, whose rows have
// ATTENTION_PAD elements more than dim, rounded up to 16. dim is a multiple of 8 up to 256.
//
// Both products are made by m16n8k16: positions times heads, and heads times columns of V. What
// heads, positions and columns that are not there would contribute is zero.
enum {
    ATTENTION_HEADS = 8,
    ATTENTION_TILE = 128, // positions, at most; 64 if dim > 128
    ATTENTION_DIM = 256,
    ATTENTION_PAD = 8 // elements after each row in shared memory, against bank conflicts
};

struct decode_attention {
    const bf16* qkv;
    const bf16* bias;
    const float* q_norm;
    const float* k_norm;
    const float* turn;   // [positions, 2 half]: cosines, sines; null = no rotation
    const float* turn_q; // the same for q
    bf16* cache;
    const int32_t* pages; // [rows, gridDim.y]
    const decode_text* texts;
    float* partials; // [rows, heads, gridDim.y, dim + 2]
    uint32_t* counters;
    bf16* o;
    int64_t ld; // of qkv
    int64_t ld_cache;
    int64_t ldo;
    int32_t heads;
    int32_t kv_heads;
    int32_t dim;
    int32_t half;
    int32_t neighbours;
    int32_t window;     // 0 = none
    int32_t chunk;      // a multiple of ATTENTION_TILE
    int32_t norm_heads; // the norm of q is over one head, or over all: 1 or 0
    float scale;
    float cap;
    float eps;
    int32_t a_rank;
    const bf16* a; // [a_rank, heads * dim]; null: no z
    float* z;      // [gridDim.x, a_rank], of one row
};

struct attention_shared {
    bf16 q[ATTENTION_HEADS][ATTENTION_DIM + ATTENTION_PAD];
    bf16 p[ATTENTION_HEADS][ATTENTION_TILE + ATTENTION_PAD];
    float scores[ATTENTION_HEADS][ATTENTION_TILE + 4];
    float turns[2][ATTENTION_DIM];                        // of k and of q
    uint4 raw[(ATTENTION_HEADS + 2) * ATTENTION_DIM / 8]; // q heads, k, v
    float top[ATTENTION_HEADS];
    float total[ATTENTION_HEADS];
    float factor[ATTENTION_HEADS];
    float rstd[ATTENTION_HEADS + 1];
    int32_t last;
};

// What a block works on.
struct attention_place {
    int64_t n;
    int32_t position;
    int32_t begin; // first position within the window
    int32_t page;
    int32_t first_page;
    int32_t last_page;
    int32_t kv;
    int32_t first_head;
    int32_t heads;
    int32_t tile;  // positions
    int32_t width; // dim, rounded up to 16
    int32_t ld;    // of the rows of a tile
    bool inside;
};

__device__ __forceinline__ attention_place attention_find(const decode_attention& p) {
    attention_place w;
    w.n = blockIdx.z;
    w.position = p.texts[w.n].position;
    w.begin = p.window > 0 && w.position + 1 > p.window ? w.position + 1 - p.window : 0;
    w.page = (int32_t)blockIdx.y;
    w.first_page = w.begin / p.chunk;
    w.last_page = w.position / p.chunk;
    int32_t group = p.heads / p.kv_heads;
    int32_t groups = (group + ATTENTION_HEADS - 1) / ATTENTION_HEADS;
    int32_t skipped = (int32_t)blockIdx.x % groups * ATTENTION_HEADS;
    w.kv = (int32_t)blockIdx.x / groups;
    w.first_head = w.kv * group + skipped;
    w.heads = group - skipped < ATTENTION_HEADS ? group - skipped : ATTENTION_HEADS;
    w.tile = p.dim <= 128 ? ATTENTION_TILE : ATTENTION_TILE / 2;
    w.width = (p.dim + 15) / 16 * 16;
    w.ld = w.width + ATTENTION_PAD;
    w.inside = w.page >= w.first_page && w.page <= w.last_page && p.texts[w.n].alive != 0;
    return w;
}

// Requests the keys and the values of a tile of the page, from position `tile` of the page on: a
// group for the keys, one for the values. Positions outside become zeros; the new one is not in
// memory yet and is left out.
__device__ __forceinline__ void attention_request(const decode_attention& p,
                                                  const attention_place& w, const bf16* keys,
                                                  int32_t tile, const bf16* tiles) {
    int32_t pieces = w.width / 8;
    int32_t first = w.page * p.chunk + tile;
    uint32_t to = (uint32_t)__cvta_generic_to_shared(tiles);
    const bf16* from = keys + tile * p.ld_cache;
#pragma unroll 1
    for (int which = 0; which < 2; which++) {
        int32_t row = (int32_t)threadIdx.x / pieces;
        int32_t c = (int32_t)threadIdx.x % pieces;
#pragma unroll 2
        while (row < w.tile) {
            int32_t position = first + row;
            bool there = position < w.position && position >= w.begin && c * 8 < p.dim;
            if (position != w.position || c * 8 >= p.dim) {
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                                 to + (uint32_t)(row * w.ld + c * 8) * 2),
                             "l"(there ? from + row * p.ld_cache + c * 8 : keys),
                             "r"(there ? 16u : 0u)
                             : "memory");
            }
            row += 256 / pieces;
            c += 256 % pieces;
            if (c >= pieces) {
                c -= pieces;
                row++;
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        from += (int64_t)p.kv_heads * p.dim;
        to += (uint32_t)(w.tile * w.ld * 2);
    }
}

// Zeros where heads and columns are missing, and nothing summed yet.
__device__ __forceinline__ void attention_clear(attention_shared* s) {
    uint32_t* q = (uint32_t*)s->q;
#pragma unroll 1
    for (int32_t i = (int32_t)threadIdx.x; i < (int32_t)(sizeof s->q + sizeof s->p) / 4;
         i += 256) {
        q[i] = 0; // p follows
    }
    if (threadIdx.x < ATTENTION_HEADS) {
        s->top[threadIdx.x] = -INFINITY;
        s->total[threadIdx.x] = 0.0f;
    }
}

// The turns of the new position.
__device__ __forceinline__ void attention_turns(const decode_attention& p, int32_t position,
                                                attention_shared* s) {
#pragma unroll 1
    for (int32_t i = (int32_t)threadIdx.x; p.turn && i < 2 * p.half; i += 256) {
        s->turns[0][i] = p.turn[(int64_t)position * 2 * p.half + i];
        s->turns[1][i] = p.turn_q[(int64_t)position * 2 * p.half + i];
    }
}

// The rows of q of the block's heads, of k and of v, as they are.
__device__ __forceinline__ void attention_raw(const decode_attention& p, const attention_place& w,
                                              attention_shared* s) {
    int32_t pieces = p.dim / 8;
    const bf16* x = p.qkv + w.n * p.ld;
#pragma unroll 2
    for (int32_t i = (int32_t)threadIdx.x; i < (w.heads + 2) * pieces; i += 256) {
        int32_t head = i / pieces;
        head = head < w.heads ? w.first_head + head
                              : p.heads + (head - w.heads) * p.kv_heads + w.kv;
        s->raw[i] = *(const uint4*)(x + (int64_t)head * p.dim + i % pieces * 8);
    }
    __syncthreads();
}

// Norms of the heads and of k, head number `heads`: the factors.
__device__ __forceinline__ void attention_norms(const decode_attention& p, const attention_place& w,
                                                attention_shared* s) {
    const bf16* own = (const bf16*)s->raw;
    const bf16* all = p.qkv + w.n * p.ld;
#pragma unroll 1
    for (int32_t h = (int32_t)threadIdx.x / 32; h <= w.heads; h += 8) {
        bool is_key = h == w.heads;
        const bf16* from = own + h * p.dim;
        int32_t width = p.dim;
        if (p.norm_heads == 0) {
            from = all + (is_key ? (int64_t)p.heads * p.dim : 0);
            width = (is_key ? p.kv_heads : p.heads) * p.dim;
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

// q of the block's heads and, in the tile of the new position, k, which also goes to the cache:
// bias or norm, and rotation, all rounded. One pass over pairs of columns.
__device__ __forceinline__ void attention_heads(const decode_attention& p, const attention_place& w,
                                                attention_shared* s, bf16* tile_key, bf16* key) {
    const bf16* x = (const bf16*)s->raw;
    int32_t pairs = p.dim / 2;
#pragma unroll 1
    for (int32_t i = (int32_t)threadIdx.x; i < (w.heads + (key ? 1 : 0)) * pairs; i += 256) {
        int32_t h = i / pairs;
        int32_t k = i % pairs;
        bool is_key = h == w.heads;
        // Of a head, the first 2 half columns are rotated; the pairs after them are neighbours.
        int32_t at[2] = {2 * k, 2 * k + 1};
        if (p.neighbours == 0 && k < p.half) {
            at[0] = k;
            at[1] = k + p.half;
        }
        int32_t head = is_key ? w.kv : w.first_head + h;
        const float* norm = is_key ? p.k_norm : p.q_norm;
        norm = norm && p.norm_heads == 0 ? norm + head * p.dim : norm;
        const bf16* bias = p.bias ? p.bias + (int64_t)(is_key ? p.heads + head : head) * p.dim : 0;
        float v[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            v[j] = to_float(x[h * p.dim + at[j]]);
            if (norm) {
                v[j] = to_float(to_bf16(v[j] * s->rstd[h] * norm[at[j]]));
            } else if (bias) {
                v[j] += to_float(bias[at[j]]);
            }
        }
        if (p.turn && k < p.half) {
            const float* turn = s->turns[is_key ? 0 : 1];
            float cosine = turn[k];
            float sine = turn[p.half + k];
            float a = __fmaf_rn(v[0], cosine, -__fmul_rn(v[1], sine));
            v[1] = __fmaf_rn(v[1], cosine, __fmul_rn(v[0], sine));
            v[0] = a;
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
            bf16 rounded = to_bf16(v[j]);
            if (is_key) {
                tile_key[at[j]] = rounded;
                key[at[j]] = rounded;
            } else {
                s->q[h][at[j]] = rounded;
            }
        }
    }
}

// v of the new position, in the tile and in the cache.
__device__ __forceinline__ void attention_value(const decode_attention& p, const attention_place& w,
                                                const attention_shared* s, bf16* tile_value,
                                                bf16* value) {
    const bf16* x = (const bf16*)s->raw + (w.heads + 1) * p.dim;
    int64_t column = (int64_t)(p.heads + p.kv_heads + w.kv) * p.dim;
#pragma unroll 1
    for (int32_t c = (int32_t)threadIdx.x; c < p.dim; c += 256) {
        float v = to_float(x[c]);
        v += p.bias ? to_float(p.bias[column + c]) : 0.0f;
        tile_value[c] = to_bf16(v);
        value[c] = to_bf16(v);
    }
}

// Four 8 x 8 matrices of 16-bit elements, whose rows are at the addresses of the lanes.
__device__ __forceinline__ void attention_matrices(uint32_t* v, const bf16* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}

__device__ __forceinline__ void attention_turned(uint32_t* v, const bf16* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}

// The scores of a tile, whose first position is `first`: 16 positions per warp.
__device__ __forceinline__ void attention_scores(const decode_attention& p,
                                                 const attention_place& w, attention_shared* s,
                                                 const bf16* keys, int32_t first) {
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t from = (int32_t)threadIdx.x / 32 * 16;
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (from < w.tile) {
        const bf16* row = keys + (from + lane % 16) * w.ld + lane / 16 * 8;
        const bf16* q = &s->q[lane / 4][lane % 4 * 2];
#pragma unroll 2
        for (int32_t k = 0; k < w.width; k += 16) {
            uint32_t a[4];
            attention_matrices(a, row + k);
            decode_multiply(c, a[0], a[1], a[2], a[3], *(const uint32_t*)(q + k),
                            *(const uint32_t*)(q + k + 8));
        }
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        int32_t i = from + lane / 4 + j / 2 * 8;
        bool inside = i < w.tile && first + i >= w.begin && first + i <= w.position;
        float v = c[j] * p.scale;
        if (p.cap > 0.0f) {
            v = p.cap * tanhf(v / p.cap);
        }
        s->scores[lane % 4 * 2 + j % 2][i] = inside ? v : -INFINITY;
    }
}

// p = exp(s - top), the new top and total, and the factor of earlier sums; warp h takes head h.
__device__ __forceinline__ void attention_softmax(attention_shared* s, int32_t heads) {
    int32_t h = (int32_t)threadIdx.x / 32;
    int32_t lane = (int32_t)threadIdx.x % 32;
    if (h < heads) {
        float v[4];
        *(float4*)v = *(const float4*)&s->scores[h][lane * 4];
        float top = fmaxf(fmaxf(v[0], v[1]), fmaxf(v[2], v[3]));
        top = fmaxf(warp_max(top), s->top[h]);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[i] = v[i] > -INFINITY ? exp_of(v[i] - top, (const bf16*)0) : 0.0f;
            sum += v[i];
        }
        *(uint2*)&s->p[h][lane * 4] = make_uint2(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]));
        sum = warp_sum(sum);
        if (lane == 0) {
            float factor = s->top[h] > -INFINITY ? exp_of(s->top[h] - top, (const bf16*)0) : 0.0f;
            s->factor[h] = factor;
            s->total[h] = s->total[h] * factor + sum;
            s->top[h] = top;
        }
    }
}

// acc += p V for 16 columns from `column` on: of head lane / 4, those at 2 (lane % 4) and 8
// further.
__device__ __forceinline__ void attention_values(const attention_place& w,
                                                 const attention_shared* s, const bf16* values,
                                                 int32_t column, float (*acc)[4]) {
    int32_t lane = (int32_t)threadIdx.x % 32;
    const bf16* row = values + lane % 16 * w.ld + column + lane / 16 * 8;
    const bf16* p = &s->p[lane / 4][lane % 4 * 2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        acc[j][0] *= s->factor[lane / 4];
        acc[j][1] *= s->factor[lane / 4];
    }
#pragma unroll 2
    for (int32_t i = 0; i < w.tile; i += 16) {
        uint32_t b[4];
        uint32_t low = *(const uint32_t*)(p + i);
        uint32_t high = *(const uint32_t*)(p + i + 8);
        attention_turned(b, row + i * w.ld);
        decode_multiply(acc[0], low, 0, high, 0, b[0], b[1]);
        decode_multiply(acc[1], low, 0, high, 0, b[2], b[3]);
    }
}

// The results of all pages of a text, in their order; a thread has pairs of columns.
__device__ __forceinline__ void attention_join(const decode_attention& p, int32_t first_head,
                                               int32_t heads, int32_t first_page, int32_t pages,
                                               bf16* out) {
    int64_t n = blockIdx.z;
    int64_t width = p.dim + 2;
#pragma unroll 1
    for (int32_t i = (int32_t)threadIdx.x * 2; i < heads * p.dim; i += 512) {
        int32_t h = first_head + i / p.dim;
        int32_t c = i % p.dim;
        const float* from = p.partials + ((n * p.heads + h) * gridDim.y + first_page) * width;
        float top = -INFINITY;
#pragma unroll 4
        for (int32_t j = 0; j < pages; j++) {
            top = fmaxf(top, __ldcg(from + j * width));
        }
        float total = 0.0f;
        float sums[2] = {0.0f, 0.0f};
#pragma unroll 4
        for (int32_t j = 0; j < pages; j++) {
            float2 own = __ldcg((const float2*)(from + j * width));
            float2 v = __ldcg((const float2*)(from + j * width + 2 + c));
            float weight = exp_of(own.x - top, (const bf16*)0);
            total += own.y * weight;
            sums[0] += v.x * weight;
            sums[1] += v.y * weight;
        }
        uint32_t pair = pack_bf16(sums[0] / total, sums[1] / total);
        *(uint32_t*)(p.o + n * p.ldo + (int64_t)h * p.dim + c) = pair;
        *(uint32_t*)(out + i) = pair;
    }
}

// The columns of A that belong to the heads of the block, brought as far as L2.
__device__ __forceinline__ void attention_ahead(const decode_attention& p,
                                                const attention_place& w) {
    int32_t lines = (w.heads * p.dim + 63) / 64; // of a row
#pragma unroll 1
    for (int32_t i = (int32_t)threadIdx.x; i < p.a_rank * lines; i += 256) {
        const bf16* from = p.a + (int64_t)(i / lines * p.heads + w.first_head) * p.dim;
        asm volatile("prefetch.global.L2 [%0];" ::"l"(from + i % lines * 64));
    }
}

// The block's part of z, from its columns of o.
__device__ __forceinline__ void attention_low(const decode_attention& p, const attention_place& w,
                                              const bf16* o) {
    int32_t lane = (int32_t)threadIdx.x % 32;
#pragma unroll 2
    for (int32_t r = (int32_t)threadIdx.x / 32; r < p.a_rank; r += 8) {
        const bf16* a = p.a + (int64_t)(r * p.heads + w.first_head) * p.dim;
        float sum = 0.0f;
#pragma unroll 2
        for (int32_t c = lane * 8; c < w.heads * p.dim; c += 256) {
            float v[8];
            float b[8];
            unpack(*(const uint4*)(a + c), b);
            unpack(*(const uint4*)(o + c), v);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                sum += v[k] * b[k];
            }
        }
        sum = warp_sum(sum);
        if (lane == 0) {
            p.z[(int64_t)blockIdx.x * p.a_rank + r] = sum;
        }
    }
}

// softmax(q K^T) V of the page, not divided by the total, in acc: see attention_values; a warp has
// columns 16 warp and 128 further. The first tile has been requested.
__device__ __forceinline__ void attention_page(const decode_attention& p, const attention_place& w,
                                               attention_shared* s, bf16* keys, bf16* tiles,
                                               float (*acc)[2][4]) {
    bf16* values = keys + (int64_t)p.kv_heads * p.dim;
    bf16* tile_values = tiles + w.tile * w.ld;
    int32_t column = (int32_t)threadIdx.x / 32 * 16;
    int32_t start = w.page * p.chunk;
#pragma unroll 1
    for (int32_t tile = 0; tile < p.chunk && start + tile <= w.position; tile += w.tile) {
        if (tile > 0) {
            attention_request(p, w, keys, tile, tiles);
        }
        asm volatile("cp.async.wait_group 1;" ::: "memory"); // the keys
        // The last tile has the new position: its key and value come from this block.
        int32_t fresh = w.position - start - tile;
        bool fresh_here = fresh < w.tile && w.page == w.last_page;
        if (fresh_here || tile == 0) {
            attention_heads(p, w, s, tiles + fresh * w.ld,
                            fresh_here ? keys + (tile + fresh) * p.ld_cache : 0);
        }
        __syncthreads();
        attention_scores(p, w, s, tiles, start + tile);
        __syncthreads();
        attention_softmax(s, w.heads);
        asm volatile("cp.async.wait_group 0;" ::: "memory"); // the values
        if (fresh_here) {
            attention_value(p, w, s, tile_values + fresh * w.ld,
                            values + (tile + fresh) * p.ld_cache);
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < 2; k++) {
            if (column + 128 * k < w.width) {
                attention_values(w, s, tile_values, column + 128 * k, acc[k]);
            }
        }
        __syncthreads();
    }
}

// Writes what attention_page left: to o and `out` if this is the only page, otherwise to memory.
__device__ __forceinline__ void attention_store(const decode_attention& p,
                                                const attention_place& w,
                                                const attention_shared* s,
                                                const float (*acc)[2][4], bool alone, bf16* out) {
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t h = lane / 4;
    if (h >= w.heads) {
        return;
    }
    int64_t head = w.n * p.heads + w.first_head + h;
    float* to = p.partials + (head * gridDim.y + w.page) * (p.dim + 2);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        int32_t c = (int32_t)threadIdx.x / 32 * 16 + j / 2 * 128 + j % 2 * 8 + lane % 4 * 2;
        const float* v = acc[j / 2][j % 2];
        if (c >= p.dim) {
            continue;
        }
        if (alone) {
            uint32_t pair = pack_bf16(v[0] / s->total[h], v[1] / s->total[h]);
            *(uint32_t*)(p.o + w.n * p.ldo + (int64_t)(w.first_head + h) * p.dim + c) = pair;
            *(uint32_t*)(out + h * p.dim + c) = pair;
        } else {
            *(float2*)(to + 2 + c) = make_float2(v[0], v[1]);
        }
        if (c == 0 && !alone) {
            *(float2*)to = make_float2(s->top[h], s->total[h]);
        }
    }
}

QLORA_KERNEL __maxnreg__(96)
    qlora_decode_attention(const __grid_constant__ decode_attention p) {
    extern __shared__ __align__(16) uint4 tiles[];
    __shared__ attention_shared s;
    // The states of the texts change at the end of a step; what a step before wrote to the cache
    // can be read already.
    early_next();
    attention_place w = attention_find(p);
    int32_t row = w.inside ? p.pages[w.n * gridDim.y + w.page] * p.chunk : 0;
    bf16* keys = p.cache + row * p.ld_cache + (int64_t)w.kv * p.dim;
    if (w.inside) {
        attention_request(p, w, keys, 0, (const bf16*)tiles);
        attention_clear(&s);
        attention_turns(p, w.position, &s);
        if (p.a && w.page == w.last_page) {
            attention_ahead(p, w);
        }
    }
    early_wait();
    if (!w.inside) {
        return;
    }
    attention_raw(p, w, &s);
    if (p.q_norm) {
        attention_norms(p, w, &s);
    }
    float acc[2][2][4] = {};
    attention_page(p, w, &s, keys, (bf16*)tiles, acc);
    bool alone = w.first_page == w.last_page;
    attention_store(p, w, &s, acc, alone, (bf16*)s.raw);
    if (!alone) {
        __threadfence();
        __syncthreads();
        uint32_t* counter = p.counters + w.n * gridDim.x + blockIdx.x;
        if (threadIdx.x == 0) {
            s.last = atomicAdd(counter, 1u) == (uint32_t)(w.last_page - w.first_page) ? 1 : 0;
        }
        __syncthreads();
        if (s.last == 0) {
            return;
        }
        __threadfence();
        attention_join(p, w.first_head, w.heads, w.first_page, w.last_page - w.first_page + 1,
                       (bf16*)s.raw);
        if (threadIdx.x == 0) {
            *counter = 0; // for the next layer
        }
    }
    if (p.a) {
        __syncthreads();
        attention_low(p, w, (const bf16*)s.raw);
    }
}
