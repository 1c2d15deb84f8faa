// decode_many.cuh - products of many rows of activations with the weights of a stack, for decoding
// up to 64 texts at a time. The formula is that of decode.cuh. `a` is another one here: with gate
// and up, the adapter of the next product, [a_rank, N]; z[tile][n][r] is the sum over the columns
// of the block's tile of y[n, k] A[r, k].
//
// A block has 16 tiles of 16 rows of W, one per warp, or 8 of gate and the same 8 of up, and takes
// `each` chunks of 64 columns. W is read once; a chunk of x is in shared memory for all warps,
// MANY_STAGES - 1 chunks ahead, and a warp's W in registers, W::DEPTH chunks ahead. If the columns
// are split over blocks, the block of a tile that arrives last adds the sums in the order of the
// splits, so timing does not matter; or, with `apart`, the next kernel does, which has more blocks
// for it: y[split][n][:].
//
// The rows of W are the rows of m16n8k16, eight rows of x its columns; k is permuted alike for
// both: lane 4 g + t holds columns 16 t to 16 t + 15 of a chunk. NF4: levels are rounded to bf16,
// and the sum over a block of 64 is multiplied by its scale in f32. A byte of codes becomes a pair
// of levels by one look-up in shared memory at 256 byte + 4 lane, an address that a single byte
// permute makes. The adapter of split 0 follows as further columns, [x | z] [W | sB]^T. If z is
// left in partial sums (`low`), every split takes some of them: their sum, rounded to bf16.
//
// Launch: grid (tiles, splits, groups of 64 rows), 512 threads. `counters` are 0 before and after.
#ifndef QLORA_DECODE_MANY_CUH
#define QLORA_DECODE_MANY_CUH

#include "decode.cuh"

enum {
    MANY_ROWS = 64,
    MANY_TILES = 16, // of a block, one per warp
    MANY_THREADS = MANY_TILES * 32,
    MANY_STAGES = 3,
    MANY_STRIDE = 144, // bytes of a row of x in shared memory: no bank conflicts
    MANY_STAGE = MANY_ROWS * MANY_STRIDE,
    MANY_TABLE = 256 * 256, // bytes
    MANY_MAP = 256 * 4,
    MANY_WIDE = MANY_TILES * 16 + 4,         // floats of a row of results: no bank conflicts
    MANY_RESULTS = MANY_ROWS * MANY_WIDE * 4 // bytes; they replace the tables
};

// Same layout as qlora__decode_many.
struct decode_many {
    decode_product p;
    float* room; // [groups, tiles, splits, MANY_ROWS, 256], as lanes hold it
    uint32_t* counters;
    int32_t each;  // chunks of a split
    int32_t apart; // 1: y, in f32, has the sums of each split, [splits, rows, ldy]
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

// The table of pairs of levels, with a copy for every lane, and the map of scales.
__device__ __forceinline__ void many_tables(const decode_product& p, uint8_t* shared) {
    for (int32_t i = (int32_t)threadIdx.x; i < 256 * 8; i += MANY_THREADS) {
        uint32_t pair = pack_bf16(p.maps[i / 8 / 16], p.maps[i / 8 % 16]);
        *(uint4*)(shared + i / 8 * 256 + i % 8 * 16) = make_uint4(pair, pair, pair, pair);
    }
    for (int32_t i = (int32_t)threadIdx.x; i < 256; i += MANY_THREADS) {
        ((float*)(shared + MANY_TABLE))[i] = p.maps[16 + i];
    }
}

// The two levels of a byte of a word.
__device__ __forceinline__ uint32_t many_pair(const uint8_t* table, uint32_t word, uint32_t byte,
                                              uint32_t lane4) {
    return *(const uint32_t*)(table + __byte_perm(word, lane4, 0x5504u | byte << 4));
}

// ---- NF4

struct many_nf4 {
    enum { DEPTH = 4, SHARED = MANY_TABLE + MANY_MAP };
    uint2 codes[2]; // rows g and g + 8
    float s[2];
    uint32_t q[2];

    struct source {
        const uint8_t* codes[2];
        const float* scales;
        const uint8_t* q;
        int32_t at[2];
        int32_t shift;
        int32_t group;
        float middle;
    };

    static __device__ __forceinline__ source find(const many_tile& t, int32_t K) {
        const decode_part& w = t.part;
        source f;
        f.shift = w.block_shift - 6;
        f.group = w.absmax ? f.shift : f.shift + w.group_shift;
        f.scales = w.absmax ? w.absmax : w.scales;
        f.q = w.absmax ? 0 : w.q;
        f.middle = w.absmax ? 0.0f : *w.offset;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int32_t row = (int32_t)many_row(t, (int32_t)threadIdx.x % 32 / 4 + 8 * r);
            f.at[r] = row * (K / 64);
            f.codes[r] = (const uint8_t*)w.w + (int64_t)row * (K / 2) + threadIdx.x % 4 * 8;
        }
        return f;
    }

    __device__ __forceinline__ void load(const source& f, int32_t K, int32_t chunk) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            codes[r] = __ldg((const uint2*)(f.codes[r] + chunk * 32));
            s[r] = __ldg(f.scales + ((f.at[r] + chunk) >> f.group));
            q[r] = 0;
            if (f.q) {
                q[r] = __ldg(f.q + ((f.at[r] + chunk) >> f.shift));
            }
        }
    }

    __device__ __forceinline__ void add(const source& f, const uint8_t* table, const uint8_t* x,
                                        float (*acc)[4]) const {
        const float* map = (const float*)(table + MANY_TABLE);
        uint32_t lane4 = threadIdx.x % 32 * 4;
        uint32_t a[4][4];
        float scale[2];
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                uint32_t word = i < 2 ? codes[j % 2].x : codes[j % 2].y;
                uint32_t byte = (uint32_t)(2 * (i % 2) + j / 2);
                a[i][j] = many_pair(table, word, byte, lane4);
            }
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            scale[r] = f.q ? __fadd_rn(__fmul_rn(map[q[r]], s[r]), f.middle) : s[r];
        }
#pragma unroll
        for (int n = 0; n < MANY_ROWS / 8; n++) {
            const uint4* from = (const uint4*)(x + n * 8 * MANY_STRIDE);
            uint4 v0 = from[0];
            uint4 v1 = from[1];
            float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            many_multiply(c, a[0], v0.x, v0.y);
            many_multiply(c, a[1], v0.z, v0.w);
            many_multiply(c, a[2], v1.x, v1.y);
            many_multiply(c, a[3], v1.z, v1.w);
            acc[n][0] += scale[0] * c[0];
            acc[n][1] += scale[0] * c[1];
            acc[n][2] += scale[1] * c[2];
            acc[n][3] += scale[1] * c[3];
        }
    }
};

// ---- bf16

struct many_dense {
    enum { DEPTH = 2, SHARED = 0 };
    uint4 v[2][2]; // rows g and g + 8

    struct source {
        const bf16* rows[2];
    };

    static __device__ __forceinline__ source find(const many_tile& t, int32_t K) {
        source f;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int64_t row = many_row(t, (int32_t)threadIdx.x % 32 / 4 + 8 * r);
            f.rows[r] = (const bf16*)t.part.w + row * t.part.ld;
        }
        return f;
    }

    __device__ __forceinline__ void load(const source& f, int32_t K, int32_t chunk) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int32_t k = chunk * 64 + (int32_t)threadIdx.x % 4 * 16 + 8 * i;
                v[r][i] = make_uint4(0, 0, 0, 0);
                if (k < K) {
                    v[r][i] = __ldg((const uint4*)(f.rows[r] + k));
                }
            }
        }
    }

    __device__ __forceinline__ void add(const source& f, const uint8_t* table, const uint8_t* x,
                                        float (*acc)[4]) const {
        uint32_t a[4][4] = {{v[0][0].x, v[1][0].x, v[0][0].y, v[1][0].y},
                            {v[0][0].z, v[1][0].z, v[0][0].w, v[1][0].w},
                            {v[0][1].x, v[1][1].x, v[0][1].y, v[1][1].y},
                            {v[0][1].z, v[1][1].z, v[0][1].w, v[1][1].w}};
#pragma unroll
        for (int n = 0; n < MANY_ROWS / 8; n++) {
            const uint4* from = (const uint4*)(x + n * 8 * MANY_STRIDE);
            uint4 v0 = from[0];
            uint4 v1 = from[1];
            many_multiply(acc[n], a[0], v0.x, v0.y);
            many_multiply(acc[n], a[1], v0.z, v0.w);
            many_multiply(acc[n], a[2], v1.x, v1.y);
            many_multiply(acc[n], a[3], v1.z, v1.w);
        }
    }
};

// ---- what both share

// Requests a chunk of x: 64 rows of 8 pieces. Rows and columns that do not exist repeat others:
// their results are never written, or their weights are 0.
__device__ __forceinline__ void many_request(const decode_product& p, uint8_t* stage,
                                             int32_t first_row, int32_t rows, int32_t chunk) {
    int32_t row = (int32_t)threadIdx.x / 8;
    int32_t k = chunk * 64 + (int32_t)threadIdx.x % 8 * 8;
    const bf16* from =
        p.x + (first_row + (row < rows ? row : rows - 1)) * p.ldx + (k < p.K ? k : p.K - 8);
    uint32_t to = (uint32_t)__cvta_generic_to_shared(stage + row * MANY_STRIDE +
                                                     threadIdx.x % 8 * 16);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
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

// Columns of a row of z in shared memory: no bank conflicts.
__device__ __forceinline__ int32_t many_low_wide(int32_t rank) {
    return (rank + 15) / 16 * 16 + 8;
}

// z as far as this split takes it, in shared memory, [MANY_ROWS, many_low_wide(rank)].
__device__ __forceinline__ void many_gather(const decode_product& p, int32_t first_row,
                                            int32_t rows, bf16* zs) {
    int32_t rank = p.parts[0].rank;
    int32_t wide = many_low_wide(rank);
    int32_t each = (p.slices + (int32_t)gridDim.y - 1) / (int32_t)gridDim.y;
    int32_t begin = (int32_t)blockIdx.y * each;
    int32_t end = begin + each < p.slices ? begin + each : p.slices;
#pragma unroll 1
    for (int32_t i = (int32_t)threadIdx.x; i < MANY_ROWS * (wide - 8); i += MANY_THREADS) {
        int32_t n = i / (wide - 8);
        int32_t r = i % (wide - 8);
        float sum = 0.0f;
        if (n < rows && r < rank) {
            const float* from = p.low + (int64_t)(first_row + n) * rank + r;
#pragma unroll 4
            for (int32_t j = begin; j < end; j++) {
                sum += __ldcg(from + (int64_t)j * p.rows * rank);
            }
        }
        zs[n * wide + r] = to_bf16(sum);
    }
}

// Brings sB of a tile as far as L2.
__device__ __forceinline__ void many_prefetch(const decode_product& p, const many_tile& t) {
    if (t.inside && t.part.sb && (p.low || blockIdx.y == 0)) {
        const bf16* from = t.part.sb + (int64_t)t.first * t.part.rank;
        int32_t rows = t.part.N - t.first < 16 ? t.part.N - t.first : 16;
#pragma unroll 1
        for (int32_t i = (int32_t)threadIdx.x % 32 * 64; i < rows * t.part.rank; i += 32 * 64) {
            asm volatile("prefetch.global.L2 [%0];" ::"l"(from + i));
        }
    }
}

// [z] [sB]^T, where row n of z is z + n stride.
__device__ __forceinline__ void many_adapter(const many_tile& t, const bf16* z, int64_t stride,
                                             int32_t rows, float (*acc)[4]) {
    int32_t g = (int32_t)threadIdx.x % 32 / 4;
    int32_t k = (int32_t)threadIdx.x % 4 * 2;
    int32_t rank = t.part.rank;
    int32_t low = t.first + g < t.part.N ? t.first + g : t.part.N - 1;
    int32_t high = t.first + g + 8 < t.part.N ? t.first + g + 8 : t.part.N - 1;
    const bf16* b0 = t.part.sb + (int64_t)low * rank;
    const bf16* b1 = t.part.sb + (int64_t)high * rank;
    bool even = ((rank | t.part.z_at) & 1) == 0;
#pragma unroll 1
    for (int32_t at = k; at - k < rank; at += 16) {
        uint32_t a[4] = {many_two(b0, at, rank, even), many_two(b1, at, rank, even),
                         many_two(b0, at + 8, rank, even), many_two(b1, at + 8, rank, even)};
#pragma unroll
        for (int n = 0; n < MANY_ROWS / 8; n++) {
            int32_t row = n * 8 + g;
            const bf16* own = z + (row < rows ? row : rows - 1) * stride;
            many_multiply(acc[n], a, many_two(own, at, rank, even),
                          many_two(own, at + 8, rank, even));
        }
    }
}

// Adds up the splits, if this block is the last one of its tile; false if it is not. Sums are kept
// as the lanes hold them.
__device__ __forceinline__ bool many_join(const decode_many& m, float (*acc)[4], bool inside,
                                          int32_t* last) {
    int32_t tile = (int32_t)(blockIdx.z * gridDim.x + blockIdx.x);
    int32_t splits = (int32_t)gridDim.y;
    float4* room = (float4*)(m.room + (int64_t)tile * splits * (MANY_ROWS * 256)) + threadIdx.x;
    float4* own = room + (int64_t)blockIdx.y * (MANY_ROWS * 64);
#pragma unroll
    for (int i = 0; i < MANY_ROWS / 8; i++) {
        if (inside) {
            own[i * MANY_THREADS] = make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
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
    for (int i = 0; i < MANY_ROWS / 2; i++) {
        acc[i / 4][i % 4] = 0.0f;
    }
#pragma unroll 2
    for (int32_t j = 0; j < splits; j++) {
        const float4* from = room + (int64_t)j * (MANY_ROWS * 64);
        float4 w[MANY_ROWS / 8];
#pragma unroll
        for (int i = 0; i < MANY_ROWS / 8; i++) {
            w[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (inside) {
                w[i] = __ldcg(from + i * MANY_THREADS);
            }
        }
#pragma unroll
        for (int i = 0; i < MANY_ROWS / 8; i++) {
            acc[i][0] += w[i].x;
            acc[i][1] += w[i].y;
            acc[i][2] += w[i].z;
            acc[i][3] += w[i].w;
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
__device__ __forceinline__ void many_place(const decode_many& m, const many_tile& t,
                                           const float (*acc)[4], int32_t slot, float* results) {
    const decode_product& p = m.p;
    int32_t g = (int32_t)threadIdx.x % 32 / 4;
    bool biased = t.part.bias && t.inside && (m.apart == 0 || blockIdx.y == 0);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int32_t at = t.first + g + r * 8;
        float bias = biased && at < t.part.N ? to_float(t.part.bias[at]) : 0.0f;
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
__device__ __forceinline__ void many_write(const decode_many& m, const float* results,
                                           int32_t first_row, int32_t rows) {
    const decode_product& p = m.p;
    int32_t fours = p.gated != 0 ? 32 : 64;
    int32_t column = (int32_t)threadIdx.x % fours * 4;
    many_tile t = many_find(p, column / 16);
    int32_t at = t.first + column % 16;
    int32_t count = t.inside ? t.part.N - at : 0;
    int64_t to = (first_row + (m.apart != 0 ? (int64_t)blockIdx.y * p.rows : 0)) * p.ldy +
                 t.part.y_at + at;
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
    int32_t warp = (int32_t)threadIdx.x / 32 % 8; // the others take further rows of A
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

// What is left to do with a warp's sums. `results` may replace all that is in shared memory but zs.
__device__ __forceinline__ void many_end(const decode_many& m, float (*acc)[4], float* results,
                                         const bf16* zs, int32_t first_row, int32_t rows,
                                         int32_t* last) {
    const decode_product& p = m.p;
    int32_t warp = (int32_t)threadIdx.x / 32;
    asm volatile("" : "+r"(warp)); // the tile is not kept in registers until here
    many_tile tile = many_find(p, warp);
    if (tile.inside && tile.part.sb && (p.low || blockIdx.y == 0)) {
        const bf16* z = p.low ? zs : p.x + first_row * p.ldx + tile.part.z_at;
        many_adapter(tile, z, p.low ? many_low_wide(tile.part.rank) : p.ldx, rows, acc);
    }
    if (gridDim.y > 1 && m.apart == 0 && !many_join(m, acc, tile.inside, last)) {
        return;
    }
    __syncthreads(); // tables and stages are free
    many_place(m, tile, acc, warp, results);
    __syncthreads();
    if (p.gated != 0) {
        many_gate(p.gated, results);
    }
    many_write(m, results, first_row, rows);
    if (p.gated != 0 && p.a) {
        many_low(p, results, first_row, rows);
    }
}

// Dynamic shared memory: the tables of W, or MANY_RESULTS bytes if those are more, then the stages
// of x, and z if it is in partial sums.
template <class W> __device__ __forceinline__ void many_run(const decode_many& m, uint8_t* shared) {
    __shared__ int32_t last;
    const decode_product& p = m.p;
    int32_t first_row = (int32_t)blockIdx.z * MANY_ROWS;
    int32_t rows = p.rows - first_row < MANY_ROWS ? p.rows - first_row : MANY_ROWS;
    int32_t chunks = (p.K + 63) / 64 - (int32_t)blockIdx.y * m.each;
    chunks = chunks < m.each ? chunks : m.each;
    int32_t start = (int32_t)blockIdx.y * m.each;
    uint8_t* stages = shared + (W::SHARED > MANY_RESULTS ? W::SHARED : MANY_RESULTS);
    bf16* zs = (bf16*)(stages + MANY_STAGES * MANY_STAGE);
    many_tile tile = many_find(p, (int32_t)threadIdx.x / 32);
    typename W::source source;
    W next[W::DEPTH];
    // It is long because requests and their use belong to one loop.
    if (tile.inside) {
        source = W::find(tile, p.K);
#pragma unroll
        for (int i = 0; i < W::DEPTH; i++) {
            if (i < chunks) {
                next[i].load(source, p.K, start + i);
            }
        }
    }
    if (W::SHARED > 0) {
        many_tables(p, shared);
    }
    many_prefetch(p, tile);
    early_wait();
#pragma unroll
    for (int i = 0; i < MANY_STAGES - 1; i++) {
        if (i < chunks) {
            many_request(p, stages + i * MANY_STAGE, first_row, rows, start + i);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    if (p.low) {
        many_gather(p, first_row, rows, zs);
    }
    float acc[MANY_ROWS / 8][4];
#pragma unroll
    for (int n = 0; n < MANY_ROWS / 8; n++) {
        acc[n][0] = 0.0f;
        acc[n][1] = 0.0f;
        acc[n][2] = 0.0f;
        acc[n][3] = 0.0f;
    }
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t own = lane / 4 * MANY_STRIDE + lane % 4 * 32;
    int32_t stage = 0;
    int32_t ahead = MANY_STAGES - 1;
#pragma unroll 1
    for (int32_t c = 0; c < chunks; c += W::DEPTH) {
#pragma unroll
        for (int i = 0; i < W::DEPTH; i++) {
            if (c + i < chunks) {
                asm volatile("cp.async.wait_group %0;" ::"n"(MANY_STAGES - 2) : "memory");
                __syncthreads(); // this chunk is there, and the stage of the last one is free
                if (c + i + MANY_STAGES - 1 < chunks) {
                    many_request(p, stages + ahead * MANY_STAGE, first_row, rows,
                                 start + c + i + MANY_STAGES - 1);
                }
                asm volatile("cp.async.commit_group;" ::: "memory");
                if (tile.inside) {
                    next[i].add(source, shared, stages + stage * MANY_STAGE + own, acc);
                    if (c + i + W::DEPTH < chunks) {
                        next[i].load(source, p.K, start + c + i + W::DEPTH);
                    }
                }
                stage = stage + 1 < MANY_STAGES ? stage + 1 : 0;
                ahead = ahead + 1 < MANY_STAGES ? ahead + 1 : 0;
            }
        }
    }
    many_end(m, acc, (float*)shared, zs, first_row, rows, &last);
}

#endif
