// loss.cu - the kernels of loss.cuh for f32.
// targets: 75
// groups: f32
#include "loss.cuh"

QLORA_KERNEL __launch_bounds__(1024)
    qlora_loss_cross_entropy_f32(float* logits, int64_t ld, const int32_t* labels,
                                 const float* weights, const float* scale, const int32_t* owners,
                                 float* losses, int64_t cols, int32_t gradient, int32_t* bad,
                                 float cap) {
    cross_entropy<float, false>(logits, ld, labels, weights, scale, owners, losses, cols, gradient,
                                bad, cap);
}

QLORA_KERNEL __launch_bounds__(1024)
    qlora_loss_capped_f32(float* logits, int64_t ld, const int32_t* labels, const float* weights,
                          const float* scale, const int32_t* owners, float* losses, int64_t cols,
                          int32_t gradient, int32_t* bad, float cap) {
    cross_entropy<float, true>(logits, ld, labels, weights, scale, owners, losses, cols, gradient,
                               bad, cap);
}

QLORA_KERNEL __launch_bounds__(256)
    qlora_loss_arg_max_f32(const float* x, int64_t ld, int32_t* ids, int64_t cols) {
    arg_max(x, ld, ids, cols);
}
