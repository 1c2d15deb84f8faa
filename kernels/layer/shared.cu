// shared.cu - small kernels that every mode needs, in a separate module so that pre-warming a bf16
// model does not load the f32 modules.
// targets: 75
#include "elementwise.cuh"
#include "../attention/softmax.cuh"

QLORA_KERNEL qlora_elementwise_add_f32(const float* a, int64_t lda, const float* b, int64_t ldb,
                                       float* y, int64_t ldy, int64_t rows, int64_t cols) {
    map_two(add_op(), a, lda, b, ldb, y, ldy, rows, cols);
}

// y = alpha x; y may be x.
QLORA_KERNEL qlora_elementwise_scale_f32(const float* x, int64_t ldx, float* y, int64_t ldy,
                                         int64_t rows, int64_t cols, float alpha) {
    scale_op op = {alpha};
    map_one(op, x, ldx, y, ldy, rows, cols);
}

QLORA_KERNEL qlora_elementwise_fill_f32(float* y, int64_t ldy, int64_t rows, int64_t cols,
                                        float value) {
    fill(y, ldy, rows, cols, value);
}

QLORA_KERNEL qlora_softmax_copy_b32(const uint32_t* x, int64_t x_batch, int64_t x_ld, uint32_t* y,
                                    int64_t y_batch, int64_t y_ld, int64_t batch, int64_t rows,
                                    int64_t cols) {
    copy_strided<uint32_t, 4>(x, x_batch, x_ld, y, y_batch, y_ld, batch, rows, cols);
}

QLORA_KERNEL __launch_bounds__(256)
    qlora_softmax_transpose_b32(const uint32_t* x, int64_t x_batch, int64_t x_ld, uint32_t* y,
                                int64_t y_batch, int64_t y_ld, int64_t batch, int64_t rows,
                                int64_t cols) {
    transpose(x, x_batch, x_ld, y, y_batch, y_ld, batch, rows, cols);
}

// Second stage: dw[c] = (accumulate ? dw[c] : 0) + partial[0, c] + partial[1, c] + ...
// Launch: 128 threads, grid.x = cols / 128 rounded up. Determinism: chunks in ascending order.
QLORA_KERNEL qlora_norm_rms_dw_sum(const float* partial, float* dw, int32_t cols, int32_t chunks,
                                   int32_t accumulate) {
    int32_t c = (int32_t)(blockIdx.x * blockDim.x + threadIdx.x);
    if (c >= cols) {
        return;
    }
    float sum = 0.0f;
    for (int32_t k = 0; k < chunks; k++) {
        sum += partial[(int64_t)k * cols + c];
    }
    dw[c] = accumulate ? dw[c] + sum : sum;
}

// Adds to total = {sum, rest, weight}: sum + rest is the sum of the losses (in f32, with the
// rounding error carried along), and weight is the sum of the weights (1 each if weights is null)
// of the rows with a label in [0, cols). With owners [rows], block k adds the rows that belong to
// adapter k, to total + k stride. Launch: 256 threads, grid 1, or one block per adapter.
// Determinism: thread t adds rows t, t + 256, ... in ascending order, then the 256 sums are added
// in a fixed tree; f64 throughout.
QLORA_KERNEL __launch_bounds__(256)
    qlora_loss_sum(const float* losses, const int32_t* labels, const float* weights, int64_t rows,
                   int64_t cols, float* total, const int32_t* owners, int64_t stride) {
    __shared__ double loss_lane[256];
    __shared__ double weight_lane[256];
    int t = (int)threadIdx.x;
    double loss = 0.0;
    double weight = 0.0;
    for (int64_t row = t; row < rows; row += 256) {
        int64_t label = labels[row];
        bool own = owners == 0 || owners[row] == (int32_t)blockIdx.x;
        if (own && label >= 0 && label < cols) {
            loss += (double)losses[row];
            weight += weights != 0 ? (double)weights[row] : 1.0;
        }
    }
    loss_lane[t] = loss;
    weight_lane[t] = weight;
    __syncthreads();
    for (int half = 128; half > 0; half >>= 1) {
        if (t < half) {
            loss_lane[t] += loss_lane[t + half];
            weight_lane[t] += weight_lane[t + half];
        }
        __syncthreads();
    }
    if (t == 0) {
        total += blockIdx.x * stride;
        double sum = (double)total[0] + (double)total[1] + loss_lane[0];
        float high = (float)sum;
        total[0] = high;
        total[1] = (float)(sum - (double)high);
        total[2] = (float)((double)total[2] + weight_lane[0]);
    }
}
