// ---- copies in parallel with the stream ---------------------------------------------------------
//
// Memory that is not needed for a while is copied to pinned host memory and back, on a stream of
// its own: a copy starts when everything queued before it on the context's stream has finished,
// copies run one after the other, and that stream goes on. Before using what a copy writes, or
// writing to what it reads, call qlora__away_wait; also before a capture, which cannot wait for
// copies that began outside of it, and before a replay. The host memory must live as long as the
// graph, and the host never touches it. A graph may hold no other host address but those of
// qlora__mapped_alloc.

// Pinned host memory.
typedef struct qlora__away_memory {
    void* data;
    void* own; // what it lies in, if it is ordinary memory that is registered; NULL = the driver's
    size_t own_bytes;
} qlora__away_memory;

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

// From this size on, the memory is ordinary memory that is registered: the driver takes long to
// allocate it (12 GiB beside an H200: 6.8 s, against 1.2 s with 16 threads).
#define QLORA__AWAY_LARGE ((size_t)256 << 20)
#define QLORA__AWAY_PAGE ((size_t)4096)

// Makes the system provide pages, which is most of the work.
static void qlora__away_touch(void* user, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
        ((volatile char*)user)[(size_t)i * QLORA__AWAY_PAGE] = 0;
    }
}

// Whether large memory can be registered, is then seen by kernels at the host's address, and is
// free now: the system may promise more than it has, and end the program later.
static bool qlora__away_can_register(qlora_ctx* ctx, size_t bytes) {
    qlora__gpu* gpu = ctx->gpu;
    int same = 0;
    return bytes >= QLORA__AWAY_LARGE && gpu->cu.MemHostRegister != NULL &&
           gpu->cu.MemHostUnregister != NULL &&
           gpu->cu.DeviceGetAttribute(
               &same, QLORA__CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM,
               gpu->device) == 0 &&
           same != 0 && qlora__os_memory("") >= bytes + bytes / 16;
}

static bool qlora__away_register(qlora_ctx* ctx, size_t bytes, qlora__away_memory* out) {
    out->own_bytes = bytes + QLORA__AWAY_PAGE;
    out->own = qlora__away_can_register(ctx, bytes) ? qlora__alloc(ctx, out->own_bytes) : NULL;
    if (out->own == NULL) {
        return false;
    }
    uintptr_t start = ((uintptr_t)out->own + QLORA__AWAY_PAGE - 1) / QLORA__AWAY_PAGE;
    char* data = (char*)out->own + (start * QLORA__AWAY_PAGE - (uintptr_t)out->own);
    int64_t pages = (int64_t)((bytes + QLORA__AWAY_PAGE - 1) / QLORA__AWAY_PAGE);
    if (qlora__pool_create(ctx, ctx->desc.threads) == QLORA_OK) { // a GPU needs none otherwise
        qlora__parallel(ctx, pages, 4096, qlora__away_touch, data);
    }
    qlora__pool_destroy(ctx);
    out->data = data;
    if (ctx->gpu->cu.MemHostRegister(data, bytes, QLORA__CU_MEMHOSTALLOC_DEVICEMAP) == 0) {
        return true;
    }
    qlora__free(ctx, out->own, out->own_bytes);
    return false;
}

static QLORA__UNUSED void qlora__away_free(qlora_ctx* ctx, qlora__away_memory* memory) {
    if (ctx->gpu != NULL && memory->data != NULL) {
        if (memory->own != NULL) {
            ctx->gpu->cu.MemHostUnregister(memory->data);
            qlora__free(ctx, memory->own, memory->own_bytes);
        } else {
            ctx->gpu->cu.MemFreeHost(memory->data);
        }
    }
    memset(memory, 0, sizeof *memory);
}

// Allocates host memory for copies; fails with an error of the context if it is refused.
static QLORA__UNUSED qlora_result qlora__away_alloc(qlora_ctx* ctx, size_t bytes,
                                                    qlora__away_memory* out) {
    memset(out, 0, sizeof *out);
    if (qlora__away_register(ctx, bytes, out)) {
        return QLORA_OK;
    }
    memset(out, 0, sizeof *out);
    int code = ctx->gpu->cu.MemHostAlloc(&out->data, bytes, QLORA__CU_MEMHOSTALLOC_DEVICEMAP);
    if (qlora__cu(ctx, code, "cuMemHostAlloc") == QLORA_OK) {
        return QLORA_OK;
    }
    out->data = NULL;
    char why[128];
    snprintf(why, sizeof why, "%.120s", ctx->env.error);
    qlora__fail(ctx, QLORA_ERR_MEMORY,
                "offloading needs %.2f GiB of pinned host memory, which were refused: %s; plan "
                "with less host memory, or without offloading",
                (double)bytes / 1073741824.0, why);
    return ctx->dead[0] != '\0' ? QLORA_ERR_DEVICE_LOST : QLORA_ERR_MEMORY;
}

// Copies between device and host; `back` says in which direction.
static QLORA__UNUSED qlora_result qlora__away_copy(qlora_ctx* ctx, int slot, bool back,
                                                   const qlora_tensor* device, void* host) {
    qlora__gpu* gpu = ctx->gpu;
    qlora__beside* b = gpu->beside;
    void* stream = b->copies;
    size_t bytes = (size_t)device->rows * (size_t)device->ld * qlora_dtype_bytes(device->dtype);
    qlora__CUdeviceptr at = (qlora__CUdeviceptr)(uintptr_t)device->data;
    QLORA__TRY(qlora__capture_note(ctx, device->data));
    QLORA__TRY(qlora__cu(ctx, gpu->cu.EventRecord(b->fork, gpu->stream), "cuEventRecord"));
    QLORA__TRY(qlora__cu(ctx, gpu->cu.StreamWaitEvent(stream, b->fork, 0), "cuStreamWaitEvent"));
    b->copies_forked = true;
    QLORA__TRY(
        back ? qlora__cu(ctx, gpu->cu.MemcpyHtoDAsync(at, host, bytes, stream), "cuMemcpyHtoDAsync")
             : qlora__cu(ctx, gpu->cu.MemcpyDtoHAsync(host, at, bytes, stream),
                         "cuMemcpyDtoHAsync"));
    QLORA__TRY(qlora__cu(ctx, gpu->cu.EventRecord(b->copied[slot], stream), "cuEventRecord"));
    b->copies_pending |= 1u << slot;
    return QLORA_OK;
}

// Later work on the stream starts only after all earlier copies in these slots (one bit each).
static QLORA__UNUSED qlora_result qlora__away_wait(qlora_ctx* ctx, unsigned slots) {
    qlora__gpu* gpu = ctx->gpu;
    for (int i = 0; gpu != NULL && i < QLORA__AWAY_SLOTS; i++) {
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

static QLORA__UNUSED void qlora__away_free(qlora_ctx* ctx, qlora__away_memory* memory) {
    (void)ctx;
    memset(memory, 0, sizeof *memory);
}

static QLORA__UNUSED qlora_result qlora__away_alloc(qlora_ctx* ctx, size_t bytes,
                                                    qlora__away_memory* out) {
    (void)bytes;
    memset(out, 0, sizeof *out);
    return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED, "offloading needs a GPU");
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
