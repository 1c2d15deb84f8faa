// nf4_gemm.cu - products of a few rows with NF4 weights, dequantised on the fly.
// groups: bf16 nf4
//
//   y[M,N] = x[M,K] W[N,K]^T        x bf16, y bf16 or f32, M <= 32, K a multiple of 32
//
// for one weight or for two that share x. W is NF4 as described in nf4.cuh, with blocks of 32 or
// more; its elements have the same bf16 values that nf4_dequantise_bf16 writes. Sums are f32 on
// tensor cores.
//
// A row of W is processed in steps of 256 elements. In a step, thread t of four holds 64
// consecutive elements along K of a row of W, usually one block of scales, and the same 64 of a row
// of x. Four elements of each thread make one step of m16n8k16, whose k are thereby permuted in the
// same way for both operands. Positions in W are counted in units of 32 elements (16 bytes of
// codes), N * K / 32 < 2^32.
//
// A byte of codes is dequantised by one look-up in shared memory: the table has an entry of two f32
// levels for each of the 256 bytes, replicated sixteen times, so that the lanes of half a warp read
// from different banks whatever their codes are. (Byte permutes within registers run at half the
// rate of other integer instructions on sm_90: 28.8 us instead of 24.6 us for 16 x 14336 x 4096.)
//
// x is 16-byte aligned and ldx is a multiple of 8; the codes are 16-byte aligned. With one split,
// the blocks write y; otherwise each writes to a slice of partials[splits][M][N1 + N2], which
// qlora_nf4_gemm_reduce adds in order. Determinism: one writer per output, fixed order.
#include "../common.cuh"

enum { STEP = 256, COPIES = 16, PAIR_BYTES = 256 * COPIES * 8, TABLE_BYTES = PAIR_BYTES + 256 * 4 };

#define NF4_WEIGHT(n)                                                                              \
    const uint8_t *codes##n, const float *absmax##n, const uint8_t *q##n, const float *scales##n,  \
        const float *offset##n, const float *maps##n, int32_t block_shift##n,                      \
        int32_t group_shift##n, int32_t N##n, void *y##n, int64_t ldy##n
#define NF4_GEMM_PARAMETERS                                                                        \
    const bf16 *x, int64_t ldx, int32_t M, int32_t K, int32_t range, int32_t y_is_bf16,            \
        float *partials, int32_t blocks1, NF4_WEIGHT(1), NF4_WEIGHT(2)
#define NF4_OPEN(second, tables)                                                                   \
    open_weight(second ? codes2 : codes1, second ? absmax2 : absmax1, second ? q2 : q1,            \
                second ? scales2 : scales1, second ? offset2 : offset1, second ? maps2 : maps1,    \
                second ? block_shift2 : block_shift1, second ? group_shift2 : group_shift1,        \
                second ? N2 : N1, K, tables)

__device__ __forceinline__ void copy_async(uint32_t to, const void* from, int32_t bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void multiply(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Multiplies eight columns of two rows of x, eight rows apart, by eight elements of a row of
// W each.
__device__ __forceinline__ void multiply_eight(float* c, uint4 top, uint4 bottom,
                                               const uint32_t* b) {
    uint32_t left[4] = {top.x, bottom.x, top.y, bottom.y};
    uint32_t right[4] = {top.z, bottom.z, top.w, bottom.w};
    multiply(c, left, b[0], b[1]);
    multiply(c, right, b[2], b[3]);
}

// Converts eight codes to eight bf16 values. A byte holds the earlier element in its high half.
__device__ __forceinline__ void widen(uint32_t* out, uint32_t word, const uint8_t* pairs,
                                      float scale) {
    const uint32_t ENTRY = COPIES * 8;
    uint32_t copy = threadIdx.x % COPIES * 8;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t at = i == 0 ? word * ENTRY : word >> (8 * i - 7);
        float2 v = *(const float2*)(pairs + ((at & 255 * ENTRY) | copy));
        out[i] = pack_bf16(__fmul_rn(v.x, scale), __fmul_rn(v.y, scale));
    }
}

// A weight as seen by one thread. Plain scales are handled as map[0] * absmax + 0 with map[0] = 1.
struct weight {
    const uint8_t* codes;
    const uint8_t* q; // null for plain scales
    const float* source;
    const uint8_t* pairs; // shared: the levels of each byte, replicated COPIES times
    const float* map;     // shared: 256 entries
    float middle;
    int32_t N;
    int32_t block_shift; // log2 of a block's size in units
    int32_t source_shift;
    uint32_t units; // per row
    bool fine;      // a thread's 64 elements may span two blocks
};

// All threads of the block copy the tables; the caller must follow with a barrier.
__device__ __forceinline__ weight open_weight(const uint8_t* codes, const float* absmax,
                                              const uint8_t* q, const float* scales,
                                              const float* offset, const float* maps,
                                              int32_t block_shift, int32_t group_shift, int32_t N,
                                              int32_t K, uint8_t* tables) {
    weight w;
    w.codes = codes;
    w.q = absmax ? 0 : q;
    w.source = absmax ? absmax : scales;
    w.pairs = tables;
    w.map = (const float*)(tables + PAIR_BYTES);
    w.middle = absmax ? 0.0f : *offset;
    w.N = N;
    w.block_shift = block_shift - 5;
    w.source_shift = absmax ? block_shift - 5 : block_shift - 5 + group_shift;
    w.units = (uint32_t)K / 32;
    w.fine = block_shift == 5 || K % 64 != 0;
#pragma unroll 4
    for (int32_t i = (int32_t)threadIdx.x; i < 256 * COPIES; i += (int32_t)blockDim.x) {
        int32_t byte = i / COPIES;
        ((float2*)tables)[i] = make_float2(maps[byte / 16], maps[byte % 16]);
    }
    for (int32_t i = (int32_t)threadIdx.x; i < 256; i += (int32_t)blockDim.x) {
        ((float*)(tables + PAIR_BYTES))[i] = absmax ? 1.0f : maps[16 + i];
    }
    return w;
}

// The codes of 64 elements and the scale of the first, as read from memory.
struct raw_step {
    uint4 codes[2];
    float s;
    uint32_t q;
};

// Rows after the last one repeat it; their results are never written.
__device__ __forceinline__ uint32_t first_unit(const weight& w, int32_t row) {
    return (uint32_t)(row < w.N ? row : w.N - 1) * w.units;
}

// The 32 codes of a unit, or zeros outside the range of K.
__device__ __forceinline__ uint4 fetch_codes(const weight& w, uint32_t unit, bool inside) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (inside) {
        v = *(const uint4*)(w.codes + (uint64_t)unit * 16);
    }
    return v;
}

__device__ __forceinline__ void fetch_scale(const weight& w, uint32_t unit, bool inside,
                                            raw_step* r) {
    r->s = 0.0f;
    r->q = 0;
    if (inside) {
        r->s = w.source[unit >> w.source_shift];
        if (w.q) {
            r->q = w.q[unit >> w.block_shift];
        }
    }
}

// inside0 and inside1: whether the first and second half of the 64 elements at `unit` are inside
// the range of K.
__device__ __forceinline__ raw_step fetch(const weight& w, uint32_t unit, bool inside0,
                                          bool inside1) {
    raw_step r;
    r.codes[0] = make_uint4(0, 0, 0, 0);
    r.codes[1] = r.codes[0];
    r.s = 0.0f;
    r.q = 0;
    if (inside0) {
        const uint4* p = (const uint4*)(w.codes + (uint64_t)unit * 16);
        r.codes[0] = p[0];
        if (inside1) {
            r.codes[1] = p[1];
        }
        r.s = w.source[unit >> w.source_shift];
        if (w.q) {
            r.q = w.q[unit >> w.block_shift];
        }
    }
    return r;
}

// Outside the range x is zero, but the weights must still be finite: 0 * inf would be NaN.
__device__ __forceinline__ float scale_of(const weight& w, float s, uint32_t q, bool inside) {
    float scale = __fadd_rn(__fmul_rn(w.map[q], s), w.middle);
    return inside ? scale : 0.0f;
}

// The scale of the second 32 of 64 elements, for when it may differ from that of the first.
__device__ __forceinline__ float second_scale(const weight& w, uint32_t unit, bool inside) {
    float s = 0.0f;
    uint32_t q = 0;
    if (inside) {
        s = w.source[(unit + 1) >> w.source_shift];
        q = w.q ? w.q[(unit + 1) >> w.block_shift] : 0;
    }
    return scale_of(w, s, q, inside);
}

__device__ __forceinline__ uint32_t word_of(const uint4* codes, int i) {
    uint4 v = codes[i / 4];
    return i % 4 == 0 ? v.x : i % 4 == 1 ? v.y : i % 4 == 2 ? v.z : v.w;
}

__device__ __forceinline__ void write_sum(void* y, int64_t at, int32_t is_bf16, float v) {
    if (is_bf16 != 0) {
        ((bf16*)y)[at] = to_bf16(v);
    } else {
        ((float*)y)[at] = v;
    }
}

// Where a block writes its sums: y, or its split's slice of the partial sums.
struct outputs {
    void* y;
    int64_t ldy;
    int32_t is_bf16;
};

__device__ __forceinline__ outputs open_outputs(void* y, int64_t ldy, int32_t is_bf16,
                                                float* partials, int32_t M, int32_t N1, int32_t N2,
                                                bool second) {
    outputs to;
    to.y = y;
    to.ldy = ldy;
    to.is_bf16 = is_bf16;
    if (partials) {
        to.ldy = (int64_t)N1 + N2;
        to.y = partials + blockIdx.y * (M * to.ldy) + (second ? N1 : 0);
        to.is_bf16 = 0;
    }
    return to;
}

// ---- up to 16 rows: K over the warps of a block
//
// A warp keeps its 256 columns of x in registers and iterates over rows of W, eight at a time; the
// sums of two such tiles from all warps go through shared memory and are added in warp order while
// the next two are being computed. Codes are requested two tiles ahead.
//
// Launch: grid (blocks1 + blocks2, splits): blocks1 share the rows of W1, blocks2 those of W2;
// 32 * warps threads, warps <= 16, range = 256 * warps, splits * range >= K. Dynamic shared memory:
// TABLE_BYTES and 2 * warps * SUM_FLOATS floats.
enum { WARPS = 16, TILES = 2, TILE_FLOATS = 128 + 16, SUM_FLOATS = TILES * TILE_FLOATS };

// Adds up TILES tiles starting at column `first`, up to but excluding column `end`.
__device__ __forceinline__ void add_warps(const float* sums, int32_t M, int32_t first, int32_t end,
                                          const outputs& to) {
    const int COLUMNS = TILES * 8;
    int32_t warps = (int32_t)blockDim.x / 32;
    for (int32_t i = (int32_t)threadIdx.x; i < M * COLUMNS; i += (int32_t)blockDim.x) {
        int32_t row = i / COLUMNS;
        int32_t col = i % COLUMNS;
        if (first + col < end) {
            // Tensor-core layout of a tile: lane 4 (row % 8) + col / 2 % 4 holds four elements.
            const float* p = sums + col / 8 * TILE_FLOATS + row % 8 * 16 + col % 8 / 2 * 4 +
                             row / 8 * 2 + col % 2;
            float sum = p[0];
#pragma unroll 4
            for (int32_t v = 1; v < warps; v++) {
                sum += p[v * SUM_FLOATS];
            }
            write_sum(to.y, row * to.ldy + first + col, to.is_bf16, sum);
        }
    }
}

// A warp's contribution to a tile: its 256 columns of 16 rows of x times 8 rows of W.
__device__ __forceinline__ float4 multiply_tile(const weight& w, const raw_step& r, uint32_t unit,
                                                bool inside0, bool inside1, const uint4* columns) {
    float scale = scale_of(w, r.s, r.q, inside0);
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (i == 4 && w.fine) {
            scale = second_scale(w, unit, inside1);
        }
        uint32_t b[4];
        widen(b, word_of(r.codes, i), w.pairs, scale);
        multiply_eight(acc, columns[2 * i], columns[2 * i + 1], b);
    }
    return make_float4(acc[0], acc[1], acc[2], acc[3]);
}

QLORA_KERNEL __launch_bounds__(WARPS * 32, 1) qlora_nf4_gemm_16(NF4_GEMM_PARAMETERS) {
    extern __shared__ __align__(128) uint8_t shared[];
    float* sums = (float*)(shared + TABLE_BYTES);
    int32_t warps = (int32_t)blockDim.x / 32;
    int32_t warp = (int32_t)threadIdx.x / 32;
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t g = lane / 4;
    bool second = (int32_t)blockIdx.x >= blocks1;
    int32_t block = (int32_t)blockIdx.x - (second ? blocks1 : 0);
    int32_t blocks = second ? (int32_t)gridDim.x - blocks1 : blocks1;
    weight w = NF4_OPEN(second, shared);
    int32_t tiles = (w.N + 7) / 8;
    int32_t begin = (int32_t)((int64_t)tiles * block / blocks);
    int32_t end = (int32_t)((int64_t)tiles * (block + 1) / blocks);
    int32_t k0 = (int32_t)blockIdx.y * range + warp * STEP + lane % 4 * 64;
    bool inside0 = k0 < K;
    bool inside1 = k0 + 32 < K;
    raw_step next[TILES];
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        uint32_t unit = first_unit(w, (begin + i) * 8 + g) + (uint32_t)k0 / 32;
        next[i] = fetch(w, unit, inside0, inside1);
    }
    uint4 columns[16]; // rows g and g + 8 of x alternate
#pragma unroll
    for (int i = 0; i < 16; i++) {
        int32_t row = g + i % 2 * 8;
        int32_t k = k0 + i / 2 * 8;
        columns[i] = make_uint4(0, 0, 0, 0);
        if (row < M && k < K) {
            columns[i] = *(const uint4*)(x + row * ldx + k);
        }
    }
    outputs to = open_outputs(second ? y2 : y1, second ? ldy2 : ldy1, y_is_bf16, partials, M, N1,
                              N2, second);
    int32_t columns_end = end * 8 < w.N ? end * 8 : w.N;
    float* place = sums + warp * SUM_FLOATS;
    int32_t other = warps * SUM_FLOATS; // of the two buffers: one is written, one read
    __syncthreads();
#pragma unroll 1
    for (int32_t tile = begin; tile < end; tile += TILES) {
#pragma unroll
        for (int i = 0; i < TILES; i++) { // past the end, the last tile is not written
            int32_t row = (tile + i) * 8 + g;
            raw_step now = next[i];
            next[i] =
                fetch(w, first_unit(w, row + TILES * 8) + (uint32_t)k0 / 32, inside0, inside1);
            uint32_t unit = first_unit(w, row) + (uint32_t)k0 / 32;
            *(float4*)(place + i * TILE_FLOATS + lane * 4) =
                multiply_tile(w, now, unit, inside0, inside1, columns);
        }
        __syncthreads();
        add_warps(place - warp * SUM_FLOATS, M, tile * 8, columns_end, to);
        place += other;
        other = -other;
    }
}

// ---- up to 32 rows: rows of W over the warps of a block
//
// A warp takes 16 rows of W, as two tiles; x passes through shared memory in chunks of 256 columns,
// for all warps.
//
// Launch: grid (blocks1 + blocks2, splits), blocks = ceil(N / 128), 256 threads, range = elements
// of K per split, a multiple of 256. Dynamic shared memory: TABLE_BYTES and two chunks of x.
enum { ROW_THREADS = 256, ROW_WARPS = 8, ROWS_OF_W = 16 * ROW_WARPS, TILES_M = 2 };

// Requests a chunk of x. A row has 32 units of 16 bytes; unit 8 t + i is stored at 4 i + t, and in
// odd rows the upper and lower four of each eight are swapped, so that lanes that read together
// access different banks.
__device__ __forceinline__ void request_x(uint32_t slot, const bf16* x, int64_t ldx, int32_t M,
                                          int32_t k0, int32_t k_end) {
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t k = k0 + 8 * lane;
#pragma unroll
    for (int i = 0; i < 16 * TILES_M / ROW_WARPS; i++) {
        int32_t row = (int32_t)threadIdx.x / 32 + i * ROW_WARPS;
        int32_t place = (lane % 8 * 4 + lane / 8) ^ (row % 2 * 4);
        bool inside = row < M && k < k_end;
        const bf16* from = inside ? x + row * ldx + k : x;
        copy_async(slot + (uint32_t)(row * (2 * STEP) + place * 16), from, inside ? 16 : 0);
    }
}

// Columns 8 i .. 8 i + 7 of each thread's 64, in all rows of x.
__device__ __forceinline__ void multiply_rows(float (&acc)[TILES_M][2][4], const uint8_t* x, int i,
                                              const uint32_t (&b)[2][4]) {
    int32_t g = (int32_t)threadIdx.x % 32 / 4;
    int32_t t = (int32_t)threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < TILES_M; m++) {
        const uint8_t* p = x + (16 * m + g) * (2 * STEP) + ((4 * i + t) ^ (g % 2 * 4)) * 16;
        uint4 top = *(const uint4*)p;
        uint4 bottom = *(const uint4*)(p + 8 * 2 * STEP);
        multiply_eight(acc[m][0], top, bottom, b[0]);
        multiply_eight(acc[m][1], top, bottom, b[1]);
    }
}

__device__ __forceinline__ void write_rows(const float (&acc)[TILES_M][2][4], const outputs& to,
                                           int32_t M, int32_t N, int32_t n0) {
    int32_t g = (int32_t)threadIdx.x % 32 / 4;
    int32_t t = (int32_t)threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < TILES_M * 8; i++) {
        int32_t row = 16 * (i / 8) + 8 * (i / 2 % 2) + g;
        int32_t col = n0 + 8 * (i / 4 % 2) + 2 * t + i % 2;
        if (row < M && col < N) {
            write_sum(to.y, row * to.ldy + col, to.is_bf16, acc[i / 8][i / 4 % 2][i % 4]);
        }
    }
}

// One block; long because the iterations of the pipeline share all of their state.
QLORA_KERNEL __launch_bounds__(ROW_THREADS, 2) qlora_nf4_gemm_32(NF4_GEMM_PARAMETERS) {
    const int X_BYTES = 16 * TILES_M * 2 * STEP;
    extern __shared__ __align__(128) uint8_t shared[];
    const uint8_t* chunks_of_x = shared + TABLE_BYTES;
    int32_t lane = (int32_t)threadIdx.x % 32;
    bool second = (int32_t)blockIdx.x >= blocks1;
    int32_t block = (int32_t)blockIdx.x - (second ? blocks1 : 0);
    weight w = NF4_OPEN(second, shared);
    int32_t n0 = block * ROWS_OF_W + (int32_t)threadIdx.x / 32 * 16;
    int32_t k_begin = (int32_t)blockIdx.y * range;
    int32_t k_end = K - k_begin < range ? K : k_begin + range;
    int32_t chunks = k_end > k_begin ? (k_end - k_begin + STEP - 1) / STEP : 0;
    uint32_t row_unit[2];
    float acc[TILES_M][2][4];
#pragma unroll
    for (int i = 0; i < TILES_M * 8; i++) {
        acc[i / 8][i / 4 % 2][i % 4] = 0.0f;
    }
    uint32_t base = (uint32_t)__cvta_generic_to_shared(chunks_of_x);
    raw_step raw[2];
    int32_t k = k_begin + lane % 4 * 64; // this thread's first element in the chunk
#pragma unroll
    for (int j = 0; j < 2; j++) {
        row_unit[j] = first_unit(w, n0 + 8 * j + lane / 4);
        raw[j] = fetch(w, row_unit[j] + (uint32_t)k / 32, k < k_end, k + 32 < k_end);
    }
    request_x(base, x, ldx, M, k_begin, k_end);
    asm volatile("cp.async.commit_group;" ::: "memory");
#pragma unroll 1
    for (int32_t c = 0; c < chunks; c++) {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads();
        if (c + 1 < chunks) {
            request_x(base + (uint32_t)((c + 1) % 2 * X_BYTES), x, ldx, M, k_begin + (c + 1) * STEP,
                      k_end);
            asm volatile("cp.async.commit_group;" ::: "memory");
        }
        int32_t later = k + STEP;
        float scale[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            scale[j] = scale_of(w, raw[j].s, raw[j].q, k < k_end);
            fetch_scale(w, row_unit[j] + (uint32_t)later / 32, later < k_end, &raw[j]);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            uint32_t b[2][4];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                if (i == 4 && w.fine) {
                    scale[j] = second_scale(w, row_unit[j] + (uint32_t)k / 32, k + 32 < k_end);
                }
                widen(b[j], word_of(raw[j].codes, i), w.pairs, scale[j]);
                // Half of the codes has been consumed: its registers are reused for the next chunk.
                if (i % 4 == 3) {
                    int32_t from = later + i / 4 * 32;
                    raw[j].codes[i / 4] =
                        fetch_codes(w, row_unit[j] + (uint32_t)from / 32, from < k_end);
                }
            }
            multiply_rows(acc, chunks_of_x + c % 2 * X_BYTES, i, b);
        }
        k += STEP;
    }
    outputs to = open_outputs(second ? y2 : y1, second ? ldy2 : ldy1, y_is_bf16, partials, M, N1,
                              N2, second);
    write_rows(acc, to, M, w.N, n0);
}

// y = sum over the splits of partials, in their order. One thread per element.
// Launch: grid (ceil((N1 + N2) / 256), M), 256 threads.
QLORA_KERNEL __launch_bounds__(256)
    qlora_nf4_gemm_reduce(const float* partials, int32_t splits, int32_t M, int32_t N1, void* y1,
                          int64_t ldy1, int32_t N2, void* y2, int64_t ldy2, int32_t y_is_bf16) {
    int64_t width = (int64_t)N1 + N2;
    int64_t at = (int64_t)blockIdx.x * 256 + threadIdx.x;
    int64_t row = blockIdx.y;
    if (at >= width) {
        return;
    }
    bool second = at >= N1;
    float sum = 0.0f;
#pragma unroll 4
    for (int32_t s = 0; s < splits; s++) {
        sum += partials[((int64_t)s * M + row) * width + at];
    }
    write_sum(second ? y2 : y1, row * (second ? ldy2 : ldy1) + (second ? at - N1 : at), y_is_bf16,
              sum);
}
