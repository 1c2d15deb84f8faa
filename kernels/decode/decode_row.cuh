// decode_row.cuh - products of one row of activations with the NF4 weights of a stack, for decoding
// a single text. The formula and the struct of arguments are those of decode.cuh.
//
// One row leaves little to compute: what counts is that every multiprocessor always has many bytes
// in flight. A tile is 16 rows of W, a piece 256 columns of a tile: 2 KB of codes. The pieces of a
// block, tile after tile, are divided evenly among its warps. Each warp copies its pieces into a
// ring of its own in shared memory, ROW_STAGES ahead, and waits for nobody else; sums of warps that
// share a tile meet in shared memory at the end, where they are added in the order of the warps.
//
// Lane 4 g + t multiplies 32 columns of each half of the piece, of rows g and g + 8. In the first
// half, lanes t = 0 and 1 have block 0 of 64 and the others block 1; in the second, blocks 2 and 3.
// Each block is multiplied with a column of B of its own, column 2 b, which is zero where other
// blocks are. The sums of the first half are right in columns 0 and 2 and those of the second in
// columns 4 and 6: lane 4 g + t gets the sum of block t, whose scale it has fetched. What the other
// columns hold does not matter. A byte of codes becomes a pair of levels by one look-up in shared
// memory; the table has a copy for every lane.
//
// The adapters of o and down need a whole row of x before z is known. The kernels that make the row
// leave partial sums of it: low, [slices, rank]. For down, this kernel does: with `a` and gate and
// up, z[block][r] = sum over the block's columns of y of y A[r].
//
// Weights do not depend on the kernel before: the first pieces are requested, and the tables are
// made, before its end is awaited. A block leaves room beside it for one of attention or a norm,
// but not for another one of its kind: blocks that begin early would not be spread evenly
// otherwise.
//
// Launch: grid any number of blocks, 32 * warps threads; N of every part is a multiple of 16. The
// order of every sum depends only on the shapes, grid and warps. Determinism: one writer per
// output, fixed order.
#ifndef QLORA_DECODE_ROW_CUH
#define QLORA_DECODE_ROW_CUH

#include "decode.cuh"

enum {
    ROW_STAGES = 2,
    ROW_COLUMNS = 256, // of a piece
    ROW_PIECE = 2048   // bytes
};

// A tile. The list of a block: tiles blockIdx.x, + gridDim.x, ... of the parts, one after the
// other; for gate and up, of gate, then the same ones of up.
struct row_cursor {
    int32_t which; // part
    int32_t unit;  // tile of the part
    int32_t end;   // tiles that the part has
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

// Tiles of the block, or with gate and up, of one of the two.
__device__ __forceinline__ int32_t row_units(const decode_product& p) {
    int32_t units = row_tiles(p, 0);
    if (p.gated == 0) {
        units += row_tiles(p, 1) + row_tiles(p, 2);
    }
    return (units - (int32_t)blockIdx.x + (int32_t)gridDim.x - 1) / (int32_t)gridDim.x;
}

// The table of levels for look-ups at 128 byte + 4 lane: two loads and eight stores per thread, in
// an order in which neighbours do not meet in a bank.
__device__ __forceinline__ void row_table(const decode_product& p, uint8_t* shared) {
    for (int32_t i = (int32_t)threadIdx.x; i < 256 * 2; i += (int32_t)blockDim.x) {
        uint32_t pair = pack_bf16(p.maps[i / 2 / 16], p.maps[i / 2 % 16]);
#pragma unroll
        for (int32_t k = 0; k < 4; k++) {
            int32_t chunk = (i % 2 * 4 + k + i / 2) % 8;
            *(uint4*)(shared + i / 2 * 128 + chunk * 16) = make_uint4(pair, pair, pair, pair);
        }
    }
    for (int32_t i = (int32_t)threadIdx.x; i < 256; i += (int32_t)blockDim.x) {
        ((float*)(shared + DECODE_TABLE))[i] = p.maps[16 + i];
    }
}

// ---- the pieces of a warp

// Where a warp is: piece `piece` of tile `tile` of the block's list.
struct row_walk {
    int32_t tile;
    int32_t piece;
};

// How the pieces of a block are divided.
struct row_share {
    int32_t pieces; // of a tile
    int32_t units;
    int32_t each; // of a warp
    int32_t begin;
    int32_t count;
    int32_t slots; // warps that may share a tile
};

__device__ __forceinline__ row_share row_divide(const decode_product& p, int32_t warp,
                                                int32_t warps) {
    row_share s;
    s.pieces = (p.K + ROW_COLUMNS - 1) / ROW_COLUMNS;
    s.units = row_units(p);
    int32_t all = s.pieces * s.units * (p.gated != 0 ? 2 : 1);
    s.each = (all + warps - 1) / warps;
    s.begin = warp * s.each;
    s.count = all - s.begin < s.each ? all - s.begin : s.each;
    s.slots = (s.pieces - 1 + s.each - 1) / s.each + 1;
    return s;
}

// The part of a tile; `first` is the row of the part that is row 0 of the tile.
__device__ __forceinline__ decode_part row_part(const decode_product& p, const row_share& s,
                                                int32_t tile, int32_t& first) {
    row_cursor c;
    int32_t half = tile >= s.units ? 1 : 0; // of gate and up
    row_start(p, c, (int32_t)blockIdx.x + (tile - half * s.units) * (int32_t)gridDim.x);
    first = c.unit * 16;
    return decode_pick(p, half + c.which);
}

// Steps to the next piece; true if it belongs to another tile.
__device__ __forceinline__ bool row_next(const row_share& s, row_walk& w) {
    if (++w.piece < s.pieces) {
        return false;
    }
    w.piece = 0;
    w.tile++;
    return true;
}

// A lane's part of the codes of a tile: 16 bytes of a line in rows lane / 8, + 4, ...
struct row_source {
    const uint8_t* row;

    __device__ __forceinline__ void enter(const decode_product& p, const row_share& s,
                                          int32_t tile) {
        int32_t first;
        decode_part part = row_part(p, s, tile, first);
        int32_t lane = (int32_t)threadIdx.x % 32;
        row = (const uint8_t*)part.w + (int64_t)(part.first + first + lane / 8) * (p.K / 2) +
              lane % 8 * 16;
    }

    // Requests a piece: eight lanes a row, so that memory is read in whole lines. Odd rows are
    // turned by half a line, so that two rows can be read at once.
    __device__ __forceinline__ void request(const decode_product& p, int32_t piece,
                                            uint32_t stage) const {
        int32_t lane = (int32_t)threadIdx.x % 32;
        int32_t at = piece * (ROW_COLUMNS / 2);
        uint32_t bytes = at + lane % 8 * 16 < p.K / 2 ? 16u : 0u; // the rest is zeros
        const uint8_t* from = row + (bytes != 0 ? at : 0);
        stage += (uint32_t)(lane / 8 * 128 + (lane % 8 ^ (lane / 8 & 1) << 2) * 16);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(stage + 512u * i),
                         "l"(from), "r"(bytes)
                         : "memory");
            from += 2 * p.K;
        }
    }
};

// The scales of block t of a piece, rows g and g + 8, as they are stored.
struct row_scales {
    float s[2];
    uint32_t q[2];
};

// Where a lane finds them in a tile.
struct row_scale_source {
    const float* scales;
    const uint8_t* q; // null = plain scales
    int32_t at;       // block of 64 of row g
    int32_t shift;
    int32_t group;
    float middle;

    __device__ __forceinline__ void enter(const decode_product& p, const row_share& s,
                                          int32_t tile) {
        int32_t first;
        decode_part part = row_part(p, s, tile, first);
        shift = part.block_shift - 6;
        group = part.absmax ? shift : shift + part.group_shift;
        scales = part.absmax ? part.absmax : part.scales;
        q = part.absmax ? 0 : part.q;
        middle = part.absmax ? 0.0f : __ldg(part.offset);
        at = (part.first + first + (int32_t)threadIdx.x % 32 / 4) * (p.K / 64);
    }

    __device__ __forceinline__ void load(int32_t piece, int32_t blocks, row_scales& to) const {
        int32_t block = piece * (ROW_COLUMNS / 64) + (int32_t)threadIdx.x % 4;
        block = at + (block < blocks ? block : blocks - 1); // x is zero there
#pragma unroll
        for (int r = 0; r < 2; r++) {
            to.q[r] = 0;
            to.s[r] = __ldg(scales + (block >> group));
            if (q) {
                to.q[r] = __ldg(q + (block >> shift));
            }
            block += 8 * blocks;
        }
    }
};

// The two levels of byte i of the codes as a bf16 pair; the earlier element is in the low half.
__device__ __forceinline__ uint32_t row_pair(const uint8_t* table, uint4 codes, int i,
                                             uint32_t lane4) {
    uint32_t word = i < 4 ? codes.x : i < 8 ? codes.y : i < 12 ? codes.z : codes.w;
    uint32_t at = i % 4 == 0 ? word << 7 : word >> (8 * (i % 4) - 7);
    return *(const uint32_t*)(table + ((at & 0x7f80u) | lane4));
}

// The products of half a piece.
struct row_half {
    uint4 codes[2]; // rows g and g + 8

    __device__ __forceinline__ void fetch(const uint8_t* stage, uint32_t h) {
        uint32_t g = threadIdx.x % 32 / 4;
        uint32_t t = threadIdx.x % 4;
        const uint8_t* row = stage + g * 128 + ((t + 4 * h) ^ (g & 1u) << 2) * 16;
        codes[0] = *(const uint4*)row;
        codes[1] = *(const uint4*)(row + 8 * 128);
    }

    // `from` is x of the lane's columns. If the lane holds a part of B that is zero, it is not
    // `real`, and `x` stays zero; nor is it if its column belongs to the other half.
    __device__ __forceinline__ void multiply(const uint8_t* table, const uint4* from, bool real,
                                             uint4& x, float* c) const {
        uint32_t lane4 = threadIdx.x % 32 * 4;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (i % 2 == 0 && real) {
                x = from[i / 2];
            }
            decode_multiply(c, row_pair(table, codes[0], 2 * i, lane4),
                            row_pair(table, codes[1], 2 * i, lane4),
                            row_pair(table, codes[0], 2 * i + 1, lane4),
                            row_pair(table, codes[1], 2 * i + 1, lane4),
                            i % 2 == 0 ? x.x : x.z, i % 2 == 0 ? x.y : x.w);
        }
    }
};

// ---- the results

// One output, before the activation, from the sums of the warps that shared its tile.
__device__ __forceinline__ float row_output(const decode_product& p, const decode_part& part,
                                            const float* sums, int32_t slots, const float* zs,
                                            int32_t column) {
    float v = sums[0];
#pragma unroll 2
    for (int32_t w = 1; w < slots; w++) {
        v += sums[w * 16];
    }
    v *= p.alpha;
    if (part.sb) {
        const bf16* b = part.sb + (int64_t)column * part.rank;
        const float* z = zs + (p.low ? 0 : part.z_at - p.K);
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
__device__ __forceinline__ void row_finish(const decode_product& p, const row_share& share,
                                           const float* sums, const float* zs, float* outs) {
    int32_t tile = share.slots * 16; // floats
    int32_t units = share.units;
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
        float v = row_output(p, part, from, share.slots, zs, column);
        if (p.gated == 0 && p.y_is_bf16 == 0) {
            ((float*)p.y)[to] = v;
            continue;
        }
        bf16 rounded = to_bf16(v);
        if (p.gated != 0) {
            float g = to_float(rounded);
            float up =
                row_output(p, p.parts[1], from + units * tile, share.slots, zs, column);
            float u = p.gated == 1 ? g : 1.5957691216057308f * (g + 0.044715f * g * g * g);
            float s = 1.0f / (1.0f + exp_of(-u, (const bf16*)0));
            rounded = to_bf16(g * s * to_float(to_bf16(up)));
            if (p.a) {
                outs[i] = to_float(rounded);
            }
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

// Requests the columns of A that belong to the block's columns of y: [tile][r][16].
__device__ __forceinline__ void row_low_request(const decode_product& p, const row_share& share,
                                                const bf16* to) {
    for (int32_t i = (int32_t)threadIdx.x; i < share.units * p.a_rank * 2;
         i += (int32_t)blockDim.x) {
        int32_t tile = i / (2 * p.a_rank);
        int32_t r = i / 2 % p.a_rank;
        int32_t column = ((int32_t)blockIdx.x + tile * (int32_t)gridDim.x) * 16 + i % 2 * 8;
        uint32_t at = (uint32_t)__cvta_generic_to_shared(to + i * 8);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at),
                     "l"(p.a + (int64_t)r * p.parts[0].N + column)
                     : "memory");
    }
}

// The block's share of z of the next stack.
__device__ __forceinline__ void row_low(const decode_product& p, const row_share& share,
                                        const bf16* a, const float* outs) {
    int32_t lane = (int32_t)threadIdx.x % 32;
#pragma unroll 1
    for (int32_t r = (int32_t)threadIdx.x / 32; r < p.a_rank; r += (int32_t)blockDim.x / 32) {
        float sum = 0.0f;
        for (int32_t i = lane; i < share.units * 16; i += 32) {
            sum += outs[i] * to_float(a[(i / 16 * p.a_rank + r) * 16 + i % 16]);
        }
        sum = warp_sum(sum);
        if (lane == 0) {
            p.z[(int64_t)blockIdx.x * p.a_rank + r] = sum;
        }
    }
}

// z from its partial sums.
__device__ __forceinline__ void row_z_join(const decode_product& p, float* zs) {
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t rank = p.parts[0].rank;
#pragma unroll 2
    for (int32_t r = (int32_t)threadIdx.x / 32; r < rank; r += (int32_t)blockDim.x / 32) {
        float sum = 0.0f;
#pragma unroll 4
        for (int32_t k = lane; k < p.slices; k += 32) {
            sum += p.low[(int64_t)k * rank + r];
        }
        sum = warp_sum(sum);
        if (lane == 0) {
            zs[r] = to_float(to_bf16(sum));
        }
    }
}

// x in shared memory, zeros after its end as far as `wide`; z as floats.
__device__ __forceinline__ void row_stage(const decode_product& p, uint4* x, int32_t wide,
                                          float* zs, int32_t z_count) {
    for (int32_t i = (int32_t)threadIdx.x; i < wide / 8; i += (int32_t)blockDim.x) {
        x[i] = i * 8 < p.K ? *(const uint4*)(p.x + i * 8) : make_uint4(0, 0, 0, 0);
    }
    if (p.low) {
        row_z_join(p, zs);
        return;
    }
    for (int32_t i = (int32_t)threadIdx.x; i < z_count; i += (int32_t)blockDim.x) {
        zs[i] = to_float(p.x[p.K + i]);
    }
}

// Values of z that the adapters of the parts read.
__device__ __forceinline__ int32_t row_z(const decode_product& p) {
    int32_t most = 0;
    if (p.low) {
        return p.parts[0].rank;
    }
#pragma unroll
    for (int i = 0; i < 3; i++) {
        int32_t end = i < p.count && p.parts[i].sb ? p.parts[i].z_at + p.parts[i].rank - p.K : 0;
        most = end > most ? end : most;
    }
    return most;
}

// Requests the next piece, if there is one left.
__device__ __forceinline__ void row_ahead(const decode_product& p, const row_share& share,
                                          row_walk& ahead, row_source& source, int32_t& left,
                                          uint32_t stage) {
    if (left > 0) {
        left--;
        source.request(p, ahead.piece, stage);
        if (row_next(share, ahead) && left > 0) {
            source.enter(p, share, ahead.tile);
        }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Dynamic shared memory: table and map; the rings; x, rounded up to whole pieces; z, rounded up to
// 16 bytes; 16 floats per slot and tile of the block; with `a`, 16 a_rank bf16 and 16 floats per
// tile.
__device__ __forceinline__ void row_run(const decode_product& p, uint8_t* shared) {
    int32_t warps = (int32_t)blockDim.x / 32;
    int32_t warp = (int32_t)threadIdx.x / 32;
    row_share share = row_divide(p, warp, warps);
    int32_t tiles = share.units * (p.gated != 0 ? 2 : 1);
    int32_t z_count = row_z(p);
    uint8_t* ring = shared + DECODE_TABLE + DECODE_MAP + warp * ROW_STAGES * ROW_PIECE;
    bf16* x = (bf16*)(shared + DECODE_TABLE + DECODE_MAP + warps * ROW_STAGES * ROW_PIECE);
    float* zs = (float*)(x + share.pieces * ROW_COLUMNS);
    float* sums = zs + (z_count + 3) / 4 * 4;
    bf16* low = (bf16*)(sums + tiles * share.slots * 16);
    float* outs = (float*)(low + (p.a ? share.units * p.a_rank * 16 : 0));
    uint32_t ring_at = (uint32_t)__cvta_generic_to_shared(ring);
    // It is long because requests and their use belong to one loop.
    row_walk ahead;
    row_source source;
    row_scale_source scale_source;
    row_scales scales;
    row_half half;
    ahead.tile = share.begin / share.pieces;
    ahead.piece = share.begin % share.pieces;
    if (share.count > 0) {
        source.enter(p, share, ahead.tile);
        scale_source.enter(p, share, ahead.tile);
        scale_source.load(ahead.piece, p.K / 64, scales);
    }
    row_walk now = ahead;
    if (p.a) {
        row_low_request(p, share, low); // in the group of the first piece
    }
    int32_t left = share.count; // to be requested
#pragma unroll 1
    for (int i = 0; i < ROW_STAGES; i++) {
        row_ahead(p, share, ahead, source, left, ring_at + (uint32_t)i * ROW_PIECE);
    }
    row_prefetch(p);
    row_table(p, shared);
    for (int32_t i = (int32_t)threadIdx.x; i < tiles * share.slots * 16;
         i += (int32_t)blockDim.x) {
        sums[i] = 0.0f;
    }
    early_wait();
    row_stage(p, (uint4*)x, share.pieces * ROW_COLUMNS, zs, z_count);
    __syncthreads();
    // See above; lane 4 g + t holds column g of B.
    uint32_t g = threadIdx.x % 32 / 4;
    bool real = (g & 1u) == 0 && (g >> 1 & 1u) == threadIdx.x % 4 / 2;
    const uint4* own_x = (const uint4*)(x + (g >> 2) * 128 + threadIdx.x % 4 * 32);
    uint4 x_now = make_uint4(0, 0, 0, 0);
    const float* map = (const float*)(shared + DECODE_TABLE);
    float acc[2] = {0.0f, 0.0f};
#pragma unroll 1
    for (int32_t i = 0; i < share.count; i++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(ROW_STAGES - 1) : "memory");
        __syncwarp();
        int32_t stage = i % ROW_STAGES;
        const uint8_t* at = ring + stage * ROW_PIECE;
        const uint4* from = own_x + now.piece * (ROW_COLUMNS / 8);
        float s[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            s[r] = scales.s[r];
            if (!p.parts[0].absmax) {
                s[r] = __fadd_rn(__fmul_rn(map[scales.q[r]], s[r]), scale_source.middle);
            }
        }
        int32_t tile = now.tile;
        bool last = i + 1 == share.count;
        bool ends = row_next(share, now) || last;
        if (!last) {
            if (ends) {
                scale_source.enter(p, share, now.tile);
            }
            scale_source.load(now.piece, p.K / 64, scales);
        }
        float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        half.fetch(at, 0);
        half.multiply(shared, from, real && g < 4, x_now, c);
        half.fetch(at, 1);
        __syncwarp(); // the stage has been read
        row_ahead(p, share, ahead, source, left, ring_at + (uint32_t)stage * ROW_PIECE);
        half.multiply(shared, from, real && g >= 4, x_now, d);
        bool second = (threadIdx.x & 2u) != 0;
        acc[0] += s[0] * (second ? d[0] : c[0]);
        acc[1] += s[1] * (second ? d[2] : c[2]);
        if (ends) {
            float* to = sums + (tile * share.slots + warp - tile * share.pieces / share.each) * 16;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                acc[r] += __shfl_xor_sync(QLORA_FULL_WARP, acc[r], 1);
                acc[r] += __shfl_xor_sync(QLORA_FULL_WARP, acc[r], 2);
                if (threadIdx.x % 4 == 0) {
                    to[threadIdx.x % 32 / 4 + 8 * r] = acc[r];
                }
                acc[r] = 0.0f;
            }
        }
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory"); // also if it had no piece
    __syncthreads();
    row_finish(p, share, sums, zs, outs);
    if (p.a) {
        __syncthreads();
        row_low(p, share, low, outs);
    }
}

#endif
