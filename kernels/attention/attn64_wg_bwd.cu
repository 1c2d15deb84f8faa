// attn64_wg_bwd.cu - the gradients of attn_wg.cuh for head size 64.
// targets: 90a
// groups: bf16 head64 train
#include "attn_wg.cuh"

ATTN_WG_STATS(64, 8)
ATTN_WG_BACKWARD_KV(64, attn_backward_kv, 0.0f)
ATTN_SUM(64_wg)
ATTN_WG_BACKWARD_Q(64, 0.0f)
