#ifdef QLORA__X86

// ---- AVX2: streamed weights ---------------------------------------------------------------------

// Of 64 weights, the even ones come first: they are the high halves of their bytes. Bytes are
// interleaved within each half of a register, then every other 16 bits are taken.
static const uint8_t qlora__avx2_order[QLORA__STREAM_STEP] = {
    0,  4,  8,  12, 32, 36, 40, 44, 2,  6,  10, 14, 34, 38, 42, 46, 16, 20, 24, 28, 48, 52,
    56, 60, 18, 22, 26, 30, 50, 54, 58, 62, 1,  5,  9,  13, 33, 37, 41, 45, 3,  7,  11, 15,
    35, 39, 43, 47, 17, 21, 25, 29, 49, 53, 57, 61, 19, 23, 27, 31, 51, 55, 59, 63,
};

// The 16 values of a block as bf16: 16 low bytes, then 16 high bytes.
QLORA__TARGET_AVX2
static QLORA__INLINE void qlora__avx2_planes(const float* levels, float scale, bool ready,
                                             uint8_t* planes) {
    const __m256i one = _mm256_set1_epi32(1);
    const __m256i half = _mm256_set1_epi32(ready ? 0x8000 : 0x7fff);
    __m256 s = _mm256_set1_ps(scale);
    __m256i low = _mm256_castps_si256(_mm256_mul_ps(_mm256_loadu_ps(levels), s));
    __m256i high = _mm256_castps_si256(_mm256_mul_ps(_mm256_loadu_ps(levels + 8), s));
    if (!ready) {
        low = _mm256_add_epi32(low, _mm256_and_si256(_mm256_srli_epi32(low, 16), one));
        high = _mm256_add_epi32(high, _mm256_and_si256(_mm256_srli_epi32(high, 16), one));
    }
    low = _mm256_srli_epi32(_mm256_add_epi32(low, half), 16);
    high = _mm256_srli_epi32(_mm256_add_epi32(high, half), 16);
    // Packing works within each half of a register: 0xd8 puts the quarters back in order.
    __m256i all = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
    __m256i bytes = _mm256_packus_epi16(_mm256_and_si256(all, _mm256_set1_epi16(0xff)),
                                        _mm256_srli_epi16(all, 8));
    _mm256_storeu_si256((__m256i*)(void*)planes, _mm256_permute4x64_epi64(bytes, 0xd8));
}

// Adds the products of 32 values, whose low and high bytes are given, and 32 of x to two sums.
#define QLORA__STREAM32(l, h, x, s, t)                                                             \
    do {                                                                                           \
        __m256i first = _mm256_unpacklo_epi8(l, h);                                                \
        __m256i second = _mm256_unpackhi_epi8(l, h);                                               \
        __m256 w0 = _mm256_castsi256_ps(_mm256_slli_epi32(first, 16));                             \
        __m256 w1 = _mm256_castsi256_ps(_mm256_and_si256(first, upper));                           \
        __m256 w2 = _mm256_castsi256_ps(_mm256_slli_epi32(second, 16));                            \
        __m256 w3 = _mm256_castsi256_ps(_mm256_and_si256(second, upper));                          \
        s = _mm256_fmadd_ps(w0, _mm256_loadu_ps(x), s);                                            \
        t = _mm256_fmadd_ps(w1, _mm256_loadu_ps((x) + 8), t);                                      \
        s = _mm256_fmadd_ps(w2, _mm256_loadu_ps((x) + 16), s);                                     \
        t = _mm256_fmadd_ps(w3, _mm256_loadu_ps((x) + 24), t);                                     \
    } while (0)

// The sum of one line in eight lanes. A look-up selects one byte of each value; interleaving the
// bytes makes bf16 of them, and f32 is bf16 with zeros behind it.
QLORA__TARGET_AVX2
static QLORA__INLINE void qlora__avx2_stream_line(const float* levels, const qlora__nf4_line* line,
                                                  int64_t steps, const float* x, bool ready,
                                                  float* lanes) {
    const __m256i mask = _mm256_set1_epi8(15);
    const __m256i upper = _mm256_set1_epi32((int)0xffff0000u);
    const uint8_t* codes = line->codes;
    __m256 s = _mm256_setzero_ps(), t = s, u = s, v = s;
    for (int64_t i = 0; i < steps; i++) {
        uint8_t planes[32];
        qlora__avx2_planes(levels, line->scales[i], ready, planes);
        __m256i low = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)(void*)planes));
        __m256i high =
            _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)(void*)(planes + 16)));
        __m256i pair = _mm256_loadu_si256((const __m256i*)(const void*)codes);
        __m256i even = _mm256_and_si256(_mm256_srli_epi16(pair, 4), mask);
        __m256i odd = _mm256_and_si256(pair, mask);
        __m256i l = _mm256_shuffle_epi8(low, even);
        __m256i h = _mm256_shuffle_epi8(high, even);
        QLORA__STREAM32(l, h, x, s, t);
        l = _mm256_shuffle_epi8(low, odd);
        h = _mm256_shuffle_epi8(high, odd);
        QLORA__STREAM32(l, h, x + 32, u, v);
        codes += 32;
        x += QLORA__STREAM_STEP;
    }
    _mm256_storeu_ps(lanes, _mm256_add_ps(_mm256_add_ps(s, t), _mm256_add_ps(u, v)));
    _mm256_zeroupper();
}

#undef QLORA__STREAM32

QLORA__TARGET_AVX2
static QLORA__INLINE void qlora__avx2_scale8(float* at, float factor, float offset) {
    __m256 product = _mm256_mul_ps(_mm256_loadu_ps(at), _mm256_set1_ps(factor));
    QLORA__ROUNDED(product, "x");
    __m256i bits = _mm256_castps_si256(_mm256_add_ps(product, _mm256_set1_ps(offset)));
    __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    __m256i is_nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
    bits = _mm256_blendv_epi8(bits, _mm256_set1_epi32(0x7fc00000), is_nan);
    _mm256_storeu_ps(at, _mm256_castsi256_ps(bits));
}

QLORA__TARGET_AVX2
static void qlora__avx2_scale(float* scales, int64_t n, float factor, float offset) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        qlora__avx2_scale8(scales + i, factor, offset);
    }
    if (i < n) {
        float last[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
        memcpy(last, scales + i, (size_t)(n - i) * sizeof last[0]);
        qlora__avx2_scale8(last, factor, offset);
        memcpy(scales + i, last, (size_t)(n - i) * sizeof last[0]);
    }
    _mm256_zeroupper();
}

// The sum of eight lanes, in a fixed order.
static float qlora__avx2_fold(const float* lanes) {
    return ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) +
           ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
}

QLORA__TARGET_AVX2
static void qlora__avx2_stream_nf4(const float* levels, const qlora__nf4_line* lines, int64_t steps,
                                   const float* x, float* sums) {
    for (int i = 0; i < QLORA__STREAM_LINES; i++) {
        float lanes[8];
        qlora__avx2_stream_line(levels, &lines[i], steps, x, false, lanes);
        sums[i] = qlora__avx2_fold(lanes);
    }
}

QLORA__TARGET_AVX2
static void qlora__avx2_stream_ready(const float* levels, const qlora__nf4_line* lines,
                                     int64_t steps, const float* x, float* sums) {
    for (int i = 0; i < QLORA__STREAM_LINES; i++) {
        float lanes[8];
        qlora__avx2_stream_line(levels, &lines[i], steps, x, true, lanes);
        sums[i] = qlora__avx2_fold(lanes);
    }
}

// One function per type of the lines: lanes += lines x over a multiple of 8 elements. f32(l, i) are
// eight elements of line l as f32.
#define QLORA__STREAM_TYPE(name, type, f32)                                                        \
    QLORA__TARGET_AVX2                                                                             \
    static void name(const void* const* lines, int64_t n, const float* x, float* lanes) {          \
        const type* l0 = (const type*)lines[0];                                                    \
        const type* l1 = (const type*)lines[1];                                                    \
        const type* l2 = (const type*)lines[2];                                                    \
        const type* l3 = (const type*)lines[3];                                                    \
        __m256 s0 = _mm256_loadu_ps(lanes), s1 = _mm256_loadu_ps(lanes + 8);                       \
        __m256 s2 = _mm256_loadu_ps(lanes + 16), s3 = _mm256_loadu_ps(lanes + 24);                 \
        __m256 t0 = _mm256_setzero_ps(), t1 = t0, t2 = t0, t3 = t0;                                \
        int64_t i = 0;                                                                             \
        for (; i + 16 <= n; i += 16) {                                                             \
            __m256 x0 = _mm256_loadu_ps(x + i), x1 = _mm256_loadu_ps(x + i + 8);                   \
            s0 = _mm256_fmadd_ps(f32(l0 + i), x0, s0),                                             \
            t0 = _mm256_fmadd_ps(f32(l0 + i + 8), x1, t0);                                         \
            s1 = _mm256_fmadd_ps(f32(l1 + i), x0, s1),                                             \
            t1 = _mm256_fmadd_ps(f32(l1 + i + 8), x1, t1);                                         \
            s2 = _mm256_fmadd_ps(f32(l2 + i), x0, s2),                                             \
            t2 = _mm256_fmadd_ps(f32(l2 + i + 8), x1, t2);                                         \
            s3 = _mm256_fmadd_ps(f32(l3 + i), x0, s3),                                             \
            t3 = _mm256_fmadd_ps(f32(l3 + i + 8), x1, t3);                                         \
        }                                                                                          \
        if (i < n) {                                                                               \
            __m256 x0 = _mm256_loadu_ps(x + i);                                                    \
            s0 = _mm256_fmadd_ps(f32(l0 + i), x0, s0), s1 = _mm256_fmadd_ps(f32(l1 + i), x0, s1);  \
            s2 = _mm256_fmadd_ps(f32(l2 + i), x0, s2), s3 = _mm256_fmadd_ps(f32(l3 + i), x0, s3);  \
        }                                                                                          \
        _mm256_storeu_ps(lanes, _mm256_add_ps(s0, t0));                                            \
        _mm256_storeu_ps(lanes + 8, _mm256_add_ps(s1, t1));                                        \
        _mm256_storeu_ps(lanes + 16, _mm256_add_ps(s2, t2));                                       \
        _mm256_storeu_ps(lanes + 24, _mm256_add_ps(s3, t3));                                       \
        _mm256_zeroupper();                                                                        \
    }

#define QLORA__HALVES(p) _mm_loadu_si128((const __m128i*)(const void*)(p))
#define QLORA__FROM_BF16(p)                                                                        \
    _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(QLORA__HALVES(p)), 16))
#define QLORA__FROM_F16(p) _mm256_cvtph_ps(QLORA__HALVES(p))

QLORA__STREAM_TYPE(qlora__avx2_stream_f32, float, _mm256_loadu_ps)
QLORA__STREAM_TYPE(qlora__avx2_stream_bf16, uint16_t, QLORA__FROM_BF16)
QLORA__STREAM_TYPE(qlora__avx2_stream_f16, uint16_t, QLORA__FROM_F16)

#undef QLORA__HALVES
#undef QLORA__FROM_BF16
#undef QLORA__FROM_F16
#undef QLORA__STREAM_TYPE

static void qlora__avx2_stream_dense(const void* const* lines, qlora_dtype dtype, int64_t n,
                                     const float* x, float* sums) {
    void (*stream)(const void* const* lines, int64_t n, const float* x, float* lanes) =
        dtype == QLORA_F32    ? qlora__avx2_stream_f32
        : dtype == QLORA_BF16 ? qlora__avx2_stream_bf16
                              : qlora__avx2_stream_f16;
    float lanes[8 * QLORA__STREAM_LINES];
    int64_t whole = n / 8 * 8;
    memset(lanes, 0, sizeof lanes);
    stream(lines, whole, x, lanes);
    if (whole < n) {
        size_t size = dtype == QLORA_F32 ? 4 : 2;
        char room[QLORA__STREAM_LINES][64];
        const void* tail[QLORA__STREAM_LINES];
        float rest[8];
        memset(rest, 0, sizeof rest);
        memcpy(rest, x + whole, (size_t)(n - whole) * sizeof rest[0]);
        qlora__stream_tail(lines, (size_t)whole * size, (size_t)(n - whole) * size, room, tail);
        stream(tail, 8, rest, lanes);
    }
    for (int i = 0; i < QLORA__STREAM_LINES; i++) {
        sums[i] = qlora__avx2_fold(lanes + 8 * i);
    }
}

// Four rows at a time, each with sums of its own.
QLORA__TARGET_AVX2
static void qlora__avx2_blend(const float* a, const float* b, int64_t ld, int64_t n, float* sums) {
    __m256 s0 = _mm256_setzero_ps(), s1 = s0, t0 = s0, t1 = s0;
    __m256 u0 = s0, u1 = s0, v0 = s0, v1 = s0;
    int64_t i = 0;
    for (; i + 4 <= n; i += 4, b += 4 * ld) {
        __m256 x = _mm256_broadcast_ss(a + i);
        s0 = _mm256_fmadd_ps(x, _mm256_loadu_ps(b), s0);
        s1 = _mm256_fmadd_ps(x, _mm256_loadu_ps(b + 8), s1);
        x = _mm256_broadcast_ss(a + i + 1);
        t0 = _mm256_fmadd_ps(x, _mm256_loadu_ps(b + ld), t0);
        t1 = _mm256_fmadd_ps(x, _mm256_loadu_ps(b + ld + 8), t1);
        x = _mm256_broadcast_ss(a + i + 2);
        u0 = _mm256_fmadd_ps(x, _mm256_loadu_ps(b + 2 * ld), u0);
        u1 = _mm256_fmadd_ps(x, _mm256_loadu_ps(b + 2 * ld + 8), u1);
        x = _mm256_broadcast_ss(a + i + 3);
        v0 = _mm256_fmadd_ps(x, _mm256_loadu_ps(b + 3 * ld), v0);
        v1 = _mm256_fmadd_ps(x, _mm256_loadu_ps(b + 3 * ld + 8), v1);
    }
    for (; i < n; i++, b += ld) {
        __m256 x = _mm256_broadcast_ss(a + i);
        s0 = _mm256_fmadd_ps(x, _mm256_loadu_ps(b), s0);
        s1 = _mm256_fmadd_ps(x, _mm256_loadu_ps(b + 8), s1);
    }
    _mm256_storeu_ps(sums, _mm256_add_ps(_mm256_add_ps(s0, t0), _mm256_add_ps(u0, v0)));
    _mm256_storeu_ps(sums + 8, _mm256_add_ps(_mm256_add_ps(s1, t1), _mm256_add_ps(u1, v1)));
    _mm256_zeroupper();
}

static const qlora__cpu_stream qlora__avx2_stream = {
    qlora__avx2_order, qlora__avx2_stream_nf4,   qlora__avx2_stream_ready,
    qlora__avx2_scale, qlora__avx2_stream_dense, qlora__avx2_blend,
};

#endif // QLORA__X86
