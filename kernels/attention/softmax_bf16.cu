// softmax_bf16.cu - the kernels of softmax.cuh for bf16.
// targets: 80
// groups: bf16
#include "softmax.cuh"

QLORA_KERNEL qlora_softmax_copy_b16(const uint16_t* x, int64_t x_batch, int64_t x_ld, uint16_t* y,
                                    int64_t y_batch, int64_t y_ld, int64_t batch, int64_t rows,
                                    int64_t cols) {
    copy_strided<uint16_t, 8>(x, x_batch, x_ld, y, y_batch, y_ld, batch, rows, cols);
}

QLORA_KERNEL __launch_bounds__(256)
    qlora_softmax_transpose_b16(const uint16_t* x, int64_t x_batch, int64_t x_ld, uint16_t* y,
                                int64_t y_batch, int64_t y_ld, int64_t batch, int64_t rows,
                                int64_t cols) {
    transpose(x, x_batch, x_ld, y, y_batch, y_ld, batch, rows, cols);
}

QLORA_KERNEL qlora_softmax_scores_bf16(bf16* s, int64_t s_batch, int64_t s_ld, int64_t batch,
                                       int64_t rows, int64_t cols, float scale, int32_t causal,
                                       int64_t window) {
    scores(s, s_batch, s_ld, batch, rows, cols, scale, causal, window);
}

QLORA_KERNEL __launch_bounds__(256)
    qlora_softmax_fwd_bf16(const bf16* x, int64_t x_batch, int64_t x_ld, bf16* y, int64_t y_batch,
                           int64_t y_ld, int64_t batch, int64_t rows, int64_t cols, int32_t width) {
    softmax_fwd(x, x_batch, x_ld, y, y_batch, y_ld, batch, rows, cols, width);
}
