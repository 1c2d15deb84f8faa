// ranks.h - several processes that train together: who they are, and what they tell each other.
//
// Every process reads the data and computes its share of each step. Rank 0 alone owns the output
// folder and prints. Whatever one of them decides by itself (an error, Ctrl-C) is told to all
// before anybody acts on it, so that none waits for a process that has left.
#ifndef FINETUNE_RANKS_H
#define FINETUNE_RANKS_H

// The variables that launchers set.
typedef struct launcher {
    const char* name;
    const char* rank;
    const char* world;
    const char* local;
    const char* local_world;
    const char* also; // must be a number, too; NULL = nothing
    bool mpi;
    bool outer; // it may have started the launcher that counts
} launcher;

static const launcher launchers[] = {
    {"finetune --ranks", "FINETUNE_RANK", "FINETUNE_RANKS", "FINETUNE_RANK", "FINETUNE_RANKS", NULL,
     false, false},
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", NULL, true, false},
    {"MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", NULL, true, false},
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", NULL, false, false},
    // A batch script has these without srun, but it is not a numbered step.
    {"srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE",
     "SLURM_STEP_ID", false, true},
};
#define LAUNCHER_COUNT (sizeof launchers / sizeof launchers[0])

// The number in an environment variable; -1 if it is missing or not a number. "4(x2)" is 4.
static int32_t variable_number(const char* name) {
    const char* text = getenv(name);
    char* end = NULL;
    long value = text != NULL && isdigit((unsigned char)text[0]) ? strtol(text, &end, 10) : -1;
    return value >= 0 && value < 100000 && (*end == '\0' || *end == '(') ? (int32_t)value : -1;
}

// Finds out from the environment which process of how many this is.
static bool ranks_find(app* a) {
    const launcher* found = NULL;
    a->world = 1;
    a->local_world = 1;
    for (size_t i = 0; i < LAUNCHER_COUNT; i++) {
        const launcher* l = &launchers[i];
        int32_t rank = variable_number(l->rank);
        int32_t world = variable_number(l->world);
        if (rank < 0 || world < 1 || (l->also != NULL && variable_number(l->also) < 0)) {
            continue;
        }
        if (rank >= world || world > 4096) {
            return error_set(a->error, "%s is %d and %s is %d; %s", l->rank, (int)rank, l->world,
                             (int)world,
                             world > 4096 ? "at most 4096 processes can train together"
                                          : "ranks are numbered from 0");
        }
        if (found != NULL && !l->outer && (rank != a->rank || world != a->world)) {
            return error_set(a->error,
                             "%s says that this is process %d of %d, but %s says %d of %d "
                             "(environment variables %s and %s)",
                             found->name, (int)a->rank, (int)a->world, l->name, (int)rank,
                             (int)world, found->rank, l->rank);
        }
        if (found == NULL) {
            found = l;
            a->rank = rank;
            a->world = world;
            int32_t local = variable_number(l->local);
            int32_t local_world = variable_number(l->local_world);
            a->local = local >= 0 ? local : 0;
            a->local_world = local_world >= 1 ? local_world : 1;
            a->mpi = l->mpi;
            a->launcher = l->name;
        }
    }
    return true;
}

// Counts the time that this process waits for others.
static bool ranks_exchange(const qlora_message* messages, int64_t count, void* stream, char* why,
                           size_t why_size, void* user) {
    app* a = (app*)user;
    double start = seconds_now();
    bool ok = a->provider.exchange(messages, count, stream, why, why_size, a->provider.user);
    a->waited += seconds_now() - start;
    return ok;
}

// Opens MPI, before the GPU is opened and threads are started.
static bool ranks_open(app* a) {
    char why[400] = "";
    if (a->world <= 1) {
        return true;
    }
    if (a->o.demo) {
        return error_set(a->error, "--demo runs in one process; %s started %d", a->launcher,
                         (int)a->world);
    }
    if (!a->mpi) { // NCCL, when the GPU is open
        return true;
    }
    if (qlora_comm_mpi(NULL, (double)a->o.rank_limit, &a->provider, why, sizeof why) != QLORA_OK) {
        return error_set(a->error, "cannot open MPI: %s", why);
    }
    a->comm = a->provider;
    a->comm.exchange = ranks_exchange;
    a->comm.user = a;
    if (a->comm.world != a->world || a->comm.rank != a->rank) {
        return error_set(a->error,
                         "%s started process %d of %d, but MPI says %d of %d: its library is not "
                         "that of the launcher; set QLORA_MPI_LIBRARY to the right one",
                         a->launcher, (int)a->rank, (int)a->world, (int)a->comm.rank,
                         (int)a->comm.world);
    }
    return true;
}

// Ends the use of MPI. After an error that the others do not know, they are ended, too.
static void ranks_close(app* a) {
    if (a->provider.exchange == NULL) {
        return;
    }
    fflush(stdout); // ending the others may end this process
    fflush(stderr);
    if (a->failed && !a->agreed && a->provider.abort != NULL) {
        a->provider.abort(a->provider.user);
    }
    qlora_comm_close(&a->provider);
}

// What a process tells the others about its last stage.
typedef struct verdict {
    int32_t ok;
    int32_t stopped;
    char error[496];
} verdict;

static bool gather(app* a, const void* mine, size_t bytes, void* all) {
    return lib(a, qlora_comm_gather(a->ctx, &a->comm, mine, bytes, all), "talking to other ranks");
}

// Whether a stage succeeded in all processes. Otherwise a->error is that of the first one that
// failed, and rank 0 will print it.
static bool together(app* a, bool ok) {
    verdict mine;
    if (a->world <= 1 || a->ctx == NULL || a->comm.exchange == NULL) {
        return ok;
    }
    memset(&mine, 0, sizeof mine);
    mine.ok = ok ? 1 : 0;
    mine.stopped = a->stopped ? 1 : 0;
    snprintf(mine.error, sizeof mine.error, "%.490s", ok ? "" : a->error);
    verdict* all = (verdict*)take(a, (size_t)a->world, sizeof *all);
    if (all == NULL || !gather(a, &mine, sizeof mine, all)) {
        free(all);
        return false;
    }
    for (int32_t i = 0; i < a->world && ok; i++) {
        ok = all[i].ok != 0;
        if (!ok) {
            a->stopped = a->stopped || all[i].stopped != 0;
            char where[24] = "";
            if (i > 0) {
                snprintf(where, sizeof where, "rank %d: ", (int)i);
            }
            error_set(a->error, "%s%s", where, all[i].error);
        }
    }
    a->agreed = !ok;
    free(all);
    return ok;
}

// What must be equal, and what rank 0 decides.
typedef struct rank_facts {
    uint64_t settings_hash;
    uint64_t model;
    uint64_t adapter;
    int64_t eval_every;
    int64_t patience;
    int32_t resuming;
} rank_facts;

// Compares the options, and lets all processes join the run of rank 0.
static bool ranks_join(app* a) {
    rank_facts mine;
    bool ok = true;
    if (a->world <= 1) {
        return true;
    }
    memset(&mine, 0, sizeof mine);
    mine.settings_hash = a->settings_hash;
    mine.model = a->identity.model;
    mine.adapter = a->identity.adapter;
    mine.eval_every = a->o.eval_every; // with these two, ranks would evaluate at other steps
    mine.patience = a->o.patience;
    mine.resuming = a->resuming ? 1 : 0;
    rank_facts* all = (rank_facts*)take(a, (size_t)a->world, sizeof *all);
    if (all == NULL || !gather(a, &mine, sizeof mine, all)) {
        free(all);
        return false;
    }
    for (int32_t i = 1; i < a->world && ok; i++) {
        const char* differs = all[i].settings_hash != all[0].settings_hash ? "other options"
                              : all[i].model != all[0].model               ? "another model"
                              : all[i].adapter != all[0].adapter           ? "another adapter"
                              : all[i].eval_every != all[0].eval_every     ? "another --eval-every"
                              : all[i].patience != all[0].patience         ? "another --patience"
                                                                           : NULL;
        ok = differs == NULL || error_set(a->error, "rank %d has %s than rank 0", (int)i, differs);
    }
    a->resuming = all[0].resuming != 0;
    a->agreed = !ok;
    free(all);
    return ok;
}

typedef struct rank_data {
    uint64_t data_hash;
    int64_t total_steps;
    qlora_plan plan;
} rank_data;

// All processes use the plan of rank 0, for the same data.
static bool ranks_plan(app* a) {
    bool ok = true;
    if (a->world <= 1) {
        return true;
    }
    rank_data* mine = (rank_data*)take(a, 1, sizeof *mine);
    rank_data* all = (rank_data*)take(a, (size_t)a->world, sizeof *all);
    if (mine == NULL || all == NULL) {
        free(mine);
        free(all);
        return false;
    }
    mine->data_hash = a->data_hash;
    mine->total_steps = a->total_steps;
    mine->plan = a->plan;
    if (!gather(a, mine, sizeof *mine, all)) {
        free(mine);
        free(all);
        return false;
    }
    for (int32_t i = 1; i < a->world && ok; i++) {
        ok = (all[i].data_hash == all[0].data_hash && all[i].total_steps == all[0].total_steps) ||
             error_set(a->error, "rank %d has read other data than rank 0", (int)i);
    }
    a->agreed = !ok;
    a->plan = all[0].plan;
    free(mine);
    free(all);
    return ok;
}

typedef struct rank_place {
    int64_t step;
    uint64_t tokens;
    double seconds;
} rank_place;

// All processes must have loaded the same checkpoint.
static bool ranks_place(app* a) {
    rank_place mine;
    bool ok = true;
    if (a->world <= 1) {
        return true;
    }
    memset(&mine, 0, sizeof mine);
    mine.step = a->step;
    mine.tokens = a->tokens_seen;
    mine.seconds = a->seconds;
    rank_place* all = (rank_place*)take(a, (size_t)a->world, sizeof *all);
    if (all == NULL || !gather(a, &mine, sizeof mine, all)) {
        free(all);
        return false;
    }
    for (int32_t i = 1; i < a->world && ok; i++) {
        ok = memcmp(&all[i], &all[0], sizeof all[0]) == 0 ||
             error_set(a->error,
                       "rank %d has loaded another checkpoint (step %lld) than rank 0 (step %lld); "
                       "--out must be one folder for all",
                       (int)i, (long long)all[i].step, (long long)all[0].step);
    }
    a->agreed = !ok;
    free(all);
    return ok;
}

// All processes know that one of them was asked to stop.
static void stop_agree(app* a) {
    a->stop_agreed = true;
    stop_asked = 1;
}

typedef struct rank_vote {
    int32_t stop;
    double busy; // seconds of the step without waiting for others
} rank_vote;

// After each step: whether any process was asked to stop, and which one was the slowest.
static bool ranks_vote(app* a, double seconds) {
    rank_vote mine;
    if (a->world <= 1) {
        return true;
    }
    memset(&mine, 0, sizeof mine);
    mine.stop = stop_asked != 0 ? 1 : 0;
    mine.busy = seconds - a->waited;
    a->waited = 0.0;
    rank_vote* all = (rank_vote*)take(a, (size_t)a->world, sizeof *all);
    bool ok = all != NULL && gather(a, &mine, sizeof mine, all);
    a->slowest = 0;
    for (int32_t i = 0; i < a->world && ok; i++) {
        a->slowest = all[i].busy > all[a->slowest].busy ? i : a->slowest;
        if (all[i].stop != 0) {
            stop_agree(a);
        }
    }
    a->waited = 0.0;
    free(all);
    return ok;
}

// Whether to stop. Processes that train together must have voted.
static bool stop_now(const app* a) {
    return a->world > 1 ? a->stop_agreed : stop_asked != 0;
}

#endif
