// plain_bf16.cu - the kernels of plain.cuh for bf16.
// targets: 80
// groups: bf16
#include "plain.cuh"

// s = relu(u)^2; s may be u.
QLORA_KERNEL qlora_plain_relu2_bf16(const bf16* u, int64_t ldu, bf16* s, int64_t lds, int64_t rows,
                                    int64_t cols) {
    map_one(relu2_op(), u, ldu, s, lds, rows, cols);
}

QLORA_KERNEL qlora_plain_relu2_bwd_bf16(const bf16* ds, int64_t ldds, const bf16* u, int64_t ldu,
                                        bf16* du, int64_t lddu, bf16* s, int64_t lds, int64_t rows,
                                        int64_t cols) {
    relu2_bwd(ds, ldds, u, ldu, du, lddu, s, lds, rows, cols);
}
