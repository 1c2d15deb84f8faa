// blocks.c - what families have beyond Llama's block: squared ReLU and LayerNorm against loops in
// double precision, and models with them against the CPU in f32, with the settings that change how
// a layer is computed.

#include "machines.h"
#include "model_rig.h"

SUITE_EXTERN(blocks_suite);

enum { BLOCKS_MOST = 200 * 40, BLOCKS_WIDE = 9001 };

// ---- operators

typedef struct block_case {
    int64_t rows;
    int64_t cols;
    bool in_place;
    bool more; // backward: ds or dres
} block_case;

static const block_case block_cases[] = {
    {7, 33, false, false}, {7, 40, true, true},  {1, 1, false, true},   {5, 13, true, true},
    {200, 5, false, true}, {70, 72, true, true}, {3, 1030, true, true}, {2, 2500, false, true}};

#define BLOCK_CASES (sizeof block_cases / sizeof block_cases[0])

// Values that bf16 has.
static void block_fill(float* x, int64_t n, double mean, double size, test_random* random) {
    for (int64_t i = 0; i < n; i++) {
        x[i] = qlora__bf16_to(qlora__bf16_from((float)(mean + size * test_random_normal(random))));
    }
}

static bool block_near(const double* want, const float* got, int64_t n, qlora_dtype dtype) {
    double limit = dtype == QLORA_F32 ? 2e-6 : 4e-3;
    double largest = 0.0;
    bool near = true;
    for (int64_t i = 0; i < n; i++) {
        largest = fmax(largest, fabs(want[i]));
    }
    for (int64_t i = 0; i < n && near; i++) {
        near = fabs(want[i] - (double)got[i]) <= limit * (fabs(want[i]) + 0.1 * largest);
        if (!near) {
            printf("element %d: %g, not %g\n", (int)i, (double)got[i], want[i]);
        }
    }
    return near;
}

// The operators, as functions of the model call them.
static qlora_result relu2_forward(qlora_ctx* ctx, const qlora_tensor* u, const qlora_tensor* s) {
    QLORA__ENTER(ctx, "relu2");
    return qlora__leave(ctx, qlora__relu2_forward(ctx, u, s));
}

static qlora_result relu2_backward(qlora_ctx* ctx, const qlora__relu2* job) {
    QLORA__ENTER(ctx, "relu2");
    return qlora__leave(ctx, qlora__relu2_backward(ctx, job));
}

static qlora_result mean_norm(qlora_ctx* ctx, const qlora__mean_norm* job, bool backward) {
    QLORA__ENTER(ctx, "mean norm");
    return qlora__leave(ctx, backward ? qlora__mean_norm_backward(ctx, job)
                                      : qlora__mean_norm_forward(ctx, job));
}

TEST relu2_is_right(const test_machine* machine, const block_case* c, qlora_dtype dtype) {
    static float u[BLOCKS_MOST];
    static float ds[BLOCKS_MOST];
    static float got[BLOCKS_MOST];
    static double want[3][BLOCKS_MOST];
    int64_t n = c->rows * c->cols;
    test_random random = test_random_start("relu2");
    qlora_ctx* ctx = test_open(machine, NULL);
    if (ctx == NULL) {
        SKIPm(test_open_reason());
    }
    block_fill(u, n, 0.0, 1.0, &random);
    block_fill(ds, n, 0.0, 1.0, &random);
    for (int64_t i = 0; i < n; i++) {
        double r = u[i] > 0.0f ? (double)u[i] : 0.0;
        want[0][i] = r * r;
        want[1][i] = (double)ds[i] * 2.0 * r;
    }
    qlora_tensor t[4]; // u, ds, du, s
    for (int i = 0; i < 4; i++) {
        ASSERT_EQ(QLORA_OK, test_tensor(ctx, dtype, c->rows, c->cols, i == 1 ? ds : u, &t[i]));
    }
    ASSERT_EQ(QLORA_OK, relu2_forward(ctx, &t[0], &t[3]));
    ASSERT(test_read(ctx, &t[3], got));
    ASSERT(block_near(want[0], got, n, dtype));
    qlora__relu2 job;
    memset(&job, 0, sizeof job);
    job.ds = &t[1];
    job.u = &t[0];
    job.du = c->in_place ? &t[0] : &t[2];
    job.s = !c->more ? NULL : c->in_place ? &t[1] : &t[3];
    ASSERT_EQ(QLORA_OK, relu2_backward(ctx, &job));
    ASSERT(test_read(ctx, job.du, got));
    ASSERT(block_near(want[1], got, n, dtype));
    if (job.s != NULL) {
        ASSERT(test_read(ctx, job.s, got));
        ASSERT(block_near(want[0], got, n, dtype));
    }
    for (int i = 0; i < 4; i++) {
        qlora_tensor_destroy(ctx, &t[i]);
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// A row with a NaN and an infinity keeps them.
TEST relu2_hides_nothing(const test_machine* machine) {
    static const float u[4] = {(float)NAN, (float)INFINITY, -1.0f, 2.0f};
    float got[4];
    qlora_tensor t;
    qlora_ctx* ctx = test_open(machine, NULL);
    if (ctx == NULL) {
        SKIPm(test_open_reason());
    }
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, 1, 4, u, &t));
    ASSERT_EQ(QLORA_OK, relu2_forward(ctx, &t, &t));
    ASSERT(test_read(ctx, &t, got));
    ASSERT(isnan(got[0]) && isinf(got[1]) && got[2] == 0.0f && got[3] == 4.0f);
    qlora_tensor_destroy(ctx, &t);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

typedef struct mean_data {
    float x[BLOCKS_WIDE * 2];
    float w[BLOCKS_WIDE];
    float dy[BLOCKS_WIDE * 2];
    float dres[BLOCKS_WIDE * 2];
    float got[BLOCKS_WIDE * 2];
    double y[BLOCKS_WIDE * 2];
    double dx[BLOCKS_WIDE * 2];
    double dw[BLOCKS_WIDE];
} mean_data;

static void mean_expect(const block_case* c, double eps, mean_data* d) {
    for (int64_t i = 0; i < c->cols; i++) {
        d->dw[i] = 1.0; // what is there is added to
    }
    for (int64_t r = 0; r < c->rows; r++) {
        const float* x = d->x + r * c->cols;
        const float* dy = d->dy + r * c->cols;
        double n = (double)c->cols;
        double mean = 0.0, squares = 0.0, lift = 0.0, dot = 0.0;
        for (int64_t i = 0; i < c->cols; i++) {
            mean += (double)x[i] / n;
        }
        for (int64_t i = 0; i < c->cols; i++) {
            squares += ((double)x[i] - mean) * ((double)x[i] - mean) / n;
            lift += (double)dy[i] * (double)d->w[i] / n;
            dot += (double)dy[i] * (double)d->w[i] * ((double)x[i] - mean) / n;
        }
        double rstd = 1.0 / sqrt(squares + eps);
        for (int64_t i = 0; i < c->cols; i++) {
            double own = (double)x[i] - mean;
            int64_t at = r * c->cols + i;
            d->y[at] = own * rstd * (double)d->w[i];
            d->dx[at] = (c->more ? (double)d->dres[at] : 0.0) +
                        rstd * ((double)dy[i] * (double)d->w[i] - lift - own * rstd * rstd * dot);
            d->dw[i] += (double)dy[i] * own * rstd;
        }
    }
}

TEST mean_norm_is_right(const test_machine* machine, const block_case* c, qlora_dtype dtype) {
    static mean_data d;
    static float ones[BLOCKS_WIDE];
    int64_t n = c->rows * c->cols;
    test_random random = test_random_start("mean norm");
    qlora_ctx* ctx = test_open(machine, NULL);
    if (ctx == NULL) {
        SKIPm(test_open_reason());
    }
    block_fill(d.x, n, 3.0, 1.0, &random); // a mean that is larger than the deviation
    block_fill(d.w, c->cols, 1.0, 0.3, &random);
    block_fill(d.dy, n, 0.0, 1.0, &random);
    block_fill(d.dres, n, 0.0, 1.0, &random);
    mean_expect(c, 0.03125, &d);
    qlora_tensor t[6]; // x, dy, dres, out, w, dw
    const float* from[4] = {d.x, d.dy, d.dres, d.x};
    for (int i = 0; i < 4; i++) {
        ASSERT_EQ(QLORA_OK, test_tensor(ctx, dtype, c->rows, c->cols, from[i], &t[i]));
    }
    for (int64_t i = 0; i < c->cols; i++) {
        ones[i] = 1.0f;
    }
    ASSERT_EQ(QLORA_OK,
              test_tensor(ctx, c->in_place ? QLORA_BF16 : QLORA_F32, 1, c->cols, d.w, &t[4]));
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, 1, c->cols, ones, &t[5]));
    qlora__mean_norm job;
    memset(&job, 0, sizeof job);
    job.x = &t[0];
    job.w = &t[4];
    job.y = &t[3];
    job.dy = &t[1];
    job.dres = c->more ? &t[2] : NULL;
    job.dx = c->in_place && c->more ? &t[2] : &t[3];
    job.dw = &t[5];
    job.eps = 0.03125f;
    ASSERT_EQ(QLORA_OK, mean_norm(ctx, &job, false));
    ASSERT(test_read(ctx, &t[3], d.got));
    ASSERT(block_near(d.y, d.got, n, dtype));
    ASSERT_EQ(QLORA_OK, mean_norm(ctx, &job, true));
    ASSERT(test_read(ctx, job.dx, d.got));
    ASSERT(block_near(d.dx, d.got, n, dtype));
    ASSERT(test_read(ctx, &t[5], d.got));
    ASSERT(block_near(d.dw, d.got, c->cols, QLORA_F32));
    job.dw = NULL;
    job.dx = &t[1]; // over dy
    job.dres = NULL;
    ASSERT_EQ(QLORA_OK, mean_norm(ctx, &job, true));
    for (int i = 0; i < 6; i++) {
        qlora_tensor_destroy(ctx, &t[i]);
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

TEST block_operators_are_right(const test_machine* machine) {
    for (int type = 0; type < (test_has_bf16(machine) ? 2 : 1); type++) {
        qlora_dtype dtype = type == 0 ? QLORA_F32 : QLORA_BF16;
        for (size_t i = 0; i < BLOCK_CASES; i++) {
            CHECK_CALL(relu2_is_right(machine, &block_cases[i], dtype));
            CHECK_CALL(mean_norm_is_right(machine, &block_cases[i], dtype));
        }
        static const block_case wide = {2, BLOCKS_WIDE, false, true};
        CHECK_CALL(mean_norm_is_right(machine, &wide, dtype));
    }
    PASS();
}

// ---- models

static void block_arcee(setup* s) {
    s->config.family = QLORA_FAMILY_ARCEE;
    s->config.qk_norm = false;
    s->config.window = 0;
    s->config.sliding[1] = 0;
}

static void block_cohere2(setup* s) {
    s->config.family = QLORA_FAMILY_COHERE2;
    s->config.qk_norm = false;
    s->config.tied = true;
    s->config.logits_divisor = 4.0;
    s->config.no_rope[0] = 1;
}

static void block_plainly(setup* s) {
    (void)s;
}

static void block_recomputes(setup* s) {
    s->model.recompute = QLORA_CHOICE_ON;
}

static void block_tiles(setup* s) {
    s->model.recompute = QLORA_CHOICE_ON;
    s->model.tile = 8;
}

static void block_drops(setup* s) {
    s->model.dropout = 0.2f;
}

static void block_doras(setup* s) {
    s->model.dora = true;
}

static void block_trains_little(setup* s) {
    s->model.train_norms = false;
    s->model.targets = QLORA_TARGET_DOWN | QLORA_TARGET_O;
}

static void block_trains_eights(setup* s) {
    s->model.train_norms = false;
    s->model.rank = 8;
}

static void block_caches(setup* s) {
    s->model.cache = QLORA_CHOICE_ON;
    s->model.train_norms = false;
}

static const struct {
    const char* name;
    void (*vary)(setup* s);
} block_families[] = {{"arcee", block_arcee}, {"cohere2", block_cohere2}},
  block_ways[] = {{"plain", block_plainly},        {"recompute", block_recomputes},
                  {"tile", block_tiles},           {"dropout", block_drops},
                  {"dora", block_doras},           {"down and o", block_trains_little},
                  {"rank 8", block_trains_eights}, {"cache", block_caches}};

static setup block_setup(const test_machine* machine, size_t family, size_t way) {
    setup s = setup_make(machine);
    s.model.dropout = 0.0f;
    s.model.weight_std = 0.08f; // rounding errors do not grow much
    block_families[family].vary(&s);
    block_ways[way].vary(&s);
    return s;
}

// The gradients of a micro-batch, all in one.
static bool block_gradients(const setup* s, float** values, size_t* count, double* loss) {
    data d;
    rig r;
    qlora_eval_info eval;
    *values = NULL;
    data_make(&d, "blocks", run_lengths[0], 3);
    bool ok = rig_open(&r, s) &&
              (qlora_train_micro(r.trainer, &d.batch, 10.0) == QLORA_OK || rig_says(&r, "micro"));
    *values = ok ? rig_read(&r, true, count) : NULL;
    ok = ok && qlora_train_cancel(r.trainer) == QLORA_OK &&
         (qlora_eval(r.model, &d.batch, &eval) == QLORA_OK || rig_says(&r, "eval"));
    *loss = ok ? eval.loss : (double)NAN;
    return ok && *values != NULL && rig_close(&r, s);
}

TEST block_models_have_the_gradients(const test_machine* machine) {
    static const struct {
        qlora_mode mode;
        double limit;
    } modes[] = {{QLORA_MODE_F32, 1e-5}, {QLORA_MODE_BF16, 0.15}, {QLORA_MODE_FP8, 0.3}};
    const test_machine* cpu = test_machine_at(0);
    ASSERT_STR_EQ("cpu", cpu->backend);
    for (size_t i = 0; i < 2 * sizeof block_ways / sizeof block_ways[0]; i++) {
        float* expected;
        size_t count = 0;
        double loss = 0.0;
        setup s = block_setup(cpu, i % 2, i / 2);
        ASSERT(block_gradients(&s, &expected, &count, &loss));
        for (int k = 0; k < 3; k++) {
            float* got;
            size_t n = 0;
            double own = 0.0;
            bool can = k == 0 || (k == 1 ? test_has_bf16(machine) : test_has_fp8(machine));
            s.machine = *machine;
            s.model.mode = modes[k].mode;
            if (!can || (k == 2 && s.model.dora) || (k > 0 && test_checked(machine) && i > 1)) {
                continue;
            }
            ASSERTm(block_ways[i / 2].name, block_gradients(&s, &got, &n, &own));
            ASSERT_EQ(count, n);
            ASSERTm(block_ways[i / 2].name, test_rel_l2(expected, got, n, modes[k].limit));
            ASSERT(fabs(own - loss) <= 0.1 * modes[k].limit * loss);
            free(got);
        }
        free(expected);
    }
    PASS();
}

SUITE(blocks_suite) {
    RUN_ON(TEST_ONE_EACH, block_operators_are_right);
    RUN_ON(TEST_ONE_EACH, relu2_hides_nothing);
    RUN_ON(TEST_ONE_EACH, block_models_have_the_gradients);
}
