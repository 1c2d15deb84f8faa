// attn80_bwd.cu - the gradients of attn_tc.cuh for head size 80, and smaller ones.
// targets: 80
// groups: bf16 head80 train
#include "attn_tc.cuh"

ATTN_STATS(PADDED, 80, 80)
ATTN_BACKWARD_KV(PADDED, 80, 80, 2, 2, 64, 2)
ATTN_SUM(80)
ATTN_BACKWARD_Q(PADDED, 80, 80, 4, 2, 64, 64, 2, 2)
