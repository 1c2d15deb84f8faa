// routed_bwd.cu - those of its backward pass in f32.
// targets: 75
// groups: f32 experts train
#include "routed.cuh"

ROUTED_BACKWARD(f32, float)
