// grouped_wg.cu - the product of grouped_wg.cuh with B [N,K], of the forward pass.
// targets: 90a
// groups: bf16 experts
#include "grouped_wg.cuh"

QLORA_KERNEL __launch_bounds__(384, 1)
    qlora_grouped_wg_nt(const __grid_constant__ tensor_map a, const __grid_constant__ tensor_map b,
                        const __grid_constant__ grouped_wide g) {
    grouped_product<true>(&a, &b, g);
}
