// threads.c - two contexts in two threads: each trains, evaluates and generates as if it were
// alone. The gate `tsan` shows that they share nothing.
#include "model_rig.h"

#include <pthread.h>

enum { JOBS = 2, NEW_TOKENS = 6 };

typedef struct job {
    uint64_t seed;
    bool ok;
    double eval;
    int32_t tokens[NEW_TOKENS];
    float* values; // the trained tensors at the end
    size_t count;
} job;

static bool job_generate(rig* r, job* j) {
    static const int32_t prompt[3] = {1, 7, 3};
    qlora_generate_desc d;
    qlora_generation* generation = NULL;
    memset(&d, 0, sizeof d);
    d.prompt = prompt;
    d.prompt_tokens = 3;
    d.temperature = 1.0f;
    d.seed = j->seed;
    bool ok = qlora_generate_begin(r->model, &d, &generation) == QLORA_OK;
    for (int i = 0; ok && i < NEW_TOKENS; i++) {
        bool stopped = false;
        ok = qlora_generate_next(generation, &j->tokens[i], &stopped) == QLORA_OK && !stopped;
    }
    return qlora_generate_end(generation) == QLORA_OK && ok;
}

static bool job_train(rig* r, const setup* s, job* j) {
    static const int32_t lengths[3] = {9, 2, 6};
    data d;
    qlora_eval_info eval;
    data_make(&d, "threads", lengths, 3);
    if (!rig_start(r, s)) {
        return false;
    }
    for (int step = 0; step < STEPS; step++) {
        if (qlora_train_step(r->trainer, &d.batch, 1, NULL) != QLORA_OK) {
            return rig_says(r, "step");
        }
    }
    if (qlora_eval(r->model, &d.batch, &eval) != QLORA_OK || !job_generate(r, j)) {
        return rig_says(r, "evaluation and generation");
    }
    j->eval = eval.loss;
    j->values = rig_read(r, false, &j->count);
    return j->values != NULL;
}

// Not test_open: it counts what all contexts of the process allocate.
static void* job_run(void* argument) {
    job* j = (job*)argument;
    rig r;
    test_machine nowhere;
    qlora_ctx_desc d;
    memset(&r, 0, sizeof r);
    memset(&nowhere, 0, sizeof nowhere);
    memset(&d, 0, sizeof d);
    setup s = setup_make(&nowhere);
    s.model.seed = j->seed;
    s.model.generate_tokens = 16;
    d.require_backend = QLORA_BACKEND_CPU;
    d.threads = 2;
    j->ok = qlora_ctx_create(&d, &r.ctx) == QLORA_OK && job_train(&r, &s, j);
    j->ok = qlora_trainer_destroy(r.trainer) == QLORA_OK && j->ok;
    j->ok = qlora_model_close(r.model) == QLORA_OK && j->ok;
    j->ok = qlora_ctx_destroy(r.ctx) == QLORA_OK && j->ok;
    return NULL;
}

TEST two_contexts_in_two_threads(void) {
    job alone[JOBS];
    job beside[JOBS];
    pthread_t threads[JOBS];
    memset(alone, 0, sizeof alone);
    memset(beside, 0, sizeof beside);
    for (int i = 0; i < JOBS; i++) {
        alone[i].seed = 11 + (uint64_t)i;
        beside[i].seed = alone[i].seed;
        job_run(&alone[i]);
        ASSERT(alone[i].ok);
    }
    for (int i = 0; i < JOBS; i++) {
        ASSERT_EQ(0, pthread_create(&threads[i], NULL, job_run, &beside[i]));
    }
    for (int i = 0; i < JOBS; i++) {
        ASSERT_EQ(0, pthread_join(threads[i], NULL));
    }
    for (int i = 0; i < JOBS; i++) {
        ASSERT(beside[i].ok);
        ASSERT_EQ(0, memcmp(&alone[i].eval, &beside[i].eval, sizeof alone[i].eval));
        ASSERT_EQ(0, memcmp(alone[i].tokens, beside[i].tokens, sizeof alone[i].tokens));
        ASSERT_EQ(alone[i].count, beside[i].count);
        ASSERT_EQ(0, memcmp(alone[i].values, beside[i].values, alone[i].count * sizeof(float)));
    }
    // Other seeds give other results: the comparison above is not one of constants.
    ASSERT(memcmp(alone[0].values, alone[1].values, alone[0].count * sizeof(float)) != 0);
    for (int i = 0; i < JOBS; i++) {
        free(alone[i].values);
        free(beside[i].values);
    }
    PASS();
}

SUITE(threads_suite) {
    if (test_backend() == NULL || strcmp(test_backend(), "cpu") == 0) {
        RUN_TEST(two_contexts_in_two_threads);
    }
}
