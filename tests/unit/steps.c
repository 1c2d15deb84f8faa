// steps.c - training and generation as programs with little time use them: whole steps, slices,
// polls, settings that change, adapters copied between models, texts token by token.
#include "qlora.h"

#include "test.h"

#include "model_rig.h"

#define ASSERT_OK(R, CALL) ASSERT_EQm(qlora_last_error((R).ctx), QLORA_OK, (CALL))

enum { HALVES, WHOLE, SLICES, LONG_SLICES, WAYS };

static setup steps_setup(const test_machine* machine) {
    setup s = setup_make(machine);
    s.model.generate_tokens = 16;
    return s;
}

static void steps_data(data* d, qlora_batch* batches, int step) {
    for (int i = 0; i < MICRO; i++) {
        char name[32];
        snprintf(name, sizeof name, "step %d, %d", step, i);
        data_make(&d[i], name, run_lengths[i], 3);
        batches[i] = d[i].batch;
    }
}

// One step in one of the ways; *slices counts calls of qlora_train_slice.
static qlora_result steps_run(rig* r, int way, int step, qlora_train_info* info, int* slices) {
    data d[MICRO];
    qlora_batch batches[MICRO];
    double total = 0.0;
    steps_data(d, batches, step);
    if (way == WHOLE) {
        return qlora_train_step(r->trainer, batches, MICRO, info);
    }
    if (way == HALVES) {
        for (int i = 0; i < MICRO; i++) {
            total += qlora_batch_labels(&batches[i]);
        }
        qlora_result result = QLORA_OK;
        for (int i = 0; i < MICRO && result == QLORA_OK; i++) {
            result = qlora_train_micro(r->trainer, &batches[i], total);
        }
        result = result == QLORA_OK ? qlora_train_update(r->trainer) : result;
        return result == QLORA_OK ? qlora_train_query(r->trainer, info) : result;
    }
    qlora_result result = qlora_train_begin(r->trainer, batches, MICRO);
    for (bool done = false; result == QLORA_OK && !done;) {
        result = qlora_train_slice(r->trainer, way == SLICES ? 0.0 : 1e9, &done);
        (*slices)++;
    }
    return result == QLORA_OK ? qlora_train_query(r->trainer, info) : result;
}

// Any way of taking a step gives the same bits: losses, norms, parameters.
TEST every_way_gives_the_same_bits(const test_machine* machine) {
    setup s = steps_setup(machine);
    s.train.require_graph = strcmp(machine->backend, "cpu") != 0;
    float* expected = NULL;
    qlora_train_info expected_info[3];
    size_t count = 0;
    for (int way = 0; way < WAYS; way++) {
        rig r;
        int slices = 0;
        ASSERT(rig_open(&r, &s));
        for (int step = 0; step < 3; step++) {
            qlora_train_info info;
            ASSERT_OK(r, steps_run(&r, way, step, &info, &slices));
            if (way == HALVES) {
                expected_info[step] = info;
            }
            ASSERT_EQ_FMT(step + 1, (int)info.step, "%d");
            ASSERT_MEM_EQ(&expected_info[step].loss, &info.loss, sizeof info.loss);
            ASSERT_MEM_EQ(&expected_info[step].grad_norm, &info.grad_norm, sizeof info.grad_norm);
            ASSERT_EQ_FMT((int)expected_info[step].tokens, (int)info.tokens, "%d");
            ASSERT_EQ(way >= SLICES, info.longest_piece > 0.0);
        }
        size_t n = 0;
        float* got = rig_read(&r, false, &n);
        ASSERT(got != NULL && n > 0);
        if (way == HALVES) {
            expected = got;
            count = n;
        } else {
            ASSERT_EQ_FMT((int)count, (int)n, "%d");
            ASSERT_MEM_EQ(expected, got, n * sizeof *got);
            free(got);
        }
        if (way == SLICES) { // a budget of nothing: one piece each
            int64_t layers = s.config.layers;
            ASSERT(slices >= 3 * (MICRO * (2 + 4 * (int)layers) + 1));
        }
        if (way == LONG_SLICES && strcmp(machine->backend, "cpu") == 0) {
            ASSERT_EQ_FMT(3, slices, "%d");
        } else if (way == LONG_SLICES) { // pieces nobody has timed yet get a slice of their own
            ASSERT(slices > 3 && slices < 3 + 12);
        }
        ASSERT(rig_close(&r, &s));
    }
    free(expected);
    PASS();
}

// A step in slices keeps everything else off the model while a micro-batch is in the middle, and
// can be dropped without a trace.
TEST a_cancelled_step_leaves_no_trace(const test_machine* machine) {
    setup s = steps_setup(machine);
    rig r;
    outcome expected;
    outcome got;
    ASSERT(run_session(&s, &expected));
    ASSERT(rig_open(&r, &s));
    data d[MICRO];
    qlora_batch batches[MICRO];
    qlora_eval_info eval;
    qlora_train_info info;
    bool done = false;
    steps_data(d, batches, 7);
    ASSERT_EQ(QLORA_ERR_STATE, qlora_train_slice(r.trainer, 1.0, &done));
    ASSERT(strstr(qlora_last_error(r.ctx), "qlora_train_begin") != NULL);
    for (int slices = 1; slices < 12; slices += 5) {
        ASSERT_OK(r, qlora_train_begin(r.trainer, batches, MICRO));
        for (int i = 0; i < slices; i++) {
            ASSERT_OK(r, qlora_train_slice(r.trainer, 0.0, &done));
            ASSERT(!done);
        }
        ASSERT_EQ(QLORA_ERR_STATE, qlora_eval(r.model, &d[0].batch, &eval));
        ASSERT(strstr(qlora_last_error(r.ctx), "middle of a micro-batch") != NULL);
        ASSERT_EQ(QLORA_ERR_STATE, qlora_adapter_use(r.model, false));
        ASSERT_EQ(QLORA_ERR_STATE, qlora_train_micro(r.trainer, &d[0].batch, 5.0));
        ASSERT(strstr(qlora_last_error(r.ctx), "qlora_train_cancel") != NULL);
        ASSERT_EQ(QLORA_ERR_STATE, qlora_train_step(r.trainer, batches, MICRO, &info));
        ASSERT_EQ(QLORA_ERR_STATE, qlora_train_begin(r.trainer, batches, MICRO));
        ASSERT_EQ(QLORA_ERR_STATE, qlora_train_set(r.trainer, &s.train));
        ASSERT_EQ(QLORA_ERR_STATE, qlora_checkpoint_save(r.trainer, "never", NULL, 0));
        ASSERT_OK(r, qlora_train_cancel(r.trainer));
    }
    // A step by halves can also be dropped after a whole micro-batch.
    ASSERT_OK(r, qlora_train_micro(r.trainer, &d[0].batch, 5.0));
    ASSERT_EQ(QLORA_ERR_STATE, qlora_train_step(r.trainer, batches, MICRO, &info));
    ASSERT_OK(r, qlora_train_cancel(r.trainer));
    ASSERT_OK(r, qlora_train_cancel(r.trainer)); // nothing to drop
    ASSERT(run_steps(&r, &s, &got));
    ASSERT(outcome_same(&expected, &got));
    outcome_free(&expected);
    outcome_free(&got);
    ASSERT(rig_close(&r, &s));
    PASS();
}

// After a failure in the middle of a step, its gradients are incomplete: nothing goes on until the
// step is dropped, and then everything is as before.
TEST a_failed_step_must_be_dropped(const test_machine* machine) {
    if (strcmp(machine->backend, "fake") != 0) {
        SKIPm("needs the fake GPU");
    }
    const fake_api* fake = test_fake();
    setup s = steps_setup(machine);
    s.train.eager = true;
    rig r;
    outcome expected;
    outcome got;
    ASSERT(run_session(&s, &expected));
    ASSERT(rig_open(&r, &s));
    data d[MICRO];
    qlora_batch batches[MICRO];
    qlora_train_info info;
    bool done = false;
    steps_data(d, batches, 5);
    for (int i = 0; i < 3; i++) {
        if (i == 2) {
            ASSERT_OK(r, qlora_train_begin(r.trainer, batches, MICRO));
        }
        fake->fail_at("cuLaunchKernel", 9, 2, false);
        qlora_result result = i == 0   ? qlora_train_step(r.trainer, batches, MICRO, &info)
                              : i == 1 ? qlora_train_micro(r.trainer, &batches[0], 9.0)
                                       : qlora_train_slice(r.trainer, 1e9, &done);
        while (i == 2 && result == QLORA_OK && !done) {
            result = qlora_train_slice(r.trainer, 1e9, &done);
        }
        fake->fail_clear();
        ASSERT(result != QLORA_OK);
        ASSERT_EQ(QLORA_ERR_STATE, qlora_train_update(r.trainer));
        ASSERT_EQ(QLORA_ERR_STATE, qlora_train_micro(r.trainer, &batches[0], 9.0));
        ASSERT_EQ(QLORA_ERR_STATE, qlora_train_step(r.trainer, batches, MICRO, &info));
        ASSERT_EQ(QLORA_ERR_STATE, qlora_train_begin(r.trainer, batches, MICRO));
        ASSERT_EQ(QLORA_ERR_STATE, qlora_train_slice(r.trainer, 1.0, &done));
        ASSERT_OK(r, qlora_train_cancel(r.trainer));
    }
    ASSERT(run_steps(&r, &s, &got));
    ASSERT(outcome_same(&expected, &got));
    outcome_free(&expected);
    outcome_free(&got);
    ASSERT(rig_close(&r, &s));
    PASS();
}

// What a sliced step uses cannot change under it.
TEST slices_keep_their_ground(const test_machine* machine) {
    setup s = steps_setup(machine);
    rig r;
    ASSERT(rig_open(&r, &s));
    data d[MICRO];
    qlora_batch batches[MICRO];
    bool done = false;
    float values[4096];
    steps_data(d, batches, 6);
    ASSERT_OK(r, qlora_parameter_read(r.model, 0, values));
    ASSERT_OK(r, qlora_train_begin(r.trainer, batches, MICRO));
    ASSERT_OK(r, qlora_adapter_use(r.model, false)); // allowed between micro-batches
    ASSERT_EQ(QLORA_ERR_STATE, qlora_train_slice(r.trainer, 0.0, &done));
    ASSERT(strstr(qlora_last_error(r.ctx), "adapters are off") != NULL);
    ASSERT_OK(r, qlora_adapter_use(r.model, true));
    ASSERT_OK(r, qlora_train_slice(r.trainer, 0.0, &done));
    ASSERT_EQ(QLORA_ERR_STATE, qlora_parameter_write(r.model, 0, values));
    ASSERT_EQ(QLORA_ERR_STATE, qlora_adapter_load(r.model, "nowhere", NULL));
    ASSERT_OK(r, qlora_train_cancel(r.trainer));
    ASSERT_OK(r, qlora_parameter_write(r.model, 0, values));
    ASSERT_OK(r, qlora_train_begin(r.trainer, batches, MICRO));
    d[0].lengths[1] = TOKENS + 1; // the caller's memory changed
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_train_slice(r.trainer, 0.0, &done));
    ASSERT_OK(r, qlora_train_cancel(r.trainer));
    ASSERT(rig_close(&r, &s));
    PASS();
}

// A step in slices, with an evaluation and a step of another model of the context between them.
static bool steps_beside(rig* r, const setup* s, qlora_batch* batches, double* loss) {
    rig other;
    qlora_train_info info;
    qlora_eval_info eval;
    bool done[2] = {false, false};
    memset(&other, 0, sizeof other);
    other.ctx = r->ctx;
    bool ok = rig_start(&other, s) && rig_stir(&other) &&
              qlora_train_begin(r->trainer, batches, MICRO) == QLORA_OK &&
              qlora_train_slice(r->trainer, 0.0, &done[0]) == QLORA_OK && !done[0];
    ok = ok && qlora_eval(other.model, &batches[1], &eval) == QLORA_OK &&
         qlora_train_begin(other.trainer, batches, MICRO) == QLORA_OK;
    while (ok && !(done[0] && done[1])) {
        ok = (done[0] || qlora_train_slice(r->trainer, 0.0, &done[0]) == QLORA_OK) &&
             (done[1] || qlora_train_slice(other.trainer, 0.0, &done[1]) == QLORA_OK);
    }
    ok = ok && qlora_train_query(other.trainer, &info) == QLORA_OK;
    *loss = ok ? info.loss : 0.0;
    return qlora_trainer_destroy(other.trainer) == QLORA_OK &&
           qlora_model_close(other.model) == QLORA_OK && ok;
}

static void steps_portable(qlora_ctx_desc* d) {
    d->cpu_tier = QLORA_CPU_TIER_PORTABLE;
}

static void steps_best(qlora_ctx_desc* d) {
    d->cpu_tier = QLORA_CPU_TIER_BEST;
}

// On the CPU, slices need no memory that the plan does not have, unless something else is computed
// in the middle of them: then once as much as the context has, and not again.
TEST slices_share_the_memory(const test_machine* machine) {
    if (strcmp(machine->backend, "cpu") != 0) {
        SKIPm("slices of a GPU need none");
    }
    for (int i = 0; i < 3; i++) {
        setup s = steps_setup(machine);
        rig r;
        data d[MICRO];
        qlora_batch batches[MICRO];
        qlora_memory_info memory[4];
        qlora_train_info info;
        qlora_model_info model;
        double loss = 0.0;
        int slices = 0;
        size_t n = 0;
        s.change = i == 0 ? steps_portable : steps_best;
        s.model.dropout = i < 2 ? s.model.dropout : 0.0f;
        ASSERT(rig_open(&r, &s));
        for (int step = 0; step < 3; step++) {
            ASSERT_OK(r, steps_run(&r, WHOLE, 0, &info, &slices));
        }
        float* expected = rig_read(&r, false, &n);
        ASSERT(rig_close(&r, &s));
        ASSERT(rig_open(&r, &s));
        ASSERT_OK(r, qlora_model_query(r.model, &model));
        ASSERT_OK(r, test_memory(r.ctx, &memory[0]));
        ASSERT_OK(r, steps_run(&r, SLICES, 0, &info, &slices));
        ASSERT(slices > 10);
        ASSERT_OK(r, test_memory(r.ctx, &memory[1]));
        ASSERT(memory[1].host_bytes - memory[0].host_bytes < 4096);
        double alone = info.loss;
        for (int again = 0; again < 2; again++) { // the other model is as this one was
            steps_data(d, batches, 0);
            ASSERT(steps_beside(&r, &s, batches, &loss));
            ASSERT(memcmp(&alone, &loss, sizeof alone) == 0);
            ASSERT_OK(r, test_memory(r.ctx, &memory[2 + again]));
        }
        size_t more = (size_t)(memory[2].host_bytes - memory[1].host_bytes);
        ASSERT(more > 0 && more < model.plan->context + 8192);
        ASSERT(memory[2].host_bytes == memory[3].host_bytes);
        float* got = rig_read(&r, false, &n);
        ASSERT(expected != NULL && got != NULL);
        ASSERT_MEM_EQ(expected, got, n * sizeof *got);
        free(expected);
        free(got);
        ASSERT(rig_close(&r, &s));
    }
    PASS();
}

// On the CPU, slices also divide the update. In the middle of it, what reads parameters finishes it
// first, and so does dropping the step: there is never half an update.
TEST an_update_is_whole(const test_machine* machine) {
    if (strcmp(machine->backend, "cpu") != 0) {
        SKIPm("the update is one piece on a GPU");
    }
    setup s = steps_setup(machine);
    size_t n = 0;
    float* expected = NULL;
    for (int way = 0; way < 4; way++) { // a whole step, then read, cancel and destroy in the middle
        rig r;
        data d[MICRO];
        qlora_batch batches[MICRO];
        qlora_eval_info eval;
        qlora_train_info info;
        bool done = way == 0;
        steps_data(d, batches, 3);
        ASSERT(rig_open(&r, &s));
        ASSERT_OK(r, way == 0 ? qlora_train_step(r.trainer, batches, MICRO, &info)
                              : qlora_train_begin(r.trainer, batches, MICRO));
        for (bool middle = false; !done && !middle;) {
            ASSERT_OK(r, qlora_train_slice(r.trainer, 0.0, &done));
            middle = !done && qlora_eval(r.model, &batches[0], &eval) != QLORA_OK &&
                     strstr(qlora_last_error(r.ctx), "in the middle of its update") != NULL;
        }
        ASSERT_EQ(way == 0, done);
        if (way == 2) {
            ASSERT_OK(r, qlora_train_cancel(r.trainer));
            ASSERT_OK(r, qlora_train_query(r.trainer, &info));
            ASSERT_EQ_FMT(1, (int)info.step, "%d");
            ASSERT_EQ(QLORA_ERR_STATE, qlora_train_slice(r.trainer, 0.0, &done));
        } else if (way == 3) {
            ASSERT_OK(r, qlora_trainer_destroy(r.trainer));
            r.trainer = NULL;
            ASSERT_OK(r, qlora_eval(r.model, &batches[0], &eval));
        }
        float* got = rig_read(&r, false, &n);
        ASSERT(got != NULL);
        if (way == 0) {
            expected = got;
        } else {
            ASSERT_MEM_EQ(expected, got, n * sizeof *got);
            free(got);
        }
        if (way == 1) {
            ASSERT_OK(r, qlora_train_slice(r.trainer, 0.0, &done));
            ASSERT(done);
            ASSERT_OK(r, qlora_train_step(r.trainer, batches, MICRO, &info));
            ASSERT_EQ_FMT(2, (int)info.step, "%d");
        }
        ASSERT(rig_close(&r, &s));
    }
    free(expected);
    PASS();
}

// Norms that are longer than anything else that is trained are copied whole.
TEST long_norms_are_copied(const test_machine* machine) {
    setup s = steps_setup(machine);
    s.config.head_dim = 128;
    s.model.rank = -1;
    s.model.dropout = 0.0f;
    rig a;
    ASSERT(rig_open(&a, &s));
    qlora_ctx* cpu = NULL;
    qlora_model* other = NULL;
    qlora_ctx_desc plain;
    memset(&plain, 0, sizeof plain);
    plain.require_backend = QLORA_BACKEND_CPU;
    plain.threads = 1;
    qlora_model_desc desc = s.model;
    desc.config = &s.config;
    ASSERT_EQ(QLORA_OK, qlora_ctx_create(&plain, &cpu));
    ASSERT_EQ(QLORA_OK, qlora_model_open(cpu, &desc, &other));
    ASSERT_EQm(qlora_last_error(cpu), QLORA_OK, qlora_adapter_copy(a.model, other));
    for (int64_t i = 0; i < model_parameters(other); i++) {
        float want[128];
        float got[128];
        qlora_parameter_info p;
        ASSERT_EQ(QLORA_OK, qlora_parameter_query(other, i, &p));
        ASSERT(p.rows * p.cols <= 128);
        ASSERT_OK(a, qlora_parameter_read(a.model, i, want));
        ASSERT_EQ(QLORA_OK, qlora_parameter_read(other, i, got));
        ASSERT_MEM_EQ(want, got, (size_t)p.cols * sizeof want[0]);
    }
    ASSERT_EQ(QLORA_OK, qlora_model_close(other));
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(cpu));
    ASSERT(rig_close(&a, &s));
    PASS();
}

// A batch that is not valid anywhere in a step is refused before anything is computed.
TEST steps_are_checked_first(const test_machine* machine) {
    setup s = steps_setup(machine);
    rig r;
    ASSERT(rig_open(&r, &s));
    data d[MICRO];
    qlora_batch batches[MICRO];
    qlora_train_info info;
    steps_data(d, batches, 3);
    d[1].ids[2] = VOCAB;
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_train_step(r.trainer, batches, MICRO, &info));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_train_begin(r.trainer, batches, MICRO));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_train_step(r.trainer, NULL, 1, &info));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_train_step(r.trainer, batches, 0, &info));
    ASSERT(strstr(qlora_last_error(r.ctx), "count is 0") != NULL);
    ASSERT_OK(r, qlora_train_query(r.trainer, &info));
    ASSERT_EQ_FMT(0, (int)info.step, "%d");
    size_t n = 0;
    float* gradients = rig_read(&r, true, &n);
    ASSERT(gradients != NULL);
    for (size_t i = 0; i < n; i++) {
        ASSERT(!(gradients[i] < 0.0f) && !(gradients[i] > 0.0f));
    }
    free(gradients);
    for (int i = 0; i < TOKENS * 4; i++) { // nothing to train on
        d[0].labels[i] = -100;
    }
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_train_step(r.trainer, batches, 1, &info));
    ASSERT(strstr(qlora_last_error(r.ctx), "at least one label") != NULL);
    ASSERT(rig_close(&r, &s));
    PASS();
}

// A poll never waits, and in the end it says what a query says.
TEST polls_do_not_wait(const test_machine* machine) {
    setup s = steps_setup(machine);
    rig r;
    ASSERT(rig_open(&r, &s));
    data d[MICRO];
    qlora_batch batches[MICRO];
    qlora_train_info info;
    qlora_train_info polled;
    ASSERT_OK(r, qlora_train_poll(r.trainer, &polled));
    ASSERT_EQ_FMT(0, (int)polled.step, "%d");
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_train_poll(r.trainer, NULL));
    int steps = test_brief() ? 3 : 10;
    for (int step = 0; step < steps; step++) { // 10: more than there are records
        steps_data(d, batches, step);
        ASSERT_OK(r, qlora_train_step(r.trainer, batches, MICRO, NULL));
        uint64_t waits = 0;
        if (strcmp(machine->backend, "fake") == 0) {
            waits = test_fake()->calls("SYNC");
        }
        ASSERT_OK(r, qlora_train_poll(r.trainer, &polled));
        if (strcmp(machine->backend, "fake") == 0) {
            ASSERT(test_fake()->calls("SYNC") == waits);
        }
        ASSERT_EQ_FMT(step + 1, (int)(polled.step + polled.pending), "%d");
        if (strcmp(machine->backend, "fake") == 0) { // a failure is not "still pending"
            test_fake()->fail_at("cuEventQuery", 1, 2, false);
            ASSERT(qlora_train_poll(r.trainer, &polled) != QLORA_OK);
            test_fake()->fail_clear();
        }
        ASSERT_OK(r, qlora_train_query(r.trainer, &info));
        ASSERT_OK(r, qlora_train_poll(r.trainer, &polled));
        ASSERT_EQ_FMT(0, (int)polled.pending, "%d");
        ASSERT_EQ_FMT((int)info.step, (int)polled.step, "%d");
        ASSERT_MEM_EQ(&info.loss, &polled.loss, sizeof info.loss);
        ASSERT_MEM_EQ(&info.lr, &polled.lr, sizeof info.lr);
    }
    ASSERT(rig_close(&r, &s));
    PASS();
}

// Learning rate, clip limit and schedule change between steps; what cannot change is refused.
TEST settings_change_between_steps(const test_machine* machine) {
    setup s = steps_setup(machine);
    rig r;
    ASSERT(rig_open(&r, &s));
    data d[MICRO];
    qlora_batch batches[MICRO];
    qlora_train_info info;
    steps_data(d, batches, 1);
    ASSERT_OK(r, qlora_train_step(r.trainer, batches, MICRO, &info));
    ASSERT(info.lr > 0.0099 && info.lr < 0.0101);
    qlora_train_desc changed = s.train;
    changed.lr = 0.5;
    changed.schedule = QLORA_SCHEDULE_LINEAR;
    changed.total_steps = 2;
    changed.max_norm = 1e-12; // so small that nothing moves but by Adam's sign
    changed.weight_decay = 0.0;
    ASSERT_OK(r, qlora_train_set(r.trainer, &changed));
    ASSERT_OK(r, qlora_train_step(r.trainer, batches, MICRO, &info));
    ASSERT(info.lr > 0.2499 && info.lr < 0.2501);
    changed.lr = -1.0;
    ASSERT_OK(r, qlora_train_set(r.trainer, &changed));
    size_t n = 0;
    float* before = rig_read(&r, false, &n);
    ASSERT_OK(r, qlora_train_step(r.trainer, batches, MICRO, &info));
    float* after = rig_read(&r, false, &n);
    ASSERT(before != NULL && after != NULL);
    ASSERT_MEM_EQ(before, after, n * sizeof *after);
    free(before);
    free(after);
    const struct {
        const char* says;
        uint64_t seed;
        bool eager;
        bool require_graph;
    } fixed[] = {{"desc.seed", 1, false, false},
                 {"desc.eager", 0, true, false},
                 {"desc.require_graph", 0, false, true}};
    for (size_t i = 0; i < sizeof fixed / sizeof fixed[0]; i++) {
        qlora_train_desc wrong = changed;
        wrong.seed += fixed[i].seed;
        wrong.eager = fixed[i].eager;
        wrong.require_graph = fixed[i].require_graph;
        ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_train_set(r.trainer, &wrong));
        ASSERTm(qlora_last_error(r.ctx), strstr(qlora_last_error(r.ctx), fixed[i].says) != NULL);
    }
    changed.beta1 = 1.0;
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_train_set(r.trainer, &changed));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_train_set(r.trainer, NULL));
    ASSERT(rig_close(&r, &s));
    PASS();
}

// The clip limit of qlora_train_set reaches the device: the same run as one created with it.
TEST clip_limit_changes(const test_machine* machine) {
    setup s = steps_setup(machine);
    float* values[2] = {NULL, NULL};
    size_t n = 0;
    for (int i = 0; i < 2; i++) {
        rig r;
        data d[MICRO];
        qlora_batch batches[MICRO];
        s.train.max_norm = i == 0 ? 0.01 : 0.7;
        ASSERT(rig_open(&r, &s));
        s.train.max_norm = 0.01;
        ASSERT_OK(r, qlora_train_set(r.trainer, &s.train));
        steps_data(d, batches, 2);
        ASSERT_OK(r, qlora_train_step(r.trainer, batches, MICRO, NULL));
        values[i] = rig_read(&r, false, &n);
        ASSERT(values[i] != NULL);
        ASSERT(rig_close(&r, &s));
    }
    ASSERT_MEM_EQ(values[0], values[1], n * sizeof *values[0]);
    free(values[0]);
    free(values[1]);
    PASS();
}

// The layer of a trained tensor; the final norm comes after the last layer.
static int layer_of(const qlora_parameter_info* p, int layers) {
    const char* at = strstr(p->name, "layers.");
    return at != NULL ? atoi(at + 7) : layers;
}

// Each layer is clipped to its own norm: the update is AdamW's with the gradients of each layer
// scaled by themselves, the norm of all of them is reported, and a layer that is not finite holds
// everything back.
TEST layers_are_clipped_apart(const test_machine* machine) {
    setup s = steps_setup(machine);
    enum { GROUPS = 3 };
    const double limit = 0.05;
    rig r;
    data d[MICRO];
    qlora_batch batches[MICRO];
    s.train.clip = QLORA_CLIP_LAYERS;
    s.train.max_norm = limit;
    s.train.eps = 1.0; // without it, the first update depends only on the signs
    s.train.weight_decay = 0.0;
    s.train.require_graph = strcmp(machine->backend, "cpu") != 0;
    ASSERT(rig_open(&r, &s));
    steps_data(d, batches, 2);
    double total = qlora_batch_labels(&batches[0]);
    ASSERT_OK(r, qlora_train_micro(r.trainer, &batches[0], total));
    size_t n = 0;
    float* before = rig_read(&r, false, &n);
    float* gradients = rig_read(&r, true, &n);
    ASSERT_OK(r, qlora_train_update(r.trainer));
    qlora_train_info info;
    ASSERT_OK(r, qlora_train_query(r.trainer, &info));
    float* after = rig_read(&r, false, &n);
    double squares[GROUPS] = {0.0, 0.0, 0.0};
    float* expected = (float*)malloc(n * sizeof *expected);
    for (int pass = 0; pass < 2; pass++) {
        size_t at = 0;
        for (int64_t i = 0; i < model_parameters(r.model); i++) {
            qlora_parameter_info p;
            ASSERT_OK(r, qlora_parameter_query(r.model, i, &p));
            int group = layer_of(&p, GROUPS - 1);
            double norm = sqrt(squares[group]);
            double scale = norm > limit ? limit / (norm + 1e-6) : 1.0;
            for (int64_t j = 0; j < p.rows * p.cols; j++, at++) {
                double g = (double)gradients[at] * scale;
                squares[group] += pass == 0 ? (double)gradients[at] * (double)gradients[at] : 0.0;
                expected[at] = (float)((double)before[at] - s.train.lr * g / (fabs(g) + 1.0));
            }
        }
        ASSERT_EQ_FMT(n, at, "%zu");
    }
    for (int g = 0; g < GROUPS; g++) {
        ASSERT(sqrt(squares[g]) > limit); // every group is clipped, each by another scale
    }
    ASSERT_CLOSE(expected, after, n, 1e-7f, 1e-6f);
    ASSERT(fabs((double)info.grad_norm - sqrt(squares[0] + squares[1] + squares[2])) <
           1e-4 * (double)info.grad_norm);
    qlora_train_desc other = s.train;
    other.clip = QLORA_CLIP_ALL;
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_train_set(r.trainer, &other));
    ASSERT(strstr(qlora_last_error(r.ctx), "desc.clip") != NULL);
    // One value that is not finite, in one layer.
    qlora_parameter_info p;
    ASSERT_OK(r, qlora_parameter_query(r.model, 3, &p));
    float values[1024];
    ASSERT((size_t)(p.rows * p.cols) <= sizeof values / sizeof values[0]);
    ASSERT_OK(r, qlora_parameter_read(r.model, 3, values));
    values[5] = (float)NAN;
    ASSERT_OK(r, qlora_parameter_write(r.model, 3, values));
    free(before);
    free(after);
    before = rig_read(&r, false, &n);
    ASSERT_OK(r, qlora_train_step(r.trainer, batches, MICRO, &info));
    ASSERT(info.last_skipped);
    after = rig_read(&r, false, &n);
    ASSERT_MEM_EQ(before, after, n * sizeof *before);
    free(before);
    free(gradients);
    free(after);
    free(expected);
    ASSERT(rig_close(&r, &s));
    PASS();
}

// ---- memory that goes back to the caller ----

typedef struct watched_memory {
    bool on;
    int freed;
    uint64_t waits; // calls that waited for the stream before the first block went back
} watched_memory;

static watched_memory watched;

static void* watched_alloc(size_t bytes, void* user) {
    uint64_t address = 0;
    (void)user;
    return test_fake()->cu.cuMemAlloc_v2(&address, bytes) == 0 ? (void*)(uintptr_t)address : NULL;
}

static void watched_free(void* pointer, size_t bytes, void* user) {
    (void)bytes;
    (void)user;
    if (watched.on && watched.freed++ == 0) {
        watched.waits = test_fake()->calls("cuStreamSynchronize");
    }
    test_fake()->cu.cuMemFree_v2((uint64_t)(uintptr_t)pointer);
}

static void with_watched(qlora_ctx_desc* desc) {
    desc->device_allocator.alloc = watched_alloc;
    desc->device_allocator.free = watched_free;
}

// An allocator of the caller's may hand a model's memory to somebody else at once, so nothing may
// still be running in it when the model is closed.
TEST memory_goes_back_when_idle(const test_machine* machine) {
    setup s = steps_setup(machine);
    rig r;
    memset(&watched, 0, sizeof watched);
    s.change = with_watched;
    ASSERT(rig_open(&r, &s));
    qlora_model_desc desc = s.model;
    desc.config = &s.config;
    desc.purpose = QLORA_PURPOSE_EVALUATE;
    qlora_model* other = NULL;
    ASSERT_OK(r, qlora_model_open(r.ctx, &desc, &other));
    ASSERT_OK(r, qlora_adapter_copy(r.model, other)); // queued, not waited for
    uint64_t before = test_fake()->calls("cuStreamSynchronize");
    watched.on = true;
    ASSERT_OK(r, qlora_model_close(other));
    watched.on = false;
    ASSERT(watched.freed > 0);
    ASSERT(watched.waits > before);
    ASSERT(rig_close(&r, &s));
    PASS();
}

// A copied adapter answers like the original, in the same context and in another one.
TEST adapters_are_copied(const test_machine* machine) {
    setup s = steps_setup(machine);
    rig a;
    ASSERT(rig_open(&a, &s));
    data d;
    float want[TOKENS * VOCAB];
    float got[TOKENS * VOCAB];
    data_make(&d, "copied", run_lengths[0], 3);
    ASSERT_OK(a, qlora_eval_logits(a.model, &d.batch, want));
    qlora_model_desc desc = s.model;
    desc.config = &s.config;
    desc.purpose = QLORA_PURPOSE_EVALUATE;
    qlora_model* same = NULL;
    ASSERT_OK(a, qlora_model_open(a.ctx, &desc, &same));
    ASSERT_OK(a, qlora_adapter_copy(a.model, same));
    ASSERT_OK(a, qlora_eval_logits(same, &d.batch, got));
    ASSERT_MEM_EQ(want, got, sizeof want[0] * 17 * VOCAB);
    ASSERT_OK(a, qlora_adapter_copy(a.model, a.model));
    qlora_ctx* cpu = NULL;
    qlora_model* other = NULL;
    qlora_ctx_desc plain;
    memset(&plain, 0, sizeof plain);
    plain.require_backend = QLORA_BACKEND_CPU;
    plain.threads = 1;
    ASSERT_EQ(QLORA_OK, qlora_ctx_create(&plain, &cpu));
    ASSERT_EQ(QLORA_OK, qlora_model_open(cpu, &desc, &other));
    ASSERT_EQm(qlora_last_error(cpu), QLORA_OK, qlora_adapter_copy(a.model, other));
    ASSERT_EQ(QLORA_OK, qlora_eval_logits(other, &d.batch, got));
    ASSERT_CLOSE(want, got, 17 * VOCAB, 1e-4, 1e-4);
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_adapter_copy(NULL, other));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_adapter_copy(other, NULL));
    ASSERT_EQ(QLORA_OK, qlora_model_close(other));
    desc.rank = 5;
    ASSERT_EQ(QLORA_OK, qlora_model_open(cpu, &desc, &other));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_adapter_copy(a.model, other));
    ASSERT(strstr(qlora_last_error(cpu), "trained tensor 0 is") != NULL);
    ASSERT_EQ(QLORA_OK, qlora_model_close(other));
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(cpu));
    ASSERT_OK(a, qlora_model_close(same));
    ASSERT(rig_close(&a, &s));
    PASS();
}

// ---- texts

typedef struct taken {
    int32_t ids[32];
    int count;
} taken;

static bool take_token(void* user, int32_t token) {
    taken* t = (taken*)user;
    t->ids[t->count++] = token;
    return true;
}

static qlora_generate_desc text_desc(const int32_t* prompt, int64_t count) {
    static const int32_t none[] = {-1};
    qlora_generate_desc d;
    memset(&d, 0, sizeof d);
    d.prompt = prompt;
    d.prompt_tokens = count;
    d.temperature = 0.8f;
    d.seed = 4;
    d.stops = none;
    d.stop_count = 1;
    return d;
}

// Token by token, with training and evaluation in between, a text is the one of qlora_generate.
TEST tokens_come_one_by_one(const test_machine* machine) {
    setup s = steps_setup(machine);
    s.train.lr = -1.0; // training runs, but the adapters stay
    rig r;
    ASSERT(rig_open(&r, &s));
    const int32_t prompt[] = {3, 17, 42};
    qlora_generate_desc d = text_desc(prompt, 3);
    taken want = {{0}, 0};
    ASSERT_OK(r, qlora_generate(r.model, &d, take_token, &want));
    ASSERT_EQ_FMT(13, want.count, "%d"); // generate_tokens is 16
    qlora_generation* g = NULL;
    ASSERT_OK(r, qlora_generate_begin(r.model, &d, &g));
    ASSERT_EQ_FMT(1, (int)model_info(r.model).generations, "%d");
    ASSERT_EQ(QLORA_ERR_STATE, qlora_model_close(r.model));
    ASSERT(strstr(qlora_last_error(r.ctx), "it still has a trainer and a generation") != NULL);
    ASSERT_EQ(QLORA_ERR_STATE, qlora_generate(r.model, &d, take_token, &want));
    data batches[MICRO];
    qlora_batch list[MICRO];
    qlora_eval_info eval;
    bool stopped = false;
    int32_t token = 0;
    steps_data(batches, list, 1);
    for (int i = 0; i < 13; i++) {
        ASSERT_OK(r, qlora_generate_next(g, &token, &stopped));
        ASSERT(!stopped);
        ASSERT_EQ_FMT(want.ids[i], token, "%d");
        if (i < 4 || !test_brief()) {
            ASSERT_OK(r, i % 2 == 0 ? qlora_train_step(r.trainer, list, MICRO, NULL)
                                    : qlora_eval(r.model, &list[0], &eval));
        }
    }
    ASSERT_OK(r, qlora_generate_next(g, &token, &stopped));
    ASSERT(stopped && token == -1);
    ASSERT_EQ(QLORA_ERR_STATE, qlora_generate_next(g, &token, &stopped));
    ASSERT(strstr(qlora_last_error(r.ctx), "qlora_generate_feed") != NULL);
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_generate_feed(g, prompt, 1)); // no room
    ASSERT_OK(r, qlora_generate_end(g));
    ASSERT_OK(r, qlora_generate_end(NULL));
    ASSERT(rig_close(&r, &s));
    PASS();
}

// A second turn continues the text: its tokens are those of the whole text given as a prompt.
TEST turns_keep_the_cache(const test_machine* machine) {
    setup s = steps_setup(machine);
    rig r;
    ASSERT(rig_open(&r, &s));
    int32_t whole[16] = {3, 17, 42};
    const int32_t second[] = {9, 30};
    int count = 3;
    qlora_generate_desc d = text_desc(whole, 3);
    d.max_tokens = 2;
    qlora_generation* g = NULL;
    ASSERT_OK(r, qlora_generate_begin(r.model, &d, &g));
    for (int turn = 0; turn < 2; turn++) {
        bool stopped = false;
        int32_t token = 0;
        for (int i = 0; i < 2; i++) {
            ASSERT_OK(r, qlora_generate_next(g, &token, &stopped));
            ASSERT(!stopped);
            whole[count++] = token;
        }
        ASSERT_OK(r, qlora_generate_next(g, &token, &stopped));
        ASSERT(stopped && token == -1);
        if (turn == 0) {
            ASSERT_OK(r, qlora_generate_feed(g, second, 2));
            whole[count++] = second[0];
            whole[count++] = second[1];
        }
    }
    const int32_t bad[] = {VOCAB};
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_generate_feed(g, bad, 1));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_generate_feed(g, second, 0));
    ASSERT_OK(r, qlora_generate_end(g));
    d = text_desc(whole, 7); // prompt, two tokens, second turn
    d.max_tokens = 2;
    taken again = {{0}, 0};
    ASSERT_OK(r, qlora_generate(r.model, &d, take_token, &again));
    ASSERT_EQ_FMT(2, again.count, "%d");
    ASSERT_EQ_FMT(whole[7], again.ids[0], "%d");
    ASSERT_EQ_FMT(whole[8], again.ids[1], "%d");
    ASSERT(rig_close(&r, &s));
    PASS();
}

// A token in slices of nothing; *slices counts them.
static qlora_result text_slices(qlora_generation* g, int32_t* token, bool* stopped, int* slices) {
    qlora_result result = QLORA_OK;
    qlora_generation_info before;
    qlora_generation_info now;
    result = qlora_generate_query(g, &before);
    for (bool done = false; result == QLORA_OK && !done; (*slices)++) {
        result = qlora_generate_slice(g, 0.0, token, stopped, &done);
        if (result != QLORA_OK || qlora_generate_query(g, &now) != QLORA_OK ||
            now.tokens != before.tokens + (done && *token >= 0 ? 1 : 0)) {
            fprintf(stderr, "%d tokens were %d\n", (int)now.tokens, (int)before.tokens);
            return result != QLORA_OK ? result : QLORA_ERR_STATE;
        }
    }
    return result;
}

// A prompt and tokens in slices, with training in slices between them, are those of whole calls.
// In the middle, the model and the text are kept from other calls, and the text can end.
TEST texts_come_in_slices(const test_machine* machine) {
    bool cpu = strcmp(machine->backend, "cpu") == 0;
    setup s = steps_setup(machine);
    s.train.lr = -1.0; // training runs, but the adapters stay
    s.model.generate_sequences = 2;
    rig r;
    ASSERT(rig_open(&r, &s));
    const int32_t prompt[] = {3, 17, 42};
    qlora_generate_desc d = text_desc(prompt, 3);
    qlora_generation* g = NULL;
    qlora_generation* other = NULL;
    taken want = {{0}, 0};
    taken next = {{0}, 0};
    d.max_tokens = 4;
    ASSERT_OK(r, qlora_generate(r.model, &d, take_token, &want));
    int32_t second[10] = {3, 17, 42};
    memcpy(second + 3, want.ids, 4 * sizeof *second);
    memcpy(second + 7, prompt, 2 * sizeof *second);
    d.prompt = second; // the second turn
    d.prompt_tokens = 9;
    ASSERT_OK(r, qlora_generate(r.model, &d, take_token, &next));
    d = text_desc(prompt, 3);
    d.max_tokens = 4;
    d.in_slices = true;
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_generate(r.model, &d, take_token, &want));
    ASSERT_OK(r, qlora_generate_begin(r.model, &d, &g));
    data batches[MICRO];
    qlora_batch list[MICRO];
    qlora_eval_info eval;
    qlora_train_info info;
    steps_data(batches, list, 1);
    for (int i = 0; i < 10; i++) { // two turns of four tokens and their ends
        const taken* turn = i < 5 ? &want : &next;
        int32_t token = 0;
        bool stopped = false;
        bool done = false;
        int slices = 0;
        if (i % 5 == 0) { // the prompt is due
            ASSERT_EQ(QLORA_ERR_STATE, qlora_generate_next(g, &token, &stopped));
            ASSERT(strstr(qlora_last_error(r.ctx), "qlora_generate_slice") != NULL);
            ASSERT_OK(r, qlora_generate_slice(g, 0.0, &token, &stopped, &done));
            ASSERT(!done);
        }
        if (i % 5 == 0 && cpu) {
            ASSERT_EQ(QLORA_ERR_STATE, qlora_eval(r.model, &list[0], &eval));
            ASSERT(strstr(qlora_last_error(r.ctx), "in the middle of a pass") != NULL);
            ASSERT_EQ(QLORA_ERR_STATE, qlora_generate_begin(r.model, &d, &other));
            ASSERT_EQ(QLORA_ERR_STATE, qlora_train_step(r.trainer, list, MICRO, NULL));
            ASSERT_EQ(QLORA_ERR_STATE, qlora_generate_feed(g, prompt, 1));
            ASSERT_EQ(QLORA_ERR_STATE, qlora_adapter_use(r.model, false));
            ASSERT_EQ(QLORA_ERR_STATE, qlora_checkpoint_load(r.trainer, "nowhere", NULL, NULL));
        }
        ASSERT_OK(r, text_slices(g, &token, &stopped, &slices));
        ASSERT_EQ(i % 5 == 4, stopped);
        ASSERT_EQ_FMT(i % 5 == 4 ? -1 : turn->ids[i % 5], token, "%d");
        ASSERT(!cpu || i % 5 == 4 || slices > (i % 5 == 0 ? 10 : 0));
        int taken_slices = 0;
        ASSERT_OK(r, steps_run(&r, SLICES, i, &info, &taken_slices));
        if (i == 4) {
            ASSERT_OK(r, qlora_generate_feed(g, prompt, 2));
        }
    }
    bool stopped = false;
    bool done = false;
    int32_t token = 0;
    ASSERT_OK(r, qlora_generate_begin(r.model, &d, &other));
    ASSERT_OK(r, qlora_generate_slice(other, 0.0, &token, &stopped, &done));
    ASSERT_OK(r, qlora_generate_end(other)); // in the middle
    ASSERT_OK(r, qlora_eval(r.model, &list[0], &eval));
    ASSERT_OK(r, qlora_generate_end(g));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_generate_slice(NULL, 0.0, &token, &stopped, &done));
    ASSERT(rig_close(&r, &s));
    PASS();
}

// An evaluation whose batch is overwritten once it has begun, in slices.
static qlora_result eval_slices(rig* r, int step, double budget, qlora_eval_info* info,
                                double* sums, int* slices) {
    data d[MICRO];
    qlora_batch batches[MICRO];
    double share = 0.0;
    steps_data(d, batches, step);
    qlora_result result = qlora_eval_begin(r->model, &batches[0]);
    memset(d, 0xff, sizeof d);
    memset(batches, 0xff, sizeof batches);
    for (bool done = false; result == QLORA_OK && !done; (*slices)++) {
        result = qlora_eval_slice(r->model, budget, info, sums, &done);
        if (result == QLORA_OK && (!(info->share >= share) || (info->share < 1.0) == done)) {
            return QLORA_ERR_ARGUMENT;
        }
        share = info->share;
    }
    return result;
}

static bool eval_same(const qlora_eval_info* a, const qlora_eval_info* b) {
    return memcmp(&a->loss, &b->loss, sizeof a->loss) == 0 && a->labels == b->labels &&
           a->tokens == b->tokens && a->share == 1.0 && b->share == 1.0;
}

// An evaluation in slices has the bits of a whole one, with adapters and without, also between two
// micro-batches of a step, which it does not change.
TEST evaluations_come_in_slices(const test_machine* machine) {
    setup s = steps_setup(machine);
    bool cpu = strcmp(machine->backend, "cpu") == 0;
    rig r;
    data d[MICRO];
    qlora_batch batches[MICRO];
    qlora_eval_info want;
    qlora_eval_info got;
    qlora_train_info info;
    double sums[2][MAX_SEQUENCES];
    int slices = 0;
    steps_data(d, batches, 4);
    ASSERT(batches[0].count <= MAX_SEQUENCES);
    ASSERT(rig_open(&r, &s));
    ASSERT_OK(r, steps_run(&r, WHOLE, 0, &info, &slices));
    for (int on = 0; on < 2; on++) {
        ASSERT_OK(r, qlora_adapter_use(r.model, on == 1));
        ASSERT_OK(r, qlora_eval(r.model, &batches[0], &want));
        ASSERT_OK(r, qlora_eval_sequences(r.model, &batches[0], sums[0]));
        for (int way = 0; way < 3; way++) { // as short as possible, without sums, at once
            slices = 0;
            memset(sums[1], 0, sizeof sums[1]);
            ASSERT_OK(r, eval_slices(&r, 4, way == 2 ? 1e9 : 0.0, &got,
                                     way == 1 ? NULL : sums[1], &slices));
            ASSERT(eval_same(&want, &got));
            ASSERT(way == 1 || memcmp(sums[0], sums[1], (size_t)batches[0].count * 8) == 0);
            ASSERT(cpu && way < 2 ? slices > 10 : slices == 1);
        }
    }
    ASSERT_OK(r, steps_run(&r, WHOLE, 1, &info, &slices));
    double loss = info.loss;
    ASSERT_OK(r, qlora_eval(r.model, &batches[0], &want));
    ASSERT(rig_close(&r, &s));
    ASSERT(rig_open(&r, &s));
    ASSERT_OK(r, steps_run(&r, WHOLE, 0, &info, &slices));
    steps_data(d, batches, 1);
    int between = 0;
    ASSERT_OK(r, qlora_train_begin(r.trainer, batches, MICRO));
    for (bool done = false; !done;) {
        ASSERT_OK(r, qlora_train_slice(r.trainer, 0.0, &done));
        between += eval_slices(&r, 3, 0.0, &got, NULL, &slices) == QLORA_OK ? 1 : 0;
    }
    ASSERT(between >= MICRO && between <= MICRO + 1); // the last one after the step
    ASSERT_OK(r, qlora_train_query(r.trainer, &info));
    ASSERT_MEM_EQ(&loss, &info.loss, sizeof loss);
    ASSERT_OK(r, eval_slices(&r, 4, 0.0, &got, NULL, &slices));
    ASSERT(eval_same(&want, &got));
    ASSERT(rig_close(&r, &s));
    PASS();
}

// In the middle of an evaluation, the model does nothing else; it can be dropped without a trace,
// also by closing the model.
TEST evaluations_keep_their_ground(const test_machine* machine) {
    setup s = steps_setup(machine);
    rig r;
    data d[MICRO];
    qlora_batch batches[MICRO];
    qlora_eval_info want;
    qlora_eval_info got;
    qlora_train_info info;
    qlora_generation* g = NULL;
    const int32_t prompt[] = {3, 17, 42};
    qlora_generate_desc text = text_desc(prompt, 3);
    bool done = false;
    int slices = 0;
    steps_data(d, batches, 4);
    ASSERT(rig_open(&r, &s));
    ASSERT_OK(r, qlora_eval(r.model, &batches[0], &want));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_eval_begin(NULL, &batches[0]));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_eval_begin(r.model, NULL));
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_eval_slice(NULL, 0.0, &got, NULL, &done));
    ASSERT_EQ(QLORA_ERR_STATE, qlora_eval_slice(r.model, 0.0, &got, NULL, &done));
    ASSERT(strstr(qlora_last_error(r.ctx), "qlora_eval_begin") != NULL);
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_eval_cancel(NULL));
    ASSERT_OK(r, qlora_eval_cancel(r.model)); // nothing to drop
    for (int i = 0; i < 6; i++) {
        ASSERT_OK(r, qlora_eval_begin(r.model, &batches[0]));
        for (int k = 0; k < i * 5 && strcmp(machine->backend, "cpu") == 0; k++) {
            ASSERT_OK(r, qlora_eval_slice(r.model, 0.0, &got, NULL, &done));
            ASSERT(!done && got.loss == 0.0 && got.tokens == 0);
        }
        ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_eval_slice(r.model, 0.0, NULL, NULL, &done));
        ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_eval_slice(r.model, 0.0, &got, NULL, NULL));
        ASSERT_EQ(QLORA_ERR_STATE, qlora_eval_begin(r.model, &batches[0]));
        ASSERT(strstr(qlora_last_error(r.ctx), "qlora_eval_cancel before evaluating") != NULL);
        ASSERT_EQ(QLORA_ERR_STATE, qlora_eval(r.model, &batches[0], &got));
        ASSERT_EQ(QLORA_ERR_STATE, qlora_adapter_use(r.model, false));
        ASSERT_EQ(QLORA_ERR_STATE, qlora_train_step(r.trainer, batches, MICRO, &info));
        ASSERT_EQ(QLORA_ERR_STATE, qlora_generate_begin(r.model, &text, &g));
        ASSERT_EQ(QLORA_ERR_STATE, qlora_checkpoint_load(r.trainer, "nowhere", NULL, NULL));
        if (i == 5) {
            break;
        }
        ASSERT_OK(r, qlora_eval_cancel(r.model));
        ASSERT_OK(r, qlora_eval(r.model, &batches[0], &got));
        ASSERT(eval_same(&want, &got));
        ASSERT_OK(r, eval_slices(&r, 4, 0.0, &got, NULL, &slices));
        ASSERT(eval_same(&want, &got));
    }
    ASSERT(rig_close(&r, &s)); // in the middle
    PASS();
}

// A stop token ends the turn and belongs to the text.
TEST stops_end_a_turn(const test_machine* machine) {
    setup s = steps_setup(machine);
    rig r;
    ASSERT(rig_open(&r, &s));
    const int32_t prompt[] = {3, 17, 42};
    qlora_generate_desc d = text_desc(prompt, 3);
    taken want = {{0}, 0};
    ASSERT_OK(r, qlora_generate(r.model, &d, take_token, &want));
    int at = 1;
    while (at < 6 && want.ids[at] == want.ids[0]) {
        at++;
    }
    d.stops = &want.ids[at];
    d.stop_count = 1;
    qlora_generation* g = NULL;
    ASSERT_OK(r, qlora_generate_begin(r.model, &d, &g));
    bool stopped = false;
    for (int i = 0; i <= at; i++) {
        int32_t token = 0;
        ASSERT_OK(r, qlora_generate_next(g, &token, &stopped));
        ASSERT_EQ_FMT(want.ids[i], token, "%d");
        ASSERT_EQ(i == at, stopped);
    }
    ASSERT_OK(r, qlora_generate_end(g));
    ASSERT(rig_close(&r, &s));
    PASS();
}

// The workspaces that cuBLAS was given since the log was cleared: how many different ones, and
// whether all calls gave this size.
static int workspaces_seen(size_t bytes) {
    static const char call[] = "cublasSetWorkspace_v2";
    char size[32];
    int seen[4] = {0, 0, 0, 0};
    int count = 0;
    snprintf(size, sizeof size, ", %zu", bytes);
    for (const char* at = strstr(test_fake()->log(), call); at != NULL; at = strstr(at + 1, call)) {
        char line[128];
        int id = 0;
        int known = 0;
        snprintf(line, sizeof line, "%.*s", (int)strcspn(at, "\n"), at);
        const char* memory = strstr(line, "memory#");
        if (memory == NULL || sscanf(memory, "memory#%d", &id) != 1 ||
            strstr(memory, size) == NULL) {
            fprintf(stderr, "%s\n", line);
            return -1;
        }
        while (known < count && seen[known] != id) {
            known++;
        }
        if (known == count && count < 4) {
            seen[count++] = id;
        }
    }
    return count;
}

// Both streams of a captured step use the workspaces that were set last. The new ones are larger
// than the first: memory that was left in place would be too short, which the fake cuBLAS refuses.
TEST workspaces_change_between_steps(const test_machine* machine) {
    enum { BYTES = 40 << 20 };
    setup s = steps_setup(machine);
    s.model.dropout = 0.0f; // with it, the second stream has no products
    s.train.require_graph = true;
    outcome expected, got;
    rig r;
    qlora_tensor memory;
    ASSERT(run_session(&s, &expected));
    memset(&got, 0, sizeof got);
    ASSERT(rig_open(&r, &s));
    ASSERT_OK(r, qlora_tensor_create(r.ctx, QLORA_U8, 1, BYTES, &memory));
    ASSERT(run_step(&r, &s, 0, &got));
    ASSERT_OK(r, qlora_ctx_set_workspace(r.ctx, memory.data, BYTES));
    test_fake()->log_clear();
    ASSERT(run_step(&r, &s, 1, &got));
    ASSERT_EQ_FMT(2, workspaces_seen(BYTES), "%d");
    for (int i = 0; i < STEPS; i++) {
        ASSERT_EQ_FMT(expected.losses[i], got.losses[i], "%.17g");
    }
    ASSERT_OK(r, qlora_ctx_set_workspace(r.ctx, NULL, 0));
    ASSERT_OK(r, qlora_tensor_destroy(r.ctx, &memory));
    outcome_free(&expected);
    outcome_free(&got);
    ASSERT(rig_close(&r, &s));
    PASS();
}

SUITE(steps_suite) {
    RUN_ON(TEST_ONE_EACH, every_way_gives_the_same_bits);
    RUN_ON(TEST_ONE_EACH, a_cancelled_step_leaves_no_trace);
    RUN_ON(TEST_ONE_EACH, a_failed_step_must_be_dropped);
    RUN_ON(TEST_ONE_EACH, slices_keep_their_ground);
    RUN_ON(TEST_ONE_EACH, slices_share_the_memory);
    RUN_ON(TEST_ONE_EACH, evaluations_come_in_slices);
    RUN_ON(TEST_ONE_EACH, evaluations_keep_their_ground);
    RUN_ON(TEST_ONE_EACH, an_update_is_whole);
    RUN_ON(TEST_ONE_EACH, long_norms_are_copied);
    RUN_ON(TEST_ONE_EACH, steps_are_checked_first);
    RUN_ON(TEST_ONE_EACH, polls_do_not_wait);
    RUN_ON(TEST_ONE_EACH, settings_change_between_steps);
    RUN_ON(TEST_ONE_EACH, clip_limit_changes);
    RUN_ON(TEST_EVERYWHERE, layers_are_clipped_apart);
    RUN_ON(TEST_ONE_FAKE, workspaces_change_between_steps);
    RUN_ON(TEST_ONE_FAKE, memory_goes_back_when_idle);
    RUN_ON(TEST_ONE_EACH, adapters_are_copied);
    RUN_ON(TEST_ONE_EACH, tokens_come_one_by_one);
    RUN_ON(TEST_ONE_EACH, turns_keep_the_cache);
    RUN_ON(TEST_ONE_EACH, texts_come_in_slices);
    RUN_ON(TEST_ONE_EACH, stops_end_a_turn);
}
