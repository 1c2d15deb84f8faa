// reference.h - a layer of a transformer, forward and backward, in loops over doubles and nothing
// else: start here to understand src/model/, which computes the same with adapters, tiles and
// kernels. The suites of internal/reference.c compare the two.
//
//     a = norm(x)                             q, k, v = Wq a + bq, Wk a + bk, Wv a + bv
//     q, k = rotated(norm(q)), rotated(norm(k))
//     o = Wo softmax(cap(scale q k^T)) v      each query sees itself and the keys before it
//     h = x + residual norm(o)
//     b = norm(h), or a if attention and MLP are side by side
//     f = Wdown (act(Wgate b) Wup b), or Wdown act(Wup b), or the sum of w_e f_e over experts,
//         with matrices of their own: w = softmax(Wr b), 0 but for the largest, perhaps divided
//     y = h + residual norm(f)
//
// Every norm may be missing. A matrix [rows, columns] is stored row by row; a sequence of n tokens
// is a matrix with a row per token. dx is d loss / d x. Functions return new matrices.
#ifndef REFERENCE_H
#define REFERENCE_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// y = W x + bias for every row x.
typedef struct ref_matrix {
    int64_t out;
    int64_t in;
    const double* w;    // [out, in]
    const double* bias; // NULL: none
    double* dw;
} ref_matrix;

// y = w (x - mean) / sqrt(mean of (x - mean)^2 + eps) + bias. RMSNorm: without the mean.
typedef struct ref_norm {
    int64_t width;
    const double* w; // NULL: there is no norm
    const double* bias;
    double* dw;
    double* dbias;
    double eps;
    bool centred; // LayerNorm
} ref_norm;

typedef enum ref_activation { REF_SILU, REF_GELU, REF_SQUARED_RELU } ref_activation;

typedef struct ref_layer {
    int64_t hidden;
    int64_t heads;
    int64_t kv_heads; // each is shared by heads / kv_heads heads of q
    int64_t head_dim;
    int64_t window;  // a query sees itself and the window - 1 keys before it; 0: all before it
    double scale;    // of the scores q k^T
    double cap;      // scores s become cap tanh(s / cap); 0: no cap
    double residual; // factor of what attention and MLP add to the stream
    int64_t rotated; // columns of a head that are rotated, in pairs; 0: none
    double theta;
    bool neighbours; // the pairs are (2 i, 2 i + 1); otherwise (i, i + rotated / 2)
    ref_activation activation;
    bool plain;  // the MLP has no gate
    bool beside; // the MLP has the same input as attention, and no norm of its own
    ref_norm before_attention;
    ref_norm after_attention;
    ref_norm before_mlp;
    ref_norm after_mlp;
    ref_norm of_q; // its width is that of a head, or of all heads
    ref_norm of_k;
    ref_matrix q;
    ref_matrix k;
    ref_matrix v;
    ref_matrix o;
    ref_matrix gate;
    ref_matrix up;
    ref_matrix down;
    int64_t experts; // instead of gate, up and down; 0: there are none
    int64_t chosen;
    bool divided; // their weights, by their sum
    ref_matrix router;
    struct ref_layer* expert; // [experts], of which gate, up and down are used
} ref_layer;

// What the forward pass computes and the backward pass reads, named as in the formulas above.
typedef struct ref_kept {
    int64_t n; // tokens
    const double* x;
    double* a;
    double* q0; // before norm and rotation
    double* k0;
    double* q;
    double* k;
    double* v;
    double* p;     // [heads, n, n], the softmax
    double* heads; // p v
    double* o;
    double* h;
    double* b;
    double* gate;
    double* up;
    double* act; // act(gate) up
    double* f;
    double* chances; // [n, experts], softmax(Wr b)
    double* w;
    double* all[160]; // every matrix that was made, to be freed
    int count;
} ref_kept;

static double* ref_new(ref_kept* kept, int64_t n) {
    double* x = (double*)calloc((size_t)n, sizeof *x);
    if (x == NULL || kept->count == 160) {
        abort();
    }
    kept->all[kept->count++] = x;
    return x;
}

static void ref_free(ref_kept* kept) {
    for (int i = 0; i < kept->count; i++) {
        free(kept->all[i]);
    }
    memset(kept, 0, sizeof *kept);
}

// to += factor from
static void ref_add(int64_t n, double factor, const double* from, double* to) {
    for (int64_t i = 0; i < n; i++) {
        to[i] += factor * from[i];
    }
}

static double ref_dot(int64_t n, const double* a, const double* b) {
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) {
        sum += a[i] * b[i];
    }
    return sum;
}

// x + factor y
static double* ref_sum(ref_kept* kept, int64_t n, const double* x, double factor, const double* y) {
    double* sum = ref_new(kept, n);
    ref_add(n, 1.0, x, sum);
    ref_add(n, factor, y, sum);
    return sum;
}

static double* ref_matrix_forward(ref_kept* kept, const ref_matrix* m, const double* x) {
    double* y = ref_new(kept, kept->n * m->out);
    for (int64_t t = 0; t < kept->n; t++) {
        for (int64_t i = 0; i < m->out; i++) {
            double bias = m->bias != NULL ? m->bias[i] : 0.0;
            y[t * m->out + i] = ref_dot(m->in, m->w + i * m->in, x + t * m->in) + bias;
        }
    }
    return y;
}

// Returns dx, and adds to the gradient of the matrix.
static double* ref_matrix_backward(ref_kept* kept, const ref_matrix* m, const double* x,
                                   const double* dy) {
    double* dx = ref_new(kept, kept->n * m->in);
    for (int64_t t = 0; t < kept->n; t++) {
        for (int64_t i = 0; i < m->out; i++) {
            ref_add(m->in, dy[t * m->out + i], x + t * m->in, m->dw + i * m->in);
            ref_add(m->in, dy[t * m->out + i], m->w + i * m->in, dx + t * m->in);
        }
    }
    return dx;
}

// The mean that is subtracted from a row, and the factor of what is left.
static void ref_norm_row(const ref_norm* m, const double* x, double* mean, double* factor) {
    double sum = 0.0;
    double squares = 0.0;
    for (int64_t i = 0; i < m->width && m->centred; i++) {
        sum += x[i];
    }
    *mean = sum / (double)m->width;
    for (int64_t i = 0; i < m->width; i++) {
        squares += (x[i] - *mean) * (x[i] - *mean);
    }
    *factor = 1.0 / sqrt(squares / (double)m->width + m->eps);
}

// The rows of x have `cols` columns: one norm, or one per head.
static double* ref_norm_forward(ref_kept* kept, const ref_norm* m, int64_t cols, const double* x) {
    int64_t count = kept->n * cols;
    double* y = ref_new(kept, count);
    ref_add(count, 1.0, x, y);
    for (int64_t at = 0; at < count && m->w != NULL; at += m->width) {
        double mean = 0.0;
        double factor = 0.0;
        ref_norm_row(m, x + at, &mean, &factor);
        for (int64_t i = 0; i < m->width; i++) {
            y[at + i] = m->w[i] * (x[at + i] - mean) * factor;
            y[at + i] += m->bias != NULL ? m->bias[i] : 0.0;
        }
    }
    return y;
}

// With z = (x - mean) factor and dz = w dy: dx = factor (dz - mean of dz - z mean of (z dz)), for
// RMSNorm without the mean of dz.
static double* ref_norm_backward(ref_kept* kept, const ref_norm* m, int64_t cols, const double* x,
                                 const double* dy) {
    int64_t count = kept->n * cols;
    double* dx = ref_new(kept, count);
    if (m->w == NULL) {
        ref_add(count, 1.0, dy, dx);
    }
    for (int64_t at = 0; at < count && m->w != NULL; at += m->width) {
        double mean = 0.0;
        double factor = 0.0;
        double dz_mean = 0.0;
        double z_dz_mean = 0.0;
        ref_norm_row(m, x + at, &mean, &factor);
        for (int64_t i = 0; i < m->width; i++) {
            double z = (x[at + i] - mean) * factor;
            double dz = m->w[i] * dy[at + i];
            dz_mean += m->centred ? dz / (double)m->width : 0.0;
            z_dz_mean += z * dz / (double)m->width;
            m->dw[i] += z * dy[at + i];
            if (m->bias != NULL) {
                m->dbias[i] += dy[at + i];
            }
        }
        for (int64_t i = 0; i < m->width; i++) {
            double z = (x[at + i] - mean) * factor;
            dx[at + i] = factor * (m->w[i] * dy[at + i] - dz_mean - z * z_dz_mean);
        }
    }
    return dx;
}

// Rotates pair i of every head of x by position * theta^(-2 i / rotated). sign: 1, or -1 for the
// inverse, which a gradient goes through.
static void ref_rotate(const ref_kept* kept, const ref_layer* l, int64_t heads, double sign,
                       double* x) {
    for (int64_t t = 0; t < kept->n; t++) {
        for (int64_t i = 0; i < l->rotated / 2; i++) {
            double angle = (double)t * pow(l->theta, -2.0 * (double)i / (double)l->rotated);
            for (int64_t head = 0; head < heads; head++) {
                double* u = x + (t * heads + head) * l->head_dim + (l->neighbours ? 2 * i : i);
                double* v = u + (l->neighbours ? 1 : l->rotated / 2);
                double old = *u;
                *u = old * cos(angle) - sign * *v * sin(angle);
                *v = *v * cos(angle) + sign * old * sin(angle);
            }
        }
    }
}

static int64_t ref_first_key(const ref_layer* l, int64_t query) {
    return l->window > 0 && query >= l->window ? query - l->window + 1 : 0;
}

static double ref_score(const ref_layer* l, const double* q, const double* k) {
    double s = l->scale * ref_dot(l->head_dim, q, k);
    return l->cap > 0.0 ? l->cap * tanh(s / l->cap) : s;
}

// q, k, v -> p, heads
static void ref_attention_forward(ref_kept* kept, const ref_layer* l) {
    int64_t d = l->head_dim;
    kept->p = ref_new(kept, l->heads * kept->n * kept->n);
    kept->heads = ref_new(kept, kept->n * l->heads * d);
    for (int64_t head = 0; head < l->heads; head++) {
        int64_t shared = head / (l->heads / l->kv_heads);
        for (int64_t i = 0; i < kept->n; i++) {
            const double* q = kept->q + (i * l->heads + head) * d;
            double* p = kept->p + (head * kept->n + i) * kept->n;
            double* out = kept->heads + (i * l->heads + head) * d;
            double sum = 0.0;
            for (int64_t j = ref_first_key(l, i); j <= i; j++) {
                p[j] = exp(ref_score(l, q, kept->k + (j * l->kv_heads + shared) * d));
                sum += p[j];
            }
            for (int64_t j = ref_first_key(l, i); j <= i; j++) {
                p[j] /= sum;
                ref_add(d, p[j], kept->v + (j * l->kv_heads + shared) * d, out);
            }
        }
    }
}

// Adds to dq, dk and dv. With dp_j = d_heads v_j: ds_j = p_j (dp_j - sum of p dp), and the slope of
// the cap is 1 - (s / cap)^2.
static void ref_attention_backward(const ref_kept* kept, const ref_layer* l, const double* d_heads,
                                   double* dq, double* dk, double* dv) {
    int64_t d = l->head_dim;
    for (int64_t head = 0; head < l->heads; head++) {
        int64_t shared = head / (l->heads / l->kv_heads);
        for (int64_t i = 0; i < kept->n; i++) {
            int64_t own = (i * l->heads + head) * d;
            const double* p = kept->p + (head * kept->n + i) * kept->n;
            double sum = 0.0;
            for (int64_t j = ref_first_key(l, i); j <= i; j++) {
                int64_t at = (j * l->kv_heads + shared) * d;
                sum += p[j] * ref_dot(d, d_heads + own, kept->v + at);
                ref_add(d, p[j], d_heads + own, dv + at);
            }
            for (int64_t j = ref_first_key(l, i); j <= i; j++) {
                int64_t at = (j * l->kv_heads + shared) * d;
                double ds = p[j] * (ref_dot(d, d_heads + own, kept->v + at) - sum);
                if (l->cap > 0.0) {
                    double capped = ref_score(l, kept->q + own, kept->k + at) / l->cap;
                    ds *= 1.0 - capped * capped;
                }
                ref_add(d, l->scale * ds, kept->k + at, dq + own);
                ref_add(d, l->scale * ds, kept->q + own, dk + at);
            }
        }
    }
}

// act(x), and its derivative in *slope.
static double ref_activate(ref_activation kind, double x, double* slope) {
    if (kind == REF_SQUARED_RELU) {
        *slope = x > 0.0 ? 2.0 * x : 0.0;
        return x > 0.0 ? x * x : 0.0;
    }
    if (kind == REF_SILU) {
        double sigmoid = 1.0 / (1.0 + exp(-x));
        *slope = sigmoid * (1.0 + x * (1.0 - sigmoid));
        return x * sigmoid;
    }
    double root = sqrt(2.0 / 3.14159265358979323846);
    double t = tanh(root * (x + 0.044715 * x * x * x));
    *slope = 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * root * (1.0 + 3.0 * 0.044715 * x * x);
    return 0.5 * x * (1.0 + t);
}

static void ref_mlp_forward(ref_kept* kept, const ref_layer* l) {
    double slope = 0.0;
    kept->up = ref_matrix_forward(kept, &l->up, kept->b);
    kept->gate = l->plain ? kept->up : ref_matrix_forward(kept, &l->gate, kept->b);
    kept->act = ref_new(kept, kept->n * l->up.out);
    for (int64_t i = 0; i < kept->n * l->up.out; i++) {
        double act = ref_activate(l->activation, kept->gate[i], &slope);
        kept->act[i] = l->plain ? act : act * kept->up[i];
    }
    kept->f = ref_matrix_forward(kept, &l->down, kept->act);
}

static double* ref_mlp_backward(ref_kept* kept, const ref_layer* l, const double* df) {
    int64_t count = kept->n * l->up.out;
    double* d_act = ref_matrix_backward(kept, &l->down, kept->act, df);
    double* d_gate = ref_new(kept, count);
    double* d_up = ref_new(kept, count);
    for (int64_t i = 0; i < count; i++) {
        double slope = 0.0;
        double act = ref_activate(l->activation, kept->gate[i], &slope);
        d_up[i] = d_act[i] * (l->plain ? slope : act);
        d_gate[i] = d_act[i] * slope * kept->up[i];
    }
    double* db = ref_matrix_backward(kept, &l->up, kept->b, d_up);
    if (!l->plain) {
        ref_add(kept->n * l->up.in, 1.0, ref_matrix_backward(kept, &l->gate, kept->b, d_gate), db);
    }
    return db;
}

// The weights of the experts of one token; of equals, the first are chosen.
static void ref_weigh(const ref_layer* l, const double* z, double* chances, double* w) {
    double sums[2] = {0.0, 0.0};
    for (int64_t i = 0; i < l->experts; i++) {
        sums[0] += exp(z[i]);
    }
    for (int64_t i = 0; i < l->experts; i++) {
        int64_t before = 0;
        for (int64_t j = 0; j < l->experts; j++) {
            before += z[j] > z[i] || (j < i && !(z[j] < z[i])) ? 1 : 0;
        }
        chances[i] = exp(z[i]) / sums[0];
        w[i] = before < l->chosen ? chances[i] : 0.0;
        sums[1] += w[i];
    }
    for (int64_t i = 0; i < l->experts && l->divided; i++) {
        w[i] /= sums[1];
    }
}

// All experts compute all tokens: that is slow, and easy to read.
static void ref_experts_forward(ref_kept* kept, const ref_layer* l) {
    double* f = ref_new(kept, kept->n * l->hidden);
    double* z = ref_matrix_forward(kept, &l->router, kept->b);
    kept->chances = ref_new(kept, kept->n * l->experts);
    kept->w = ref_new(kept, kept->n * l->experts);
    for (int64_t at = 0; at < kept->n * l->experts; at += l->experts) {
        ref_weigh(l, z + at, kept->chances + at, kept->w + at);
    }
    for (int64_t i = 0; i < l->experts; i++) {
        ref_mlp_forward(kept, &l->expert[i]);
        for (int64_t t = 0; t < kept->n; t++) {
            int64_t row = t * l->hidden;
            ref_add(l->hidden, kept->w[t * l->experts + i], kept->f + row, f + row);
        }
    }
    kept->f = f;
}

// With dw_e = f_e df: dz_e = w_e dw_e - q_e (sum of w dw), where q is w if that is divided, or p.
static double* ref_experts_backward(ref_kept* kept, const ref_layer* l, const double* df) {
    int64_t count = kept->n * l->hidden;
    double* db = ref_new(kept, count);
    double* dz = ref_new(kept, kept->n * l->experts);
    double* sums = ref_new(kept, kept->n);
    for (int64_t i = 0; i < l->experts; i++) {
        double* own = ref_new(kept, count);
        ref_mlp_forward(kept, &l->expert[i]);
        for (int64_t t = 0; t < kept->n; t++) {
            int64_t row = t * l->hidden;
            double w = kept->w[t * l->experts + i];
            dz[t * l->experts + i] = w * ref_dot(l->hidden, kept->f + row, df + row);
            sums[t] += dz[t * l->experts + i];
            ref_add(l->hidden, w, df + row, own + row);
        }
        ref_add(count, 1.0, ref_mlp_backward(kept, &l->expert[i], own), db);
    }
    for (int64_t i = 0; i < kept->n * l->experts; i++) {
        dz[i] -= (l->divided ? kept->w : kept->chances)[i] * sums[i / l->experts];
    }
    ref_add(count, 1.0, ref_matrix_backward(kept, &l->router, kept->b, dz), db);
    return db;
}

// Returns y of x[n, hidden]. kept: zeros; x must stay until the backward pass.
static double* ref_layer_forward(ref_kept* kept, const ref_layer* l, int64_t n, const double* x) {
    int64_t hidden = l->hidden;
    kept->n = n;
    kept->x = x;
    kept->a = ref_norm_forward(kept, &l->before_attention, hidden, x);
    kept->q0 = ref_matrix_forward(kept, &l->q, kept->a);
    kept->k0 = ref_matrix_forward(kept, &l->k, kept->a);
    kept->v = ref_matrix_forward(kept, &l->v, kept->a);
    kept->q = ref_norm_forward(kept, &l->of_q, l->q.out, kept->q0);
    kept->k = ref_norm_forward(kept, &l->of_k, l->k.out, kept->k0);
    ref_rotate(kept, l, l->heads, 1.0, kept->q);
    ref_rotate(kept, l, l->kv_heads, 1.0, kept->k);
    ref_attention_forward(kept, l);
    kept->o = ref_matrix_forward(kept, &l->o, kept->heads);
    double* added = ref_norm_forward(kept, &l->after_attention, hidden, kept->o);
    kept->h = ref_sum(kept, n * hidden, x, l->residual, added);
    const double* before = l->beside ? kept->a : kept->h;
    kept->b = ref_norm_forward(kept, &l->before_mlp, hidden, before);
    l->experts > 0 ? ref_experts_forward(kept, l) : ref_mlp_forward(kept, l);
    added = ref_norm_forward(kept, &l->after_mlp, hidden, kept->f);
    return ref_sum(kept, n * hidden, kept->h, l->residual, added);
}

// Returns dx of dy, and adds to the gradients of the matrices and norms.
static double* ref_layer_backward(ref_kept* kept, const ref_layer* l, const double* dy) {
    int64_t n = kept->n;
    int64_t hidden = l->hidden;
    int64_t count = n * hidden;
    double* zero = ref_new(kept, count);
    // the MLP
    double* df = ref_sum(kept, count, zero, l->residual, dy);
    df = ref_norm_backward(kept, &l->after_mlp, hidden, kept->f, df);
    double* db = l->experts > 0 ? ref_experts_backward(kept, l, df) : ref_mlp_backward(kept, l, df);
    db = ref_norm_backward(kept, &l->before_mlp, hidden, kept->h, db);
    // attention
    double* dh = ref_sum(kept, count, dy, l->beside ? 0.0 : 1.0, db);
    double* d_o = ref_sum(kept, count, zero, l->residual, dh);
    d_o = ref_norm_backward(kept, &l->after_attention, hidden, kept->o, d_o);
    double* d_heads = ref_matrix_backward(kept, &l->o, kept->heads, d_o);
    double* dq = ref_new(kept, n * l->q.out);
    double* dk = ref_new(kept, n * l->k.out);
    double* dv = ref_new(kept, n * l->v.out);
    ref_attention_backward(kept, l, d_heads, dq, dk, dv);
    ref_rotate(kept, l, l->heads, -1.0, dq);
    ref_rotate(kept, l, l->kv_heads, -1.0, dk);
    dq = ref_norm_backward(kept, &l->of_q, l->q.out, kept->q0, dq);
    dk = ref_norm_backward(kept, &l->of_k, l->k.out, kept->k0, dk);
    double* da = ref_sum(kept, count, zero, l->beside ? 1.0 : 0.0, db);
    ref_add(count, 1.0, ref_matrix_backward(kept, &l->q, kept->a, dq), da);
    ref_add(count, 1.0, ref_matrix_backward(kept, &l->k, kept->a, dk), da);
    ref_add(count, 1.0, ref_matrix_backward(kept, &l->v, kept->a, dv), da);
    da = ref_norm_backward(kept, &l->before_attention, hidden, kept->x, da);
    return ref_sum(kept, count, dh, 1.0, da);
}

#endif
