// attn_mma.cuh - the parts of attention on tensor cores: instructions, tiles in shared memory,
// products of tiles, and the stores of results. attn_tc.cuh puts them together.
#ifndef QLORA_ATTN_MMA_CUH
#define QLORA_ATTN_MMA_CUH

#include "../common.cuh"

// --- instructions ---

// Stops the compiler from keeping everything it could derive from x in registers across a loop.
__device__ __forceinline__ void forget(uint32_t& x) {
    asm volatile("" : "+r"(x));
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

// Reads threadIdx.x again, for rare branches, so that nothing derived from it stays in registers.
__device__ __forceinline__ int32_t thread_again() {
    int32_t x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

__device__ __forceinline__ void copy16(uint32_t to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}

// With bytes = 0, fills the 16 bytes with zeros and reads nothing.
__device__ __forceinline__ void copy16_or_zero(uint32_t to, const void* from, int32_t bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}

__device__ __forceinline__ void copy8(uint32_t to, const void* from, int32_t bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes));
}

__device__ __forceinline__ void copy_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most LATER of the last groups of copies are still under way.
template <int LATER = 0> __device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}

__device__ __forceinline__ void load_fragment(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void load_fragment_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// c[16 x 8] += a[16 x 16] b[16 x 8]
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// tanh(x) from 2 log2(e) x.
__device__ __forceinline__ float tanh_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(exp2_fast(x) + 1.0f));
    return fmaf(y, -2.0f, 1.0f);
}

// --- tiles in shared memory: [rows][HD] bf16 ---

// Eight rows of a column of 16-byte chunks must be in different banks. If a row is a multiple of
// 128 bytes, chunk c of row r is at c ^ (r & 7); otherwise 16 bytes follow each row, which makes
// its length an odd number of chunks. A tile is loaded and stored by groups of LANES threads per
// row; each takes every LANES-th chunk.
template <int HD> struct tile {
    static constexpr int CHUNKS = HD / 8;
    static constexpr bool SWIZZLED = HD % 64 == 0;
    static constexpr int PITCH = HD * 2 + (SWIZZLED ? 0 : 16); // bytes per row
    static constexpr int LANES = CHUNKS % 16 == 0  ? 16
                                 : CHUNKS % 8 == 0 ? 8
                                 : CHUNKS % 4 == 0 ? 4
                                                   : 2;
};

template <int HD>
__device__ __forceinline__ uint32_t tile_at(int32_t row, int32_t chunk, int32_t bytes = 0) {
    int32_t turn = tile<HD>::SWIZZLED ? row & 7 : 0;
    return (uint32_t)(row * tile<HD>::PITCH + ((chunk ^ turn) << 4) + bytes);
}

// Start of this thread's part of a tile: a chunk of one row, then of every STEP-th row. hd, the
// head size of the matrix, may be smaller than that of the tile.
template <int HD>
__device__ __forceinline__ const bf16* tile_source(const bf16* x, int64_t ld, int32_t hd,
                                                   int32_t head, int32_t first) {
    constexpr int LANES = tile<HD>::LANES;
    int32_t thread = (int32_t)threadIdx.x;
    return x + head * hd + (int64_t)(first + thread / LANES) * ld + thread % LANES * 8;
}

// Loads ROWS rows, of which the first rows_left exist, and hd columns; the others become zeros.
// `from` is the result of tile_source; `any` is a valid address for everything that does not exist
// (it is not read).
template <int HD, int ROWS, int THREADS>
__device__ __forceinline__ void tile_load(uint32_t to, const bf16* from, int64_t ld, int32_t hd,
                                          int32_t rows_left, const bf16* any) {
    constexpr int LANES = tile<HD>::LANES;
    constexpr int CHUNKS = tile<HD>::CHUNKS;
    constexpr int STEP = THREADS / LANES;
    static_assert(THREADS % LANES == 0 && STEP % 8 == 0 && ROWS % STEP == 0, "tile shape");
    to += tile_at<HD>((int32_t)threadIdx.x / LANES, (int32_t)threadIdx.x % LANES);
    int64_t step = STEP * ld;
    if (ROWS <= rows_left && hd == HD) {
#pragma unroll
        for (int i = 0; i < ROWS; i += STEP) {
#pragma unroll
            for (int c = 0; c < CHUNKS; c += LANES) {
                copy16(to + (uint32_t)(i * tile<HD>::PITCH + c * 16), from + c * 8);
            }
            from += step;
        }
    } else {
#pragma unroll 1
        for (int i = 0; i < ROWS; i += STEP) {
            int32_t thread = thread_again();
            bool row = thread / LANES + i < rows_left;
#pragma unroll 1
            for (int c = 0; c < CHUNKS; c += LANES) {
                bool inside = row && (hd == HD || (thread % LANES + c) * 8 < hd);
                copy16_or_zero(to + (uint32_t)(i * tile<HD>::PITCH + c * 16),
                               inside ? from + c * 8 : any, inside ? 16 : 0);
            }
            from += step;
        }
    }
}

// Lane addresses for ldmatrix; tile_step advances one by k steps of 16 elements along its row. The
// swizzle affects only bits 4 to 6.
template <int HD> __device__ __forceinline__ uint32_t tile_step(uint32_t lane_address, int k) {
    return tile<HD>::SWIZZLED
               ? (lane_address ^ (uint32_t)((k & 3) * 32)) + (uint32_t)((k >> 2) * 128)
               : lane_address + (uint32_t)(k * 32);
}

// A operand [16 rows][16 k], or the transposed B operand [16 k][16 n] of a [k][n] tile. `row` is a
// multiple of 8.
template <int HD> __device__ __forceinline__ uint32_t lane_rows16(uint32_t base, int32_t row) {
    int32_t lane = (int32_t)threadIdx.x & 31;
    int32_t turn = tile<HD>::SWIZZLED ? lane & 7 : 0;
    return base + (uint32_t)((row + (lane & 15)) * tile<HD>::PITCH + (((lane >> 4) ^ turn) << 4));
}

// B operand [16 n][16 k] of an [n][k] tile.
template <int HD> __device__ __forceinline__ uint32_t lane_cols16(uint32_t base, int32_t row) {
    int32_t lane = (int32_t)threadIdx.x & 31;
    int32_t r = (lane & 7) + ((lane >> 4) << 3);
    int32_t turn = tile<HD>::SWIZZLED ? lane & 7 : 0;
    return base + (uint32_t)((row + r) * tile<HD>::PITCH + ((((lane >> 3) & 1) ^ turn) << 4));
}

template <int MT, int N> __device__ __forceinline__ void clear(float (&acc)[MT][N][4]) {
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            acc[m][i][0] = acc[m][i][1] = acc[m][i][2] = acc[m][i][3] = 0.0f;
        }
    }
}

// s[MT * 16 x NT * 8] = a[rows][HD] b[cols][HD]^T; a and b are lane addresses.
template <int HD, int MT, int NT>
__device__ __forceinline__ void product_rows(float (&s)[MT][NT][4], uint32_t a, uint32_t b) {
    clear(s);
#pragma unroll
    for (int k = 0; k < HD / 16; k++) {
        uint32_t fa[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++) {
            load_fragment(fa[m], tile_step<HD>(a, k) + (uint32_t)(m * 16 * tile<HD>::PITCH));
        }
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            uint32_t fb[4];
            load_fragment(fb, tile_step<HD>(b, k) + (uint32_t)(n * 8 * tile<HD>::PITCH));
#pragma unroll
            for (int m = 0; m < MT; m++) {
                mma(s[m][n], fa[m], fb[0], fb[1]);
                mma(s[m][n + 1], fa[m], fb[2], fb[3]);
            }
        }
    }
}

// acc[MT * 16 x HD] += p[MT * 16 x KT * 16] b[KT * 16][HD]; p in registers, b a lane address.
template <int HD, int MT, int KT>
__device__ __forceinline__ void product_columns(float (&acc)[MT][HD / 8][4],
                                                const uint32_t (&p)[MT][KT][4], uint32_t b) {
#pragma unroll
    for (int k = 0; k < KT; k++) {
#pragma unroll
        for (int n = 0; n < HD / 8; n += 2) {
            uint32_t fb[4];
            load_fragment_transposed(fb, tile_step<HD>(b, n / 2) +
                                             (uint32_t)(k * 16 * tile<HD>::PITCH));
#pragma unroll
            for (int m = 0; m < MT; m++) {
                mma(acc[m][n], p[m][k], fb[0], fb[1]);
                mma(acc[m][n + 1], p[m][k], fb[2], fb[3]);
            }
        }
    }
}

// Writes one 16-byte chunk of staged rows.
template <int HD>
__device__ __forceinline__ void chunk_store(uint32_t rows, bf16* base, int64_t ld, int32_t hd,
                                            int32_t first, int32_t length, int32_t i) {
    int32_t row = i / (HD / 8);
    int32_t chunk = i % (HD / 8);
    uint32_t at = rows + tile_at<HD>(row, chunk);
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(at)
                 : "memory");
    if (first + row < length && (hd == HD || chunk * 8 < hd)) {
        *(uint4*)(base + (int64_t)(first + row) * ld + chunk * 8) = x;
    }
}

// Writes acc * factor[row] as bf16 to rows [first, ...) of a sequence. The warp stages them in its
// own rows of a tile that no other warp reads, so that global stores are whole 16-byte chunks.
template <int HD, int MT>
__device__ __forceinline__ void
rows_store(float (&acc)[MT][HD / 8][4], const float (&factor)[MT][2], uint32_t rows,
           int32_t rows_first, bf16* base, int64_t ld, int32_t hd, int32_t first, int32_t length) {
    constexpr int CHUNKS = HD / 8;
    int32_t lane = (int32_t)threadIdx.x & 31;
    uint32_t mine = rows + (uint32_t)(rows_first * tile<HD>::PITCH);
    __syncwarp();
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int n = 0; n < HD / 8; n++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int32_t row = m * 16 + h * 8 + (lane >> 2);
                uint32_t at = mine + tile_at<HD>(row, n, (lane & 3) * 4);
                uint32_t x =
                    pack_bf16(acc[m][n][2 * h] * factor[m][h], acc[m][n][2 * h + 1] * factor[m][h]);
                asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
            }
        }
    }
    __syncwarp();
    if (HD == 64 || HD == 128) { // see rows_zero
#pragma unroll
        for (int i = 0; i < MT * 16 * CHUNKS; i += 32) {
            chunk_store<HD>(mine, base, ld, hd, first, length, i + lane);
        }
    } else {
#pragma unroll 4
        for (int i = 0; i < MT * 16 * CHUNKS; i += 32) {
            chunk_store<HD>(mine, base, ld, hd, first, length, i + lane);
        }
    }
}

// The same as f32: four lanes write 32 contiguous bytes.
template <int HD, int MT>
__device__ __forceinline__ void rows_store_f32(const float (&acc)[MT][HD / 8][4], float factor,
                                               float* base, int64_t ld, int32_t hd, int32_t first,
                                               int32_t length) {
    int32_t lane = thread_again() & 31;
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int32_t row = first + m * 16 + h * 8 + (lane >> 2);
            if (row < length) {
                float* to = base + (int64_t)row * ld + (lane & 3) * 2;
#pragma unroll
                for (int n = 0; n < HD / 8; n++) {
                    if (hd == HD || n * 8 < hd) {
                        *(float2*)(to + n * 8) =
                            make_float2(acc[m][n][2 * h] * factor, acc[m][n][2 * h + 1] * factor);
                    }
                }
            }
        }
    }
}

// Zeroes one 16-byte chunk.
template <int HD, class T>
__device__ __forceinline__ void chunk_zero(T* base, int64_t ld, int32_t hd, int32_t first,
                                           int32_t length, int32_t i) {
    constexpr int EACH = 16 / sizeof(T);
    constexpr int CHUNKS = HD / EACH;
    int32_t row = first + i / CHUNKS;
    if (row < length && (hd == HD || i % CHUNKS * EACH < hd)) {
        *(uint4*)(base + (int64_t)row * ld + i % CHUNKS * EACH) = make_uint4(0, 0, 0, 0);
    }
}

// The loop is unrolled only for the two most frequent sizes: the text of the others would be longer
// by a tenth.
template <int HD, int ROWS, int THREADS, class T>
__device__ __forceinline__ void rows_zero(T* base, int64_t ld, int32_t hd, int32_t first,
                                          int32_t length) {
    constexpr int COUNT = ROWS * (HD * (int)sizeof(T) / 16);
    if (HD == 64 || HD == 128) {
        for (int i = (int)threadIdx.x; i < COUNT; i += THREADS) {
            chunk_zero<HD>(base, ld, hd, first, length, i);
        }
    } else {
#pragma unroll 1
        for (int i = (int)threadIdx.x; i < COUNT; i += THREADS) {
            chunk_zero<HD>(base, ld, hd, first, length, i);
        }
    }
}

#endif
