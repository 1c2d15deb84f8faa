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
// Blocks leave each other words: a value, and the number of the layer that made it, in one store.
// Whoever needs a value reads its word until the number is right, so that no counter, fence or
// second load stands between a result and its use. Words are zero at the start; layers count from
// 1. A word is overwritten only by the next layer, or in `shares` by the next stack, which depends
// on all that was made of it: a block reads x of a stack only if it has tiles or parts of z of it,
// and attention reads all of qkv. Words are loaded with ld.relaxed, never through a cache that
// others do not write to.
//
// Every block makes x for itself. z = x A^T is made in parts, sums over LAYER_PARTS ranges of the
// columns, each by one warp; they are spread over the blocks, the last warps first, since these
// have the fewest pieces, and awaited only where the adapter is added. Attention is that of
// decode_attention.cuh, an item (key head, page) per block, by its first 256 threads; it uses the
// memory of x. The others bring keys and values, join the pages of all items, a few columns in
// every block, and load the parameters of the layer after the next one: those of three layers are
// in shared memory, since pieces of the next one are requested early.
//
// Between two products, every block does the same work while the memory idles, and its instructions
// miss the nearest cache, since each runs only once per stack. It has to be short: what is the same
// for all layers is worked out once (layer_plan), and what comes from memory is in L2 by then. A
// register that is spilled there costs as much as a trip to memory if it has just been loaded.
//
// Launch: cooperative, LAYER_THREADS threads, grid any number of blocks that are resident together;
// with bit k of `split`, stack k is not gate and up and has at least as many tiles as there are
// blocks, at most 256. The block that has the beginning of a shared tile writes its outputs.
// Every K is a multiple of 256 and N of 16; weights are NF4 in blocks of 64 with quantised scales
// in groups of at least 4; hidden is at most 8192; the stacks of all layers have the same shapes.
// Determinism: one writer per output, fixed order of every sum, which depends on the shapes and the
// grid.
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
    LAYER_PARTS = 8, // of a value of z
    LAYER_COPIES = 4, // vectors of x that a thread loads at a time
    LAYER_JOINERS = LAYER_WARPS - 8 // warps that do not attend
};

// Same layout as qlora__decode_layer.
struct decode_layer {
    decode_product stacks[4]; // qkv, o, gate and up, down; x and y are not used
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
    uint32_t* rows[5]; // words: x of the four stacks, and qkv
    uint64_t* z;        // sums: [4, LAYER_PARTS, ldz]
    uint64_t* partials; // sums: [heads, pages, dim + 2]
    uint64_t* shares;   // sums of a tile, of those for the block before: [blocks, 16]
    int32_t count;
    int32_t hidden;
    int32_t ldz;
    int32_t units; // of attention
    int32_t pages;
    float eps;
    float scale;
    int32_t split; // bit k: the blocks divide pieces of stack k, not tiles
};

// How the tiles of a stack are divided; the same for all layers.
struct layer_plan {
    int32_t pieces;  // of a tile
    int32_t units;   // tiles of the block, or with gate and up, of one of the two
    int32_t each;    // pieces of a warp
    int32_t slots;   // warps that may share a tile
    int32_t ends[2]; // first tiles of the second and the third part
    int32_t gated;
    int32_t all;   // pieces of the block
    int32_t base;  // its first tile
    int32_t step;  // from one of its tiles to the next
    int32_t begin; // pieces of its first tile that the block before has
    int32_t end;   // whether the block after has pieces of its last tile
};

struct layer_shared {
    decode_layer layers[LAYER_SLOTS];
    float offsets[LAYER_SLOTS][4][3];
    float sums[LAYER_WARPS];
    layer_plan plans[4];
    uint32_t starts[4][LAYER_WARPS]; // the first piece of a warp: see layer_start
    attention_place place;           // of the block's first item of attention, with window `window`
    int32_t window;
    int32_t items;
    int32_t row;
    int32_t position;
    int32_t alive;
    int32_t unused[3];
};

static_assert(sizeof(layer_shared) == 6512, "QLORA__LAYERS_SHARED in src/model/step_layers.h");

// ---- blocks that wait for each other

// A word is a value of 16 bits, and above it the number of the layer that made it, from 1 on.
__device__ __forceinline__ uint32_t layer_mark(int32_t layer) {
    return (uint32_t)(layer + 1) << 16;
}

// 4 words, which need not be there yet.
__device__ __forceinline__ uint4 layer_peek(const uint32_t* at) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}

// More than 65535 if one of 4 words is not there.
__device__ __forceinline__ uint32_t layer_lack(uint4 v, uint32_t mark) {
    return (v.x ^ mark) | (v.y ^ mark) | (v.z ^ mark) | (v.w ^ mark);
}

// The values of 4 words that are there.
__device__ __forceinline__ uint2 layer_values(uint4 v) {
    return make_uint2(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.z, v.w, 0x5410));
}

// 4 values, when they are there.
__device__ __forceinline__ uint2 layer_four(const uint32_t* at, uint32_t mark) {
    uint4 v;
    do {
        v = layer_peek(at);
    } while (layer_lack(v, mark) > 65535u);
    return layer_values(v);
}

// 8 values, when they are there.
__device__ __forceinline__ uint4 layer_eight(const uint32_t* at, uint32_t mark) {
    uint4 low;
    uint4 high;
    do {
        low = layer_peek(at);
        high = layer_peek(at + 4);
    } while ((layer_lack(low, mark) | layer_lack(high, mark)) > 65535u);
    uint2 a = layer_values(low);
    uint2 b = layer_values(high);
    return make_uint4(a.x, a.y, b.x, b.y);
}

__device__ __forceinline__ uint32_t layer_one(const uint32_t* at) {
    uint32_t v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}

__device__ __forceinline__ void layer_put(uint32_t* to, uint32_t bits, uint32_t mark) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(bits | mark) : "memory");
}

// A sum has 32 bits, and above it a number that says when it was made.
__device__ __forceinline__ void layer_leave(uint64_t* to, float v, uint32_t mark) {
    uint64_t both = (uint64_t)mark << 32 | __float_as_uint(v);
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(both) : "memory");
}

__device__ __forceinline__ uint64_t layer_look(const uint64_t* at) {
    uint64_t v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
    return v;
}

// Two sums.
struct layer_two {
    uint64_t a;
    uint64_t b;

    __device__ __forceinline__ void look(const uint64_t* at) {
        asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                     : "=l"(a), "=l"(b)
                     : "l"(at)
                     : "memory");
    }

    __device__ __forceinline__ bool made(uint32_t mark) const {
        return (uint32_t)(a >> 32) == mark && (uint32_t)(b >> 32) == mark;
    }

    __device__ __forceinline__ float2 values() const {
        return make_float2(__uint_as_float((uint32_t)a), __uint_as_float((uint32_t)b));
    }

    static __device__ __forceinline__ void leave(uint64_t* to, float a, float b, uint32_t mark) {
        uint64_t x = (uint64_t)mark << 32 | __float_as_uint(a);
        uint64_t y = (uint64_t)mark << 32 | __float_as_uint(b);
        asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(x), "l"(y)
                     : "memory");
    }
};

// ---- products

// Loads from addresses in shared memory. They are not moved across barriers and copies.
__device__ __forceinline__ uint4 layer_vector(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at));
    return v;
}

__device__ __forceinline__ float layer_float(uint32_t at) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at));
    return v;
}

__device__ __forceinline__ uint32_t layer_byte(uint32_t at) {
    uint32_t v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}

// A value that stays in a register: the compiler would rather compute it again in every turn.
__device__ __forceinline__ uint32_t layer_keep(uint32_t v) {
    uint32_t kept;
    asm volatile("mov.u32 %0, %1;" : "=r"(kept) : "r"(v));
    return kept;
}

// The two levels of byte i of a word of codes; `own` is the address of the lane's copy of the
// table. Written so that two pipes share the work: a permutation, and a multiplication with an
// addition.
__device__ __forceinline__ uint32_t layer_pair(uint32_t own, uint32_t word, int i) {
    uint32_t at = own + (__byte_perm(word, 0, 0x4440u | (uint32_t)i) << 7);
    uint32_t pair;
    asm("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(at));
    return pair;
}

__device__ __forceinline__ uint32_t layer_word(uint4 v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// The products of a piece: see row_half in decode_row.cuh. Its halves have sums of their own, so
// that neither waits for the other.
__device__ __forceinline__ void layer_products(const row_half* half, uint32_t own, uint32_t from,
                                               bool real, uint4& x, float* c, float* d) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (real) {
            x = layer_vector(from + 16u * (uint32_t)i);
        }
#pragma unroll
        for (int k = 0; k < 2; k++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                uint32_t u = layer_word(half[h].codes[0], i);
                uint32_t v = layer_word(half[h].codes[1], i);
                decode_multiply(h == 0 ? c : d, layer_pair(own, u, 2 * k),
                                layer_pair(own, v, 2 * k), layer_pair(own, u, 2 * k + 1),
                                layer_pair(own, v, 2 * k + 1), k == 0 ? x.x : x.z,
                                k == 0 ? x.y : x.w);
            }
        }
    }
}

// ---- the pieces of a warp

// As row_divide, but there may be no pieces, and blocks may share tiles: then, each has a range of
// pieces, at least as many as a tile has.
__device__ __forceinline__ void layer_divide(const decode_product& p, bool split, layer_plan& to) {
    int32_t blocks = (int32_t)gridDim.x;
    int32_t own = (int32_t)blockIdx.x;
    int32_t first = row_tiles(p, 0);
    int32_t second = p.gated != 0 ? 0 : row_tiles(p, 1);
    int32_t units = first + second + (p.gated != 0 ? 0 : row_tiles(p, 2));
    to.pieces = p.K / ROW_COLUMNS;
    to.units = (units - own + blocks - 1) / blocks;
    to.gated = p.gated != 0 ? 1 : 0;
    to.all = to.pieces * to.units << to.gated;
    to.base = own;
    to.step = blocks;
    to.begin = 0;
    to.end = 0;
    if (split) {
        int64_t all = (int64_t)units * to.pieces;
        int32_t from = (int32_t)(all * own / blocks);
        int32_t until = (int32_t)(all * (own + 1) / blocks);
        to.base = from / to.pieces;
        to.step = 1;
        to.begin = from % to.pieces;
        to.end = until % to.pieces != 0 ? 1 : 0;
        to.units = (until + to.pieces - 1) / to.pieces - to.base;
        to.all = until - from;
    }
    to.each = (to.all + LAYER_WARPS - 1) / LAYER_WARPS;
    to.each = to.each > 0 ? to.each : 1;
    to.slots = (to.pieces - 1 + to.each - 1) / to.each + 1;
    to.ends[0] = first;
    to.ends[1] = first + second;
}

// The first piece of a warp: its tile, its number in the tile, and which of the warps that share
// the tile the warp is.
struct layer_start {
    int32_t tile;
    int32_t piece;
    int32_t slot;

    static __device__ __forceinline__ uint32_t pack(const layer_plan& plan, int32_t warp) {
        int32_t at = plan.begin + warp * plan.each;
        int32_t tile = at / plan.pieces;
        int32_t before = tile > 0 ? tile * plan.pieces - plan.begin : 0; // pieces of the block
        int32_t slot = warp - before / plan.each;
        return (uint32_t)tile | (uint32_t)(at % plan.pieces) << 18 | (uint32_t)slot << 27;
    }

    __device__ __forceinline__ void unpack(uint32_t packed) {
        tile = (int32_t)(packed & 0x3ffffu);
        piece = (int32_t)(packed >> 18 & 0x1ffu);
        slot = (int32_t)(packed >> 27);
    }
};

// Pieces of the warp.
__device__ __forceinline__ int32_t layer_pieces(const layer_plan& plan) {
    int32_t left = plan.all - (int32_t)threadIdx.x / 32 * plan.each;
    left = left < plan.each ? left : plan.each;
    return left > 0 ? left : 0;
}

// Which part has a tile of the block; `first` is the row of the part that is row 0 of the tile.
__device__ __forceinline__ int32_t layer_find(const layer_plan& plan, int32_t tile,
                                              int32_t& first) {
    int32_t half = plan.gated & (tile >= plan.units ? 1 : 0); // of gate and up
    int32_t at = plan.base + (tile - half * plan.units) * plan.step;
    int32_t which = half;
    if (plan.gated == 0 && at >= plan.ends[0]) {
        which = at >= plan.ends[1] ? 2 : 1;
        at -= plan.ends[which - 1];
    }
    first = at * 16;
    return which;
}

// A lane's addresses in the first stage of its warp's ring.
struct layer_ring {
    uint32_t to;        // where its copies go: row lane / 8
    uint32_t scales_to;
    uint32_t codes;     // of row g, first half
    uint32_t scales;    // of row g: the code of block t; then those of groups

    __device__ __forceinline__ void find(const uint8_t* shared) {
        uint32_t lane = threadIdx.x % 32;
        uint32_t g = lane / 4;
        uint32_t t = lane % 4;
        uint32_t ring = (uint32_t)__cvta_generic_to_shared(shared) + DECODE_TABLE + DECODE_MAP +
                        threadIdx.x / 32 * (LAYER_STAGES * LAYER_STAGE);
        to = layer_keep(ring + lane / 8 * 128 + (lane % 8 ^ (lane / 8 & 1) << 2) * 16);
        scales_to = layer_keep(ring + ROW_PIECE + lane * 4);
        codes = layer_keep(ring + g * 128 + (t ^ (g & 1u) << 2) * 16);
        scales = layer_keep(ring + ROW_PIECE + g * 4 + t);
    }
};

// The next piece that a warp requests.
struct layer_ahead {
    int32_t layer;
    int32_t stack;
    int32_t tile;
    int32_t piece;
    int32_t left;   // of the stack
    int32_t flying; // requested and not read
    uint32_t stage; // where it goes: the offset in the ring
    int32_t block;  // of 64: the first of the piece in lane % 16's row of the tile
    int32_t shift; // a scale's block from that
    int32_t wide;  // log2 of its bytes
    const uint8_t* codes;
    const uint8_t* scales; // lanes 0 to 15: codes of scales; others: scales of groups

    __device__ __forceinline__ void enter(const layer_shared* s) {
        const decode_product& p = s->layers[layer % LAYER_SLOTS].stacks[stack];
        int32_t lane = (int32_t)threadIdx.x % 32;
        int32_t first;
        const decode_part& part = p.parts[layer_find(s->plans[stack], tile, first)];
        int32_t row = part.first + first;
        codes = (const uint8_t*)part.w + (int64_t)(row + lane / 8) * (p.K / 2) + lane % 8 * 16 +
                piece * (ROW_COLUMNS / 2);
        scales = lane < 16 ? part.q : (const uint8_t*)part.scales;
        block = (row + lane % 16) * (p.K / 64) + piece * (ROW_COLUMNS / 64);
        shift = lane < 16 ? 0 : part.group_shift;
        wide = lane < 16 ? 0 : 2;
    }

    // Goes to the next stack that has pieces for the warp, as far as layer `last`.
    __device__ __forceinline__ void advance(const layer_shared* s, int32_t last) {
#pragma unroll 1
        while (left == 0 && (stack < 3 || layer < last)) {
            layer += stack == 3 ? 1 : 0;
            stack = stack == 3 ? 0 : stack + 1;
            layer_start start;
            start.unpack(s->starts[stack][threadIdx.x / 32]);
            tile = start.tile;
            piece = start.piece;
            left = layer_pieces(s->plans[stack]);
            if (left > 0) {
                enter(s);
            }
        }
    }

    // Requests pieces until the ring is full. Odd rows are turned by half a line, so that two rows
    // can be read at once.
    __device__ __forceinline__ void fill(const layer_shared* s, int32_t last,
                                         const layer_ring& ring) {
#pragma unroll 1
        while (flying < LAYER_STAGES) {
            if (left == 0) {
                advance(s, last);
                if (left == 0) {
                    return;
                }
            }
            uint32_t to = ring.to + stage;
            int32_t pieces = s->plans[stack].pieces;
            int64_t four = pieces * (ROW_COLUMNS * 2); // rows
            const uint8_t* from = codes;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + 512u * i),
                             "l"(from)
                             : "memory");
                from += four;
            }
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(ring.scales_to + stage),
                         "l"(scales + (block >> shift << wide))
                         : "memory");
            asm volatile("cp.async.commit_group;" ::: "memory");
            flying++;
            stage = stage == (LAYER_STAGES - 1) * LAYER_STAGE ? 0 : stage + LAYER_STAGE;
            left--;
            codes += ROW_COLUMNS / 2;
            block += ROW_COLUMNS / 64;
            if (++piece == pieces) {
                piece = 0;
                tile++;
                if (left > 0) {
                    enter(s);
                }
            }
        }
    }
};

// ---- x and z

// A thread's part of the weights of a norm.
struct layer_gain {
    float4 low;
    float4 high;

    __device__ __forceinline__ void load(const float* w) {
        low = *(const float4*)w;
        high = *(const float4*)(w + 4);
    }
};

// x = norm(h). With mark 0, h is not words.
__device__ __forceinline__ void layer_norm(const decode_layers& p, const float* w,
                                           const uint32_t* words, uint32_t mark, bf16* x,
                                           float* sums) {
    layer_gain gain;
    gain.load(w + ((int32_t)threadIdx.x * 8 < p.hidden ? threadIdx.x * 8 : 0));
    uint4 raw[2];
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int32_t c = ((int32_t)threadIdx.x + i * LAYER_THREADS) * 8;
        raw[i] = make_uint4(0, 0, 0, 0);
        if (c < p.hidden) {
            raw[i] = mark != 0 ? layer_eight(words + c, mark) : *(const uint4*)(p.h + c);
        }
        float v[8];
        unpack(raw[i], v);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            squares += v[k] * v[k];
        }
    }
    squares = warp_sum(squares);
    if (threadIdx.x % 32 == 0) {
        sums[threadIdx.x / 32] = squares;
    }
    __syncthreads();
    squares = 0.0f;
#pragma unroll
    for (int i = 0; i < LAYER_WARPS; i++) {
        squares += sums[i];
    }
    float rstd = 1.0f / sqrtf(squares / (float)p.hidden + p.eps);
#pragma unroll 1
    for (int i = 0; i < 2; i++) {
        int32_t c = ((int32_t)threadIdx.x + i * LAYER_THREADS) * 8;
        if (c < p.hidden) {
            float v[8];
            if (i > 0) {
                gain.load(w + c);
            }
            unpack(i == 0 ? raw[0] : raw[1], v);
            float4 low = gain.low;
            float4 high = gain.high;
            *(uint4*)(x + c) = make_uint4(pack_bf16(v[0] * rstd * low.x, v[1] * rstd * low.y),
                                          pack_bf16(v[2] * rstd * low.z, v[3] * rstd * low.w),
                                          pack_bf16(v[4] * rstd * high.x, v[5] * rstd * high.y),
                                          pack_bf16(v[6] * rstd * high.z, v[7] * rstd * high.w));
        }
    }
}

// x from where another stack or attention leaves it. While the first words of a thread are not
// there, it does not ask for the others.
__device__ __forceinline__ void layer_copy(const uint32_t* words, uint32_t mark, int32_t K,
                                           bf16* x) {
    int32_t c = (int32_t)threadIdx.x * 4;
    const uint32_t* from = words + c;
    bf16* to = x + c;
    if (c < K) {
        *(uint2*)to = layer_four(from, mark);
    }
    int32_t left = (K - c - 1) / (LAYER_THREADS * 4); // vectors
#pragma unroll 1
    while (left > 0) {
        uint4 v[LAYER_COPIES];
        uint32_t lack;
        from += LAYER_THREADS * 4;
        to += LAYER_THREADS * 4;
        do {
            lack = 0;
#pragma unroll
            for (int i = 0; i < LAYER_COPIES; i++) {
                v[i] = layer_peek(i < left ? from + i * LAYER_THREADS * 4 : from);
            }
#pragma unroll
            for (int i = 0; i < LAYER_COPIES; i++) {
                lack |= layer_lack(v[i], mark);
            }
        } while (lack > 65535u);
#pragma unroll
        for (int i = 0; i < LAYER_COPIES; i++) {
            if (i < left) {
                *(uint2*)(to + i * LAYER_THREADS * 4) = layer_values(v[i]);
            }
        }
        left -= LAYER_COPIES;
        from += LAYER_THREADS * 4 * (LAYER_COPIES - 1);
        to += LAYER_THREADS * 4 * (LAYER_COPIES - 1);
    }
}

// A part of a value of z, which a warp makes: the columns of a part are divided among the lanes, 8
// at a time. They are brought as far as L2 before x is there.
struct layer_low {
    const bf16* row; // the lane's first columns of A
    int32_t job;     // LAYER_PARTS r + part

    // Row r of the A of a stack, of all parts one after another.
    static __device__ __forceinline__ const bf16* row_of(const decode_layer& l, int32_t k,
                                                         int32_t r) {
        const int32_t* ranks = l.ranks[k];
        int32_t i = 0;
#pragma unroll 1
        while (i < 2 && r >= ranks[i]) {
            r -= ranks[i++];
        }
        return l.a[k][i] + (int64_t)r * l.stacks[k].K;
    }

    __device__ __forceinline__ void find(const decode_layer& l, int32_t k, int32_t jobs,
                                         int32_t next) {
        int32_t columns = l.stacks[k].K / LAYER_PARTS;
        int32_t c = (int32_t)threadIdx.x % 32 * 8;
        job = next;
        if (job < jobs) {
            row = row_of(l, k, job / LAYER_PARTS) + job % LAYER_PARTS * columns;
#pragma unroll 1
            for (; c < columns; c += 256) {
                asm volatile("prefetch.global.L2 [%0];" ::"l"(row + c));
            }
        }
    }

    static __device__ __forceinline__ float dot(uint4 a, const bf16* x) {
        float v[8];
        float b[8];
        float sum = 0.0f;
        unpack(a, b);
        unpack(*(const uint4*)x, v);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            sum += v[j] * b[j];
        }
        return sum;
    }

    __device__ __forceinline__ void make(const decode_layers& p, const decode_layer& l, int32_t k,
                                         int32_t jobs, const bf16* x, uint32_t mark) {
        int32_t columns = l.stacks[k].K / LAYER_PARTS;
        int32_t lane = (int32_t)threadIdx.x % 32;
#pragma unroll 1
        while (job < jobs) {
            const bf16* own = x + job % LAYER_PARTS * columns;
            float sum = 0.0f;
#pragma unroll 4
            for (int32_t c = lane * 8; c < columns; c += 256) {
                sum += dot(*(const uint4*)(row + c), own + c);
            }
            sum = warp_sum(sum);
            if (lane == 0) {
                int32_t part = k * LAYER_PARTS + job % LAYER_PARTS;
                layer_leave(p.z + part * p.ldz + job / LAYER_PARTS, sum, mark);
            }
            find(l, k, jobs, job + (int32_t)gridDim.x * LAYER_WARPS);
        }
    }
};

// z, when its parts are there: 16 values by each of the last warps. Two lanes add the parts of a
// value, one after the other.
__device__ __forceinline__ void layer_z(const decode_layers& p, int32_t k, int32_t ranks,
                                        uint32_t mark, float* zs) {
    enum { HALF = LAYER_PARTS / 2 };
    int32_t own = LAYER_THREADS - 1 - (int32_t)threadIdx.x;
#pragma unroll 1
    for (int32_t first = own / 32 * 16; first < ranks; first += LAYER_THREADS / 2) {
        int32_t i = first + own % 16;
        i = i < ranks ? i : ranks - 1;
        const uint64_t* from = p.z + (k * LAYER_PARTS + own % 32 / 16 * HALF) * p.ldz + i;
        uint64_t v[HALF];
        bool there;
        do {
            there = true;
#pragma unroll
            for (int j = 0; j < HALF; j++) {
                v[j] = layer_look(from + j * p.ldz);
            }
#pragma unroll
            for (int j = 0; j < HALF; j++) {
                there = there && (uint32_t)(v[j] >> 32) == mark;
            }
        } while (__any_sync(QLORA_FULL_WARP, !there));
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < HALF; j++) {
            sum += __uint_as_float((uint32_t)v[j]);
        }
        float before = __shfl_xor_sync(QLORA_FULL_WARP, sum, 16);
#pragma unroll
        for (int j = 0; j < HALF; j++) {
            before += __uint_as_float((uint32_t)v[j]);
        }
        if (own % 32 >= 16) {
            zs[i] = to_float(to_bf16(before));
        }
    }
}

// ---- the results

// The words of h that a stack adds to; null if it does not, or if h is not words yet.
__device__ __forceinline__ const uint32_t* layer_old(const decode_layers& p, int32_t layer,
                                                     int32_t k) {
    return k == 3 ? p.rows[2] : k == 1 && layer > 0 ? p.rows[0] : 0;
}

// One of the block's outputs of a stack, and what a thread loads of it before the wait.
struct layer_place {
    int32_t part;
    int32_t column;
    int32_t vectors; // of the row of sB, in shared memory; 0: it is read where it is
    float bias;
    uint32_t old; // word of h

    // With gate and up, neighbours have the same row of the two.
    __device__ __forceinline__ void find(const layer_plan& plan, int32_t i) {
        int32_t half = plan.gated & i;
        i >>= plan.gated;
        part = layer_find(plan, i / 16 + half * plan.units, column);
        column += i % 16;
        vectors = 0;
        bias = 0.0f;
        old = 0;
    }

    // `h`: where the words of h are, null if they are not added to.
    __device__ __forceinline__ void load(const decode_product& q, const uint32_t* h) {
        const decode_part& own = q.parts[part];
        old = h ? layer_one(h + column) : old;
        bias = own.bias ? to_float(own.bias[column]) : 0.0f;
        // The room in shared memory is for the rank of the first part; z is read four at a time.
        if (own.sb && own.rank % 8 == 0 && own.rank / 8 <= q.parts[0].rank / 8 &&
            own.z_at % 4 == 0) {
            vectors = own.rank / 8;
        }
    }

    // Requests the row of sB, for the thread itself: the next group of copies.
    __device__ __forceinline__ void request(const decode_product& q, uint4* rows) const {
        const uint4* from = (const uint4*)(q.parts[part].sb + (int64_t)column * vectors * 8);
        uint32_t to = (uint32_t)__cvta_generic_to_shared(rows);
#pragma unroll 1
        for (int32_t i = 0; i < vectors; i++) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + 16u * i),
                         "l"(from + i)
                         : "memory");
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
};

// Waits for the row of sB; the pieces that were requested after it, `later` of them, may be in
// flight.
__device__ __forceinline__ void layer_await(int32_t later) {
    if (later >= 2) {
        asm volatile("cp.async.wait_group 2;" ::: "memory");
    } else if (later == 1) {
        asm volatile("cp.async.wait_group 1;" ::: "memory");
    } else {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
    }
}

// By a warp: brings the rows of sB and the weights of the norm of a stack as far as L2, of these a
// part by every block.
__device__ __forceinline__ void layer_warm(const decode_layers& p, const layer_shared* s,
                                           int32_t stack) {
    const decode_layer& l = s->layers[stack / 4 % LAYER_SLOTS];
    int32_t k = stack % 4;
    const layer_plan& plan = s->plans[k];
    int32_t lane = (int32_t)threadIdx.x % 32;
    if (stack >= p.count * 4) {
        return;
    }
#pragma unroll 1
    for (int32_t i = lane; i < (plan.units << plan.gated) * 4; i += 32) {
        int32_t first;
        const decode_part& part = l.stacks[k].parts[layer_find(plan, i / 4, first)];
        const bf16* from = part.sb + (int64_t)first * part.rank;
#pragma unroll 1
        for (int32_t line = i % 4; part.sb && line * 4 < part.rank; line += 4) { // 64 values
            asm volatile("prefetch.global.L2 [%0];" ::"l"(from + line * 64));
        }
    }
    int32_t c = ((int32_t)blockIdx.x + lane * (int32_t)gridDim.x) * 32;
    if (k % 2 == 0 && c < p.hidden) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(l.norms[k / 2] + c));
    }
}

// The sum of an output's columns, from those of the warps that shared its tile.
__device__ __forceinline__ float layer_sum(const float* sums, int32_t slots) {
    float v = sums[0];
#pragma unroll 4
    for (int32_t w = 1; w < slots; w++) {
        v += sums[w * 16];
    }
    return v;
}

// One output. `v`: the sum of its columns. `rows`: the row of sB.
__device__ __forceinline__ float layer_output(const decode_part& part, int32_t K, float v,
                                              const float* zs, const layer_place& place,
                                              const uint4* rows) {
    if (part.sb) {
        const float* z = zs + part.z_at - K;
        float sum = 0.0f;
        int32_t r = 0;
#pragma unroll 1
        for (; r < place.vectors * 8; r += 8) {
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
        const bf16* b = part.sb + (int64_t)place.column * part.rank;
#pragma unroll 1
        for (; r < part.rank; r++) {
            sum += to_float(b[r]) * z[r];
        }
        v += sum;
    }
    return v + place.bias;
}

// Leaves the sums of the first tile for the block before, if that has the tile, too.
__device__ __forceinline__ void layer_share(const decode_layers& p, const layer_plan& plan,
                                            const float* sums, uint32_t mark) {
    if (plan.begin > 0 && threadIdx.x < 16) {
        layer_leave(p.shares + blockIdx.x * 16 + threadIdx.x,
                    layer_sum(sums + threadIdx.x, plan.slots), mark);
    }
}

// The sum that the block after has left for an output of the last tile.
__device__ __forceinline__ float layer_rest(const decode_layers& p, int32_t i, uint32_t mark) {
    uint64_t v;
    do {
        v = layer_look(p.shares + (blockIdx.x + 1) * 16 + i % 16);
    } while ((v ^ (uint64_t)mark << 32) > 0xffffffffu);
    return __uint_as_float((uint32_t)v);
}

// Adds the sums of the warps and writes the block's outputs of stack k. `place` is that of the
// thread's first output, `rows` the rows of sB, `stride` vectors apart.
__device__ __forceinline__ void layer_finish(const decode_layers& p, const decode_product& q,
                                             const layer_plan& plan, const float* sums,
                                             const float* zs, int32_t layer, int32_t k,
                                             layer_place place, const uint4* rows,
                                             int32_t stride) {
    const uint32_t* h = layer_old(p, layer, k);
    int32_t gated = plan.gated;
    int32_t all = plan.units * 16 << gated;
    uint32_t* to = p.rows[k == 0 ? 4 : k == 3 ? 0 : k + 1];
#pragma unroll 1
    for (int32_t i = (int32_t)threadIdx.x; i < all; i += LAYER_THREADS) {
        if (i >= LAYER_THREADS) {
            place.find(plan, i);
            bool has = q.parts[place.part].bias != 0;
            place.bias = has ? to_float(q.parts[place.part].bias[place.column]) : 0.0f;
            place.old = h ? layer_one(h + place.column) : 0;
        }
        const decode_part& part = q.parts[place.part];
        // The output among those of the block, gate before up.
        int32_t at = (i >> gated) + (i & gated) * plan.units * 16;
        float v = layer_sum(sums + at / 16 * plan.slots * 16 + at % 16, plan.slots);
        if (plan.begin > 0 && i < 16) {
            continue; // it is the block before that has the tile
        }
        if (plan.end != 0 && i >= (plan.units - 1) * 16) {
            v += layer_rest(p, i, (uint32_t)(layer * 4 + k + 1));
        }
        v = layer_output(part, q.K, v, zs, place, rows + i * stride);
        bf16 rounded = to_bf16(v);
        if (k % 2 != 0) {
            float d = to_float(rounded);
            d = p.scale != 1.0f ? to_float(to_bf16(p.scale * d)) : d;
            if (h) {
                uint32_t since = layer_mark(k == 3 ? layer : layer - 1);
                while ((place.old ^ since) > 65535u) {
                    place.old = layer_one(h + place.column);
                }
            } else {
                place.old = p.h[place.column].bits;
            }
            bf16 old;
            old.bits = (unsigned short)place.old;
            rounded = to_bf16(to_float(old) + d);
            if (k == 3 && layer + 1 == p.count) {
                p.h[place.column] = rounded;
            }
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
            layer_put(to + part.y_at + place.column, rounded.bits, layer_mark(layer));
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

// Finds an item of attention and the first row of its page; returns the number of items.
__device__ __forceinline__ int32_t layer_item(const decode_layers& p, const decode_attention& q,
                                              const layer_shared* s, int32_t item,
                                              attention_place& w, int32_t& row) {
    int32_t first = attention_begins(q, s->position) / q.chunk;
    w = attention_find(q, item % p.units, first + item / p.units, p.pages, 0, s->position, true);
    row = attention_row(q, w);
    return p.units * (w.last_page - first + 1);
}

// The rows of q of an item's heads, of k and of v, when they are there, and what they meet: turns,
// and the weights of their norms, where the scores will be.
__device__ __forceinline__ void layer_raw(const decode_attention& q, const attention_place& w,
                                          const uint32_t* words, uint32_t mark,
                                          attention_shared* s) {
    int32_t own = (int32_t)threadIdx.x;
    int32_t pieces = q.dim / 4;
    bool weighed = q.q_norm && q.norm_heads != 0 && own < q.dim;
    float gains[2] = {0.0f, 0.0f};
    attention_turns turns;
    turns.load(q, w);
    if (weighed) {
        gains[0] = q.k_norm[own];
        gains[1] = q.q_norm[own];
    }
    attention_clear(s);
#pragma unroll 1
    for (int32_t i = own; i < (w.heads + 2) * pieces; i += 256) {
        int32_t head = i / pieces;
        head = head < w.heads ? w.first_head + head
                              : q.heads + (head - w.heads) * q.kv_heads + w.kv;
        ((uint2*)s->raw)[i] = layer_four(words + head * q.dim + i % pieces * 4, mark);
    }
    turns.store(q, s);
    if (weighed) {
        s->scores[0][own] = gains[0]; // the rows are read as one
        s->scores[0][ATTENTION_DIM + own] = gains[1];
    }
    attention_sync();
}

// What attention_page left: to o if this is the only page, otherwise to the partial results.
__device__ __forceinline__ void layer_store(const decode_layers& p, const decode_attention& q,
                                            const attention_place& w, const attention_shared* s,
                                            const float (*acc)[2][4], uint32_t mark) {
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t h = lane / 4;
    if (h >= w.heads) {
        return;
    }
    int32_t head = w.first_head + h;
    uint64_t* to = p.partials + (int64_t)(head * w.pages + w.page) * (q.dim + 2);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        int32_t c = (int32_t)threadIdx.x / 32 * 16 + j / 2 * 128 + j % 2 * 8 + lane % 4 * 2;
        const float* v = acc[j / 2][j % 2];
        if (c >= q.dim) {
            continue;
        }
        if (w.first_page == w.last_page) {
            uint32_t pair = pack_bf16(v[0] / s->total[h], v[1] / s->total[h]);
            layer_put(p.rows[1] + head * q.dim + c, pair & 65535u, mark);
            layer_put(p.rows[1] + head * q.dim + c + 1, pair >> 16, mark);
            continue;
        }
        layer_two::leave(to + 2 + c, v[0], v[1], mark);
        if (c == 0) {
            layer_two::leave(to, s->top[h], s->total[h], mark);
        }
    }
}

// The items of attention of a block, from its number on.
struct layer_items {
    attention_place w;
    int32_t item;
    int32_t row;

    __device__ __forceinline__ bool first(const decode_layers& p, const decode_attention& q,
                                          const layer_shared* s) {
        item = (int32_t)blockIdx.x;
        w = s->place;
        row = s->row;
        int32_t items = s->items;
        if (q.window != s->window) {
            items = layer_item(p, q, s, item, w, row);
        }
        return item < items;
    }

    __device__ __forceinline__ bool next(const decode_layers& p, const decode_attention& q,
                                         const layer_shared* s) {
        item += (int32_t)gridDim.x;
        return item < layer_item(p, q, s, item, w, row);
    }
};

__device__ __forceinline__ bf16* layer_tiles(uint8_t* area) {
    return (bf16*)(area + (sizeof(attention_shared) + 15) / 16 * 16);
}

// Attention, by the first 256 threads.
__device__ __forceinline__ void layer_attend(const decode_layers& p, const decode_attention& q,
                                             const layer_shared* all, uint8_t* area,
                                             uint32_t mark) {
    attention_shared* s = (attention_shared*)area;
    layer_items at;
    bool more = at.first(p, q, all);
#pragma unroll 1
    while (more) {
        layer_raw(q, at.w, p.rows[4], mark, s);
        if (q.q_norm) {
            attention_norms(q, at.w, p.rows[4], mark, s);
        }
        float acc[2][2][4] = {};
        attention_page<true>(q, at.w, s, attention_keys(q, at.w, at.row), layer_tiles(area), acc);
        layer_store(p, q, at.w, s, acc, mark);
        more = at.next(p, q, all);
        if (more) {
            attention_sync();
            asm volatile("bar.arrive 4, 512;" ::: "memory"); // the tile has been read
        }
    }
}

// Keys and values of the items, by the other threads.
__device__ __forceinline__ void layer_bring(const decode_layers& p, const decode_attention& q,
                                            const layer_shared* all, uint8_t* area) {
    layer_items at;
    bool more = at.first(p, q, all);
#pragma unroll 1
    while (more) {
        attention_request(q, at.w, attention_keys(q, at.w, at.row), 0, layer_tiles(area));
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        asm volatile("bar.arrive 2, 512;" ::: "memory");
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        asm volatile("bar.arrive 3, 512;" ::: "memory");
        more = at.next(p, q, all);
        if (more) {
            asm volatile("bar.sync 4, 512;" ::: "memory");
        }
    }
}

// Brings the first tile of the block's first item as far as L2: a row of keys or values by two
// threads.
__device__ __forceinline__ void layer_near(const decode_attention& q, const layer_shared* s) {
    int32_t row = (int32_t)threadIdx.x / 4;
    if ((int32_t)blockIdx.x < s->items && q.window == s->window &&
        row < s->place.tile && s->place.page * q.chunk + row < s->position) {
        const bf16* from = attention_keys(q, s->place, s->row + row) +
                           (threadIdx.x & 2 ? (int64_t)q.kv_heads * q.dim : 0);
#pragma unroll 1
        for (int32_t c = (int32_t)threadIdx.x % 2 * 64; c < q.dim; c += 128) {
            asm volatile("prefetch.global.L2 [%0];" ::"l"(from + c));
        }
    }
}

// Joins the pages of a column of a head, in their order. The lanes of a warp have columns of the
// same head; each of the first ones asks for the top and the total of a page.
__device__ __forceinline__ bf16 layer_join(const decode_layers& p, const decode_attention& q,
                                           int32_t head, int32_t column, int32_t first,
                                           int32_t last, uint32_t mark) {
    int32_t width = q.dim + 2;
    int32_t lane = (int32_t)threadIdx.x % 32;
    const uint64_t* from = p.partials + (int64_t)head * p.pages * width;
    float top = -INFINITY;
    float total = 0.0f;
    float sum = 0.0f;
#pragma unroll 1
    for (; first <= last; first += ATTENTION_JOIN) {
        layer_two own; // top and total
        uint64_t v[ATTENTION_JOIN];
        int32_t page = first + lane % ATTENTION_JOIN;
        page = page < last ? page : last;
        do {
            own.look(from + page * width);
        } while (__any_sync(QLORA_FULL_WARP, !own.made(mark)));
        bool there;
        do {
            there = true;
#pragma unroll
            for (int j = 0; j < ATTENTION_JOIN; j++) {
                v[j] = layer_look(from + (first + j < last ? first + j : last) * width + column);
            }
#pragma unroll
            for (int j = 0; j < ATTENTION_JOIN; j++) {
                there = there && (uint32_t)(v[j] >> 32) == mark;
            }
        } while (__any_sync(QLORA_FULL_WARP, !there));
        float before = top;
        top = fmaxf(top, warp_max(own.values().x));
        float factor = exp_of(before - top, (const bf16*)0);
        float weight = exp_of(own.values().x - top, (const bf16*)0);
        total *= factor;
        sum *= factor;
#pragma unroll
        for (int j = 0; j < ATTENTION_JOIN; j++) {
            float w = __shfl_sync(QLORA_FULL_WARP, weight, j);
            float t = __shfl_sync(QLORA_FULL_WARP, own.values().y, j);
            if (first + j <= last) {
                total += t * w;
                sum += __uint_as_float((uint32_t)v[j]) * w;
            }
        }
    }
    return to_bf16(sum / total);
}

// Attention's results, by the warps that do not attend; those of a single page are there.
__device__ __forceinline__ void layer_collect(const decode_layers& p, const decode_attention& q,
                                              const layer_shared* s, uint32_t mark) {
    int32_t first = attention_begins(q, s->position) / q.chunk;
    int32_t last = s->position / q.chunk;
    int32_t groups = (q.dim + 31) / 32; // of columns of a head
    int32_t job = (int32_t)blockIdx.x + ((int32_t)threadIdx.x / 32 - 8) * (int32_t)gridDim.x;
    if (first == last) {
        return;
    }
#pragma unroll 1
    for (; job < q.heads * groups; job += (int32_t)gridDim.x * LAYER_JOINERS) {
        int32_t c = job % groups * 32 + (int32_t)threadIdx.x % 32;
        bf16 v = layer_join(p, q, job / groups, 2 + (c < q.dim ? c : 0), first, last, mark);
        if (c < q.dim) {
            layer_put(p.rows[1] + job / groups * q.dim + c, v.bits, mark);
        }
    }
}

// The products of a warp with the pieces of a stack; the last warps fetch z meanwhile. `stage` is
// the offset of the next piece in the ring.
__device__ __forceinline__ void layer_multiply(const decode_layers& p, const layer_shared* s,
                                               int32_t layer, int32_t k, layer_ahead& ahead,
                                               uint8_t* shared, const bf16* x, float* sums,
                                               float* zs, int32_t ranks, uint32_t& stage) {
    int32_t warp = (int32_t)threadIdx.x / 32;
    const layer_plan& plan = s->plans[k];
    int32_t last = layer + 1 < p.count ? layer + 1 : layer;
    int32_t count = layer_pieces(plan);
    int32_t pieces = plan.pieces;
    int32_t fetch = (LAYER_WARPS - 1 - warp) * 16 < ranks ? count / 2 : -1; // before which piece z
    layer_start now;
    now.unpack(s->starts[k][warp]);
    layer_ring ring;
    ring.find(shared);
    uint32_t g = threadIdx.x % 32 / 4;
    uint32_t t = threadIdx.x % 4;
    bool real = (g & 1u) == 0 && (g >> 1 & 1u) == t / 2; // see decode_row.cuh
    uint32_t own_x = layer_keep((uint32_t)__cvta_generic_to_shared(x) + (g >> 2) * 256 + t * 64);
    uint32_t from = own_x + (uint32_t)now.piece * (ROW_COLUMNS * 2);
    uint32_t table = layer_keep((uint32_t)__cvta_generic_to_shared(shared) + threadIdx.x % 32 * 4);
    uint32_t map = (uint32_t)__cvta_generic_to_shared(shared) + DECODE_TABLE;
    uint4 x_now = make_uint4(0, 0, 0, 0);
    float middle = 0.0f;
    float acc[2] = {0.0f, 0.0f};
    int32_t flew = ahead.flying;
    ahead.fill(s, last, ring);
    // It is long because requests and their use belong to one loop.
#pragma unroll 1
    for (int32_t i = 0; i < count; i++) {
        if (i == fetch) {
            layer_z(p, k, ranks, (uint32_t)layer + 1, zs);
        }
        if (i == 0 || now.piece == 0) {
            int32_t first;
            middle = s->offsets[layer % LAYER_SLOTS][k][layer_find(plan, now.tile, first)];
        }
        if (ahead.flying == LAYER_STAGES) {
            asm volatile("cp.async.wait_group %0;" ::"n"(LAYER_STAGES - 1) : "memory");
        } else {
            asm volatile("cp.async.wait_group 0;" ::: "memory");
        }
        __syncwarp();
        row_half half[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            half[0].codes[r] = layer_vector(ring.codes + stage + 1024u * r);
            half[1].codes[r] = layer_vector((ring.codes + stage ^ 64u) + 1024u * r);
        }
        float scale[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            uint32_t code = layer_byte(ring.scales + stage + 32u * r);
            float group = layer_float((ring.scales + stage & ~3u) + 64u + 32u * r);
            scale[r] = __fadd_rn(__fmul_rn(layer_float(map + code * 4), group), middle);
        }
        float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        layer_products(half, table, from, real, x_now, c, d);
        acc[0] += scale[0] * (t >= 2 ? d[0] : c[0]);
        acc[1] += scale[1] * (t >= 2 ? d[2] : c[2]);
        ahead.flying--;
        __syncwarp(); // the stage has been read
        ahead.fill(s, last, ring);
        stage = stage == (LAYER_STAGES - 1) * LAYER_STAGE ? 0 : stage + LAYER_STAGE;
        from += ROW_COLUMNS * 2;
        if (++now.piece == pieces || i + 1 == count) {
            float* to = sums + (now.tile * plan.slots + now.slot) * 16;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                acc[r] += __shfl_xor_sync(QLORA_FULL_WARP, acc[r], 1);
                acc[r] += __shfl_xor_sync(QLORA_FULL_WARP, acc[r], 2);
                if (t == 0) {
                    to[g + 8 * r] = acc[r];
                }
                acc[r] = 0.0f;
            }
            now.piece = 0;
            now.tile++;
            now.slot = 0; // it begins with this warp
            from = own_x;
        }
    }
    if (fetch == 0 && count == 0 && plan.all > 0) {
        layer_z(p, k, ranks, (uint32_t)layer + 1, zs);
    }
    layer_await(ahead.flying - flew + count);
}

// What is the same for all layers.
__device__ __forceinline__ void layers_plan(const decode_layers& p, layer_shared* s) {
    const decode_layer& l = s->layers[0];
    if (threadIdx.x < 4) {
        layer_divide(l.stacks[threadIdx.x], (p.split >> threadIdx.x & 1) != 0,
                     s->plans[threadIdx.x]);
    }
    if (threadIdx.x == 32) {
        s->position = l.attention.texts[0].position;
        s->alive = l.attention.texts[0].alive;
        s->window = l.attention.window;
        s->items = layer_item(p, l.attention, s, (int32_t)blockIdx.x, s->place, s->row);
    }
    __syncthreads();
    if (threadIdx.x < 4 * LAYER_WARPS) {
        int32_t k = (int32_t)threadIdx.x / LAYER_WARPS;
        int32_t warp = (int32_t)threadIdx.x % LAYER_WARPS;
        s->starts[k][warp] = layer_start::pack(s->plans[k], warp);
    }
}

// Dynamic shared memory: table and map; the rings; layer_shared; then, for each stack, x, z rounded
// up to 16 bytes, 16 floats per slot and tile of the block, and the rows of sB of the first
// LAYER_THREADS outputs; or what attention needs.
__device__ __forceinline__ void layers_run(const decode_layers& p, uint8_t* shared) {
    layer_shared* s = (layer_shared*)(shared + DECODE_TABLE + DECODE_MAP + LAYER_RINGS);
    uint8_t* area = (uint8_t*)(s + 1);
    int32_t own = (int32_t)threadIdx.x;
    uint32_t stage = 0;
    layer_ahead ahead;
    ahead.layer = 0;
    ahead.stack = -1;
    ahead.left = 0;
    ahead.flying = 0;
    ahead.stage = 0;
    layer_load(p, 0, 0, s);
    layer_load(p, 1, 0, s);
    __syncthreads();
    layers_plan(p, s);
    if (s->alive == 0) {
        return; // in all blocks: there is no text, and nobody reads what would be made
    }
    row_table(s->layers[0].stacks[0], shared);
    __syncthreads();
#pragma unroll 1
    for (int32_t i = 0; i < p.count * 4; i++) {
        int32_t layer = i / 4;
        int32_t k = i % 4;
        const decode_layer& l = s->layers[layer % LAYER_SLOTS];
        const decode_product& q = l.stacks[k];
        const layer_plan& plan = s->plans[k];
        int32_t ranks = l.ranks[k][0] + l.ranks[k][1] + l.ranks[k][2];
        int32_t room = (plan.units << plan.gated) * plan.slots * 16;
        bf16* x = (bf16*)area;
        float* zs = (float*)(x + q.K);
        float* sums = zs + (ranks + 3) / 4 * 4;
        uint4* rows = (uint4*)(sums + room);
        int32_t stride = q.parts[0].rank / 8;
        // It is long because what does not depend on the other blocks is loaded before the wait.
        layer_low low;
        layer_place place;
        low.find(l, k, ranks * LAYER_PARTS,
                 (int32_t)blockIdx.x + (LAYER_WARPS - 1 - own / 32) * (int32_t)gridDim.x);
        place.find(plan, own);
        if (own < plan.units * 16 << plan.gated) {
            place.load(q, layer_old(p, layer, k));
        }
        if (k == 0) {
            layer_near(l.attention, s);
        }
        __syncthreads(); // what the last stack had in shared memory has been read
        if (plan.all > 0 || (int32_t)blockIdx.x < ranks * LAYER_PARTS) {
#pragma unroll 1
            for (int32_t j = own; j < room; j += LAYER_THREADS) {
                sums[j] = 0.0f;
            }
            place.request(q, rows + own * stride);
            uint32_t mark = k > 0 ? layer_mark(layer) : layer > 0 ? layer_mark(layer - 1) : 0;
            if (k % 2 == 0) {
                layer_norm(p, l.norms[k / 2], p.rows[k], mark, x, s->sums);
            } else {
                layer_copy(p.rows[k], mark, q.K, x);
            }
            __syncthreads();
            low.make(p, l, k, ranks * LAYER_PARTS, x, (uint32_t)layer + 1);
            if (own / 32 == LAYER_WARPS - 1) {
                layer_warm(p, s, i + 1);
            }
            layer_multiply(p, s, layer, k, ahead, shared, x, sums, zs, ranks, stage);
            __syncthreads();
            layer_share(p, plan, sums, (uint32_t)(layer * 4 + k + 1));
            layer_finish(p, q, plan, sums, zs, layer, k, place, rows, stride);
        }
        if (k == 0) {
            __syncthreads();
            if (own < 256) {
                layer_attend(p, l.attention, s, area, layer_mark(layer));
            } else {
                layer_load(p, layer + 2, 256, s);
                layer_bring(p, l.attention, s, area);
                layer_collect(p, l.attention, s, layer_mark(layer));
            }
        }
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
}

#endif
