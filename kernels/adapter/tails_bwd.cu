// tails_bwd.cu - tails.cu backward.
// targets: 80
// groups: bf16 train
#include "tails.cuh"

enum {
    LINES = 32 * LINE, // bytes of the rows of B that a warp multiplies
    BACKWARD = 4 * TILE + ROWS * LINES
};
static_assert(ROWS * 2 * SUMS <= BACKWARD, "the sums fit in the tiles");

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
               row - warp, rows);
}
