// attn80.cu - attn_tc.cuh for head size 80.
// targets: 80
// groups: bf16 head80
#include "attn_tc.cuh"

ATTN_FORWARD(80, 4, 2, 64, 2, 2)
ATTN_STATS(80)
ATTN_BACKWARD_KV(80, 2, 2, 64, 2)
ATTN_SUM(80)
ATTN_BACKWARD_Q(80, 4, 2, 64, 32, 2, 2)
