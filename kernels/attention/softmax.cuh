// softmax.cuh - attention as separate steps: head layout, transpose, masked scores, softmax.
#ifndef QLORA_SOFTMAX_CUH
#define QLORA_SOFTMAX_CUH

#include "../vec.cuh"

// y[b, r, c] = x[b, r, c] between two layouts given by strides (in elements). For
//   [S, H*d] <-> [H, S, d]
// these are batch stride d and leading dimension ld on one side, S*ld and ld on the other.
// Launch: threads a multiple of 32 up to 256, grid.x = cols / (threads * N) rounded up with
// N = 16 bytes / size of an element, grid.y = rows and grid.z = batch, each at most 65535. x and y
// must not overlap.
template <class T, int N>
__device__ __forceinline__ void copy_strided(const T* x, int64_t x_batch, int64_t x_ld, T* y,
                                             int64_t y_batch, int64_t y_ld, int64_t batch,
                                             int64_t rows, int64_t cols) {
    int64_t c = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    bool vec = rows_aligned(x, x_ld) && rows_aligned(y, y_ld) && rows_aligned(x, x_batch) &&
               rows_aligned(y, y_batch) && c + N <= cols;
    for (int64_t b = blockIdx.z; b < batch; b += gridDim.z) {
        for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
            const T* from = x + b * x_batch + row * x_ld + c;
            T* to = y + b * y_batch + row * y_ld + c;
            if (vec) {
                *(uint4*)to = *(const uint4*)from;
            } else {
                for (int i = 0; i < N && c + i < cols; i++) {
                    to[i] = from[i];
                }
            }
        }
    }
}

// y[b, c, r] = x[b, r, c]. Launch: 256 threads, grid.x = cols / 32, grid.y = rows / 32, both
// rounded up, grid.z = batch; grid.y and grid.z at most 65535. x and y must not overlap.
template <class T>
__device__ __forceinline__ void transpose(const T* x, int64_t x_batch, int64_t x_ld, T* y,
                                          int64_t y_batch, int64_t y_ld, int64_t batch,
                                          int64_t rows, int64_t cols) {
    __shared__ T tile[32][33];
    int tx = (int)(threadIdx.x & 31);
    int ty = (int)(threadIdx.x >> 5);
    int64_t c0 = (int64_t)blockIdx.x * 32;
    for (int64_t b = blockIdx.z; b < batch; b += gridDim.z) {
        for (int64_t r0 = (int64_t)blockIdx.y * 32; r0 < rows; r0 += (int64_t)gridDim.y * 32) {
            for (int i = ty; i < 32; i += 8) {
                if (r0 + i < rows && c0 + tx < cols) {
                    tile[i][tx] = x[b * x_batch + (r0 + i) * x_ld + c0 + tx];
                }
            }
            __syncthreads();
            for (int i = ty; i < 32; i += 8) {
                if (c0 + i < cols && r0 + tx < rows) {
                    y[b * y_batch + (c0 + i) * y_ld + r0 + tx] = tile[tx][i];
                }
            }
            __syncthreads();
        }
    }
}

// Value of a masked score: finite, so that no arithmetic on it gives NaN, and small enough that
// e^(MASKED - max) is 0.
#define MASKED -3.0e38f

// s[b, q, k] = allowed ? scale s : MASKED, in place. The queries are the last `rows` of `cols`
// positions: with t = q + cols - rows, causal allows k <= t, and window > 0 allows only
// k > t - window.
// Launch: threads a multiple of 32 up to 256, grid.x = cols / threads rounded up, grid.y = rows and
// grid.z = batch, each at most 65535.
template <class T>
__device__ __forceinline__ void scores(T* s, int64_t s_batch, int64_t s_ld, int64_t batch,
                                       int64_t rows, int64_t cols, float scale, int32_t causal,
                                       int64_t window) {
    int64_t k = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (k >= cols) {
        return;
    }
    for (int64_t b = blockIdx.z; b < batch; b += gridDim.z) {
        for (int64_t q = blockIdx.y; q < rows; q += gridDim.y) {
            int64_t t = q + cols - rows;
            bool allowed = (!causal || k <= t) && (window <= 0 || k > t - window);
            T* at = s + b * s_batch + q * s_ld + k;
            store(at, allowed ? scale * to_float(*at) : MASKED);
        }
    }
}

// y = e^(x - max) / sum e^(x - max) over each row; y may be x.
// Launch of both softmax kernels, with pieces = cols / N rounded up:
//   pieces <= 32: width = power of two >= pieces, 256 threads
//   otherwise:    width = threads = pieces rounded up to a multiple of 32, at most 256
//   grid.x = rows / (threads / width) rounded up, grid.y = batch <= 65535
// Determinism: the order of the sum depends only on cols and the type.
template <class T>
__device__ __forceinline__ void softmax_fwd(const T* x, int64_t x_batch, int64_t x_ld, T* y,
                                            int64_t y_batch, int64_t y_ld, int64_t batch,
                                            int64_t rows, int64_t cols, int32_t width) {
    const int N = lanes<T>::N;
    __shared__ float shared[32];
    row_place place = place_row(width);
    int64_t row = place.row;
    int64_t end = row < rows ? cols : 0;
    int64_t first = (int64_t)place.lane * N;
    int64_t step = (int64_t)width * N;
    bool vec = rows_aligned(x, x_ld) && rows_aligned(y, y_ld) && rows_aligned(x, x_batch) &&
               rows_aligned(y, y_batch);
    for (int64_t b = blockIdx.y; b < batch; b += gridDim.y) {
        const T* from = x + b * x_batch + row * x_ld;
        T* to = y + b * y_batch + row * y_ld;
        float top = MASKED;
        for (int64_t c = first; c < end; c += step) {
            float v[N];
            unpack(load_raw(from + c, end - c, vec, MASKED), v);
#pragma unroll
            for (int i = 0; i < N; i++) {
                top = fmaxf(top, v[i]);
            }
        }
        top = row_max(top, shared, width);
        float sum = 0.0f;
        for (int64_t c = first; c < end; c += step) {
            float v[N];
            unpack(load_raw(from + c, end - c, vec), v);
#pragma unroll
            for (int i = 0; i < N; i++) {
                sum += c + i < end ? expf(v[i] - top) : 0.0f;
            }
        }
        sum = row_sum(sum, shared, width);
        for (int64_t c = first; c < end; c += step) {
            float v[N];
            unpack(load_raw(from + c, end - c, vec), v);
#pragma unroll
            for (int i = 0; i < N; i++) {
                v[i] = expf(v[i] - top) / sum;
            }
            store_raw(to + c, pack(v), end - c, vec);
        }
    }
}

// dx = y (dy - sum(y dy)) over each row, where y is the softmax; dx may be dy or y. Launch
// as above.
template <class T>
__device__ __forceinline__ void softmax_bwd(const T* y, int64_t y_batch, int64_t y_ld, const T* dy,
                                            int64_t dy_batch, int64_t dy_ld, T* dx,
                                            int64_t dx_batch, int64_t dx_ld, int64_t batch,
                                            int64_t rows, int64_t cols, int32_t width) {
    const int N = lanes<T>::N;
    __shared__ float shared[32];
    row_place place = place_row(width);
    int64_t row = place.row;
    int64_t end = row < rows ? cols : 0;
    int64_t first = (int64_t)place.lane * N;
    int64_t step = (int64_t)width * N;
    bool vec = rows_aligned(y, y_ld) && rows_aligned(dy, dy_ld) && rows_aligned(dx, dx_ld) &&
               rows_aligned(y, y_batch) && rows_aligned(dy, dy_batch) && rows_aligned(dx, dx_batch);
    for (int64_t b = blockIdx.y; b < batch; b += gridDim.y) {
        const T* from_y = y + b * y_batch + row * y_ld;
        const T* from_dy = dy + b * dy_batch + row * dy_ld;
        T* to = dx + b * dx_batch + row * dx_ld;
        float dot = 0.0f;
        for (int64_t c = first; c < end; c += step) {
            float p[N];
            float d[N];
            unpack(load_raw(from_y + c, end - c, vec), p);
            unpack(load_raw(from_dy + c, end - c, vec), d);
#pragma unroll
            for (int i = 0; i < N; i++) {
                dot += p[i] * d[i];
            }
        }
        dot = row_sum(dot, shared, width);
        for (int64_t c = first; c < end; c += step) {
            float p[N];
            float d[N];
            unpack(load_raw(from_y + c, end - c, vec), p);
            unpack(load_raw(from_dy + c, end - c, vec), d);
#pragma unroll
            for (int i = 0; i < N; i++) {
                d[i] = p[i] * (d[i] - dot);
            }
            store_raw(to + c, pack(d), end - c, vec);
        }
    }
}

#endif
