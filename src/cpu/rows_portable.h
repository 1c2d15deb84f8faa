// ---- rows in portable C -------------------------------------------------------------------------
//
// The specification of the other tiers: every element follows the formula of its operator in
// QLORA__REAL, with the functions of the C library; sums are f64, in ascending order.

static void qlora__load_portable(const void* from, qlora_dtype dtype, int64_t n, QLORA__REAL* to) {
    for (int64_t i = 0; i < n; i++) {
        to[i] = qlora__load(from, dtype, i);
    }
}

static void qlora__store_portable(const QLORA__REAL* from, int64_t n, void* to, qlora_dtype dtype) {
    for (int64_t i = 0; i < n; i++) {
        qlora__store(to, dtype, i, from[i]);
    }
}

static QLORA__REAL qlora__sigmoid(QLORA__REAL x) {
    return 1 / (1 + qlora__exp(-x));
}

// 1 / (1 + e^-2w) of the GELU, and the derivative of 2 w.
static QLORA__REAL qlora__gelu_share(QLORA__REAL a) {
    QLORA__REAL twice = (QLORA__REAL)1.5957691216057308;
    return qlora__sigmoid(twice * (a + (QLORA__REAL)0.044715 * a * a * a));
}

static QLORA__REAL qlora__gelu_slope(QLORA__REAL a) {
    QLORA__REAL twice = (QLORA__REAL)1.5957691216057308;
    return twice * (1 + (QLORA__REAL)0.134145 * a * a);
}

static void qlora__silu_portable(const QLORA__REAL* a, const QLORA__REAL* b, QLORA__REAL alpha,
                                 int64_t n, QLORA__REAL* y) {
    (void)b;
    (void)alpha;
    for (int64_t i = 0; i < n; i++) {
        y[i] = a[i] * qlora__sigmoid(a[i]);
    }
}

static void qlora__silu_grad_portable(const QLORA__REAL* a, const QLORA__REAL* b, QLORA__REAL alpha,
                                      int64_t n, QLORA__REAL* y) {
    (void)alpha;
    for (int64_t i = 0; i < n; i++) {
        QLORA__REAL s = qlora__sigmoid(a[i]);
        y[i] = b[i] * s * (1 + a[i] * (1 - s));
    }
}

static void qlora__swiglu_portable(const QLORA__REAL* a, const QLORA__REAL* b, QLORA__REAL alpha,
                                   int64_t n, QLORA__REAL* y) {
    (void)alpha;
    for (int64_t i = 0; i < n; i++) {
        y[i] = a[i] * qlora__sigmoid(a[i]) * b[i];
    }
}

static void qlora__geglu_portable(const QLORA__REAL* a, const QLORA__REAL* b, QLORA__REAL alpha,
                                  int64_t n, QLORA__REAL* y) {
    (void)alpha;
    for (int64_t i = 0; i < n; i++) {
        y[i] = a[i] * qlora__gelu_share(a[i]) * b[i];
    }
}

static void qlora__cap_portable(const QLORA__REAL* a, const QLORA__REAL* b, QLORA__REAL alpha,
                                int64_t n, QLORA__REAL* y) {
    (void)b;
    for (int64_t i = 0; i < n; i++) {
        y[i] = alpha * qlora__tanh(a[i] / alpha);
    }
}

static void qlora__mul_portable(const QLORA__REAL* a, const QLORA__REAL* b, QLORA__REAL alpha,
                                int64_t n, QLORA__REAL* y) {
    (void)alpha;
    for (int64_t i = 0; i < n; i++) {
        y[i] = a[i] * b[i];
    }
}

static void qlora__add_portable(const QLORA__REAL* a, const QLORA__REAL* b, QLORA__REAL alpha,
                                int64_t n, QLORA__REAL* y) {
    (void)alpha;
    for (int64_t i = 0; i < n; i++) {
        y[i] = a[i] + b[i];
    }
}

static void qlora__scale_portable(const QLORA__REAL* a, const QLORA__REAL* b, QLORA__REAL alpha,
                                  int64_t n, QLORA__REAL* y) {
    (void)b;
    for (int64_t i = 0; i < n; i++) {
        y[i] = alpha * a[i];
    }
}

static void qlora__fill_portable(const QLORA__REAL* a, const QLORA__REAL* b, QLORA__REAL alpha,
                                 int64_t n, QLORA__REAL* y) {
    (void)a;
    (void)b;
    for (int64_t i = 0; i < n; i++) {
        y[i] = alpha;
    }
}

static void qlora__swiglu_grad_portable(const qlora__gated_row* r) {
    for (int64_t i = 0; i < r->n; i++) {
        QLORA__REAL dh = r->dh[i];
        QLORA__REAL g = r->gate[i];
        QLORA__REAL u = r->up[i];
        QLORA__REAL s = qlora__sigmoid(g);
        r->dgate[i] = dh * u * s * (1 + g * (1 - s));
        r->dup[i] = dh * g * s;
        if (r->h != NULL) {
            r->h[i] = g * s * u;
        }
    }
}

static void qlora__geglu_grad_portable(const qlora__gated_row* r) {
    for (int64_t i = 0; i < r->n; i++) {
        QLORA__REAL dh = r->dh[i];
        QLORA__REAL g = r->gate[i];
        QLORA__REAL u = r->up[i];
        QLORA__REAL s = qlora__gelu_share(g);
        r->dgate[i] = dh * u * (s + g * s * (1 - s) * qlora__gelu_slope(g));
        r->dup[i] = dh * g * s;
        if (r->h != NULL) {
            r->h[i] = g * s * u;
        }
    }
}

static double qlora__squares_portable(const QLORA__REAL* x, int64_t n, double sum) {
    for (int64_t i = 0; i < n; i++) {
        double v = (double)x[i];
        sum += v * v;
    }
    return sum;
}

static double qlora__dot_portable(const QLORA__REAL* x, const QLORA__REAL* y, int64_t n,
                                  double sum) {
    for (int64_t i = 0; i < n; i++) {
        sum += (double)x[i] * (double)y[i];
    }
    return sum;
}

static double qlora__dot3_portable(const QLORA__REAL* x, const QLORA__REAL* y, const QLORA__REAL* z,
                                   int64_t n, double sum) {
    for (int64_t i = 0; i < n; i++) {
        sum += (double)x[i] * (double)y[i] * (double)z[i];
    }
    return sum;
}

static void qlora__norm_portable(const QLORA__REAL* x, QLORA__REAL rstd, const QLORA__REAL* w,
                                 int64_t n, QLORA__REAL* y) {
    for (int64_t i = 0; i < n; i++) {
        y[i] = x[i] * rstd * w[i];
    }
}

static void qlora__norm_grad_portable(const qlora__norm_row* r) {
    for (int64_t i = 0; i < r->n; i++) {
        QLORA__REAL wdy = r->dy[i] * r->w[i];
        QLORA__REAL v = r->rstd * (wdy - r->x[i] * r->pull);
        if (r->dres != NULL) {
            v += r->dres[i];
        }
        r->dx[i] = v;
    }
}

static void qlora__rope_portable(QLORA__REAL* a, QLORA__REAL* b, const QLORA__REAL* cosine,
                                 const QLORA__REAL* sine, QLORA__REAL sign, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        QLORA__REAL u = a[i];
        QLORA__REAL v = b[i];
        QLORA__REAL c = cosine[i];
        QLORA__REAL s = sine[i] * sign;
        a[i] = u * c - v * s;
        b[i] = v * c + u * s;
    }
}

static QLORA__REAL qlora__top_portable(const QLORA__REAL* x, int64_t n, QLORA__REAL top) {
    for (int64_t i = 0; i < n; i++) {
        top = x[i] > top ? x[i] : top;
    }
    return top;
}

static double qlora__exps_portable(const QLORA__REAL* x, QLORA__REAL top, int64_t n, QLORA__REAL* y,
                                   double sum) {
    for (int64_t i = 0; i < n; i++) {
        QLORA__REAL e = qlora__exp(x[i] - top);
        sum += (double)e;
        if (y != NULL) {
            y[i] = e;
        }
    }
    return sum;
}

static void qlora__shares_portable(const QLORA__REAL* e, QLORA__REAL sum, QLORA__REAL scale,
                                   QLORA__REAL weight, int64_t n, QLORA__REAL* y) {
    for (int64_t i = 0; i < n; i++) {
        y[i] = e[i] / sum * scale * weight;
    }
}

static void qlora__softmax_grad_portable(const QLORA__REAL* p, const QLORA__REAL* dy,
                                         QLORA__REAL dot, int64_t n, QLORA__REAL* dx) {
    for (int64_t i = 0; i < n; i++) {
        dx[i] = p[i] * (dy[i] - dot);
    }
}

static void qlora__cap_grad_portable(const QLORA__REAL* y, QLORA__REAL cap, int64_t n,
                                     QLORA__REAL* g) {
    for (int64_t i = 0; i < n; i++) {
        g[i] *= 1 - y[i] / cap * (y[i] / cap);
    }
}

static void qlora__adamw_portable(const qlora__adamw_row* r) {
    for (int64_t i = 0; i < r->n; i++) {
        QLORA__REAL g = r->grad[i] * r->clip;
        QLORA__REAL p = r->param[i];
        QLORA__REAL m = r->m[i];
        QLORA__REAL v = r->v[i];
        p -= r->decay * p;
        m += r->one_minus_beta1 * (g - m);
        v = r->beta2 * v + r->one_minus_beta2 * g * g;
        p -= r->step_size * (m / (qlora__sqrt(v) / r->root_correction + r->eps));
        r->param[i] = p;
        r->m[i] = m;
        r->v[i] = v;
        r->grad[i] = 0;
    }
}

static void qlora__nf4_portable(const uint8_t* codes, const float* levels, float scale, int64_t n,
                                QLORA__REAL* y) {
    for (int64_t i = 0; i < n; i++) {
        y[i] = (QLORA__REAL)(levels[qlora__nf4_code_at(codes, i)] * scale);
    }
}

static void qlora__keep_portable(const qlora__keep_row* r) {
    uint32_t counter[4] = {r->counter[0], r->counter[1], r->counter[2], r->counter[3]};
    uint32_t words[4];
    for (int64_t i = 0; i < r->n; i += 4) {
        qlora__philox(counter, r->key, words);
        counter[0]++;
        for (int64_t j = 0; j < 4 && i + j < r->n; j++) {
            r->factor[i + j] = words[j] >= r->threshold ? (QLORA__REAL)r->scale : 0;
        }
    }
}

static void qlora__transpose_portable(const QLORA__REAL* x, int64_t ld, int64_t rows, int64_t cols,
                                 QLORA__REAL* y) {
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < cols; c++) {
            y[c * QLORA__BLOCK + r] = x[r * ld + c];
        }
    }
}

static const qlora__cpu_rows qlora__rows_portable = {
    qlora__load_portable,
    qlora__store_portable,
    {qlora__silu_portable, qlora__silu_grad_portable, qlora__swiglu_portable, qlora__geglu_portable,
     qlora__cap_portable, qlora__mul_portable, qlora__add_portable, qlora__scale_portable,
     qlora__fill_portable},
    qlora__swiglu_grad_portable,
    qlora__geglu_grad_portable,
    qlora__squares_portable,
    qlora__dot_portable,
    qlora__dot3_portable,
    qlora__norm_portable,
    qlora__norm_grad_portable,
    qlora__rope_portable,
    qlora__top_portable,
    qlora__exps_portable,
    qlora__shares_portable,
    qlora__softmax_grad_portable,
    qlora__cap_grad_portable,
    qlora__adamw_portable,
    qlora__nf4_portable,
    qlora__keep_portable,
    NULL,
    qlora__transpose_portable,
    NULL,
    NULL,
};
