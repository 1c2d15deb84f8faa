// attn96_wg_bwd.cu - the gradients of attn_wg.cuh for head size 96.
// targets: 90a
// groups: bf16 head96 train
#include "attn_wg.cuh"

ATTN_WG_STATS(96, 4)
ATTN_WG_BACKWARD_KV(96, attn_backward_kv, 0.0f)
ATTN_SUM(96_wg)
ATTN_WG_BACKWARD_Q(96, 0.0f)
