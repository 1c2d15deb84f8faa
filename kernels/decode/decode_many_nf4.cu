// decode_many_nf4.cu - products of many rows with NF4 weights, for decoding (see decode_many.cuh).
// targets: 80 90
// groups: bf16 nf4
#include "decode_many.cuh"

QLORA_KERNEL __launch_bounds__(MANY_THREADS, 1)
    qlora_decode_many_nf4(const __grid_constant__ decode_many m) {
    extern __shared__ __align__(128) uint8_t shared[];
    early_next();
    many_run<many_nf4>(m, shared);
}
