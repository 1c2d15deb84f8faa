// decode_row_nf4.cu - products of one row with NF4 weights, for decoding (see decode_row.cuh).
// targets: 80 90
// groups: bf16 nf4
#include "decode_row.cuh"

QLORA_KERNEL __launch_bounds__(ROW_WARPS * 32, 2)
    qlora_decode_row_nf4(const __grid_constant__ decode_product p) {
    extern __shared__ __align__(128) uint8_t shared[];
    early_next();
    bool plain = p.parts[0].absmax != 0;
    float middle[3] = {0.0f, 0.0f, 0.0f};
    if (!plain) {
        middle[0] = *p.parts[0].offset;
        middle[1] = p.count > 1 ? *p.parts[1].offset : 0.0f;
        middle[2] = p.count > 2 ? *p.parts[2].offset : 0.0f;
    }
    row_run(p, shared, middle[0], middle[1], middle[2]);
}
