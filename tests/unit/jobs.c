// jobs.c - several adapters on one base: what each of them computes must not depend on the others.
#define _POSIX_C_SOURCE 200809L // mkdtemp

#include "qlora.h"

#include "test.h"

#include "model_rig.h"

#include <unistd.h>

#define ASSERT_OK(R, CALL) ASSERT_EQm(qlora_last_error((R).ctx), QLORA_OK, (CALL))

enum { JOBS = 3, JOB_STEPS = 3, JOB_MICRO = 2, JOB_SEQUENCES = 2, WITHOUT = -1 };

// Ranks, scales and seeds that all differ; the ranks of a stack do not fill whole groups of 8.
// Those of the second row are too high for adapters to stand side by side.
static const qlora_adapter_slot all_slots[2][JOBS] = {
    {{4, 8.0f, 21}, {3, 5.0f, 22}, {6, 0.0f, 23}}, {{4, 8.0f, 21}, {3, 5.0f, 22}, {124, 0.0f, 23}}};

// Lengths of the sequences by micro-batch and job. Job 1 has no part in the second one.
static const int32_t lengths_of[JOB_MICRO][JOBS][JOB_SEQUENCES] = {{{5, 3}, {4, 0}, {7, 2}},
                                                                   {{6, 0}, {0, 0}, {3, 9}}};

// The last job ends a step before the others.
static bool job_runs(int job, int step) {
    return job < JOBS - 1 || step < JOB_STEPS - 1;
}

static setup jobs_setup(const test_machine* machine) {
    setup s = setup_make(machine);
    s.model.dropout = 0.0f;
    s.model.train_norms = false;
    s.model.slots = all_slots[0];
    s.model.slot_count = JOBS;
    return s;
}

static qlora_train_desc job_desc(const setup* s, int job) {
    qlora_train_desc d = s->train;
    d.lr = 1e-2 * (job + 1);
    d.max_norm = job == 1 ? 0.05 : -1.0;
    d.schedule = job == 2 ? QLORA_SCHEDULE_LINEAR : QLORA_SCHEDULE_COSINE;
    d.total_steps = 4 + job;
    d.warmup_steps = job;
    d.weight_decay = 0.1 * job;
    return d;
}

typedef struct jobs {
    rig r; // its trainer stays NULL
    qlora_trainer* trainers[JOBS];
} jobs;

// B is zero in a new adapter, which hides half of the gradients.
static bool job_stir(rig* r, int job) {
    test_random random = test_random_start(job == 0 ? "a" : job == 1 ? "b" : "c");
    for (int64_t i = 0; i < model_parameters(r->model); i++) {
        qlora_parameter_info p;
        float values[8192];
        if (qlora_parameter_query(r->model, i, &p) != QLORA_OK || p.rows * p.cols > 8192) {
            return rig_says(r, "stir");
        }
        test_random_fill(&random, values, (size_t)(p.rows * p.cols), 0.15f);
        if (strstr(p.name, "lora_B") != NULL &&
            qlora_parameter_write(r->model, i, values) != QLORA_OK) {
            return rig_says(r, "stir");
        }
    }
    return true;
}

// All jobs in one model, or job number `only` in one of its own.
static bool jobs_open(jobs* j, const setup* given, int only) {
    setup s = *given;
    memset(j, 0, sizeof *j);
    j->r.ctx = test_open(&s.machine, s.change);
    s.model.config = &s.config;
    if (only != WITHOUT) {
        s.model.slots = &s.model.slots[only];
        s.model.slot_count = 1;
    }
    if (j->r.ctx == NULL || qlora_model_open(j->r.ctx, &s.model, &j->r.model) != QLORA_OK) {
        return rig_says(&j->r, "model");
    }
    for (int i = 0; i < JOBS; i++) {
        qlora_train_desc d = job_desc(&s, i);
        d.adapter = only == WITHOUT ? i : 0;
        if (only != WITHOUT && only != i) {
            continue;
        }
        if (qlora_adapter_select(j->r.model, d.adapter) != QLORA_OK || !job_stir(&j->r, i) ||
            qlora_trainer_create(j->r.model, &d, &j->trainers[i]) != QLORA_OK) {
            return rig_says(&j->r, "trainer");
        }
    }
    return qlora_adapter_select(j->r.model, 0) == QLORA_OK;
}

static bool jobs_close(jobs* j, const setup* s) {
    for (int i = 0; i < JOBS; i++) {
        if (qlora_trainer_destroy(j->trainers[i]) != QLORA_OK) {
            return rig_says(&j->r, "destroy");
        }
    }
    return rig_close(&j->r, s);
}

// The micro-batches of a step: those of all jobs, or of job number `only`. `other` is a job whose
// tokens are others than usual.
typedef struct job_step {
    data d[JOB_MICRO];
    int32_t adapters[JOB_MICRO][MAX_SEQUENCES];
    qlora_batch batches[JOB_MICRO];
    int count;
} job_step;

static void job_step_make(job_step* t, int step, int only, int other) {
    memset(t, 0, sizeof *t);
    for (int m = 0; m < JOB_MICRO; m++) {
        data* d = &t->d[t->count];
        int32_t at = 0;
        int count = 0;
        for (int job = 0; job < JOBS; job++) {
            char name[64];
            snprintf(name, sizeof name, "step %d, %d, job %d%s", step, m, job,
                     job == other ? "'" : "");
            test_random random = test_random_start(name);
            for (int k = 0; k < JOB_SEQUENCES && job_runs(job, step); k++) {
                int32_t n = lengths_of[m][job][k];
                if (n == 0 || (only != WITHOUT && only != job)) {
                    continue;
                }
                t->adapters[t->count][count] = only == WITHOUT ? job : 0;
                d->lengths[count++] = n;
                for (int32_t i = 0; i < n; i++, at++) {
                    d->ids[at] = (int32_t)test_random_below(&random, VOCAB);
                    d->labels[at] = i % 3 == 2 ? -100 : d->ids[at];
                }
            }
        }
        if (count > 0) {
            qlora_batch* b = &t->batches[t->count];
            b->ids = d->ids;
            b->labels = d->labels;
            b->lengths = d->lengths;
            b->adapters = t->adapters[t->count++];
            b->count = count;
        }
    }
}

// The results of a job.
typedef struct job_outcome {
    qlora_train_info info[JOB_STEPS];
    float* values;
    size_t count;
} job_outcome;

static bool job_values(jobs* j, int adapter, job_outcome* out) {
    free(out->values);
    out->values = NULL;
    return qlora_adapter_select(j->r.model, adapter) == QLORA_OK &&
           (out->values = rig_read(&j->r, false, &out->count)) != NULL &&
           qlora_adapter_select(j->r.model, 0) == QLORA_OK;
}

static bool jobs_step(jobs* j, int step, int other, job_outcome out[JOBS]) {
    job_step t;
    qlora_train_info infos[JOBS];
    job_step_make(&t, step, WITHOUT, other);
    if (qlora_train_step_each(j->trainers, JOBS, t.batches, t.count, infos) != QLORA_OK) {
        return rig_says(&j->r, "step");
    }
    for (int i = 0; i < JOBS; i++) {
        out[i].info[step] = infos[i];
    }
    return true;
}

static bool jobs_together(const setup* s, int other, job_outcome out[JOBS]) {
    jobs j;
    memset(out, 0, JOBS * sizeof out[0]);
    if (!jobs_open(&j, s, WITHOUT)) {
        return false;
    }
    for (int step = 0; step < JOB_STEPS; step++) {
        if (!jobs_step(&j, step, other, out)) {
            return false;
        }
    }
    for (int i = 0; i < JOBS; i++) {
        if (!job_values(&j, i, &out[i])) {
            return false;
        }
    }
    return jobs_close(&j, s);
}

static bool job_alone(const setup* s, int job, job_outcome* out) {
    jobs j;
    memset(out, 0, sizeof *out);
    if (!jobs_open(&j, s, job)) {
        return false;
    }
    for (int step = 0; step < JOB_STEPS; step++) {
        job_step t;
        job_step_make(&t, step, job, WITHOUT);
        if (t.count > 0 &&
            qlora_train_step(j.trainers[job], t.batches, t.count, NULL) != QLORA_OK) {
            return rig_says(&j.r, "step");
        }
        if (qlora_train_query(j.trainers[job], &out->info[step]) != QLORA_OK) {
            return rig_says(&j.r, "query");
        }
    }
    return job_values(&j, 0, out) && jobs_close(&j, s);
}

// Whether two outcomes have the same bits.
static bool job_same(const job_outcome* a, const job_outcome* b) {
    bool same = a->count > 0 && a->count == b->count &&
                memcmp(a->values, b->values, a->count * sizeof *a->values) == 0;
    for (int i = 0; i < JOB_STEPS; i++) {
        const qlora_train_info* x = &a->info[i];
        const qlora_train_info* y = &b->info[i];
        same = same && x->step == y->step && x->tokens == y->tokens && x->tokens > 0 &&
               memcmp(&x->loss, &y->loss, sizeof x->loss) == 0 &&
               memcmp(&x->labels, &y->labels, sizeof x->labels) == 0 &&
               memcmp(&x->lr, &y->lr, sizeof x->lr) == 0 &&
               memcmp(&x->grad_norm, &y->grad_norm, sizeof x->grad_norm) == 0;
    }
    return same;
}

// Whether two outcomes agree within the rounding of f32.
static bool job_close(const job_outcome* a, const job_outcome* b) {
    double difference = 0.0;
    double size = 0.0;
    bool close = a->count > 0 && a->count == b->count;
    for (size_t i = 0; close && i < a->count; i++) {
        double d = (double)a->values[i] - (double)b->values[i];
        difference += d * d;
        size += (double)b->values[i] * (double)b->values[i];
    }
    close = close && sqrt(difference) < 2e-4 * sqrt(size);
    for (int i = 0; i < JOB_STEPS; i++) {
        const qlora_train_info* x = &a->info[i];
        const qlora_train_info* y = &b->info[i];
        close = close && x->step == y->step && x->tokens == y->tokens &&
                fabs(x->loss - y->loss) < 1e-4 && fabs(x->labels - y->labels) < 0.5 &&
                fabs((double)(x->grad_norm - y->grad_norm)) < 1e-3 * (double)y->grad_norm;
    }
    return close;
}

static void jobs_free(job_outcome out[JOBS]) {
    for (int i = 0; i < JOBS; i++) {
        free(out[i].values);
    }
}

static bool on_cpu(const test_machine* machine) {
    return strcmp(machine->backend, "cpu") == 0;
}

// On the CPU, each job has the bits of a training of its own; on a GPU, they agree.
TEST together_is_as_alone(const test_machine* machine) {
    setup s = jobs_setup(machine);
    job_outcome together[JOBS];
    for (int kind = 0; kind < 6; kind++) {
        if ((!on_cpu(machine) && kind == 3) || (test_checked(machine) && kind % 4 != 1)) {
            continue; // the same on both; checked: tiles, and an FP8 base
        }
        s.model.base = kind == 5 ? QLORA_BASE_FP8 : QLORA_BASE_NF4;
        s.model.slots = all_slots[kind == 4 ? 1 : 0];
        s.model.recompute = kind == 1 ? QLORA_CHOICE_ON : QLORA_CHOICE_OFF;
        s.model.cache = kind == 2 || kind == 5 ? QLORA_CHOICE_ON : QLORA_CHOICE_OFF;
        s.model.tile = kind == 1 ? 8 : 0; // runs that go across tiles
        s.model.optimizer = kind == 3 ? QLORA_OPTIMIZER_ADAMW_8BIT : QLORA_OPTIMIZER_ADAMW;
        ASSERT(jobs_together(&s, WITHOUT, together));
        // Only adapters that stand side by side have graphs.
        ASSERT_EQ(!on_cpu(machine) && kind != 4, together[0].info[JOB_STEPS - 1].graphs);
        for (int i = 0; i < JOBS; i++) {
            job_outcome alone;
            ASSERT(job_alone(&s, i, &alone));
            // Tiles cut the rows of a job elsewhere, and so the sums over them.
            bool bits = on_cpu(machine) && kind != 1;
            ASSERT(bits ? job_same(&together[i], &alone) : job_close(&together[i], &alone));
            free(alone.values);
        }
        jobs_free(together);
    }
    PASS();
}

// Other tokens of one job change that job and no other, to the bit.
TEST others_do_not_matter(const test_machine* machine) {
    setup s = jobs_setup(machine);
    if (test_has_bf16(machine)) {
        s.model.mode = QLORA_MODE_BF16;
        s.model.cache = on_cpu(machine) ? s.model.cache : QLORA_CHOICE_ON;
    }
    job_outcome usual[JOBS];
    job_outcome other[JOBS];
    ASSERT(jobs_together(&s, WITHOUT, usual));
    for (int changed = 0; changed < (on_cpu(machine) ? JOBS : 1); changed++) {
        ASSERT(jobs_together(&s, changed, other));
        for (int i = 0; i < JOBS; i++) {
            ASSERT_EQ(i != changed, job_same(&usual[i], &other[i]));
        }
        jobs_free(other);
    }
    jobs_free(usual);
    PASS();
}

// Writes values with which the activations of a job overflow.
static bool job_spoil(jobs* j, int job) {
    bool ok = qlora_adapter_select(j->r.model, job) == QLORA_OK;
    for (int64_t i = 0; ok && i < model_parameters(j->r.model); i++) {
        qlora_parameter_info p;
        float values[8192];
        ok = qlora_parameter_query(j->r.model, i, &p) == QLORA_OK && p.rows * p.cols <= 8192;
        for (int64_t k = 0; ok && k < p.rows * p.cols; k++) {
            values[k] = k % 2 == 0 ? 1e30f : -1e30f;
        }
        ok = ok && (strstr(p.name, "lora_B") == NULL ||
                    qlora_parameter_write(j->r.model, i, values) == QLORA_OK);
    }
    return ok && qlora_adapter_select(j->r.model, 0) == QLORA_OK;
}

// A job whose values are not finite is skipped, and the others do not notice.
TEST overflow_stays_at_home(const test_machine* machine) {
    setup s = jobs_setup(machine);
    job_outcome usual[JOBS];
    job_outcome other[JOBS];
    jobs j;
    if (!on_cpu(machine) && test_has_bf16(machine)) {
        s.model.mode = QLORA_MODE_BF16;
        s.model.cache = QLORA_CHOICE_ON;
    }
    ASSERT(jobs_together(&s, WITHOUT, usual));
    ASSERT(jobs_open(&j, &s, WITHOUT));
    ASSERT(job_spoil(&j, 1));
    memset(other, 0, sizeof other);
    for (int step = 0; step < JOB_STEPS; step++) {
        ASSERT(jobs_step(&j, step, WITHOUT, other));
        ASSERT(other[1].info[step].last_skipped);
    }
    for (int i = 0; i < JOBS; i++) {
        ASSERT(job_values(&j, i, &other[i]));
        ASSERT_EQ(i != 1, job_same(&usual[i], &other[i]));
    }
    ASSERT(jobs_close(&j, &s));
    jobs_free(usual);
    jobs_free(other);
    PASS();
}

// Other tokens of one job may belong to another one just as well: a graph serves any assignment.
TEST owners_are_data(const test_machine* machine) {
    setup s = jobs_setup(machine);
    job_outcome out[2];
    memset(out, 0, sizeof out);
    for (int swapped = 0; swapped < 2 && !on_cpu(machine); swapped++) {
        jobs j;
        ASSERT(jobs_open(&j, &s, WITHOUT));
        for (int step = 0; step < JOB_STEPS; step++) {
            job_step t;
            qlora_train_info infos[JOBS];
            job_step_make(&t, step, WITHOUT, WITHOUT);
            for (int m = 0; m < t.count && swapped == 1; m++) {
                for (int64_t k = 0; k < t.batches[m].count; k++) {
                    t.adapters[m][k] = t.adapters[m][k] == 0 ? 0 : 3 - t.adapters[m][k];
                }
            }
            ASSERT_OK(j.r, qlora_train_step_each(j.trainers, JOBS, t.batches, t.count, infos));
            out[swapped].info[step] = infos[0];
        }
        ASSERT(job_values(&j, 0, &out[swapped]));
        ASSERT(jobs_close(&j, &s));
    }
    ASSERT(on_cpu(machine) || job_same(&out[0], &out[1]));
    free(out[0].values);
    free(out[1].values);
    PASS();
}

// Evaluation by sequence, by selected adapter, and of the base.
TEST evaluates_by_adapter(const test_machine* machine) {
    setup s = jobs_setup(machine);
    jobs j;
    job_step t;
    double mixed[MAX_SEQUENCES];
    ASSERT(jobs_open(&j, &s, WITHOUT));
    job_step_make(&t, 0, WITHOUT, WITHOUT);
    qlora_batch all = t.batches[0];
    ASSERT_OK(j.r, qlora_eval_sequences(j.r.model, &all, mixed));
    int differ = 0;
    for (int k = 0; k < JOBS; k++) {
        double own[MAX_SEQUENCES];
        qlora_batch plain = all;
        plain.adapters = NULL;
        ASSERT_OK(j.r, qlora_adapter_select(j.r.model, k));
        ASSERT_OK(j.r, qlora_eval_sequences(j.r.model, &plain, own));
        for (int64_t i = 0; i < all.count; i++) {
            bool same = fabs(own[i] - mixed[i]) < 1e-5 * fabs(mixed[i]);
            ASSERT(same || all.adapters[i] != k);
            differ += same ? 0 : 1;
        }
    }
    ASSERT_EQ_FMT((int)(2 * all.count), differ, "%d");
    ASSERT(jobs_close(&j, &s));
    PASS();
}

// Each adapter is saved, loaded and renewed by its index; the others stay.
TEST adapters_have_files(const test_machine* machine) {
    setup s = jobs_setup(machine);
    jobs j;
    job_outcome before[JOBS];
    job_outcome after[JOBS];
    char dir[] = "build/test-jobs-XXXXXX";
    ASSERT(mkdtemp(dir) != NULL);
    memset(before, 0, sizeof before);
    memset(after, 0, sizeof after);
    ASSERT(jobs_open(&j, &s, WITHOUT));
    ASSERT(jobs_step(&j, 0, WITHOUT, before));
    ASSERT_OK(j.r, qlora_adapter_select(j.r.model, 1));
    ASSERT_OK(j.r, qlora_adapter_save(j.r.model, dir, NULL));
    ASSERT_OK(j.r, qlora_adapter_select(j.r.model, 2)); // another rank
    ASSERT_EQ(QLORA_ERR_FORMAT, qlora_adapter_load(j.r.model, dir, NULL));
    for (int i = 0; i < JOBS; i++) {
        ASSERT(job_values(&j, i, &before[i]));
    }
    ASSERT_OK(j.r, qlora_adapter_select(j.r.model, 1));
    ASSERT_EQ(QLORA_ERR_STATE, qlora_adapter_renew(j.r.model, 7)); // it has a trainer
    ASSERT_OK(j.r, qlora_trainer_destroy(j.trainers[1]));
    j.trainers[1] = NULL;
    ASSERT_OK(j.r, qlora_adapter_renew(j.r.model, 7));
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < JOBS; i++) {
            ASSERT(job_values(&j, i, &after[i]));
            bool same =
                memcmp(before[i].values, after[i].values, before[i].count * sizeof(float)) == 0;
            ASSERT_EQ(i != 1 || round == 1, same);
        }
        ASSERT_OK(j.r, qlora_adapter_select(j.r.model, 1));
        ASSERT_OK(j.r, qlora_adapter_load(j.r.model, dir, NULL));
    }
    ASSERT(jobs_close(&j, &s));
    // The file is that of a model with one adapter.
    setup one = s;
    one.model.slots = NULL;
    one.model.slot_count = 0;
    one.model.adapter = dir;
    one.model.purpose = QLORA_PURPOSE_EVALUATE;
    rig r;
    size_t count = 0;
    ASSERT(rig_open(&r, &one));
    float* values = rig_read(&r, false, &count);
    ASSERT(values != NULL && count == before[1].count);
    ASSERT_MEM_EQ(before[1].values, values, count * sizeof *values);
    free(values);
    ASSERT(rig_close(&r, &one));
    jobs_free(before);
    jobs_free(after);
    static const char* const files[] = {"adapter_model.safetensors", "adapter_config.json"};
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        char path[128];
        snprintf(path, sizeof path, "%s/%s", dir, files[i]);
        ASSERT_EQ(0, remove(path));
    }
    ASSERT_EQ(0, rmdir(dir));
    PASS();
}

// The magnitudes of a renewed adapter are those of the base, so that it changes nothing.
TEST renewed_magnitudes(const test_machine* machine) {
    setup s = setup_make(machine);
    rig r;
    data d;
    double renewed[3];
    double base[3];
    s.model.dropout = 0.0f;
    s.model.train_norms = false;
    s.model.dora = true;
    data_make(&d, "renewed", run_lengths[0], 3);
    ASSERT(rig_open(&r, &s));
    ASSERT_OK(r, qlora_train_step(r.trainer, &d.batch, 1, NULL));
    ASSERT_OK(r, qlora_trainer_destroy(r.trainer));
    r.trainer = NULL;
    ASSERT_OK(r, qlora_adapter_renew(r.model, 7));
    ASSERT_OK(r, qlora_eval_sequences(r.model, &d.batch, renewed));
    ASSERT_OK(r, qlora_adapter_use(r.model, false));
    ASSERT_OK(r, qlora_eval_sequences(r.model, &d.batch, base));
    ASSERT_CLOSE_DOUBLE(base, renewed, 3, 1e-5, 1e-5);
    ASSERT(rig_close(&r, &s));
    PASS();
}

static void checkpoint_remove(const char* dir) {
    static const char* const files[] = {"step-1/adapter_model.safetensors",
                                        "step-1/adapter_config.json", "step-1/state.safetensors",
                                        "step-1", "latest"};
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        char path[256];
        snprintf(path, sizeof path, "%s/%s", dir, files[i]);
        remove(path);
    }
    rmdir(dir);
}

// Every trainer has checkpoints of its own; a run that stops and goes on gives the same bits.
TEST jobs_resume(const test_machine* machine) {
    setup s = jobs_setup(machine);
    char top[] = "build/test-jobs-XXXXXX";
    char dirs[JOBS][64];
    job_outcome want[JOBS];
    job_outcome got[JOBS];
    jobs j;
    ASSERT(mkdtemp(top) != NULL);
    ASSERT(jobs_together(&s, WITHOUT, want));
    memset(got, 0, sizeof got);
    for (int run = 0; run < 2; run++) {
        ASSERT(jobs_open(&j, &s, WITHOUT));
        for (int i = 0; i < JOBS; i++) {
            snprintf(dirs[i], sizeof dirs[i], "%s/%d", top, i);
            ASSERT_OK(j.r, run == 0 ? QLORA_OK
                                    : qlora_checkpoint_load(j.trainers[i], dirs[i], NULL, NULL));
        }
        for (int step = run; step < (run == 0 ? 1 : JOB_STEPS); step++) {
            ASSERT(jobs_step(&j, step, WITHOUT, got));
        }
        for (int i = 0; i < JOBS; i++) {
            ASSERT_OK(j.r,
                      run == 1 ? QLORA_OK : qlora_checkpoint_save(j.trainers[i], dirs[i], NULL, 0));
            ASSERT(job_values(&j, i, &got[i]));
        }
        ASSERT(jobs_close(&j, &s));
    }
    for (int i = 0; i < JOBS; i++) {
        ASSERT(job_same(&want[i], &got[i]));
        checkpoint_remove(dirs[i]);
    }
    jobs_free(want);
    jobs_free(got);
    ASSERT_EQ(0, rmdir(top));
    PASS();
}

#define ASSERT_REFUSED(R, RESULT, WORD, CALL)                                                      \
    do {                                                                                           \
        ASSERT_EQm(WORD, (RESULT), (CALL));                                                        \
        ASSERTm(qlora_last_error((R).ctx), strstr(qlora_last_error((R).ctx), (WORD)) != NULL);     \
    } while (0)

// A micro-batch in slices keeps the activations of the model from other trainers, also from those
// with a step of their own in slices, and whatever becomes of them.
TEST jobs_wait_for_a_slice(const test_machine* machine) {
    setup s = jobs_setup(machine);
    jobs j;
    job_step t;
    qlora_eval_info eval;
    bool done = false;
    ASSERT(jobs_open(&j, &s, WITHOUT));
    job_step_make(&t, 0, WITHOUT, WITHOUT);
    t.batches[0].adapters = NULL;
    for (int i = 0; i < JOBS; i++) {
        ASSERT_OK(j.r, qlora_train_begin(j.trainers[i], t.batches, 1));
    }
    ASSERT_OK(j.r, qlora_train_slice(j.trainers[0], 0.0, &done));
    for (int i = 1; i < JOBS; i++) {
        ASSERT_REFUSED(j.r, QLORA_ERR_STATE, "another trainer",
                       qlora_train_slice(j.trainers[i], 0.0, &done));
        ASSERT_OK(j.r, i == 1 ? qlora_train_cancel(j.trainers[i])
                              : qlora_trainer_destroy(j.trainers[i]));
        ASSERT_REFUSED(j.r, QLORA_ERR_STATE, "in the middle of",
                       qlora_eval(j.r.model, t.batches, &eval));
    }
    j.trainers[2] = NULL;
    while (!done) {
        ASSERT_OK(j.r, qlora_train_slice(j.trainers[0], 1.0, &done));
    }
    ASSERT_OK(j.r, qlora_eval(j.r.model, t.batches, &eval));
    ASSERT(jobs_close(&j, &s));
    PASS();
}

// What is not possible together is refused by name, and changes nothing.
TEST jobs_are_checked(const test_machine* machine) {
    setup s = jobs_setup(machine);
    jobs j;
    job_step t;
    qlora_model* model = NULL;
    qlora_trainer* trainer = NULL;
    static const char* const words[] = {"dropout",       "dora",         "train_norms",
                                        "adapter",       "save_modules", "slot_count",
                                        "slots is NULL", "slots[1].rank"};
    ASSERT(jobs_open(&j, &s, WITHOUT));
    for (int i = 0; i < (int)(sizeof words / sizeof words[0]); i++) {
        qlora_adapter_slot wrong[2] = {{1, 0.0f, 0}, {i == 7 ? -1 : 1, 0.0f, 0}};
        qlora_model_desc d = s.model;
        d.config = &s.config;
        d.dropout = i == 0 ? 0.1f : 0.0f;
        d.dora = i == 1;
        d.train_norms = i == 2;
        d.adapter = i == 3 ? "nowhere" : NULL;
        d.save_modules = i == 4 ? QLORA_SAVE_HEAD : 0;
        d.slot_count = i == 5 ? 65 : 2;
        d.slots = i == 6 ? NULL : wrong;
        ASSERT(qlora_model_open(j.r.ctx, &d, &model) != QLORA_OK);
        ASSERTm(qlora_last_error(j.r.ctx), strstr(qlora_last_error(j.r.ctx), words[i]) != NULL);
    }
    qlora_train_desc d = job_desc(&s, 0);
    ASSERT_REFUSED(j.r, QLORA_ERR_STATE, "already", qlora_trainer_create(j.r.model, &d, &trainer));
    d.adapter = JOBS;
    ASSERT_REFUSED(j.r, QLORA_ERR_ARGUMENT, "desc.adapter",
                   qlora_trainer_create(j.r.model, &d, &trainer));
    ASSERT_REFUSED(j.r, QLORA_ERR_ARGUMENT, "index", qlora_adapter_select(j.r.model, JOBS));
    job_step_make(&t, 0, WITHOUT, WITHOUT);
    qlora_trainer* twice[2] = {j.trainers[0], j.trainers[0]};
    ASSERT_REFUSED(j.r, QLORA_ERR_ARGUMENT, "twice",
                   qlora_train_step_each(twice, 2, t.batches, t.count, NULL));
    ASSERT_REFUSED(j.r, QLORA_ERR_ARGUMENT, "none of the trainers",
                   qlora_train_step_each(j.trainers, 2, t.batches, t.count, NULL));
    ASSERT_REFUSED(j.r, QLORA_ERR_ARGUMENT, "qlora_train_step_each",
                   qlora_train_step(j.trainers[0], t.batches, t.count, NULL));
    qlora_batch plain = t.batches[0];
    plain.adapters = NULL;
    ASSERT_REFUSED(j.r, QLORA_ERR_ARGUMENT, "adapters is NULL",
                   qlora_train_step_each(j.trainers, JOBS, &plain, 1, NULL));
    t.adapters[0][0] = JOBS;
    ASSERT_REFUSED(j.r, QLORA_ERR_ARGUMENT, "has adapter 3",
                   qlora_train_step_each(j.trainers, JOBS, t.batches, t.count, NULL));
    t.adapters[0][0] = 0;
    for (int i = 0; i < 4; i++) { // job 1 without a label
        t.d[0].labels[8 + i] = -100;
    }
    ASSERT_REFUSED(j.r, QLORA_ERR_ARGUMENT, "total_labels",
                   qlora_train_step_each(j.trainers, JOBS, t.batches, t.count, NULL));
    ASSERT_OK(j.r, qlora_train_micro(j.trainers[0], &plain, 10.0));
    ASSERT_REFUSED(j.r, QLORA_ERR_STATE, "in progress",
                   qlora_train_step_each(j.trainers, JOBS, t.batches, t.count, NULL));
    ASSERT_OK(j.r, qlora_train_cancel(j.trainers[0]));
    ASSERT_OK(j.r, qlora_trainer_destroy(j.trainers[2]));
    j.trainers[2] = NULL;
    d = job_desc(&s, 2);
    d.adapter = 2;
    d.method = QLORA_METHOD_DPO;
    ASSERT_REFUSED(j.r, QLORA_ERR_UNSUPPORTED, "method",
                   qlora_trainer_create(j.r.model, &d, &trainer));
    d.method = QLORA_METHOD_SFT;
    d.neftune = 5.0;
    ASSERT_REFUSED(j.r, QLORA_ERR_UNSUPPORTED, "neftune",
                   qlora_trainer_create(j.r.model, &d, &trainer));
    d.neftune = 0.0;
    d.eager = true;
    ASSERT_OK(j.r, qlora_trainer_create(j.r.model, &d, &j.trainers[2]));
    ASSERT_REFUSED(j.r, QLORA_ERR_ARGUMENT, "trainers[2] has another desc.eager",
                   qlora_train_step_each(j.trainers, JOBS, t.batches, t.count, NULL));
    ASSERT_OK(j.r, qlora_trainer_destroy(j.trainers[2]));
    j.trainers[2] = NULL;
    d.eager = false;
    d.require_graph = true;
    if (on_cpu(machine)) {
        ASSERT_REFUSED(j.r, QLORA_ERR_UNSUPPORTED, "require_graph",
                       qlora_trainer_create(j.r.model, &d, &trainer));
    }
    ASSERT(jobs_close(&j, &s));
    PASS();
}

// A text is generated with the adapter that was selected when it began.
// How many rows a product has decides which kernel computes it: all are there after opening.
TEST prompts_of_any_length(const test_machine* machine) {
    static const int64_t lengths[] = {1, 7, 20, 40};
    setup s = jobs_setup(machine);
    int32_t prompt[40];
    for (int i = 0; i < 40; i++) {
        prompt[i] = i % 7;
    }
    s.model.mode = test_has_bf16(machine) ? QLORA_MODE_BF16 : QLORA_MODE_F32;
    s.model.cache = QLORA_CHOICE_OFF;
    s.model.generate_tokens = 48;
    jobs j;
    ASSERT(jobs_open(&j, &s, WITHOUT));
    for (int i = 0; i < 4; i++) {
        qlora_generation* g = NULL;
        qlora_generate_desc d;
        int32_t token = 0;
        bool stopped = false;
        memset(&d, 0, sizeof d);
        d.prompt = prompt;
        d.prompt_tokens = lengths[i];
        ASSERT_OK(j.r, qlora_adapter_select(j.r.model, i % JOBS));
        ASSERT_OK(j.r, qlora_generate_begin(j.r.model, &d, &g));
        ASSERT_OK(j.r, qlora_generate_next(g, &token, &stopped));
        ASSERT_OK(j.r, qlora_generate_end(g));
    }
    ASSERT(jobs_close(&j, &s));
    PASS();
}

TEST generates_by_adapter(const test_machine* machine) {
    setup s = jobs_setup(machine);
    static const int32_t prompt[] = {3, 1, 4, 1, 5};
    double logprobs[JOBS + 1];
    s.model.generate_tokens = 16;
    for (int i = 0; i < JOBS; i++) {
        s.model.cache = i == 0 ? QLORA_CHOICE_OFF : QLORA_CHOICE_ON;
        s.model.base = i == 2 ? QLORA_BASE_FP8 : QLORA_BASE_NF4;
        for (int alone = 0; alone < 2; alone++) {
            jobs j;
            qlora_generation* g = NULL;
            qlora_generate_desc d;
            int32_t token = 0;
            bool stopped = false;
            memset(&d, 0, sizeof d);
            d.prompt = prompt;
            d.prompt_tokens = 5;
            ASSERT(jobs_open(&j, &s, alone == 1 ? i : WITHOUT));
            ASSERT_OK(j.r, qlora_adapter_select(j.r.model, alone == 1 ? 0 : i));
            ASSERT_OK(j.r, qlora_generate_begin(j.r.model, &d, &g));
            ASSERT_OK(j.r, qlora_generate_next(g, &token, &stopped));
            if (alone == 0) {
                ASSERT_REFUSED(j.r, QLORA_ERR_STATE, "qlora_generate_end",
                               qlora_adapter_select(j.r.model, (i + 1) % JOBS));
                job_outcome unused[JOBS]; // training between two tokens
                ASSERT(jobs_step(&j, 0, WITHOUT, unused));
            }
            ASSERT_OK(j.r, qlora_generate_logprob(g, &logprobs[alone == 1 ? JOBS : i]));
            ASSERT_OK(j.r, qlora_generate_end(g));
            ASSERT(jobs_close(&j, &s));
        }
        ASSERT(fabs(logprobs[i] - logprobs[JOBS]) < 1e-5);
    }
    ASSERT(fabs(logprobs[0] - logprobs[1]) > 1e-3 && fabs(logprobs[1] - logprobs[2]) > 1e-3);
    PASS();
}

// Texts of different adapters in one call have the tokens of texts of the selected adapter.
TEST texts_by_adapter(const test_machine* machine) {
    setup s = jobs_setup(machine);
    static const int32_t prompt[] = {3, 1, 4, 1, 5};
    enum { TEXTS = JOBS + 1, FRESH = 3 }; // the last one has none
    s.model.generate_tokens = 16;
    s.model.generate_sequences = TEXTS;
    for (int cached = 0; cached < 2; cached++) {
        jobs j;
        qlora_generation* list[TEXTS];
        int32_t alone[TEXTS][FRESH];
        double logprobs[TEXTS][FRESH];
        qlora_generate_desc d;
        bool stopped[TEXTS];
        s.model.cache = cached == 1 ? QLORA_CHOICE_ON : QLORA_CHOICE_OFF;
        memset(&d, 0, sizeof d);
        d.prompt = prompt;
        d.prompt_tokens = 5;
        d.temperature = 1.0f;
        ASSERT(jobs_open(&j, &s, WITHOUT));
        for (int i = 0; i < TEXTS; i++) {
            ASSERT_OK(j.r, qlora_adapter_select(j.r.model, i % JOBS));
            ASSERT_OK(j.r, qlora_adapter_use(j.r.model, i < JOBS));
            ASSERT_OK(j.r, qlora_generate_begin(j.r.model, &d, &list[0]));
            for (int n = 0; n < FRESH; n++) {
                ASSERT_OK(j.r, qlora_generate_next(list[0], &alone[i][n], stopped));
                ASSERT_OK(j.r, qlora_generate_logprob(list[0], &logprobs[i][n]));
            }
            ASSERT_OK(j.r, qlora_generate_end(list[0]));
        }
        ASSERT_OK(j.r, qlora_adapter_use(j.r.model, true));
        ASSERT_OK(j.r, qlora_adapter_select(j.r.model, 1));
        for (int i = 0; i < TEXTS; i++) {
            d.adapters = i < JOBS ? QLORA_CHOICE_ON : QLORA_CHOICE_OFF;
            d.adapter = i < JOBS ? i : 0;
            ASSERT_OK(j.r, qlora_generate_begin(j.r.model, &d, &list[i]));
        }
        for (int n = 0; n < FRESH; n++) {
            int32_t tokens[TEXTS];
            // None of these texts uses the selected adapter, so another one can be selected.
            ASSERT_OK(j.r, qlora_adapter_select(j.r.model, n % JOBS));
            ASSERT_OK(j.r, qlora_generate_next_each(list, TEXTS, tokens, stopped));
            for (int i = 0; i < TEXTS; i++) {
                double logprob = 0.0;
                ASSERT_OK(j.r, qlora_generate_logprob(list[i], &logprob));
                ASSERT_EQ(alone[i][n], tokens[i]);
                ASSERT_MEM_EQ(&logprobs[i][n], &logprob, sizeof logprob);
            }
        }
        for (int i = 0; i < TEXTS; i++) {
            for (int k = 0; k < i; k++) {
                ASSERT(memcmp(&logprobs[i][0], &logprobs[k][0], sizeof logprobs[0][0]) != 0);
            }
            ASSERT_OK(j.r, qlora_generate_end(list[i]));
        }
        d.adapters = QLORA_CHOICE_ON;
        d.adapter = JOBS;
        ASSERT_REFUSED(j.r, QLORA_ERR_ARGUMENT, "desc.adapter",
                       qlora_generate_begin(j.r.model, &d, &list[0]));
        ASSERT(jobs_close(&j, &s));
    }
    PASS();
}

SUITE(jobs_suite) {
    RUN_ON(TEST_ONE_EACH, together_is_as_alone);
    RUN_ON(TEST_ONE_EACH, others_do_not_matter);
    RUN_ON(TEST_ONE_EACH, overflow_stays_at_home);
    RUN_ON(TEST_ONE_EACH, owners_are_data);
    RUN_ON(TEST_ONE_EACH, evaluates_by_adapter);
    RUN_ON(TEST_ONE_EACH, adapters_have_files);
    RUN_ON(TEST_ONE_EACH, renewed_magnitudes);
    RUN_ON(TEST_ONE_EACH, jobs_resume);
    RUN_ON(TEST_ONE_EACH, jobs_wait_for_a_slice);
    RUN_ON(TEST_ONE_EACH, jobs_are_checked);
    RUN_ON(TEST_ONE_EACH, prompts_of_any_length);
    RUN_ON(TEST_ONE_EACH, generates_by_adapter);
    RUN_ON(TEST_ONE_EACH, texts_by_adapter);
}
