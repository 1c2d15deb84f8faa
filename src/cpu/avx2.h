#ifdef QLORA__X86

// ---- AVX2: products -----------------------------------------------------------------------------

// C[4][24] += a[k][4] b[k][24]: 12 sums, three vectors of b and one broadcast element of a fill
// the 16 registers. Loads and stores are unaligned ones everywhere, because not all compilers align
// the stack on Windows.
QLORA__TARGET_AVX2
static void qlora__avx2_tile(int64_t steps, const float* a, const float* b, float* c, int64_t ldc,
                             bool add) {
    __m256 c00 = _mm256_setzero_ps(), c01 = c00, c02 = c00;
    __m256 c10 = c00, c11 = c00, c12 = c00;
    __m256 c20 = c00, c21 = c00, c22 = c00;
    __m256 c30 = c00, c31 = c00, c32 = c00;
    float* r1 = c + ldc;
    float* r2 = r1 + ldc;
    float* r3 = r2 + ldc;
    if (add) {
        c00 = _mm256_loadu_ps(c), c01 = _mm256_loadu_ps(c + 8), c02 = _mm256_loadu_ps(c + 16);
        c10 = _mm256_loadu_ps(r1), c11 = _mm256_loadu_ps(r1 + 8), c12 = _mm256_loadu_ps(r1 + 16);
        c20 = _mm256_loadu_ps(r2), c21 = _mm256_loadu_ps(r2 + 8), c22 = _mm256_loadu_ps(r2 + 16);
        c30 = _mm256_loadu_ps(r3), c31 = _mm256_loadu_ps(r3 + 8), c32 = _mm256_loadu_ps(r3 + 16);
    }
    for (int64_t k = 0; k < steps; k++) {
        __m256 b0 = _mm256_loadu_ps(b);
        __m256 b1 = _mm256_loadu_ps(b + 8);
        __m256 b2 = _mm256_loadu_ps(b + 16);
        __m256 x = _mm256_broadcast_ss(a);
        c00 = _mm256_fmadd_ps(x, b0, c00);
        c01 = _mm256_fmadd_ps(x, b1, c01);
        c02 = _mm256_fmadd_ps(x, b2, c02);
        x = _mm256_broadcast_ss(a + 1);
        c10 = _mm256_fmadd_ps(x, b0, c10);
        c11 = _mm256_fmadd_ps(x, b1, c11);
        c12 = _mm256_fmadd_ps(x, b2, c12);
        x = _mm256_broadcast_ss(a + 2);
        c20 = _mm256_fmadd_ps(x, b0, c20);
        c21 = _mm256_fmadd_ps(x, b1, c21);
        c22 = _mm256_fmadd_ps(x, b2, c22);
        x = _mm256_broadcast_ss(a + 3);
        c30 = _mm256_fmadd_ps(x, b0, c30);
        c31 = _mm256_fmadd_ps(x, b1, c31);
        c32 = _mm256_fmadd_ps(x, b2, c32);
        a += 4;
        b += 24;
    }
    _mm256_storeu_ps(c, c00), _mm256_storeu_ps(c + 8, c01), _mm256_storeu_ps(c + 16, c02);
    _mm256_storeu_ps(r1, c10), _mm256_storeu_ps(r1 + 8, c11), _mm256_storeu_ps(r1 + 16, c12);
    _mm256_storeu_ps(r2, c20), _mm256_storeu_ps(r2 + 8, c21), _mm256_storeu_ps(r2 + 16, c22);
    _mm256_storeu_ps(r3, c30), _mm256_storeu_ps(r3 + 8, c31), _mm256_storeu_ps(r3 + 16, c32);
    _mm256_zeroupper();
}

// C[4][16] += a[k][4] b[k][16]
QLORA__TARGET_AVX2
static void qlora__avx2_narrow(int64_t steps, const float* a, const float* b, float* c, int64_t ldc,
                               bool add) {
    __m256 c00 = _mm256_setzero_ps(), c01 = c00, c10 = c00, c11 = c00;
    __m256 c20 = c00, c21 = c00, c30 = c00, c31 = c00;
    float* r1 = c + ldc;
    float* r2 = r1 + ldc;
    float* r3 = r2 + ldc;
    if (add) {
        c00 = _mm256_loadu_ps(c), c01 = _mm256_loadu_ps(c + 8);
        c10 = _mm256_loadu_ps(r1), c11 = _mm256_loadu_ps(r1 + 8);
        c20 = _mm256_loadu_ps(r2), c21 = _mm256_loadu_ps(r2 + 8);
        c30 = _mm256_loadu_ps(r3), c31 = _mm256_loadu_ps(r3 + 8);
    }
    for (int64_t k = 0; k < steps; k++) {
        __m256 b0 = _mm256_loadu_ps(b);
        __m256 b1 = _mm256_loadu_ps(b + 8);
        __m256 x = _mm256_broadcast_ss(a);
        c00 = _mm256_fmadd_ps(x, b0, c00);
        c01 = _mm256_fmadd_ps(x, b1, c01);
        x = _mm256_broadcast_ss(a + 1);
        c10 = _mm256_fmadd_ps(x, b0, c10);
        c11 = _mm256_fmadd_ps(x, b1, c11);
        x = _mm256_broadcast_ss(a + 2);
        c20 = _mm256_fmadd_ps(x, b0, c20);
        c21 = _mm256_fmadd_ps(x, b1, c21);
        x = _mm256_broadcast_ss(a + 3);
        c30 = _mm256_fmadd_ps(x, b0, c30);
        c31 = _mm256_fmadd_ps(x, b1, c31);
        a += 4;
        b += 16;
    }
    _mm256_storeu_ps(c, c00), _mm256_storeu_ps(c + 8, c01);
    _mm256_storeu_ps(r1, c10), _mm256_storeu_ps(r1 + 8, c11);
    _mm256_storeu_ps(r2, c20), _mm256_storeu_ps(r2 + 8, c21);
    _mm256_storeu_ps(r3, c30), _mm256_storeu_ps(r3 + 8, c31);
    _mm256_zeroupper();
}

// Four lines side by side: out[k * width + i] = lines[i][k].
QLORA__TARGET_AVX2
static void qlora__avx2_pack4(const float* const* lines, int64_t steps, int64_t width, float* out) {
    int64_t k = 0;
    for (; k + 4 <= steps; k += 4) {
        __m128 l0 = _mm_loadu_ps(lines[0] + k);
        __m128 l1 = _mm_loadu_ps(lines[1] + k);
        __m128 l2 = _mm_loadu_ps(lines[2] + k);
        __m128 l3 = _mm_loadu_ps(lines[3] + k);
        __m128 low01 = _mm_unpacklo_ps(l0, l1); // 00 10 01 11
        __m128 low23 = _mm_unpacklo_ps(l2, l3);
        __m128 high01 = _mm_unpackhi_ps(l0, l1); // 02 12 03 13
        __m128 high23 = _mm_unpackhi_ps(l2, l3);
        float* to = out + k * width;
        _mm_storeu_ps(to, _mm_movelh_ps(low01, low23));
        _mm_storeu_ps(to + width, _mm_movehl_ps(low23, low01));
        _mm_storeu_ps(to + 2 * width, _mm_movelh_ps(high01, high23));
        _mm_storeu_ps(to + 3 * width, _mm_movehl_ps(high23, high01));
    }
    for (; k < steps; k++) {
        for (int i = 0; i < 4; i++) {
            out[k * width + i] = lines[i][k];
        }
    }
}

// Four steps of two lines, in the lower and the upper half.
QLORA__TARGET_AVX2
static inline __m256 qlora__avx2_halves(const float* low, const float* high) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(low)), _mm_loadu_ps(high), 1);
}

// Eight lines side by side. Lines i and i + 4 share a register, so that no lane is crossed later.
QLORA__TARGET_AVX2
static void qlora__avx2_pack8(const float* const* lines, int64_t steps, int64_t width, float* out) {
    int64_t k = 0;
    for (; k + 4 <= steps; k += 4) {
        __m256 l0 = qlora__avx2_halves(lines[0] + k, lines[4] + k);
        __m256 l1 = qlora__avx2_halves(lines[1] + k, lines[5] + k);
        __m256 l2 = qlora__avx2_halves(lines[2] + k, lines[6] + k);
        __m256 l3 = qlora__avx2_halves(lines[3] + k, lines[7] + k);
        __m256 low01 = _mm256_unpacklo_ps(l0, l1); // 00 10 01 11, 40 50 41 51
        __m256 low23 = _mm256_unpacklo_ps(l2, l3);
        __m256 high01 = _mm256_unpackhi_ps(l0, l1); // 02 12 03 13, 42 52 43 53
        __m256 high23 = _mm256_unpackhi_ps(l2, l3);
        float* to = out + k * width;
        _mm256_storeu_ps(to, _mm256_shuffle_ps(low01, low23, 0x44));
        _mm256_storeu_ps(to + width, _mm256_shuffle_ps(low01, low23, 0xee));
        _mm256_storeu_ps(to + 2 * width, _mm256_shuffle_ps(high01, high23, 0x44));
        _mm256_storeu_ps(to + 3 * width, _mm256_shuffle_ps(high01, high23, 0xee));
    }
    for (; k < steps; k++) {
        for (int i = 0; i < 8; i++) {
            out[k * width + i] = lines[i][k];
        }
    }
    _mm256_zeroupper();
}

QLORA__TARGET_AVX2
static void qlora__avx2_spread(const float* from, int64_t n, int64_t width, int64_t jump,
                               float* out) {
    for (int64_t i = 0; i + width <= n; i += width) {
        int64_t j = 0;
        for (; j + 8 <= width; j += 8) {
            _mm256_storeu_ps(out + j, _mm256_loadu_ps(from + i + j));
        }
        if (j < width) {
            _mm_storeu_ps(out + j, _mm_loadu_ps(from + i + j));
        }
        out += jump;
    }
    _mm256_zeroupper();
}

QLORA__TARGET_AVX2
static void qlora__avx2_widen(const uint16_t* from, qlora_dtype dtype, int64_t n, float* out) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m128i half = _mm_loadu_si128((const __m128i*)(const void*)(from + i));
        __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
        _mm256_storeu_ps(out + i,
                         dtype == QLORA_BF16 ? _mm256_castsi256_ps(bits) : _mm256_cvtph_ps(half));
    }
    for (; i < n; i++) {
        out[i] = dtype == QLORA_BF16 ? qlora__bf16_to(from[i]) : qlora__f16_to(from[i]);
    }
    _mm256_zeroupper();
}

// Eight products of a level and the scale, rounded to the nearest bf16, ties to even.
QLORA__TARGET_AVX2
static void qlora__avx2_levels(const float* levels, float scale, float* out) {
    __m256i bits =
        _mm256_castps_si256(_mm256_mul_ps(_mm256_loadu_ps(levels), _mm256_set1_ps(scale)));
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff));
    bits = _mm256_slli_epi32(_mm256_srli_epi32(bits, 16), 16);
    _mm256_storeu_ps(out, _mm256_castsi256_ps(bits));
}

// See qlora__cpu_gemm. A permutation selects from eight entries: the fourth bit of the code chooses
// between the two halves of the table.
QLORA__TARGET_AVX2
static void qlora__avx2_nf4(const float* levels, float scale, const uint8_t* codes, int64_t n,
                            float* out) {
    float table[16];
    qlora__avx2_levels(levels, scale, table);
    qlora__avx2_levels(levels + 8, scale, table + 8);
    __m256 low = _mm256_loadu_ps(table);
    __m256 high = _mm256_loadu_ps(table + 8);
    const __m128i mask = _mm_set1_epi8(15);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m128i pair = _mm_loadl_epi64((const __m128i*)(const void*)(codes + i / 2));
        __m128i first = _mm_and_si128(_mm_srli_epi16(pair, 4), mask);
        __m128i code = _mm_unpacklo_epi8(first, _mm_and_si128(pair, mask));
        for (int half = 0; half < 2; half++) {
            __m256i index = _mm256_cvtepu8_epi32(half == 0 ? code : _mm_srli_si128(code, 8));
            __m256 below = _mm256_permutevar8x32_ps(low, index);
            __m256 above = _mm256_permutevar8x32_ps(high, index);
            __m256 choose = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
            _mm256_storeu_ps(out + i + 8 * half, _mm256_blendv_ps(below, above, choose));
        }
    }
    for (; i < n; i++) {
        out[i] = table[qlora__nf4_code_at(codes, i)];
    }
    _mm256_zeroupper();
}

static const qlora__cpu_gemm qlora__avx2_gemm = {
    {
        384, // 24 columns of 384 steps are 36 KiB
        192,
        4,
        24,
        qlora__avx2_tile,
        16,
        qlora__avx2_narrow,
    },
    qlora__avx2_pack4,
    qlora__avx2_pack8,
    qlora__avx2_spread,
    qlora__avx2_widen,
    qlora__avx2_nf4,
};

#endif // QLORA__X86
