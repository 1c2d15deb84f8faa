// ---- slices of an errand ------------------------------------------------------------------------
//
// Between two slices, other calls use the context. An errand therefore has scratch and working
// memory of its own, of the same sizes as those of the context, so that it takes the same paths.

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

static QLORA__UNUSED void qlora__errand_free(qlora_ctx* ctx, qlora__errand* e) {
    qlora__packing_destroy(ctx, e->own.packing);
    qlora__free(ctx, e->memory.data, e->memory.bytes);
    qlora__free(ctx, e, sizeof *e);
}

// *out is NULL if no thread can be started.
static QLORA__UNUSED qlora_result qlora__errand_create(qlora_ctx* ctx, qlora__errand** out) {
    qlora__errand* e = (qlora__errand*)qlora__alloc_zero(ctx, sizeof *e);
    *out = NULL;
    if (e == NULL) {
        return QLORA_ERR_MEMORY;
    }
    e->memory.bytes = ctx->scratch->bytes;
    e->memory.data = qlora__alloc(ctx, e->memory.bytes);
    e->own.scratch = &e->memory;
    if (e->memory.data == NULL || qlora__packing_create(ctx, &e->own.packing) != QLORA_OK) {
        qlora__errand_free(ctx, e);
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
        qlora__errand_free(ctx, e);
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
        qlora__errand_free(ctx, e);
    }
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
        (void)qlora__errand_tick(e);
    }
}
