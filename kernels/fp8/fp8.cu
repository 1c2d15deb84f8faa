// fp8.cu - operands of FP8 products: rows of activations and gradients, and weights, in e4m3.
// targets: 90a
// groups: bf16 fp8
#include "fp8.cuh"

#define FP8_KEPT 8 // pieces of a row that a thread keeps between its two passes

//   scale = max(max |x[r,:]| / 448, 1e-30)
//   q[r,c] = e4m3(x[r,c] * (1 / scale)), scales[r] = scale * factor[0]
//
// where factor[0] is the scale of the weights, x is [rows, cols] with leading dimension ldx, and q
// has a pitch of ldq bytes. A row with an infinity has only NaNs: its scale is infinite, 0 * inf.
// Launch: one block per row, of at most 512 threads, a multiple of 32; with ldq / 64 threads, a row
// is read once. Each thread reads 8 columns at a time. A maximum does not depend on the order.
QLORA_KERNEL __launch_bounds__(512)
    qlora_fp8_quantise(const bf16* x, int64_t ldx, int64_t cols, const float* factor, uint8_t* q,
                       int64_t ldq, float* scales) {
    __shared__ float shared[32];
    int64_t row = blockIdx.x;
    const bf16* from = x + row * ldx;
    bool vec = rows_aligned(x, ldx);
    int64_t step = (int64_t)blockDim.x * 8;
    int64_t first = (int64_t)threadIdx.x * 8;
    uint4 kept[FP8_KEPT];
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < FP8_KEPT; i++) {
        int64_t c = first + i * step;
        kept[i] = make_uint4(0, 0, 0, 0);
        if (c < cols) {
            kept[i] = load_raw(from + c, cols - c, vec);
        }
    }
#pragma unroll
    for (int i = 0; i < FP8_KEPT; i++) {
        most = largest_of(kept[i], most);
    }
#pragma unroll 1
    for (int64_t c = first + FP8_KEPT * step; c < cols; c += step) {
        most = largest_of(load_raw(from + c, cols - c, vec), most);
    }
    float scale = fp8_scale(row_max(most, shared, (int32_t)blockDim.x));
    float inverse = __frcp_rn(scale);
    uint8_t* to = q + row * ldq;
#pragma unroll
    for (int i = 0; i < FP8_KEPT; i++) {
        int64_t c = first + i * step;
        if (c < ldq) {
            *(uint2*)(to + c) = codes_of(kept[i], inverse);
        }
    }
#pragma unroll 1
    for (int64_t c = first + FP8_KEPT * step; c < ldq; c += step) {
        uint4 raw = make_uint4(0, 0, 0, 0);
        if (c < cols) {
            raw = load_raw(from + c, cols - c, vec);
        }
        *(uint2*)(to + c) = codes_of(raw, inverse);
    }
    if (threadIdx.x == 0) {
        scales[row] = __fmul_rn(scale, *factor);
    }
}

// One NF4 weight, as in nf4.cuh. If block_shift is negative, it is an FP8 weight, as in
// fp8_base.cuh, and of the other parameters only codes, scales, rows and cols are used.
#define FP8_WEIGHT                                                                                 \
    const uint8_t *codes, const float *absmax, const uint8_t *q, const float *scales,              \
        const float *offset, const float *maps, int64_t rows, int64_t cols, int32_t block_shift,   \
        int32_t group_shift

// factors = {scale, 1 / scale}, scale = max(most / 448, 1e-30), most = the largest scale of a block
// times the largest level (448 for FP8), over all weights of a stack. One launch per weight: the
// first one (flag 1) starts, every one raises factors[0], and the last one (flag 2) turns it into
// the result.
// Launch: one block of 1024 threads. A maximum does not depend on the order.
QLORA_KERNEL __launch_bounds__(1024) qlora_fp8_measure(FP8_WEIGHT, int32_t flags, float* factors) {
    __shared__ float shared[32];
    bool eight = block_shift < 0;
    int64_t blocks = eight ? ((rows + 127) >> 7) * ((cols + 127) >> 7)
                           : (rows * cols + ((int64_t)1 << block_shift) - 1) >> block_shift;
    float middle = absmax || eight ? 0.0f : *offset;
    const float* plain = eight ? scales : absmax;
    float most = 0.0f;
#pragma unroll 4
    for (int64_t b = threadIdx.x; b < blocks; b += 1024) {
        float value = plain
                          ? plain[b]
                          : __fadd_rn(__fmul_rn(maps[16 + q[b]], scales[b >> group_shift]), middle);
        most = fmaxf(most, fabsf(value));
    }
    most = row_max(most, shared, 1024);
    if (threadIdx.x == 0) {
        float level = eight ? FP8_MOST : 0.0f;
        for (int i = 0; i < 16 && !eight; i++) {
            level = fmaxf(level, fabsf(maps[i]));
        }
        most = __fmul_rn(most, level);
        most = (flags & 1) != 0 ? most : fmaxf(most, factors[0]);
        factors[0] = (flags & 2) != 0 ? fp8_scale(most) : most;
        if ((flags & 2) != 0) {
            factors[1] = __frcp_rn(fp8_scale(most));
        }
    }
}

// The levels times 1 / scale, and the map of the scales, in shared memory. Plain scales are handled
// as map[0] * absmax + 0 with map[0] = 1.
struct fp8_tables {
    float level[16];
    float map[256];
};

__device__ __forceinline__ void fill_tables(fp8_tables& t, const float* maps, const float* absmax,
                                            const float* factors, int32_t block_shift) {
    if (block_shift < 0) {
        if (threadIdx.x == 0) {
            t.level[0] = factors[1];
        }
        __syncthreads();
        return;
    }
    if (threadIdx.x < 16) {
        t.level[threadIdx.x] = __fmul_rn(maps[threadIdx.x], factors[1]);
    }
    t.map[threadIdx.x] = absmax ? 1.0f : maps[16 + threadIdx.x];
    __syncthreads();
}

// The value of a code: its bits are those of an f16, times 2^-8, subnormal numbers included.
__device__ __forceinline__ float value_of(uint32_t code) {
    f16 x;
    x.bits = (uint16_t)((code & 0x80u) << 8 | (code & 0x7fu) << 7);
    return __fmul_rn(to_float(x), 256.0f);
}

// 16 columns of a row of an FP8 weight, from column c on: e4m3(value * (scale * factor)).
__device__ __forceinline__ uint4 widen_again(float factor, int64_t row, int64_t c,
                                             const uint8_t* codes, const float* scales,
                                             int64_t cols) {
    float scale = __fmul_rn(scales[(row >> 7) * ((cols + 127) >> 7) + (c >> 7)], factor);
    const uint8_t* from = codes + row * cols + c;
    uint32_t word[4] = {0, 0, 0, 0};
    if ((cols & 15) == 0) {
        uint4 raw = *(const uint4*)from;
        word[0] = raw.x;
        word[1] = raw.y;
        word[2] = raw.z;
        word[3] = raw.w;
    } else {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            uint32_t code = c + i < cols ? from[i] : 0;
            word[i / 4] |= code << 8 * (i & 3);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float a = __fmul_rn(value_of(word[i] & 255), scale);
        float b = __fmul_rn(value_of(word[i] >> 8 & 255), scale);
        float d = __fmul_rn(value_of(word[i] >> 16 & 255), scale);
        float f = __fmul_rn(value_of(word[i] >> 24), scale);
        word[i] = pack_e4m3(a, b) | pack_e4m3(d, f) << 16;
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}

// The codes of 16 columns of a row, from column c on: e4m3(level * absmax), zero outside of W.
__device__ __forceinline__ uint4 widen(const fp8_tables& t, int64_t row, int64_t c, FP8_WEIGHT) {
    uint32_t word[4] = {0, 0, 0, 0};
    if (row >= rows || c >= cols) {
        return make_uint4(0, 0, 0, 0);
    }
    if (block_shift < 0) {
        return widen_again(t.level[0], row, c, codes, scales, cols);
    }
    float middle = absmax ? 0.0f : *offset;
    const float* source = absmax ? absmax : scales;
    int32_t source_shift = absmax ? block_shift : block_shift + group_shift;
    int64_t e = row * cols + c;
    if ((cols & 15) == 0 && block_shift >= 4) { // 8 whole bytes of one block
        uint2 raw = *(const uint2*)(codes + (e >> 1));
        float scale = __fadd_rn(
            __fmul_rn(t.map[absmax ? 0 : q[e >> block_shift]], source[e >> source_shift]), middle);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t four = (i < 2 ? raw.x : raw.y) >> 16 * (i & 1); // two bytes, four elements
            float a = __fmul_rn(t.level[four >> 4 & 15], scale);
            float b = __fmul_rn(t.level[four & 15], scale);
            float d = __fmul_rn(t.level[four >> 12 & 15], scale);
            float f = __fmul_rn(t.level[four >> 8 & 15], scale);
            word[i] = pack_e4m3(a, b) | pack_e4m3(d, f) << 16;
        }
        return make_uint4(word[0], word[1], word[2], word[3]);
    }
#pragma unroll 1
    for (int i = 0; i < 16 && c + i < cols; i++) {
        int64_t x = e + i;
        float scale = __fadd_rn(
            __fmul_rn(t.map[absmax ? 0 : q[x >> block_shift]], source[x >> source_shift]), middle);
        uint32_t half = (x & 1) != 0 ? codes[x >> 1] & 15 : codes[x >> 1] >> 4;
        uint32_t code = pack_e4m3(__fmul_rn(t.level[half], scale), 0.0f) & 255;
        uint32_t shifted = code << 8 * (i & 3);
        word[0] |= i < 4 ? shifted : 0;
        word[1] |= i >= 4 && i < 8 ? shifted : 0;
        word[2] |= i >= 8 && i < 12 ? shifted : 0;
        word[3] |= i >= 12 ? shifted : 0;
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}

// out[r,c] = e4m3(W[r,c] / scale), factors = {scale, 1 / scale}; out has a pitch of ld bytes, and
// its columns from cols to ld are zero. Launch: 256 threads, 64 per row with 16 columns each, grid
// (ceil(rows / 4), ceil(ld / 1024)). Element-wise, one writer per output.
QLORA_KERNEL __launch_bounds__(256)
    qlora_fp8_widen(FP8_WEIGHT, const float* factors, uint8_t* out, int64_t ld) {
    __shared__ fp8_tables tables;
    fill_tables(tables, maps, absmax, factors, block_shift);
    int64_t row = (int64_t)blockIdx.x * 4 + threadIdx.x / 64;
    int64_t c = (int64_t)blockIdx.y * 1024 + threadIdx.x % 64 * 16;
    if (row < rows && c < ld) {
        *(uint4*)(out + row * ld + c) = widen(tables, row, c, codes, absmax, q, scales, offset,
                                              maps, rows, cols, block_shift, group_shift);
    }
}

#define FP8_TILE_ROWS 64
#define FP8_TILE_COLS 256
#define FP8_TILE_PITCH (FP8_TILE_COLS / 4 + 1) // words; keeps reads of a column in different banks

// A word of every column, from a word of four columns of every row.
__device__ __forceinline__ void turn(const uint32_t* row, uint32_t& c0, uint32_t& c1, uint32_t& c2,
                                     uint32_t& c3) {
    uint32_t low01 = __byte_perm(row[0], row[1], 0x5140);
    uint32_t low23 = __byte_perm(row[2], row[3], 0x5140);
    uint32_t high01 = __byte_perm(row[0], row[1], 0x7362);
    uint32_t high23 = __byte_perm(row[2], row[3], 0x7362);
    c0 = __byte_perm(low01, low23, 0x5410);
    c1 = __byte_perm(low01, low23, 0x7632);
    c2 = __byte_perm(high01, high23, 0x5410);
    c3 = __byte_perm(high01, high23, 0x7632);
}

// out[c,r] = e4m3(W[r,c] / scale): the transpose, with a pitch of ld bytes. Columns of `out` from
// rows to `until` are zero; `until` is rows, or the pitch after the last weight of a stack.
// Launch: 256 threads, grid (ceil(until / 64), ceil(cols / 256)). A block turns a tile of 64 x 256
// in shared memory, each thread 16 x 4 of it; one writer per output.
QLORA_KERNEL __launch_bounds__(256)
    qlora_fp8_widen_turned(FP8_WEIGHT, const float* factors, uint8_t* out, int64_t ld,
                           int64_t until) {
    __shared__ fp8_tables tables;
    __shared__ uint32_t tile[FP8_TILE_ROWS * FP8_TILE_PITCH];
    fill_tables(tables, maps, absmax, factors, block_shift);
    int64_t row0 = (int64_t)blockIdx.x * FP8_TILE_ROWS;
    int64_t col0 = (int64_t)blockIdx.y * FP8_TILE_COLS;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint32_t line = threadIdx.x / 16 + j * 16;
        uint32_t piece = threadIdx.x % 16;
        uint4 raw = widen(tables, row0 + line, col0 + piece * 16, codes, absmax, q, scales, offset,
                          maps, rows, cols, block_shift, group_shift);
        uint32_t* to = tile + line * FP8_TILE_PITCH + piece * 4;
        to[0] = raw.x;
        to[1] = raw.y;
        to[2] = raw.z;
        to[3] = raw.w;
    }
    __syncthreads();
    uint32_t group = threadIdx.x % 4 * 16;
    uint32_t word = threadIdx.x / 4;
    int64_t r = row0 + group;
    uint32_t turned[4][4];
#pragma unroll
    for (int g = 0; g < 4; g++) {
        uint32_t from[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            from[i] = tile[(group + g * 4 + i) * FP8_TILE_PITCH + word];
        }
        turn(from, turned[0][g], turned[1][g], turned[2][g], turned[3][g]);
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
        int64_t c = col0 + word * 4 + k;
        uint8_t* to = out + c * ld + r;
        if (c >= cols) {
            return;
        }
        if (((uint64_t)to & 15) == 0 && until - r >= 16) {
            *(uint4*)to = make_uint4(turned[k][0], turned[k][1], turned[k][2], turned[k][3]);
            continue;
        }
#pragma unroll
        for (int i = 0; i < 16; i++) {
            if (r + i < until) {
                to[i] = (uint8_t)(turned[k][i / 4] >> 8 * (i % 4));
            }
        }
    }
}
