// grouped_tc.cu - products of all experts (grouped.cuh) on tensor cores, bf16 operands: `rows`.
// targets: 80
// groups: bf16 experts
//
// B is [N,K]. Alignment as for gemm_tc.cu. Launch: 128 threads, grid (tiles that there can be,
// ceil(N / 128)), 65,536 bytes of dynamic shared memory.
// Determinism: one writer per element of C, fixed order along K.
#include "grouped_tc.cuh"

QLORA_KERNEL __launch_bounds__(128, 2) qlora_grouped_tc_nt(const __grid_constant__ grouped g) {
    grouped_rows<true>(g);
}
