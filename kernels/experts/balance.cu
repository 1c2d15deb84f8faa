// balance.cu - how often routers choose each expert, and the loss that balances it.
// targets: 75
// groups: experts train
//
// See src/ops/balance.h for the formulas. A slot has the sums of a range of rows of one layer.
//
//   rows     choices and probabilities of the rows of a tile, by range
//   gather   the sums of all slots of a micro-batch; its choices are added to those of the step
//   loss     the loss, and what the gradients of scores need of it
//   report   the load of a step
//
// Determinism: integers, and sums in an order that follows from shapes alone.
#include "routing.cuh"

// A block per range of rows, those of the pass before *bound only; `first` is the number of the
// tile's first row there. Launch: grid (ranges), 128 threads, dynamic shared memory 20 * experts
// bytes.
QLORA_KERNEL __launch_bounds__(128)
    qlora_balance_rows(const float* scores, int64_t ld, const int32_t* choice, int64_t rows,
                       const int32_t* bound, int64_t first, int32_t experts, int32_t chosen,
                       int32_t weighs, float* sums, int32_t* counts) {
    extern __shared__ float shared[];
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t warp = (int32_t)threadIdx.x / 32;
    float* own = shared + warp * experts;
    int32_t* taken = (int32_t*)(shared + 4 * experts);
    int64_t each = (rows + gridDim.x - 1) / gridDim.x;
    int64_t stop = (blockIdx.x + 1) * each < rows ? (blockIdx.x + 1) * each : rows;
    stop = *bound - first < stop ? *bound - first : stop;
    for (int32_t e = (int32_t)threadIdx.x; e < 5 * experts; e += 128) {
        shared[e] = 0.0f; // the bits of an integer 0
    }
    __syncthreads();
    routing_rule rule;
    rule.score = SCORE_SOFTMAX;
    rule.experts = experts;
    for (int64_t row = blockIdx.x * each + warp; row < stop; row += 4) {
        const float* z = scores + row * ld;
        if (weighs) {
            row_softmax whole = softmax_of(rule, z, lane);
            for (int32_t e = lane; e < experts; e += 32) {
                own[e] += value_of(rule, whole, z[e]);
            }
        }
        for (int32_t j = lane; j < chosen; j += 32) {
            atomicAdd(&taken[choice[row * chosen + j]], 1);
        }
    }
    __syncthreads();
    for (int32_t e = (int32_t)threadIdx.x; e < experts; e += 128) {
        float sum = 0.0f;
        for (int32_t w = 0; w < 4; w++) {
            sum += shared[w * experts + e];
        }
        sums[(int64_t)blockIdx.x * experts + e] = sum;
        counts[(int64_t)blockIdx.x * experts + e] = taken[e];
    }
}

__device__ __forceinline__ int32_t warp_count(int32_t v) {
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) {
        v += __shfl_xor_sync(QLORA_FULL_WARP, v, o);
    }
    return v;
}

// A warp per expert. Launch: grid (ceil(experts / 8)), 256 threads.
QLORA_KERNEL __launch_bounds__(256)
    qlora_balance_gather(const float* sums, const int32_t* counts, int64_t layers, int64_t slots,
                         int64_t used, int32_t experts, int32_t* load, int32_t* taken,
                         float* weights) {
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t e = (int32_t)blockIdx.x * 8 + (int32_t)threadIdx.x / 32;
    if (e >= experts) {
        return;
    }
    int32_t all = 0;
    float sum = 0.0f;
    for (int64_t l = 0; l < layers; l++) {
        int32_t own = 0;
        for (int64_t s = lane; s < used; s += 32) {
            own += counts[(l * slots + s) * experts + e];
            sum += sums[(l * slots + s) * experts + e];
        }
        own = warp_count(own);
        all += own;
        if (lane == 0) {
            load[l * experts + e] += own;
        }
    }
    sum = warp_sum(sum);
    if (lane == 0) {
        taken[e] = all;
        weights[e] = sum;
    }
}

// Sums of two values of 1,024 threads each, for all of them. shared: 64 values.
__device__ __forceinline__ float2 block_sums(float a, float b, float* shared) {
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t warp = (int32_t)threadIdx.x / 32;
    a = warp_sum(a);
    b = warp_sum(b);
    if (lane == 0) {
        shared[warp] = a;
        shared[32 + warp] = b;
    }
    __syncthreads();
    return make_float2(warp_sum(shared[lane]), warp_sum(shared[32 + lane]));
}

// shares: of the micro-batch in the loss of the step, and the same times the coefficient. Launch:
// one block of 1,024 threads, one for each expert.
QLORA_KERNEL __launch_bounds__(1024)
    qlora_balance_loss(const int32_t* taken, const float* weights, int32_t experts, int32_t chosen,
                       const float* shares, float* total, float* slopes) {
    __shared__ float shared[64];
    int32_t e = (int32_t)threadIdx.x;
    float count = e < experts ? (float)taken[e] : 0.0f;
    float weight = e < experts ? weights[e] : 0.0f;
    float rows = block_sums(count, 0.0f, shared).x / (float)chosen;
    float inverse = rows > 0.0f ? 1.0f / rows : 0.0f;
    float share = count * inverse;
    __syncthreads();
    float loss = block_sums(share * (weight * inverse), 0.0f, shared).x * (float)experts;
    if (e == 0) {
        *total += shares[0] * loss;
    }
    if (e < experts) {
        slopes[e] = shares[1] * (float)experts * share * inverse;
    }
}

// report: the load relative to an even one: the least and the most of any expert of a layer, and
// the entropy of a layer, as the mean of the layers. A warp per layer. Launch: one block of 256
// threads.
QLORA_KERNEL __launch_bounds__(256)
    qlora_balance_report(const int32_t* load, int32_t layers, int32_t experts, float* report) {
    __shared__ float shared[24];
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t warp = (int32_t)threadIdx.x / 32;
    float least = INFINITY;
    float most = 0.0f;
    float entropy = 0.0f;
    for (int32_t l = warp; l < layers; l += 8) {
        const int32_t* own = load + (int64_t)l * experts;
        int32_t all = 0;
        for (int32_t e = lane; e < experts; e += 32) {
            all += own[e];
        }
        all = warp_count(all);
        float inverse = all > 0 ? 1.0f / (float)all : 0.0f;
        for (int32_t e = lane; e < experts; e += 32) {
            float share = (float)own[e] * inverse;
            least = fminf(least, share);
            most = fmaxf(most, share);
            entropy -= share > 0.0f ? share * logf(share) : 0.0f;
        }
    }
    least = -warp_max(-least);
    most = warp_max(most);
    entropy = warp_sum(entropy);
    if (lane == 0) {
        shared[warp] = least;
        shared[8 + warp] = most;
        shared[16 + warp] = entropy;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        entropy = 0.0f;
        for (int32_t w = 0; w < 8; w++) {
            least = fminf(least, shared[w]);
            most = fmaxf(most, shared[8 + w]);
            entropy += shared[16 + w];
        }
        float even = experts > 1 ? logf((float)experts) : 1.0f;
        report[0] = least * (float)experts;
        report[1] = most * (float)experts;
        report[2] = entropy / (even * (float)layers);
    }
}
