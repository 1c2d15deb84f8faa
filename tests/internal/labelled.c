// labelled.c - the last layer with only its labelled rows: the numbers are those of a last layer
// that computes every row, for every pattern of labels and every kind of model.
#include "machines.h"
#include "model_rig.h"

enum { LABELLED_SEQUENCES = 4, LABELLED_ALL = 22 };

static const int32_t labelled_lengths[LABELLED_SEQUENCES] = {9, 2, 6, 5};

// The label of token i of sequence s has a row; the first token never has one.
typedef struct labelled_pattern {
    const char* name;
    bool (*has)(int s, int i);
    int64_t rows; // labelled rows
} labelled_pattern;

static bool labelled_scattered(int s, int i) {
    return (5 * s + 3 * i) % 7 < 2;
}

static bool labelled_none_in_some(int s, int i) {
    return s % 2 == 1 && i > 0;
}

static bool labelled_one(int s, int i) {
    return s == 2 && i == 3;
}

static bool labelled_last(int s, int i) {
    return i == labelled_lengths[s] - 1;
}

static bool labelled_first(int s, int i) {
    (void)s;
    return i == 1;
}

static bool labelled_very_last(int s, int i) {
    return s == LABELLED_SEQUENCES - 1 && i == labelled_lengths[s] - 1;
}

static bool labelled_every(int s, int i) {
    (void)s;
    (void)i;
    return true;
}

static const labelled_pattern labelled_patterns[] = {
    {"scattered", labelled_scattered, 5}, {"none in some", labelled_none_in_some, 5},
    {"one", labelled_one, 1},             {"last ones", labelled_last, 4},
    {"first ones", labelled_first, 4},    {"the very last", labelled_very_last, 1},
    {"all", labelled_every, 18}};

enum { LABELLED_PATTERNS = (int)(sizeof labelled_patterns / sizeof labelled_patterns[0]) };

static void labelled_data(data* d, const labelled_pattern* p) {
    data_make(d, "labelled", labelled_lengths, LABELLED_SEQUENCES);
    for (int s = 0, at = 0; s < LABELLED_SEQUENCES; at += labelled_lengths[s++]) {
        for (int i = 0; i < labelled_lengths[s]; i++) {
            d->labels[at + i] = p->has(s, i) ? d->ids[at + i] : -100;
            d->weights[at + i] = 0.5f + 0.25f * (float)((at + i) % 3);
        }
    }
    d->batch.weights = d->weights;
}

// ---- kinds of models

static void labelled_plain(setup* s) {
    s->model.train_norms = false;
    s->model.dropout = 0.0f;
}

static void labelled_masked(setup* s) {
    s->model.dropout = 0.3f;
}

static void labelled_again(setup* s) {
    s->model.dropout = 0.3f;
    s->model.recompute = QLORA_CHOICE_ON;
}

static void labelled_dora(setup* s) {
    s->config.family = QLORA_FAMILY_LLAMA;
    s->config.qk_norm = false;
    s->model.dropout = 0.0f;
    s->model.dora = true;
}

static void labelled_gemma2(setup* s) {
    s->config.family = QLORA_FAMILY_GEMMA2;
    s->config.qk_norm = false;
    s->config.tied = true;
    s->model.recompute = QLORA_CHOICE_ON;
}

static void labelled_granite(setup* s) {
    s->config.family = QLORA_FAMILY_GRANITE;
    s->config.qk_norm = false;
    s->config.residual_scale = 0.4;
    s->config.logits_divisor = 1.7;
    s->model.head = QLORA_HEAD_NF4;
    s->model.train_norms = false;
}

static void labelled_saved(setup* s) {
    s->model.save_modules = QLORA_SAVE_EMBED | QLORA_SAVE_HEAD;
    s->model.cache = QLORA_CHOICE_ON;
    s->model.head_chunk = 2; // two chunks per size
}

static void labelled_bf16(setup* s) {
    s->model.mode = QLORA_MODE_BF16;
    s->model.dropout = 0.0f;
}

static void labelled_fp8(setup* s) {
    s->model.mode = QLORA_MODE_FP8;
    s->model.rank = 8; // the activation comes as codes
    s->model.dropout = 0.0f;
    s->model.train_norms = false;
}

static void labelled_away(setup* s) {
    s->model.offload = QLORA_CHOICE_ON;
    s->model.recompute = QLORA_CHOICE_ON;
    s->config.layers = 3;
}

typedef struct labelled_kind {
    const char* name;
    void (*vary)(setup* s);
    float limit; // relative difference of gradients: rows are added in another order
    bool gpu;    // needs one
} labelled_kind;

static const labelled_kind labelled_kinds[] = {
    {"plain", labelled_plain, 1e-5f, false},     {"dropout", labelled_masked, 1e-5f, false},
    {"recomputed", labelled_again, 1e-5f, false}, {"DoRA", labelled_dora, 1e-5f, false},
    {"gemma2", labelled_gemma2, 1e-5f, false},   {"granite", labelled_granite, 1e-5f, false},
    {"saved", labelled_saved, 1e-5f, false},     {"offloaded", labelled_away, 1e-5f, true},
    {"bf16", labelled_bf16, 2e-2f, false},       {"fp8", labelled_fp8, 2e-2f, false}};

// What a micro-batch gives: gradients, then the loss of evaluation and log-probabilities.
typedef struct labelled_numbers {
    float* gradients;
    size_t count;
    double loss;
    double eval;
    double sequences[LABELLED_SEQUENCES];
} labelled_numbers;

static bool labelled_run(rig* r, const qlora_batch* batch, labelled_numbers* out) {
    qlora_train_info info;
    qlora_eval_info eval;
    bool ok =
        qlora_eval(r->model, batch, &eval) == QLORA_OK &&
        qlora_eval_sequences(r->model, batch, out->sequences) == QLORA_OK &&
        qlora_train_micro(r->trainer, batch, qlora_batch_labels(batch)) == QLORA_OK &&
        (out->gradients = rig_read(r, true, &out->count)) != NULL &&
        qlora_train_update(r->trainer) == QLORA_OK &&
        qlora_train_query(r->trainer, &info) == QLORA_OK;
    if (ok) {
        out->loss = info.loss;
        out->eval = eval.loss;
    }
    return ok || rig_says(r, "labelled");
}

static bool labelled_near(double a, double b, double limit) {
    return fabs(a - b) <= limit * (1.0 + fabs(b));
}

// The rows that a micro-batch of so many labelled rows must have; 0 = all.
static int64_t labelled_expected(const qlora_model* m, int64_t rows) {
    const qlora_plan* p = &m->plan;
    if (qlora__on_cpu(m->ctx)) {
        return rows;
    }
    int64_t sizes = (p->tokens + p->head_chunk - 1) / p->head_chunk;
    int64_t unit = p->head_chunk * (sizes > 8 ? 2 : 1);
    int64_t few = (rows + unit - 1) / unit * unit;
    return few < p->tokens ? few : 0;
}

// The interpreter takes its time: there, every other pattern.
static int labelled_stride(const setup* s) {
    return test_brief() && strcmp(s->machine.backend, "cpu") != 0 ? 3
           : strcmp(s->machine.backend, "fake") == 0              ? 2
                                                                  : 1;
}

// The patterns, one step each.
static bool labelled_session(const setup* s, bool every_row, labelled_numbers* out) {
    rig r;
    bool ok = rig_open(&r, s);
    for (int p = 0; p < LABELLED_PATTERNS && ok; p += labelled_stride(s)) {
        data d;
        labelled_data(&d, &labelled_patterns[p]);
        r.model->every_row = every_row;
        ok = labelled_run(&r, &d.batch, &out[p]);
        int64_t want = every_row ? 0 : labelled_expected(r.model, labelled_patterns[p].rows);
        if (ok && r.trainer->micro.labelled != want) {
            fprintf(stderr, "%s: %d rows instead of %d\n", labelled_patterns[p].name,
                    (int)r.trainer->micro.labelled, (int)want);
            ok = false;
        }
    }
    return ok && rig_close(&r, s);
}

static bool labelled_agrees(const labelled_kind* k, const labelled_pattern* p,
                            const labelled_numbers n[2]) {
    bool ok = true;
    double limit = k->limit > 1e-3f ? 1e-2 : 1e-5;
    ok = ok && labelled_near(n[0].loss, n[1].loss, limit) &&
         labelled_near(n[0].eval, n[1].eval, limit);
    for (int s = 0; s < LABELLED_SEQUENCES && ok; s++) {
        ok = labelled_near(n[0].sequences[s], n[1].sequences[s], limit);
    }
    float off = ok ? head_difference(n[1].gradients, n[0].gradients, n[0].count) : 0.0f;
    if (!ok || !(off <= k->limit)) {
        fprintf(stderr, "%s, %s: loss %.9g and %.9g, gradients differ by %.3g\n", k->name, p->name,
                n[0].loss, n[1].loss, (double)off);
        ok = false;
    }
    return ok;
}

static bool labelled_skips(const labelled_kind* k, const test_machine* machine) {
    bool cpu = strcmp(machine->backend, "cpu") == 0;
    return (k->gpu && cpu) || (k->vary == labelled_bf16 && !test_has_bf16(machine)) ||
           (k->vary == labelled_fp8 && !cpu && !test_has_fp8(machine));
}

TEST labelled_rows_are_enough(const test_machine* machine) {
    for (size_t i = 0; i < sizeof labelled_kinds / sizeof labelled_kinds[0]; i++) {
        const labelled_kind* k = &labelled_kinds[i];
        if (labelled_skips(k, machine) || (test_checked(machine) && i % 7 != 0 && i < 8)) {
            continue; // checked: plain, offloaded, bf16 and fp8
        }
        labelled_numbers n[2][LABELLED_PATTERNS];
        setup s = setup_make(machine);
        memset(n, 0, sizeof n);
        s.model.head_chunk = 3;
        s.train.lr = 1e-6; // steps are compared, not where they lead to
        k->vary(&s);
        ASSERTm(k->name, labelled_session(&s, false, n[0]));
        ASSERTm(k->name, labelled_session(&s, true, n[1]));
        for (int p = 0; p < LABELLED_PATTERNS; p += labelled_stride(&s)) {
            const labelled_numbers both[2] = {n[0][p], n[1][p]};
            ASSERTm(k->name, labelled_agrees(k, &labelled_patterns[p], both));
            free(n[0][p].gradients);
            free(n[1][p].gradients);
        }
    }
    PASS();
}

// Row by row nothing changes. On the CPU, the losses even have the same bits, unless so few rows
// are added up in another order. A model that is not trained gathers the rows elsewhere.
TEST labelled_losses_are_the_same(const test_machine* machine) {
    bool cpu = strcmp(machine->backend, "cpu") == 0;
    for (int trains = 0; trains < 2; trains++) {
        setup s = setup_make(machine);
        rig r;
        s.model.head_chunk = 10;
        s.model.dropout = 0.0f;
        s.model.purpose = trains == 1 ? QLORA_PURPOSE_TRAIN : QLORA_PURPOSE_EVALUATE;
        ASSERT(rig_open(&r, &s));
        ASSERT_EQ_FMT(cpu ? 9 : 10, (int)qlora__labelled_rows(r.model, 9, LABELLED_ALL), "%d");
        for (int p = 0; p < LABELLED_PATTERNS; p++) {
            data d;
            double logps[2][LABELLED_SEQUENCES];
            labelled_data(&d, &labelled_patterns[p]);
            for (int i = 0; i < 2; i++) {
                r.model->every_row = i == 1;
                ASSERT_EQ(QLORA_OK, qlora_eval_sequences(r.model, &d.batch, logps[i]));
            }
            for (int i = 0; i < LABELLED_SEQUENCES; i++) {
                ASSERTm(labelled_patterns[p].name,
                        cpu && labelled_patterns[p].rows >= 16
                            ? memcmp(&logps[0][i], &logps[1][i], sizeof logps[0][i]) == 0
                            : labelled_near(logps[0][i], logps[1][i], 1e-5));
            }
        }
        ASSERT(rig_close(&r, &s));
    }
    PASS();
}

// One graph per number of chunks, whatever the labels; and the bits of a run without graphs.
TEST labelled_graphs_are_few(const test_machine* machine) {
    if (strcmp(machine->backend, "cpu") == 0) {
        SKIPm("graphs need a GPU");
    }
    static const int turns[] = {0, 2, 1, 3, 5, 0, 4, 2};
    labelled_numbers n[2];
    for (int eager = 0; eager < 2; eager++) {
        rig r;
        setup s = setup_make(machine);
        s.model.head_chunk = 3;
        s.train.eager = eager == 1;
        ASSERT(rig_open(&r, &s));
        for (size_t i = 0; i < sizeof turns / sizeof turns[0]; i++) {
            data d;
            labelled_data(&d, &labelled_patterns[turns[i]]);
            ASSERT_EQ(QLORA_OK,
                      qlora_train_micro(r.trainer, &d.batch, qlora_batch_labels(&d.batch)));
            ASSERT_EQ(QLORA_OK, qlora_train_update(r.trainer));
        }
        int64_t graphs = 0;
        for (int64_t i = 0; i < r.trainer->graph_room; i++) {
            graphs += r.trainer->graphs[i] != NULL ? 1 : 0;
        }
        ASSERT_EQ_FMT(eager == 1 ? 0 : 2, (int)graphs, "%d"); // one chunk and two
        n[eager].gradients = rig_read(&r, false, &n[eager].count);
        ASSERT(n[eager].gradients != NULL);
        ASSERT(rig_close(&r, &s));
    }
    ASSERT_EQ(n[0].count, n[1].count);
    ASSERT(memcmp(n[0].gradients, n[1].gradients, n[0].count * sizeof(float)) == 0);
    free(n[0].gradients);
    free(n[1].gradients);
    PASS();
}

// The gathered rows borrow memory: a plan only has more bytes for the places of rows with dropout.
TEST labelled_rows_need_no_memory(const test_machine* machine) {
    for (int masked = 0; masked < 2; masked++) {
        rig r;
        setup s = setup_make(machine);
        s.model.head_chunk = 3;
        s.model.dropout = masked == 1 ? 0.1f : 0.0f;
        ASSERT(rig_open(&r, &s));
        const qlora__batch_block* b = &r.model->batch;
        ASSERT_EQ(masked == 1, b->row_positions.data != NULL);
        ASSERT_EQ(masked == 1, b->row_sequences.data != NULL);
        ASSERT(rig_close(&r, &s));
    }
    PASS();
}

SUITE(labelled_suite) {
    RUN_ON(TEST_ONE_EACH, labelled_rows_are_enough);
    RUN_ON(TEST_ONE_EACH, labelled_losses_are_the_same);
    RUN_ON(TEST_ONE_EACH, labelled_graphs_are_few);
    RUN_ON(TEST_ONE_EACH, labelled_rows_need_no_memory);
}
