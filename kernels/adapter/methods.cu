// methods.cu - DoRA's magnitudes, and the gradients of trained embeddings and heads.
// targets: 75
#include "../vec.cuh"

// The sum over a block of 256 threads, in a fixed tree; every thread gets it.
__device__ __forceinline__ float block_sum(float v, float* lane) {
    int32_t t = (int32_t)threadIdx.x;
    lane[t] = v;
    __syncthreads();
    for (int32_t half = 128; half > 0; half >>= 1) {
        if (t < half) {
            lane[t] += lane[t + half];
        }
        __syncthreads();
    }
    float sum = lane[0];
    __syncthreads();
    return sum;
}

// For each row of w, n = its 2-norm: gain = magnitude / n, inverse = 1 / n; with start != 0, first
// magnitude = n. Launch: 256 threads, grid.x = rows. Determinism: fixed order of the sum, one
// writer per row.
template <class T>
__device__ __forceinline__ void row_norms(const T* w, int64_t ld, int64_t cols, float* magnitude,
                                          float* gain, float* inverse, int32_t start) {
    __shared__ float lane[256];
    int64_t row = blockIdx.x;
    float mine = 0.0f;
    for (int64_t c = threadIdx.x; c < cols; c += 256) {
        float x = to_float(w[row * ld + c]);
        mine += x * x;
    }
    float n = sqrtf(block_sum(mine, lane));
    if (threadIdx.x == 0) {
        float m = start ? n : magnitude[row];
        magnitude[row] = m;
        gain[row] = m / n;
        inverse[row] = 1.0f / n;
    }
}

QLORA_KERNEL __launch_bounds__(256)
    qlora_methods_row_norms_f32(const float* w, int64_t ld, int64_t cols, float* magnitude,
                                float* gain, float* inverse, int32_t start) {
    row_norms(w, ld, cols, magnitude, gain, inverse, start);
}

QLORA_KERNEL __launch_bounds__(256)
    qlora_methods_row_norms_bf16(const bf16* w, int64_t ld, int64_t cols, float* magnitude,
                                 float* gain, float* inverse, int32_t start) {
    row_norms(w, ld, cols, magnitude, gain, inverse, start);
}

// x[r, c] *= gain[c]. Launch: 256 threads, grid.x = columns / 256 rounded up, grid.y = rows, at
// most 65535 (the kernel strides). Each element has one writer.
template <class T>
__device__ __forceinline__ void scale_columns(T* x, int64_t ld, int64_t rows, int64_t cols,
                                              const float* gain) {
    int64_t c = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (c >= cols) {
        return;
    }
    float g = gain[c];
    for (int64_t r = blockIdx.y; r < rows; r += gridDim.y) {
        store(x + r * ld + c, to_float(x[r * ld + c]) * g);
    }
}

QLORA_KERNEL __launch_bounds__(256)
    qlora_methods_scale_columns_f32(float* x, int64_t ld, int64_t rows, int64_t cols,
                                    const float* gain) {
    scale_columns(x, ld, rows, cols, gain);
}

QLORA_KERNEL __launch_bounds__(256)
    qlora_methods_scale_columns_bf16(bf16* x, int64_t ld, int64_t rows, int64_t cols,
                                     const float* gain) {
    scale_columns(x, ld, rows, cols, gain);
}

// d[c] += inverse[c] * (sum over r of a[r, c] b[r, c]). Launch: 256 threads as 32 columns by 8
// rows, grid.x = columns / 32 rounded up. Determinism: thread (c, t) adds rows t, t + 8, ... in
// ascending order, then the 8 sums of a column are added in ascending order.
template <class T>
__device__ __forceinline__ void dot_columns(const T* a, int64_t lda, const T* b, int64_t ldb,
                                            int64_t rows, int64_t cols, const float* inverse,
                                            float* d) {
    __shared__ float lane[8][32];
    int32_t x = (int32_t)threadIdx.x & 31;
    int32_t y = (int32_t)threadIdx.x >> 5;
    int64_t c = (int64_t)blockIdx.x * 32 + x;
    float sum = 0.0f;
    for (int64_t r = y; r < rows && c < cols; r += 8) {
        sum += to_float(a[r * lda + c]) * to_float(b[r * ldb + c]);
    }
    lane[y][x] = sum;
    __syncthreads();
    if (y == 0 && c < cols) {
        for (int32_t k = 1; k < 8; k++) {
            sum += lane[k][x];
        }
        d[c] += inverse[c] * sum;
    }
}

QLORA_KERNEL __launch_bounds__(256)
    qlora_methods_dot_columns_f32(const float* a, int64_t lda, const float* b, int64_t ldb,
                                  int64_t rows, int64_t cols, const float* inverse, float* d) {
    dot_columns(a, lda, b, ldb, rows, cols, inverse, d);
}

QLORA_KERNEL __launch_bounds__(256)
    qlora_methods_dot_columns_bf16(const bf16* a, int64_t lda, const bf16* b, int64_t ldb,
                                   int64_t rows, int64_t cols, const float* inverse, float* d) {
    dot_columns(a, lda, b, ldb, rows, cols, inverse, d);
}

// table[ids[i]] = rows[i]. Launch: 256 threads, grid.x = rows; the ids differ.
template <class T>
__device__ __forceinline__ void put_rows(const T* rows, const int32_t* ids, T* table,
                                         int64_t cols) {
    const T* from = rows + (int64_t)blockIdx.x * cols;
    T* to = table + (int64_t)ids[blockIdx.x] * cols;
    for (int64_t c = threadIdx.x; c < cols; c += 256) {
        to[c] = from[c];
    }
}

QLORA_KERNEL __launch_bounds__(256)
    qlora_methods_put_rows_f32(const float* rows, const int32_t* ids, float* table, int64_t cols) {
    put_rows(rows, ids, table, cols);
}

QLORA_KERNEL __launch_bounds__(256)
    qlora_methods_put_rows_bf16(const bf16* rows, const int32_t* ids, bf16* table, int64_t cols) {
    put_rows(rows, ids, table, cols);
}

// The gradient of an embedding, dy [tokens, cols]. With rows: d[i] += scale * (sum of dy[t] over
// the tokens t whose id is rows[i]), grid.x = number of rows. Without: d[id] += the same for every
// id of the batch, grid.x = tokens; the block of the first token of an id does the work. Launch:
// 256 threads. Determinism: tokens in ascending order, one writer per row.
template <class T>
__device__ __forceinline__ void embed_gradient(const T* dy, int64_t ld, const int32_t* ids,
                                               int64_t tokens, const int32_t* rows, float scale,
                                               float* d, int64_t cols) {
    int64_t own = blockIdx.x;
    int32_t id = rows != 0 ? rows[own] : ids[own];
    int64_t first = rows != 0 ? 0 : own;
    for (int64_t t = 0; rows == 0 && t < own; t++) {
        if (ids[t] == id) {
            return;
        }
    }
    float* to = d + (rows != 0 ? own : (int64_t)id) * cols;
    for (int64_t c = threadIdx.x; c < cols; c += 256) {
        float sum = 0.0f;
        for (int64_t t = first; t < tokens; t++) {
            if (ids[t] == id) {
                sum += to_float(dy[t * ld + c]);
            }
        }
        to[c] += scale * sum;
    }
}

QLORA_KERNEL __launch_bounds__(256)
    qlora_methods_embed_gradient_f32(const float* dy, int64_t ld, const int32_t* ids,
                                     int64_t tokens, const int32_t* rows, float scale, float* d,
                                     int64_t cols) {
    embed_gradient(dy, ld, ids, tokens, rows, scale, d, cols);
}

QLORA_KERNEL __launch_bounds__(256)
    qlora_methods_embed_gradient_bf16(const bf16* dy, int64_t ld, const int32_t* ids,
                                      int64_t tokens, const int32_t* rows, float scale, float* d,
                                      int64_t cols) {
    embed_gradient(dy, ld, ids, tokens, rows, scale, d, cols);
}

// The gradient of some rows of the head: d[i] += scale * (sum over r of g[r, rows[i]] x[r]).
// Launch: 256 threads, grid.x = number of rows. Determinism: r in ascending order.
template <class T>
__device__ __forceinline__ void head_gradient(const T* g, int64_t g_ld, const T* x, int64_t x_ld,
                                              int64_t count, const int32_t* rows, float scale,
                                              float* d, int64_t cols) {
    int64_t id = rows[blockIdx.x];
    float* to = d + (int64_t)blockIdx.x * cols;
    for (int64_t c = threadIdx.x; c < cols; c += 256) {
        float sum = 0.0f;
        for (int64_t r = 0; r < count; r++) {
            sum += to_float(g[r * g_ld + id]) * to_float(x[r * x_ld + c]);
        }
        to[c] += scale * sum;
    }
}

QLORA_KERNEL __launch_bounds__(256)
    qlora_methods_head_gradient_f32(const float* g, int64_t g_ld, const float* x, int64_t x_ld,
                                    int64_t count, const int32_t* rows, float scale, float* d,
                                    int64_t cols) {
    head_gradient(g, g_ld, x, x_ld, count, rows, scale, d, cols);
}

QLORA_KERNEL __launch_bounds__(256)
    qlora_methods_head_gradient_bf16(const bf16* g, int64_t g_ld, const bf16* x, int64_t x_ld,
                                     int64_t count, const int32_t* rows, float scale, float* d,
                                     int64_t cols) {
    head_gradient(g, g_ld, x, x_ld, count, rows, scale, d, cols);
}
