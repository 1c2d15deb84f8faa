// attn128.cu - attn_tc.cuh for head size 128.
// targets: 80
// groups: bf16 head128
#include "attn_tc.cuh"

ATTN_FORWARD(EXACT, 128, 128, 4, 2, 64, 1, 2)
