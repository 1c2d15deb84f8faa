// tails.cu - a gated activation together with what an adapter makes of it: z and u of the linear
// layers around it would read the largest matrices of a layer once more.
// targets: 80
// groups: bf16
//
//   forward:   s = act(g) u                                     z = s A^T          [rows, rank]
//   backward:  dg = dh u act'(g), du = dh act(g), s = act(g) u
//              ug = dg Bg, uu = du Bu                           [rows, rank] each, or their sum
//
// All matrices are bf16: g, u, dh and s [rows, cols], A [rank, cols], Bg and Bu [cols, rank]. dg
// overwrites g, du overwrites u, and s may overwrite dh. z is computed from the rounded s, u from
// the rounded dg and du. cols, ranks and leading dimensions are multiples of 8, and all rows begin
// at multiples of 16 bytes.
//
// Ranks are at most 16.
//
// Launch: grid.x = rows / 16 rounded up, 512 threads, dynamic shared memory FORWARD or BACKWARD. A
// block has 16 rows, one for each warp, and takes 512 columns at a time: in shorter pieces of rows,
// the memory is slower. What a warp makes of its row goes to a tile in shared memory, of which each
// warp multiplies 32 columns of all rows. A thread has 8 neighbouring columns of two rows there, 8
// below each other: the first operand of two m16n8k16 products if the columns are counted in the
// order in which the threads have them. The second operand has them in that order too.
// Determinism: a warp adds its columns of all steps in their order; the sums of the 16 warps are
// added in their order, Bg's before Bu's.
#include "elementwise.cuh"
#include "tiles.cuh"

enum {
    ROWS = 16, // and warps
    STEP = 512, // columns
    SIDE = 2,  // groups of 8 ranks of an adapter
    PITCH = STEP * 2 + 64, // bytes of a row of a tile: the rows that a quarter of a warp reads are
                           // in different banks
    TILE = ROWS * PITCH,
    LINE = SIDE * 16 + 16, // of a row of B in shared memory: an odd number of 16
    LINES = 32 * LINE,     // of those that a warp multiplies
    SUMS = ROWS * SIDE * 8 * 4,
    FORWARD = 2 * TILE,
    BACKWARD = 4 * TILE + ROWS * LINES
};
static_assert(ROWS * SUMS <= FORWARD && ROWS * 2 * SUMS <= BACKWARD, "the sums fit in the tiles");

// Two pieces of 8 columns: of a thread's row, 256 columns apart, or of two rows of a tile.
struct pair {
    uint4 upper;
    uint4 lower;
};

// p: the place of a thread's first column; left: columns from there to the end of the row.
__device__ __forceinline__ pair load_pair(const bf16* p, int32_t left) {
    const uint4 zero = make_uint4(0, 0, 0, 0);
    pair x;
    x.upper = left > 0 ? *(const uint4*)p : zero;
    x.lower = left > STEP / 2 ? *(const uint4*)(p + STEP / 2) : zero;
    return x;
}

__device__ __forceinline__ void store_pair(bf16* p, int32_t left, const pair& x) {
    if (left > 0) {
        *(uint4*)p = x.upper;
    }
    if (left > STEP / 2) {
        *(uint4*)(p + STEP / 2) = x.lower;
    }
}

// A thread's columns to the row of its warp in a tile.
__device__ __forceinline__ void to_tile(uint8_t* tile, const pair& x) {
    uint8_t* to = tile + (int32_t)threadIdx.x / 32 * PITCH + (int32_t)threadIdx.x % 32 * 16;
    *(uint4*)to = x.upper;
    *(uint4*)(to + STEP) = x.lower;
}

// What a thread multiplies: rows lane / 4 and 8 below, of the columns of its warp.
__device__ __forceinline__ pair of_tile(const uint8_t* tile) {
    int32_t lane = (int32_t)threadIdx.x % 32;
    const uint8_t* from = tile + lane / 4 * PITCH + (int32_t)threadIdx.x / 32 * 64 + lane % 4 * 16;
    pair x;
    x.upper = *(const uint4*)from;
    x.lower = *(const uint4*)(from + 8 * PITCH);
    return x;
}

// sums += x f, where f has 8 columns of x's piece of one of 8 ranks.
__device__ __forceinline__ void add_product(float (&sums)[4], const pair& x, uint4 f) {
    const uint32_t first[4] = {x.upper.x, x.lower.x, x.upper.y, x.lower.y};
    const uint32_t second[4] = {x.upper.z, x.lower.z, x.upper.w, x.lower.w};
    multiply(sums, first, f.x, f.y);
    multiply(sums, second, f.z, f.w);
}

// Leaves the sums of a warp in shared memory [warps, ROWS, width], from column `first` on.
template <int COUNT>
__device__ __forceinline__ void leave_sums(float* shared, const float (&sums)[COUNT][4],
                                           int32_t count, int32_t width, int32_t first) {
    int32_t lane = (int32_t)threadIdx.x % 32;
    float* to = shared + ((int32_t)threadIdx.x / 32 * ROWS + lane / 4) * width + first;
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        if (n < count) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                to[e / 2 * 8 * width + n * 8 + lane % 4 * 2 + e % 2] = sums[n][e];
            }
        }
    }
}

// The sum over the warps of a number that each of them left.
__device__ __forceinline__ float sum_of(const float* shared, int32_t width, int32_t row,
                                        int32_t col) {
    float v = 0.0f;
#pragma unroll
    for (int w = 0; w < ROWS; w++) {
        v += shared[(w * ROWS + row) * width + col];
    }
    return v;
}

// The sigmoid of bf16 with fewer instructions and the same bits: its divisor is at least 1.
struct fast_number {};

__device__ __forceinline__ float sigmoid(float x, const fast_number*) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + exp_of(-x, (const bf16*)0)));
    return y;
}

// The activation of 8 columns.
template <class OP> __device__ __forceinline__ uint4 gated_forward(uint4 raw_g, uint4 raw_u) {
    float gate[8];
    float up[8];
    unpack(raw_g, gate);
    unpack(raw_u, up);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        gate[i] = OP()(gate[i], up[i]);
    }
    return pack(gate);
}

// Writes what the warps have left, and their sum, to matrix `to` [rows, width]. With `joined`, the
// columns from `width` on are added to the first ones.
__device__ __forceinline__ void store_sums(const float* shared, int32_t all, int32_t width,
                                           int32_t joined, bf16* to, int64_t ldt, int64_t rows) {
    int64_t row = (int64_t)blockIdx.x * ROWS;
    __syncthreads();
#pragma unroll 1
    for (int32_t i = (int32_t)threadIdx.x; i < ROWS * width; i += 512) {
        float v = sum_of(shared, all, i / width, i % width);
        v += joined != 0 ? sum_of(shared, all, i / width, width + i % width) : 0.0f;
        if (row + i / width < rows) {
            store(to + (row + i / width) * ldt + i % width, v);
        }
    }
}

// gelu: the activation is GELU in its tanh form, otherwise SiLU. If g is null, s is there and only
// z is computed, with the same bits. u begins `up` columns after g.
QLORA_KERNEL __launch_bounds__(512, 1)
    qlora_tails_gated(const bf16* g, int32_t ld, int32_t up, bf16* s, int32_t lds, const bf16* a,
                      int32_t lda, bf16* z, int64_t ldz, int64_t rows, int32_t cols, int32_t rank,
                      int32_t gelu) {
    extern __shared__ __align__(128) uint8_t shared[];
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t warp = (int32_t)threadIdx.x / 32;
    int64_t row = (int64_t)blockIdx.x * ROWS + warp;
    bool given = g == 0;
    int32_t left = row < rows ? cols - lane * 8 : 0;
    bf16* out = s + row * lds + lane * 8;
    const bf16* in = given ? out : g + row * ld + lane * 8;
    const bf16* factor = a + lane / 4 * lda + warp * 32 + lane % 4 * 8;
    float sums[SIDE][4] = {};
    pair next = load_pair(in, left);
    pair next_up = load_pair(in + up, given ? 0 : left);
    uint8_t* tile = shared;
    for (int32_t at = 0; at < cols; at += STEP) {
        pair x = next;
        pair y = next_up;
        uint4 f[SIDE];
        in += STEP;
        next = load_pair(in, left - STEP);
        next_up = load_pair(in + up, given ? 0 : left - STEP);
#pragma unroll
        for (int n = 0; n < SIDE; n++) {
            bool inside = n * 8 < rank && at + warp * 32 + lane % 4 * 8 < cols;
            f[n] = inside ? *(const uint4*)(factor + n * 8 * lda + at) : make_uint4(0, 0, 0, 0);
        }
        if (!given) {
            if (gelu != 0) {
                x.upper = gated_forward<geglu_op<fast_number>>(x.upper, y.upper);
                x.lower = gated_forward<geglu_op<fast_number>>(x.lower, y.lower);
            } else {
                x.upper = gated_forward<swiglu_op<fast_number>>(x.upper, y.upper);
                x.lower = gated_forward<swiglu_op<fast_number>>(x.lower, y.lower);
            }
            store_pair(out, left, x);
        }
        to_tile(tile, x);
        // The tile of the step before is no longer needed after the next barrier.
        __syncthreads();
        x = of_tile(tile);
#pragma unroll
        for (int n = 0; n < SIDE; n++) {
            add_product(sums[n], x, f[n]);
        }
        out += STEP;
        left -= STEP;
        tile = shared + (tile == shared ? TILE : 0);
    }
    __syncthreads();
    leave_sums((float*)shared, sums, rank / 8, rank, 0);
    store_sums((const float*)shared, rank, rank, 0, z, ldz, rows);
}

// 32 rows of B, one for each lane, in registers.
struct lines {
    uint4 v[SIDE];
    __device__ __forceinline__ void load(const bf16* b, int32_t ldb, int32_t c, int32_t cols,
                                         int32_t rank) {
#pragma unroll
        for (int n = 0; n < SIDE; n++) {
            v[n] = n * 8 < rank && c < cols ? *(const uint4*)(b + (int64_t)c * ldb + n * 8)
                                            : make_uint4(0, 0, 0, 0);
        }
    }
    // To shared memory, in the order in which add_product counts columns: line m * 8 + i has the
    // column 8 (i / 2) + 2 m + i % 2 of the piece.
    __device__ __forceinline__ void store(uint8_t* to) const {
        int32_t lane = (int32_t)threadIdx.x % 32;
        int32_t line = lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2;
#pragma unroll
        for (int n = 0; n < SIDE; n++) {
            *(uint4*)(to + line * LINE + n * 16) = v[n];
        }
    }
};

// sums += x B for the ranks of a side, B as lines::store leaves it.
__device__ __forceinline__ void add_side(float (&sums)[SIDE][4], const pair& x, uint32_t from) {
#pragma unroll
    for (int n = 0; n < SIDE; n++) {
        uint32_t b[4];
        load_transposed(b, from + (uint32_t)((int32_t)threadIdx.x % 32 * LINE + n * 16));
        add_product(sums[n], x, make_uint4(b[0], b[1], b[2], b[3]));
    }
}

// Both sides: the lines of the first are in shared memory at `own`, those of the second follow.
__device__ __forceinline__ void add_sides(float (&sums_g)[SIDE][4], float (&sums_u)[SIDE][4],
                                          const uint8_t* tile, const lines& lines_u, uint8_t* own) {
    uint32_t from = (uint32_t)__cvta_generic_to_shared(own);
    add_side(sums_g, of_tile(tile), from);
    __syncwarp();
    lines_u.store(own);
    __syncwarp();
    add_side(sums_u, of_tile(tile + TILE), from);
    __syncwarp(); // no lane needs these lines any more
}

// The backward pass of one row of 8 columns; d becomes s, gate and up their gradients.
template <class GATE>
__device__ __forceinline__ void gated_row(uint4& raw_d, uint4& raw_g, uint4& raw_u) {
    float d[8];
    float gate[8];
    float up[8];
    unpack(raw_d, d);
    unpack(raw_g, gate);
    unpack(raw_u, up);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        GATE at(gate[i]);
        float d_up = d[i] * at.act;
        float d_gate = at.chain(d[i] * up[i]);
        d[i] = at.act * up[i];
        gate[i] = d_gate;
        up[i] = d_up;
    }
    raw_d = pack(d);
    raw_g = pack(gate);
    raw_u = pack(up);
}

template <class GATE> __device__ __forceinline__ void gated_pair(pair& d, pair& x, pair& y) {
    gated_row<GATE>(d.upper, x.upper, y.upper);
    gated_row<GATE>(d.lower, x.lower, y.lower);
}

// to [rows, rank_g + rank_u], or with `joined` [rows, rank_g] for the sum; rank_u is rank_g then.
// u begins `up` columns after g.
QLORA_KERNEL __launch_bounds__(512, 1)
    qlora_tails_gated_bwd(const bf16* dh, int32_t ldd, bf16* g, int32_t ld, int32_t up, bf16* s,
                          int32_t lds, const bf16* bg, int32_t ldbg, int32_t rank_g, const bf16* bu,
                          int32_t ldbu, int32_t rank_u, bf16* to, int64_t ldt, int64_t rows,
                          int32_t cols, int32_t joined, int32_t gelu) {
    extern __shared__ __align__(128) uint8_t shared[];
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t warp = (int32_t)threadIdx.x / 32;
    int64_t row = (int64_t)blockIdx.x * ROWS + warp;
    int32_t left = row < rows ? cols - lane * 8 : 0;
    const bf16* grad = dh + row * ldd + lane * 8;
    bf16* gate = g + row * ld + lane * 8;
    bf16* out = s + row * lds + lane * 8;
    uint8_t* own = shared + 4 * TILE + warp * LINES;
    float sums_g[SIDE][4] = {};
    float sums_u[SIDE][4] = {};
    pair next_d = load_pair(grad, left);
    pair next_g = load_pair(gate, left);
    pair next_u = load_pair(gate + up, left);
    uint8_t* tile = shared;
    for (int32_t at = 0; at < cols; at += STEP) {
        pair d = next_d;
        pair x = next_g;
        pair y = next_u;
        next_d = load_pair(grad + STEP, left - STEP);
        next_g = load_pair(gate + STEP, left - STEP);
        next_u = load_pair(gate + STEP + up, left - STEP);
        lines lines_g;
        lines lines_u;
        lines_g.load(bg, ldbg, at + warp * 32 + lane, cols, rank_g);
        lines_u.load(bu, ldbu, at + warp * 32 + lane, cols, rank_u);
        if (gelu != 0) {
            gated_pair<gelu_gate<fast_number>>(d, x, y);
        } else {
            gated_pair<silu_gate<fast_number>>(d, x, y);
        }
        store_pair(gate, left, x);
        store_pair(gate + up, left, y);
        store_pair(out, left, d);
        to_tile(tile, x);
        to_tile(tile + TILE, y);
        lines_g.store(own);
        // The tiles of the step before are no longer needed after the next barrier.
        __syncthreads();
        add_sides(sums_g, sums_u, tile, lines_u, own);
        grad += STEP;
        gate += STEP;
        out += STEP;
        left -= STEP;
        tile = shared + (tile == shared ? 2 * TILE : 0);
    }
    __syncthreads();
    float* sums = (float*)shared;
    leave_sums(sums, sums_g, rank_g / 8, rank_g + rank_u, 0);
    leave_sums(sums, sums_u, rank_u / 8, rank_g + rank_u, rank_g);
    store_sums(sums, rank_g + rank_u, joined != 0 ? rank_g : rank_g + rank_u, joined, to, ldt,
               rows);
}
