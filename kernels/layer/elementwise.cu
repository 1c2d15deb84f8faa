// elementwise.cu - the kernels of elementwise.cuh for f32.
// targets: 75
// groups: f32
#include "elementwise.cuh"

// y[rows, cols] = x sigmoid(x); y may be x.
QLORA_KERNEL qlora_elementwise_silu_f32(const float* x, int64_t ldx, float* y, int64_t ldy,
                                        int64_t rows, int64_t cols) {
    map_one(silu_op<float>(), x, ldx, y, ldy, rows, cols);
}

// dx = dy silu'(x); dx may be x or dy.
QLORA_KERNEL qlora_elementwise_silu_bwd_f32(const float* x, int64_t ldx, const float* dy,
                                            int64_t lddy, float* dx, int64_t lddx, int64_t rows,
                                            int64_t cols) {
    map_two(silu_grad_op<float>(), x, ldx, dy, lddy, dx, lddx, rows, cols);
}

// h = silu(gate) up; h may be gate or up. gate and up may be column ranges of one buffer.
QLORA_KERNEL qlora_elementwise_swiglu_f32(const float* gate, int64_t ldg, const float* up,
                                          int64_t ldu, float* h, int64_t ldh, int64_t rows,
                                          int64_t cols) {
    map_two(swiglu_op<float>(), gate, ldg, up, ldu, h, ldh, rows, cols);
}

QLORA_KERNEL qlora_elementwise_swiglu_bwd_f32(const float* dh, int64_t lddh, const float* g,
                                              int64_t ldg, const float* u, int64_t ldu, float* dg,
                                              int64_t lddg, float* du, int64_t lddu, float* h,
                                              int64_t ldh, int64_t rows, int64_t cols) {
    gated_bwd<silu_gate<float>>(dh, lddh, g, ldg, u, ldu, dg, lddg, du, lddu, h, ldh, rows, cols);
}

// The same with GELU instead of SiLU.
QLORA_KERNEL qlora_elementwise_geglu_f32(const float* gate, int64_t ldg, const float* up,
                                         int64_t ldu, float* h, int64_t ldh, int64_t rows,
                                         int64_t cols) {
    map_two(geglu_op<float>(), gate, ldg, up, ldu, h, ldh, rows, cols);
}

QLORA_KERNEL qlora_elementwise_geglu_bwd_f32(const float* dh, int64_t lddh, const float* g,
                                             int64_t ldg, const float* u, int64_t ldu, float* dg,
                                             int64_t lddg, float* du, int64_t lddu, float* h,
                                             int64_t ldh, int64_t rows, int64_t cols) {
    gated_bwd<gelu_gate<float>>(dh, lddh, g, ldg, u, ldu, dg, lddg, du, lddu, h, ldh, rows, cols);
}

// y = a b and y = a + b; y may be a or b.
QLORA_KERNEL qlora_elementwise_mul_f32(const float* a, int64_t lda, const float* b, int64_t ldb,
                                       float* y, int64_t ldy, int64_t rows, int64_t cols) {
    map_two(mul_op(), a, lda, b, ldb, y, ldy, rows, cols);
}

// y = cap tanh(x / cap); y may be x.
QLORA_KERNEL qlora_elementwise_cap_f32(const float* x, int64_t ldx, float* y, int64_t ldy,
                                       int64_t rows, int64_t cols, float cap) {
    cap_op op = {cap};
    map_one(op, x, ldx, y, ldy, rows, cols);
}

QLORA_KERNEL qlora_elementwise_gather_f32_f32(const float* table, int64_t ldt, int64_t vocab,
                                              const int32_t* ids, float* y, int64_t ldy,
                                              int64_t cols, int32_t* bad) {
    gather(table, ldt, vocab, ids, y, ldy, cols, bad);
}

QLORA_KERNEL qlora_elementwise_gather_bf16_f32(const bf16* table, int64_t ldt, int64_t vocab,
                                               const int32_t* ids, float* y, int64_t ldy,
                                               int64_t cols, int32_t* bad) {
    gather(table, ldt, vocab, ids, y, ldy, cols, bad);
}

QLORA_KERNEL qlora_elementwise_gather_f16_f32(const f16* table, int64_t ldt, int64_t vocab,
                                              const int32_t* ids, float* y, int64_t ldy,
                                              int64_t cols, int32_t* bad) {
    gather(table, ldt, vocab, ids, y, ldy, cols, bad);
}
