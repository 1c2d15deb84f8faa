// norm.cu - the kernels of norm.cuh for f32.
// targets: 75
// groups: f32
#include "norm.cuh"

QLORA_KERNEL __launch_bounds__(512, 2)
    qlora_norm_rms_fwd_f32(const float* h_in, int64_t ld_in, const float* delta, int64_t ld_delta,
                           float* h_out, int64_t ld_out, const void* w, int32_t w_bf16, float* y,
                           int64_t ld_y, int64_t rows, int32_t cols, float eps, int32_t width) {
    rms_fwd(h_in, ld_in, delta, ld_delta, h_out, ld_out, w, w_bf16, y, ld_y, rows, cols, eps,
            width);
}

QLORA_KERNEL __launch_bounds__(512, 1)
    qlora_norm_rms_bwd_f32(const float* dy, int64_t ld_dy, const float* h, int64_t ld_h,
                           const void* w, int32_t w_bf16, const float* dres, int64_t ld_dres,
                           float* dh, int64_t ld_dh, float* rstd, int64_t rows, int32_t cols,
                           float eps, int32_t width) {
    rms_bwd(dy, ld_dy, h, ld_h, w, w_bf16, dres, ld_dres, dh, ld_dh, rstd, rows, cols, eps, width);
}

QLORA_KERNEL __launch_bounds__(256, 1)
    qlora_norm_rms_dw_f32(const float* dy, int64_t ld_dy, const float* h, int64_t ld_h,
                          const float* rstd, float* partial, int64_t rows, int32_t cols,
                          int32_t heads, int64_t chunk_rows) {
    rms_dw(dy, ld_dy, h, ld_h, rstd, partial, rows, cols, heads, chunk_rows);
}
