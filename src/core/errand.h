// ---- errands ------------------------------------------------------------------------------------
//
// An errand is work on the CPU that can be interrupted: it has a thread of its own, which takes
// turns with the thread that waits for it. A slice ends with the errand or, once its time is over,
// between two ranges of a parallel loop, wherever in the code that is. So the work and its order,
// and with them the bits, do not depend on how it is divided into slices.

typedef qlora_result (*qlora__errand_fn)(void* user);

// What a range of a loop should take: long enough for the clock not to matter, short enough to end
// a slice in time.
#define QLORA__RANGE_MS 0.1
// In slices shorter than this, products are cut into smaller units, which take a little longer.
#define QLORA__FINE_MS 50.0
// How many loops an errand remembers the first range of.
#define QLORA__FIRSTS 32

// What the context has of its own during a slice, and what it had before.
typedef struct qlora__errand_own {
    qlora__buffer* scratch;
    size_t scratch_used;
    qlora__packing* packing;
    int depth;
    size_t scratch_marks[QLORA__MAX_DEPTH];
} qlora__errand_own;

struct qlora__errand {
    struct qlora__errand* next; // of the context
    qlora__thread thread;
    qlora__mutex mutex;
    qlora__cond change;
    bool inside; // the errand's thread runs
    bool quit;
    bool taken;     // somebody uses it
    bool under_way; // fn has been called and has not returned
    bool dropped;   // loops do nothing from now on, so that fn returns soon
    bool fresh;     // nothing has been done in this slice
    bool fine;      // the slice is short
    qlora__errand_fn fn;
    void* user;
    qlora_result result;
    double now;     // when the last range ended, or the slice began
    double until;   // when the slice is over
    double longest; // milliseconds without a place where the slice could have ended
    double firsts[QLORA__FIRSTS]; // milliseconds of the first range of the last loops
    int64_t loops;
    // Of the model between two slices
    int32_t adapter;
    bool use_adapters;
    qlora__errand_own own;
};

// The thread of an errand, from its creation on.
static QLORA__UNUSED void qlora__errand_thread(void* user) {
    qlora__errand* e = (qlora__errand*)user;
    qlora__floating inherited;
    qlora__floating_default(&inherited);
    qlora__mutex_lock(&e->mutex);
    for (;;) {
        while (!e->inside && !e->quit) {
            qlora__cond_wait(&e->change, &e->mutex);
        }
        if (!e->inside) {
            break;
        }
        qlora__mutex_unlock(&e->mutex);
        qlora_result r = e->fn(e->user);
        qlora__mutex_lock(&e->mutex);
        e->result = r;
        e->under_way = false;
        e->inside = false;
        qlora__cond_wake(&e->change);
    }
    qlora__mutex_unlock(&e->mutex);
}

// Lets the other side run and waits until it is done.
static QLORA__UNUSED void qlora__errand_pass(qlora__errand* e, bool inside) {
    qlora__mutex_lock(&e->mutex);
    e->inside = inside;
    qlora__cond_wake(&e->change);
    while (e->inside == inside) {
        qlora__cond_wait(&e->change, &e->mutex);
    }
    qlora__mutex_unlock(&e->mutex);
}

// Something has been done: returns the milliseconds since the last time.
static QLORA__UNUSED double qlora__errand_tick(qlora__errand* e) {
    double before = e->now;
    e->now = qlora__clock_ms();
    double took = e->now > before ? e->now - before : 0.0;
    e->longest = took > e->longest ? took : e->longest;
    e->fresh = false;
    return took;
}

// Whether the work should be cut into small units.
static QLORA__UNUSED bool qlora__errand_fine(const qlora_ctx* ctx) {
    return ctx->errand != NULL && ctx->errand->fine;
}

// How long the first range of a loop may take: the second longest of the last loops, because the
// longest may be one during which another program had the core.
static QLORA__UNUSED double qlora__errand_first(const qlora__errand* e) {
    double longest = 0.0;
    double second = 0.0;
    for (int i = 0; i < QLORA__FIRSTS; i++) {
        double low = e->firsts[i] < longest ? e->firsts[i] : longest;
        second = low > second ? low : second;
        longest = e->firsts[i] > longest ? e->firsts[i] : longest;
    }
    return second;
}

// Ends the slice if what comes next, which takes `expected` milliseconds, does not fit into it.
static QLORA__UNUSED void qlora__errand_rest(qlora__errand* e, double expected) {
    if (!e->fresh && !e->dropped && !(e->now + expected <= e->until)) {
        qlora__errand_pass(e, false);
    }
}

// A place in serial code where a slice can end.
static QLORA__UNUSED void qlora__breathe(qlora_ctx* ctx) {
    if (ctx->errand != NULL) {
        (void)qlora__errand_tick(ctx->errand);
        qlora__errand_rest(ctx->errand, 0.0);
    }
}
