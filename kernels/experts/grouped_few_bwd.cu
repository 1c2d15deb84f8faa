// grouped_few_bwd.cu - the form `sums` of grouped.cuh with at most 16 or 32 columns or rows.
// targets: 80
// groups: bf16 experts train
//
// Alignment as for gemm_tc.cu. Launch: 128 threads, FEW_BYTES of dynamic shared memory.
//
//   kernel   result        grid
//   tall     few columns   ceil(M / 64), 1, experts
//   wide     few rows      1, ceil(N / 64), experts
//
// Determinism: one writer per element of C, fixed order along K.
#include "grouped_narrow.cuh"

#include "grouped.cuh"

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
        qlora_grouped_few_tall_##size(const __grid_constant__ grouped g) {                         \
        few_sums<4, pieces>(g);                                                                    \
    }                                                                                              \
    QLORA_KERNEL __launch_bounds__(128, 4)                                                         \
        qlora_grouped_few_wide_##size(const __grid_constant__ grouped g) {                         \
        few_sums<pieces, 4>(g);                                                                    \
    }
GROUPED_FEW(16, 1)
GROUPED_FEW(32, 2)
