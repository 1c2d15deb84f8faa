// decode_many.cuh - products of many rows of activations with the weights of a stack, for decoding
// up to 64 texts at a time. The formula is that of decode.cuh; the adapter that is left to the next
// kernel (`a`) is a product of its own here.
//
// A block has 16 tiles of 16 rows of W, one per warp, or 8 of gate and the same 8 of up, and takes
// `each` chunks of 64 columns. W is read once; a chunk of x is in shared memory for all warps,
// MANY_STAGES - 1 chunks ahead, and a warp's W in registers, W::DEPTH chunks ahead. If the columns
// are split over blocks, the block of a tile that arrives last adds the sums in the order of the
// splits, so timing does not matter.
//
// The rows of W are the rows of m16n8k16, eight rows of x its columns; k is permuted alike for
// both: lane 4 g + t holds columns 16 t to 16 t + 15 of a chunk. NF4: levels are rounded to bf16,
// and the sum over a block of 64 is multiplied by its scale in f32. The adapter of split 0 follows
// as further columns, [x | z] [W | sB]^T.
//
// Launch: grid (tiles, splits, groups of 64 rows), 512 threads. `counters` are 0 before and after.
#ifndef QLORA_DECODE_MANY_CUH
#define QLORA_DECODE_MANY_CUH

#include "decode_row.cuh"

enum {
    MANY_ROWS = 64,
    MANY_WARPS = 16,
    MANY_STAGES = 3,
    MANY_STRIDE = 144, // bytes of a row of x in shared memory: no bank conflicts
    MANY_STAGE = MANY_ROWS * MANY_STRIDE,
    MANY_WIDE = MANY_WARPS * 16 + 4,      // floats of a row of sums: no bank conflicts
    MANY_SUMS = MANY_ROWS * MANY_WIDE * 4 // bytes; the sums replace the tables
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

// Where a warp's tile is.
struct many_tile {
    decode_part part;
    int32_t first; // row of the part
    bool inside;
};

__device__ __forceinline__ many_tile many_find(const decode_product& p, int32_t slot) {
    row_cursor c;
    many_tile t;
    if (p.gated != 0) {
        c.which = slot / 8;
        c.unit = (int32_t)blockIdx.x * 8 + slot % 8;
        c.end = row_tiles(p, c.which);
    } else {
        row_start(p, c, (int32_t)blockIdx.x * MANY_WARPS + slot);
    }
    t.part = decode_pick(p, c.which);
    t.first = c.unit * 16;
    t.inside = c.unit < c.end;
    return t;
}

// ---- NF4

struct many_nf4 {
    enum { DEPTH = 4, SHARED = ROW_TABLE + ROW_MAP };
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
            int32_t row = t.first + (int32_t)threadIdx.x % 32 / 4 + 8 * r;
            row = row < w.N ? row : w.N - 1; // results past the last row are never written
            f.at[r] = (w.first + row) * (K / 64);
            f.codes[r] = (const uint8_t*)w.w + (int64_t)(w.first + row) * (K / 2) +
                         threadIdx.x % 4 * 8;
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
        const float* map = (const float*)(table + ROW_TABLE);
        uint32_t lane4 = threadIdx.x % 32 * 4;
        uint32_t a[4][4];
        float scale[2];
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                uint32_t word = i < 2 ? codes[j % 2].x : codes[j % 2].y;
                uint32_t byte = (uint32_t)(2 * (i % 2) + j / 2);
                a[i][j] = *(const uint32_t*)(table +
                                             __byte_perm(word, lane4, 0x5504u | byte << 4));
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
            int32_t row = t.first + (int32_t)threadIdx.x % 32 / 4 + 8 * r;
            row = row < t.part.N ? row : t.part.N - 1;
            f.rows[r] = (const bf16*)t.part.w + (t.part.first + row) * t.part.ld;
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

// Two columns of a row of bf16 as an operand; 0 from `count` on.
__device__ __forceinline__ uint32_t many_two(const bf16* row, int32_t at, int32_t count) {
    uint32_t lo = at < count ? row[at].bits : 0u;
    uint32_t hi = at + 1 < count ? row[at + 1].bits : 0u;
    return lo | hi << 16;
}

// [z] [sB]^T
__device__ __forceinline__ void many_adapter(const decode_product& p, const many_tile& t,
                                             int32_t first_row, int32_t rows, float (*acc)[4]) {
    int32_t g = (int32_t)threadIdx.x % 32 / 4;
    int32_t k = (int32_t)threadIdx.x % 4 * 2;
    const decode_part& w = t.part;
    const bf16* b[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int32_t row = t.first + g + 8 * r;
        b[r] = w.sb + (int64_t)(row < w.N ? row : w.N - 1) * w.rank;
    }
#pragma unroll 1
    for (int32_t at = k; at - k < w.rank; at += 16) {
        uint32_t a[4] = {many_two(b[0], at, w.rank), many_two(b[1], at, w.rank),
                         many_two(b[0], at + 8, w.rank), many_two(b[1], at + 8, w.rank)};
#pragma unroll
        for (int n = 0; n < MANY_ROWS / 8; n++) {
            int32_t row = n * 8 + g;
            const bf16* z = p.x + (first_row + (row < rows ? row : rows - 1)) * p.ldx + w.z_at;
            many_multiply(acc[n], a, many_two(z, at, w.rank), many_two(z, at + 8, w.rank));
        }
    }
}

// Adds up the splits, if this block is the last one of its tile; false if it is not.
__device__ __forceinline__ bool many_join(const decode_many& m, float* sums, int32_t wide,
                                          int32_t* last) {
    int32_t tile = (int32_t)(blockIdx.z * gridDim.x + blockIdx.x);
    int32_t splits = (int32_t)gridDim.y;
    float* room = m.room + (int64_t)tile * splits * (MANY_ROWS * 256);
    int32_t fours = wide / 4; // columns that exist, of a row of sums
    for (int32_t i = (int32_t)threadIdx.x; i < MANY_ROWS * fours; i += (int32_t)blockDim.x) {
        float4 v = *(const float4*)(sums + i / fours * MANY_WIDE + i % fours * 4);
        *(float4*)(room + (int64_t)blockIdx.y * (MANY_ROWS * 256) + i * 4) = v;
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
    for (int32_t i = (int32_t)threadIdx.x; i < MANY_ROWS * fours; i += (int32_t)blockDim.x) {
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
        for (int32_t j = 0; j < splits; j++) {
            float4 w = __ldcg((const float4*)(room + (int64_t)j * (MANY_ROWS * 256) + i * 4));
            v.x += w.x;
            v.y += w.y;
            v.z += w.z;
            v.w += w.w;
        }
        *(float4*)(sums + i / fours * MANY_WIDE + i % fours * 4) = v;
    }
    if (threadIdx.x == 0) {
        m.counters[tile] = 0; // for the next product
    }
    __syncthreads();
    return true;
}

// Bias, cap and activation of the block's sums.
__device__ __forceinline__ void many_finish(const decode_product& p, const float* sums,
                                            int32_t first_row, int32_t rows) {
    int32_t width = p.gated != 0 ? 128 : 256;
    int32_t column = (int32_t)threadIdx.x % width;
    many_tile t = many_find(p, column / 16);
    int32_t at = t.first + column % 16;
    if (!t.inside || at >= t.part.N) {
        return;
    }
    float bias = t.part.bias ? to_float(t.part.bias[at]) : 0.0f;
    float up_bias = p.gated != 0 && p.parts[1].bias ? to_float(p.parts[1].bias[at]) : 0.0f;
    for (int32_t n = (int32_t)threadIdx.x / width; n < rows; n += (int32_t)blockDim.x / width) {
        float v = sums[n * MANY_WIDE + column] * p.alpha + bias;
        if (p.cap > 0.0f) {
            v = p.cap * tanhf(to_float(to_bf16(v)) / p.cap);
        }
        int64_t to = (first_row + n) * p.ldy + t.part.y_at + at;
        if (p.gated == 0 && p.y_is_bf16 == 0) {
            ((float*)p.y)[to] = v;
            continue;
        }
        bf16 rounded = to_bf16(v);
        if (p.gated != 0) {
            float g = to_float(rounded);
            float up = to_float(to_bf16(sums[n * MANY_WIDE + 128 + column] * p.alpha + up_bias));
            float u = p.gated == 1 ? g : 1.5957691216057308f * (g + 0.044715f * g * g * g);
            float s = 1.0f / (1.0f + exp_of(-u, (const bf16*)0));
            rounded = to_bf16(g * s * up);
        }
        ((bf16*)p.y)[to] = rounded;
    }
}

// Dynamic shared memory: the tables of W, or MANY_SUMS bytes if those are more, then the stages of
// x.
template <class W> __device__ __forceinline__ void many_run(const decode_many& m, uint8_t* shared) {
    __shared__ int32_t last;
    const decode_product& p = m.p;
    int32_t warp = (int32_t)threadIdx.x / 32;
    int32_t first_row = (int32_t)blockIdx.z * MANY_ROWS;
    int32_t rows = p.rows - first_row < MANY_ROWS ? p.rows - first_row : MANY_ROWS;
    int32_t chunks = (p.K + 63) / 64 - (int32_t)blockIdx.y * m.each;
    chunks = chunks < m.each ? chunks : m.each;
    int32_t start = (int32_t)blockIdx.y * m.each;
    uint8_t* stages = shared + (W::SHARED > MANY_SUMS ? W::SHARED : MANY_SUMS);
    many_tile tile = many_find(p, warp);
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
        row_nf4::tables(p, shared);
    }
    early_wait();
#pragma unroll
    for (int i = 0; i < MANY_STAGES - 1; i++) {
        if (i < chunks) {
            many_request(p, stages + i * MANY_STAGE, first_row, rows, start + i);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
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
    if (tile.inside && tile.part.sb && blockIdx.y == 0) {
        many_adapter(p, tile, first_row, rows, acc);
    }
    __syncthreads(); // the tables are free
    float* sums = (float*)shared;
#pragma unroll
    for (int n = 0; n < MANY_ROWS / 8; n++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            sums[(n * 8 + lane % 4 * 2 + j % 2) * MANY_WIDE + warp * 16 + lane / 4 + j / 2 * 8] =
                acc[n][j];
        }
    }
    __syncthreads();
    int32_t units = row_tiles(p, 0) + row_tiles(p, 1) + row_tiles(p, 2);
    units -= (int32_t)blockIdx.x * MANY_WARPS;
    int32_t wide = p.gated != 0 || units > MANY_WARPS ? 256 : units * 16;
    if (gridDim.y == 1 || many_join(m, sums, wide, &last)) {
        many_finish(p, sums, first_row, rows);
    }
}

#endif
