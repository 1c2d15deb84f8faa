// gemm_wg.cuh - parts of matrix products with warpgroup instructions, for gemm_wg.cu and the
// products of experts (grouped_wg.cu).
#ifndef QLORA_GEMM_WG_CUH
#define QLORA_GEMM_WG_CUH

#include "../hopper.cuh"

enum { C_IS_BF16 = 1, C_HAS_CHUNKS = 2, STAGED_BYTES = 4096 };
enum { ROWS = 128, DEPTH = 64, BAND = 16 /* tiles */ };

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
    int32_t slices; // of all parts
    int32_t splits;
    float alpha;
    float beta;
};

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

// The same for whole 16-byte chunks of bf16 rows, without alpha and beta: a warp stages 128 columns
// of its 16 rows in 4,096 bytes of its own, so that it writes whole rows of 256 bytes. Chunk c of
// row r is at c ^ (r & 7), which keeps the eight rows that are written at a time in different
// banks.
template <int WIDTH>
__device__ __forceinline__ void store_tile_staged(const float (&d)[WIDTH / 2], bf16* c, int64_t ldc,
                                                  const tile& t, const shape& s, uint32_t staging) {
    int32_t lane = threadIdx.x % 32;
    int32_t warp = threadIdx.x / 32 - 4;
    uint32_t own = staging + warp * STAGED_BYTES;
    uint32_t to = own + lane / 4 * (256 + 16) + lane % 4 * 4;
#pragma unroll
    for (int part = 0; part < WIDTH / 128; part++) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const float* x = &d[part * 64 + i * 4];
            uint32_t at = to ^ (i << 4);
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(pack_bf16(x[0], x[1]))
                         : "memory");
            asm volatile("st.shared.b32 [%0+2048], %1;" ::"r"(at), "r"(pack_bf16(x[2], x[3]))
                         : "memory");
        }
        __syncwarp();
        int32_t chunk = lane % 16;
        int32_t col = t.col + part * 128 + chunk * 8;
#pragma unroll 4
        for (int32_t r = lane / 16; r < 16; r += 2) {
            int32_t row = t.row + warp * 16 + r;
            uint4 x;
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                         : "r"(own + r * 256 + ((chunk ^ (r & 7)) << 4))
                         : "memory");
            if (row < s.M && col < s.N) {
                *(uint4*)(c + row * ldc + col) = x;
            }
        }
    }
}

#endif
