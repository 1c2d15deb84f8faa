// routing.cuh - what a router makes of its scores; see src/ops/experts.h.
#ifndef QLORA_ROUTING_CUH
#define QLORA_ROUTING_CUH

#include "../common.cuh"

#include <math.h>

// Same values as qlora__router.
enum { SCORE_SOFTMAX, SCORE_SOFTMAX_CHOSEN, SCORE_SIGMOID };

// Same layout as qlora__routing_rule.
struct routing_rule {
    int32_t score;
    int32_t experts;
    int32_t chosen;
    int32_t groups;
    int32_t groups_used;
    int32_t divides; // weights are divided by their sum
    float scale;
    float floor; // is added to that sum
};

__device__ __forceinline__ float routing_sigmoid(float z) {
    return 1.0f / (1.0f + expf(-z));
}

// The softmax of a row of scores: e^(z - most) / sum.
struct row_softmax {
    float most;
    float sum;
};

__device__ __forceinline__ row_softmax softmax_of(const routing_rule& rule, const float* z,
                                                  int32_t lane) {
    row_softmax s = {0.0f, 1.0f};
    if (rule.score == SCORE_SIGMOID) {
        return s;
    }
    float most = -INFINITY;
    for (int32_t e = lane; e < rule.experts; e += 32) {
        most = fmaxf(most, z[e]);
    }
    s.most = warp_max(most);
    float sum = 0.0f;
    for (int32_t e = lane; e < rule.experts; e += 32) {
        sum += expf(z[e] - s.most);
    }
    s.sum = warp_sum(sum);
    return s;
}

// The value of an expert before the division.
__device__ __forceinline__ float value_of(const routing_rule& rule, const row_softmax& s, float z) {
    return rule.score == SCORE_SIGMOID ? routing_sigmoid(z) : expf(z - s.most) / s.sum;
}

// What the values of a token's experts are divided by.
__device__ __forceinline__ float divisor_of(const routing_rule& rule, const float* values) {
    float sum = rule.floor;
    for (int32_t j = 0; j < rule.chosen; j++) {
        sum += values[j];
    }
    return rule.divides ? sum : 1.0f;
}

#endif
