// elementwise_bf16.cu - the kernels of elementwise.cuh for bf16.
// targets: 80
// groups: bf16
#include "elementwise.cuh"

QLORA_KERNEL qlora_elementwise_silu_bf16(const bf16* x, int64_t ldx, bf16* y, int64_t ldy,
                                         int64_t rows, int64_t cols) {
    map_one(silu_op<bf16>(), x, ldx, y, ldy, rows, cols);
}

QLORA_KERNEL qlora_elementwise_silu_bwd_bf16(const bf16* x, int64_t ldx, const bf16* dy,
                                             int64_t lddy, bf16* dx, int64_t lddx, int64_t rows,
                                             int64_t cols) {
    map_two(silu_grad_op<bf16>(), x, ldx, dy, lddy, dx, lddx, rows, cols);
}

QLORA_KERNEL qlora_elementwise_swiglu_bf16(const bf16* gate, int64_t ldg, const bf16* up,
                                           int64_t ldu, bf16* h, int64_t ldh, int64_t rows,
                                           int64_t cols) {
    map_two(swiglu_op<bf16>(), gate, ldg, up, ldu, h, ldh, rows, cols);
}

QLORA_KERNEL qlora_elementwise_swiglu_bwd_bf16(const bf16* dh, int64_t lddh, const bf16* g,
                                               int64_t ldg, const bf16* u, int64_t ldu, bf16* dg,
                                               int64_t lddg, bf16* du, int64_t lddu, bf16* h,
                                               int64_t ldh, int64_t rows, int64_t cols) {
    gated_bwd<silu_gate<bf16>>(dh, lddh, g, ldg, u, ldu, dg, lddg, du, lddu, h, ldh, rows, cols);
}

// The same with GELU instead of SiLU.
QLORA_KERNEL qlora_elementwise_geglu_bf16(const bf16* gate, int64_t ldg, const bf16* up,
                                          int64_t ldu, bf16* h, int64_t ldh, int64_t rows,
                                          int64_t cols) {
    map_two(geglu_op<bf16>(), gate, ldg, up, ldu, h, ldh, rows, cols);
}

QLORA_KERNEL qlora_elementwise_geglu_bwd_bf16(const bf16* dh, int64_t lddh, const bf16* g,
                                              int64_t ldg, const bf16* u, int64_t ldu, bf16* dg,
                                              int64_t lddg, bf16* du, int64_t lddu, bf16* h,
                                              int64_t ldh, int64_t rows, int64_t cols) {
    gated_bwd<gelu_gate<bf16>>(dh, lddh, g, ldg, u, ldu, dg, lddg, du, lddu, h, ldh, rows, cols);
}

QLORA_KERNEL qlora_elementwise_mul_bf16(const bf16* a, int64_t lda, const bf16* b, int64_t ldb,
                                        bf16* y, int64_t ldy, int64_t rows, int64_t cols) {
    map_two(mul_op(), a, lda, b, ldb, y, ldy, rows, cols);
}

QLORA_KERNEL qlora_elementwise_add_bf16(const bf16* a, int64_t lda, const bf16* b, int64_t ldb,
                                        bf16* y, int64_t ldy, int64_t rows, int64_t cols) {
    map_two(add_op(), a, lda, b, ldb, y, ldy, rows, cols);
}

QLORA_KERNEL qlora_elementwise_scale_bf16(const bf16* x, int64_t ldx, bf16* y, int64_t ldy,
                                          int64_t rows, int64_t cols, float alpha) {
    scale_op op = {alpha};
    map_one(op, x, ldx, y, ldy, rows, cols);
}

// y = x for rows of a few pieces of 8 columns, which would leave most threads of map_one idle. All
// rows begin at multiples of 16 bytes. Launch: 256 threads, grid ceil(rows * pieces / 256).
QLORA_KERNEL qlora_elementwise_narrow_bf16(const bf16* x, int64_t ldx, bf16* y, int64_t ldy,
                                           int64_t rows, int32_t pieces) {
    int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    int64_t row = i / pieces;
    int64_t c = i % pieces * 8;
    if (row < rows) {
        *(uint4*)(y + row * ldy + c) = *(const uint4*)(x + row * ldx + c);
    }
}

QLORA_KERNEL qlora_elementwise_fill_bf16(bf16* y, int64_t ldy, int64_t rows, int64_t cols,
                                         float value) {
    fill(y, ldy, rows, cols, value);
}

// y = cap tanh(x / cap); y may be x.
QLORA_KERNEL qlora_elementwise_cap_bf16(const bf16* x, int64_t ldx, bf16* y, int64_t ldy,
                                        int64_t rows, int64_t cols, float cap) {
    cap_op op = {cap};
    map_one(op, x, ldx, y, ldy, rows, cols);
}

QLORA_KERNEL qlora_elementwise_gather_f32_bf16(const float* table, int64_t ldt, int64_t vocab,
                                               const int32_t* ids, bf16* y, int64_t ldy,
                                               int64_t cols, int32_t* bad) {
    gather(table, ldt, vocab, ids, y, ldy, cols, bad);
}

QLORA_KERNEL qlora_elementwise_gather_bf16_bf16(const bf16* table, int64_t ldt, int64_t vocab,
                                                const int32_t* ids, bf16* y, int64_t ldy,
                                                int64_t cols, int32_t* bad) {
    gather(table, ldt, vocab, ids, y, ldy, cols, bad);
}

QLORA_KERNEL qlora_elementwise_gather_f16_bf16(const f16* table, int64_t ldt, int64_t vocab,
                                               const int32_t* ids, bf16* y, int64_t ldy,
                                               int64_t cols, int32_t* bad) {
    gather(table, ldt, vocab, ids, y, ldy, cols, bad);
}
