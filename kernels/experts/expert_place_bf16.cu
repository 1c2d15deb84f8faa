// expert_place_bf16.cu - the kernel of expert_place.cuh in bf16.
// targets: 80
// groups: bf16 experts
#include "expert_place.cuh"

EXPERT_PLACE(bf16, bf16)
