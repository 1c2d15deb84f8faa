// fp8_norm.cu - the norms of norm.cuh, and rope.cuh backward, with the codes of their results for
// FP8 products.
// targets: 90a
// groups: bf16 fp8
//
// Results, codes and scales are those of qlora_norm_rms_fwd_bf16, or _bwd_bf16, and
// qlora_fp8_quantise after it. Rows have one head; cols is a multiple of 8 and at most 8192, and
// all rows begin at multiples of 16 bytes, so that a thread keeps its two pieces of a row; the
// weights are f32. Launch: that of norm.cuh.
#include "fp8.cuh"
#include "../layer/norm.cuh"
#include "../layer/rope.cuh"

// Where the codes of a result go.
struct coder {
    const float* factor;
    uint8_t* q;
    int64_t ldq;
    float* scales;

    // The codes and the scale of a row, of which a thread has `kept`; zeros up to ldq.
    __device__ __forceinline__ void write(const uint4 (&kept)[KEPT], int64_t row, int64_t rows,
                                          int32_t first, int32_t step, int32_t width,
                                          float* shared) const {
        float most = largest_of(kept[1], largest_of(kept[0], 0.0f));
        float scale = fp8_scale(row_max(most, shared, width));
        float inverse = __frcp_rn(scale);
        if (row >= rows) {
            return;
        }
#pragma unroll
        for (int k = 0; k < KEPT; k++) {
            int32_t c = first + k * step;
            if (c < ldq) {
                *(uint2*)(q + row * ldq + c) = codes_of(kept[k], inverse);
            }
        }
        if (first == 0) {
            scales[row] = __fmul_rn(scale, *factor);
        }
    }
};

QLORA_KERNEL __launch_bounds__(512, 2)
    qlora_fp8_norm_fwd(const bf16* h_in, int64_t ld_in, const bf16* delta, int64_t ld_delta,
                       bf16* h_out, int64_t ld_out, const float* w, int32_t, bf16* y,
                       int64_t ld_y, int64_t rows, int32_t cols, float eps, int32_t width,
                       const float* factor, uint8_t* q, int64_t ldq, float* scales) {
    __shared__ float shared[32];
    row_place place = place_row(width);
    int64_t row = place.row;
    int32_t first = place.lane * 8;
    int32_t step = width * 8;
    int32_t end = row < rows ? cols : 0;
    fwd_row<bf16> r;
    r.from = h_in + row * ld_in;
    r.add = delta != 0 ? delta + row * ld_delta : 0;
    r.sum_to = h_out + row * ld_out;
    r.to = y + row * ld_y;
    r.w = w;
    r.w_bf16 = 0;
    uint4 kept[KEPT];
    uint4 more[KEPT];
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        int32_t c = first + k * step;
        kept[k] = c < end ? *(const uint4*)(r.from + c) : make_uint4(0, 0, 0, 0);
        more[k] = c < end && r.add != 0 ? *(const uint4*)(r.add + c) : make_uint4(0, 0, 0, 0);
    }
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        int32_t c = first + k * step;
        if (c < end) {
            kept[k] = fwd_sum(r, kept[k], more[k], c, squares);
        }
    }
    float rstd = 1.0f / sqrtf(row_sum(squares, shared, width) / (float)cols + eps);
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        int32_t c = first + k * step;
        if (c < end) {
            kept[k] = fwd_scale(r, kept[k], c, rstd);
        }
    }
    const coder to = {factor, q, ldq, scales};
    to.write(kept, row, rows, first, step, width, shared);
}

QLORA_KERNEL __launch_bounds__(512, 2)
    qlora_fp8_norm_bwd(const bf16* dy, int64_t ld_dy, const bf16* h, int64_t ld_h, const float* w,
                       int32_t, const bf16* dres, int64_t ld_dres, bf16* dh, int64_t ld_dh,
                       float* rstd_out, int64_t rows, int32_t cols, float eps, int32_t width,
                       const float* factor, uint8_t* q, int64_t ldq, float* scales) {
    __shared__ float shared[64];
    row_place place = place_row(width);
    int64_t row = place.row;
    int32_t first = place.lane * 8;
    int32_t step = width * 8;
    int32_t end = row < rows ? cols : 0;
    bwd_row<bf16> r;
    r.dy = dy + row * ld_dy;
    r.h = h + row * ld_h;
    r.dres = dres != 0 ? dres + row * ld_dres : 0;
    r.dh = dh + row * ld_dh;
    r.w = w;
    r.w_bf16 = 0;
    const uint4 zero = make_uint4(0, 0, 0, 0);
    uint4 kept[KEPT];
    uint4 kept_dy[KEPT];
    uint4 kept_res[KEPT];
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        int32_t c = first + k * step;
        kept[k] = c < end ? *(const uint4*)(r.h + c) : zero;
        kept_dy[k] = c < end ? *(const uint4*)(r.dy + c) : zero;
        kept_res[k] = c < end && r.dres != 0 ? *(const uint4*)(r.dres + c) : zero;
    }
    float squares = 0.0f;
    float dot = 0.0f;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        int32_t c = first + k * step;
        if (c < end) {
            bwd_add(r, kept[k], kept_dy[k], c, squares, dot);
        }
    }
    row_sum_two(squares, dot, shared, width);
    float rstd = 1.0f / sqrtf(squares / (float)cols + eps);
    float pull = dot / (float)cols * rstd * rstd;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        int32_t c = first + k * step;
        if (c < end) {
            kept[k] = bwd_piece(r, kept[k], kept_dy[k], kept_res[k], c, rstd, pull);
        }
    }
    if (rstd_out != 0 && place.lane == 0 && row < rows) {
        rstd_out[row] = rstd;
    }
    const coder to = {factor, q, ldq, scales};
    to.write(kept, row, rows, first, step, width, shared);
}

// Row r of x [rows, cols], in place: the first `rotated` columns, heads of 2 half columns, are
// rotated back, as rope.cuh does it with sign -1, pairs half a head apart and no bias; and the
// codes and the scale of the whole row, as qlora_fp8_quantise writes them. half and cols are
// multiples of 8; rows, also of the table, begin at multiples of 16 bytes. Launch: one block per
// row, of at most 512 threads, a multiple of 32, one for 8 pairs of a row, and for 8 of its other
// columns up to ldq. Each element has one writer, and a maximum does not depend on the order.
QLORA_KERNEL __launch_bounds__(512, 2)
    qlora_fp8_rope(bf16* x, int64_t ld, const int32_t* positions, const float* table,
                   int64_t ld_table, int32_t max_pos, int32_t rotated, int32_t cols, int32_t half,
                   int32_t* bad, const float* factor, uint8_t* q, int64_t ldq, float* scales) {
    __shared__ float shared[32];
    int64_t row = blockIdx.x;
    int32_t position = positions[row];
    bool inside = position >= 0 && position < max_pos;
    int32_t pair = (int32_t)threadIdx.x * 8;
    int32_t at = pair + pair / half * half; // of the first of 8 pairs
    int32_t rest = rotated + pair;
    bool turns = pair < rotated / 2;
    bf16* from = x + row * ld;
    const uint4 zero = make_uint4(0, 0, 0, 0);
    uint4 lo = turns ? *(const uint4*)(from + at) : zero;
    uint4 hi = turns ? *(const uint4*)(from + at + half) : zero;
    uint4 more = rest < cols ? *(const uint4*)(from + rest) : zero;
    if (turns && inside) {
        const float* turn = table + position * ld_table + at % (2 * half);
        float a[8];
        float b[8];
        float c[8];
        float s[8];
        unpack(lo, a);
        unpack(hi, b);
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            *(float4*)(c + i) = *(const float4*)(turn + i);
            *(float4*)(s + i) = *(const float4*)(turn + half + i);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            rotate(a[i], b[i], c[i], -s[i]);
        }
        lo = pack(a);
        hi = pack(b);
        *(uint4*)(from + at) = lo;
        *(uint4*)(from + at + half) = hi;
    }
    float most = largest_of(more, largest_of(hi, largest_of(lo, 0.0f)));
    float scale = fp8_scale(row_max(most, shared, (int32_t)blockDim.x));
    float inverse = __frcp_rn(scale);
    uint8_t* to = q + row * ldq;
    if (turns) {
        *(uint2*)(to + at) = codes_of(lo, inverse);
        *(uint2*)(to + at + half) = codes_of(hi, inverse);
    }
    if (rest < ldq) {
        *(uint2*)(to + rest) = codes_of(more, inverse);
    }
    if (threadIdx.x == 0) {
        scales[row] = __fmul_rn(scale, *factor);
        if (!inside) {
            *bad = 1;
        }
    }
}
