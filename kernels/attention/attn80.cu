// attn80.cu - attn_tc.cuh for head size 80, and smaller ones.
// targets: 80
// groups: bf16 head80
#include "attn_tc.cuh"

ATTN_FORWARD(PADDED, 80, 80, 4, 2, 64, 1, 2)
