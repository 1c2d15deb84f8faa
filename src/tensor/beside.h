#ifndef QLORA_NO_CUDA

// ---- work beside the stream ---------------------------------------------------------------------
//
// Small kernels leave most of a large GPU idle. In a captured graph, what lies between
// qlora__beside_begin and _end becomes a second line: it starts when all that was queued before
// _begin is done (and what went beside before it), and runs at the same time as what follows _end.
// Whoever needs its results, or writes what it reads, calls qlora__beside_wait first. Lines have
// one scratch between them, so work that needs scratch belongs to the first. Outside a capture all
// of it is one line, in the order of the calls: the same kernels, and the same bits.

// Whoever puts work on the second line gives it a slot, counted from 0.
#define QLORA__BESIDE_SLOTS 5

struct qlora__beside {
    void* stream;
    void* fork;                      // event: where the second line leaves the first
    void* done[QLORA__BESIDE_SLOTS]; // events: what the first line can wait for
    unsigned pending;                // bit i: done[i] was recorded and not waited for
    bool forked;                     // in this capture
    void* first;                     // the context's stream, while the second is in use
    qlora__buffer* workspace;        // for cuBLAS
};

// A stream of our own with desc.stream_priority; a driver without priorities gives a plain one.
static qlora_result qlora__stream_create(qlora_ctx* ctx, void** out) {
    qlora__gpu* gpu = ctx->gpu;
    int priority = (int)ctx->desc.stream_priority;
    if (priority != 0 && gpu->cu.StreamCreateWithPriority != NULL) {
        int code = gpu->cu.StreamCreateWithPriority(out, QLORA__CU_STREAM_NON_BLOCKING, priority);
        return qlora__cu(ctx, code, "cuStreamCreateWithPriority");
    }
    return qlora__cu(ctx, gpu->cu.StreamCreate(out, QLORA__CU_STREAM_NON_BLOCKING),
                     "cuStreamCreate");
}

static qlora_result qlora__beside_open(qlora_ctx* ctx) {
    qlora__gpu* gpu = ctx->gpu;
    qlora__beside* b = (qlora__beside*)qlora__alloc_zero(ctx, sizeof *b);
    if (b == NULL) {
        return QLORA_ERR_MEMORY;
    }
    gpu->beside = b;
    QLORA__TRY(qlora__stream_create(ctx, &b->stream));
    QLORA__TRY(qlora__cu(ctx, gpu->cu.EventCreate(&b->fork, QLORA__CU_EVENT_DISABLE_TIMING),
                         "cuEventCreate"));
    for (int i = 0; i < QLORA__BESIDE_SLOTS; i++) {
        QLORA__TRY(qlora__cu(ctx, gpu->cu.EventCreate(&b->done[i], QLORA__CU_EVENT_DISABLE_TIMING),
                             "cuEventCreate"));
    }
    return gpu->cublas != NULL ? qlora__buffer_create(ctx, ctx->desc.workspace_bytes, &b->workspace)
                               : QLORA_OK;
}

static void qlora__beside_close(qlora_ctx* ctx) {
    qlora__gpu* gpu = ctx->gpu;
    qlora__beside* b = gpu->beside;
    if (b == NULL) {
        return;
    }
    qlora__buffer_destroy(ctx, b->workspace);
    for (int i = 0; i < QLORA__BESIDE_SLOTS; i++) {
        if (b->done[i] != NULL) {
            gpu->cu.EventDestroy(b->done[i]);
        }
    }
    if (b->fork != NULL) {
        gpu->cu.EventDestroy(b->fork);
    }
    if (b->stream != NULL) {
        gpu->cu.StreamDestroy(b->stream);
    }
    qlora__free(ctx, b, sizeof *b);
    gpu->beside = NULL;
}

// What cuBLAS works in on the line in use: lines that run at the same time share nothing.
static QLORA__UNUSED void* qlora__beside_workspace(const qlora_ctx* ctx) {
    const qlora__gpu* gpu = ctx->gpu;
    bool second = gpu->beside != NULL && gpu->beside->first != NULL;
    return second ? gpu->beside->workspace->data : gpu->workspace;
}

static QLORA__UNUSED qlora_result qlora__beside_begin(qlora_ctx* ctx) {
    qlora__gpu* gpu = ctx->gpu;
    if (ctx->capture == NULL || gpu == NULL) {
        return QLORA_OK;
    }
    qlora__beside* b = gpu->beside;
    QLORA_ASSERT(b->first == NULL);
    QLORA__TRY(qlora__cu(ctx, gpu->cu.EventRecord(b->fork, gpu->stream), "cuEventRecord"));
    QLORA__TRY(qlora__cu(ctx, gpu->cu.StreamWaitEvent(b->stream, b->fork, 0), "cuStreamWaitEvent"));
    b->forked = true;
    b->first = gpu->stream;
    gpu->stream = b->stream;
    gpu->cublas_bound = false;
    return QLORA_OK;
}

// Back to the context's stream, whatever has happened.
static void qlora__beside_leave(qlora_ctx* ctx) {
    qlora__gpu* gpu = ctx->gpu;
    if (gpu->beside->first != NULL) {
        gpu->stream = gpu->beside->first;
        gpu->beside->first = NULL;
        gpu->cublas_bound = false;
    }
}

// Before a capture ends. What failed may have left the second line open: it is joined, as far as
// that still goes, because a capture may not end otherwise.
static void qlora__beside_finish(qlora_ctx* ctx, bool failed) {
    qlora__gpu* gpu = ctx->gpu;
    qlora__beside* b = gpu->beside;
    qlora__beside_leave(ctx);
    if (failed && b->forked && gpu->cu.EventRecord(b->fork, b->stream) == 0) {
        gpu->cu.StreamWaitEvent(gpu->stream, b->fork, 0);
    }
    b->forked = false;
    b->pending = 0;
}

// r is what the work between returned; on failure the capture is lost anyway.
static QLORA__UNUSED qlora_result qlora__beside_end(qlora_ctx* ctx, int slot, qlora_result r) {
    qlora__gpu* gpu = ctx->gpu;
    if (ctx->capture == NULL || gpu == NULL) {
        return r;
    }
    qlora__beside_leave(ctx);
    QLORA__TRY(r);
    QLORA__TRY(qlora__cu(ctx, gpu->cu.EventRecord(gpu->beside->done[slot], gpu->beside->stream),
                         "cuEventRecord"));
    gpu->beside->pending |= 1u << slot;
    return QLORA_OK;
}

// What follows on the stream comes after the work of these slots (bits), all of it so far.
static QLORA__UNUSED qlora_result qlora__beside_wait(qlora_ctx* ctx, unsigned slots) {
    qlora__gpu* gpu = ctx->gpu;
    for (int i = 0; gpu != NULL && ctx->capture != NULL && i < QLORA__BESIDE_SLOTS; i++) {
        if ((slots & gpu->beside->pending & 1u << i) != 0) {
            gpu->beside->pending &= ~(1u << i);
            QLORA__TRY(qlora__cu(ctx, gpu->cu.StreamWaitEvent(gpu->stream, gpu->beside->done[i], 0),
                                 "cuStreamWaitEvent"));
        }
    }
    return QLORA_OK;
}

#else

static QLORA__UNUSED qlora_result qlora__beside_begin(qlora_ctx* ctx) {
    (void)ctx;
    return QLORA_OK;
}

static QLORA__UNUSED qlora_result qlora__beside_end(qlora_ctx* ctx, int slot, qlora_result r) {
    (void)ctx;
    (void)slot;
    return r;
}

static QLORA__UNUSED qlora_result qlora__beside_wait(qlora_ctx* ctx, unsigned slots) {
    (void)ctx;
    (void)slots;
    return QLORA_OK;
}

#endif
