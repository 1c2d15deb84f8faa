// fp8_tails.cu - the activation of an MLP, and the gradients of gate and up, as operands of FP8
// products, together with what adapters make of them: both read the largest matrices of a layer.
// targets: 90a
// groups: bf16 fp8
//
//   forward:   the codes and scales of s = act(g) u      z = s A^T
//   backward:  the codes and scales of d = dgate, dup    u = d B
//
// Codes and scales are those of qlora_fp8_quantise: scale = max(max |x[r,:]| / 448, 1e-30), codes
// e4m3(x / scale), with a pitch of ldq bytes, a multiple of 16, and scales[r] = scale * factor[0].
// All matrices are bf16. cols, ranks and leading dimensions are multiples of 8, and all rows begin
// at multiples of 16 bytes. Ranks are at most 16.
//
// Columns are multiplied in the order in which a thread has them, as in tails.cuh: 8 neighbouring
// ones, which are those of two m16n8k16 products.
#include "fp8.cuh"
#include "../adapter/tails.cuh"

enum {
    TALL = 128,   // rows of a block, 16 for each warp
    WIDE = 128,   // columns of a step
    PIECE = 1024, // of a block
    TILES = 14,   // of the activation, in shared memory
    HELD = 4      // steps that stay in registers because others overwrite their tiles
};

// A row of 8 ranks of B: to shared memory in the order in which add_product counts columns.
__device__ __forceinline__ uint32_t line_at(uint32_t col, uint32_t half) {
    uint32_t line = col % 8 / 2 * 8 + col % 32 / 8 * 2 + col % 2;
    return (col / 32 * 32 + line) * LINE + half * 16;
}

// A thread's columns of a step: 8 of every 32, of two rows.
struct columns {
    pair v[4];
    __device__ __forceinline__ void load(const bf16* p, int32_t ld, int32_t left,
                                         const bool (&has)[2]) {
        const uint4 zero = make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            bool inside = left > 32 * i;
            v[i].upper = has[0] && inside ? *(const uint4*)(p + 32 * i) : zero;
            v[i].lower = has[1] && inside ? *(const uint4*)(p + 8 * (int64_t)ld + 32 * i) : zero;
        }
    }
};

// d [rows, cols] has parts of `part` columns, one after the other, each with its own rank; each
// has `pieces` pieces of 1024 columns. most [rows] has the largest magnitudes. B is [cols, ranks],
// where the rows of the second part have their numbers rank0 columns later. What each piece adds
// to u goes to sums f32 [all pieces, rows, 16].
// Launch: grid (ceil(rows / 128), all pieces), 256 threads. A warp has 16 rows; all of them read
// the rows of B of their piece, and wait for each other only until those have come.
// Determinism: the columns of a piece are added in their order; qlora_fp8_u_sum adds the pieces in
// theirs.
QLORA_KERNEL __launch_bounds__(256, 2)
    qlora_fp8_quantise_u(const bf16* d, int32_t ldd, int64_t rows, int32_t cols, int32_t part,
                         int32_t pieces, const float* most, const float* factor, uint8_t* q,
                         int64_t ldq, float* scales, const bf16* b, int32_t ldb, int32_t rank0,
                         int32_t rank1, float* sums) {
    // long because a thread's part of everything is set up before the loop
    __shared__ __align__(128) uint8_t shared[PIECE * LINE];
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t side = (int32_t)blockIdx.y / pieces;
    int32_t first = side * part + (int32_t)blockIdx.y % pieces * PIECE;
    int32_t end = min(first + PIECE, (side + 1) * part);
    int32_t until = end == cols ? (int32_t)ldq : end; // codes up to there, then zeros
    int32_t rank = side == 0 ? rank0 : rank1;
    int64_t row = (int64_t)blockIdx.x * TALL + (int32_t)threadIdx.x / 32 * 16 + lane / 4;
    const bool has[2] = {row < rows, row + 8 < rows};
    uint32_t lines = (uint32_t)__cvta_generic_to_shared(shared);
    b += side == 0 ? 0 : rank0;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < PIECE * SIDE; i += 256) {
        int32_t line = first + (int32_t)(i / SIDE);
        int32_t at = (int32_t)(i % SIDE) * 8;
        bool used = line < end && at < rank;
        copy16_or_zero(lines + line_at(i / SIDE, i % SIDE),
                       b + (used ? (int64_t)line * ldb + at : 0), used ? 16 : 0);
    }
    copy_commit();
    int32_t at = first + lane % 4 * 8;
    const bf16* from = d + row * ldd + at;
    uint8_t* to = q + row * ldq + at;
    columns next;
    next.load(from, ldd, end - at, has);
    float inverse[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (has[i]) {
            float scale = fp8_scale(most[row + 8 * i]);
            inverse[i] = __frcp_rn(scale);
            if (blockIdx.y == 0 && lane % 4 == 0) {
                scales[row + 8 * i] = __fmul_rn(scale, *factor);
            }
        }
    }
    float total[SIDE][4] = {};
    copy_wait<0>();
    __syncthreads();
    lines += (uint32_t)(lane * LINE);
#pragma unroll 1
    for (; first < until; first += WIDE) {
        columns x = next;
        from += WIDE;
        next.load(from, ldd, end - at - WIDE, has);
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int n = 0; n < SIDE; n++) {
                uint32_t f[4];
                load_transposed(f, lines + (uint32_t)(i * 32 * LINE + n * 16));
                add_product(total[n], x.v[i], make_uint4(f[0], f[1], f[2], f[3]));
            }
            if (has[0] && at + 32 * i < until) {
                *(uint2*)(to + 32 * i) = codes_of(x.v[i].upper, inverse[0]);
            }
            if (has[1] && at + 32 * i < until) {
                *(uint2*)(to + 8 * ldq + 32 * i) = codes_of(x.v[i].lower, inverse[1]);
            }
        }
        lines += WIDE * LINE;
        to += WIDE;
        at += WIDE;
    }
    float* sum = sums + ((int64_t)blockIdx.y * rows + row) * SIDE * 8 + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < SIDE; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (has[i]) {
                *(float2*)(sum + i * 8 * SIDE * 8 + n * 8) =
                    make_float2(total[n][2 * i], total[n][2 * i + 1]);
            }
        }
    }
}

// u[r, :] = the sums of the pieces of a part, in their order, rounded; those of the second part
// after those of the first. Launch: 256 threads, grid ceil(rows * (rank0 + rank1) / 256).
QLORA_KERNEL __launch_bounds__(256)
    qlora_fp8_u_sum(const float* sums, int64_t rows, int32_t pieces, int32_t rank0, int32_t rank1,
                    bf16* u, int64_t ldu) {
    int32_t ranks = rank0 + rank1;
    int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    int64_t row = i / ranks;
    int32_t rank = (int32_t)(i % ranks);
    int32_t side = rank < rank0 ? 0 : 1;
    if (row >= rows) {
        return;
    }
    const float* from = sums + ((int64_t)side * pieces * rows + row) * SIDE * 8 + rank -
                        (side == 0 ? 0 : rank0);
    float v = 0.0f;
#pragma unroll 4
    for (int32_t p = 0; p < pieces; p++) {
        v += from[(int64_t)p * rows * SIDE * 8];
    }
    store(u + row * ldu + rank, v);
}

// Codes of a thread's columns; left: columns from the first of them to the end of a row of codes.
__device__ __forceinline__ void store_codes(uint8_t* to, int32_t left, const pair& x,
                                            float inverse) {
    if (left > 0) {
        *(uint2*)to = codes_of(x.upper, inverse);
    }
    if (left > STEP / 2) {
        *(uint2*)(to + STEP / 2) = codes_of(x.lower, inverse);
    }
}

// The codes and scales of s = act(g) u, and z. s is not stored: the block keeps its rows until it
// knows their largest magnitudes, the first steps in registers. u begins `up` columns after g.
// gelu: the activation is GELU in its tanh form, otherwise SiLU. cols: at most 512 (TILES + HELD).
// Launch: grid.x = rows / 16 rounded up, 512 threads, dynamic shared memory TILES * TILE.
// Determinism: z has the sums of qlora_tails_gated, in the same order.
QLORA_KERNEL __launch_bounds__(512, 1)
    qlora_fp8_gated(const bf16* g, int32_t ld, int32_t up, const bf16* a, int32_t lda, bf16* z,
                    int64_t ldz, int64_t rows, int32_t cols, int32_t rank, int32_t gelu,
                    const float* factor, uint8_t* q, int32_t ldq, float* scales) {
    // long because a block has three things to do with its rows
    extern __shared__ __align__(128) uint8_t shared[];
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t warp = (int32_t)threadIdx.x / 32;
    int64_t row = (int64_t)blockIdx.x * ROWS + warp;
    int32_t left = row < rows ? cols - lane * 8 : 0;
    const bf16* in = g + row * ld + lane * 8;
    const bf16* column = a + lane / 4 * lda + warp * 32 + lane % 4 * 8;
    float sums[SIDE][4] = {};
    float most = 0.0f;
    pair held[HELD] = {};
    pair next = load_pair(in, left);
    pair next_up = load_pair(in + up, left);
    uint8_t* tile = shared;
#pragma unroll 1
    for (int32_t at = 0; at < cols; at += STEP) {
        uint4 f[SIDE];
#pragma unroll
        for (int n = 0; n < SIDE; n++) {
            bool inside = n * 8 < rank && at + warp * 32 + lane % 4 * 8 < cols;
            f[n] = inside ? *(const uint4*)(column + n * 8 * lda + at) : make_uint4(0, 0, 0, 0);
        }
        pair x = next;
        pair y = next_up;
        next = load_pair(in + at + STEP, left - at - STEP);
        next_up = load_pair(in + at + STEP + up, left - at - STEP);
        x = activation_of(x, y, gelu != 0);
        to_tile(tile, x);
        most = largest_of(x.lower, largest_of(x.upper, most));
        if (at < HELD * STEP) {
#pragma unroll
            for (int i = 1; i < HELD; i++) {
                held[i - 1] = held[i];
            }
            held[HELD - 1] = x;
        }
        __syncthreads();
        x = of_tile(tile);
#pragma unroll
        for (int n = 0; n < SIDE; n++) {
            add_product(sums[n], x, f[n]);
        }
        tile = at == (TILES - 1) * STEP ? shared : tile + TILE;
    }
    float scale = fp8_scale(warp_max(most));
    float inverse = __frcp_rn(scale);
    if (lane == 0 && row < rows) {
        scales[row] = __fmul_rn(scale, *factor);
    }
    uint8_t* to = q + row * ldq + lane * 8;
    int32_t width = row < rows ? ldq - lane * 8 : 0;
    int32_t at = 0;
#pragma unroll
    for (int i = 0; i < HELD; i++) { // those whose tiles have been overwritten
        if ((TILES + i) * STEP < cols) {
            store_codes(to + at, width - at, held[i], inverse);
            at += STEP;
        }
    }
    tile = shared + at / STEP * TILE;
#pragma unroll 1
    for (; at < cols; at += STEP) {
        store_codes(to + at, width - at, own_of_tile(tile), inverse);
        tile = at == (TILES - 1) * STEP ? shared : tile + TILE;
    }
    __syncthreads(); // no thread needs the tiles any more
    leave_sums((float*)shared, sums, rank / 8, rank, 0);
    store_sums((const float*)shared, rank, rank, 0, z, ldz, row - warp, rows);
}
