// decode_many_norm.cu - what is between two stacks of a decoding step, for many texts.
// targets: 80 90
// groups: bf16
#include "decode_args.cuh"
#include "../early.cuh"
#include "../vec.cuh"

// The formulas and the arguments are those of decode_norm (decode.cu):
//
//   d = y + z (sB)^T, rounded; with `after`, d = d / rms(d) * after; d *= scale
//   h' = h + d        x = h' / rms(h') w        z'[r] = x A[r]
//
// Without y, h' is h; without h, it is the row of the embedding that belongs to the text's token,
// multiplied by scale. y and z have any number of partial sums.
//
// z' is a product on tensor cores: 16 rows of A are the rows of m16n8k16, x is the first of its
// columns, and the others are zeros. The warps divide the columns of A among themselves, 64 at a
// time, so that all of A is under way at once; their sums are added in a fixed order.
//
// Launch: grid (blocks of a text, rows), 1024 threads. The blocks of a text all compute x and share
// the rows of A, 16 at a time; the first one writes h' and x. Dynamic shared memory: 4 bytes for
// each of hidden, z_rank and 32 times the padded ranks, and 2 for each of hidden, padded to 64.
enum { NORM_WARPS = 32 };

// Row r of A, of all parts one after another; null past the end.
__device__ __forceinline__ const bf16* norm_row(const decode_norm& p, int32_t r) {
    if (r < p.ranks[0]) {
        return p.a[0] + (int64_t)r * p.hidden;
    }
    r -= p.ranks[0];
    if (r < p.ranks[1]) {
        return p.a[1] + (int64_t)r * p.hidden;
    }
    r -= p.ranks[1];
    return r < p.ranks[2] ? p.a[2] + (int64_t)r * p.hidden : 0;
}

// Brings a part of the adapters as far as L2; the blocks of all texts share the work.
__device__ __forceinline__ void norm_prefetch(const decode_norm& p) {
    int32_t block = (int32_t)(blockIdx.y * gridDim.x + blockIdx.x);
    int32_t threads = (int32_t)(gridDim.x * gridDim.y) * (NORM_WARPS * 32);
    int32_t lines = (p.hidden + 63) / 64; // of 128 bytes
    int32_t ranks = p.ranks[0] + p.ranks[1] + p.ranks[2];
    int32_t lifted = p.y ? p.z_rank : 0;
#pragma unroll 1
    for (int32_t i = block * (NORM_WARPS * 32) + (int32_t)threadIdx.x; i < (ranks + lifted) * lines;
         i += threads) {
        const bf16* from = i < ranks * lines
                               ? norm_row(p, i / lines) + i % lines * 64
                               : p.sb + (int64_t)(i - ranks * lines) * p.hidden / lines;
        asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
    }
}

// z, summed over the slices: a warp per column, lanes in a fixed order.
__device__ __forceinline__ void norm_join(const decode_norm& p, float* zs) {
    int32_t lane = (int32_t)threadIdx.x % 32;
    const float* from = p.z + (int64_t)blockIdx.y * p.z_rank;
#pragma unroll 1
    for (int32_t r = (int32_t)threadIdx.x / 32; r < p.z_rank; r += NORM_WARPS) {
        float sum = 0.0f;
#pragma unroll 4
        for (int32_t i = lane; i < p.slices; i += 32) {
            sum += from[(int64_t)i * p.rows * p.z_rank + r];
        }
        sum = warp_sum(sum);
        if (lane == 0) {
            zs[r] = to_float(to_bf16(sum));
        }
    }
    __syncthreads();
}

// z (sB)^T for all columns, in `row`. If sB's rows are 16, 32 or 64 bytes, neighbouring lanes read
// neighbouring pieces, and those of a column are added by shuffles.
__device__ __forceinline__ void norm_lift(const decode_norm& p, const float* zs, float* row) {
    int32_t pieces = p.z_rank / 8;
    int32_t total = p.hidden * pieces;
    if (p.z_rank != 8 && p.z_rank != 16 && p.z_rank != 32) {
#pragma unroll 1
        for (int32_t c = (int32_t)threadIdx.x; c < p.hidden; c += NORM_WARPS * 32) {
            const bf16* b = p.sb + (int64_t)c * p.z_rank;
            float dot = 0.0f;
#pragma unroll 4
            for (int32_t r = 0; r < p.z_rank; r++) {
                dot += to_float(b[r]) * zs[r];
            }
            row[c] = dot;
        }
        __syncthreads();
        return;
    }
#pragma unroll 4
    for (int32_t i = (int32_t)threadIdx.x; i / 32 * 32 < total; i += NORM_WARPS * 32) {
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

// The output of the stack before, in `row`, which has the adapter's part, and its squares.
__device__ __forceinline__ float norm_output(const decode_norm& p, float* row) {
    float squares = 0.0f;
#pragma unroll 1
    for (int32_t c = (int32_t)threadIdx.x * 4; c < p.hidden; c += NORM_WARPS * 128) {
        float v[4];
        const float* from = p.y + (int64_t)blockIdx.y * p.hidden + c;
        *(float4*)v = *(const float4*)from;
#pragma unroll 4
        for (int32_t j = 1; j < p.splits; j++) {
            float4 more = *(const float4*)(from + (int64_t)j * p.rows * p.hidden);
            v[0] += more.x;
            v[1] += more.y;
            v[2] += more.z;
            v[3] += more.w;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float lifted = p.z_rank > 0 ? row[c + i] : 0.0f;
            v[i] = to_float(to_bf16(v[i] + lifted));
            squares += v[i] * v[i];
        }
        *(float4*)(row + c) = *(const float4*)v;
    }
    return squares;
}

// The stream, in `row` and, from block 0, in memory; returns the thread's share of its squares.
__device__ __forceinline__ float norm_stream(const decode_norm& p, float* row, float rstd) {
    int64_t n = blockIdx.y;
    const bf16* from = p.h ? p.h + n * p.hidden : p.embed + p.texts[n].token * p.ld_embed;
    float squares = 0.0f;
#pragma unroll 1
    for (int32_t c = (int32_t)threadIdx.x * 4; c < p.hidden; c += NORM_WARPS * 128) {
        float v[4];
        uint2 raw = *(const uint2*)(from + c);
        unpack_pair(raw.x, v[0], v[1]);
        unpack_pair(raw.y, v[2], v[3]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (p.y) {
                float d = row[c + i];
                d = p.after ? to_float(to_bf16(d * rstd * p.after[c + i])) : d;
                d = p.scale != 1.0f ? to_float(to_bf16(p.scale * d)) : d;
                v[i] = to_float(to_bf16(v[i] + d));
            } else if (!p.h && p.scale != 1.0f) {
                v[i] = to_float(to_bf16(p.scale * v[i]));
            }
            squares += v[i] * v[i];
        }
        *(float4*)(row + c) = *(const float4*)v;
        if (blockIdx.x == 0 && p.h_out) {
            *(uint2*)(p.h_out + n * p.hidden + c) =
                make_uint2(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]));
        }
    }
    return squares;
}

// Subtracts the mean from the row. Returns the thread's share of the squares.
__device__ __forceinline__ float norm_center(const decode_norm& p, float* row, float* sums) {
    float sum = 0.0f;
    float squares = 0.0f;
#pragma unroll 1
    for (int32_t c = (int32_t)threadIdx.x * 4; c < p.hidden; c += NORM_WARPS * 128) {
        sum += row[c] + row[c + 1] + (row[c + 2] + row[c + 3]);
    }
    sum = row_sum(sum, sums, (int32_t)blockDim.x) / (float)p.hidden;
#pragma unroll 1
    for (int32_t c = (int32_t)threadIdx.x * 4; c < p.hidden; c += NORM_WARPS * 128) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float v = row[c + i] - sum;
            row[c + i] = v;
            squares += v * v;
        }
    }
    return squares;
}

// x, in shared memory, where zeros follow up to a multiple of 64, and in memory.
__device__ __forceinline__ void norm_scale(const decode_norm& p, const float* row, float rstd,
                                           uint2* xs) {
    int32_t padded = (p.hidden + 63) / 64 * 64;
#pragma unroll 1
    for (int32_t c = (int32_t)threadIdx.x * 4; c < padded; c += NORM_WARPS * 128) {
        uint2 x = make_uint2(0, 0);
        if (c < p.hidden) {
            float4 v = *(const float4*)(row + c);
            if (p.w) {
                float4 w = *(const float4*)(p.w + c);
                v = make_float4(v.x * rstd * w.x, v.y * rstd * w.y, v.z * rstd * w.z,
                                v.w * rstd * w.w);
            }
            x = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
            if (blockIdx.x == 0) {
                *(uint2*)(p.x + blockIdx.y * p.ldx + c) = x;
            }
        }
        xs[c / 4] = x;
    }
    __syncthreads();
}

// A warp's share of x A^T for the 16 rows of A from `first` on.
__device__ __forceinline__ void norm_multiply(const decode_norm& p, const uint2* xs, int32_t first,
                                              float (&c)[4]) {
    int32_t lane = (int32_t)threadIdx.x % 32;
    const bf16* rows[2] = {norm_row(p, first + lane / 4), norm_row(p, first + lane / 4 + 8)};
#pragma unroll 2
    for (int32_t k = (int32_t)threadIdx.x / 32 * 64 + lane % 4 * 16; k < (p.hidden + 63) / 64 * 64;
         k += NORM_WARPS * 64) {
        uint4 a[2][2];
        uint4 x[2];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            a[i / 2][i % 2] = make_uint4(0, 0, 0, 0);
            if (rows[i / 2] && k + i % 2 * 8 < p.hidden) {
                a[i / 2][i % 2] = __ldg((const uint4*)(rows[i / 2] + k + i % 2 * 8));
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            x[i] = lane < 4 ? *(const uint4*)(xs + k / 4 + 2 * i) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                : "r"(a[0][i].x), "r"(a[1][i].x), "r"(a[0][i].y), "r"(a[1][i].y), "r"(x[i].x),
                  "r"(x[i].y));
            asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                : "r"(a[0][i].z), "r"(a[1][i].z), "r"(a[0][i].w), "r"(a[1][i].w), "r"(x[i].z),
                  "r"(x[i].w));
        }
    }
}

QLORA_KERNEL __launch_bounds__(NORM_WARPS * 32)
    qlora_decode_many_norm(const __grid_constant__ decode_norm p) {
    extern __shared__ __align__(16) uint2 xs[];
    __shared__ float sums[32];
    int32_t ranks = p.ranks[0] + p.ranks[1] + p.ranks[2];
    int32_t tiles = (ranks + 15) / 16;
    float* row = (float*)(xs + (p.hidden + 63) / 64 * 16);
    float* parts = row + p.hidden; // [tiles * 16][NORM_WARPS]
    float* zs = parts + tiles * 16 * NORM_WARPS;
    int32_t warp = (int32_t)threadIdx.x / 32;
    int32_t lane = (int32_t)threadIdx.x % 32;
    early_next();
    norm_prefetch(p);
    early_wait();
    float rstd = 1.0f;
    if (p.y) {
        if (p.z_rank > 0) {
            norm_join(p, zs);
            norm_lift(p, zs, row);
        }
        float squares = norm_output(p, row);
        if (p.after) {
            squares = row_sum(squares, sums, (int32_t)blockDim.x);
            rstd = 1.0f / sqrtf(squares / (float)p.hidden + p.eps);
        }
    }
    float squares = norm_stream(p, row, rstd);
    if (p.mean) {
        squares = norm_center(p, row, sums);
    }
    squares = row_sum(squares, sums, (int32_t)blockDim.x);
    norm_scale(p, row, 1.0f / sqrtf(squares / (float)p.hidden + p.eps), xs);
#pragma unroll 1
    for (int32_t t = (int32_t)blockIdx.x; t < tiles; t += (int32_t)gridDim.x) {
        float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        norm_multiply(p, xs, t * 16, c);
        if (lane % 4 == 0) {
            parts[(t * 16 + lane / 4) * NORM_WARPS + warp] = c[0];
            parts[(t * 16 + lane / 4 + 8) * NORM_WARPS + warp] = c[2];
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int32_t r = warp; r < ranks; r += NORM_WARPS) {
        if (r / 16 % (int32_t)gridDim.x == (int32_t)blockIdx.x) {
            float sum = warp_sum(parts[r * NORM_WARPS + lane]);
            if (lane == 0) {
                p.x[blockIdx.y * p.ldx + p.hidden + r] = to_bf16(sum);
            }
        }
    }
}
