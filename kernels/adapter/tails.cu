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
// Launch: grid.x = rows / 16 rounded up, 512 threads, dynamic shared memory FORWARD here and
// BACKWARD in tails_bwd.cu; tails.cuh says what a block does.
// Determinism: a warp adds its columns of all steps in their order; the sums of the 16 warps are
// added in their order, Bg's before Bu's.
#include "tails.cuh"

enum { FORWARD = 2 * TILE };
static_assert(ROWS * SUMS <= FORWARD, "the sums fit in the tiles");

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
            x = activation_of(x, y, gelu != 0);
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
    store_sums((const float*)shared, rank, rank, 0, z, ldz, row - warp, rows);
}
