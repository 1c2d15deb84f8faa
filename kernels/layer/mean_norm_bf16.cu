// mean_norm_bf16.cu - the kernels of mean_norm.cuh for bf16.
// targets: 80
// groups: bf16
#include "mean_norm.cuh"

QLORA_KERNEL __launch_bounds__(512, 2)
    qlora_mean_norm_fwd_bf16(const bf16* x, int64_t ld_x, const void* w, int32_t w_bf16, bf16* y,
                             int64_t ld_y, int64_t rows, int32_t cols, float eps, int32_t width) {
    mean_fwd(x, ld_x, w, w_bf16, y, ld_y, rows, cols, eps, width);
}

QLORA_KERNEL __launch_bounds__(512, 1)
    qlora_mean_norm_bwd_bf16(const bf16* dy, int64_t ld_dy, const bf16* x, int64_t ld_x,
                             const void* w, int32_t w_bf16, const bf16* dres, int64_t ld_dres,
                             bf16* dx, int64_t ld_dx, float* stats, int64_t rows, int32_t cols,
                             float eps, int32_t width) {
    mean_bwd(dy, ld_dy, x, ld_x, w, w_bf16, dres, ld_dres, dx, ld_dx, stats, rows, cols, eps,
             width);
}

QLORA_KERNEL __launch_bounds__(256, 1)
    qlora_mean_norm_dw_bf16(const bf16* dy, int64_t ld_dy, const bf16* x, int64_t ld_x,
                            const float* stats, float* partial, int64_t rows, int32_t cols,
                            int64_t chunk_rows) {
    mean_dw(dy, ld_dy, x, ld_x, stats, partial, rows, cols, chunk_rows);
}
