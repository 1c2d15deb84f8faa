// fp8_base.cu - the kernels of fp8_base.cuh that quantise, and that dequantise to f32.
// targets: 75
// groups: fp8
#include "fp8_base.cuh"

FP8_BASE_QUANTISE(f32, float)
FP8_BASE_QUANTISE(bf16, bf16)
FP8_BASE_QUANTISE(f16, f16)

FP8_BASE_DEQUANTISE(f32, float)
