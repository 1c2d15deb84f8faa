// gemm.cuh - tiles of matrix products in exact f32 arithmetic, for gemm.cu and the products of
// experts (grouped.cu).
#ifndef QLORA_GEMM_CUH
#define QLORA_GEMM_CUH

#include "../common.cuh"

enum { C_IS_BF16 = 1, A_TRANSPOSED = 2, B_TRANSPOSED = 4, HALVES_ARE_F16 = 8 };

// Four consecutive elements in memory: one 16-byte (f32) or 8-byte load. In this file, bf16
// represents both 16-bit types until the values are converted to f32.
template <typename T> struct quad { uint32_t w[2]; };

template <> struct quad<float> { uint32_t w[4]; };

__device__ __forceinline__ quad<float> load_quad(const float* p, int valid, bool aligned) {
    quad<float> q;
    if (valid >= 4 && aligned) {
        uint4 v = *(const uint4*)p;
        q.w[0] = v.x;
        q.w[1] = v.y;
        q.w[2] = v.z;
        q.w[3] = v.w;
    } else {
        for (int i = 0; i < 4; i++) {
            q.w[i] = i < valid ? __float_as_uint(p[i]) : 0u;
        }
    }
    return q;
}

__device__ __forceinline__ quad<bf16> load_quad(const bf16* p, int valid, bool aligned) {
    quad<bf16> q;
    if (valid >= 4 && aligned) {
        uint2 v = *(const uint2*)p;
        q.w[0] = v.x;
        q.w[1] = v.y;
    } else {
        uint32_t b[4];
        for (int i = 0; i < 4; i++) {
            b[i] = i < valid ? p[i].bits : 0u;
        }
        q.w[0] = b[0] | b[1] << 16;
        q.w[1] = b[2] | b[3] << 16;
    }
    return q;
}

__device__ __forceinline__ float4 widen(const quad<float>& q, bool) {
    return make_float4(__uint_as_float(q.w[0]), __uint_as_float(q.w[1]), __uint_as_float(q.w[2]),
                       __uint_as_float(q.w[3]));
}

__device__ __forceinline__ float widen_half(uint32_t bits) {
    f16 h;
    h.bits = (uint16_t)bits;
    return to_float(h);
}

__device__ __forceinline__ float4 widen(const quad<bf16>& q, bool is_f16) {
    if (is_f16) {
        return make_float4(widen_half(q.w[0]), widen_half(q.w[0] >> 16), widen_half(q.w[1]),
                           widen_half(q.w[1] >> 16));
    }
    return make_float4(__uint_as_float(q.w[0] << 16), __uint_as_float(q.w[0] & 0xffff0000u),
                       __uint_as_float(q.w[1] << 16), __uint_as_float(q.w[1] & 0xffff0000u));
}

// One thread's share of reading an operand: quads of four elements that are contiguous in memory.
// "outer" counts along M (operand A) or N (operand B). Where K is the contiguous dimension, a quad
// is spread over four lines of the shared tile; where the outer index is, it stays in one piece.
template <typename T> struct reader {
    const T* p;    // this thread's first quad
    int64_t step;  // elements to the same quad of the next slice of K
    int64_t hop;   // elements to the thread's next quad of the same slice
    int32_t outer; // outer index of the first quad, counted from the block's corner
    int32_t k;     // k index of the first quad within a slice
    int32_t left;  // outer elements from the first quad to the end of the matrix
    bool along_k;
    bool aligned;
    bool is_f16;
};

// Quads are distributed over `threads` threads; a slice is `tile` outer elements by `depth` of K.
template <typename T>
__device__ __forceinline__ reader<T>
make_reader(const T* base, int64_t ld, bool along_k, int32_t corner, int32_t size, int32_t tile,
            int32_t depth, int32_t thread, int32_t threads, int32_t flags) {
    reader<T> r;
    int32_t per_line = (along_k ? depth : tile) / 4;
    int32_t line = thread / per_line;
    int32_t place = thread % per_line * 4;
    int32_t lines = threads / per_line; // between consecutive quads of a thread
    r.along_k = along_k;
    r.is_f16 = (flags & HALVES_ARE_F16) != 0;
    r.outer = along_k ? line : place;
    r.k = along_k ? place : line;
    r.left = size - corner - r.outer;
    r.hop = lines * ld;
    r.step = along_k ? (int64_t)depth : depth * ld;
    r.p = base +
          (along_k ? (int64_t)(corner + line) * ld + place : (int64_t)line * ld + corner + place);
    r.aligned = ((uintptr_t)base % (4 * sizeof(T))) == 0 && ld % 4 == 0;
    return r;
}

// Loads quad j of the slice, whose first k has k_left elements of K remaining; zeros outside
// the matrix.
template <typename T>
__device__ __forceinline__ quad<T> read_quad(const reader<T>& r, int32_t j, int32_t lines,
                                             int32_t k_left) {
    int32_t outer_left = r.left - (r.along_k ? j * lines : 0);
    int32_t depth_left = k_left - r.k - (r.along_k ? 0 : j * lines);
    int32_t run = r.along_k ? depth_left : outer_left;
    int32_t across = r.along_k ? outer_left : depth_left;
    return load_quad(r.p + j * r.hop, across > 0 ? run : 0, r.aligned);
}

// Stores a quad in a shared tile whose lines run along the outer index.
template <int LINE, typename T>
__device__ __forceinline__ void put_quad(float* tile, const reader<T>& r, int32_t j, int32_t lines,
                                         const quad<T>& q) {
    float4 v = widen(q, r.is_f16);
    if (r.along_k) {
        float* s = tile + r.k * LINE + r.outer + j * lines;
        s[0] = v.x;
        s[LINE] = v.y;
        s[2 * LINE] = v.z;
        s[3 * LINE] = v.w;
    } else {
        *(float4*)(tile + (r.k + j * lines) * LINE + r.outer) = v;
    }
}

// Writes factor * v to up to four consecutive elements of a row of C.
__device__ __forceinline__ void write_quad(void* C, int64_t at, const float* v, float factor,
                                           int valid, bool aligned, float beta, bool is_bf16) {
    if (valid >= 4 && aligned) {
        float4 y = *(const float4*)v;
        y = make_float4(factor * y.x, factor * y.y, factor * y.z, factor * y.w);
        float4 old = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (beta != 0.0f) {
            if (is_bf16) {
                uint2 w = *(const uint2*)((const bf16*)C + at);
                old = make_float4(__uint_as_float(w.x << 16), __uint_as_float(w.x & 0xffff0000u),
                                  __uint_as_float(w.y << 16), __uint_as_float(w.y & 0xffff0000u));
            } else {
                old = *(const float4*)((const float*)C + at);
            }
            y = make_float4(fmaf(beta, old.x, y.x), fmaf(beta, old.y, y.y), fmaf(beta, old.z, y.z),
                            fmaf(beta, old.w, y.w));
        }
        if (is_bf16) {
            *(uint2*)((bf16*)C + at) = make_uint2(pack_bf16(y.x, y.y), pack_bf16(y.z, y.w));
        } else {
            *(float4*)((float*)C + at) = y;
        }
        return;
    }
#pragma unroll 1
    for (int i = 0; i < 4 && i < valid; i++) {
        float y = factor * v[i];
        if (is_bf16) {
            bf16* c = (bf16*)C + at + i;
            *c = to_bf16(beta != 0.0f ? fmaf(beta, to_float(*c), y) : y);
        } else {
            float* c = (float*)C + at + i;
            *c = beta != 0.0f ? fmaf(beta, *c, y) : y;
        }
    }
}

#define GEMM_PARAMETERS                                                                            \
    const void *A, const void *B, void *C, int32_t M, int32_t N, int32_t K, int64_t lda,           \
        int64_t ldb, int64_t ldc, int64_t strideA, int64_t strideB, int64_t strideC,               \
        const float *alpha_device, float alpha, float beta, int32_t flags
#define GEMM_ARGUMENTS                                                                             \
    A, B, C, M, N, K, lda, ldb, ldc, strideA, strideB, strideC, alpha_device, alpha, beta, flags

// Where a tile goes, and its factors.
struct tile_result {
    void* C;
    int64_t ldc;
    int64_t start;
    float factor;
    float beta;
    bool is_bf16;
};

// 64 rows at a time go through shared memory, so that full contiguous rows are written.
template <int R>
__device__ __forceinline__ void store_tiled(const tile_result& to, float* shared,
                                            const float (&acc)[R][R], int32_t row0, int32_t col0,
                                            int32_t M, int32_t N) {
    const int TILE = 16 * R;
    const int LINE = TILE + 4;
    const int PARTS = R / 4;
    int32_t thread = (int32_t)threadIdx.x;
    int32_t tx = thread / 32 % 2 * 8 + thread % 8;
    int32_t ty = thread / 64 * 4 + thread % 32 / 8;
    void* c = to.is_bf16 ? (void*)((bf16*)to.C + to.start) : (void*)((float*)to.C + to.start);
    bool aligned = (uintptr_t)c % (to.is_bf16 ? 8 : 16) == 0 && to.ldc % 4 == 0;
    for (int part = 0; part < PARTS; part++) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < R; i++) {
            if (i / 4 == part) {
#pragma unroll
                for (int h = 0; h < PARTS; h++) {
                    *(float4*)&shared[(4 * ty + i % 4) * LINE + 64 * h + 4 * tx] = make_float4(
                        acc[i][4 * h], acc[i][4 * h + 1], acc[i][4 * h + 2], acc[i][4 * h + 3]);
                }
            }
        }
        __syncthreads();
#pragma unroll 1
        for (int32_t q = thread; q < 64 * TILE / 4; q += 256) {
            int32_t line = q / (TILE / 4);
            int32_t row = row0 + 64 * part + line;
            int32_t col = col0 + q % (TILE / 4) * 4;
            if (row < M && col < N) {
                const float* v = &shared[line * LINE + col - col0];
                write_quad(c, row * to.ldc + col, v, to.factor, N - col, aligned, to.beta,
                           to.is_bf16);
            }
        }
    }
}

// One block computes a square tile of 16 R by 16 R, and each thread R x R of it as quarters of 4 x
// 4, from slices of 16 along K that are double-buffered in shared memory. row0 and col0: the corner
// of the tile.
template <typename T, int R>
__device__ __forceinline__ void tiled(int32_t row0, int32_t col0, int64_t batch, GEMM_PARAMETERS) {
    // long because the iterations of the pipeline share all of their state
    const int TILE = 16 * R;
    const int DEPTH = 16;
    const int LINE = TILE + 4;
    const int QUADS = R / 4;
    const int PARTS = R / 4;
    const int HALF = DEPTH * LINE;
    __shared__ __align__(16) float shared[4 * HALF];
    int32_t thread = (int32_t)threadIdx.x;
    int32_t lane = thread % 32;
    int32_t warp = thread / 32;
    int32_t tx = warp % 2 * 8 + lane % 8;
    int32_t ty = warp / 2 * 4 + lane / 8;
    bool a_along_k = (flags & A_TRANSPOSED) == 0;
    bool b_along_k = (flags & B_TRANSPOSED) != 0;
    reader<T> ra = make_reader((const T*)A + batch * strideA, lda, a_along_k, row0, M, TILE, DEPTH,
                               thread, 256, flags);
    reader<T> rb = make_reader((const T*)B + batch * strideB, ldb, b_along_k, col0, N, TILE, DEPTH,
                               thread, 256, flags);
    int32_t a_lines = 256 / ((a_along_k ? DEPTH : TILE) / 4);
    int32_t b_lines = 256 / ((b_along_k ? DEPTH : TILE) / 4);
    quad<T> qa[QUADS];
    quad<T> qb[QUADS];
    float acc[R][R];
#pragma unroll
    for (int i = 0; i < R * R; i++) {
        acc[i / R][i % R] = 0.0f;
    }
    // Each iteration requests a slice, multiplies the previous one while the request is in flight,
    // and then stores the new slice. A half of the shared memory is overwritten two iterations
    // after it was filled, after a barrier.
    float* half_a = shared;
    float* half_b = shared + HALF;
    int32_t k_left = K;
    bool first = true;
    for (;;) {
        if (k_left > 0) {
#pragma unroll
            for (int j = 0; j < QUADS; j++) {
                qa[j] = read_quad(ra, j, a_lines, k_left);
                qb[j] = read_quad(rb, j, b_lines, k_left);
            }
            ra.p += ra.step;
            rb.p += rb.step;
        }
        if (!first) {
#pragma unroll 2
            for (int k = 0; k < DEPTH; k++) {
                float a[R];
                float b[R];
#pragma unroll
                for (int h = 0; h < PARTS; h++) {
                    *(float4*)&a[4 * h] = *(const float4*)&half_a[k * LINE + 64 * h + 4 * ty];
                    *(float4*)&b[4 * h] = *(const float4*)&half_b[k * LINE + 64 * h + 4 * tx];
                }
#pragma unroll
                for (int i = 0; i < R * R; i++) {
                    acc[i / R][i % R] = fmaf(a[i / R], b[i % R], acc[i / R][i % R]);
                }
            }
            half_a = shared + (half_a == shared ? 2 * HALF : 0);
            half_b = half_a + HALF;
        }
        if (k_left <= 0) {
            break;
        }
#pragma unroll
        for (int j = 0; j < QUADS; j++) {
            put_quad<LINE>(half_a, ra, j, a_lines, qa[j]);
            put_quad<LINE>(half_b, rb, j, b_lines, qb[j]);
        }
        __syncthreads();
        k_left -= DEPTH;
        first = false;
    }
    const tile_result to = {C,
                            ldc,
                            batch * strideC,
                            alpha_device ? alpha * *alpha_device : alpha,
                            beta,
                            (flags & C_IS_BF16) != 0};
    store_tiled<R>(to, shared, acc, row0, col0, M, N);
}

#endif
