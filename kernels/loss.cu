// loss.cu - the kernels of loss.cuh for f32.
// targets: 75
#include "loss.cuh"

QLORA_KERNEL __launch_bounds__(1024)
    qlora_loss_cross_entropy_f32(float* logits, int64_t ld, const int32_t* labels,
                                 const float* weights, const float* scale, float* losses,
                                 int64_t cols, int32_t gradient, int32_t* bad) {
    cross_entropy(logits, ld, labels, weights, scale, losses, cols, gradient, bad);
}

// Adds to total = {sum, rest, weight}: sum + rest is the sum of the losses (in f32 with the
// rounding error carried along), weight the sum of the weights (1 each where weights is null) of
// rows with a label in [0, cols). Launch: 1 block of 256 threads. Determinism: thread t adds rows
// t, t + 256, ... in ascending order, then the 256 sums are added in a fixed tree; f64 throughout.
QLORA_KERNEL __launch_bounds__(256)
    qlora_loss_sum(const float* losses, const int32_t* labels, const float* weights, int64_t rows,
                   int64_t cols, float* total) {
    __shared__ double loss_lane[256];
    __shared__ double weight_lane[256];
    int t = (int)threadIdx.x;
    double loss = 0.0;
    double weight = 0.0;
    for (int64_t row = t; row < rows; row += 256) {
        int64_t label = labels[row];
        if (label >= 0 && label < cols) {
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
        double sum = (double)total[0] + (double)total[1] + loss_lane[0];
        float high = (float)sum;
        total[0] = high;
        total[1] = (float)(sum - (double)high);
        total[2] = (float)((double)total[2] + weight_lane[0]);
    }
}

QLORA_KERNEL __launch_bounds__(256)
    qlora_loss_arg_max_f32(const float* x, int64_t ld, int32_t* ids, int64_t cols) {
    arg_max(x, ld, ids, cols);
}
