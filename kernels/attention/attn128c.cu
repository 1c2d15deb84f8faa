// attn128c.cu - attn_tc.cuh for head size 128, and smaller ones, with or without a cap.
// targets: 80
// groups: bf16 head128cap
#include "attn_tc.cuh"

ATTN_FORWARD(CAPPED, 128c, 128, 4, 2, 64, 1, 2)
