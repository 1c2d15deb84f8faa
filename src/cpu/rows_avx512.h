// ---- rows with AVX-512 --------------------------------------------------------------------------
//
// The same formulas as with AVX2, 16 elements at a time; the end of a row is loaded and stored
// under a mask. Operators without sums give the same bits as with AVX2.

#ifdef QLORA__X86

// The first n of 16 elements.
static inline __mmask16 qlora__avx512_first(int64_t n) {
    return (__mmask16)(n >= 16 ? 0xffffu : (1u << n) - 1u);
}

// Loads 16 elements, or the last n of a row and zeros.
QLORA__TARGET_AVX512 static inline __m512 qlora__avx512_get(const float* x, int64_t n) {
    return _mm512_maskz_loadu_ps(qlora__avx512_first(n), x);
}

QLORA__TARGET_AVX512 static inline void qlora__avx512_put(float* y, int64_t n, __m512 v) {
    _mm512_mask_storeu_ps(y, qlora__avx512_first(n), v);
}

QLORA__TARGET_AVX512 static inline double qlora__avx512_sum(__m512d v) {
    double room[8];
    _mm512_storeu_pd(room, v);
    return ((room[0] + room[4]) + (room[2] + room[6])) +
           ((room[1] + room[5]) + (room[3] + room[7]));
}

// The lower and upper eight of 16 elements in double precision; the upper half goes through a
// shuffle, which needs no register of 256 bits.
QLORA__TARGET_AVX512 static inline __m512d qlora__avx512_low(__m512 v) {
    return _mm512_cvtps_pd(_mm512_castps512_ps256(v));
}

QLORA__TARGET_AVX512 static inline __m512d qlora__avx512_high(__m512 v) {
    return _mm512_cvtps_pd(_mm512_castps512_ps256(_mm512_shuffle_f32x4(v, v, 0xee)));
}

// See qlora__avx2_exp.
QLORA__TARGET_AVX512 static inline __m512 qlora__avx512_exp(__m512 x) {
    const __m512 low = _mm512_set1_ps(-87.33f);
    const __m512 magic = _mm512_set1_ps(12582912.0f);
    const __m512 one = _mm512_set1_ps(1.0f);
    __mmask16 there = _mm512_cmp_ps_mask(x, low, _CMP_NLT_UQ);
    __m512 c = _mm512_min_ps(_mm512_set1_ps(88.37f), _mm512_max_ps(low, x));
    __m512 t = _mm512_fmadd_ps(c, _mm512_set1_ps(1.44269504f), magic);
    __m512 n = _mm512_sub_ps(t, magic);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693147182f), c);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(1.90465421e-9f), r);
    __m512 p = _mm512_set1_ps(0.00138436444f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.00837416295f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.0416680016f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.166664317f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.49999994f));
    p = _mm512_fmadd_ps(p, r, one);
    p = _mm512_fmadd_ps(p, r, one);
    __m512i power = _mm512_add_epi32(_mm512_slli_epi32(_mm512_castps_si512(t), 23),
                                     _mm512_set1_epi32(0x3f800000));
    return _mm512_maskz_mul_ps(there, p, _mm512_castsi512_ps(power));
}

QLORA__TARGET_AVX512 static inline __m512 qlora__avx512_sigmoid(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    __m512 e = qlora__avx512_exp(_mm512_or_ps(_mm512_set1_ps(-0.0f), x));
    __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    return _mm512_div_ps(_mm512_mask_blend_ps(negative, one, e), _mm512_add_ps(one, e));
}

// See qlora__avx2_tanh.
QLORA__TARGET_AVX512 static inline __m512 qlora__avx512_tanh(__m512 x) {
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 sign = _mm512_set1_ps(-0.0f);
    __m512 a = _mm512_andnot_ps(sign, x);
    __m512 e = qlora__avx512_exp(_mm512_mul_ps(a, _mm512_set1_ps(-2.0f)));
    __m512 large = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
    __m512 z = _mm512_mul_ps(a, a);
    __m512 q = _mm512_set1_ps(-0.00599296112f);
    q = _mm512_fmadd_ps(q, z, _mm512_set1_ps(0.0209241491f));
    q = _mm512_fmadd_ps(q, z, _mm512_set1_ps(-0.0538351424f));
    q = _mm512_fmadd_ps(q, z, _mm512_set1_ps(0.133326635f));
    q = _mm512_fmadd_ps(q, z, _mm512_set1_ps(-0.333333284f));
    __m512 below = _mm512_fmadd_ps(_mm512_mul_ps(a, z), q, a);
    __mmask16 is_small = _mm512_cmp_ps_mask(a, _mm512_set1_ps(0.625f), _CMP_LT_OQ);
    __m512 y = _mm512_mask_blend_ps(is_small, large, below);
    return _mm512_or_ps(y, _mm512_and_ps(sign, x));
}

QLORA__TARGET_AVX512 static inline __m512 qlora__avx512_gelu_share(__m512 a) {
    __m512 w = _mm512_fmadd_ps(_mm512_mul_ps(a, a), _mm512_set1_ps(0.0713548163f),
                               _mm512_set1_ps(1.59576912f));
    return qlora__avx512_sigmoid(_mm512_mul_ps(a, w));
}

// ---- elementwise --------------------------------------------------------------------------------

QLORA__TARGET_AVX512 static void qlora__silu_avx512(const float* a, const float* b, float alpha,
                                                    int64_t n, float* y) {
    (void)b;
    (void)alpha;
    for (int64_t i = 0; i < n; i += 16) {
        __m512 x = qlora__avx512_get(a + i, n - i);
        qlora__avx512_put(y + i, n - i, _mm512_mul_ps(x, qlora__avx512_sigmoid(x)));
    }
}

QLORA__TARGET_AVX512 static void qlora__silu_grad_avx512(const float* a, const float* b,
                                                         float alpha, int64_t n, float* y) {
    const __m512 one = _mm512_set1_ps(1.0f);
    (void)alpha;
    for (int64_t i = 0; i < n; i += 16) {
        __m512 x = qlora__avx512_get(a + i, n - i);
        __m512 s = qlora__avx512_sigmoid(x);
        __m512 slope = _mm512_fmadd_ps(x, _mm512_sub_ps(one, s), one);
        __m512 bs = _mm512_mul_ps(qlora__avx512_get(b + i, n - i), s);
        qlora__avx512_put(y + i, n - i, _mm512_mul_ps(bs, slope));
    }
}

QLORA__TARGET_AVX512 static void qlora__swiglu_avx512(const float* a, const float* b, float alpha,
                                                      int64_t n, float* y) {
    (void)alpha;
    for (int64_t i = 0; i < n; i += 16) {
        __m512 x = qlora__avx512_get(a + i, n - i);
        __m512 silu = _mm512_mul_ps(x, qlora__avx512_sigmoid(x));
        qlora__avx512_put(y + i, n - i, _mm512_mul_ps(silu, qlora__avx512_get(b + i, n - i)));
    }
}

QLORA__TARGET_AVX512 static void qlora__geglu_avx512(const float* a, const float* b, float alpha,
                                                     int64_t n, float* y) {
    (void)alpha;
    for (int64_t i = 0; i < n; i += 16) {
        __m512 x = qlora__avx512_get(a + i, n - i);
        __m512 gelu = _mm512_mul_ps(x, qlora__avx512_gelu_share(x));
        qlora__avx512_put(y + i, n - i, _mm512_mul_ps(gelu, qlora__avx512_get(b + i, n - i)));
    }
}

QLORA__TARGET_AVX512 static void qlora__cap_avx512(const float* a, const float* b, float alpha,
                                                   int64_t n, float* y) {
    const __m512 cap = _mm512_set1_ps(alpha);
    (void)b;
    for (int64_t i = 0; i < n; i += 16) {
        __m512 x = _mm512_div_ps(qlora__avx512_get(a + i, n - i), cap);
        qlora__avx512_put(y + i, n - i, _mm512_mul_ps(cap, qlora__avx512_tanh(x)));
    }
}

QLORA__TARGET_AVX512 static void qlora__mul_avx512(const float* a, const float* b, float alpha,
                                                   int64_t n, float* y) {
    (void)alpha;
    for (int64_t i = 0; i < n; i += 16) {
        __m512 v = qlora__avx512_get(b + i, n - i);
        qlora__avx512_put(y + i, n - i, _mm512_mul_ps(qlora__avx512_get(a + i, n - i), v));
    }
}

QLORA__TARGET_AVX512 static void qlora__add_avx512(const float* a, const float* b, float alpha,
                                                   int64_t n, float* y) {
    (void)alpha;
    for (int64_t i = 0; i < n; i += 16) {
        __m512 v = qlora__avx512_get(b + i, n - i);
        qlora__avx512_put(y + i, n - i, _mm512_add_ps(qlora__avx512_get(a + i, n - i), v));
    }
}

QLORA__TARGET_AVX512 static void qlora__scale_avx512(const float* a, const float* b, float alpha,
                                                     int64_t n, float* y) {
    const __m512 factor = _mm512_set1_ps(alpha);
    (void)b;
    for (int64_t i = 0; i < n; i += 16) {
        __m512 x = qlora__avx512_get(a + i, n - i);
        qlora__avx512_put(y + i, n - i, _mm512_mul_ps(x, factor));
    }
}

QLORA__TARGET_AVX512 static void qlora__fill_avx512(const float* a, const float* b, float alpha,
                                                    int64_t n, float* y) {
    (void)a;
    (void)b;
    for (int64_t i = 0; i < n; i += 16) {
        qlora__avx512_put(y + i, n - i, _mm512_set1_ps(alpha));
    }
}

QLORA__TARGET_AVX512 static void qlora__swiglu_grad_avx512(const qlora__gated_row* r) {
    const __m512 one = _mm512_set1_ps(1.0f);
    for (int64_t i = 0; i < r->n; i += 16) {
        int64_t n = r->n - i;
        __m512 dh = qlora__avx512_get(r->dh + i, n);
        __m512 g = qlora__avx512_get(r->gate + i, n);
        __m512 u = qlora__avx512_get(r->up + i, n);
        __m512 s = qlora__avx512_sigmoid(g);
        __m512 slope = _mm512_fmadd_ps(g, _mm512_sub_ps(one, s), one);
        __m512 dg = _mm512_mul_ps(_mm512_mul_ps(_mm512_mul_ps(dh, u), s), slope);
        qlora__avx512_put(r->dgate + i, n, dg);
        qlora__avx512_put(r->dup + i, n, _mm512_mul_ps(_mm512_mul_ps(dh, g), s));
        if (r->h != NULL) {
            qlora__avx512_put(r->h + i, n, _mm512_mul_ps(_mm512_mul_ps(g, s), u));
        }
    }
}

QLORA__TARGET_AVX512 static void qlora__geglu_grad_avx512(const qlora__gated_row* r) {
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 twice = _mm512_set1_ps(1.59576912f);
    for (int64_t i = 0; i < r->n; i += 16) {
        int64_t n = r->n - i;
        __m512 dh = qlora__avx512_get(r->dh + i, n);
        __m512 g = qlora__avx512_get(r->gate + i, n);
        __m512 u = qlora__avx512_get(r->up + i, n);
        __m512 s = qlora__avx512_gelu_share(g);
        __m512 w = _mm512_fmadd_ps(_mm512_mul_ps(g, g), _mm512_set1_ps(0.214064449f), twice);
        __m512 bend = _mm512_mul_ps(_mm512_mul_ps(g, s), _mm512_sub_ps(one, s));
        __m512 dg = _mm512_mul_ps(_mm512_mul_ps(dh, u), _mm512_fmadd_ps(bend, w, s));
        qlora__avx512_put(r->dgate + i, n, dg);
        qlora__avx512_put(r->dup + i, n, _mm512_mul_ps(_mm512_mul_ps(dh, g), s));
        if (r->h != NULL) {
            qlora__avx512_put(r->h + i, n, _mm512_mul_ps(_mm512_mul_ps(g, s), u));
        }
    }
}

// ---- sums ---------------------------------------------------------------------------------------

QLORA__TARGET_AVX512 static double qlora__squares_avx512(const float* x, int64_t n, double sum) {
    __m512d s0 = _mm512_setzero_pd();
    __m512d s1 = s0;
    for (int64_t i = 0; i < n; i += 16) {
        __m512 v = qlora__avx512_get(x + i, n - i);
        __m512d low = qlora__avx512_low(v);
        __m512d high = qlora__avx512_high(v);
        s0 = _mm512_fmadd_pd(low, low, s0);
        s1 = _mm512_fmadd_pd(high, high, s1);
    }
    return sum + qlora__avx512_sum(_mm512_add_pd(s0, s1));
}

QLORA__TARGET_AVX512 static double qlora__dot_avx512(const float* x, const float* y, int64_t n,
                                                     double sum) {
    __m512d s0 = _mm512_setzero_pd();
    __m512d s1 = s0;
    for (int64_t i = 0; i < n; i += 16) {
        __m512 a = qlora__avx512_get(x + i, n - i);
        __m512 b = qlora__avx512_get(y + i, n - i);
        s0 = _mm512_fmadd_pd(qlora__avx512_low(a), qlora__avx512_low(b), s0);
        s1 = _mm512_fmadd_pd(qlora__avx512_high(a), qlora__avx512_high(b), s1);
    }
    return sum + qlora__avx512_sum(_mm512_add_pd(s0, s1));
}

// The product of two factors is rounded to f32 first; the sum is f64.
QLORA__TARGET_AVX512 static double qlora__dot3_avx512(const float* x, const float* y,
                                                      const float* z, int64_t n, double sum) {
    __m512d s0 = _mm512_setzero_pd();
    __m512d s1 = s0;
    for (int64_t i = 0; i < n; i += 16) {
        __m512 a = _mm512_mul_ps(qlora__avx512_get(x + i, n - i), qlora__avx512_get(y + i, n - i));
        __m512 b = qlora__avx512_get(z + i, n - i);
        s0 = _mm512_fmadd_pd(qlora__avx512_low(a), qlora__avx512_low(b), s0);
        s1 = _mm512_fmadd_pd(qlora__avx512_high(a), qlora__avx512_high(b), s1);
    }
    return sum + qlora__avx512_sum(_mm512_add_pd(s0, s1));
}

// max returns its second operand if one is a NaN, so that a NaN in x is ignored; the elements that
// a row does not have are `top`.
QLORA__TARGET_AVX512 static float qlora__top_avx512(const float* x, int64_t n, float top) {
    const __m512 start = _mm512_set1_ps(top);
    __m512 t = start;
    for (int64_t i = 0; i < n; i += 16) {
        __m512 v = _mm512_mask_loadu_ps(start, qlora__avx512_first(n - i), x + i);
        t = _mm512_max_ps(v, t);
    }
    float room[16];
    _mm512_storeu_ps(room, t);
    return qlora__top_portable(room, 16, top);
}

QLORA__TARGET_AVX512 static double qlora__exps_avx512(const float* x, float top, int64_t n,
                                                      float* y, double sum) {
    const __m512 most = _mm512_set1_ps(top);
    __m512d s0 = _mm512_setzero_pd();
    __m512d s1 = s0;
    for (int64_t i = 0; i < n; i += 16) {
        __mmask16 some = qlora__avx512_first(n - i);
        __m512 e = qlora__avx512_exp(_mm512_sub_ps(_mm512_maskz_loadu_ps(some, x + i), most));
        e = _mm512_maskz_mov_ps(some, e);
        if (y != NULL) {
            _mm512_mask_storeu_ps(y + i, some, e);
        }
        s0 = _mm512_add_pd(s0, qlora__avx512_low(e));
        s1 = _mm512_add_pd(s1, qlora__avx512_high(e));
    }
    return sum + qlora__avx512_sum(_mm512_add_pd(s0, s1));
}

// ---- norm, rope, softmax, AdamW -----------------------------------------------------------------

QLORA__TARGET_AVX512 static void qlora__norm_avx512(const float* x, float rstd, const float* w,
                                                    int64_t n, float* y) {
    const __m512 factor = _mm512_set1_ps(rstd);
    for (int64_t i = 0; i < n; i += 16) {
        __m512 v = _mm512_mul_ps(qlora__avx512_get(x + i, n - i), factor);
        qlora__avx512_put(y + i, n - i, _mm512_mul_ps(v, qlora__avx512_get(w + i, n - i)));
    }
}

QLORA__TARGET_AVX512 static void qlora__norm_grad_avx512(const qlora__norm_row* r) {
    const __m512 rstd = _mm512_set1_ps(r->rstd);
    const __m512 pull = _mm512_set1_ps(r->pull);
    for (int64_t i = 0; i < r->n; i += 16) {
        int64_t n = r->n - i;
        __m512 wdy = _mm512_mul_ps(qlora__avx512_get(r->dy + i, n), qlora__avx512_get(r->w + i, n));
        __m512 v = _mm512_fnmadd_ps(qlora__avx512_get(r->x + i, n), pull, wdy);
        __m512 dx = r->dres != NULL ? _mm512_fmadd_ps(rstd, v, qlora__avx512_get(r->dres + i, n))
                                    : _mm512_mul_ps(rstd, v);
        qlora__avx512_put(r->dx + i, n, dx);
    }
}

QLORA__TARGET_AVX512 static void qlora__rope_avx512(float* a, float* b, const float* cosine,
                                                    const float* sine, float sign, int64_t n) {
    const __m512 side = _mm512_set1_ps(sign);
    for (int64_t i = 0; i < n; i += 16) {
        __m512 u = qlora__avx512_get(a + i, n - i);
        __m512 v = qlora__avx512_get(b + i, n - i);
        __m512 c = qlora__avx512_get(cosine + i, n - i);
        __m512 s = _mm512_mul_ps(qlora__avx512_get(sine + i, n - i), side);
        qlora__avx512_put(a + i, n - i, _mm512_fnmadd_ps(v, s, _mm512_mul_ps(u, c)));
        qlora__avx512_put(b + i, n - i, _mm512_fmadd_ps(u, s, _mm512_mul_ps(v, c)));
    }
}

QLORA__TARGET_AVX512 static void qlora__shares_avx512(const float* e, float sum, float scale,
                                                      float weight, int64_t n, float* y) {
    qlora__scale_avx512(e, NULL, scale * weight / sum, n, y);
}

QLORA__TARGET_AVX512 static void qlora__softmax_grad_avx512(const float* p, const float* dy,
                                                            float dot, int64_t n, float* dx) {
    const __m512 less = _mm512_set1_ps(dot);
    for (int64_t i = 0; i < n; i += 16) {
        __m512 v = _mm512_sub_ps(qlora__avx512_get(dy + i, n - i), less);
        qlora__avx512_put(dx + i, n - i, _mm512_mul_ps(qlora__avx512_get(p + i, n - i), v));
    }
}

QLORA__TARGET_AVX512 static void qlora__cap_grad_avx512(const float* y, float cap, int64_t n,
                                                        float* g) {
    const __m512 one = _mm512_set1_ps(1.0f);
    for (int64_t i = 0; i < n; i += 16) {
        __m512 t = _mm512_div_ps(qlora__avx512_get(y + i, n - i), _mm512_set1_ps(cap));
        __m512 slope = _mm512_fnmadd_ps(t, t, one);
        qlora__avx512_put(g + i, n - i, _mm512_mul_ps(qlora__avx512_get(g + i, n - i), slope));
    }
}

QLORA__TARGET_AVX512 static void qlora__adamw_avx512(const qlora__adamw_row* r) {
    const __m512 clip = _mm512_set1_ps(r->clip);
    for (int64_t i = 0; i < r->n; i += 16) {
        int64_t n = r->n - i;
        __m512 grad = qlora__avx512_get(r->grad + i, n);
        __m512 p = qlora__avx512_get(r->param + i, n);
        __m512 m = qlora__avx512_get(r->m + i, n);
        __m512 v = qlora__avx512_get(r->v + i, n);
        __m512 g = _mm512_mul_ps(grad, clip);
        __m512 step = _mm512_fmsub_ps(grad, clip, m); // g - m
        p = _mm512_fnmadd_ps(p, _mm512_set1_ps(r->decay), p);
        m = _mm512_fmadd_ps(step, _mm512_set1_ps(r->one_minus_beta1), m);
        __m512 share = _mm512_mul_ps(g, _mm512_set1_ps(r->one_minus_beta2));
        v = _mm512_fmadd_ps(share, g, _mm512_mul_ps(v, _mm512_set1_ps(r->beta2)));
        __m512 root = _mm512_div_ps(_mm512_sqrt_ps(v), _mm512_set1_ps(r->root_correction));
        __m512 move = _mm512_div_ps(m, _mm512_add_ps(root, _mm512_set1_ps(r->eps)));
        p = _mm512_fnmadd_ps(move, _mm512_set1_ps(r->step_size), p);
        qlora__avx512_put(r->param + i, n, p);
        qlora__avx512_put(r->m + i, n, m);
        qlora__avx512_put(r->v + i, n, v);
        qlora__avx512_put(r->grad + i, n, _mm512_setzero_ps());
    }
}

// ---- conversions and dropout --------------------------------------------------------------------

QLORA__TARGET_AVX512 static void qlora__load_avx512(const void* from, qlora_dtype dtype, int64_t n,
                                                    float* to) {
    const uint16_t* x = (const uint16_t*)from;
    int64_t i = 0;
    for (; dtype == QLORA_BF16 && i + 16 <= n; i += 16) {
        __m256i half = _mm256_loadu_si256((const __m256i*)(const void*)(x + i));
        __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
        _mm512_storeu_ps(to + i, _mm512_castsi512_ps(wide));
    }
    if (i > 0) {
        qlora__load_avx2(x + i, dtype, n - i, to + i);
    } else {
        qlora__load_avx2(from, dtype, n, to);
    }
}

// Rounds to nearest even; a NaN becomes 0x7fff, as in the portable tier.
QLORA__TARGET_AVX512 static void qlora__store_avx512(const float* from, int64_t n, void* to,
                                                     qlora_dtype dtype) {
    uint16_t* y = (uint16_t*)to;
    int64_t i = 0;
    for (; dtype == QLORA_BF16 && i + 16 <= n; i += 16) {
        __m512 v = _mm512_loadu_ps(from + i);
        __m512i u = _mm512_castps_si512(v);
        __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
        __m512i sum = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
        __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        __m512i r =
            _mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), is_nan, _mm512_set1_epi32(0x7fff));
        _mm256_storeu_si256((__m256i*)(void*)(y + i), _mm512_cvtepi32_epi16(r));
    }
    if (i > 0) {
        qlora__store_avx2(from + i, n - i, y + i, dtype);
    } else {
        qlora__store_avx2(from, n, to, dtype);
    }
}

// One permutation selects from all 16 levels; it ignores the upper bits of an index.
QLORA__TARGET_AVX512 static void qlora__nf4_row_avx512(const uint8_t* codes, const float* levels,
                                                       float scale, int64_t n, float* y) {
    const __m512 table = _mm512_mul_ps(_mm512_loadu_ps(levels), _mm512_set1_ps(scale));
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m128i pair = _mm_loadl_epi64((const __m128i*)(const void*)(codes + i / 2));
        __m128i code = _mm_unpacklo_epi8(_mm_srli_epi16(pair, 4), pair);
        _mm512_storeu_ps(y + i, _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(code), table));
    }
    qlora__nf4_portable(codes + i / 2, levels, scale, n - i, y + i);
}

// Upper words of the products of 16 words with one.
QLORA__TARGET_AVX512 static inline __m512i qlora__avx512_high_words(__m512i x, __m512i by) {
    __m512i even = _mm512_srli_epi64(_mm512_mul_epu32(x, by), 32);
    __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), by);
    return _mm512_mask_blend_epi32((__mmask16)0xaaaa, even, odd);
}

// `scale` where the word is at least `least`, both unsigned.
QLORA__TARGET_AVX512 static inline __m512 qlora__avx512_kept(__m512i words, __m512i least,
                                                             __m512 scale) {
    return _mm512_maskz_mov_ps(_mm512_cmp_epu32_mask(words, least, _MM_CMPINT_NLT), scale);
}

// Writes element i of a, b, c and d as y[4 i], y[4 i + 1] and so on.
QLORA__TARGET_AVX512 static inline void qlora__avx512_put4(float* y, __m512 a, __m512 b, __m512 c,
                                                           __m512 d) {
    __m512 ab = _mm512_unpacklo_ps(a, b);
    __m512 cd = _mm512_unpacklo_ps(c, d);
    __m512 ab2 = _mm512_unpackhi_ps(a, b);
    __m512 cd2 = _mm512_unpackhi_ps(c, d);
    __m512 r0 = _mm512_shuffle_ps(ab, cd, 0x44);   // elements 0, 4, 8, 12
    __m512 r1 = _mm512_shuffle_ps(ab, cd, 0xee);   // elements 1, 5, 9, 13
    __m512 r2 = _mm512_shuffle_ps(ab2, cd2, 0x44); // elements 2, 6, 10, 14
    __m512 r3 = _mm512_shuffle_ps(ab2, cd2, 0xee); // elements 3, 7, 11, 15
    __m512 low01 = _mm512_shuffle_f32x4(r0, r1, 0x44);
    __m512 low23 = _mm512_shuffle_f32x4(r2, r3, 0x44);
    __m512 high01 = _mm512_shuffle_f32x4(r0, r1, 0xee);
    __m512 high23 = _mm512_shuffle_f32x4(r2, r3, 0xee);
    _mm512_storeu_ps(y, _mm512_shuffle_f32x4(low01, low23, 0x88));
    _mm512_storeu_ps(y + 16, _mm512_shuffle_f32x4(low01, low23, 0xdd));
    _mm512_storeu_ps(y + 32, _mm512_shuffle_f32x4(high01, high23, 0x88));
    _mm512_storeu_ps(y + 48, _mm512_shuffle_f32x4(high01, high23, 0xdd));
}

// 16 counters at a time; see qlora__philox.
QLORA__TARGET_AVX512 static void qlora__keep_avx512(const qlora__keep_row* r) {
    const __m512i m0 = _mm512_set1_epi32((int)0xD2511F53u);
    const __m512i m1 = _mm512_set1_epi32((int)0xCD9E8D57u);
    const __m512i least = _mm512_set1_epi32((int)r->threshold);
    const __m512 scale = _mm512_set1_ps(r->scale);
    const __m512i ahead = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    qlora__keep_row rest = *r;
    for (; rest.n >= 64; rest.n -= 64) {
        __m512i c0 = _mm512_add_epi32(_mm512_set1_epi32((int)rest.counter[0]), ahead);
        __m512i c1 = _mm512_set1_epi32((int)r->counter[1]);
        __m512i c2 = _mm512_set1_epi32((int)r->counter[2]);
        __m512i c3 = _mm512_set1_epi32((int)r->counter[3]);
        for (uint32_t round = 0; round < 10; round++) {
            __m512i k0 = _mm512_set1_epi32((int)(r->key[0] + round * 0x9E3779B9u));
            __m512i k1 = _mm512_set1_epi32((int)(r->key[1] + round * 0xBB67AE85u));
            __m512i h0 = qlora__avx512_high_words(c0, m0);
            __m512i h1 = qlora__avx512_high_words(c2, m1);
            __m512i l0 = _mm512_mullo_epi32(c0, m0);
            __m512i l1 = _mm512_mullo_epi32(c2, m1);
            c0 = _mm512_xor_si512(_mm512_xor_si512(h1, c1), k0);
            c1 = l1;
            c2 = _mm512_xor_si512(_mm512_xor_si512(h0, c3), k1);
            c3 = l0;
        }
        qlora__avx512_put4(
            rest.factor, qlora__avx512_kept(c0, least, scale), qlora__avx512_kept(c1, least, scale),
            qlora__avx512_kept(c2, least, scale), qlora__avx512_kept(c3, least, scale));
        rest.factor += 64;
        rest.counter[0] += 16;
    }
    qlora__keep_portable(&rest);
}

// ---- attention ----------------------------------------------------------------------------------

QLORA__TARGET_AVX512 static void qlora__scores_avx512(const qlora__score_row* r) {
    const __m512 one = _mm512_set1_ps(1.0f);
    for (int64_t i = 0; i < r->n; i += 16) {
        int64_t n = r->n - i;
        __m512 s = qlora__avx512_get(r->s + i, n);
        __m512 p = qlora__avx512_exp(_mm512_sub_ps(s, _mm512_set1_ps(r->lse)));
        __m512 d = _mm512_sub_ps(qlora__avx512_get(r->dp + i, n), _mm512_set1_ps(r->dot));
        __m512 ds = _mm512_mul_ps(p, d);
        if (r->cap > 0.0f) {
            __m512 t = _mm512_div_ps(s, _mm512_set1_ps(r->cap));
            ds = _mm512_mul_ps(ds, _mm512_fnmadd_ps(t, t, one));
        }
        qlora__avx512_put(r->p + i, n, p);
        qlora__avx512_put(r->ds + i, n, ds);
    }
}

// See qlora__soften_avx2.
typedef struct qlora__avx512_lanes {
    float* s;
    __m512i from;
    __m512i to;
    __m512 top;
    __m512 sum;
} qlora__avx512_lanes;

QLORA__TARGET_AVX512 static inline __mmask16 qlora__avx512_seen(const qlora__avx512_lanes* l,
                                                                int64_t k) {
    __m512i at = _mm512_set1_epi32((int)k);
    return _mm512_mask_cmp_epi32_mask(_mm512_cmp_epi32_mask(at, l->from, _MM_CMPINT_NLT), at, l->to,
                                      _MM_CMPINT_LT);
}

QLORA__TARGET_AVX512 static QLORA__INLINE void qlora__avx512_tops(qlora__avx512_lanes* l, int64_t k,
                                                                  int64_t to, bool all) {
    for (; k < to; k++) {
        __mmask16 seen = all ? (__mmask16)0xffff : qlora__avx512_seen(l, k);
        __m512 s = _mm512_loadu_ps(l->s + k * QLORA__BLOCK);
        l->top = _mm512_mask_max_ps(l->top, seen, s, l->top);
    }
}

QLORA__TARGET_AVX512 static QLORA__INLINE void qlora__avx512_exps(qlora__avx512_lanes* l, int64_t k,
                                                                  int64_t to, bool all) {
    for (; k < to; k++) {
        float* s = l->s + k * QLORA__BLOCK;
        __m512 e = qlora__avx512_exp(_mm512_sub_ps(_mm512_loadu_ps(s), l->top));
        e = all ? e : _mm512_maskz_mov_ps(qlora__avx512_seen(l, k), e);
        _mm512_storeu_ps(s, e);
        l->sum = _mm512_add_ps(l->sum, e);
    }
}

QLORA__TARGET_AVX512 static void qlora__soften_avx512(const qlora__soften_block* b) {
    for (int64_t i = 0; i < b->queries; i += 16) {
        qlora__soften_range r = qlora__soften_begin(b, i, 16);
        const __m512 before = _mm512_loadu_ps(b->top + i);
        qlora__avx512_lanes l;
        l.s = b->s + i;
        l.from = _mm512_loadu_si512((const void*)(b->from + i));
        l.to = _mm512_loadu_si512((const void*)(b->to + i));
        l.top = before;
        l.sum = _mm512_setzero_ps();
        qlora__avx512_tops(&l, r.first, r.all_first, false);
        qlora__avx512_tops(&l, r.all_first, r.all_last, true);
        qlora__avx512_tops(&l, r.all_last, r.last, false);
        qlora__avx512_exps(&l, r.first, r.all_first, false);
        qlora__avx512_exps(&l, r.all_first, r.all_last, true);
        qlora__avx512_exps(&l, r.all_last, r.last, false);
        _mm512_storeu_ps(b->top + i, l.top);
        _mm512_storeu_ps(b->shrink + i, qlora__avx512_exp(_mm512_sub_ps(before, l.top)));
        _mm512_storeu_ps(b->sum + i, l.sum);
    }
    _mm256_zeroupper();
}

// Two vectors of sums of row i.
#define QLORA__ROW(i, element)                                                                     \
    x = _mm512_set1_ps(element);                                                                   \
    c##i##0 = _mm512_fmadd_ps(x, b0, c##i##0);                                                     \
    c##i##1 = _mm512_fmadd_ps(x, b1, c##i##1)
#define QLORA__ROW_LOAD(i)                                                                         \
    c##i##0 = _mm512_loadu_ps(c + (i)*p->ldc);                                                     \
    c##i##1 = _mm512_maskz_loadu_ps(both, c + (i)*p->ldc + 16)
#define QLORA__ROW_STORE(i)                                                                        \
    _mm512_storeu_ps(c + (i)*p->ldc, c##i##0);                                                     \
    _mm512_mask_storeu_ps(c + (i)*p->ldc + 16, both, c##i##1)

// Eight rows and 32 columns of a product, or 16 if `both` is 0: then the second vector is not
// touched in memory, and its sums are not used.
QLORA__TARGET_AVX512 static void qlora__tile_avx512(const qlora__block_product* p, const float* a,
                                                    const float* b, float* c, __mmask16 both) {
    const int64_t row = p->transposed ? 1 : p->lda;
    const int64_t step = p->transposed ? p->lda : 1;
    __m512 c00 = _mm512_setzero_ps(), c01 = c00, c10 = c00, c11 = c00, c20 = c00, c21 = c00;
    __m512 c30 = c00, c31 = c00, c40 = c00, c41 = c00, c50 = c00, c51 = c00;
    __m512 c60 = c00, c61 = c00, c70 = c00, c71 = c00;
    if (p->add) {
        QLORA__ROW_LOAD(0);
        QLORA__ROW_LOAD(1);
        QLORA__ROW_LOAD(2);
        QLORA__ROW_LOAD(3);
        QLORA__ROW_LOAD(4);
        QLORA__ROW_LOAD(5);
        QLORA__ROW_LOAD(6);
        QLORA__ROW_LOAD(7);
    }
    const float* a4 = a + 4 * row; // four rows from each pointer need few registers
    const int64_t steps = p->k;
    const int64_t ldb = p->ldb;
    const int64_t ahead = p->ahead;
    for (int64_t k = 0; k < steps; k++) {
        __m512 b0 = _mm512_loadu_ps(b);
        __m512 b1 = _mm512_maskz_loadu_ps(both, b + 16);
        __m512 x;
        QLORA__ROW(0, a[0]);
        QLORA__ROW(1, a[row]);
        QLORA__ROW(2, a[2 * row]);
        QLORA__ROW(3, a[3 * row]);
        QLORA__ROW(4, a4[0]);
        QLORA__ROW(5, a4[row]);
        QLORA__ROW(6, a4[2 * row]);
        QLORA__ROW(7, a4[3 * row]);
        QLORA__WILL_READ(b + ahead);
        QLORA__WILL_READ(b + ahead + 16);
        a += step;
        a4 += step;
        b += ldb;
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

QLORA__TARGET_AVX512 static void qlora__product_avx512(const qlora__block_product* p) {
    int64_t row = p->transposed ? 1 : p->lda;
    for (int64_t j = 0; j < p->n; j += 32) {
        __mmask16 both = (__mmask16)(j + 32 <= p->n ? 0xffffu : 0u);
        for (int64_t i = 0; i < p->m; i += 8) {
            qlora__tile_avx512(p, p->a + i * row, p->b + j, p->c + i * p->ldc + j, both);
        }
    }
    _mm256_zeroupper();
}

static const qlora__cpu_rows qlora__rows_avx512 = {
    qlora__load_avx512,
    qlora__store_avx512,
    {qlora__silu_avx512, qlora__silu_grad_avx512, qlora__swiglu_avx512, qlora__geglu_avx512,
     qlora__cap_avx512, qlora__mul_avx512, qlora__add_avx512, qlora__scale_avx512,
     qlora__fill_avx512},
    qlora__swiglu_grad_avx512,
    qlora__geglu_grad_avx512,
    qlora__squares_avx512,
    qlora__dot_avx512,
    qlora__dot3_avx512,
    qlora__norm_avx512,
    qlora__norm_grad_avx512,
    qlora__rope_avx512,
    qlora__top_avx512,
    qlora__exps_avx512,
    qlora__shares_avx512,
    qlora__softmax_grad_avx512,
    qlora__cap_grad_avx512,
    qlora__adamw_avx512,
    qlora__nf4_row_avx512,
    qlora__keep_avx512,
    qlora__product_avx512,
    qlora__transpose_avx2, // bound by its stores
    qlora__scores_avx512,
    qlora__soften_avx512,
};

#endif // QLORA__X86
