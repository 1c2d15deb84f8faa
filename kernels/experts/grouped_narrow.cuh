// grouped_narrow.cuh - tiles of products whose result has few columns, or few rows, as those of
// adapters have: as narrow() of gemm_tc.cuh, but a thread has sums for no more than these, so that
// more blocks run on a multiprocessor.
#ifndef QLORA_GROUPED_NARROW_CUH
#define QLORA_GROUPED_NARROW_CUH

#include "../gemm/gemm_tc.cuh"
#include "grouped.cuh"

enum { FEW_STAGES = 3, FEW_BYTES = FEW_STAGES * 2 * NARROW_BYTES };

// A warp's part of a slice, 16 of K, for 16 ROWS x 16 COLS of C.
template <int ROWS, int COLS, bool A_ALONG_K, bool B_ALONG_K>
__device__ __forceinline__ void multiply_few(float (&acc)[ROWS][2 * COLS][4], uint32_t base) {
    typedef slice<A_ALONG_K, SIDE, SIDE> slice_a;
    typedef slice<B_ALONG_K, SIDE, SIDE> slice_b;
    uint32_t first_a = slice_a::of_a(0, 16 * warp_index());
    uint32_t first_b = NARROW_BYTES + slice_b::of_b(0, 16 * warp_index());
    uint32_t a[ROWS][4];
    uint32_t b[COLS][4];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        slice_a::load(a[i], base, first_a, i, 0);
    }
#pragma unroll
    for (int j = 0; j < COLS; j++) {
        slice_b::load(b[j], base, first_b, j, 0);
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
#pragma unroll
        for (int j = 0; j < COLS; j++) {
            multiply<bf16>(acc[i][2 * j], a[i], &b[j][0]);
            multiply<bf16>(acc[i][2 * j + 1], a[i], &b[j][2]);
        }
    }
}

// Puts rows 16 i to 16 i + 15 of a warp's sums into its strip.
template <int ROWS, int COLS>
__device__ __forceinline__ void put_few(float* strip, const float (&acc)[ROWS][2 * COLS][4],
                                        int i) {
    int32_t lane = lane_index();
    float* p = strip + (lane >> 2) * STRIP_LINE + (lane & 3) * 2;
#pragma unroll
    for (int ii = 0; ii < ROWS; ii++) {
        if (ii == i) {
#pragma unroll
            for (int j = 0; j < 2 * COLS; j++) {
                *(float2*)(p + 8 * j) = make_float2(acc[ii][j][0], acc[ii][j][1]);
                *(float2*)(p + 8 * j + 8 * STRIP_LINE) = make_float2(acc[ii][j][2], acc[ii][j][3]);
            }
        }
    }
}

// Adds the warps' sums in strips, in warp order, and writes them.
template <int ROWS, int COLS>
__device__ __forceinline__ void write_few(const result& to, float* sums,
                                          const float (&acc)[ROWS][2 * COLS][4],
                                          const corner& block, int32_t M, int32_t N) {
    const int32_t QUADS = 4 * COLS; // of a line
    int32_t quad = (int32_t)threadIdx.x % QUADS * 4;
    int32_t col = block.col + quad;
#pragma unroll 1
    for (int i = 0; i < ROWS; i++) {
        __syncthreads(); // what was in this memory is no longer read
        put_few<ROWS, COLS>(sums + warp_index() * STRIP, acc, i);
        __syncthreads();
#pragma unroll 1
        for (int line = (int)threadIdx.x / QUADS; line < 16; line += 128 / QUADS) {
            int32_t row = block.row + 16 * i + line;
            float* v = sums + line * STRIP_LINE + quad;
            if (row < M && col < N) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    v[e] = v[e] + v[STRIP + e] + v[2 * STRIP + e] + v[3 * STRIP + e];
                }
                write_four(to, row, col, N - col, v);
            }
        }
    }
}

// As request_narrow, for an operand with K along its rows, which are those of a list. at: the first
// one of the slice.
__device__ __forceinline__ void request_listed(narrow_operand& o, const int32_t* list, int32_t at,
                                               uint32_t base) {
    int32_t bytes = 2 * max(min(o.chunk_left, 8), 0);
    int32_t line = at + (int32_t)(threadIdx.x / 8);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (16 * j < o.lines) {
            bool inside = o.lines_left > 16 * j;
            int64_t row = inside ? list[line + 16 * j] : 0;
            copy_async(base + o.to + (uint32_t)(j * 16 * SIDE * 2), o.from + row * o.ld,
                       inside ? bytes : 0);
        }
    }
    o.lines_left -= o.line_step;
}

// One block's work: up to 16 ROWS x 16 COLS of C, at `block`. TA, TB: as for gemm.cu. list: null,
// or the rows of B.
template <int ROWS, int COLS, bool TA, bool TB>
__device__ __forceinline__ void few(const corner& block, const void* A, const void* B, void* C,
                                    int32_t M, int32_t N, int32_t K, int64_t lda, int64_t ldb,
                                    int64_t ldc, float alpha, float beta, int32_t flags,
                                    const int32_t* list = 0) {
    const uint32_t BYTES = 2 * NARROW_BYTES;
    uint8_t* shared = block_memory();
    // Lines beyond the rows and columns of this block are not copied.
    int32_t rows = min(M, block.row + 16 * ROWS);
    int32_t cols = min(N, block.col + 16 * COLS);
    narrow_operand oa = open_narrow(A, 0, lda, !TA, block.row, rows, K);
    narrow_operand ob = open_narrow(B, 0, ldb, TB, block.col, cols, K);
    if (list) {
        ob.from -= threadIdx.x / 8 * ldb; // of the first row
    }
    int32_t at = 0;
    uint32_t ring = shared_address(shared);
    uint32_t last = ring + (FEW_STAGES - 1) * BYTES;
    float acc[ROWS][2 * COLS][4];
#pragma unroll
    for (int i = 0; i < 8 * ROWS * COLS; i++) {
        acc[i / (8 * COLS)][i / 4 % (2 * COLS)][i % 4] = 0.0f;
    }
    uint32_t put = ring;
#pragma unroll 1
    for (; put < last; put += BYTES) {
        request_narrow(oa, put);
        if (!TB && list) {
            request_listed(ob, list, at, put + NARROW_BYTES);
        } else {
            request_narrow(ob, put + NARROW_BYTES);
        }
        at += SIDE;
        copy_commit();
    }
    uint32_t get = ring;
#pragma unroll 1
    for (int32_t s = 0; s < (K + SIDE - 1) / SIDE; s++) {
        copy_wait<FEW_STAGES - 2>();
        __syncthreads(); // slice s is visible to all, slice s - 1 no longer needed
        request_narrow(oa, put);
        if (!TB && list) {
            request_listed(ob, list, at, put + NARROW_BYTES);
        } else {
            request_narrow(ob, put + NARROW_BYTES);
        }
        at += SIDE;
        copy_commit();
        put = put == last ? ring : put + BYTES;
        multiply_few<ROWS, COLS, !TA, TB>(acc, get);
        get = get == last ? ring : get + BYTES;
    }
    copy_wait<0>();
    result to = open_result(C, ldc, 0, 0, alpha, beta, flags);
    write_few<ROWS, COLS>(to, (float*)shared, acc, block, M, N);
}

// The form `rows` with up to 16 COLS columns.
template <int COLS, bool TB> __device__ __forceinline__ void few_rows(const grouped& g) {
    grouped_tile t;
    if (!grouped_tile_at(g, (int32_t)blockIdx.x, SIDE, &t)) {
        return;
    }
    corner block = {t.row, 0};
    const bf16* a = grouped_from<bf16>(g.A, t.first * g.lda);
    const bf16* b = grouped_from<bf16>(g.B, t.expert * g.stride);
    void* c = (g.flags & C_IS_BF16) ? (void*)((bf16*)g.C + t.first * g.ldc)
                                    : (void*)((float*)g.C + t.first * g.ldc);
    few<4, COLS, false, TB>(block, a, b, c, t.rows, g.N, g.K, g.lda, g.ldb, g.ldc, 1.0f, 0.0f,
                            g.flags);
}

#endif
