// ---- copies in parallel with the stream ---------------------------------------------------------
//
// Memory that is not needed for a while is copied to pinned host memory and back. In a captured
// graph, the copies run on a stream of their own: a copy starts when everything queued before it
// on the stream has finished, copies run one after the other, and the stream goes on. Before using
// what a copy writes, or writing to what it reads, call qlora__away_wait. Outside a capture, copies
// are part of the stream. The host memory must live as long as the graph: it is the one host
// address that a graph may hold, and the host never touches it.

// CU_MEMHOSTALLOC_DEVICEMAP: kernels may use the memory, at the same address.
#define QLORA__CU_MEMHOSTALLOC_DEVICEMAP 2u

#ifndef QLORA_NO_CUDA

// Creates the stream and the events; once per context.
static QLORA__UNUSED qlora_result qlora__away_open(qlora_ctx* ctx) {
    qlora__gpu* gpu = ctx->gpu;
    if (gpu == NULL || gpu->beside->copies != NULL) {
        return QLORA_OK;
    }
    qlora__beside* b = gpu->beside;
    for (int i = 0; i < QLORA__AWAY_SLOTS; i++) {
        if (b->copied[i] == NULL) {
            int code = gpu->cu.EventCreate(&b->copied[i], QLORA__CU_EVENT_DISABLE_TIMING);
            QLORA__TRY(qlora__cu(ctx, code, "cuEventCreate"));
        }
    }
    return qlora__stream_create(ctx, &b->copies);
}

// Allocates host memory for copies; NULL with an error of the context if it is refused.
static QLORA__UNUSED void* qlora__away_alloc(qlora_ctx* ctx, size_t bytes) {
    void* p = NULL;
    if (ctx->gpu == NULL) {
        return NULL;
    }
    int code = ctx->gpu->cu.MemHostAlloc(&p, bytes, QLORA__CU_MEMHOSTALLOC_DEVICEMAP);
    if (qlora__cu(ctx, code, "cuMemHostAlloc") == QLORA_OK) {
        return p;
    }
    char why[128];
    snprintf(why, sizeof why, "%.120s", ctx->env.error);
    qlora__fail(ctx, QLORA_ERR_MEMORY,
                "offloading needs %.2f GiB of pinned host memory, which were refused: %s",
                (double)bytes / 1073741824.0, why);
    return NULL;
}

// Copies between device and host; `back` says in which direction.
static QLORA__UNUSED qlora_result qlora__away_copy(qlora_ctx* ctx, int slot, bool back,
                                                   const qlora_tensor* device, void* host) {
    qlora__gpu* gpu = ctx->gpu;
    qlora__beside* b = gpu->beside;
    bool captured = ctx->capture != NULL;
    void* stream = captured ? b->copies : gpu->stream;
    size_t bytes = (size_t)device->rows * (size_t)device->ld * qlora_dtype_bytes(device->dtype);
    qlora__CUdeviceptr at = (qlora__CUdeviceptr)(uintptr_t)device->data;
    QLORA__TRY(qlora__capture_note(ctx, device->data));
    if (captured) {
        QLORA__TRY(qlora__cu(ctx, gpu->cu.EventRecord(b->fork, gpu->stream), "cuEventRecord"));
        QLORA__TRY(
            qlora__cu(ctx, gpu->cu.StreamWaitEvent(stream, b->fork, 0), "cuStreamWaitEvent"));
        b->copies_forked = true;
    }
    QLORA__TRY(
        back ? qlora__cu(ctx, gpu->cu.MemcpyHtoDAsync(at, host, bytes, stream), "cuMemcpyHtoDAsync")
             : qlora__cu(ctx, gpu->cu.MemcpyDtoHAsync(host, at, bytes, stream),
                         "cuMemcpyDtoHAsync"));
    if (captured) {
        QLORA__TRY(qlora__cu(ctx, gpu->cu.EventRecord(b->copied[slot], stream), "cuEventRecord"));
        b->copies_pending |= 1u << slot;
    }
    return QLORA_OK;
}

// Later work on the stream starts only after all earlier copies in these slots (one bit each).
static QLORA__UNUSED qlora_result qlora__away_wait(qlora_ctx* ctx, unsigned slots) {
    qlora__gpu* gpu = ctx->gpu;
    for (int i = 0; gpu != NULL && ctx->capture != NULL && i < QLORA__AWAY_SLOTS; i++) {
        if ((slots & gpu->beside->copies_pending & 1u << i) != 0) {
            gpu->beside->copies_pending &= ~(1u << i);
            int code = gpu->cu.StreamWaitEvent(gpu->stream, gpu->beside->copied[i], 0);
            QLORA__TRY(qlora__cu(ctx, code, "cuStreamWaitEvent"));
        }
    }
    return QLORA_OK;
}

#else

static QLORA__UNUSED qlora_result qlora__away_open(qlora_ctx* ctx) {
    (void)ctx;
    return QLORA_OK;
}

static QLORA__UNUSED void* qlora__away_alloc(qlora_ctx* ctx, size_t bytes) {
    (void)ctx;
    (void)bytes;
    return NULL;
}

static QLORA__UNUSED qlora_result qlora__away_copy(qlora_ctx* ctx, int slot, bool back,
                                                   const qlora_tensor* device, void* host) {
    (void)ctx;
    (void)slot;
    (void)back;
    (void)device;
    (void)host;
    return QLORA_OK;
}

static QLORA__UNUSED qlora_result qlora__away_wait(qlora_ctx* ctx, unsigned slots) {
    (void)ctx;
    (void)slots;
    return QLORA_OK;
}

#endif
