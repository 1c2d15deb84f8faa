// ---- kernel cache -------------------------------------------------------------------------------
typedef struct qlora_kernel qlora_kernel; // lives as long as its context

// A kernel of the library by its registry name, or one that get_or_compile made by its key. Only
// looks: QLORA_ERR_KERNEL when it is not compiled.
QLORA_API qlora_result qlora_cache_get(qlora_ctx* ctx, const char* key, const qlora_kernel** out);
// Compiles one of the library's own kernels, and its module, unless it is there. out may be NULL.
QLORA_API qlora_result qlora_cache_compile(qlora_ctx* ctx, const char* name,
                                           const qlora_kernel** out);
// Compiles the caller's own PTX under a key of the caller's, once. The text's .target must be
// qlora_ctx_target(ctx) (or its a/f form); qlora_ptx_emit rewrites a text that only needs an older
// one.
QLORA_API qlora_result qlora_cache_get_or_compile(qlora_ctx* ctx, const char* key, const char* ptx,
                                                  const char* entry, const qlora_kernel** out);
// Rewrites .version and .target of a text for this device. *needed gets the size with the final
// NUL; a NULL buffer only asks for it.
QLORA_API qlora_result qlora_ptx_emit(qlora_ctx* ctx, const char* ptx, char* buffer, size_t size,
                                      size_t* needed);

typedef struct qlora_launch_desc {
    uint32_t grid[3]; // 0 counts as 1
    uint32_t block[3];
    uint32_t shared_bytes; // dynamic shared memory
} qlora_launch_desc;
// args[i] points at the value of parameter i, as in cuLaunchKernel.
QLORA_API qlora_result qlora_kernel_launch(qlora_ctx* ctx, const qlora_kernel* kernel,
                                           const qlora_launch_desc* launch, void** args);

typedef struct qlora_prewarm_desc {
    int64_t hidden;
    int64_t intermediate;
    int64_t heads;
    int64_t kv_heads; // 0 = heads
    int64_t head_dim; // 0 = hidden / heads
    int64_t max_tokens;
    int64_t rank; // 0 = no LoRA; norms and activations are warmed all the same
    qlora_base_format base;
    qlora_dtype compute; // F32, BF16
} qlora_prewarm_desc;

// Compiles every kernel that this shape needs, runs each of its cuBLAS shapes once on memory that
// is freed again, and seals the cache. Again for a second model: compiles the difference and
// reseals.
QLORA_API qlora_result qlora_prewarm(qlora_ctx* ctx, const qlora_prewarm_desc* shape);
// A sealed cache answers a miss with QLORA_ERR_SEALED and the kernel's name, never with a silent
// compile.
QLORA_API qlora_result qlora_cache_seal(qlora_ctx* ctx);
QLORA_API qlora_result qlora_cache_unseal(qlora_ctx* ctx);

typedef struct qlora_cache_info {
    uint32_t modules; // loaded, the caller's included
    uint32_t kernels; // ready to launch
    uint64_t hits;
    uint64_t misses;
    double jit_ms;
    uint32_t jit_after_seal; // compiles between a seal and the next unseal: 0 by construction
    uint32_t cublas_shapes;  // run by pre-warm
    uint64_t cublas_unplanned; // calls with a shape that pre-warm did not run, after the seal
    bool sealed;
} qlora_cache_info;
QLORA_API qlora_result qlora_cache_query(qlora_ctx* ctx, qlora_cache_info* out);
// The registry, for tests and tools: name of kernel i, NULL past the end.
QLORA_API const char* qlora_kernel_name(size_t index);
