// softmax_bwd.cu - the gradient of softmax.cuh for f32.
// targets: 75
// groups: f32 train
#include "softmax.cuh"

QLORA_KERNEL __launch_bounds__(256)
    qlora_softmax_bwd_f32(const float* y, int64_t y_batch, int64_t y_ld, const float* dy,
                          int64_t dy_batch, int64_t dy_ld, float* dx, int64_t dx_batch,
                          int64_t dx_ld, int64_t batch, int64_t rows, int64_t cols, int32_t width) {
    softmax_bwd(y, y_batch, y_ld, dy, dy_batch, dy_ld, dx, dx_batch, dx_ld, batch, rows, cols,
                width);
}
