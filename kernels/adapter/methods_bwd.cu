// methods_bwd.cu - the gradients of DoRA's magnitudes, and of trained embeddings and heads.
// targets: 75
// groups: train
#include "../vec.cuh"

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
