// routed.cuh - rows that are sorted by expert: gathering, their sum, the weighted activation.
#ifndef QLORA_ROUTED_CUH
#define QLORA_ROUTED_CUH

#include "../layer/elementwise.cuh"

enum { GATHERED = 8 }; // rows of a block at a time, so that their loads are under way together

// to[i] = from[list[i]]. Launch: as for elementwise.cuh, but GATHERED rows for each of grid.y.
template <class T>
__device__ __forceinline__ void routed_gather(const T* from, int64_t ldf, const int32_t* list,
                                              T* to, int64_t ldt, int64_t rows, int64_t cols) {
    const int N = lanes<T>::N;
    int64_t c = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    bool vec = rows_aligned(from, ldf) && rows_aligned(to, ldt);
    if (c >= cols) {
        return;
    }
    for (int64_t row = (int64_t)blockIdx.y * GATHERED; row < rows;
         row += (int64_t)gridDim.y * GATHERED) {
        uint4 raw[GATHERED];
#pragma unroll
        for (int i = 0; i < GATHERED; i++) { // rows after the last repeat it
            int64_t at = list[min(row + i, rows - 1)];
            raw[i] = load_raw(from + at * ldf + c, cols - c, vec);
        }
#pragma unroll
        for (int i = 0; i < GATHERED; i++) {
            if (row + i < rows) {
                store_raw(to + (row + i) * ldt + c, raw[i], cols - c, vec);
            }
        }
    }
}

// to[t] = (add ? to[t] : 0) + the rows of its `chosen` experts, in f32 and in their order.
template <class T>
__device__ __forceinline__ void routed_sum(const T* from, int64_t ldf, const int32_t* place,
                                           int32_t chosen, T* to, int64_t ldt, int64_t rows,
                                           int64_t cols, int32_t add) {
    const int N = lanes<T>::N;
    int64_t c = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    bool vec = rows_aligned(from, ldf) && rows_aligned(to, ldt);
    if (c >= cols) {
        return;
    }
    for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
        float sum[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            sum[i] = 0.0f;
        }
        if (add) {
            unpack(load_raw(to + row * ldt + c, cols - c, vec), sum);
        }
#pragma unroll 4
        for (int32_t j = 0; j < chosen; j++) {
            float v[N];
            unpack(load_raw(from + place[row * chosen + j] * ldf + c, cols - c, vec), v);
#pragma unroll
            for (int i = 0; i < N; i++) {
                sum[i] += v[i];
            }
        }
        store_raw(to + row * ldt + c, pack(sum), cols - c, vec);
    }
}

// s = factor of the row * act(gate) up. Launch: as for elementwise.cuh.
template <class GATE, class T>
__device__ __forceinline__ void routed_gated(const T* gate, int64_t ldg, const T* up, int64_t ldu,
                                             const float* factors, T* s, int64_t lds, int64_t rows,
                                             int64_t cols) {
    const int N = lanes<T>::N;
    int64_t c = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    bool vec = rows_aligned(gate, ldg) && rows_aligned(up, ldu) && rows_aligned(s, lds);
    if (c >= cols) {
        return;
    }
    for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
        float g[N];
        float u[N];
        unpack(load_raw(gate + row * ldg + c, cols - c, vec), g);
        unpack(load_raw(up + row * ldu + c, cols - c, vec), u);
        float factor = factors[row];
#pragma unroll
        for (int i = 0; i < N; i++) {
            g[i] = factor * (GATE(g[i]).act * u[i]);
        }
        store_raw(s + row * lds + c, pack(g), cols - c, vec);
    }
}

// The same backward, with the weighted activation once more in the place of its gradient ds:
//   dots = sum of ds act(gate) up     dgate = factor ds up act'(gate)     dup = factor ds act(gate)
// The gradients replace gate and up. A block per row; one sum for each, in a fixed order.
template <class GATE, class T>
__device__ __forceinline__ void routed_gated_bwd(T* ds, int64_t lds, T* gate, int64_t ldg, T* up,
                                                 int64_t ldu, const float* factors, float* dots,
                                                 int64_t cols) {
    const int N = lanes<T>::N;
    __shared__ float shared[32];
    int64_t row = blockIdx.x;
    bool vec = rows_aligned(ds, lds) && rows_aligned(gate, ldg) && rows_aligned(up, ldu);
    float factor = factors[row];
    float dot = 0.0f;
    for (int64_t c = (int64_t)threadIdx.x * N; c < cols; c += (int64_t)blockDim.x * N) {
        float d[N];
        float g[N];
        float u[N];
        unpack(load_raw(ds + row * lds + c, cols - c, vec), d);
        unpack(load_raw(gate + row * ldg + c, cols - c, vec), g);
        unpack(load_raw(up + row * ldu + c, cols - c, vec), u);
#pragma unroll
        for (int i = 0; i < N; i++) {
            GATE at(g[i]);
            float s = at.act * u[i];
            float du = factor * (d[i] * at.act);
            dot = fmaf(d[i], s, dot);
            g[i] = factor * at.chain(d[i] * u[i]);
            d[i] = factor * s;
            u[i] = du;
        }
        store_raw(ds + row * lds + c, pack(d), cols - c, vec);
        store_raw(gate + row * ldg + c, pack(g), cols - c, vec);
        store_raw(up + row * ldu + c, pack(u), cols - c, vec);
    }
    dot = row_sum(dot, shared, (int32_t)blockDim.x);
    if (threadIdx.x == 0) {
        dots[row] = dot;
    }
}

// factors[r] = sigmoid(z[r]). A thread per row.
template <class T>
__device__ __forceinline__ void routed_factors(const T* z, int64_t ld, float* factors,
                                               int64_t rows) {
    int64_t row = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (row < rows) {
        factors[row] = 1.0f / (1.0f + expf(-to_float(z[row * ld])));
    }
}

// The gradient of z from that of the factors. A thread per row.
template <class T>
__device__ __forceinline__ void routed_factors_bwd(const float* dots, const float* factors, T* dz,
                                                   int64_t ld, int64_t rows) {
    int64_t row = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (row < rows) {
        float g = factors[row];
        store(dz + row * ld, dots[row] * g * (1.0f - g));
    }
}

#define ROUTED(name, T)                                                                            \
    QLORA_KERNEL __launch_bounds__(256)                                                            \
        qlora_routed_gather_##name(const T* from, int64_t ldf, const int32_t* list, T* to,         \
                                   int64_t ldt, int64_t rows, int64_t cols) {                      \
        routed_gather(from, ldf, list, to, ldt, rows, cols);                                       \
    }                                                                                              \
    QLORA_KERNEL __launch_bounds__(256)                                                            \
        qlora_routed_sum_##name(const T* from, int64_t ldf, const int32_t* place, int32_t chosen,  \
                                T* to, int64_t ldt, int64_t rows, int64_t cols, int32_t add) {     \
        routed_sum(from, ldf, place, chosen, to, ldt, rows, cols, add);                            \
    }                                                                                              \
    QLORA_KERNEL __launch_bounds__(256) qlora_routed_gated_##name(                                 \
        const T* gate, int64_t ldg, const T* up, int64_t ldu, const float* factors, T* s,          \
        int64_t lds, int64_t rows, int64_t cols, int32_t gelu) {                                   \
        if (gelu) {                                                                                \
            routed_gated<gelu_gate<T>>(gate, ldg, up, ldu, factors, s, lds, rows, cols);           \
        } else {                                                                                   \
            routed_gated<silu_gate<T>>(gate, ldg, up, ldu, factors, s, lds, rows, cols);           \
        }                                                                                          \
    }                                                                                              \
    QLORA_KERNEL __launch_bounds__(256)                                                            \
        qlora_routed_factors_##name(const T* z, int64_t ld, float* factors, int64_t rows) {        \
        routed_factors(z, ld, factors, rows);                                                      \
    }

// Launch: a block per row, threads a multiple of 32.
#define ROUTED_BACKWARD(name, T)                                                                   \
    QLORA_KERNEL __launch_bounds__(256) qlora_routed_bwd_gated_##name(                             \
        T* ds, int64_t lds, T* gate, int64_t ldg, T* up, int64_t ldu, const float* factors,        \
        float* dots, int64_t cols, int32_t gelu) {                                                 \
        if (gelu) {                                                                                \
            routed_gated_bwd<gelu_gate<T>>(ds, lds, gate, ldg, up, ldu, factors, dots, cols);      \
        } else {                                                                                   \
            routed_gated_bwd<silu_gate<T>>(ds, lds, gate, ldg, up, ldu, factors, dots, cols);      \
        }                                                                                          \
    }                                                                                              \
    QLORA_KERNEL __launch_bounds__(256) qlora_routed_bwd_factors_##name(                           \
        const float* dots, const float* factors, T* dz, int64_t ld, int64_t rows) {                \
        routed_factors_bwd(dots, factors, dz, ld, rows);                                           \
    }

#endif
