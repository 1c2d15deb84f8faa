// linear.cu - the kernels of linear.cuh for f32.
// targets: 75
#include "linear.cuh"

LINEAR_PLACE(f32, float)
LINEAR_BIAS(f32, float)
