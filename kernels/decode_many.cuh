// decode_many.cuh - products of many rows of activations with the weights of a stack, for decoding
// up to 64 texts at a time. The formula is that of decode.cuh. `a` is another one here: with gate
// and up, the adapter of the next product, [a_rank, N]; z[tile][n][r] is the sum over the columns
// of the block's tile of y[n, k] A[r, k].
//
// A block has 16 tiles of 16 rows of W, or 8 of gate and the same 8 of up, two per warp, and takes `each` chunks of 64 columns. W is read once. x is in shared memory for
// all warps, two chunks per stage, MANY_STAGES - 1 stages ahead; what a warp needs of W is in its
// registers, at least two chunks ahead. If the columns are split over blocks, the block of a tile
// that arrives last adds the sums in the order of the splits, so timing does not matter.
//
// The rows of W are the rows of m16n8k16, eight rows of x its columns; k is permuted alike for
// both: lane 4 g + t holds columns 16 t to 16 t + 15 of a chunk. The operands that a warp reads
// from shared memory serve both of its tiles. NF4: levels are rounded to bf16, and the sum over a
// block of 64 is multiplied by its scale in f32; lane i has the scales of row i % 16 of tile i / 16
// and hands them out. The adapter of split 0 follows as further columns, [x | z] [W | sB]^T.
//
// Launch: grid (tiles, splits, groups of 64 rows), 256 threads, MANY_SHARED bytes of dynamic shared
// memory; `each` is even. `counters` are 0 before and after.
#ifndef QLORA_DECODE_MANY_CUH
#define QLORA_DECODE_MANY_CUH

#include "decode.cuh"

enum {
    MANY_ROWS = 64,
    MANY_WARPS = 8,
    MANY_TILES = 16, // of a block
    MANY_STAGES = 3,
    MANY_STRIDE = 272, // bytes of a row of x in shared memory: no bank conflicts
    MANY_STAGE = MANY_ROWS * MANY_STRIDE,
    MANY_TABLE = 256 * 32 * 4, // bytes
    MANY_MAP = 256 * 4,
    MANY_WIDE = MANY_TILES * 16 + 4, // floats of a row of results: few bank conflicts
    MANY_SHARED = MANY_TABLE + MANY_MAP + MANY_STAGES * MANY_STAGE // the results replace it all
};

// Same layout as qlora__decode_many.
struct decode_many {
    decode_product p;
    float* room; // [groups, tiles, splits, MANY_ROWS, 256]
    uint32_t* counters;
    int32_t each; // chunks of a split
    int32_t unused;
};

__device__ __forceinline__ void many_multiply(float* c, const uint32_t* a, uint32_t b0,
                                              uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Where a tile is.
struct many_tile {
    decode_part part;
    int32_t first; // row of the part
    bool inside;
};

__device__ __forceinline__ int32_t many_tiles(const decode_product& p, int32_t which) {
    int32_t rows = which == 0 ? p.parts[0].N : which == 1 ? p.parts[1].N : p.parts[2].N;
    return which < p.count ? (rows + 15) / 16 : 0;
}

// Tile number `slot` of the block. With gate and up, the first 8 are those of gate.
__device__ __forceinline__ many_tile many_find(const decode_product& p, int32_t slot) {
    many_tile t;
    int32_t which = 0;
    int32_t unit = (int32_t)blockIdx.x * MANY_TILES + slot;
    int32_t end = many_tiles(p, 0);
    if (p.gated != 0) {
        which = slot / 8;
        unit = (int32_t)blockIdx.x * (MANY_TILES / 2) + slot % 8;
    } else {
        while (unit >= end && which + 1 < p.count) {
            unit -= end;
            end = many_tiles(p, ++which);
        }
    }
    t.part = decode_pick(p, which);
    t.first = unit * 16;
    t.inside = unit < end;
    return t;
}

// Row i of a tile; one past the end repeats the last, and its results are never written.
__device__ __forceinline__ int64_t many_row(const many_tile& t, int32_t i) {
    int32_t row = t.first + i;
    return t.part.first + (t.inside && row < t.part.N ? row : t.part.N - 1);
}

// ---- NF4: 4 chunks at a time, so that 128 bytes of every row are requested together

struct many_nf4 {
    enum { CHUNKS = 4, TABLES = 1 };

    struct source {
        const uint8_t* codes[2][2]; // tile, rows g and g + 8
        const float* scales;        // of this lane's row
        const uint8_t* q;           // null = plain scales
        int32_t at;
        int32_t shift;
        int32_t group;
        float middle;
        bool pairs; // the scales of two chunks are two bytes side by side
    };

    struct piece {
        uint2 codes[CHUNKS][2][2]; // chunk, tile, row
        float s[CHUNKS];           // once it is there, the whole scale
        uint32_t q[CHUNKS];
    };

    static __device__ __forceinline__ void tables(const decode_product& p, uint8_t* shared) {
        for (int32_t i = (int32_t)threadIdx.x; i < 256 * 8; i += MANY_WARPS * 32) {
            uint32_t pair = pack_bf16(p.maps[i / 8 / 16], p.maps[i / 8 % 16]);
            ((uint4*)shared)[i] = make_uint4(pair, pair, pair, pair);
        }
        for (int32_t i = (int32_t)threadIdx.x; i < 256; i += MANY_WARPS * 32) {
            ((float*)(shared + MANY_TABLE))[i] = p.maps[16 + i];
        }
    }

    // The two tiles from `slot` on.
    static __device__ __forceinline__ source find(const decode_product& p, int32_t slot) {
        int32_t lane = (int32_t)threadIdx.x % 32;
        int32_t K = p.K;
        many_tile t[2] = {many_find(p, slot), many_find(p, slot + 1)};
        source f;
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                f.codes[i][r] = (const uint8_t*)t[i].part.w +
                                many_row(t[i], lane / 4 + 8 * r) * (K / 2) + lane % 4 * 8;
            }
        }
        // The parts of a stack have the same kind of scales.
        const decode_part& a = t[0].part;
        const decode_part& b = t[1].part;
        bool second = lane >= 16;
        f.shift = (second ? b.block_shift : a.block_shift) - 6;
        f.group = f.shift + (a.absmax ? 0 : second ? b.group_shift : a.group_shift);
        f.scales = a.absmax ? (second ? b.absmax : a.absmax) : (second ? b.scales : a.scales);
        f.q = a.absmax ? 0 : (second ? b.q : a.q);
        f.middle = a.absmax ? 0.0f : (second ? *b.offset : *a.offset);
        f.at = (int32_t)(second ? many_row(t[1], lane % 16) : many_row(t[0], lane % 16)) * (K / 64);
        f.pairs = !a.absmax && f.shift == 0 && f.group > 0 && K % 128 == 0;
        return f;
    }

    // The chunks from `chunk` on, of which the first `count` exist.
    static __device__ __forceinline__ void load(piece& v, const source& f, int32_t K,
                                                int32_t chunk, int32_t count) {
#pragma unroll
        for (int b = 0; b < CHUNKS; b++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (b < count) {
                    v.codes[b][i / 2][i % 2] =
                        __ldg((const uint2*)(f.codes[i / 2][i % 2] + (chunk + b) * 32));
                }
            }
        }
        int32_t at = f.at + chunk;
#pragma unroll
        for (int b = 0; b < CHUNKS; b++) {
            if (f.pairs && b % 2 == 0 && b < count) {
                v.q[b] = __ldg((const uint16_t*)(f.q + at + b));
                v.s[b] = __ldg(f.scales + ((at + b) >> f.group));
            } else if (!f.pairs && b < count) {
                v.q[b] = f.q ? __ldg(f.q + ((at + b) >> f.shift)) : 0u;
                v.s[b] = __ldg(f.scales + ((at + b) >> f.group));
            }
        }
    }

    // The scales of this lane's row.
    static __device__ __forceinline__ void arrive(piece& v, const source& f, const uint8_t* table) {
        const float* map = (const float*)(table + MANY_TABLE);
#pragma unroll
        for (int b = CHUNKS - 1; b >= 0; b--) { // those that do not exist may be anything
            uint32_t q = f.pairs ? v.q[b / 2 * 2] >> (b % 2 * 8) : v.q[b];
            float s = f.pairs ? v.s[b / 2 * 2] : v.s[b];
            v.s[b] = f.q ? __fadd_rn(__fmul_rn(map[q & 255u], s), f.middle) : s;
        }
    }

    static __device__ __forceinline__ void add(const piece& v, int b, const uint8_t* table,
                                               const uint8_t* x, float (*acc)[MANY_ROWS / 8][4]) {
        uint32_t lane = threadIdx.x % 32;
        float s[2][2];
        uint32_t a[2][4][4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                s[i][r] = __shfl_sync(QLORA_FULL_WARP, v.s[b], (int)(lane / 4) + 8 * r + 16 * i);
            }
#pragma unroll
            for (int j = 0; j < 16; j++) {
                // Step j / 4 of the chunk: rows g, g + 8 of its first columns, then of the others.
                a[i][j / 4][j % 4] =
                    decode_pair(table, v.codes[b][i][j % 2], j / 4 * 2 + j % 4 / 2, lane * 4);
            }
        }
#pragma unroll
        for (int n = 0; n < MANY_ROWS / 8; n++) {
            const uint4* from = (const uint4*)(x + n * 8 * MANY_STRIDE);
            uint4 v0 = from[0];
            uint4 v1 = from[1];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                many_multiply(c, a[i][0], v0.x, v0.y);
                many_multiply(c, a[i][1], v0.z, v0.w);
                many_multiply(c, a[i][2], v1.x, v1.y);
                many_multiply(c, a[i][3], v1.z, v1.w);
                acc[i][n][0] += s[i][0] * c[0];
                acc[i][n][1] += s[i][0] * c[1];
                acc[i][n][2] += s[i][1] * c[2];
                acc[i][n][3] += s[i][1] * c[3];
            }
        }
    }
};

// ---- bf16: 2 chunks at a time, 128 bytes of every row each

struct many_dense {
    enum { CHUNKS = 2, TABLES = 0 };

    struct source {
        const bf16* rows[2][2];
    };

    struct piece {
        uint4 v[CHUNKS][2][2][2]; // chunk, tile, row, half
    };

    static __device__ __forceinline__ void tables(const decode_product&, uint8_t*) {
    }

    static __device__ __forceinline__ source find(const decode_product& p, int32_t slot) {
        int32_t lane = (int32_t)threadIdx.x % 32;
        many_tile t[2] = {many_find(p, slot), many_find(p, slot + 1)};
        source f;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            f.rows[i / 2][i % 2] = (const bf16*)t[i / 2].part.w +
                                   many_row(t[i / 2], lane / 4 + 8 * (i % 2)) * t[i / 2].part.ld +
                                   lane % 4 * 16;
        }
        return f;
    }

    static __device__ __forceinline__ void load_chunk(piece& v, const source& f, int32_t K,
                                                      int32_t chunk, int b) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int32_t k = chunk * 64 + i % 2 * 8;
            uint4& to = v.v[b][i / 4][i / 2 % 2][i % 2];
            to = make_uint4(0, 0, 0, 0);
            if (k + (int32_t)threadIdx.x % 4 * 16 < K) {
                to = __ldg((const uint4*)(f.rows[i / 4][i / 2 % 2] + k));
            }
        }
    }

    static __device__ __forceinline__ void load(piece& v, const source& f, int32_t K,
                                                int32_t chunk, int32_t count) {
#pragma unroll
        for (int b = 0; b < CHUNKS; b++) {
            if (b < count) {
                load_chunk(v, f, K, chunk + b, b);
            }
        }
    }

    static __device__ __forceinline__ void arrive(piece&, const source&, const uint8_t*) {
    }

    static __device__ __forceinline__ void add(const piece& v, int b, const uint8_t*,
                                               const uint8_t* x, float (*acc)[MANY_ROWS / 8][4]) {
        uint32_t a[2][4][4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int j = 0; j < 16; j++) {
                const uint4& w = v.v[b][i][j % 2][j / 8];
                a[i][j / 4][j % 4] = j / 4 % 2 == 0 ? (j % 4 < 2 ? w.x : w.y)
                                                    : (j % 4 < 2 ? w.z : w.w);
            }
        }
#pragma unroll
        for (int n = 0; n < MANY_ROWS / 8; n++) {
            const uint4* from = (const uint4*)(x + n * 8 * MANY_STRIDE);
            uint4 v0 = from[0];
            uint4 v1 = from[1];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                many_multiply(acc[i][n], a[i][0], v0.x, v0.y);
                many_multiply(acc[i][n], a[i][1], v0.z, v0.w);
                many_multiply(acc[i][n], a[i][2], v1.x, v1.y);
                many_multiply(acc[i][n], a[i][3], v1.z, v1.w);
            }
        }
    }
};

// ---- what both share

// Requests a stage of x: two chunks of 64 rows, from chunk number `chunk` on. Rows and columns that
// do not exist repeat others: their results are never written, or their weights are 0.
__device__ __forceinline__ void many_request(const decode_product& p, uint8_t* stage,
                                             int32_t first_row, int32_t rows, int32_t chunk) {
#pragma unroll
    for (int i = 0; i < MANY_ROWS * 16 / (MANY_WARPS * 32); i++) {
        int32_t row = (int32_t)threadIdx.x / 16 + i * (MANY_WARPS * 2);
        int32_t k = chunk * 64 + (int32_t)threadIdx.x % 16 * 8;
        const bf16* from =
            p.x + (first_row + (row < rows ? row : rows - 1)) * p.ldx + (k < p.K ? k : p.K - 8);
        uint32_t to = (uint32_t)__cvta_generic_to_shared(stage + row * MANY_STRIDE +
                                                         threadIdx.x % 16 * 16);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    }
}

// Two columns of a row of bf16 as an operand; 0 from `count` on. With `even`, both are one word.
__device__ __forceinline__ uint32_t many_two(const bf16* row, int32_t at, int32_t count,
                                             bool even) {
    uint32_t v = 0;
    if (even && at < count) {
        v = *(const uint32_t*)(row + at);
    } else if (at < count) {
        v = row[at].bits | (at + 1 < count ? (uint32_t)row[at + 1].bits << 16 : 0u);
    }
    return v;
}

// [z] [sB]^T
__device__ __forceinline__ void many_adapter(const decode_product& p, const many_tile& t,
                                             int32_t first_row, int32_t rows, float (*acc)[4]) {
    int32_t g = (int32_t)threadIdx.x % 32 / 4;
    int32_t k = (int32_t)threadIdx.x % 4 * 2;
    int32_t rank = t.part.rank;
    int32_t low = t.first + g < t.part.N ? t.first + g : t.part.N - 1;
    int32_t high = t.first + g + 8 < t.part.N ? t.first + g + 8 : t.part.N - 1;
    const bf16* b0 = t.part.sb + (int64_t)low * rank;
    const bf16* b1 = t.part.sb + (int64_t)high * rank;
    const bf16* z = p.x + first_row * p.ldx + t.part.z_at;
    bool even = ((rank | t.part.z_at) & 1) == 0;
#pragma unroll 1
    for (int32_t at = k; at - k < rank; at += 16) {
        uint32_t a[4] = {many_two(b0, at, rank, even), many_two(b1, at, rank, even),
                         many_two(b0, at + 8, rank, even), many_two(b1, at + 8, rank, even)};
#pragma unroll
        for (int n = 0; n < MANY_ROWS / 8; n++) {
            int32_t row = n * 8 + g;
            const bf16* own = z + (row < rows ? row : rows - 1) * p.ldx;
            many_multiply(acc[n], a, many_two(own, at, rank, even),
                          many_two(own, at + 8, rank, even));
        }
    }
}

// Adds up the splits, if this block is the last one of its tile; false if it is not. Sums are kept
// as the lanes hold them, T tiles per warp, of which `count` exist.
template <int T>
__device__ __forceinline__ bool many_join(const decode_many& m, float (*acc)[MANY_ROWS / 8][4],
                                          int32_t count, int32_t* last) {
    constexpr int THREADS = MANY_TILES * 32 / T;
    int32_t tile = (int32_t)(blockIdx.z * gridDim.x + blockIdx.x);
    int32_t splits = (int32_t)gridDim.y;
    float4* room = (float4*)(m.room + (int64_t)tile * splits * (MANY_ROWS * 256)) + threadIdx.x;
    float4* own = room + (int64_t)blockIdx.y * (MANY_ROWS * 64);
#pragma unroll
    for (int i = 0; i < T * 8; i++) {
        const float* v = acc[i / 8][i % 8];
        if (i / 8 < count) {
            own[i * THREADS] = make_float4(v[0], v[1], v[2], v[3]);
        }
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        *last = atomicAdd(m.counters + tile, 1u) == (uint32_t)(splits - 1) ? 1 : 0;
    }
    __syncthreads();
    if (*last == 0) {
        return false;
    }
    __threadfence();
#pragma unroll
    for (int i = 0; i < T * 32; i++) {
        acc[i / 32][i / 4 % 8][i % 4] = 0.0f;
    }
#pragma unroll 2
    for (int32_t j = 0; j < splits; j++) {
        const float4* from = room + (int64_t)j * (MANY_ROWS * 64);
        float4 w[T * 8];
#pragma unroll
        for (int i = 0; i < T * 8; i++) {
            w[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (i / 8 < count) {
                w[i] = __ldcg(from + i * THREADS);
            }
        }
#pragma unroll
        for (int i = 0; i < T * 8; i++) {
            acc[i / 8][i % 8][0] += w[i].x;
            acc[i / 8][i % 8][1] += w[i].y;
            acc[i / 8][i % 8][2] += w[i].z;
            acc[i / 8][i % 8][3] += w[i].w;
        }
    }
    if (threadIdx.x == 0) {
        m.counters[tile] = 0; // for the next product
    }
    return true;
}

__device__ __forceinline__ float many_act(int32_t kind, float gate, float up) {
    float g = to_float(to_bf16(gate));
    float u = kind == 1 ? g : 1.5957691216057308f * (g + 0.044715f * g * g * g);
    float s = 1.0f / (1.0f + exp_of(-u, (const bf16*)0));
    return g * s * to_float(to_bf16(up));
}

// A warp's sums, with bias, in `results`: tile number `slot` has columns 16 slot to 16 slot + 15.
__device__ __forceinline__ void many_place(const decode_product& p, const many_tile& t,
                                           const float (*acc)[4], int32_t slot, float* results) {
    int32_t g = (int32_t)threadIdx.x % 32 / 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int32_t at = t.first + g + r * 8;
        float bias = t.part.bias && t.inside && at < t.part.N ? to_float(t.part.bias[at]) : 0.0f;
        float* to = results + (int32_t)threadIdx.x % 4 * 2 * MANY_WIDE + slot * 16 + g + 8 * r;
#pragma unroll
        for (int i = 0; i < MANY_ROWS / 4; i++) {
            to[(i / 2 * 8 + i % 2) * MANY_WIDE] = acc[i / 2][r * 2 + i % 2] * p.alpha + bias;
        }
    }
}

// Gate, columns 0 to 127, and up, those after them, become their product.
__device__ __forceinline__ void many_gate(int32_t kind, float* results) {
#pragma unroll 1
    for (int32_t i = (int32_t)threadIdx.x; i < MANY_ROWS * 32; i += (int32_t)blockDim.x) {
        float* at = results + i / 32 * MANY_WIDE + i % 32 * 4;
        float4 gate = *(const float4*)at;
        float4 up = *(const float4*)(at + 128);
        *(float4*)at = make_float4(many_act(kind, gate.x, up.x), many_act(kind, gate.y, up.y),
                                   many_act(kind, gate.z, up.z), many_act(kind, gate.w, up.w));
    }
    __syncthreads();
}

__device__ __forceinline__ float many_cap(float cap, float v) {
    return cap * tanhf(to_float(to_bf16(v)) / cap);
}

// Writes the results, four columns of a row at a time.
__device__ __forceinline__ void many_write(const decode_product& p, const float* results,
                                           int32_t first_row, int32_t rows) {
    int32_t fours = p.gated != 0 ? 32 : 64;
    int32_t column = (int32_t)threadIdx.x % fours * 4;
    many_tile t = many_find(p, column / 16);
    int32_t at = t.first + column % 16;
    int32_t count = t.inside ? t.part.N - at : 0;
    int64_t to = first_row * p.ldy + t.part.y_at + at;
    bool whole = count >= 4 && ((to | p.ldy) & 3) == 0;
#pragma unroll 1
    for (int32_t n = (int32_t)threadIdx.x / fours; n < rows; n += (int32_t)blockDim.x / fours) {
        float4 v = *(const float4*)(results + n * MANY_WIDE + column);
        if (p.cap > 0.0f) {
            v = make_float4(many_cap(p.cap, v.x), many_cap(p.cap, v.y), many_cap(p.cap, v.z),
                            many_cap(p.cap, v.w));
        }
        int64_t place = to + n * p.ldy;
        if (whole && p.y_is_bf16 != 0) {
            *(uint2*)((bf16*)p.y + place) =
                make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
            continue;
        }
        if (whole) {
            *(float4*)((float*)p.y + place) = v;
            continue;
        }
        float one[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i < count && p.y_is_bf16 != 0) {
                ((bf16*)p.y)[place + i] = to_bf16(one[i]);
            } else if (i < count) {
                ((float*)p.y)[place + i] = one[i];
            }
        }
    }
}

// z of the next product: 8 rows of x per warp.
__device__ __forceinline__ void many_low(const decode_product& p, const float* results,
                                         int32_t first_row, int32_t rows) {
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t warp = (int32_t)threadIdx.x / 32 % 8;
    int32_t N = p.parts[0].N;
    const float* own = results + (warp * 8 + lane / 4) * MANY_WIDE + lane % 4 * 8;
#pragma unroll 1
    for (int32_t first = (int32_t)threadIdx.x / 256 * 16; first < p.a_rank;
         first += (int32_t)blockDim.x / 16) {
        uint4 a[4][2];
        float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int32_t r = first + lane / 4 + i % 2 * 8;
            int32_t k = (int32_t)blockIdx.x * 128 + i / 2 * 32 + lane % 4 * 8;
            a[i / 2][i % 2] = make_uint4(0, 0, 0, 0);
            if (r < p.a_rank && k < N) {
                a[i / 2][i % 2] = __ldg((const uint4*)(p.a + (int64_t)r * N + k));
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float4 v = *(const float4*)(own + i * 32);
            float4 w = *(const float4*)(own + i * 32 + 4);
            uint32_t lo[4] = {a[i][0].x, a[i][1].x, a[i][0].y, a[i][1].y};
            uint32_t hi[4] = {a[i][0].z, a[i][1].z, a[i][0].w, a[i][1].w};
            many_multiply(c, lo, pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
            many_multiply(c, hi, pack_bf16(w.x, w.y), pack_bf16(w.z, w.w));
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int32_t r = first + lane / 4 + i / 2 * 8;
            int32_t n = warp * 8 + lane % 4 * 2 + i % 2;
            if (r < p.a_rank && n < rows) {
                int64_t row = (int64_t)blockIdx.x * p.rows + first_row + n;
                p.z[row * p.a_rank + r] = c[i];
            }
        }
    }
}

// The chunks of a split: start, and how many.
struct many_span {
    int32_t start;
    int32_t chunks;
};

// A stage of x is there, and that of the last one is free; one more is requested.
__device__ __forceinline__ void many_turn(const decode_product& p, uint8_t* stages,
                                          int32_t first_row, int32_t rows, many_span span,
                                          int32_t stage) {
    asm volatile("cp.async.wait_group %0;" ::"n"(MANY_STAGES - 2) : "memory");
    __syncthreads();
    int32_t ahead = stage + MANY_STAGES - 1;
    if (ahead * 2 < span.chunks) {
        many_request(p, stages + ahead % MANY_STAGES * MANY_STAGE, first_row, rows,
                     span.start + ahead * 2);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <class W> __device__ __forceinline__ void many_run(const decode_many& m, uint8_t* shared) {
    __shared__ int32_t last;
    const decode_product& p = m.p;
    int32_t warp = (int32_t)threadIdx.x / 32;
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t first_row = (int32_t)blockIdx.z * MANY_ROWS;
    int32_t rows = p.rows - first_row < MANY_ROWS ? p.rows - first_row : MANY_ROWS;
    many_span span;
    span.start = (int32_t)blockIdx.y * m.each;
    span.chunks = (p.K + 63) / 64 - span.start;
    span.chunks = span.chunks < m.each ? span.chunks : m.each;
    uint8_t* stages = shared + MANY_TABLE + MANY_MAP;
    typename W::source source = W::find(p, 2 * warp);
    typename W::piece next;
    float acc[2][MANY_ROWS / 8][4];
    bool inside = many_find(p, 2 * warp).inside;
    // It is long because requests and their use belong to one loop.
    if (inside) {
        W::load(next, source, p.K, span.start, span.chunks);
    }
    W::tables(p, shared);
    early_wait();
#pragma unroll
    for (int i = 0; i < MANY_STAGES - 1; i++) {
        if (i * 2 < span.chunks) {
            many_request(p, stages + i * MANY_STAGE, first_row, rows, span.start + i * 2);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
#pragma unroll
    for (int i = 0; i < MANY_ROWS; i++) {
        acc[i / 32][i / 4 % 8][i % 4] = 0.0f;
    }
    const uint8_t* own = stages + lane / 4 * MANY_STRIDE + lane % 4 * 32;
#pragma unroll 1
    for (int32_t c = 0; c < span.chunks; c += W::CHUNKS) {
        typename W::piece now = next;
        if (c == 0) {
            __syncthreads(); // the tables
        }
        W::arrive(now, source, shared);
        if (inside && c + W::CHUNKS < span.chunks) {
            W::load(next, source, p.K, span.start + c + W::CHUNKS, span.chunks - c - W::CHUNKS);
        }
#pragma unroll
        for (int b = 0; b < W::CHUNKS; b++) {
            if (b % 2 == 0 && c + b < span.chunks) {
                many_turn(p, stages, first_row, rows, span, (c + b) / 2);
            }
            if (inside && c + b < span.chunks) {
                W::add(now, b, shared,
                       own + (c + b) / 2 % MANY_STAGES * MANY_STAGE + b % 2 * 128, acc);
            }
        }
    }
    asm volatile("" : "+r"(warp)); // nothing that follows is kept in registers during the loop
    many_tile tile[2] = {many_find(p, 2 * warp), many_find(p, 2 * warp + 1)};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (tile[i].inside && tile[i].part.sb && blockIdx.y == 0) {
            many_adapter(p, tile[i], first_row, rows, acc[i]);
        }
    }
    int32_t count = (tile[0].inside ? 1 : 0) + (tile[1].inside ? 1 : 0);
    if (gridDim.y > 1 && !many_join<2>(m, acc, count, &last)) {
        return;
    }
    __syncthreads(); // tables and stages are free
    many_place(p, tile[0], acc[0], 2 * warp, (float*)shared);
    many_place(p, tile[1], acc[1], 2 * warp + 1, (float*)shared);
    __syncthreads();
    if (p.gated != 0) {
        many_gate(p.gated, (float*)shared);
    }
    many_write(p, (const float*)shared, first_row, rows);
    if (p.gated != 0 && p.a) {
        many_low(p, (const float*)shared, first_row, rows);
    }
}

#endif
