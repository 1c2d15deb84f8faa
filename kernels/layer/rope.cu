// rope.cu - the kernels of rope.cuh for f32.
// targets: 75
// groups: f32
#include "rope.cuh"

QLORA_KERNEL __launch_bounds__(256, 3)
    qlora_rope_f32(float* x, int64_t ld, const int32_t* positions, const float* table,
                   int64_t ld_table, int32_t max_pos, const void* bias, int32_t bias_bf16,
                   int32_t heads, int32_t rotated, int32_t half, float sign, int32_t* bad,
                   int32_t dim, int32_t neighbours) {
    rope(x, ld, positions, table, ld_table, max_pos, bias, bias_bf16, heads, rotated, half, sign,
         bad, dim, neighbours);
}
