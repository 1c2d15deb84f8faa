// softmax.cu - the kernels of softmax.cuh for f32.
// targets: 75
// groups: f32
#include "softmax.cuh"

QLORA_KERNEL qlora_softmax_scores_f32(float* s, int64_t s_batch, int64_t s_ld, int64_t batch,
                                      int64_t rows, int64_t cols, float scale, int32_t causal,
                                      int64_t window) {
    scores(s, s_batch, s_ld, batch, rows, cols, scale, causal, window);
}

QLORA_KERNEL __launch_bounds__(256)
    qlora_softmax_fwd_f32(const float* x, int64_t x_batch, int64_t x_ld, float* y, int64_t y_batch,
                          int64_t y_ld, int64_t batch, int64_t rows, int64_t cols, int32_t width) {
    softmax_fwd(x, x_batch, x_ld, y, y_batch, y_ld, batch, rows, cols, width);
}
