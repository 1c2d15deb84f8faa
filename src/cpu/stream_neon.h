#ifdef QLORA__NEON

// ---- NEON: streamed weights ---------------------------------------------------------------------

// Of 32 weights, the even ones come first: they are the high halves of their bytes.
static const uint8_t qlora__neon_order[QLORA__STREAM_STEP] = {
    0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 1,  3,  5,  7,  9,  11,
    13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54,
    56, 58, 60, 62, 33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63,
};

// The products of four levels and a scale, prepared for rounding: with 0x8000 added (`ready`), or
// with 0x7fff, the upper half is the nearest bf16.
static QLORA__INLINE uint32x4_t qlora__neon_products(float32x4_t levels, float scale, bool ready) {
    uint32x4_t bits = vreinterpretq_u32_f32(vmulq_n_f32(levels, scale));
    return ready ? bits : vsubq_u32(bits, vtstq_u32(bits, vdupq_n_u32(0x10000)));
}

// The 16 values of a block as bf16: their low bytes and their high bytes.
static QLORA__INLINE uint8x16x2_t qlora__neon_planes(float32x4x4_t levels, float scale,
                                                     bool ready) {
    const uint32x4_t half = vdupq_n_u32(ready ? 0x8000 : 0x7fff);
    uint8x16x2_t planes;
    uint16x4_t r0 = vaddhn_u32(qlora__neon_products(levels.val[0], scale, ready), half);
    uint16x4_t r2 = vaddhn_u32(qlora__neon_products(levels.val[2], scale, ready), half);
    uint16x8_t low = vaddhn_high_u32(r0, qlora__neon_products(levels.val[1], scale, ready), half);
    uint16x8_t high = vaddhn_high_u32(r2, qlora__neon_products(levels.val[3], scale, ready), half);
    planes.val[0] = vuzp1q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high));
    planes.val[1] = vuzp2q_u8(vreinterpretq_u8_u16(low), vreinterpretq_u8_u16(high));
    return planes;
}

// Half of a vector of bf16 as f32. A shift would do, but only one unit shifts.
#define QLORA__WIDE(half, v) vreinterpretq_f32_u16(vzip##half##q_u16(vdupq_n_u16(0), v))

// Adds the products of 16 values, whose low and high bytes are given, and 16 of x to two sums.
#define QLORA__STREAM16(low, high, x, s, t)                                                        \
    do {                                                                                           \
        uint16x8_t first = vreinterpretq_u16_u8(vzip1q_u8(low, high));                             \
        uint16x8_t second = vreinterpretq_u16_u8(vzip2q_u8(low, high));                            \
        s = vfmaq_f32(s, QLORA__WIDE(1, first), vld1q_f32(x));                                     \
        t = vfmaq_f32(t, QLORA__WIDE(2, first), vld1q_f32((x) + 4));                               \
        s = vfmaq_f32(s, QLORA__WIDE(1, second), vld1q_f32((x) + 8));                              \
        t = vfmaq_f32(t, QLORA__WIDE(2, second), vld1q_f32((x) + 12));                             \
    } while (0)

// The same for 32 weights, 16 bytes of codes.
#define QLORA__STREAM32(planes, codes, x, s, t)                                                    \
    do {                                                                                           \
        uint8x16_t pair = vld1q_u8(codes);                                                         \
        uint8x16_t even = vshrq_n_u8(pair, 4);                                                     \
        uint8x16_t odd = vandq_u8(pair, vdupq_n_u8(15));                                           \
        QLORA__STREAM16(vqtbl1q_u8(planes.val[0], even), vqtbl1q_u8(planes.val[1], even), x, s,    \
                        t);                                                                        \
        QLORA__STREAM16(vqtbl1q_u8(planes.val[0], odd), vqtbl1q_u8(planes.val[1], odd), (x) + 16,  \
                        s, t);                                                                     \
    } while (0)

// Two lines at a time: the second keeps the units busy while the first waits for its look-ups. A
// look-up selects one byte of each value; interleaving the bytes, and zeros, makes f32 of them.
static QLORA__INLINE void qlora__neon_stream_pair(const float* levels, const qlora__nf4_line* lines,
                                                  int64_t steps, const float* x, bool ready,
                                                  float32x4_t* sums) {
    const float32x4x4_t all = {
        {vld1q_f32(levels), vld1q_f32(levels + 4), vld1q_f32(levels + 8), vld1q_f32(levels + 12)}};
    const uint8_t* c0 = lines[0].codes;
    const uint8_t* c1 = lines[1].codes;
    float32x4_t s0 = vdupq_n_f32(0.0f), s1 = s0, t0 = s0, t1 = s0;
    for (int64_t i = 0; i < steps; i++) {
        uint8x16x2_t p0 = qlora__neon_planes(all, lines[0].scales[i], ready);
        uint8x16x2_t p1 = qlora__neon_planes(all, lines[1].scales[i], ready);
        QLORA__STREAM32(p0, c0, x, s0, t0);
        QLORA__STREAM32(p1, c1, x, s1, t1);
        QLORA__STREAM32(p0, c0 + 16, x + 32, s0, t0);
        QLORA__STREAM32(p1, c1 + 16, x + 32, s1, t1);
        c0 += 32;
        c1 += 32;
        x += QLORA__STREAM_STEP;
    }
    sums[0] = vaddq_f32(s0, t0);
    sums[1] = vaddq_f32(s1, t1);
}

static void qlora__neon_stream_nf4(const float* levels, const qlora__nf4_line* lines, int64_t steps,
                                   const float* x, float* sums) {
    float32x4_t s[QLORA__STREAM_LINES];
    for (int i = 0; i < QLORA__STREAM_LINES; i += 2) {
        qlora__neon_stream_pair(levels, lines + i, steps, x, false, s + i);
    }
    vst1q_f32(sums, vpaddq_f32(vpaddq_f32(s[0], s[1]), vpaddq_f32(s[2], s[3])));
}

static void qlora__neon_stream_ready(const float* levels, const qlora__nf4_line* lines,
                                     int64_t steps, const float* x, float* sums) {
    float32x4_t s[QLORA__STREAM_LINES];
    for (int i = 0; i < QLORA__STREAM_LINES; i += 2) {
        qlora__neon_stream_pair(levels, lines + i, steps, x, true, s + i);
    }
    vst1q_f32(sums, vpaddq_f32(vpaddq_f32(s[0], s[1]), vpaddq_f32(s[2], s[3])));
}

#undef QLORA__STREAM32
#undef QLORA__STREAM16

static QLORA__INLINE void qlora__neon_scale4(float* at, float factor, float offset) {
    float32x4_t product = vmulq_n_f32(vld1q_f32(at), factor);
    QLORA__ROUNDED(product, "w");
    uint32x4_t bits = vreinterpretq_u32_f32(vaddq_f32(product, vdupq_n_f32(offset)));
    uint32x4_t magnitude = vandq_u32(bits, vdupq_n_u32(0x7fffffffu));
    uint32x4_t is_nan = vcgtq_u32(magnitude, vdupq_n_u32(0x7f800000u));
    bits = vbslq_u32(is_nan, vdupq_n_u32(0x7fc00000u), bits);
    vst1q_f32(at, vreinterpretq_f32_u32(bits));
}

static void qlora__neon_scale(float* scales, int64_t n, float factor, float offset) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        qlora__neon_scale4(scales + i, factor, offset);
    }
    if (i < n) {
        float last[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        memcpy(last, scales + i, (size_t)(n - i) * sizeof last[0]);
        qlora__neon_scale4(last, factor, offset);
        memcpy(scales + i, last, (size_t)(n - i) * sizeof last[0]);
    }
}

// Adds the products of 8 elements of a line, from element i on, and 8 of x to two sums.
#define QLORA__STREAM8(low, high, l, s, t)                                                         \
    s = vfmaq_f32(s, low(l + i), x0), t = vfmaq_f32(t, high(l + i), x1)

// Two functions per type: sums += lines x over a multiple of 8 elements for four lines at a time,
// which have one fold for all; and the sum of one line over a multiple of 32, which reads memory in
// order.
#define QLORA__STREAM_TYPE(name, type, low, high)                                                  \
    static void name(const void* const* lines, int64_t n, const float* x, float* sums) {           \
        const type* l0 = (const type*)lines[0];                                                    \
        const type* l1 = (const type*)lines[1];                                                    \
        const type* l2 = (const type*)lines[2];                                                    \
        const type* l3 = (const type*)lines[3];                                                    \
        float32x4_t s0 = vdupq_n_f32(0.0f), s1 = s0, s2 = s0, s3 = s0;                             \
        float32x4_t t0 = s0, t1 = s0, t2 = s0, t3 = s0;                                            \
        for (int64_t i = 0; i < n; i += 8, x += 8) {                                               \
            float32x4_t x0 = vld1q_f32(x), x1 = vld1q_f32(x + 4);                                  \
            QLORA__STREAM8(low, high, l0, s0, t0);                                                 \
            QLORA__STREAM8(low, high, l1, s1, t1);                                                 \
            QLORA__STREAM8(low, high, l2, s2, t2);                                                 \
            QLORA__STREAM8(low, high, l3, s3, t3);                                                 \
        }                                                                                          \
        s0 = vpaddq_f32(vaddq_f32(s0, t0), vaddq_f32(s1, t1));                                     \
        s2 = vpaddq_f32(vaddq_f32(s2, t2), vaddq_f32(s3, t3));                                     \
        vst1q_f32(sums, vaddq_f32(vld1q_f32(sums), vpaddq_f32(s0, s2)));                           \
    }                                                                                              \
    static float name##_line(const void* line, int64_t n, const float* x) {                        \
        const type* l = (const type*)line;                                                         \
        float32x4_t s0 = vdupq_n_f32(0.0f), s1 = s0, s2 = s0, s3 = s0;                             \
        float32x4_t t0 = s0, t1 = s0, t2 = s0, t3 = s0;                                            \
        for (int64_t i = 0; i < n; i += 32, x += 32) {                                             \
            float32x4_t x0 = vld1q_f32(x), x1 = vld1q_f32(x + 4);                                  \
            QLORA__STREAM8(low, high, l, s0, t0);                                                  \
            x0 = vld1q_f32(x + 8), x1 = vld1q_f32(x + 12);                                         \
            QLORA__STREAM8(low, high, 8 + l, s1, t1);                                              \
            x0 = vld1q_f32(x + 16), x1 = vld1q_f32(x + 20);                                        \
            QLORA__STREAM8(low, high, 16 + l, s2, t2);                                             \
            x0 = vld1q_f32(x + 24), x1 = vld1q_f32(x + 28);                                        \
            QLORA__STREAM8(low, high, 24 + l, s3, t3);                                             \
        }                                                                                          \
        s0 = vaddq_f32(vaddq_f32(vaddq_f32(s0, t0), vaddq_f32(s1, t1)),                            \
                       vaddq_f32(vaddq_f32(s2, t2), vaddq_f32(s3, t3)));                           \
        return vaddvq_f32(s0);                                                                     \
    }

#define QLORA__F32_HIGH(p) vld1q_f32((p) + 4)
#define QLORA__BF16_LOW(p) QLORA__WIDE(1, vld1q_u16(p))
#define QLORA__BF16_HIGH(p) QLORA__WIDE(2, vld1q_u16(p))
#define QLORA__F16_LOW(p) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)))
#define QLORA__F16_HIGH(p) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((p) + 4)))

QLORA__STREAM_TYPE(qlora__neon_stream_f32, float, vld1q_f32, QLORA__F32_HIGH)
QLORA__STREAM_TYPE(qlora__neon_stream_bf16, uint16_t, QLORA__BF16_LOW, QLORA__BF16_HIGH)
QLORA__STREAM_TYPE(qlora__neon_stream_f16, uint16_t, QLORA__F16_LOW, QLORA__F16_HIGH)

#undef QLORA__F32_HIGH
#undef QLORA__BF16_LOW
#undef QLORA__BF16_HIGH
#undef QLORA__F16_LOW
#undef QLORA__F16_HIGH
#undef QLORA__STREAM_TYPE
#undef QLORA__STREAM8
#undef QLORA__WIDE

static void qlora__neon_stream_dense(const void* const* lines, qlora_dtype dtype, int64_t n,
                                     const float* x, float* sums) {
    static const struct {
        void (*lines)(const void* const* lines, int64_t n, const float* x, float* sums);
        float (*line)(const void* line, int64_t n, const float* x);
    } kernels[] = {{qlora__neon_stream_f32, qlora__neon_stream_f32_line},
                   {qlora__neon_stream_bf16, qlora__neon_stream_bf16_line},
                   {qlora__neon_stream_f16, qlora__neon_stream_f16_line}};
    if (n % 32 == 0 && n >= QLORA__STREAM_LONG) {
        for (int i = 0; i < QLORA__STREAM_LINES; i++) {
            sums[i] = kernels[dtype].line(lines[i], n, x);
        }
        return;
    }
    int64_t whole = n / 8 * 8;
    memset(sums, 0, QLORA__STREAM_LINES * sizeof *sums);
    kernels[dtype].lines(lines, whole, x, sums);
    if (whole < n) {
        size_t size = dtype == QLORA_F32 ? 4 : 2;
        char room[QLORA__STREAM_LINES][64];
        const void* tail[QLORA__STREAM_LINES];
        float rest[8];
        memset(rest, 0, sizeof rest);
        memcpy(rest, x + whole, (size_t)(n - whole) * sizeof rest[0]);
        qlora__stream_tail(lines, (size_t)whole * size, (size_t)(n - whole) * size, room, tail);
        kernels[dtype].lines(tail, 8, rest, sums);
    }
}

// Even and odd rows have sums of their own.
static void qlora__neon_blend(const float* a, const float* b, int64_t ld, int64_t n, float* sums) {
    float32x4_t s0 = vdupq_n_f32(0.0f), s1 = s0, s2 = s0, s3 = s0;
    float32x4_t t0 = s0, t1 = s0, t2 = s0, t3 = s0;
    int64_t i = 0;
    for (; i + 2 <= n; i += 2, b += 2 * ld) {
        float32x2_t pair = vld1_f32(a + i);
        s0 = vfmaq_lane_f32(s0, vld1q_f32(b), pair, 0);
        s1 = vfmaq_lane_f32(s1, vld1q_f32(b + 4), pair, 0);
        s2 = vfmaq_lane_f32(s2, vld1q_f32(b + 8), pair, 0);
        s3 = vfmaq_lane_f32(s3, vld1q_f32(b + 12), pair, 0);
        t0 = vfmaq_lane_f32(t0, vld1q_f32(b + ld), pair, 1);
        t1 = vfmaq_lane_f32(t1, vld1q_f32(b + ld + 4), pair, 1);
        t2 = vfmaq_lane_f32(t2, vld1q_f32(b + ld + 8), pair, 1);
        t3 = vfmaq_lane_f32(t3, vld1q_f32(b + ld + 12), pair, 1);
    }
    if (i < n) {
        float32x4_t last = vdupq_n_f32(a[i]);
        s0 = vfmaq_f32(s0, vld1q_f32(b), last);
        s1 = vfmaq_f32(s1, vld1q_f32(b + 4), last);
        s2 = vfmaq_f32(s2, vld1q_f32(b + 8), last);
        s3 = vfmaq_f32(s3, vld1q_f32(b + 12), last);
    }
    vst1q_f32(sums, vaddq_f32(s0, t0));
    vst1q_f32(sums + 4, vaddq_f32(s1, t1));
    vst1q_f32(sums + 8, vaddq_f32(s2, t2));
    vst1q_f32(sums + 12, vaddq_f32(s3, t3));
}

static const qlora__cpu_stream qlora__neon_stream = {
    qlora__neon_order, qlora__neon_stream_nf4,   qlora__neon_stream_ready,
    qlora__neon_scale, qlora__neon_stream_dense, qlora__neon_blend,
};

#endif // QLORA__NEON
