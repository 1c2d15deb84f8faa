// gated.cu - the backward pass of a gated activation together with the gradients of the adapters
// that read its tiles: those would read three matrices as large as the activation once more.
// targets: 80
// groups: bf16 train
//
//   dg = dh u act'(g)      du = dh act(g)      s = act(g) u, rounded to bf16, not stored
//   P0 = zg^T dg           P1 = zu^T du        P2 = ud^T s          [rank, cols], sums over rows
//
// dh, g and u are [rows, cols] bf16; u begins `up` columns after g; dg overwrites g and du
// overwrites u. zg, zu and ud are [rows, rank]: what the A of gate and up made of their input, and
// what the B of down made of its gradient. cols, ranks and leading dimensions are multiples of 8,
// and matrices begin at multiples of 16 bytes. Ranks are at most 16 and may be 0. If `most` is not
// null, most[r] is raised to the largest magnitude of the rounded dg[r,:] and du[r,:]. If `a`
// [rd, cols] is not null, dh + ud a, rounded to bf16, takes the place of dh.
//
// Launch: grid (ceil(cols / 128), splits), 256 threads, dynamic shared memory RING + R LINE. A
// block has a strip of 128 columns and the `each` rows (a multiple of 32) of one split, 32 rows at
// a time: four warps side by side on the first 16 of them, four on the others. A thread computes 4
// rows and 4 columns of a step, those that an m16n8k16 product wants as its second operand, so that
// dg, du and s go from registers to the tensor cores.
// Determinism: the sums of the upper and the lower warps are added in that order and stored in
// parts [splits, 3, 16, cols]; qlora_linear_gated_sum adds the splits in their order. A maximum
// does not depend on the order.
#include "../layer/elementwise.cuh"
#include "../tiles.cuh"

enum {
    R = 16, // ranks are padded to it
    C = 4,  // columns of a thread
    STAGES = 3,
    WARPS = 8,
    STEP = 32,             // rows
    PART = 16 * 8 * C * 2, // bytes of a warp's tile of dh, g or u
    TILE = WARPS * PART,   // of those of all warps
    FACTOR = STEP * R * 2, // of zg, zu or ud
    STAGE = 3 * (TILE + FACTOR),
    RING = STAGES * STAGE,
    LINE = 32 * C * 2 + 16, // bytes of a row of a: an odd number of 16
    SUMS = 3 * C * 4 // of a thread
};
static_assert(WARPS * SUMS * 128 <= RING, "the sums of all threads fit in the ring");

// The sigmoid of bf16 with fewer instructions and the same bits: its divisor is at least 1.
struct gated_number {};

__device__ __forceinline__ float sigmoid(float x, const gated_number*) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + exp_of(-x, (const bf16*)0)));
    return y;
}

// Byte offset of 8 columns of a row in a warp's tile: the rows 2q that the lanes of a quarter read
// together, and so 2q + 1 and the ones 8 below, are in different banks.
__device__ __forceinline__ int32_t tile_at(int32_t row, int32_t chunk) {
    int32_t line = (row & 8) | (row & 1) << 2 | (row >> 1 & 3);
    return line * 16 * C + ((chunk ^ (line & 2)) << 4);
}

// Byte offset of 8 columns of a row of a factor: the eight rows that one ldmatrix reads are in
// different banks.
__device__ __forceinline__ int32_t factor_at(int32_t row, int32_t chunk) {
    return row * R * 2 + ((chunk ^ (row >> 2 & 1)) << 4);
}

#define GATED_PARAMETERS                                                                           \
    const bf16 *dh, int32_t ldd, bf16 *g, int32_t ld, int32_t up, int64_t rows, int64_t cols,      \
        int32_t each, const bf16 *zg, int32_t ldzg, int32_t rg, const bf16 *zu, int32_t ldzu,      \
        int32_t ru, const bf16 *ud, int32_t ldud, int32_t rd, float *parts
#define GATED_ARGUMENTS                                                                            \
    dh, ldd, g, ld, up, rows, cols, each, zg, ldzg, rg, zu, ldzu, ru, ud, ldud, rd, parts

// What a thread copies: 8 columns of two rows of a step, 16 below each other, and of a row of a
// factor; and where to.
struct gated_source {
    const bf16* d;
    const bf16* g;
    const bf16* z;
    int32_t ldd;
    int32_t ld;
    int32_t up;
    int32_t ldz;
    int32_t rows; // from the thread's first row to the end; none beyond the columns
    int32_t more; // the same of the factor; none beyond the rank
    uint32_t place;
    uint32_t place_z;

    // row and col: the first ones of the block; left: its rows.
    __device__ __forceinline__ gated_source(GATED_PARAMETERS, int64_t row, int64_t col,
                                            int32_t left) {
        int32_t at = (int32_t)threadIdx.x / 16;
        int32_t chunk = (int32_t)threadIdx.x % 16;
        this->ldd = ldd;
        this->ld = ld;
        this->up = up;
        this->rows = col + chunk * 8 < cols ? left - at : 0;
        this->d = dh + (this->rows > 0 ? (row + at) * ldd + col + chunk * 8 : 0);
        this->g = g + (this->rows > 0 ? (row + at) * ld + col + chunk * 8 : 0);
        place = (uint32_t)(chunk / C * PART + tile_at(at, chunk % C));
        int32_t p = (int32_t)threadIdx.x / (2 * STEP);
        int32_t line = (int32_t)threadIdx.x / 2 % STEP;
        int32_t half = (int32_t)threadIdx.x % 2;
        int32_t rank = p == 0 ? rg : p == 1 ? ru : p == 2 ? rd : 0;
        const bf16* base = p == 0 ? zg : p == 1 ? zu : ud;
        ldz = p == 0 ? ldzg : p == 1 ? ldzu : ldud;
        more = half * 8 < rank ? left - line : 0;
        z = more > 0 ? base + (row + line) * ldz + half * 8 : dh;
        place_z = (uint32_t)(3 * TILE + p * FACTOR + factor_at(line, half));
    }

    // Requests the next step, whose first row is `at`; what does not exist becomes zero.
    __device__ __forceinline__ void request(uint32_t to, int32_t at) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int32_t bytes = at + i * 16 < rows ? 16 : 0;
            const bf16* from_d = bytes > 0 ? d + (int64_t)i * 16 * ldd : d;
            const bf16* from_g = bytes > 0 ? g + (int64_t)i * 16 * ld : g;
            // The lower 16 rows are those of the last four warps.
            uint32_t there = to + place + (uint32_t)(i * 4 * PART);
            copy16_or_zero(there, from_d, bytes);
            copy16_or_zero(there + TILE, from_g, bytes);
            copy16_or_zero(there + 2 * TILE, from_g + (bytes > 0 ? up : 0), bytes);
        }
        if (threadIdx.x < 3 * STEP * 2) {
            copy16_or_zero(to + place_z, z, at < more ? 16 : 0);
        }
        z += at + STEP < more ? (int64_t)STEP * ldz : 0; // stays inside
        bool goes_on = at + STEP < rows;
        d += goes_on ? (int64_t)STEP * ldd : 0;
        g += goes_on ? (int64_t)STEP * ld : 0;
    }
};

// One of the two columns of a pair.
__device__ __forceinline__ float column_of(uint32_t pair, int i) {
    return __uint_as_float(i == 0 ? pair << 16 : pair & 0xffff0000u);
}

// What a gate makes of 8 numbers: act(g), and act'(g) as the product of two, in the order in which
// `chain` of elementwise.cuh multiplies.
struct gates {
    float act[8];
    float first[8];
    float second[8];
};

__device__ __forceinline__ void gates_of(gates& to, const uint32_t (&g)[2][2], bool gelu) {
    if (gelu) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            gelu_gate<gated_number> at(column_of(g[i / 4][i / 2 % 2], i % 2));
            to.act[i] = at.act;
            to.first[i] = 1.0f;
            to.second[i] = at.chain(1.0f);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            silu_gate<gated_number> at(column_of(g[i / 4][i / 2 % 2], i % 2));
            to.act[i] = at.act;
            to.first[i] = at.s;
            to.second[i] = 1.0f + at.g * (1.0f - at.s);
        }
    }
}

// A strip of a: the columns of a thread's tile c of a warp beside each other, as products want them
// for a first operand. What does not exist becomes zero.
__device__ __forceinline__ void place_a(uint8_t* to, const bf16* a, int32_t lda, int32_t rank,
                                        int64_t col, int64_t cols) {
    int32_t r = (int32_t)threadIdx.x / 16;
    int32_t chunk = (int32_t)threadIdx.x % 16;
    uint4 raw = make_uint4(0, 0, 0, 0);
    if (r < rank && col + chunk * 8 < cols) {
        raw = *(const uint4*)(a + (int64_t)r * lda + col + chunk * 8);
    }
    const uint32_t word[4] = {raw.x, raw.y, raw.z, raw.w};
    uint16_t* line = (uint16_t*)(to + r * LINE + chunk / C * 16 * C) + chunk % C * 2;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        line[i % C * 8 + i / C] = (uint16_t)(word[i / 2] >> 16 * (i % 2));
    }
}

// x += ud a for the rows 2q and 2q + 1 of a half of a step, of which x has two pairs of columns
// each. ud: the lane's row of it; strip: the lane's row of a.
__device__ __forceinline__ void add_share(uint32_t (&x)[2][2], uint32_t ud, uint32_t strip) {
    uint32_t factor[2];
    load_pieces(factor, ud);
#pragma unroll
    for (int c = 0; c < 2; c++) {
        uint32_t f[4];
        load_transposed(f, strip + (uint32_t)(c * 32));
        float v[4] = {column_of(x[0][c], 0), column_of(x[1][c], 0), column_of(x[0][c], 1),
                      column_of(x[1][c], 1)};
        multiply(v, f, factor[0], factor[1]);
        x[0][c] = pack_bf16(v[0], v[2]);
        x[1][c] = pack_bf16(v[1], v[3]);
    }
}

// Rows `half` * 8 + 2q and + 1 of a step: stores dg and du, and sets the operands of dg, du and s.
// tile: the thread's columns of row 2q of dh; out: the same of g; left: rows from there to the end;
// most: if wanted, the largest magnitudes of both rows, not rounded; ud and strip: as above.
__device__ __forceinline__ void gated_rows(uint32_t (&b)[3][C][2], int half, const uint8_t* tile,
                                           bf16* out, int32_t ld, int32_t up, int32_t left,
                                           bool gelu, bool wants, float (&most)[2],
                                           bool shares, uint32_t ud, uint32_t strip) {
    uint32_t x[3][2][2]; // of a matrix, a row and a pair of columns
    uint32_t dg[2][2];
    uint32_t du[2][2];
    gates at;
#pragma unroll
    for (int i = 0; i < 6; i++) {
        // Row 2q + 1 is 4 lines after 2q, and 8 rows are 8 lines: no swizzle changes.
        uint2 raw = *(const uint2*)(tile + (half * 8 + i / 3 * 4) * 16 * C + i % 3 * TILE);
        x[i % 3][i / 3][0] = raw.x;
        x[i % 3][i / 3][1] = raw.y;
    }
    if (shares) {
        add_share(x[0], ud, strip);
    }
    gates_of(at, x[1], gelu);
    most[0] = 0.0f;
    most[1] = 0.0f;
#pragma unroll
    for (int c = 0; c < 2; c++) {
        float v[3][2][2]; // of a row and a column
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float d = column_of(x[0][i / 2][c], i % 2);
            float u = column_of(x[2][i / 2][c], i % 2);
            int n = i / 2 * 4 + c * 2 + i % 2;
            v[0][i / 2][i % 2] = d * u * at.first[n] * at.second[n];
            v[1][i / 2][i % 2] = d * at.act[n];
            v[2][i / 2][i % 2] = at.act[n] * u;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (wants) {
                most[i] = fmaxf(fmaxf(most[i], fabsf(v[0][i][0])), fabsf(v[0][i][1]));
                most[i] = fmaxf(fmaxf(most[i], fabsf(v[1][i][0])), fabsf(v[1][i][1]));
            }
            dg[i][c] = pack_bf16(v[0][i][0], v[0][i][1]);
            du[i][c] = pack_bf16(v[1][i][0], v[1][i][1]);
#pragma unroll
            for (int p = 0; p < 3; p++) {
                b[p][2 * c + i][half] = pack_bf16(v[p][0][i], v[p][1][i]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (half * 8 + i < left) {
            bf16* to = out + (int64_t)(half * 8 + i) * ld;
            *(uint2*)to = make_uint2(dg[i][0], dg[i][1]);
            *(uint2*)(to + up) = make_uint2(du[i][0], du[i][1]);
        }
    }
}

// The larger of a lane's number and that of the lane `by` away.
__device__ __forceinline__ float larger_of(float keep, float give, int32_t by) {
    return fmaxf(keep, __shfl_xor_sync(QLORA_FULL_WARP, give, by));
}

// Raises most[r] for the 16 rows of a warp, of which a thread has a and b: rows 2q and 2q + 1, and
// those 8 below. left: rows from the first one to the end.
__device__ __forceinline__ void raise_most(float* most, int32_t left, const float (&a)[2],
                                           const float (&b)[2]) {
    int32_t lane = (int32_t)threadIdx.x % 32;
    bool lower = (lane & 16) != 0;
    bool odd = (lane & 8) != 0;
    float even_row = larger_of(lower ? b[0] : a[0], lower ? a[0] : b[0], 16);
    float odd_row = larger_of(lower ? b[1] : a[1], lower ? a[1] : b[1], 16);
    float size = larger_of(odd ? odd_row : even_row, odd ? even_row : odd_row, 8);
    size = larger_of(size, size, 4);
    int32_t row = lane % 4 * 2 + (odd ? 1 : 0) + (lower ? 8 : 0);
    if ((lane & 4) == 0 && row < left) { // none is negative: their order is that of their bits
        atomicMax((int32_t*)most + row, __float_as_int(to_float(to_bf16(size))));
    }
}

// The sums of the upper and the lower warps of a block, as a part of P0, P1 and P2.
__device__ __forceinline__ void store_sums(float* shared, const float (&sums)[3][C][4],
                                           float* parts, int64_t cols) {
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t warp = (int32_t)threadIdx.x / 32;
    int32_t side = warp % 4;
    copy_wait<0>();
    __syncthreads(); // no warp needs its tiles any more
#pragma unroll
    for (int i = 0; i < SUMS; i++) {
        shared[(warp * SUMS + i) * 32 + lane] = sums[i / (4 * C)][i / 4 % C][i % 4];
    }
    __syncthreads();
    int64_t col0 = ((int64_t)blockIdx.x * 4 + side) * 8 * C;
#pragma unroll 1
    for (int32_t i = warp / 4; i < SUMS; i += 2) {
        float sum = shared[(side * SUMS + i) * 32 + lane];
        sum += shared[((4 + side) * SUMS + i) * 32 + lane];
        int32_t e = i % 4;
        int32_t row = i / (4 * C) * R + lane / 4 + e / 2 * 8; // of P0, P1 and P2 together
        int64_t col = col0 + (lane % 4 * 2 + e % 2) * C + i / 4 % C;
        if (col < cols) {
            parts[((int64_t)blockIdx.y * 3 * R + row) * cols + col] = sum;
        }
    }
}

// gelu: the activation is GELU in its tanh form, otherwise SiLU. One text for both: the rest of the
// kernel is most of it. Two blocks on a multiprocessor, which bounds the registers.
QLORA_KERNEL __launch_bounds__(256, 2)
    qlora_gated_backward(GATED_PARAMETERS, int32_t gelu, float* most, const bf16* a,
                         int32_t lda) {
    // long because what a step needs is set up before the first
    extern __shared__ __align__(128) uint8_t shared[];
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t warp = (int32_t)threadIdx.x / 32;
    uint32_t ring = (uint32_t)__cvta_generic_to_shared(shared);
    int64_t row = (int64_t)blockIdx.y * each;
    int64_t col = (int64_t)blockIdx.x * 32 * C;
    int32_t left = rows - row < each ? (int32_t)(rows - row) : each;
    gated_source from(GATED_ARGUMENTS, row, col, left);
    if (a != 0) {
        place_a(shared + RING, a, lda, rd, col, cols); // visible after the barrier of a step
    }
    int32_t q = lane % 4;
    row += warp / 4 * 16 + 2 * q;
    col += warp % 4 * 8 * C + lane / 4 * C;
    // Rows from the thread's first one to the end.
    int32_t mine = col < cols ? left - warp / 4 * 16 - 2 * q : 0;
    bf16* out = g + row * ld + col;
    int32_t tile = warp * PART + tile_at(2 * q, lane / 8) + lane / 4 % 2 * 8;
    int32_t line = warp / 4 * 16 + lane / 16 * 8 + lane % 8;
    float sums[3][C][4];
#pragma unroll
    for (int i = 0; i < SUMS; i++) {
        sums[i / (4 * C)][i / 4 % C][i % 4] = 0.0f;
    }
#pragma unroll 1
    for (int32_t s = 0; s < STAGES - 1; s++) {
        from.request(ring + (uint32_t)(s * STAGE), STEP * s);
        copy_commit();
    }
    int32_t put = (STAGES - 1) * STAGE;
    int32_t get = 0;
    // Every step commits one group of copies, an empty one at the end.
#pragma unroll 1
    for (int32_t at = 0; at < left; at += STEP) {
        copy_wait<STAGES - 2>();
        __syncthreads(); // this step is visible to all, and the one before no longer needed
        from.request(ring + (uint32_t)put, at + STEP * (STAGES - 1));
        copy_commit();
        uint32_t b[3][C][2];
        float size[2][2];
        const bool kind[3] = {gelu != 0, most != 0, a != 0};
        uint32_t factor =
            ring + (uint32_t)(get + 3 * TILE + factor_at(line, lane / 8 % 2)); // the lane's row
        uint32_t ud = factor + 2 * FACTOR; // of lanes 0 to 15 that of 8 rows
        uint32_t strip = ring + (uint32_t)(RING + (lane / 16 * 8 + lane % 8) * LINE +
                                           warp % 4 * 16 * C + lane / 8 % 2 * 16);
        gated_rows(b, 0, shared + get + tile, out, ld, up, mine - at, kind[0], kind[1], size[0],
                   kind[2], ud, strip);
        gated_rows(b, 1, shared + get + tile, out, ld, up, mine - at, kind[0], kind[1], size[1],
                   kind[2], ud + 8 * R * 2, strip);
        if (most != 0) {
            raise_most(most + row - 2 * q + at, left - warp / 4 * 16 - at, size[0], size[1]);
        }
#pragma unroll
        for (int p = 0; p < 3; p++) {
            uint32_t f[4];
            load_transposed(f, factor + (uint32_t)(p * FACTOR));
#pragma unroll
            for (int c = 0; c < C; c++) {
                multiply(sums[p][c], f, b[p][c][0], b[p][c][1]);
            }
        }
        out += (int64_t)STEP * ld;
        put = put == (STAGES - 1) * STAGE ? 0 : put + STAGE;
        get = get == (STAGES - 1) * STAGE ? 0 : get + STAGE;
    }
    store_sums((float*)shared, sums, parts, cols);
}
