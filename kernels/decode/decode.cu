// decode.cu - a step of decoding: products with bf16 weights, the norms between the stacks, and
// attention over the cache.
// targets: 80 90
// groups: bf16
#include "decode_attention.cuh"

// Dynamic shared memory: (2 * warps + 1) * 512 bytes.
QLORA_KERNEL __launch_bounds__(DECODE_WARPS * 32, 1)
    qlora_decode_dense(const __grid_constant__ decode_product p) {
    extern __shared__ __align__(128) float sums[];
    early_next();
    decode_run<decode_dense, decode_x128>(p, 0, sums, 0.0f, 0.0f, 0.0f);
}

// ---- the head of one text
//
//   y = cap(alpha x W^T), rounded
//
// A warp multiplies whole rows of W, 256 columns at a time, 8 per lane, and has the next HEAD_AHEAD
// of these in flight, over the ends of rows: memory is read in long runs, and no warp waits for
// another.
//
// Launch: any grid, HEAD_THREADS threads; dynamic shared memory: x. One part without bias and
// adapter; K is a multiple of 256, rows of W are 16-byte aligned. Determinism: one writer per
// output, an order of sums that depends on K alone.

enum { HEAD_AHEAD = 16, HEAD_THREADS = 256 };

// What a lane reads, one vector after another.
struct head_source {
    const bf16* from;
    int32_t row;
    int32_t column;

    __device__ __forceinline__ uint4 next(const decode_product& p) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (row < p.parts[0].N) {
            v = *(const uint4*)(from + column);
        }
        column += 256;
        if (column >= p.K) {
            int32_t rows = (int32_t)(gridDim.x * blockDim.x / 32);
            column -= p.K;
            row += rows;
            from += rows * p.parts[0].ld;
        }
        return v;
    }
};

QLORA_KERNEL __launch_bounds__(HEAD_THREADS, 1)
    qlora_decode_head(const __grid_constant__ decode_product p) {
    extern __shared__ __align__(16) uint4 xs[];
    const decode_part& part = p.parts[0];
    int32_t lane = (int32_t)threadIdx.x % 32;
    int32_t warps = (int32_t)blockDim.x / 32;
    int32_t row = (int32_t)blockIdx.x * warps + (int32_t)threadIdx.x / 32;
    int32_t turns = p.K / 256;
    head_source source;
    uint4 held[HEAD_AHEAD];
    early_next();
    source.from = (const bf16*)part.w + (part.first + row) * part.ld;
    source.row = row;
    source.column = lane * 8;
#pragma unroll
    for (int i = 0; i < HEAD_AHEAD; i++) {
        held[i] = source.next(p);
    }
    early_wait();
    for (int32_t i = (int32_t)threadIdx.x; i < turns * 32; i += (int32_t)blockDim.x) {
        xs[i] = ((const uint4*)p.x)[i];
    }
    __syncthreads();
    int32_t turn = 0;
    float sum = 0.0f;
#pragma unroll 1
    while (row < part.N) {
#pragma unroll
        for (int i = 0; i < HEAD_AHEAD; i++) {
            float w[8];
            float x[8];
            unpack(held[i], w);
            unpack(xs[turn * 32 + lane], x);
            held[i] = source.next(p);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                sum += w[j] * x[j];
            }
            if (++turn == turns) {
                sum = warp_sum(sum) * p.alpha;
                if (lane == 0 && row < part.N) {
                    if (p.cap > 0.0f) {
                        sum = p.cap * tanhf(to_float(to_bf16(sum)) / p.cap);
                    }
                    ((bf16*)p.y)[part.y_at + row] = to_bf16(sum);
                }
                turn = 0;
                sum = 0.0f;
                row += (int32_t)gridDim.x * warps;
            }
        }
    }
}

// ---- between two stacks
//
//   d = y + z (sB)^T, rounded; with `after`, d = d / rms(d) * after; d *= scale
//   h' = h + d        x = h' / rms(h') w        z'[r] = x A[r]
//
// With `mean`, x = c / rms(c) w, where c is h' without its mean.
//
// Without y, h' is h; without h, it is the row of the embedding that belongs to the text's token,
// multiplied by scale. z has up to DECODE_SLICES partial sums, which are added in order. Every
// value is rounded to bf16 where the operators of training round it.
//
// Launch: grid (at least 1, rows), 1024 threads, or fewer if there is no z; (hidden + z_rank) * 4
// bytes of dynamic shared memory. Every block computes x; the blocks of a row share z', block 0
// writes h' and x. h and h' are different memory. hidden is a multiple of 8, rows are 16-byte
// aligned.

// z of a row, summed over the slices in their order, in zs; `room` holds DECODE_SLICES * 16 floats.
__device__ __forceinline__ void decode_join(const decode_norm& p, float* room, float* zs) {
    int32_t t = (int32_t)threadIdx.x;
    int64_t n = blockIdx.y;
#pragma unroll 1
    for (int32_t first = 0; first < p.z_rank; first += 16) {
        int32_t r = first + t % 16; // 1024 threads: 16 columns of 64 slices
        bool there = r < p.z_rank && t / 16 < p.slices;
        room[t] = there ? p.z[((int64_t)(t / 16) * p.rows + n) * p.z_rank + r] : 0.0f;
        __syncthreads();
        if (t < 16 && r < p.z_rank) {
            float sum = 0.0f;
#pragma unroll 16
            for (int32_t i = 0; i < DECODE_SLICES; i++) {
                sum += room[i * 16 + t];
            }
            zs[r] = to_float(to_bf16(sum));
        }
        __syncthreads();
    }
}

// What a thread requests for four of its columns before z is there, and how many times.
struct decode_columns {
    float h[4];
    float y[4];
};

enum { NORM_AHEAD = 2 };

__device__ __forceinline__ void decode_request(const decode_norm& p, int32_t c, decode_columns* v) {
    int64_t n = blockIdx.y;
    const bf16* from = p.h ? p.h + n * p.hidden : p.embed + p.texts[n].token * p.ld_embed;
    uint2 raw = *(const uint2*)(from + c);
    unpack_pair(raw.x, v->h[0], v->h[1]);
    unpack_pair(raw.y, v->h[2], v->h[3]);
    if (p.y) {
        *(float4*)v->y = *(const float4*)(p.y + n * p.hidden + c);
    }
}

// Whether decode_lift can take the rank.
__device__ __forceinline__ bool decode_lifts(const decode_norm& p) {
    return p.y && (p.z_rank == 8 || p.z_rank == 16 || p.z_rank == 32);
}

// z (sB)^T for all columns, in `row`. Neighbouring lanes read neighbouring pieces of sB; those of a
// column are added by shuffles.
__device__ __forceinline__ void decode_lift(const decode_norm& p, const float* zs, float* row) {
    int32_t pieces = p.z_rank / 8;
    int32_t total = p.hidden * pieces;
#pragma unroll 4
    for (int32_t i = (int32_t)threadIdx.x; i / 32 * 32 < total; i += 1024) {
        float dot = 0.0f;
        if (i < total) {
            float v[8];
            const float* z = zs + i % pieces * 8;
            unpack(*(const uint4*)(p.sb + (int64_t)i * 8), v);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                dot += v[k] * z[k];
            }
        }
#pragma unroll 1
        for (int o = 1; o < pieces; o <<= 1) {
            dot += __shfl_xor_sync(QLORA_FULL_WARP, dot, o);
        }
        if (i < total && i % pieces == 0) {
            row[i / pieces] = dot;
        }
    }
    __syncthreads();
}

// Output of the stack before, with its adapter, for column c.
__device__ __forceinline__ float decode_delta(const decode_norm& p, float d, int32_t c,
                                              const float* zs) {
    const bf16* b = p.sb + (int64_t)c * p.z_rank;
    int32_t r = 0;
#pragma unroll 2
    for (; p.z_rank % 8 == 0 && r < p.z_rank; r += 8) {
        float v[8];
        unpack(*(const uint4*)(b + r), v);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            d += v[k] * zs[r + k];
        }
    }
#pragma unroll 1
    for (; r < p.z_rank; r++) {
        d += to_float(b[r]) * zs[r];
    }
    return to_float(to_bf16(d));
}

// The stream before the norm, in `row` and, from block 0, in memory; with `after`, first the output
// of the stack in `row`. Returns the thread's share of the sum of squares.
__device__ __forceinline__ float decode_stream(const decode_norm& p, const float* zs, float* row,
                                               const decode_columns* ahead, float rstd,
                                               bool first) {
    int64_t n = blockIdx.y;
    bool lifted = decode_lifts(p);
    float squares = 0.0f;
    int32_t turn = 0;
#pragma unroll 1
    for (int32_t c = (int32_t)threadIdx.x * 4; c < p.hidden; c += (int32_t)blockDim.x * 4) {
        decode_columns v = turn == 0 ? ahead[0] : ahead[1];
        if (turn++ >= NORM_AHEAD) {
            decode_request(p, c, &v);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) { // the loads of all four are independent
            float x = v.h[i];
            if (p.y) {
                float d = row[c + i]; // the adapter's part, or the whole after the first pass
                if (first || !p.after) {
                    d = lifted ? to_float(to_bf16(v.y[i] + d)) : decode_delta(p, v.y[i], c + i, zs);
                }
                d = first || !p.after ? d : to_float(to_bf16(d * rstd * p.after[c + i]));
                float scaled = p.scale != 1.0f ? to_float(to_bf16(p.scale * d)) : d;
                x = first ? d : to_float(to_bf16(x + scaled));
            } else if (!p.h && p.scale != 1.0f) {
                x = to_float(to_bf16(p.scale * x));
            }
            squares += x * x;
            row[c + i] = x;
            v.h[i] = x;
        }
        if (blockIdx.x == 0 && p.h_out && !first) {
            *(uint2*)(p.h_out + n * p.hidden + c) =
                make_uint2(pack_bf16(v.h[0], v.h[1]), pack_bf16(v.h[2], v.h[3]));
        }
    }
    return squares;
}

// Subtracts the mean from the row. Returns the thread's share of the sum of squares.
__device__ __forceinline__ float decode_center(const decode_norm& p, float* row, float* sums) {
    float sum = 0.0f;
    float squares = 0.0f;
    int32_t own = (int32_t)threadIdx.x * 4;
#pragma unroll 1
    for (int32_t c = own; c < p.hidden; c += (int32_t)blockDim.x * 4) {
        sum += row[c] + row[c + 1] + (row[c + 2] + row[c + 3]);
    }
    sum = row_sum(sum, sums, (int32_t)blockDim.x) / (float)p.hidden;
#pragma unroll 1
    for (int32_t c = own; c < p.hidden; c += (int32_t)blockDim.x * 4) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float v = row[c + i] - sum;
            row[c + i] = v;
            squares += v * v;
        }
    }
    return squares;
}

// z'[r] = x A[r] for the rows of A of this block; `ahead` has the first four columns of the first.
__device__ __forceinline__ const bf16* decode_row_of(const decode_norm& p, int32_t r) {
    if (r >= p.ranks[0] + p.ranks[1]) {
        return p.a[2] + (int64_t)(r - p.ranks[0] - p.ranks[1]) * p.hidden;
    }
    return r >= p.ranks[0] ? p.a[1] + (int64_t)(r - p.ranks[0]) * p.hidden
                           : p.a[0] + (int64_t)r * p.hidden;
}

QLORA_KERNEL __maxnreg__(56) qlora_decode_norm(const __grid_constant__ decode_norm p) {
    extern __shared__ __align__(16) float row[];
    __shared__ float sums[32];
    __shared__ float room[DECODE_SLICES * 16];
    float* zs = row + p.hidden;
    int64_t n = blockIdx.y;
    int32_t own = (int32_t)threadIdx.x * 4;
    int32_t ranks = p.ranks[0] + p.ranks[1] + p.ranks[2];
    // It is long because what does not depend on z is requested before z is there, and the weights
    // before the kernel before has ended; the adapter's come as far as L2.
    decode_columns ahead[NORM_AHEAD];
    float4 gain[NORM_AHEAD];
    uint2 first[NORM_AHEAD];
    early_next();
#pragma unroll
    for (int i = 0; i < NORM_AHEAD; i++) {
        int32_t c = own + i * (int32_t)blockDim.x * 4;
        gain[i] = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
        first[i] = make_uint2(0, 0);
        if (c < p.hidden && p.w) {
            gain[i] = *(const float4*)(p.w + c);
        }
        if (c < p.hidden && (int32_t)blockIdx.x < ranks) {
            first[i] = *(const uint2*)(decode_row_of(p, (int32_t)blockIdx.x) + c);
        }
        if (c < p.hidden && p.y && p.z_rank > 0) {
            asm volatile("prefetch.global.L2 [%0];" ::"l"(p.sb + (int64_t)c * p.z_rank));
        }
    }
    early_wait();
#pragma unroll
    for (int i = 0; i < NORM_AHEAD; i++) {
        int32_t c = own + i * (int32_t)blockDim.x * 4;
        if (c < p.hidden) {
            decode_request(p, c, &ahead[i]);
        }
    }
    if (p.y) {
        decode_join(p, room, zs);
    }
    if (decode_lifts(p)) {
        decode_lift(p, zs, row);
    }
    float rstd = 1.0f;
    if (p.y && p.after) {
        float d = row_sum(decode_stream(p, zs, row, ahead, 1.0f, true), sums, (int32_t)blockDim.x);
        rstd = 1.0f / sqrtf(d / (float)p.hidden + p.eps);
    }
    float squares = decode_stream(p, zs, row, ahead, rstd, false);
    if (p.mean) {
        squares = decode_center(p, row, sums);
    }
    squares = row_sum(squares, sums, (int32_t)blockDim.x);
    rstd = 1.0f / sqrtf(squares / (float)p.hidden + p.eps);
#pragma unroll 1
    for (int32_t r = (int32_t)blockIdx.x; r == (int32_t)blockIdx.x || r < ranks;
         r += (int32_t)gridDim.x) {
        bool begins = r == (int32_t)blockIdx.x;
        float dot = 0.0f;
        int32_t turn = 0;
#pragma unroll 1
        for (int32_t c = own; c < p.hidden; c += (int32_t)blockDim.x * 4, turn++) {
            float v[4];
            *(float4*)v = *(const float4*)(row + c);
            if (begins) {
                float4 w = turn == 0 ? gain[0] : gain[1];
                w = turn < NORM_AHEAD || !p.w ? w : *(const float4*)(p.w + c);
                v[0] = p.w ? v[0] * rstd * w.x : v[0];
                v[1] = p.w ? v[1] * rstd * w.y : v[1];
                v[2] = p.w ? v[2] * rstd * w.z : v[2];
                v[3] = p.w ? v[3] * rstd * w.w : v[3];
            }
            uint2 x = make_uint2(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]));
            unpack_pair(x.x, v[0], v[1]);
            unpack_pair(x.y, v[2], v[3]);
            if (begins) {
                *(float4*)(row + c) = *(float4*)v;
                if (blockIdx.x == 0) {
                    *(uint2*)(p.x + n * p.ldx + c) = x;
                }
            }
            if (r < ranks) {
                uint2 raw = turn == 0 ? first[0] : first[1];
                if (!begins || turn >= NORM_AHEAD) {
                    raw = *(const uint2*)(decode_row_of(p, r) + c);
                }
                float b[4];
                unpack_pair(raw.x, b[0], b[1]);
                unpack_pair(raw.y, b[2], b[3]);
                dot += v[0] * b[0] + v[1] * b[1] + v[2] * b[2] + v[3] * b[3];
            }
        }
        dot = row_sum(dot, sums, (int32_t)blockDim.x);
        if (threadIdx.x == 0 && r < ranks) {
            p.x[n * p.ldx + p.hidden + r] = to_bf16(dot);
        }
    }
}

// ---- attention (see decode_attention.cuh)

QLORA_KERNEL __maxnreg__(96)
    qlora_decode_attention(const __grid_constant__ decode_attention p) {
    extern __shared__ __align__(16) uint4 tiles[];
    __shared__ attention_shared s;
    // The states of the texts change at the end of a step; what a step before wrote to the cache
    // can be read already.
    early_next();
    const decode_text& text = p.texts[blockIdx.z];
    attention_place w = attention_find(p, (int32_t)blockIdx.x, (int32_t)blockIdx.y,
                                       (int32_t)gridDim.y, blockIdx.z, text.position,
                                       text.alive != 0);
    bf16* keys = attention_keys(p, w, attention_row(p, w));
    if (w.inside) {
        attention_begin(p, w, keys, (const bf16*)tiles, &s);
        if (p.a && w.page == w.last_page) {
            attention_ahead(p, w);
        }
    }
    early_wait();
    uint32_t* counter = p.counters + w.n * gridDim.x + blockIdx.x;
    if (!w.inside || !attention_run(p, w, keys, (bf16*)tiles, counter, &s)) {
        return;
    }
    if (p.a) {
        attention_sync();
        attention_low(p, w, (const bf16*)s.raw);
    }
}
