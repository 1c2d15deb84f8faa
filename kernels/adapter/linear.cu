// linear.cu - the kernels of linear.cuh for f32.
// targets: 75
#include "linear.cuh"

LINEAR_PLACE(f32, float)
LINEAR_BIAS(f32, float)
LINEAR_KEEP_OWN(f32, float)

// What one adapter has of a gradient of all of them; same layout as qlora__share in
// src/ops/owners.h.
struct share {
    float* to; // [rows, cols], contiguous
    const float* from;
    int64_t rows;
    int64_t cols;
    int64_t ld; // of from
    float scale;
    int32_t adapter;
};

// For every share whose adapter has rows in the micro-batch (present[adapter] != 0):
//   to[r,c] = to[r,c] + scale from[r,c]
// or NaN if a row of the adapter was not finite (present[adapter] == 2). rows cols < 2^31.
// Launch: 256 threads, grid (any number, number of shares). Element-wise, one writer per output;
// the product is rounded before the sum, as on the CPU.
QLORA_KERNEL __launch_bounds__(256)
    qlora_linear_collect(const share* shares, const int32_t* present) {
    share s = shares[blockIdx.y];
    int32_t state = present[s.adapter];
    if (state == 0) {
        return;
    }
    if (state == 2) {
        s.scale = __int_as_float(0x7fc00000);
    }
    uint32_t step = gridDim.x * 256;
    uint32_t first = blockIdx.x * 256 + threadIdx.x;
    uint32_t count = (uint32_t)(s.rows * s.cols);
    uint32_t cols = (uint32_t)s.cols;
    bool fours = ((s.cols | s.ld) & 3) == 0 && (((uint64_t)s.to | (uint64_t)s.from) & 15) == 0;
    for (uint32_t i = first * 4; fours && i < count; i += step * 4) {
        float4 v = *(const float4*)(s.from + (int64_t)(i / cols) * s.ld + i % cols);
        float4* to = (float4*)(s.to + i);
        float4 sum = *to;
        sum.x = __fadd_rn(sum.x, __fmul_rn(s.scale, v.x));
        sum.y = __fadd_rn(sum.y, __fmul_rn(s.scale, v.y));
        sum.z = __fadd_rn(sum.z, __fmul_rn(s.scale, v.z));
        sum.w = __fadd_rn(sum.w, __fmul_rn(s.scale, v.w));
        *to = sum;
    }
    for (uint32_t i = first; !fours && i < count; i += step) {
        float v = s.from[(int64_t)(i / cols) * s.ld + i % cols];
        s.to[i] = __fadd_rn(s.to[i], __fmul_rn(s.scale, v));
    }
}

// Adds the sums of kernels/adapter/gated.cu to the gradients: db[c, r] += scale P[r, c] of gate and
// up, da[r, c] += P[r, c] of down. parts is [splits, 3, R, cols].
// Launch: grid (ceil(cols / 128), R / 8, 3), 128 threads. One writer per gradient; the splits are
// added in their order.
QLORA_KERNEL qlora_linear_gated_sum(const float* parts, int32_t splits, int32_t R, int64_t cols,
                                    float* dbg, int64_t lddbg, int32_t rg, float sg, float* dbu,
                                    int64_t lddbu, int32_t ru, float su, float* dad,
                                    int64_t lddad, int32_t rd) {
    int32_t p = (int32_t)blockIdx.z;
    int64_t col = (int64_t)blockIdx.x * 128 + threadIdx.x;
    int32_t rank = p == 0 ? rg : p == 1 ? ru : rd;
    int32_t row0 = (int32_t)blockIdx.y * 8;
    if (col >= cols || row0 >= rank) {
        return;
    }
    float* to = p == 2   ? dad + row0 * lddad + col
                : p == 1 ? dbu + col * lddbu + row0
                         : dbg + col * lddbg + row0;
    int64_t step = p == 2 ? lddad : 1;
    float scale = p == 0 ? sg : p == 1 ? su : 1.0f;
    float sums[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    const float* from = parts + ((int64_t)p * R + row0) * cols + col;
#pragma unroll 1
    for (int32_t s = 0; s < splits; s++) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            sums[i] += from[i * cols];
        }
        from += (int64_t)3 * R * cols;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        to[i * step] = fmaf(scale, sums[i], to[i * step]);
    }
}
