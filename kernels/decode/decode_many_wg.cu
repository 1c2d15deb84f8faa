// decode_many_wg.cu - products of many rows with NF4 weights, for decoding, with the warpgroup
// instructions of compute capability 9.0.
// targets: 90a
// groups: bf16 nf4
#include "decode_many.cuh"
#include "../hopper.cuh"

// Formula, arguments, splits and results are those of decode_many.cuh. A warp has one tile of 16
// rows of W, which become the first operand of m64n64k16 in registers; the second one, x, stays in
// shared memory, with the 128-byte swizzle. A stage has two chunks of 64 columns of x, and the
// codes of all warps. k is not permuted: the four lanes of a row exchange bytes of codes, so that
// each of them has those of its columns. While the product of a chunk runs, the next one is looked
// up. Lane i has the scales of row i % 16, lanes below 16 those of the first two of four chunks.
//
// Launch: grid (tiles, splits, groups of 64 rows), 512 threads, WG_SHARED bytes of dynamic shared
// memory, and z after them if it is in partial sums. K is a multiple of 128, and scales belong to
// blocks of 64.
enum {
    WG_STAGES = 4,
    WG_PANEL = MANY_ROWS * PANEL_ROW,
    WG_CODES = 16 * 64, // bytes of a warp in a stage
    WG_STAGE = 2 * WG_PANEL + MANY_TILES * WG_CODES,
    WG_SHARED = SWIZZLE_BYTES + WG_STAGES * WG_STAGE + MANY_TABLE + MANY_MAP
};

// The chunks of a split: start, and how many, an even number.
struct wg_span {
    int32_t start;
    int32_t chunks;
};

struct wg_source {
    const uint8_t* codes[2]; // of the pieces of 16 bytes that this lane requests
    const float* scales;     // of this lane's row
    const uint8_t* q;        // null = plain scales
    int32_t at;
    int32_t group;
    float middle;
};

__device__ __forceinline__ wg_source wg_find(const many_tile& t, int32_t K) {
    int32_t lane = (int32_t)threadIdx.x % 32;
    const decode_part& w = t.part;
    wg_source f;
    f.codes[0] = (const uint8_t*)w.w + many_row(t, lane / 4) * (K / 2) + lane % 4 * 16;
    f.codes[1] = (const uint8_t*)w.w + many_row(t, lane / 4 + 8) * (K / 2) + lane % 4 * 16;
    f.group = w.group_shift;
    f.scales = w.absmax ? w.absmax : w.scales;
    f.q = w.absmax ? 0 : w.q;
    f.middle = w.absmax ? 0.0f : *w.offset;
    f.at = (int32_t)many_row(t, lane % 16) * (K / 64) + lane / 16 * 2;
    return f;
}

// The scales of this lane's two chunks of the four from `chunk` on, as they are stored.
struct wg_scales {
    float s[2];
    uint32_t q;
};

__device__ __forceinline__ void wg_load_scales(wg_scales& v, const wg_source& f, int32_t chunk,
                                               int32_t count) {
    if ((int32_t)threadIdx.x % 32 / 16 * 2 >= count) {
        return;
    }
    if (f.q) {
        v.q = __ldg((const uint16_t*)(f.q + f.at + chunk));
        v.s[0] = __ldg(f.scales + ((f.at + chunk) >> f.group));
    } else {
        float2 s = __ldg((const float2*)(f.scales + f.at + chunk));
        v.s[0] = s.x;
        v.s[1] = s.y;
    }
}

__device__ __forceinline__ void wg_arrive(wg_scales& v, const wg_source& f, const uint8_t* table) {
    const float* map = (const float*)(table + MANY_TABLE);
    if (f.q) {
        float s = v.s[0];
        v.s[0] = __fadd_rn(__fmul_rn(map[v.q & 255u], s), f.middle);
        v.s[1] = __fadd_rn(__fmul_rn(map[v.q >> 8 & 255u], s), f.middle);
    }
}

// Requests the codes of two chunks for this warp. Pieces are placed so that no bank conflicts occur
// when they are read: piece u of row r is at u ^ (r & 2).
__device__ __forceinline__ void wg_request_codes(const wg_source& f, uint32_t stage,
                                                 int32_t chunk) {
    int32_t lane = (int32_t)threadIdx.x % 32;
    uint32_t to = stage + 2 * WG_PANEL + (uint32_t)(threadIdx.x / 32) * WG_CODES +
                  (uint32_t)(lane / 4 * 64 + (lane % 4 ^ (lane / 4 & 2)) * 16);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + r * 512),
                     "l"(f.codes[r] + chunk * 32)
                     : "memory");
    }
}

// Requests two chunks of x. Rows that do not exist repeat the last one.
__device__ __forceinline__ void wg_request(const decode_product& p, uint32_t stage,
                                           int32_t first_row, int32_t rows, int32_t chunk) {
#pragma unroll
    for (int i = 0; i < MANY_ROWS * 16 / MANY_THREADS; i++) {
        int32_t row = (int32_t)threadIdx.x / 16 + i * (MANY_THREADS / 16);
        int32_t unit = (int32_t)threadIdx.x % 16;
        const bf16* from =
            p.x + (first_row + (row < rows ? row : rows - 1)) * p.ldx + chunk * 64 + unit * 8;
        uint32_t to = stage + unit / 8 * WG_PANEL + row * PANEL_ROW + ((unit ^ row) & 7) * 16;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    }
}

// A stage is there; one more is requested, in the place of the stage before the last one: products
// of the last one may still run.
__device__ __forceinline__ void wg_turn(const decode_product& p, const wg_source& f,
                                        uint32_t stages, int32_t first_row, int32_t rows,
                                        wg_span span, int32_t stage) {
    asm volatile("cp.async.wait_group %0;" ::"n"(WG_STAGES - 3) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    int32_t ahead = stage + WG_STAGES - 2;
    if (ahead * 2 < span.chunks) {
        uint32_t to = stages + ahead % WG_STAGES * WG_STAGE;
        wg_request_codes(f, to, span.start + ahead * 2);
        wg_request(p, to, first_row, rows, span.start + ahead * 2);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Byte t of the words of the four lanes of a row, in lane t.
__device__ __forceinline__ uint32_t wg_exchange(uint32_t word) {
    bool odd = threadIdx.x % 2 != 0;
    bool upper = threadIdx.x % 4 > 1;
    uint32_t other = __shfl_xor_sync(QLORA_FULL_WARP, word, 1);
    word = __byte_perm(word, other, odd ? 0x3715u : 0x6240u);
    other = __shfl_xor_sync(QLORA_FULL_WARP, word, 2);
    return __byte_perm(word, other, upper ? 0x3276u : 0x5410u);
}

// d = a b^T (+ d, if add is not 0), with a in registers.
__device__ __forceinline__ void wg_multiply(float (&d)[32], const uint32_t* a, uint64_t b,
                                            int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" HOPPER_LIST_32
                 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
                 : HOPPER_D16(0), HOPPER_D16(16)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

// Looks up chunk b of a stage.
__device__ __forceinline__ void wg_levels(const uint8_t* stage, const uint8_t* table, int32_t b,
                                          uint32_t (&a)[4][4]) {
    int32_t lane = (int32_t)threadIdx.x % 32;
    const uint8_t* codes = stage + 2 * WG_PANEL + threadIdx.x / 32 * WG_CODES + lane / 4 * 64 +
                           (2 * b ^ (lane / 4 & 2)) * 16 + lane % 4 * 8;
    uint2 own[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        uint2 v = *(const uint2*)(codes + r * 512);
        own[r] = make_uint2(wg_exchange(v.x), wg_exchange(v.y));
    }
#pragma unroll
    for (int i = 0; i < 16; i++) {
        uint32_t word = i % 4 < 2 ? own[i % 2].x : own[i % 2].y;
        a[i / 4][i % 4] = many_pair(table, word, (uint32_t)i / 4, (uint32_t)lane * 4);
    }
}

// Begins the product of a chunk.
__device__ __forceinline__ void wg_begin(const uint32_t (&a)[4][4], uint32_t x, float (&d)[32]) {
    products_begin();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        wg_multiply(d, a[i], operand(x + i * 32, 16), i);
    }
    products_commit();
}

QLORA_KERNEL __launch_bounds__(MANY_THREADS, 1)
    qlora_decode_many_wg(const __grid_constant__ decode_many m) {
    extern __shared__ __align__(128) uint8_t room[];
    __shared__ int32_t last;
    uint8_t* shared = room + (SWIZZLE_BYTES - shared_address(room) % SWIZZLE_BYTES) % SWIZZLE_BYTES;
    const decode_product& p = m.p;
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t first_row = (int32_t)blockIdx.z * MANY_ROWS;
    int32_t rows = p.rows - first_row < MANY_ROWS ? p.rows - first_row : MANY_ROWS;
    wg_span span;
    span.start = (int32_t)blockIdx.y * m.each;
    span.chunks = p.K / 64 - span.start;
    span.chunks = span.chunks < m.each ? span.chunks : m.each;
    uint8_t* table = shared + WG_STAGES * WG_STAGE;
    uint32_t stages = shared_address(shared);
    bf16* zs = (bf16*)(table + MANY_TABLE + MANY_MAP);
    many_tile tile = many_find(p, (int32_t)threadIdx.x / 32);
    wg_source source = wg_find(tile, p.K);
    // It is long because requests and their use belong to one loop.
    wg_scales next;
    early_next();
#pragma unroll
    for (int i = 0; i < WG_STAGES - 2; i++) {
        if (i * 2 < span.chunks) {
            wg_request_codes(source, stages + i * WG_STAGE, span.start + i * 2);
        }
    }
    wg_load_scales(next, source, span.start, span.chunks);
    many_tables(p, table);
    many_prefetch(p, tile);
    early_wait();
#pragma unroll
    for (int i = 0; i < WG_STAGES - 2; i++) {
        if (i * 2 < span.chunks) {
            wg_request(p, stages + i * WG_STAGE, first_row, rows, span.start + i * 2);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    if (p.low) {
        many_gather(p, first_row, rows, zs);
    }
    float acc[MANY_ROWS / 8][4];
    float d[32];
    uint32_t a[2][4][4]; // of even chunks and of odd ones
#pragma unroll
    for (int i = 0; i < 32; i++) {
        acc[i / 4][i % 4] = 0.0f;
    }
    wg_turn(p, source, stages, first_row, rows, span, 0); // also the tables, and z
    wg_levels(shared, table, 0, a[0]);
#pragma unroll 1
    for (int32_t c = 0; c < span.chunks; c += 4) {
        wg_scales now = next;
        wg_arrive(now, source, table);
        if (c + 4 < span.chunks) {
            wg_load_scales(next, source, span.start + c + 4, span.chunks - c - 4);
        }
#pragma unroll
        for (int b = 0; b < 4; b++) {
            if (c + b < span.chunks) {
                int32_t stage = (c + b) / 2 % WG_STAGES;
                wg_begin(a[b % 2], stages + stage * WG_STAGE + b % 2 * WG_PANEL, d);
                if (b % 2 == 0) {
                    wg_levels(shared + stage * WG_STAGE, table, 1, a[1]);
                } else if (c + b + 1 < span.chunks) {
                    wg_turn(p, source, stages, first_row, rows, span, (c + b + 1) / 2);
                    wg_levels(shared + (c + b + 1) / 2 % WG_STAGES * WG_STAGE, table, 0, a[0]);
                }
                float s0 = __shfl_sync(QLORA_FULL_WARP, now.s[b % 2], b / 2 * 16 + lane / 4);
                float s1 = __shfl_sync(QLORA_FULL_WARP, now.s[b % 2], b / 2 * 16 + lane / 4 + 8);
                products_wait<0>();
                products_hold(d);
#pragma unroll
                for (int i = 0; i < 32; i++) {
                    acc[i / 4][i % 4] += (i % 4 < 2 ? s0 : s1) * d[i];
                }
            }
        }
    }
    many_end(m, acc, (float*)shared, zs, first_row, rows, &last);
}
