// optim.cu - AdamW over one flat arena. Everything that changes from step to step is in device
// memory.
// targets: 75
// groups: train
#include "ranges.cuh"

// The same layout as qlora_adamw_state in qlora.h: 5 doubles set by the host, counts kept by the
// device, then the values for one update, computed from them in double.
struct adamw_state {
    double lr;
    double beta1;
    double beta2;
    double eps;
    double weight_decay;
    int64_t updates; // updates applied: the t of the bias corrections
    int64_t skipped; // updates skipped because a gradient was not finite
    int32_t skip;    // this update is skipped
    float lr_decay;  // lr weight_decay
    float beta2_f32;
    float one_minus_beta1;
    float one_minus_beta2;
    float step_size;       // lr / (1 - beta1^t)
    float root_correction; // sqrt(1 - beta2^t)
    float eps_f32;
};

// x^n by squaring, with the same multiplications as on the CPU, so that a resumed run gets the
// same bits.
__device__ __forceinline__ double power(double x, int64_t n) {
    double y = 1.0;
    for (; n > 0; n >>= 1) {
        if (n & 1) {
            y *= x;
        }
        x *= x;
    }
    return y;
}

// Starts one update: counts it, or counts it as skipped if *not_finite is set (not_finite may be
// null), and computes the corrections. Launch: 1 block of 32 threads, of which only one works.
QLORA_KERNEL qlora_optim_advance(adamw_state* state, const int32_t* not_finite) {
    if (threadIdx.x != 0) {
        return;
    }
    int32_t skip = not_finite != 0 && *not_finite != 0;
    int64_t t = state->updates + (skip ? 0 : 1);
    state->updates = t;
    state->skipped += skip ? 1 : 0;
    state->skip = skip;
    double beta1 = state->beta1;
    double beta2 = state->beta2;
    state->lr_decay = (float)(state->lr * state->weight_decay);
    state->beta2_f32 = (float)beta2;
    state->one_minus_beta1 = (float)(1.0 - beta1);
    state->one_minus_beta2 = (float)(1.0 - beta2);
    state->step_size = (float)(state->lr / (1.0 - power(beta1, t)));
    state->root_correction = (float)sqrt(1.0 - power(beta2, t));
    state->eps_f32 = (float)state->eps;
}

__device__ __forceinline__ void adamw_one(const adamw_state& s, float step_size, float decay,
                                          float clip, float& p, float g, float& m, float& v) {
    g *= clip;
    p -= decay * p;
    m += s.one_minus_beta1 * (g - m);
    v = s.beta2_f32 * v + s.one_minus_beta2 * g * g;
    p -= step_size * (m / (sqrtf(v) / s.root_correction + s.eps_f32));
}

__device__ __forceinline__ void store_four(float* p, const float (&v)[4]) {
    *(uint4*)p = pack(v);
}

__device__ __forceinline__ void store_four(bf16* p, const float (&v)[4]) {
    *(uint2*)p = make_uint2(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]));
}

// Writes the first `left` of four values to elements i .. i + 3 of a range's copy.
template <class S>
__device__ __forceinline__ void copy_four(const adamw_range& range, int64_t i, int64_t left,
                                          const float (&v)[4]) {
    S* copy = (S*)range.copy;
    bool whole = left >= 4 && ((range.copy_cols | range.copy_ld) & 3) == 0 &&
                 ((uint64_t)copy & (4 * sizeof(S) - 1)) == 0;
    if (whole) {
        store_four(copy + copy_at(range, i), v);
        return;
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (k < left) {
            store(copy + copy_at(range, i + k), v[k]);
        }
    }
}

// Writes the first `left` of four values.
template <class S>
__device__ __forceinline__ void shade_four(S* shadow, int64_t left, bool vec, const float (&v)[4]) {
    if (vec && left >= 4) {
        store_four(shadow, v);
        return;
    }
    for (int k = 0; k < 4 && k < left; k++) {
        store(shadow + k, v[k]);
    }
}

// For each range of the arena, with the clipped g, lr times range.lr in place of lr, and decay = lr
// weight_decay range.decay:
//   p -= decay p;  m += (1 - beta1) (g - m);  v = beta2 v + (1 - beta2) g^2
//   p -= lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//   shadow = shadow_scale p (if there is a shadow), also to its copy;  g = 0
// If state->skip is set, only g = 0 is done. clip (one f32 in device memory) may be null, meaning
// 1. Launch: 256 threads, grid.x = pieces of the longest range / 256, limited so that the grid
// stays near 8192 blocks (the kernel strides), grid.y = number of ranges (strided above 65535).
// Determinism: every element is independent and has one writer.
template <class S>
__device__ __forceinline__ void adamw(float* p, float* g, float* m, float* v, S* shadow,
                                      const adamw_range* ranges, int64_t range_count,
                                      const adamw_state* state, const float* clip) {
    adamw_state s = *state;
    float clip_by = clip != 0 ? *clip : 1.0f;
    for (int64_t r = blockIdx.y; r < range_count; r += gridDim.y) {
        adamw_range range = ranges[r];
        float lr = range.lr > 0.0 ? (float)range.lr : 1.0f;
        float decay = s.lr_decay * range.decay * lr;
        float step_size = s.step_size * lr;
        int64_t begin = range.begin;
        bool vec = rows_aligned(p, begin) && rows_aligned(g, begin) && rows_aligned(m, begin) &&
                   rows_aligned(v, begin) &&
                   (((uint64_t)shadow | (uint64_t)begin * sizeof(S)) & 7u) == 0 &&
                   (sizeof(S) == 2 || rows_aligned(shadow, begin));
        int64_t first = ((int64_t)blockIdx.x * 256 + threadIdx.x) * 4;
        for (int64_t i = first; i < range.count; i += (int64_t)gridDim.x * 1024) {
            int64_t left = range.count - i;
            int64_t at = begin + i;
            if (s.skip) {
                store_raw(g + at, make_uint4(0, 0, 0, 0), left, vec);
                continue;
            }
            uint4 raw_p = load_raw(p + at, left, vec);
            uint4 raw_g = load_raw(g + at, left, vec);
            uint4 raw_m = load_raw(m + at, left, vec);
            uint4 raw_v = load_raw(v + at, left, vec);
            float pp[4];
            float gg[4];
            float mm[4];
            float vv[4];
            unpack(raw_p, pp);
            unpack(raw_g, gg);
            unpack(raw_m, mm);
            unpack(raw_v, vv);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                adamw_one(s, step_size, decay, clip_by, pp[k], gg[k], mm[k], vv[k]);
            }
            store_raw(p + at, pack(pp), left, vec);
            store_raw(m + at, pack(mm), left, vec);
            store_raw(v + at, pack(vv), left, vec);
            store_raw(g + at, make_uint4(0, 0, 0, 0), left, vec);
            if (shadow != 0) {
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    pp[k] *= range.shadow_scale;
                }
                shade_four(shadow + at, left, vec, pp);
                if (range.copy != 0) {
                    copy_four<S>(range, i, left, pp);
                }
            }
        }
    }
}

QLORA_KERNEL __launch_bounds__(256)
    qlora_optim_adamw_f32(float* p, float* g, float* m, float* v, float* shadow,
                          const adamw_range* ranges, int64_t range_count, const adamw_state* state,
                          const float* clip) {
    adamw(p, g, m, v, shadow, ranges, range_count, state, clip);
}

QLORA_KERNEL __launch_bounds__(256)
    qlora_optim_adamw_bf16(float* p, float* g, float* m, float* v, bf16* shadow,
                           const adamw_range* ranges, int64_t range_count, const adamw_state* state,
                           const float* clip) {
    adamw(p, g, m, v, shadow, ranges, range_count, state, clip);
}

// The index of the value of a map of 256 ascending values that is nearest to x.
__device__ __forceinline__ int nearest_code(const float* map, float x) {
    int low = 0;
#pragma unroll
    for (int step = 128; step > 0; step /= 2) {
        int at = low + step;
        low = x > (map[at - 1] + map[at]) * 0.5f ? at : low;
    }
    return low;
}

// The largest of the values of 256 threads, which are not negative; room is 8 floats of shared
// memory that no thread uses any more.
__device__ __forceinline__ float block_most(float x, float* room) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    }
    if ((threadIdx.x & 31) == 0) {
        room[threadIdx.x >> 5] = x;
    }
    __syncthreads();
    x = room[0];
#pragma unroll
    for (int i = 1; i < 8; i++) {
        x = fmaxf(x, room[i]);
    }
    return x;
}

// The same update with moments in 8 bits. `moments` is one piece of memory:
//   float map[2][256]        for m and for v
//   int64_t place[ranges]    the moments of each range, in bytes from the start
// A range of n >= 4096 elements has codes of m and v (n bytes each, rounded up to 16), then the
// scales of their blocks of 256: m = map[code] scale. The scale is the largest magnitude of the
// block, the code that of the nearest value of the map; a negative m does not become 0. Shorter
// ranges have f32 moments (4 n bytes, rounded up to 16, for m and for v).
//
// Launch:
//   threads = 256, one element each
//   grid    = as for adamw, with 256 elements per block
//   shared  = 2112 bytes, static
// Determinism: a block of elements has one block of threads, and a maximum does not depend on the
// order.
template <class S>
__device__ __forceinline__ void adamw8(float* p, float* g, char* moments, S* shadow,
                                       const adamw_range* ranges, int64_t range_count,
                                       const adamw_state* state, const float* clip) {
    // It is long because everything that is loaded is used until its end.
    __shared__ float map[512];
    __shared__ float room[2][8];
    map[threadIdx.x] = ((const float*)moments)[threadIdx.x];
    map[threadIdx.x + 256] = ((const float*)moments)[threadIdx.x + 256];
    __syncthreads();
    const int64_t* places = (const int64_t*)(moments + 2048);
    adamw_state s = *state;
    float clip_by = clip != 0 ? *clip : 1.0f;
    for (int64_t r = blockIdx.y; r < range_count; r += gridDim.y) {
        adamw_range range = ranges[r];
        float lr = range.lr > 0.0 ? (float)range.lr : 1.0f;
        float decay = s.lr_decay * range.decay * lr;
        bool coded = range.count >= 4096;
        int64_t blocks = (range.count + 255) / 256;
        int64_t bytes = (range.count * (coded ? 1 : 4) + 15) & ~(int64_t)15;
        char* at = moments + places[r];
        float* scale_m = (float*)(at + 2 * bytes);
        float* scale_v = scale_m + blocks;
        for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
            int64_t i = block * 256 + threadIdx.x;
            bool in = i < range.count;
            int64_t e = range.begin + i;
            float grad = in ? g[e] : 0.0f;
            if (in) {
                g[e] = 0.0f;
            }
            if (s.skip) {
                continue;
            }
            float pp = in ? p[e] : 0.0f;
            float m = 0.0f;
            float v = 0.0f;
            if (in && coded) {
                m = map[((const uint8_t*)at)[i]] * scale_m[block];
                v = map[256 + ((const uint8_t*)at)[bytes + i]] * scale_v[block];
            } else if (in) {
                m = ((const float*)at)[i];
                v = ((const float*)(at + bytes))[i];
            }
            adamw_one(s, s.step_size * lr, decay, clip_by, pp, grad, m, v);
            if (in) {
                p[e] = pp;
                pp *= range.shadow_scale;
                store(shadow + e, pp);
                if (range.copy != 0) {
                    store((S*)range.copy + copy_at(range, i), pp);
                }
            }
            if (in && !coded) {
                ((float*)at)[i] = m;
                ((float*)(at + bytes))[i] = v;
            }
            if (!coded) {
                continue;
            }
            __syncthreads(); // the scales have been read, and so has the room
            float most_m = block_most(in ? fabsf(m) : 0.0f, room[0]);
            float most_v = block_most(in ? v : 0.0f, room[1]);
            int code = nearest_code(map, most_m > 0.0f ? m / most_m : 0.0f);
            code -= m < 0.0f && code > 0 && map[code] >= 0.0f ? 1 : 0;
            if (in) {
                ((uint8_t*)at)[i] = (uint8_t)code;
                ((uint8_t*)at)[bytes + i] =
                    (uint8_t)nearest_code(map + 256, most_v > 0.0f ? v / most_v : 0.0f);
            }
            if (threadIdx.x == 0) {
                scale_m[block] = most_m;
                scale_v[block] = most_v;
            }
        }
    }
}

QLORA_KERNEL __launch_bounds__(256)
    qlora_optim_adamw8_f32(float* p, float* g, char* moments, float* shadow,
                           const adamw_range* ranges, int64_t range_count, const adamw_state* state,
                           const float* clip) {
    adamw8(p, g, moments, shadow, ranges, range_count, state, clip);
}

QLORA_KERNEL __launch_bounds__(256)
    qlora_optim_adamw8_bf16(float* p, float* g, char* moments, bf16* shadow,
                            const adamw_range* ranges, int64_t range_count,
                            const adamw_state* state, const float* clip) {
    adamw8(p, g, moments, shadow, ranges, range_count, state, clip);
}

// One step of the fixed tree that sums the gradients of micro-batches; see src/ops/tree.h.
//   mode 0: s = g, g = 0;  mode 1: s = s + g, g = 0;  mode 2: g = s + g;  mode 3: g = s
// for n elements, and, unless small_s is null, for the totals of the loss (sum, its rounding error,
// weights, loss of routers) and 8 sums in double: those of g are in totals and sums, those of s in
// small_s, the sums first. Launch: 256 threads, grid.x = pieces of 1024 elements, at most 8192 (the
// kernel strides).
// Determinism: every element is independent and has one writer.
QLORA_KERNEL __launch_bounds__(256)
    qlora_optim_tree(float* g, float* s, int64_t n, int32_t mode, float* totals, double* sums,
                     double* small_s) {
    bool vec = rows_aligned(g, 0) && rows_aligned(s, 0);
    int64_t first = ((int64_t)blockIdx.x * 256 + threadIdx.x) * 4;
    for (int64_t i = first; i < n; i += (int64_t)gridDim.x * 1024) {
        int64_t left = n - i;
        float gg[4];
        float ss[4];
        unpack(load_raw(mode == 3 ? s + i : g + i, left, vec), gg);
        if (mode == 1 || mode == 2) {
            unpack(load_raw(s + i, left, vec), ss);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                gg[k] = ss[k] + gg[k];
            }
        }
        store_raw(mode >= 2 ? g + i : s + i, pack(gg), left, vec);
        if (mode < 2) {
            store_raw(g + i, make_uint4(0, 0, 0, 0), left, vec);
        }
    }
    if (blockIdx.x != 0 || small_s == 0) {
        return;
    }
    int t = threadIdx.x;
    if (t < 8) {
        double sum = mode == 3 ? small_s[t] : mode == 0 ? sums[t] : small_s[t] + sums[t];
        *(mode >= 2 ? sums + t : small_s + t) = sum;
        if (mode < 2) {
            sums[t] = 0.0;
        }
    }
    if (t == 32) {
        float* small_totals = (float*)(small_s + 8);
        float* from = mode == 3 ? small_totals : totals;
        float b = from[0];
        float sum = b;
        float error = from[1];
        float weights = from[2];
        float routers = from[3];
        if (mode == 1 || mode == 2) { // the exact error of a sum of two
            float a = small_totals[0];
            sum = a + b;
            float rest = sum - a;
            error = small_totals[1] + error + ((a - (sum - rest)) + (b - rest));
            weights = small_totals[2] + weights;
            routers = small_totals[3] + routers;
        }
        float* to = mode >= 2 ? totals : small_totals;
        to[0] = sum;
        to[1] = error;
        to[2] = weights;
        to[3] = routers;
        for (int k = 0; k < 4 && mode < 2; k++) {
            totals[k] = 0.0f;
        }
    }
}
