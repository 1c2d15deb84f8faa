// attn256.cu - attn_tc.cuh for head size 256, and smaller ones, with or without a cap.
// targets: 80
// groups: bf16 head256
#include "attn_tc.cuh"

ATTN_FORWARD(CAPPED, 256, 256, 4, 1, 64, 1, 2)
