// attn192_bwd.cu - the gradients of attn_tc.cuh for head size 192, and smaller ones.
// targets: 80
// groups: bf16 head192 train
#include "attn_tc.cuh"

ATTN_STATS(PADDED, 192, 192)
ATTN_BACKWARD_KV(PADDED, 192, 192, 4, 1, 64, 1)
ATTN_SUM(192)
ATTN_BACKWARD_Q(PADDED, 192, 192, 4, 1, 32, 32, 2, 2)
