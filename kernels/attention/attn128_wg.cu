// attn128_wg.cu - attn_wg.cuh for head size 128.
// targets: 90a
// groups: bf16 head128
#include "attn_wg.cuh"

ATTN_WG_FORWARD(128, 0.0f)
