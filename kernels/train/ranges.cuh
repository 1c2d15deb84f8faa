// ranges.cuh - the ranges of the arena of all parameters, and their copies.
#ifndef QLORA_RANGES_CUH
#define QLORA_RANGES_CUH

#include "../vec.cuh"

// The same layout as qlora_adamw_range in qlora.h.
struct adamw_range {
    int64_t begin;
    int64_t count;
    float decay;        // factor on weight_decay; 0 for norm weights
    float shadow_scale; // the 16-bit copy holds shadow_scale * parameter
    void* copy;         // second copy of the shadow, as rows of copy_cols elements; may be null
    int64_t copy_cols;
    int64_t copy_ld;
    double lr; // factor on lr; 0 = 1
};

// Position of element i of a range in its copy. Ranges and rows are normally short, so 64-bit
// division is used only for long ones.
__device__ __forceinline__ int64_t copy_at(const adamw_range& range, int64_t i) {
    bool small = (range.count | range.copy_cols) <= 0x7fffffff;
    int64_t row = small ? (int64_t)((uint32_t)i / (uint32_t)range.copy_cols) : i / range.copy_cols;
    return row * range.copy_ld + (i - row * range.copy_cols);
}

#endif
