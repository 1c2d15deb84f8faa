// model_rig.h - tiny random models for the model tests: the setup of a session, its batches, and a
// short training run whose results can be compared bit for bit.
#ifndef QLORA_MODEL_RIG_H
#define QLORA_MODEL_RIG_H

#include "machines.h"
#include "model_info.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { VOCAB = 61, TOKENS = 24, MAX_SEQUENCES = 8, STEPS = 2, MICRO = 2 };

// The parameters of a session. Change what the test is about, then call rig_open.
typedef struct setup {
    test_machine machine;
    void (*change)(qlora_ctx_desc* desc);
    qlora_model_config config;
    qlora_model_desc model;
    qlora_train_desc train;
    uint64_t budget; // memory to plan for; 0 = open without a plan
    int64_t every;   // replaces offload_every of the plan; 0 = as planned
    int64_t attention; // the same for attention_layers, all on the host, and heads_layers
    int64_t heads;
    bool eval_between;
} setup;

typedef struct rig {
    qlora_ctx* ctx;
    qlora_model* model;
    qlora_trainer* trainer;
} rig;

// A batch that owns its memory.
typedef struct data {
    int32_t ids[TOKENS * 4];
    int32_t labels[TOKENS * 4];
    float weights[TOKENS * 4];
    int32_t lengths[MAX_SEQUENCES];
    int32_t sequences[MAX_SEQUENCES];
    qlora_batch batch;
} data;

// Two layers with q/k norms, the second with a window; dropout and trained norms are on.
static inline setup setup_make(const test_machine* machine) {
    setup s;
    memset(&s, 0, sizeof s);
    s.machine = *machine;
    s.config.family = QLORA_FAMILY_QWEN3;
    s.config.vocab = VOCAB;
    s.config.hidden = 32;
    s.config.intermediate = 40;
    s.config.layers = 2;
    s.config.heads = 4;
    s.config.kv_heads = 2;
    s.config.head_dim = 16;
    s.config.max_positions = 64;
    s.config.rms_eps = 1e-5;
    s.config.rope.theta = 10000.0;
    s.config.qk_norm = true;
    s.config.window = 5;
    s.config.sliding[1] = 1;
    s.model.weight_std = 0.2f;
    s.model.seed = 11;
    s.model.mode = QLORA_MODE_F32;
    s.model.rank = 4;
    s.model.alpha = 8.0f;
    s.model.dropout = 0.1f;
    s.model.train_norms = true;
    s.model.tokens = TOKENS;
    s.model.max_sequences = MAX_SEQUENCES;
    s.model.head_chunk = 7;
    s.train.lr = 1e-2;
    s.train.weight_decay = 0.1;
    s.train.seed = 5;
    s.train.schedule = QLORA_SCHEDULE_CONSTANT;
    s.model.recompute = QLORA_CHOICE_OFF;
    s.model.cache = QLORA_CHOICE_OFF;
    s.model.accumulate = MICRO;
    return s;
}

static inline void data_make(data* d, const char* name, const int32_t* lengths, int count) {
    test_random random = test_random_start(name);
    int32_t at = 0;
    memset(d, 0, sizeof *d);
    for (int s = 0; s < count; s++) {
        d->lengths[s] = lengths[s];
        d->sequences[s] = 100 + s;
        for (int32_t i = 0; i < lengths[s]; i++, at++) {
            d->ids[at] = (int32_t)test_random_below(&random, VOCAB);
            d->labels[at] = test_random_below(&random, 4) == 0 ? -100 : d->ids[at];
            d->weights[at] = 1.0f;
        }
    }
    d->batch.ids = d->ids;
    d->batch.labels = d->labels;
    d->batch.lengths = d->lengths;
    d->batch.sequences = d->sequences;
    d->batch.count = count;
}

// Returns sequence s of a batch as a separate batch.
static inline qlora_batch batch_part(const qlora_batch* b, int64_t s) {
    qlora_batch one = *b;
    int64_t at = 0;
    for (int64_t i = 0; i < s; i++) {
        at += b->lengths[i];
    }
    one.ids = b->ids + at;
    one.labels = b->labels + at;
    one.weights = b->weights != NULL ? b->weights + at : NULL;
    one.lengths = b->lengths + s;
    one.sequences = b->sequences != NULL ? b->sequences + s : NULL;
    one.count = 1;
    return one;
}

static bool rig_quiet; // for tests that expect failures

static inline bool rig_says(const rig* r, const char* what) {
    if (rig_quiet) {
        return false;
    }
    fprintf(stderr, "%s: %s\n", what,
            r->ctx != NULL ? qlora_last_error(r->ctx) : test_open_reason());
    return false;
}

// B is zero in a new adapter, which hides half of the gradients; random values replace it.
static inline bool rig_stir(rig* r) {
    test_random random = test_random_start("stir");
    for (int64_t i = 0; i < model_parameters(r->model); i++) {
        qlora_parameter_info p;
        if (qlora_parameter_query(r->model, i, &p) != QLORA_OK) {
            return false;
        }
        size_t n = (size_t)(p.rows * p.cols);
        float* values = (float*)malloc(n * sizeof *values);
        bool norm = strstr(p.name, "lora_") == NULL;
        test_random_fill(&random, values, n, 0.15f);
        for (size_t j = 0; norm && j < n; j++) {
            values[j] += 1.0f;
        }
        qlora_result result = qlora_parameter_write(r->model, i, values);
        free(values);
        if (result != QLORA_OK) {
            return false;
        }
    }
    return true;
}

// Opens the model and its trainer in an existing context. Prints a message and returns false on
// failure.
static inline bool rig_start(rig* r, const setup* s) {
    qlora_model_desc model = s->model;
    qlora_plan fits;
    if (model.dir == NULL) {
        model.config = &s->config;
    }
    if (s->budget != 0 || s->every != 0 || s->attention != 0) {
        qlora_plan_desc budget;
        memset(&budget, 0, sizeof budget);
        budget.bytes = s->budget;
        if (qlora_plan_make(r->ctx, &model, &budget, &fits) != QLORA_OK) {
            return rig_says(r, "plan");
        }
        fits.offload_every = s->every != 0 ? s->every : fits.offload_every;
        if (s->attention != 0) { // in host memory with the inputs of the layers
            fits.attention_layers = s->attention;
            fits.offloaded_attention = s->attention;
        }
        fits.heads_layers = s->heads != 0 ? s->heads : fits.heads_layers;
        model.plan = &fits;
    }
    if (qlora_model_open(r->ctx, &model, &r->model) != QLORA_OK) {
        return rig_says(r, "model");
    }
    if (model.purpose == QLORA_PURPOSE_TRAIN &&
        qlora_trainer_create(r->model, &s->train, &r->trainer) != QLORA_OK) {
        return rig_says(r, "trainer");
    }
    return true;
}

static inline bool rig_open(rig* r, const setup* s) {
    memset(r, 0, sizeof *r);
    r->ctx = test_open(&s->machine, s->change);
    if (r->ctx == NULL) {
        return rig_says(r, "context");
    }
    return rig_start(r, s) && (s->model.purpose == QLORA_PURPOSE_EVALUATE || rig_stir(r) ||
                               rig_says(r, "stir"));
}

static inline bool rig_close(rig* r, const setup* s) {
    bool ok =
        qlora_trainer_destroy(r->trainer) == QLORA_OK && qlora_model_close(r->model) == QLORA_OK;
    return ok && test_close_ctx(&s->machine, r->ctx);
}

// Returns all trained tensors, or their gradients, concatenated. NULL on failure; the caller frees.
static inline float* rig_read(rig* r, bool gradients, size_t* count) {
    float* all = NULL;
    size_t n = 0;
    for (int64_t i = 0; i < model_parameters(r->model); i++) {
        qlora_parameter_info p;
        if (qlora_parameter_query(r->model, i, &p) != QLORA_OK) {
            free(all);
            return NULL;
        }
        size_t more = (size_t)(p.rows * p.cols);
        float* grown = (float*)realloc(all, (n + more) * sizeof *all);
        if (grown == NULL) {
            free(all);
            return NULL;
        }
        all = grown;
        qlora_result result = gradients ? qlora_gradient_read(r->trainer, i, all + n)
                                        : qlora_parameter_read(r->model, i, all + n);
        if (result != QLORA_OK) {
            free(all);
            return NULL;
        }
        n += more;
    }
    *count = n;
    return all;
}

// The results of a run.
typedef struct outcome {
    double losses[STEPS];
    float norms[STEPS];
    int64_t tokens[STEPS];
    double eval;
    float* values; // gradients of the last step, then the parameters after it
    size_t count;
} outcome;

static const int32_t run_lengths[MICRO][3] = {{9, 2, 6}, {1, 12, 4}};

static inline bool run_step(rig* r, const setup* s, int step, outcome* out) {
    data d[MICRO];
    double total = 0.0;
    for (int i = 0; i < MICRO; i++) {
        char name[32];
        snprintf(name, sizeof name, "step %d, %d", step, i);
        data_make(&d[i], name, run_lengths[i], 3);
        total += qlora_batch_labels(&d[i].batch);
    }
    for (int i = 0; i < MICRO; i++) {
        if (qlora_train_micro(r->trainer, &d[i].batch, total) != QLORA_OK) {
            return rig_says(r, "micro");
        }
        qlora_eval_info between;
        if (s->eval_between && qlora_eval(r->model, &d[1 - i].batch, &between) != QLORA_OK) {
            return rig_says(r, "eval");
        }
    }
    if (step == STEPS - 1) {
        out->values = rig_read(r, true, &out->count);
        if (out->values == NULL) {
            return rig_says(r, "gradients");
        }
    }
    qlora_train_info info;
    if (qlora_train_update(r->trainer) != QLORA_OK ||
        qlora_train_query(r->trainer, &info) != QLORA_OK) {
        return rig_says(r, "update");
    }
    out->losses[step] = info.loss;
    out->norms[step] = info.grad_norm;
    out->tokens[step] = info.tokens;
    return true;
}

static inline bool run_steps(rig* r, const setup* s, outcome* out) {
    memset(out, 0, sizeof *out);
    for (int step = 0; step < STEPS; step++) {
        if (!run_step(r, s, step, out)) {
            return false;
        }
    }
    data d;
    qlora_eval_info eval;
    data_make(&d, "evaluation", run_lengths[0], 3);
    if (qlora_eval(r->model, &d.batch, &eval) != QLORA_OK) {
        return rig_says(r, "eval");
    }
    out->eval = eval.loss;
    size_t n = 0;
    float* parameters = rig_read(r, false, &n);
    if (parameters == NULL) {
        return rig_says(r, "parameters");
    }
    float* grown = (float*)realloc(out->values, (out->count + n) * sizeof *grown);
    if (grown == NULL) {
        free(parameters);
        return rig_says(r, "parameters");
    }
    out->values = grown;
    memcpy(out->values + out->count, parameters, n * sizeof *parameters);
    out->count += n;
    free(parameters);
    return true;
}

// Opens, trains and closes; returns false if anything fails or leaks.
static inline bool run_session(const setup* s, outcome* out) {
    rig r;
    memset(out, 0, sizeof *out);
    return rig_open(&r, s) && run_steps(&r, s, out) && rig_close(&r, s);
}

static inline void outcome_free(outcome* o) {
    free(o->values);
    memset(o, 0, sizeof *o);
}

// Compares two outcomes bit for bit and prints the first difference.
static inline bool outcome_same(const outcome* a, const outcome* b) {
    for (int i = 0; i < STEPS; i++) {
        if (memcmp(&a->losses[i], &b->losses[i], sizeof a->losses[i]) != 0 ||
            memcmp(&a->norms[i], &b->norms[i], sizeof a->norms[i]) != 0 ||
            a->tokens[i] != b->tokens[i]) {
            fprintf(stderr, "step %d: loss %.17g and %.17g, norm %.9g and %.9g\n", i, a->losses[i],
                    b->losses[i], (double)a->norms[i], (double)b->norms[i]);
            return false;
        }
    }
    if (a->count == 0 || a->count != b->count) {
        fprintf(stderr, "%zu and %zu values\n", a->count, b->count);
        return false;
    }
    for (size_t i = 0; i < a->count; i++) {
        if (memcmp(&a->values[i], &b->values[i], sizeof a->values[i]) != 0) {
            fprintf(stderr, "value %zu of %zu: %.9g and %.9g\n", i, a->count, (double)a->values[i],
                    (double)b->values[i]);
            return false;
        }
    }
    return memcmp(&a->eval, &b->eval, sizeof a->eval) == 0;
}

// Returns true if the losses and gradient norms are plausible; the loss does not have to fall.
static inline bool outcome_sane(const outcome* a) {
    for (int i = 0; i < STEPS; i++) {
        if (!(a->losses[i] > 0.5 && a->losses[i] < 20.0) ||
            !(a->norms[i] > 1e-4f && a->norms[i] < 1e4f)) {
            fprintf(stderr, "step %d: loss %g, norm %g\n", i, a->losses[i], (double)a->norms[i]);
            return false;
        }
    }
    return true;
}

#endif
