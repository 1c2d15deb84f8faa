// ---- rows with AVX2 and FMA ---------------------------------------------------------------------
//
// The same formulas as with NEON, eight elements at a time; see there for the contraction of
// products and the ends of rows.

#ifdef QLORA__X86

QLORA__TARGET_AVX2 static inline __m256 qlora__avx2_part(const float* x, int64_t n) {
    float room[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    memcpy(room, x, (size_t)n * sizeof *x);
    return _mm256_loadu_ps(room);
}

QLORA__TARGET_AVX2 static inline void qlora__avx2_put_part(float* y, int64_t n, __m256 v) {
    float room[8];
    _mm256_storeu_ps(room, v);
    memcpy(y, room, (size_t)n * sizeof *y);
}

// Loads eight elements, or the last n of a row.
QLORA__TARGET_AVX2 static inline __m256 qlora__avx2_get(const float* x, int64_t n) {
    return n >= 8 ? _mm256_loadu_ps(x) : qlora__avx2_part(x, n);
}

QLORA__TARGET_AVX2 static inline void qlora__avx2_put(float* y, int64_t n, __m256 v) {
    if (n >= 8) {
        _mm256_storeu_ps(y, v);
    } else {
        qlora__avx2_put_part(y, n, v);
    }
}

QLORA__TARGET_AVX2 static inline double qlora__avx2_sum(__m256d v) {
    double room[4];
    _mm256_storeu_pd(room, v);
    return (room[0] + room[2]) + (room[1] + room[3]);
}

QLORA__TARGET_AVX2 static inline __m256d qlora__avx2_low(__m256 v) {
    return _mm256_cvtps_pd(_mm256_castps256_ps128(v));
}

QLORA__TARGET_AVX2 static inline __m256d qlora__avx2_high(__m256 v) {
    return _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
}

// e^x = 2^n p(x - n ln 2), with an error of at most 1.1 ulp from -87.33 to 88.37. Below that the
// result is 0, above that it stays at e^88.37; a NaN stays a NaN, because min and max return their
// second operand if one is a NaN.
QLORA__TARGET_AVX2 static inline __m256 qlora__avx2_exp(__m256 x) {
    const __m256 low = _mm256_set1_ps(-87.33f);
    const __m256 magic = _mm256_set1_ps(12582912.0f); // 1.5 2^23: adding it rounds to an integer
    const __m256 one = _mm256_set1_ps(1.0f);
    __m256 gone = _mm256_cmp_ps(x, low, _CMP_LT_OQ);
    __m256 c = _mm256_min_ps(_mm256_set1_ps(88.37f), _mm256_max_ps(low, x));
    __m256 t = _mm256_fmadd_ps(c, _mm256_set1_ps(1.44269504f), magic);
    __m256 n = _mm256_sub_ps(t, magic);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693147182f), c);
    r = _mm256_fmadd_ps(n, _mm256_set1_ps(1.90465421e-9f), r);
    __m256 p = _mm256_set1_ps(0.00138436444f);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.00837416295f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.0416680016f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.166664317f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.49999994f));
    p = _mm256_fmadd_ps(p, r, one);
    p = _mm256_fmadd_ps(p, r, one);
    __m256i power = _mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(t), 23),
                                     _mm256_set1_epi32(0x3f800000));
    return _mm256_andnot_ps(gone, _mm256_mul_ps(p, _mm256_castsi256_ps(power)));
}

QLORA__TARGET_AVX2 static inline __m256 qlora__avx2_abs(__m256 x) {
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
}

// 1 / (1 + e^-x), from e^-|x|, which cannot overflow.
QLORA__TARGET_AVX2 static inline __m256 qlora__avx2_sigmoid(__m256 x) {
    const __m256 one = _mm256_set1_ps(1.0f);
    __m256 e = qlora__avx2_exp(_mm256_or_ps(_mm256_set1_ps(-0.0f), x));
    __m256 negative = _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_LT_OQ);
    return _mm256_div_ps(_mm256_blendv_ps(one, e, negative), _mm256_add_ps(one, e));
}

// tanh |x| = x + x z q(z), z = x^2, below 0.625, otherwise (1 - e) / (1 + e), e = e^-2|x|.
QLORA__TARGET_AVX2 static inline __m256 qlora__avx2_tanh(__m256 x) {
    const __m256 one = _mm256_set1_ps(1.0f);
    __m256 a = qlora__avx2_abs(x);
    __m256 e = qlora__avx2_exp(_mm256_mul_ps(a, _mm256_set1_ps(-2.0f)));
    __m256 large = _mm256_div_ps(_mm256_sub_ps(one, e), _mm256_add_ps(one, e));
    __m256 z = _mm256_mul_ps(a, a);
    __m256 q = _mm256_set1_ps(-0.00599296112f);
    q = _mm256_fmadd_ps(q, z, _mm256_set1_ps(0.0209241491f));
    q = _mm256_fmadd_ps(q, z, _mm256_set1_ps(-0.0538351424f));
    q = _mm256_fmadd_ps(q, z, _mm256_set1_ps(0.133326635f));
    q = _mm256_fmadd_ps(q, z, _mm256_set1_ps(-0.333333284f));
    __m256 below = _mm256_fmadd_ps(_mm256_mul_ps(a, z), q, a);
    __m256 is_small = _mm256_cmp_ps(a, _mm256_set1_ps(0.625f), _CMP_LT_OQ);
    __m256 y = _mm256_blendv_ps(large, below, is_small);
    return _mm256_or_ps(y, _mm256_and_ps(_mm256_set1_ps(-0.0f), x));
}

QLORA__TARGET_AVX2 static inline __m256 qlora__avx2_gelu_share(__m256 a) {
    __m256 w = _mm256_fmadd_ps(_mm256_mul_ps(a, a), _mm256_set1_ps(0.0713548163f),
                               _mm256_set1_ps(1.59576912f));
    return qlora__avx2_sigmoid(_mm256_mul_ps(a, w));
}

QLORA__TARGET_AVX2 static void qlora__load_avx2(const void* from, qlora_dtype dtype, int64_t n,
                                                float* to) {
    const uint16_t* x = (const uint16_t*)from;
    int64_t i = 0;
    for (; dtype == QLORA_BF16 && i + 8 <= n; i += 8) {
        __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(const void*)(x + i)));
        _mm256_storeu_ps(to + i, _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)));
    }
    if (i > 0) {
        qlora__load_portable(x + i, dtype, n - i, to + i);
    } else {
        qlora__load_portable(from, dtype, n, to);
    }
}

// Rounds to nearest even; a NaN becomes 0x7fff, as in the portable tier.
QLORA__TARGET_AVX2 static void qlora__store_avx2(const float* from, int64_t n, void* to,
                                                 qlora_dtype dtype) {
    uint16_t* y = (uint16_t*)to;
    int64_t i = 0;
    for (; dtype == QLORA_BF16 && i + 8 <= n; i += 8) {
        __m256 v = _mm256_loadu_ps(from + i);
        __m256i u = _mm256_castps_si256(v);
        __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
        __m256i sum = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
        __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
        __m256i r =
            _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), _mm256_set1_epi32(0x7fff), is_nan);
        __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0x08);
        _mm_storeu_si128((__m128i*)(void*)(y + i), _mm256_castsi256_si128(packed));
    }
    if (i > 0) {
        qlora__store_portable(from + i, n - i, y + i, dtype);
    } else {
        qlora__store_portable(from, n, to, dtype);
    }
}

QLORA__TARGET_AVX2 static void qlora__silu_avx2(const float* a, const float* b, float alpha,
                                                int64_t n, float* y) {
    (void)b;
    (void)alpha;
    for (int64_t i = 0; i < n; i += 8) {
        __m256 x = qlora__avx2_get(a + i, n - i);
        qlora__avx2_put(y + i, n - i, _mm256_mul_ps(x, qlora__avx2_sigmoid(x)));
    }
}

QLORA__TARGET_AVX2 static void qlora__silu_grad_avx2(const float* a, const float* b, float alpha,
                                                     int64_t n, float* y) {
    const __m256 one = _mm256_set1_ps(1.0f);
    (void)alpha;
    for (int64_t i = 0; i < n; i += 8) {
        __m256 x = qlora__avx2_get(a + i, n - i);
        __m256 s = qlora__avx2_sigmoid(x);
        __m256 slope = _mm256_fmadd_ps(x, _mm256_sub_ps(one, s), one);
        __m256 bs = _mm256_mul_ps(qlora__avx2_get(b + i, n - i), s);
        qlora__avx2_put(y + i, n - i, _mm256_mul_ps(bs, slope));
    }
}

QLORA__TARGET_AVX2 static void qlora__swiglu_avx2(const float* a, const float* b, float alpha,
                                                  int64_t n, float* y) {
    (void)alpha;
    for (int64_t i = 0; i < n; i += 8) {
        __m256 x = qlora__avx2_get(a + i, n - i);
        __m256 silu = _mm256_mul_ps(x, qlora__avx2_sigmoid(x));
        qlora__avx2_put(y + i, n - i, _mm256_mul_ps(silu, qlora__avx2_get(b + i, n - i)));
    }
}

QLORA__TARGET_AVX2 static void qlora__geglu_avx2(const float* a, const float* b, float alpha,
                                                 int64_t n, float* y) {
    (void)alpha;
    for (int64_t i = 0; i < n; i += 8) {
        __m256 x = qlora__avx2_get(a + i, n - i);
        __m256 gelu = _mm256_mul_ps(x, qlora__avx2_gelu_share(x));
        qlora__avx2_put(y + i, n - i, _mm256_mul_ps(gelu, qlora__avx2_get(b + i, n - i)));
    }
}

QLORA__TARGET_AVX2 static void qlora__cap_avx2(const float* a, const float* b, float alpha,
                                               int64_t n, float* y) {
    const __m256 cap = _mm256_set1_ps(alpha);
    (void)b;
    for (int64_t i = 0; i < n; i += 8) {
        __m256 x = _mm256_div_ps(qlora__avx2_get(a + i, n - i), cap);
        qlora__avx2_put(y + i, n - i, _mm256_mul_ps(cap, qlora__avx2_tanh(x)));
    }
}

QLORA__TARGET_AVX2 static void qlora__mul_avx2(const float* a, const float* b, float alpha,
                                               int64_t n, float* y) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        _mm256_storeu_ps(y + i, _mm256_mul_ps(_mm256_loadu_ps(a + i), _mm256_loadu_ps(b + i)));
    }
    qlora__mul_portable(a + i, b + i, alpha, n - i, y + i);
}

QLORA__TARGET_AVX2 static void qlora__add_avx2(const float* a, const float* b, float alpha,
                                               int64_t n, float* y) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        _mm256_storeu_ps(y + i, _mm256_add_ps(_mm256_loadu_ps(a + i), _mm256_loadu_ps(b + i)));
    }
    qlora__add_portable(a + i, b + i, alpha, n - i, y + i);
}

QLORA__TARGET_AVX2 static void qlora__scale_avx2(const float* a, const float* b, float alpha,
                                                 int64_t n, float* y) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        _mm256_storeu_ps(y + i, _mm256_mul_ps(_mm256_loadu_ps(a + i), _mm256_set1_ps(alpha)));
    }
    qlora__scale_portable(a + i, b, alpha, n - i, y + i);
}

QLORA__TARGET_AVX2 static void qlora__fill_avx2(const float* a, const float* b, float alpha,
                                                int64_t n, float* y) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        _mm256_storeu_ps(y + i, _mm256_set1_ps(alpha));
    }
    qlora__fill_portable(a, b, alpha, n - i, y + i);
}

QLORA__TARGET_AVX2 static void qlora__swiglu_grad_avx2(const qlora__gated_row* r) {
    const __m256 one = _mm256_set1_ps(1.0f);
    for (int64_t i = 0; i < r->n; i += 8) {
        int64_t n = r->n - i;
        __m256 dh = qlora__avx2_get(r->dh + i, n);
        __m256 g = qlora__avx2_get(r->gate + i, n);
        __m256 u = qlora__avx2_get(r->up + i, n);
        __m256 s = qlora__avx2_sigmoid(g);
        __m256 slope = _mm256_fmadd_ps(g, _mm256_sub_ps(one, s), one);
        __m256 dg = _mm256_mul_ps(_mm256_mul_ps(_mm256_mul_ps(dh, u), s), slope);
        qlora__avx2_put(r->dgate + i, n, dg);
        qlora__avx2_put(r->dup + i, n, _mm256_mul_ps(_mm256_mul_ps(dh, g), s));
        if (r->h != NULL) {
            qlora__avx2_put(r->h + i, n, _mm256_mul_ps(_mm256_mul_ps(g, s), u));
        }
    }
}

QLORA__TARGET_AVX2 static void qlora__geglu_grad_avx2(const qlora__gated_row* r) {
    const __m256 one = _mm256_set1_ps(1.0f);
    const __m256 twice = _mm256_set1_ps(1.59576912f);
    for (int64_t i = 0; i < r->n; i += 8) {
        int64_t n = r->n - i;
        __m256 dh = qlora__avx2_get(r->dh + i, n);
        __m256 g = qlora__avx2_get(r->gate + i, n);
        __m256 u = qlora__avx2_get(r->up + i, n);
        __m256 s = qlora__avx2_gelu_share(g);
        __m256 w = _mm256_fmadd_ps(_mm256_mul_ps(g, g), _mm256_set1_ps(0.214064449f), twice);
        __m256 bend = _mm256_mul_ps(_mm256_mul_ps(g, s), _mm256_sub_ps(one, s));
        __m256 dg = _mm256_mul_ps(_mm256_mul_ps(dh, u), _mm256_fmadd_ps(bend, w, s));
        qlora__avx2_put(r->dgate + i, n, dg);
        qlora__avx2_put(r->dup + i, n, _mm256_mul_ps(_mm256_mul_ps(dh, g), s));
        if (r->h != NULL) {
            qlora__avx2_put(r->h + i, n, _mm256_mul_ps(_mm256_mul_ps(g, s), u));
        }
    }
}

QLORA__TARGET_AVX2 static double qlora__squares_avx2(const float* x, int64_t n, double sum) {
    __m256d s0 = _mm256_setzero_pd();
    __m256d s1 = s0;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 v = _mm256_loadu_ps(x + i);
        __m256d low = qlora__avx2_low(v);
        __m256d high = qlora__avx2_high(v);
        s0 = _mm256_fmadd_pd(low, low, s0);
        s1 = _mm256_fmadd_pd(high, high, s1);
    }
    sum += qlora__avx2_sum(_mm256_add_pd(s0, s1));
    return qlora__squares_portable(x + i, n - i, sum);
}

QLORA__TARGET_AVX2 static double qlora__dot_avx2(const float* x, const float* y, int64_t n,
                                                 double sum) {
    __m256d s0 = _mm256_setzero_pd();
    __m256d s1 = s0;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 a = _mm256_loadu_ps(x + i);
        __m256 b = _mm256_loadu_ps(y + i);
        s0 = _mm256_fmadd_pd(qlora__avx2_low(a), qlora__avx2_low(b), s0);
        s1 = _mm256_fmadd_pd(qlora__avx2_high(a), qlora__avx2_high(b), s1);
    }
    sum += qlora__avx2_sum(_mm256_add_pd(s0, s1));
    return qlora__dot_portable(x + i, y + i, n - i, sum);
}

// The product of two factors is rounded to f32 first; the sum is f64.
QLORA__TARGET_AVX2 static double qlora__dot3_avx2(const float* x, const float* y, const float* z,
                                                  int64_t n, double sum) {
    __m256d s0 = _mm256_setzero_pd();
    __m256d s1 = s0;
    for (int64_t i = 0; i < n; i += 8) {
        __m256 a = _mm256_mul_ps(qlora__avx2_get(x + i, n - i), qlora__avx2_get(y + i, n - i));
        __m256 b = qlora__avx2_get(z + i, n - i);
        s0 = _mm256_fmadd_pd(qlora__avx2_low(a), qlora__avx2_low(b), s0);
        s1 = _mm256_fmadd_pd(qlora__avx2_high(a), qlora__avx2_high(b), s1);
    }
    return sum + qlora__avx2_sum(_mm256_add_pd(s0, s1));
}

QLORA__TARGET_AVX2 static void qlora__norm_avx2(const float* x, float rstd, const float* w,
                                                int64_t n, float* y) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(rstd));
        _mm256_storeu_ps(y + i, _mm256_mul_ps(v, _mm256_loadu_ps(w + i)));
    }
    qlora__norm_portable(x + i, rstd, w + i, n - i, y + i);
}

QLORA__TARGET_AVX2 static void qlora__norm_grad_avx2(const qlora__norm_row* r) {
    const __m256 rstd = _mm256_set1_ps(r->rstd);
    const __m256 pull = _mm256_set1_ps(r->pull);
    for (int64_t i = 0; i < r->n; i += 8) {
        int64_t n = r->n - i;
        __m256 wdy = _mm256_mul_ps(qlora__avx2_get(r->dy + i, n), qlora__avx2_get(r->w + i, n));
        __m256 v = _mm256_fnmadd_ps(qlora__avx2_get(r->x + i, n), pull, wdy);
        __m256 dx = r->dres != NULL ? _mm256_fmadd_ps(rstd, v, qlora__avx2_get(r->dres + i, n))
                                    : _mm256_mul_ps(rstd, v);
        qlora__avx2_put(r->dx + i, n, dx);
    }
}

QLORA__TARGET_AVX2 static void qlora__rope_avx2(float* a, float* b, const float* cosine,
                                                const float* sine, float sign, int64_t n) {
    for (int64_t i = 0; i < n; i += 8) {
        __m256 u = qlora__avx2_get(a + i, n - i);
        __m256 v = qlora__avx2_get(b + i, n - i);
        __m256 c = qlora__avx2_get(cosine + i, n - i);
        __m256 s = _mm256_mul_ps(qlora__avx2_get(sine + i, n - i), _mm256_set1_ps(sign));
        qlora__avx2_put(a + i, n - i, _mm256_fnmadd_ps(v, s, _mm256_mul_ps(u, c)));
        qlora__avx2_put(b + i, n - i, _mm256_fmadd_ps(u, s, _mm256_mul_ps(v, c)));
    }
}

// max returns its second operand if one is a NaN, so that a NaN in x is ignored.
QLORA__TARGET_AVX2 static float qlora__top_avx2(const float* x, int64_t n, float top) {
    __m256 t = _mm256_set1_ps(top);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        t = _mm256_max_ps(_mm256_loadu_ps(x + i), t);
    }
    float room[8];
    _mm256_storeu_ps(room, t);
    return qlora__top_portable(x + i, n - i, qlora__top_portable(room, 8, top));
}

QLORA__TARGET_AVX2 static double qlora__exps_avx2(const float* x, float top, int64_t n, float* y,
                                                  double sum) {
    const __m256 most = _mm256_set1_ps(top);
    __m256d s0 = _mm256_setzero_pd();
    __m256d s1 = s0;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 e = qlora__avx2_exp(_mm256_sub_ps(_mm256_loadu_ps(x + i), most));
        if (y != NULL) {
            _mm256_storeu_ps(y + i, e);
        }
        s0 = _mm256_add_pd(s0, qlora__avx2_low(e));
        s1 = _mm256_add_pd(s1, qlora__avx2_high(e));
    }
    sum += qlora__avx2_sum(_mm256_add_pd(s0, s1));
    if (i < n) {
        __m256 e = qlora__avx2_exp(_mm256_sub_ps(qlora__avx2_part(x + i, n - i), most));
        float room[8];
        _mm256_storeu_ps(room, e);
        for (int64_t j = 0; i + j < n; j++) {
            sum += (double)room[j];
        }
        if (y != NULL) {
            qlora__avx2_put_part(y + i, n - i, e);
        }
    }
    return sum;
}

QLORA__TARGET_AVX2 static void qlora__shares_avx2(const float* e, float sum, float scale,
                                                  float weight, int64_t n, float* y) {
    qlora__scale_avx2(e, NULL, scale * weight / sum, n, y);
}

QLORA__TARGET_AVX2 static void qlora__softmax_grad_avx2(const float* p, const float* dy, float dot,
                                                        int64_t n, float* dx) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 v = _mm256_sub_ps(_mm256_loadu_ps(dy + i), _mm256_set1_ps(dot));
        _mm256_storeu_ps(dx + i, _mm256_mul_ps(_mm256_loadu_ps(p + i), v));
    }
    qlora__softmax_grad_portable(p + i, dy + i, dot, n - i, dx + i);
}

QLORA__TARGET_AVX2 static void qlora__cap_grad_avx2(const float* y, float cap, int64_t n,
                                                    float* g) {
    const __m256 one = _mm256_set1_ps(1.0f);
    for (int64_t i = 0; i < n; i += 8) {
        __m256 t = _mm256_div_ps(qlora__avx2_get(y + i, n - i), _mm256_set1_ps(cap));
        __m256 slope = _mm256_fnmadd_ps(t, t, one);
        qlora__avx2_put(g + i, n - i, _mm256_mul_ps(qlora__avx2_get(g + i, n - i), slope));
    }
}

QLORA__TARGET_AVX2 static void qlora__adamw_avx2(const qlora__adamw_row* r) {
    const __m256 clip = _mm256_set1_ps(r->clip);
    for (int64_t i = 0; i < r->n; i += 8) {
        int64_t n = r->n - i;
        __m256 grad = qlora__avx2_get(r->grad + i, n);
        __m256 p = qlora__avx2_get(r->param + i, n);
        __m256 m = qlora__avx2_get(r->m + i, n);
        __m256 v = qlora__avx2_get(r->v + i, n);
        __m256 g = _mm256_mul_ps(grad, clip);
        __m256 step = _mm256_fmsub_ps(grad, clip, m); // g - m
        p = _mm256_fnmadd_ps(p, _mm256_set1_ps(r->decay), p);
        m = _mm256_fmadd_ps(step, _mm256_set1_ps(r->one_minus_beta1), m);
        __m256 share = _mm256_mul_ps(g, _mm256_set1_ps(r->one_minus_beta2));
        v = _mm256_fmadd_ps(share, g, _mm256_mul_ps(v, _mm256_set1_ps(r->beta2)));
        __m256 root = _mm256_div_ps(_mm256_sqrt_ps(v), _mm256_set1_ps(r->root_correction));
        __m256 move = _mm256_div_ps(m, _mm256_add_ps(root, _mm256_set1_ps(r->eps)));
        p = _mm256_fnmadd_ps(move, _mm256_set1_ps(r->step_size), p);
        qlora__avx2_put(r->param + i, n, p);
        qlora__avx2_put(r->m + i, n, m);
        qlora__avx2_put(r->v + i, n, v);
        qlora__avx2_put(r->grad + i, n, _mm256_setzero_ps());
    }
}

// A permutation knows eight entries: one for the lower half of the levels, one for the upper, and
// bit 3 of the code chooses.
QLORA__TARGET_AVX2 static inline __m256 qlora__avx2_codes(__m256 low, __m256 high, __m256i code) {
    __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, code),
                            _mm256_permutevar8x32_ps(high, code), upper);
}

QLORA__TARGET_AVX2 static void qlora__nf4_avx2(const uint8_t* codes, const float* levels,
                                               float scale, int64_t n, float* y) {
    const __m256 low = _mm256_loadu_ps(levels);
    const __m256 high = _mm256_loadu_ps(levels + 8);
    const __m256 factor = _mm256_set1_ps(scale);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        int64_t eight;
        memcpy(&eight, codes + i / 2, sizeof eight);
        __m256i pair = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(eight));
        __m256 even = qlora__avx2_codes(low, high, _mm256_srli_epi32(pair, 4));
        __m256 odd = qlora__avx2_codes(low, high, pair);
        __m256 first = _mm256_unpacklo_ps(even, odd);
        __m256 second = _mm256_unpackhi_ps(even, odd);
        __m256 front = _mm256_permute2f128_ps(first, second, 0x20);
        __m256 back = _mm256_permute2f128_ps(first, second, 0x31);
        _mm256_storeu_ps(y + i, _mm256_mul_ps(front, factor));
        _mm256_storeu_ps(y + i + 8, _mm256_mul_ps(back, factor));
    }
    qlora__nf4_portable(codes + i / 2, levels, scale, n - i, y + i);
}

// Upper words of the products of eight words with one.
QLORA__TARGET_AVX2 static inline __m256i qlora__avx2_high_words(__m256i x, __m256i by) {
    __m256i even = _mm256_srli_epi64(_mm256_mul_epu32(x, by), 32);
    __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), by);
    return _mm256_blend_epi32(even, odd, 0xaa);
}

// `scale` where the word is at least `least`, both unsigned.
QLORA__TARGET_AVX2 static inline __m256 qlora__avx2_kept(__m256i words, __m256i least,
                                                         __m256 scale) {
    __m256i kept = _mm256_cmpeq_epi32(_mm256_max_epu32(words, least), words);
    return _mm256_and_ps(_mm256_castsi256_ps(kept), scale);
}

// Writes element i of a, b, c and d as y[4 i], y[4 i + 1] and so on.
QLORA__TARGET_AVX2 static inline void qlora__avx2_put4(float* y, __m256 a, __m256 b, __m256 c,
                                                       __m256 d) {
    __m256 ab = _mm256_unpacklo_ps(a, b); // a0 b0 a1 b1, a4 b4 a5 b5
    __m256 cd = _mm256_unpacklo_ps(c, d);
    __m256 ab2 = _mm256_unpackhi_ps(a, b); // a2 b2 a3 b3, a6 b6 a7 b7
    __m256 cd2 = _mm256_unpackhi_ps(c, d);
    __m256 r0 = _mm256_shuffle_ps(ab, cd, 0x44);   // elements 0, 4
    __m256 r1 = _mm256_shuffle_ps(ab, cd, 0xee);   // elements 1, 5
    __m256 r2 = _mm256_shuffle_ps(ab2, cd2, 0x44); // elements 2, 6
    __m256 r3 = _mm256_shuffle_ps(ab2, cd2, 0xee); // elements 3, 7
    _mm256_storeu_ps(y, _mm256_permute2f128_ps(r0, r1, 0x20));
    _mm256_storeu_ps(y + 8, _mm256_permute2f128_ps(r2, r3, 0x20));
    _mm256_storeu_ps(y + 16, _mm256_permute2f128_ps(r0, r1, 0x31));
    _mm256_storeu_ps(y + 24, _mm256_permute2f128_ps(r2, r3, 0x31));
}

// Eight counters at a time; see qlora__philox.
QLORA__TARGET_AVX2 static void qlora__keep_avx2(const qlora__keep_row* r) {
    const __m256i m0 = _mm256_set1_epi32((int)0xD2511F53u);
    const __m256i m1 = _mm256_set1_epi32((int)0xCD9E8D57u);
    const __m256i least = _mm256_set1_epi32((int)r->threshold);
    const __m256 scale = _mm256_set1_ps(r->scale);
    qlora__keep_row rest = *r;
    for (; rest.n >= 32; rest.n -= 32) {
        __m256i c0 = _mm256_add_epi32(_mm256_set1_epi32((int)rest.counter[0]),
                                      _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
        __m256i c1 = _mm256_set1_epi32((int)r->counter[1]);
        __m256i c2 = _mm256_set1_epi32((int)r->counter[2]);
        __m256i c3 = _mm256_set1_epi32((int)r->counter[3]);
        for (uint32_t round = 0; round < 10; round++) {
            __m256i k0 = _mm256_set1_epi32((int)(r->key[0] + round * 0x9E3779B9u));
            __m256i k1 = _mm256_set1_epi32((int)(r->key[1] + round * 0xBB67AE85u));
            __m256i h0 = qlora__avx2_high_words(c0, m0);
            __m256i h1 = qlora__avx2_high_words(c2, m1);
            __m256i l0 = _mm256_mullo_epi32(c0, m0);
            __m256i l1 = _mm256_mullo_epi32(c2, m1);
            c0 = _mm256_xor_si256(_mm256_xor_si256(h1, c1), k0);
            c1 = l1;
            c2 = _mm256_xor_si256(_mm256_xor_si256(h0, c3), k1);
            c3 = l0;
        }
        qlora__avx2_put4(rest.factor, qlora__avx2_kept(c0, least, scale),
                         qlora__avx2_kept(c1, least, scale), qlora__avx2_kept(c2, least, scale),
                         qlora__avx2_kept(c3, least, scale));
        rest.factor += 32;
        rest.counter[0] += 8;
    }
    qlora__keep_portable(&rest);
}

QLORA__TARGET_AVX2 static void qlora__scores_avx2(const qlora__score_row* r) {
    const __m256 one = _mm256_set1_ps(1.0f);
    for (int64_t i = 0; i < r->n; i += 8) {
        int64_t n = r->n - i;
        __m256 s = qlora__avx2_get(r->s + i, n);
        __m256 p = qlora__avx2_exp(_mm256_sub_ps(s, _mm256_set1_ps(r->lse)));
        __m256 d = _mm256_sub_ps(qlora__avx2_get(r->dp + i, n), _mm256_set1_ps(r->dot));
        __m256 ds = _mm256_mul_ps(p, d);
        if (r->cap > 0.0f) {
            __m256 t = _mm256_div_ps(s, _mm256_set1_ps(r->cap));
            ds = _mm256_mul_ps(ds, _mm256_fnmadd_ps(t, t, one));
        }
        qlora__avx2_put(r->p + i, n, p);
        qlora__avx2_put(r->ds + i, n, ds);
    }
}

// See qlora__neon_lanes.
typedef struct qlora__avx2_lanes {
    float* s;
    __m256i from;
    __m256i to;
    __m256 top;
    __m256 sum;
} qlora__avx2_lanes;

QLORA__TARGET_AVX2 static inline __m256 qlora__avx2_seen(const qlora__avx2_lanes* l, int64_t k) {
    __m256i at = _mm256_set1_epi32((int)k);
    return _mm256_castsi256_ps(
        _mm256_andnot_si256(_mm256_cmpgt_epi32(l->from, at), _mm256_cmpgt_epi32(l->to, at)));
}

// max returns its second operand if one is a NaN, so that a NaN in a score is ignored here, and
// stays in its e^(s - top).
QLORA__TARGET_AVX2 static QLORA__INLINE void qlora__avx2_tops(qlora__avx2_lanes* l, int64_t k,
                                                              int64_t to, bool all) {
    for (; k < to; k++) {
        __m256 most = _mm256_max_ps(_mm256_loadu_ps(l->s + k * QLORA__BLOCK), l->top);
        l->top = all ? most : _mm256_blendv_ps(l->top, most, qlora__avx2_seen(l, k));
    }
}

QLORA__TARGET_AVX2 static QLORA__INLINE void qlora__avx2_exps(qlora__avx2_lanes* l, int64_t k,
                                                              int64_t to, bool all) {
    for (; k < to; k++) {
        float* s = l->s + k * QLORA__BLOCK;
        __m256 e = qlora__avx2_exp(_mm256_sub_ps(_mm256_loadu_ps(s), l->top));
        e = all ? e : _mm256_and_ps(e, qlora__avx2_seen(l, k));
        _mm256_storeu_ps(s, e);
        l->sum = _mm256_add_ps(l->sum, e);
    }
}

QLORA__TARGET_AVX2 static void qlora__soften_avx2(const qlora__soften_block* b) {
    for (int64_t i = 0; i < b->queries; i += 8) {
        qlora__soften_range r = qlora__soften_begin(b, i, 8);
        const __m256 before = _mm256_loadu_ps(b->top + i);
        qlora__avx2_lanes l;
        l.s = b->s + i;
        l.from = _mm256_loadu_si256((const __m256i*)(const void*)(b->from + i));
        l.to = _mm256_loadu_si256((const __m256i*)(const void*)(b->to + i));
        l.top = before;
        l.sum = _mm256_setzero_ps();
        qlora__avx2_tops(&l, r.first, r.all_first, false);
        qlora__avx2_tops(&l, r.all_first, r.all_last, true);
        qlora__avx2_tops(&l, r.all_last, r.last, false);
        qlora__avx2_exps(&l, r.first, r.all_first, false);
        qlora__avx2_exps(&l, r.all_first, r.all_last, true);
        qlora__avx2_exps(&l, r.all_last, r.last, false);
        _mm256_storeu_ps(b->top + i, l.top);
        _mm256_storeu_ps(b->shrink + i, qlora__avx2_exp(_mm256_sub_ps(before, l.top)));
        _mm256_storeu_ps(b->sum + i, l.sum);
    }
    _mm256_zeroupper();
}

// Four rows and 16 columns of a product, in named variables.
QLORA__TARGET_AVX2 static void qlora__tile_avx2(const qlora__block_product* p, const float* a,
                                                const float* b, float* c) {
    const int64_t row = p->transposed ? 1 : p->lda;
    const int64_t step = p->transposed ? p->lda : 1;
    __m256 c00 = _mm256_setzero_ps(), c01 = c00, c10 = c00, c11 = c00;
    __m256 c20 = c00, c21 = c00, c30 = c00, c31 = c00;
    float* r1 = c + p->ldc;
    float* r2 = r1 + p->ldc;
    float* r3 = r2 + p->ldc;
    if (p->add) {
        c00 = _mm256_loadu_ps(c), c01 = _mm256_loadu_ps(c + 8);
        c10 = _mm256_loadu_ps(r1), c11 = _mm256_loadu_ps(r1 + 8);
        c20 = _mm256_loadu_ps(r2), c21 = _mm256_loadu_ps(r2 + 8);
        c30 = _mm256_loadu_ps(r3), c31 = _mm256_loadu_ps(r3 + 8);
    }
    for (int64_t k = 0; k < p->k; k++) {
        __m256 b0 = _mm256_loadu_ps(b);
        __m256 b1 = _mm256_loadu_ps(b + 8);
        __m256 a0 = _mm256_broadcast_ss(a);
        __m256 a1 = _mm256_broadcast_ss(a + row);
        c00 = _mm256_fmadd_ps(a0, b0, c00);
        c01 = _mm256_fmadd_ps(a0, b1, c01);
        c10 = _mm256_fmadd_ps(a1, b0, c10);
        c11 = _mm256_fmadd_ps(a1, b1, c11);
        __m256 a2 = _mm256_broadcast_ss(a + 2 * row);
        __m256 a3 = _mm256_broadcast_ss(a + 3 * row);
        c20 = _mm256_fmadd_ps(a2, b0, c20);
        c21 = _mm256_fmadd_ps(a2, b1, c21);
        c30 = _mm256_fmadd_ps(a3, b0, c30);
        c31 = _mm256_fmadd_ps(a3, b1, c31);
        QLORA__WILL_READ(b + p->ahead);
        a += step;
        b += p->ldb;
    }
    _mm256_storeu_ps(c, c00), _mm256_storeu_ps(c + 8, c01);
    _mm256_storeu_ps(r1, c10), _mm256_storeu_ps(r1 + 8, c11);
    _mm256_storeu_ps(r2, c20), _mm256_storeu_ps(r2 + 8, c21);
    _mm256_storeu_ps(r3, c30), _mm256_storeu_ps(r3 + 8, c31);
}

QLORA__TARGET_AVX2 static void qlora__product_avx2(const qlora__block_product* p) {
    int64_t row = p->transposed ? 1 : p->lda;
    for (int64_t j = 0; j < p->n; j += 16) {
        for (int64_t i = 0; i < p->m; i += 4) {
            qlora__tile_avx2(p, p->a + i * row, p->b + j, p->c + i * p->ldc + j);
        }
    }
    _mm256_zeroupper();
}

QLORA__TARGET_AVX2 static void qlora__transpose_avx2(const float* x, int64_t ld, int64_t rows,
                                                int64_t cols, float* y) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {
        const float* at = x + r * ld;
        int64_t c = 0;
        for (; c + 4 <= cols; c += 4) {
            __m128 l0 = _mm_loadu_ps(at + c);
            __m128 l1 = _mm_loadu_ps(at + ld + c);
            __m128 l2 = _mm_loadu_ps(at + 2 * ld + c);
            __m128 l3 = _mm_loadu_ps(at + 3 * ld + c);
            float* to = y + c * QLORA__BLOCK + r;
            _MM_TRANSPOSE4_PS(l0, l1, l2, l3);
            _mm_storeu_ps(to, l0);
            _mm_storeu_ps(to + QLORA__BLOCK, l1);
            _mm_storeu_ps(to + 2 * QLORA__BLOCK, l2);
            _mm_storeu_ps(to + 3 * QLORA__BLOCK, l3);
        }
        qlora__transpose_portable(at + c, ld, 4, cols - c, y + c * QLORA__BLOCK + r);
    }
    qlora__transpose_portable(x + r * ld, ld, rows - r, cols, y + r);
    _mm256_zeroupper();
}

static const qlora__cpu_rows qlora__rows_avx2 = {
    qlora__load_avx2,
    qlora__store_avx2,
    {qlora__silu_avx2, qlora__silu_grad_avx2, qlora__swiglu_avx2, qlora__geglu_avx2,
     qlora__cap_avx2, qlora__mul_avx2, qlora__add_avx2, qlora__scale_avx2, qlora__fill_avx2},
    qlora__swiglu_grad_avx2,
    qlora__geglu_grad_avx2,
    qlora__squares_avx2,
    qlora__dot_avx2,
    qlora__dot3_avx2,
    qlora__norm_avx2,
    qlora__norm_grad_avx2,
    qlora__rope_avx2,
    qlora__top_avx2,
    qlora__exps_avx2,
    qlora__shares_avx2,
    qlora__softmax_grad_avx2,
    qlora__cap_grad_avx2,
    qlora__adamw_avx2,
    qlora__nf4_avx2,
    qlora__keep_avx2,
    qlora__product_avx2,
    qlora__transpose_avx2,
    qlora__scores_avx2,
    qlora__soften_avx2,
};

#endif // QLORA__X86
