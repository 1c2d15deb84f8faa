// gemm_tc.cu - matrix products on tensor cores, for 16-bit operands.
// groups: bf16 gemm
//
//   C[M,N] = alpha op(A) op(B) + beta C       row-major, strided-batched
//
// Parameters and semantics are those of gemm.cu (flags bit 1: C is bf16, otherwise f32); the
// kernel's name gives the transposition, first letter A, second letter B. Products are exact; sums
// are f32 in the order of the tensor cores' m16n8k16 steps along K. The caller guarantees that A
// and B are 16-byte aligned and that lda, ldb and their batch strides are multiples of 8. C may
// have any alignment. Nothing outside M, N, K is read or written; with beta == 0, C is never read.
//
// Launch: grid (ceil(M/128), ceil(N/128), batch), 256 threads, no dynamic shared memory.
// One block computes 128 x 128 of C in slices of 32 along K, three of them in flight (48 KB of
// shared memory).
// It has eight warps, two along M by four along N, each computing 64 x 32.
// Determinism: one writer per element of C, fixed order along K.
#include "common.cuh"

enum { C_IS_BF16 = 1, STAGES = 3, DEPTH = 32, TILE = 128, SLICE = TILE * DEPTH * 2 /* bytes */ };

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

// Copies 16 bytes, replacing the last 16 - bytes by zeros.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, int32_t bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void copy_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until all groups except the newest have arrived.
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
}

__device__ __forceinline__ void load_matrix(uint32_t* r, uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
}

__device__ __forceinline__ void load_matrix_transposed(uint32_t* r, uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
}

__device__ __forceinline__ void multiply(float* c, const uint32_t* a, const uint32_t* b, bf16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void multiply(float* c, const uint32_t* a, const uint32_t* b, f16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Byte offset of an element in a shared slice. If K is the contiguous dimension, a slice is 128
// lines of 32, otherwise 32 lines of 128; the 16-byte chunks of a line are permuted so that the
// eight lines that one ldmatrix reads are in different banks.
template <bool ALONG_K> __device__ __forceinline__ int32_t slice_at(int32_t outer, int32_t k) {
    if (ALONG_K) {
        return outer * 64 + (((k >> 3) ^ ((outer >> 1) & 3)) << 4);
    }
    return k * 256 + (((outer >> 3) ^ (k & 7)) << 4);
}

// Requests one slice of an operand: 512 chunks of 16 bytes, two per thread.
template <bool ALONG_K>
__device__ __forceinline__ void request(uint32_t to, const uint16_t* base, int64_t ld,
                                        int32_t corner, int32_t size, int32_t k0, int32_t K) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
        int32_t chunk = (int32_t)threadIdx.x + 256 * j;
        int32_t outer = ALONG_K ? chunk / 4 : chunk % 16 * 8;
        int32_t k = ALONG_K ? chunk % 4 * 8 : chunk / 16;
        int32_t outer_left = size - corner - outer;
        int32_t k_left = K - k0 - k;
        int32_t run = ALONG_K ? k_left : outer_left;
        int32_t across = ALONG_K ? outer_left : k_left;
        int32_t count = across > 0 && run > 0 ? (run < 8 ? run : 8) : 0;
        const uint16_t* from = base;
        if (count > 0) {
            from += ALONG_K ? (int64_t)(corner + outer) * ld + k0 + k
                            : (int64_t)(k0 + k) * ld + corner + outer;
        }
        copy_async(to + (uint32_t)slice_at<ALONG_K>(outer, k), from, 2 * count);
    }
}

__device__ __forceinline__ void write_pair(void* C, int64_t at, float x, float y, int32_t valid,
                                           bool aligned, float beta, bool is_bf16) {
    if (is_bf16) {
        bf16* c = (bf16*)C + at;
        if (beta != 0.0f) {
            x = fmaf(beta, to_float(c[0]), x);
            y = valid > 1 ? fmaf(beta, to_float(c[1]), y) : y;
        }
        if (valid > 1 && aligned) {
            *(uint32_t*)c = pack_bf16(x, y);
        } else {
            c[0] = to_bf16(x);
            if (valid > 1) {
                c[1] = to_bf16(y);
            }
        }
        return;
    }
    float* c = (float*)C + at;
    if (beta != 0.0f) {
        x = fmaf(beta, c[0], x);
        y = valid > 1 ? fmaf(beta, c[1], y) : y;
    }
    if (valid > 1 && aligned) {
        *(float2*)c = make_float2(x, y);
    } else {
        c[0] = x;
        if (valid > 1) {
            c[1] = y;
        }
    }
}

#define GEMM_PARAMETERS                                                                            \
    const void *A, const void *B, void *C, int32_t M, int32_t N, int32_t K, int64_t lda,           \
        int64_t ldb, int64_t ldc, int64_t strideA, int64_t strideB, int64_t strideC,               \
        const float *alpha_device, float alpha, float beta, int32_t flags
#define GEMM_ARGUMENTS                                                                             \
    A, B, C, M, N, K, lda, ldb, ldc, strideA, strideB, strideC, alpha_device, alpha, beta, flags

// One block's work; long because the iterations of the pipeline share all of their state.
template <typename T, bool TA, bool TB> __device__ __forceinline__ void tensor(GEMM_PARAMETERS) {
    const bool A_ALONG_K = !TA;
    const bool B_ALONG_K = TB;
    __shared__ __align__(128) uint8_t shared[STAGES * 2 * SLICE];
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t warp = (int32_t)threadIdx.x / 32;
    int32_t warp_row = warp / 4 * 64;
    int32_t warp_col = warp % 4 * 32;
    int32_t row0 = (int32_t)blockIdx.x * TILE;
    int32_t col0 = (int32_t)blockIdx.y * TILE;
    int64_t batch = blockIdx.z;
    const uint16_t* a_base = (const uint16_t*)A + batch * strideA;
    const uint16_t* b_base = (const uint16_t*)B + batch * strideB;
    uint32_t ring = shared_address(shared);
    // The line of the 8 x 8 piece whose address this lane passes to ldmatrix: pieces are ordered by
    // rows, then k, for A; by k, then columns, for B.
    int32_t a_outer = A_ALONG_K ? lane % 16 : lane / 8 % 2 * 8;
    int32_t a_k = A_ALONG_K ? lane / 16 * 8 : lane / 16 * 8 + lane % 8;
    int32_t b_outer = B_ALONG_K ? lane / 16 * 8 + lane % 8 : lane / 16 * 8;
    int32_t b_k = B_ALONG_K ? lane / 8 % 2 * 8 : lane % 16;
    float acc[4][4][4];
#pragma unroll
    for (int i = 0; i < 64; i++) {
        acc[i / 16][i / 4 % 4][i % 4] = 0.0f;
    }
    int32_t slices = (K + DEPTH - 1) / DEPTH;
    int32_t put = 0;
    // Iteration s requests slice s and multiplies slice s - 2; every iteration commits one group,
    // an empty one at the end, so that "all but one" always means the slice that is needed next.
#pragma unroll 1
    for (int32_t s = 0; s < slices + STAGES - 1; s++) {
        if (s >= STAGES - 1) {
            copy_wait();
            __syncthreads(); // slice s - 2 is visible to all, slice s - 3 no longer needed
        }
        if (s < slices) {
            uint32_t to = ring + (uint32_t)put * 2 * SLICE;
            request<A_ALONG_K>(to, a_base, lda, row0, M, s * DEPTH, K);
            request<B_ALONG_K>(to + SLICE, b_base, ldb, col0, N, s * DEPTH, K);
        }
        copy_commit();
        put = put == STAGES - 1 ? 0 : put + 1;
        if (s < STAGES - 1) {
            continue;
        }
        uint32_t from =
            ring + (uint32_t)put * 2 * SLICE; // two slices behind, one ahead in the ring
#pragma unroll
        for (int k = 0; k < DEPTH; k += 16) {
            uint32_t a[4][4];
            uint32_t b[2][4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t at =
                    from + (uint32_t)slice_at<A_ALONG_K>(warp_row + 16 * i + a_outer, k + a_k);
                if (A_ALONG_K) {
                    load_matrix(a[i], at);
                } else {
                    load_matrix_transposed(a[i], at);
                }
            }
#pragma unroll
            for (int j = 0; j < 2; j++) {
                uint32_t at = from + SLICE +
                              (uint32_t)slice_at<B_ALONG_K>(warp_col + 16 * j + b_outer, k + b_k);
                if (B_ALONG_K) {
                    load_matrix(b[j], at);
                } else {
                    load_matrix_transposed(b[j], at);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    multiply(acc[i][j], a[i], &b[j / 2][j % 2 * 2], T());
                }
            }
        }
    }
    float factor = alpha_device ? alpha * *alpha_device : alpha;
    bool is_bf16 = (flags & C_IS_BF16) != 0;
    void* c = is_bf16 ? (void*)((bf16*)C + batch * strideC) : (void*)((float*)C + batch * strideC);
    bool aligned = (uintptr_t)c % (is_bf16 ? 4 : 8) == 0 && ldc % 2 == 0;
    // A warp's 16 x 32 strips pass through its own 2 KB of the ring, so that the code that writes
    // them exists only once; by now, every warp has multiplied all slices.
    __syncthreads();
    float* strip = (float*)shared + warp * 16 * 33;
#pragma unroll 1
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int ii = 0; ii < 4; ii++) {
            if (ii == i) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float* p = strip + lane / 4 * 33 + 8 * j + lane % 4 * 2;
                    p[0] = acc[ii][j][0];
                    p[1] = acc[ii][j][1];
                    p[8 * 33] = acc[ii][j][2];
                    p[8 * 33 + 1] = acc[ii][j][3];
                }
            }
        }
        __syncwarp();
#pragma unroll 1
        for (int line = lane / 16; line < 16; line += 2) {
            int32_t row = row0 + warp_row + 16 * i + line;
            int32_t col = col0 + warp_col + lane % 16 * 2;
            if (row < M && col < N) {
                const float* p = strip + line * 33 + lane % 16 * 2;
                write_pair(c, row * ldc + col, factor * p[0], factor * p[1], N - col, aligned, beta,
                           is_bf16);
            }
        }
        __syncwarp();
    }
}

#define GEMM_TENSOR(type, name, ta, tb)                                                            \
    QLORA_KERNEL __launch_bounds__(256) qlora_gemm_tc_##type##_##name(GEMM_PARAMETERS) {           \
        tensor<type, ta, tb>(GEMM_ARGUMENTS);                                                      \
    }
GEMM_TENSOR(bf16, nn, false, false)
GEMM_TENSOR(bf16, nt, false, true)
GEMM_TENSOR(bf16, tn, true, false)
GEMM_TENSOR(f16, nn, false, false)
GEMM_TENSOR(f16, nt, false, true)
GEMM_TENSOR(f16, tn, true, false)
