// expert_place.cu - the kernel of expert_place.cuh in f32.
// targets: 75
// groups: f32 experts
#include "expert_place.cuh"

EXPERT_PLACE(f32, float)
