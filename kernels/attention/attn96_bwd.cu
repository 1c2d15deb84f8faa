// attn96_bwd.cu - the gradients of attn_tc.cuh for head size 96, and smaller ones.
// targets: 80
// groups: bf16 head96 train
#include "attn_tc.cuh"

ATTN_STATS(PADDED, 96, 96)
ATTN_BACKWARD_KV(PADDED, 96, 96, 2, 2, 64, 2)
ATTN_SUM(96)
ATTN_BACKWARD_Q(PADDED, 96, 96, 4, 2, 32, 32, 2, 2)
