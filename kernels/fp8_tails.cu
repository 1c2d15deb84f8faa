// fp8_tails.cu - operands of FP8 products together with what an adapter makes of them: both read
// the largest matrices of a layer.
// targets: 90a
// groups: bf16 fp8
//
//   forward:   s = act(g) u, its codes and scales instead of itself     z = s A^T     [rows, rank]
//   backward:  the codes and scales of d = dgate, dup                   u = d B
//
// Codes and scales are those of qlora_fp8_quantise: scale = max(max |x[r,:]| / 448, 1e-30), codes
// e4m3(x / scale), with a pitch of ldq bytes, a multiple of 16, and scales[r] = scale * factor[0].
// All matrices are bf16; s and d are rounded to it. cols, ranks and leading dimensions are multiples
// of 8, and all rows begin at multiples of 16 bytes. Ranks are at most 16.
//
//   before:    y = z B^T, or y = u A: what the product of the base is added to
//
// The first two multiply columns in the order in which a thread has them, as in tails.cu: 8 neighbouring
// ones, which are those of two m16n8k16 products.
#include "elementwise.cuh"
#include "fp8.cuh"
#include "tiles.cuh"

enum {
    SIDE = 2,              // groups of 8 ranks of an adapter
    LINE = SIDE * 16 + 16, // bytes of a row of B in shared memory: an odd number of 16
    TALL = 128,            // rows of a block of the backward kernel, 16 for each warp
    WIDE = 128,            // columns of its steps
    PIECE = 1024,          // of a block
    GROUP = 8,             // rows of a block of the forward kernel, two warps for each
    STEP = 512,            // columns of its steps
    STAGES = 4,            // steps that it has, or are on their way
    SLOT = 512 * 32,       // bytes of a step of gate and up
    RING = STAGES * SLOT,
    WARPS = 16             // that it has
};

// Two pieces of 8 columns of the rows that a thread has, 8 below each other.
struct pair {
    uint4 upper;
    uint4 lower;
};

// sums += x f, where f has 8 columns of x's piece of one of 8 ranks.
__device__ __forceinline__ void add_product(float (&sums)[4], const pair& x, uint4 f) {
    const uint32_t first[4] = {x.upper.x, x.lower.x, x.upper.y, x.lower.y};
    const uint32_t second[4] = {x.upper.z, x.lower.z, x.upper.w, x.lower.w};
    multiply(sums, first, f.x, f.y);
    multiply(sums, second, f.z, f.w);
}

// A row of 8 ranks of B: to shared memory in the order in which add_product counts columns.
__device__ __forceinline__ uint32_t line_at(uint32_t col, uint32_t half) {
    uint32_t line = col % 8 / 2 * 8 + col % 32 / 8 * 2 + col % 2;
    return (col / 32 * 32 + line) * LINE + half * 16;
}

// A thread's columns of a step: 8 of every 32, of two rows.
struct columns {
    pair v[4];
    __device__ __forceinline__ void load(const bf16* p, int32_t ld, int32_t left,
                                         const bool (&has)[2]) {
        const uint4 zero = make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            bool inside = left > 32 * i;
            v[i].upper = has[0] && inside ? *(const uint4*)(p + 32 * i) : zero;
            v[i].lower = has[1] && inside ? *(const uint4*)(p + 8 * (int64_t)ld + 32 * i) : zero;
        }
    }
};

// d [rows, cols] has parts of `part` columns, one after the other, each with its own rank; each has
// `pieces` pieces of 1024 columns. most [rows] has the largest magnitudes. B is [cols, ranks], where
// the rows of the second part have their numbers rank0 columns later. sums f32 [all pieces, rows,
// 16] gets what each piece adds to u.
// Launch: grid (ceil(rows / 128), all pieces), 256 threads. A warp has 16 rows; all of them share the
// rows of B of their piece, and wait for each other only until those have come.
// Determinism: the columns of a piece are added in their order; qlora_fp8_u_sum adds the pieces in
// theirs.
QLORA_KERNEL __launch_bounds__(256, 2)
    qlora_fp8_quantise_u(const bf16* d, int32_t ldd, int64_t rows, int32_t cols, int32_t part,
                         int32_t pieces, const float* most, const float* factor, uint8_t* q,
                         int64_t ldq, float* scales, const bf16* b, int32_t ldb, int32_t rank0,
                         int32_t rank1, float* sums) {
    __shared__ __align__(128) uint8_t shared[PIECE * LINE];
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t side = (int32_t)blockIdx.y / pieces;
    int32_t first = side * part + (int32_t)blockIdx.y % pieces * PIECE;
    int32_t end = min(first + PIECE, (side + 1) * part);
    int32_t until = end == cols ? (int32_t)ldq : end; // codes up to there, then zeros
    int32_t rank = side == 0 ? rank0 : rank1;
    int64_t row = (int64_t)blockIdx.x * TALL + (int32_t)threadIdx.x / 32 * 16 + lane / 4;
    const bool has[2] = {row < rows, row + 8 < rows};
    uint32_t lines = (uint32_t)__cvta_generic_to_shared(shared);
    b += side == 0 ? 0 : rank0;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < PIECE * SIDE; i += 256) {
        int32_t line = first + (int32_t)(i / SIDE);
        int32_t at = (int32_t)(i % SIDE) * 8;
        bool used = line < end && at < rank;
        copy16_or_zero(lines + line_at(i / SIDE, i % SIDE),
                       b + (used ? (int64_t)line * ldb + at : 0), used ? 16 : 0);
    }
    copy_commit();
    int32_t at = first + lane % 4 * 8;
    const bf16* from = d + row * ldd + at;
    uint8_t* to = q + row * ldq + at;
    columns next;
    next.load(from, ldd, end - at, has);
    float inverse[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (has[i]) {
            float scale = fp8_scale(most[row + 8 * i]);
            inverse[i] = __frcp_rn(scale);
            if (blockIdx.y == 0 && lane % 4 == 0) {
                scales[row + 8 * i] = __fmul_rn(scale, *factor);
            }
        }
    }
    float total[SIDE][4] = {};
    copy_wait<0>();
    __syncthreads();
    lines += (uint32_t)(lane * LINE);
#pragma unroll 1
    for (; first < until; first += WIDE) {
        columns x = next;
        from += WIDE;
        next.load(from, ldd, end - at - WIDE, has);
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int n = 0; n < SIDE; n++) {
                uint32_t f[4];
                load_transposed(f, lines + (uint32_t)(i * 32 * LINE + n * 16));
                add_product(total[n], x.v[i], make_uint4(f[0], f[1], f[2], f[3]));
            }
            if (has[0] && at + 32 * i < until) {
                *(uint2*)(to + 32 * i) = codes_of(x.v[i].upper, inverse[0]);
            }
            if (has[1] && at + 32 * i < until) {
                *(uint2*)(to + 8 * ldq + 32 * i) = codes_of(x.v[i].lower, inverse[1]);
            }
        }
        lines += WIDE * LINE;
        to += WIDE;
        at += WIDE;
    }
    float* sum = sums + ((int64_t)blockIdx.y * rows + row) * SIDE * 8 + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < SIDE; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (has[i]) {
                *(float2*)(sum + i * 8 * SIDE * 8 + n * 8) =
                    make_float2(total[n][2 * i], total[n][2 * i + 1]);
            }
        }
    }
}

// u[r, :] = the sums of the pieces of a part, in their order, rounded; those of the second part
// after those of the first. Launch: 256 threads, grid ceil(rows * (rank0 + rank1) / 256).
QLORA_KERNEL __launch_bounds__(256)
    qlora_fp8_u_sum(const float* sums, int64_t rows, int32_t pieces, int32_t rank0, int32_t rank1,
                    bf16* u, int64_t ldu) {
    int32_t ranks = rank0 + rank1;
    int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    int64_t row = i / ranks;
    int32_t rank = (int32_t)(i % ranks);
    int32_t side = rank < rank0 ? 0 : 1;
    if (row >= rows) {
        return;
    }
    const float* from = sums + ((int64_t)side * pieces * rows + row) * SIDE * 8 + rank -
                        (side == 0 ? 0 : rank0);
    float v = 0.0f;
#pragma unroll 4
    for (int32_t p = 0; p < pieces; p++) {
        v += from[(int64_t)p * rows * SIDE * 8];
    }
    store(u + row * ldu + rank, v);
}

// The sigmoid of bf16 with fewer instructions and the same bits: its divisor is at least 1.
struct fast_number {};

__device__ __forceinline__ float sigmoid(float x, const fast_number*) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + exp_of(-x, (const bf16*)0)));
    return y;
}

// The activation of 8 columns, as in elementwise.cuh.
__device__ __forceinline__ uint4 gated_forward(uint4 raw_g, uint4 raw_u, bool gelu) {
    float gate[8];
    float up[8];
    float at[8];
    unpack(raw_g, gate);
    unpack(raw_u, up);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        at[i] = gate[i];
    }
    if (gelu) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float g = gate[i];
            at[i] = 1.5957691216057308f * (g + 0.044715f * g * g * g);
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        gate[i] = gate[i] * sigmoid(at[i], (const fast_number*)0) * up[i];
    }
    return pack(gate);
}

// u begins `up` columns after g; gelu: the activation is GELU in its tanh form, otherwise SiLU. s is
// not stored.
// Launch: 512 threads, grid.x any number of blocks, which take 8 rows in turn; dynamic shared
// memory: RING, and 8 rows of s, each of cols * 2 bytes rounded up to 128, and 64, so that the rows
// that a quarter of a warp reads are in different banks; at least 8192. Two warps make a row of s,
// 512 columns at a time; each warp multiplies 32 of those of all rows, the ranks as rows of the first
// operand.
// When s is there, its codes are written, and its sums added where it was.
// Determinism: that of qlora_tails_gated, and the same z: a warp adds its columns of all steps in
// their order; the sums of the 16 warps are added in theirs.
QLORA_KERNEL __launch_bounds__(512, 1)
    qlora_fp8_gated(const bf16* g, int32_t ld, int32_t up, const float* factor, uint8_t* q,
                    int64_t ldq, float* scales, const bf16* a, int32_t lda, bf16* z, int64_t ldz,
                    int64_t rows, int32_t cols, int32_t rank, int32_t gelu) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ float mosts[WARPS];
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t warp = (int32_t)threadIdx.x / 32;
    int32_t pitch = (cols * 2 + 127) / 128 * 128 + 64;
    int32_t col = warp % 2 * (STEP / 2) + lane * 8; // of a step
    uint8_t* own = shared + RING + warp / 2 * pitch + col * 2;
    const uint8_t* other = shared + RING + lane / 4 * pitch + warp * 64 + lane % 4 * 16;
    const bf16* ranks = a + lane / 4 * lda + warp * 32 + lane % 4 * 8;
    int32_t wide = cols - warp * 32 - lane % 4 * 8; // columns of A from there to the end
    int64_t row = (int64_t)blockIdx.x * GROUP + warp / 2;
    // What is requested next: the columns of a row, then those of the row of the next group.
    uint32_t ring = (uint32_t)__cvta_generic_to_shared(shared) + threadIdx.x * 32;
    uint32_t put = 0;
    uint32_t get = 0;
    int64_t ask_row = row;
    int32_t ask = 0;
    uint4 f[SIDE];
#define REQUEST()                                                                                  \
    {                                                                                              \
        bool inside = ask_row < rows && ask + col < cols;                                          \
        const bf16* from = g + (inside ? ask_row * ld + ask + col : 0);                            \
        copy16_or_zero(ring + put, from, inside ? 16 : 0);                                         \
        copy16_or_zero(ring + put + 16, from + (inside ? up : 0), inside ? 16 : 0);                \
        copy_commit();                                                                             \
        put = put == RING - SLOT ? 0 : put + SLOT;                                                 \
        ask += STEP;                                                                               \
        if (ask >= cols) {                                                                         \
            ask = 0;                                                                               \
            ask_row += (int64_t)gridDim.x * GROUP;                                                 \
        }                                                                                          \
    }
#define FACTORS(at)                                                                                \
    _Pragma("unroll") for (int n = 0; n < SIDE; n++) {                                             \
        f[n] = n * 8 < rank && wide > (at) ? *(const uint4*)(ranks + n * 8 * lda + (at))           \
                                           : make_uint4(0, 0, 0, 0);                               \
    }
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; i++) {
        REQUEST()
    }
    FACTORS(0)
#pragma unroll 1
    for (int64_t group = blockIdx.x; group * GROUP < rows; group += gridDim.x) {
        float sums[4] = {};
        float most = 0.0f;
        row = group * GROUP + warp / 2;
#pragma unroll 1
        for (int32_t at = 0; at < cols; at += STEP) {
            copy_wait<STAGES - 2>(); // a thread reads what it has requested itself
            const uint8_t* from = shared + get + threadIdx.x * 32;
            uint4 s = gated_forward(*(const uint4*)from, *(const uint4*)(from + 16), gelu != 0);
            get = get == RING - SLOT ? 0 : get + SLOT;
            REQUEST()
            most = largest_of(s, most);
            if (at + col < cols) {
                *(uint4*)(own + at * 2) = s;
            }
            __syncthreads();
            s = wide > at ? *(const uint4*)(other + at * 2) : make_uint4(0, 0, 0, 0);
            const uint32_t first[4] = {f[0].x, f[1].x, f[0].y, f[1].y};
            const uint32_t second[4] = {f[0].z, f[1].z, f[0].w, f[1].w};
            multiply(sums, first, s.x, s.y);
            multiply(sums, second, s.z, s.w);
            int32_t then = at + STEP < cols ? at + STEP : 0; // those of the next step
            FACTORS(then)
        }
        most = warp_max(most);
        if (lane == 0) {
            mosts[warp] = most;
        }
        __syncthreads();
        float scale = fp8_scale(fmaxf(mosts[warp & ~1], mosts[warp | 1]));
        float inverse = __frcp_rn(scale);
        if (row < rows) {
            if (lane == 0 && warp % 2 == 0) {
                scales[row] = __fmul_rn(scale, *factor);
            }
            int32_t first = warp % 2 * 256 + lane * 8;
            const uint8_t* from = shared + RING + warp / 2 * pitch;
            uint8_t* to = q + row * ldq;
#pragma unroll 4
            for (int32_t at = first; at < ldq; at += 512) {
                uint4 s = at < cols ? *(const uint4*)(from + at * 2) : make_uint4(0, 0, 0, 0);
                *(uint2*)(to + at) = codes_of(s, inverse);
            }
        }
        __syncthreads(); // s is no longer needed
        float* total = (float*)(shared + RING); // [warps, rank 16, rows]
#pragma unroll
        for (int e = 0; e < 4; e++) {
            total[(warp * 16 + lane / 4 + e / 2 * 8) * GROUP + lane % 4 * 2 + e % 2] = sums[e];
        }
        __syncthreads();
        int32_t r = (int32_t)threadIdx.x / 16;
        int32_t n = (int32_t)threadIdx.x % 16;
        if (r < GROUP && n < rank && group * GROUP + r < rows) {
            float v = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                v += total[(w * 16 + n) * GROUP + r];
            }
            store(z + (group * GROUP + r) * ldz + n, v);
        }
        __syncthreads();
    }
}

enum {
    SHARE_ROWS = 128, // of a block
    SHARE_COLS = 256, // 32 for each warp
    SHARE_DEPTH = 3   // most steps of 16 ranks
};

// y[r,c] = sum over k of z[r,k] b[c,k], or, turned, of z[r,k] b[k,c], rounded. z has `depth` columns,
// at most 48. Launch: grid (ceil(cols / 256), ceil(rows / 128)), 256 threads. A warp has 32 columns
// and keeps their b; the columns of its four products are in such an order that a thread has 8
// neighbouring ones. One writer per output; sums in the order of m16n8k16 products.
QLORA_KERNEL __launch_bounds__(256)
    qlora_fp8_share(const bf16* z, int32_t ldz, const bf16* b, int32_t ldb, int32_t turned, bf16* y,
                    int64_t ldy, int64_t rows, int32_t cols, int32_t depth) {
    __shared__ __align__(128) uint8_t shared[SHARE_ROWS * (SHARE_DEPTH * 32 + 16)];
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t col0 = (int32_t)blockIdx.x * SHARE_COLS + (int32_t)threadIdx.x / 32 * 32;
    int32_t k0 = lane % 4 * 2;
    int32_t steps = (depth + 15) / 16;
    int32_t pitch = steps * 32 + 16; // so that the rows that ldmatrix reads are in different banks
    int64_t row0 = (int64_t)blockIdx.y * SHARE_ROWS;
    int32_t left = (int32_t)min(rows - row0, (int64_t)SHARE_ROWS);
    uint32_t tile = (uint32_t)__cvta_generic_to_shared(shared);
#pragma unroll 1
    for (int32_t i = (int32_t)threadIdx.x; i < SHARE_ROWS * steps * 8; i += 256) {
        int32_t k = i % (steps * 8) * 2; // two ranks of a row
        int32_t r = i / (steps * 8);
        uint32_t two = r < left && k < depth ? *(const uint32_t*)(z + (row0 + r) * ldz + k) : 0;
        *(uint32_t*)(shared + r * pitch + k * 2) = two;
    }
    uint32_t f[SHARE_DEPTH][4][2];
#pragma unroll
    for (int s = 0; s < SHARE_DEPTH; s++) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int32_t c = col0 + lane / 8 * 8 + i / 2 * 2 + lane / 4 % 2;
            int32_t k = s * 16 + i % 2 * 8 + k0;
            f[s][i / 2][i % 2] = 0;
            if (k < depth && c < cols) {
                f[s][i / 2][i % 2] =
                    turned != 0 ? b[(int64_t)k * ldb + c].bits |
                                      (uint32_t)b[(int64_t)(k + 1) * ldb + c].bits << 16
                                : *(const uint32_t*)(b + (int64_t)c * ldb + k);
            }
        }
    }
    __syncthreads();
    bf16* to = y + (row0 + lane / 4) * ldy + col0 + lane % 4 * 8;
    bool inside = col0 + lane % 4 * 8 < cols;
    uint32_t from = tile + (uint32_t)(lane % 16 * pitch + lane / 16 * 16);
    left -= lane / 4;
#pragma unroll 1
    for (int32_t r = 0; r - lane / 4 < left; r += 16) {
        float sums[4][4] = {};
#pragma unroll
        for (int s = 0; s < SHARE_DEPTH; s++) {
            if (s < steps) {
                uint32_t a[4];
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                             : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                             : "r"(from + (uint32_t)(s * 32))
                             : "memory");
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    multiply(sums[n], a, f[s][n][0], f[s][n][1]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (r + i * 8 < left && inside) {
                *(uint4*)(to + i * 8 * ldy) =
                    make_uint4(pack_bf16(sums[0][2 * i], sums[0][2 * i + 1]),
                               pack_bf16(sums[1][2 * i], sums[1][2 * i + 1]),
                               pack_bf16(sums[2][2 * i], sums[2][2 * i + 1]),
                               pack_bf16(sums[3][2 * i], sums[3][2 * i + 1]));
            }
        }
        from += (uint32_t)(16 * pitch);
        to += 16 * ldy;
    }
}
