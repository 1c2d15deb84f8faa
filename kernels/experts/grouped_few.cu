// grouped_few.cu - products of all experts (grouped.cuh) with at most 16, 32 or 64 columns, as
// those of adapters have; bf16 operands on tensor cores.
// targets: 80
// groups: bf16 experts
//
// The form `rows` with B [N,K]. Alignment as for gemm_tc.cu. Launch: 128 threads, grid: 2 x tiles
// that there can be, FEW_BYTES of dynamic shared memory.
// Determinism: one writer per element of C, fixed order along K.
#include "grouped_narrow.cuh"

#define GROUPED_FEW(size, pieces, blocks)                                                          \
    QLORA_KERNEL __launch_bounds__(128, blocks)                                                    \
        qlora_grouped_few_nt_##size(const __grid_constant__ grouped g) {                           \
        few_rows<pieces, true>(g);                                                                 \
    }
GROUPED_FEW(16, 1, 4)
GROUPED_FEW(32, 2, 4)
GROUPED_FEW(64, 4, 2)
