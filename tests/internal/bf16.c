// bf16.c - mode BF16 on the CPU: products whose operands are rounded to bf16 against plain loops in
// f64, in every tier that this processor has, whatever the types, shapes and threads are.
#include "machines.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---- products

typedef enum bf16_weight {
    BF16_DENSE_F32,
    BF16_DENSE_BF16,
    BF16_DENSE_F16,
    BF16_NF4,
    BF16_FP8
} bf16_weight;

typedef struct bf16_case {
    int64_t m;
    int64_t n;
    int64_t k;
    bool ta;
    bool tb;
    qlora_dtype a;
    bf16_weight b;
    qlora_dtype c;
    float alpha;
    float beta;
    int64_t batch;
} bf16_case;

// Odd shapes, K that is no multiple of four, several ranges of K, one panel, edges.
static const bf16_case bf16_cases[] = {
    {16, 12, 4, false, true, QLORA_F32, BF16_DENSE_F32, QLORA_F32, 1, 0, 1},
    {33, 25, 6, false, true, QLORA_F32, BF16_DENSE_F32, QLORA_F32, 1, 0, 1},
    {9, 13, 1, false, false, QLORA_F32, BF16_DENSE_F32, QLORA_F32, 1, 1, 1},
    {101, 97, 391, false, true, QLORA_F32, BF16_DENSE_F32, QLORA_F32, 1, 1, 1},
    {100, 49, 403, true, false, QLORA_F32, BF16_DENSE_F16, QLORA_F32, 0.37f, -1, 1},
    {17, 100, 33, true, true, QLORA_F16, BF16_DENSE_F32, QLORA_F32, 1, 0, 1},
    {30, 215, 65, false, false, QLORA_BF16, BF16_DENSE_BF16, QLORA_BF16, 1, 0, 1},
    {30, 515, 70, false, false, QLORA_BF16, BF16_DENSE_BF16, QLORA_BF16, 0.7f, 0.5f, 1},
    {24, 20, 1290, false, true, QLORA_F32, BF16_DENSE_BF16, QLORA_F32, 1, 0, 1},
    {200, 16, 2900, false, true, QLORA_F32, BF16_DENSE_F32, QLORA_F32, 1, 0, 1},
    {1100, 3, 6500, false, true, QLORA_F32, BF16_DENSE_BF16, QLORA_F32, 1, 0, 1}, // slices of K
    {1030, 24, 10, false, true, QLORA_F32, BF16_DENSE_F32, QLORA_F32, 1, 0, 1},
    {11, 5, 70, false, false, QLORA_F32, BF16_DENSE_F32, QLORA_F32, 1, 1, 3},
    {19, 30, 41, true, false, QLORA_F32, BF16_DENSE_F32, QLORA_F32, 3, 1, 2},
    {48, 37, 67, false, true, QLORA_F32, BF16_NF4, QLORA_F32, 1, 0, 1},
    {48, 67, 37, false, false, QLORA_F32, BF16_NF4, QLORA_F32, 1, 1, 1},
    {40, 29, 192, false, true, QLORA_BF16, BF16_NF4, QLORA_F32, 1, 0, 1},
    {40, 192, 30, false, false, QLORA_F32, BF16_NF4, QLORA_F32, 0.3f, 0, 1},
    {20, 150, 272, false, true, QLORA_F32, BF16_FP8, QLORA_F32, 1, 0, 1},
    {20, 272, 151, false, false, QLORA_F32, BF16_FP8, QLORA_F32, 1, 1, 1},
    // few rows, whose operands stay as they are where weights are streamed
    {1, 70, 576, false, true, QLORA_F32, BF16_NF4, QLORA_F32, 1, 0, 1},
    {3, 40, 77, false, true, QLORA_F32, BF16_DENSE_F32, QLORA_F32, 1, 0, 1},
};

static qlora_cpu_tier bf16_tier;
static int32_t bf16_threads;
static const qlora__cpu_bf16* bf16_other; // replaces the kernels of the tier; NULL: none
static qlora__cpu_table bf16_table;

static void bf16_change(qlora_ctx_desc* desc) {
    desc->cpu_tier = bf16_tier;
    desc->threads = bf16_threads;
}

static qlora_ctx* bf16_open(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, bf16_change);
    if (ctx != NULL && bf16_other != NULL && ctx->cpu->gemm != NULL) {
        bf16_table = *ctx->cpu;
        bf16_table.bf16 = bf16_other;
        ctx->cpu = &bf16_table;
    }
    return ctx;
}

// A product with its operands, as tensors and as what they are worth.
typedef struct bf16_rig {
    qlora_ctx* ctx;
    qlora_tensor a;
    qlora_tensor b;
    qlora_tensor c;
    qlora_tensor memory;
    qlora_nf4 nf4;
    qlora__fp8_weight fp8;
    qlora__gemm g;
    float* values[3];
    bool few; // the product takes its operands as they are
} bf16_rig;

static bool bf16_tensor(bf16_rig* r, test_random* random, qlora_dtype dtype, int64_t batch,
                        int64_t rows, int64_t cols, qlora_tensor* out, float** values) {
    size_t n = (size_t)(batch * rows * cols);
    *values = (float*)malloc(n * sizeof **values + 4);
    for (size_t i = 0; *values != NULL && i < n; i++) { // normal ones would take half of the time
        (*values)[i] = (float)(3.4 * test_random_uniform(random) - 1.7);
    }
    bool ok =
        *values != NULL && test_tensor(r->ctx, dtype, batch * rows, cols, *values, out) == QLORA_OK;
    for (size_t i = 0; ok && i < n; i++) {
        (*values)[i] = (float)qlora__load(out->data, dtype, (int64_t)i);
    }
    return ok;
}

// The weight of a case, [N,K] or [K,N]; the values of one with codes replace those it was made of.
static bool bf16_coded(bf16_rig* r, const bf16_case* p, test_random* random) {
    int64_t rows = p->tb ? p->n : p->k;
    int64_t cols = p->tb ? p->k : p->n;
    qlora_nf4_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rows = rows;
    desc.cols = cols;
    bool ok = bf16_tensor(r, random, QLORA_F32, 1, rows, cols, &r->b, &r->values[1]);
    if (ok && p->b == BF16_NF4) {
        ok = qlora_nf4_create(r->ctx, &desc, &r->nf4) == QLORA_OK &&
             qlora_nf4_quantise(r->ctx, &r->b, &r->nf4) == QLORA_OK &&
             qlora_nf4_dequantise(r->ctx, &r->nf4, &r->b, true) == QLORA_OK;
        r->g.nf4 = &r->nf4;
    } else if (ok) {
        int64_t bytes = (int64_t)qlora__fp8_weight_bytes(rows, cols);
        ok = qlora_tensor_create(r->ctx, QLORA_U8, 1, bytes, &r->memory) == QLORA_OK;
        qlora__fp8_weight_wrap(r->ctx, rows, cols, &r->memory, &r->fp8);
        ok = ok && base_quantise(r->ctx, &r->b, &r->fp8) == QLORA_OK &&
             base_window(r->ctx, &r->fp8, 0, 0, &r->b) == QLORA_OK;
        r->g.fp8 = &r->fp8;
    }
    return ok && test_read(r->ctx, &r->b, r->values[1]);
}

static bool bf16_rig_make(const test_machine* machine, const bf16_case* p, bf16_rig* r) {
    static const qlora_dtype dense[] = {QLORA_F32, QLORA_BF16, QLORA_F16};
    test_random random = test_random_start("bf16_rig_make");
    memset(r, 0, sizeof *r);
    r->ctx = bf16_open(machine);
    bool coded = p->b >= BF16_NF4;
    bool ok = r->ctx != NULL &&
              bf16_tensor(r, &random, p->a, p->batch, p->ta ? p->k : p->m, p->ta ? p->m : p->k,
                          &r->a, &r->values[0]) &&
              (coded ? bf16_coded(r, p, &random)
                     : bf16_tensor(r, &random, dense[p->b], p->batch, p->tb ? p->n : p->k,
                                   p->tb ? p->k : p->n, &r->b, &r->values[1])) &&
              bf16_tensor(r, &random, p->c, p->batch, p->m, p->n, &r->c, &r->values[2]);
    if (!ok) {
        return false;
    }
    qlora__gemm* g = &r->g;
    g->ta = p->ta;
    g->tb = p->tb;
    g->M = p->m;
    g->N = p->n;
    g->K = p->k;
    g->A = r->a.data;
    g->B = coded ? NULL : r->b.data;
    g->C = r->c.data;
    g->lda = r->a.ld;
    g->ldb = r->b.ld;
    g->ldc = r->c.ld;
    g->batch = p->batch;
    g->sA = p->m * p->k;
    g->sB = p->n * p->k;
    g->sC = p->m * p->n;
    g->a_type = p->a;
    g->b_type = coded ? QLORA_BF16 : dense[p->b];
    g->out = p->c;
    g->alpha = p->alpha;
    g->beta = p->beta;
    g->bf16 = true;
    r->few = r->ctx->cpu->gemm != NULL && qlora__few_takes(g);
    if (coded && r->ctx->cpu->gemm == NULL) { // the portable loops have dequantised weights
        g->nf4 = NULL;
        g->fp8 = NULL;
        g->B = r->b.data;
        g->b_type = QLORA_F32;
    }
    return true;
}

static bool bf16_rig_free(const test_machine* machine, bf16_rig* r) {
    for (int i = 0; i < 3; i++) {
        free(r->values[i]);
    }
    return qlora_tensor_destroy(r->ctx, &r->a) == QLORA_OK &&
           qlora_tensor_destroy(r->ctx, &r->b) == QLORA_OK &&
           qlora_tensor_destroy(r->ctx, &r->c) == QLORA_OK &&
           qlora_tensor_destroy(r->ctx, &r->memory) == QLORA_OK &&
           qlora_nf4_destroy(r->ctx, &r->nf4) == QLORA_OK && test_close_ctx(machine, r->ctx);
}

// An operand of the definition, as doubles; the caller frees.
static double* bf16_operand(const float* values, int64_t n, float factor, bool round) {
    double* out = (double*)malloc((size_t)n * sizeof *out);
    for (int64_t i = 0; out != NULL && i < n; i++) {
        float x = factor * values[i];
        out[i] = (double)(round ? qlora__bf16_to(qlora__bf16_from(x)) : x);
    }
    return out;
}

// Whether element `at` of C is what the definition says. The bound is that of sums in f32 whose
// every step is off by one in the last bit, and of the type of C.
static bool bf16_element_is_right(const bf16_rig* r, const bf16_case* p, const double* x,
                                  const double* y, int64_t at) {
    int64_t batch = at / (p->m * p->n);
    int64_t i = at / p->n % p->m;
    int64_t j = at % p->n;
    const double* a = x + batch * p->m * p->k + (p->ta ? i : i * p->k);
    const double* b = y + batch * p->n * p->k + (p->tb ? j * p->k : j);
    int64_t next_a = p->ta ? p->m : 1;
    int64_t next_b = p->tb ? 1 : p->n;
    double sum = 0.0;
    double size = 0.0;
    for (int64_t k = 0; k < p->k; k++) {
        double product = a[k * next_a] * b[k * next_b];
        sum += product;
        size += fabs(product);
    }
    sum += (double)p->beta * (double)r->values[2][at];
    size += fabs((double)p->beta * (double)r->values[2][at]);
    double got = (double)qlora__load(r->c.data, p->c, at);
    double steps = 4.0 + sqrt((double)p->k); // errors of both signs
    double bound =
        steps * size * (1.0 / 8388608) + (p->c == QLORA_BF16 ? fabs(sum) * (1.0 / 256) : 0.0);
    if (!(fabs(got - sum) <= bound)) {
        fprintf(stderr, "row %d, column %d: %.9g, expected %.9g, bound %.3g\n", (int)i, (int)j, got,
                sum, bound);
        return false;
    }
    return true;
}

static bool bf16_is_right(const bf16_rig* r, const bf16_case* p) {
    double* x = bf16_operand(r->values[0], p->batch * p->m * p->k, p->alpha, !r->few);
    double* y = bf16_operand(r->values[1], p->batch * p->n * p->k, 1.0f, !r->few);
    bool right = x != NULL && y != NULL;
    for (int64_t at = 0; right && at < p->batch * p->m * p->n; at++) {
        right = bf16_element_is_right(r, p, x, y, at);
    }
    free(x);
    free(y);
    return right;
}

// Runs a case in bf16_tier; the bits must not depend on the threads.
static bool bf16_holds_in_tier(const test_machine* machine, const bf16_case* p) {
    size_t bytes = (size_t)(p->batch * p->m * p->n) * qlora_dtype_bytes(p->c);
    char* first = (char*)malloc(bytes);
    bool ok = first != NULL;
    for (bf16_threads = 1; ok && bf16_threads <= 3; bf16_threads++) {
        bf16_rig r;
        ok = bf16_rig_make(machine, p, &r) && qlora__gemm_cpu(r.ctx, &r.g) == QLORA_OK;
        if (ok && bf16_threads == 1) {
            ok = bf16_is_right(&r, p);
            memcpy(first, r.c.data, bytes);
        }
        ok = ok && memcmp(first, r.c.data, bytes) == 0;
        ok = bf16_rig_free(machine, &r) && ok;
        if (!ok) {
            fprintf(stderr, "tier %s, %d threads\n", qlora_cpu_tier_name(bf16_tier),
                    (int)bf16_threads);
        }
    }
    free(first);
    return ok;
}

static bool bf16_case_holds(const test_machine* machine, const bf16_case* p) {
    bool ok = true;
    for (int t = 1; ok && t < QLORA_CPU_TIER_COUNT; t++) {
        bf16_tier = (qlora_cpu_tier)t;
        ok = !qlora_cpu_tier_usable(bf16_tier) || bf16_holds_in_tier(machine, p);
    }
    return ok;
}

TEST bf16_products_are_right(const test_machine* machine) {
    for (size_t i = 0; i < sizeof bf16_cases / sizeof bf16_cases[0]; i++) {
        static char name[32]; // printed after the test has returned
        snprintf(name, sizeof name, "case %d", (int)i);
        ASSERTm(name, bf16_case_holds(machine, &bf16_cases[i]));
    }
    PASS();
}

TEST bf16_products_of_random_shapes(const test_machine* machine) {
    test_random random = test_random_start("bf16_products_of_random_shapes");
    for (int i = 0; i < (test_brief() ? 4 : 30); i++) {
        bf16_case p;
        memset(&p, 0, sizeof p);
        p.m = 1 + (int64_t)test_random_below(&random, 120);
        p.n = 1 + (int64_t)test_random_below(&random, 230);
        p.k = 1 + (int64_t)test_random_below(&random, 300);
        p.b = (bf16_weight)test_random_below(&random, 5);
        p.ta = test_random_below(&random, 2) != 0;
        p.tb = test_random_below(&random, 2) != 0;
        p.alpha = test_random_below(&random, 2) != 0 ? 1.0f : -1.7f;
        p.beta = test_random_below(&random, 2) != 0 ? 1.0f : 0.0f;
        p.batch = p.b < BF16_NF4 ? 1 + (int64_t)test_random_below(&random, 2) : 1;
        static char name[96];
        snprintf(name, sizeof name, "%d x %d x %d, weight %d", (int)p.m, (int)p.n, (int)p.k,
                 (int)p.b);
        ASSERTm(name, bf16_case_holds(machine, &p));
    }
    PASS();
}

// A NaN or an infinity in a row of A reaches that row of C, and no other.
TEST bf16_keeps_what_is_not_finite(const test_machine* machine) {
    static const bf16_case p = {21,        17, 75, false, true, QLORA_F32, BF16_DENSE_F32,
                                QLORA_F32, 1,  0,  1};
    static const uint32_t spoilt[] = {0x7fffffffu, 0xff800001u, 0x7f800000u, 0x7f7fffffu};
    for (int t = 1; t < QLORA_CPU_TIER_COUNT; t++) {
        bf16_tier = (qlora_cpu_tier)t;
        bf16_threads = 1;
        for (size_t n = 0; qlora_cpu_tier_usable(bf16_tier) && n < 8; n++) {
            size_t i = n % 4;
            int64_t column = n < 4 ? 3 : 74; // among many, and in the rest behind them
            bf16_rig r;
            float before[21 * 17];
            ASSERT(bf16_rig_make(machine, &p, &r));
            ASSERT_EQ(QLORA_OK, qlora__gemm_cpu(r.ctx, &r.g));
            memcpy(before, r.c.data, sizeof before);
            memcpy((float*)r.a.data + 5 * 75 + column, &spoilt[i], 4);
            ASSERT_EQ(QLORA_OK, qlora__gemm_cpu(r.ctx, &r.g));
            const float* after = (const float*)r.c.data;
            for (int at = 0; at < 21 * 17; at++) {
                bool row = at / 17 == 5;
                ASSERT(row || memcmp(&before[at], &after[at], 4) == 0);
                ASSERT_EQ(row && i < 2, isnan(after[at]) != 0);
                ASSERT_EQ(row && i >= 2, isinf(after[at]) != 0); // the largest f32 is rounded up
            }
            ASSERT(bf16_rig_free(machine, &r));
        }
    }
    PASS();
}

// ---- LoRA linear

enum { BF16_ROWS = 61, BF16_IN = 70, BF16_PARTS = 3, BF16_MOST = 160 };

typedef struct bf16_linear {
    qlora_tensor x;
    qlora_tensor y;
    qlora_tensor dy;
    qlora_tensor dx;
    qlora_tensor weight[BF16_PARTS];
    qlora_tensor a[BF16_PARTS];
    qlora_tensor sb[BF16_PARTS];
    qlora_linear_desc linear;
} bf16_linear;

static bool bf16_random(qlora_ctx* ctx, test_random* random, int64_t rows, int64_t cols,
                        qlora_tensor* out) {
    static float values[BF16_MOST * BF16_MOST];
    test_random_fill(random, values, BF16_MOST * BF16_MOST, 1.0f);
    return test_tensor(ctx, QLORA_F32, rows, cols, values, out) == QLORA_OK;
}

// No size is a multiple of four.
static bool bf16_linear_make(qlora_ctx* ctx, bf16_linear* l) {
    static const int64_t outs[BF16_PARTS] = {50, 33, 21};
    static const int64_t ranks[BF16_PARTS] = {6, 5, 0};
    test_random random = test_random_start("bf16_linear_make");
    bool ok = true;
    memset(l, 0, sizeof *l);
    l->linear.in = BF16_IN;
    l->linear.count = BF16_PARTS;
    for (int i = 0; i < BF16_PARTS && ok; i++) {
        qlora_linear_part* p = &l->linear.parts[i];
        p->out = outs[i];
        p->rank = ranks[i];
        p->dense = &l->weight[i];
        p->a = &l->a[i];
        p->sb = &l->sb[i];
        ok = bf16_random(ctx, &random, outs[i], BF16_IN, &l->weight[i]) &&
             bf16_random(ctx, &random, ranks[i], BF16_IN, &l->a[i]) &&
             bf16_random(ctx, &random, outs[i], ranks[i], &l->sb[i]);
    }
    int64_t pad = qlora_linear_pad(&l->linear);
    return ok && bf16_random(ctx, &random, BF16_ROWS, BF16_IN + pad, &l->x) &&
           bf16_random(ctx, &random, BF16_ROWS, 104, &l->y) &&
           bf16_random(ctx, &random, BF16_ROWS, 104 + pad, &l->dy) &&
           bf16_random(ctx, &random, BF16_ROWS, BF16_IN, &l->dx);
}

static bool bf16_linear_free(qlora_ctx* ctx, bf16_linear* l) {
    bool ok = qlora_tensor_destroy(ctx, &l->x) == QLORA_OK &&
              qlora_tensor_destroy(ctx, &l->y) == QLORA_OK &&
              qlora_tensor_destroy(ctx, &l->dy) == QLORA_OK &&
              qlora_tensor_destroy(ctx, &l->dx) == QLORA_OK;
    for (int i = 0; i < BF16_PARTS; i++) {
        ok = qlora_tensor_destroy(ctx, &l->weight[i]) == QLORA_OK && ok;
        ok = qlora_tensor_destroy(ctx, &l->a[i]) == QLORA_OK && ok;
        ok = qlora_tensor_destroy(ctx, &l->sb[i]) == QLORA_OK && ok;
    }
    return ok;
}

// y and dx, from panels that the products share, or from separate products.
static qlora_result bf16_linear_run(qlora_ctx* ctx, bf16_linear* l, bool shared) {
    QLORA__ENTER(ctx, "bf16_linear_run");
    qlora_tensor x;
    qlora_tensor dy;
    QLORA__TRY(qlora__tensor_view(ctx, &l->x, 0, BF16_ROWS, 0, BF16_IN, &x));
    QLORA__TRY(qlora__tensor_view(ctx, &l->dy, 0, BF16_ROWS, 0, 104, &dy));
    if (shared) {
        QLORA__TRY(qlora__linear_forward(ctx, QLORA__MATH_BF16, &l->linear, 0u, &l->x, &l->y));
        return qlora__leave(
            ctx, qlora__linear_u_dx(ctx, QLORA__MATH_BF16, &l->linear, &l->dy, &dy, false,
                                         &l->dx));
    }
    QLORA__TRY(qlora__linear_z(ctx, QLORA__MATH_BF16, &l->linear, &l->x, &x));
    QLORA__TRY(qlora__linear_forward_plain(ctx, QLORA__MATH_BF16, &l->linear, &l->x, &x, &l->y));
    QLORA__TRY(qlora__linear_u(ctx, QLORA__MATH_BF16, &l->linear, &l->dy, &dy));
    return qlora__leave(ctx,
                        qlora__linear_dx(ctx, QLORA__MATH_BF16, &l->linear, &l->dy, &dy, false,
                                         &l->dx));
}

// Whether both have the same bits in bf16_tier.
static bool bf16_shares_in_tier(const test_machine* machine) {
    static float out[2][4 * BF16_MOST * BF16_MOST];
    bool ok = true;
    bf16_threads = 2;
    for (int shared = 0; ok && shared < 2; shared++) {
        qlora_ctx* ctx = bf16_open(machine);
        bf16_linear l;
        ok = ctx != NULL && bf16_linear_make(ctx, &l) &&
             qlora__linear_in_panels(ctx, &l.linear, &l.x, 80, true) &&
             bf16_linear_run(ctx, &l, shared != 0) == QLORA_OK;
        const qlora_tensor* results[] = {&l.x, &l.y, &l.dy, &l.dx};
        float* to = out[shared];
        for (int i = 0; ok && i < 4; i++) {
            ok = test_read(ctx, results[i], to);
            to += results[i]->rows * results[i]->cols;
        }
        ok = ok && bf16_linear_free(ctx, &l) && test_close_ctx(machine, ctx);
    }
    return ok && memcmp(out[0], out[1], sizeof out[0]) == 0;
}

TEST bf16_panels_are_shared(const test_machine* machine) {
    for (int t = 2; t < QLORA_CPU_TIER_COUNT; t++) {
        bf16_tier = (qlora_cpu_tier)t;
        ASSERT(!qlora_cpu_tier_usable(bf16_tier) || bf16_shares_in_tier(machine));
    }
    PASS();
}

// ---- layouts

// Kernels in plain C with the panels of tiers that this processor lacks, so that what packs them is
// tested everywhere: pairs of k, all lines side by side (avx512_bf16, and the columns of amx), and
// 32 k of a line (the rows of amx).

static int64_t layout_pairs(int64_t k, int64_t line, int64_t width) {
    return k / 2 * 2 * width + line * 2 + k % 2;
}

static int64_t layout_rows(int64_t k, int64_t line, int64_t width) {
    return k / 32 * 32 * width + line * 32 + k % 32;
}

typedef int64_t (*layout_fn)(int64_t k, int64_t line, int64_t width);

static void layout_lines(layout_fn at, int64_t group, const uint16_t* const* lines, int64_t n,
                         int64_t width, int64_t line, uint16_t* out) {
    for (int64_t k = 0; k < qlora__ceil_div(n, group) * group; k++) {
        for (int64_t i = 0; i < 8; i++) {
            out[at(k, line + i, width)] = k < n ? lines[i][k] : 0;
        }
    }
}

static void layout_lines_8(const uint16_t* const* lines, int64_t n, int64_t width, int64_t line,
                           uint16_t* out) {
    layout_lines(layout_pairs, 8, lines, n, width, line, out);
}

static void layout_lines_32(const uint16_t* const* lines, int64_t n, int64_t width, int64_t line,
                            uint16_t* out) {
    layout_lines(layout_pairs, 32, lines, n, width, line, out);
}

static void layout_lines_rows(const uint16_t* const* lines, int64_t n, int64_t width, int64_t line,
                              uint16_t* out) {
    layout_lines(layout_rows, 32, lines, n, width, line, out);
}

static void layout_quad(layout_fn at, const uint16_t* const* rows, int64_t k, int64_t n,
                        int64_t width, int64_t jump, uint16_t* out) {
    for (int64_t i = 0; i < n; i++) {
        for (int64_t j = 0; j < 4; j++) {
            out[i / width * jump + at(k + j, i % width, width)] = rows[j][i];
        }
    }
}

static void layout_quad_pairs(const uint16_t* const* rows, int64_t k, int64_t n, int64_t width,
                              int64_t jump, uint16_t* out) {
    layout_quad(layout_pairs, rows, k, n, width, jump, out);
}

static void layout_quad_rows(const uint16_t* const* rows, int64_t k, int64_t n, int64_t width,
                             int64_t jump, uint16_t* out) {
    layout_quad(layout_rows, rows, k, n, width, jump, out);
}

static void layout_multiply(layout_fn left, int64_t rows, int64_t cols, int64_t steps,
                            const float* a, const float* b, float* c, int64_t ldc, bool add) {
    const uint16_t* at = (const uint16_t*)(const void*)a;
    const uint16_t* bt = (const uint16_t*)(const void*)b;
    for (int64_t i = 0; i < rows && !add; i++) {
        memset(c + i * ldc, 0, (size_t)cols * sizeof *c);
    }
    for (int64_t k = 0; k < steps; k++) {
        float line[48];
        for (int64_t j = 0; j < cols; j++) {
            line[j] = qlora__bf16_to(bt[layout_pairs(k, j, cols)]);
        }
        for (int64_t i = 0; i < rows; i++) {
            float x = qlora__bf16_to(at[left(k, i, rows)]);
            for (int64_t j = 0; j < cols; j++) {
                c[i * ldc + j] += x * line[j];
            }
        }
    }
}

#define LAYOUT_TILE(name, left, rows, cols)                                                        \
    static void name(int64_t steps, const float* a, const float* b, float* c, int64_t ldc,         \
                     bool add) {                                                                   \
        layout_multiply(left, rows, cols, steps, a, b, c, ldc, add);                               \
    }

LAYOUT_TILE(layout_tile_48, layout_pairs, 8, 48)
LAYOUT_TILE(layout_tile_16, layout_pairs, 8, 16)
LAYOUT_TILE(layout_amx_32, layout_rows, 32, 32)
LAYOUT_TILE(layout_amx_16, layout_rows, 32, 16)

#undef LAYOUT_TILE

static void layout_round(const float* from, float factor, int64_t n, uint16_t* to) {
    for (int64_t i = 0; i < n; i++) {
        to[i] = qlora__bf16_from(from[i] * factor);
    }
}

static void layout_nf4(const float* levels, float scale, const uint8_t* codes, int64_t n,
                       uint16_t* out) {
    for (int64_t i = 0; i < n; i++) {
        out[i] = qlora__bf16_from(levels[qlora__nf4_code_at(codes, i)] * scale);
    }
}

static const qlora__cpu_bf16 layout_tables[] = {
    {{48, 192, 8, 48, layout_tile_48, 16, layout_tile_16},
     8,
     8,
     layout_round,
     layout_nf4,
     {layout_lines_8, layout_quad_pairs},
     {layout_lines_8, layout_quad_pairs},
     NULL,
     NULL},
    {{512, 192, 32, 32, layout_amx_32, 16, layout_amx_16},
     32,
     8,
     layout_round,
     layout_nf4,
     {layout_lines_rows, layout_quad_rows},
     {layout_lines_32, layout_quad_pairs},
     NULL,
     NULL},
#ifdef QLORA__X86_BF16 // with what packs in these tiers, which needs AVX2 only
    {{400, 192, 8, 48, layout_tile_48, 16, layout_tile_16},
     8,
     8,
     qlora__avx2_bf16_round,
     qlora__avx2_bf16_nf4,
     {qlora__avx2_bf16_lines, qlora__avx2_bf16_quad},
     {qlora__avx2_bf16_lines, qlora__avx2_bf16_quad},
     NULL,
     NULL},
    {{64, 192, 32, 32, layout_amx_32, 16, layout_amx_16},
     32,
     8,
     qlora__avx2_bf16_round,
     qlora__avx2_bf16_nf4,
     {qlora__amx_rows, qlora__amx_rows_quad},
     {qlora__amx_columns, qlora__avx2_bf16_quad},
     NULL,
     NULL},
#endif
};

// The tier whose other kernels are used: one with packed products; PORTABLE if there is none.
static qlora_cpu_tier layout_tier(void) {
    return qlora_cpu_tier_usable(QLORA_CPU_TIER_NEON)   ? QLORA_CPU_TIER_NEON
           : qlora_cpu_tier_usable(QLORA_CPU_TIER_AVX2) ? QLORA_CPU_TIER_AVX2
                                                        : QLORA_CPU_TIER_PORTABLE;
}

TEST bf16_layouts_are_packed(const test_machine* machine) {
    for (size_t i = 0; i < sizeof layout_tables / sizeof layout_tables[0]; i++) {
        for (size_t j = 0; j < sizeof bf16_cases / sizeof bf16_cases[0]; j++) {
            static char name[48]; // printed after the test has returned
            snprintf(name, sizeof name, "layout %d, case %d", (int)i, (int)j);
            bf16_tier = layout_tier();
            bf16_other = &layout_tables[i];
            const bf16_case* p = &bf16_cases[j];
            // Emulators take minutes for the large ones.
            bool skipped = test_brief() && p->m * p->n * p->k > 150000;
            bool ok =
                skipped || bf16_tier == QLORA_CPU_TIER_PORTABLE || bf16_holds_in_tier(machine, p);
            bf16_other = NULL;
            ASSERTm(name, ok);
        }
    }
    PASS();
}

TEST bf16_layouts_are_shared(const test_machine* machine) {
    for (size_t i = 0; i < sizeof layout_tables / sizeof layout_tables[0]; i++) {
        bf16_tier = layout_tier();
        bf16_other = &layout_tables[i];
        bool ok = bf16_tier == QLORA_CPU_TIER_PORTABLE || bf16_shares_in_tier(machine);
        bf16_other = NULL;
        ASSERT(ok);
    }
    PASS();
}

// ---- tiers

// Where nothing is rounded, tiers that differ in bf16 run the same kernels.
TEST bf16_tiers_share_what_is_f32(void) {
    for (int i = 0; i < QLORA__CPU_TABLES; i++) {
        const qlora__cpu_table* table = &qlora__cpu_tables[i];
        for (int j = 0; j < QLORA__CPU_TABLES; j++) {
            const qlora__cpu_table* other = &qlora__cpu_tables[j];
            bool same = strcmp(table->f32_name, other->f32_name) == 0;
            ASSERT_EQ(same, table->gemm == other->gemm && table->rows == other->rows &&
                                table->stream == other->stream);
        }
        ASSERT_EQ(table->bf16 != NULL, strcmp(table->name, table->f32_name) != 0);
    }
    PASS();
}

SUITE(bf16_suite) {
    RUN_ON(TEST_CPU, bf16_products_are_right);
    RUN_ON(TEST_CPU, bf16_products_of_random_shapes);
    RUN_ON(TEST_CPU, bf16_keeps_what_is_not_finite);
    RUN_ON(TEST_CPU, bf16_panels_are_shared);
    RUN_ON(TEST_CPU, bf16_layouts_are_packed);
    RUN_ON(TEST_CPU, bf16_layouts_are_shared);
    RUN_TEST(bf16_tiers_share_what_is_f32);
}
