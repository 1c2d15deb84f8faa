// decode_row.cuh - products of one row of activations with the NF4 weights of a stack, for decoding
// a single text. The formula and the struct of arguments are those of decode.cuh.
//
// One row leaves nothing to compute: what counts is that every multiprocessor always has many
// 16-byte loads in flight. A piece is 16 rows of W times PIECE::WIDTH columns: two such loads per
// lane. The warps of a block divide the pieces of a row among themselves and each walks through all
// tiles of the block without waiting for the others, ROW_DEPTH pieces ahead. Their sums meet in
// shared memory once, at the end, where they are added in the order of the warps.
//
// NF4: lane 4 g + t has 32 columns of rows g and g + 8, so that lanes t = 0 and 1 have the first
// block of 64 and the others the second. The two are multiplied with different columns of B in the
// same m16n8k16: column 0 holds x where t < 2 and zeros elsewhere, column 2 the opposite. Lane
// 4 g + 0 then gets the sums of the first block, lane 4 g + 1 those of the second. What the other
// columns hold does not matter. A byte of codes becomes a pair of levels by one look-up in shared
// memory at 256 byte + 4 lane, an address that a single byte permute makes.
//
// Weights do not depend on the kernel before: the first pieces are requested, and the tables are
// made, before its end is awaited.
//
// Launch: grid any number of blocks, 32 * warps threads, every warp with at least one piece. The
// order of every sum depends only on K and warps. Determinism: one writer per output, fixed order.
#ifndef QLORA_DECODE_ROW_CUH
#define QLORA_DECODE_ROW_CUH

#include "decode.cuh"

enum {
    ROW_DEPTH = 4,
    ROW_TABLE = 256 * 256, // bytes
    ROW_MAP = 256 * 4,
    ROW_ZEROS = 64
};

// Where a warp is in its list of pieces. The list of a block: tiles blockIdx.x, + gridDim.x, ... of
// the parts, one after the other; for gate and up, of gate, then the same ones of up.
struct row_cursor {
    int32_t which; // part
    int32_t unit;  // tile of the part
    int32_t end;   // tiles that the part has
    int32_t piece;
};

__device__ __forceinline__ int32_t row_tiles(const decode_product& p, int32_t which) {
    int32_t rows = which == 0 ? p.parts[0].N : which == 1 ? p.parts[1].N : p.parts[2].N;
    return which < p.count ? (rows + 15) / 16 : 0;
}

// Carries a tile number that is past the end of its part over to the part that has it.
__device__ __forceinline__ void row_carry(const decode_product& p, row_cursor& c) {
#pragma unroll 1
    while (c.unit >= c.end && c.which + 1 < p.count) {
        c.unit -= c.end;
        c.end = row_tiles(p, ++c.which);
    }
}

__device__ __forceinline__ void row_start(const decode_product& p, row_cursor& c, int32_t unit) {
    c.which = 0;
    c.unit = unit;
    c.end = row_tiles(p, 0);
    if (p.gated == 0) {
        row_carry(p, c);
    }
}

// The next tile of the block; true if it belongs to another part.
__device__ __forceinline__ bool row_turn(const decode_product& p, row_cursor& c) {
    c.unit += (int32_t)gridDim.x;
    if (c.unit < c.end) {
        return false;
    }
    if (p.gated != 0) {
        c.which = 1;
        c.unit = (int32_t)blockIdx.x;
    } else {
        row_carry(p, c);
    }
    return true;
}

// Tiles of the block, or with gate and up, of one of the two.
__device__ __forceinline__ int32_t row_units(const decode_product& p) {
    int32_t units = row_tiles(p, 0);
    if (p.gated == 0) {
        units += row_tiles(p, 1) + row_tiles(p, 2);
    }
    return (units - (int32_t)blockIdx.x + (int32_t)gridDim.x - 1) / (int32_t)gridDim.x;
}

// ---- NF4

struct row_nf4 {
    enum { WIDTH = 128, X = 4, SHARED = ROW_TABLE + ROW_MAP };
    uint4 codes[2]; // rows g and g + 8
    float s[2];     // of block t % 2 of the piece
    uint32_t q[2];

    static __device__ __forceinline__ void tables(const decode_product& p, uint8_t* shared) {
        for (int32_t i = (int32_t)threadIdx.x; i < 256 * 8; i += (int32_t)blockDim.x) {
            uint32_t pair = pack_bf16(p.maps[i / 8 / 16], p.maps[i / 8 % 16]);
            *(uint4*)(shared + i / 8 * 256 + i % 8 * 16) = make_uint4(pair, pair, pair, pair);
        }
        for (int32_t i = (int32_t)threadIdx.x; i < 256; i += (int32_t)blockDim.x) {
            ((float*)(shared + ROW_TABLE))[i] = p.maps[16 + i];
        }
    }

    // Where a lane finds its share of a tile.
    struct source {
        const uint8_t* codes[2];
        const float* scales;
        const uint8_t* q; // null = plain scales
        int32_t at[2];    // block of 64 that the scale of piece 0 belongs to
        int32_t shift;
        int32_t group;
        int32_t codes_end; // pieces of a row that have codes, and a scale, for this lane
        int32_t scales_end;
    };

    static __device__ __forceinline__ source find(const decode_part& w, int32_t K, int32_t first) {
        int32_t t = (int32_t)threadIdx.x % 4;
        source f;
        f.shift = w.block_shift - 6;
        f.group = w.absmax ? f.shift : f.shift + w.group_shift;
        f.scales = w.absmax ? w.absmax : w.scales;
        f.q = w.absmax ? 0 : w.q;
        f.codes_end = (K - t / 2 * 64 + 127) / 128;
        f.scales_end = (K - t % 2 * 64 + 127) / 128;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int32_t row = first + (int32_t)threadIdx.x % 32 / 4 + 8 * r;
            row = row < w.N ? row : w.N - 1; // results past the last row are never written
            f.at[r] = (w.first + row) * (K / 64) + t % 2;
            f.codes[r] = (const uint8_t*)w.w + (int64_t)(w.first + row) * (K / 2) + t * 16;
        }
        return f;
    }

    // The same place in a tile that is `rows` rows further down.
    static __device__ __forceinline__ void advance(source& f, const decode_part& w, int32_t K,
                                                   int32_t rows) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            f.at[r] += rows * (K / 64);
            f.codes[r] += (int64_t)rows * (K / 2);
        }
    }

    __device__ __forceinline__ void load(const source& f, int32_t K, int32_t piece) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            codes[r] = make_uint4(0, 0, 0, 0);
            s[r] = 0.0f;
            q[r] = 0;
            if (piece < f.codes_end) {
                codes[r] = __ldg((const uint4*)(f.codes[r] + piece * 64));
            }
            if (piece < f.scales_end) {
                s[r] = __ldg(f.scales + ((f.at[r] + piece * 2) >> f.group));
                if (f.q) {
                    q[r] = __ldg(f.q + ((f.at[r] + piece * 2) >> f.shift));
                }
            }
        }
    }
};

// The two levels of byte i of the codes as a bf16 pair; the earlier element is in the low half.
__device__ __forceinline__ uint32_t row_pair(const uint8_t* table, uint4 codes, int i,
                                             uint32_t lane4) {
    uint32_t word = i < 4 ? codes.x : i < 8 ? codes.y : i < 12 ? codes.z : codes.w;
    return *(const uint32_t*)(table + __byte_perm(word, lane4, 0x5504u | (uint32_t)(i % 4) << 4));
}

// What a warp holds of x for a piece, and its sums.
struct row_nf4_state {
    uint4 x[4];
    float acc[2];

    __device__ __forceinline__ void begin() {
        acc[0] = 0.0f;
        acc[1] = 0.0f;
    }

    // Lanes 0 to 3 hold column 0 of B, lanes 8 to 11 column 2; `from` is x or zeros.
    __device__ __forceinline__ void fetch(const uint4* from, int32_t stride, int32_t piece) {
        if ((threadIdx.x & 20u) == 0) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                x[j] = from[piece * stride + j];
            }
        }
    }

    __device__ __forceinline__ void add(const row_nf4& w, const uint8_t* table, bool plain,
                                        float middle) {
        const float* map = (const float*)(table + ROW_TABLE);
        uint32_t lane4 = threadIdx.x % 32 * 4;
        float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            uint4 v = x[i / 2];
            decode_multiply(c, row_pair(table, w.codes[0], 2 * i, lane4),
                            row_pair(table, w.codes[1], 2 * i, lane4),
                            row_pair(table, w.codes[0], 2 * i + 1, lane4),
                            row_pair(table, w.codes[1], 2 * i + 1, lane4),
                            i % 2 == 0 ? v.x : v.z, i % 2 == 0 ? v.y : v.w);
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float s = plain ? w.s[r] : __fadd_rn(__fmul_rn(map[w.q[r]], w.s[r]), middle);
            acc[r] += s * c[2 * r];
        }
    }

    // Rows g and g + 8 of the tile; the sums of all lanes 4 g are whole.
    __device__ __forceinline__ void end(float* sums) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float whole = acc[r] + __shfl_xor_sync(QLORA_FULL_WARP, acc[r], 1);
            if (threadIdx.x % 4 == 0) {
                sums[threadIdx.x % 32 / 4 + 8 * r] = whole;
            }
        }
    }
};

// ---- the list of tiles

// One output of tile `tile` of the block, before the activation.
__device__ __forceinline__ float row_output(const decode_product& p, const decode_part& part,
                                            const float* sums, const float* zs, int32_t column) {
    int32_t warps = (int32_t)blockDim.x / 32;
    float v = sums[0];
#pragma unroll 4
    for (int32_t w = 1; w < warps; w++) {
        v += sums[w * 16];
    }
    v *= p.alpha;
    if (part.sb) {
        const bf16* b = part.sb + (int64_t)column * part.rank;
        const float* z = zs + (part.z_at - p.K);
        int32_t r = 0;
        float sum = 0.0f;
#pragma unroll 2
        for (; part.rank % 8 == 0 && r < part.rank; r += 8) {
            float a[8];
            unpack(*(const uint4*)(b + r), a);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                sum += a[j] * z[r + j];
            }
        }
#pragma unroll 1
        for (; r < part.rank; r++) {
            sum += to_float(b[r]) * z[r];
        }
        v += sum;
    }
    if (part.bias) {
        v += to_float(part.bias[column]);
    }
    if (p.cap > 0.0f) {
        v = p.cap * tanhf(to_float(to_bf16(v)) / p.cap);
    }
    return v;
}

// Adds the sums of the warps and writes the results of the block.
__device__ __forceinline__ void row_finish(const decode_product& p, const float* sums,
                                           const float* zs) {
    int32_t tile = (int32_t)blockDim.x / 32 * 16; // floats
    int32_t units = row_units(p);
#pragma unroll 1
    for (int32_t i = (int32_t)threadIdx.x; i < units * 16; i += (int32_t)blockDim.x) {
        row_cursor c;
        row_start(p, c, (int32_t)blockIdx.x + i / 16 * (int32_t)gridDim.x);
        decode_part part = decode_pick(p, c.which);
        int32_t column = c.unit * 16 + i % 16;
        if (column >= part.N) {
            continue;
        }
        int64_t to = part.y_at + column;
        const float* from = sums + i / 16 * tile + i % 16;
        float v = row_output(p, part, from, zs, column);
        if (p.gated == 0 && p.y_is_bf16 == 0) {
            ((float*)p.y)[to] = v;
            continue;
        }
        bf16 rounded = to_bf16(v);
        if (p.gated != 0) {
            float g = to_float(rounded);
            float up = row_output(p, p.parts[1], from + units * tile, zs, column);
            float u = p.gated == 1 ? g : 1.5957691216057308f * (g + 0.044715f * g * g * g);
            float s = 1.0f / (1.0f + exp_of(-u, (const bf16*)0));
            rounded = to_bf16(g * s * to_float(to_bf16(up)));
        }
        ((bf16*)p.y)[to] = rounded;
    }
}

// Brings what row_finish needs of the adapters as far as L2.
__device__ __forceinline__ void row_prefetch(const decode_product& p) {
    int32_t units = row_units(p);
#pragma unroll 1
    for (int32_t i = (int32_t)threadIdx.x; i < units * 16; i += (int32_t)blockDim.x) {
        row_cursor c;
        row_start(p, c, (int32_t)blockIdx.x + i / 16 * (int32_t)gridDim.x);
#pragma unroll 1
        for (int32_t more = 0; more < (p.gated != 0 ? 2 : 1); more++) {
            decode_part part = decode_pick(p, c.which + more);
            int32_t column = c.unit * 16 + i % 16;
            if (part.sb && column < part.N) {
                const bf16* b = part.sb + (int64_t)column * part.rank;
                asm volatile("prefetch.global.L2 [%0];" ::"l"(b));
            }
        }
    }
}

// z of the adapter that is left to the next kernel, from x in shared memory: one warp per row of A,
// one slice of K per turn.
__device__ __forceinline__ void row_slices(const decode_product& p, const bf16* x) {
    int32_t warps = (int32_t)blockDim.x / 32;
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t width = ((p.K + DECODE_SLICES - 1) / DECODE_SLICES + 7) / 8 * 8;
#pragma unroll 1
    for (int32_t slice = (int32_t)blockIdx.x; slice < DECODE_SLICES; slice += (int32_t)gridDim.x) {
        int32_t begin = slice * width;
        int32_t end = begin + width < p.K ? begin + width : p.K;
#pragma unroll 1
        for (int32_t r = (int32_t)threadIdx.x / 32; r < p.a_rank; r += warps) {
            float sum = 0.0f;
            for (int32_t k = begin + lane * 8; k < end; k += 256) {
                float a[8];
                float v[8];
                unpack(*(const uint4*)(p.a + (int64_t)r * p.K + k), a);
                unpack(*(const uint4*)(x + k), v);
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    sum += a[j] * v[j];
                }
            }
            sum = warp_sum(sum);
            if (lane == 0) {
                p.z[(int64_t)slice * p.a_rank + r] = sum;
            }
        }
    }
}

// x in shared memory, zeros after its end as far as `wide`; z as floats.
__device__ __forceinline__ void row_stage(const decode_product& p, uint4* x, int32_t wide,
                                          float* zs, int32_t z_count) {
    for (int32_t i = (int32_t)threadIdx.x; i < wide / 8; i += (int32_t)blockDim.x) {
        x[i] = i * 8 < p.K ? *(const uint4*)(p.x + i * 8) : make_uint4(0, 0, 0, 0);
    }
    for (int32_t i = (int32_t)threadIdx.x; i < z_count; i += (int32_t)blockDim.x) {
        zs[i] = to_float(p.x[p.K + i]);
    }
}

// Columns of x after K that the adapters of the parts read.
__device__ __forceinline__ int32_t row_z(const decode_product& p) {
    int32_t most = 0;
#pragma unroll
    for (int i = 0; i < 3; i++) {
        int32_t end = i < p.count && p.parts[i].sb ? p.parts[i].z_at + p.parts[i].rank - p.K : 0;
        most = end > most ? end : most;
    }
    return most;
}

// Requests the piece that `c` is at, and moves on.
template <class PIECE>
__device__ __forceinline__ void row_request(const decode_product& p, row_cursor& c,
                                            typename PIECE::source& source, PIECE& piece,
                                            int32_t begin, int32_t end) {
    piece.load(source, p.K, c.piece);
    if (++c.piece == end) {
        c.piece = begin;
        bool other = row_turn(p, c);
        decode_part part = decode_pick(p, c.which);
        if (other || c.unit * 16 + 16 > part.N) {
            source = PIECE::find(part, p.K, c.unit * 16);
        } else {
            PIECE::advance(source, part, p.K, (int32_t)gridDim.x * 16);
        }
    }
}

// Dynamic shared memory: the tables of PIECE; zeros; x, rounded up to whole pieces; z, rounded up
// to 16 bytes; 16 floats per warp and tile of the block.
template <class PIECE, class STATE>
__device__ __forceinline__ void row_run(const decode_product& p, uint8_t* shared, float middle0,
                                        float middle1, float middle2) {
    int32_t warps = (int32_t)blockDim.x / 32;
    int32_t warp = (int32_t)threadIdx.x / 32;
    int32_t t = (int32_t)threadIdx.x % 4;
    int32_t pieces = (p.K + PIECE::WIDTH - 1) / PIECE::WIDTH;
    int32_t z_count = row_z(p);
    uint4* zeros = (uint4*)(shared + PIECE::SHARED);
    uint4* x = zeros + ROW_ZEROS / 16;
    float* zs = (float*)(x + pieces * PIECE::WIDTH / 8);
    float* sums = zs + (z_count + 3) / 4 * 4 + warp * 16;
    // Pieces [begin, begin + own) of every row are this warp's. It is long because requests and
    // their use belong to one loop.
    int32_t each = (pieces + warps - 1) / warps;
    int32_t begin = warp * each;
    int32_t own = begin + each <= pieces ? each : pieces - begin;
    int32_t tiles = row_units(p) * (p.gated != 0 ? 2 : 1);
    row_cursor ahead;
    row_start(p, ahead, (int32_t)blockIdx.x);
    ahead.piece = begin;
    row_cursor now = ahead;
    typename PIECE::source source =
        PIECE::find(decode_pick(p, ahead.which), p.K, ahead.unit * 16);
    int32_t left = tiles * own; // to be requested
    PIECE next[ROW_DEPTH];
#pragma unroll
    for (int i = 0; i < ROW_DEPTH; i++) {
        if (left > 0) {
            row_request(p, ahead, source, next[i], begin, begin + own);
            left--;
        }
    }
    row_prefetch(p);
    PIECE::tables(p, shared);
    if (threadIdx.x < ROW_ZEROS / 16) {
        zeros[threadIdx.x] = make_uint4(0, 0, 0, 0);
    }
    early_wait();
    row_stage(p, x, pieces * PIECE::WIDTH, zs, z_count);
    __syncthreads();
    if (p.a) {
        row_slices(p, (const bf16*)x);
    }
    // Where this lane's operand comes from: see row_nf4_state.
    bool real = (threadIdx.x % 32 < 4) == (t < 2);
    const uint4* from = real ? x + t * PIECE::X : zeros;
    int32_t stride = real ? PIECE::WIDTH / 8 : 0;
    STATE state;
#pragma unroll
    for (int i = 0; i < PIECE::X; i++) {
        state.x[i] = make_uint4(0, 0, 0, 0);
    }
    state.begin();
    bool plain = decode_pick(p, now.which).absmax != 0;
    float middle = now.which == 0 ? middle0 : now.which == 1 ? middle1 : middle2;
#pragma unroll 1
    for (int32_t todo = tiles * own; todo > 0; todo -= ROW_DEPTH) {
#pragma unroll
        for (int i = 0; i < ROW_DEPTH; i++) {
            if (i < todo) {
                state.fetch(from, stride, now.piece);
                state.add(next[i], shared, plain, middle);
                // After the use, so that no register is copied while it is awaited, and all at
                // once: neighbouring bytes of a row are requested together.
                if (i + 1 == ROW_DEPTH || i + 1 == todo) {
#pragma unroll
                    for (int j = 0; j <= i; j++) {
                        if (left > 0) {
                            row_request(p, ahead, source, next[j], begin, begin + own);
                            left--;
                        }
                    }
                }
                if (++now.piece == begin + own) {
                    state.end(sums);
                    state.begin();
                    sums += warps * 16;
                    now.piece = begin;
                    if (row_turn(p, now)) {
                        plain = decode_pick(p, now.which).absmax != 0;
                        middle = now.which == 0 ? middle0 : now.which == 1 ? middle1 : middle2;
                    }
                }
            }
        }
    }
    __syncthreads();
    row_finish(p, zs + (z_count + 3) / 4 * 4, zs);
}

#endif
