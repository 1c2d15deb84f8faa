// test_model.c - models and training through the public functions: the same bits whatever the way, any
// split of a step, every option, the plan's bytes, refusals, and clean failures.
#include "model_rig.h"

#define ASSERT_OK(R, CALL) ASSERT_EQm(qlora_last_error((R).ctx), QLORA_OK, (CALL))

// ---- the same bits

static void one_thread(qlora_ctx_desc* desc) {
    desc->threads = 1;
}

static void vary_repeat(setup* s) {
    (void)s;
}

static void vary_threads(setup* s) {
    s->change = one_thread;
}

static void vary_order(setup* s) {
    s->machine.order = s->machine.order == FAKE_REVERSE ? FAKE_RANDOM : FAKE_REVERSE;
}

static void vary_eager(setup* s) {
    s->train.eager = true;
}

static void vary_recompute(setup* s) {
    s->train.recompute = QLORA_CHOICE_ON;
}

static void vary_cache(setup* s) {
    s->train.cache = QLORA_CHOICE_ON;
}

static void vary_eval(setup* s) {
    s->eval_between = true;
}

// One of the two layers recomputed, one of them cached: what a budget would choose.
static void vary_some(setup* s) {
    s->train.recompute = QLORA_CHOICE_AUTO;
    s->budget = 1; // found by find_budget
}

typedef struct way {
    const char* name;
    void (*vary)(setup* s);
    const char* backend; // NULL: every one
    bool bf16;           // in bf16, too
} way;

static const way ways[] = {
    {"repeated", vary_repeat, NULL, false},
    {"one thread", vary_threads, "cpu", false},
    {"another order", vary_order, "fake", true},
    {"eager", vary_eager, "fake", true},
    {"eager", vary_eager, "cuda", true},
    {"every layer recomputed", vary_recompute, NULL, true},
    {"some layers recomputed", vary_some, NULL, false},
    {"cached weights", vary_cache, NULL, true},
    {"evaluation in between", vary_eval, NULL, false},
};

// The budget between no recomputed layer and all of them; it must give a number between.
static uint64_t find_budget(const setup* s) {
    uint64_t bytes[2] = {0, 0};
    qlora_plan plan;
    rig r;
    memset(&r, 0, sizeof r);
    r.ctx = test_open(&s->machine, s->change);
    for (int i = 0; i < 2 && r.ctx != NULL; i++) {
        setup one = *s;
        one.model.config = &one.config;
        one.train.recompute = i == 0 ? QLORA_CHOICE_OFF : QLORA_CHOICE_ON;
        if (qlora_plan_make(r.ctx, &one.model, &one.train, NULL, &plan) != QLORA_OK) {
            rig_says(&r, "plan");
            return 0;
        }
        bytes[i] = plan.total + plan.context;
    }
    setup middle = *s;
    qlora_budget budget;
    memset(&budget, 0, sizeof budget);
    budget.bytes = (bytes[0] + bytes[1]) / 2;
    middle.model.config = &middle.config;
    bool some = qlora_plan_make(r.ctx, &middle.model, &middle.train, &budget, &plan) == QLORA_OK &&
                plan.recompute_layers > 0 && plan.recompute_layers < plan.config.layers;
    return test_close_ctx(&s->machine, r.ctx) && some ? budget.bytes : 0;
}

TEST every_way_gives_the_same_bits(const test_machine* machine, qlora_mode mode) {
    setup s = setup_make(machine);
    s.config.layers = 3; // so that some can be recomputed and the plan still gains
    s.config.hidden = 24;
    s.model.mode = mode;
    s.train.recompute = QLORA_CHOICE_OFF;
    outcome expected;
    ASSERT(run_session(&s, &expected));
    ASSERT(outcome_sane(&expected));
    for (size_t i = 0; i < sizeof ways / sizeof ways[0]; i++) {
        bool here = ways[i].backend == NULL || strcmp(ways[i].backend, machine->backend) == 0;
        if (!here || (mode == QLORA_MODE_BF16 && !ways[i].bf16)) {
            continue;
        }
        setup other = s;
        outcome got;
        ways[i].vary(&other);
        if (other.budget != 0) {
            other.budget = find_budget(&other);
            ASSERT(other.budget != 0);
        }
        ASSERTm(ways[i].name, run_session(&other, &got));
        ASSERTm(ways[i].name, outcome_same(&expected, &got));
        outcome_free(&got);
    }
    outcome_free(&expected);
    PASS();
}

TEST same_bits_f32(const test_machine* machine) {
    return every_way_gives_the_same_bits(machine, QLORA_MODE_F32);
}

TEST same_bits_bf16(const test_machine* machine) {
    if (strcmp(machine->backend, "cpu") == 0) {
        PASS();
    }
    return every_way_gives_the_same_bits(machine, QLORA_MODE_BF16);
}

// ---- any split of a step

static const int32_t split_lengths[MAX_SEQUENCES] = {3, 5, 1, 4, 2, 6, 1, 2};

static void wide(setup* s) {
    s->train.tokens = 3 * TOKENS;
    s->model.dropout = 0.25f;
    s->train.max_norm = -1.0; // nothing is clipped
}

// Gradients of the batch, all at once or (parts) sequence by sequence in the order given; NULL on failure.
static float* split_gradients(rig* r, const qlora_batch* b, const int* order, double* loss,
                              size_t* count) {
    double total = qlora_batch_labels(b);
    qlora_train_info info;
    for (int i = 0; i < (order != NULL ? MAX_SEQUENCES : 1); i++) {
        qlora_batch part = order != NULL ? batch_part(b, order[i]) : *b;
        if (qlora_train_micro(r->trainer, &part, total) != QLORA_OK) {
            rig_says(r, "micro");
            return NULL;
        }
    }
    float* gradients = rig_read(r, true, count);
    if (qlora_train_update(r->trainer) != QLORA_OK ||
        qlora_train_info_read(r->trainer, &info) != QLORA_OK) {
        rig_says(r, "update");
        free(gradients);
        return NULL;
    }
    *loss = info.loss;
    return gradients;
}

// 1x8, 8x1 and 8x1 backwards; the masks of the dropout go with the number of a sequence in the data.
TEST one_by_eight_is_eight_by_one(const test_machine* machine) {
    static const int forwards[MAX_SEQUENCES] = {0, 1, 2, 3, 4, 5, 6, 7};
    static const int backwards[MAX_SEQUENCES] = {7, 6, 5, 4, 3, 2, 1, 0};
    static const int* const orders[] = {NULL, forwards, backwards, forwards};
    setup s = setup_make(machine);
    wide(&s);
    data d;
    data_make(&d, "split", split_lengths, MAX_SEQUENCES);
    float* expected = NULL;
    double expected_loss = 0.0;
    size_t n = 0;
    for (int i = 0; i < 4; i++) {
        rig r;
        double loss = 0.0;
        ASSERT(rig_open(&r, &s));
        qlora_batch batch = d.batch;
        if (i == 3) {
            batch.sequences = NULL; // every part is sequence 0 then: other masks, another step
        }
        float* got = split_gradients(&r, &batch, orders[i], &loss, &n);
        ASSERT(got != NULL);
        ASSERT(rig_close(&r, &s));
        if (i == 0) {
            expected = got;
            expected_loss = loss;
            continue;
        }
        bool close = fabs(loss - expected_loss) <= 1e-6 * expected_loss;
        test_quiet(i == 3);
        close = test_rel_l2(expected, got, n, i == 3 ? 1e-2 : 2e-5) && close;
        test_quiet(false);
        ASSERT_EQ(i != 3, close);
        free(got);
    }
    free(expected);
    PASS();
}

TEST packed_is_one_by_one(const test_machine* machine) {
    setup s = setup_make(machine);
    s.train.tokens = 3 * TOKENS;
    rig r;
    data d;
    data_make(&d, "packed", split_lengths, MAX_SEQUENCES);
    ASSERT(rig_open(&r, &s));
    qlora_eval_info all;
    ASSERT_OK(r, qlora_eval(r.trainer, &d.batch, &all));
    ASSERT_IN_RANGE(qlora_batch_labels(&d.batch), all.labels, 0.0);
    ASSERT_EQ_FMT(24, (int)all.tokens, "%d");
    double sum = 0.0;
    float packed[24 * VOCAB];
    float single[24 * VOCAB];
    ASSERT_OK(r, qlora_eval_logits(r.trainer, &d.batch, packed));
    int64_t at = 0;
    for (int i = 0; i < MAX_SEQUENCES; i++) {
        qlora_batch one = batch_part(&d.batch, i);
        qlora_eval_info info;
        ASSERT_OK(r, qlora_eval(r.trainer, &one, &info));
        sum += info.loss;
        ASSERT_OK(r, qlora_eval_logits(r.trainer, &one, single + at * VOCAB));
        at += d.lengths[i];
    }
    ASSERT(fabs(sum - all.loss) <= 1e-6 * all.loss);
    ASSERT_REL_L2(packed, single, 24 * VOCAB, 1e-5);
    ASSERT(rig_close(&r, &s));
    PASS();
}

// A weight of 0 is a label of -100; a weight of 2 everywhere, with twice the total, is no weight.
TEST weights_weigh(const test_machine* machine) {
    setup s = setup_make(machine);
    data plain;
    data weighted;
    data_make(&plain, "weights", run_lengths[0], 3);
    weighted = plain;
    weighted.batch.ids = weighted.ids;
    weighted.batch.labels = weighted.labels;
    weighted.batch.lengths = weighted.lengths;
    weighted.batch.sequences = weighted.sequences;
    weighted.batch.weights = weighted.weights;
    for (int i = 0; i < 17; i++) {
        weighted.weights[i] = 2.0f;
        if (i % 3 == 0 && plain.labels[i] != -100) {
            weighted.weights[i] = 0.0f;
            plain.labels[i] = -100;
        }
    }
    double total = qlora_batch_labels(&plain.batch);
    ASSERT_IN_RANGE(2.0 * total, qlora_batch_labels(&weighted.batch), 0.0);
    rig r;
    size_t n = 0;
    ASSERT(rig_open(&r, &s));
    ASSERT_OK(r, qlora_train_micro(r.trainer, &plain.batch, total));
    float* expected = rig_read(&r, true, &n);
    qlora_train_info first;
    ASSERT_OK(r, qlora_train_update(r.trainer));
    ASSERT_OK(r, qlora_train_info_read(r.trainer, &first));
    ASSERT(rig_close(&r, &s));
    ASSERT(rig_open(&r, &s));
    ASSERT_OK(r, qlora_train_micro(r.trainer, &weighted.batch, 2.0 * total));
    float* got = rig_read(&r, true, &n);
    qlora_train_info second;
    ASSERT_OK(r, qlora_train_update(r.trainer));
    ASSERT_OK(r, qlora_train_info_read(r.trainer, &second));
    ASSERT(fabs(first.loss - second.loss) <= 1e-6 * first.loss);
    ASSERT_IN_RANGE(2.0 * first.labels, second.labels, 0.0);
    ASSERT_REL_L2(expected, got, n, 1e-5);
    free(expected);
    free(got);
    ASSERT(rig_close(&r, &s));
    PASS();
}

// A micro-batch without labels adds nothing, not even work of the head: chunks follow the labels.
TEST unlabelled_costs_nothing(const test_machine* machine) {
    setup s = setup_make(machine);
    s.train.eager = true; // so that kernels can be counted call by call
    const fake_api* fake = strcmp(machine->backend, "fake") == 0 ? test_fake() : NULL;
    data d;
    data none;
    data_make(&d, "labelled", run_lengths[0], 3);
    none = d;
    none.batch = d.batch;
    none.batch.labels = none.labels;
    for (int i = 0; i < TOKENS; i++) {
        none.labels[i] = -100;
    }
    ASSERT_IN_RANGE(0.0, qlora_batch_labels(&none.batch), 0.0);
    int labels = (int)qlora_batch_labels(&d.batch);
    ASSERT(labels > 7 && labels < 17); // several chunks, and rows without a label
    rig r;
    size_t n = 0;
    ASSERT(rig_open(&r, &s));
    ASSERT_OK(r, qlora_train_micro(r.trainer, &d.batch, labels));
    float* once = rig_read(&r, true, &n);
    uint64_t runs[3] = {0, 0, 0};
    const char* kernel = "qlora_loss_cross_entropy_f32";
    runs[0] = fake != NULL ? fake->kernel_runs(kernel) : 0;
    ASSERT_OK(r, qlora_train_micro(r.trainer, &none.batch, labels));
    float* same = rig_read(&r, true, &n);
    runs[1] = fake != NULL ? fake->kernel_runs(kernel) : 0;
    ASSERT_MEM_EQ(once, same, n * sizeof *once);
    ASSERT_OK(r, qlora_train_micro(r.trainer, &d.batch, labels));
    float* twice = rig_read(&r, true, &n);
    runs[2] = fake != NULL ? fake->kernel_runs(kernel) : 0;
    ASSERT_EQ_FMT(0, (int)(runs[1] - runs[0]), "%d");
    ASSERT_EQ_FMT(fake != NULL ? (labels + 6) / 7 : 0, (int)(runs[2] - runs[1]), "%d");
    for (size_t i = 0; i < n; i++) {
        once[i] *= 2.0f;
    }
    ASSERT_REL_L2(once, twice, n, 1e-6);
    qlora_train_info info;
    ASSERT_OK(r, qlora_train_update(r.trainer));
    ASSERT_OK(r, qlora_train_info_read(r.trainer, &info));
    ASSERT_IN_RANGE(2.0 * labels, info.labels, 0.0);
    ASSERT_EQ_FMT(51, (int)info.tokens, "%d");
    free(once);
    free(same);
    free(twice);
    ASSERT(rig_close(&r, &s));
    PASS();
}

SUITE(model_suite) {
    RUN_ON(TEST_ONE_EACH, same_bits_f32);
    RUN_ON(TEST_ONE_EACH, same_bits_bf16);
    RUN_ON(TEST_ONE_EACH, one_by_eight_is_eight_by_one);
    RUN_ON(TEST_ONE_EACH, packed_is_one_by_one);
    RUN_ON(TEST_ONE_EACH, weights_weigh);
    RUN_ON(TEST_ONE_EACH, unlabelled_costs_nothing);
}
