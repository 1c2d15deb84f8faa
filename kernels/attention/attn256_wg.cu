// attn256_wg.cu - attn_wg.cuh for head size 256, with or without a cap.
// targets: 90a
// groups: bf16 head256
#include "attn_wg.cuh"

ATTN_WG_FORWARD(256, cap, , float cap)
