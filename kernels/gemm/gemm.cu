// gemm.cu - matrix products in exact f32 arithmetic, for any size and alignment.
// targets: 75
// groups: gemm
//
//   C[M,N] = alpha op(A) op(B) + beta C       row-major, strided-batched
//
// op(A) is [M,K]: A is stored as [M,K] with leading dimension lda, or as [K,M] if transposed.
// op(B) is [K,N]: B is stored as [K,N] with leading dimension ldb, or as [N,K] if transposed.
// A and B have the same type (f32, bf16 or f16); C is f32 or bf16. Products and sums are f32 FMAs.
// Nothing outside M, N, K is read or written; with beta == 0, C is never read.
//
// Parameters, common to all kernels here and in gemm_tc.cu:
//   A, B, C, M, N, K, lda, ldb, ldc, batch strides of A, B, C (elements),
//   alpha_device (a factor in device memory, or null), alpha, beta,
//   flags: 1 = C is bf16, 2 = A is transposed, 4 = B is transposed, 8 = 16-bit operands are f16
//
// Determinism: each element of C has one writer and a fixed order along K that depends only on K.
#include "gemm.cuh"

#define TILE_OF_BLOCK(side)                                                                        \
    (int32_t)(blockIdx.x * (side)), (int32_t)(blockIdx.y * (side)), (int64_t)blockIdx.z

// Tiles of 128 x 128. Launch: grid (ceil(M/128), ceil(N/128), batch), 256 threads, no dynamic
// shared memory. (The 16-bit kernel would spill if two blocks had to fit on an SM.)
QLORA_KERNEL __launch_bounds__(256, 2) qlora_gemm_big_f32(GEMM_PARAMETERS) {
    tiled<float, 8>(TILE_OF_BLOCK(128), GEMM_ARGUMENTS);
}

QLORA_KERNEL __launch_bounds__(256) qlora_gemm_big_half(GEMM_PARAMETERS) {
    tiled<bf16, 8>(TILE_OF_BLOCK(128), GEMM_ARGUMENTS);
}

// Tiles of 64 x 64, for small K or when there are too few big tiles to fill the device.
// Launch: grid (ceil(M/64), ceil(N/64), batch), 256 threads, no dynamic shared memory.
#define GEMM_MID(name, type)                                                                       \
    QLORA_KERNEL __launch_bounds__(256, 3) qlora_gemm_mid_##name(GEMM_PARAMETERS) {                \
        tiled<type, 4>(TILE_OF_BLOCK(64), GEMM_ARGUMENTS);                                         \
    }
GEMM_MID(f32, float)
GEMM_MID(half, bf16)

// Position of element (k, outer) in a warp's 32 x 16 tile: lines of 16, with groups of four swapped
// by k / 4 and the second half of k shifted by 16, so that neither a quad along k nor one along the
// outer index causes bank conflicts.
__device__ __forceinline__ int32_t skinny_at(int32_t k, int32_t outer) {
    return k * 16 + (k >= 16 ? 16 : 0) + (((outer >> 2) ^ ((k >> 2) & 3)) << 2) + (outer & 3);
}

template <typename T>
__device__ __forceinline__ void skinny_put(float* tile, const reader<T>& r, int32_t j,
                                           int32_t lines, const quad<T>& q) {
    float4 v = widen(q, r.is_f16);
    if (r.along_k) {
        float* s = tile + skinny_at(r.k, r.outer + j * lines);
        s[0] = v.x; // the four k of a quad differ only in the line
        s[16] = v.y;
        s[32] = v.z;
        s[48] = v.w;
    } else {
        *(float4*)(tile + skinny_at(r.k + j * lines, r.outer)) = v;
    }
}

// One block computes 16 x 16 of C. Its eight warps take turns at slices of 32 of K, each with its
// own part of shared memory; their sums are added in warp order.
// The function is long because the iterations share all of their state.
template <typename T> __device__ __forceinline__ void skinny(GEMM_PARAMETERS) {
    const int DEPTH = 32;
    const int WARPS = 8;
    const int PIECE = 16 * DEPTH + 16;
    __shared__ __align__(16) float shared[WARPS][2 * PIECE];
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t warp = (int32_t)threadIdx.x / 32;
    int32_t row0 = (int32_t)blockIdx.x * 16;
    int32_t col0 = (int32_t)blockIdx.y * 16;
    int64_t batch = blockIdx.z;
    bool a_along_k = (flags & A_TRANSPOSED) == 0;
    bool b_along_k = (flags & B_TRANSPOSED) != 0;
    reader<T> ra = make_reader((const T*)A + batch * strideA, lda, a_along_k, row0, M, 16, DEPTH,
                               lane, 32, flags);
    reader<T> rb = make_reader((const T*)B + batch * strideB, ldb, b_along_k, col0, N, 16, DEPTH,
                               lane, 32, flags);
    int32_t a_lines = a_along_k ? 4 : 8;
    int32_t b_lines = b_along_k ? 4 : 8;
    ra.p += warp * ra.step;
    rb.p += warp * rb.step;
    ra.step *= WARPS;
    rb.step *= WARPS;
    float* sa = shared[warp];
    float* sb = sa + PIECE;
    int32_t ly = lane / 8; // 4 rows
    int32_t lx = lane % 8; // 2 columns
    float acc[4][2];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        acc[i / 2][i % 2] = 0.0f;
    }
    quad<T> qa[4];
    quad<T> qb[4];
    int32_t k_left = K - warp * DEPTH;
    bool first = true;
    for (;;) {
        if (k_left > 0) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                qa[j] = read_quad(ra, j, a_lines, k_left);
                qb[j] = read_quad(rb, j, b_lines, k_left);
            }
            ra.p += ra.step;
            rb.p += rb.step;
        }
        if (!first) {
#pragma unroll 1
            for (int g = 0; g < DEPTH / 4; g++) {
                const float* pa = sa + skinny_at(4 * g, 4 * ly);
                const float* pb = sb + skinny_at(4 * g, 2 * lx);
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    float4 a = *(const float4*)(pa + 16 * k);
                    float2 b = *(const float2*)(pb + 16 * k);
                    acc[0][0] = fmaf(a.x, b.x, acc[0][0]);
                    acc[0][1] = fmaf(a.x, b.y, acc[0][1]);
                    acc[1][0] = fmaf(a.y, b.x, acc[1][0]);
                    acc[1][1] = fmaf(a.y, b.y, acc[1][1]);
                    acc[2][0] = fmaf(a.z, b.x, acc[2][0]);
                    acc[2][1] = fmaf(a.z, b.y, acc[2][1]);
                    acc[3][0] = fmaf(a.w, b.x, acc[3][0]);
                    acc[3][1] = fmaf(a.w, b.y, acc[3][1]);
                }
            }
            __syncwarp();
        }
        if (k_left <= 0) {
            break;
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            skinny_put(sa, ra, j, a_lines, qa[j]);
            skinny_put(sb, rb, j, b_lines, qb[j]);
        }
        __syncwarp();
        k_left -= WARPS * DEPTH;
        first = false;
    }
    // The warp no longer needs its part of shared memory, so its 16 x 16 sums are stored there.
#pragma unroll
    for (int i = 0; i < 4; i++) {
        *(float2*)(sa + (4 * ly + i) * 16 + 2 * lx) = make_float2(acc[i][0], acc[i][1]);
    }
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        sum += shared[w][threadIdx.x];
    }
    int32_t row = row0 + (int32_t)threadIdx.x / 16;
    int32_t col = col0 + (int32_t)threadIdx.x % 16;
    if (row >= M || col >= N) {
        return;
    }
    float factor = alpha_device ? alpha * *alpha_device : alpha;
    float y = factor * sum;
    int64_t at = batch * strideC + row * ldc + col;
    if ((flags & C_IS_BF16) != 0) {
        bf16* c = (bf16*)C + at;
        *c = to_bf16(beta != 0.0f ? fmaf(beta, to_float(*c), y) : y);
    } else {
        float* c = (float*)C + at;
        *c = beta != 0.0f ? fmaf(beta, *c, y) : y;
    }
}

// For few rows or few columns and a long K: the products with LoRA's A and B.
// Launch: grid (ceil(M/16), ceil(N/16), batch), 256 threads, no dynamic shared memory.
#define GEMM_SKINNY(name, type)                                                                    \
    QLORA_KERNEL __launch_bounds__(256, 2) qlora_gemm_skinny_##name(GEMM_PARAMETERS) {             \
        skinny<type>(GEMM_ARGUMENTS);                                                              \
    }
GEMM_SKINNY(f32, float)
GEMM_SKINNY(half, bf16)
