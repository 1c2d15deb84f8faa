// elementwise.cuh - activations, products, sums, fills and the embedding gather.
//
// Launch of every kernel here except the gather:
//   threads = a multiple of 32 up to 256
//   grid.x  = columns / (threads * N) rounded up, with N = 4 (f32) or 8 (bf16)
//   grid.y  = rows, at most 65535 (the kernel strides)
// No shared memory. Each output has one writer; nothing is summed.
#ifndef QLORA_ELEMENTWISE_CUH
#define QLORA_ELEMENTWISE_CUH

#include "../vec.cuh"

// y = op(x)
template <class T, class OP>
__device__ __forceinline__ void map_one(OP op, const T* x, int64_t ldx, T* y, int64_t ldy,
                                        int64_t rows, int64_t cols) {
    const int N = lanes<T>::N;
    int64_t c = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    bool vec = rows_aligned(x, ldx) && rows_aligned(y, ldy);
    if (c >= cols) {
        return;
    }
    for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
        float v[N];
        unpack(load_raw(x + row * ldx + c, cols - c, vec), v);
#pragma unroll
        for (int i = 0; i < N; i++) {
            v[i] = op(v[i]);
        }
        store_raw(y + row * ldy + c, pack(v), cols - c, vec);
    }
}

// y = op(a, b)
template <class T, class OP>
__device__ __forceinline__ void map_two(OP op, const T* a, int64_t lda, const T* b, int64_t ldb,
                                        T* y, int64_t ldy, int64_t rows, int64_t cols) {
    const int N = lanes<T>::N;
    int64_t c = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    bool vec = rows_aligned(a, lda) && rows_aligned(b, ldb) && rows_aligned(y, ldy);
    if (c >= cols) {
        return;
    }
    for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
        float p[N];
        float q[N];
        uint4 raw_a = load_raw(a + row * lda + c, cols - c, vec);
        uint4 raw_b = load_raw(b + row * ldb + c, cols - c, vec);
        unpack(raw_a, p);
        unpack(raw_b, q);
#pragma unroll
        for (int i = 0; i < N; i++) {
            p[i] = op(p[i], q[i]);
        }
        store_raw(y + row * ldy + c, pack(p), cols - c, vec);
    }
}

// 1 / (1 + e^-x); the f32 form divides exactly, the bf16 form by approximation (2 ulp of f32).
__device__ __forceinline__ float sigmoid(float x, const float*) {
    return 1.0f / (1.0f + expf(-x));
}

__device__ __forceinline__ float sigmoid(float x, const bf16* tag) {
    return __fdividef(1.0f, 1.0f + exp_of(-x, tag));
}

template <class T> struct silu_op {
    __device__ __forceinline__ float operator()(float x) const {
        return x * sigmoid(x, (const T*)0);
    }
};

// d/dx silu = s (1 + x (1 - s)), s = sigmoid(x)
template <class T> struct silu_grad_op {
    __device__ __forceinline__ float operator()(float x, float dy) const {
        float s = sigmoid(x, (const T*)0);
        return dy * s * (1.0f + x * (1.0f - s));
    }
};

template <class T> struct swiglu_op {
    __device__ __forceinline__ float operator()(float gate, float up) const {
        return gate * sigmoid(gate, (const T*)0) * up;
    }
};

struct mul_op {
    __device__ __forceinline__ float operator()(float a, float b) const {
        return a * b;
    }
};

struct add_op {
    __device__ __forceinline__ float operator()(float a, float b) const {
        return a + b;
    }
};

// c tanh(x / c)
struct cap_op {
    float cap;
    __device__ __forceinline__ float operator()(float x) const {
        return cap * tanhf(x / cap);
    }
};

struct scale_op {
    float alpha;
    __device__ __forceinline__ float operator()(float x) const {
        return alpha * x;
    }
};

// The activations of a gate: act = act(g), and chain(x) = x act'(g).
template <class T> struct silu_gate {
    float g;
    float s;
    float act;
    __device__ __forceinline__ silu_gate(float gate) {
        g = gate;
        s = sigmoid(g, (const T*)0);
        act = g * s;
    }
    __device__ __forceinline__ float chain(float x) const {
        return x * s * (1.0f + g * (1.0f - s));
    }
};

// The tanh form of GELU: g (1 + tanh(w)) / 2 = g / (1 + e^(-2 w)), w = sqrt(2 / pi) (g + c g^3).
template <class T> struct gelu_gate {
    float g;
    float s;
    float act;
    __device__ __forceinline__ gelu_gate(float gate) {
        g = gate;
        s = sigmoid(1.5957691216057308f * (g + 0.044715f * g * g * g), (const T*)0);
        act = g * s;
    }
    __device__ __forceinline__ float chain(float x) const {
        float slope = 1.5957691216057308f * (1.0f + 0.134145f * g * g);
        return x * (s + act * (1.0f - s) * slope);
    }
};

template <class T> struct geglu_op {
    __device__ __forceinline__ float operator()(float gate, float up) const {
        return gelu_gate<T>(gate).act * up;
    }
};

// dg = dh u act'(g), du = dh act(g), and, if h is not null, h = act(g) u: the forward pass again,
// bit for bit. dg may be g, du may be u, h may be dh: a thread reads all its columns before it
// writes any.
template <class GATE, class T>
__device__ __forceinline__ void
gated_bwd(const T* dh, int64_t lddh, const T* g, int64_t ldg, const T* u, int64_t ldu, T* dg,
          int64_t lddg, T* du, int64_t lddu, T* h, int64_t ldh, int64_t rows, int64_t cols) {
    const int N = lanes<T>::N;
    int64_t c = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    bool vec = rows_aligned(dh, lddh) && rows_aligned(g, ldg) && rows_aligned(u, ldu) &&
               rows_aligned(dg, lddg) && rows_aligned(du, lddu) && (h == 0 || rows_aligned(h, ldh));
    int64_t left = cols - c;
    if (left <= 0) {
        return;
    }
    for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
        float d[N];
        float gate[N];
        float up[N];
        uint4 raw_d = load_raw(dh + row * lddh + c, left, vec);
        uint4 raw_g = load_raw(g + row * ldg + c, left, vec);
        uint4 raw_u = load_raw(u + row * ldu + c, left, vec);
        unpack(raw_d, d);
        unpack(raw_g, gate);
        unpack(raw_u, up);
#pragma unroll
        for (int i = 0; i < N; i++) {
            GATE at(gate[i]);
            float d_up = d[i] * at.act;
            float d_gate = at.chain(d[i] * up[i]);
            d[i] = at.act * up[i];
            gate[i] = d_gate;
            up[i] = d_up;
        }
        store_raw(dg + row * lddg + c, pack(gate), left, vec);
        store_raw(du + row * lddu + c, pack(up), left, vec);
        if (h != 0) {
            store_raw(h + row * ldh + c, pack(d), left, vec);
        }
    }
}

// y = value, whatever y contained before.
template <class T>
__device__ __forceinline__ void fill(T* y, int64_t ldy, int64_t rows, int64_t cols, float value) {
    const int N = lanes<T>::N;
    int64_t c = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    bool vec = rows_aligned(y, ldy);
    float v[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        v[i] = value;
    }
    uint4 raw = pack(v);
    if (c >= cols) {
        return;
    }
    for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
        store_raw(y + row * ldy + c, raw, cols - c, vec);
    }
}

// One piece of a table row; 16 bytes at once if table and output have the same type.
template <class S, int N>
__device__ __forceinline__ void load_piece(const S* p, int64_t count, bool, float (&v)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        v[i] = 0.0f;
        if (i < count) {
            v[i] = to_float(p[i]);
        }
    }
}

__device__ __forceinline__ void load_piece(const float* p, int64_t count, bool vec, float (&v)[4]) {
    unpack(load_raw(p, count, vec), v);
}

__device__ __forceinline__ void load_piece(const bf16* p, int64_t count, bool vec, float (&v)[8]) {
    unpack(load_raw(p, count, vec), v);
}

// y[row] = table[ids[row]], table [vocab, cols]. An id outside [0, vocab) gives a row of zeros and
// sets *bad to 1 (all writers write the same value, so the order of the blocks does not matter).
// Launch: threads a multiple of 32 up to 256, grid.x = rows; a block iterates over the columns of
// its row.
template <class S, class T>
__device__ __forceinline__ void gather(const S* table, int64_t ldt, int64_t vocab,
                                       const int32_t* ids, T* y, int64_t ldy, int64_t cols,
                                       int32_t* bad) {
    const int N = lanes<T>::N;
    int64_t row = blockIdx.x;
    int64_t id = ids[row];
    bool inside = id >= 0 && id < vocab;
    if (!inside && threadIdx.x == 0) {
        *bad = 1;
    }
    bool vec_in = rows_aligned(table, ldt);
    bool vec_out = rows_aligned(y, ldy);
    const S* from = table + (inside ? id : 0) * ldt;
    for (int64_t c = (int64_t)threadIdx.x * N; c < cols; c += (int64_t)blockDim.x * N) {
        float v[N];
        load_piece(from + c, inside ? cols - c : 0, vec_in, v);
        store_raw(y + row * ldy + c, pack(v), cols - c, vec_out);
    }
}

#endif
