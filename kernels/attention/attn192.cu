// attn192.cu - attn_tc.cuh for head size 192, and smaller ones.
// targets: 80
// groups: bf16 head192
#include "attn_tc.cuh"

ATTN_FORWARD(PADDED, 192, 192, 4, 1, 64, 1, 2)
