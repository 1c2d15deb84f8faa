// plain.cuh - squared ReLU, the activation of an MLP without a gate, and its backward pass.
//
// Launch as in elementwise.cuh. Each output has one writer; nothing is summed.
#ifndef QLORA_PLAIN_CUH
#define QLORA_PLAIN_CUH

#include "elementwise.cuh"

struct relu2_op {
    __device__ __forceinline__ float operator()(float u) const {
        float r = u < 0.0f ? 0.0f : u; // NaN stays NaN
        return r * r;
    }
};

// du = ds 2 relu(u) and, if s is not null, s = relu(u)^2: the forward pass again, bit for bit. du
// may be u, s may be ds: a thread reads all its columns before it writes any.
template <class T>
__device__ __forceinline__ void relu2_bwd(const T* ds, int64_t ldds, const T* u, int64_t ldu, T* du,
                                          int64_t lddu, T* s, int64_t lds, int64_t rows,
                                          int64_t cols) {
    const int N = lanes<T>::N;
    int64_t c = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    bool vec = rows_aligned(ds, ldds) && rows_aligned(u, ldu) && rows_aligned(du, lddu) &&
               (s == 0 || rows_aligned(s, lds));
    int64_t left = cols - c;
    if (left <= 0) {
        return;
    }
    for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
        float d[N];
        float up[N];
        uint4 raw_d = load_raw(ds + row * ldds + c, left, vec);
        uint4 raw_u = load_raw(u + row * ldu + c, left, vec);
        unpack(raw_d, d);
        unpack(raw_u, up);
#pragma unroll
        for (int i = 0; i < N; i++) {
            float r = up[i] < 0.0f ? 0.0f : up[i];
            up[i] = d[i] * (2.0f * r);
            d[i] = r * r;
        }
        store_raw(du + row * lddu + c, pack(up), left, vec);
        if (s != 0) {
            store_raw(s + row * lds + c, pack(d), left, vec);
        }
    }
}

#endif
