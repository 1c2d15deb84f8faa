// routing_bwd.cu - the gradients of the weights of a token's experts -> those of its scores.
// targets: 75
// groups: experts train
#include "routing.cuh"

// Slopes of the load-balancing loss, by the sums of probabilities, which rows before *bound of the
// pass have; null = none.
struct balance_slopes {
    const float* slopes;
    const int32_t* bound;
    int64_t first; // row of the pass
};

// What the loss adds to the gradient of a score; mean: of the slopes, by the probabilities.
__device__ __forceinline__ float balance_of(const routing_rule& rule, const row_softmax& s,
                                            const balance_slopes& b, float mean, float z,
                                            int32_t e) {
    return b.slopes ? value_of(rule, s, z) * (b.slopes[e] - mean) : 0.0f;
}

// w = scale v / d, where d is the sum of the values v, or 1, and v = softmax(z) or sigmoid(z). dw
// is by sorted row: that of choice i is at place[i].
template <class T>
__device__ __forceinline__ void
scores_backward(const float* scores, int64_t ld, const int32_t* choice, const int32_t* place,
                const float* dw, T* dz, int64_t lddz, int64_t rows, const routing_rule& rule,
                balance_slopes balance) {
    extern __shared__ float shared[];
    int32_t lane = (int32_t)threadIdx.x % 32;
    int64_t row = (int64_t)blockIdx.x * 4 + threadIdx.x / 32;
    float* values = shared + (int64_t)(threadIdx.x / 32) * rule.experts;
    if (row >= rows) {
        return;
    }
    const float* z = scores + row * ld;
    const int32_t* ids = choice + row * rule.chosen;
    row_softmax whole = softmax_of(rule, z, lane);
    for (int32_t j = lane; j < rule.chosen; j += 32) {
        values[j] = value_of(rule, whole, z[ids[j]]);
    }
    __syncwarp();
    float divisor = divisor_of(rule, values);
    float mean = 0.0f; // of dw with the values as they are divided
    for (int32_t j = lane; j < rule.chosen; j += 32) {
        mean += dw[place[row * rule.chosen + j]] * rule.scale * (values[j] / divisor);
    }
    mean = warp_sum(mean);
    bool others = rule.score == SCORE_SOFTMAX && !rule.divides;
    float middle = 0.0f; // of the slopes
    if (balance.slopes && row + balance.first >= *balance.bound) {
        balance.slopes = nullptr;
    }
    for (int32_t e = lane; balance.slopes && e < rule.experts; e += 32) {
        middle += value_of(rule, whole, z[e]) * balance.slopes[e];
    }
    middle = warp_sum(middle);
    for (int32_t e = lane; e < rule.experts; e += 32) {
        float more = balance_of(rule, whole, balance, middle, z[e], e);
        store(dz + row * lddz + e, (others ? -value_of(rule, whole, z[e]) * mean : 0.0f) + more);
    }
    __syncwarp();
    for (int32_t j = lane; j < rule.chosen; j += 32) {
        float d = dw[place[row * rule.chosen + j]] * rule.scale;
        float v = values[j];
        d = rule.divides ? (d - mean) / divisor : d;
        float own = d * (rule.score == SCORE_SIGMOID ? v * (1.0f - v) : v);
        float more = balance_of(rule, whole, balance, middle, z[ids[j]], ids[j]);
        store(dz + row * lddz + ids[j], (others ? own - v * mean : own) + more);
    }
}

// A warp per token. Launch: grid (ceil(rows / 4)), 128 threads, dynamic shared memory 16 * experts
// bytes.
#define SCORES_BACKWARD(name, type)                                                                \
    QLORA_KERNEL __launch_bounds__(128)                                                            \
        qlora_routing_bwd_##name(const float* scores, int64_t ld, const int32_t* choice,           \
                                 const int32_t* place, const float* dw, type* dz, int64_t lddz,    \
                                 int64_t rows, const __grid_constant__ routing_rule rule,          \
                                 const float* slopes, const int32_t* bound, int64_t first) {       \
        balance_slopes balance = {slopes, bound, first};                                           \
        scores_backward(scores, ld, choice, place, dw, dz, lddz, rows, rule, balance);             \
    }
SCORES_BACKWARD(f32, float)
SCORES_BACKWARD(bf16, bf16)
