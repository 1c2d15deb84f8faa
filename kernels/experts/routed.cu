// routed.cu - the kernels of routed.cuh in f32.
// targets: 75
// groups: f32 experts
#include "routed.cuh"

ROUTED(f32, float)
