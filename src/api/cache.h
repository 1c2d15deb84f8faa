// ---- kernel cache -------------------------------------------------------------------------------
// All functions of this part that take or return a kernel fail with QLORA_ERR_UNSUPPORTED on the
// CPU.
typedef struct qlora_kernel qlora_kernel; // belongs to its context and is freed with it

// Looks up a kernel of the library by its name, or one that qlora_cache_get_or_compile compiled by
// its key. Never compiles: fails with QLORA_ERR_KERNEL if the kernel is unknown or not compiled
// yet.
QLORA_API qlora_result qlora_cache_get(qlora_ctx* ctx, const char* key, const qlora_kernel** out);
// Compiles a kernel of the library, unless that has been done. out may be NULL.
QLORA_API qlora_result qlora_cache_compile(qlora_ctx* ctx, const char* name,
                                           const qlora_kernel** out);
// Compiles the caller's own PTX, once, and stores the kernel `entry` under a key of the caller's
// choice. The PTX must have the target qlora_ctx_target(ctx), or that with the suffix a or f;
// qlora_ptx_emit rewrites PTX for an older target. Reusing a key for other PTX is an error.
QLORA_API qlora_result qlora_cache_get_or_compile(qlora_ctx* ctx, const char* key, const char* ptx,
                                                  const char* entry, const qlora_kernel** out);
// Copies PTX with .version and .target rewritten for this device. *needed receives the number of
// bytes, including the final NUL; with a NULL buffer, nothing else is done.
QLORA_API qlora_result qlora_ptx_emit(qlora_ctx* ctx, const char* ptx, char* buffer, size_t size,
                                      size_t* needed);

typedef struct qlora_launch_desc {
    uint32_t grid[3];      // in blocks; 0 = 1
    uint32_t block[3];     // in threads, at most 1024 in total; 0 = 1
    uint32_t shared_bytes; // dynamic shared memory; 0 = none
} qlora_launch_desc;
// Launches a kernel on the context's stream. args[i] points to the value of parameter i, as in
// cuLaunchKernel. Does not wait for the device.
QLORA_API qlora_result qlora_kernel_launch(qlora_ctx* ctx, const qlora_kernel* kernel,
                                           const qlora_launch_desc* launch, void** args);

typedef enum qlora_prewarm_kind {
    QLORA_PREWARM_FORWARD = 0,    // as qlora_gemm_forward: A[m,k] B[k,n]
    QLORA_PREWARM_BACKWARD_A = 1, // as qlora_gemm_backward_a: dC[m,n] B[k,n]^T
    QLORA_PREWARM_BACKWARD_B = 2  // as qlora_gemm_backward_b: A[m,k]^T dC[m,n]
} qlora_prewarm_kind;

// A product that a program is going to run. Sizes must be from 1 to 2^24.
typedef struct qlora_prewarm_product {
    qlora_prewarm_kind kind;
    int64_t m;
    int64_t k;
    int64_t n;
    int64_t batch;   // 0 = 1
    qlora_dtype a;   // type of the first operand
    qlora_dtype b;   // type of the second one
    qlora_dtype out; // type of the result
} qlora_prewarm_product;

// The shape of a model. Sizes must be from 1 to 2^24.
typedef struct qlora_prewarm_desc {
    int64_t hidden;
    int64_t intermediate;
    int64_t heads;
    int64_t kv_heads;       // must divide heads; 0 = heads
    int64_t head_dim;       // 0 = hidden / heads
    int64_t max_tokens;     // maximum tokens per micro-batch
    int64_t rank;           // LoRA rank, at most 4096; 0 = no LoRA kernels
    qlora_base_format base; // 0 = NF4
    qlora_dtype compute;    // F32 or BF16; 0 = F32
    const qlora_prewarm_product* products; // more products, of any shape; NULL = none
    int64_t product_count;
} qlora_prewarm_desc;

// Compiles every kernel that a program for the shape may need, whatever operators it calls, runs
// each of its cuBLAS products once on temporary memory, and seals the cache. Covered are, with
// max_tokens rows: the stacks of qlora_linear; the products of qlora_gemm_forward, _backward_a and
// _backward_b of each width of the model with the rank, and without 4-bit or FP8 weights also with
// the base's own matrices (f32 activations with 16-bit weights included); those of
// qlora_nf4_gemm_forward and _backward; the batched ones of attention; f32 products both exact and
// in TF32; and the caller's list. A second call, for another model, compiles only the missing
// kernels. Does nothing on the CPU. qlora_model_open includes this work for its own kernels and
// products alone: before it calls other operators, a program pre-warms or unseals the cache.
QLORA_API qlora_result qlora_prewarm(qlora_ctx* ctx, const qlora_prewarm_desc* shape);
// On a miss, a sealed cache fails with QLORA_ERR_SEALED and names the kernel; it never compiles
// silently. Both calls do nothing on the CPU.
QLORA_API qlora_result qlora_cache_seal(qlora_ctx* ctx);
QLORA_API qlora_result qlora_cache_unseal(qlora_ctx* ctx);

typedef struct qlora_cache_info {
    uint32_t modules;          // loaded modules, including the caller's; each has some kernels
    uint32_t kernels;          // kernels that can be launched
    uint64_t hits;             // lookups that found the kernel compiled
    uint64_t misses;           // modules that had to be compiled
    double jit_ms;             // milliseconds spent compiling
    uint32_t jit_after_seal;   // compilations while sealed; always 0
    uint32_t cublas_shapes;    // cuBLAS product shapes that ran before the seal
    uint64_t cublas_unplanned; // cuBLAS calls with other shapes while sealed
    bool sealed;
} qlora_cache_info;
QLORA_API qlora_result qlora_cache_query(qlora_ctx* ctx, qlora_cache_info* out);
// The name of kernel number `index` of the library, for tests and tools; NULL past the last one.
QLORA_API const char* qlora_kernel_name(size_t index);
