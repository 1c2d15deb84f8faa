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
// Launch: grid (at least 1, rows), 1024 threads, (hidden + z_rank) * 4 bytes of dynamic shared
// memory. Every block computes x; the blocks of a row share z', block 0 writes h' and x. h and h'
// are different memory. hidden is a multiple of 8, rows are 16-byte aligned.
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

// What a thread requests for its four columns before z is there.
struct decode_columns {
    float h[4];
    float y[4];
};

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
                                               const decode_columns& ahead, float rstd,
                                               bool first) {
    int64_t n = blockIdx.y;
    bool lifted = decode_lifts(p);
    float squares = 0.0f;
#pragma unroll 1
    for (int32_t c = (int32_t)threadIdx.x * 4; c < p.hidden; c += (int32_t)blockDim.x * 4) {
        decode_columns v = ahead;
        if (c >= (int32_t)blockDim.x * 4) {
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

QLORA_KERNEL __launch_bounds__(1024) qlora_decode_norm(const __grid_constant__ decode_norm p) {
    extern __shared__ __align__(16) float row[];
    __shared__ float sums[32];
    __shared__ float room[DECODE_SLICES * 16];
    float* zs = row + p.hidden;
    int64_t n = blockIdx.y;
    int32_t own = (int32_t)threadIdx.x * 4;
    int32_t ranks = p.ranks[0] + p.ranks[1] + p.ranks[2];
    // It is long because what does not depend on z is requested before z is there, and the weights
    // before the kernel before has ended; the adapter's come as far as L2.
    decode_columns ahead;
    float4 gain = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
    uint2 first = make_uint2(0, 0);
    early_next();
    if (own < p.hidden) {
        if (p.w) {
            gain = *(const float4*)(p.w + own);
        }
        if ((int32_t)blockIdx.x < ranks) {
            first = *(const uint2*)(decode_row_of(p, (int32_t)blockIdx.x) + own);
        }
        if (p.y && p.z_rank > 0) {
            asm volatile("prefetch.global.L2 [%0];" ::"l"(p.sb + (int64_t)own * p.z_rank));
        }
    }
    early_wait();
    if (own < p.hidden) {
        decode_request(p, own, &ahead);
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
#pragma unroll 1
        for (int32_t c = own; c < p.hidden; c += (int32_t)blockDim.x * 4) {
            float v[4];
            *(float4*)v = *(const float4*)(row + c);
            if (begins) {
                float4 w = c == own || !p.w ? gain : *(const float4*)(p.w + c);
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
                uint2 raw = begins && c == own ? first : *(const uint2*)(decode_row_of(p, r) + c);
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
// joins the pages in their order, so timing does not matter.
//
// Launch: grid (kv_heads * groups, pages of a text, rows), 256 threads, with one group for every 8
// query heads of a key head. dim is a multiple of 8 up to 256.
enum { ATTENTION_HEADS = 8, ATTENTION_TILE = 128, ATTENTION_DIM = 256 };

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
};

struct attention_shared {
    float q[ATTENTION_HEADS][ATTENTION_DIM];
    float p[ATTENTION_HEADS][ATTENTION_TILE];
    float sums[16 * 256];
    float key[ATTENTION_DIM];
    float top[ATTENTION_HEADS];
    float total[ATTENTION_HEADS];
    float factor[ATTENTION_HEADS];
    float rstd[ATTENTION_HEADS + 1];
    int32_t last;
};

// q of the block's heads and, as head number `heads`, k: bias or norm, and rotation, all rounded.
// One pass over pairs of columns; norms need the sums of squares first.
__device__ __forceinline__ void attention_heads(const decode_attention& p, const bf16* x,
                                                int32_t first_head, int32_t heads, int32_t kv,
                                                bool key, int32_t position, attention_shared* s) {
    int64_t q_width = (int64_t)p.heads * p.dim;
    int32_t all = heads + (key ? 1 : 0);
    if (p.q_norm) {
#pragma unroll 1
        for (int32_t h = (int32_t)threadIdx.x / 32; h < all; h += 8) {
            bool is_key = h == heads;
            int64_t from = is_key ? q_width : 0;
            int32_t width = (is_key ? p.kv_heads : p.heads) * p.dim;
            if (p.norm_heads != 0) {
                from += (int64_t)(is_key ? kv : first_head + h) * p.dim;
                width = p.dim;
            }
            float squares = 0.0f;
            for (int32_t c = (int32_t)threadIdx.x % 32; c < width; c += 32) {
                float v = to_float(x[from + c]);
                squares += v * v;
            }
            squares = warp_sum(squares);
            if (threadIdx.x % 32 == 0) {
                s->rstd[h] = 1.0f / sqrtf(squares / (float)width + p.eps);
            }
        }
        __syncthreads();
    }
    // It is long because a pair is read, normalised, rotated and rounded in one pass.
    int32_t pairs = p.dim / 2;
#pragma unroll 1
    for (int32_t i = (int32_t)threadIdx.x; i < all * pairs; i += (int32_t)blockDim.x) {
        int32_t h = i / pairs;
        int32_t k = i % pairs;
        bool is_key = h == heads;
        bool turned = p.turn && k < p.half;
        // Of a head, the first 2 half columns are rotated; the pairs after them are neighbours.
        int32_t at[2] = {2 * k, 2 * k + 1};
        if (p.neighbours == 0 && k < p.half) {
            at[0] = k;
            at[1] = k + p.half;
        }
        int64_t head = is_key ? q_width + (int64_t)kv * p.dim : (int64_t)(first_head + h) * p.dim;
        const float* norm = is_key ? p.k_norm : p.q_norm;
        int32_t skipped = p.norm_heads != 0 ? 0 : (is_key ? kv : first_head + h) * p.dim;
        float v[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            v[j] = to_float(x[head + at[j]]);
            if (norm) {
                v[j] = to_float(to_bf16(v[j] * s->rstd[h] * norm[skipped + at[j]]));
            } else if (p.bias) {
                v[j] += to_float(p.bias[head + at[j]]);
            }
        }
        if (turned) {
            const float* turn = (is_key ? p.turn : p.turn_q) + (int64_t)position * 2 * p.half;
            float cosine = turn[k];
            float sine = turn[p.half + k];
            float a = __fmaf_rn(v[0], cosine, -__fmul_rn(v[1], sine));
            v[1] = __fmaf_rn(v[1], cosine, __fmul_rn(v[0], sine));
            v[0] = a;
        }
        float* out = is_key ? s->key : s->q[h];
        out[at[0]] = to_float(to_bf16(v[0]));
        out[at[1]] = to_float(to_bf16(v[1]));
    }
    __syncthreads();
}

// The scores of up to 128 positions, from `first` on, in s->p: eight lanes per position.
__device__ __forceinline__ void attention_scores(const decode_attention& p, attention_shared* s,
                                                 const bf16* keys, int32_t first, int32_t begin,
                                                 int32_t end, int32_t heads) {
    int32_t part = (int32_t)threadIdx.x % 8;
    int32_t own_row = (int32_t)threadIdx.x / 8;
    uint4 ahead[ATTENTION_TILE / 32][2]; // the first 128 columns of all rows, at once
#pragma unroll
    for (int j = 0; j < ATTENTION_TILE / 32; j++) {
        int32_t i = own_row + 32 * j;
        bool inside = first + i >= begin && first + i < end;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            ahead[j][e] = make_uint4(0, 0, 0, 0);
            if (inside && part * 8 + 64 * e < p.dim) {
                ahead[j][e] = *(const uint4*)(keys + i * p.ld_cache + part * 8 + 64 * e);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < ATTENTION_TILE / 32; j++) {
        int32_t i = own_row + 32 * j;
        bool inside = first + i >= begin && first + i < end;
        float dot[ATTENTION_HEADS];
#pragma unroll
        for (int h = 0; h < ATTENTION_HEADS; h++) {
            dot[h] = 0.0f;
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int32_t c = part * 8 + 64 * e;
            if (!inside || c >= p.dim) {
                continue;
            }
            float k[8];
            unpack(e < 2 ? ahead[j][e % 2] : *(const uint4*)(keys + i * p.ld_cache + c), k);
#pragma unroll
            for (int h = 0; h < ATTENTION_HEADS; h++) {
                if (h < heads) {
                    const float* q = &s->q[h][c];
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        dot[h] += q[j] * k[j];
                    }
                }
            }
        }
        float own = 0.0f; // lane h of the eight keeps that of head h
#pragma unroll
        for (int h = 0; h < ATTENTION_HEADS; h++) {
            float v = dot[h];
            v += __shfl_xor_sync(QLORA_FULL_WARP, v, 4);
            v += __shfl_xor_sync(QLORA_FULL_WARP, v, 2);
            v += __shfl_xor_sync(QLORA_FULL_WARP, v, 1);
            own = part == h ? v : own;
        }
        own *= p.scale;
        own = p.cap > 0.0f ? p.cap * tanhf(own / p.cap) : own;
        s->p[part][i] = inside ? own : -INFINITY;
    }
}

// exp(s - top) in place of the scores, the new top and total, and the factor of earlier sums; warp
// h takes head h.
__device__ __forceinline__ void attention_softmax(attention_shared* s, int32_t heads) {
    int32_t h = (int32_t)threadIdx.x / 32;
    int32_t lane = (int32_t)threadIdx.x % 32;
    if (h < heads) {
        float v[4];
        float top = -INFINITY;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[i] = s->p[h][lane + 32 * i];
            top = fmaxf(top, v[i]);
        }
        top = fmaxf(warp_max(top), s->top[h]);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[i] = v[i] > -INFINITY ? exp_of(v[i] - top, (const bf16*)0) : 0.0f;
            s->p[h][lane + 32 * i] = v[i];
            sum += v[i];
        }
        sum = warp_sum(sum);
        if (lane == 0) {
            float factor = s->top[h] > -INFINITY ? exp_of(s->top[h] - top, (const bf16*)0) : 0.0f;
            s->factor[h] = factor;
            s->total[h] = s->total[h] * factor + sum;
            s->top[h] = top;
        }
    }
}

// acc[h] += p[h] V for the pair of columns of this thread, over its share of the positions.
__device__ __forceinline__ void attention_values(const decode_attention& p,
                                                 const attention_shared* s, const bf16* values,
                                                 int32_t from, int32_t to, int32_t share,
                                                 int32_t shares, int32_t heads, float (*acc)[2]) {
#pragma unroll
    for (int h = 0; h < ATTENTION_HEADS; h++) {
        float factor = h < heads ? s->factor[h] : 0.0f;
        acc[h][0] *= factor;
        acc[h][1] *= factor;
    }
#pragma unroll 16
    for (int32_t i = from + share; i < to; i += shares) {
        float lo;
        float hi;
        unpack_pair(*(const uint32_t*)(values + i * p.ld_cache), lo, hi);
#pragma unroll
        for (int h = 0; h < ATTENTION_HEADS; h++) {
            if (h < heads) {
                acc[h][0] += s->p[h][i] * lo;
                acc[h][1] += s->p[h][i] * hi;
            }
        }
    }
}

// The results of all pages of a text, in their order.
__device__ __forceinline__ void attention_join(const decode_attention& p, int32_t first_head,
                                               int32_t heads, int32_t first_page, int32_t pages) {
    int64_t n = blockIdx.z;
    int64_t width = p.dim + 2;
    for (int32_t i = (int32_t)threadIdx.x; i < heads * p.dim; i += (int32_t)blockDim.x) {
        int32_t h = first_head + i / p.dim;
        int32_t c = i % p.dim;
        const float* from = p.partials + ((n * p.heads + h) * gridDim.y + first_page) * width;
        float top = -INFINITY;
        float total = 0.0f;
        float sum = 0.0f;
#pragma unroll 4
        for (int32_t j = 0; j < pages; j++) {
            float t = __ldcg(from + j * width);
            float l = __ldcg(from + j * width + 1);
            float v = __ldcg(from + j * width + 2 + c);
            float higher = fmaxf(top, t);
            float old = top > -INFINITY ? exp_of(top - higher, (const bf16*)0) : 0.0f;
            float fresh = exp_of(t - higher, (const bf16*)0);
            total = total * old + l * fresh;
            sum = sum * old + v * fresh;
            top = higher;
        }
        p.o[n * p.ldo + (int64_t)h * p.dim + c] = to_bf16(sum / total);
    }
}

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
    w.inside = w.page >= w.first_page && w.page <= w.last_page && p.texts[w.n].alive != 0;
    return w;
}

// Brings the rows of a tile of the page, from `tile` on, as far as L2: a thread for the keys of
// each position, and one for its values.
__device__ __forceinline__ void attention_ahead(const decode_attention& p, const attention_place& w,
                                                const bf16* keys, int32_t tile) {
    int32_t at = tile + (int32_t)threadIdx.x / 2;
    int32_t position = w.page * p.chunk + at;
    if (at >= p.chunk || position >= w.position || position < w.begin) {
        return;
    }
    const bf16* from = keys + at * p.ld_cache;
    from += threadIdx.x % 2 == 0 ? 0 : (int64_t)p.kv_heads * p.dim;
    for (int32_t c = 0; c < p.dim; c += 64) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(from + c));
    }
}

// The query heads, and in the last page also k and v of the new position, which go to the cache.
__device__ __forceinline__ void attention_begin(const decode_attention& p, const attention_place& w,
                                                attention_shared* s, bf16* keys) {
    int64_t q_width = (int64_t)p.heads * p.dim;
    int64_t kv_width = (int64_t)p.kv_heads * p.dim;
    const bf16* x = p.qkv + w.n * p.ld;
    attention_heads(p, x, w.first_head, w.heads, w.kv, w.page == w.last_page, w.position, s);
    if (w.page == w.last_page) {
        int64_t to = (w.position - w.page * p.chunk) * p.ld_cache;
        int64_t column = q_width + kv_width + (int64_t)w.kv * p.dim;
        for (int32_t c = (int32_t)threadIdx.x; c < p.dim; c += (int32_t)blockDim.x) {
            float v = to_float(x[column + c]);
            v += p.bias ? to_float(p.bias[column + c]) : 0.0f;
            store(keys + to + c, s->key[c]);
            store(keys + kv_width + to + c, v);
        }
    }
    if (threadIdx.x < ATTENTION_HEADS) {
        s->top[threadIdx.x] = -INFINITY;
        s->total[threadIdx.x] = 0.0f;
    }
    __syncthreads(); // this block's stores to the cache as well
}

// softmax(q K^T) V of the page, not divided by the total, in s->sums: one sum per share of the
// positions.
__device__ __forceinline__ int32_t attention_page(const decode_attention& p,
                                                  const attention_place& w, attention_shared* s,
                                                  const bf16* keys) {
    const bf16* values = keys + (int64_t)p.kv_heads * p.dim;
    int32_t pairs = p.dim / 2;
    int32_t shares = 256 / pairs;
    int32_t share = (int32_t)threadIdx.x / pairs;
    int32_t pair = (int32_t)threadIdx.x % pairs;
    float acc[ATTENTION_HEADS][2];
#pragma unroll
    for (int h = 0; h < ATTENTION_HEADS; h++) {
        acc[h][0] = 0.0f;
        acc[h][1] = 0.0f;
    }
    int32_t start = w.page * p.chunk;
#pragma unroll 1
    for (int32_t tile = 0; tile < p.chunk && start + tile <= w.position; tile += ATTENTION_TILE) {
        attention_ahead(p, w, keys, tile + ATTENTION_TILE);
        if (start + tile + ATTENTION_TILE <= w.begin) {
            continue;
        }
        attention_scores(p, s, keys + tile * p.ld_cache, start + tile, w.begin, w.position + 1,
                         w.heads);
        __syncthreads();
        attention_softmax(s, w.heads);
        __syncthreads();
        int32_t from = w.begin - start - tile > 0 ? w.begin - start - tile : 0;
        int32_t to = w.position + 1 - start - tile;
        if (share < shares) {
            attention_values(p, s, values + tile * p.ld_cache + 2 * pair, from,
                             to < ATTENTION_TILE ? to : ATTENTION_TILE, share, shares, w.heads,
                             acc);
        }
        __syncthreads();
    }
#pragma unroll
    for (int h = 0; h < ATTENTION_HEADS; h++) {
        if (share < shares && h < w.heads) {
            s->sums[(share * w.heads + h) * p.dim + 2 * pair] = acc[h][0];
            s->sums[(share * w.heads + h) * p.dim + 2 * pair + 1] = acc[h][1];
        }
    }
    __syncthreads();
    return shares;
}

QLORA_KERNEL __launch_bounds__(256)
    qlora_decode_attention(const __grid_constant__ decode_attention p) {
    __shared__ attention_shared s;
    // The states of the texts change at the end of a step; what a step before wrote to the cache
    // can be requested already.
    early_next();
    attention_place w = attention_find(p);
    int32_t row = w.inside ? p.pages[w.n * gridDim.y + w.page] * p.chunk : 0;
    bf16* keys = p.cache + row * p.ld_cache + (int64_t)w.kv * p.dim;
    if (w.inside) {
        attention_ahead(p, w, keys, 0);
    }
    early_wait();
    if (!w.inside) {
        return;
    }
    attention_begin(p, w, &s, keys);
    int32_t shares = attention_page(p, w, &s, keys);
    bool alone = w.first_page == w.last_page;
    for (int32_t i = (int32_t)threadIdx.x; i < w.heads * p.dim; i += (int32_t)blockDim.x) {
        float sum = 0.0f;
        for (int32_t j = 0; j < shares; j++) {
            sum += s.sums[j * w.heads * p.dim + i];
        }
        int32_t h = i / p.dim;
        int64_t at = ((w.n * p.heads + w.first_head + h) * gridDim.y + w.page) * (p.dim + 2);
        if (alone) {
            p.o[w.n * p.ldo + (int64_t)w.first_head * p.dim + i] = to_bf16(sum / s.total[h]);
        } else {
            p.partials[at + 2 + i % p.dim] = sum;
            if (i % p.dim == 0) {
                p.partials[at] = s.top[h];
                p.partials[at + 1] = s.total[h];
            }
        }
    }
    if (alone) {
        return;
    }
    __threadfence();
    __syncthreads();
    uint32_t* counter = p.counters + w.n * gridDim.x + blockIdx.x;
    if (threadIdx.x == 0) {
        s.last = atomicAdd(counter, 1u) == (uint32_t)(w.last_page - w.first_page) ? 1 : 0;
    }
    __syncthreads();
    if (s.last != 0) {
        __threadfence();
        attention_join(p, w.first_head, w.heads, w.first_page, w.last_page - w.first_page + 1);
        if (threadIdx.x == 0) {
            *counter = 0; // for the next layer
        }
    }
}
