// skinny.cu - the gradients of a linear layer's adapters in one launch.
// targets: 80
// groups: bf16 train
//
// Each of up to four products is P = S^T W, [rank, cols], a sum over rows: S [rows, rank] is u or
// z, W [rows, cols] is x or dy, both bf16. P is added to a gradient in f32, or replaces it:
//   dA [rank, cols] = add dA + scale P        dB [cols, rank] = add dB + scale P^T   (turned)
// If x is the output of a norm, W can be the input h of that norm instead: x = h rstd norm, with a
// factor for each row, by which S is multiplied (rounded to bf16), and one for each column of P.
// Ranks are multiples of 8 up to 64; cols and leading dimensions are multiples of 8, and S and W
// begin at multiples of 16 bytes.
//
// Launch: grid (the strips of 64 columns of all products, splits of the rows), 256 threads, dynamic
// shared memory STAGES * STAGE. A block has one strip and the `each` rows of one split (a multiple
// of 64, at most 1024), 64 at a time: warps w and w + 4 have 16 of them, w the first 32 columns and
// w + 4 the others. Its sums are a part, which qlora_skinny_sum adds to the gradient.
// Determinism: a warp adds its rows in their order; the sums of the four, and then the parts, are
// added in their order. One writer per number.
#include "../tiles.cuh"
#include "../vec.cuh"

enum {
    STAGES = 4,
    STEP = 64,         // rows
    TILE = STEP * 128, // bytes: 64 columns of S or of W
    STAGE = 2 * TILE,
    RANKS = 4,        // of 16
    SUMS = RANKS * 16 // of a thread
};
static_assert(8 * SUMS * 128 <= STAGES * STAGE, "the sums of all threads fit in the ring");

// Same layout as qlora__skinny_product.
struct skinny_product {
    const bf16* s;
    const bf16* w;
    float* d;
    const float* rstd; // [rows], or null: no factors
    const void* norm;  // [cols], f32 or bf16
    int64_t ldd;
    int32_t lds;
    int32_t ldw;
    int32_t rank;
    int32_t cols;
    int32_t turned;
    int32_t norm_bf16;
    float scale;
    int32_t room; // to a multiple of 8 bytes
};

// Same layout as qlora__skinny.
struct skinny {
    skinny_product products[4];
    float* parts; // [splits, numbers]: the gradients as they are in memory, one after the other
    int64_t rows;
    int64_t numbers;
    int32_t each;
    int32_t splits;
    int32_t add; // 0: P replaces the gradient
    int32_t count;
};

// Byte offset of 8 columns of a row in a tile: eight rows of the same columns are in different
// banks.
__device__ __forceinline__ uint32_t tile_at(int32_t row, int32_t chunk) {
    return (uint32_t)(row * 128 + ((chunk ^ (row & 7)) << 4));
}

// Requests one step of S and W: a thread copies 8 columns of the rows `line` and `line` + 32. What
// does not exist becomes zero; columns of S beyond the rank's multiple of 16 are not needed.
__device__ __forceinline__ void request(const skinny_product& p, uint32_t to, int64_t row,
                                        int64_t rows, int32_t col) {
    int32_t line = (int32_t)threadIdx.x / 8;
    int32_t chunk = (int32_t)threadIdx.x % 8;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int64_t at = row + line + 32 * i;
        bool w = at < rows && col + chunk * 8 < p.cols;
        bool s = at < rows && chunk * 8 < p.rank;
        uint32_t there = to + tile_at(line + 32 * i, chunk);
        copy16_or_zero(there, w ? p.w + at * p.ldw + col + chunk * 8 : p.w, w ? 16 : 0);
        if (chunk * 8 < ((p.rank + 15) & ~15)) {
            copy16_or_zero(there + TILE, s ? p.s + at * p.lds + chunk * 8 : p.s, s ? 16 : 0);
        }
    }
    copy_commit();
}

// Adds the sums of the four warps of a half of the columns, for a part of the gradient.
__device__ __forceinline__ void store_sums(const float* shared, const skinny_product& p,
                                           int32_t col0, float* part) {
    int32_t count = p.rank * 64;
#pragma unroll 1
    for (int32_t i = (int32_t)threadIdx.x; i < count; i += 256) {
        // Neighbouring threads have neighbouring numbers of the gradient.
        int32_t r = p.turned ? i % p.rank : i / 64;
        int32_t c = p.turned ? i / p.rank : i % 64;
        int32_t lane = r % 8 * 4 + c % 8 / 2;
        int32_t sum = r / 16 * 16 + c % 32 / 8 * 4 + r % 16 / 8 * 2 + c % 2;
        const float* from = shared + (c / 32 * 4 * SUMS + sum) * 32 + lane;
        float v = from[0];
#pragma unroll
        for (int w = 1; w < 4; w++) {
            v += from[w * SUMS * 32];
        }
        if (col0 + c < p.cols) {
            part[p.turned ? (col0 + c) * p.rank + r : r * p.cols + col0 + c] = v;
        }
    }
}

// The factors of the rows that a lane has in S: 2q, 2q + 1 and those 8 below, q = lane % 4.
struct row_factors {
    float v[4];
};

__device__ __forceinline__ void scale_rows(uint32_t (&a)[4], const row_factors& f) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        a[i] = pack_bf16(__uint_as_float(a[i] << 16) * f.v[i / 2 * 2],
                         __uint_as_float(a[i] & 0xffff0000u) * f.v[i / 2 * 2 + 1]);
    }
}

// The product of a strip, which becomes its strip of the product; part moves to its numbers.
__device__ __forceinline__ skinny_product product_of(const skinny& k, int32_t& strip,
                                                     float*& part) {
    skinny_product p = k.products[0];
#pragma unroll
    for (int i = 1; i < 4; i++) {
        int32_t strips = (p.cols + 63) / 64;
        if (i >= k.count || strip < strips) {
            break;
        }
        strip -= strips;
        part += (int64_t)p.rank * p.cols;
        p = k.products[i];
    }
    return p;
}

// Adds the 16 rows that a warp has of a step. mine: the factors of the lane's rows.
__device__ __forceinline__ void add_step(float (&sums)[RANKS][4][4], const skinny_product& p,
                                         uint32_t from, const float* mine) {
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t warp = (int32_t)threadIdx.x / 32;
    int32_t line = warp % 4 * 16 + lane % 16;
    int32_t s_line = warp % 4 * 16 + lane / 16 * 8 + lane % 8;
    row_factors factors = {{mine[0], mine[1], mine[8], mine[9]}};
    uint32_t b[2][4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        load_transposed(b[i], from + tile_at(line, warp / 4 * 4 + i * 2 + lane / 16));
    }
#pragma unroll
    for (int r = 0; r < RANKS; r++) {
        if (r * 16 < p.rank) {
            uint32_t a[4];
            load_transposed(a, from + TILE + tile_at(s_line, r * 2 + lane / 8 % 2));
            if (p.rstd != 0) {
                scale_rows(a, factors);
            }
#pragma unroll
            for (int c = 0; c < 4; c++) {
                multiply(sums[r][c], a, b[c / 2][c % 2 * 2], b[c / 2][c % 2 * 2 + 1]);
            }
        }
    }
}

QLORA_KERNEL __launch_bounds__(256, 2) qlora_skinny_gradients(skinny k) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ float rstd[1024];
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t warp = (int32_t)threadIdx.x / 32;
    uint32_t ring = (uint32_t)__cvta_generic_to_shared(shared);
    int32_t strip = (int32_t)blockIdx.x;
    float* part = k.parts + blockIdx.y * k.numbers;
    skinny_product p = product_of(k, strip, part);
    int32_t col0 = strip * 64;
    int64_t row0 = (int64_t)blockIdx.y * k.each;
    int64_t end = k.rows - row0 < k.each ? k.rows : row0 + k.each;
    float sums[RANKS][4][4];
#pragma unroll
    for (int i = 0; i < SUMS; i++) {
        sums[i / 16][i / 4 % 4][i % 4] = 0.0f;
    }
#pragma unroll 1
    for (int32_t s = 0; s < STAGES - 1; s++) {
        request(p, ring + (uint32_t)(s * STAGE), row0 + s * STEP, end, col0);
    }
    if (p.rstd != 0) {
#pragma unroll 1
        for (int32_t i = (int32_t)threadIdx.x; i < k.each; i += 256) {
            rstd[i] = row0 + i < end ? p.rstd[row0 + i] : 0.0f;
        }
    }
    const float* mine = rstd + warp % 4 * 16 + lane % 4 * 2;
    int32_t put = (STAGES - 1) * STAGE;
    int32_t get = 0;
    // Every step commits one group of copies, one of zeros at the end.
#pragma unroll 1
    for (int64_t row = row0; row < end; row += STEP) {
        copy_wait<STAGES - 2>();
        __syncthreads(); // this step is visible to all, and the one before no longer needed
        request(p, ring + (uint32_t)put, row + STEP * (STAGES - 1), end, col0);
        add_step(sums, p, ring + (uint32_t)get, mine);
        mine += STEP;
        put = put == (STAGES - 1) * STAGE ? 0 : put + STAGE;
        get = get == (STAGES - 1) * STAGE ? 0 : get + STAGE;
    }
    copy_wait<0>();
    __syncthreads(); // no warp needs its tiles any more
#pragma unroll
    for (int i = 0; i < SUMS; i++) {
        ((float*)shared)[(warp * SUMS + i) * 32 + lane] = sums[i / 16][i / 4 % 4][i % 4];
    }
    __syncthreads();
    store_sums((const float*)shared, p, col0, part);
}

// Adds the parts of all products to the gradients, or puts their sums there.
// Launch: grid.x = ceil(numbers / 256), 256 threads. One thread per number.
QLORA_KERNEL __launch_bounds__(256) qlora_skinny_sum(skinny k) {
    int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (i >= k.numbers) {
        return;
    }
    float v = 0.0f;
#pragma unroll 4
    for (int32_t s = 0; s < k.splits; s++) {
        v += k.parts[s * k.numbers + i];
    }
    skinny_product p = k.products[0];
#pragma unroll
    for (int n = 1; n < 4; n++) {
        int64_t numbers = (int64_t)p.rank * p.cols;
        if (n >= k.count || i < numbers) {
            break;
        }
        i -= numbers;
        p = k.products[n];
    }
    int32_t width = p.turned ? p.rank : p.cols;
    int32_t row = (int32_t)i / width;
    int32_t col = (int32_t)i % width;
    float* to = p.d + row * p.ldd + col;
    float scale = p.scale;
    if (p.rstd != 0) {
        scale *= p.norm_bf16 ? to_float(((const bf16*)p.norm)[col]) : ((const float*)p.norm)[col];
    }
    *to = k.add ? fmaf(scale, v, *to) : scale * v;
}
