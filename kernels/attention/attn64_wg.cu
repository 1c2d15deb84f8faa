// attn64_wg.cu - attn_wg.cuh for head size 64.
// targets: 90a
// groups: bf16 head64
#include "attn_wg.cuh"

ATTN_WG_FORWARD(64, 0.0f)
