// grouped.cu - products of all experts (grouped.cuh) in exact f32 arithmetic, for any size and
// alignment: f32 operands, or bf16 ones for devices and sizes that grouped_tc.cu does not take.
// targets: 75
// groups: experts
//
// The form `rows`; launch: 256 threads, grid (2 x tiles that there can be, ceil(N / 64)).
// Determinism: as gemm.cu.
#include "../gemm/gemm.cuh"
#include "grouped.cuh"

template <class T> __device__ __forceinline__ void grouped_rows(const grouped& g) {
    grouped_tile t;
    if (!grouped_tile_at(g, (int32_t)blockIdx.x, 64, &t)) {
        return;
    }
    void* c = (g.flags & C_IS_BF16) ? (void*)((bf16*)g.C + t.first * g.ldc)
                                    : (void*)((float*)g.C + t.first * g.ldc);
    tiled<T, 4>(t.row, (int32_t)blockIdx.y * 64, 0, grouped_from<T>(g.A, t.first * g.lda),
                grouped_from<T>(g.B, t.expert * g.stride), c, t.rows, g.N, g.K, g.lda, g.ldb, g.ldc,
                0, 0, 0, 0, 1.0f, 0.0f, g.flags);
}

#define GROUPED(name, T)                                                                           \
    QLORA_KERNEL __launch_bounds__(256, 3)                                                         \
        qlora_grouped_rows_##name(const __grid_constant__ grouped g) {                             \
        grouped_rows<T>(g);                                                                        \
    }
GROUPED(f32, float)
GROUPED(half, bf16)
