#ifdef QLORA__NEON

// ---- NEON: products -----------------------------------------------------------------------------

static void qlora__neon_tile(int64_t steps, const float* a, const float* b, float* c, int64_t ldc,
                             bool add) {
    qlora__block_product p;
    p.k = steps;
    p.lda = 8;
    p.ldb = 12;
    p.ldc = ldc;
    p.add = add;
    p.ahead = 0;
    qlora__neon_sums(&p, a, b, c);
}

#define QLORA__ROW(i, a, lane)                                                                     \
    c##i##0 = vfmaq_laneq_f32(c##i##0, b0, a, lane);                                               \
    c##i##1 = vfmaq_laneq_f32(c##i##1, b1, a, lane)
#define QLORA__ROW_LOAD(i)                                                                         \
    c##i##0 = vld1q_f32(c + i * ldc);                                                              \
    c##i##1 = vld1q_f32(c + i * ldc + 4)
#define QLORA__ROW_STORE(i)                                                                        \
    vst1q_f32(c + i * ldc, c##i##0);                                                               \
    vst1q_f32(c + i * ldc + 4, c##i##1)

// C[8][8] += a[k][8] b[k][8]
static void qlora__neon_narrow(int64_t steps, const float* a, const float* b, float* c, int64_t ldc,
                               bool add) {
    float32x4_t c00 = vdupq_n_f32(0.0f), c01 = c00, c10 = c00, c11 = c00, c20 = c00, c21 = c00;
    float32x4_t c30 = c00, c31 = c00, c40 = c00, c41 = c00, c50 = c00, c51 = c00;
    float32x4_t c60 = c00, c61 = c00, c70 = c00, c71 = c00;
    if (add) {
        QLORA__ROW_LOAD(0);
        QLORA__ROW_LOAD(1);
        QLORA__ROW_LOAD(2);
        QLORA__ROW_LOAD(3);
        QLORA__ROW_LOAD(4);
        QLORA__ROW_LOAD(5);
        QLORA__ROW_LOAD(6);
        QLORA__ROW_LOAD(7);
    }
    for (int64_t k = 0; k < steps; k++) {
        float32x4_t b0 = vld1q_f32(b);
        float32x4_t b1 = vld1q_f32(b + 4);
        float32x4_t a0 = vld1q_f32(a);
        float32x4_t a4 = vld1q_f32(a + 4);
        b += 8;
        a += 8;
        QLORA__ROW(0, a0, 0);
        QLORA__ROW(1, a0, 1);
        QLORA__ROW(2, a0, 2);
        QLORA__ROW(3, a0, 3);
        QLORA__ROW(4, a4, 0);
        QLORA__ROW(5, a4, 1);
        QLORA__ROW(6, a4, 2);
        QLORA__ROW(7, a4, 3);
    }
    QLORA__ROW_STORE(0);
    QLORA__ROW_STORE(1);
    QLORA__ROW_STORE(2);
    QLORA__ROW_STORE(3);
    QLORA__ROW_STORE(4);
    QLORA__ROW_STORE(5);
    QLORA__ROW_STORE(6);
    QLORA__ROW_STORE(7);
}

#undef QLORA__ROW
#undef QLORA__ROW_LOAD
#undef QLORA__ROW_STORE

// Four lines side by side: out[k * width + i] = lines[i][k].
static void qlora__neon_pack4(const float* const* lines, int64_t steps, int64_t width, float* out) {
    const float* l0 = lines[0];
    const float* l1 = lines[1];
    const float* l2 = lines[2];
    const float* l3 = lines[3];
    int64_t k = 0;
    for (; k + 4 <= steps; k += 4) {
        float32x4x2_t even = vtrnq_f32(vld1q_f32(l0 + k), vld1q_f32(l1 + k));
        float32x4x2_t odd = vtrnq_f32(vld1q_f32(l2 + k), vld1q_f32(l3 + k));
        float* to = out + k * width;
        vst1q_f32(to, vcombine_f32(vget_low_f32(even.val[0]), vget_low_f32(odd.val[0])));
        vst1q_f32(to + width, vcombine_f32(vget_low_f32(even.val[1]), vget_low_f32(odd.val[1])));
        vst1q_f32(to + 2 * width,
                  vcombine_f32(vget_high_f32(even.val[0]), vget_high_f32(odd.val[0])));
        vst1q_f32(to + 3 * width,
                  vcombine_f32(vget_high_f32(even.val[1]), vget_high_f32(odd.val[1])));
    }
    for (; k < steps; k++) {
        for (int i = 0; i < 4; i++) {
            out[k * width + i] = lines[i][k];
        }
    }
}

// Pieces of 12 for the tile above, of 8 for the narrow one.
static void qlora__neon_spread(const float* from, int64_t n, int64_t width, int64_t jump,
                               float* out) {
    int64_t i = 0;
    for (; width == 12 && i + 12 <= n; i += 12, out += jump) {
        vst1q_f32(out, vld1q_f32(from + i));
        vst1q_f32(out + 4, vld1q_f32(from + i + 4));
        vst1q_f32(out + 8, vld1q_f32(from + i + 8));
    }
    for (; width == 8 && i + 8 <= n; i += 8, out += jump) {
        vst1q_f32(out, vld1q_f32(from + i));
        vst1q_f32(out + 4, vld1q_f32(from + i + 4));
    }
}

static void qlora__neon_widen(const uint16_t* from, qlora_dtype dtype, int64_t n, float* out) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        uint16x8_t v = vld1q_u16(from + i);
        if (dtype == QLORA_BF16) {
            vst1q_f32(out + i, vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(v), 16)));
            vst1q_f32(out + i + 4, vreinterpretq_f32_u32(vshll_high_n_u16(v, 16)));
        } else {
            float16x8_t h = vreinterpretq_f16_u16(v);
            vst1q_f32(out + i, vcvt_f32_f16(vget_low_f16(h)));
            vst1q_f32(out + i + 4, vcvt_high_f32_f16(h));
        }
    }
    for (; i < n; i++) {
        out[i] = dtype == QLORA_BF16 ? qlora__bf16_to(from[i]) : qlora__f16_to(from[i]);
    }
}

// level[code] * scale for all 16 codes, rounded to bf16.
static QLORA__INLINE uint16x8x2_t qlora__neon_nf4_values(const float* levels, float scale) {
    uint16x4_t part[4];
    for (int i = 0; i < 4; i++) {
        uint32x4_t bits = vreinterpretq_u32_f32(vmulq_n_f32(vld1q_f32(levels + 4 * i), scale));
        uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        bits = vaddq_u32(vaddq_u32(bits, odd), vdupq_n_u32(0x7fff)); // to nearest even
        part[i] = vshrn_n_u32(bits, 16);
    }
    uint16x8x2_t values;
    values.val[0] = vcombine_u16(part[0], part[1]);
    values.val[1] = vcombine_u16(part[2], part[3]);
    return values;
}

// The values of 16 codes, from the low and the high bytes of all values; the first code is the high
// half of a byte.
static QLORA__INLINE uint16x8x2_t qlora__neon_nf4_select(const uint8_t* codes, uint8x16_t low,
                                                         uint8x16_t high) {
    uint8x8_t pair = vld1_u8(codes);
    uint8x8_t before = vshr_n_u8(pair, 4);
    uint8x8_t after = vand_u8(pair, vdup_n_u8(15));
    uint8x16_t code = vcombine_u8(vzip1_u8(before, after), vzip2_u8(before, after));
    uint8x16_t l = vqtbl1q_u8(low, code);
    uint8x16_t h = vqtbl1q_u8(high, code);
    uint16x8x2_t values;
    values.val[0] = vreinterpretq_u16_u8(vzip1q_u8(l, h));
    values.val[1] = vreinterpretq_u16_u8(vzip2q_u8(l, h));
    return values;
}

// The 16 products of a block are made once; a code then selects their bytes.
static void qlora__neon_nf4(const float* levels, float scale, const uint8_t* codes, int64_t n,
                            float* out) {
    uint16x8x2_t all = qlora__neon_nf4_values(levels, scale);
    uint8x16_t first = vreinterpretq_u8_u16(all.val[0]);
    uint8x16_t second = vreinterpretq_u8_u16(all.val[1]);
    uint8x16_t low = vuzp1q_u8(first, second);
    uint8x16_t high = vuzp2q_u8(first, second);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        uint16x8x2_t w = qlora__neon_nf4_select(codes + i / 2, low, high);
        vst1q_f32(out + i, vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(w.val[0]), 16)));
        vst1q_f32(out + i + 4, vreinterpretq_f32_u32(vshll_high_n_u16(w.val[0], 16)));
        vst1q_f32(out + i + 8, vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(w.val[1]), 16)));
        vst1q_f32(out + i + 12, vreinterpretq_f32_u32(vshll_high_n_u16(w.val[1], 16)));
    }
    uint16_t table[16];
    if (i < n) {
        vst1q_u16(table, all.val[0]);
        vst1q_u16(table + 8, all.val[1]);
    }
    for (; i < n; i++) {
        out[i] = qlora__bf16_to(table[qlora__nf4_code_at(codes, i)]);
    }
}

static const qlora__cpu_gemm qlora__neon_gemm = {
    {
        640,
        192,
        8,
        12,
        qlora__neon_tile,
        8,
        qlora__neon_narrow,
    },
    qlora__neon_pack4,
    NULL,
    qlora__neon_spread,
    qlora__neon_widen,
    qlora__neon_nf4,
};

#endif // QLORA__NEON
