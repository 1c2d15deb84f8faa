// tails.cuh - a gated activation whose rows are multiplied with adapters; used by tails.cu and
// fp8_tails.cu.
//
// A block of 512 threads has 16 rows, one for each warp, and takes 512 columns at a time: in
// shorter pieces of rows, the memory is slower. What a warp makes of its row goes to a tile in
// shared memory, of which each warp multiplies 32 columns of all rows. A thread has 8 neighbouring
// columns of two rows there, 8 below each other: the first operand of two m16n8k16 products if the
// columns are counted in the order in which the threads have them. The second operand has them in
// that order too.
#ifndef QLORA_TAILS_CUH
#define QLORA_TAILS_CUH

#include "../layer/elementwise.cuh"
#include "../tiles.cuh"

enum {
    ROWS = 16,        // and warps
    STEP = 512,       // columns
    SIDE = 2,         // groups of 8 ranks of an adapter
    PITCH = STEP * 2, // bytes of a row of a tile
    TILE = ROWS * PITCH,
    LINE = SIDE * 16 + 16, // of a row of B in shared memory: an odd number of 16
    SUMS = ROWS * SIDE * 8 * 4
};

// Two pieces of 8 columns: of a thread's row, 256 columns apart, or of two rows of a tile.
struct pair {
    uint4 upper;
    uint4 lower;
};

// p: the place of a thread's first column; left: columns from there to the end of the row.
__device__ __forceinline__ pair load_pair(const bf16* p, int32_t left) {
    const uint4 zero = make_uint4(0, 0, 0, 0);
    pair x;
    x.upper = left > 0 ? *(const uint4*)p : zero;
    x.lower = left > STEP / 2 ? *(const uint4*)(p + STEP / 2) : zero;
    return x;
}

__device__ __forceinline__ void store_pair(bf16* p, int32_t left, const pair& x) {
    if (left > 0) {
        *(uint4*)p = x.upper;
    }
    if (left > STEP / 2) {
        *(uint4*)(p + STEP / 2) = x.lower;
    }
}

// Byte offset of 8 columns in a tile: the two rows that a quarter of a warp reads are in different
// banks.
__device__ __forceinline__ int32_t tile_at(int32_t row, int32_t chunk) {
    return row * PITCH + ((chunk ^ (row & 1) << 2) << 4);
}

// A thread's columns to the row of its warp in a tile.
__device__ __forceinline__ void to_tile(uint8_t* tile, const pair& x) {
    uint8_t* to = tile + tile_at((int32_t)threadIdx.x / 32, (int32_t)threadIdx.x % 32);
    *(uint4*)to = x.upper;
    *(uint4*)(to + STEP) = x.lower;
}

// The same columns again.
__device__ __forceinline__ pair own_of_tile(const uint8_t* tile) {
    const uint8_t* from = tile + tile_at((int32_t)threadIdx.x / 32, (int32_t)threadIdx.x % 32);
    pair x;
    x.upper = *(const uint4*)from;
    x.lower = *(const uint4*)(from + STEP);
    return x;
}

// What a thread multiplies: rows lane / 4 and 8 below, of the columns of its warp.
__device__ __forceinline__ pair of_tile(const uint8_t* tile) {
    int32_t lane = (int32_t)threadIdx.x % 32;
    const uint8_t* from = tile + tile_at(lane / 4, (int32_t)threadIdx.x / 32 * 4 + lane % 4);
    pair x;
    x.upper = *(const uint4*)from;
    x.lower = *(const uint4*)(from + 8 * PITCH);
    return x;
}

// sums += x f, where f has 8 columns of x's piece of one of 8 ranks.
__device__ __forceinline__ void add_product(float (&sums)[4], const pair& x, uint4 f) {
    const uint32_t first[4] = {x.upper.x, x.lower.x, x.upper.y, x.lower.y};
    const uint32_t second[4] = {x.upper.z, x.lower.z, x.upper.w, x.lower.w};
    multiply(sums, first, f.x, f.y);
    multiply(sums, second, f.z, f.w);
}

// Leaves the sums of a warp in shared memory [warps, ROWS, width], from column `first` on.
template <int COUNT>
__device__ __forceinline__ void leave_sums(float* shared, const float (&sums)[COUNT][4],
                                           int32_t count, int32_t width, int32_t first) {
    int32_t lane = (int32_t)threadIdx.x % 32;
    float* to = shared + ((int32_t)threadIdx.x / 32 * ROWS + lane / 4) * width + first;
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        if (n < count) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                to[e / 2 * 8 * width + n * 8 + lane % 4 * 2 + e % 2] = sums[n][e];
            }
        }
    }
}

// The sum over the warps of a number that each of them left.
__device__ __forceinline__ float sum_of(const float* shared, int32_t width, int32_t row,
                                        int32_t col) {
    float v = 0.0f;
#pragma unroll
    for (int w = 0; w < ROWS; w++) {
        v += shared[(w * ROWS + row) * width + col];
    }
    return v;
}

// The sigmoid of bf16 with fewer instructions and the same bits: its divisor is at least 1.
struct fast_number {};

__device__ __forceinline__ float sigmoid(float x, const fast_number*) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + exp_of(-x, (const bf16*)0)));
    return y;
}

// The activation of 8 columns.
template <class OP> __device__ __forceinline__ uint4 gated_forward(uint4 raw_g, uint4 raw_u) {
    float gate[8];
    float up[8];
    unpack(raw_g, gate);
    unpack(raw_u, up);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        gate[i] = OP()(gate[i], up[i]);
    }
    return pack(gate);
}

// The activation of a thread's columns; gelu: GELU in its tanh form, otherwise SiLU.
__device__ __forceinline__ pair activation_of(const pair& g, const pair& u, bool gelu) {
    pair x;
    if (gelu) {
        x.upper = gated_forward<geglu_op<fast_number>>(g.upper, u.upper);
        x.lower = gated_forward<geglu_op<fast_number>>(g.lower, u.lower);
    } else {
        x.upper = gated_forward<swiglu_op<fast_number>>(g.upper, u.upper);
        x.lower = gated_forward<swiglu_op<fast_number>>(g.lower, u.lower);
    }
    return x;
}

// Writes the sums of what the warps have left to matrix `to` [rows, width], of which the block has
// the rows from `row` on. With `joined`, the columns from `width` on are added to the first ones.
__device__ __forceinline__ void store_sums(const float* shared, int32_t all, int32_t width,
                                           int32_t joined, bf16* to, int64_t ldt, int64_t row,
                                           int64_t rows) {
    __syncthreads();
#pragma unroll 1
    for (int32_t i = (int32_t)threadIdx.x; i < ROWS * width; i += 512) {
        float v = sum_of(shared, all, i / width, i % width);
        v += joined != 0 ? sum_of(shared, all, i / width, width + i % width) : 0.0f;
        if (row + i / width < rows) {
            store(to + (row + i / width) * ldt + i % width, v);
        }
    }
}

#endif
