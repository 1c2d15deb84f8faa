// grouped_tc.cuh - the form `rows` of grouped.cuh on tensor cores.
#ifndef QLORA_GROUPED_TC_CUH
#define QLORA_GROUPED_TC_CUH

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

#endif
