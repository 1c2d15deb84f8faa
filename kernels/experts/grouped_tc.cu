// grouped_tc.cu - products of all experts (grouped.cuh) on tensor cores, bf16 operands.
// targets: 80
// groups: bf16 experts
//
// Alignment as for gemm_tc.cu. Launch: 128 threads.
//
//   kernel        grid                                                 shared memory
//   rows nn, nt   tiles that there can be, ceil(N / 128)                      65,536
//   rows narrow   2 x tiles that there can be, ceil(N / 64)                   98,304
//   sums          ceil(M / 64), ceil(N / 64), experts                         98,304
//
// Determinism: one writer per element of C, fixed order along K.
#include "../gemm/gemm_tc.cuh"
#include "grouped.cuh"

// C of the first of the rows that a tile's expert has.
__device__ __forceinline__ void* grouped_result(const grouped& g, const grouped_tile& t) {
    return (g.flags & C_IS_BF16) ? (void*)((bf16*)g.C + t.first * g.ldc)
                                 : (void*)((float*)g.C + t.first * g.ldc);
}

template <bool TB> __device__ __forceinline__ void grouped_rows(const grouped& g) {
    grouped_tile t;
    if (!grouped_tile_at(g, (int32_t)blockIdx.x, TILE, &t)) {
        return;
    }
    corner block = {t.row, (int32_t)blockIdx.y * TILE};
    tensor<false, TB>(block, 0, grouped_from<bf16>(g.A, t.first * g.lda),
                      grouped_from<bf16>(g.B, t.expert * g.stride), grouped_result(g, t), t.rows,
                      g.N, g.K, g.lda, g.ldb, g.ldc, 0, 0, 0, 0, 1.0f, 0.0f, g.flags);
}

QLORA_KERNEL __launch_bounds__(128, 2) qlora_grouped_tc_nn(const __grid_constant__ grouped g) {
    grouped_rows<false>(g);
}

QLORA_KERNEL __launch_bounds__(128, 2) qlora_grouped_tc_nt(const __grid_constant__ grouped g) {
    grouped_rows<true>(g);
}

QLORA_KERNEL __launch_bounds__(128, 2) qlora_grouped_tc_narrow(const __grid_constant__ grouped g) {
    grouped_tile t;
    if (!grouped_tile_at(g, (int32_t)blockIdx.x, SIDE, &t)) {
        return;
    }
    corner block = {t.row, (int32_t)blockIdx.y * SIDE};
    narrow(block, 0, grouped_from<bf16>(g.A, t.first * g.lda),
           grouped_from<bf16>(g.B, t.expert * g.stride), grouped_result(g, t), t.rows, g.N, g.K,
           g.lda, g.ldb, g.ldc, 0, 0, 0, 0, 1.0f, 0.0f, g.flags);
}

QLORA_KERNEL __launch_bounds__(128, 2) qlora_grouped_tc_sums(const __grid_constant__ grouped g) {
    int32_t expert = (int32_t)blockIdx.z;
    int32_t first = g.starts[expert];
    int32_t rows = g.starts[expert + 1] - first;
    if (rows == 0) { // C_e + 0
        return;
    }
    corner block = {(int32_t)blockIdx.x * SIDE, (int32_t)blockIdx.y * SIDE};
    narrow(block, 0, grouped_from<bf16>(g.A, first * g.lda), grouped_from<bf16>(g.B, first * g.ldb),
           (float*)g.C + expert * g.stride, g.M, g.N, rows, g.lda, g.ldb, g.ldc, 0, 0, 0, 0,
           g.alpha, g.beta, g.flags);
}
