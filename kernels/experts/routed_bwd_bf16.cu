// routed_bwd_bf16.cu - those of its backward pass in bf16.
// targets: 80
// groups: bf16 experts train
#include "routed.cuh"

ROUTED_BACKWARD(bf16, bf16)
