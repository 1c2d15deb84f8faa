// attn128c_bwd.cu - the gradients of attn_tc.cuh for head size 128, and smaller ones, with or
// without a cap.
// targets: 80
// groups: bf16 head128cap train
#include "attn_tc.cuh"

ATTN_STATS(CAPPED, 128c, 128)
ATTN_BACKWARD_KV(CAPPED, 128c, 128, 2, 2, 32, 2)
ATTN_SUM(128c)
ATTN_BACKWARD_Q(CAPPED, 128c, 128, 4, 2, 32, 32, 2, 2)
