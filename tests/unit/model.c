// model.c - models and training through the public functions: the same bits by every route, any
// split of a step, every option, the plan's bytes, errors for bad arguments, and clean failures.
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

// Replaced by find_budget.
enum { BUDGET_SOME = 1, BUDGET_ATTENTION };

static void vary_order(setup* s) {
    s->machine.order = s->machine.order == FAKE_REVERSE ? FAKE_RANDOM : FAKE_REVERSE;
}

static void vary_eager(setup* s) {
    s->train.eager = true;
    s->train.require_graph = false;
}

static void vary_recompute(setup* s) {
    s->model.recompute = QLORA_CHOICE_ON;
}

static void vary_cache(setup* s) {
    s->model.cache = QLORA_CHOICE_ON;
}

// Without dropout, the adapter gradients run in parallel with the main stream: the order must not
// matter, with separate weights, with the shared operand, or when memory is reused.
static void vary_random(setup* s) {
    s->machine.order = FAKE_RANDOM;
}

static void vary_order_cached(setup* s) {
    vary_cache(s);
    vary_order(s);
}

static void vary_random_cached(setup* s) {
    vary_cache(s);
    vary_random(s);
}

static void vary_order_recomputed(setup* s) {
    vary_recompute(s);
    vary_order(s);
}

static void vary_random_recomputed(setup* s) {
    vary_recompute(s);
    vary_cache(s);
    vary_random(s);
}

static void vary_eval(setup* s) {
    s->eval_between = true;
}

// One of the two layers recomputed, one of them cached: what a memory budget could lead to.
static void vary_some(setup* s) {
    s->model.recompute = QLORA_CHOICE_AUTO;
    s->budget = BUDGET_SOME;
}

// Every layer recomputed, with memory left for the output of attention.
static void vary_attention(setup* s) {
    s->model.recompute = QLORA_CHOICE_AUTO;
    s->budget = BUDGET_ATTENTION;
}

typedef struct way {
    const char* name;
    void (*vary)(setup* s);
    const char* backend; // NULL: all
    bool bf16;           // also in bf16
} way;

static const way ways[] = {
    {"repeated", vary_repeat, NULL, false},
    {"one thread", vary_threads, "cpu", false},
    {"another order", vary_order, "fake", true},
    {"eager", vary_eager, "fake", true},
    {"eager", vary_eager, "cuda", true},
    {"every layer recomputed", vary_recompute, NULL, true},
    {"some layers recomputed", vary_some, NULL, false},
    {"attention kept", vary_attention, NULL, true},
    {"cached weights", vary_cache, NULL, true},
    {"evaluation in between", vary_eval, NULL, false},
};

static const way beside_ways[] = {
    {"eager", vary_eager, NULL, true},
    {"another order", vary_order, "fake", true},
    {"random order", vary_random, "fake", true},
    {"cached", vary_cache, NULL, true},
    {"cached, another order", vary_order_cached, "fake", true},
    {"cached, random order", vary_random_cached, "fake", true},
    {"recomputed, another order", vary_order_recomputed, "fake", true},
    {"recomputed, cached, random order", vary_random_recomputed, "fake", true},
};

static bool is_meant(const qlora_plan* plan, uint64_t meant) {
    bool all = plan->recompute_layers == plan->config.layers;
    return meant == BUDGET_SOME ? plan->recompute_layers > 0 && !all
                                : all && plan->attention_layers > 0;
}

// A budget between those with no recomputed layer and with all of them that gives what is meant.
static uint64_t find_budget(const setup* s) {
    uint64_t bytes[2] = {0, 0};
    qlora_plan plan;
    rig r;
    memset(&r, 0, sizeof r);
    r.ctx = test_open(&s->machine, s->change);
    for (int i = 0; i < 2 && r.ctx != NULL; i++) {
        setup one = *s;
        one.model.config = &one.config;
        one.model.recompute = i == 0 ? QLORA_CHOICE_OFF : QLORA_CHOICE_ON;
        if (qlora_plan_make(r.ctx, &one.model, NULL, &plan) != QLORA_OK) {
            rig_says(&r, "plan");
            return 0;
        }
        bytes[i] = plan.total + plan.context;
    }
    setup middle = *s;
    qlora_plan_desc budget;
    bool found = false;
    memset(&budget, 0, sizeof budget);
    middle.model.config = &middle.config;
    for (uint64_t part = 1; part < 64 && !found && r.ctx != NULL; part++) {
        budget.bytes = bytes[1] + (bytes[0] - bytes[1]) * part / 64;
        found = qlora_plan_make(r.ctx, &middle.model, &budget, &plan) == QLORA_OK &&
                is_meant(&plan, s->budget);
    }
    return test_close_ctx(&s->machine, r.ctx) && found ? budget.bytes : 0;
}

// beside: without dropout, so that the second stream has work; with ranks of multiples of 8, some
// of it comes with the activation (ops/gated.h).
TEST every_way_gives_the_same_bits(const test_machine* machine, qlora_mode mode, bool beside,
                                   uint32_t targets, int32_t rank, const way* list, size_t count) {
    if (test_brief() && strcmp(machine->backend, "fake") == 0) {
        SKIPm("brief run: dozens of sessions in the interpreter, each like those of other tests");
    }
    setup s = setup_make(machine);
    s.config.layers = 3; // so that recomputing only some of them saves memory
    s.config.hidden = 24;
    s.model.mode = mode;
    s.model.targets = targets;
    s.model.rank = rank;
    s.model.dropout = beside ? 0.0f : s.model.dropout;
    s.model.recompute = QLORA_CHOICE_OFF;
    s.train.require_graph = true; // a fallback would hide a failed capture
    outcome expected;
    ASSERT(run_session(&s, &expected));
    ASSERT(outcome_sane(&expected));
    for (const way* w = list; w < list + count; w++) {
        bool here = w->backend == NULL || strcmp(w->backend, machine->backend) == 0;
        if (!here || (mode == QLORA_MODE_BF16 && !w->bf16)) {
            continue;
        }
        setup other = s;
        outcome got;
        w->vary(&other);
        if (other.budget != 0) {
            other.budget = find_budget(&other);
            ASSERT(other.budget != 0);
        }
        ASSERTm(w->name, run_session(&other, &got));
        ASSERTm(w->name, outcome_same(&expected, &got));
        outcome_free(&got);
    }
    outcome_free(&expected);
    PASS();
}

TEST same_bits_f32(const test_machine* machine) {
    return every_way_gives_the_same_bits(machine, QLORA_MODE_F32, false, 0, 4, ways,
                                         sizeof ways / sizeof ways[0]);
}

TEST same_bits_bf16(const test_machine* machine) {
    return every_way_gives_the_same_bits(machine, QLORA_MODE_BF16, false, 0, 4, ways,
                                         sizeof ways / sizeof ways[0]);
}

TEST same_bits_beside_f32(const test_machine* machine) {
    return every_way_gives_the_same_bits(machine, QLORA_MODE_F32, true, 0, 4, beside_ways,
                                         sizeof beside_ways / sizeof beside_ways[0]);
}

TEST same_bits_beside_bf16(const test_machine* machine) {
    return every_way_gives_the_same_bits(machine, QLORA_MODE_BF16, true, 0, 4, beside_ways,
                                         sizeof beside_ways / sizeof beside_ways[0]);
}

// No part of the MLP runs in parallel, so nothing waits for it.
TEST same_bits_beside_attention_only(const test_machine* machine) {
    return every_way_gives_the_same_bits(machine, QLORA_MODE_F32, true,
                                         QLORA_TARGET_Q | QLORA_TARGET_V, 4, beside_ways,
                                         sizeof beside_ways / sizeof beside_ways[0]);
}

// Only z of down_proj is kept, so nothing else waits for its copy.
TEST same_bits_beside_down_only(const test_machine* machine) {
    return every_way_gives_the_same_bits(machine, QLORA_MODE_BF16, true, QLORA_TARGET_DOWN, 4,
                                         beside_ways, sizeof beside_ways / sizeof beside_ways[0]);
}

TEST same_bits_beside_gated(const test_machine* machine) {
    return every_way_gives_the_same_bits(machine, QLORA_MODE_BF16, true, 0, 8, beside_ways,
                                         sizeof beside_ways / sizeof beside_ways[0]);
}

// ---- the same bits at a size that keeps a real GPU busy: streams that really run in parallel

enum { BUSY_TOKENS = 512, BUSY_STEPS = 8, BUSY_VOCAB = 2048 };

// The parameters after some steps, to be freed by the caller; NULL on failure.
static float* train_some(const setup* s, int steps, size_t* count) {
    int32_t tokens = (int32_t)s->model.tokens;
    int32_t first = tokens * 75 / 128;
    const int32_t lengths[] = {first, tokens - first};
    int32_t ids[BUSY_TOKENS];
    rig r;
    if (!rig_open(&r, s)) {
        return NULL;
    }
    test_random random = test_random_start("busy");
    qlora_batch batch;
    memset(&batch, 0, sizeof batch);
    batch.ids = ids;
    batch.labels = ids;
    batch.lengths = lengths;
    batch.count = 2;
    for (int step = 0; step < steps; step++) {
        for (int i = 0; i < tokens; i++) {
            ids[i] = (int32_t)test_random_below(&random, (uint64_t)s->config.vocab);
        }
        if (qlora_train_micro(r.trainer, &batch, qlora_batch_labels(&batch)) != QLORA_OK ||
            qlora_train_update(r.trainer) != QLORA_OK) {
            rig_says(&r, "step");
            return NULL;
        }
    }
    float* values = rig_read(&r, false, count);
    return rig_close(&r, s) ? values : NULL;
}

static float* train_busy(const setup* s, size_t* count) {
    return train_some(s, BUSY_STEPS, count);
}

// Widths that are not multiples of 8: z of a kept layer and of a recomputed one are where the same
// kernels read them.
TEST odd_widths_give_the_same_bits(const test_machine* machine) {
    setup s = setup_make(machine);
    s.config.intermediate = 36;
    s.config.max_positions = 64;
    s.model.mode = QLORA_MODE_BF16;
    s.model.dropout = 0.0f;
    s.model.tokens = 64;
    s.model.recompute = QLORA_CHOICE_OFF;
    size_t count = 0;
    size_t again = 0;
    float* expected = train_some(&s, 1, &count);
    vary_recompute(&s);
    float* got = train_some(&s, 1, &again);
    bool same = expected != NULL && got != NULL && count == again && count > 0 &&
                memcmp(expected, got, count * sizeof *got) == 0;
    free(expected);
    free(got);
    ASSERT(same);
    PASS();
}

static void vary_recompute_cached(setup* s) {
    vary_recompute(s);
    vary_cache(s);
}

TEST same_bits_when_busy(const test_machine* machine) {
    static const way busy_ways[] = {
        {"repeated", vary_repeat, NULL, true},
        {"cached", vary_cache, NULL, true},
        {"cached once more", vary_cache, NULL, true},
        {"recomputed", vary_recompute, NULL, true},
        {"recomputed, cached", vary_recompute_cached, NULL, true},
    };
    if (strcmp(machine->backend, "cuda") != 0) {
        SKIPm("needs a real GPU: the fake one runs nothing in parallel");
    }
    setup s = setup_make(machine);
    s.config.vocab = BUSY_VOCAB;
    s.config.hidden = 896;
    s.config.intermediate = 4864;
    s.config.layers = 6;
    s.config.heads = 14;
    s.config.head_dim = 64;
    s.config.max_positions = BUSY_TOKENS;
    s.config.window = 100;
    s.model.mode = QLORA_MODE_BF16;
    s.model.weight_std = 0.02f;
    s.model.rank = 16;
    s.model.dropout = 0.0f;
    s.model.tokens = BUSY_TOKENS;
    s.model.head_chunk = 256;
    s.train.lr = 1e-3;
    s.train.require_graph = true;
    setup eager = s;
    vary_eager(&eager);
    size_t count = 0;
    float* expected = train_busy(&eager, &count);
    ASSERT(expected != NULL && count > 1000000);
    for (size_t i = 0; i < sizeof busy_ways / sizeof busy_ways[0]; i++) {
        setup other = s;
        busy_ways[i].vary(&other);
        size_t n = 0;
        float* got = train_busy(&other, &n);
        ASSERTm(busy_ways[i].name, got != NULL && n == count);
        ASSERTm(busy_ways[i].name, memcmp(expected, got, n * sizeof *got) == 0);
        free(got);
    }
    free(expected);
    PASS();
}

// ---- any split of a step

static const int32_t split_lengths[MAX_SEQUENCES] = {3, 5, 1, 4, 2, 6, 1, 2};

static void wide(setup* s) {
    s->model.tokens = 3 * TOKENS;
    s->model.dropout = 0.25f;
    s->train.max_norm = -1.0; // nothing is clipped
}

// Gradients of the batch, all at once or (parts) sequence by sequence in the given order; NULL
// on failure.
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
        qlora_train_query(r->trainer, &info) != QLORA_OK) {
        rig_says(r, "update");
        free(gradients);
        return NULL;
    }
    *loss = info.loss;
    return gradients;
}

// 1x8, 8x1 and 8x1 in reverse order; dropout masks depend on a sequence's number in the data.
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
    for (int i = 0; i < (test_brief() ? 2 : 4); i++) {
        rig r;
        double loss = 0.0;
        ASSERT(rig_open(&r, &s));
        qlora_batch batch = d.batch;
        if (i == 3) {
            batch.sequences = NULL; // then every part is sequence 0: other masks, another step
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
    s.model.tokens = 3 * TOKENS;
    rig r;
    data d;
    data_make(&d, "packed", split_lengths, MAX_SEQUENCES);
    ASSERT(rig_open(&r, &s));
    qlora_eval_info all;
    ASSERT_OK(r, qlora_eval(r.model, &d.batch, &all));
    ASSERT_IN_RANGE(qlora_batch_labels(&d.batch), all.labels, 0.0);
    ASSERT_EQ_FMT(24, (int)all.tokens, "%d");
    double sum = 0.0;
    float packed[24 * VOCAB];
    float single[24 * VOCAB];
    ASSERT_OK(r, qlora_eval_logits(r.model, &d.batch, packed));
    int64_t at = 0;
    for (int i = 0; i < MAX_SEQUENCES; i++) {
        qlora_batch one = batch_part(&d.batch, i);
        qlora_eval_info info;
        ASSERT_OK(r, qlora_eval(r.model, &one, &info));
        sum += info.loss;
        ASSERT_OK(r, qlora_eval_logits(r.model, &one, single + at * VOCAB));
        at += d.lengths[i];
    }
    ASSERT(fabs(sum - all.loss) <= 1e-6 * all.loss);
    ASSERT_REL_L2(packed, single, 24 * VOCAB, 1e-5);
    ASSERT(rig_close(&r, &s));
    PASS();
}

enum { ROOMY_TOKENS = 160, ROOM = 128 };

// The room for sequences that attention was launched with since the log was cleared; 0: none was.
static int room_launched(const fake_api* fake, bool bf16) {
    const char* kernel = bf16 ? "qlora_attn32_fwd, " : "qlora_attn_f32_fwd, ";
    const char* at = strstr(fake->log(), kernel);
    int tiles = ROOMY_TOKENS / (bf16 ? 128 : 64);
    return at != NULL ? atoi(at + strlen(kernel)) - tiles - 1 : 0;
}

// So few multiprocessors that the number of blocks decides how the keys of a group are shared.
static void on_few_multiprocessors(qlora_ctx_desc* desc) {
    (void)desc;
    if (test_fake() != NULL) {
        fake_config config = test_fake()->defaults();
        config.device[0].sms = 16;
        test_fake()->reset(&config);
    }
}

// Room for sequences that a batch does not have changes nothing, and attention looks at no more of
// it than it has to: of room for 128, at 16, 32 or all. Each of these has its own graph.
TEST unused_sequences_cost_nothing(const test_machine* machine, qlora_mode mode) {
    enum { MANY = 70, EACH = 2, TURNS = 4 };
    const fake_api* fake = strcmp(machine->backend, "fake") == 0 ? test_fake() : NULL;
    static const int used[TURNS] = {16, 17, MANY, 32};
    static const int seen[TURNS] = {16, 32, ROOM, 0}; // 0: the graph is there
    int32_t ids[MANY * EACH];
    int32_t lengths[MANY];
    for (int i = 0; i < MANY * EACH; i++) {
        ids[i] = i * 7 % VOCAB;
        lengths[i / EACH] = EACH;
    }
    double losses[2][TURNS];
    float* values[2] = {NULL, NULL};
    uint64_t sums[2] = {0, 0}; // of shares of dk and dv
    size_t n = 0;
    for (int i = 0; i < 2; i++) {
        setup s = setup_make(machine);
        s.model.mode = mode;
        s.model.tokens = ROOMY_TOKENS;
        s.model.head_chunk = ROOMY_TOKENS;
        s.model.max_sequences = i == 0 ? ROOM : MANY;
        s.config.layers = 1;
        s.change = on_few_multiprocessors;
        s.train.require_graph = strcmp(machine->backend, "cpu") != 0;
        rig r;
        ASSERT(rig_open(&r, &s));
        for (int k = 0; k < TURNS; k++) {
            qlora_batch batch;
            memset(&batch, 0, sizeof batch);
            batch.ids = ids;
            batch.labels = ids;
            batch.lengths = lengths;
            batch.count = used[k];
            qlora_train_info info;
            if (fake != NULL) {
                fake->log_clear();
            }
            ASSERT_OK(r, qlora_train_step(r.trainer, &batch, 1, &info));
            losses[i][k] = info.loss;
            if (fake != NULL && i == 0) {
                ASSERT_EQ_FMT(seen[k], room_launched(fake, mode == QLORA_MODE_BF16), "%d");
            }
        }
        sums[i] = fake != NULL ? fake->kernel_runs("qlora_attn32_bwd_sum") : 0;
        values[i] = rig_read(&r, false, &n);
        ASSERT(values[i] != NULL);
        ASSERT(rig_close(&r, &s));
    }
    ASSERT_EQ(fake != NULL && mode == QLORA_MODE_BF16, sums[0] > 0);
    ASSERT_EQ_FMT((int)sums[0], (int)sums[1], "%d"); // in the same order
    ASSERT_MEM_EQ(losses[0], losses[1], sizeof losses[0]);
    ASSERT_MEM_EQ(values[0], values[1], n * sizeof *values[0]);
    free(values[0]);
    free(values[1]);
    PASS();
}

TEST unused_sequences_f32(const test_machine* machine) {
    return unused_sequences_cost_nothing(machine, QLORA_MODE_F32);
}

TEST unused_sequences_bf16(const test_machine* machine) {
    return unused_sequences_cost_nothing(machine, QLORA_MODE_BF16);
}

// A weight of 0 is the same as a label of -100; a weight of 2 everywhere, with twice the total, as
// no weight.
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
    ASSERT_OK(r, qlora_train_query(r.trainer, &first));
    ASSERT(rig_close(&r, &s));
    ASSERT(rig_open(&r, &s));
    ASSERT_OK(r, qlora_train_micro(r.trainer, &weighted.batch, 2.0 * total));
    float* got = rig_read(&r, true, &n);
    qlora_train_info second;
    ASSERT_OK(r, qlora_train_update(r.trainer));
    ASSERT_OK(r, qlora_train_query(r.trainer, &second));
    ASSERT(fabs(first.loss - second.loss) <= 1e-6 * first.loss);
    ASSERT_IN_RANGE(2.0 * first.labels, second.labels, 0.0);
    ASSERT_REL_L2(expected, got, n, 1e-5);
    free(expected);
    free(got);
    ASSERT(rig_close(&r, &s));
    PASS();
}

// A micro-batch without labels adds nothing, not even work in the head: chunks depend on
// the labels.
TEST unlabelled_costs_nothing(const test_machine* machine) {
    setup s = setup_make(machine);
    s.train.eager = true; // so that kernels can be counted for each call
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
    ASSERT_OK(r, qlora_train_query(r.trainer, &info));
    ASSERT_IN_RANGE(2.0 * labels, info.labels, 0.0);
    ASSERT_EQ_FMT(51, (int)info.tokens, "%d");
    free(once);
    free(same);
    free(twice);
    ASSERT(rig_close(&r, &s));
    PASS();
}

// ---- options

static void option_rslora(setup* s) {
    s->model.rslora = true; // 8 / sqrt(4) is 16 / 4
}

static void option_alpha(setup* s) {
    s->model.alpha = 16.0f;
}

static void option_dense16(setup* s) {
    s->model.base = QLORA_BASE_16BIT;
}

static void option_dense32(setup* s) {
    s->model.base = QLORA_BASE_32BIT;
}

static void option_single(setup* s) {
    s->model.single_quant = true;
}

static void option_seed(setup* s) {
    s->model.seed = 12;
}

static void option_dropout_seed(setup* s) {
    s->train.seed = 6;
}

static void option_no_dropout(setup* s) {
    s->model.dropout = 0.0f;
}

static void option_clip(setup* s) {
    s->train.max_norm = 0.01;
}

static void option_decay(setup* s) {
    s->train.weight_decay = 0.5;
}

static void option_beta(setup* s) {
    s->train.beta1 = 0.5;
}

static void option_beta2(setup* s) {
    s->train.beta2 = 0.9;
}

static void option_eps(setup* s) {
    s->train.eps = 1e-3;
}

static void option_lr(setup* s) {
    s->train.lr = 1.1e-2;
}

static void option_frozen_norms(setup* s) {
    s->model.train_norms = false;
}

static void option_window(setup* s) {
    s->config.window = 0;
    s->config.sliding[1] = 0;
}

static void option_scale(setup* s) {
    s->model.alpha = 8.5f;
}

// A setting that has no effect is as much a bug as one with the wrong effect.
TEST every_option_counts(const test_machine* machine) {
    static const struct {
        const char* name;
        void (*change)(setup* s);
    } options[] = {
        {"seed", option_seed},
        {"dropout seed", option_dropout_seed},
        {"dropout", option_no_dropout},
        {"clip", option_clip},
        {"decay", option_decay},
        {"beta1", option_beta},
        {"beta2", option_beta2},
        {"eps", option_eps},
        {"lr", option_lr},
        {"norms", option_frozen_norms},
        {"window", option_window},
        {"alpha", option_scale},
        {"16-bit", option_dense16},
        {"single quant", option_single},
    };
    setup s = setup_make(machine);
    outcome plain;
    ASSERT(run_session(&s, &plain));
    for (size_t i = 0; i < sizeof options / sizeof options[0]; i++) {
        setup other = setup_make(machine);
        outcome got;
        options[i].change(&other);
        ASSERTm(options[i].name, run_session(&other, &got));
        ASSERTm(options[i].name, outcome_sane(&got));
        bool differs = got.count != plain.count;
        for (size_t j = 0; !differs && j < got.count; j++) {
            differs = fabsf(got.values[j] - plain.values[j]) > 1e-5f * fabsf(plain.values[j]);
        }
        ASSERTm(options[i].name, differs);
        outcome_free(&got);
    }
    outcome_free(&plain);
    PASS();
}

TEST options_that_are_the_same(const test_machine* machine) {
    static void (*const pairs[][2])(setup * s) = {{option_rslora, option_alpha},
                                                  {option_dense16, option_dense32}};
    for (int i = 0; i < 2; i++) {
        outcome a;
        outcome b;
        setup one = setup_make(machine);
        setup two = setup_make(machine);
        pairs[i][0](&one);
        pairs[i][1](&two);
        ASSERT(run_session(&one, &a));
        ASSERT(run_session(&two, &b));
        ASSERT(outcome_same(&a, &b));
        outcome_free(&a);
        outcome_free(&b);
    }
    PASS();
}

static void tf32_math(qlora_ctx_desc* desc) {
    desc->math = QLORA_MATH_TF32;
}

// TF32 rounds the operands of forward products to 10 bits: close, but not the same.
TEST tf32_is_used_when_asked_for(const test_machine* machine) {
    setup s = setup_make(machine);
    outcome exact;
    outcome rounded;
    ASSERT(run_session(&s, &exact));
    s.change = tf32_math;
    ASSERT(run_session(&s, &rounded));
    ASSERT(outcome_sane(&rounded));
    ASSERT(fabs(exact.losses[0] - rounded.losses[0]) <= 1e-2);
    test_quiet(true);
    bool same = test_rel_l2(exact.values, rounded.values, exact.count, 1e-7);
    test_quiet(false);
    // The CPU has no TF32, so both are exact there.
    ASSERT_EQ(strcmp(machine->backend, "cpu") == 0, same);
    outcome_free(&exact);
    outcome_free(&rounded);
    PASS();
}

TEST targets_are_what_is_trained(const test_machine* machine) {
    static const char* const names[] = {
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight",
        "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight",
        "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight",
        "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight",
        "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight",
        "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"};
    static const int64_t shapes[4][2] = {{4, 32}, {64, 4}, {4, 40}, {32, 4}};
    setup s = setup_make(machine);
    s.model.targets = QLORA_TARGET_Q | QLORA_TARGET_DOWN;
    s.model.train_norms = false;
    rig r;
    outcome got;
    ASSERT(rig_open(&r, &s));
    ASSERT_EQ_FMT(8, (int)model_parameters(r.model), "%d");
    int64_t elements = 0;
    for (int i = 0; i < 8; i++) {
        qlora_parameter_info p;
        ASSERT_OK(r, qlora_parameter_query(r.model, i, &p));
        ASSERT_STR_EQ(names[i], p.name);
        ASSERT_EQ_FMT((int)shapes[i % 4][0], (int)p.rows, "%d");
        ASSERT_EQ_FMT((int)shapes[i % 4][1], (int)p.cols, "%d");
        elements += p.rows * p.cols;
    }
    ASSERT_EQ_FMT((int)elements, (int)model_plan(r.model)->parameters, "%d");
    ASSERT(run_steps(&r, &s, &got));
    ASSERT(outcome_sane(&got));
    outcome_free(&got);
    ASSERT(rig_close(&r, &s));
    PASS();
}

// With adapters off, the model behaves like its base; switched back on, it behaves as before. With
// B = 0, it also behaves like its base.
TEST adapters_on_and_off(const test_machine* machine) {
    setup s = setup_make(machine);
    s.model.train_norms = false;
    s.model.cache = QLORA_CHOICE_ON;
    rig r;
    data d;
    double losses[4] = {0.0, 0.0, 0.0, 0.0};
    data_make(&d, "on and off", run_lengths[1], 3);
    ASSERT(rig_open(&r, &s));
    for (int i = 0; i < 4; i++) {
        qlora_eval_info info;
        if (i == 3) { // every B zero
            for (int64_t j = 1; j < model_parameters(r.model); j += 2) {
                float zeros[64 * 4] = {0.0f};
                ASSERT_OK(r, qlora_parameter_write(r.model, j, zeros));
            }
        }
        ASSERT_OK(r, qlora_adapter_use(r.model, i != 1));
        ASSERT_OK(r, qlora_eval(r.model, &d.batch, &info));
        losses[i] = info.loss;
    }
    ASSERT_MEM_EQ(&losses[0], &losses[2], sizeof losses[0]);
    ASSERT(fabs(losses[0] - losses[1]) > 1e-3);
    ASSERT(fabs(losses[3] - losses[1]) <= 1e-6 * losses[1]);
    ASSERT_OK(r, qlora_adapter_use(r.model, false));
    ASSERT_EQ(QLORA_ERR_STATE, qlora_train_micro(r.trainer, &d.batch, 5.0));
    ASSERT(strstr(qlora_last_error(r.ctx), "adapters") != NULL);
    ASSERT(rig_close(&r, &s));
    PASS();
}

// Opened for evaluation only, the same weights give the same loss, and training calls fail.
TEST evaluation_only(const test_machine* machine) {
    setup s = setup_make(machine);
    double losses[2] = {0.0, 0.0};
    data d;
    data_make(&d, "evaluation only", run_lengths[1], 3);
    for (int i = 0; i < 2; i++) {
        rig r;
        qlora_eval_info info;
        s.model.purpose = i == 1 ? QLORA_PURPOSE_EVALUATE : QLORA_PURPOSE_TRAIN;
        s.model.dropout = i == 1 ? 0.0f : 0.4f; // affects training only
        ASSERT(rig_open(&r, &s));
        ASSERT(i == 0 || rig_stir(&r));
        ASSERT_OK(r, qlora_eval(r.model, &d.batch, &info));
        losses[i] = info.loss;
        if (i == 1) {
            ASSERT_EQ(NULL, r.trainer);
            ASSERT_EQ(QLORA_ERR_STATE, qlora_trainer_create(r.model, &s.train, &r.trainer));
            ASSERT(strstr(qlora_last_error(r.ctx), "evaluation") != NULL);
            ASSERT_EQ(NULL, r.trainer);
            ASSERT_EQ(QLORA_PURPOSE_EVALUATE, model_info(r.model).purpose);
            ASSERT_EQ_FMT(0, (int)model_plan(r.model)->optimizer, "%d");
        }
        ASSERT(rig_close(&r, &s));
    }
    ASSERT_MEM_EQ(&losses[0], &losses[1], sizeof losses[0]);
    PASS();
}

// ---- plan

static uint64_t plan_sum(const qlora_plan* p) {
    return p->base + p->cache + p->adapters + p->optimizer + p->activations + p->workspace +
           p->head + p->generation + p->batches;
}

// The plan's figures match the allocated bytes, and nothing is allocated after that.
TEST plan_is_what_is_allocated(const test_machine* machine) {
    bool is_fake = strcmp(machine->backend, "fake") == 0;
    for (int i = 0; i < 4; i += test_brief() ? 2 : 1) {
        setup s = setup_make(machine);
        s.model.recompute = i == 1 ? QLORA_CHOICE_ON : QLORA_CHOICE_OFF;
        s.model.cache = i == 2 ? QLORA_CHOICE_ON : QLORA_CHOICE_OFF;
        s.model.purpose = i == 3 ? QLORA_PURPOSE_EVALUATE : QLORA_PURPOSE_TRAIN;
        s.model.generate_tokens = i == 2 ? 16 : 0;
        rig r;
        memset(&r, 0, sizeof r);
        r.ctx = test_open(&s.machine, NULL);
        ASSERTm(test_open_reason(), r.ctx != NULL);
        qlora_plan plan;
        qlora_model_desc model = s.model;
        model.config = &s.config;
        ASSERT_OK(r, qlora_plan_make(r.ctx, &model, NULL, &plan));
        ASSERT_EQ_FMT((unsigned long long)plan.total, (unsigned long long)plan_sum(&plan), "%llu");
        ASSERT(i == 2 ? plan.cache > 0 && plan.generation > 0 : plan.cache + plan.generation == 0);
        qlora_memory_info before;
        qlora_memory_info after;
        ASSERT_OK(r, test_memory(r.ctx, &before));
        uint64_t live = is_fake ? test_fake()->stats().live_bytes : 0;
        ASSERT(rig_start(&r, &s));
        ASSERT_OK(r, test_memory(r.ctx, &after));
        if (strcmp(machine->backend, "cpu") == 0) { // host memory, including some for the objects
            ASSERT(after.host_bytes - before.host_bytes >= plan.total);
            ASSERT(after.host_bytes - before.host_bytes <= plan.total + ((uint64_t)1 << 20));
        } else {
            ASSERT_EQ_FMT((unsigned long long)plan.total,
                          (unsigned long long)(after.device_bytes - before.device_bytes), "%llu");
        }
        ASSERT_EQ_FMT((unsigned long long)plan.total,
                      (unsigned long long)model_plan(r.model)->total, "%llu");
        if (is_fake) {
            ASSERT_EQ_FMT((unsigned long long)plan.total,
                          (unsigned long long)(test_fake()->stats().live_bytes - live), "%llu");
        }
        uint64_t calls = is_fake ? test_fake()->calls("ALLOC") : 0;
        uint64_t allocations = after.device_allocations;
        outcome got;
        memset(&got, 0, sizeof got);
        data d;
        qlora_eval_info info;
        data_make(&d, "plan", run_lengths[0], 3);
        ASSERT(i == 3 || run_steps(&r, &s, &got));
        ASSERT_OK(r, qlora_eval(r.model, &d.batch, &info));
        ASSERT_OK(r, test_memory(r.ctx, &after));
        ASSERT_EQ_FMT((unsigned long long)allocations, (unsigned long long)after.device_allocations,
                      "%llu");
        ASSERT(!is_fake || test_fake()->calls("ALLOC") == calls);
        outcome_free(&got);
        ASSERT(rig_close(&r, &s));
    }
    PASS();
}

static void default_scratch(qlora_ctx_desc* desc) {
    desc->scratch_bytes = 0;
}

// The bytes that a CPU context counts for a GPU's context are those that the GPU's context holds.
TEST plan_knows_the_context(const test_machine* machine) {
    setup s = setup_make(machine);
    s.model.config = &s.config;
    qlora_ctx* gpu = test_open(machine, default_scratch);
    ASSERTm(test_open_reason(), gpu != NULL);
    qlora_memory_info memory;
    ASSERT_EQ(QLORA_OK, test_memory(gpu, &memory));
    ASSERT(test_close_ctx(machine, gpu));
    qlora_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.require_backend = QLORA_BACKEND_CPU;
    qlora_ctx* cpu = NULL;
    ASSERT_EQ(QLORA_OK, qlora_ctx_create(&desc, &cpu));
    qlora_plan_desc budget;
    memset(&budget, 0, sizeof budget);
    budget.capability = 90;
    budget.bytes = (uint64_t)8 << 30;
    qlora_plan plan;
    ASSERT_EQ(QLORA_OK, qlora_plan_make(cpu, &s.model, &budget, &plan));
    ASSERT_EQ_FMT((unsigned long long)memory.device_bytes, (unsigned long long)plan.context,
                  "%llu");
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(cpu));
    PASS();
}

// On the CPU, what the context has allocated is planned, but for a few objects of its own.
TEST plan_knows_the_context_of_the_cpu(void) {
    static const qlora_cpu_tier tiers[] = {QLORA_CPU_TIER_PORTABLE, QLORA_CPU_TIER_BEST};
    for (int i = 0; i < 2; i++) {
        setup s = setup_make(test_machine_at(0));
        qlora_ctx_desc desc;
        qlora_ctx* ctx = NULL;
        qlora_memory_info memory;
        qlora_plan plan;
        memset(&desc, 0, sizeof desc);
        desc.require_backend = QLORA_BACKEND_CPU;
        desc.cpu_tier = tiers[i];
        s.model.config = &s.config;
        ASSERT_EQ(QLORA_OK, qlora_ctx_create(&desc, &ctx));
        ASSERT_EQ(QLORA_OK, test_memory(ctx, &memory));
        ASSERT_EQ(QLORA_OK, qlora_plan_make(ctx, &s.model, NULL, &plan));
        ASSERT(plan.context <= memory.host_bytes);
        ASSERT(memory.host_bytes - plan.context <= 1 << 20);
        ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
    }
    PASS();
}

// A CPU context plans for a GPU: with fewer bytes, more recomputed layers, and finally an error.
TEST budget_decides(const test_machine* machine) {
    setup s = setup_make(machine);
    rig r;
    memset(&r, 0, sizeof r);
    s.config.layers = 6;
    s.config.hidden = 256;
    s.config.intermediate = 512;
    s.model.tokens = 4096;
    s.model.max_sequences = 0;
    s.model.recompute = QLORA_CHOICE_AUTO;
    s.model.cache = QLORA_CHOICE_AUTO;
    s.model.mode = QLORA_MODE_AUTO;
    s.model.config = &s.config;
    r.ctx = test_open(machine, NULL);
    ASSERTm(test_open_reason(), r.ctx != NULL);
    qlora_plan_desc budget;
    memset(&budget, 0, sizeof budget);
    budget.capability = 90;
    budget.bytes = (uint64_t)8 << 30;
    qlora_plan roomy;
    ASSERT_OK(r, qlora_plan_make(r.ctx, &s.model, &budget, &roomy));
    ASSERT_EQ(QLORA_MODE_BF16, roomy.mode);
    ASSERT_EQ_FMT(0, (int)roomy.recompute_layers, "%d");
    ASSERT_EQ_FMT(6, (int)roomy.cached_layers, "%d");
    uint64_t bytes = roomy.total + roomy.context;
    int64_t recomputed = 0;
    int64_t seen = 0;
    qlora_plan plan;
    for (;; bytes -= bytes / 64) {
        budget.bytes = bytes;
        if (qlora_plan_make(r.ctx, &s.model, &budget, &plan) != QLORA_OK) {
            break;
        }
        ASSERT(plan.total + plan.context <= bytes);
        ASSERT(plan.recompute_layers >= recomputed);
        ASSERT(plan.recompute_layers == 0 || plan.cached_layers == 0);
        seen += plan.recompute_layers > recomputed ? 1 : 0;
        recomputed = plan.recompute_layers;
        ASSERT(plan.recompute_layers >= 0 && plan.recompute_layers <= 6);
        ASSERT(plan.cached_layers >= 0 && plan.cached_layers <= 6);
    }
    ASSERT_EQ_FMT(6, (int)recomputed, "%d");
    ASSERT(seen >= 3); // one after another, not all at once
    ASSERT_EQ(QLORA_ERR_DEVICE_MEMORY, qlora_plan_make(r.ctx, &s.model, &budget, &plan));
    ASSERT(strstr(qlora_last_error(r.ctx), " are available") != NULL);
    ASSERT(strstr(qlora_last_error(r.ctx), "activations") != NULL); // what takes the memory
    static const struct {
        uint64_t bytes;
        const char* text;
    } small[] = {{5 << 20, "only 5.00 MiB are available"},
                 {3 << 10, "only 3.00 KiB are available"}};
    for (int i = 0; i < 2; i++) {
        budget.bytes = small[i].bytes;
        ASSERT_EQ(QLORA_ERR_DEVICE_MEMORY, qlora_plan_make(r.ctx, &s.model, &budget, &plan));
        ASSERTm(qlora_last_error(r.ctx), strstr(qlora_last_error(r.ctx), small[i].text) != NULL);
    }
    // Settings that contradict the budget are also rejected.
    budget.bytes = roomy.total + roomy.context - roomy.cache - 1;
    s.model.recompute = QLORA_CHOICE_OFF;
    ASSERT_EQ(QLORA_ERR_DEVICE_MEMORY, qlora_plan_make(r.ctx, &s.model, &budget, &plan));
    budget.capability = 75;
    budget.bytes = 0;
    ASSERT_OK(r, qlora_plan_make(r.ctx, &s.model, &budget, &plan));
    ASSERT_EQ(QLORA_MODE_F32, plan.mode);
    char text[2048];
    size_t needed = qlora_plan_describe(&roomy, text, sizeof text);
    ASSERT_EQ_FMT((int)strlen(text) + 1, (int)needed, "%d");
    ASSERT(strstr(text, "16-bit weight cache") != NULL);
    int64_t trained = 0;
    for (int i = 0; i < QLORA_PLACES; i++) {
        trained += roomy.trained[i];
    }
    ASSERT_EQ_FMT((long long)roomy.parameters, (long long)trained, "%lld");
    needed = qlora_places_describe(&roomy, text, sizeof text);
    ASSERT_EQ_FMT((int)strlen(text) + 1, (int)needed, "%d");
    ASSERTm(text, strncmp(text, "attention ", 10) == 0 && strstr(text, ", MLP ") != NULL);
    ASSERT(test_close_ctx(machine, r.ctx));
    PASS();
}

TEST foreign_plan_is_refused(const test_machine* machine) {
    setup s = setup_make(machine);
    rig r;
    memset(&r, 0, sizeof r);
    r.ctx = test_open(machine, NULL);
    ASSERTm(test_open_reason(), r.ctx != NULL);
    qlora_plan plan;
    s.model.config = &s.config;
    ASSERT_OK(r, qlora_plan_make(r.ctx, &s.model, NULL, &plan));
    for (int i = 0; i < 4; i++) {
        setup other = s;
        other.model.config = &other.config;
        other.config.vocab += i == 3 ? 64 : 0;
        other.config.layers += i == 0 ? 1 : 0;
        other.model.tokens += i == 1 ? 1 : 0;
        other.model.rank += i == 2 ? 1 : 0;
        other.model.plan = &plan;
        ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_model_open(r.ctx, &other.model, &r.model));
        ASSERT(strstr(qlora_last_error(r.ctx), "plan was made for another") != NULL);
        ASSERT_EQ(NULL, r.model);
    }
    s.model.plan = &plan;
    ASSERT_OK(r, qlora_model_open(r.ctx, &s.model, &r.model));
    ASSERT_MEM_EQ(&plan, model_plan(r.model), sizeof plan); // what was planned is what is open
    ASSERT(rig_close(&r, &s));
    PASS();
}

// A plan from a file may be damaged: whatever a choice in it is, the model is refused, or opened as
// if the choice had been made.
TEST damaged_plan_is_refused(const test_machine* machine) {
    static const struct {
        const char* name;
        size_t at;
    } choices[] = {{"recompute_layers", offsetof(qlora_plan, recompute_layers)},
                   {"attention_layers", offsetof(qlora_plan, attention_layers)},
                   {"heads_layers", offsetof(qlora_plan, heads_layers)},
                   {"cached_layers", offsetof(qlora_plan, cached_layers)},
                   {"offloaded_layers", offsetof(qlora_plan, offloaded_layers)},
                   {"offloaded_attention", offsetof(qlora_plan, offloaded_attention)},
                   {"offload_every", offsetof(qlora_plan, offload_every)},
                   {"tile", offsetof(qlora_plan, tile)},
                   {"head_chunk", offsetof(qlora_plan, head_chunk)}};
    static const int64_t values[] = {-1, 0, 1, 1000, (int64_t)1 << 40, INT64_MIN, INT64_MAX};
    setup s = setup_make(machine);
    rig r;
    qlora_plan plan;
    memset(&r, 0, sizeof r);
    r.ctx = test_open(machine, NULL);
    ASSERTm(test_open_reason(), r.ctx != NULL);
    s.model.config = &s.config;
    ASSERT_OK(r, qlora_plan_make(r.ctx, &s.model, NULL, &plan));
    for (size_t i = 0; i < 7 * sizeof choices / sizeof choices[0]; i++) {
        qlora_plan damaged = plan;
        memcpy((char*)&damaged + choices[i / 7].at, &values[i % 7], sizeof values[0]);
        s.model.plan = &damaged;
        qlora_result result = qlora_model_open(r.ctx, &s.model, &r.model);
        if (result == QLORA_OK) {
            damaged.work = model_plan(r.model)->work; // follows from the choices
            ASSERT_MEM_EQ(&damaged, model_plan(r.model), sizeof damaged);
            qlora_model_close(r.model);
        } else {
            const char* why = qlora_last_error(r.ctx);
            bool offloads = result == QLORA_ERR_UNSUPPORTED && strstr(why, "offload") != NULL;
            ASSERTm(choices[i / 7].name, offloads || result == QLORA_ERR_ARGUMENT);
            ASSERTm(why, strstr(why, "desc.") != NULL);
            ASSERT_EQ(NULL, r.model);
        }
        r.model = NULL;
    }
    ASSERT(test_close_ctx(machine, r.ctx));
    PASS();
}

// A second model that cannot be opened leaves the first one as it was, the seal of the kernel cache
// included.
TEST failed_open_keeps_the_seal(const test_machine* machine) {
    const fake_api* fake = test_fake();
    setup s = setup_make(machine);
    rig r;
    ASSERT(rig_open(&r, &s));
    qlora_cache_info info;
    ASSERT_OK(r, qlora_cache_query(r.ctx, &info));
    ASSERT(info.sealed);
    qlora_model* second = NULL;
    s.model.config = &s.config;
    for (int i = 0; i < 2; i++) { // no memory for the arena; a product of the dry run fails
        fake->fail_at(i == 0 ? "ALLOC" : "CUBLAS", 1, i == 0 ? 2 : 13, false);
        ASSERT_EQ(i == 0 ? QLORA_ERR_DEVICE_MEMORY : QLORA_ERR_CUBLAS,
                  qlora_model_open(r.ctx, &s.model, &second));
        fake->fail_clear();
        ASSERT_EQ(NULL, second);
        ASSERT_OK(r, qlora_cache_query(r.ctx, &info));
        ASSERT(info.sealed);
    }
    ASSERT_OK(r, qlora_cache_unseal(r.ctx)); // what was open stays open
    fake->fail_at("ALLOC", 1, 2, false);
    ASSERT_EQ(QLORA_ERR_DEVICE_MEMORY, qlora_model_open(r.ctx, &s.model, &second));
    fake->fail_clear();
    ASSERT_OK(r, qlora_cache_query(r.ctx, &info));
    ASSERT(!info.sealed);
    qlora_ctx_info context;
    ASSERT_OK(r, qlora_ctx_query(r.ctx, &context));
    ASSERT(context.models == 1 && context.trainers == 1);
    ASSERT_EQ(QLORA_ERR_STATE, qlora_ctx_destroy(r.ctx));
    ASSERT(strstr(qlora_last_error(r.ctx), "1 model, 1 trainer;") != NULL);
    ASSERT(rig_close(&r, &s));
    PASS();
}

// ---- the GPU's side of a step

static int graph_warnings;

static void count_warnings(void* user, qlora_log_level level, qlora_log_item item, const char* text,
                           const char* file, int line) {
    (void)user;
    (void)file;
    (void)line;
    bool fallback = strstr(text, "without graphs") != NULL;
    graph_warnings += level == QLORA_LOG_WARN && item == QLORA_LOG_ITEM_GRAPH && fallback ? 1 : 0;
}

static void with_log(qlora_ctx_desc* desc) {
    desc->log = count_warnings;
    graph_warnings = 0;
}

// Which of these kernels is ready, one character for each.
static void which_ready(qlora_ctx* ctx, const char* const* names, char* out) {
    const qlora_kernel* kernel = NULL;
    for (; *names != NULL; names++) {
        *out++ = qlora_cache_get(ctx, *names, &kernel) == QLORA_OK ? 'x' : '-';
    }
    *out = '\0';
}

// A model compiles what it runs; trainers add what only they need. Other operators are refused by
// name until the cache is unsealed.
TEST model_compiles_what_it_runs(const test_machine* machine) {
    static const char* const names[] = {"norm_rms_fwd_bf16",   "nf4_place_bf16",
                                        "elementwise_add_bf16", "softmax_fwd_f32",
                                        "nf4_gemm_16",          "dropout_bf16",
                                        "norm_rms_dw_bf16",     "methods_row_norms_bf16",
                                        "optim_adamw8_bf16",    "norm_rms_fwd_f32",
                                        "linear_collect",       "dropout_noise_bf16",
                                        "preference_factors",   NULL};
    setup s = setup_make(machine);
    s.model.mode = QLORA_MODE_BF16;
    s.model.dropout = 0.0f;
    s.model.train_norms = false;
    s.model.cache = QLORA_CHOICE_OFF;
    rig r;
    data d;
    char ready[16];
    data_make(&d, "what it runs", run_lengths[0], 3);
    ASSERT(rig_open(&r, &s));
    which_ready(r.ctx, names, ready);
    ASSERT_STR_EQ("xxx----------", ready);
    qlora_tensor t;
    ASSERT_OK(r, qlora_tensor_create(r.ctx, QLORA_F32, 2, 4, &t));
    ASSERT_EQ(QLORA_ERR_SEALED, qlora_softmax_forward(r.ctx, &t, &t));
    ASSERT(strstr(qlora_last_error(r.ctx), "softmax_fwd_f32") != NULL);
    double labels = qlora_batch_labels(&d.batch);
    ASSERT_OK(r, qlora_train_micro(r.trainer, &d.batch, labels));
    ASSERT_OK(r, qlora_train_update(r.trainer));
    ASSERT_OK(r, qlora_trainer_destroy(r.trainer));
    s.train.neftune = 5.0;
    ASSERT_OK(r, qlora_trainer_create(r.model, &s.train, &r.trainer));
    which_ready(r.ctx, names, ready);
    ASSERT_STR_EQ("xxx--------x-", ready);
    ASSERT_OK(r, qlora_train_micro(r.trainer, &d.batch, labels));
    ASSERT_OK(r, qlora_trainer_destroy(r.trainer));
    s.train.method = QLORA_METHOD_DPO;
    ASSERT_OK(r, qlora_trainer_create(r.model, &s.train, &r.trainer));
    which_ready(r.ctx, names, ready);
    ASSERT_STR_EQ("xxx--------xx", ready);
    qlora_cache_info info;
    ASSERT_OK(r, qlora_cache_query(r.ctx, &info));
    ASSERT(info.sealed);
    ASSERT_EQ_FMT(0, (int)info.jit_after_seal, "%d");
    ASSERT_OK(r, qlora_cache_unseal(r.ctx));
    ASSERT_OK(r, qlora_softmax_forward(r.ctx, &t, &t));
    ASSERT_OK(r, qlora_tensor_destroy(r.ctx, &t));
    ASSERT(rig_close(&r, &s));
    PASS();
}

// Evaluation runs what no step does: the cap of logits, and few rows with a 4-bit head. Models that
// do not generate have these kernels too.
TEST logits_after_sealing(const test_machine* machine) {
    static const int32_t lengths[] = {5, 18, 48};
    static float logits[48 * VOCAB];
    for (int i = 0; i < 2; i++) {
        setup s = setup_make(machine);
        rig r;
        data d;
        s.model.mode = QLORA_MODE_BF16;
        s.model.tokens = 48;
        s.model.head_chunk = 48;
        s.config.logits_cap = i == 0 ? 2.0 : 0.0;
        s.model.head = i == 0 ? QLORA_HEAD_FULL : QLORA_HEAD_NF4;
        ASSERT(rig_open(&r, &s));
        for (int k = 0; k < 3; k++) {
            double sums[MAX_SEQUENCES];
            data_make(&d, "logits", &lengths[k], 1);
            ASSERT_OK(r, qlora_eval_logits(r.model, &d.batch, logits));
            ASSERT_OK(r, qlora_eval_sequences(r.model, &d.batch, sums));
        }
        ASSERT(rig_close(&r, &s));
    }
    PASS();
}

// Nothing is compiled after sealing, every product was planned, and a step does not wait.
TEST step_stays_on_the_device(const test_machine* machine) {
    const fake_api* fake = test_fake();
    for (int i = 0; i < 2; i++) {
        setup s = setup_make(machine);
        s.model.mode = i == 0 || machine->cc < 80 ? QLORA_MODE_F32 : QLORA_MODE_BF16;
        s.train.eager = false;
        s.train.require_graph = true;
        rig r;
        data d;
        data_make(&d, "zero sync", run_lengths[0], 3);
        double labels = qlora_batch_labels(&d.batch);
        ASSERT(rig_open(&r, &s));
        qlora_train_info info;
        for (int step = 0; step < 3; step++) {
            uint64_t waits = fake->calls("SYNC");
            ASSERT_OK(r, qlora_train_micro(r.trainer, &d.batch, labels));
            ASSERT_OK(r, qlora_train_update(r.trainer));
            ASSERT_EQ_FMT((unsigned long long)waits, (unsigned long long)fake->calls("SYNC"),
                          "%llu");
            ASSERT_OK(r, qlora_train_query(r.trainer, &info));
            ASSERT(fake->calls("SYNC") > waits); // the call that may wait does wait
        }
        ASSERT(info.graphs);
        ASSERT_EQ_FMT(0, (int)info.waits, "%d");
        ASSERT_EQ_FMT(3, (int)info.step, "%d");
        qlora_eval_info eval;
        ASSERT_OK(r, qlora_eval(r.model, &d.batch, &eval));
        ASSERT_OK(r, qlora_adapter_use(r.model, false));
        ASSERT_OK(r, qlora_eval(r.model, &d.batch, &eval));
        ASSERT_OK(r, qlora_adapter_use(r.model, true));
        qlora_cache_info cache;
        ASSERT_OK(r, qlora_cache_query(r.ctx, &cache));
        ASSERT(cache.sealed);
        ASSERT_EQ_FMT(0, (int)cache.jit_after_seal, "%d");
        ASSERT_EQ_FMT(0, (int)cache.cublas_unplanned, "%d");
        // Five steps whose results are not read: the ring of staging slots fills up at some point,
        // and the wait for it is counted.
        for (int step = 0; step < 5; step++) {
            ASSERT_OK(r, qlora_train_micro(r.trainer, &d.batch, labels));
            ASSERT_OK(r, qlora_train_update(r.trainer));
        }
        ASSERT_OK(r, qlora_train_query(r.trainer, &info));
        ASSERT(info.waits > 0);
        ASSERT_EQ_FMT(8, (int)info.step, "%d");
        ASSERT(rig_close(&r, &s));
    }
    PASS();
}

// A capture that fails: runs eagerly with one warning and the same bits, or fails if graphs
// are required.
TEST failed_capture_falls_back(const test_machine* machine) {
    const fake_api* fake = test_fake();
    setup s = setup_make(machine);
    outcome expected;
    s.change = with_log;
    ASSERT(run_session(&s, &expected));
    ASSERT_EQ_FMT(0, graph_warnings, "%d");
    rig r;
    outcome got;
    ASSERT(rig_open(&r, &s));
    fake->fail_at("cuStreamEndCapture", 1, 900, false);
    ASSERT(run_steps(&r, &s, &got));
    fake->fail_clear();
    ASSERT_EQ_FMT(1, graph_warnings, "%d");
    qlora_train_info info;
    ASSERT_OK(r, qlora_train_query(r.trainer, &info));
    ASSERT_FALSE(info.graphs);
    ASSERT(outcome_same(&expected, &got));
    outcome_free(&got);
    ASSERT(rig_close(&r, &s));
    s.train.require_graph = true;
    ASSERT(rig_open(&r, &s));
    fake->fail_at("cuGraphInstantiateWithFlags", 1, 2, false);
    data d;
    data_make(&d, "demanded", run_lengths[0], 3);
    qlora_result result = qlora_train_micro(r.trainer, &d.batch, 5.0);
    fake->fail_clear();
    ASSERT(result != QLORA_OK);
    ASSERT(strlen(qlora_last_error(r.ctx)) > 10);
    ASSERT_EQ_FMT(0, graph_warnings, "%d");
    ASSERT_EQ(QLORA_ERR_STATE, qlora_train_micro(r.trainer, &d.batch, 5.0));
    ASSERT_OK(r, qlora_train_cancel(r.trainer));
    ASSERT_OK(r, qlora_train_micro(r.trainer, &d.batch, 5.0)); // the next step works
    ASSERT(rig_close(&r, &s));
    outcome_free(&expected);
    PASS();
}

// ---- values that are not finite

// An infinity in an adapter: the step is skipped, counted and reported; nothing changes; the next
// one works.
TEST not_finite_is_skipped(const test_machine* machine) {
    setup s = setup_make(machine);
    rig r;
    data d;
    qlora_train_info info;
    data_make(&d, "not finite", run_lengths[0], 3);
    double labels = qlora_batch_labels(&d.batch);
    ASSERT(rig_open(&r, &s));
    ASSERT_OK(r, qlora_train_micro(r.trainer, &d.batch, labels));
    ASSERT_OK(r, qlora_train_update(r.trainer));
    qlora_parameter_info p;
    ASSERT_OK(r, qlora_parameter_query(r.model, 3, &p));
    size_t n = (size_t)(p.rows * p.cols);
    float* values = (float*)malloc(n * sizeof *values);
    ASSERT_OK(r, qlora_parameter_read(r.model, 3, values));
    float good = values[5];
    static const float bad[] = {INFINITY, NAN, 3e38f};
    for (int i = 0; i < 3; i++) {
        values[5] = bad[i];
        ASSERT_OK(r, qlora_parameter_write(r.model, 3, values));
        size_t count = 0;
        float* before = rig_read(&r, false, &count);
        ASSERT_OK(r, qlora_train_micro(r.trainer, &d.batch, labels));
        ASSERT_OK(r, qlora_train_update(r.trainer));
        ASSERT_OK(r, qlora_train_query(r.trainer, &info));
        ASSERT(info.last_skipped);
        ASSERT_EQ_FMT(i + 1, (int)info.skipped, "%d");
        ASSERT_EQ_FMT(i + 2, (int)info.step, "%d");
        ASSERT_FALSE(info.grad_norm <= 3.4e38f);
        float* after = rig_read(&r, false, &count);
        ASSERT_MEM_EQ(before, after, count * sizeof *before);
        free(before);
        free(after);
    }
    values[5] = good;
    ASSERT_OK(r, qlora_parameter_write(r.model, 3, values));
    size_t count = 0;
    float* before = rig_read(&r, false, &count);
    ASSERT_OK(r, qlora_train_micro(r.trainer, &d.batch, labels));
    ASSERT_OK(r, qlora_train_update(r.trainer));
    ASSERT_OK(r, qlora_train_query(r.trainer, &info));
    ASSERT_FALSE(info.last_skipped);
    ASSERT_EQ_FMT(3, (int)info.skipped, "%d");
    ASSERT(info.loss > 0.0 && info.loss < 20.0 && info.grad_norm > 0.0f && info.grad_norm < 1e4f);
    float* after = rig_read(&r, false, &count);
    size_t finite = 0;
    size_t moved = 0;
    for (size_t i = 0; i < count; i++) {
        finite += fabsf(after[i]) < 1e4f ? 1 : 0;
        moved += memcmp(&before[i], &after[i], sizeof before[i]) != 0 ? 1 : 0;
    }
    ASSERT_EQ_FMT((int)count, (int)finite, "%d");
    ASSERT(moved > count / 2);
    free(before);
    free(after);
    free(values);
    ASSERT(rig_close(&r, &s));
    PASS();
}

// ---- schedules

// An update without preceding labels is a step like any other: the schedule advances.
TEST schedules_follow_their_formulas(const test_machine* machine) {
    static const qlora_schedule kinds[] = {QLORA_SCHEDULE_CONSTANT, QLORA_SCHEDULE_LINEAR,
                                           QLORA_SCHEDULE_COSINE};
    for (int i = 0; i < 6; i++) {
        setup s = setup_make(machine);
        s.train.schedule = kinds[i % 3];
        s.train.warmup_steps = i < 3 ? 3 : 0;
        s.train.total_steps = i < 3 ? 9 : 0;
        s.train.lr = 0.25;
        s.model.rank = 1;
        s.model.targets = QLORA_TARGET_Q;
        rig r;
        ASSERT(rig_open(&r, &s));
        for (int step = 0; step < 12; step++) {
            double done = step < 3 ? 0.0 : step < 9 ? (step - 3) / 6.0 : 1.0;
            double factor = i >= 3                                    ? 1.0
                            : step < 3                                ? (step + 1) / 3.0
                            : kinds[i % 3] == QLORA_SCHEDULE_CONSTANT ? 1.0
                            : kinds[i % 3] == QLORA_SCHEDULE_LINEAR
                                ? 1.0 - done
                                : 0.5 * (1.0 + cos(3.14159265358979323846 * done));
            qlora_train_info info;
            ASSERT_OK(r, qlora_train_update(r.trainer));
            ASSERT_OK(r, qlora_train_query(r.trainer, &info));
            ASSERT(fabs(info.lr - 0.25 * factor) <= 1e-12);
            ASSERT_EQ_FMT(step + 1, (int)info.step, "%d");
            ASSERT_IN_RANGE(0.0, info.labels, 0.0);
            ASSERT_IN_RANGE(0.0, info.loss, 0.0);
        }
        ASSERT(rig_close(&r, &s));
    }
    PASS();
}

// AdamW uses the schedule's learning rate: with eps far below the gradients and no decay, the first
// update changes every parameter by lr.
TEST first_update_moves_by_lr(const test_machine* machine) {
    setup s = setup_make(machine);
    s.train.weight_decay = 0.0;
    s.train.schedule = QLORA_SCHEDULE_LINEAR;
    s.train.warmup_steps = 4;
    s.train.total_steps = 8;
    s.train.lr = 0.04;
    s.model.dropout = 0.0f;
    rig r;
    data d;
    size_t n = 0;
    data_make(&d, "first update", run_lengths[0], 3);
    ASSERT(rig_open(&r, &s));
    float* before = rig_read(&r, false, &n);
    ASSERT_OK(r, qlora_train_micro(r.trainer, &d.batch, qlora_batch_labels(&d.batch)));
    float* gradient = rig_read(&r, true, &n);
    ASSERT_OK(r, qlora_train_update(r.trainer));
    float* after = rig_read(&r, false, &n);
    size_t compared = 0;
    for (size_t i = 0; i < n; i++) {
        if (fabsf(gradient[i]) > 1e-3f) {
            double expected = gradient[i] > 0.0f ? -0.01 : 0.01;
            ASSERT(fabs((double)after[i] - (double)before[i] - expected) <= 1e-5);
            compared++;
        }
    }
    ASSERT(compared > n / 4);
    free(before);
    free(gradient);
    free(after);
    ASSERT(rig_close(&r, &s));
    PASS();
}

// ---- refusals

typedef struct refusal {
    const char* name;
    void (*spoil)(setup* s);
    const char* says; // part of the message
} refusal;

// The struct is only there to make the semicolon after each use valid.
#define SPOIL(NAME, CODE)                                                                          \
    static void spoil_##NAME(setup* s) {                                                           \
        CODE;                                                                                      \
    }                                                                                              \
    struct spoil_##NAME
SPOIL(reserved, s->model.reserved_must_be_zero0 = 1);
SPOIL(reserved1, s->model.reserved_must_be_zero1 = 1);
SPOIL(both, s->model.dir = "some/folder"; s->model.config = &s->config);
SPOIL(neither, s->model.dir = "");
SPOIL(rank, s->model.rank = 1025);
SPOIL(dropout, s->model.dropout = 1.0f);
SPOIL(dropout_nan, s->model.dropout = (float)NAN);
SPOIL(targets, s->model.targets = 512);
SPOIL(targets_fused, s->model.targets = QLORA_TARGET_QKV);
SPOIL(alpha, s->model.alpha = (float)NAN);
SPOIL(std, s->model.weight_std = (float)NAN);
SPOIL(std_negative, s->model.weight_std = -1.0f);
SPOIL(base, s->model.base = (qlora_base_format)4);
SPOIL(mode, s->model.mode = (qlora_mode)5);
SPOIL(vocab, s->config.vocab = 0);
SPOIL(hidden, s->config.hidden = -1);
SPOIL(layers, s->config.layers = 257);
SPOIL(heads, s->config.heads = 0);
SPOIL(kv_heads, s->config.kv_heads = 3);
SPOIL(head_dim, s->config.head_dim = 15);
SPOIL(head_dim_large, s->config.head_dim = 258);
SPOIL(eps, s->config.rms_eps = 0.0);
SPOIL(eps_nan, s->config.rms_eps = (double)NAN);
SPOIL(window, s->config.window = -1);
SPOIL(theta, s->config.rope.theta = -5.0);
SPOIL(train_reserved, s->train.reserved_must_be_zero0 = 7);
SPOIL(train_reserved1, s->train.reserved_must_be_zero1 = 7);
SPOIL(tokens, s->model.tokens = -1);
SPOIL(tokens_many, s->model.tokens = (int64_t)1 << 40);
SPOIL(sequences, s->model.max_sequences = 25);
SPOIL(length, s->model.max_length = 25);
SPOIL(length_negative, s->model.max_length = -2);
SPOIL(lr, s->train.lr = (double)NAN);
SPOIL(lr_infinite, s->train.lr = (double)INFINITY);
SPOIL(beta1, s->train.beta1 = 1.0);
SPOIL(beta2, s->train.beta2 = (double)NAN);
SPOIL(beta_negative, s->train.beta1 = -0.5);
SPOIL(adam_eps, s->train.eps = (double)NAN);
SPOIL(adam_eps_negative, s->train.eps = -1e-8);
SPOIL(decay, s->train.weight_decay = (double)NAN);
SPOIL(decay_negative, s->train.weight_decay = -0.1);
SPOIL(max_norm, s->train.max_norm = (double)NAN);
SPOIL(schedule, s->train.schedule = (qlora_schedule)3);
SPOIL(warmup, s->train.warmup_steps = -1);
SPOIL(total, s->train.total_steps = -1);
SPOIL(recompute, s->model.recompute = (qlora_choice)3);
SPOIL(cache, s->model.cache = (qlora_choice)-1);
SPOIL(chunk, s->model.head_chunk = -1);
SPOIL(generate, s->model.generate_tokens = -1);
SPOIL(generate_far, s->model.generate_tokens = 65);
SPOIL(stop_count, s->config.stop_count = QLORA_MAX_STOP_IDS + 1);
SPOIL(stop_count_negative, s->config.stop_count = -1);
SPOIL(positions, s->config.max_positions = -1);

static void spoil_length_far(setup* s) {
    s->config.max_positions = 16;
    s->model.max_length = 17;
}
SPOIL(adapter, s->model.adapter = "no/such/adapter");

static const refusal refusals[] = {
    {"reserved", spoil_reserved, "zeroed"},
    {"reserved at the end", spoil_reserved1, "zeroed"},
    {"both", spoil_both, "either dir"},
    {"empty folder", spoil_neither, "config.json"},
    {"rank", spoil_rank, "rank is 1025"},
    {"dropout", spoil_dropout, "dropout is 1;"},
    {"dropout NaN", spoil_dropout_nan, "dropout is nan"},
    {"targets", spoil_targets, "targets is 512"},
    {"targets of others", spoil_targets_fused, "targets contains qkv"},
    {"alpha", spoil_alpha, "alpha is nan"},
    {"weight_std", spoil_std, "weight_std"},
    {"weight_std below 0", spoil_std_negative, "weight_std"},
    {"base", spoil_base, "base"},
    {"mode", spoil_mode, "mode"},
    {"vocab", spoil_vocab, "config.vocab is 0"},
    {"hidden", spoil_hidden, "config.hidden is -1"},
    {"layers", spoil_layers, "layers is 257"},
    {"heads", spoil_heads, "config.heads is 0"},
    {"kv_heads", spoil_kv_heads, "kv_heads, 3"},
    {"head_dim", spoil_head_dim, "head_dim is 15"},
    {"head_dim large", spoil_head_dim_large, "head_dim is 258"},
    {"rms_eps", spoil_eps, "rms_eps is 0"},
    {"rms_eps NaN", spoil_eps_nan, "rms_eps is nan"},
    {"window", spoil_window, "window"},
    {"theta", spoil_theta, "config.rope.theta is -5; it must be greater than 1"},
    {"train reserved", spoil_train_reserved, "zeroed"},
    {"train reserved at the end", spoil_train_reserved1, "zeroed"},
    {"tokens", spoil_tokens, "tokens is -1"},
    {"many tokens", spoil_tokens_many, "tokens is 1099511627776"},
    {"max_sequences", spoil_sequences, "max_sequences is 25"},
    {"max_length", spoil_length, "max_length is 25"},
    {"max_length below 0", spoil_length_negative, "max_length is -2"},
    {"lr", spoil_lr, "lr"},
    {"lr infinite", spoil_lr_infinite, "lr"},
    {"beta1", spoil_beta1, "beta"},
    {"beta2", spoil_beta2, "beta"},
    {"beta1 below 0", spoil_beta_negative, "beta"},
    {"eps", spoil_adam_eps, "eps"},
    {"eps below 0", spoil_adam_eps_negative, "eps"},
    {"decay", spoil_decay, "weight_decay"},
    {"decay below 0", spoil_decay_negative, "weight_decay"},
    {"max_norm", spoil_max_norm, "max_norm"},
    {"schedule", spoil_schedule, "schedule"},
    {"warm-up", spoil_warmup, "warmup_steps"},
    {"total", spoil_total, "total_steps"},
    {"recompute", spoil_recompute, "recompute"},
    {"cache", spoil_cache, "cache"},
    {"head_chunk", spoil_chunk, "head_chunk"},
    {"generate_tokens", spoil_generate, "generate_tokens"},
    {"generate_tokens past the positions", spoil_generate_far, "generate_tokens is 65"},
    {"max_length past the positions", spoil_length_far, "max_position_embeddings"},
    {"stop_count", spoil_stop_count, "stop_count is 17"},
    {"negative stop_count", spoil_stop_count_negative, "stop_count is -1"},
    {"max_positions", spoil_positions, "max_positions is -1"},
    {"adapter", spoil_adapter, "no/such/adapter"},
};

TEST bad_descs_are_refused(const test_machine* machine) {
    rig r;
    memset(&r, 0, sizeof r);
    r.ctx = test_open(machine, NULL);
    ASSERTm(test_open_reason(), r.ctx != NULL);
    qlora_memory_info before;
    qlora_memory_info after;
    ASSERT_OK(r, test_memory(r.ctx, &before));
    for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; i++) {
        setup s = setup_make(machine);
        refusals[i].spoil(&s);
        if (s.model.dir == NULL) {
            s.model.config = &s.config;
        }
        qlora_result result = qlora_model_open(r.ctx, &s.model, &r.model);
        if (result == QLORA_OK) { // then the trainer refuses
            result = qlora_trainer_create(r.model, &s.train, &r.trainer);
            ASSERT_EQ(NULL, r.trainer);
        }
        ASSERTm(refusals[i].name, result != QLORA_OK);
        if (strstr(qlora_last_error(r.ctx), refusals[i].says) == NULL) {
            fprintf(stderr, "\"%s\" is not in: %s\n", refusals[i].says, qlora_last_error(r.ctx));
            FAILm(refusals[i].name);
        }
        if (r.model != NULL) {
            ASSERT_OK(r, qlora_model_close(r.model));
            r.model = NULL;
        }
        ASSERT_OK(r, test_memory(r.ctx, &after));
        ASSERT_EQ_FMT((int)before.host_bytes, (int)after.host_bytes, "%d");
    }
    setup s = setup_make(machine);
    s.model.config = &s.config;
    qlora_plan plan;
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_model_open(r.ctx, NULL, &r.model));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_model_open(r.ctx, &s.model, NULL));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_model_open(NULL, &s.model, &r.model));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_plan_make(r.ctx, NULL, NULL, &plan));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_plan_make(r.ctx, &s.model, NULL, NULL));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_config_read(r.ctx, NULL, &s.config));
    ASSERT_EQ_FMT(1, (int)qlora_plan_describe(NULL, NULL, 0), "%d");
    // The longest sequence is by default what both the batch and the model can hold.
    s.config.max_positions = 16;
    ASSERT_OK(r, qlora_plan_make(r.ctx, &s.model, NULL, &plan));
    ASSERT_EQ_FMT(16, (int)plan.max_length, "%d");
    ASSERT(test_close_ctx(machine, r.ctx));
    PASS();
}

// A plan is memory of the caller's: a config in it that was overwritten is found.
TEST spoilt_plans_are_refused(const test_machine* machine) {
    static const char dir[] = "tests/golden/tiny/model";
    setup s = setup_make(machine);
    rig r;
    memset(&r, 0, sizeof r);
    r.ctx = test_open(machine, NULL);
    ASSERTm(test_open_reason(), r.ctx != NULL);
    s.model.dir = dir;
    qlora_plan plan;
    for (int i = 0; i < 3; i++) {
        ASSERT_OK(r, qlora_plan_make(r.ctx, &s.model, NULL, &plan));
        plan.config.stop_count = i == 0 ? QLORA_MAX_STOP_IDS + 1 : plan.config.stop_count;
        plan.config.layers = i == 1 ? QLORA_MAX_LAYERS + 1 : plan.config.layers;
        qlora_model_desc desc = s.model;
        desc.plan = &plan;
        qlora_result result = qlora_model_open(r.ctx, &desc, &r.model);
        ASSERT_EQ_FMT(i < 2 ? (int)QLORA_ERR_ARGUMENT : (int)QLORA_OK, (int)result, "%d");
    }
    ASSERT_OK(r, qlora_model_close(r.model));
    ASSERT(test_close_ctx(machine, r.ctx));
    PASS();
}

// A model that no machine has room for is refused before anything is allocated, also on the CPU,
// and bf16 on a device that does not have it.
TEST plans_know_the_machine(const test_machine* machine) {
    setup s = setup_make(machine);
    qlora_plan_desc target;
    qlora_plan plan;
    memset(&target, 0, sizeof target);
    qlora_ctx* ctx = test_open(machine, NULL);
    ASSERTm(test_open_reason(), ctx != NULL);
    s.config.hidden = 1 << 20;
    s.config.intermediate = 1 << 20;
    s.config.layers = 256;
    s.model.config = &s.config;
    s.model.rank = -1;
    s.model.train_norms = false;
    qlora_model* model = NULL;
    ASSERT_EQ(QLORA_ERR_DEVICE_MEMORY, qlora_plan_make(ctx, &s.model, NULL, &plan));
    ASSERT_EQ(QLORA_ERR_DEVICE_MEMORY, qlora_model_open(ctx, &s.model, &model));
    // A plan that was made for more memory than there is does not open.
    target.bytes = UINT64_MAX;
    ASSERT_EQ(QLORA_OK, qlora_plan_make(ctx, &s.model, &target, &plan));
    s.model.plan = &plan;
    ASSERT_EQ(QLORA_ERR_DEVICE_MEMORY, qlora_model_open(ctx, &s.model, &model));
    s = setup_make(machine);
    s.model.config = &s.config;
    target.bytes = 0;
    target.capability = 75;
    s.model.mode = QLORA_MODE_BF16;
    ASSERT_EQ(QLORA_ERR_UNSUPPORTED, qlora_plan_make(ctx, &s.model, &target, &plan));
    ASSERT(strstr(qlora_last_error(ctx), "7.5") != NULL);
    target.capability = 80;
    ASSERT_EQ(QLORA_OK, qlora_plan_make(ctx, &s.model, &target, &plan));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

static void batch_null_ids(data* d) {
    d->batch.ids = NULL;
}
static void batch_null_labels(data* d) {
    d->batch.labels = NULL;
}
static void batch_null_lengths(data* d) {
    d->batch.lengths = NULL;
}
static void batch_count(data* d) {
    d->batch.count = -1;
}
static void batch_many(data* d) {
    d->batch.count = MAX_SEQUENCES + 1;
}
static void batch_zero_length(data* d) {
    d->lengths[1] = 0;
}
static void batch_long(data* d) {
    d->lengths[1] = TOKENS + 1;
}
static void batch_tokens(data* d) {
    d->lengths[1] = TOKENS - 1;
}
static void batch_id(data* d) {
    d->ids[4] = VOCAB;
}
static void batch_id_negative(data* d) {
    d->ids[4] = -1;
}
static void batch_label(data* d) {
    d->labels[4] = VOCAB;
}
static void batch_label_negative(data* d) {
    d->labels[4] = -99;
}
static void batch_weight(data* d) {
    d->batch.weights = d->weights;
    d->weights[4] = -1.0f;
}
static void batch_weight_nan(data* d) {
    d->batch.weights = d->weights;
    d->weights[4] = (float)NAN;
}
static void batch_weight_infinite(data* d) {
    d->batch.weights = d->weights;
    d->weights[4] = (float)INFINITY;
}

TEST bad_batches_are_refused(const test_machine* machine) {
    static const struct {
        void (*spoil)(data* d);
        const char* says;
    } cases[] = {
        {batch_null_ids, "batch->ids is NULL"},
        {batch_null_labels, "batch->labels is NULL"},
        {batch_null_lengths, "batch->lengths is NULL"},
        {batch_count, "batch->count is -1"},
        {batch_many, "9 sequences"},
        {batch_zero_length, "sequence 1 has 0 tokens"},
        {batch_long, "25 tokens"},
        {batch_tokens, "38 tokens"},
        {batch_id, "id 61"},
        {batch_id_negative, "id -1"},
        {batch_label, "label 61"},
        {batch_label_negative, "label -99"},
        {batch_weight, "weight of label 4 is -1"},
        {batch_weight_nan, "nan"},
        {batch_weight_infinite, "inf"},
    };
    static const double totals[] = {0.0, -1.0, (double)NAN, (double)INFINITY};
    setup s = setup_make(machine);
    rig r;
    outcome expected;
    outcome got;
    ASSERT(run_session(&s, &expected));
    ASSERT(rig_open(&r, &s));
    data d;
    float logits[TOKENS * VOCAB];
    qlora_eval_info info;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        data_make(&d, "bad", run_lengths[0], 3);
        cases[i].spoil(&d);
        for (int call = 0; call < 3; call++) {
            qlora_result result = call == 0   ? qlora_train_micro(r.trainer, &d.batch, 5.0)
                                  : call == 1 ? qlora_eval(r.model, &d.batch, &info)
                                              : qlora_eval_logits(r.model, &d.batch, logits);
            ASSERT_EQm(cases[i].says, QLORA_ERR_ARGUMENT, result);
            ASSERTm(qlora_last_error(r.ctx),
                    strstr(qlora_last_error(r.ctx), cases[i].says) != NULL);
        }
        if (d.batch.labels == NULL || d.batch.lengths == NULL) {
            ASSERT_IN_RANGE(0.0, qlora_batch_labels(&d.batch), 0.0);
        }
    }
    data_make(&d, "bad", run_lengths[0], 3);
    for (size_t i = 0; i < 4; i++) {
        ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_train_micro(r.trainer, &d.batch, totals[i]));
        ASSERT(strstr(qlora_last_error(r.ctx), "total_labels") != NULL);
    }
    float number = 0.0f;
    qlora_parameter_info p;
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_train_micro(r.trainer, NULL, 5.0));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_train_micro(NULL, &d.batch, 5.0));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_train_update(NULL));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_train_query(r.trainer, NULL));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_gradient_read(r.trainer, -1, &number));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_gradient_read(r.trainer, 1000, &number));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_gradient_read(r.trainer, 0, NULL));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_eval(r.model, &d.batch, NULL));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_eval_logits(r.model, &d.batch, NULL));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_parameter_query(r.model, -1, &p));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_parameter_query(r.model, 0, NULL));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_parameter_read(r.model, 0, NULL));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_parameter_write(r.model, 10000, &number));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_parameter_read(NULL, 0, &number));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_adapter_use(NULL, true));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_trainer_create(NULL, NULL, &r.trainer));
    ASSERT_EQ(QLORA_OK, qlora_model_close(NULL));
    ASSERT_EQ(QLORA_OK, qlora_trainer_destroy(NULL));
    qlora_trainer* second = NULL;
    ASSERT_EQ(QLORA_ERR_STATE, qlora_trainer_create(r.model, NULL, &second));
    ASSERT_EQ(QLORA_ERR_STATE, qlora_model_close(r.model));
    ASSERT(strstr(qlora_last_error(r.ctx), "trainer") != NULL);
    ASSERT_EQ(QLORA_ERR_STATE, qlora_ctx_destroy(r.ctx));
    // None of this had any effect.
    ASSERT(run_steps(&r, &s, &got));
    ASSERT(outcome_same(&expected, &got));
    outcome_free(&expected);
    outcome_free(&got);
    ASSERT(rig_close(&r, &s));
    PASS();
}

// ---- model folders, in a file system in memory

enum { MEMORY_FILES = 8, READERS = 4 };

typedef struct memory_file {
    char path[64];
    unsigned char* data;
    size_t size;
} memory_file;

static memory_file memory[MEMORY_FILES];
static int memory_count;
static int memory_open; // handles and maps that were not closed

static memory_file* memory_find(const char* path) {
    for (int i = 0; i < memory_count; i++) {
        if (strcmp(memory[i].path, path) == 0) {
            return &memory[i];
        }
    }
    return NULL;
}

static memory_file* memory_add(const char* path, const void* bytes, size_t size) {
    memory_file* f = memory_find(path);
    f = f != NULL ? f : &memory[memory_count++];
    snprintf(f->path, sizeof f->path, "%s", path);
    free(f->data);
    f->data = (unsigned char*)malloc(size + 1);
    memcpy(f->data, bytes, size);
    f->size = size;
    return f;
}

static void memory_clear(void) {
    for (int i = 0; i < memory_count; i++) {
        free(memory[i].data);
        memory[i].data = NULL;
    }
    memory_count = 0;
    memory_open = 0;
}

typedef struct memory_reader {
    memory_file* file;
    size_t at;
} memory_reader;

static int files_open(const char* path, qlora_file_mode mode, void** file, void* user) {
    (void)user;
    memory_file* f = memory_find(path);
    if (f == NULL || mode != QLORA_FILE_READ) {
        return f == NULL ? 2 : 30; // ENOENT, EROFS
    }
    memory_reader* reader = (memory_reader*)malloc(sizeof *reader);
    reader->file = f;
    reader->at = 0;
    memory_open++;
    *file = reader;
    return 0;
}

static int64_t files_read(void* file, void* buffer, size_t bytes, void* user) {
    (void)user;
    memory_reader* reader = (memory_reader*)file;
    size_t left = reader->file->size - reader->at;
    size_t n = bytes < left ? bytes : left;
    memcpy(buffer, reader->file->data + reader->at, n);
    reader->at += n;
    return (int64_t)n;
}

static int64_t files_read_at(void* file, void* buffer, size_t bytes, uint64_t offset, void* user) {
    (void)file;
    (void)buffer;
    (void)bytes;
    (void)offset;
    (void)user;
    return -29; // ESPIPE: models are mapped, or read in order
}

static int64_t files_write(void* file, const void* bytes, size_t size, void* user) {
    (void)file;
    (void)bytes;
    (void)size;
    (void)user;
    return -30;
}

static int files_sync(void* file, void* user) {
    (void)file;
    (void)user;
    return 30;
}

static int files_close(void* file, void* user) {
    (void)user;
    free(file);
    memory_open--;
    return 0;
}

static int files_rename(const char* from, const char* to, void* user) {
    (void)from;
    (void)to;
    (void)user;
    return 30;
}

static int files_path(const char* path, void* user) {
    (void)path;
    (void)user;
    return 30;
}

static int files_map(const char* path, const void** bytes, uint64_t* size, void** handle,
                     void* user) {
    (void)user;
    memory_file* f = memory_find(path);
    if (f == NULL) {
        return 2;
    }
    *bytes = f->data;
    *size = f->size;
    *handle = f;
    memory_open++;
    return 0;
}

static void files_unmap(const void* bytes, uint64_t size, void* handle, void* user) {
    (void)bytes;
    (void)size;
    (void)handle;
    (void)user;
    memory_open--;
}

static void with_files(qlora_ctx_desc* desc) {
    qlora_files files = {files_open,  files_read,   files_read_at, files_write, files_sync,
                         files_close, files_rename, files_path,    files_path,  files_path,
                         files_map,   files_unmap,  NULL};
    desc->files = files;
}

// A safetensors file being built: the header's text and the bytes after it.
typedef struct st_file {
    char header[16384];
    size_t header_size;
    unsigned char bytes[131072];
    size_t size;
} st_file;

static void st_begin(st_file* st) {
    memset(st, 0, sizeof *st);
    st->header_size = (size_t)snprintf(st->header, sizeof st->header, "{");
}

static void st_add(st_file* st, const char* name, const char* dtype, const float* values,
                   int64_t rows, int64_t cols) {
    size_t element = strcmp(dtype, "F32") == 0 ? 4 : 2;
    size_t n = (size_t)(rows * (cols > 0 ? cols : 1));
    char shape[48];
    snprintf(shape, sizeof shape, cols > 0 ? "%lld,%lld" : "%lld", (long long)rows,
             (long long)cols);
    st->header_size += (size_t)snprintf(
        st->header + st->header_size, sizeof st->header - st->header_size,
        "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}",
        st->header_size > 1 ? "," : "", name, dtype, shape, st->size, st->size + n * element);
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        uint16_t half = (uint16_t)(bits >> 16); // bf16: the values have few bits
        if (strcmp(dtype, "F16") == 0) {
            uint32_t exponent = bits >> 23 & 0xff;
            half =
                (uint16_t)((bits >> 16 & 0x8000) |
                           (exponent == 0 ? 0 : ((exponent - 112) << 10 | (bits >> 13 & 0x3ff))));
        }
        memcpy(st->bytes + st->size + i * element, element == 4 ? (void*)&bits : (void*)&half,
               element);
    }
    st->size += n * element;
}

static void st_save(st_file* st, const char* path) {
    static unsigned char whole[8 + sizeof(st_file)];
    st->header[st->header_size++] = '}';
    uint64_t length = st->header_size;
    for (int i = 0; i < 8; i++) {
        whole[i] = (unsigned char)(length >> (8 * i));
    }
    memcpy(whole + 8, st->header, st->header_size);
    memcpy(whole + 8 + st->header_size, st->bytes, st->size);
    memory_add(path, whole, 8 + st->header_size + st->size);
}

enum { F_HIDDEN = 32, F_INTER = 24, F_LAYERS = 2, F_Q = 32, F_KV = 16 };

// How a folder is made invalid, or how it is written.
typedef struct folder {
    const char* dtype;
    bool shards;
    const char* config;    // NULL: a good one
    const char* leave_out; // a tensor's name
    const char* misshape;  // gets an extra row
    const char* mistype;   // gets dtype I64
    size_t cut;            // bytes removed from the end
    const char* lose;      // a file of the folder that is missing
} folder;

static const char good_config[] =
    "{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\",\"hidden_size\":32,"
    "\"intermediate_size\":24,\"num_hidden_layers\":2,\"num_attention_heads\":4,"
    "\"num_key_value_heads\":2,\"head_dim\":8,\"vocab_size\":61,\"max_position_embeddings\":64,"
    "\"rms_norm_eps\":1e-5,\"rope_theta\":10000.0,\"hidden_act\":\"silu\","
    "\"tie_word_embeddings\":false,\"torch_dtype\":\"float32\"}";

// Values of few bits, so that every type holds them exactly; each depends only on name
// and position.
static void few_bits(const char* name, float* out, size_t n) {
    uint64_t h = 1469598103934665603u;
    for (const char* c = name; *c != '\0'; c++) {
        h = (h ^ (unsigned char)*c) * 1099511628211u;
    }
    bool norm = strstr(name, "norm") != NULL;
    for (size_t i = 0; i < n; i++) {
        h ^= h >> 12;
        h ^= h << 25;
        h ^= h >> 27;
        float x = (float)((int)(h * 2685821657736338717u >> 58) - 32) / 128.0f; // -0.25 to 0.242
        out[i] = norm ? 1.0f + x : x;
    }
}

static void folder_tensor(const folder* f, st_file* st, const char* name, int64_t rows,
                          int64_t cols) {
    static float values[64 * 64];
    if (f->leave_out != NULL && strcmp(f->leave_out, name) == 0) {
        return;
    }
    rows += f->misshape != NULL && strcmp(f->misshape, name) == 0 ? 1 : 0;
    few_bits(name, values, (size_t)(rows * (cols > 0 ? cols : 1)));
    size_t at = st->header_size;
    st_add(st, name, f->dtype, values, rows, cols);
    if (f->mistype != NULL && strcmp(f->mistype, name) == 0) {
        char* type = strstr(st->header + at, "\"F32\"");
        memcpy(type, "\"I32\"", 5);
    }
}

static void folder_write(const folder* f) {
    static st_file st;
    char name[128];
    char index[4096];
    size_t used = 0;
    memory_clear();
    memory_add("m/config.json", f->config != NULL ? f->config : good_config,
               strlen(f->config != NULL ? f->config : good_config));
    static const struct {
        const char* name;
        int64_t rows;
        int64_t cols;
    } parts[] = {{"self_attn.q_proj", F_Q, F_HIDDEN},      {"self_attn.k_proj", F_KV, F_HIDDEN},
                 {"self_attn.v_proj", F_KV, F_HIDDEN},     {"self_attn.o_proj", F_HIDDEN, F_Q},
                 {"mlp.gate_proj", F_INTER, F_HIDDEN},     {"mlp.up_proj", F_INTER, F_HIDDEN},
                 {"mlp.down_proj", F_HIDDEN, F_INTER},     {"input_layernorm", F_HIDDEN, 0},
                 {"post_attention_layernorm", F_HIDDEN, 0}};
    used += (size_t)snprintf(index, sizeof index, "{\"metadata\":{},\"weight_map\":{");
    st_begin(&st);
    for (int l = 0; l < F_LAYERS; l++) {
        for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
            snprintf(name, sizeof name, "model.layers.%d.%s.weight", l, parts[i].name);
            folder_tensor(f, &st, name, parts[i].rows, parts[i].cols);
            used += (size_t)snprintf(index + used, sizeof index - used,
                                     "\"%s\":\"model-0000%d-of-00002.safetensors\",", name, l + 1);
        }
        if (f->shards && l == 0) {
            st_save(&st, "m/model-00001-of-00002.safetensors");
            st_begin(&st);
        }
    }
    folder_tensor(f, &st, "model.norm.weight", F_HIDDEN, 0);
    folder_tensor(f, &st, "model.embed_tokens.weight", VOCAB, F_HIDDEN);
    folder_tensor(f, &st, "lm_head.weight", VOCAB, F_HIDDEN);
    const char* path = f->shards ? "m/model-00002-of-00002.safetensors" : "m/model.safetensors";
    st_save(&st, path);
    memory_find(path)->size -= f->cut;
    if (f->shards) {
        used +=
            (size_t)snprintf(index + used, sizeof index - used,
                             "\"model.norm.weight\":\"%s\",\"model.embed_tokens.weight\":\"%s\","
                             "\"lm_head.weight\":\"%s\"}}",
                             path + 2, path + 2, path + 2);
        memory_add("m/model.safetensors.index.json", index, used);
    }
    if (f->lose != NULL) {
        memory_find(f->lose)->path[0] = '\0';
    }
}

static setup folder_setup(const test_machine* machine) {
    setup s = setup_make(machine);
    s.model.dir = "m";
    s.change = with_files;
    return s;
}

// f32, bf16 and f16 files, in one piece or in shards, hold the same model and give the same bits.
TEST folders_of_every_kind(const test_machine* machine) {
    static const folder folders[] = {{"F32", false, NULL, NULL, NULL, NULL, 0, NULL},
                                     {"BF16", false, NULL, NULL, NULL, NULL, 0, NULL},
                                     {"F16", true, NULL, NULL, NULL, NULL, 0, NULL},
                                     {"F32", true, NULL, NULL, NULL, NULL, 0, NULL}};
    for (int base = 0; base < 2; base++) {
        outcome expected;
        for (int i = 0; i < 4; i++) {
            setup s = folder_setup(machine);
            outcome got;
            s.model.base = base == 0 ? QLORA_BASE_NF4 : QLORA_BASE_16BIT;
            folder_write(&folders[i]);
            ASSERT(run_session(&s, &got));
            ASSERT(outcome_sane(&got));
            ASSERT_EQ_FMT(0, memory_open, "%d");
            if (i == 0) {
                expected = got;
                continue;
            }
            ASSERTm(folders[i].dtype, outcome_same(&expected, &got));
            outcome_free(&got);
        }
        outcome_free(&expected);
    }
    memory_clear();
    PASS();
}

#define SHARD_2 "m/model-00002-of-00002.safetensors"

TEST bad_folders_are_refused(const test_machine* machine) {
    static const struct {
        folder folder;
        const char* says;
    } cases[] = {
        {{"F32", false, NULL, "model.layers.1.mlp.up_proj.weight", NULL, NULL, 0, NULL},
         "model.layers.1.mlp.up_proj.weight"},
        {{"F32", false, NULL, "model.layers.0.input_layernorm.weight", NULL, NULL, 0, NULL},
         "model.layers.0.input_layernorm.weight"},
        {{"F32", false, NULL, "lm_head.weight", NULL, NULL, 0, NULL}, "lm_head.weight"},
        {{"F32", false, NULL, "model.embed_tokens.weight", NULL, NULL, 0, NULL},
         "model.embed_tokens.weight"},
        {{"F32", false, NULL, NULL, "model.layers.0.self_attn.k_proj.weight", NULL, 0, NULL},
         "model.layers.0.self_attn.k_proj.weight"},
        {{"F32", false, NULL, NULL, "model.norm.weight", NULL, 0, NULL}, "model.norm.weight"},
        {{"F32", false, NULL, NULL, NULL, "model.layers.0.mlp.down_proj.weight", 0, NULL},
         "model.layers.0.mlp.down_proj.weight"},
        {{"F32", false, NULL, NULL, NULL, NULL, 7, NULL}, "model.safetensors"},
        {{"F32", true, NULL, NULL, NULL, NULL, 100, NULL}, "model-00002-of-00002.safetensors"},
        {{"F32", true, NULL, NULL, NULL, NULL, 0, SHARD_2}, "model-00002-of-00002.safetensors"},
        {{"F32", true, NULL, "model.norm.weight", NULL, NULL, 0, NULL}, "model.norm.weight"},
        {{"F32", false, NULL, NULL, NULL, NULL, 0, "m/config.json"}, "config.json"},
        {{"F32", false, NULL, NULL, NULL, NULL, 0, "m/model.safetensors"}, "safetensors"},
        {{"F32", false, "{\"model_type\":\"gpt2\",\"architectures\":[\"GPT2LMHeadModel\"]}", NULL,
          NULL, NULL, 0, NULL},
         "gpt2"},
        {{"F32", false, "{\"model_type\":", NULL, NULL, NULL, 0, NULL}, "config.json"},
        {{"F32", false, "{}", NULL, NULL, NULL, 0, NULL}, "config.json"},
    };
    setup s = folder_setup(machine);
    rig r;
    memset(&r, 0, sizeof r);
    r.ctx = test_open(machine, with_files);
    ASSERTm(test_open_reason(), r.ctx != NULL);
    qlora_memory_info before;
    qlora_memory_info after;
    ASSERT_OK(r, test_memory(r.ctx, &before));
    size_t stride = strcmp(machine->backend, "cpu") == 0 ? 1 : 4; // opening takes longer elsewhere
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i += stride) {
        folder_write(&cases[i].folder);
        qlora_result result = qlora_model_open(r.ctx, &s.model, &r.model);
        ASSERTm(cases[i].says, result != QLORA_OK);
        ASSERT_EQ(NULL, r.model);
        ASSERTm(qlora_last_error(r.ctx), strstr(qlora_last_error(r.ctx), cases[i].says) != NULL);
        ASSERT_OK(r, test_memory(r.ctx, &after));
        ASSERT_EQ_FMT((unsigned long long)before.device_bytes,
                      (unsigned long long)after.device_bytes, "%llu");
        // Kernels that were compiled along the way stay loaded.
        if (strcmp(machine->backend, "cpu") == 0) {
            ASSERT_EQ_FMT((int)before.host_bytes, (int)after.host_bytes, "%d");
        }
        ASSERT_EQ_FMT(0, memory_open, "%d");
    }
    ASSERT(test_close_ctx(machine, r.ctx));
    memory_clear();
    PASS();
}

static size_t counted_now;
static size_t counted_most;

static void* counted_alloc(size_t bytes, size_t align, void* user) {
    (void)user;
    (void)align; // malloc's is enough here
    counted_now += bytes;
    counted_most = counted_now > counted_most ? counted_now : counted_most;
    return malloc(bytes);
}

static void counted_free(void* pointer, size_t bytes, void* user) {
    (void)user;
    counted_now -= bytes;
    free(pointer);
}

static void with_counted_files(qlora_ctx_desc* desc) {
    with_files(desc);
    desc->allocator.alloc = counted_alloc;
    desc->allocator.free = counted_free;
}

// A config that promises layers which the files do not have: refused before it costs memory.
TEST promised_layers_cost_nothing(const test_machine* machine) {
    static folder many = {"F32", false, NULL, NULL, NULL, NULL, 0, NULL};
    static char config[sizeof good_config + 8];
    const char* count = strstr(good_config, ":2,");
    ASSERT(count != NULL && strncmp(count - 19, "\"num_hidden_layers\"", 19) == 0);
    size_t digit = (size_t)(count - good_config) + 2; // the place after the 2
    memcpy(config, good_config, digit);
    memcpy(config + digit, "56", 2);
    memcpy(config + digit + 2, good_config + digit, sizeof good_config - digit);
    many.config = config;
    if (strcmp(machine->backend, "cpu") != 0) {
        PASS();
    }
    setup s = folder_setup(machine);
    qlora_model* model = NULL;
    folder_write(&many);
    size_t files = memory_find("m/model.safetensors")->size + strlen(config);
    qlora_ctx* ctx = test_open(machine, with_counted_files);
    ASSERTm(test_open_reason(), ctx != NULL);
    size_t before = counted_now;
    counted_most = before;
    ASSERT_EQ_FMT(QLORA_ERR_FORMAT, qlora_model_open(ctx, &s.model, &model), "%d");
    ASSERTm(qlora_last_error(ctx),
            strstr(qlora_last_error(ctx), "model.layers.255.self_attn.q_proj.weight is missing; "
                                          "the config has 256 layers") != NULL);
    ASSERTm("more memory than ten times the files", counted_most - before <= 10 * files);
    ASSERT(test_close_ctx(machine, ctx));
    memory_clear();
    PASS();
}

// A PEFT folder whose ranks and scales differ from module to module.
TEST ranks_come_from_the_adapter(const test_machine* machine) {
    static const char config[] =
        "{\"peft_type\":\"LORA\",\"task_type\":\"CAUSAL_LM\",\"r\":4,\"lora_alpha\":8,"
        "\"target_modules\":[\"q_proj\",\"down_proj\"],\"rank_pattern\":{\"layers.1.self_attn.q_"
        "proj\":2},"
        "\"alpha_pattern\":{\"layers.0.mlp.down_proj\":6},\"lora_dropout\":0.0,\"bias\":\"none\","
        "\"use_rslora\":false,\"fan_in_fan_out\":false}";
    static const struct {
        const char* module;
        int64_t rank;
        int64_t in;
        int64_t out;
    } parts[] = {{"layers.0.self_attn.q_proj", 4, F_HIDDEN, F_Q},
                 {"layers.0.mlp.down_proj", 4, F_INTER, F_HIDDEN},
                 {"layers.1.self_attn.q_proj", 2, F_HIDDEN, F_Q},
                 {"layers.1.mlp.down_proj", 4, F_INTER, F_HIDDEN}};
    static const folder good = {"F32", false, NULL, NULL, NULL, NULL, 0, NULL};
    static st_file st;
    folder_write(&good);
    st_begin(&st);
    float values[64 * 4];
    char name[128];
    for (size_t i = 0; i < 4; i++) {
        for (int b = 0; b < 2; b++) {
            snprintf(name, sizeof name, "base_model.model.model.%s.lora_%c.weight", parts[i].module,
                     b != 0 ? 'B' : 'A');
            int64_t rows = b != 0 ? parts[i].out : parts[i].rank;
            int64_t cols = b != 0 ? parts[i].rank : parts[i].in;
            few_bits(name, values, (size_t)(rows * cols));
            st_add(&st, name, "F32", values, rows, cols);
        }
    }
    st_save(&st, "a/adapter_model.safetensors");
    memory_add("a/adapter_config.json", config, sizeof config - 1);
    setup s = folder_setup(machine);
    s.model.adapter = "a";
    s.model.train_norms = false;
    rig r;
    memset(&r, 0, sizeof r);
    r.ctx = test_open(machine, with_files);
    ASSERTm(test_open_reason(), r.ctx != NULL);
    ASSERT(rig_start(&r, &s));
    ASSERT_EQ_FMT(8, (int)model_parameters(r.model), "%d");
    for (int64_t i = 0; i < 8; i++) {
        qlora_parameter_info p;
        float got[64 * 4];
        bool b = i % 2 != 0;
        ASSERT_OK(r, qlora_parameter_query(r.model, i, &p));
        ASSERT(strstr(p.name, parts[i / 2].module) != NULL);
        ASSERT_EQ_FMT((int)(b ? parts[i / 2].out : parts[i / 2].rank), (int)p.rows, "%d");
        ASSERT_EQ_FMT((int)(b ? parts[i / 2].rank : parts[i / 2].in), (int)p.cols, "%d");
        few_bits(p.name, values, (size_t)(p.rows * p.cols));
        ASSERT_OK(r, qlora_parameter_read(r.model, i, got));
        ASSERT_MEM_EQ(values, got, (size_t)(p.rows * p.cols) * sizeof got[0]);
    }
    outcome o;
    ASSERT(run_steps(&r, &s, &o));
    ASSERT(outcome_sane(&o));
    outcome_free(&o);
    ASSERT(rig_close(&r, &s));
    ASSERT_EQ_FMT(0, memory_open, "%d");
    memory_clear();
    PASS();
}

// The dry run of a model leaves out layers that are like others, but not those with other ranks or
// without adapters: later, nothing is compiled, and every product is known.
TEST layers_that_differ_are_planned(const test_machine* machine) {
    static const char config[] =
        "{\"peft_type\":\"LORA\",\"task_type\":\"CAUSAL_LM\",\"r\":4,\"lora_alpha\":8,"
        "\"target_modules\":[\"q_proj\",\"down_proj\"],\"layers_to_transform\":[0,1,2,3,4,6,7,8],"
        "\"rank_pattern\":{\"layers.3.self_attn.q_proj\":20},\"lora_dropout\":0.0,"
        "\"bias\":\"none\",\"use_rslora\":false,\"fan_in_fan_out\":false}";
    static st_file st;
    static float values[64 * 20];
    char name[128];
    setup s = setup_make(machine);
    memory_clear();
    st_begin(&st);
    for (int i = 0; i < 9 * 4; i++) {
        bool b = i % 2 != 0;
        bool down = i / 2 % 2 != 0;
        int64_t rank = i / 4 == 3 && !down ? 20 : 4;
        int64_t rows = b ? (down ? s.config.hidden : s.config.heads * s.config.head_dim) : rank;
        int64_t cols = b ? rank : down ? s.config.intermediate : s.config.hidden;
        snprintf(name, sizeof name, "base_model.model.model.layers.%d.%s.lora_%c.weight", i / 4,
                 down ? "mlp.down_proj" : "self_attn.q_proj", b ? 'B' : 'A');
        few_bits(name, values, (size_t)(rows * cols));
        if (i / 4 != 5) {
            st_add(&st, name, "F32", values, rows, cols);
        }
    }
    st_save(&st, "a/adapter_model.safetensors");
    memory_add("a/adapter_config.json", config, sizeof config - 1);
    s.config.layers = 9;
    s.model.adapter = "a";
    s.model.targets = 0;
    s.model.rank = 0;
    s.model.alpha = 0.0f;
    s.model.dropout = 0.0f;
    s.model.train_norms = false;
    rig r;
    data d;
    memset(&r, 0, sizeof r);
    r.ctx = test_open(machine, with_files);
    ASSERTm(test_open_reason(), r.ctx != NULL);
    ASSERT(rig_start(&r, &s));
    data_make(&d, "planned", run_lengths[0], 3);
    ASSERT_OK(r, qlora_train_micro(r.trainer, &d.batch, qlora_batch_labels(&d.batch)));
    ASSERT_OK(r, qlora_train_update(r.trainer));
    qlora_cache_info info;
    ASSERT_OK(r, qlora_cache_query(r.ctx, &info));
    ASSERT_EQ_FMT(0, (int)info.jit_after_seal, "%d");
    ASSERT_EQ_FMT(0, (int)info.cublas_unplanned, "%d");
    ASSERT(rig_close(&r, &s));
    memory_clear();
    PASS();
}

// ---- failures along the way

static setup small_setup(const test_machine* machine) {
    setup s = setup_make(machine);
    s.config.layers = 1;
    s.config.sliding[1] = 0;
    s.config.sliding[0] = 1;
    s.config.hidden = 16;
    s.config.intermediate = 24;
    s.config.heads = 2;
    s.config.kv_heads = 1;
    s.model.rank = 2;
    s.model.head_chunk = 24;
    return s;
}

// Opens, trains and closes in an existing context. Whatever fails, nothing must remain allocated.
static int silent; // failures without a message

static bool whole_life(rig* r, const setup* s, outcome* out) {
    r->model = NULL;
    r->trainer = NULL;
    memset(out, 0, sizeof *out);
    bool ok = rig_start(r, s) && rig_stir(r) && run_steps(r, s, out);
    silent += ok || strlen(qlora_last_error(r->ctx)) > 5 ? 0 : 1;
    // A destroy call that reports an earlier failure still destroys; one that fails can
    // be repeated.
    if (qlora_trainer_destroy(r->trainer) != QLORA_OK) {
        (void)qlora_trainer_destroy(r->trainer);
    }
    if (qlora_model_close(r->model) != QLORA_OK) {
        (void)qlora_model_close(r->model);
    }
    return ok;
}

static uint64_t allocations_left; // 0: no limit
static uint64_t allocations;

static void* rationed_alloc(size_t bytes, size_t align, void* user) {
    (void)user;
    (void)align;
    allocations++;
    if (allocations_left == 1) {
        return NULL;
    }
    allocations_left -= allocations_left > 1 ? 1 : 0;
    unsigned char* p =
        (unsigned char*)malloc(bytes + 512); // aligned manually, after the stored size
    uintptr_t at = ((uintptr_t)p + 256 + 255) & ~(uintptr_t)255;
    memcpy((void*)(at - sizeof p), &p, sizeof p);
    return (void*)at;
}

static void rationed_free(void* pointer, size_t bytes, void* user) {
    (void)user;
    (void)bytes;
    unsigned char* p;
    memcpy(&p, (unsigned char*)pointer - sizeof p, sizeof p);
    free(p);
}

static void with_rations(qlora_ctx_desc* desc) {
    desc->allocator.alloc = rationed_alloc;
    desc->allocator.free = rationed_free;
}

TEST every_allocation_may_fail(const test_machine* machine) {
    setup s = small_setup(machine);
    rig r;
    outcome expected;
    memset(&r, 0, sizeof r);
    allocations_left = 0;
    r.ctx = test_open(machine, with_rations);
    ASSERTm(test_open_reason(), r.ctx != NULL);
    uint64_t start = allocations;
    ASSERT(whole_life(&r, &s, &expected));
    uint64_t count = allocations - start;
    ASSERT(count > 5);
    qlora_memory_info before;
    ASSERT_OK(r, test_memory(r.ctx, &before));
    rig_quiet = true;
    int failed = 0;
    for (uint64_t n = 1; n <= count; n++) {
        outcome got;
        qlora_memory_info after;
        allocations_left = n;
        bool ok = whole_life(&r, &s, &got);
        allocations_left = 0;
        outcome_free(&got);
        failed += ok ? 0 : 1;
        ASSERT_OK(r, test_memory(r.ctx, &after));
        ASSERT_EQ_FMT((int)before.host_bytes, (int)after.host_bytes, "%d");
    }
    rig_quiet = false;
    ASSERT_EQ_FMT((int)count, failed, "%d");
    ASSERT_EQ(0, silent);
    outcome got;
    ASSERT(whole_life(&r, &s, &got));
    ASSERT(outcome_same(&expected, &got));
    outcome_free(&got);
    outcome_free(&expected);
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(r.ctx));
    PASS();
}

// When a driver call fails along the way, the outcome is an error or the same result, without a
// leak, and the next lifetime of the model in the same context is unaffected.
TEST driver_calls_may_fail(const test_machine* machine) {
    const fake_api* fake = test_fake();
    setup s = small_setup(machine);
    s.model.dropout = 0.0f; // then graphs also have a second branch
    rig r;
    outcome expected;
    memset(&r, 0, sizeof r);
    r.ctx = test_open(machine, NULL);
    ASSERTm(test_open_reason(), r.ctx != NULL);
    uint64_t start = fake->calls("ANY");
    ASSERT(whole_life(&r, &s, &expected));
    uint64_t count = fake->calls("ANY") - start;
    ASSERT(count > 100);
    ASSERT(test_close_ctx(machine, r.ctx));
    test_random random = test_random_start("driver calls");
    uint64_t failed = 0;
    uint64_t points = getenv("QLORA_TEST_SOAK") ? count : 24; // make soak: every single call
    for (uint64_t i = 0; i < points; i++) {
        uint64_t nth = 1 + i * count / points + test_random_below(&random, count / points);
        outcome got;
        r.ctx = test_open(machine, NULL);
        ASSERTm(test_open_reason(), r.ctx != NULL);
        fake->fail_at("ANY", nth, 2, false);
        rig_quiet = true;
        bool ok = whole_life(&r, &s, &got);
        rig_quiet = false;
        fake->fail_clear();
        char where[64];
        snprintf(where, sizeof where, "call %llu of %llu", (unsigned long long)nth,
                 (unsigned long long)count);
        if (ok) {
            ASSERTm(where, outcome_same(&expected, &got));
        }
        failed += ok ? 0 : 1;
        outcome_free(&got);
        ASSERTm(where, whole_life(&r, &s, &got));
        ASSERTm(where, outcome_same(&expected, &got));
        outcome_free(&got);
        ASSERTm(where, test_close_ctx(machine, r.ctx));
    }
    ASSERT(failed > points / 2);
    ASSERT_EQ(0, silent);
    outcome_free(&expected);
    PASS();
}

SUITE(model_suite) {
    RUN_ON(TEST_ONE_EACH, same_bits_f32);
    RUN_ON(TEST_ONE_EACH, same_bits_bf16);
    RUN_ON(TEST_ONE_EACH, same_bits_beside_f32);
    RUN_ON(TEST_ONE_EACH, same_bits_beside_bf16);
    RUN_ON(TEST_ONE_EACH, same_bits_beside_attention_only);
    RUN_ON(TEST_ONE_EACH, same_bits_beside_down_only);
    RUN_ON(TEST_TENSOR_CORES, odd_widths_give_the_same_bits);
    RUN_ON(TEST_ONE_EACH, same_bits_beside_gated);
    RUN_ON(TEST_ONE_EACH, same_bits_when_busy);
    RUN_ON(TEST_ONE_EACH, one_by_eight_is_eight_by_one);
    RUN_ON(TEST_ONE_EACH, packed_is_one_by_one);
    RUN_ON(TEST_ONE_EACH, unused_sequences_f32);
    RUN_ON(TEST_ONE_EACH, unused_sequences_bf16);
    RUN_ON(TEST_ONE_EACH, weights_weigh);
    RUN_ON(TEST_ONE_EACH, unlabelled_costs_nothing);
    RUN_ON(TEST_CPU, options_that_are_the_same);
    RUN_ON(TEST_CPU, every_option_counts);
    RUN_ON(TEST_ONE_EACH, tf32_is_used_when_asked_for);
    RUN_ON(TEST_ONE_EACH, targets_are_what_is_trained);
    RUN_ON(TEST_ONE_EACH, adapters_on_and_off);
    RUN_ON(TEST_ONE_EACH, evaluation_only);
    RUN_ON(TEST_ONE_EACH, plan_is_what_is_allocated);
    RUN_ON(TEST_ONE_FAKE, plan_knows_the_context);
    RUN_TEST(plan_knows_the_context_of_the_cpu);
    RUN_ON(TEST_CPU, budget_decides);
    RUN_ON(TEST_CPU, foreign_plan_is_refused);
    RUN_ON(TEST_ONE_EACH, damaged_plan_is_refused);
    RUN_ON(TEST_ONE_FAKE, failed_open_keeps_the_seal);
    RUN_ON(TEST_ONE_GPU, model_compiles_what_it_runs);
    RUN_ON(TEST_ONE_EACH, logits_after_sealing);
    RUN_ON(TEST_ONE_FAKE, step_stays_on_the_device);
    RUN_ON(TEST_ONE_FAKE, failed_capture_falls_back);
    RUN_ON(TEST_ONE_EACH, not_finite_is_skipped);
    RUN_ON(TEST_CPU, schedules_follow_their_formulas);
    RUN_ON(TEST_ONE_EACH, first_update_moves_by_lr);
    RUN_ON(TEST_CPU, bad_descs_are_refused);
    RUN_ON(TEST_CPU, spoilt_plans_are_refused);
    RUN_ON(TEST_CPU | TEST_ONE_FAKE, plans_know_the_machine);
    RUN_ON(TEST_ONE_EACH, bad_batches_are_refused);
    RUN_ON(TEST_CPU | TEST_ONE_FAKE, folders_of_every_kind);
    RUN_ON(TEST_ONE_EACH, bad_folders_are_refused);
    RUN_ON(TEST_ONE_EACH, promised_layers_cost_nothing);
    RUN_ON(TEST_CPU, ranks_come_from_the_adapter);
    RUN_ON(TEST_ONE_GPU, layers_that_differ_are_planned);
    RUN_ON(TEST_CPU, every_allocation_may_fail);
    RUN_ON(TEST_ONE_FAKE, driver_calls_may_fail);
}
