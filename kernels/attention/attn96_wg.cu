// attn96_wg.cu - attn_wg.cuh for head size 96.
// targets: 90a
// groups: bf16 head96
#include "attn_wg.cuh"

ATTN_WG_FORWARD(96, 0.0f)
