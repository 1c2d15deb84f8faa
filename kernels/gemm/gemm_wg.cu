// gemm_wg.cu - matrix products with the warpgroup instructions of compute capability 9.0.
// targets: 90a
// groups: bf16 gemm
//
//   C[M,N] = alpha op(A) op(B) + beta C       row-major, bf16 operands, f32 sums
//
// The kernel's name gives the transposition, first letter A, second letter B, and the columns of a
// tile. A and B come as tensor maps: boxes of 64 columns and as many rows as the tile has, or, for
// an operand whose rows run along K, 64 rows. flags 1: C is bf16, otherwise f32; the wide tiles
// store bf16 only, or with A transposed (weight gradients) f32 only. flags 2: alpha is 1, beta is
// 0, and C consists of 16-byte chunks; otherwise it is aligned to pairs: N and ldc are even.
// Products are exact; sums are f32 in the order of the k16 steps along K. With beta == 0, C is
// never read.
//
// Launch: 384 threads, as many blocks as run at once, or one per tile if there are fewer; dynamic
// shared memory: STAGES * (128 + columns) * 128 + 1024 bytes, and for wide tiles of bf16 32,768
// bytes more. A block takes tiles of 128 rows in a fixed order. Its first warpgroup copies slices
// of 64 along K, STAGES of them in flight; the two others multiply, 64 rows each. Neighbouring
// blocks share rows and columns of operands, so that most copies hit the L2 cache.
//
// The narrowest tiles can split K into `splits` parts, each a tile of its own: C is then f32
// [splits][M][N], with alpha 1 and beta 0, and gemm_wg_sum adds the parts.
//
// Determinism: one writer per element of C, fixed order along K.
#include "gemm_wg.cuh"

// The types of C that a kernel stores.
enum { STORES_BF16 = 1, STORES_F32 = 2, STORES_BOTH = 3 };

// A piece of work: a tile, and the slices along K.
struct piece {
    tile t;
    int32_t part;
    int32_t first;
    int32_t end;
};

__device__ __forceinline__ int32_t piece_count(const shape& s) {
    return s.tile_rows * s.tile_cols * s.splits;
}

__device__ __forceinline__ piece piece_at(int32_t index, const shape& s, int32_t width) {
    int32_t tiles = s.tile_rows * s.tile_cols;
    int32_t each = (s.slices + s.splits - 1) / s.splits;
    piece p;
    p.part = index / tiles;
    p.t = tile_at(index % tiles, s.tile_rows, s.tile_cols, width);
    p.first = p.part * each;
    p.end = min(p.first + each, s.slices);
    return p;
}

// The copying thread.
template <bool TA, bool TB, int WIDTH, int STAGES>
__device__ __forceinline__ void copy_tiles(const tensor_map* a, const tensor_map* b,
                                           uint32_t buffer, uint32_t full, uint32_t empty,
                                           const shape& s) {
    const uint32_t bytes = (ROWS + WIDTH) * PANEL_ROW;
    uint32_t stage = 0;
    uint32_t phase = 1; // a new buffer is empty
    for (int32_t i = blockIdx.x; i < piece_count(s); i += gridDim.x) {
        piece p = piece_at(i, s, WIDTH);
        const tile& t = p.t;
        for (int32_t k = p.first; k < p.end; k++) {
            uint32_t to = buffer + stage * bytes;
            barrier_wait(empty + 8 * stage, phase);
            barrier_expect(full + 8 * stage, bytes);
            copy_slice<!TA, ROWS>(to, a, full + 8 * stage, t.row, k * DEPTH);
            copy_slice<TB, WIDTH>(to + ROWS * PANEL_ROW, b, full + 8 * stage, t.col, k * DEPTH);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            phase ^= stage == 0;
        }
    }
}

// The multiplying warpgroups.
template <bool TA, bool TB, int WIDTH, int STAGES, int TYPES>
__device__ __forceinline__ void multiply_tiles(uint32_t buffer, uint32_t full, uint32_t empty,
                                               void* c, int64_t ldc, const shape& s,
                                               int32_t flags) {
    const uint32_t bytes = (ROWS + WIDTH) * PANEL_ROW;
    // Its 64 rows of A: half of the tile's rows, or one of its two panels. Both are 8,192 bytes.
    const uint32_t own = (threadIdx.x / 128 - 1) * PANEL * PANEL_ROW;
    const bool first_thread = threadIdx.x % 128 == 0;
    uint32_t stage = 0;
    uint32_t phase = 0;
    for (int32_t i = blockIdx.x; i < piece_count(s); i += gridDim.x) {
        piece p = piece_at(i, s, WIDTH);
        const tile& t = p.t;
        float d[WIDTH / 2];
        uint32_t before = 0;
        for (int32_t k = p.first; k < p.end; k++) {
            uint32_t a = buffer + stage * bytes + own;
            uint32_t b = buffer + stage * bytes + ROWS * PANEL_ROW;
            barrier_wait(full + 8 * stage, phase);
            products_begin();
#pragma unroll
            for (int j = 0; j < DEPTH / 16; j++) {
                product<TA, !TB>(d, step_operand<!TA>(a, j), step_operand<TB>(b, j),
                                 k + j > p.first);
            }
            products_commit();
            products_wait<1>(); // the slice before is no longer read
            if (k > p.first && first_thread) {
                barrier_arrive(empty + 8 * before);
            }
            before = stage;
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            phase ^= stage == 0;
        }
        products_wait<0>();
        products_hold(d);
        if (first_thread) {
            barrier_arrive(empty + 8 * before);
        }
        if (TYPES == STORES_BF16 && (flags & C_HAS_CHUNKS)) {
            store_tile_staged<WIDTH>(d, (bf16*)c, ldc, t, s, buffer + STAGES * bytes);
        } else if (TYPES == STORES_BF16 || (TYPES == STORES_BOTH && (flags & C_IS_BF16))) {
            store_tile<WIDTH>(d, (bf16*)c, ldc, t, s);
        } else {
            store_tile<WIDTH>(d, (float*)c + p.part * ((int64_t)s.M * s.N), ldc, t, s);
        }
    }
}

template <bool TA, bool TB, int WIDTH, int STAGES, int TYPES>
__device__ __forceinline__ void gemm(const tensor_map* a, const tensor_map* b, void* c, int32_t M,
                                     int32_t N, int32_t K, int64_t ldc, float alpha, float beta,
                                     int32_t flags, int32_t splits) {
    extern __shared__ __align__(1024) char buffers[];
    __shared__ __align__(8) uint64_t barriers[2 * STAGES];
    uint32_t buffer = (shared_address(buffers) + SWIZZLE_BYTES - 1) & ~(SWIZZLE_BYTES - 1u);
    uint32_t full = shared_address(barriers);
    uint32_t empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, 2);
        }
        barrier_publish();
    }
    __syncthreads();
    shape s;
    s.M = M;
    s.N = N;
    s.tile_rows = (M + ROWS - 1) / ROWS;
    s.tile_cols = (N + WIDTH - 1) / WIDTH;
    s.slices = (K + DEPTH - 1) / DEPTH;
    s.splits = TYPES == STORES_BOTH ? splits : 1;
    s.alpha = alpha;
    s.beta = beta;
    if (threadIdx.x < 128) {
        registers_few();
        if (threadIdx.x == 0) {
            copy_tiles<TA, TB, WIDTH, STAGES>(a, b, buffer, full, empty, s);
        }
    } else {
        registers_many();
        multiply_tiles<TA, TB, WIDTH, STAGES, TYPES>(buffer, full, empty, c, ldc, s, flags);
    }
}

#define GEMM_WG(name, TA, TB, WIDTH, STAGES, TYPES)                                                \
    QLORA_KERNEL __launch_bounds__(384, 1)                                                         \
        name(const __grid_constant__ tensor_map a, const __grid_constant__ tensor_map b, void* c,  \
             int32_t M, int32_t N, int32_t K, int64_t ldc, float alpha, float beta, int32_t flags, \
             int32_t splits) {                                                                     \
        gemm<TA, TB, WIDTH, STAGES, TYPES>(&a, &b, c, M, N, K, ldc, alpha, beta, flags, splits);   \
    }

GEMM_WG(qlora_gemm_wg_nn_256, false, false, 256, 4, STORES_BF16)
GEMM_WG(qlora_gemm_wg_nt_256, false, true, 256, 4, STORES_BF16)
GEMM_WG(qlora_gemm_wg_tn_256, true, false, 256, 4, STORES_F32)
GEMM_WG(qlora_gemm_wg_nn_128, false, false, 128, 6, STORES_BF16)
GEMM_WG(qlora_gemm_wg_nt_128, false, true, 128, 6, STORES_BF16)
GEMM_WG(qlora_gemm_wg_nn_64, false, false, 64, 8, STORES_BOTH)
GEMM_WG(qlora_gemm_wg_nt_64, false, true, 64, 8, STORES_BOTH)
GEMM_WG(qlora_gemm_wg_tn_64, true, false, 64, 8, STORES_BOTH)

// C = alpha (sum of the parts, in order) + beta C. Grid (ceil(M N / 512)), 256 threads, one pair of
// columns each.
QLORA_KERNEL __launch_bounds__(256)
    qlora_gemm_wg_sum(const float* parts, int32_t splits, void* c, int32_t M, int32_t N,
                      int64_t ldc, float alpha, float beta, int32_t flags) {
    int64_t size = (int64_t)M * N;
    int64_t at = ((int64_t)blockIdx.x * 256 + threadIdx.x) * 2;
    if (at >= size) {
        return;
    }
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll 4
    for (int32_t i = 0; i < splits; i++) {
        float2 x = *(const float2*)(parts + i * size + at);
        sum.x += x.x;
        sum.y += x.y;
    }
    int64_t place = at / N * ldc + at % N;
    float2 old = make_float2(0.0f, 0.0f);
    if (flags & C_IS_BF16) {
        bf16* to = (bf16*)c + place;
        old = beta != 0.0f ? pair_load<0>(to, 1) : old;
        pair_store<0>(to, 1, fmaf(beta, old.x, sum.x * alpha), fmaf(beta, old.y, sum.y * alpha));
    } else {
        float* to = (float*)c + place;
        old = beta != 0.0f ? pair_load<0>(to, 1) : old;
        pair_store<0>(to, 1, fmaf(beta, old.x, sum.x * alpha), fmaf(beta, old.y, sum.y * alpha));
    }
}
