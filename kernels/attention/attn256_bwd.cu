// attn256_bwd.cu - the gradients of attn_tc.cuh for head size 256, and smaller ones, with or
// without a cap.
// targets: 80
// groups: bf16 head256 train
#include "attn_tc.cuh"

ATTN_STATS(CAPPED, 256, 256)
ATTN_BACKWARD_KV(CAPPED, 256, 256, 2, 1, 32, 2)
ATTN_SUM(256)
ATTN_BACKWARD_Q(CAPPED, 256, 256, 4, 1, 32, 32, 1, 2)
