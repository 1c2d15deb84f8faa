// decode_row_nf4.cu - products of one row with NF4 weights, for decoding (see decode_row.cuh).
// targets: 80 90
// groups: bf16 nf4
#include "decode_row.cuh"

// Registers for 512 threads and, beside them, a block of attention or a norm.
QLORA_KERNEL __maxnreg__(72) qlora_decode_row_nf4(const __grid_constant__ decode_product p) {
    extern __shared__ __align__(128) uint8_t shared[];
    early_next();
    row_run(p, shared);
}
