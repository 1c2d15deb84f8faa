// grouped_tc_bwd.cu - products of all experts (grouped.cuh) on tensor cores, of the backward pass.
// targets: 80
// groups: bf16 experts train
//
// Alignment as for gemm_tc.cu. Launch: 128 threads.
//
//   kernel   grid                                    shared memory
//   nn       tiles that there can be, ceil(N / 128)         65,536
//   sums     ceil(M / 64), ceil(N / 64), experts            98,304
//
// Determinism: one writer per element of C, fixed order along K.
#include "grouped_tc.cuh"

QLORA_KERNEL __launch_bounds__(128, 2) qlora_grouped_tc_nn(const __grid_constant__ grouped g) {
    grouped_rows<false>(g);
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
