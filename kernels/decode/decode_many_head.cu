// decode_many_head.cu - the logits of many texts, bf16 weights, with the warpgroup instructions of
// compute capability 9.0.
// targets: 90a
// groups: bf16
#include "decode_many.cuh"
#include "../hopper.cuh"

// y[n, :] = alpha x[n, :] W^T, with the cap of decode_many.cuh, in bf16. A tile is 256 rows of W,
// 64 for each warpgroup; a block takes every gridDim.x-th tile, for 64 rows of x. Stages have 64
// columns of W and of x, both operands of m64n64k16, with the 128-byte swizzle. The stages of a
// tile follow those of the one before without a pause, so that memory is read while results are
// written. Sums are in the order of the columns, whatever the launch.
//
// Launch: grid (any number of blocks, groups of 64 rows), 512 threads, HEAD_SHARED bytes of dynamic
// shared memory. K is a multiple of 64; N, ld and ldy are multiples of 8.
enum {
    HEAD_STAGES = 4,
    HEAD_TILE = 256,
    HEAD_W = HEAD_TILE * PANEL_ROW,
    HEAD_STAGE = HEAD_W + MANY_ROWS * PANEL_ROW,
    HEAD_WIDE = HEAD_TILE + 8, // of a row of results: no bank conflicts
    HEAD_SHARED = SWIZZLE_BYTES + HEAD_STAGES * HEAD_STAGE + MANY_ROWS * HEAD_WIDE * 2
};

// Where a block is: stage number `at` of all its stages.
struct head_place {
    int32_t tile;
    int32_t chunk;
};

__device__ __forceinline__ head_place head_find(int32_t at, int32_t chunks) {
    head_place h;
    h.tile = (int32_t)blockIdx.x + at / chunks * (int32_t)gridDim.x;
    h.chunk = at % chunks;
    return h;
}

__device__ __forceinline__ void head_copy(uint32_t to, const bf16* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Requests 64 columns of W. Rows past the end repeat the last one; nothing is written from them.
__device__ __forceinline__ void head_request(const decode_part& w, uint32_t stage, head_place h) {
    int32_t row = (int32_t)threadIdx.x / 8;
    int32_t unit = (int32_t)threadIdx.x % 8;
    uint32_t to = stage + row * PANEL_ROW + ((unit ^ row) & 7) * 16;
    const bf16* from = (const bf16*)w.w + h.chunk * 64 + unit * 8;
#pragma unroll
    for (int i = 0; i < HEAD_TILE / 64; i++) {
        int32_t at = h.tile * HEAD_TILE + row + i * 64;
        at = w.first + (at < w.N ? at : w.N - 1);
        head_copy(to + i * 64 * PANEL_ROW, from + at * w.ld);
    }
}

// The same of x.
__device__ __forceinline__ void head_request_x(const decode_product& p, uint32_t stage,
                                               int32_t first_row, head_place h) {
    int32_t row = (int32_t)threadIdx.x / 8;
    int32_t unit = (int32_t)threadIdx.x % 8;
    int32_t n = first_row + row < p.rows ? first_row + row : p.rows - 1;
    head_copy(stage + HEAD_W + row * PANEL_ROW + ((unit ^ row) & 7) * 16,
              p.x + n * p.ldx + h.chunk * 64 + unit * 8);
}

// Writes the results of a tile.
__device__ __forceinline__ void head_write(const decode_product& p, const float (&d)[32],
                                           bf16* results, int32_t first_row, int32_t tile) {
    int32_t lane = (int32_t)threadIdx.x % 32;
    uint16_t* own =
        (uint16_t*)results + lane % 4 * 2 * HEAD_WIDE + threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        float v = d[i / 2 * 4 + i % 2] * p.alpha;
        uint32_t two = pack_bf16(v, d[i / 2 * 4 + i % 2 + 2] * p.alpha);
        own[(i / 2 * 8 + i % 2) * HEAD_WIDE] = (uint16_t)two;
        own[(i / 2 * 8 + i % 2) * HEAD_WIDE + 8] = (uint16_t)(two >> 16);
    }
    __syncthreads();
    int32_t column = (int32_t)threadIdx.x % 32 * 8;
    int32_t n = (int32_t)threadIdx.x / 32;
#pragma unroll 1
    for (; tile * HEAD_TILE + column < p.parts[0].N && n < MANY_ROWS && first_row + n < p.rows;
         n += MANY_TILES) {
        bf16* from = results + n * HEAD_WIDE + column;
#pragma unroll 1
        for (int i = 0; p.cap > 0.0f && i < 8; i++) {
            from[i] = to_bf16(many_cap(p.cap, to_float(from[i])));
        }
        *(uint4*)((bf16*)p.y + (first_row + n) * p.ldy + tile * HEAD_TILE + column) =
            *(const uint4*)from;
    }
}

QLORA_KERNEL __launch_bounds__(MANY_THREADS, 1)
    qlora_decode_many_head(const __grid_constant__ decode_product p) {
    extern __shared__ __align__(128) uint8_t room[];
    uint8_t* shared = room + (SWIZZLE_BYTES - shared_address(room) % SWIZZLE_BYTES) % SWIZZLE_BYTES;
    bf16* results = (bf16*)(shared + HEAD_STAGES * HEAD_STAGE);
    uint32_t stages = shared_address(shared);
    int32_t first_row = (int32_t)blockIdx.y * MANY_ROWS;
    int32_t chunks = p.K / 64;
    int32_t tiles = (p.parts[0].N + HEAD_TILE - 1) / HEAD_TILE;
    int32_t count = (tiles - (int32_t)blockIdx.x + (int32_t)gridDim.x - 1) / (int32_t)gridDim.x;
    count *= chunks;
    uint32_t group = stages + threadIdx.x / 128 * 64 * PANEL_ROW;
    early_next();
#pragma unroll 1
    for (int i = 0; i < HEAD_STAGES - 1; i++) {
        if (i < count) {
            head_request(p.parts[0], stages + i * HEAD_STAGE, head_find(i, chunks));
        }
    }
    early_wait();
#pragma unroll 1
    for (int i = 0; i < HEAD_STAGES - 1; i++) {
        if (i < count) {
            head_request_x(p, stages + i * HEAD_STAGE, first_row, head_find(i, chunks));
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    float d[32];
#pragma unroll 1
    for (int32_t at = 0; at < count; at++) {
        head_place here = head_find(at, chunks);
        asm volatile("cp.async.wait_group %0;" ::"n"(HEAD_STAGES - 2) : "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads(); // this stage is there, and the last one is free
        int32_t ahead = at + HEAD_STAGES - 1;
        if (ahead < count) {
            head_place next = head_find(ahead, chunks);
            head_request(p.parts[0], stages + ahead % HEAD_STAGES * HEAD_STAGE, next);
            head_request_x(p, stages + ahead % HEAD_STAGES * HEAD_STAGE, first_row, next);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        uint32_t offset = (uint32_t)(at % HEAD_STAGES * HEAD_STAGE);
        products_begin();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            product<0, 0>(d, operand(group + offset + i * 32, 16),
                          operand(stages + offset + HEAD_W + i * 32, 16), here.chunk + i);
        }
        products_commit();
        products_wait<0>();
        products_hold(d);
        if (here.chunk == chunks - 1) {
            head_write(p, d, results, first_row, here.tile);
        }
    }
}
