// experts.c - mixtures of experts: what a router makes of scores, against a plain computation and
// differences; and models, with the settings that change how a layer is computed.

#include "machines.h"
#include "model_rig.h"

SUITE_EXTERN(experts_suite);

enum { ROUTE_ROWS = 9, ROUTE_EXPERTS = 6, ROUTE_CHOSEN = 3 };

typedef struct route_case {
    const char* name;
    qlora__router score;
    int64_t groups;
    int64_t groups_used;
    bool renormalise;
    double scale;
    bool corrected;
} route_case;

static const route_case route_cases[] = {
    {"softmax", QLORA__ROUTER_SOFTMAX, 1, 1, false, 1.0, false},
    {"renormalised", QLORA__ROUTER_SOFTMAX, 1, 1, true, 1.0, false},
    {"chosen", QLORA__ROUTER_SOFTMAX_CHOSEN, 1, 1, false, 1.0, false},
    {"sigmoid", QLORA__ROUTER_SIGMOID, 1, 1, false, 2.5, true},
    {"groups", QLORA__ROUTER_SIGMOID, 3, 2, true, 1.7, true}};

#define ROUTE_CASES (sizeof route_cases / sizeof route_cases[0])

typedef struct route_rig {
    QLORA__REAL scores[ROUTE_ROWS * ROUTE_EXPERTS];
    QLORA__REAL correction[ROUTE_EXPERTS];
    QLORA__REAL weights[ROUTE_ROWS * ROUTE_CHOSEN];
    int32_t choice[ROUTE_ROWS * ROUTE_CHOSEN];
    int32_t place[ROUTE_ROWS * ROUTE_CHOSEN];
    int32_t tokens[ROUTE_ROWS * ROUTE_CHOSEN];
    int32_t starts[ROUTE_EXPERTS + 1];
    qlora_tensor t;
    qlora__route route;
} route_rig;

static void route_open(route_rig* r, const route_case* c) {
    test_random random = test_random_start(c->name);
    memset(r, 0, sizeof *r);
    for (int i = 0; i < ROUTE_ROWS * ROUTE_EXPERTS; i++) {
        r->scores[i] = (QLORA__REAL)test_random_normal(&random);
    }
    for (int i = 0; i < ROUTE_EXPERTS; i++) {
        r->correction[i] = (QLORA__REAL)(0.3 * test_random_normal(&random));
    }
    r->t.data = r->scores;
    r->t.dtype = QLORA_F32;
    r->t.rows = ROUTE_ROWS;
    r->t.cols = ROUTE_EXPERTS;
    r->t.ld = ROUTE_EXPERTS;
    r->route.rule.score = c->score;
    r->route.rule.experts = ROUTE_EXPERTS;
    r->route.rule.chosen = ROUTE_CHOSEN;
    r->route.rule.groups = c->groups;
    r->route.rule.groups_used = c->groups_used;
    r->route.rule.renormalise = c->renormalise;
    r->route.rule.scale = c->scale;
    r->route.rule.correction = c->corrected ? r->correction : NULL;
    r->route.rows = ROUTE_ROWS;
    r->route.scores = &r->t;
    r->route.choice = r->choice;
    r->route.weights = r->weights;
    r->route.place = r->place;
    r->route.tokens = r->tokens;
    r->route.starts = r->starts;
}

// The value of an expert before it is divided by a sum.
static double route_value(const route_case* c, const QLORA__REAL* z, int e) {
    double sum = 0.0;
    for (int i = 0; i < ROUTE_EXPERTS; i++) {
        sum += exp((double)z[i]);
    }
    return c->score == QLORA__ROUTER_SIGMOID ? 1.0 / (1.0 + exp(-(double)z[e]))
                                             : exp((double)z[e]) / sum;
}

// What decides the choice of an expert.
static double route_rank(const route_rig* r, const route_case* c, const QLORA__REAL* z, int e) {
    return route_value(c, z, e) + (c->corrected ? (double)r->correction[e] : 0.0);
}

// The sum of the two best experts of a group.
static double route_group(const route_rig* r, const route_case* c, const QLORA__REAL* z, int g) {
    int each = (int)(ROUTE_EXPERTS / c->groups);
    double best = -1e300;
    for (int a = g * each; a < (g + 1) * each; a++) {
        for (int b = a + 1; b < (g + 1) * each; b++) {
            best = fmax(best, route_rank(r, c, z, a) + route_rank(r, c, z, b));
        }
    }
    return best;
}

// How many experts, or groups, come before one.
static bool route_may(const route_rig* r, const route_case* c, const QLORA__REAL* z, int e) {
    int before = 0;
    int each = (int)(ROUTE_EXPERTS / c->groups);
    for (int g = 0; g < c->groups && c->groups > 1; g++) {
        before += route_group(r, c, z, g) > route_group(r, c, z, e / each) ? 1 : 0;
    }
    return before < c->groups_used;
}

static int route_before(const route_rig* r, const route_case* c, const QLORA__REAL* z, int e) {
    int before = 0;
    for (int i = 0; i < ROUTE_EXPERTS; i++) {
        bool better = route_rank(r, c, z, i) > route_rank(r, c, z, e);
        before += route_may(r, c, z, i) && better ? 1 : 0;
    }
    return before;
}

TEST routes_are_right(const test_machine* machine, const route_case* c) {
    static route_rig r;
    qlora_ctx* ctx = test_open(machine, NULL);
    ASSERTm(test_open_reason(), ctx != NULL);
    route_open(&r, c);
    qlora__route_tokens(ctx, &r.route);
    for (int row = 0; row < ROUTE_ROWS; row++) {
        const QLORA__REAL* z = r.scores + row * ROUTE_EXPERTS;
        double sum = 0.0;
        for (int j = 0; j < ROUTE_CHOSEN; j++) {
            int e = (int)r.choice[row * ROUTE_CHOSEN + j];
            ASSERTm(c->name, route_may(&r, c, z, e) && route_before(&r, c, z, e) == j);
            sum += route_value(c, z, e);
        }
        bool divided = c->renormalise || c->score == QLORA__ROUTER_SOFTMAX_CHOSEN;
        for (int j = 0; j < ROUTE_CHOSEN; j++) {
            int at = row * ROUTE_CHOSEN + j;
            double w = route_value(c, z, (int)r.choice[at]) / (divided ? sum : 1.0) * c->scale;
            ASSERTm(c->name, fabs((double)r.weights[at] - w) <= 1e-6 * w);
            ASSERT_EQ(row, r.tokens[r.place[at]]);
            ASSERT(r.place[at] >= r.starts[r.choice[at]] &&
                   r.place[at] < r.starts[r.choice[at] + 1]);
        }
    }
    for (int i = 1; i < ROUTE_ROWS * ROUTE_CHOSEN; i++) { // in the order of the tokens
        bool begins = false;
        for (int e = 0; e < ROUTE_EXPERTS; e++) {
            begins = begins || r.starts[e] == i;
        }
        ASSERT(begins || r.tokens[i] > r.tokens[i - 1]);
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// Among equal scores, the expert with the lower number is taken; so is the group.
TEST ties_go_to_the_lower_number(const test_machine* machine, const route_case* c) {
    static route_rig r;
    qlora_ctx* ctx = test_open(machine, NULL);
    ASSERTm(test_open_reason(), ctx != NULL);
    route_open(&r, c);
    r.route.rule.correction = NULL;
    for (int i = 0; i < ROUTE_ROWS * ROUTE_EXPERTS; i++) {
        r.scores[i] = (QLORA__REAL)(i % ROUTE_EXPERTS == 4 && i >= ROUTE_EXPERTS ? 1.0 : 0.5);
    }
    qlora__route_tokens(ctx, &r.route);
    for (int j = 0; j < ROUTE_CHOSEN; j++) {
        ASSERT_EQ(j, r.choice[j]);
        int later = j == 0 ? 4 : j - 1; // of a row in which number 4 is the best
        ASSERT_EQ(later, r.choice[ROUTE_CHOSEN + j]);
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// Scores that are not finite choose experts that exist, with weights that are NaN.
TEST bad_scores_are_seen(const test_machine* machine, const route_case* c) {
    static route_rig r;
    qlora_ctx* ctx = test_open(machine, NULL);
    ASSERTm(test_open_reason(), ctx != NULL);
    route_open(&r, c);
    r.scores[2] = (QLORA__REAL)(1e38f * 1e38f);
    r.scores[ROUTE_EXPERTS + 5] = (QLORA__REAL)NAN;
    qlora__route_tokens(ctx, &r.route);
    for (int i = 0; i < ROUTE_ROWS * ROUTE_CHOSEN; i++) {
        ASSERT(r.choice[i] >= 0 && r.choice[i] < ROUTE_EXPERTS);
        ASSERT((r.weights[i] != r.weights[i]) == (i < 2 * ROUTE_CHOSEN));
    }
    route_open(&r, c);
    r.correction[3] = (QLORA__REAL)NAN;
    qlora__route_tokens(ctx, &r.route);
    for (int row = 0; row < ROUTE_ROWS; row++) {
        const int32_t* choice = r.choice + row * ROUTE_CHOSEN;
        ASSERT(choice[0] != choice[1] && choice[1] != choice[2] && choice[0] != choice[2]);
        ASSERT((r.weights[row * ROUTE_CHOSEN] != r.weights[row * ROUTE_CHOSEN]) == c->corrected);
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// ---- models

static void experts_mixtral(setup* s) {
    s->config.family = QLORA_FAMILY_MIXTRAL;
    s->config.qk_norm = false;
}

static void experts_qwen2(setup* s) {
    experts_mixtral(s);
    s->config.family = QLORA_FAMILY_QWEN2_MOE;
    s->config.qkv_bias = true;
    s->config.shared_intermediate = 24;
    s->config.dense[0] = 1;
    s->model.targets = QLORA_TARGET_ALL | QLORA_TARGET_ROUTER | QLORA_TARGET_SHARED_GATE;
    s->model.targets &= ~(uint32_t)(QLORA_TARGET_QKV | QLORA_TARGET_GATE_UP);
}

// The MLP beside the experts has no gate here.
static void experts_glm(setup* s) {
    experts_mixtral(s);
    s->config.family = QLORA_FAMILY_GLM4_MOE;
    s->config.qk_norm = true;
    s->config.shared_intermediate = 24;
    s->config.routed_scale = 1.5;
    s->config.rope_dims = 8;
    s->config.dense[0] = 1;
}

static void experts_balanced(setup* s) {
    experts_mixtral(s);
    s->model.targets = QLORA_TARGET_ATTENTION | QLORA_TARGET_EXPERTS_IN | QLORA_TARGET_EXPERTS_OUT;
    s->model.targets |= QLORA_TARGET_ROUTER;
    s->train.router_aux_loss = 0.3;
}

static setup experts_setup(const test_machine* machine, void (*vary)(setup* s)) {
    setup s = setup_make(machine);
    s.config.experts = 5;
    s.config.experts_per_token = 2;
    s.config.expert_intermediate = 24;
    s.model.dropout = 0.0f;
    vary(&s);
    return s;
}

static void experts_one_thread(qlora_ctx_desc* desc) {
    desc->threads = 1;
}

static void experts_three_threads(qlora_ctx_desc* desc) {
    desc->threads = 3;
}

static double experts_difference(const outcome* a, const outcome* b) {
    double sum = 0.0;
    double all = 0.0;
    for (size_t i = 0; i < a->count && i < b->count; i++) {
        double d = (double)a->values[i] - (double)b->values[i];
        sum += d * d;
        all += (double)a->values[i] * (double)a->values[i];
    }
    return a->count == b->count ? sqrt(sum / all) : (double)NAN;
}

// Recomputation and threads change nothing, tiles only the order of sums.
TEST ways_give_the_same(const test_machine* machine, void (*vary)(setup* s)) {
    outcome expected;
    memset(&expected, 0, sizeof expected);
    for (int i = 0; i < 4; i++) {
        setup s = experts_setup(machine, vary);
        outcome got;
        s.model.recompute = i == 0 ? QLORA_CHOICE_OFF : QLORA_CHOICE_ON;
        s.model.tile = i == 3 ? 8 : 0;
        s.change = i == 1 ? experts_one_thread : experts_three_threads;
        ASSERT(run_session(&s, &got));
        ASSERT(outcome_sane(&got));
        if (i == 0) {
            expected = got;
            continue;
        }
        ASSERT(i == 3 ? experts_difference(&expected, &got) <= 1e-4
                      : outcome_same(&expected, &got));
        outcome_free(&got);
    }
    outcome_free(&expected);
    PASS();
}

// In bf16, with ranks for which the kernels of an MLP compute gradients of adapters as well: that
// they do, where they may, changes only the order of sums.
TEST sixteen_bits_are_near(const test_machine* machine, void (*vary)(setup* s)) {
    outcome outcomes[3];
    for (int i = 0; i < 3; i++) {
        setup s = experts_setup(machine, vary);
        s.model.rank = 8;
        s.model.mode = QLORA_MODE_BF16;
        s.model.recompute = i == 2 ? QLORA_CHOICE_ON : QLORA_CHOICE_OFF;
        s.train.lr = 1e-6; // with larger steps, small differences would change who is chosen
        test_gated_from = i == 0 ? INT64_MAX : 1;
        bool ran = run_session(&s, &outcomes[i]);
        test_gated_from = 1;
        ASSERT(ran);
        ASSERT(outcome_sane(&outcomes[i]));
        outcomes[i].count /= 2; // the gradients
    }
    for (int i = 1; i < 3; i++) {
        ASSERT(experts_difference(&outcomes[0], &outcomes[i]) <= 0.01);
    }
    for (int i = 0; i < 3; i++) {
        outcome_free(&outcomes[i]);
    }
    PASS();
}

// One step of two micro-batches, or of one of them if `only` is not negative; sliced: in slices.
static bool balanced_step(rig* r, int only, bool sliced, qlora_train_info* out) {
    data d[MICRO];
    qlora_batch batches[MICRO];
    bool done = false;
    for (int i = 0; i < MICRO; i++) {
        char name[32];
        snprintf(name, sizeof name, "balanced %d", i);
        data_make(&d[i], name, run_lengths[i], 3);
        batches[i] = d[i].batch;
    }
    const qlora_batch* first = only >= 0 ? &batches[only] : batches;
    int64_t count = only >= 0 ? 1 : MICRO;
    if (!sliced) {
        return qlora_train_step(r->trainer, first, count, out) == QLORA_OK;
    }
    bool ok = qlora_train_begin(r->trainer, first, count) == QLORA_OK;
    while (ok && !done) {
        ok = qlora_train_slice(r->trainer, 0.01, &done) == QLORA_OK;
    }
    return ok && qlora_train_query(r->trainer, out) == QLORA_OK;
}

// The share of a batch of balanced_step in its labels.
static double balanced_share(int which) {
    double labels[MICRO];
    for (int i = 0; i < MICRO; i++) {
        data d;
        char name[32];
        snprintf(name, sizeof name, "balanced %d", i);
        data_make(&d, name, run_lengths[i], 3);
        labels[i] = qlora_batch_labels(&d.batch);
    }
    return labels[which] / (labels[0] + labels[1]);
}

// The load-balancing loss of a step is the mean of its micro-batches, by labels, and in the loss
// with its coefficient; in slices, all is the same.
TEST balance_of_a_step(const test_machine* machine) {
    setup s = experts_setup(machine, experts_balanced);
    qlora_train_info whole;
    qlora_train_info got;
    float* values[2] = {NULL, NULL};
    size_t count = 0;
    rig r;
    s.train.lr = -1.0; // parameters stay
    ASSERT(rig_open(&r, &s));
    ASSERT(balanced_step(&r, -1, false, &whole));
    double mean = 0.0;
    for (int i = 0; i < MICRO; i++) {
        ASSERT(balanced_step(&r, i, false, &got));
        mean += balanced_share(i) * got.router_aux_loss;
    }
    double entropy = got.load_entropy; // of that step alone, as in a new trainer
    ASSERT(rig_close(&r, &s));
    ASSERT(rig_open(&r, &s));
    ASSERT(balanced_step(&r, MICRO - 1, false, &got));
    ASSERT(rig_close(&r, &s));
    ASSERT(fabs(got.load_entropy - entropy) <= 0.0);
    ASSERT(fabs(got.load_entropy - whole.load_entropy) > 0.0);
    ASSERT(whole.router_aux_loss > 1.0 && whole.router_aux_loss < 5.0);
    ASSERT(fabs(mean - whole.router_aux_loss) <= 1e-6 * mean);
    ASSERT(whole.load_least >= 0.0 && whole.load_least < 1.0);
    ASSERT(whole.load_most > 1.0 && whole.load_most <= 2.5);
    ASSERT(whole.load_entropy > 0.5 && whole.load_entropy < 1.0);
    s.train.router_aux_loss = 0.0;
    ASSERT(rig_open(&r, &s));
    ASSERT(balanced_step(&r, -1, false, &got));
    ASSERT(rig_close(&r, &s));
    ASSERT(!(got.router_aux_loss > 0.0) && !(got.router_aux_loss < 0.0) && got.load_most > 1.0);
    ASSERT(fabs(got.loss + 0.3 * whole.router_aux_loss - whole.loss) <= 1e-6 * whole.loss);
    s.train.router_aux_loss = 0.3;
    s.train.lr = 1e-2;
    for (int i = 0; i < 2; i++) {
        ASSERT(rig_open(&r, &s));
        ASSERT(balanced_step(&r, -1, i == 1, &got));
        ASSERT(fabs(got.router_aux_loss - whole.router_aux_loss) <= 0.0);
        ASSERT(fabs(got.load_entropy - whole.load_entropy) <= 0.0);
        values[i] = rig_read(&r, false, &count);
        ASSERT(values[i] != NULL && rig_close(&r, &s));
    }
    ASSERT_MEM_EQ(values[0], values[1], count * sizeof(float));
    free(values[0]);
    free(values[1]);
    PASS();
}

// Where the loss does not exist, and where a config leaves open which one is meant.
TEST balance_is_refused(const test_machine* machine) {
    static const struct {
        const char* words; // NULL = it is accepted
        qlora_family family;
        bool in_config;
        double coefficient;
    } cases[] = {{"no experts", QLORA_FAMILY_LLAMA, false, 0.1},
                 {"sigmoids", QLORA_FAMILY_GLM4_MOE, false, 0.1},
                 {NULL, QLORA_FAMILY_GLM4_MOE, true, 0.0},
                 {"output_router_logits", QLORA_FAMILY_MIXTRAL, true, 0.0},
                 {NULL, QLORA_FAMILY_MIXTRAL, true, 0.1},
                 {NULL, QLORA_FAMILY_MIXTRAL, true, -1.0},
                 {"desc.router_aux_loss", QLORA_FAMILY_MIXTRAL, false, 1e7},
                 {"desc.router_aux_loss", QLORA_FAMILY_MIXTRAL, false, (double)NAN}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        setup s = experts_setup(machine, experts_mixtral);
        rig r;
        s.config.family = cases[i].family;
        s.config.experts = cases[i].family == QLORA_FAMILY_LLAMA ? 0 : s.config.experts;
        s.config.experts_per_token = s.config.experts > 0 ? 2 : 0;
        s.config.expert_intermediate = s.config.experts > 0 ? 24 : 0;
        s.config.shared_intermediate = cases[i].family == QLORA_FAMILY_GLM4_MOE ? 24 : 0;
        s.config.router_loss = cases[i].in_config;
        s.train.router_aux_loss = cases[i].coefficient;
        rig_quiet = cases[i].words != NULL;
        bool opened = rig_open(&r, &s);
        rig_quiet = false;
        ASSERT_EQm(cases[i].words, cases[i].words == NULL, opened);
        ASSERT(r.model != NULL);
        ASSERTm(qlora_last_error(r.ctx),
                opened || strstr(qlora_last_error(r.ctx), cases[i].words) != NULL);
        ASSERT(rig_close(&r, &s));
    }
    PASS();
}

TEST sixteen_bits_of_experts(const test_machine* machine) {
    CHECK_CALL(sixteen_bits_are_near(machine, experts_mixtral));
    CHECK_CALL(sixteen_bits_are_near(machine, experts_qwen2));
    return sixteen_bits_are_near(machine, experts_glm);
}

// What is not supported is refused by its name.
TEST experts_refuse(const test_machine* machine) {
    static const struct {
        const char* words;
        float dropout;
        bool dora;
        qlora_base_format base;
        qlora_mode mode;
        int32_t slots;
        int32_t capability;
    } cases[] = {{"dropout on experts", 0.1f, false, QLORA_BASE_NF4, QLORA_MODE_F32, 0, 0},
                 {"DoRA", 0.0f, true, QLORA_BASE_NF4, QLORA_MODE_F32, 0, 0},
                 {"support for FP8", 0.0f, false, QLORA_BASE_FP8, QLORA_MODE_F32, 0, 0},
                 {"support for FP8", 0.0f, false, QLORA_BASE_NF4, QLORA_MODE_FP8, 0, 0},
                 {"several adapters", 0.0f, false, QLORA_BASE_NF4, QLORA_MODE_F32, 2, 0},
                 {"support for FP8", 0.0f, false, QLORA_BASE_NF4, QLORA_MODE_FP8, 0, 90}};
    qlora_ctx* ctx = test_open(machine, NULL);
    ASSERTm(test_open_reason(), ctx != NULL);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        setup s = experts_setup(machine, experts_mixtral);
        qlora_adapter_slot slots[2];
        qlora_plan_desc where;
        qlora_plan made;
        memset(slots, 0, sizeof slots);
        memset(&where, 0, sizeof where);
        where.capability = cases[i].capability;
        s.model.config = &s.config;
        s.model.dropout = cases[i].dropout;
        s.model.dora = cases[i].dora;
        s.model.base = cases[i].base;
        s.model.mode = cases[i].mode;
        s.model.slots = cases[i].slots > 0 ? slots : NULL;
        s.model.slot_count = cases[i].slots;
        s.model.train_norms = false;
        ASSERT_EQm(cases[i].words, QLORA_ERR_UNSUPPORTED,
                   qlora_plan_make(ctx, &s.model, &where, &made));
        ASSERTm(qlora_last_error(ctx), strstr(qlora_last_error(ctx), cases[i].words) != NULL);
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

TEST targets_of_experts(const test_machine* machine) {
    static const struct {
        uint32_t targets;
        const char* words; // NULL = it is accepted
        int64_t tensors;
    } cases[] = {{0, NULL, 2 * 12},
                 {QLORA_TARGET_ATTENTION, NULL, 2 * 8},
                 {QLORA_TARGET_EXPERTS_IN, NULL, 2 * 2},
                 {QLORA_TARGET_ROUTER | QLORA_TARGET_EXPERTS_OUT, NULL, 2 * 4},
                 {QLORA_TARGET_GATE, "it has experts", 0},
                 {QLORA_TARGET_SHARED_GATE, "the gate of the shared expert", 0}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        setup s = experts_setup(machine, experts_mixtral);
        rig r;
        s.model.targets = cases[i].targets;
        s.model.train_norms = false;
        rig_quiet = cases[i].words != NULL;
        bool opened = rig_open(&r, &s);
        rig_quiet = false;
        ASSERT_EQ(cases[i].words == NULL, opened);
        if (opened) {
            ASSERT_EQ(cases[i].tensors, model_parameters(r.model));
            ASSERT(rig_close(&r, &s));
        } else {
            ASSERTm(qlora_last_error(r.ctx), strstr(qlora_last_error(r.ctx), cases[i].words));
            ASSERT(test_close_ctx(machine, r.ctx));
        }
    }
    PASS();
}

TEST routes(const test_machine* machine) {
    for (size_t i = 0; i < ROUTE_CASES; i++) {
        CHECK_CALL(routes_are_right(machine, &route_cases[i]));
        CHECK_CALL(ties_go_to_the_lower_number(machine, &route_cases[i]));
        CHECK_CALL(bad_scores_are_seen(machine, &route_cases[i]));
    }
    PASS();
}

TEST ways_of_mixtral(const test_machine* machine) {
    return ways_give_the_same(machine, experts_mixtral);
}

TEST ways_with_a_shared_expert(const test_machine* machine) {
    return ways_give_the_same(machine, experts_qwen2);
}

TEST ways_with_a_plain_shared_expert(const test_machine* machine) {
    return ways_give_the_same(machine, experts_glm);
}

TEST ways_with_balance(const test_machine* machine) {
    return ways_give_the_same(machine, experts_balanced);
}

SUITE(experts_suite) {
    RUN_ON(TEST_CPU, routes);
    RUN_ON(TEST_CPU | TEST_ONE_GPU, ways_of_mixtral);
    RUN_ON(TEST_CPU | TEST_ONE_GPU, ways_with_a_shared_expert);
    RUN_ON(TEST_CPU | TEST_ONE_GPU, ways_with_a_plain_shared_expert);
    RUN_ON(TEST_ONE_GPU, sixteen_bits_of_experts);
    RUN_ON(TEST_CPU | TEST_ONE_GPU, ways_with_balance);
    RUN_ON(TEST_CPU | TEST_ONE_GPU, balance_of_a_step);
    RUN_ON(TEST_CPU, balance_is_refused);
    RUN_ON(TEST_CPU, experts_refuse);
    RUN_ON(TEST_CPU, targets_of_experts);
}
