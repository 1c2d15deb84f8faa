// grouped_few.cu - products of all experts (grouped.cuh) with the ranks of adapters as one side of
// the result, at most 16 or 32; bf16 operands on tensor cores.
// targets: 80
// groups: bf16 experts
//
// Alignment as for gemm_tc.cu. Launch: 128 threads, FEW_BYTES of dynamic shared memory.
//
//   kernel   result            grid
//   rows     few columns       2 x tiles that there can be
//   tall     sums, few columns ceil(M / 64), 1, experts
//   wide     sums, few rows    1, ceil(N / 64), experts
//
// Determinism: one writer per element of C, fixed order along K.
#include "grouped_narrow.cuh"

#include "grouped.cuh"

template <int COLS> __device__ __forceinline__ void few_rows(const grouped& g) {
    grouped_tile t;
    if (!grouped_tile_at(g, (int32_t)blockIdx.x, SIDE, &t)) {
        return;
    }
    corner block = {t.row, 0};
    const bf16* a = grouped_from<bf16>(g.A, t.first * g.lda);
    const bf16* b = grouped_from<bf16>(g.B, t.expert * g.stride);
    void* c = (g.flags & C_IS_BF16) ? (void*)((bf16*)g.C + t.first * g.ldc)
                                    : (void*)((float*)g.C + t.first * g.ldc);
    if (g.flags & B_TRANSPOSED) {
        few<4, COLS, false, true>(block, a, b, c, t.rows, g.N, g.K, g.lda, g.ldb, g.ldc, 1.0f, 0.0f,
                                  g.flags);
    } else {
        few<4, COLS, false, false>(block, a, b, c, t.rows, g.N, g.K, g.lda, g.ldb, g.ldc, 1.0f,
                                   0.0f, g.flags);
    }
}

template <int ROWS, int COLS> __device__ __forceinline__ void few_sums(const grouped& g) {
    int32_t expert = (int32_t)blockIdx.z;
    int32_t first = g.starts[expert];
    int32_t rows = g.starts[expert + 1] - first;
    corner block = {(int32_t)blockIdx.x * 16 * ROWS, (int32_t)blockIdx.y * 16 * COLS};
    if (rows == 0) { // C_e + 0
        return;
    }
    const int32_t* list = COLS == 4 && g.list ? g.list + first : 0;
    few<ROWS, COLS, true, false>(block, grouped_from<bf16>(g.A, first * g.lda),
                                 grouped_from<bf16>(g.B, list ? 0 : first * g.ldb),
                                 (float*)g.C + expert * g.stride, g.M, g.N, rows, g.lda, g.ldb,
                                 g.ldc, g.alpha, g.beta, g.flags, list);
}

#define GROUPED_FEW(size, pieces)                                                                  \
    QLORA_KERNEL __launch_bounds__(128, 4)                                                         \
        qlora_grouped_few_rows_##size(const __grid_constant__ grouped g) {                         \
        few_rows<pieces>(g);                                                                       \
    }                                                                                              \
    QLORA_KERNEL __launch_bounds__(128, 4)                                                         \
        qlora_grouped_few_tall_##size(const __grid_constant__ grouped g) {                         \
        few_sums<4, pieces>(g);                                                                    \
    }                                                                                              \
    QLORA_KERNEL __launch_bounds__(128, 4)                                                         \
        qlora_grouped_few_wide_##size(const __grid_constant__ grouped g) {                         \
        few_sums<pieces, 4>(g);                                                                    \
    }
GROUPED_FEW(16, 1)
GROUPED_FEW(32, 2)
