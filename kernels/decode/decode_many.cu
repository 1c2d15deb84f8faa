// decode_many.cu - products of many rows with bf16 weights, for decoding (see decode_many.cuh).
// targets: 80 90
// groups: bf16
#include "decode_many.cuh"

QLORA_KERNEL __launch_bounds__(MANY_THREADS, 1)
    qlora_decode_many_dense(const __grid_constant__ decode_many m) {
    extern __shared__ __align__(128) uint8_t shared[];
    early_next();
    many_run<many_dense>(m, shared);
}
