// logps.cu - the log-probabilities of sequences.
// targets: 75
#include "../vec.cuh"

// logps[s] = -(sum of losses[starts[s]] .. losses[starts[s + 1] - 1]), in f64. Launch: 32 threads,
// grid.x = sequences. Determinism: lane t adds rows t, t + 32, ... in ascending order, then the 32
// sums are added in a fixed tree.
QLORA_KERNEL __launch_bounds__(32)
    qlora_preference_logps(const float* losses, const int32_t* starts, double* logps) {
    __shared__ double lane[32];
    int32_t t = (int32_t)threadIdx.x;
    int32_t end = starts[blockIdx.x + 1];
    double sum = 0.0;
    for (int32_t row = starts[blockIdx.x] + t; row < end; row += 32) {
        sum += (double)losses[row];
    }
    lane[t] = sum;
    __syncthreads();
    for (int32_t half = 16; half > 0; half >>= 1) {
        if (t < half) {
            lane[t] += lane[t + half];
        }
        __syncthreads();
    }
    if (t == 0) {
        logps[blockIdx.x] = -lane[0];
    }
}
