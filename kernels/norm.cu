// norm.cu - RMSNorm over rows and over heads, with the residual sum in front, and its backward
// passes.
//
// Rows may be cut into heads: block row y of the grid is head y, whose columns start at y * cols in
// every row of the inputs and outputs (the weight [cols] is shared). A plain norm has grid.y = 1.
//
// Launch of the row kernels: N = 4 (f32) or 8 (bf16) columns a piece, pieces = cols / N rounded up.
//   pieces <= 64: width = power of two >= pieces / 2, at most 32; 256 threads, 256 / width rows
//   otherwise:    width = threads = pieces / 2 rounded up to a multiple of 32, at most 512; one row
// grid.x = rows / (threads / width) rounded up. Static shared memory only.
// A thread keeps two pieces in registers; longer rows are read a second time.
// Determinism: the sum over a row has a fixed order that depends on cols and the type alone.
#include "vec.cuh"

#define KEPT 2

// h_out = h_in + delta (rounded to T; skipped when delta is null, then h_in is the input),
// y = h / sqrt(mean(h^2) + eps) * w, from the rounded h. h_out may be h_in, y may be h_in without
// delta.
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
    const T* from = h_in + row * ld_in + head;
    const T* add = delta + row * ld_delta + head;
    T* sum_to = h_out + row * ld_out + head;
    T* to = y + row * ld_y + head;
    bool vec = rows_aligned(h_in + head, ld_in) && rows_aligned(y + head, ld_y) &&
               rows_aligned((const float*)w, 0) &&
               (delta == 0 ||
                (rows_aligned(delta + head, ld_delta) && rows_aligned(h_out + head, ld_out)));
    int32_t first = place.lane * N;
    int32_t step = width * N;
    int32_t end = row < rows ? cols : 0;

    uint4 kept[KEPT];
    uint4 more[KEPT];
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        int32_t c = first + k * step;
        kept[k] = make_uint4(0, 0, 0, 0);
        more[k] = make_uint4(0, 0, 0, 0);
        if (c < end) {
            kept[k] = load_raw(from + c, end - c, vec);
            if (delta != 0) {
                more[k] = load_raw(add + c, end - c, vec);
            }
        }
    }
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        int32_t c = first + k * step;
        float v[N];
        if (delta != 0) {
            float d[N];
            unpack(kept[k], v);
            unpack(more[k], d);
#pragma unroll
            for (int i = 0; i < N; i++) {
                v[i] += d[i];
            }
            kept[k] = pack(v);
            if (c < end) {
                store_raw(sum_to + c, kept[k], end - c, vec);
            }
        }
        unpack(kept[k], v);
#pragma unroll
        for (int i = 0; i < N; i++) {
            squares += v[i] * v[i];
        }
    }
    for (int32_t c = first + KEPT * step; c < end; c += step) {
        float v[N];
        uint4 raw = load_raw(from + c, end - c, vec);
        if (delta != 0) {
            float d[N];
            unpack(raw, v);
            unpack(load_raw(add + c, end - c, vec), d);
#pragma unroll
            for (int i = 0; i < N; i++) {
                v[i] += d[i];
            }
            raw = pack(v);
            store_raw(sum_to + c, raw, end - c, vec);
        }
        unpack(raw, v);
#pragma unroll
        for (int i = 0; i < N; i++) {
            squares += v[i] * v[i];
        }
    }
    float rstd = 1.0f / sqrtf(row_sum(squares, shared, width) / (float)cols + eps);

#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        int32_t c = first + k * step;
        if (c < end) {
            float v[N];
            float g[N];
            unpack(kept[k], v);
            load_either<N>(w, w_bf16, c, end - c, vec, g);
#pragma unroll
            for (int i = 0; i < N; i++) {
                v[i] = v[i] * rstd * g[i];
            }
            store_raw(to + c, pack(v), end - c, vec);
        }
    }
    const T* again = delta != 0 ? sum_to : from;
    for (int32_t c = first + KEPT * step; c < end; c += step) {
        float v[N];
        float g[N];
        unpack(load_raw(again + c, end - c, vec), v);
        load_either<N>(w, w_bf16, c, end - c, vec, g);
#pragma unroll
        for (int i = 0; i < N; i++) {
            v[i] = v[i] * rstd * g[i];
        }
        store_raw(to + c, pack(v), end - c, vec);
    }
}

QLORA_KERNEL __launch_bounds__(512, 1)
    qlora_norm_rms_fwd_f32(const float* h_in, int64_t ld_in, const float* delta, int64_t ld_delta,
                           float* h_out, int64_t ld_out, const void* w, int32_t w_bf16, float* y,
                           int64_t ld_y, int64_t rows, int32_t cols, float eps, int32_t width) {
    rms_fwd(h_in, ld_in, delta, ld_delta, h_out, ld_out, w, w_bf16, y, ld_y, rows, cols, eps,
            width);
}

QLORA_KERNEL __launch_bounds__(512, 1)
    qlora_norm_rms_fwd_bf16(const bf16* h_in, int64_t ld_in, const bf16* delta, int64_t ld_delta,
                            bf16* h_out, int64_t ld_out, const void* w, int32_t w_bf16, bf16* y,
                            int64_t ld_y, int64_t rows, int32_t cols, float eps, int32_t width) {
    rms_fwd(h_in, ld_in, delta, ld_delta, h_out, ld_out, w, w_bf16, y, ld_y, rows, cols, eps,
            width);
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
    __shared__ float shared[32];
    row_place place = place_row(width);
    int64_t row = place.row;
    int64_t head = (int64_t)blockIdx.y * cols;
    const T* from_dy = dy + row * ld_dy + head;
    const T* from_h = h + row * ld_h + head;
    const T* from_res = dres + row * ld_dres + head;
    T* to = dh + row * ld_dh + head;
    bool vec = rows_aligned(dy + head, ld_dy) && rows_aligned(h + head, ld_h) &&
               rows_aligned(dh + head, ld_dh) && rows_aligned((const float*)w, 0) &&
               (dres == 0 || rows_aligned(dres + head, ld_dres));
    int32_t first = place.lane * N;
    int32_t step = width * N;
    int32_t end = row < rows ? cols : 0;

    uint4 kept_h[KEPT];
    uint4 kept_dy[KEPT];
    uint4 kept_res[KEPT];
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        int32_t c = first + k * step;
        kept_h[k] = make_uint4(0, 0, 0, 0);
        kept_dy[k] = make_uint4(0, 0, 0, 0);
        kept_res[k] = make_uint4(0, 0, 0, 0);
        if (c < end) {
            kept_h[k] = load_raw(from_h + c, end - c, vec);
            kept_dy[k] = load_raw(from_dy + c, end - c, vec);
            if (dres != 0) {
                kept_res[k] = load_raw(from_res + c, end - c, vec);
            }
        }
    }
    float squares = 0.0f;
    float dot = 0.0f;
    for (int32_t c = first, k = 0; c < end; c += step, k++) {
        float v[N];
        float d[N];
        float g[N];
        // k is at most KEPT, so that the pieces stay in registers.
        uint4 raw_h = k == 0 ? kept_h[0] : kept_h[1];
        uint4 raw_dy = k == 0 ? kept_dy[0] : kept_dy[1];
        if (k >= KEPT) {
            raw_h = load_raw(from_h + c, end - c, vec);
            raw_dy = load_raw(from_dy + c, end - c, vec);
        }
        load_either<N>(w, w_bf16, c, end - c, vec, g);
        unpack(raw_h, v);
        unpack(raw_dy, d);
#pragma unroll
        for (int i = 0; i < N; i++) {
            squares += v[i] * v[i];
            dot += d[i] * g[i] * v[i];
        }
    }
    squares = row_sum(squares, shared, width);
    dot = row_sum(dot, shared, width);
    float rstd = 1.0f / sqrtf(squares / (float)cols + eps);
    float pull = dot / (float)cols * rstd * rstd;
    if (rstd_out != 0 && place.lane == 0 && row < rows) {
        rstd_out[row * gridDim.y + blockIdx.y] = rstd;
    }
    for (int32_t c = first, k = 0; c < end; c += step, k++) {
        float v[N];
        float d[N];
        float g[N];
        float r[N];
        uint4 raw_h = k == 0 ? kept_h[0] : kept_h[1];
        uint4 raw_dy = k == 0 ? kept_dy[0] : kept_dy[1];
        uint4 raw_res = k == 0 ? kept_res[0] : kept_res[1];
        if (k >= KEPT) {
            raw_h = load_raw(from_h + c, end - c, vec);
            raw_dy = load_raw(from_dy + c, end - c, vec);
            raw_res = make_uint4(0, 0, 0, 0);
            if (dres != 0) {
                raw_res = load_raw(from_res + c, end - c, vec);
            }
        }
        load_either<N>(w, w_bf16, c, end - c, vec, g);
        unpack(raw_h, v);
        unpack(raw_dy, d);
        unpack(raw_res, r);
#pragma unroll
        for (int i = 0; i < N; i++) {
            r[i] += rstd * (d[i] * g[i] - v[i] * pull);
        }
        store_raw(to + c, pack(r), end - c, vec);
    }
}

QLORA_KERNEL __launch_bounds__(512, 1)
    qlora_norm_rms_bwd_f32(const float* dy, int64_t ld_dy, const float* h, int64_t ld_h,
                           const void* w, int32_t w_bf16, const float* dres, int64_t ld_dres,
                           float* dh, int64_t ld_dh, float* rstd, int64_t rows, int32_t cols,
                           float eps, int32_t width) {
    rms_bwd(dy, ld_dy, h, ld_h, w, w_bf16, dres, ld_dres, dh, ld_dh, rstd, rows, cols, eps, width);
}

QLORA_KERNEL __launch_bounds__(512, 1)
    qlora_norm_rms_bwd_bf16(const bf16* dy, int64_t ld_dy, const bf16* h, int64_t ld_h,
                            const void* w, int32_t w_bf16, const bf16* dres, int64_t ld_dres,
                            bf16* dh, int64_t ld_dh, float* rstd, int64_t rows, int32_t cols,
                            float eps, int32_t width) {
    rms_bwd(dy, ld_dy, h, ld_h, w, w_bf16, dres, ld_dres, dh, ld_dh, rstd, rows, cols, eps, width);
}

// First stage of dw[c] = sum over rows and heads of dy h rstd: partial[chunk, c] is the sum over
// rows [chunk * chunk_rows, (chunk + 1) * chunk_rows). The caller runs this before dy is
// overwritten. Launch: 256 threads as 8 lanes of 32, grid.x = cols / 32 rounded up, grid.y = number
// of chunks. Determinism: row lane y takes every eighth row in ascending order, lanes are added in
// order 0..7.
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

QLORA_KERNEL __launch_bounds__(256, 1)
    qlora_norm_rms_dw_f32(const float* dy, int64_t ld_dy, const float* h, int64_t ld_h,
                          const float* rstd, float* partial, int64_t rows, int32_t cols,
                          int32_t heads, int64_t chunk_rows) {
    rms_dw(dy, ld_dy, h, ld_h, rstd, partial, rows, cols, heads, chunk_rows);
}

QLORA_KERNEL __launch_bounds__(256, 1)
    qlora_norm_rms_dw_bf16(const bf16* dy, int64_t ld_dy, const bf16* h, int64_t ld_h,
                           const float* rstd, float* partial, int64_t rows, int32_t cols,
                           int32_t heads, int64_t chunk_rows) {
    rms_dw(dy, ld_dy, h, ld_h, rstd, partial, rows, cols, heads, chunk_rows);
}

// Second stage: dw[c] = (accumulate ? dw[c] : 0) + partial[0, c] + partial[1, c] + ...
// Launch: 128 threads, grid.x = cols / 128 rounded up. Determinism: chunks in ascending order.
QLORA_KERNEL qlora_norm_rms_dw_sum(const float* partial, float* dw, int32_t cols, int32_t chunks,
                                   int32_t accumulate) {
    int32_t c = (int32_t)(blockIdx.x * blockDim.x + threadIdx.x);
    if (c >= cols) {
        return;
    }
    float sum = 0.0f;
    for (int32_t k = 0; k < chunks; k++) {
        sum += partial[(int64_t)k * cols + c];
    }
    dw[c] = accumulate ? dw[c] + sum : sum;
}
