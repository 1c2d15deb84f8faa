// nf4_gemm.cu - products of a few rows with NF4 weights, which are widened on the way.
//
//   y[M,N] = x[M,K] W[N,K]^T        x bf16, y bf16 or f32, M <= 64, K a multiple of 32
//
// for one weight or for two that share x. W is NF4 as nf4.cu describes it, blocks of 32 or more;
// its elements take the same bf16 values as nf4_dequantise_bf16 writes. Sums are f32 on tensor
// cores.
//
// A block of four warps takes 64 rows of W, 16 a warp, and one of `splits` ranges of K. It walks
// its range in chunks of 128, several in flight: x through shared memory for all warps, the codes
// for the thread itself. In a chunk, thread t of four holds 32 neighbours along K of a row of W and
// the same 32 of a row of x; four of them are one step of m16n8k16, whose k are thereby permuted
// alike for both operands. With one range the block writes y, else a slice of
// partials[splits][M][64 * tiles] that qlora_nf4_gemm_reduce adds in order.
//
// Launch: grid (tiles, splits), tiles = ceil(N1 / 64) + ceil(N2 / 64), 128 threads, no dynamic
// shared; kernel 16, 32 or 64 is the smallest that holds M rows. range = elements of K in a range,
// a multiple of 128, splits * range >= K. x is 16-byte aligned and ldx a multiple of 8; the codes
// are 16-byte aligned. Determinism: one writer per output, fixed order.
#include "common.cuh"

enum { CHUNK = 128, TILE = 64, THREADS = 128 };

#define NF4_WEIGHT(n)                                                                              \
    const uint8_t *codes##n, const float *absmax##n, const uint8_t *q##n, const float *scales##n,  \
        const float *offset##n, const float *maps##n, int32_t block_shift##n,                      \
        int32_t group_shift##n, int32_t N##n, void *y##n, int64_t ldy##n
#define NF4_GEMM_PARAMETERS                                                                        \
    const bf16 *x, int64_t ldx, int32_t M, int32_t K, int32_t range, int32_t y_is_bf16,            \
        float *partials, NF4_WEIGHT(1), NF4_WEIGHT(2)

__device__ __forceinline__ void copy_async(uint32_t to, const void* from, int32_t bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void multiply(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The sixteen bf16 values that the codes of one block stand for, their low and high bytes apart:
// entry c lies in byte c % 4 of word c / 4.
struct palette {
    uint32_t low[4];
    uint32_t high[4];
};

__device__ __forceinline__ palette mix(const float* level, float scale) {
    palette p;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float4 v = *(const float4*)(level + 4 * i);
        uint32_t first = pack_bf16(__fmul_rn(v.x, scale), __fmul_rn(v.y, scale));
        uint32_t second = pack_bf16(__fmul_rn(v.z, scale), __fmul_rn(v.w, scale));
        p.low[i] = __byte_perm(first, second, 0x6420);
        p.high[i] = __byte_perm(first, second, 0x7531);
    }
    return p;
}

// Eight codes to eight bf16: three byte selections a table and four codes instead of a look-up
// each. Nibbles pick among eight entries by their lower three bits, then their fourth bit picks the
// half. A byte holds the earlier element in its high half, so neighbours come out swapped and are
// put right when low and high bytes are joined.
__device__ __forceinline__ void widen(uint32_t* out, uint32_t word, const palette& p) {
    uint32_t entry = word & 0x77777777u;
    uint32_t half = (word >> 1 & 0x44444444u) | 0x32103210u;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t low = __byte_perm(__byte_perm(p.low[0], p.low[1], entry),
                                   __byte_perm(p.low[2], p.low[3], entry), half);
        uint32_t high = __byte_perm(__byte_perm(p.high[0], p.high[1], entry),
                                    __byte_perm(p.high[2], p.high[3], entry), half);
        out[2 * i] = __byte_perm(low, high, 0x4051);
        out[2 * i + 1] = __byte_perm(low, high, 0x6273);
        entry >>= 16;
        half >>= 16;
    }
}

// Requests a chunk of x. A row has 16 units of 16 bytes; unit 4 t + i lies at 4 i + t, in odd rows
// with the upper and lower four swapped, so that the lanes which read together meet different
// banks.
template <int ROWS>
__device__ __forceinline__ void request_x(uint32_t slot, const bf16* x, int64_t ldx, int32_t M,
                                          int32_t k0, int32_t k_end) {
#pragma unroll
    for (int i = 0; i < ROWS * 16 / THREADS; i++) {
        int32_t row = ((int32_t)threadIdx.x + THREADS * i) / 16;
        int32_t unit = (int32_t)threadIdx.x % 16;
        int32_t k = k0 + 8 * unit;
        int32_t place = (unit % 4 * 4 + unit / 4) ^ (row % 2 * 4);
        bool inside = row < M && k < k_end;
        const bf16* from = inside ? x + row * ldx + k : x;
        copy_async(slot + (uint32_t)(row * 256 + place * 16), from, inside ? 16 : 0);
    }
}

// Adds the products of one chunk: x as request_x left it, and this thread's 16 bytes of codes for
// each of its two n8 tiles.
template <int TILES_M>
__device__ __forceinline__ void multiply_chunk(float (&acc)[TILES_M][2][4], const uint8_t* x,
                                               const uint8_t* codes, const float* level,
                                               const float* scale) {
    int32_t g = (int32_t)threadIdx.x % 32 / 4;
    int32_t t = (int32_t)threadIdx.x % 4;
    uint4 w[2];
    palette colours[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        w[j] = *(const uint4*)(codes + (j * THREADS + threadIdx.x) * 16);
        colours[j] = mix(level, scale[j]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t b[2][4];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            uint32_t word = i == 0 ? w[j].x : i == 1 ? w[j].y : i == 2 ? w[j].z : w[j].w;
            widen(b[j], word, colours[j]);
        }
#pragma unroll
        for (int m = 0; m < TILES_M; m++) {
            const uint8_t* p = x + (16 * m + g) * 256 + ((4 * i + t) ^ (g % 2 * 4)) * 16;
            uint4 top = *(const uint4*)p;
            uint4 bottom = *(const uint4*)(p + 8 * 256);
            uint32_t a[4] = {top.x, bottom.x, top.y, bottom.y};
            uint32_t next[4] = {top.z, bottom.z, top.w, bottom.w};
#pragma unroll
            for (int j = 0; j < 2; j++) {
                multiply(acc[m][j], a, b[j][0], b[j][1]);
                multiply(acc[m][j], next, b[j][2], b[j][3]);
            }
        }
    }
}

// Writes the sums of a warp, whose first row of W is n0.
template <int TILES_M>
__device__ __forceinline__ void write_sums(const float (&acc)[TILES_M][2][4], void* y, int64_t ldy,
                                           bool is_bf16, int32_t M, int32_t N, int32_t n0) {
    int32_t g = (int32_t)threadIdx.x % 32 / 4;
    int32_t t = (int32_t)threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < TILES_M * 8; i++) {
        int32_t row = 16 * (i / 8) + 8 * (i / 2 % 2) + g;
        int32_t col = n0 + 8 * (i / 4 % 2) + 2 * t + i % 2;
        float v = acc[i / 8][i / 4 % 2][i % 4];
        if (row < M && col < N) {
            if (is_bf16) {
                ((bf16*)y)[row * ldy + col] = to_bf16(v);
            } else {
                ((float*)y)[row * ldy + col] = v;
            }
        }
    }
}

// One block's work; long because the pipeline's turns share all of their state.
template <int TILES_M, int STAGES> __device__ __forceinline__ void nf4_gemm(NF4_GEMM_PARAMETERS) {
    const int ROWS = 16 * TILES_M;
    const int X_BYTES = ROWS * CHUNK * 2;
    const int CODE_BYTES = TILE * CHUNK / 2;
    __shared__ __align__(128) uint8_t ring[STAGES * (X_BYTES + CODE_BYTES)];
    __shared__ __align__(16) float level[16];
    __shared__ float map[256];
    int32_t thread = (int32_t)threadIdx.x;
    int32_t lane = thread % 32;
    int32_t g = lane / 4;
    int32_t t = lane % 4;
    // Which weight this block works on.
    int32_t tile = (int32_t)blockIdx.x;
    int32_t tiles1 = (N1 + TILE - 1) / TILE;
    bool second = tile >= tiles1;
    const uint8_t* codes = second ? codes2 : codes1;
    const float* absmax = second ? absmax2 : absmax1;
    const uint8_t* q = second ? q2 : q1;
    const float* scales = second ? scales2 : scales1;
    const float* offset = second ? offset2 : offset1;
    const float* maps = second ? maps2 : maps1;
    int32_t N = second ? N2 : N1;
    int32_t block_shift = second ? block_shift2 : block_shift1;
    int32_t source_shift = block_shift + (second ? group_shift2 : group_shift1);
    const float* source = scales;
    if (absmax) {
        source = absmax;
        source_shift = block_shift;
    }
    int32_t n0 = (second ? tile - tiles1 : tile) * TILE + thread / 32 * 16;
    int32_t k_begin = (int32_t)blockIdx.y * range;
    int32_t k_end = K - k_begin < range ? K : k_begin + range;
    int32_t chunks = k_end > k_begin ? (k_end - k_begin + CHUNK - 1) / CHUNK : 0;
    if (thread < 16) {
        level[thread] = maps[thread];
    }
    map[thread] = absmax ? 1.0f : maps[16 + thread];
    map[thread + 128] = absmax ? 1.0f : maps[144 + thread];
    float middle = absmax ? 0.0f : *offset;
    uint32_t base = (uint32_t)__cvta_generic_to_shared(ring);
    int64_t first[2]; // element of this thread's row of W, for both of its n8 tiles
    bool live[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        int32_t n = n0 + 8 * j + g;
        live[j] = n < N;
        first[j] = (int64_t)(live[j] ? n : 0) * K + 32 * t;
    }
    float acc[TILES_M][2][4];
#pragma unroll
    for (int i = 0; i < TILES_M * 8; i++) {
        acc[i / 8][i / 4 % 2][i % 4] = 0.0f;
    }
    float s[2] = {0.0f, 0.0f};
    uint32_t code[2] = {0, 0};
    // Turn c requests chunk c and works on chunk c - (STAGES - 1); scales come one turn before.
#pragma unroll 1
    for (int32_t c = 0; c < chunks + STAGES - 1; c++) {
        if (c >= STAGES - 1) {
            asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        }
        __syncthreads();
        if (c < chunks) {
            uint32_t slot = base + (uint32_t)(c % STAGES) * (X_BYTES + CODE_BYTES);
            int32_t k0 = k_begin + c * CHUNK;
            request_x<ROWS>(slot, x, ldx, M, k0, k_end);
#pragma unroll
            for (int j = 0; j < 2; j++) {
                bool inside = live[j] && k0 + 32 * t < k_end;
                const uint8_t* from = inside ? codes + ((first[j] + k0) >> 1) : codes;
                copy_async(slot + X_BYTES + (uint32_t)(j * THREADS + thread) * 16, from,
                           inside ? 16 : 0);
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        int32_t done = c - (STAGES - 1);
        float scale[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            scale[j] = __fadd_rn(__fmul_rn(map[code[j]], s[j]), middle);
            int32_t k = k_begin + (done + 1) * CHUNK;
            if (done + 1 >= 0 && live[j] && k + 32 * t < k_end) {
                int64_t e = first[j] + k;
                s[j] = source[e >> source_shift];
                code[j] = absmax ? 0 : q[e >> block_shift];
            }
        }
        if (done < 0) {
            continue;
        }
        const uint8_t* slot = ring + done % STAGES * (X_BYTES + CODE_BYTES);
        multiply_chunk<TILES_M>(acc, slot, slot + X_BYTES, level, scale);
    }
    void* y = second ? y2 : y1;
    int64_t ldy = second ? ldy2 : ldy1;
    if (partials) {
        ldy = (int64_t)gridDim.x * TILE;
        y = partials + blockIdx.y * (M * ldy) + (int64_t)(second ? tiles1 : 0) * TILE;
        y_is_bf16 = 0;
    }
    write_sums<TILES_M>(acc, y, ldy, y_is_bf16 != 0, M, N, n0);
}

#define NF4_GEMM(rows, tiles, stages, blocks)                                                      \
    QLORA_KERNEL __launch_bounds__(THREADS, blocks) qlora_nf4_gemm_##rows(NF4_GEMM_PARAMETERS) {   \
        nf4_gemm<tiles, stages>(x, ldx, M, K, range, y_is_bf16, partials, codes1, absmax1, q1,     \
                                scales1, offset1, maps1, block_shift1, group_shift1, N1, y1, ldy1, \
                                codes2, absmax2, q2, scales2, offset2, maps2, block_shift2,        \
                                group_shift2, N2, y2, ldy2);                                       \
    }
NF4_GEMM(16, 1, 4, 5)
NF4_GEMM(32, 2, 3, 4)
NF4_GEMM(64, 4, 2, 3)

// y = sum over the splits of partials, in their order. One thread an element.
// Launch: grid (ceil(64 * tiles / 256), M), 256 threads.
QLORA_KERNEL __launch_bounds__(256)
    qlora_nf4_gemm_reduce(const float* partials, int32_t splits, int32_t M, int32_t N1, void* y1,
                          int64_t ldy1, int32_t N2, void* y2, int64_t ldy2, int32_t y_is_bf16) {
    int32_t tiles1 = (N1 + TILE - 1) / TILE;
    int64_t width = (int64_t)(tiles1 + (N2 + TILE - 1) / TILE) * TILE;
    int64_t at = (int64_t)blockIdx.x * 256 + threadIdx.x;
    int64_t row = blockIdx.y;
    bool second = at >= (int64_t)tiles1 * TILE;
    int64_t col = second ? at - (int64_t)tiles1 * TILE : at;
    if (col >= (second ? N2 : N1)) {
        return;
    }
    float sum = 0.0f;
#pragma unroll 4
    for (int32_t s = 0; s < splits; s++) {
        sum += partials[((int64_t)s * M + row) * width + at];
    }
    int64_t to = row * (second ? ldy2 : ldy1) + col;
    void* y = second ? y2 : y1;
    if (y_is_bf16 != 0) {
        ((bf16*)y)[to] = to_bf16(sum);
    } else {
        ((float*)y)[to] = sum;
    }
}
