// attn256_wg_bwd.cu - the gradients of attn_wg.cuh for head size 256, with or without a cap.
// targets: 90a
// groups: bf16 head256 train
#include "attn_wg.cuh"

ATTN_WG_STATS(256, 16)
ATTN_WG_BACKWARD_KV(256, attn_backward_each, cap, , float cap)
ATTN_SUM(256_wg)
ATTN_WG_BACKWARD_Q(256, cap, , float cap)
