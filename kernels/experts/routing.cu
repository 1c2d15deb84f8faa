// routing.cu - from the scores of a router to the experts of every token, with sorted rows.
// targets: 75
// groups: experts
//
// See src/ops/experts.h for the formulas. Scores are f32, a row of `experts` for each token.
//
//   choose   the experts of a token and their weights, the experts in ascending order
//   count    how often a block of CHUNK choices takes each expert
//   totals   the choices of each expert in the blocks before, and in all of them
//   starts   the first sorted row of each expert, and the row tiles
//   spread   the sorted row of each choice; its token and weight at that row
//
// Rows with the same expert are in the order of their tokens. The tiles are for the products
// (grouped.cuh): tiles[0] of them, each with its expert at tiles[2 i + 1] and its first row at
// tiles[2 i + 2]; a tile has at most TILE_ROWS rows, all of one expert.
// Determinism: sums of integers, and the order of choices within a block by comparing them.
#include "routing.cuh"

enum { CHUNK = 256, TILE_ROWS = 128 };

// The largest of a warp's values, and among equals the lowest place.
struct best_value {
    float value;
    int32_t place;
};

__device__ __forceinline__ best_value best_of_warp(best_value mine) {
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) {
        best_value other;
        other.value = __shfl_xor_sync(QLORA_FULL_WARP, mine.value, o);
        other.place = __shfl_xor_sync(QLORA_FULL_WARP, mine.place, o);
        bool better =
            other.value > mine.value || (other.value == mine.value && other.place < mine.place);
        mine = better ? other : mine;
    }
    return mine;
}

// Takes the largest of `count` values in shared memory, all of which are finite until they are
// taken: then they are minus infinity.
__device__ __forceinline__ int32_t take_best(float* values, int32_t count, int32_t lane) {
    best_value mine = {-INFINITY, 0x7fffffff};
    for (int32_t i = lane; i < count; i += 32) {
        if (values[i] > mine.value) {
            mine.value = values[i];
            mine.place = i;
        }
    }
    mine = best_of_warp(mine);
    if (lane == 0 && mine.place < count) { // or all were taken
        values[mine.place] = -INFINITY;
    }
    __syncwarp();
    return min(mine.place, count - 1);
}

// Leaves only the experts of the groups whose two best values have the largest sums.
__device__ __forceinline__ void keep_groups(const routing_rule& rule, float* values, float* sums,
                                            int32_t lane) {
    int32_t each = rule.experts / rule.groups;
    for (int32_t g = lane; g < rule.groups; g += 32) {
        float first = -INFINITY;
        float second = -INFINITY;
        for (int32_t e = g * each; e < (g + 1) * each; e++) {
            float v = values[e];
            second = v > first ? first : fmaxf(second, v);
            first = fmaxf(first, v);
        }
        sums[g] = fmaxf(first + second, -3.0e38f);
    }
    __syncwarp();
    for (int32_t i = 0; i < rule.groups_used; i++) {
        take_best(sums, rule.groups, lane);
    }
    for (int32_t e = lane; e < rule.experts; e += 32) {
        values[e] = sums[e / each] == -INFINITY ? values[e] : -INFINITY; // taken groups are kept
    }
    __syncwarp();
}

// The values that decide; returns whether they and the scores are finite.
__device__ __forceinline__ bool put_values(const routing_rule& rule, const float* z,
                                           const float* correction, float* values, int32_t lane) {
    bool finite = true;
    for (int32_t e = lane; e < rule.experts; e += 32) {
        float v = rule.score == SCORE_SIGMOID ? routing_sigmoid(z[e]) : z[e];
        v += correction ? correction[e] : 0.0f;
        finite = finite && fabsf(z[e]) < INFINITY && fabsf(v) < INFINITY;
        values[e] = v;
    }
    __syncwarp();
    return __all_sync(QLORA_FULL_WARP, finite);
}

// Writes the choice and its weights in ascending order of the experts.
__device__ __forceinline__ void put_choice(const routing_rule& rule, const float* own,
                                           const int32_t* ids, float factor, int32_t* choice,
                                           float* weights, int32_t lane) {
    for (int32_t j = lane; j < rule.chosen; j += 32) {
        int32_t place = 0;
        for (int32_t i = 0; i < rule.chosen; i++) {
            place += ids[i] < ids[j];
        }
        choice[place] = ids[j];
        weights[place] = own[j] * factor;
    }
}

// A warp per token. Launch: grid (ceil(rows / 4)), 128 threads, dynamic shared memory 48 * experts
// bytes.
QLORA_KERNEL __launch_bounds__(128)
    qlora_routing_choose(const float* scores, int64_t ld, const float* correction, int32_t* choice,
                         float* weights, int64_t rows, const __grid_constant__ routing_rule rule) {
    extern __shared__ float shared[];
    int32_t lane = (int32_t)threadIdx.x % 32;
    int64_t row = (int64_t)blockIdx.x * 4 + threadIdx.x / 32;
    float* values = shared + (int64_t)(threadIdx.x / 32) * 3 * rule.experts;
    float* own = values + rule.experts;
    int32_t* ids = (int32_t*)(own + rule.experts);
    if (row >= rows) {
        return;
    }
    const float* z = scores + row * ld;
    bool finite = put_values(rule, z, correction, values, lane);
    if (finite && rule.groups > 1) {
        keep_groups(rule, values, own, lane);
    }
    for (int32_t j = 0; j < rule.chosen; j++) {
        int32_t e = finite ? take_best(values, rule.experts, lane) : j;
        if (lane == 0) {
            ids[j] = e;
        }
    }
    __syncwarp();
    row_softmax whole = softmax_of(rule, z, lane);
    for (int32_t j = lane; j < rule.chosen; j += 32) {
        own[j] = value_of(rule, whole, z[ids[j]]);
    }
    __syncwarp();
    float factor = finite ? rule.scale / divisor_of(rule, own) : __int_as_float(0x7fc00000);
    put_choice(rule, own, ids, factor, choice + row * rule.chosen, weights + row * rule.chosen,
               lane);
}

// Launch: grid (ceil(count / CHUNK)), CHUNK threads, dynamic shared memory 4 * experts bytes.
QLORA_KERNEL __launch_bounds__(CHUNK)
    qlora_routing_count(const int32_t* choice, int64_t count, int32_t experts, int32_t* counts) {
    extern __shared__ int32_t own[];
    int64_t at = (int64_t)blockIdx.x * CHUNK + threadIdx.x;
    for (int32_t e = (int32_t)threadIdx.x; e < experts; e += CHUNK) {
        own[e] = 0;
    }
    __syncthreads();
    if (at < count) {
        atomicAdd(&own[choice[at]], 1);
    }
    __syncthreads();
    for (int32_t e = (int32_t)threadIdx.x; e < experts; e += CHUNK) {
        counts[(int64_t)blockIdx.x * experts + e] = own[e];
    }
}

// The sum of the values of the threads before this one, of 1,024. shared: 32 words.
__device__ __forceinline__ int32_t sum_before(int32_t value, int32_t* shared) {
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t sum = value;
    __syncthreads(); // of an earlier sum
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
        int32_t below = __shfl_up_sync(QLORA_FULL_WARP, sum, o);
        sum += lane >= o ? below : 0;
    }
    if (lane == 31) {
        shared[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    int32_t warps = 0;
    for (int32_t w = 0; w < (int32_t)threadIdx.x / 32; w++) {
        warps += shared[w];
    }
    return warps + sum - value;
}

// What the counts of an expert become: how many choices the blocks before have. A warp has an
// expert, and its lanes have 32 blocks at a time. Returns all choices of the expert.
__device__ __forceinline__ int32_t sum_chunks(int32_t* counts, int64_t chunks, int32_t experts,
                                              int32_t e, int32_t lane) {
    int32_t rows = 0;
    for (int64_t c = 0; c < chunks; c += 32) {
        bool inside = c + lane < chunks;
        int32_t own = inside ? counts[(c + lane) * experts + e] : 0;
        int32_t sum = own;
#pragma unroll
        for (int o = 1; o < 32; o *= 2) {
            int32_t below = __shfl_up_sync(QLORA_FULL_WARP, sum, o);
            sum += lane >= o ? below : 0;
        }
        if (inside) {
            counts[(c + lane) * experts + e] = rows + sum - own;
        }
        rows += __shfl_sync(QLORA_FULL_WARP, sum, 31);
    }
    return rows;
}

// Turns counts into the choices of an expert in the blocks before, and totals into their sums.
// Launch: a warp per expert, grid (ceil(experts / 8)), 256 threads.
QLORA_KERNEL __launch_bounds__(256)
    qlora_routing_totals(int32_t* counts, int64_t chunks, int32_t experts, int32_t* totals) {
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t e = (int32_t)blockIdx.x * 8 + (int32_t)threadIdx.x / 32;
    if (e < experts) {
        int32_t rows = sum_chunks(counts, chunks, experts, e, lane);
        if (lane == 0) {
            totals[e] = rows;
        }
    }
}

// Turns totals, which are in starts, into the first rows, and lists the tiles. Launch: one block of
// 1,024 threads, one for each expert.
QLORA_KERNEL __launch_bounds__(1024)
    qlora_routing_starts(int32_t experts, int32_t* starts, int32_t* tiles) {
    __shared__ int32_t shared[32];
    int32_t e = (int32_t)threadIdx.x;
    int32_t rows = e < experts ? starts[e] : 0;
    int32_t first = sum_before(rows, shared);
    int32_t own = (rows + TILE_ROWS - 1) / TILE_ROWS;
    int32_t at = sum_before(own, shared);
    if (e < experts) {
        starts[e] = first;
    }
    if (e == experts - 1) {
        starts[experts] = first + rows;
        tiles[0] = at + own;
    }
    for (int32_t i = 0; i < own; i++) {
        tiles[2 * (at + i) + 1] = e;
        tiles[2 * (at + i) + 2] = first + i * TILE_ROWS;
    }
}

// Launch: as for count, without dynamic shared memory.
QLORA_KERNEL __launch_bounds__(CHUNK)
    qlora_routing_spread(const int32_t* choice, const float* weights, int64_t count, int32_t chosen,
                         int32_t experts, const int32_t* counts, const int32_t* starts,
                         int32_t* place, int32_t* tokens, float* sorted) {
    __shared__ int32_t ids[CHUNK];
    int64_t at = (int64_t)blockIdx.x * CHUNK + threadIdx.x;
    int32_t mine = at < count ? choice[at] : -1;
    ids[threadIdx.x] = mine;
    __syncthreads();
    if (mine < 0) {
        return;
    }
    int32_t to = starts[mine] + counts[(int64_t)blockIdx.x * experts + mine];
#pragma unroll 4
    for (int32_t i = 0; i < (int32_t)threadIdx.x; i++) {
        to += ids[i] == mine;
    }
    place[at] = to;
    tokens[to] = (int32_t)(at / chosen);
    sorted[to] = weights[at];
}
