// attn192.cu - attn_tc.cuh for head size 192.
// targets: 80
// groups: bf16 head192
#include "attn_tc.cuh"

ATTN_FORWARD(192, 4, 1, 64, 1, 2)
ATTN_STATS(192)
ATTN_BACKWARD_KV(192, 2, 1, 32, 2)
ATTN_SUM(192)
ATTN_BACKWARD_Q(192, 4, 1, 32, 32, 2, 2)
