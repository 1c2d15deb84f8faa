// linear_bf16.cu - the kernels of linear.cuh for bf16.
// targets: 80
// groups: bf16
#include "linear.cuh"

LINEAR_PLACE(bf16, bf16)
LINEAR_BIAS(bf16, bf16)
LINEAR_KEEP_OWN(bf16, bf16)
