// loss.cuh - cross-entropy over rows of logits with the gradient in place, its sum, and the argmax.
#ifndef QLORA_LOSS_CUH
#define QLORA_LOSS_CUH

#include "../vec.cuh"

#define LOWEST -3.0e38f
#define IGNORED -100
#define BATCH 4

// A logit x, limited to cap tanh(x / cap) if CAP is set. The filling of a short piece stays as it
// is.
template <bool CAP> __device__ __forceinline__ float limited(float x, float cap) {
    return CAP && x > LOWEST ? cap * tanhf(x / cap) : x;
}

// Running maximum, and the sum of e^(x - maximum).
struct log_sum {
    float top;
    float sum;
};

template <class T, bool CAP>
__device__ __forceinline__ void log_sum_add(log_sum& s, uint4 raw, float cap) {
    const int N = lanes<T>::N;
    float v[N];
    unpack(raw, v);
    float top = s.top;
#pragma unroll
    for (int i = 0; i < N; i++) {
        v[i] = limited<CAP>(v[i], cap);
        top = fmaxf(top, v[i]);
    }
    float sum = s.sum * exp_of(s.top - top, (const T*)0);
#pragma unroll
    for (int i = 0; i < N; i++) {
        sum += exp_of(v[i] - top, (const T*)0);
    }
    s.top = top;
    s.sum = sum;
}

// The share of one thread, which owns the pieces first, first + step, ... of a row. BATCH aligned
// pieces are loaded at a time; remaining or unaligned pieces are loaded one by one. So are all with
// a cap: its tanh takes longer than the loads, and the text would be five times as long.
template <class T, bool CAP>
__device__ __forceinline__ log_sum log_sum_of(const T* x, int64_t cols, int64_t first, int64_t step,
                                              bool vec, float cap) {
    const int N = lanes<T>::N;
    log_sum mine = {LOWEST, 0.0f};
    int64_t c = first;
    for (; !CAP && vec && c + (BATCH - 1) * step + N <= cols; c += BATCH * step) {
        uint4 raw[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            raw[k] = *(const uint4*)(x + c + k * step);
        }
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            log_sum_add<T, CAP>(mine, raw[k], cap);
        }
    }
    for (; c < cols; c += step) {
        log_sum_add<T, CAP>(mine, load_raw(x + c, cols - c, vec, -3.3e38f), cap);
    }
    return mine;
}

// Values that every column of a row's gradient needs.
struct row_gradient {
    int64_t label;
    float top;
    float share; // factor / sum
    float factor;
    float cap;
};

// (e^(y - top) share - onehot(label) factor) dy/dx, y the limited x, for the piece at column `at`.
template <class T, bool CAP>
__device__ __forceinline__ uint4 gradient_piece(const row_gradient& g, uint4 raw, int64_t at) {
    const int N = lanes<T>::N;
    int32_t hot = g.label >= at && g.label < at + N ? (int32_t)(g.label - at) : -1;
    float v[N];
    unpack(raw, v);
#pragma unroll
    for (int i = 0; i < N; i++) {
        float y = limited<CAP>(v[i], g.cap);
        v[i] = exp_of(y - g.top, (const T*)0) * g.share;
        if (i == hot) {
            v[i] -= g.factor;
        }
        if (CAP) {
            v[i] *= 1.0f - y / g.cap * (y / g.cap);
        }
    }
    return pack(v);
}

// Processes the pieces of one thread, in place.
template <class T, bool CAP>
__device__ __forceinline__ void gradient_of(const row_gradient& g, T* x, int64_t cols,
                                            int64_t first, int64_t step, bool vec) {
    const int N = lanes<T>::N;
    int64_t c = first;
    for (; !CAP && vec && c + (BATCH - 1) * step + N <= cols; c += BATCH * step) {
        uint4 raw[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            raw[k] = *(const uint4*)(x + c + k * step);
        }
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            *(uint4*)(x + c + k * step) = gradient_piece<T, CAP>(g, raw[k], c + k * step);
        }
    }
    for (; c < cols; c += step) {
        uint4 raw = load_raw(x + c, cols - c, vec);
        store_raw(x + c, gradient_piece<T, CAP>(g, raw, c), cols - c, vec);
    }
}

// For each row, loss = weight (log sum e^x - x[label]); with gradient != 0 also, in place,
//   x = (softmax(x) - onehot(label)) scale weight.
// With CAP, y = cap tanh(x / cap) takes the place of x, and the gradient is that of x itself. These
// are kernels of their own, because few models need them and they take long to compile.
// Label -100 gives loss 0 and gradient 0; any other label outside [0, cols) gives the same and sets
// *bad to 1. scale (in device memory) and weights [rows] may be null, meaning 1; scale is one
// number, or, with owners [rows], that of row r is scale[owners[r]].
// cols < 2^31, 64-bit offsets.
// Launch:
//   threads = cols / (4 N) rounded up to a multiple of 32, at most 1024
//   grid.x  = rows
// Determinism: the order of the sum depends only on cols and the type. One writer per output.
template <class T, bool CAP>
__device__ __forceinline__ void cross_entropy(T* logits, int64_t ld, const int32_t* labels,
                                              const float* weights, const float* scale,
                                              const int32_t* owners, float* losses, int64_t cols,
                                              int32_t gradient, int32_t* bad, float cap) {
    const int N = lanes<T>::N;
    __shared__ float shared[32];
    int64_t row = blockIdx.x;
    T* x = logits + row * ld;
    int64_t label = labels[row];
    bool vec = rows_aligned(logits, ld);
    int64_t first = (int64_t)threadIdx.x * N;
    int64_t step = (int64_t)blockDim.x * N;
    if (label < 0 || label >= cols) {
        if (threadIdx.x == 0) {
            losses[row] = 0.0f;
            if (label != IGNORED) {
                *bad = 1;
            }
        }
        for (int64_t c = first; gradient && c < cols; c += step) {
            store_raw(x + c, make_uint4(0, 0, 0, 0), cols - c, vec);
        }
        return;
    }
    float chosen = limited<CAP>(to_float(x[label]), cap);
    log_sum mine = log_sum_of<T, CAP>(x, cols, first, step, vec, cap);
    int32_t width = (int32_t)blockDim.x;
    float top = row_max(mine.top, shared, width);
    float sum = row_sum(mine.sum * exp_of(mine.top - top, (const T*)0), shared, width);
    float weight = weights != 0 ? weights[row] : 1.0f;
    if (threadIdx.x == 0) {
        losses[row] = weight * (top + logf(sum) - chosen);
    }
    if (gradient) {
        // All threads read x[label] before any thread overwrites it, even in blocks of one warp.
        __syncthreads();
        float factor = scale != 0 ? scale[owners != 0 ? owners[row] : 0] * weight : weight;
        row_gradient g = {label, top, factor / sum, factor, cap};
        gradient_of<T, CAP>(g, x, cols, first, step, vec);
    }
}

// ids[row] = column of the largest value, and the smallest such column on a tie; a NaN is never the
// largest, and a row that contains only NaN gives 0. Launch: 256 threads, grid.x = rows.
template <class T>
__device__ __forceinline__ void arg_max(const T* x, int64_t ld, int32_t* ids, int64_t cols) {
    __shared__ float best_value[256];
    __shared__ int32_t best_column[256];
    int t = (int)threadIdx.x;
    const T* from = x + (int64_t)blockIdx.x * ld;
    float value = 0.0f;
    int32_t column = -1;
    for (int64_t c = t; c < cols; c += 256) {
        float v = to_float(from[c]);
        if (v == v && (column < 0 || v > value)) {
            value = v;
            column = (int32_t)c;
        }
    }
    best_value[t] = value;
    best_column[t] = column;
    __syncthreads();
    for (int half = 128; half > 0; half >>= 1) {
        if (t < half) {
            float v = best_value[t + half];
            int32_t c = best_column[t + half];
            int32_t mine = best_column[t];
            if (c >= 0 && (mine < 0 || v > best_value[t] || (v == best_value[t] && c < mine))) {
                best_value[t] = v;
                best_column[t] = c;
            }
        }
        __syncthreads();
    }
    if (t == 0) {
        ids[blockIdx.x] = best_column[0] < 0 ? 0 : best_column[0];
    }
}

#endif
