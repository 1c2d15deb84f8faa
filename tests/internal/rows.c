// rows.c - white-box tests of the row functions: every tier that this processor has against the
// portable one, the polynomials against double, attention in blocks, and the tiles of products.
#include "test.h"

#include "reference.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ROW_LENGTH 131 // a multiple of no vector, and longer than several
#define ROW_INPUTS 6

// ---- every function against the portable one ----

typedef struct row_rig {
    const qlora__cpu_rows* rows;
    const float* in[ROW_INPUTS];
    float out[4][ROW_LENGTH + 1]; // the last element must stay as it is
    double sum;
    int64_t n;
} row_rig;

static void run_point(row_rig* r, qlora__point_kind kind) {
    r->rows->point[kind](r->in[0], r->in[1], 1.7f, r->n, r->out[0]);
}

static void run_silu(row_rig* r) {
    run_point(r, QLORA__POINT_SILU);
}

static void run_silu_grad(row_rig* r) {
    run_point(r, QLORA__POINT_SILU_GRAD);
}

static void run_swiglu(row_rig* r) {
    run_point(r, QLORA__POINT_SWIGLU);
}

static void run_geglu(row_rig* r) {
    run_point(r, QLORA__POINT_GEGLU);
}

static void run_cap(row_rig* r) {
    run_point(r, QLORA__POINT_CAP);
}

static void run_exact_points(row_rig* r) {
    r->rows->point[QLORA__POINT_MUL](r->in[0], r->in[1], 0, r->n, r->out[0]);
    r->rows->point[QLORA__POINT_ADD](r->in[0], r->in[1], 0, r->n, r->out[1]);
    r->rows->point[QLORA__POINT_SCALE](r->in[0], NULL, 0.3f, r->n, r->out[2]);
    r->rows->point[QLORA__POINT_FILL](NULL, NULL, 0.7f, r->n, r->out[3]);
}

static void run_conversions(row_rig* r) {
    uint16_t half[2][ROW_LENGTH];
    r->rows->store(r->in[0], r->n, half[0], QLORA_BF16);
    r->rows->store(r->in[0], r->n, half[1], QLORA_F16);
    r->rows->load(half[0], QLORA_BF16, r->n, r->out[0]);
    r->rows->load(half[1], QLORA_F16, r->n, r->out[1]);
    for (int64_t i = 0; i < r->n; i++) {
        r->out[2][i] = (float)half[0][i];
    }
}

static void run_gated(row_rig* r, bool gelu) {
    qlora__gated_row row;
    row.dh = r->in[1];
    row.gate = r->in[0];
    row.up = r->in[2];
    row.dgate = r->out[0];
    row.dup = r->out[1];
    row.h = r->n % 2 != 0 ? r->out[2] : NULL;
    row.n = r->n;
    (gelu ? r->rows->geglu_grad : r->rows->swiglu_grad)(&row);
}

static void run_swiglu_grad(row_rig* r) {
    run_gated(r, false);
}

static void run_geglu_grad(row_rig* r) {
    run_gated(r, true);
}

static void run_sums(row_rig* r) {
    r->out[0][0] = (float)r->rows->squares(r->in[0], r->n, 1);
    r->out[1][0] = (float)r->rows->dot(r->in[0], r->in[0], r->n, 2);
    r->out[2][0] = (float)r->rows->dot3(r->in[0], r->in[0], r->in[3], r->n, 3);
    r->out[3][0] = r->rows->top(r->in[0], r->n, -1);
}

static void run_norm(row_rig* r) {
    r->rows->norm(r->in[0], 0.7f, r->in[1], r->n, r->out[0]);
}

static void run_norm_grad(row_rig* r) {
    qlora__norm_row row;
    row.dy = r->in[0];
    row.w = r->in[1];
    row.x = r->in[2];
    row.dres = r->n % 2 != 0 ? r->in[4] : NULL;
    row.rstd = 0.7f;
    row.pull = 0.2f;
    row.n = r->n;
    row.dx = r->out[0];
    r->rows->norm_grad(&row);
}

static void run_rope(row_rig* r) {
    memcpy(r->out[0], r->in[0], (size_t)r->n * sizeof(float));
    memcpy(r->out[1], r->in[1], (size_t)r->n * sizeof(float));
    r->rows->rope(r->out[0], r->out[1], r->in[2], r->in[4], -1, r->n);
}

static void run_exps(row_rig* r) {
    r->sum = r->rows->exps(r->in[0], 4.5f, r->n, r->out[0], 0.25);
    r->out[1][0] = (float)r->sum;
    r->out[2][0] = (float)r->rows->exps(r->in[0], 4.5f, r->n, NULL, 0.25);
}

static void run_shares(row_rig* r) {
    r->rows->shares(r->in[0], 3.3f, 0.4f, 1.1f, r->n, r->out[0]);
}

static void run_gradients(row_rig* r) {
    r->rows->softmax_grad(r->in[0], r->in[1], 0.125f, r->n, r->out[0]);
    memcpy(r->out[1], r->in[1], (size_t)r->n * sizeof(float));
    r->rows->cap_grad(r->in[3], 2.0f, r->n, r->out[1]);
}

static void run_adamw(row_rig* r) {
    qlora__adamw_row row;
    memset(&row, 0, sizeof row);
    float* at[4] = {r->out[0], r->out[1], r->out[2], r->out[3]};
    for (int i = 0; i < 4; i++) {
        memcpy(at[i], r->in[i], (size_t)r->n * sizeof(float));
    }
    row.param = at[0];
    row.grad = at[1];
    row.m = at[2];
    row.v = at[3];
    row.n = r->n;
    row.clip = 0.6f;
    row.decay = 1e-3f;
    row.beta2 = 0.999f;
    row.one_minus_beta1 = 0.1f;
    row.one_minus_beta2 = 0.001f;
    row.step_size = 2e-3f;
    row.root_correction = 0.3f;
    row.eps = 1e-8f;
    r->rows->adamw(&row);
}

static void run_nf4(row_rig* r) {
    uint8_t codes[(ROW_LENGTH + 1) / 2];
    for (size_t i = 0; i < sizeof codes; i++) {
        codes[i] = (uint8_t)(i * 37 + 11);
    }
    r->rows->nf4(codes, qlora__nf4_levels, 0.37f, r->n, r->out[0]);
}

static void run_keep(row_rig* r) {
    qlora__keep_row row;
    memset(&row, 0, sizeof row);
    row.counter[0] = 0xfffffffdu;
    row.counter[1] = 77;
    row.counter[2] = 0x80000001u;
    row.counter[3] = 12345;
    row.key[0] = 0x89abcdefu;
    row.key[1] = (uint32_t)r->n;
    row.threshold = 0x90000000u;
    row.scale = 1.5f;
    row.n = r->n;
    row.factor = r->out[0];
    r->rows->keep(&row);
}

// p and ds of attention; the portable tier has no such function.
static void run_scores(row_rig* r) {
    qlora__score_row row;
    row.s = r->in[4];
    row.dp = r->in[1];
    row.lse = r->in[3][0];
    row.dot = r->in[2][0];
    row.cap = r->n % 2 != 0 ? 3.0f : 0.0f;
    row.n = r->n;
    row.p = r->out[0];
    row.ds = r->out[1];
    if (r->rows->scores != NULL) {
        r->rows->scores(&row);
        return;
    }
    for (int64_t i = 0; i < r->n; i++) {
        float t = row.cap > 0 ? row.s[i] / row.cap : 0;
        row.p[i] = expf(row.s[i] - row.lse);
        row.ds[i] = row.p[i] * (row.dp[i] - row.dot) * (1 - t * t);
    }
}

// The largest difference from the portable tier, relative to the larger of the value and 1: 0 for
// the same bits. Products that cancel are why it is more than a few times 6e-8.
typedef struct row_case {
    const char* name;
    void (*run)(row_rig* r);
    double limit;
    bool special; // is also run with infinities and NaN
} row_case;

static const row_case row_cases[] = {
    {"exact", run_exact_points, 0, true},
    {"conversions", run_conversions, 0, true},
    {"nf4", run_nf4, 0, false},
    {"keep", run_keep, 0, false},
    {"norm", run_norm, 0, true},
    {"silu", run_silu, 1e-6, true},
    {"silu_grad", run_silu_grad, 2e-6, true},
    {"swiglu", run_swiglu, 1e-6, true},
    {"geglu", run_geglu, 2e-6, true},
    {"cap", run_cap, 1e-6, true},
    {"swiglu_grad", run_swiglu_grad, 2e-6, true},
    {"geglu_grad", run_geglu_grad, 4e-6, true},
    {"sums", run_sums, 1e-6, false},
    {"norm_grad", run_norm_grad, 2e-6, true},
    {"rope", run_rope, 2e-6, true},
    {"exps", run_exps, 4e-7, false},
    {"shares", run_shares, 4e-7, true},
    {"gradients", run_gradients, 2e-6, true},
    {"adamw", run_adamw, 1e-6, false},
    {"scores", run_scores, 4e-6, false},
};

static bool row_agrees(const row_case* c, const row_rig* wanted, const row_rig* got) {
    for (int o = 0; o < 4; o++) {
        for (int64_t i = 0; i <= wanted->n; i++) { // and the element after the last
            float a = wanted->out[o][i];
            float b = got->out[o][i];
            double most = fmax(1.0, fabs((double)a));
            bool same = c->limit == 0 ? memcmp(&a, &b, sizeof a) == 0
                                      : a == b || fabs((double)a - (double)b) <= c->limit * most;
            if (!same && !(isnan(a) && isnan(b))) {
                printf("    %s, n %d, output %d, element %d: portable %.9g, tier %.9g\n", c->name,
                       (int)wanted->n, o, (int)i, (double)a, (double)b);
                return false;
            }
        }
    }
    return true;
}

// Runs a case on a tier and on the portable one, with rows that start anywhere.
static bool row_case_holds(const row_case* c, const qlora__cpu_rows* rows, const float* data,
                           int64_t n, int64_t offset) {
    row_rig rig[2];
    for (int i = 0; i < 2; i++) {
        memset(&rig[i], 0x55, sizeof rig[i]);
        rig[i].rows = i == 0 ? &qlora__rows_portable : rows;
        rig[i].n = n;
        for (int k = 0; k < ROW_INPUTS; k++) {
            rig[i].in[k] = data + k * 2 * ROW_LENGTH + offset + k % 3;
        }
        c->run(&rig[i]);
    }
    return row_agrees(c, &rig[0], &rig[1]);
}

// Input 3 is from 0 to 2, input 4 from -2 to 2; the others are normal with deviation 3.
static void row_data(test_random* random, float* data) {
    for (int i = 0; i < ROW_INPUTS * 2 * ROW_LENGTH; i++) {
        int k = i / (2 * ROW_LENGTH);
        double x = 3 * test_random_normal(random);
        double u = test_random_uniform(random);
        data[i] = (float)(k == 3 ? 2 * u : k == 4 ? 4 * u - 2 : x);
    }
}

TEST tiers_follow_the_portable_rows(void) {
    // the last three are in the middle between two bf16 numbers
    static const float special[] = {NAN,   INFINITY, -INFINITY,   1e30f,       -1e30f,
                                    300,   -300,     0,           -0.0f,       1e-40f,
                                    65504, 88.5f,    1.00390625f, 1.01171875f, -1.01953125f};
    float data[ROW_INPUTS * 2 * ROW_LENGTH];
    test_random random = test_random_start("rows");
    for (int t = 1; t < QLORA__CPU_TABLES; t++) {
        const qlora__cpu_table* table = &qlora__cpu_tables[t];
        if (!table->present()) {
            continue;
        }
        for (size_t c = 0; c < sizeof row_cases / sizeof row_cases[0]; c++) {
            row_data(&random, data);
            for (int64_t n = 0; n <= ROW_LENGTH - 4; n += n < 40 ? 1 : 29) {
                ASSERTm(table->name, row_case_holds(&row_cases[c], table->rows, data, n, n % 4));
            }
            for (int i = 0; row_cases[c].special && i < 2 * ROW_LENGTH; i++) {
                data[i] = special[i % (int)(sizeof special / sizeof special[0])];
            }
            ASSERTm(table->name, row_case_holds(&row_cases[c], table->rows, data, 61, 0));
        }
    }
    PASS();
}

// ---- e^x and its relatives against double ----

typedef struct curve {
    const char* name;
    double (*exact)(double x);
    qlora__point_kind kind; // KINDS: e^x
    double from;
    double to;
    double limit; // in units of the last place of the exact value
} curve;

static double exact_silu(double x) {
    double slope = 0.0;
    return ref_activate(REF_SILU, x, &slope);
}

static double exact_gelu(double x) {
    double slope = 0.0;
    return ref_activate(REF_GELU, x, &slope);
}

static const curve curves[] = {
    {"exp", exp, QLORA__POINT_KINDS, -87.33, 0, 1.1},
    {"exp", exp, QLORA__POINT_KINDS, 0, 88.37, 1.1},
    {"silu", exact_silu, QLORA__POINT_SILU, -80, 20, 3.5},
    {"tanh", tanh, QLORA__POINT_CAP, -10, 10, 2.5},
    {"tanh", tanh, QLORA__POINT_CAP, -0.7, 0.7, 2.5},
    {"gelu", exact_gelu, QLORA__POINT_GEGLU, -1, 10, 5},
};

static double ulp_of(double x) {
    int exponent = 0;
    frexp(x, &exponent);
    return ldexp(1.0, (exponent < -125 ? -125 : exponent) - 24);
}

TEST curves_hold_their_limits(void) {
    enum { PIECE = 500 };
    float x[PIECE];
    float y[PIECE];
    float one[PIECE];
    int pieces = test_brief() ? 20 : 200;
    for (int i = 0; i < PIECE; i++) {
        one[i] = 1.0f;
    }
    for (int t = 1; t < QLORA__CPU_TABLES; t++) {
        const qlora__cpu_table* table = &qlora__cpu_tables[t];
        for (size_t c = 0; table->present() && c < sizeof curves / sizeof curves[0]; c++) {
            const curve* f = &curves[c];
            double worst = 0;
            for (int piece = 0; piece < pieces; piece++) {
                for (int i = 0; i < PIECE; i++) {
                    double share = ((double)piece * PIECE + i + 0.37) / ((double)pieces * PIECE);
                    x[i] = (float)(f->from + share * (f->to - f->from));
                }
                if (f->kind == QLORA__POINT_KINDS) {
                    table->rows->exps(x, 0.0f, PIECE, y, 0);
                } else {
                    table->rows->point[f->kind](x, one, 1.0f, PIECE, y);
                }
                for (int i = 0; i < PIECE; i++) {
                    double exact = f->exact((double)x[i]);
                    worst = fmax(worst, fabs((double)y[i] - exact) / ulp_of(exact));
                }
            }
            if (!(worst <= f->limit)) {
                printf("    %s, %s from %g to %g: %.3f ulp\n", table->name, f->name, f->from, f->to,
                       worst);
            }
            ASSERTm(f->name, worst <= f->limit);
        }
    }
    PASS();
}

// Below the range of e^x the result is 0, above it stays finite, and a NaN stays a NaN.
TEST exps_have_ends(void) {
    for (int t = 1; t < QLORA__CPU_TABLES; t++) {
        const qlora__cpu_table* table = &qlora__cpu_tables[t];
        const float x[8] = {-87.4f, -1e30f, -3e38f, -INFINITY, 89.0f, 1e30f, 0.0f, NAN};
        float y[8];
        if (!table->present()) {
            continue;
        }
        double sum = table->rows->exps(x, 0.0f, 8, y, 0);
        for (int i = 0; i < 4; i++) {
            ASSERT_EQ_FMT(0.0, (double)y[i], "%g");
        }
        ASSERT(y[4] > 2e38f && y[4] <= 3.4e38f && y[5] == y[4]);
        ASSERT_EQ_FMT(1.0, (double)y[6], "%g");
        ASSERT(isnan(y[7]) && isnan(sum));
        float many[24]; // the largest is found in every place, and a NaN is never the largest
        for (int at = 0; at < 24; at++) {
            for (int i = 0; i < 24; i++) {
                many[i] = i == at ? 2.0f : i % 3 != 0 ? -5.0f : NAN;
            }
            ASSERT_EQ_FMT(2.0, (double)table->rows->top(many, 24, -3.0f), "%g");
            ASSERT_EQ_FMT(3.0, (double)table->rows->top(many, 24, 3.0f), "%g");
        }
    }
    PASS();
}

TEST block_products_are_right(void) {
    enum { M = 24, N = 48, K = 37, LD = 50 };
    float a[K * LD]; // [M, K] or [K, M]
    float b[K * LD];
    float start[M * LD];
    float c[M * LD];
    test_random random = test_random_start("block products");
    test_random_fill(&random, a, K * LD, 1.0f);
    test_random_fill(&random, b, K * LD, 1.0f);
    test_random_fill(&random, start, M * LD, 1.0f);
    for (int t = 0; t < 4 * QLORA__CPU_TABLES; t++) {
        const qlora__cpu_table* table = &qlora__cpu_tables[t / 4];
        if (!table->present() || table->rows->product == NULL) {
            continue;
        }
        bool transposed = t % 4 >= 2;
        qlora__block_product p = {M, N, K, a, LD, b, LD, c, LD, t % 2 != 0, transposed, 0};
        memcpy(c, start, sizeof c);
        table->rows->product(&p);
        for (int i = 0; i < M * LD; i++) {
            double sum = p.add ? (double)start[i] : 0.0;
            for (int k = 0; k < K; k++) {
                float x = transposed ? a[k * LD + i / LD] : a[i / LD * LD + k];
                sum += (double)x * (double)b[k * LD + i % LD];
            }
            double wanted = i % LD < N ? sum : (double)start[i];
            ASSERT(fabs(wanted - (double)c[i]) <= 2e-5);
        }
    }
    PASS();
}

TEST blocks_turn(void) {
    enum { ROWS = 23, COLS = 37, LD = 40 };
    static float x[ROWS * LD];
    static float y[COLS * QLORA__BLOCK];
    test_random random = test_random_start("turn");
    test_random_fill(&random, x, ROWS * LD, 1.0f);
    for (int t = 0; t < QLORA__CPU_TABLES; t++) {
        const qlora__cpu_table* table = &qlora__cpu_tables[t];
        for (int i = 0; i < COLS * QLORA__BLOCK; i++) {
            y[i] = -5.0f;
        }
        if (table->present()) {
            table->rows->transpose(x, LD, ROWS, COLS, y);
        }
        for (int i = 0; i < COLS * QLORA__BLOCK && table->present(); i++) {
            int row = i % QLORA__BLOCK;
            ASSERT(y[i] == (row < ROWS ? x[row * LD + i / QLORA__BLOCK] : -5.0f));
        }
    }
    PASS();
}

// ---- sums of outer products ----

enum { OUTER_K = 150, OUTER_FEW = 48, OUTER_WIDE = 208, OUTER_LD = 211 };

// One product with `few` columns on one side, both ways, without and with packing, on K cut at
// `cut`; true if the bits are the same.
static bool outer_like_packed(qlora_ctx* ctx, int64_t few, int64_t wide, bool transposed,
                              float beta, int64_t cut, const float* x, const float* y) {
    static float c[2][OUTER_LD * OUTER_LD];
    for (int way = 0; way < 2; way++) {
        for (int i = 0; i < OUTER_LD * OUTER_LD; i++) {
            c[way][i] = 0.25f * (float)(i % 11) - 1.0f;
        }
        for (int part = 0; part < (cut > 0 && way == 0 ? 2 : 1); part++) {
            qlora__gemm g;
            memset(&g, 0, sizeof g);
            int64_t first = part * cut;
            bool split = cut > 0 && way == 0;
            g.ta = true;
            g.batch = 1;
            g.M = transposed ? wide : few;
            g.N = transposed ? few : wide;
            g.K = split ? (part == 0 ? cut : OUTER_K - cut) : OUTER_K;
            g.A = (transposed ? y : x) + first * OUTER_LD;
            g.B = (transposed ? x : y) + first * OUTER_LD;
            g.C = c[way];
            g.lda = OUTER_LD;
            g.ldb = OUTER_LD;
            g.ldc = OUTER_LD;
            g.a_type = QLORA_F32;
            g.b_type = QLORA_F32;
            g.out = QLORA_F32;
            g.alpha = transposed ? 2.0f : 0.75f;
            g.beta = part > 0 ? 1.0f : beta;
            if (way == 0 && !qlora__outer_takes(ctx, &g)) {
                return false;
            }
            (way == 0 ? qlora__gemm_outer : qlora__gemm_packed)(ctx, &g);
        }
    }
    return memcmp(c[0], c[1], sizeof c[0]) == 0;
}

// Nothing is packed, and the bits are those of the packed product, wherever K is cut. That product
// multiplies A by alpha, this one the side with few columns: if that is B, alpha is a power of two.
TEST outer_products_have_the_bits_of_packed_ones(void) {
    static const int64_t few[] = {1, 8, 16, 21, OUTER_FEW};
    static const int64_t wide[] = {48, 96, 112, OUTER_WIDE};
    static const float betas[] = {0.0f, 1.0f, 0.5f};
    static float x[OUTER_K * OUTER_LD];
    static float y[OUTER_K * OUTER_LD];
    test_random random = test_random_start("outer");
    test_random_fill(&random, x, OUTER_K * OUTER_LD, 1.0f);
    test_random_fill(&random, y, OUTER_K * OUTER_LD, 1.0f);
    for (size_t t = 0; t < sizeof qlora__cpu_tables / sizeof qlora__cpu_tables[0]; t++) {
        const qlora__cpu_table* table = &qlora__cpu_tables[t];
        if (table->gemm == NULL || !table->present()) {
            continue;
        }
        for (int n = 0; n < 5 * 4 * 3 * 2; n++) {
            qlora_ctx_desc desc;
            memset(&desc, 0, sizeof desc);
            desc.require_backend = QLORA_BACKEND_CPU;
            desc.cpu_tier = table->tier;
            desc.threads = 1 + n % 3;
            qlora_ctx* ctx = NULL;
            ASSERT_EQ(QLORA_OK, qlora_ctx_create(&desc, &ctx));
            bool ok = outer_like_packed(ctx, few[n % 5], wide[n / 5 % 4], n >= 60,
                                        betas[n / 20 % 3], n % 7 * 10, x, y);
            ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
            ASSERTm(table->name, ok);
        }
    }
    PASS();
}

// ---- attention in blocks ----

#define ATTENTION_TOKENS 150
#define ATTENTION_WIDTH 1024 // heads times head size, at most

typedef struct attention_shape {
    int64_t heads;
    int64_t kv_heads;
    int64_t hd;
    int64_t window;
    float cap;
    qlora_dtype dtype;
    int32_t seqs[5]; // offsets; the tokens after the last one are padding
} attention_shape;

static const attention_shape attention_shapes[] = {
    {9, 3, 64, 0, 0, QLORA_F32, {0, 1, 64, 129, 150}},
    {4, 4, 40, 0, 0, QLORA_F32, {0, 70, 70, 140, 145}},
    {12, 1, 16, 9, 0, QLORA_F32, {0, 150, 150, 150, 150}},
    {2, 1, 80, 70, 5, QLORA_F32, {0, 3, 140, 149, 149}},
    {3, 1, 7, 0, 2, QLORA_BF16, {0, 65, 130, 150, 150}},
};

// o, lse, dq, dk, dv of a run, as floats.
typedef struct attention_outputs {
    float at[5][ATTENTION_TOKENS * ATTENTION_WIDTH];
} attention_outputs;

static bool attention_tensor(qlora_ctx* ctx, qlora_dtype dtype, int64_t rows, int64_t cols,
                             const float* data, qlora_tensor* out) {
    if (qlora_tensor_create(ctx, dtype, rows, cols, out) != QLORA_OK) {
        return false;
    }
    for (int64_t i = 0; i < rows * cols; i++) {
        qlora__store(out->data, dtype, i, data != NULL ? data[i] : NAN);
    }
    return true;
}

// A value in all columns of one token of an input: 0 q, 1 k, 2 v, 3 the gradient of o.
typedef struct attention_poison {
    int input;
    int64_t token;
    float value;
} attention_poison;

// Runs the forward and the backward pass of a shape on a new context.
static bool attention_run(const attention_shape* s, qlora_cpu_tier tier, int32_t threads,
                          size_t scratch, const float* data, const attention_poison* poison,
                          attention_outputs* out) {
    enum { Q, K, V, D_O, O, LSE, DQ, DK, DV, COUNT };
    qlora_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.require_backend = QLORA_BACKEND_CPU;
    desc.cpu_tier = tier;
    desc.threads = threads;
    desc.scratch_bytes = scratch;
    qlora_ctx* ctx = NULL;
    qlora_tensor t[COUNT];
    qlora_tensor seqs;
    memset(t, 0, sizeof t);
    bool ok = qlora_ctx_create(&desc, &ctx) == QLORA_OK;
    for (int i = 0; i < COUNT && ok; i++) {
        bool narrow = i == K || i == V || i == DK || i == DV;
        int64_t cols = (narrow ? s->kv_heads : s->heads) * s->hd;
        ok = i == LSE ? attention_tensor(ctx, QLORA_F32, s->heads, ATTENTION_TOKENS, NULL, &t[i])
                      : attention_tensor(ctx, s->dtype, ATTENTION_TOKENS, cols,
                                         i < O ? data + i * 10007 : NULL, &t[i]);
    }
    for (int64_t i = 0; ok && poison != NULL && i < t[poison->input].cols; i++) {
        const qlora_tensor* to = &t[poison->input];
        qlora__store(to->data, to->dtype, poison->token * to->cols + i, poison->value);
    }
    ok = ok && qlora_tensor_wrap(ctx, (void*)s->seqs, sizeof s->seqs, QLORA_I32, 1, 5, 0, &seqs) ==
                   QLORA_OK;
    qlora_attention_desc d;
    memset(&d, 0, sizeof d);
    d.heads = s->heads;
    d.kv_heads = s->kv_heads;
    d.head_dim = s->hd;
    d.window = s->window;
    d.cap = s->cap;
    ok = ok &&
         qlora_attention_forward(ctx, &d, &t[Q], &t[K], &t[V], &seqs, &t[O], &t[LSE]) == QLORA_OK;
    ok = ok && qlora_attention_backward(ctx, &d, &t[Q], &t[K], &t[V], &seqs, &t[O], &t[LSE],
                                        &t[D_O], &t[DQ], &t[DK], &t[DV]) == QLORA_OK;
    for (int i = O; i < COUNT && ok; i++) {
        for (int64_t e = 0; e < t[i].rows * t[i].cols; e++) {
            out->at[i - O][e] = qlora__load(t[i].data, t[i].dtype, e);
        }
    }
    if (!ok && ctx != NULL) {
        printf("    %s\n", qlora_last_error(ctx));
    }
    for (int i = 0; i < COUNT && ctx != NULL; i++) {
        ok = qlora_tensor_destroy(ctx, &t[i]) == QLORA_OK && ok;
    }
    return ctx != NULL && qlora_ctx_destroy(ctx) == QLORA_OK && ok;
}

// Attention of every tier is that of the portable one, whatever the number of threads and of lanes
// that the scratch memory has room for.
TEST attention_blocks_are_right(void) {
    static const double limits[2] = {2e-6, 8e-3}; // f32; bf16, whose outputs are rounded to 8 bits
    attention_outputs* out = (attention_outputs*)malloc(3 * sizeof *out);
    float* data = (float*)malloc((4 * 10007 + ATTENTION_TOKENS * ATTENTION_WIDTH) * sizeof *data);
    ASSERT(out != NULL && data != NULL);
    test_random random = test_random_start("attention blocks");
    test_random_fill(&random, data, 4 * 10007 + ATTENTION_TOKENS * ATTENTION_WIDTH, 1.0f);
    for (size_t c = 0; c < sizeof attention_shapes / sizeof attention_shapes[0]; c++) {
        const attention_shape* s = &attention_shapes[c];
        memset(out, 0, 3 * sizeof *out);
        ASSERT(attention_run(s, QLORA_CPU_TIER_PORTABLE, 2, 0, data, NULL, &out[0]));
        for (int t = 1; t < QLORA__CPU_TABLES; t++) {
            const qlora__cpu_table* table = &qlora__cpu_tables[t];
            if (!table->present()) {
                continue;
            }
            ASSERT(attention_run(s, table->tier, 1, 0, data, NULL, &out[1]));
            for (int i = 0; i < 5; i++) {
                ASSERT_REL_L2(out[0].at[i], out[1].at[i], ATTENTION_TOKENS * ATTENTION_WIDTH,
                              limits[s->dtype == QLORA_BF16]);
            }
            size_t room = qlora__attention_room_bytes(s->hd) + 256;
            room += (size_t)(s->heads * ATTENTION_TOKENS) * sizeof(float);
            ASSERT(attention_run(s, table->tier, 3, c % 2 != 0 ? room : 0, data, NULL, &out[2]));
            ASSERT_EQ(0, memcmp(&out[1], &out[2], sizeof out[1]));
        }
    }
    free(data);
    free(out);
    PASS();
}

// Rows [first, first + rows) of a tensor.
static qlora_tensor attention_part(const qlora_tensor* t, int64_t first, int64_t rows) {
    qlora_tensor part = *t;
    size_t offset = (size_t)(first * t->ld) * qlora_dtype_bytes(t->dtype);
    part.data = (char*)t->data + offset;
    part.bytes -= offset;
    part.rows = rows;
    return part;
}

// Attention of queries that `before` keys precede. k and v: those of both.
static qlora_result attention_later(qlora_ctx* ctx, const attention_shape* s, int64_t before,
                                    const qlora_tensor* q, const qlora_tensor* k,
                                    const qlora_tensor* v, const qlora_tensor* seqs,
                                    const qlora_tensor* o, const qlora_tensor* lse) {
    qlora_tensor rows = *lse; // as many as there are queries
    qlora_attention_desc d;
    qlora__attention a;
    memset(&d, 0, sizeof d);
    memset(&a, 0, sizeof a);
    d.heads = s->heads;
    d.kv_heads = s->kv_heads;
    d.head_dim = s->hd;
    d.window = s->window;
    d.cap = s->cap;
    rows.cols = q->rows;
    rows.ld = q->rows;
    a.before = before;
    a.q = q;
    a.k = k;
    a.v = v;
    a.seqs = seqs;
    a.o = o;
    a.lse = &rows;
    QLORA__ENTER(ctx, "attention_later");
    return qlora__leave(ctx, qlora__attention_forward(ctx, &d, &a));
}

// Attention of the queries from `before` on. t: q, k, v and o of all tokens, and the statistics of
// these queries.
static bool attention_after(qlora_ctx* ctx, const attention_shape* s, const qlora_tensor t[5],
                            int64_t before) {
    int64_t rows = ATTENTION_TOKENS - before;
    int32_t offsets[2] = {0, (int32_t)rows};
    qlora_tensor seqs;
    qlora_tensor q = attention_part(&t[0], before, rows);
    qlora_tensor o = attention_part(&t[3], before, rows);
    return qlora_tensor_wrap(ctx, offsets, sizeof offsets, QLORA_I32, 1, 2, 0, &seqs) == QLORA_OK &&
           attention_later(ctx, s, before, &q, &t[1], &t[2], &seqs, &o, &t[4]) == QLORA_OK;
}

// The queries after a cut, with the keys before it, have the bits that they have in one pass. t: q,
// k, v, o, their statistics, and o and statistics of the whole.
static bool attention_is_cut(qlora_ctx* ctx, const attention_shape* s, qlora_tensor t[7]) {
    static const int64_t cuts[] = {1, 37, 64, 100, 149};
    const qlora_tensor whole[5] = {t[0], t[1], t[2], t[5], t[6]};
    size_t row = (size_t)t[3].ld * qlora_dtype_bytes(s->dtype);
    bool same = attention_after(ctx, s, whole, 0);
    for (size_t c = 0; c < sizeof cuts / sizeof cuts[0]; c++) {
        int64_t rows = ATTENTION_TOKENS - cuts[c];
        size_t offset = (size_t)cuts[c] * row;
        memset(t[3].data, 0xff, (size_t)ATTENTION_TOKENS * row);
        const char* after = (const char*)t[3].data + offset;
        const char* all = (const char*)t[5].data + offset;
        same = same && attention_after(ctx, s, t, cuts[c]) &&
               memcmp(after, all, (size_t)rows * row) == 0;
        for (int64_t h = 0; h < s->heads; h++) {
            const float* here = (const float*)t[4].data + h * rows;
            const float* there = (const float*)t[6].data + h * ATTENTION_TOKENS + cuts[c];
            same = same && memcmp(here, there, (size_t)rows * sizeof *here) == 0;
        }
    }
    return same;
}

TEST attention_goes_on_after_a_cut(void) {
    enum { DATA = ATTENTION_TOKENS * ATTENTION_WIDTH };
    float* data = (float*)malloc(DATA * sizeof *data);
    ASSERT(data != NULL);
    test_random random = test_random_start("attention cut");
    test_random_fill(&random, data, DATA, 1.0f);
    for (size_t c = 0; c < sizeof attention_shapes / sizeof attention_shapes[0]; c++) {
        const attention_shape* s = &attention_shapes[c];
        for (int i = 0; i < QLORA__CPU_TABLES; i++) {
            qlora_ctx_desc desc;
            qlora_ctx* ctx = NULL;
            qlora_tensor t[7];
            memset(&desc, 0, sizeof desc);
            desc.require_backend = QLORA_BACKEND_CPU;
            desc.cpu_tier = qlora__cpu_tables[i].tier;
            desc.threads = 2;
            if (!qlora__cpu_tables[i].present()) {
                continue;
            }
            ASSERT_EQ(QLORA_OK, qlora_ctx_create(&desc, &ctx));
            for (int k = 0; k < 7; k++) {
                bool stats = k == 4 || k == 6;
                int64_t heads = k == 1 || k == 2 ? s->kv_heads : s->heads;
                ASSERT(attention_tensor(ctx, stats ? QLORA_F32 : s->dtype,
                                        stats ? s->heads : ATTENTION_TOKENS,
                                        stats ? ATTENTION_TOKENS : heads * s->hd,
                                        k < 3 ? data + k * 1009 : NULL, &t[k]));
            }
            ASSERTm(qlora__cpu_tables[i].name, attention_is_cut(ctx, s, t));
            for (int k = 0; k < 7; k++) {
                ASSERT_EQ(QLORA_OK, qlora_tensor_destroy(ctx, &t[k]));
            }
            ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
        }
    }
    free(data);
    PASS();
}

// What is not finite in one token reaches the same outputs in every tier: in no tier a query that
// does not see the token.
TEST attention_keeps_poison_where_it_belongs(void) {
    static const float values[] = {NAN, INFINITY};
    attention_outputs* out = (attention_outputs*)malloc(2 * sizeof *out);
    float* data = (float*)malloc((4 * 10007 + ATTENTION_TOKENS * ATTENTION_WIDTH) * sizeof *data);
    ASSERT(out != NULL && data != NULL);
    test_random random = test_random_start("attention poison");
    test_random_fill(&random, data, 4 * 10007 + ATTENTION_TOKENS * ATTENTION_WIDTH, 1.0f);
    for (int c = 0; c < 2 * 4 * 2 * QLORA__CPU_TABLES; c++) {
        const qlora__cpu_table* table = &qlora__cpu_tables[c / 16];
        const attention_shape* s = &attention_shapes[c % 2 * 3];
        const attention_poison poison = {c / 2 % 4, 100, values[c / 8 % 2]};
        bool again = test_brief() && c / 8 % 2 != 0;
        if (c < 16 || again || !table->present()) { // the first tier is the portable one
            continue;
        }
        memset(out, 0, 2 * sizeof *out);
        ASSERT(attention_run(s, QLORA_CPU_TIER_PORTABLE, 1, 0, data, &poison, &out[0]));
        ASSERT(attention_run(s, table->tier, 1 + c % 2, 0, data, &poison, &out[1]));
        for (int i = 0; i < 5; i++) {
            for (int64_t e = 0; e < ATTENTION_TOKENS * ATTENTION_WIDTH; e++) {
                ASSERT_EQ(qlora__finite(out[0].at[i][e]), qlora__finite(out[1].at[i][e]));
            }
        }
    }
    free(data);
    free(out);
    PASS();
}

// ---- tiles and panels of the packed products ----

// a b + c, rounded once; fmaf of some C libraries for Windows rounds twice. The sum of a product,
// which is exact in double, and c is rounded to odd if it is not exact, so that the second rounding
// sees on which side of the middle it is.
static float fused(float a, float b, float c) {
    double product = (double)a * (double)b;
    double sum = product + (double)c;
    double back = sum - product;
    double lost = (product - (sum - back)) + ((double)c - back);
    uint64_t bits;
    memcpy(&bits, &sum, sizeof bits);
    if (lost != 0.0 && (bits & 1) == 0) {
        bits += (lost > 0.0) == (sum > 0.0) ? 1 : UINT64_MAX;
        memcpy(&sum, &bits, sizeof sum);
    }
    return (float)sum;
}

// Whether a tile, cut after `cut` steps, has the bits of fused multiply-adds in ascending k.
static bool tile_in_order(qlora__tile_fn tile, int64_t rows, int64_t cols, int64_t steps,
                          int64_t cut, const float* a, const float* b) {
    float c[1024]; // more than any tile has
    memset(c, 0, sizeof c);
    tile(cut, a, b, c, cols, false);
    tile(steps - cut, a + cut * rows, b + cut * cols, c, cols, true);
    bool same = true;
    for (int64_t i = 0; i < rows * cols; i++) {
        float sum = 0.0f;
        for (int64_t k = 0; k < steps; k++) {
            sum = fused(a[k * rows + i / cols], b[k * cols + i % cols], sum);
        }
        same = same && memcmp(&sum, &c[i], sizeof sum) == 0;
    }
    return same;
}

TEST tiles_sum_in_order(void) {
    enum { STEPS = 9, WIDEST = 64 };
    static float a[STEPS * WIDEST];
    static float b[STEPS * WIDEST];
    test_random random = test_random_start("tiles");
    test_random_fill(&random, a, STEPS * WIDEST, 1.0f);
    test_random_fill(&random, b, STEPS * WIDEST, 1.0f);
    for (size_t t = 0; t < sizeof qlora__cpu_tables / sizeof qlora__cpu_tables[0]; t++) {
        const qlora__cpu_table* table = &qlora__cpu_tables[t];
        const qlora__cpu_tiles* g = table->gemm != NULL ? &table->gemm->tiles : NULL;
        for (int64_t n = 0; g != NULL && table->present() && n < STEPS * STEPS; n++) {
            int64_t steps = n / STEPS + 1;
            int64_t cut = n % STEPS;
            bool ok = cut > steps ||
                      (tile_in_order(g->tile, g->rows, g->cols, steps, cut, a, b) &&
                       tile_in_order(g->narrow_tile, g->rows, g->narrow, steps, cut, a, b));
            ASSERTm(table->name, ok);
        }
    }
    PASS();
}

TEST pieces_are_spread(void) {
    enum { N = 100, JUMP = 56 }; // more than the widest piece
    float from[N];
    float out[N * JUMP];
    test_random random = test_random_start("pieces");
    test_random_fill(&random, from, N, 1.0f);
    for (size_t t = 0; t < sizeof qlora__cpu_tables / sizeof qlora__cpu_tables[0]; t++) {
        const qlora__cpu_table* table = &qlora__cpu_tables[t];
        bool has = table->gemm != NULL && table->gemm->spread != NULL && table->present();
        for (int narrow = 0; has && narrow < 2; narrow++) {
            int64_t width = narrow != 0 ? table->gemm->tiles.narrow : table->gemm->tiles.cols;
            memset(out, 0, sizeof out);
            table->gemm->spread(from, N, width, JUMP, out);
            // Whole pieces only; what is between them stays as it is.
            for (int64_t i = 0; i < (N / width + 1) * JUMP; i++) {
                bool piece = i < N / width * JUMP && i % JUMP < width;
                float expected = piece ? from[i / JUMP * width + i % JUMP] : 0.0f;
                ASSERTm(table->name, memcmp(&expected, &out[i], sizeof expected) == 0);
            }
        }
    }
    PASS();
}

SUITE(rows_suite) {
    RUN_TEST(tiles_sum_in_order);
    RUN_TEST(pieces_are_spread);
    RUN_TEST(tiers_follow_the_portable_rows);
    RUN_TEST(curves_hold_their_limits);
    RUN_TEST(exps_have_ends);
    RUN_TEST(block_products_are_right);
    RUN_TEST(blocks_turn);
    RUN_TEST(outer_products_have_the_bits_of_packed_ones);
    RUN_TEST(attention_blocks_are_right);
    RUN_TEST(attention_goes_on_after_a_cut);
    RUN_TEST(attention_keeps_poison_where_it_belongs);
}
