// decode_layers.cuh - all layers of a decoding step of a single text in one launch.
//
//   x = norm(h) | qkv | attention | h += o | x = norm(h) | s = act(gate) up | h += down
//
// A kernel of its own for each of these leaves the memory idle while it starts, drains and waits
// for what it depends on. Here, the blocks stay, one on every multiprocessor, and wait for each
// other where a row has to be complete. Weights depend on nothing: each warp has a ring of pieces
// (decode_row.cuh) that runs through all stacks of all layers, so that memory is read while blocks
// wait, make a norm or attend.
//
// Every block makes x for itself. z = x A^T is made by as many blocks as it has values, one each,
// and awaited only where the adapter is added. Attention is that of decode_attention.cuh, an item
// (key head, page) per block, by its first 256 threads; it uses the memory of x. The parameters of
// three layers are in shared memory: pieces of the next one are requested early, and those of the
// one after it come while blocks attend.
//
// Blocks count what they have done in `counters`, which are zero at the start and only grow. What
// another block has written is never read through the read-only cache.
//
// Launch: cooperative, LAYER_THREADS threads, grid any number of blocks that are resident together.
// Every K is a multiple of 256 and N of 16; weights are NF4 in blocks of 64 with quantised scales
// in groups of at least 4; hidden is at most 8192. Determinism: one writer per output, fixed order
// of every sum, which depends on the shapes and the grid.
#ifndef QLORA_DECODE_LAYERS_CUH
#define QLORA_DECODE_LAYERS_CUH

#include "decode_attention.cuh"
#include "decode_row.cuh"

enum {
    LAYER_STAGES = 3,
    LAYER_THREADS = 512,
    LAYER_WARPS = LAYER_THREADS / 32,
    LAYER_STAGE = ROW_PIECE + 128, // codes, then 16 x 4 codes of scales and 16 scales of groups
    LAYER_RINGS = LAYER_WARPS * LAYER_STAGES * LAYER_STAGE,
    LAYER_SLOTS = 3, // for the parameters of a layer and of the next two
    LAYER_AHEAD = 2, // vectors of A that a thread brings to L2 before x is there
    LAYER_ALL = 0,   // counters: blocks that have ended a stack
    LAYER_UNITS = 32, // heads that have attended
    LAYER_Z = 64     // values of z
};

// Same layout as qlora__decode_layer.
struct decode_layer {
    decode_product stacks[4]; // qkv, o, gate and up, down; y of o and down is h
    decode_attention attention;
    const bf16* a[4][3]; // [ranks[k][i], K of the stack]
    const float* norms[2];
    int32_t ranks[4][3];
    int64_t unused;
};

// Same layout as qlora__decode_layers.
struct decode_layers {
    const decode_layer* layers;
    bf16* h;
    bf16* z; // [4, ldz]
    uint32_t* counters;
    int32_t count;
    int32_t hidden;
    int32_t ldz;
    int32_t units; // of attention
    int32_t pages;
    float eps;
    float scale;
    int32_t unused;
};

struct layer_shared {
    decode_layer layers[LAYER_SLOTS];
    float offsets[LAYER_SLOTS][4][3];
    float sums[LAYER_WARPS * 2];
};

// ---- blocks that wait for each other

__device__ __forceinline__ void layer_count(uint32_t* counter) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ __forceinline__ void layer_wait(const uint32_t* counter, uint32_t until) {
    uint32_t now;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    } while (now < until);
}

// ---- products

// The two levels of byte i of a word of codes; `own` is the address of the lane's copy of the
// table. Written so that two pipes share the work: a permutation, and a multiplication with an
// addition.
__device__ __forceinline__ uint32_t layer_pair(uint32_t own, uint32_t word, int i) {
    uint32_t at = own + (__byte_perm(word, 0, 0x4440u | (uint32_t)i) << 7);
    uint32_t pair;
    asm("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(at));
    return pair;
}

// The products of half a piece: see row_half in decode_row.cuh.
__device__ __forceinline__ void layer_half(const row_half& half, uint32_t own, const uint4* from,
                                           bool real, uint4& x, float* c) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint4 a = half.codes[0];
        uint4 b = half.codes[1];
        uint32_t u = i == 0 ? a.x : i == 1 ? a.y : i == 2 ? a.z : a.w;
        uint32_t v = i == 0 ? b.x : i == 1 ? b.y : i == 2 ? b.z : b.w;
        if (real) {
            x = from[i];
        }
        decode_multiply(c, layer_pair(own, u, 0), layer_pair(own, v, 0), layer_pair(own, u, 1),
                        layer_pair(own, v, 1), x.x, x.y);
        decode_multiply(c, layer_pair(own, u, 2), layer_pair(own, v, 2), layer_pair(own, u, 3),
                        layer_pair(own, v, 3), x.z, x.w);
    }
}

// ---- the pieces of a warp

// How the pieces of a block are divided: as in row_divide, but there may be none.
__device__ __forceinline__ row_share layer_divide(const decode_product& p) {
    row_share s;
    int32_t units = row_tiles(p, 0);
    if (p.gated == 0) {
        units += row_tiles(p, 1) + row_tiles(p, 2);
    }
    s.pieces = p.K / ROW_COLUMNS;
    s.units = (units - (int32_t)blockIdx.x + (int32_t)gridDim.x - 1) / (int32_t)gridDim.x;
    int32_t all = s.pieces * s.units * (p.gated != 0 ? 2 : 1);
    s.each = (all + LAYER_WARPS - 1) / LAYER_WARPS;
    s.each = s.each > 0 ? s.each : 1;
    s.begin = (int32_t)threadIdx.x / 32 * s.each;
    s.count = all - s.begin < s.each ? all - s.begin : s.each;
    s.count = s.count > 0 ? s.count : 0;
    s.slots = (s.pieces - 1 + s.each - 1) / s.each + 1;
    return s;
}

// Which part has a tile of the block; `first` is the row of the part that is row 0 of the tile.
__device__ __forceinline__ int32_t layer_find(const decode_product& p, int32_t units, int32_t tile,
                                              int32_t& first) {
    row_cursor c;
    int32_t half = tile >= units ? 1 : 0; // of gate and up
    row_start(p, c, (int32_t)blockIdx.x + (tile - half * units) * (int32_t)gridDim.x);
    first = c.unit * 16;
    return half + c.which;
}

// The next piece that a warp requests.
struct layer_ahead {
    int32_t layer;
    int32_t stack;
    int32_t units;
    int32_t pieces;
    int32_t tile;
    int32_t piece;
    int32_t left;   // of the stack
    int32_t flying; // requested and not read
    int32_t stage;
    int32_t block; // lane % 16's row of the tile, in blocks of 64
    int32_t shift;
    int32_t step; // bytes from row to row
    const uint8_t* codes;
    const uint8_t* scales; // lanes 0 to 15: codes of scales; others: scales of groups

    __device__ __forceinline__ void enter(const decode_product& p) {
        int32_t lane = (int32_t)threadIdx.x % 32;
        int32_t first;
        const decode_part& part = p.parts[layer_find(p, units, tile, first)];
        int32_t row = part.first + first;
        step = p.K / 2;
        codes = (const uint8_t*)part.w + (int64_t)(row + lane / 8) * step + lane % 8 * 16;
        scales = lane < 16 ? part.q : (const uint8_t*)part.scales;
        block = (row + lane % 16) * (p.K / 64);
        shift = part.group_shift;
    }

    // Goes to the next stack that has pieces for the warp, as far as layer `last`.
    __device__ __forceinline__ void advance(const layer_shared* s, int32_t last) {
#pragma unroll 1
        while (left == 0 && (stack < 3 || layer < last)) {
            layer += stack == 3 ? 1 : 0;
            stack = stack == 3 ? 0 : stack + 1;
            const decode_product& p = s->layers[layer % LAYER_SLOTS].stacks[stack];
            row_share share = layer_divide(p);
            units = share.units;
            pieces = share.pieces;
            left = share.count;
            tile = share.begin / pieces;
            piece = share.begin % pieces;
            if (left > 0) {
                enter(p);
            }
        }
    }

    // Requests pieces until the ring is full. Odd rows are turned by half a line, so that two rows
    // can be read at once.
    __device__ __forceinline__ void fill(const layer_shared* s, int32_t last, uint32_t ring) {
        int32_t lane = (int32_t)threadIdx.x % 32;
#pragma unroll 1
        while (flying < LAYER_STAGES) {
            advance(s, last);
            if (left == 0) {
                return;
            }
            uint32_t at = ring + (uint32_t)(stage * LAYER_STAGE);
            uint32_t to = at + (uint32_t)(lane / 8 * 128 + (lane % 8 ^ (lane / 8 & 1) << 2) * 16);
            const uint8_t* from = codes + piece * (ROW_COLUMNS / 2);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + 512u * i),
                             "l"(from)
                             : "memory");
                from += 4 * step;
            }
            int32_t b = block + piece * (ROW_COLUMNS / 64);
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(
                             at + (uint32_t)(ROW_PIECE + lane * 4)),
                         "l"(scales + (lane < 16 ? b : (b >> shift) * 4))
                         : "memory");
            asm volatile("cp.async.commit_group;" ::: "memory");
            flying++;
            stage = stage == LAYER_STAGES - 1 ? 0 : stage + 1;
            left--;
            if (++piece == pieces) {
                piece = 0;
                tile++;
                if (left > 0) {
                    enter(s->layers[layer % LAYER_SLOTS].stacks[stack]);
                }
            }
        }
    }
};

// ---- x and z

// x = norm(h).
__device__ __forceinline__ void layer_norm(const decode_layers& p, const float* w, bf16* x,
                                           float* sums) {
    uint4 raw[2];
    float4 gain[2];
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int32_t c = ((int32_t)threadIdx.x + i * LAYER_THREADS) * 8;
        if (c < p.hidden) {
            float v[8];
            raw[i] = __ldcg((const uint4*)(p.h + c));
            if (i == 0) {
                gain[0] = *(const float4*)(w + c);
                gain[1] = *(const float4*)(w + c + 4);
            }
            unpack(raw[i], v);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                squares += v[k] * v[k];
            }
        }
    }
    squares = row_sum(squares, sums, LAYER_THREADS);
    float rstd = 1.0f / sqrtf(squares / (float)p.hidden + p.eps);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int32_t c = ((int32_t)threadIdx.x + i * LAYER_THREADS) * 8;
        if (c < p.hidden) {
            float v[8];
            float4 low = i == 0 ? gain[0] : *(const float4*)(w + c);
            float4 high = i == 0 ? gain[1] : *(const float4*)(w + c + 4);
            unpack(raw[i], v);
            *(uint4*)(x + c) = make_uint4(pack_bf16(v[0] * rstd * low.x, v[1] * rstd * low.y),
                                          pack_bf16(v[2] * rstd * low.z, v[3] * rstd * low.w),
                                          pack_bf16(v[4] * rstd * high.x, v[5] * rstd * high.y),
                                          pack_bf16(v[6] * rstd * high.z, v[7] * rstd * high.w));
        }
    }
}

// Row r of the A of a stack, of all parts one after another.
__device__ __forceinline__ const bf16* layer_row_of(const decode_layer& l, int32_t k, int32_t r) {
    const int32_t* ranks = l.ranks[k];
    int32_t i = 0;
#pragma unroll 1
    while (i < 2 && r >= ranks[i]) {
        r -= ranks[i++];
    }
    return l.a[k][i] + (int64_t)r * l.stacks[k].K;
}

// The block's values of z: rows from the last block on.
__device__ __forceinline__ void layer_low(const decode_layers& p, const decode_layer& l, int32_t k,
                                          int32_t ranks, const bf16* x, float* sums) {
    int32_t first = (int32_t)gridDim.x - 1 - (int32_t)blockIdx.x;
#pragma unroll 1
    for (int32_t r = first; r < ranks; r += (int32_t)gridDim.x) {
        const bf16* a = layer_row_of(l, k, r);
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < LAYER_AHEAD; i++) {
            int32_t c = ((int32_t)threadIdx.x + i * LAYER_THREADS) * 8;
            if (c < l.stacks[k].K) {
                float v[8];
                float b[8];
                unpack(*(const uint4*)(a + c), b);
                unpack(*(const uint4*)(x + c), v);
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    dot += v[j] * b[j];
                }
            }
        }
#pragma unroll 1
        for (int32_t c = ((int32_t)threadIdx.x + LAYER_AHEAD * LAYER_THREADS) * 8;
             c < l.stacks[k].K; c += LAYER_THREADS * 8) {
            float v[8];
            float b[8];
            unpack(*(const uint4*)(a + c), b);
            unpack(*(const uint4*)(x + c), v);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                dot += v[j] * b[j];
            }
        }
        dot = row_sum(dot, sums, LAYER_THREADS);
        if (threadIdx.x == 0) {
            p.z[k * p.ldz + r] = to_bf16(dot);
            layer_count(p.counters + LAYER_Z);
        }
    }
}

// A warp's copy of z, when it is complete.
__device__ __forceinline__ void layer_z(const decode_layers& p, int32_t k, int32_t ranks,
                                        uint32_t until, float* zs) {
    int32_t lane = (int32_t)threadIdx.x % 32;
    if (lane == 0) {
        layer_wait(p.counters + LAYER_Z, until);
    }
    __syncwarp();
#pragma unroll 1
    for (int32_t i = lane; i < ranks; i += 32) {
        bf16 z;
        z.bits = __ldcg((const unsigned short*)(p.z + k * p.ldz + i));
        zs[i] = to_float(z);
    }
}

// ---- the results

// The rows of sB that belong to the block's outputs, in shared memory: [tile][16][vectors]. Those
// of ranks that are no multiple of 8 stay where they are.
struct layer_lift {
    int32_t vectors; // of a row
    int32_t count;

    __device__ __forceinline__ void plan(const decode_product& q, int32_t units) {
        int32_t rank = q.parts[0].rank;
#pragma unroll 1
        for (int32_t i = 0; i < q.count; i++) {
            bool same = q.parts[i].sb && q.parts[i].rank == rank;
            rank = same ? rank : 0;
        }
        vectors = rank % 8 == 0 ? rank / 8 : 0;
        count = units * (q.gated != 0 ? 2 : 1) * 16 * vectors;
    }

    __device__ __forceinline__ uint4 get(const decode_product& q, int32_t units, int32_t i) const {
        int32_t first;
        int32_t row = i / vectors;
        const decode_part& part = q.parts[layer_find(q, units, row / 16, first)];
        const bf16* from = part.sb + (int64_t)(first + row % 16) * part.rank;
        return *(const uint4*)(from + i % vectors * 8);
    }
};

// Where a thread's output is: a part and its row. With gate and up, neighbours have the same row of
// the two.
struct layer_place {
    int32_t part;
    int32_t column;

    __device__ __forceinline__ void find(const decode_product& q, int32_t units, int32_t i) {
        int32_t half = q.gated != 0 ? i & 1 : 0;
        i = q.gated != 0 ? i / 2 : i;
        part = layer_find(q, units, i / 16 + half * units, column);
        column += i % 16;
    }
};

// One output from the sums of the warps that shared its tile. `rows`: the row of sB, or null if it
// is not in shared memory.
__device__ __forceinline__ float layer_output(const decode_part& part, int32_t K,
                                              const float* sums, int32_t slots, const float* zs,
                                              int32_t column, const uint4* rows) {
    float v = sums[0];
#pragma unroll 4
    for (int32_t w = 1; w < slots; w++) {
        v += sums[w * 16];
    }
    if (part.sb) {
        const float* z = zs + part.z_at - K;
        float sum = 0.0f;
        int32_t r = 0;
#pragma unroll 2
        for (; rows && r < part.rank; r += 8) {
            float a[8];
            float b[8];
            unpack(rows[r / 8], a);
            *(float4*)b = *(const float4*)(z + r);
            *(float4*)(b + 4) = *(const float4*)(z + r + 4);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                sum += a[j] * b[j];
            }
        }
        const bf16* b = part.sb + (int64_t)column * part.rank;
#pragma unroll 1
        for (; r < part.rank; r++) {
            sum += to_float(b[r]) * z[r];
        }
        v += sum;
    }
    return part.bias ? v + to_float(part.bias[column]) : v;
}

// Adds the sums of the warps and writes the block's outputs of a stack; with `later`, into h.
// `place` and `old`, a value of h, are those of the thread's first output.
__device__ __forceinline__ void layer_finish(const decode_layers& p, const decode_product& q,
                                             const row_share& share, const float* sums,
                                             const float* zs, bool later, layer_place place,
                                             bf16 old, const uint4* rows, int32_t vectors) {
    int32_t tile = share.slots * 16; // floats
    int32_t gated = q.gated != 0 ? 1 : 0;
    int32_t all = share.units * 16 << gated;
#pragma unroll 1
    for (int32_t i = (int32_t)threadIdx.x; i < all; i += LAYER_THREADS) {
        bool fresh = i == (int32_t)threadIdx.x;
        if (!fresh) {
            place.find(q, share.units, i);
        }
        const decode_part& part = q.parts[place.part];
        // The output among those of the block, gate before up.
        int32_t at = (i >> gated) + (i & gated) * share.units * 16;
        float v = layer_output(part, q.K, sums + at / 16 * tile + at % 16, share.slots, zs,
                               place.column, vectors > 0 ? rows + at * vectors : 0);
        bf16 rounded = to_bf16(v);
        if (later) {
            bf16 h = old;
            h.bits = fresh ? old.bits : __ldcg((const unsigned short*)(p.h + place.column));
            float d = to_float(rounded);
            d = p.scale != 1.0f ? to_float(to_bf16(p.scale * d)) : d;
            p.h[place.column] = to_bf16(to_float(h) + d);
            continue;
        }
        if (gated != 0) {
            bf16 up;
            up.bits = (unsigned short)__shfl_xor_sync(QLORA_FULL_WARP, (uint32_t)rounded.bits, 1);
            float g = to_float(rounded);
            float u = q.gated == 1 ? g : 1.5957691216057308f * (g + 0.044715f * g * g * g);
            float s = 1.0f / (1.0f + exp_of(-u, (const bf16*)0));
            rounded = to_bf16(g * s * to_float(up)); // of the lane that has gate
        }
        if ((i & gated) == 0) {
            ((bf16*)q.y)[part.y_at + place.column] = rounded;
        }
    }
}

// ---- a launch

// Brings the parameters of a layer to shared memory, by the threads from `first` on. They are
// complete after the next barrier of the block.
__device__ __forceinline__ void layer_load(const decode_layers& p, int32_t layer, int32_t first,
                                           layer_shared* s) {
    int32_t own = (int32_t)threadIdx.x - first;
    if (layer >= p.count || own < 0) {
        return;
    }
    const decode_layer* from = p.layers + layer;
    if (own < 12 && own % 3 < from->stacks[own / 3].count) {
        s->offsets[layer % LAYER_SLOTS][own / 3][own % 3] =
            *from->stacks[own / 3].parts[own % 3].offset;
    }
    if (own < (int32_t)sizeof(decode_layer) / 16) {
        ((uint4*)&s->layers[layer % LAYER_SLOTS])[own] = ((const uint4*)from)[own];
    }
}

// Attention, by the first 256 threads: items from the block's number on. `until`: qkv is there.
__device__ __forceinline__ void layer_attend(const decode_layers& p, const decode_attention& q,
                                             uint8_t* area, uint32_t until) {
    attention_shared* s = (attention_shared*)area;
    bf16* tiles = (bf16*)(area + (sizeof(attention_shared) + 15) / 16 * 16);
    attention_place w = attention_find(q, 0, 0, p.pages, 0);
    int32_t items = p.units * (w.last_page - w.first_page + 1);
    bool alive = q.texts[0].alive != 0;
    bool waited = false;
#pragma unroll 1
    for (int32_t item = (int32_t)blockIdx.x; item < items; item += (int32_t)gridDim.x) {
        w = attention_find(q, item % p.units, w.first_page + item / p.units, p.pages, 0);
        bool done = !alive && w.page == w.first_page;
        if (alive) {
            bf16* keys = attention_keys(q, w);
            attention_begin(q, w, keys, tiles, s);
            if (!waited && threadIdx.x == 0) {
                layer_wait(p.counters + LAYER_ALL, until);
            }
            waited = true;
            attention_sync();
            done = attention_run(q, w, keys, tiles, q.counters + w.unit, s);
        }
        attention_sync(); // also: the memory is free
        if (done && threadIdx.x == 0) {
            layer_count(p.counters + LAYER_UNITS);
        }
    }
}

// The products of a warp with the pieces of a stack; the last warp fetches z meanwhile.
__device__ __forceinline__ void layer_multiply(const decode_layers& p, const layer_shared* s,
                                               int32_t layer, int32_t k, const row_share& share,
                                               layer_ahead& ahead, uint8_t* shared, const bf16* x,
                                               float* sums, float* zs, int32_t ranks,
                                               uint32_t z_until, int32_t& stage) {
    int32_t warp = (int32_t)threadIdx.x / 32;
    uint8_t* ring = shared + DECODE_TABLE + DECODE_MAP + warp * LAYER_STAGES * LAYER_STAGE;
    uint32_t ring_at = (uint32_t)__cvta_generic_to_shared(ring);
    const decode_product& q = s->layers[layer % LAYER_SLOTS].stacks[k];
    const float* map = (const float*)(shared + DECODE_TABLE);
    int32_t last = layer + 1 < p.count ? layer + 1 : layer;
    int32_t tile = share.begin / share.pieces;
    int32_t piece = share.begin % share.pieces;
    uint32_t g = threadIdx.x % 32 / 4;
    uint32_t t = threadIdx.x % 4;
    bool real = (g & 1u) == 0 && (g >> 1 & 1u) == t / 2; // see decode_row.cuh
    const uint4* own_x = (const uint4*)(x + (g >> 2) * 128 + t * 32);
    uint4 x_now = make_uint4(0, 0, 0, 0);
    float middle = 0.0f;
    float acc[2] = {0.0f, 0.0f};
    uint32_t table = (uint32_t)__cvta_generic_to_shared(shared) + threadIdx.x % 32 * 4;
    row_half half;
    // It is long because requests and their use belong to one loop.
#pragma unroll 1
    for (int32_t i = 0;; i++) {
        __syncwarp(); // the stage before has been read
        ahead.fill(s, last, ring_at);
        if (i == share.count / 2 && warp == LAYER_WARPS - 1 && ranks > 0) {
            layer_z(p, k, ranks, z_until, zs);
        }
        if (i == share.count) {
            break;
        }
        if (i == 0 || piece == 0) {
            int32_t first;
            middle = s->offsets[layer % LAYER_SLOTS][k][layer_find(q, share.units, tile, first)];
        }
        if (ahead.flying == LAYER_STAGES) {
            asm volatile("cp.async.wait_group %0;" ::"n"(LAYER_STAGES - 1) : "memory");
        } else {
            asm volatile("cp.async.wait_group 0;" ::: "memory");
        }
        __syncwarp();
        const uint8_t* at = ring + stage * LAYER_STAGE;
        const uint4* from = own_x + piece * (ROW_COLUMNS / 8);
        float scale[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            uint32_t code = at[ROW_PIECE + (g + 8 * r) * 4 + t];
            float group = *(const float*)(at + ROW_PIECE + 64 + (g + 8 * r) * 4);
            scale[r] = __fadd_rn(__fmul_rn(map[code], group), middle);
        }
        float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        half.fetch(at, 0);
        layer_half(half, table, from, real && g < 4, x_now, c);
        half.fetch(at, 1);
        layer_half(half, table, from, real && g >= 4, x_now, d);
        acc[0] += scale[0] * (t >= 2 ? d[0] : c[0]);
        acc[1] += scale[1] * (t >= 2 ? d[2] : c[2]);
        ahead.flying--;
        stage = stage == LAYER_STAGES - 1 ? 0 : stage + 1;
        if (++piece == share.pieces || i + 1 == share.count) {
            float* to = sums + (tile * share.slots + warp - tile * share.pieces / share.each) * 16;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                acc[r] += __shfl_xor_sync(QLORA_FULL_WARP, acc[r], 1);
                acc[r] += __shfl_xor_sync(QLORA_FULL_WARP, acc[r], 2);
                if (t == 0) {
                    to[g + 8 * r] = acc[r];
                }
                acc[r] = 0.0f;
            }
            piece = 0;
            tile++;
        }
    }
}

// Dynamic shared memory: table and map; the rings; layer_shared; then, for each stack, x, z rounded
// up to 16 bytes, 16 floats per slot and tile of the block, and the rows of sB of its outputs; or
// what attention needs.
__device__ __forceinline__ void layers_run(const decode_layers& p, uint8_t* shared) {
    layer_shared* s = (layer_shared*)(shared + DECODE_TABLE + DECODE_MAP + LAYER_RINGS);
    uint8_t* area = (uint8_t*)(s + 1);
    int32_t own = (int32_t)threadIdx.x * 8;
    int32_t stage = 0;
    uint32_t ended = 0; // blocks that have to have ended a stack
    uint32_t z_until = 0;
    layer_ahead ahead;
    ahead.layer = 0;
    ahead.stack = -1;
    ahead.left = 0;
    ahead.flying = 0;
    ahead.stage = 0;
    layer_load(p, 0, 0, s);
    layer_load(p, 1, 0, s);
    __syncthreads();
    row_table(s->layers[0].stacks[0], shared);
#pragma unroll 1
    for (int32_t i = 0; i < p.count * 4; i++) {
        int32_t layer = i / 4;
        int32_t k = i % 4;
        const decode_layer& l = s->layers[layer % LAYER_SLOTS];
        const decode_product& q = l.stacks[k];
        row_share share = layer_divide(q);
        int32_t ranks = l.ranks[k][0] + l.ranks[k][1] + l.ranks[k][2];
        bf16* x = (bf16*)area;
        float* zs = (float*)(x + q.K);
        float* sums = zs + (ranks + 3) / 4 * 4;
        // It is long because what does not depend on the other blocks is requested before the wait.
        layer_lift lift;
        uint4 lifted = make_uint4(0, 0, 0, 0);
        int32_t first = (int32_t)gridDim.x - 1 - (int32_t)blockIdx.x;
        if (first < ranks) {
            const bf16* a = layer_row_of(l, k, first);
#pragma unroll
            for (int j = 0; j < LAYER_AHEAD; j++) {
                if (own + j * LAYER_THREADS * 8 < q.K) {
                    const bf16* from = a + own + j * LAYER_THREADS * 8;
                    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
                }
            }
        }
        if (k % 2 == 0 && own % 32 == 0 && own < p.hidden) {
            asm volatile("prefetch.global.L2 [%0];" ::"l"(l.norms[k / 2] + own));
        }
        lift.plan(q, share.units);
        if ((int32_t)threadIdx.x < lift.count) {
            lifted = lift.get(q, share.units, (int32_t)threadIdx.x);
        }
        int32_t room = share.units * (q.gated != 0 ? 2 : 1) * share.slots * 16;
        uint4* rows = (uint4*)(sums + room);
        bf16 old;
        old.bits = 0;
        layer_place place;
        place.find(q, share.units, (int32_t)threadIdx.x);
        if (k % 2 != 0 && (int32_t)threadIdx.x < share.units * 16) {
            old.bits = __ldcg((const unsigned short*)(p.h + place.column));
        }
        for (int32_t j = (int32_t)threadIdx.x; j < room; j += LAYER_THREADS) {
            sums[j] = 0.0f;
        }
        if (i > 0 && threadIdx.x == 0) {
            if (k == 1) {
                layer_wait(p.counters + LAYER_UNITS, (uint32_t)(p.units * (layer + 1)));
            } else {
                layer_wait(p.counters + LAYER_ALL, ended);
            }
        }
        __syncthreads();
        if (k % 2 == 0) {
            layer_norm(p, l.norms[k / 2], x, s->sums);
        } else {
            for (int32_t c = own; c < q.K; c += LAYER_THREADS * 8) {
                *(uint4*)(x + c) = __ldcg((const uint4*)(q.x + c));
            }
        }
#pragma unroll 1
        for (int32_t j = (int32_t)threadIdx.x; j < lift.count; j += LAYER_THREADS) {
            rows[j] = j < LAYER_THREADS ? lifted : lift.get(q, share.units, j);
        }
        __syncthreads();
        layer_low(p, l, k, ranks, x, s->sums);
        z_until += (uint32_t)ranks;
        layer_multiply(p, s, layer, k, share, ahead, shared, x, sums, zs, ranks, z_until, stage);
        __syncthreads();
        layer_finish(p, q, share, sums, zs, k % 2 != 0, place, old, rows, lift.vectors);
        __syncthreads();
        ended += gridDim.x;
        if (threadIdx.x == 0) {
            layer_count(p.counters + LAYER_ALL);
        }
        if (k == 0) {
            if (threadIdx.x < 256) {
                layer_attend(p, l.attention, area, ended);
            } else {
                layer_load(p, layer + 2, 256, s);
            }
            __syncthreads();
        }
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
}

#endif
