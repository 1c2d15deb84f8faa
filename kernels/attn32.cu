// attn32.cu - attn_tc.cuh for head size 32.
// targets: 80
// groups: bf16 head32
#include "attn_tc.cuh"

ATTN_FORWARD(32, 4, 2, 64, 2, 2)
ATTN_STATS(32)
ATTN_BACKWARD_KV(32, 2, 2, 64, 2)
ATTN_SUM(32)
ATTN_BACKWARD_Q(32, 4, 2, 64, 64, 2, 2)
