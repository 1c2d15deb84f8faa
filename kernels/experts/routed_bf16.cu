// routed_bf16.cu - the kernels of routed.cuh in bf16.
// targets: 80
// groups: bf16 experts
#include "routed.cuh"

ROUTED(bf16, bf16)
