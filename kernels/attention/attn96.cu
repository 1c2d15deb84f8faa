// attn96.cu - attn_tc.cuh for head size 96, and smaller ones.
// targets: 80
// groups: bf16 head96
#include "attn_tc.cuh"

ATTN_FORWARD(PADDED, 96, 96, 4, 2, 64, 2, 2)
