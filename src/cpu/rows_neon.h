// ---- rows with NEON -----------------------------------------------------------------------------
//
// A product that feeds a sum is always written as a fused multiply-add, so that the bits do not
// depend on whether the compiler contracts expressions. The last columns of a row are computed in a
// vector whose other lanes are zero, with the same arithmetic.

#ifdef QLORA__NEON

static inline float32x4_t qlora__neon_part(const float* x, int64_t n) {
    float room[4] = {0, 0, 0, 0};
    memcpy(room, x, (size_t)n * sizeof *x);
    return vld1q_f32(room);
}

static inline void qlora__neon_put_part(float* y, int64_t n, float32x4_t v) {
    float room[4];
    vst1q_f32(room, v);
    memcpy(y, room, (size_t)n * sizeof *y);
}

// Loads four elements, or the last n of a row.
static inline float32x4_t qlora__neon_get(const float* x, int64_t n) {
    return n >= 4 ? vld1q_f32(x) : qlora__neon_part(x, n);
}

static inline void qlora__neon_put(float* y, int64_t n, float32x4_t v) {
    if (n >= 4) {
        vst1q_f32(y, v);
    } else {
        qlora__neon_put_part(y, n, v);
    }
}

// e^x = 2^n p(x - n ln 2), with an error of at most 1.1 ulp from -87.33 to 88.37. Below that the
// result is 0, above that it stays at e^88.37; a NaN stays a NaN.
static inline float32x4_t qlora__neon_exp(float32x4_t x) {
    const float32x4_t low = vdupq_n_f32(-87.33f);
    const float32x4_t magic = vdupq_n_f32(12582912.0f); // 1.5 2^23: adding it rounds to an integer
    uint32x4_t gone = vcltq_f32(x, low);
    float32x4_t c = vminq_f32(vmaxq_f32(x, low), vdupq_n_f32(88.37f));
    float32x4_t t = vfmaq_f32(magic, c, vdupq_n_f32(1.44269504f));
    float32x4_t n = vsubq_f32(t, magic);
    float32x4_t r = vfmsq_f32(c, n, vdupq_n_f32(0.693147182f));
    r = vfmaq_f32(r, n, vdupq_n_f32(1.90465421e-9f));
    float32x4_t p = vdupq_n_f32(0.00138436444f);
    p = vfmaq_f32(vdupq_n_f32(0.00837416295f), p, r);
    p = vfmaq_f32(vdupq_n_f32(0.0416680016f), p, r);
    p = vfmaq_f32(vdupq_n_f32(0.166664317f), p, r);
    p = vfmaq_f32(vdupq_n_f32(0.49999994f), p, r);
    p = vfmaq_f32(vdupq_n_f32(1.0f), p, r);
    p = vfmaq_f32(vdupq_n_f32(1.0f), p, r);
    uint32x4_t power =
        vaddq_u32(vshlq_n_u32(vreinterpretq_u32_f32(t), 23), vdupq_n_u32(0x3f800000u));
    float32x4_t y = vmulq_f32(p, vreinterpretq_f32_u32(power));
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(y), gone));
}

// 1 / (1 + e^-x), from e^-|x|, which cannot overflow.
static inline float32x4_t qlora__neon_sigmoid(float32x4_t x) {
    const float32x4_t one = vdupq_n_f32(1.0f);
    float32x4_t e = qlora__neon_exp(vnegq_f32(vabsq_f32(x)));
    float32x4_t above = vbslq_f32(vcltzq_f32(x), e, one);
    return vdivq_f32(above, vaddq_f32(one, e));
}

// tanh |x| = x + x z q(z), z = x^2, below 0.625, otherwise (1 - e) / (1 + e), e = e^-2|x|.
static inline float32x4_t qlora__neon_tanh(float32x4_t x) {
    const float32x4_t one = vdupq_n_f32(1.0f);
    float32x4_t a = vabsq_f32(x);
    float32x4_t e = qlora__neon_exp(vmulq_f32(a, vdupq_n_f32(-2.0f)));
    float32x4_t large = vdivq_f32(vsubq_f32(one, e), vaddq_f32(one, e));
    float32x4_t z = vmulq_f32(a, a);
    float32x4_t q = vdupq_n_f32(-0.00599296112f);
    q = vfmaq_f32(vdupq_n_f32(0.0209241491f), q, z);
    q = vfmaq_f32(vdupq_n_f32(-0.0538351424f), q, z);
    q = vfmaq_f32(vdupq_n_f32(0.133326635f), q, z);
    q = vfmaq_f32(vdupq_n_f32(-0.333333284f), q, z);
    float32x4_t below = vfmaq_f32(a, vmulq_f32(a, z), q);
    float32x4_t y = vbslq_f32(vcltq_f32(a, vdupq_n_f32(0.625f)), below, large);
    return vbslq_f32(vdupq_n_u32(0x80000000u), x, y);
}

static inline float32x4_t qlora__neon_gelu_share(float32x4_t a) {
    float32x4_t w =
        vfmaq_f32(vdupq_n_f32(1.59576912f), vmulq_f32(a, a), vdupq_n_f32(0.0713548163f));
    return qlora__neon_sigmoid(vmulq_f32(a, w));
}

static void qlora__load_neon(const void* from, qlora_dtype dtype, int64_t n, float* to) {
    if (dtype != QLORA_BF16) {
        qlora__load_portable(from, dtype, n, to);
        return;
    }
    const uint16_t* x = (const uint16_t*)from;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        uint16x8_t v = vld1q_u16(x + i);
        vst1q_f32(to + i, vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(v), 16)));
        vst1q_f32(to + i + 4, vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(v), 16)));
    }
    qlora__load_portable(x + i, dtype, n - i, to + i);
}

// Rounds to nearest even; a NaN becomes 0x7fff, as in the portable tier.
static inline uint16x4_t qlora__neon_bf16(float32x4_t v) {
    uint32x4_t u = vreinterpretq_u32_f32(v);
    uint32x4_t odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    uint16x4_t rounded = vshrn_n_u32(vaddq_u32(vaddq_u32(u, vdupq_n_u32(0x7fff)), odd), 16);
    return vbsl_u16(vmovn_u32(vceqq_f32(v, v)), rounded, vdup_n_u16(0x7fff));
}

static void qlora__store_neon(const float* from, int64_t n, void* to, qlora_dtype dtype) {
    if (dtype != QLORA_BF16) {
        qlora__store_portable(from, n, to, dtype);
        return;
    }
    uint16_t* y = (uint16_t*)to;
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        vst1_u16(y + i, qlora__neon_bf16(vld1q_f32(from + i)));
    }
    qlora__store_portable(from + i, n - i, y + i, dtype);
}

static void qlora__silu_neon(const float* a, const float* b, float alpha, int64_t n, float* y) {
    (void)b;
    (void)alpha;
    for (int64_t i = 0; i < n; i += 4) {
        float32x4_t x = qlora__neon_get(a + i, n - i);
        qlora__neon_put(y + i, n - i, vmulq_f32(x, qlora__neon_sigmoid(x)));
    }
}

static void qlora__silu_grad_neon(const float* a, const float* b, float alpha, int64_t n,
                                  float* y) {
    const float32x4_t one = vdupq_n_f32(1.0f);
    (void)alpha;
    for (int64_t i = 0; i < n; i += 4) {
        float32x4_t x = qlora__neon_get(a + i, n - i);
        float32x4_t s = qlora__neon_sigmoid(x);
        float32x4_t slope = vfmaq_f32(one, x, vsubq_f32(one, s));
        float32x4_t bs = vmulq_f32(qlora__neon_get(b + i, n - i), s);
        qlora__neon_put(y + i, n - i, vmulq_f32(bs, slope));
    }
}

static void qlora__swiglu_neon(const float* a, const float* b, float alpha, int64_t n, float* y) {
    (void)alpha;
    for (int64_t i = 0; i < n; i += 4) {
        float32x4_t x = qlora__neon_get(a + i, n - i);
        float32x4_t silu = vmulq_f32(x, qlora__neon_sigmoid(x));
        qlora__neon_put(y + i, n - i, vmulq_f32(silu, qlora__neon_get(b + i, n - i)));
    }
}

static void qlora__geglu_neon(const float* a, const float* b, float alpha, int64_t n, float* y) {
    (void)alpha;
    for (int64_t i = 0; i < n; i += 4) {
        float32x4_t x = qlora__neon_get(a + i, n - i);
        float32x4_t gelu = vmulq_f32(x, qlora__neon_gelu_share(x));
        qlora__neon_put(y + i, n - i, vmulq_f32(gelu, qlora__neon_get(b + i, n - i)));
    }
}

static void qlora__cap_neon(const float* a, const float* b, float alpha, int64_t n, float* y) {
    const float32x4_t cap = vdupq_n_f32(alpha);
    (void)b;
    for (int64_t i = 0; i < n; i += 4) {
        float32x4_t x = vdivq_f32(qlora__neon_get(a + i, n - i), cap);
        qlora__neon_put(y + i, n - i, vmulq_f32(cap, qlora__neon_tanh(x)));
    }
}

static void qlora__mul_neon(const float* a, const float* b, float alpha, int64_t n, float* y) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        vst1q_f32(y + i, vmulq_f32(vld1q_f32(a + i), vld1q_f32(b + i)));
    }
    qlora__mul_portable(a + i, b + i, alpha, n - i, y + i);
}

static void qlora__add_neon(const float* a, const float* b, float alpha, int64_t n, float* y) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        vst1q_f32(y + i, vaddq_f32(vld1q_f32(a + i), vld1q_f32(b + i)));
    }
    qlora__add_portable(a + i, b + i, alpha, n - i, y + i);
}

static void qlora__scale_neon(const float* a, const float* b, float alpha, int64_t n, float* y) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        vst1q_f32(y + i, vmulq_n_f32(vld1q_f32(a + i), alpha));
    }
    qlora__scale_portable(a + i, b, alpha, n - i, y + i);
}

static void qlora__fill_neon(const float* a, const float* b, float alpha, int64_t n, float* y) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        vst1q_f32(y + i, vdupq_n_f32(alpha));
    }
    qlora__fill_portable(a, b, alpha, n - i, y + i);
}

static void qlora__swiglu_grad_neon(const qlora__gated_row* r) {
    const float32x4_t one = vdupq_n_f32(1.0f);
    for (int64_t i = 0; i < r->n; i += 4) {
        int64_t n = r->n - i;
        float32x4_t dh = qlora__neon_get(r->dh + i, n);
        float32x4_t g = qlora__neon_get(r->gate + i, n);
        float32x4_t u = qlora__neon_get(r->up + i, n);
        float32x4_t s = qlora__neon_sigmoid(g);
        float32x4_t slope = vfmaq_f32(one, g, vsubq_f32(one, s));
        qlora__neon_put(r->dgate + i, n, vmulq_f32(vmulq_f32(vmulq_f32(dh, u), s), slope));
        qlora__neon_put(r->dup + i, n, vmulq_f32(vmulq_f32(dh, g), s));
        if (r->h != NULL) {
            qlora__neon_put(r->h + i, n, vmulq_f32(vmulq_f32(g, s), u));
        }
    }
}

static void qlora__geglu_grad_neon(const qlora__gated_row* r) {
    const float32x4_t one = vdupq_n_f32(1.0f);
    const float32x4_t twice = vdupq_n_f32(1.59576912f);
    for (int64_t i = 0; i < r->n; i += 4) {
        int64_t n = r->n - i;
        float32x4_t dh = qlora__neon_get(r->dh + i, n);
        float32x4_t g = qlora__neon_get(r->gate + i, n);
        float32x4_t u = qlora__neon_get(r->up + i, n);
        float32x4_t s = qlora__neon_gelu_share(g);
        float32x4_t w = vfmaq_f32(twice, vmulq_f32(g, g), vdupq_n_f32(0.214064449f));
        float32x4_t bend = vmulq_f32(vmulq_f32(g, s), vsubq_f32(one, s));
        qlora__neon_put(r->dgate + i, n, vmulq_f32(vmulq_f32(dh, u), vfmaq_f32(s, bend, w)));
        qlora__neon_put(r->dup + i, n, vmulq_f32(vmulq_f32(dh, g), s));
        if (r->h != NULL) {
            qlora__neon_put(r->h + i, n, vmulq_f32(vmulq_f32(g, s), u));
        }
    }
}

static double qlora__squares_neon(const float* x, int64_t n, double sum) {
    float64x2_t s0 = vdupq_n_f64(0.0);
    float64x2_t s1 = s0;
    float64x2_t s2 = s0;
    float64x2_t s3 = s0;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        float32x4_t a = vld1q_f32(x + i);
        float32x4_t b = vld1q_f32(x + i + 4);
        float64x2_t a0 = vcvt_f64_f32(vget_low_f32(a));
        float64x2_t a1 = vcvt_high_f64_f32(a);
        float64x2_t b0 = vcvt_f64_f32(vget_low_f32(b));
        float64x2_t b1 = vcvt_high_f64_f32(b);
        s0 = vfmaq_f64(s0, a0, a0);
        s1 = vfmaq_f64(s1, a1, a1);
        s2 = vfmaq_f64(s2, b0, b0);
        s3 = vfmaq_f64(s3, b1, b1);
    }
    sum += vaddvq_f64(vaddq_f64(vaddq_f64(s0, s1), vaddq_f64(s2, s3)));
    return qlora__squares_portable(x + i, n - i, sum);
}

static double qlora__dot_neon(const float* x, const float* y, int64_t n, double sum) {
    float64x2_t s0 = vdupq_n_f64(0.0);
    float64x2_t s1 = s0;
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        float32x4_t a = vld1q_f32(x + i);
        float32x4_t b = vld1q_f32(y + i);
        s0 = vfmaq_f64(s0, vcvt_f64_f32(vget_low_f32(a)), vcvt_f64_f32(vget_low_f32(b)));
        s1 = vfmaq_f64(s1, vcvt_high_f64_f32(a), vcvt_high_f64_f32(b));
    }
    sum += vaddvq_f64(vaddq_f64(s0, s1));
    return qlora__dot_portable(x + i, y + i, n - i, sum);
}

// The product of two factors is rounded to f32 first; the sum is f64.
static double qlora__dot3_neon(const float* x, const float* y, const float* z, int64_t n,
                               double sum) {
    float64x2_t s0 = vdupq_n_f64(0.0);
    float64x2_t s1 = s0;
    for (int64_t i = 0; i < n; i += 4) {
        float32x4_t a = vmulq_f32(qlora__neon_get(x + i, n - i), qlora__neon_get(y + i, n - i));
        float32x4_t b = qlora__neon_get(z + i, n - i);
        s0 = vfmaq_f64(s0, vcvt_f64_f32(vget_low_f32(a)), vcvt_f64_f32(vget_low_f32(b)));
        s1 = vfmaq_f64(s1, vcvt_high_f64_f32(a), vcvt_high_f64_f32(b));
    }
    return sum + vaddvq_f64(vaddq_f64(s0, s1));
}

static void qlora__norm_neon(const float* x, float rstd, const float* w, int64_t n, float* y) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        float32x4_t v = vmulq_n_f32(vld1q_f32(x + i), rstd);
        vst1q_f32(y + i, vmulq_f32(v, vld1q_f32(w + i)));
    }
    qlora__norm_portable(x + i, rstd, w + i, n - i, y + i);
}

static void qlora__norm_grad_neon(const qlora__norm_row* r) {
    const float32x4_t rstd = vdupq_n_f32(r->rstd);
    const float32x4_t pull = vdupq_n_f32(r->pull);
    for (int64_t i = 0; i < r->n; i += 4) {
        int64_t n = r->n - i;
        float32x4_t wdy = vmulq_f32(qlora__neon_get(r->dy + i, n), qlora__neon_get(r->w + i, n));
        float32x4_t v = vfmsq_f32(wdy, qlora__neon_get(r->x + i, n), pull);
        float32x4_t dx = r->dres != NULL ? vfmaq_f32(qlora__neon_get(r->dres + i, n), rstd, v)
                                         : vmulq_f32(rstd, v);
        qlora__neon_put(r->dx + i, n, dx);
    }
}

static void qlora__rope_neon(float* a, float* b, const float* cosine, const float* sine, float sign,
                             int64_t n) {
    for (int64_t i = 0; i < n; i += 4) {
        float32x4_t u = qlora__neon_get(a + i, n - i);
        float32x4_t v = qlora__neon_get(b + i, n - i);
        float32x4_t c = qlora__neon_get(cosine + i, n - i);
        float32x4_t s = vmulq_n_f32(qlora__neon_get(sine + i, n - i), sign);
        qlora__neon_put(a + i, n - i, vfmsq_f32(vmulq_f32(u, c), v, s));
        qlora__neon_put(b + i, n - i, vfmaq_f32(vmulq_f32(v, c), u, s));
    }
}

static float qlora__top_neon(const float* x, int64_t n, float top) {
    float32x4_t t0 = vdupq_n_f32(top);
    float32x4_t t1 = t0;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        t0 = vmaxnmq_f32(t0, vld1q_f32(x + i));
        t1 = vmaxnmq_f32(t1, vld1q_f32(x + i + 4));
    }
    return qlora__top_portable(x + i, n - i, vmaxnmvq_f32(vmaxnmq_f32(t0, t1)));
}

static double qlora__exps_neon(const float* x, float top, int64_t n, float* y, double sum) {
    const float32x4_t most = vdupq_n_f32(top);
    float64x2_t s0 = vdupq_n_f64(0.0);
    float64x2_t s1 = s0;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        float32x4_t e0 = qlora__neon_exp(vsubq_f32(vld1q_f32(x + i), most));
        float32x4_t e1 = qlora__neon_exp(vsubq_f32(vld1q_f32(x + i + 4), most));
        if (y != NULL) {
            vst1q_f32(y + i, e0);
            vst1q_f32(y + i + 4, e1);
        }
        float32x4_t e = vaddq_f32(e0, e1);
        s0 = vaddq_f64(s0, vcvt_f64_f32(vget_low_f32(e)));
        s1 = vaddq_f64(s1, vcvt_high_f64_f32(e));
    }
    sum += vaddvq_f64(vaddq_f64(s0, s1));
    for (; i < n; i += 4) {
        float32x4_t e = qlora__neon_exp(vsubq_f32(qlora__neon_get(x + i, n - i), most));
        float room[4];
        vst1q_f32(room, e);
        for (int64_t j = 0; j < 4 && i + j < n; j++) {
            sum += (double)room[j];
        }
        if (y != NULL) {
            qlora__neon_put(y + i, n - i, e);
        }
    }
    return sum;
}

static void qlora__shares_neon(const float* e, float sum, float scale, float weight, int64_t n,
                               float* y) {
    qlora__scale_neon(e, NULL, scale * weight / sum, n, y);
}

static void qlora__softmax_grad_neon(const float* p, const float* dy, float dot, int64_t n,
                                     float* dx) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        float32x4_t v = vsubq_f32(vld1q_f32(dy + i), vdupq_n_f32(dot));
        vst1q_f32(dx + i, vmulq_f32(vld1q_f32(p + i), v));
    }
    qlora__softmax_grad_portable(p + i, dy + i, dot, n - i, dx + i);
}

static void qlora__cap_grad_neon(const float* y, float cap, int64_t n, float* g) {
    const float32x4_t one = vdupq_n_f32(1.0f);
    for (int64_t i = 0; i < n; i += 4) {
        float32x4_t t = vdivq_f32(qlora__neon_get(y + i, n - i), vdupq_n_f32(cap));
        float32x4_t v = vmulq_f32(qlora__neon_get(g + i, n - i), vfmsq_f32(one, t, t));
        qlora__neon_put(g + i, n - i, v);
    }
}

static void qlora__adamw_neon(const qlora__adamw_row* r) {
    const float32x4_t zero = vdupq_n_f32(0.0f);
    for (int64_t i = 0; i < r->n; i += 4) {
        int64_t n = r->n - i;
        float32x4_t grad = qlora__neon_get(r->grad + i, n);
        float32x4_t p = qlora__neon_get(r->param + i, n);
        float32x4_t m = qlora__neon_get(r->m + i, n);
        float32x4_t v = qlora__neon_get(r->v + i, n);
        float32x4_t g = vmulq_n_f32(grad, r->clip);
        float32x4_t step = vfmaq_f32(vnegq_f32(m), grad, vdupq_n_f32(r->clip)); // g - m
        p = vfmsq_f32(p, p, vdupq_n_f32(r->decay));
        m = vfmaq_f32(m, step, vdupq_n_f32(r->one_minus_beta1));
        v = vfmaq_f32(vmulq_n_f32(v, r->beta2), vmulq_n_f32(g, r->one_minus_beta2), g);
        float32x4_t root = vdivq_f32(vsqrtq_f32(v), vdupq_n_f32(r->root_correction));
        float32x4_t move = vdivq_f32(m, vaddq_f32(root, vdupq_n_f32(r->eps)));
        p = vfmsq_f32(p, move, vdupq_n_f32(r->step_size));
        qlora__neon_put(r->param + i, n, p);
        qlora__neon_put(r->m + i, n, m);
        qlora__neon_put(r->v + i, n, v);
        qlora__neon_put(r->grad + i, n, zero);
    }
}

// The levels as four planes of bytes: a look-up of 16 bytes per plane, put together by zips.
static void qlora__nf4_neon(const uint8_t* codes, const float* levels, float scale, int64_t n,
                            float* y) {
    uint8_t bytes[64];
    memcpy(bytes, levels, sizeof bytes);
    uint8x16x4_t planes = vld4q_u8(bytes); // little endian: plane 3 has the sign and exponent
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        uint8x8_t pair = vld1_u8(codes + i / 2);
        uint8x8x2_t zip = vzip_u8(vshr_n_u8(pair, 4), vand_u8(pair, vdup_n_u8(15)));
        uint8x16_t at = vcombine_u8(zip.val[0], zip.val[1]);
        uint8x16_t b0 = vqtbl1q_u8(planes.val[0], at);
        uint8x16_t b1 = vqtbl1q_u8(planes.val[1], at);
        uint8x16_t b2 = vqtbl1q_u8(planes.val[2], at);
        uint8x16_t b3 = vqtbl1q_u8(planes.val[3], at);
        uint16x8_t low0 = vreinterpretq_u16_u8(vzip1q_u8(b0, b1));
        uint16x8_t low1 = vreinterpretq_u16_u8(vzip2q_u8(b0, b1));
        uint16x8_t high0 = vreinterpretq_u16_u8(vzip1q_u8(b2, b3));
        uint16x8_t high1 = vreinterpretq_u16_u8(vzip2q_u8(b2, b3));
        vst1q_f32(y + i, vmulq_n_f32(vreinterpretq_f32_u16(vzip1q_u16(low0, high0)), scale));
        vst1q_f32(y + i + 4, vmulq_n_f32(vreinterpretq_f32_u16(vzip2q_u16(low0, high0)), scale));
        vst1q_f32(y + i + 8, vmulq_n_f32(vreinterpretq_f32_u16(vzip1q_u16(low1, high1)), scale));
        vst1q_f32(y + i + 12, vmulq_n_f32(vreinterpretq_f32_u16(vzip2q_u16(low1, high1)), scale));
    }
    qlora__nf4_portable(codes + i / 2, levels, scale, n - i, y + i);
}

// Upper words of the products of four words with one.
static inline uint32x4_t qlora__neon_high(uint32x4_t x, uint32_t by) {
    uint64x2_t low = vmull_n_u32(vget_low_u32(x), by);
    uint64x2_t high = vmull_n_u32(vget_high_u32(x), by);
    return vuzp2q_u32(vreinterpretq_u32_u64(low), vreinterpretq_u32_u64(high));
}

// Four counters at a time; see qlora__philox.
static void qlora__keep_neon(const qlora__keep_row* r) {
    static const uint32_t steps[4] = {0, 1, 2, 3};
    const uint32x4_t scale = vreinterpretq_u32_f32(vdupq_n_f32(r->scale));
    qlora__keep_row rest = *r;
    for (; rest.n >= 16; rest.n -= 16) {
        uint32x4_t c0 = vaddq_u32(vdupq_n_u32(rest.counter[0]), vld1q_u32(steps));
        uint32x4_t c1 = vdupq_n_u32(r->counter[1]);
        uint32x4_t c2 = vdupq_n_u32(r->counter[2]);
        uint32x4_t c3 = vdupq_n_u32(r->counter[3]);
        for (uint32_t round = 0; round < 10; round++) {
            uint32x4_t k0 = vdupq_n_u32(r->key[0] + round * 0x9E3779B9u);
            uint32x4_t k1 = vdupq_n_u32(r->key[1] + round * 0xBB67AE85u);
            uint32x4_t h0 = qlora__neon_high(c0, 0xD2511F53u);
            uint32x4_t h1 = qlora__neon_high(c2, 0xCD9E8D57u);
            uint32x4_t l0 = vmulq_n_u32(c0, 0xD2511F53u);
            uint32x4_t l1 = vmulq_n_u32(c2, 0xCD9E8D57u);
            c0 = veorq_u32(veorq_u32(h1, c1), k0);
            c1 = l1;
            c2 = veorq_u32(veorq_u32(h0, c3), k1);
            c3 = l0;
        }
        const uint32x4_t least = vdupq_n_u32(r->threshold);
        float32x4x4_t out;
        out.val[0] = vreinterpretq_f32_u32(vandq_u32(vcgeq_u32(c0, least), scale));
        out.val[1] = vreinterpretq_f32_u32(vandq_u32(vcgeq_u32(c1, least), scale));
        out.val[2] = vreinterpretq_f32_u32(vandq_u32(vcgeq_u32(c2, least), scale));
        out.val[3] = vreinterpretq_f32_u32(vandq_u32(vcgeq_u32(c3, least), scale));
        vst4q_f32(rest.factor, out);
        rest.factor += 16;
        rest.counter[0] += 4;
    }
    qlora__keep_portable(&rest);
}

static void qlora__scores_neon(const qlora__score_row* r) {
    const float32x4_t one = vdupq_n_f32(1.0f);
    for (int64_t i = 0; i < r->n; i += 4) {
        int64_t n = r->n - i;
        float32x4_t s = qlora__neon_get(r->s + i, n);
        float32x4_t p = qlora__neon_exp(vsubq_f32(s, vdupq_n_f32(r->lse)));
        float32x4_t d = vsubq_f32(qlora__neon_get(r->dp + i, n), vdupq_n_f32(r->dot));
        float32x4_t ds = vmulq_f32(p, d);
        if (r->cap > 0.0f) {
            float32x4_t t = vdivq_f32(s, vdupq_n_f32(r->cap));
            ds = vmulq_f32(ds, vfmsq_f32(one, t, t));
        }
        qlora__neon_put(r->p + i, n, p);
        qlora__neon_put(r->ds + i, n, ds);
    }
}

// Queries of a vector and the keys that they see: none is masked if all see all keys of a range.
typedef struct qlora__neon_lanes {
    float* s;
    int32x4_t from;
    int32x4_t to;
    float32x4_t top;
    float32x4_t sum;
} qlora__neon_lanes;

static inline uint32x4_t qlora__neon_seen(const qlora__neon_lanes* l, int64_t k) {
    int32x4_t at = vdupq_n_s32((int32_t)k);
    return vandq_u32(vcgeq_s32(at, l->from), vcltq_s32(at, l->to));
}

// A number wins over a NaN, so that a NaN in a score is ignored here, and stays in its e^(s - top).
static QLORA__INLINE void qlora__neon_tops(qlora__neon_lanes* l, int64_t k, int64_t to, bool all) {
    for (; k < to; k++) {
        float32x4_t most = vmaxnmq_f32(l->top, vld1q_f32(l->s + k * QLORA__BLOCK));
        l->top = all ? most : vbslq_f32(qlora__neon_seen(l, k), most, l->top);
    }
}

static QLORA__INLINE void qlora__neon_exps(qlora__neon_lanes* l, int64_t k, int64_t to, bool all) {
    for (; all && k + 2 <= to; k += 2) {
        float* s = l->s + k * QLORA__BLOCK;
        float32x4_t e0 = qlora__neon_exp(vsubq_f32(vld1q_f32(s), l->top));
        float32x4_t e1 = qlora__neon_exp(vsubq_f32(vld1q_f32(s + QLORA__BLOCK), l->top));
        vst1q_f32(s, e0);
        vst1q_f32(s + QLORA__BLOCK, e1);
        l->sum = vaddq_f32(vaddq_f32(l->sum, e0), e1);
    }
    for (; k < to; k++) {
        float* s = l->s + k * QLORA__BLOCK;
        float32x4_t e = qlora__neon_exp(vsubq_f32(vld1q_f32(s), l->top));
        if (!all) {
            uint32x4_t seen = qlora__neon_seen(l, k);
            e = vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(e), seen));
        }
        vst1q_f32(s, e);
        l->sum = vaddq_f32(l->sum, e);
    }
}

static void qlora__soften_neon(const qlora__soften_block* b) {
    for (int64_t i = 0; i < b->queries; i += 4) {
        qlora__soften_range r = qlora__soften_begin(b, i, 4);
        const float32x4_t before = vld1q_f32(b->top + i);
        qlora__neon_lanes l;
        l.s = b->s + i;
        l.from = vld1q_s32(b->from + i);
        l.to = vld1q_s32(b->to + i);
        l.top = before;
        l.sum = vdupq_n_f32(0.0f);
        qlora__neon_tops(&l, r.first, r.all_first, false);
        qlora__neon_tops(&l, r.all_first, r.all_last, true);
        qlora__neon_tops(&l, r.all_last, r.last, false);
        qlora__neon_exps(&l, r.first, r.all_first, false);
        qlora__neon_exps(&l, r.all_first, r.all_last, true);
        qlora__neon_exps(&l, r.all_last, r.last, false);
        vst1q_f32(b->top + i, l.top);
        vst1q_f32(b->shrink + i, qlora__neon_exp(vsubq_f32(before, l.top)));
        vst1q_f32(b->sum + i, l.sum);
    }
}

// sum += b times one lane of a. The instruction itself, because compilers move the intrinsic: with
// two steps in a loop, gcc then runs out of registers.
#define QLORA__FMA(sum, b, a, lane)                                                                \
    __asm__("fmla %0.4s, %1.4s, %2.s[" #lane "]" : "+w"(sum) : "w"(b), "w"(a))

// One row of a tile: three vectors of sums. The sums need names, because compilers keep an array of
// vectors in memory.
#define QLORA__ROW(i, a, lane)                                                                     \
    QLORA__FMA(c##i##0, b0, a, lane);                                                              \
    QLORA__FMA(c##i##1, b1, a, lane);                                                              \
    QLORA__FMA(c##i##2, b2, a, lane)
#define QLORA__STEP(k)                                                                             \
    do {                                                                                           \
        float32x4_t b0 = vld1q_f32(b + (k)*ldb);                                                   \
        float32x4_t b1 = vld1q_f32(b + (k)*ldb + 4);                                               \
        float32x4_t b2 = vld1q_f32(b + (k)*ldb + 8);                                               \
        float32x4_t a0 = vld1q_f32(a + (k)*lda);                                                   \
        float32x4_t a4 = vld1q_f32(a + (k)*lda + 4);                                               \
        QLORA__ROW(0, a0, 0);                                                                      \
        QLORA__ROW(1, a0, 1);                                                                      \
        QLORA__ROW(2, a0, 2);                                                                      \
        QLORA__ROW(3, a0, 3);                                                                      \
        QLORA__ROW(4, a4, 0);                                                                      \
        QLORA__ROW(5, a4, 1);                                                                      \
        QLORA__ROW(6, a4, 2);                                                                      \
        QLORA__ROW(7, a4, 3);                                                                      \
    } while (0)
#define QLORA__ROW_LOAD(i)                                                                         \
    c##i##0 = vld1q_f32(c + i * ldc);                                                              \
    c##i##1 = vld1q_f32(c + i * ldc + 4);                                                          \
    c##i##2 = vld1q_f32(c + i * ldc + 8)
#define QLORA__ROW_STORE(i)                                                                        \
    vst1q_f32(c + i * ldc, c##i##0);                                                               \
    vst1q_f32(c + i * ldc + 4, c##i##1);                                                           \
    vst1q_f32(c + i * ldc + 8, c##i##2)

// C[8][12] += a[k][8] b[k][12]: 24 sums, two vectors of a and three of b fill 29 of 32 registers.
// If p->ahead is not 0, the memory that many elements after b is soon read.
static QLORA__INLINE void qlora__neon_sums(const qlora__block_product* p, const float* a,
                                           const float* b, float* c) {
    int64_t steps = p->k;
    int64_t lda = p->lda;
    int64_t ldb = p->ldb;
    int64_t ldc = p->ldc;
    int64_t ahead = p->ahead;
    float32x4_t c00 = vdupq_n_f32(0.0f), c01 = c00, c02 = c00, c10 = c00, c11 = c00, c12 = c00;
    float32x4_t c20 = c00, c21 = c00, c22 = c00, c30 = c00, c31 = c00, c32 = c00;
    float32x4_t c40 = c00, c41 = c00, c42 = c00, c50 = c00, c51 = c00, c52 = c00;
    float32x4_t c60 = c00, c61 = c00, c62 = c00, c70 = c00, c71 = c00, c72 = c00;
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
    int64_t k = 0;
    for (; k + 2 <= steps; k += 2) {
        QLORA__STEP(0);
        QLORA__STEP(1);
        if (ahead != 0) {
            QLORA__WILL_READ(b + ahead);
            QLORA__WILL_READ(b + ldb + ahead);
        }
        b += 2 * ldb;
        a += 2 * lda;
    }
    if (k < steps) {
        QLORA__STEP(0);
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

#undef QLORA__STEP
#undef QLORA__FMA
#undef QLORA__ROW
#undef QLORA__ROW_LOAD
#undef QLORA__ROW_STORE

// Row i of four rows and 16 columns of a product. The sums are named variables, because compilers
// keep an array of them in memory.
#define QLORA__ROW(i, a, lane)                                                                     \
    c##i##0 = vfmaq_laneq_f32(c##i##0, b0, a, lane);                                               \
    c##i##1 = vfmaq_laneq_f32(c##i##1, b1, a, lane);                                               \
    c##i##2 = vfmaq_laneq_f32(c##i##2, b2, a, lane);                                               \
    c##i##3 = vfmaq_laneq_f32(c##i##3, b3, a, lane)
#define QLORA__ROW_LOAD(i)                                                                         \
    c##i##0 = vld1q_f32(c + i * p->ldc);                                                           \
    c##i##1 = vld1q_f32(c + i * p->ldc + 4);                                                       \
    c##i##2 = vld1q_f32(c + i * p->ldc + 8);                                                       \
    c##i##3 = vld1q_f32(c + i * p->ldc + 12)
#define QLORA__ROW_STORE(i)                                                                        \
    vst1q_f32(c + i * p->ldc, c##i##0);                                                            \
    vst1q_f32(c + i * p->ldc + 4, c##i##1);                                                        \
    vst1q_f32(c + i * p->ldc + 8, c##i##2);                                                        \
    vst1q_f32(c + i * p->ldc + 12, c##i##3)
// One step: the next row of b, and one lane of each of four vectors.
#define QLORA__STEP(a0, l0, a1, l1, a2, l2, a3, l3)                                                \
    b0 = vld1q_f32(b);                                                                             \
    b1 = vld1q_f32(b + 4);                                                                         \
    b2 = vld1q_f32(b + 8);                                                                         \
    b3 = vld1q_f32(b + 12);                                                                        \
    b += p->ldb;                                                                                   \
    QLORA__ROW(0, a0, l0);                                                                         \
    QLORA__ROW(1, a1, l1);                                                                         \
    QLORA__ROW(2, a2, l2);                                                                         \
    QLORA__ROW(3, a3, l3)

static void qlora__tile_neon(const qlora__block_product* p, const float* a, const float* b,
                             float* c) {
    float32x4_t c00 = vdupq_n_f32(0.0f), c01 = c00, c02 = c00, c03 = c00;
    float32x4_t c10 = c00, c11 = c00, c12 = c00, c13 = c00, c20 = c00, c21 = c00, c22 = c00;
    float32x4_t c23 = c00, c30 = c00, c31 = c00, c32 = c00, c33 = c00;
    float32x4_t b0, b1, b2, b3;
    if (p->add) {
        QLORA__ROW_LOAD(0);
        QLORA__ROW_LOAD(1);
        QLORA__ROW_LOAD(2);
        QLORA__ROW_LOAD(3);
    }
    int64_t k = 0;
    for (; p->transposed && k < p->k; k++) {
        float32x4_t x = vld1q_f32(a + k * p->lda);
        QLORA__STEP(x, 0, x, 1, x, 2, x, 3);
    }
    for (; k + 4 <= p->k; k += 4) {
        float32x4_t x0 = vld1q_f32(a + k);
        float32x4_t x1 = vld1q_f32(a + p->lda + k);
        float32x4_t x2 = vld1q_f32(a + 2 * p->lda + k);
        float32x4_t x3 = vld1q_f32(a + 3 * p->lda + k);
        QLORA__STEP(x0, 0, x1, 0, x2, 0, x3, 0);
        QLORA__STEP(x0, 1, x1, 1, x2, 1, x3, 1);
        QLORA__STEP(x0, 2, x1, 2, x2, 2, x3, 2);
        QLORA__STEP(x0, 3, x1, 3, x2, 3, x3, 3);
    }
    for (; k < p->k; k++) {
        float32x4_t x0 = vld1q_dup_f32(a + k);
        float32x4_t x1 = vld1q_dup_f32(a + p->lda + k);
        float32x4_t x2 = vld1q_dup_f32(a + 2 * p->lda + k);
        float32x4_t x3 = vld1q_dup_f32(a + 3 * p->lda + k);
        QLORA__STEP(x0, 0, x1, 0, x2, 0, x3, 0);
    }
    QLORA__ROW_STORE(0);
    QLORA__ROW_STORE(1);
    QLORA__ROW_STORE(2);
    QLORA__ROW_STORE(3);
}

#undef QLORA__ROW
#undef QLORA__ROW_LOAD
#undef QLORA__ROW_STORE
#undef QLORA__STEP

static QLORA__NOINLINE void qlora__transposed_neon(const qlora__block_product* p, const float* a,
                                               const float* b, float* c) {
    qlora__neon_sums(p, a, b, c);
}

static void qlora__product_neon(const qlora__block_product* p) {
    int64_t row = p->transposed ? 1 : p->lda;
    int64_t j = 0;
    for (; p->transposed && j + 48 <= p->n; j += 48) {
        for (int64_t i = 0; i < 4 * p->m; i += 8) { // four tiles next to each other
            int64_t col = j + i / p->m * 12;
            qlora__transposed_neon(p, p->a + i % p->m, p->b + col, p->c + i % p->m * p->ldc + col);
        }
    }
    for (; j < p->n; j += 16) {
        for (int64_t i = 0; i < p->m; i += 4) {
            qlora__tile_neon(p, p->a + i * row, p->b + j, p->c + i * p->ldc + j);
        }
    }
}

static void qlora__transpose_neon(const float* x, int64_t ld, int64_t rows, int64_t cols,
                                  float* y) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {
        const float* at = x + r * ld;
        int64_t c = 0;
        for (; c + 4 <= cols; c += 4) {
            float32x4x2_t even = vtrnq_f32(vld1q_f32(at + c), vld1q_f32(at + ld + c));
            float32x4x2_t odd = vtrnq_f32(vld1q_f32(at + 2 * ld + c), vld1q_f32(at + 3 * ld + c));
            float* to = y + c * QLORA__BLOCK + r;
            vst1q_f32(to, vcombine_f32(vget_low_f32(even.val[0]), vget_low_f32(odd.val[0])));
            vst1q_f32(to + QLORA__BLOCK,
                      vcombine_f32(vget_low_f32(even.val[1]), vget_low_f32(odd.val[1])));
            vst1q_f32(to + 2 * QLORA__BLOCK,
                      vcombine_f32(vget_high_f32(even.val[0]), vget_high_f32(odd.val[0])));
            vst1q_f32(to + 3 * QLORA__BLOCK,
                      vcombine_f32(vget_high_f32(even.val[1]), vget_high_f32(odd.val[1])));
        }
        qlora__transpose_portable(at + c, ld, 4, cols - c, y + c * QLORA__BLOCK + r);
    }
    qlora__transpose_portable(x + r * ld, ld, rows - r, cols, y + r);
}

static const qlora__cpu_rows qlora__rows_neon = {
    qlora__load_neon,
    qlora__store_neon,
    {qlora__silu_neon, qlora__silu_grad_neon, qlora__swiglu_neon, qlora__geglu_neon,
     qlora__cap_neon, qlora__mul_neon, qlora__add_neon, qlora__scale_neon, qlora__fill_neon},
    qlora__swiglu_grad_neon,
    qlora__geglu_grad_neon,
    qlora__squares_neon,
    qlora__dot_neon,
    qlora__dot3_neon,
    qlora__norm_neon,
    qlora__norm_grad_neon,
    qlora__rope_neon,
    qlora__top_neon,
    qlora__exps_neon,
    qlora__shares_neon,
    qlora__softmax_grad_neon,
    qlora__cap_grad_neon,
    qlora__adamw_neon,
    qlora__nf4_neon,
    qlora__keep_neon,
    qlora__product_neon,
    qlora__transpose_neon,
    qlora__scores_neon,
    qlora__soften_neon,
};

#endif // QLORA__NEON
