// decode_nf4.cu - products of few rows with NF4 weights, for decoding (see decode.cuh).
// targets: 80 90
// groups: bf16 nf4
#include "decode.cuh"

// Dynamic shared memory: DECODE_TABLE + DECODE_MAP + (2 * warps + 1) * 512 bytes.
QLORA_KERNEL __launch_bounds__(DECODE_WARPS * 32, 1)
    qlora_decode_nf4(const __grid_constant__ decode_product p) {
    extern __shared__ __align__(128) uint8_t shared[];
    early_next();
    bool plain = p.parts[0].absmax != 0;
    float middle[3] = {0.0f, 0.0f, 0.0f};
    if (!plain) {
        middle[0] = *p.parts[0].offset;
        middle[1] = p.count > 1 ? *p.parts[1].offset : 0.0f;
        middle[2] = p.count > 2 ? *p.parts[2].offset : 0.0f;
    }
    decode_run<decode_nf4, decode_x256>(p, shared, (float*)(shared + DECODE_TABLE + DECODE_MAP),
                                        middle[0], middle[1], middle[2]);
}
