// ---- staging ------------------------------------------------------------------------------------
//
// Host memory that asynchronous copies read from or write to. It is pinned on CUDA and ordinary
// memory on the CPU, where a copy is complete when the call returns. Higher floors copy and wait
// only through these functions, so they need no driver calls of their own.

#define QLORA__RING_SLOTS 4

// CU_MEMHOSTALLOC_DEVICEMAP: kernels may use the memory, at the same address; also the flag of
// memory that is registered.
#define QLORA__CU_MEMHOSTALLOC_DEVICEMAP 2u

typedef struct qlora__slot {
    char* memory;
    void* event; // recorded after the last copy from or to this slot
    bool busy;
} qlora__slot;

typedef struct qlora__ring {
    qlora__slot slots[QLORA__RING_SLOTS];
    int count;
    int next;
    size_t bytes;  // of each slot
    int64_t waits; // how often the host had to wait for a free slot
} qlora__ring;

static QLORA__UNUSED void* qlora__pinned_alloc(qlora_ctx* ctx, size_t bytes) {
#ifndef QLORA_NO_CUDA
    if (!qlora__on_cpu(ctx)) {
        void* p = NULL;
        int code = ctx->gpu->cu.MemHostAlloc(&p, bytes, 0);
        return qlora__cu(ctx, code, "cuMemHostAlloc") == QLORA_OK ? p : NULL;
    }
#endif
    return qlora__alloc(ctx, bytes);
}

// The same for memory that kernels write to, and the host reads after that. It is freed like other
// pinned memory.
static QLORA__UNUSED void* qlora__mapped_alloc(qlora_ctx* ctx, size_t bytes) {
#ifndef QLORA_NO_CUDA
    if (!qlora__on_cpu(ctx)) {
        void* p = NULL;
        int code = ctx->gpu->cu.MemHostAlloc(&p, bytes, QLORA__CU_MEMHOSTALLOC_DEVICEMAP);
        return qlora__cu(ctx, code, "cuMemHostAlloc") == QLORA_OK ? p : NULL;
    }
#endif
    return qlora__alloc(ctx, bytes);
}

static QLORA__UNUSED void qlora__pinned_free(qlora_ctx* ctx, void* p, size_t bytes) {
#ifndef QLORA_NO_CUDA
    if (!qlora__on_cpu(ctx)) {
        if (p != NULL) {
            ctx->gpu->cu.MemFreeHost(p);
        }
        return;
    }
#endif
    qlora__free(ctx, p, bytes);
}

// Creates an event without timing; NULL on the CPU.
static QLORA__UNUSED qlora_result qlora__event_create(qlora_ctx* ctx, void** out) {
    *out = NULL;
#ifndef QLORA_NO_CUDA
    if (!qlora__on_cpu(ctx)) {
        return qlora__cu(ctx, ctx->gpu->cu.EventCreate(out, QLORA__CU_EVENT_DISABLE_TIMING),
                         "cuEventCreate");
    }
#else
    (void)ctx;
#endif
    return QLORA_OK;
}

// The same with timing.
static QLORA__UNUSED qlora_result qlora__event_create_timed(qlora_ctx* ctx, void** out) {
    *out = NULL;
#ifndef QLORA_NO_CUDA
    if (!qlora__on_cpu(ctx)) {
        return qlora__cu(ctx, ctx->gpu->cu.EventCreate(out, 0), "cuEventCreate");
    }
#else
    (void)ctx;
#endif
    return QLORA_OK;
}

// Milliseconds between two events that the device has passed; 0 if they cannot be told.
static QLORA__UNUSED double qlora__event_ms(qlora_ctx* ctx, void* const events[2]) {
    float ms = 0.0f;
#ifndef QLORA_NO_CUDA
    if (events[0] != NULL && ctx->gpu->cu.EventElapsedTime(&ms, events[0], events[1]) != 0) {
        ms = 0.0f;
    }
#else
    (void)ctx;
    (void)events;
#endif
    return (double)ms;
}

static QLORA__UNUSED void qlora__event_destroy(qlora_ctx* ctx, void* event) {
#ifndef QLORA_NO_CUDA
    if (event != NULL) {
        ctx->gpu->cu.EventSynchronize(event);
        ctx->gpu->cu.EventDestroy(event);
    }
#else
    (void)ctx;
    (void)event;
#endif
}

// The same without waiting for work that may never end.
static QLORA__UNUSED void qlora__event_drop(qlora_ctx* ctx, void* event) {
#ifndef QLORA_NO_CUDA
    if (event != NULL) {
        ctx->gpu->cu.EventDestroy(event);
    }
#else
    (void)ctx;
    (void)event;
#endif
}

// Records the current position of the stream.
static QLORA__UNUSED qlora_result qlora__event_record(qlora_ctx* ctx, void* event) {
#ifndef QLORA_NO_CUDA
    if (event != NULL) {
        return qlora__cu(ctx, ctx->gpu->cu.EventRecord(event, ctx->gpu->stream), "cuEventRecord");
    }
#else
    (void)ctx;
    (void)event;
#endif
    return QLORA_OK;
}

// Returns whether the stream has passed the recorded position. A later wait reports any error.
static QLORA__UNUSED bool qlora__event_done(qlora_ctx* ctx, void* event) {
#ifndef QLORA_NO_CUDA
    if (event != NULL) {
        return ctx->gpu->cu.EventQuery(event) == 0;
    }
#else
    (void)ctx;
    (void)event;
#endif
    return true;
}

// The same for callers that never wait: an error of the device is returned.
static QLORA__UNUSED qlora_result qlora__event_poll(qlora_ctx* ctx, void* event, bool* done) {
    *done = true;
#ifndef QLORA_NO_CUDA
    if (event != NULL) {
        int code = ctx->gpu->cu.EventQuery(event);
        *done = code == 0;
        return code == QLORA__CUDA_ERROR_NOT_READY ? QLORA_OK
                                                   : qlora__cu(ctx, code, "cuEventQuery");
    }
#else
    (void)ctx;
    (void)event;
#endif
    return QLORA_OK;
}

// Whether everything that was queued on the stream has ended.
static QLORA__UNUSED qlora_result qlora__stream_poll(qlora_ctx* ctx, bool* done) {
    *done = true;
#ifndef QLORA_NO_CUDA
    if (ctx->gpu != NULL) {
        int code = ctx->gpu->cu.StreamQuery(ctx->gpu->stream);
        *done = code == 0;
        return code == QLORA__CUDA_ERROR_NOT_READY ? QLORA_OK
                                                   : qlora__cu(ctx, code, "cuStreamQuery");
    }
#else
    (void)ctx;
#endif
    return QLORA_OK;
}

static QLORA__UNUSED qlora_result qlora__event_wait(qlora_ctx* ctx, void* event) {
#ifndef QLORA_NO_CUDA
    if (event != NULL) {
        return qlora__cu(ctx, ctx->gpu->cu.EventSynchronize(event), "cuEventSynchronize");
    }
#else
    (void)ctx;
    (void)event;
#endif
    return QLORA_OK;
}

// Copies from the device to the host without waiting; the target must be pinned.
static QLORA__UNUSED qlora_result qlora__copy_out_later(qlora_ctx* ctx, void* to, const void* from,
                                                        size_t bytes) {
#ifndef QLORA_NO_CUDA
    if (!qlora__on_cpu(ctx)) {
        qlora__CUdeviceptr source = (qlora__CUdeviceptr)(uintptr_t)from;
        return qlora__cu(ctx, ctx->gpu->cu.MemcpyDtoHAsync(to, source, bytes, ctx->gpu->stream),
                         "cuMemcpyDtoHAsync");
    }
#else
    (void)ctx;
#endif
    memcpy(to, from, bytes);
    return QLORA_OK;
}

static QLORA__UNUSED void qlora__ring_destroy(qlora_ctx* ctx, qlora__ring* ring) {
    for (int i = 0; i < ring->count; i++) {
        qlora__event_destroy(ctx, ring->slots[i].event);
        qlora__pinned_free(ctx, ring->slots[i].memory, ring->bytes);
    }
    memset(ring, 0, sizeof *ring);
}

// The ring must be destroyed even if this fails.
static QLORA__UNUSED qlora_result qlora__ring_create(qlora_ctx* ctx, int count, size_t bytes,
                                                     qlora__ring* ring) {
    memset(ring, 0, sizeof *ring);
    ring->bytes = bytes;
    while (ring->count < count) {
        qlora__slot* slot = &ring->slots[ring->count++];
        slot->memory = (char*)qlora__pinned_alloc(ctx, bytes);
        if (slot->memory == NULL) {
            return QLORA_ERR_MEMORY;
        }
        QLORA__TRY(qlora__event_create(ctx, &slot->event));
    }
    return QLORA_OK;
}

// Returns the next slot; waits until no copy reads from it.
static QLORA__UNUSED qlora_result qlora__ring_take(qlora_ctx* ctx, qlora__ring* ring,
                                                   qlora__slot** out) {
    qlora__slot* slot = &ring->slots[ring->next];
    ring->next = (ring->next + 1) % ring->count;
    if (slot->busy && !qlora__event_done(ctx, slot->event)) {
        ring->waits++;
        QLORA__TRY(qlora__event_wait(ctx, slot->event));
    }
    slot->busy = false;
    *out = slot;
    return QLORA_OK;
}

// Copies from a slot's memory to the device without waiting.
static QLORA__UNUSED qlora_result qlora__slot_send(qlora_ctx* ctx, qlora__slot* slot, void* target,
                                                   const void* source, size_t bytes) {
#ifndef QLORA_NO_CUDA
    if (!qlora__on_cpu(ctx)) {
        qlora__CUdeviceptr to = (qlora__CUdeviceptr)(uintptr_t)target;
        QLORA__TRY(qlora__cu(ctx, ctx->gpu->cu.MemcpyHtoDAsync(to, source, bytes, ctx->gpu->stream),
                             "cuMemcpyHtoDAsync"));
        QLORA__TRY(qlora__event_record(ctx, slot->event));
        slot->busy = true;
        return QLORA_OK;
    }
#else
    (void)ctx;
    (void)slot;
#endif
    memcpy(target, source, bytes);
    return QLORA_OK;
}
