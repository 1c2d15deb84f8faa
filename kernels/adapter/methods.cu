// methods.cu - DoRA's magnitudes, and trained rows of embeddings and heads.
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
