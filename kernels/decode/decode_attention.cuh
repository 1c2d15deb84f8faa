// decode_attention.cuh - attention of one query over the cache, for decoding.
#ifndef QLORA_DECODE_ATTENTION_CUH
#define QLORA_DECODE_ATTENTION_CUH

#include "decode.cuh"
#include "decode_args.cuh"

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
// Launch of decode_attention: grid (kv_heads * groups, pages of a text, rows), 256 threads, with
// one group for every 8 query heads of a key head; dynamic shared memory: keys and values of a
// tile, whose rows have ATTENTION_PAD elements more than dim, rounded up to 16. dim is a multiple
// of 8 up to 256.
//
// Both products are made by m16n8k16: positions times heads, and heads times columns of V. What
// heads, positions and columns that are not there would contribute is zero.
enum {
    ATTENTION_HEADS = 8,
    ATTENTION_TILE = 128, // positions, at most; 64 if dim > 128
    ATTENTION_DIM = 256,
    ATTENTION_PAD = 8, // elements after each row in shared memory, against bank conflicts
    ATTENTION_JOIN = 8 // pages that are joined at a time
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
    int32_t unit;  // key head and group of query heads
    int32_t pages; // of a text
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

// The threads that work on a page; a block may have others.
__device__ __forceinline__ void attention_sync() {
    asm volatile("bar.sync 1, 256;" ::: "memory");
}

// The first position within the window.
__device__ __forceinline__ int32_t attention_begins(const decode_attention& p, int32_t position) {
    return p.window > 0 && position + 1 > p.window ? position + 1 - p.window : 0;
}

__device__ __forceinline__ attention_place attention_find(const decode_attention& p, int32_t unit,
                                                          int32_t page, int32_t pages, int64_t n,
                                                          int32_t position, bool alive) {
    attention_place w;
    w.n = n;
    w.unit = unit;
    w.pages = pages;
    w.position = position;
    w.begin = attention_begins(p, position);
    w.page = page;
    w.first_page = w.begin / p.chunk;
    w.last_page = w.position / p.chunk;
    int32_t group = p.heads / p.kv_heads;
    int32_t groups = (group + ATTENTION_HEADS - 1) / ATTENTION_HEADS;
    int32_t skipped = unit % groups * ATTENTION_HEADS;
    w.kv = unit / groups;
    w.first_head = w.kv * group + skipped;
    w.heads = group - skipped < ATTENTION_HEADS ? group - skipped : ATTENTION_HEADS;
    w.tile = p.dim <= 128 ? ATTENTION_TILE : ATTENTION_TILE / 2;
    w.width = (p.dim + 15) / 16 * 16;
    w.ld = w.width + ATTENTION_PAD;
    w.inside = w.page >= w.first_page && w.page <= w.last_page && alive;
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
        int32_t row = (int32_t)threadIdx.x % 256 / pieces;
        int32_t c = (int32_t)threadIdx.x % 256 % pieces;
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
        s->raw[i] = __ldcg((const uint4*)(x + (int64_t)head * p.dim + i % pieces * 8));
    }
    attention_sync();
}

// The value of a word of decode_layers.cuh, when it is there.
__device__ __forceinline__ bf16 attention_word(const uint32_t* at, uint32_t mark) {
    uint32_t v;
    do {
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    } while ((v ^ mark) > 65535u);
    bf16 value;
    value.bits = (unsigned short)v;
    return value;
}

// Norms of the heads and of k, head number `heads`: the factors. With `words`, those are qkv.
__device__ __forceinline__ void attention_norms(const decode_attention& p, const attention_place& w,
                                                const uint32_t* words, uint32_t mark,
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
            bf16 value;
            if (words && p.norm_heads == 0) {
                value = attention_word(words + (from - all) + c, mark);
            } else {
                value = from[c];
            }
            float v = to_float(value);
            squares += v * v;
        }
        squares = warp_sum(squares);
        if (threadIdx.x % 32 == 0) {
            s->rstd[h] = 1.0f / sqrtf(squares / (float)width + p.eps);
        }
    }
    attention_sync();
}

// q of the block's heads and, in the tile of the new position, k, which also goes to the cache:
// bias or norm, and rotation, all rounded. One pass over pairs of columns. `gains`: the weights of
// the norms of k and of q in shared memory, null if they are not there.
__device__ __forceinline__ void attention_heads(const decode_attention& p, const attention_place& w,
                                                attention_shared* s, bf16* tile_key, bf16* key,
                                                const float* gains) {
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
        norm = norm && gains ? gains + (is_key ? 0 : ATTENTION_DIM) : norm;
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
__device__ __forceinline__ void attention_join(const decode_attention& p, const attention_place& w,
                                               bf16* out) {
    int32_t pages = w.last_page - w.first_page + 1;
    int64_t width = p.dim + 2;
#pragma unroll 1
    for (int32_t i = (int32_t)threadIdx.x * 2; i < w.heads * p.dim; i += 512) {
        int32_t h = w.first_head + i / p.dim;
        int32_t c = i % p.dim;
        const float* from = p.partials + ((w.n * p.heads + h) * w.pages + w.first_page) * width;
        float top = -INFINITY;
        float total = 0.0f;
        float sums[2] = {0.0f, 0.0f};
        // What is loaded together costs the latency of one load.
#pragma unroll 1
        for (int32_t first = 0; first < pages; first += ATTENTION_JOIN) {
            float2 own[ATTENTION_JOIN]; // top and total
            float2 v[ATTENTION_JOIN];
            float before = top;
#pragma unroll
            for (int j = 0; j < ATTENTION_JOIN; j++) {
                const float* page = from + (first + j) * width;
                bool there = first + j < pages;
                own[j] = there ? __ldcg((const float2*)page) : make_float2(-INFINITY, 0.0f);
                v[j] = there ? __ldcg((const float2*)(page + 2 + c)) : make_float2(0.0f, 0.0f);
                top = fmaxf(top, own[j].x);
            }
            float factor = exp_of(before - top, (const bf16*)0);
            total *= factor;
            sums[0] *= factor;
            sums[1] *= factor;
#pragma unroll
            for (int j = 0; j < ATTENTION_JOIN; j++) {
                float weight = exp_of(own[j].x - top, (const bf16*)0);
                total += own[j].y * weight;
                sums[0] += v[j].x * weight;
                sums[1] += v[j].y * weight;
            }
        }
        uint32_t pair = pack_bf16(sums[0] / total, sums[1] / total);
        *(uint32_t*)(p.o + w.n * p.ldo + (int64_t)h * p.dim + c) = pair;
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
            p.z[(int64_t)w.unit * p.a_rank + r] = sum;
        }
    }
}

// softmax(q K^T) V of the page, not divided by the total, in acc: see attention_values; a warp has
// columns 16 warp and 128 further. The first tile has been requested; if `helped`, by 256 other
// threads of the block, which come to barriers 2 and 3 when they have its keys and values, and the
// weights of the norms are where the scores will be.
template <bool helped>
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
        // The last tile has the new position: its key and value come from this block.
        int32_t fresh = w.position - start - tile;
        bool fresh_here = fresh < w.tile && w.page == w.last_page;
        if (fresh_here || tile == 0) {
            attention_heads(p, w, s, tiles + fresh * w.ld,
                            fresh_here ? keys + (tile + fresh) * p.ld_cache : 0,
                            helped && tile == 0 && p.norm_heads != 0 ? s->scores[0] : 0);
        }
        if (helped && tile == 0) {
            asm volatile("bar.sync 2, 512;" ::: "memory");
        } else {
            asm volatile("cp.async.wait_group 1;" ::: "memory"); // the keys
            attention_sync();
        }
        attention_scores(p, w, s, tiles, start + tile);
        attention_sync();
        attention_softmax(s, w.heads);
        if (fresh_here) {
            attention_value(p, w, s, tile_values + fresh * w.ld,
                            values + (tile + fresh) * p.ld_cache);
        }
        if (helped && tile == 0) {
            asm volatile("bar.sync 3, 512;" ::: "memory");
        } else {
            asm volatile("cp.async.wait_group 0;" ::: "memory"); // the values
            attention_sync();
        }
#pragma unroll
        for (int k = 0; k < 2; k++) {
            if (column + 128 * k < w.width) {
                attention_values(w, s, tile_values, column + 128 * k, acc[k]);
            }
        }
        attention_sync();
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
    float* to = p.partials + (head * w.pages + w.page) * (p.dim + 2);
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

// The row of the cache that is the first one of the page.
__device__ __forceinline__ int32_t attention_row(const decode_attention& p,
                                                 const attention_place& w) {
    return w.inside ? p.pages[w.n * w.pages + w.page] * p.chunk : 0;
}

// The keys of the page, from its first row on.
__device__ __forceinline__ bf16* attention_keys(const decode_attention& p, const attention_place& w,
                                                int32_t row) {
    return p.cache + row * p.ld_cache + (int64_t)w.kv * p.dim;
}

// A thread's part of the turns of the new position, of k and of q: at most dim, for 256 threads.
struct attention_turns {
    float k;
    float q;

    static __device__ __forceinline__ bool are_there(const decode_attention& p) {
        return p.turn && (int32_t)threadIdx.x < 2 * p.half;
    }

    __device__ __forceinline__ void load(const decode_attention& p, const attention_place& w) {
        if (are_there(p)) {
            k = p.turn[(int64_t)w.position * 2 * p.half + threadIdx.x];
            q = p.turn_q[(int64_t)w.position * 2 * p.half + threadIdx.x];
        }
    }

    __device__ __forceinline__ void store(const decode_attention& p, attention_shared* s) const {
        if (are_there(p)) {
            s->turns[0][threadIdx.x] = k;
            s->turns[1][threadIdx.x] = q;
        }
    }
};

// Before qkv is there: requests the first tile, and brings the turns of the new position.
__device__ __forceinline__ void attention_begin(const decode_attention& p,
                                                const attention_place& w, const bf16* keys,
                                                const bf16* tiles, attention_shared* s) {
    attention_turns turns;
    turns.load(p, w);
    attention_request(p, w, keys, 0, tiles);
    attention_clear(s);
    turns.store(p, s);
}

// The page, and if it is the last one to be done, the results of all. False if it is not.
__device__ __forceinline__ bool attention_run(const decode_attention& p, const attention_place& w,
                                              bf16* keys, bf16* tiles, uint32_t* counter,
                                              attention_shared* s) {
    attention_raw(p, w, s);
    if (p.q_norm) {
        attention_norms(p, w, 0, 0, s);
    }
    float acc[2][2][4] = {};
    attention_page<false>(p, w, s, keys, tiles, acc);
    bool alone = w.first_page == w.last_page;
    attention_store(p, w, s, acc, alone, (bf16*)s->raw);
    if (!alone) {
        __threadfence();
        attention_sync();
        if (threadIdx.x == 0) {
            s->last = atomicAdd(counter, 1u) == (uint32_t)(w.last_page - w.first_page) ? 1 : 0;
        }
        attention_sync();
        if (s->last == 0) {
            return false;
        }
        __threadfence();
        attention_join(p, w, (bf16*)s->raw);
        if (threadIdx.x == 0) {
            *counter = 0; // for the next layer
        }
    }
    return true;
}

#endif
