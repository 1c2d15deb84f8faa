// connect.h - how the processes of a run find each other: NCCL's id travels through MPI, or through
// a file in the run's folder. --ranks starts processes on this machine.
#ifndef FINETUNE_CONNECT_H
#define FINETUNE_CONNECT_H

#define ID_NAME ".finetune.nccl"
#define RUN_NAME 192

// Names this run, so that a file of an earlier one is not taken for ours: what the launcher gives
// to all processes of a run and to no other.
static void run_name(char out[RUN_NAME]) {
    static const char* const variables[] = {
        "FINETUNE_RUN", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
        "MASTER_ADDR",  "MASTER_PORT",         "SLURM_JOB_ID",
        "SLURM_STEP_ID"};
    size_t used = 0;
    memset(out, 0, RUN_NAME);
    for (size_t i = 0; i < sizeof variables / sizeof variables[0]; i++) {
        const char* value = getenv(variables[i]);
        int n = snprintf(out + used, RUN_NAME - used, "%.40s/", value != NULL ? value : "");
        used = n > 0 && used + (size_t)n < RUN_NAME ? used + (size_t)n : used;
    }
}

// The owner of the folder wrote it: a file that an earlier run has left behind is not believed,
// even if the launcher gives both runs the same name.
typedef struct rank_id {
    char magic[8];
    char run[RUN_NAME];
    lock_owner owner;
    int32_t ok;
    unsigned char id[QLORA_NCCL_ID_BYTES];
    char error[256];
} rank_id;

static void pause_ms(long ms) {
#ifndef _WIN32
    struct timespec t = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&t, NULL);
#else
    (void)ms;
#endif
}

// Whether an id is one of this run.
static bool id_fits(const rank_id* want, const rank_id* got, const char* lock) {
    lock_owner now;
    return memcmp(got, want, sizeof want->magic + sizeof want->run) == 0 &&
           lock_held(lock, &now) &&
           (now.process == 0 || memcmp(&now, &got->owner, sizeof now) == 0);
}

// Waits for the file that rank 0 writes.
static bool id_read(app* a, const rank_id* want, rank_id* out) {
    char path[PATH_SIZE];
    char lock[PATH_SIZE];
    double start = seconds_now();
    bool found = false;
    out_path(a, ID_NAME, path);
    out_path(a, LOCK_NAME, lock);
    while (stop_asked == 0 && seconds_now() - start < (double)a->o.machine.rank_limit) {
        blob text;
        memset(&text, 0, sizeof text);
        bool whole = blob_read_path(&text, path) == 0 && text.count == sizeof *out;
        if (whole) {
            memcpy(out, text.data, sizeof *out);
        }
        blob_free(&text);
        found = whole;
        if (whole && id_fits(want, out, lock)) {
            return true;
        }
        pause_ms(50);
    }
    if (stop_asked != 0) {
        a->stopped = true;
        return error_set(a->error, "stopped");
    }
    if (found) {
        return error_set(a->error,
                         "%s is that of another run, and rank 0 has not replaced it within %lld s",
                         path, (long long)a->o.machine.rank_limit);
    }
    return error_set(a->error,
                     "rank 0 has not written %s within %lld s; processes on several machines need "
                     "a shared --out, or MPI",
                     path, (long long)a->o.machine.rank_limit);
}

// Gives all processes the id that rank 0 makes. *usable: whether there is one.
static bool id_share(app* a, rank_id* out, bool* usable) {
    rank_id mine;
    memset(&mine, 0, sizeof mine);
    memcpy(mine.magic, "ftnccl2", 8);
    run_name(mine.run);
    lock_self(&mine.owner);
    if (a->ranks.rank == 0) {
        char why[400] = "";
        mine.ok = qlora_nccl_id(NULL, mine.id, why, sizeof why) == QLORA_OK ? 1 : 0;
        snprintf(mine.error, sizeof mine.error, "%.250s", why);
    }
    bool ok = true;
    if (a->ranks.mpi) {
        rank_id* all = (rank_id*)take(a, (size_t)a->ranks.world, sizeof *all);
        ok = all != NULL && gather(a, &mine, sizeof mine, all);
        *out = ok ? all[0] : mine;
        free(all);
    } else if (a->ranks.rank == 0) {
        *out = mine;
        ok = file_replace(a, ID_NAME, (const char*)&mine, sizeof mine);
    } else {
        ok = id_read(a, &mine, out);
    }
    *usable = ok && out->ok != 0;
    return ok;
}

typedef struct rank_gpu {
    int32_t found;
    char reason[252];
} rank_gpu;

// All processes have a GPU, or none has: they would not compute the same bits.
static bool ranks_alike(app* a) {
    rank_gpu mine;
    bool ok = true;
    int32_t with = -1;
    int32_t without = -1;
    memset(&mine, 0, sizeof mine);
    mine.found = qlora_ctx_backend(a->ctx) == QLORA_BACKEND_CPU ? 0 : 1;
    snprintf(mine.reason, sizeof mine.reason, "%.250s",
             a->o.machine.backend == QLORA_BACKEND_CPU ? "--backend cpu"
             : a->ranks.no_gpu[0] != '\0'              ? a->ranks.no_gpu
                                                       : qlora_ctx_reason(a->ctx));
    if (!a->ranks.mpi) {
        return mine.found != 0 ||
               error_set(a->error,
                         "%s started %d processes, and this one has no GPU (%s); on the CPU, they "
                         "can only reach each other through MPI: use mpirun, or srun --mpi=pmi2",
                         a->ranks.launcher, (int)a->ranks.world, mine.reason);
    }
    rank_gpu* all = (rank_gpu*)take(a, (size_t)a->ranks.world, sizeof *all);
    if (all == NULL || !gather(a, &mine, sizeof mine, all)) {
        free(all);
        return false;
    }
    for (int32_t i = a->ranks.world - 1; i >= 0; i--) {
        with = all[i].found != 0 ? i : with;
        without = all[i].found == 0 ? i : without;
    }
    if (with >= 0 && without >= 0) {
        ok = error_set(a->error,
                       "rank %d has a GPU, but rank %d has none (%s); use --backend cpu for all "
                       "ranks, or fewer of them",
                       (int)with, (int)without, all[without].reason);
    }
    a->ranks.agreed = !ok;
    free(all);
    return ok;
}

// Connects the GPUs, once the folder of the run belongs to rank 0 and before memory is planned.
static bool ranks_connect(app* a) {
    rank_id id;
    qlora_nccl_desc d;
    char path[PATH_SIZE];
    bool usable = false;
    if (a->ranks.world <= 1) {
        return true;
    }
    if (!ranks_alike(a)) {
        return false;
    }
    if (qlora_ctx_backend(a->ctx) == QLORA_BACKEND_CPU) {
        return true;
    }
    if (!id_share(a, &id, &usable)) {
        return false;
    }
    if (!usable && a->ranks.mpi) {
        say(a, "note: the exchange goes through MPI and host memory, which is slow: %s\n",
            id.error);
        return true;
    }
    if (!usable) {
        return error_set(a->error, "NCCL is needed to connect GPUs: %s", id.error);
    }
    memset(&d, 0, sizeof d);
    d.rank = a->ranks.rank;
    d.world = a->ranks.world;
    d.id = id.id;
    d.limit = (double)a->o.machine.rank_limit;
    bool ok = lib(a, qlora_comm_nccl(a->ctx, &d, &a->ranks.gpus), "connecting the GPUs");
    if (!a->ranks.mpi && a->ranks.rank == 0) {
        out_path(a, ID_NAME, path);
        remove(path);
    }
    if (ok && !a->ranks.mpi) {
        a->ranks.comm = a->ranks.gpus;
    }
    return ok;
}

// ---- --ranks ----

#ifndef _WIN32
// Starts this program again, as process `rank`. Returns its id, or -1.
static pid_t rank_start(int rank, int64_t count, char** argv) {
    char text[32];
    pid_t child = fork();
    if (child != 0) {
        return child;
    }
    snprintf(text, sizeof text, "%d", rank);
    setenv("FINETUNE_RANK", text, 1);
    snprintf(text, sizeof text, "%lld", (long long)count);
    setenv("FINETUNE_RANKS", text, 1);
    snprintf(text, sizeof text, "%ld.%lld", (long)getppid(), (long long)time(NULL));
    setenv("FINETUNE_RUN", text, 0);
    execvp(argv[0], argv);
    fprintf(stderr, "finetune: cannot start %s: %s\n", argv[0], strerror(errno));
    _exit(127);
}

// Passes a signal on to the processes that are left.
static void ranks_signal(const pid_t* ids, int64_t count, int number) {
    for (int64_t i = 0; i < count; i++) {
        if (ids[i] > 0) {
            kill(ids[i], number);
        }
    }
}

// Says how the first process ended that did not decide that itself. Returns its exit status.
static int rank_ended(int64_t rank, int status, bool first) {
    if (WIFSIGNALED(status) && first) {
        fprintf(stderr, "finetune: rank %lld was ended by signal %d\n", (long long)rank,
                WTERMSIG(status));
    }
    return WIFSIGNALED(status) ? 1 : WEXITSTATUS(status);
}

// Waits for all processes. After the first failure, the others have a few seconds to end.
static int ranks_wait(pid_t* ids, int64_t count) {
    int result = 0;
    int64_t left = count;
    double failed_at = 0.0;
    int sent = 0;
    bool told = false;
    while (left > 0) {
        int status = 0;
        pid_t ended = waitpid(-1, &status, WNOHANG);
        for (int64_t i = 0; i < count && ended > 0; i++) {
            if (ids[i] == ended) {
                int code = rank_ended(i, status, failed_at == 0.0);
                ids[i] = 0;
                left--;
                result = code != 0 && (result == 0 || result == 130) ? code : result;
                bool failed = code != 0 && code != 130; // not one that was asked to stop
                failed_at = failed && failed_at == 0.0 ? seconds_now() : failed_at;
            }
        }
        if (ended > 0) {
            continue;
        }
        if (stop_asked != 0 && !told) { // Ctrl-C reaches all of them, other signals only this one
            ranks_signal(ids, count, SIGTERM);
            told = true;
        }
        double since = failed_at > 0.0 ? seconds_now() - failed_at : 0.0;
        if (since > 5.0 * (sent + 1) && sent < 2) {
            ranks_signal(ids, count, sent == 0 ? SIGTERM : SIGKILL);
            sent++;
        }
        pause_ms(20);
    }
    return result;
}

// Starts --ranks processes and waits for them.
static bool ranks_run(app* a, char** argv, int* result) {
    pid_t ids[64];
    int64_t count = a->o.machine.ranks;
    char run[64];
    snprintf(run, sizeof run, "%ld.%.0f", (long)getpid(), seconds_now() * 1e3);
    setenv("FINETUNE_RUN", run, 1);
    for (int64_t i = 0; i < count; i++) {
        ids[i] = rank_start((int)i, count, argv);
        if (ids[i] < 0) {
            ranks_signal(ids, i, SIGKILL);
            return error_set(a->error, "cannot start a process: %s", strerror(errno));
        }
    }
    *result = ranks_wait(ids, count);
    return true;
}
#endif

#endif
