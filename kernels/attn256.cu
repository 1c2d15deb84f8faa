// attn256.cu - attn_tc.cuh for head size 256.
// targets: 80
// groups: bf16 head256
#include "attn_tc.cuh"

ATTN_FORWARD(256, 4, 1, 64, 1, 2)
ATTN_STATS(256)
ATTN_BACKWARD_KV(256, 2, 1, 32, 2)
ATTN_SUM(256)
ATTN_BACKWARD_Q(256, 4, 1, 32, 32, 1, 2)
