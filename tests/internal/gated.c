// gated.c - a gated activation with the gradients that read its tiles: its own gradients are
// compared bit for bit, the others with sums in double precision.

#include "machines.h"
#include "model_rig.h"

SUITE_EXTERN(gated_suite);

enum { GATED_ROWS = 530, GATED_COLS = 136, GATED_RANKS = 48, GATED_ROOM = 24 };

typedef struct gated_case {
    int64_t rows;
    int64_t cols;
    int64_t ranks[3]; // gate, up, down
} gated_case;

static const gated_case gated_cases[] = {{70, 136, {16, 16, 16}}, {530, 72, {8, 16, 0}},
                                         {33, 8, {0, 8, 16}},     {16, 64, {16, 16, 16}},
                                         {65, 32, {0, 0, 16}},    {1, 16, {8, 8, 8}}};

typedef struct gated_data {
    float ds[GATED_ROWS * GATED_COLS];
    float sum[GATED_ROWS * GATED_COLS]; // ds with the share of an adapter
    float a[16 * GATED_COLS];
    float gu[GATED_ROWS * (2 * GATED_COLS + GATED_ROOM)];
    float z[GATED_ROWS * GATED_RANKS];
    float tiles[3][GATED_ROWS * GATED_COLS]; // dgate, dup, s
    float grads[3][GATED_COLS * 16];
    float want[GATED_COLS * 16];
    float got[GATED_ROWS * (2 * GATED_COLS + GATED_ROOM)];
} gated_data;

// Values that bf16 has.
static void gated_fill(float* x, int64_t n, double size, test_random* random) {
    for (int64_t i = 0; i < n; i++) {
        x[i] = qlora__bf16_to(qlora__bf16_from((float)(size * test_random_normal(random))));
    }
}

// A multiple of `unit`, at most `most` of them.
static float gated_multiple(int64_t most, float unit, test_random* random) {
    return (float)((int64_t)test_random_below(random, (uint64_t)(2 * most + 1)) - most) * unit;
}

// ds + u a, rounded, of numbers whose sums are exact in any order. u is z of down.
static void gated_share(const gated_case* c, int64_t all, test_random* random, gated_data* d) {
    int64_t rank = c->ranks[2];
    for (int64_t i = 0; i < rank * c->cols; i++) {
        d->a[i] = gated_multiple(8, 0.125f, random);
    }
    for (int64_t i = 0; i < c->rows * rank; i++) {
        d->z[i / rank * all + all - rank + i % rank] = gated_multiple(2, 1.0f, random);
    }
    for (int64_t i = 0; i < c->rows * c->cols; i++) {
        d->ds[i] = gated_multiple(255, 0.015625f, random);
        float sum = d->ds[i];
        for (int64_t r = 0; r < rank; r++) {
            sum += d->z[i / c->cols * all + all - rank + r] * d->a[r * c->cols + i % c->cols];
        }
        d->sum[i] = qlora__bf16_to(qlora__bf16_from(sum));
    }
}

// What the public functions make of the same values.
static bool gated_expect(qlora_ctx* ctx, const gated_case* c, bool gelu, gated_data* d) {
    qlora_tensor in[3];
    qlora_tensor out[3];
    int64_t ld = 2 * c->cols + GATED_ROOM;
    static float part[GATED_ROWS * GATED_COLS];
    bool ok = true;
    for (int i = 0; i < 3; i++) {
        for (int64_t k = 0; k < c->rows * c->cols; k++) {
            int64_t at = k / c->cols * ld + k % c->cols;
            part[k] = i == 0 ? d->sum[k] : d->gu[at + (i == 1 ? 0 : c->cols)];
        }
        ok = ok && test_tensor(ctx, QLORA_BF16, c->rows, c->cols, part, &in[i]) == QLORA_OK &&
             qlora_tensor_create(ctx, QLORA_BF16, c->rows, c->cols, &out[i]) == QLORA_OK;
    }
    ok = ok && (gelu ? qlora_geglu_backward : qlora_swiglu_backward)(
                   ctx, &in[0], &in[1], &in[2], &out[0], &out[1], &out[2]) == QLORA_OK;
    for (int i = 0; i < 3; i++) {
        ok = ok && test_read(ctx, &out[i], d->tiles[i]);
        qlora_tensor_destroy(ctx, &in[i]);
        qlora_tensor_destroy(ctx, &out[i]);
    }
    return ok;
}

static qlora_result gated_run(qlora_ctx* ctx, const qlora__gated* g) {
    QLORA__ENTER(ctx, "gated");
    qlora_result r = qlora__gated_tiles(ctx, g);
    return qlora__leave(ctx, r == QLORA_OK ? qlora__gated_sum(ctx, g) : r);
}

// Sum number p, added to what was there: scale tile^T z, or z^T tile for down.
static void gated_sum(const gated_case* c, int p, float scale, gated_data* d) {
    int64_t at = p == 0 ? 0 : p == 1 ? c->ranks[0] : c->ranks[0] + c->ranks[1];
    int64_t all = c->ranks[0] + c->ranks[1] + c->ranks[2];
    for (int64_t col = 0; col < c->cols; col++) {
        for (int64_t r = 0; r < c->ranks[p]; r++) {
            double sum = 0.0;
            int64_t to = p == 2 ? r * c->cols + col : col * c->ranks[p] + r;
            for (int64_t row = 0; row < c->rows; row++) {
                sum += (double)d->tiles[p][row * c->cols + col] * (double)d->z[row * all + at + r];
            }
            d->want[to] = (float)((double)d->grads[p][to] + (double)scale * sum);
        }
    }
}

TEST gated_gradients_are_right(const test_machine* machine, const gated_case* c, bool gelu,
                               bool share) {
    static gated_data d;
    static const float scales[3] = {2.0f, 0.5f, 1.0f};
    test_random random = test_random_start("gated");
    qlora_ctx* ctx = test_open(machine, NULL);
    if (ctx == NULL) {
        SKIPm(test_open_reason());
    }
    int64_t all = c->ranks[0] + c->ranks[1] + c->ranks[2];
    int64_t ld = 2 * c->cols + GATED_ROOM;
    gated_fill(d.ds, c->rows * c->cols, 1.0, &random);
    gated_fill(d.gu, c->rows * ld, 2.0, &random);
    gated_fill(d.z, c->rows * all, 1.0, &random);
    memcpy(d.sum, d.ds, sizeof d.sum);
    if (share) {
        gated_share(c, all, &random, &d);
    }
    qlora_tensor ds;
    qlora_tensor a;
    qlora_tensor gu;
    qlora_tensor z;
    qlora_tensor grads[3];
    qlora_tensor parts;
    qlora_tensor most;
    qlora__gated g;
    memset(&g, 0, sizeof g);
    ASSERT(gated_expect(ctx, c, gelu, &d));
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_BF16, c->rows, c->cols, d.ds, &ds));
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_BF16, c->rows, ld, d.gu, &gu));
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_BF16, c->rows, all, d.z, &z));
    qlora_tensor gate = qlora__window(&gu, c->rows, 0, c->cols);
    qlora_tensor up = qlora__window(&gu, c->rows, c->cols, c->cols);
    g.dh = &ds;
    g.gate = &gate;
    g.up = &up;
    g.gelu = gelu;
    g.parts = &parts;
    g.a = share ? &a : NULL;
    ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_BF16, share ? c->ranks[2] : 1, c->cols, d.a, &a));
    int64_t room = qlora__gated_room(c->rows, c->cols);
    ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, QLORA_F32, 1, room, &parts));
    ASSERT_EQ(QLORA_OK, qlora_tensor_create(ctx, QLORA_F32, 1, c->rows, &most));
    ASSERT_EQ(QLORA_OK, qlora_fill(ctx, gelu ? 0.0f : 0.5f, &most));
    g.most = &most;
    int64_t at = 0;
    for (int p = 0; p < 3; p++) {
        gated_fill(d.grads[p], c->cols * c->ranks[p], 10.0, &random);
        ASSERT_EQ(QLORA_OK, test_tensor(ctx, QLORA_F32, p == 2 ? c->ranks[p] : c->cols,
                                        p == 2 ? c->cols : c->ranks[p], d.grads[p], &grads[p]));
        g.factors[p].z = qlora__window(&z, c->rows, at, c->ranks[p]);
        g.factors[p].d = &grads[p];
        g.factors[p].scale = scales[p];
        at += c->ranks[p];
    }
    ASSERT_EQ(QLORA_OK, gated_run(ctx, &g));
    ASSERT(test_read(ctx, &gu, d.got));
    for (int64_t k = 0; k < c->rows * ld; k++) {
        int64_t col = k % ld;
        int part = (int)(col / c->cols);
        float want = part < 2 ? d.tiles[part][k / ld * c->cols + col % c->cols] : d.gu[k];
        ASSERT(memcmp(&want, &d.got[k], sizeof want) == 0);
    }
    ASSERT(test_read(ctx, &most, d.got));
    for (int64_t row = 0; row < c->rows; row++) { // raised to the largest of a row
        float want = gelu ? 0.0f : 0.5f;
        for (int64_t k = 0; k < 2 * c->cols; k++) {
            want = fmaxf(want, fabsf(d.tiles[k / c->cols][row * c->cols + k % c->cols]));
        }
        ASSERT(memcmp(&want, &d.got[row], sizeof want) == 0);
    }
    qlora_tensor_destroy(ctx, &most);
    qlora_tensor_destroy(ctx, &a);
    for (int p = 0; p < 3; p++) {
        gated_sum(c, p, scales[p], &d);
        ASSERT(c->ranks[p] == 0 || test_read(ctx, &grads[p], d.got));
        if (c->ranks[p] > 0) {
            ASSERT_CLOSE(d.want, d.got, (size_t)(c->cols * c->ranks[p]), 2e-4, 1e-5);
        }
        qlora_tensor_destroy(ctx, &grads[p]);
    }
    qlora_tensor_destroy(ctx, &parts);
    qlora_tensor_destroy(ctx, &ds);
    qlora_tensor_destroy(ctx, &gu);
    qlora_tensor_destroy(ctx, &z);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

TEST gated_sums_are_right(const test_machine* machine) {
    if (strcmp(machine->backend, "cpu") == 0) {
        SKIPm("needs a GPU");
    }
    for (size_t i = 0; i < sizeof gated_cases / sizeof gated_cases[0]; i++) {
        for (int kind = 0; kind < (gated_cases[i].ranks[2] > 0 ? 4 : 2); kind++) {
            CHECK_CALL(gated_gradients_are_right(machine, &gated_cases[i], kind % 2 == 1,
                                                 kind / 2 == 1));
        }
    }
    PASS();
}

// Ranks that the kernels take, and how rows are split.
TEST gated_ranks_are_chosen(void) {
    static const struct {
        int64_t ranks[3];
        bool taken;
    } cases[] = {{{16, 16, 16}, true}, {{0, 0, 8}, true},  {{16, 8, 0}, true},
                 {{24, 8, 8}, false},  {{0, 0, 0}, false}, {{4, 16, 16}, false},
                 {{16, 12, 16}, false}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ASSERT_EQ(cases[i].taken, qlora__gated_takes(cases[i].ranks));
    }
    ASSERT_EQ(2, qlora__gated_splits(8192, 14336));
    ASSERT_EQ(4, qlora__gated_splits(8192, 8192));
    ASSERT_EQ(6, qlora__gated_splits(2048, 4864));
    ASSERT_EQ(1, qlora__gated_splits(511, 4864));
    PASS();
}

// ---- in a model

static void gated_qwen3(setup* s) {
    s->model.train_norms = false;
}

static void gated_gemma2(setup* s) { // GELU, and a norm after the MLP
    s->config.family = QLORA_FAMILY_GEMMA2;
    s->config.qk_norm = false;
    s->config.tied = true;
}

static void gated_phi3(setup* s) { // gate and up are one projection
    s->config.family = QLORA_FAMILY_PHI3;
    s->config.qk_norm = false;
    s->model.train_norms = false;
}

static void gated_down(setup* s) {
    s->model.targets = QLORA_TARGET_DOWN | QLORA_TARGET_UP;
    s->model.rank = 16;
}

static const struct {
    const char* name;
    void (*vary)(setup* s);
} gated_kinds[] = {{"qwen3", gated_qwen3},
                   {"gemma2", gated_gemma2},
                   {"phi3", gated_phi3},
                   {"up and down", gated_down}};

enum { GATED_PARAMETERS = 128 };

// The gradients of a model, one parameter after the other, and where each begins.
typedef struct gated_gradients {
    float* values;
    size_t count; // of numbers
    size_t first[GATED_PARAMETERS + 1];
    int64_t parameters;
} gated_gradients;

static bool gated_places(qlora_model* m, gated_gradients* g) {
    qlora_model_info info;
    bool ok = qlora_model_query(m, &info) == QLORA_OK && info.parameters <= GATED_PARAMETERS;
    g->parameters = ok ? info.parameters : 0;
    g->first[0] = 0;
    for (int64_t i = 0; i < g->parameters && ok; i++) {
        qlora_parameter_info p;
        ok = qlora_parameter_query(m, i, &p) == QLORA_OK;
        g->first[i + 1] = g->first[i] + (size_t)(p.rows * p.cols);
    }
    return ok && g->first[g->parameters] == g->count;
}

// Every parameter's gradient for itself: a wrong one among large ones would not be seen.
static bool gated_within(const char* name, const gated_gradients* a, const gated_gradients* b,
                         double limit) {
    bool same = a->count == b->count && a->parameters == b->parameters && a->parameters > 0;
    for (int64_t i = 0; i < a->parameters && same; i++) {
        size_t first = a->first[i];
        same = test_rel_l2(a->values + first, b->values + first, a->first[i + 1] - first, limit);
        if (!same) {
            printf("%s: the gradient of parameter %d\n", name, (int)i);
        }
    }
    return same;
}

static bool gated_close(const char* name, const gated_gradients* a, const gated_gradients* b) {
    return gated_within(name, a, b, 0.02);
}

// The gradients of a micro-batch; wants: whether they come with the activation.
static bool gated_micro(const setup* s, bool wants, gated_gradients* g) {
    data d;
    rig r;
    memset(g, 0, sizeof *g);
    data_make(&d, "gated", run_lengths[0], 3);
    bool ok = rig_open(&r, s);
    for (int64_t l = 0; ok && l < s->config.layers; l++) {
        ok = qlora__ffn_sums(r.model, &r.model->layers[l]) == wants;
    }
    ok = ok && (qlora_train_micro(r.trainer, &d.batch, 10.0) == QLORA_OK || rig_says(&r, "micro"));
    g->values = ok ? rig_read(&r, true, &g->count) : NULL;
    return g->values != NULL && gated_places(r.model, g) &&
           qlora_train_cancel(r.trainer) == QLORA_OK && rig_close(&r, s);
}

// Every gradient of a model is that of the path for dropout, with a mask that takes nothing away:
// that path rounds the gradient of x twice.
TEST gated_models_have_the_gradients(const test_machine* machine) {
    if (strcmp(machine->backend, "cpu") == 0) {
        SKIPm("needs a GPU");
    }
    for (size_t i = 0; i < sizeof gated_kinds / sizeof gated_kinds[0]; i++) {
        setup s = setup_make(machine);
        gated_gradients expected;
        s.model.mode = QLORA_MODE_BF16;
        s.model.rank = 8;
        s.model.dropout = 1e-9f;
        gated_kinds[i].vary(&s);
        ASSERTm(gated_kinds[i].name, gated_micro(&s, false, &expected));
        for (int way = 0; way < (test_checked(machine) ? 1 : 3); way++) {
            gated_gradients got;
            s.model.dropout = 0.0f;
            s.model.recompute = way == 0 ? QLORA_CHOICE_OFF : QLORA_CHOICE_ON;
            s.model.tile = way == 2 ? 8 : 0;
            ASSERTm(gated_kinds[i].name, gated_micro(&s, true, &got));
            ASSERT(gated_close(gated_kinds[i].name, &expected, &got));
            free(got.values);
        }
        free(expected.values);
    }
    PASS();
}

SUITE(gated_suite) {
    RUN_ON(TEST_ONE_EACH, gated_sums_are_right);
    RUN_ON(TEST_ONE_EACH, gated_models_have_the_gradients);
    RUN_TEST(gated_ranks_are_chosen);
}
