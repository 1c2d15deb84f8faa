// grouped.cuh - matrix products of all experts in one launch: what their kernels share.
//
// The rows of expert e are starts[e] to starts[e + 1], one expert after the other (routing.cu).
//
//   rows   C = A op(B_e), for the rows of every expert; A and C have sorted rows
//   sums   C_e += alpha A^T B, summed over the rows of expert e; A and B have sorted rows
//
// op(B) is [K,N]; B_e, or C_e, is `stride` elements after the one of the expert before. The C_e of
// an expert without rows is not touched.
#ifndef QLORA_GROUPED_CUH
#define QLORA_GROUPED_CUH

#include <stdint.h>

enum { TILE_ROWS = 128 };

// Same layout as qlora__grouped_args.
struct grouped {
    const void* A;
    const void* B;
    void* C;
    const int32_t* starts;
    const int32_t* tiles;
    const int32_t* list; // null, or of the wide sums: the rows of B
    int64_t lda;
    int64_t ldb;
    int64_t ldc;
    int64_t stride;
    int32_t M; // of sums
    int32_t N;
    int32_t K;     // of rows
    int32_t flags; // as for gemm.cu
    float alpha;
    float beta;
};

// The rows of an expert that a tile begins with.
struct grouped_tile {
    int32_t expert;
    int32_t first; // sorted row of the expert
    int32_t rows;  // that it has
    int32_t row;   // of the tile, from there
};

// Tile number `index` of those with `side` rows; returns whether it has rows.
__device__ __forceinline__ bool grouped_tile_at(const grouped& g, int32_t index, int32_t side,
                                                grouped_tile* t) {
    int32_t parts = TILE_ROWS / side;
    int32_t i = index / parts;
    if (i >= g.tiles[0]) {
        return false;
    }
    t->expert = g.tiles[2 * i + 1];
    t->first = g.starts[t->expert];
    t->rows = g.starts[t->expert + 1] - t->first;
    t->row = g.tiles[2 * i + 2] - t->first + index % parts * side;
    return t->row < t->rows;
}

template <class T> __device__ __forceinline__ const T* grouped_from(const void* p, int64_t at) {
    return (const T*)p + at;
}

#endif
