#ifdef QLORA__NEON_BF16

// ---- products with NEON's bf16 instructions -----------------------------------------------------

// bfmmla adds the products of two rows and two columns, four k each, to four sums. It rounds every
// sum to odd, and takes numbers below the smallest normal one for zero.

// c[2][2] += a[2][4] b[2][4]^T
#define QLORA__MMLA(c, a, b) __asm__("bfmmla %0.4s, %1.8h, %2.8h" : "+w"(c) : "w"(a), "w"(b))

// Two rows of four columns, in memory and as two blocks of two columns.
#define QLORA__PAIR_LOAD(i, left, right, col)                                                      \
    do {                                                                                           \
        float64x2_t upper = vreinterpretq_f64_f32(vld1q_f32(c + 2 * (i)*ldc + (col)));             \
        float64x2_t lower = vreinterpretq_f64_f32(vld1q_f32(c + (2 * (i) + 1) * ldc + (col)));     \
        left = vreinterpretq_f32_f64(vzip1q_f64(upper, lower));                                    \
        right = vreinterpretq_f32_f64(vzip2q_f64(upper, lower));                                   \
    } while (0)
#define QLORA__PAIR_STORE(i, left, right, col)                                                     \
    do {                                                                                           \
        float64x2_t l = vreinterpretq_f64_f32(left);                                               \
        float64x2_t r = vreinterpretq_f64_f32(right);                                              \
        vst1q_f32(c + 2 * (i)*ldc + (col), vreinterpretq_f32_f64(vzip1q_f64(l, r)));               \
        vst1q_f32(c + (2 * (i) + 1) * ldc + (col), vreinterpretq_f32_f64(vzip2q_f64(l, r)));       \
    } while (0)

#define QLORA__ROWS_LOAD(i)                                                                        \
    QLORA__PAIR_LOAD(i, c##i##0, c##i##1, 0);                                                      \
    QLORA__PAIR_LOAD(i, c##i##2, c##i##3, 4);                                                      \
    QLORA__PAIR_LOAD(i, c##i##4, c##i##5, 8)
#define QLORA__ROWS_STORE(i)                                                                       \
    QLORA__PAIR_STORE(i, c##i##0, c##i##1, 0);                                                     \
    QLORA__PAIR_STORE(i, c##i##2, c##i##3, 4);                                                     \
    QLORA__PAIR_STORE(i, c##i##4, c##i##5, 8)
#define QLORA__ROWS(i)                                                                             \
    do {                                                                                           \
        uint16x8_t a0 = vld1q_u16(at + 8 * (i));                                                   \
        QLORA__MMLA(c##i##0, a0, b0);                                                              \
        QLORA__MMLA(c##i##1, a0, b1);                                                              \
        QLORA__MMLA(c##i##2, a0, b2);                                                              \
        QLORA__MMLA(c##i##3, a0, b3);                                                              \
        QLORA__MMLA(c##i##4, a0, b4);                                                              \
        QLORA__MMLA(c##i##5, a0, b5);                                                              \
    } while (0)

// C[8][12] += a[k][8] b[k][12]: 24 blocks of sums, six vectors of b and one of a fill 31 of 32
// registers.
QLORA__TARGET_NEON_BF16 static void qlora__neon_bf16_tile(int64_t steps, const float* a,
                                                          const float* b, float* c, int64_t ldc,
                                                          bool add) {
    const uint16_t* at = (const uint16_t*)(const void*)a;
    const uint16_t* bt = (const uint16_t*)(const void*)b;
    float32x4_t c00 = vdupq_n_f32(0.0f), c01 = c00, c02 = c00, c03 = c00, c04 = c00, c05 = c00;
    float32x4_t c10 = c00, c11 = c00, c12 = c00, c13 = c00, c14 = c00, c15 = c00;
    float32x4_t c20 = c00, c21 = c00, c22 = c00, c23 = c00, c24 = c00, c25 = c00;
    float32x4_t c30 = c00, c31 = c00, c32 = c00, c33 = c00, c34 = c00, c35 = c00;
    if (add) {
        QLORA__ROWS_LOAD(0);
        QLORA__ROWS_LOAD(1);
        QLORA__ROWS_LOAD(2);
        QLORA__ROWS_LOAD(3);
    }
    for (int64_t k = 0; k < steps; k += 4) {
        uint16x8_t b0 = vld1q_u16(bt);
        uint16x8_t b1 = vld1q_u16(bt + 8);
        uint16x8_t b2 = vld1q_u16(bt + 16);
        uint16x8_t b3 = vld1q_u16(bt + 24);
        uint16x8_t b4 = vld1q_u16(bt + 32);
        uint16x8_t b5 = vld1q_u16(bt + 40);
        QLORA__ROWS(0);
        QLORA__ROWS(1);
        QLORA__ROWS(2);
        QLORA__ROWS(3);
        bt += 48;
        at += 32;
    }
    QLORA__ROWS_STORE(0);
    QLORA__ROWS_STORE(1);
    QLORA__ROWS_STORE(2);
    QLORA__ROWS_STORE(3);
}

#undef QLORA__ROWS_LOAD
#undef QLORA__ROWS_STORE
#undef QLORA__ROWS

#define QLORA__ROWS_LOAD(i)                                                                        \
    QLORA__PAIR_LOAD(i, c##i##0, c##i##1, 0);                                                      \
    QLORA__PAIR_LOAD(i, c##i##2, c##i##3, 4)
#define QLORA__ROWS_STORE(i)                                                                       \
    QLORA__PAIR_STORE(i, c##i##0, c##i##1, 0);                                                     \
    QLORA__PAIR_STORE(i, c##i##2, c##i##3, 4)
#define QLORA__ROWS(i)                                                                             \
    do {                                                                                           \
        uint16x8_t a0 = vld1q_u16(at + 8 * (i));                                                   \
        QLORA__MMLA(c##i##0, a0, b0);                                                              \
        QLORA__MMLA(c##i##1, a0, b1);                                                              \
        QLORA__MMLA(c##i##2, a0, b2);                                                              \
        QLORA__MMLA(c##i##3, a0, b3);                                                              \
    } while (0)

// C[8][8] += a[k][8] b[k][8]
QLORA__TARGET_NEON_BF16 static void qlora__neon_bf16_narrow(int64_t steps, const float* a,
                                                            const float* b, float* c, int64_t ldc,
                                                            bool add) {
    const uint16_t* at = (const uint16_t*)(const void*)a;
    const uint16_t* bt = (const uint16_t*)(const void*)b;
    float32x4_t c00 = vdupq_n_f32(0.0f), c01 = c00, c02 = c00, c03 = c00, c10 = c00, c11 = c00;
    float32x4_t c12 = c00, c13 = c00, c20 = c00, c21 = c00, c22 = c00, c23 = c00;
    float32x4_t c30 = c00, c31 = c00, c32 = c00, c33 = c00;
    if (add) {
        QLORA__ROWS_LOAD(0);
        QLORA__ROWS_LOAD(1);
        QLORA__ROWS_LOAD(2);
        QLORA__ROWS_LOAD(3);
    }
    for (int64_t k = 0; k < steps; k += 4) {
        uint16x8_t b0 = vld1q_u16(bt);
        uint16x8_t b1 = vld1q_u16(bt + 8);
        uint16x8_t b2 = vld1q_u16(bt + 16);
        uint16x8_t b3 = vld1q_u16(bt + 24);
        QLORA__ROWS(0);
        QLORA__ROWS(1);
        QLORA__ROWS(2);
        QLORA__ROWS(3);
        bt += 32;
        at += 32;
    }
    QLORA__ROWS_STORE(0);
    QLORA__ROWS_STORE(1);
    QLORA__ROWS_STORE(2);
    QLORA__ROWS_STORE(3);
}

#undef QLORA__ROWS_LOAD
#undef QLORA__ROWS_STORE
#undef QLORA__ROWS
#undef QLORA__PAIR_LOAD
#undef QLORA__PAIR_STORE
#undef QLORA__MMLA

QLORA__TARGET_NEON_BF16 static void qlora__neon_bf16_round(const float* from, float factor,
                                                           int64_t n, uint16_t* to) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        float32x4_t first = vmulq_n_f32(vld1q_f32(from + i), factor);
        float32x4_t second = vmulq_n_f32(vld1q_f32(from + i + 4), factor);
        uint16x8_t both;
        __asm__("bfcvtn %0.4h, %1.4s\n\tbfcvtn2 %0.8h, %2.4s"
                : "=&w"(both)
                : "w"(first), "w"(second));
        vst1q_u16(to + i, both);
    }
    for (; i < n; i++) {
        to[i] = qlora__bf16_from(from[i] * factor);
    }
}

// For every four steps, two lines are side by side, eight elements together.
static void qlora__neon_bf16_lines(const uint16_t* const* lines, int64_t n, int64_t width,
                                   int64_t line, uint16_t* out) {
    int64_t jump = 4 * width;
    int64_t k = 0;
    out += 4 * line;
    for (; k + 8 <= n; k += 8) {
        uint64x2_t a = vreinterpretq_u64_u16(vld1q_u16(lines[0] + k));
        uint64x2_t b = vreinterpretq_u64_u16(vld1q_u16(lines[1] + k));
        vst1q_u16(out, vreinterpretq_u16_u64(vzip1q_u64(a, b)));
        vst1q_u16(out + jump, vreinterpretq_u16_u64(vzip2q_u64(a, b)));
        out += 2 * jump;
    }
    for (; k < n; k += 4) {
        size_t bytes = (size_t)qlora__min(4, n - k) * sizeof *out;
        memset(out, 0, 8 * sizeof *out);
        memcpy(out, lines[0] + k, bytes);
        memcpy(out + 4, lines[1] + k, bytes);
        out += jump;
    }
}

// Two vectors, of two lines each, from four steps of eight lines whose halves have been interleaved
#define QLORA__QUAD_STORE(a, b)                                                                    \
    do {                                                                                           \
        uint32x4_t upper = vreinterpretq_u32_u16(a);                                               \
        uint32x4_t lower = vreinterpretq_u32_u16(b);                                               \
        vst1q_u16(out, vreinterpretq_u16_u32(vzip1q_u32(upper, lower)));                           \
        vst1q_u16(out + 8, vreinterpretq_u16_u32(vzip2q_u32(upper, lower)));                       \
        left -= 4;                                                                                 \
        out += left > 0 ? 16 : next;                                                               \
        left = left > 0 ? left : width;                                                            \
    } while (0)

static void qlora__neon_bf16_quad(const uint16_t* const* rows, int64_t k, int64_t n, int64_t width,
                                  int64_t jump, uint16_t* out) {
    int64_t left = width;
    out += k * width;
    int64_t next = jump - 4 * (width - 4); // from the last four lines of a panel to the next panel
    for (int64_t i = 0; i < n; i += 8) {
        uint16x8_t r0 = vld1q_u16(rows[0] + i);
        uint16x8_t r1 = vld1q_u16(rows[1] + i);
        uint16x8_t r2 = vld1q_u16(rows[2] + i);
        uint16x8_t r3 = vld1q_u16(rows[3] + i);
        QLORA__QUAD_STORE(vzip1q_u16(r0, r1), vzip1q_u16(r2, r3));
        if (i + 4 < n) {
            QLORA__QUAD_STORE(vzip2q_u16(r0, r1), vzip2q_u16(r2, r3));
        }
    }
}

#undef QLORA__QUAD_STORE

static void qlora__neon_bf16_nf4(const float* levels, float scale, const uint8_t* codes, int64_t n,
                                 uint16_t* out) {
    uint16x8x2_t all = qlora__neon_nf4_values(levels, scale);
    uint8x16_t first = vreinterpretq_u8_u16(all.val[0]);
    uint8x16_t second = vreinterpretq_u8_u16(all.val[1]);
    uint8x16_t low = vuzp1q_u8(first, second);
    uint8x16_t high = vuzp2q_u8(first, second);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        uint16x8x2_t w = qlora__neon_nf4_select(codes + i / 2, low, high);
        vst1q_u16(out + i, w.val[0]);
        vst1q_u16(out + i + 8, w.val[1]);
    }
    uint16_t table[16];
    if (i < n) {
        vst1q_u16(table, all.val[0]);
        vst1q_u16(table + 8, all.val[1]);
    }
    for (; i < n; i++) {
        out[i] = table[qlora__nf4_code_at(codes, i)];
    }
}

static const qlora__cpu_bf16 qlora__neon_bf16_gemm = {
    {
        1280, // as many bytes as 640 of f32
        192,
        8,
        12,
        qlora__neon_bf16_tile,
        8,
        qlora__neon_bf16_narrow,
    },
    4,
    2,
    qlora__neon_bf16_round,
    qlora__neon_bf16_nf4,
    {qlora__neon_bf16_lines, qlora__neon_bf16_quad},
    {qlora__neon_bf16_lines, qlora__neon_bf16_quad},
    NULL,
    NULL,
};

#endif // QLORA__NEON_BF16
