// plain.cu - the kernels of plain.cuh for f32.
// targets: 75
// groups: f32
#include "plain.cuh"

// s = relu(u)^2; s may be u.
QLORA_KERNEL qlora_plain_relu2_f32(const float* u, int64_t ldu, float* s, int64_t lds, int64_t rows,
                                   int64_t cols) {
    map_one(relu2_op(), u, ldu, s, lds, rows, cols);
}

QLORA_KERNEL qlora_plain_relu2_bwd_f32(const float* ds, int64_t ldds, const float* u, int64_t ldu,
                                       float* du, int64_t lddu, float* s, int64_t lds, int64_t rows,
                                       int64_t cols) {
    relu2_bwd(ds, ldds, u, ldu, du, lddu, s, lds, rows, cols);
}
