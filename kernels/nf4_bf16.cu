// nf4_bf16.cu - the kernels of nf4.cuh that dequantise to 16 bits.
// targets: 80
// groups: bf16 nf4
#include "nf4.cuh"

NF4_DEQUANTISE(bf16, bf16)
NF4_DEQUANTISE(f16, f16)
