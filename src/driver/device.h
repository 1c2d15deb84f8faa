// ---- opening a device, cuBLAS and device memory -------------------------------------------------

// Returns whether kernels that need this compute capability (80 is 8.0) can run: both the device
// and the target for which PTX is emitted must have it.
static QLORA__UNUSED bool qlora__gpu_takes(const qlora_ctx* ctx, int capability) {
    return ctx->gpu != NULL && ctx->gpu->target_number >= capability;
}

static qlora_result qlora__gpu_activate(qlora_ctx* ctx) {
    return qlora__cu(ctx, ctx->gpu->cu.CtxPushCurrent(ctx->gpu->context), "cuCtxPushCurrent");
}

static void qlora__gpu_deactivate(qlora_ctx* ctx) {
    void* ignored = NULL;
    ctx->gpu->cu.CtxPopCurrent(&ignored);
}

static qlora_result qlora__gpu_load(qlora_ctx* ctx) {
#define QLORA__X(name) name,
    static const char* const names[] = {QLORA__CUDA_NAMES(QLORA__X)};
#undef QLORA__X
    char why[512] = "";
    void* library = qlora__library_first(ctx->desc.cuda_library, names,
                                         sizeof names / sizeof names[0], why, sizeof why);
    if (library == NULL) {
        return qlora__fail(ctx, QLORA_ERR_BACKEND, "no CUDA driver: %s", why);
    }
    if (!qlora__symbols_load(library, qlora__cuda_symbols,
                             sizeof qlora__cuda_symbols / sizeof qlora__cuda_symbols[0],
                             &ctx->gpu->cu, why, sizeof why)) {
        return qlora__fail(ctx, QLORA_ERR_BACKEND,
                           "the CUDA driver is too old, or not a driver: it lacks %s", why);
    }
    int code = ctx->gpu->cu.Init(0);
    if (code == 34) {
        return qlora__fail(
            ctx, QLORA_ERR_BACKEND,
            "libcuda is the CUDA toolkit's stub, not a driver (34); put the real libcuda.so.1 "
            "first in the search path or set desc.cuda_library");
    }
    if (code == 100) {
        return qlora__fail(ctx, QLORA_ERR_BACKEND, "no CUDA device found (CUDA_ERROR_NO_DEVICE)");
    }
    return qlora__cu(ctx, code, "cuInit");
}

static qlora_result qlora__gpu_choose_device(qlora_ctx* ctx) {
    qlora__gpu* gpu = ctx->gpu;
    if (ctx->desc.cu_context != NULL) {
        gpu->context = ctx->desc.cu_context;
        QLORA__TRY(qlora__gpu_activate(ctx));
        qlora_result r = qlora__cu(ctx, gpu->cu.CtxGetDevice(&gpu->device), "cuCtxGetDevice");
        qlora__gpu_deactivate(ctx);
        return r;
    }
    int count = 0;
    QLORA__TRY(qlora__cu(ctx, gpu->cu.DeviceGetCount(&count), "cuDeviceGetCount"));
    if (ctx->desc.device < 0 || ctx->desc.device >= count) {
        return qlora__fail(ctx, QLORA_ERR_BACKEND,
                           "desc.device is %d, but the driver reports %d CUDA device%s",
                           (int)ctx->desc.device, count, count == 1 ? "" : "s");
    }
    return qlora__cu(ctx, gpu->cu.DeviceGet(&gpu->device, ctx->desc.device), "cuDeviceGet");
}

#define QLORA__GPU_TARGET_SETTING "QLORA_GPU_TARGET"

// Reads the highest target that the environment allows, for measuring and testing the kernels of
// older devices; INT32_MAX if it does not say.
static qlora_result qlora__gpu_target_limit(qlora_ctx* ctx, int* limit) {
    char name[32];
    char known[128];
    size_t used = 0;
    *limit = INT32_MAX;
    if (!qlora__os_setting(QLORA__GPU_TARGET_SETTING, name, sizeof name)) {
        return QLORA_OK;
    }
    for (size_t i = 0; i < sizeof qlora__targets / sizeof qlora__targets[0]; i++) {
        char target[16];
        snprintf(target, sizeof target, "sm_%d", qlora__targets[i].number);
        if (strcmp(name, target) == 0) {
            *limit = qlora__targets[i].number;
            return QLORA_OK;
        }
        qlora__append(known, sizeof known, &used, "%s%s", used > 0 ? ", " : "", target);
    }
    return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                       "the environment variable " QLORA__GPU_TARGET_SETTING
                       " is \"%s\"; it must be one of %s",
                       name, known);
}

static qlora_result qlora__gpu_read_facts(qlora_ctx* ctx, int target_limit) {
    qlora__gpu* gpu = ctx->gpu;
    int major = 0;
    int minor = 0;
    QLORA__TRY(
        qlora__cu(ctx, gpu->cu.DriverGetVersion(&gpu->driver_version), "cuDriverGetVersion"));
    QLORA__TRY(qlora__cu(
        ctx, gpu->cu.DeviceGetName(gpu->device_name, (int)sizeof gpu->device_name, gpu->device),
        "cuDeviceGetName"));
    QLORA__TRY(qlora__cu(ctx, gpu->cu.DeviceTotalMem(&gpu->total_bytes, gpu->device),
                         "cuDeviceTotalMem"));
    const struct {
        int* out;
        int attribute;
    } wanted[] = {{&major, QLORA__CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR},
                  {&minor, QLORA__CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR},
                  {&gpu->sm_count, QLORA__CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT},
                  {&gpu->cooperative, QLORA__CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH},
                  {&gpu->max_shared, QLORA__CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN}};
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++) {
        int code = gpu->cu.DeviceGetAttribute(wanted[i].out, wanted[i].attribute, gpu->device);
        QLORA__TRY(qlora__cu(ctx, code, "cuDeviceGetAttribute"));
    }
    gpu->capability = major * 10 + minor;
    gpu->ptx_version = qlora__ptx_version_of_driver(gpu->driver_version);
    if (gpu->capability < 75) {
        return qlora__fail(ctx, QLORA_ERR_BACKEND,
                           "%s has compute capability %d.%d; at least 7.5 is needed",
                           gpu->device_name, major, minor);
    }
    gpu->target_limit = target_limit;
    gpu->target_number = qlora__target_choose(gpu->capability, gpu->ptx_version, target_limit);
    if (gpu->target_number == 0) {
        return qlora__fail(
            ctx, QLORA_ERR_BACKEND,
            "the driver (CUDA %d.%d) is too old for the kernels; at least 10.0 is needed",
            gpu->driver_version / 1000, gpu->driver_version % 1000 / 10);
    }
    snprintf(gpu->target, sizeof gpu->target, "sm_%d", gpu->target_number);
    return QLORA_OK;
}

// Sets the handle's stream, workspace and modes, unless nothing can have changed them since the
// last time. cublasSetStream resets the workspace, so the workspace is set after the stream.
static QLORA__UNUSED qlora_result qlora__cublas_bind(qlora_ctx* ctx, void* workspace) {
    qlora__gpu* gpu = ctx->gpu;
    if (gpu->cublas_bound && !gpu->cublas_exposed) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__blas(ctx, gpu->blas.SetStream(gpu->cublas, gpu->stream), "cublasSetStream"));
    QLORA__TRY(
        qlora__blas(ctx, gpu->blas.SetWorkspace(gpu->cublas, workspace, ctx->desc.workspace_bytes),
                    "cublasSetWorkspace"));
    int mode = QLORA__CUBLAS_DEFAULT_MATH | QLORA__CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
    QLORA__TRY(qlora__blas(ctx, gpu->blas.SetMathMode(gpu->cublas, mode), "cublasSetMathMode"));
    QLORA__TRY(qlora__blas(
        ctx, gpu->blas.SetPointerMode(gpu->cublas, QLORA__CUBLAS_POINTER_MODE_HOST),
        "cublasSetPointerMode"));
    gpu->cublas_bound = true;
    return QLORA_OK;
}

// Returns false without cuBLAS: the built-in kernels then do the products. qlora_describe reports
// the reason, which is kept in cublas_note.
static bool qlora__cublas_open(qlora_ctx* ctx) {
    qlora__gpu* gpu = ctx->gpu;
#define QLORA__X(name) name,
    static const char* const names[] = {QLORA__CUBLAS_NAMES(QLORA__X)};
#undef QLORA__X
    if (ctx->desc.cublas_library != NULL && strcmp(ctx->desc.cublas_library, "none") == 0) {
        snprintf(gpu->cublas_note, sizeof gpu->cublas_note,
                 "disabled by desc.cublas_library \"none\"");
        return false;
    }
    char why[256] = "";
    void* library = qlora__library_first(ctx->desc.cublas_library, names,
                                         sizeof names / sizeof names[0], why, sizeof why);
    if (library == NULL) {
        snprintf(gpu->cublas_note, sizeof gpu->cublas_note, "not found: %.200s", why);
        return false;
    }
    if (!qlora__symbols_load(library, qlora__cublas_symbols,
                             sizeof qlora__cublas_symbols / sizeof qlora__cublas_symbols[0],
                             &gpu->blas, why, sizeof why)) {
        snprintf(gpu->cublas_note, sizeof gpu->cublas_note, "too old or damaged: it lacks %.200s",
                 why);
        return false;
    }
    int status = gpu->blas.Create(&gpu->cublas);
    if (status != 0) {
        gpu->cublas = NULL;
        snprintf(gpu->cublas_note, sizeof gpu->cublas_note, "cublasCreate failed: %s (%d)",
                 qlora__cublas_name(status), status);
        return false;
    }
    gpu->blas.GetVersion(gpu->cublas, &gpu->cublas_version);
    snprintf(gpu->cublas_note, sizeof gpu->cublas_note, "version %d", gpu->cublas_version);
    return true;
}

static void* qlora__device_alloc(qlora_ctx* ctx, size_t bytes) {
    if (ctx->desc.device_allocator.alloc != NULL) {
        void* p = ctx->desc.device_allocator.alloc(bytes, ctx->desc.device_allocator.user);
        if (p == NULL) {
            qlora__fail(ctx, QLORA_ERR_DEVICE_MEMORY,
                        "desc.device_allocator returned NULL for %llu bytes",
                        (unsigned long long)bytes);
        }
        return p;
    }
    qlora__CUdeviceptr address = 0;
    char what[64];
    snprintf(what, sizeof what, "cuMemAlloc(%.2f MiB)", (double)bytes / 1048576.0);
    if (qlora__cu(ctx, ctx->gpu->cu.MemAlloc(&address, bytes), what) != QLORA_OK) {
        return NULL;
    }
    return (void*)(uintptr_t)address;
}

static void qlora__device_free(qlora_ctx* ctx, void* data, size_t bytes) {
    if (ctx->desc.device_allocator.free != NULL) {
        ctx->desc.device_allocator.free(data, bytes, ctx->desc.device_allocator.user);
    } else {
        ctx->gpu->cu.MemFree((qlora__CUdeviceptr)(uintptr_t)data);
    }
}
