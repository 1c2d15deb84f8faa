// norm.cuh - RMSNorm over rows and over heads, optionally after a residual sum, and its backward
// passes.
//
// Rows may be divided into heads: block row y of the grid is head y, whose columns start at
// y * cols in every row of the inputs and outputs (the weight [cols] is shared). A plain norm has
// grid.y = 1.
//
// Launch of the row kernels: N = 4 (f32) or 8 (bf16) columns per piece, pieces = cols / N
// rounded up.
//   pieces <= 64: width = power of two >= pieces / 2, at most 32; 256 threads, 256 / width rows
//   otherwise:    width = threads = pieces / 2 rounded up to a multiple of 32, at most 512; one row
// grid.x = rows / (threads / width) rounded up. Static shared memory only.
// If cols is a multiple of N and everything is 16-byte aligned, a thread keeps KEPT pieces in
// registers and reads a second time only the part of longer rows beyond them; otherwise it reads
// everything a second time, column by column, in loops that are short to compile. Determinism: the
// sum over a row has a fixed order that depends only on cols and the type.
#ifndef QLORA_NORM_CUH
#define QLORA_NORM_CUH

#include "../vec.cuh"

#define KEPT 2

// State of one row in the forward pass.
template <class T> struct fwd_row {
    const T* from;
    const T* add; // null without a residual
    T* sum_to;
    T* to;
    const void* w;
    int32_t w_bf16;
};

// h = from + add, rounded; adds h^2 to squares.
template <class T>
__device__ __forceinline__ uint4 fwd_sum(const fwd_row<T>& r, uint4 raw, uint4 more, int32_t c,
                                         float& squares) {
    const int N = lanes<T>::N;
    float v[N];
    unpack(raw, v);
    if (r.add != 0) {
        float d[N];
        unpack(more, d);
#pragma unroll
        for (int i = 0; i < N; i++) {
            v[i] += d[i];
        }
        raw = pack(v);
        *(uint4*)(r.sum_to + c) = raw;
        unpack(raw, v);
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        squares += v[i] * v[i];
    }
    return raw;
}

// y = h rstd w, rounded.
template <class T>
__device__ __forceinline__ uint4 fwd_scale(const fwd_row<T>& r, uint4 raw, int32_t c, float rstd) {
    const int N = lanes<T>::N;
    float v[N];
    float g[N];
    unpack(raw, v);
    load_either<N>(r.w, r.w_bf16, c, N, true, g);
#pragma unroll
    for (int i = 0; i < N; i++) {
        v[i] = v[i] * rstd * g[i];
    }
    raw = pack(v);
    *(uint4*)(r.to + c) = raw;
    return raw;
}

// All pieces are whole and aligned.
template <class T>
__device__ __forceinline__ void fwd_one_row(const fwd_row<T>& r, int32_t first, int32_t step,
                                            int32_t end, int32_t cols, float eps, int32_t width,
                                            float* shared) {
    const uint4 zero = make_uint4(0, 0, 0, 0);
    uint4 kept[KEPT];
    uint4 more[KEPT];
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        int32_t c = first + k * step;
        kept[k] = c < end ? *(const uint4*)(r.from + c) : zero;
        more[k] = c < end && r.add != 0 ? *(const uint4*)(r.add + c) : zero;
    }
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        int32_t c = first + k * step;
        if (c < end) {
            kept[k] = fwd_sum(r, kept[k], more[k], c, squares);
        }
    }
    for (int32_t c = first + KEPT * step; c < end; c += step) {
        uint4 raw = *(const uint4*)(r.from + c);
        uint4 add = r.add != 0 ? *(const uint4*)(r.add + c) : zero;
        fwd_sum(r, raw, add, c, squares);
    }
    float rstd = 1.0f / sqrtf(row_sum(squares, shared, width) / (float)cols + eps);
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        int32_t c = first + k * step;
        if (c < end) {
            fwd_scale(r, kept[k], c, rstd);
        }
    }
    const T* again = r.add != 0 ? r.sum_to : r.from;
    for (int32_t c = first + KEPT * step; c < end; c += step) {
        fwd_scale(r, *(const uint4*)(again + c), c, rstd);
    }
}

__device__ __forceinline__ float weight_at(const void* w, int32_t w_bf16, int32_t c) {
    return w_bf16 ? to_float(((const bf16*)w)[c]) : ((const float*)w)[c];
}

// The same for any alignment, with the sums in the same order.
template <class T>
__device__ __forceinline__ void fwd_columns(const fwd_row<T>& r, int32_t first, int32_t step,
                                            int32_t end, int32_t cols, float eps, int32_t width,
                                            float* shared) {
    const int N = lanes<T>::N;
    const T* again = r.add != 0 ? r.sum_to : r.from;
    float squares = 0.0f;
#pragma unroll 1
    for (int32_t c = first; c < end; c += step) {
#pragma unroll 1
        for (int32_t i = c; i < c + N && i < end; i++) {
            if (r.add != 0) {
                store(r.sum_to + i, to_float(r.from[i]) + to_float(r.add[i]));
            }
            float v = to_float(again[i]);
            squares += v * v;
        }
    }
    float rstd = 1.0f / sqrtf(row_sum(squares, shared, width) / (float)cols + eps);
#pragma unroll 1
    for (int32_t c = first; c < end; c += step) {
#pragma unroll 1
        for (int32_t i = c; i < c + N && i < end; i++) {
            store(r.to + i, to_float(again[i]) * rstd * weight_at(r.w, r.w_bf16, i));
        }
    }
}

// h_out = h_in + delta (rounded to T; skipped if delta is null, and then h_in is the input),
// y = h / sqrt(mean(h^2) + eps) * w, from the rounded h. h_out may be h_in; y may be h_in or delta.
template <class T>
__device__ __forceinline__ void rms_fwd(const T* h_in, int64_t ld_in, const T* delta,
                                        int64_t ld_delta, T* h_out, int64_t ld_out, const void* w,
                                        int32_t w_bf16, T* y, int64_t ld_y, int64_t rows,
                                        int32_t cols, float eps, int32_t width) {
    const int N = lanes<T>::N;
    __shared__ float shared[32];
    row_place place = place_row(width);
    int64_t row = place.row;
    int64_t head = (int64_t)blockIdx.y * cols;
    bool vec = cols % N == 0 && rows_aligned(h_in + head, ld_in) && rows_aligned(y + head, ld_y) &&
               rows_aligned((const float*)w, 0) &&
               (delta == 0 ||
                (rows_aligned(delta + head, ld_delta) && rows_aligned(h_out + head, ld_out)));
    fwd_row<T> r;
    r.from = h_in + row * ld_in + head;
    r.add = delta != 0 ? delta + row * ld_delta + head : 0;
    r.sum_to = h_out + row * ld_out + head;
    r.to = y + row * ld_y + head;
    r.w = w;
    r.w_bf16 = w_bf16;
    int32_t first = place.lane * N;
    int32_t end = row < rows ? cols : 0;
    if (vec) {
        fwd_one_row(r, first, width * N, end, cols, eps, width, shared);
    } else {
        fwd_columns(r, first, width * N, end, cols, eps, width, shared);
    }
}

// State of one row in the backward pass.
template <class T> struct bwd_row {
    const T* dy;
    const T* h;
    const T* dres; // null without a residual
    T* dh;
    const void* w;
    int32_t w_bf16;
};

// One piece's contribution to sum(h^2) and sum(w dy h).
template <class T>
__device__ __forceinline__ void bwd_add(const bwd_row<T>& r, uint4 raw_h, uint4 raw_dy, int32_t c,
                                        float& squares, float& dot) {
    const int N = lanes<T>::N;
    float v[N];
    float d[N];
    float g[N];
    load_either<N>(r.w, r.w_bf16, c, N, true, g);
    unpack(raw_h, v);
    unpack(raw_dy, d);
#pragma unroll
    for (int i = 0; i < N; i++) {
        squares += v[i] * v[i];
        dot += d[i] * g[i] * v[i];
    }
}

// One piece of dh = dres + rstd (w dy - h pull), rounded.
template <class T>
__device__ __forceinline__ uint4 bwd_piece(const bwd_row<T>& r, uint4 raw_h, uint4 raw_dy,
                                           uint4 raw_res, int32_t c, float rstd, float pull) {
    const int N = lanes<T>::N;
    float v[N];
    float d[N];
    float g[N];
    float sum[N];
    load_either<N>(r.w, r.w_bf16, c, N, true, g);
    unpack(raw_h, v);
    unpack(raw_dy, d);
    unpack(raw_res, sum);
#pragma unroll
    for (int i = 0; i < N; i++) {
        sum[i] += rstd * (d[i] * g[i] - v[i] * pull);
    }
    raw_h = pack(sum);
    *(uint4*)(r.dh + c) = raw_h;
    return raw_h;
}

// Returns 1 / sqrt(mean(h^2) + eps). All pieces are whole and aligned.
template <class T>
__device__ __forceinline__ float bwd_one_row(const bwd_row<T>& r, int32_t first, int32_t step,
                                             int32_t end, int32_t cols, float eps, int32_t width,
                                             float* shared) {
    const uint4 zero = make_uint4(0, 0, 0, 0);
    uint4 kept_h[KEPT];
    uint4 kept_dy[KEPT];
    uint4 kept_res[KEPT];
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        int32_t c = first + k * step;
        kept_h[k] = c < end ? *(const uint4*)(r.h + c) : zero;
        kept_dy[k] = c < end ? *(const uint4*)(r.dy + c) : zero;
        kept_res[k] = c < end && r.dres != 0 ? *(const uint4*)(r.dres + c) : zero;
    }
    float squares = 0.0f;
    float dot = 0.0f;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        int32_t c = first + k * step;
        if (c < end) {
            bwd_add(r, kept_h[k], kept_dy[k], c, squares, dot);
        }
    }
    for (int32_t c = first + KEPT * step; c < end; c += step) {
        uint4 raw_h = *(const uint4*)(r.h + c);
        uint4 raw_dy = *(const uint4*)(r.dy + c);
        bwd_add(r, raw_h, raw_dy, c, squares, dot);
    }
    row_sum_two(squares, dot, shared, width);
    float rstd = 1.0f / sqrtf(squares / (float)cols + eps);
    float pull = dot / (float)cols * rstd * rstd;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        int32_t c = first + k * step;
        if (c < end) {
            bwd_piece(r, kept_h[k], kept_dy[k], kept_res[k], c, rstd, pull);
        }
    }
    for (int32_t c = first + KEPT * step; c < end; c += step) {
        uint4 raw_h = *(const uint4*)(r.h + c);
        uint4 raw_dy = *(const uint4*)(r.dy + c);
        uint4 raw_res = r.dres != 0 ? *(const uint4*)(r.dres + c) : zero;
        bwd_piece(r, raw_h, raw_dy, raw_res, c, rstd, pull);
    }
    return rstd;
}

// The same for any alignment, with the sums in the same order.
template <class T>
__device__ __forceinline__ float bwd_columns(const bwd_row<T>& r, int32_t first, int32_t step,
                                             int32_t end, int32_t cols, float eps, int32_t width,
                                             float* shared) {
    const int N = lanes<T>::N;
    float squares = 0.0f;
    float dot = 0.0f;
#pragma unroll 1
    for (int32_t c = first; c < end; c += step) {
#pragma unroll 1
        for (int32_t i = c; i < c + N && i < end; i++) {
            float v = to_float(r.h[i]);
            squares += v * v;
            dot += to_float(r.dy[i]) * weight_at(r.w, r.w_bf16, i) * v;
        }
    }
    row_sum_two(squares, dot, shared, width);
    float rstd = 1.0f / sqrtf(squares / (float)cols + eps);
    float pull = dot / (float)cols * rstd * rstd;
#pragma unroll 1
    for (int32_t c = first; c < end; c += step) {
#pragma unroll 1
        for (int32_t i = c; i < c + N && i < end; i++) {
            float v = to_float(r.h[i]);
            float d = to_float(r.dy[i]);
            float sum = r.dres != 0 ? to_float(r.dres[i]) : 0.0f;
            sum += rstd * (d * weight_at(r.w, r.w_bf16, i) - v * pull);
            store(r.dh + i, sum);
        }
    }
    return rstd;
}

// With r = 1 / sqrt(mean(h^2) + eps):
//   dh = dres + r (w dy - h r^2 mean(w dy h)),   rstd[row * heads + head] = r
// dres and rstd may be null; dh may be dres or dy.
template <class T>
__device__ __forceinline__ void rms_bwd(const T* dy, int64_t ld_dy, const T* h, int64_t ld_h,
                                        const void* w, int32_t w_bf16, const T* dres,
                                        int64_t ld_dres, T* dh, int64_t ld_dh, float* rstd_out,
                                        int64_t rows, int32_t cols, float eps, int32_t width) {
    const int N = lanes<T>::N;
    __shared__ float shared[64];
    row_place place = place_row(width);
    int64_t row = place.row;
    int64_t head = (int64_t)blockIdx.y * cols;
    bool vec = cols % N == 0 && rows_aligned(dy + head, ld_dy) && rows_aligned(h + head, ld_h) &&
               rows_aligned(dh + head, ld_dh) && rows_aligned((const float*)w, 0) &&
               (dres == 0 || rows_aligned(dres + head, ld_dres));
    bwd_row<T> r;
    r.dy = dy + row * ld_dy + head;
    r.h = h + row * ld_h + head;
    r.dres = dres != 0 ? dres + row * ld_dres + head : 0;
    r.dh = dh + row * ld_dh + head;
    r.w = w;
    r.w_bf16 = w_bf16;
    int32_t first = place.lane * N;
    int32_t end = row < rows ? cols : 0;
    float rstd;
    if (vec) {
        rstd = bwd_one_row(r, first, width * N, end, cols, eps, width, shared);
    } else {
        rstd = bwd_columns(r, first, width * N, end, cols, eps, width, shared);
    }
    if (rstd_out != 0 && place.lane == 0 && row < rows) {
        rstd_out[row * gridDim.y + blockIdx.y] = rstd;
    }
}

// First stage of dw[c] = sum over rows and heads of dy h rstd: partial[chunk, c] is the sum over
// rows [chunk * chunk_rows, (chunk + 1) * chunk_rows). The caller must run this before dy is
// overwritten. Launch: 256 threads as 8 row lanes of 32, grid.x = cols / 32 rounded up,
// grid.y = number of chunks. Determinism: row lane y takes every eighth row in ascending order, and
// the lanes are added in the order 0..7.
template <class T>
__device__ __forceinline__ void rms_dw(const T* dy, int64_t ld_dy, const T* h, int64_t ld_h,
                                       const float* rstd, float* partial, int64_t rows,
                                       int32_t cols, int32_t heads, int64_t chunk_rows) {
    __shared__ float lane[8][32];
    uint32_t x = threadIdx.x & 31;
    uint32_t y = threadIdx.x >> 5;
    int32_t c = (int32_t)(blockIdx.x * 32 + x);
    int64_t begin = (int64_t)blockIdx.y * chunk_rows;
    int64_t stop = begin + chunk_rows < rows ? begin + chunk_rows : rows;
    float sum = 0.0f;
    if (c < cols) {
        for (int64_t row = begin + y; row < stop; row += 8) {
            for (int32_t k = 0; k < heads; k++) {
                int64_t at = (int64_t)k * cols + c;
                sum += to_float(dy[row * ld_dy + at]) * to_float(h[row * ld_h + at]) *
                       rstd[row * heads + k];
            }
        }
    }
    lane[y][x] = sum;
    __syncthreads();
    if (y == 0 && c < cols) {
        for (int k = 1; k < 8; k++) {
            sum += lane[k][x];
        }
        partial[(int64_t)blockIdx.y * cols + c] = sum;
    }
}

#endif
