// nf4.cuh - 4-bit NormalFloat weights with block-wise scales, in the format of bitsandbytes.
//
// A weight of n = rows * cols elements, row-major without gaps, is divided into blocks of B
// elements (a power of two, 32 ... 4096) that may straddle rows; the last one may be short. For
// element e in block b = e / B:
//   absmax[b] = max |w|
//   code[e]   = number of thresholds below w * inv,
//               inv = 1 / max(absmax[b], 1e-38), correctly rounded
//   value[e]  = round(level[code[e]] * absmax[b]), product in f32, rounded to the output type
// Byte i holds element 2i in its high half and 2i + 1 in its low half; if n is odd, the last half
// is 7 (0.0).
//
// Double quantisation replaces absmax by one byte per block, in groups of G (256):
//   offset    = f32(sum of absmax) * f32(1 / blocks)
//   scale[g]  = max(max |absmax - offset|, 1e-38)
//   q[b]      = nearest entry of a map of 256 to (absmax[b] - offset) * (1 / scale[g])
//   absmax[b] = map[q[b]] * scale[b / G] + offset          each operation rounded
// maps = the 16 levels, then the 256 entries of the map, ascending.
//
// Determinism: one writer per output; the only sum has a fixed order in f64.
#ifndef QLORA_NF4_CUH
#define QLORA_NF4_CUH

#include "../common.cuh"

#define NF4_SMALLEST 1e-38f

// The midpoints between adjacent levels, rounded to f32.
__device__ __forceinline__ uint32_t nf4_code(float x) {
    uint32_t c = 0;
    c += x > -0.8480963706970215f;
    c += x > -0.6106328964233398f;
    c += x > -0.4599952697753906f;
    c += x > -0.33967941999435425f;
    c += x > -0.23460739850997925f;
    c += x > -0.13791173696517944f;
    c += x > -0.045525018125772476f;
    c += x > 0.03979014977812767f;
    c += x > 0.120255246758461f;
    c += x > 0.2035212516784668f;
    c += x > 0.2920137643814087f;
    c += x > 0.3893125355243683f;
    c += x > 0.5016634464263916f;
    c += x > 0.6427869200706482f;
    c += x > 0.8614784479141235f;
    return c;
}

// One warp per block. Launch: 256 threads, grid ceil(blocks / 8).
template <typename T>
__device__ __forceinline__ void nf4_quantise(const T* w, int64_t n, int32_t block, uint8_t* codes,
                                             float* absmax) {
    int64_t b = (int64_t)blockIdx.x * 8 + threadIdx.x / 32;
    int64_t begin = b * block;
    if (begin >= n) {
        return;
    }
    int64_t end = n - begin < block ? n : begin + block;
    int32_t lane = (int32_t)threadIdx.x % 32;
    float most = 0.0f;
#pragma unroll 1
    for (int64_t e = begin + lane; e < end; e += 32) {
        most = fmaxf(most, fabsf(to_float(w[e])));
    }
    most = warp_max(most);
    float inv = __frcp_rn(fmaxf(most, NF4_SMALLEST));
#pragma unroll 1
    for (int64_t e = begin + 2 * lane; e < end; e += 64) {
        uint32_t high = nf4_code(__fmul_rn(to_float(w[e]), inv));
        uint32_t low = 7;
        if (e + 1 < end) {
            low = nf4_code(__fmul_rn(to_float(w[e + 1]), inv));
        }
        codes[e / 2] = (uint8_t)(high << 4 | low);
    }
    if (lane == 0) {
        absmax[b] = most;
    }
}

#define NF4_QUANTISE(name, type)                                                                   \
    QLORA_KERNEL __launch_bounds__(256) qlora_nf4_quantise_##name(                                 \
        const type* w, int64_t n, int32_t block, uint8_t* codes, float* absmax) {                  \
        nf4_quantise(w, n, block, codes, absmax);                                                  \
    }

// Index of the map entry nearest to x: bisection from the middle, then the nearer of the last entry
// and its neighbour on the side of x; exactly halfway between the two, the last entry of the
// bisection wins.
__device__ __forceinline__ int32_t nf4_nearest(const float* map, float x) {
    int32_t at = 127;
    int32_t below = 0;
    int32_t above = 255;
    for (int32_t step = 64; step > 0; step >>= 1) {
        if (x > map[at]) {
            below = at;
            at += step;
        } else {
            above = at;
            at -= step;
        }
    }
    if (x > map[at]) {
        return x > __fmul_rn(__fadd_rn(map[above], map[at]), 0.5f) ? above : at;
    }
    return x < __fmul_rn(__fadd_rn(map[below], map[at]), 0.5f) ? below : at;
}

// Stores eight consecutive elements of a row.
__device__ __forceinline__ void store_eight(bf16* p, const float* v) {
    *(uint4*)p = make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]),
                            pack_bf16(v[6], v[7]));
}

__device__ __forceinline__ uint32_t pack_f16(float lo, float hi) {
    return (uint32_t)to_f16(lo).bits | (uint32_t)to_f16(hi).bits << 16;
}

__device__ __forceinline__ void store_eight(f16* p, const float* v) {
    *(uint4*)p = make_uint4(pack_f16(v[0], v[1]), pack_f16(v[2], v[3]), pack_f16(v[4], v[5]),
                            pack_f16(v[6], v[7]));
}

__device__ __forceinline__ void store_eight(float* p, const float* v) {
    ((float4*)p)[0] = make_float4(v[0], v[1], v[2], v[3]);
    ((float4*)p)[1] = make_float4(v[4], v[5], v[6], v[7]);
}

// out[r, c] = value of element (row0 + r) * cols + col0 + c, for an output of [out_rows, out_cols]
// with leading dimension ld. A thread handles eight consecutive elements in each of four rows, with
// one 4-byte load and one 16-byte store (two for f32) each. A block of 256 threads is `width`
// threads wide (a power of two, 1 ... 256) and 256 / width rows high, four times. absmax is null if
// the scales are double-quantised (q, scales, offset). With via_bf16, an f32 output gets the values
// of a bf16 one. The block is (down, right) of the grid. Launch: 256 threads, grid
// (ceil(out_rows / (4 * 256 / width)), ceil(out_cols / (8 * width))).
template <typename T>
__device__ __forceinline__ void
nf4_dequantise(const uint8_t* codes, const float* absmax, const uint8_t* q, const float* scales,
               const float* offset, const float* maps, int64_t cols, int64_t row0, int64_t col0,
               T* out, int64_t out_rows, int64_t out_cols, int64_t ld, int32_t block_shift,
               int32_t group_shift, int32_t width, int32_t via_bf16, uint32_t down,
               uint32_t right) {
    __shared__ float level[16];
    __shared__ float map[256];
    int32_t high = 256 / width;
    int64_t row = (int64_t)down * 4 * high + (int32_t)threadIdx.x / width;
    int64_t col = ((int64_t)right * width + (int32_t)threadIdx.x % width) * 8;
    bool whole = ((uintptr_t)codes & 3) == 0 && ((uintptr_t)out & 15) == 0 && (cols & 7) == 0 &&
                 (col0 & 7) == 0 && (ld & 7) == 0 && out_cols - col >= 8;
    int64_t e = (row0 + row) * cols + col0 + col;
    const float* source = absmax ? absmax : scales;
    int32_t source_shift = absmax ? block_shift : block_shift + group_shift;
    // Everything that does not depend on the tables is requested before they have arrived. The
    // function is long because the whole and the ragged case use the same tables.
    uint32_t w[4];
    uint32_t code[4];
    float s[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        w[j] = 0;
        code[j] = 0;
        s[j] = 0.0f;
        if (whole && row + j * high < out_rows) {
            int64_t x = e + j * high * cols;
            w[j] = *(const uint32_t*)(codes + (x >> 1));
            s[j] = source[x >> source_shift];
            if (!absmax) {
                code[j] = q[x >> block_shift];
            }
        }
    }
    // Plain scales are handled as map[0] * absmax + 0 with map[0] = 1.
    if (threadIdx.x < 16) {
        level[threadIdx.x] = maps[threadIdx.x];
    }
    map[threadIdx.x] = absmax ? 1.0f : maps[16 + threadIdx.x];
    float middle = absmax ? 0.0f : *offset;
    __syncthreads();
    if (col >= out_cols) {
        return;
    }
    bool narrow = sizeof(T) == 4 && via_bf16 != 0;
    T* p = out + row * ld + col;
    if (whole) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (row + j * high < out_rows) {
                float scale = __fadd_rn(__fmul_rn(map[code[j]], s[j]), middle);
                // The bytes of even and odd are offsets into the table of levels.
                uint32_t even = w[j] >> 2 & 0x3c3c3c3cu;
                uint32_t odd = w[j] << 2 & 0x3c3c3c3cu;
                float v[8];
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    uint32_t at = __byte_perm(i % 2 == 0 ? even : odd, 0, 0x4440 + i / 2);
                    float value = __fmul_rn(*(const float*)((const char*)level + at), scale);
                    v[i] = narrow ? to_float(to_bf16(value)) : value;
                }
                store_eight(p + j * high * ld, v);
            }
        }
        return;
    }
#pragma unroll 1
    for (int j = 0; j < 4 && row + j * high < out_rows; j++) {
#pragma unroll 1
        for (int i = 0; i < 8 && i < out_cols - col; i++) {
            int64_t x = e + j * high * cols + i;
            float factor = map[absmax ? 0 : q[x >> block_shift]];
            float scale = __fadd_rn(__fmul_rn(factor, source[x >> source_shift]), middle);
            uint32_t half = (x & 1) != 0 ? codes[x >> 1] & 15 : codes[x >> 1] >> 4;
            float value = __fmul_rn(level[half], scale);
            store(p + j * high * ld + i, narrow ? to_float(to_bf16(value)) : value);
        }
    }
}

#define NF4_DEQUANTISE(name, type)                                                                 \
    QLORA_KERNEL __launch_bounds__(256) qlora_nf4_dequantise_##name(                               \
        const uint8_t* codes, const float* absmax, const uint8_t* q, const float* scales,          \
        const float* offset, const float* maps, int64_t cols, int64_t row0, int64_t col0,          \
        type* out, int64_t out_rows, int64_t out_cols, int64_t ld, int32_t block_shift,            \
        int32_t group_shift, int32_t width, int32_t via_bf16) {                                    \
        nf4_dequantise(codes, absmax, q, scales, offset, maps, cols, row0, col0, out, out_rows,    \
                       out_cols, ld, block_shift, group_shift, width, via_bf16, blockIdx.x,        \
                       blockIdx.y);                                                                \
    }

#endif
