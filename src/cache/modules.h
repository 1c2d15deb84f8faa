// ---- the kernel cache: modules, launches, lookup ------------------------------------------------

#ifndef QLORA_NO_CUDA

#define QLORA__PLANNED_MAX 2048

// Some kernels of a module. Those that are needed later become another one.
typedef struct qlora__module {
    void* handle;
    struct qlora__module* next;
} qlora__module;

struct qlora__cache {
    qlora_kernel kernels[QLORA__K_COUNT];
    qlora_kernel* extra; // kernels of the caller
    qlora__module* modules;
    qlora_cache_info info;
    uint64_t planned[QLORA__PLANNED_MAX]; // hashes of the cuBLAS shapes that pre-warm ran
};

// ---- modules ------------------------------------------------------------------------------------

// Below compute capability 12.0, modules are loaded with JIT logs; from 12.0 on, without. They are
// never loaded with CU_JIT_TARGET, because the PTX names its own target. There is one log item per
// compilation. A fault of an earlier kernel is reported as such, not as a failed load.
static qlora_result qlora__module_load(qlora_ctx* ctx, const char* name, const char* ptx,
                                       uint32_t kernels, void** out) {
    qlora__gpu* gpu = ctx->gpu;
    char what[160];
    snprintf(what, sizeof what, "compiling kernel module %.120s", name);
    QLORA__TRY(qlora__not_in_capture(ctx, what));
    QLORA__TRY(qlora__sync(ctx));
    char log[1024] = "";
    double start = qlora__clock_ms();
    int code = 0;
    if (gpu->capability >= 120) {
        code = gpu->cu.ModuleLoadData(out, ptx);
    } else {
        char info[512] = "";
        int options[] = {QLORA__CU_JIT_INFO_LOG_BUFFER, QLORA__CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES,
                         QLORA__CU_JIT_ERROR_LOG_BUFFER, QLORA__CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
        void* values[] = {info, (void*)(uintptr_t)sizeof info, log, (void*)(uintptr_t)sizeof log};
        code = gpu->cu.ModuleLoadDataEx(out, ptx, 4, options, values);
        log[sizeof log - 1] = '\0';
    }
    double ms = qlora__clock_ms() - start;
    gpu->cache->info.jit_ms += ms;
    gpu->cache->info.misses++;
    gpu->cache->info.jit_after_seal += gpu->cache->info.sealed ? 1 : 0;
    if (code == 0) {
        gpu->cache->info.modules++;
        QLORA__LOG(ctx, INFO, KERNEL_COMPILE,
                   "%s: %u kernel%s, %llu bytes of PTX for %s in %.1f ms", name, kernels,
                   kernels == 1 ? "" : "s", (unsigned long long)strlen(ptx), gpu->target, ms);
        return QLORA_OK;
    }
    QLORA__LOG(ctx, ERROR, KERNEL_COMPILE, "%s: %s (%d) after %.1f ms", name,
               qlora__cu_name(gpu, code), code, ms);
    if (qlora__cu_is_sticky(code) || code == 2) {
        return qlora__cu(ctx, code, what);
    }
    return qlora__fail(ctx, QLORA_ERR_KERNEL, "%s for %s failed: %s (%d)%s%s", what, gpu->target,
                       qlora__cu_name(gpu, code), code, log[0] != '\0' ? ": " : "", log);
}

static qlora_result qlora__kernel_resolve(qlora_ctx* ctx, void* module, const char* entry,
                                          uint32_t shared, void** function) {
    qlora__gpu* gpu = ctx->gpu;
    void* f = NULL;
    int code = gpu->cu.ModuleGetFunction(&f, module, entry);
    if (code == 500) { // not found
        return qlora__fail(ctx, QLORA_ERR_KERNEL, "the module has no kernel named %s", entry);
    }
    QLORA__TRY(qlora__cu(ctx, code, "cuModuleGetFunction"));
    if (shared > 48 * 1024 && shared <= (uint32_t)gpu->max_shared) {
        code = gpu->cu.FuncSetAttribute(f, QLORA__CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                        (int)shared);
        QLORA__TRY(qlora__cu(ctx, code, "cuFuncSetAttribute"));
    }
    *function = f;
    return QLORA_OK;
}

// Makes the kernels in take[] ready, which are those of the handle.
static qlora_result qlora__module_resolve(qlora_ctx* ctx, const qlora__ptx_text* text,
                                          const bool* take, void* handle) {
    qlora__cache* cache = ctx->gpu->cache;
    for (size_t i = 0; i < QLORA__K_COUNT; i++) {
        const qlora__kernel_row* row = &qlora__kernel_rows[i];
        if (!take[i]) {
            continue;
        }
        // Text for older devices has no instruction to wait with.
        cache->kernels[i].waits = (row->need & QLORA__NEED_TEXTS) != 0 && text->target >= 90;
        char entry[96];
        snprintf(entry, sizeof entry, "qlora_%s", row->name);
        QLORA__TRY(
            qlora__kernel_resolve(ctx, handle, entry, row->shared, &cache->kernels[i].function));
        cache->info.kernels++; // qlora__module_forget takes back what has a function
        // These share a multiprocessor with the one before, which they can only if both want the
        // same division of its memory. The others need much of it as a cache.
        if (cache->kernels[i].waits &&
            (i == QLORA__K_decode_row_nf4 || i == QLORA__K_decode_norm ||
             i == QLORA__K_decode_attention)) {
            int code = ctx->gpu->cu.FuncSetAttribute(
                cache->kernels[i].function,
                QLORA__CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100);
            QLORA__TRY(qlora__cu(ctx, code, "cuFuncSetAttribute"));
        }
        cache->kernels[i].owner = ctx;
        cache->kernels[i].key = row->name;
        cache->kernels[i].shared_allowed = row->shared > 48 * 1024 ? row->shared : 48 * 1024;
    }
    return QLORA_OK;
}

static void qlora__module_forget(qlora_ctx* ctx, const bool* take) {
    qlora__cache* cache = ctx->gpu->cache;
    for (size_t i = 0; i < QLORA__K_COUNT; i++) {
        if (take[i] && cache->kernels[i].function != NULL) {
            cache->kernels[i].function = NULL;
            cache->info.kernels--;
        }
    }
}

// Adds a compiled module to the cache and makes its kernels ready: all of them, or on failure none,
// and unloads it.
static qlora_result qlora__module_adopt(qlora_ctx* ctx, const qlora__ptx_text* text,
                                        const bool* take, void* handle) {
    qlora__cache* cache = ctx->gpu->cache;
    qlora__module* module = (qlora__module*)qlora__alloc_zero(ctx, sizeof *module);
    qlora_result r =
        module != NULL ? qlora__module_resolve(ctx, text, take, handle) : QLORA_ERR_MEMORY;
    if (r != QLORA_OK) {
        qlora__module_forget(ctx, take);
        ctx->gpu->cu.ModuleUnload(handle);
        cache->info.modules--;
        qlora__free(ctx, module, sizeof *module);
        return r;
    }
    module->handle = handle;
    module->next = cache->modules;
    cache->modules = module;
    return QLORA_OK;
}

// Reports that the device is too old for a module, or not the only one that it was written for.
static qlora_result qlora__module_refuse(qlora_ctx* ctx, const char* name) {
    const qlora__gpu* gpu = ctx->gpu;
    char limit[80] = "";
    if (gpu->target_limit < gpu->capability) {
        snprintf(limit, sizeof limit, ", but " QLORA__GPU_TARGET_SETTING " limits it to %s",
                 gpu->target);
    }
    for (size_t i = 0; i < QLORA__PTX_TEXT_COUNT; i++) {
        const qlora__ptx_text* t = &qlora__ptx_texts[i];
        if (strcmp(t->module, name) == 0 && t->suffix != '\0') {
            return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                               "kernel module %s runs only on compute capability %d.%d; %s has "
                               "%d.%d%s",
                               name, t->target / 10, t->target % 10, gpu->device_name,
                               gpu->capability / 10, gpu->capability % 10, limit);
        }
    }
    return qlora__fail(
        ctx, QLORA_ERR_UNSUPPORTED,
        "kernel module %s needs compute capability 8.0; %s has %d.%d%s (bf16 needs 8.0; f32 "
        "works)",
        name, gpu->device_name, gpu->capability / 10, gpu->capability % 10, limit);
}

// Compiles the kernels in take[] and makes them ready. They are of one module, that of `row`, and
// not ready yet. There is no fallback for a module that was excluded from the build: it would be
// slower without any sign of the reason.
static qlora_result qlora__module_open(qlora_ctx* ctx, const qlora__kernel_row* row,
                                       const bool* take) {
    const char* name = row->module;
    const qlora__ptx_text* text = qlora__ptx_choose(ctx->gpu, name);
    if (text == NULL) {
        return qlora__module_refuse(ctx, name);
    }
    if (text->chunks == NULL) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "kernel %s is not in this build: its module %s was left out by %s",
                           row->name, name, text->left_out);
    }
    char* ptx = NULL;
    size_t bytes = 0;
    QLORA__TRY(qlora__ptx_join(ctx, text, QLORA__PTX_PACKED, &ptx, &bytes));
    uint32_t kernels = qlora__ptx_cut(ptx, take);
    void* handle = NULL;
    qlora_result r = qlora__module_load(ctx, name, ptx, kernels, &handle);
    qlora__free(ctx, ptx, bytes);
    return r == QLORA_OK ? qlora__module_adopt(ctx, text, take, handle) : r;
}

// Returns a kernel of the registry, compiled on demand, by itself, unless the cache is sealed.
static qlora_result qlora__kernel_ready(qlora_ctx* ctx, qlora__kernel_id id, qlora_kernel** out) {
    qlora__cache* cache = ctx->gpu->cache;
    qlora_kernel* kernel = &cache->kernels[id];
    if (kernel->function != NULL) {
        cache->info.hits++;
    } else if (cache->info.sealed) {
        return qlora__fail(
            ctx, QLORA_ERR_SEALED,
            "kernel %s (module %s) is not in the sealed cache; pre-warm the shape that "
            "needs it, or call qlora_cache_unseal",
            qlora__kernel_rows[id].name, qlora__kernel_rows[id].module);
    } else {
        bool take[QLORA__K_COUNT];
        memset(take, 0, sizeof take);
        take[id] = true;
        QLORA__TRY(qlora__module_open(ctx, &qlora__kernel_rows[id], take));
    }
    *out = kernel;
    return QLORA_OK;
}

// ---- launch -------------------------------------------------------------------------------------

// Same layout as CUlaunchAttribute and CUlaunchConfig.
typedef struct qlora__launch_attribute {
    int id;
    int pad;
    uint64_t value[8]; // a union; an int comes first
} qlora__launch_attribute;

typedef struct qlora__launch_config {
    uint32_t grid[3];
    uint32_t block[3];
    uint32_t shared;
    void* stream;
    qlora__launch_attribute* attributes;
    uint32_t count;
} qlora__launch_config;

// How a kernel is launched.
typedef enum qlora__launch_kind {
    QLORA__LAUNCH_PLAIN,
    QLORA__LAUNCH_EARLY,   // it may begin before the one before it has ended
    QLORA__LAUNCH_TOGETHER // all its blocks are resident, so that they may wait for each other
} qlora__launch_kind;

static int qlora__launch_kernel(const qlora__gpu* gpu, const qlora_kernel* kernel, int kind,
                                const uint32_t grid[3], const uint32_t block[3], uint32_t shared,
                                void** args) {
    qlora__launch_attribute attribute;
    qlora__launch_config config;
    const int allowed = 1;
    memset(&attribute, 0, sizeof attribute);
    memset(&config, 0, sizeof config);
    attribute.id = kind == QLORA__LAUNCH_EARLY
                       ? QLORA__CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
                       : QLORA__CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    memcpy(attribute.value, &allowed, sizeof allowed);
    memcpy(config.grid, grid, sizeof config.grid);
    memcpy(config.block, block, sizeof config.block);
    config.shared = shared;
    config.stream = gpu->stream;
    config.attributes = &attribute;
    config.count = 1;
    return gpu->cu.LaunchKernelEx(&config, kernel->function, args, NULL);
}

// Early launches are for kernels that can wait by themselves; others wait for the end of the one
// before.
static qlora_result qlora__launch_checked(qlora_ctx* ctx, qlora_kernel* kernel,
                                          qlora__launch_kind kind, const uint32_t grid[3],
                                          const uint32_t block[3], uint32_t shared, void** args) {
    qlora__gpu* gpu = ctx->gpu;
    if (shared > (uint32_t)gpu->max_shared) {
        return qlora__fail(
            ctx, QLORA_ERR_UNSUPPORTED,
            "kernel %s needs %u bytes of shared memory; this device has %d per block", kernel->key,
            shared, gpu->max_shared);
    }
    if (shared > kernel->shared_allowed) {
        int code = gpu->cu.FuncSetAttribute(
            kernel->function, QLORA__CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, (int)shared);
        QLORA__TRY(qlora__cu(ctx, code, "cuFuncSetAttribute"));
        kernel->shared_allowed = shared;
    }
    char what[128];
    // Graphs know such launches since CUDA 12.3.
    bool waits = kind == QLORA__LAUNCH_EARLY && kernel->waits && gpu->cu.LaunchKernelEx != NULL &&
                 gpu->driver_version >= 12030;
    int code = waits || kind == QLORA__LAUNCH_TOGETHER
                   ? qlora__launch_kernel(gpu, kernel, (int)kind, grid, block, shared, args)
                   : gpu->cu.LaunchKernel(kernel->function, grid[0], grid[1], grid[2], block[0],
                                            block[1], block[2], shared, gpu->stream, args, NULL);
    if (code != 0) {
        snprintf(what, sizeof what, "launching kernel %.90s", kernel->key);
        qlora_result r = qlora__cu(ctx, code, what);
        // Smaller kernels may do instead, unless memory is short or a capture has failed (900 on).
        bool refuses = r == QLORA_ERR_CUDA && (code < 900 || code > 919);
        return kind == QLORA__LAUNCH_TOGETHER && refuses ? QLORA_ERR_UNSUPPORTED : r;
    }
#ifdef QLORA_DEBUG
    if (ctx->capture == NULL) {
        snprintf(what, sizeof what, "kernel %.90s", kernel->key);
        return qlora__cu(ctx, gpu->cu.StreamSynchronize(gpu->stream), what);
    }
#endif
    return QLORA_OK;
}

// The blocks of a launch, the threads of a block, and its bytes of dynamic shared memory.
typedef struct qlora__launch_size {
    int64_t x;
    int64_t y;
    int64_t z;
    uint32_t threads;
    uint32_t shared;
} qlora__launch_size;

// Launches a kernel of the registry; does nothing if the grid is empty.
static QLORA__UNUSED qlora_result qlora__launch_as(qlora_ctx* ctx, qlora__kernel_id id,
                                                   qlora__launch_kind kind, qlora__launch_size size,
                                                   void** args) {
    if (size.x <= 0 || size.y <= 0 || size.z <= 0) {
        return QLORA_OK;
    }
    if (size.x > INT32_MAX || size.y > 65535 || size.z > 65535) {
        return qlora__fail(
            ctx, QLORA_ERR_LIMIT, "kernel %s: a grid of %lld x %lld x %lld exceeds CUDA's limits",
            qlora__kernel_rows[id].name, (long long)size.x, (long long)size.y, (long long)size.z);
    }
    qlora_kernel* kernel = NULL;
    QLORA__TRY(qlora__kernel_ready(ctx, id, &kernel));
    uint32_t grid[3] = {(uint32_t)size.x, (uint32_t)size.y, (uint32_t)size.z};
    uint32_t block[3] = {size.threads, 1, 1};
    return qlora__launch_checked(ctx, kernel, kind, grid, block, size.shared, args);
}

static QLORA__UNUSED qlora_result qlora__launch(qlora_ctx* ctx, qlora__kernel_id id, int64_t grid_x,
                                                int64_t grid_y, int64_t grid_z, uint32_t threads,
                                                uint32_t shared, void** args) {
    qlora__launch_size size = {grid_x, grid_y, grid_z, threads, shared};
    return qlora__launch_as(ctx, id, QLORA__LAUNCH_PLAIN, size, args);
}

static qlora_result qlora__kernel_launch(qlora_ctx* ctx, const qlora_kernel* kernel,
                                         const qlora_launch_desc* launch, void** args) {
    if (qlora__on_cpu(ctx)) {
        return qlora__no_kernels(ctx);
    }
    if (kernel == NULL || launch == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is NULL",
                           kernel == NULL ? "kernel" : "launch");
    }
    if (kernel->owner != ctx) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "the kernel belongs to another context");
    }
    uint32_t grid[3];
    uint32_t block[3];
    static const uint32_t most[] = {INT32_MAX, 65535, 65535};
    uint64_t threads = 1;
    for (int i = 0; i < 3; i++) {
        grid[i] = launch->grid[i] > 0 ? launch->grid[i] : 1;
        block[i] = launch->block[i] > 0 ? launch->block[i] : 1;
        threads = block[i] <= 1024 ? threads * block[i] : 1u << 20;
        if (grid[i] > most[i]) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "launch.grid[%d] is %u; the maximum is %u",
                               i, grid[i], most[i]);
        }
    }
    if (threads > 1024) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "launch.block is %u x %u x %u; the maximum is 1024 threads in all",
                           block[0], block[1], block[2]);
    }
    qlora_kernel* own = (qlora_kernel*)(uintptr_t)kernel; // const only for the caller
    return qlora__launch_checked(ctx, own, QLORA__LAUNCH_PLAIN, grid, block, launch->shared_bytes,
                                 args);
}

// ---- lookup -------------------------------------------------------------------------------------

static qlora_kernel* qlora__kernel_find(qlora_ctx* ctx, const char* key) {
    for (qlora_kernel* k = ctx->gpu->cache->extra; k != NULL; k = k->next) {
        if (strcmp(k->key, key) == 0) {
            return k;
        }
    }
    return NULL;
}

static qlora_result qlora__cache_get(qlora_ctx* ctx, const char* key, const qlora_kernel** out) {
    if (qlora__on_cpu(ctx)) {
        return qlora__no_kernels(ctx);
    }
    if (key == NULL || out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is NULL", key == NULL ? "key" : "out");
    }
    qlora_kernel* kernel = qlora__kernel_find(ctx, key);
    if (kernel != NULL) {
        ctx->gpu->cache->info.hits++;
    } else {
        int row = qlora__kernel_row_find(key);
        if (row < 0) {
            return qlora__fail(ctx, QLORA_ERR_KERNEL,
                               "no kernel is named '%.100s'; qlora_kernel_name lists those of the "
                               "library, qlora_cache_get_or_compile adds others",
                               key);
        }
        kernel = &ctx->gpu->cache->kernels[row];
        if (kernel->function == NULL) {
            return qlora__fail(ctx, QLORA_ERR_KERNEL,
                               "kernel %s is not compiled; call qlora_cache_compile, or pre-warm "
                               "a shape that needs it",
                               qlora__kernel_rows[row].name);
        }
        ctx->gpu->cache->info.hits++;
    }
    *out = kernel;
    return QLORA_OK;
}

// Finds a kernel of the library and compiles it if necessary, unless the cache is sealed.
static qlora_result qlora__cache_compile(qlora_ctx* ctx, const char* name,
                                         const qlora_kernel** out) {
    if (qlora__on_cpu(ctx)) {
        return qlora__no_kernels(ctx);
    }
    if (name == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "name is NULL");
    }
    int row = qlora__kernel_row_find(name);
    if (row < 0) {
        return qlora__fail(ctx, QLORA_ERR_KERNEL,
                           "no kernel of the library is named '%.100s'; see qlora_kernel_name",
                           name);
    }
    qlora_kernel* kernel = NULL;
    QLORA__TRY(qlora__kernel_ready(ctx, (qlora__kernel_id)row, &kernel));
    if (out != NULL) {
        *out = kernel;
    }
    return QLORA_OK;
}

static qlora_result qlora__kernel_compile(qlora_ctx* ctx, const char* key, const char* ptx,
                                          const char* entry, uint64_t hash, qlora_kernel** out) {
    qlora__cache* cache = ctx->gpu->cache;
    size_t key_bytes = strlen(key) + 1;
    size_t block = sizeof(qlora_kernel) + key_bytes;
    qlora_kernel* kernel = (qlora_kernel*)qlora__alloc_zero(ctx, block);
    if (kernel == NULL) {
        return QLORA_ERR_MEMORY;
    }
    memcpy(kernel + 1, key, key_bytes);
    kernel->owner = ctx;
    kernel->key = (const char*)(kernel + 1);
    kernel->text_hash = hash;
    kernel->block = block;
    kernel->shared_allowed = 48 * 1024;
    qlora_result r = qlora__module_load(ctx, kernel->key, ptx, 1, &kernel->module);
    if (r == QLORA_OK) {
        r = qlora__kernel_resolve(ctx, kernel->module, entry, 0, &kernel->function);
        if (r != QLORA_OK) {
            ctx->gpu->cu.ModuleUnload(kernel->module);
            cache->info.modules--;
        }
    }
    if (r != QLORA_OK) {
        qlora__free(ctx, kernel, block);
        return r;
    }
    kernel->next = cache->extra;
    cache->extra = kernel;
    cache->info.kernels++;
    *out = kernel;
    return QLORA_OK;
}

static qlora_result qlora__cache_get_or_compile(qlora_ctx* ctx, const char* key, const char* ptx,
                                                const char* entry, const qlora_kernel** out) {
    if (qlora__on_cpu(ctx)) {
        return qlora__no_kernels(ctx);
    }
    const char* missing = key == NULL     ? "key"
                          : ptx == NULL   ? "ptx"
                          : entry == NULL ? "entry"
                          : out == NULL   ? "out"
                                          : NULL;
    if (missing != NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is NULL", missing);
    }
    if (key[0] == '\0') {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "key is empty");
    }
    if (qlora__kernel_row_find(key) >= 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "key '%.100s' is the name of a kernel of the library", key);
    }
    QLORA__TRY(qlora__ptx_check_target(ctx, ptx)); // even if the key is already known
    uint64_t hash = qlora__fnv(entry, strlen(entry), qlora__fnv(ptx, strlen(ptx), 0));
    qlora_kernel* kernel = qlora__kernel_find(ctx, key);
    if (kernel != NULL) {
        if (kernel->text_hash != hash) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "key '%.100s' was compiled from different PTX; use another key",
                               key);
        }
        ctx->gpu->cache->info.hits++;
        *out = kernel;
        return QLORA_OK;
    }
    if (ctx->gpu->cache->info.sealed) {
        return qlora__fail(ctx, QLORA_ERR_SEALED,
                           "'%.100s' would have to be compiled, but the cache is sealed; call "
                           "qlora_cache_unseal first",
                           key);
    }
    QLORA__TRY(qlora__kernel_compile(ctx, key, ptx, entry, hash, &kernel));
    *out = kernel;
    return QLORA_OK;
}

// Compiles the kernels whose conditions are all in `have`, those of a module together; with
// `whole`, the rest of their modules too. One module after another: the driver's compiler holds a
// lock, so threads would gain nothing.
static QLORA__UNUSED qlora_result qlora__cache_warm(qlora_ctx* ctx, qlora__needs have, bool whole) {
    const qlora_kernel* kernels = ctx->gpu->cache->kernels;
    for (int i = 0; i < QLORA__K_COUNT; i++) {
        const qlora__kernel_row* row = &qlora__kernel_rows[i];
        if ((row->need & ~have) != 0 || kernels[i].function != NULL) {
            continue;
        }
        bool take[QLORA__K_COUNT];
        for (int j = 0; j < QLORA__K_COUNT; j++) {
            const qlora__kernel_row* other = &qlora__kernel_rows[j];
            take[j] = kernels[j].function == NULL && (whole || (other->need & ~have) == 0) &&
                      strcmp(other->module, row->module) == 0;
        }
        QLORA__TRY(qlora__module_open(ctx, row, take));
    }
    return QLORA_OK;
}

static void qlora__cache_destroy(qlora_ctx* ctx) {
    qlora__gpu* gpu = ctx->gpu;
    if (gpu->cache == NULL) {
        return;
    }
    while (gpu->cache->modules != NULL) {
        qlora__module* m = gpu->cache->modules;
        gpu->cache->modules = m->next;
        gpu->cu.ModuleUnload(m->handle);
        qlora__free(ctx, m, sizeof *m);
    }
    while (gpu->cache->extra != NULL) {
        qlora_kernel* k = gpu->cache->extra;
        gpu->cache->extra = k->next;
        gpu->cu.ModuleUnload(k->module);
        qlora__free(ctx, k, k->block);
    }
    qlora__free(ctx, gpu->cache, sizeof *gpu->cache);
    gpu->cache = NULL;
}

// Seals or unseals the cache; returns whether it was sealed before.
static bool qlora__cache_set_sealed(qlora_ctx* ctx, bool sealed) {
    if (qlora__on_cpu(ctx)) {
        return false;
    }
    bool before = ctx->gpu->cache->info.sealed;
    ctx->gpu->cache->info.sealed = sealed;
    return before;
}

// Records the hash of a cuBLAS shape until the cache is sealed; afterwards counts unknown shapes.
static QLORA__UNUSED void qlora__cache_count_shape(qlora_ctx* ctx, uint64_t hash) {
    qlora__cache* cache = ctx->gpu->cache;
    for (uint32_t i = 0; i < cache->info.cublas_shapes; i++) {
        if (cache->planned[i] == hash) {
            return;
        }
    }
    if (cache->info.sealed) {
        cache->info.cublas_unplanned++;
    } else if (cache->info.cublas_shapes < QLORA__PLANNED_MAX) {
        cache->planned[cache->info.cublas_shapes++] = hash;
    }
}

// Returns a kernel's function, or NULL if it is not compiled.
static QLORA__UNUSED void* qlora__cache_function(const qlora_ctx* ctx, qlora__kernel_id id) {
    return ctx->gpu->cache->kernels[id].function;
}

static qlora_cache_info qlora__cache_facts(const qlora_ctx* ctx) {
    qlora_cache_info info;
    memset(&info, 0, sizeof info);
    return ctx->gpu != NULL ? ctx->gpu->cache->info : info;
}

#else // QLORA_NO_CUDA

static qlora_result qlora__ptx_emit(qlora_ctx* ctx, const char* ptx, char* buffer, size_t size,
                                    size_t* needed) {
    (void)ptx;
    (void)buffer;
    (void)size;
    (void)needed;
    return qlora__no_kernels(ctx);
}

static qlora_result qlora__kernel_launch(qlora_ctx* ctx, const qlora_kernel* kernel,
                                         const qlora_launch_desc* launch, void** args) {
    (void)kernel;
    (void)launch;
    (void)args;
    return qlora__no_kernels(ctx);
}

static QLORA__UNUSED qlora_result qlora__launch(qlora_ctx* ctx, qlora__kernel_id id, int64_t grid_x,
                                                int64_t grid_y, int64_t grid_z, uint32_t threads,
                                                uint32_t shared, void** args) {
    (void)id;
    (void)grid_x;
    (void)grid_y;
    (void)grid_z;
    (void)threads;
    (void)shared;
    (void)args;
    return qlora__no_kernels(ctx);
}

static qlora_result qlora__cache_get(qlora_ctx* ctx, const char* key, const qlora_kernel** out) {
    (void)key;
    (void)out;
    return qlora__no_kernels(ctx);
}

static qlora_result qlora__cache_compile(qlora_ctx* ctx, const char* name,
                                         const qlora_kernel** out) {
    (void)name;
    (void)out;
    return qlora__no_kernels(ctx);
}

static qlora_result qlora__cache_get_or_compile(qlora_ctx* ctx, const char* key, const char* ptx,
                                                const char* entry, const qlora_kernel** out) {
    (void)key;
    (void)ptx;
    (void)entry;
    (void)out;
    return qlora__no_kernels(ctx);
}

static bool qlora__cache_set_sealed(qlora_ctx* ctx, bool sealed) {
    (void)ctx;
    (void)sealed;
    return false;
}

static qlora_cache_info qlora__cache_facts(const qlora_ctx* ctx) {
    qlora_cache_info info;
    (void)ctx;
    memset(&info, 0, sizeof info);
    return info;
}

#endif // QLORA_NO_CUDA

qlora_result qlora_cache_get(qlora_ctx* ctx, const char* key, const qlora_kernel** out) {
    QLORA__ENTER(ctx, "qlora_cache_get");
    return qlora__leave(ctx, qlora__cache_get(ctx, key, out));
}

qlora_result qlora_cache_compile(qlora_ctx* ctx, const char* name, const qlora_kernel** out) {
    QLORA__ENTER(ctx, "qlora_cache_compile");
    return qlora__leave(ctx, qlora__cache_compile(ctx, name, out));
}

qlora_result qlora_cache_get_or_compile(qlora_ctx* ctx, const char* key, const char* ptx,
                                        const char* entry, const qlora_kernel** out) {
    QLORA__ENTER(ctx, "qlora_cache_get_or_compile");
    return qlora__leave(ctx, qlora__cache_get_or_compile(ctx, key, ptx, entry, out));
}

qlora_result qlora_ptx_emit(qlora_ctx* ctx, const char* ptx, char* buffer, size_t size,
                            size_t* needed) {
    QLORA__ENTER(ctx, "qlora_ptx_emit");
    return qlora__leave(ctx, qlora__ptx_emit(ctx, ptx, buffer, size, needed));
}

qlora_result qlora_kernel_launch(qlora_ctx* ctx, const qlora_kernel* kernel,
                                 const qlora_launch_desc* launch, void** args) {
    QLORA__ENTER(ctx, "qlora_kernel_launch");
    return qlora__leave(ctx, qlora__kernel_launch(ctx, kernel, launch, args));
}

qlora_result qlora_cache_seal(qlora_ctx* ctx) {
    QLORA__ENTER(ctx, "qlora_cache_seal");
    qlora__cache_set_sealed(ctx, true);
    return qlora__leave(ctx, QLORA_OK);
}

qlora_result qlora_cache_unseal(qlora_ctx* ctx) {
    QLORA__ENTER(ctx, "qlora_cache_unseal");
    qlora__cache_set_sealed(ctx, false);
    return qlora__leave(ctx, QLORA_OK);
}

static qlora_result qlora__cache_query(qlora_ctx* ctx, qlora_cache_info* out) {
    if (out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    *out = qlora__cache_facts(ctx);
    return QLORA_OK;
}

qlora_result qlora_cache_query(qlora_ctx* ctx, qlora_cache_info* out) {
    QLORA__ENTER(ctx, "qlora_cache_query");
    return qlora__leave(ctx, qlora__cache_query(ctx, out));
}
