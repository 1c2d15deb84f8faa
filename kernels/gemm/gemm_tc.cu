// gemm_tc.cu - matrix products on tensor cores, for 16-bit operands.
// targets: 80
// groups: bf16 gemm
//
//   C[M,N] = alpha op(A) op(B) + beta C       row-major, strided-batched
//
// Parameters and semantics are those of gemm.cu (flags bit 1: C is bf16, otherwise f32; bit 8: A
// and B are f16, otherwise bf16); the kernel's name gives the transposition, first letter A, second
// letter B. The narrow kernel takes bf16 only, and all forms, as the flags say (2: A is transposed,
// 4: B is). Products are exact; sums are f32. The caller guarantees that A and B are 16-byte
// aligned and that lda, ldb and their batch strides are multiples of 8. C may have any alignment.
// Nothing outside M, N, K is read or written; with beta == 0, C is never read.
//
// Launch: grid (ceil(M/side), ceil(N/side), batch), 128 threads; dynamic shared memory for the
// slices of operands in flight:
//
//   kernel        block       slice along K   in flight   shared memory
//   nn, nt, tn    128 x 128              32           4          65,536
//   narrow         64 x 64               64           6          98,304
//
// Both fit the 99 KB per block of compute capability 8.6 and 8.9. In the first, each of the four
// warps computes 64 x 64, with sums in the order of the tensor cores' m16n8k16 steps along K. In a
// narrow block, each takes every fourth step of K for all of C, and their sums are added in warp
// order; so it keeps its multiprocessor busy, although there are few of them.
//
// Determinism: one writer per element of C, fixed order along K.
#include "gemm_tc.cuh"

enum { BAND = 16 /* blocks */ };

// The first row and column of this block: blocks are numbered down the columns of bands of BAND
// rows of blocks, one band after another.
__device__ __forceinline__ corner block_corner() {
    int32_t index = (int32_t)(blockIdx.y * gridDim.x + blockIdx.x);
    int32_t band = index / (BAND * (int32_t)gridDim.y);
    int32_t height = min(BAND, (int32_t)gridDim.x - band * BAND);
    int32_t inside = index - band * BAND * (int32_t)gridDim.y;
    corner c = {(band * BAND + inside % height) * TILE, inside / height * TILE};
    return c;
}

QLORA_KERNEL __launch_bounds__(128, 2) qlora_gemm_tc_narrow(GEMM_PARAMETERS) {
    corner block = {(int32_t)blockIdx.x * SIDE, (int32_t)blockIdx.y * SIDE};
    narrow(block, (int64_t)blockIdx.z, GEMM_ARGUMENTS);
}

#define GEMM_TENSOR(name, ta, tb)                                                                  \
    QLORA_KERNEL __launch_bounds__(128, 2) qlora_gemm_tc_##name(GEMM_PARAMETERS) {                 \
        tensor<ta, tb>(block_corner(), (int64_t)blockIdx.z, GEMM_ARGUMENTS);                       \
    }
GEMM_TENSOR(nn, false, false)
GEMM_TENSOR(nt, false, true)
GEMM_TENSOR(tn, true, false)
