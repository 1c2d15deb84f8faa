// attn128_bwd.cu - the gradients of attn_tc.cuh for head size 128.
// targets: 80
// groups: bf16 head128 train
#include "attn_tc.cuh"

ATTN_STATS(EXACT, 128, 128)
ATTN_BACKWARD_KV(EXACT, 128, 128, 2, 2, 32, 2)
ATTN_SUM(128)
ATTN_BACKWARD_Q(EXACT, 128, 128, 4, 2, 32, 32, 2, 2)
