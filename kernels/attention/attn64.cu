// attn64.cu - attn_tc.cuh for head size 64.
// targets: 80
// groups: bf16 head64
#include "attn_tc.cuh"

ATTN_FORWARD(EXACT, 64, 64, 4, 2, 64, 2, 2)
