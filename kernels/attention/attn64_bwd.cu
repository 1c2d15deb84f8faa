// attn64_bwd.cu - the gradients of attn_tc.cuh for head size 64.
// targets: 80
// groups: bf16 head64 train
#include "attn_tc.cuh"

ATTN_STATS(EXACT, 64, 64)
ATTN_BACKWARD_KV(EXACT, 64, 64, 2, 2, 64, 2)
ATTN_SUM(64)
ATTN_BACKWARD_Q(EXACT, 64, 64, 4, 2, 64, 64, 2, 2)
