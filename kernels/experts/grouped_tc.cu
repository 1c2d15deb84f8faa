// grouped_tc.cu - products of all experts (grouped.cuh) on tensor cores, bf16 operands: `rows`.
// targets: 80
// groups: bf16 experts
//
// Alignment as for gemm_tc.cu. Launch: 128 threads.
//
//   kernel   grid                                    shared memory
//   nt       tiles that there can be, ceil(N / 128)         65,536
//   narrow   2 x tiles that there can be, ceil(N / 64)      98,304
//
// Determinism: one writer per element of C, fixed order along K.
#include "grouped_tc.cuh"

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
