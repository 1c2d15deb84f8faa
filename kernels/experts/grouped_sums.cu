// grouped_sums.cu - the form `sums` of grouped.cuh in f32 arithmetic, for any size.
// targets: 75
// groups: experts train
//
// Launch: 256 threads, grid (ceil(M / 64), ceil(N / 64), experts).
// Determinism: as gemm.cu.
#include "../gemm/gemm.cuh"
#include "grouped.cuh"

template <class T> __device__ __forceinline__ void grouped_sums(const grouped& g) {
    int32_t expert = (int32_t)blockIdx.z;
    int32_t first = g.starts[expert];
    int32_t rows = g.starts[expert + 1] - first;
    if (rows == 0) { // C_e + 0
        return;
    }
    tiled<T, 4>((int32_t)blockIdx.x * 64, (int32_t)blockIdx.y * 64, 0,
                grouped_from<T>(g.A, first * g.lda), grouped_from<T>(g.B, first * g.ldb),
                (float*)g.C + expert * g.stride, g.M, g.N, rows, g.lda, g.ldb, g.ldc, 0, 0, 0, 0,
                g.alpha, g.beta, g.flags);
}

#define GROUPED(name, T)                                                                           \
    QLORA_KERNEL __launch_bounds__(256, 3)                                                         \
        qlora_grouped_sums_##name(const __grid_constant__ grouped g) {                             \
        grouped_sums<T>(g);                                                                        \
    }
GROUPED(f32, float)
GROUPED(half, bf16)
