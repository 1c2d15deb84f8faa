// grouped_wg.cuh - products of all experts with the warpgroup instructions of sm_90a.
//
// The form `rows` of grouped.cuh in bf16, with B [K,N] (nn) or [N,K] (nt). A and B come as tensor
// maps as for gemm_wg.cu: A has all sorted rows, B the matrices of all experts below each other,
// `apart` rows from one to the next. A tile that goes beyond the rows of its expert multiplies
// those of the next one, and does not store them: not to multiply a half without rows was measured,
// and is slower. If K is not a multiple of 64, the last slice of B has rows beyond K (nn), which
// must be finite: the columns of A beyond K are zeros. Neighbouring blocks have the columns of the
// same rows, and the matrices of a few experts, which stay in the L2 cache.
//
// Launch: 384 threads, as many blocks as there are multiprocessors, dynamic shared memory
// STAGES * (128 + 256) * 128 + 1024 + 32,768 bytes. flags 2: N and ldc are multiples of 8.
// Determinism: one writer per element of C, fixed order along K.
#ifndef QLORA_GROUPED_WG_CUH
#define QLORA_GROUPED_WG_CUH

#include "../gemm/gemm_wg.cuh"

enum { WIDTH = 256, STAGES = 4 };

// Same layout as qlora__grouped_wide.
struct grouped_wide {
    bf16* c;
    const int32_t* starts;
    const int32_t* tiles; // see routing.cu
    int64_t ldc;
    int32_t N;
    int32_t K;
    int32_t apart;
    int32_t flags;
};

// A tile of C: its rows are from t.row on, up to `end`.
struct expert_tile {
    tile t;
    int32_t end;
    int32_t below; // row of B where the matrix of its expert begins
};

__device__ __forceinline__ expert_tile expert_tile_at(const grouped_wide& g, int32_t index,
                                                      int32_t cols) {
    expert_tile e;
    int32_t i = index / cols;
    int32_t expert = g.tiles[2 * i + 1];
    e.t.row = g.tiles[2 * i + 2];
    e.t.col = index % cols * WIDTH;
    e.end = g.starts[expert + 1];
    e.below = expert * g.apart;
    return e;
}

// The copying thread.
template <bool TB>
__device__ __forceinline__ void copy_expert_tiles(const tensor_map* a, const tensor_map* b,
                                                  uint32_t buffer, uint32_t full, uint32_t empty,
                                                  const grouped_wide& g) {
    const uint32_t bytes = (ROWS + WIDTH) * PANEL_ROW;
    int32_t rows = g.tiles[0];
    int32_t cols = (g.N + WIDTH - 1) / WIDTH;
    int32_t slices = (g.K + DEPTH - 1) / DEPTH;
    uint32_t stage = 0;
    uint32_t phase = 1; // a new buffer is empty
    for (int32_t i = blockIdx.x; i < rows * cols; i += gridDim.x) {
        expert_tile e = expert_tile_at(g, i, cols);
        for (int32_t k = 0; k < slices; k++) {
            uint32_t to = buffer + stage * bytes;
            barrier_wait(empty + 8 * stage, phase);
            barrier_expect(full + 8 * stage, bytes);
            copy_slice<true, ROWS>(to, a, full + 8 * stage, e.t.row, k * DEPTH);
            copy_slice<TB, WIDTH>(to + ROWS * PANEL_ROW, b, full + 8 * stage,
                                  e.t.col + (TB ? e.below : 0), k * DEPTH + (TB ? 0 : e.below));
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            phase ^= stage == 0;
        }
    }
}

// The multiplying warpgroups.
template <bool TB>
__device__ __forceinline__ void multiply_expert_tiles(uint32_t buffer, uint32_t full,
                                                      uint32_t empty, const grouped_wide& g) {
    const uint32_t bytes = (ROWS + WIDTH) * PANEL_ROW;
    const uint32_t own = (threadIdx.x / 128 - 1) * PANEL * PANEL_ROW;
    const bool first_thread = threadIdx.x % 128 == 0;
    int32_t rows = g.tiles[0];
    int32_t cols = (g.N + WIDTH - 1) / WIDTH;
    int32_t slices = (g.K + DEPTH - 1) / DEPTH;
    uint32_t stage = 0;
    uint32_t phase = 0;
    for (int32_t i = blockIdx.x; i < rows * cols; i += gridDim.x) {
        expert_tile e = expert_tile_at(g, i, cols);
        shape s;
        s.M = e.end;
        s.N = g.N;
        s.alpha = 1.0f;
        s.beta = 0.0f;
        float d[WIDTH / 2];
        uint32_t before = 0;
        for (int32_t k = 0; k < slices; k++) {
            uint32_t a = buffer + stage * bytes + own;
            uint32_t b = buffer + stage * bytes + ROWS * PANEL_ROW;
            barrier_wait(full + 8 * stage, phase);
            products_begin();
#pragma unroll
            for (int j = 0; j < DEPTH / 16; j++) {
                product<false, !TB>(d, step_operand<true>(a, j), step_operand<TB>(b, j), k + j > 0);
            }
            products_commit();
            products_wait<1>(); // the slice before is no longer read
            if (k > 0 && first_thread) {
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
        if (g.flags & C_HAS_CHUNKS) {
            store_tile_staged<WIDTH>(d, g.c, g.ldc, e.t, s, buffer + STAGES * bytes);
        } else {
            store_tile<WIDTH>(d, g.c, g.ldc, e.t, s);
        }
    }
}

template <bool TB>
__device__ __forceinline__ void grouped_product(const tensor_map* a, const tensor_map* b,
                                                const grouped_wide& g) {
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
    if (threadIdx.x < 128) {
        registers_few();
        if (threadIdx.x == 0) {
            copy_expert_tiles<TB>(a, b, buffer, full, empty, g);
        }
    } else {
        registers_many();
        multiply_expert_tiles<TB>(buffer, full, empty, g);
    }
}

#endif
