// grouped_few.cu - products of all experts (grouped.cuh) with as few columns as adapters have,
// at most 16 or 32; bf16 operands on tensor cores.
// targets: 80
// groups: bf16 experts
//
// Alignment as for gemm_tc.cu. Launch: 128 threads, FEW_BYTES of dynamic shared memory.
//
// The form `rows`; grid: 2 x tiles that there can be.
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

QLORA_KERNEL __launch_bounds__(128, 4)
    qlora_grouped_few_rows_16(const __grid_constant__ grouped g) {
    few_rows<1>(g);
}

QLORA_KERNEL __launch_bounds__(128, 4)
    qlora_grouped_few_rows_32(const __grid_constant__ grouped g) {
    few_rows<2>(g);
}
