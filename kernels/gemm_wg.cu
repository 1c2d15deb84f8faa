// gemm_wg.cu - matrix products with the warpgroup instructions of compute capability 9.0.
// targets: 90a
// groups: bf16 gemm
//
//   C[M,N] = alpha op(A) op(B) + beta C       row-major, bf16 operands, f32 sums
//
// The kernel's name gives the transposition, first letter A, second letter B, and the columns of a
// tile. A and B come as tensor maps: boxes of 64 columns and as many rows as the tile has, or, for
// an operand whose rows run along K, 64 rows. flags bit 1: C is bf16, otherwise f32; the wide tiles
// store bf16 only, or with A transposed (weight gradients) f32 only. C is aligned to pairs: N and
// ldc are even. Products are exact; sums are f32 in the order of the k16 steps along K. With
// beta == 0, C is never read.
//
// Launch: 384 threads, as many blocks as run at once, or one per tile if there are fewer; dynamic
// shared memory: STAGES * (128 + columns) * 128 + 1024 bytes. A block takes tiles of 128 rows in a
// fixed order. Its first warpgroup copies slices of 64 along K, STAGES of them in flight; the two
// others multiply, 64 rows each. Neighbouring blocks share rows and columns of operands, so that
// most copies hit the L2 cache.
// Determinism: one writer per element of C, fixed order along K.
#include "hopper.cuh"

enum { C_IS_BF16 = 1, ROWS = 128, DEPTH = 64, BAND = 16 /* tiles */ };

// The types of C that a kernel stores.
enum { STORES_BF16 = 1, STORES_F32 = 2, STORES_BOTH = 3 };

struct tile {
    int32_t row;
    int32_t col;
};

// Tiles are numbered down the columns of bands of BAND tiles, one band after another.
__device__ __forceinline__ tile tile_at(int32_t index, int32_t rows, int32_t cols, int32_t width) {
    int32_t band = index / (BAND * cols);
    int32_t height = min(BAND, rows - band * BAND);
    int32_t inside = index - band * BAND * cols;
    tile t = {(band * BAND + inside % height) * ROWS, inside / height * width};
    return t;
}

// One slice of an operand: `lines` rows or columns of the product from `line` on.
template <bool ALONG_K, int LINES>
__device__ __forceinline__ void copy_slice(uint32_t to, const tensor_map* map, uint32_t barrier,
                                           int32_t line, int32_t k) {
#pragma unroll
    for (int i = 0; i < (ALONG_K ? 1 : LINES / PANEL); i++) {
        copy_box(to + i * DEPTH * PANEL_ROW, map, barrier, ALONG_K ? k : line + i * PANEL,
                 ALONG_K ? line : k);
    }
}

// The operand of step i of a slice.
template <bool ALONG_K> __device__ __forceinline__ uint64_t step_operand(uint32_t slice, int i) {
    return ALONG_K ? operand(slice + i * 32, 16)
                   : operand(slice + i * 2 * SWIZZLE_BYTES, DEPTH * PANEL_ROW);
}

// Columns I and I + 1 of a row of C, read and written if the row has more than I columns. Without
// branches, all accesses of a row are under way at the same time.
template <int I> __device__ __forceinline__ float2 pair_load(const bf16* c, int32_t cols) {
    uint32_t x = 0;
    asm volatile("{\n.reg .pred p;\nsetp.gt.s32 p, %2, %3;\n@p ld.global.b32 %0, [%1+%4];\n}"
                 : "+r"(x)
                 : "l"(c), "r"(cols), "n"(I), "n"(I * 2));
    return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}

template <int I> __device__ __forceinline__ float2 pair_load(const float* c, int32_t cols) {
    float2 x = make_float2(0.0f, 0.0f);
    asm volatile("{\n.reg .pred p;\nsetp.gt.s32 p, %3, %4;\n"
                 "@p ld.global.v2.f32 {%0, %1}, [%2+%5];\n}"
                 : "+f"(x.x), "+f"(x.y)
                 : "l"(c), "r"(cols), "n"(I), "n"(I * 4));
    return x;
}

template <int I>
__device__ __forceinline__ void pair_store(bf16* c, int32_t cols, float x, float y) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.gt.s32 p, %1, %3;\n@p st.global.b32 [%0+%4], %2;\n}" ::"l"(c),
        "r"(cols), "r"(pack_bf16(x, y)), "n"(I), "n"(I * 2)
        : "memory");
}

template <int I>
__device__ __forceinline__ void pair_store(float* c, int32_t cols, float x, float y) {
    asm volatile("{\n.reg .pred p;\nsetp.gt.s32 p, %1, %4;\n"
                 "@p st.global.v2.f32 [%0+%5], {%2, %3};\n}" ::"l"(c),
                 "r"(cols), "f"(x), "f"(y), "n"(I), "n"(I * 4)
                 : "memory");
}

// Calls of the four above for every pair that a thread holds of a row: they need constants.
template <int WIDTH, int LOWER, int I> struct row_of {
    template <class T>
    static __device__ __forceinline__ void scale(float (&d)[WIDTH / 2], const T* c, int32_t cols,
                                                 float alpha, float beta) {
        float2 old = pair_load<2 * I>(c, cols);
        d[I + LOWER] = fmaf(beta, old.x, d[I + LOWER] * alpha);
        d[I + LOWER + 1] = fmaf(beta, old.y, d[I + LOWER + 1] * alpha);
        row_of<WIDTH, LOWER, I + 4>::scale(d, c, cols, alpha, beta);
    }
    template <class T>
    static __device__ __forceinline__ void store(const float (&d)[WIDTH / 2], T* c, int32_t cols) {
        pair_store<2 * I>(c, cols, d[I + LOWER], d[I + LOWER + 1]);
        row_of<WIDTH, LOWER, I + 4>::store(d, c, cols);
    }
};

template <int LOWER, int WIDTH> struct row_end {
    template <class T>
    static __device__ __forceinline__ void scale(float (&)[WIDTH / 2], const T*, int32_t, float,
                                                 float) {
    }
    template <class T>
    static __device__ __forceinline__ void store(const float (&)[WIDTH / 2], T*, int32_t) {
    }
};

template <int LOWER> struct row_of<64, LOWER, 32> : row_end<LOWER, 64> {};
template <int LOWER> struct row_of<128, LOWER, 64> : row_end<LOWER, 128> {};
template <int LOWER> struct row_of<256, LOWER, 128> : row_end<LOWER, 256> {};

struct shape {
    int32_t M;
    int32_t N;
    int32_t tile_rows;
    int32_t tile_cols;
    int32_t slices;
    float alpha;
    float beta;
};

// The copying thread.
template <bool TA, bool TB, int WIDTH, int STAGES>
__device__ __forceinline__ void copy_tiles(const tensor_map* a, const tensor_map* b,
                                           uint32_t buffer, uint32_t full, uint32_t empty,
                                           const shape& s) {
    const uint32_t bytes = (ROWS + WIDTH) * PANEL_ROW;
    uint32_t stage = 0;
    uint32_t phase = 1; // a new buffer is empty
    for (int32_t i = blockIdx.x; i < s.tile_rows * s.tile_cols; i += gridDim.x) {
        tile t = tile_at(i, s.tile_rows, s.tile_cols, WIDTH);
        for (int32_t k = 0; k < s.slices; k++) {
            uint32_t to = buffer + stage * bytes;
            barrier_wait(empty + 8 * stage, phase);
            barrier_expect(full + 8 * stage, bytes);
            copy_slice<!TA, ROWS>(to, a, full + 8 * stage, t.row, k * DEPTH);
            copy_slice<TB, WIDTH>(to + ROWS * PANEL_ROW, b, full + 8 * stage, t.col, k * DEPTH);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            phase ^= stage == 0;
        }
    }
}

template <int WIDTH, class T>
__device__ __forceinline__ void store_tile(float (&d)[WIDTH / 2], T* c, int64_t ldc, const tile& t,
                                           const shape& s) {
    int32_t thread = threadIdx.x - 128;
    int32_t row = t.row + thread / 32 * 16 + thread % 32 / 4;
    int32_t col = t.col + thread % 4 * 2;
    T* upper = c + row * ldc + col;
    T* lower = upper + 8 * ldc;
    int32_t upper_cols = row < s.M ? s.N - col : 0;
    int32_t lower_cols = row + 8 < s.M ? s.N - col : 0;
    if (s.alpha != 1.0f || s.beta != 0.0f) {
        int32_t read = s.beta != 0.0f; // otherwise C may be anything, even NaN
        row_of<WIDTH, 0, 0>::scale(d, upper, read * upper_cols, s.alpha, s.beta);
        row_of<WIDTH, 2, 0>::scale(d, lower, read * lower_cols, s.alpha, s.beta);
    }
    row_of<WIDTH, 0, 0>::store(d, upper, upper_cols);
    row_of<WIDTH, 2, 0>::store(d, lower, lower_cols);
}

// The multiplying warpgroups.
template <bool TA, bool TB, int WIDTH, int STAGES, int TYPES>
__device__ __forceinline__ void multiply_tiles(uint32_t buffer, uint32_t full, uint32_t empty,
                                               void* c, int64_t ldc, const shape& s,
                                               int32_t flags) {
    const uint32_t bytes = (ROWS + WIDTH) * PANEL_ROW;
    // Its 64 rows of A: half of the tile's rows, or one of its two panels. Both are 8,192 bytes.
    const uint32_t own = (threadIdx.x / 128 - 1) * PANEL * PANEL_ROW;
    const bool first_thread = threadIdx.x % 128 == 0;
    uint32_t stage = 0;
    uint32_t phase = 0;
    for (int32_t i = blockIdx.x; i < s.tile_rows * s.tile_cols; i += gridDim.x) {
        tile t = tile_at(i, s.tile_rows, s.tile_cols, WIDTH);
        float d[WIDTH / 2];
        uint32_t before = 0;
        for (int32_t k = 0; k < s.slices; k++) {
            uint32_t a = buffer + stage * bytes + own;
            uint32_t b = buffer + stage * bytes + ROWS * PANEL_ROW;
            barrier_wait(full + 8 * stage, phase);
            products_begin();
#pragma unroll
            for (int j = 0; j < DEPTH / 16; j++) {
                product<TA, !TB>(d, step_operand<!TA>(a, j), step_operand<TB>(b, j), k + j > 0);
            }
            products_commit();
            products_wait<1>(); // the slice before is no longer read
            if (k > 0 && first_thread) {
                barrier_arrive(empty + 8 * before);
            }
            before = stage;
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            phase ^= stage == 0;
        }
        products_wait<0>();
        products_hold(d);
        if (first_thread) {
            barrier_arrive(empty + 8 * before);
        }
        if (TYPES == STORES_BF16 || (TYPES == STORES_BOTH && (flags & C_IS_BF16))) {
            store_tile<WIDTH>(d, (bf16*)c, ldc, t, s);
        } else {
            store_tile<WIDTH>(d, (float*)c, ldc, t, s);
        }
    }
}

template <bool TA, bool TB, int WIDTH, int STAGES, int TYPES>
__device__ __forceinline__ void gemm(const tensor_map* a, const tensor_map* b, void* c, int32_t M,
                                     int32_t N, int32_t K, int64_t ldc, float alpha, float beta,
                                     int32_t flags) {
    extern __shared__ __align__(1024) char buffers[];
    __shared__ __align__(8) uint64_t barriers[2 * STAGES];
    uint32_t buffer = (shared_address(buffers) + SWIZZLE_BYTES - 1) & ~(SWIZZLE_BYTES - 1u);
    uint32_t full = shared_address(barriers);
    uint32_t empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, 2);
        }
        barrier_publish();
    }
    __syncthreads();
    shape s = {M,     N,   (M + ROWS - 1) / ROWS, (N + WIDTH - 1) / WIDTH, (K + DEPTH - 1) / DEPTH,
               alpha, beta};
    if (threadIdx.x < 128) {
        registers_few();
        if (threadIdx.x == 0) {
            copy_tiles<TA, TB, WIDTH, STAGES>(a, b, buffer, full, empty, s);
        }
    } else {
        registers_many();
        multiply_tiles<TA, TB, WIDTH, STAGES, TYPES>(buffer, full, empty, c, ldc, s, flags);
    }
}

#define GEMM_WG(name, TA, TB, WIDTH, STAGES, TYPES)                                                \
    QLORA_KERNEL __launch_bounds__(384, 1) name(                                                   \
        const __grid_constant__ tensor_map a, const __grid_constant__ tensor_map b, void* c,       \
        int32_t M, int32_t N, int32_t K, int64_t ldc, float alpha, float beta, int32_t flags) {    \
        gemm<TA, TB, WIDTH, STAGES, TYPES>(&a, &b, c, M, N, K, ldc, alpha, beta, flags);           \
    }

GEMM_WG(qlora_gemm_wg_nn_256, false, false, 256, 4, STORES_BF16)
GEMM_WG(qlora_gemm_wg_nt_256, false, true, 256, 4, STORES_BF16)
GEMM_WG(qlora_gemm_wg_tn_256, true, false, 256, 4, STORES_F32)
GEMM_WG(qlora_gemm_wg_nn_128, false, false, 128, 6, STORES_BF16)
GEMM_WG(qlora_gemm_wg_nt_128, false, true, 128, 6, STORES_BF16)
GEMM_WG(qlora_gemm_wg_nn_64, false, false, 64, 8, STORES_BOTH)
GEMM_WG(qlora_gemm_wg_nt_64, false, true, 64, 8, STORES_BOTH)
GEMM_WG(qlora_gemm_wg_tn_64, true, false, 64, 8, STORES_BOTH)
