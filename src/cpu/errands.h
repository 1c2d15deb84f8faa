// ---- slices of an errand ------------------------------------------------------------------------
//
// Between two slices, other calls use the context, while the errand may be in the middle of its
// scratch and packing memory. The errand begins with that of the context. Whoever needs it in
// between gives the context other memory, of the same sizes, so that it takes the same paths, and
// the errand keeps what it has. So a step in slices needs no more memory than a whole one, unless
// something else is computed in the middle of it.

// Scratch and packing memory: the context's own, and what was allocated beside it.
struct qlora__working {
    struct qlora__working* next;
    qlora__buffer* scratch;
    qlora__packing* packing;
    qlora__buffer memory; // of the scratch; no bytes = the context's own
};

static void qlora__working_free(qlora_ctx* ctx, qlora__working* w) {
    if (w->memory.bytes > 0) {
        qlora__packing_destroy(ctx, w->packing);
        qlora__free(ctx, w->memory.data, w->memory.bytes);
    }
    qlora__free(ctx, w, sizeof *w);
}

static void qlora__working_add(qlora_ctx* ctx, qlora__working* w) {
    w->next = ctx->workings;
    ctx->workings = w;
}

// Memory that nothing is in the middle of; NULL = there is none.
static qlora__working* qlora__working_idle(const qlora_ctx* ctx) {
    qlora__working* w = ctx->workings;
    for (; w != NULL; w = w->next) {
        bool used = w->scratch == ctx->scratch;
        for (const qlora__errand* e = ctx->errands; e != NULL; e = e->next) {
            used = used || (e->under_way && e->own.scratch == w->scratch);
        }
        if (!used) {
            break;
        }
    }
    return w;
}

static qlora_result qlora__working_create(qlora_ctx* ctx, qlora__working** out) {
    qlora__working* w = (qlora__working*)qlora__alloc_zero(ctx, sizeof *w);
    if (w == NULL) {
        return QLORA_ERR_MEMORY;
    }
    w->memory.bytes = ctx->scratch->bytes;
    w->memory.data = qlora__alloc(ctx, w->memory.bytes);
    w->scratch = &w->memory;
    if (w->memory.data == NULL || qlora__packing_create(ctx, &w->packing) != QLORA_OK) {
        qlora__working_free(ctx, w);
        return QLORA_ERR_MEMORY;
    }
    qlora__working_add(ctx, w);
    *out = w;
    return QLORA_OK;
}

// Gives the context other memory than the errand that shares it.
static QLORA__UNUSED qlora_result qlora__errand_part(qlora_ctx* ctx) {
    if (ctx->workings == NULL) {
        qlora__working* own = (qlora__working*)qlora__alloc_zero(ctx, sizeof *own);
        if (own == NULL) {
            return QLORA_ERR_MEMORY;
        }
        own->scratch = ctx->scratch;
        own->packing = ctx->packing;
        qlora__working_add(ctx, own);
    }
    qlora__working* w = qlora__working_idle(ctx);
    if (w == NULL) {
        QLORA__TRY(qlora__working_create(ctx, &w));
    }
    ctx->scratch = w->scratch;
    ctx->packing = w->packing;
    ctx->sharing = NULL;
    return QLORA_OK;
}

static QLORA__UNUSED void qlora__workings_destroy(qlora_ctx* ctx) {
    while (ctx->workings != NULL) {
        qlora__working* w = ctx->workings;
        ctx->workings = w->next;
        if (w->memory.bytes == 0) {
            ctx->scratch = w->scratch;
            ctx->packing = w->packing;
        }
        qlora__working_free(ctx, w);
    }
}

// Exchanges what the context has for what the errand has.
static QLORA__UNUSED void qlora__errand_swap(qlora_ctx* ctx, qlora__errand* e) {
    qlora__errand_own own = e->own;
    e->own.scratch = ctx->scratch;
    e->own.scratch_used = ctx->scratch_used;
    e->own.packing = ctx->packing;
    e->own.depth = ctx->depth;
    memcpy(e->own.scratch_marks, ctx->scratch_marks, sizeof ctx->scratch_marks);
    ctx->scratch = own.scratch;
    ctx->scratch_used = own.scratch_used;
    ctx->packing = own.packing;
    ctx->depth = own.depth;
    memcpy(ctx->scratch_marks, own.scratch_marks, sizeof ctx->scratch_marks);
}

// *out is NULL if no thread can be started.
static QLORA__UNUSED qlora_result qlora__errand_create(qlora_ctx* ctx, qlora__errand** out) {
    qlora__errand* e = (qlora__errand*)qlora__alloc_zero(ctx, sizeof *e);
    *out = NULL;
    if (e == NULL) {
        return QLORA_ERR_MEMORY;
    }
    bool mutex = qlora__mutex_init(&e->mutex);
    bool cond = mutex && qlora__cond_init(&e->change);
    if (!cond || !qlora__thread_start(&e->thread, qlora__errand_thread, e)) {
        if (cond) {
            qlora__cond_free(&e->change);
        }
        if (mutex) {
            qlora__mutex_free(&e->mutex);
        }
        qlora__free(ctx, e, sizeof *e);
        return QLORA_OK;
    }
    e->next = ctx->errands;
    ctx->errands = e;
    *out = e;
    return QLORA_OK;
}

static QLORA__UNUSED void qlora__errands_destroy(qlora_ctx* ctx) {
    while (ctx->errands != NULL) {
        qlora__errand* e = ctx->errands;
        ctx->errands = e->next;
        qlora__mutex_lock(&e->mutex);
        e->quit = true;
        qlora__cond_wake(&e->change);
        qlora__mutex_unlock(&e->mutex);
        qlora__thread_join(&e->thread);
        qlora__cond_free(&e->change);
        qlora__mutex_free(&e->mutex);
        qlora__free(ctx, e, sizeof *e);
    }
    qlora__workings_destroy(ctx);
}

// Prepares an errand that calls fn(user) in slices; *out is NULL on a GPU, and if no thread can
// be started: the caller then does without.
static QLORA__UNUSED qlora_result qlora__errand_take(qlora_ctx* ctx, qlora__errand_fn fn,
                                                     void* user, qlora__errand** out) {
    *out = NULL;
    if (!qlora__on_cpu(ctx)) {
        return QLORA_OK;
    }
    qlora__errand* e = ctx->errands;
    while (e != NULL && e->taken) {
        e = e->next;
    }
    if (e == NULL) {
        QLORA__TRY(qlora__errand_create(ctx, &e));
    }
    if (e == NULL) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__working_need(ctx));
    ctx->sharing = e;
    ctx->part = qlora__errand_part;
    e->own.scratch = ctx->scratch;
    e->own.packing = ctx->packing;
    e->taken = true;
    e->under_way = true;
    e->dropped = false;
    e->fn = fn;
    e->user = user;
    e->result = QLORA_OK;
    e->longest = 0.0;
    e->own.scratch_used = 0;
    e->own.depth = 1; // as if the public call were the only one
    e->own.scratch_marks[0] = 0;
    *out = e;
    return QLORA_OK;
}

// Runs a slice of an errand, until a time of qlora__clock_ms; it does something in any case.
static QLORA__UNUSED void qlora__errand_slice(qlora_ctx* ctx, qlora__errand* e, double until) {
    e->now = qlora__clock_ms();
    e->until = until;
    e->fresh = true;
    e->fine = until - e->now < QLORA__FINE_MS;
    qlora__errand_swap(ctx, e);
    ctx->errand = e;
    qlora__errand_pass(e, true);
    ctx->errand = NULL;
    qlora__errand_swap(ctx, e);
    if (!e->under_way) {
        ctx->sharing = ctx->sharing == e ? NULL : ctx->sharing;
        (void)qlora__errand_tick(e);
    }
}
