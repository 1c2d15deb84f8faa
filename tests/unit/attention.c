// attention.c - causal attention, forward and backward, against float64 on every machine.
//
// For bf16, the error may be at most 2 times (backward 3 times) that of a plain bf16 computation;
// for f32, at most 1e-6 sqrt(K / 64) in the relative 2-norm.
#include "machines.h"
#include "ops_api.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define SEQS_MAX 8

typedef struct attention_case {
    qlora_dtype dtype;
    int64_t hd;
    int64_t heads;
    int64_t kv_heads;
    int64_t window;
    int64_t tokens; // more than the sum of the lengths: a tail
    int64_t pad;    // extra columns of every buffer, filled with NaN
    float scale;    // 0: the default
    int64_t n;      // entries of lengths; unused offsets repeat the last
    int64_t lengths[SEQS_MAX];
    float cap; // 0: none
} attention_case;

// Host values. Inputs are rounded to the dtype; the tail and the padding are NaN.
typedef struct attention_data {
    int64_t used; // tokens in sequences
    int32_t offsets[SEQS_MAX + 1];
    float* q;
    float* k;
    float* v;
    float* d_o;
} attention_data;

// Results, in the order o, dq, dk, dv, each [tokens][columns], and lse [heads][tokens].
typedef struct attention_results {
    float* out[4];
    float* lse;
} attention_results;

static const char* const result_names[] = {"o", "dq", "dk", "dv"};

static int64_t columns(const attention_case* c, int which) {
    return (which < 2 ? c->heads : c->kv_heads) * c->hd;
}

static float scale_of(const attention_case* c) {
    return c->scale == 0.0f ? 1.0f / sqrtf((float)c->hd) : c->scale;
}

static float to_bf16(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    u = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
    memcpy(&x, &u, 4);
    return x;
}

static float* random_rows(test_random* random, const attention_case* c, int64_t used,
                          int64_t cols) {
    float* x = (float*)malloc((size_t)(c->tokens * cols + 1) * 4);
    for (int64_t i = 0; i < c->tokens * cols; i++) {
        float value = (float)test_random_normal(random);
        x[i] = i / cols >= used ? NAN : c->dtype == QLORA_BF16 ? to_bf16(value) : value;
    }
    return x;
}

static attention_data data_make(const attention_case* c, test_random* random) {
    attention_data d;
    memset(&d, 0, sizeof d);
    for (int64_t s = 0; s < c->n; s++) {
        d.used += c->lengths[s];
        d.offsets[s + 1] = (int32_t)d.used;
    }
    d.q = random_rows(random, c, d.used, columns(c, 0));
    d.k = random_rows(random, c, d.used, columns(c, 2));
    d.v = random_rows(random, c, d.used, columns(c, 3));
    d.d_o = random_rows(random, c, d.used, columns(c, 0));
    return d;
}

static void data_free(attention_data* d) {
    free(d->q);
    free(d->k);
    free(d->v);
    free(d->d_o);
}

static attention_results results_make(const attention_case* c) {
    attention_results r;
    for (int i = 0; i < 4; i++) {
        r.out[i] = (float*)calloc((size_t)(c->tokens * columns(c, i) + 1), 4);
    }
    r.lse = (float*)calloc((size_t)(c->tokens * c->heads + 1), 4);
    return r;
}

static void results_free(attention_results* r) {
    for (int i = 0; i < 4; i++) {
        free(r->out[i]);
    }
    free(r->lse);
}

// Rounds a step of the plain bf16 computation; the float64 one does not round.
static double step(double x, bool rounding) {
    return rounding ? (double)to_bf16((float)x) : x;
}

// One query of one head, including all its gradients. dq, dk and dv are added to sums in double.
static void reference_query(const attention_case* c, const attention_data* d, int64_t begin,
                            int64_t i, int64_t head, bool rounding, double* o, double* lse,
                            double* const sums[3]) {
    int64_t hd = c->hd;
    int64_t kv = head / (c->heads / c->kv_heads);
    const float* q = d->q + i * columns(c, 0) + head * hd;
    const float* d_o = d->d_o + i * columns(c, 0) + head * hd;
    double p[1024];
    double dp[1024];
    double slope[1024];
    double top = -HUGE_VAL;
    double total = 0.0;
    double dot = 0.0;
    int64_t first = c->window > 0 && i - c->window + 1 > begin ? i - c->window + 1 : begin;
    for (int64_t j = first; j <= i; j++) {
        const float* k = d->k + j * columns(c, 2) + kv * hd;
        const float* v = d->v + j * columns(c, 3) + kv * hd;
        double s = 0.0;
        double g = 0.0;
        for (int64_t x = 0; x < hd; x++) {
            s += (double)q[x] * (double)k[x];
            g += (double)d_o[x] * (double)v[x];
        }
        p[j - first] = step(step(s, rounding) * (double)scale_of(c), rounding);
        slope[j - first] = 1.0;
        if (c->cap > 0.0f) {
            double turned = step(tanh(step(p[j - first] / (double)c->cap, rounding)), rounding);
            p[j - first] = step((double)c->cap * turned, rounding);
            slope[j - first] = 1.0 - turned * turned;
        }
        dp[j - first] = step(g, rounding);
        top = p[j - first] > top ? p[j - first] : top;
    }
    for (int64_t j = first; j <= i; j++) {
        total += exp(p[j - first] - top);
    }
    *lse = top + log(total);
    for (int64_t x = 0; x < hd; x++) {
        o[x] = 0.0;
    }
    for (int64_t j = first; j <= i; j++) {
        p[j - first] = step(exp(p[j - first] - top) / total, rounding);
        for (int64_t x = 0; x < hd; x++) {
            o[x] += p[j - first] * (double)d->v[j * columns(c, 3) + kv * hd + x];
        }
    }
    for (int64_t x = 0; x < hd; x++) {
        o[x] = step(o[x], rounding);
        dot += o[x] * (double)d_o[x];
    }
    for (int64_t j = first; j <= i; j++) {
        double ds =
            step(p[j - first] * (dp[j - first] - step(dot, rounding)) * slope[j - first], rounding);
        for (int64_t x = 0; x < hd; x++) {
            int64_t at = j * columns(c, 2) + kv * hd + x;
            sums[0][i * columns(c, 1) + head * hd + x] +=
                ds * (double)scale_of(c) * (double)d->k[at];
            sums[1][at] += ds * (double)scale_of(c) * (double)q[x];
            sums[2][at] += p[j - first] * (double)d_o[x];
        }
    }
}

// The whole computation in double; with rounding after each step, as in a plain bf16 program.
static void reference(const attention_case* c, const attention_data* d, bool rounding,
                      attention_results* r) {
    double* sums[3];
    double o[256];
    for (int i = 0; i < 3; i++) {
        sums[i] = (double*)calloc((size_t)(c->tokens * columns(c, i + 1) + 1), 8);
    }
    for (int64_t s = 0; s < c->n; s++) {
        for (int64_t i = d->offsets[s]; i < d->offsets[s + 1]; i++) {
            for (int64_t h = 0; h < c->heads; h++) {
                double lse = 0.0;
                reference_query(c, d, d->offsets[s], i, h, rounding, o, &lse, sums);
                r->lse[h * c->tokens + i] = (float)lse;
                for (int64_t x = 0; x < c->hd; x++) {
                    r->out[0][i * columns(c, 0) + h * c->hd + x] = (float)o[x];
                }
            }
        }
    }
    for (int i = 0; i < 3; i++) {
        for (int64_t x = 0; x < c->tokens * columns(c, i + 1); x++) {
            r->out[i + 1][x] = (float)step(sums[i][x], rounding);
        }
        free(sums[i]);
    }
}

// A matrix with pad NaN columns after cols; NULL values: NaN everywhere.
static bool padded(qlora_ctx* ctx, const attention_case* c, int64_t cols, const float* values,
                   qlora_tensor* whole) {
    int64_t ld = cols + c->pad;
    float* image = (float*)malloc((size_t)(c->tokens * ld + 1) * 4);
    for (int64_t i = 0; i < c->tokens * ld; i++) {
        image[i] = values != NULL && i % ld < cols ? values[i / ld * cols + i % ld] : NAN;
    }
    bool ok = test_tensor(ctx, c->dtype, c->tokens, ld, image, whole) == QLORA_OK;
    free(image);
    return ok;
}

// Filled with NaN, so that an entry that no kernel writes is noticed.
static bool lse_make(qlora_ctx* ctx, const attention_case* c, qlora_tensor* lse) {
    attention_case whole = *c;
    whole.dtype = QLORA_F32;
    whole.tokens = c->heads;
    whole.pad = 0;
    return padded(ctx, &whole, c->tokens, NULL, lse);
}

// q, k and v next to each other in one buffer, as in the trainer.
static bool packed(qlora_ctx* ctx, const attention_case* c, const attention_data* d,
                   qlora_tensor* whole, qlora_tensor views[3]) {
    int64_t cols = columns(c, 1) + columns(c, 2) + columns(c, 3);
    float* values = d != NULL ? (float*)malloc((size_t)(c->tokens * cols + 1) * 4) : NULL;
    for (int64_t i = 0; d != NULL && i < c->tokens; i++) {
        const float* parts[3] = {d->q, d->k, d->v};
        float* row = values + i * cols;
        for (int p = 0; p < 3; p++) {
            int64_t n = columns(c, p + 1);
            memcpy(row, parts[p] + i * n, (size_t)n * 4);
            row += n;
        }
    }
    bool ok = padded(ctx, c, cols, values, whole);
    free(values);
    int64_t at = 0;
    for (int p = 0; p < 3; p++) {
        ok = ok && qlora_tensor_view(ctx, whole, 0, c->tokens, at, columns(c, p + 1), &views[p]) ==
                       QLORA_OK;
        at += columns(c, p + 1);
    }
    return ok;
}

// Reads cols columns starting at column `at`; returns false if the padding was overwritten.
static bool read_columns(qlora_ctx* ctx, const attention_case* c, const qlora_tensor* whole,
                         int64_t at, int64_t cols, float* out) {
    int64_t ld = whole->cols;
    float* image = (float*)malloc((size_t)(c->tokens * ld + 1) * 4);
    bool ok = test_read(ctx, whole, image);
    for (int64_t i = 0; ok && i < c->tokens * ld; i++) {
        int64_t x = i % ld;
        if (x >= at && x < at + cols) {
            out[i / ld * cols + x - at] = image[i];
        } else if (x >= ld - c->pad && image[i] == image[i]) {
            fprintf(stderr, "the padding of row %lld was overwritten\n", (long long)(i / ld));
            ok = false;
        }
    }
    free(image);
    return ok;
}

typedef struct attention_device {
    qlora_attention_desc desc;
    qlora_tensor qkv;
    qlora_tensor dqkv;
    qlora_tensor o;
    qlora_tensor d_o;
    qlora_tensor lse;
    qlora_tensor seqs;
    qlora_tensor in[3];  // q, k, v
    qlora_tensor out[3]; // dq, dk, dv
    qlora_tensor o_view;
    qlora_tensor do_view;
} attention_device;

static bool device_make(qlora_ctx* ctx, const attention_case* c, const attention_data* d,
                        attention_device* x) {
    memset(x, 0, sizeof *x);
    x->desc.heads = c->heads;
    x->desc.kv_heads = c->kv_heads;
    x->desc.head_dim = c->hd;
    x->desc.window = c->window;
    x->desc.scale = c->scale;
    x->desc.cap = c->cap;
    int64_t cols = columns(c, 0);
    return packed(ctx, c, d, &x->qkv, x->in) && packed(ctx, c, NULL, &x->dqkv, x->out) &&
           padded(ctx, c, cols, NULL, &x->o) && padded(ctx, c, cols, d->d_o, &x->d_o) &&
           qlora_tensor_view(ctx, &x->o, 0, c->tokens, 0, cols, &x->o_view) == QLORA_OK &&
           qlora_tensor_view(ctx, &x->d_o, 0, c->tokens, 0, cols, &x->do_view) == QLORA_OK &&
           lse_make(ctx, c, &x->lse) &&
           qlora_tensor_create(ctx, QLORA_I32, 1, c->n + 1, &x->seqs) == QLORA_OK &&
           qlora_tensor_write(ctx, &x->seqs, d->offsets, (size_t)(c->n + 1) * 4) == QLORA_OK;
}

static void device_free(qlora_ctx* ctx, attention_device* x) {
    qlora_tensor* all[] = {&x->qkv, &x->dqkv, &x->o, &x->d_o, &x->lse, &x->seqs};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        qlora_tensor_destroy(ctx, all[i]);
    }
}

static qlora_result device_run(qlora_ctx* ctx, attention_device* x) {
    qlora_result r = qlora_attention_forward(ctx, &x->desc, &x->in[0], &x->in[1], &x->in[2],
                                             &x->seqs, &x->o_view, &x->lse);
    if (r != QLORA_OK) {
        return r;
    }
    return qlora_attention_backward(ctx, &x->desc, &x->in[0], &x->in[1], &x->in[2], &x->seqs,
                                    &x->o_view, &x->lse, &x->do_view, &x->out[0], &x->out[1],
                                    &x->out[2]);
}

static bool device_read(qlora_ctx* ctx, const attention_case* c, const attention_device* x,
                        attention_results* r) {
    bool ok = read_columns(ctx, c, &x->o, 0, columns(c, 0), r->out[0]);
    int64_t at = 0;
    for (int i = 1; i < 4; i++) {
        ok = ok && read_columns(ctx, c, &x->dqkv, at, columns(c, i), r->out[i]);
        at += columns(c, i);
    }
    return ok && test_read(ctx, &x->lse, r->lse);
}

// Runs a case on a context; returns NULL, or what went wrong.
static const char* run_case(qlora_ctx* ctx, const attention_case* c, const attention_data* d,
                            attention_results* r) {
    attention_device x;
    const char* wrong = NULL;
    if (!device_make(ctx, c, d, &x)) {
        wrong = "cannot create the tensors";
    } else if (device_run(ctx, &x) != QLORA_OK) {
        wrong = qlora_last_error(ctx);
        fprintf(stderr, "%s\n", wrong);
        wrong = "the call failed";
    } else if (!device_read(ctx, c, &x, r)) {
        wrong = "cannot read the results back";
    }
    device_free(ctx, &x);
    return wrong;
}

static double distance(const float* a, const float* b, int64_t n) {
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) {
        double e = (double)a[i] - (double)b[i];
        sum += e * e;
    }
    return sqrt(sum);
}

static double norm(const float* a, int64_t n) {
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) {
        sum += (double)a[i] * (double)a[i];
    }
    return sqrt(sum);
}

// Compares with float64 by the rule for the dtype, and requires zeros in the tail.
static const char* judge(const attention_case* c, const attention_data* d,
                         const attention_results* got) {
    attention_results exact = results_make(c);
    attention_results plain = results_make(c);
    reference(c, d, false, &exact);
    reference(c, d, true, &plain);
    const char* wrong = NULL;
    int64_t longest = 64;
    for (int64_t s = 0; s < c->n; s++) {
        longest = c->lengths[s] > longest ? c->lengths[s] : longest;
    }
    for (int i = 0; i < 4; i++) {
        int64_t n = c->tokens * columns(c, i);
        // With a single key, the softmax is constant and the gradients cancel to zero. Errors are
        // then measured relative to the terms that cancel, p dp k, which are about sqrt(hd).
        double floor_norm = i == 1 || i == 2 ? 0.05 * sqrt((double)n) : 0.0;
        double size = norm(exact.out[i], n);
        size = size > floor_norm ? size : floor_norm;
        double limit = 1e-6 * sqrt((double)(longest * (c->heads / c->kv_heads)) / 64.0) * size;
        if (c->dtype == QLORA_BF16) {
            double factor = i == 0 ? 2.0 : 3.0;
            limit = factor * distance(exact.out[i], plain.out[i], n) + 1e-3 * floor_norm;
        }
        double e = distance(exact.out[i], got->out[i], n);
        if (!(e <= limit)) {
            fprintf(stderr, "%s: error %.3e, allowed %.3e, norm %.3e (hd %lld, %lld/%lld heads)\n",
                    result_names[i], e, limit, size, (long long)c->hd, (long long)c->heads,
                    (long long)c->kv_heads);
            wrong = "too far from float64";
        }
        for (int64_t x = d->used * columns(c, i); x < n; x++) {
            if (!(got->out[i][x] == 0.0f)) {
                wrong = "the tail is not zero";
            }
        }
    }
    if (!test_close(exact.lse, got->lse, (size_t)(c->heads * c->tokens), 2e-5, 1e-5)) {
        wrong = "lse";
    }
    results_free(&exact);
    results_free(&plain);
    return wrong;
}

// All head sizes of the tensor-core kernels and some others, all ratios of heads to kv heads, odd
// lengths, lengths of one, tiles that just fit, windows, tails, gaps between rows, odd strides.
static const attention_case cases[] = {
    {QLORA_F32, 64, 4, 2, 0, 150, 3, 0, 4, {1, 64, 65, 17}, 0},
    {QLORA_F32, 128, 2, 1, 40, 140, 0, 0, 2, {129, 1}, 0},
    {QLORA_F32, 16, 7, 1, 0, 70, 5, 0, 1, {70}, 0},
    {QLORA_F32, 18, 4, 4, 7, 90, 0, 0.5f, 3, {30, 0, 50}, 0},
    {QLORA_F32, 80, 2, 2, 0, 66, 1, 0, 1, {66}, 0},
    {QLORA_F32, 96, 8, 1, 64, 80, 0, 0, 1, {79}, 0},
    {QLORA_F32, 256, 2, 1, 0, 75, 0, 0, 2, {5, 70}, 0},
    {QLORA_F32, 1, 1, 1, 0, 1, 0, 0, 1, {1}, 0},
    {QLORA_BF16, 64, 4, 2, 0, 210, 8, 0, 5, {1, 64, 65, 17, 50}, 0},
    {QLORA_BF16, 64, 7, 1, 0, 150, 0, 0, 1, {150}, 0},
    {QLORA_BF16, 64, 2, 2, 50, 290, 16, 0.3f, 3, {200, 1, 77}, 0},
    {QLORA_BF16, 64, 8, 1, 1, 66, 0, 0, 2, {2, 64}, 0},
    {QLORA_BF16, 128, 4, 1, 0, 200, 8, 0, 4, {130, 1, 0, 33}, 0},
    {QLORA_BF16, 128, 2, 2, 33, 260, 0, 0, 1, {257}, 0},
    {QLORA_BF16, 128, 1, 1, 0, 1, 0, 0, 1, {1}, 0},
    {QLORA_BF16, 128, 2, 1, 0, 128, 0, 0.02f, 1, {128}, 0},
    {QLORA_BF16, 128, 2, 2, 0, 70, 3, 0, 2, {60, 9}, 0}, // odd stride: the general kernel
    {QLORA_BF16, 80, 2, 1, 20, 70, 1, 0, 1, {66}, 0},    // the same
    {QLORA_BF16, 32, 2, 1, 0, 150, 8, 0, 2, {1, 140}, 0},
    {QLORA_BF16, 80, 1, 1, 20, 140, 0, 0, 1, {131}, 0},
    {QLORA_BF16, 96, 2, 1, 0, 140, 8, 0, 1, {131}, 0},
    {QLORA_BF16, 192, 2, 1, 0, 70, 8, 0, 2, {34, 33}, 0},
    {QLORA_BF16, 256, 2, 1, 33, 80, 16, 0, 2, {67, 1}, 0},
    {QLORA_BF16, 24, 2, 1, 9, 40, 0, 0, 2, {30, 9}, 0}, // from here on, a larger size
    {QLORA_BF16, 56, 2, 1, 0, 40, 8, 0, 1, {36}, 0},
    {QLORA_BF16, 72, 1, 1, 0, 40, 0, 0, 1, {37}, 0},
    {QLORA_BF16, 88, 2, 1, 0, 140, 8, 0, 1, {131}, 0},
    {QLORA_BF16, 88, 2, 2, 0, 40, 0, 0, 1, {33}, 1.5f},
    {QLORA_BF16, 112, 2, 1, 20, 40, 0, 0, 1, {36}, 0},
    {QLORA_BF16, 136, 2, 2, 0, 40, 8, 0, 2, {33, 5}, 2.0f},
    {QLORA_BF16, 200, 2, 1, 0, 40, 8, 0, 1, {38}, 0},
    {QLORA_BF16, 18, 7, 1, 0, 40, 0, 0, 2, {20, 20}, 0},
    {QLORA_F32, 32, 4, 2, 0, 100, 0, 0.5f, 2, {60, 40}, 2.0f},
    {QLORA_F32, 256, 2, 1, 20, 70, 3, 0, 1, {66}, 1.5f},
    {QLORA_BF16, 64, 2, 1, 0, 90, 0, 0.5f, 2, {70, 19}, 3.0f},
    {QLORA_BF16, 128, 4, 1, 40, 80, 8, 0.4f, 1, {77}, 2.0f},
    {QLORA_BF16, 32, 2, 1, 0, 40, 0, 0.6f, 1, {39}, 1.0f},
    {QLORA_BF16, 80, 2, 1, 20, 40, 0, 0.4f, 1, {36}, 2.0f},
    {QLORA_BF16, 96, 2, 1, 0, 40, 0, 0.4f, 1, {36}, 2.0f},
    {QLORA_BF16, 192, 2, 1, 20, 40, 0, 0.3f, 1, {37}, 3.0f},
    {QLORA_BF16, 256, 2, 1, 0, 40, 8, 0.3f, 1, {36}, 2.0f},
};

TEST attention_is_right(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (ctx == NULL) {
        SKIPm(test_open_reason());
    }
    test_random random = test_random_start("attention");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        attention_data d = data_make(&cases[i], &random);
        attention_results got = results_make(&cases[i]);
        const char* wrong = run_case(ctx, &cases[i], &d, &got);
        wrong = wrong != NULL ? wrong : judge(&cases[i], &d, &got);
        results_free(&got);
        data_free(&d);
        if (wrong != NULL) {
            fprintf(stderr, "case %u of cases[]\n", (unsigned)i);
            FAILm(wrong);
        }
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// ---- shares: with less scratch memory, a block of keys handles more heads of a group

static size_t shares_scratch;

static void give_shares_scratch(qlora_ctx_desc* desc) {
    desc->scratch_bytes = shares_scratch;
}

// Checks the results with scratch memory for `shares` shares in addition to the statistics;
// *kernels is the number of kernels the fake GPU ran (0 on other machines).
static const char* run_shared(const test_machine* machine, const attention_case* c,
                              const attention_data* d, int64_t shares, int64_t* kernels) {
    bool fake = strcmp(machine->backend, "fake") == 0;
    attention_results got = results_make(c);
    size_t stats = ((size_t)(c->heads * c->tokens) * 8 + 255) / 256 * 256;
    shares_scratch = stats + (size_t)(shares * c->tokens * columns(c, 2)) * 8;
    qlora_ctx* ctx = test_open(machine, give_shares_scratch);
    if (ctx == NULL) {
        return test_open_reason();
    }
    const char* wrong = run_case(ctx, c, d, &got);
    wrong = wrong != NULL ? wrong : judge(c, d, &got);
    results_free(&got);
    *kernels = fake ? (int64_t)test_fake()->stats().kernels : 0;
    return test_close_ctx(machine, ctx) || wrong != NULL ? wrong : "closing";
}

// One share, shares with different numbers of heads, one head per share: all must be correct. More
// than one share needs one more kernel, which adds them.
TEST attention_shares_are_right(const test_machine* machine) {
    static const attention_case shared[] = {
        {QLORA_BF16, 64, 7, 1, 0, 160, 8, 0, 2, {90, 61}, 0},
        {QLORA_BF16, 128, 6, 2, 50, 140, 0, 0, 3, {70, 1, 60}, 0},
        {QLORA_BF16, 136, 2, 1, 0, 50, 8, 0, 2, {33, 9}, 2.0f},
    };
    if (strcmp(machine->backend, "cpu") == 0 || !test_has_bf16(machine)) {
        SKIPm("only for the tensor-core kernels");
    }
    test_random random = test_random_start("shares");
    for (size_t i = 0; i < sizeof shared / sizeof shared[0]; i++) {
        const attention_case* c = &shared[i];
        attention_data d = data_make(c, &random);
        int64_t alone = 0;
        for (int64_t shares = 1; shares <= c->heads / c->kv_heads; shares++) {
            int64_t kernels = 0;
            const char* wrong = run_shared(machine, c, &d, shares, &kernels);
            if (wrong != NULL) {
                fprintf(stderr, "%d shares\n", (int)shares);
                FAILm(wrong);
            }
            alone = shares == 1 ? kernels : alone;
            bool adds = alone > 0 && shares > 1;
            ASSERT_EQ_FMT((int)(alone + adds), (int)kernels, "%d");
        }
        data_free(&d);
    }
    PASS();
}

// A sequence gives the same bits alone and in a pack.
TEST attention_packing_changes_nothing(const test_machine* machine) {
    static const attention_case packs[] = {
        {QLORA_BF16, 64, 4, 2, 0, 190, 0, 0, 3, {70, 1, 115}, 0},
        {QLORA_BF16, 128, 2, 1, 30, 170, 0, 0, 2, {131, 37}, 0},
        {QLORA_BF16, 256, 2, 1, 0, 50, 0, 0, 2, {35, 11}, 3.0f},
        {QLORA_F32, 20, 2, 1, 0, 100, 0, 0, 2, {30, 70}, 0},
    };
    qlora_ctx* ctx = test_open(machine, NULL);
    if (ctx == NULL) {
        SKIPm(test_open_reason());
    }
    test_random random = test_random_start("packing");
    for (size_t p = 0; p < sizeof packs / sizeof packs[0]; p++) {
        attention_case all = packs[p];
        attention_data d = data_make(&all, &random);
        attention_results together = results_make(&all);
        ASSERT_EQ(NULL, run_case(ctx, &all, &d, &together));
        for (int64_t s = 0; s < all.n; s++) {
            attention_case one = all;
            one.n = 1;
            one.tokens = one.lengths[0] = all.lengths[s];
            int64_t first = d.offsets[s];
            attention_data part = d;
            part.q = d.q + first * columns(&all, 0);
            part.k = d.k + first * columns(&all, 2);
            part.v = d.v + first * columns(&all, 3);
            part.d_o = d.d_o + first * columns(&all, 0);
            part.used = one.tokens;
            part.offsets[0] = 0;
            part.offsets[1] = (int32_t)one.tokens;
            attention_results alone = results_make(&one);
            ASSERT_EQ(NULL, run_case(ctx, &one, &part, &alone));
            for (int i = 0; i < 4; i++) {
                int64_t cols = columns(&all, i);
                ASSERT_MEM_EQ(alone.out[i], together.out[i] + first * cols,
                              (size_t)(one.tokens * cols) * 4);
            }
            results_free(&alone);
        }
        results_free(&together);
        data_free(&d);
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// Running warps and blocks in another order, or running again, gives the same bits.
TEST attention_order_changes_nothing(void) {
    static const attention_case orders[] = {
        {QLORA_BF16, 64, 2, 1, 0, 150, 8, 0, 2, {100, 49}, 0},
        {QLORA_BF16, 128, 2, 1, 40, 140, 0, 0, 1, {139}, 0},
        {QLORA_BF16, 256, 2, 1, 0, 70, 8, 0, 1, {67}, 3.0f},
        {QLORA_F32, 72, 2, 2, 0, 80, 0, 0, 1, {80}, 0},
    };
    for (size_t p = 0; p < sizeof orders / sizeof orders[0]; p++) {
        const attention_case* c = &orders[p];
        test_random random = test_random_start("order");
        attention_data d = data_make(c, &random);
        attention_results first[2] = {results_make(c), results_make(c)};
        int runs[2] = {0, 0}; // compute capability 9.0 has its own kernels
        for (size_t m = 0; m < test_machine_count(); m++) {
            const test_machine* machine = test_machine_at(m);
            bool tensor_cores = machine->cc == 0 || machine->cc >= 80;
            if (strcmp(machine->backend, "cpu") == 0 || !test_machine_wanted(machine) ||
                !tensor_cores) {
                continue;
            }
            qlora_ctx* ctx = test_open(machine, NULL);
            if (ctx == NULL) {
                continue;
            }
            attention_results next = results_make(c);
            int kind = machine->cc == 90 ? 1 : 0;
            ASSERT_EQ(NULL, run_case(ctx, c, &d, runs[kind] == 0 ? &first[kind] : &next));
            for (int i = 0; runs[kind] > 0 && i < 4; i++) {
                ASSERT_MEM_EQ(first[kind].out[i], next.out[i],
                              (size_t)(c->tokens * columns(c, i)) * 4);
            }
            results_free(&next);
            runs[kind]++;
            ASSERT(test_close_ctx(machine, ctx));
        }
        results_free(&first[0]);
        results_free(&first[1]);
        data_free(&d);
        if (runs[0] < 2) {
            SKIPm("needs two GPUs, fake or real");
        }
    }
    PASS();
}

// The separate operators against float64, with sequences of equal length, and the cases
// they reject.
TEST attention_unfused_is_right(const test_machine* machine) {
    static const attention_case even[] = {
        {QLORA_F32, 16, 4, 2, 0, 60, 0, 0, 2, {30, 30}, 0},
        {QLORA_F32, 20, 6, 2, 9, 40, 4, 0.3f, 1, {40}, 0},
        {QLORA_BF16, 64, 4, 1, 0, 66, 8, 0, 3, {22, 22, 22}, 0},
        {QLORA_BF16, 32, 2, 2, 5, 1, 0, 0, 1, {1}, 0},
    };
    qlora_ctx* ctx = test_open(machine, NULL);
    if (ctx == NULL) {
        SKIPm(test_open_reason());
    }
    test_random random = test_random_start("unfused");
    for (size_t i = 0; i < sizeof even / sizeof even[0]; i++) {
        const attention_case* c = &even[i];
        if (c->dtype != QLORA_F32 && !test_has_bf16(machine)) {
            continue;
        }
        attention_data d = data_make(c, &random);
        attention_device x;
        ASSERT(device_make(ctx, c, &d, &x));
        attention_results got = results_make(c);
        ASSERT_EQ(QLORA_OK, device_run(ctx, &x)); // for lse, which the others do not compute
        x.desc.unfused = true;
        ASSERT_EQ_FMT(QLORA_OK, device_run(ctx, &x), "%d");
        ASSERT(device_read(ctx, c, &x, &got));
        const char* wrong = judge(c, &d, &got);
        results_free(&got);
        x.seqs.cols = 1; // no sequence
        ASSERT_EQ_FMT(QLORA_ERR_ARGUMENT, device_run(ctx, &x), "%d");
        ASSERT(strstr(qlora_last_error(ctx), "unfused") != NULL);
        x.seqs.cols = c->n + 1;
        device_free(ctx, &x);
        data_free(&d);
        if (wrong != NULL) {
            fprintf(stderr, "case %u of even[]\n", (unsigned)i);
            FAILm(wrong);
        }
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

static fake_order warpgroup_order;

// Two multiprocessors, so that a block has several tiles.
static void in_warpgroup_order(qlora_ctx_desc* desc) {
    (void)desc;
    if (test_fake() != NULL) {
        fake_config config = test_fake()->defaults();
        config.device[0].cc = 90;
        config.device[0].sms = 2;
        config.order = warpgroup_order;
        config.seed = 5;
        test_fake()->reset(&config);
    }
}

// The kernels with warpgroup instructions, whenever their copies and products happen: sequences
// longer than all tiles in flight, ends inside a tile with NaN behind them, windows, groups, more
// tiles than multiprocessors (at the end of the list, for those of a real device).
TEST warpgroups_hold(const test_machine* machine, bool wide) {
    enum { MANY_HEADS = 48 };
    static const fake_order orders[] = {FAKE_FORWARD, FAKE_REVERSE, FAKE_RANDOM};
    static const attention_case long_ones[] = {
        {QLORA_BF16, 64, 2, 1, 0, 470, 8, 0, 4, {430, 37, 0, 0}, 0},
        {QLORA_BF16, 128, 1, 1, 150, 419, 0, 0, 4, {30, 389, 0, 0}, 0},
        {QLORA_BF16, 96, 3, 3, 0, 420, 0, 0, 2, {389, 30}, 0},
        {QLORA_BF16, 256, 2, 1, 150, 340, 0, 0, 3, {20, 205, 113}, 0},
        {QLORA_BF16, 256, 1, 1, 0, 320, 0, 0, 2, {60, 257}, 2.0f},
        {QLORA_BF16, 64, MANY_HEADS, 12, 0, 600, 0, 0, 3, {130, 20, 430}, 0},
        {QLORA_BF16, 96, MANY_HEADS, 48, 0, 600, 0, 0, 3, {20, 430, 130}, 0},
        {QLORA_BF16, 128, MANY_HEADS, 12, 200, 600, 0, 0, 3, {430, 130, 20}, 0},
        {QLORA_BF16, 256, MANY_HEADS, 24, 0, 600, 0, 0, 2, {130, 460}, 0},
    };
    bool fake = strcmp(machine->backend, "fake") == 0;
    if (strcmp(machine->backend, "cpu") == 0) {
        SKIPm("a GPU's kernels");
    }
    for (size_t i = 0; i < sizeof long_ones / sizeof long_ones[0]; i++) {
        const attention_case* c = &long_ones[i];
        if ((c->hd == 256) != wide || (fake && c->heads == MANY_HEADS)) {
            continue; // slow, and two multiprocessors are enough
        }
        test_random random = test_random_start("warpgroups");
        attention_data d = data_make(c, &random);
        attention_results first = results_make(c);
        for (int order = 0; order < (fake ? 3 : 2); order++) {
            warpgroup_order = orders[order];
            qlora_ctx* ctx = test_open(machine, in_warpgroup_order);
            if (ctx == NULL) {
                SKIPm(test_open_reason());
            }
            attention_results next = results_make(c);
            attention_results* got = order == 0 ? &first : &next;
            const char* wrong = run_case(ctx, c, &d, got);
            wrong = wrong != NULL || order > 0 ? wrong : judge(c, &d, got);
            ASSERT_EQ(NULL, wrong);
            int runs = order == 0 ? 3 : 1; // a launch leaves nothing behind, nor does the next one
            for (int again = 1; again < runs; again++) {
                ASSERT_EQ(NULL, run_case(ctx, c, &d, &next));
            }
            for (int j = 0; j < 4; j++) {
                ASSERT_MEM_EQ(first.out[j], next.out[j], (size_t)(c->tokens * columns(c, j)) * 4);
            }
            results_free(&next);
            char kernel[40];
            snprintf(kernel, sizeof kernel, "qlora_attn%d_wg_bwd_q", (int)c->hd);
            ASSERT_EQ(fake, fake && (int)test_fake()->kernel_runs(kernel) == runs);
            ASSERT(test_close_ctx(machine, ctx));
        }
        results_free(&first);
        data_free(&d);
    }
    PASS();
}

TEST attention_warpgroups(const test_machine* machine) {
    return warpgroups_hold(machine, false);
}

// Apart, so that a mutant of these kernels need not run the others first.
TEST attention_warpgroups_256(const test_machine* machine) {
    return warpgroups_hold(machine, true);
}

static void on_an_old_driver(qlora_ctx_desc* desc) {
    fake_config config = test_fake()->defaults();
    (void)desc;
    config.device[0].cc = 90;
    config.driver_version = 11080; // compiles for 9.0, but without warpgroup instructions
    test_fake()->reset(&config);
}

TEST attention_without_warpgroups(const test_machine* machine) {
    const attention_case c = {QLORA_BF16, 64, 2, 1, 0, 40, 0, 0, 1, {40}, 0};
    test_random random = test_random_start("old driver");
    attention_data d = data_make(&c, &random);
    attention_results got = results_make(&c);
    qlora_ctx* ctx = test_open(machine, on_an_old_driver);
    ASSERT(ctx != NULL);
    ASSERT_EQ(NULL, run_case(ctx, &c, &d, &got));
    ASSERT_EQ(NULL, judge(&c, &d, &got));
    ASSERT_EQ(1, (int)test_fake()->kernel_runs("qlora_attn64_fwd"));
    ASSERT(test_close_ctx(machine, ctx));
    results_free(&got);
    data_free(&d);
    PASS();
}

static qlora_result graph_body(qlora_ctx* ctx, void* user) {
    return device_run(ctx, (attention_device*)user);
}

// One graph works for any packing, because the offsets are read on the device.
TEST attention_graph_serves_any_packing(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (ctx == NULL) {
        SKIPm(test_open_reason());
    }
    attention_case c = {QLORA_BF16, 64, 2, 1, 0, 200, 0, 0, 3, {200, 0, 0}, 0};
    test_random random = test_random_start("graph");
    attention_data d = data_make(&c, &random);
    attention_device x;
    ASSERT(device_make(ctx, &c, &d, &x));
    ASSERT_EQ(QLORA_OK, device_run(ctx, &x)); // compiles
    qlora_graph* graph = NULL;
    ASSERT_EQ(QLORA_OK, qlora_graph_capture(ctx, 1, graph_body, &x, &graph));
    static const int64_t lengths[][3] = {{3, 100, 90}, {200, 0, 0}, {64, 64, 64}, {0, 0, 0}};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        memcpy(c.lengths, lengths[i], sizeof lengths[i]);
        d.used = 0;
        for (int s = 0; s < 3; s++) {
            d.used += c.lengths[s];
            d.offsets[s + 1] = (int32_t)d.used;
        }
        ASSERT_EQ(QLORA_OK, qlora_tensor_write(ctx, &x.seqs, d.offsets, 16));
        ASSERT_EQ(QLORA_OK, qlora_graph_replay(graph, 1));
        attention_results got = results_make(&c);
        ASSERT(device_read(ctx, &c, &x, &got));
        const char* wrong = judge(&c, &d, &got);
        results_free(&got);
        if (wrong != NULL) {
            FAILm(wrong);
        }
    }
    ASSERT_EQ(QLORA_OK, qlora_graph_destroy(graph));
    device_free(ctx, &x);
    data_free(&d);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// Invalid offsets are an error on the CPU, which can check them; on a GPU, nothing outside the
// matrices may be accessed (the fake driver would report it).
TEST attention_survives_bad_offsets(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (ctx == NULL) {
        SKIPm(test_open_reason());
    }
    static const int32_t bad[][4] = {{0, 50, 40, 70}, {0, 30, 1000, 1000},
                                     {5, 10, 20, 30}, {0, -7, 20, 70},
                                     {-9, 0, 20, 70}, {70, 70, 70, 2147483647}};
    for (size_t i = 0; i < 2 * sizeof bad / sizeof bad[0]; i++) {
        attention_case c = {
            i % 2 == 0 ? QLORA_BF16 : QLORA_F32, 64, 2, 1, 0, 70, 0, 0, 3, {20, 20, 30}, 0};
        test_random random = test_random_start("offsets");
        attention_data d = data_make(&c, &random);
        attention_device x;
        ASSERT(device_make(ctx, &c, &d, &x));
        ASSERT_EQ(QLORA_OK, qlora_tensor_write(ctx, &x.seqs, bad[i / 2], 16));
        qlora_result r = device_run(ctx, &x);
        ASSERT_EQ(strcmp(machine->backend, "cpu") == 0 ? QLORA_ERR_ARGUMENT : QLORA_OK, r);
        ASSERT_EQ(QLORA_OK, qlora_ctx_sync(ctx));
        device_free(ctx, &x);
        data_free(&d);
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// Pre-warm compiles everything that the calls use: nothing is missing from the sealed cache.
TEST attention_is_prewarmed(const test_machine* machine) {
    static const struct {
        qlora_dtype compute;
        int64_t hd;
    } models[] = {{QLORA_BF16, 16},  {QLORA_BF16, 64}, {QLORA_BF16, 80}, {QLORA_BF16, 128},
                  {QLORA_BF16, 256}, {QLORA_BF16, 20}, {QLORA_F32, 64}};
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++) {
        if (models[i].compute == QLORA_BF16 && machine->cc == 75) {
            continue; // bf16 GEMMs need 8.0
        }
        qlora_ctx* ctx = test_open(machine, NULL);
        if (ctx == NULL) {
            SKIPm(test_open_reason());
        }
        qlora_prewarm_desc shape;
        memset(&shape, 0, sizeof shape);
        shape.hidden = shape.intermediate = 2 * models[i].hd;
        shape.heads = 2;
        shape.kv_heads = 1;
        shape.head_dim = models[i].hd;
        shape.max_tokens = 16;
        shape.base = QLORA_BASE_16BIT;
        shape.compute = models[i].compute;
        ASSERT_EQ_FMT(QLORA_OK, qlora_prewarm(ctx, &shape), "%d");
        attention_case c = {models[i].compute, models[i].hd, 2, 1, 0, 16, 0, 0, 1, {16}, 0};
        test_random random = test_random_start("prewarmed");
        attention_data d = data_make(&c, &random);
        attention_results got = results_make(&c);
        const char* wrong = run_case(ctx, &c, &d, &got);
        results_free(&got);
        data_free(&d);
        ASSERT(test_close_ctx(machine, ctx));
        if (wrong != NULL) {
            FAILm(wrong);
        }
    }
    PASS();
}

TEST attention_refuses(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (ctx == NULL) {
        SKIPm(test_open_reason());
    }
    attention_case c = {QLORA_F32, 16, 4, 2, 0, 8, 0, 0, 1, {8}, 0};
    test_random random = test_random_start("refuses");
    attention_data d = data_make(&c, &random);
    attention_device x;
    ASSERT(device_make(ctx, &c, &d, &x));
    for (int i = 0; i < 10; i++) {
        attention_device y = x;
        switch (i) {
        case 0:
            y.desc.kv_heads = 3;
            break;
        case 1:
            y.desc.head_dim = 257;
            break;
        case 2:
            y.desc.window = -1;
            break;
        case 3:
            y.desc.scale = NAN;
            break;
        case 4:
            y.desc.scale = -1.0f;
            break;
        case 5:
            y.in[1].rows = 7;
            break;
        case 6:
            y.o_view = y.in[0];
            break;
        case 7:
            y.out[2] = y.out[1];
            break;
        case 8:
            y.seqs.cols = 0;
            break;
        default:
            y.desc.heads = 0;
            break;
        }
        ASSERT_EQ_FMT(QLORA_ERR_ARGUMENT, device_run(ctx, &y), "%d");
        ASSERT(qlora_last_error(ctx)[0] != '\0');
    }
    attention_device empty = x; // no tokens: nothing to do
    for (int i = 0; i < 3; i++) {
        empty.in[i].rows = empty.out[i].rows = 0;
    }
    empty.o_view.rows = empty.do_view.rows = empty.lse.cols = empty.lse.ld = 0;
    ASSERT_EQ_FMT(QLORA_OK, device_run(ctx, &empty), "%d");
    ASSERT_EQ_FMT(QLORA_OK, device_run(ctx, &x), "%d");
    device_free(ctx, &x);
    data_free(&d);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// --- the loops in double: gradients against finite differences ---

typedef struct double_problem {
    const ops_api* api;
    qlora_ctx* ctx;
    qlora_attention_desc desc;
    int64_t tokens;
    qlora_tensor t[9]; // q, k, v, o, lse, d_o, dq, dk, dv
    qlora_tensor seqs;
} double_problem;

// sum(o * d_o) for the current q, k, v.
static bool double_loss(double_problem* p, const double* weights, double* out) {
    if (p->api->attention_forward(p->ctx, &p->desc, &p->t[0], &p->t[1], &p->t[2], &p->seqs,
                                  &p->t[3], &p->t[4]) != QLORA_OK) {
        return false;
    }
    int64_t n = p->tokens * p->desc.heads * p->desc.head_dim;
    double* o = (double*)malloc((size_t)n * 8);
    bool ok = p->api->tensor_read(p->ctx, &p->t[3], o, (size_t)n * 8) == QLORA_OK;
    *out = 0.0;
    for (int64_t i = 0; i < n; i++) {
        *out += o[i] * weights[i];
    }
    free(o);
    return ok;
}

static const char* double_check(double_problem* p, test_random* random) {
    int64_t wide = p->tokens * p->desc.heads * p->desc.head_dim;
    double* values = (double*)malloc((size_t)wide * 8);
    double* grads = (double*)malloc((size_t)wide * 8);
    double* weights = (double*)malloc((size_t)wide * 8);
    const char* wrong = NULL;
    for (int i = 0; i < 3; i++) { // random q, k, v
        int64_t n = p->tokens * p->t[i].cols;
        for (int64_t j = 0; j < n; j++) {
            values[j] = test_random_normal(random);
        }
        p->api->tensor_write(p->ctx, &p->t[i], values, (size_t)n * 8);
    }
    for (int64_t j = 0; j < wide; j++) {
        weights[j] = test_random_normal(random);
    }
    p->api->tensor_write(p->ctx, &p->t[5], weights, (size_t)wide * 8);
    double loss = 0.0;
    if (!double_loss(p, weights, &loss) ||
        p->api->attention_backward(p->ctx, &p->desc, &p->t[0], &p->t[1], &p->t[2], &p->seqs,
                                   &p->t[3], &p->t[4], &p->t[5], &p->t[6], &p->t[7],
                                   &p->t[8]) != QLORA_OK) {
        wrong = "the call failed";
    }
    for (int i = 0; wrong == NULL && i < 3; i++) {
        int64_t n = p->tokens * p->t[i].cols;
        p->api->tensor_read(p->ctx, &p->t[i], values, (size_t)n * 8);
        p->api->tensor_read(p->ctx, &p->t[6 + i], grads, (size_t)n * 8);
        for (int64_t j = 0; wrong == NULL && j < n; j++) {
            const double h = 1e-4;
            double keep = values[j];
            double up = 0.0;
            double down = 0.0;
            values[j] = keep + h;
            p->api->tensor_write(p->ctx, &p->t[i], values, (size_t)n * 8);
            bool ok = double_loss(p, weights, &up);
            values[j] = keep - h;
            p->api->tensor_write(p->ctx, &p->t[i], values, (size_t)n * 8);
            ok = ok && double_loss(p, weights, &down);
            values[j] = keep;
            p->api->tensor_write(p->ctx, &p->t[i], values, (size_t)n * 8);
            double slope = (up - down) / (2.0 * h);
            if (!ok || !(fabs(slope - grads[j]) <= 1e-5 * fabs(slope) + 1e-6)) {
                fprintf(stderr, "d%c[%lld]: %.9g, finite difference %.9g\n", "qkv"[i], (long long)j,
                        grads[j], slope);
                wrong = "gradient";
            }
        }
    }
    free(values);
    free(grads);
    free(weights);
    return wrong;
}

TEST attention_gradients_are_the_slopes(void) {
    static const struct {
        int64_t heads, kv_heads, hd, window;
        int32_t offsets[3];
    } shapes[] = {{2, 1, 4, 0, {0, 5, 9}}, {3, 3, 3, 2, {0, 1, 9}}, {4, 2, 9, 3, {0, 8, 8}}};
    const ops_api* api = ops_in_double();
    test_random random = test_random_start("slopes");
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
        double_problem p;
        memset(&p, 0, sizeof p);
        p.api = api;
        p.tokens = 9;
        p.desc.heads = shapes[s].heads;
        p.desc.kv_heads = shapes[s].kv_heads;
        p.desc.head_dim = shapes[s].hd;
        p.desc.window = shapes[s].window;
        qlora_ctx_desc desc;
        memset(&desc, 0, sizeof desc);
        ASSERT_EQ(QLORA_OK, api->ctx_create(&desc, &p.ctx, QLORA_VERSION, QLORA_ABI));
        for (int i = 0; i < 9; i++) {
            bool kv = i == 1 || i == 2 || i == 7 || i == 8;
            int64_t cols = (kv ? p.desc.kv_heads : p.desc.heads) * p.desc.head_dim;
            ASSERT_EQ(QLORA_OK,
                      api->tensor_create(p.ctx, QLORA_F32, i == 4 ? p.desc.heads : p.tokens,
                                         i == 4 ? p.tokens : cols, &p.t[i]));
        }
        ASSERT_EQ(QLORA_OK, api->tensor_create(p.ctx, QLORA_I32, 1, 3, &p.seqs));
        ASSERT_EQ(QLORA_OK, api->tensor_write(p.ctx, &p.seqs, shapes[s].offsets, 12));
        const char* wrong = double_check(&p, &random);
        for (int i = 0; i < 9; i++) {
            api->tensor_destroy(p.ctx, &p.t[i]);
        }
        api->tensor_destroy(p.ctx, &p.seqs);
        ASSERT_EQ(QLORA_OK, api->ctx_destroy(p.ctx));
        if (wrong != NULL) {
            FAILm(wrong);
        }
    }
    PASS();
}

SUITE(attention_suite) {
    RUN_TEST(attention_gradients_are_the_slopes);
    RUN_ON(TEST_EVERYWHERE, attention_is_right);
    RUN_ON(TEST_ONE_EACH, attention_warpgroups);
    RUN_ON(TEST_ONE_EACH, attention_warpgroups_256);
    RUN_ON(TEST_ONE_FAKE, attention_without_warpgroups);
    RUN_ON(TEST_ONE_EACH, attention_shares_are_right);
    RUN_ON(TEST_ONE_EACH, attention_packing_changes_nothing);
    RUN_TEST(attention_order_changes_nothing);
    RUN_ON(TEST_EVERYWHERE, attention_unfused_is_right);
    RUN_ON(TEST_ONE_EACH, attention_graph_serves_any_packing);
    RUN_ON(TEST_ONE_EACH, attention_survives_bad_offsets);
    RUN_ON(TEST_ONE_EACH, attention_refuses);
    RUN_ON(TEST_FAKES, attention_is_prewarmed);
}
