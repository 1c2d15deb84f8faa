#ifdef QLORA__X86_BF16

// ---- AVX-512 BF16: products ---------------------------------------------------------------------

// vdpbf16ps adds the products of two neighbouring k to a sum, each with a rounding of its own, and
// takes numbers below the smallest normal one for zero. So a panel has, for every two k, all lines
// side by side, a pair of elements each, on both sides of the product.
//
// What packs has no more than AVX2, so that it can be tested where there is no AVX-512.

// c += the products of the pairs in a and b
#define QLORA__PAIRS(c, a, b) __asm__("vdpbf16ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b))

// A pair of one line in all lanes.
QLORA__TARGET_AVX512
static QLORA__INLINE __m512i qlora__avx512_bf16_pair(const uint16_t* pair) {
    int32_t bits;
    memcpy(&bits, pair, sizeof bits);
    return _mm512_set1_epi32(bits);
}

#define QLORA__ROW(i)                                                                              \
    x = qlora__avx512_bf16_pair(at + 2 * (i));                                                     \
    QLORA__PAIRS(c##i##0, x, b0);                                                                  \
    QLORA__PAIRS(c##i##1, x, b1);                                                                  \
    QLORA__PAIRS(c##i##2, x, b2)
#define QLORA__ROW_LOAD(i)                                                                         \
    c##i##0 = _mm512_loadu_ps(c + i * ldc);                                                        \
    c##i##1 = _mm512_loadu_ps(c + i * ldc + 16);                                                   \
    c##i##2 = _mm512_loadu_ps(c + i * ldc + 32)
#define QLORA__ROW_STORE(i)                                                                        \
    _mm512_storeu_ps(c + i * ldc, c##i##0);                                                        \
    _mm512_storeu_ps(c + i * ldc + 16, c##i##1);                                                   \
    _mm512_storeu_ps(c + i * ldc + 32, c##i##2)

// C[8][48] += a[k][8] b[k][48]: 24 sums, three vectors of b and a broadcast pair of a.
QLORA__TARGET_AVX512
static void qlora__avx512_bf16_tile(int64_t steps, const float* a, const float* b, float* c,
                                    int64_t ldc, bool add) {
    const uint16_t* at = (const uint16_t*)(const void*)a;
    const uint16_t* bt = (const uint16_t*)(const void*)b;
    __m512 c00 = _mm512_setzero_ps(), c01 = c00, c02 = c00, c10 = c00, c11 = c00, c12 = c00;
    __m512 c20 = c00, c21 = c00, c22 = c00, c30 = c00, c31 = c00, c32 = c00;
    __m512 c40 = c00, c41 = c00, c42 = c00, c50 = c00, c51 = c00, c52 = c00;
    __m512 c60 = c00, c61 = c00, c62 = c00, c70 = c00, c71 = c00, c72 = c00;
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
    for (int64_t k = 0; k < steps; k += 2) {
        __m512i b0 = _mm512_loadu_si512((const void*)bt);
        __m512i b1 = _mm512_loadu_si512((const void*)(bt + 32));
        __m512i b2 = _mm512_loadu_si512((const void*)(bt + 64));
        __m512i x;
        QLORA__ROW(0);
        QLORA__ROW(1);
        QLORA__ROW(2);
        QLORA__ROW(3);
        QLORA__ROW(4);
        QLORA__ROW(5);
        QLORA__ROW(6);
        QLORA__ROW(7);
        at += 16;
        bt += 96;
    }
    QLORA__ROW_STORE(0);
    QLORA__ROW_STORE(1);
    QLORA__ROW_STORE(2);
    QLORA__ROW_STORE(3);
    QLORA__ROW_STORE(4);
    QLORA__ROW_STORE(5);
    QLORA__ROW_STORE(6);
    QLORA__ROW_STORE(7);
    _mm256_zeroupper();
}

#undef QLORA__ROW
#undef QLORA__ROW_LOAD
#undef QLORA__ROW_STORE

#define QLORA__ROW(i)                                                                              \
    x = qlora__avx512_bf16_pair(at + 2 * (i));                                                     \
    QLORA__PAIRS(c##i, x, b0)

// C[8][16] += a[k][8] b[k][16]
QLORA__TARGET_AVX512
static void qlora__avx512_bf16_narrow(int64_t steps, const float* a, const float* b, float* c,
                                      int64_t ldc, bool add) {
    const uint16_t* at = (const uint16_t*)(const void*)a;
    const uint16_t* bt = (const uint16_t*)(const void*)b;
    __m512 c0 = _mm512_setzero_ps(), c1 = c0, c2 = c0, c3 = c0, c4 = c0, c5 = c0, c6 = c0, c7 = c0;
    if (add) {
        c0 = _mm512_loadu_ps(c);
        c1 = _mm512_loadu_ps(c + ldc);
        c2 = _mm512_loadu_ps(c + 2 * ldc);
        c3 = _mm512_loadu_ps(c + 3 * ldc);
        c4 = _mm512_loadu_ps(c + 4 * ldc);
        c5 = _mm512_loadu_ps(c + 5 * ldc);
        c6 = _mm512_loadu_ps(c + 6 * ldc);
        c7 = _mm512_loadu_ps(c + 7 * ldc);
    }
    for (int64_t k = 0; k < steps; k += 2) {
        __m512i b0 = _mm512_loadu_si512((const void*)bt);
        __m512i x;
        QLORA__ROW(0);
        QLORA__ROW(1);
        QLORA__ROW(2);
        QLORA__ROW(3);
        QLORA__ROW(4);
        QLORA__ROW(5);
        QLORA__ROW(6);
        QLORA__ROW(7);
        at += 16;
        bt += 32;
    }
    _mm512_storeu_ps(c, c0);
    _mm512_storeu_ps(c + ldc, c1);
    _mm512_storeu_ps(c + 2 * ldc, c2);
    _mm512_storeu_ps(c + 3 * ldc, c3);
    _mm512_storeu_ps(c + 4 * ldc, c4);
    _mm512_storeu_ps(c + 5 * ldc, c5);
    _mm512_storeu_ps(c + 6 * ldc, c6);
    _mm512_storeu_ps(c + 7 * ldc, c7);
    _mm256_zeroupper();
}

#undef QLORA__ROW
#undef QLORA__PAIRS

// ---- packing ------------------------------------------------------------------------------------

// The values of qlora__bf16_from, in the upper halves.
QLORA__TARGET_AVX2
static QLORA__INLINE __m256i qlora__avx2_bf16_bits(__m256 v) {
    __m256i bits = _mm256_castps_si256(v);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff));
    __m256 nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fff0000), _mm256_castps_si256(nan));
}

QLORA__TARGET_AVX2
static void qlora__avx2_bf16_round(const float* from, float factor, int64_t n, uint16_t* to) {
    const __m256 times = _mm256_set1_ps(factor);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m256 first = _mm256_mul_ps(_mm256_loadu_ps(from + i), times);
        __m256 second = _mm256_mul_ps(_mm256_loadu_ps(from + i + 8), times);
        __m256i low = _mm256_srli_epi32(qlora__avx2_bf16_bits(first), 16);
        __m256i high = _mm256_srli_epi32(qlora__avx2_bf16_bits(second), 16);
        __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
        _mm256_storeu_si256((__m256i*)(void*)(to + i), both);
    }
    for (; i < n; i++) {
        to[i] = qlora__bf16_from(from[i] * factor);
    }
    _mm256_zeroupper();
}

// See qlora__cpu_gemm. The 16 values are two tables of bytes.
QLORA__TARGET_AVX2
static void qlora__avx2_bf16_nf4(const float* levels, float scale, const uint8_t* codes, int64_t n,
                                 uint16_t* out) {
    uint16_t table[16];
    const __m128i mask = _mm_set1_epi8(15);
    const __m128i below = _mm_set1_epi16(255);
    qlora__avx2_bf16_round(levels, scale, 16, table);
    __m128i first = _mm_loadu_si128((const __m128i*)(const void*)table);
    __m128i second = _mm_loadu_si128((const __m128i*)(const void*)(table + 8));
    __m128i low = _mm_packus_epi16(_mm_and_si128(first, below), _mm_and_si128(second, below));
    __m128i high = _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(second, 8));
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m128i pair = _mm_loadl_epi64((const __m128i*)(const void*)(codes + i / 2));
        __m128i code = _mm_unpacklo_epi8(_mm_srli_epi16(pair, 4), pair);
        code = _mm_and_si128(code, mask);
        __m128i lower = _mm_shuffle_epi8(low, code);
        __m128i upper = _mm_shuffle_epi8(high, code);
        _mm_storeu_si128((__m128i*)(void*)(out + i), _mm_unpacklo_epi8(lower, upper));
        _mm_storeu_si128((__m128i*)(void*)(out + i + 8), _mm_unpackhi_epi8(lower, upper));
    }
    for (; i < n; i++) {
        out[i] = table[qlora__nf4_code_at(codes, i)];
    }
}

// A pair of elements takes the place of one f32: eight steps are four of those.
QLORA__TARGET_AVX2
static void qlora__avx2_bf16_lines(const uint16_t* const* lines, int64_t n, int64_t width,
                                   int64_t line, uint16_t* out) {
    float* to = (float*)(void*)out + line;
    const float* pairs[8];
    uint16_t rest[8][8];
    int64_t whole = n / 8 * 8;
    for (int i = 0; i < 8; i++) {
        pairs[i] = (const float*)(const void*)lines[i];
    }
    qlora__avx2_pack8(pairs, whole / 2, width, to);
    if (whole < n) {
        memset(rest, 0, sizeof rest);
        for (int i = 0; i < 8; i++) {
            memcpy(rest[i], lines[i] + whole, (size_t)(n - whole) * sizeof rest[i][0]);
            pairs[i] = (const float*)(const void*)rest[i];
        }
        qlora__avx2_pack8(pairs, 4, width, to + whole / 2 * width);
    }
}

// Eight lines of two steps, side by side.
QLORA__TARGET_AVX2
static QLORA__INLINE void qlora__avx2_bf16_two(const uint16_t* first, const uint16_t* second,
                                               uint16_t* out) {
    __m128i a = _mm_loadu_si128((const __m128i*)(const void*)first);
    __m128i b = _mm_loadu_si128((const __m128i*)(const void*)second);
    _mm_storeu_si128((__m128i*)(void*)out, _mm_unpacklo_epi16(a, b));
    _mm_storeu_si128((__m128i*)(void*)(out + 8), _mm_unpackhi_epi16(a, b));
}

QLORA__TARGET_AVX2
static void qlora__avx2_bf16_quad(const uint16_t* const* rows, int64_t k, int64_t n, int64_t width,
                                  int64_t jump, uint16_t* out) {
    for (int64_t i = 0; i < n; i += width) {
        uint16_t* to = out + i / width * jump + k * width;
        for (int64_t j = 0; j < width; j += 8) {
            qlora__avx2_bf16_two(rows[0] + i + j, rows[1] + i + j, to + 2 * j);
            qlora__avx2_bf16_two(rows[2] + i + j, rows[3] + i + j, to + 2 * (width + j));
        }
    }
}

static const qlora__cpu_bf16 qlora__avx512_bf16_gemm = {
    {
        640,
        192,
        8,
        48,
        qlora__avx512_bf16_tile,
        16,
        qlora__avx512_bf16_narrow,
    },
    8,
    8,
    qlora__avx2_bf16_round,
    qlora__avx2_bf16_nf4,
    {qlora__avx2_bf16_lines, qlora__avx2_bf16_quad},
    {qlora__avx2_bf16_lines, qlora__avx2_bf16_quad},
    NULL,
    NULL,
};

#endif // QLORA__X86_BF16
