// mean_norm.cuh - LayerNorm: the norm of a row from which its mean is subtracted, with a weight and
// without a bias, and its backward passes.
//
// Launch of the row kernels: N = 4 (f32) or 8 (bf16) columns per piece, pieces = cols / N
// rounded up.
//   pieces <= 64: width = power of two >= pieces / 2, at most 32; 256 threads, 256 / width rows
//   otherwise:    width = threads = pieces / 2 rounded up to a multiple of 32, at most 512; one row
// grid.x = rows / (threads / width) rounded up. Static shared memory only. A thread reads its
// pieces once per sum, the second time from the caches. Determinism: the sums over a row have a
// fixed order that depends only on cols and the type.
#ifndef QLORA_MEAN_NORM_CUH
#define QLORA_MEAN_NORM_CUH

#include "../vec.cuh"

// The place of a thread in a row: its first column, the distance to the next, and the end.
struct mean_span {
    int32_t first;
    int32_t step;
    int32_t end;
    bool vec;
};

template <class T>
__device__ __forceinline__ void mean_load(const T* row, const mean_span& s, int32_t c,
                                          float (&v)[lanes<T>::N]) {
    unpack(load_raw(row + c, s.end - c, s.vec), v);
}

// The mean of a row and 1 / sqrt(mean((x - mean)^2) + eps).
template <class T>
__device__ __forceinline__ void mean_stats(const T* x, const mean_span& s, int32_t cols, float eps,
                                           int32_t width, float* shared, float& mean, float& rstd) {
    const int N = lanes<T>::N;
    float v[N];
    float sum = 0.0f;
    for (int32_t c = s.first; c < s.end; c += s.step) {
        mean_load(x, s, c, v);
#pragma unroll
        for (int i = 0; i < N; i++) {
            sum += c + i < s.end ? v[i] : 0.0f;
        }
    }
    mean = row_sum(sum, shared, width) / (float)cols;
    float squares = 0.0f;
    for (int32_t c = s.first; c < s.end; c += s.step) {
        mean_load(x, s, c, v);
#pragma unroll
        for (int i = 0; i < N; i++) {
            float d = c + i < s.end ? v[i] - mean : 0.0f;
            squares += d * d;
        }
    }
    rstd = 1.0f / sqrtf(row_sum(squares, shared, width) / (float)cols + eps);
}

template <class T>
__device__ __forceinline__ mean_span mean_span_of(const row_place& place, int32_t width,
                                                  int64_t rows, int32_t cols) {
    mean_span s;
    s.first = place.lane * lanes<T>::N;
    s.step = width * lanes<T>::N;
    s.end = place.row < rows ? cols : 0;
    s.vec = true;
    return s;
}

// y = (x - mean) rstd w; y may be x.
template <class T>
__device__ __forceinline__ void mean_fwd(const T* x, int64_t ld_x, const void* w, int32_t w_bf16,
                                         T* y, int64_t ld_y, int64_t rows, int32_t cols, float eps,
                                         int32_t width) {
    const int N = lanes<T>::N;
    __shared__ float shared[32];
    row_place place = place_row(width);
    mean_span s = mean_span_of<T>(place, width, rows, cols);
    s.vec = rows_aligned(x, ld_x) && rows_aligned(y, ld_y) && rows_aligned((const float*)w, 0);
    const T* from = x + place.row * ld_x;
    float mean;
    float rstd;
    mean_stats(from, s, cols, eps, width, shared, mean, rstd);
    for (int32_t c = s.first; c < s.end; c += s.step) {
        float v[N];
        float g[N];
        mean_load(from, s, c, v);
        load_either<N>(w, w_bf16, c, s.end - c, s.vec, g);
#pragma unroll
        for (int i = 0; i < N; i++) {
            v[i] = (v[i] - mean) * rstd * g[i];
        }
        store_raw(y + place.row * ld_y + c, pack(v), s.end - c, s.vec);
    }
}

// With d = x - mean, r = rstd, g = w dy:
//   dx = dres + r (g - mean(g) - d r^2 mean(g d)),   stats[2 row] = mean, stats[2 row + 1] = r
// dres and stats may be null; dx may be dres or dy.
template <class T>
__device__ __forceinline__ void mean_bwd(const T* dy, int64_t ld_dy, const T* x, int64_t ld_x,
                                         const void* w, int32_t w_bf16, const T* dres,
                                         int64_t ld_dres, T* dx, int64_t ld_dx, float* stats,
                                         int64_t rows, int32_t cols, float eps, int32_t width) {
    const int N = lanes<T>::N;
    __shared__ float shared[64];
    row_place place = place_row(width);
    mean_span s = mean_span_of<T>(place, width, rows, cols);
    s.vec = rows_aligned(dy, ld_dy) && rows_aligned(x, ld_x) && rows_aligned(dx, ld_dx) &&
            rows_aligned((const float*)w, 0) && (dres == 0 || rows_aligned(dres, ld_dres));
    const T* from = x + place.row * ld_x;
    const T* by = dy + place.row * ld_dy;
    float mean;
    float rstd;
    float v[N];
    float d[N];
    float g[N];
    float all = 0.0f;
    float dot = 0.0f;
    mean_stats(from, s, cols, eps, width, shared, mean, rstd);
    for (int32_t c = s.first; c < s.end; c += s.step) {
        mean_load(from, s, c, v);
        mean_load(by, s, c, d);
        load_either<N>(w, w_bf16, c, s.end - c, s.vec, g);
#pragma unroll
        for (int i = 0; i < N; i++) {
            float pull = c + i < s.end ? d[i] * g[i] : 0.0f;
            all += pull;
            dot += pull * (v[i] - mean);
        }
    }
    row_sum_two(all, dot, shared, width);
    all /= (float)cols;
    dot = dot / (float)cols * rstd * rstd;
    for (int32_t c = s.first; c < s.end; c += s.step) {
        float sum[N];
        mean_load(from, s, c, v);
        mean_load(by, s, c, d);
        load_either<N>(w, w_bf16, c, s.end - c, s.vec, g);
#pragma unroll
        for (int i = 0; i < N; i++) {
            sum[i] = 0.0f;
        }
        if (dres != 0) {
            mean_load(dres + place.row * ld_dres, s, c, sum);
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            sum[i] += rstd * (d[i] * g[i] - all - (v[i] - mean) * dot);
        }
        store_raw(dx + place.row * ld_dx + c, pack(sum), s.end - c, s.vec);
    }
    if (stats != 0 && place.lane == 0 && place.row < rows) {
        stats[2 * place.row] = mean;
        stats[2 * place.row + 1] = rstd;
    }
}

// First stage of dw[c] = sum over rows of dy (x - mean) rstd: partial[chunk, c] is the sum over
// rows [chunk * chunk_rows, (chunk + 1) * chunk_rows). Launch: 256 threads as 8 row lanes of 32,
// grid.x = cols / 32 rounded up, grid.y = number of chunks. Determinism: row lane y takes every
// eighth row in ascending order, and the lanes are added in the order 0..7.
template <class T>
__device__ __forceinline__ void mean_dw(const T* dy, int64_t ld_dy, const T* x, int64_t ld_x,
                                        const float* stats, float* partial, int64_t rows,
                                        int32_t cols, int64_t chunk_rows) {
    __shared__ float lane[8][32];
    uint32_t at = threadIdx.x & 31;
    uint32_t y = threadIdx.x >> 5;
    int32_t c = (int32_t)(blockIdx.x * 32 + at);
    int64_t begin = (int64_t)blockIdx.y * chunk_rows;
    int64_t stop = begin + chunk_rows < rows ? begin + chunk_rows : rows;
    float sum = 0.0f;
    if (c < cols) {
        for (int64_t row = begin + y; row < stop; row += 8) {
            sum += to_float(dy[row * ld_dy + c]) * (to_float(x[row * ld_x + c]) - stats[2 * row]) *
                   stats[2 * row + 1];
        }
    }
    lane[y][at] = sum;
    __syncthreads();
    if (y == 0 && c < cols) {
        for (int k = 1; k < 8; k++) {
            sum += lane[k][at];
        }
        partial[(int64_t)blockIdx.y * cols + c] = sum;
    }
}

#endif
