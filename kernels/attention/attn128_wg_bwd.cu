// attn128_wg_bwd.cu - the gradients of attn_wg.cuh for head size 128.
// targets: 90a
// groups: bf16 head128 train
#include "attn_wg.cuh"

ATTN_WG_STATS(128, 16)
ATTN_WG_BACKWARD_KV(128, attn_backward_kv, 0.0f)
ATTN_SUM(128_wg)
ATTN_WG_BACKWARD_Q(128, 0.0f)
