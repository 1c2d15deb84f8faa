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
    int32_t local = -1;
    int32_t local_world = -1;
    a->ranks.world = 1;
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
        if (found != NULL && !l->outer && (rank != a->ranks.rank || world != a->ranks.world)) {
            return error_set(a->error,
                             "%s says that this is process %d of %d, but %s says %d of %d "
                             "(environment variables %s and %s)",
                             found->name, (int)a->ranks.rank, (int)a->ranks.world, l->name,
                             (int)rank, (int)world, found->rank, l->rank);
        }
        if (found == NULL) {
            found = l;
            a->ranks.rank = rank;
            a->ranks.world = world;
            a->ranks.mpi = l->mpi;
            a->ranks.launcher = l->name;
        }
        if (rank == a->ranks.rank &&
            world == a->ranks.world) { // Slurm's PMI says nothing about the machine
            local = local >= 0 ? local : variable_number(l->local);
            local_world = local_world >= 1 ? local_world : variable_number(l->local_world);
        }
    }
    a->ranks.local = local >= 0 ? local : 0;
    a->ranks.local_world = local_world >= 1 ? local_world : 1;
    return true;
}

// Whether MPI knows the same processes as the launcher.
static bool mpi_open(app* a) {
    char why[400] = "";
    if (qlora_comm_mpi(NULL, (double)a->o.machine.rank_limit, &a->ranks.comm, why, sizeof why) !=
        QLORA_OK) {
        return error_set(a->error, "cannot open MPI: %s", why);
    }
    if (a->ranks.comm.world != a->ranks.world || a->ranks.comm.rank != a->ranks.rank) {
        return error_set(a->error,
                         "%s started process %d of %d, but MPI says %d of %d: its library is not "
                         "that of the launcher; set QLORA_MPI_LIBRARY to the right one",
                         a->ranks.launcher, (int)a->ranks.rank, (int)a->ranks.world,
                         (int)a->ranks.comm.rank, (int)a->ranks.comm.world);
    }
    return true;
}

// Opens MPI, before the GPU is opened and threads are started. srun may set MPICH's variables for
// any program; without MPI, GPUs can still be connected.
static bool ranks_open(app* a) {
    if (a->ranks.world <= 1) {
        return true;
    }
    if (a->o.demo) {
        return error_set(a->error, "--demo runs in one process; %s started %d", a->ranks.launcher,
                         (int)a->ranks.world);
    }
    if (!a->ranks.mpi) { // NCCL, when the GPU is open
        return true;
    }
    if (mpi_open(a)) {
        return true;
    }
    if (a->o.machine.backend == QLORA_BACKEND_CPU || variable_number("PMI_RANK") != a->ranks.rank ||
        variable_number("SLURM_PROCID") != a->ranks.rank || variable_number("SLURM_STEP_ID") < 0) {
        return false;
    }
    say(a, "note: MPI is not used: %s\n", a->error);
    qlora_comm_close(&a->ranks.comm);
    memset(&a->ranks.comm, 0, sizeof a->ranks.comm);
    a->error[0] = '\0';
    a->ranks.mpi = false;
    a->ranks.launcher = "srun";
    return true;
}

// Ends the use of MPI. After an error that the others do not know, they are ended, too.
static void ranks_close(app* a) {
    if (!a->ranks.mpi || a->ranks.comm.exchange == NULL) {
        return;
    }
    fflush(stdout); // ending the others may end this process
    fflush(stderr);
    if (a->failed && !a->ranks.agreed && a->ranks.comm.abort != NULL) {
        a->ranks.comm.abort(a->ranks.comm.user);
    }
    qlora_comm_close(&a->ranks.comm);
}

// What a process tells the others about its last stage.
typedef struct verdict {
    int32_t ok;
    int32_t stopped;
    char error[496];
} verdict;

static bool gather(app* a, const void* mine, size_t bytes, void* all) {
    return lib(a, qlora_comm_gather(a->ctx, &a->ranks.comm, mine, bytes, all),
               "talking to other ranks");
}

// Rank 0 alone saves and answers prompts. The others wait for it longer than for anything else, so
// that --rank-limit can be short.
#define FIRST_RANK_LIMIT 7200.0

static void first_rank_busy(app* a, bool busy) {
    double limit = (double)a->o.machine.rank_limit;
    if (a->ranks.comm.limit != NULL &&
        a->ranks.rank > 0) { // rank 0 itself waits for nobody that is busy
        a->ranks.comm.limit(busy ? limit + FIRST_RANK_LIMIT : 0.0, a->ranks.comm.user);
    }
}

// Waits until rank 0 has done what it alone does.
static bool first_rank_wait(app* a) {
    char mine = 0;
    if (a->ranks.world <= 1) {
        return true;
    }
    char* all = (char*)take(a, (size_t)a->ranks.world, 1);
    first_rank_busy(a, true);
    bool ok = all != NULL && gather(a, &mine, 1, all);
    first_rank_busy(a, false);
    free(all);
    return ok;
}

// Whether a stage succeeded in all processes. Otherwise a->error is that of the first one that
// failed, and rank 0 will print it.
static bool together(app* a, bool ok) {
    verdict mine;
    if (a->ranks.world <= 1 || a->ctx == NULL || a->ranks.comm.exchange == NULL) {
        return ok;
    }
    memset(&mine, 0, sizeof mine);
    mine.ok = ok ? 1 : 0;
    mine.stopped = a->stopped ? 1 : 0;
    snprintf(mine.error, sizeof mine.error, "%.490s", ok ? "" : a->error);
    verdict* all = (verdict*)take(a, (size_t)a->ranks.world, sizeof *all);
    if (all == NULL || !gather(a, &mine, sizeof mine, all)) {
        free(all);
        return false;
    }
    for (int32_t i = 0; i < a->ranks.world && ok; i++) {
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
    a->ranks.agreed = !ok;
    free(all);
    return ok;
}

// Options that say at which steps processes meet: with others, some would wait in vain.
enum { RANK_NUMBERS = 4 };
static const char* const rank_numbers[RANK_NUMBERS] = {"eval-every", "patience", "save-every",
                                                       "snapshot-every"};

// What must be equal, and what rank 0 decides.
typedef struct rank_facts {
    uint64_t settings_hash;
    uint64_t model;
    uint64_t adapter;
    int64_t every[RANK_NUMBERS];
    int64_t patience_from;
    int32_t resuming;
} rank_facts;

// Compares the options, and lets all processes join the run of rank 0.
static bool ranks_join(app* a) {
    rank_facts mine;
    bool ok = true;
    if (a->ranks.world <= 1) {
        return true;
    }
    memset(&mine, 0, sizeof mine);
    mine.settings_hash = a->settings_hash;
    mine.model = a->identity.model;
    mine.adapter = a->identity.adapter;
    mine.every[0] = a->o.eval.every;
    mine.every[1] = a->o.eval.patience;
    mine.every[2] = a->o.output.save_every;
    mine.every[3] = a->o.output.snapshot_every;
    mine.patience_from = a->parts.patience_from;
    mine.resuming = a->resuming ? 1 : 0;
    rank_facts* all = (rank_facts*)take(a, (size_t)a->ranks.world, sizeof *all);
    if (all == NULL || !gather(a, &mine, sizeof mine, all)) {
        free(all);
        return false;
    }
    for (int32_t i = 1; i < a->ranks.world && ok; i++) {
        const char* differs = all[i].settings_hash != all[0].settings_hash ? "other options"
                              : all[i].model != all[0].model               ? "another model"
                              : all[i].adapter != all[0].adapter           ? "another adapter"
                                                                           : NULL;
        ok = differs == NULL || error_set(a->error, "rank %d has %s than rank 0", (int)i, differs);
        for (int k = 0; k < RANK_NUMBERS && ok; k++) {
            ok = all[i].every[k] == all[0].every[k] ||
                 error_set(a->error, "rank %d has another --%s than rank 0", (int)i,
                           rank_numbers[k]);
        }
    }
    a->parts.patience_from = all[0].patience_from;
    a->resuming = all[0].resuming != 0;
    a->ranks.agreed = !ok;
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
    if (a->ranks.world <= 1) {
        return true;
    }
    rank_data* mine = (rank_data*)take(a, 1, sizeof *mine);
    rank_data* all = (rank_data*)take(a, (size_t)a->ranks.world, sizeof *all);
    if (mine == NULL || all == NULL) {
        free(mine);
        free(all);
        return false;
    }
    mine->data_hash = a->data.data_hash;
    mine->total_steps = a->progress.total_steps;
    mine->plan = a->plan;
    if (!gather(a, mine, sizeof *mine, all)) {
        free(mine);
        free(all);
        return false;
    }
    for (int32_t i = 1; i < a->ranks.world && ok; i++) {
        ok = (all[i].data_hash == all[0].data_hash && all[i].total_steps == all[0].total_steps) ||
             error_set(a->error, "rank %d has read other data than rank 0", (int)i);
    }
    a->ranks.agreed = !ok;
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
    if (a->ranks.world <= 1) {
        return true;
    }
    memset(&mine, 0, sizeof mine);
    mine.step = a->progress.step;
    mine.tokens = a->progress.tokens_seen;
    mine.seconds = a->progress.seconds;
    rank_place* all = (rank_place*)take(a, (size_t)a->ranks.world, sizeof *all);
    if (all == NULL || !gather(a, &mine, sizeof mine, all)) {
        free(all);
        return false;
    }
    for (int32_t i = 1; i < a->ranks.world && ok; i++) {
        ok = memcmp(&all[i], &all[0], sizeof all[0]) == 0 ||
             error_set(a->error,
                       "rank %d has loaded another checkpoint (step %lld) than rank 0 (step %lld); "
                       "--out must be one folder for all",
                       (int)i, (long long)all[i].step, (long long)all[0].step);
    }
    a->ranks.agreed = !ok;
    free(all);
    return ok;
}

// All processes know that one of them was asked to stop.
static void stop_agree(app* a) {
    a->ranks.stop_agreed = true;
    stop_asked = 1;
}

typedef struct rank_vote {
    int32_t stop;
    double busy_ms; // of the step, without the exchange
    double exchange_ms;
} rank_vote;

// After each step: whether any process was asked to stop, and which one was the slowest. The rank
// that comes last waits for nobody: its exchange is the shortest.
static bool ranks_vote(app* a, double seconds, double exchange_ms) {
    rank_vote mine;
    if (a->ranks.world <= 1) {
        return true;
    }
    memset(&mine, 0, sizeof mine);
    mine.stop = stop_asked != 0 ? 1 : 0;
    mine.busy_ms = seconds * 1e3 - exchange_ms;
    mine.exchange_ms = exchange_ms;
    double most = 0.0;
    rank_vote* all = (rank_vote*)take(a, (size_t)a->ranks.world, sizeof *all);
    bool ok = all != NULL && gather(a, &mine, sizeof mine, all);
    a->ranks.slowest = 0;
    a->ranks.exchange_ms = exchange_ms;
    for (int32_t i = 0; i < a->ranks.world && ok; i++) {
        a->ranks.slowest = all[i].busy_ms > all[a->ranks.slowest].busy_ms ? i : a->ranks.slowest;
        a->ranks.exchange_ms = fmin(a->ranks.exchange_ms, all[i].exchange_ms);
        most = fmax(most, all[i].exchange_ms);
        if (all[i].stop != 0) {
            stop_agree(a);
        }
    }
    a->ranks.waited_ms = most - a->ranks.exchange_ms;
    free(all);
    return ok;
}

// Whether to stop. Processes that train together must have voted.
static bool stop_now(const app* a) {
    return a->ranks.world > 1 ? a->ranks.stop_agreed : stop_asked != 0;
}

#endif
