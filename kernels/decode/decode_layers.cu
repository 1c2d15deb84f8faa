// decode_layers.cu - all layers of a decoding step of a single text (see decode_layers.cuh).
// targets: 80
// groups: bf16 nf4
#include "decode_layers.cuh"

QLORA_KERNEL __launch_bounds__(LAYER_THREADS, 1)
    qlora_decode_layers(const __grid_constant__ decode_layers p) {
    extern __shared__ __align__(128) uint8_t shared[];
    layers_run(p, shared);
}
