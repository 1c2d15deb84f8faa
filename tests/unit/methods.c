// methods.c - training with preferences (DPO, KTO) and learning rates that differ between tensors.
// The figures of transformers, PEFT and TRL are compared by build/golden; here are the properties
// that hold for any data.
#define _POSIX_C_SOURCE 200809L // mkdtemp

#include "qlora.h"

#include "test.h"

#include "model_rig.h"

#include <stddef.h>
#include <unistd.h>

#define ASSERT_OK(R, CALL) ASSERT_EQm(qlora_last_error((R).ctx), QLORA_OK, (CALL))

enum { PAIRS = 3, SEQUENCES = 2 * PAIRS };

static const int32_t pair_lengths[SEQUENCES] = {5, 3, 2, 4, 3, 6};

static setup method_setup(const test_machine* machine, qlora_method method) {
    setup s = setup_make(machine);
    s.train.method = method;
    s.model.train_norms = false; // without adapters, the model must be its base
    s.train.beta = 0.7;
    if (method == QLORA_METHOD_DPO) {
        s.train.label_smoothing = 0.2;
        s.train.sft_alpha = 0.3;
    } else if (method == QLORA_METHOD_KTO) {
        s.train.desirable_weight = 1.5;
        s.train.undesirable_weight = 0.5;
    }
    return s;
}

// Pairs, or for KTO a batch of mismatched sequences and one of others. Every sequence has labels.
typedef struct step_data {
    data d[2];
    int32_t roles[2][SEQUENCES];
    int count;
} step_data;

static void step_make(step_data* t, qlora_method method, const char* name) {
    static const int32_t desirable[SEQUENCES] = {1, 0, 0, 1, 0, 1};
    memset(t, 0, sizeof *t);
    t->count = method == QLORA_METHOD_DPO ? 1 : 2;
    for (int i = 0; i < t->count; i++) {
        char full[64];
        snprintf(full, sizeof full, "%s, %d", name, i);
        data_make(&t->d[i], full, pair_lengths, SEQUENCES);
        for (int k = 0, at = 0; k < SEQUENCES; at += pair_lengths[k++]) {
            t->d[i].labels[at + 1] = t->d[i].ids[at + 1];
            t->roles[i][k] = i == 0 ? QLORA_ROLE_MISMATCHED : desirable[k];
        }
        t->d[i].batch.roles = t->count == 2 ? t->roles[i] : NULL;
    }
}

// Sequences [first, first + count) of a batch as a batch of their own.
static qlora_batch part_of(const qlora_batch* b, int64_t first, int64_t count) {
    qlora_batch part = batch_part(b, first);
    part.count = count;
    part.roles = b->roles != NULL ? b->roles + first : NULL;
    part.references = b->references != NULL ? b->references + first : NULL;
    return part;
}

static double logistic(double x) {
    return 1.0 / (1.0 + exp(-x));
}

// r of every sequence of batch i: with the adapters less without.
static bool step_rewards(rig* r, const step_data* t, int i, double* out) {
    double off[SEQUENCES];
    bool ok = qlora_eval_sequences(r->model, &t->d[i].batch, out) == QLORA_OK &&
              qlora_adapter_use(r->model, false) == QLORA_OK &&
              qlora_eval_sequences(r->model, &t->d[i].batch, off) == QLORA_OK &&
              qlora_adapter_use(r->model, true) == QLORA_OK;
    for (int k = 0; ok && k < SEQUENCES; k++) {
        out[k] -= off[k];
    }
    return ok;
}

// The formulas of qlora_method, from log-probabilities that evaluation computed.
TEST losses_follow_their_formulas(const test_machine* machine) {
    for (int method = QLORA_METHOD_DPO; method <= QLORA_METHOD_KTO; method++) {
        if (method == QLORA_METHOD_KTO && strcmp(machine->backend, "fake") == 0) {
            break; // slow there; the next test runs it
        }
        setup s = method_setup(machine, (qlora_method)method);
        s.model.dropout = 0.0f;
        rig r;
        step_data t;
        double rewards[2][SEQUENCES];
        double logps[SEQUENCES];
        qlora_train_info info;
        ASSERT(rig_open(&r, &s));
        step_make(&t, (qlora_method)method, "formulas");
        for (int i = 0; i < t.count; i++) {
            ASSERT(step_rewards(&r, &t, i, rewards[i]));
        }
        ASSERT_OK(r, qlora_eval_sequences(r.model, &t.d[0].batch, logps));
        qlora_batch batches[2] = {t.d[0].batch, t.d[1].batch};
        ASSERT_OK(r, qlora_train_step(r.trainer, batches, t.count, &info));
        double loss = 0.0;
        double nll = 0.0;
        double correct = 0.0;
        double kl = 0.0;
        if (method == QLORA_METHOD_DPO) {
            double labels = 0.0;
            for (int i = 0; i < PAIRS; i++) {
                double x = 0.7 * (rewards[0][2 * i] - rewards[0][2 * i + 1]);
                loss += (-0.8 * log(logistic(x)) - 0.2 * log(logistic(-x))) / PAIRS;
                nll -= logps[2 * i];
                correct += x > 0.0 ? 1.0 / PAIRS : 0.0;
                qlora_batch chosen = part_of(&t.d[0].batch, 2 * i, 1);
                labels += qlora_batch_labels(&chosen);
            }
            nll /= labels;
        } else {
            for (int k = 0; k < SEQUENCES; k++) {
                kl += rewards[0][k] / SEQUENCES;
            }
            double limited = kl > 0.0 ? kl : 0.0;
            for (int k = 0; k < SEQUENCES; k++) {
                bool good = t.roles[1][k] == QLORA_ROLE_DESIRABLE;
                double x = 0.7 * (good ? 1.0 : -1.0) * (rewards[1][k] - limited);
                loss += (good ? 1.5 : 0.5) * (1.0 - logistic(x)) / SEQUENCES;
                correct += (rewards[1][k] > 0.0) == good ? 1.0 / SEQUENCES : 0.0;
            }
        }
        double want[5] = {loss + 0.3 * nll, loss, nll, correct, kl};
        double got[5] = {info.loss, info.preference_loss, info.chosen_nll, info.accuracy,
                         info.kl_raw};
        ASSERT_CLOSE_DOUBLE(want, got, 5, 1e-6, 2e-6);
        ASSERT(rig_close(&r, &s));
    }
    PASS();
}

// However a step is divided, and whether the references are given or computed in it, its sums are
// the same and its gradients differ by rounding only; in slices they do not differ at all.
TEST any_split_gives_the_same_step(const test_machine* machine) {
    enum { ONE, SPLIT, GIVEN, SLICED, WAYS };
    for (int method = QLORA_METHOD_DPO; method <= QLORA_METHOD_KTO; method++) {
        setup s = method_setup(machine, (qlora_method)method);
        float* expected = NULL;
        qlora_train_info expected_info;
        size_t count = 0;
        for (int way = 0; way < WAYS; way++) {
            // The fake GPU is slow: there, only KTO is split.
            bool slow = strcmp(machine->backend, "fake") == 0;
            if (slow && (method == QLORA_METHOD_DPO || (way != ONE && way != SPLIT))) {
                continue;
            }
            rig r;
            step_data t;
            qlora_train_info info;
            double references[2][SEQUENCES];
            qlora_batch batches[2 * SEQUENCES];
            int64_t n = 0;
            ASSERT(rig_open(&r, &s));
            step_make(&t, (qlora_method)method, "split");
            for (int i = 0; i < t.count; i++) {
                ASSERT_OK(r, qlora_adapter_use(r.model, false));
                ASSERT_OK(r, qlora_eval_sequences(r.model, &t.d[i].batch, references[i]));
                ASSERT_OK(r, qlora_adapter_use(r.model, true));
                t.d[i].batch.references = way == GIVEN ? references[i] : NULL;
                int64_t unit = way != SPLIT ? SEQUENCES : method == QLORA_METHOD_DPO ? 2 : 3;
                for (int64_t k = 0; k < SEQUENCES; k += unit) {
                    batches[n++] = part_of(&t.d[i].batch, k, unit);
                }
            }
            if (way == SLICED) {
                bool done = false;
                ASSERT_OK(r, qlora_train_begin(r.trainer, batches, n));
                for (int i = 0; i < 1000 && !done; i++) {
                    ASSERT_OK(r, qlora_train_slice(r.trainer, 0.0, &done));
                }
                ASSERT_OK(r, qlora_train_query(r.trainer, &info));
            } else {
                ASSERT_OK(r, qlora_train_gradients(r.trainer, batches, n));
                size_t got_count = 0;
                float* got = rig_read(&r, true, &got_count);
                ASSERT(got != NULL);
                ASSERT_OK(r, qlora_train_update(r.trainer));
                ASSERT_OK(r, qlora_train_query(r.trainer, &info));
                if (way == ONE) {
                    expected = got;
                    count = got_count;
                    expected_info = info;
                } else {
                    ASSERT_EQ_FMT((int)count, (int)got_count, "%d");
                    ASSERT_REL_L2(expected, got, count, 1e-5);
                    free(got);
                }
            }
            ASSERT_CLOSE_DOUBLE(&expected_info.loss, &info.loss, 1, 1e-6, 1e-6);
            ASSERT_CLOSE_DOUBLE(&expected_info.margins, &info.margins, 1, 1e-6, 1e-6);
            ASSERT_EQ_FMT((int)expected_info.tokens, (int)info.tokens, "%d");
            if (way == SLICED) {
                ASSERT_MEM_EQ(&expected_info.loss, &info.loss, sizeof info.loss);
                ASSERT_MEM_EQ(&expected_info.grad_norm, &info.grad_norm, sizeof info.grad_norm);
            }
            ASSERT(rig_close(&r, &s));
        }
        free(expected);
    }
    PASS();
}

static bool refused(rig* r, const qlora_batch* batches, int64_t count, const char* why) {
    qlora_result result = qlora_train_step(r->trainer, batches, count, NULL);
    bool good = result == QLORA_ERR_ARGUMENT && strstr(qlora_last_error(r->ctx), why) != NULL;
    if (!good) {
        fprintf(stderr, "expected \"%s\", got: %s\n", why, qlora_last_error(r->ctx));
    }
    return good;
}

TEST wrong_steps_are_refused(const test_machine* machine) {
    setup s = method_setup(machine, QLORA_METHOD_DPO);
    rig r;
    step_data t;
    ASSERT(rig_open(&r, &s));
    step_make(&t, QLORA_METHOD_DPO, "refused");
    qlora_batch good = t.d[0].batch;
    qlora_batch b = part_of(&good, 0, 3);
    ASSERT(refused(&r, &b, 1, "pairs"));
    b = good;
    b.roles = t.roles[0];
    ASSERT(refused(&r, &b, 1, "roles"));
    b = good;
    b.weights = t.d[0].weights;
    ASSERT(refused(&r, &b, 1, "weights"));
    double references[SEQUENCES] = {-1.0, -1.0, 0.5, -1.0, -1.0, -1.0};
    b = good;
    b.references = references;
    ASSERT(refused(&r, &b, 1, "reference 2 is 0.5"));
    references[2] = -INFINITY;
    ASSERT(refused(&r, &b, 1, "reference 2"));
    for (int i = 0; i < pair_lengths[0] + pair_lengths[1]; i++) {
        t.d[0].labels[i] = i < pair_lengths[0] ? t.d[0].labels[i] : -100;
    }
    ASSERT(refused(&r, &good, 1, "sequence 1 has no label"));
    ASSERT_EQ(QLORA_ERR_STATE, qlora_train_micro(r.trainer, &good, 3.0));
    ASSERT(strstr(qlora_last_error(r.ctx), "qlora_train_gradients") != NULL);
    ASSERT(rig_close(&r, &s));

    s = method_setup(machine, QLORA_METHOD_KTO);
    ASSERT(rig_open(&r, &s));
    step_make(&t, QLORA_METHOD_KTO, "refused");
    qlora_batch two[2] = {t.d[1].batch, t.d[0].batch};
    ASSERT(refused(&r, two, 2, "follows"));
    two[0] = t.d[0].batch;
    two[1] = part_of(&t.d[1].batch, 0, 4);
    ASSERT(refused(&r, two, 2, "6 mismatched sequences and 4 others"));
    ASSERT(refused(&r, two, 1, "no sequences"));
    two[0] = part_of(&t.d[0].batch, 0, 1);
    two[1] = part_of(&t.d[1].batch, 0, 1);
    ASSERT(refused(&r, two, 2, "KTO needs at least 2"));
    two[0] = t.d[0].batch;
    two[1] = t.d[1].batch;
    two[1].roles = NULL;
    ASSERT(refused(&r, two, 2, "roles is NULL"));
    t.roles[1][2] = QLORA_ROLE_MISMATCHED;
    two[1] = t.d[1].batch;
    ASSERT(refused(&r, two, 2, "batches of their own"));
    t.roles[1][2] = 3;
    ASSERT(refused(&r, two, 2, "role 3"));
    ASSERT(rig_close(&r, &s));
    PASS();
}

// Settings that the method does not use are refused, as are values outside their range.
TEST wrong_settings_are_refused(const test_machine* machine) {
    setup s = setup_make(machine);
    rig r;
    ASSERT(rig_open(&r, &s));
    const struct {
        qlora_method method;
        size_t at;
        double value;
        const char* name;
    } cases[] = {
        {QLORA_METHOD_SFT, offsetof(qlora_train_desc, beta), 0.1, "desc.beta"},
        {QLORA_METHOD_KTO, offsetof(qlora_train_desc, label_smoothing), 0.1, "label_smoothing"},
        {QLORA_METHOD_DPO, offsetof(qlora_train_desc, label_smoothing), 1.0, "label_smoothing"},
        {QLORA_METHOD_KTO, offsetof(qlora_train_desc, sft_alpha), 0.1, "sft_alpha"},
        {QLORA_METHOD_DPO, offsetof(qlora_train_desc, desirable_weight), 2.0, "desirable_weight"},
        {QLORA_METHOD_DPO, offsetof(qlora_train_desc, undesirable_weight), 2.0,
         "undesirable_weight"},
        {QLORA_METHOD_SFT, offsetof(qlora_train_desc, loraplus_ratio), -1.0, "loraplus_ratio"},
        {QLORA_METHOD_SFT, offsetof(qlora_train_desc, lr_factors) + sizeof(double), -2.0,
         "lr_factors[1]"},
    };
    ASSERT_OK(r, qlora_trainer_destroy(r.trainer));
    r.trainer = NULL;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        qlora_train_desc d;
        qlora_trainer* trainer = NULL;
        memset(&d, 0, sizeof d);
        d.method = cases[i].method;
        memcpy((char*)&d + cases[i].at, &cases[i].value, sizeof cases[i].value);
        ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_trainer_create(r.model, &d, &trainer));
        ASSERTm(qlora_last_error(r.ctx), strstr(qlora_last_error(r.ctx), cases[i].name) != NULL);
    }
    ASSERT(rig_close(&r, &s));
    PASS();
}

// The movement of every tensor in one step, as a root mean square, relative to a run without
// factors: the first step of AdamW moves every element by lr.
TEST learning_rates_differ(const test_machine* machine) {
    setup s = setup_make(machine);
    s.train.weight_decay = 0.0;
    double moved[2][64];
    for (int run = 0; run < 2; run++) {
        rig r;
        data d;
        memset(&s.train.lr_factors, 0, sizeof s.train.lr_factors);
        s.train.loraplus_ratio = run == 0 ? 0.0 : 4.0;
        s.train.lr_factors[2] = run == 0 ? 0.0 : 3.0; // v_proj
        s.train.lr_factors[QLORA_LR_NORMS] = run == 0 ? 0.0 : 0.5;
        ASSERT(rig_open(&r, &s));
        ASSERT(model_parameters(r.model) <= 64);
        data_make(&d, "rates", run_lengths[0], 3);
        for (int turn = 0; turn < 2; turn++) {
            for (int64_t i = 0; i < model_parameters(r.model); i++) {
                qlora_parameter_info p;
                float values[40 * 32];
                ASSERT_OK(r, qlora_parameter_query(r.model, i, &p));
                ASSERT_OK(r, qlora_parameter_read(r.model, i, values));
                double sum = 0.0;
                for (int64_t k = 0; k < p.rows * p.cols; k++) {
                    sum += (double)values[k];
                }
                moved[run][i] = turn == 0 ? sum : sum - moved[run][i];
            }
            if (turn == 0) {
                ASSERT_OK(r, qlora_train_step(r.trainer, &d.batch, 1, NULL));
            }
        }
        for (int64_t i = 0; run == 1 && i < model_parameters(r.model); i++) {
            qlora_parameter_info p;
            ASSERT_OK(r, qlora_parameter_query(r.model, i, &p));
            bool lora = strstr(p.name, "lora_") != NULL;
            double factor = strstr(p.name, "lora_B") != NULL || !lora ? 4.0 : 1.0;
            factor *= strstr(p.name, "v_proj") != NULL ? 3.0 : lora ? 1.0 : 0.5;
            double want = factor * moved[0][i];
            ASSERT_CLOSE_DOUBLE(&want, &moved[1][i], 1, 2e-4, 2e-3);
        }
        ASSERT(rig_close(&r, &s));
    }
    PASS();
}

static char noted[1024];

static void note(void* user, qlora_log_level level, qlora_log_item item, const char* text,
                 const char* file, int line) {
    (void)file;
    (void)line;
    (void)user;
    (void)level;
    (void)item;
    size_t length = strlen(noted);
    snprintf(noted + length, sizeof noted - length, "%s\n", text);
}

static void take_notes(qlora_ctx_desc* desc) {
    desc->log = note;
}

// A run that stops and goes on from a checkpoint gives the same bits, and reports the same figures
// of the last step; a checkpoint of another method is refused.
TEST preferences_resume(const test_machine* machine) {
    setup s = method_setup(machine, QLORA_METHOD_KTO);
    char dir[] = "build/test-methods-XXXXXX";
    ASSERT(mkdtemp(dir) != NULL);
    qlora_train_info want[2];
    qlora_train_info info;
    rig r;
    step_data t;
    for (int run = 0; run < 2; run++) {
        ASSERT(rig_open(&r, &s));
        if (run == 1) {
            ASSERT_OK(r, qlora_checkpoint_load(r.trainer, dir, NULL, NULL));
            ASSERT_OK(r, qlora_train_query(r.trainer, &info));
            ASSERT_MEM_EQ(&want[0].loss, &info.loss, sizeof info.loss);
            ASSERT_MEM_EQ(&want[0].kl_raw, &info.kl_raw, sizeof info.kl_raw);
            ASSERT_MEM_EQ(&want[0].margins, &info.margins, sizeof info.margins);
        }
        for (int step = run; step < 2; step++) {
            step_make(&t, QLORA_METHOD_KTO, step == 0 ? "first" : "second");
            qlora_batch batches[2] = {t.d[0].batch, t.d[1].batch};
            ASSERT_OK(r, qlora_train_step(r.trainer, batches, 2, &info));
            if (run == 0 && step == 0) {
                ASSERT_OK(r, qlora_checkpoint_save(r.trainer, dir, NULL, 0));
            }
            want[step] = run == 0 ? info : want[step];
            ASSERT_MEM_EQ(&want[step].loss, &info.loss, sizeof info.loss);
            ASSERT_MEM_EQ(&want[step].grad_norm, &info.grad_norm, sizeof info.grad_norm);
        }
        ASSERT(rig_close(&r, &s));
    }
    setup other = method_setup(machine, QLORA_METHOD_DPO);
    ASSERT(rig_open(&r, &other));
    ASSERT_EQ(QLORA_ERR_STATE, qlora_checkpoint_load(r.trainer, dir, NULL, NULL));
    ASSERT(strstr(qlora_last_error(r.ctx), "method") != NULL);
    ASSERT(rig_close(&r, &other));
    other = s; // another learning rate of v_proj does not prevent it, but is noted
    other.train.lr_factors[2] = 3.0;
    other.change = take_notes;
    ASSERT(rig_open(&r, &other));
    noted[0] = '\0';
    ASSERT_OK(r, qlora_checkpoint_load(r.trainer, dir, NULL, NULL));
    ASSERTm(noted, strstr(noted, "lr_factor_2") != NULL && strstr(noted, "lr_factor_3") == NULL);
    ASSERT(rig_close(&r, &other));
    static const char* const files[] = {"step-1/adapter_model.safetensors",
                                        "step-1/adapter_config.json",
                                        "step-1/state.safetensors",
                                        "step-1",
                                        "latest",
                                        ""};
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        char path[96];
        snprintf(path, sizeof path, "%s/%s", dir, files[i]);
        bool folder = i == 3 || i == 5;
        ASSERT_EQ(0, folder ? rmdir(path) : remove(path));
    }
    PASS();
}

// What is trained beside matrices of low rank.
typedef struct other_case {
    bool tied;
    bool dora;
    uint32_t save;
    int64_t rows;
} other_case;

static const int32_t other_rows[] = {40, 7, 60};

static setup other_setup(const test_machine* machine, const other_case* c) {
    setup s = setup_make(machine);
    s.config.tied = c->tied;
    s.model.dropout = 0.0f;
    s.model.dora = c->dora;
    s.model.save_modules = c->save;
    s.model.token_rows = other_rows;
    s.model.token_row_count = c->rows;
    return s;
}

// Two steps on one machine: the gradients of the second, then the parameters; with adapters off,
// the log-probabilities must be those of the base alone.
static float* other_run(const setup* s, size_t* count, double off[3], double base[3]) {
    rig r;
    data d;
    qlora_train_info info;
    float* parameters = NULL;
    float* gradients = NULL;
    size_t n = 0;
    data_make(&d, "others", run_lengths[0], 3);
    d.ids[0] = other_rows[1];
    d.ids[4] = other_rows[0];
    bool ok = rig_open(&r, s) && qlora_train_step(r.trainer, &d.batch, 1, &info) == QLORA_OK &&
              qlora_train_gradients(r.trainer, &d.batch, 1) == QLORA_OK &&
              (gradients = rig_read(&r, true, &n)) != NULL &&
              qlora_train_update(r.trainer) == QLORA_OK &&
              (parameters = rig_read(&r, false, &n)) != NULL &&
              qlora_adapter_use(r.model, false) == QLORA_OK &&
              qlora_eval_sequences(r.model, &d.batch, off) == QLORA_OK;
    if (!ok) {
        rig_says(&r, "training");
    }
    float* all = ok ? (float*)realloc(gradients, 2 * n * sizeof *all) : NULL;
    if (all != NULL) {
        memcpy(all + n, parameters, n * sizeof *all);
    }
    free(parameters);
    *count = 2 * n;
    setup alone = *s;
    alone.model.purpose = QLORA_PURPOSE_EVALUATE;
    alone.model.train_norms = false;
    alone.model.rank = -1;
    alone.model.dora = false;
    alone.model.save_modules = 0;
    alone.model.token_row_count = 0;
    rig b;
    bool good = all != NULL && rig_close(&r, s) && rig_open(&b, &alone) &&
                qlora_eval_sequences(b.model, &d.batch, base) == QLORA_OK && rig_close(&b, &alone);
    if (!good) {
        free(all);
        all = NULL;
    }
    return all;
}

// Magnitudes, embeddings, heads and rows of the embedding have the same gradients and steps on
// every machine.
TEST other_tensors_train_alike(const test_machine* machine) {
    static const other_case cases[] = {{false, true, 0, 0},
                                       {false, false, QLORA_SAVE_EMBED | QLORA_SAVE_HEAD, 0},
                                       {true, false, QLORA_SAVE_EMBED, 0},
                                       {true, true, 0, 3}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        if (i % 2 == 0 && strcmp(machine->backend, "fake") == 0) {
            continue; // slow there; the others use the same kernels
        }
        setup s = other_setup(machine, &cases[i]);
        s.model.train_norms = false; // they are not part of "adapters off"
        setup cpu = other_setup(test_machine_at(0), &cases[i]);
        cpu.model.train_norms = false;
        if (cases[i].dora && cases[i].rows > 0) {
            // Without 4-bit weights, the streams wait for each other only where they must; what
            // they then still read too late is seen in this order.
            s.machine.order = FAKE_REVERSE;
            s.model.base = QLORA_BASE_32BIT;
            cpu.model.base = QLORA_BASE_32BIT;
        }
        size_t n = 0;
        size_t cpu_n = 0;
        double off[3];
        double base[3];
        float* expected = other_run(&cpu, &cpu_n, off, base);
        ASSERT(expected != NULL);
        float* got = other_run(&s, &n, off, base);
        ASSERT(got != NULL);
        ASSERT_EQ_FMT((int)cpu_n, (int)n, "%d");
        ASSERT_REL_L2(expected, got, n / 2, 2e-4);
        ASSERT_REL_L2(expected + n / 2, got + n / 2, n / 2, 1e-4);
        ASSERT_CLOSE_DOUBLE(base, off, 3, 1e-5, 1e-6);
        free(expected);
        free(got);
    }
    PASS();
}

// What would be computed wrongly, or not at all, is refused by name.
TEST other_tensors_are_refused(const test_machine* machine) {
    const struct {
        other_case what;
        qlora_method method;
        qlora_clip_scope clip;
        const char* message;
    } trainers[] = {
        {{false, false, QLORA_SAVE_HEAD, 0}, QLORA_METHOD_DPO, QLORA_CLIP_ALL, "head is trained"},
        {{true, false, 0, 2}, QLORA_METHOD_KTO, QLORA_CLIP_ALL, "head is trained"},
        {{true, false, 0, 0}, QLORA_METHOD_KTO, QLORA_CLIP_ALL, "norms are trained"},
        {{false, false, QLORA_SAVE_EMBED, 0}, QLORA_METHOD_SFT, QLORA_CLIP_LAYERS, "CLIP_LAYERS"}};
    rig_quiet = true;
    for (size_t i = 0; i < sizeof trainers / sizeof trainers[0]; i++) {
        setup s = other_setup(machine, &trainers[i].what);
        rig r;
        s.model.train_norms = strstr(trainers[i].message, "norms") != NULL;
        s.train.method = trainers[i].method;
        s.train.clip = trainers[i].clip;
        ASSERT_FALSE(rig_open(&r, &s));
        ASSERTm(qlora_last_error(r.ctx),
                strstr(qlora_last_error(r.ctx), trainers[i].message) != NULL);
        ASSERT(rig_close(&r, &s));
    }
    const struct {
        other_case what;
        float dropout;
        int32_t row;
        const char* message;
    } models[] = {{{false, true, 0, 0}, 0.1f, 0, "the dropout is 0.1; training with DoRA needs 0"},
                  {{true, false, QLORA_SAVE_EMBED, 1}, 0.0f, 0, "trains all rows"},
                  {{true, false, 0, 1}, 0.0f, VOCAB, "the embedding has rows 0 to 60"},
                  {{true, false, 0, 2}, 0.0f, 0, "token row 0 is given twice"}};
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++) {
        setup s = other_setup(machine, &models[i].what);
        const int32_t rows[2] = {models[i].row, models[i].row};
        rig r;
        s.model.token_rows = rows;
        s.model.dropout = models[i].dropout;
        ASSERT_FALSE(rig_open(&r, &s));
        ASSERTm(qlora_last_error(r.ctx),
                strstr(qlora_last_error(r.ctx), models[i].message) != NULL);
        ASSERT(rig_close(&r, &s));
    }
    rig_quiet = false;
    PASS();
}

// Whether opening is refused with these words.
static bool open_refused(const setup* s, const char* message) {
    rig r;
    rig_quiet = true;
    bool opened = rig_open(&r, s);
    bool good = !opened && strstr(qlora_last_error(r.ctx), message) != NULL;
    if (!good) {
        fprintf(stderr, "expected \"%s\", got: %s\n", message,
                opened ? "no error" : qlora_last_error(r.ctx));
    }
    rig_quiet = false;
    return rig_close(&r, s) && good;
}

// Fields of the desc that contradict each other, or that could be trained but not saved.
TEST other_fields_are_checked(const test_machine* machine) {
    static const other_case cases[] = {
        {false, true, 0, 0}, {true, false, QLORA_SAVE_EMBED, 0}, {true, false, 0, 2}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        setup s = other_setup(machine, &cases[i]);
        s.model.rank = -1;
        ASSERT(open_refused(&s, "no projection has an adapter"));
        s = other_setup(machine, &cases[i]);
        s.model.adapter = "build/nowhere";
        ASSERT(open_refused(&s, "desc.adapter are both set"));
    }
    setup s = other_setup(machine, &cases[2]);
    s.model.token_rows = NULL;
    ASSERT(open_refused(&s, "desc.token_rows is NULL"));
    PASS();
}

// Equal names and shapes do not make equal tensors.
TEST other_tensors_are_not_mixed_up(const test_machine* machine) {
    static const int32_t others[] = {40, 8};
    const struct {
        other_case from;
        other_case to;
        const char* message;
    } cases[] = {{{false, false, 0, 2}, {false, false, 0, 2}, "token row 1 is 7 in `from` but 8"},
                 {{true, false, QLORA_SAVE_EMBED, 0},
                  {false, false, QLORA_SAVE_EMBED, 0},
                  "also the head in `from` only"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        setup from = other_setup(machine, &cases[i].from);
        setup to = other_setup(machine, &cases[i].to);
        rig a;
        rig b;
        ASSERT(rig_open(&a, &from));
        memset(&b, 0, sizeof b);
        b.ctx = a.ctx;
        ASSERT(rig_start(&b, &from));
        ASSERT_OK(b, qlora_adapter_copy(a.model, b.model));
        ASSERT_OK(b, qlora_trainer_destroy(b.trainer));
        ASSERT_OK(b, qlora_model_close(b.model));
        to.model.token_rows = others;
        ASSERT(rig_start(&b, &to));
        ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_adapter_copy(a.model, b.model));
        ASSERTm(qlora_last_error(a.ctx), strstr(qlora_last_error(a.ctx), cases[i].message) != NULL);
        ASSERT_OK(b, qlora_trainer_destroy(b.trainer));
        ASSERT_OK(b, qlora_model_close(b.model));
        ASSERT(rig_close(&a, &from));
    }
    PASS();
}

// KTO without desirable or without undesirable texts: their mean is unknown, not 0.
TEST missing_kinds_are_not_zero(const test_machine* machine) {
    setup s = method_setup(machine, QLORA_METHOD_KTO);
    for (int kind = QLORA_ROLE_UNDESIRABLE; kind <= QLORA_ROLE_DESIRABLE; kind++) {
        rig r;
        step_data t;
        qlora_train_info info;
        ASSERT(rig_open(&r, &s));
        step_make(&t, QLORA_METHOD_KTO, "kinds");
        for (int i = 0; i < SEQUENCES; i++) {
            t.roles[1][i] = kind;
        }
        qlora_batch batches[2] = {t.d[0].batch, t.d[1].batch};
        ASSERT_OK(r, qlora_train_step(r.trainer, batches, 2, &info));
        bool good = kind == QLORA_ROLE_DESIRABLE;
        ASSERT_EQ(!good, isnan(info.rewards_chosen) != 0);
        ASSERT_EQ(good, isnan(info.rewards_rejected) != 0);
        ASSERT(isnan(info.margins));
        ASSERT_FALSE(isnan(info.loss));
        ASSERT(rig_close(&r, &s));
    }
    PASS();
}

// 8-bit moments: what the plan counts is what they need, and a run stays near that of f32.
TEST moments_in_8_bits(const test_machine* machine) {
    setup s = setup_make(machine);
    s.model.dropout = 0.0f;
    s.model.rank = 128; // 4096 elements for a width of 32
    outcome out[2];
    uint64_t bytes[2];
    for (int i = 0; i < 2; i++) {
        s.model.optimizer = i == 0 ? QLORA_OPTIMIZER_ADAMW : QLORA_OPTIMIZER_ADAMW_8BIT;
        rig r;
        qlora_model_info info;
        ASSERT(rig_open(&r, &s));
        ASSERT_OK(r, qlora_model_query(r.model, &info));
        bytes[i] = info.plan->optimizer;
        uint64_t moments[2] = {0, 512 * 4};
        for (int64_t k = 0; k < info.parameters; k++) {
            qlora_parameter_info p;
            ASSERT_OK(r, qlora_parameter_query(r.model, k, &p));
            uint64_t n = (uint64_t)(p.rows * p.cols);
            moments[0] += 8 * n;
            moments[1] += 8 + (n < 4096 ? 8 * n : 2 * n + 2 * 4 * ((n + 255) / 256));
        }
        if (i == 1) { // each tensor has its own place, at a multiple of 256 bytes
            uint64_t saved = bytes[0] - bytes[1];
            ASSERT(saved <= moments[0] - moments[1]);
            ASSERT(saved + 256 * ((uint64_t)info.parameters + 2) >= moments[0] - moments[1]);
        }
        ASSERT(run_steps(&r, &s, &out[i]));
        ASSERT(rig_close(&r, &s));
    }
    ASSERT(out[0].count == out[1].count);
    size_t n = out[0].count / 2;
    ASSERT_REL_L2(out[0].values + n, out[1].values + n, n, 1e-2);
    ASSERT(memcmp(out[0].values + n, out[1].values + n, n * sizeof(float)) != 0);
    outcome_free(&out[0]);
    outcome_free(&out[1]);
    PASS();
}

// The noise changes the trained passes only, and does not depend on how a step is divided.
TEST noise_is_for_training_only(const test_machine* machine) {
    setup s = setup_make(machine);
    s.model.dropout = 0.0f;
    double losses[3];
    double evals[3];
    float* gradients[3];
    size_t count = 0;
    for (int i = 0; i < 3; i++) { // without, with noise, and one sequence at a time
        rig r;
        data d;
        qlora_batch parts[3];
        qlora_eval_info eval;
        qlora_train_info info;
        s.train.neftune = i == 0 ? 0.0 : 5.0;
        ASSERT(rig_open(&r, &s));
        data_make(&d, "noise", run_lengths[0], 3);
        for (int k = 0; k < 3; k++) {
            parts[k] = batch_part(&d.batch, k);
        }
        ASSERT_OK(r, qlora_eval(r.model, &d.batch, &eval));
        evals[i] = eval.loss;
        ASSERT_OK(r, qlora_train_gradients(r.trainer, i < 2 ? &d.batch : parts, i < 2 ? 1 : 3));
        gradients[i] = rig_read(&r, true, &count);
        ASSERT(gradients[i] != NULL);
        ASSERT_OK(r, qlora_train_update(r.trainer));
        ASSERT_OK(r, qlora_train_query(r.trainer, &info));
        losses[i] = info.loss;
        ASSERT(rig_close(&r, &s));
    }
    ASSERT_MEM_EQ(&evals[0], &evals[1], sizeof evals[0]);
    ASSERT(fabs(losses[0] - losses[1]) > 1e-4);
    ASSERT_CLOSE_DOUBLE(&losses[1], &losses[2], 1, 1e-6, 1e-6);
    ASSERT_REL_L2(gradients[1], gradients[2], count, 1e-5);
    for (int i = 0; i < 3; i++) {
        free(gradients[i]);
    }
    PASS();
}

SUITE(methods_suite) {
    RUN_ON(TEST_CPU, moments_in_8_bits);
    RUN_ON(TEST_ONE_EACH, noise_is_for_training_only);
    RUN_ON(TEST_CPU, other_fields_are_checked);
    RUN_ON(TEST_CPU, other_tensors_are_not_mixed_up);
    RUN_ON(TEST_CPU, missing_kinds_are_not_zero);
    RUN_ON(TEST_ONE_EACH, other_tensors_train_alike);
    RUN_ON(TEST_CPU, other_tensors_are_refused);
    RUN_ON(TEST_ONE_EACH, losses_follow_their_formulas);
    RUN_ON(TEST_ONE_EACH, any_split_gives_the_same_step);
    RUN_ON(TEST_CPU, wrong_steps_are_refused);
    RUN_ON(TEST_CPU, wrong_settings_are_refused);
    RUN_ON(TEST_CPU, learning_rates_differ);
    RUN_ON(TEST_CPU, preferences_resume);
}
