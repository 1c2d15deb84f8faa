// ---- CPU threads --------------------------------------------------------------------------------

typedef void (*qlora__range_fn)(void* user, int64_t begin, int64_t end);
// The same with the number of the thread, from 0 to qlora__slots() - 1: two ranges with the same
// slot never run at the same time, so each slot can have memory of its own.
typedef void (*qlora__slot_fn)(void* user, int slot, int64_t begin, int64_t end);

// A thread that runs out of work looks for more for about 30 us before it sleeps: waking a thread
// takes longer than the short serial parts between two jobs. It does not if there are more threads
// than cores, since it would keep another from working.
#if defined(__GNUC__) && (defined(__aarch64__) || defined(__x86_64__))
#define QLORA__SPINS 2000
static uint64_t qlora__spin_load(const uint64_t* word) {
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}
static void qlora__spin_store(uint64_t* word, uint64_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}
static void qlora__spin_pause(void) {
#if defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory");
#else
    __builtin_ia32_pause();
#endif
}
#else // a compiler without these: threads sleep at once
#define QLORA__SPINS 0
static uint64_t qlora__spin_load(const uint64_t* word) {
    return *word;
}
static void qlora__spin_store(uint64_t* word, uint64_t value) {
    *word = value;
}
static void qlora__spin_pause(void) {
}
#endif

struct qlora__pool {
    qlora__mutex mutex;
    qlora__cond wake;   // a job was posted, or quit
    qlora__cond idle;   // the last busy thread ran out of work
    qlora__range_fn fn; // this or slot_fn
    qlora__slot_fn slot_fn;
    void* user;
    int64_t count;
    int64_t grain;
    int64_t next; // first item not yet taken
    // Written with the mutex held, read without it by threads that look for work
    uint64_t job;
    uint64_t busy; // threads that work
    int spins;
    int asleep; // workers that wait for a job
    bool quit;
    int workers;
    int numbered; // workers that have a slot
    qlora__thread threads[QLORA__MAX_THREADS];
};

// Waits a short time for a change of job or busy. Called with the mutex held, which is released
// while waiting.
static bool qlora__pool_spin(qlora__pool* pool, const uint64_t* word) {
    uint64_t old = *word;
    const int spins = pool->spins;
    bool changed = false;
    if (spins == 0) {
        return false;
    }
    qlora__mutex_unlock(&pool->mutex);
    for (int i = 0; i < spins && !changed; i++) {
        qlora__spin_pause();
        changed = qlora__spin_load(word) != old;
    }
    qlora__mutex_lock(&pool->mutex);
    return *word != old;
}

// Processes ranges until none is left. Called with the mutex held.
static void qlora__pool_work(qlora__pool* pool, int slot) {
    qlora__spin_store(&pool->busy, pool->busy + 1);
    while (pool->next < pool->count) {
        int64_t begin = pool->next;
        int64_t end = qlora__min(begin + pool->grain, pool->count);
        pool->next = end;
        qlora__mutex_unlock(&pool->mutex);
        if (pool->slot_fn != NULL) {
            pool->slot_fn(pool->user, slot, begin, end);
        } else {
            pool->fn(pool->user, begin, end);
        }
        qlora__mutex_lock(&pool->mutex);
    }
    qlora__spin_store(&pool->busy, pool->busy - 1);
    if (pool->busy == 0) {
        qlora__cond_wake(&pool->idle);
    }
}

static void qlora__pool_thread(void* user) {
    qlora__pool* pool = (qlora__pool*)user;
    qlora__floating inherited;
    qlora__floating_default(&inherited);
    qlora__mutex_lock(&pool->mutex);
    uint64_t seen = 0;
    int slot = ++pool->numbered;
    for (;;) {
        while (pool->job == seen && !pool->quit) {
            if (!qlora__pool_spin(pool, &pool->job) && pool->job == seen && !pool->quit) {
                pool->asleep++;
                qlora__cond_wait(&pool->wake, &pool->mutex);
                pool->asleep--;
            }
        }
        if (pool->quit) {
            break;
        }
        seen = pool->job;
        qlora__pool_work(pool, slot);
    }
    qlora__mutex_unlock(&pool->mutex);
}

// Starts threads - 1 workers; the calling thread is the last one. If a thread cannot be started,
// the pool runs with fewer.
static qlora_result qlora__pool_create(qlora_ctx* ctx, int32_t threads) {
    if (threads <= 1) {
        return QLORA_OK;
    }
    qlora__pool* pool = (qlora__pool*)qlora__alloc_zero(ctx, sizeof *pool);
    if (pool == NULL) {
        return QLORA_ERR_MEMORY;
    }
    if (!qlora__mutex_init(&pool->mutex) || !qlora__cond_init(&pool->wake) ||
        !qlora__cond_init(&pool->idle)) {
        qlora__free(ctx, pool, sizeof *pool);
        return qlora__fail(ctx, QLORA_ERR_MEMORY, "cannot create a lock for the CPU threads");
    }
    pool->spins = threads <= qlora__core_count() ? QLORA__SPINS : 0;
    while (pool->workers < threads - 1 &&
           qlora__thread_start(&pool->threads[pool->workers], qlora__pool_thread, pool)) {
        pool->workers++;
    }
    ctx->pool = pool;
    return QLORA_OK;
}

static void qlora__pool_destroy(qlora_ctx* ctx) {
    qlora__pool* pool = ctx->pool;
    if (pool == NULL) {
        return;
    }
    qlora__mutex_lock(&pool->mutex);
    pool->quit = true;
    qlora__cond_wake(&pool->wake);
    qlora__mutex_unlock(&pool->mutex);
    for (int i = 0; i < pool->workers; i++) {
        qlora__thread_join(&pool->threads[i]);
    }
    qlora__cond_free(&pool->idle);
    qlora__cond_free(&pool->wake);
    qlora__mutex_free(&pool->mutex);
    qlora__free(ctx, pool, sizeof *pool);
    ctx->pool = NULL;
}

// What a parallel loop does: fn or slot_fn over [0, count).
typedef struct qlora__loop {
    qlora__range_fn fn;
    qlora__slot_fn slot_fn;
    void* user;
    int64_t count;
    int64_t grain;
} qlora__loop;

// Runs [begin, end) of a loop with all threads.
static void qlora__pool_run(qlora__pool* pool, const qlora__loop* loop, int64_t begin,
                            int64_t end) {
    qlora__mutex_lock(&pool->mutex);
    pool->fn = loop->fn;
    pool->slot_fn = loop->slot_fn;
    pool->user = loop->user;
    pool->count = end;
    pool->grain = loop->grain > 0 ? loop->grain : 1;
    pool->next = begin;
    qlora__spin_store(&pool->job, pool->job + 1);
    qlora__cond_wake(&pool->wake);
    qlora__pool_work(pool, 0);
    while (pool->busy > 0) {
        if (!qlora__pool_spin(pool, &pool->busy) && pool->busy > 0) {
            qlora__cond_wait(&pool->idle, &pool->mutex);
        }
    }
    qlora__mutex_unlock(&pool->mutex);
}

// Runs [begin, end) of a loop.
static void qlora__loop_run(qlora_ctx* ctx, const qlora__loop* loop, int64_t begin, int64_t end) {
    qlora__pool* pool = ctx->pool;
    if (pool != NULL && pool->workers > 0 && end - begin > loop->grain) {
        qlora__pool_run(pool, loop, begin, end);
    } else if (end > begin && loop->slot_fn != NULL) {
        loop->slot_fn(loop->user, 0, begin, end);
    } else if (end > begin) {
        loop->fn(loop->user, begin, end);
    }
}

// The number of slots: of threads that can run at the same time.
static QLORA__UNUSED int qlora__slots(const qlora_ctx* ctx) {
    return 1 + (ctx->pool != NULL ? ctx->pool->workers : 0);
}

// A loop of an errand: range by range, each of whole grains for all threads. The time of the next
// one follows from the shorter of the last two, so that a range during which another program had
// the core does not count; that of the first one, from those of other loops.
static QLORA__UNUSED void qlora__loop_errand(qlora_ctx* ctx, const qlora__loop* loop) {
    qlora__errand* e = ctx->errand;
    int64_t least = qlora__max(loop->grain, 1) * qlora__slots(ctx);
    int64_t items = least;
    double last = 0.0; // milliseconds per item; 0 = not known
    double item = 0.0;
    for (int64_t at = 0; at < loop->count;) {
        qlora__errand_rest(e, at > 0 ? item * (double)items : qlora__errand_first(e));
        if (e->dropped) {
            return;
        }
        int64_t end = qlora__min(at + items, loop->count);
        qlora__loop_run(ctx, loop, at, end);
        double took = qlora__errand_tick(e);
        if (at == 0) {
            e->firsts[e->loops++ % QLORA__FIRSTS] = took;
        }
        took = took > 1e-9 ? took / (double)(end - at) : 1e-9;
        item = last > 0.0 && last < took ? last : took;
        last = took;
        double fit = QLORA__RANGE_MS / item / (double)least;
        double most = 4.0 * (double)(items / least);
        items = least * (int64_t)(fit < 1.0 ? 1.0 : fit > most ? most : fit);
        at = end;
    }
}

static QLORA__UNUSED void qlora__loop_start(qlora_ctx* ctx, const qlora__loop* loop) {
    if (ctx->errand != NULL) {
        qlora__loop_errand(ctx, loop);
    } else {
        qlora__loop_run(ctx, loop, 0, loop->count);
    }
}

// Calls fn(user, begin, end) over [0, count), at most `grain` items at a time. Every output must
// have one writer, so that results do not depend on which thread ran which range.
static QLORA__UNUSED void qlora__parallel(qlora_ctx* ctx, int64_t count, int64_t grain,
                                          qlora__range_fn fn, void* user) {
    const qlora__loop loop = {fn, NULL, user, count, grain};
    qlora__loop_start(ctx, &loop);
}

// The same with slots; see qlora__slot_fn.
static QLORA__UNUSED void qlora__parallel_slots(qlora_ctx* ctx, int64_t count, int64_t grain,
                                                qlora__slot_fn fn, void* user) {
    const qlora__loop loop = {NULL, fn, user, count, grain};
    qlora__loop_start(ctx, &loop);
}
