// fp8_base_bf16.cu - the kernel of fp8_base.cuh that dequantises to bf16.
// targets: 80
// groups: bf16 fp8
#include "fp8_base.cuh"

FP8_BASE_DEQUANTISE(bf16, bf16)
