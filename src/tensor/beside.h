// ---- work in parallel with the stream -----------------------------------------------------------
//
// Small kernels leave most of a large GPU idle. In a captured graph, the work between
// qlora__beside_begin and _end goes to a second stream: it starts when everything queued before
// _begin has finished, including earlier work on the second stream, and runs in parallel with the
// work after _end. Before using its results, or writing to its inputs, call qlora__beside_wait.
// Both streams share one scratch buffer, so work that needs scratch must stay on the first. Outside
// a capture everything runs on one stream in the order of the calls, with the same kernels and
// bit-identical results.

#ifndef QLORA_NO_CUDA

// Each piece of work on the second stream has a slot, counted from 0, by which it is waited for.
#define QLORA__BESIDE_SLOTS 5
#define QLORA__AWAY_SLOTS 4 // of copies, tensor/away.h

struct qlora__beside {
    void* stream;
    void* fork;                      // event: the second stream starts after it
    void* done[QLORA__BESIDE_SLOTS]; // events: the end of the work in each slot
    unsigned pending;                // bit i: done[i] was recorded and has not been waited for
    bool forked;                     // the second stream is part of this capture
    void* first;                     // the context's stream, while the second is in use
    qlora__buffer* workspace;        // for cuBLAS
    // A third stream, for copies from and to the host: tensor/away.h. It is NULL until it is used.
    void* copies;
    void* copied[QLORA__AWAY_SLOTS]; // events: the end of the copy in each slot
    unsigned copies_pending;
    bool copies_forked;
};

// Creates a stream with desc.stream_priority, or without a priority if the driver has none.
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
    for (int i = 0; i < QLORA__AWAY_SLOTS; i++) {
        if (b->copied[i] != NULL) {
            gpu->cu.EventDestroy(b->copied[i]);
        }
    }
    if (b->copies != NULL) {
        gpu->cu.StreamDestroy(b->copies);
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

// The cuBLAS workspace of the stream in use. Streams that run in parallel cannot share one.
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

// Returns to the context's stream, also after a failure.
static void qlora__beside_leave(qlora_ctx* ctx) {
    qlora__gpu* gpu = ctx->gpu;
    if (gpu->beside->first != NULL) {
        gpu->stream = gpu->beside->first;
        gpu->beside->first = NULL;
        gpu->cublas_bound = false;
    }
}

// Call it before a capture ends. A failure may have left the second stream unjoined; it is joined
// on a best-effort basis, because a capture with an unjoined stream cannot end.
static void qlora__beside_finish(qlora_ctx* ctx, bool failed) {
    qlora__gpu* gpu = ctx->gpu;
    qlora__beside* b = gpu->beside;
    qlora__beside_leave(ctx);
    if (failed && b->forked && gpu->cu.EventRecord(b->fork, b->stream) == 0) {
        gpu->cu.StreamWaitEvent(gpu->stream, b->fork, 0);
    }
    if (failed && b->copies_forked && gpu->cu.EventRecord(b->fork, b->copies) == 0) {
        gpu->cu.StreamWaitEvent(gpu->stream, b->fork, 0);
    }
    b->forked = false;
    b->pending = 0;
    b->copies_forked = false;
    b->copies_pending = 0;
}

// r is the result of the work since _begin; if it failed, the capture is lost anyway.
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

// Later work on the stream starts only after all earlier work in these slots (one bit each).
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
