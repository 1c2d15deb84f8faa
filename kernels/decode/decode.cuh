// decode.cuh - products of up to 8 rows of activations at a time with the weights of a stack, for
// decoding.
//
//   y[n, :] = alpha [x | z][n, :] [W | sB]^T + bias      (z: the columns of x from z_at on)
//   or, for gate and up,   y[n, :] = act(gate[n, :]) up[n, :], both rounded to bf16 before
//
// W has up to three parts (q, k and v, for example), NF4 as described in nf4.cuh or bf16. The rows
// of W are the rows of m16n8k16, the rows of x its columns, so that one row costs what eight do. A
// tile is 16 rows of a part. The warps of a block divide K: warp w takes steps w, w + warps, ...,
// whose sums are added in the order of the warps by one of them, in turn, while the others begin
// the next tile. What a step needs from memory is requested one step ahead.
//
// NF4: a step is 256 elements of K, four blocks of 64. Lane 4 g + t holds 16 elements of each block
// in rows g and g + 8 of W, and the same 16 of row g of x: k is permuted alike for both. Levels are
// rounded to bf16, and the sum over a block is multiplied by its scale in f32. A byte of codes
// becomes a pair of levels by one look-up in shared memory; the table has a copy for every lane, so
// that no two lanes meet in a bank. bf16: a step is 128 elements, lane 4 g + t holds 8 of each 32.
//
// For stacks whose adapter needs the whole row of y's input first (o and down), z is left to the
// kernel that follows: z[slice][n][r] = sum over the slice of K of x[n, k] A[r, k], for
// DECODE_SLICES slices, which decode_norm adds in order.
//
// Launch: grid (row groups of 8, any number of blocks), 32 * warps threads; the groups of a tile
// run at the same time, so that one of them reads W from memory for all. The order of every sum
// depends only on K and warps. x, W and y are 16-byte aligned, ldx a multiple of 8; K is a multiple
// of 64 with NF4, of 8 otherwise. Determinism: one writer per output, fixed order.
#ifndef QLORA_DECODE_CUH
#define QLORA_DECODE_CUH

#include "../early.cuh"
#include "../vec.cuh"

enum {
    DECODE_WARPS = 16,
    DECODE_SLICES = 64,
    DECODE_TABLE = 256 * 32 * 4, // bytes
    DECODE_MAP = 256 * 4,
    DECODE_ROWS = 8 // of x
};

// Same layout as qlora__decode_part.
struct decode_part {
    const void* w;
    const float* absmax; // plain scales; null with q, scales and offset
    const uint8_t* q;
    const float* scales;
    const float* offset;
    const bf16* sb; // [N, rank]; null = no adapter
    const bf16* bias;
    int64_t ld;    // bf16: elements from row to row
    int32_t first; // row of the weight that is row 0 of the part
    int32_t N;
    int32_t rank;
    int32_t z_at;
    int32_t y_at;
    int32_t block_shift; // log2
    int32_t group_shift;
    int32_t unused;
};

// Same layout as qlora__decode_product.
struct decode_product {
    decode_part parts[3];
    const float* maps; // levels and map, of all parts
    const bf16* x;
    void* y;
    const bf16* a; // [a_rank, K]: the adapter that is left to the next kernel
    float* z;
    int64_t ldx;
    int64_t ldy;
    int32_t count; // parts
    int32_t K;
    int32_t rows;
    int32_t y_is_bf16;
    int32_t gated; // 1: SiLU, 2: GELU; parts are gate and up
    int32_t a_rank;
    float alpha;
    float cap;
    const float* low; // decode_row.cuh
    int32_t slices;
    int32_t unused;
};

__device__ __forceinline__ void decode_multiply(float* c, uint32_t a0, uint32_t a1, uint32_t a2,
                                                uint32_t a3, uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Part i. Constant indices only: a run-time one would move the parameters to local memory.
__device__ __forceinline__ decode_part decode_pick(const decode_product& p, int32_t i) {
    decode_part part = p.parts[0];
    if (i == 1) {
        part = p.parts[1];
    } else if (i == 2) {
        part = p.parts[2];
    }
    return part;
}

// A tile of a block's list: the part, its 16 rows, and whether it is there at all.
struct decode_tile {
    decode_part part;
    int32_t first;
    bool gate;
    bool inside;
};

// Unit u of the list: a tile; for gate and up, two, of which `half` tells which.
__device__ __forceinline__ decode_tile decode_find(const decode_product& p, int32_t u,
                                                   int32_t half) {
    decode_tile t;
    int32_t tiles0 = (p.parts[0].N + 15) / 16;
    int32_t tiles1 = p.count > 1 ? (p.parts[1].N + 15) / 16 : 0;
    int32_t tiles2 = p.count > 2 ? (p.parts[2].N + 15) / 16 : 0;
    int32_t which = half;
    int32_t tile = u;
    if (p.gated == 0) {
        which = u < tiles0 ? 0 : u < tiles0 + tiles1 ? 1 : 2;
        tile = u - (which > 0 ? tiles0 : 0) - (which > 1 ? tiles1 : 0);
    }
    t.part = decode_pick(p, which);
    t.first = tile * 16;
    t.gate = p.gated != 0 && half == 0;
    t.inside = u < (p.gated != 0 ? tiles0 : tiles0 + tiles1 + tiles2);
    return t;
}

// ---- NF4

struct decode_nf4 {
    enum { STEP = 256 };
    uint2 codes[4][2]; // blocks, rows g and g + 8
    float s[2];        // of block lane % 4 of the step
    uint32_t q[2];

    static __device__ __forceinline__ void tables(const decode_product& p, uint8_t* shared) {
        for (int32_t i = (int32_t)threadIdx.x; i < 256 * 8; i += (int32_t)blockDim.x) {
            uint32_t pair = pack_bf16(p.maps[i / 8 / 16], p.maps[i / 8 % 16]);
            ((uint4*)shared)[i] = make_uint4(pair, pair, pair, pair);
        }
        for (int32_t i = (int32_t)threadIdx.x; i < 256; i += (int32_t)blockDim.x) {
            ((float*)(shared + DECODE_TABLE))[i] = p.maps[16 + i];
        }
    }

    __device__ __forceinline__ void load(const decode_part& w, int32_t first, int32_t K,
                                         int32_t step) {
        int32_t g = (int32_t)threadIdx.x % 32 / 4;
        int32_t t = (int32_t)threadIdx.x % 4;
        int32_t blocks = K / 64;
        int32_t shift = w.block_shift - 6;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int32_t row = first + g + 8 * r;
            row = row < w.N ? row : w.N - 1; // results past the last row are never written
            int64_t at = (int64_t)(w.first + row) * blocks + step * 4;
            s[r] = 0.0f;
            q[r] = 0;
            if (step * 4 + t < blocks) {
                s[r] = w.absmax ? w.absmax[(at + t) >> shift]
                                : w.scales[(at + t) >> (shift + w.group_shift)];
                if (!w.absmax) {
                    q[r] = w.q[(at + t) >> shift];
                }
            }
#pragma unroll
            for (int b = 0; b < 4; b++) {
                codes[b][r] = make_uint2(0, 0);
                if (step * 4 + b < blocks) {
                    codes[b][r] = *(const uint2*)((const uint8_t*)w.w + (at + b) * 32 + t * 8);
                }
            }
        }
    }
};

// The two levels of byte i of a word as a bf16 pair; the earlier element is in the low half.
__device__ __forceinline__ uint32_t decode_pair(const uint8_t* table, uint2 codes, int i,
                                                uint32_t lane4) {
    uint32_t word = i < 4 ? codes.x : codes.y;
    uint32_t at = i % 4 == 0 ? word << 7 : word >> (8 * (i % 4) - 7);
    return *(const uint32_t*)(table + ((at & 0x7f80u) | lane4));
}

// x of a step, as the operands of its products.
struct decode_x256 {
    uint4 v[4][2];
    __device__ __forceinline__ void load(const bf16* row, int32_t K, int32_t step) {
        int32_t t = (int32_t)threadIdx.x % 4;
#pragma unroll
        for (int b = 0; b < 4; b++) {
            int32_t k = step * 256 + b * 64 + t * 16;
            v[b][0] = make_uint4(0, 0, 0, 0);
            v[b][1] = v[b][0];
            if (k < K) {
                v[b][0] = *(const uint4*)(row + k);
                v[b][1] = *(const uint4*)(row + k + 8);
            }
        }
    }
};

__device__ __forceinline__ void decode_step(const decode_nf4& w, const decode_x256& x,
                                            const decode_part& part, const uint8_t* table,
                                            float middle, float* acc) {
    const float* map = (const float*)(table + DECODE_TABLE);
    uint32_t lane = threadIdx.x % 32;
    float own[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        own[r] = part.absmax ? w.s[r] : __fadd_rn(__fmul_rn(map[w.q[r]], w.s[r]), middle);
    }
#pragma unroll
    for (int b = 0; b < 4; b++) {
        float s0 = __shfl_sync(QLORA_FULL_WARP, own[0], (int)(lane & 28u) + b);
        float s1 = __shfl_sync(QLORA_FULL_WARP, own[1], (int)(lane & 28u) + b);
        float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint4 v = x.v[b][i / 2];
            decode_multiply(c, decode_pair(table, w.codes[b][0], 2 * i, lane * 4),
                            decode_pair(table, w.codes[b][1], 2 * i, lane * 4),
                            decode_pair(table, w.codes[b][0], 2 * i + 1, lane * 4),
                            decode_pair(table, w.codes[b][1], 2 * i + 1, lane * 4),
                            i % 2 == 0 ? v.x : v.z, i % 2 == 0 ? v.y : v.w);
        }
        acc[0] += s0 * c[0];
        acc[1] += s0 * c[1];
        acc[2] += s1 * c[2];
        acc[3] += s1 * c[3];
    }
}

// ---- bf16

struct decode_dense {
    enum { STEP = 128 };
    uint4 v[4][2];
    static __device__ __forceinline__ void tables(const decode_product& p, uint8_t* shared) {
    }
    __device__ __forceinline__ void load(const decode_part& w, int32_t first, int32_t K,
                                         int32_t step) {
        int32_t g = (int32_t)threadIdx.x % 32 / 4;
        int32_t t = (int32_t)threadIdx.x % 4;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int32_t row = first + g + 8 * r;
            row = row < w.N ? row : w.N - 1;
            const bf16* from = (const bf16*)w.w + (w.first + row) * w.ld;
#pragma unroll
            for (int b = 0; b < 4; b++) {
                int32_t k = step * 128 + b * 32 + t * 8;
                v[b][r] = make_uint4(0, 0, 0, 0);
                if (k < K) {
                    v[b][r] = *(const uint4*)(from + k);
                }
            }
        }
    }
};

struct decode_x128 {
    uint4 v[4];
    __device__ __forceinline__ void load(const bf16* row, int32_t K, int32_t step) {
        int32_t t = (int32_t)threadIdx.x % 4;
#pragma unroll
        for (int b = 0; b < 4; b++) {
            int32_t k = step * 128 + b * 32 + t * 8;
            v[b] = make_uint4(0, 0, 0, 0);
            if (k < K) {
                v[b] = *(const uint4*)(row + k);
            }
        }
    }
};

__device__ __forceinline__ void decode_step(const decode_dense& w, const decode_x128& x,
                                            const decode_part& part, const uint8_t* table,
                                            float middle, float* acc) {
#pragma unroll
    for (int b = 0; b < 4; b++) {
        uint4 top = w.v[b][0];
        uint4 low = w.v[b][1];
        decode_multiply(acc, top.x, low.x, top.y, low.y, x.v[b].x, x.v[b].y);
        decode_multiply(acc, top.z, low.z, top.w, low.w, x.v[b].z, x.v[b].w);
    }
}

// ---- what both share

// z of the adapter that is left to the next kernel: one warp per row of A, one slice of K per turn.
__device__ __forceinline__ void decode_slices(const decode_product& p, int32_t first,
                                              int32_t rows) {
    int32_t warps = (int32_t)blockDim.x / 32;
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t width = ((p.K + DECODE_SLICES - 1) / DECODE_SLICES + 7) / 8 * 8;
    for (int32_t slice = (int32_t)blockIdx.y; slice < DECODE_SLICES; slice += (int32_t)gridDim.y) {
        int32_t begin = slice * width;
        int32_t end = begin + width < p.K ? begin + width : p.K;
        for (int32_t i = (int32_t)threadIdx.x / 32; i < p.a_rank * rows; i += warps) {
            int32_t r = i % p.a_rank;
            int32_t n = first + i / p.a_rank;
            float sum = 0.0f;
            for (int32_t k = begin + lane * 8; k < end; k += 256) {
                float a[8];
                float v[8];
                unpack(*(const uint4*)(p.a + (int64_t)r * p.K + k), a);
                unpack(*(const uint4*)(p.x + n * p.ldx + k), v);
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    sum += a[j] * v[j];
                }
            }
            sum = warp_sum(sum);
            if (lane == 0) {
                p.z[((int64_t)slice * p.rows + n) * p.a_rank + r] = sum;
            }
        }
    }
}

// The part of an adapter's row that its warp requests ahead.
struct decode_ahead {
    uint4 v[2];
};

// sum over r of sB[row, r] z[r]
__device__ __forceinline__ float decode_adapter(const decode_part& part, const decode_ahead& ahead,
                                                bool vector, int32_t row, const bf16* z) {
    float sum = 0.0f;
    int32_t r = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (vector && 8 * i < part.rank) {
            float a[8];
            float b[8];
            unpack(ahead.v[i], a);
            unpack(*(const uint4*)(z + 8 * i), b);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                sum += a[j] * b[j];
            }
            r += 8;
        }
    }
#pragma unroll 1
    for (; r < part.rank; r++) {
        sum += to_float(part.sb[(int64_t)row * part.rank + r]) * to_float(z[r]);
    }
    return sum;
}

// Adds the sums of the warps for a tile and writes its results; one warp does it.
__device__ __forceinline__ void decode_finish(const decode_product& p, const decode_tile& tile,
                                              const decode_ahead& ahead, bool vector,
                                              const float* sums, float* gates, int32_t first_row,
                                              int32_t rows) {
    int32_t warps = (int32_t)blockDim.x / 32;
    int32_t lane = (int32_t)threadIdx.x % 32;
    const decode_part& part = tile.part;
    for (int32_t i = lane; i < 16 * rows; i += 32) {
        int32_t row = i % 16;
        int32_t n = i / 16;
        // Tensor-core layout: lane 4 (row % 8) + n / 2 holds four sums.
        const float* at = sums + (row % 8 * 4 + n / 2) * 4 + row / 8 * 2 + n % 2;
        float v = at[0];
#pragma unroll 4
        for (int32_t w = 1; w < warps; w++) {
            v += at[w * 128];
        }
        v *= p.alpha;
        int32_t column = tile.first + row;
        if (column < part.N) {
            if (part.sb) {
                v += decode_adapter(part, ahead, vector, column,
                                    p.x + (first_row + n) * p.ldx + part.z_at);
            }
            if (part.bias) {
                v += to_float(part.bias[column]);
            }
            if (p.cap > 0.0f) {
                v = p.cap * tanhf(to_float(to_bf16(v)) / p.cap);
            }
            int64_t to = (first_row + n) * p.ldy + part.y_at + column;
            if (p.gated == 0 && p.y_is_bf16 == 0) {
                ((float*)p.y)[to] = v;
                continue;
            }
            bf16 rounded = to_bf16(v);
            if (tile.gate) {
                gates[i] = to_float(rounded);
                continue;
            }
            if (p.gated != 0) {
                float g = gates[i];
                float u = p.gated == 1 ? g : 1.5957691216057308f * (g + 0.044715f * g * g * g);
                float s = 1.0f / (1.0f + exp_of(-u, (const bf16*)0));
                rounded = to_bf16(g * s * to_float(rounded));
            }
            ((bf16*)p.y)[to] = rounded;
        }
    }
}

// Dynamic shared memory: with NF4, the table and the map; then 2 * warps * 128 floats of sums and
// 128 gates.
template <class STEP, class X>
__device__ __forceinline__ void decode_run(const decode_product& p, uint8_t* table, float* sums,
                                           float middle0, float middle1, float middle2) {
    int32_t warps = (int32_t)blockDim.x / 32;
    int32_t warp = (int32_t)threadIdx.x / 32;
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t steps = (p.K + STEP::STEP - 1) / STEP::STEP;
    int32_t first_row = (int32_t)blockIdx.x * DECODE_ROWS;
    int32_t rows = p.rows - first_row < DECODE_ROWS ? p.rows - first_row : DECODE_ROWS;
    int32_t own_row = lane / 4 < rows ? lane / 4 : rows - 1;
    const bf16* x_row = p.x + (first_row + own_row) * p.ldx;
    float* gates = sums + 2 * warps * 128;
    int32_t unit = (int32_t)blockIdx.y;
    int32_t half = 0;
    int32_t turn = 0; // which warp finishes the tile
    int32_t buffer = 0;
    int32_t held = -1; // the step whose x is in registers
    // The function is long because the loads for the next step and the sums of the last one belong
    // to the same loop.
    decode_tile tile = decode_find(p, unit, half);
    STEP next;
    X x;
    if (tile.inside) {
        next.load(tile.part, tile.first, p.K, warp);
    }
    STEP::tables(p, table);
    early_wait();
    if (p.a) {
        decode_slices(p, first_row, rows);
    }
    __syncthreads(); // the tables
#pragma unroll 1
    while (tile.inside) {
        const decode_part& part = tile.part;
        decode_ahead ahead;
        bool vector = part.sb && part.rank % 8 == 0 && part.z_at % 8 == 0;
        int32_t last = tile.first + lane % 16 < part.N ? tile.first + lane % 16 : part.N - 1;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            ahead.v[i] = make_uint4(0, 0, 0, 0);
            if (warp == turn && vector && 8 * i < part.rank) {
                ahead.v[i] = *(const uint4*)(part.sb + (int64_t)last * part.rank + 8 * i);
            }
        }
        int32_t next_half = p.gated != 0 ? 1 - half : 0;
        int32_t next_unit = next_half == 0 ? unit + (int32_t)gridDim.y : unit;
        decode_tile after = decode_find(p, next_unit, next_half);
        float middle = half == 0 && p.gated != 0 ? middle0 : middle1;
        if (p.gated == 0) {
            middle = part.y_at == p.parts[0].y_at   ? middle0
                     : part.y_at == p.parts[1].y_at ? middle1
                                                    : middle2;
        }
        float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
        for (int32_t step = warp; step < steps; step += warps) {
            STEP now = next;
            if (step + warps < steps) {
                next.load(part, tile.first, p.K, step + warps);
            } else if (after.inside) {
                next.load(after.part, after.first, p.K, warp);
            }
            if (step != held) {
                x.load(x_row, p.K, step);
                held = step;
            }
            decode_step(now, x, part, table, middle, acc);
        }
        float* place = sums + buffer * warps * 128;
        *(float4*)(place + warp * 128 + lane * 4) = make_float4(acc[0], acc[1], acc[2], acc[3]);
        __syncthreads();
        if (warp == turn) {
            decode_finish(p, tile, ahead, vector, place, gates, first_row, rows);
        }
        turn = turn + 1 < warps ? turn + 1 : 0;
        buffer = 1 - buffer;
        unit = next_unit;
        half = next_half;
        tile = after;
    }
}

#endif
