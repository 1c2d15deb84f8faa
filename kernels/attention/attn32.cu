// attn32.cu - attn_tc.cuh for head size 32, and smaller ones.
// targets: 80
// groups: bf16 head32
#include "attn_tc.cuh"

ATTN_FORWARD(PADDED, 32, 32, 4, 2, 64, 2, 2)
