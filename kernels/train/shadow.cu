// shadow.cu - the parameters in the type that is computed in.
// targets: 75
#include "ranges.cuh"

// Writes only the shadow and its copies, shadow = shadow_scale p, after parameters have been
// loaded. Launch as for adamw.
template <class S>
__device__ __forceinline__ void shadow_write(const float* p, S* shadow, const adamw_range* ranges,
                                             int64_t range_count) {
    for (int64_t r = blockIdx.y; r < range_count; r += gridDim.y) {
        adamw_range range = ranges[r];
        int64_t first = (int64_t)blockIdx.x * 256 + threadIdx.x;
        for (int64_t i = first; i < range.count; i += (int64_t)gridDim.x * 256) {
            float x = range.shadow_scale * p[range.begin + i];
            store(shadow + range.begin + i, x);
            if (range.copy != 0) {
                store((S*)range.copy + copy_at(range, i), x);
            }
        }
    }
}

QLORA_KERNEL __launch_bounds__(256)
    qlora_optim_shadow_f32(const float* p, float* shadow, const adamw_range* ranges,
                           int64_t range_count) {
    shadow_write(p, shadow, ranges, range_count);
}

QLORA_KERNEL __launch_bounds__(256)
    qlora_optim_shadow_bf16(const float* p, bf16* shadow, const adamw_range* ranges,
                            int64_t range_count) {
    shadow_write(p, shadow, ranges, range_count);
}
