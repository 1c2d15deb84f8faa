// comm.c - several processes that train together, as threads: the same bits for any number of them.
#define _POSIX_C_SOURCE 200809L // mkdtemp, rmdir
#define _XOPEN_SOURCE 700
#include "comm_rig.h"

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef _WIN32
#define REMOVE_FOLDER "rmdir /s /q \"%s\""
#else
#define REMOVE_FOLDER "rm -rf '%s'"
#endif

enum { BATCHES = 12, ALL_STEPS = 20, RAGGED = 5, CUT = 7 };

static int comm_steps(void) {
    return test_brief() ? 3 : ALL_STEPS;
}

// One process of a run.
typedef struct comm_job {
    comm_end end;
    setup s;
    int from; // steps to train
    int to;
    const char* load; // checkpoint folders, or NULL
    const char* save;
    bool slices;
    bool ok;
    qlora_result result; // of the call that failed
    bool slow_had_it;    // the slow rank had had its first messages by then
    char error[512];
    qlora_train_info info[ALL_STEPS];
    float* values;
    size_t count;
} comm_job;

static bool comm_fail(comm_job* j, rig* r, qlora_result result) {
    j->result = result;
    pthread_mutex_lock(&j->end.post->lock);
    j->slow_had_it = j->end.post->slow_done;
    pthread_mutex_unlock(&j->end.post->lock);
    snprintf(j->error, sizeof j->error, "%s", r->ctx != NULL ? qlora_last_error(r->ctx) : "");
    comm_break(j->end.post, j->end.rank);
    return false;
}

static void comm_batches(const comm_job* j, int step, data* d, qlora_batch* batches, int* count) {
    static const int32_t roles[3][2] = {{1, 0}, {0, 1}, {2, 2}};
    qlora_method method = j->s.train.method;
    *count = step == j->to - 1 && j->to == comm_steps() ? RAGGED : BATCHES;
    int leaves = *count;
    *count += method == QLORA_METHOD_KTO ? leaves : 0; // the mismatched ones come first
    for (int i = 0; i < *count; i++) {
        char name[32];
        int32_t lengths[2] = {5 + (i * 7 + step) % 6, 4 + (i * 5 + step) % 7};
        snprintf(name, sizeof name, "comm %d, %d", step, i);
        data_make(&d[i], name, lengths, 2);
        d[i].labels[2] = d[i].ids[2]; // at least one in each sequence
        d[i].labels[lengths[0] + 2] = d[i].ids[lengths[0] + 2];
        d[i].sequences[0] = 2 * i;
        d[i].sequences[1] = 2 * i + 1;
        batches[i] = d[i].batch;
        if (method == QLORA_METHOD_KTO) {
            batches[i].roles = roles[i < leaves ? 2 : i % 2];
        }
    }
}

static qlora_result comm_step(comm_job* j, rig* r, int step) {
    static const int room = 2 * BATCHES;
    data* d = (data*)malloc((size_t)room * sizeof *d);
    qlora_batch batches[2 * BATCHES];
    int count = 0;
    bool done = false;
    comm_batches(j, step, d, batches, &count);
    qlora_result result = QLORA_OK;
    if (j->slices) {
        result = qlora_train_begin(r->trainer, batches, count);
        while (result == QLORA_OK && !done) {
            result = qlora_train_slice(r->trainer, 5.0, &done);
        }
        result = result == QLORA_OK ? qlora_train_query(r->trainer, &j->info[step]) : result;
    } else {
        result = qlora_train_step(r->trainer, batches, count, &j->info[step]);
    }
    free(d);
    return result;
}

static bool comm_train(comm_job* j, rig* r) {
    qlora_comm comm = comm_of(&j->end);
    qlora_model_desc model = j->s.model;
    qlora_train_desc train = j->s.train;
    model.config = &j->s.config;
    train.comm = &comm;
    qlora_result result = qlora_model_open(r->ctx, &model, &r->model);
    result = result == QLORA_OK ? qlora_trainer_create(r->model, &train, &r->trainer) : result;
    if (result == QLORA_OK && j->load != NULL) {
        result = qlora_checkpoint_load(r->trainer, j->load, NULL, NULL);
    } else if (result == QLORA_OK && !rig_stir(r)) {
        return comm_fail(j, r, QLORA_ERR_STATE);
    }
    for (int step = j->from; step < j->to && result == QLORA_OK; step++) {
        result = comm_step(j, r, step);
    }
    if (result == QLORA_OK && j->save != NULL && j->end.rank == 0) {
        result = qlora_checkpoint_save(r->trainer, j->save, NULL, 0);
    }
    if (result != QLORA_OK) {
        return comm_fail(j, r, result);
    }
    j->values = rig_read(r, false, &j->count);
    return j->values != NULL;
}

static void* comm_run(void* argument) {
    comm_job* j = (comm_job*)argument;
    rig r;
    qlora_ctx_desc d;
    memset(&r, 0, sizeof r);
    memset(&d, 0, sizeof d);
    d.require_backend = QLORA_BACKEND_CPU;
    d.threads = 1;
    j->ok = qlora_ctx_create(&d, &r.ctx) == QLORA_OK && comm_train(j, &r);
    j->ok = qlora_trainer_destroy(r.trainer) == QLORA_OK && j->ok;
    j->ok = qlora_model_close(r.model) == QLORA_OK && j->ok;
    j->ok = qlora_ctx_destroy(r.ctx) == QLORA_OK && j->ok;
    return NULL;
}

// Runs `world` processes with the same job; change may edit the one of a rank.
static bool comm_together(const comm_job* what, int32_t world, comm_post* post, comm_job* jobs,
                          void (*change)(comm_job* job)) {
    pthread_t threads[COMM_WORLD];
    bool ok = true;
    for (int32_t i = 0; i < world; i++) {
        jobs[i] = *what;
        jobs[i].end.post = post;
        jobs[i].end.rank = i;
        if (change != NULL) {
            change(&jobs[i]);
        }
        ok = pthread_create(&threads[i], NULL, comm_run, &jobs[i]) == 0 && ok;
    }
    for (int32_t i = 0; i < world; i++) {
        pthread_join(threads[i], NULL);
        ok = jobs[i].ok && ok;
    }
    return ok;
}

static comm_job* comm_jobs(void) {
    return (comm_job*)calloc(COMM_WORLD, sizeof(comm_job));
}

static void comm_free(comm_job* jobs) {
    for (int i = 0; i < COMM_WORLD; i++) {
        free(jobs[i].values);
        jobs[i].values = NULL;
    }
}

static comm_job comm_what(void) {
    comm_job j;
    test_machine nowhere;
    memset(&j, 0, sizeof j);
    memset(&nowhere, 0, sizeof nowhere);
    j.s = setup_make(&nowhere);
    j.to = comm_steps();
    return j;
}

static bool comm_same(const comm_job* a, const comm_job* b) {
    for (int step = b->from; step < b->to; step++) {
        const qlora_train_info* x = &a->info[step];
        const qlora_train_info* y = &b->info[step];
        if (memcmp(&x->loss, &y->loss, sizeof x->loss) != 0 || x->tokens != y->tokens ||
            memcmp(&x->grad_norm, &y->grad_norm, sizeof x->grad_norm) != 0 ||
            memcmp(&x->rewards_chosen, &y->rewards_chosen, sizeof x->rewards_chosen) != 0 ||
            memcmp(&x->kl_raw, &y->kl_raw, sizeof x->kl_raw) != 0 ||
            memcmp(&x->router_aux_loss, &y->router_aux_loss, sizeof x->router_aux_loss) != 0 ||
            x->labels < y->labels ||
            x->labels > y->labels || x->step != y->step) {
            fprintf(stderr, "step %d: loss %.17g and %.17g, norm %.9g and %.9g\n", step, x->loss,
                    y->loss, (double)x->grad_norm, (double)y->grad_norm);
            return false;
        }
    }
    return a->count > 0 && a->count == b->count &&
           memcmp(a->values, b->values, a->count * sizeof *a->values) == 0;
}

static const int32_t comm_worlds[] = {2, 3, 4, 6, 8};
enum { WORLDS = sizeof comm_worlds / sizeof comm_worlds[0] };

// Worlds of several sizes give the bits of one process, also by slices and in a ragged step.
TEST any_world_gives_the_same_bits(void) {
    comm_job what = comm_what();
    comm_job* one = comm_jobs();
    comm_job* jobs = comm_jobs();
    comm_post post;
    comm_post_open(&post, 1);
    ASSERT(comm_together(&what, 1, &post, one, NULL));
    comm_post_close(&post);
    ASSERT_EQ_FMT(0, (int)one[0].info[0].sent, "%d");
    for (int w = 0; w < WORLDS; w++) {
        int32_t world = comm_worlds[w];
        what.slices = w % 2 == 1;
        comm_post_open(&post, world);
        bool ok = comm_together(&what, world, &post, jobs, NULL);
        for (int32_t i = 0; i < world; i++) {
            ASSERTm(jobs[i].error, ok);
            ASSERT(comm_same(&one[0], &jobs[i]));
            ASSERT(jobs[i].info[0].sent > 0);
        }
        ASSERT_EQ_FMT(0, (int)(post.broken + 1), "%d");
        comm_post_close(&post);
        comm_free(jobs);
    }
    comm_free(one);
    free(one);
    free(jobs);
    PASS();
}

// A mixture of experts with the load-balancing loss.
static void comm_experts(setup* s) {
    s->config.family = QLORA_FAMILY_QWEN3_MOE;
    s->config.experts = 5;
    s->config.experts_per_token = 2;
    s->config.expert_intermediate = 24;
    s->model.dropout = 0.0f;
    s->train.router_aux_loss = 0.3;
}

// The sums of preferences follow the same tree, and so does the load-balancing loss.
TEST any_world_gives_the_same_preferences(void) {
    static const qlora_method methods[] = {QLORA_METHOD_DPO, QLORA_METHOD_KTO, QLORA_METHOD_SFT,
                                           QLORA_METHOD_DPO, QLORA_METHOD_KTO};
    enum { METHODS = sizeof methods / sizeof methods[0], PLAIN = 2 };
    comm_job* one = comm_jobs();
    comm_job* jobs = comm_jobs();
    for (int i = 0; i < METHODS; i++) {
        comm_job what = comm_what();
        comm_post post;
        if (i >= PLAIN) {
            comm_experts(&what.s);
        }
        what.s.train.method = methods[i];
        what.s.model.train_norms = false;
        what.to = 2;
        comm_post_open(&post, 1);
        bool ok = comm_together(&what, 1, &post, one, NULL);
        ASSERTm(one[0].error, ok);
        comm_post_close(&post);
        comm_post_open(&post, 3);
        ok = comm_together(&what, 3, &post, jobs, NULL);
        ASSERTm(jobs[0].error, ok);
        comm_post_close(&post);
        for (int k = 0; k < 3; k++) {
            ASSERT(comm_same(&one[0], &jobs[k]));
        }
        ASSERT(one[0].info[1].accuracy >= 0.0 && one[0].info[1].loss > 0.0);
        ASSERT((one[0].info[1].router_aux_loss > 1.0) == (i >= PLAIN));
        comm_free(one);
        comm_free(jobs);
    }
    free(one);
    free(jobs);
    PASS();
}

// A run that is resumed with another number of processes ends with the same bits.
TEST a_run_goes_on_in_another_world(void) {
    static const int32_t pairs[][2] = {{1, 3}, {4, 1}, {2, 6}};
    int cut = comm_steps() > CUT ? CUT : 1;
    comm_job* one = comm_jobs();
    comm_job* jobs = comm_jobs();
    comm_post post;
    comm_job what = comm_what();
    what.to = comm_steps() > 9 ? 9 : comm_steps();
    comm_post_open(&post, 1);
    ASSERT(comm_together(&what, 1, &post, one, NULL));
    comm_post_close(&post);
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
        char dir[] = "build/test-comm-XXXXXX";
        char command[64];
        ASSERT(mkdtemp(dir) != NULL);
        comm_job first = what;
        first.to = cut;
        first.save = dir;
        comm_post_open(&post, pairs[i][0]);
        bool ok = comm_together(&first, pairs[i][0], &post, jobs, NULL);
        ASSERTm(jobs[0].error, ok);
        comm_post_close(&post);
        comm_free(jobs);
        comm_job second = what;
        second.from = cut;
        second.load = dir;
        comm_post_open(&post, pairs[i][1]);
        ok = comm_together(&second, pairs[i][1], &post, jobs, NULL);
        ASSERTm(jobs[0].error, ok);
        comm_post_close(&post);
        for (int32_t k = 0; k < pairs[i][1]; k++) {
            ASSERT(comm_same(&one[0], &jobs[k]));
        }
        comm_free(jobs);
        snprintf(command, sizeof command, REMOVE_FOLDER, dir);
        ASSERT_EQ(0, system(command));
    }
    comm_free(one);
    free(one);
    free(jobs);
    PASS();
}

static void other_lr(comm_job* j) {
    j->s.train.lr = j->end.rank == 2 ? 0.5 : j->s.train.lr;
}

static void other_weights(comm_job* j) {
    j->s.model.seed = j->end.rank == 1 ? 12 : j->s.model.seed;
}

static void other_chunk(comm_job* j) {
    j->s.model.head_chunk = j->end.rank == 2 ? 5 : j->s.model.head_chunk;
}

// Processes that do not match are refused, by all of them and by name. None leaves before the
// slowest has had its messages.
TEST ranks_that_differ_are_refused(void) {
    static const struct {
        void (*change)(comm_job* job);
        const char* said;
    } cases[] = {{other_lr, "rank 2 has lr = 0.5, but rank 0 has 0.01"},
                 {other_weights, "rank 1 has another base model than rank 0"},
                 {other_chunk, "rank 2 has head_chunk = 5, but rank 0 has 7"}};
    comm_job* jobs = comm_jobs();
    comm_job what = comm_what();
    what.to = 1;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        comm_post post;
        comm_post_open(&post, 3);
        post.slow_rank = (int)i;
        ASSERT(!comm_together(&what, 3, &post, jobs, cases[i].change));
        for (int k = 0; k < 3; k++) {
            ASSERT_EQ(QLORA_ERR_COMM, jobs[k].result);
            ASSERTm(jobs[k].error, strstr(jobs[k].error, cases[i].said) != NULL);
            ASSERT(jobs[k].slow_had_it);
        }
        comm_post_close(&post);
        comm_free(jobs);
    }
    free(jobs);
    PASS();
}

// Every exchange fails once: the process that failed says why, and none goes on or hangs.
TEST every_exchange_can_fail(void) {
    comm_job* jobs = comm_jobs();
    comm_job what = comm_what();
    what.to = 1;
    int at = 0;
    for (bool ok = false; !ok; at++) {
        comm_post post;
        comm_post_open(&post, 3);
        post.fails_rank = 1;
        post.fails_at = at;
        ok = comm_together(&what, 3, &post, jobs, NULL);
        if (!ok) {
            ASSERT_EQ(QLORA_ERR_COMM, jobs[1].result);
            ASSERTm(jobs[1].error, strstr(jobs[1].error, "rank 1 of 3: the cable is gone") != NULL);
        }
        // What the others still had to receive decides whether they notice in this exchange.
        for (int k = 0; k < 3 && !ok; k++) {
            ASSERT(k == 1 || jobs[k].ok || strstr(jobs[k].error, "rank 1 has ended") != NULL);
        }
        comm_post_close(&post);
        comm_free(jobs);
    }
    ASSERT(at > 3); // rendezvous, small numbers, slices, sums
    free(jobs);
    PASS();
}

// What a provider must have.
TEST providers_are_checked(void) {
    rig r;
    qlora_ctx_desc d;
    comm_post post;
    comm_end end = {&post, 0};
    setup s = comm_what().s;
    int32_t all[2] = {0, 0};
    int32_t mine = 7;
    memset(&r, 0, sizeof r);
    memset(&d, 0, sizeof d);
    d.require_backend = QLORA_BACKEND_CPU;
    d.threads = 1;
    ASSERT_EQ(QLORA_OK, qlora_ctx_create(&d, &r.ctx));
    s.model.config = &s.config;
    ASSERT_EQ(QLORA_OK, qlora_model_open(r.ctx, &s.model, &r.model));
    comm_post_open(&post, 2);
    qlora_comm comm = comm_of(&end);
    s.train.comm = &comm;
    comm.rank = 2;
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_trainer_create(r.model, &s.train, &r.trainer));
    ASSERT(strstr(qlora_last_error(r.ctx), "comm->rank is 2") != NULL);
    comm.rank = 0;
    comm.exchange = NULL;
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_trainer_create(r.model, &s.train, &r.trainer));
    ASSERT(strstr(qlora_last_error(r.ctx), "comm->exchange is NULL") != NULL);
    comm.exchange = comm_exchange;
    comm.device = true;
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_comm_gather(r.ctx, &comm, &mine, sizeof mine, all));
    ASSERT(strstr(qlora_last_error(r.ctx), "runs on the CPU") != NULL);
    comm.world = 1;
    ASSERT_EQ(QLORA_OK, qlora_comm_gather(r.ctx, &comm, &mine, sizeof mine, all));
    ASSERT_EQ_FMT(7, (int)all[0], "%d");
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_comm_gather(r.ctx, NULL, &mine, sizeof mine, all));
    comm_post_close(&post);
    ASSERT_EQ(QLORA_OK, qlora_model_close(r.model));
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(r.ctx));
    PASS();
}

// ---- MPI, without a launcher ----

typedef struct fake_mpi {
    void* opened;
    void (*fail)(const char* call, int code);
    void (*late)(int tests);
    int (*calls)(const char* call);
} fake_mpi;

// False where the fake library was not built.
static bool mpi_open(fake_mpi* m) {
    static const char* const names[3] = {"fakempi_fail", "fakempi_late", "fakempi_calls"};
    void* symbols[3] = {NULL, NULL, NULL};
    memset(m, 0, sizeof *m);
    m->opened = dlopen("libfakempi.so", RTLD_NOW | RTLD_LOCAL);
    for (int i = 0; i < 3 && m->opened != NULL; i++) {
        symbols[i] = dlsym(m->opened, names[i]);
    }
    memcpy(&m->fail, &symbols[0], sizeof symbols[0]);
    memcpy(&m->late, &symbols[1], sizeof symbols[1]);
    memcpy(&m->calls, &symbols[2], sizeof symbols[2]);
    return symbols[0] != NULL && symbols[1] != NULL && symbols[2] != NULL;
}

// Opens MPI, exchanges something and closes it. Returns the first failure.
static qlora_result mpi_use(qlora_ctx* ctx, double limit, bool ends, char* why, size_t size) {
    qlora_comm comm;
    int32_t all[2] = {0, 0};
    int32_t mine = 7;
    qlora_result r = qlora_comm_mpi("libfakempi.so", limit, &comm, why, size);
    if (r != QLORA_OK) {
        return r;
    }
    r = qlora_comm_gather(ctx, &comm, &mine, sizeof mine, all);
    snprintf(why, size, "%s", r == QLORA_OK ? "" : qlora_last_error(ctx));
    r = r == QLORA_OK && (comm.world != 2 || comm.rank != 0 || all[0] != 7 || all[1] != 7)
            ? QLORA_ERR_STATE
            : r;
    if (r != QLORA_OK && qlora_comm_gather(ctx, &comm, &mine, sizeof mine, all) == QLORA_OK) {
        r = QLORA_ERR_STATE; // a provider that has failed once does not go on
    }
    if (ends) {
        comm.abort(comm.user);
    }
    qlora_comm_close(&comm);
    return r;
}

// Every call of MPI fails once, and what failed is named; nothing is left behind.
TEST every_mpi_call_can_fail(void) {
    static const struct {
        const char* call;
        const char* said; // NULL: nothing is lost
    } cases[] = {{"Initialized", "MPI_Initialized failed: error 5"},
                 {"Init_thread", "MPI_Init_thread failed: error 5"},
                 {"Get_library_version", "Open MPI, MPICH and the MPI 5.0 interface are supported"},
                 {"Comm_set_errhandler", "MPI_Comm_set_errhandler failed"},
                 {"Comm_rank", "MPI_Comm_rank failed"},
                 {"Comm_size", "MPI_Comm_size failed"},
                 {"Irecv", "rank 0 of 2: MPI_Irecv failed: fake error 5 (5)"},
                 {"Isend", "rank 0 of 2: MPI_Isend failed"},
                 {"Test", "rank 0 of 2: MPI_Test failed"},
                 {"Finalized", NULL},
                 {"Finalize", NULL},
                 {"Abort", NULL},
                 {NULL, NULL}};
    fake_mpi m;
    qlora_ctx_desc d;
    qlora_ctx* ctx = NULL;
    char why[512] = "";
    if (!mpi_open(&m)) {
        SKIP();
    }
    memset(&d, 0, sizeof d);
    d.require_backend = QLORA_BACKEND_CPU;
    d.threads = 1;
    ASSERT_EQ(QLORA_OK, qlora_ctx_create(&d, &ctx));
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        bool lost = cases[i].said != NULL;
        m.fail(cases[i].call, 5);
        qlora_result r = mpi_use(ctx, 0.0, i == 11, why, sizeof why);
        ASSERT_EQ_FMTm(cases[i].call, lost ? QLORA_ERR_COMM : QLORA_OK, r, "%d");
        ASSERTm(why, !lost || strstr(why, cases[i].said) != NULL);
        m.fail(NULL, 0);
        m.late(0);
    }
    ASSERT_EQ_FMT(1, m.calls("Abort"), "%d");
    ASSERT_EQ_FMT(1, m.calls("Finalize"), "%d");
    ASSERT_EQ_FMT(0, m.calls("too early"), "%d");
    m.late(1000000); // a rank that does not answer
    ASSERT_EQ(QLORA_ERR_COMM, mpi_use(ctx, 0.05, false, why, sizeof why));
    ASSERTm(why, strstr(why, "rank 1 has not answered for 0.05 s") != NULL);
    m.late(0);
    ASSERT_EQ(QLORA_OK, qlora_ctx_destroy(ctx));
    dlclose(m.opened);
    PASS();
}

// ---- NCCL, on the fake GPU ----

enum { NCCL_BATCHES = 3, NCCL_STEPS = 5 };

// The first step with a number of batches is not a graph, and ends the graphs that were there.
static const int nccl_counts[NCCL_STEPS] = {3, 3, 2, 3, 3};
static const bool nccl_graphs[NCCL_STEPS] = {false, true, false, true, true};

// What a process of the fake GPU does; `fails` is the call that fails in rank 1, or NULL.
typedef struct nccl_job {
    const test_machine* machine;
    unsigned char id[QLORA_NCCL_ID_BYTES];
    const char* fails;
    bool trains;
    bool gives_up; // an exchange that nobody answers ends soon
    bool eager;    // rank 1 does not want exchanges to be graphs
    bool refuses;  // the first capture of an exchange fails in rank 1
    const char* says; // the error of rank 1, which has what it needs otherwise
    void (*differs)(qlora_ctx_desc* desc); // makes the machine of rank 1 another one
    int out;       // receives the trained tensors
} nccl_job;

static bool nccl_open(const nccl_job* j, rig* r, int32_t rank, int32_t world, qlora_comm* comm) {
    qlora_nccl_desc d;
    memset(r, 0, sizeof *r);
    memset(comm, 0, sizeof *comm);
    memset(&d, 0, sizeof d);
    d.rank = rank;
    d.world = world;
    d.id = j->id;
    d.limit = j->gives_up ? 0.3 : 60.0;
    r->ctx = test_open(j->machine, rank == 1 ? j->differs : NULL);
    if (rank == 1 && j->fails != NULL) {
        test_fake()->fail_at(j->fails, 1, 3, false);
    }
    bool ok = r->ctx != NULL && qlora_comm_nccl(r->ctx, &d, comm) == QLORA_OK;
    comm->graph = comm->graph && !(rank == 1 && j->eager);
    return ok;
}

// What a step says about its exchange.
static bool nccl_step_fits(const nccl_job* j, const qlora_comm* comm, int step,
                           const qlora_train_info* info) {
    bool graph = comm->world > 1 && !j->eager && !j->refuses && nccl_graphs[step];
    bool ok = info->exchange_graph == graph && info->exchange_ms >= 0.0 &&
              (info->sent > 0) == (comm->world > 1);
    if (!ok) {
        fprintf(stderr, "step %d: graph %d, %g ms, %lld bytes\n", step, (int)info->exchange_graph,
                info->exchange_ms, (long long)info->sent);
    }
    return ok;
}

static bool nccl_train(const nccl_job* j, rig* r, qlora_comm* comm) {
    setup s = setup_make(j->machine);
    data d[NCCL_BATCHES];
    qlora_batch batches[NCCL_BATCHES];
    s.model.accumulate = NCCL_BATCHES;
    s.train.comm = comm;
    s.train.require_graph = j->says != NULL && j->refuses && comm->rank == 1;
    rig_quiet = j->says != NULL;
    for (int i = 0; i < NCCL_BATCHES; i++) {
        char name[32];
        snprintf(name, sizeof name, "nccl %d", i);
        data_make(&d[i], name, run_lengths[i % 2], 3);
        batches[i] = d[i].batch;
    }
    bool ok = rig_start(r, &s) && rig_stir(r);
    int64_t sent[NCCL_BATCHES + 1] = {0, 0, 0, 0};
    for (int step = 0; step < NCCL_STEPS && ok; step++) {
        qlora_train_info info;
        int count = nccl_counts[step];
        if (j->refuses && step == 1 && comm->rank == 1) {
            test_fake()->fail_at("ncclGroupEnd", 1, 3, false);
        }
        ok = qlora_train_step(r->trainer, batches, count, &info) == QLORA_OK &&
             nccl_step_fits(j, comm, step, &info) && (sent[count] == 0 || sent[count] == info.sent);
        sent[count] = info.sent;
    }
    return ok || (j->says == NULL && rig_says(r, "nccl"));
}

static bool nccl_write(rig* r, int out) {
    size_t n = 0;
    float* values = rig_read(r, false, &n);
    size_t bytes = n * sizeof *values;
    bool ok = values != NULL && write(out, values, (unsigned)bytes) == (ssize_t)bytes;
    free(values);
    return ok;
}

// The child. Exit status 0: everything worked; 1: an error that says what failed; 2: another one.
static int nccl_child(const nccl_job* j, int32_t rank, int32_t world) {
    rig r;
    qlora_comm comm;
    int32_t all[COMM_WORLD];
    bool ok = nccl_open(j, &r, rank, world, &comm);
    if (ok && j->trains) {
        ok = nccl_train(j, &r, &comm) && nccl_write(&r, j->out);
    } else if (ok) {
        int32_t mine = 10 + rank;
        ok = qlora_comm_gather(r.ctx, &comm, &mine, sizeof mine, all) == QLORA_OK;
        for (int32_t i = 0; i < world && ok; i++) {
            ok = all[i] == 10 + i;
        }
    }
    char error[512] = "";
    snprintf(error, sizeof error, "%s", r.ctx != NULL ? qlora_last_error(r.ctx) : "");
    if (!ok && j->trains && comm.abort != NULL) {
        comm.abort(comm.user);
    }
    qlora_trainer_destroy(r.trainer);
    qlora_model_close(r.model);
    qlora_comm_close(&comm);
    // The device is lost if the other process has ended, or will never receive what was sent.
    bool lost = strstr(error, "CUDA_ERROR") != NULL ||
                (j->fails != NULL && strcmp(j->fails, "ncclRecv") == 0);
    bool clean = r.ctx != NULL && (lost || test_close_ctx(j->machine, r.ctx));
    if (ok || !clean) {
        return clean ? 0 : 2;
    }
    const char* names = j->says != NULL ? j->says : j->fails;
    bool named = names == NULL || (rank != 1 && j->differs == NULL) || strstr(error, names) != NULL;
    if (!named) {
        fprintf(stderr, "rank %d: %s\n", (int)rank, error);
    }
    return named ? 1 : 2;
}

// Starts two processes; their exit statuses are in `status`, and what they wrote in `values`.
static bool nccl_two(nccl_job* j, int status[2], float* values[2], size_t count) {
    pid_t children[2];
    int pipes[2][2];
    bool ok = true;
    for (int32_t i = 0; i < 2 && ok; i++) {
        ok = pipe(pipes[i]) == 0;
        fflush(stdout);
        fflush(stderr);
        children[i] = ok ? fork() : -1;
        if (children[i] == 0) {
            j->out = pipes[i][1];
            if (j->gives_up) {
                setenv("FAKENCCL_WAITS", "300", 1); // a real exchange is ended by its limit
            }
            _exit(nccl_child(j, i, 2));
        }
        ok = ok && children[i] > 0;
        close(pipes[i][1]);
    }
    for (int i = 0; i < 2 && ok; i++) {
        size_t have = 0;
        ssize_t n = 1;
        while (n > 0 && values != NULL && have < count * sizeof(float)) {
            size_t left = count * sizeof(float) - have;
            n = read(pipes[i][0], (char*)values[i] + have, (unsigned)left);
            have += n > 0 ? (size_t)n : 0;
        }
        close(pipes[i][0]);
    }
    for (int i = 0; i < 2 && ok; i++) {
        int code = 0;
        ok = waitpid(children[i], &code, 0) == children[i] && WIFEXITED(code);
        status[i] = WEXITSTATUS(code);
    }
    return ok;
}

static void nccl_forget(const nccl_job* j) {
    char command[QLORA_NCCL_ID_BYTES + 16];
    snprintf(command, sizeof command, "rm -rf %.100s", (const char*)j->id);
    if (system(command) != 0) {
        fprintf(stderr, "%s failed\n", command);
    }
}

TEST nccl_gives_the_same_bits(const test_machine* machine) {
    char why[256] = "";
    nccl_job j;
    rig r;
    qlora_comm comm;
    size_t n = 0;
    int status[2] = {9, 9};
    memset(&j, 0, sizeof j);
    j.machine = machine;
    j.trains = true;
    ASSERTm(why, qlora_nccl_id(NULL, j.id, why, sizeof why) == QLORA_OK);
    ASSERT(nccl_open(&j, &r, 0, 1, &comm)); // a world of one
    ASSERT(nccl_train(&j, &r, &comm));
    float* expected = rig_read(&r, false, &n);
    ASSERT(expected != NULL && n > 0);
    ASSERT_EQ(QLORA_OK, qlora_trainer_destroy(r.trainer));
    ASSERT_EQ(QLORA_OK, qlora_model_close(r.model));
    qlora_comm_close(&comm);
    ASSERT(test_close_ctx(machine, r.ctx));
    float* values[2] = {(float*)calloc(n, sizeof(float)), (float*)calloc(n, sizeof(float))};
    for (int kind = 0; kind < 3; kind++) { // by graphs, without, after a capture that failed
        nccl_forget(&j);
        ASSERTm(why, qlora_nccl_id(NULL, j.id, why, sizeof why) == QLORA_OK);
        j.eager = kind == 1;
        j.refuses = kind == 2;
        memset(values[0], 0, n * sizeof(float));
        memset(values[1], 0, n * sizeof(float));
        ASSERT(nccl_two(&j, status, values, n));
        for (int i = 0; i < 2; i++) {
            ASSERT_EQ_FMT(0, status[i], "%d");
            ASSERT_MEM_EQ(expected, values[i], n * sizeof(float));
        }
    }
    free(values[0]);
    free(values[1]);
    free(expected);
    nccl_forget(&j);
    PASS();
}

// A process that needs graphs says why there are none; the other one does not wait for ever.
TEST an_exchange_that_must_be_a_graph(const test_machine* machine) {
    char why[256] = "";
    nccl_job j;
    int status[2] = {9, 9};
    memset(&j, 0, sizeof j);
    j.machine = machine;
    j.trains = true;
    j.refuses = true;
    j.says = "the exchange is not a graph: ";
    ASSERTm(why, qlora_nccl_id(NULL, j.id, why, sizeof why) == QLORA_OK);
    ASSERT(nccl_two(&j, status, NULL, 0));
    ASSERT_EQ_FMT(1, status[0], "%d");
    ASSERT_EQ_FMT(1, status[1], "%d");
    nccl_forget(&j);
    PASS();
}

// The machine of test_open, with another GPU or cuBLAS.
static void another_gpu(qlora_ctx_desc* desc) {
    fake_config config = test_fake()->defaults();
    (void)desc;
    config.seed = 7;
    snprintf(config.device[0].name, sizeof config.device[0].name, "Fake GPU 9.0 Ti");
    test_fake()->reset(&config);
}

static void another_cublas(qlora_ctx_desc* desc) {
    fake_config config = test_fake()->defaults();
    (void)desc;
    config.seed = 7;
    config.cublas_version++;
    test_fake()->reset(&config);
}

// Machines on which the same kernels may give other bits are refused by name, by both processes.
TEST other_machines_are_refused(const test_machine* machine) {
    static const struct {
        void (*differs)(qlora_ctx_desc* desc);
        const char* says;
    } cases[] = {{another_gpu, "rank 1 has Fake GPU 9.0 Ti, but rank 0 has Fake GPU 9.0;"},
                 {another_cublas, "rank 1 has cublas = "}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char why[256] = "";
        nccl_job j;
        int status[2] = {9, 9};
        memset(&j, 0, sizeof j);
        j.machine = machine;
        j.trains = true;
        j.differs = cases[i].differs;
        j.says = cases[i].says;
        ASSERTm(why, qlora_nccl_id(NULL, j.id, why, sizeof why) == QLORA_OK);
        ASSERT(nccl_two(&j, status, NULL, 0));
        ASSERT_EQ_FMTm(j.says, 1, status[0], "%d");
        ASSERT_EQ_FMTm(j.says, 1, status[1], "%d");
        nccl_forget(&j);
    }
    PASS();
}

// Every call of NCCL fails once: the process says which, and no process hangs.
TEST every_nccl_call_can_fail(const test_machine* machine) {
    static const char* const calls[] = {NULL,
                                        "ncclGetVersion",
                                        "ncclCommInitRankConfig",
                                        "ncclGroupStart",
                                        "ncclSend",
                                        "ncclRecv",
                                        "ncclGroupEnd",
                                        "ncclCommGetAsyncError",
                                        "ncclCommFinalize",
                                        "ncclCommDestroy"};
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        nccl_job j;
        char why[256] = "";
        int status[2] = {9, 9};
        memset(&j, 0, sizeof j);
        j.machine = machine;
        bool late = i == 0 || i >= 8; // nothing is left to do
        j.fails = calls[i];
        j.gives_up = !late;
        ASSERTm(why, qlora_nccl_id(NULL, j.id, why, sizeof why) == QLORA_OK);
        ASSERT(nccl_two(&j, status, NULL, 0));
        ASSERT_EQ_FMTm(calls[i] != NULL ? calls[i] : "none", late ? 0 : 1, status[1], "%d");
        ASSERT(status[0] != 2);
        nccl_forget(&j);
    }
    char why[256] = "";
    unsigned char id[QLORA_NCCL_ID_BYTES];
    test_fake()->fail_at("ncclGetUniqueId", 1, 2, false);
    ASSERT_EQ(QLORA_ERR_COMM, qlora_nccl_id(NULL, id, why, sizeof why));
    ASSERT(strstr(why, "ncclGetUniqueId failed (2)") != NULL);
    test_fake()->fail_clear();
    ASSERT_EQ(QLORA_ERR_COMM, qlora_nccl_id("/nonexistent/libnccl.so.2", id, why, sizeof why));
    ASSERT(strstr(why, "/nonexistent/libnccl.so.2") != NULL);
    PASS();
}

SUITE(comm_suite) {
    RUN_TEST(any_world_gives_the_same_bits);
    RUN_TEST(any_world_gives_the_same_preferences);
    RUN_TEST(a_run_goes_on_in_another_world);
    RUN_TEST(ranks_that_differ_are_refused);
    RUN_TEST(every_exchange_can_fail);
    RUN_TEST(providers_are_checked);
    RUN_TEST(every_mpi_call_can_fail);
    RUN_ON(TEST_ONE_FAKE, nccl_gives_the_same_bits);
    RUN_ON(TEST_ONE_FAKE, an_exchange_that_must_be_a_graph);
    RUN_ON(TEST_ONE_FAKE, other_machines_are_refused);
    RUN_ON(TEST_ONE_FAKE, every_nccl_call_can_fail);
}
