// ---- contexts -----------------------------------------------------------------------------------

// Default sizes of a CUDA context: one scratch buffer, and a cuBLAS workspace for each of its two
// streams.
#define QLORA__SCRATCH_BYTES ((size_t)64 << 20)
#define QLORA__WORKSPACE_BYTES ((size_t)32 << 20)

// Replaces the zero fields of a desc by their defaults.
static qlora_ctx_desc qlora__ctx_desc_defaults(const qlora_ctx_desc* given) {
    qlora_ctx_desc d;
    memset(&d, 0, sizeof d);
    if (given != NULL) {
        d = *given;
    }
    qlora__hooks_default(&d.allocator, &d.files);
    if (d.threads == 0) {
        d.threads = (int32_t)qlora__min(qlora__core_count(), QLORA__MAX_THREADS);
    }
    if (d.workspace_bytes == 0) {
        d.workspace_bytes = QLORA__WORKSPACE_BYTES;
    }
    return d;
}

// Describes what is wrong with a desc; the text is empty if nothing is.
static void qlora__ctx_desc_fault(const qlora_ctx_desc* d, char* text, size_t size) {
    text[0] = '\0';
    int hooks = qlora__files_count(&d->files);
    if (d->reserved_must_be_zero0 != 0 || d->reserved_must_be_zero1 != 0) {
        snprintf(text, size, "a reserved field of desc is not 0; zero the desc before filling it");
    } else if ((d->allocator.alloc == NULL) != (d->allocator.free == NULL)) {
        snprintf(text, size, "desc.allocator.%s is NULL; set both functions or neither",
                 d->allocator.alloc == NULL ? "alloc" : "free");
    } else if ((d->device_allocator.alloc == NULL) != (d->device_allocator.free == NULL)) {
        snprintf(text, size, "desc.device_allocator.%s is NULL; set both functions or neither",
                 d->device_allocator.alloc == NULL ? "alloc" : "free");
    } else if (hooks != 0 && hooks != QLORA__FILES_ALL) {
        snprintf(text, size, "desc.files has %d of %d functions; set all of them or none", hooks,
                 QLORA__FILES_ALL);
    } else if ((int)d->require_backend < 0 || d->require_backend > QLORA_BACKEND_CUDA) {
        snprintf(text, size, "desc.require_backend is %d; it must be one of qlora_backend",
                 (int)d->require_backend);
    } else if ((int)d->cpu_tier < 0 || d->cpu_tier >= QLORA_CPU_TIER_COUNT) {
        snprintf(text, size, "desc.cpu_tier is %d; it must be one of qlora_cpu_tier",
                 (int)d->cpu_tier);
    } else if ((int)d->math < 0 || d->math > QLORA_MATH_TF32_ALL) {
        snprintf(text, size, "desc.math is %d; it must be one of qlora_math", (int)d->math);
    } else if (d->threads < 0 || d->threads > QLORA__MAX_THREADS) {
        snprintf(text, size, "desc.threads is %d; it must be from 0 to %d", (int)d->threads,
                 QLORA__MAX_THREADS);
    } else if (d->workspace != NULL && (uintptr_t)d->workspace % 256 != 0) {
        snprintf(text, size, "desc.workspace must be aligned to 256 bytes");
    } else if (d->workspace != NULL && d->workspace_bytes == 0) {
        snprintf(text, size, "desc.workspace_bytes is 0; set it to the size of desc.workspace");
    }
}

// Fails if the caller asked for a GPU that cannot be used: by require_backend, or by naming a
// device or handles of its own. ctx->reason says why not.
static qlora_result qlora__cpu_suffices(qlora_ctx* ctx) {
    const qlora_ctx_desc* d = &ctx->desc;
    if (d->require_backend == QLORA_BACKEND_CUDA) {
        return qlora__fail(ctx, QLORA_ERR_BACKEND, "CUDA is required but not available: %.600s",
                           ctx->reason);
    }
    const char* asked = d->cu_context != NULL  ? "cu_context is set"
                        : d->cu_stream != NULL ? "cu_stream is set"
                        : d->workspace != NULL ? "workspace is set"
                                               : NULL;
    if (d->require_backend != QLORA_BACKEND_CPU && (asked != NULL || d->device != 0)) {
        char device[48];
        snprintf(device, sizeof device, "device is %d", (int)d->device);
        return qlora__fail(ctx, QLORA_ERR_BACKEND, "desc.%s, but CUDA is not available: %.600s",
                           asked != NULL ? asked : device, ctx->reason);
    }
    return QLORA_OK;
}

#ifndef QLORA_NO_CUDA

// Frees everything that qlora__gpu_open_tools created. The device's context must be current.
static void qlora__gpu_close_tools(qlora_ctx* ctx) {
    qlora__gpu* gpu = ctx->gpu;
    qlora__lt_close(ctx);
    if (gpu->cublas != NULL) {
        gpu->blas.Destroy(gpu->cublas);
        gpu->cublas = NULL;
    }
    qlora__cache_destroy(ctx);
    qlora__beside_close(ctx);
    qlora__buffer_destroy(ctx, gpu->own_workspace);
    qlora__buffer_destroy(ctx, ctx->scratch);
    gpu->own_workspace = NULL;
    ctx->scratch = NULL;
    if (gpu->own_stream != NULL) {
        gpu->cu.StreamDestroy(gpu->own_stream);
        gpu->own_stream = NULL;
    }
}

// Releases the device, after qlora__gpu_close_tools.
static void qlora__gpu_close(qlora_ctx* ctx) {
    qlora__gpu* gpu = ctx->gpu;
    if (gpu == NULL) {
        return;
    }
    if (gpu->owns_context) {
        gpu->cu.DevicePrimaryCtxRelease(gpu->device);
    }
    qlora__free(ctx, gpu, sizeof *gpu);
    ctx->gpu = NULL;
}

// A stream must belong to the same CUDA context. The legacy default stream (NULL or 1) cannot be
// captured; the default stream per thread (2) is another one in every thread.
static qlora_result qlora__stream_check(qlora_ctx* ctx, void* stream) {
    qlora__gpu* gpu = ctx->gpu;
    if ((uintptr_t)stream == 1) {
        return qlora__fail(
            ctx, QLORA_ERR_ARGUMENT,
            "the stream is the legacy default stream, which cannot be captured; create a stream");
    }
    if ((uintptr_t)stream == 2) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "the stream is the per-thread default stream, which is a different one "
                           "in every thread; create a stream");
    }
    void* owner = NULL;
    QLORA__TRY(qlora__cu(ctx, gpu->cu.StreamGetCtx(stream, &owner), "cuStreamGetCtx"));
    if (owner != gpu->context) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "the stream belongs to another CUDA context");
    }
    return QLORA_OK;
}

static qlora_result qlora__gpu_open_stream(qlora_ctx* ctx) {
    qlora__gpu* gpu = ctx->gpu;
    QLORA__TRY(qlora__stream_create(ctx, &gpu->own_stream));
    gpu->stream = gpu->own_stream;
    if (ctx->desc.cu_stream != NULL) {
        QLORA__TRY(qlora__stream_check(ctx, ctx->desc.cu_stream));
        gpu->stream = ctx->desc.cu_stream;
    }
    return QLORA_OK;
}

// Creates the streams, the scratch buffer and the cache, and opens cuBLAS. The device's context
// must be current.
static qlora_result qlora__gpu_open_tools(qlora_ctx* ctx) {
    qlora__gpu* gpu = ctx->gpu;
    QLORA__TRY(qlora__gpu_open_stream(ctx));
    gpu->cache = (qlora__cache*)qlora__alloc_zero(ctx, sizeof *gpu->cache);
    if (gpu->cache == NULL) {
        return QLORA_ERR_MEMORY;
    }
    if (ctx->desc.scratch_bytes == 0) {
        ctx->desc.scratch_bytes = QLORA__SCRATCH_BYTES;
    }
    QLORA__TRY(qlora__buffer_create(ctx, ctx->desc.scratch_bytes, &ctx->scratch));
    if (!qlora__cublas_open(ctx)) {
        QLORA__LOG(ctx, WARN, CUBLAS, "cuBLAS %s; the built-in kernels do the products",
                   gpu->cublas_note);
        return qlora__beside_open(ctx);
    }
    gpu->workspace = ctx->desc.workspace;
    if (gpu->workspace == NULL) {
        QLORA__TRY(qlora__buffer_create(ctx, ctx->desc.workspace_bytes, &gpu->own_workspace));
        gpu->workspace = gpu->own_workspace->data;
    }
    QLORA__TRY(qlora__cublas_bind(ctx, qlora__beside_workspace(ctx)));
    QLORA__LOG(ctx, INFO, CUBLAS, "cuBLAS %s", gpu->cublas_note);
    return qlora__beside_open(ctx);
}

static qlora_result qlora__gpu_open(qlora_ctx* ctx, int target_limit) {
    qlora__gpu* gpu = (qlora__gpu*)qlora__alloc_zero(ctx, sizeof *gpu);
    if (gpu == NULL) {
        return QLORA_ERR_MEMORY;
    }
    ctx->gpu = gpu;
    QLORA__TRY(qlora__gpu_load(ctx));
    QLORA__TRY(qlora__gpu_choose_device(ctx));
    QLORA__TRY(qlora__gpu_read_facts(ctx, target_limit));
    if (gpu->context == NULL) {
        QLORA__TRY(qlora__cu(ctx, gpu->cu.DevicePrimaryCtxRetain(&gpu->context, gpu->device),
                             "cuDevicePrimaryCtxRetain"));
        gpu->owns_context = true;
    }
    QLORA__TRY(qlora__gpu_activate(ctx));
    ctx->backend = QLORA_BACKEND_CUDA; // from here on, memory comes from the device
    qlora_result r = qlora__gpu_open_tools(ctx);
    if (r != QLORA_OK) {
        qlora__gpu_close_tools(ctx);
    }
    qlora__gpu_deactivate(ctx);
    return r;
}

static qlora_result qlora__ctx_open_backend(qlora_ctx* ctx) {
    if (ctx->desc.require_backend == QLORA_BACKEND_CPU) {
        snprintf(ctx->reason, sizeof ctx->reason, "requested by desc.require_backend");
        return QLORA_OK;
    }
    int target_limit = 0;
    QLORA__TRY(qlora__gpu_target_limit(ctx, &target_limit));
    qlora_result r = qlora__gpu_open(ctx, target_limit);
    if (r == QLORA_OK) {
        ctx->activate = qlora__gpu_activate;
        ctx->deactivate = qlora__gpu_deactivate;
        snprintf(ctx->reason, sizeof ctx->reason, "%s, compute capability %d.%d, kernels for %s",
                 ctx->gpu->device_name, ctx->gpu->capability / 10, ctx->gpu->capability % 10,
                 ctx->gpu->target);
        return QLORA_OK;
    }
    // The reason for a CPU context is the error without the name of the public call.
    snprintf(ctx->reason, sizeof ctx->reason, "%s", qlora__env_reason(&ctx->env));
    qlora__gpu_close(ctx);
    ctx->backend = QLORA_BACKEND_CPU;
    ctx->dead[0] = '\0';
    if (r == QLORA_ERR_MEMORY) {
        return r;
    }
    return qlora__cpu_suffices(ctx);
}

#else

static void qlora__gpu_close_tools(qlora_ctx* ctx) {
    (void)ctx;
}

static void qlora__gpu_close(qlora_ctx* ctx) {
    (void)ctx;
}

static qlora_result qlora__ctx_open_backend(qlora_ctx* ctx) {
    snprintf(ctx->reason, sizeof ctx->reason, "built with QLORA_NO_CUDA");
    return qlora__cpu_suffices(ctx);
}

#endif

static qlora_result qlora__ctx_open(qlora_ctx* ctx) {
    QLORA__TRY(qlora__cpu_choose(ctx));
    QLORA__TRY(qlora__ctx_open_backend(ctx));
    QLORA__LOG(ctx, INFO, BACKEND, "%s: %s", qlora__on_cpu(ctx) ? "CPU" : "CUDA", ctx->reason);
    if (!qlora__on_cpu(ctx)) {
        return QLORA_OK;
    }
    if (ctx->desc.scratch_bytes == 0) {
        ctx->desc.scratch_bytes = (size_t)16 << 20;
    }
    QLORA__TRY(qlora__buffer_create(ctx, ctx->desc.scratch_bytes, &ctx->scratch));
    QLORA__TRY(qlora__pool_create(ctx, ctx->desc.threads));
    return qlora__packing_create(ctx, &ctx->packing);
}

static void qlora__ctx_close(qlora_ctx* ctx) {
    qlora__errands_destroy(ctx);
    qlora__packing_destroy(ctx, ctx->packing);
    ctx->packing = NULL;
    qlora__pool_destroy(ctx);
    if (qlora__on_cpu(ctx)) {
        qlora__buffer_destroy(ctx, ctx->scratch);
        ctx->scratch = NULL;
    }
    qlora__gpu_close(ctx);
}

// Writes to the caller's error_text, the only place for errors before there is a context.
static void qlora__tell(const qlora_ctx_desc* desc, const char* text) {
    if (desc != NULL && desc->error_text != NULL && desc->error_text_size > 0) {
        snprintf(desc->error_text, desc->error_text_size, "%s", text);
    }
}

// A program and a library with different layouts of a struct would misread each other's fields.
static bool qlora__abi_fits(const qlora_ctx_desc* desc, int version, uint64_t abi) {
    char text[256];
    if (version == QLORA_VERSION && abi == (uint64_t)QLORA_ABI) {
        return true;
    }
    if (version != QLORA_VERSION) {
        snprintf(
            text, sizeof text,
            "qlora_ctx_create: the program was compiled with qlora.h %d.%d.%d, this library with "
            "%s; compile both with the same header",
            version / 10000, version / 100 % 100, version % 100, QLORA_VERSION_STRING);
    } else {
        snprintf(text, sizeof text,
                 "qlora_ctx_create: the program and this library were compiled with different "
                 "headers of version %s (struct sizes %llx and %llx); compile both with the same",
                 QLORA_VERSION_STRING, (unsigned long long)abi, (unsigned long long)QLORA_ABI);
    }
    qlora__tell(desc, text); // the position of error_text in the desc never changes
    return false;
}

qlora_result qlora_ctx_create_abi(const qlora_ctx_desc* desc, qlora_ctx** out, int version,
                                  uint64_t abi) {
    qlora__tell(desc, "");
    if (!qlora__abi_fits(desc, version, abi)) {
        return QLORA_ERR_VERSION;
    }
    char fault[128] = "";
    if (out == NULL) {
        snprintf(fault, sizeof fault, "out is NULL");
    } else if (desc != NULL) {
        qlora__ctx_desc_fault(desc, fault, sizeof fault);
    }
    if (fault[0] != '\0') {
        char text[160];
        snprintf(text, sizeof text, "qlora_ctx_create: %s", fault);
        qlora__tell(desc, text);
        return QLORA_ERR_ARGUMENT;
    }
    qlora_ctx_desc resolved = qlora__ctx_desc_defaults(desc);
    qlora_ctx* ctx = (qlora_ctx*)resolved.allocator.alloc(sizeof *ctx, 64, resolved.allocator.user);
    if (ctx == NULL) {
        qlora__tell(desc, "qlora_ctx_create: cannot allocate host memory for the context");
        return QLORA_ERR_MEMORY;
    }
    memset(ctx, 0, sizeof *ctx);
    ctx->desc = resolved;
    ctx->env.allocator = resolved.allocator;
    ctx->env.files = resolved.files;
    ctx->env.log = resolved.log;
    ctx->env.log_user = resolved.log_user;
    ctx->backend = QLORA_BACKEND_CPU;
    ctx->env.call = "qlora_ctx_create";
    qlora_result r = qlora__ctx_open(ctx);
    if (r != QLORA_OK) {
        qlora__tell(desc, ctx->env.error);
        qlora__ctx_close(ctx);
        resolved.allocator.free(ctx, sizeof *ctx, resolved.allocator.user);
        return r;
    }
    ctx->env.error[0] = '\0';
    ctx->desc.error_text = NULL; // the caller's buffer may not outlive this call
    ctx->desc.error_text_size = 0;
    *out = ctx;
    return QLORA_OK;
}

// Lists the objects that still exist, as "2 tensors, 1 model"; empty if there are none.
static void qlora__living_text(const qlora_ctx* ctx, char* text, size_t size) {
    static const char* const names[] = {"tensor", "clip",    "graph",
                                        "model",  "trainer", "generation"};
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < QLORA__KINDS; i++) {
        if (ctx->living[i] != 0) {
            qlora__append(text, size, &used, "%s%lld %s%s", used > 0 ? ", " : "",
                          (long long)ctx->living[i], names[i], ctx->living[i] == 1 ? "" : "s");
        }
    }
}

qlora_result qlora_ctx_destroy(qlora_ctx* ctx) {
    if (ctx == NULL) {
        return QLORA_OK;
    }
    if (ctx->depth > 0) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "qlora_ctx_destroy was called from inside another call on this context");
    }
    ctx->env.call = "qlora_ctx_destroy";
    char living[160];
    qlora__living_text(ctx, living, sizeof living);
    if (living[0] != '\0') {
        QLORA__LOG(ctx, ERROR, LEAK, "objects that still exist: %s", living);
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "objects of this context still exist: %s; "
                           "destroy them first",
                           living);
    }
    if (!qlora__on_cpu(ctx)) {
        QLORA__TRY(qlora__enter_destroy(ctx, "qlora_ctx_destroy"));
        qlora__gpu_close_tools(ctx);
        qlora_result ignored = qlora__leave(ctx, QLORA_OK);
        (void)ignored;
    }
    qlora__ctx_close(ctx);
    qlora_allocator allocator = ctx->desc.allocator;
    allocator.free(ctx, sizeof *ctx, allocator.user);
    return QLORA_OK;
}

qlora_backend qlora_ctx_backend(const qlora_ctx* ctx) {
    return ctx != NULL ? ctx->backend : QLORA_BACKEND_ANY;
}

const char* qlora_ctx_reason(const qlora_ctx* ctx) {
    return ctx != NULL ? ctx->reason : "no context (NULL)";
}

const char* qlora_ctx_target(const qlora_ctx* ctx) {
#ifndef QLORA_NO_CUDA
    if (ctx != NULL && ctx->gpu != NULL) {
        return ctx->gpu->target;
    }
#endif
    (void)ctx;
    return "cpu";
}

static qlora_result qlora__ctx_set_math(qlora_ctx* ctx, qlora_math math) {
    if ((int)math < 0 || math > QLORA_MATH_TF32_ALL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "math is %d; it must be one of qlora_math",
                           (int)math);
    }
    ctx->desc.math = math;
    return QLORA_OK;
}

qlora_result qlora_ctx_set_math(qlora_ctx* ctx, qlora_math math) {
    QLORA__ENTER(ctx, "qlora_ctx_set_math");
    return qlora__leave(ctx, qlora__ctx_set_math(ctx, math));
}

static qlora_result qlora__ctx_set_stream(qlora_ctx* ctx, void* stream) {
    if (qlora__on_cpu(ctx)) {
        return stream == NULL
                   ? QLORA_OK
                   : qlora__fail(ctx, QLORA_ERR_UNSUPPORTED, "a CPU context has no CUDA streams");
    }
#ifndef QLORA_NO_CUDA
    qlora__gpu* gpu = ctx->gpu;
    QLORA__TRY(qlora__not_in_capture(ctx, "changing the stream"));
    if (stream != NULL) {
        QLORA__TRY(qlora__stream_check(ctx, stream));
    }
    QLORA__TRY(qlora__sync(ctx)); // finish the work that was queued on the old stream
    gpu->stream = stream != NULL ? stream : gpu->own_stream;
    gpu->cublas_bound = false;
    qlora__graphs_invalidate(ctx, 0, "the stream was changed");
    if (gpu->cublas != NULL) {
        return qlora__cublas_bind(ctx, qlora__beside_workspace(ctx));
    }
#endif
    return QLORA_OK;
}

qlora_result qlora_ctx_set_stream(qlora_ctx* ctx, void* cu_stream) {
    QLORA__ENTER(ctx, "qlora_ctx_set_stream");
    return qlora__leave(ctx, qlora__ctx_set_stream(ctx, cu_stream));
}

#ifndef QLORA_NO_CUDA

// Allocates the new memory of both streams before freeing any of the old, so that a failure changes
// nothing.
static qlora_result qlora__workspace_swap(qlora_ctx* ctx, void* memory, size_t bytes) {
    qlora__gpu* gpu = ctx->gpu;
    qlora__buffer* own = NULL;
    qlora__buffer* second = NULL;
    if (memory == NULL) {
        QLORA__TRY(qlora__buffer_create(ctx, bytes, &own));
    }
    qlora_result r = qlora__buffer_create(ctx, bytes, &second);
    r = r == QLORA_OK ? qlora__sync(ctx) : r; // queued work may still use the old memory
    if (r != QLORA_OK) {
        qlora__buffer_destroy(ctx, own);
        qlora__buffer_destroy(ctx, second);
        return r;
    }
    qlora__buffer_destroy(ctx, gpu->own_workspace);
    qlora__buffer_destroy(ctx, gpu->beside->workspace);
    gpu->own_workspace = own;
    gpu->workspace = own != NULL ? own->data : memory;
    gpu->beside->workspace = second;
    return QLORA_OK;
}

#endif

static qlora_result qlora__ctx_set_workspace(qlora_ctx* ctx, void* memory, size_t bytes) {
    if ((uintptr_t)memory % 256 != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "memory must be aligned to 256 bytes");
    }
    if (memory != NULL && bytes == 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "bytes is 0; give the size of memory");
    }
    if (memory != NULL && qlora__on_cpu(ctx)) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED, "a CPU context has no cuBLAS workspace");
    }
    QLORA__TRY(qlora__not_in_capture(ctx, "changing the workspace"));
    bytes = bytes != 0 ? bytes : QLORA__WORKSPACE_BYTES;
#ifndef QLORA_NO_CUDA
    if (ctx->gpu != NULL && ctx->gpu->cublas != NULL) {
        QLORA__TRY(qlora__workspace_swap(ctx, memory, bytes));
        ctx->gpu->cublas_bound = false;
        qlora__graphs_invalidate(ctx, 0, "the cuBLAS workspace was changed");
    }
#endif
    ctx->desc.workspace = memory;
    ctx->desc.workspace_bytes = bytes;
#ifndef QLORA_NO_CUDA
    if (ctx->gpu != NULL && ctx->gpu->cublas != NULL) {
        return qlora__cublas_bind(ctx, qlora__beside_workspace(ctx));
    }
#endif
    return QLORA_OK;
}

qlora_result qlora_ctx_set_workspace(qlora_ctx* ctx, void* memory, size_t bytes) {
    QLORA__ENTER(ctx, "qlora_ctx_set_workspace");
    return qlora__leave(ctx, qlora__ctx_set_workspace(ctx, memory, bytes));
}

static qlora_result qlora__ctx_native(qlora_ctx* ctx, qlora_native* out) {
    if (out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    memset(out, 0, sizeof *out);
#ifndef QLORA_NO_CUDA
    if (ctx->gpu != NULL) {
        out->cu_context = ctx->gpu->context;
        out->cu_stream = ctx->gpu->stream;
        out->cublas = ctx->gpu->cublas;
        out->cu_device = ctx->gpu->device;
        ctx->gpu->cublas_exposed = true;
    }
#endif
    return QLORA_OK;
}

qlora_result qlora_ctx_native(qlora_ctx* ctx, qlora_native* out) {
    QLORA__ENTER(ctx, "qlora_ctx_native");
    return qlora__leave(ctx, qlora__ctx_native(ctx, out));
}

static qlora_result qlora__ctx_memory(qlora_ctx* ctx, qlora_memory_info* out) {
    memset(out, 0, sizeof *out);
    out->device_bytes = ctx->device_bytes;
    out->device_peak = ctx->device_peak;
    out->device_allocations = ctx->device_allocations;
    out->host_bytes = ctx->env.host_bytes;
    out->host_free = qlora__os_memory("");
#ifndef QLORA_NO_CUDA
    if (ctx->gpu != NULL) {
        size_t free_bytes = 0;
        size_t total = 0;
        QLORA__TRY(qlora__cu(ctx, ctx->gpu->cu.MemGetInfo(&free_bytes, &total), "cuMemGetInfo"));
        out->device_free = free_bytes;
        out->device_total = total;
    }
#endif
    return QLORA_OK;
}

static qlora_result qlora__ctx_query(qlora_ctx* ctx, qlora_ctx_info* out) {
    if (out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    qlora_ctx_info info;
    memset(&info, 0, sizeof info);
    QLORA__TRY(qlora__ctx_memory(ctx, &info.memory));
    info.desc = &ctx->desc;
    info.last_path = ctx->last_path;
    info.tensors = ctx->living[QLORA__TENSORS];
    info.clips = ctx->living[QLORA__CLIPS];
    info.graphs = ctx->living[QLORA__GRAPHS];
    info.models = ctx->living[QLORA__MODELS];
    info.trainers = ctx->living[QLORA__TRAINERS];
    info.generations = ctx->living[QLORA__GENERATIONS];
    *out = info;
    return QLORA_OK;
}

qlora_result qlora_ctx_query(qlora_ctx* ctx, qlora_ctx_info* out) {
    QLORA__ENTER(ctx, "qlora_ctx_query");
    return qlora__leave(ctx, qlora__ctx_query(ctx, out));
}

size_t qlora_describe(const qlora_ctx* ctx, char* buffer, size_t size) {
    size_t used = 0;
    if (buffer != NULL && size > 0) {
        buffer[0] = '\0';
    }
    qlora__append(buffer, size, &used, "qlora.h %s\n", QLORA_VERSION_STRING);
    if (ctx == NULL) {
        qlora__append(buffer, size, &used, "no context\n");
        return used + 1;
    }
    qlora__append(buffer, size, &used, "backend: %s (%s)\n", qlora__on_cpu(ctx) ? "CPU" : "CUDA",
                  ctx->reason);
    if (qlora__on_cpu(ctx)) {
        qlora__append(buffer, size, &used, "CPU tier: %s%s\nthreads: %d\n", ctx->cpu->name,
                      ctx->cpu->proven ? "" : " (not tested on hardware)",
                      (int)ctx->desc.threads);
    }
#ifndef QLORA_NO_CUDA
    const qlora__gpu* gpu = ctx->gpu;
    if (gpu != NULL) {
        qlora_cache_info cache = qlora__cache_facts(ctx);
        qlora__append(
            buffer, size, &used,
            "device: %d %s, compute capability %d.%d, %d multiprocessors, %.1f GiB, %d KiB "
            "shared memory per block\n",
            gpu->device, gpu->device_name, gpu->capability / 10, gpu->capability % 10,
            gpu->sm_count, (double)gpu->total_bytes / 1073741824.0, gpu->max_shared / 1024);
        qlora__append(buffer, size, &used, "driver: CUDA %d.%d, PTX up to %d.%d\n",
                      gpu->driver_version / 1000, gpu->driver_version % 1000 / 10,
                      gpu->ptx_version / 10, gpu->ptx_version % 10);
        qlora__append(buffer, size, &used, "cuBLAS: %s\n", gpu->cublas_note);
        qlora__append(buffer, size, &used,
                      "kernels: emitted for %s%s; %u modules, %u kernels ready%s\n", gpu->target,
                      gpu->target_number == gpu->capability ? ""
                      : gpu->target_limit < gpu->capability
                          ? " (limited by the environment variable " QLORA__GPU_TARGET_SETTING ")"
                          : " (the device's own target is not supported by this version or by "
                            "the driver)",
                      cache.modules, cache.kernels, cache.sealed ? ", sealed" : "");
    }
#endif
    if (ctx->dead[0] != '\0') {
        qlora__append(buffer, size, &used, "lost: %s\n", ctx->dead);
    }
    return used + 1;
}
