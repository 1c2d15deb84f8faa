// attn96.cu - attn_tc.cuh for head size 96.
// targets: 80
// groups: bf16 head96
#include "attn_tc.cuh"

ATTN_FORWARD(96, 4, 2, 64, 2, 2)
ATTN_STATS(96)
ATTN_BACKWARD_KV(96, 2, 2, 32, 2)
ATTN_SUM(96)
ATTN_BACKWARD_Q(96, 4, 2, 32, 32, 2, 2)
