// grouped_wg_bwd.cu - the product of grouped_wg.cuh with B [K,N], of the backward pass.
// targets: 90a
// groups: bf16 experts train
#include "grouped_wg.cuh"

QLORA_KERNEL __launch_bounds__(384, 1)
    qlora_grouped_wg_nn(const __grid_constant__ tensor_map a, const __grid_constant__ tensor_map b,
                        const __grid_constant__ grouped_wide g) {
    grouped_product<false>(&a, &b, g);
}
