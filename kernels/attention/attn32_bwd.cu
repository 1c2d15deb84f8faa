// attn32_bwd.cu - the gradients of attn_tc.cuh for head size 32, and smaller ones.
// targets: 80
// groups: bf16 head32 train
#include "attn_tc.cuh"

ATTN_STATS(PADDED, 32, 32)
ATTN_BACKWARD_KV(PADDED, 32, 32, 2, 2, 64, 3)
ATTN_SUM(32)
ATTN_BACKWARD_Q(PADDED, 32, 32, 4, 2, 64, 64, 2, 2)
