// preference.cu - the factors of sequences for DPO and KTO. The formulas are in
// src/ops/preference.h.
// targets: 75
// groups: train
#include "../vec.cuh"

#define NONE -1
#define UNDESIRABLE 0
#define DESIRABLE 1
#define MISMATCHED 2
#define CHOSEN 3
#define REJECTED 4
#define VALUES 8

// The same layout as qlora__preference_numbers.
struct preference_numbers {
    double beta;
    double smoothing;
    double likelihood;
    double desirable;
    double undesirable;
    double total;
};

// The sums of a step: VALUES of single sequences, then kl and its number of sequences.
enum { LOSS, NLL, CHOSEN_SUM, REJECTED_SUM, MARGIN, CORRECT, CHOSEN_COUNT, REJECTED_COUNT, KL };

__device__ __forceinline__ float logistic(float x) {
    return 1.0f / (1.0f + expf(-x));
}

__device__ __forceinline__ float log_logistic(float x) {
    return fminf(x, 0.0f) - logf(1.0f + expf(-fabsf(x)));
}

// The differences of log-probabilities are taken in f64; what follows them is f32.
__device__ __forceinline__ void pair_of(const preference_numbers& n, const double* logps,
                                        const double* references, int64_t s, double* v,
                                        float* factors) {
    double chosen = n.beta * (logps[s] - references[s]);
    double rejected = n.beta * (logps[s + 1] - references[s + 1]);
    double margin = chosen - rejected;
    float x = (float)margin;
    float smoothing = (float)n.smoothing;
    v[LOSS] = (double)(-(1.0f - smoothing) * log_logistic(x) - smoothing * log_logistic(-x));
    v[NLL] = -logps[s];
    v[CHOSEN_SUM] = chosen;
    v[MARGIN] = margin;
    v[CORRECT] = margin > 0.0 ? 1.0 : 0.0;
    v[CHOSEN_COUNT] = 1.0;
    v[VALUES + REJECTED_SUM] = rejected;
    v[VALUES + REJECTED_COUNT] = 1.0;
    float c = (float)(n.beta / n.total) *
              ((1.0f - smoothing) * logistic(-x) - smoothing * logistic(x));
    factors[s] = c + (float)n.likelihood;
    factors[s + 1] = -c;
}

__device__ __forceinline__ float single_of(const preference_numbers& n, double r, bool desirable,
                                           double kl, double* v) {
    float sign = desirable ? 1.0f : -1.0f;
    double weight = desirable ? n.desirable : n.undesirable;
    float u = logistic(sign * (float)(n.beta * (r - kl)));
    v[LOSS] = weight * (double)(1.0f - u);
    v[desirable ? CHOSEN_SUM : REJECTED_SUM] = n.beta * r;
    v[CORRECT] = (r > 0.0) == desirable ? 1.0 : 0.0;
    v[desirable ? CHOSEN_COUNT : REJECTED_COUNT] = 1.0;
    return sign * (float)(weight * n.beta / n.total) * u * (1.0f - u);
}

// Writes the factor of every sequence and adds to the sums of the step. Launch: 1 block of 256
// threads. Determinism: each sequence (or pair) is computed by one thread; one thread per sum then
// adds the values by ascending sequence.
QLORA_KERNEL __launch_bounds__(256)
    qlora_preference_factors(const double* logps, const double* references, const int32_t* roles,
                             const preference_numbers* numbers, double* values, double* sums,
                             float* factors, int64_t count) {
    preference_numbers n = *numbers;
    int32_t t = (int32_t)threadIdx.x;
    double kl = sums[KL] > 0.0 ? sums[KL] / n.total : 0.0;
    for (int64_t i = t; i < count * VALUES; i += 256) {
        values[i] = 0.0;
    }
    __syncthreads();
    for (int64_t s = t; s < count; s += 256) {
        int32_t role = roles[s];
        double* v = values + s * VALUES;
        if (role == CHOSEN) {
            pair_of(n, logps, references, s, v, factors);
        } else if (role == DESIRABLE || role == UNDESIRABLE) {
            factors[s] = single_of(n, logps[s] - references[s], role == DESIRABLE, kl, v);
        } else if (role != REJECTED) {
            factors[s] = 0.0f;
        }
    }
    __syncthreads();
    if (t < VALUES) {
        double sum = sums[t];
        for (int64_t s = 0; s < count; s++) {
            sum += values[s * VALUES + t];
        }
        sums[t] = sum;
    } else if (t == VALUES) {
        double sum = sums[KL];
        double known = sums[KL + 1];
        for (int64_t s = 0; s < count; s++) {
            if (roles[s] == MISMATCHED) {
                sum += logps[s] - references[s];
                known += 1.0;
            }
        }
        sums[KL] = sum;
        sums[KL + 1] = known;
    }
}

// x[row, c] *= factor of the sequence of the row; rows that belong to no sequence stay as they are.
// Launch: grid.x = rows, 256 threads. Each element has one writer.
template <class T>
__device__ __forceinline__ void scale_rows(T* x, int64_t ld, int64_t cols, const int32_t* starts,
                                           const float* factors, int64_t count) {
    int32_t row = (int32_t)blockIdx.x;
    if (row >= starts[count]) {
        return;
    }
    int64_t low = 0; // starts[low] <= row < starts[high]
    int64_t high = count;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (starts[middle] <= row) {
            low = middle;
        } else {
            high = middle;
        }
    }
    float factor = factors[low];
    T* to = x + (int64_t)row * ld;
    for (int64_t c = threadIdx.x; c < cols; c += 256) {
        store(to + c, to_float(to[c]) * factor);
    }
}

QLORA_KERNEL __launch_bounds__(256)
    qlora_preference_scale_f32(float* x, int64_t ld, int64_t cols, const int32_t* starts,
                               const float* factors, int64_t count) {
    scale_rows(x, ld, cols, starts, factors, count);
}

QLORA_KERNEL __launch_bounds__(256)
    qlora_preference_scale_bf16(bf16* x, int64_t ld, int64_t cols, const int32_t* starts,
                                const float* factors, int64_t count) {
    scale_rows(x, ld, cols, starts, factors, count);
}
