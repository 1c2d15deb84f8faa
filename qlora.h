/* qlora.h - v0.1.0 - QLoRA fine-tuning of language models from C - SPDX: MIT-0 OR Unlicense

   Do this in ONE C or C++ file:

       #define QLORA_IMPLEMENTATION
       #include "qlora.h"

   and include "qlora.h" without the macro everywhere else. kernels_ptx.h must lie beside qlora.h.
   Link with -ldl -lm -lpthread on Linux, with nothing more on Windows.

   CONTENTS  (grep -n '^//@@' qlora.h)

       API        declarations: results, descs, tensors, cache, GEMM, clip, graphs
       PLATFORM   dynamic libraries, threads, clock, files; the only place with _WIN32
       CORE       errors, log, memory, checked arithmetic, CPU threads, random numbers
       NUMBERS    16-bit floating point and element access
       DRIVER     CUDA driver and cuBLAS: symbols, device facts, error names
       TENSOR     memory, tensors, copies and fills on the context's stream
       CACHE      kernel registry, PTX for a target, modules, seal, launch
       CONTEXT    creation, backend choice, stream, native handles, description
       DISPATCH   the GEMM family: cuBLAS, our PTX, CPU; pre-warm
       OPS        operators: the formula, the CPU loop, the launch
       GRAPH      capture, replay, invalidation

   QUICK START

       qlora_ctx_desc desc = {0};                 // zero means "the default" everywhere
       char why[256] = "";
       desc.error_text = why;                     // where creation says what went wrong
       desc.error_text_size = sizeof why;
       desc.log = qlora_log_stderr;
       qlora_ctx* ctx = NULL;
       if (qlora_ctx_create(&desc, &ctx) != QLORA_OK) { puts(why); return 1; }
       ...
       qlora_ctx_destroy(ctx);

   BUILD AND LINK
       C99 or C++11, 64-bit, little endian. Linux, macOS and BSD (CPU only there), Windows (mingw-w64,
       MSVC). Give the implementation its own file: it takes two to three seconds at -O2. Include it
       before any system header there, or build with -D_POSIX_C_SOURCE=200809L.

   CONFIGURATION (define before the implementation; none of them changes a public type)
       QLORA_STATIC          every function is static: a private copy for one file
       QLORA_DLL             mark functions for a shared library
       QLORA_NO_CUDA         leave the GPU out: no dynamic loading, no kernels_ptx.h
       QLORA_NO_MODEL        leave out model, trainer and file formats: the bare runtime
       QLORA_ASSERT(x)       our own invariants only; never files, arguments or devices
       QLORA_KERNELS_HEADER  another name for "kernels_ptx.h"
       QLORA_DEBUG           synchronise after every launch, so that a fault names its kernel

   ERRORS
       Every call that can fail returns a qlora_result and writes its outputs only on success.
       qlora_last_error(ctx) says what, where and what to do; it is never NULL, "" after a successful
       call, and valid until the next call on that context. The library never exits, aborts or prints.
       After a fault on the device (an illegal address, say) CUDA makes every later call of that CUDA
       context fail: such a qlora_ctx answers QLORA_ERR_DEVICE_LOST and can only be destroyed.

   MEMORY
       Host memory goes through desc.allocator, device memory through desc.device_allocator. The
       operators allocate nothing: what they need lies in a scratch of desc.scratch_bytes made at
       creation. A tensor is a small struct that points at memory; qlora_tensor_create allocates,
       qlora_tensor_wrap and qlora_tensor_view do not.

   THREADS
       A context and everything made from it is used by one thread at a time; different contexts are
       independent. Log and allocator callbacks may come from any thread and must not call back.

   LOG
       Silent unless desc.log is set; qlora_log_stderr is supplied.

   DEVICES AND FALLBACK
       CUDA when it is usable (compute capability 7.5 or newer), else the CPU. qlora_ctx_backend tells
       which, qlora_ctx_reason why; desc.require_backend turns the fallback into an error. The device's
       primary context is used unless desc.cu_context is given; it is current only inside our calls.

   NUMERICS
       Same inputs, same bytes: no float atomics, one writer per output, fixed order of summation,
       choices from committed tables, on the same device, driver and cuBLAS. The CPU's results do not
       depend on the number of threads. F32 is exact fp32 (TF32 off) unless desc.math says otherwise;
       16-bit operands accumulate in fp32. Built with -ffast-math the CPU results are unspecified.

   LIMITS
       Rows, columns and leading dimensions of a GEMM fit in 31 bits; buffers in 63.

   QLORA DOES NOT
       pre-train, distribute over several GPUs, run mixtures of experts or vision towers, or use the
       network.
*/

// The implementation needs POSIX names that -std=c99 hides; harmless when the user set them already.
#if defined(QLORA_IMPLEMENTATION) && !defined(_WIN32)
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#ifndef _DARWIN_C_SOURCE
#define _DARWIN_C_SOURCE 1
#endif
#ifndef _FILE_OFFSET_BITS
#define _FILE_OFFSET_BITS 64
#endif
#endif

#ifndef QLORA_H
#define QLORA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

//@@ API        - declarations: results, descs, tensors, cache, GEMM, clip, graphs

#define QLORA_VERSION_MAJOR 0
#define QLORA_VERSION_MINOR 1
#define QLORA_VERSION_PATCH 0
#define QLORA_VERSION (QLORA_VERSION_MAJOR * 10000 + QLORA_VERSION_MINOR * 100 + QLORA_VERSION_PATCH)
#define QLORA_VERSION_STRING "0.1.0"

#if defined(QLORA_STATIC)
#if defined(__GNUC__)
#define QLORA_API static __attribute__((unused))
#else
#define QLORA_API static
#endif
#elif defined(QLORA_DLL) && defined(_WIN32)
#ifdef QLORA_IMPLEMENTATION
#define QLORA_API __declspec(dllexport) extern
#else
#define QLORA_API __declspec(dllimport) extern
#endif
#elif defined(QLORA_DLL) && defined(__GNUC__)
#define QLORA_API __attribute__((visibility("default"))) extern
#else
#define QLORA_API extern
#endif

#ifdef __cplusplus
extern "C" {
#endif

// clang-format off
// ---- results --------------------------------------------------------------------------------------
// name, value (never reused), text
#define QLORA_RESULTS(X)                                                                    \
    X(OK,                 0,    "ok")                                                       \
    X(ERR_ARGUMENT,      -1,    "an argument is not valid")                                 \
    X(ERR_MEMORY,        -2,    "out of host memory")                                       \
    X(ERR_LIMIT,         -3,    "a size is beyond what can be handled")                     \
    X(ERR_STATE,         -4,    "the object is not in a state that allows this call")       \
    X(ERR_UNSUPPORTED,   -5,    "not supported here")                                       \
    X(ERR_STOPPED,       -6,    "stopped by the caller")                                    \
    X(ERR_FILE,          -100,  "a file could not be read or written")                      \
    X(ERR_FORMAT,        -101,  "a file is malformed")                                      \
    X(ERR_CUDA,          -200,  "a CUDA call failed")                                       \
    X(ERR_DEVICE_MEMORY, -201,  "out of device memory")                                     \
    X(ERR_DEVICE_LOST,   -202,  "the CUDA context is dead after an earlier fault")          \
    X(ERR_BACKEND,       -203,  "the required backend is not available")                    \
    X(ERR_KERNEL,        -204,  "a kernel could not be compiled or found")                  \
    X(ERR_TARGET,        -205,  "PTX is not for this device's target")                      \
    X(ERR_SEALED,        -206,  "the kernel cache is sealed")                               \
    X(ERR_CUBLAS,        -207,  "a cuBLAS call failed")                                     \
    X(ERR_CAPTURE,       -208,  "graph capture failed")
// clang-format on

typedef enum qlora_result {
#define QLORA_X_RESULT(name, value, text) QLORA_##name = (value),
    QLORA_RESULTS(QLORA_X_RESULT)
#undef QLORA_X_RESULT
    QLORA_RESULT_FORCE_INT = 0x7fffffff
} qlora_result;

// "ERR_ARGUMENT", and a sentence; "unknown" for a number that is no result.
QLORA_API const char* qlora_result_name(qlora_result result);
QLORA_API const char* qlora_result_text(qlora_result result);

QLORA_API int qlora_version(void); // QLORA_VERSION of the implementation

// ---- hooks ----------------------------------------------------------------------------------------
typedef enum qlora_log_level {
    QLORA_LOG_ERROR = 1,
    QLORA_LOG_WARN = 2,
    QLORA_LOG_INFO = 3,
    QLORA_LOG_DEBUG = 4
} qlora_log_level;

// clang-format off
#define QLORA_LOG_ITEMS(X)                                                                  \
    X(BACKEND,        "which backend runs and why")                                         \
    X(CUBLAS,         "cuBLAS bound or not")                                                \
    X(KERNEL_COMPILE, "a module was compiled, or failed to")                                \
    X(PREWARM,        "pre-warm finished")                                                  \
    X(GRAPH,          "a graph was captured, invalidated, or capture failed")               \
    X(DEVICE_LOST,    "a fault made the device unusable")                                   \
    X(LEAK,           "something still lives when its parent is destroyed")
// clang-format on

typedef enum qlora_log_item {
#define QLORA_X_LOG(name, text) QLORA_LOG_ITEM_##name,
    QLORA_LOG_ITEMS(QLORA_X_LOG)
#undef QLORA_X_LOG
    QLORA_LOG_ITEM_COUNT
} qlora_log_item;

// text is never NULL; file may be.
typedef void (*qlora_log_fn)(void* user, qlora_log_level level, qlora_log_item item,
                             const char* text, const char* file, int line);

// One line per item on standard error; user is ignored.
QLORA_API void qlora_log_stderr(void* user, qlora_log_level level, qlora_log_item item,
                                const char* text, const char* file, int line);

// Both functions or none. align is a power of two. free gets the size that alloc got.
typedef struct qlora_allocator {
    void* (*alloc)(size_t bytes, size_t align, void* user);
    void (*free)(void* pointer, size_t bytes, void* user);
    void* user;
} qlora_allocator;

// Device memory, at least 256-byte aligned, of the context that is current. NULL on failure.
typedef struct qlora_device_allocator {
    void* (*alloc)(size_t bytes, void* user);
    void (*free)(void* pointer, size_t bytes, void* user);
    void* user;
} qlora_device_allocator;

typedef enum qlora_file_mode { QLORA_FILE_READ = 0, QLORA_FILE_CREATE = 1 } qlora_file_mode;

// All functions or none. Those that return int give 0 or an errno value; read and write give the
// number of bytes (short writes are retried, a read of 0 is the end) or a negative errno value.
typedef struct qlora_files {
    int (*open)(const char* path, qlora_file_mode mode, void** file, void* user);
    int64_t (*read)(void* file, void* buffer, size_t bytes, void* user);
    int64_t (*write)(void* file, const void* data, size_t bytes, void* user);
    int (*sync)(void* file, void* user);
    int (*close)(void* file, void* user);
    int (*rename)(const char* from, const char* to, void* user); // replaces `to` atomically
    int (*remove)(const char* path, void* user);
    int (*make_dir)(const char* path, void* user); // 0 also when it is there already
    int (*sync_dir)(const char* path, void* user);
    int (*map)(const char* path, const void** data, uint64_t* bytes, void** handle, void* user);
    void (*unmap)(const void* data, uint64_t bytes, void* handle, void* user);
    void* user;
} qlora_files;

// ---- context --------------------------------------------------------------------------------------
typedef struct qlora_ctx qlora_ctx;

typedef enum qlora_backend {
    QLORA_BACKEND_ANY = 0, // CUDA if usable, else the CPU
    QLORA_BACKEND_CPU = 1,
    QLORA_BACKEND_CUDA = 2
} qlora_backend;

// How products of two f32 matrices are computed. 16-bit operands always accumulate in fp32.
typedef enum qlora_math {
    QLORA_MATH_F32 = 0,     // exact fp32 everywhere
    QLORA_MATH_TF32 = 1,    // forward on TF32 tensor cores, backward in exact fp32
    QLORA_MATH_TF32_ALL = 2 // backward on TF32, too
} qlora_math;

typedef struct qlora_ctx_desc {
    uint32_t reserved_must_be_zero0;
    qlora_backend require_backend; // ANY
    int32_t device;                // CUDA ordinal; 0 is the first
    int32_t threads;               // CPU threads; 0 = one per core, at most 64
    qlora_math math;               // F32
    void* cu_context;              // CUcontext to use; NULL = the device's primary context
    void* cu_stream;               // CUstream to use; NULL = one of our own
    const char* cuda_library;      // path; NULL = the usual names
    const char* cublas_library;    // path; NULL = the usual names, newest first; "none" = do without
    size_t workspace_bytes;        // for cuBLAS; 0 = 32 MiB
    void* workspace;               // the caller's device memory for cuBLAS; NULL = ours
    size_t scratch_bytes;          // for operators; 0 = 64 MiB on CUDA, 16 MiB on the CPU
    qlora_allocator allocator;     // host memory; zero = malloc
    qlora_device_allocator device_allocator; // zero = cuMemAlloc
    qlora_files files;             // zero = the operating system's
    qlora_log_fn log;              // NULL = silent
    void* log_user;
    char* error_text;              // where qlora_ctx_create explains a failure; may be NULL
    size_t error_text_size;
    uint32_t reserved_must_be_zero1;
} qlora_ctx_desc;

QLORA_API qlora_result qlora_ctx_create(const qlora_ctx_desc* desc, qlora_ctx** out);
// Refuses (QLORA_ERR_STATE, nothing freed) while tensors, clips, graphs or models of it live.
QLORA_API qlora_result qlora_ctx_destroy(qlora_ctx* ctx);
QLORA_API void qlora_ctx_get_desc(const qlora_ctx* ctx, qlora_ctx_desc* out); // defaults resolved
QLORA_API const char* qlora_last_error(const qlora_ctx* ctx);
QLORA_API qlora_backend qlora_ctx_backend(const qlora_ctx* ctx);
QLORA_API const char* qlora_ctx_reason(const qlora_ctx* ctx); // why this backend
QLORA_API const char* qlora_ctx_target(const qlora_ctx* ctx); // "sm_90"; "cpu" without a GPU
QLORA_API qlora_result qlora_ctx_set_math(qlora_ctx* ctx, qlora_math math);
// Binds a stream of the caller's (NULL: back to our own). It must belong to this CUDA context and may
// not be the legacy default stream, which cannot be captured. Invalidates the graphs.
QLORA_API qlora_result qlora_ctx_set_stream(qlora_ctx* ctx, void* cu_stream);
QLORA_API qlora_result qlora_ctx_sync(qlora_ctx* ctx);

typedef struct qlora_native {
    void* cu_context;
    void* cu_stream;
    void* cublas; // cublasHandle_t, NULL without cuBLAS
    int32_t cu_device;
} qlora_native;
// All NULL on the CPU. Once handed out, the handle's stream and workspace are set anew at every use.
QLORA_API qlora_result qlora_ctx_native(qlora_ctx* ctx, qlora_native* out);

// Version, backend and why, device, driver, cuBLAS, kernel targets, as lines of text. Returns the bytes
// needed with the final NUL; writes as much as fits.
QLORA_API size_t qlora_describe(const qlora_ctx* ctx, char* buffer, size_t size);

typedef struct qlora_memory_info {
    uint64_t device_bytes;       // live device memory that we allocated
    uint64_t device_peak;        // most of it at one time
    uint64_t device_allocations; // how many so far
    uint64_t device_free;        // what the driver says is free, 0 on the CPU
    uint64_t device_total;
    uint64_t host_bytes; // live host memory that we allocated
} qlora_memory_info;
QLORA_API qlora_result qlora_ctx_memory(qlora_ctx* ctx, qlora_memory_info* out);

// ---- tensors --------------------------------------------------------------------------------------
typedef enum qlora_dtype {
    QLORA_F32 = 0,
    QLORA_BF16 = 1,
    QLORA_F16 = 2,
    QLORA_I32 = 3,
    QLORA_U8 = 4
} qlora_dtype;

// Row-major matrices. data is a device address on CUDA and a host address on the CPU.
typedef struct qlora_tensor {
    void* data;
    size_t bytes; // reachable from data
    qlora_dtype dtype;
    int64_t rows;
    int64_t cols;
    int64_t ld;           // elements from one row to the next, at least cols
    int64_t batch;        // number of matrices
    int64_t batch_stride; // elements from one matrix to the next
    qlora_ctx* owner;
} qlora_tensor;

// Contiguous and uninitialised; batch 1. Freed by qlora_tensor_destroy, which zeroes the struct.
QLORA_API qlora_result qlora_tensor_create(qlora_ctx* ctx, qlora_dtype dtype, int64_t rows,
                                           int64_t cols, qlora_tensor* out);
QLORA_API qlora_result qlora_tensor_create_batched(qlora_ctx* ctx, qlora_dtype dtype, int64_t batch,
                                                   int64_t rows, int64_t cols, qlora_tensor* out);
QLORA_API qlora_result qlora_tensor_destroy(qlora_ctx* ctx, qlora_tensor* tensor);
// Memory of the caller's; ld 0 means cols.
QLORA_API qlora_result qlora_tensor_wrap(qlora_ctx* ctx, void* data, size_t bytes, qlora_dtype dtype,
                                         int64_t rows, int64_t cols, int64_t ld, qlora_tensor* out);
// A window of a tensor of batch 1; shares its memory, is not destroyed.
QLORA_API qlora_result qlora_tensor_view(const qlora_tensor* tensor, int64_t row, int64_t rows,
                                         int64_t col, int64_t cols, qlora_tensor* out);
// Whole contiguous tensors; bytes must be the tensor's size. Both wait for the device.
QLORA_API qlora_result qlora_tensor_upload(qlora_ctx* ctx, const qlora_tensor* tensor,
                                           const void* source, size_t bytes);
QLORA_API qlora_result qlora_tensor_download(qlora_ctx* ctx, const qlora_tensor* tensor,
                                             void* target, size_t bytes);
// Bytes of zero over the elements of the tensor (not over padding between rows). Does not wait.
QLORA_API qlora_result qlora_tensor_zero(qlora_ctx* ctx, const qlora_tensor* tensor);
QLORA_API const char* qlora_dtype_name(qlora_dtype dtype);
QLORA_API size_t qlora_dtype_bytes(qlora_dtype dtype);

// ---- kernel cache ---------------------------------------------------------------------------------
typedef struct qlora_kernel qlora_kernel; // lives as long as its context

// A kernel of the library by its registry name, or one that get_or_compile made by its key.
QLORA_API qlora_result qlora_cache_get(qlora_ctx* ctx, const char* key, const qlora_kernel** out);
// Compiles the caller's own PTX under a key of the caller's, once. The text's .target must be
// qlora_ctx_target(ctx) (or its a/f form); qlora_ptx_emit rewrites a text that only needs an older one.
QLORA_API qlora_result qlora_cache_get_or_compile(qlora_ctx* ctx, const char* key, const char* ptx,
                                                  const char* entry, const qlora_kernel** out);
// Rewrites .version and .target of a text for this device. *needed gets the size with the final NUL;
// a NULL buffer only asks for it.
QLORA_API qlora_result qlora_ptx_emit(qlora_ctx* ctx, const char* ptx, char* buffer, size_t size,
                                      size_t* needed);

typedef struct qlora_launch {
    uint32_t grid[3]; // 0 counts as 1
    uint32_t block[3];
    uint32_t shared_bytes; // dynamic shared memory
} qlora_launch;
// args[i] points at the value of parameter i, as in cuLaunchKernel.
QLORA_API qlora_result qlora_kernel_launch(qlora_ctx* ctx, const qlora_kernel* kernel,
                                           const qlora_launch* launch, void** args);

typedef enum qlora_base_format {
    QLORA_BASE_NF4 = 0,
    QLORA_BASE_16BIT = 1,
    QLORA_BASE_32BIT = 2
} qlora_base_format;

typedef struct qlora_shape {
    int64_t hidden;
    int64_t intermediate;
    int64_t heads;
    int64_t kv_heads; // 0 = heads
    int64_t head_dim; // 0 = hidden / heads
    int64_t max_tokens;
    int64_t rank; // 0 = no LoRA; norms and activations are warmed all the same
    qlora_base_format base;
    qlora_dtype compute; // F32, BF16
} qlora_shape;

// Compiles every kernel that this shape needs, runs each of its cuBLAS shapes once on memory that is
// freed again, and seals the cache. Again for a second model: compiles the difference and reseals.
QLORA_API qlora_result qlora_prewarm(qlora_ctx* ctx, const qlora_shape* shape);
// A sealed cache answers a miss with QLORA_ERR_SEALED and the kernel's name, never with a silent compile.
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
QLORA_API qlora_result qlora_cache_stats(qlora_ctx* ctx, qlora_cache_info* out);
// The registry, for tests and tools: name of kernel i, NULL past the end.
QLORA_API const char* qlora_kernel_name(size_t index);

// ---- GEMM -----------------------------------------------------------------------------------------
typedef enum qlora_path {
    QLORA_PATH_AUTO = 0, // cuBLAS when bound, else our PTX; the CPU on a CPU context
    QLORA_PATH_CPU = 1,
    QLORA_PATH_PTX = 2,
    QLORA_PATH_CUBLAS = 3
} qlora_path;

typedef struct qlora_gemm_desc {
    bool trans_a; // A is stored [K, M]
    bool trans_b; // B is stored [N, K]
    float alpha;
    float beta; // 0: C is not read
    bool tf32;  // allow TF32 for two f32 operands
    qlora_path path;
} qlora_gemm_desc;

// C = alpha op(A) op(B) + beta C, row-major, batch by batch (a batch of 1 serves all).
// Types (A, B, C): f32 f32 f32; bf16 bf16 {bf16, f32}; f16 f16 f32; and f32 with one operand of bf16 or
// f16, C f32: the f32 operand is cast into the scratch, for f16 scaled by a power of two from its own
// maximum, and back in alpha.
QLORA_API qlora_result qlora_gemm(qlora_ctx* ctx, const qlora_gemm_desc* desc, const qlora_tensor* a,
                                  const qlora_tensor* b, const qlora_tensor* c);

typedef enum qlora_gemm_flags {
    QLORA_GEMM_OVERWRITE = 0,
    QLORA_GEMM_ACCUMULATE = 1,
    QLORA_GEMM_PTX = 2,   // force a path
    QLORA_GEMM_CUBLAS = 4,
    QLORA_GEMM_TF32 = 8,  // TF32 for this call, whatever the context says
    QLORA_GEMM_EXACT = 16 // exact fp32 for this call
} qlora_gemm_flags;

// C[M,N] = A[M,K] B[K,N] and its two gradients: dA = dC B^T, dB = A^T dC. flags: qlora_gemm_flags.
QLORA_API qlora_result qlora_gemm_forward(qlora_ctx* ctx, const qlora_tensor* a,
                                          const qlora_tensor* b, const qlora_tensor* c, uint32_t flags);
QLORA_API qlora_result qlora_gemm_backward_a(qlora_ctx* ctx, const qlora_tensor* dc,
                                             const qlora_tensor* b, const qlora_tensor* da,
                                             uint32_t flags);
QLORA_API qlora_result qlora_gemm_backward_b(qlora_ctx* ctx, const qlora_tensor* a,
                                             const qlora_tensor* dc, const qlora_tensor* db,
                                             uint32_t flags);
QLORA_API qlora_path qlora_ctx_last_path(const qlora_ctx* ctx); // of the last GEMM
QLORA_API const char* qlora_path_name(qlora_path path);

// ---- gradient clip --------------------------------------------------------------------------------
typedef struct qlora_clip qlora_clip;

// Clips n f32 tensors in place by their common norm: scale = min(1, max_norm / (norm + 1e-6)). groups
// (n numbers from 0 up, or NULL for one group) gives several norms. Norms, scales and max_norm live on
// the device; nothing waits for it. A non-finite norm leaves its gradients alone and sets a flag.
QLORA_API qlora_result qlora_clip_create(qlora_ctx* ctx, const qlora_tensor* const* tensors,
                                         const int32_t* groups, size_t n, qlora_clip** out);
QLORA_API qlora_result qlora_clip_destroy(qlora_ctx* ctx, qlora_clip* clip);
QLORA_API qlora_result qlora_clip_set(qlora_ctx* ctx, qlora_clip* clip, float max_norm); // 1 at first
QLORA_API qlora_result qlora_clip_apply(qlora_ctx* ctx, qlora_clip* clip);

typedef struct qlora_clip_info {
    float norm;
    float scale;
    bool finite;
} qlora_clip_info;
// Waits for the device. group from 0.
QLORA_API qlora_result qlora_clip_read(qlora_ctx* ctx, qlora_clip* clip, int32_t group,
                                       qlora_clip_info* out);

// ---- operators-----------------------------------------------------------------------------------
// ------------------------------------------------------------------------------------ f32 and bf16
// storage (all tensors of a call in the same one, unless said), f32 arithmetic, rows and columns of
// any size with zero included, leading dimensions respected. An output may be the very tensor of an
// input where the comment says so; any other overlap is an error. Vectors are tensors of one row.
// Gradients that other calls add to (dw) are added to.

// y = silu(x) = x / (1 + e^-x); y may be x. dx = dy silu'(x); dx may be x or dy.
QLORA_API qlora_result qlora_silu_forward(qlora_ctx* ctx, const qlora_tensor* x,
                                          const qlora_tensor* y);
QLORA_API qlora_result qlora_silu_backward(qlora_ctx* ctx, const qlora_tensor* x,
                                           const qlora_tensor* dy, const qlora_tensor* dx);
// h = silu(gate) up; h may be gate or up. gate and up may be two column ranges of one buffer.
QLORA_API qlora_result qlora_swiglu_forward(qlora_ctx* ctx, const qlora_tensor* gate,
                                            const qlora_tensor* up, const qlora_tensor* h);
// dgate, dup from dh, and h again where it is not NULL. dgate may be gate, dup up, h dh.
QLORA_API qlora_result qlora_swiglu_backward(qlora_ctx* ctx, const qlora_tensor* dh,
                                             const qlora_tensor* gate, const qlora_tensor* up,
                                             const qlora_tensor* dgate, const qlora_tensor* dup,
                                             const qlora_tensor* h);
// y = a b, y = a + b, y = alpha x, y = value; y may be an input.
QLORA_API qlora_result qlora_mul(qlora_ctx* ctx, const qlora_tensor* a, const qlora_tensor* b,
                                 const qlora_tensor* y);
QLORA_API qlora_result qlora_add(qlora_ctx* ctx, const qlora_tensor* a, const qlora_tensor* b,
                                 const qlora_tensor* y);
QLORA_API qlora_result qlora_scale(qlora_ctx* ctx, float alpha, const qlora_tensor* x,
                                   const qlora_tensor* y);
QLORA_API qlora_result qlora_fill(qlora_ctx* ctx, float value, const qlora_tensor* y);

// RMSNorm: y = x / sqrt(mean(x^2) + eps) w. w is f32 or bf16 with w->cols dividing x->cols: where
// it is narrower than x, every run of w->cols columns (a head) is normalised by itself. y may be x.
QLORA_API qlora_result qlora_rmsnorm_forward(qlora_ctx* ctx, const qlora_tensor* x,
                                             const qlora_tensor* w, float eps,
                                             const qlora_tensor* y);
// sum = h + delta, rounded to storage, then y = RMSNorm(sum). sum may be h.
QLORA_API qlora_result qlora_rmsnorm_residual_forward(qlora_ctx* ctx, const qlora_tensor* h,
                                                      const qlora_tensor* delta,
                                                      const qlora_tensor* w, float eps,
                                                      const qlora_tensor* sum,
                                                      const qlora_tensor* y);
// dx = dres + (RMSNorm backward of dy at x); dres may be NULL, dx may be dy or dres. Where dw (f32,
// as wide as w) is not NULL the weight's gradient is added to it; then dx must be neither dy nor x.
QLORA_API qlora_result qlora_rmsnorm_backward(qlora_ctx* ctx, const qlora_tensor* dy,
                                              const qlora_tensor* x, const qlora_tensor* w,
                                              float eps, const qlora_tensor* dres,
                                              const qlora_tensor* dx, const qlora_tensor* dw);

typedef enum qlora_rope_type {
    QLORA_ROPE_DEFAULT = 0,
    QLORA_ROPE_LINEAR,
    QLORA_ROPE_LLAMA3,
    QLORA_ROPE_YARN
} qlora_rope_type;

// How a model scales its rotary frequencies; the names are those of config.json.
typedef struct qlora_rope_desc {
    qlora_rope_type type;
    double theta;                 // 0 = 10000
    double factor;                // 0 = 1
    double low_freq_factor;       // llama3; 0 = 1
    double high_freq_factor;      // llama3; 0 = 4
    double original_max_position; // llama3, yarn: original_max_position_embeddings; 0 = error
    double beta_fast;             // yarn; 0 = 32
    double beta_slow;             // yarn; 0 = 1
    double attention_factor;      // yarn, on cosine and sine; 0 = from factor and mscale
    double mscale;                // yarn; 0 = not given
    double mscale_all_dim;        // yarn; 0 = not given
    bool no_truncate;             // yarn: "truncate": false
} qlora_rope_desc;

// Fills out[positions][head_dim]: cosines of the head_dim / 2 frequencies, then their sines. Host
// memory, no context; a bad desc or an odd head_dim gives QLORA_ERR_ARGUMENT.
QLORA_API qlora_result qlora_rope_table(const qlora_rope_desc* desc, int64_t head_dim,
                                        int64_t positions, float* out);
// Rotates heads 0 .. rotated-1 of x [T, heads * head_dim] in place, pairs (i, i + head_dim / 2),
// by the angles of positions [1, T] in table [max_pos, head_dim]; head_dim = table->cols. bias
// [1, x->cols] (f32 or bf16, may be NULL) is added first, to every head. backward turns back (no
// bias). A position outside the table is an error; on CUDA it leaves the row alone and writes 1 to
// flag (one I32, may be NULL).
QLORA_API qlora_result qlora_rope_forward(qlora_ctx* ctx, const qlora_tensor* x, int64_t rotated,
                                          const qlora_tensor* positions, const qlora_tensor* table,
                                          const qlora_tensor* bias, const qlora_tensor* flag);
QLORA_API qlora_result qlora_rope_backward(qlora_ctx* ctx, const qlora_tensor* dx, int64_t rotated,
                                           const qlora_tensor* positions, const qlora_tensor* table,
                                           const qlora_tensor* flag);

// Attention in pieces. split: x [S, H*d] -> y, a batch of H [S, d]; join the other way round; any
// 16- or 32-bit type. transpose: y[b] = x[b]^T.
QLORA_API qlora_result qlora_heads_split(qlora_ctx* ctx, const qlora_tensor* x,
                                         const qlora_tensor* y);
QLORA_API qlora_result qlora_heads_join(qlora_ctx* ctx, const qlora_tensor* x,
                                        const qlora_tensor* y);
QLORA_API qlora_result qlora_transpose(qlora_ctx* ctx, const qlora_tensor* x,
                                       const qlora_tensor* y);
// s[b, q, k] = scale s, or -3e38 where query q, the (cols - rows + q)-th position, may not see key
// k: later keys if causal, and keys `window` or more positions back if window > 0. In place.
QLORA_API qlora_result qlora_scores_mask(qlora_ctx* ctx, const qlora_tensor* s, float scale,
                                         bool causal, int64_t window);
// y = softmax of each row; y may be x. dx = y (dy - sum(y dy)); dx may be dy or y.
QLORA_API qlora_result qlora_softmax_forward(qlora_ctx* ctx, const qlora_tensor* x,
                                             const qlora_tensor* y);
QLORA_API qlora_result qlora_softmax_backward(qlora_ctx* ctx, const qlora_tensor* y,
                                              const qlora_tensor* dy, const qlora_tensor* dx);

// y[t] = table[ids[t]]; table f32, bf16 or f16, ids I32 [1, T]. An id outside the table is an
// error; on CUDA it gives a row of zeros and writes 1 to flag (one I32, may be NULL).
QLORA_API qlora_result qlora_embed(qlora_ctx* ctx, const qlora_tensor* table,
                                   const qlora_tensor* ids, const qlora_tensor* y,
                                   const qlora_tensor* flag);

// Rows of logits [R, V] against labels I32 [1, R]; everything may be NULL but logits, labels,
// losses.
typedef struct qlora_cross_entropy_args {
    const qlora_tensor* logits;
    const qlora_tensor* labels;  // -100 = no label: loss 0, gradient 0
    const qlora_tensor* weights; // f32 [1, R], per row
    const qlora_tensor* scale;   // f32, one: multiplies the gradient, not the loss
    const qlora_tensor* losses;  // f32 [1, R]: weight (log sum e^x - x[label])
    const qlora_tensor* total;   // f32 [1, 3], added to: losses, their rounding rest, weights
    const qlora_tensor* flag;    // I32, one: 1 where a label is outside [0, V) and not -100 (CUDA)
    bool forward_only;           // leave the logits; otherwise they become their gradient
} qlora_cross_entropy_args;
QLORA_API qlora_result qlora_cross_entropy(qlora_ctx* ctx, const qlora_cross_entropy_args* args);
// ids[r] = column of the largest value in row r (the first of equals); ids I32 [1, R].
QLORA_API qlora_result qlora_argmax(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* ids);

// AdamW as torch.optim.AdamW, over one flat f32 arena. The state lives in the backend's memory, so
// that a captured update sees each step's own values.
typedef struct qlora_adamw_state {
    double lr; // the host writes the first five
    double beta1;
    double beta2;
    double eps;
    double weight_decay;
    int64_t updates;  // applied so far: the t of the bias corrections
    int64_t skipped;  // left out so far, because a gradient was not finite
    int32_t skip;     // the latest one was left out
    float derived[7]; // private
} qlora_adamw_state;

// Part of the arena with its own decay factor and its own scale of the shadow copy.
typedef struct qlora_adamw_range {
    int64_t begin; // element; vector speed wants a multiple of 4
    int64_t count;
    float decay;        // times weight_decay: 1, or 0 for norm weights
    float shadow_scale; // shadow = shadow_scale * parameter
} qlora_adamw_range;

typedef struct qlora_adamw_args {
    const qlora_tensor* param;      // f32 [1, n]
    const qlora_tensor* grad;       // f32 [1, n]; zero afterwards
    const qlora_tensor* m;          // f32 [1, n]
    const qlora_tensor* v;          // f32 [1, n]
    const qlora_tensor* shadow;     // bf16 or f32 [1, n], or NULL
    const qlora_tensor* ranges;     // U8: qlora_adamw_range[count], disjoint, inside [0, n)
    const qlora_tensor* state;      // U8: one qlora_adamw_state
    const qlora_tensor* clip_scale; // f32, one: multiplies the gradient; NULL = 1
    const qlora_tensor* not_finite; // I32, one: not 0 = leave this update out; NULL = never
    int64_t longest_range;          // elements of the longest range; 0 = n
} qlora_adamw_args;
// advance counts the update (or the skip) and forms the corrections, then every range is updated.
QLORA_API qlora_result qlora_adamw_step(qlora_ctx* ctx, const qlora_adamw_args* args);
// shadow = shadow_scale * param in every range: after parameters were set. Uses param, shadow,
// ranges.
QLORA_API qlora_result qlora_adamw_shadow(qlora_ctx* ctx, const qlora_adamw_args* args);

// y = x keep / (1 - p), or y += that. Whether element (row, column) is kept depends on nothing but
// (seed, step, sequences[row], positions[row], layer, projection, column): the same in the backward
// pass, after a resume and when a batch is cut differently. y may be x.
typedef struct qlora_dropout_args {
    const qlora_tensor* x;
    const qlora_tensor* y;
    const qlora_tensor* positions; // I32 [1, rows]
    const qlora_tensor* sequences; // I32 [1, rows]
    const qlora_tensor* state;     // I32 [1, 4]: seed low, seed high, step, 0
    float p;                       // 0 <= p < 1
    int32_t layer;                 // 0 .. 2^23 - 1
    int32_t projection;            // 0 .. 255
    bool accumulate;
} qlora_dropout_args;
QLORA_API qlora_result qlora_dropout(qlora_ctx* ctx, const qlora_dropout_args* args);

// ---- graphs ---------------------------------------------------------------------------------------
typedef struct qlora_graph qlora_graph;
typedef qlora_result (*qlora_graph_fn)(qlora_ctx* ctx, void* user);

// Records what fn launches on the context's stream, then runs it once. fn must not wait, allocate,
// copy to or from host memory or compile: what breaks the capture is named and the stream stays usable.
// key says what the graph is for (a shape): replay demands the same. On the CPU fn is called at once
// and again at each replay, so user must stay valid.
QLORA_API qlora_result qlora_graph_capture(qlora_ctx* ctx, uint64_t key, qlora_graph_fn fn,
                                           void* user, qlora_graph** out);
QLORA_API qlora_result qlora_graph_replay(qlora_ctx* ctx, qlora_graph* graph, uint64_t key);
QLORA_API qlora_result qlora_graph_destroy(qlora_ctx* ctx, qlora_graph* graph);

typedef struct qlora_graph_info {
    uint64_t key;
    uint64_t replays;
    size_t nodes; // 0 on the CPU
    bool valid;   // false after a buffer it uses was freed or the stream changed
} qlora_graph_info;
QLORA_API qlora_result qlora_graph_query(qlora_ctx* ctx, const qlora_graph* graph,
                                         qlora_graph_info* out);

#ifdef __cplusplus
}
#endif

#endif // QLORA_H

// Let editors colour the implementation.
#if defined(__INTELLISENSE__) || defined(__JETBRAINS_IDE__) || defined(Q_CREATOR_RUN) ||           \
    defined(__CDT_PARSER__)
#ifndef QLORA_IMPLEMENTATION
#define QLORA_IMPLEMENTATION
#endif
#endif

#ifdef QLORA_IMPLEMENTATION
#ifndef QLORA_IMPLEMENTATION_DONE
#define QLORA_IMPLEMENTATION_DONE

#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wunknown-warning-option"
#pragma clang diagnostic ignored "-Wreserved-identifier"
#endif

//@@ PLATFORM   - dynamic libraries, threads, clock, files; the only place with _WIN32

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef _WIN32
#include <direct.h>
#include <io.h>
#include <process.h>
#include <wchar.h>
#else
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#ifndef CLOCK_MONOTONIC
#error "qlora.h: include the implementation before any system header, or use -D_POSIX_C_SOURCE=200809L"
#endif
#endif

#if !defined(__LP64__) && !defined(_WIN64)
#error "qlora.h needs a 64-bit target"
#endif
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "qlora.h needs a little-endian target"
#endif

// Marks private functions that a configuration may leave without a caller.
#if defined(__MINGW32__)
#define QLORA__UNUSED __attribute__((unused))
#define QLORA__PRINTF(fmt, first) __attribute__((format(gnu_printf, fmt, first)))
#elif defined(__GNUC__)
#define QLORA__UNUSED __attribute__((unused))
#define QLORA__PRINTF(fmt, first) __attribute__((format(printf, fmt, first)))
#else
#define QLORA__UNUSED
#define QLORA__PRINTF(fmt, first)
#endif

#ifndef QLORA_ASSERT
#define QLORA_ASSERT(condition) ((void)(condition))
#endif

typedef void (*qlora__thread_fn)(void* user);

#ifdef _WIN32

// Declared here so that <windows.h> and its macros stay out of the user's file.
#ifdef _WINDOWS_
#ifdef __cplusplus
#error "qlora.h: include the implementation before <windows.h>"
#endif
#else
#ifdef __cplusplus
extern "C" {
#endif
__declspec(dllimport) void* __stdcall LoadLibraryA(const char*);
__declspec(dllimport) void* __stdcall GetProcAddress(void*, const char*);
__declspec(dllimport) unsigned long __stdcall GetLastError(void);
__declspec(dllimport) int __stdcall QueryPerformanceCounter(int64_t*);
__declspec(dllimport) int __stdcall QueryPerformanceFrequency(int64_t*);
__declspec(dllimport) unsigned long __stdcall GetActiveProcessorCount(unsigned short);
__declspec(dllimport) void __stdcall AcquireSRWLockExclusive(void*);
__declspec(dllimport) void __stdcall ReleaseSRWLockExclusive(void*);
__declspec(dllimport) int __stdcall SleepConditionVariableSRW(void*, void*, unsigned long,
                                                               unsigned long);
__declspec(dllimport) void __stdcall WakeAllConditionVariable(void*);
__declspec(dllimport) unsigned long __stdcall WaitForSingleObject(void*, unsigned long);
__declspec(dllimport) int __stdcall CloseHandle(void*);
__declspec(dllimport) int __stdcall MultiByteToWideChar(unsigned, unsigned long, const char*, int,
                                                        wchar_t*, int);
__declspec(dllimport) int __stdcall MoveFileExW(const wchar_t*, const wchar_t*, unsigned long);
__declspec(dllimport) void* __stdcall CreateFileW(const wchar_t*, unsigned long, unsigned long, void*,
                                                  unsigned long, unsigned long, void*);
__declspec(dllimport) int __stdcall GetFileSizeEx(void*, int64_t*);
__declspec(dllimport) void* __stdcall CreateFileMappingW(void*, void*, unsigned long, unsigned long,
                                                         unsigned long, const wchar_t*);
__declspec(dllimport) void* __stdcall MapViewOfFile(void*, unsigned long, unsigned long,
                                                    unsigned long, size_t);
__declspec(dllimport) int __stdcall UnmapViewOfFile(const void*);
#ifdef __cplusplus
}
#endif
#endif

static QLORA__UNUSED void* qlora__library_open(const char* name, char* why, size_t size) {
    void* library = (void*)LoadLibraryA(name);
    if (library == NULL) {
        snprintf(why, size, "%s: error %lu", name, GetLastError());
    }
    return library;
}

static QLORA__UNUSED void* qlora__library_symbol(void* library, const char* name) {
    return (void*)GetProcAddress(library, name);
}

static QLORA__UNUSED double qlora__clock_ms(void) {
    int64_t count = 0;
    int64_t rate = 1;
    QueryPerformanceCounter((void*)&count);
    QueryPerformanceFrequency((void*)&rate);
    return (double)count * 1e3 / (double)rate;
}

static int32_t qlora__core_count(void) {
    return (int32_t)GetActiveProcessorCount(0xffff);
}

typedef struct qlora__mutex {
    void* srw;
} qlora__mutex;
typedef struct qlora__cond {
    void* variable;
} qlora__cond;
typedef struct qlora__thread {
    uintptr_t handle;
    qlora__thread_fn fn;
    void* user;
} qlora__thread;

static bool qlora__mutex_init(qlora__mutex* m) {
    m->srw = NULL;
    return true;
}
static void qlora__mutex_free(qlora__mutex* m) {
    (void)m;
}
static void qlora__mutex_lock(qlora__mutex* m) {
    AcquireSRWLockExclusive((void*)m);
}
static void qlora__mutex_unlock(qlora__mutex* m) {
    ReleaseSRWLockExclusive((void*)m);
}
static bool qlora__cond_init(qlora__cond* c) {
    c->variable = NULL;
    return true;
}
static void qlora__cond_free(qlora__cond* c) {
    (void)c;
}
static void qlora__cond_wait(qlora__cond* c, qlora__mutex* m) {
    SleepConditionVariableSRW((void*)c, (void*)m, 0xffffffffUL, 0);
}
static void qlora__cond_wake(qlora__cond* c) {
    WakeAllConditionVariable((void*)c);
}
static unsigned __stdcall qlora__thread_entry(void* p) {
    qlora__thread* t = (qlora__thread*)p;
    t->fn(t->user);
    return 0;
}
static bool qlora__thread_start(qlora__thread* t, qlora__thread_fn fn, void* user) {
    t->fn = fn;
    t->user = user;
    t->handle = _beginthreadex(NULL, 0, qlora__thread_entry, t, 0, NULL);
    return t->handle != 0;
}
static void qlora__thread_join(qlora__thread* t) {
    WaitForSingleObject((void*)t->handle, 0xffffffffUL);
    CloseHandle((void*)t->handle);
}

// Paths are UTF-8. Longer ones than this are refused with ENAMETOOLONG.
#define QLORA__PATH_MAX 1024
static bool qlora__wide(const char* path, wchar_t* out) {
    return MultiByteToWideChar(65001, 8, path, -1, out, QLORA__PATH_MAX) > 0;
}

static int qlora__os_open(const char* path, qlora_file_mode mode, void** file, void* user) {
    (void)user;
    wchar_t wide[QLORA__PATH_MAX];
    if (!qlora__wide(path, wide)) {
        return ENAMETOOLONG;
    }
    FILE* f = _wfopen(wide, mode == QLORA_FILE_READ ? L"rb" : L"wb");
    if (f == NULL) {
        return errno != 0 ? errno : EIO;
    }
    *file = f;
    return 0;
}

static int64_t qlora__os_read(void* file, void* buffer, size_t bytes, void* user) {
    (void)user;
    size_t n = fread(buffer, 1, bytes, (FILE*)file);
    return n == 0 && ferror((FILE*)file) ? -(int64_t)EIO : (int64_t)n;
}

static int64_t qlora__os_write(void* file, const void* data, size_t bytes, void* user) {
    (void)user;
    size_t n = fwrite(data, 1, bytes, (FILE*)file);
    return n == 0 && bytes > 0 ? -(int64_t)(errno != 0 ? errno : EIO) : (int64_t)n;
}

static int qlora__os_sync(void* file, void* user) {
    (void)user;
    if (fflush((FILE*)file) != 0) {
        return errno != 0 ? errno : EIO;
    }
    return _commit(_fileno((FILE*)file)) == 0 ? 0 : EIO;
}

static int qlora__os_close(void* file, void* user) {
    (void)user;
    return fclose((FILE*)file) == 0 ? 0 : EIO;
}

static int qlora__os_rename(const char* from, const char* to, void* user) {
    (void)user;
    wchar_t wide_from[QLORA__PATH_MAX];
    wchar_t wide_to[QLORA__PATH_MAX];
    if (!qlora__wide(from, wide_from) || !qlora__wide(to, wide_to)) {
        return ENAMETOOLONG;
    }
    return MoveFileExW(wide_from, wide_to, 1 | 8) ? 0 : EIO; // replace, write through
}

static int qlora__os_remove(const char* path, void* user) {
    (void)user;
    wchar_t wide[QLORA__PATH_MAX];
    if (!qlora__wide(path, wide)) {
        return ENAMETOOLONG;
    }
    return _wremove(wide) == 0 ? 0 : errno;
}

static int qlora__os_make_dir(const char* path, void* user) {
    (void)user;
    wchar_t wide[QLORA__PATH_MAX];
    if (!qlora__wide(path, wide)) {
        return ENAMETOOLONG;
    }
    return _wmkdir(wide) == 0 || errno == EEXIST ? 0 : errno;
}

static int qlora__os_sync_dir(const char* path, void* user) {
    (void)path;
    (void)user;
    return 0; // MoveFileEx wrote through already
}

static int qlora__os_map(const char* path, const void** data, uint64_t* bytes, void** handle,
                         void* user) {
    (void)user;
    wchar_t wide[QLORA__PATH_MAX];
    if (!qlora__wide(path, wide)) {
        return ENAMETOOLONG;
    }
    void* file = CreateFileW(wide, 0x80000000UL, 1, NULL, 3, 0, NULL);
    if (file == (void*)(intptr_t)-1) {
        return ENOENT;
    }
    int64_t size = 0;
    void* view = NULL;
    void* mapping = NULL;
    if (GetFileSizeEx(file, (void*)&size) && size > 0) {
        mapping = CreateFileMappingW(file, NULL, 2, 0, 0, NULL);
        view = mapping != NULL ? MapViewOfFile(mapping, 4, 0, 0, 0) : NULL;
    }
    if (mapping != NULL) {
        CloseHandle(mapping); // the view keeps it
    }
    CloseHandle(file);
    if (size > 0 && view == NULL) {
        return EIO;
    }
    *data = view;
    *bytes = (uint64_t)size;
    *handle = NULL;
    return 0;
}

static void qlora__os_unmap(const void* data, uint64_t bytes, void* handle, void* user) {
    (void)bytes;
    (void)handle;
    (void)user;
    if (data != NULL) {
        UnmapViewOfFile(data);
    }
}

#else // POSIX

static QLORA__UNUSED void* qlora__library_open(const char* name, char* why, size_t size) {
    void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        const char* text = dlerror();
        snprintf(why, size, "%s", text != NULL ? text : name);
    }
    return library;
}

static QLORA__UNUSED void* qlora__library_symbol(void* library, const char* name) {
    return dlsym(library, name);
}

static QLORA__UNUSED double qlora__clock_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static int32_t qlora__core_count(void) {
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 && n < 4096 ? (int32_t)n : 1;
}

typedef pthread_mutex_t qlora__mutex;
typedef pthread_cond_t qlora__cond;
typedef struct qlora__thread {
    pthread_t handle;
    qlora__thread_fn fn;
    void* user;
} qlora__thread;

static bool qlora__mutex_init(qlora__mutex* m) {
    return pthread_mutex_init(m, NULL) == 0;
}
static void qlora__mutex_free(qlora__mutex* m) {
    pthread_mutex_destroy(m);
}
static void qlora__mutex_lock(qlora__mutex* m) {
    pthread_mutex_lock(m);
}
static void qlora__mutex_unlock(qlora__mutex* m) {
    pthread_mutex_unlock(m);
}
static bool qlora__cond_init(qlora__cond* c) {
    return pthread_cond_init(c, NULL) == 0;
}
static void qlora__cond_free(qlora__cond* c) {
    pthread_cond_destroy(c);
}
static void qlora__cond_wait(qlora__cond* c, qlora__mutex* m) {
    pthread_cond_wait(c, m);
}
static void qlora__cond_wake(qlora__cond* c) {
    pthread_cond_broadcast(c);
}
static void* qlora__thread_entry(void* p) {
    qlora__thread* t = (qlora__thread*)p;
    t->fn(t->user);
    return NULL;
}
static bool qlora__thread_start(qlora__thread* t, qlora__thread_fn fn, void* user) {
    t->fn = fn;
    t->user = user;
    return pthread_create(&t->handle, NULL, qlora__thread_entry, t) == 0;
}
static void qlora__thread_join(qlora__thread* t) {
    pthread_join(t->handle, NULL);
}

// A file is its descriptor plus one, so that NULL stays "none".
static int qlora__os_fd(void* file) {
    return (int)((intptr_t)file - 1);
}

static int qlora__os_open(const char* path, qlora_file_mode mode, void** file, void* user) {
    (void)user;
    int flags = mode == QLORA_FILE_READ ? O_RDONLY : O_WRONLY | O_CREAT | O_TRUNC;
    int fd = open(path, flags | O_CLOEXEC, 0666);
    if (fd < 0) {
        return errno;
    }
    *file = (void*)((intptr_t)fd + 1);
    return 0;
}

static int64_t qlora__os_read(void* file, void* buffer, size_t bytes, void* user) {
    (void)user;
    size_t most = bytes < ((size_t)1 << 30) ? bytes : (size_t)1 << 30; // Linux caps a call at 2 GiB
    ssize_t n;
    do {
        n = read(qlora__os_fd(file), buffer, most);
    } while (n < 0 && errno == EINTR);
    return n < 0 ? -(int64_t)errno : (int64_t)n;
}

static int64_t qlora__os_write(void* file, const void* data, size_t bytes, void* user) {
    (void)user;
    size_t most = bytes < ((size_t)1 << 30) ? bytes : (size_t)1 << 30;
    ssize_t n;
    do {
        n = write(qlora__os_fd(file), data, most);
    } while (n < 0 && errno == EINTR);
    return n < 0 ? -(int64_t)errno : (int64_t)n;
}

static int qlora__os_sync(void* file, void* user) {
    (void)user;
    return fsync(qlora__os_fd(file)) == 0 ? 0 : errno;
}

static int qlora__os_close(void* file, void* user) {
    (void)user;
    return close(qlora__os_fd(file)) == 0 ? 0 : errno;
}

static int qlora__os_rename(const char* from, const char* to, void* user) {
    (void)user;
    return rename(from, to) == 0 ? 0 : errno;
}

static int qlora__os_remove(const char* path, void* user) {
    (void)user;
    return remove(path) == 0 ? 0 : errno;
}

static int qlora__os_make_dir(const char* path, void* user) {
    (void)user;
    return mkdir(path, 0777) == 0 || errno == EEXIST ? 0 : errno;
}

static int qlora__os_sync_dir(const char* path, void* user) {
    (void)user;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return errno;
    }
    int code = fsync(fd) == 0 ? 0 : errno;
    close(fd);
    // Some file systems cannot sync a folder and say so; the rename is then as safe as it gets there.
    return code == EINVAL ? 0 : code;
}

static int qlora__os_map(const char* path, const void** data, uint64_t* bytes, void** handle,
                         void* user) {
    (void)user;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return errno;
    }
    struct stat info;
    int code = fstat(fd, &info) == 0 ? 0 : errno;
    void* view = NULL;
    if (code == 0 && !S_ISREG(info.st_mode)) {
        code = S_ISDIR(info.st_mode) ? EISDIR : EINVAL;
    }
    if (code == 0 && info.st_size > 0) {
        view = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (view == MAP_FAILED) {
            code = errno;
        }
    }
    close(fd);
    if (code != 0) {
        return code;
    }
    *data = view;
    *bytes = (uint64_t)info.st_size;
    *handle = NULL;
    return 0;
}

static void qlora__os_unmap(const void* data, uint64_t bytes, void* handle, void* user) {
    (void)handle;
    (void)user;
    if (data != NULL) {
        munmap((void*)(uintptr_t)data, (size_t)bytes);
    }
}

#endif // _WIN32

static void* qlora__os_alloc(size_t bytes, size_t align, void* user) {
    (void)user;
#ifdef _WIN32
    return _aligned_malloc(bytes, align);
#else
    void* p = NULL;
    return posix_memalign(&p, align < sizeof(void*) ? sizeof(void*) : align, bytes) == 0 ? p : NULL;
#endif
}

static void qlora__os_free(void* pointer, size_t bytes, void* user) {
    (void)bytes;
    (void)user;
#ifdef _WIN32
    _aligned_free(pointer);
#else
    free(pointer);
#endif
}

// strerror is not safe in threads; these are the ones people meet.
static const char* qlora__errno_text(int code) {
    static const struct {
        int code;
        const char* text;
    } table[] = {
        {ENOENT, "no such file or folder"},  {EACCES, "permission denied"},
        {EPERM, "not permitted"},            {ENOSPC, "no space left on the device"},
        {EROFS, "read-only file system"},    {EISDIR, "is a folder"},
        {ENOTDIR, "not a folder"},           {EEXIST, "exists already"},
        {EMFILE, "too many open files"},     {ENAMETOOLONG, "path too long or not UTF-8"},
        {EFBIG, "file too large"},           {EIO, "input/output error"},
        {ENOMEM, "out of memory"},           {EINVAL, "invalid argument"},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        if (table[i].code == code) {
            return table[i].text;
        }
    }
    return "file error";
}

//@@ CORE       - errors, log, memory, checked arithmetic, CPU threads, random numbers

// The CPU's arithmetic and the storage of an f32 tensor there. Tests build it as double, to check
// gradients by finite differences; everything else is made with float.
#ifndef QLORA__REAL
#define QLORA__REAL float
#endif

#define QLORA__ERROR_SIZE 768
#define QLORA__MAX_THREADS 64
#define QLORA__MAX_DEPTH 16

typedef struct qlora__pool qlora__pool;
typedef struct qlora__gpu qlora__gpu;         // section DRIVER
typedef struct qlora__capture qlora__capture; // below

// Memory that the context owns: device memory on CUDA, host memory on the CPU.
typedef struct qlora__buffer {
    void* data;
    size_t bytes;
    uint64_t id;
    struct qlora__buffer* next;
} qlora__buffer;

struct qlora_ctx {
    qlora_ctx_desc desc; // defaults resolved
    qlora_backend backend;
    char error[QLORA__ERROR_SIZE];
    char reason[QLORA__ERROR_SIZE];
    char dead[QLORA__ERROR_SIZE]; // what made the device unusable; "" while it is alive
    const char* call;             // the outermost public call, for messages
    int depth;                    // public calls call each other
    size_t scratch_marks[QLORA__MAX_DEPTH]; // what was in use when each of them began
    int64_t children;             // tensors, clips, graphs, models
    uint64_t host_bytes;
    uint64_t device_bytes;
    uint64_t device_peak;
    uint64_t device_allocations;
    uint64_t next_buffer_id;
    qlora__buffer* buffers;
    qlora__buffer* scratch;
    size_t scratch_used;
    qlora__pool* pool;
    qlora_graph* graphs;
    qlora__capture* capture; // not NULL while a graph is being captured
    qlora_path last_path;
    qlora__gpu* gpu; // NULL on the CPU
    qlora_result (*activate)(qlora_ctx* ctx);
    void (*deactivate)(qlora_ctx* ctx);
};

// What a capture has touched, and the first call that broke it.
struct qlora__capture {
    uint64_t* ids;
    size_t count;
    size_t capacity;
    char broke[QLORA__ERROR_SIZE];
};

#define QLORA__TRY(expression)                                                                     \
    do {                                                                                           \
        qlora_result qlora_try_ = (expression);                                                    \
        if (qlora_try_ != QLORA_OK) {                                                              \
            return qlora_try_;                                                                     \
        }                                                                                          \
    } while (0)

#define QLORA__ENTER(ctx, name) QLORA__TRY(qlora__enter((ctx), (name)))

int qlora_version(void) {
    return QLORA_VERSION;
}

const char* qlora_result_name(qlora_result result) {
    switch (result) {
#define QLORA__X(name, value, text)                                                                \
    case QLORA_##name:                                                                             \
        return #name;
        QLORA_RESULTS(QLORA__X)
#undef QLORA__X
    default:
        return "unknown";
    }
}

const char* qlora_result_text(qlora_result result) {
    switch (result) {
#define QLORA__X(name, value, text)                                                                \
    case QLORA_##name:                                                                             \
        return text;
        QLORA_RESULTS(QLORA__X)
#undef QLORA__X
    default:
        return "unknown";
    }
}

// Sets the text of qlora_last_error, with the public call in front, and returns the result.
QLORA__PRINTF(3, 4)
static qlora_result qlora__fail(qlora_ctx* ctx, qlora_result result, const char* format, ...) {
    int used = 0;
    if (ctx->call != NULL) {
        used = snprintf(ctx->error, sizeof ctx->error, "%s: ", ctx->call);
    }
    va_list args;
    va_start(args, format);
    vsnprintf(ctx->error + used, sizeof ctx->error - (size_t)used, format, args);
    va_end(args);
    return result;
}

QLORA__PRINTF(5, 6)
static void qlora__log_at(qlora_ctx* ctx, qlora_log_level level, qlora_log_item item, int line,
                          const char* format, ...) {
    if (ctx->desc.log == NULL) {
        return;
    }
    char text[QLORA__ERROR_SIZE];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    ctx->desc.log(ctx->desc.log_user, level, item, text, "qlora.h", line);
}
#define QLORA__LOG(ctx, level, item, ...)                                                          \
    qlora__log_at((ctx), QLORA_LOG_##level, QLORA_LOG_ITEM_##item, __LINE__, __VA_ARGS__)

void qlora_log_stderr(void* user, qlora_log_level level, qlora_log_item item, const char* text,
                      const char* file, int line) {
    static const char* const levels[] = {"", "error", "warning", "info", "debug"};
    static const char* const items[] = {
#define QLORA__X(name, description) #name,
        QLORA_LOG_ITEMS(QLORA__X)
#undef QLORA__X
    };
    (void)user;
    const char* kind = level >= 1 && level <= 4 ? levels[level] : "?";
    const char* what = (int)item >= 0 && item < QLORA_LOG_ITEM_COUNT ? items[item] : "?";
    fprintf(stderr, "qlora %s %s: %s (%s:%d)\n", kind, what, text, file != NULL ? file : "?", line);
}

const char* qlora_last_error(const qlora_ctx* ctx) {
    return ctx != NULL ? ctx->error : "no context (NULL)";
}

static bool qlora__on_cpu(const qlora_ctx* ctx) {
    return ctx->backend != QLORA_BACKEND_CUDA;
}

// The first thing every public call does; nests, so that operators can call operators.
static qlora_result qlora__enter(qlora_ctx* ctx, const char* call) {
    if (ctx == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    if (ctx->depth == 0) {
        ctx->call = call;
        ctx->error[0] = '\0';
        if (ctx->dead[0] != '\0') {
            return qlora__fail(ctx, QLORA_ERR_DEVICE_LOST,
                               "the device was lost earlier (%s); destroy this context", ctx->dead);
        }
        if (ctx->activate != NULL) {
            QLORA__TRY(ctx->activate(ctx));
        }
    }
    QLORA_ASSERT(ctx->depth < QLORA__MAX_DEPTH);
    ctx->scratch_marks[ctx->depth++] = ctx->scratch_used;
    return QLORA_OK;
}

// Gives back the scratch that the call took: the next one on the stream may use it.
static qlora_result qlora__leave(qlora_ctx* ctx, qlora_result result) {
    ctx->scratch_used = ctx->scratch_marks[--ctx->depth];
    if (ctx->depth == 0 && ctx->deactivate != NULL) {
        ctx->deactivate(ctx);
    }
    return result;
}

static QLORA__UNUSED bool qlora__mul(size_t a, size_t b, size_t* out) {
    if (b != 0 && a > SIZE_MAX / b) {
        return false;
    }
    *out = a * b;
    return true;
}

static QLORA__UNUSED bool qlora__add(size_t a, size_t b, size_t* out) {
    if (a > SIZE_MAX - b) {
        return false;
    }
    *out = a + b;
    return true;
}

static QLORA__UNUSED int64_t qlora__min(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static QLORA__UNUSED int64_t qlora__max(int64_t a, int64_t b) {
    return a > b ? a : b;
}

static QLORA__UNUSED int64_t qlora__ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

static QLORA__UNUSED size_t qlora__align_up(size_t n, size_t align) {
    return (n + align - 1) / align * align;
}

// Host memory through the hook, 64-byte aligned. Sets the error text itself.
static void* qlora__alloc(qlora_ctx* ctx, size_t bytes) {
    size_t wanted = bytes > 0 ? bytes : 1;
    void* p = ctx->desc.allocator.alloc(wanted, 64, ctx->desc.allocator.user);
    if (p == NULL) {
        qlora__fail(ctx, QLORA_ERR_MEMORY, "out of host memory (%llu bytes)",
                    (unsigned long long)bytes);
        return NULL;
    }
    ctx->host_bytes += wanted;
    return p;
}

static void* qlora__alloc_zero(qlora_ctx* ctx, size_t bytes) {
    void* p = qlora__alloc(ctx, bytes);
    if (p != NULL) {
        memset(p, 0, bytes);
    }
    return p;
}

// bytes as given to qlora__alloc; NULL is fine.
static void qlora__free(qlora_ctx* ctx, void* pointer, size_t bytes) {
    if (pointer != NULL) {
        size_t wanted = bytes > 0 ? bytes : 1;
        ctx->desc.allocator.free(pointer, wanted, ctx->desc.allocator.user);
        ctx->host_bytes -= wanted;
    }
}

// A 256-byte aligned piece of the scratch, given back when the public call that takes it ends.
static QLORA__UNUSED qlora_result qlora__scratch(qlora_ctx* ctx, size_t bytes, void** out) {
    size_t end = 0;
    if (!qlora__add(ctx->scratch_used, qlora__align_up(bytes, 256), &end) || bytes > SIZE_MAX - 256 ||
        end > ctx->scratch->bytes) {
        return qlora__fail(ctx, QLORA_ERR_LIMIT,
                           "needs %llu bytes of scratch, %llu of %llu are free; raise "
                           "desc.scratch_bytes",
                           (unsigned long long)bytes,
                           (unsigned long long)(ctx->scratch->bytes - ctx->scratch_used),
                           (unsigned long long)ctx->scratch->bytes);
    }
    *out = (char*)ctx->scratch->data + ctx->scratch_used;
    ctx->scratch_used = end;
    return QLORA_OK;
}

// ---- files ----------------------------------------------------------------------------------------

typedef struct qlora__map {
    const uint8_t* data;
    uint64_t size;
    void* handle;
} qlora__map;

static QLORA__UNUSED qlora_result qlora__map_open(qlora_ctx* ctx, const char* path, qlora__map* out) {
    memset(out, 0, sizeof *out);
    const void* data = NULL;
    int code = ctx->desc.files.map(path, &data, &out->size, &out->handle, ctx->desc.files.user);
    if (code != 0) {
        return qlora__fail(ctx, QLORA_ERR_FILE, "cannot read %s: %s (%d)", path,
                           qlora__errno_text(code), code);
    }
    out->data = (const uint8_t*)data;
    return QLORA_OK;
}

static QLORA__UNUSED void qlora__map_close(qlora_ctx* ctx, qlora__map* map) {
    if (map->data != NULL || map->handle != NULL) {
        ctx->desc.files.unmap(map->data, map->size, map->handle, ctx->desc.files.user);
    }
    memset(map, 0, sizeof *map);
}

// A file in the making: written beside its final name and put there only when it is whole and on the
// disk (C-FILES). A crash leaves the old file or the new one.
typedef struct qlora__out {
    void* file;
    char* path; // final, then temporary, in one block
    char* temporary;
    size_t block;
} qlora__out;

static void qlora__out_forget(qlora_ctx* ctx, qlora__out* out) {
    qlora__free(ctx, out->path, out->block);
    memset(out, 0, sizeof *out);
}

// Gives up: closes and removes the temporary file. Keeps the error text.
static void qlora__out_abort(qlora_ctx* ctx, qlora__out* out) {
    if (out->file != NULL) {
        ctx->desc.files.close(out->file, ctx->desc.files.user);
    }
    if (out->temporary != NULL) {
        ctx->desc.files.remove(out->temporary, ctx->desc.files.user);
    }
    qlora__out_forget(ctx, out);
}

static qlora_result qlora__out_fail(qlora_ctx* ctx, qlora__out* out, const char* what, int code) {
    qlora_result r = qlora__fail(ctx, QLORA_ERR_FILE, "cannot %s %s: %s (%d)", what, out->path,
                                 qlora__errno_text(code), code);
    qlora__out_abort(ctx, out);
    return r;
}

static QLORA__UNUSED qlora_result qlora__out_begin(qlora_ctx* ctx, const char* path, qlora__out* out) {
    memset(out, 0, sizeof *out);
    size_t length = strlen(path);
    out->block = 2 * length + 6;
    out->path = (char*)qlora__alloc(ctx, out->block);
    if (out->path == NULL) {
        return QLORA_ERR_MEMORY;
    }
    memcpy(out->path, path, length + 1);
    char* temporary = out->path + length + 1;
    memcpy(temporary, path, length);
    memcpy(temporary + length, ".tmp", 5);
    int code = ctx->desc.files.open(temporary, QLORA_FILE_CREATE, &out->file, ctx->desc.files.user);
    if (code != 0) {
        out->file = NULL; // nothing to remove
        return qlora__out_fail(ctx, out, "create", code);
    }
    out->temporary = temporary;
    return QLORA_OK;
}

// On failure the file is given up already.
static QLORA__UNUSED qlora_result qlora__out_write(qlora_ctx* ctx, qlora__out* out, const void* data,
                                                   size_t bytes) {
    const char* p = (const char*)data;
    while (bytes > 0) {
        int64_t n = ctx->desc.files.write(out->file, p, bytes, ctx->desc.files.user);
        if (n <= 0 || (uint64_t)n > bytes) {
            return qlora__out_fail(ctx, out, "write", n < 0 ? (int)-n : EIO);
        }
        p += n;
        bytes -= (size_t)n;
    }
    return QLORA_OK;
}

static QLORA__UNUSED qlora_result qlora__out_commit(qlora_ctx* ctx, qlora__out* out) {
    const qlora_files* files = &ctx->desc.files;
    int code = files->sync(out->file, files->user);
    if (code != 0) {
        return qlora__out_fail(ctx, out, "sync", code);
    }
    code = files->close(out->file, files->user);
    out->file = NULL;
    if (code == 0) {
        code = files->rename(out->temporary, out->path, files->user);
    }
    if (code != 0) {
        return qlora__out_fail(ctx, out, "replace", code);
    }
    out->temporary = NULL; // it has its final name now
    char* slash = strrchr(out->path, '/');
    const char* folder = slash != NULL ? out->path : ".";
    if (slash != NULL) {
        slash[slash == out->path ? 1 : 0] = '\0';
    }
    code = files->sync_dir(folder, files->user);
    if (code != 0) {
        return qlora__out_fail(ctx, out, "sync the folder of", code);
    }
    qlora__out_forget(ctx, out);
    return QLORA_OK;
}

// ---- CPU threads ----------------------------------------------------------------------------------

typedef void (*qlora__range_fn)(void* user, int64_t begin, int64_t end);

struct qlora__pool {
    qlora__mutex mutex;
    qlora__cond wake; // a job was posted, or quit
    qlora__cond idle; // a worker ran out of work
    qlora__range_fn fn;
    void* user;
    int64_t count;
    int64_t grain;
    int64_t next; // first item that nobody took yet
    uint64_t job;
    int busy;
    bool quit;
    int workers;
    qlora__thread threads[QLORA__MAX_THREADS];
};

// Takes ranges until none is left. Called with the mutex held.
static void qlora__pool_work(qlora__pool* pool) {
    pool->busy++;
    while (pool->next < pool->count) {
        int64_t begin = pool->next;
        int64_t end = qlora__min(begin + pool->grain, pool->count);
        pool->next = end;
        qlora__mutex_unlock(&pool->mutex);
        pool->fn(pool->user, begin, end);
        qlora__mutex_lock(&pool->mutex);
    }
    pool->busy--;
    if (pool->busy == 0) {
        qlora__cond_wake(&pool->idle);
    }
}

static void qlora__pool_thread(void* user) {
    qlora__pool* pool = (qlora__pool*)user;
    qlora__mutex_lock(&pool->mutex);
    uint64_t seen = 0;
    for (;;) {
        while (pool->job == seen && !pool->quit) {
            qlora__cond_wait(&pool->wake, &pool->mutex);
        }
        if (pool->quit) {
            break;
        }
        seen = pool->job;
        qlora__pool_work(pool);
    }
    qlora__mutex_unlock(&pool->mutex);
}

// threads - 1 workers; the calling thread is the last one. A thread that cannot start is done without.
static qlora_result qlora__pool_create(qlora_ctx* ctx, int32_t threads) {
    if (threads <= 1) {
        return QLORA_OK;
    }
    qlora__pool* pool = (qlora__pool*)qlora__alloc_zero(ctx, sizeof *pool);
    if (pool == NULL) {
        return QLORA_ERR_MEMORY;
    }
    if (!qlora__mutex_init(&pool->mutex) || !qlora__cond_init(&pool->wake) ||
        !qlora__cond_init(&pool->idle)) {
        qlora__free(ctx, pool, sizeof *pool);
        return qlora__fail(ctx, QLORA_ERR_MEMORY, "cannot make a lock for the CPU threads");
    }
    while (pool->workers < threads - 1 &&
           qlora__thread_start(&pool->threads[pool->workers], qlora__pool_thread, pool)) {
        pool->workers++;
    }
    ctx->pool = pool;
    return QLORA_OK;
}

static void qlora__pool_destroy(qlora_ctx* ctx) {
    qlora__pool* pool = ctx->pool;
    if (pool == NULL) {
        return;
    }
    qlora__mutex_lock(&pool->mutex);
    pool->quit = true;
    qlora__cond_wake(&pool->wake);
    qlora__mutex_unlock(&pool->mutex);
    for (int i = 0; i < pool->workers; i++) {
        qlora__thread_join(&pool->threads[i]);
    }
    qlora__cond_free(&pool->idle);
    qlora__cond_free(&pool->wake);
    qlora__mutex_free(&pool->mutex);
    qlora__free(ctx, pool, sizeof *pool);
    ctx->pool = NULL;
}

// fn(user, begin, end) over [0, count), grain items at a time. Every output must have one writer, so
// that results do not depend on who ran what.
static QLORA__UNUSED void qlora__parallel(qlora_ctx* ctx, int64_t count, int64_t grain,
                                          qlora__range_fn fn, void* user) {
    qlora__pool* pool = ctx->pool;
    if (count <= 0) {
        return;
    }
    if (pool == NULL || pool->workers == 0 || count <= grain) {
        fn(user, 0, count);
        return;
    }
    qlora__mutex_lock(&pool->mutex);
    pool->fn = fn;
    pool->user = user;
    pool->count = count;
    pool->grain = grain > 0 ? grain : 1;
    pool->next = 0;
    pool->job++;
    qlora__cond_wake(&pool->wake);
    qlora__pool_work(pool);
    while (pool->busy > 0) {
        qlora__cond_wait(&pool->idle, &pool->mutex);
    }
    qlora__mutex_unlock(&pool->mutex);
}

// ---- random numbers -------------------------------------------------------------------------------

// Philox 4x32 with 10 rounds: four random words that depend on nothing but counter and key, so that any
// part of a stream can be made again, in any order, on the CPU and on the GPU alike.
static QLORA__UNUSED void qlora__philox(const uint32_t counter[4], const uint32_t key[2],
                                        uint32_t out[4]) {
    uint32_t c[4] = {counter[0], counter[1], counter[2], counter[3]};
    uint32_t k[2] = {key[0], key[1]};
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c[0];
        uint64_t p1 = (uint64_t)0xCD9E8D57u * c[2];
        uint32_t c1 = c[1];
        uint32_t c3 = c[3];
        c[0] = (uint32_t)(p1 >> 32) ^ c1 ^ k[0];
        c[1] = (uint32_t)p1;
        c[2] = (uint32_t)(p0 >> 32) ^ c3 ^ k[1];
        c[3] = (uint32_t)p0;
        k[0] += 0x9E3779B9u;
        k[1] += 0xBB67AE85u;
    }
    memcpy(out, c, sizeof c);
}

//@@ NUMBERS    - 16-bit floating point and element access

static uint32_t qlora__bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static float qlora__from_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

// By bits: with -ffast-math compilers fold isfinite() away.
static QLORA__UNUSED bool qlora__finite(float x) {
    return (qlora__bits(x) & 0x7f800000u) != 0x7f800000u;
}

// Round to nearest even; a NaN stays a NaN.
static uint16_t qlora__bf16_from(float x) {
    uint32_t u = qlora__bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) {
        return 0x7fff;
    }
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

static float qlora__bf16_to(uint16_t h) {
    return qlora__from_bits((uint32_t)h << 16);
}

static uint16_t qlora__f16_from(float x) {
    uint32_t u = qlora__bits(x);
    uint32_t sign = (u >> 16) & 0x8000u;
    uint32_t a = u & 0x7fffffffu;
    if (a > 0x7f800000u) {
        return 0x7fff;
    }
    if (a >= 0x47800000u) { // 65536 and up
        return (uint16_t)(sign | 0x7c00u);
    }
    if (a < 0x38800000u) { // below the smallest normal: let the adder of float do the rounding
        float magic = qlora__from_bits(a) + 0.5f; // 0.5 has an ulp of 2^-24, f16's smallest step
        return (uint16_t)(sign | (qlora__bits(magic) - 0x3f000000u));
    }
    uint32_t rounded = a + 0xfffu + ((a >> 13) & 1u) - 0x38000000u;
    return (uint16_t)(sign | (rounded >> 13));
}

static float qlora__f16_to(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t exponent = (h >> 10) & 31u;
    uint32_t mantissa = h & 0x3ffu;
    if (exponent == 31) {
        return qlora__from_bits(sign | 0x7f800000u | mantissa << 13);
    }
    if (exponent == 0) {
        float small = (float)mantissa * (1.0f / 16777216.0f);
        return sign != 0 ? -small : small;
    }
    return qlora__from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

size_t qlora_dtype_bytes(qlora_dtype dtype) {
    switch (dtype) {
    case QLORA_F32:
        return sizeof(QLORA__REAL);
    case QLORA_BF16:
    case QLORA_F16:
        return 2;
    case QLORA_I32:
        return 4;
    case QLORA_U8:
        return 1;
    }
    return 0;
}

const char* qlora_dtype_name(qlora_dtype dtype) {
    static const char* const names[] = {"f32", "bf16", "f16", "i32", "u8"};
    return (int)dtype >= 0 && dtype <= QLORA_U8 ? names[dtype] : "unknown";
}

#define QLORA__IS_F32 (1u << QLORA_F32)
#define QLORA__IS_BF16 (1u << QLORA_BF16)
#define QLORA__IS_F16 (1u << QLORA_F16)
#define QLORA__IS_I32 (1u << QLORA_I32)
#define QLORA__IS_U8 (1u << QLORA_U8)
#define QLORA__IS_FLOAT (QLORA__IS_F32 | QLORA__IS_BF16 | QLORA__IS_F16)

// Element access on the CPU, through the dtype.
static QLORA__REAL qlora__load(const void* data, qlora_dtype dtype, int64_t index) {
    switch (dtype) {
    case QLORA_F32:
        return ((const QLORA__REAL*)data)[index];
    case QLORA_BF16:
        return (QLORA__REAL)qlora__bf16_to(((const uint16_t*)data)[index]);
    case QLORA_F16:
        return (QLORA__REAL)qlora__f16_to(((const uint16_t*)data)[index]);
    case QLORA_I32:
        return (QLORA__REAL)((const int32_t*)data)[index];
    case QLORA_U8:
        return (QLORA__REAL)((const uint8_t*)data)[index];
    }
    return (QLORA__REAL)0;
}

static void qlora__store(void* data, qlora_dtype dtype, int64_t index, QLORA__REAL value) {
    if (dtype == QLORA_F32) {
        ((QLORA__REAL*)data)[index] = value;
    } else if (dtype == QLORA_BF16) {
        ((uint16_t*)data)[index] = qlora__bf16_from((float)value);
    } else if (dtype == QLORA_F16) {
        ((uint16_t*)data)[index] = qlora__f16_from((float)value);
    }
}

static QLORA__UNUSED QLORA__REAL qlora__at(const qlora_tensor* t, int64_t row, int64_t col) {
    return qlora__load(t->data, t->dtype, row * t->ld + col);
}

static QLORA__UNUSED void qlora__put(const qlora_tensor* t, int64_t row, int64_t col,
                                     QLORA__REAL value) {
    qlora__store(t->data, t->dtype, row * t->ld + col, value);
}

// exp, log, ... in the CPU's own precision.
#define QLORA__MATH1(name)                                                                         \
    static QLORA__UNUSED QLORA__REAL qlora__##name(QLORA__REAL x) {                                \
        return sizeof x == sizeof(float) ? (QLORA__REAL)name##f((float)x)                          \
                                         : (QLORA__REAL)name((double)x);                           \
    }
QLORA__MATH1(exp)
QLORA__MATH1(log)
QLORA__MATH1(sqrt)
QLORA__MATH1(fabs)
#undef QLORA__MATH1

// Elements from the first to the last of a tensor; false when that overflows.
static bool qlora__tensor_span(const qlora_tensor* t, size_t* elements) {
    *elements = 0;
    if (t->rows == 0 || t->cols == 0 || t->batch == 0) {
        return true;
    }
    size_t last_row = 0;
    size_t last_batch = 0;
    size_t sum = 0;
    return qlora__mul((size_t)(t->rows - 1), (size_t)t->ld, &last_row) &&
           qlora__mul((size_t)(t->batch - 1), (size_t)t->batch_stride, &last_batch) &&
           qlora__add(last_row, last_batch, &sum) && qlora__add(sum, (size_t)t->cols, elements);
}

static bool qlora__tensor_bytes(const qlora_tensor* t, size_t* bytes) {
    size_t elements = 0;
    return qlora__tensor_span(t, &elements) &&
           qlora__mul(elements, qlora_dtype_bytes(t->dtype), bytes);
}

// Remembers which of our buffers a graph in the making uses, so that freeing one invalidates it.
static qlora_result qlora__capture_note(qlora_ctx* ctx, const void* data) {
    qlora__capture* capture = ctx->capture;
    if (capture == NULL || data == NULL) {
        return QLORA_OK;
    }
    const qlora__buffer* b = ctx->buffers;
    while (b != NULL && ((const char*)data < (const char*)b->data ||
                         (const char*)data >= (const char*)b->data + b->bytes)) {
        b = b->next;
    }
    if (b == NULL) {
        return QLORA_OK; // the caller's own memory
    }
    for (size_t i = 0; i < capture->count; i++) {
        if (capture->ids[i] == b->id) {
            return QLORA_OK;
        }
    }
    if (capture->count == capture->capacity) {
        size_t capacity = capture->capacity > 0 ? capture->capacity * 2 : 64;
        uint64_t* ids = (uint64_t*)qlora__alloc(ctx, capacity * sizeof *ids);
        if (ids == NULL) {
            return QLORA_ERR_MEMORY;
        }
        if (capture->count > 0) {
            memcpy(ids, capture->ids, capture->count * sizeof *ids);
        }
        qlora__free(ctx, capture->ids, capture->capacity * sizeof *ids);
        capture->ids = ids;
        capture->capacity = capacity;
    }
    capture->ids[capture->count++] = b->id;
    return QLORA_OK;
}

// What cannot happen inside a capture says so here; the capture then fails and names it.
static qlora_result qlora__not_in_capture(qlora_ctx* ctx, const char* what) {
    if (ctx->capture == NULL) {
        return QLORA_OK;
    }
    if (ctx->capture->broke[0] == '\0') {
        snprintf(ctx->capture->broke, sizeof ctx->capture->broke, "%s", what);
    }
    return qlora__fail(ctx, QLORA_ERR_CAPTURE, "%s cannot be part of a graph; do it before the capture",
                       what);
}

// The checks that every operator makes of every tensor; -1 accepts any size.
static qlora_result qlora__need_batch(qlora_ctx* ctx, const qlora_tensor* t, const char* name,
                                      unsigned dtypes, int64_t batch, int64_t rows, int64_t cols) {
    if (t == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is NULL", name);
    }
    if (t->owner != ctx) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s belongs to %s", name,
                           t->owner == NULL ? "no context; use qlora_tensor_create or _wrap"
                                            : "another context");
    }
    if ((int)t->dtype < 0 || t->dtype > QLORA_U8 || (dtypes >> t->dtype & 1u) == 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s has dtype %s, which is not accepted here", name,
                           qlora_dtype_name(t->dtype));
    }
    if (t->rows < 0 || t->cols < 0 || t->batch < 0 || t->batch_stride < 0 || t->ld < t->cols) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "%s has %lld rows, %lld columns, ld %lld, batch %lld: sizes may not be "
                           "negative and ld not below the columns",
                           name, (long long)t->rows, (long long)t->cols, (long long)t->ld,
                           (long long)t->batch);
    }
    if ((rows >= 0 && t->rows != rows) || (cols >= 0 && t->cols != cols)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is %lld x %lld, expected %lld x %lld%s", name,
                           (long long)t->rows, (long long)t->cols, (long long)rows, (long long)cols,
                           rows < 0 || cols < 0 ? " (-1: any)" : "");
    }
    if (batch >= 0 && t->batch != batch) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s has a batch of %lld, expected %lld", name,
                           (long long)t->batch, (long long)batch);
    }
    size_t bytes = 0;
    if (!qlora__tensor_bytes(t, &bytes)) {
        return qlora__fail(ctx, QLORA_ERR_LIMIT, "%s: the size overflows", name);
    }
    if (bytes > t->bytes || (t->data == NULL && bytes > 0)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s needs %llu bytes, its buffer has %llu", name,
                           (unsigned long long)bytes,
                           (unsigned long long)(t->data == NULL ? 0 : t->bytes));
    }
    return qlora__capture_note(ctx, t->data);
}

static QLORA__UNUSED qlora_result qlora__need(qlora_ctx* ctx, const qlora_tensor* t, const char* name,
                                              unsigned dtypes, int64_t rows, int64_t cols) {
    return qlora__need_batch(ctx, t, name, dtypes, 1, rows, cols);
}

// Two windows of one buffer with the same ld and different columns do not overlap.
static bool qlora__tensors_overlap(const qlora_tensor* x, const qlora_tensor* y) {
    size_t x_bytes = 0;
    size_t y_bytes = 0;
    if (!qlora__tensor_bytes(x, &x_bytes) || !qlora__tensor_bytes(y, &y_bytes) || x_bytes == 0 ||
        y_bytes == 0) {
        return false;
    }
    uintptr_t x0 = (uintptr_t)x->data;
    uintptr_t y0 = (uintptr_t)y->data;
    if (x0 + x_bytes <= y0 || y0 + y_bytes <= x0) {
        return false;
    }
    size_t size = qlora_dtype_bytes(x->dtype);
    if (size != qlora_dtype_bytes(y->dtype) || x->ld != y->ld || x->batch != 1 || y->batch != 1) {
        return true;
    }
    const qlora_tensor* low = x0 <= y0 ? x : y;
    const qlora_tensor* high = x0 <= y0 ? y : x;
    uintptr_t gap = (uintptr_t)high->data - (uintptr_t)low->data;
    if (gap % size != 0) {
        return true;
    }
    int64_t column = (int64_t)(gap / size) % low->ld;
    return column < low->cols || column + high->cols > low->ld;
}

static QLORA__UNUSED qlora_result qlora__need_apart(qlora_ctx* ctx, const char* out_name,
                                                    const qlora_tensor* out, const char* in_name,
                                                    const qlora_tensor* in) {
    if (qlora__tensors_overlap(out, in)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s overlaps %s", out_name, in_name);
    }
    return QLORA_OK;
}

//@@ DRIVER     - CUDA driver and cuBLAS: symbols, device facts, error names

#ifndef QLORA_NO_CUDA

typedef int qlora__CUresult;
typedef int qlora__CUdevice;
typedef unsigned long long qlora__CUdeviceptr;
typedef int qlora__cublasStatus;

#ifdef _WIN32
#define QLORA__CUDAAPI __stdcall
#else
#define QLORA__CUDAAPI
#endif

// clang-format off
// Values of cuda.h and cublas_api.h; tests compare them with NVIDIA's headers where those are installed.
#define QLORA__CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT 16
#define QLORA__CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR 75
#define QLORA__CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR 76
#define QLORA__CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN 97
#define QLORA__CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES 8
#define QLORA__CU_STREAM_NON_BLOCKING 1
#define QLORA__CU_STREAM_CAPTURE_MODE_THREAD_LOCAL 1
#define QLORA__CU_JIT_INFO_LOG_BUFFER 3
#define QLORA__CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES 4
#define QLORA__CU_JIT_ERROR_LOG_BUFFER 5
#define QLORA__CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES 6
#define QLORA__CUDA_R_32F 0
#define QLORA__CUDA_R_16F 2
#define QLORA__CUDA_R_16BF 14
#define QLORA__CUBLAS_OP_N 0
#define QLORA__CUBLAS_OP_T 1
#define QLORA__CUBLAS_POINTER_MODE_HOST 0
#define QLORA__CUBLAS_POINTER_MODE_DEVICE 1
#define QLORA__CUBLAS_DEFAULT_MATH 0
#define QLORA__CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION 16
#define QLORA__CUBLAS_COMPUTE_32F 68
#define QLORA__CUBLAS_COMPUTE_32F_FAST_TF32 77 // 74 is FAST_16F: the reference system's mistake
#define QLORA__CUBLAS_GEMM_DEFAULT (-1)

// required, result type, field, symbol, parameters
#define QLORA__CUDA_SYMBOLS(X)                                                                       \
    X(1, qlora__CUresult, Init, "cuInit", (unsigned))                                                \
    X(1, qlora__CUresult, DriverGetVersion, "cuDriverGetVersion", (int*))                            \
    X(1, qlora__CUresult, GetErrorName, "cuGetErrorName", (qlora__CUresult, const char**))           \
    X(1, qlora__CUresult, DeviceGetCount, "cuDeviceGetCount", (int*))                                \
    X(1, qlora__CUresult, DeviceGet, "cuDeviceGet", (qlora__CUdevice*, int))                         \
    X(1, qlora__CUresult, DeviceGetName, "cuDeviceGetName", (char*, int, qlora__CUdevice))           \
    X(1, qlora__CUresult, DeviceGetAttribute, "cuDeviceGetAttribute", (int*, int, qlora__CUdevice))  \
    X(1, qlora__CUresult, DeviceTotalMem, "cuDeviceTotalMem_v2", (size_t*, qlora__CUdevice))         \
    X(1, qlora__CUresult, DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain",                        \
      (void**, qlora__CUdevice))                                                                     \
    X(1, qlora__CUresult, DevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2",                   \
      (qlora__CUdevice))                                                                             \
    X(1, qlora__CUresult, CtxGetDevice, "cuCtxGetDevice", (qlora__CUdevice*))                        \
    X(1, qlora__CUresult, CtxPushCurrent, "cuCtxPushCurrent_v2", (void*))                            \
    X(1, qlora__CUresult, CtxPopCurrent, "cuCtxPopCurrent_v2", (void**))                             \
    X(1, qlora__CUresult, StreamCreate, "cuStreamCreate", (void**, unsigned))                        \
    X(1, qlora__CUresult, StreamDestroy, "cuStreamDestroy_v2", (void*))                              \
    X(1, qlora__CUresult, StreamSynchronize, "cuStreamSynchronize", (void*))                         \
    X(1, qlora__CUresult, StreamGetCtx, "cuStreamGetCtx", (void*, void**))                           \
    X(1, qlora__CUresult, StreamBeginCapture, "cuStreamBeginCapture_v2", (void*, int))               \
    X(1, qlora__CUresult, StreamEndCapture, "cuStreamEndCapture", (void*, void**))                   \
    X(1, qlora__CUresult, GraphInstantiate, "cuGraphInstantiateWithFlags",                           \
      (void**, void*, unsigned long long))                                                           \
    X(1, qlora__CUresult, GraphGetNodes, "cuGraphGetNodes", (void*, void**, size_t*))                \
    X(1, qlora__CUresult, GraphLaunch, "cuGraphLaunch", (void*, void*))                              \
    X(1, qlora__CUresult, GraphDestroy, "cuGraphDestroy", (void*))                                   \
    X(1, qlora__CUresult, GraphExecDestroy, "cuGraphExecDestroy", (void*))                           \
    X(1, qlora__CUresult, ModuleLoadData, "cuModuleLoadData", (void**, const void*))                 \
    X(1, qlora__CUresult, ModuleLoadDataEx, "cuModuleLoadDataEx",                                    \
      (void**, const void*, unsigned, int*, void**))                                                 \
    X(1, qlora__CUresult, ModuleGetFunction, "cuModuleGetFunction", (void**, void*, const char*))    \
    X(1, qlora__CUresult, ModuleUnload, "cuModuleUnload", (void*))                                   \
    X(1, qlora__CUresult, FuncSetAttribute, "cuFuncSetAttribute", (void*, int, int))                 \
    X(1, qlora__CUresult, LaunchKernel, "cuLaunchKernel",                                            \
      (void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,   \
       void**))                                                                                      \
    X(1, qlora__CUresult, MemAlloc, "cuMemAlloc_v2", (qlora__CUdeviceptr*, size_t))                  \
    X(1, qlora__CUresult, MemFree, "cuMemFree_v2", (qlora__CUdeviceptr))                             \
    X(1, qlora__CUresult, MemHostAlloc, "cuMemHostAlloc", (void**, size_t, unsigned))                \
    X(1, qlora__CUresult, MemFreeHost, "cuMemFreeHost", (void*))                                     \
    X(1, qlora__CUresult, MemGetInfo, "cuMemGetInfo_v2", (size_t*, size_t*))                         \
    X(1, qlora__CUresult, MemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2",                                   \
      (qlora__CUdeviceptr, const void*, size_t, void*))                                              \
    X(1, qlora__CUresult, MemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2",                                   \
      (void*, qlora__CUdeviceptr, size_t, void*))                                                    \
    X(1, qlora__CUresult, MemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2",                                   \
      (qlora__CUdeviceptr, qlora__CUdeviceptr, size_t, void*))                                       \
    X(1, qlora__CUresult, MemsetD8Async, "cuMemsetD8Async",                                          \
      (qlora__CUdeviceptr, unsigned char, size_t, void*))                                            \
    X(1, qlora__CUresult, MemsetD32Async, "cuMemsetD32Async",                                        \
      (qlora__CUdeviceptr, unsigned, size_t, void*))                                                 \
    X(1, qlora__CUresult, MemsetD2D8Async, "cuMemsetD2D8Async",                                      \
      (qlora__CUdeviceptr, size_t, unsigned char, size_t, size_t, void*))                            \
    X(1, qlora__CUresult, EventCreate, "cuEventCreate", (void**, unsigned))                          \
    X(1, qlora__CUresult, EventDestroy, "cuEventDestroy_v2", (void*))                                \
    X(1, qlora__CUresult, EventRecord, "cuEventRecord", (void*, void*))                              \
    X(1, qlora__CUresult, EventQuery, "cuEventQuery", (void*))                                       \
    X(1, qlora__CUresult, EventSynchronize, "cuEventSynchronize", (void*))                           \
    X(1, qlora__CUresult, EventElapsedTime, "cuEventElapsedTime", (float*, void*, void*))

#define QLORA__CUBLAS_SYMBOLS(X)                                                                     \
    X(1, qlora__cublasStatus, Create, "cublasCreate_v2", (void**))                                   \
    X(1, qlora__cublasStatus, Destroy, "cublasDestroy_v2", (void*))                                  \
    X(1, qlora__cublasStatus, GetVersion, "cublasGetVersion_v2", (void*, int*))                      \
    X(1, qlora__cublasStatus, SetStream, "cublasSetStream_v2", (void*, void*))                       \
    X(1, qlora__cublasStatus, SetWorkspace, "cublasSetWorkspace_v2", (void*, void*, size_t))         \
    X(1, qlora__cublasStatus, SetMathMode, "cublasSetMathMode", (void*, int))                        \
    X(1, qlora__cublasStatus, SetPointerMode, "cublasSetPointerMode_v2", (void*, int))               \
    X(1, qlora__cublasStatus, GemmEx, "cublasGemmEx",                                                \
      (void*, int, int, int, int, int, const void*, const void*, int, int, const void*, int, int,    \
       const void*, void*, int, int, int, int))                                                      \
    X(1, qlora__cublasStatus, GemmStridedBatchedEx, "cublasGemmStridedBatchedEx",                    \
      (void*, int, int, int, int, int, const void*, const void*, int, int, long long, const void*,   \
       int, int, long long, const void*, void*, int, int, long long, int, int, int))

#ifdef _WIN32
#define QLORA__CUDA_NAMES(X) X("nvcuda.dll")
#define QLORA__CUBLAS_NAMES(X) X("cublas64_13.dll") X("cublas64_12.dll") X("cublas64_11.dll")
#else
#define QLORA__CUDA_NAMES(X)                                                                         \
    X("libcuda.so.1") X("libcuda.so") X("/usr/lib/wsl/lib/libcuda.so.1")
#define QLORA__CUBLAS_NAMES(X)                                                                       \
    X("libcublas.so.13") X("libcublas.so.12") X("libcublas.so.11") X("libcublas.so")                 \
    X("/usr/local/cuda/lib64/libcublas.so")
#endif
// clang-format on

#define QLORA__X(required, type, field, symbol, args) type(QLORA__CUDAAPI* field) args;
typedef struct qlora__cuda_table {
    QLORA__CUDA_SYMBOLS(QLORA__X)
} qlora__cuda_table;
typedef struct qlora__cublas_table {
    QLORA__CUBLAS_SYMBOLS(QLORA__X)
} qlora__cublas_table;
#undef QLORA__X

typedef struct qlora__symbol {
    const char* name;
    size_t offset;
    int required;
} qlora__symbol;

typedef struct qlora__cache qlora__cache; // section CACHE

struct qlora__gpu {
    qlora__cuda_table cu;
    qlora__cublas_table blas;
    int driver_version; // 13000 is CUDA 13.0
    int ptx_version;    // highest PTX version that this driver takes, 90 is 9.0
    qlora__CUdevice device;
    char device_name[128];
    int capability;     // 90 is 9.0
    int sm_count;
    int max_shared;     // bytes of shared memory that one block can ask for
    size_t total_bytes;
    char target[16];    // "sm_90"
    int target_number;  // 90
    void* context;
    bool owns_context;  // the primary context was retained
    void* own_stream;
    void* stream;       // in use
    void* cublas;       // handle, NULL without cuBLAS
    int cublas_version;
    bool cublas_exposed; // the caller has the handle: bind again before every use
    bool cublas_bound;
    char cublas_note[256];
    void* workspace;    // for cuBLAS
    qlora__buffer* own_workspace;
    qlora__cache* cache;
};

// Copies symbol addresses into a table of function pointers; the names that are missing go to missing.
static bool qlora__symbols_load(void* library, const qlora__symbol* symbols, size_t count, void* table,
                                char* missing, size_t size) {
    missing[0] = '\0';
    bool complete = true;
    for (size_t i = 0; i < count; i++) {
        void* address = qlora__library_symbol(library, symbols[i].name);
        // A pointer to data copied into a pointer to a function: what dlsym asks for, without a cast
        // that pedantic compilers refuse.
        memcpy((char*)table + symbols[i].offset, &address, sizeof address);
        if (address == NULL && symbols[i].required) {
            size_t used = strlen(missing);
            snprintf(missing + used, size - used, "%s%s", used > 0 ? ", " : "", symbols[i].name);
            complete = false;
        }
    }
    return complete;
}

#define QLORA__X(required, type, field, symbol, args)                                              \
    {symbol, offsetof(qlora__cuda_table, field), required},
static const qlora__symbol qlora__cuda_symbols[] = {QLORA__CUDA_SYMBOLS(QLORA__X)};
#undef QLORA__X
#define QLORA__X(required, type, field, symbol, args)                                              \
    {symbol, offsetof(qlora__cublas_table, field), required},
static const qlora__symbol qlora__cublas_symbols[] = {QLORA__CUBLAS_SYMBOLS(QLORA__X)};
#undef QLORA__X

// Opens the first library of a list, or the one the caller named.
static void* qlora__library_first(const char* path, const char* const* names, size_t count, char* why,
                                  size_t size) {
    if (path != NULL) {
        return qlora__library_open(path, why, size);
    }
    char first[256] = "";
    for (size_t i = 0; i < count; i++) {
        void* library = qlora__library_open(names[i], why, size);
        if (library != NULL) {
            return library;
        }
        if (i == 0) {
            snprintf(first, sizeof first, "%s", why);
        }
    }
    snprintf(why, size, "%s", first); // the usual name is the one people know
    return NULL;
}

// These leave the CUDA context unusable: cuda.h says so of each.
static bool qlora__cu_is_sticky(int code) {
    static const int codes[] = {214, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 999};
    for (size_t i = 0; i < sizeof codes / sizeof codes[0]; i++) {
        if (codes[i] == code) {
            return true;
        }
    }
    return false;
}

static const char* qlora__cu_name(const qlora__gpu* gpu, int code) {
    const char* name = NULL;
    if (gpu->cu.GetErrorName == NULL || gpu->cu.GetErrorName(code, &name) != 0 || name == NULL) {
        return "unknown CUDA error";
    }
    return name;
}

static void qlora__device_lost(qlora_ctx* ctx, const char* why) {
    snprintf(ctx->dead, sizeof ctx->dead, "%s", why);
    QLORA__LOG(ctx, ERROR, DEVICE_LOST, "%s", why);
}

// Turns a driver's code into a result and a text. what names the call and its size.
static qlora_result qlora__cu(qlora_ctx* ctx, int code, const char* what) {
    if (code == 0) {
        return QLORA_OK;
    }
    const char* name = qlora__cu_name(ctx->gpu, code);
    if (ctx->capture != NULL && ctx->capture->broke[0] == '\0') {
        snprintf(ctx->capture->broke, sizeof ctx->capture->broke, "%s failed with %s", what, name);
    }
    if (qlora__cu_is_sticky(code)) {
        char why[256];
        snprintf(why, sizeof why, "%s (%d), seen at %s", name, code, what);
        qlora__device_lost(ctx, why);
        return qlora__fail(ctx, QLORA_ERR_DEVICE_LOST,
                           "a kernel launched earlier failed: %s; the CUDA context is unusable, "
                           "destroy this context (QLORA_DEBUG finds the kernel)",
                           why);
    }
    if (code == 2) {
        size_t free_bytes = 0;
        size_t total = 0;
        ctx->gpu->cu.MemGetInfo(&free_bytes, &total);
        return qlora__fail(ctx, QLORA_ERR_DEVICE_MEMORY, "%s failed: %s (2), %.2f GiB of %.2f are free",
                           what, name, (double)free_bytes / 1073741824.0, (double)total / 1073741824.0);
    }
    qlora_result result = code >= 900 && code <= 908 ? QLORA_ERR_CAPTURE : QLORA_ERR_CUDA;
    return qlora__fail(ctx, result, "%s failed: %s (%d)", what, name, code);
}

static const char* qlora__cublas_name(int status) {
    switch (status) {
    case 1:
        return "CUBLAS_STATUS_NOT_INITIALIZED";
    case 3:
        return "CUBLAS_STATUS_ALLOC_FAILED";
    case 7:
        return "CUBLAS_STATUS_INVALID_VALUE";
    case 8:
        return "CUBLAS_STATUS_ARCH_MISMATCH";
    case 11:
        return "CUBLAS_STATUS_MAPPING_ERROR";
    case 13:
        return "CUBLAS_STATUS_EXECUTION_FAILED";
    case 14:
        return "CUBLAS_STATUS_INTERNAL_ERROR";
    case 15:
        return "CUBLAS_STATUS_NOT_SUPPORTED";
    default:
        return "cuBLAS error";
    }
}

static qlora_result qlora__blas(qlora_ctx* ctx, int status, const char* what) {
    if (status == 0) {
        return QLORA_OK;
    }
    if (ctx->capture != NULL && ctx->capture->broke[0] == '\0') {
        snprintf(ctx->capture->broke, sizeof ctx->capture->broke, "%s failed with %s", what,
                 qlora__cublas_name(status));
    }
    return qlora__fail(ctx, QLORA_ERR_CUBLAS, "%s failed: %s (%d)", what, qlora__cublas_name(status),
                       status);
}

// ---- which PTX a device and a driver take ------------------------------------------------------------

// A plain target, and the lowest PTX version that knows it.
typedef struct qlora__target {
    int number;
    int version;
} qlora__target;

static const qlora__target qlora__targets[] = {{75, 63},  {80, 70},  {86, 71},  {87, 74},
                                               {88, 90},  {89, 78},  {90, 78},  {100, 86},
                                               {103, 88}, {110, 90}, {120, 87}, {121, 88}};

// Highest PTX version of a driver, from the table in NVIDIA's PTX manual.
static int qlora__ptx_version_of_driver(int driver) {
    static const int table[][2] = {{13000, 90}, {12090, 88}, {12080, 87}, {12070, 86}, {12050, 85},
                                   {12040, 84}, {12030, 83}, {12020, 82}, {12010, 81}, {12000, 80},
                                   {11080, 78}, {11070, 77}, {11060, 76}, {11050, 75}, {11040, 74},
                                   {11030, 73}, {11020, 72}, {11010, 71}, {11000, 70}, {10020, 65},
                                   {10010, 64}, {10000, 63}};
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        if (driver >= table[i][0]) {
            return table[i][1];
        }
    }
    return 0;
}

static int qlora__target_version(int number) {
    for (size_t i = 0; i < sizeof qlora__targets / sizeof qlora__targets[0]; i++) {
        if (qlora__targets[i].number == number) {
            return qlora__targets[i].version;
        }
    }
    return 0;
}

// F-PTX-001: the device's own target; for a device this file does not know, or a driver too old for the
// device's own, the highest plain target that both take. 0 when there is none.
static int qlora__target_choose(int capability, int ptx_version) {
    int best = 0;
    for (size_t i = 0; i < sizeof qlora__targets / sizeof qlora__targets[0]; i++) {
        const qlora__target* t = &qlora__targets[i];
        if (t->number <= capability && t->version <= ptx_version && t->number > best) {
            best = t->number;
        }
    }
    return best;
}

// ---- bringing a device up and down ---------------------------------------------------------------------

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
    void* library = qlora__library_first(ctx->desc.cuda_library, names, sizeof names / sizeof names[0],
                                         why, sizeof why);
    if (library == NULL) {
        return qlora__fail(ctx, QLORA_ERR_BACKEND, "no CUDA driver: %s", why);
    }
    if (!qlora__symbols_load(library, qlora__cuda_symbols,
                             sizeof qlora__cuda_symbols / sizeof qlora__cuda_symbols[0],
                             &ctx->gpu->cu, why, sizeof why)) {
        return qlora__fail(ctx, QLORA_ERR_BACKEND,
                           "the CUDA driver is too old or not a driver, it lacks %s", why);
    }
    int code = ctx->gpu->cu.Init(0);
    if (code == 34) {
        return qlora__fail(ctx, QLORA_ERR_BACKEND,
                           "libcuda is the toolkit's stub, not a driver (34); put the real libcuda.so.1 "
                           "first or set desc.cuda_library");
    }
    if (code == 100) {
        return qlora__fail(ctx, QLORA_ERR_BACKEND, "no CUDA device (CUDA_ERROR_NO_DEVICE)");
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
        return qlora__fail(ctx, QLORA_ERR_BACKEND, "there is no CUDA device %d; the driver shows %d",
                           (int)ctx->desc.device, count);
    }
    return qlora__cu(ctx, gpu->cu.DeviceGet(&gpu->device, ctx->desc.device), "cuDeviceGet");
}

static qlora_result qlora__gpu_read_facts(qlora_ctx* ctx) {
    qlora__gpu* gpu = ctx->gpu;
    int major = 0;
    int minor = 0;
    QLORA__TRY(qlora__cu(ctx, gpu->cu.DriverGetVersion(&gpu->driver_version), "cuDriverGetVersion"));
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
                  {&gpu->max_shared, QLORA__CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN}};
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++) {
        int code = gpu->cu.DeviceGetAttribute(wanted[i].out, wanted[i].attribute, gpu->device);
        QLORA__TRY(qlora__cu(ctx, code, "cuDeviceGetAttribute"));
    }
    gpu->capability = major * 10 + minor;
    gpu->ptx_version = qlora__ptx_version_of_driver(gpu->driver_version);
    if (gpu->capability < 75) {
        return qlora__fail(ctx, QLORA_ERR_BACKEND,
                           "%s has compute capability %d.%d; 7.5 or newer is needed", gpu->device_name,
                           major, minor);
    }
    gpu->target_number = qlora__target_choose(gpu->capability, gpu->ptx_version);
    if (gpu->target_number == 0) {
        return qlora__fail(ctx, QLORA_ERR_BACKEND,
                           "the driver (CUDA %d.%d) is too old for our kernels; 10.0 or newer is needed",
                           gpu->driver_version / 1000, gpu->driver_version % 1000 / 10);
    }
    snprintf(gpu->target, sizeof gpu->target, "sm_%d", gpu->target_number);
    return QLORA_OK;
}

// The handle's stream, workspace and modes; again after whatever could have changed them (C-STREAM).
// cublasSetStream resets the workspace, so that comes second.
static QLORA__UNUSED qlora_result qlora__cublas_bind(qlora_ctx* ctx) {
    qlora__gpu* gpu = ctx->gpu;
    if (gpu->cublas_bound && !gpu->cublas_exposed) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__blas(ctx, gpu->blas.SetStream(gpu->cublas, gpu->stream), "cublasSetStream"));
    QLORA__TRY(qlora__blas(
        ctx, gpu->blas.SetWorkspace(gpu->cublas, gpu->workspace, ctx->desc.workspace_bytes),
        "cublasSetWorkspace"));
    int mode = QLORA__CUBLAS_DEFAULT_MATH | QLORA__CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
    QLORA__TRY(qlora__blas(ctx, gpu->blas.SetMathMode(gpu->cublas, mode), "cublasSetMathMode"));
    QLORA__TRY(qlora__blas(
        ctx, gpu->blas.SetPointerMode(gpu->cublas, QLORA__CUBLAS_POINTER_MODE_HOST),
        "cublasSetPointerMode"));
    gpu->cublas_bound = true;
    return QLORA_OK;
}

// Without cuBLAS our own PTX does the products; why it is missing is kept for qlora_describe.
static bool qlora__cublas_open(qlora_ctx* ctx) {
    qlora__gpu* gpu = ctx->gpu;
#define QLORA__X(name) name,
    static const char* const names[] = {QLORA__CUBLAS_NAMES(QLORA__X)};
#undef QLORA__X
    if (ctx->desc.cublas_library != NULL && strcmp(ctx->desc.cublas_library, "none") == 0) {
        snprintf(gpu->cublas_note, sizeof gpu->cublas_note, "not wanted (desc.cublas_library is none)");
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
                             sizeof qlora__cublas_symbols / sizeof qlora__cublas_symbols[0], &gpu->blas,
                             why, sizeof why)) {
        snprintf(gpu->cublas_note, sizeof gpu->cublas_note, "too old or broken, it lacks %.200s", why);
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
                        "desc.device_allocator gave no memory for %llu bytes",
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

#else // QLORA_NO_CUDA

static void* qlora__device_alloc(qlora_ctx* ctx, size_t bytes) {
    (void)bytes;
    qlora__fail(ctx, QLORA_ERR_BACKEND, "built with QLORA_NO_CUDA");
    return NULL;
}

static void qlora__device_free(qlora_ctx* ctx, void* data, size_t bytes) {
    (void)ctx;
    (void)data;
    (void)bytes;
}

#endif // QLORA_NO_CUDA

//@@ TENSOR     - memory, tensors, copies and fills on the context's stream

struct qlora_graph {
    qlora_ctx* owner;
    qlora_graph* next;
    uint64_t key;
    uint64_t replays;
    size_t nodes;
    uint64_t* buffers; // ids of our buffers that it uses
    size_t buffer_count;
    size_t buffer_capacity;
    void* exec; // CUgraphExec
    qlora_graph_fn fn;
    void* user;
    char invalid[128]; // why it cannot be replayed; "" while it can
};

// buffer_id 0: all of them.
static void qlora__graphs_invalidate(qlora_ctx* ctx, uint64_t buffer_id, const char* why) {
    for (qlora_graph* g = ctx->graphs; g != NULL; g = g->next) {
        bool hit = buffer_id == 0;
        for (size_t i = 0; i < g->buffer_count && !hit; i++) {
            hit = g->buffers[i] == buffer_id;
        }
        if (hit && g->invalid[0] == '\0') {
            snprintf(g->invalid, sizeof g->invalid, "%s", why);
            QLORA__LOG(ctx, INFO, GRAPH, "graph %llu is no longer valid: %s",
                       (unsigned long long)g->key, why);
        }
    }
}

static qlora_result qlora__buffer_create(qlora_ctx* ctx, size_t bytes, qlora__buffer** out) {
    QLORA__TRY(qlora__not_in_capture(ctx, "allocating memory"));
    qlora__buffer* b = (qlora__buffer*)qlora__alloc_zero(ctx, sizeof *b);
    if (b == NULL) {
        return QLORA_ERR_MEMORY;
    }
    b->bytes = bytes > 0 ? bytes : 1;
    b->data = qlora__on_cpu(ctx) ? qlora__alloc(ctx, b->bytes) : qlora__device_alloc(ctx, b->bytes);
    if (b->data == NULL) {
        qlora__free(ctx, b, sizeof *b);
        if (ctx->dead[0] != '\0') {
            return QLORA_ERR_DEVICE_LOST;
        }
        return qlora__on_cpu(ctx) ? QLORA_ERR_MEMORY : QLORA_ERR_DEVICE_MEMORY;
    }
    if (!qlora__on_cpu(ctx)) {
        ctx->device_bytes += b->bytes;
        ctx->device_allocations++;
        if (ctx->device_bytes > ctx->device_peak) {
            ctx->device_peak = ctx->device_bytes;
        }
    }
    b->id = ++ctx->next_buffer_id;
    b->next = ctx->buffers;
    ctx->buffers = b;
    *out = b;
    return QLORA_OK;
}

static void qlora__buffer_destroy(qlora_ctx* ctx, qlora__buffer* buffer) {
    if (buffer == NULL) {
        return;
    }
    qlora__buffer** link = &ctx->buffers;
    while (*link != buffer) {
        link = &(*link)->next;
    }
    *link = buffer->next;
    qlora__graphs_invalidate(ctx, buffer->id, "a buffer that it uses was freed");
    if (qlora__on_cpu(ctx)) {
        qlora__free(ctx, buffer->data, buffer->bytes);
    } else {
        qlora__device_free(ctx, buffer->data, buffer->bytes);
        ctx->device_bytes -= buffer->bytes;
    }
    qlora__free(ctx, buffer, sizeof *buffer);
}

// ---- copies and fills on the context's stream ------------------------------------------------------

#ifndef QLORA_NO_CUDA

static qlora_result qlora__sync(qlora_ctx* ctx) {
    if (qlora__on_cpu(ctx)) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__not_in_capture(ctx, "waiting for the device"));
    return qlora__cu(ctx, ctx->gpu->cu.StreamSynchronize(ctx->gpu->stream), "cuStreamSynchronize");
}

static qlora_result qlora__copy_in(qlora_ctx* ctx, void* target, const void* source, size_t bytes) {
    if (bytes == 0) {
        return QLORA_OK;
    }
    if (qlora__on_cpu(ctx)) {
        memcpy(target, source, bytes);
        return QLORA_OK;
    }
    QLORA__TRY(qlora__not_in_capture(ctx, "copying from host memory"));
    int code = ctx->gpu->cu.MemcpyHtoDAsync((qlora__CUdeviceptr)(uintptr_t)target, source, bytes,
                                            ctx->gpu->stream);
    QLORA__TRY(qlora__cu(ctx, code, "cuMemcpyHtoDAsync"));
    return qlora__sync(ctx); // the caller may change source at once
}

static qlora_result qlora__copy_out(qlora_ctx* ctx, void* target, const void* source, size_t bytes) {
    if (bytes == 0) {
        return QLORA_OK;
    }
    if (qlora__on_cpu(ctx)) {
        memcpy(target, source, bytes);
        return QLORA_OK;
    }
    QLORA__TRY(qlora__not_in_capture(ctx, "copying to host memory"));
    int code = ctx->gpu->cu.MemcpyDtoHAsync(target, (qlora__CUdeviceptr)(uintptr_t)source, bytes,
                                            ctx->gpu->stream);
    QLORA__TRY(qlora__cu(ctx, code, "cuMemcpyDtoHAsync"));
    return qlora__sync(ctx);
}

// Zeroes height rows of width bytes, pitch bytes apart.
static qlora_result qlora__zero(qlora_ctx* ctx, void* data, size_t pitch, size_t width, size_t height) {
    if (width == 0 || height == 0) {
        return QLORA_OK;
    }
    if (qlora__on_cpu(ctx)) {
        for (size_t i = 0; i < height; i++) {
            memset((char*)data + i * pitch, 0, width);
        }
        return QLORA_OK;
    }
    qlora__CUdeviceptr address = (qlora__CUdeviceptr)(uintptr_t)data;
    if (pitch == width || height == 1) {
        int code = ctx->gpu->cu.MemsetD8Async(address, 0, width * height, ctx->gpu->stream);
        return qlora__cu(ctx, code, "cuMemsetD8Async");
    }
    int code = ctx->gpu->cu.MemsetD2D8Async(address, pitch, 0, width, height, ctx->gpu->stream);
    return qlora__cu(ctx, code, "cuMemsetD2D8Async");
}

#else

static qlora_result qlora__sync(qlora_ctx* ctx) {
    (void)ctx;
    return QLORA_OK;
}

static qlora_result qlora__copy_in(qlora_ctx* ctx, void* target, const void* source, size_t bytes) {
    (void)ctx;
    if (bytes > 0) {
        memcpy(target, source, bytes);
    }
    return QLORA_OK;
}

static qlora_result qlora__copy_out(qlora_ctx* ctx, void* target, const void* source, size_t bytes) {
    return qlora__copy_in(ctx, target, source, bytes);
}

static qlora_result qlora__zero(qlora_ctx* ctx, void* data, size_t pitch, size_t width, size_t height) {
    (void)ctx;
    for (size_t i = 0; i < height && width > 0; i++) {
        memset((char*)data + i * pitch, 0, width);
    }
    return QLORA_OK;
}

#endif

qlora_result qlora_ctx_sync(qlora_ctx* ctx) {
    QLORA__ENTER(ctx, "qlora_ctx_sync");
    return qlora__leave(ctx, qlora__sync(ctx));
}

// ---- tensors --------------------------------------------------------------------------------------

static qlora_result qlora__tensor_shape(qlora_ctx* ctx, qlora_dtype dtype, int64_t batch, int64_t rows,
                                        int64_t cols, int64_t ld, qlora_tensor* out) {
    memset(out, 0, sizeof *out);
    out->dtype = dtype;
    out->rows = rows;
    out->cols = cols;
    out->ld = ld;
    out->batch = batch;
    out->owner = ctx;
    if ((int)dtype < 0 || dtype > QLORA_U8) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "unknown dtype %d", (int)dtype);
    }
    if (batch < 0 || rows < 0 || cols < 0 || ld < cols) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "%lld x %lld with ld %lld, batch %lld: sizes may not be negative and ld not "
                           "below the columns",
                           (long long)rows, (long long)cols, (long long)ld, (long long)batch);
    }
    size_t matrix = 0;
    size_t all = 0;
    size_t bytes = 0;
    if (!qlora__mul((size_t)rows, (size_t)ld, &matrix) ||
        !qlora__mul(matrix, (size_t)batch, &all) ||
        !qlora__mul(all, qlora_dtype_bytes(dtype), &bytes) || bytes > (size_t)INT64_MAX) {
        return qlora__fail(ctx, QLORA_ERR_LIMIT, "%lld x %lld x %lld elements overflow",
                           (long long)batch, (long long)rows, (long long)ld);
    }
    out->batch_stride = (int64_t)matrix;
    out->bytes = bytes;
    return QLORA_OK;
}

static qlora_result qlora__tensor_create(qlora_ctx* ctx, qlora_dtype dtype, int64_t batch,
                                         int64_t rows, int64_t cols, qlora_tensor* out) {
    if (out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    qlora_tensor t;
    QLORA__TRY(qlora__tensor_shape(ctx, dtype, batch, rows, cols, cols, &t));
    qlora__buffer* buffer = NULL;
    QLORA__TRY(qlora__buffer_create(ctx, t.bytes, &buffer));
    t.data = buffer->data;
    ctx->children++;
    *out = t;
    return QLORA_OK;
}

qlora_result qlora_tensor_create(qlora_ctx* ctx, qlora_dtype dtype, int64_t rows, int64_t cols,
                                 qlora_tensor* out) {
    QLORA__ENTER(ctx, "qlora_tensor_create");
    return qlora__leave(ctx, qlora__tensor_create(ctx, dtype, 1, rows, cols, out));
}

qlora_result qlora_tensor_create_batched(qlora_ctx* ctx, qlora_dtype dtype, int64_t batch, int64_t rows,
                                         int64_t cols, qlora_tensor* out) {
    QLORA__ENTER(ctx, "qlora_tensor_create_batched");
    return qlora__leave(ctx, qlora__tensor_create(ctx, dtype, batch, rows, cols, out));
}

// Destroying works on a dead device, too: what is left there goes with its CUDA context.
static qlora_result qlora__enter_destroy(qlora_ctx* ctx, const char* call) {
    if (ctx == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    if (ctx->depth == 0) {
        ctx->call = call;
        ctx->error[0] = '\0';
        if (ctx->activate != NULL) {
            qlora_result ignored = ctx->activate(ctx);
            (void)ignored;
            ctx->error[0] = '\0';
        }
    }
    ctx->scratch_marks[ctx->depth++] = ctx->scratch_used;
    return QLORA_OK;
}

static qlora_result qlora__tensor_destroy(qlora_ctx* ctx, qlora_tensor* tensor) {
    if (tensor == NULL || tensor->data == NULL) {
        return QLORA_OK;
    }
    if (tensor->owner != ctx) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "the tensor belongs to another context");
    }
    QLORA__TRY(qlora__not_in_capture(ctx, "freeing memory"));
    qlora__buffer* b = ctx->buffers;
    while (b != NULL && b->data != tensor->data) {
        b = b->next;
    }
    if (b == NULL || b == ctx->scratch) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "not made by qlora_tensor_create, or destroyed already; views and wrapped "
                           "tensors are not destroyed");
    }
    qlora__buffer_destroy(ctx, b);
    ctx->children--;
    memset(tensor, 0, sizeof *tensor);
    return QLORA_OK;
}

qlora_result qlora_tensor_destroy(qlora_ctx* ctx, qlora_tensor* tensor) {
    QLORA__TRY(qlora__enter_destroy(ctx, "qlora_tensor_destroy"));
    return qlora__leave(ctx, qlora__tensor_destroy(ctx, tensor));
}

static qlora_result qlora__tensor_wrap(qlora_ctx* ctx, void* data, size_t bytes, qlora_dtype dtype,
                                       int64_t rows, int64_t cols, int64_t ld, qlora_tensor* out) {
    if (out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    qlora_tensor t;
    QLORA__TRY(qlora__tensor_shape(ctx, dtype, 1, rows, cols, ld == 0 ? cols : ld, &t));
    t.data = data;
    t.bytes = bytes;
    size_t needed = 0;
    if (!qlora__tensor_bytes(&t, &needed) || needed > bytes || (data == NULL && needed > 0)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%lld x %lld %s needs %llu bytes, the buffer has %llu",
                           (long long)rows, (long long)cols, qlora_dtype_name(dtype),
                           (unsigned long long)needed, (unsigned long long)(data == NULL ? 0 : bytes));
    }
    if ((uintptr_t)data % qlora_dtype_bytes(dtype) != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "the buffer is not aligned for %s",
                           qlora_dtype_name(dtype));
    }
    *out = t;
    return QLORA_OK;
}

qlora_result qlora_tensor_wrap(qlora_ctx* ctx, void* data, size_t bytes, qlora_dtype dtype,
                               int64_t rows, int64_t cols, int64_t ld, qlora_tensor* out) {
    QLORA__ENTER(ctx, "qlora_tensor_wrap");
    return qlora__leave(ctx, qlora__tensor_wrap(ctx, data, bytes, dtype, rows, cols, ld, out));
}

static qlora_result qlora__tensor_view(qlora_ctx* ctx, const qlora_tensor* t, int64_t row, int64_t rows,
                                       int64_t col, int64_t cols, qlora_tensor* out) {
    if (out == NULL || t->batch != 1 || row < 0 || rows < 0 || col < 0 || cols < 0 ||
        row > t->rows - rows || col > t->cols - cols) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "rows %lld+%lld, columns %lld+%lld do not lie inside %lld x %lld (batch 1)",
                           (long long)row, (long long)rows, (long long)col, (long long)cols,
                           (long long)t->rows, (long long)t->cols);
    }
    size_t offset = ((size_t)row * (size_t)t->ld + (size_t)col) * qlora_dtype_bytes(t->dtype);
    qlora_tensor v = *t;
    v.rows = rows;
    v.cols = cols;
    v.bytes = t->bytes > offset ? t->bytes - offset : 0;
    v.data = v.bytes > 0 ? (char*)t->data + offset : t->data; // an empty view at the very end
    *out = v;
    return QLORA_OK;
}

qlora_result qlora_tensor_view(const qlora_tensor* tensor, int64_t row, int64_t rows, int64_t col,
                               int64_t cols, qlora_tensor* out) {
    qlora_ctx* ctx = tensor != NULL ? tensor->owner : NULL;
    QLORA__ENTER(ctx, "qlora_tensor_view");
    return qlora__leave(ctx, qlora__tensor_view(ctx, tensor, row, rows, col, cols, out));
}

static qlora_result qlora__tensor_copy_check(qlora_ctx* ctx, const qlora_tensor* t, const void* host,
                                             size_t bytes) {
    QLORA__TRY(qlora__need_batch(ctx, t, "the tensor", ~0u, -1, -1, -1));
    size_t whole = 0;
    qlora__tensor_bytes(t, &whole);
    bool contiguous = (t->rows <= 1 || t->ld == t->cols) &&
                      (t->batch <= 1 || t->batch_stride == t->rows * t->cols);
    if (!contiguous) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "the tensor's rows do not follow each other (ld %lld, %lld columns)",
                           (long long)t->ld, (long long)t->cols);
    }
    if (bytes != whole || (host == NULL && bytes > 0)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "the tensor has %llu bytes, %llu were given",
                           (unsigned long long)whole, (unsigned long long)(host == NULL ? 0 : bytes));
    }
    return QLORA_OK;
}

static qlora_result qlora__tensor_upload(qlora_ctx* ctx, const qlora_tensor* t, const void* source,
                                         size_t bytes) {
    QLORA__TRY(qlora__tensor_copy_check(ctx, t, source, bytes));
    return qlora__copy_in(ctx, t->data, source, bytes);
}

qlora_result qlora_tensor_upload(qlora_ctx* ctx, const qlora_tensor* tensor, const void* source,
                                 size_t bytes) {
    QLORA__ENTER(ctx, "qlora_tensor_upload");
    return qlora__leave(ctx, qlora__tensor_upload(ctx, tensor, source, bytes));
}

static qlora_result qlora__tensor_download(qlora_ctx* ctx, const qlora_tensor* t, void* target,
                                           size_t bytes) {
    QLORA__TRY(qlora__tensor_copy_check(ctx, t, target, bytes));
    return qlora__copy_out(ctx, target, t->data, bytes);
}

qlora_result qlora_tensor_download(qlora_ctx* ctx, const qlora_tensor* tensor, void* target,
                                   size_t bytes) {
    QLORA__ENTER(ctx, "qlora_tensor_download");
    return qlora__leave(ctx, qlora__tensor_download(ctx, tensor, target, bytes));
}

static qlora_result qlora__tensor_zero(qlora_ctx* ctx, const qlora_tensor* t) {
    QLORA__TRY(qlora__need_batch(ctx, t, "the tensor", ~0u, -1, -1, -1));
    size_t size = qlora_dtype_bytes(t->dtype);
    for (int64_t i = 0; i < t->batch; i++) {
        char* matrix = (char*)t->data + (size_t)i * (size_t)t->batch_stride * size;
        QLORA__TRY(qlora__zero(ctx, matrix, (size_t)t->ld * size, (size_t)t->cols * size,
                               (size_t)t->rows));
    }
    return QLORA_OK;
}

qlora_result qlora_tensor_zero(qlora_ctx* ctx, const qlora_tensor* tensor) {
    QLORA__ENTER(ctx, "qlora_tensor_zero");
    return qlora__leave(ctx, qlora__tensor_zero(ctx, tensor));
}

//@@ CACHE      - kernel registry, PTX for a target, modules, seal, launch

// clang-format off
// What a model must have for a kernel to be needed: all conditions of the mask together.
#define QLORA__NEED_ALWAYS 0u
#define QLORA__NEED_GEMM   1u // no cuBLAS is bound
#define QLORA__NEED_BF16   2u // computes in bf16
#define QLORA__NEED_F32    4u // computes in f32
#define QLORA__NEED_NF4    8u // has an NF4 base
#define QLORA__NEED_LORA  16u // trains adapters
#define QLORA__NEED_GEMM16 (QLORA__NEED_GEMM | QLORA__NEED_BF16)

// The one registry (C-KEY): name (the entry point is "qlora_" name), module (kernels/MODULE.cu), most
// dynamic shared memory, need. Pre-warm, launch and tests all walk it. Shapes are run-time parameters.
#define QLORA__KERNELS(X)                                                                            \
    QLORA__KERNELS_RUNTIME(X)                                                                        \
    QLORA__KERNELS_OPS(X)

#define QLORA__KERNELS_RUNTIME(X)                                                                    \
    X(gemm_big_f32, gemm, 0, GEMM)                                                                   \
    X(gemm_big_half, gemm, 0, GEMM)                                                                  \
    X(gemm_mid_f32, gemm, 0, GEMM)                                                                   \
    X(gemm_mid_half, gemm, 0, GEMM)                                                                  \
    X(gemm_skinny_f32, gemm, 0, GEMM)                                                                \
    X(gemm_skinny_half, gemm, 0, GEMM)                                                               \
    X(gemm_tc_bf16_nn, gemm_tc, 0, GEMM16)                                                           \
    X(gemm_tc_bf16_nt, gemm_tc, 0, GEMM16)                                                           \
    X(gemm_tc_bf16_tn, gemm_tc, 0, GEMM16)                                                           \
    X(gemm_tc_f16_nn, gemm_tc, 0, GEMM16)                                                            \
    X(gemm_tc_f16_nt, gemm_tc, 0, GEMM16)                                                            \
    X(gemm_tc_f16_tn, gemm_tc, 0, GEMM16)                                                            \
    X(cast_f32_bf16, cast, 0, ALWAYS)                                                                \
    X(cast_f32_f16, cast, 0, ALWAYS)                                                                 \
    X(cast_bf16_f32, cast, 0, ALWAYS)                                                                \
    X(cast_f16_f32, cast, 0, ALWAYS)                                                                 \
    X(cast_bf16_f16, cast, 0, ALWAYS)                                                                \
    X(cast_f16_bf16, cast, 0, ALWAYS)                                                                \
    X(cast_absmax_f32, cast, 0, ALWAYS)                                                              \
    X(cast_scale, cast, 0, ALWAYS)                                                                   \
    X(clip_squares, clip, 0, ALWAYS)                                                                 \
    X(clip_scale, clip, 0, ALWAYS)                                                                   \
    X(clip_apply, clip, 0, ALWAYS)

#define QLORA__KERNELS_OPS(X)                                                                        \
    X(elementwise_silu_f32, elementwise, 0, F32)                                                     \
    X(elementwise_silu_bf16, elementwise, 0, BF16)                                                   \
    X(elementwise_silu_bwd_f32, elementwise, 0, F32)                                                 \
    X(elementwise_silu_bwd_bf16, elementwise, 0, BF16)                                               \
    X(elementwise_swiglu_f32, elementwise, 0, F32)                                                   \
    X(elementwise_swiglu_bf16, elementwise, 0, BF16)                                                 \
    X(elementwise_swiglu_bwd_f32, elementwise, 0, F32)                                               \
    X(elementwise_swiglu_bwd_bf16, elementwise, 0, BF16)                                             \
    X(elementwise_mul_f32, elementwise, 0, F32)                                                      \
    X(elementwise_mul_bf16, elementwise, 0, BF16)                                                    \
    X(elementwise_add_f32, elementwise, 0, ALWAYS)                                                   \
    X(elementwise_add_bf16, elementwise, 0, BF16)                                                    \
    X(elementwise_scale_f32, elementwise, 0, ALWAYS)                                                 \
    X(elementwise_scale_bf16, elementwise, 0, BF16)                                                  \
    X(elementwise_fill_f32, elementwise, 0, ALWAYS)                                                  \
    X(elementwise_fill_bf16, elementwise, 0, BF16)                                                   \
    X(elementwise_gather_f32_f32, elementwise, 0, F32)                                               \
    X(elementwise_gather_f32_bf16, elementwise, 0, BF16)                                             \
    X(elementwise_gather_bf16_f32, elementwise, 0, F32)                                              \
    X(elementwise_gather_bf16_bf16, elementwise, 0, BF16)                                            \
    X(elementwise_gather_f16_f32, elementwise, 0, F32)                                               \
    X(elementwise_gather_f16_bf16, elementwise, 0, BF16)                                             \
    X(norm_rms_fwd_f32, norm, 0, F32)                                                                \
    X(norm_rms_fwd_bf16, norm, 0, BF16)                                                              \
    X(norm_rms_bwd_f32, norm, 0, F32)                                                                \
    X(norm_rms_bwd_bf16, norm, 0, BF16)                                                              \
    X(norm_rms_dw_f32, norm, 0, F32)                                                                 \
    X(norm_rms_dw_bf16, norm, 0, BF16)                                                               \
    X(norm_rms_dw_sum, norm, 0, ALWAYS)                                                              \
    X(rope_f32, rope, 0, F32)                                                                        \
    X(rope_bf16, rope, 0, BF16)                                                                      \
    X(softmax_copy_b16, softmax, 0, ALWAYS)                                                          \
    X(softmax_copy_b32, softmax, 0, ALWAYS)                                                          \
    X(softmax_transpose_b16, softmax, 0, ALWAYS)                                                     \
    X(softmax_transpose_b32, softmax, 0, ALWAYS)                                                     \
    X(softmax_scores_f32, softmax, 0, F32)                                                           \
    X(softmax_scores_bf16, softmax, 0, BF16)                                                         \
    X(softmax_fwd_f32, softmax, 0, F32)                                                              \
    X(softmax_fwd_bf16, softmax, 0, BF16)                                                            \
    X(softmax_bwd_f32, softmax, 0, F32)                                                              \
    X(softmax_bwd_bf16, softmax, 0, BF16)                                                            \
    X(loss_cross_entropy_f32, loss, 0, F32)                                                          \
    X(loss_cross_entropy_bf16, loss, 0, BF16)                                                        \
    X(loss_sum, loss, 0, ALWAYS)                                                                     \
    X(loss_arg_max_f32, loss, 0, F32)                                                                \
    X(loss_arg_max_bf16, loss, 0, BF16)                                                              \
    X(optim_advance, optim, 0, LORA)                                                                 \
    X(optim_adamw_f32, optim, 0, LORA)                                                               \
    X(optim_adamw_bf16, optim, 0, LORA)                                                              \
    X(optim_shadow_f32, optim, 0, LORA)                                                              \
    X(optim_shadow_bf16, optim, 0, LORA)                                                             \
    X(dropout_f32, dropout, 0, LORA)                                                                 \
    X(dropout_bf16, dropout, 0, LORA)

// clang-format on

#define QLORA__X(name, module, shared, need) QLORA__K_##name,
typedef enum qlora__kernel_id { QLORA__KERNELS(QLORA__X) QLORA__K_COUNT } qlora__kernel_id;
#undef QLORA__X

typedef struct qlora__kernel_row {
    const char* name;
    const char* module;
    uint32_t shared;
    uint32_t need;
} qlora__kernel_row;

#define QLORA__X(name, module, shared, need) {#name, #module, shared, QLORA__NEED_##need},
static const qlora__kernel_row qlora__kernel_rows[] = {QLORA__KERNELS(QLORA__X)};
#undef QLORA__X

struct qlora_kernel {
    qlora_ctx* owner;
    const char* key;
    void* function; // CUfunction, NULL until its module is loaded
    uint32_t shared_allowed;
    // The caller's own kernels only:
    qlora_kernel* next;
    void* module;
    uint64_t text_hash;
    size_t block; // bytes of this struct and its key
};

const char* qlora_kernel_name(size_t index) {
    return index < QLORA__K_COUNT ? qlora__kernel_rows[index].name : NULL;
}

// Everything that names a kernel on the CPU ends here.
static qlora_result qlora__no_kernels(qlora_ctx* ctx) {
    return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                       "kernels need CUDA, and this context runs on the CPU (%s)", ctx->reason);
}

#ifndef QLORA_NO_CUDA

#ifndef QLORA_KERNELS_HEADER
#define QLORA_KERNELS_HEADER "kernels_ptx.h"
#endif
#include QLORA_KERNELS_HEADER

#if QLORA__KERNEL_ABI != 1
#error "kernels_ptx.h does not fit this qlora.h (kernel ABI 1 is needed); take both from one release"
#endif

#define QLORA__PLANNED_MAX 256

typedef struct qlora__module {
    const char* name; // as in the registry
    void* handle;
    struct qlora__module* next;
} qlora__module;

struct qlora__cache {
    qlora_kernel kernels[QLORA__K_COUNT];
    qlora_kernel* extra; // the caller's own
    qlora__module* modules;
    qlora_cache_info info;
    uint64_t planned[QLORA__PLANNED_MAX]; // hashes of the cuBLAS shapes that pre-warm ran
};

static uint64_t qlora__hash(const void* data, size_t bytes, uint64_t seed) {
    const uint8_t* p = (const uint8_t*)data;
    uint64_t h = seed ^ 0xcbf29ce484222325ull;
    for (size_t i = 0; i < bytes; i++) {
        h = (h ^ p[i]) * 0x100000001b3ull;
    }
    return h;
}

// ---- PTX for a target -----------------------------------------------------------------------------

// The text of a module that fits the device best: the highest target not above ours.
static const qlora__ptx_text* qlora__ptx_choose(const qlora__gpu* gpu, const char* module) {
    const qlora__ptx_text* best = NULL;
    for (size_t i = 0; i < QLORA__PTX_TEXT_COUNT; i++) {
        const qlora__ptx_text* t = &qlora__ptx_texts[i];
        // A text with a suffix (90a) runs on exactly that capability.
        bool fits = t->suffix != '\0' ? t->target == gpu->capability && t->target == gpu->target_number
                                      : t->target <= gpu->target_number;
        if (strcmp(t->module, module) == 0 && fits && t->version <= gpu->ptx_version &&
            (best == NULL || t->target > best->target ||
             (t->target == best->target && t->suffix > best->suffix))) {
            best = t;
        }
    }
    return best;
}

// Joins header and chunks of a text for the device's own target (F-PTX-001). The caller frees *out,
// *bytes long.
static qlora_result qlora__ptx_join(qlora_ctx* ctx, const qlora__ptx_text* text, char** out,
                                    size_t* bytes) {
    const qlora__gpu* gpu = ctx->gpu;
    int target_version = text->suffix != '\0' ? 80 : qlora__target_version(gpu->target_number);
    int version = text->version > target_version ? text->version : target_version;
    char header[96];
    int used = snprintf(header, sizeof header, ".version %d.%d\n.target %s%.*s\n.address_size 64\n",
                        version / 10, version % 10, gpu->target, text->suffix != '\0' ? 1 : 0,
                        &text->suffix);
    *bytes = (size_t)used + text->length + 1;
    char* p = (char*)qlora__alloc(ctx, *bytes);
    if (p == NULL) {
        return QLORA_ERR_MEMORY;
    }
    memcpy(p, header, (size_t)used);
    size_t at = (size_t)used;
    for (const char* const* chunk = text->chunks; *chunk != NULL; chunk++) {
        size_t n = strlen(*chunk);
        QLORA_ASSERT(at + n < *bytes);
        memcpy(p + at, *chunk, n);
        at += n;
    }
    p[at] = '\0';
    *out = p;
    return QLORA_OK;
}

// Finds a directive at the start of a line, outside comments. NULL when there is none.
static const char* qlora__ptx_directive(const char* text, const char* directive) {
    size_t length = strlen(directive);
    const char* p = text;
    bool line_start = true;
    while (*p != '\0') {
        if (p[0] == '/' && p[1] == '/') {
            p += strcspn(p, "\n");
        } else if (p[0] == '/' && p[1] == '*') {
            const char* end = strstr(p + 2, "*/");
            p = end != NULL ? end + 2 : p + strlen(p);
        } else if (line_start && strncmp(p, directive, length) == 0 &&
                   (p[length] == ' ' || p[length] == '\t')) {
            return p;
        } else {
            line_start = *p == '\n' || ((*p == ' ' || *p == '\t' || *p == '\r') && line_start);
            p++;
        }
    }
    return NULL;
}

// The word after a directive, e.g. "sm_90a" of ".target sm_90a, texmode_independent".
static void qlora__ptx_word(const char* directive, char* out, size_t size) {
    const char* p = directive + strcspn(directive, " \t");
    p += strspn(p, " \t");
    size_t n = strcspn(p, " \t\r\n,/");
    n = n < size - 1 ? n : size - 1;
    memcpy(out, p, n);
    out[n] = '\0';
}

// The caller's PTX must name the emitted target, or its a or f form.
static qlora_result qlora__ptx_check_target(qlora_ctx* ctx, const char* ptx) {
    const char* directive = qlora__ptx_directive(ptx, ".target");
    if (directive == NULL) {
        return qlora__fail(ctx, QLORA_ERR_TARGET,
                           "F-PTX-001: the PTX has no .target line; this device takes %s (see "
                           "qlora_ctx_target, qlora_ptx_emit)",
                           ctx->gpu->target);
    }
    char word[32];
    qlora__ptx_word(directive, word, sizeof word);
    size_t n = strlen(ctx->gpu->target);
    bool same = strncmp(word, ctx->gpu->target, n) == 0 &&
                (word[n] == '\0' || ((word[n] == 'a' || word[n] == 'f') && word[n + 1] == '\0'));
    if (!same) {
        return qlora__fail(ctx, QLORA_ERR_TARGET,
                           "F-PTX-001: the PTX is for %s, this device takes %s (qlora_ctx_target); "
                           "rewrite it with qlora_ptx_emit",
                           word, ctx->gpu->target);
    }
    return QLORA_OK;
}

// Parses "7.8" of a .version line to 78; 0 when it is none.
static int qlora__ptx_version(const char* directive) {
    char word[16];
    qlora__ptx_word(directive, word, sizeof word);
    if (word[0] < '0' || word[0] > '9' || word[1] != '.' || word[2] < '0' || word[2] > '9') {
        return 0;
    }
    return (word[0] - '0') * 10 + (word[2] - '0');
}

static qlora_result qlora__ptx_emit(qlora_ctx* ctx, const char* ptx, char* buffer, size_t size,
                                    size_t* needed) {
    if (qlora__on_cpu(ctx)) {
        return qlora__no_kernels(ctx);
    }
    if (ptx == NULL || needed == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is NULL", ptx == NULL ? "ptx" : "needed");
    }
    const char* version_line = qlora__ptx_directive(ptx, ".version");
    const char* target_line = qlora__ptx_directive(ptx, ".target");
    int version = version_line != NULL ? qlora__ptx_version(version_line) : 0;
    if (version == 0 || target_line == NULL || target_line < version_line) {
        return qlora__fail(ctx, QLORA_ERR_TARGET,
                           "the text must begin with a .version and a .target line");
    }
    char word[32];
    qlora__ptx_word(target_line, word, sizeof word);
    int number = strncmp(word, "sm_", 3) == 0 ? atoi(word + 3) : 0;
    size_t length = strlen(word);
    if (number == 0 || number > ctx->gpu->target_number || word[length - 1] == 'a' ||
        word[length - 1] == 'f') {
        return qlora__fail(ctx, QLORA_ERR_TARGET,
                           "PTX for %s cannot be rewritten for %s: only plain targets go forward", word,
                           ctx->gpu->target);
    }
    int least = qlora__target_version(ctx->gpu->target_number);
    version = version > least ? version : least;
    if (version > ctx->gpu->ptx_version) {
        return qlora__fail(ctx, QLORA_ERR_TARGET,
                           "the text needs PTX %d.%d, this driver takes %d.%d at most", version / 10,
                           version % 10, ctx->gpu->ptx_version / 10, ctx->gpu->ptx_version % 10);
    }
    const char* after_version = version_line + strcspn(version_line, "\n");
    const char* after_target = target_line + strcspn(target_line, "\n");
    int n = snprintf(buffer, buffer != NULL ? size : 0, "%.*s.version %d.%d%.*s.target %s%s",
                     (int)(version_line - ptx), ptx, version / 10, version % 10,
                     (int)(target_line - after_version), after_version, ctx->gpu->target, after_target);
    *needed = (size_t)n + 1;
    if (buffer != NULL && size < *needed) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "the buffer has %llu bytes, %llu are needed",
                           (unsigned long long)size, (unsigned long long)*needed);
    }
    return QLORA_OK;
}

// ---- modules --------------------------------------------------------------------------------------

// C-LOAD: with logs below compute capability 12, plainly from there on; never with CU_JIT_TARGET. One log
// item per compile. A fault of an earlier kernel is reported as that, not as a failed load.
static qlora_result qlora__module_load(qlora_ctx* ctx, const char* name, const char* ptx, void** out) {
    qlora__gpu* gpu = ctx->gpu;
    char what[160];
    snprintf(what, sizeof what, "compiling kernel module %s", name);
    QLORA__TRY(qlora__not_in_capture(ctx, what));
    QLORA__TRY(qlora__sync(ctx));
    char log[2048] = "";
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
        QLORA__LOG(ctx, INFO, KERNEL_COMPILE, "%s: %llu bytes of PTX for %s in %.1f ms", name,
                   (unsigned long long)strlen(ptx), gpu->target, ms);
        return QLORA_OK;
    }
    QLORA__LOG(ctx, ERROR, KERNEL_COMPILE, "%s: %s (%d) after %.1f ms", name, qlora__cu_name(gpu, code),
               code, ms);
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

// All kernels of a module become ready together, or none.
static qlora_result qlora__module_resolve(qlora_ctx* ctx, const char* name, void* handle) {
    qlora__cache* cache = ctx->gpu->cache;
    for (size_t i = 0; i < QLORA__K_COUNT; i++) {
        const qlora__kernel_row* row = &qlora__kernel_rows[i];
        if (strcmp(row->module, name) != 0) {
            continue;
        }
        char entry[96];
        snprintf(entry, sizeof entry, "qlora_%s", row->name);
        QLORA__TRY(qlora__kernel_resolve(ctx, handle, entry, row->shared, &cache->kernels[i].function));
        cache->kernels[i].owner = ctx;
        cache->kernels[i].key = row->name;
        cache->kernels[i].shared_allowed = row->shared > 48 * 1024 ? row->shared : 48 * 1024;
        cache->info.kernels++;
    }
    return QLORA_OK;
}

static void qlora__module_forget(qlora_ctx* ctx, const char* name) {
    qlora__cache* cache = ctx->gpu->cache;
    for (size_t i = 0; i < QLORA__K_COUNT; i++) {
        if (strcmp(qlora__kernel_rows[i].module, name) == 0 && cache->kernels[i].function != NULL) {
            cache->kernels[i].function = NULL;
            cache->info.kernels--;
        }
    }
}

// Compiles a module of the library and makes its kernels ready.
static qlora_result qlora__module_open(qlora_ctx* ctx, const char* name) {
    qlora__cache* cache = ctx->gpu->cache;
    const qlora__ptx_text* text = qlora__ptx_choose(ctx->gpu, name);
    if (text == NULL) {
        return qlora__fail(ctx, QLORA_ERR_KERNEL,
                           "kernel module %s needs compute capability 8.0; %s has %d.%d", name,
                           ctx->gpu->device_name, ctx->gpu->capability / 10, ctx->gpu->capability % 10);
    }
    qlora__module* module = (qlora__module*)qlora__alloc_zero(ctx, sizeof *module);
    if (module == NULL) {
        return QLORA_ERR_MEMORY;
    }
    char* ptx = NULL;
    size_t bytes = 0;
    qlora_result r = qlora__ptx_join(ctx, text, &ptx, &bytes);
    if (r == QLORA_OK) {
        r = qlora__module_load(ctx, name, ptx, &module->handle);
        qlora__free(ctx, ptx, bytes);
    }
    if (r == QLORA_OK) {
        r = qlora__module_resolve(ctx, name, module->handle);
        if (r != QLORA_OK) {
            qlora__module_forget(ctx, name);
            ctx->gpu->cu.ModuleUnload(module->handle);
            cache->info.modules--;
        }
    }
    if (r != QLORA_OK) {
        qlora__free(ctx, module, sizeof *module);
        return r;
    }
    module->name = name;
    module->next = cache->modules;
    cache->modules = module;
    return QLORA_OK;
}

// A kernel of the registry, compiled on demand unless the cache is sealed.
static qlora_result qlora__kernel_ready(qlora_ctx* ctx, qlora__kernel_id id, qlora_kernel** out) {
    qlora__cache* cache = ctx->gpu->cache;
    qlora_kernel* kernel = &cache->kernels[id];
    if (kernel->function != NULL) {
        cache->info.hits++;
    } else if (cache->info.sealed) {
        return qlora__fail(ctx, QLORA_ERR_SEALED,
                           "kernel %s (module %s) is not in the sealed cache; pre-warm the shape that "
                           "needs it, or call qlora_cache_unseal",
                           qlora__kernel_rows[id].name, qlora__kernel_rows[id].module);
    } else {
        QLORA__TRY(qlora__module_open(ctx, qlora__kernel_rows[id].module));
    }
    *out = kernel;
    return QLORA_OK;
}

// ---- launch ---------------------------------------------------------------------------------------

static qlora_result qlora__launch_checked(qlora_ctx* ctx, qlora_kernel* kernel, const uint32_t grid[3],
                                          const uint32_t block[3], uint32_t shared, void** args) {
    qlora__gpu* gpu = ctx->gpu;
    if (shared > (uint32_t)gpu->max_shared) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "kernel %s needs %u bytes of shared memory, this device gives a block %d",
                           kernel->key, shared, gpu->max_shared);
    }
    if (shared > kernel->shared_allowed) {
        int code = gpu->cu.FuncSetAttribute(
            kernel->function, QLORA__CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, (int)shared);
        QLORA__TRY(qlora__cu(ctx, code, "cuFuncSetAttribute"));
        kernel->shared_allowed = shared;
    }
    char what[128];
    int code = gpu->cu.LaunchKernel(kernel->function, grid[0], grid[1], grid[2], block[0], block[1],
                                    block[2], shared, gpu->stream, args, NULL);
    if (code != 0) {
        snprintf(what, sizeof what, "launching kernel %.90s", kernel->key);
        return qlora__cu(ctx, code, what);
    }
#ifdef QLORA_DEBUG
    if (ctx->capture == NULL) {
        snprintf(what, sizeof what, "kernel %.90s", kernel->key);
        return qlora__cu(ctx, gpu->cu.StreamSynchronize(gpu->stream), what);
    }
#endif
    return QLORA_OK;
}

// Launches a kernel of the registry. An empty grid is nothing to do.
static QLORA__UNUSED qlora_result qlora__launch(qlora_ctx* ctx, qlora__kernel_id id, int64_t grid_x,
                                                int64_t grid_y, int64_t grid_z, uint32_t threads,
                                                uint32_t shared, void** args) {
    if (grid_x <= 0 || grid_y <= 0 || grid_z <= 0) {
        return QLORA_OK;
    }
    if (grid_x > INT32_MAX || grid_y > 65535 || grid_z > 65535) {
        return qlora__fail(ctx, QLORA_ERR_LIMIT, "kernel %s: a grid of %lld x %lld x %lld is too large",
                           qlora__kernel_rows[id].name, (long long)grid_x, (long long)grid_y,
                           (long long)grid_z);
    }
    qlora_kernel* kernel = NULL;
    QLORA__TRY(qlora__kernel_ready(ctx, id, &kernel));
    uint32_t grid[3] = {(uint32_t)grid_x, (uint32_t)grid_y, (uint32_t)grid_z};
    uint32_t block[3] = {threads, 1, 1};
    return qlora__launch_checked(ctx, kernel, grid, block, shared, args);
}

static qlora_result qlora__kernel_launch(qlora_ctx* ctx, const qlora_kernel* kernel,
                                         const qlora_launch* launch, void** args) {
    if (qlora__on_cpu(ctx)) {
        return qlora__no_kernels(ctx);
    }
    if (kernel == NULL || launch == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is NULL", kernel == NULL ? "kernel" : "launch");
    }
    if (kernel->owner != ctx) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "the kernel belongs to another context");
    }
    uint32_t grid[3];
    uint32_t block[3];
    uint64_t threads = 1;
    for (int i = 0; i < 3; i++) {
        grid[i] = launch->grid[i] > 0 ? launch->grid[i] : 1;
        block[i] = launch->block[i] > 0 ? launch->block[i] : 1;
        threads *= block[i];
        if (block[i] > 1024) {
            threads = 1u << 20;
        }
    }
    if (threads > 1024 || grid[1] > 65535 || grid[2] > 65535 || grid[0] > INT32_MAX) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "grid %u x %u x %u of blocks %u x %u x %u is beyond CUDA's limits", grid[0],
                           grid[1], grid[2], block[0], block[1], block[2]);
    }
    qlora_kernel* own = (qlora_kernel*)(uintptr_t)kernel; // handed out const, ours to update
    return qlora__launch_checked(ctx, own, grid, block, launch->shared_bytes, args);
}

// ---- lookup ---------------------------------------------------------------------------------------

static qlora_kernel* qlora__kernel_find(qlora_ctx* ctx, const char* key) {
    for (qlora_kernel* k = ctx->gpu->cache->extra; k != NULL; k = k->next) {
        if (strcmp(k->key, key) == 0) {
            return k;
        }
    }
    return NULL;
}

static int qlora__kernel_row_find(const char* key) {
    for (int i = 0; i < QLORA__K_COUNT; i++) {
        if (strcmp(qlora__kernel_rows[i].name, key) == 0) {
            return i;
        }
    }
    return -1;
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
                               "no kernel is named %.100s; qlora_kernel_name lists ours, "
                               "qlora_cache_get_or_compile adds yours",
                               key);
        }
        QLORA__TRY(qlora__kernel_ready(ctx, (qlora__kernel_id)row, &kernel));
    }
    *out = kernel;
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
    qlora_result r = qlora__module_load(ctx, kernel->key, ptx, &kernel->module);
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
    if (key == NULL || ptx == NULL || entry == NULL || out == NULL || key[0] == '\0') {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "key, ptx, entry and out are all needed");
    }
    if (qlora__kernel_row_find(key) >= 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%.100s is the name of a kernel of the library",
                           key);
    }
    QLORA__TRY(qlora__ptx_check_target(ctx, ptx)); // before the look-up: a wrong text never passes
    uint64_t hash = qlora__hash(entry, strlen(entry), qlora__hash(ptx, strlen(ptx), 0));
    qlora_kernel* kernel = qlora__kernel_find(ctx, key);
    if (kernel != NULL) {
        if (kernel->text_hash != hash) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "key %.100s was compiled from another text; use another key", key);
        }
        ctx->gpu->cache->info.hits++;
        *out = kernel;
        return QLORA_OK;
    }
    if (ctx->gpu->cache->info.sealed) {
        return qlora__fail(ctx, QLORA_ERR_SEALED,
                           "%.100s would be compiled, but the cache is sealed; call qlora_cache_unseal "
                           "first",
                           key);
    }
    QLORA__TRY(qlora__kernel_compile(ctx, key, ptx, entry, hash, &kernel));
    *out = kernel;
    return QLORA_OK;
}

// Loads every module of which a kernel is needed. have: conditions that hold.
static QLORA__UNUSED qlora_result qlora__cache_warm(qlora_ctx* ctx, uint32_t have) {
    for (int i = 0; i < QLORA__K_COUNT; i++) {
        const qlora__kernel_row* row = &qlora__kernel_rows[i];
        if ((row->need & ~have) == 0 && ctx->gpu->cache->kernels[i].function == NULL) {
            QLORA__TRY(qlora__module_open(ctx, row->module));
        }
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

static qlora_result qlora__cache_set_sealed(qlora_ctx* ctx, bool sealed) {
    if (!qlora__on_cpu(ctx)) {
        ctx->gpu->cache->info.sealed = sealed;
    }
    return QLORA_OK;
}

static qlora_result qlora__cache_stats(qlora_ctx* ctx, qlora_cache_info* out) {
    if (out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    memset(out, 0, sizeof *out);
    if (!qlora__on_cpu(ctx)) {
        *out = ctx->gpu->cache->info;
    }
    return QLORA_OK;
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
                                         const qlora_launch* launch, void** args) {
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

static qlora_result qlora__cache_get_or_compile(qlora_ctx* ctx, const char* key, const char* ptx,
                                                const char* entry, const qlora_kernel** out) {
    (void)key;
    (void)ptx;
    (void)entry;
    (void)out;
    return qlora__no_kernels(ctx);
}

static qlora_result qlora__cache_set_sealed(qlora_ctx* ctx, bool sealed) {
    (void)ctx;
    (void)sealed;
    return QLORA_OK;
}

static qlora_result qlora__cache_stats(qlora_ctx* ctx, qlora_cache_info* out) {
    if (out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    memset(out, 0, sizeof *out);
    return QLORA_OK;
}

#endif // QLORA_NO_CUDA

qlora_result qlora_cache_get(qlora_ctx* ctx, const char* key, const qlora_kernel** out) {
    QLORA__ENTER(ctx, "qlora_cache_get");
    return qlora__leave(ctx, qlora__cache_get(ctx, key, out));
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

qlora_result qlora_kernel_launch(qlora_ctx* ctx, const qlora_kernel* kernel, const qlora_launch* launch,
                                 void** args) {
    QLORA__ENTER(ctx, "qlora_kernel_launch");
    return qlora__leave(ctx, qlora__kernel_launch(ctx, kernel, launch, args));
}

qlora_result qlora_cache_seal(qlora_ctx* ctx) {
    QLORA__ENTER(ctx, "qlora_cache_seal");
    return qlora__leave(ctx, qlora__cache_set_sealed(ctx, true));
}

qlora_result qlora_cache_unseal(qlora_ctx* ctx) {
    QLORA__ENTER(ctx, "qlora_cache_unseal");
    return qlora__leave(ctx, qlora__cache_set_sealed(ctx, false));
}

qlora_result qlora_cache_stats(qlora_ctx* ctx, qlora_cache_info* out) {
    QLORA__ENTER(ctx, "qlora_cache_stats");
    return qlora__leave(ctx, qlora__cache_stats(ctx, out));
}

//@@ CONTEXT    - creation, backend choice, stream, native handles, description

// Zero fields of a desc become what they stand for.
static qlora_ctx_desc qlora__ctx_desc_defaults(const qlora_ctx_desc* given) {
    qlora_ctx_desc d;
    memset(&d, 0, sizeof d);
    if (given != NULL) {
        d = *given;
    }
    if (d.allocator.alloc == NULL) {
        d.allocator.alloc = qlora__os_alloc;
        d.allocator.free = qlora__os_free;
    }
    if (d.files.open == NULL) {
        d.files.open = qlora__os_open;
        d.files.read = qlora__os_read;
        d.files.write = qlora__os_write;
        d.files.sync = qlora__os_sync;
        d.files.close = qlora__os_close;
        d.files.rename = qlora__os_rename;
        d.files.remove = qlora__os_remove;
        d.files.make_dir = qlora__os_make_dir;
        d.files.sync_dir = qlora__os_sync_dir;
        d.files.map = qlora__os_map;
        d.files.unmap = qlora__os_unmap;
    }
    if (d.threads == 0) {
        d.threads = (int32_t)qlora__min(qlora__core_count(), QLORA__MAX_THREADS);
    }
    if (d.workspace_bytes == 0) {
        d.workspace_bytes = (size_t)32 << 20;
    }
    return d;
}

// What is wrong with a desc, or NULL.
static const char* qlora__ctx_desc_fault(const qlora_ctx_desc* d) {
    const qlora_files* f = &d->files;
    int hooks = (f->open != NULL) + (f->read != NULL) + (f->write != NULL) + (f->sync != NULL) +
                (f->close != NULL) + (f->rename != NULL) + (f->remove != NULL) + (f->make_dir != NULL) +
                (f->sync_dir != NULL) + (f->map != NULL) + (f->unmap != NULL);
    if (d->reserved_must_be_zero0 != 0 || d->reserved_must_be_zero1 != 0) {
        return "desc was not zeroed: a reserved field is set";
    }
    if ((d->allocator.alloc == NULL) != (d->allocator.free == NULL)) {
        return "desc.allocator needs both functions or none";
    }
    if ((d->device_allocator.alloc == NULL) != (d->device_allocator.free == NULL)) {
        return "desc.device_allocator needs both functions or none";
    }
    if (hooks != 0 && hooks != 11) {
        return "desc.files needs all functions or none";
    }
    if ((int)d->require_backend < 0 || d->require_backend > QLORA_BACKEND_CUDA) {
        return "desc.require_backend is no backend";
    }
    if ((int)d->math < 0 || d->math > QLORA_MATH_TF32_ALL) {
        return "desc.math is no mode";
    }
    if (d->threads < 0 || d->threads > QLORA__MAX_THREADS) {
        return "desc.threads must lie between 0 and 64";
    }
    if (d->workspace != NULL && ((uintptr_t)d->workspace % 256 != 0 || d->workspace_bytes == 0)) {
        return "desc.workspace must be 256-byte aligned and have desc.workspace_bytes";
    }
    return NULL;
}

#ifndef QLORA_NO_CUDA

static void qlora__gpu_close(qlora_ctx* ctx) {
    qlora__gpu* gpu = ctx->gpu;
    if (gpu == NULL) {
        return;
    }
    if (gpu->context != NULL) {
        int current = gpu->cu.CtxPushCurrent(gpu->context);
        if (gpu->cublas != NULL) {
            gpu->blas.Destroy(gpu->cublas);
        }
        qlora__cache_destroy(ctx);
        qlora__buffer_destroy(ctx, gpu->own_workspace);
        qlora__buffer_destroy(ctx, ctx->scratch);
        ctx->scratch = NULL;
        if (gpu->own_stream != NULL) {
            gpu->cu.StreamDestroy(gpu->own_stream);
        }
        if (current == 0) {
            qlora__gpu_deactivate(ctx);
        }
        if (gpu->owns_context) {
            gpu->cu.DevicePrimaryCtxRelease(gpu->device);
        }
    }
    qlora__free(ctx, gpu, sizeof *gpu);
    ctx->gpu = NULL;
}

// A stream must belong to our CUDA context; the legacy default stream (NULL or 1) cannot be captured.
static qlora_result qlora__stream_check(qlora_ctx* ctx, void* stream) {
    qlora__gpu* gpu = ctx->gpu;
    if ((uintptr_t)stream == 1) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "the legacy default stream cannot be captured; give a stream of your own");
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
    QLORA__TRY(qlora__cu(
        ctx, gpu->cu.StreamCreate(&gpu->own_stream, QLORA__CU_STREAM_NON_BLOCKING), "cuStreamCreate"));
    gpu->stream = gpu->own_stream;
    if (ctx->desc.cu_stream != NULL) {
        QLORA__TRY(qlora__stream_check(ctx, ctx->desc.cu_stream));
        gpu->stream = ctx->desc.cu_stream;
    }
    return QLORA_OK;
}

// Scratch, cache and cuBLAS, with the device's context current.
static qlora_result qlora__gpu_open_tools(qlora_ctx* ctx) {
    qlora__gpu* gpu = ctx->gpu;
    QLORA__TRY(qlora__gpu_open_stream(ctx));
    gpu->cache = (qlora__cache*)qlora__alloc_zero(ctx, sizeof *gpu->cache);
    if (gpu->cache == NULL) {
        return QLORA_ERR_MEMORY;
    }
    if (ctx->desc.scratch_bytes == 0) {
        ctx->desc.scratch_bytes = (size_t)64 << 20;
    }
    QLORA__TRY(qlora__buffer_create(ctx, ctx->desc.scratch_bytes, &ctx->scratch));
    if (!qlora__cublas_open(ctx)) {
        QLORA__LOG(ctx, WARN, CUBLAS, "cuBLAS %s; our own kernels do the products", gpu->cublas_note);
        return QLORA_OK;
    }
    gpu->workspace = ctx->desc.workspace;
    if (gpu->workspace == NULL) {
        QLORA__TRY(qlora__buffer_create(ctx, ctx->desc.workspace_bytes, &gpu->own_workspace));
        gpu->workspace = gpu->own_workspace->data;
    }
    QLORA__TRY(qlora__cublas_bind(ctx));
    QLORA__LOG(ctx, INFO, CUBLAS, "cuBLAS %s", gpu->cublas_note);
    return QLORA_OK;
}

static qlora_result qlora__gpu_open(qlora_ctx* ctx) {
    qlora__gpu* gpu = (qlora__gpu*)qlora__alloc_zero(ctx, sizeof *gpu);
    if (gpu == NULL) {
        return QLORA_ERR_MEMORY;
    }
    ctx->gpu = gpu;
    QLORA__TRY(qlora__gpu_load(ctx));
    QLORA__TRY(qlora__gpu_choose_device(ctx));
    QLORA__TRY(qlora__gpu_read_facts(ctx));
    if (gpu->context == NULL) {
        QLORA__TRY(qlora__cu(ctx, gpu->cu.DevicePrimaryCtxRetain(&gpu->context, gpu->device),
                             "cuDevicePrimaryCtxRetain"));
        gpu->owns_context = true;
    }
    QLORA__TRY(qlora__gpu_activate(ctx));
    ctx->backend = QLORA_BACKEND_CUDA; // memory comes from the device from here on
    qlora_result r = qlora__gpu_open_tools(ctx);
    qlora__gpu_deactivate(ctx);
    return r;
}

static qlora_result qlora__ctx_open_backend(qlora_ctx* ctx) {
    if (ctx->desc.require_backend == QLORA_BACKEND_CPU) {
        snprintf(ctx->reason, sizeof ctx->reason, "asked for");
        return QLORA_OK;
    }
    qlora_result r = qlora__gpu_open(ctx);
    if (r == QLORA_OK) {
        ctx->activate = qlora__gpu_activate;
        ctx->deactivate = qlora__gpu_deactivate;
        snprintf(ctx->reason, sizeof ctx->reason, "%s, compute capability %d.%d, kernels for %s",
                 ctx->gpu->device_name, ctx->gpu->capability / 10, ctx->gpu->capability % 10,
                 ctx->gpu->target);
        return QLORA_OK;
    }
    // The text without the name of the call in front, as the reason of a CPU context.
    const char* text = ctx->error;
    size_t prefix = ctx->call != NULL ? strlen(ctx->call) + 2 : 0;
    snprintf(ctx->reason, sizeof ctx->reason, "%s", strlen(text) >= prefix ? text + prefix : text);
    qlora__gpu_close(ctx);
    ctx->backend = QLORA_BACKEND_CPU;
    ctx->dead[0] = '\0';
    if (r == QLORA_ERR_MEMORY) {
        return r;
    }
    if (ctx->desc.require_backend == QLORA_BACKEND_CUDA) {
        return qlora__fail(ctx, QLORA_ERR_BACKEND, "CUDA was required: %.600s", ctx->reason);
    }
    return QLORA_OK;
}

#else

static void qlora__gpu_close(qlora_ctx* ctx) {
    (void)ctx;
}

static qlora_result qlora__ctx_open_backend(qlora_ctx* ctx) {
    snprintf(ctx->reason, sizeof ctx->reason, "built with QLORA_NO_CUDA");
    if (ctx->desc.require_backend == QLORA_BACKEND_CUDA) {
        return qlora__fail(ctx, QLORA_ERR_BACKEND, "CUDA was required, but this was %s", ctx->reason);
    }
    return QLORA_OK;
}

#endif

static qlora_result qlora__ctx_open(qlora_ctx* ctx) {
    QLORA__TRY(qlora__ctx_open_backend(ctx));
    QLORA__LOG(ctx, INFO, BACKEND, "%s: %s", qlora__on_cpu(ctx) ? "CPU" : "CUDA", ctx->reason);
    if (!qlora__on_cpu(ctx)) {
        return QLORA_OK;
    }
    if (ctx->desc.scratch_bytes == 0) {
        ctx->desc.scratch_bytes = (size_t)16 << 20;
    }
    QLORA__TRY(qlora__buffer_create(ctx, ctx->desc.scratch_bytes, &ctx->scratch));
    return qlora__pool_create(ctx, ctx->desc.threads);
}

static void qlora__ctx_close(qlora_ctx* ctx) {
    qlora__pool_destroy(ctx);
    if (qlora__on_cpu(ctx)) {
        qlora__buffer_destroy(ctx, ctx->scratch);
        ctx->scratch = NULL;
    }
    qlora__gpu_close(ctx);
}

static void qlora__tell(const qlora_ctx_desc* desc, const char* text) {
    if (desc != NULL && desc->error_text != NULL && desc->error_text_size > 0) {
        snprintf(desc->error_text, desc->error_text_size, "%s", text);
    }
}

qlora_result qlora_ctx_create(const qlora_ctx_desc* desc, qlora_ctx** out) {
    qlora__tell(desc, "");
    const char* fault = out == NULL ? "out is NULL" : NULL;
    if (fault == NULL && desc != NULL) {
        fault = qlora__ctx_desc_fault(desc);
    }
    if (fault != NULL) {
        char text[160];
        snprintf(text, sizeof text, "qlora_ctx_create: %s", fault);
        qlora__tell(desc, text);
        return QLORA_ERR_ARGUMENT;
    }
    qlora_ctx_desc resolved = qlora__ctx_desc_defaults(desc);
    qlora_ctx* ctx =
        (qlora_ctx*)resolved.allocator.alloc(sizeof *ctx, 64, resolved.allocator.user);
    if (ctx == NULL) {
        qlora__tell(desc, "qlora_ctx_create: out of host memory");
        return QLORA_ERR_MEMORY;
    }
    memset(ctx, 0, sizeof *ctx);
    ctx->desc = resolved;
    ctx->backend = QLORA_BACKEND_CPU;
    ctx->call = "qlora_ctx_create";
    qlora_result r = qlora__ctx_open(ctx);
    if (r != QLORA_OK) {
        qlora__tell(desc, ctx->error);
        qlora__ctx_close(ctx);
        resolved.allocator.free(ctx, sizeof *ctx, resolved.allocator.user);
        return r;
    }
    ctx->error[0] = '\0';
    ctx->desc.error_text = NULL; // the caller's buffer may not live as long as we do
    ctx->desc.error_text_size = 0;
    *out = ctx;
    return QLORA_OK;
}

qlora_result qlora_ctx_destroy(qlora_ctx* ctx) {
    if (ctx == NULL) {
        return QLORA_OK;
    }
    ctx->call = "qlora_ctx_destroy";
    if (ctx->depth > 0 || ctx->children > 0) {
        QLORA__LOG(ctx, ERROR, LEAK, "%lld objects still live", (long long)ctx->children);
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "%lld tensors, clips, graphs or models of this context still live; destroy "
                           "them first",
                           (long long)ctx->children);
    }
    qlora__ctx_close(ctx);
    qlora_allocator allocator = ctx->desc.allocator;
    allocator.free(ctx, sizeof *ctx, allocator.user);
    return QLORA_OK;
}

void qlora_ctx_get_desc(const qlora_ctx* ctx, qlora_ctx_desc* out) {
    if (ctx != NULL && out != NULL) {
        *out = ctx->desc;
    }
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
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%d is no math mode", (int)math);
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
        return stream == NULL ? QLORA_OK : qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                                                       "a CPU context has no CUDA streams");
    }
#ifndef QLORA_NO_CUDA
    qlora__gpu* gpu = ctx->gpu;
    QLORA__TRY(qlora__not_in_capture(ctx, "changing the stream"));
    if (stream != NULL) {
        QLORA__TRY(qlora__stream_check(ctx, stream));
    }
    QLORA__TRY(qlora__sync(ctx)); // what was queued on the old stream comes first
    gpu->stream = stream != NULL ? stream : gpu->own_stream;
    gpu->cublas_bound = false;
    qlora__graphs_invalidate(ctx, 0, "the stream was changed");
    if (gpu->cublas != NULL) {
        return qlora__cublas_bind(ctx);
    }
#endif
    return QLORA_OK;
}

qlora_result qlora_ctx_set_stream(qlora_ctx* ctx, void* cu_stream) {
    QLORA__ENTER(ctx, "qlora_ctx_set_stream");
    return qlora__leave(ctx, qlora__ctx_set_stream(ctx, cu_stream));
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
    if (out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    memset(out, 0, sizeof *out);
    out->device_bytes = ctx->device_bytes;
    out->device_peak = ctx->device_peak;
    out->device_allocations = ctx->device_allocations;
    out->host_bytes = ctx->host_bytes;
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

qlora_result qlora_ctx_memory(qlora_ctx* ctx, qlora_memory_info* out) {
    QLORA__ENTER(ctx, "qlora_ctx_memory");
    return qlora__leave(ctx, qlora__ctx_memory(ctx, out));
}

// Appends to a buffer that may be too small; used counts what would have been written.
QLORA__PRINTF(4, 5)
static void qlora__append(char* buffer, size_t size, size_t* used, const char* format, ...) {
    va_list args;
    va_start(args, format);
    bool room = buffer != NULL && *used < size;
    int n = vsnprintf(room ? buffer + *used : NULL, room ? size - *used : 0, format, args);
    va_end(args);
    *used += n > 0 ? (size_t)n : 0;
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
        qlora__append(buffer, size, &used, "threads: %d\n", (int)ctx->desc.threads);
    }
#ifndef QLORA_NO_CUDA
    const qlora__gpu* gpu = ctx->gpu;
    if (gpu != NULL) {
        qlora__append(buffer, size, &used,
                      "device: %d %s, compute capability %d.%d, %d multiprocessors, %.1f GiB, %d KiB "
                      "shared memory a block\n",
                      gpu->device, gpu->device_name, gpu->capability / 10, gpu->capability % 10,
                      gpu->sm_count, (double)gpu->total_bytes / 1073741824.0, gpu->max_shared / 1024);
        qlora__append(buffer, size, &used, "driver: CUDA %d.%d, PTX up to %d.%d\n",
                      gpu->driver_version / 1000, gpu->driver_version % 1000 / 10, gpu->ptx_version / 10,
                      gpu->ptx_version % 10);
        qlora__append(buffer, size, &used, "cuBLAS: %s\n", gpu->cublas_note);
        qlora__append(buffer, size, &used, "kernels: emitted for %s%s; %u modules, %u kernels ready%s\n",
                      gpu->target,
                      gpu->target_number != gpu->capability ? " (this device's own target is unknown to "
                                                              "us or to the driver)"
                                                            : "",
                      gpu->cache->info.modules, gpu->cache->info.kernels,
                      gpu->cache->info.sealed ? ", sealed" : "");
    }
#endif
    if (ctx->dead[0] != '\0') {
        qlora__append(buffer, size, &used, "lost: %s\n", ctx->dead);
    }
    return used + 1;
}

//@@ DISPATCH   - the GEMM family: cuBLAS, our PTX, CPU; pre-warm

// One product, checked: row-major C[M,N] = alpha alpha_dev op(A) op(B) + beta C, batch of them.
typedef struct qlora__gemm {
    bool ta; // A is stored [K,M]
    bool tb; // B is stored [N,K]
    int64_t M;
    int64_t N;
    int64_t K;
    const void* A;
    const void* B;
    void* C;
    int64_t lda;
    int64_t ldb;
    int64_t ldc;
    int64_t batch;
    int64_t sA; // batch strides, 0 where one matrix serves all
    int64_t sB;
    int64_t sC;
    qlora_dtype a_type; // the same as b_type once mixed operands are cast
    qlora_dtype b_type;
    qlora_dtype out;
    float alpha;
    float beta;
    const float* alpha_dev; // NULL: 1
    const float* beta_dev;  // given with alpha_dev
    bool tf32;
} qlora__gemm;

// ---- CPU ------------------------------------------------------------------------------------------

// A panel of 64 rows meets a tile of 16 columns; K goes by in steps of 64, packed as QLORA__REAL. Each
// element of C is one sum in ascending k, whatever the threads do.
#define QLORA__PANEL 64
#define QLORA__TILE 16
#define QLORA__STEP 64

static void qlora__gemm_pack(const void* data, qlora_dtype dtype, int64_t base, int64_t stride_k,
                             int64_t stride_i, int64_t steps, int64_t count, int64_t width,
                             QLORA__REAL* out) {
    for (int64_t k = 0; k < steps; k++) {
        for (int64_t i = 0; i < width; i++) {
            int64_t index = base + k * stride_k + i * stride_i;
            out[k * width + i] = i < count ? qlora__load(data, dtype, index) : (QLORA__REAL)0;
        }
    }
}

// acc[4][16] += a[k][4 of 64] b[k][16] over the packed steps.
static void qlora__gemm_micro(const QLORA__REAL* a, const QLORA__REAL* b, int64_t steps,
                              QLORA__REAL* acc) {
    QLORA__REAL c[4 * QLORA__TILE];
    memcpy(c, acc, sizeof c);
    for (int64_t k = 0; k < steps; k++) {
        const QLORA__REAL* bk = b + k * QLORA__TILE;
        const QLORA__REAL* ak = a + k * QLORA__PANEL;
        for (int j = 0; j < QLORA__TILE; j++) {
            c[j] += ak[0] * bk[j];
            c[QLORA__TILE + j] += ak[1] * bk[j];
            c[2 * QLORA__TILE + j] += ak[2] * bk[j];
            c[3 * QLORA__TILE + j] += ak[3] * bk[j];
        }
    }
    memcpy(acc, c, sizeof c);
}

// Units are (matrix, panel, tile), in that order.
static void qlora__gemm_cpu_range(void* user, int64_t begin, int64_t end) {
    const qlora__gemm* g = (const qlora__gemm*)user;
    int64_t tiles = qlora__ceil_div(g->N, QLORA__TILE);
    int64_t panels = qlora__ceil_div(g->M, QLORA__PANEL);
    QLORA__REAL a[QLORA__STEP * QLORA__PANEL];
    QLORA__REAL b[QLORA__STEP * QLORA__TILE];
    QLORA__REAL acc[QLORA__PANEL * QLORA__TILE];
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t j0 = unit % tiles * QLORA__TILE;
        int64_t i0 = unit / tiles % panels * QLORA__PANEL;
        int64_t batch = unit / tiles / panels;
        int64_t rows = qlora__min(QLORA__PANEL, g->M - i0);
        int64_t cols = qlora__min(QLORA__TILE, g->N - j0);
        memset(acc, 0, sizeof acc);
        for (int64_t k0 = 0; k0 < g->K; k0 += QLORA__STEP) {
            int64_t steps = qlora__min(QLORA__STEP, g->K - k0);
            int64_t a_k = g->ta ? g->lda : 1;
            int64_t a_i = g->ta ? 1 : g->lda;
            int64_t b_k = g->tb ? 1 : g->ldb;
            int64_t b_j = g->tb ? g->ldb : 1;
            qlora__gemm_pack(g->A, g->a_type, batch * g->sA + i0 * a_i + k0 * a_k, a_k, a_i, steps,
                             rows, QLORA__PANEL, a);
            qlora__gemm_pack(g->B, g->b_type, batch * g->sB + j0 * b_j + k0 * b_k, b_k, b_j, steps,
                             cols, QLORA__TILE, b);
            for (int64_t i = 0; i < rows; i += 4) {
                qlora__gemm_micro(a + i, b, steps, acc + i * QLORA__TILE);
            }
        }
        for (int64_t i = 0; i < rows; i++) {
            for (int64_t j = 0; j < cols; j++) {
                int64_t at = batch * g->sC + (i0 + i) * g->ldc + j0 + j;
                QLORA__REAL y = (QLORA__REAL)g->alpha * acc[i * QLORA__TILE + j];
                if (g->beta != 0.0f) {
                    y += (QLORA__REAL)g->beta * qlora__load(g->C, g->out, at);
                }
                qlora__store(g->C, g->out, at, y);
            }
        }
    }
}

static qlora_result qlora__gemm_cpu(qlora_ctx* ctx, const qlora__gemm* g) {
    int64_t units =
        qlora__ceil_div(g->M, QLORA__PANEL) * qlora__ceil_div(g->N, QLORA__TILE) * g->batch;
    qlora__gemm copy = *g;
    qlora__parallel(ctx, units, 4, qlora__gemm_cpu_range, &copy);
    return QLORA_OK;
}

#undef QLORA__PANEL
#undef QLORA__TILE
#undef QLORA__STEP

#ifndef QLORA_NO_CUDA

// ---- our own kernels --------------------------------------------------------------------------------

// The tile a kernel computes per block, and the kernels that have it.
typedef struct qlora__gemm_tile {
    int64_t side;
    qlora__kernel_id f32;
    qlora__kernel_id half;
} qlora__gemm_tile;

static const qlora__gemm_tile qlora__gemm_tiles[] = {
    {16, QLORA__K_gemm_skinny_f32, QLORA__K_gemm_skinny_half},
    {64, QLORA__K_gemm_mid_f32, QLORA__K_gemm_mid_half},
    {128, QLORA__K_gemm_big_f32, QLORA__K_gemm_big_half},
};

// Row of qlora__gemm_tiles. Few rows or columns with a long K: K is split inside the block. A short K, or
// fewer than 96 big tiles: small tiles fill the device better.
static int qlora__gemm_choose(const qlora__gemm* g) {
    int64_t big_tiles = qlora__ceil_div(g->M, 128) * qlora__ceil_div(g->N, 128) * g->batch;
    if (qlora__min(g->M, g->N) <= 32 && g->K >= 128) {
        return 0;
    }
    return g->K <= 32 || big_tiles < 96 ? 1 : 2;
}

// Whether the tensor-core kernels take it: 16-bit operands, not both transposed, a device that has them,
// rows that start on 16 bytes, and not so narrow that the split along K wins.
static bool qlora__gemm_takes_tensor_cores(const qlora_ctx* ctx, const qlora__gemm* g) {
    uintptr_t address = (uintptr_t)g->A | (uintptr_t)g->B;
    int64_t strides = g->lda | g->ldb | (g->batch > 1 ? g->sA | g->sB : 0);
    return g->a_type != QLORA_F32 && !(g->ta && g->tb) && ctx->gpu->target_number >= 80 &&
           address % 16 == 0 && strides % 8 == 0 && qlora__gemm_choose(g) != 0;
}

static qlora_result qlora__gemm_ptx(qlora_ctx* ctx, const qlora__gemm* g) {
    static const qlora__kernel_id tensor[2][3] = {
        {QLORA__K_gemm_tc_bf16_nn, QLORA__K_gemm_tc_bf16_nt, QLORA__K_gemm_tc_bf16_tn},
        {QLORA__K_gemm_tc_f16_nn, QLORA__K_gemm_tc_f16_nt, QLORA__K_gemm_tc_f16_tn},
    };
    const qlora__gemm_tile* tile = &qlora__gemm_tiles[qlora__gemm_choose(g)];
    qlora__kernel_id kernel = g->a_type == QLORA_F32 ? tile->f32 : tile->half;
    int64_t side = tile->side;
    if (qlora__gemm_takes_tensor_cores(ctx, g)) {
        kernel = tensor[g->a_type == QLORA_F16 ? 1 : 0][g->ta ? 2 : g->tb ? 1 : 0];
        side = 128;
    }
    int32_t M = (int32_t)g->M;
    int32_t N = (int32_t)g->N;
    int32_t K = (int32_t)g->K;
    int32_t flags = (g->out == QLORA_BF16 ? 1 : 0) | (g->ta ? 2 : 0) | (g->tb ? 4 : 0) |
                    (g->a_type == QLORA_F16 ? 8 : 0);
    size_t in_size = qlora_dtype_bytes(g->a_type);
    size_t out_size = qlora_dtype_bytes(g->out);
    qlora__gemm c = *g; // parameters are passed by address
    for (int64_t done = 0; done < g->batch; done += 65535) {
        int64_t now = qlora__min(g->batch - done, 65535);
        const void* A = (const char*)g->A + (size_t)(done * g->sA) * in_size;
        const void* B = (const char*)g->B + (size_t)(done * g->sB) * in_size;
        void* C = (char*)g->C + (size_t)(done * g->sC) * out_size;
        void* args[] = {&A,     &B,    &C,    &M,    &N,           &K,       &c.lda,  &c.ldb,
                        &c.ldc, &c.sA, &c.sB, &c.sC, &c.alpha_dev, &c.alpha, &c.beta, &flags};
        QLORA__TRY(qlora__launch(ctx, kernel, qlora__ceil_div(g->M, side), qlora__ceil_div(g->N, side),
                                 now, 256, 0, args));
    }
    return QLORA_OK;
}

// ---- cuBLAS -----------------------------------------------------------------------------------------

static int qlora__cublas_type(qlora_dtype dtype) {
    return dtype == QLORA_F32 ? QLORA__CUDA_R_32F
                              : dtype == QLORA_BF16 ? QLORA__CUDA_R_16BF : QLORA__CUDA_R_16F;
}

// Shapes that pre-warm ran are remembered; others after the seal are counted.
static void qlora__cublas_count(qlora_ctx* ctx, const qlora__gemm* g) {
    qlora__cache* cache = ctx->gpu->cache;
    int64_t shape[] = {g->M,     g->N,      g->K,           g->ta ? 1 : 0,   g->tb ? 1 : 0,
                       g->batch, g->a_type, (int64_t)g->out, g->tf32 ? 1 : 0};
    uint64_t hash = qlora__hash(shape, sizeof shape, 0);
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

// cuBLAS is column-major: it is given C^T = op(B)^T op(A)^T, which is the same memory.
static qlora_result qlora__gemm_cublas(qlora_ctx* ctx, const qlora__gemm* g) {
    qlora__gpu* gpu = ctx->gpu;
    QLORA__TRY(qlora__cublas_bind(ctx));
    qlora__cublas_count(ctx, g);
    int op_a = g->ta ? QLORA__CUBLAS_OP_T : QLORA__CUBLAS_OP_N;
    int op_b = g->tb ? QLORA__CUBLAS_OP_T : QLORA__CUBLAS_OP_N;
    int in = qlora__cublas_type(g->a_type);
    int out = qlora__cublas_type(g->out);
    int compute = g->tf32 ? QLORA__CUBLAS_COMPUTE_32F_FAST_TF32 : QLORA__CUBLAS_COMPUTE_32F;
    // A leading dimension of 0 is refused even where no element is read.
    int lda = (int)qlora__max(g->lda, 1);
    int ldb = (int)qlora__max(g->ldb, 1);
    int ldc = (int)qlora__max(g->ldc, 1);
    int M = (int)g->M;
    int N = (int)g->N;
    int K = (int)g->K;
    const void* alpha = &g->alpha;
    const void* beta = &g->beta;
    if (g->alpha_dev != NULL) {
        alpha = g->alpha_dev;
        beta = g->beta_dev;
        QLORA__TRY(qlora__blas(
            ctx, gpu->blas.SetPointerMode(gpu->cublas, QLORA__CUBLAS_POINTER_MODE_DEVICE),
            "cublasSetPointerMode"));
    }
    int status = 0;
    const char* what = "cublasGemmEx";
    if (g->batch == 1) {
        status = gpu->blas.GemmEx(gpu->cublas, op_b, op_a, N, M, K, alpha, g->B, in, ldb, g->A, in, lda,
                                  beta, g->C, out, ldc, compute, QLORA__CUBLAS_GEMM_DEFAULT);
    } else {
        what = "cublasGemmStridedBatchedEx";
        status = gpu->blas.GemmStridedBatchedEx(
            gpu->cublas, op_b, op_a, N, M, K, alpha, g->B, in, ldb, g->sB, g->A, in, lda, g->sA, beta,
            g->C, out, ldc, g->sC, (int)g->batch, compute, QLORA__CUBLAS_GEMM_DEFAULT);
    }
    if (g->alpha_dev != NULL) {
        int reset = gpu->blas.SetPointerMode(gpu->cublas, QLORA__CUBLAS_POINTER_MODE_HOST);
        status = status != 0 ? status : reset;
    }
    return qlora__blas(ctx, status, what);
}

// ---- mixed operands ---------------------------------------------------------------------------------

// Writes the power of two that keeps an f32 matrix inside f16, and alpha over it, to scale[0..1].
static qlora_result qlora__cast_scale(qlora_ctx* ctx, const void* data, int64_t rows, int64_t cols,
                                      int64_t ld, float alpha, float* scale) {
    int64_t blocks = qlora__min(qlora__max(rows * qlora__ceil_div(cols, 2048), 1), 1024);
    int32_t count = (int32_t)blocks;
    void* partials = NULL;
    QLORA__TRY(qlora__scratch(ctx, (size_t)blocks * 4, &partials));
    void* absmax_args[] = {(void*)&data, &rows, &cols, &ld, &partials};
    QLORA__TRY(qlora__launch(ctx, QLORA__K_cast_absmax_f32, blocks, 1, 1, 256, 0, absmax_args));
    void* scale_args[] = {&partials, &count, &alpha, &scale};
    return qlora__launch(ctx, QLORA__K_cast_scale, 1, 1, 1, 256, 0, scale_args);
}

// Casts one f32 operand to the type of the other, into the scratch, and points the product at it.
static qlora_result qlora__gemm_cast(qlora_ctx* ctx, qlora__gemm* g) {
    bool cast_a = g->a_type == QLORA_F32;
    qlora_dtype type = cast_a ? g->b_type : g->a_type;
    const void* data = cast_a ? g->A : g->B;
    int64_t ld = cast_a ? g->lda : g->ldb;
    bool trans = cast_a ? g->ta : g->tb;
    int64_t rows = cast_a ? (trans ? g->K : g->M) : (trans ? g->N : g->K);
    int64_t cols = cast_a ? (trans ? g->M : g->K) : (trans ? g->K : g->N);
    if (g->batch > 1) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "a batch with one f32 and one 16-bit operand; cast it first");
    }
    int64_t new_ld = (int64_t)qlora__align_up((size_t)cols, 8);
    size_t bytes = 0;
    if (!qlora__mul((size_t)rows, (size_t)new_ld * 2, &bytes)) {
        return qlora__fail(ctx, QLORA_ERR_LIMIT, "the size of the cast overflows");
    }
    void* copy = NULL;
    QLORA__TRY(qlora__scratch(ctx, bytes, &copy));
    const float* scale = NULL;
    if (type == QLORA_F16) {
        void* factors = NULL; // scale, alpha / scale, beta
        QLORA__TRY(qlora__scratch(ctx, 3 * sizeof(float), &factors));
        float* f = (float*)factors;
        QLORA__TRY(qlora__cast_scale(ctx, data, rows, cols, ld, g->alpha, f));
        qlora__CUdeviceptr beta = (qlora__CUdeviceptr)(uintptr_t)(f + 2);
        int code = ctx->gpu->cu.MemsetD32Async(beta, qlora__bits(g->beta), 1, ctx->gpu->stream);
        QLORA__TRY(qlora__cu(ctx, code, "cuMemsetD32Async"));
        scale = f;
        g->alpha = 1.0f;
        g->alpha_dev = f + 1;
        g->beta_dev = f + 2;
    }
    void* args[] = {(void*)&data, &copy, &rows, &cols, &ld, &new_ld, (void*)&scale};
    int64_t pieces = rows * qlora__ceil_div(cols, 2048);
    QLORA__TRY(qlora__launch(ctx,
                             type == QLORA_F16 ? QLORA__K_cast_f32_f16 : QLORA__K_cast_f32_bf16,
                             qlora__min(pieces, 4096), 1, 1, 256, 0, args));
    *(cast_a ? &g->A : &g->B) = copy;
    *(cast_a ? &g->lda : &g->ldb) = new_ld;
    *(cast_a ? &g->a_type : &g->b_type) = type;
    return QLORA_OK;
}

static qlora_result qlora__gemm_gpu(qlora_ctx* ctx, qlora__gemm* g, qlora_path path) {
    if (g->K == 0) { // nothing is added; cuBLAS would not clear C
        size_t size = qlora_dtype_bytes(g->out);
        for (int64_t i = 0; i < g->batch && g->beta == 0.0f; i++) {
            QLORA__TRY(qlora__zero(ctx, (char*)g->C + (size_t)(i * g->sC) * size, (size_t)g->ldc * size,
                                   (size_t)g->N * size, (size_t)g->M));
        }
        if (g->beta == 0.0f || g->beta == 1.0f) {
            return QLORA_OK;
        }
    }
    if (g->a_type != g->b_type) {
        QLORA__TRY(qlora__gemm_cast(ctx, g));
    }
    return path == QLORA_PATH_CUBLAS ? qlora__gemm_cublas(ctx, g) : qlora__gemm_ptx(ctx, g);
}

static bool qlora__has_cublas(const qlora_ctx* ctx) {
    return ctx->gpu != NULL && ctx->gpu->cublas != NULL;
}

#else

static qlora_result qlora__gemm_gpu(qlora_ctx* ctx, qlora__gemm* g, qlora_path path) {
    (void)g;
    (void)path;
    return qlora__no_kernels(ctx);
}

static bool qlora__has_cublas(const qlora_ctx* ctx) {
    (void)ctx;
    return false;
}

#endif // QLORA_NO_CUDA

// ---- the operator ---------------------------------------------------------------------------------

const char* qlora_path_name(qlora_path path) {
    static const char* const names[] = {"auto", "CPU", "PTX", "cuBLAS"};
    return (int)path >= 0 && path <= QLORA_PATH_CUBLAS ? names[path] : "unknown";
}

qlora_path qlora_ctx_last_path(const qlora_ctx* ctx) {
    return ctx != NULL ? ctx->last_path : QLORA_PATH_AUTO;
}

static qlora_result qlora__gemm_choose_path(qlora_ctx* ctx, qlora_path wanted, qlora_path* out) {
    bool cpu = qlora__on_cpu(ctx);
    if ((int)wanted < 0 || wanted > QLORA_PATH_CUBLAS) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%d is no path", (int)wanted);
    }
    if ((wanted == QLORA_PATH_CPU && !cpu) ||
        (cpu && wanted != QLORA_PATH_CPU && wanted != QLORA_PATH_AUTO)) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED, "path %s is not there on a %s context",
                           qlora_path_name(wanted), cpu ? "CPU" : "CUDA");
    }
    if (wanted == QLORA_PATH_CUBLAS && !qlora__has_cublas(ctx)) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "path cuBLAS was asked for, but none is bound (see qlora_describe)");
    }
    *out = wanted != QLORA_PATH_AUTO ? wanted
                                     : cpu ? QLORA_PATH_CPU
                                           : qlora__has_cublas(ctx) ? QLORA_PATH_CUBLAS : QLORA_PATH_PTX;
    return QLORA_OK;
}

static qlora_result qlora__gemm_check_types(qlora_ctx* ctx, const qlora_tensor* a,
                                            const qlora_tensor* b, const qlora_tensor* c) {
    bool mixed = (a->dtype == QLORA_F32) != (b->dtype == QLORA_F32);
    bool fits = a->dtype == b->dtype || mixed;
    if (c->dtype == QLORA_BF16) {
        fits = a->dtype == QLORA_BF16 && b->dtype == QLORA_BF16;
    }
    if (!fits || c->dtype == QLORA_F16) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED, "no product of %s and %s into %s",
                           qlora_dtype_name(a->dtype), qlora_dtype_name(b->dtype),
                           qlora_dtype_name(c->dtype));
    }
    return QLORA_OK;
}

// The matrices of a batched output may be side by side in one row (heads), but not on top of each other.
static bool qlora__batch_disjoint(const qlora_tensor* c) {
    int64_t span = (c->rows - 1) * c->ld + c->cols;
    return c->batch <= 1 || c->rows == 0 || c->batch_stride >= span ||
           (c->batch_stride >= c->cols && c->batch_stride * c->batch <= c->ld);
}

static qlora_result qlora__gemm_check(qlora_ctx* ctx, const qlora_gemm_desc* d, const qlora_tensor* a,
                                      const qlora_tensor* b, const qlora_tensor* c, qlora__gemm* g) {
    QLORA__TRY(qlora__need_batch(ctx, c, "C", QLORA__IS_FLOAT, -1, -1, -1));
    int64_t batch = c->batch;
    QLORA__TRY(qlora__need_batch(ctx, a, "A", QLORA__IS_FLOAT, a != NULL && a->batch == 1 ? 1 : batch,
                                 -1, -1));
    g->K = d->trans_a ? a->rows : a->cols;
    QLORA__TRY(qlora__need_batch(ctx, a, "A", QLORA__IS_FLOAT, -1, d->trans_a ? -1 : c->rows,
                                 d->trans_a ? c->rows : -1));
    QLORA__TRY(qlora__need_batch(ctx, b, "B", QLORA__IS_FLOAT, b != NULL && b->batch == 1 ? 1 : batch,
                                 d->trans_b ? c->cols : g->K, d->trans_b ? g->K : c->cols));
    QLORA__TRY(qlora__gemm_check_types(ctx, a, b, c));
    QLORA__TRY(qlora__need_apart(ctx, "C", c, "A", a));
    QLORA__TRY(qlora__need_apart(ctx, "C", c, "B", b));
    if (!qlora__batch_disjoint(c)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "the matrices of C overlap (batch stride %lld)",
                           (long long)c->batch_stride);
    }
    const int64_t sizes[] = {c->rows, c->cols, g->K, a->ld, b->ld, c->ld, batch};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        if (sizes[i] > INT32_MAX - 256) {
            return qlora__fail(ctx, QLORA_ERR_LIMIT, "%lld is beyond the 31 bits of a GEMM's sizes",
                               (long long)sizes[i]);
        }
    }
    g->ta = d->trans_a;
    g->tb = d->trans_b;
    g->M = c->rows;
    g->N = c->cols;
    g->A = a->data;
    g->B = b->data;
    g->C = c->data;
    g->lda = a->ld;
    g->ldb = b->ld;
    g->ldc = c->ld;
    g->batch = batch;
    g->sA = a->batch == 1 ? 0 : a->batch_stride;
    g->sB = b->batch == 1 ? 0 : b->batch_stride;
    g->sC = c->batch_stride;
    g->a_type = a->dtype;
    g->b_type = b->dtype;
    g->out = c->dtype;
    g->alpha = d->alpha;
    g->beta = d->beta;
    g->tf32 = d->tf32 && a->dtype == QLORA_F32 && b->dtype == QLORA_F32;
    return QLORA_OK;
}

static qlora_result qlora__gemm_run(qlora_ctx* ctx, const qlora_gemm_desc* desc, const qlora_tensor* a,
                                    const qlora_tensor* b, const qlora_tensor* c) {
    if (desc == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "desc is NULL");
    }
    qlora__gemm g;
    memset(&g, 0, sizeof g);
    qlora_path path = QLORA_PATH_AUTO;
    QLORA__TRY(qlora__gemm_choose_path(ctx, desc->path, &path));
    QLORA__TRY(qlora__gemm_check(ctx, desc, a, b, c, &g));
    ctx->last_path = path;
    if (g.M == 0 || g.N == 0 || g.batch == 0) {
        return QLORA_OK;
    }
    return path == QLORA_PATH_CPU ? qlora__gemm_cpu(ctx, &g) : qlora__gemm_gpu(ctx, &g, path);
}

qlora_result qlora_gemm(qlora_ctx* ctx, const qlora_gemm_desc* desc, const qlora_tensor* a,
                        const qlora_tensor* b, const qlora_tensor* c) {
    QLORA__ENTER(ctx, "qlora_gemm");
    return qlora__leave(ctx, qlora__gemm_run(ctx, desc, a, b, c));
}

// The three named products. backward: TF32 only when the context says "all".
static qlora_result qlora__gemm_named(qlora_ctx* ctx, bool trans_a, bool trans_b, bool backward,
                                      uint32_t flags, const qlora_tensor* a, const qlora_tensor* b,
                                      const qlora_tensor* c) {
    uint32_t both_paths = QLORA_GEMM_PTX | QLORA_GEMM_CUBLAS;
    uint32_t both_modes = QLORA_GEMM_TF32 | QLORA_GEMM_EXACT;
    if (flags > 31 || (flags & both_paths) == both_paths || (flags & both_modes) == both_modes) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "flags %u contradict each other or are unknown",
                           flags);
    }
    qlora_gemm_desc d;
    memset(&d, 0, sizeof d);
    d.trans_a = trans_a;
    d.trans_b = trans_b;
    d.alpha = 1.0f;
    d.beta = (flags & QLORA_GEMM_ACCUMULATE) != 0 ? 1.0f : 0.0f;
    d.tf32 = backward ? ctx->desc.math == QLORA_MATH_TF32_ALL : ctx->desc.math != QLORA_MATH_F32;
    if ((flags & both_modes) != 0) {
        d.tf32 = (flags & QLORA_GEMM_TF32) != 0;
    }
    d.path = (flags & QLORA_GEMM_PTX) != 0      ? QLORA_PATH_PTX
             : (flags & QLORA_GEMM_CUBLAS) != 0 ? QLORA_PATH_CUBLAS
                                                : QLORA_PATH_AUTO;
    return qlora__gemm_run(ctx, &d, a, b, c);
}

qlora_result qlora_gemm_forward(qlora_ctx* ctx, const qlora_tensor* a, const qlora_tensor* b,
                                const qlora_tensor* c, uint32_t flags) {
    QLORA__ENTER(ctx, "qlora_gemm_forward");
    return qlora__leave(ctx, qlora__gemm_named(ctx, false, false, false, flags, a, b, c));
}

qlora_result qlora_gemm_backward_a(qlora_ctx* ctx, const qlora_tensor* dc, const qlora_tensor* b,
                                   const qlora_tensor* da, uint32_t flags) {
    QLORA__ENTER(ctx, "qlora_gemm_backward_a");
    return qlora__leave(ctx, qlora__gemm_named(ctx, false, true, true, flags, dc, b, da));
}

qlora_result qlora_gemm_backward_b(qlora_ctx* ctx, const qlora_tensor* a, const qlora_tensor* dc,
                                   const qlora_tensor* db, uint32_t flags) {
    QLORA__ENTER(ctx, "qlora_gemm_backward_b");
    return qlora__leave(ctx, qlora__gemm_named(ctx, true, false, true, flags, a, dc, db));
}

// ---- pre-warm -------------------------------------------------------------------------------------

static qlora_result qlora__shape_check(qlora_ctx* ctx, qlora_shape* s) {
    if (s->kv_heads == 0) {
        s->kv_heads = s->heads;
    }
    if (s->head_dim == 0 && s->heads > 0) {
        s->head_dim = s->hidden / s->heads;
    }
    const int64_t sizes[] = {s->hidden, s->intermediate, s->heads, s->kv_heads, s->head_dim,
                             s->max_tokens};
    static const char* const names[] = {"hidden",   "intermediate", "heads",
                                        "kv_heads", "head_dim",     "max_tokens"};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        if (sizes[i] <= 0 || sizes[i] > (1 << 24)) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "shape.%s is %lld", names[i],
                               (long long)sizes[i]);
        }
    }
    if (s->rank < 0 || s->rank > 4096 || s->heads % s->kv_heads != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "shape.rank is %lld, heads %lld must be a multiple of kv_heads %lld",
                           (long long)s->rank, (long long)s->heads, (long long)s->kv_heads);
    }
    if ((int)s->base < 0 || s->base > QLORA_BASE_32BIT ||
        (s->compute != QLORA_F32 && s->compute != QLORA_BF16)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "shape.base or shape.compute is unknown");
    }
    return QLORA_OK;
}

#ifndef QLORA_NO_CUDA

// The products of one projection of a layer, for T tokens: y = x W^T and its gradients, and LoRA's four.
typedef struct qlora__planned_gemm {
    int64_t M;
    int64_t N;
    int64_t K;
    bool ta;
    bool tb;
    bool f32_out; // gradients of A and B
} qlora__planned_gemm;

static qlora_result qlora__prewarm_gemm(qlora_ctx* ctx, const qlora__planned_gemm* p,
                                        qlora_dtype compute, const qlora__buffer* memory) {
    qlora__gemm g;
    memset(&g, 0, sizeof g);
    g.M = p->M;
    g.N = p->N;
    g.K = p->K;
    g.ta = p->ta;
    g.tb = p->tb;
    g.lda = p->ta ? p->M : p->K;
    g.ldb = p->tb ? p->K : p->N;
    g.ldc = p->N;
    g.batch = 1;
    g.a_type = compute;
    g.b_type = compute;
    g.out = p->f32_out ? QLORA_F32 : compute;
    g.alpha = 1.0f;
    size_t size = qlora_dtype_bytes(compute);
    size_t a_bytes = qlora__align_up((size_t)(p->M * p->K) * size, 256);
    size_t b_bytes = qlora__align_up((size_t)(p->K * p->N) * size, 256);
    QLORA_ASSERT(a_bytes + b_bytes + (size_t)(p->M * p->N) * 4 <= memory->bytes);
    g.A = memory->data;
    g.B = (char*)memory->data + a_bytes;
    g.C = (char*)memory->data + a_bytes + b_bytes;
    return qlora__gemm_cublas(ctx, &g);
}

// Runs every planned product once: cuBLAS loads its kernels now, while memory is free, and not in the
// middle of a capture.
static qlora_result qlora__prewarm_cublas(qlora_ctx* ctx, const qlora_shape* s) {
    int64_t q = s->heads * s->head_dim;
    int64_t kv = s->kv_heads * s->head_dim;
    int64_t T = s->max_tokens;
    const int64_t widths[4][3] = {{s->hidden, q + 2 * kv, 3 * s->rank}, // in, out, stacked rank
                                  {q, s->hidden, s->rank},
                                  {s->hidden, 2 * s->intermediate, 2 * s->rank},
                                  {s->intermediate, s->hidden, s->rank}};
    qlora__planned_gemm plan[24];
    int count = 0;
    size_t most = 0;
    for (int i = 0; i < 4; i++) {
        int64_t in = widths[i][0];
        int64_t out = widths[i][1];
        int64_t r = widths[i][2];
        const qlora__planned_gemm rows[] = {
            {T, out, in + r, false, true, false}, // y = [x z] [W sB]^T
            {T, in, out + r, false, false, false}, // dx = [dy u] [W ; A]
            {T, r, in, false, true, false},        // z = x A^T
            {T, r, out, false, false, false},      // u = dy sB
            {r, in, T, true, false, true},         // dA = u^T x
            {out, r, T, true, false, true},        // dB = dy^T z
        };
        int used = s->rank > 0 ? 6 : 2;
        for (int j = 0; j < used; j++) {
            const qlora__planned_gemm* p = &rows[j];
            size_t bytes = (size_t)(p->M * p->K + p->K * p->N + p->M * p->N) * 4 + 1024;
            most = bytes > most ? bytes : most;
            plan[count++] = *p;
        }
    }
    qlora__buffer* memory = NULL;
    QLORA__TRY(qlora__buffer_create(ctx, most, &memory));
    qlora_result r = qlora__zero(ctx, memory->data, most, most, 1);
    for (int i = 0; i < count && r == QLORA_OK; i++) {
        r = qlora__prewarm_gemm(ctx, &plan[i], s->compute, memory);
    }
    if (r == QLORA_OK) {
        r = qlora__sync(ctx);
    }
    qlora__buffer_destroy(ctx, memory);
    return r;
}

static qlora_result qlora__prewarm_gpu(qlora_ctx* ctx, const qlora_shape* s) {
    qlora__cache* cache = ctx->gpu->cache;
    double start = qlora__clock_ms();
    bool was_sealed = cache->info.sealed;
    uint32_t have = (qlora__has_cublas(ctx) ? 0 : QLORA__NEED_GEMM) |
                    (s->compute == QLORA_BF16 ? QLORA__NEED_BF16 : QLORA__NEED_F32) |
                    (s->base == QLORA_BASE_NF4 ? QLORA__NEED_NF4 : 0) |
                    (s->rank > 0 ? QLORA__NEED_LORA : 0);
    cache->info.sealed = false;
    qlora_result r = qlora__cache_warm(ctx, have);
    if (r == QLORA_OK && qlora__has_cublas(ctx)) {
        r = qlora__prewarm_cublas(ctx, s);
    }
    if (r != QLORA_OK) {
        cache->info.sealed = was_sealed;
        return r;
    }
    cache->info.sealed = true;
    QLORA__LOG(ctx, INFO, PREWARM, "%u modules, %u kernels, %u cuBLAS shapes in %.1f ms",
               cache->info.modules, cache->info.kernels, cache->info.cublas_shapes,
               qlora__clock_ms() - start);
    return QLORA_OK;
}

#endif

static qlora_result qlora__prewarm(qlora_ctx* ctx, const qlora_shape* shape) {
    if (shape == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "shape is NULL");
    }
    qlora_shape s = *shape;
    QLORA__TRY(qlora__shape_check(ctx, &s));
    QLORA__TRY(qlora__not_in_capture(ctx, "pre-warming"));
#ifndef QLORA_NO_CUDA
    if (!qlora__on_cpu(ctx)) {
        return qlora__prewarm_gpu(ctx, &s);
    }
#endif
    return QLORA_OK; // nothing is compiled on the CPU
}

qlora_result qlora_prewarm(qlora_ctx* ctx, const qlora_shape* shape) {
    QLORA__ENTER(ctx, "qlora_prewarm");
    return qlora__leave(ctx, qlora__prewarm(ctx, shape));
}

//@@ OPS        - operators: the formula, the CPU loop, the launch

// ---- gradient clip (ALB-078) ------------------------------------------------------------------------
//
//   norm[g]  = sqrt(sum over the gradients of group g of x^2)
//   scale[g] = min(1, max_norm / (norm[g] + 1e-6)), or 1 when norm[g] is not finite or max_norm < 0
//   x       *= scale of its group
//
// Gradients are cut into chunks of 8192 elements; sums go chunk by chunk in a fixed order, in double.

#define QLORA__CLIP_CHUNK 8192

typedef struct qlora__clip_part { // as struct clip_tensor of kernels/clip.cu
    float* data;
    int64_t count;
} qlora__clip_part;

typedef struct qlora__clip_chunk { // as struct clip_chunk there
    int32_t part;
    int32_t group;
    int64_t index;
} qlora__clip_chunk;

struct qlora_clip {
    qlora_ctx* owner;
    int32_t groups;
    int64_t parts;
    int64_t chunks;
    qlora__buffer* memory; // everything below, device memory on CUDA
    qlora__clip_part* part_table;
    qlora__clip_chunk* chunk_table;
    int64_t* first;    // [groups + 1] chunk index
    double* partials;  // [chunks]
    float* results;    // [groups][2]: norm, scale
    uint32_t* flags;   // [groups]: 1 = not finite
    uint32_t* any;     // [1]: 1 = some group was not finite; the optimizer reads it
    float* max_norm;   // [1]
};

// Lays the tables out one behind the other; with base NULL only counts the bytes.
static size_t qlora__clip_layout(qlora_clip* clip, char* base) {
    size_t at = 0;
#define QLORA__PLACE(field, type, count)                                                           \
    do {                                                                                           \
        clip->field = base != NULL ? (type*)(void*)(base + at) : NULL;                             \
        at += qlora__align_up((size_t)(count) * sizeof(type), 256);                                \
    } while (0)
    QLORA__PLACE(part_table, qlora__clip_part, clip->parts);
    QLORA__PLACE(chunk_table, qlora__clip_chunk, clip->chunks);
    QLORA__PLACE(first, int64_t, clip->groups + 1);
    QLORA__PLACE(partials, double, clip->chunks);
    QLORA__PLACE(results, float, 2 * clip->groups);
    QLORA__PLACE(flags, uint32_t, clip->groups);
    QLORA__PLACE(any, uint32_t, 1);
    QLORA__PLACE(max_norm, float, 1);
#undef QLORA__PLACE
    return at;
}

// A tensor with gaps between its rows counts as one part per row.
static int64_t qlora__clip_parts_of(const qlora_tensor* t) {
    if (t->rows == 0 || t->cols == 0) {
        return 0;
    }
    return t->ld == t->cols || t->rows == 1 ? 1 : t->rows;
}

static qlora_result qlora__clip_count(qlora_ctx* ctx, const qlora_tensor* const* tensors,
                                      const int32_t* groups, size_t n, qlora_clip* clip) {
    clip->groups = 1;
    for (size_t i = 0; i < n; i++) {
        char name[32];
        snprintf(name, sizeof name, "tensor %llu", (unsigned long long)i);
        QLORA__TRY(qlora__need(ctx, tensors[i], name, QLORA__IS_F32, -1, -1));
        int32_t group = groups != NULL ? groups[i] : 0;
        if (group < 0 || (size_t)group >= n) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "group %d of %s: groups count from 0 and are not more than tensors",
                               (int)group, name);
        }
        clip->groups = group >= clip->groups ? group + 1 : clip->groups;
        int64_t parts = qlora__clip_parts_of(tensors[i]);
        int64_t length = parts == 1 ? tensors[i]->rows * tensors[i]->cols : tensors[i]->cols;
        clip->parts += parts;
        clip->chunks += parts * qlora__ceil_div(length, QLORA__CLIP_CHUNK);
    }
    if (clip->parts > INT32_MAX || clip->chunks > INT32_MAX) {
        return qlora__fail(ctx, QLORA_ERR_LIMIT, "%lld pieces are too many", (long long)clip->chunks);
    }
    return QLORA_OK;
}

// Fills the host's image of the tables; the chunks of a group are neighbours.
static void qlora__clip_fill(const qlora_tensor* const* tensors, const int32_t* groups, size_t n,
                             qlora_clip* image) {
    int64_t chunk = 0;
    for (int32_t group = 0; group < image->groups; group++) {
        image->first[group] = chunk;
        int64_t part = 0;
        for (size_t i = 0; i < n; i++) {
            const qlora_tensor* t = tensors[i];
            int64_t parts = qlora__clip_parts_of(t);
            int64_t length = parts == 1 ? t->rows * t->cols : t->cols;
            for (int64_t p = 0; p < parts; p++, part++) {
                image->part_table[part].data = (float*)t->data + p * t->ld;
                image->part_table[part].count = length;
                for (int64_t j = 0; (groups != NULL ? groups[i] : 0) == group &&
                                    j * QLORA__CLIP_CHUNK < length;
                     j++) {
                    image->chunk_table[chunk].part = (int32_t)part;
                    image->chunk_table[chunk].group = group;
                    image->chunk_table[chunk].index = j;
                    chunk++;
                }
            }
        }
    }
    image->first[image->groups] = chunk;
    *image->max_norm = 1.0f;
}

static qlora_result qlora__clip_build(qlora_ctx* ctx, const qlora_tensor* const* tensors,
                                      const int32_t* groups, size_t n, qlora_clip* clip) {
    QLORA__TRY(qlora__clip_count(ctx, tensors, groups, n, clip));
    size_t bytes = qlora__clip_layout(clip, NULL);
    char* host = (char*)qlora__alloc_zero(ctx, bytes);
    if (host == NULL) {
        return QLORA_ERR_MEMORY;
    }
    qlora__clip_layout(clip, host);
    qlora__clip_fill(tensors, groups, n, clip);
    qlora_result r = qlora__buffer_create(ctx, bytes, &clip->memory);
    if (r == QLORA_OK) {
        r = qlora__copy_in(ctx, clip->memory->data, host, bytes);
        qlora__clip_layout(clip, (char*)clip->memory->data);
    }
    qlora__free(ctx, host, bytes);
    return r;
}

static qlora_result qlora__clip_create(qlora_ctx* ctx, const qlora_tensor* const* tensors,
                                       const int32_t* groups, size_t n, qlora_clip** out) {
    if (out == NULL || (tensors == NULL && n > 0)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is NULL", out == NULL ? "out" : "tensors");
    }
    QLORA__TRY(qlora__not_in_capture(ctx, "making a clip"));
    qlora_clip* clip = (qlora_clip*)qlora__alloc_zero(ctx, sizeof *clip);
    if (clip == NULL) {
        return QLORA_ERR_MEMORY;
    }
    clip->owner = ctx;
    qlora_result r = qlora__clip_build(ctx, tensors, groups, n, clip);
    if (r != QLORA_OK) {
        qlora__buffer_destroy(ctx, clip->memory);
        qlora__free(ctx, clip, sizeof *clip);
        return r;
    }
    ctx->children++;
    *out = clip;
    return QLORA_OK;
}

qlora_result qlora_clip_create(qlora_ctx* ctx, const qlora_tensor* const* tensors,
                               const int32_t* groups, size_t n, qlora_clip** out) {
    QLORA__ENTER(ctx, "qlora_clip_create");
    return qlora__leave(ctx, qlora__clip_create(ctx, tensors, groups, n, out));
}

static qlora_result qlora__clip_need(qlora_ctx* ctx, const qlora_clip* clip) {
    if (clip == NULL || clip->owner != ctx) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "clip %s",
                           clip == NULL ? "is NULL" : "belongs to another context");
    }
    return QLORA_OK;
}

static qlora_result qlora__clip_destroy(qlora_ctx* ctx, qlora_clip* clip) {
    if (clip == NULL) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__clip_need(ctx, clip));
    QLORA__TRY(qlora__not_in_capture(ctx, "freeing memory"));
    qlora__buffer_destroy(ctx, clip->memory);
    qlora__free(ctx, clip, sizeof *clip);
    ctx->children--;
    return QLORA_OK;
}

qlora_result qlora_clip_destroy(qlora_ctx* ctx, qlora_clip* clip) {
    QLORA__TRY(qlora__enter_destroy(ctx, "qlora_clip_destroy"));
    return qlora__leave(ctx, qlora__clip_destroy(ctx, clip));
}

static qlora_result qlora__clip_set(qlora_ctx* ctx, qlora_clip* clip, float max_norm) {
    QLORA__TRY(qlora__clip_need(ctx, clip));
    if ((qlora__bits(max_norm) & 0x7fffffffu) > 0x7f800000u) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "max_norm is not a number");
    }
#ifndef QLORA_NO_CUDA
    if (!qlora__on_cpu(ctx)) {
        qlora__CUdeviceptr at = (qlora__CUdeviceptr)(uintptr_t)clip->max_norm;
        int code = ctx->gpu->cu.MemsetD32Async(at, qlora__bits(max_norm), 1, ctx->gpu->stream);
        return qlora__cu(ctx, code, "cuMemsetD32Async");
    }
#endif
    *clip->max_norm = max_norm;
    return QLORA_OK;
}

qlora_result qlora_clip_set(qlora_ctx* ctx, qlora_clip* clip, float max_norm) {
    QLORA__ENTER(ctx, "qlora_clip_set");
    return qlora__leave(ctx, qlora__clip_set(ctx, clip, max_norm));
}

static void qlora__clip_squares_cpu(void* user, int64_t begin, int64_t end) {
    const qlora_clip* clip = (const qlora_clip*)user;
    for (int64_t i = begin; i < end; i++) {
        const qlora__clip_chunk* c = &clip->chunk_table[i];
        const qlora__clip_part* part = &clip->part_table[c->part];
        int64_t from = c->index * QLORA__CLIP_CHUNK;
        int64_t to = qlora__min(from + QLORA__CLIP_CHUNK, part->count);
        double sum = 0.0;
        for (int64_t j = from; j < to; j++) {
            double x = (double)qlora__load(part->data, QLORA_F32, j);
            sum += x * x;
        }
        clip->partials[i] = sum;
    }
}

static void qlora__clip_apply_cpu(void* user, int64_t begin, int64_t end) {
    const qlora_clip* clip = (const qlora_clip*)user;
    for (int64_t i = begin; i < end; i++) {
        const qlora__clip_chunk* c = &clip->chunk_table[i];
        const qlora__clip_part* part = &clip->part_table[c->part];
        float scale = clip->results[2 * c->group + 1];
        int64_t from = c->index * QLORA__CLIP_CHUNK;
        int64_t to = qlora__min(from + QLORA__CLIP_CHUNK, part->count);
        for (int64_t j = from; j < to && scale != 1.0f; j++) {
            QLORA__REAL x = qlora__load(part->data, QLORA_F32, j);
            qlora__store(part->data, QLORA_F32, j, x * (QLORA__REAL)scale);
        }
    }
}

static void qlora__clip_cpu(qlora_ctx* ctx, qlora_clip* clip) {
    qlora__parallel(ctx, clip->chunks, 8, qlora__clip_squares_cpu, clip);
    *clip->any = 0;
    for (int32_t g = 0; g < clip->groups; g++) {
        double sum = 0.0;
        for (int64_t i = clip->first[g]; i < clip->first[g + 1]; i++) {
            sum += clip->partials[i];
        }
        float norm = (float)sqrt(sum);
        float limit = *clip->max_norm;
        float scale = limit / (norm + 1e-6f);
        bool finite = qlora__finite(norm);
        clip->results[2 * g] = norm;
        clip->results[2 * g + 1] = finite && limit >= 0.0f && scale < 1.0f ? scale : 1.0f;
        clip->flags[g] = finite ? 0 : 1;
        *clip->any |= clip->flags[g];
    }
    qlora__parallel(ctx, clip->chunks, 8, qlora__clip_apply_cpu, clip);
}

static qlora_result qlora__clip_apply(qlora_ctx* ctx, qlora_clip* clip) {
    QLORA__TRY(qlora__clip_need(ctx, clip));
    if (qlora__on_cpu(ctx)) {
        qlora__clip_cpu(ctx, clip);
        return QLORA_OK;
    }
    QLORA__TRY(qlora__capture_note(ctx, clip->memory->data));
    qlora_clip c = *clip; // parameters are passed by address
    void* squares[] = {&c.part_table, &c.chunk_table, &c.partials};
    QLORA__TRY(qlora__launch(ctx, QLORA__K_clip_squares, clip->chunks, 1, 1, 256, 0, squares));
    void* scale[] = {&c.partials, &c.first, &c.max_norm, &c.results, &c.flags};
    QLORA__TRY(qlora__launch(ctx, QLORA__K_clip_scale, clip->groups, 1, 1, 256, 0, scale));
    void* apply[] = {&c.part_table, &c.chunk_table, &c.chunks, &c.results, &c.flags, &c.groups, &c.any};
    return qlora__launch(ctx, QLORA__K_clip_apply, qlora__max(clip->chunks, 1), 1, 1, 256, 0, apply);
}

qlora_result qlora_clip_apply(qlora_ctx* ctx, qlora_clip* clip) {
    QLORA__ENTER(ctx, "qlora_clip_apply");
    return qlora__leave(ctx, qlora__clip_apply(ctx, clip));
}

static qlora_result qlora__clip_read(qlora_ctx* ctx, qlora_clip* clip, int32_t group,
                                     qlora_clip_info* out) {
    QLORA__TRY(qlora__clip_need(ctx, clip));
    if (out == NULL || group < 0 || group >= clip->groups) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL, or there is no group %d of %d",
                           (int)group, (int)clip->groups);
    }
    float result[2];
    uint32_t flag = 0;
    QLORA__TRY(qlora__copy_out(ctx, result, clip->results + 2 * group, sizeof result));
    QLORA__TRY(qlora__copy_out(ctx, &flag, clip->flags + group, sizeof flag));
    out->norm = result[0];
    out->scale = result[1];
    out->finite = flag == 0;
    return QLORA_OK;
}

qlora_result qlora_clip_read(qlora_ctx* ctx, qlora_clip* clip, int32_t group, qlora_clip_info* out) {
    QLORA__ENTER(ctx, "qlora_clip_read");
    return qlora__leave(ctx, qlora__clip_read(ctx, clip, group, out));
}

#define QLORA__PI 3.14159265358979323846

// ---- what the operators share: checks, launch shapes --------------------------------------------

// The mask of one dtype, for qlora__need.
static unsigned qlora__is(qlora_dtype dtype) {
    return 1u << (unsigned)dtype;
}

#define QLORA__IS_F32_BF16 (QLORA__IS_F32 | QLORA__IS_BF16)

// An output may be an input only as the very same elements.
static qlora_result qlora__need_same_or_apart(qlora_ctx* ctx, const char* name,
                                              const qlora_tensor* t, const char* other_name,
                                              const qlora_tensor* other) {
    if (t->data == other->data && t->ld == other->ld && t->cols == other->cols &&
        t->dtype == other->dtype) {
        return QLORA_OK;
    }
    return qlora__need_apart(ctx, name, t, other_name, other);
}

// A vector: one row of `count` elements.
static qlora_result qlora__need_vector(qlora_ctx* ctx, const qlora_tensor* t, const char* name,
                                       unsigned mask, int64_t count) {
    return qlora__need(ctx, t, name, mask, 1, count);
}

// Elements in the 16-byte piece that a thread of the vector kernels owns.
static int64_t qlora__piece(qlora_dtype dtype) {
    return dtype == QLORA_F32 || dtype == QLORA_I32 ? 4 : 8;
}

static uint32_t qlora__grid_cap(int64_t blocks) {
    return (uint32_t)(blocks < 65535 ? blocks : 65535);
}

// Blocks along the columns and threads of an element-wise kernel.
typedef struct qlora__point_shape {
    uint32_t blocks;
    uint32_t threads;
} qlora__point_shape;

static qlora__point_shape qlora__point_shape_of(int64_t cols, int64_t piece) {
    int64_t pieces = qlora__ceil_div(cols, piece);
    int64_t threads = pieces < 256 ? qlora__ceil_div(pieces, 32) * 32 : 256;
    qlora__point_shape shape;
    shape.threads = (uint32_t)(threads > 0 ? threads : 32);
    shape.blocks = (uint32_t)qlora__ceil_div(pieces, (int64_t)shape.threads);
    return shape;
}

// Threads of a kernel that reduces rows: `width` of them per row, `rows` rows per block.
typedef struct qlora__row_shape {
    int32_t width;
    uint32_t threads;
    int64_t rows;
} qlora__row_shape;

static qlora__row_shape qlora__row_shape_of(int64_t cols, int64_t piece, int64_t max_threads) {
    int64_t owners = qlora__ceil_div(cols, piece);
    qlora__row_shape shape;
    if (owners <= 32) {
        shape.width = 1;
        while (shape.width < owners) {
            shape.width *= 2;
        }
        shape.threads = 256;
    } else {
        int64_t threads = qlora__ceil_div(owners, 32) * 32;
        shape.width = (int32_t)(threads < max_threads ? threads : max_threads);
        shape.threads = (uint32_t)shape.width;
    }
    shape.rows = (int64_t)shape.threads / shape.width;
    return shape;
}

// Rows and columns for a kernel. Same-shaped matrices without padding are one long row, whose leading
// dimension is nobody's business: 0, so that it never keeps the kernel from 16-byte accesses.
typedef struct qlora__extent {
    int64_t rows;
    int64_t cols;
    int64_t ld[6]; // of each tensor
} qlora__extent;

static qlora__extent qlora__extent_of(const qlora_tensor* const* tensors, int count) {
    qlora__extent e;
    memset(&e, 0, sizeof e);
    e.rows = tensors[0]->rows;
    e.cols = tensors[0]->cols;
    bool flat = true;
    for (int i = 0; i < count; i++) {
        e.ld[i] = tensors[i] != NULL ? tensors[i]->ld : 0;
        flat = flat && (tensors[i] == NULL || tensors[i]->ld == e.cols || e.rows == 1);
    }
    if (flat) {
        e.cols *= e.rows;
        e.rows = e.rows > 0 ? 1 : 0;
        memset(e.ld, 0, sizeof e.ld);
    }
    return e;
}

// A device word for error flags nobody asked for.
static qlora_result qlora__flag_pointer(qlora_ctx* ctx, const qlora_tensor* flag, void** out) {
    if (flag != NULL) {
        *out = flag->data;
        return QLORA_OK;
    }
    return qlora__scratch(ctx, sizeof(int32_t), out);
}

static qlora_result qlora__need_flag(qlora_ctx* ctx, const qlora_tensor* flag) {
    return flag == NULL ? QLORA_OK : qlora__need(ctx, flag, "flag", QLORA__IS_I32, 1, 1);
}

// I32 element i of a vector, on the CPU.
static int32_t qlora__index_at(const qlora_tensor* t, int64_t i) {
    return ((const int32_t*)t->data)[i];
}

// One matrix of a batch.
static qlora_tensor qlora__batch_at(const qlora_tensor* t, int64_t b) {
    qlora_tensor view = *t;
    view.data = (char*)t->data + (size_t)(b * t->batch_stride) * qlora_dtype_bytes(t->dtype);
    view.batch = 1;
    view.batch_stride = 0;
    return view;
}

// ---- element-wise -------------------------------------------------------------------------------
//
//   silu      y = a / (1 + e^-a)              silu'     y = b s (1 + a (1 - s)), s = 1 / (1 + e^-a)
//   swiglu    y = silu(a) b                   mul, add  y = a b, y = a + b
//   scale     y = alpha a                     fill      y = alpha

static QLORA__REAL qlora__sigmoid(QLORA__REAL x) {
    return 1 / (1 + qlora__exp(-x));
}

static QLORA__REAL qlora__silu_at(QLORA__REAL a, QLORA__REAL b, QLORA__REAL alpha) {
    (void)b;
    (void)alpha;
    return a * qlora__sigmoid(a);
}

static QLORA__REAL qlora__silu_grad_at(QLORA__REAL a, QLORA__REAL b, QLORA__REAL alpha) {
    (void)alpha;
    QLORA__REAL s = qlora__sigmoid(a);
    return b * s * (1 + a * (1 - s));
}

static QLORA__REAL qlora__swiglu_at(QLORA__REAL a, QLORA__REAL b, QLORA__REAL alpha) {
    (void)alpha;
    return a * qlora__sigmoid(a) * b;
}

static QLORA__REAL qlora__mul_at(QLORA__REAL a, QLORA__REAL b, QLORA__REAL alpha) {
    (void)alpha;
    return a * b;
}

static QLORA__REAL qlora__add_at(QLORA__REAL a, QLORA__REAL b, QLORA__REAL alpha) {
    (void)alpha;
    return a + b;
}

static QLORA__REAL qlora__scale_at(QLORA__REAL a, QLORA__REAL b, QLORA__REAL alpha) {
    (void)b;
    return alpha * a;
}

static QLORA__REAL qlora__fill_at(QLORA__REAL a, QLORA__REAL b, QLORA__REAL alpha) {
    (void)a;
    (void)b;
    return alpha;
}

typedef enum qlora__point_kind {
    QLORA__POINT_SILU,
    QLORA__POINT_SILU_GRAD,
    QLORA__POINT_SWIGLU,
    QLORA__POINT_MUL,
    QLORA__POINT_ADD,
    QLORA__POINT_SCALE,
    QLORA__POINT_FILL
} qlora__point_kind;

typedef struct qlora__point_op {
    QLORA__REAL (*apply)(QLORA__REAL a, QLORA__REAL b, QLORA__REAL alpha);
    qlora__kernel_id kernel_f32;
    qlora__kernel_id kernel_bf16;
    int inputs;
    bool has_alpha;
} qlora__point_op;

static const qlora__point_op qlora__point_ops[] = {
    {qlora__silu_at, QLORA__K_elementwise_silu_f32, QLORA__K_elementwise_silu_bf16, 1, false},
    {qlora__silu_grad_at, QLORA__K_elementwise_silu_bwd_f32, QLORA__K_elementwise_silu_bwd_bf16, 2,
     false},
    {qlora__swiglu_at, QLORA__K_elementwise_swiglu_f32, QLORA__K_elementwise_swiglu_bf16, 2, false},
    {qlora__mul_at, QLORA__K_elementwise_mul_f32, QLORA__K_elementwise_mul_bf16, 2, false},
    {qlora__add_at, QLORA__K_elementwise_add_f32, QLORA__K_elementwise_add_bf16, 2, false},
    {qlora__scale_at, QLORA__K_elementwise_scale_f32, QLORA__K_elementwise_scale_bf16, 1, true},
    {qlora__fill_at, QLORA__K_elementwise_fill_f32, QLORA__K_elementwise_fill_bf16, 0, true}};

typedef struct qlora__point_job {
    const qlora__point_op* op;
    const qlora_tensor* a;
    const qlora_tensor* b;
    const qlora_tensor* y;
    QLORA__REAL alpha;
} qlora__point_job;

static void qlora__point_rows(void* user, int64_t begin, int64_t end) {
    const qlora__point_job* job = (const qlora__point_job*)user;
    for (int64_t r = begin; r < end; r++) {
        for (int64_t c = 0; c < job->y->cols; c++) {
            QLORA__REAL a = job->a != NULL ? qlora__at(job->a, r, c) : 0;
            QLORA__REAL b = job->b != NULL ? qlora__at(job->b, r, c) : 0;
            qlora__put(job->y, r, c, job->op->apply(a, b, job->alpha));
        }
    }
}

// y = op(a, b, alpha); inputs the operator does not read are NULL.
static qlora_result qlora__point(qlora_ctx* ctx, qlora__point_kind kind, const qlora_tensor* a,
                                 const qlora_tensor* b, float alpha, const qlora_tensor* y) {
    const qlora__point_op* op = &qlora__point_ops[kind];
    QLORA__TRY(qlora__need(ctx, y, "output", QLORA__IS_F32_BF16, -1, -1));
    const qlora_tensor* inputs[2];
    inputs[0] = a;
    inputs[1] = b;
    for (int i = 0; i < op->inputs; i++) {
        const char* name = i == 0 ? "first input" : "second input";
        QLORA__TRY(qlora__need(ctx, inputs[i], name, qlora__is(y->dtype), y->rows, y->cols));
        QLORA__TRY(qlora__need_same_or_apart(ctx, "output", y, name, inputs[i]));
    }
    if (qlora__on_cpu(ctx)) {
        qlora__point_job job;
        job.op = op;
        job.a = a;
        job.b = b;
        job.y = y;
        job.alpha = (QLORA__REAL)alpha;
        qlora__parallel(ctx, y->rows, 1 + 4096 / (1 + y->cols), qlora__point_rows, &job);
        return QLORA_OK;
    }
    const qlora_tensor* all[3];
    all[op->inputs] = y;
    for (int i = 0; i < op->inputs; i++) {
        all[i] = inputs[i];
    }
    qlora__extent e = qlora__extent_of(all, op->inputs + 1);
    qlora__point_shape shape = qlora__point_shape_of(e.cols, qlora__piece(y->dtype));
    void* args[9];
    int n = 0;
    for (int i = 0; i <= op->inputs; i++) {
        args[n++] = (void*)&all[i]->data;
        args[n++] = &e.ld[i];
    }
    args[n++] = &e.rows;
    args[n++] = &e.cols;
    if (op->has_alpha) {
        args[n++] = &alpha;
    }
    return qlora__launch(ctx, y->dtype == QLORA_F32 ? op->kernel_f32 : op->kernel_bf16,
                         shape.blocks, qlora__grid_cap(e.rows), 1, shape.threads, 0, args);
}

qlora_result qlora_silu_forward(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* y) {
    QLORA__ENTER(ctx, "qlora_silu_forward");
    return qlora__leave(ctx, qlora__point(ctx, QLORA__POINT_SILU, x, NULL, 0, y));
}

qlora_result qlora_silu_backward(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* dy,
                                 const qlora_tensor* dx) {
    QLORA__ENTER(ctx, "qlora_silu_backward");
    return qlora__leave(ctx, qlora__point(ctx, QLORA__POINT_SILU_GRAD, x, dy, 0, dx));
}

qlora_result qlora_swiglu_forward(qlora_ctx* ctx, const qlora_tensor* gate, const qlora_tensor* up,
                                  const qlora_tensor* h) {
    QLORA__ENTER(ctx, "qlora_swiglu_forward");
    return qlora__leave(ctx, qlora__point(ctx, QLORA__POINT_SWIGLU, gate, up, 0, h));
}

qlora_result qlora_mul(qlora_ctx* ctx, const qlora_tensor* a, const qlora_tensor* b,
                       const qlora_tensor* y) {
    QLORA__ENTER(ctx, "qlora_mul");
    return qlora__leave(ctx, qlora__point(ctx, QLORA__POINT_MUL, a, b, 0, y));
}

qlora_result qlora_add(qlora_ctx* ctx, const qlora_tensor* a, const qlora_tensor* b,
                       const qlora_tensor* y) {
    QLORA__ENTER(ctx, "qlora_add");
    return qlora__leave(ctx, qlora__point(ctx, QLORA__POINT_ADD, a, b, 0, y));
}

qlora_result qlora_scale(qlora_ctx* ctx, float alpha, const qlora_tensor* x,
                         const qlora_tensor* y) {
    QLORA__ENTER(ctx, "qlora_scale");
    return qlora__leave(ctx, qlora__point(ctx, QLORA__POINT_SCALE, x, NULL, alpha, y));
}

qlora_result qlora_fill(qlora_ctx* ctx, float value, const qlora_tensor* y) {
    QLORA__ENTER(ctx, "qlora_fill");
    return qlora__leave(ctx, qlora__point(ctx, QLORA__POINT_FILL, NULL, NULL, value, y));
}

// ---- SwiGLU backward ----------------------------------------------------------------------------
//
// With s = 1 / (1 + e^-g):
//   dg = dh u s (1 + g (1 - s)),  du = dh g s,  h = g s u

typedef struct qlora__swiglu_job {
    const qlora_tensor* dh;
    const qlora_tensor* gate;
    const qlora_tensor* up;
    const qlora_tensor* dgate;
    const qlora_tensor* dup;
    const qlora_tensor* h;
} qlora__swiglu_job;

static void qlora__swiglu_backward_rows(void* user, int64_t begin, int64_t end) {
    const qlora__swiglu_job* job = (const qlora__swiglu_job*)user;
    for (int64_t r = begin; r < end; r++) {
        for (int64_t c = 0; c < job->dh->cols; c++) {
            QLORA__REAL dh = qlora__at(job->dh, r, c);
            QLORA__REAL g = qlora__at(job->gate, r, c);
            QLORA__REAL u = qlora__at(job->up, r, c);
            QLORA__REAL s = qlora__sigmoid(g);
            qlora__put(job->dgate, r, c, dh * u * s * (1 + g * (1 - s)));
            qlora__put(job->dup, r, c, dh * g * s);
            if (job->h != NULL) {
                qlora__put(job->h, r, c, g * s * u);
            }
        }
    }
}

static qlora_result qlora__swiglu_backward(qlora_ctx* ctx, qlora__swiglu_job* job) {
    const qlora_tensor* dh = job->dh;
    QLORA__TRY(qlora__need(ctx, dh, "dh", QLORA__IS_F32_BF16, -1, -1));
    unsigned type = qlora__is(dh->dtype);
    const qlora_tensor* in[3];
    in[0] = dh;
    in[1] = job->gate;
    in[2] = job->up;
    const qlora_tensor* out[3];
    out[0] = job->h;
    out[1] = job->dgate;
    out[2] = job->dup;
    static const char* const in_names[3] = {"dh", "gate", "up"};
    static const char* const out_names[3] = {"h", "dgate", "dup"};
    for (int i = 0; i < 3; i++) {
        QLORA__TRY(qlora__need(ctx, in[i], in_names[i], type, dh->rows, dh->cols));
    }
    for (int o = job->h == NULL ? 1 : 0; o < 3; o++) {
        QLORA__TRY(qlora__need(ctx, out[o], out_names[o], type, dh->rows, dh->cols));
    }
    for (int o = job->h == NULL ? 1 : 0; o < 3; o++) {
        for (int i = 0; i < 3; i++) {
            // An output may take the place of its own input, h of dh, dgate of gate, dup of up.
            QLORA__TRY(
                o == i ? qlora__need_same_or_apart(ctx, out_names[o], out[o], in_names[i], in[i])
                       : qlora__need_apart(ctx, out_names[o], out[o], in_names[i], in[i]));
        }
        for (int other = o + 1; other < 3; other++) {
            QLORA__TRY(qlora__need_apart(ctx, out_names[o], out[o], out_names[other], out[other]));
        }
    }
    if (qlora__on_cpu(ctx)) {
        qlora__parallel(ctx, dh->rows, 1 + 4096 / (1 + dh->cols), qlora__swiglu_backward_rows, job);
        return QLORA_OK;
    }
    const qlora_tensor* all[6] = {dh, in[1], in[2], out[1], out[2], out[0]};
    qlora__extent e = qlora__extent_of(all, 6);
    qlora__point_shape shape = qlora__point_shape_of(e.cols, qlora__piece(dh->dtype));
    void* h_data = job->h != NULL ? job->h->data : NULL;
    void* args[14];
    for (int i = 0; i < 5; i++) {
        args[2 * i] = (void*)&all[i]->data;
        args[2 * i + 1] = &e.ld[i];
    }
    args[10] = &h_data;
    args[11] = &e.ld[5];
    args[12] = &e.rows;
    args[13] = &e.cols;
    return qlora__launch(ctx,
                         dh->dtype == QLORA_F32 ? QLORA__K_elementwise_swiglu_bwd_f32
                                                : QLORA__K_elementwise_swiglu_bwd_bf16,
                         shape.blocks, qlora__grid_cap(e.rows), 1, shape.threads, 0, args);
}

qlora_result qlora_swiglu_backward(qlora_ctx* ctx, const qlora_tensor* dh, const qlora_tensor* gate,
                                   const qlora_tensor* up, const qlora_tensor* dgate,
                                   const qlora_tensor* dup, const qlora_tensor* h) {
    QLORA__ENTER(ctx, "qlora_swiglu_backward");
    qlora__swiglu_job job;
    job.dh = dh;
    job.gate = gate;
    job.up = up;
    job.dgate = dgate;
    job.dup = dup;
    job.h = h;
    return qlora__leave(ctx, qlora__swiglu_backward(ctx, &job));
}

// ---- RMSNorm ------------------------------------------------------------------------------------
//
// A row of x is cut into x->cols / w->cols heads of n = w->cols columns (one head for
// a plain norm), each by itself:
//   forward   x = h + delta, rounded to storage (only with delta);  r = 1 / sqrt(mean(x^2) + eps);
//             y = x r w
//   backward  dx = dres + r (w dy - x r^2 mean(w dy x));  dw += sum over rows and heads of dy x r

typedef struct qlora__norm_job {
    const qlora_tensor* x;     // input; with delta the addend
    const qlora_tensor* delta; // or NULL
    const qlora_tensor* sum;   // where x + delta goes
    const qlora_tensor* w;
    const qlora_tensor* y;
    const qlora_tensor* dy;
    const qlora_tensor* dres; // or NULL
    const qlora_tensor* dx;
    const qlora_tensor* dw; // or NULL
    float eps;
    QLORA__REAL* rstd; // [rows * heads], scratch of the weight's gradient
} qlora__norm_job;

// 1 / sqrt(mean(x^2) + eps) over n columns from `first`.
static QLORA__REAL qlora__norm_rstd(const qlora_tensor* x, int64_t row, int64_t first, int64_t n,
                                    float eps) {
    double squares = 0;
    for (int64_t c = first; c < first + n; c++) {
        double v = (double)qlora__at(x, row, c);
        squares += v * v;
    }
    return (QLORA__REAL)(1 / sqrt(squares / (double)n + (double)eps));
}

static void qlora__norm_forward_rows(void* user, int64_t begin, int64_t end) {
    const qlora__norm_job* job = (const qlora__norm_job*)user;
    int64_t n = job->w->cols;
    for (int64_t row = begin; row < end; row++) {
        const qlora_tensor* x = job->x;
        if (job->delta != NULL) {
            for (int64_t c = 0; c < x->cols; c++) {
                qlora__put(job->sum, row, c, qlora__at(x, row, c) + qlora__at(job->delta, row, c));
            }
            x = job->sum;
        }
        for (int64_t first = 0; first < x->cols; first += n) {
            QLORA__REAL rstd = qlora__norm_rstd(x, row, first, n, job->eps);
            for (int64_t c = 0; c < n; c++) {
                QLORA__REAL v = qlora__at(x, row, first + c) * rstd * qlora__at(job->w, 0, c);
                qlora__put(job->y, row, first + c, v);
            }
        }
    }
}

static void qlora__norm_backward_rows(void* user, int64_t begin, int64_t end) {
    const qlora__norm_job* job = (const qlora__norm_job*)user;
    int64_t n = job->w->cols;
    int64_t heads = job->x->cols / n;
    for (int64_t row = begin; row < end; row++) {
        for (int64_t head = 0; head < heads; head++) {
            int64_t first = head * n;
            QLORA__REAL rstd = qlora__norm_rstd(job->x, row, first, n, job->eps);
            double dot = 0;
            for (int64_t c = 0; c < n; c++) {
                dot += (double)qlora__at(job->dy, row, first + c) *
                       (double)qlora__at(job->w, 0, c) * (double)qlora__at(job->x, row, first + c);
            }
            QLORA__REAL pull = (QLORA__REAL)(dot / (double)n) * rstd * rstd;
            for (int64_t c = 0; c < n; c++) {
                QLORA__REAL wdy = qlora__at(job->dy, row, first + c) * qlora__at(job->w, 0, c);
                QLORA__REAL v = rstd * (wdy - qlora__at(job->x, row, first + c) * pull);
                if (job->dres != NULL) {
                    v += qlora__at(job->dres, row, first + c);
                }
                qlora__put(job->dx, row, first + c, v);
            }
            if (job->rstd != NULL) {
                job->rstd[row * heads + head] = rstd;
            }
        }
    }
}

// Columns [begin, end) of dw.
static void qlora__norm_weight_columns(void* user, int64_t begin, int64_t end) {
    const qlora__norm_job* job = (const qlora__norm_job*)user;
    int64_t n = job->w->cols;
    int64_t heads = job->x->cols / n;
    for (int64_t c = begin; c < end; c++) {
        double sum = 0;
        for (int64_t row = 0; row < job->x->rows; row++) {
            for (int64_t head = 0; head < heads; head++) {
                sum += (double)qlora__at(job->dy, row, head * n + c) *
                       (double)qlora__at(job->x, row, head * n + c) *
                       (double)job->rstd[row * heads + head];
            }
        }
        qlora__put(job->dw, 0, c, qlora__at(job->dw, 0, c) + (QLORA__REAL)sum);
    }
}

// The weight: one row that divides the columns of x.
static qlora_result qlora__norm_need_weight(qlora_ctx* ctx, const qlora_tensor* x,
                                            const qlora_tensor* w) {
    QLORA__TRY(qlora__need_vector(ctx, w, "w", QLORA__IS_F32_BF16, -1));
    if (w->cols == 0 ? x->cols != 0 : x->cols % w->cols != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "w has %lld columns, which do not divide the %lld of x",
                           (long long)w->cols, (long long)x->cols);
    }
    if (w->cols > (int64_t)1 << 30 || (w->cols > 0 && x->cols / w->cols > 65535)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "rows of %lld columns in heads of %lld: at most 2^30 columns and 65535 "
                           "heads",
                           (long long)x->cols, (long long)w->cols);
    }
    return QLORA_OK;
}

// Two pieces per thread, as the kernels keep them.
static qlora__row_shape qlora__norm_shape(const qlora_tensor* w, qlora_dtype dtype) {
    return qlora__row_shape_of(w->cols, 2 * qlora__piece(dtype), 512);
}

static qlora_result qlora__norm_forward(qlora_ctx* ctx, qlora__norm_job* job) {
    const qlora_tensor* x = job->x;
    QLORA__TRY(qlora__need(ctx, x, job->delta != NULL ? "h" : "x", QLORA__IS_F32_BF16, -1, -1));
    unsigned type = qlora__is(x->dtype);
    QLORA__TRY(qlora__norm_need_weight(ctx, x, job->w));
    QLORA__TRY(qlora__need(ctx, job->y, "y", type, x->rows, x->cols));
    QLORA__TRY(qlora__need_apart(ctx, "y", job->y, "w", job->w));
    if (job->delta != NULL) {
        QLORA__TRY(qlora__need(ctx, job->delta, "delta", type, x->rows, x->cols));
        QLORA__TRY(qlora__need(ctx, job->sum, "sum", type, x->rows, x->cols));
        QLORA__TRY(qlora__need_same_or_apart(ctx, "sum", job->sum, "h", x));
        QLORA__TRY(qlora__need_same_or_apart(ctx, "sum", job->sum, "delta", job->delta));
        QLORA__TRY(qlora__need_apart(ctx, "sum", job->sum, "w", job->w));
        QLORA__TRY(qlora__need_apart(ctx, "y", job->y, "sum", job->sum));
        QLORA__TRY(qlora__need_same_or_apart(ctx, "y", job->y, "delta", job->delta));
    }
    QLORA__TRY(qlora__need_same_or_apart(ctx, "y", job->y, "x", x));
    if (qlora__on_cpu(ctx)) {
        qlora__parallel(ctx, x->rows, 1 + 4096 / (1 + x->cols), qlora__norm_forward_rows, job);
        return QLORA_OK;
    }
    void* delta = job->delta != NULL ? job->delta->data : NULL;
    int64_t ld_delta = job->delta != NULL ? job->delta->ld : 0;
    void* sum = job->delta != NULL ? job->sum->data : NULL;
    int64_t ld_sum = job->delta != NULL ? job->sum->ld : 0;
    int32_t w_bf16 = job->w->dtype == QLORA_BF16;
    int32_t cols = (int32_t)job->w->cols;
    qlora__row_shape shape = qlora__norm_shape(job->w, x->dtype);
    void* args[] = {(void*)&x->data,
                    (void*)&x->ld,
                    &delta,
                    &ld_delta,
                    &sum,
                    &ld_sum,
                    (void*)&job->w->data,
                    &w_bf16,
                    (void*)&job->y->data,
                    (void*)&job->y->ld,
                    (void*)&x->rows,
                    &cols,
                    &job->eps,
                    &shape.width};
    return qlora__launch(
        ctx, x->dtype == QLORA_F32 ? QLORA__K_norm_rms_fwd_f32 : QLORA__K_norm_rms_fwd_bf16,
        (uint32_t)qlora__ceil_div(x->rows, shape.rows), cols > 0 ? (uint32_t)(x->cols / cols) : 0,
        1, shape.threads, 0, args);
}

// The two stages of dw on the device, from the rstd of the first launch.
static qlora_result qlora__norm_weight_launch(qlora_ctx* ctx, const qlora__norm_job* job,
                                              void* rstd) {
    const qlora_tensor* x = job->x;
    int64_t chunk_rows = x->rows <= 64 * 128 ? 64 : qlora__ceil_div(x->rows, 128);
    int32_t chunks = (int32_t)qlora__ceil_div(x->rows, chunk_rows);
    int32_t cols = (int32_t)job->w->cols;
    int32_t heads = (int32_t)(x->cols / cols);
    int32_t accumulate = 1;
    void* partial = NULL;
    QLORA__TRY(qlora__scratch(ctx, (size_t)chunks * (size_t)cols * sizeof(float), &partial));
    void* first[] = {(void*)&job->dy->data,
                     (void*)&job->dy->ld,
                     (void*)&x->data,
                     (void*)&x->ld,
                     &rstd,
                     &partial,
                     (void*)&x->rows,
                     &cols,
                     &heads,
                     &chunk_rows};
    QLORA__TRY(qlora__launch(
        ctx, x->dtype == QLORA_F32 ? QLORA__K_norm_rms_dw_f32 : QLORA__K_norm_rms_dw_bf16,
        (uint32_t)qlora__ceil_div(cols, 32), (uint32_t)chunks, 1, 256, 0, first));
    void* second[] = {&partial, (void*)&job->dw->data, &cols, &chunks, &accumulate};
    return qlora__launch(ctx, QLORA__K_norm_rms_dw_sum, (uint32_t)qlora__ceil_div(cols, 128), 1, 1,
                         128, 0, second);
}

static qlora_result qlora__norm_need_backward(qlora_ctx* ctx, const qlora__norm_job* job) {
    const qlora_tensor* x = job->x;
    QLORA__TRY(qlora__need(ctx, x, "x", QLORA__IS_F32_BF16, -1, -1));
    unsigned type = qlora__is(x->dtype);
    QLORA__TRY(qlora__norm_need_weight(ctx, x, job->w));
    QLORA__TRY(qlora__need(ctx, job->dy, "dy", type, x->rows, x->cols));
    QLORA__TRY(qlora__need(ctx, job->dx, "dx", type, x->rows, x->cols));
    QLORA__TRY(qlora__need_apart(ctx, "dx", job->dx, "w", job->w));
    QLORA__TRY(qlora__need_apart(ctx, "dx", job->dx, "x", x));
    if (job->dres != NULL) {
        QLORA__TRY(qlora__need(ctx, job->dres, "dres", type, x->rows, x->cols));
        QLORA__TRY(qlora__need_same_or_apart(ctx, "dx", job->dx, "dres", job->dres));
    }
    if (job->dw == NULL) {
        return qlora__need_same_or_apart(ctx, "dx", job->dx, "dy", job->dy);
    }
    QLORA__TRY(qlora__need_vector(ctx, job->dw, "dw", QLORA__IS_F32, job->w->cols));
    QLORA__TRY(qlora__need_apart(ctx, "dw", job->dw, "w", job->w));
    QLORA__TRY(qlora__need_apart(ctx, "dw", job->dw, "dx", job->dx));
    return qlora__need_apart(ctx, "dx", job->dx, "dy", job->dy);
}

static qlora_result qlora__norm_backward(qlora_ctx* ctx, qlora__norm_job* job) {
    QLORA__TRY(qlora__norm_need_backward(ctx, job));
    const qlora_tensor* x = job->x;
    if (x->rows == 0 || x->cols == 0) {
        return QLORA_OK;
    }
    void* rstd = NULL;
    if (job->dw != NULL) {
        size_t count = (size_t)x->rows * (size_t)(x->cols / job->w->cols);
        QLORA__TRY(qlora__scratch(ctx, count * sizeof(QLORA__REAL), &rstd));
    }
    if (qlora__on_cpu(ctx)) {
        job->rstd = (QLORA__REAL*)rstd;
        qlora__parallel(ctx, x->rows, 1 + 4096 / (1 + x->cols), qlora__norm_backward_rows, job);
        if (job->dw != NULL) {
            qlora__parallel(ctx, job->dw->cols, 1 + 4096 / (1 + x->rows),
                            qlora__norm_weight_columns, job);
        }
        return QLORA_OK;
    }
    void* dres = job->dres != NULL ? job->dres->data : NULL;
    int64_t ld_dres = job->dres != NULL ? job->dres->ld : 0;
    int32_t w_bf16 = job->w->dtype == QLORA_BF16;
    int32_t cols = (int32_t)job->w->cols;
    qlora__row_shape shape = qlora__norm_shape(job->w, x->dtype);
    void* args[] = {(void*)&job->dy->data,
                    (void*)&job->dy->ld,
                    (void*)&x->data,
                    (void*)&x->ld,
                    (void*)&job->w->data,
                    &w_bf16,
                    &dres,
                    &ld_dres,
                    (void*)&job->dx->data,
                    (void*)&job->dx->ld,
                    &rstd,
                    (void*)&x->rows,
                    &cols,
                    &job->eps,
                    &shape.width};
    QLORA__TRY(qlora__launch(
        ctx, x->dtype == QLORA_F32 ? QLORA__K_norm_rms_bwd_f32 : QLORA__K_norm_rms_bwd_bf16,
        (uint32_t)qlora__ceil_div(x->rows, shape.rows), (uint32_t)(x->cols / cols), 1,
        shape.threads, 0, args));
    return job->dw != NULL ? qlora__norm_weight_launch(ctx, job, rstd) : QLORA_OK;
}

qlora_result qlora_rmsnorm_forward(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* w,
                                   float eps, const qlora_tensor* y) {
    QLORA__ENTER(ctx, "qlora_rmsnorm_forward");
    qlora__norm_job job;
    memset(&job, 0, sizeof job);
    job.x = x;
    job.w = w;
    job.y = y;
    job.eps = eps;
    return qlora__leave(ctx, qlora__norm_forward(ctx, &job));
}

qlora_result qlora_rmsnorm_residual_forward(qlora_ctx* ctx, const qlora_tensor* h,
                                            const qlora_tensor* delta, const qlora_tensor* w,
                                            float eps, const qlora_tensor* sum,
                                            const qlora_tensor* y) {
    QLORA__ENTER(ctx, "qlora_rmsnorm_residual_forward");
    if (delta == NULL) {
        return qlora__leave(
            ctx, qlora__fail(ctx, QLORA_ERR_ARGUMENT, "delta is NULL; use qlora_rmsnorm_forward"));
    }
    qlora__norm_job job;
    memset(&job, 0, sizeof job);
    job.x = h;
    job.delta = delta;
    job.sum = sum;
    job.w = w;
    job.y = y;
    job.eps = eps;
    return qlora__leave(ctx, qlora__norm_forward(ctx, &job));
}

qlora_result qlora_rmsnorm_backward(qlora_ctx* ctx, const qlora_tensor* dy, const qlora_tensor* x,
                                    const qlora_tensor* w, float eps, const qlora_tensor* dres,
                                    const qlora_tensor* dx, const qlora_tensor* dw) {
    QLORA__ENTER(ctx, "qlora_rmsnorm_backward");
    qlora__norm_job job;
    memset(&job, 0, sizeof job);
    job.x = x;
    job.w = w;
    job.dy = dy;
    job.dres = dres;
    job.dx = dx;
    job.dw = dw;
    job.eps = eps;
    return qlora__leave(ctx, qlora__norm_backward(ctx, &job));
}

// ---- rotary position embedding ------------------------------------------------------------------
//
// Half-split pairs. With half = head_dim / 2, angle = position f_i:
//   a = x[i] + bias[i], b = x[i + half] + bias[i + half]
//   x[i] = a cos - b sin,  x[i + half] = b cos + a sin;   backward: the angle's sign changed
// The table follows transformers: inverse frequencies and angles in fp32, then accurate cosines and
// sines.

// Wavelengths beyond original / low are stretched by factor, below original / high kept, blended
// between.
static float qlora__rope_llama3(const qlora_rope_desc* d, float frequency) {
    float low = (float)(d->low_freq_factor != 0 ? d->low_freq_factor : 1);
    float high = (float)(d->high_freq_factor != 0 ? d->high_freq_factor : 4);
    float original = (float)d->original_max_position;
    float factor = (float)d->factor;
    float wavelength = (float)(2 * QLORA__PI) / frequency;
    if (wavelength > original / low) {
        return frequency / factor;
    }
    if (wavelength < original / high) {
        return frequency;
    }
    float smooth = (original / wavelength - low) / (high - low);
    return (1 - smooth) * (frequency / factor) + smooth * frequency;
}

// The dimension that makes `turns` rotations within the original context.
static double qlora__rope_yarn_dim(const qlora_rope_desc* d, double turns, int64_t head_dim) {
    return (double)head_dim * log(d->original_max_position / (turns * 2 * QLORA__PI)) /
           (2 * log(d->theta));
}

// Low dimensions (many turns) keep their frequency, high ones are divided by factor, blended
// between.
static float qlora__rope_yarn(const qlora_rope_desc* d, float frequency, int64_t i,
                              int64_t head_dim) {
    double low = qlora__rope_yarn_dim(d, d->beta_fast != 0 ? d->beta_fast : 32, head_dim);
    double high = qlora__rope_yarn_dim(d, d->beta_slow != 0 ? d->beta_slow : 1, head_dim);
    if (!d->no_truncate) {
        low = floor(low);
        high = ceil(high);
    }
    low = low > 0 ? low : 0;
    high = high < (double)(head_dim - 1) ? high : (double)(head_dim - 1);
    if (low == high) {
        high += 0.001;
    }
    float ramp = ((float)i - (float)low) / (float)(high - low);
    ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
    float keep = 1 - ramp;
    return frequency / (float)d->factor * (1 - keep) + frequency * keep;
}

static double qlora__rope_mscale(double factor, double mscale) {
    return factor <= 1 ? 1 : 0.1 * mscale * log(factor) + 1;
}

// What cosine and sine are multiplied by.
static float qlora__rope_attention_factor(const qlora_rope_desc* d) {
    if (d->type != QLORA_ROPE_YARN) {
        return 1;
    }
    if (d->attention_factor != 0) {
        return (float)d->attention_factor;
    }
    if (d->mscale != 0 && d->mscale_all_dim != 0) {
        return (float)(qlora__rope_mscale(d->factor, d->mscale) /
                       qlora__rope_mscale(d->factor, d->mscale_all_dim));
    }
    return (float)qlora__rope_mscale(d->factor, 1);
}

static float qlora__rope_frequency(const qlora_rope_desc* d, int64_t i, int64_t head_dim) {
    float exponent = (float)(2 * i) / (float)head_dim;
    float frequency = 1.0f / (float)pow(d->theta, (double)exponent);
    switch (d->type) {
    case QLORA_ROPE_DEFAULT:
        break;
    case QLORA_ROPE_LINEAR:
        return frequency / (float)d->factor;
    case QLORA_ROPE_LLAMA3:
        return qlora__rope_llama3(d, frequency);
    case QLORA_ROPE_YARN:
        return qlora__rope_yarn(d, frequency, i, head_dim);
    }
    return frequency;
}

qlora_result qlora_rope_table(const qlora_rope_desc* desc, int64_t head_dim, int64_t positions,
                              float* out) {
    if (desc == NULL || head_dim <= 0 || head_dim % 2 != 0 || positions < 0 ||
        (out == NULL && positions > 0) || (int)desc->type < 0 || desc->type > QLORA_ROPE_YARN) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora_rope_desc d = *desc;
    d.theta = d.theta != 0 ? d.theta : 10000;
    d.factor = d.factor != 0 ? d.factor : 1;
    bool needs_original = d.type == QLORA_ROPE_LLAMA3 || d.type == QLORA_ROPE_YARN;
    if (!(d.theta > 1) || !(d.factor > 0) || (needs_original && !(d.original_max_position > 0))) {
        return QLORA_ERR_ARGUMENT;
    }
    int64_t half = head_dim / 2;
    float attention = qlora__rope_attention_factor(&d);
    for (int64_t i = 0; i < half; i++) {
        float frequency = qlora__rope_frequency(&d, i, head_dim);
        for (int64_t p = 0; p < positions; p++) {
            float angle = (float)p * frequency;
            out[p * head_dim + i] = (float)cos((double)angle) * attention;
            out[p * head_dim + half + i] = (float)sin((double)angle) * attention;
        }
    }
    return QLORA_OK;
}

typedef struct qlora__rope_job {
    const qlora_tensor* x;
    const qlora_tensor* positions;
    const qlora_tensor* table;
    const qlora_tensor* bias; // or NULL
    const qlora_tensor* flag; // or NULL
    int64_t rotated;
    float sign;
} qlora__rope_job;

static void qlora__rope_rows(void* user, int64_t begin, int64_t end) {
    const qlora__rope_job* job = (const qlora__rope_job*)user;
    int64_t head_dim = job->table->cols;
    int64_t half = head_dim / 2;
    int64_t heads = job->bias != NULL ? job->x->cols / head_dim : job->rotated;
    for (int64_t row = begin; row < end; row++) {
        int64_t position = qlora__index_at(job->positions, row);
        for (int64_t head = 0; head < heads; head++) {
            for (int64_t i = 0; i < half; i++) {
                int64_t at = head * head_dim + i;
                QLORA__REAL a = qlora__at(job->x, row, at);
                QLORA__REAL b = qlora__at(job->x, row, at + half);
                if (job->bias != NULL) {
                    a += qlora__at(job->bias, 0, at);
                    b += qlora__at(job->bias, 0, at + half);
                }
                QLORA__REAL cosine = 1;
                QLORA__REAL sine = 0;
                if (head < job->rotated) {
                    cosine = qlora__at(job->table, position, i);
                    sine = qlora__at(job->table, position, half + i) * (QLORA__REAL)job->sign;
                }
                qlora__put(job->x, row, at, a * cosine - b * sine);
                qlora__put(job->x, row, at + half, b * cosine + a * sine);
            }
        }
    }
}

static qlora_result qlora__rope_check(qlora_ctx* ctx, const qlora__rope_job* job) {
    const qlora_tensor* x = job->x;
    QLORA__TRY(qlora__need(ctx, x, "x", QLORA__IS_F32_BF16, -1, -1));
    QLORA__TRY(qlora__need_vector(ctx, job->positions, "positions", QLORA__IS_I32, x->rows));
    QLORA__TRY(qlora__need(ctx, job->table, "table", QLORA__IS_F32, -1, -1));
    QLORA__TRY(qlora__need_flag(ctx, job->flag));
    QLORA__TRY(qlora__need_apart(ctx, "x", x, "table", job->table));
    QLORA__TRY(qlora__need_apart(ctx, "x", x, "positions", job->positions));
    if (job->bias != NULL) {
        QLORA__TRY(qlora__need_vector(ctx, job->bias, "bias", QLORA__IS_F32_BF16, x->cols));
        QLORA__TRY(qlora__need_apart(ctx, "x", x, "bias", job->bias));
    }
    int64_t head_dim = job->table->cols;
    if (head_dim <= 0 || head_dim % 2 != 0 || x->cols % head_dim != 0 || job->rotated < 0 ||
        job->rotated > x->cols / head_dim || x->cols > INT32_MAX || job->table->rows > INT32_MAX) {
        return qlora__fail(
            ctx, QLORA_ERR_ARGUMENT,
            "x has %lld columns and the table %lld (one head, even): %lld heads cannot "
            "be rotated",
            (long long)x->cols, (long long)head_dim, (long long)job->rotated);
    }
    for (int64_t row = 0; qlora__on_cpu(ctx) && row < x->rows; row++) {
        int32_t position = qlora__index_at(job->positions, row);
        if (position < 0 || position >= job->table->rows) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "positions[%lld] is %d, the table has %lld rows", (long long)row,
                               (int)position, (long long)job->table->rows);
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__rope(qlora_ctx* ctx, qlora__rope_job* job) {
    QLORA__TRY(qlora__rope_check(ctx, job));
    const qlora_tensor* x = job->x;
    if (qlora__on_cpu(ctx)) {
        qlora__parallel(ctx, x->rows, 1 + 4096 / (1 + x->cols), qlora__rope_rows, job);
        return QLORA_OK;
    }
    int32_t half = (int32_t)(job->table->cols / 2);
    int32_t rotated = (int32_t)job->rotated;
    int32_t heads = job->bias != NULL ? (int32_t)(x->cols / job->table->cols) : rotated;
    int32_t max_pos = (int32_t)job->table->rows;
    void* bias = job->bias != NULL ? job->bias->data : NULL;
    int32_t bias_bf16 = job->bias != NULL && job->bias->dtype == QLORA_BF16;
    void* flag = NULL;
    QLORA__TRY(qlora__flag_pointer(ctx, job->flag, &flag));
    int64_t items = heads * qlora__ceil_div(half, qlora__piece(x->dtype));
    uint32_t threads = (uint32_t)qlora__max(32, qlora__min(512, qlora__ceil_div(items, 32) * 32));
    void* args[] = {(void*)&x->data,
                    (void*)&x->ld,
                    (void*)&job->positions->data,
                    (void*)&job->table->data,
                    (void*)&job->table->ld,
                    &max_pos,
                    &bias,
                    &bias_bf16,
                    &heads,
                    &rotated,
                    &half,
                    &job->sign,
                    &flag};
    return qlora__launch(ctx, x->dtype == QLORA_F32 ? QLORA__K_rope_f32 : QLORA__K_rope_bf16,
                         items > 0 ? x->rows : 0, 1, 1, threads, 0, args);
}

qlora_result qlora_rope_forward(qlora_ctx* ctx, const qlora_tensor* x, int64_t rotated,
                                const qlora_tensor* positions, const qlora_tensor* table,
                                const qlora_tensor* bias, const qlora_tensor* flag) {
    QLORA__ENTER(ctx, "qlora_rope_forward");
    qlora__rope_job job;
    job.x = x;
    job.positions = positions;
    job.table = table;
    job.bias = bias;
    job.flag = flag;
    job.rotated = rotated;
    job.sign = 1;
    return qlora__leave(ctx, qlora__rope(ctx, &job));
}

qlora_result qlora_rope_backward(qlora_ctx* ctx, const qlora_tensor* dx, int64_t rotated,
                                 const qlora_tensor* positions, const qlora_tensor* table,
                                 const qlora_tensor* flag) {
    QLORA__ENTER(ctx, "qlora_rope_backward");
    qlora__rope_job job;
    job.x = dx;
    job.positions = positions;
    job.table = table;
    job.bias = NULL;
    job.flag = flag;
    job.rotated = rotated;
    job.sign = -1;
    return qlora__leave(ctx, qlora__rope(ctx, &job));
}

// ---- attention in pieces ------------------------------------------------------------------------
//
//   heads      y[h, s, c] = x[s, h d + c] and back        transpose  y[b, c, r] = x[b, r, c]
//   scores     s = scale s, or -3e38 where the query may not see the key
//   softmax    y = e^(x - max) / sum e^(x - max);  dx = y (dy - sum(y dy))

// Finite, so that no arithmetic on it makes a NaN, and e^(it - max) is 0.
#define QLORA__MASKED -3.0e38f

// Copies elements between two batches of the same sizes, or their transposes.
typedef struct qlora__copy_job {
    qlora_tensor x;
    qlora_tensor y;
    bool transpose;
} qlora__copy_job;

static void qlora__copy_rows(void* user, int64_t begin, int64_t end) {
    const qlora__copy_job* job = (const qlora__copy_job*)user;
    size_t size = qlora_dtype_bytes(job->x.dtype);
    for (int64_t i = begin; i < end; i++) {
        int64_t b = i / job->x.rows;
        int64_t row = i % job->x.rows;
        for (int64_t c = 0; c < job->x.cols; c++) {
            int64_t from = b * job->x.batch_stride + row * job->x.ld + c;
            int64_t to = b * job->y.batch_stride +
                         (job->transpose ? c * job->y.ld + row : row * job->y.ld + c);
            memcpy((char*)job->y.data + (size_t)to * size,
                   (const char*)job->x.data + (size_t)from * size, size);
        }
    }
}

static qlora_result qlora__copy(qlora_ctx* ctx, qlora__copy_job* job) {
    const qlora_tensor* x = &job->x;
    const qlora_tensor* y = &job->y;
    if (qlora__on_cpu(ctx)) {
        qlora__parallel(ctx, x->batch * x->rows, 1 + 4096 / (1 + x->cols), qlora__copy_rows, job);
        return QLORA_OK;
    }
    bool wide = qlora_dtype_bytes(x->dtype) == 4;
    void* args[] = {(void*)&x->data,  (void*)&x->batch_stride, (void*)&x->ld,
                    (void*)&y->data,  (void*)&y->batch_stride, (void*)&y->ld,
                    (void*)&x->batch, (void*)&x->rows,         (void*)&x->cols};
    if (job->transpose) {
        return qlora__launch(
            ctx, wide ? QLORA__K_softmax_transpose_b32 : QLORA__K_softmax_transpose_b16,
            qlora__ceil_div(x->cols, 32), qlora__min(qlora__ceil_div(x->rows, 32), 65535),
            qlora__min(x->batch, 65535), 256, 0, args);
    }
    qlora__point_shape shape = qlora__point_shape_of(x->cols, qlora__piece(x->dtype));
    return qlora__launch(ctx, wide ? QLORA__K_softmax_copy_b32 : QLORA__K_softmax_copy_b16,
                         shape.blocks, qlora__min(x->rows, 65535), qlora__min(x->batch, 65535),
                         shape.threads, 0, args);
}

#define QLORA__IS_COPIED (QLORA__IS_F32 | QLORA__IS_BF16 | QLORA__IS_F16 | QLORA__IS_I32)

// rows: [S, H*d]; heads: a batch of H [S, d]. split copies rows to heads, join heads to rows.
static qlora_result qlora__heads_copy(qlora_ctx* ctx, const qlora_tensor* rows,
                                      const qlora_tensor* heads, bool split) {
    QLORA__TRY(qlora__need(ctx, rows, split ? "x" : "y", QLORA__IS_COPIED, -1, -1));
    QLORA__TRY(qlora__need_batch(ctx, heads, split ? "y" : "x", qlora__is(rows->dtype), -1,
                                 rows->rows, -1));
    if (heads->batch < 0 || heads->batch * heads->cols != rows->cols) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "%lld heads of %lld columns are not the %lld columns of the rows",
                           (long long)heads->batch, (long long)heads->cols, (long long)rows->cols);
    }
    QLORA__TRY(qlora__need_apart(ctx, "y", heads, "x", rows));
    qlora_tensor cut = *rows;
    cut.batch = heads->batch;
    cut.batch_stride = heads->cols;
    cut.cols = heads->cols;
    qlora__copy_job job;
    job.x = split ? cut : *heads;
    job.y = split ? *heads : cut;
    job.transpose = false;
    return qlora__copy(ctx, &job);
}

static qlora_result qlora__transpose(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* y) {
    QLORA__TRY(qlora__need_batch(ctx, x, "x", QLORA__IS_COPIED, -1, -1, -1));
    QLORA__TRY(qlora__need_batch(ctx, y, "y", qlora__is(x->dtype), x->batch, x->cols, x->rows));
    QLORA__TRY(qlora__need_apart(ctx, "y", y, "x", x));
    qlora__copy_job job;
    job.x = *x;
    job.y = *y;
    job.transpose = true;
    return qlora__copy(ctx, &job);
}

qlora_result qlora_heads_split(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* y) {
    QLORA__ENTER(ctx, "qlora_heads_split");
    return qlora__leave(ctx, qlora__heads_copy(ctx, x, y, true));
}

qlora_result qlora_heads_join(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* y) {
    QLORA__ENTER(ctx, "qlora_heads_join");
    return qlora__leave(ctx, qlora__heads_copy(ctx, y, x, false));
}

qlora_result qlora_transpose(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* y) {
    QLORA__ENTER(ctx, "qlora_transpose");
    return qlora__leave(ctx, qlora__transpose(ctx, x, y));
}

typedef struct qlora__scores_job {
    const qlora_tensor* s;
    float scale;
    int32_t causal;
    int64_t window;
} qlora__scores_job;

static void qlora__scores_rows(void* user, int64_t begin, int64_t end) {
    const qlora__scores_job* job = (const qlora__scores_job*)user;
    for (int64_t i = begin; i < end; i++) {
        qlora_tensor s = qlora__batch_at(job->s, i / job->s->rows);
        int64_t q = i % s.rows;
        int64_t position = q + s.cols - s.rows;
        for (int64_t k = 0; k < s.cols; k++) {
            bool later = job->causal && k > position;
            bool gone = job->window > 0 && k <= position - job->window;
            QLORA__REAL v = qlora__at(&s, q, k) * (QLORA__REAL)job->scale;
            qlora__put(&s, q, k, later || gone ? (QLORA__REAL)QLORA__MASKED : v);
        }
    }
}

static qlora_result qlora__scores(qlora_ctx* ctx, qlora__scores_job* job) {
    const qlora_tensor* s = job->s;
    QLORA__TRY(qlora__need_batch(ctx, s, "s", QLORA__IS_F32_BF16, -1, -1, -1));
    if (qlora__on_cpu(ctx)) {
        qlora__parallel(ctx, s->batch * s->rows, 1 + 4096 / (1 + s->cols), qlora__scores_rows, job);
        return QLORA_OK;
    }
    uint32_t threads = s->cols < 256 ? (uint32_t)qlora__ceil_div(s->cols, 32) * 32 : 256;
    void* args[] = {(void*)&s->data, (void*)&s->batch_stride, (void*)&s->ld, (void*)&s->batch,
                    (void*)&s->rows, (void*)&s->cols,         &job->scale,   &job->causal,
                    &job->window};
    return qlora__launch(
        ctx, s->dtype == QLORA_F32 ? QLORA__K_softmax_scores_f32 : QLORA__K_softmax_scores_bf16,
        threads > 0 ? qlora__ceil_div(s->cols, threads) : 0, qlora__min(s->rows, 65535),
        qlora__min(s->batch, 65535), threads, 0, args);
}

qlora_result qlora_scores_mask(qlora_ctx* ctx, const qlora_tensor* s, float scale, bool causal,
                               int64_t window) {
    QLORA__ENTER(ctx, "qlora_scores_mask");
    qlora__scores_job job;
    job.s = s;
    job.scale = scale;
    job.causal = causal ? 1 : 0;
    job.window = window;
    return qlora__leave(ctx, qlora__scores(ctx, &job));
}

typedef struct qlora__softmax_job {
    const qlora_tensor* x;  // forward: the input; backward: the softmax
    const qlora_tensor* dy; // backward only
    const qlora_tensor* y;  // forward: the softmax; backward: dx
} qlora__softmax_job;

static void qlora__softmax_rows(void* user, int64_t begin, int64_t end) {
    const qlora__softmax_job* job = (const qlora__softmax_job*)user;
    for (int64_t i = begin; i < end; i++) {
        qlora_tensor x = qlora__batch_at(job->x, i / job->x->rows);
        qlora_tensor y = qlora__batch_at(job->y, i / job->x->rows);
        int64_t row = i % x.rows;
        QLORA__REAL top = (QLORA__REAL)QLORA__MASKED;
        for (int64_t c = 0; c < x.cols; c++) {
            QLORA__REAL v = qlora__at(&x, row, c);
            top = v > top ? v : top;
        }
        double sum = 0;
        for (int64_t c = 0; c < x.cols; c++) {
            sum += (double)qlora__exp(qlora__at(&x, row, c) - top);
        }
        for (int64_t c = 0; c < x.cols; c++) {
            qlora__put(&y, row, c, qlora__exp(qlora__at(&x, row, c) - top) / (QLORA__REAL)sum);
        }
    }
}

static void qlora__softmax_backward_rows(void* user, int64_t begin, int64_t end) {
    const qlora__softmax_job* job = (const qlora__softmax_job*)user;
    for (int64_t i = begin; i < end; i++) {
        int64_t b = i / job->x->rows;
        qlora_tensor y = qlora__batch_at(job->x, b);
        qlora_tensor dy = qlora__batch_at(job->dy, b);
        qlora_tensor dx = qlora__batch_at(job->y, b);
        int64_t row = i % y.rows;
        double dot = 0;
        for (int64_t c = 0; c < y.cols; c++) {
            dot += (double)qlora__at(&y, row, c) * (double)qlora__at(&dy, row, c);
        }
        for (int64_t c = 0; c < y.cols; c++) {
            QLORA__REAL p = qlora__at(&y, row, c);
            qlora__put(&dx, row, c, p * (qlora__at(&dy, row, c) - (QLORA__REAL)dot));
        }
    }
}

static qlora_result qlora__softmax(qlora_ctx* ctx, qlora__softmax_job* job, bool backward) {
    const qlora_tensor* x = job->x;
    const qlora_tensor* y = job->y;
    const qlora_tensor* dy = job->dy;
    const char* x_name = backward ? "y" : "x";
    const char* y_name = backward ? "dx" : "y";
    QLORA__TRY(qlora__need_batch(ctx, x, x_name, QLORA__IS_F32_BF16, -1, -1, -1));
    unsigned type = qlora__is(x->dtype);
    QLORA__TRY(qlora__need_batch(ctx, y, y_name, type, x->batch, x->rows, x->cols));
    QLORA__TRY(qlora__need_same_or_apart(ctx, y_name, y, x_name, x));
    if (backward) {
        QLORA__TRY(qlora__need_batch(ctx, dy, "dy", type, x->batch, x->rows, x->cols));
        QLORA__TRY(qlora__need_same_or_apart(ctx, y_name, y, "dy", dy));
    }
    if (qlora__on_cpu(ctx)) {
        qlora__parallel(ctx, x->batch * x->rows, 1 + 4096 / (1 + x->cols),
                        backward ? qlora__softmax_backward_rows : qlora__softmax_rows, job);
        return QLORA_OK;
    }
    qlora__row_shape shape = qlora__row_shape_of(x->cols, qlora__piece(x->dtype), 256);
    void* args[13];
    int n = 0;
    const qlora_tensor* all[3];
    all[0] = x;
    all[1] = dy;
    all[2] = y;
    for (int i = 0; i < 3; i++) {
        if (all[i] != NULL) {
            args[n++] = (void*)&all[i]->data;
            args[n++] = (void*)&all[i]->batch_stride;
            args[n++] = (void*)&all[i]->ld;
        }
    }
    args[n++] = (void*)&x->batch;
    args[n++] = (void*)&x->rows;
    args[n++] = (void*)&x->cols;
    args[n++] = &shape.width;
    static const qlora__kernel_id kernels[2][2] = {
        {QLORA__K_softmax_fwd_f32, QLORA__K_softmax_fwd_bf16},
        {QLORA__K_softmax_bwd_f32, QLORA__K_softmax_bwd_bf16}};
    return qlora__launch(ctx, kernels[backward][x->dtype == QLORA_BF16],
                         x->cols > 0 ? qlora__ceil_div(x->rows, shape.rows) : 0,
                         qlora__min(x->batch, 65535), 1, shape.threads, 0, args);
}

qlora_result qlora_softmax_forward(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* y) {
    QLORA__ENTER(ctx, "qlora_softmax_forward");
    qlora__softmax_job job;
    job.x = x;
    job.dy = NULL;
    job.y = y;
    return qlora__leave(ctx, qlora__softmax(ctx, &job, false));
}

qlora_result qlora_softmax_backward(qlora_ctx* ctx, const qlora_tensor* y, const qlora_tensor* dy,
                                    const qlora_tensor* dx) {
    QLORA__ENTER(ctx, "qlora_softmax_backward");
    qlora__softmax_job job;
    job.x = y;
    job.dy = dy;
    job.y = dx;
    return qlora__leave(ctx, qlora__softmax(ctx, &job, true));
}

// ---- embedding: y[t] = table[ids[t]] ------------------------------------------------------------

typedef struct qlora__embed_job {
    const qlora_tensor* table;
    const qlora_tensor* ids;
    const qlora_tensor* y;
    const qlora_tensor* flag;
} qlora__embed_job;

static void qlora__embed_rows(void* user, int64_t begin, int64_t end) {
    const qlora__embed_job* job = (const qlora__embed_job*)user;
    for (int64_t row = begin; row < end; row++) {
        int64_t id = qlora__index_at(job->ids, row);
        for (int64_t c = 0; c < job->y->cols; c++) {
            qlora__put(job->y, row, c, qlora__at(job->table, id, c));
        }
    }
}

static qlora_result qlora__embed(qlora_ctx* ctx, qlora__embed_job* job) {
    const qlora_tensor* table = job->table;
    const qlora_tensor* y = job->y;
    QLORA__TRY(qlora__need(ctx, y, "y", QLORA__IS_F32_BF16, -1, -1));
    QLORA__TRY(qlora__need(ctx, table, "table", QLORA__IS_FLOAT, -1, y->cols));
    QLORA__TRY(qlora__need_vector(ctx, job->ids, "ids", QLORA__IS_I32, y->rows));
    QLORA__TRY(qlora__need_flag(ctx, job->flag));
    QLORA__TRY(qlora__need_apart(ctx, "y", y, "table", table));
    QLORA__TRY(qlora__need_apart(ctx, "y", y, "ids", job->ids));
    if (qlora__on_cpu(ctx)) {
        for (int64_t row = 0; row < y->rows; row++) {
            int32_t id = qlora__index_at(job->ids, row);
            if (id < 0 || id >= table->rows) {
                return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                                   "ids[%lld] is %d, the table has %lld rows", (long long)row,
                                   (int)id, (long long)table->rows);
            }
        }
        qlora__parallel(ctx, y->rows, 1 + 4096 / (1 + y->cols), qlora__embed_rows, job);
        return QLORA_OK;
    }
    static const qlora__kernel_id kernels[3][2] = {
        {QLORA__K_elementwise_gather_f32_f32, QLORA__K_elementwise_gather_f32_bf16},
        {QLORA__K_elementwise_gather_bf16_f32, QLORA__K_elementwise_gather_bf16_bf16},
        {QLORA__K_elementwise_gather_f16_f32, QLORA__K_elementwise_gather_f16_bf16}};
    void* flag = NULL;
    QLORA__TRY(qlora__flag_pointer(ctx, job->flag, &flag));
    qlora__point_shape shape = qlora__point_shape_of(y->cols, qlora__piece(y->dtype));
    void* args[] = {
        (void*)&table->data, (void*)&table->ld, (void*)&table->rows, (void*)&job->ids->data,
        (void*)&y->data,     (void*)&y->ld,     (void*)&y->cols,     &flag};
    return qlora__launch(ctx, kernels[table->dtype][y->dtype], y->cols > 0 ? y->rows : 0, 1, 1,
                         shape.threads, 0, args);
}

qlora_result qlora_embed(qlora_ctx* ctx, const qlora_tensor* table, const qlora_tensor* ids,
                         const qlora_tensor* y, const qlora_tensor* flag) {
    QLORA__ENTER(ctx, "qlora_embed");
    qlora__embed_job job;
    job.table = table;
    job.ids = ids;
    job.y = y;
    job.flag = flag;
    return qlora__leave(ctx, qlora__embed(ctx, &job));
}

// ---- cross-entropy ------------------------------------------------------------------------------
//
// Of rows of logits. With p = softmax(x):
//   loss = weight (log sum e^x - x[label]),   x = (p - onehot(label)) scale weight  (in place)
// Rows labelled -100 have loss 0 and gradient 0. Sum of losses: see qlora_cross_entropy_args.total.

#define QLORA__NO_LABEL -100

static void qlora__cross_entropy_rows(void* user, int64_t begin, int64_t end) {
    const qlora_cross_entropy_args* a = (const qlora_cross_entropy_args*)user;
    const qlora_tensor* x = a->logits;
    QLORA__REAL scale = a->scale != NULL ? qlora__at(a->scale, 0, 0) : 1;
    for (int64_t row = begin; row < end; row++) {
        int64_t label = qlora__index_at(a->labels, row);
        bool counted = label != QLORA__NO_LABEL;
        QLORA__REAL weight = a->weights != NULL ? qlora__at(a->weights, 0, row) : 1;
        QLORA__REAL top = counted ? qlora__at(x, row, 0) : 0;
        for (int64_t c = 0; counted && c < x->cols; c++) {
            QLORA__REAL v = qlora__at(x, row, c);
            top = v > top ? v : top;
        }
        double sum = 0;
        for (int64_t c = 0; counted && c < x->cols; c++) {
            sum += (double)qlora__exp(qlora__at(x, row, c) - top);
        }
        QLORA__REAL loss = 0;
        if (counted) {
            loss = weight * (top + (QLORA__REAL)log(sum) - qlora__at(x, row, label));
        }
        qlora__put(a->losses, 0, row, loss);
        for (int64_t c = 0; !a->forward_only && c < x->cols; c++) {
            QLORA__REAL gradient = 0;
            if (counted) {
                gradient = qlora__exp(qlora__at(x, row, c) - top) / (QLORA__REAL)sum;
                gradient = (gradient - (c == label ? 1 : 0)) * scale * weight;
            }
            qlora__put(x, row, c, gradient);
        }
    }
}

// total += {losses, their rounding rest, weights}; the sum in double, rows in ascending order.
static void qlora__cross_entropy_total(const qlora_cross_entropy_args* a) {
    double loss = (double)qlora__at(a->total, 0, 0) + (double)qlora__at(a->total, 0, 1);
    double weight = (double)qlora__at(a->total, 0, 2);
    for (int64_t row = 0; row < a->logits->rows; row++) {
        if (qlora__index_at(a->labels, row) != QLORA__NO_LABEL) {
            loss += (double)qlora__at(a->losses, 0, row);
            weight += a->weights != NULL ? (double)qlora__at(a->weights, 0, row) : 1;
        }
    }
    QLORA__REAL high = (QLORA__REAL)loss;
    qlora__put(a->total, 0, 0, high);
    qlora__put(a->total, 0, 1, (QLORA__REAL)(loss - (double)high));
    qlora__put(a->total, 0, 2, (QLORA__REAL)weight);
}

static qlora_result qlora__cross_entropy_check(qlora_ctx* ctx, const qlora_cross_entropy_args* a) {
    if (a == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "args is NULL");
    }
    const qlora_tensor* x = a->logits;
    QLORA__TRY(qlora__need(ctx, x, "logits", QLORA__IS_F32_BF16, -1, -1));
    QLORA__TRY(qlora__need_vector(ctx, a->labels, "labels", QLORA__IS_I32, x->rows));
    QLORA__TRY(qlora__need_vector(ctx, a->losses, "losses", QLORA__IS_F32, x->rows));
    QLORA__TRY(qlora__need_apart(ctx, "losses", a->losses, "logits", x));
    if (a->weights != NULL) {
        QLORA__TRY(qlora__need_vector(ctx, a->weights, "weights", QLORA__IS_F32, x->rows));
        QLORA__TRY(qlora__need_apart(ctx, "losses", a->losses, "weights", a->weights));
    }
    if (a->scale != NULL) {
        QLORA__TRY(qlora__need_vector(ctx, a->scale, "scale", QLORA__IS_F32, 1));
    }
    if (a->total != NULL) {
        QLORA__TRY(qlora__need_vector(ctx, a->total, "total", QLORA__IS_F32, 3));
        QLORA__TRY(qlora__need_apart(ctx, "total", a->total, "losses", a->losses));
    }
    QLORA__TRY(qlora__need_flag(ctx, a->flag));
    if (x->cols > INT32_MAX) {
        return qlora__fail(ctx, QLORA_ERR_LIMIT, "logits have %lld columns; labels are 32-bit",
                           (long long)x->cols);
    }
    for (int64_t row = 0; qlora__on_cpu(ctx) && row < x->rows; row++) {
        int32_t label = qlora__index_at(a->labels, row);
        if ((label < 0 || label >= x->cols) && label != QLORA__NO_LABEL) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "labels[%lld] is %d; it must be -100 or a column of the %lld",
                               (long long)row, (int)label, (long long)x->cols);
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__cross_entropy(qlora_ctx* ctx, const qlora_cross_entropy_args* a) {
    QLORA__TRY(qlora__cross_entropy_check(ctx, a));
    const qlora_tensor* x = a->logits;
    if (qlora__on_cpu(ctx)) {
        qlora__parallel(ctx, x->rows, 1 + 1024 / (1 + x->cols), qlora__cross_entropy_rows,
                        (void*)a);
        if (a->total != NULL) {
            qlora__cross_entropy_total(a);
        }
        return QLORA_OK;
    }
    void* weights = a->weights != NULL ? a->weights->data : NULL;
    void* scale = a->scale != NULL ? a->scale->data : NULL;
    int32_t gradient = a->forward_only ? 0 : 1;
    void* flag = NULL;
    QLORA__TRY(qlora__flag_pointer(ctx, a->flag, &flag));
    int64_t wanted = qlora__ceil_div(x->cols, 4 * qlora__piece(x->dtype) * 32) * 32;
    uint32_t threads = (uint32_t)qlora__max(32, qlora__min(wanted, 1024));
    void* args[] = {(void*)&x->data, (void*)&x->ld, (void*)&a->labels->data,
                    &weights,        &scale,        (void*)&a->losses->data,
                    (void*)&x->cols, &gradient,     &flag};
    QLORA__TRY(qlora__launch(ctx,
                             x->dtype == QLORA_F32 ? QLORA__K_loss_cross_entropy_f32
                                                   : QLORA__K_loss_cross_entropy_bf16,
                             x->rows, 1, 1, threads, 0, args));
    if (a->total == NULL) {
        return QLORA_OK;
    }
    void* sum[] = {(void*)&a->losses->data, (void*)&a->labels->data, &weights,
                   (void*)&x->rows,         (void*)&x->cols,         (void*)&a->total->data};
    return qlora__launch(ctx, QLORA__K_loss_sum, x->rows > 0 ? 1 : 0, 1, 1, 256, 0, sum);
}

qlora_result qlora_cross_entropy(qlora_ctx* ctx, const qlora_cross_entropy_args* args) {
    QLORA__ENTER(ctx, "qlora_cross_entropy");
    return qlora__leave(ctx, qlora__cross_entropy(ctx, args));
}

// ---- arg max ------------------------------------------------------------------------------------
//
// ids[r] = column of the largest value of row r, the first of equals; NaN is never largest.

typedef struct qlora__argmax_job {
    const qlora_tensor* x;
    const qlora_tensor* ids;
} qlora__argmax_job;

static void qlora__argmax_rows(void* user, int64_t begin, int64_t end) {
    const qlora__argmax_job* job = (const qlora__argmax_job*)user;
    for (int64_t row = begin; row < end; row++) {
        int64_t best = -1;
        for (int64_t c = 0; c < job->x->cols; c++) {
            QLORA__REAL v = qlora__at(job->x, row, c);
            if (v == v && (best < 0 || v > qlora__at(job->x, row, best))) {
                best = c;
            }
        }
        ((int32_t*)job->ids->data)[row] = (int32_t)(best < 0 ? 0 : best);
    }
}

static qlora_result qlora__argmax(qlora_ctx* ctx, qlora__argmax_job* job) {
    const qlora_tensor* x = job->x;
    QLORA__TRY(qlora__need(ctx, x, "x", QLORA__IS_F32_BF16, -1, -1));
    QLORA__TRY(qlora__need_vector(ctx, job->ids, "ids", QLORA__IS_I32, x->rows));
    QLORA__TRY(qlora__need_apart(ctx, "ids", job->ids, "x", x));
    if (x->cols == 0 ? x->rows > 0 : x->cols > INT32_MAX) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "no largest of %lld columns",
                           (long long)x->cols);
    }
    if (qlora__on_cpu(ctx)) {
        qlora__parallel(ctx, x->rows, 1 + 4096 / (1 + x->cols), qlora__argmax_rows, job);
        return QLORA_OK;
    }
    void* args[] = {(void*)&x->data, (void*)&x->ld, (void*)&job->ids->data, (void*)&x->cols};
    return qlora__launch(
        ctx, x->dtype == QLORA_F32 ? QLORA__K_loss_arg_max_f32 : QLORA__K_loss_arg_max_bf16,
        x->rows, 1, 1, 256, 0, args);
}

qlora_result qlora_argmax(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* ids) {
    QLORA__ENTER(ctx, "qlora_argmax");
    qlora__argmax_job job;
    job.x = x;
    job.ids = ids;
    return qlora__leave(ctx, qlora__argmax(ctx, &job));
}

// ---- AdamW --------------------------------------------------------------------------------------
//
// Decoupled decay, over ranges of one flat arena; t counts the updates applied. Per
// element, with g the gradient times the clip scale:
//   p -= lr weight_decay decay p;  m += (1 - beta1) (g - m);  v = beta2 v + (1 - beta2) g^2
//   p -= lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//   shadow = shadow_scale p;  gradient = 0
// A gradient that is not finite leaves p, m, v, t and shadow as they are; the gradient becomes 0.

// x^n by squaring, the products of the kernel.
static double qlora__power(double x, int64_t n) {
    double y = 1;
    for (; n > 0; n >>= 1) {
        if ((n & 1) != 0) {
            y *= x;
        }
        x *= x;
    }
    return y;
}

typedef struct qlora__adamw_job {
    const qlora_adamw_args* args;
    qlora_adamw_range range;
    QLORA__REAL clip;
    QLORA__REAL lr_decay;
    QLORA__REAL beta2;
    QLORA__REAL one_minus_beta1;
    QLORA__REAL one_minus_beta2;
    QLORA__REAL step_size;
    QLORA__REAL root_correction;
    QLORA__REAL eps;
    bool skip;
} qlora__adamw_job;

// Counts the update or the skip, and forms the corrections in double.
static void qlora__adamw_advance(qlora__adamw_job* job, qlora_adamw_state* state) {
    state->skip = job->skip ? 1 : 0;
    state->skipped += job->skip ? 1 : 0;
    state->updates += job->skip ? 0 : 1;
    double t1 = qlora__power(state->beta1, state->updates);
    double t2 = qlora__power(state->beta2, state->updates);
    job->lr_decay = (QLORA__REAL)(state->lr * state->weight_decay);
    job->beta2 = (QLORA__REAL)state->beta2;
    job->one_minus_beta1 = (QLORA__REAL)(1 - state->beta1);
    job->one_minus_beta2 = (QLORA__REAL)(1 - state->beta2);
    job->step_size = (QLORA__REAL)(state->lr / (1 - t1));
    job->root_correction = (QLORA__REAL)sqrt(1 - t2);
    job->eps = (QLORA__REAL)state->eps;
}

static void qlora__adamw_elements(void* user, int64_t begin, int64_t end) {
    const qlora__adamw_job* job = (const qlora__adamw_job*)user;
    const qlora_adamw_args* a = job->args;
    QLORA__REAL decay = job->lr_decay * (QLORA__REAL)job->range.decay;
    for (int64_t i = job->range.begin + begin; i < job->range.begin + end; i++) {
        if (!job->skip) {
            QLORA__REAL g = qlora__at(a->grad, 0, i) * job->clip;
            QLORA__REAL p = qlora__at(a->param, 0, i);
            QLORA__REAL m = qlora__at(a->m, 0, i);
            QLORA__REAL v = qlora__at(a->v, 0, i);
            p -= decay * p;
            m += job->one_minus_beta1 * (g - m);
            v = job->beta2 * v + job->one_minus_beta2 * g * g;
            p -= job->step_size * (m / (qlora__sqrt(v) / job->root_correction + job->eps));
            qlora__put(a->param, 0, i, p);
            qlora__put(a->m, 0, i, m);
            qlora__put(a->v, 0, i, v);
            if (a->shadow != NULL) {
                qlora__put(a->shadow, 0, i, (QLORA__REAL)job->range.shadow_scale * p);
            }
        }
        qlora__put(a->grad, 0, i, 0);
    }
}

static void qlora__adamw_shadow_elements(void* user, int64_t begin, int64_t end) {
    const qlora__adamw_job* job = (const qlora__adamw_job*)user;
    const qlora_adamw_args* a = job->args;
    for (int64_t i = job->range.begin + begin; i < job->range.begin + end; i++) {
        qlora__put(a->shadow, 0, i,
                   (QLORA__REAL)job->range.shadow_scale * qlora__at(a->param, 0, i));
    }
}

// Range i of the table in host memory.
static qlora_adamw_range qlora__adamw_range_at(const qlora_tensor* ranges, int64_t i) {
    qlora_adamw_range range;
    memcpy(&range, (const char*)ranges->data + (size_t)i * sizeof range, sizeof range);
    return range;
}

// param, shadow and ranges: what both calls use.
static qlora_result qlora__adamw_check(qlora_ctx* ctx, const qlora_adamw_args* a,
                                       int64_t* range_count) {
    if (a == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "args is NULL");
    }
    QLORA__TRY(qlora__need_vector(ctx, a->param, "param", QLORA__IS_F32, -1));
    QLORA__TRY(qlora__need_vector(ctx, a->ranges, "ranges", QLORA__IS_U8, -1));
    if (a->shadow != NULL) {
        QLORA__TRY(
            qlora__need_vector(ctx, a->shadow, "shadow", QLORA__IS_F32_BF16, a->param->cols));
        QLORA__TRY(qlora__need_apart(ctx, "shadow", a->shadow, "param", a->param));
    }
    if (a->ranges->cols % (int64_t)sizeof(qlora_adamw_range) != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "ranges has %lld bytes, not a multiple of %d",
                           (long long)a->ranges->cols, (int)sizeof(qlora_adamw_range));
    }
    *range_count = a->ranges->cols / (int64_t)sizeof(qlora_adamw_range);
    for (int64_t i = 0; qlora__on_cpu(ctx) && i < *range_count; i++) {
        qlora_adamw_range r = qlora__adamw_range_at(a->ranges, i);
        if (r.begin < 0 || r.count < 0 || r.begin > a->param->cols ||
            r.count > a->param->cols - r.begin) {
            return qlora__fail(
                ctx, QLORA_ERR_ARGUMENT, "range %lld is [%lld, +%lld), the arena has %lld elements",
                (long long)i, (long long)r.begin, (long long)r.count, (long long)a->param->cols);
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__adamw_check_step(qlora_ctx* ctx, const qlora_adamw_args* a) {
    int64_t n = a->param->cols;
    QLORA__TRY(qlora__need_vector(ctx, a->grad, "grad", QLORA__IS_F32, n));
    QLORA__TRY(qlora__need_vector(ctx, a->m, "m", QLORA__IS_F32, n));
    QLORA__TRY(qlora__need_vector(ctx, a->v, "v", QLORA__IS_F32, n));
    QLORA__TRY(qlora__need_vector(ctx, a->state, "state", QLORA__IS_U8,
                                  (int64_t)sizeof(qlora_adamw_state)));
    if (a->clip_scale != NULL) {
        QLORA__TRY(qlora__need_vector(ctx, a->clip_scale, "clip_scale", QLORA__IS_F32, 1));
    }
    if (a->not_finite != NULL) {
        QLORA__TRY(qlora__need_vector(ctx, a->not_finite, "not_finite", QLORA__IS_I32, 1));
    }
    QLORA__TRY(qlora__need_apart(ctx, "param", a->param, "grad", a->grad));
    QLORA__TRY(qlora__need_apart(ctx, "param", a->param, "m", a->m));
    QLORA__TRY(qlora__need_apart(ctx, "param", a->param, "v", a->v));
    QLORA__TRY(qlora__need_apart(ctx, "grad", a->grad, "m", a->m));
    QLORA__TRY(qlora__need_apart(ctx, "grad", a->grad, "v", a->v));
    return qlora__need_apart(ctx, "m", a->m, "v", a->v);
}

// fn over every range, one after the other.
static void qlora__adamw_ranges(qlora_ctx* ctx, qlora__adamw_job* job, int64_t range_count,
                                qlora__range_fn fn) {
    for (int64_t i = 0; i < range_count; i++) {
        job->range = qlora__adamw_range_at(job->args->ranges, i);
        qlora__parallel(ctx, job->range.count, 4096, fn, job);
    }
}

// Blocks along a range of `pieces` pieces of 256 threads: about 8192 in all.
static int64_t qlora__adamw_blocks(const qlora_adamw_args* a, int64_t range_count,
                                   int64_t per_block) {
    int64_t longest = a->longest_range > 0 ? a->longest_range : a->param->cols;
    int64_t wanted = qlora__ceil_div(longest, per_block);
    return qlora__min(wanted, qlora__max(8192 / qlora__max(range_count, 1), 8));
}

static qlora_result qlora__adamw_step(qlora_ctx* ctx, const qlora_adamw_args* a) {
    int64_t range_count = 0;
    QLORA__TRY(qlora__adamw_check(ctx, a, &range_count));
    QLORA__TRY(qlora__adamw_check_step(ctx, a));
    if (qlora__on_cpu(ctx)) {
        qlora__adamw_job job;
        memset(&job, 0, sizeof job);
        job.args = a;
        job.clip = a->clip_scale != NULL ? qlora__at(a->clip_scale, 0, 0) : 1;
        job.skip = a->not_finite != NULL && qlora__index_at(a->not_finite, 0) != 0;
        qlora_adamw_state state;
        memcpy(&state, a->state->data, sizeof state);
        qlora__adamw_advance(&job, &state);
        memcpy(a->state->data, &state, sizeof state);
        qlora__adamw_ranges(ctx, &job, range_count, qlora__adamw_elements);
        return QLORA_OK;
    }
    void* not_finite = a->not_finite != NULL ? a->not_finite->data : NULL;
    void* clip = a->clip_scale != NULL ? a->clip_scale->data : NULL;
    void* shadow = a->shadow != NULL ? a->shadow->data : NULL;
    void* advance[] = {(void*)&a->state->data, &not_finite};
    QLORA__TRY(qlora__launch(ctx, QLORA__K_optim_advance, 1, 1, 1, 32, 0, advance));
    void* args[] = {(void*)&a->param->data,
                    (void*)&a->grad->data,
                    (void*)&a->m->data,
                    (void*)&a->v->data,
                    &shadow,
                    (void*)&a->ranges->data,
                    &range_count,
                    (void*)&a->state->data,
                    &clip};
    bool wide = a->shadow != NULL && a->shadow->dtype == QLORA_F32;
    return qlora__launch(ctx, wide ? QLORA__K_optim_adamw_f32 : QLORA__K_optim_adamw_bf16,
                         qlora__adamw_blocks(a, range_count, 1024), qlora__min(range_count, 65535),
                         1, 256, 0, args);
}

static qlora_result qlora__adamw_shadow(qlora_ctx* ctx, const qlora_adamw_args* a) {
    int64_t range_count = 0;
    QLORA__TRY(qlora__adamw_check(ctx, a, &range_count));
    if (a->shadow == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "shadow is NULL");
    }
    if (qlora__on_cpu(ctx)) {
        qlora__adamw_job job;
        memset(&job, 0, sizeof job);
        job.args = a;
        qlora__adamw_ranges(ctx, &job, range_count, qlora__adamw_shadow_elements);
        return QLORA_OK;
    }
    void* args[] = {(void*)&a->param->data, (void*)&a->shadow->data, (void*)&a->ranges->data,
                    &range_count};
    return qlora__launch(
        ctx, a->shadow->dtype == QLORA_F32 ? QLORA__K_optim_shadow_f32 : QLORA__K_optim_shadow_bf16,
        qlora__adamw_blocks(a, range_count, 256), qlora__min(range_count, 65535), 1, 256, 0, args);
}

qlora_result qlora_adamw_step(qlora_ctx* ctx, const qlora_adamw_args* args) {
    QLORA__ENTER(ctx, "qlora_adamw_step");
    return qlora__leave(ctx, qlora__adamw_step(ctx, args));
}

qlora_result qlora_adamw_shadow(qlora_ctx* ctx, const qlora_adamw_args* args) {
    QLORA__ENTER(ctx, "qlora_adamw_shadow");
    return qlora__leave(ctx, qlora__adamw_shadow(ctx, args));
}

// ---- dropout ------------------------------------------------------------------------------------
//
//   y = x keep / (1 - p)
//
// keep where the element's random word is not below p 2^32; the
// word of column c is number c % 4 of philox(counter, key) with
//   counter = (c / 4, position, sequence, layer 2^8 + projection),  key = seed + step
//   0x9e3779b97f4a7c15

typedef struct qlora__dropout_job {
    const qlora_dropout_args* args;
    uint32_t threshold;
    uint32_t where;
    float scale;
} qlora__dropout_job;

// True when column `column` of that row is kept.
static bool qlora__dropout_keep(const uint32_t key[2], uint32_t position, uint32_t sequence,
                                uint32_t where, int64_t column, uint32_t threshold) {
    uint32_t counter[4];
    uint32_t words[4];
    counter[0] = (uint32_t)(column / 4);
    counter[1] = position;
    counter[2] = sequence;
    counter[3] = where;
    qlora__philox(counter, key, words);
    return words[column % 4] >= threshold;
}

static void qlora__dropout_rows(void* user, int64_t begin, int64_t end) {
    const qlora__dropout_job* job = (const qlora__dropout_job*)user;
    const qlora_dropout_args* a = job->args;
    uint64_t seed = (uint64_t)(uint32_t)qlora__index_at(a->state, 1) << 32 |
                    (uint32_t)qlora__index_at(a->state, 0);
    uint64_t mixed = seed + (uint64_t)(uint32_t)qlora__index_at(a->state, 2) * 0x9e3779b97f4a7c15u;
    uint32_t key[2];
    key[0] = (uint32_t)mixed;
    key[1] = (uint32_t)(mixed >> 32);
    for (int64_t row = begin; row < end; row++) {
        uint32_t position = (uint32_t)qlora__index_at(a->positions, row);
        uint32_t sequence = (uint32_t)qlora__index_at(a->sequences, row);
        for (int64_t c = 0; c < a->x->cols; c++) {
            QLORA__REAL v = 0;
            if (qlora__dropout_keep(key, position, sequence, job->where, c, job->threshold)) {
                v = qlora__at(a->x, row, c) * (QLORA__REAL)job->scale;
            }
            if (a->accumulate) {
                v += qlora__at(a->y, row, c);
            }
            qlora__put(a->y, row, c, v);
        }
    }
}

static qlora_result qlora__dropout(qlora_ctx* ctx, const qlora_dropout_args* a) {
    if (a == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "args is NULL");
    }
    const qlora_tensor* x = a->x;
    QLORA__TRY(qlora__need(ctx, x, "x", QLORA__IS_F32_BF16, -1, -1));
    QLORA__TRY(qlora__need(ctx, a->y, "y", qlora__is(x->dtype), x->rows, x->cols));
    QLORA__TRY(qlora__need_same_or_apart(ctx, "y", a->y, "x", x));
    QLORA__TRY(qlora__need_vector(ctx, a->positions, "positions", QLORA__IS_I32, x->rows));
    QLORA__TRY(qlora__need_vector(ctx, a->sequences, "sequences", QLORA__IS_I32, x->rows));
    QLORA__TRY(qlora__need_vector(ctx, a->state, "state", QLORA__IS_I32, 4));
    if (!(a->p >= 0) || !(a->p < 1) || a->layer < 0 || a->layer >= 1 << 23 || a->projection < 0 ||
        a->projection > 255) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "p = %g, layer %d, projection %d: 0 <= p < 1, 0 <= layer < 2^23, 0 <= "
                           "projection <= 255",
                           (double)a->p, (int)a->layer, (int)a->projection);
    }
    qlora__dropout_job job;
    job.args = a;
    job.threshold = (uint32_t)((double)a->p * 4294967296.0);
    job.where = (uint32_t)a->layer << 8 | (uint32_t)a->projection;
    job.scale = (float)(1 / (1 - (double)a->p));
    if (qlora__on_cpu(ctx)) {
        qlora__parallel(ctx, x->rows, 1 + 1024 / (1 + x->cols), qlora__dropout_rows, &job);
        return QLORA_OK;
    }
    int32_t accumulate = a->accumulate ? 1 : 0;
    qlora__point_shape shape = qlora__point_shape_of(x->cols, qlora__piece(x->dtype));
    void* args[] = {(void*)&x->data,
                    (void*)&x->ld,
                    (void*)&a->y->data,
                    (void*)&a->y->ld,
                    (void*)&a->positions->data,
                    (void*)&a->sequences->data,
                    (void*)&a->state->data,
                    &job.where,
                    (void*)&x->rows,
                    (void*)&x->cols,
                    &job.threshold,
                    &job.scale,
                    &accumulate};
    return qlora__launch(ctx, x->dtype == QLORA_F32 ? QLORA__K_dropout_f32 : QLORA__K_dropout_bf16,
                         shape.blocks, qlora__min(x->rows, 65535), 1, shape.threads, 0, args);
}

qlora_result qlora_dropout(qlora_ctx* ctx, const qlora_dropout_args* args) {
    QLORA__ENTER(ctx, "qlora_dropout");
    return qlora__leave(ctx, qlora__dropout(ctx, args));
}

//@@ GRAPH      - capture, replay, invalidation

static void qlora__graph_free(qlora_ctx* ctx, qlora_graph* graph) {
    qlora__free(ctx, graph->buffers, graph->buffer_capacity * sizeof *graph->buffers);
    qlora__free(ctx, graph, sizeof *graph);
}

#ifndef QLORA_NO_CUDA

// Ends a capture whatever happened inside, so that the stream is usable again.
static qlora_result qlora__graph_record(qlora_ctx* ctx, qlora_graph* graph, void** recorded) {
    qlora__gpu* gpu = ctx->gpu;
    QLORA__TRY(qlora__cu(
        ctx,
        gpu->cu.StreamBeginCapture(gpu->stream, QLORA__CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
        "cuStreamBeginCapture"));
    qlora__capture capture;
    memset(&capture, 0, sizeof capture);
    ctx->capture = &capture;
    qlora_result r = graph->fn(ctx, graph->user);
    ctx->capture = NULL;
    char text[QLORA__ERROR_SIZE];
    snprintf(text, sizeof text, "%s", r != QLORA_OK ? ctx->error : capture.broke);
    int code = gpu->cu.StreamEndCapture(gpu->stream, recorded);
    graph->buffers = capture.ids;
    graph->buffer_count = capture.count;
    graph->buffer_capacity = capture.capacity;
    if (qlora__cu_is_sticky(code)) {
        return qlora__cu(ctx, code, "cuStreamEndCapture");
    }
    if (r == QLORA_OK && text[0] == '\0' && code == 0) {
        return QLORA_OK;
    }
    if (code == 0 && *recorded != NULL) {
        gpu->cu.GraphDestroy(*recorded);
    }
    *recorded = NULL;
    if (r == QLORA_ERR_DEVICE_LOST) {
        return r;
    }
    const char* name = code != 0 ? qlora__cu_name(gpu, code) : "";
    return qlora__fail(ctx, QLORA_ERR_CAPTURE, "graph %llu was not captured: %.500s%s%s",
                       (unsigned long long)graph->key,
                       text[0] != '\0' ? text
                       : r != QLORA_OK ? "the callback failed without a message"
                                       : "a call inside the callback cannot be captured",
                       code != 0 ? "; cuStreamEndCapture says " : "", name);
}

static qlora_result qlora__graph_instantiate(qlora_ctx* ctx, qlora_graph* graph, void* recorded) {
    qlora__gpu* gpu = ctx->gpu;
    QLORA__TRY(qlora__cu(ctx, gpu->cu.GraphGetNodes(recorded, NULL, &graph->nodes), "cuGraphGetNodes"));
    QLORA__TRY(qlora__cu(ctx, gpu->cu.GraphInstantiate(&graph->exec, recorded, 0),
                         "cuGraphInstantiateWithFlags"));
    return qlora__cu(ctx, gpu->cu.GraphLaunch(graph->exec, gpu->stream), "cuGraphLaunch");
}

static qlora_result qlora__graph_build(qlora_ctx* ctx, qlora_graph* graph) {
    if (qlora__on_cpu(ctx)) {
        return graph->fn(ctx, graph->user);
    }
    void* recorded = NULL;
    QLORA__TRY(qlora__graph_record(ctx, graph, &recorded));
    qlora_result r = qlora__graph_instantiate(ctx, graph, recorded);
    ctx->gpu->cu.GraphDestroy(recorded);
    return r;
}

static void qlora__graph_drop_exec(qlora_ctx* ctx, qlora_graph* graph) {
    if (graph->exec != NULL) {
        ctx->gpu->cu.GraphExecDestroy(graph->exec);
    }
}

static qlora_result qlora__graph_launch(qlora_ctx* ctx, qlora_graph* graph) {
    return qlora__cu(ctx, ctx->gpu->cu.GraphLaunch(graph->exec, ctx->gpu->stream), "cuGraphLaunch");
}

#else

static qlora_result qlora__graph_build(qlora_ctx* ctx, qlora_graph* graph) {
    return graph->fn(ctx, graph->user);
}

static void qlora__graph_drop_exec(qlora_ctx* ctx, qlora_graph* graph) {
    (void)ctx;
    (void)graph;
}

static qlora_result qlora__graph_launch(qlora_ctx* ctx, qlora_graph* graph) {
    return graph->fn(ctx, graph->user);
}

#endif

static qlora_result qlora__graph_capture(qlora_ctx* ctx, uint64_t key, qlora_graph_fn fn, void* user,
                                         qlora_graph** out) {
    if (fn == NULL || out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is NULL", fn == NULL ? "fn" : "out");
    }
    QLORA__TRY(qlora__not_in_capture(ctx, "capturing another graph"));
    qlora_graph* graph = (qlora_graph*)qlora__alloc_zero(ctx, sizeof *graph);
    if (graph == NULL) {
        return QLORA_ERR_MEMORY;
    }
    graph->owner = ctx;
    graph->key = key;
    graph->fn = fn;
    graph->user = user;
    qlora_result r = qlora__graph_build(ctx, graph);
    if (r != QLORA_OK) {
        QLORA__LOG(ctx, WARN, GRAPH, "%s", ctx->error);
        qlora__graph_drop_exec(ctx, graph);
        qlora__graph_free(ctx, graph);
        return r;
    }
    graph->next = ctx->graphs;
    ctx->graphs = graph;
    ctx->children++;
    QLORA__LOG(ctx, INFO, GRAPH, "graph %llu captured, %llu nodes", (unsigned long long)key,
               (unsigned long long)graph->nodes);
    *out = graph;
    return QLORA_OK;
}

qlora_result qlora_graph_capture(qlora_ctx* ctx, uint64_t key, qlora_graph_fn fn, void* user,
                                 qlora_graph** out) {
    QLORA__ENTER(ctx, "qlora_graph_capture");
    return qlora__leave(ctx, qlora__graph_capture(ctx, key, fn, user, out));
}

static qlora_result qlora__graph_need(qlora_ctx* ctx, const qlora_graph* graph) {
    if (graph == NULL || graph->owner != ctx) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "graph %s",
                           graph == NULL ? "is NULL" : "belongs to another context");
    }
    return QLORA_OK;
}

static qlora_result qlora__graph_replay(qlora_ctx* ctx, qlora_graph* graph, uint64_t key) {
    QLORA__TRY(qlora__graph_need(ctx, graph));
    QLORA__TRY(qlora__not_in_capture(ctx, "replaying a graph"));
    if (graph->key != key) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "the graph was captured for key %llu and is asked to run for %llu; capture "
                           "one for that",
                           (unsigned long long)graph->key, (unsigned long long)key);
    }
    if (graph->invalid[0] != '\0') {
        return qlora__fail(ctx, QLORA_ERR_STATE, "graph %llu cannot be replayed: %s; capture it again",
                           (unsigned long long)key, graph->invalid);
    }
    QLORA__TRY(qlora__on_cpu(ctx) ? graph->fn(ctx, graph->user) : qlora__graph_launch(ctx, graph));
    graph->replays++;
    return QLORA_OK;
}

qlora_result qlora_graph_replay(qlora_ctx* ctx, qlora_graph* graph, uint64_t key) {
    QLORA__ENTER(ctx, "qlora_graph_replay");
    return qlora__leave(ctx, qlora__graph_replay(ctx, graph, key));
}

static qlora_result qlora__graph_destroy(qlora_ctx* ctx, qlora_graph* graph) {
    if (graph == NULL) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__graph_need(ctx, graph));
    QLORA__TRY(qlora__not_in_capture(ctx, "destroying a graph"));
    qlora_graph** link = &ctx->graphs;
    while (*link != graph) {
        link = &(*link)->next;
    }
    *link = graph->next;
    qlora__graph_drop_exec(ctx, graph);
    qlora__graph_free(ctx, graph);
    ctx->children--;
    return QLORA_OK;
}

qlora_result qlora_graph_destroy(qlora_ctx* ctx, qlora_graph* graph) {
    QLORA__TRY(qlora__enter_destroy(ctx, "qlora_graph_destroy"));
    return qlora__leave(ctx, qlora__graph_destroy(ctx, graph));
}

static qlora_result qlora__graph_query(qlora_ctx* ctx, const qlora_graph* graph,
                                       qlora_graph_info* out) {
    QLORA__TRY(qlora__graph_need(ctx, graph));
    if (out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    out->key = graph->key;
    out->replays = graph->replays;
    out->nodes = graph->nodes;
    out->valid = graph->invalid[0] == '\0';
    return QLORA_OK;
}

qlora_result qlora_graph_query(qlora_ctx* ctx, const qlora_graph* graph, qlora_graph_info* out) {
    QLORA__ENTER(ctx, "qlora_graph_query");
    return qlora__leave(ctx, qlora__graph_query(ctx, graph, out));
}

#if defined(__clang__)
#pragma clang diagnostic pop
#endif

#endif // QLORA_IMPLEMENTATION_DONE
#endif // QLORA_IMPLEMENTATION

/*
    Licence: MIT No Attribution, or the Unlicense, at your choice. The texts stand in LICENSE.
*/
