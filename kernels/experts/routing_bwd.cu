// routing_bwd.cu - the gradients of the weights of a token's experts -> those of its scores.
// targets: 75
// groups: experts train
#include "routing.cuh"

// w = scale v / d, where d is the sum of the values v, or 1, and v = softmax(z) or sigmoid(z). dw
// is by sorted row: that of choice i is at place[i].
template <class T>
__device__ __forceinline__ void
scores_backward(const float* scores, int64_t ld, const int32_t* choice, const int32_t* place,
                const float* dw, T* dz, int64_t lddz, int64_t rows, const routing_rule& rule) {
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
    for (int32_t e = lane; e < rule.experts; e += 32) {
        store(dz + row * lddz + e, others ? -value_of(rule, whole, z[e]) * mean : 0.0f);
    }
    __syncwarp();
    for (int32_t j = lane; j < rule.chosen; j += 32) {
        float d = dw[place[row * rule.chosen + j]] * rule.scale;
        float v = values[j];
        d = rule.divides ? (d - mean) / divisor : d;
        float own = d * (rule.score == SCORE_SIGMOID ? v * (1.0f - v) : v);
        store(dz + row * lddz + ids[j], others ? own - v * mean : own);
    }
}

// A warp per token. Launch: grid (ceil(rows / 4)), 128 threads, dynamic shared memory 16 * experts
// bytes.
#define SCORES_BACKWARD(name, type)                                                                \
    QLORA_KERNEL __launch_bounds__(128)                                                            \
        qlora_routing_bwd_##name(const float* scores, int64_t ld, const int32_t* choice,           \
                                 const int32_t* place, const float* dw, type* dz, int64_t lddz,    \
                                 int64_t rows, const __grid_constant__ routing_rule rule) {        \
        scores_backward(scores, ld, choice, place, dw, dz, lddz, rows, rule);                      \
    }
SCORES_BACKWARD(f32, float)
SCORES_BACKWARD(bf16, bf16)
