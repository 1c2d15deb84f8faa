#ifdef QLORA__X86

// ---- AVX-512: products --------------------------------------------------------------------------

// One row of a tile: three vectors of sums.
#define QLORA__ROW(i)                                                                              \
    x = _mm512_set1_ps(a[i]);                                                                      \
    c##i##0 = _mm512_fmadd_ps(x, b0, c##i##0);                                                     \
    c##i##1 = _mm512_fmadd_ps(x, b1, c##i##1);                                                     \
    c##i##2 = _mm512_fmadd_ps(x, b2, c##i##2)
#define QLORA__ROW_LOAD(i)                                                                         \
    c##i##0 = _mm512_loadu_ps(c + i * ldc);                                                        \
    c##i##1 = _mm512_loadu_ps(c + i * ldc + 16);                                                   \
    c##i##2 = _mm512_loadu_ps(c + i * ldc + 32)
#define QLORA__ROW_STORE(i)                                                                        \
    _mm512_storeu_ps(c + i * ldc, c##i##0);                                                        \
    _mm512_storeu_ps(c + i * ldc + 16, c##i##1);                                                   \
    _mm512_storeu_ps(c + i * ldc + 32, c##i##2)

// C[8][48] += a[k][8] b[k][48]: 24 sums, three vectors of b and a broadcast element of a. Both
// panels come from the second-level cache: ranges that fit into the first are so short that moving
// C takes longer.
QLORA__TARGET_AVX512
static void qlora__avx512_tile(int64_t steps, const float* a, const float* b, float* c, int64_t ldc,
                               bool add) {
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
    for (int64_t k = 0; k < steps; k++) {
        __m512 b0 = _mm512_loadu_ps(b);
        __m512 b1 = _mm512_loadu_ps(b + 16);
        __m512 b2 = _mm512_loadu_ps(b + 32);
        __m512 x;
        QLORA__ROW(0);
        QLORA__ROW(1);
        QLORA__ROW(2);
        QLORA__ROW(3);
        QLORA__ROW(4);
        QLORA__ROW(5);
        QLORA__ROW(6);
        QLORA__ROW(7);
        QLORA__WILL_READ(a + 128);
        QLORA__WILL_READ(b + 480);
        QLORA__WILL_READ(b + 496);
        QLORA__WILL_READ(b + 512);
        a += 8;
        b += 48;
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

// C[8][16] += a[k][8] b[k][16]
QLORA__TARGET_AVX512
static void qlora__avx512_narrow(int64_t steps, const float* a, const float* b, float* c,
                                 int64_t ldc, bool add) {
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
    for (int64_t k = 0; k < steps; k++) {
        __m512 x = _mm512_loadu_ps(b);
        c0 = _mm512_fmadd_ps(_mm512_set1_ps(a[0]), x, c0);
        c1 = _mm512_fmadd_ps(_mm512_set1_ps(a[1]), x, c1);
        c2 = _mm512_fmadd_ps(_mm512_set1_ps(a[2]), x, c2);
        c3 = _mm512_fmadd_ps(_mm512_set1_ps(a[3]), x, c3);
        c4 = _mm512_fmadd_ps(_mm512_set1_ps(a[4]), x, c4);
        c5 = _mm512_fmadd_ps(_mm512_set1_ps(a[5]), x, c5);
        c6 = _mm512_fmadd_ps(_mm512_set1_ps(a[6]), x, c6);
        c7 = _mm512_fmadd_ps(_mm512_set1_ps(a[7]), x, c7);
        a += 8;
        b += 16;
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

QLORA__TARGET_AVX512
static void qlora__avx512_spread(const float* from, int64_t n, int64_t width, int64_t jump,
                                 float* out) {
    for (int64_t i = 0; i + width <= n; i += width) {
        int64_t j = 0;
        for (; j + 16 <= width; j += 16) {
            _mm512_storeu_ps(out + j, _mm512_loadu_ps(from + i + j));
        }
        if (j < width) {
            _mm256_storeu_ps(out + j, _mm256_loadu_ps(from + i + j));
        }
        out += jump;
    }
    _mm256_zeroupper();
}

// See qlora__cpu_gemm. One permutation selects from all 16 products; it ignores the upper bits of
// an index.
QLORA__TARGET_AVX512
static void qlora__avx512_nf4(const float* levels, float scale, const uint8_t* codes, int64_t n,
                              float* out) {
    __m512i bits =
        _mm512_castps_si512(_mm512_mul_ps(_mm512_loadu_ps(levels), _mm512_set1_ps(scale)));
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff));
    bits = _mm512_slli_epi32(_mm512_srli_epi32(bits, 16), 16); // to the nearest bf16
    __m512 table = _mm512_castsi512_ps(bits);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m128i pair = _mm_loadl_epi64((const __m128i*)(const void*)(codes + i / 2));
        __m128i code = _mm_unpacklo_epi8(_mm_srli_epi16(pair, 4), pair);
        __m512 w = _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(code), table);
        _mm512_storeu_ps(out + i, w);
    }
    float products[16];
    _mm512_storeu_ps(products, table);
    for (; i < n; i++) {
        out[i] = products[qlora__nf4_code_at(codes, i)];
    }
    _mm256_zeroupper();
}

static const qlora__cpu_gemm qlora__avx512_gemm = {
    {
        640,
        192,
        8,
        48,
        qlora__avx512_tile,
        16,
        qlora__avx512_narrow,
    },
    qlora__avx2_pack4,
    qlora__avx2_pack8,
    qlora__avx512_spread,
    qlora__avx2_widen,
    qlora__avx512_nf4,
};

#endif // QLORA__X86
