// tiles.cuh - tiles that come to shared memory in asynchronous copies and go from there to the
// tensor cores; used by gated.cu, skinny.cu and tails.cuh.
#ifndef QLORA_TILES_CUH
#define QLORA_TILES_CUH

#include "common.cuh"

// Copies 16 bytes, or sets them to zero if bytes is 0; nothing is read then.
__device__ __forceinline__ void copy16_or_zero(uint32_t to, const void* from, int32_t bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void copy_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most LATER of the last groups of copies are still under way.
template <int LATER> __device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}

// Two pieces of 8 x 8.
__device__ __forceinline__ void load_pieces(uint32_t (&r)[2], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(from)
                 : "memory");
}

// Four pieces of 8 x 8, transposed.
__device__ __forceinline__ void load_transposed(uint32_t (&r)[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
}

// c += a b, for 16 rows, 8 columns and 16 elements of K.
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif
