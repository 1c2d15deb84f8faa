// decode_many_wg.cu - products of many rows with NF4 weights, for decoding, with the warpgroup
// instructions of compute capability 9.0.
// targets: 90a
// groups: bf16 nf4
#include "decode_many.cuh"
#include "hopper.cuh"

// Formula, arguments, splits and results are those of decode_many.cuh. A warp has one tile of 16
// rows of W, which become the first operand of m64n64k16 in registers; the second one, x, stays in
// shared memory, with the 128-byte swizzle, two chunks of 64 columns per stage. k is not permuted:
// the four lanes of a row exchange bytes of codes, so that each of them has those of its columns.
// Codes are read two chunks at a time, 64 bytes of a row, and at least two chunks ahead. Lane i has
// the scales of row i % 16, lanes below 16 those of the first two of four chunks.
//
// Launch: grid (tiles, splits, groups of 64 rows), 512 threads, WG_SHARED bytes of dynamic shared
// memory, and z after them if it is in partial sums. K is a multiple of 128, and scales belong to blocks of 64.
enum {
    WG_PANEL = MANY_ROWS * PANEL_ROW,
    WG_STAGE = 2 * WG_PANEL,
    WG_SHARED = SWIZZLE_BYTES + MANY_STAGES * WG_STAGE + MANY_TABLE + MANY_MAP
};

// The chunks of a split: start, and how many.
struct wg_span {
    int32_t start;
    int32_t chunks;
};

struct wg_source {
    const uint8_t* codes[2]; // rows g and g + 8
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
    f.codes[0] = (const uint8_t*)w.w + many_row(t, lane / 4) * (K / 2) + lane % 4 * 8;
    f.codes[1] = (const uint8_t*)w.w + many_row(t, lane / 4 + 8) * (K / 2) + lane % 4 * 8;
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

// A stage of x is there, and that of the last one is free; one more is requested.
__device__ __forceinline__ void wg_turn(const decode_product& p, uint32_t stages,
                                        int32_t first_row, int32_t rows, wg_span span,
                                        int32_t stage) {
    asm volatile("cp.async.wait_group %0;" ::"n"(MANY_STAGES - 2) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    int32_t ahead = stage + MANY_STAGES - 1;
    if (ahead * 2 < span.chunks) {
        wg_request(p, stages + ahead % MANY_STAGES * WG_STAGE, first_row, rows,
                   span.start + ahead * 2);
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

// Begins the product of a chunk.
__device__ __forceinline__ void wg_begin(const uint2* codes, const uint8_t* table, uint32_t x,
                                         uint32_t (*a)[4], float (&d)[32]) {
    uint32_t lane4 = threadIdx.x % 32 * 4;
    uint2 own[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        own[r] = make_uint2(wg_exchange(codes[r].x), wg_exchange(codes[r].y));
    }
#pragma unroll
    for (int i = 0; i < 16; i++) {
        uint32_t word = i % 4 < 2 ? own[i % 2].x : own[i % 2].y;
        a[i / 4][i % 4] = many_pair(table, word, (uint32_t)i / 4, lane4);
    }
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
    int32_t warp = (int32_t)threadIdx.x / 32;
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t first_row = (int32_t)blockIdx.z * MANY_ROWS;
    int32_t rows = p.rows - first_row < MANY_ROWS ? p.rows - first_row : MANY_ROWS;
    wg_span span;
    span.start = (int32_t)blockIdx.y * m.each;
    span.chunks = p.K / 64 - span.start;
    span.chunks = span.chunks < m.each ? span.chunks : m.each;
    uint8_t* table = shared + MANY_STAGES * WG_STAGE;
    uint32_t stages = shared_address(shared);
    bf16* zs = (bf16*)(table + MANY_TABLE + MANY_MAP);
    many_tile tile = many_find(p, warp);
    wg_source source = wg_find(tile, p.K);
    // It is long because requests and their use belong to one loop.
    uint2 codes[4][2];
    wg_scales next;
    early_next();
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (i / 2 < span.chunks) {
            codes[i / 2][i % 2] =
                __ldg((const uint2*)(source.codes[i % 2] + (span.start + i / 2) * 32));
        }
    }
    wg_load_scales(next, source, span.start, span.chunks);
    many_tables(p, table);
    many_prefetch(p, tile);
    early_wait();
#pragma unroll
    for (int i = 0; i < MANY_STAGES - 1; i++) {
        if (i * 2 < span.chunks) {
            wg_request(p, stages + i * WG_STAGE, first_row, rows, span.start + i * 2);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    if (p.low) {
        many_gather(p, first_row, rows, zs);
    }
    float acc[MANY_ROWS / 8][4];
#pragma unroll
    for (int i = 0; i < 32; i++) {
        acc[i / 4][i % 4] = 0.0f;
    }
    __syncthreads(); // the tables, and z
#pragma unroll 1
    for (int32_t c = 0; c < span.chunks; c += 4) {
        wg_scales now = next;
        wg_arrive(now, source, table);
        if (c + 4 < span.chunks) {
            wg_load_scales(next, source, span.start + c + 4, span.chunks - c - 4);
        }
#pragma unroll
        for (int b = 0; b < 4; b++) {
            if (c + b < span.chunks) { // the number of chunks is even
                int32_t stage = (c + b) / 2;
                if (b % 2 == 0) {
                    wg_turn(p, stages, first_row, rows, span, stage);
                }
                uint32_t a[4][4];
                float d[32];
                wg_begin(codes[b], table,
                         stages + stage % MANY_STAGES * WG_STAGE + b % 2 * WG_PANEL, a, d);
                if (b % 2 == 1 && c + b + 4 < span.chunks) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        codes[b - 1 + i / 2][i % 2] =
                            __ldg((const uint2*)(source.codes[i % 2] +
                                                 (span.start + c + b + 3 + i / 2) * 32));
                    }
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
