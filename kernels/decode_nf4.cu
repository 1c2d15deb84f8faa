// decode_nf4.cu - products of few rows with NF4 weights, for decoding (see decode.cuh).
// targets: 80
// groups: bf16 nf4
#include "decode.cuh"

// Dynamic shared memory: DECODE_TABLE + DECODE_MAP + (2 * warps + 1) * 512 bytes.
QLORA_KERNEL __launch_bounds__(DECODE_WARPS * 32, 1)
    qlora_decode_nf4(const __grid_constant__ decode_product p) {
    extern __shared__ __align__(128) uint8_t shared[];
    bool plain = p.parts[0].absmax != 0;
    float middle[3] = {0.0f, 0.0f, 0.0f};
    if (!plain) {
        middle[0] = *p.parts[0].offset;
        middle[1] = p.count > 1 ? *p.parts[1].offset : 0.0f;
        middle[2] = p.count > 2 ? *p.parts[2].offset : 0.0f;
    }
    for (int32_t i = (int32_t)threadIdx.x; i < 256 * 8; i += (int32_t)blockDim.x) {
        uint32_t pair = pack_bf16(p.maps[i / 8 / 16], p.maps[i / 8 % 16]);
        ((uint4*)shared)[i] = make_uint4(pair, pair, pair, pair);
    }
    for (int32_t i = (int32_t)threadIdx.x; i < 256; i += (int32_t)blockDim.x) {
        ((float*)(shared + DECODE_TABLE))[i] = p.maps[16 + i];
    }
    decode_run<decode_nf4, decode_x256>(p, shared, (float*)(shared + DECODE_TABLE + DECODE_MAP),
                                        middle[0], middle[1], middle[2]);
}
