#ifdef QLORA__X86

// ---- AVX-512: streamed weights ------------------------------------------------------------------

// Of 32 weights, the even ones come first: they are the high halves of their bytes.
static const uint8_t qlora__avx512_order[QLORA__STREAM_STEP] = {
    0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 1,  3,  5,  7,  9,  11,
    13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54,
    56, 58, 60, 62, 33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63,
};

// The 16 values of a block, rounded to bf16, as f32.
QLORA__TARGET_AVX512
static QLORA__INLINE void qlora__avx512_values(const float* levels, float scale, bool ready,
                                               float* values) {
    __m512i bits =
        _mm512_castps_si512(_mm512_mul_ps(_mm512_loadu_ps(levels), _mm512_set1_ps(scale)));
    if (!ready) {
        __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        bits = _mm512_add_epi32(bits, odd);
    }
    bits = _mm512_add_epi32(bits, _mm512_set1_epi32(ready ? 0x8000 : 0x7fff));
    bits = _mm512_slli_epi32(_mm512_srli_epi32(bits, 16), 16);
    _mm512_storeu_ps(values, _mm512_castsi512_ps(bits));
}

// The sum of one line in 16 lanes. A permutation selects from all 16 values; it ignores the upper
// bits of an index, so that a byte is the index of its low half.
QLORA__TARGET_AVX512
static QLORA__INLINE void qlora__avx512_stream_line(const float* levels,
                                                    const qlora__nf4_line* line, int64_t steps,
                                                    const float* x, bool ready, float* lanes) {
    const uint8_t* codes = line->codes;
    __m512 s = _mm512_setzero_ps(), t = s, u = s, v = s;
    for (int64_t i = 0; i < steps; i++) {
        float values[16];
        qlora__avx512_values(levels, line->scales[i], ready, values);
        __m512 table = _mm512_loadu_ps(values);
        __m128i pair = _mm_loadu_si128((const __m128i*)(const void*)codes);
        __m512i index = _mm512_cvtepu8_epi32(pair);
        s = _mm512_fmadd_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(index, 4), table),
                            _mm512_loadu_ps(x), s);
        t = _mm512_fmadd_ps(_mm512_permutexvar_ps(index, table), _mm512_loadu_ps(x + 16), t);
        pair = _mm_loadu_si128((const __m128i*)(const void*)(codes + 16));
        index = _mm512_cvtepu8_epi32(pair);
        u = _mm512_fmadd_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(index, 4), table),
                            _mm512_loadu_ps(x + 32), u);
        v = _mm512_fmadd_ps(_mm512_permutexvar_ps(index, table), _mm512_loadu_ps(x + 48), v);
        codes += 32;
        x += QLORA__STREAM_STEP;
    }
    _mm512_storeu_ps(lanes, _mm512_add_ps(_mm512_add_ps(s, t), _mm512_add_ps(u, v)));
    _mm256_zeroupper();
}

QLORA__TARGET_AVX512
static void qlora__avx512_stream_nf4(const float* levels, const qlora__nf4_line* lines,
                                     int64_t steps, const float* x, float* sums) {
    for (int i = 0; i < QLORA__STREAM_LINES; i++) {
        float lanes[16];
        qlora__avx512_stream_line(levels, &lines[i], steps, x, false, lanes);
        sums[i] = qlora__avx2_fold(lanes) + qlora__avx2_fold(lanes + 8);
    }
}

QLORA__TARGET_AVX512
static void qlora__avx512_stream_ready(const float* levels, const qlora__nf4_line* lines,
                                       int64_t steps, const float* x, float* sums) {
    for (int i = 0; i < QLORA__STREAM_LINES; i++) {
        float lanes[16];
        qlora__avx512_stream_line(levels, &lines[i], steps, x, true, lanes);
        sums[i] = qlora__avx2_fold(lanes) + qlora__avx2_fold(lanes + 8);
    }
}

// Dense lines are limited by the memory, whatever the width of the registers.
static const qlora__cpu_stream qlora__avx512_stream = {
    qlora__avx512_order, qlora__avx512_stream_nf4, qlora__avx512_stream_ready,
    qlora__avx2_scale,   qlora__avx2_stream_dense, qlora__avx2_blend,
};

#endif // QLORA__X86
