/* qlora.h - v0.2.0 - QLoRA fine-tuning of language models from C - SPDX: MIT-0 OR Unlicense

   Do this in ONE C or C++ file:

       #define QLORA_IMPLEMENTATION
       #include "qlora.h"

   and include "qlora.h" without the macro everywhere else. Keep kernels_ptx.h in the same folder.
   Link with -ldl -lm -lpthread on Linux and with nothing else on Windows. qlora_text.h next to it
   is the tokenizer, the chat formats and the data files.

   CONTENTS  (grep -n '^//@@' qlora.h lists every part)

       api        declarations: context, models, training, generation, adapters, then the runtime
       platform   dynamic libraries, threads, clock, files; the only place with _WIN32
       core       errors, log, memory, checked arithmetic, CPU threads, random numbers
       numbers    16-bit floating point, element access, NF4
       formats    JSON, safetensors, Hugging Face folders, PEFT adapters, GGUF adapters
       driver     CUDA driver and cuBLAS: symbols, device facts, error names
       tensor     memory, tensors, copies and fills on the context's stream, staging
       cache      kernel registry, PTX for a target, modules, seal, launch
       context    creation, backend choice, stream, native handles, description
       cpu        CPU loops of the matrix products
       gemm       the GEMM family, dense and NF4: cuBLAS, our PTX, CPU
       ops        operators: the formula, the CPU loop, the launch; pre-warm
       graph      capture, replay, invalidation
       model      plan, arena, weights, layers forward and backward, evaluation
       adapter    PEFT folders, copies between models, merged export, GGUF export
       train      steps, slices, schedules, checkpoints
       generate   decoding with a key/value cache, one token per call

   This file is assembled from the parts in src/ of the repository; changes are made there.

   QUICK START

       qlora_ctx_desc machine = {0};              // zero means "the default" everywhere
       qlora_model_desc what = {0};
       qlora_train_desc how = {0};
       machine.log = qlora_log_stderr;
       what.dir = "path/to/model";                // Hugging Face format
       what.tokens = 2048;                        // per micro-batch
       what.generate_tokens = 256;
       how.lr = 2e-4;

       qlora_ctx* ctx; qlora_model* model; qlora_trainer* trainer; qlora_train_info info;
       qlora_ctx_create(&machine, &ctx);          // a GPU if there is one, otherwise the CPU
       qlora_model_open(ctx, &what, &model);      // plans the memory, loads, quantises to 4 bits
       qlora_trainer_create(model, &how, &trainer);
       for (int step = 0; step < steps; step++) {
           qlora_train_step(trainer, batches, count, &info);
           printf("loss %g\n", info.loss);
       }
       qlora_adapter_save(model, "adapter", NULL); // PEFT loads this folder
       qlora_trainer_destroy(trainer);
       qlora_model_close(model);
       qlora_ctx_destroy(ctx);

     Every call returns a qlora_result, which a program checks. In a game loop, replace
     qlora_train_step by qlora_train_begin and one qlora_train_slice(trainer, 4.0, &done) per frame;
     qlora_generate_begin and qlora_generate_next produce one token per call.

   BUILD AND LINK
       C99 or C++11, 64-bit, little endian. Linux, Windows (mingw-w64, MSVC), macOS and BSD (CPU
       only). Put the implementation in a file of its own: it takes about ten seconds to compile at
       -O2. Include it before any system header there, or build with -D_POSIX_C_SOURCE=200809L.

   CONFIGURATION (define before the implementation; none of them changes a public type)
       QLORA_STATIC          make every function static: a private copy for one file
       QLORA_DLL             mark functions for a shared library
       QLORA_NO_CUDA         leave out the GPU: no dynamic loading, no kernels_ptx.h
       QLORA_NO_MODEL        leave out models, training and file formats: the bare runtime
       QLORA_PTX_NO_BF16 ... leave out groups of GPU kernels; kernels_ptx.h lists them with sizes
       QLORA_ASSERT(x)       checks our own invariants only; never files, arguments or devices
       QLORA_KERNELS_HEADER  another name for "kernels_ptx.h"
       QLORA_DEBUG           synchronise after every launch, so that a fault names its kernel

   OBJECTS
       qlora_ctx (device, memory hooks, error text) -> qlora_model (base, adapters, memory) ->
       qlora_trainer (optimizer, graphs) and qlora_generation (one text). Children are destroyed
       first; destroying a parent with living children fails, names them, and frees nothing.
       A setting belongs to the object that uses it: the machine to the context, weights and memory
       to the model, optimizer and schedule to the trainer. qlora_ctx_create compares the version
       and the struct sizes of this header with those of the implementation.

   ERRORS
       Every call that can fail returns a qlora_result and writes its outputs only on success.
       qlora_last_error(ctx) explains what failed, where, and what to do; it is never NULL, "" after
       a successful call, and valid until the next call on that context. The library never exits,
       aborts or prints. After a fault on the device (an illegal address, for example), CUDA makes
       every later call in that CUDA context fail: such a qlora_ctx returns QLORA_ERR_DEVICE_LOST
       and can only be destroyed. A destroy or close that returns an error has freed nothing; call
       it again.

   MEMORY
       Host memory goes through desc.allocator, device memory through desc.device_allocator. A model
       allocates everything when it is opened, and a trainer when it is created; steps, evaluation
       and generation allocate no device memory. The operators use a scratch buffer of
       desc.scratch_bytes that is allocated with the context. A tensor is a small struct that points
       to memory; qlora_tensor_create allocates, qlora_tensor_wrap and qlora_tensor_view do not.

   TIME
       A step can be taken whole, by halves (micro, update) or in slices of a few milliseconds, with
       the same bits each way. qlora_train_query waits for the last step, qlora_train_poll never
       waits. Long calls take a progress function that can stop them.

   THREADS
       A context and everything created from it must be used by one thread at a time; different
       contexts are independent. Log and allocator callbacks may come from any thread and must not
       call back.

   LOG
       Silent unless desc.log is set; qlora_log_stderr is supplied.

   DEVICES AND FALLBACK
       CUDA when it is usable (compute capability 7.5 or later), otherwise the CPU.
       qlora_ctx_backend returns which, qlora_ctx_reason why; desc.require_backend turns the
       fallback into an error, and so does naming a device other than 0 or a CUDA handle. The
       device's primary context is used unless desc.cu_context is given; it is current only inside
       our calls.

   NUMERICS
       Deterministic: no float atomics, one writer per output, a fixed order of summation, choices
       from committed tables and the context's settings. The same inputs give the same bytes on the
       same device, driver and cuBLAS, and on the CPU for any number of threads. F32 is exact fp32
       unless the context's math asks for TF32, which a model adopts when it is opened; 16-bit
       operands accumulate in fp32. 4-bit weights are dequantised to bf16 values in every mode, as
       bitsandbytes does. Built with -ffast-math, the CPU results are unspecified.

   LIMITS
       Rows, columns and leading dimensions of a GEMM fit in 31 bits; buffers in 63.

   QLORA DOES NOT
       pre-train, distribute over several GPUs, run mixtures of experts or vision towers, or use the
       network.
*/

#if !defined(__cplusplus) && (!defined(__STDC_VERSION__) || __STDC_VERSION__ < 199901L) &&         \
    !defined(_MSC_VER)
#error "qlora.h needs C99 or C++11: compile with -std=c99 or later"
#include <stop> /* there is no such file: the compiler stops here */
#endif

//@@ src/qlora.h

#ifndef QLORA_H
#define QLORA_H


//@@ src/api/linkage.h

// The implementations need POSIX names that -std=c99 hides; harmless when the user set them
// already.
#if (defined(QLORA_IMPLEMENTATION) || defined(QLORA_TEXT_IMPLEMENTATION)) && !defined(_WIN32)
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

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// qlora.h and qlora_text.h each carry this part; whichever comes second compares.
#ifndef QLORA_VERSION_MAJOR
#define QLORA_VERSION_MAJOR 0
#define QLORA_VERSION_MINOR 2
#define QLORA_VERSION_PATCH 0
#define QLORA_VERSION                                                                              \
    (QLORA_VERSION_MAJOR * 10000 + QLORA_VERSION_MINOR * 100 + QLORA_VERSION_PATCH)
#define QLORA_VERSION_STRING "0.2.0"
#elif QLORA_VERSION_MAJOR != 0 || QLORA_VERSION_MINOR != 2 || QLORA_VERSION_PATCH != 0
#error "qlora.h and qlora_text.h are of different versions; take both from one release"
#endif

#ifndef QLORA_API
#if defined(QLORA_STATIC)
#if defined(__GNUC__)
#define QLORA_API static __attribute__((unused))
#else
#define QLORA_API static
#endif
#elif defined(QLORA_DLL) && defined(_WIN32)
#if defined(QLORA_IMPLEMENTATION) || defined(QLORA_TEXT_IMPLEMENTATION)
#define QLORA_API __declspec(dllexport) extern
#else
#define QLORA_API __declspec(dllimport) extern
#endif
#elif defined(QLORA_DLL) && defined(__GNUC__)
#define QLORA_API __attribute__((visibility("default"))) extern
#else
#define QLORA_API extern
#endif
#endif // QLORA_API

//@@ src/qlora.h

#ifdef __cplusplus
extern "C" {
#endif


//@@ src/api/base.h

#ifndef QLORA_BASE_INCLUDED
#define QLORA_BASE_INCLUDED

// ---- results ------------------------------------------------------------------------------------
// clang-format off
// Name, value (never reused for another result), description.
#define QLORA_RESULTS(X)                                                                    \
    X(OK,                 0,    "ok")                                                       \
    X(ERR_ARGUMENT,      -1,    "an argument is invalid")                                   \
    X(ERR_MEMORY,        -2,    "out of host memory")                                       \
    X(ERR_LIMIT,         -3,    "a size is too large")                                      \
    X(ERR_STATE,         -4,    "the object is not in a state that allows this call")       \
    X(ERR_UNSUPPORTED,   -5,    "not supported")                                            \
    X(ERR_STOPPED,       -6,    "stopped by the caller")                                    \
    X(ERR_VERSION,       -7,    "the program and the library use different headers")        \
    X(ERR_FILE,          -100,  "a file could not be read or written")                      \
    X(ERR_FORMAT,        -101,  "a file is malformed")                                      \
    X(ERR_CUDA,          -200,  "a CUDA call failed")                                       \
    X(ERR_DEVICE_MEMORY, -201,  "out of device memory")                                     \
    X(ERR_DEVICE_LOST,   -202,  "the CUDA context is unusable after an earlier fault")      \
    X(ERR_BACKEND,       -203,  "the required backend is not available")                    \
    X(ERR_KERNEL,        -204,  "a kernel could not be compiled or found")                  \
    X(ERR_TARGET,        -205,  "the PTX has a different target from this device")           \
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

// ---- hooks --------------------------------------------------------------------------------------
typedef enum qlora_log_level {
    QLORA_LOG_ERROR = 1,
    QLORA_LOG_WARN = 2,
    QLORA_LOG_INFO = 3,
    QLORA_LOG_DEBUG = 4
} qlora_log_level;

// clang-format off
#define QLORA_LOG_ITEMS(X)                                                                  \
    X(BACKEND,        "the backend in use, and why")                                        \
    X(CUBLAS,         "cuBLAS was loaded, or why not")                                      \
    X(KERNEL_COMPILE, "a module was compiled, or could not be")                             \
    X(PREWARM,        "pre-warm finished")                                                  \
    X(GRAPH,          "a graph was captured, invalidated, or capture failed")               \
    X(MODEL,          "a model is ready")                                                   \
    X(DEVICE_LOST,    "a fault made the device unusable")                                   \
    X(LEAK,           "an object still exists when its context is destroyed")               \
    X(CHECKPOINT,     "a checkpoint was saved, loaded, or skipped")                         \
    X(TEXT,           "a tokenizer, chat format or data file was read")
// clang-format on

typedef enum qlora_log_item {
#define QLORA_X_LOG(name, text) QLORA_LOG_ITEM_##name,
    QLORA_LOG_ITEMS(QLORA_X_LOG)
#undef QLORA_X_LOG
    QLORA_LOG_ITEM_COUNT
} qlora_log_item;

// text is never NULL; file may be NULL. Both are valid only during the call.
typedef void (*qlora_log_fn)(void* user, qlora_log_level level, qlora_log_item item,
                             const char* text, const char* file, int line);

// Host memory. Set both functions or neither. align is a power of two. alloc returns NULL on
// failure; free receives the size that was passed to alloc.
typedef struct qlora_allocator {
    void* (*alloc)(size_t bytes, size_t align, void* user);
    void (*free)(void* pointer, size_t bytes, void* user);
    void* user;
} qlora_allocator;

// Device memory of the current CUDA context. Set both functions or neither. alloc returns memory
// that is at least 256-byte aligned, or NULL on failure.
typedef struct qlora_device_allocator {
    void* (*alloc)(size_t bytes, void* user);
    void (*free)(void* pointer, size_t bytes, void* user);
    void* user;
} qlora_device_allocator;

typedef enum qlora_file_mode {
    QLORA_FILE_READ = 0,
    QLORA_FILE_CREATE = 1 // a new file for writing; EEXIST if the name exists, even as a link
} qlora_file_mode;

// Set all functions or none. Those that return int return 0 or an errno value. read and write
// return the number of bytes or a negative errno value: after a short write, the rest is written
// again; a read of 0 bytes is the end of the file.
typedef struct qlora_files {
    int (*open)(const char* path, qlora_file_mode mode, void** file, void* user);
    int64_t (*read)(void* file, void* buffer, size_t bytes, void* user);
    int64_t (*write)(void* file, const void* data, size_t bytes, void* user);
    int (*sync)(void* file, void* user); // returns once the data is on disk
    int (*close)(void* file, void* user);
    int (*rename)(const char* from, const char* to, void* user); // replaces `to` atomically
    int (*remove)(const char* path, void* user);
    int (*make_dir)(const char* path, void* user); // also 0 if it already exists
    int (*sync_dir)(const char* path, void* user); // makes names in the directory durable
    // Maps a whole file for reading. handle is passed to unmap.
    int (*map)(const char* path, const void** data, uint64_t* bytes, void** handle, void* user);
    void (*unmap)(const void* data, uint64_t bytes, void* handle, void* user);
    void* user;
} qlora_files;

#endif // QLORA_BASE_INCLUDED

//@@ src/api/context.h

// ---- names, version, log ------------------------------------------------------------------------

// "ERR_ARGUMENT", and a sentence; "unknown" for any other value.
QLORA_API const char* qlora_result_name(qlora_result result);
QLORA_API const char* qlora_result_text(qlora_result result);

QLORA_API int qlora_version(void); // QLORA_VERSION of the implementation

// One line per item on standard error; user is ignored.
QLORA_API void qlora_log_stderr(void* user, qlora_log_level level, qlora_log_item item,
                                const char* text, const char* file, int line);

// ---- context ------------------------------------------------------------------------------------
typedef struct qlora_ctx qlora_ctx;

typedef enum qlora_backend {
    QLORA_BACKEND_ANY = 0, // CUDA if usable, otherwise the CPU
    QLORA_BACKEND_CPU = 1,
    QLORA_BACKEND_CUDA = 2
} qlora_backend;

// How cuBLAS computes products of two f32 matrices. 16-bit operands always accumulate in fp32. A
// model keeps the math that its context had when it was opened.
typedef enum qlora_math {
    QLORA_MATH_F32 = 0,     // exact fp32 everywhere
    QLORA_MATH_TF32 = 1,    // forward on TF32 tensor cores, backward in exact fp32
    QLORA_MATH_TF32_ALL = 2 // forward and backward on TF32 tensor cores
} qlora_math;

// Zero it before setting fields: 0 is the default of every field.
typedef struct qlora_ctx_desc {
    uint32_t reserved_must_be_zero0;
    // These two keep their place in every version, so that a version mismatch can be reported.
    char* error_text; // receives the reason if qlora_ctx_create fails; may be NULL
    size_t error_text_size;
    qlora_backend require_backend; // fail unless this backend can be used; 0 = ANY
    int32_t device;                // CUDA device number, then required; 0 = the first, if any
    int32_t threads;               // CPU threads, at most 64; 0 = one per core
    qlora_math math;               // 0 = F32
    void* cu_context;              // CUcontext to use; NULL = the device's primary context
    void* cu_stream;               // CUstream to use; NULL = the context's own stream
    int32_t stream_priority;       // of the context's own streams; lower is more urgent, as in CUDA
    const char* cuda_library;      // path; NULL = the usual names
    const char* cublas_library;    // path; NULL = the usual names, newest first; "none" = not used
    size_t workspace_bytes;        // of each of the two cuBLAS workspaces; 0 = 32 MiB
    void* workspace;               // the first one: device memory, 256-byte aligned; NULL = own
    size_t scratch_bytes;          // for operators; 0 = 64 MiB on CUDA, 16 MiB on the CPU
    qlora_allocator allocator;     // host memory; zero = malloc
    qlora_device_allocator device_allocator; // zero = cuMemAlloc
    qlora_files files;                       // zero = the operating system's files
    qlora_log_fn log;                        // NULL = silent
    void* log_user;                          // passed to log
    uint32_t reserved_must_be_zero1;
} qlora_ctx_desc;

// desc NULL = all defaults. The desc is copied; handles, hooks and strings must outlive the
// context. Fails with QLORA_ERR_VERSION if the program was compiled with another version of this
// header or with structs of other sizes.
#define qlora_ctx_create(desc, out)                                                                \
    qlora_ctx_create_abi((desc), (out), QLORA_VERSION, QLORA_ABI)
QLORA_API qlora_result qlora_ctx_create_abi(const qlora_ctx_desc* desc, qlora_ctx** out,
                                            int version, uint64_t abi);
// Fails with QLORA_ERR_STATE, frees nothing and names the objects, while any object of the context
// still exists. ctx may be NULL.
QLORA_API qlora_result qlora_ctx_destroy(qlora_ctx* ctx);
// Describes the failure of the last call on the context; "" if it succeeded, never NULL. Valid
// until the next call.
QLORA_API const char* qlora_last_error(const qlora_ctx* ctx);
QLORA_API qlora_backend qlora_ctx_backend(const qlora_ctx* ctx); // ANY only if ctx is NULL
QLORA_API const char* qlora_ctx_reason(const qlora_ctx* ctx);    // why this backend is used
QLORA_API const char* qlora_ctx_target(const qlora_ctx* ctx);    // "sm_90"; "cpu" without a GPU
// Applies to products from now on; models that are already open keep the math they were opened
// with.
QLORA_API qlora_result qlora_ctx_set_math(qlora_ctx* ctx, qlora_math math);
// Binds the caller's stream; NULL = the context's own. The stream must belong to this CUDA context
// and must not be the legacy default stream, which cannot be captured. Waits for the work queued on
// the old stream and invalidates all graphs.
QLORA_API qlora_result qlora_ctx_set_stream(qlora_ctx* ctx, void* cu_stream);
// Replaces the cuBLAS workspaces that desc.workspace and desc.workspace_bytes set up. There are two
// of `bytes` each (0 = 32 MiB), because some work runs in parallel with the main stream. The first
// is `memory`, the caller's device memory, 256-byte aligned (NULL = allocated); the second is
// always allocated. Waits for the device and invalidates all graphs.
QLORA_API qlora_result qlora_ctx_set_workspace(qlora_ctx* ctx, void* memory, size_t bytes);
// Waits until the device has finished all queued work.
QLORA_API qlora_result qlora_ctx_sync(qlora_ctx* ctx);

typedef struct qlora_native {
    void* cu_context;
    void* cu_stream;
    void* cublas; // cublasHandle_t, NULL without cuBLAS
    int32_t cu_device;
} qlora_native;
// The CUDA and cuBLAS handles in use; all zero on the CPU. After this call, the stream and
// workspace of the cuBLAS handle are set again before every use, since the caller may change them.
QLORA_API qlora_result qlora_ctx_native(qlora_ctx* ctx, qlora_native* out);

// Writes the version, the backend and the reason for it, and on CUDA the device, driver, cuBLAS and
// kernel target, as lines of text; truncated if the buffer is too small. Returns the number of
// bytes needed, including the final NUL. ctx and buffer may be NULL.
QLORA_API size_t qlora_describe(const qlora_ctx* ctx, char* buffer, size_t size);

typedef struct qlora_memory_info {
    uint64_t device_bytes;       // device memory allocated by the context at present
    uint64_t device_peak;        // maximum of device_bytes so far
    uint64_t device_allocations; // number of device allocations so far
    uint64_t device_free;        // free memory reported by the driver; 0 on the CPU
    uint64_t device_total;       // memory of the device; 0 on the CPU
    uint64_t host_bytes;         // host memory allocated by the context at present
} qlora_memory_info;

// How a matrix product is computed.
typedef enum qlora_path {
    QLORA_PATH_AUTO = 0, // cuBLAS if it was found, otherwise PTX; the CPU on a CPU context
    QLORA_PATH_CPU = 1,
    QLORA_PATH_PTX = 2, // the library's own kernels
    QLORA_PATH_CUBLAS = 3,
    QLORA_PATH_NF4 = 4 // only reported: the weights were dequantised inside the product
} qlora_path;

typedef struct qlora_ctx_info {
    const qlora_ctx_desc* desc; // with defaults resolved; valid until the context is destroyed
    qlora_memory_info memory;
    qlora_path last_path; // path of the last matrix product
    int64_t tensors;      // number of objects of each kind that exist
    int64_t clips;
    int64_t graphs; // including those of trainers
    int64_t models;
    int64_t trainers;
    int64_t generations;
} qlora_ctx_info;
// Does not wait for the device.
QLORA_API qlora_result qlora_ctx_query(qlora_ctx* ctx, qlora_ctx_info* out);

// ---- tensors ------------------------------------------------------------------------------------
typedef enum qlora_dtype {
    QLORA_F32 = 0,
    QLORA_BF16 = 1,
    QLORA_F16 = 2,
    QLORA_I32 = 3,
    QLORA_U8 = 4
} qlora_dtype;

// A batch of row-major matrices. data is a device address on CUDA and a host address on the CPU.
// The struct may be copied freely; the memory belongs to the tensor that qlora_tensor_create filled
// in.
typedef struct qlora_tensor {
    void* data;
    size_t bytes; // size of the memory at data
    qlora_dtype dtype;
    int64_t rows;
    int64_t cols;
    int64_t ld;           // elements from the start of one row to the next; at least cols
    int64_t batch;        // number of matrices
    int64_t batch_stride; // elements from the start of one matrix to the next
    qlora_ctx* owner;
} qlora_tensor;

// Allocates a contiguous, uninitialised tensor (with batch 1 unless batched). Free it with
// qlora_tensor_destroy, which zeroes the struct, does nothing for an empty one, and invalidates the
// graphs that use the memory.
QLORA_API qlora_result qlora_tensor_create(qlora_ctx* ctx, qlora_dtype dtype, int64_t rows,
                                           int64_t cols, qlora_tensor* out);
QLORA_API qlora_result qlora_tensor_create_batched(qlora_ctx* ctx, qlora_dtype dtype, int64_t batch,
                                                   int64_t rows, int64_t cols, qlora_tensor* out);
QLORA_API qlora_result qlora_tensor_destroy(qlora_ctx* ctx, qlora_tensor* tensor);
// Describes memory owned by the caller, which must outlive the tensor. ld 0 = cols; data must be
// aligned for the type. Nothing is allocated, so the tensor must not be destroyed.
QLORA_API qlora_result qlora_tensor_wrap(qlora_ctx* ctx, void* data, size_t bytes,
                                         qlora_dtype dtype, int64_t rows, int64_t cols, int64_t ld,
                                         qlora_tensor* out);
// A view of part of a tensor with batch 1. It shares the tensor's memory and must not be destroyed.
QLORA_API qlora_result qlora_tensor_view(qlora_ctx* ctx, const qlora_tensor* tensor, int64_t row,
                                         int64_t rows, int64_t col, int64_t cols,
                                         qlora_tensor* out);
// Copies a whole tensor from or to host memory. The tensor must be contiguous, and bytes must be
// its size. Both calls wait for the device.
QLORA_API qlora_result qlora_tensor_write(qlora_ctx* ctx, const qlora_tensor* tensor,
                                           const void* source, size_t bytes);
QLORA_API qlora_result qlora_tensor_read(qlora_ctx* ctx, const qlora_tensor* tensor,
                                             void* target, size_t bytes);
// Zeroes the elements of the tensor, but not the padding between its rows. Does not wait for the
// device.
QLORA_API qlora_result qlora_tensor_zero(qlora_ctx* ctx, const qlora_tensor* tensor);
// "f32" and so on, and the size of an element; "unknown" and 0 for any other value.
QLORA_API const char* qlora_dtype_name(qlora_dtype dtype);
QLORA_API size_t qlora_dtype_bytes(qlora_dtype dtype);

//@@ src/qlora.h

// Without the model its functions are declared and never defined, which only extern ones may be.
#if defined(QLORA_STATIC) && defined(QLORA_NO_MODEL)
#undef QLORA_API
#define QLORA_API extern
#endif


//@@ src/api/model.h

// ---- models -------------------------------------------------------------------------------------
#define QLORA_MAX_LAYERS 256
#define QLORA_MAX_STOP_IDS 16

// How the frozen weights of the projections are stored.
typedef enum qlora_base_format {
    QLORA_BASE_NF4 = 0,
    QLORA_BASE_16BIT = 1,
    QLORA_BASE_32BIT = 2
} qlora_base_format;

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

typedef enum qlora_family {
    QLORA_FAMILY_NONE = 0,
    QLORA_FAMILY_LLAMA,
    QLORA_FAMILY_MISTRAL,
    QLORA_FAMILY_QWEN2,
    QLORA_FAMILY_QWEN3
} qlora_family;

// The architecture of a model, as in its config.json.
typedef struct qlora_model_config {
    qlora_family family;
    int64_t vocab;
    int64_t hidden;
    int64_t intermediate;
    int64_t layers;
    int64_t heads;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t max_positions; // longest text; longer ones are refused; 0 = no limit
    double rms_eps;
    qlora_rope_desc rope;         // layers with full attention; defaults are filled in
    qlora_rope_desc rope_sliding; // layers with a sliding window; usually the same
    int64_t window; // a token sees itself and the window - 1 tokens before it; 0 = no window
    bool tied;      // the output head is the embedding
    bool qkv_bias;
    bool o_bias;
    bool mlp_bias;
    bool qk_norm;
    bool quantized; // config.json has a quantization_config (bitsandbytes, 4-bit)
    int32_t dtype;  // a qlora_dtype; -1 = not given in the file
    int32_t bos_id; // -1 = none
    int32_t pad_id; // -1 = none
    int32_t stop_count;
    int32_t stop_ids[QLORA_MAX_STOP_IDS];
    uint8_t sliding[QLORA_MAX_LAYERS]; // 1 if the attention of the layer is limited by `window`
} qlora_model_config;

// The type in which a model computes. Frozen weights keep their own format.
typedef enum qlora_mode {
    QLORA_MODE_AUTO = 0, // BF16 on compute capability 8.0 and newer, otherwise F32
    QLORA_MODE_F32 = 1,  // fp32; the context's math decides between exact and TF32 products
    QLORA_MODE_BF16 = 3  // 2 is unused; these values are stored in checkpoints
} qlora_mode;

typedef enum qlora_target { // the projections of a layer, one bit each
    QLORA_TARGET_Q = 1,
    QLORA_TARGET_K = 2,
    QLORA_TARGET_V = 4,
    QLORA_TARGET_O = 8,
    QLORA_TARGET_GATE = 16,
    QLORA_TARGET_UP = 32,
    QLORA_TARGET_DOWN = 64,
    QLORA_TARGET_ALL = 127
} qlora_target;

typedef enum qlora_choice {
    QLORA_CHOICE_AUTO = 0,
    QLORA_CHOICE_ON = 1,
    QLORA_CHOICE_OFF = 2
} qlora_choice;

// The use that the memory of a model is planned for.
typedef enum qlora_purpose {
    QLORA_PURPOSE_TRAIN = 0,   // gradients, optimizer state and activations are part of the plan
    QLORA_PURPOSE_EVALUATE = 1 // evaluation and generation only
} qlora_purpose;

// Called with the progress of long operations. Return false to stop the operation, which then
// returns QLORA_ERR_STOPPED.
typedef bool (*qlora_progress_fn)(void* user, const char* what, uint64_t done, uint64_t total);

typedef struct qlora_plan qlora_plan;

// Zero it before setting fields: 0 is the default of every field.
typedef struct qlora_model_desc {
    uint32_t reserved_must_be_zero0;
    // The model.
    const char* dir;                  // Hugging Face folder; NULL = random weights of *config
    const qlora_model_config* config; // set exactly one of dir and config
    uint64_t seed;                    // for random weights and new adapters
    float weight_std;                 // standard deviation of random weights; 0 = 0.02
    qlora_base_format base;           // 0 = NF4; tensors that are 4-bit in the folder stay so
    bool single_quant;                // keep the fp32 block scales instead of quantising them
    qlora_mode mode;                  // 0 = AUTO
    // Its adapters.
    const char* adapter; // PEFT folder: ranks, targets, scales and weights come from there
    int32_t rank;        // at most 1024; 0 = 16, negative = no adapters
    float alpha;         // 0 = 2 * rank
    bool rslora;         // scale alpha / sqrt(rank) instead of alpha / rank
    float dropout;       // on the input of the adapters, less than 1; 0 = none
    uint32_t targets;    // qlora_target bits; 0 = all seven
    bool train_norms;    // also train the RMSNorm weights
    // Its memory.
    qlora_purpose purpose;   // 0 = TRAIN
    int64_t tokens;          // maximum tokens per micro-batch; 0 = 2048
    int64_t max_sequences;   // maximum sequences per micro-batch; 0 = tokens / 8, at least 1
    int64_t max_length;      // maximum tokens per sequence; 0 = tokens, as far as the model goes
    int64_t head_chunk;      // rows of logits computed at a time; 0 = 1024; at most tokens
    int64_t generate_tokens; // maximum tokens of a text, including the prompt; 0 = no generation
    qlora_choice recompute;  // layers to recompute: ON = all, OFF = none, AUTO = as few as possible
    qlora_choice cache;      // 16-bit copies of 4-bit weights; AUTO = as many as fit the memory
    const qlora_plan* plan;  // from qlora_plan_make; NULL = plan when opening
    qlora_progress_fn progress;
    void* progress_user;
    uint32_t reserved_must_be_zero1;
} qlora_model_desc;

// The machine to plan for.
typedef struct qlora_plan_desc {
    uint64_t bytes;     // memory limit; 0 = what is free now, on the GPU or for this process
    int32_t capability; // compute capability, 90 for 9.0; 0 = that of the context's device
} qlora_plan_desc;

struct qlora_plan {
    qlora_model_config config;
    uint64_t source; // hash of the paths of the model folder and the adapter
    qlora_mode mode;
    // Bytes of the one arena that holds the model.
    uint64_t base;        // frozen weights, embedding, head, norms, tables
    uint64_t cache;       // 16-bit copies of 4-bit weights
    uint64_t adapters;    // parameters and their 16-bit shadow
    uint64_t optimizer;   // gradients, moments, clip tables
    uint64_t activations; // kept between forward and backward
    uint64_t workspace;   // shared by the layers
    uint64_t head;        // logits of a chunk and their losses
    uint64_t generation;  // key/value cache
    uint64_t batches;     // ids, labels and positions of a micro-batch
    uint64_t total;       // sum of the above
    uint64_t context;     // memory of the context: scratch buffer, cuBLAS workspaces
    int64_t tokens;
    int64_t max_sequences;
    int64_t max_length;
    int64_t head_chunk;
    int64_t parameters;       // number of trained parameters
    int64_t recompute_layers; // the first n layers keep only their input
    int64_t cached_layers;    // the first n layers have 16-bit copies of their weights
};

// Plans the memory of a model without loading it. No GPU is needed: a CPU context can plan for any
// device. desc NULL = this machine; the CPU's limit is the physical memory and the cgroup's limit,
// less what is in use. With a capability but no bytes, a CPU context plans without a limit. Fails
// with QLORA_ERR_DEVICE_MEMORY if the model cannot fit.
QLORA_API qlora_result qlora_plan_make(qlora_ctx* ctx, const qlora_model_desc* model,
                                       const qlora_plan_desc* desc, qlora_plan* out);
// Writes the plan as a table, truncated if the buffer is too small. Returns the number of bytes
// needed, including the final NUL.
QLORA_API size_t qlora_plan_describe(const qlora_plan* plan, char* buffer, size_t size);
// Reads config.json and, if present, generation_config.json of a model folder.
QLORA_API qlora_result qlora_config_read(qlora_ctx* ctx, const char* dir, qlora_model_config* out);

typedef struct qlora_model qlora_model;

// Plans unless desc->plan is given, compiles the kernels, allocates all memory of the model, runs
// every operation of a step once, seals the kernel cache, and only then loads the weights. The desc
// and the objects it points to are not needed afterwards. Waits for the device.
QLORA_API qlora_result qlora_model_open(qlora_ctx* ctx, const qlora_model_desc* desc,
                                        qlora_model** out);
// Fails with QLORA_ERR_STATE, and frees nothing, while a trainer or a generation of the model
// exists. model may be NULL.
QLORA_API qlora_result qlora_model_close(qlora_model* model);

typedef struct qlora_model_info {
    qlora_ctx* ctx;
    const qlora_plan* plan; // includes the config; valid while the model is open
    qlora_purpose purpose;
    int64_t generate_tokens;
    int64_t parameters;  // number of trained tensors
    bool use_adapters;
    int64_t trainers;    // number of trainers that exist, 0 or 1
    int64_t generations; // number of generations that exist, 0 or 1
} qlora_model_info;
// Does not use the device and does not change qlora_last_error.
QLORA_API qlora_result qlora_model_query(const qlora_model* model, qlora_model_info* out);

// The trained tensors, with PEFT's names, shapes and order: A [rank, in], B [out, rank].
typedef struct qlora_parameter_info {
    char name[192];
    int64_t rows;
    int64_t cols;
} qlora_parameter_info;
// index is less than qlora_model_info.parameters.
QLORA_API qlora_result qlora_parameter_query(const qlora_model* model, int64_t index,
                                             qlora_parameter_info* out);
// Copy rows * cols floats. Both calls wait for the device.
QLORA_API qlora_result qlora_parameter_read(qlora_model* model, int64_t index, float* out);
QLORA_API qlora_result qlora_parameter_write(qlora_model* model, int64_t index, const float* in);

// ---- batches and evaluation ---------------------------------------------------------------------
// A micro-batch of concatenated sequences. As in transformers, labels[i] is the label of ids[i],
// and the loss at token i is that of predicting labels[i + 1] of the same sequence. The label -100
// means that the token is not trained. Batches are read during the call only, unless noted.
typedef struct qlora_batch {
    const int32_t* ids;
    const int32_t* labels;
    const float* weights;     // one per label, finite and not negative; NULL = all 1
    const int32_t* lengths;   // tokens in each sequence
    const int32_t* sequences; // index of each sequence in the data, for dropout; NULL = 0, 1, ...
    int64_t count;            // number of sequences
} qlora_batch;
// The sum of the weights of the trained labels: the batch's share of total_labels.
QLORA_API double qlora_batch_labels(const qlora_batch* batch);

typedef struct qlora_eval_info {
    double loss;   // sum of weighted losses
    double labels; // sum of weights
    int64_t tokens;
} qlora_eval_info;
// Runs the forward pass only, with adapters on or off as set, and waits for the result. Does not
// affect gradients that are being accumulated.
QLORA_API qlora_result qlora_eval(qlora_model* model, const qlora_batch* batch,
                                  qlora_eval_info* out);
// Writes the logits of every token, tokens * vocab floats; for tests and tools. Waits for the
// device.
QLORA_API qlora_result qlora_eval_logits(qlora_model* model, const qlora_batch* batch, float* out);

//@@ src/api/train.h

// ---- training -----------------------------------------------------------------------------------
typedef struct qlora_trainer qlora_trainer;

// The learning rate after the warm-up.
typedef enum qlora_schedule {
    QLORA_SCHEDULE_COSINE = 0, // to zero at total_steps
    QLORA_SCHEDULE_LINEAR = 1, // to zero at total_steps
    QLORA_SCHEDULE_CONSTANT = 2
} qlora_schedule;

// Zero it before setting fields: 0 is the default of every field.
typedef struct qlora_train_desc {
    uint32_t reserved_must_be_zero0;
    double lr;                // peak learning rate; 0 = 2e-4, negative = 0
    double beta1;             // 0 = 0.9
    double beta2;             // 0 = 0.999
    double eps;               // 0 = 1e-8
    double weight_decay;      // 0 = none
    double max_norm;          // gradient norm to clip to; 0 = 1, negative = no clipping
    qlora_schedule schedule;  // 0 = cosine
    int64_t warmup_steps;     // steps over which the learning rate rises linearly; 0 = none
    int64_t total_steps;      // 0 = constant learning rate after the warm-up
    uint64_t seed;            // for dropout
    bool eager;               // do not use CUDA graphs
    bool require_graph;       // fail if a graph cannot be captured, instead of running without
    int32_t keep_checkpoints; // number of checkpoints to keep, at most 64; 0 = 2
    uint32_t reserved_must_be_zero1;
} qlora_train_desc;

// Starts the optimizer from zero and leaves the adapters as they are. desc NULL = all defaults. A
// model has at most one trainer at a time and must have been opened with QLORA_PURPOSE_TRAIN. Waits
// for the device.
QLORA_API qlora_result qlora_trainer_create(qlora_model* model, const qlora_train_desc* desc,
                                            qlora_trainer** out);
// The model keeps the trained adapters. trainer may be NULL.
QLORA_API qlora_result qlora_trainer_destroy(qlora_trainer* trainer);
// Changes settings between two steps. seed, eager and require_graph cannot change and must be as
// before. Does not wait for the device.
QLORA_API qlora_result qlora_train_set(qlora_trainer* trainer, const qlora_train_desc* desc);

typedef struct qlora_train_info {
    int64_t step;      // number of this step: updates so far, including skipped ones
    int64_t pending;   // number of later steps that the device has not finished
    int64_t skipped;   // updates skipped so far because a gradient was not finite
    bool last_skipped; // whether this one was
    double loss;     // mean over the labels of the step
    double labels;   // their total weight
    int64_t tokens;  // number of tokens in the step
    float grad_norm; // before clipping
    double lr;       // learning rate of the step
    bool graphs;     // steps are run as CUDA graphs
    int64_t waits;   // number of times the host had to wait for a free staging buffer
} qlora_train_info;

// Runs one optimizer step over `count` micro-batches. Every batch is checked before anything is
// computed. Waits for the device and reports the step, unless out is NULL.
QLORA_API qlora_result qlora_train_step(qlora_trainer* trainer, const qlora_batch* batches,
                                        int64_t count, qlora_train_info* out);
// The same step in separate calls. micro adds the gradients of one micro-batch; total_labels is the
// sum of qlora_batch_labels over the whole step, so that the step does not depend on how it is
// split. update clips the gradients, updates the adapters, zeroes the gradients and advances the
// schedule. Neither call waits for the device, except for a free staging buffer when the host is
// several calls ahead.
QLORA_API qlora_result qlora_train_micro(qlora_trainer* trainer, const qlora_batch* batch,
                                         double total_labels);
QLORA_API qlora_result qlora_train_update(qlora_trainer* trainer);
// The same step in slices, for programs that have a frame to draw: call begin, then slice until
// *done is true. The batches must stay valid until then. A slice runs pieces of the step (half a
// layer each, without graphs), waits for them, and returns before the next piece would exceed the
// time; it runs at least one. Results are bitwise identical to those of qlora_train_step. cancel
// discards a step that was begun with begin or micro; it does not wait for the device. After a call
// of a step has failed on the device, its gradients are incomplete: every call of the step is then
// refused until it is cancelled or a checkpoint is loaded.
QLORA_API qlora_result qlora_train_begin(qlora_trainer* trainer, const qlora_batch* batches,
                                         int64_t count);
QLORA_API qlora_result qlora_train_slice(qlora_trainer* trainer, double milliseconds, bool* done);
QLORA_API qlora_result qlora_train_cancel(qlora_trainer* trainer);

// Waits for the device and reports the last step.
QLORA_API qlora_result qlora_train_query(qlora_trainer* trainer, qlora_train_info* out);
// Reports the newest step that the device has finished, without waiting; out->pending is the number
// of later ones.
QLORA_API qlora_result qlora_train_poll(qlora_trainer* trainer, qlora_train_info* out);
// Copies the gradient of parameter number `index`, accumulated since the last update. Waits for the
// device.
QLORA_API qlora_result qlora_gradient_read(qlora_trainer* trainer, int64_t index, float* out);

// Saves the adapter, the optimizer state, the step number and `position` (data of the caller's
// choice, such as its place in the data) as dir/step-N, which PEFT can load, and then names it in
// dir/latest: a crash leaves either the old checkpoint or the new one. Removes the oldest
// checkpoints beyond keep_checkpoints. Call it between steps. Waits for the device and for the
// disk.
QLORA_API qlora_result qlora_checkpoint_save(qlora_trainer* trainer, const char* dir,
                                             const void* position, size_t position_bytes);
// Loads the newest complete checkpoint; fails with QLORA_ERR_FILE if there is none. position
// receives the saved data; on entry *position_bytes is the size of the buffer, on return that of
// the data (NULL = not needed). The following steps are bitwise identical to those of a run that
// never stopped. A checkpoint whose settings make that impossible (mode, base, dropout, on the GPU
// also tokens, another base model) is rejected with QLORA_ERR_STATE; other differences (learning
// rate, driver) are logged. The base is known by its contents, not by its path: a checkpoint
// records a hash of what the config computes and one of all tensors, by name, type, shape and bytes
// (of a tensor above 1 MiB, 64 blocks of 4 KiB, evenly spread, the first and the last included).
// Everything is checked before anything is changed. Waits for the device.
QLORA_API qlora_result qlora_checkpoint_load(qlora_trainer* trainer, const char* dir,
                                             void* position, size_t* position_bytes);
// *out = whether dir contains a checkpoint; an absent folder contains none.
QLORA_API qlora_result qlora_checkpoint_exists(qlora_ctx* ctx, const char* dir, bool* out);

//@@ src/api/generate.h

// ---- generation ---------------------------------------------------------------------------------
// Zero it before setting fields: 0 is the default of every field except the prompt.
typedef struct qlora_generate_desc {
    uint32_t reserved_must_be_zero0;
    const int32_t* prompt;
    int64_t prompt_tokens; // at least 1
    int64_t max_tokens;    // maximum new tokens per turn; 0 = up to the model's generate_tokens
    float temperature;     // 0 = always choose the most likely token
    int32_t top_k;         // choose only among the k most likely tokens; 0 = all
    float top_p;           // ... and among the most likely ones that make up p; 0 = all
    uint64_t seed;         // for sampling
    const int32_t* stops;  // ids that end a turn; NULL = the model's own, a single -1 = none
    int32_t stop_count;
    uint32_t reserved_must_be_zero1;
} qlora_generate_desc;

// One text, generated token by token. A model has at most one generation at a time; training and
// evaluation may run between two of its tokens. All calls wait for the device.
typedef struct qlora_generation qlora_generation;
// Runs the prompt. The desc, its prompt and its stops are not needed afterwards.
QLORA_API qlora_result qlora_generate_begin(qlora_model* model, const qlora_generate_desc* desc,
                                            qlora_generation** out);
// Returns the next token. *stopped is true at the end of a turn: *token is then the stop token, or
// -1 if max_tokens or the model's generate_tokens have been reached.
QLORA_API qlora_result qlora_generate_next(qlora_generation* generation, int32_t* token,
                                           bool* stopped);
// Appends ids to the text, after the last token that qlora_generate_next returned (including a stop
// token), and starts the next turn. The keys and values of the text so far are kept.
QLORA_API qlora_result qlora_generate_feed(qlora_generation* generation, const int32_t* ids,
                                           int64_t count);
// Frees the generation, which may be NULL.
QLORA_API qlora_result qlora_generate_end(qlora_generation* generation);

// Called with each new token except a stop token, which ends the text. Return false to stop early;
// this is not an error.
typedef bool (*qlora_token_fn)(void* user, int32_t token);
// Generates a whole text in one call: begin, next until the turn ends, end.
QLORA_API qlora_result qlora_generate(qlora_model* model, const qlora_generate_desc* desc,
                                      qlora_token_fn fn, void* user);

//@@ src/api/adapter.h

// ---- adapters -----------------------------------------------------------------------------------
// Zero it before setting fields.
typedef struct qlora_adapter_desc {
    uint32_t reserved_must_be_zero0;
    const char* base_name; // base_model_name_or_path of the saved config; NULL = the model's folder
    uint32_t reserved_must_be_zero1;
} qlora_adapter_desc;

// Switches the adapters on (as after opening) or off. With adapters off, the model behaves like its
// base; training requires them on. A change invalidates all graphs. Does not wait for the device.
QLORA_API qlora_result qlora_adapter_use(qlora_model* model, bool on);
// Copies the trained tensors of one model to another that has the same ones. The models may belong
// to different contexts; within one context the call does not wait for the device. The optimizer
// state is left unchanged.
QLORA_API qlora_result qlora_adapter_copy(qlora_model* from, qlora_model* to);
// Writes a PEFT folder: adapter_model.safetensors (f32) and adapter_config.json. Trained norms,
// which PEFT's LoRA adapters cannot contain, are written to trained_norms.safetensors next to them.
// The folder is one unit: files of an earlier adapter that the new one does not have are removed,
// and a crash leaves the old adapter, the new one, or a folder without a config, which does not
// load. Waits for the device. desc NULL = all defaults, here and below.
QLORA_API qlora_result qlora_adapter_save(qlora_model* model, const char* dir,
                                          const qlora_adapter_desc* desc);
// Loads a PEFT folder, whose modules, ranks and scales must be those of the model; trained norms in
// it need a model that was opened with train_norms. The optimizer state is left unchanged. Waits
// for the device.
QLORA_API qlora_result qlora_adapter_load(qlora_model* model, const char* dir,
                                          const qlora_adapter_desc* desc);
// Writes an f32 adapter for llama.cpp; the format cannot contain trained norms. Waits for the
// device.
QLORA_API qlora_result qlora_adapter_save_gguf(qlora_model* model, const char* path,
                                               const qlora_adapter_desc* desc);

typedef enum qlora_merge_base {
    QLORA_MERGE_ORIGINAL = 0, // into the original weights of the model folder
    QLORA_MERGE_TRAINED = 1   // into the dequantised 4-bit weights that the adapter was trained on
} qlora_merge_base;

typedef struct qlora_merge_desc {
    uint32_t reserved_must_be_zero0;
    const char* dir;       // folder to write; required
    qlora_dtype dtype;     // type of the merged weights: F32, BF16 or F16; 0 = F32
    qlora_merge_base base; // 0 = ORIGINAL
    uint64_t shard_bytes;  // maximum size of a weight file; 0 = 5 GB
    qlora_progress_fn progress; // NULL = none
    void* progress_user;
    uint32_t reserved_must_be_zero1;
} qlora_merge_desc;
// Writes the model with the adapter merged into its weights, as safetensors shards with config.json
// and the tokenizer files. Holds one tensor in memory at a time. config.json is written last, so
// that an interrupted export is not mistaken for a model; a folder that already contains one is
// rejected. The model must have been opened from a folder.
QLORA_API qlora_result qlora_merge_save(qlora_model* model, const qlora_merge_desc* desc);

//@@ src/qlora.h

#if defined(QLORA_STATIC) && defined(QLORA_NO_MODEL)
#undef QLORA_API
#if defined(__GNUC__)
#define QLORA_API static __attribute__((unused))
#else
#define QLORA_API static
#endif
#endif


//@@ src/api/gemm.h

// ---- GEMM ---------------------------------------------------------------------------------------
typedef struct qlora_gemm_desc {
    bool trans_a;    // A is stored as [K, M]
    bool trans_b;    // B is stored as [N, K]
    float alpha;     // must be set: 0 means 0, not 1
    float beta;      // 0 = C is not read
    qlora_path path; // 0 = AUTO; NF4 is not accepted
} qlora_gemm_desc;

// C = alpha op(A) op(B) + beta C, row-major, for each matrix of the batch; an operand with batch 1
// is used for all of them. C must not overlap A or B. Rows, columns, leading dimensions and the
// batch must be at most 2^31 - 257. The context's math applies as to a forward product. Does not
// wait for the device.
//
// Types of A, B and C:
//   f32, f32, f32
//   bf16, bf16, bf16 or f32
//   f16, f16, f32
//   one of A and B f32, the other bf16 or f16, C f32, batch 1 on CUDA: the f32 operand is cast into
//   the scratch buffer; for f16 it is first scaled by a power of two chosen from its maximum, which
//   alpha then cancels
QLORA_API qlora_result qlora_gemm(qlora_ctx* ctx, const qlora_gemm_desc* desc,
                                  const qlora_tensor* a, const qlora_tensor* b,
                                  const qlora_tensor* c);

// 0 = overwrite the result and choose the path automatically.
typedef enum qlora_product_flags {
    QLORA_PRODUCT_ACCUMULATE = 1, // add to the result
    QLORA_PRODUCT_PTX = 2,        // use the library's own kernels
    QLORA_PRODUCT_CUBLAS = 4,     // use cuBLAS
    QLORA_PRODUCT_FUSED = 8,      // NF4: dequantise inside the product; bf16, at most 32 rows
    QLORA_PRODUCT_UNFUSED = 16    // NF4: dequantise into the scratch buffer, then multiply
} qlora_product_flags;

// C[M,N] = A[M,K] B[K,N] and its two gradients, dA = dC B^T and dB = A^T dC; types and limits as in
// qlora_gemm. flags: ACCUMULATE, and PTX or CUBLAS. No call waits for the device.
QLORA_API qlora_result qlora_gemm_forward(qlora_ctx* ctx, const qlora_tensor* a,
                                          const qlora_tensor* b, const qlora_tensor* c,
                                          uint32_t flags);
QLORA_API qlora_result qlora_gemm_backward_a(qlora_ctx* ctx, const qlora_tensor* dc,
                                             const qlora_tensor* b, const qlora_tensor* da,
                                             uint32_t flags);
QLORA_API qlora_result qlora_gemm_backward_b(qlora_ctx* ctx, const qlora_tensor* a,
                                             const qlora_tensor* dc, const qlora_tensor* db,
                                             uint32_t flags);
// "cuBLAS" and so on; "unknown" for any other value.
QLORA_API const char* qlora_path_name(qlora_path path);

// ---- NF4 ----------------------------------------------------------------------------------------
// A frozen weight with 4 bits per element, byte-identical to bitsandbytes' storage: each block of
// `block` consecutive elements, in row-major order, shares a scale, and unless plain_scales is set,
// each group of `block2` scales is quantised to one byte each with a scale of its own.
typedef struct qlora_nf4_desc {
    int64_t rows;
    int64_t cols;
    int32_t block;     // elements per scale, a power of two from 32 to 4096; 0 = 64
    int32_t block2;    // scales per group, a power of two up to 2^20; 0 = 256
    bool plain_scales; // store one float per block instead of one byte
} qlora_nf4_desc;

// All addresses are in `memory`: device addresses on CUDA, host addresses on the CPU.
typedef struct qlora_nf4 {
    uint8_t* codes;        // (rows * cols + 1) / 2 bytes; element 2i is the high half of byte i
    float* absmax;         // one per block; NULL unless plain_scales
    uint8_t* absmax_codes; // one per block; NULL if plain_scales
    float* absmax_scales;  // one per block2 blocks; NULL if plain_scales
    float* offset;         // one, added to every scale; NULL if plain_scales
    float* maps;           // the 16 levels, then the 256 values of a scale's byte, ascending
    int64_t rows;
    int64_t cols;
    int32_t block;
    int32_t block2;
    bool owns_memory; // created, not wrapped
    qlora_tensor memory;
    qlora_ctx* owner;
} qlora_nf4;

// Host copies of the parts of a qlora_nf4; `levels` and `map` are the two parts of maps. A part
// that the weight does not have must be NULL.
typedef struct qlora_nf4_parts {
    uint8_t* codes;
    float* absmax;
    uint8_t* absmax_codes;
    float* absmax_scales;
    float* offset;
    float* levels; // 16
    float* map;    // 256
} qlora_nf4_parts;

// Number of bytes that such a weight needs; 0 if the desc is invalid.
QLORA_API size_t qlora_nf4_bytes(const qlora_nf4_desc* desc);
// Allocates a weight with bitsandbytes' maps; codes and scales are uninitialised. Free it with
// qlora_nf4_destroy, which zeroes the struct. Waits for the device.
QLORA_API qlora_result qlora_nf4_create(qlora_ctx* ctx, const qlora_nf4_desc* desc, qlora_nf4* out);
// The same in an existing U8 tensor of at least qlora_nf4_bytes bytes, 16-byte aligned, which must
// outlive the weight. Nothing is allocated, and destroying the weight frees nothing.
QLORA_API qlora_result qlora_nf4_wrap(qlora_ctx* ctx, const qlora_nf4_desc* desc,
                                      const qlora_tensor* memory, qlora_nf4* out);
QLORA_API qlora_result qlora_nf4_destroy(qlora_ctx* ctx, qlora_nf4* weight);
// Copies parts from or to host memory; parts that are NULL are left unchanged. Both calls wait for
// the device.
QLORA_API qlora_result qlora_nf4_write(qlora_ctx* ctx, const qlora_nf4* weight,
                                        const qlora_nf4_parts* parts);
QLORA_API qlora_result qlora_nf4_read(qlora_ctx* ctx, const qlora_nf4* weight,
                                          const qlora_nf4_parts* parts);
// Quantises a contiguous f32, bf16 or f16 matrix. Uses 4 bytes of scratch per block. Does not wait
// for the device.
QLORA_API qlora_result qlora_nf4_quantise(qlora_ctx* ctx, const qlora_tensor* source,
                                          const qlora_nf4* weight);
// Dequantises into an f32, bf16 or f16 matrix with any ld. via_bf16: an f32 result is rounded to
// bf16 first. Does not wait for the device.
QLORA_API qlora_result qlora_nf4_dequantise(qlora_ctx* ctx, const qlora_nf4* weight,
                                            const qlora_tensor* out, bool via_bf16);

// y = x W^T and dx = dy W. x and dy are f32 or bf16; y and dx have the same type, or f32. W is
// dequantised to bf16 values, whatever the type of x. An unfused product dequantises as much of W
// at a time as the free scratch holds and reports the path of its GEMM; a fused one, which only the
// forward product has, reports QLORA_PATH_NF4. flags: ACCUMULATE, PTX and CUBLAS imply an unfused
// product; without flags, small products are fused if the device can. No call waits for the device.
QLORA_API qlora_result qlora_nf4_gemm_forward(qlora_ctx* ctx, const qlora_tensor* x,
                                              const qlora_nf4* w, const qlora_tensor* y,
                                              uint32_t flags);
QLORA_API qlora_result qlora_nf4_gemm_backward(qlora_ctx* ctx, const qlora_tensor* dy,
                                               const qlora_nf4* w, const qlora_tensor* dx,
                                               uint32_t flags);
// Two weights with the same x (gate and up, or k and v); a fused product computes both in one
// launch.
QLORA_API qlora_result qlora_nf4_gemm_forward2(qlora_ctx* ctx, const qlora_tensor* x,
                                               const qlora_nf4* w1, const qlora_nf4* w2,
                                               const qlora_tensor* y1, const qlora_tensor* y2,
                                               uint32_t flags);

//@@ src/api/ops.h

// ---- gradient clip ------------------------------------------------------------------------------
typedef struct qlora_clip qlora_clip;

// Clips n f32 tensors in place by their common norm: scale = min(1, max_norm / (norm + 1e-6)). With
// groups (n numbers from 0; NULL = one group), each group has its own norm. Norms, scales and
// max_norm are stored on the device, so that only creation and qlora_clip_query wait for it. If a
// norm is not finite, its gradients are left unchanged and a flag is set. The tensors must outlive
// the clip. Destroying a clip does not free the tensors; clip may be NULL.
QLORA_API qlora_result qlora_clip_create(qlora_ctx* ctx, const qlora_tensor* const* tensors,
                                         const int32_t* groups, size_t n, qlora_clip** out);
QLORA_API qlora_result qlora_clip_destroy(qlora_clip* clip);
// Initially 1; negative = no clipping.
QLORA_API qlora_result qlora_clip_set(qlora_clip* clip, float max_norm);
// Computes norms, scales and flags, and scales the gradients.
QLORA_API qlora_result qlora_clip_apply(qlora_clip* clip);
// Computes norms, scales and flags only; for qlora_adamw_step, which can apply the scale itself.
QLORA_API qlora_result qlora_clip_measure(qlora_clip* clip);

typedef struct qlora_clip_info {
    float norm;
    float scale; // 1 if the norm is not finite
    bool finite;
} qlora_clip_info;
// Reports the last norm of a group. Waits for the device.
QLORA_API qlora_result qlora_clip_query(qlora_clip* clip, int32_t group, qlora_clip_info* out);
// Returns a group's scale (f32) and flag (I32, 1 = not finite) in the backend's memory, as tensors
// of one element that are valid until the clip is destroyed. They are for qlora_adamw_desc: pass
// both after qlora_clip_measure, but only the flag after qlora_clip_apply, which has already scaled
// the gradients. Group -1 is the flag of all groups together, which only qlora_clip_apply sets; it
// has no scale. Either pointer may be NULL.
QLORA_API qlora_result qlora_clip_device(qlora_clip* clip, int32_t group, qlora_tensor* scale,
                                         qlora_tensor* not_finite);

// ---- operators ----------------------------------------------------------------------------------
// Tensors are f32 or bf16, and all tensors of a call have the same type unless noted; arithmetic is
// f32. Sizes may be anything, including 0, and leading dimensions are respected. An output may be
// the same tensor as an input where the comment allows it; any other overlap is an error. A vector
// is a tensor with one row. dw is accumulated into, because several calls may contribute to it.
// Operators run on the context's stream and do not wait for the device; their results do not depend
// on the number of CPU threads.

// y = silu(x) = x / (1 + e^-x); y may be x. dx = dy silu'(x); dx may be x or dy.
QLORA_API qlora_result qlora_silu_forward(qlora_ctx* ctx, const qlora_tensor* x,
                                          const qlora_tensor* y);
QLORA_API qlora_result qlora_silu_backward(qlora_ctx* ctx, const qlora_tensor* x,
                                           const qlora_tensor* dy, const qlora_tensor* dx);
// h = silu(gate) up; h may be gate or up. gate and up may be column ranges of one buffer.
QLORA_API qlora_result qlora_swiglu_forward(qlora_ctx* ctx, const qlora_tensor* gate,
                                            const qlora_tensor* up, const qlora_tensor* h);
// Computes dgate and dup from dh, and also h unless it is NULL. dgate may be gate, dup may be up,
// and h may be dh.
QLORA_API qlora_result qlora_swiglu_backward(qlora_ctx* ctx, const qlora_tensor* dh,
                                             const qlora_tensor* gate, const qlora_tensor* up,
                                             const qlora_tensor* dgate, const qlora_tensor* dup,
                                             const qlora_tensor* h);
// Element by element: y = a b, y = a + b, y = alpha x, y = value. y may be an input.
QLORA_API qlora_result qlora_mul(qlora_ctx* ctx, const qlora_tensor* a, const qlora_tensor* b,
                                 const qlora_tensor* y);
QLORA_API qlora_result qlora_add(qlora_ctx* ctx, const qlora_tensor* a, const qlora_tensor* b,
                                 const qlora_tensor* y);
QLORA_API qlora_result qlora_scale(qlora_ctx* ctx, float alpha, const qlora_tensor* x,
                                   const qlora_tensor* y);
QLORA_API qlora_result qlora_fill(qlora_ctx* ctx, float value, const qlora_tensor* y);
// Fills y (f32 or bf16, contiguous) with normally distributed random numbers of mean 0 and standard
// deviation `deviation`; they are the same on every backend. Streams of a seed are independent.
QLORA_API qlora_result qlora_random_normal(qlora_ctx* ctx, uint64_t seed, uint32_t stream,
                                           float deviation, const qlora_tensor* y);
// y = x converted to the type of y: f32, bf16 or f16, rounded to nearest even.
QLORA_API qlora_result qlora_cast(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* y);

// RMSNorm: y = x / sqrt(mean(x^2) + eps) w. w is f32 or bf16, and w->cols must divide x->cols: if w
// is narrower than x, each group of w->cols columns (a head) is normalised separately. y may be x.
QLORA_API qlora_result qlora_rmsnorm_forward(qlora_ctx* ctx, const qlora_tensor* x,
                                             const qlora_tensor* w, float eps,
                                             const qlora_tensor* y);
// sum = h + delta, rounded to the type of sum; then y = RMSNorm(sum). sum may be h.
QLORA_API qlora_result qlora_rmsnorm_residual_forward(qlora_ctx* ctx, const qlora_tensor* h,
                                                      const qlora_tensor* delta,
                                                      const qlora_tensor* w, float eps,
                                                      const qlora_tensor* sum,
                                                      const qlora_tensor* y);
// dx = dres + (gradient of RMSNorm at x for dy). dres may be NULL; dx may be dy or dres. Unless dw
// (f32, as wide as w) is NULL, the gradient of w is added to it, and dx must be neither dy nor x.
QLORA_API qlora_result qlora_rmsnorm_backward(qlora_ctx* ctx, const qlora_tensor* dy,
                                              const qlora_tensor* x, const qlora_tensor* w,
                                              float eps, const qlora_tensor* dres,
                                              const qlora_tensor* dx, const qlora_tensor* dw);

// Fills out[positions][head_dim] in host memory: for each position the cosines of the head_dim / 2
// angles, then their sines. ctx is used only for the error text and may be NULL.
QLORA_API qlora_result qlora_rope_table(qlora_ctx* ctx, const qlora_rope_desc* desc,
                                        int64_t head_dim, int64_t positions, float* out);
// Rotates the first `rotated` heads of x [T, heads * head_dim] in place, in pairs
// (i, i + head_dim / 2), by the angles of positions (I32 [1, T]) in table (f32
// [max_pos, head_dim]); head_dim is table->cols. bias [1, x->cols] (f32 or bf16, may be NULL) is
// first added to all heads. The backward call rotates in the opposite direction, without a bias. A
// position outside the table is an error; on CUDA, the row is left unchanged and 1 is written to
// flag (one I32, may be NULL).
QLORA_API qlora_result qlora_rope_forward(qlora_ctx* ctx, const qlora_tensor* x, int64_t rotated,
                                          const qlora_tensor* positions, const qlora_tensor* table,
                                          const qlora_tensor* bias, const qlora_tensor* flag);
QLORA_API qlora_result qlora_rope_backward(qlora_ctx* ctx, const qlora_tensor* dx, int64_t rotated,
                                           const qlora_tensor* positions, const qlora_tensor* table,
                                           const qlora_tensor* flag);

// The steps of unfused attention, for any 16-bit or 32-bit type. split copies x [S, H * d] to y, a
// batch of H matrices [S, d]; join is its inverse; transpose computes y[b] = x[b]^T.
QLORA_API qlora_result qlora_heads_split(qlora_ctx* ctx, const qlora_tensor* x,
                                         const qlora_tensor* y);
QLORA_API qlora_result qlora_heads_join(qlora_ctx* ctx, const qlora_tensor* x,
                                        const qlora_tensor* y);
QLORA_API qlora_result qlora_transpose(qlora_ctx* ctx, const qlora_tensor* x,
                                       const qlora_tensor* y);
// In place: s[b, q, k] = scale * s[b, q, k], or -3e38 if query q, which is at position
// cols - rows + q, must not see key k: later keys if causal, and keys that are `window` or more
// positions back if window > 0.
QLORA_API qlora_result qlora_scores_mask(qlora_ctx* ctx, const qlora_tensor* s, float scale,
                                         bool causal, int64_t window);
// y = softmax of each row; y may be x. dx = y (dy - sum(y dy)); dx may be dy or y.
QLORA_API qlora_result qlora_softmax_forward(qlora_ctx* ctx, const qlora_tensor* x,
                                             const qlora_tensor* y);
QLORA_API qlora_result qlora_softmax_backward(qlora_ctx* ctx, const qlora_tensor* y,
                                              const qlora_tensor* dy, const qlora_tensor* dx);

// y[t] = table[ids[t]]; table is f32, bf16 or f16, ids is I32 [1, T]. An id outside the table is an
// error; on CUDA, the row is set to zero and 1 is written to flag (one I32, may be NULL).
QLORA_API qlora_result qlora_embed(qlora_ctx* ctx, const qlora_tensor* table,
                                   const qlora_tensor* ids, const qlora_tensor* y,
                                   const qlora_tensor* flag);

// Cross-entropy of the rows of logits [R, V] with labels. logits, labels and losses are required;
// the other tensors may be NULL.
typedef struct qlora_cross_entropy_desc {
    const qlora_tensor* logits;  // replaced by their gradient unless forward_only
    const qlora_tensor* labels;  // I32 [1, R]; -100 = no label: loss 0, gradient 0
    const qlora_tensor* weights; // f32 [1, R], one per row; NULL = 1
    const qlora_tensor* scale;   // f32 [1, 1], multiplies the gradient, not the loss; NULL = 1
    const qlora_tensor* losses;  // f32 [1, R], set to weight * (log sum e^x - x[label])
    const qlora_tensor* total;   // f32 [1, 3], adds up losses, their rounding error, and weights
    const qlora_tensor* flag;    // I32 [1, 1], on CUDA set to 1 if a label is invalid
    bool forward_only;           // leave the logits unchanged
} qlora_cross_entropy_desc;
QLORA_API qlora_result qlora_cross_entropy(qlora_ctx* ctx, const qlora_cross_entropy_desc* args);
// ids[r] = column of the largest value in row r, the first one if several are equal; ids is I32
// [1, R].
QLORA_API qlora_result qlora_argmax(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* ids);

// AdamW as in torch.optim.AdamW, over one flat f32 arena. The state is stored in the backend's
// memory, so that a captured update uses the values of the current step.
typedef struct qlora_adamw_state {
    double lr; // the caller writes the first five fields
    double beta1;
    double beta2;
    double eps;
    double weight_decay;
    int64_t updates;  // updates so far, the t of the bias corrections
    int64_t skipped;  // updates skipped so far because a gradient was not finite
    int32_t skip;     // 1 if the last update was skipped
    float derived[7]; // private
} qlora_adamw_state;

// Part of the arena with its own weight decay and its own scale of the shadow copy.
typedef struct qlora_adamw_range {
    int64_t begin; // first element; a multiple of 4 is faster
    int64_t count;
    float decay;        // factor for weight_decay: 1, or 0 for norm weights
    float shadow_scale; // shadow = shadow_scale * parameter
    // A second copy of this range of the shadow, in the backend's memory: element i is written to
    // copy[i / copy_cols * copy_ld + i % copy_cols]. NULL = none.
    void* copy;
    int64_t copy_cols;
    int64_t copy_ld;
} qlora_adamw_range;

typedef struct qlora_adamw_desc {
    const qlora_tensor* param;      // f32 [1, n]
    const qlora_tensor* grad;       // f32 [1, n]; zero afterwards
    const qlora_tensor* m;          // f32 [1, n], first moments
    const qlora_tensor* v;          // f32 [1, n], second moments
    const qlora_tensor* shadow;     // bf16 or f32 [1, n], a scaled copy of param; NULL = none
    const qlora_tensor* ranges;     // U8, an array of qlora_adamw_range, disjoint, within [0, n)
    const qlora_tensor* state;      // U8, one qlora_adamw_state
    const qlora_tensor* clip_scale; // f32 [1, 1], multiplies the gradient; NULL = 1
    const qlora_tensor* not_finite; // I32 [1, 1]; if not 0, the update is skipped; NULL = never
    int64_t longest_range;          // number of elements of the longest range; 0 = n
} qlora_adamw_desc;
// Counts the update, or the skip, in the state, and updates every range.
QLORA_API qlora_result qlora_adamw_step(qlora_ctx* ctx, const qlora_adamw_desc* args);
// Brings shadow and its copies up to date after param has been changed by other means. Uses only
// param, shadow and ranges.
QLORA_API qlora_result qlora_adamw_shadow(qlora_ctx* ctx, const qlora_adamw_desc* args);

// y = x keep / (1 - p), or y += that if accumulate is set. Whether element (row, column) is kept
// depends only on (seed, step, sequences[row], positions[row], layer, projection, column): it is
// the same in the backward pass, after resuming, and when a batch is split differently. y may be x.
typedef struct qlora_dropout_desc {
    const qlora_tensor* x;
    const qlora_tensor* y;
    const qlora_tensor* positions; // I32 [1, rows]
    const qlora_tensor* sequences; // I32 [1, rows]
    const qlora_tensor* state;     // I32 [1, 4]: seed low, seed high, step, 0
    float p;                       // at least 0 and less than 1
    int32_t layer;                 // 0 to 2^23 - 1
    int32_t projection;            // 0 to 255
    bool accumulate;
} qlora_dropout_desc;
QLORA_API qlora_result qlora_dropout(qlora_ctx* ctx, const qlora_dropout_desc* args);

// ---- LoRA linear --------------------------------------------------------------------------------
// A stack of projections that share their input x (q, k and v; gate and up; or a single one):
//
//   y_i = x W_i^T + bias_i + s_i (x A_i^T) B_i^T
//
// Each part has its own rank and its own columns of y, in order.
#define QLORA_LINEAR_PARTS 3

typedef struct qlora_linear_part {
    int64_t out;
    int64_t rank;              // 0 = no adapter
    float scale;               // s_i
    int32_t projection;        // qlora_dropout_desc.projection of the part
    const qlora_nf4* nf4;      // the frozen weight W_i [out, in]: either this
    const qlora_tensor* dense; // or this, in the type of x
    const qlora_tensor* bias;  // [1, out] in the type of x; NULL = none
    const qlora_tensor* a;     // A_i [rank, in] in the type of x
    const qlora_tensor* sb;    // s_i B_i [out, rank] in the type of x
    const qlora_tensor* da;    // f32 [rank, in]; used only by backward
    const qlora_tensor* db;    // f32 [out, rank], the gradient of B_i itself; used only by backward
} qlora_linear_part;

// `pad` is the sum of the ranks, rounded up to a multiple of 8. The operand is a matrix in the type
// of x, with [sum of out + pad, in + pad] elements, that qlora_linear_place fills. With it, forward
// and backward are one large product each: y = [x z] [W sB]^T and dx = [dy u] [W ; A]. Without it,
// 4-bit weights are dequantised into the scratch buffer, part by part.
typedef struct qlora_linear_desc {
    int64_t in;
    int32_t count; // number of parts, 1 to 3
    qlora_linear_part parts[QLORA_LINEAR_PARTS];
    const qlora_tensor* operand; // may be NULL
    // Dropout on the input of the adapters, with a separate mask for each projection. The other
    // fields are as in qlora_dropout_desc and are used only if dropout is not 0.
    float dropout; // 0 = none
    int32_t layer;
    const qlora_tensor* positions;
    const qlora_tensor* sequences;
    const qlora_tensor* state;
} qlora_linear_desc;

typedef enum qlora_linear_flags {
    QLORA_LINEAR_WEIGHTS = 1,  // place: write the frozen weights
    QLORA_LINEAR_ADAPTERS = 2, // place: write A, sB and the zeros around them
    QLORA_LINEAR_OVERWRITE = 4 // backward: overwrite da and db instead of adding to them
} qlora_linear_flags;

QLORA_API int64_t qlora_linear_out(const qlora_linear_desc* linear); // sum of the parts' out
QLORA_API int64_t qlora_linear_pad(const qlora_linear_desc* linear);
// Fills the operand. Write the weights once, and the adapters after every update.
QLORA_API qlora_result qlora_linear_place(qlora_ctx* ctx, const qlora_linear_desc* linear,
                                          uint32_t flags);
// y is [T, out]. x is [T, in + pad]; z = x A^T is written to its last columns, for backward.
QLORA_API qlora_result qlora_linear_forward(qlora_ctx* ctx, const qlora_linear_desc* linear,
                                            const qlora_tensor* x, const qlora_tensor* y);
// Adds u_i^T x to da_i and s_i dy_i^T z_i to db_i. dy is [T, out + pad]; u = dy sB is written to
// its last columns. x must hold z from the forward call. dx is [T, in]; NULL = not computed. flags:
// 0 or QLORA_LINEAR_OVERWRITE.
QLORA_API qlora_result qlora_linear_backward(qlora_ctx* ctx, const qlora_linear_desc* linear,
                                             const qlora_tensor* x, const qlora_tensor* dy,
                                             const qlora_tensor* dx, uint32_t flags);

// ---- attention ----------------------------------------------------------------------------------
typedef struct qlora_attention_desc {
    int64_t heads;
    int64_t kv_heads; // must divide heads; 0 = heads
    int64_t head_dim; // 1 to 256
    int64_t window;   // query i sees keys j with i - window < j <= i; 0 = all keys j <= i
    float scale;      // positive; 0 = 1 / sqrt(head_dim)
    // Computes attention from separate operators (split, GEMM, mask, softmax, join), for
    // comparison. Each of the n sequences then has tokens / n tokens, seqs is not read and lse is
    // not written. The scratch buffer must hold the scores of a whole sequence:
    // 2 * heads * length^2 elements in the backward pass.
    bool unfused;
} qlora_attention_desc;

// Causal attention within each packed sequence. q and o are [tokens, heads * head_dim], k and v are
// [tokens, kv_heads * head_dim], all f32 or all bf16; q, k and v may be views of one buffer. seqs
// is I32 [1, n + 1]: the token offsets of n sequences in ascending order, starting with 0; unused
// entries repeat the last one, so that any packing fits one n. Rows of o after the last sequence
// are set to zero. lse is f32 [heads, tokens], contiguous, and is needed by backward.
QLORA_API qlora_result qlora_attention_forward(qlora_ctx* ctx, const qlora_attention_desc* desc,
                                               const qlora_tensor* q, const qlora_tensor* k,
                                               const qlora_tensor* v, const qlora_tensor* seqs,
                                               const qlora_tensor* o, const qlora_tensor* lse);
// Computes the gradients from d_o, with o and lse from the forward call. Needs 8 bytes of scratch
// per head and token. If there are few keys and few key heads, it also uses the rest of the free
// scratch to keep a large GPU busy.
QLORA_API qlora_result qlora_attention_backward(qlora_ctx* ctx, const qlora_attention_desc* desc,
                                                const qlora_tensor* q, const qlora_tensor* k,
                                                const qlora_tensor* v, const qlora_tensor* seqs,
                                                const qlora_tensor* o, const qlora_tensor* lse,
                                                const qlora_tensor* d_o, const qlora_tensor* dq,
                                                const qlora_tensor* dk, const qlora_tensor* dv);

// ---- graphs -------------------------------------------------------------------------------------
typedef struct qlora_graph qlora_graph;
typedef qlora_result (*qlora_graph_fn)(qlora_ctx* ctx, void* user);

// Records the work that fn launches on the context's stream, then runs it once. fn must not wait
// for the device, allocate, copy to or from host memory, or compile: a call that breaks the capture
// is named in the error (QLORA_ERR_CAPTURE), and the stream remains usable. key identifies what the
// graph is for, such as a shape; replay must be given the same key. On the CPU, fn is called now
// and again at every replay, so user must stay valid. Neither capture nor replay waits for the
// device. Destroying a graph does not free the buffers it uses; graph may be NULL.
QLORA_API qlora_result qlora_graph_capture(qlora_ctx* ctx, uint64_t key, qlora_graph_fn fn,
                                           void* user, qlora_graph** out);
QLORA_API qlora_result qlora_graph_replay(qlora_graph* graph, uint64_t key);
QLORA_API qlora_result qlora_graph_destroy(qlora_graph* graph);

typedef struct qlora_graph_info {
    uint64_t key;
    uint64_t replays;
    size_t nodes; // 0 on the CPU
    bool valid;   // false once a buffer it uses was freed, or the stream or a workspace changed
} qlora_graph_info;
QLORA_API qlora_result qlora_graph_query(const qlora_graph* graph, qlora_graph_info* out);

//@@ src/api/cache.h

// ---- kernel cache -------------------------------------------------------------------------------
// All functions of this part that take or return a kernel fail with QLORA_ERR_UNSUPPORTED on the
// CPU.
typedef struct qlora_kernel qlora_kernel; // belongs to its context and is freed with it

// Looks up a kernel of the library by its name, or one that qlora_cache_get_or_compile compiled by
// its key. Never compiles: fails with QLORA_ERR_KERNEL if the kernel is unknown or not compiled
// yet.
QLORA_API qlora_result qlora_cache_get(qlora_ctx* ctx, const char* key, const qlora_kernel** out);
// Compiles a kernel of the library, with the rest of its module, unless that has been done. out may
// be NULL.
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
} qlora_prewarm_desc;

// Compiles every kernel that the shape needs, runs each of its cuBLAS products once on temporary
// memory, and seals the cache. A second call, for another model, compiles only the missing kernels.
// Does nothing on the CPU. qlora_model_open includes this work.
QLORA_API qlora_result qlora_prewarm(qlora_ctx* ctx, const qlora_prewarm_desc* shape);
// On a miss, a sealed cache fails with QLORA_ERR_SEALED and names the kernel; it never compiles
// silently. Both calls do nothing on the CPU.
QLORA_API qlora_result qlora_cache_seal(qlora_ctx* ctx);
QLORA_API qlora_result qlora_cache_unseal(qlora_ctx* ctx);

typedef struct qlora_cache_info {
    uint32_t modules;          // loaded modules, including the caller's
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

//@@ src/api/abi.h

// ---- layout of the declarations -----------------------------------------------------------------
// clang-format off
// Every public struct. qlora_ctx_create compares the sizes that the program and the library have.
#define QLORA_STRUCTS(X) \
    X(qlora_allocator)                                                                         \
    X(qlora_device_allocator)                                                                  \
    X(qlora_files)                                                                             \
    X(qlora_ctx_desc)                                                                          \
    X(qlora_native)                                                                            \
    X(qlora_memory_info)                                                                       \
    X(qlora_ctx_info)                                                                          \
    X(qlora_tensor)                                                                            \
    X(qlora_rope_desc)                                                                         \
    X(qlora_model_config)                                                                      \
    X(qlora_model_desc)                                                                        \
    X(qlora_train_desc)                                                                        \
    X(qlora_plan_desc)                                                                         \
    X(qlora_plan)                                                                              \
    X(qlora_model_info)                                                                        \
    X(qlora_parameter_info)                                                                    \
    X(qlora_batch)                                                                             \
    X(qlora_train_info)                                                                        \
    X(qlora_eval_info)                                                                         \
    X(qlora_generate_desc)                                                                     \
    X(qlora_adapter_desc)                                                                      \
    X(qlora_merge_desc)                                                                        \
    X(qlora_gemm_desc)                                                                         \
    X(qlora_nf4_desc)                                                                          \
    X(qlora_nf4)                                                                               \
    X(qlora_nf4_parts)                                                                         \
    X(qlora_clip_info)                                                                         \
    X(qlora_cross_entropy_desc)                                                                \
    X(qlora_adamw_state)                                                                       \
    X(qlora_adamw_range)                                                                       \
    X(qlora_adamw_desc)                                                                        \
    X(qlora_dropout_desc)                                                                      \
    X(qlora_linear_part)                                                                       \
    X(qlora_linear_desc)                                                                       \
    X(qlora_attention_desc)                                                                    \
    X(qlora_graph_info)                                                                        \
    X(qlora_launch_desc)                                                                       \
    X(qlora_prewarm_desc)                                                                      \
    X(qlora_cache_info)
// clang-format on

typedef enum qlora_struct_index {
#define QLORA_X_STRUCT(type) QLORA_STRUCT_##type,
    QLORA_STRUCTS(QLORA_X_STRUCT)
#undef QLORA_X_STRUCT
    QLORA_STRUCT_COUNT
} qlora_struct_index;

// A sum of the sizes, each with its own weight: a constant expression, equal in C and C++.
#define QLORA_STRUCT_WEIGHED(type)                                                                 \
    +(uint64_t)sizeof(type) * (QLORA_STRUCT_##type + 3) * (QLORA_STRUCT_##type + 5) *              \
        (QLORA_STRUCT_##type + 7)
#define QLORA_ABI ((uint64_t)QLORA_STRUCT_COUNT QLORA_STRUCTS(QLORA_STRUCT_WEIGHED))

//@@ src/qlora.h

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


//@@ src/platform/base.h

#ifndef QLORA__PART_PLATFORM
#define QLORA__PART_PLATFORM

// System headers, the targets that are supported, and compiler attributes.

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef _WIN32
#include <direct.h>
#include <fcntl.h>
#include <io.h>
#include <process.h>
#include <sys/stat.h>
#include <wchar.h>
#else
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#ifndef CLOCK_MONOTONIC
#error "qlora.h: include the implementation before system headers, or use -D_POSIX_C_SOURCE=200809L"
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

#endif // QLORA__PART_PLATFORM

//@@ src/qlora.h

#ifdef _WIN32

//@@ src/platform/windows.h

#ifndef QLORA__PART_WINDOWS
#define QLORA__PART_WINDOWS

// The system functions are declared here so that <windows.h> and its macros stay out of the user's
// file.
#ifdef _WINDOWS_
#ifdef __cplusplus
#error "qlora.h: include the implementation before <windows.h>"
#endif
#else
#ifdef __cplusplus
extern "C" {
#endif
__declspec(dllimport) void* __stdcall LoadLibraryExA(const char*, void*, unsigned long);
__declspec(dllimport) unsigned long __stdcall GetEnvironmentVariableA(const char*, char*,
                                                                      unsigned long);
__declspec(dllimport) int __stdcall GlobalMemoryStatusEx(void*); // MEMORYSTATUSEX*
__declspec(dllimport) void* __stdcall GetProcAddress(void*, const char*);
__declspec(dllimport) unsigned long __stdcall GetLastError(void);
__declspec(dllimport) int __stdcall QueryPerformanceCounter(void*); // LARGE_INTEGER*
__declspec(dllimport) int __stdcall QueryPerformanceFrequency(void*);
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
__declspec(dllimport) void* __stdcall CreateFileW(const wchar_t*, unsigned long, unsigned long,
                                                  void*, unsigned long, unsigned long, void*);
__declspec(dllimport) int __stdcall GetFileSizeEx(void*, void*);
__declspec(dllimport) void* __stdcall CreateFileMappingW(void*, void*, unsigned long, unsigned long,
                                                         unsigned long, const wchar_t*);
__declspec(dllimport) void* __stdcall MapViewOfFile(void*, unsigned long, unsigned long,
                                                    unsigned long, size_t);
__declspec(dllimport) int __stdcall UnmapViewOfFile(const void*);
#ifdef __cplusplus
}
#endif
#endif

// Whether a path does not depend on the current folder or drive: "C:\\x" or "\\\\server\\x".
static QLORA__UNUSED bool qlora__path_is_whole(const char* path) {
    bool drive = path[0] != '\0' && path[1] == ':' && (path[2] == '\\' || path[2] == '/');
    return drive || (path[0] == '\\' && path[1] == '\\');
}

// Looks for a library in the folders of PATH, where CUDA's installer puts its own. Entries that
// depend on the current folder are left out.
static QLORA__UNUSED void* qlora__library_in_path(const char* name) {
    static const char variable[] = "PATH";
    char path[32768];
    char file[1200];
    void* library = NULL;
    unsigned long size = GetEnvironmentVariableA(variable, path, (unsigned long)sizeof path);
    if (size == 0 || size >= sizeof path) {
        return NULL;
    }
    for (char* at = path; *at != '\0' && library == NULL;) {
        char* end = at + strcspn(at, ";");
        char* next = *end != '\0' ? end + 1 : end;
        *end = '\0';
        int n = snprintf(file, sizeof file, "%s\\%s", at, name);
        if (qlora__path_is_whole(at) && n > 0 && (size_t)n < sizeof file) {
            library = (void*)LoadLibraryExA(file, NULL, 0x1100UL); // its folder, then the defaults
        }
        at = next;
    }
    return library;
}

// LoadLibraryA would also look in the current folder, where anybody may have put a file.
static QLORA__UNUSED void* qlora__library_open(const char* name, char* why, size_t size) {
    bool whole = qlora__path_is_whole(name);
    if (!whole && strpbrk(name, "/\\:") != NULL) {
        snprintf(why, size, "%s is a relative path; give an absolute one, or a name alone", name);
        return NULL;
    }
    // the program's folder and the system's; for a path, also the folder it names
    void* library = (void*)LoadLibraryExA(name, NULL, whole ? 0x1100UL : 0x1000UL);
    unsigned long code = library == NULL ? GetLastError() : 0;
    if (library == NULL && !whole) {
        library = qlora__library_in_path(name);
    }
    if (library == NULL) {
        snprintf(why, size, "%s: error %lu", name, code);
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

static QLORA__UNUSED int32_t qlora__core_count(void) {
    return (int32_t)GetActiveProcessorCount(0xffff);
}

// Bytes of physical memory that are available; 0 = not known.
static QLORA__UNUSED uint64_t qlora__os_memory(const char* root) {
    struct {
        uint32_t size;
        uint32_t load;
        uint64_t bytes[7]; // the second is the available physical memory
    } status;
    (void)root;
    memset(&status, 0, sizeof status);
    status.size = (uint32_t)sizeof status;
    return GlobalMemoryStatusEx((void*)&status) ? status.bytes[1] : 0;
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

static QLORA__UNUSED bool qlora__mutex_init(qlora__mutex* m) {
    m->srw = NULL;
    return true;
}
static QLORA__UNUSED void qlora__mutex_free(qlora__mutex* m) {
    (void)m;
}
static QLORA__UNUSED void qlora__mutex_lock(qlora__mutex* m) {
    AcquireSRWLockExclusive((void*)m);
}
static QLORA__UNUSED void qlora__mutex_unlock(qlora__mutex* m) {
    ReleaseSRWLockExclusive((void*)m);
}
static QLORA__UNUSED bool qlora__cond_init(qlora__cond* c) {
    c->variable = NULL;
    return true;
}
static QLORA__UNUSED void qlora__cond_free(qlora__cond* c) {
    (void)c;
}
static QLORA__UNUSED void qlora__cond_wait(qlora__cond* c, qlora__mutex* m) {
    SleepConditionVariableSRW((void*)c, (void*)m, 0xffffffffUL, 0);
}
static QLORA__UNUSED void qlora__cond_wake(qlora__cond* c) {
    WakeAllConditionVariable((void*)c);
}
static unsigned __stdcall qlora__thread_entry(void* p) {
    qlora__thread* t = (qlora__thread*)p;
    t->fn(t->user);
    return 0;
}
static QLORA__UNUSED bool qlora__thread_start(qlora__thread* t, qlora__thread_fn fn, void* user) {
    t->fn = fn;
    t->user = user;
    t->handle = _beginthreadex(NULL, 0, qlora__thread_entry, t, 0, NULL);
    return t->handle != 0;
}
static QLORA__UNUSED void qlora__thread_join(qlora__thread* t) {
    WaitForSingleObject((void*)t->handle, 0xffffffffUL);
    CloseHandle((void*)t->handle);
}

// Paths are UTF-8; those that do not fit are rejected with ENAMETOOLONG.
#define QLORA__PATH_MAX 1024
static QLORA__UNUSED bool qlora__wide(const char* path, wchar_t* out) {
    return MultiByteToWideChar(65001, 8, path, -1, out, QLORA__PATH_MAX) > 0;
}

static QLORA__UNUSED int qlora__os_open(const char* path, qlora_file_mode mode, void** file,
                                        void* user) {
    (void)user;
    wchar_t wide[QLORA__PATH_MAX];
    if (!qlora__wide(path, wide)) {
        return ENAMETOOLONG;
    }
    FILE* f = NULL;
    if (mode == QLORA_FILE_READ) {
        f = _wfopen(wide, L"rb");
    } else {
        int fd = _wopen(wide, _O_WRONLY | _O_CREAT | _O_EXCL | _O_BINARY | _O_NOINHERIT,
                        _S_IREAD | _S_IWRITE);
        f = fd >= 0 ? _fdopen(fd, "wb") : NULL;
        if (fd >= 0 && f == NULL) {
            _close(fd);
        }
    }
    if (f == NULL) {
        return errno != 0 ? errno : EIO;
    }
    *file = f;
    return 0;
}

static QLORA__UNUSED int64_t qlora__os_read(void* file, void* buffer, size_t bytes, void* user) {
    (void)user;
    size_t n = fread(buffer, 1, bytes, (FILE*)file);
    return n == 0 && ferror((FILE*)file) ? -(int64_t)EIO : (int64_t)n;
}

static QLORA__UNUSED int64_t qlora__os_write(void* file, const void* data, size_t bytes,
                                             void* user) {
    (void)user;
    size_t n = fwrite(data, 1, bytes, (FILE*)file);
    return n == 0 && bytes > 0 ? -(int64_t)(errno != 0 ? errno : EIO) : (int64_t)n;
}

static QLORA__UNUSED int qlora__os_sync(void* file, void* user) {
    (void)user;
    if (fflush((FILE*)file) != 0) {
        return errno != 0 ? errno : EIO;
    }
    return _commit(_fileno((FILE*)file)) == 0 ? 0 : EIO;
}

static QLORA__UNUSED int qlora__os_close(void* file, void* user) {
    (void)user;
    return fclose((FILE*)file) == 0 ? 0 : EIO;
}

static QLORA__UNUSED int qlora__os_rename(const char* from, const char* to, void* user) {
    (void)user;
    wchar_t wide_from[QLORA__PATH_MAX];
    wchar_t wide_to[QLORA__PATH_MAX];
    if (!qlora__wide(from, wide_from) || !qlora__wide(to, wide_to)) {
        return ENAMETOOLONG;
    }
    return MoveFileExW(wide_from, wide_to, 1 | 8) ? 0 : EIO; // replace the target, write through
}

static QLORA__UNUSED int qlora__os_remove(const char* path, void* user) {
    (void)user;
    wchar_t wide[QLORA__PATH_MAX];
    if (!qlora__wide(path, wide)) {
        return ENAMETOOLONG;
    }
    return _wremove(wide) == 0 ? 0 : errno;
}

static QLORA__UNUSED int qlora__os_make_dir(const char* path, void* user) {
    (void)user;
    wchar_t wide[QLORA__PATH_MAX];
    if (!qlora__wide(path, wide)) {
        return ENAMETOOLONG;
    }
    return _wmkdir(wide) == 0 || errno == EEXIST ? 0 : errno;
}

static QLORA__UNUSED int qlora__os_sync_dir(const char* path, void* user) {
    (void)path;
    (void)user;
    return 0; // MoveFileEx has already written through
}

static QLORA__UNUSED int qlora__os_map(const char* path, const void** data, uint64_t* bytes,
                                       void** handle, void* user) {
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
        CloseHandle(mapping); // the view keeps the mapping open
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

static QLORA__UNUSED void qlora__os_unmap(const void* data, uint64_t bytes, void* handle,
                                          void* user) {
    (void)bytes;
    (void)handle;
    (void)user;
    if (data != NULL) {
        UnmapViewOfFile(data);
    }
}

#endif // QLORA__PART_WINDOWS

//@@ src/qlora.h

#else // POSIX

//@@ src/platform/posix.h

#ifndef QLORA__PART_POSIX
#define QLORA__PART_POSIX

// POSIX: shared libraries, clock, threads and files.

// A path that depends on the current folder would let whoever can write there run code here.
static QLORA__UNUSED void* qlora__library_open(const char* name, char* why, size_t size) {
    if (name[0] != '/' && strchr(name, '/') != NULL) {
        snprintf(why, size, "%s is a relative path; give an absolute one, or a name alone", name);
        return NULL;
    }
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

static QLORA__UNUSED int32_t qlora__core_count(void) {
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 && n < 4096 ? (int32_t)n : 1;
}

// Reads a small text file, such as those of /proc; "" if there is none.
static QLORA__UNUSED void qlora__os_text(const char* root, const char* folder, const char* name,
                                         char* out, size_t size) {
    char path[1200];
    size_t used = 0;
    int n = snprintf(path, sizeof path, "%s%s%s", root, folder, name);
    int fd = n > 0 && (size_t)n < sizeof path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    while (fd >= 0 && used < size - 1) {
        ssize_t got = read(fd, out + used, size - 1 - used);
        if (got <= 0) {
            break;
        }
        used += (size_t)got;
    }
    if (fd >= 0) {
        close(fd);
    }
    out[used] = '\0';
}

// The number after a key at the start of a line; UINT64_MAX if there is none ("max" in a cgroup).
static QLORA__UNUSED uint64_t qlora__os_number(const char* text, const char* key) {
    size_t length = strlen(key);
    while (text != NULL && strncmp(text, key, length) != 0) {
        text = strchr(text, '\n');
        text = text != NULL ? text + 1 : NULL;
    }
    text = text != NULL ? text + length : "";
    while (*text == ' ') {
        text++;
    }
    uint64_t value = *text >= '0' && *text <= '9' ? 0 : UINT64_MAX;
    for (; *text >= '0' && *text <= '9' && value < UINT64_MAX / 16; text++) {
        value = value * 10 + (uint64_t)(*text - '0');
    }
    return value;
}

// What one cgroup leaves: its limit less what it uses, without the file cache that it can drop.
static QLORA__UNUSED uint64_t qlora__os_cgroup(const char* root, const char* folder, bool second) {
    char text[8192];
    qlora__os_text(root, folder, second ? "/memory.max" : "/memory.limit_in_bytes", text,
                   sizeof text);
    uint64_t limit = qlora__os_number(text, "");
    qlora__os_text(root, folder, second ? "/memory.current" : "/memory.usage_in_bytes", text,
                   sizeof text);
    uint64_t used = qlora__os_number(text, "");
    qlora__os_text(root, folder, "/memory.stat", text, sizeof text);
    uint64_t cache = qlora__os_number(text, second ? "inactive_file " : "total_inactive_file ");
    if (limit == UINT64_MAX || used == UINT64_MAX) {
        return UINT64_MAX;
    }
    used -= cache != UINT64_MAX && cache < used ? cache : 0;
    return limit > used ? limit - used : 0;
}

// Bytes of memory that this process can still take without swapping: what the system has available
// and what every cgroup that it is in allows; at least 1. 0 = not known. Tests give another root
// than "".
static QLORA__UNUSED uint64_t qlora__os_memory(const char* root) {
    char text[8192];
    qlora__os_text(root, "/proc/meminfo", "", text, sizeof text);
    uint64_t most = qlora__os_number(text, "MemAvailable:");
    most = most != UINT64_MAX ? most * 1024 : UINT64_MAX;
    qlora__os_text(root, "/proc/self/cgroup", "", text, sizeof text);
    for (char* line = text; *line != '\0';) { // number:controllers:folder
        char folder[1024];
        char* end = line + strcspn(line, "\n");
        char* next = *end != '\0' ? end + 1 : end;
        *end = '\0';
        bool second = strncmp(line, "0::", 3) == 0;
        char* first = strstr(line, ":memory:");
        const char* own = second ? line + 3 : first != NULL ? first + 8 : NULL;
        const char* base = second ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
        int n = own != NULL ? snprintf(folder, sizeof folder, "%s%s", base, own) : -1;
        bool inside = n > 0 && (size_t)n < sizeof folder;
        while (inside) { // up to the root, which in a container is the container's own
            uint64_t left = qlora__os_cgroup(root, folder, second);
            most = left < most ? left : most;
            char* slash = strrchr(folder, '/');
            inside = slash != NULL && (size_t)(slash - folder) >= strlen(base);
            if (inside) {
                *slash = '\0';
            }
        }
        line = next;
    }
    return most == UINT64_MAX ? 0 : most > 0 ? most : 1;
}

typedef pthread_mutex_t qlora__mutex;
typedef pthread_cond_t qlora__cond;
typedef struct qlora__thread {
    pthread_t handle;
    qlora__thread_fn fn;
    void* user;
} qlora__thread;

static QLORA__UNUSED bool qlora__mutex_init(qlora__mutex* m) {
    return pthread_mutex_init(m, NULL) == 0;
}
static QLORA__UNUSED void qlora__mutex_free(qlora__mutex* m) {
    pthread_mutex_destroy(m);
}
static QLORA__UNUSED void qlora__mutex_lock(qlora__mutex* m) {
    pthread_mutex_lock(m);
}
static QLORA__UNUSED void qlora__mutex_unlock(qlora__mutex* m) {
    pthread_mutex_unlock(m);
}
static QLORA__UNUSED bool qlora__cond_init(qlora__cond* c) {
    return pthread_cond_init(c, NULL) == 0;
}
static QLORA__UNUSED void qlora__cond_free(qlora__cond* c) {
    pthread_cond_destroy(c);
}
static QLORA__UNUSED void qlora__cond_wait(qlora__cond* c, qlora__mutex* m) {
    pthread_cond_wait(c, m);
}
static QLORA__UNUSED void qlora__cond_wake(qlora__cond* c) {
    pthread_cond_broadcast(c);
}
static QLORA__UNUSED void* qlora__thread_entry(void* p) {
    qlora__thread* t = (qlora__thread*)p;
    t->fn(t->user);
    return NULL;
}
static QLORA__UNUSED bool qlora__thread_start(qlora__thread* t, qlora__thread_fn fn, void* user) {
    t->fn = fn;
    t->user = user;
    return pthread_create(&t->handle, NULL, qlora__thread_entry, t) == 0;
}
static QLORA__UNUSED void qlora__thread_join(qlora__thread* t) {
    pthread_join(t->handle, NULL);
}

// A file handle is its descriptor plus one, so that NULL can mean "no file".
static QLORA__UNUSED int qlora__os_fd(void* file) {
    return (int)((intptr_t)file - 1);
}

static QLORA__UNUSED int qlora__os_open(const char* path, qlora_file_mode mode, void** file,
                                        void* user) {
    (void)user;
    int flags = mode == QLORA_FILE_READ ? O_RDONLY : O_WRONLY | O_CREAT | O_EXCL;
    int fd = open(path, flags | O_CLOEXEC, 0666);
    if (fd < 0) {
        return errno;
    }
    *file = (void*)((intptr_t)fd + 1);
    return 0;
}

static QLORA__UNUSED int64_t qlora__os_read(void* file, void* buffer, size_t bytes, void* user) {
    (void)user;
    size_t most = bytes < ((size_t)1 << 30) ? bytes : (size_t)1 << 30; // Linux caps a call at 2 GiB
    ssize_t n;
    do {
        n = read(qlora__os_fd(file), buffer, most);
    } while (n < 0 && errno == EINTR);
    return n < 0 ? -(int64_t)errno : (int64_t)n;
}

static QLORA__UNUSED int64_t qlora__os_write(void* file, const void* data, size_t bytes,
                                             void* user) {
    (void)user;
    size_t most = bytes < ((size_t)1 << 30) ? bytes : (size_t)1 << 30;
    ssize_t n;
    do {
        n = write(qlora__os_fd(file), data, most);
    } while (n < 0 && errno == EINTR);
    return n < 0 ? -(int64_t)errno : (int64_t)n;
}

static QLORA__UNUSED int qlora__os_sync(void* file, void* user) {
    (void)user;
    return fsync(qlora__os_fd(file)) == 0 ? 0 : errno;
}

static QLORA__UNUSED int qlora__os_close(void* file, void* user) {
    (void)user;
    return close(qlora__os_fd(file)) == 0 ? 0 : errno;
}

static QLORA__UNUSED int qlora__os_rename(const char* from, const char* to, void* user) {
    (void)user;
    return rename(from, to) == 0 ? 0 : errno;
}

static QLORA__UNUSED int qlora__os_remove(const char* path, void* user) {
    (void)user;
    return remove(path) == 0 ? 0 : errno;
}

static QLORA__UNUSED int qlora__os_make_dir(const char* path, void* user) {
    (void)user;
    return mkdir(path, 0777) == 0 || errno == EEXIST ? 0 : errno;
}

static QLORA__UNUSED int qlora__os_sync_dir(const char* path, void* user) {
    (void)user;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return errno;
    }
    int code = fsync(fd) == 0 ? 0 : errno;
    close(fd);
    // Some file systems cannot sync a folder and return EINVAL; nothing more can be done about it.
    return code == EINVAL ? 0 : code;
}

static QLORA__UNUSED int qlora__os_map(const char* path, const void** data, uint64_t* bytes,
                                       void** handle, void* user) {
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

static QLORA__UNUSED void qlora__os_unmap(const void* data, uint64_t bytes, void* handle,
                                          void* user) {
    (void)handle;
    (void)user;
    if (data != NULL) {
        munmap((void*)(uintptr_t)data, (size_t)bytes);
    }
}

#endif // QLORA__PART_POSIX

//@@ src/qlora.h

#endif // _WIN32


//@@ src/platform/system.h

#ifndef QLORA__PART_SYSTEM
#define QLORA__PART_SYSTEM

static QLORA__UNUSED void* qlora__os_alloc(size_t bytes, size_t align, void* user) {

// Allocation, the names of NVIDIA's libraries, and error texts, on every system.
    (void)user;
#ifdef _WIN32
    return _aligned_malloc(bytes, align);
#else
    void* p = NULL;
    return posix_memalign(&p, align < sizeof(void*) ? sizeof(void*) : align, bytes) == 0 ? p : NULL;
#endif
}

static QLORA__UNUSED void qlora__os_free(void* pointer, size_t bytes, void* user) {
    (void)bytes;
    (void)user;
#ifdef _WIN32
    _aligned_free(pointer);
#else
    free(pointer);
#endif
}

// The calling convention and the file names of NVIDIA's libraries.
// clang-format off
#ifdef _WIN32
#define QLORA__CUDAAPI __stdcall
#define QLORA__CUDA_NAMES(X) X("nvcuda.dll")
#define QLORA__CUBLAS_NAMES(X) X("cublas64_13.dll") X("cublas64_12.dll") X("cublas64_11.dll")
#else
#define QLORA__CUDAAPI
#define QLORA__CUDA_NAMES(X)                                                                       \
    X("libcuda.so.1") X("libcuda.so") X("/usr/lib/wsl/lib/libcuda.so.1")
#define QLORA__CUBLAS_NAMES(X)                                                                     \
    X("libcublas.so.13") X("libcublas.so.12") X("libcublas.so.11") X("libcublas.so")               \
    X("/usr/local/cuda/lib64/libcublas.so")
#endif
// clang-format on

// strerror is not thread-safe, so the common codes are listed here.
static const char* qlora__errno_text(int code) {
    static const struct {
        int code;
        const char* text;
    } table[] = {
        {ENOENT, "no such file or folder"},  {EACCES, "permission denied"},
        {EPERM, "not permitted"},            {ENOSPC, "no space left on the device"},
        {EROFS, "read-only file system"},    {EISDIR, "is a folder"},
        {ENOTDIR, "not a folder"},           {EEXIST, "already exists"},
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

#endif // QLORA__PART_SYSTEM

//@@ src/core/env.h

#ifndef QLORA__PART_ENV
#define QLORA__PART_ENV

// The environment of all code that reads or writes files: memory, files, a log and the error text.
// Each context has one, and so does each object of qlora_text.h.
#define QLORA__ERROR_SIZE 768

typedef struct qlora__env {
    qlora_allocator allocator; // both functions set
    qlora_files files;         // all functions set
    qlora_log_fn log;          // NULL: silent
    void* log_user;
    const char* call;    // the outermost public call, for messages
    bool one_line;       // replace control characters, which quoted files may contain
    uint64_t host_bytes; // allocated and not yet freed
    char error[QLORA__ERROR_SIZE];
} qlora__env;

#define QLORA__TRY(expression)                                                                     \
    do {                                                                                           \
        qlora_result qlora_try_ = (expression);                                                    \
        if (qlora_try_ != QLORA_OK) {                                                              \
            return qlora_try_;                                                                     \
        }                                                                                          \
    } while (0)

// ---- hooks --------------------------------------------------------------------------------------

#define QLORA__FILES_ALL 11

// How many of the functions are set.
static QLORA__UNUSED int qlora__files_count(const qlora_files* f) {
    return (f->open != NULL) + (f->read != NULL) + (f->write != NULL) + (f->sync != NULL) +
           (f->close != NULL) + (f->rename != NULL) + (f->remove != NULL) + (f->make_dir != NULL) +
           (f->sync_dir != NULL) + (f->map != NULL) + (f->unmap != NULL);
}

// The operating system's functions where there are none.
static QLORA__UNUSED void qlora__hooks_default(qlora_allocator* allocator, qlora_files* files) {
    if (allocator->alloc == NULL) {
        allocator->alloc = qlora__os_alloc;
        allocator->free = qlora__os_free;
    }
    if (files->open == NULL) {
        files->open = qlora__os_open;
        files->read = qlora__os_read;
        files->write = qlora__os_write;
        files->sync = qlora__os_sync;
        files->close = qlora__os_close;
        files->rename = qlora__os_rename;
        files->remove = qlora__os_remove;
        files->make_dir = qlora__os_make_dir;
        files->sync_dir = qlora__os_sync_dir;
        files->map = qlora__os_map;
        files->unmap = qlora__os_unmap;
    }
}

// ---- errors and log -----------------------------------------------------------------------------

// Length of the UTF-8 character at p (1 to 4), 0 when it is not valid.
static QLORA__UNUSED uint32_t qlora__utf8_size(const char* text, uint32_t left) {
    const uint8_t* p = (const uint8_t*)text;
    uint32_t size = p[0] < 0x80 ? 1 : p[0] < 0xC2 ? 0 : p[0] < 0xE0 ? 2 : p[0] < 0xF0 ? 3 : 4;
    if (size == 0 || size > left || p[0] > 0xF4) {
        return 0;
    }
    for (uint32_t i = 1; i < size; i++) {
        if ((p[i] & 0xC0) != 0x80) {
            return 0;
        }
    }
    // the second byte shows overlong forms, surrogates and code points above U+10FFFF
    if ((p[0] == 0xE0 && p[1] < 0xA0) || (p[0] == 0xED && p[1] > 0x9F) ||
        (p[0] == 0xF0 && p[1] < 0x90) || (p[0] == 0xF4 && p[1] > 0x8F)) {
        return 0;
    }
    return size;
}

// Messages quote files and are truncated: what is left of a UTF-8 character at the end is dropped.
// On one line, control characters and invalid UTF-8 elsewhere become '?'.
static void qlora__env_clean(const qlora__env* env, char* text, size_t room) {
    size_t count = strlen(text);
    if (count + 1 == room) {
        while (count > 0 && ((uint8_t)text[count - 1] & 0xC0) == 0x80) {
            count--;
        }
        if (count > 0 && (uint8_t)text[count - 1] >= 0xC0) {
            count--;
        }
        text[count] = '\0';
    }
    for (size_t i = 0; env->one_line && i < count;) {
        uint32_t left = count - i < 4 ? (uint32_t)(count - i) : 4;
        uint32_t size = qlora__utf8_size(text + i, left);
        if (size == 0 || (uint8_t)text[i] < 0x20 || text[i] == 0x7F) {
            text[i] = '?';
        }
        i += size > 0 ? size : 1;
    }
}

// Sets the error text, which starts with the name of the public call.
static void qlora__env_vfail(qlora__env* env, const char* format, va_list args) {
    int used = 0;
    if (env->call != NULL) {
        used = snprintf(env->error, sizeof env->error, "%s: ", env->call);
    }
    vsnprintf(env->error + used, sizeof env->error - (size_t)used, format, args);
    qlora__env_clean(env, env->error, sizeof env->error);
}

// Sets the error text and returns the result.
QLORA__PRINTF(3, 4)
static QLORA__UNUSED qlora_result qlora__env_fail(qlora__env* env, qlora_result result,
                                                  const char* format, ...) {
    va_list args;
    va_start(args, format);
    qlora__env_vfail(env, format, args);
    va_end(args);
    return result;
}

// The error text without the name of the call.
static QLORA__UNUSED const char* qlora__env_reason(const qlora__env* env) {
    size_t prefix = env->call != NULL ? strlen(env->call) + 2 : 0;
    return strlen(env->error) >= prefix ? env->error + prefix : env->error;
}

// Puts words before the error text of what failed inside: "model.merges[3] ", then "is not ...".
QLORA__PRINTF(3, 4)
static QLORA__UNUSED qlora_result qlora__env_wrap(qlora__env* env, qlora_result result,
                                                  const char* format, ...) {
    char inner[QLORA__ERROR_SIZE];
    snprintf(inner, sizeof inner, "%s", qlora__env_reason(env));
    va_list args;
    va_start(args, format);
    qlora__env_vfail(env, format, args);
    va_end(args);
    size_t used = strlen(env->error);
    snprintf(env->error + used, sizeof env->error - used, "%s", inner);
    qlora__env_clean(env, env->error, sizeof env->error);
    return result;
}

QLORA__PRINTF(6, 7)
static QLORA__UNUSED void qlora__env_log(const qlora__env* env, qlora_log_level level,
                                         qlora_log_item item, const char* file, int line,
                                         const char* format, ...) {
    if (env->log == NULL) {
        return;
    }
    char text[QLORA__ERROR_SIZE];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    qlora__env_clean(env, text, sizeof text);
    env->log(env->log_user, level, item, text, file, line);
}

// ---- sizes --------------------------------------------------------------------------------------

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

// ---- host memory --------------------------------------------------------------------------------

// Allocates host memory through the hook, 64-byte aligned. Sets the error text on failure.
static void* qlora__env_alloc(qlora__env* env, size_t bytes) {
    size_t wanted = bytes > 0 ? bytes : 1;
    void* p = env->allocator.alloc(wanted, 64, env->allocator.user);
    if (p == NULL) {
        qlora__env_fail(env, QLORA_ERR_MEMORY, "cannot allocate %llu bytes of host memory",
                        (unsigned long long)bytes);
        return NULL;
    }
    env->host_bytes += wanted;
    return p;
}

static QLORA__UNUSED void* qlora__env_alloc_zero(qlora__env* env, size_t bytes) {
    void* p = qlora__env_alloc(env, bytes);
    if (p != NULL) {
        memset(p, 0, bytes);
    }
    return p;
}

// `bytes` is the size that was passed to qlora__env_alloc; the pointer may be NULL.
static void qlora__env_free(qlora__env* env, void* pointer, size_t bytes) {
    if (pointer != NULL) {
        size_t wanted = bytes > 0 ? bytes : 1;
        env->allocator.free(pointer, wanted, env->allocator.user);
        env->host_bytes -= wanted;
    }
}

// Moves the first `used` bytes of a block of `bytes` bytes into a new block of `wanted` bytes. If
// it returns NULL, the old block is unchanged.
static QLORA__UNUSED void* qlora__env_realloc(qlora__env* env, void* pointer, size_t used,
                                              size_t bytes, size_t wanted) {
    void* moved = qlora__env_alloc(env, wanted);
    if (moved != NULL && pointer != NULL) {
        memcpy(moved, pointer, used);
        qlora__env_free(env, pointer, bytes);
    }
    return moved;
}

// ---- strings ------------------------------------------------------------------------------------

// Appends to a buffer that may be too small; `used` counts the characters that would have been
// written.
QLORA__PRINTF(4, 5)
static QLORA__UNUSED void qlora__append(char* buffer, size_t size, size_t* used, const char* format,
                                        ...) {
    va_list args;
    va_start(args, format);
    bool room = buffer != NULL && *used < size;
    int n = vsnprintf(room ? buffer + *used : NULL, room ? size - *used : 0, format, args);
    va_end(args);
    *used += n > 0 ? (size_t)n : 0;
}

// A growing string. The first failure is kept and later additions do nothing, so callers check
// once.
typedef struct qlora__string {
    qlora__env* env;
    char* data;
    size_t size;
    size_t capacity;
    qlora_result result;
} qlora__string;

static QLORA__UNUSED void qlora__string_begin(qlora__env* env, qlora__string* s) {
    memset(s, 0, sizeof *s);
    s->env = env;
    s->result = QLORA_OK;
}

static QLORA__UNUSED void qlora__string_free(qlora__string* s) {
    qlora__env_free(s->env, s->data, s->capacity);
    s->data = NULL;
    s->size = 0;
    s->capacity = 0;
}

static QLORA__UNUSED void qlora__string_add(qlora__string* s, const void* bytes, size_t size) {
    size_t need = 0;
    if (s->result != QLORA_OK || size == 0) {
        return;
    }
    if (!qlora__add(s->size, size, &need)) {
        s->result = qlora__env_fail(s->env, QLORA_ERR_MEMORY,
                                    "a text of more than %llu bytes does not fit in memory",
                                    (unsigned long long)SIZE_MAX);
        return;
    }
    if (need > s->capacity) {
        size_t capacity = s->capacity < 256 ? 256 : s->capacity;
        while (capacity < need) {
            capacity = capacity > SIZE_MAX / 2 ? need : capacity * 2;
        }
        char* data = (char*)qlora__env_realloc(s->env, s->data, s->size, s->capacity, capacity);
        if (data == NULL) {
            s->result = QLORA_ERR_MEMORY;
            return;
        }
        s->data = data;
        s->capacity = capacity;
    }
    memcpy(s->data + s->size, bytes, size);
    s->size = need;
}

static QLORA__UNUSED void qlora__string_puts(qlora__string* s, const char* string) {
    qlora__string_add(s, string, strlen(string));
}

#endif // QLORA__PART_ENV

//@@ src/core/files.h

#ifndef QLORA__PART_FILES
#define QLORA__PART_FILES

// ---- files --------------------------------------------------------------------------------------

typedef struct qlora__map {
    const uint8_t* data;
    uint64_t size;
    void* handle;
} qlora__map;

static QLORA__UNUSED qlora_result qlora__map_open(qlora__env* env, const char* path,
                                                  qlora__map* out) {
    memset(out, 0, sizeof *out);
    const void* data = NULL;
    int code = env->files.map(path, &data, &out->size, &out->handle, env->files.user);
    if (code != 0) {
        return qlora__env_fail(env, QLORA_ERR_FILE, "cannot read %s: %s (%d)", path,
                               qlora__errno_text(code), code);
    }
    out->data = (const uint8_t*)data;
    return QLORA_OK;
}

static QLORA__UNUSED void qlora__map_close(qlora__env* env, qlora__map* map) {
    if (map->data != NULL || map->handle != NULL) {
        env->files.unmap(map->data, map->size, map->handle, env->files.user);
    }
    memset(map, 0, sizeof *map);
}

// A file being written: the data goes to a temporary name next to the final one, and the file is
// renamed only once it is complete and on disk. A crash leaves either the old file or the new one.
typedef struct qlora__out {
    void* file;
    char* path; // the final and the temporary path, in one block
    char* temporary;
    size_t block;
} qlora__out;

static QLORA__UNUSED void qlora__out_forget(qlora__env* env, qlora__out* out) {
    qlora__env_free(env, out->path, out->block);
    memset(out, 0, sizeof *out);
}

// Abandons the file: closes and removes the temporary one. Keeps the error text.
static QLORA__UNUSED void qlora__out_abort(qlora__env* env, qlora__out* out) {
    if (out->file != NULL) {
        env->files.close(out->file, env->files.user);
    }
    if (out->temporary != NULL) {
        env->files.remove(out->temporary, env->files.user);
    }
    qlora__out_forget(env, out);
}

static QLORA__UNUSED qlora_result qlora__out_fail(qlora__env* env, qlora__out* out,
                                                  const char* what, int code) {
    qlora_result r = qlora__env_fail(env, QLORA_ERR_FILE, "cannot %s %s: %s (%d)", what, out->path,
                                     qlora__errno_text(code), code);
    qlora__out_abort(env, out);
    return r;
}

static QLORA__UNUSED qlora_result qlora__out_begin(qlora__env* env, const char* path,
                                                   qlora__out* out) {
    memset(out, 0, sizeof *out);
    size_t length = strlen(path);
    out->block = 2 * length + 6;
    out->path = (char*)qlora__env_alloc(env, out->block);
    if (out->path == NULL) {
        return QLORA_ERR_MEMORY;
    }
    memcpy(out->path, path, length + 1);
    char* temporary = out->path + length + 1;
    memcpy(temporary, path, length);
    memcpy(temporary + length, ".tmp", 5);
    int code = env->files.open(temporary, QLORA_FILE_CREATE, &out->file, env->files.user);
    if (code == EEXIST) { // left by a crash, or a link: the name is removed, never what it names
        env->files.remove(temporary, env->files.user);
        code = env->files.open(temporary, QLORA_FILE_CREATE, &out->file, env->files.user);
    }
    if (code != 0) {
        out->file = NULL; // nothing to remove
        return qlora__out_fail(env, out, "create", code);
    }
    out->temporary = temporary;
    return QLORA_OK;
}

// On failure, the file has already been abandoned.
static QLORA__UNUSED qlora_result qlora__out_write(qlora__env* env, qlora__out* out,
                                                   const void* data, size_t bytes) {
    const char* p = (const char*)data;
    while (bytes > 0) {
        int64_t n = env->files.write(out->file, p, bytes, env->files.user);
        if (n <= 0 || (uint64_t)n > bytes) {
            return qlora__out_fail(env, out, "write", n < 0 ? (int)-n : EIO);
        }
        p += n;
        bytes -= (size_t)n;
    }
    return QLORA_OK;
}

// Completes the temporary file: everything that was written is on disk. It still has to be
// published.
static QLORA__UNUSED qlora_result qlora__out_finish(qlora__env* env, qlora__out* out) {
    const qlora_files* files = &env->files;
    int code = files->sync(out->file, files->user);
    if (code != 0) {
        return qlora__out_fail(env, out, "sync", code);
    }
    code = files->close(out->file, files->user);
    out->file = NULL;
    return code == 0 ? QLORA_OK : qlora__out_fail(env, out, "close", code);
}

// Gives a finished file its final name.
static QLORA__UNUSED qlora_result qlora__out_publish(qlora__env* env, qlora__out* out) {
    const qlora_files* files = &env->files;
    int code = files->rename(out->temporary, out->path, files->user);
    if (code != 0) {
        return qlora__out_fail(env, out, "replace", code);
    }
    out->temporary = NULL; // the file has its final name now
    char* slash = strrchr(out->path, '/');
    const char* folder = slash != NULL ? out->path : ".";
    if (slash != NULL) {
        slash[slash == out->path ? 1 : 0] = '\0';
    }
    code = files->sync_dir(folder, files->user);
    if (code != 0) {
        return qlora__out_fail(env, out, "sync the folder of", code);
    }
    qlora__out_forget(env, out);
    return QLORA_OK;
}

static QLORA__UNUSED qlora_result qlora__out_commit(qlora__env* env, qlora__out* out) {
    QLORA__TRY(qlora__out_finish(env, out));
    return qlora__out_publish(env, out);
}

// Writes a small file atomically.
static QLORA__UNUSED qlora_result qlora__file_write(qlora__env* env, const char* path,
                                                    const void* bytes, size_t size) {
    qlora__out out;
    QLORA__TRY(qlora__out_begin(env, path, &out));
    QLORA__TRY(qlora__out_write(env, &out, bytes, size));
    return qlora__out_commit(env, &out);
}

#define QLORA__PATH_ROOM 4096

// Joins a folder and a file name into `out` (QLORA__PATH_ROOM bytes).
static QLORA__UNUSED qlora_result qlora__path_join(qlora__env* env, const char* dir,
                                                   const char* name, char* out) {
    size_t a = strlen(dir);
    size_t b = strlen(name);
    if (a + b + 2 > QLORA__PATH_ROOM) {
        return qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                               "the path %.60s.../%.60s is longer than %d bytes", dir, name,
                               QLORA__PATH_ROOM);
    }
    memcpy(out, dir, a);
    if (a > 0 && dir[a - 1] != '/') {
        out[a] = '/';
        a++;
    }
    memcpy(out + a, name, b + 1);
    return QLORA_OK;
}

// Checks whether a file exists. Any failure to open it other than "no such file" is an error.
static QLORA__UNUSED qlora_result qlora__file_exists(qlora__env* env, const char* path, bool* out) {
    void* file = NULL;
    int code = env->files.open(path, QLORA_FILE_READ, &file, env->files.user);
    if (code != 0 && code != ENOENT) {
        return qlora__env_fail(env, QLORA_ERR_FILE, "cannot read %s: %s (%d)", path,
                               qlora__errno_text(code), code);
    }
    if (code == 0) {
        env->files.close(file, env->files.user);
    }
    *out = code == 0;
    return QLORA_OK;
}

static QLORA__UNUSED qlora_result qlora__dir_make(qlora__env* env, const char* dir) {
    int code = env->files.make_dir(dir, env->files.user);
    return code == 0 ? QLORA_OK
                     : qlora__env_fail(env, QLORA_ERR_FILE, "cannot create the folder %s: %s (%d)",
                                       dir, qlora__errno_text(code), code);
}

static QLORA__UNUSED qlora_result qlora__dir_sync(qlora__env* env, const char* dir) {
    int code = env->files.sync_dir(dir, env->files.user);
    return code == 0 ? QLORA_OK
                     : qlora__env_fail(env, QLORA_ERR_FILE, "cannot sync the folder %s: %s (%d)",
                                       dir, qlora__errno_text(code), code);
}

// Removes a file if it exists.
static QLORA__UNUSED void qlora__file_remove(qlora__env* env, const char* dir, const char* name) {
    char path[QLORA__PATH_ROOM];
    if (qlora__path_join(env, dir, name, path) == QLORA_OK) {
        env->files.remove(path, env->files.user);
    }
}

#endif // QLORA__PART_FILES

//@@ src/core/tools.h

#ifndef QLORA__PART_TOOLS
#define QLORA__PART_TOOLS

// ---- sorting ------------------------------------------------------------------------------------

// Heap sort of an index array: no recursion, no quadratic worst case, and the same order on every
// platform as long as `less` is a strict total order.
typedef bool (*qlora__less_fn)(const void* user, uint32_t a, uint32_t b);

static QLORA__UNUSED void qlora__sort_sift(uint32_t* index, size_t root, size_t count,
                                           qlora__less_fn less, const void* user) {
    for (;;) {
        size_t child = 2 * root + 1;
        if (child >= count) {
            return;
        }
        if (child + 1 < count && less(user, index[child], index[child + 1])) {
            child++;
        }
        if (!less(user, index[root], index[child])) {
            return;
        }
        uint32_t swap = index[root];
        index[root] = index[child];
        index[child] = swap;
        root = child;
    }
}

static QLORA__UNUSED void qlora__sort(uint32_t* index, size_t count, qlora__less_fn less,
                                      const void* user) {
    for (size_t i = count / 2; i > 0; i--) {
        qlora__sort_sift(index, i - 1, count, less, user);
    }
    for (size_t i = count; i > 1; i--) {
        uint32_t swap = index[0];
        index[0] = index[i - 1];
        index[i - 1] = swap;
        qlora__sort_sift(index, 0, i - 1, less, user);
    }
}

// ---- checksums ----------------------------------------------------------------------------------

// 64-bit checksum of a byte stream, eight bytes at a time; the result does not depend on how the
// stream is split into pieces. Each step is a bijection of the state for a given word and of the
// word for a given state, so damage inside one aligned word is always detected, and other damage
// with probability 1 - 2^-64. It gives no protection against deliberate changes.
typedef struct qlora__hash {
    uint64_t state;
    uint64_t bytes;
    uint64_t word; // bytes that do not fill a word yet, little-endian
} qlora__hash;

static QLORA__UNUSED void qlora__hash_begin(qlora__hash* h) {
    h->state = 0x9E3779B97F4A7C15u;
    h->bytes = 0;
    h->word = 0;
}

static QLORA__UNUSED uint64_t qlora__hash_mix(uint64_t state, uint64_t word) {
    state = (state ^ word) * 0xD6E8FEB86659FD93u;
    return state ^ (state >> 32);
}

static QLORA__UNUSED void qlora__hash_add(qlora__hash* h, const void* data, size_t size) {
    const uint8_t* p = (const uint8_t*)data;
    while (size > 0) {
        unsigned filled = (unsigned)(h->bytes & 7);
        if (filled == 0 && size >= 8) {
            uint64_t word = 0;
            for (unsigned i = 0; i < 8; i++) {
                word |= (uint64_t)p[i] << (8 * i);
            }
            h->state = qlora__hash_mix(h->state, word);
            h->bytes += 8;
            p += 8;
            size -= 8;
            continue;
        }
        h->word |= (uint64_t)p[0] << (8 * filled);
        h->bytes++;
        p++;
        size--;
        if (filled == 7) {
            h->state = qlora__hash_mix(h->state, h->word);
            h->word = 0;
        }
    }
}

static QLORA__UNUSED uint64_t qlora__hash_end(const qlora__hash* h) {
    return qlora__hash_mix(qlora__hash_mix(h->state, h->word), h->bytes);
}

// FNV-1a, for short keys.
static QLORA__UNUSED uint64_t qlora__fnv(const void* data, size_t bytes, uint64_t seed) {
    const uint8_t* p = (const uint8_t*)data;
    uint64_t h = seed ^ 0xcbf29ce484222325ull;
    for (size_t i = 0; i < bytes; i++) {
        h = (h ^ p[i]) * 0x100000001b3ull;
    }
    return h;
}

#endif // QLORA__PART_TOOLS

//@@ src/core/base.h

// The context: its fields, entering and leaving public calls, host memory and scratch memory.

// The type of CPU arithmetic and of the elements of f32 tensors on the CPU. Tests compile it as
// double to check gradients by finite differences; everything else uses float.
#ifndef QLORA__REAL
#define QLORA__REAL float
#endif

#define QLORA__MAX_THREADS 64
#define QLORA__MAX_DEPTH 16

typedef struct qlora__pool qlora__pool;
typedef struct qlora__gpu qlora__gpu;         // driver/driver.h
typedef struct qlora__capture qlora__capture; // below
typedef struct qlora__watch qlora__watch;     // tensor/capture.h

// Memory that the context owns: device memory on CUDA, host memory on the CPU.
typedef struct qlora__buffer {
    void* data;
    size_t bytes;
    uint64_t id;
    struct qlora__buffer* next;
} qlora__buffer;

// Objects that must be destroyed before their context.
typedef enum qlora__kind {
    QLORA__TENSORS,
    QLORA__CLIPS,
    QLORA__GRAPHS,
    QLORA__MODELS,
    QLORA__TRAINERS,
    QLORA__GENERATIONS,
    QLORA__KINDS
} qlora__kind;

struct qlora_ctx {
    qlora_ctx_desc desc; // defaults resolved
    qlora_backend backend;
    qlora__env env; // hooks as in desc, error text
    char reason[QLORA__ERROR_SIZE];
    char dead[QLORA__ERROR_SIZE];           // why the device is unusable; "" while it works
    int depth;                              // of nested public calls
    bool not_current;                       // a destroying call runs although the device is lost
    size_t scratch_marks[QLORA__MAX_DEPTH]; // scratch in use when each call began
    int64_t living[QLORA__KINDS];           // existing objects, by kind
    uint64_t device_bytes;
    uint64_t device_peak;
    uint64_t device_allocations;
    uint64_t next_buffer_id;
    qlora__buffer* buffers;
    qlora__buffer* scratch;
    size_t scratch_used;
    qlora__pool* pool;
    qlora__watch* watches;   // one for each graph
    qlora__capture* capture; // not NULL while a graph is being captured
    qlora_path last_path;
    qlora__gpu* gpu; // NULL on the CPU
    qlora_result (*activate)(qlora_ctx* ctx);
    void (*deactivate)(qlora_ctx* ctx);
};

// The buffers that a capture uses, and the first call that invalidated it.
struct qlora__capture {
    uint64_t* ids;
    size_t count;
    size_t capacity;
    char broke[QLORA__ERROR_SIZE];
};

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

// Sets the text of qlora_last_error, prefixed with the name of the public call, and returns the
// result.
QLORA__PRINTF(3, 4)
static qlora_result qlora__fail(qlora_ctx* ctx, qlora_result result, const char* format, ...) {
    va_list args;
    va_start(args, format);
    qlora__env_vfail(&ctx->env, format, args);
    va_end(args);
    return result;
}

#define QLORA__LOG(ctx, level, item, ...)                                                          \
    qlora__env_log(&(ctx)->env, QLORA_LOG_##level, QLORA_LOG_ITEM_##item, "qlora.h", __LINE__,     \
                   __VA_ARGS__)

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
    return ctx != NULL ? ctx->env.error : "no context (NULL)";
}

static bool qlora__on_cpu(const qlora_ctx* ctx) {
    return ctx->backend != QLORA_BACKEND_CUDA;
}

// Every public call starts here. Calls nest, so that operators can call operators.
static qlora_result qlora__enter(qlora_ctx* ctx, const char* call) {
    if (ctx == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    if (ctx->depth == 0) {
        ctx->env.call = call;
        ctx->env.error[0] = '\0';
        if (ctx->dead[0] != '\0') {
            return qlora__fail(ctx, QLORA_ERR_DEVICE_LOST,
                               "the device was lost in an earlier call (%s); this context can only "
                               "be destroyed",
                               ctx->dead);
        }
        if (ctx->activate != NULL) {
            QLORA__TRY(ctx->activate(ctx));
        }
    }
    QLORA_ASSERT(ctx->depth < QLORA__MAX_DEPTH);
    ctx->scratch_marks[ctx->depth++] = ctx->scratch_used;
    return QLORA_OK;
}

// Releases the scratch memory of the call; the next call on the stream may reuse it.
static qlora_result qlora__leave(qlora_ctx* ctx, qlora_result result) {
    ctx->scratch_used = ctx->scratch_marks[--ctx->depth];
    if (ctx->depth == 0 && ctx->deactivate != NULL && !ctx->not_current) {
        ctx->deactivate(ctx);
    }
    ctx->not_current = ctx->depth > 0 && ctx->not_current;
    return result;
}

// Host memory, allocated through the environment of the context.
static void* qlora__alloc(qlora_ctx* ctx, size_t bytes) {
    return qlora__env_alloc(&ctx->env, bytes);
}

static void* qlora__alloc_zero(qlora_ctx* ctx, size_t bytes) {
    return qlora__env_alloc_zero(&ctx->env, bytes);
}

// `bytes` is the size that was passed to qlora__alloc; the pointer may be NULL.
static void qlora__free(qlora_ctx* ctx, void* pointer, size_t bytes) {
    qlora__env_free(&ctx->env, pointer, bytes);
}

// Takes a 256-byte aligned block of scratch memory, which is released when the public call ends.
static QLORA__UNUSED qlora_result qlora__scratch(qlora_ctx* ctx, size_t bytes, void** out) {
    size_t end = 0;
    if (!qlora__add(ctx->scratch_used, qlora__align_up(bytes, 256), &end) ||
        bytes > SIZE_MAX - 256 || end > ctx->scratch->bytes) {
        return qlora__fail(ctx, QLORA_ERR_LIMIT,
                           "%llu bytes of scratch needed, but only %llu of %llu are free; increase "
                           "desc.scratch_bytes",
                           (unsigned long long)bytes,
                           (unsigned long long)(ctx->scratch->bytes - ctx->scratch_used),
                           (unsigned long long)ctx->scratch->bytes);
    }
    *out = (char*)ctx->scratch->data + ctx->scratch_used;
    ctx->scratch_used = end;
    return QLORA_OK;
}

//@@ src/core/scope.h

// Scratch memory by marks, calls that destroy objects, and captures.

// ---- scratch memory by marks --------------------------------------------------------------------

// Work on one stream runs in order, so scratch memory can be reused as soon as the call that uses
// it has been queued: mark, take, queue, release.
static QLORA__UNUSED size_t qlora__scratch_mark(const qlora_ctx* ctx) {
    return ctx->scratch_used;
}

static QLORA__UNUSED void qlora__scratch_release(qlora_ctx* ctx, size_t mark) {
    ctx->scratch_used = mark;
}

static QLORA__UNUSED size_t qlora__scratch_free(const qlora_ctx* ctx) {
    return ctx->scratch->bytes - ctx->scratch_used;
}

// ---- calls that destroy -------------------------------------------------------------------------

// Objects on a lost device can still be destroyed: their memory disappears with the CUDA context.
// If a working device cannot be made current, nothing is destroyed and the caller may try again.
static qlora_result qlora__enter_destroy(qlora_ctx* ctx, const char* call) {
    if (ctx == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    if (ctx->depth == 0) {
        ctx->env.call = call;
        ctx->env.error[0] = '\0';
        qlora_result r = ctx->activate != NULL ? ctx->activate(ctx) : QLORA_OK;
        if (r != QLORA_OK && ctx->dead[0] == '\0') {
            return r;
        }
        ctx->not_current = r != QLORA_OK;
        ctx->env.error[0] = '\0';
    }
    ctx->scratch_marks[ctx->depth++] = ctx->scratch_used;
    return QLORA_OK;
}

// ---- captures -----------------------------------------------------------------------------------

// Records the first thing that invalidated the capture in progress. Does nothing without a capture.
static void qlora__capture_broke(qlora_ctx* ctx, const char* what, const char* why) {
    qlora__capture* capture = ctx->capture;
    if (capture != NULL && capture->broke[0] == '\0') {
        snprintf(capture->broke, sizeof capture->broke, "%s%s", what, why);
    }
}

// Rejects an operation that cannot be captured. The capture then fails with an error that names it.
static qlora_result qlora__not_in_capture(qlora_ctx* ctx, const char* what) {
    if (ctx->capture == NULL) {
        return QLORA_OK;
    }
    qlora__capture_broke(ctx, what, "");
    return qlora__fail(ctx, QLORA_ERR_CAPTURE,
                       "%s cannot be part of a graph; do it before the capture", what);
}

//@@ src/core/threads.h

// ---- CPU threads --------------------------------------------------------------------------------

typedef void (*qlora__range_fn)(void* user, int64_t begin, int64_t end);

struct qlora__pool {
    qlora__mutex mutex;
    qlora__cond wake; // a job was posted, or quit
    qlora__cond idle; // the last busy thread ran out of work
    qlora__range_fn fn;
    void* user;
    int64_t count;
    int64_t grain;
    int64_t next; // first item not yet taken
    uint64_t job;
    int busy;
    bool quit;
    int workers;
    qlora__thread threads[QLORA__MAX_THREADS];
};

// Processes ranges until none is left. Called with the mutex held.
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

// Starts threads - 1 workers; the calling thread is the last one. If a thread cannot be started,
// the pool runs with fewer.
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
        return qlora__fail(ctx, QLORA_ERR_MEMORY, "cannot create a lock for the CPU threads");
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

// Calls fn(user, begin, end) over [0, count), at most `grain` items at a time. Every output must
// have one writer, so that results do not depend on which thread ran which range.
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

//@@ src/core/random.h

// ---- random numbers -----------------------------------------------------------------------------

// Philox 4x32 with 10 rounds: four random words that depend only on the counter and the key, so
// that any part of a stream can be recomputed, in any order, on the CPU and on the GPU.
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

//@@ src/numbers/floats.h

// ---- floats -------------------------------------------------------------------------------------

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

// Tests the bits, because compilers fold isfinite() away with -ffast-math.
static QLORA__UNUSED bool qlora__finite(float x) {
    return (qlora__bits(x) & 0x7f800000u) != 0x7f800000u;
}

// Rounds to nearest even; a NaN stays a NaN.
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
    if (a >= 0x47800000u) { // 65536 or more
        return (uint16_t)(sign | 0x7c00u);
    }
    if (a < 0x38800000u) { // below the smallest normal: let float addition do the rounding
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
        float subnormal = (float)mantissa * (1.0f / 16777216.0f);
        return sign != 0 ? -subnormal : subnormal;
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

// Element access on the CPU for every dtype.
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

// exp, log, sqrt and fabs in the precision of QLORA__REAL.
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

//@@ src/numbers/nf4.h

// ---- NF4 ----------------------------------------------------------------------------------------

// 4-bit NormalFloat with block-wise scales, byte-identical to the storage of bitsandbytes. Element
// e of a matrix without gaps belongs to block e / block; a block may span rows, and the last block
// may be shorter.
//   absmax[b] = max |w| of the block
//   code[e]   = number of thresholds below w[e] * inv, inv = 1 / max(absmax[b], 1e-38)
//   value[e]  = level[code[e]] * absmax[b], in f32, then rounded to the requested type
// Byte i stores element 2i in its high half and 2i + 1 in its low half; after an odd count the last
// half is 7, the code of zero. Double quantisation stores one byte per block instead of absmax, in
// groups:
//   offset    = f32(sum of absmax) * f32(1 / blocks)
//   scale[g]  = max(max |absmax - offset|, 1e-38)
//   q[b]      = entry of a map of 256 that is nearest to (absmax[b] - offset) * (1 / scale[g])
//   absmax[b] = map[q[b]] * scale[g] + offset, each operation rounded
// Every operation is a single f32 one, so CPU and GPU agree in every bit. bitsandbytes' own CUDA
// kernels use an approximate reciprocal and may differ by one code at a threshold, and store 0
// instead of 7 for a block of zeros.

#define QLORA__NF4_SMALLEST 1e-38f
#define QLORA__NF4_MAPS 272 // 16 levels, followed by the map of the scales

static const float qlora__nf4_levels[16] = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};

static const float qlora__nf4_thresholds[15] = {
    -0.8480963706970215f,  -0.6106328964233398f,  -0.4599952697753906f,   -0.33967941999435425f,
    -0.23460739850997925f, -0.13791173696517944f, -0.045525018125772476f, 0.03979014977812767f,
    0.120255246758461f,    0.2035212516784668f,   0.2920137643814087f,    0.3893125355243683f,
    0.5016634464263916f,   0.6427869200706482f,   0.8614784479141235f,
};

// The 16 levels and the signed dynamic map: for i = 0 ... 6 the midpoints between 2^i + 1 points
// spread evenly over [0.1, 1], times 10^(i-6), with both signs; 0; and 1. The points are computed
// as in torch's linspace (from both ends, one multiply-add each), because files contain exactly
// those bits; a map in a file replaces this one.
static void qlora__nf4_default_maps(float* maps) {
    static const float powers[7] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1.0f};
    memcpy(maps, qlora__nf4_levels, sizeof qlora__nf4_levels);
    float* middle = maps + 16 + 127; // the entry for zero
    middle[0] = 0.0f;
    middle[128] = 1.0f;
    int at = 0;
    for (int i = 0; i < 7; i++) {
        int points = (1 << i) + 1;
        float step = (1.0f - 0.1f) / (float)(points - 1);
        float before = 0.1f;
        for (int j = 1; j < points; j++) {
            // In double, the product and the sum are exact, so this rounds once.
            float here = j < points / 2 ? (float)((double)0.1f + (double)step * (double)j)
                                        : (float)(1.0 - (double)step * (double)(points - 1 - j));
            float value = (before + here) / 2.0f * powers[i];
            at++;
            middle[at] = value;
            middle[-at] = -value;
            before = here;
        }
    }
}

static uint32_t qlora__nf4_code(float x) {
    uint32_t code = 0;
    for (int i = 0; i < 15; i++) {
        code += x > qlora__nf4_thresholds[i] ? 1u : 0u;
    }
    return code;
}

// Quantises blocks [first, last) of n elements.
static void qlora__nf4_quantise_blocks(const void* w, qlora_dtype dtype, int64_t n, int64_t block,
                                       uint8_t* codes, float* absmax, int64_t first, int64_t last) {
    for (int64_t b = first; b < last; b++) {
        int64_t begin = b * block;
        int64_t end = qlora__min(n, begin + block);
        float most = 0.0f;
        for (int64_t e = begin; e < end; e++) {
            float x = fabsf((float)qlora__load(w, dtype, e));
            most = x > most ? x : most;
        }
        float inv = 1.0f / (most > QLORA__NF4_SMALLEST ? most : QLORA__NF4_SMALLEST);
        for (int64_t e = begin; e < end; e += 2) {
            uint32_t high = qlora__nf4_code((float)qlora__load(w, dtype, e) * inv);
            uint32_t low = 7;
            if (e + 1 < end) {
                low = qlora__nf4_code((float)qlora__load(w, dtype, e + 1) * inv);
            }
            codes[e / 2] = (uint8_t)(high << 4 | low);
        }
        absmax[b] = most;
    }
}

// 1024 sums in f64, in the same order as the kernel's threads, folded in halves.
static float qlora__nf4_offset(const float* absmax, int64_t blocks) {
    double sums[1024];
    memset(sums, 0, sizeof sums);
    for (int64_t b = 0; b < blocks; b++) {
        sums[b % 1024] += (double)absmax[b];
    }
    for (int half = 512; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) {
            sums[i] += sums[i + half];
        }
    }
    return blocks > 0 ? (float)sums[0] * (1.0f / (float)blocks) : 0.0f;
}

// Bisection from the middle, then the nearer of the last entry and its neighbour on the side of x.
// If both are equally near, the last entry of the bisection is used.
static int qlora__nf4_nearest(const float* map, float x) {
    int at = 127;
    int below = 0;
    int above = 255;
    for (int step = 64; step > 0; step /= 2) {
        if (x > map[at]) {
            below = at;
            at += step;
        } else {
            above = at;
            at -= step;
        }
    }
    if (x > map[at]) {
        return x > (map[above] + map[at]) * 0.5f ? above : at;
    }
    return x < (map[below] + map[at]) * 0.5f ? below : at;
}

static void qlora__nf4_quantise_scales(const float* absmax, int64_t blocks, int64_t group,
                                       float offset, const float* map, uint8_t* q, float* scales) {
    for (int64_t begin = 0; begin < blocks; begin += group) {
        int64_t end = qlora__min(blocks, begin + group);
        float most = QLORA__NF4_SMALLEST;
        for (int64_t b = begin; b < end; b++) {
            float x = fabsf(absmax[b] - offset);
            most = x > most ? x : most;
        }
        float inv = 1.0f / most;
        for (int64_t b = begin; b < end; b++) {
            q[b] = (uint8_t)qlora__nf4_nearest(map, (absmax[b] - offset) * inv);
        }
        scales[begin / group] = most;
    }
}

// The scale of block b. volatile prevents the compiler from fusing the product and the sum.
static float qlora__nf4_absmax(const qlora_nf4* w, int64_t b) {
    if (w->absmax != NULL) {
        return w->absmax[b];
    }
    volatile float product = w->maps[16 + w->absmax_codes[b]] * w->absmax_scales[b / w->block2];
    return product + w->offset[0];
}

static uint32_t qlora__nf4_code_at(const uint8_t* codes, int64_t e) {
    uint32_t byte = codes[e / 2];
    return e % 2 != 0 ? byte & 15u : byte >> 4;
}

//@@ src/qlora.h

#ifndef QLORA_NO_MODEL

//@@ src/formats/json_read.h

#ifndef QLORA__PART_JSON_READ
#define QLORA__PART_JSON_READ

// Every reader of this floor processes untrusted bytes. It either returns a value that obeys all
// rules of its format, or fails with an error text that names the file and the fault; it never
// reads outside the bytes that were passed to it. Nothing here depends on devices.

// ---- numbers in text, independent of the C locale -----------------------------------------------

// A natural number of up to 5120 bits: enough to compare 801 digits times a power of ten with the
// neighbourhood of any double.
#define QLORA__BIG_WORDS 160
typedef struct qlora__big {
    uint32_t word[QLORA__BIG_WORDS];
    uint32_t count;
} qlora__big;

static QLORA__UNUSED void qlora__big_mul_add(qlora__big* b, uint32_t factor, uint32_t carry_in) {
    uint64_t carry = carry_in;
    for (uint32_t i = 0; i < b->count; i++) {
        carry += (uint64_t)b->word[i] * factor;
        b->word[i] = (uint32_t)carry;
        carry >>= 32;
    }
    if (carry != 0 && b->count < QLORA__BIG_WORDS) {
        b->word[b->count] = (uint32_t)carry;
        b->count++;
    }
}

static QLORA__UNUSED void qlora__big_shift(qlora__big* b, int bits) {
    for (; bits >= 31; bits -= 31) {
        qlora__big_mul_add(b, 1u << 31, 0);
    }
    qlora__big_mul_add(b, 1u << bits, 0);
}

static QLORA__UNUSED void qlora__big_mul_pow10(qlora__big* b, int power) {
    for (; power >= 9; power -= 9) {
        qlora__big_mul_add(b, 1000000000u, 0);
    }
    for (; power > 0; power--) {
        qlora__big_mul_add(b, 10u, 0);
    }
}

static QLORA__UNUSED int qlora__big_compare(const qlora__big* a, const qlora__big* b) {
    if (a->count != b->count) {
        return a->count < b->count ? -1 : 1;
    }
    for (uint32_t i = a->count; i > 0; i--) {
        if (a->word[i - 1] != b->word[i - 1]) {
            return a->word[i - 1] < b->word[i - 1] ? -1 : 1;
        }
    }
    return 0;
}

// A decimal number without a sign: digits x 10^exponent, with no leading zero. Digits after the
// 800th matter only in that they make the number a little larger: a single further digit 1
// represents them.
#define QLORA__DECIMAL_DIGITS 800
typedef struct qlora__decimal {
    uint8_t digit[QLORA__DECIMAL_DIGITS + 1];
    int count;
    int exponent;
} qlora__decimal;

// The sign of decimal - n x 2^power.
static QLORA__UNUSED int qlora__decimal_compare(const qlora__decimal* d, uint64_t n, int power) {
    qlora__big left;
    qlora__big right;
    left.count = 0;
    for (int i = 0; i < d->count; i++) {
        qlora__big_mul_add(&left, 10u, d->digit[i]);
    }
    right.word[0] = (uint32_t)n;
    right.word[1] = (uint32_t)(n >> 32);
    right.count = right.word[1] != 0 ? 2 : 1;
    qlora__big_mul_pow10(d->exponent > 0 ? &left : &right, abs(d->exponent));
    qlora__big_shift(power > 0 ? &right : &left, abs(power));
    return qlora__big_compare(&left, &right);
}

// The double nearest to d, with ties to even: an estimate that is good to a few units, followed by
// exact comparisons with the midpoints to its neighbours. Infinity if d is out of range.
static QLORA__UNUSED double qlora__decimal_to_double(const qlora__decimal* d) {
    static const double pow10[23] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,
                                     1e8,  1e9,  1e10, 1e11, 1e12, 1e13, 1e14, 1e15,
                                     1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
    uint64_t bits = 0;
    double x = 0.0;
    int magnitude = d->count + d->exponent;
    if (d->count == 0 || magnitude < -330) {
        return 0.0;
    }
    if (magnitude > 310) {
        bits = 0x7FF0000000000000u;
        memcpy(&x, &bits, sizeof x);
        return x;
    }
    uint64_t lead = 0;
    int used = 0;
    for (; used < d->count && used < 18; used++) {
        lead = lead * 10 + d->digit[used];
    }
    int scale = d->exponent + d->count - used;
    x = (double)lead;
    for (; scale > 0; scale -= scale < 22 ? scale : 22) {
        x *= pow10[scale < 22 ? scale : 22];
    }
    for (; scale < 0; scale += -scale < 22 ? -scale : 22) {
        x /= pow10[-scale < 22 ? -scale : 22];
    }
    memcpy(&bits, &x, sizeof bits);
    if (bits >= 0x7FF0000000000000u) {
        bits = 0x7FEFFFFFFFFFFFFFu;
    }
    while (bits < 0x7FF0000000000000u) {
        uint64_t mantissa = bits & 0xFFFFFFFFFFFFFu;
        int exponent = (int)(bits >> 52);
        int power = (exponent == 0 ? 1 : exponent) - 1075;
        mantissa |= exponent == 0 ? 0 : (uint64_t)1 << 52;
        int above = qlora__decimal_compare(d, 2 * mantissa + 1, power - 1);
        if (above > 0 || (above == 0 && (mantissa & 1) != 0)) {
            bits++;
            continue;
        }
        if (bits == 0) {
            break;
        }
        // Just below a power of two, the neighbour is only half a step away.
        bool edge = (bits & 0xFFFFFFFFFFFFFu) == 0 && exponent > 1;
        int below = edge ? qlora__decimal_compare(d, 4 * mantissa - 1, power - 2)
                         : qlora__decimal_compare(d, 2 * mantissa - 1, power - 1);
        if (below < 0 || (below == 0 && (mantissa & 1) != 0)) {
            bits--;
            continue;
        }
        break;
    }
    memcpy(&x, &bits, sizeof x);
    return x;
}

// Converts a number in JSON syntax (already checked) to the nearest double.
static QLORA__UNUSED double qlora__number_parse(const char* text, size_t size) {
    qlora__decimal d;
    size_t i = 0;
    bool negative = size > 0 && text[0] == '-';
    bool fraction = false;
    bool more = false;
    d.count = 0;
    d.exponent = 0;
    for (i = negative ? 1 : 0; i < size && text[i] != 'e' && text[i] != 'E'; i++) {
        if (text[i] == '.') {
            fraction = true;
            continue;
        }
        // An exponent of a million is as good as any larger one, and cannot overflow.
        if (d.count == QLORA__DECIMAL_DIGITS) {
            more = more || text[i] != '0';
            d.exponent += fraction || d.exponent > 1000000 ? 0 : 1;
            continue;
        }
        if (d.count > 0 || text[i] != '0') {
            d.digit[d.count] = (uint8_t)(text[i] - '0');
            d.count++;
        }
        d.exponent -= fraction && d.exponent > -1000000 ? 1 : 0;
    }
    if (more) {
        d.digit[d.count] = 1;
        d.count++;
        d.exponent--;
    }
    if (i < size) {
        bool minus = text[i + 1] == '-';
        int power = 0;
        for (i += minus || text[i + 1] == '+' ? 2 : 1; i < size; i++) {
            power = power > 1000000 ? power : power * 10 + (text[i] - '0');
        }
        d.exponent += minus ? -power : power;
    }
    double x = qlora__decimal_to_double(&d);
    return negative ? -x : x;
}

// ---- reading JSON -------------------------------------------------------------------------------

// A parsed text is a flat array of tokens in the order of the text. The members of an object are
// pairs: a string token followed by the tokens of the value. `next` skips a value with everything
// inside it, so walking one level needs no stack. Token 0 is the root and cannot be a member, so 0
// also means "not found".
typedef enum qlora__json_kind {
    QLORA__JSON_NULL,
    QLORA__JSON_FALSE,
    QLORA__JSON_TRUE,
    QLORA__JSON_NUMBER,
    QLORA__JSON_STRING,
    QLORA__JSON_ARRAY,
    QLORA__JSON_OBJECT
} qlora__json_kind;

#define QLORA__JSON_MAX_DEPTH 256
#define QLORA__JSON_MAX_BYTES 0x7FFFFFFFu
#define QLORA__JSON_ROOT 0xFFFFFFFFu
#define QLORA__JSON_UNIQUE 1u // flag: duplicate keys in an object are an error

typedef struct qlora__json_token {
    qlora__json_kind kind;
    uint32_t begin; // first byte; of a string, the byte after the opening quote
    uint32_t end;   // one past the last byte; of a string, the closing quote
    uint32_t next;  // token after this value and everything inside it
    uint32_t count; // members, elements, or escapes in a string
} qlora__json_token;

typedef struct qlora__json {
    const char* text; // owned by the caller; must outlive the tokens
    const char* label;
    const char* strings; // what string tokens point into: the text, or `decoded`
    uint32_t size;
    uint32_t count;
    uint32_t capacity;
    uint32_t line; // lines of the file before the text, for messages
    qlora__json_token* tokens;
    char* decoded;
    size_t decoded_capacity;
} qlora__json;

typedef struct qlora__json_parser {
    qlora__env* env;
    qlora__json* json;
    uint32_t at;
    uint32_t parent; // the innermost open container, whose `next` holds its own parent
    uint32_t depth;
} qlora__json_parser;

static QLORA__UNUSED void qlora__json_free(qlora__env* env, qlora__json* json) {
    qlora__env_free(env, json->tokens, json->capacity * sizeof *json->tokens);
    qlora__env_free(env, json->decoded, json->decoded_capacity);
    memset(json, 0, sizeof *json);
}

static QLORA__UNUSED qlora_result qlora__json_bad(const qlora__json_parser* p, const char* what) {
    unsigned line = p->json->line + 1;
    unsigned column = 1;
    for (uint32_t i = 0; i < p->at && i < p->json->size; i++) {
        column++;
        if (p->json->text[i] == '\n') {
            line++;
            column = 1;
        }
    }
    return qlora__env_fail(p->env, QLORA_ERR_FORMAT, "%s:%u:%u: invalid JSON: %s", p->json->label,
                           line, column, what);
}

// The value of four hexadecimal digits, or 0x10000 if they are not valid.
static QLORA__UNUSED uint32_t qlora__hex4(const char* text, uint32_t left) {
    uint32_t value = 0;
    if (left < 4) {
        return 0x10000u;
    }
    for (int i = 0; i < 4; i++) {
        char c = text[i];
        uint32_t digit = c >= '0' && c <= '9'   ? (uint32_t)(c - '0')
                         : c >= 'a' && c <= 'f' ? (uint32_t)(c - 'a') + 10
                         : c >= 'A' && c <= 'F' ? (uint32_t)(c - 'A') + 10
                                                : 16u;
        if (digit == 16u) {
            return 0x10000u;
        }
        value = value * 16 + digit;
    }
    return value;
}

static QLORA__UNUSED qlora_result qlora__json_push(qlora__json_parser* p, qlora__json_kind kind,
                                                   uint32_t begin, uint32_t end) {
    qlora__json* json = p->json;
    if (json->count == json->capacity) {
        uint32_t capacity = json->capacity == 0 ? 64 : json->capacity * 2;
        size_t bytes = 0;
        if (capacity < json->capacity || !qlora__mul(capacity, sizeof *json->tokens, &bytes)) {
            return qlora__json_bad(p, "too many values");
        }
        qlora__json_token* tokens = (qlora__json_token*)qlora__env_realloc(
            p->env, json->tokens, json->count * sizeof *tokens, json->capacity * sizeof *tokens,
            bytes);
        if (tokens == NULL) {
            return QLORA_ERR_MEMORY;
        }
        json->tokens = tokens;
        json->capacity = capacity;
    }
    qlora__json_token* t = &json->tokens[json->count];
    json->count++;
    t->kind = kind;
    t->begin = begin;
    t->end = end;
    t->next = json->count;
    t->count = 0;
    return QLORA_OK;
}

// Parses an escape; p->at is on the backslash.
static QLORA__UNUSED qlora_result qlora__json_escape(qlora__json_parser* p) {
    const char* text = p->json->text;
    uint32_t left = p->json->size - p->at;
    if (left < 2 || text[p->at + 1] == '\0' || strchr("\"\\/bfnrtu", text[p->at + 1]) == NULL) {
        return qlora__json_bad(p, "invalid escape in a string");
    }
    if (text[p->at + 1] != 'u') {
        p->at += 2;
        return QLORA_OK;
    }
    uint32_t code = qlora__hex4(text + p->at + 2, left - 2);
    if (code > 0xFFFF) {
        return qlora__json_bad(p, "\\u needs four hexadecimal digits");
    }
    if ((code & 0xFC00) == 0xD800 && left >= 12 && text[p->at + 6] == '\\' &&
        text[p->at + 7] == 'u' && (qlora__hex4(text + p->at + 8, left - 8) & 0x1FC00) == 0xDC00) {
        p->at += 12;
        return QLORA_OK;
    }
    if ((code & 0xF800) == 0xD800) {
        return qlora__json_bad(p, "unpaired surrogate in a string");
    }
    p->at += 6;
    return QLORA_OK;
}

// Parses a string; p->at is on the opening quote.
static QLORA__UNUSED qlora_result qlora__json_string_parse(qlora__json_parser* p) {
    const char* text = p->json->text;
    uint32_t size = p->json->size;
    uint32_t begin = p->at + 1;
    uint32_t escapes = 0;
    p->at = begin;
    for (;;) {
        // most bytes of most files: printable ASCII
        uint32_t at = p->at;
        while (at < size && (uint8_t)(text[at] - 0x20) < 0x60 && text[at] != '"' &&
               text[at] != '\\') {
            at++;
        }
        p->at = at;
        if (at >= size || text[at] == '"') {
            break;
        }
        uint8_t c = (uint8_t)text[at];
        if (c == '\\') {
            QLORA__TRY(qlora__json_escape(p));
            escapes++;
        } else if (c < 0x20) {
            return qlora__json_bad(p, "control character in a string");
        } else {
            uint32_t step = qlora__utf8_size(text + at, size - at);
            if (step == 0) {
                return qlora__json_bad(p, "invalid UTF-8 in a string");
            }
            p->at += step;
        }
    }
    if (p->at >= size) {
        return qlora__json_bad(p, "string without a closing quote");
    }
    QLORA__TRY(qlora__json_push(p, QLORA__JSON_STRING, begin, p->at));
    p->json->tokens[p->json->count - 1].count = escapes;
    p->at++;
    return QLORA_OK;
}

static QLORA__UNUSED uint32_t qlora__json_digits(const qlora__json_parser* p, uint32_t at) {
    while (at < p->json->size && p->json->text[at] >= '0' && p->json->text[at] <= '9') {
        at++;
    }
    return at;
}

static QLORA__UNUSED qlora_result qlora__json_number_parse(qlora__json_parser* p) {
    const char* text = p->json->text;
    uint32_t size = p->json->size;
    uint32_t begin = p->at;
    uint32_t at = begin + (text[begin] == '-' ? 1 : 0);
    uint32_t end = qlora__json_digits(p, at);
    if (end == at) {
        return qlora__json_bad(p, "expected a value");
    }
    if (text[at] == '0' && end > at + 1) {
        return qlora__json_bad(p, "number with a leading zero");
    }
    if (end < size && text[end] == '.') {
        at = end + 1;
        end = qlora__json_digits(p, at);
        if (end == at) {
            return qlora__json_bad(p, "number without digits after the decimal point");
        }
    }
    if (end < size && (text[end] == 'e' || text[end] == 'E')) {
        at = end + 1;
        at += at < size && (text[at] == '+' || text[at] == '-') ? 1 : 0;
        end = qlora__json_digits(p, at);
        if (end == at) {
            return qlora__json_bad(p, "number without digits in the exponent");
        }
    }
    p->at = end;
    return qlora__json_push(p, QLORA__JSON_NUMBER, begin, end);
}

// Parses a value that is complete in itself, or the start of a container.
static QLORA__UNUSED qlora_result qlora__json_value(qlora__json_parser* p) {
    static const struct {
        const char* word;
        qlora__json_kind kind;
    } words[3] = {
        {"null", QLORA__JSON_NULL}, {"false", QLORA__JSON_FALSE}, {"true", QLORA__JSON_TRUE}};
    const char* text = p->json->text;
    char c = text[p->at];
    if (c == '"') {
        return qlora__json_string_parse(p);
    }
    if (c == '{' || c == '[') {
        if (p->depth == QLORA__JSON_MAX_DEPTH) {
            return qlora__json_bad(p, "nested too deeply; the limit is 256 levels");
        }
        QLORA__TRY(
            qlora__json_push(p, c == '{' ? QLORA__JSON_OBJECT : QLORA__JSON_ARRAY, p->at, p->at));
        p->json->tokens[p->json->count - 1].next = p->parent;
        p->parent = p->json->count - 1;
        p->depth++;
        p->at++;
        return QLORA_OK;
    }
    for (int i = 0; i < 3; i++) {
        uint32_t length = (uint32_t)strlen(words[i].word);
        if (c == words[i].word[0] && p->json->size - p->at >= length &&
            memcmp(text + p->at, words[i].word, length) == 0) {
            p->at += length;
            return qlora__json_push(p, words[i].kind, p->at - length, p->at);
        }
    }
    return qlora__json_number_parse(p);
}

static QLORA__UNUSED void qlora__json_space(qlora__json_parser* p) {
    const char* text = p->json->text;
    while (p->at < p->json->size && (text[p->at] == ' ' || text[p->at] == '\t' ||
                                     text[p->at] == '\n' || text[p->at] == '\r')) {
        p->at++;
    }
}

// Parses the key of a member and its colon; p->at is on the key.
static QLORA__UNUSED qlora_result qlora__json_key(qlora__json_parser* p) {
    if (p->at >= p->json->size || p->json->text[p->at] != '"') {
        return qlora__json_bad(p, "expected a key in quotes");
    }
    QLORA__TRY(qlora__json_string_parse(p));
    qlora__json_space(p);
    if (p->at >= p->json->size || p->json->text[p->at] != ':') {
        return qlora__json_bad(p, "expected ':' after a key");
    }
    p->at++;
    qlora__json_space(p);
    return QLORA_OK;
}

// After a value: closes containers and skips one comma. Sets *done once the root is complete.
static QLORA__UNUSED qlora_result qlora__json_after(qlora__json_parser* p, bool* done) {
    for (;;) {
        if (p->parent == QLORA__JSON_ROOT) {
            *done = true;
            return QLORA_OK;
        }
        qlora__json_token* open = &p->json->tokens[p->parent];
        bool object = open->kind == QLORA__JSON_OBJECT;
        qlora__json_space(p);
        char c = p->at < p->json->size ? p->json->text[p->at] : '\0';
        if (c != ',' && c != (object ? '}' : ']')) {
            return qlora__json_bad(p, object ? "expected ',' or '}'" : "expected ',' or ']'");
        }
        open->count += p->json->count > p->parent + 1 ? 1 : 0;
        p->at++;
        if (c == ',') {
            qlora__json_space(p);
            return QLORA_OK;
        }
        p->parent = open->next;
        p->depth--;
        open->end = p->at;
        open->next = p->json->count;
    }
}

// The next code point of a string token, from *at; escapes and UTF-8 were checked by the parser.
static QLORA__UNUSED uint32_t qlora__json_code(const char* text, uint32_t* at) {
    const char* p = text + *at;
    uint8_t c = (uint8_t)p[0];
    if (c != '\\') {
        uint32_t size = c < 0x80 ? 1 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
        uint32_t code = size == 1 ? c : c & (0x7Fu >> size);
        for (uint32_t i = 1; i < size; i++) {
            code = code << 6 | ((uint8_t)p[i] & 0x3Fu);
        }
        *at += size;
        return code;
    }
    if (p[1] != 'u') {
        static const char from[] = "\"\\/bfnrt";
        static const char to[] = "\"\\/\b\f\n\r\t";
        *at += 2;
        return (uint8_t)to[strchr(from, p[1]) - from];
    }
    uint32_t code = qlora__hex4(p + 2, 4);
    *at += 6;
    if ((code & 0xFC00) == 0xD800) {
        code = 0x10000u + ((code & 0x3FF) << 10 | (qlora__hex4(p + 8, 4) & 0x3FF));
        *at += 6;
    }
    return code;
}

static QLORA__UNUSED bool qlora__json_key_less(const void* user, uint32_t a, uint32_t b) {
    const qlora__json* json = (const qlora__json*)user;
    uint32_t i = json->tokens[a].begin;
    uint32_t j = json->tokens[b].begin;
    while (i < json->tokens[a].end && j < json->tokens[b].end) {
        uint32_t x = qlora__json_code(json->text, &i);
        uint32_t y = qlora__json_code(json->text, &j);
        if (x != y) {
            return x < y;
        }
    }
    return i == json->tokens[a].end && j < json->tokens[b].end;
}

// Rejects an object with duplicate keys: sorts the keys of each object and compares neighbours.
static QLORA__UNUSED qlora_result qlora__json_check_unique(qlora__json_parser* p) {
    qlora__json* json = p->json;
    uint32_t largest = 0;
    for (uint32_t i = 0; i < json->count; i++) {
        if (json->tokens[i].kind == QLORA__JSON_OBJECT && json->tokens[i].count > largest) {
            largest = json->tokens[i].count;
        }
    }
    if (largest < 2) {
        return QLORA_OK;
    }
    size_t bytes = largest * sizeof(uint32_t);
    uint32_t* keys = (uint32_t*)qlora__env_alloc(p->env, bytes);
    if (keys == NULL) {
        return QLORA_ERR_MEMORY;
    }
    qlora_result result = QLORA_OK;
    for (uint32_t i = 0; i < json->count && result == QLORA_OK; i++) {
        uint32_t n = json->tokens[i].kind == QLORA__JSON_OBJECT ? json->tokens[i].count : 0;
        uint32_t key = i + 1;
        for (uint32_t k = 0; k < n; k++) {
            keys[k] = key;
            key = json->tokens[key + 1].next;
        }
        qlora__sort(keys, n, qlora__json_key_less, json);
        for (uint32_t k = 1; k < n && result == QLORA_OK; k++) {
            if (!qlora__json_key_less(json, keys[k - 1], keys[k])) {
                const qlora__json_token* t = &json->tokens[keys[k]];
                int shown = t->end - t->begin < 80 ? (int)(t->end - t->begin) : 80;
                result = qlora__env_fail(p->env, QLORA_ERR_FORMAT, "%s: duplicate key \"%.*s\"",
                                         json->label, shown, json->text + t->begin);
            }
        }
    }
    qlora__env_free(p->env, keys, bytes);
    return result;
}

static QLORA__UNUSED qlora_result qlora__json_parse_tokens(qlora__json_parser* p) {
    qlora__json* json = p->json;
    bool done = false;
    qlora__json_space(p);
    while (!done) {
        // A value is expected here, and in an object its key comes first.
        bool object =
            p->parent != QLORA__JSON_ROOT && json->tokens[p->parent].kind == QLORA__JSON_OBJECT;
        if (object) {
            QLORA__TRY(qlora__json_key(p));
        }
        if (p->at >= json->size) {
            return qlora__json_bad(p, "expected a value");
        }
        uint32_t opened = p->parent;
        QLORA__TRY(qlora__json_value(p));
        if (p->parent != opened) {
            qlora__json_space(p);
            char close = json->tokens[p->parent].kind == QLORA__JSON_OBJECT ? '}' : ']';
            if (p->at >= json->size || json->text[p->at] != close) {
                continue;
            }
        }
        QLORA__TRY(qlora__json_after(p, &done));
    }
    return QLORA_OK;
}

static QLORA__UNUSED void qlora__json_begin(qlora__json_parser* p, qlora__env* env,
                                            qlora__json* json) {
    json->strings = json->text;
    json->count = 0;
    p->env = env;
    p->json = json;
    p->at = 0;
    p->parent = QLORA__JSON_ROOT;
    p->depth = 0;
}

// Parses `size` bytes of strict RFC 8259 JSON. `label` names the text in messages; it and the text
// must outlive the tokens. Call qlora__json_free afterwards; after a failure there is nothing to
// free.
static QLORA__UNUSED qlora_result qlora__json_parse(qlora__env* env, const char* label,
                                                    const void* text, uint64_t size, uint32_t flags,
                                                    qlora__json* out) {
    qlora__json json;
    qlora__json_parser p;
    memset(&json, 0, sizeof json);
    if (size > QLORA__JSON_MAX_BYTES) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: JSON texts are limited to 2 GiB", label);
    }
    json.text = (const char*)text;
    json.label = label;
    json.size = (uint32_t)size;
    qlora__json_begin(&p, env, &json);
    qlora_result result = qlora__json_parse_tokens(&p);
    if (result == QLORA_OK) {
        qlora__json_space(&p);
        if (p.at != json.size) {
            result = qlora__json_bad(&p, "unexpected text after the value");
        }
    }
    if (result == QLORA_OK && (flags & QLORA__JSON_UNIQUE) != 0) {
        result = qlora__json_check_unique(&p);
    }
    if (result != QLORA_OK) {
        qlora__json_free(env, &json);
        return result;
    }
    *out = json;
    return QLORA_OK;
}

// Parses the one value at the start of json->text, for files that hold many. The caller sets text,
// label, size and line; the memory of earlier tokens is used again, and must be freed in the end,
// also after a failure. *end is where the value ends. With `alone`, a line end must follow it.
static QLORA__UNUSED qlora_result qlora__json_parse_one(qlora__env* env, qlora__json* json,
                                                        bool alone, uint32_t* end) {
    qlora__json_parser p;
    qlora__json_begin(&p, env, json);
    QLORA__TRY(qlora__json_parse_tokens(&p));
    while (alone && p.at < json->size && json->text[p.at] != '\n') {
        if (json->text[p.at] != ' ' && json->text[p.at] != '\t' && json->text[p.at] != '\r') {
            return qlora__json_bad(&p, "unexpected text after the value");
        }
        p.at++;
    }
    *end = p.at;
    return QLORA_OK;
}

static QLORA__UNUSED qlora__json_kind qlora__json_kind_of(const qlora__json* json, uint32_t token) {
    return json->tokens[token].kind;
}

// Whether the decoded text of a string token equals the given bytes.
static QLORA__UNUSED bool qlora__json_equals(const qlora__json* json, uint32_t token,
                                             const char* text, size_t size) {
    const qlora__json_token* t = &json->tokens[token];
    if (t->kind != QLORA__JSON_STRING) {
        return false;
    }
    if (t->count == 0) {
        return t->end - t->begin == size && memcmp(json->strings + t->begin, text, size) == 0;
    }
    uint32_t at = t->begin;
    size_t i = 0;
    while (at < t->end) {
        uint32_t code = qlora__json_code(json->text, &at);
        uint8_t bytes[4];
        uint32_t n = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
        for (uint32_t k = n; k > 1; k--) {
            bytes[k - 1] = (uint8_t)(0x80 | (code & 0x3F));
            code >>= 6;
        }
        bytes[0] = (uint8_t)(n == 1 ? code : (0xF00u >> n & 0xF0u) | code);
        if (size - i < n || memcmp(text + i, bytes, n) != 0) {
            return false;
        }
        i += n;
    }
    return i == size;
}

// The value of a member, or 0 if `object` is not an object or has no such key. Of equal keys, the
// last one counts, as in Python.
static QLORA__UNUSED uint32_t qlora__json_find(const qlora__json* json, uint32_t object,
                                               const char* key) {
    uint32_t found = 0;
    size_t size = strlen(key);
    if (json->tokens[object].kind != QLORA__JSON_OBJECT) {
        return 0;
    }
    for (uint32_t k = object + 1; k < json->tokens[object].next; k = json->tokens[k + 1].next) {
        if (qlora__json_equals(json, k, key, size)) {
            found = k + 1;
        }
    }
    return found;
}

// qlora__json_find through nested objects; the keys are separated by '/'.
static QLORA__UNUSED uint32_t qlora__json_find_path(const qlora__json* json, uint32_t object,
                                                    const char* path) {
    char key[64];
    for (;;) {
        const char* slash = strchr(path, '/');
        size_t n = slash != NULL ? (size_t)(slash - path) : strlen(path);
        if (n >= sizeof key) {
            return 0;
        }
        memcpy(key, path, n);
        key[n] = '\0';
        object = qlora__json_find(json, object, key);
        if (object == 0 || slash == NULL) {
            return object;
        }
        path = slash + 1;
    }
}

// The element of an array, or 0 if it does not exist.
static QLORA__UNUSED uint32_t qlora__json_at(const qlora__json* json, uint32_t array,
                                             uint32_t index) {
    if (json->tokens[array].kind != QLORA__JSON_ARRAY || index >= json->tokens[array].count) {
        return 0;
    }
    uint32_t element = array + 1;
    for (; index > 0; index--) {
        element = json->tokens[element].next;
    }
    return element;
}

static QLORA__UNUSED bool qlora__json_is(const qlora__json* json, uint32_t token,
                                         const char* text) {
    return qlora__json_equals(json, token, text, strlen(text));
}

// The decoded bytes of a string token: as many as fit, always terminated if size > 0. Returns the
// full length; the string is complete if that is less than `size`. A string may contain NUL bytes.
static QLORA__UNUSED size_t qlora__json_string(const qlora__json* json, uint32_t token, char* out,
                                               size_t size) {
    const qlora__json_token* t = &json->tokens[token];
    uint32_t at = t->begin;
    size_t length = 0;
    if (t->kind != QLORA__JSON_STRING) {
        at = t->end;
    } else if (t->count == 0) {
        length = t->end - t->begin;
        if (size > 0) {
            memcpy(out, json->strings + at, length < size ? length : size - 1);
        }
        at = t->end;
    }
    while (at < t->end) {
        uint32_t code = qlora__json_code(json->text, &at);
        uint32_t n = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
        for (uint32_t k = n; k > 0; k--) {
            uint32_t low =
                k == 1 ? (n == 1 ? code : (0xF00u >> n & 0xF0u) | code) : 0x80u | (code & 0x3F);
            if (length + k < size) {
                out[length + k - 1] = (char)(uint8_t)low;
            }
            code >>= 6;
        }
        length += n;
    }
    if (size > 0) {
        out[length < size ? length : size - 1] = '\0';
    }
    return length;
}

// Decodes every string once, into memory of `json`, each with a zero byte after it. From then on
// string tokens point into json->strings and contain no escapes.
static QLORA__UNUSED qlora_result qlora__json_decode(qlora__env* env, qlora__json* json) {
    size_t need = 0;
    for (uint32_t i = 0; i < json->count; i++) {
        const qlora__json_token* t = &json->tokens[i];
        need += t->kind == QLORA__JSON_STRING ? (size_t)(t->end - t->begin) + 1 : 0;
    }
    if (need > json->decoded_capacity) {
        char* decoded =
            (char*)qlora__env_realloc(env, json->decoded, 0, json->decoded_capacity, need);
        if (decoded == NULL) {
            return QLORA_ERR_MEMORY;
        }
        json->decoded = decoded;
        json->decoded_capacity = need;
    }
    uint32_t at = 0; // below the size of the text: every string had two quotes
    for (uint32_t i = 0; i < json->count; i++) {
        qlora__json_token* t = &json->tokens[i];
        if (t->kind == QLORA__JSON_STRING) {
            size_t size = qlora__json_string(json, i, json->decoded + at, need - at);
            t->begin = at;
            t->end = at + (uint32_t)size;
            t->count = 0;
            at = t->end + 1;
        }
    }
    json->strings = json->decoded;
    return QLORA_OK;
}

// A finite number, converted to the nearest double.
static QLORA__UNUSED bool qlora__json_double(const qlora__json* json, uint32_t token, double* out) {
    const qlora__json_token* t = &json->tokens[token];
    if (t->kind != QLORA__JSON_NUMBER) {
        return false;
    }
    double x = qlora__number_parse(json->text + t->begin, t->end - t->begin);
    uint64_t bits = 0;
    memcpy(&bits, &x, sizeof bits);
    if ((bits >> 52 & 0x7FF) == 0x7FF) {
        return false;
    }
    *out = x;
    return true;
}

// An integer that an int64_t can represent exactly. 4096, 4.096e3 and 4096.0 are all 4096; beyond
// 2^53 only plain digits are accepted.
static QLORA__UNUSED bool qlora__json_int(const qlora__json* json, uint32_t token, int64_t* out) {
    const qlora__json_token* t = &json->tokens[token];
    if (t->kind != QLORA__JSON_NUMBER) {
        return false;
    }
    bool negative = json->text[t->begin] == '-';
    uint64_t value = 0;
    uint64_t limit = (uint64_t)INT64_MAX + (negative ? 1 : 0);
    uint32_t i = t->begin + (negative ? 1 : 0);
    for (; i < t->end && json->text[i] >= '0' && json->text[i] <= '9'; i++) {
        uint64_t digit = (uint64_t)(json->text[i] - '0');
        if (value > (limit - digit) / 10) {
            return false;
        }
        value = value * 10 + digit;
    }
    if (i < t->end) {
        double x = 0.0;
        if (!qlora__json_double(json, token, &x) || x < -9007199254740992.0 ||
            x > 9007199254740992.0 || (double)(int64_t)x != x) {
            return false;
        }
        *out = (int64_t)x;
        return true;
    }
    *out = negative ? (int64_t)(0 - value) : (int64_t)value;
    return true;
}

// An integer written in plain digits, as in file offsets and shapes.
static QLORA__UNUSED bool qlora__json_offset(const qlora__json* json, uint32_t token,
                                             int64_t* out) {
    const qlora__json_token* t = &json->tokens[token];
    for (uint32_t i = t->begin; i < t->end; i++) {
        if (json->text[i] < '0' || json->text[i] > '9') {
            return false;
        }
    }
    return qlora__json_int(json, token, out);
}

#endif // QLORA__PART_JSON_READ

//@@ src/formats/json_write.h

#ifndef QLORA__PART_JSON_WRITE
#define QLORA__PART_JSON_WRITE

// ---- writing JSON -------------------------------------------------------------------------------

// Writes JSON into a string. Keys are written in the order of the calls; `key` is NULL inside
// arrays and for the root. With indent 0, no spaces are written; otherwise each value has its own
// line, as in Python's json.dumps.
typedef struct qlora__json_writer {
    qlora__string* text;
    int indent;
    int depth;
    bool empty; // nothing has been written into the innermost container
} qlora__json_writer;

static QLORA__UNUSED void qlora__json_write_begin(qlora__json_writer* w, qlora__string* text,
                                                  int indent) {
    w->text = text;
    w->indent = indent;
    w->depth = 0;
    w->empty = true;
}

static QLORA__UNUSED void qlora__json_write_line(qlora__json_writer* w) {
    if (w->indent > 0) {
        qlora__string_add(w->text, "\n", 1);
        for (int i = 0; i < w->depth * w->indent; i++) {
            qlora__string_add(w->text, " ", 1);
        }
    }
}

static QLORA__UNUSED void qlora__json_write_quoted(qlora__string* t, const char* string,
                                                   size_t size) {
    static const char hex[] = "0123456789abcdef";
    qlora__string_add(t, "\"", 1);
    for (size_t i = 0; i < size; i++) {
        uint8_t c = (uint8_t)string[i];
        if (c == '"' || c == '\\') {
            qlora__string_add(t, "\\", 1);
            qlora__string_add(t, string + i, 1);
        } else if (c < 0x20) {
            char escape[6] = {'\\', 'u', '0', '0', hex[c >> 4], hex[c & 15]};
            qlora__string_add(t, escape, 6);
        } else {
            // A path may contain any bytes, but the file must be UTF-8.
            uint32_t left = size - i < 4 ? (uint32_t)(size - i) : 4;
            uint32_t step = qlora__utf8_size(string + i, left);
            qlora__string_add(t, step > 0 ? string + i : "\\ufffd", step > 0 ? step : 6);
            i += step > 0 ? step - 1 : 0;
        }
    }
    qlora__string_add(t, "\"", 1);
}

// Writes the prefix of a value: comma, line break and key.
static QLORA__UNUSED void qlora__json_write_key(qlora__json_writer* w, const char* key) {
    if (!w->empty) {
        qlora__string_add(w->text, ",", 1);
    }
    if (w->depth > 0) {
        qlora__json_write_line(w);
    }
    if (key != NULL) {
        qlora__json_write_quoted(w->text, key, strlen(key));
        qlora__string_puts(w->text, w->indent > 0 ? ": " : ":");
    }
    w->empty = false;
}

static QLORA__UNUSED void qlora__json_write_open(qlora__json_writer* w, const char* key,
                                                 char bracket) {
    qlora__json_write_key(w, key);
    qlora__string_add(w->text, &bracket, 1);
    w->depth++;
    w->empty = true;
}

static QLORA__UNUSED void qlora__json_write_close(qlora__json_writer* w, char bracket) {
    w->depth--;
    if (!w->empty) {
        qlora__json_write_line(w);
    }
    qlora__string_add(w->text, &bracket, 1);
    w->empty = false;
}

// Writes a word unchanged: null, true, false, or a number that is already text.
static QLORA__UNUSED void qlora__json_write_word(qlora__json_writer* w, const char* key,
                                                 const char* word) {
    qlora__json_write_key(w, key);
    qlora__string_puts(w->text, word);
}

static QLORA__UNUSED void qlora__json_write_string(qlora__json_writer* w, const char* key,
                                                   const char* string) {
    qlora__json_write_key(w, key);
    qlora__json_write_quoted(w->text, string, strlen(string));
}

static QLORA__UNUSED void qlora__json_write_int(qlora__json_writer* w, const char* key,
                                                int64_t value) {
    char digits[24];
    snprintf(digits, sizeof digits, "%lld", (long long)value);
    qlora__json_write_word(w, key, digits);
}

// Writes the shortest digits that read back as the same double, with a decimal point or an exponent
// so that Python reads a float. The decimal point of the locale is replaced by a point.
static QLORA__UNUSED void qlora__json_write_double(qlora__json_writer* w, const char* key,
                                                   double value) {
    char digits[40];
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof bits);
    if ((bits >> 52 & 0x7FF) == 0x7FF) {
        w->text->result = qlora__env_fail(w->text->env, QLORA_ERR_ARGUMENT,
                                          "%s is not a finite number", key != NULL ? key : "value");
        return;
    }
    for (int precision = 1; precision <= 17; precision++) {
        char printed[40];
        size_t n = 0;
        bool plain = true;
        snprintf(printed, sizeof printed, "%.*g", precision, value);
        for (const char* c = printed; *c != '\0'; c++) {
            bool usual = (*c >= '0' && *c <= '9') || *c == '-' || *c == '+' || *c == 'e';
            if (usual) {
                digits[n++] = *c;
            } else if (n > 0 && digits[n - 1] != '.') {
                digits[n++] = '.';
            }
            plain = plain && ((*c >= '0' && *c <= '9') || *c == '-');
        }
        if (plain) {
            digits[n++] = '.';
            digits[n++] = '0';
        }
        digits[n] = '\0';
        double back = qlora__number_parse(digits, n);
        if (memcmp(&back, &value, sizeof back) == 0) {
            break;
        }
    }
    qlora__json_write_word(w, key, digits);
}

#endif // QLORA__PART_JSON_WRITE

//@@ src/formats/stop_ids.h

#ifndef QLORA__PART_STOP_IDS
#define QLORA__PART_STOP_IDS

// ---- the ids that end a text --------------------------------------------------------------------

// As transformers reads them: those of generation_config.json where it has an "eos_token_id", else
// those of config.json (in "text_config", where a model that also sees or hears keeps its language
// part). The key holds one id or a list; null counts as absent.
#define QLORA__MAX_STOP_IDS 16

typedef struct qlora__stop_ids {
    int32_t id[QLORA__MAX_STOP_IDS];
    int32_t count;
} qlora__stop_ids;

// Reads one object. What it says replaces *out; where it says nothing, *out stays as it is. Ids
// must be below `vocab`.
static QLORA__UNUSED qlora_result qlora__stop_ids_read(qlora__env* env, const qlora__json* json,
                                                       uint32_t object, int64_t vocab,
                                                       qlora__stop_ids* out) {
    uint32_t value = qlora__json_find(json, object, "eos_token_id");
    if (value == 0 || qlora__json_kind_of(json, value) == QLORA__JSON_NULL) {
        return QLORA_OK;
    }
    bool list = qlora__json_kind_of(json, value) == QLORA__JSON_ARRAY;
    uint32_t count = list ? json->tokens[value].count : 1;
    if (count > QLORA__MAX_STOP_IDS) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "%s: eos_token_id lists %u ids; %d at most", json->label, count,
                               QLORA__MAX_STOP_IDS);
    }
    qlora__stop_ids ids;
    memset(&ids, 0, sizeof ids);
    for (uint32_t i = 0; i < count; i++) {
        int64_t id = 0;
        if (!qlora__json_int(json, list ? value + 1 + i : value, &id) || id < 0 || id >= vocab) {
            const qlora__json_token* t = &json->tokens[value];
            bool string = t->kind == QLORA__JSON_STRING;
            return qlora__env_fail(
                env, QLORA_ERR_FORMAT,
                "%s: eos_token_id is %.*s; ids must be from 0 to vocab_size - 1 (%lld)",
                json->label, t->end - t->begin < 44 ? (int)(t->end - t->begin) : 44,
                (string ? json->strings : json->text) + t->begin, (long long)vocab - 1);
        }
        ids.id[i] = (int32_t)id;
    }
    ids.count = (int32_t)count;
    *out = count > 0 ? ids : *out;
    return QLORA_OK;
}

#endif // QLORA__PART_STOP_IDS

//@@ src/formats/safetensors.h

// ---- reading safetensors ------------------------------------------------------------------------

// Element types of the format, from the narrowest to the widest; the writer uses the reverse order.
// X(name, bits)
#define QLORA__ST_DTYPES(X)                                                                        \
    X(BOOL, 8)                                                                                     \
    X(F4, 4)                                                                                       \
    X(F6_E2M3, 6)                                                                                  \
    X(F6_E3M2, 6)                                                                                  \
    X(U8, 8)                                                                                       \
    X(I8, 8)                                                                                       \
    X(F8_E5M2, 8)                                                                                  \
    X(F8_E4M3, 8)                                                                                  \
    X(F8_E8M0, 8)                                                                                  \
    X(F8_E4M3FNUZ, 8)                                                                              \
    X(F8_E5M2FNUZ, 8)                                                                              \
    X(I16, 16)                                                                                     \
    X(U16, 16)                                                                                     \
    X(F16, 16)                                                                                     \
    X(BF16, 16)                                                                                    \
    X(I32, 32)                                                                                     \
    X(U32, 32)                                                                                     \
    X(F32, 32)                                                                                     \
    X(C64, 64)                                                                                     \
    X(F64, 64)                                                                                     \
    X(I64, 64)                                                                                     \
    X(U64, 64)

#define QLORA__ST_ENUM(name, bits) QLORA__ST_##name,
typedef enum qlora__st_dtype {
    QLORA__ST_DTYPES(QLORA__ST_ENUM) QLORA__ST_DTYPE_COUNT
} qlora__st_dtype;
#undef QLORA__ST_ENUM

typedef struct qlora__st_dtype_row {
    const char* name;
    uint32_t bits;
} qlora__st_dtype_row;

#define QLORA__ST_ROW(name, bits) {#name, bits},
static const qlora__st_dtype_row qlora__st_dtypes[] = {QLORA__ST_DTYPES(QLORA__ST_ROW)};
#undef QLORA__ST_ROW

#define QLORA__ST_MAX_HEADER 100000000u
#define QLORA__ST_CHECKSUM "~checksum" // the last tensor of a file with a checksum

typedef struct qlora__st_tensor {
    const char* name;     // decoded, terminated
    const int64_t* shape; // `rank` numbers, outermost first
    const uint8_t* data;  // not aligned: read it with memcpy or qlora__st_read_f32
    uint64_t bytes;
    uint64_t begin; // offset in the data part
    qlora__st_dtype dtype;
    uint32_t rank;
} qlora__st_tensor;

typedef struct qlora__st {
    const char* label;
    qlora__map map; // data is NULL if the caller owns the bytes
    qlora__json json;
    const uint8_t* file;
    uint64_t file_size;
    uint32_t count;
    qlora__st_tensor* tensors; // in header order
    uint32_t* by_name;
    void* block; // tensors, by_name, shapes and names in one block
    size_t block_bytes;
    char path[QLORA__PATH_ROOM];
} qlora__st;

static void qlora__st_close(qlora__env* env, qlora__st* st) {
    qlora__json_free(env, &st->json);
    qlora__env_free(env, st->block, st->block_bytes);
    qlora__map_close(env, &st->map);
    st->block = NULL;
    st->count = 0;
}

static uint64_t qlora__load_u64(const uint8_t* p) {
    uint64_t value = 0;
    for (int i = 7; i >= 0; i--) {
        value = value << 8 | p[i];
    }
    return value;
}

static void qlora__store_u64(uint8_t* p, uint64_t value) {
    for (int i = 0; i < 8; i++) {
        p[i] = (uint8_t)(value >> (8 * i));
    }
}

// Checks the eight bytes with the length of the header, and its first byte.
static qlora_result qlora__st_check_header(qlora__env* env, const qlora__st* st, uint64_t* header) {
    if (st->file_size < 8) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: a file of %llu bytes is too short for safetensors", st->label,
                               (unsigned long long)st->file_size);
    }
    uint64_t n = qlora__load_u64(st->file);
    if (n > QLORA__ST_MAX_HEADER) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: the header has %llu bytes; the limit of the format is %u",
                               st->label, (unsigned long long)n, QLORA__ST_MAX_HEADER);
    }
    if (n > st->file_size - 8) {
        return qlora__env_fail(
            env, QLORA_ERR_FORMAT,
            "%s: the header needs %llu bytes but the file has only %llu; it is truncated",
            st->label, (unsigned long long)n, (unsigned long long)st->file_size);
    }
    if (n == 0 || st->file[8] != '{') {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: the header does not start with '{'",
                               st->label);
    }
    *header = n;
    return QLORA_OK;
}

// Compares the size of the shape in bytes with the extent, with checked multiplications.
static qlora_result qlora__st_check_size(qlora__env* env, const qlora__st* st,
                                         const qlora__st_tensor* t) {
    uint64_t bits = qlora__st_dtypes[t->dtype].bits;
    for (uint32_t i = 0; i < t->rank; i++) {
        uint64_t dim = (uint64_t)t->shape[i];
        if (dim != 0 && bits > UINT64_MAX / dim) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: %s: the size of the shape overflows",
                                   st->label, t->name);
        }
        bits *= dim;
    }
    if (bits % 8 != 0) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: %s: %llu bits are not a whole number of bytes", st->label,
                               t->name, (unsigned long long)bits);
    }
    if (bits / 8 != t->bytes) {
        return qlora__env_fail(
            env, QLORA_ERR_FORMAT, "%s: %s: the shape needs %llu bytes but data_offsets span %llu",
            st->label, t->name, (unsigned long long)(bits / 8), (unsigned long long)t->bytes);
    }
    return QLORA_OK;
}

// Finds a key of a header entry; its value must be of the given kind.
static qlora_result qlora__st_entry_find(qlora__env* env, const qlora__st* st,
                                         const qlora__st_tensor* t, uint32_t entry, const char* key,
                                         qlora__json_kind kind, uint32_t* out) {
    *out = qlora__json_find(&st->json, entry, key);
    if (*out == 0) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: %s: %s is missing", st->label, t->name,
                               key);
    }
    if (qlora__json_kind_of(&st->json, *out) != kind) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: %s: %s must be %s", st->label, t->name,
                               key, kind == QLORA__JSON_STRING ? "a string" : "a list of integers");
    }
    return QLORA_OK;
}

// Parses one entry of the header into *t, whose name is already set; `shape` receives its numbers.
static qlora_result qlora__st_entry_parse(qlora__env* env, const qlora__st* st, uint32_t value,
                                          int64_t* shape, qlora__st_tensor* t) {
    const qlora__json* json = &st->json;
    uint32_t dtype = 0;
    uint32_t dims = 0;
    uint32_t offsets = 0;
    QLORA__TRY(qlora__st_entry_find(env, st, t, value, "dtype", QLORA__JSON_STRING, &dtype));
    int known = 0;
    while (known < QLORA__ST_DTYPE_COUNT &&
           !qlora__json_is(json, dtype, qlora__st_dtypes[known].name)) {
        known++;
    }
    if (known == QLORA__ST_DTYPE_COUNT) {
        char name[32];
        qlora__json_string(json, dtype, name, sizeof name);
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: %s: unknown dtype \"%s\"", st->label,
                               t->name, name);
    }
    t->dtype = (qlora__st_dtype)known;
    QLORA__TRY(qlora__st_entry_find(env, st, t, value, "shape", QLORA__JSON_ARRAY, &dims));
    t->rank = json->tokens[dims].count;
    t->shape = shape;
    for (uint32_t i = 0; i < t->rank; i++) {
        if (!qlora__json_offset(json, dims + 1 + i, &shape[i])) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "%s: %s: shape must contain non-negative integers", st->label,
                                   t->name);
        }
    }
    int64_t begin = 0;
    int64_t end = 0;
    QLORA__TRY(
        qlora__st_entry_find(env, st, t, value, "data_offsets", QLORA__JSON_ARRAY, &offsets));
    if (json->tokens[offsets].count != 2 || !qlora__json_offset(json, offsets + 1, &begin) ||
        !qlora__json_offset(json, offsets + 2, &end)) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: %s: data_offsets must be two non-negative integers", st->label,
                               t->name);
    }
    if (end < begin) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: %s: data_offsets: the end is before the start", st->label,
                               t->name);
    }
    t->begin = (uint64_t)begin;
    t->bytes = (uint64_t)(end - begin);
    return qlora__st_check_size(env, st, t);
}

static bool qlora__st_offset_less(const void* user, uint32_t a, uint32_t b) {
    const qlora__st_tensor* t = (const qlora__st_tensor*)user;
    if (t[a].begin != t[b].begin) {
        return t[a].begin < t[b].begin;
    }
    return t[a].bytes != t[b].bytes ? t[a].bytes < t[b].bytes : a < b;
}

static bool qlora__st_name_less(const void* user, uint32_t a, uint32_t b) {
    const qlora__st_tensor* t = (const qlora__st_tensor*)user;
    return strcmp(t[a].name, t[b].name) < 0;
}

// Tensors must follow one another without gaps or overlaps, from 0 to the end of the file.
static qlora_result qlora__st_check_layout(qlora__env* env, qlora__st* st, uint64_t data_size) {
    uint64_t at = 0;
    qlora__sort(st->by_name, st->count, qlora__st_offset_less, st->tensors);
    for (uint32_t i = 0; i < st->count; i++) {
        const qlora__st_tensor* t = &st->tensors[st->by_name[i]];
        if (t->begin != at) {
            return qlora__env_fail(
                env, QLORA_ERR_FORMAT, "%s: %s: data_offsets start at %llu, %s %llu", st->label,
                t->name, (unsigned long long)t->begin,
                t->begin < at ? "before the previous tensor ends at" : "leaving a gap after",
                (unsigned long long)at);
        }
        at = t->begin + t->bytes;
    }
    if (at != data_size) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: the tensors need %llu bytes but the file contains %llu%s",
                               st->label, (unsigned long long)at, (unsigned long long)data_size,
                               at > data_size ? "; it is truncated" : "");
    }
    qlora__sort(st->by_name, st->count, qlora__st_name_less, st->tensors);
    return QLORA_OK;
}

// Checks that __metadata__ is an object of strings.
static qlora_result qlora__st_check_metadata(qlora__env* env, const qlora__st* st, uint32_t value) {
    const qlora__json_token* tokens = st->json.tokens;
    bool good = tokens[value].kind == QLORA__JSON_OBJECT;
    for (uint32_t k = value + 1; good && k < tokens[value].next; k = tokens[k + 1].next) {
        good = tokens[k + 1].kind == QLORA__JSON_STRING;
    }
    return good ? QLORA_OK
                : qlora__env_fail(env, QLORA_ERR_FORMAT,
                                  "%s: __metadata__ must map strings to strings", st->label);
}

// Counts the tensors, dimensions and names of the header and allocates one block for them.
static qlora_result qlora__st_reserve(qlora__env* env, qlora__st* st, int64_t** shapes,
                                      char** names) {
    const qlora__json* json = &st->json;
    size_t dims = 0;
    size_t bytes = 0;
    size_t part = 0;
    for (uint32_t k = 1; k < json->count; k = json->tokens[k + 1].next) {
        if (qlora__json_is(json, k, "__metadata__")) {
            QLORA__TRY(qlora__st_check_metadata(env, st, k + 1));
            continue;
        }
        uint32_t shape = qlora__json_find(json, k + 1, "shape");
        dims += shape != 0 ? json->tokens[shape].count : 0;
        bytes += qlora__json_string(json, k, NULL, 0) + 1;
        st->count++;
    }
    bool fits = qlora__mul(dims, sizeof(int64_t), &part) && qlora__add(bytes, part, &bytes) &&
                qlora__mul(st->count, sizeof(qlora__st_tensor) + sizeof(uint32_t), &part) &&
                qlora__add(bytes, part, &bytes);
    if (!fits) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: too many tensors", st->label);
    }
    if (st->count == 0) {
        return QLORA_OK;
    }
    st->block = qlora__env_alloc(env, bytes);
    if (st->block == NULL) {
        return QLORA_ERR_MEMORY;
    }
    st->block_bytes = bytes;
    st->tensors = (qlora__st_tensor*)st->block;
    *shapes = (int64_t*)(void*)(st->tensors + st->count);
    st->by_name = (uint32_t*)(void*)(*shapes + dims);
    *names = (char*)(void*)(st->by_name + st->count);
    return QLORA_OK;
}

static qlora_result qlora__st_parse_header(qlora__env* env, qlora__st* st) {
    uint64_t header = 0;
    int64_t* shapes = NULL;
    char* names = NULL;
    QLORA__TRY(qlora__st_check_header(env, st, &header));
    QLORA__TRY(
        qlora__json_parse(env, st->label, st->file + 8, header, QLORA__JSON_UNIQUE, &st->json));
    const qlora__json* json = &st->json;
    for (uint64_t i = json->tokens[0].end; i < header; i++) {
        if (st->file[8 + i] != ' ') {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "%s: the header may only be padded with spaces", st->label);
        }
    }
    QLORA__TRY(qlora__st_reserve(env, st, &shapes, &names));
    uint32_t index = 0;
    for (uint32_t k = 1; k < json->count; k = json->tokens[k + 1].next) {
        if (qlora__json_is(json, k, "__metadata__")) {
            continue;
        }
        qlora__st_tensor* t = &st->tensors[index];
        memset(t, 0, sizeof *t);
        size_t length = qlora__json_string(json, k, NULL, 0) + 1;
        qlora__json_string(json, k, names, length);
        t->name = names;
        if (strlen(names) + 1 != length) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "%s: %s: the name of a tensor contains a NUL byte", st->label,
                                   names);
        }
        QLORA__TRY(qlora__st_entry_parse(env, st, k + 1, shapes, t));
        st->by_name[index] = index;
        names += length;
        shapes += t->rank;
        index++;
    }
    QLORA__TRY(qlora__st_check_layout(env, st, st->file_size - 8 - header));
    for (uint32_t i = 0; i < st->count; i++) {
        st->tensors[i].data = st->file + 8 + header + st->tensors[i].begin;
    }
    return QLORA_OK;
}

// Reads a complete file from memory, which must outlive *st. Call qlora__st_close afterwards. *st
// is large and must not be moved. After a failure there is nothing to close.
static QLORA__UNUSED qlora_result qlora__st_parse(qlora__env* env, const char* label,
                                                  const void* bytes, uint64_t size, qlora__st* st) {
    memset(st, 0, sizeof *st);
    st->label = label;
    st->file = (const uint8_t*)bytes;
    st->file_size = size;
    qlora_result result = qlora__st_parse_header(env, st);
    if (result != QLORA_OK) {
        qlora__st_close(env, st);
    }
    return result;
}

// Maps a file and reads its header.
static qlora_result qlora__st_open(qlora__env* env, const char* path, qlora__st* st) {
    qlora__map map;
    memset(st, 0, sizeof *st);
    QLORA__TRY(qlora__path_join(env, "", path, st->path));
    QLORA__TRY(qlora__map_open(env, path, &map));
    st->map = map;
    st->label = st->path;
    st->file = map.data;
    st->file_size = map.size;
    qlora_result result = qlora__st_parse_header(env, st);
    if (result != QLORA_OK) {
        qlora__st_close(env, st);
    }
    return result;
}

// Returns NULL if there is no tensor of that name.
static const qlora__st_tensor* qlora__st_find(const qlora__st* st, const char* name) {
    uint32_t low = 0;
    uint32_t high = st->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        int order = strcmp(st->tensors[st->by_name[middle]].name, name);
        if (order == 0) {
            return &st->tensors[st->by_name[middle]];
        }
        if (order < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return NULL;
}

// Copies the text of a __metadata__ entry, as qlora__json_string does. Returns false if it does not
// exist or does not fit.
static QLORA__UNUSED bool qlora__st_metadata(const qlora__st* st, const char* key, char* out,
                                             size_t size) {
    uint32_t all = qlora__json_find(&st->json, 0, "__metadata__");
    uint32_t value = all == 0 ? 0 : qlora__json_find(&st->json, all, key);
    return value != 0 && qlora__json_string(&st->json, value, out, size) < size;
}

// Formats a shape for messages, such as "[8,128]".
static const char* qlora__shape_text(const int64_t* shape, uint32_t rank, char out[96]) {
    size_t n = 1;
    out[0] = '[';
    for (uint32_t i = 0; i < rank && n < 70; i++) {
        n += (size_t)snprintf(out + n, 96 - n, i == 0 ? "%lld" : ",%lld", (long long)shape[i]);
    }
    out[n] = ']';
    out[n + 1] = '\0';
    return out;
}

static uint64_t qlora__st_elements(const qlora__st_tensor* t) {
    return t->bytes * 8 / qlora__st_dtypes[t->dtype].bits;
}

static bool qlora__st_is_float(const qlora__st_tensor* t) {
    return t->dtype == QLORA__ST_F32 || t->dtype == QLORA__ST_BF16 || t->dtype == QLORA__ST_F16;
}

// Converts elements [first, first + count) of an F32, BF16 or F16 tensor to floats, exactly.
static void qlora__st_read_f32(const qlora__st_tensor* t, uint64_t first, uint64_t count,
                               float* out) {
    if (t->dtype == QLORA__ST_F32) {
        memcpy(out, t->data + first * 4, (size_t)count * 4);
        return;
    }
    for (uint64_t i = 0; i < count; i++) {
        uint16_t half = 0;
        memcpy(&half, t->data + (first + i) * 2, 2);
        out[i] = t->dtype == QLORA__ST_BF16 ? qlora__bf16_to(half) : qlora__f16_to(half);
    }
}

// Checks a file that was written with a checksum: it must be present and correct.
static QLORA__UNUSED qlora_result qlora__st_verify(qlora__env* env, const qlora__st* st) {
    const qlora__st_tensor* t = qlora__st_find(st, QLORA__ST_CHECKSUM);
    if (t == NULL || t->bytes != 8 || t->data + 8 != st->file + st->file_size) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: the checksum at the end of the file is missing", st->label);
    }
    qlora__hash hash;
    qlora__hash_begin(&hash);
    qlora__hash_add(&hash, st->file, (size_t)(st->file_size - 8));
    if (qlora__hash_end(&hash) != qlora__load_u64(t->data)) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: the checksum does not match; the file is damaged", st->label);
    }
    return QLORA_OK;
}

// ---- writing safetensors ------------------------------------------------------------------------

// A tensor to be written. Names must be distinct; names and shapes are read only by
// qlora__st_write_begin.
typedef struct qlora__st_entry {
    const char* name;
    const int64_t* shape;
    qlora__st_dtype dtype;
    uint32_t rank;
} qlora__st_entry;

typedef struct qlora__st_writer {
    qlora__out out;
    uint32_t* order; // order[i] is the entry whose bytes are written i-th
    uint32_t count;
    uint64_t written;
    uint64_t data_bytes;
    qlora__hash hash;
    bool checksum;
} qlora__st_writer;

static bool qlora__st_entry_less(const void* user, uint32_t a, uint32_t b) {
    const qlora__st_entry* e = (const qlora__st_entry*)user;
    return e[a].dtype != e[b].dtype ? e[a].dtype > e[b].dtype : strcmp(e[a].name, e[b].name) < 0;
}

static uint64_t qlora__st_entry_bytes(const qlora__st_entry* e) {
    uint64_t bits = qlora__st_dtypes[e->dtype].bits;
    for (uint32_t i = 0; i < e->rank; i++) {
        bits *= (uint64_t)e->shape[i];
    }
    return bits / 8;
}

static void qlora__st_write_entry(qlora__json_writer* w, const char* name, qlora__st_dtype dtype,
                                  const int64_t* shape, uint32_t rank, uint64_t begin,
                                  uint64_t end) {
    qlora__json_write_open(w, name, '{');
    qlora__json_write_string(w, "dtype", qlora__st_dtypes[dtype].name);
    qlora__json_write_open(w, "shape", '[');
    for (uint32_t i = 0; i < rank; i++) {
        qlora__json_write_int(w, NULL, shape[i]);
    }
    qlora__json_write_close(w, ']');
    qlora__json_write_open(w, "data_offsets", '[');
    qlora__json_write_int(w, NULL, (int64_t)begin);
    qlora__json_write_int(w, NULL, (int64_t)end);
    qlora__json_write_close(w, ']');
    qlora__json_write_close(w, '}');
}

// Writes the header: its length, then its text, padded with spaces to a multiple of eight bytes.
static void qlora__st_write_header(qlora__st_writer* w, qlora__string* text,
                                   const qlora__st_entry* entries, const char* const* metadata) {
    static const int64_t eight = 8;
    qlora__json_writer json;
    qlora__string_add(text, "\0\0\0\0\0\0\0\0", 8);
    qlora__json_write_begin(&json, text, 0);
    qlora__json_write_open(&json, NULL, '{');
    qlora__json_write_open(&json, "__metadata__", '{');
    qlora__json_write_string(&json, "format", "pt");
    for (size_t i = 0; metadata != NULL && metadata[i] != NULL; i += 2) {
        qlora__json_write_string(&json, metadata[i], metadata[i + 1]);
    }
    qlora__json_write_close(&json, '}');
    uint64_t at = 0;
    for (uint32_t i = 0; i < w->count; i++) {
        const qlora__st_entry* e = &entries[w->order[i]];
        uint64_t bytes = qlora__st_entry_bytes(e);
        qlora__st_write_entry(&json, e->name, e->dtype, e->shape, e->rank, at, at + bytes);
        at += bytes;
    }
    w->data_bytes = at;
    if (w->checksum) {
        qlora__st_write_entry(&json, QLORA__ST_CHECKSUM, QLORA__ST_U8, &eight, 1, at, at + 8);
    }
    qlora__json_write_close(&json, '}');
    while (text->result == QLORA_OK && text->size % 8 != 0) {
        qlora__string_add(text, " ", 1);
    }
    if (text->result == QLORA_OK) {
        qlora__store_u64((uint8_t*)(void*)text->data, text->size - 8);
    }
}

static void qlora__st_write_abort(qlora__env* env, qlora__st_writer* w) {
    qlora__out_abort(env, &w->out);
    qlora__env_free(env, w->order, w->count * sizeof *w->order);
    memset(w, 0, sizeof *w);
}

// Starts a file; all its tensors must be known. `metadata` is a list of pairs of strings that ends
// with NULL, or NULL; {"format":"pt"} is always included. `checksum` adds a last tensor that
// qlora__st_verify checks. Then write the bytes of entries order[0], order[1], ... in pieces of any
// size, and commit or abort.
static QLORA__UNUSED qlora_result qlora__st_write_begin(qlora__env* env, const char* path,
                                                        const qlora__st_entry* entries,
                                                        uint32_t count, const char* const* metadata,
                                                        bool checksum, qlora__st_writer* w) {
    qlora__string text;
    memset(w, 0, sizeof *w);
    qlora__string_begin(env, &text);
    w->count = count;
    w->checksum = checksum;
    qlora__hash_begin(&w->hash);
    qlora_result result = QLORA_OK;
    if (count > 0) {
        w->order = (uint32_t*)qlora__env_alloc(env, count * sizeof *w->order);
        result = w->order == NULL ? QLORA_ERR_MEMORY : QLORA_OK;
    }
    for (uint32_t i = 0; i < count && result == QLORA_OK; i++) {
        w->order[i] = i;
    }
    if (result == QLORA_OK) {
        qlora__sort(w->order, count, qlora__st_entry_less, entries);
        qlora__st_write_header(w, &text, entries, metadata);
        result = text.result;
    }
    if (result == QLORA_OK) {
        result = qlora__out_begin(env, path, &w->out);
    }
    if (result == QLORA_OK) {
        qlora__hash_add(&w->hash, text.data, text.size);
        result = qlora__out_write(env, &w->out, text.data, text.size);
    }
    qlora__string_free(&text);
    if (result != QLORA_OK) {
        qlora__st_write_abort(env, w);
    }
    return result;
}

static QLORA__UNUSED qlora_result qlora__st_write(qlora__env* env, qlora__st_writer* w,
                                                  const void* bytes, size_t size) {
    if (size > w->data_bytes - w->written) {
        return qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                               "safetensors: %llu bytes more than the header declares",
                               (unsigned long long)(size - (w->data_bytes - w->written)));
    }
    w->written += size;
    if (w->checksum) {
        qlora__hash_add(&w->hash, bytes, size);
    }
    return qlora__out_write(env, &w->out, bytes, size);
}

// Completes the file under its temporary name. On failure, it has been abandoned.
static QLORA__UNUSED qlora_result qlora__st_write_finish(qlora__env* env, qlora__st_writer* w) {
    qlora_result result = QLORA_OK;
    if (w->written != w->data_bytes) {
        result = qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                                 "safetensors: only %llu of %llu bytes have been written",
                                 (unsigned long long)w->written, (unsigned long long)w->data_bytes);
    }
    if (result == QLORA_OK && w->checksum) {
        uint8_t sum[8];
        qlora__store_u64(sum, qlora__hash_end(&w->hash));
        result = qlora__out_write(env, &w->out, sum, sizeof sum);
    }
    if (result == QLORA_OK) {
        result = qlora__out_finish(env, &w->out);
    }
    if (result != QLORA_OK) {
        qlora__st_write_abort(env, w);
    }
    return result;
}

// Gives a finished file its final name. On failure, an existing file is left unchanged.
static QLORA__UNUSED qlora_result qlora__st_write_publish(qlora__env* env, qlora__st_writer* w) {
    qlora_result result = qlora__out_publish(env, &w->out);
    qlora__st_write_abort(env, w);
    return result;
}

static QLORA__UNUSED qlora_result qlora__st_write_commit(qlora__env* env, qlora__st_writer* w) {
    QLORA__TRY(qlora__st_write_finish(env, w));
    return qlora__st_write_publish(env, w);
}

//@@ src/formats/config.h

// ---- Hugging Face config.json -------------------------------------------------------------------

static const struct {
    const char* model_type;
    qlora_family family;
    const char* architecture;
    const char* gguf_name;
} qlora__families[] = {{"llama", QLORA_FAMILY_LLAMA, "LlamaForCausalLM", "llama"},
                       {"mistral", QLORA_FAMILY_MISTRAL, "MistralForCausalLM", "llama"},
                       {"qwen2", QLORA_FAMILY_QWEN2, "Qwen2ForCausalLM", "qwen2"},
                       {"qwen3", QLORA_FAMILY_QWEN3, "Qwen3ForCausalLM", "qwen3"}};
#define QLORA__FAMILY_COUNT ((int)(sizeof qlora__families / sizeof qlora__families[0]))

// One object of a config file, with the environment for its messages.
typedef struct qlora__config_reader {
    qlora__env* env;
    const qlora__json* json;
    uint32_t object;
} qlora__config_reader;

// The value of a key; null counts as absent, as in transformers.
static uint32_t qlora__config_find(const qlora__config_reader* r, const char* key) {
    uint32_t value = qlora__json_find(r->json, r->object, key);
    return value != 0 && qlora__json_kind_of(r->json, value) == QLORA__JSON_NULL ? 0 : value;
}

// The value as written in the file, for messages.
static const char* qlora__config_show(const qlora__config_reader* r, uint32_t value, char out[48]) {
    const qlora__json_token* t = &r->json->tokens[value];
    uint32_t n = t->end - t->begin < 44 ? t->end - t->begin : 44;
    memcpy(out, r->json->text + t->begin, n);
    memcpy(out + n, t->end - t->begin > n ? "..." : "", t->end - t->begin > n ? 4 : 1);
    return out;
}

// An integer within [least, most]. If it is absent, the result is `fallback`; a negative fallback
// makes that an error.
static qlora_result qlora__config_int(const qlora__config_reader* r, const char* key,
                                      int64_t fallback, int64_t least, int64_t most, int64_t* out) {
    char shown[48];
    uint32_t value = qlora__config_find(r, key);
    if (value == 0) {
        if (fallback < 0) {
            return qlora__env_fail(r->env, QLORA_ERR_FORMAT, "%s: %s is missing", r->json->label,
                                   key);
        }
        *out = fallback;
        return QLORA_OK;
    }
    int64_t number = 0;
    if (!qlora__json_int(r->json, value, &number) || number < least || number > most) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT,
                               "%s: %s is %s; it must be an integer from %lld to %lld",
                               r->json->label, key, qlora__config_show(r, value, shown),
                               (long long)least, (long long)most);
    }
    *out = number;
    return QLORA_OK;
}

// A positive number. If it is absent, the result is `fallback`; a negative fallback makes that an
// error.
static qlora_result qlora__config_positive(const qlora__config_reader* r, const char* key,
                                           double fallback, double* out) {
    char shown[48];
    uint32_t value = qlora__config_find(r, key);
    if (value == 0) {
        if (fallback < 0.0) {
            return qlora__env_fail(r->env, QLORA_ERR_FORMAT, "%s: %s is missing", r->json->label,
                                   key);
        }
        *out = fallback;
        return QLORA_OK;
    }
    double number = 0.0;
    if (!qlora__json_double(r->json, value, &number) || !(number > 0.0) || number > 1e30) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT,
                               "%s: %s is %s; it must be positive and at most 1e30", r->json->label,
                               key, qlora__config_show(r, value, shown));
    }
    *out = number;
    return QLORA_OK;
}

static qlora_result qlora__config_bool(const qlora__config_reader* r, const char* key,
                                       bool fallback, bool* out) {
    char shown[48];
    uint32_t value = qlora__config_find(r, key);
    qlora__json_kind kind = value != 0 ? qlora__json_kind_of(r->json, value) : QLORA__JSON_NULL;
    if (value != 0 && kind != QLORA__JSON_TRUE && kind != QLORA__JSON_FALSE) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT, "%s: %s is %s; it must be true or false",
                               r->json->label, key, qlora__config_show(r, value, shown));
    }
    *out = value != 0 ? kind == QLORA__JSON_TRUE : fallback;
    return QLORA_OK;
}

// A token id below `vocab`, or -1 if it is absent; some old files contain -1 itself.
static qlora_result qlora__config_id(const qlora__config_reader* r, const char* key, int64_t vocab,
                                     int32_t* out) {
    int64_t id = -1;
    if (qlora__config_find(r, key) != 0) {
        QLORA__TRY(qlora__config_int(r, key, -1, -1, vocab - 1, &id));
    }
    *out = (int32_t)id;
    return QLORA_OK;
}

typedef char qlora__config_stop_ids_fit[QLORA__MAX_STOP_IDS <= QLORA_MAX_STOP_IDS ? 1 : -1];

// eos_token_id: one id or a list of ids.
static qlora_result qlora__config_stops(const qlora__config_reader* r, qlora_model_config* c) {
    qlora__stop_ids ids;
    ids.count = 0;
    QLORA__TRY(qlora__stop_ids_read(r->env, r->json, r->object, c->vocab, &ids));
    if (ids.count > 0) {
        memcpy(c->stop_ids, ids.id, sizeof ids.id);
        c->stop_count = ids.count;
    }
    return QLORA_OK;
}

static qlora_result qlora__config_refuse(const qlora__config_reader* r, const char* key,
                                         uint32_t value, const char* advice) {
    char shown[48];
    return qlora__env_fail(r->env, QLORA_ERR_UNSUPPORTED, "%s: %s \"%s\" is not supported; %s",
                           r->json->label, key, qlora__config_show(r, value, shown), advice);
}

static qlora_result qlora__config_yarn(const qlora__config_reader* r,
                                       const qlora__config_reader* top, const qlora_model_config* c,
                                       qlora_rope_desc* rope) {
    bool truncate = true;
    double fallback = (double)c->max_positions;
    QLORA__TRY(
        qlora__config_positive(top, "original_max_position_embeddings", fallback, &fallback));
    QLORA__TRY(qlora__config_positive(r, "original_max_position_embeddings", fallback,
                                      &rope->original_max_position));
    double stretch = (double)c->max_positions / rope->original_max_position;
    QLORA__TRY(qlora__config_positive(r, "factor", stretch > 1.0 ? stretch : -1.0, &rope->factor));
    QLORA__TRY(qlora__config_positive(r, "beta_fast", 32.0, &rope->beta_fast));
    QLORA__TRY(qlora__config_positive(r, "beta_slow", 1.0, &rope->beta_slow));
    QLORA__TRY(qlora__config_positive(r, "mscale", 0.0, &rope->mscale));
    QLORA__TRY(qlora__config_positive(r, "mscale_all_dim", 0.0, &rope->mscale_all_dim));
    QLORA__TRY(qlora__config_positive(r, "attention_factor", 0.0, &rope->attention_factor));
    QLORA__TRY(qlora__config_bool(r, "truncate", true, &truncate));
    rope->no_truncate = !truncate;
    return QLORA_OK;
}

static qlora_result qlora__config_llama3(const qlora__config_reader* r,
                                         const qlora__config_reader* top, qlora_rope_desc* rope) {
    double fallback = -1.0;
    if (qlora__config_find(top, "original_max_position_embeddings") != 0) {
        QLORA__TRY(
            qlora__config_positive(top, "original_max_position_embeddings", -1.0, &fallback));
    }
    QLORA__TRY(qlora__config_positive(r, "factor", -1.0, &rope->factor));
    QLORA__TRY(qlora__config_positive(r, "low_freq_factor", -1.0, &rope->low_freq_factor));
    QLORA__TRY(qlora__config_positive(r, "high_freq_factor", -1.0, &rope->high_freq_factor));
    QLORA__TRY(qlora__config_positive(r, "original_max_position_embeddings", fallback,
                                      &rope->original_max_position));
    if (!(rope->high_freq_factor > rope->low_freq_factor)) {
        return qlora__env_fail(
            r->env, QLORA_ERR_FORMAT,
            "%s: high_freq_factor is %g; it must be greater than low_freq_factor (%g)",
            r->json->label, rope->high_freq_factor, rope->low_freq_factor);
    }
    return QLORA_OK;
}

// One set of rotary parameters from the object `dict` (0 = none: all defaults). Keys that it does
// not contain are looked up at the top of the file.
static qlora_result qlora__config_rope(const qlora__config_reader* top, uint32_t dict,
                                       const qlora_model_config* c, qlora_rope_desc* rope) {
    static const struct {
        const char* name;
        qlora_rope_type type;
    } kinds[4] = {{"default", QLORA_ROPE_DEFAULT},
                  {"linear", QLORA_ROPE_LINEAR},
                  {"llama3", QLORA_ROPE_LLAMA3},
                  {"yarn", QLORA_ROPE_YARN}};
    qlora__config_reader r = *top;
    double theta = 10000.0;
    double partial = 1.0;
    memset(rope, 0, sizeof *rope);
    rope->factor = 1.0;
    QLORA__TRY(qlora__config_positive(top, "rope_theta", theta, &rope->theta));
    QLORA__TRY(qlora__config_positive(top, "partial_rotary_factor", partial, &partial));
    if (dict != 0) {
        r.object = dict;
        QLORA__TRY(qlora__config_positive(&r, "rope_theta", rope->theta, &rope->theta));
        QLORA__TRY(qlora__config_positive(&r, "partial_rotary_factor", partial, &partial));
        uint32_t type = qlora__config_find(&r, "rope_type");
        type = type != 0 ? type : qlora__config_find(&r, "type");
        int k = 0;
        while (type != 0 && k < 4 && !qlora__json_is(r.json, type, kinds[k].name)) {
            k++;
        }
        if (k == 4) {
            return qlora__config_refuse(&r, "rope_type", type,
                                        "supported values: default, linear, llama3, yarn");
        }
        rope->type = kinds[k].type;
    }
    if (!(rope->theta > 1.0)) {
        return qlora__env_fail(r.env, QLORA_ERR_FORMAT,
                               "%s: rope_theta is %g; it must be greater than 1", r.json->label,
                               rope->theta);
    }
    if (partial < 1.0 || partial > 1.0) {
        return qlora__env_fail(r.env, QLORA_ERR_UNSUPPORTED,
                               "%s: partial_rotary_factor is %g; only 1 is supported",
                               r.json->label, partial);
    }
    switch (rope->type) {
    case QLORA_ROPE_LINEAR:
        return qlora__config_positive(&r, "factor", -1.0, &rope->factor);
    case QLORA_ROPE_LLAMA3:
        return qlora__config_llama3(&r, top, rope);
    case QLORA_ROPE_YARN:
        return qlora__config_yarn(&r, top, c, rope);
    case QLORA_ROPE_DEFAULT:
        break;
    }
    return QLORA_OK;
}

static qlora_result qlora__config_need_object(const qlora__config_reader* r, const char* key,
                                              uint32_t value) {
    char shown[48];
    if (qlora__json_kind_of(r->json, value) != QLORA__JSON_OBJECT) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT, "%s: %s is %s; it must be an object",
                               r->json->label, key, qlora__config_show(r, value, shown));
    }
    return QLORA_OK;
}

// rope_parameters (new files: one set, or one per layer type) or rope_scaling (old files).
static qlora_result qlora__config_ropes(const qlora__config_reader* r, qlora_model_config* c) {
    const char* key = "rope_parameters";
    uint32_t dict = qlora__config_find(r, key);
    if (dict == 0) {
        key = "rope_scaling";
        dict = qlora__config_find(r, key);
    }
    uint32_t full = dict;
    uint32_t slide = dict;
    const char* full_key = key;
    const char* slide_key = key;
    if (dict != 0) {
        uint32_t per_full = qlora__json_find(r->json, dict, "full_attention");
        uint32_t per_slide = qlora__json_find(r->json, dict, "sliding_attention");
        if (per_full != 0 || per_slide != 0) {
            full = per_full != 0 ? per_full : per_slide;
            slide = per_slide != 0 ? per_slide : per_full;
            full_key = per_full != 0 ? "full_attention" : "sliding_attention";
            slide_key = per_slide != 0 ? "sliding_attention" : "full_attention";
        }
        QLORA__TRY(qlora__config_need_object(r, key, dict));
        QLORA__TRY(qlora__config_need_object(r, full_key, full));
        QLORA__TRY(qlora__config_need_object(r, slide_key, slide));
    }
    QLORA__TRY(qlora__config_rope(r, full, c, &c->rope));
    return qlora__config_rope(r, slide, c, &c->rope_sliding);
}

// The family from model_type, checked against the name of the architecture if there is one.
static qlora_result qlora__config_family(const qlora__config_reader* r, bool nested,
                                         qlora_model_config* c) {
    uint32_t type = qlora__config_find(r, "model_type");
    uint32_t names = qlora__config_find(r, "architectures");
    uint32_t architecture = names != 0 ? qlora__json_at(r->json, names, 0) : 0;
    if (type == 0 && architecture == 0) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT, "%s: model_type is missing",
                               r->json->label);
    }
    int k = 0;
    for (; k < QLORA__FAMILY_COUNT; k++) {
        if (qlora__json_is(r->json, type != 0 ? type : architecture,
                           type != 0 ? qlora__families[k].model_type
                                     : qlora__families[k].architecture)) {
            break;
        }
    }
    const char* advice = "supported families: llama, mistral, qwen2, qwen3";
    if (k == QLORA__FAMILY_COUNT) {
        return qlora__config_refuse(r, type != 0 ? "model_type" : "architecture",
                                    type != 0 ? type : architecture, advice);
    }
    if (architecture != 0 && !nested &&
        !qlora__json_is(r->json, architecture, qlora__families[k].architecture) &&
        !qlora__json_is(r->json, architecture, "LLaMAForCausalLM")) {
        return qlora__config_refuse(r, "architecture", architecture,
                                    "only causal language models are supported");
    }
    c->family = qlora__families[k].family;
    return QLORA_OK;
}

// The sizes, each with its own limits, and the relations between them.
static qlora_result qlora__config_sizes(const qlora__config_reader* r, qlora_model_config* c) {
    QLORA__TRY(qlora__config_int(r, "vocab_size", -1, 1, 1 << 24, &c->vocab));
    QLORA__TRY(qlora__config_int(r, "hidden_size", -1, 1, 1 << 20, &c->hidden));
    QLORA__TRY(qlora__config_int(r, "intermediate_size", -1, 1, 1 << 22, &c->intermediate));
    QLORA__TRY(qlora__config_int(r, "num_hidden_layers", -1, 1, QLORA_MAX_LAYERS, &c->layers));
    QLORA__TRY(qlora__config_int(r, "num_attention_heads", -1, 1, 1 << 14, &c->heads));
    QLORA__TRY(qlora__config_int(r, "num_key_value_heads", c->heads, 1, 1 << 14, &c->kv_heads));
    QLORA__TRY(
        qlora__config_int(r, "max_position_embeddings", 2048, 1, INT32_MAX, &c->max_positions));
    QLORA__TRY(qlora__config_positive(r, "rms_norm_eps", 1e-6, &c->rms_eps));
    if (c->heads % c->kv_heads != 0) {
        return qlora__env_fail(
            r->env, QLORA_ERR_FORMAT,
            "%s: num_attention_heads (%lld) is not a multiple of num_key_value_heads (%lld)",
            r->json->label, (long long)c->heads, (long long)c->kv_heads);
    }
    bool given = qlora__config_find(r, "head_dim") != 0;
    if (!given && c->family != QLORA_FAMILY_QWEN3 && c->hidden % c->heads != 0) {
        return qlora__env_fail(
            r->env, QLORA_ERR_FORMAT,
            "%s: head_dim is missing, and hidden_size (%lld) is not a multiple of "
            "num_attention_heads (%lld)",
            r->json->label, (long long)c->hidden, (long long)c->heads);
    }
    int64_t fallback = c->family == QLORA_FAMILY_QWEN3 ? 128 : c->hidden / c->heads;
    QLORA__TRY(qlora__config_int(r, "head_dim", fallback, 1, 1 << 14, &c->head_dim));
    if (c->head_dim % 2 != 0) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT, "%s: head_dim is %lld; it must be even",
                               r->json->label, (long long)c->head_dim);
    }
    if (c->head_dim > 256) {
        return qlora__env_fail(r->env, QLORA_ERR_UNSUPPORTED,
                               "%s: head_dim is %lld; the maximum is 256", r->json->label,
                               (long long)c->head_dim);
    }
    return QLORA_OK;
}

// Which layers have a sliding window, and how wide it is.
static qlora_result qlora__config_window(const qlora__config_reader* r, qlora_model_config* c) {
    int64_t first = 0;
    bool use = true;
    bool qwen = c->family == QLORA_FAMILY_QWEN2 || c->family == QLORA_FAMILY_QWEN3;
    uint32_t types = qlora__config_find(r, "layer_types");
    if (qwen) {
        QLORA__TRY(qlora__config_bool(r, "use_sliding_window", false, &use));
        QLORA__TRY(qlora__config_int(r, "max_window_layers", 28, 0, INT32_MAX, &first));
    } else if (c->family == QLORA_FAMILY_LLAMA) {
        use = false; // a llama file may contain the key, but the architecture has no window
    }
    if (use) {
        QLORA__TRY(qlora__config_int(r, "sliding_window", 0, 1, INT32_MAX, &c->window));
    }
    if (types != 0 && qlora__json_kind_of(r->json, types) != QLORA__JSON_ARRAY) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT, "%s: layer_types must be a list",
                               r->json->label);
    }
    if (types != 0 && r->json->tokens[types].count != c->layers) {
        return qlora__env_fail(
            r->env, QLORA_ERR_FORMAT,
            "%s: layer_types has length %u; it must have one entry per layer (%lld)",
            r->json->label, r->json->tokens[types].count, (long long)c->layers);
    }
    bool any = false;
    for (int64_t i = 0; i < c->layers; i++) {
        uint32_t type = types != 0 ? qlora__json_at(r->json, types, (uint32_t)i) : 0;
        bool slides = type != 0 ? qlora__json_is(r->json, type, "sliding_attention") : i >= first;
        if (type != 0 && !slides && !qlora__json_is(r->json, type, "full_attention")) {
            return qlora__config_refuse(r, "layer type", type,
                                        "supported types: full_attention, sliding_attention");
        }
        if (type != 0 && slides && c->family == QLORA_FAMILY_LLAMA) {
            return qlora__config_refuse(r, "layer type", type,
                                        "llama layers always have full attention");
        }
        c->sliding[i] = slides && c->window > 0 ? 1 : 0;
        any = any || c->sliding[i] != 0;
    }
    c->window = any ? c->window : 0;
    return QLORA_OK;
}

// quantization_config: bitsandbytes 4-bit is read tensor by tensor; everything else is rejected by
// name.
static qlora_result qlora__config_quantized(const qlora__config_reader* r, qlora_model_config* c) {
    uint32_t dict = qlora__config_find(r, "quantization_config");
    if (dict == 0) {
        return QLORA_OK;
    }
    qlora__config_reader q = *r;
    bool eight = false;
    q.object = dict;
    uint32_t method = qlora__config_find(&q, "quant_method");
    if (method != 0 && !qlora__json_is(r->json, method, "bitsandbytes")) {
        return qlora__config_refuse(r, "quant_method", method,
                                    "use the 16-bit model or one in bitsandbytes 4-bit format");
    }
    QLORA__TRY(qlora__config_bool(&q, "load_in_8bit", false, &eight));
    if (eight) {
        return qlora__env_fail(
            r->env, QLORA_ERR_UNSUPPORTED,
            "%s: quantization_config: load_in_8bit is not supported; use the 16-bit "
            "model or a 4-bit one",
            r->json->label);
    }
    c->quantized = true;
    return QLORA_OK;
}

static qlora_result qlora__config_switches(const qlora__config_reader* r, qlora_model_config* c) {
    static const struct {
        const char* name;
        qlora_dtype dtype;
    } dtypes[6] = {{"float32", QLORA_F32},         {"bfloat16", QLORA_BF16},
                   {"float16", QLORA_F16},         {"torch.float32", QLORA_F32},
                   {"torch.bfloat16", QLORA_BF16}, {"torch.float16", QLORA_F16}};
    bool attention = false;
    QLORA__TRY(qlora__config_bool(r, "tie_word_embeddings", false, &c->tied));
    if (c->family == QLORA_FAMILY_LLAMA || c->family == QLORA_FAMILY_QWEN3) {
        QLORA__TRY(qlora__config_bool(r, "attention_bias", false, &attention));
    }
    if (c->family == QLORA_FAMILY_LLAMA) {
        QLORA__TRY(qlora__config_bool(r, "mlp_bias", false, &c->mlp_bias));
    }
    c->qkv_bias = attention || c->family == QLORA_FAMILY_QWEN2;
    c->o_bias = attention;
    c->qk_norm = c->family == QLORA_FAMILY_QWEN3;
    uint32_t act = qlora__config_find(r, "hidden_act");
    act = act != 0 ? act : qlora__config_find(r, "hidden_activation");
    if (act != 0 && !qlora__json_is(r->json, act, "silu") &&
        !qlora__json_is(r->json, act, "swish")) {
        return qlora__config_refuse(r, "hidden_act", act, "only silu is supported");
    }
    uint32_t dtype = qlora__config_find(r, "dtype");
    dtype = dtype != 0 ? dtype : qlora__config_find(r, "torch_dtype");
    c->dtype = -1;
    for (int i = 0; i < 6; i++) {
        if (dtype != 0 && qlora__json_is(r->json, dtype, dtypes[i].name)) {
            c->dtype = (int32_t)dtypes[i].dtype;
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__config_from_json(qlora__env* env, const qlora__json* json,
                                            qlora_model_config* c) {
    qlora__config_reader r;
    r.env = env;
    r.json = json;
    r.object = 0;
    memset(c, 0, sizeof *c);
    if (qlora__json_kind_of(json, 0) != QLORA__JSON_OBJECT) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: expected a JSON object", json->label);
    }
    QLORA__TRY(qlora__config_quantized(&r, c));
    // A multimodal model keeps the parameters of its language model here.
    uint32_t text = qlora__config_find(&r, "text_config");
    bool nested = text != 0 && qlora__json_kind_of(json, text) == QLORA__JSON_OBJECT;
    r.object = nested ? text : 0;
    QLORA__TRY(qlora__config_family(&r, nested, c));
    QLORA__TRY(qlora__config_sizes(&r, c));
    QLORA__TRY(qlora__config_ropes(&r, c));
    QLORA__TRY(qlora__config_window(&r, c));
    QLORA__TRY(qlora__config_switches(&r, c));
    QLORA__TRY(qlora__config_id(&r, "bos_token_id", c->vocab, &c->bos_id));
    QLORA__TRY(qlora__config_id(&r, "pad_token_id", c->vocab, &c->pad_id));
    return qlora__config_stops(&r, c);
}

// Parses config.json from memory into *out.
static qlora_result qlora__config_parse(qlora__env* env, const char* label, const void* text,
                                        uint64_t size, qlora_model_config* out) {
    qlora__json json;
    qlora_model_config config;
    QLORA__TRY(qlora__json_parse(env, label, text, size, 0, &json));
    qlora_result result = qlora__config_from_json(env, &json, &config);
    qlora__json_free(env, &json);
    if (result == QLORA_OK) {
        *out = config;
    }
    return result;
}

// generation_config.json: its stop ids replace those of config.json.
static qlora_result qlora__config_parse_generation(qlora__env* env, const char* label,
                                                   const void* text, uint64_t size,
                                                   qlora_model_config* config) {
    qlora__json json;
    qlora__config_reader r;
    QLORA__TRY(qlora__json_parse(env, label, text, size, 0, &json));
    r.env = env;
    r.json = &json;
    r.object = 0;
    qlora_result result = qlora__config_stops(&r, config);
    qlora__json_free(env, &json);
    return result;
}

// Reads config.json of a model folder and, if it exists, generation_config.json.
static QLORA__UNUSED qlora_result qlora__config_read(qlora__env* env, const char* dir,
                                                     qlora_model_config* out) {
    char path[QLORA__PATH_ROOM];
    qlora__map map;
    qlora_model_config config;
    QLORA__TRY(qlora__path_join(env, dir, "config.json", path));
    QLORA__TRY(qlora__map_open(env, path, &map));
    qlora_result result = qlora__config_parse(env, path, map.data, map.size, &config);
    qlora__map_close(env, &map);
    QLORA__TRY(result);
    QLORA__TRY(qlora__path_join(env, dir, "generation_config.json", path));
    bool exists = false;
    QLORA__TRY(qlora__file_exists(env, path, &exists));
    if (exists) {
        QLORA__TRY(qlora__map_open(env, path, &map));
        result = qlora__config_parse_generation(env, path, map.data, map.size, &config);
        qlora__map_close(env, &map);
        QLORA__TRY(result);
    }
    *out = config;
    return QLORA_OK;
}

//@@ src/formats/folder.h

// ---- reading a Hugging Face model folder --------------------------------------------------------

// A tensor of the folder under its plain name: without the prefixes "model.", "language_model." and
// "base_model.", in any order, so that names are the same whatever wrapper wrote the file.
typedef struct qlora__folder_entry {
    const char* name;
    const qlora__st_tensor* tensor;
} qlora__folder_entry;

typedef struct qlora__folder {
    qlora__st* shards;
    uint32_t shard_count;
    uint32_t shard_room;
    qlora__folder_entry* entries;
    uint32_t* by_name;
    uint32_t count;
    uint32_t room;
    char dir[QLORA__PATH_ROOM];
} qlora__folder;

#define QLORA__MAX_SHARDS 4096

static const char* qlora__plain_name(const char* name) {
    for (;;) {
        if (strncmp(name, "model.", 6) == 0) {
            name += 6;
        } else if (strncmp(name, "base_model.", 11) == 0) {
            name += 11;
        } else if (strncmp(name, "language_model.", 15) == 0) {
            name += 15;
        } else {
            return name;
        }
    }
}

static void qlora__folder_close(qlora__env* env, qlora__folder* f) {
    for (uint32_t i = 0; i < f->shard_count; i++) {
        qlora__st_close(env, &f->shards[i]);
    }
    qlora__env_free(env, f->shards, f->shard_room * sizeof *f->shards);
    qlora__env_free(env, f->entries, f->room * (sizeof *f->entries + sizeof *f->by_name));
    memset(f, 0, sizeof *f);
}

static bool qlora__folder_less(const void* user, uint32_t a, uint32_t b) {
    const qlora__folder_entry* e = (const qlora__folder_entry*)user;
    return strcmp(e[a].name, e[b].name) < 0;
}

static qlora_result qlora__folder_reserve(qlora__env* env, qlora__folder* f, uint32_t count) {
    size_t bytes = 0;
    if (!qlora__mul(count, sizeof *f->entries + sizeof *f->by_name, &bytes)) {
        return qlora__env_fail(env, QLORA_ERR_MEMORY, "%s: too many tensors", f->dir);
    }
    if (count == 0) {
        return QLORA_OK;
    }
    f->entries = (qlora__folder_entry*)qlora__env_alloc(env, bytes);
    if (f->entries == NULL) {
        return QLORA_ERR_MEMORY;
    }
    f->room = count;
    f->by_name = (uint32_t*)(void*)(f->entries + count);
    return QLORA_OK;
}

static void qlora__folder_add(qlora__folder* f, const qlora__st_tensor* tensor) {
    f->entries[f->count].name = qlora__plain_name(tensor->name);
    f->entries[f->count].tensor = tensor;
    f->by_name[f->count] = f->count;
    f->count++;
}

static qlora_result qlora__folder_sort(qlora__env* env, qlora__folder* f) {
    qlora__sort(f->by_name, f->count, qlora__folder_less, f->entries);
    for (uint32_t i = 1; i < f->count; i++) {
        const qlora__folder_entry* a = &f->entries[f->by_name[i - 1]];
        const qlora__folder_entry* b = &f->entries[f->by_name[i]];
        if (strcmp(a->name, b->name) == 0) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: %s and %s are the same tensor",
                                   f->dir, a->tensor->name, b->tensor->name);
        }
    }
    return QLORA_OK;
}

// The shard named by a value of weight_map; it is opened when it is first mentioned.
static qlora_result qlora__folder_shard(qlora__env* env, qlora__folder* f, const qlora__json* json,
                                        uint32_t value, uint32_t* shard) {
    char name[256];
    char path[QLORA__PATH_ROOM];
    size_t length = qlora__json_string(json, value, name, sizeof name);
    // Only plain names are allowed: an index must not lead out of its folder.
    if (length == 0 || length >= sizeof name || strlen(name) != length ||
        strpbrk(name, "/\\:") != NULL || name[0] == '.') {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: weight_map: \"%s\" must be a plain file name without a path",
                               json->label, length < sizeof name ? name : "...");
    }
    QLORA__TRY(qlora__path_join(env, f->dir, name, path));
    // Consecutive tensors are usually in the same file, so the search starts with the last one.
    for (uint32_t i = f->shard_count; i > 0; i--) {
        if (strcmp(f->shards[i - 1].path, path) == 0) {
            *shard = i - 1;
            return QLORA_OK;
        }
    }
    bool exists = false;
    QLORA__TRY(qlora__file_exists(env, path, &exists));
    if (!exists) {
        return qlora__env_fail(env, QLORA_ERR_FILE,
                               "%s: this shard is listed in the index but does not exist", path);
    }
    if (f->shard_count == f->shard_room) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: weight_map names more than %u shards",
                               json->label, f->shard_room);
    }
    QLORA__TRY(qlora__st_open(env, path, &f->shards[f->shard_count]));
    *shard = f->shard_count;
    f->shard_count++;
    return QLORA_OK;
}

static bool qlora__json_value_less(const void* user, uint32_t a, uint32_t b) {
    const qlora__json* json = (const qlora__json*)user;
    return qlora__json_key_less(json, a + 1, b + 1);
}

// Counts the different files that a weight_map names: sorts the values and counts the changes.
static qlora_result qlora__folder_count_shards(qlora__env* env, const qlora__json* json,
                                               uint32_t map, uint32_t* count) {
    uint32_t n = json->tokens[map].count;
    uint32_t* keys = (uint32_t*)qlora__env_alloc(env, n * sizeof *keys);
    if (keys == NULL) {
        return QLORA_ERR_MEMORY;
    }
    uint32_t key = map + 1;
    for (uint32_t i = 0; i < n; i++) {
        keys[i] = key;
        key = json->tokens[key + 1].next;
    }
    qlora__sort(keys, n, qlora__json_value_less, json);
    *count = 1;
    for (uint32_t i = 1; i < n; i++) {
        *count += qlora__json_value_less(json, keys[i - 1], keys[i]) ? 1u : 0u;
    }
    qlora__env_free(env, keys, n * sizeof *keys);
    return QLORA_OK;
}

static qlora_result qlora__folder_read_index(qlora__env* env, qlora__folder* f,
                                             const qlora__json* json) {
    uint32_t map = qlora__json_find(json, 0, "weight_map");
    if (map == 0) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: weight_map is missing", json->label);
    }
    if (qlora__json_kind_of(json, map) != QLORA__JSON_OBJECT) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: weight_map must be an object",
                               json->label);
    }
    if (json->tokens[map].count == 0) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: weight_map is empty", json->label);
    }
    for (uint32_t k = map + 1; k < json->tokens[map].next; k = json->tokens[k + 1].next) {
        if (qlora__json_kind_of(json, k + 1) != QLORA__JSON_STRING) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "%s: weight_map must map tensor names to file names",
                                   json->label);
        }
    }
    uint32_t room = 0;
    size_t bytes = 0;
    QLORA__TRY(qlora__folder_count_shards(env, json, map, &room));
    if (room > QLORA__MAX_SHARDS || !qlora__mul(room, sizeof *f->shards, &bytes)) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: weight_map names %u shards; the limit is %d", json->label, room,
                               QLORA__MAX_SHARDS);
    }
    f->shards = (qlora__st*)qlora__env_alloc(env, bytes);
    if (f->shards == NULL) {
        return QLORA_ERR_MEMORY;
    }
    f->shard_room = room;
    QLORA__TRY(qlora__folder_reserve(env, f, json->tokens[map].count));
    for (uint32_t k = map + 1; k < json->tokens[map].next; k = json->tokens[k + 1].next) {
        char name[256];
        uint32_t shard = 0;
        QLORA__TRY(qlora__folder_shard(env, f, json, k + 1, &shard));
        size_t length = qlora__json_string(json, k, name, sizeof name);
        const qlora__st_tensor* t =
            length < sizeof name ? qlora__st_find(&f->shards[shard], name) : NULL;
        if (t == NULL) {
            return qlora__env_fail(
                env, QLORA_ERR_FORMAT,
                "%s: tensor %s is listed in the index but missing from this shard",
                f->shards[shard].path, name);
        }
        qlora__folder_add(f, t);
    }
    return qlora__folder_sort(env, f);
}

static qlora_result qlora__folder_open_index(qlora__env* env, qlora__folder* f, const char* path) {
    qlora__map map;
    qlora__json json;
    QLORA__TRY(qlora__map_open(env, path, &map));
    qlora_result result =
        qlora__json_parse(env, path, map.data, map.size, QLORA__JSON_UNIQUE, &json);
    if (result == QLORA_OK) {
        result = qlora__folder_read_index(env, f, &json);
        qlora__json_free(env, &json);
    }
    qlora__map_close(env, &map);
    return result;
}

static qlora_result qlora__folder_open_single(qlora__env* env, qlora__folder* f, const char* path) {
    f->shards = (qlora__st*)qlora__env_alloc(env, sizeof *f->shards);
    if (f->shards == NULL) {
        return QLORA_ERR_MEMORY;
    }
    f->shard_room = 1;
    QLORA__TRY(qlora__st_open(env, path, &f->shards[0]));
    f->shard_count = 1;
    QLORA__TRY(qlora__folder_reserve(env, f, f->shards[0].count));
    for (uint32_t i = 0; i < f->shards[0].count; i++) {
        qlora__folder_add(f, &f->shards[0].tensors[i]);
    }
    return qlora__folder_sort(env, f);
}

// Opens the weights of a model folder: model.safetensors, or the shards that its index names. All
// files stay mapped until qlora__folder_close. After a failure there is nothing to close.
static QLORA__UNUSED qlora_result qlora__folder_open(qlora__env* env, const char* dir,
                                                     qlora__folder* f) {
    char path[QLORA__PATH_ROOM];
    memset(f, 0, sizeof *f);
    QLORA__TRY(qlora__path_join(env, "", dir, f->dir));
    QLORA__TRY(qlora__path_join(env, dir, "model.safetensors", path));
    bool exists = false;
    QLORA__TRY(qlora__file_exists(env, path, &exists));
    bool single = exists;
    if (!exists) {
        QLORA__TRY(qlora__path_join(env, dir, "model.safetensors.index.json", path));
        QLORA__TRY(qlora__file_exists(env, path, &exists));
    }
    if (!exists) {
        return qlora__env_fail(
            env, QLORA_ERR_FILE,
            "%s: found neither model.safetensors nor model.safetensors.index.json", dir);
    }
    qlora_result result =
        single ? qlora__folder_open_single(env, f, path) : qlora__folder_open_index(env, f, path);
    if (result != QLORA_OK) {
        qlora__folder_close(env, f);
    }
    return result;
}

// Returns NULL if the folder has no such tensor. The "model." prefix of the name is optional.
static const qlora__st_tensor* qlora__folder_find(const qlora__folder* f, const char* name) {
    const char* plain = qlora__plain_name(name);
    uint32_t low = 0;
    uint32_t high = f->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        const qlora__folder_entry* e = &f->entries[f->by_name[middle]];
        int order = strcmp(e->name, plain);
        if (order == 0) {
            return e->tensor;
        }
        if (order < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return NULL;
}

// Finds an F32, BF16 or F16 tensor of the shape [rows, cols], or [rows] if cols is -1.
static qlora_result qlora__folder_need(qlora__env* env, const qlora__folder* f, const char* name,
                                       int64_t rows, int64_t cols, const qlora__st_tensor** out) {
    char have[96];
    char want[96];
    int64_t shape[2];
    uint32_t rank = cols < 0 ? 1 : 2;
    shape[0] = rows;
    shape[1] = cols;
    const qlora__st_tensor* t = qlora__folder_find(f, name);
    if (t == NULL) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: tensor %s is missing", f->dir, name);
    }
    if (!qlora__st_is_float(t)) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "%s: %s has dtype %s; supported are F32, BF16 and F16", f->dir, name,
                               qlora__st_dtypes[t->dtype].name);
    }
    if (t->rank != rank || t->shape[0] != rows || (rank == 2 && t->shape[1] != cols)) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: %s has shape %s; it must be %s", f->dir,
                               name, qlora__shape_text(t->shape, t->rank, have),
                               qlora__shape_text(shape, rank, want));
    }
    *out = t;
    return QLORA_OK;
}

// ---- writing a Hugging Face model folder --------------------------------------------------------

// Copies a file atomically, such as the files of the tokenizer.
static QLORA__UNUSED qlora_result qlora__file_copy(qlora__env* env, const char* from,
                                                   const char* to) {
    qlora__map map;
    QLORA__TRY(qlora__map_open(env, from, &map));
    qlora_result result = qlora__file_write(env, to, map.data, (size_t)map.size);
    qlora__map_close(env, &map);
    return result;
}

// Writes model.safetensors.index.json, which assigns each tensor to one of `shards`. The names keep
// the order of the caller; `bytes` is the total size of the tensors.
static QLORA__UNUSED qlora_result qlora__index_write(qlora__env* env, const char* dir,
                                                     const char* const* names,
                                                     const uint32_t* shard_of, uint32_t count,
                                                     const char* const* shards, uint64_t bytes) {
    char path[QLORA__PATH_ROOM];
    qlora__string text;
    qlora__json_writer w;
    QLORA__TRY(qlora__path_join(env, dir, "model.safetensors.index.json", path));
    qlora__string_begin(env, &text);
    qlora__json_write_begin(&w, &text, 2);
    qlora__json_write_open(&w, NULL, '{');
    qlora__json_write_open(&w, "metadata", '{');
    qlora__json_write_int(&w, "total_size", (int64_t)bytes);
    qlora__json_write_close(&w, '}');
    qlora__json_write_open(&w, "weight_map", '{');
    for (uint32_t i = 0; i < count; i++) {
        qlora__json_write_string(&w, names[i], shards[shard_of[i]]);
    }
    qlora__json_write_close(&w, '}');
    qlora__json_write_close(&w, '}');
    qlora_result result = text.result;
    if (result == QLORA_OK) {
        result = qlora__file_write(env, path, text.data, text.size);
    }
    qlora__string_free(&text);
    return result;
}

// Writes the members of a config with the type of its weights replaced and without
// quantization_config; everything else is copied unchanged.
static void qlora__config_rewrite(const qlora__json* json, const char* dtype, qlora__string* text) {
    qlora__json_writer w;
    qlora__json_write_begin(&w, text, 2);
    qlora__json_write_open(&w, NULL, '{');
    for (uint32_t k = 1; k < json->count; k = json->tokens[k + 1].next) {
        const qlora__json_token* key = &json->tokens[k];
        const qlora__json_token* value = &json->tokens[k + 1];
        uint32_t quote = value->kind == QLORA__JSON_STRING ? 1 : 0;
        if (qlora__json_is(json, k, "quantization_config")) {
            continue;
        }
        qlora__json_write_key(&w, NULL);
        qlora__string_add(text, json->text + key->begin - 1, key->end - key->begin + 2);
        qlora__string_puts(text, ": ");
        if (qlora__json_is(json, k, "dtype") || qlora__json_is(json, k, "torch_dtype")) {
            qlora__json_write_quoted(text, dtype, strlen(dtype));
        } else {
            qlora__string_add(text, json->text + value->begin - quote,
                              value->end - value->begin + 2 * quote);
        }
    }
    qlora__json_write_close(&w, '}');
}

// Writes config.json for weights exported as `dtype` ("bfloat16", ...), based on the original one.
static QLORA__UNUSED qlora_result qlora__config_export(qlora__env* env, const char* from_dir,
                                                       const char* to_dir, const char* dtype) {
    char path[QLORA__PATH_ROOM];
    qlora__map map;
    qlora__json json;
    qlora__string text;
    QLORA__TRY(qlora__path_join(env, from_dir, "config.json", path));
    QLORA__TRY(qlora__map_open(env, path, &map));
    qlora__string_begin(env, &text);
    qlora_result result = qlora__json_parse(env, path, map.data, map.size, 0, &json);
    if (result == QLORA_OK) {
        if (qlora__json_kind_of(&json, 0) == QLORA__JSON_OBJECT) {
            qlora__config_rewrite(&json, dtype, &text);
            result = text.result;
        } else {
            result = qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: expected a JSON object", path);
        }
        qlora__json_free(env, &json);
    }
    qlora__map_close(env, &map);
    if (result == QLORA_OK) {
        result = qlora__path_join(env, to_dir, "config.json", path);
    }
    if (result == QLORA_OK) {
        result = qlora__file_write(env, path, text.data, text.size);
    }
    qlora__string_free(&text);
    return result;
}

// ---- bitsandbytes 4-bit tensors -----------------------------------------------------------------

// The weight of a linear layer as stored in its file. If nf4 is false, `weight` is a 16-bit or
// 32-bit matrix. Otherwise it is NF4: packed codes, two per byte, high nibble first, with one scale
// for every `block` elements. Scale i is absmax[i] (F32, BF16 or F16) or, if nested,
//   map2[codes[i]] * absmax2[i / block2] + offset
typedef struct qlora__linear_source {
    int64_t rows;
    int64_t cols;
    bool nf4;
    bool nested;
    const qlora__st_tensor* weight;
    const qlora__st_tensor* absmax;  // nf4; U8 codes when nested
    const qlora__st_tensor* map;     // F32 [16], the NF4 code book
    const qlora__st_tensor* absmax2; // nested: F32
    const qlora__st_tensor* map2;    // nested: F32 [256]
    int64_t block;
    int64_t block2;
    float offset;
    qlora_dtype dtype; // type to which the dequantised values are rounded
} qlora__linear_source;

static const char qlora__bnb_suffix[] = ".quant_state.bitsandbytes__nf4";

// Finds `name` + `suffix` with `count` elements of the given type; F32 also accepts BF16 and F16.
static qlora_result qlora__bnb_part(qlora__env* env, const qlora__folder* f, const char* name,
                                    const char* suffix, uint64_t count, qlora__st_dtype dtype,
                                    const qlora__st_tensor** out) {
    char full[320];
    snprintf(full, sizeof full, "%s%s", name, suffix);
    const qlora__st_tensor* t = qlora__folder_find(f, full);
    if (t == NULL) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: tensor %s is missing", f->dir, full);
    }
    bool type_fits = t->dtype == dtype || (dtype == QLORA__ST_F32 && qlora__st_is_float(t));
    if (!type_fits) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: %s has dtype %s; the quant_state requires %s", f->dir, full,
                               qlora__st_dtypes[t->dtype].name, qlora__st_dtypes[dtype].name);
    }
    if (qlora__st_elements(t) != count) {
        return qlora__env_fail(
            env, QLORA_ERR_FORMAT, "%s: %s has %llu elements; the quant_state requires %llu",
            f->dir, full, (unsigned long long)qlora__st_elements(t), (unsigned long long)count);
    }
    *out = t;
    return QLORA_OK;
}

// Reports a key of the quant_state that is missing or has a wrong value.
static qlora_result qlora__bnb_wrong(const qlora__config_reader* r, const char* key,
                                     const char* allowed) {
    char shown[48];
    uint32_t value = qlora__config_find(r, key);
    if (value == 0) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT, "%s: %s is missing", r->json->label, key);
    }
    return qlora__env_fail(r->env, QLORA_ERR_FORMAT, "%s: %s is %s; it must be %s", r->json->label,
                           key, qlora__config_show(r, value, shown), allowed);
}

static qlora_result qlora__bnb_block(const qlora__config_reader* r, const char* key, int64_t* out) {
    QLORA__TRY(qlora__config_int(r, key, -1, 32, 4096, out));
    if ((*out & (*out - 1)) != 0) {
        return qlora__bnb_wrong(r, key, "a power of two");
    }
    return QLORA_OK;
}

// Reads the shape [rows, cols]; returns false if it is not valid.
static bool qlora__bnb_shape(const qlora__json* json, uint32_t shape, qlora__linear_source* w) {
    return shape != 0 && qlora__json_kind_of(json, shape) == QLORA__JSON_ARRAY &&
           json->tokens[shape].count == 2 && qlora__json_offset(json, shape + 1, &w->rows) &&
           qlora__json_offset(json, shape + 2, &w->cols) && w->rows >= 1 && w->cols >= 1 &&
           w->rows <= INT32_MAX && w->cols <= INT32_MAX;
}

// Reads the JSON inside a quant_state tensor.
static qlora_result qlora__bnb_state(qlora__env* env, const qlora__json* json,
                                     qlora__linear_source* w) {
    qlora__config_reader r;
    r.env = env;
    r.json = json;
    r.object = 0;
    uint32_t type = qlora__config_find(&r, "quant_type");
    uint32_t dtype = qlora__config_find(&r, "dtype");
    if (type != 0 && !qlora__json_is(json, type, "nf4")) {
        return qlora__config_refuse(&r, "quant_type", type, "only nf4 is supported");
    }
    if (type == 0) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "%s: quant_type is missing; only nf4 is supported", json->label);
    }
    if (!qlora__bnb_shape(json, qlora__config_find(&r, "shape"), w)) {
        return qlora__bnb_wrong(&r, "shape", "two integers from 1 to 2147483647");
    }
    QLORA__TRY(qlora__bnb_block(&r, "blocksize", &w->block));
    w->nested = qlora__config_find(&r, "nested_blocksize") != 0;
    w->block2 = 256;
    if (w->nested) {
        double offset = 0.0;
        QLORA__TRY(qlora__bnb_block(&r, "nested_blocksize", &w->block2));
        uint32_t value = qlora__config_find(&r, "nested_offset");
        if (value == 0 || !qlora__json_double(json, value, &offset) || offset > 3.4e38 ||
            offset < -3.4e38) {
            return qlora__bnb_wrong(&r, "nested_offset", "a number from -3.4e38 to 3.4e38");
        }
        w->offset = (float)offset;
    }
    w->dtype = QLORA_BF16;
    if (dtype != 0 && qlora__json_is(json, dtype, "float16")) {
        w->dtype = QLORA_F16;
    } else if (dtype != 0 && qlora__json_is(json, dtype, "float32")) {
        w->dtype = QLORA_F32;
    } else if (dtype == 0 || !qlora__json_is(json, dtype, "bfloat16")) {
        return qlora__bnb_wrong(&r, "dtype", "bfloat16, float16 or float32");
    }
    return QLORA_OK;
}

// Finds the tensors that accompany the packed codes and checks the sizes that the quant_state
// implies.
static qlora_result qlora__bnb_parts(qlora__env* env, const qlora__folder* f, const char* name,
                                     qlora__linear_source* w) {
    uint64_t n = (uint64_t)w->rows * (uint64_t)w->cols;
    uint64_t packed = (n + 1) / 2;
    uint64_t blocks = (n + (uint64_t)w->block - 1) / (uint64_t)w->block;
    uint64_t blocks2 = (blocks + (uint64_t)w->block2 - 1) / (uint64_t)w->block2;
    // Other storage types contain the same bytes, rounded up to whole elements.
    if (w->weight->bytes < packed || w->weight->bytes >= packed + 8) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: %s has %llu bytes; %lld x %lld codes need %llu", f->dir, name,
                               (unsigned long long)w->weight->bytes, (long long)w->rows,
                               (long long)w->cols, (unsigned long long)packed);
    }
    QLORA__TRY(qlora__bnb_part(env, f, name, ".quant_map", 16, QLORA__ST_F32, &w->map));
    float book[16];
    qlora__st_read_f32(w->map, 0, 16, book);
    for (int i = 0; i < 16; i++) {
        float off = book[i] - qlora__nf4_levels[i];
        if (!(off <= 1e-6f && off >= -1e-6f)) {
            return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                   "%s: %s.quant_map is not the NF4 code book", f->dir, name);
        }
    }
    if (!w->nested) {
        return qlora__bnb_part(env, f, name, ".absmax", blocks, QLORA__ST_F32, &w->absmax);
    }
    QLORA__TRY(qlora__bnb_part(env, f, name, ".absmax", blocks, QLORA__ST_U8, &w->absmax));
    QLORA__TRY(qlora__bnb_part(env, f, name, ".nested_quant_map", 256, QLORA__ST_F32, &w->map2));
    return qlora__bnb_part(env, f, name, ".nested_absmax", blocks2, QLORA__ST_F32, &w->absmax2);
}

// Finds the weight [rows, cols] of a linear layer. The tensors themselves determine whether it is
// plain or 4-bit, because the config's lists of skipped modules are not reliable. `name` ends in
// ".weight".
static QLORA__UNUSED qlora_result qlora__folder_linear(qlora__env* env, const qlora__folder* f,
                                                       const char* name, int64_t rows, int64_t cols,
                                                       qlora__linear_source* out) {
    char state_name[320];
    qlora__linear_source w;
    qlora__json json;
    memset(&w, 0, sizeof w);
    snprintf(state_name, sizeof state_name, "%s.quant_state.bitsandbytes__fp4", name);
    if (qlora__folder_find(f, state_name) != NULL) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "%s: %s is in bitsandbytes' fp4 format; only nf4 is supported",
                               f->dir, name);
    }
    snprintf(state_name, sizeof state_name, "%s%s", name, qlora__bnb_suffix);
    const qlora__st_tensor* state = qlora__folder_find(f, state_name);
    if (state == NULL) {
        QLORA__TRY(qlora__folder_need(env, f, name, rows, cols, &w.weight));
        w.rows = rows;
        w.cols = cols;
        w.dtype = w.weight->dtype == QLORA__ST_F32    ? QLORA_F32
                  : w.weight->dtype == QLORA__ST_BF16 ? QLORA_BF16
                                                      : QLORA_F16;
        *out = w;
        return QLORA_OK;
    }
    w.nf4 = true;
    w.weight = qlora__folder_find(f, name);
    if (w.weight == NULL) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: tensor %s is missing", f->dir, name);
    }
    QLORA__TRY(
        qlora__json_parse(env, state_name, state->data, state->bytes, QLORA__JSON_UNIQUE, &json));
    qlora_result result = qlora__bnb_state(env, &json, &w);
    qlora__json_free(env, &json);
    QLORA__TRY(result);
    if (w.rows != rows || w.cols != cols) {
        return qlora__env_fail(
            env, QLORA_ERR_FORMAT, "%s: %s has shape [%lld,%lld]; it must be [%lld,%lld]", f->dir,
            name, (long long)w.rows, (long long)w.cols, (long long)rows, (long long)cols);
    }
    QLORA__TRY(qlora__bnb_parts(env, f, name, &w));
    *out = w;
    return QLORA_OK;
}

//@@ src/formats/regex.h

#ifndef QLORA__PART_REGEX
#define QLORA__PART_REGEX

// ---- regular expressions in PEFT configs --------------------------------------------------------

// Matches a short pattern against the complete name of a module. Supported are literals, ., the
// escapes \d \w \s \b, [sets], groups, |, * + ? and their lazy forms, {0,} {0,1} {1} {1,}, ^ and $.
// The pattern is compiled to a small program for a machine that follows all alternatives at once:
// linear time, no recursion.
#define QLORA__RE_MAX 1024
#define QLORA__RE_SETS 32
#define QLORA__RE_GROUPS 32

typedef enum qlora__re_op {
    QLORA__RE_CHAR, // arg: the byte
    QLORA__RE_ANY,
    QLORA__RE_SET,   // arg: index of the set
    QLORA__RE_SPLIT, // continue with the next step and with this + arg
    QLORA__RE_JUMP,  // continue with this + arg
    QLORA__RE_BEGIN,
    QLORA__RE_END,
    QLORA__RE_WORD, // \b
    QLORA__RE_MATCH
} qlora__re_op;

typedef struct qlora__re_step {
    qlora__re_op op;
    int32_t arg;
} qlora__re_step;

typedef struct qlora__re {
    qlora__re_step step[QLORA__RE_MAX];
    uint8_t set[QLORA__RE_SETS][32];
    int32_t count;
    int32_t sets;
    const char* wrong; // the unsupported part of the pattern; NULL if there is none
} qlora__re;

typedef struct qlora__re_group {
    int32_t begin;  // first step of the group
    int32_t branch; // first step of the current alternative
    int32_t jumps;  // last jump to the end of the group; each links to the previous one, -1 ends
} qlora__re_group;

static QLORA__UNUSED void qlora__re_insert(qlora__re* re, int32_t at, qlora__re_op op,
                                           int32_t arg) {
    if (re->count >= QLORA__RE_MAX - 1) {
        re->wrong = "too many steps";
        return;
    }
    // Every jump inside the moved piece is relative and stays inside it.
    memmove(&re->step[at + 1], &re->step[at], (size_t)(re->count - at) * sizeof re->step[0]);
    re->step[at].op = op;
    re->step[at].arg = arg;
    re->count++;
}

static QLORA__UNUSED void qlora__re_append(qlora__re* re, qlora__re_op op, int32_t arg) {
    qlora__re_insert(re, re->count, op, arg);
}

static QLORA__UNUSED bool qlora__re_is_word(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

// Adds \d, \w, \s or their opposites to a set; returns false for any other letter.
static QLORA__UNUSED bool qlora__re_class(uint8_t* set, char letter) {
    char lower = letter >= 'A' && letter <= 'Z' ? (char)(letter + 32) : letter;
    if (lower != 'd' && lower != 'w' && lower != 's') {
        return false;
    }
    for (int c = 0; c < 128; c++) {
        bool in = lower == 'd'   ? c >= '0' && c <= '9'
                  : lower == 'w' ? qlora__re_is_word((char)c)
                                 : c == ' ' || (c >= 9 && c <= 13);
        if (in == (letter == lower)) {
            set[c / 8] = (uint8_t)(set[c / 8] | 1u << c % 8);
        }
    }
    return true;
}

static QLORA__UNUSED uint8_t* qlora__re_new_set(qlora__re* re) {
    if (re->sets == QLORA__RE_SETS) {
        re->wrong = "too many sets";
        return re->set[0];
    }
    memset(re->set[re->sets], 0, sizeof re->set[0]);
    qlora__re_append(re, QLORA__RE_SET, re->sets);
    re->sets++;
    return re->set[re->sets - 1];
}

// Compiles an escape; `p` is on the letter after the backslash.
static const char* qlora__re_escape(qlora__re* re, const char* p) {
    if (*p == 'b') {
        qlora__re_append(re, QLORA__RE_WORD, 0);
    } else if (*p == 'A') {
        qlora__re_append(re, QLORA__RE_BEGIN, 0);
    } else if (*p == 'Z') {
        qlora__re_append(re, QLORA__RE_END, 0);
    } else if (*p == '\0' || (qlora__re_is_word(*p) && strchr("dwsDWS", *p) == NULL && *p != '_')) {
        re->wrong = "an escape other than \\d \\w \\s \\b";
        return p;
    } else if (strchr("dwsDWS", *p) != NULL) {
        qlora__re_class(qlora__re_new_set(re), *p);
    } else {
        qlora__re_append(re, QLORA__RE_CHAR, (uint8_t)*p);
    }
    return p + 1;
}

// Compiles a set; `p` is after the opening bracket. Returns the place after the closing one.
static const char* qlora__re_set(qlora__re* re, const char* p) {
    uint8_t* set = qlora__re_new_set(re);
    bool negate = *p == '^';
    p += negate ? 1 : 0;
    for (bool first = true; first || *p != ']'; first = false) {
        uint8_t low = (uint8_t)*p;
        if (low == '\\') {
            p++;
            low = (uint8_t)*p;
            if (low != 0 && qlora__re_class(set, *p)) {
                p++;
                continue;
            }
        }
        if (low == 0) {
            re->wrong = "a set without a closing ']'";
            return p;
        }
        uint8_t high = low;
        if (p[1] == '-' && p[2] != ']' && p[2] != '\\' && p[2] != '\0') {
            high = (uint8_t)p[2];
            p += 2;
        }
        for (unsigned c = low; c <= high; c++) {
            set[c / 8] = (uint8_t)(set[c / 8] | 1u << c % 8);
        }
        p++;
    }
    for (int i = 0; negate && i < 32; i++) {
        set[i] = (uint8_t)~set[i];
    }
    return p + 1;
}

// Compiles a quantifier for the steps from `atom` on, if there is one at p.
static const char* qlora__re_repeat(qlora__re* re, const char* p, int32_t atom) {
    static const struct {
        const char* text;
        char meaning;
    } forms[9] = {{"*", '*'},     {"+", '+'},    {"?", '?'},     {"{0,}", '*'}, {"{1,}", '+'},
                  {"{0,1}", '?'}, {"{,1}", '?'}, {"{1,1}", '1'}, {"{1}", '1'}};
    for (int i = 0; i < 9; i++) {
        size_t n = strlen(forms[i].text);
        if (strncmp(p, forms[i].text, n) != 0) {
            continue;
        }
        int32_t size = re->count - atom;
        if (forms[i].meaning == '+') {
            qlora__re_append(re, QLORA__RE_SPLIT, -size);
        } else if (forms[i].meaning == '?') {
            qlora__re_insert(re, atom, QLORA__RE_SPLIT, size + 1);
        } else if (forms[i].meaning == '*') {
            qlora__re_insert(re, atom, QLORA__RE_SPLIT, size + 2);
            qlora__re_append(re, QLORA__RE_JUMP, -size - 1);
        }
        p += n;
        if (*p == '*' || *p == '+' || *p == '{') {
            re->wrong = "a quantifier after a quantifier";
        }
        return p + (*p == '?' ? 1 : 0); // a full match does not depend on laziness
    }
    if (*p == '{') {
        re->wrong = "a counted repetition";
    }
    return p;
}

static QLORA__UNUSED void qlora__re_close(qlora__re* re, const qlora__re_group* g) {
    for (int32_t jump = g->jumps; jump >= 0;) {
        int32_t before = re->step[jump].arg;
        re->step[jump].arg = re->count - jump;
        jump = before;
    }
}

// Compiles the start of a group; `p` is after the parenthesis.
static const char* qlora__re_open(qlora__re* re, const char* p, qlora__re_group* g) {
    if (*p == '?' && p[1] != ':') {
        re->wrong = "a (?...) group other than (?:...)";
        return p;
    }
    g->begin = re->count;
    g->branch = re->count;
    g->jumps = -1;
    return p + (*p == '?' ? 2 : 0);
}

// Ends an alternative: the steps so far become one of two branches.
static QLORA__UNUSED void qlora__re_alternative(qlora__re* re, qlora__re_group* g) {
    qlora__re_insert(re, g->branch, QLORA__RE_SPLIT, re->count - g->branch + 2);
    qlora__re_append(re, QLORA__RE_JUMP, g->jumps);
    g->jumps = re->count - 1;
    g->branch = re->count;
}

// Compiles a literal character, a set, an escape or an anchor; `p` is on it.
static const char* qlora__re_single(qlora__re* re, const char* p) {
    if (*p == '\\') {
        return qlora__re_escape(re, p + 1);
    }
    if (*p == '[') {
        return qlora__re_set(re, p + 1);
    }
    if (strchr("*+?{", *p) != NULL) {
        re->wrong = "a quantifier with nothing before it";
        return p;
    }
    qlora__re_op op = *p == '.'   ? QLORA__RE_ANY
                      : *p == '^' ? QLORA__RE_BEGIN
                      : *p == '$' ? QLORA__RE_END
                                  : QLORA__RE_CHAR;
    qlora__re_append(re, op, (uint8_t)*p);
    return p + 1;
}

// Compiles a pattern; on failure, re->wrong describes the unsupported part.
static QLORA__UNUSED void qlora__re_compile(qlora__re* re, const char* p) {
    qlora__re_group stack[QLORA__RE_GROUPS];
    int depth = 0;
    memset(re, 0, sizeof *re);
    qlora__re_open(re, "", &stack[0]);
    while (*p != '\0' && re->wrong == NULL) {
        int32_t atom = re->count;
        if (*p == '(' && depth + 1 < QLORA__RE_GROUPS) {
            depth++;
            p = qlora__re_open(re, p + 1, &stack[depth]);
            continue;
        }
        if (*p == '|') {
            qlora__re_alternative(re, &stack[depth]);
            p++;
            continue;
        }
        if (*p == '(' || (*p == ')' && depth == 0)) {
            re->wrong = *p == '(' ? "too many groups" : "an unmatched ')'";
        } else if (*p == ')') {
            qlora__re_close(re, &stack[depth]);
            atom = stack[depth].begin;
            depth--;
            p++;
        } else {
            p = qlora__re_single(re, p);
        }
        if (re->wrong == NULL) {
            p = qlora__re_repeat(re, p, atom);
        }
    }
    if (re->wrong == NULL && depth > 0) {
        re->wrong = "an unmatched '('";
    }
    if (re->wrong == NULL) {
        qlora__re_close(re, &stack[0]);
        re->step[re->count].op = QLORA__RE_MATCH;
        re->count++;
    }
}

typedef struct qlora__re_list {
    int32_t step[QLORA__RE_MAX];
    int32_t count;
    uint8_t seen[QLORA__RE_MAX];
} qlora__re_list;

// Adds a step and all steps that are reachable from it without consuming a character at text[at].
static QLORA__UNUSED void qlora__re_reach(const qlora__re* re, qlora__re_list* list, int32_t from,
                                          const char* text, size_t at) {
    int32_t stack[QLORA__RE_MAX];
    int32_t depth = 0;
    if (list->seen[from]) {
        return;
    }
    stack[depth++] = from;
    list->seen[from] = 1;
    while (depth > 0) {
        int32_t i = stack[--depth];
        qlora__re_step s = re->step[i];
        bool before = at > 0 && qlora__re_is_word(text[at - 1]);
        bool after = text[at] != '\0' && qlora__re_is_word(text[at]);
        bool go = s.op == QLORA__RE_SPLIT || (s.op == QLORA__RE_BEGIN && at == 0) ||
                  (s.op == QLORA__RE_END && text[at] == '\0') ||
                  (s.op == QLORA__RE_WORD && before != after);
        int32_t jump = s.op == QLORA__RE_SPLIT || s.op == QLORA__RE_JUMP ? i + s.arg : -1;
        if (go && !list->seen[i + 1]) {
            list->seen[i + 1] = 1;
            stack[depth++] = i + 1;
        }
        if (jump >= 0 && !list->seen[jump]) {
            list->seen[jump] = 1;
            stack[depth++] = jump;
        }
        if (s.op <= QLORA__RE_SET || s.op == QLORA__RE_MATCH) {
            list->step[list->count++] = i;
        }
    }
}

// Whether the pattern matches the whole text.
static QLORA__UNUSED bool qlora__re_match(const qlora__re* re, const char* text) {
    qlora__re_list lists[2];
    int now = 0;
    lists[0].count = 0;
    memset(lists[0].seen, 0, sizeof lists[0].seen);
    qlora__re_reach(re, &lists[0], 0, text, 0);
    for (size_t at = 0; text[at] != '\0'; at++) {
        qlora__re_list* next = &lists[1 - now];
        uint8_t c = (uint8_t)text[at];
        next->count = 0;
        memset(next->seen, 0, sizeof next->seen);
        for (int32_t k = 0; k < lists[now].count; k++) {
            int32_t i = lists[now].step[k];
            qlora__re_step s = re->step[i];
            if (s.op == QLORA__RE_ANY || (s.op == QLORA__RE_CHAR && s.arg == c) ||
                (s.op == QLORA__RE_SET && (re->set[s.arg][c / 8] >> c % 8 & 1) != 0)) {
                qlora__re_reach(re, next, i + 1, text, at + 1);
            }
        }
        now = 1 - now;
    }
    for (int32_t k = 0; k < lists[now].count; k++) {
        if (re->step[lists[now].step[k]].op == QLORA__RE_MATCH) {
            return true;
        }
    }
    return false;
}

#endif // QLORA__PART_REGEX

//@@ src/formats/peft.h

// ---- reading PEFT adapters ----------------------------------------------------------------------

typedef struct qlora__peft {
    qlora__map map;
    qlora__json json;
    int64_t rank;
    double alpha;
    double dropout;
    bool rslora;
    uint32_t targets; // tokens of the config; 0 if absent
    uint32_t excludes;
    uint32_t layers;
    uint32_t rank_pattern;
    uint32_t alpha_pattern;
    qlora__folder tensors;
    char path[QLORA__PATH_ROOM];
} qlora__peft;

// The adapter of one module; rank 0 means that the module is not adapted.
typedef struct qlora__peft_module {
    int64_t rank;
    double alpha;
    double scale;              // alpha / rank, or alpha / sqrt(rank) with rsLoRA
    const qlora__st_tensor* a; // [rank, in]; NULL if only a config was read
    const qlora__st_tensor* b; // [out, rank]
} qlora__peft_module;

static void qlora__peft_close(qlora__env* env, qlora__peft* p) {
    qlora__folder_close(env, &p->tensors);
    qlora__json_free(env, &p->json);
    qlora__map_close(env, &p->map);
}

// Matches a pattern of the config, with `before` and `after` added around it, against the complete
// name of a module.
static qlora_result qlora__peft_regex(qlora__env* env, const qlora__json* json, uint32_t pattern,
                                      const char* before, const char* after, const char* module,
                                      bool* matches) {
    char text[QLORA__RE_MAX + 32];
    qlora__re re;
    size_t head = strlen(before);
    memcpy(text, before, head);
    size_t length = qlora__json_string(json, pattern, text + head, QLORA__RE_MAX);
    if (length >= QLORA__RE_MAX) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "%s: a pattern has %llu bytes; the maximum is %d", json->label,
                               (unsigned long long)length, QLORA__RE_MAX - 1);
    }
    if (strlen(text + head) != length) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "%s: the pattern \"%.200s\" contains a NUL byte", json->label,
                               text + head);
    }
    memcpy(text + head + length, after, strlen(after) + 1);
    qlora__re_compile(&re, text);
    if (re.wrong != NULL) {
        text[head + length] = '\0';
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED, "%s: the pattern \"%.200s\" has %s",
                               json->label, text + head, re.wrong);
    }
    *matches = qlora__re_match(&re, module);
    return QLORA_OK;
}

// "all-linear", in any case.
static bool qlora__peft_is_all_linear(const qlora__json* json, uint32_t value) {
    static const char word[] = "all-linear";
    char text[16];
    bool same = qlora__json_string(json, value, text, sizeof text) == sizeof word - 1;
    for (size_t i = 0; same && word[i] != '\0'; i++) {
        same = text[i] == word[i] || (text[i] >= 'A' && text[i] <= 'Z' && text[i] + 32 == word[i]);
    }
    return same;
}

// Evaluates target_modules or exclude_modules: a list of names (complete, or the part after a dot),
// a regular expression, or "all-linear". *by_full_name: a list has the complete name.
static qlora_result qlora__peft_selects(qlora__env* env, const qlora__json* json, uint32_t select,
                                        const char* module, bool* selected, bool* by_full_name) {
    const qlora__json_token* t = &json->tokens[select];
    *selected = false;
    *by_full_name = false;
    if (t->kind == QLORA__JSON_STRING) {
        if (qlora__peft_is_all_linear(json, select)) {
            *selected = strcmp(qlora__plain_name(module), "lm_head") != 0;
            return QLORA_OK;
        }
        return qlora__peft_regex(env, json, select, "", "", module, selected);
    }
    size_t length = strlen(module);
    for (uint32_t k = select + 1; k < t->next && !*by_full_name; k = json->tokens[k].next) {
        size_t n = qlora__json_string(json, k, NULL, 0);
        bool whole = n == length || (n < length && module[length - n - 1] == '.');
        if (whole && qlora__json_equals(json, k, module + length - n, n)) {
            *selected = true;
            *by_full_name = n == length;
        }
    }
    return QLORA_OK;
}

// Evaluates layers_to_transform, a number or a list; the layer of a module is the number after
// "layers.".
static bool qlora__peft_layer_selected(const qlora__json* json, uint32_t select,
                                       const char* module) {
    const char* at = strstr(module, "layers.");
    int64_t layer = 0;
    if (at == NULL) {
        return false;
    }
    for (at += 7; *at >= '0' && *at <= '9' && layer < 100000; at++) {
        layer = layer * 10 + (*at - '0');
    }
    int64_t wanted = 0;
    if (qlora__json_kind_of(json, select) != QLORA__JSON_ARRAY) {
        return qlora__json_int(json, select, &wanted) && wanted == layer;
    }
    for (uint32_t k = select + 1; k < json->tokens[select].next; k = json->tokens[k].next) {
        if (qlora__json_int(json, k, &wanted) && wanted == layer) {
            return true;
        }
    }
    return false;
}

// Finds the value of the first key of a rank_pattern or alpha_pattern that matches; 0 if none does.
static qlora_result qlora__peft_pattern(qlora__env* env, const qlora__json* json, uint32_t pattern,
                                        const char* module, uint32_t* value) {
    *value = 0;
    if (pattern == 0) {
        return QLORA_OK;
    }
    for (uint32_t k = pattern + 1; k < json->tokens[pattern].next; k = json->tokens[k + 1].next) {
        bool matches = false;
        QLORA__TRY(qlora__peft_regex(env, json, k, "(.*\\.)?(", ")$", module, &matches));
        if (matches) {
            *value = k + 1;
            return QLORA_OK;
        }
    }
    return QLORA_OK;
}

// Finds the rank, alpha and scale of a module by its full name, such as
// "model.layers.3.self_attn.q_proj".
static qlora_result qlora__peft_lookup(qlora__env* env, const qlora__peft* p, const char* module,
                                       qlora__peft_module* out) {
    const qlora__json* json = &p->json;
    qlora__config_reader r;
    char shown[48];
    r.env = env;
    r.json = json;
    r.object = 0;
    bool selected = false;
    bool excluded = false;
    bool full = false;
    bool ignored = false;
    uint32_t value = 0;
    memset(out, 0, sizeof *out);
    QLORA__TRY(qlora__peft_selects(env, json, p->targets, module, &selected, &full));
    if (p->excludes != 0) {
        QLORA__TRY(qlora__peft_selects(env, json, p->excludes, module, &excluded, &ignored));
    }
    // As in PEFT, a module that is listed by its full name is adapted whatever its layer is.
    if (!selected || excluded ||
        (!full && p->layers != 0 && !qlora__peft_layer_selected(json, p->layers, module))) {
        return QLORA_OK;
    }
    int64_t rank = p->rank;
    double alpha = p->alpha;
    QLORA__TRY(qlora__peft_pattern(env, json, p->rank_pattern, module, &value));
    if (value != 0 && (!qlora__json_int(json, value, &rank) || rank < 1 || rank > 65536)) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: rank_pattern: rank %s must be an integer from 1 to 65536",
                               json->label, qlora__config_show(&r, value, shown));
    }
    QLORA__TRY(qlora__peft_pattern(env, json, p->alpha_pattern, module, &value));
    if (value != 0 && (!qlora__json_double(json, value, &alpha) || !(alpha > 0.0))) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: alpha_pattern: alpha %s must be greater than 0", json->label,
                               qlora__config_show(&r, value, shown));
    }
    out->rank = rank;
    out->alpha = alpha;
    out->scale = alpha / (p->rslora ? sqrt((double)rank) : (double)rank);
    return QLORA_OK;
}

// What becomes of each field of PEFT's LoraConfig (0.21). Fields that it does not list are refused,
// too, unless they are switched off: a later PEFT may compute something else with them.
typedef enum qlora__peft_field_kind {
    QLORA__PEFT_USED,   // read elsewhere
    QLORA__PEFT_NO_USE, // changes nothing that is computed from a saved adapter
    QLORA__PEFT_OFF     // must be absent, null, false or empty
} qlora__peft_field_kind;

static const struct {
    const char* name;
    qlora__peft_field_kind kind;
} qlora__peft_fields[] = {
    {"alpha_pattern", QLORA__PEFT_USED},
    {"alora_invocation_tokens", QLORA__PEFT_OFF},
    {"arrow_config", QLORA__PEFT_OFF},
    {"auto_mapping", QLORA__PEFT_NO_USE},
    {"base_model_name_or_path", QLORA__PEFT_NO_USE},
    {"bias", QLORA__PEFT_USED},
    {"corda_config", QLORA__PEFT_NO_USE}, // these four only with the init_lora_weights of their
    {"eva_config", QLORA__PEFT_NO_USE},   // name
    {"loftq_config", QLORA__PEFT_NO_USE},
    {"lora_ga_config", QLORA__PEFT_NO_USE},
    {"ensure_weight_tying", QLORA__PEFT_NO_USE}, // of embeddings, whose adapters are refused
    {"exclude_modules", QLORA__PEFT_USED},
    {"fan_in_fan_out", QLORA__PEFT_OFF},
    {"inference_mode", QLORA__PEFT_NO_USE},
    {"init_lora_weights", QLORA__PEFT_USED},
    {"kasa_config", QLORA__PEFT_OFF},
    {"layer_replication", QLORA__PEFT_OFF},
    {"layers_pattern", QLORA__PEFT_USED},
    {"layers_to_transform", QLORA__PEFT_USED},
    {"lora_alpha", QLORA__PEFT_USED},
    {"lora_bias", QLORA__PEFT_OFF},
    {"lora_dropout", QLORA__PEFT_USED},
    {"megatron_config", QLORA__PEFT_OFF},
    {"megatron_core", QLORA__PEFT_NO_USE}, // only with megatron_config
    {"modules_to_save", QLORA__PEFT_OFF},
    {"monteclora_config", QLORA__PEFT_OFF},
    {"peft_type", QLORA__PEFT_USED},
    {"peft_version", QLORA__PEFT_NO_USE},
    {"qalora_group_size", QLORA__PEFT_NO_USE}, // only with use_qalora
    {"r", QLORA__PEFT_USED},
    {"rank_pattern", QLORA__PEFT_USED},
    {"revision", QLORA__PEFT_NO_USE},
    {"runtime_config", QLORA__PEFT_NO_USE}, // where PEFT keeps its tensors
    {"target_modules", QLORA__PEFT_USED},
    {"target_parameters", QLORA__PEFT_OFF},
    {"task_type", QLORA__PEFT_NO_USE},
    {"trainable_token_indices", QLORA__PEFT_OFF},
    {"use_bdlora", QLORA__PEFT_OFF},
    {"use_dora", QLORA__PEFT_OFF},
    {"use_qalora", QLORA__PEFT_OFF},
    {"use_rslora", QLORA__PEFT_USED},
    {"velora_config", QLORA__PEFT_OFF},
};

static qlora_result qlora__peft_check_field(const qlora__config_reader* r, uint32_t key) {
    uint32_t value = key + 1;
    const qlora__json_token* t = &r->json->tokens[value];
    bool nested = t->kind == QLORA__JSON_ARRAY || t->kind == QLORA__JSON_OBJECT;
    bool off =
        t->kind == QLORA__JSON_NULL || t->kind == QLORA__JSON_FALSE || (nested && t->count == 0);
    for (size_t i = 0; i < sizeof qlora__peft_fields / sizeof qlora__peft_fields[0]; i++) {
        if (qlora__json_is(r->json, key, qlora__peft_fields[i].name)) {
            return off || qlora__peft_fields[i].kind != QLORA__PEFT_OFF
                       ? QLORA_OK
                       : qlora__config_refuse(r, qlora__peft_fields[i].name, value,
                                              "only plain LoRA is supported");
        }
    }
    char name[64];
    qlora__json_string(r->json, key, name, sizeof name);
    return off ? QLORA_OK : qlora__config_refuse(r, name, value, "the field is not known");
}

// How the adapter was initialised. Some ways also change the weights of the base, and PEFT changes
// them again when it loads such an adapter: without that, its numbers mean another model. PEFT
// itself turns them into plain LoRA adapters, whose file says true.
static qlora_result qlora__peft_check_init(const qlora__config_reader* r) {
    static const char* const plain[] = {"gaussian", "eva", "orthogonal", "mica"};
    uint32_t value = qlora__config_find(r, "init_lora_weights");
    if (value == 0 || qlora__json_kind_of(r->json, value) == QLORA__JSON_TRUE ||
        qlora__json_kind_of(r->json, value) == QLORA__JSON_FALSE) {
        return QLORA_OK;
    }
    for (size_t i = 0; i < sizeof plain / sizeof plain[0]; i++) {
        if (qlora__json_is(r->json, value, plain[i])) {
            return QLORA_OK;
        }
    }
    return qlora__config_refuse(r, "init_lora_weights", value,
                                "it changes the base; save the adapter with PEFT's "
                                "path_initial_model_for_weight_conversion");
}

// Rejects what changes the computation in ways that are not supported.
static qlora_result qlora__peft_check_switches(const qlora__config_reader* r) {
    for (uint32_t k = 1; k < r->json->tokens[0].next; k = r->json->tokens[k + 1].next) {
        QLORA__TRY(qlora__peft_check_field(r, k));
    }
    QLORA__TRY(qlora__peft_check_init(r));
    uint32_t bias = qlora__config_find(r, "bias");
    if (bias != 0 && !qlora__json_is(r->json, bias, "none")) {
        return qlora__config_refuse(r, "bias", bias, "only \"none\" is supported");
    }
    uint32_t pattern = qlora__config_find(r, "layers_pattern");
    if (pattern != 0 && r->json->tokens[pattern].count != 0 &&
        r->json->tokens[pattern].kind == QLORA__JSON_ARRAY) {
        pattern = qlora__json_at(r->json, pattern, 0);
    }
    if (pattern != 0 && r->json->tokens[pattern].end - r->json->tokens[pattern].begin > 0 &&
        r->json->tokens[pattern].kind == QLORA__JSON_STRING &&
        !qlora__json_is(r->json, pattern, "layers")) {
        return qlora__config_refuse(r, "layers_pattern", pattern, "only \"layers\" is supported");
    }
    return QLORA_OK;
}

// Checks a list of strings or a single string.
static qlora_result qlora__peft_check_names(const qlora__config_reader* r, const char* key,
                                            uint32_t* out) {
    char shown[48];
    uint32_t value = qlora__config_find(r, key);
    *out = value;
    if (value == 0) {
        return QLORA_OK;
    }
    const qlora__json_token* t = &r->json->tokens[value];
    bool good = t->kind == QLORA__JSON_STRING || t->kind == QLORA__JSON_ARRAY;
    for (uint32_t k = value + 1; good && k < t->next; k = r->json->tokens[k].next) {
        good = r->json->tokens[k].kind == QLORA__JSON_STRING;
    }
    if (!good) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT,
                               "%s: %s is %s; it must be a list of names or a "
                               "regular expression",
                               r->json->label, key, qlora__config_show(r, value, shown));
    }
    return QLORA_OK;
}

static qlora_result qlora__peft_check_object(const qlora__config_reader* r, const char* key,
                                             uint32_t* out) {
    *out = qlora__config_find(r, key);
    return *out != 0 ? qlora__config_need_object(r, key, *out) : QLORA_OK;
}

// layers_to_transform, a number or a list of numbers, only beside a list of modules. An empty list
// means all layers, as in PEFT.
static qlora_result qlora__peft_check_layers(const qlora__config_reader* r, qlora__peft* p) {
    char shown[48];
    uint32_t layers = qlora__config_find(r, "layers_to_transform");
    const qlora__json_token* t = &r->json->tokens[layers];
    bool list = layers != 0 && t->kind == QLORA__JSON_ARRAY;
    int64_t ignored = 0;
    bool good = list || layers == 0 || qlora__json_int(r->json, layers, &ignored);
    for (uint32_t k = layers + 1; list && good && k < t->next; k = r->json->tokens[k].next) {
        good = qlora__json_int(r->json, k, &ignored);
    }
    if (!good) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT,
                               "%s: layers_to_transform is %s; it must be an integer or a list of "
                               "integers",
                               r->json->label, qlora__config_show(r, layers, shown));
    }
    if (layers != 0 && qlora__json_kind_of(r->json, p->targets) == QLORA__JSON_STRING) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT,
                               "%s: layers_to_transform is set, but target_modules is not a list",
                               r->json->label);
    }
    p->layers = list && t->count == 0 ? 0 : layers;
    return QLORA_OK;
}

static qlora_result qlora__peft_from_json(qlora__env* env, qlora__peft* p) {
    qlora__config_reader r;
    char shown[48];
    r.env = env;
    r.json = &p->json;
    r.object = 0;
    if (qlora__json_kind_of(r.json, 0) != QLORA__JSON_OBJECT) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: expected a JSON object", r.json->label);
    }
    uint32_t type = qlora__config_find(&r, "peft_type");
    if (type == 0) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: peft_type is missing", r.json->label);
    }
    if (!qlora__json_is(r.json, type, "LORA")) {
        return qlora__config_refuse(&r, "peft_type", type, "only LORA is supported");
    }
    QLORA__TRY(qlora__peft_check_switches(&r));
    QLORA__TRY(qlora__config_int(&r, "r", 8, 1, 65536, &p->rank));
    QLORA__TRY(qlora__config_positive(&r, "lora_alpha", 8.0, &p->alpha));
    QLORA__TRY(qlora__config_bool(&r, "use_rslora", false, &p->rslora));
    uint32_t dropout = qlora__config_find(&r, "lora_dropout");
    if (dropout != 0 && (!qlora__json_double(r.json, dropout, &p->dropout) || p->dropout < 0.0 ||
                         p->dropout >= 1.0)) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: lora_dropout is %s; it must be at least 0 and less than 1",
                               r.json->label, qlora__config_show(&r, dropout, shown));
    }
    QLORA__TRY(qlora__peft_check_names(&r, "target_modules", &p->targets));
    QLORA__TRY(qlora__peft_check_names(&r, "exclude_modules", &p->excludes));
    if (p->targets == 0) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: target_modules is missing",
                               r.json->label);
    }
    QLORA__TRY(qlora__peft_check_layers(&r, p));
    QLORA__TRY(qlora__peft_check_object(&r, "rank_pattern", &p->rank_pattern));
    return qlora__peft_check_object(&r, "alpha_pattern", &p->alpha_pattern);
}

// Parses adapter_config.json from memory, which must outlive *p. Call qlora__peft_close afterwards.
static QLORA__UNUSED qlora_result qlora__peft_parse(qlora__env* env, const char* label,
                                                    const void* text, uint64_t size,
                                                    qlora__peft* p) {
    memset(p, 0, sizeof *p);
    QLORA__TRY(qlora__json_parse(env, label, text, size, QLORA__JSON_UNIQUE, &p->json));
    qlora_result result = qlora__peft_from_json(env, p);
    if (result != QLORA_OK) {
        qlora__peft_close(env, p);
    }
    return result;
}

// The name of a module's tensor in adapter_model.safetensors; `which` is 'A' or 'B'.
static qlora_result qlora__peft_key(qlora__env* env, const char* module, char which,
                                    char out[320]) {
    int n = snprintf(out, 320, "base_model.model.%s.lora_%c.weight", module, which);
    return n > 0 && n < 320 ? QLORA_OK
                            : qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                                              "the module name %.60s... is too long", module);
}

// Checks the type and shape of lora_A (which = 0) or lora_B (which = 1).
static qlora_result qlora__peft_check_matrix(qlora__env* env, const qlora__peft* p,
                                             const qlora__st_tensor* t, int which, int64_t rank) {
    char shape[96];
    if (!qlora__st_is_float(t)) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: %s has dtype %s; supported are F32, BF16 and F16",
                               p->tensors.dir, t->name, qlora__st_dtypes[t->dtype].name);
    }
    if (t->rank != 2 || t->shape[which] != rank) {
        return qlora__env_fail(
            env, QLORA_ERR_FORMAT, "%s: %s has shape %s; adapter_config.json gives it rank %lld",
            p->tensors.dir, t->name, qlora__shape_text(t->shape, t->rank, shape), (long long)rank);
    }
    return QLORA_OK;
}

// Checks one tensor of the adapter: a matrix of a module that the config targets, with the rank of
// the config, whose partner exists.
static qlora_result qlora__peft_check_tensor(qlora__env* env, const qlora__peft* p,
                                             const qlora__st_tensor* t) {
    static const char prefix[] = "base_model.model.";
    static const char* const ends[2] = {".lora_A.weight", ".lora_B.weight"};
    char module[320];
    char partner[320];
    qlora__peft_module found;
    size_t length = strlen(t->name);
    size_t front = strncmp(t->name, prefix, sizeof prefix - 1) == 0 ? sizeof prefix - 1 : 0;
    int which = 0;
    while (which < 2 && (length < front + 14 || strcmp(t->name + length - 14, ends[which]) != 0)) {
        which++;
    }
    if (which == 2 || length >= sizeof module) {
        return qlora__env_fail(
            env, QLORA_ERR_UNSUPPORTED,
            "%s: %s: only lora_A and lora_B matrices of linear layers are supported",
            p->tensors.dir, t->name);
    }
    memcpy(module, t->name + front, length - front - 14);
    module[length - front - 14] = '\0';
    QLORA__TRY(qlora__peft_lookup(env, p, module, &found));
    if (found.rank == 0) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: %s is not targeted by adapter_config.json", p->tensors.dir,
                               t->name);
    }
    memcpy(partner, t->name, length + 1);
    partner[length - 8] = which == 0 ? 'B' : 'A';
    if (qlora__folder_find(&p->tensors, partner) == NULL) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: %s is missing", p->tensors.dir, partner);
    }
    return qlora__peft_check_matrix(env, p, t, which, found.rank);
}

static qlora_result qlora__peft_open_files(qlora__env* env, const char* dir, qlora__peft* p) {
    char path[QLORA__PATH_ROOM];
    QLORA__TRY(qlora__path_join(env, dir, "adapter_config.json", p->path));
    QLORA__TRY(qlora__map_open(env, p->path, &p->map));
    QLORA__TRY(
        qlora__json_parse(env, p->path, p->map.data, p->map.size, QLORA__JSON_UNIQUE, &p->json));
    QLORA__TRY(qlora__peft_from_json(env, p));
    QLORA__TRY(qlora__path_join(env, dir, "adapter_model.safetensors", path));
    QLORA__TRY(qlora__path_join(env, "", dir, p->tensors.dir));
    QLORA__TRY(qlora__folder_open_single(env, &p->tensors, path));
    for (uint32_t i = 0; i < p->tensors.count; i++) {
        QLORA__TRY(qlora__peft_check_tensor(env, p, p->tensors.entries[i].tensor));
    }
    return QLORA_OK;
}

// Opens an adapter folder and checks its consistency: every tensor is half of a pair, is targeted
// by the config and has its rank. After a failure there is nothing to close.
static QLORA__UNUSED qlora_result qlora__peft_open(qlora__env* env, const char* dir,
                                                   qlora__peft* p) {
    memset(p, 0, sizeof *p);
    qlora_result result = qlora__peft_open_files(env, dir, p);
    if (result != QLORA_OK) {
        qlora__peft_close(env, p);
    }
    return result;
}

// Finds the matrices of the adapter for a module [out, in]; the rank is 0 if the config does not
// target it.
static QLORA__UNUSED qlora_result qlora__peft_find(qlora__env* env, const qlora__peft* p,
                                                   const char* module, int64_t out_size,
                                                   int64_t in_size, qlora__peft_module* out) {
    char key[320];
    qlora__peft_module m;
    QLORA__TRY(qlora__peft_lookup(env, p, module, &m));
    if (m.rank > 0) {
        QLORA__TRY(qlora__peft_key(env, module, 'A', key));
        QLORA__TRY(qlora__folder_need(env, &p->tensors, key, m.rank, in_size, &m.a));
        QLORA__TRY(qlora__peft_key(env, module, 'B', key));
        QLORA__TRY(qlora__folder_need(env, &p->tensors, key, out_size, m.rank, &m.b));
    }
    *out = m;
    return QLORA_OK;
}

// ---- writing PEFT adapters ----------------------------------------------------------------------

typedef struct qlora__peft_override {
    const char* module; // full name or a suffix of it
    int64_t rank;       // 0 = no override
    double alpha;       // 0 = no override
} qlora__peft_override;

typedef struct qlora__peft_desc {
    const char* base_name; // name or folder of the base model; NULL = null in the file
    int64_t rank;
    double alpha;
    double dropout;
    bool rslora;
    const char* const* targets;
    uint32_t target_count;
    const int64_t* layers; // layers_to_transform; layer_count 0 = all
    uint32_t layer_count;
    const qlora__peft_override* overrides;
    uint32_t override_count;
} qlora__peft_desc;

// PEFT declares alpha as an integer but accepts a float.
static void qlora__peft_write_alpha(qlora__json_writer* w, const char* key, double alpha) {
    if (alpha >= 0.0 && alpha < 1e15 && (double)(int64_t)alpha == alpha) {
        qlora__json_write_int(w, key, (int64_t)alpha);
    } else {
        qlora__json_write_double(w, key, alpha);
    }
}

// The keys of a pattern are regular expressions, so dots in a name are escaped.
static void qlora__peft_write_pattern(qlora__json_writer* w, const char* name,
                                      const qlora__peft_desc* d, bool ranks) {
    qlora__json_write_open(w, name, '{');
    for (uint32_t i = 0; i < d->override_count; i++) {
        const qlora__peft_override* o = &d->overrides[i];
        char key[640];
        size_t n = 0;
        for (const char* c = o->module; *c != '\0' && n < sizeof key - 2; c++) {
            if (*c == '.') {
                key[n++] = '\\';
            }
            key[n++] = *c;
        }
        key[n] = '\0';
        if (ranks && o->rank > 0) {
            qlora__json_write_int(w, key, o->rank);
        } else if (!ranks && o->alpha > 0.0) {
            qlora__peft_write_alpha(w, key, o->alpha);
        }
    }
    qlora__json_write_close(w, '}');
}

// Writes the text of adapter_config.json: the keys that every version of PEFT knows, sorted, with
// an indent of two spaces.
static void qlora__peft_write_text(qlora__string* text, const qlora__peft_desc* d) {
    qlora__json_writer w;
    qlora__json_write_begin(&w, text, 2);
    qlora__json_write_open(&w, NULL, '{');
    qlora__peft_write_pattern(&w, "alpha_pattern", d, false);
    if (d->base_name != NULL) {
        qlora__json_write_string(&w, "base_model_name_or_path", d->base_name);
    } else {
        qlora__json_write_word(&w, "base_model_name_or_path", "null");
    }
    qlora__json_write_string(&w, "bias", "none");
    qlora__json_write_word(&w, "fan_in_fan_out", "false");
    qlora__json_write_word(&w, "inference_mode", "true");
    qlora__json_write_word(&w, "init_lora_weights", "true");
    qlora__json_write_word(&w, "layers_pattern", "null");
    if (d->layer_count > 0) {
        qlora__json_write_open(&w, "layers_to_transform", '[');
        for (uint32_t i = 0; i < d->layer_count; i++) {
            qlora__json_write_int(&w, NULL, d->layers[i]);
        }
        qlora__json_write_close(&w, ']');
    } else {
        qlora__json_write_word(&w, "layers_to_transform", "null");
    }
    qlora__peft_write_alpha(&w, "lora_alpha", d->alpha);
    qlora__json_write_double(&w, "lora_dropout", d->dropout);
    qlora__json_write_word(&w, "modules_to_save", "null");
    qlora__json_write_string(&w, "peft_type", "LORA");
    qlora__json_write_int(&w, "r", d->rank);
    qlora__peft_write_pattern(&w, "rank_pattern", d, true);
    qlora__json_write_word(&w, "revision", "null");
    qlora__json_write_open(&w, "target_modules", '[');
    for (uint32_t i = 0; i < d->target_count; i++) {
        qlora__json_write_string(&w, NULL, d->targets[i]);
    }
    qlora__json_write_close(&w, ']');
    qlora__json_write_string(&w, "task_type", "CAUSAL_LM");
    qlora__json_write_word(&w, "use_dora", "false");
    qlora__json_write_word(&w, "use_rslora", d->rslora ? "true" : "false");
    qlora__json_write_close(&w, '}');
}

// Writes adapter_config.json into `dir`. The matrices are written to the same folder with
// qlora__st_write_*, under the names of qlora__peft_key; write them first, so that a config is
// never written before its weights.
static QLORA__UNUSED qlora_result qlora__peft_write_config(qlora__env* env, const char* dir,
                                                           const qlora__peft_desc* d) {
    char path[QLORA__PATH_ROOM];
    qlora__string text;
    QLORA__TRY(qlora__path_join(env, dir, "adapter_config.json", path));
    qlora__string_begin(env, &text);
    qlora__peft_write_text(&text, d);
    qlora_result result = text.result;
    if (result == QLORA_OK) {
        result = qlora__file_write(env, path, text.data, text.size);
    }
    qlora__string_free(&text);
    return result;
}

//@@ src/formats/gguf.h

// ---- writing GGUF adapters ----------------------------------------------------------------------

#define QLORA__GGUF_ALIGN 32u
#define QLORA__GGUF_NAME 64

// A matrix of `rows` x `cols` floats, row-major: A as [rank, in], B as [out, rank].
typedef struct qlora__gguf_entry {
    char name[QLORA__GGUF_NAME];
    int64_t rows;
    int64_t cols;
} qlora__gguf_entry;

typedef struct qlora__gguf_writer {
    qlora__out out;
    const qlora__gguf_entry* entries; // owned by the caller; must outlive the writer
    uint32_t count;
    uint32_t current;
    uint64_t left; // remaining bytes of the current tensor
} qlora__gguf_writer;

// The name of a module's matrix: "model.layers.0.self_attn.q_proj" and 'a' give
// "blk.0.attn_q.weight.lora_a".
static QLORA__UNUSED qlora_result qlora__gguf_name(qlora__env* env, const char* module, char which,
                                                   char out[QLORA__GGUF_NAME]) {
    static const struct {
        const char* hf;
        const char* gguf;
    } names[7] = {{"self_attn.q_proj", "attn_q"}, {"self_attn.k_proj", "attn_k"},
                  {"self_attn.v_proj", "attn_v"}, {"self_attn.o_proj", "attn_output"},
                  {"mlp.gate_proj", "ffn_gate"},  {"mlp.up_proj", "ffn_up"},
                  {"mlp.down_proj", "ffn_down"}};
    const char* plain = qlora__plain_name(module);
    unsigned layer = 0;
    if (strncmp(plain, "layers.", 7) == 0 && plain[7] >= '0' && plain[7] <= '9') {
        const char* at = plain + 7;
        for (; *at >= '0' && *at <= '9' && layer < 100000; at++) {
            layer = layer * 10 + (unsigned)(*at - '0');
        }
        for (int i = 0; i < 7 && *at == '.'; i++) {
            if (strcmp(at + 1, names[i].hf) == 0) {
                snprintf(out, QLORA__GGUF_NAME, "blk.%u.%s.weight.lora_%c", layer, names[i].gguf,
                         which);
                return QLORA_OK;
            }
        }
    }
    return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED, "%s cannot be stored in a GGUF adapter",
                           module);
}

// The name that llama.cpp uses for the architecture of a family.
static QLORA__UNUSED const char* qlora__gguf_architecture(qlora_family family) {
    for (int i = 0; i < QLORA__FAMILY_COUNT; i++) {
        if (qlora__families[i].family == family) {
            return qlora__families[i].gguf_name;
        }
    }
    return "";
}

// For its "llama" architecture, llama.cpp rotates pairs of neighbours where Hugging Face files
// rotate the two halves of a head. Returns the row of our matrix that becomes row `row` of a q or k
// matrix.
static QLORA__UNUSED int64_t qlora__gguf_source_row(qlora_family family, int64_t row,
                                                    int64_t head_dim) {
    if (family != QLORA_FAMILY_LLAMA && family != QLORA_FAMILY_MISTRAL) {
        return row;
    }
    int64_t in_head = row % head_dim;
    return row - in_head + in_head % 2 * (head_dim / 2) + in_head / 2;
}

// llama.cpp scales by alpha / rank and does not support rsLoRA. Returns the alpha to write so that
// its scale equals ours.
static QLORA__UNUSED double qlora__gguf_alpha(double alpha, int64_t rank, bool rslora) {
    return rslora ? alpha * sqrt((double)rank) : alpha;
}

// The file has a single alpha. Returns the factor for B of a module whose scale differs.
static QLORA__UNUSED double qlora__gguf_fold(double scale, double file_alpha, int64_t rank) {
    return scale * (double)rank / file_alpha;
}

static void qlora__gguf_u32(qlora__string* t, uint32_t value) {
    uint8_t bytes[8];
    qlora__store_u64(bytes, value);
    qlora__string_add(t, bytes, 4);
}

static void qlora__gguf_u64(qlora__string* t, uint64_t value) {
    uint8_t bytes[8];
    qlora__store_u64(bytes, value);
    qlora__string_add(t, bytes, 8);
}

static void qlora__gguf_string(qlora__string* t, const char* string) {
    qlora__gguf_u64(t, strlen(string));
    qlora__string_puts(t, string);
}

static void qlora__gguf_pair(qlora__string* t, const char* key, const char* value) {
    qlora__gguf_string(t, key);
    qlora__gguf_u32(t, 8); // type: string
    qlora__gguf_string(t, value);
}

static uint64_t qlora__gguf_bytes(const qlora__gguf_entry* e) {
    return (uint64_t)e->rows * (uint64_t)e->cols * 4;
}

static uint64_t qlora__gguf_padded(uint64_t bytes) {
    return (bytes + QLORA__GGUF_ALIGN - 1) / QLORA__GGUF_ALIGN * QLORA__GGUF_ALIGN;
}

static void qlora__gguf_write_header(qlora__string* t, const char* architecture, float alpha,
                                     const qlora__gguf_entry* entries, uint32_t count) {
    uint32_t bits = 0;
    uint64_t at = 0;
    memcpy(&bits, &alpha, 4);
    qlora__string_puts(t, "GGUF");
    qlora__gguf_u32(t, 3);
    qlora__gguf_u64(t, count);
    qlora__gguf_u64(t, 5);
    qlora__gguf_pair(t, "general.architecture", architecture);
    qlora__gguf_pair(t, "general.type", "adapter");
    qlora__gguf_pair(t, "adapter.type", "lora");
    qlora__gguf_string(t, "adapter.lora.alpha");
    qlora__gguf_u32(t, 6); // type: float32
    qlora__gguf_u32(t, bits);
    qlora__gguf_string(t, "general.alignment");
    qlora__gguf_u32(t, 4); // type: uint32
    qlora__gguf_u32(t, QLORA__GGUF_ALIGN);
    for (uint32_t i = 0; i < count; i++) {
        qlora__gguf_string(t, entries[i].name);
        qlora__gguf_u32(t, 2);
        qlora__gguf_u64(t, (uint64_t)entries[i].cols); // innermost first
        qlora__gguf_u64(t, (uint64_t)entries[i].rows);
        qlora__gguf_u32(t, 0); // type: F32
        qlora__gguf_u64(t, at);
        at += qlora__gguf_padded(qlora__gguf_bytes(&entries[i]));
    }
    while (t->result == QLORA_OK && t->size % QLORA__GGUF_ALIGN != 0) {
        qlora__string_add(t, "", 1);
    }
}

static void qlora__gguf_abort(qlora__env* env, qlora__gguf_writer* w) {
    qlora__out_abort(env, &w->out);
    memset(w, 0, sizeof *w);
}

// Starts a LoRA file. Then write the floats of each entry in turn, in pieces of any size, and
// commit or abort. `alpha` is the result of qlora__gguf_alpha.
static QLORA__UNUSED qlora_result qlora__gguf_begin(qlora__env* env, const char* path,
                                                    const char* architecture, double alpha,
                                                    const qlora__gguf_entry* entries,
                                                    uint32_t count, qlora__gguf_writer* w) {
    qlora__string text;
    memset(w, 0, sizeof *w);
    qlora__string_begin(env, &text);
    qlora__gguf_write_header(&text, architecture, (float)alpha, entries, count);
    qlora_result result = text.result;
    if (result == QLORA_OK) {
        result = qlora__out_begin(env, path, &w->out);
    }
    if (result == QLORA_OK) {
        result = qlora__out_write(env, &w->out, text.data, text.size);
    }
    qlora__string_free(&text);
    if (result != QLORA_OK) {
        qlora__gguf_abort(env, w);
        return result;
    }
    w->entries = entries;
    w->count = count;
    w->left = count > 0 ? qlora__gguf_bytes(&entries[0]) : 0;
    return QLORA_OK;
}

static QLORA__UNUSED qlora_result qlora__gguf_write(qlora__env* env, qlora__gguf_writer* w,
                                                    const void* bytes, size_t size) {
    uint8_t zeros[QLORA__GGUF_ALIGN];
    const uint8_t* p = (const uint8_t*)bytes;
    memset(zeros, 0, sizeof zeros);
    while (size > 0) {
        if (w->current == w->count) {
            return qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                                   "GGUF: more bytes than the header declares");
        }
        size_t piece = size < w->left ? size : (size_t)w->left;
        QLORA__TRY(qlora__out_write(env, &w->out, p, piece));
        p += piece;
        size -= piece;
        w->left -= piece;
        if (w->left == 0) {
            uint64_t total = qlora__gguf_bytes(&w->entries[w->current]);
            size_t pad = (size_t)(qlora__gguf_padded(total) - total);
            QLORA__TRY(qlora__out_write(env, &w->out, zeros, pad));
            w->current++;
            w->left = w->current < w->count ? qlora__gguf_bytes(&w->entries[w->current]) : 0;
        }
    }
    return QLORA_OK;
}

static QLORA__UNUSED qlora_result qlora__gguf_commit(qlora__env* env, qlora__gguf_writer* w) {
    qlora_result result = QLORA_OK;
    if (w->current != w->count) {
        result = qlora__env_fail(env, QLORA_ERR_ARGUMENT, "GGUF: %s was not written completely",
                                 w->entries[w->current].name);
    } else {
        result = qlora__out_commit(env, &w->out);
    }
    qlora__gguf_abort(env, w);
    return result;
}

//@@ src/qlora.h

#endif // QLORA_NO_MODEL

#ifndef QLORA_NO_CUDA

//@@ src/driver/driver.h

// ---- the CUDA driver and cuBLAS: values, entry points, error texts ------------------------------

typedef int qlora__CUresult;
typedef int qlora__CUdevice;
typedef unsigned long long qlora__CUdeviceptr;
typedef int qlora__cublasStatus;

// clang-format off
// Values from cuda.h and cublas_api.h; a test compares them with NVIDIA's headers if those are
// installed.
#define QLORA__CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT 16
#define QLORA__CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR 75
#define QLORA__CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR 76
#define QLORA__CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN 97
#define QLORA__CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES 8
#define QLORA__CU_STREAM_NON_BLOCKING 1
#define QLORA__CU_EVENT_DISABLE_TIMING 2
#define QLORA__CUDA_ERROR_NOT_READY 600
#define QLORA__CU_STREAM_CAPTURE_MODE_THREAD_LOCAL 1
#define QLORA__CU_JIT_INFO_LOG_BUFFER 3
#define QLORA__CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES 4
#define QLORA__CU_JIT_ERROR_LOG_BUFFER 5
#define QLORA__CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES 6
#define QLORA__CU_GRAPH_NODE_TYPE_MEMSET 2
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
#define QLORA__CUBLAS_COMPUTE_32F_FAST_TF32 77 // not 74, which is FAST_16F
#define QLORA__CUBLAS_GEMM_DEFAULT (-1)

// required, result type, field, symbol, parameters
#define QLORA__CUDA_SYMBOLS(X)                                                                     \
    X(1, qlora__CUresult, Init, "cuInit", (unsigned))                                              \
    X(1, qlora__CUresult, DriverGetVersion, "cuDriverGetVersion", (int*))                          \
    X(1, qlora__CUresult, GetErrorName, "cuGetErrorName", (qlora__CUresult, const char**))         \
    X(1, qlora__CUresult, DeviceGetCount, "cuDeviceGetCount", (int*))                              \
    X(1, qlora__CUresult, DeviceGet, "cuDeviceGet", (qlora__CUdevice*, int))                       \
    X(1, qlora__CUresult, DeviceGetName, "cuDeviceGetName", (char*, int, qlora__CUdevice))         \
    X(1, qlora__CUresult, DeviceGetAttribute, "cuDeviceGetAttribute", (int*, int, qlora__CUdevice))\
    X(1, qlora__CUresult, DeviceTotalMem, "cuDeviceTotalMem_v2", (size_t*, qlora__CUdevice))       \
    X(1, qlora__CUresult, DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain",                      \
      (void**, qlora__CUdevice))                                                                   \
    X(1, qlora__CUresult, DevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2",                 \
      (qlora__CUdevice))                                                                           \
    X(1, qlora__CUresult, CtxGetDevice, "cuCtxGetDevice", (qlora__CUdevice*))                      \
    X(1, qlora__CUresult, CtxPushCurrent, "cuCtxPushCurrent_v2", (void*))                          \
    X(1, qlora__CUresult, CtxPopCurrent, "cuCtxPopCurrent_v2", (void**))                           \
    X(1, qlora__CUresult, StreamCreate, "cuStreamCreate", (void**, unsigned))                      \
    X(0, qlora__CUresult, StreamCreateWithPriority, "cuStreamCreateWithPriority",                  \
      (void**, unsigned, int))                                                                     \
    X(1, qlora__CUresult, StreamDestroy, "cuStreamDestroy_v2", (void*))                            \
    X(1, qlora__CUresult, StreamSynchronize, "cuStreamSynchronize", (void*))                       \
    X(1, qlora__CUresult, StreamGetCtx, "cuStreamGetCtx", (void*, void**))                         \
    X(1, qlora__CUresult, StreamWaitEvent, "cuStreamWaitEvent", (void*, void*, unsigned))          \
    X(1, qlora__CUresult, StreamBeginCapture, "cuStreamBeginCapture_v2", (void*, int))             \
    X(1, qlora__CUresult, StreamEndCapture, "cuStreamEndCapture", (void*, void**))                 \
    X(1, qlora__CUresult, GraphInstantiate, "cuGraphInstantiateWithFlags",                         \
      (void**, void*, unsigned long long))                                                         \
    X(1, qlora__CUresult, GraphGetNodes, "cuGraphGetNodes", (void*, void**, size_t*))              \
    X(1, qlora__CUresult, GraphLaunch, "cuGraphLaunch", (void*, void*))                            \
    X(0, qlora__CUresult, GraphNodeGetType, "cuGraphNodeGetType", (void*, int*))                   \
    X(0, qlora__CUresult, GraphMemsetNodeGetParams, "cuGraphMemsetNodeGetParams", (void*, void*))  \
    X(0, qlora__CUresult, GraphNodeGetDependencies, "cuGraphNodeGetDependencies_v2",               \
      (void*, void**, void*, size_t*))                                                             \
    X(0, qlora__CUresult, GraphNodeGetDependentNodes, "cuGraphNodeGetDependentNodes_v2",           \
      (void*, void**, void*, size_t*))                                                             \
    X(0, qlora__CUresult, GraphAddKernelNode, "cuGraphAddKernelNode_v2",                           \
      (void**, void*, void* const*, size_t, const void*))                                          \
    X(0, qlora__CUresult, GraphAddDependencies, "cuGraphAddDependencies_v2",                       \
      (void*, void* const*, void* const*, const void*, size_t))                                    \
    X(0, qlora__CUresult, GraphDestroyNode, "cuGraphDestroyNode", (void*))                         \
    X(1, qlora__CUresult, GraphDestroy, "cuGraphDestroy", (void*))                                 \
    X(1, qlora__CUresult, GraphExecDestroy, "cuGraphExecDestroy", (void*))                         \
    X(1, qlora__CUresult, ModuleLoadData, "cuModuleLoadData", (void**, const void*))               \
    X(1, qlora__CUresult, ModuleLoadDataEx, "cuModuleLoadDataEx",                                  \
      (void**, const void*, unsigned, int*, void**))                                               \
    X(1, qlora__CUresult, ModuleGetFunction, "cuModuleGetFunction", (void**, void*, const char*))  \
    X(1, qlora__CUresult, ModuleUnload, "cuModuleUnload", (void*))                                 \
    X(1, qlora__CUresult, FuncSetAttribute, "cuFuncSetAttribute", (void*, int, int))               \
    X(1, qlora__CUresult, LaunchKernel, "cuLaunchKernel",                                          \
      (void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, \
       void**))                                                                                    \
    X(1, qlora__CUresult, MemAlloc, "cuMemAlloc_v2", (qlora__CUdeviceptr*, size_t))                \
    X(1, qlora__CUresult, MemFree, "cuMemFree_v2", (qlora__CUdeviceptr))                           \
    X(1, qlora__CUresult, MemHostAlloc, "cuMemHostAlloc", (void**, size_t, unsigned))              \
    X(1, qlora__CUresult, MemFreeHost, "cuMemFreeHost", (void*))                                   \
    X(1, qlora__CUresult, MemGetInfo, "cuMemGetInfo_v2", (size_t*, size_t*))                       \
    X(1, qlora__CUresult, MemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2",                                 \
      (qlora__CUdeviceptr, const void*, size_t, void*))                                            \
    X(1, qlora__CUresult, MemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2",                                 \
      (void*, qlora__CUdeviceptr, size_t, void*))                                                  \
    X(1, qlora__CUresult, MemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2",                                 \
      (qlora__CUdeviceptr, qlora__CUdeviceptr, size_t, void*))                                     \
    X(1, qlora__CUresult, MemsetD8Async, "cuMemsetD8Async",                                        \
      (qlora__CUdeviceptr, unsigned char, size_t, void*))                                          \
    X(1, qlora__CUresult, MemsetD32Async, "cuMemsetD32Async",                                      \
      (qlora__CUdeviceptr, unsigned, size_t, void*))                                               \
    X(1, qlora__CUresult, MemsetD2D8Async, "cuMemsetD2D8Async",                                    \
      (qlora__CUdeviceptr, size_t, unsigned char, size_t, size_t, void*))                          \
    X(1, qlora__CUresult, EventCreate, "cuEventCreate", (void**, unsigned))                        \
    X(1, qlora__CUresult, EventDestroy, "cuEventDestroy_v2", (void*))                              \
    X(1, qlora__CUresult, EventRecord, "cuEventRecord", (void*, void*))                            \
    X(1, qlora__CUresult, EventQuery, "cuEventQuery", (void*))                                     \
    X(1, qlora__CUresult, EventSynchronize, "cuEventSynchronize", (void*))                         \
    X(1, qlora__CUresult, EventElapsedTime, "cuEventElapsedTime", (float*, void*, void*))

#define QLORA__CUBLAS_SYMBOLS(X)                                                                   \
    X(1, qlora__cublasStatus, Create, "cublasCreate_v2", (void**))                                 \
    X(1, qlora__cublasStatus, Destroy, "cublasDestroy_v2", (void*))                                \
    X(1, qlora__cublasStatus, GetVersion, "cublasGetVersion_v2", (void*, int*))                    \
    X(1, qlora__cublasStatus, SetStream, "cublasSetStream_v2", (void*, void*))                     \
    X(1, qlora__cublasStatus, SetWorkspace, "cublasSetWorkspace_v2", (void*, void*, size_t))       \
    X(1, qlora__cublasStatus, SetMathMode, "cublasSetMathMode", (void*, int))                      \
    X(1, qlora__cublasStatus, SetPointerMode, "cublasSetPointerMode_v2", (void*, int))             \
    X(1, qlora__cublasStatus, GemmEx, "cublasGemmEx",                                              \
      (void*, int, int, int, int, int, const void*, const void*, int, int, const void*, int, int,  \
       const void*, void*, int, int, int, int))                                                    \
    X(1, qlora__cublasStatus, GemmStridedBatchedEx, "cublasGemmStridedBatchedEx",                  \
      (void*, int, int, int, int, int, const void*, const void*, int, int, long long, const void*, \
       int, int, long long, const void*, void*, int, int, long long, int, int, int))
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

typedef struct qlora__cache qlora__cache;   // cache/modules.h
typedef struct qlora__beside qlora__beside; // tensor/beside.h

struct qlora__gpu {
    qlora__cuda_table cu;
    qlora__cublas_table blas;
    int driver_version; // 13000 is CUDA 13.0
    int ptx_version;    // highest PTX version that this driver accepts; 90 is 9.0
    qlora__CUdevice device;
    char device_name[128];
    int capability;     // 90 is 9.0
    int sm_count;
    int max_shared;     // bytes of shared memory available to one block
    size_t total_bytes;
    char target[16];    // "sm_90"
    int target_number;  // 90
    void* context;
    bool owns_context;  // the primary context was retained
    void* own_stream;
    void* stream;       // the stream in use
    void* cublas;       // handle, NULL without cuBLAS
    int cublas_version;
    bool cublas_exposed; // the caller has the handle, so bind again before every use
    bool cublas_bound;
    char cublas_note[256];
    void* workspace;    // for cuBLAS
    qlora__buffer* own_workspace;
    qlora__beside* beside; // tensor/beside.h
    qlora__cache* cache;
};

// Copies the addresses of symbols into a table of function pointers and lists the required symbols
// that were not found in `missing`.
static bool qlora__symbols_load(void* library, const qlora__symbol* symbols, size_t count,
                                void* table, char* missing, size_t size) {
    missing[0] = '\0';
    bool complete = true;
    for (size_t i = 0; i < count; i++) {
        void* address = qlora__library_symbol(library, symbols[i].name);
        // dlsym returns a function as a pointer to data. Copying its bytes avoids a cast that
        // pedantic compilers reject.
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

// Opens the library named by the caller, or else the first one of a list that can be opened.
static void* qlora__library_first(const char* path, const char* const* names, size_t count,
                                  char* why, size_t size) {
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
    snprintf(why, size, "%s", first); // report the usual name
    return NULL;
}

// Codes that leave the CUDA context unusable, according to cuda.h.
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

// Converts a driver's code into a result and an error text. `what` names the call and its size.
static qlora_result qlora__cu(qlora_ctx* ctx, int code, const char* what) {
    if (code == 0) {
        return QLORA_OK;
    }
    const char* name = qlora__cu_name(ctx->gpu, code);
    char why[160];
    snprintf(why, sizeof why, " failed with %.140s", name);
    qlora__capture_broke(ctx, what, why);
    if (qlora__cu_is_sticky(code)) {
        char lost[256];
        snprintf(lost, sizeof lost, "%s (%d), seen at %s", name, code, what);
        qlora__device_lost(ctx, lost);
        return qlora__fail(ctx, QLORA_ERR_DEVICE_LOST,
                           "a kernel launched earlier failed: %s; the CUDA context is unusable; "
                           "destroy this context (a build with QLORA_DEBUG names the kernel)",
                           lost);
    }
    if (code == 2) {
        size_t free_bytes = 0;
        size_t total = 0;
        ctx->gpu->cu.MemGetInfo(&free_bytes, &total);
        return qlora__fail(ctx, QLORA_ERR_DEVICE_MEMORY,
                           "%s failed: %s (2); %.2f of %.2f GiB are free", what, name,
                           (double)free_bytes / 1073741824.0, (double)total / 1073741824.0);
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
    ctx->gpu->cublas_bound = false; // its stream, workspace and modes may be partly set
    char why[96];
    snprintf(why, sizeof why, " failed with %s", qlora__cublas_name(status));
    qlora__capture_broke(ctx, what, why);
    // cuBLAS reports every fault with the same code; query the stream to find out whether an
    // earlier kernel caused it.
    int code = ctx->capture == NULL ? ctx->gpu->cu.StreamSynchronize(ctx->gpu->stream) : 0;
    if (qlora__cu_is_sticky(code)) {
        return qlora__cu(ctx, code, what);
    }
    return qlora__fail(ctx, QLORA_ERR_CUBLAS, "%s failed: %s (%d)", what,
                       qlora__cublas_name(status), status);
}

// ---- PTX targets of devices, PTX versions of drivers --------------------------------------------

// A plain target and the lowest PTX version that supports it.
typedef struct qlora__target {
    int number;
    int version;
} qlora__target;

static const qlora__target qlora__targets[] = {{75, 63},  {80, 70},  {86, 71},  {87, 74},
                                               {88, 90},  {89, 78},  {90, 78},  {100, 86},
                                               {103, 88}, {110, 90}, {120, 87}, {121, 88}};

// The highest PTX version that a driver accepts, from the table in NVIDIA's PTX manual.
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

// Returns the device's own target. If this table does not have it, or the driver is too old for it,
// returns the highest plain target that both support, or 0 if there is none.
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

//@@ src/driver/device.h

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

static qlora_result qlora__gpu_read_facts(qlora_ctx* ctx) {
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
    gpu->target_number = qlora__target_choose(gpu->capability, gpu->ptx_version);
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

//@@ src/qlora.h

#else // QLORA_NO_CUDA

//@@ src/driver/none.h

// ---- device memory in a build without CUDA ------------------------------------------------------

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

//@@ src/qlora.h

#endif // QLORA_NO_CUDA


//@@ src/tensor/capture.h

// ---- the buffers that a graph uses --------------------------------------------------------------

// The part of a graph that buffers know about: the buffers that it uses, and the reason why it can
// no longer be replayed.
struct qlora__watch {
    qlora__watch* next;
    uint64_t key;      // the graph's key
    uint64_t* buffers; // ids
    size_t buffer_count;
    size_t buffer_capacity;
    char invalid[128]; // "" while it can be replayed
};

// Records that the graph being captured uses this memory, so that freeing its buffer invalidates
// the graph.
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
        return QLORA_OK; // memory of the caller
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

// Invalidates the graphs that use a buffer; with buffer_id 0, all graphs.
static void qlora__graphs_invalidate(qlora_ctx* ctx, uint64_t buffer_id, const char* why) {
    for (qlora__watch* g = ctx->watches; g != NULL; g = g->next) {
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

//@@ src/tensor/checks.h

// ---- checks of arguments ------------------------------------------------------------------------

// The value is from `least` to `most`; INT64_MAX means that there is no upper limit.
static QLORA__UNUSED qlora_result qlora__need_whole(qlora_ctx* ctx, const char* name, int64_t value,
                                                    int64_t least, int64_t most) {
    if (value >= least && value <= most) {
        return QLORA_OK;
    }
    if (most == INT64_MAX) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is %lld; it must be at least %lld", name,
                           (long long)value, (long long)least);
    }
    return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is %lld; it must be from %lld to %lld", name,
                       (long long)value, (long long)least, (long long)most);
}

// The value is at least `least` and less than `below`; a NaN is neither.
static QLORA__UNUSED qlora_result qlora__need_real(qlora_ctx* ctx, const char* name, double value,
                                                   double least, double below) {
    if (value >= least && value < below) {
        return QLORA_OK;
    }
    if (below >= 1e300) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is %g; it must be a finite number%s", name,
                           value, least < 0.0 ? "" : " that is not negative");
    }
    return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is %g; it must be at least %g and less than %g",
                       name, value, least, below);
}

// Counts the elements from the first to the last one of a tensor, with the gaps between its rows.
// Returns false if the number overflows.
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

// Sizes are not negative, and rows do not overlap. The prefix is "x." for a tensor x.
static qlora_result qlora__need_sizes(qlora_ctx* ctx, const qlora_tensor* t, const char* prefix) {
    static const char* const names[] = {"rows", "cols", "batch", "batch_stride"};
    const int64_t sizes[] = {t->rows, t->cols, t->batch, t->batch_stride};
    for (int i = 0; i < 4; i++) {
        if (sizes[i] < 0) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s%s is %lld; it must not be negative",
                               prefix, names[i], (long long)sizes[i]);
        }
    }
    if (t->ld < t->cols) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%sld is %lld; it must be at least cols (%lld)",
                           prefix, (long long)t->ld, (long long)t->cols);
    }
    return QLORA_OK;
}

static qlora_result qlora__need_dtype(qlora_ctx* ctx, const qlora_tensor* t, const char* name,
                                      unsigned dtypes) {
    char allowed[64] = "";
    size_t used = 0;
    if ((int)t->dtype >= 0 && t->dtype <= QLORA_U8 && (dtypes >> t->dtype & 1u) != 0) {
        return QLORA_OK;
    }
    for (int i = QLORA_F32; i <= QLORA_U8; i++) {
        if ((dtypes >> i & 1u) != 0) {
            qlora__append(allowed, sizeof allowed, &used, "%s%s", used > 0 ? " or " : "",
                          qlora_dtype_name((qlora_dtype)i));
        }
    }
    return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s.dtype is %s (%d); it must be %s", name,
                       qlora_dtype_name(t->dtype), (int)t->dtype, allowed);
}

static qlora_result qlora__need_shape(qlora_ctx* ctx, const qlora_tensor* t, const char* name,
                                      int64_t rows, int64_t cols) {
    char wanted[2][24];
    if ((rows < 0 || t->rows == rows) && (cols < 0 || t->cols == cols)) {
        return QLORA_OK;
    }
    snprintf(wanted[0], sizeof wanted[0], "%lld", (long long)rows);
    snprintf(wanted[1], sizeof wanted[1], "%lld", (long long)cols);
    return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is %lld x %lld; expected %s x %s", name,
                       (long long)t->rows, (long long)t->cols, rows < 0 ? "any" : wanted[0],
                       cols < 0 ? "any" : wanted[1]);
}

// The checks that every operator does for each of its tensors. A size of -1 accepts any.
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
    char prefix[64];
    snprintf(prefix, sizeof prefix, "%.60s.", name);
    QLORA__TRY(qlora__need_dtype(ctx, t, name, dtypes));
    QLORA__TRY(qlora__need_sizes(ctx, t, prefix));
    QLORA__TRY(qlora__need_shape(ctx, t, name, rows, cols));
    if (batch >= 0 && t->batch != batch) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s.batch is %lld; expected %lld", name,
                           (long long)t->batch, (long long)batch);
    }
    size_t bytes = 0;
    if (!qlora__tensor_bytes(t, &bytes)) {
        return qlora__fail(ctx, QLORA_ERR_LIMIT, "%s: the size in bytes overflows", name);
    }
    if (bytes > t->bytes || (t->data == NULL && bytes > 0)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s needs %llu bytes; its buffer has %llu",
                           name, (unsigned long long)bytes,
                           (unsigned long long)(t->data == NULL ? 0 : t->bytes));
    }
    return qlora__capture_note(ctx, t->data);
}

static QLORA__UNUSED qlora_result qlora__need(qlora_ctx* ctx, const qlora_tensor* t,
                                              const char* name, unsigned dtypes, int64_t rows,
                                              int64_t cols) {
    return qlora__need_batch(ctx, t, name, dtypes, 1, rows, cols);
}

// Views of one buffer with the same ld and disjoint columns do not overlap.
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

//@@ src/tensor/tensor.h

// ---- buffers ------------------------------------------------------------------------------------

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

// ---- copies and fills on the context's stream ---------------------------------------------------

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
    return qlora__sync(ctx); // the caller may change source right after this call
}

static qlora_result qlora__copy_out(qlora_ctx* ctx, void* target, const void* source,
                                    size_t bytes) {
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
static qlora_result qlora__zero(qlora_ctx* ctx, void* data, size_t pitch, size_t width,
                                size_t height) {
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

static qlora_result qlora__copy_out(qlora_ctx* ctx, void* target, const void* source,
                                    size_t bytes) {
    return qlora__copy_in(ctx, target, source, bytes);
}

static qlora_result qlora__zero(qlora_ctx* ctx, void* data, size_t pitch, size_t width,
                                size_t height) {
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

// ---- tensors ------------------------------------------------------------------------------------

static qlora_result qlora__tensor_shape(qlora_ctx* ctx, qlora_dtype dtype, int64_t batch,
                                        int64_t rows, int64_t cols, int64_t ld, qlora_tensor* out) {
    memset(out, 0, sizeof *out);
    out->dtype = dtype;
    out->rows = rows;
    out->cols = cols;
    out->ld = ld;
    out->batch = batch;
    out->owner = ctx;
    if ((int)dtype < 0 || dtype > QLORA_U8) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "dtype is %d; it must be one of qlora_dtype",
                           (int)dtype);
    }
    QLORA__TRY(qlora__need_sizes(ctx, out, ""));
    size_t matrix = 0;
    size_t all = 0;
    size_t bytes = 0;
    if (!qlora__mul((size_t)rows, (size_t)ld, &matrix) ||
        !qlora__mul(matrix, (size_t)batch, &all) ||
        !qlora__mul(all, qlora_dtype_bytes(dtype), &bytes) || bytes > (size_t)INT64_MAX) {
        return qlora__fail(ctx, QLORA_ERR_LIMIT,
                           "the size in bytes of %lld x %lld x %lld elements overflows",
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
    ctx->living[QLORA__TENSORS]++;
    *out = t;
    return QLORA_OK;
}

qlora_result qlora_tensor_create(qlora_ctx* ctx, qlora_dtype dtype, int64_t rows, int64_t cols,
                                 qlora_tensor* out) {
    QLORA__ENTER(ctx, "qlora_tensor_create");
    return qlora__leave(ctx, qlora__tensor_create(ctx, dtype, 1, rows, cols, out));
}

qlora_result qlora_tensor_create_batched(qlora_ctx* ctx, qlora_dtype dtype, int64_t batch,
                                         int64_t rows, int64_t cols, qlora_tensor* out) {
    QLORA__ENTER(ctx, "qlora_tensor_create_batched");
    return qlora__leave(ctx, qlora__tensor_create(ctx, dtype, batch, rows, cols, out));
}

static qlora_result qlora__tensor_destroy(qlora_ctx* ctx, qlora_tensor* tensor) {
    if (tensor == NULL || tensor->data == NULL) {
        return QLORA_OK;
    }
    if (tensor->owner != ctx) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "tensor belongs to another context");
    }
    QLORA__TRY(qlora__not_in_capture(ctx, "freeing memory"));
    qlora__buffer* b = ctx->buffers;
    while (b != NULL && b->data != tensor->data) {
        b = b->next;
    }
    if (b == NULL || b == ctx->scratch) {
        return qlora__fail(
            ctx, QLORA_ERR_ARGUMENT,
            "tensor does not own a buffer: it is a view, wraps other memory, or was destroyed "
            "before; views and wrapped tensors must not be destroyed");
    }
    qlora__buffer_destroy(ctx, b);
    ctx->living[QLORA__TENSORS]--;
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
    bool counted = qlora__tensor_bytes(&t, &needed);
    if (data == NULL && needed > 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "data is NULL");
    }
    if (!counted || needed > bytes) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "bytes is %llu; a tensor of %lld x %lld %s with ld %lld needs %llu",
                           (unsigned long long)bytes, (long long)rows, (long long)cols,
                           qlora_dtype_name(dtype), (long long)t.ld, (unsigned long long)needed);
    }
    if ((uintptr_t)data % qlora_dtype_bytes(dtype) != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "data must be aligned to %d bytes for %s",
                           (int)qlora_dtype_bytes(dtype), qlora_dtype_name(dtype));
    }
    *out = t;
    return QLORA_OK;
}

qlora_result qlora_tensor_wrap(qlora_ctx* ctx, void* data, size_t bytes, qlora_dtype dtype,
                               int64_t rows, int64_t cols, int64_t ld, qlora_tensor* out) {
    QLORA__ENTER(ctx, "qlora_tensor_wrap");
    return qlora__leave(ctx, qlora__tensor_wrap(ctx, data, bytes, dtype, rows, cols, ld, out));
}

static qlora_result qlora__view_inside(qlora_ctx* ctx, const char* name, int64_t first,
                                       int64_t count, int64_t size) {
    if (first < 0 || count < 0 || first > size - count) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "%lld %ss from %s %lld on are not inside the tensor's %lld",
                           (long long)count, name, name, (long long)first, (long long)size);
    }
    return QLORA_OK;
}

static qlora_result qlora__tensor_view(qlora_ctx* ctx, const qlora_tensor* t, int64_t row,
                                       int64_t rows, int64_t col, int64_t cols, qlora_tensor* out) {
    if (t->batch != 1) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "tensor.batch is %lld; a view needs batch 1",
                           (long long)t->batch);
    }
    QLORA__TRY(qlora__view_inside(ctx, "row", row, rows, t->rows));
    QLORA__TRY(qlora__view_inside(ctx, "column", col, cols, t->cols));
    size_t offset = ((size_t)row * (size_t)t->ld + (size_t)col) * qlora_dtype_bytes(t->dtype);
    qlora_tensor v = *t;
    v.rows = rows;
    v.cols = cols;
    v.bytes = t->bytes > offset ? t->bytes - offset : 0;
    v.data = v.bytes > 0 ? (char*)t->data + offset : t->data; // an empty view at the very end
    *out = v;
    return QLORA_OK;
}

static qlora_result qlora__tensor_view_checked(qlora_ctx* ctx, const qlora_tensor* t, int64_t row,
                                               int64_t rows, int64_t col, int64_t cols,
                                               qlora_tensor* out) {
    QLORA__TRY(qlora__need(ctx, t, "tensor", ~0u, -1, -1));
    if (out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    return qlora__tensor_view(ctx, t, row, rows, col, cols, out);
}

qlora_result qlora_tensor_view(qlora_ctx* ctx, const qlora_tensor* tensor, int64_t row,
                               int64_t rows, int64_t col, int64_t cols, qlora_tensor* out) {
    QLORA__ENTER(ctx, "qlora_tensor_view");
    return qlora__leave(ctx, qlora__tensor_view_checked(ctx, tensor, row, rows, col, cols, out));
}

static qlora_result qlora__tensor_copy_check(qlora_ctx* ctx, const qlora_tensor* t,
                                             const void* host, size_t bytes) {
    QLORA__TRY(qlora__need_batch(ctx, t, "tensor", ~0u, -1, -1, -1));
    size_t whole = 0;
    qlora__tensor_bytes(t, &whole);
    bool contiguous = (t->rows <= 1 || t->ld == t->cols) &&
                      (t->batch <= 1 || t->batch_stride == t->rows * t->cols);
    if (!contiguous) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "the tensor is not contiguous (ld %lld, %lld columns)",
                           (long long)t->ld, (long long)t->cols);
    }
    if (host == NULL && bytes > 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "the host memory is NULL");
    }
    if (bytes != whole) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "bytes is %llu; the tensor has %llu",
                           (unsigned long long)bytes, (unsigned long long)whole);
    }
    return QLORA_OK;
}

static qlora_result qlora__tensor_write(qlora_ctx* ctx, const qlora_tensor* t, const void* source,
                                        size_t bytes) {
    QLORA__TRY(qlora__tensor_copy_check(ctx, t, source, bytes));
    return qlora__copy_in(ctx, t->data, source, bytes);
}

qlora_result qlora_tensor_write(qlora_ctx* ctx, const qlora_tensor* tensor, const void* source,
                                size_t bytes) {
    QLORA__ENTER(ctx, "qlora_tensor_write");
    return qlora__leave(ctx, qlora__tensor_write(ctx, tensor, source, bytes));
}

static qlora_result qlora__tensor_read(qlora_ctx* ctx, const qlora_tensor* t, void* target,
                                       size_t bytes) {
    QLORA__TRY(qlora__tensor_copy_check(ctx, t, target, bytes));
    return qlora__copy_out(ctx, target, t->data, bytes);
}

qlora_result qlora_tensor_read(qlora_ctx* ctx, const qlora_tensor* tensor, void* target,
                               size_t bytes) {
    QLORA__ENTER(ctx, "qlora_tensor_read");
    return qlora__leave(ctx, qlora__tensor_read(ctx, tensor, target, bytes));
}

static qlora_result qlora__tensor_zero(qlora_ctx* ctx, const qlora_tensor* t) {
    QLORA__TRY(qlora__need_batch(ctx, t, "tensor", ~0u, -1, -1, -1));
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

//@@ src/tensor/staging.h

// ---- staging ------------------------------------------------------------------------------------
//
// Host memory that asynchronous copies read from or write to. It is pinned on CUDA and ordinary
// memory on the CPU, where a copy is complete when the call returns. Higher floors copy and wait
// only through these functions, so they need no driver calls of their own.

#define QLORA__RING_SLOTS 4

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

//@@ src/tensor/beside.h

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

struct qlora__beside {
    void* stream;
    void* fork;                      // event: the second stream starts after it
    void* done[QLORA__BESIDE_SLOTS]; // events: the end of the work in each slot
    unsigned pending;                // bit i: done[i] was recorded and has not been waited for
    bool forked;                     // the second stream is part of this capture
    void* first;                     // the context's stream, while the second is in use
    qlora__buffer* workspace;        // for cuBLAS
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
    b->forked = false;
    b->pending = 0;
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

//@@ src/cache/registry.h

// ---- the registry of the library's kernels ------------------------------------------------------

// clang-format off
// When a model needs a kernel: all conditions in its mask must hold.
#define QLORA__NEED_ALWAYS 0u
#define QLORA__NEED_GEMM   1u // runs without cuBLAS
#define QLORA__NEED_BF16   2u // computes in bf16
#define QLORA__NEED_F32    4u // computes in f32
#define QLORA__NEED_NF4    8u // has an NF4 base
#define QLORA__NEED_LORA  16u // trains adapters
#define QLORA__NEED_HEAD64  32u  // tensor-core attention, head size 64
#define QLORA__NEED_HEAD128 64u  // the same, head size 128
#define QLORA__NEED_HEADANY 128u // attention in f32 arithmetic
#define QLORA__NEED_RANDOM 256u  // generates its weights from a seed
#define QLORA__NEED_GEMM16 (QLORA__NEED_GEMM | QLORA__NEED_BF16)
#define QLORA__NEED_NF4_BF16 (QLORA__NEED_NF4 | QLORA__NEED_BF16)
#define QLORA__NEED_LORA_BF16 (QLORA__NEED_LORA | QLORA__NEED_BF16)

// The only table of kernels; pre-warm, launches and tests all use it. Columns: name (the entry
// point is "qlora_" name), module (kernels/MODULE.cu), maximum dynamic shared memory in bytes,
// condition. Shapes are run-time parameters of the kernels.
#define QLORA__KERNELS(X)                                                                          \
    QLORA__KERNELS_RUNTIME(X)                                                                      \
    QLORA__KERNELS_OPS(X)                                                                          \
    QLORA__KERNELS_ATTENTION(X)                                                                    \
    QLORA__KERNELS_NF4(X)

#define QLORA__KERNELS_NF4(X)                                                                      \
    X(nf4_quantise_f32, nf4, 0, NF4)                                                               \
    X(nf4_quantise_bf16, nf4, 0, NF4)                                                              \
    X(nf4_quantise_f16, nf4, 0, NF4)                                                               \
    X(nf4_offset, nf4, 0, NF4)                                                                     \
    X(nf4_quantise_scales, nf4, 0, NF4)                                                            \
    X(nf4_dequantise_f32, nf4, 0, NF4)                                                             \
    X(nf4_dequantise_bf16, nf4_bf16, 0, NF4_BF16)                                                  \
    X(nf4_dequantise_f16, nf4_bf16, 0, NF4_BF16)                                                   \
    X(nf4_gemm_16, nf4_gemm, 70656, NF4_BF16)                                                      \
    X(nf4_gemm_32, nf4_gemm, 66560, NF4_BF16)                                                      \
    X(nf4_gemm_reduce, nf4_gemm, 0, NF4_BF16)                                                      \
    X(linear_place_f32, linear, 0, LORA)                                                           \
    X(linear_place_bf16, linear_bf16, 0, LORA_BF16)                                                \
    X(linear_bias_f32, linear, 0, ALWAYS)                                                          \
    X(linear_bias_bf16, linear_bf16, 0, BF16)

#define QLORA__KERNELS_RUNTIME(X)                                                                  \
    X(gemm_big_f32, gemm, 0, GEMM)                                                                 \
    X(gemm_big_half, gemm, 0, GEMM)                                                                \
    X(gemm_mid_f32, gemm, 0, GEMM)                                                                 \
    X(gemm_mid_half, gemm, 0, GEMM)                                                                \
    X(gemm_skinny_f32, gemm, 0, GEMM)                                                              \
    X(gemm_skinny_half, gemm, 0, GEMM)                                                             \
    X(gemm_tc_bf16_nn, gemm_tc, 0, GEMM16)                                                         \
    X(gemm_tc_bf16_nt, gemm_tc, 0, GEMM16)                                                         \
    X(gemm_tc_bf16_tn, gemm_tc, 0, GEMM16)                                                         \
    X(gemm_tc_f16_nn, gemm_tc, 0, GEMM16)                                                          \
    X(gemm_tc_f16_nt, gemm_tc, 0, GEMM16)                                                          \
    X(gemm_tc_f16_tn, gemm_tc, 0, GEMM16)                                                          \
    X(cast_f32_bf16, cast, 0, ALWAYS)                                                              \
    X(cast_f32_f16, cast, 0, ALWAYS)                                                               \
    X(cast_bf16_f32, cast, 0, ALWAYS)                                                              \
    X(cast_f16_f32, cast, 0, ALWAYS)                                                               \
    X(cast_bf16_f16, cast, 0, ALWAYS)                                                              \
    X(cast_f16_bf16, cast, 0, ALWAYS)                                                              \
    X(cast_absmax_f32, cast, 0, ALWAYS)                                                            \
    X(cast_scale, cast, 0, ALWAYS)                                                                 \
    X(random_normal_f32, random, 0, RANDOM)                                                        \
    X(random_normal_bf16, random, 0, RANDOM)                                                       \
    X(clip_squares, clip, 0, ALWAYS)                                                               \
    X(clip_scale, clip, 0, ALWAYS)                                                                 \
    X(clip_apply, clip, 0, ALWAYS)

#define QLORA__KERNELS_OPS(X)                                                                      \
    X(elementwise_silu_f32, elementwise, 0, F32)                                                   \
    X(elementwise_silu_bf16, elementwise_bf16, 0, BF16)                                            \
    X(elementwise_silu_bwd_f32, elementwise, 0, F32)                                               \
    X(elementwise_silu_bwd_bf16, elementwise_bf16, 0, BF16)                                        \
    X(elementwise_swiglu_f32, elementwise, 0, F32)                                                 \
    X(elementwise_swiglu_bf16, elementwise_bf16, 0, BF16)                                          \
    X(elementwise_swiglu_bwd_f32, elementwise, 0, F32)                                             \
    X(elementwise_swiglu_bwd_bf16, elementwise_bf16, 0, BF16)                                      \
    X(elementwise_mul_f32, elementwise, 0, F32)                                                    \
    X(elementwise_mul_bf16, elementwise_bf16, 0, BF16)                                             \
    X(elementwise_add_f32, shared, 0, ALWAYS)                                                      \
    X(elementwise_add_bf16, elementwise_bf16, 0, BF16)                                             \
    X(elementwise_scale_f32, shared, 0, ALWAYS)                                                    \
    X(elementwise_scale_bf16, elementwise_bf16, 0, BF16)                                           \
    X(elementwise_fill_f32, shared, 0, ALWAYS)                                                     \
    X(elementwise_fill_bf16, elementwise_bf16, 0, BF16)                                            \
    X(elementwise_gather_f32_f32, elementwise, 0, F32)                                             \
    X(elementwise_gather_f32_bf16, elementwise_bf16, 0, BF16)                                      \
    X(elementwise_gather_bf16_f32, elementwise, 0, F32)                                            \
    X(elementwise_gather_bf16_bf16, elementwise_bf16, 0, BF16)                                     \
    X(elementwise_gather_f16_f32, elementwise, 0, F32)                                             \
    X(elementwise_gather_f16_bf16, elementwise_bf16, 0, BF16)                                      \
    X(norm_rms_fwd_f32, norm, 0, F32)                                                              \
    X(norm_rms_fwd_bf16, norm_bf16, 0, BF16)                                                       \
    X(norm_rms_bwd_f32, norm, 0, F32)                                                              \
    X(norm_rms_bwd_bf16, norm_bf16, 0, BF16)                                                       \
    X(norm_rms_dw_f32, norm, 0, F32)                                                               \
    X(norm_rms_dw_bf16, norm_bf16, 0, BF16)                                                        \
    X(norm_rms_dw_sum, shared, 0, ALWAYS)                                                          \
    X(rope_f32, rope, 0, F32)                                                                      \
    X(rope_bf16, rope_bf16, 0, BF16)                                                               \
    X(softmax_copy_b16, softmax_bf16, 0, BF16)                                                     \
    X(softmax_copy_b32, shared, 0, ALWAYS)                                                         \
    X(softmax_transpose_b16, softmax_bf16, 0, BF16)                                                \
    X(softmax_transpose_b32, shared, 0, ALWAYS)                                                    \
    X(softmax_scores_f32, softmax, 0, F32)                                                         \
    X(softmax_scores_bf16, softmax_bf16, 0, BF16)                                                  \
    X(softmax_fwd_f32, softmax, 0, F32)                                                            \
    X(softmax_fwd_bf16, softmax_bf16, 0, BF16)                                                     \
    X(softmax_bwd_f32, softmax, 0, F32)                                                            \
    X(softmax_bwd_bf16, softmax_bf16, 0, BF16)                                                     \
    X(loss_cross_entropy_f32, loss, 0, F32)                                                        \
    X(loss_cross_entropy_bf16, loss_bf16, 0, BF16)                                                 \
    X(loss_sum, shared, 0, ALWAYS)                                                                 \
    X(loss_arg_max_f32, loss, 0, F32)                                                              \
    X(loss_arg_max_bf16, loss_bf16, 0, BF16)                                                       \
    X(optim_advance, optim, 0, LORA)                                                               \
    X(optim_adamw_f32, optim, 0, LORA)                                                             \
    X(optim_adamw_bf16, optim, 0, LORA_BF16)                                                       \
    X(optim_shadow_f32, optim, 0, LORA)                                                            \
    X(optim_shadow_bf16, optim, 0, LORA_BF16)                                                      \
    X(dropout_f32, dropout, 0, LORA)                                                               \
    X(dropout_bf16, dropout_bf16, 0, LORA_BF16)

#define QLORA__KERNELS_ATTENTION(X)                                                                \
    X(attn64_fwd, attn64, 49152, HEAD64)                                                           \
    X(attn64_stats, attn64, 0, HEAD64)                                                             \
    X(attn64_bwd_kv, attn64, 58368, HEAD64)                                                        \
    X(attn64_bwd_sum, attn64, 0, HEAD64)                                                           \
    X(attn64_bwd_q, attn64, 65536, HEAD64)                                                         \
    X(attn128_fwd, attn128, 65536, HEAD128)                                                        \
    X(attn128_stats, attn128, 0, HEAD128)                                                          \
    X(attn128_bwd_kv, attn128, 70144, HEAD128)                                                     \
    X(attn128_bwd_sum, attn128, 0, HEAD128)                                                        \
    X(attn128_bwd_q, attn128, 98304, HEAD128)                                                      \
    X(attn_f32_fwd, attn_f32, 0, HEADANY)                                                          \
    X(attn_f32_stats, attn_f32, 0, HEADANY)                                                        \
    X(attn_f32_bwd_kv, attn_f32, 0, HEADANY)                                                       \
    X(attn_f32_bwd_q, attn_f32, 0, HEADANY)

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
    void* function; // CUfunction; NULL until its module is loaded
    uint32_t shared_allowed;
    // Only for kernels of the caller:
    qlora_kernel* next;
    void* module;
    uint64_t text_hash;
    size_t block; // bytes of this struct and its key
};

const char* qlora_kernel_name(size_t index) {
    return index < QLORA__K_COUNT ? qlora__kernel_rows[index].name : NULL;
}

// The error of every call that needs a kernel, on the CPU.
static qlora_result qlora__no_kernels(qlora_ctx* ctx) {
    return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                       "kernels need CUDA, but this context runs on the CPU (%s)", ctx->reason);
}

//@@ src/cache/modules.h

// ---- the kernel cache: PTX, modules, launches, lookup -------------------------------------------

#ifndef QLORA_NO_CUDA

#ifndef QLORA_KERNELS_HEADER
#define QLORA_KERNELS_HEADER "kernels_ptx.h"
#endif
#include QLORA_KERNELS_HEADER

#if QLORA__KERNEL_ABI != 2
#error                                                                                             \
    "kernels_ptx.h does not match this qlora.h (kernel ABI 2 is needed); use one release for both"
#endif

#define QLORA__PLANNED_MAX 256

typedef struct qlora__module {
    const char* name; // the same as in the registry
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

// ---- PTX for a target ---------------------------------------------------------------------------

// Returns the module's PTX with the highest target that the device supports. PTX that was excluded
// from the build (chunks is NULL) is returned only if nothing else fits, so that the caller can
// report it.
static const qlora__ptx_text* qlora__ptx_choose(const qlora__gpu* gpu, const char* module) {
    const qlora__ptx_text* best = NULL;
    const qlora__ptx_text* left_out = NULL;
    for (size_t i = 0; i < QLORA__PTX_TEXT_COUNT; i++) {
        const qlora__ptx_text* t = &qlora__ptx_texts[i];
        // PTX for a target with a suffix (90a) runs only on exactly that capability.
        bool fits = t->suffix != '\0'
                        ? t->target == gpu->capability && t->target == gpu->target_number
                        : t->target <= gpu->target_number;
        if (strcmp(t->module, module) != 0 || !fits || t->version > gpu->ptx_version) {
            continue;
        }
        if (t->chunks == NULL) {
            left_out = t;
        } else if (best == NULL || t->target > best->target ||
                   (t->target == best->target && t->suffix > best->suffix)) {
            best = t;
        }
    }
    return best != NULL ? best : left_out;
}

// Joins the chunks of a module's PTX after a header that names the target of qlora_ctx_target. The
// caller frees *out, which has *bytes bytes.
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

// Finds a directive at the start of a line, outside comments; NULL if there is none.
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

// Copies the word after a directive: "sm_90a" from ".target sm_90a, texmode_independent".
static void qlora__ptx_word(const char* directive, char* out, size_t size) {
    const char* p = directive + strcspn(directive, " \t");
    p += strspn(p, " \t");
    size_t n = strcspn(p, " \t\r\n,/");
    n = n < size - 1 ? n : size - 1;
    memcpy(out, p, n);
    out[n] = '\0';
}

// PTX of the caller must name the target that qlora_ctx_target returns, or that target with the
// suffix a or f.
static qlora_result qlora__ptx_check_target(qlora_ctx* ctx, const char* ptx) {
    const char* directive = qlora__ptx_directive(ptx, ".target");
    if (directive == NULL) {
        return qlora__fail(ctx, QLORA_ERR_TARGET,
                           "the PTX has no .target line; this device needs %s (see "
                           "qlora_ctx_target and qlora_ptx_emit)",
                           ctx->gpu->target);
    }
    char word[32];
    qlora__ptx_word(directive, word, sizeof word);
    size_t n = strlen(ctx->gpu->target);
    bool same = strncmp(word, ctx->gpu->target, n) == 0 &&
                (word[n] == '\0' || ((word[n] == 'a' || word[n] == 'f') && word[n + 1] == '\0'));
    if (!same) {
        return qlora__fail(ctx, QLORA_ERR_TARGET,
                           "the PTX is for %s, but this device needs %s (qlora_ctx_target); "
                           "rewrite it with qlora_ptx_emit",
                           word, ctx->gpu->target);
    }
    return QLORA_OK;
}

// Returns 78 for a .version line with "7.8", and 0 if the line has no version.
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
    if (version == 0) {
        return qlora__fail(ctx, QLORA_ERR_TARGET, "the PTX has no valid .version line");
    }
    if (target_line == NULL || target_line < version_line) {
        return qlora__fail(ctx, QLORA_ERR_TARGET,
                           "the PTX has no .target line after its .version line");
    }
    char word[32];
    qlora__ptx_word(target_line, word, sizeof word);
    int number = strncmp(word, "sm_", 3) == 0 ? atoi(word + 3) : 0;
    if (number == 0) {
        return qlora__fail(ctx, QLORA_ERR_TARGET, ".target is '%s'; expected sm_ and a number",
                           word);
    }
    char last = word[strlen(word) - 1];
    if (last == 'a' || last == 'f' || number > ctx->gpu->target_number) {
        return qlora__fail(ctx, QLORA_ERR_TARGET, "PTX for %s cannot be rewritten for %s: %s", word,
                           ctx->gpu->target,
                           number > ctx->gpu->target_number
                               ? "its target is newer"
                               : "a target with a suffix has no later equivalent");
    }
    int least = qlora__target_version(ctx->gpu->target_number);
    version = version > least ? version : least;
    if (version > ctx->gpu->ptx_version) {
        return qlora__fail(
            ctx, QLORA_ERR_TARGET, "the text needs PTX %d.%d; this driver accepts at most %d.%d",
            version / 10, version % 10, ctx->gpu->ptx_version / 10, ctx->gpu->ptx_version % 10);
    }
    const char* after_version = version_line + strcspn(version_line, "\n");
    const char* after_target = target_line + strcspn(target_line, "\n");
    int n =
        snprintf(buffer, buffer != NULL ? size : 0, "%.*s.version %d.%d%.*s.target %s%s",
                 (int)(version_line - ptx), ptx, version / 10, version % 10,
                 (int)(target_line - after_version), after_version, ctx->gpu->target, after_target);
    *needed = (size_t)n + 1;
    if (buffer != NULL && size < *needed) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "size is %llu; the text needs %llu bytes",
                           (unsigned long long)size, (unsigned long long)*needed);
    }
    return QLORA_OK;
}

// ---- modules ------------------------------------------------------------------------------------

// Below compute capability 12.0, modules are loaded with JIT logs; from 12.0 on, without. They are
// never loaded with CU_JIT_TARGET, because the PTX names its own target. There is one log item per
// compilation. A fault of an earlier kernel is reported as such, not as a failed load.
static qlora_result qlora__module_load(qlora_ctx* ctx, const char* name, const char* ptx,
                                       void** out) {
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
        QLORA__LOG(ctx, INFO, KERNEL_COMPILE, "%s: %llu bytes of PTX for %s in %.1f ms", name,
                   (unsigned long long)strlen(ptx), gpu->target, ms);
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

// Either all kernels of a module become ready, or none.
static qlora_result qlora__module_resolve(qlora_ctx* ctx, const char* name, void* handle) {
    qlora__cache* cache = ctx->gpu->cache;
    for (size_t i = 0; i < QLORA__K_COUNT; i++) {
        const qlora__kernel_row* row = &qlora__kernel_rows[i];
        if (strcmp(row->module, name) != 0) {
            continue;
        }
        char entry[96];
        snprintf(entry, sizeof entry, "qlora_%s", row->name);
        QLORA__TRY(
            qlora__kernel_resolve(ctx, handle, entry, row->shared, &cache->kernels[i].function));
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

// Adds a compiled module to the cache and makes its kernels ready. On failure, unloads it.
static qlora_result qlora__module_adopt(qlora_ctx* ctx, const char* name, void* handle) {
    qlora__cache* cache = ctx->gpu->cache;
    qlora__module* module = (qlora__module*)qlora__alloc_zero(ctx, sizeof *module);
    qlora_result r =
        module != NULL ? qlora__module_resolve(ctx, name, handle) : QLORA_ERR_MEMORY;
    if (r != QLORA_OK) {
        qlora__module_forget(ctx, name);
        ctx->gpu->cu.ModuleUnload(handle);
        cache->info.modules--;
        qlora__free(ctx, module, sizeof *module);
        return r;
    }
    module->handle = handle;
    module->name = name;
    module->next = cache->modules;
    cache->modules = module;
    return QLORA_OK;
}

// Compiles the module of a kernel of the library and makes all its kernels ready. There is no
// fallback for a module that was excluded from the build: it would be slower without any sign of
// the reason.
static qlora_result qlora__module_open(qlora_ctx* ctx, const qlora__kernel_row* row) {
    const char* name = row->module;
    const qlora__ptx_text* text = qlora__ptx_choose(ctx->gpu, name);
    if (text == NULL) {
        return qlora__fail(
            ctx, QLORA_ERR_UNSUPPORTED,
            "kernel module %s needs compute capability 8.0; %s has %d.%d (bf16 needs 8.0; f32 "
            "works)",
            name, ctx->gpu->device_name, ctx->gpu->capability / 10, ctx->gpu->capability % 10);
    }
    if (text->chunks == NULL) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "kernel %s is not in this build: its module %s was left out by %s",
                           row->name, name, text->left_out);
    }
    char* ptx = NULL;
    size_t bytes = 0;
    QLORA__TRY(qlora__ptx_join(ctx, text, &ptx, &bytes));
    void* handle = NULL;
    qlora_result r = qlora__module_load(ctx, name, ptx, &handle);
    qlora__free(ctx, ptx, bytes);
    return r == QLORA_OK ? qlora__module_adopt(ctx, name, handle) : r;
}

// Returns a kernel of the registry, compiled on demand unless the cache is sealed.
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
        QLORA__TRY(qlora__module_open(ctx, &qlora__kernel_rows[id]));
    }
    *out = kernel;
    return QLORA_OK;
}

// ---- launch -------------------------------------------------------------------------------------

static qlora_result qlora__launch_checked(qlora_ctx* ctx, qlora_kernel* kernel,
                                          const uint32_t grid[3], const uint32_t block[3],
                                          uint32_t shared, void** args) {
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

// Launches a kernel of the registry; does nothing if the grid is empty.
static QLORA__UNUSED qlora_result qlora__launch(qlora_ctx* ctx, qlora__kernel_id id, int64_t grid_x,
                                                int64_t grid_y, int64_t grid_z, uint32_t threads,
                                                uint32_t shared, void** args) {
    if (grid_x <= 0 || grid_y <= 0 || grid_z <= 0) {
        return QLORA_OK;
    }
    if (grid_x > INT32_MAX || grid_y > 65535 || grid_z > 65535) {
        return qlora__fail(
            ctx, QLORA_ERR_LIMIT, "kernel %s: a grid of %lld x %lld x %lld exceeds CUDA's limits",
            qlora__kernel_rows[id].name, (long long)grid_x, (long long)grid_y, (long long)grid_z);
    }
    qlora_kernel* kernel = NULL;
    QLORA__TRY(qlora__kernel_ready(ctx, id, &kernel));
    uint32_t grid[3] = {(uint32_t)grid_x, (uint32_t)grid_y, (uint32_t)grid_z};
    uint32_t block[3] = {threads, 1, 1};
    return qlora__launch_checked(ctx, kernel, grid, block, shared, args);
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
    return qlora__launch_checked(ctx, own, grid, block, launch->shared_bytes, args);
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
        return qlora__fail(
            ctx, QLORA_ERR_SEALED,
            "'%.100s' would have to be compiled, but the cache is sealed; call "
            "qlora_cache_unseal first",
            key);
    }
    QLORA__TRY(qlora__kernel_compile(ctx, key, ptx, entry, hash, &kernel));
    *out = kernel;
    return QLORA_OK;
}

// Compiles every module with a kernel whose conditions are all in `have`. The modules are compiled
// one after another: the driver's compiler holds a lock, so threads would gain nothing.
static QLORA__UNUSED qlora_result qlora__cache_warm(qlora_ctx* ctx, uint32_t have) {
    for (int i = 0; i < QLORA__K_COUNT; i++) {
        const qlora__kernel_row* row = &qlora__kernel_rows[i];
        if ((row->need & ~have) == 0 && ctx->gpu->cache->kernels[i].function == NULL) {
            QLORA__TRY(qlora__module_open(ctx, row));
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

// Returns a kernel's function, or NULL if its module is not loaded.
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

//@@ src/context.h

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
// captured.
static qlora_result qlora__stream_check(qlora_ctx* ctx, void* stream) {
    qlora__gpu* gpu = ctx->gpu;
    if ((uintptr_t)stream == 1) {
        return qlora__fail(
            ctx, QLORA_ERR_ARGUMENT,
            "the stream is the legacy default stream, which cannot be captured; create a stream");
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
    qlora_result r = qlora__gpu_open(ctx);
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
    QLORA__TRY(memory == NULL ? qlora__buffer_create(ctx, bytes, &own) : QLORA_OK);
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
        qlora__append(buffer, size, &used, "threads: %d\n", (int)ctx->desc.threads);
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
                      gpu->target_number != gpu->capability
                          ? " (the device's own target is not supported by this version or by "
                            "the driver)"
                          : "",
                      cache.modules, cache.kernels, cache.sealed ? ", sealed" : "");
    }
#endif
    if (ctx->dead[0] != '\0') {
        qlora__append(buffer, size, &used, "lost: %s\n", ctx->dead);
    }
    return used + 1;
}

//@@ src/cpu/gemm.h

// One matrix product whose arguments have been checked: row-major C[M,N] = alpha alpha_dev op(A)
// op(B) + beta C for each of `batch` matrices.
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
    int64_t sA; // batch strides; 0 if all products share one matrix
    int64_t sB;
    int64_t sC;
    qlora_dtype a_type; // equal to b_type once mixed operands have been cast
    qlora_dtype b_type;
    qlora_dtype out;
    float alpha;
    float beta;
    const float* alpha_dev; // NULL: 1
    const float* beta_dev;  // set together with alpha_dev
    bool tf32;
} qlora__gemm;

// ---- products on the CPU ------------------------------------------------------------------------

// A panel of 64 rows is multiplied by four tiles of 16 columns, in steps of 64 along K, packed as
// QLORA__REAL. Each element of C is one sum in ascending k, however the threads share the work.
#define QLORA__PANEL 64
#define QLORA__TILE 16
#define QLORA__TILES 4
#define QLORA__STEP 64

static void qlora__gemm_pack(const void* data, qlora_dtype dtype, int64_t base, int64_t stride_k,
                             int64_t stride_i, int64_t steps, int64_t count, int64_t width,
                             QLORA__REAL* out) {
    const QLORA__REAL* real = (const QLORA__REAL*)data;
    for (int64_t k = 0; k < steps; k++) {
        int64_t from = base + k * stride_k;
        QLORA__REAL* to = out + k * width;
        if (dtype != QLORA_F32) {
            for (int64_t i = 0; i < count; i++) {
                to[i] = qlora__load(data, dtype, from + i * stride_i);
            }
        } else if (stride_i == 1) {
            memcpy(to, real + from, (size_t)count * sizeof *to);
        } else {
            for (int64_t i = 0; i < count; i++) {
                to[i] = real[from + i * stride_i];
            }
        }
        for (int64_t i = count; i < width; i++) {
            to[i] = (QLORA__REAL)0;
        }
    }
}

// acc[4][16] += a[k][4 of 64] b[k][16] over the packed steps, eight columns at a time, so that four
// rows of two vectors stay in registers on every processor.
#if defined(__GNUC__)
typedef QLORA__REAL qlora__real4 __attribute__((vector_size(4 * sizeof(QLORA__REAL))));

static void qlora__gemm_micro(const QLORA__REAL* a, const QLORA__REAL* b, int64_t steps,
                              QLORA__REAL* acc) {
    for (int half = 0; half < QLORA__TILE; half += 8) {
        qlora__real4 c[8];
        for (int r = 0; r < 4; r++) {
            memcpy(&c[2 * r], acc + r * QLORA__TILE + half, sizeof c[0]);
            memcpy(&c[2 * r + 1], acc + r * QLORA__TILE + half + 4, sizeof c[0]);
        }
        qlora__real4 c00 = c[0], c01 = c[1], c10 = c[2], c11 = c[3];
        qlora__real4 c20 = c[4], c21 = c[5], c30 = c[6], c31 = c[7];
        for (int64_t k = 0; k < steps; k++) {
            const QLORA__REAL* ak = a + k * QLORA__PANEL;
            qlora__real4 b0;
            qlora__real4 b1;
            memcpy(&b0, b + k * QLORA__TILE + half, sizeof b0);
            memcpy(&b1, b + k * QLORA__TILE + half + 4, sizeof b1);
            qlora__real4 a0 = {ak[0], ak[0], ak[0], ak[0]};
            qlora__real4 a1 = {ak[1], ak[1], ak[1], ak[1]};
            qlora__real4 a2 = {ak[2], ak[2], ak[2], ak[2]};
            qlora__real4 a3 = {ak[3], ak[3], ak[3], ak[3]};
            c00 += a0 * b0;
            c01 += a0 * b1;
            c10 += a1 * b0;
            c11 += a1 * b1;
            c20 += a2 * b0;
            c21 += a2 * b1;
            c30 += a3 * b0;
            c31 += a3 * b1;
        }
        const qlora__real4 done[8] = {c00, c01, c10, c11, c20, c21, c30, c31};
        for (int r = 0; r < 4; r++) {
            memcpy(acc + r * QLORA__TILE + half, &done[2 * r], sizeof done[0]);
            memcpy(acc + r * QLORA__TILE + half + 4, &done[2 * r + 1], sizeof done[0]);
        }
    }
}
#else
static void qlora__gemm_micro(const QLORA__REAL* a, const QLORA__REAL* b, int64_t steps,
                              QLORA__REAL* acc) {
    for (int64_t k = 0; k < steps; k++) {
        const QLORA__REAL* bk = b + k * QLORA__TILE;
        const QLORA__REAL* ak = a + k * QLORA__PANEL;
        for (int r = 0; r < 4; r++) {
            for (int j = 0; j < QLORA__TILE; j++) {
                acc[r * QLORA__TILE + j] += ak[r] * bk[j];
            }
        }
    }
}
#endif

// Writes alpha times the sums of one tile plus beta times the old values.
static void qlora__gemm_write(const qlora__gemm* g, int64_t batch, int64_t i0, int64_t j0,
                              const QLORA__REAL* acc) {
    int64_t rows = qlora__min(QLORA__PANEL, g->M - i0);
    int64_t cols = qlora__min(QLORA__TILE, g->N - j0);
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

// A unit is one (matrix, panel, group of tiles), numbered in that order. A is packed once per group
// of tiles.
static void qlora__gemm_cpu_range(void* user, int64_t begin, int64_t end) {
    const qlora__gemm* g = (const qlora__gemm*)user;
    int64_t groups = qlora__ceil_div(g->N, QLORA__TILE * QLORA__TILES);
    int64_t panels = qlora__ceil_div(g->M, QLORA__PANEL);
    int64_t a_k = g->ta ? g->lda : 1;
    int64_t a_i = g->ta ? 1 : g->lda;
    int64_t b_k = g->tb ? 1 : g->ldb;
    int64_t b_j = g->tb ? g->ldb : 1;
    QLORA__REAL a[QLORA__STEP * QLORA__PANEL];
    QLORA__REAL b[QLORA__STEP * QLORA__TILE];
    QLORA__REAL acc[QLORA__TILES][QLORA__PANEL * QLORA__TILE];
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t j0 = unit % groups * QLORA__TILE * QLORA__TILES;
        int64_t i0 = unit / groups % panels * QLORA__PANEL;
        int64_t batch = unit / groups / panels;
        int64_t rows = qlora__min(QLORA__PANEL, g->M - i0);
        int64_t tiles = qlora__min(QLORA__TILES, qlora__ceil_div(g->N - j0, QLORA__TILE));
        memset(acc, 0, sizeof acc);
        for (int64_t k0 = 0; k0 < g->K; k0 += QLORA__STEP) {
            int64_t steps = qlora__min(QLORA__STEP, g->K - k0);
            qlora__gemm_pack(g->A, g->a_type, batch * g->sA + i0 * a_i + k0 * a_k, a_k, a_i, steps,
                             rows, QLORA__PANEL, a);
            for (int64_t t = 0; t < tiles; t++) {
                int64_t j = j0 + t * QLORA__TILE;
                qlora__gemm_pack(g->B, g->b_type, batch * g->sB + j * b_j + k0 * b_k, b_k, b_j,
                                 steps, qlora__min(QLORA__TILE, g->N - j), QLORA__TILE, b);
                for (int64_t i = 0; i < rows; i += 4) {
                    qlora__gemm_micro(a + i, b, steps, acc[t] + i * QLORA__TILE);
                }
            }
        }
        for (int64_t t = 0; t < tiles; t++) {
            qlora__gemm_write(g, batch, i0, j0 + t * QLORA__TILE, acc[t]);
        }
    }
}

static qlora_result qlora__gemm_cpu(qlora_ctx* ctx, const qlora__gemm* g) {
    int64_t units = qlora__ceil_div(g->M, QLORA__PANEL) *
                    qlora__ceil_div(g->N, QLORA__TILE * QLORA__TILES) * g->batch;
    qlora__gemm copy = *g;
    qlora__parallel(ctx, units, 1, qlora__gemm_cpu_range, &copy);
    return QLORA_OK;
}

#undef QLORA__PANEL
#undef QLORA__TILES
#undef QLORA__TILE
#undef QLORA__STEP

//@@ src/gemm/dense.h

// ---- dense products: the built-in kernels -------------------------------------------------------

#ifndef QLORA_NO_CUDA

// The tile that a block computes, and the kernels with this tile.
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

// Returns a row of qlora__gemm_tiles. With few rows or columns and a long K, K is split inside the
// block. With a short K, or fewer than 96 big tiles, smaller tiles use more of the device.
static int qlora__gemm_choose(const qlora__gemm* g) {
    int64_t big_tiles = qlora__ceil_div(g->M, 128) * qlora__ceil_div(g->N, 128) * g->batch;
    if (qlora__min(g->M, g->N) <= 32 && g->K >= 128) {
        return 0;
    }
    return g->K <= 32 || big_tiles < 96 ? 1 : 2;
}

// Returns whether the tensor-core kernels can be used: they need 16-bit operands that are not both
// transposed, a device with tensor cores, and rows aligned to 16 bytes. Narrow products are faster
// with K split inside the block.
static bool qlora__gemm_takes_tensor_cores(const qlora_ctx* ctx, const qlora__gemm* g) {
    uintptr_t address = (uintptr_t)g->A | (uintptr_t)g->B;
    int64_t strides = g->lda | g->ldb | (g->batch > 1 ? g->sA | g->sB : 0);
    return g->a_type != QLORA_F32 && !(g->ta && g->tb) && qlora__gpu_takes(ctx, 80) &&
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
        QLORA__TRY(qlora__launch(ctx, kernel, qlora__ceil_div(g->M, side),
                                 qlora__ceil_div(g->N, side), now, 256, 0, args));
    }
    return QLORA_OK;
}

// ---- cuBLAS -------------------------------------------------------------------------------------

static int qlora__cublas_type(qlora_dtype dtype) {
    return dtype == QLORA_F32 ? QLORA__CUDA_R_32F
                              : dtype == QLORA_BF16 ? QLORA__CUDA_R_16BF : QLORA__CUDA_R_16F;
}

// Records the shapes that pre-warm runs, and counts unknown shapes once the cache is sealed.
static void qlora__cublas_count(qlora_ctx* ctx, const qlora__gemm* g) {
    int64_t shape[] = {g->M,     g->N,      g->K,           g->ta ? 1 : 0,   g->tb ? 1 : 0,
                       g->batch, g->a_type, (int64_t)g->out, g->tf32 ? 1 : 0};
    qlora__cache_count_shape(ctx, qlora__fnv(shape, sizeof shape, 0));
}

// cuBLAS is column-major, so it computes C^T = op(B)^T op(A)^T, which has the same memory layout.
static qlora_result qlora__gemm_cublas(qlora_ctx* ctx, const qlora__gemm* g) {
    qlora__gpu* gpu = ctx->gpu;
    QLORA__TRY(qlora__cublas_bind(ctx, qlora__beside_workspace(ctx)));
    qlora__cublas_count(ctx, g);
    int op_a = g->ta ? QLORA__CUBLAS_OP_T : QLORA__CUBLAS_OP_N;
    int op_b = g->tb ? QLORA__CUBLAS_OP_T : QLORA__CUBLAS_OP_N;
    int in = qlora__cublas_type(g->a_type);
    int out = qlora__cublas_type(g->out);
    int compute = g->tf32 ? QLORA__CUBLAS_COMPUTE_32F_FAST_TF32 : QLORA__CUBLAS_COMPUTE_32F;
    // cuBLAS rejects a leading dimension of 0 even if no element is read.
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
        status = gpu->blas.GemmEx(gpu->cublas, op_b, op_a, N, M, K, alpha, g->B, in, ldb, g->A, in,
                                  lda, beta, g->C, out, ldc, compute, QLORA__CUBLAS_GEMM_DEFAULT);
    } else {
        what = "cublasGemmStridedBatchedEx";
        status = gpu->blas.GemmStridedBatchedEx(
            gpu->cublas, op_b, op_a, N, M, K, alpha, g->B, in, ldb, g->sB, g->A, in, lda, g->sA,
            beta, g->C, out, ldc, g->sC, (int)g->batch, compute, QLORA__CUBLAS_GEMM_DEFAULT);
    }
    if (g->alpha_dev != NULL) {
        int reset = gpu->blas.SetPointerMode(gpu->cublas, QLORA__CUBLAS_POINTER_MODE_HOST);
        status = status != 0 ? status : reset;
    }
    return qlora__blas(ctx, status, what);
}

// ---- mixed operands -----------------------------------------------------------------------------

// Writes to scale[0] the power of two that brings an f32 matrix into the range of f16, and to
// scale[1] alpha divided by it.
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

// Casts the f32 operand to the type of the other one, in scratch, and uses the copy in the product.
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
                           "a batched product of an f32 and a 16-bit operand is not supported; "
                           "cast one of them");
    }
    int64_t new_ld = (int64_t)qlora__align_up((size_t)cols, 8);
    size_t bytes = 0;
    if (!qlora__mul((size_t)rows, (size_t)new_ld * 2, &bytes)) {
        return qlora__fail(ctx, QLORA_ERR_LIMIT, "the size in bytes of the cast operand overflows");
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
    if (g->K == 0) { // the product is empty, and cuBLAS would not clear C
        size_t size = qlora_dtype_bytes(g->out);
        for (int64_t i = 0; i < g->batch && g->beta == 0.0f; i++) {
            QLORA__TRY(qlora__zero(ctx, (char*)g->C + (size_t)(i * g->sC) * size,
                                   (size_t)g->ldc * size, (size_t)g->N * size, (size_t)g->M));
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

// ---- the operator -------------------------------------------------------------------------------

const char* qlora_path_name(qlora_path path) {
    static const char* const names[] = {"auto", "CPU", "PTX", "cuBLAS", "NF4"};
    return (int)path >= 0 && path <= QLORA_PATH_NF4 ? names[path] : "unknown";
}

static qlora_result qlora__gemm_choose_path(qlora_ctx* ctx, qlora_path wanted, qlora_path* out) {
    bool cpu = qlora__on_cpu(ctx);
    if ((int)wanted < 0 || wanted > QLORA_PATH_CUBLAS) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "path is %d; it must be one of qlora_path",
                           (int)wanted);
    }
    if ((wanted == QLORA_PATH_CPU && !cpu) ||
        (cpu && wanted != QLORA_PATH_CPU && wanted != QLORA_PATH_AUTO)) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED, "path %s is not available on a %s context",
                           qlora_path_name(wanted), cpu ? "CPU" : "CUDA");
    }
    if (wanted == QLORA_PATH_CUBLAS && !qlora__has_cublas(ctx)) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "path cuBLAS is not available; qlora_describe reports the reason");
    }
    *out = wanted != QLORA_PATH_AUTO ? wanted
           : cpu                     ? QLORA_PATH_CPU
           : qlora__has_cublas(ctx)  ? QLORA_PATH_CUBLAS
                                     : QLORA_PATH_PTX;
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
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "a product of %s and %s into %s is not supported",
                           qlora_dtype_name(a->dtype), qlora_dtype_name(b->dtype),
                           qlora_dtype_name(c->dtype));
    }
    return QLORA_OK;
}

// The matrices of a batched output may be next to each other in the same rows (heads), but they
// must not overlap.
static bool qlora__batch_disjoint(const qlora_tensor* c) {
    int64_t span = (c->rows - 1) * c->ld + c->cols;
    return c->batch <= 1 || c->rows == 0 || c->batch_stride >= span ||
           (c->batch_stride >= c->cols && c->batch_stride * c->batch <= c->ld);
}

static qlora_result qlora__gemm_check(qlora_ctx* ctx, const qlora_gemm_desc* d,
                                      const qlora_tensor* a, const qlora_tensor* b,
                                      const qlora_tensor* c, qlora__gemm* g) {
    QLORA__TRY(qlora__need_batch(ctx, c, "C", QLORA__IS_FLOAT, -1, -1, -1));
    int64_t batch = c->batch;
    QLORA__TRY(qlora__need_batch(ctx, a, "A", QLORA__IS_FLOAT,
                                 a != NULL && a->batch == 1 ? 1 : batch, -1, -1));
    g->K = d->trans_a ? a->rows : a->cols;
    QLORA__TRY(qlora__need_batch(ctx, a, "A", QLORA__IS_FLOAT, -1, d->trans_a ? -1 : c->rows,
                                 d->trans_a ? c->rows : -1));
    QLORA__TRY(qlora__need_batch(ctx, b, "B", QLORA__IS_FLOAT,
                                 b != NULL && b->batch == 1 ? 1 : batch,
                                 d->trans_b ? c->cols : g->K, d->trans_b ? g->K : c->cols));
    QLORA__TRY(qlora__gemm_check_types(ctx, a, b, c));
    QLORA__TRY(qlora__need_apart(ctx, "C", c, "A", a));
    QLORA__TRY(qlora__need_apart(ctx, "C", c, "B", b));
    if (!qlora__batch_disjoint(c)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "C.batch_stride is %lld; the matrices of C overlap",
                           (long long)c->batch_stride);
    }
    static const char* const names[] = {"C.rows", "C.cols", "K", "A.ld", "B.ld", "C.ld", "C.batch"};
    const int64_t sizes[] = {c->rows, c->cols, g->K, a->ld, b->ld, c->ld, batch};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        if (sizes[i] > INT32_MAX - 256) {
            return qlora__fail(ctx, QLORA_ERR_LIMIT, "%s is %lld; the maximum is %d", names[i],
                               (long long)sizes[i], INT32_MAX - 256);
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
    return QLORA_OK;
}

// Returns whether a product of two f32 matrices may use TF32; backward products only with TF32_ALL.
static bool qlora__math_takes_tf32(qlora_math math, bool backward) {
    return backward ? math == QLORA_MATH_TF32_ALL : math != QLORA_MATH_F32;
}

static qlora_result qlora__gemm_run(qlora_ctx* ctx, qlora_math math, bool backward,
                                    const qlora_gemm_desc* desc, const qlora_tensor* a,
                                    const qlora_tensor* b, const qlora_tensor* c) {
    if (desc == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "desc is NULL");
    }
    qlora__gemm g;
    memset(&g, 0, sizeof g);
    qlora_path path = QLORA_PATH_AUTO;
    QLORA__TRY(qlora__gemm_choose_path(ctx, desc->path, &path));
    QLORA__TRY(qlora__gemm_check(ctx, desc, a, b, c, &g));
    g.tf32 =
        qlora__math_takes_tf32(math, backward) && a->dtype == QLORA_F32 && b->dtype == QLORA_F32;
    ctx->last_path = path;
    if (g.M == 0 || g.N == 0 || g.batch == 0) {
        return QLORA_OK;
    }
    return path == QLORA_PATH_CPU ? qlora__gemm_cpu(ctx, &g) : qlora__gemm_gpu(ctx, &g, path);
}

qlora_result qlora_gemm(qlora_ctx* ctx, const qlora_gemm_desc* desc, const qlora_tensor* a,
                        const qlora_tensor* b, const qlora_tensor* c) {
    QLORA__ENTER(ctx, "qlora_gemm");
    return qlora__leave(ctx, qlora__gemm_run(ctx, ctx->desc.math, false, desc, a, b, c));
}

// Rejects flags that are unknown, do not apply, or exclude each other.
static qlora_result qlora__product_flags_check(qlora_ctx* ctx, uint32_t flags, bool nf4) {
    static const char* const names[] = {"ACCUMULATE", "PTX", "CUBLAS", "FUSED", "UNFUSED"};
    static const int apart[][2] = {{1, 2}, {3, 4}, {0, 3}, {1, 3}, {2, 3}};
    if (flags > 31) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "flags is %u, with bits that are not in qlora_product_flags", flags);
    }
    for (int i = 3; i < 5 && !nf4; i++) {
        if ((flags >> i & 1u) != 0) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "flags: QLORA_PRODUCT_%s is for NF4 weights only", names[i]);
        }
    }
    for (size_t i = 0; i < sizeof apart / sizeof apart[0]; i++) {
        if ((flags >> apart[i][0] & flags >> apart[i][1] & 1u) != 0) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "flags: QLORA_PRODUCT_%s and QLORA_PRODUCT_%s exclude each other",
                               names[apart[i][0]], names[apart[i][1]]);
        }
    }
    return QLORA_OK;
}

static qlora_path qlora__product_path(uint32_t flags) {
    return (flags & QLORA_PRODUCT_PTX) != 0      ? QLORA_PATH_PTX
           : (flags & QLORA_PRODUCT_CUBLAS) != 0 ? QLORA_PATH_CUBLAS
                                                 : QLORA_PATH_AUTO;
}

// The three named products.
static qlora_result qlora__gemm_named(qlora_ctx* ctx, qlora_math math, bool trans_a, bool trans_b,
                                      bool backward, uint32_t flags, const qlora_tensor* a,
                                      const qlora_tensor* b, const qlora_tensor* c) {
    QLORA__TRY(qlora__product_flags_check(ctx, flags, false));
    qlora_gemm_desc d;
    memset(&d, 0, sizeof d);
    d.trans_a = trans_a;
    d.trans_b = trans_b;
    d.alpha = 1.0f;
    d.beta = (flags & QLORA_PRODUCT_ACCUMULATE) != 0 ? 1.0f : 0.0f;
    d.path = qlora__product_path(flags);
    return qlora__gemm_run(ctx, math, backward, &d, a, b, c);
}

qlora_result qlora_gemm_forward(qlora_ctx* ctx, const qlora_tensor* a, const qlora_tensor* b,
                                const qlora_tensor* c, uint32_t flags) {
    QLORA__ENTER(ctx, "qlora_gemm_forward");
    return qlora__leave(
        ctx, qlora__gemm_named(ctx, ctx->desc.math, false, false, false, flags, a, b, c));
}

qlora_result qlora_gemm_backward_a(qlora_ctx* ctx, const qlora_tensor* dc, const qlora_tensor* b,
                                   const qlora_tensor* da, uint32_t flags) {
    QLORA__ENTER(ctx, "qlora_gemm_backward_a");
    return qlora__leave(
        ctx, qlora__gemm_named(ctx, ctx->desc.math, false, true, true, flags, dc, b, da));
}

qlora_result qlora_gemm_backward_b(qlora_ctx* ctx, const qlora_tensor* a, const qlora_tensor* dc,
                                   const qlora_tensor* db, uint32_t flags) {
    QLORA__ENTER(ctx, "qlora_gemm_backward_b");
    return qlora__leave(
        ctx, qlora__gemm_named(ctx, ctx->desc.math, true, false, true, flags, a, dc, db));
}

//@@ src/gemm/nf4.h

// ---- NF4 weights --------------------------------------------------------------------------------

static bool qlora__is_power_of_two(int64_t n) {
    return n > 0 && (n & (n - 1)) == 0;
}

static QLORA__UNUSED int32_t qlora__log2(int64_t power) {
    int32_t shift = 0;
    while (power > 1) {
        power /= 2;
        shift++;
    }
    return shift;
}

// Sizes and offsets of the parts in a weight's memory: codes, absmax, absmax_codes, absmax_scales,
// offset, maps.
typedef struct qlora__nf4_layout {
    int64_t blocks;
    int64_t groups;
    int32_t block;
    int32_t block2;
    size_t size[6];
    size_t at[6];
    size_t total;
} qlora__nf4_layout;

#define QLORA__NF4_FAULT 96 // bytes for the text of a fault

// Describes what is wrong with the sizes; the text is empty if nothing is.
static void qlora__nf4_fault(const qlora_nf4_desc* d, char* text, size_t size) {
    size_t n = 0;
    text[0] = '\0';
    if (d->rows < 0) {
        snprintf(text, size, "desc.rows is %lld; it must not be negative", (long long)d->rows);
    } else if (d->cols < 0) {
        snprintf(text, size, "desc.cols is %lld; it must not be negative", (long long)d->cols);
    } else if (d->block != 0 &&
               (!qlora__is_power_of_two(d->block) || d->block < 32 || d->block > 4096)) {
        snprintf(text, size, "desc.block is %d; it must be a power of two from 32 to 4096",
                 (int)d->block);
    } else if (d->block2 != 0 && (!qlora__is_power_of_two(d->block2) || d->block2 > (1 << 20))) {
        snprintf(text, size, "desc.block2 is %d; it must be a power of two, at most 1048576",
                 (int)d->block2);
    } else if (!qlora__mul((size_t)d->rows, (size_t)d->cols, &n) || n > (size_t)INT64_MAX / 2) {
        snprintf(text, size, "%lld x %lld elements are too many", (long long)d->rows,
                 (long long)d->cols);
    }
}

static bool qlora__nf4_lay_out(const qlora_nf4_desc* desc, qlora__nf4_layout* out) {
    char fault[QLORA__NF4_FAULT];
    memset(out, 0, sizeof *out);
    qlora__nf4_fault(desc, fault, sizeof fault);
    if (fault[0] != '\0') {
        return false;
    }
    out->block = desc->block != 0 ? desc->block : 64;
    out->block2 = desc->block2 != 0 ? desc->block2 : 256;
    size_t n = (size_t)desc->rows * (size_t)desc->cols;
    out->blocks = qlora__ceil_div((int64_t)n, out->block);
    out->groups = desc->plain_scales ? 0 : qlora__ceil_div(out->blocks, out->block2);
    out->size[0] = (n + 1) / 2;
    out->size[1] = desc->plain_scales ? (size_t)out->blocks * 4 : 0;
    out->size[2] = desc->plain_scales ? 0 : (size_t)out->blocks;
    out->size[3] = (size_t)out->groups * 4;
    out->size[4] = desc->plain_scales ? 0 : 4;
    out->size[5] = QLORA__NF4_MAPS * 4;
    for (int i = 0; i < 6; i++) {
        out->at[i] = out->total;
        out->total += qlora__align_up(out->size[i], 256);
    }
    return true;
}

size_t qlora_nf4_bytes(const qlora_nf4_desc* desc) {
    qlora__nf4_layout layout;
    return desc != NULL && qlora__nf4_lay_out(desc, &layout) ? layout.total : 0;
}

static qlora_result qlora__nf4_wrap(qlora_ctx* ctx, const qlora_nf4_desc* desc,
                                    const qlora_tensor* memory, qlora_nf4* out) {
    qlora__nf4_layout layout;
    if (desc == NULL || out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is NULL", desc == NULL ? "desc" : "out");
    }
    if (!qlora__nf4_lay_out(desc, &layout)) {
        char fault[QLORA__NF4_FAULT];
        qlora__nf4_fault(desc, fault, sizeof fault);
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s", fault);
    }
    QLORA__TRY(qlora__need(ctx, memory, "memory", QLORA__IS_U8, -1, -1));
    if (memory->bytes < layout.total) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "memory has %llu bytes; an NF4 weight of %lld x %lld needs %llu",
                           (unsigned long long)memory->bytes, (long long)desc->rows,
                           (long long)desc->cols, (unsigned long long)layout.total);
    }
    if ((uintptr_t)memory->data % 16 != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "memory must be aligned to 16 bytes");
    }
    char* base = (char*)memory->data;
    qlora_nf4 w;
    memset(&w, 0, sizeof w);
    w.codes = (uint8_t*)base;
    if (desc->plain_scales) {
        w.absmax = (float*)(void*)(base + layout.at[1]);
    } else {
        w.absmax_codes = (uint8_t*)(base + layout.at[2]);
        w.absmax_scales = (float*)(void*)(base + layout.at[3]);
        w.offset = (float*)(void*)(base + layout.at[4]);
    }
    w.maps = (float*)(void*)(base + layout.at[5]);
    w.rows = desc->rows;
    w.cols = desc->cols;
    w.block = layout.block;
    w.block2 = layout.block2;
    w.memory = *memory;
    w.owner = ctx;
    float maps[QLORA__NF4_MAPS];
    qlora__nf4_default_maps(maps);
    QLORA__TRY(qlora__copy_in(ctx, w.maps, maps, sizeof maps));
    *out = w;
    return QLORA_OK;
}

qlora_result qlora_nf4_wrap(qlora_ctx* ctx, const qlora_nf4_desc* desc, const qlora_tensor* memory,
                            qlora_nf4* out) {
    QLORA__ENTER(ctx, "qlora_nf4_wrap");
    return qlora__leave(ctx, qlora__nf4_wrap(ctx, desc, memory, out));
}

static qlora_result qlora__nf4_create(qlora_ctx* ctx, const qlora_nf4_desc* desc, qlora_nf4* out) {
    size_t bytes = qlora_nf4_bytes(desc);
    qlora_tensor memory;
    QLORA__TRY(qlora__tensor_create(ctx, QLORA_U8, 1, 1, (int64_t)bytes, &memory));
    qlora_result r = qlora__nf4_wrap(ctx, desc, &memory, out);
    if (r != QLORA_OK) {
        qlora_result ignored = qlora__tensor_destroy(ctx, &memory);
        (void)ignored;
        return r;
    }
    out->owns_memory = true;
    return QLORA_OK;
}

qlora_result qlora_nf4_create(qlora_ctx* ctx, const qlora_nf4_desc* desc, qlora_nf4* out) {
    QLORA__ENTER(ctx, "qlora_nf4_create");
    return qlora__leave(ctx, qlora__nf4_create(ctx, desc, out));
}

static qlora_result qlora__nf4_destroy(qlora_ctx* ctx, qlora_nf4* weight) {
    if (weight == NULL || weight->owner == NULL) {
        return QLORA_OK;
    }
    if (weight->owner != ctx) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "weight belongs to another context");
    }
    if (weight->owns_memory) {
        QLORA__TRY(qlora__tensor_destroy(ctx, &weight->memory));
    }
    memset(weight, 0, sizeof *weight);
    return QLORA_OK;
}

qlora_result qlora_nf4_destroy(qlora_ctx* ctx, qlora_nf4* weight) {
    QLORA__TRY(qlora__enter_destroy(ctx, "qlora_nf4_destroy"));
    return qlora__leave(ctx, qlora__nf4_destroy(ctx, weight));
}

static qlora_result qlora__nf4_need(qlora_ctx* ctx, const qlora_nf4* w, const char* name) {
    if (w == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is NULL", name);
    }
    if (w->owner != ctx) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s belongs to %s", name,
                           w->owner == NULL ? "no context; use qlora_nf4_create or _wrap"
                                            : "another context");
    }
    if (w->codes == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s.codes is NULL", name);
    }
    return qlora__capture_note(ctx, w->memory.data);
}

static qlora_nf4_desc qlora__nf4_describe(const qlora_nf4* w) {
    qlora_nf4_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rows = w->rows;
    desc.cols = w->cols;
    desc.block = w->block;
    desc.block2 = w->block2;
    desc.plain_scales = w->absmax != NULL;
    return desc;
}

// Copies parts in or out. Parts that the weight does not have must be NULL.
static qlora_result qlora__nf4_copy(qlora_ctx* ctx, const qlora_nf4* w,
                                    const qlora_nf4_parts* parts, bool in) {
    QLORA__TRY(qlora__nf4_need(ctx, w, "the weight"));
    if (parts == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "parts is NULL");
    }
    qlora_nf4_desc desc = qlora__nf4_describe(w);
    qlora__nf4_layout layout;
    bool valid = qlora__nf4_lay_out(&desc, &layout);
    QLORA_ASSERT(valid);
    (void)valid;
    static const char* const names[] = {"codes",  "absmax", "absmax_codes", "absmax_scales",
                                        "offset", "levels", "map"};
    void* host[] = {parts->codes,  parts->absmax, parts->absmax_codes, parts->absmax_scales,
                    parts->offset, parts->levels, parts->map};
    void* device[] = {w->codes,  w->absmax, w->absmax_codes, w->absmax_scales,
                      w->offset, w->maps,   w->maps + 16};
    const size_t sizes[] = {layout.size[0], layout.size[1], layout.size[2], layout.size[3],
                            layout.size[4], 16 * 4,         256 * 4};
    for (int i = 0; i < 7; i++) {
        if (host[i] != NULL && device[i] == NULL) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "parts.%s must be NULL: the weight has %s scales", names[i],
                               w->absmax != NULL ? "plain" : "double-quantised");
        }
    }
    for (int i = 0; i < 7; i++) {
        if (host[i] != NULL) {
            QLORA__TRY(in ? qlora__copy_in(ctx, device[i], host[i], sizes[i])
                          : qlora__copy_out(ctx, host[i], device[i], sizes[i]));
        }
    }
    return QLORA_OK;
}

qlora_result qlora_nf4_write(qlora_ctx* ctx, const qlora_nf4* weight,
                              const qlora_nf4_parts* parts) {
    QLORA__ENTER(ctx, "qlora_nf4_write");
    return qlora__leave(ctx, qlora__nf4_copy(ctx, weight, parts, true));
}

qlora_result qlora_nf4_read(qlora_ctx* ctx, const qlora_nf4* weight,
                                const qlora_nf4_parts* parts) {
    QLORA__ENTER(ctx, "qlora_nf4_read");
    return qlora__leave(ctx, qlora__nf4_copy(ctx, weight, parts, false));
}

// ---- NF4 quantise and dequantise (formulas: numbers/nf4.h) --------------------------------------

typedef struct qlora__nf4_job {
    const qlora_nf4* w;
    const qlora_tensor* source;
    float* absmax;
    // only for dequantise: the part of the weight
    const qlora_tensor* out;
    int64_t row0;
    int64_t col0;
    bool via_bf16;
} qlora__nf4_job;

static void qlora__nf4_quantise_range(void* user, int64_t begin, int64_t end) {
    const qlora__nf4_job* job = (const qlora__nf4_job*)user;
    const qlora_nf4* w = job->w;
    qlora__nf4_quantise_blocks(job->source->data, job->source->dtype, w->rows * w->cols, w->block,
                               w->codes, job->absmax, begin, end);
}

static void qlora__nf4_dequantise_rows(void* user, int64_t begin, int64_t end) {
    const qlora__nf4_job* job = (const qlora__nf4_job*)user;
    const qlora_tensor* out = job->out;
    for (int64_t r = begin; r < end; r++) {
        int64_t e = (job->row0 + r) * job->w->cols + job->col0;
        int64_t block = -1;
        float scale = 0.0f;
        for (int64_t c = 0; c < out->cols; c++, e++) {
            if (e / job->w->block != block) {
                block = e / job->w->block;
                scale = qlora__nf4_absmax(job->w, block);
            }
            float value = job->w->maps[qlora__nf4_code_at(job->w->codes, e)] * scale;
            if (job->via_bf16) {
                value = qlora__bf16_to(qlora__bf16_from(value));
            }
            qlora__put(out, r, c, (QLORA__REAL)value);
        }
    }
}

#ifndef QLORA_NO_CUDA

static qlora_result qlora__nf4_quantise_gpu(qlora_ctx* ctx, const qlora_tensor* source,
                                            const qlora_nf4* weight, float* absmax,
                                            int64_t blocks) {
    qlora_nf4 w = *weight; // parameters are passed by address
    int64_t n = w.rows * w.cols;
    void* data = source->data;
    qlora__kernel_id kernel = source->dtype == QLORA_F32    ? QLORA__K_nf4_quantise_f32
                              : source->dtype == QLORA_BF16 ? QLORA__K_nf4_quantise_bf16
                                                            : QLORA__K_nf4_quantise_f16;
    void* args[] = {&data, &n, &w.block, &w.codes, &absmax};
    QLORA__TRY(qlora__launch(ctx, kernel, qlora__ceil_div(blocks, 8), 1, 1, 256, 0, args));
    if (w.absmax != NULL || blocks == 0) {
        return QLORA_OK;
    }
    float inverse = 1.0f / (float)blocks;
    void* sum[] = {&absmax, &blocks, &inverse, &w.offset};
    QLORA__TRY(qlora__launch(ctx, QLORA__K_nf4_offset, 1, 1, 1, 1024, 0, sum));
    void* scales[] = {&absmax, &blocks,         &w.block2,       &w.offset,
                      &w.maps, &w.absmax_codes, &w.absmax_scales};
    return qlora__launch(ctx, QLORA__K_nf4_quantise_scales,
                         qlora__ceil_div(qlora__ceil_div(blocks, w.block2), 8), 1, 1, 256, 0,
                         scales);
}

static qlora_result qlora__nf4_dequantise_gpu(qlora_ctx* ctx, const qlora__nf4_job* job) {
    qlora_nf4 w = *job->w;
    qlora_tensor out = *job->out;
    int64_t row0 = job->row0;
    int64_t col0 = job->col0;
    int32_t block_shift = qlora__log2(w.block);
    int32_t group_shift = qlora__log2(w.block2);
    int32_t via_bf16 = job->via_bf16 ? 1 : 0;
    int32_t width = 1; // threads per row, eight columns each
    while (width < 256 && 8 * width < out.cols) {
        width *= 2;
    }
    qlora__kernel_id kernel = out.dtype == QLORA_F32    ? QLORA__K_nf4_dequantise_f32
                              : out.dtype == QLORA_BF16 ? QLORA__K_nf4_dequantise_bf16
                                                        : QLORA__K_nf4_dequantise_f16;
    void* args[] = {&w.codes, &w.absmax,    &w.absmax_codes, &w.absmax_scales, &w.offset, &w.maps,
                    &w.cols,  &row0,        &col0,           &out.data,        &out.rows, &out.cols,
                    &out.ld,  &block_shift, &group_shift,    &width,           &via_bf16};
    return qlora__launch(ctx, kernel, qlora__ceil_div(out.rows, 4 * 256 / width),
                         qlora__ceil_div(out.cols, 8 * width), 1, 256, 0, args);
}

#else

static qlora_result qlora__nf4_quantise_gpu(qlora_ctx* ctx, const qlora_tensor* source,
                                            const qlora_nf4* weight, float* absmax,
                                            int64_t blocks) {
    (void)source;
    (void)weight;
    (void)absmax;
    (void)blocks;
    return qlora__no_kernels(ctx);
}

static qlora_result qlora__nf4_dequantise_gpu(qlora_ctx* ctx, const qlora__nf4_job* job) {
    (void)job;
    return qlora__no_kernels(ctx);
}

#endif

static qlora_result qlora__nf4_quantise(qlora_ctx* ctx, const qlora_tensor* source,
                                        const qlora_nf4* w) {
    QLORA__TRY(qlora__nf4_need(ctx, w, "the weight"));
    QLORA__TRY(qlora__need(ctx, source, "source", QLORA__IS_FLOAT, w->rows, w->cols));
    if (source->ld != source->cols && source->rows > 1) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "source.ld is %lld; it must be equal to cols (%lld)",
                           (long long)source->ld, (long long)source->cols);
    }
    int64_t blocks = qlora__ceil_div(w->rows * w->cols, w->block);
    void* scratch = NULL;
    float* absmax = w->absmax;
    if (absmax == NULL && blocks == 0) {
        return qlora__zero(ctx, w->offset, sizeof(float), sizeof(float), 1);
    }
    if (absmax == NULL) {
        QLORA__TRY(qlora__scratch(ctx, (size_t)blocks * 4, &scratch));
        absmax = (float*)scratch;
    }
    if (!qlora__on_cpu(ctx)) {
        return qlora__nf4_quantise_gpu(ctx, source, w, absmax, blocks);
    }
    qlora__nf4_job job;
    memset(&job, 0, sizeof job);
    job.w = w;
    job.source = source;
    job.absmax = absmax;
    qlora__parallel(ctx, blocks, 64, qlora__nf4_quantise_range, &job);
    if (w->absmax == NULL) {
        w->offset[0] = qlora__nf4_offset(absmax, blocks);
        qlora__nf4_quantise_scales(absmax, blocks, w->block2, w->offset[0], w->maps + 16,
                                   w->absmax_codes, w->absmax_scales);
    }
    return QLORA_OK;
}

qlora_result qlora_nf4_quantise(qlora_ctx* ctx, const qlora_tensor* source,
                                const qlora_nf4* weight) {
    QLORA__ENTER(ctx, "qlora_nf4_quantise");
    return qlora__leave(ctx, qlora__nf4_quantise(ctx, source, weight));
}

// Dequantises the part of the weight that starts at (row0, col0) and has the size of out.
static qlora_result qlora__nf4_window(qlora_ctx* ctx, const qlora_nf4* w, int64_t row0,
                                      int64_t col0, const qlora_tensor* out, bool via_bf16) {
    qlora__nf4_job job;
    memset(&job, 0, sizeof job);
    job.w = w;
    job.out = out;
    job.row0 = row0;
    job.col0 = col0;
    job.via_bf16 = via_bf16;
    if (out->rows == 0 || out->cols == 0) {
        return QLORA_OK;
    }
    if (!qlora__on_cpu(ctx)) {
        return qlora__nf4_dequantise_gpu(ctx, &job);
    }
    qlora__parallel(ctx, out->rows, 1 + 4096 / out->cols, qlora__nf4_dequantise_rows, &job);
    return QLORA_OK;
}

static qlora_result qlora__nf4_dequantise(qlora_ctx* ctx, const qlora_nf4* w,
                                          const qlora_tensor* out, bool via_bf16) {
    QLORA__TRY(qlora__nf4_need(ctx, w, "the weight"));
    QLORA__TRY(qlora__need(ctx, out, "out", QLORA__IS_FLOAT, w->rows, w->cols));
    return qlora__nf4_window(ctx, w, 0, 0, out, via_bf16);
}

qlora_result qlora_nf4_dequantise(qlora_ctx* ctx, const qlora_nf4* weight, const qlora_tensor* out,
                                  bool via_bf16) {
    QLORA__ENTER(ctx, "qlora_nf4_dequantise");
    return qlora__leave(ctx, qlora__nf4_dequantise(ctx, weight, out, via_bf16));
}

//@@ src/gemm/nf4_product.h

// ---- NF4 products: y = x W^T, dx = dy W ---------------------------------------------------------
//
// W[n,k] is bf16(level[code] * absmax) on every path. The unfused path dequantises parts of W in
// scratch: rows of W for y, columns for dx, so that no sum is ever split. The fused path
// (nf4_gemm.cu) dequantises the weights on the way to the tensor cores. It is faster as long as
// reading W costs more than multiplying, up to 32 rows (on an H200 at 64 rows: 71 us against 77).

#define QLORA__NF4_FUSED_ROWS 32 // also in the message of qlora__nf4_fused_lacks

// Returns how many of `count` rows or columns, `bytes` each, fit in the free scratch; at least
// `unit`.
static qlora_result qlora__nf4_slice(qlora_ctx* ctx, int64_t count, size_t bytes, int64_t unit,
                                     int64_t* slice, void** memory) {
    size_t free_bytes = qlora__scratch_free(ctx);
    int64_t fit = bytes > 0 ? (int64_t)(free_bytes / bytes) : count;
    if (fit < count) {
        fit = qlora__max(fit / unit * unit,
                         qlora__min(unit, count)); // if it does not fit, qlora__scratch fails
    }
    *slice = qlora__min(fit, count);
    return qlora__scratch(ctx, (size_t)*slice * bytes, memory);
}

static qlora_result qlora__nf4_unfused(qlora_ctx* ctx, qlora_math math, bool backward,
                                       const qlora_tensor* x, const qlora_nf4* w,
                                       const qlora_tensor* y, uint32_t flags) {
    int64_t count = backward ? w->cols : w->rows;
    int64_t other = backward ? w->rows : w->cols;
    int64_t slice = 0;
    qlora_tensor window;
    QLORA__TRY(qlora__tensor_shape(ctx, x->dtype, 1, 0, 0, 0, &window));
    QLORA__TRY(qlora__nf4_slice(ctx, count, (size_t)other * qlora_dtype_bytes(x->dtype), 64, &slice,
                                &window.data));
    qlora_gemm_desc d;
    memset(&d, 0, sizeof d);
    d.trans_b = !backward;
    d.alpha = 1.0f;
    d.beta = (flags & QLORA_PRODUCT_ACCUMULATE) != 0 ? 1.0f : 0.0f;
    d.path = qlora__product_path(flags);
    for (int64_t done = 0; done < count; done += slice) {
        int64_t now = qlora__min(slice, count - done);
        window.rows = backward ? other : now;
        window.cols = backward ? now : other;
        window.ld = window.cols;
        window.bytes = (size_t)(now * other) * qlora_dtype_bytes(x->dtype);
        QLORA__TRY(qlora__nf4_window(ctx, w, backward ? 0 : done, backward ? done : 0, &window,
                                     x->dtype == QLORA_F32));
        qlora_tensor part;
        QLORA__TRY(qlora__tensor_view(ctx, y, 0, y->rows, done, now, &part));
        QLORA__TRY(qlora__gemm_run(ctx, math, backward, &d, x, &window, &part));
    }
    return QLORA_OK;
}

#ifndef QLORA_NO_CUDA

// Returns the first requirement of the fused kernels that is not met, or NULL.
static const char* qlora__nf4_fused_lacks(const qlora_ctx* ctx, const qlora_tensor* x,
                                          const qlora_nf4* w) {
    if (!qlora__gpu_takes(ctx, 80)) {
        return "a GPU of compute capability 8.0 or later";
    }
    if (x->dtype != QLORA_BF16) {
        return "x in bf16";
    }
    if (x->rows > QLORA__NF4_FUSED_ROWS) {
        return "at most 32 rows of x";
    }
    if (x->cols % 32 != 0) {
        return "the columns of x to be a multiple of 32";
    }
    if (x->cols > INT32_MAX - 4096 || w->rows > INT32_MAX - 4096) {
        return "at most 2147479551 rows and columns of W";
    }
    if (w->rows * (x->cols / 32) > INT32_MAX) {
        return "fewer than 2^36 elements in W";
    }
    if (x->ld % 8 != 0 || (uintptr_t)x->data % 16 != 0) {
        return "rows of x that are aligned to 16 bytes";
    }
    return (uintptr_t)w->codes % 16 != 0 ? "codes that are aligned to 16 bytes" : NULL;
}

// How the blocks of a fused product share the work: blocks[] of them over the rows of each weight,
// and `splits` ranges of K. The order of the sums, and with it every bit of the result, depends
// only on M and K, not on the GPU.
typedef struct qlora__nf4_share {
    qlora__kernel_id kernel;
    int64_t blocks[2];
    int64_t splits;
    int32_t range;
    uint32_t threads;
    uint32_t shared;
} qlora__nf4_share;

// Shared memory for the table with which the fused kernels dequantise codes.
#define QLORA__NF4_TABLE_BYTES (256u * 16 * 8 + 256 * 4)

// Up to 16 rows: 256 columns per warp, up to 16 warps per block, and as many blocks as run at once.
static void qlora__nf4_share_columns(const qlora_ctx* ctx, int64_t K, const qlora_nf4* w,
                                     qlora__nf4_share* s) {
    int64_t steps = qlora__max(1, qlora__ceil_div(K, 256));
    int64_t warps = qlora__ceil_div(steps, qlora__ceil_div(steps, 16));
    int64_t tiles[2] = {qlora__ceil_div(w[0].rows, 8), qlora__ceil_div(w[1].rows, 8)};
    s->kernel = QLORA__K_nf4_gemm_16;
    s->splits = qlora__ceil_div(steps, warps);
    s->range = (int32_t)(warps * 256);
    s->threads = (uint32_t)warps * 32;
    s->shared = QLORA__NF4_TABLE_BYTES + (uint32_t)warps * 2 * 2 * (128 + 16) * 4;
    int64_t together = qlora__min(16 / warps, 4); // limited by the tables in shared memory
    int64_t blocks = qlora__max(2, ctx->gpu->sm_count * together / s->splits);
    int64_t first = tiles[1] > 0 ? blocks * tiles[0] / (tiles[0] + tiles[1]) : blocks;
    first = tiles[0] > 0 ? qlora__max(1, first) : 0;
    s->blocks[0] = qlora__min(first, tiles[0]);
    s->blocks[1] = qlora__min(qlora__max(1, blocks - first), tiles[1]);
}

// Up to 32 rows: 128 rows of W per block, with K in about as many ranges as fill 132
// multiprocessors.
static void qlora__nf4_share_rows(int64_t K, const qlora_nf4* w, qlora__nf4_share* s) {
    int64_t steps = qlora__max(1, qlora__ceil_div(K, 256));
    s->kernel = QLORA__K_nf4_gemm_32;
    s->blocks[0] = qlora__ceil_div(w[0].rows, 128);
    s->blocks[1] = qlora__ceil_div(w[1].rows, 128);
    int64_t most = qlora__min(8, qlora__max(1, 264 / (s->blocks[0] + s->blocks[1])));
    int64_t each = qlora__ceil_div(steps, most);
    s->splits = qlora__ceil_div(steps, each);
    s->range = (int32_t)(each * 256);
    s->threads = 256;
    s->shared = QLORA__NF4_TABLE_BYTES + 32u * 512 * 2;
}

static qlora_result qlora__nf4_fused(qlora_ctx* ctx, const qlora_tensor* x, const qlora_nf4* w1,
                                     const qlora_nf4* w2, const qlora_tensor* y1,
                                     const qlora_tensor* y2) {
    qlora_nf4 w[2];
    memset(w, 0, sizeof w);
    w[0] = *w1;
    if (w2 != NULL) {
        w[1] = *w2;
    }
    int64_t width = w[0].rows + w[1].rows;
    int32_t M = (int32_t)x->rows;
    int32_t K = (int32_t)x->cols;
    if (M == 0 || width == 0) {
        return QLORA_OK;
    }
    qlora__nf4_share share;
    if (M <= 16) {
        qlora__nf4_share_columns(ctx, K, w, &share);
    } else {
        qlora__nf4_share_rows(K, w, &share);
    }
    void* partials = NULL;
    if (share.splits > 1) {
        QLORA__TRY(qlora__scratch(ctx, (size_t)(share.splits * M * width) * 4, &partials));
    }
    void* source = x->data;
    int64_t ldx = x->ld;
    int32_t is_bf16 = y1->dtype == QLORA_BF16 ? 1 : 0;
    int32_t blocks1 = (int32_t)share.blocks[0];
    int32_t shift[4] = {qlora__log2(w[0].block), qlora__log2(w[0].block2), qlora__log2(w[1].block),
                        qlora__log2(w[1].block2)};
    int32_t N[2] = {(int32_t)w[0].rows, (int32_t)w[1].rows};
    void* y[2] = {y1->data, y2 != NULL ? y2->data : NULL};
    int64_t ldy[2] = {y1->ld, y2 != NULL ? y2->ld : 0};
    void* args[30] = {&source, &ldx, &M, &K, &share.range, &is_bf16, &partials, &blocks1};
    for (int i = 0; i < 2; i++) {
        void* own[11] = {&w[i].codes,
                         &w[i].absmax,
                         &w[i].absmax_codes,
                         &w[i].absmax_scales,
                         &w[i].offset,
                         &w[i].maps,
                         &shift[2 * i],
                         &shift[2 * i + 1],
                         &N[i],
                         &y[i],
                         &ldy[i]};
        memcpy(args + 8 + 11 * i, own, sizeof own);
    }
    QLORA__TRY(qlora__launch(ctx, share.kernel, share.blocks[0] + share.blocks[1], share.splits, 1,
                             share.threads, share.shared, args));
    if (share.splits == 1) {
        return QLORA_OK;
    }
    int32_t count = (int32_t)share.splits;
    void* sum[] = {&partials, &count, &M, &N[0], &y[0], &ldy[0], &N[1], &y[1], &ldy[1], &is_bf16};
    return qlora__launch(ctx, QLORA__K_nf4_gemm_reduce, qlora__ceil_div(width, 256), M, 1, 256, 0,
                         sum);
}

#else

static const char* qlora__nf4_fused_lacks(const qlora_ctx* ctx, const qlora_tensor* x,
                                          const qlora_nf4* w) {
    (void)ctx;
    (void)x;
    (void)w;
    return "a GPU of compute capability 8.0 or later";
}

static qlora_result qlora__nf4_fused(qlora_ctx* ctx, const qlora_tensor* x, const qlora_nf4* w1,
                                     const qlora_nf4* w2, const qlora_tensor* y1,
                                     const qlora_tensor* y2) {
    (void)x;
    (void)w1;
    (void)w2;
    (void)y1;
    (void)y2;
    return qlora__no_kernels(ctx);
}

#endif

// Checks one product; x is [rows, cols of W] forward and [rows, rows of W] backward.
static qlora_result qlora__nf4_gemm_check(qlora_ctx* ctx, bool backward, const qlora_tensor* x,
                                          const qlora_nf4* w, const qlora_tensor* y,
                                          uint32_t flags) {
    QLORA__TRY(qlora__nf4_need(ctx, w, "W"));
    int64_t in = backward ? w->rows : w->cols;
    int64_t out = backward ? w->cols : w->rows;
    QLORA__TRY(qlora__need(ctx, x, backward ? "dy" : "x", QLORA__IS_F32 | QLORA__IS_BF16, -1, in));
    QLORA__TRY(
        qlora__need(ctx, y, backward ? "dx" : "y", QLORA__IS_F32 | QLORA__IS_BF16, x->rows, out));
    QLORA__TRY(qlora__gemm_check_types(ctx, x, x, y));
    QLORA__TRY(qlora__need_apart(ctx, backward ? "dx" : "y", y, backward ? "dy" : "x", x));
    QLORA__TRY(qlora__product_flags_check(ctx, flags, true));
    if ((flags & QLORA_PRODUCT_FUSED) != 0) {
        const char* lacks = backward ? "a forward product" : qlora__nf4_fused_lacks(ctx, x, w);
        if (lacks != NULL) {
            return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED, "flags: QLORA_PRODUCT_FUSED needs %s",
                               lacks);
        }
    }
    return QLORA_OK;
}

static bool qlora__nf4_wants_fused(const qlora_ctx* ctx, const qlora_tensor* x, const qlora_nf4* w,
                                   uint32_t flags) {
    uint32_t other =
        QLORA_PRODUCT_UNFUSED | QLORA_PRODUCT_ACCUMULATE | QLORA_PRODUCT_PTX | QLORA_PRODUCT_CUBLAS;
    return (flags & other) == 0 && qlora__nf4_fused_lacks(ctx, x, w) == NULL;
}

static qlora_result qlora__nf4_gemm(qlora_ctx* ctx, qlora_math math, bool backward,
                                    const qlora_tensor* x, const qlora_nf4* w,
                                    const qlora_tensor* y, uint32_t flags) {
    QLORA__TRY(qlora__nf4_gemm_check(ctx, backward, x, w, y, flags));
    if (!backward && qlora__nf4_wants_fused(ctx, x, w, flags)) {
        ctx->last_path = QLORA_PATH_NF4;
        return qlora__nf4_fused(ctx, x, w, NULL, y, NULL);
    }
    return qlora__nf4_unfused(ctx, math, backward, x, w, y, flags);
}

qlora_result qlora_nf4_gemm_forward(qlora_ctx* ctx, const qlora_tensor* x, const qlora_nf4* w,
                                    const qlora_tensor* y, uint32_t flags) {
    QLORA__ENTER(ctx, "qlora_nf4_gemm_forward");
    return qlora__leave(ctx, qlora__nf4_gemm(ctx, ctx->desc.math, false, x, w, y, flags));
}

qlora_result qlora_nf4_gemm_backward(qlora_ctx* ctx, const qlora_tensor* dy, const qlora_nf4* w,
                                     const qlora_tensor* dx, uint32_t flags) {
    QLORA__ENTER(ctx, "qlora_nf4_gemm_backward");
    return qlora__leave(ctx, qlora__nf4_gemm(ctx, ctx->desc.math, true, dy, w, dx, flags));
}

static qlora_result qlora__nf4_gemm2(qlora_ctx* ctx, const qlora_tensor* x, const qlora_nf4* w1,
                                     const qlora_nf4* w2, const qlora_tensor* y1,
                                     const qlora_tensor* y2, uint32_t flags) {
    QLORA__TRY(qlora__nf4_gemm_check(ctx, false, x, w1, y1, flags));
    QLORA__TRY(qlora__nf4_gemm_check(ctx, false, x, w2, y2, flags));
    QLORA__TRY(qlora__need_apart(ctx, "y1", y1, "y2", y2));
    if (y1->dtype == y2->dtype && qlora__nf4_wants_fused(ctx, x, w1, flags) &&
        qlora__nf4_wants_fused(ctx, x, w2, flags)) {
        ctx->last_path = QLORA_PATH_NF4;
        return qlora__nf4_fused(ctx, x, w1, w2, y1, y2);
    }
    size_t before = qlora__scratch_mark(ctx);
    QLORA__TRY(qlora__nf4_gemm(ctx, ctx->desc.math, false, x, w1, y1, flags));
    qlora__scratch_release(ctx, before);
    return qlora__nf4_gemm(ctx, ctx->desc.math, false, x, w2, y2, flags);
}

qlora_result qlora_nf4_gemm_forward2(qlora_ctx* ctx, const qlora_tensor* x, const qlora_nf4* w1,
                                     const qlora_nf4* w2, const qlora_tensor* y1,
                                     const qlora_tensor* y2, uint32_t flags) {
    QLORA__ENTER(ctx, "qlora_nf4_gemm_forward2");
    return qlora__leave(ctx, qlora__nf4_gemm2(ctx, x, w1, w2, y1, y2, flags));
}

//@@ src/ops/clip.h

// ---- gradient clipping --------------------------------------------------------------------------
//
//   norm[g]  = sqrt(sum over the gradients of group g of x^2)
//   scale[g] = min(1, max_norm / (norm[g] + 1e-6)), or 1 when norm[g] is not finite or max_norm < 0
//   x       *= scale of its group
//
// All of it stays on the device: the host never waits for the norm. Gradients are split into chunks
// of 8192 elements, which are summed in double in a fixed order. (On the GPU the squares are f32,
// so only gradients between 1e-18 and 1e18 contribute fully to the norm.)

#define QLORA__CLIP_CHUNK 8192

typedef struct qlora__clip_part { // the same as struct clip_tensor in kernels/clip.cu
    float* data;
    int64_t count;
} qlora__clip_part;

typedef struct qlora__clip_chunk { // the same as struct clip_chunk in kernels/clip.cu
    int32_t part;
    int32_t group;
    int64_t index;
} qlora__clip_chunk;

struct qlora_clip {
    qlora_ctx* owner;
    int32_t groups;
    int64_t parts;
    int64_t chunks;
    const void** uses; // the gradients' memory, on which a graph with this clip depends
    size_t use_count;
    qlora__buffer* memory; // holds everything below; device memory on CUDA
    qlora__clip_part* part_table;
    qlora__clip_chunk* chunk_table;
    int64_t* first;    // [groups + 1]: index of each group's first chunk
    double* partials;  // [chunks]
    QLORA__REAL* results; // [groups][2]: norm, scale; f32 for AdamW
    uint32_t* flags;   // [groups]: 1 = not finite
    uint32_t* any;     // [1]: 1 = some group was not finite; the optimizer reads it
    float* max_norm;   // [1]
};

// Places the tables one after another, starting at base. With base NULL, only counts the bytes.
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
    QLORA__PLACE(results, QLORA__REAL, 2 * clip->groups);
    QLORA__PLACE(flags, uint32_t, clip->groups);
    QLORA__PLACE(any, uint32_t, 1);
    QLORA__PLACE(max_norm, float, 1);
#undef QLORA__PLACE
    return at;
}

// Returns the number of parts: one per row for a tensor with gaps between its rows, otherwise one.
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
                               "%s is in group %d; groups are numbered from 0 to at most %llu",
                               name, (int)group, (unsigned long long)n - 1);
        }
        clip->groups = group >= clip->groups ? group + 1 : clip->groups;
        int64_t parts = qlora__clip_parts_of(tensors[i]);
        int64_t length = parts == 1 ? tensors[i]->rows * tensors[i]->cols : tensors[i]->cols;
        clip->parts += parts;
        clip->chunks += parts * qlora__ceil_div(length, QLORA__CLIP_CHUNK);
    }
    if (clip->parts > INT32_MAX || clip->chunks > INT32_MAX) {
        bool rows = clip->parts > INT32_MAX;
        return qlora__fail(ctx, QLORA_ERR_LIMIT, "the tensors have %lld %s; the maximum is %d",
                           (long long)(rows ? clip->parts : clip->chunks),
                           rows ? "separate rows" : "chunks", INT32_MAX);
    }
    return QLORA_OK;
}

// Fills the tables in host memory. The chunks of a group are consecutive.
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
    size_t list_bytes = 0;
    if (!qlora__mul(n, sizeof *clip->uses, &list_bytes)) {
        return qlora__fail(ctx, QLORA_ERR_LIMIT, "n is %llu; a list of that size overflows",
                           (unsigned long long)n);
    }
    clip->uses = (const void**)qlora__alloc(ctx, list_bytes);
    if (clip->uses == NULL) {
        return QLORA_ERR_MEMORY;
    }
    clip->use_count = n;
    for (size_t i = 0; i < n; i++) {
        clip->uses[i] = tensors[i]->data;
    }
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

static void qlora__clip_free(qlora_ctx* ctx, qlora_clip* clip) {
    qlora__buffer_destroy(ctx, clip->memory);
    qlora__free(ctx, (void*)clip->uses, clip->use_count * sizeof *clip->uses);
    qlora__free(ctx, clip, sizeof *clip);
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
        qlora__clip_free(ctx, clip);
        return r;
    }
    ctx->living[QLORA__CLIPS]++;
    *out = clip;
    return QLORA_OK;
}

qlora_result qlora_clip_create(qlora_ctx* ctx, const qlora_tensor* const* tensors,
                               const int32_t* groups, size_t n, qlora_clip** out) {
    QLORA__ENTER(ctx, "qlora_clip_create");
    return qlora__leave(ctx, qlora__clip_create(ctx, tensors, groups, n, out));
}

static qlora_ctx* qlora__clip_ctx(const qlora_clip* clip) {
    return clip != NULL ? clip->owner : NULL;
}

static qlora_result qlora__clip_destroy(qlora_ctx* ctx, qlora_clip* clip) {
    QLORA__TRY(qlora__not_in_capture(ctx, "freeing memory"));
    qlora__clip_free(ctx, clip);
    ctx->living[QLORA__CLIPS]--;
    return QLORA_OK;
}

qlora_result qlora_clip_destroy(qlora_clip* clip) {
    if (clip == NULL) {
        return QLORA_OK;
    }
    qlora_ctx* ctx = clip->owner;
    QLORA__TRY(qlora__enter_destroy(ctx, "qlora_clip_destroy"));
    return qlora__leave(ctx, qlora__clip_destroy(ctx, clip));
}

static qlora_result qlora__clip_set(qlora_ctx* ctx, qlora_clip* clip, float max_norm) {
    if ((qlora__bits(max_norm) & 0x7fffffffu) > 0x7f800000u) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "max_norm is not a number (NaN)");
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

qlora_result qlora_clip_set(qlora_clip* clip, float max_norm) {
    qlora_ctx* ctx = qlora__clip_ctx(clip);
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
        float scale = (float)clip->results[2 * c->group + 1];
        int64_t from = c->index * QLORA__CLIP_CHUNK;
        int64_t to = qlora__min(from + QLORA__CLIP_CHUNK, part->count);
        for (int64_t j = from; j < to && scale != 1.0f; j++) {
            QLORA__REAL x = qlora__load(part->data, QLORA_F32, j);
            qlora__store(part->data, QLORA_F32, j, x * (QLORA__REAL)scale);
        }
    }
}

static void qlora__clip_measure_cpu(qlora_ctx* ctx, qlora_clip* clip) {
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
}

// Computes norms, scales and flags but leaves the gradients unchanged, for an AdamW that applies
// the scale itself.
static qlora_result qlora__clip_measure(qlora_ctx* ctx, qlora_clip* clip) {
    QLORA__TRY(qlora__capture_note(ctx, clip->part_table));
    if (qlora__on_cpu(ctx)) {
        qlora__clip_measure_cpu(ctx, clip);
        return QLORA_OK;
    }
    for (size_t i = 0; i < clip->use_count && ctx->capture != NULL; i++) {
        QLORA__TRY(qlora__capture_note(ctx, clip->uses[i]));
    }
    qlora_clip c = *clip; // parameters are passed by address
    void* squares[] = {&c.part_table, &c.chunk_table, &c.partials};
    QLORA__TRY(qlora__launch(ctx, QLORA__K_clip_squares, clip->chunks, 1, 1, 256, 0, squares));
    void* scale[] = {&c.partials, &c.first, &c.max_norm, &c.results, &c.flags};
    return qlora__launch(ctx, QLORA__K_clip_scale, clip->groups, 1, 1, 256, 0, scale);
}

qlora_result qlora_clip_measure(qlora_clip* clip) {
    qlora_ctx* ctx = qlora__clip_ctx(clip);
    QLORA__ENTER(ctx, "qlora_clip_measure");
    return qlora__leave(ctx, qlora__clip_measure(ctx, clip));
}

static qlora_result qlora__clip_apply(qlora_ctx* ctx, qlora_clip* clip) {
    QLORA__TRY(qlora__clip_measure(ctx, clip));
    if (qlora__on_cpu(ctx)) {
        qlora__parallel(ctx, clip->chunks, 8, qlora__clip_apply_cpu, clip);
        return QLORA_OK;
    }
    qlora_clip c = *clip; // parameters are passed by address
    void* apply[] = {&c.part_table, &c.chunk_table, &c.chunks, &c.results,
                     &c.flags,      &c.groups,      &c.any};
    return qlora__launch(ctx, QLORA__K_clip_apply, qlora__max(clip->chunks, 1), 1, 1, 256, 0,
                         apply);
}

qlora_result qlora_clip_apply(qlora_clip* clip) {
    qlora_ctx* ctx = qlora__clip_ctx(clip);
    QLORA__ENTER(ctx, "qlora_clip_apply");
    return qlora__leave(ctx, qlora__clip_apply(ctx, clip));
}

static qlora_result qlora__clip_group_check(qlora_ctx* ctx, const qlora_clip* clip, int32_t group,
                                            int32_t least) {
    if (group < least || group >= clip->groups) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "group %d does not exist; use %d to %d",
                           (int)group, (int)least, (int)clip->groups - 1);
    }
    return QLORA_OK;
}

static qlora_result qlora__clip_query(qlora_ctx* ctx, qlora_clip* clip, int32_t group,
                                      qlora_clip_info* out) {
    if (out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    QLORA__TRY(qlora__clip_group_check(ctx, clip, group, 0));
    QLORA__REAL result[2];
    uint32_t flag = 0;
    QLORA__TRY(qlora__copy_out(ctx, result, clip->results + 2 * group, sizeof result));
    QLORA__TRY(qlora__copy_out(ctx, &flag, clip->flags + group, sizeof flag));
    out->norm = (float)result[0];
    out->scale = (float)result[1];
    out->finite = flag == 0;
    return QLORA_OK;
}

qlora_result qlora_clip_query(qlora_clip* clip, int32_t group, qlora_clip_info* out) {
    qlora_ctx* ctx = qlora__clip_ctx(clip);
    QLORA__ENTER(ctx, "qlora_clip_query");
    return qlora__leave(ctx, qlora__clip_query(ctx, clip, group, out));
}

static qlora_tensor qlora__clip_scalar(const qlora_clip* clip, void* data, qlora_dtype dtype) {
    qlora_tensor t;
    memset(&t, 0, sizeof t);
    t.data = data;
    t.bytes = qlora_dtype_bytes(dtype);
    t.dtype = dtype;
    t.rows = 1;
    t.cols = 1;
    t.ld = 1;
    t.batch = 1;
    t.batch_stride = 1;
    t.owner = clip->owner;
    return t;
}

// Returns a group's scale and flag as tensors for AdamW. Group -1 has the flag of all groups.
static void qlora__clip_device(const qlora_clip* clip, int32_t group, qlora_tensor* scale,
                               qlora_tensor* not_finite) {
    if (scale != NULL) {
        *scale = qlora__clip_scalar(clip, clip->results + 2 * group + 1, QLORA_F32);
    }
    if (not_finite != NULL) {
        uint32_t* flag = group < 0 ? clip->any : clip->flags + group;
        *not_finite = qlora__clip_scalar(clip, flag, QLORA_I32);
    }
}

qlora_result qlora_clip_device(qlora_clip* clip, int32_t group, qlora_tensor* scale,
                               qlora_tensor* not_finite) {
    qlora_ctx* ctx = qlora__clip_ctx(clip);
    QLORA__ENTER(ctx, "qlora_clip_device");
    qlora_result r = qlora__clip_group_check(ctx, clip, group, scale != NULL ? 0 : -1);
    if (r == QLORA_OK) {
        qlora__clip_device(clip, group, scale, not_finite);
    }
    return qlora__leave(ctx, r);
}

// ---- a clip of one tensor in the caller's memory ------------------------------------------------

// Sets up a clip of n gradients with its tables at base and returns the size of the tables in
// bytes. With base NULL, only counts the bytes.
static QLORA__UNUSED size_t qlora__clip_place(qlora_ctx* ctx, int64_t n, char* base,
                                              qlora_clip* clip) {
    memset(clip, 0, sizeof *clip);
    clip->owner = ctx;
    clip->groups = 1;
    clip->parts = n > 0 ? 1 : 0;
    clip->chunks = qlora__ceil_div(n, QLORA__CLIP_CHUNK);
    return qlora__clip_layout(clip, base);
}

// Writes the tables of a placed clip.
static QLORA__UNUSED qlora_result qlora__clip_start(qlora_ctx* ctx, const qlora_clip* clip,
                                                    const qlora_tensor* gradients, float max_norm) {
    qlora_clip image = *clip;
    size_t bytes = qlora__clip_layout(&image, NULL);
    char* host = (char*)qlora__alloc_zero(ctx, bytes);
    if (host == NULL) {
        return QLORA_ERR_MEMORY;
    }
    qlora__clip_layout(&image, host);
    qlora__clip_fill(&gradients, NULL, clip->parts > 0 ? 1 : 0, &image);
    *image.max_norm = max_norm;
    qlora_result r = qlora__copy_in(ctx, clip->part_table, host, bytes); // the first table
    qlora__free(ctx, host, bytes);
    return r;
}

// Returns norm and scale of the first group, in the backend's memory.
static QLORA__UNUSED const QLORA__REAL* qlora__clip_results(const qlora_clip* clip) {
    return clip->results;
}

#define QLORA__PI 3.14159265358979323846

//@@ src/ops/elementwise.h

// ---- checks and launch shapes shared by the operators -------------------------------------------

// Returns the mask for a single dtype, for qlora__need.
static unsigned qlora__is(qlora_dtype dtype) {
    return 1u << (unsigned)dtype;
}

#define QLORA__IS_F32_BF16 (QLORA__IS_F32 | QLORA__IS_BF16)

// An output may share memory with an input only if both have exactly the same elements.
static qlora_result qlora__need_same_or_apart(qlora_ctx* ctx, const char* name,
                                              const qlora_tensor* t, const char* other_name,
                                              const qlora_tensor* other) {
    if (t->data == other->data && t->ld == other->ld && t->cols == other->cols &&
        t->dtype == other->dtype) {
        return QLORA_OK;
    }
    return qlora__need_apart(ctx, name, t, other_name, other);
}

// Checks a vector: one row of `count` elements.
static qlora_result qlora__need_vector(qlora_ctx* ctx, const qlora_tensor* t, const char* name,
                                       unsigned mask, int64_t count) {
    return qlora__need(ctx, t, name, mask, 1, count);
}

// Returns the number of elements in the 16-byte piece that a thread of the vector kernels handles.
static int64_t qlora__piece(qlora_dtype dtype) {
    return dtype == QLORA_F32 || dtype == QLORA_I32 ? 4 : 8;
}

static uint32_t qlora__grid_cap(int64_t blocks) {
    return (uint32_t)(blocks < 65535 ? blocks : 65535);
}

// Launch shape of an element-wise kernel: blocks per row, threads per block.
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

// Launch shape of a kernel that reduces rows: `width` threads per row, `rows` rows per block.
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

// Rows and columns for a kernel. Matrices of the same shape without padding are treated as one long
// row, whose leading dimension is irrelevant; it is passed as 0 so that it cannot prevent 16-byte
// accesses.
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

// Returns the caller's error flag, or a word in scratch if there is none.
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

// Returns element i of an I32 vector, on the CPU.
static int32_t qlora__index_at(const qlora_tensor* t, int64_t i) {
    return ((const int32_t*)t->data)[i];
}

// Returns matrix b of a batch.
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

// y = op(a, b, alpha); inputs that the operator does not read are NULL.
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
            // An output may overwrite only its own input: h dh, dgate gate, and dup up.
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

//@@ src/ops/norm.h

// ---- RMSNorm ------------------------------------------------------------------------------------
//
// A row of x consists of x->cols / w->cols heads of n = w->cols columns (one head for a plain
// norm). For each head:
//   forward   x = h + delta, rounded to storage (only with delta);  r = 1 / sqrt(mean(x^2) + eps);
//             y = x r w
//   backward  dx = dres + r (w dy - x r^2 mean(w dy x));  dw += sum over rows and heads of dy x r

typedef struct qlora__norm_job {
    const qlora_tensor* x;     // input, to which delta is added
    const qlora_tensor* delta; // or NULL
    const qlora_tensor* sum;   // receives x + delta
    const qlora_tensor* w;
    const qlora_tensor* y;
    const qlora_tensor* dy;
    const qlora_tensor* dres; // or NULL
    const qlora_tensor* dx;
    const qlora_tensor* dw; // or NULL
    float eps;
    QLORA__REAL* rstd; // [rows * heads], scratch for the gradient of w
} qlora__norm_job;

// Returns 1 / sqrt(mean(x^2) + eps) over n columns from `first` on.
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

// Computes columns [begin, end) of dw.
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

// Checks the weight: one row, whose length divides the columns of x.
static qlora_result qlora__norm_need_weight(qlora_ctx* ctx, const qlora_tensor* x,
                                            const qlora_tensor* w) {
    QLORA__TRY(qlora__need_vector(ctx, w, "w", QLORA__IS_F32_BF16, -1));
    if (w->cols == 0 ? x->cols != 0 : x->cols % w->cols != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "x.cols is %lld; it must be a multiple of w.cols (%lld)",
                           (long long)x->cols, (long long)w->cols);
    }
    QLORA__TRY(qlora__need_whole(ctx, "w.cols", w->cols, 0, (int64_t)1 << 30));
    if (w->cols > 0 && x->cols / w->cols > 65535) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "x has %lld heads of %lld columns; the maximum is 65535 heads",
                           (long long)(x->cols / w->cols), (long long)w->cols);
    }
    return QLORA_OK;
}

// Two pieces per thread, as in the kernels.
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

// Runs the two stages of dw on the device, with the rstd from the first launch.
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

//@@ src/ops/rope.h

// ---- rotary position embedding ------------------------------------------------------------------
//
// The two elements of a pair are half a head apart. With half = head_dim / 2, angle = position f_i:
//   a = x[i] + bias[i], b = x[i + half] + bias[i + half]
//   x[i] = a cos - b sin,  x[i + half] = b cos + a sin;   backward: with -angle
// The table follows transformers: inverse frequencies and angles in fp32, then accurate cosines and
// sines.

// Wavelengths above original / low are stretched by `factor`, those below original / high are kept,
// with a blend in between.
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

// Returns the dimension that makes `turns` rotations within the original context.
static double qlora__rope_yarn_dim(const qlora_rope_desc* d, double turns, int64_t head_dim) {
    return (double)head_dim * log(d->original_max_position / (turns * 2 * QLORA__PI)) /
           (2 * log(d->theta));
}

// Low dimensions (many rotations) keep their frequency, high ones are divided by `factor`, with a
// blend in between.
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

// Returns the factor of the cosines and sines.
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

// Describes what is wrong with the arguments, with the desc called `name`; the text is empty if
// nothing is. Replaces the zero fields of d by their defaults.
static void qlora__rope_fault(qlora_rope_desc* d, const char* name, int64_t head_dim,
                              int64_t positions, char* text, size_t size) {
    d->theta = d->theta != 0 ? d->theta : 10000;
    d->factor = d->factor != 0 ? d->factor : 1;
    bool needs_original = d->type == QLORA_ROPE_LLAMA3 || d->type == QLORA_ROPE_YARN;
    text[0] = '\0';
    if (head_dim <= 0 || head_dim % 2 != 0) {
        snprintf(text, size, "head_dim is %lld; it must be even and positive", (long long)head_dim);
    } else if (positions < 0) {
        snprintf(text, size, "positions is %lld; it must not be negative", (long long)positions);
    } else if ((int)d->type < 0 || d->type > QLORA_ROPE_YARN) {
        snprintf(text, size, "%s.type is %d; it must be one of qlora_rope_type", name,
                 (int)d->type);
    } else if (!(d->theta > 1)) {
        snprintf(text, size, "%s.theta is %g; it must be greater than 1", name, d->theta);
    } else if (!(d->factor > 0)) {
        snprintf(text, size, "%s.factor is %g; it must be positive", name, d->factor);
    } else if (needs_original && !(d->original_max_position > 0)) {
        snprintf(text, size, "%s.original_max_position is %g; for this type it must be positive",
                 name, d->original_max_position);
    }
}

static qlora_result qlora__rope_table(qlora_ctx* ctx, const qlora_rope_desc* desc, const char* name,
                                      int64_t head_dim, int64_t positions, float* out) {
    qlora_rope_desc d;
    char text[160] = "desc is NULL";
    memset(&d, 0, sizeof d);
    if (desc != NULL) {
        d = *desc;
        qlora__rope_fault(&d, name, head_dim, positions, text, sizeof text);
    }
    if (text[0] == '\0' && out == NULL && positions > 0) {
        snprintf(text, sizeof text, "out is NULL");
    }
    if (text[0] != '\0') {
        return ctx != NULL ? qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s", text) : QLORA_ERR_ARGUMENT;
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

qlora_result qlora_rope_table(qlora_ctx* ctx, const qlora_rope_desc* desc, int64_t head_dim,
                              int64_t positions, float* out) {
    if (ctx == NULL) {
        return qlora__rope_table(NULL, desc, "desc", head_dim, positions, out);
    }
    QLORA__ENTER(ctx, "qlora_rope_table");
    return qlora__leave(ctx, qlora__rope_table(ctx, desc, "desc", head_dim, positions, out));
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
    QLORA__TRY(qlora__need_whole(ctx, "table.cols", head_dim, 2, INT32_MAX));
    QLORA__TRY(qlora__need_whole(ctx, "table.rows", job->table->rows, 0, INT32_MAX));
    QLORA__TRY(qlora__need_whole(ctx, "x.cols", x->cols, 0, INT32_MAX));
    if (head_dim % 2 != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "table.cols is %lld; it must be even",
                           (long long)head_dim);
    }
    if (x->cols % head_dim != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "x.cols is %lld; it must be a multiple of table.cols (%lld)",
                           (long long)x->cols, (long long)head_dim);
    }
    QLORA__TRY(qlora__need_whole(ctx, "rotated", job->rotated, 0, x->cols / head_dim));
    for (int64_t row = 0; qlora__on_cpu(ctx) && row < x->rows; row++) {
        int32_t position = qlora__index_at(job->positions, row);
        if (position < 0 || position >= job->table->rows) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "positions[%lld] is %d; the table has %lld rows", (long long)row,
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
    // Each thread rotates one piece of two heads.
    int64_t items = qlora__ceil_div(heads, 2) * qlora__ceil_div(half, qlora__piece(x->dtype));
    uint32_t threads = (uint32_t)qlora__max(32, qlora__min(256, qlora__ceil_div(items, 32) * 32));
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

//@@ src/ops/pieces.h

// ---- attention as separate operators ------------------------------------------------------------
//
//   heads      y[h, s, c] = x[s, h d + c] and back        transpose  y[b, c, r] = x[b, r, c]
//   scores     s = scale s, or -3e38 if the query may not see the key
//   softmax    y = e^(x - max) / sum e^(x - max);  dx = y (dy - sum(y dy))

// Finite, so that arithmetic on it never gives NaN; e^(QLORA__MASKED - max) is 0.
#define QLORA__MASKED -3.0e38f

// Copies elements between two batches of the same size, with or without a transpose.
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

// rows is [S, H*d], heads a batch of H matrices [S, d]. Copies rows to heads if split is true,
// otherwise heads to rows.
static qlora_result qlora__heads_copy(qlora_ctx* ctx, const qlora_tensor* rows,
                                      const qlora_tensor* heads, bool split) {
    QLORA__TRY(qlora__need(ctx, rows, split ? "x" : "y", QLORA__IS_COPIED, -1, -1));
    QLORA__TRY(qlora__need_batch(ctx, heads, split ? "y" : "x", qlora__is(rows->dtype), -1,
                                 rows->rows, -1));
    if (heads->batch < 0 || heads->batch * heads->cols != rows->cols) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "%s.cols is %lld; expected %lld heads of %lld columns",
                           split ? "x" : "y", (long long)rows->cols, (long long)heads->batch,
                           (long long)heads->cols);
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

//@@ src/ops/loss.h

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
                                   "ids[%lld] is %d; the table has %lld rows", (long long)row,
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
// For each row x of the logits, with p = softmax(x):
//   loss = weight (log sum e^x - x[label]),   x = (p - onehot(label)) scale weight  (in place)
// Rows labelled -100 have loss 0 and gradient 0. For the sum of the losses, see
// qlora_cross_entropy_desc.total.

#define QLORA__NO_LABEL -100

static void qlora__cross_entropy_rows(void* user, int64_t begin, int64_t end) {
    const qlora_cross_entropy_desc* a = (const qlora_cross_entropy_desc*)user;
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

// total += {losses, rounding error of their sum, weights}; summed in double, by ascending row.
static void qlora__cross_entropy_total(const qlora_cross_entropy_desc* a) {
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

static qlora_result qlora__cross_entropy_check(qlora_ctx* ctx, const qlora_cross_entropy_desc* a) {
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
        return qlora__fail(ctx, QLORA_ERR_LIMIT, "logits.cols is %lld; the maximum is %d",
                           (long long)x->cols, INT32_MAX);
    }
    for (int64_t row = 0; qlora__on_cpu(ctx) && row < x->rows; row++) {
        int32_t label = qlora__index_at(a->labels, row);
        if ((label < 0 || label >= x->cols) && label != QLORA__NO_LABEL) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "labels[%lld] is %d; it must be -100, or from 0 to %lld",
                               (long long)row, (int)label, (long long)x->cols - 1);
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__cross_entropy(qlora_ctx* ctx, const qlora_cross_entropy_desc* a) {
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

qlora_result qlora_cross_entropy(qlora_ctx* ctx, const qlora_cross_entropy_desc* args) {
    QLORA__ENTER(ctx, "qlora_cross_entropy");
    return qlora__leave(ctx, qlora__cross_entropy(ctx, args));
}

// ---- arg max ------------------------------------------------------------------------------------
//
// ids[r] is the column of the largest value in row r, the first one if several are equal. A NaN is
// never the largest.

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
    QLORA__TRY(qlora__need_whole(ctx, "x.cols", x->cols, x->rows > 0 ? 1 : 0, INT32_MAX));
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

//@@ src/ops/adamw.h

// ---- AdamW --------------------------------------------------------------------------------------
//
// Decoupled weight decay over ranges of one flat arena; t is the number of updates applied so far.
// For each element, with g the gradient times the clip scale:
//   p -= lr weight_decay decay p;  m += (1 - beta1) (g - m);  v = beta2 v + (1 - beta2) g^2
//   p -= lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//   shadow = shadow_scale p, also in the range's copy if it has one;  gradient = 0
// If the gradient is not finite, p, m, v, t and shadow stay unchanged, and the gradient becomes 0.

// Computes x^n by squaring, with the same products as the kernel.
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
    const qlora_adamw_desc* args;
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

// Counts the update or the skipped step, and computes the bias corrections in double.
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

// Writes the shadow of parameter p, which is element i of the range.
static void qlora__adamw_shade(const qlora__adamw_job* job, int64_t i, QLORA__REAL p) {
    const qlora_adamw_range* r = &job->range;
    const qlora_tensor* shadow = job->args->shadow;
    QLORA__REAL x = (QLORA__REAL)r->shadow_scale * p;
    qlora__put(shadow, 0, r->begin + i, x);
    if (r->copy != NULL) {
        int64_t at = i / r->copy_cols * r->copy_ld + i % r->copy_cols;
        qlora__store(r->copy, shadow->dtype, at, x);
    }
}

static void qlora__adamw_elements(void* user, int64_t begin, int64_t end) {
    const qlora__adamw_job* job = (const qlora__adamw_job*)user;
    const qlora_adamw_desc* a = job->args;
    QLORA__REAL decay = job->lr_decay * (QLORA__REAL)job->range.decay;
    for (int64_t at = begin; at < end; at++) {
        int64_t i = job->range.begin + at;
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
                qlora__adamw_shade(job, at, p);
            }
        }
        qlora__put(a->grad, 0, i, 0);
    }
}

static void qlora__adamw_shadow_elements(void* user, int64_t begin, int64_t end) {
    const qlora__adamw_job* job = (const qlora__adamw_job*)user;
    for (int64_t i = begin; i < end; i++) {
        qlora__adamw_shade(job, i, qlora__at(job->args->param, 0, job->range.begin + i));
    }
}

// Returns range i of the table, which is in host memory.
static qlora_adamw_range qlora__adamw_range_at(const qlora_tensor* ranges, int64_t i) {
    qlora_adamw_range range;
    memcpy(&range, (const char*)ranges->data + (size_t)i * sizeof range, sizeof range);
    return range;
}

// Checks param, shadow and ranges, which both calls use.
static qlora_result qlora__adamw_check(qlora_ctx* ctx, const qlora_adamw_desc* a,
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
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "ranges has %lld bytes; expected a multiple of %d",
                           (long long)a->ranges->cols, (int)sizeof(qlora_adamw_range));
    }
    *range_count = a->ranges->cols / (int64_t)sizeof(qlora_adamw_range);
    for (int64_t i = 0; qlora__on_cpu(ctx) && i < *range_count; i++) {
        qlora_adamw_range r = qlora__adamw_range_at(a->ranges, i);
        if (r.begin < 0 || r.count < 0 || r.begin > a->param->cols ||
            r.count > a->param->cols - r.begin) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "range %lld has %lld elements from %lld on; the arena has %lld",
                               (long long)i, (long long)r.count, (long long)r.begin,
                               (long long)a->param->cols);
        }
        if (r.copy != NULL && r.copy_cols < 1) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "range %lld: copy_cols is %lld; it must be at least 1", (long long)i,
                               (long long)r.copy_cols);
        }
        if (r.copy != NULL && r.copy_ld < r.copy_cols) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "range %lld: copy_ld is %lld; it must be at least copy_cols (%lld)",
                               (long long)i, (long long)r.copy_ld, (long long)r.copy_cols);
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__adamw_check_step(qlora_ctx* ctx, const qlora_adamw_desc* a) {
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

// Calls fn for every range in turn.
static void qlora__adamw_ranges(qlora_ctx* ctx, qlora__adamw_job* job, int64_t range_count,
                                qlora__range_fn fn) {
    for (int64_t i = 0; i < range_count; i++) {
        job->range = qlora__adamw_range_at(job->args->ranges, i);
        qlora__parallel(ctx, job->range.count, 4096, fn, job);
    }
}

// Returns the number of blocks per range: enough for the longest range with `per_block` elements
// each, but about 8192 in all.
static int64_t qlora__adamw_blocks(const qlora_adamw_desc* a, int64_t range_count,
                                   int64_t per_block) {
    int64_t longest = a->longest_range > 0 ? a->longest_range : a->param->cols;
    int64_t wanted = qlora__ceil_div(longest, per_block);
    return qlora__min(wanted, qlora__max(8192 / qlora__max(range_count, 1), 8));
}

static qlora_result qlora__adamw_step(qlora_ctx* ctx, const qlora_adamw_desc* a) {
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

static qlora_result qlora__adamw_shadow(qlora_ctx* ctx, const qlora_adamw_desc* a) {
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

qlora_result qlora_adamw_step(qlora_ctx* ctx, const qlora_adamw_desc* args) {
    QLORA__ENTER(ctx, "qlora_adamw_step");
    return qlora__leave(ctx, qlora__adamw_step(ctx, args));
}

qlora_result qlora_adamw_shadow(qlora_ctx* ctx, const qlora_adamw_desc* args) {
    QLORA__ENTER(ctx, "qlora_adamw_shadow");
    return qlora__leave(ctx, qlora__adamw_shadow(ctx, args));
}

//@@ src/ops/dropout.h

// ---- dropout ------------------------------------------------------------------------------------
//
//   y = x keep / (1 - p)
//
// keep is 1 if the element's random word is at least p 2^32, and 0 otherwise. The word of column c
// is number c % 4 of philox(counter, key), with
//   counter = (c / 4, position, sequence, layer 2^8 + projection)
//   key = seed + step * 0x9e3779b97f4a7c15

typedef struct qlora__dropout_job {
    const qlora_dropout_desc* args;
    uint32_t threshold;
    uint32_t where;
    float scale;
} qlora__dropout_job;

// Returns whether column `column` of the row is kept.
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
    const qlora_dropout_desc* a = job->args;
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

static qlora_result qlora__dropout(qlora_ctx* ctx, const qlora_dropout_desc* a) {
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
    QLORA__TRY(qlora__need_real(ctx, "args.p", (double)a->p, 0, 1));
    QLORA__TRY(qlora__need_whole(ctx, "args.layer", a->layer, 0, (1 << 23) - 1));
    QLORA__TRY(qlora__need_whole(ctx, "args.projection", a->projection, 0, 255));
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

qlora_result qlora_dropout(qlora_ctx* ctx, const qlora_dropout_desc* args) {
    QLORA__ENTER(ctx, "qlora_dropout");
    return qlora__leave(ctx, qlora__dropout(ctx, args));
}

//@@ src/ops/linear.h

// ---- LoRA linear --------------------------------------------------------------------------------
//
//   z_i = x A_i^T (the masked x with dropout)         u_i = dy_i (s_i B_i)
//   y_i = x W_i^T + bias_i + z_i (s_i B_i)^T          dx  = sum over i of dy_i W_i + u_i A_i
//   dA_i += u_i^T x (the masked x)                    dB_i += s_i dy_i^T z_i
//
// z and u are rounded to the storage type and stored after the columns of x and dy. There are two
// forms. The plain form (without an operand), which the CPU uses, runs the products one by one. In
// the concatenated form the operand is W with sB to its right and A below it, so that a single
// product of length in + pad, or out + pad, is enough. The columns of z and u that pad the sum of
// the ranks are zero. With dropout each part has its own mask, so z is computed part by part, and
// the masked u_i A_i are added to dx one at a time.

int64_t qlora_linear_out(const qlora_linear_desc* linear) {
    int64_t out = 0;
    for (int32_t i = 0; linear != NULL && i < linear->count && i < QLORA_LINEAR_PARTS; i++) {
        out += linear->parts[i].out;
    }
    return out;
}

static int64_t qlora__linear_rank(const qlora_linear_desc* linear) {
    int64_t rank = 0;
    for (int32_t i = 0; i < linear->count; i++) {
        rank += linear->parts[i].rank;
    }
    return rank;
}

int64_t qlora_linear_pad(const qlora_linear_desc* linear) {
    return linear != NULL && linear->count >= 0 && linear->count <= QLORA_LINEAR_PARTS
               ? (qlora__linear_rank(linear) + 7) / 8 * 8
               : 0;
}

static qlora_result qlora__linear_part_check(qlora_ctx* ctx, const qlora_linear_desc* l, int32_t i,
                                             qlora_dtype dtype, bool backward) {
    const qlora_linear_part* p = &l->parts[i];
    unsigned type = 1u << dtype;
    char name[32];
    snprintf(name, sizeof name, "parts[%d].out", (int)i);
    QLORA__TRY(qlora__need_whole(ctx, name, p->out, 0, INT64_MAX));
    snprintf(name, sizeof name, "parts[%d].rank", (int)i);
    QLORA__TRY(qlora__need_whole(ctx, name, p->rank, 0, 1 << 20));
    if ((p->nf4 == NULL) == (p->dense == NULL)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "parts[%d].nf4 and parts[%d].dense are both %s; set exactly one", (int)i,
                           (int)i, p->nf4 == NULL ? "NULL" : "set");
    }
    if (p->nf4 != NULL) {
        QLORA__TRY(qlora__nf4_need(ctx, p->nf4, "nf4"));
        if (p->nf4->rows != p->out || p->nf4->cols != l->in) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "parts[%d].nf4 is %lld x %lld; expected %lld x %lld", (int)i,
                               (long long)p->nf4->rows, (long long)p->nf4->cols, (long long)p->out,
                               (long long)l->in);
        }
    } else {
        QLORA__TRY(qlora__need(ctx, p->dense, "dense", type, p->out, l->in));
    }
    if (p->bias != NULL) {
        QLORA__TRY(qlora__need(ctx, p->bias, "bias", type, 1, p->out));
    }
    if (p->rank > 0) {
        QLORA__TRY(qlora__need(ctx, p->a, "a", type, p->rank, l->in));
        QLORA__TRY(qlora__need(ctx, p->sb, "sb", type, p->out, p->rank));
        if (backward) {
            QLORA__TRY(qlora__need(ctx, p->da, "da", QLORA__IS_F32, p->rank, l->in));
            QLORA__TRY(qlora__need(ctx, p->db, "db", QLORA__IS_F32, p->out, p->rank));
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__linear_check(qlora_ctx* ctx, const qlora_linear_desc* l,
                                        qlora_dtype dtype, bool backward) {
    if (l == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "linear is NULL");
    }
    QLORA__TRY(qlora__need_whole(ctx, "linear.count", l->count, 1, QLORA_LINEAR_PARTS));
    QLORA__TRY(qlora__need_whole(ctx, "linear.in", l->in, 0, INT64_MAX));
    QLORA__TRY(qlora__need_real(ctx, "linear.dropout", (double)l->dropout, 0, 1));
    for (int32_t i = 0; i < l->count; i++) {
        QLORA__TRY(qlora__linear_part_check(ctx, l, i, dtype, backward));
    }
    if (l->operand != NULL) {
        int64_t pad = qlora_linear_pad(l);
        QLORA__TRY(qlora__need(ctx, l->operand, "operand", 1u << dtype, qlora_linear_out(l) + pad,
                               l->in + pad));
    }
    return QLORA_OK;
}

// C = alpha op(A) op(B) + beta C, with the precision of forward or backward products.
static qlora_result qlora__linear_gemm(qlora_ctx* ctx, qlora_math math, bool backward, bool ta,
                                       bool tb, float alpha, float beta, const qlora_tensor* a,
                                       const qlora_tensor* b, const qlora_tensor* c) {
    qlora_gemm_desc d;
    memset(&d, 0, sizeof d);
    d.trans_a = ta;
    d.trans_b = tb;
    d.alpha = alpha;
    d.beta = beta;
    return qlora__gemm_run(ctx, math, backward, &d, a, b, c);
}

// ---- bias and placement -------------------------------------------------------------------------

typedef struct qlora__linear_job {
    const qlora_tensor* bias;
    const qlora_tensor* y;
    bool add;
} qlora__linear_job;

static void qlora__linear_bias_rows(void* user, int64_t begin, int64_t end) {
    const qlora__linear_job* job = (const qlora__linear_job*)user;
    for (int64_t r = begin; r < end; r++) {
        for (int64_t c = 0; c < job->y->cols; c++) {
            QLORA__REAL before = job->add ? qlora__at(job->y, r, c) : (QLORA__REAL)0;
            qlora__put(job->y, r, c, before + qlora__at(job->bias, 0, c));
        }
    }
}

// Sets every row of y to the bias, or adds the bias to it.
static qlora_result qlora__linear_bias(qlora_ctx* ctx, const qlora_tensor* bias,
                                       const qlora_tensor* y, bool add) {
    qlora__linear_job job;
    job.bias = bias;
    job.y = y;
    job.add = add;
    if (qlora__on_cpu(ctx)) {
        qlora__parallel(ctx, y->rows, 1 + 4096 / (1 + y->cols), qlora__linear_bias_rows, &job);
        return QLORA_OK;
    }
    qlora_tensor t = *y;
    void* source = bias->data;
    int32_t adds = add ? 1 : 0;
    void* args[] = {&source, &t.data, &t.rows, &t.cols, &t.ld, &adds};
    return qlora__launch(
        ctx, t.dtype == QLORA_F32 ? QLORA__K_linear_bias_f32 : QLORA__K_linear_bias_bf16,
        qlora__ceil_div(t.cols, 256), qlora__min(t.rows, 65535), 1, 256, 0, args);
}

static void qlora__linear_place_cpu(const qlora_linear_desc* l) {
    const qlora_tensor* operand = l->operand;
    int64_t pad = qlora_linear_pad(l);
    int64_t out = qlora_linear_out(l);
    for (int64_t r = 0; r < out + pad; r++) {
        for (int64_t c = r < out ? l->in : 0; c < l->in + pad; c++) {
            qlora__put(operand, r, c, (QLORA__REAL)0);
        }
    }
    int64_t row = 0;
    int64_t at = 0;
    for (int32_t i = 0; i < l->count; i++) {
        const qlora_linear_part* p = &l->parts[i];
        for (int64_t k = 0; k < p->rank; k++) {
            for (int64_t r = 0; r < p->out; r++) {
                qlora__put(operand, row + r, l->in + at + k, qlora__at(p->sb, r, k));
            }
            for (int64_t c = 0; c < l->in; c++) {
                qlora__put(operand, out + at + k, c, qlora__at(p->a, k, c));
            }
        }
        row += p->out;
        at += p->rank;
    }
}

static qlora_result qlora__linear_place_adapters(qlora_ctx* ctx, const qlora_linear_desc* l) {
    if (qlora__on_cpu(ctx)) {
        qlora__linear_place_cpu(l);
        return QLORA_OK;
    }
    qlora_tensor operand = *l->operand;
    int64_t in = l->in;
    int32_t pad = (int32_t)qlora_linear_pad(l);
    const void* data[QLORA_LINEAR_PARTS][2];
    int64_t sizes[QLORA_LINEAR_PARTS][3];
    int32_t ranks[QLORA_LINEAR_PARTS];
    void* args[4 + 6 * QLORA_LINEAR_PARTS] = {&operand.data, &operand.ld, &in, &pad};
    memset(data, 0, sizeof data);
    memset(sizes, 0, sizeof sizes);
    memset(ranks, 0, sizeof ranks);
    for (int i = 0; i < QLORA_LINEAR_PARTS; i++) {
        const qlora_linear_part* p = &l->parts[i];
        if (i < l->count) {
            sizes[i][2] = p->out;
        }
        if (i < l->count && p->rank > 0) {
            data[i][0] = p->a->data;
            data[i][1] = p->sb->data;
            sizes[i][0] = p->a->ld;
            sizes[i][1] = p->sb->ld;
            ranks[i] = (int32_t)p->rank;
        }
        void* own[6] = {(void*)&data[i][0], &sizes[i][0], (void*)&data[i][1],
                        &sizes[i][1],       &sizes[i][2], &ranks[i]};
        memcpy(args + 4 + 6 * i, own, sizeof own);
    }
    return qlora__launch(
        ctx, operand.dtype == QLORA_F32 ? QLORA__K_linear_place_f32 : QLORA__K_linear_place_bf16,
        qlora__ceil_div(qlora_linear_out(l), 8) + pad * qlora__ceil_div(in + pad, 2048), 1, 1, 256,
        0, args);
}

static qlora_result qlora__linear_place(qlora_ctx* ctx, const qlora_linear_desc* l,
                                        uint32_t flags) {
    if (l == NULL || l->operand == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is NULL",
                           l == NULL ? "linear" : "linear.operand");
    }
    if (flags == 0 || flags > (QLORA_LINEAR_WEIGHTS | QLORA_LINEAR_ADAPTERS)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "flags is %u; use QLORA_LINEAR_WEIGHTS, QLORA_LINEAR_ADAPTERS or both",
                           flags);
    }
    qlora_dtype dtype = l->operand->dtype;
    if (dtype != QLORA_F32 && dtype != QLORA_BF16) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "linear.operand.dtype is %s; it must be f32 or bf16",
                           qlora_dtype_name(dtype));
    }
    QLORA__TRY(qlora__linear_check(ctx, l, dtype, false));
    int64_t row = 0;
    for (int32_t i = 0; i < l->count && (flags & QLORA_LINEAR_WEIGHTS) != 0; i++) {
        const qlora_linear_part* p = &l->parts[i];
        qlora_tensor rows;
        QLORA__TRY(qlora__tensor_view(ctx, l->operand, row, p->out, 0, l->in, &rows));
        QLORA__TRY(p->nf4 != NULL
                       ? qlora__nf4_window(ctx, p->nf4, 0, 0, &rows, dtype == QLORA_F32)
                       : qlora__point(ctx, QLORA__POINT_SCALE, p->dense, NULL, 1.0f, &rows));
        row += p->out;
    }
    return (flags & QLORA_LINEAR_ADAPTERS) != 0 ? qlora__linear_place_adapters(ctx, l) : QLORA_OK;
}

qlora_result qlora_linear_place(qlora_ctx* ctx, const qlora_linear_desc* linear, uint32_t flags) {
    QLORA__ENTER(ctx, "qlora_linear_place");
    return qlora__leave(ctx, qlora__linear_place(ctx, linear, flags));
}

// ---- dropout: the mask of one part, on as many rows at a time as fit in scratch -----------------

typedef struct qlora__masked {
    qlora_tensor rows; // in scratch
    int64_t slice;
    size_t scratch_before;
} qlora__masked;

static qlora_result qlora__masked_begin(qlora_ctx* ctx, const qlora_linear_desc* l,
                                        const qlora_tensor* x, qlora__masked* m) {
    QLORA__TRY(qlora__tensor_shape(ctx, x->dtype, 1, 0, l->in, l->in, &m->rows));
    m->scratch_before = qlora__scratch_mark(ctx);
    // Uses half of the free scratch, because products may need some.
    size_t all = qlora__scratch_free(ctx);
    int64_t fit = (int64_t)(all / 2 / ((size_t)l->in * qlora_dtype_bytes(x->dtype) + 1));
    m->slice = qlora__min(x->rows, qlora__max(1, fit));
    m->rows.bytes = (size_t)(m->slice * l->in) * qlora_dtype_bytes(x->dtype);
    return qlora__scratch(ctx, m->rows.bytes, &m->rows.data);
}

// Applies the mask of part i to rows [first, first + count) of `from`; stores or adds to `to`.
static qlora_result qlora__linear_mask(qlora_ctx* ctx, const qlora_linear_desc* l, int32_t i,
                                       int64_t first, const qlora_tensor* from,
                                       const qlora_tensor* to, bool accumulate) {
    qlora_tensor positions;
    qlora_tensor sequences;
    QLORA__TRY(qlora__tensor_view(ctx, l->positions, 0, 1, first, from->rows, &positions));
    QLORA__TRY(qlora__tensor_view(ctx, l->sequences, 0, 1, first, from->rows, &sequences));
    qlora_dropout_desc d;
    memset(&d, 0, sizeof d);
    d.x = from;
    d.y = to;
    d.positions = &positions;
    d.sequences = &sequences;
    d.state = l->state;
    d.p = l->dropout;
    d.layer = l->layer;
    d.projection = l->parts[i].projection;
    d.accumulate = accumulate;
    return qlora__dropout(ctx, &d);
}

static qlora_result qlora__linear_dropout_check(qlora_ctx* ctx, const qlora_linear_desc* l,
                                                int64_t rows) {
    if (l->dropout > 0.0f) {
        QLORA__TRY(qlora__need(ctx, l->positions, "positions", QLORA__IS_I32, 1, rows));
        QLORA__TRY(qlora__need(ctx, l->sequences, "sequences", QLORA__IS_I32, 1, rows));
        QLORA__TRY(qlora__need(ctx, l->state, "state", QLORA__IS_I32, 1, 4));
    }
    return QLORA_OK;
}

// ---- forward ------------------------------------------------------------------------------------

// Computes z of one part from the masked x, several rows at a time.
static qlora_result qlora__linear_z_masked(qlora_ctx* ctx, qlora_math math,
                                           const qlora_linear_desc* l, int32_t i,
                                           const qlora_tensor* x, const qlora_tensor* z) {
    qlora__masked m;
    QLORA__TRY(qlora__masked_begin(ctx, l, x, &m));
    for (int64_t done = 0; done < x->rows; done += m.slice) {
        int64_t now = qlora__min(m.slice, x->rows - done);
        qlora_tensor from;
        qlora_tensor to;
        m.rows.rows = now;
        QLORA__TRY(qlora__tensor_view(ctx, x, done, now, 0, l->in, &from));
        QLORA__TRY(qlora__tensor_view(ctx, z, done, now, 0, z->cols, &to));
        QLORA__TRY(qlora__linear_mask(ctx, l, i, done, &from, &m.rows, false));
        QLORA__TRY(qlora__linear_gemm(ctx, math, false, false, true, 1.0f, 0.0f, &m.rows,
                                      l->parts[i].a, &to));
    }
    qlora__scratch_release(ctx, m.scratch_before);
    return QLORA_OK;
}

// Computes z in the last columns of x.
static qlora_result qlora__linear_z(qlora_ctx* ctx, qlora_math math, const qlora_linear_desc* l,
                                    const qlora_tensor* x, const qlora_tensor* inner) {
    int64_t pad = x->cols - l->in;
    qlora_tensor tail;
    QLORA__TRY(qlora__tensor_view(ctx, x, 0, x->rows, l->in, pad, &tail));
    if (l->operand != NULL && l->dropout == 0.0f) { // all parts at once, including the zero columns
        qlora_tensor a;
        QLORA__TRY(qlora__tensor_view(ctx, l->operand, qlora_linear_out(l), pad, 0, l->in, &a));
        return qlora__linear_gemm(ctx, math, false, false, true, 1.0f, 0.0f, inner, &a, &tail);
    }
    int64_t at = 0;
    for (int32_t i = 0; i < l->count; i++) {
        qlora_tensor z;
        QLORA__TRY(qlora__tensor_view(ctx, &tail, 0, x->rows, at, l->parts[i].rank, &z));
        if (z.cols > 0 && l->dropout > 0.0f) {
            QLORA__TRY(qlora__linear_z_masked(ctx, math, l, i, inner, &z));
        } else if (z.cols > 0) {
            QLORA__TRY(qlora__linear_gemm(ctx, math, false, false, true, 1.0f, 0.0f, inner,
                                          l->parts[i].a, &z));
        }
        at += z.cols;
    }
    qlora_tensor rest;
    QLORA__TRY(qlora__tensor_view(ctx, &tail, 0, x->rows, at, pad - at, &rest));
    return qlora__tensor_zero(ctx, &rest);
}

static qlora_result qlora__linear_forward_plain(qlora_ctx* ctx, qlora_math math,
                                                const qlora_linear_desc* l, const qlora_tensor* x,
                                                const qlora_tensor* inner, const qlora_tensor* y) {
    int64_t col = 0;
    int64_t at = l->in;
    for (int32_t i = 0; i < l->count; i++) {
        const qlora_linear_part* p = &l->parts[i];
        qlora_tensor part;
        qlora_tensor z;
        size_t scratch_before = qlora__scratch_mark(ctx);
        QLORA__TRY(qlora__tensor_view(ctx, y, 0, y->rows, col, p->out, &part));
        QLORA__TRY(qlora__tensor_view(ctx, x, 0, x->rows, at, p->rank, &z));
        QLORA__TRY(p->nf4 != NULL ? qlora__nf4_gemm(ctx, math, false, inner, p->nf4, &part, 0)
                                  : qlora__linear_gemm(ctx, math, false, false, true, 1.0f, 0.0f,
                                                       inner, p->dense, &part));
        qlora__scratch_release(ctx, scratch_before);
        if (p->rank > 0) {
            QLORA__TRY(
                qlora__linear_gemm(ctx, math, false, false, true, 1.0f, 1.0f, &z, p->sb, &part));
        }
        if (p->bias != NULL) {
            QLORA__TRY(qlora__linear_bias(ctx, p->bias, &part, true));
        }
        col += p->out;
        at += p->rank;
    }
    return QLORA_OK;
}

static qlora_result qlora__linear_forward_joined(qlora_ctx* ctx, qlora_math math,
                                                 const qlora_linear_desc* l, const qlora_tensor* x,
                                                 const qlora_tensor* y) {
    int64_t out = qlora_linear_out(l);
    bool biased = false;
    for (int32_t i = 0; i < l->count; i++) {
        biased = biased || l->parts[i].bias != NULL;
    }
    int64_t col = 0;
    for (int32_t i = 0; i < l->count && biased; i++) {
        const qlora_linear_part* p = &l->parts[i];
        qlora_tensor part;
        QLORA__TRY(qlora__tensor_view(ctx, y, 0, y->rows, col, p->out, &part));
        QLORA__TRY(p->bias != NULL ? qlora__linear_bias(ctx, p->bias, &part, false)
                                   : qlora__tensor_zero(ctx, &part));
        col += p->out;
    }
    qlora_tensor upper; // [W sB]
    QLORA__TRY(qlora__tensor_view(ctx, l->operand, 0, out, 0, l->operand->cols, &upper));
    return qlora__linear_gemm(ctx, math, false, false, true, 1.0f, biased ? 1.0f : 0.0f, x, &upper,
                              y);
}

static qlora_result qlora__linear_forward(qlora_ctx* ctx, qlora_math math,
                                          const qlora_linear_desc* l, const qlora_tensor* x,
                                          const qlora_tensor* y) {
    unsigned types = QLORA__IS_F32 | QLORA__IS_BF16;
    QLORA__TRY(qlora__need(ctx, x, "x", types, -1, -1));
    QLORA__TRY(qlora__linear_check(ctx, l, x->dtype, false));
    QLORA__TRY(qlora__need(ctx, x, "x", types, -1, l->in + qlora_linear_pad(l)));
    QLORA__TRY(qlora__need(ctx, y, "y", 1u << x->dtype, x->rows, qlora_linear_out(l)));
    QLORA__TRY(qlora__need_apart(ctx, "y", y, "x", x));
    QLORA__TRY(qlora__linear_dropout_check(ctx, l, x->rows));
    qlora_tensor inner;
    QLORA__TRY(qlora__tensor_view(ctx, x, 0, x->rows, 0, l->in, &inner));
    QLORA__TRY(qlora__linear_z(ctx, math, l, x, &inner));
    return l->operand != NULL ? qlora__linear_forward_joined(ctx, math, l, x, y)
                              : qlora__linear_forward_plain(ctx, math, l, x, &inner, y);
}

qlora_result qlora_linear_forward(qlora_ctx* ctx, const qlora_linear_desc* linear,
                                  const qlora_tensor* x, const qlora_tensor* y) {
    QLORA__ENTER(ctx, "qlora_linear_forward");
    return qlora__leave(ctx, qlora__linear_forward(ctx, ctx->desc.math, linear, x, y));
}

// ---- backward -----------------------------------------------------------------------------------

// Computes u in the last columns of dy.
static qlora_result qlora__linear_u(qlora_ctx* ctx, qlora_math math, const qlora_linear_desc* l,
                                    const qlora_tensor* dy, const qlora_tensor* inner) {
    int64_t out = inner->cols;
    int64_t pad = dy->cols - out;
    qlora_tensor tail;
    QLORA__TRY(qlora__tensor_view(ctx, dy, 0, dy->rows, out, pad, &tail));
    if (l->operand != NULL) {
        qlora_tensor sb;
        QLORA__TRY(qlora__tensor_view(ctx, l->operand, 0, out, l->in, pad, &sb));
        return qlora__linear_gemm(ctx, math, true, false, false, 1.0f, 0.0f, inner, &sb, &tail);
    }
    int64_t col = 0;
    int64_t at = 0;
    for (int32_t i = 0; i < l->count; i++) {
        const qlora_linear_part* p = &l->parts[i];
        qlora_tensor part;
        qlora_tensor u;
        QLORA__TRY(qlora__tensor_view(ctx, inner, 0, dy->rows, col, p->out, &part));
        QLORA__TRY(qlora__tensor_view(ctx, &tail, 0, dy->rows, at, p->rank, &u));
        if (p->rank > 0) {
            QLORA__TRY(
                qlora__linear_gemm(ctx, math, true, false, false, 1.0f, 0.0f, &part, p->sb, &u));
        }
        col += p->out;
        at += p->rank;
    }
    qlora_tensor rest;
    QLORA__TRY(qlora__tensor_view(ctx, &tail, 0, dy->rows, at, pad - at, &rest));
    return qlora__tensor_zero(ctx, &rest);
}

// dx = sum of dy_i W_i, plus u_i A_i unless there is dropout.
static qlora_result qlora__linear_dx(qlora_ctx* ctx, qlora_math math, const qlora_linear_desc* l,
                                     const qlora_tensor* dy, const qlora_tensor* inner,
                                     const qlora_tensor* dx) {
    if (l->operand != NULL) {
        const qlora_tensor* left = l->dropout > 0.0f ? inner : dy;
        qlora_tensor below; // [W ; A], or W alone
        QLORA__TRY(qlora__tensor_view(ctx, l->operand, 0, left->cols, 0, l->in, &below));
        return qlora__linear_gemm(ctx, math, true, false, false, 1.0f, 0.0f, left, &below, dx);
    }
    int64_t col = 0;
    int64_t at = inner->cols;
    for (int32_t i = 0; i < l->count; i++) {
        const qlora_linear_part* p = &l->parts[i];
        qlora_tensor part;
        qlora_tensor u;
        size_t scratch_before = qlora__scratch_mark(ctx);
        float beta = i > 0 ? 1.0f : 0.0f;
        QLORA__TRY(qlora__tensor_view(ctx, inner, 0, dy->rows, col, p->out, &part));
        QLORA__TRY(qlora__tensor_view(ctx, dy, 0, dy->rows, at, p->rank, &u));
        QLORA__TRY(p->nf4 != NULL ? qlora__nf4_gemm(ctx, math, true, &part, p->nf4, dx,
                                                    i > 0 ? (uint32_t)QLORA_PRODUCT_ACCUMULATE : 0u)
                                  : qlora__linear_gemm(ctx, math, true, false, false, 1.0f, beta,
                                                       &part, p->dense, dx));
        qlora__scratch_release(ctx, scratch_before);
        if (p->rank > 0 && l->dropout == 0.0f) {
            QLORA__TRY(qlora__linear_gemm(ctx, math, true, false, false, 1.0f, 1.0f, &u, p->a, dx));
        }
        col += p->out;
        at += p->rank;
    }
    return QLORA_OK;
}

// For one part with dropout: dA = u^T (masked x), and dx += masked u A.
static qlora_result qlora__linear_masked_gradients(qlora_ctx* ctx, qlora_math math,
                                                   const qlora_linear_desc* l, int32_t i,
                                                   const qlora_tensor* x, const qlora_tensor* u,
                                                   const qlora_tensor* dx, float beta) {
    const qlora_linear_part* p = &l->parts[i];
    qlora__masked m;
    QLORA__TRY(qlora__masked_begin(ctx, l, x, &m));
    for (int64_t done = 0; done < x->rows; done += m.slice) {
        int64_t now = qlora__min(m.slice, x->rows - done);
        qlora_tensor from;
        qlora_tensor some;
        qlora_tensor to;
        m.rows.rows = now;
        QLORA__TRY(qlora__tensor_view(ctx, x, done, now, 0, l->in, &from));
        QLORA__TRY(qlora__tensor_view(ctx, u, done, now, 0, u->cols, &some));
        QLORA__TRY(qlora__linear_mask(ctx, l, i, done, &from, &m.rows, false));
        QLORA__TRY(qlora__linear_gemm(ctx, math, true, true, false, 1.0f, done > 0 ? 1.0f : beta,
                                      &some, &m.rows, p->da));
        if (dx != NULL) {
            QLORA__TRY(qlora__tensor_view(ctx, dx, done, now, 0, l->in, &to));
            QLORA__TRY(qlora__linear_gemm(ctx, math, true, false, false, 1.0f, 0.0f, &some, p->a,
                                          &m.rows));
            QLORA__TRY(qlora__linear_mask(ctx, l, i, done, &m.rows, &to, true));
        }
    }
    qlora__scratch_release(ctx, m.scratch_before);
    return QLORA_OK;
}

// Joins dA of all parts into one matrix if they are consecutive in memory, so that x is read once.
static bool qlora__linear_da_joined(const qlora_linear_desc* l, qlora_tensor* joined) {
    memset(joined, 0, sizeof *joined);
    for (int32_t i = 0; i < l->count; i++) {
        const qlora_linear_part* p = &l->parts[i];
        if (p->rank == 0) {
            continue;
        }
        if (joined->rows == 0) {
            *joined = *p->da;
            continue;
        }
        size_t before = (size_t)(joined->rows * joined->ld) * qlora_dtype_bytes(QLORA_F32);
        if (p->da->ld != joined->ld || (char*)p->da->data != (char*)joined->data + before) {
            return false;
        }
        joined->rows += p->rank;
        joined->bytes = before + p->da->bytes;
    }
    return joined->rows > 0;
}

static qlora_result qlora__linear_gradients(qlora_ctx* ctx, qlora_math math,
                                            const qlora_linear_desc* l, const qlora_tensor* x,
                                            const qlora_tensor* dy, const qlora_tensor* dx,
                                            float beta) {
    int64_t col = 0;
    int64_t at = 0;
    int64_t out = qlora_linear_out(l);
    qlora_tensor inner;
    qlora_tensor all;
    QLORA__TRY(qlora__tensor_view(ctx, x, 0, x->rows, 0, l->in, &inner));
    bool joined = l->dropout == 0.0f && qlora__linear_da_joined(l, &all);
    if (joined) {
        qlora_tensor u;
        QLORA__TRY(qlora__tensor_view(ctx, dy, 0, dy->rows, out, all.rows, &u));
        QLORA__TRY(qlora__linear_gemm(ctx, math, true, true, false, 1.0f, beta, &u, &inner, &all));
    }
    for (int32_t i = 0; i < l->count; i++) {
        const qlora_linear_part* p = &l->parts[i];
        qlora_tensor part;
        qlora_tensor z;
        qlora_tensor u;
        QLORA__TRY(qlora__tensor_view(ctx, dy, 0, dy->rows, col, p->out, &part));
        QLORA__TRY(qlora__tensor_view(ctx, dy, 0, dy->rows, out + at, p->rank, &u));
        QLORA__TRY(qlora__tensor_view(ctx, x, 0, x->rows, l->in + at, p->rank, &z));
        if (p->rank > 0 && l->dropout > 0.0f) {
            QLORA__TRY(qlora__linear_masked_gradients(ctx, math, l, i, &inner, &u, dx, beta));
        } else if (p->rank > 0 && !joined) {
            QLORA__TRY(
                qlora__linear_gemm(ctx, math, true, true, false, 1.0f, beta, &u, &inner, p->da));
        }
        if (p->rank > 0) {
            QLORA__TRY(
                qlora__linear_gemm(ctx, math, true, true, false, p->scale, beta, &part, &z, p->db));
        }
        col += p->out;
        at += p->rank;
    }
    return QLORA_OK;
}

static qlora_result qlora__linear_backward(qlora_ctx* ctx, qlora_math math,
                                           const qlora_linear_desc* l, const qlora_tensor* x,
                                           const qlora_tensor* dy, const qlora_tensor* dx,
                                           uint32_t flags) {
    unsigned types = QLORA__IS_F32 | QLORA__IS_BF16;
    QLORA__TRY(qlora__need(ctx, x, "x", types, -1, -1));
    QLORA__TRY(qlora__linear_check(ctx, l, x->dtype, true));
    int64_t pad = qlora_linear_pad(l);
    int64_t out = qlora_linear_out(l);
    QLORA__TRY(qlora__need(ctx, x, "x", types, -1, l->in + pad));
    QLORA__TRY(qlora__need(ctx, dy, "dy", 1u << x->dtype, x->rows, out + pad));
    QLORA__TRY(qlora__need_apart(ctx, "dy", dy, "x", x));
    if (dx != NULL) {
        QLORA__TRY(qlora__need(ctx, dx, "dx", 1u << x->dtype, x->rows, l->in));
        QLORA__TRY(qlora__need_apart(ctx, "dx", dx, "x", x));
        QLORA__TRY(qlora__need_apart(ctx, "dx", dx, "dy", dy));
    }
    if ((flags & ~(uint32_t)QLORA_LINEAR_OVERWRITE) != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "flags is %u; only QLORA_LINEAR_OVERWRITE is allowed", flags);
    }
    QLORA__TRY(qlora__linear_dropout_check(ctx, l, x->rows));
    qlora_tensor inner;
    QLORA__TRY(qlora__tensor_view(ctx, dy, 0, dy->rows, 0, out, &inner));
    QLORA__TRY(qlora__linear_u(ctx, math, l, dy, &inner));
    if (dx != NULL) {
        QLORA__TRY(qlora__linear_dx(ctx, math, l, dy, &inner, dx));
    }
    float beta = (flags & QLORA_LINEAR_OVERWRITE) != 0 ? 0.0f : 1.0f;
    return qlora__linear_gradients(ctx, math, l, x, dy, dx, beta);
}

qlora_result qlora_linear_backward(qlora_ctx* ctx, const qlora_linear_desc* linear,
                                   const qlora_tensor* x, const qlora_tensor* dy,
                                   const qlora_tensor* dx, uint32_t flags) {
    QLORA__ENTER(ctx, "qlora_linear_backward");
    return qlora__leave(ctx, qlora__linear_backward(ctx, ctx->desc.math, linear, x, dy, dx, flags));
}

//@@ src/ops/attention.h

// ---- attention ----------------------------------------------------------------------------------
//
// Within a sequence, for query i and the keys j that it sees (i - window < j <= i):
//
//   s[j] = scale q[i].k[j],  lse[i] = log(sum_j exp(s[j])),  p[j] = exp(s[j] - lse[i])
//   o[i] = sum_j p[j] v[j]
//   D[i] = do[i].o[i],       ds[j] = p[j] (do[i].v[j] - D[i])
//   dq[i] = scale sum_j ds[j] k[j]
//   dk[j] = scale sum_i ds[j] q[i],  dv[j] = sum_i p[j] do[i]
//
// The sums of dk and dv also run over all query heads of the key head's group.

#define QLORA__HEAD_MAX 256
#define QLORA__BESIDE_DQ (QLORA__BESIDE_SLOTS - 1)
#define QLORA__KEY_BLOCK 64

typedef struct qlora__attention {
    int64_t tokens;
    int64_t n_seqs;
    int64_t heads;
    int64_t kv_heads;
    int64_t hd;
    int64_t window;
    float scale;
    const qlora_tensor* q;
    const qlora_tensor* k;
    const qlora_tensor* v;
    const qlora_tensor* seqs;
    const qlora_tensor* o;
    const qlora_tensor* lse;
    const qlora_tensor* d_o;
    const qlora_tensor* dq;
    const qlora_tensor* dk;
    const qlora_tensor* dv;
    QLORA__REAL* dots; // D, [heads][tokens]
} qlora__attention;

// Eight partial sums give a fixed order that the compiler can still vectorise.
static QLORA__REAL qlora__dot(const QLORA__REAL* x, const QLORA__REAL* y, int64_t n) {
    QLORA__REAL part[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        for (int j = 0; j < 8; j++) {
            part[j] += x[i + j] * y[i + j];
        }
    }
    for (; i < n; i++) {
        part[i % 8] += x[i] * y[i];
    }
    return ((part[0] + part[4]) + (part[2] + part[6])) +
           ((part[1] + part[5]) + (part[3] + part[7]));
}

// y += a x. Computing eight products first lets the compiler vectorise without knowing that x and y
// do not overlap.
static void qlora__add_scaled(QLORA__REAL* y, QLORA__REAL a, const QLORA__REAL* x, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        QLORA__REAL product[8];
        for (int j = 0; j < 8; j++) {
            product[j] = a * x[i + j];
        }
        for (int j = 0; j < 8; j++) {
            y[i + j] += product[j];
        }
    }
    for (; i < n; i++) {
        y[i] += a * x[i];
    }
}

// Returns one head of one token: in place for f32, otherwise converted into `room`.
static const QLORA__REAL* qlora__head_get(const qlora_tensor* t, int64_t token, int64_t head,
                                          int64_t hd, QLORA__REAL* room) {
    int64_t first = token * t->ld + head * hd;
    if (t->dtype == QLORA_F32) {
        return (const QLORA__REAL*)t->data + first;
    }
    for (int64_t i = 0; i < hd; i++) {
        room[i] = qlora__load(t->data, t->dtype, first + i);
    }
    return room;
}

static void qlora__head_put(const qlora_tensor* t, int64_t token, int64_t head, int64_t hd,
                            const QLORA__REAL* x, QLORA__REAL factor) {
    for (int64_t i = 0; i < hd; i++) {
        qlora__put(t, token, head * hd + i, x != NULL ? x[i] * factor : 0);
    }
}

// Finds the sequence [*begin, *end) that contains a token; false if the token is in the tail.
static bool qlora__sequence_of(const qlora__attention* a, int64_t token, int64_t* begin,
                               int64_t* end) {
    const int32_t* offsets = (const int32_t*)a->seqs->data;
    int64_t low = 0;
    int64_t high = a->n_seqs;
    while (low < high) { // find the last offset that is not after the token
        int64_t middle = (low + high + 1) / 2;
        if (offsets[middle] <= token) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    *begin = offsets[low];
    *end = low < a->n_seqs ? offsets[low + 1] : a->tokens;
    return low < a->n_seqs;
}

// The softmax runs over blocks of keys; the sums are rescaled when a block has a larger score.
static void qlora__attention_query(const qlora__attention* a, int64_t head, int64_t i,
                                   int64_t begin) {
    QLORA__REAL room[QLORA__HEAD_MAX];
    QLORA__REAL q_room[QLORA__HEAD_MAX];
    QLORA__REAL acc[QLORA__HEAD_MAX];
    QLORA__REAL s[QLORA__KEY_BLOCK];
    int64_t kv_head = head / (a->heads / a->kv_heads);
    const QLORA__REAL* q = qlora__head_get(a->q, i, head, a->hd, q_room);
    QLORA__REAL top = (QLORA__REAL)-3.0e38; // below every score, and finite for -ffast-math
    QLORA__REAL sum = 0;
    memset(acc, 0, (size_t)a->hd * sizeof acc[0]);
    int64_t j0 = a->window > 0 && i - a->window + 1 > begin ? i - a->window + 1 : begin;
    for (; j0 <= i; j0 += QLORA__KEY_BLOCK) {
        int64_t n = i + 1 - j0 < QLORA__KEY_BLOCK ? i + 1 - j0 : QLORA__KEY_BLOCK;
        QLORA__REAL peak = top;
        for (int64_t j = 0; j < n; j++) {
            const QLORA__REAL* k = qlora__head_get(a->k, j0 + j, kv_head, a->hd, room);
            s[j] = qlora__dot(q, k, a->hd) * (QLORA__REAL)a->scale;
            peak = s[j] > peak ? s[j] : peak;
        }
        QLORA__REAL shrink = qlora__exp(top - peak);
        top = peak;
        sum *= shrink;
        for (int64_t d = 0; d < a->hd; d++) {
            acc[d] *= shrink;
        }
        for (int64_t j = 0; j < n; j++) {
            QLORA__REAL p = qlora__exp(s[j] - top);
            sum += p;
            qlora__add_scaled(acc, p, qlora__head_get(a->v, j0 + j, kv_head, a->hd, room), a->hd);
        }
    }
    qlora__head_put(a->o, i, head, a->hd, acc, 1 / sum);
    qlora__put(a->lse, head, i, top + qlora__log(sum));
}

static void qlora__attention_forward_items(void* user, int64_t from, int64_t to) {
    const qlora__attention* a = (const qlora__attention*)user;
    for (int64_t item = from; item < to; item++) {
        int64_t head = item / a->tokens;
        int64_t token = item % a->tokens;
        int64_t begin = 0;
        int64_t end = 0;
        if (qlora__sequence_of(a, token, &begin, &end)) {
            qlora__attention_query(a, head, token, begin);
        } else {
            qlora__head_put(a->o, token, head, a->hd, NULL, 0);
            qlora__put(a->lse, head, token, 0);
        }
    }
}

static void qlora__attention_dq(const qlora__attention* a, int64_t head, int64_t i, int64_t begin) {
    QLORA__REAL room[QLORA__HEAD_MAX];
    QLORA__REAL q_room[QLORA__HEAD_MAX];
    QLORA__REAL do_room[QLORA__HEAD_MAX];
    QLORA__REAL acc[QLORA__HEAD_MAX];
    int64_t kv_head = head / (a->heads / a->kv_heads);
    const QLORA__REAL* q = qlora__head_get(a->q, i, head, a->hd, q_room);
    const QLORA__REAL* d_o = qlora__head_get(a->d_o, i, head, a->hd, do_room);
    QLORA__REAL lse = qlora__at(a->lse, head, i);
    QLORA__REAL dot = qlora__dot(d_o, qlora__head_get(a->o, i, head, a->hd, room), a->hd);
    a->dots[head * a->tokens + i] = dot;
    memset(acc, 0, (size_t)a->hd * sizeof acc[0]);
    int64_t j = a->window > 0 && i - a->window + 1 > begin ? i - a->window + 1 : begin;
    for (; j <= i; j++) {
        QLORA__REAL dp =
            qlora__dot(d_o, qlora__head_get(a->v, j, kv_head, a->hd, room), a->hd) - dot;
        const QLORA__REAL* k = qlora__head_get(a->k, j, kv_head, a->hd, room);
        QLORA__REAL p = qlora__exp(qlora__dot(q, k, a->hd) * (QLORA__REAL)a->scale - lse);
        qlora__add_scaled(acc, p * dp, k, a->hd);
    }
    qlora__head_put(a->dq, i, head, a->hd, acc, (QLORA__REAL)a->scale);
}

static void qlora__attention_dq_items(void* user, int64_t from, int64_t to) {
    const qlora__attention* a = (const qlora__attention*)user;
    for (int64_t item = from; item < to; item++) {
        int64_t head = item / a->tokens;
        int64_t token = item % a->tokens;
        int64_t begin = 0;
        int64_t end = 0;
        if (qlora__sequence_of(a, token, &begin, &end)) {
            qlora__attention_dq(a, head, token, begin);
        } else {
            qlora__head_put(a->dq, token, head, a->hd, NULL, 0);
        }
    }
}

static void qlora__attention_dkv(const qlora__attention* a, int64_t kv_head, int64_t j,
                                 int64_t end) {
    QLORA__REAL k_room[QLORA__HEAD_MAX];
    QLORA__REAL v_room[QLORA__HEAD_MAX];
    QLORA__REAL q_room[QLORA__HEAD_MAX];
    QLORA__REAL do_room[QLORA__HEAD_MAX];
    QLORA__REAL acc_k[QLORA__HEAD_MAX];
    QLORA__REAL acc_v[QLORA__HEAD_MAX];
    int64_t group = a->heads / a->kv_heads;
    const QLORA__REAL* k = qlora__head_get(a->k, j, kv_head, a->hd, k_room);
    const QLORA__REAL* v = qlora__head_get(a->v, j, kv_head, a->hd, v_room);
    memset(acc_k, 0, (size_t)a->hd * sizeof acc_k[0]);
    memset(acc_v, 0, (size_t)a->hd * sizeof acc_v[0]);
    if (a->window > 0 && a->window < end - j) {
        end = j + a->window;
    }
    for (int64_t head = kv_head * group; head < kv_head * group + group; head++) {
        for (int64_t i = j; i < end; i++) {
            const QLORA__REAL* q = qlora__head_get(a->q, i, head, a->hd, q_room);
            const QLORA__REAL* d_o = qlora__head_get(a->d_o, i, head, a->hd, do_room);
            QLORA__REAL s = qlora__dot(q, k, a->hd) * (QLORA__REAL)a->scale;
            QLORA__REAL p = qlora__exp(s - qlora__at(a->lse, head, i));
            QLORA__REAL dp = qlora__dot(d_o, v, a->hd) - a->dots[head * a->tokens + i];
            qlora__add_scaled(acc_v, p, d_o, a->hd);
            qlora__add_scaled(acc_k, p * dp, q, a->hd);
        }
    }
    qlora__head_put(a->dk, j, kv_head, a->hd, acc_k, (QLORA__REAL)a->scale);
    qlora__head_put(a->dv, j, kv_head, a->hd, acc_v, 1);
}

static void qlora__attention_dkv_items(void* user, int64_t from, int64_t to) {
    const qlora__attention* a = (const qlora__attention*)user;
    for (int64_t item = from; item < to; item++) {
        int64_t kv_head = item / a->tokens;
        int64_t token = item % a->tokens;
        int64_t begin = 0;
        int64_t end = 0;
        if (qlora__sequence_of(a, token, &begin, &end)) {
            qlora__attention_dkv(a, kv_head, token, end);
        } else {
            qlora__head_put(a->dk, token, kv_head, a->hd, NULL, 0);
            qlora__head_put(a->dv, token, kv_head, a->hd, NULL, 0);
        }
    }
}

// Offsets in host memory can be checked. On a device, the kernels clamp them to the matrices
// instead.
static qlora_result qlora__sequences_check(qlora_ctx* ctx, const qlora__attention* a) {
    const int32_t* offsets = (const int32_t*)a->seqs->data;
    for (int64_t s = 0; s <= a->n_seqs; s++) {
        int64_t least = s > 0 ? offsets[s - 1] : 0;
        int64_t most = s > 0 ? a->tokens : 0;
        if (offsets[s] < least || offsets[s] > most) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "seqs[%lld] is %d; it must be from %lld to %lld", (long long)s,
                               (int)offsets[s], (long long)least, (long long)most);
        }
    }
    return QLORA_OK;
}

#define QLORA__ATTENTION_GRAIN 16

static qlora_result qlora__attention_forward_cpu(qlora_ctx* ctx, qlora__attention* a) {
    QLORA__TRY(qlora__sequences_check(ctx, a));
    qlora__parallel(ctx, a->heads * a->tokens, QLORA__ATTENTION_GRAIN,
                    qlora__attention_forward_items, a);
    return QLORA_OK;
}

static qlora_result qlora__attention_backward_cpu(qlora_ctx* ctx, qlora__attention* a) {
    QLORA__TRY(qlora__sequences_check(ctx, a));
    void* dots = NULL;
    QLORA__TRY(qlora__scratch(ctx, (size_t)(a->heads * a->tokens) * sizeof(QLORA__REAL), &dots));
    a->dots = (QLORA__REAL*)dots;
    qlora__parallel(ctx, a->heads * a->tokens, QLORA__ATTENTION_GRAIN, qlora__attention_dq_items,
                    a);
    qlora__parallel(ctx, a->kv_heads * a->tokens, QLORA__ATTENTION_GRAIN,
                    qlora__attention_dkv_items, a);
    return QLORA_OK;
}

#ifndef QLORA_NO_CUDA

// A launch has one block per `rows` tokens, and one more per sequence if blocks do not cross
// sequences.
typedef struct qlora__attention_kernel {
    qlora__kernel_id id;
    int64_t rows;
    uint32_t threads;
    uint32_t shared;
} qlora__attention_kernel;

typedef struct qlora__attention_path {
    qlora_dtype dtype;
    int64_t hd;     // 0 = any up to 256
    int capability; // minimum compute capability
    bool aligned;   // rows must start at multiples of 16 bytes
    uint32_t need;  // condition in the registry, for pre-warm
    qlora__attention_kernel forward;
    qlora__attention_kernel stats;
    qlora__attention_kernel kv;
    qlora__attention_kernel q;
    qlora__attention_kernel sum; // sums the shares of kv; QLORA__K_COUNT if kv has no shares
} qlora__attention_path;

// clang-format off
// The first row that fits is used. The comments in kernels/attn_tc.cuh explain the shared memory.
static const qlora__attention_path qlora__attention_paths[] = {
    {QLORA_BF16, 64, 80, true, QLORA__NEED_HEAD64,
     {QLORA__K_attn64_fwd, 128, 128, 49152}, {QLORA__K_attn64_stats, 32, 256, 0},
     {QLORA__K_attn64_bwd_kv, 64, 128, 58368}, {QLORA__K_attn64_bwd_q, 128, 128, 65536},
     {QLORA__K_attn64_bwd_sum, 0, 256, 0}},
    {QLORA_BF16, 128, 80, true, QLORA__NEED_HEAD128,
     {QLORA__K_attn128_fwd, 128, 128, 65536}, {QLORA__K_attn128_stats, 16, 256, 0},
     {QLORA__K_attn128_bwd_kv, 64, 128, 70144}, {QLORA__K_attn128_bwd_q, 128, 128, 98304},
     {QLORA__K_attn128_bwd_sum, 0, 256, 0}},
    {QLORA_BF16, 0, 75, false, QLORA__NEED_HEADANY,
     {QLORA__K_attn_f32_fwd, 64, 256, 0}, {QLORA__K_attn_f32_stats, 8, 256, 0},
     {QLORA__K_attn_f32_bwd_kv, 64, 256, 0}, {QLORA__K_attn_f32_bwd_q, 64, 256, 0},
     {QLORA__K_COUNT, 0, 0, 0}},
    {QLORA_F32, 0, 75, false, QLORA__NEED_HEADANY,
     {QLORA__K_attn_f32_fwd, 64, 256, 0}, {QLORA__K_attn_f32_stats, 8, 256, 0},
     {QLORA__K_attn_f32_bwd_kv, 64, 256, 0}, {QLORA__K_attn_f32_bwd_q, 64, 256, 0},
     {QLORA__K_COUNT, 0, 0, 0}},
};
// clang-format on

static bool qlora__attention_aligned(const qlora_tensor* t) {
    return t == NULL || (t->ld % 8 == 0 && (uintptr_t)t->data % 16 == 0);
}

// Finds the first row of the table that fits.
static const qlora__attention_path* qlora__attention_find(const qlora_ctx* ctx, qlora_dtype dtype,
                                                          int64_t hd, bool aligned) {
    const qlora__attention_path* p = qlora__attention_paths;
    while (p->dtype != dtype || (p->hd != 0 && p->hd != hd) ||
           !qlora__gpu_takes(ctx, p->capability) || (p->aligned && !aligned)) {
        p++; // the last row for each dtype always fits
    }
    return p;
}

static const qlora__attention_path* qlora__attention_choose(const qlora_ctx* ctx,
                                                            const qlora__attention* a) {
    const qlora_tensor* all[] = {a->q, a->k, a->v, a->o, a->d_o, a->dq, a->dk, a->dv};
    bool aligned = true;
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        aligned = aligned && qlora__attention_aligned(all[i]);
    }
    return qlora__attention_find(ctx, a->q->dtype, a->hd, aligned);
}

// Returns the condition of the kernels that attention needs for this type and head size.
static QLORA__UNUSED uint32_t qlora__attention_need(const qlora_ctx* ctx, qlora_dtype dtype,
                                                    int64_t hd) {
    return qlora__attention_find(ctx, dtype, hd, true)->need;
}

// Kernels count tokens, heads and offsets in 32 bits.
typedef struct qlora__attention_numbers {
    int32_t n_seqs;
    int32_t tokens;
    int32_t heads;
    int32_t kv_heads;
    int32_t hd;
    int32_t window;
    int32_t half;
} qlora__attention_numbers;

static qlora__attention_numbers qlora__attention_narrow(const qlora__attention* a) {
    qlora__attention_numbers n;
    n.n_seqs = (int32_t)a->n_seqs;
    n.tokens = (int32_t)a->tokens;
    n.heads = (int32_t)a->heads;
    n.kv_heads = (int32_t)a->kv_heads;
    n.hd = (int32_t)a->hd;
    n.window = (int32_t)a->window;
    n.half = a->q->dtype == QLORA_BF16;
    return n;
}

static qlora_result qlora__attention_launch(qlora_ctx* ctx, const qlora__attention_kernel* kernel,
                                            const qlora__attention* a, int64_t heads,
                                            int64_t shares, void** args) {
    int64_t blocks = a->tokens / kernel->rows + a->n_seqs + 1;
    return qlora__launch(ctx, kernel->id, blocks, heads, shares, kernel->threads, kernel->shared,
                         args);
}

// How dk and dv are computed: with few keys and few key heads, several blocks share the query heads
// of a group, `each` heads per block.
typedef struct qlora__attention_shares {
    int64_t count; // blocks per group; 1: their sums are the result
    int32_t each;
    float* parts; // [2][count][tokens][kv_heads hd]
} qlora__attention_shares;

// Aims at four blocks per multiprocessor. Two run at a time, and blocks for the last keys of a
// sequence, which few queries see, finish early.
static qlora_result qlora__attention_share(qlora_ctx* ctx, const qlora__attention_path* path,
                                           const qlora__attention* a,
                                           qlora__attention_shares* out) {
    int64_t group = a->heads / a->kv_heads;
    int64_t blocks = (a->tokens / path->kv.rows + a->n_seqs + 1) * a->kv_heads;
    int64_t size = a->tokens * a->kv_heads * a->hd * 2 * (int64_t)sizeof(float);
    int64_t fit = (int64_t)qlora__scratch_free(ctx) / qlora__max(size, 1);
    int64_t wanted = path->sum.id != QLORA__K_COUNT
                         ? qlora__ceil_div((int64_t)ctx->gpu->sm_count * 4, blocks)
                         : 1;
    int64_t shares = qlora__max(1, qlora__min(qlora__min(wanted, group), fit));
    int64_t each = qlora__ceil_div(group, shares);
    void* parts = NULL;
    out->count = qlora__ceil_div(group, each);
    out->each = (int32_t)each;
    if (out->count > 1) {
        QLORA__TRY(qlora__scratch(ctx, (size_t)(out->count * size), &parts));
    }
    out->parts = (float*)parts;
    return QLORA_OK;
}

static qlora_result qlora__attention_sum(qlora_ctx* ctx, const qlora__attention_path* path,
                                         const qlora__attention* a,
                                         const qlora__attention_shares* shares) {
    if (shares->count == 1) {
        return QLORA_OK;
    }
    const float* parts = shares->parts;
    int32_t count = (int32_t)shares->count;
    int32_t tokens = (int32_t)a->tokens;
    int32_t width = (int32_t)(a->kv_heads * a->hd);
    qlora_tensor dk = *a->dk;
    qlora_tensor dv = *a->dv;
    void* args[] = {(void*)&parts, &count, &tokens, &width, &dk.data, &dk.ld, &dv.data, &dv.ld};
    int64_t blocks = qlora__ceil_div(a->tokens * width, 2048);
    return qlora__launch(ctx, path->sum.id, blocks, 2, 1, path->sum.threads, 0, args);
}

static qlora_result qlora__attention_forward_gpu(qlora_ctx* ctx, qlora__attention* a) {
    const qlora__attention_path* path = qlora__attention_choose(ctx, a);
    qlora__attention_numbers n = qlora__attention_narrow(a);
    qlora_tensor q = *a->q;
    qlora_tensor k = *a->k;
    qlora_tensor v = *a->v;
    qlora_tensor o = *a->o;
    void* lse = a->lse->data;
    void* seqs = a->seqs->data;
    void* args[] = {&q.data,  &q.ld,       &k.data, &k.ld,     &v.data,   &v.ld,
                    &o.data,  &o.ld,       &lse,    &seqs,     &n.n_seqs, &n.tokens,
                    &n.heads, &n.kv_heads, &n.hd,   &n.window, &a->scale, &n.half};
    return qlora__attention_launch(ctx, &path->forward, a, a->heads, 1, args);
}

static qlora_result qlora__attention_backward_gpu(qlora_ctx* ctx, qlora__attention* a) {
    const qlora__attention_path* path = qlora__attention_choose(ctx, a);
    qlora__attention_numbers n = qlora__attention_narrow(a);
    void* stats = NULL;
    QLORA__TRY(qlora__scratch(ctx, (size_t)(a->heads * a->tokens) * 2 * sizeof(float), &stats));
    qlora__attention_shares shares;
    QLORA__TRY(qlora__attention_share(ctx, path, a, &shares));
    qlora_tensor q = *a->q;
    qlora_tensor k = *a->k;
    qlora_tensor v = *a->v;
    qlora_tensor o = *a->o;
    qlora_tensor d_o = *a->d_o;
    qlora_tensor dq = *a->dq;
    qlora_tensor dk = *a->dk;
    qlora_tensor dv = *a->dv;
    void* lse = a->lse->data;
    void* seqs = a->seqs->data;
    void* stats_args[] = {&o.data, &o.ld,     &d_o.data, &d_o.ld, &lse,
                          &stats,  &n.tokens, &n.hd,     &n.half};
    QLORA__TRY(qlora__launch(ctx, path->stats.id, qlora__ceil_div(a->tokens, path->stats.rows),
                             a->heads, 1, path->stats.threads, path->stats.shared, stats_args));
    void* parts = shares.parts; // attn_f32 has no shares and ignores the last two
    void* kv_args[] = {&q.data,   &q.ld,     &k.data,   &k.ld,     &v.data,  &v.ld,
                       &d_o.data, &d_o.ld,   &stats,    &dk.data,  &dk.ld,   &dv.data,
                       &dv.ld,    &seqs,     &n.n_seqs, &n.tokens, &n.heads, &n.kv_heads,
                       &n.hd,     &n.window, &a->scale, &n.half,   &parts,   &shares.each};
    void* q_args[] = {&q.data,  &q.ld,       &k.data,  &k.ld,     &v.data,   &v.ld,     &d_o.data,
                      &d_o.ld,  &stats,      &dq.data, &dq.ld,    &seqs,     &n.n_seqs, &n.tokens,
                      &n.heads, &n.kv_heads, &n.hd,    &n.window, &a->scale, &n.half};
    QLORA__TRY(qlora__beside_begin(ctx));
    QLORA__TRY(qlora__beside_end(ctx, QLORA__BESIDE_DQ,
                                 qlora__attention_launch(ctx, &path->q, a, a->heads, 1, q_args)));
    QLORA__TRY(qlora__attention_launch(ctx, &path->kv, a, a->kv_heads, shares.count, kv_args));
    QLORA__TRY(qlora__attention_sum(ctx, path, a, &shares));
    return qlora__beside_wait(ctx, 1u << QLORA__BESIDE_DQ);
}

#endif

// The same with the separate operators, one sequence at a time. The query heads of a group are
// stacked, so that a batch of kv_heads products works for any ratio of heads.
typedef struct qlora__attention_pieces {
    int64_t length;
    qlora_tensor q; // [heads][length, hd], and so on
    qlora_tensor k;
    qlora_tensor v;
    qlora_tensor o;
    qlora_tensor p; // [heads][length, length]
    qlora_tensor d_o;
    qlora_tensor dp;
    qlora_tensor dkv;
} qlora__attention_pieces;

static qlora_result qlora__attention_piece(qlora_ctx* ctx, qlora_dtype dtype, int64_t batch,
                                           int64_t rows, int64_t cols, qlora_tensor* out) {
    QLORA__TRY(qlora__tensor_shape(ctx, dtype, batch, rows, cols, cols, out));
    return qlora__scratch(ctx, out->bytes, &out->data);
}

static qlora_result qlora__pieces_make(qlora_ctx* ctx, const qlora__attention* a,
                                       qlora__attention_pieces* x) {
    if (a->n_seqs == 0 || a->tokens % a->n_seqs != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "unfused: %lld tokens cannot be %lld sequences of equal length",
                           (long long)a->tokens, (long long)a->n_seqs);
    }
    x->length = a->tokens / a->n_seqs;
    qlora_dtype type = a->q->dtype;
    int64_t n = x->length;
    QLORA__TRY(qlora__attention_piece(ctx, type, a->heads, n, a->hd, &x->q));
    QLORA__TRY(qlora__attention_piece(ctx, type, a->kv_heads, n, a->hd, &x->k));
    QLORA__TRY(qlora__attention_piece(ctx, type, a->kv_heads, n, a->hd, &x->v));
    QLORA__TRY(qlora__attention_piece(ctx, type, a->heads, n, a->hd, &x->o));
    QLORA__TRY(qlora__attention_piece(ctx, type, a->heads, n, n, &x->p));
    if (a->d_o == NULL) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__attention_piece(ctx, type, a->heads, n, a->hd, &x->d_o));
    QLORA__TRY(qlora__attention_piece(ctx, type, a->heads, n, n, &x->dp));
    return qlora__attention_piece(ctx, type, a->kv_heads, n, a->hd, &x->dkv);
}

static qlora_result qlora__pieces_split(qlora_ctx* ctx, const qlora__attention_pieces* x,
                                        const qlora_tensor* rows, int64_t s,
                                        const qlora_tensor* y) {
    qlora_tensor view;
    QLORA__TRY(qlora__tensor_view(ctx, rows, s * x->length, x->length, 0, rows->cols, &view));
    return qlora_heads_split(ctx, &view, y);
}

static qlora_result qlora__pieces_join(qlora_ctx* ctx, const qlora__attention_pieces* x,
                                       const qlora_tensor* heads, int64_t s,
                                       const qlora_tensor* rows) {
    qlora_tensor view;
    QLORA__TRY(qlora__tensor_view(ctx, rows, s * x->length, x->length, 0, rows->cols, &view));
    return qlora_heads_join(ctx, heads, &view);
}

// c = alpha op(a) op(b) for each kv head. Operands with one matrix per query head are grouped.
static qlora_result qlora__pieces_multiply(qlora_ctx* ctx, const qlora__attention* a, float alpha,
                                           const qlora_tensor* x, bool trans_x,
                                           const qlora_tensor* y, bool trans_y,
                                           const qlora_tensor* z) {
    qlora_tensor t[3] = {*x, *y, *z};
    for (int i = 0; i < 3; i++) {
        int64_t group = t[i].batch / a->kv_heads;
        t[i].batch = a->kv_heads;
        t[i].rows *= group;
        t[i].batch_stride *= group;
    }
    qlora_gemm_desc gemm;
    memset(&gemm, 0, sizeof gemm);
    gemm.trans_a = trans_x;
    gemm.trans_b = trans_y;
    gemm.alpha = alpha;
    // exact f32, like the fused kernels
    return qlora__gemm_run(ctx, QLORA_MATH_F32, false, &gemm, &t[0], &t[1], &t[2]);
}

// Computes p for sequence s.
static qlora_result qlora__pieces_scores(qlora_ctx* ctx, const qlora__attention* a,
                                         const qlora__attention_pieces* x, int64_t s) {
    QLORA__TRY(qlora__pieces_split(ctx, x, a->q, s, &x->q));
    QLORA__TRY(qlora__pieces_split(ctx, x, a->k, s, &x->k));
    QLORA__TRY(qlora__pieces_split(ctx, x, a->v, s, &x->v));
    QLORA__TRY(qlora__pieces_multiply(ctx, a, 1.0f, &x->q, false, &x->k, true, &x->p));
    QLORA__TRY(qlora_scores_mask(ctx, &x->p, a->scale, true, a->window));
    return qlora_softmax_forward(ctx, &x->p, &x->p);
}

static qlora_result qlora__attention_forward_unfused(qlora_ctx* ctx, const qlora__attention* a) {
    qlora__attention_pieces x;
    memset(&x, 0, sizeof x);
    QLORA__TRY(qlora__pieces_make(ctx, a, &x));
    for (int64_t s = 0; s < a->n_seqs; s++) {
        QLORA__TRY(qlora__pieces_scores(ctx, a, &x, s));
        QLORA__TRY(qlora__pieces_multiply(ctx, a, 1.0f, &x.p, false, &x.v, false, &x.o));
        QLORA__TRY(qlora__pieces_join(ctx, &x, &x.o, s, a->o));
    }
    return QLORA_OK;
}

static qlora_result qlora__attention_backward_unfused(qlora_ctx* ctx, const qlora__attention* a) {
    qlora__attention_pieces x;
    memset(&x, 0, sizeof x);
    QLORA__TRY(qlora__pieces_make(ctx, a, &x));
    for (int64_t s = 0; s < a->n_seqs; s++) {
        QLORA__TRY(qlora__pieces_scores(ctx, a, &x, s));
        QLORA__TRY(qlora__pieces_split(ctx, &x, a->d_o, s, &x.d_o));
        QLORA__TRY(qlora__pieces_multiply(ctx, a, 1.0f, &x.p, true, &x.d_o, false, &x.dkv));
        QLORA__TRY(qlora__pieces_join(ctx, &x, &x.dkv, s, a->dv));
        QLORA__TRY(qlora__pieces_multiply(ctx, a, 1.0f, &x.d_o, false, &x.v, true, &x.dp));
        QLORA__TRY(qlora_softmax_backward(ctx, &x.p, &x.dp, &x.dp));
        QLORA__TRY(qlora__pieces_multiply(ctx, a, a->scale, &x.dp, true, &x.q, false, &x.dkv));
        QLORA__TRY(qlora__pieces_join(ctx, &x, &x.dkv, s, a->dk));
        QLORA__TRY(qlora__pieces_multiply(ctx, a, a->scale, &x.dp, false, &x.k, false, &x.o));
        QLORA__TRY(qlora__pieces_join(ctx, &x, &x.o, s, a->dq));
    }
    return QLORA_OK;
}

static qlora_result qlora__attention_begin(qlora_ctx* ctx, const qlora_attention_desc* desc,
                                           qlora__attention* a) {
    if (desc == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "desc is NULL");
    }
    a->heads = desc->heads;
    a->kv_heads = desc->kv_heads > 0 ? desc->kv_heads : desc->heads;
    a->hd = desc->head_dim;
    a->window = desc->window;
    QLORA__TRY(qlora__need_whole(ctx, "desc.heads", a->heads, 1, 65535));
    QLORA__TRY(qlora__need_whole(ctx, "desc.kv_heads", desc->kv_heads, 0, a->heads));
    QLORA__TRY(qlora__need_whole(ctx, "desc.head_dim", a->hd, 1, QLORA__HEAD_MAX));
    QLORA__TRY(qlora__need_whole(ctx, "desc.window", a->window, 0, INT64_MAX));
    if (a->heads % a->kv_heads != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "desc.heads is %lld; it must be a multiple of desc.kv_heads (%lld)",
                           (long long)a->heads, (long long)a->kv_heads);
    }
    a->scale = desc->scale == 0 ? 1.0f / sqrtf((float)a->hd) : desc->scale;
    if (!(a->scale > 0 && a->scale <= 1e30f)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "desc.scale is %g; it must be positive and at most 1e30",
                           (double)desc->scale);
    }
    QLORA__TRY(qlora__need(ctx, a->q, "q", QLORA__IS_F32 | QLORA__IS_BF16, -1, a->heads * a->hd));
    unsigned dtype = 1u << a->q->dtype;
    a->tokens = a->q->rows;
    QLORA__TRY(qlora__need(ctx, a->k, "k", dtype, a->tokens, a->kv_heads * a->hd));
    QLORA__TRY(qlora__need(ctx, a->v, "v", dtype, a->tokens, a->kv_heads * a->hd));
    QLORA__TRY(qlora__need(ctx, a->seqs, "seqs", QLORA__IS_I32, 1, -1));
    QLORA__TRY(qlora__need(ctx, a->o, "o", dtype, a->tokens, a->heads * a->hd));
    QLORA__TRY(qlora__need(ctx, a->lse, "lse", QLORA__IS_F32, a->heads, a->tokens));
    QLORA__TRY(qlora__need_whole(ctx, "seqs.cols", a->seqs->cols, 1, INT32_MAX / 2));
    QLORA__TRY(qlora__need_whole(ctx, "q.rows", a->tokens, 0, INT32_MAX / 2));
    if (a->lse->ld != a->tokens) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "lse.ld is %lld; it must be equal to the number of tokens, %lld",
                           (long long)a->lse->ld, (long long)a->tokens);
    }
    a->n_seqs = a->seqs->cols - 1;
    // A window that covers all tokens is the same as none. Kernels may then add to it safely.
    a->window = a->window >= a->tokens ? 0 : a->window;
    return QLORA_OK;
}

static qlora_result qlora__attention_forward(qlora_ctx* ctx, const qlora_attention_desc* desc,
                                             qlora__attention* a) {
    QLORA__TRY(qlora__attention_begin(ctx, desc, a));
    QLORA__TRY(qlora__need_apart(ctx, "o", a->o, "q", a->q));
    QLORA__TRY(qlora__need_apart(ctx, "o", a->o, "k", a->k));
    QLORA__TRY(qlora__need_apart(ctx, "o", a->o, "v", a->v));
    if (a->tokens == 0) {
        return QLORA_OK;
    }
    if (desc->unfused) {
        return qlora__attention_forward_unfused(ctx, a);
    }
#ifndef QLORA_NO_CUDA
    if (!qlora__on_cpu(ctx)) {
        return qlora__attention_forward_gpu(ctx, a);
    }
#endif
    return qlora__attention_forward_cpu(ctx, a);
}

qlora_result qlora_attention_forward(qlora_ctx* ctx, const qlora_attention_desc* desc,
                                     const qlora_tensor* q, const qlora_tensor* k,
                                     const qlora_tensor* v, const qlora_tensor* seqs,
                                     const qlora_tensor* o, const qlora_tensor* lse) {
    QLORA__ENTER(ctx, "qlora_attention_forward");
    qlora__attention a;
    memset(&a, 0, sizeof a);
    a.q = q;
    a.k = k;
    a.v = v;
    a.seqs = seqs;
    a.o = o;
    a.lse = lse;
    return qlora__leave(ctx, qlora__attention_forward(ctx, desc, &a));
}

static qlora_result qlora__attention_backward(qlora_ctx* ctx, const qlora_attention_desc* desc,
                                              qlora__attention* a) {
    QLORA__TRY(qlora__attention_begin(ctx, desc, a));
    unsigned dtype = 1u << a->q->dtype;
    int64_t kv_cols = a->kv_heads * a->hd;
    QLORA__TRY(qlora__need(ctx, a->d_o, "d_o", dtype, a->tokens, a->heads * a->hd));
    QLORA__TRY(qlora__need(ctx, a->dq, "dq", dtype, a->tokens, a->heads * a->hd));
    QLORA__TRY(qlora__need(ctx, a->dk, "dk", dtype, a->tokens, kv_cols));
    QLORA__TRY(qlora__need(ctx, a->dv, "dv", dtype, a->tokens, kv_cols));
    const qlora_tensor* outs[] = {a->dq, a->dk, a->dv};
    const qlora_tensor* ins[] = {a->q, a->k, a->v, a->o, a->d_o};
    static const char* const out_names[] = {"dq", "dk", "dv"};
    static const char* const in_names[] = {"q", "k", "v", "o", "d_o"};
    for (int i = 0; i < 3; i++) {
        for (int j = 0; j < 5; j++) {
            QLORA__TRY(qlora__need_apart(ctx, out_names[i], outs[i], in_names[j], ins[j]));
        }
        for (int j = 0; j < i; j++) {
            QLORA__TRY(qlora__need_apart(ctx, out_names[i], outs[i], out_names[j], outs[j]));
        }
    }
    if (a->tokens == 0) {
        return QLORA_OK;
    }
    if (desc->unfused) {
        return qlora__attention_backward_unfused(ctx, a);
    }
#ifndef QLORA_NO_CUDA
    if (!qlora__on_cpu(ctx)) {
        return qlora__attention_backward_gpu(ctx, a);
    }
#endif
    return qlora__attention_backward_cpu(ctx, a);
}

qlora_result qlora_attention_backward(qlora_ctx* ctx, const qlora_attention_desc* desc,
                                      const qlora_tensor* q, const qlora_tensor* k,
                                      const qlora_tensor* v, const qlora_tensor* seqs,
                                      const qlora_tensor* o, const qlora_tensor* lse,
                                      const qlora_tensor* d_o, const qlora_tensor* dq,
                                      const qlora_tensor* dk, const qlora_tensor* dv) {
    QLORA__ENTER(ctx, "qlora_attention_backward");
    qlora__attention a;
    memset(&a, 0, sizeof a);
    a.q = q;
    a.k = k;
    a.v = v;
    a.seqs = seqs;
    a.o = o;
    a.lse = lse;
    a.d_o = d_o;
    a.dq = dq;
    a.dk = dk;
    a.dv = dv;
    return qlora__leave(ctx, qlora__attention_backward(ctx, desc, &a));
}

//@@ src/ops/cast.h

// ---- casts --------------------------------------------------------------------------------------
//
//   y = x converted to the type of y, rounded to nearest even

typedef struct qlora__pair {
    const qlora_tensor* x;
    const qlora_tensor* y;
} qlora__pair;

static void qlora__cast_rows(void* user, int64_t begin, int64_t end) {
    const qlora__pair* p = (const qlora__pair*)user;
    for (int64_t i = begin; i < end; i++) {
        for (int64_t j = 0; j < p->x->cols; j++) {
            qlora__put(p->y, i, j, qlora__at(p->x, i, j));
        }
    }
}

static qlora_result qlora__cast(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* y) {
    static const qlora__kernel_id kernels[3][3] = {
        // from f32, bf16, f16 to f32, bf16, f16; copies need no kernel
        {QLORA__K_COUNT, QLORA__K_cast_f32_bf16, QLORA__K_cast_f32_f16},
        {QLORA__K_cast_bf16_f32, QLORA__K_COUNT, QLORA__K_cast_bf16_f16},
        {QLORA__K_cast_f16_f32, QLORA__K_cast_f16_bf16, QLORA__K_COUNT}};
    QLORA__TRY(qlora__need(ctx, x, "x", QLORA__IS_FLOAT, -1, -1));
    QLORA__TRY(qlora__need(ctx, y, "y", QLORA__IS_FLOAT, x->rows, x->cols));
    QLORA__TRY(qlora__need_apart(ctx, "y", y, "x", x));
    if (qlora__on_cpu(ctx)) {
        qlora__pair pair = {x, y};
        qlora__parallel(ctx, x->rows, 1 + 16384 / (1 + x->cols), qlora__cast_rows, &pair);
        return QLORA_OK;
    }
    qlora__kernel_id kernel = kernels[x->dtype][y->dtype];
    if (kernel == QLORA__K_COUNT) {
        return x->dtype == QLORA_F16
                   ? qlora__fail(ctx, QLORA_ERR_UNSUPPORTED, "copies of f16 are not supported")
                   : qlora__point(ctx, QLORA__POINT_SCALE, x, NULL, 1.0f, y);
    }
    qlora_tensor from = *x; // parameters are passed by address
    qlora_tensor to = *y;
    const float* no_scale = NULL;
    void* args[] = {&from.data, &to.data, &from.rows,      &from.cols,
                    &from.ld,   &to.ld,   (void*)&no_scale};
    int64_t pieces = x->rows * qlora__ceil_div(x->cols, 2048);
    return qlora__launch(ctx, kernel, qlora__min(pieces, 4096), 1, 1, 256, 0, args);
}

qlora_result qlora_cast(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* y) {
    QLORA__ENTER(ctx, "qlora_cast");
    return qlora__leave(ctx, qlora__cast(ctx, x, y));
}

// ---- random weights -----------------------------------------------------------------------------
//
//   y[i] = deviation * (sum of twelve 16-bit random numbers - 393210) / 65536
//
// The distribution is close enough to normal for weights, and both backends give the same bits
// (kernels/random.cu explains why).

typedef struct qlora__random_job {
    const qlora_tensor* y;
    uint32_t key[2];
    uint32_t stream;
    float step;
} qlora__random_job;

static void qlora__random_pairs(void* user, int64_t begin, int64_t end) {
    const qlora__random_job* job = (const qlora__random_job*)user;
    int64_t n = job->y->rows * job->y->cols;
    for (int64_t pair = begin; pair < end; pair++) {
        int32_t sum[2] = {-393210, -393210};
        for (uint32_t call = 0; call < 3; call++) {
            const uint32_t counter[4] = {(uint32_t)pair, (uint32_t)((uint64_t)pair >> 32),
                                         job->stream, call};
            uint32_t words[4];
            qlora__philox(counter, job->key, words);
            for (uint32_t i = 0; i < 4; i++) {
                sum[(4 * call + i) / 6] +=
                    (int32_t)(words[i] & 0xffffu) + (int32_t)(words[i] >> 16);
            }
        }
        for (int64_t i = 2 * pair; i < 2 * pair + 2 && i < n; i++) {
            float x = (float)sum[i & 1] * job->step;
            qlora__store(job->y->data, job->y->dtype, i, (QLORA__REAL)x);
        }
    }
}

// y is contiguous and f32 or bf16. The streams of one seed are independent of each other.
static qlora_result qlora__random_normal(qlora_ctx* ctx, uint64_t seed, uint32_t stream,
                                         float deviation, const qlora_tensor* y) {
    QLORA__TRY(qlora__need(ctx, y, "y", QLORA__IS_F32 | QLORA__IS_BF16, -1, -1));
    if (y->ld != y->cols && y->rows > 1) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "y.ld is %lld; it must be equal to cols (%lld)",
                           (long long)y->ld, (long long)y->cols);
    }
    qlora__random_job job;
    job.y = y;
    job.key[0] = (uint32_t)seed;
    job.key[1] = (uint32_t)(seed >> 32);
    job.stream = stream;
    job.step = deviation / 65536.0f;
    int64_t n = y->rows * y->cols;
    int64_t pairs = qlora__ceil_div(n, 2);
    if (qlora__on_cpu(ctx)) {
        qlora__parallel(ctx, pairs, 4096, qlora__random_pairs, &job);
        return QLORA_OK;
    }
    void* data = y->data;
    void* args[] = {&data, &n, &job.key[0], &job.key[1], &job.stream, &job.step};
    return qlora__launch(ctx,
                         y->dtype == QLORA_F32 ? QLORA__K_random_normal_f32
                                               : QLORA__K_random_normal_bf16,
                         qlora__ceil_div(pairs, 256), 1, 1, 256, 0, args);
}

qlora_result qlora_random_normal(qlora_ctx* ctx, uint64_t seed, uint32_t stream, float deviation,
                                 const qlora_tensor* y) {
    QLORA__ENTER(ctx, "qlora_random_normal");
    return qlora__leave(ctx, qlora__random_normal(ctx, seed, stream, deviation, y));
}

//@@ src/ops/prewarm.h

// ---- pre-warm -----------------------------------------------------------------------------------

static qlora_result qlora__shape_check(qlora_ctx* ctx, qlora_prewarm_desc* s) {
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
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "shape.%s is %lld; it must be from 1 to %d",
                               names[i], (long long)sizes[i], 1 << 24);
        }
    }
    QLORA__TRY(qlora__need_whole(ctx, "shape.rank", s->rank, 0, 4096));
    if (s->heads % s->kv_heads != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "shape.heads is %lld; it must be a multiple of shape.kv_heads (%lld)",
                           (long long)s->heads, (long long)s->kv_heads);
    }
    if ((int)s->base < 0 || s->base > QLORA_BASE_32BIT) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "shape.base is %d; it must be one of qlora_base_format", (int)s->base);
    }
    if (s->compute != QLORA_F32 && s->compute != QLORA_BF16) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "shape.compute is %s; it must be f32 or bf16",
                           qlora_dtype_name(s->compute));
    }
    return QLORA_OK;
}

#ifndef QLORA_NO_CUDA

// One product of a layer's projections. For T tokens, a projection has y = x W^T, its gradient, and
// the four products of LoRA.
typedef struct qlora__planned_gemm {
    int64_t M;
    int64_t N;
    int64_t K;
    bool ta;
    bool tb;
    bool f32_out; // for the gradients of A and B
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

// Runs every planned product once, so that cuBLAS loads its kernels now, while memory is free, and
// not during a capture.
static qlora_result qlora__prewarm_cublas(qlora_ctx* ctx, const qlora_prewarm_desc* s) {
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

// Returns the conditions of the kernel registry that hold for a model. random: its weights are
// generated.
static uint32_t qlora__kernels_needed(const qlora_ctx* ctx, qlora_dtype compute, int64_t head_dim,
                                      bool nf4, bool lora, bool random) {
    return (qlora__has_cublas(ctx) ? 0 : QLORA__NEED_GEMM) |
           (compute == QLORA_BF16 ? QLORA__NEED_BF16 : QLORA__NEED_F32) |
           (nf4 ? QLORA__NEED_NF4 : 0) | (lora ? QLORA__NEED_LORA : 0) |
           (random ? QLORA__NEED_RANDOM : 0) | qlora__attention_need(ctx, compute, head_dim);
}

static qlora_result qlora__prewarm_gpu(qlora_ctx* ctx, const qlora_prewarm_desc* s) {
    double start = qlora__clock_ms();
    uint32_t have = qlora__kernels_needed(ctx, s->compute, s->head_dim, s->base == QLORA_BASE_NF4,
                                          s->rank > 0, false);
    bool was_sealed = qlora__cache_set_sealed(ctx, false);
    qlora_result r = qlora__cache_warm(ctx, have);
    if (r == QLORA_OK && qlora__has_cublas(ctx)) {
        r = qlora__prewarm_cublas(ctx, s);
    }
    qlora__cache_set_sealed(ctx, r == QLORA_OK || was_sealed);
    QLORA__TRY(r);
    qlora_cache_info info = qlora__cache_facts(ctx);
    QLORA__LOG(ctx, INFO, PREWARM, "%u modules, %u kernels, %u cuBLAS shapes in %.1f ms",
               info.modules, info.kernels, info.cublas_shapes, qlora__clock_ms() - start);
    return QLORA_OK;
}

#endif

static qlora_result qlora__prewarm(qlora_ctx* ctx, const qlora_prewarm_desc* shape) {
    if (shape == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "shape is NULL");
    }
    qlora_prewarm_desc s = *shape;
    QLORA__TRY(qlora__shape_check(ctx, &s));
    QLORA__TRY(qlora__not_in_capture(ctx, "pre-warming"));
#ifndef QLORA_NO_CUDA
    if (!qlora__on_cpu(ctx)) {
        return qlora__prewarm_gpu(ctx, &s);
    }
#endif
    return QLORA_OK; // nothing is compiled on the CPU
}

qlora_result qlora_prewarm(qlora_ctx* ctx, const qlora_prewarm_desc* shape) {
    QLORA__ENTER(ctx, "qlora_prewarm");
    return qlora__leave(ctx, qlora__prewarm(ctx, shape));
}

//@@ src/graph.h

// ---- graphs: capture and replay -----------------------------------------------------------------

struct qlora_graph {
    qlora__watch watch; // must be first: the context's list points to it
    qlora_ctx* owner;
    uint64_t replays;
    size_t nodes;
    void* exec; // CUgraphExec
    qlora_graph_fn fn;
    void* user;
};

static void qlora__graph_free(qlora_ctx* ctx, qlora_graph* graph) {
    qlora__free(ctx, graph->watch.buffers,
                graph->watch.buffer_capacity * sizeof *graph->watch.buffers);
    qlora__free(ctx, graph, sizeof *graph);
}

#ifndef QLORA_NO_CUDA

// Runs the callback inside a capture. The capture is ended even if the callback fails, so that the
// stream can be used again.
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
    qlora__beside_finish(ctx, r != QLORA_OK || capture.broke[0] != '\0');
    char text[QLORA__ERROR_SIZE];
    snprintf(text, sizeof text, "%s", r != QLORA_OK ? ctx->env.error : capture.broke);
    int code = gpu->cu.StreamEndCapture(gpu->stream, recorded);
    graph->watch.buffers = capture.ids;
    graph->watch.buffer_count = capture.count;
    graph->watch.buffer_capacity = capture.capacity;
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
                       (unsigned long long)graph->watch.key,
                       text[0] != '\0' ? text
                       : r != QLORA_OK ? "the callback failed without a message"
                                       : "a call inside the callback cannot be captured",
                       code != 0 ? "; cuStreamEndCapture returned " : "", name);
}

// ---- memsets ------------------------------------------------------------------------------------
//
// cuBLAS clears a counter before many of its kernels, and memset nodes cost the host more than any
// other node when a graph is launched: about 3 us, compared with 0.03 us for a kernel (driver 580).
// Small clears are therefore replaced by kernel nodes between the same neighbours. Clears that
// cannot be replaced are left unchanged.

// Same layout as CUDA_MEMSET_NODE_PARAMS.
typedef struct qlora__memset_node {
    qlora__CUdeviceptr address;
    size_t pitch;
    unsigned value;
    unsigned element; // bytes
    size_t width;     // elements
    size_t height;
} qlora__memset_node;

// Same layout as CUDA_KERNEL_NODE_PARAMS.
typedef struct qlora__kernel_node {
    void* function;
    unsigned grid[3];
    unsigned block[3];
    unsigned shared;
    void** args;
    void** extra;
    void* kernel;
    void* context;
} qlora__kernel_node;

#define QLORA__NEIGHBOURS 8
#define QLORA__SMALL_CLEAR 65536 // bytes

typedef struct qlora__clear_node {
    qlora__CUdeviceptr address;
    int64_t floats;
    size_t before_count;
    size_t after_count;
    void* before[QLORA__NEIGHBOURS];
    void* after[QLORA__NEIGHBOURS];
} qlora__clear_node;

// Returns true for a small clear of whole words, and fills in its neighbours.
static bool qlora__graph_clear_at(const qlora__cuda_table* cu, void* node, qlora__clear_node* out) {
    int type = 0;
    qlora__memset_node set;
    memset(out, 0, sizeof *out);
    memset(&set, 0, sizeof set);
    if (cu->GraphNodeGetType(node, &type) != 0 || type != QLORA__CU_GRAPH_NODE_TYPE_MEMSET ||
        cu->GraphMemsetNodeGetParams(node, &set) != 0) {
        return false;
    }
    if (set.value != 0 || set.height > 1 || set.element == 0 || set.element > 4 ||
        set.width > QLORA__SMALL_CLEAR / set.element || set.width * set.element % 4 != 0 ||
        set.address % 4 != 0) {
        return false;
    }
    out->address = set.address;
    out->floats = (int64_t)(set.width * set.element / 4);
    if (cu->GraphNodeGetDependencies(node, NULL, NULL, &out->before_count) != 0 ||
        cu->GraphNodeGetDependentNodes(node, NULL, NULL, &out->after_count) != 0 ||
        out->before_count > QLORA__NEIGHBOURS || out->after_count > QLORA__NEIGHBOURS) {
        return false;
    }
    return cu->GraphNodeGetDependencies(node, out->before, NULL, &out->before_count) == 0 &&
           cu->GraphNodeGetDependentNodes(node, out->after, NULL, &out->after_count) == 0;
}

static qlora_result qlora__graph_clear_swap(qlora_ctx* ctx, void* recorded, void* node,
                                            qlora__clear_node* clear) {
    const qlora__cuda_table* cu = &ctx->gpu->cu;
    int64_t rows = 1;
    float zero = 0.0f;
    void* args[] = {&clear->address, &clear->floats, &rows, &clear->floats, &zero};
    qlora__kernel_node fill;
    memset(&fill, 0, sizeof fill);
    fill.function = qlora__cache_function(ctx, QLORA__K_elementwise_fill_f32);
    fill.block[0] = 256;
    fill.grid[0] = (unsigned)qlora__max(1, qlora__ceil_div(clear->floats, 4 * 256));
    for (int i = 1; i < 3; i++) {
        fill.block[i] = 1;
        fill.grid[i] = 1;
    }
    fill.args = args;
    void* made = NULL;
    QLORA__TRY(qlora__cu(ctx,
                         cu->GraphAddKernelNode(&made, recorded, clear->before,
                                                clear->before_count, &fill),
                         "cuGraphAddKernelNode"));
    void* from[QLORA__NEIGHBOURS];
    for (size_t i = 0; i < clear->after_count; i++) {
        from[i] = made;
    }
    if (clear->after_count > 0) {
        QLORA__TRY(qlora__cu(
            ctx,
            cu->GraphAddDependencies(recorded, from, clear->after, NULL, clear->after_count),
            "cuGraphAddDependencies"));
    }
    return qlora__cu(ctx, cu->GraphDestroyNode(node), "cuGraphDestroyNode");
}

static qlora_result qlora__graph_swap_clears(qlora_ctx* ctx, void* recorded, size_t count) {
    const qlora__cuda_table* cu = &ctx->gpu->cu;
    if (qlora__cache_function(ctx, QLORA__K_elementwise_fill_f32) == NULL ||
        cu->GraphNodeGetType == NULL || cu->GraphMemsetNodeGetParams == NULL ||
        cu->GraphNodeGetDependencies == NULL || cu->GraphNodeGetDependentNodes == NULL ||
        cu->GraphAddKernelNode == NULL || cu->GraphAddDependencies == NULL ||
        cu->GraphDestroyNode == NULL) {
        return QLORA_OK; // an older driver, or pre-warm did not compile the kernel
    }
    void** nodes = (void**)qlora__alloc_zero(ctx, (count + 1) * sizeof *nodes);
    if (nodes == NULL) {
        return QLORA_ERR_MEMORY;
    }
    size_t room = count;
    qlora_result r = qlora__cu(ctx, cu->GraphGetNodes(recorded, nodes, &room), "cuGraphGetNodes");
    for (size_t i = 0; r == QLORA_OK && i < count && nodes[i] != NULL; i++) {
        qlora__clear_node clear;
        if (qlora__graph_clear_at(cu, nodes[i], &clear)) {
            r = qlora__graph_clear_swap(ctx, recorded, nodes[i], &clear);
        }
    }
    qlora__free(ctx, nodes, (count + 1) * sizeof *nodes);
    return r;
}

static qlora_result qlora__graph_instantiate(qlora_ctx* ctx, qlora_graph* graph, void* recorded) {
    qlora__gpu* gpu = ctx->gpu;
    QLORA__TRY(
        qlora__cu(ctx, gpu->cu.GraphGetNodes(recorded, NULL, &graph->nodes), "cuGraphGetNodes"));
    QLORA__TRY(qlora__graph_swap_clears(ctx, recorded, graph->nodes));
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

static qlora_result qlora__graph_capture(qlora_ctx* ctx, uint64_t key, qlora_graph_fn fn,
                                         void* user, qlora_graph** out) {
    if (fn == NULL || out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is NULL", fn == NULL ? "fn" : "out");
    }
    QLORA__TRY(qlora__not_in_capture(ctx, "capturing another graph"));
    qlora_graph* graph = (qlora_graph*)qlora__alloc_zero(ctx, sizeof *graph);
    if (graph == NULL) {
        return QLORA_ERR_MEMORY;
    }
    graph->owner = ctx;
    graph->watch.key = key;
    graph->fn = fn;
    graph->user = user;
    qlora_result r = qlora__graph_build(ctx, graph);
    if (r != QLORA_OK) {
        QLORA__LOG(ctx, WARN, GRAPH, "%s", ctx->env.error);
        qlora__graph_drop_exec(ctx, graph);
        qlora__graph_free(ctx, graph);
        return r;
    }
    graph->watch.next = ctx->watches;
    ctx->watches = &graph->watch;
    ctx->living[QLORA__GRAPHS]++;
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

static bool qlora__graph_is_valid(const qlora_graph* graph) {
    return graph->watch.invalid[0] == '\0';
}

static qlora_ctx* qlora__graph_ctx(const qlora_graph* graph) {
    return graph != NULL ? graph->owner : NULL;
}

static qlora_result qlora__graph_replay(qlora_ctx* ctx, qlora_graph* graph, uint64_t key) {
    QLORA__TRY(qlora__not_in_capture(ctx, "replaying a graph"));
    if (graph->watch.key != key) {
        return qlora__fail(
            ctx, QLORA_ERR_STATE,
            "the graph was captured for key %llu and cannot be replayed for key %llu; capture "
            "another graph",
            (unsigned long long)graph->watch.key, (unsigned long long)key);
    }
    if (!qlora__graph_is_valid(graph)) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "graph %llu cannot be replayed: %s; capture it again",
                           (unsigned long long)key, graph->watch.invalid);
    }
    QLORA__TRY(qlora__on_cpu(ctx) ? graph->fn(ctx, graph->user) : qlora__graph_launch(ctx, graph));
    graph->replays++;
    return QLORA_OK;
}

qlora_result qlora_graph_replay(qlora_graph* graph, uint64_t key) {
    qlora_ctx* ctx = qlora__graph_ctx(graph);
    QLORA__ENTER(ctx, "qlora_graph_replay");
    return qlora__leave(ctx, qlora__graph_replay(ctx, graph, key));
}

static qlora_result qlora__graph_destroy(qlora_ctx* ctx, qlora_graph* graph) {
    if (graph == NULL) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__not_in_capture(ctx, "destroying a graph"));
    qlora__watch** link = &ctx->watches;
    while (*link != &graph->watch) {
        link = &(*link)->next;
    }
    *link = graph->watch.next;
    qlora__graph_drop_exec(ctx, graph);
    qlora__graph_free(ctx, graph);
    ctx->living[QLORA__GRAPHS]--;
    return QLORA_OK;
}

qlora_result qlora_graph_destroy(qlora_graph* graph) {
    if (graph == NULL) {
        return QLORA_OK;
    }
    qlora_ctx* ctx = graph->owner;
    QLORA__TRY(qlora__enter_destroy(ctx, "qlora_graph_destroy"));
    return qlora__leave(ctx, qlora__graph_destroy(ctx, graph));
}

static qlora_result qlora__graph_query(qlora_ctx* ctx, const qlora_graph* graph,
                                       qlora_graph_info* out) {
    if (out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    out->key = graph->watch.key;
    out->replays = graph->replays;
    out->nodes = graph->nodes;
    out->valid = qlora__graph_is_valid(graph);
    return QLORA_OK;
}

qlora_result qlora_graph_query(const qlora_graph* graph, qlora_graph_info* out) {
    qlora_ctx* ctx = qlora__graph_ctx(graph);
    QLORA__ENTER(ctx, "qlora_graph_query");
    return qlora__leave(ctx, qlora__graph_query(ctx, graph, out));
}

//@@ src/qlora.h

#ifndef QLORA_NO_MODEL

//@@ src/model/structure.h

// ---- the parts of a model -----------------------------------------------------------------------

#define QLORA__PROJECTIONS 7
#define QLORA__GROUPS 4
enum { QLORA__QKV, QLORA__O, QLORA__GATE_UP, QLORA__DOWN };

// In the order of the bits of qlora_target: the name of the module within a layer, its name in GGUF
// files, and the stack it belongs to.
static const struct {
    const char* module;
    const char* gguf;
    int group;
} qlora__projections[QLORA__PROJECTIONS] = {
    {"self_attn.q_proj", "attn_q", QLORA__QKV},    {"self_attn.k_proj", "attn_k", QLORA__QKV},
    {"self_attn.v_proj", "attn_v", QLORA__QKV},    {"self_attn.o_proj", "attn_output", QLORA__O},
    {"mlp.gate_proj", "ffn_gate", QLORA__GATE_UP}, {"mlp.up_proj", "ffn_up", QLORA__GATE_UP},
    {"mlp.down_proj", "ffn_down", QLORA__DOWN}};

static const struct {
    int first; // index in qlora__projections
    int count;
} qlora__groups[QLORA__GROUPS] = {{0, 3}, {3, 1}, {4, 2}, {6, 1}};

typedef struct qlora__projection {
    int64_t in;
    int64_t out;
    bool is_nf4;
    qlora_nf4_desc nf4_desc;
    qlora_nf4 nf4;
    qlora_tensor dense; // in the compute type, unless is_nf4
    bool has_bias;
    qlora_tensor bias;
    int64_t rank; // 0 = no adapter
    double alpha;
    float scale;
    int64_t a_at; // first element in the parameter arena
    int64_t b_at;
    qlora_tensor a; // views of the shadow: A, s B
    qlora_tensor sb;
    qlora_tensor da; // views of the gradients
    qlora_tensor db;
} qlora__projection;

// The activations of a layer that the backward pass needs.
typedef struct qlora__kept {
    qlora_tensor h;   // [T, H] residual stream at the layer's input
    qlora_tensor qkv; // [T, q + 2 kv] after the rotation; with q/k norm, before norm and rotation
    qlora_tensor qk;  // [T, q + kv] normalised and rotated; only with q/k norm
    qlora_tensor o;   // [T, q + pad] output of attention, and z of o_proj
    qlora_tensor lse; // [heads, T]
    qlora_tensor h2;  // [T, H] residual stream after attention
    qlora_tensor gu;  // [T, 2 I + pad] gate and up; their gradients in the backward pass
} qlora__kept;

typedef struct qlora__layer {
    qlora__projection projections[QLORA__PROJECTIONS];
    qlora_linear_desc linears[QLORA__GROUPS];
    qlora_tensor operands[QLORA__GROUPS]; // cached, or views of the shared one
    int64_t pads[QLORA__GROUPS];
    bool cached;
    bool recompute;
    bool sliding;
    qlora_tensor qkv_bias; // [1, q + 2 kv]; the rope kernel adds it
    qlora_tensor norm1;    // [1, H] f32
    qlora_tensor norm2;
    qlora_tensor q_norm; // [1, head_dim] f32
    qlora_tensor k_norm;
    int64_t norms_at; // first element of norm1 in the parameter arena, if norms are trained
    qlora_tensor d_norm1;
    qlora_tensor d_norm2;
    qlora_tensor d_q_norm;
    qlora_tensor d_k_norm;
    qlora__kept kept;
} qlora__layer;

// The inputs of a micro-batch: views of one block, which is filled on the host and copied as a
// whole.
typedef struct qlora__batch_block {
    qlora_tensor all;       // U8, the whole block
    qlora_tensor ids;       // [1, T]
    qlora_tensor positions; // [1, T]
    qlora_tensor sequences; // [1, T]: index of the sequence in the data
    qlora_tensor seqs;      // [1, max_sequences + 1]
    qlora_tensor rows;      // [1, R]: token of labelled row r
    qlora_tensor labels;    // [1, R]
    qlora_tensor weights;   // [1, R] f32
    qlora_tensor inverse;   // [1, T]: labelled row of token t, or the zero row
    qlora_tensor scale;     // [1, 1] f32: 1 / total labels
    qlora_tensor dropout;   // [1, 4]: seed low, seed high, step, 0
} qlora__batch_block;

// The files of a model and its adapter, each opened once for planning and loading.
typedef struct qlora__source {
    qlora__peft peft;
    bool has_peft;
    qlora__folder folder;
    bool has_folder;
} qlora__source;

struct qlora_model {
    qlora_ctx* ctx;
    qlora_model_desc desc; // defaults resolved; of its pointers, only dir remains valid
    qlora_plan plan;
    char* dir;             // copy of desc.dir, or NULL
    qlora__source* source; // only while the model is being opened
    qlora_dtype compute;
    qlora_math math; // that of the context when the model was opened
    bool use_adapters;
    int64_t trainers;    // number that exist
    int64_t generations; // number that exist
    bool micro_begun;    // a micro-batch is being computed in slices: its activations are in use
    int64_t elements;    // of the parameter arena, including gaps
    int64_t positions;   // rows of the rope tables
    uint64_t base_config; // hashes that tell one base model from another
    uint64_t base_weights;
    qlora__buffer* arena;
    qlora__layer* layers;
    // base
    qlora_tensor embed; // [V, H]
    qlora_tensor head;  // [V, H]; the embedding if tied
    qlora_tensor final_norm;
    int64_t final_norm_at;
    qlora_tensor d_final_norm;
    qlora_tensor rope; // [positions, head_dim] f32
    qlora_tensor rope_sliding;
    // adapters and optimizer
    qlora_tensor parameters; // f32 [1, elements]
    qlora_tensor shadow;     // compute type [1, elements]
    qlora_tensor ranges;     // one qlora_adamw_range per trained tensor
    int64_t range_count;
    int64_t longest_range;
    qlora_tensor gradients;
    qlora_tensor moment1;
    qlora_tensor moment2;
    qlora_tensor adamw; // one qlora_adamw_state
    qlora_clip clip;    // its tables are in the arena
    // micro-batch
    qlora__ring ring; // host copies of batch blocks, each followed by the AdamW settings of a step
    qlora__batch_block batch;
    qlora_tensor flag;    // I32: an id, a position or a label was out of range
    qlora_tensor last_h;  // [T, H] after the last layer
    qlora_tensor x;       // [T, H + pad] normalised input of qkv and gate/up
    qlora_tensor delta;   // [T, H] output of o and down; gradient of x in the backward pass
    qlora_tensor s;       // [T, I + pad] output of SwiGLU
    qlora_tensor ds;      // its gradient; the same memory unless there is dropout
    qlora_tensor operand; // shared by the layers without a copy of their own
    qlora_tensor dh;      // [T, H + pad]
    qlora_tensor dqkv;    // [T, q + 2 kv + pad]
    qlora_tensor d_o;     // [T, q]
    qlora__kept again;    // activations of a recomputed layer
    // head
    qlora_tensor rows_x;  // [chunk, H]
    qlora_tensor logits;  // [chunk, V]
    qlora_tensor rows_dx; // [R + 1, H]; the last row is zero
    qlora_tensor losses;  // f32 [1, R]
    qlora_tensor totals;  // f32 [1, 6]: losses, their rounding error, weights; then for evaluation
    // generation
    qlora_tensor kv_cache; // [layers * generate_tokens, 2 kv]
    qlora_tensor scores;   // f32 [heads, generate_tokens]
    qlora_tensor chances;  // their softmax in the compute type; the same memory if that is f32
};

// Whether the model has gradients and an optimizer.
static bool qlora__trains(const qlora_model* m) {
    return m->desc.purpose == QLORA_PURPOSE_TRAIN;
}

//@@ src/model/arena.h

// ---- arena --------------------------------------------------------------------------------------

// With base NULL it only counts bytes; otherwise it hands out memory. Planning and allocation run
// the same code, so that exactly the planned memory is allocated.
typedef struct qlora__arena {
    qlora_ctx* ctx;
    char* base;
    size_t used;
} qlora__arena;

static char* qlora__arena_take(qlora__arena* arena, size_t bytes) {
    char* p = arena->base != NULL ? arena->base + arena->used : NULL;
    arena->used += qlora__align_up(bytes, 256);
    return p;
}

// Allocates a contiguous matrix.
static void qlora__arena_tensor(qlora__arena* arena, qlora_dtype dtype, int64_t rows, int64_t cols,
                                qlora_tensor* out) {
    memset(out, 0, sizeof *out);
    out->bytes = (size_t)rows * (size_t)cols * qlora_dtype_bytes(dtype);
    out->data = qlora__arena_take(arena, out->bytes);
    out->dtype = dtype;
    out->rows = rows;
    out->cols = cols;
    out->ld = cols;
    out->batch = 1;
    out->batch_stride = rows * cols;
    out->owner = arena->ctx;
}

// A view of part of a contiguous one-row tensor as a matrix.
static void qlora__arena_window(const qlora_tensor* flat, int64_t at, int64_t rows, int64_t cols,
                                qlora_tensor* out) {
    *out = *flat;
    size_t size = qlora_dtype_bytes(flat->dtype);
    out->data = flat->data != NULL ? (char*)flat->data + (size_t)at * size : NULL;
    out->bytes = (size_t)rows * (size_t)cols * size;
    out->rows = rows;
    out->cols = cols;
    out->ld = cols;
    out->batch_stride = rows * cols;
}

static int64_t qlora__q_width(const qlora_model_config* c) {
    return c->heads * c->head_dim;
}

static int64_t qlora__kv_width(const qlora_model_config* c) {
    return c->kv_heads * c->head_dim;
}

static void qlora__layout_projection(qlora__arena* arena, qlora_model* m, qlora__projection* p) {
    if (p->is_nf4) {
        qlora_tensor memory;
        qlora__arena_tensor(arena, QLORA_U8, 1, (int64_t)qlora_nf4_bytes(&p->nf4_desc), &memory);
        p->nf4.memory = memory; // wrapped once the arena is allocated
    } else {
        qlora__arena_tensor(arena, m->compute, p->out, p->in, &p->dense);
    }
    if (p->has_bias) {
        qlora__arena_tensor(arena, m->compute, 1, p->out, &p->bias);
    }
}

static void qlora__layout_base(qlora__arena* arena, qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    qlora__arena_tensor(arena, m->compute, c->vocab, c->hidden, &m->embed);
    m->head = m->embed;
    if (!c->tied) {
        qlora__arena_tensor(arena, m->compute, c->vocab, c->hidden, &m->head);
    }
    qlora__arena_tensor(arena, QLORA_F32, m->positions, c->head_dim, &m->rope);
    m->rope_sliding = m->rope;
    if (memcmp(&c->rope, &c->rope_sliding, sizeof c->rope) != 0) {
        qlora__arena_tensor(arena, QLORA_F32, m->positions, c->head_dim, &m->rope_sliding);
    }
    if (!m->desc.train_norms) {
        qlora__arena_tensor(arena, QLORA_F32, 1, c->hidden, &m->final_norm);
    }
    for (int64_t l = 0; l < c->layers; l++) {
        qlora__layer* layer = &m->layers[l];
        for (int i = 0; i < QLORA__PROJECTIONS; i++) {
            qlora__layout_projection(arena, m, &layer->projections[i]);
        }
        if (c->qkv_bias && !c->qk_norm) {
            qlora__arena_tensor(arena, m->compute, 1, qlora__q_width(c) + 2 * qlora__kv_width(c),
                                &layer->qkv_bias);
        }
        if (!m->desc.train_norms) {
            qlora__arena_tensor(arena, QLORA_F32, 1, c->hidden, &layer->norm1);
            qlora__arena_tensor(arena, QLORA_F32, 1, c->hidden, &layer->norm2);
            if (c->qk_norm) {
                qlora__arena_tensor(arena, QLORA_F32, 1, c->head_dim, &layer->q_norm);
                qlora__arena_tensor(arena, QLORA_F32, 1, c->head_dim, &layer->k_norm);
            }
        }
    }
}

static void qlora__layout_cache(qlora__arena* arena, qlora_model* m) {
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        qlora__layer* layer = &m->layers[l];
        for (int g = 0; g < QLORA__GROUPS && layer->cached; g++) {
            const qlora_linear_desc* linear = &layer->linears[g];
            qlora__arena_tensor(arena, m->compute, qlora_linear_out(linear) + layer->pads[g],
                                linear->in + layer->pads[g], &layer->operands[g]);
        }
    }
}

// Views of the shadow and the gradients for one projection.
static void qlora__window_projection(qlora_model* m, qlora__projection* p) {
    qlora__arena_window(&m->shadow, p->a_at, p->rank, p->in, &p->a);
    qlora__arena_window(&m->shadow, p->b_at, p->out, p->rank, &p->sb);
    if (qlora__trains(m)) {
        qlora__arena_window(&m->gradients, p->a_at, p->rank, p->in, &p->da);
        qlora__arena_window(&m->gradients, p->b_at, p->out, p->rank, &p->db);
    }
}

static void qlora__window_norm(qlora_model* m, int64_t at, int64_t width, qlora_tensor* w,
                               qlora_tensor* dw) {
    qlora__arena_window(&m->parameters, at, 1, width, w);
    if (qlora__trains(m)) {
        qlora__arena_window(&m->gradients, at, 1, width, dw);
    }
}

static void qlora__layout_adapters(qlora__arena* arena, qlora_model* m) {
    qlora__arena_tensor(arena, QLORA_F32, 1, m->elements, &m->parameters);
    qlora__arena_tensor(arena, m->compute, 1, m->elements, &m->shadow);
    qlora__arena_tensor(arena, QLORA_U8, 1, m->range_count * (int64_t)sizeof(qlora_adamw_range),
                        &m->ranges);
}

static void qlora__layout_optimizer(qlora__arena* arena, qlora_model* m) {
    if (!qlora__trains(m)) {
        return;
    }
    qlora__arena_tensor(arena, QLORA_F32, 1, m->elements, &m->gradients);
    qlora__arena_tensor(arena, QLORA_F32, 1, m->elements, &m->moment1);
    qlora__arena_tensor(arena, QLORA_F32, 1, m->elements, &m->moment2);
    qlora__arena_tensor(arena, QLORA_U8, 1, (int64_t)sizeof(qlora_adamw_state), &m->adamw);
    char* clip = qlora__arena_take(arena, qlora__clip_place(m->ctx, m->elements, NULL, &m->clip));
    qlora__clip_place(m->ctx, m->elements, clip, &m->clip);
}

static void qlora__layout_windows(qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    for (int64_t l = 0; l < c->layers; l++) {
        qlora__layer* layer = &m->layers[l];
        for (int i = 0; i < QLORA__PROJECTIONS; i++) {
            if (layer->projections[i].rank > 0) {
                qlora__window_projection(m, &layer->projections[i]);
            }
        }
        if (m->desc.train_norms) {
            int64_t at = layer->norms_at;
            int64_t step = (int64_t)qlora__align_up((size_t)c->hidden, 8);
            int64_t head_step = (int64_t)qlora__align_up((size_t)c->head_dim, 8);
            qlora__window_norm(m, at, c->hidden, &layer->norm1, &layer->d_norm1);
            qlora__window_norm(m, at + step, c->hidden, &layer->norm2, &layer->d_norm2);
            if (c->qk_norm) {
                at += 2 * step;
                qlora__window_norm(m, at, c->head_dim, &layer->q_norm, &layer->d_q_norm);
                qlora__window_norm(m, at + head_step, c->head_dim, &layer->k_norm,
                                   &layer->d_k_norm);
            }
        }
    }
    if (m->desc.train_norms) {
        qlora__window_norm(m, m->final_norm_at, c->hidden, &m->final_norm, &m->d_final_norm);
    }
}

// Of pads, only those of o and of gate/up are used.
static void qlora__layout_kept(qlora__arena* arena, qlora_model* m,
                               const int64_t pads[QLORA__GROUPS], qlora__kept* kept) {
    const qlora_model_config* c = &m->plan.config;
    int64_t T = m->plan.tokens;
    int64_t q = qlora__q_width(c);
    int64_t kv = qlora__kv_width(c);
    qlora__arena_tensor(arena, m->compute, T, q + 2 * kv, &kept->qkv);
    if (c->qk_norm) {
        qlora__arena_tensor(arena, m->compute, T, q + kv, &kept->qk);
    }
    qlora__arena_tensor(arena, m->compute, T, q + pads[QLORA__O], &kept->o);
    qlora__arena_tensor(arena, QLORA_F32, c->heads, T, &kept->lse);
    qlora__arena_tensor(arena, m->compute, T, c->hidden, &kept->h2);
    qlora__arena_tensor(arena, m->compute, T, 2 * c->intermediate + pads[QLORA__GATE_UP],
                        &kept->gu);
}

static void qlora__most_pads(const qlora_model* m, int64_t pads[QLORA__GROUPS]) {
    memset(pads, 0, QLORA__GROUPS * sizeof pads[0]);
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        for (int g = 0; g < QLORA__GROUPS; g++) {
            pads[g] = qlora__max(pads[g], m->layers[l].pads[g]);
        }
    }
}

// In training, each layer keeps its own activations. Otherwise all layers share one set, and the
// residual stream is updated in place.
static void qlora__layout_activations(qlora__arena* arena, qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    int64_t pads[QLORA__GROUPS];
    qlora__most_pads(m, pads);
    qlora__arena_tensor(arena, m->compute, m->plan.tokens, c->hidden, &m->last_h);
    memset(&m->again, 0, sizeof m->again);
    if (!qlora__trains(m) || m->plan.recompute_layers > 0) {
        qlora__layout_kept(arena, m, pads, &m->again);
    }
    for (int64_t l = 0; l < c->layers; l++) {
        qlora__layer* layer = &m->layers[l];
        if (!qlora__trains(m)) {
            layer->kept = m->again;
            layer->kept.h = m->last_h;
            layer->kept.h2 = m->last_h;
            continue;
        }
        if (layer->recompute) {
            layer->kept = m->again;
        } else {
            qlora__layout_kept(arena, m, layer->pads, &layer->kept);
        }
        qlora__arena_tensor(arena, m->compute, m->plan.tokens, c->hidden, &layer->kept.h);
    }
}

// The shared operand must also hold the largest weight while it is being quantised.
static int64_t qlora__operand_elements(const qlora_model* m) {
    int64_t most = 0;
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        const qlora__layer* layer = &m->layers[l];
        for (int g = 0; g < QLORA__GROUPS; g++) {
            const qlora_linear_desc* linear = &layer->linears[g];
            int64_t rows = qlora_linear_out(linear) + layer->pads[g];
            int64_t n = layer->cached ? 0 : rows * (linear->in + layer->pads[g]);
            most = qlora__max(most, n);
        }
        for (int i = 0; i < QLORA__PROJECTIONS; i++) {
            const qlora__projection* p = &layer->projections[i];
            most = qlora__max(most, p->in * p->out); // a weight to quantise, from a file or random
        }
    }
    return most;
}

static void qlora__layout_workspace(qlora__arena* arena, qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    int64_t T = m->plan.tokens;
    int64_t q = qlora__q_width(c);
    int64_t kv = qlora__kv_width(c);
    int64_t pads[QLORA__GROUPS];
    qlora__most_pads(m, pads);
    int64_t x_pad = qlora__max(pads[QLORA__QKV], pads[QLORA__GATE_UP]);
    int64_t dh_pad = qlora__max(pads[QLORA__O], pads[QLORA__DOWN]);
    qlora__arena_tensor(arena, m->compute, T, c->hidden + x_pad, &m->x);
    qlora__arena_tensor(arena, m->compute, T, c->hidden, &m->delta);
    qlora__arena_tensor(arena, m->compute, T, c->intermediate + pads[QLORA__DOWN], &m->s);
    qlora__arena_tensor(arena, m->compute, 1, qlora__operand_elements(m), &m->operand);
    qlora__arena_tensor(arena, QLORA_I32, 1, 1, &m->flag);
    if (!qlora__trains(m)) {
        return;
    }
    m->ds = m->s;
    if (m->desc.dropout > 0.0f) {
        qlora__arena_tensor(arena, m->compute, T, c->intermediate, &m->ds);
    }
    qlora__arena_tensor(arena, m->compute, T, c->hidden + dh_pad, &m->dh);
    qlora__arena_tensor(arena, m->compute, T, q + 2 * kv + pads[QLORA__QKV], &m->dqkv);
    qlora__arena_tensor(arena, m->compute, T, q, &m->d_o);
}

static void qlora__layout_batch(qlora__arena* arena, qlora_model* m) {
    int64_t T = m->plan.tokens;
    int64_t R = qlora__ceil_div(T, m->plan.head_chunk) * m->plan.head_chunk;
    qlora__batch_block* b = &m->batch;
    size_t before = arena->used;
    char* start = arena->base != NULL ? arena->base + before : NULL;
    qlora__arena_tensor(arena, QLORA_I32, 1, T, &b->ids);
    qlora__arena_tensor(arena, QLORA_I32, 1, T, &b->positions);
    qlora__arena_tensor(arena, QLORA_I32, 1, T, &b->sequences);
    qlora__arena_tensor(arena, QLORA_I32, 1, m->plan.max_sequences + 1, &b->seqs);
    qlora__arena_tensor(arena, QLORA_I32, 1, R, &b->rows);
    qlora__arena_tensor(arena, QLORA_I32, 1, R, &b->labels);
    qlora__arena_tensor(arena, QLORA_F32, 1, R, &b->weights);
    qlora__arena_tensor(arena, QLORA_I32, 1, T, &b->inverse);
    qlora__arena_tensor(arena, QLORA_F32, 1, 1, &b->scale);
    qlora__arena_tensor(arena, QLORA_I32, 1, 4, &b->dropout);
    b->all = b->ids;
    b->all.data = start;
    b->all.dtype = QLORA_U8;
    b->all.bytes = arena->used - before;
    b->all.cols = (int64_t)b->all.bytes;
    b->all.ld = b->all.cols;
}

static void qlora__layout_head(qlora__arena* arena, qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    int64_t R = qlora__ceil_div(m->plan.tokens, m->plan.head_chunk) * m->plan.head_chunk;
    qlora__arena_tensor(arena, m->compute, m->plan.head_chunk, c->hidden, &m->rows_x);
    qlora__arena_tensor(arena, m->compute, m->plan.head_chunk, c->vocab, &m->logits);
    qlora__arena_tensor(arena, QLORA_F32, 1, R, &m->losses);
    qlora__arena_tensor(arena, QLORA_F32, 1, 6, &m->totals);
    if (qlora__trains(m)) {
        qlora__arena_tensor(arena, m->compute, R + 1, c->hidden, &m->rows_dx);
    }
}

static void qlora__layout_generation(qlora__arena* arena, qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    int64_t n = m->desc.generate_tokens;
    if (n > 0) {
        qlora__arena_tensor(arena, m->compute, c->layers * n, 2 * qlora__kv_width(c), &m->kv_cache);
        int64_t wide = (int64_t)qlora__align_up((size_t)n, 8); // rows start aligned
        qlora__arena_tensor(arena, QLORA_F32, c->heads, wide, &m->scores);
        m->chances = m->scores;
        if (m->compute != QLORA_F32) {
            qlora__arena_tensor(arena, m->compute, c->heads, wide, &m->chances);
        }
    }
}

// Lays out the whole model, category by category.
static void qlora__model_layout(qlora_model* m, char* base) {
    qlora__arena arena;
    arena.ctx = m->ctx;
    arena.base = base;
    arena.used = 0;
    const struct {
        void (*lay)(qlora__arena* arena, qlora_model* m);
        uint64_t* bytes;
    } steps[] = {{qlora__layout_base, &m->plan.base},
                 {qlora__layout_cache, &m->plan.cache},
                 {qlora__layout_adapters, &m->plan.adapters},
                 {qlora__layout_optimizer, &m->plan.optimizer},
                 {qlora__layout_activations, &m->plan.activations},
                 {qlora__layout_workspace, &m->plan.workspace},
                 {qlora__layout_head, &m->plan.head},
                 {qlora__layout_generation, &m->plan.generation},
                 {qlora__layout_batch, &m->plan.batches}};
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
        size_t before = arena.used;
        steps[i].lay(&arena, m);
        *steps[i].bytes = arena.used - before;
    }
    qlora__layout_windows(m);
    m->plan.total = arena.used;
}

//@@ src/model/plan.h

// ---- plan ---------------------------------------------------------------------------------------

static void qlora__source_close(qlora_model* m) {
    qlora__source* source = m->source;
    if (source != NULL && source->has_peft) {
        qlora__peft_close(&m->ctx->env, &source->peft);
    }
    if (source != NULL && source->has_folder) {
        qlora__folder_close(&m->ctx->env, &source->folder);
    }
    qlora__free(m->ctx, source, source != NULL ? sizeof *source : 0);
    m->source = NULL;
}

// The folder with the weights, opened when it is first needed.
static qlora_result qlora__source_folder(qlora_ctx* ctx, qlora_model* m, const char* dir,
                                         const qlora__folder** out) {
    if (!m->source->has_folder) {
        QLORA__TRY(qlora__folder_open(&ctx->env, dir, &m->source->folder));
        m->source->has_folder = true;
    }
    *out = &m->source->folder;
    return QLORA_OK;
}

// A new adapter on the modules that the desc names.
static void qlora__adapter_new(const qlora_model* m, int number, qlora__projection* p) {
    if (m->desc.rank > 0 && (m->desc.targets >> number & 1u) != 0) {
        p->rank = m->desc.rank;
        p->alpha = (double)m->desc.alpha;
        double divisor = m->desc.rslora ? sqrt((double)p->rank) : (double)p->rank;
        p->scale = (float)(p->alpha / divisor);
    }
}

// Rank and scale of a module in an adapter folder.
static qlora_result qlora__adapter_found(qlora_ctx* ctx, const qlora__peft* peft, int64_t layer,
                                         int number, qlora__projection* p) {
    char module[160];
    qlora__peft_module found;
    memset(&found, 0, sizeof found);
    snprintf(module, sizeof module, "model.layers.%lld.%s", (long long)layer,
             qlora__projections[number].module);
    QLORA__TRY(qlora__peft_find(&ctx->env, peft, module, p->out, p->in, &found));
    p->rank = found.rank;
    p->alpha = found.alpha;
    p->scale = (float)found.scale;
    return QLORA_OK;
}

// Every matrix of an adapter folder must belong to a module of the model: what is not used would
// change the results in PEFT.
static qlora_result qlora__adapter_all_used(qlora_ctx* ctx, const qlora_model* m,
                                            const qlora__peft* peft) {
    for (uint32_t i = 0; i < peft->tensors.count; i++) {
        const char* name = peft->tensors.entries[i].tensor->name;
        bool known = false;
        for (int64_t l = 0; l < m->plan.config.layers && !known; l++) {
            for (int k = 0; k < QLORA__PROJECTIONS && !known; k++) {
                char module[160];
                int n = snprintf(module, sizeof module, "base_model.model.model.layers.%lld.%s.",
                                 (long long)l, qlora__projections[k].module);
                known = n > 0 && strncmp(name, module, (size_t)n) == 0;
            }
        }
        if (!known) {
            return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                               "%s: %s does not belong to a projection of this model",
                               peft->tensors.dir, name);
        }
    }
    return QLORA_OK;
}

// Sets the rank and scale of every module; rank 0 = no adapter.
static qlora_result qlora__adapter_shapes(qlora_ctx* ctx, qlora_model* m,
                                          const qlora_model_desc* desc) {
    qlora__peft* peft = &m->source->peft;
    if (desc->adapter != NULL) {
        QLORA__TRY(qlora__peft_open(&ctx->env, desc->adapter, peft));
        m->source->has_peft = true;
        QLORA__TRY(qlora__adapter_all_used(ctx, m, peft));
        m->desc.rslora = peft->rslora;
        m->desc.dropout = desc->dropout != 0.0f ? desc->dropout : (float)peft->dropout;
        m->desc.rank = (int32_t)peft->rank;
        m->desc.alpha = (float)peft->alpha;
    }
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        for (int i = 0; i < QLORA__PROJECTIONS; i++) {
            qlora__projection* p = &m->layers[l].projections[i];
            if (desc->adapter != NULL) {
                QLORA__TRY(qlora__adapter_found(ctx, peft, l, i, p));
            } else {
                qlora__adapter_new(m, i, p);
            }
        }
    }
    return QLORA_OK;
}

// The A matrices of a stack are contiguous, so that one product computes their gradients; the B
// matrices follow.
static int64_t qlora__number_group(qlora_model* m, qlora__layer* layer, int group, int64_t at) {
    qlora__projection* first = &layer->projections[qlora__groups[group].first];
    for (int i = 0; i < qlora__groups[group].count; i++) {
        qlora__projection* p = &first[i];
        p->a_at = at;
        at += (int64_t)qlora__align_up((size_t)(p->rank * p->in), 8);
    }
    for (int i = 0; i < qlora__groups[group].count; i++) {
        qlora__projection* p = &first[i];
        p->b_at = at;
        at += (int64_t)qlora__align_up((size_t)(p->out * p->rank), 8);
        m->range_count += p->rank > 0 ? 2 : 0;
        m->longest_range = qlora__max(m->longest_range, p->rank * qlora__max(p->in, p->out));
        m->plan.parameters += p->rank * (p->in + p->out);
    }
    return at;
}

// Assigns a place to every trained tensor; each starts at a multiple of 8 elements.
static void qlora__number_parameters(qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    int64_t at = 0;
    m->range_count = 0;
    m->longest_range = 0;
    m->plan.parameters = 0;
    for (int64_t l = 0; l < c->layers; l++) {
        qlora__layer* layer = &m->layers[l];
        for (int g = 0; g < QLORA__GROUPS; g++) {
            at = qlora__number_group(m, layer, g, at);
        }
        if (m->desc.train_norms) {
            int64_t norms = 2 * (int64_t)qlora__align_up((size_t)c->hidden, 8) +
                            (c->qk_norm ? 2 * (int64_t)qlora__align_up((size_t)c->head_dim, 8) : 0);
            layer->norms_at = at;
            at += norms;
            m->range_count += c->qk_norm ? 4 : 2;
            m->longest_range = qlora__max(m->longest_range, c->qk_norm ? c->head_dim : 0);
            m->plan.parameters += 2 * c->hidden + (c->qk_norm ? 2 * c->head_dim : 0);
        }
    }
    if (m->desc.train_norms) {
        m->final_norm_at = at;
        at += (int64_t)qlora__align_up((size_t)c->hidden, 8);
        m->range_count++;
        m->longest_range = qlora__max(m->longest_range, c->hidden);
        m->plan.parameters += c->hidden;
    }
    m->elements = at;
}

// Sizes of a layer's projections and stacks.
static void qlora__shape_layer(qlora_model* m, qlora__layer* layer) {
    const qlora_model_config* c = &m->plan.config;
    int64_t q = qlora__q_width(c);
    int64_t kv = qlora__kv_width(c);
    const int64_t ins[QLORA__PROJECTIONS] = {c->hidden, c->hidden, c->hidden,      q,
                                             c->hidden, c->hidden, c->intermediate};
    const int64_t outs[QLORA__PROJECTIONS] = {
        q, kv, kv, c->hidden, c->intermediate, c->intermediate, c->hidden};
    for (int i = 0; i < QLORA__PROJECTIONS; i++) {
        qlora__projection* p = &layer->projections[i];
        int group = qlora__projections[i].group;
        p->in = ins[i];
        p->out = outs[i];
        // The rope kernel adds the bias of q, k and v, unless a norm comes between.
        p->has_bias = group == QLORA__QKV ? c->qkv_bias && c->qk_norm
                      : group == QLORA__O ? c->o_bias
                                          : c->mlp_bias;
    }
}

// Points the linears of a layer at the tensors of its projections.
static void qlora__connect_layer(qlora_model* m, int64_t index) {
    qlora__layer* layer = &m->layers[index];
    for (int g = 0; g < QLORA__GROUPS; g++) {
        qlora_linear_desc* linear = &layer->linears[g];
        memset(linear, 0, sizeof *linear);
        linear->count = qlora__groups[g].count;
        for (int i = 0; i < linear->count; i++) {
            int number = qlora__groups[g].first + i;
            qlora__projection* p = &layer->projections[number];
            qlora_linear_part* part = &linear->parts[i];
            linear->in = p->in;
            part->out = p->out;
            part->rank = p->rank;
            part->scale = p->scale;
            part->projection = number;
            part->nf4 = p->is_nf4 ? &p->nf4 : NULL;
            part->dense = p->is_nf4 ? NULL : &p->dense;
            part->bias = p->has_bias ? &p->bias : NULL;
            part->a = &p->a;
            part->sb = &p->sb;
            part->da = &p->da;
            part->db = &p->db;
        }
        linear->operand = &layer->operands[g];
        linear->dropout = qlora__trains(m) ? m->desc.dropout : 0.0f;
        linear->layer = (int32_t)index;
        linear->positions = &m->batch.positions;
        linear->sequences = &m->batch.sequences;
        linear->state = &m->batch.dropout;
        layer->pads[g] = qlora_linear_pad(linear);
    }
}

// Fills in the defaults of a config that comes from the caller, and checks it.
static qlora_result qlora__config_check(qlora_ctx* ctx, qlora_model_config* c) {
    if (c->kv_heads == 0) {
        c->kv_heads = c->heads;
    }
    if (c->head_dim == 0 && c->heads > 0) {
        c->head_dim = c->hidden / c->heads;
    }
    if (c->rope_sliding.theta == 0.0) {
        c->rope_sliding = c->rope;
    }
    const struct {
        const char* name;
        int64_t value;
        int64_t most;
    } sizes[] = {{"config.vocab", c->vocab, 1 << 24},
                 {"config.hidden", c->hidden, 1 << 24},
                 {"config.intermediate", c->intermediate, 1 << 24},
                 {"config.layers", c->layers, QLORA_MAX_LAYERS},
                 {"config.heads", c->heads, 1 << 24},
                 {"config.kv_heads", c->kv_heads, 1 << 24},
                 {"config.head_dim", c->head_dim, 256}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        QLORA__TRY(qlora__need_whole(ctx, sizes[i].name, sizes[i].value, 1, sizes[i].most));
    }
    if (c->head_dim % 2 != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "config.head_dim is %lld; it must be even",
                           (long long)c->head_dim);
    }
    if (c->heads % c->kv_heads != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "config.heads is %lld; it must be a multiple of config.kv_heads, %lld",
                           (long long)c->heads, (long long)c->kv_heads);
    }
    if (!(c->rms_eps > 0.0)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "config.rms_eps is %g; it must be positive",
                           c->rms_eps);
    }
    QLORA__TRY(qlora__need_whole(ctx, "config.window", c->window, 0, INT64_MAX));
    QLORA__TRY(qlora__need_whole(ctx, "config.max_positions", c->max_positions, 0, INT64_MAX));
    return qlora__need_whole(ctx, "config.stop_count", c->stop_count, 0, QLORA_MAX_STOP_IDS);
}

static qlora_result qlora__model_desc_check(qlora_ctx* ctx, const qlora_model_desc* d) {
    if (d == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "the model desc is NULL");
    }
    if (d->reserved_must_be_zero0 != 0 || d->reserved_must_be_zero1 != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "the model desc was not zeroed before its fields were set");
    }
    if (d->dir == NULL && d->config == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "desc.dir and desc.config are both NULL; set either dir (a folder) or "
                           "config (random weights)");
    }
    if (d->dir != NULL && d->config != NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "desc.dir and desc.config are both set; set either dir (a folder) or "
                           "config (random weights)");
    }
    const struct {
        const char* name;
        int64_t value;
        int64_t least;
        int64_t most;
    } fields[] = {{"desc.rank", d->rank, INT32_MIN, 1024},
                  {"desc.targets", d->targets, 0, QLORA_TARGET_ALL},
                  {"desc.base", (int64_t)d->base, 0, QLORA_BASE_32BIT},
                  {"desc.mode", (int64_t)d->mode, 0, QLORA_MODE_BF16},
                  {"desc.purpose", (int64_t)d->purpose, 0, QLORA_PURPOSE_EVALUATE},
                  {"desc.recompute", (int64_t)d->recompute, 0, QLORA_CHOICE_OFF},
                  {"desc.cache", (int64_t)d->cache, 0, QLORA_CHOICE_OFF},
                  {"desc.tokens", d->tokens, 0, 1 << 24},
                  {"desc.max_sequences", d->max_sequences, 0, 1 << 24},
                  {"desc.max_length", d->max_length, 0, 1 << 24},
                  {"desc.head_chunk", d->head_chunk, 0, 1 << 24},
                  {"desc.generate_tokens", d->generate_tokens, 0, 1 << 24}};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        QLORA__TRY(qlora__need_whole(ctx, fields[i].name, fields[i].value, fields[i].least,
                                     fields[i].most));
    }
    if (d->mode > QLORA_MODE_F32 && d->mode < QLORA_MODE_BF16) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "desc.mode is %d, which is unused; for TF32, set math of the context",
                           (int)d->mode);
    }
    QLORA__TRY(qlora__need_real(ctx, "desc.dropout", (double)d->dropout, 0.0, 1.0));
    QLORA__TRY(qlora__need_real(ctx, "desc.alpha", (double)d->alpha, -1e300, 1e300));
    return qlora__need_real(ctx, "desc.weight_std", (double)d->weight_std, 0.0, 1e300);
}

// Checks that a model has seen texts of this length.
static qlora_result qlora__positions_check(qlora_ctx* ctx, const char* name, int64_t value,
                                           int64_t positions) {
    return value <= positions ? QLORA_OK
                              : qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                                            "%s is %lld, but the model has %lld positions "
                                            "(max_position_embeddings)",
                                            name, (long long)value, (long long)positions);
}

// Fills in the defaults of the capacity settings. A config without max_positions has no limit.
static qlora_result qlora__capacity_resolve(qlora_ctx* ctx, const qlora_model_config* c,
                                            qlora_model_desc* d) {
    int64_t positions = c->max_positions > 0 ? c->max_positions : INT64_MAX;
    d->tokens = d->tokens != 0 ? d->tokens : 2048;
    d->max_sequences = d->max_sequences != 0 ? d->max_sequences : qlora__max(d->tokens / 8, 1);
    d->max_length = d->max_length != 0 ? d->max_length : qlora__min(d->tokens, positions);
    d->head_chunk = qlora__min(d->head_chunk != 0 ? d->head_chunk : 1024, d->tokens);
    QLORA__TRY(qlora__need_whole(ctx, "desc.max_sequences", d->max_sequences, 1, d->tokens));
    QLORA__TRY(qlora__need_whole(ctx, "desc.max_length", d->max_length, 1, d->tokens));
    QLORA__TRY(qlora__positions_check(ctx, "desc.max_length", d->max_length, positions));
    return qlora__positions_check(ctx, "desc.generate_tokens", d->generate_tokens, positions);
}

static void qlora__model_free(qlora_model* m) {
    qlora_ctx* ctx = m->ctx;
    if (m->arena != NULL) {
        // An allocator of the caller's may reuse the memory at once, so nothing may still run in
        // it. The text of the error that brought us here stays.
        char error[QLORA__ERROR_SIZE];
        memcpy(error, ctx->env.error, sizeof error);
        qlora_result ignored = qlora__sync(ctx);
        (void)ignored;
        memcpy(ctx->env.error, error, sizeof error);
    }
    qlora__source_close(m);
    qlora__ring_destroy(ctx, &m->ring);
    qlora__buffer_destroy(ctx, m->arena);
    qlora__free(ctx, m->layers, (size_t)m->plan.config.layers * sizeof *m->layers);
    qlora__free(ctx, m->dir, m->dir != NULL ? strlen(m->dir) + 1 : 0);
    qlora__free(ctx, m, sizeof *m);
}

// A hash of the paths of the model folder and the adapter.
static uint64_t qlora__source_name(const qlora_model_desc* desc) {
    uint64_t hash = 0;
    const char* const names[] = {desc->dir, desc->adapter};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        qlora__hash h;
        qlora__hash_begin(&h);
        qlora__hash_add(&h, &hash, sizeof hash);
        qlora__hash_add(&h, names[i] != NULL ? names[i] : "", names[i] ? strlen(names[i]) : 0);
        hash = qlora__hash_end(&h);
    }
    return hash;
}

// capability 0: the CPU.
static qlora_result qlora__mode_check(qlora_ctx* ctx, qlora_mode mode, int32_t capability) {
    if (mode == QLORA_MODE_BF16 && capability == 0) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "desc.mode is BF16, which needs a GPU; use F32 or AUTO on the CPU");
    }
    if (mode == QLORA_MODE_BF16 && capability < 80) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "desc.mode is BF16, which needs compute capability 8.0 or later; this "
                           "is %d.%d; use F32 or AUTO",
                           (int)capability / 10, (int)capability % 10);
    }
    return QLORA_OK;
}

static qlora_result qlora__skeleton_fill(qlora_ctx* ctx, const qlora_model_desc* desc,
                                         const qlora_plan_desc* machine, qlora_model* m) {
    qlora_model_config* c = &m->plan.config;
    m->plan.source = qlora__source_name(desc);
    if (desc->plan != NULL && desc->plan->source != m->plan.source) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "desc.plan was made for another model folder or adapter");
    }
    if (desc->dir != NULL && desc->plan == NULL) {
        QLORA__TRY(qlora__config_read(&ctx->env, desc->dir, c));
    } else {
        // A plan is the caller's memory too, so that its config is checked as well.
        qlora_model_config given = desc->dir != NULL ? desc->plan->config : *desc->config;
        QLORA__TRY(qlora__config_check(ctx, &given));
        *c = given;
    }
    QLORA__TRY(qlora__capacity_resolve(ctx, c, &m->desc));
    m->desc.rank = desc->rank == 0 ? 16 : desc->rank;
    m->desc.alpha = desc->alpha != 0.0f ? desc->alpha : 2.0f * (float)m->desc.rank;
    m->desc.targets = desc->targets != 0 ? desc->targets : (uint32_t)QLORA_TARGET_ALL;
    QLORA__TRY(qlora__mode_check(ctx, desc->mode, machine->capability));
    bool wants_16bit = desc->mode == QLORA_MODE_BF16 ||
                       (desc->mode == QLORA_MODE_AUTO && machine->capability >= 80);
    m->plan.mode = wants_16bit ? QLORA_MODE_BF16 : QLORA_MODE_F32;
    m->math = ctx->desc.math;
    m->compute = wants_16bit ? QLORA_BF16 : QLORA_F32;
    m->plan.tokens = m->desc.tokens;
    m->plan.max_sequences = m->desc.max_sequences;
    m->plan.max_length = m->desc.max_length;
    m->plan.head_chunk = m->desc.head_chunk;
    m->positions = qlora__max(m->desc.max_length, m->desc.generate_tokens);
    size_t bytes = (size_t)c->layers * sizeof *m->layers;
    m->layers = (qlora__layer*)qlora__alloc_zero(ctx, bytes);
    if (m->layers == NULL) {
        return QLORA_ERR_MEMORY;
    }
    for (int64_t l = 0; l < c->layers; l++) {
        qlora__shape_layer(m, &m->layers[l]);
        m->layers[l].sliding = c->sliding[l] != 0;
    }
    return qlora__adapter_shapes(ctx, m, desc);
}

// Decides which weights are 4-bit: all of an NF4 base, and those that are 4-bit in the files.
static qlora_result qlora__skeleton_formats(qlora_ctx* ctx, const qlora_model_desc* desc,
                                            qlora_model* m) {
    const qlora__folder* folder = NULL;
    if (desc->dir != NULL && m->plan.config.quantized) {
        QLORA__TRY(qlora__source_folder(ctx, m, desc->dir, &folder));
    }
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        for (int i = 0; i < QLORA__PROJECTIONS; i++) {
            qlora__projection* p = &m->layers[l].projections[i];
            p->is_nf4 = desc->base == QLORA_BASE_NF4;
            p->nf4_desc.rows = p->out;
            p->nf4_desc.cols = p->in;
            p->nf4_desc.plain_scales = desc->single_quant;
            if (folder == NULL) {
                continue;
            }
            char name[160];
            qlora__linear_source source;
            snprintf(name, sizeof name, "model.layers.%lld.%s.weight", (long long)l,
                     qlora__projections[i].module);
            QLORA__TRY(qlora__folder_linear(&ctx->env, folder, name, p->out, p->in, &source));
            if (source.nf4) {
                p->is_nf4 = true;
                p->nf4_desc.block = (int32_t)source.block;
                p->nf4_desc.block2 = (int32_t)source.block2;
                p->nf4_desc.plain_scales = !source.nested;
            }
        }
    }
    return QLORA_OK;
}

// Creates a model without its memory, which is enough to plan it.
static qlora_result qlora__skeleton(qlora_ctx* ctx, const qlora_model_desc* desc,
                                    const qlora_plan_desc* machine, qlora_model** out) {
    QLORA__TRY(qlora__model_desc_check(ctx, desc));
    qlora_model* m = (qlora_model*)qlora__alloc_zero(ctx, sizeof *m);
    if (m == NULL) {
        return QLORA_ERR_MEMORY;
    }
    m->ctx = ctx;
    m->desc = *desc;
    m->use_adapters = true;
    m->source = (qlora__source*)qlora__alloc_zero(ctx, sizeof *m->source);
    qlora_result r = m->source != NULL ? QLORA_OK : QLORA_ERR_MEMORY;
    r = r == QLORA_OK ? qlora__skeleton_fill(ctx, desc, machine, m) : r;
    if (r == QLORA_OK) {
        r = qlora__skeleton_formats(ctx, desc, m);
    }
    if (r == QLORA_OK && desc->dir != NULL) {
        size_t bytes = strlen(desc->dir) + 1;
        m->dir = (char*)qlora__alloc(ctx, bytes);
        r = m->dir != NULL ? QLORA_OK : QLORA_ERR_MEMORY;
        if (r == QLORA_OK) {
            memcpy(m->dir, desc->dir, bytes);
        }
    }
    if (r != QLORA_OK) {
        qlora__model_free(m);
        return r;
    }
    m->desc.dir = m->dir;
    m->desc.config = NULL;
    m->desc.adapter = NULL;
    m->desc.plan = NULL;
    qlora__number_parameters(m);
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        qlora__connect_layer(m, l);
    }
    *out = m;
    return QLORA_OK;
}

// Fills in what this machine has. The CPU's limit is the memory that is available now and what this
// context holds of it; a CPU context that plans for a GPU has no limit of its own.
static qlora_plan_desc qlora__machine_resolve(qlora_ctx* ctx, const qlora_plan_desc* given) {
    qlora_plan_desc d;
    memset(&d, 0, sizeof d);
    if (given != NULL) {
        d = *given;
    }
#ifndef QLORA_NO_CUDA
    if (ctx->gpu != NULL) {
        d.capability = d.capability != 0 ? d.capability : ctx->gpu->target_number;
        size_t free_bytes = 0;
        size_t total = 0;
        if (d.bytes == 0 && ctx->gpu->cu.MemGetInfo(&free_bytes, &total) == 0) {
            size_t margin = (size_t)512 << 20; // for cuBLAS, graphs and the driver
            d.bytes = (free_bytes > margin ? free_bytes - margin : 0) + ctx->device_bytes;
        }
    }
#endif
    if (d.bytes == 0 && d.capability == 0 && qlora__on_cpu(ctx)) {
        uint64_t left = qlora__os_memory("");
        d.bytes = left != 0 ? left + ctx->device_bytes : 0;
    }
    return d;
}

static void qlora__plan_apply(qlora_model* m, int64_t recompute, int64_t cached) {
    m->plan.recompute_layers = recompute;
    m->plan.cached_layers = cached;
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        qlora__layer* layer = &m->layers[l];
        layer->recompute = l < recompute;
        layer->cached = l < cached;
    }
    qlora__model_layout(m, NULL);
}

static bool qlora__plan_fits(const qlora_model* m, uint64_t bytes) {
    return bytes == 0 || m->plan.total + m->plan.context <= bytes;
}

// Reports the smallest plan that the settings allow, and those that would make it smaller.
static qlora_result qlora__plan_too_large(qlora_ctx* ctx, const qlora_model* m, uint64_t bytes) {
    const qlora_plan* p = &m->plan;
    double gib = 1073741824.0;
    bool all = p->recompute_layers == p->config.layers;
    uint64_t other = p->workspace + p->head + p->generation + p->batches + p->cache + p->context;
    const char* remedy = p->cached_layers > 0       ? ", or set desc.cache to AUTO"
                         : qlora__trains(m) && !all ? ", or set desc.recompute to AUTO"
                                                    : "";
    return qlora__fail(
        ctx, QLORA_ERR_DEVICE_MEMORY,
        "the model needs %.2f GiB%s, but only %.2f GiB are available (base %.2f, "
        "adapters and optimizer %.2f, activations %.2f, other %.2f); lower "
        "desc.tokens (%lld) or desc.rank%s",
        (double)(p->total + p->context) / gib, all ? " even with every layer recomputed" : "",
        (double)bytes / gib, (double)p->base / gib, (double)(p->adapters + p->optimizer) / gib,
        (double)p->activations / gib, (double)other / gib, (long long)p->tokens, remedy);
}

// Chooses the fewest recomputed layers that fit, then, if the memory is to be filled, as many
// cached layers as fit. The memory is monotonic in both, so bisection finds them.
static qlora_result qlora__plan_choose(qlora_ctx* ctx, qlora_model* m, uint64_t bytes, bool fill) {
    int64_t layers = m->plan.config.layers;
    bool auto_recompute = m->desc.recompute == QLORA_CHOICE_AUTO && qlora__trains(m);
    int64_t low = m->desc.recompute == QLORA_CHOICE_ON && qlora__trains(m) ? layers : 0;
    int64_t high = auto_recompute ? layers : low;
    int64_t cached = m->desc.cache == QLORA_CHOICE_ON ? layers : 0;
    qlora__plan_apply(m, high, cached);
    if (!qlora__plan_fits(m, bytes)) {
        return qlora__plan_too_large(ctx, m, bytes);
    }
    while (low < high) {
        int64_t middle = (low + high) / 2;
        qlora__plan_apply(m, middle, cached);
        if (qlora__plan_fits(m, bytes)) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    bool has_nf4 = m->layers[0].projections[0].is_nf4;
    if (m->desc.cache == QLORA_CHOICE_AUTO && fill && low == 0 && has_nf4) {
        int64_t most = layers;
        while (cached < most) {
            int64_t middle = (cached + most + 1) / 2;
            qlora__plan_apply(m, 0, middle);
            if (qlora__plan_fits(m, bytes)) {
                cached = middle;
            } else {
                most = middle - 1;
            }
        }
    }
    qlora__plan_apply(m, low, cached);
    return QLORA_OK;
}

static qlora_result qlora__plan_build(qlora_ctx* ctx, const qlora_model_desc* desc,
                                      const qlora_plan_desc* given, qlora_model** out) {
    qlora_plan_desc machine = qlora__machine_resolve(ctx, given);
    qlora_model* m = NULL;
    QLORA__TRY(qlora__skeleton(ctx, desc, &machine, &m));
    // When a CPU context plans for a GPU, the default memory of a CUDA context is counted.
    bool other = given != NULL && given->capability != 0 && qlora__on_cpu(ctx);
    m->plan.context = other                ? QLORA__SCRATCH_BYTES + 2 * QLORA__WORKSPACE_BYTES
                      : qlora__on_cpu(ctx) ? ctx->scratch->bytes
                                           : ctx->device_bytes;
    // Other programs also use the memory of the CPU: what was not asked for is left to them.
    bool fill = machine.bytes != 0 && (!qlora__on_cpu(ctx) || (given != NULL && given->bytes != 0));
    qlora_result r = qlora__plan_choose(ctx, m, machine.bytes, fill);
    if (r != QLORA_OK) {
        qlora__model_free(m);
        return r;
    }
    *out = m;
    return QLORA_OK;
}

static qlora_result qlora__plan_make(qlora_ctx* ctx, const qlora_model_desc* model,
                                     const qlora_plan_desc* desc, qlora_plan* out) {
    if (out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    if (model != NULL && model->plan != NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "plan of the model desc is set; it must be NULL here");
    }
    qlora_model* m = NULL;
    QLORA__TRY(qlora__plan_build(ctx, model, desc, &m));
    *out = m->plan;
    qlora__model_free(m);
    return QLORA_OK;
}

qlora_result qlora_plan_make(qlora_ctx* ctx, const qlora_model_desc* model,
                             const qlora_plan_desc* desc, qlora_plan* out) {
    QLORA__ENTER(ctx, "qlora_plan_make");
    return qlora__leave(ctx, qlora__plan_make(ctx, model, desc, out));
}

size_t qlora_plan_describe(const qlora_plan* plan, char* buffer, size_t size) {
    size_t used = 0;
    if (buffer != NULL && size > 0) {
        buffer[0] = '\0';
    }
    if (plan == NULL) {
        return 1;
    }
    const struct {
        const char* name;
        uint64_t bytes;
    } rows[] = {{"base weights", plan->base},
                {"16-bit weight cache", plan->cache},
                {"adapters", plan->adapters},
                {"optimizer", plan->optimizer},
                {"activations", plan->activations},
                {"workspace", plan->workspace},
                {"head", plan->head},
                {"generation", plan->generation},
                {"batches", plan->batches},
                {"context", plan->context}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        qlora__append(buffer, size, &used, "  %-22s %12.3f MiB\n", rows[i].name,
                      (double)rows[i].bytes / 1048576.0);
    }
    qlora__append(buffer, size, &used, "  %-22s %12.3f MiB\n", "total",
                  (double)(plan->total + plan->context) / 1048576.0);
    qlora__append(
        buffer, size, &used,
        "  %lld tokens per micro-batch, %lld trained parameters, %lld of %lld layers recomputed, "
        "%lld cached in 16 bits\n",
        (long long)plan->tokens, (long long)plan->parameters, (long long)plan->recompute_layers,
        (long long)plan->config.layers, (long long)plan->cached_layers);
    return used + 1;
}

static qlora_result qlora__config_read_public(qlora_ctx* ctx, const char* dir,
                                              qlora_model_config* out) {
    if (dir == NULL || out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is NULL", dir == NULL ? "dir" : "out");
    }
    return qlora__config_read(&ctx->env, dir, out);
}

qlora_result qlora_config_read(qlora_ctx* ctx, const char* dir, qlora_model_config* out) {
    QLORA__ENTER(ctx, "qlora_config_read");
    return qlora__leave(ctx, qlora__config_read_public(ctx, dir, out));
}

//@@ src/model/identity.h

// ---- the identity of a base model ---------------------------------------------------------------

// A checkpoint continues only on the base that it was trained on. Two hashes stand for that base:
// one of what its config means for the computation, one of its weights. They are compared, never
// the paths: a folder may move, and another folder may take its place.

#define QLORA__IDENTITY_WHOLE ((uint64_t)1 << 20) // tensors up to this size are hashed entirely
#define QLORA__IDENTITY_BLOCKS 64                 // of a larger one, as many blocks, evenly spread
#define QLORA__IDENTITY_BLOCK 4096

static void qlora__identity_rope(qlora__hash* h, const qlora_rope_desc* r) {
    const double numbers[] = {(double)r->type,     r->theta,
                              r->factor,           r->low_freq_factor,
                              r->high_freq_factor, r->original_max_position,
                              r->beta_fast,        r->beta_slow,
                              r->attention_factor, r->mscale,
                              r->mscale_all_dim,   r->no_truncate ? 1.0 : 0.0};
    qlora__hash_add(h, numbers, sizeof numbers);
}

// Every field that changes what the model computes. The ids of special tokens, the declared length
// and the type of the weights in the files do not.
static uint64_t qlora__identity_config(const qlora_model_config* c) {
    const int64_t sizes[] = {(int64_t)c->family, c->vocab,  c->hidden,   c->intermediate,
                             c->layers,          c->heads,  c->kv_heads, c->head_dim,
                             c->window,          c->tied,   c->qkv_bias, c->o_bias,
                             c->mlp_bias,        c->qk_norm};
    qlora__hash h;
    qlora__hash_begin(&h);
    qlora__hash_add(&h, sizes, sizeof sizes);
    qlora__hash_add(&h, &c->rms_eps, sizeof c->rms_eps);
    qlora__identity_rope(&h, &c->rope);
    qlora__identity_rope(&h, &c->rope_sliding);
    qlora__hash_add(&h, c->sliding, (size_t)c->layers);
    return qlora__hash_end(&h);
}

static void qlora__identity_tensor(qlora__hash* h, const char* name, const qlora__st_tensor* t) {
    uint64_t facts[2] = {(uint64_t)t->dtype, t->bytes};
    qlora__hash_add(h, name, strlen(name) + 1);
    qlora__hash_add(h, facts, sizeof facts);
    qlora__hash_add(h, t->shape, t->rank * sizeof t->shape[0]);
    if (t->bytes <= QLORA__IDENTITY_WHOLE) {
        qlora__hash_add(h, t->data, (size_t)t->bytes);
        return;
    }
    uint64_t last = t->bytes - QLORA__IDENTITY_BLOCK;
    for (uint64_t i = 0; i < QLORA__IDENTITY_BLOCKS; i++) {
        uint64_t at = last / (QLORA__IDENTITY_BLOCKS - 1) * i;
        at = i == QLORA__IDENTITY_BLOCKS - 1 ? last : at;
        qlora__hash_add(h, t->data + at, QLORA__IDENTITY_BLOCK);
    }
}

// The tensors in the order of their names: how they are spread over files does not matter.
static uint64_t qlora__identity_folder(const qlora__folder* folder) {
    qlora__hash h;
    qlora__hash_begin(&h);
    for (uint32_t i = 0; i < folder->count; i++) {
        const qlora__folder_entry* entry = &folder->entries[folder->by_name[i]];
        qlora__identity_tensor(&h, entry->name, entry->tensor);
    }
    return qlora__hash_end(&h);
}

// Weights that are generated are as good as the numbers they come from.
static uint64_t qlora__identity_random(uint64_t seed, float deviation) {
    qlora__hash h;
    qlora__hash_begin(&h);
    qlora__hash_add(&h, &seed, sizeof seed);
    qlora__hash_add(&h, &deviation, sizeof deviation);
    return qlora__hash_end(&h);
}

//@@ src/model/load.h

// ---- loading ------------------------------------------------------------------------------------

#define QLORA__STAGE_BYTES ((size_t)16 << 20)

// Two buffers: one is filled from the file while the other is copied to the device.
typedef struct qlora__stager {
    qlora_model* m;
    qlora__ring ring;
    uint64_t done; // bytes, for the progress
    uint64_t total;
} qlora__stager;

static qlora_result qlora__stager_open(qlora_ctx* ctx, qlora__stager* s) {
    return qlora__on_cpu(ctx) ? QLORA_OK : qlora__ring_create(ctx, 2, QLORA__STAGE_BYTES, &s->ring);
}

static qlora_result qlora__stage_piece(qlora_ctx* ctx, qlora__stager* s, char* target,
                                       const uint8_t* source, size_t bytes) {
    qlora__slot* slot = NULL;
    QLORA__TRY(qlora__ring_take(ctx, &s->ring, &slot));
    memcpy(slot->memory, source, bytes);
    return qlora__slot_send(ctx, slot, target, slot->memory, bytes);
}

static qlora_result qlora__stage(qlora_ctx* ctx, qlora__stager* s, void* target,
                                 const uint8_t* source, uint64_t bytes) {
    const qlora_model_desc* desc = &s->m->desc;
    for (uint64_t at = 0; at < bytes; at += QLORA__STAGE_BYTES) {
        size_t n = bytes - at < QLORA__STAGE_BYTES ? (size_t)(bytes - at) : QLORA__STAGE_BYTES;
        if (qlora__on_cpu(ctx)) {
            memcpy((char*)target + at, source + at, n);
        } else {
            QLORA__TRY(qlora__stage_piece(ctx, s, (char*)target + at, source + at, n));
        }
        s->done += n;
        if (desc->progress != NULL &&
            !desc->progress(desc->progress_user, "loading weights", s->done, s->total)) {
            return qlora__fail(ctx, QLORA_ERR_STOPPED, "desc.progress returned false");
        }
    }
    return QLORA_OK;
}

static qlora_dtype qlora__st_dtype_of(const qlora__st_tensor* t) {
    return t->dtype == QLORA__ST_F32    ? QLORA_F32
           : t->dtype == QLORA__ST_BF16 ? QLORA_BF16
                                        : QLORA_F16;
}

// Loads a matrix, in the type it has in the file, into the memory of the shared operand.
static qlora_result qlora__load_raw(qlora_ctx* ctx, qlora__stager* s, const qlora__st_tensor* t,
                                    int64_t rows, int64_t cols, qlora_tensor* out) {
    qlora_tensor area = s->m->operand;
    qlora_dtype dtype = qlora__st_dtype_of(t);
    QLORA_ASSERT((uint64_t)rows * (uint64_t)cols * qlora_dtype_bytes(dtype) <= area.bytes);
    memset(out, 0, sizeof *out);
    out->data = area.data;
    out->bytes = area.bytes;
    out->dtype = dtype;
    out->rows = rows;
    out->cols = cols;
    out->ld = cols;
    out->batch = 1;
    out->owner = ctx;
    if (sizeof(QLORA__REAL) != 4 && dtype == QLORA_F32) { // the CPU in double precision, for tests
        for (int64_t i = 0; i < rows * cols; i++) {
            float x = 0.0f;
            qlora__st_read_f32(t, (uint64_t)i, 1, &x);
            qlora__store(out->data, QLORA_F32, i, (QLORA__REAL)x);
        }
        return QLORA_OK;
    }
    return qlora__stage(ctx, s, out->data, t->data, t->bytes);
}

// Loads a matrix of any size, converted to the type of out. If it needs a conversion and is larger
// than the shared operand, it is loaded in slices.
static qlora_result qlora__load_dense(qlora_ctx* ctx, qlora__stager* s, const qlora__st_tensor* t,
                                      const qlora_tensor* out) {
    if (qlora__st_dtype_of(t) == out->dtype && sizeof(QLORA__REAL) == 4) {
        return qlora__stage(ctx, s, out->data, t->data, t->bytes);
    }
    size_t row_bytes = (size_t)out->cols * qlora_dtype_bytes(qlora__st_dtype_of(t));
    int64_t most = (int64_t)(s->m->operand.bytes / row_bytes);
    for (int64_t row = 0; row < out->rows; row += most) {
        int64_t rows = qlora__min(most, out->rows - row);
        qlora__st_tensor slice = *t;
        qlora_tensor raw;
        qlora_tensor to;
        uint64_t element = qlora__st_dtypes[t->dtype].bits / 8;
        slice.data = t->data + (uint64_t)row * (uint64_t)out->cols * element;
        slice.bytes = (uint64_t)rows * (uint64_t)out->cols * element;
        QLORA__TRY(qlora__load_raw(ctx, s, &slice, rows, out->cols, &raw));
        QLORA__TRY(qlora__tensor_view(ctx, out, row, rows, 0, out->cols, &to));
        QLORA__TRY(qlora__cast(ctx, &raw, &to));
    }
    return QLORA_OK;
}

static qlora_result qlora__load_named(qlora_ctx* ctx, qlora__stager* s, const qlora__folder* folder,
                                      const char* name, const qlora_tensor* out) {
    const qlora__st_tensor* t = NULL;
    QLORA__TRY(qlora__folder_need(&ctx->env, folder, name, out->rows == 1 ? out->cols : out->rows,
                                  out->rows == 1 ? -1 : out->cols, &t));
    return qlora__load_dense(ctx, s, t, out);
}

static qlora_result qlora__load_bnb(qlora_ctx* ctx, qlora__stager* s,
                                    const qlora__linear_source* source,
                                    const qlora__projection* p) {
    uint64_t blocks = source->absmax->bytes / (source->nested ? 1 : 4);
    float* plain = NULL;
    qlora_nf4_parts parts;
    memset(&parts, 0, sizeof parts);
    float offset = source->offset;
    parts.codes = (uint8_t*)(uintptr_t)source->weight->data; // only read
    parts.levels = (float*)(uintptr_t)source->map->data;
    if (source->nested) {
        parts.absmax_codes = (uint8_t*)(uintptr_t)source->absmax->data;
        parts.absmax_scales = (float*)(uintptr_t)source->absmax2->data;
        parts.map = (float*)(uintptr_t)source->map2->data;
        parts.offset = &offset;
    } else {
        blocks = qlora__st_elements(source->absmax);
        plain = (float*)qlora__alloc(ctx, (size_t)blocks * 4);
        if (plain == NULL) {
            return QLORA_ERR_MEMORY;
        }
        qlora__st_read_f32(source->absmax, 0, blocks, plain);
        parts.absmax = plain;
    }
    qlora_result r = qlora_nf4_write(ctx, &p->nf4, &parts);
    qlora__free(ctx, plain, (size_t)blocks * 4);
    s->done += source->weight->bytes;
    return r;
}

// Weights in f32 are first rounded to bf16, as transformers does for bitsandbytes, so that the
// codes are the same.
static qlora_result qlora__load_quantised(qlora_ctx* ctx, qlora__stager* s,
                                          const qlora__st_tensor* t, const qlora__projection* p) {
    qlora__st_tensor rounded = *t;
    uint16_t* half = NULL;
    size_t n = (size_t)(p->out * p->in);
    if (t->dtype == QLORA__ST_F32) {
        half = (uint16_t*)qlora__alloc(ctx, n * 2);
        if (half == NULL) {
            return QLORA_ERR_MEMORY;
        }
        for (size_t i = 0; i < n; i++) {
            float x = 0.0f;
            memcpy(&x, t->data + 4 * i, sizeof x);
            half[i] = qlora__bf16_from(x);
        }
        rounded.dtype = QLORA__ST_BF16;
        rounded.data = (const uint8_t*)half;
        rounded.bytes = n * 2;
    }
    qlora_tensor raw;
    qlora_result r = qlora__load_raw(ctx, s, &rounded, p->out, p->in, &raw);
    if (r == QLORA_OK) {
        r = qlora_nf4_quantise(ctx, &raw, &p->nf4);
    }
    qlora__free(ctx, half, n * 2);
    return r;
}

static qlora_result qlora__load_projection(qlora_ctx* ctx, qlora__stager* s,
                                           const qlora__folder* folder, const char* module,
                                           qlora__projection* p) {
    char name[200];
    snprintf(name, sizeof name, "%.180s.weight", module);
    qlora__linear_source source;
    QLORA__TRY(qlora__folder_linear(&ctx->env, folder, name, p->out, p->in, &source));
    if (source.nf4) {
        QLORA__TRY(qlora__load_bnb(ctx, s, &source, p));
    } else if (p->is_nf4) {
        QLORA__TRY(qlora__load_quantised(ctx, s, source.weight, p));
    } else {
        QLORA__TRY(qlora__load_dense(ctx, s, source.weight, &p->dense));
    }
    if (p->has_bias) {
        snprintf(name, sizeof name, "%.180s.bias", module);
        QLORA__TRY(qlora__load_named(ctx, s, folder, name, &p->bias));
    }
    return QLORA_OK;
}

static qlora_result qlora__load_layer(qlora_ctx* ctx, qlora__stager* s, const qlora__folder* folder,
                                      int64_t index) {
    const qlora_model_config* c = &s->m->plan.config;
    qlora__layer* layer = &s->m->layers[index];
    char name[200];
    int64_t bias_at = 0;
    for (int i = 0; i < QLORA__PROJECTIONS; i++) {
        qlora__projection* p = &layer->projections[i];
        snprintf(name, sizeof name, "model.layers.%lld.%s", (long long)index,
                 qlora__projections[i].module);
        QLORA__TRY(qlora__load_projection(ctx, s, folder, name, p));
        if (i < 3 && c->qkv_bias && !c->qk_norm) {
            qlora_tensor part;
            QLORA__TRY(qlora__tensor_view(ctx, &layer->qkv_bias, 0, 1, bias_at, p->out, &part));
            snprintf(name, sizeof name, "model.layers.%lld.%s.bias", (long long)index,
                     qlora__projections[i].module);
            QLORA__TRY(qlora__load_named(ctx, s, folder, name, &part));
            bias_at += p->out;
        }
    }
    const struct {
        const char* name;
        const qlora_tensor* out;
    } norms[] = {{"input_layernorm", &layer->norm1},
                 {"post_attention_layernorm", &layer->norm2},
                 {"self_attn.q_norm", &layer->q_norm},
                 {"self_attn.k_norm", &layer->k_norm}};
    for (int i = 0; i < (c->qk_norm ? 4 : 2); i++) {
        snprintf(name, sizeof name, "model.layers.%lld.%s.weight", (long long)index, norms[i].name);
        QLORA__TRY(qlora__load_named(ctx, s, folder, name, norms[i].out));
    }
    return QLORA_OK;
}

static qlora_result qlora__load_folder(qlora_ctx* ctx, qlora__stager* s,
                                       const qlora__folder* folder) {
    qlora_model* m = s->m;
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        QLORA__TRY(qlora__load_layer(ctx, s, folder, l));
    }
    QLORA__TRY(qlora__load_named(ctx, s, folder, "model.norm.weight", &m->final_norm));
    QLORA__TRY(qlora__load_named(ctx, s, folder, "model.embed_tokens.weight", &m->embed));
    if (!m->plan.config.tied) {
        QLORA__TRY(qlora__load_named(ctx, s, folder, "lm_head.weight", &m->head));
    }
    return qlora__sync(ctx);
}

static uint64_t qlora__folder_bytes(const qlora__folder* folder) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < folder->count; i++) {
        bytes += folder->entries[i].tensor->bytes;
    }
    return bytes;
}

static qlora_result qlora__load_files(qlora_ctx* ctx, qlora_model* m) {
    const qlora__folder* folder = NULL;
    QLORA__TRY(qlora__source_folder(ctx, m, m->dir, &folder));
    qlora__stager stager;
    memset(&stager, 0, sizeof stager);
    stager.m = m;
    stager.total = qlora__folder_bytes(folder);
    m->base_config = qlora__identity_config(&m->plan.config);
    m->base_weights = qlora__identity_folder(folder);
    qlora_result r = qlora__stager_open(ctx, &stager);
    if (r == QLORA_OK) {
        r = qlora__load_folder(ctx, &stager, folder);
    }
    qlora__ring_destroy(ctx, &stager.ring);
    return r;
}

// Random weights: each matrix has its own stream of random numbers; norms are 1 and biases 0.
static qlora_result qlora__load_random(qlora_ctx* ctx, qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    float deviation = m->desc.weight_std > 0.0f ? m->desc.weight_std : 0.02f;
    uint64_t seed = m->desc.seed;
    m->base_config = qlora__identity_config(c);
    m->base_weights = qlora__identity_random(seed, deviation);
    QLORA__TRY(qlora__random_normal(ctx, seed, 0, deviation, &m->embed));
    if (!c->tied) {
        QLORA__TRY(qlora__random_normal(ctx, seed, 1, deviation, &m->head));
    }
    QLORA__TRY(qlora_fill(ctx, 1.0f, &m->final_norm));
    for (int64_t l = 0; l < c->layers; l++) {
        qlora__layer* layer = &m->layers[l];
        for (int i = 0; i < QLORA__PROJECTIONS; i++) {
            qlora__projection* p = &layer->projections[i];
            qlora_tensor w;
            qlora__arena_window(&m->operand, 0, p->out, p->in, &w);
            const qlora_tensor* to = p->is_nf4 ? &w : &p->dense;
            uint32_t stream = (uint32_t)(2 + l * QLORA__PROJECTIONS + i);
            QLORA__TRY(qlora__random_normal(ctx, seed, stream, deviation, to));
            if (p->is_nf4) {
                QLORA__TRY(qlora_nf4_quantise(ctx, &w, &p->nf4));
            }
            if (p->has_bias) {
                QLORA__TRY(qlora__tensor_zero(ctx, &p->bias));
            }
        }
        const qlora_tensor* ones[] = {&layer->norm1, &layer->norm2, &layer->q_norm, &layer->k_norm};
        for (int i = 0; i < (c->qk_norm ? 4 : 2); i++) {
            QLORA__TRY(qlora_fill(ctx, 1.0f, ones[i]));
        }
        if (c->qkv_bias && !c->qk_norm) {
            QLORA__TRY(qlora__tensor_zero(ctx, &layer->qkv_bias));
        }
        if (m->desc.progress != NULL &&
            !m->desc.progress(m->desc.progress_user, "generating weights", (uint64_t)l + 1,
                              (uint64_t)c->layers)) {
            return qlora__fail(ctx, QLORA_ERR_STOPPED, "desc.progress returned false");
        }
    }
    return qlora__sync(ctx);
}

//@@ src/model/parameters.h

// ---- trained tensors ----------------------------------------------------------------------------

typedef struct qlora__trained {
    char name[192]; // PEFT's name without base_model.model.
    int64_t at;     // first element in the parameter arena
    int64_t rows;
    int64_t cols;
    float shadow_scale;
    bool decays;
    const qlora__projection* projection; // NULL for a norm
    int64_t layer;                       // of the projection
    bool is_b;
} qlora__trained;

// The trained norm number `index` of a layer; false if there is none.
static bool qlora__trained_norm(const qlora_model* m, int64_t layer, int index,
                                qlora__trained* out) {
    static const char* const names[] = {"input_layernorm", "post_attention_layernorm",
                                        "self_attn.q_norm", "self_attn.k_norm"};
    const qlora_model_config* c = &m->plan.config;
    if (!m->desc.train_norms || index >= (c->qk_norm ? 4 : 2)) {
        return false;
    }
    int64_t step = (int64_t)qlora__align_up((size_t)c->hidden, 8);
    int64_t head_step = (int64_t)qlora__align_up((size_t)c->head_dim, 8);
    snprintf(out->name, sizeof out->name, "model.layers.%lld.%s.weight", (long long)layer,
             names[index]);
    out->at =
        m->layers[layer].norms_at + (index < 2 ? index * step : 2 * step + (index - 2) * head_step);
    out->rows = 1;
    out->cols = index < 2 ? c->hidden : c->head_dim;
    return true;
}

// The trained tensor number `index`, in PEFT's order; false past the last one.
static bool qlora__trained_at(const qlora_model* m, int64_t index, qlora__trained* out) {
    const qlora_model_config* c = &m->plan.config;
    int64_t at = 0;
    memset(out, 0, sizeof *out);
    for (int64_t l = 0; l < c->layers; l++) {
        for (int i = 0; i < QLORA__PROJECTIONS; i++) {
            const qlora__projection* p = &m->layers[l].projections[i];
            if (p->rank == 0) {
                continue;
            }
            if (index < at + 2) {
                out->is_b = index == at + 1;
                snprintf(out->name, sizeof out->name, "model.layers.%lld.%s.lora_%c.weight",
                         (long long)l, qlora__projections[i].module, out->is_b ? 'B' : 'A');
                out->at = out->is_b ? p->b_at : p->a_at;
                out->rows = out->is_b ? p->out : p->rank;
                out->cols = out->is_b ? p->rank : p->in;
                out->shadow_scale = out->is_b ? p->scale : 1.0f;
                out->decays = true;
                out->projection = p;
                out->layer = l;
                return true;
            }
            at += 2;
        }
        for (int i = 0; qlora__trained_norm(m, l, i, out); i++) {
            out->shadow_scale = 1.0f;
            if (index == at++) {
                return true;
            }
        }
    }
    if (m->desc.train_norms && index == at) {
        snprintf(out->name, sizeof out->name, "model.norm.weight");
        out->at = m->final_norm_at;
        out->rows = 1;
        out->cols = c->hidden;
        out->shadow_scale = 1.0f;
        return true;
    }
    return false;
}

// If the layer has its own operand, AdamW also writes A and s B to their places in it.
static void qlora__range_copy(const qlora_model* m, const qlora__trained* t,
                              qlora_adamw_range* range) {
    const qlora__layer* layer = &m->layers[t->layer];
    if (t->projection == NULL || !layer->cached) {
        return;
    }
    int number = (int)(t->projection - layer->projections);
    int group = qlora__projections[number].group;
    const qlora_linear_desc* linear = &layer->linears[group];
    const qlora_tensor* operand = linear->operand;
    int64_t row = 0;
    int64_t at = 0;
    for (int i = 0; i < number - qlora__groups[group].first; i++) {
        row += linear->parts[i].out;
        at += linear->parts[i].rank;
    }
    if (operand != NULL) {
        int64_t first = t->is_b ? row * operand->ld + linear->in + at
                                : (qlora_linear_out(linear) + at) * operand->ld;
        range->copy = (char*)operand->data + (size_t)first * qlora_dtype_bytes(operand->dtype);
        range->copy_cols = t->cols;
        range->copy_ld = operand->ld;
    }
}

static qlora_result qlora__ranges_upload(qlora_ctx* ctx, qlora_model* m) {
    size_t bytes = (size_t)m->range_count * sizeof(qlora_adamw_range);
    qlora_adamw_range* ranges = (qlora_adamw_range*)qlora__alloc_zero(ctx, bytes);
    if (ranges == NULL) {
        return QLORA_ERR_MEMORY;
    }
    qlora__trained t;
    for (int64_t i = 0; i < m->range_count && qlora__trained_at(m, i, &t); i++) {
        ranges[i].begin = t.at;
        ranges[i].count = t.rows * t.cols;
        ranges[i].decay = t.decays ? 1.0f : 0.0f;
        ranges[i].shadow_scale = t.shadow_scale;
        qlora__range_copy(m, &t, &ranges[i]);
    }
    qlora_result r = qlora__copy_in(ctx, m->ranges.data, ranges, bytes);
    qlora__free(ctx, ranges, bytes);
    return r;
}

static qlora_adamw_desc qlora__adamw_desc_of(const qlora_model* m) {
    qlora_adamw_desc args;
    memset(&args, 0, sizeof args);
    args.param = &m->parameters;
    args.grad = &m->gradients;
    args.m = &m->moment1;
    args.v = &m->moment2;
    args.shadow = &m->shadow;
    args.ranges = &m->ranges;
    args.state = &m->adamw;
    args.longest_range = m->longest_range;
    return args;
}

// Brings the shadow and the operands of cached layers up to date with the parameters.
static qlora_result qlora__parameters_changed(qlora_ctx* ctx, qlora_model* m) {
    qlora_adamw_desc args = qlora__adamw_desc_of(m);
    return m->range_count > 0 ? qlora_adamw_shadow(ctx, &args) : QLORA_OK;
}

// Initialises A uniformly in +-1/sqrt(in), as PEFT's Kaiming initialisation, and B with zero; equal
// on both backends.
static qlora_result qlora__adapters_start(qlora_ctx* ctx, qlora_model* m) {
    qlora__trained t;
    for (int64_t i = 0; i < m->range_count && qlora__trained_at(m, i, &t); i++) {
        int64_t n = t.rows * t.cols;
        if (t.projection == NULL) {
            continue; // norms have been loaded
        }
        size_t bytes = (size_t)n * sizeof(QLORA__REAL);
        QLORA__REAL* values = (QLORA__REAL*)qlora__alloc_zero(ctx, bytes);
        if (values == NULL) {
            return QLORA_ERR_MEMORY;
        }
        const uint32_t key[2] = {(uint32_t)m->desc.seed,
                                 (uint32_t)(m->desc.seed >> 32) ^ 0x4c6f5241u};
        float bound = 1.0f / sqrtf((float)t.cols);
        for (int64_t j = 0; j < n && !t.is_b; j += 4) {
            const uint32_t counter[4] = {(uint32_t)(j / 4), (uint32_t)i,
                                         (uint32_t)((uint64_t)i >> 32), 0};
            uint32_t words[4];
            qlora__philox(counter, key, words);
            for (int64_t k = j; k < j + 4 && k < n; k++) {
                float unit = (float)(words[k - j] >> 8) * (1.0f / 16777216.0f);
                values[k] = (QLORA__REAL)((2.0f * unit - 1.0f) * bound);
            }
        }
        qlora_tensor window;
        qlora__arena_window(&m->parameters, t.at, t.rows, t.cols, &window);
        qlora_result r = qlora__copy_in(ctx, window.data, values, bytes);
        qlora__free(ctx, values, bytes);
        QLORA__TRY(r);
    }
    return QLORA_OK;
}

//@@ src/model/batch.h

// ---- batches ------------------------------------------------------------------------------------

// The sizes of a micro-batch.
typedef struct qlora__micro {
    int64_t rows;   // rows of the pass, including padding
    int64_t chunks; // chunks of the head
    int64_t tokens; // tokens of the caller
} qlora__micro;

// What a step adds to the caller's tokens.
typedef struct qlora__micro_desc {
    double total_labels;
    uint64_t seed; // for dropout
    int64_t step;
} qlora__micro_desc;

double qlora_batch_labels(const qlora_batch* batch) {
    double sum = 0.0;
    int64_t at = 0;
    if (batch == NULL || batch->lengths == NULL || batch->labels == NULL) {
        return 0.0;
    }
    for (int64_t s = 0; s < batch->count; s++) {
        for (int64_t i = 1; i < batch->lengths[s]; i++) {
            if (batch->labels[at + i] != -100) {
                sum += batch->weights != NULL ? (double)batch->weights[at + i] : 1.0;
            }
        }
        at += batch->lengths[s];
    }
    return sum;
}

static qlora_result qlora__batch_token_check(qlora_ctx* ctx, const qlora_plan* plan,
                                             const qlora_batch* b, int64_t i) {
    int64_t vocab = plan->config.vocab;
    int32_t id = b->ids[i];
    int32_t label = b->labels[i];
    if (id < 0 || id >= vocab) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "token %lld has id %d; it must be 0 to %lld",
                           (long long)i, (int)id, (long long)vocab - 1);
    }
    if (label != -100 && (label < 0 || label >= vocab)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "token %lld has label %d; it must be -100 or 0 to %lld", (long long)i,
                           (int)label, (long long)vocab - 1);
    }
    if (b->weights != NULL && (!qlora__finite(b->weights[i]) || b->weights[i] < 0.0f)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "the weight of label %lld is %g; it must be finite and not negative",
                           (long long)i, (double)b->weights[i]);
    }
    return QLORA_OK;
}

static qlora_result qlora__batch_check(qlora_ctx* ctx, const qlora_model* m, const qlora_batch* b,
                                       int64_t* tokens) {
    const qlora_plan* plan = &m->plan;
    if (b == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "the batch is NULL");
    }
    const char* missing = b->count <= 0        ? NULL
                          : b->ids == NULL     ? "ids"
                          : b->labels == NULL  ? "labels"
                          : b->lengths == NULL ? "lengths"
                                               : NULL;
    if (missing != NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "batch->%s is NULL", missing);
    }
    if (b->count < 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "batch->count is %lld; it must not be negative",
                           (long long)b->count);
    }
    if (b->count > plan->max_sequences) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "the batch has %lld sequences; the model was opened with "
                           "max_sequences = %lld",
                           (long long)b->count, (long long)plan->max_sequences);
    }
    int64_t sum = 0;
    for (int64_t s = 0; s < b->count; s++) {
        if (b->lengths[s] <= 0 || b->lengths[s] > plan->max_length) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "sequence %lld has %d tokens; it must have 1 to %lld "
                               "(max_length of the model)",
                               (long long)s, (int)b->lengths[s], (long long)plan->max_length);
        }
        sum += b->lengths[s];
    }
    if (sum > plan->tokens) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "the batch has %lld tokens; the model was opened with tokens = %lld",
                           (long long)sum, (long long)plan->tokens);
    }
    for (int64_t i = 0; i < sum; i++) {
        QLORA__TRY(qlora__batch_token_check(ctx, plan, b, i));
    }
    *tokens = sum;
    return QLORA_OK;
}

// The place of a view of the batch block in a slot.
static int32_t* qlora__slot_ints(const qlora_model* m, char* memory, const qlora_tensor* window) {
    size_t offset = (size_t)((char*)window->data - (char*)m->batch.all.data);
    return (int32_t*)(void*)(memory + offset);
}

// Writes tokens, positions and sequence bounds. Rows after the batch belong to no sequence.
static void qlora__slot_tokens(const qlora_model* m, char* memory, const qlora_batch* b) {
    int32_t* ids = qlora__slot_ints(m, memory, &m->batch.ids);
    int32_t* positions = qlora__slot_ints(m, memory, &m->batch.positions);
    int32_t* sequences = qlora__slot_ints(m, memory, &m->batch.sequences);
    int32_t* seqs = qlora__slot_ints(m, memory, &m->batch.seqs);
    int32_t at = 0;
    seqs[0] = 0;
    for (int64_t s = 0; s < m->plan.max_sequences; s++) {
        int32_t length = s < b->count ? b->lengths[s] : 0;
        for (int32_t i = 0; i < length; i++) {
            ids[at + i] = b->ids[at + i];
            positions[at + i] = i;
            sequences[at + i] = b->sequences != NULL ? b->sequences[s] : (int32_t)s;
        }
        at += length;
        seqs[s + 1] = at;
    }
    for (int64_t i = at; i < m->plan.tokens; i++) {
        ids[i] = 0;
        positions[i] = 0;
        sequences[i] = 0;
    }
}

// Writes the labelled rows without gaps: token i must predict label i + 1 of its sequence. Returns
// their number.
static int64_t qlora__slot_labels(const qlora_model* m, char* memory, const qlora_batch* b) {
    int32_t* rows = qlora__slot_ints(m, memory, &m->batch.rows);
    int32_t* labels = qlora__slot_ints(m, memory, &m->batch.labels);
    QLORA__REAL* weights = (QLORA__REAL*)(void*)qlora__slot_ints(m, memory, &m->batch.weights);
    int32_t* inverse = qlora__slot_ints(m, memory, &m->batch.inverse);
    int32_t none = (int32_t)m->batch.rows.cols; // the zero row
    for (int64_t i = 0; i < m->plan.tokens; i++) {
        inverse[i] = none;
    }
    int64_t count = 0;
    int64_t at = 0;
    for (int64_t s = 0; s < b->count; s++) {
        for (int64_t i = at; i + 1 < at + b->lengths[s]; i++) {
            if (b->labels[i + 1] != -100) {
                rows[count] = (int32_t)i;
                labels[count] = b->labels[i + 1];
                weights[count] = b->weights != NULL ? (QLORA__REAL)b->weights[i + 1] : 1;
                inverse[i] = (int32_t)count;
                count++;
            }
        }
        at += b->lengths[s];
    }
    for (int64_t i = count; i < none; i++) {
        rows[i] = 0;
        labels[i] = -100;
        weights[i] = 0;
    }
    return count;
}

// Writes a batch that has been checked into a slot and sends it to the device.
static qlora_result qlora__batch_send(qlora_ctx* ctx, qlora_model* m, const qlora_batch* batch,
                                      const qlora__micro_desc* desc, qlora__micro* out) {
    qlora__slot* slot = NULL;
    QLORA__TRY(qlora__ring_take(ctx, &m->ring, &slot));
    qlora__slot_tokens(m, slot->memory, batch);
    int64_t labels = qlora__slot_labels(m, slot->memory, batch);
    QLORA__REAL* scale = (QLORA__REAL*)(void*)qlora__slot_ints(m, slot->memory, &m->batch.scale);
    *scale = (QLORA__REAL)(1.0 / desc->total_labels);
    uint32_t* dropout = (uint32_t*)(void*)qlora__slot_ints(m, slot->memory, &m->batch.dropout);
    dropout[0] = (uint32_t)desc->seed;
    dropout[1] = (uint32_t)(desc->seed >> 32);
    dropout[2] = (uint32_t)desc->step;
    dropout[3] = 0;
    out->tokens = 0;
    for (int64_t i = 0; i < batch->count; i++) {
        out->tokens += batch->lengths[i];
    }
    out->chunks = qlora__ceil_div(labels, m->plan.head_chunk);
    // On the GPU, every micro-batch has the planned size, so that one graph fits any packing.
    out->rows = qlora__on_cpu(ctx) ? out->tokens : m->plan.tokens;
    return qlora__slot_send(ctx, slot, m->batch.all.data, slot->memory, m->batch.all.bytes);
}

// Fails while the activations of the model are in use by a micro-batch that runs in slices.
static qlora_result qlora__model_idle(qlora_ctx* ctx, const qlora_model* m, const char* what) {
    if (m->micro_begun) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "a training step is in the middle of a micro-batch; finish it with "
                           "qlora_train_slice or drop it with qlora_train_cancel before %s",
                           what);
    }
    return qlora__not_in_capture(ctx, what);
}

// Kernels cannot return an error: they set a flag, which is read when the host waits anyway.
// Batches are also checked on the host, so this is not expected to happen.
static qlora_result qlora__flag_check(qlora_ctx* ctx, int32_t flag) {
    if (flag != 0) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "a kernel found a token id, position or label out of range");
    }
    return QLORA_OK;
}

//@@ src/model/layer.h

// ---- one layer, forward -------------------------------------------------------------------------

// The settings of a pass through the model.
typedef struct qlora__pass {
    qlora_ctx* ctx;
    qlora_model* m;
    int64_t rows;    // number of tokens
    bool training;   // dropout is on
    qlora_math math; // of f32 products
    bool decoding;   // keys and values are stored in the cache
    int64_t first;   // position of the first row when decoding
} qlora__pass;

static qlora__pass qlora__pass_of(qlora_model* m, int64_t rows, bool training) {
    qlora__pass pass;
    memset(&pass, 0, sizeof pass);
    pass.ctx = m->ctx;
    pass.m = m;
    pass.rows = rows;
    pass.training = training;
    pass.math = m->math;
    return pass;
}

// A view of the first rows of a tensor and some of its columns.
static qlora_tensor qlora__window(const qlora_tensor* t, int64_t rows, int64_t col, int64_t cols) {
    qlora_tensor v = *t;
    size_t offset = (size_t)col * qlora_dtype_bytes(t->dtype);
    v.data = (char*)t->data + offset;
    v.bytes = t->bytes > offset ? t->bytes - offset : 0;
    v.rows = rows;
    v.cols = cols;
    return v;
}

// A stack of a layer, set up for a pass: without adapters, its ranks are zero and its operand is
// only the weights. Weights without a cached copy are placed in the shared operand.
typedef struct qlora__stack {
    qlora_linear_desc linear;
    qlora_tensor operand;
    qlora_tensor positions; // of the rows of the pass, for dropout
    qlora_tensor sequences;
    int64_t out;
    int64_t pad;
} qlora__stack;

static qlora_result qlora__stack_ready(const qlora__pass* pass, qlora__layer* layer, int group,
                                       qlora__stack* out) {
    const qlora_model* m = pass->m;
    out->linear = layer->linears[group];
    out->out = qlora_linear_out(&out->linear);
    out->linear.dropout = pass->training ? m->desc.dropout : 0.0f;
    out->positions = qlora__window(&m->batch.positions, 1, 0, pass->rows);
    out->sequences = qlora__window(&m->batch.sequences, 1, 0, pass->rows);
    out->linear.positions = &out->positions;
    out->linear.sequences = &out->sequences;
    out->pad = m->use_adapters ? layer->pads[group] : 0;
    for (int i = 0; i < out->linear.count && !m->use_adapters; i++) {
        out->linear.parts[i].rank = 0;
    }
    // For a single row, dequantising the weights does not pay: the product reads the 4-bit codes.
    if (pass->rows == 1 && !pass->training && !layer->cached) {
        out->linear.operand = NULL;
    }
    if (out->linear.operand == NULL) {
        return QLORA_OK;
    }
    out->operand =
        qlora__window(&layer->operands[group], out->out + out->pad, 0, out->linear.in + out->pad);
    out->linear.operand = &out->operand;
    if (layer->cached) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__beside_wait(pass->ctx, ~0u)); // it may still read the operand
    return qlora__linear_place(pass->ctx, &out->linear,
                               QLORA_LINEAR_WEIGHTS | QLORA_LINEAR_ADAPTERS);
}

static qlora_result qlora__stack_forward(const qlora__pass* pass, qlora__layer* layer, int group,
                                         const qlora_tensor* x, const qlora_tensor* y) {
    qlora__stack stack;
    QLORA__TRY(qlora__stack_ready(pass, layer, group, &stack));
    qlora_tensor in = qlora__window(x, pass->rows, 0, stack.linear.in + stack.pad);
    qlora_tensor out = qlora__window(y, pass->rows, 0, stack.out);
    QLORA__ENTER(pass->ctx, "qlora_linear_forward"); // frees the scratch on return
    return qlora__leave(pass->ctx,
                        qlora__linear_forward(pass->ctx, pass->math, &stack.linear, &in, &out));
}

// The inputs of attention.
typedef struct qlora__heads {
    qlora_attention_desc desc;
    qlora_tensor q;
    qlora_tensor k;
    qlora_tensor v;
} qlora__heads;

static qlora__heads qlora__heads_of(const qlora__pass* pass, const qlora__layer* layer) {
    const qlora_model_config* c = &pass->m->plan.config;
    int64_t q = qlora__q_width(c);
    int64_t kv = qlora__kv_width(c);
    const qlora_tensor* rotated = c->qk_norm ? &layer->kept.qk : &layer->kept.qkv;
    qlora__heads h;
    memset(&h, 0, sizeof h);
    h.desc.heads = c->heads;
    h.desc.kv_heads = c->kv_heads;
    h.desc.head_dim = c->head_dim;
    h.desc.window = layer->sliding ? c->window : 0;
    h.q = qlora__window(rotated, pass->rows, 0, q);
    h.k = qlora__window(rotated, pass->rows, q, kv);
    h.v = qlora__window(&layer->kept.qkv, pass->rows, q + kv, kv);
    return h;
}

static const qlora_tensor* qlora__rope_of(const qlora_model* m, const qlora__layer* layer) {
    return layer->sliding ? &m->rope_sliding : &m->rope;
}

// Normalised input in m->x -> rotated q, k and v.
static qlora_result qlora__layer_qkv(const qlora__pass* pass, qlora__layer* layer) {
    qlora_ctx* ctx = pass->ctx;
    qlora_model* m = pass->m;
    const qlora_model_config* c = &m->plan.config;
    int64_t q = qlora__q_width(c);
    int64_t kv = qlora__kv_width(c);
    QLORA__TRY(qlora__stack_forward(pass, layer, QLORA__QKV, &m->x, &layer->kept.qkv));
    qlora_tensor positions = qlora__window(&m->batch.positions, 1, 0, pass->rows);
    qlora_tensor rotated = qlora__window(&layer->kept.qkv, pass->rows, 0, q + 2 * kv);
    const qlora_tensor* bias = c->qkv_bias && !c->qk_norm ? &layer->qkv_bias : NULL;
    if (c->qk_norm) {
        const struct {
            int64_t at;
            int64_t width;
            const qlora_tensor* weight;
        } parts[] = {{0, q, &layer->q_norm}, {q, kv, &layer->k_norm}};
        for (int i = 0; i < 2; i++) {
            qlora_tensor from =
                qlora__window(&layer->kept.qkv, pass->rows, parts[i].at, parts[i].width);
            qlora_tensor to =
                qlora__window(&layer->kept.qk, pass->rows, parts[i].at, parts[i].width);
            QLORA__TRY(qlora_rmsnorm_forward(ctx, &from, parts[i].weight, (float)c->rms_eps, &to));
        }
        rotated = qlora__window(&layer->kept.qk, pass->rows, 0, q + kv);
    }
    return qlora_rope_forward(ctx, &rotated, c->heads + c->kv_heads, &positions,
                              qlora__rope_of(m, layer), bias, &m->flag);
}

// Output of attention in kept.o and the residual stream -> h2, its norm in m->x, gate and up.
static qlora_result qlora__layer_middle(const qlora__pass* pass, qlora__layer* layer) {
    qlora_model* m = pass->m;
    const qlora_model_config* c = &m->plan.config;
    qlora_tensor h = qlora__window(&layer->kept.h, pass->rows, 0, c->hidden);
    qlora_tensor h2 = qlora__window(&layer->kept.h2, pass->rows, 0, c->hidden);
    qlora_tensor delta = qlora__window(&m->delta, pass->rows, 0, c->hidden);
    qlora_tensor x = qlora__window(&m->x, pass->rows, 0, c->hidden);
    QLORA__TRY(qlora__stack_forward(pass, layer, QLORA__O, &layer->kept.o, &m->delta));
    QLORA__TRY(qlora_rmsnorm_residual_forward(pass->ctx, &h, &delta, &layer->norm2,
                                              (float)c->rms_eps, &h2, &x));
    return qlora__stack_forward(pass, layer, QLORA__GATE_UP, &m->x, &layer->kept.gu);
}

static qlora_result qlora__layer_attention(const qlora__pass* pass, qlora__layer* layer) {
    const qlora_model_config* c = &pass->m->plan.config;
    qlora__heads heads = qlora__heads_of(pass, layer);
    qlora_tensor o = qlora__window(&layer->kept.o, pass->rows, 0, qlora__q_width(c));
    qlora_tensor lse = layer->kept.lse;
    lse.cols = pass->rows;
    lse.ld = pass->rows;
    return qlora_attention_forward(pass->ctx, &heads.desc, &heads.q, &heads.k, &heads.v,
                                   &pass->m->batch.seqs, &o, &lse);
}

// SwiGLU and down_proj, into m->delta.
static qlora_result qlora__layer_down(const qlora__pass* pass, qlora__layer* layer) {
    qlora_model* m = pass->m;
    int64_t width = m->plan.config.intermediate;
    qlora_tensor gate = qlora__window(&layer->kept.gu, pass->rows, 0, width);
    qlora_tensor up = qlora__window(&layer->kept.gu, pass->rows, width, width);
    qlora_tensor s = qlora__window(&m->s, pass->rows, 0, width);
    QLORA__TRY(qlora_swiglu_forward(pass->ctx, &gate, &up, &s));
    return qlora__stack_forward(pass, layer, QLORA__DOWN, &m->s, &m->delta);
}

// The norm before layer number `index`; after the last layer, the final norm.
static const qlora_tensor* qlora__norm_before(const qlora_model* m, int64_t index) {
    return index < m->plan.config.layers ? &m->layers[index].norm1 : &m->final_norm;
}

// The residual stream before layer number `index`; after the last layer, last_h.
static const qlora_tensor* qlora__stream_before(const qlora_model* m, int64_t index) {
    return index < m->plan.config.layers ? &m->layers[index].kept.h : &m->last_h;
}

//@@ src/model/decode.h

// ---- the key/value cache of decoding ------------------------------------------------------------

// Rows of the cache of a layer: row p has the keys, then the values, of position p.
static qlora_tensor qlora__cache_rows(const qlora_model* m, int64_t layer, int64_t first,
                                      int64_t rows) {
    qlora_tensor t = m->kv_cache;
    size_t offset =
        (size_t)((layer * m->desc.generate_tokens + first) * t.ld) * qlora_dtype_bytes(t.dtype);
    t.data = (char*)t.data + offset;
    t.bytes -= offset;
    t.rows = rows;
    return t;
}

static qlora_result qlora__cache_store(const qlora__pass* pass, int64_t index) {
    qlora__heads heads = qlora__heads_of(pass, &pass->m->layers[index]);
    qlora_tensor rows = qlora__cache_rows(pass->m, index, pass->first, pass->rows);
    int64_t kv = heads.k.cols;
    qlora_tensor keys = qlora__window(&rows, pass->rows, 0, kv);
    qlora_tensor values = qlora__window(&rows, pass->rows, kv, kv);
    QLORA__TRY(qlora_scale(pass->ctx, 1.0f, &heads.k, &keys));
    return qlora_scale(pass->ctx, 1.0f, &heads.v, &values);
}

// A batch of `heads` matrices [rows, cols], `stride` elements apart.
static qlora_tensor qlora__as_heads(const qlora_tensor* t, int64_t heads, int64_t stride,
                                    int64_t rows, int64_t cols, int64_t ld) {
    qlora_tensor v = *t;
    v.batch = heads;
    v.batch_stride = stride;
    v.rows = rows;
    v.cols = cols;
    v.ld = ld;
    return v;
}

// Attention of one query, at position pass->first, over the cache. Query heads that share a key
// head are the rows of one matrix, so that one product per key head is enough:
//
//   s = scale q K^T, p = softmax(s), o = p V
//
// over the positions within the window of the layer.
static qlora_result qlora__cache_attention(const qlora__pass* pass, int64_t index) {
    qlora_ctx* ctx = pass->ctx;
    int64_t position = pass->first;
    qlora_model* m = pass->m;
    qlora__layer* layer = &m->layers[index];
    const qlora_model_config* c = &m->plan.config;
    int64_t d = c->head_dim;
    int64_t group = c->heads / c->kv_heads;
    qlora__heads heads = qlora__heads_of(pass, layer);
    int64_t window = heads.desc.window > 0 ? heads.desc.window : position + 1;
    int64_t seen = qlora__min(position + 1, window);
    qlora_tensor rows = qlora__cache_rows(m, index, position + 1 - seen, seen);
    qlora_tensor values = qlora__window(&rows, seen, heads.k.cols, heads.k.cols);
    qlora_tensor k = qlora__as_heads(&rows, c->kv_heads, d, seen, d, rows.ld);
    qlora_tensor v = qlora__as_heads(&values, c->kv_heads, d, seen, d, rows.ld);
    qlora_tensor q = qlora__as_heads(&heads.q, c->kv_heads, group * d, group, d, d);
    qlora_tensor o = qlora__as_heads(&layer->kept.o, c->kv_heads, group * d, group, d, d);
    qlora_tensor s =
        qlora__as_heads(&m->scores, c->kv_heads, group * m->scores.ld, group, seen, m->scores.ld);
    qlora_tensor p = qlora__as_heads(&m->chances, c->kv_heads, group * m->chances.ld, group, seen,
                                     m->chances.ld);
    qlora_gemm_desc gemm;
    memset(&gemm, 0, sizeof gemm);
    gemm.trans_b = true;
    gemm.alpha = 1.0f / sqrtf((float)d);
    // Exact fp32, as in attention over many rows.
    QLORA__TRY(qlora__gemm_run(ctx, QLORA_MATH_F32, false, &gemm, &q, &k, &s));
    qlora_tensor flat_s = qlora__window(&m->scores, c->heads, 0, seen);
    qlora_tensor flat_p = qlora__window(&m->chances, c->heads, 0, seen);
    QLORA__TRY(qlora_softmax_forward(ctx, &flat_s, &flat_s));
    if (m->compute != QLORA_F32) { // otherwise both are the same memory
        QLORA__TRY(qlora_cast(ctx, &flat_s, &flat_p));
    }
    gemm.trans_b = false;
    gemm.alpha = 1.0f;
    return qlora__gemm_run(ctx, QLORA_MATH_F32, false, &gemm, &p, &v, &o);
}

//@@ src/model/forward.h

// ---- forward ------------------------------------------------------------------------------------
//
// The forward pass in pieces: begin; then, for each layer, its attention and its MLP. Whole passes,
// steps in slices and decoding all run these pieces in this order.

// Token ids -> the input of layer 0 in m->x.
static qlora_result qlora__forward_begin(const qlora__pass* pass) {
    qlora_model* m = pass->m;
    const qlora_model_config* c = &m->plan.config;
    qlora_tensor ids = qlora__window(&m->batch.ids, 1, 0, pass->rows);
    qlora_tensor h = qlora__window(qlora__stream_before(m, 0), pass->rows, 0, c->hidden);
    qlora_tensor x = qlora__window(&m->x, pass->rows, 0, c->hidden);
    QLORA__TRY(qlora_embed(pass->ctx, &m->embed, &ids, &h, &m->flag));
    return qlora_rmsnorm_forward(pass->ctx, &h, qlora__norm_before(m, 0), (float)c->rms_eps, &x);
}

// When decoding, several rows are the beginning of a text and see only each other; a single row
// sees the cache.
static qlora_result qlora__forward_attention(const qlora__pass* pass, int64_t index) {
    qlora__layer* layer = &pass->m->layers[index];
    QLORA__TRY(qlora__layer_qkv(pass, layer));
    if (pass->decoding) {
        QLORA_ASSERT(pass->first == 0 || pass->rows == 1);
        QLORA__TRY(qlora__cache_store(pass, index));
    }
    return pass->decoding && pass->rows == 1 ? qlora__cache_attention(pass, index)
                                             : qlora__layer_attention(pass, layer);
}

// Leaves the normalised input of the next layer, or of the head, in m->x.
static qlora_result qlora__forward_mlp(const qlora__pass* pass, int64_t index) {
    qlora_model* m = pass->m;
    const qlora_model_config* c = &m->plan.config;
    qlora__layer* layer = &m->layers[index];
    QLORA__TRY(qlora__layer_middle(pass, layer));
    QLORA__TRY(qlora__layer_down(pass, layer));
    qlora_tensor h2 = qlora__window(&layer->kept.h2, pass->rows, 0, c->hidden);
    qlora_tensor delta = qlora__window(&m->delta, pass->rows, 0, c->hidden);
    qlora_tensor next = qlora__window(qlora__stream_before(m, index + 1), pass->rows, 0, c->hidden);
    qlora_tensor x = qlora__window(&m->x, pass->rows, 0, c->hidden);
    return qlora_rmsnorm_residual_forward(pass->ctx, &h2, &delta, qlora__norm_before(m, index + 1),
                                          (float)c->rms_eps, &next, &x);
}

// Token ids -> the output of the final norm in m->x.
static qlora_result qlora__forward(const qlora__pass* pass) {
    qlora_ctx* ctx = pass->ctx;
    size_t scratch = qlora__scratch_mark(ctx);
    QLORA__TRY(qlora__forward_begin(pass));
    for (int64_t l = 0; l < pass->m->plan.config.layers; l++) {
        QLORA__TRY(qlora__forward_attention(pass, l));
        QLORA__TRY(qlora__forward_mlp(pass, l));
        qlora__scratch_release(ctx, scratch);
    }
    return QLORA_OK;
}

//@@ src/model/backward.h

// ---- backward -----------------------------------------------------------------------------------
//
// The gradient of the residual stream passes through the layers on the main stream. The gradients
// of the adapters (their inputs normalised again, z, dA, dB) do not affect it, so they run in
// parallel, on the second stream; the work of stack g uses slot g. A buffer that the second stream
// reads must not be overwritten before it has been read:
//
//   buffer                    read for               overwritten by
//   dh and its last columns   down and o             the next norm
//   dqkv                      qkv                    the attention of the next layer
//   s                         down                   ds of the next layer, after that norm
//   x                         written there as well  nothing but recomputation
//   gradients of gate and up  gate_up                recomputation of a layer
//   the shared operand        z                      placing other weights

// Recomputes the activations that a layer did not keep: everything except down_proj.
static qlora_result qlora__layer_again(const qlora__pass* pass, qlora__layer* layer) {
    QLORA__TRY(qlora__beside_wait(pass->ctx, ~0u));
    qlora_model* m = pass->m;
    const qlora_model_config* c = &m->plan.config;
    qlora_tensor h = qlora__window(&layer->kept.h, pass->rows, 0, c->hidden);
    qlora_tensor x = qlora__window(&m->x, pass->rows, 0, c->hidden);
    QLORA__TRY(qlora_rmsnorm_forward(pass->ctx, &h, &layer->norm1, (float)c->rms_eps, &x));
    QLORA__TRY(qlora__layer_qkv(pass, layer));
    QLORA__TRY(qlora__layer_attention(pass, layer));
    return qlora__layer_middle(pass, layer);
}

// Computes z again, into the last columns of x, for the gradient of B.
static qlora_result qlora__stack_z(const qlora__pass* pass, const qlora__stack* stack,
                                   const qlora_tensor* x) {
    if (stack->pad == 0) {
        return QLORA_OK;
    }
    qlora_tensor inner = qlora__window(x, pass->rows, 0, stack->linear.in);
    return qlora__linear_z(pass->ctx, pass->math, &stack->linear, x, &inner);
}

// Computes dA and dB of a stack from u, and first z if wants_z. None of this needs scratch.
static qlora_result qlora__stack_gradients(const qlora__pass* pass, const qlora__stack* stack,
                                           int group, const qlora_tensor* x, const qlora_tensor* dy,
                                           bool wants_z) {
    qlora_ctx* ctx = pass->ctx;
    if (stack->pad == 0) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__beside_begin(ctx));
    qlora_result r = wants_z ? qlora__stack_z(pass, stack, x) : QLORA_OK;
    if (r == QLORA_OK) {
        r = qlora__linear_gradients(ctx, pass->math, &stack->linear, x, dy, NULL, 1.0f);
    }
    return qlora__beside_end(ctx, group, r);
}

// Computes all gradients of a stack with dropout, whose masks need scratch.
static qlora_result qlora__stack_backward_masked(const qlora__pass* pass, const qlora__stack* stack,
                                                 const qlora_tensor* x, const qlora_tensor* dy,
                                                 const qlora_tensor* dx) {
    QLORA__ENTER(pass->ctx, "qlora_linear_backward");
    return qlora__leave(
        pass->ctx, qlora__linear_backward(pass->ctx, pass->math, &stack->linear, x, dy, dx, 0));
}

// dy (with space for u) and x (with z) -> dx (may be NULL), dA and dB. With dropout, the adapters
// are added to dx one by one, which needs scratch.
static qlora_result qlora__stack_backward(const qlora__pass* pass, const qlora__stack* stack,
                                          int group, const qlora_tensor* x, const qlora_tensor* dy,
                                          const qlora_tensor* dx) {
    qlora_ctx* ctx = pass->ctx;
    if (stack->linear.dropout > 0.0f) {
        return qlora__stack_backward_masked(pass, stack, x, dy, dx);
    }
    qlora_tensor inner = qlora__window(dy, pass->rows, 0, stack->out);
    if (stack->pad > 0) {
        QLORA__TRY(qlora__linear_u(ctx, pass->math, &stack->linear, dy, &inner));
    }
    QLORA__TRY(qlora__stack_gradients(pass, stack, group, x, dy, false));
    return dx != NULL ? qlora__linear_dx(ctx, pass->math, &stack->linear, dy, &inner, dx)
                      : QLORA_OK;
}

// Backward pass of down_proj and SwiGLU: dh -> the gradient of gate and up in kept.gu.
static qlora_result qlora__layer_down_backward(const qlora__pass* pass, qlora__layer* layer) {
    qlora_ctx* ctx = pass->ctx;
    qlora_model* m = pass->m;
    int64_t width = m->plan.config.intermediate;
    qlora__stack stack;
    QLORA__TRY(qlora__stack_ready(pass, layer, QLORA__DOWN, &stack));
    qlora_tensor gate = qlora__window(&layer->kept.gu, pass->rows, 0, width);
    qlora_tensor up = qlora__window(&layer->kept.gu, pass->rows, width, width);
    qlora_tensor x = qlora__window(&m->s, pass->rows, 0, width + stack.pad);
    qlora_tensor s = qlora__window(&m->s, pass->rows, 0, width);
    qlora_tensor ds = qlora__window(&m->ds, pass->rows, 0, width);
    qlora_tensor dy = qlora__window(&m->dh, pass->rows, 0, stack.out + stack.pad);
    qlora_tensor dy_inner = qlora__window(&m->dh, pass->rows, 0, stack.out);
    if (stack.linear.dropout > 0.0f) { // the masked branch adds to ds, so SwiGLU comes first
        QLORA__TRY(qlora_swiglu_forward(ctx, &gate, &up, &s));
        QLORA__TRY(qlora__stack_z(pass, &stack, &x));
        QLORA__TRY(qlora__stack_backward_masked(pass, &stack, &x, &dy, &ds));
        return qlora_swiglu_backward(ctx, &ds, &gate, &up, &gate, &up, NULL);
    }
    // The output of SwiGLU is computed again, over its gradient, in the same pass over gate and up.
    if (stack.pad > 0) {
        QLORA__TRY(qlora__linear_u(ctx, pass->math, &stack.linear, &dy, &dy_inner));
    }
    QLORA__TRY(qlora__linear_dx(ctx, pass->math, &stack.linear, &dy, &dy_inner, &ds));
    QLORA__TRY(qlora_swiglu_backward(ctx, &ds, &gate, &up, &gate, &up, &s));
    return qlora__stack_gradients(pass, &stack, QLORA__DOWN, &x, &dy, true);
}

// Computes the input of a stack that follows a norm again, with z.
static qlora_result qlora__stack_normed(const qlora__pass* pass, const qlora__stack* stack,
                                        const qlora_tensor* in, const qlora_tensor* norm,
                                        const qlora_tensor* x) {
    const qlora_model_config* c = &pass->m->plan.config;
    qlora_tensor normed = qlora__window(x, pass->rows, 0, c->hidden);
    QLORA__TRY(qlora_rmsnorm_forward(pass->ctx, in, norm, (float)c->rms_eps, &normed));
    return qlora__stack_z(pass, stack, x);
}

// Backward pass of a stack that follows a norm: dy (with space for u) -> gradients of its adapters,
// and dh += norm'(dx). Waits first for the stack `above`, which reads dh on the second stream.
static qlora_result qlora__layer_norm_backward(const qlora__pass* pass, qlora__layer* layer,
                                               int group, int above, const qlora_tensor* dy,
                                               const qlora_tensor* h, const qlora_tensor* norm,
                                               const qlora_tensor* d_norm, bool wants_dx) {
    qlora_ctx* ctx = pass->ctx;
    qlora_model* m = pass->m;
    const qlora_model_config* c = &m->plan.config;
    qlora__stack stack;
    QLORA__TRY(qlora__stack_ready(pass, layer, group, &stack));
    qlora_tensor in = qlora__window(h, pass->rows, 0, c->hidden);
    qlora_tensor x = qlora__window(&m->x, pass->rows, 0, c->hidden + stack.pad);
    qlora_tensor up = qlora__window(dy, pass->rows, 0, stack.out + stack.pad);
    qlora_tensor dx = qlora__window(&m->delta, pass->rows, 0, c->hidden);
    qlora_tensor dh = qlora__window(&m->dh, pass->rows, 0, c->hidden);
    if (stack.pad > 0 && stack.linear.dropout > 0.0f) { // masks need scratch
        QLORA__TRY(qlora__stack_normed(pass, &stack, &in, norm, &x));
    } else if (stack.pad > 0) {
        QLORA__TRY(qlora__beside_begin(ctx));
        QLORA__TRY(qlora__beside_end(ctx, group, qlora__stack_normed(pass, &stack, &in, norm, &x)));
    }
    QLORA__TRY(qlora__stack_backward(pass, &stack, group, &x, &up, wants_dx ? &dx : NULL));
    QLORA__TRY(qlora__beside_wait(ctx, 1u << above));
    if (!wants_dx) {
        return QLORA_OK;
    }
    return qlora_rmsnorm_backward(ctx, &dx, &in, norm, (float)c->rms_eps, &dh, &dh,
                                  m->desc.train_norms ? d_norm : NULL);
}

// dh -> gradients of q, k and v before norm and rotation, in m->dqkv.
static qlora_result qlora__layer_attention_backward(const qlora__pass* pass, qlora__layer* layer) {
    qlora_ctx* ctx = pass->ctx;
    qlora_model* m = pass->m;
    const qlora_model_config* c = &m->plan.config;
    int64_t q = qlora__q_width(c);
    int64_t kv = qlora__kv_width(c);
    qlora__stack stack;
    QLORA__TRY(qlora__stack_ready(pass, layer, QLORA__O, &stack));
    qlora_tensor x = qlora__window(&layer->kept.o, pass->rows, 0, q + stack.pad);
    qlora_tensor dy = qlora__window(&m->dh, pass->rows, 0, stack.out + stack.pad);
    qlora_tensor d_o = qlora__window(&m->d_o, pass->rows, 0, q);
    QLORA__TRY(qlora__stack_backward(pass, &stack, QLORA__O, &x, &dy, &d_o));
    QLORA__TRY(qlora__beside_wait(ctx, 1u << QLORA__QKV));
    qlora__heads heads = qlora__heads_of(pass, layer);
    qlora_tensor o = qlora__window(&layer->kept.o, pass->rows, 0, q);
    qlora_tensor lse = layer->kept.lse;
    lse.cols = pass->rows;
    lse.ld = pass->rows;
    qlora_tensor dq = qlora__window(&m->dqkv, pass->rows, 0, q);
    qlora_tensor dk = qlora__window(&m->dqkv, pass->rows, q, kv);
    qlora_tensor dv = qlora__window(&m->dqkv, pass->rows, q + kv, kv);
    QLORA__TRY(qlora_attention_backward(ctx, &heads.desc, &heads.q, &heads.k, &heads.v,
                                        &m->batch.seqs, &o, &lse, &d_o, &dq, &dk, &dv));
    qlora_tensor positions = qlora__window(&m->batch.positions, 1, 0, pass->rows);
    qlora_tensor turned = qlora__window(&m->dqkv, pass->rows, 0, q + kv);
    QLORA__TRY(qlora_rope_backward(ctx, &turned, c->heads + c->kv_heads, &positions,
                                   qlora__rope_of(m, layer), &m->flag));
    if (!c->qk_norm) {
        return QLORA_OK;
    }
    // With a weight gradient, the result must not overwrite dy, so it is computed in d_o and
    // copied.
    qlora_tensor raw_q = qlora__window(&layer->kept.qkv, pass->rows, 0, q);
    qlora_tensor raw_k = qlora__window(&layer->kept.qkv, pass->rows, q, kv);
    float eps = (float)c->rms_eps;
    if (!m->desc.train_norms) {
        QLORA__TRY(qlora_rmsnorm_backward(ctx, &dq, &raw_q, &layer->q_norm, eps, NULL, &dq, NULL));
        return qlora_rmsnorm_backward(ctx, &dk, &raw_k, &layer->k_norm, eps, NULL, &dk, NULL);
    }
    qlora_tensor through_q = qlora__window(&m->d_o, pass->rows, 0, q);
    qlora_tensor through_k = qlora__window(&m->d_o, pass->rows, 0, kv);
    QLORA__TRY(qlora_rmsnorm_backward(ctx, &dq, &raw_q, &layer->q_norm, eps, NULL, &through_q,
                                      &layer->d_q_norm));
    QLORA__TRY(qlora_scale(ctx, 1.0f, &through_q, &dq));
    QLORA__TRY(qlora_rmsnorm_backward(ctx, &dk, &raw_k, &layer->k_norm, eps, NULL, &through_k,
                                      &layer->d_k_norm));
    return qlora_scale(ctx, 1.0f, &through_k, &dk);
}

// The backward pass in pieces, in the order in which they run: begin; then, from the last layer to
// the first, its MLP and its attention; then end.

// Gradient of the final norm's output in m->delta -> gradient of the residual stream in m->dh.
static qlora_result qlora__backward_begin(const qlora__pass* pass) {
    qlora_model* m = pass->m;
    const qlora_model_config* c = &m->plan.config;
    qlora_tensor dx = qlora__window(&m->delta, pass->rows, 0, c->hidden);
    qlora_tensor h = qlora__window(&m->last_h, pass->rows, 0, c->hidden);
    qlora_tensor dh = qlora__window(&m->dh, pass->rows, 0, c->hidden);
    return qlora_rmsnorm_backward(pass->ctx, &dx, &h, &m->final_norm, (float)c->rms_eps, NULL, &dh,
                                  m->desc.train_norms ? &m->d_final_norm : NULL);
}

static qlora_result qlora__backward_mlp(const qlora__pass* pass, int64_t index) {
    qlora__layer* layer = &pass->m->layers[index];
    if (layer->recompute) {
        QLORA__TRY(qlora__layer_again(pass, layer));
    }
    QLORA__TRY(qlora__layer_down_backward(pass, layer));
    return qlora__layer_norm_backward(pass, layer, QLORA__GATE_UP, QLORA__DOWN, &layer->kept.gu,
                                      &layer->kept.h2, &layer->norm2, &layer->d_norm2, true);
}

static qlora_result qlora__backward_attention(const qlora__pass* pass, int64_t index) {
    qlora_model* m = pass->m;
    qlora__layer* layer = &m->layers[index];
    QLORA__TRY(qlora__layer_attention_backward(pass, layer));
    // Below layer 0, at most its norm is trained.
    return qlora__layer_norm_backward(pass, layer, QLORA__QKV, QLORA__O, &m->dqkv, &layer->kept.h,
                                      &layer->norm1, &layer->d_norm1,
                                      index > 0 || m->desc.train_norms);
}

static qlora_result qlora__backward_end(const qlora__pass* pass) {
    return qlora__beside_wait(pass->ctx, ~0u);
}

static qlora_result qlora__backward(const qlora__pass* pass) {
    QLORA__TRY(qlora__backward_begin(pass));
    for (int64_t l = pass->m->plan.config.layers - 1; l >= 0; l--) {
        QLORA__TRY(qlora__backward_mlp(pass, l));
        QLORA__TRY(qlora__backward_attention(pass, l));
    }
    return qlora__backward_end(pass);
}

//@@ src/model/head.h

// ---- head ---------------------------------------------------------------------------------------

// Chunk i of the labelled rows: gathers them and computes logits and losses, whose sums are added
// to totals; with `gradient`, also computes the gradient of the rows, in rows_dx.
static qlora_result qlora__head_chunk(const qlora__pass* pass, int64_t i,
                                      const qlora_tensor* totals, bool gradient) {
    qlora_ctx* ctx = pass->ctx;
    qlora_model* m = pass->m;
    const qlora_model_config* c = &m->plan.config;
    int64_t C = m->plan.head_chunk;
    qlora_tensor x = qlora__window(&m->x, pass->rows, 0, c->hidden);
    qlora_tensor rows = qlora__window(&m->batch.rows, 1, i * C, C);
    qlora_tensor labels = qlora__window(&m->batch.labels, 1, i * C, C);
    qlora_tensor weights = qlora__window(&m->batch.weights, 1, i * C, C);
    qlora_tensor losses = qlora__window(&m->losses, 1, i * C, C);
    QLORA__TRY(qlora_embed(ctx, &x, &rows, &m->rows_x, &m->flag));
    QLORA__TRY(qlora__gemm_named(ctx, pass->math, false, true, false, 0, &m->rows_x, &m->head,
                                 &m->logits));
    qlora_cross_entropy_desc args;
    memset(&args, 0, sizeof args);
    args.logits = &m->logits;
    args.labels = &labels;
    args.weights = &weights;
    args.scale = &m->batch.scale;
    args.losses = &losses;
    args.total = totals;
    args.flag = &m->flag;
    args.forward_only = !gradient;
    QLORA__TRY(qlora_cross_entropy(ctx, &args));
    if (gradient) {
        qlora_tensor dx = m->rows_dx;
        dx.data = (char*)dx.data + (size_t)(i * C * dx.ld) * qlora_dtype_bytes(dx.dtype);
        dx.bytes -= (size_t)(i * C * dx.ld) * qlora_dtype_bytes(dx.dtype);
        dx.rows = C;
        QLORA__TRY(
            qlora__gemm_named(ctx, pass->math, false, false, true, 0, &m->logits, &m->head, &dx));
    }
    return QLORA_OK;
}

// Copies the gradients of the labelled rows to their tokens in m->delta; other tokens get zero.
static qlora_result qlora__head_end(const qlora__pass* pass) {
    qlora_model* m = pass->m;
    qlora_tensor inverse = qlora__window(&m->batch.inverse, 1, 0, pass->rows);
    qlora_tensor dx = qlora__window(&m->delta, pass->rows, 0, m->plan.config.hidden);
    return qlora_embed(pass->ctx, &m->rows_dx, &inverse, &dx, &m->flag);
}

static qlora_result qlora__head(const qlora__pass* pass, int64_t chunks, const qlora_tensor* totals,
                                bool gradient) {
    for (int64_t i = 0; i < chunks; i++) {
        QLORA__TRY(qlora__head_chunk(pass, i, totals, gradient));
    }
    return gradient ? qlora__head_end(pass) : QLORA_OK;
}

// Computes the logits of some rows of m->x, into the first rows of m->logits.
static qlora_result qlora__head_logits(const qlora__pass* pass, int64_t first, int64_t rows) {
    qlora_model* m = pass->m;
    qlora_tensor x;
    QLORA__TRY(qlora__tensor_view(pass->ctx, &m->x, first, rows, 0, m->plan.config.hidden, &x));
    qlora_tensor logits = qlora__window(&m->logits, rows, 0, m->plan.config.vocab);
    return qlora__gemm_named(pass->ctx, pass->math, false, true, false, 0, &x, &m->head, &logits);
}

//@@ src/model/prepare.h

// ---- preparing a model --------------------------------------------------------------------------

// Sets the pointers and maps of NF4 weights once the arena is allocated.
static qlora_result qlora__model_wrap(qlora_ctx* ctx, qlora_model* m) {
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        qlora__layer* layer = &m->layers[l];
        for (int i = 0; i < QLORA__PROJECTIONS; i++) {
            qlora__projection* p = &layer->projections[i];
            if (p->is_nf4) {
                qlora_tensor memory = p->nf4.memory;
                QLORA__TRY(qlora_nf4_wrap(ctx, &p->nf4_desc, &memory, &p->nf4));
            }
        }
    }
    return QLORA_OK;
}

// The operands of layers without a cache are views of the shared one. A stack of dense weights
// needs none.
static void qlora__model_operands(qlora_model* m) {
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        qlora__layer* layer = &m->layers[l];
        for (int g = 0; g < QLORA__GROUPS; g++) {
            qlora_linear_desc* linear = &layer->linears[g];
            bool any_nf4 = false;
            for (int i = 0; i < linear->count; i++) {
                any_nf4 = any_nf4 || linear->parts[i].nf4 != NULL;
            }
            linear->operand = any_nf4 ? &layer->operands[g] : NULL;
            if (!layer->cached) {
                qlora__arena_window(&m->operand, 0, qlora_linear_out(linear) + layer->pads[g],
                                    linear->in + layer->pads[g], &layer->operands[g]);
            }
        }
    }
}

static qlora_result qlora__model_rope(qlora_ctx* ctx, qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    const struct {
        const qlora_rope_desc* desc;
        const char* name;
        const qlora_tensor* table;
    } tables[] = {{&c->rope, "config.rope", &m->rope},
                  {&c->rope_sliding, "config.rope_sliding", &m->rope_sliding}};
    size_t n = (size_t)(m->positions * c->head_dim);
    float* host = (float*)qlora__alloc(ctx, n * 4);
    QLORA__REAL* real = (QLORA__REAL*)qlora__alloc(ctx, n * sizeof *real);
    qlora_result r = host != NULL && real != NULL ? QLORA_OK : QLORA_ERR_MEMORY;
    for (int i = 0; i < 2 && r == QLORA_OK; i++) {
        r = qlora__rope_table(ctx, tables[i].desc, tables[i].name, c->head_dim, m->positions, host);
        if (r != QLORA_OK) {
            break;
        }
        for (size_t j = 0; j < n; j++) {
            real[j] = (QLORA__REAL)host[j];
        }
        r = qlora__copy_in(ctx, tables[i].table->data, real, n * sizeof *real);
    }
    qlora__free(ctx, host, n * 4);
    qlora__free(ctx, real, n * sizeof *real);
    return r;
}

// The AdamW settings of a step: the first fields of qlora_adamw_state.
typedef struct qlora__adamw_numbers {
    double lr;
    double beta1;
    double beta2;
    double eps;
    double weight_decay;
} qlora__adamw_numbers;

// Writes the tables of the clip and the state of the optimizer before the first step.
static qlora_result qlora__optimizer_start(qlora_ctx* ctx, qlora_model* m, double max_norm,
                                           const qlora__adamw_numbers* numbers) {
    if (!qlora__trains(m)) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__clip_start(ctx, &m->clip, &m->gradients, (float)max_norm));
    qlora_adamw_state state;
    memset(&state, 0, sizeof state);
    state.lr = numbers->lr;
    state.beta1 = numbers->beta1;
    state.beta2 = numbers->beta2;
    state.eps = numbers->eps;
    state.weight_decay = numbers->weight_decay;
    QLORA__TRY(qlora__copy_in(ctx, m->adamw.data, &state, sizeof state));
    QLORA__TRY(qlora__tensor_zero(ctx, &m->gradients));
    QLORA__TRY(qlora__tensor_zero(ctx, &m->moment1));
    return qlora__tensor_zero(ctx, &m->moment2);
}

static qlora_result qlora__model_warm_kernels(qlora_ctx* ctx, qlora_model* m) {
#ifndef QLORA_NO_CUDA
    if (!qlora__on_cpu(ctx)) {
        bool nf4 = m->layers[0].projections[0].is_nf4 || m->desc.base == QLORA_BASE_NF4;
        // The kernels that only decoding uses are loaded by the dry run.
        return qlora__cache_warm(ctx,
                                 qlora__kernels_needed(ctx, m->compute, m->plan.config.head_dim,
                                                       nf4, true, m->dir == NULL));
    }
#else
    (void)m;
#endif
    (void)ctx;
    return QLORA_OK;
}

//@@ src/model/adapter.h

// ---- reading adapters ---------------------------------------------------------------------------

#define QLORA__NORMS_FILE "trained_norms.safetensors" // PEFT's files cannot contain norms

// An adapter folder: PEFT's files and, if present, the trained norms.
typedef struct qlora__adapter_source {
    const char* dir;
    const qlora__peft* peft; // own, or the one opened for the plan; NULL = none
    qlora__peft own;
    qlora__st norms;
    bool has_norms;
} qlora__adapter_source;

static bool qlora__has_lora(const qlora_model* m) {
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        for (int i = 0; i < QLORA__PROJECTIONS; i++) {
            if (m->layers[l].projections[i].rank > 0) {
                return true;
            }
        }
    }
    return false;
}

static void qlora__adapter_source_close(qlora_ctx* ctx, qlora__adapter_source* s) {
    if (s->peft == &s->own) {
        qlora__peft_close(&ctx->env, &s->own);
    }
    if (s->has_norms) {
        qlora__st_close(&ctx->env, &s->norms);
    }
}

// Checks that the modules, ranks and scales of the folder are those of the model.
static qlora_result qlora__adapter_match(qlora_ctx* ctx, const qlora_model* m,
                                         const qlora__adapter_source* s) {
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        for (int i = 0; i < QLORA__PROJECTIONS; i++) {
            const qlora__projection* p = &m->layers[l].projections[i];
            char module[160];
            qlora__peft_module found;
            snprintf(module, sizeof module, "model.layers.%lld.%s", (long long)l,
                     qlora__projections[i].module);
            QLORA__TRY(qlora__peft_find(&ctx->env, s->peft, module, p->out, p->in, &found));
            float scale = (float)found.scale;
            if (found.rank != p->rank) {
                return qlora__fail(ctx, QLORA_ERR_FORMAT,
                                   "%s: %s has rank %lld, but rank %lld in this model; open the "
                                   "model with desc.adapter",
                                   s->dir, module, (long long)found.rank, (long long)p->rank);
            }
            if (p->rank > 0 && (scale < p->scale || scale > p->scale)) {
                return qlora__fail(ctx, QLORA_ERR_FORMAT,
                                   "%s: %s has scale %g, but scale %g in this model; open the "
                                   "model with desc.adapter",
                                   s->dir, module, found.scale, (double)p->scale);
            }
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__adapter_source_open(qlora_ctx* ctx, const qlora_model* m,
                                               const char* dir, qlora__adapter_source* s) {
    memset(s, 0, sizeof *s);
    s->dir = dir;
    qlora_result r = QLORA_OK;
    if (qlora__has_lora(m)) {
        if (m->source != NULL && m->source->has_peft) {
            s->peft = &m->source->peft;
        } else {
            r = qlora__peft_open(&ctx->env, dir, &s->own);
            s->peft = r == QLORA_OK ? &s->own : NULL;
            r = r == QLORA_OK ? qlora__adapter_all_used(ctx, m, s->peft) : r;
        }
        r = r == QLORA_OK ? qlora__adapter_match(ctx, m, s) : r;
    }
    char path[QLORA__PATH_ROOM];
    bool exists = false;
    r = r == QLORA_OK ? qlora__path_join(&ctx->env, dir, QLORA__NORMS_FILE, path) : r;
    r = r == QLORA_OK ? qlora__file_exists(&ctx->env, path, &exists) : r;
    if (r == QLORA_OK && exists && !m->desc.train_norms) {
        r = qlora__fail(ctx, QLORA_ERR_FORMAT,
                        "%s holds trained norms, which belong to the adapter; open the model with "
                        "desc.train_norms",
                        path);
    } else if (r == QLORA_OK && exists) {
        r = qlora__st_open(&ctx->env, path, &s->norms);
        s->has_norms = r == QLORA_OK;
    }
    if (r != QLORA_OK) {
        qlora__adapter_source_close(ctx, s);
    }
    return r;
}

// Finds a trained tensor in the folder; NULL for a norm if the folder has no trained norms.
static qlora_result qlora__adapter_tensor(qlora_ctx* ctx, const qlora__adapter_source* s,
                                          const qlora__trained* t, const qlora__st_tensor** out) {
    *out = NULL;
    if (t->projection != NULL) {
        char module[192];
        qlora__peft_module found;
        snprintf(module, sizeof module, "%.*s", (int)(strlen(t->name) - strlen(".lora_A.weight")),
                 t->name);
        QLORA__TRY(qlora__peft_find(&ctx->env, s->peft, module, t->projection->out,
                                    t->projection->in, &found));
        *out = t->is_b ? found.b : found.a;
    } else if (s->has_norms) {
        const qlora__st_tensor* norm = qlora__st_find(&s->norms, t->name);
        if (norm == NULL) {
            return qlora__fail(ctx, QLORA_ERR_FORMAT, "%s/%s: %s is missing", s->dir,
                               QLORA__NORMS_FILE, t->name);
        }
        if (!qlora__st_is_float(norm) || norm->rank != 1 || norm->shape[0] != t->cols) {
            return qlora__fail(ctx, QLORA_ERR_FORMAT,
                               "%s/%s: %s is not a vector of %lld floating-point numbers", s->dir,
                               QLORA__NORMS_FILE, t->name, (long long)t->cols);
        }
        *out = norm;
    }
    return QLORA_OK;
}

static qlora_result qlora__floats_in(qlora_ctx* ctx, void* data, int64_t count, const float* in) {
    if (sizeof(QLORA__REAL) == sizeof(float)) {
        return qlora__copy_in(ctx, data, in, (size_t)count * sizeof(float));
    }
    for (int64_t i = 0; i < count; i++) {
        ((QLORA__REAL*)data)[i] = (QLORA__REAL)in[i];
    }
    return QLORA_OK;
}

// Reads the adapter weights of a folder. Everything is checked before anything is changed.
static qlora_result qlora__adapter_read(qlora_ctx* ctx, qlora_model* m, const char* dir) {
    qlora__adapter_source source;
    QLORA__TRY(qlora__adapter_source_open(ctx, m, dir, &source));
    size_t room = (size_t)qlora__max(m->longest_range, m->plan.config.hidden) * 4;
    float* values = (float*)qlora__alloc(ctx, room);
    qlora_result r = values != NULL ? QLORA_OK : QLORA_ERR_MEMORY;
    qlora__trained t;
    const qlora__st_tensor* tensor = NULL;
    for (int64_t i = 0; r == QLORA_OK && qlora__trained_at(m, i, &t); i++) {
        r = qlora__adapter_tensor(ctx, &source, &t, &tensor);
    }
    for (int64_t i = 0; r == QLORA_OK && qlora__trained_at(m, i, &t); i++) {
        r = qlora__adapter_tensor(ctx, &source, &t, &tensor);
        if (r == QLORA_OK && tensor != NULL) {
            qlora_tensor window;
            qlora__arena_window(&m->parameters, t.at, t.rows, t.cols, &window);
            qlora__st_read_f32(tensor, 0, (uint64_t)(t.rows * t.cols), values);
            r = qlora__floats_in(ctx, window.data, t.rows * t.cols, values);
        }
    }
    qlora__free(ctx, values, room);
    qlora__adapter_source_close(ctx, &source);
    QLORA__TRY(r);
    return qlora__parameters_changed(ctx, m);
}

//@@ src/model/open.h

// ---- open, close and parameters -----------------------------------------------------------------

// The update of a step: the gradient norm, then AdamW, which applies the scale of the clip, zeroes
// the gradients and writes the copies.
static qlora_result qlora__update(qlora_ctx* ctx, qlora_model* m) {
    if (m->range_count == 0) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__clip_measure(ctx, &m->clip));
    qlora_tensor scale;
    qlora_tensor flag;
    qlora__clip_device(&m->clip, 0, &scale, &flag);
    qlora_adamw_desc args = qlora__adamw_desc_of(m);
    args.clip_scale = &scale;
    args.not_finite = &flag;
    return qlora_adamw_step(ctx, &args);
}

// Runs every operation of a step once, on zeroed memory, before the weights are loaded: afterwards
// all kernels are loaded, cuBLAS has run every shape, and the cache can be sealed.
static qlora_result qlora__model_dry_run(qlora_ctx* ctx, qlora_model* m) {
    if (qlora__on_cpu(ctx)) {
        return QLORA_OK; // nothing is compiled on the CPU
    }
    qlora__pass pass = qlora__pass_of(m, m->plan.tokens, qlora__trains(m));
    int64_t chunks = qlora__ceil_div(m->plan.tokens, m->plan.head_chunk);
    QLORA__TRY(qlora__forward(&pass));
    qlora_tensor totals = qlora__window(&m->totals, 1, 0, 3);
    QLORA__TRY(qlora__head(&pass, chunks, &totals, qlora__trains(m)));
    if (qlora__trains(m)) {
        QLORA__TRY(qlora__backward(&pass));
        QLORA__TRY(qlora__update(ctx, m));
    }
    // Evaluation has other products: without dropout, the adapters are part of the large product,
    // and without adapters, that product is smaller.
    pass.training = false;
    QLORA__TRY(m->desc.dropout > 0.0f ? qlora__forward(&pass) : QLORA_OK);
    m->use_adapters = false;
    qlora_result r = m->range_count > 0 ? qlora__forward(&pass) : QLORA_OK;
    m->use_adapters = true;
    QLORA__TRY(r);
    if (m->desc.generate_tokens > 0) {
        qlora__pass one = qlora__pass_of(m, 1, false);
        one.decoding = true;
        QLORA__TRY(qlora__forward(&one));
        QLORA__TRY(qlora__head_logits(&one, 0, 1));
    }
    QLORA__TRY(qlora__sync(ctx));
    qlora__cache_set_sealed(ctx, true);
    return QLORA_OK;
}

static qlora_result qlora__model_fill(qlora_ctx* ctx, qlora_model* m,
                                      const qlora_model_desc* desc) {
    const qlora__adamw_numbers numbers = {0.0, 0.9, 0.999, 1e-8, 0.0};
    QLORA__TRY(qlora__optimizer_start(ctx, m, 1.0, &numbers));
    QLORA__TRY(qlora__model_dry_run(ctx, m));
    QLORA__TRY(m->dir != NULL ? qlora__load_files(ctx, m) : qlora__load_random(ctx, m));
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        qlora__layer* layer = &m->layers[l];
        for (int g = 0; g < QLORA__GROUPS && layer->cached; g++) {
            if (layer->linears[g].operand != NULL) {
                QLORA__TRY(qlora__linear_place(ctx, &layer->linears[g],
                                               QLORA_LINEAR_WEIGHTS | QLORA_LINEAR_ADAPTERS));
            }
        }
    }
    QLORA__TRY(qlora__optimizer_start(ctx, m, 1.0, &numbers));
    QLORA__TRY(qlora__adapters_start(ctx, m));
    QLORA__TRY(desc->adapter != NULL ? qlora__adapter_read(ctx, m, desc->adapter)
                                     : qlora__parameters_changed(ctx, m));
    QLORA__TRY(qlora__tensor_zero(ctx, &m->totals));
    QLORA__TRY(qlora__tensor_zero(ctx, &m->flag));
    return qlora__sync(ctx);
}

static qlora_result qlora__model_start(qlora_ctx* ctx, qlora_model* m,
                                       const qlora_model_desc* desc) {
    double start = qlora__clock_ms();
    QLORA__TRY(qlora__model_warm_kernels(ctx, m));
    QLORA__TRY(qlora__buffer_create(ctx, (size_t)m->plan.total, &m->arena));
    qlora__model_layout(m, (char*)m->arena->data);
    qlora__model_operands(m);
    QLORA__TRY(qlora__zero(ctx, m->arena->data, m->arena->bytes, m->arena->bytes, 1));
    QLORA__TRY(qlora__model_wrap(ctx, m));
    QLORA__TRY(qlora__model_rope(ctx, m));
    QLORA__TRY(qlora__ranges_upload(ctx, m));
    QLORA__TRY(qlora__ring_create(ctx, QLORA__RING_SLOTS,
                                  m->batch.all.bytes + sizeof(qlora__adamw_numbers), &m->ring));
    QLORA__TRY(qlora__model_fill(ctx, m, desc));
    qlora__source_close(m);
    QLORA__LOG(ctx, INFO, MODEL, "%lld layers, %.2f GiB, ready after %.1f s",
               (long long)m->plan.config.layers, (double)m->plan.total / 1073741824.0,
               (qlora__clock_ms() - start) * 1e-3);
    return QLORA_OK;
}

// Takes the recomputed and cached layers of an earlier plan, which must be for the same model and
// capacity.
static qlora_result qlora__model_adopt_plan(qlora_ctx* ctx, qlora_model* m,
                                            const qlora_plan* plan) {
    qlora__plan_apply(m, plan->recompute_layers, plan->cached_layers);
    m->plan.context = plan->context;
    if (m->plan.total != plan->total || m->plan.tokens != plan->tokens ||
        m->plan.parameters != plan->parameters) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "desc.plan was made for another model or other settings: it plans %llu "
                           "bytes, but this model needs %llu",
                           (unsigned long long)plan->total, (unsigned long long)m->plan.total);
    }
    return QLORA_OK;
}

static qlora_result qlora__model_build(qlora_ctx* ctx, const qlora_model_desc* desc,
                                       qlora_model** out) {
    if (desc == NULL || desc->plan == NULL) {
        return qlora__plan_build(ctx, desc, NULL, out);
    }
    qlora_plan_desc machine = qlora__machine_resolve(ctx, NULL);
    QLORA__TRY(qlora__skeleton(ctx, desc, &machine, out));
    QLORA__TRY(qlora__model_adopt_plan(ctx, *out, desc->plan));
    // A GPU refuses memory that it does not have; a CPU may promise it and kill the program later.
    bool fits = !qlora__on_cpu(ctx) || qlora__plan_fits(*out, machine.bytes);
    return fits ? QLORA_OK : qlora__plan_too_large(ctx, *out, machine.bytes);
}

static qlora_result qlora__model_open(qlora_ctx* ctx, const qlora_model_desc* desc,
                                      qlora_model** out) {
    if (out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    QLORA__TRY(qlora__not_in_capture(ctx, "opening a model"));
    qlora_model* m = NULL;
    qlora_result r = qlora__model_build(ctx, desc, &m);
    if (r == QLORA_OK) {
        bool was_sealed = qlora__cache_set_sealed(ctx, false);
        r = qlora__model_start(ctx, m, desc);
        qlora__cache_set_sealed(ctx, r == QLORA_OK || was_sealed);
    }
    if (r != QLORA_OK) {
        if (m != NULL) {
            qlora__model_free(m);
        }
        return r;
    }
    ctx->living[QLORA__MODELS]++;
    *out = m;
    return QLORA_OK;
}

qlora_result qlora_model_open(qlora_ctx* ctx, const qlora_model_desc* desc, qlora_model** out) {
    QLORA__ENTER(ctx, "qlora_model_open");
    return qlora__leave(ctx, qlora__model_open(ctx, desc, out));
}

static qlora_result qlora__model_close(qlora_ctx* ctx, qlora_model* m) {
    QLORA__TRY(qlora__not_in_capture(ctx, "closing a model"));
    if (m->trainers > 0 || m->generations > 0) {
        return qlora__fail(ctx, QLORA_ERR_STATE, "cannot close the model: it still has %s",
                           m->generations == 0 ? "a trainer"
                           : m->trainers == 0  ? "a generation"
                                               : "a trainer and a generation");
    }
    qlora__model_free(m);
    ctx->living[QLORA__MODELS]--;
    return QLORA_OK;
}

qlora_result qlora_model_close(qlora_model* model) {
    if (model == NULL) {
        return QLORA_OK;
    }
    qlora_ctx* ctx = model->ctx;
    QLORA__TRY(qlora__enter_destroy(ctx, "qlora_model_close"));
    return qlora__leave(ctx, qlora__model_close(ctx, model));
}

static qlora_ctx* qlora__model_ctx(const qlora_model* model) {
    return model != NULL ? model->ctx : NULL;
}

// Nothing is read from the device, so this can be called at any time.
qlora_result qlora_model_query(const qlora_model* model, qlora_model_info* out) {
    if (model == NULL || out == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    memset(out, 0, sizeof *out);
    out->ctx = model->ctx;
    out->plan = &model->plan;
    out->purpose = model->desc.purpose;
    out->generate_tokens = model->desc.generate_tokens;
    out->parameters = model->range_count;
    out->use_adapters = model->use_adapters;
    out->trainers = model->trainers;
    out->generations = model->generations;
    return QLORA_OK;
}

// Copies numbers of an f32 tensor to host memory.
static qlora_result qlora__floats_out(qlora_ctx* ctx, const void* data, int64_t count, float* out) {
    if (sizeof(QLORA__REAL) == sizeof(float)) {
        return qlora__copy_out(ctx, out, data, (size_t)count * sizeof(float));
    }
    for (int64_t i = 0; i < count; i++) { // the CPU in double precision, for tests
        out[i] = (float)((const QLORA__REAL*)data)[i];
    }
    return QLORA_OK;
}

static qlora_result qlora__parameter_need(qlora_ctx* ctx, const qlora_model* m, int64_t index,
                                          const char* name, const void* pointer,
                                          qlora__trained* t) {
    if (pointer == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is NULL", name);
    }
    if (index < 0 || !qlora__trained_at(m, index, t)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "index is %lld; the model has %lld trained tensors, numbered from 0",
                           (long long)index, (long long)m->range_count);
    }
    return QLORA_OK;
}

static qlora_result qlora__parameter_query(qlora_ctx* ctx, const qlora_model* m, int64_t index,
                                           qlora_parameter_info* out) {
    qlora__trained t;
    QLORA__TRY(qlora__parameter_need(ctx, m, index, "out", out, &t));
    snprintf(out->name, sizeof out->name, "base_model.model.%.170s", t.name);
    out->rows = t.rows;
    out->cols = t.cols;
    return QLORA_OK;
}

qlora_result qlora_parameter_query(const qlora_model* model, int64_t index,
                                   qlora_parameter_info* out) {
    qlora_ctx* ctx = qlora__model_ctx(model);
    QLORA__ENTER(ctx, "qlora_parameter_query");
    return qlora__leave(ctx, qlora__parameter_query(ctx, model, index, out));
}

static qlora_result qlora__parameter_read(qlora_ctx* ctx, const qlora_model* m,
                                          const qlora_tensor* arena, int64_t index, float* out) {
    qlora__trained t;
    QLORA__TRY(qlora__parameter_need(ctx, m, index, "out", out, &t));
    qlora_tensor window;
    qlora__arena_window(arena, t.at, t.rows, t.cols, &window);
    return qlora__floats_out(ctx, window.data, t.rows * t.cols, out);
}

qlora_result qlora_parameter_read(qlora_model* model, int64_t index, float* out) {
    qlora_ctx* ctx = qlora__model_ctx(model);
    QLORA__ENTER(ctx, "qlora_parameter_read");
    return qlora__leave(ctx, qlora__parameter_read(ctx, model, &model->parameters, index, out));
}

static qlora_result qlora__parameter_write(qlora_ctx* ctx, qlora_model* m, int64_t index,
                                           const float* in) {
    QLORA__TRY(qlora__model_idle(ctx, m, "writing a parameter"));
    qlora__trained t;
    QLORA__TRY(qlora__parameter_need(ctx, m, index, "in", in, &t));
    qlora_tensor window;
    qlora__arena_window(&m->parameters, t.at, t.rows, t.cols, &window);
    QLORA__TRY(qlora__floats_in(ctx, window.data, t.rows * t.cols, in));
    return qlora__parameters_changed(ctx, m);
}

qlora_result qlora_parameter_write(qlora_model* model, int64_t index, const float* in) {
    qlora_ctx* ctx = qlora__model_ctx(model);
    QLORA__ENTER(ctx, "qlora_parameter_write");
    return qlora__leave(ctx, qlora__parameter_write(ctx, model, index, in));
}

//@@ src/model/evaluate.h

// ---- evaluation ---------------------------------------------------------------------------------

// Checks a batch and runs the forward pass; the output of the final norm is then in m->x.
static qlora_result qlora__eval_forward(qlora_ctx* ctx, qlora_model* m, const qlora_batch* batch,
                                        const void* out, qlora__micro* micro) {
    int64_t tokens = 0;
    if (out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    QLORA__TRY(qlora__model_idle(ctx, m, "evaluating"));
    QLORA__TRY(qlora__batch_check(ctx, m, batch, &tokens));
    qlora__micro_desc desc = {1.0, 0, 0};
    QLORA__TRY(qlora__batch_send(ctx, m, batch, &desc, micro));
    qlora__pass pass = qlora__pass_of(m, micro->rows, false);
    return qlora__forward(&pass);
}

static qlora_result qlora__flag_read(qlora_ctx* ctx, const qlora_model* m) {
    int32_t flag = 0;
    QLORA__TRY(qlora__copy_out(ctx, &flag, m->flag.data, sizeof flag));
    return qlora__flag_check(ctx, flag);
}

static qlora_result qlora__eval(qlora_ctx* ctx, qlora_model* m, const qlora_batch* batch,
                                qlora_eval_info* out) {
    qlora__micro micro;
    QLORA__TRY(qlora__eval_forward(ctx, m, batch, out, &micro));
    qlora_tensor totals = qlora__window(&m->totals, 1, 3, 3);
    QLORA__TRY(qlora__tensor_zero(ctx, &totals));
    qlora__pass pass = qlora__pass_of(m, micro.rows, false);
    QLORA__TRY(qlora__head(&pass, micro.chunks, &totals, false));
    float sums[3];
    QLORA__TRY(qlora__floats_out(ctx, totals.data, 3, sums));
    QLORA__TRY(qlora__flag_read(ctx, m));
    out->loss = (double)sums[0] + (double)sums[1];
    out->labels = (double)sums[2];
    out->tokens = micro.tokens;
    return QLORA_OK;
}

qlora_result qlora_eval(qlora_model* model, const qlora_batch* batch, qlora_eval_info* out) {
    qlora_ctx* ctx = qlora__model_ctx(model);
    QLORA__ENTER(ctx, "qlora_eval");
    return qlora__leave(ctx, qlora__eval(ctx, model, batch, out));
}

// Copies rows of logits as floats, through a host buffer if they are 16-bit.
static qlora_result qlora__logits_out(qlora_ctx* ctx, const qlora_tensor* logits, int64_t rows,
                                      float* out) {
    int64_t n = rows * logits->cols;
    if (logits->dtype == QLORA_F32) {
        return qlora__floats_out(ctx, logits->data, n, out);
    }
    uint16_t* half = (uint16_t*)qlora__alloc(ctx, (size_t)n * 2);
    if (half == NULL) {
        return QLORA_ERR_MEMORY;
    }
    qlora_result r = qlora__copy_out(ctx, half, logits->data, (size_t)n * 2);
    for (int64_t i = 0; i < n && r == QLORA_OK; i++) {
        out[i] = qlora__bf16_to(half[i]);
    }
    qlora__free(ctx, half, (size_t)n * 2);
    return r;
}

static qlora_result qlora__eval_logits(qlora_ctx* ctx, qlora_model* m, const qlora_batch* batch,
                                       float* out) {
    qlora__micro micro;
    QLORA__TRY(qlora__eval_forward(ctx, m, batch, out, &micro));
    qlora__pass pass = qlora__pass_of(m, micro.rows, false);
    for (int64_t row = 0; row < micro.tokens; row += m->plan.head_chunk) {
        int64_t rows = qlora__min(m->plan.head_chunk, micro.tokens - row);
        QLORA__TRY(qlora__head_logits(&pass, row, rows));
        qlora_tensor logits = qlora__window(&m->logits, rows, 0, m->plan.config.vocab);
        QLORA__TRY(qlora__logits_out(ctx, &logits, rows, out + row * m->plan.config.vocab));
    }
    return qlora__flag_read(ctx, m);
}

qlora_result qlora_eval_logits(qlora_model* model, const qlora_batch* batch, float* out) {
    qlora_ctx* ctx = qlora__model_ctx(model);
    QLORA__ENTER(ctx, "qlora_eval_logits");
    return qlora__leave(ctx, qlora__eval_logits(ctx, model, batch, out));
}

//@@ src/adapter/save.h

// Saving, loading and copying adapters, in PEFT format and as GGUF.

// ---- lists of tensors to be written -------------------------------------------------------------

// One tensor of a file: floats of an arena (device memory on CUDA) or bytes in host memory.
typedef struct qlora__save_item {
    char name[224];
    int64_t shape[2];
    const qlora_tensor* arena; // NULL if `bytes` is used
    int64_t at;
    const void* bytes;
    size_t size;
} qlora__save_item;

typedef struct qlora__save_list {
    qlora__save_item* items;
    qlora__st_entry* entries;
    uint32_t count;
    uint32_t room;
    int64_t longest; // floats of the largest item in an arena
} qlora__save_list;

static void qlora__save_close(qlora_ctx* ctx, qlora__save_list* list) {
    qlora__free(ctx, list->items, list->room * sizeof *list->items);
    qlora__free(ctx, list->entries, list->room * sizeof *list->entries);
    memset(list, 0, sizeof *list);
}

static qlora_result qlora__save_open(qlora_ctx* ctx, int64_t room, qlora__save_list* list) {
    memset(list, 0, sizeof *list);
    list->room = (uint32_t)room;
    list->items = (qlora__save_item*)qlora__alloc_zero(ctx, list->room * sizeof *list->items);
    if (list->items != NULL) {
        list->entries =
            (qlora__st_entry*)qlora__alloc_zero(ctx, list->room * sizeof *list->entries);
    }
    if (list->entries == NULL) {
        qlora__save_close(ctx, list);
        return QLORA_ERR_MEMORY;
    }
    return QLORA_OK;
}

static qlora__save_item* qlora__save_next(qlora__save_list* list, qlora__st_dtype dtype,
                                          uint32_t rank) {
    QLORA_ASSERT(list->count < list->room);
    qlora__save_item* item = &list->items[list->count];
    qlora__st_entry* entry = &list->entries[list->count++];
    entry->name = item->name;
    entry->shape = item->shape;
    entry->dtype = dtype;
    entry->rank = rank;
    return item;
}

// Adds the part of an arena (parameters or moments) that belongs to a trained tensor. Its name in
// the file is prefix + name.
static void qlora__save_add(qlora__save_list* list, const char* prefix, const qlora_tensor* arena,
                            const qlora__trained* t) {
    bool is_norm = t->projection == NULL;
    qlora__save_item* item = qlora__save_next(list, QLORA__ST_F32, is_norm ? 1 : 2);
    snprintf(item->name, sizeof item->name, "%.24s%s", prefix, t->name);
    item->shape[0] = is_norm ? t->cols : t->rows;
    item->shape[1] = t->cols;
    item->arena = arena;
    item->at = t->at;
    item->size = (size_t)(t->rows * t->cols) * 4;
    list->longest = qlora__max(list->longest, t->rows * t->cols);
}

static void qlora__save_add_bytes(qlora__save_list* list, const char* name, qlora__st_dtype dtype,
                                  const void* bytes, size_t size) {
    qlora__save_item* item = qlora__save_next(list, dtype, 1);
    snprintf(item->name, sizeof item->name, "%s", name);
    item->shape[0] = (int64_t)(size * 8 / qlora__st_dtypes[dtype].bits);
    item->bytes = bytes;
    item->size = size;
}

// Writes the list under the temporary name of its file, with only one tensor in host memory at a
// time. The file is on disk then, and *w can publish it.
static qlora_result qlora__save_prepare(qlora_ctx* ctx, const qlora__save_list* list,
                                        const char* path, const char* const* metadata,
                                        bool checksum, qlora__st_writer* w) {
    size_t room = (size_t)list->longest * 4;
    float* values = (float*)qlora__alloc(ctx, room + 4);
    if (values == NULL) {
        return QLORA_ERR_MEMORY;
    }
    qlora_result r =
        qlora__st_write_begin(&ctx->env, path, list->entries, list->count, metadata, checksum, w);
    bool begun = r == QLORA_OK;
    for (uint32_t i = 0; i < list->count && r == QLORA_OK; i++) {
        const qlora__save_item* item = &list->items[w->order[i]];
        const void* bytes = item->bytes;
        if (item->arena != NULL) {
            qlora_tensor window;
            int64_t n = (int64_t)(item->size / 4);
            qlora__arena_window(item->arena, item->at, 1, n, &window);
            r = qlora__floats_out(ctx, window.data, n, values);
            bytes = values;
        }
        r = r == QLORA_OK ? qlora__st_write(&ctx->env, w, bytes, item->size) : r;
    }
    if (r == QLORA_OK) {
        r = qlora__st_write_finish(&ctx->env, w);
    } else if (begun) {
        qlora__st_write_abort(&ctx->env, w);
    }
    qlora__free(ctx, values, room + 4);
    return r;
}

// Writes the list as one file, atomically.
static qlora_result qlora__save_write(qlora_ctx* ctx, const qlora__save_list* list,
                                      const char* path, const char* const* metadata,
                                      bool checksum) {
    qlora__st_writer w;
    QLORA__TRY(qlora__save_prepare(ctx, list, path, metadata, checksum, &w));
    return qlora__st_write_publish(&ctx->env, &w);
}

// ---- PEFT folders -------------------------------------------------------------------------------

typedef struct qlora__module_name {
    char text[64];
} qlora__module_name;

// The contents of adapter_config.json and the memory that stores them.
typedef struct qlora__peft_tables {
    qlora__peft_desc desc;
    qlora__module_name* names;
    const char** targets;
    qlora__peft_override* overrides;
    int64_t* layers;
    size_t modules;
    size_t layer_room;
} qlora__peft_tables;

static void qlora__peft_tables_free(qlora_ctx* ctx, qlora__peft_tables* t) {
    qlora__free(ctx, t->names, t->modules * sizeof *t->names);
    qlora__free(ctx, t->targets, t->modules * sizeof *t->targets);
    qlora__free(ctx, t->overrides, t->modules * sizeof *t->overrides);
    qlora__free(ctx, t->layers, t->layer_room * sizeof *t->layers);
}

// The default rank and alpha of the adapter: those of the model desc if a module uses them,
// otherwise those of the first module.
static void qlora__adapter_defaults(const qlora_model* m, int64_t* rank, double* alpha) {
    bool found = false;
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        for (int i = 0; i < QLORA__PROJECTIONS; i++) {
            const qlora__projection* p = &m->layers[l].projections[i];
            float off = (float)p->alpha - m->desc.alpha;
            bool usual = p->rank == m->desc.rank && off <= 0.0f && off >= 0.0f;
            if (p->rank > 0 && (!found || usual)) {
                *rank = p->rank;
                *alpha = p->alpha;
                found = true;
            }
            if (p->rank > 0 && usual) {
                return;
            }
        }
    }
}

static uint32_t qlora__adapted_mask(const qlora__layer* layer) {
    uint32_t mask = 0;
    for (int i = 0; i < QLORA__PROJECTIONS; i++) {
        mask |= layer->projections[i].rank > 0 ? 1u << i : 0u;
    }
    return mask;
}

// Fills target_modules and layers_to_transform: short names if every adapted layer has the same
// modules, otherwise the full name of each module.
static void qlora__peft_targets(const qlora_model* m, qlora__peft_tables* t) {
    uint32_t all = 0;
    bool uniform = true;
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        uint32_t mask = qlora__adapted_mask(&m->layers[l]);
        if (mask != 0) {
            uniform = uniform && (all == 0 || all == mask);
            all |= mask;
            t->layers[t->desc.layer_count++] = l;
        }
    }
    for (int64_t l = 0; l < m->plan.config.layers && !uniform; l++) {
        for (int i = 0; i < QLORA__PROJECTIONS; i++) {
            if (m->layers[l].projections[i].rank > 0) {
                t->targets[t->desc.target_count++] = t->names[l * QLORA__PROJECTIONS + i].text;
            }
        }
    }
    for (int i = 0; i < QLORA__PROJECTIONS && uniform; i++) {
        if ((all >> i & 1u) != 0) {
            t->targets[t->desc.target_count++] = strrchr(qlora__projections[i].module, '.') + 1;
        }
    }
    if (!uniform || t->desc.layer_count == (uint32_t)m->plan.config.layers) {
        t->desc.layer_count = 0;
    }
    t->desc.layers = t->layers;
    t->desc.targets = t->targets;
}

static void qlora__peft_overrides(const qlora_model* m, qlora__peft_tables* t) {
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        for (int i = 0; i < QLORA__PROJECTIONS; i++) {
            const qlora__projection* p = &m->layers[l].projections[i];
            bool other_alpha = p->alpha < t->desc.alpha || p->alpha > t->desc.alpha;
            if (p->rank > 0 && (p->rank != t->desc.rank || other_alpha)) {
                qlora__peft_override* o = &t->overrides[t->desc.override_count++];
                o->module = t->names[l * QLORA__PROJECTIONS + i].text;
                o->rank = p->rank != t->desc.rank ? p->rank : 0;
                o->alpha = other_alpha ? p->alpha : 0.0;
            }
        }
    }
    t->desc.overrides = t->overrides;
}

static qlora_result qlora__peft_describe(qlora_ctx* ctx, const qlora_model* m,
                                         const char* base_name, qlora__peft_tables* t) {
    memset(t, 0, sizeof *t);
    t->layer_room = (size_t)m->plan.config.layers;
    t->modules = t->layer_room * QLORA__PROJECTIONS;
    t->names = (qlora__module_name*)qlora__alloc(ctx, t->modules * sizeof *t->names);
    t->targets =
        t->names == NULL ? NULL : (const char**)qlora__alloc(ctx, t->modules * sizeof *t->targets);
    t->overrides =
        t->targets == NULL
            ? NULL
            : (qlora__peft_override*)qlora__alloc_zero(ctx, t->modules * sizeof *t->overrides);
    t->layers = t->overrides == NULL
                    ? NULL
                    : (int64_t*)qlora__alloc(ctx, t->layer_room * sizeof *t->layers);
    if (t->layers == NULL) {
        return QLORA_ERR_MEMORY;
    }
    for (size_t i = 0; i < t->modules; i++) {
        snprintf(t->names[i].text, sizeof t->names[i].text, "model.layers.%llu.%s",
                 (unsigned long long)(i / QLORA__PROJECTIONS),
                 qlora__projections[i % QLORA__PROJECTIONS].module);
    }
    t->desc.base_name = base_name;
    t->desc.dropout = (double)m->desc.dropout;
    t->desc.rslora = m->desc.rslora;
    qlora__adapter_defaults(m, &t->desc.rank, &t->desc.alpha);
    qlora__peft_targets(m, t);
    qlora__peft_overrides(m, t);
    return QLORA_OK;
}

// Whether a file of a folder exists.
static qlora_result qlora__adapter_has(qlora_ctx* ctx, const char* dir, const char* name,
                                       bool* out) {
    char path[QLORA__PATH_ROOM];
    QLORA__TRY(qlora__path_join(&ctx->env, dir, name, path));
    return qlora__file_exists(&ctx->env, path, out);
}

// Removes a file of a folder if it exists, and waits until that is on disk.
static qlora_result qlora__adapter_retire(qlora_ctx* ctx, const char* dir, const char* name) {
    char path[QLORA__PATH_ROOM];
    bool exists = false;
    QLORA__TRY(qlora__path_join(&ctx->env, dir, name, path));
    QLORA__TRY(qlora__file_exists(&ctx->env, path, &exists));
    if (!exists) {
        return QLORA_OK;
    }
    int code = ctx->env.files.remove(path, ctx->env.files.user);
    return code == 0 ? qlora__dir_sync(&ctx->env, dir)
                     : qlora__fail(ctx, QLORA_ERR_FILE, "cannot remove %s: %s (%d)", path,
                                   qlora__errno_text(code), code);
}

// Whether adapter_config.json exists and has the text that would be written.
static qlora_result qlora__peft_config_stays(qlora_ctx* ctx, const char* dir,
                                             const qlora__peft_desc* desc, bool* out) {
    char path[QLORA__PATH_ROOM];
    *out = false;
    QLORA__TRY(qlora__adapter_has(ctx, dir, "adapter_config.json", out));
    if (!*out) {
        return QLORA_OK;
    }
    qlora__map map;
    qlora__string text;
    QLORA__TRY(qlora__path_join(&ctx->env, dir, "adapter_config.json", path));
    QLORA__TRY(qlora__map_open(&ctx->env, path, &map));
    qlora__string_begin(&ctx->env, &text);
    qlora__peft_write_text(&text, desc);
    *out = text.result == QLORA_OK && text.size == map.size && text.size > 0 &&
           memcmp(text.data, map.data, text.size) == 0;
    qlora_result r = text.result;
    qlora__string_free(&text);
    qlora__map_close(&ctx->env, &map);
    return r;
}

// Prepares adapter_model.safetensors with the matrices, or the file with the norms.
static qlora_result qlora__adapter_prepare(qlora_ctx* ctx, const qlora_model* m, const char* dir,
                                           bool norms, qlora__st_writer* w) {
    char path[QLORA__PATH_ROOM];
    qlora__save_list list;
    QLORA__TRY(qlora__path_join(&ctx->env, dir,
                                norms ? QLORA__NORMS_FILE : "adapter_model.safetensors", path));
    QLORA__TRY(qlora__save_open(ctx, m->range_count, &list));
    qlora__trained t;
    for (int64_t i = 0; qlora__trained_at(m, i, &t); i++) {
        if ((t.projection == NULL) == norms) {
            qlora__save_add(&list, norms ? "" : "base_model.model.", &m->parameters, &t);
        }
    }
    qlora_result r = qlora__save_prepare(ctx, &list, path, NULL, false, w);
    qlora__save_close(ctx, &list);
    return r;
}

// The files of an adapter that is being written: the matrices and the norms, complete under
// temporary names.
typedef struct qlora__adapter_files {
    qlora__st_writer writers[2];
    bool ready[2];
} qlora__adapter_files;

static const char* const qlora__adapter_names[2] = {"adapter_model.safetensors", QLORA__NORMS_FILE};

// Exchanges the files of a folder. As long as several of them change, there is no config, and
// without it the folder does not load: a crash leaves the old adapter, the new one, or none, but
// never a mixture. Where only the matrices change, one rename is enough.
static qlora_result qlora__adapter_publish(qlora_ctx* ctx, const char* dir,
                                           const qlora__peft_desc* desc, qlora__adapter_files* f) {
    bool stays = false;
    bool norms = false;
    bool lora = f->ready[0];
    if (lora) {
        QLORA__TRY(qlora__peft_config_stays(ctx, dir, desc, &stays));
        QLORA__TRY(qlora__adapter_has(ctx, dir, QLORA__NORMS_FILE, &norms));
    }
    bool alone = stays && !norms && !f->ready[1];
    QLORA__TRY(alone ? QLORA_OK : qlora__adapter_retire(ctx, dir, "adapter_config.json"));
    for (int i = 1; i >= 0; i--) {
        if (f->ready[i]) {
            f->ready[i] = false;
            QLORA__TRY(qlora__st_write_publish(&ctx->env, &f->writers[i]));
        } else {
            QLORA__TRY(qlora__adapter_retire(ctx, dir, qlora__adapter_names[i]));
        }
    }
    return lora && !alone ? qlora__peft_write_config(&ctx->env, dir, desc) : QLORA_OK;
}

// Writes an adapter folder, which is one unit. A LoRA adapter in PEFT format cannot contain norms,
// so trained norms are stored in a separate file under their names in the base; those of an earlier
// save are removed.
static qlora_result qlora__adapter_write(qlora_ctx* ctx, const qlora_model* m, const char* dir,
                                         const char* base_name) {
    qlora__peft_tables tables;
    qlora__adapter_files files;
    const bool wanted[2] = {qlora__has_lora(m), m->desc.train_norms};
    memset(&files, 0, sizeof files);
    QLORA__TRY(qlora__dir_make(&ctx->env, dir));
    qlora_result r = qlora__peft_describe(ctx, m, base_name, &tables);
    for (int i = 0; i < 2 && r == QLORA_OK; i++) {
        if (wanted[i]) {
            r = qlora__adapter_prepare(ctx, m, dir, i == 1, &files.writers[i]);
            files.ready[i] = r == QLORA_OK;
        }
    }
    if (r == QLORA_OK) {
        r = qlora__adapter_publish(ctx, dir, &tables.desc, &files);
    }
    for (int i = 0; i < 2; i++) {
        if (files.ready[i]) {
            qlora__st_write_abort(&ctx->env, &files.writers[i]);
        }
    }
    qlora__peft_tables_free(ctx, &tables);
    return r;
}

static qlora_result qlora__adapter_need(qlora_ctx* ctx, const qlora_model* m, const char* path,
                                        bool norms_suffice) {
    if (path == NULL || path[0] == '\0') {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "the path is %s",
                           path == NULL ? "NULL" : "empty");
    }
    if (!qlora__has_lora(m) && !(norms_suffice && m->desc.train_norms)) {
        return qlora__fail(ctx, QLORA_ERR_STATE, "the model has no adapters");
    }
    return qlora__not_in_capture(ctx, "reading or writing an adapter");
}

static qlora_result qlora__adapter_desc_check(qlora_ctx* ctx, const qlora_adapter_desc* desc) {
    if (desc != NULL && (desc->reserved_must_be_zero0 != 0 || desc->reserved_must_be_zero1 != 0)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "the adapter desc was not zeroed before its fields were set");
    }
    return QLORA_OK;
}

static qlora_result qlora__adapter_save(qlora_ctx* ctx, qlora_model* m, const char* dir,
                                        const qlora_adapter_desc* desc) {
    QLORA__TRY(qlora__adapter_desc_check(ctx, desc));
    QLORA__TRY(qlora__adapter_need(ctx, m, dir, true));
    const char* base_name = desc != NULL ? desc->base_name : NULL;
    if (m->desc.train_norms) {
        QLORA__LOG(ctx, WARN, CHECKPOINT,
                   "the trained norms are in %s/%s, which PEFT does not read; qlora_merge_save "
                   "merges them",
                   dir, QLORA__NORMS_FILE);
    }
    return qlora__adapter_write(ctx, m, dir, base_name != NULL ? base_name : m->dir);
}

qlora_result qlora_adapter_save(qlora_model* model, const char* dir,
                                const qlora_adapter_desc* desc) {
    qlora_ctx* ctx = qlora__model_ctx(model);
    QLORA__ENTER(ctx, "qlora_adapter_save");
    return qlora__leave(ctx, qlora__adapter_save(ctx, model, dir, desc));
}

static qlora_result qlora__adapter_load(qlora_ctx* ctx, qlora_model* m, const char* dir,
                                        const qlora_adapter_desc* desc) {
    QLORA__TRY(qlora__adapter_desc_check(ctx, desc));
    QLORA__TRY(qlora__model_idle(ctx, m, "loading an adapter"));
    QLORA__TRY(qlora__adapter_need(ctx, m, dir, true));
    return qlora__adapter_read(ctx, m, dir);
}

qlora_result qlora_adapter_load(qlora_model* model, const char* dir,
                                const qlora_adapter_desc* desc) {
    qlora_ctx* ctx = qlora__model_ctx(model);
    QLORA__ENTER(ctx, "qlora_adapter_load");
    return qlora__leave(ctx, qlora__adapter_load(ctx, model, dir, desc));
}

qlora_result qlora_adapter_use(qlora_model* model, bool on) {
    qlora_ctx* ctx = qlora__model_ctx(model);
    QLORA__ENTER(ctx, "qlora_adapter_use");
    qlora_result r = qlora__model_idle(ctx, model, "switching the adapters");
    if (r == QLORA_OK && model->use_adapters != on) {
        qlora__graphs_invalidate(ctx, 0, "adapters were switched on or off");
        model->use_adapters = on;
    }
    return qlora__leave(ctx, r);
}

// ---- from one model to another ------------------------------------------------------------------

// Checks that the two models have the same trained tensors; *same_places is set if they are also at
// the same offsets.
static qlora_result qlora__adapter_compare(qlora_ctx* ctx, const qlora_model* from,
                                           const qlora_model* to, bool* same_places) {
    qlora__trained a;
    qlora__trained b;
    *same_places = from->elements == to->elements;
    if (from->range_count != to->range_count) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "`from` has %lld trained tensors but `to` has %lld",
                           (long long)from->range_count, (long long)to->range_count);
    }
    for (int64_t i = 0; qlora__trained_at(from, i, &a) && qlora__trained_at(to, i, &b); i++) {
        if (strcmp(a.name, b.name) != 0 || a.rows != b.rows || a.cols != b.cols) {
            return qlora__fail(
                ctx, QLORA_ERR_ARGUMENT,
                "trained tensor %lld is %s [%lld, %lld] in `from` but %s [%lld, %lld] "
                "in `to`",
                (long long)i, a.name, (long long)a.rows, (long long)a.cols, b.name,
                (long long)b.rows, (long long)b.cols);
        }
        float scale = a.shadow_scale - b.shadow_scale;
        if (scale < 0.0f || scale > 0.0f) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s has scale %g in `from` but %g in `to`",
                               a.name, (double)a.shadow_scale, (double)b.shadow_scale);
        }
        *same_places = *same_places && a.at == b.at;
    }
    return QLORA_OK;
}

// Copies through host memory, because the models may be on different devices. ctx is the context of
// `to`.
static qlora_result qlora__adapter_carry(qlora_ctx* ctx, qlora_model* from, qlora_model* to) {
    size_t bytes = (size_t)from->elements * sizeof(float);
    float* values = (float*)qlora__alloc(ctx, bytes);
    qlora_result r = values != NULL ? QLORA_OK : QLORA_ERR_MEMORY;
    qlora__trained t;
    // Everything is read before anything is written, so that a failure leaves `to` as it was.
    for (int64_t i = 0; r == QLORA_OK && qlora__trained_at(from, i, &t); i++) {
        r = qlora_parameter_read(from, i, values + t.at);
        if (r != QLORA_OK && from->ctx != ctx) {
            r = qlora__fail(ctx, r, "%.400s", qlora_last_error(from->ctx));
        }
    }
    for (int64_t i = 0; r == QLORA_OK && qlora__trained_at(from, i, &t); i++) {
        qlora__trained target;
        if (qlora__trained_at(to, i, &target)) {
            qlora_tensor window;
            qlora__arena_window(&to->parameters, target.at, target.rows, target.cols, &window);
            r = qlora__floats_in(ctx, window.data, target.rows * target.cols, values + t.at);
        }
    }
    qlora__free(ctx, values, bytes);
    return r;
}

static qlora_result qlora__adapter_copy(qlora_ctx* ctx, qlora_model* from, qlora_model* to) {
    bool same_places = false;
    if (from == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "from is NULL");
    }
    if (from == to) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__model_idle(ctx, to, "receiving an adapter"));
    QLORA__TRY(qlora__adapter_compare(ctx, from, to, &same_places));
    if (from->range_count == 0) {
        return QLORA_OK;
    }
    if (from->ctx == ctx && same_places) {
        QLORA__TRY(qlora_scale(ctx, 1.0f, &from->parameters, &to->parameters));
    } else {
        QLORA__TRY(qlora__adapter_carry(ctx, from, to));
    }
    return qlora__parameters_changed(ctx, to);
}

qlora_result qlora_adapter_copy(qlora_model* from, qlora_model* to) {
    qlora_ctx* ctx = qlora__model_ctx(to);
    QLORA__ENTER(ctx, "qlora_adapter_copy");
    return qlora__leave(ctx, qlora__adapter_copy(ctx, from, to));
}

// ---- GGUF ---------------------------------------------------------------------------------------

// Arranges B of one module: rows in the order of llama.cpp, multiplied by the ratio of the module's
// scale to that of the file.
static void qlora__gguf_arrange(const qlora_model* m, const qlora__trained* t, double file_alpha,
                                const float* in, float* out) {
    const qlora_model_config* c = &m->plan.config;
    bool turned = strstr(t->name, ".q_proj.") != NULL || strstr(t->name, ".k_proj.") != NULL;
    double fold = qlora__gguf_fold((double)t->projection->scale, file_alpha, t->projection->rank);
    // The scale is a float: a ratio that differs from 1 only by rounding counts as 1.
    bool plain = fold > 1.0 - 1e-6 && fold < 1.0 + 1e-6;
    for (int64_t row = 0; row < t->rows; row++) {
        int64_t from = turned ? qlora__gguf_source_row(c->family, row, c->head_dim) : row;
        for (int64_t i = 0; i < t->cols; i++) {
            float x = in[from * t->cols + i];
            out[row * t->cols + i] = plain ? x : (float)((double)x * fold);
        }
    }
}

static qlora_result qlora__gguf_entries(qlora_ctx* ctx, const qlora_model* m,
                                        qlora__gguf_entry* entries, uint32_t* count) {
    qlora__trained t;
    for (int64_t i = 0; qlora__trained_at(m, i, &t); i++) {
        if (t.projection != NULL) {
            qlora__gguf_entry* e = &entries[(*count)++];
            char module[192];
            snprintf(module, sizeof module, "%.*s",
                     (int)(strlen(t.name) - strlen(".lora_A.weight")), t.name);
            QLORA__TRY(qlora__gguf_name(&ctx->env, module, t.is_b ? 'b' : 'a', e->name));
            e->rows = t.rows;
            e->cols = t.cols;
        }
    }
    return QLORA_OK;
}

// `buffers` has room for the longest tensor twice.
static qlora_result qlora__gguf_save_tensors(qlora_ctx* ctx, const qlora_model* m, double alpha,
                                             float* buffers, qlora__gguf_writer* w) {
    qlora__trained t;
    for (int64_t i = 0; qlora__trained_at(m, i, &t); i++) {
        if (t.projection == NULL) {
            continue;
        }
        qlora_tensor window;
        const float* values = buffers;
        qlora__arena_window(&m->parameters, t.at, t.rows, t.cols, &window);
        QLORA__TRY(qlora__floats_out(ctx, window.data, t.rows * t.cols, buffers));
        if (t.is_b) {
            qlora__gguf_arrange(m, &t, alpha, buffers, buffers + m->longest_range);
            values = buffers + m->longest_range;
        }
        QLORA__TRY(qlora__gguf_write(&ctx->env, w, values, (size_t)(t.rows * t.cols) * 4));
    }
    return QLORA_OK;
}

static qlora_result qlora__adapter_save_gguf(qlora_ctx* ctx, const qlora_model* m,
                                             const char* path) {
    QLORA__TRY(qlora__adapter_need(ctx, m, path, false));
    if (m->desc.train_norms) {
        QLORA__LOG(ctx, WARN, CHECKPOINT,
                   "%s does not contain the trained norms; qlora_merge_save merges them", path);
    }
    size_t entry_bytes = (size_t)m->range_count * sizeof(qlora__gguf_entry);
    size_t buffer_bytes = (size_t)m->longest_range * 2 * sizeof(float);
    qlora__gguf_entry* entries = (qlora__gguf_entry*)qlora__alloc(ctx, entry_bytes);
    float* buffers = entries != NULL ? (float*)qlora__alloc(ctx, buffer_bytes) : NULL;
    qlora_result r = buffers != NULL ? QLORA_OK : QLORA_ERR_MEMORY;
    uint32_t count = 0;
    r = r == QLORA_OK ? qlora__gguf_entries(ctx, m, entries, &count) : r;
    if (r == QLORA_OK) {
        int64_t rank = 0;
        double alpha = 0.0;
        qlora__gguf_writer w;
        qlora__adapter_defaults(m, &rank, &alpha);
        alpha = qlora__gguf_alpha(alpha, rank, m->desc.rslora);
        r = qlora__gguf_begin(&ctx->env, path, qlora__gguf_architecture(m->plan.config.family),
                              alpha, entries, count, &w);
        if (r == QLORA_OK) {
            r = qlora__gguf_save_tensors(ctx, m, alpha, buffers, &w);
            if (r == QLORA_OK) {
                r = qlora__gguf_commit(&ctx->env, &w);
            } else {
                qlora__gguf_abort(&ctx->env, &w);
            }
        }
    }
    qlora__free(ctx, buffers, buffer_bytes);
    qlora__free(ctx, entries, entry_bytes);
    return r;
}

qlora_result qlora_adapter_save_gguf(qlora_model* model, const char* path,
                                     const qlora_adapter_desc* desc) {
    qlora_ctx* ctx = qlora__model_ctx(model);
    QLORA__ENTER(ctx, "qlora_adapter_save_gguf");
    qlora_result r = qlora__adapter_desc_check(ctx, desc);
    return qlora__leave(ctx, r == QLORA_OK ? qlora__adapter_save_gguf(ctx, model, path) : r);
}

//@@ src/adapter/merge.h

// ---- export of merged models --------------------------------------------------------------------

// One tensor of the merged model.
typedef struct qlora__merge_item {
    const qlora__st_tensor* tensor;      // of the folder; the codes if the weight is 4-bit
    const qlora__projection* projection; // NULL if it is not a projection
    int64_t norm_at;                     // offset in the parameter arena; -1 if not a trained norm
    int64_t norm_width;
    bool nf4;
    bool raw; // not floats: the bytes are copied
    int64_t shape[2];
    int64_t rows; // the tensor as a matrix
    int64_t cols;
    uint64_t bytes; // in the output file
    uint32_t shard;
} qlora__merge_item;

typedef struct qlora__merge {
    qlora_ctx* ctx;
    const qlora_model* m;
    const char* dir;
    qlora_dtype dtype;
    bool trained; // merge into the dequantised 4-bit weights
    qlora__folder folder;
    qlora__merge_item* items;
    qlora__st_entry* entries; // of the current shard
    uint32_t* members;        // their items
    const char** names;       // for the index
    uint32_t* shard_of;
    uint32_t room;
    uint32_t count;
    uint32_t shards;
    uint64_t done;
    uint64_t total;
    int64_t most_cols;
    qlora_progress_fn progress;
    void* user;
    // buffers for one block of rows
    size_t elements;
    float* values;
    uint8_t* packed;
} qlora__merge;

// The adapter of one module and, if it is 4-bit, its weight, in host memory.
typedef struct qlora__merge_module {
    float* a;
    float* b;
    size_t ab_bytes;
    uint8_t* memory;
    size_t memory_bytes;
    qlora_nf4 nf4; // addresses in memory
} qlora__merge_module;

typedef struct qlora__merge_rows {
    const qlora__merge_item* item;
    const qlora__merge_module* module;
    bool via_bf16;
    int64_t first;
    float* values;
} qlora__merge_rows;

// Computes W + s B A in f32, row by row.
static void qlora__merge_range(void* user, int64_t begin, int64_t end) {
    const qlora__merge_rows* job = (const qlora__merge_rows*)user;
    const qlora__projection* p = job->item->projection;
    const qlora_nf4* w = &job->module->nf4;
    int64_t cols = job->item->cols;
    for (int64_t row = begin; row < end; row++) {
        float* values = job->values + row * cols;
        for (int64_t i = 0; i < cols && job->item->nf4; i++) {
            int64_t e = (job->first + row) * cols + i;
            values[i] =
                w->maps[qlora__nf4_code_at(w->codes, e)] * qlora__nf4_absmax(w, e / w->block);
        }
        for (int64_t i = 0; i < cols && job->via_bf16; i++) {
            values[i] = qlora__bf16_to(qlora__bf16_from(values[i]));
        }
        for (int64_t i = 0; i < cols && p->rank > 0; i++) {
            const float* b = job->module->b + (job->first + row) * p->rank;
            float sum = 0.0f;
            for (int64_t k = 0; k < p->rank; k++) {
                sum += b[k] * job->module->a[k * cols + i];
            }
            values[i] += p->scale * sum;
        }
    }
}

static void qlora__merge_module_close(qlora_ctx* ctx, qlora__merge_module* module) {
    qlora__free(ctx, module->a, module->ab_bytes);
    qlora__free(ctx, module->memory, module->memory_bytes);
}

static qlora_result qlora__merge_module_open(qlora_ctx* ctx, const qlora_model* m,
                                             const qlora__merge_item* item,
                                             qlora__merge_module* out) {
    const qlora__projection* p = item->projection;
    memset(out, 0, sizeof *out);
    out->ab_bytes = (size_t)(p->rank * (p->in + p->out)) * 4;
    if (p->rank > 0) {
        qlora_tensor a;
        qlora_tensor b;
        out->a = (float*)qlora__alloc(ctx, out->ab_bytes);
        if (out->a == NULL) {
            return QLORA_ERR_MEMORY;
        }
        out->b = out->a + p->rank * p->in;
        qlora__arena_window(&m->parameters, p->a_at, p->rank, p->in, &a);
        qlora__arena_window(&m->parameters, p->b_at, p->out, p->rank, &b);
        QLORA__TRY(qlora__floats_out(ctx, a.data, p->rank * p->in, out->a));
        QLORA__TRY(qlora__floats_out(ctx, b.data, p->out * p->rank, out->b));
    }
    if (item->nf4) {
        const char* from = (const char*)p->nf4.memory.data;
        out->memory_bytes = p->nf4.memory.bytes;
        out->memory = (uint8_t*)qlora__alloc(ctx, out->memory_bytes);
        if (out->memory == NULL) {
            return QLORA_ERR_MEMORY;
        }
        QLORA__TRY(qlora__copy_out(ctx, out->memory, from, out->memory_bytes));
        out->nf4 = p->nf4;
        struct {
            const void* device;
            void* host;
        } parts[] = {{p->nf4.codes, NULL},        {p->nf4.absmax, NULL},
                     {p->nf4.absmax_codes, NULL}, {p->nf4.absmax_scales, NULL},
                     {p->nf4.offset, NULL},       {p->nf4.maps, NULL}};
        for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
            if (parts[i].device != NULL) {
                parts[i].host = out->memory + ((const char*)parts[i].device - from);
            }
        }
        out->nf4.codes = (uint8_t*)parts[0].host;
        out->nf4.absmax = (float*)parts[1].host;
        out->nf4.absmax_codes = (uint8_t*)parts[2].host;
        out->nf4.absmax_scales = (float*)parts[3].host;
        out->nf4.offset = (float*)parts[4].host;
        out->nf4.maps = (float*)parts[5].host;
    }
    return QLORA_OK;
}

// Converts floats to the type of the file; a finite value that F16 cannot represent is an error.
static qlora_result qlora__merge_pack(const qlora__merge* g, const qlora__merge_item* item,
                                      int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint16_t half =
            g->dtype == QLORA_F16 ? qlora__f16_from(g->values[i]) : qlora__bf16_from(g->values[i]);
        if (g->dtype == QLORA_F16 && qlora__finite(g->values[i]) && (half & 0x7c00u) == 0x7c00u) {
            return qlora__fail(g->ctx, QLORA_ERR_LIMIT,
                               "%s contains %g, which F16 cannot represent; "
                               "export as BF16 or F32",
                               item->tensor->name, (double)g->values[i]);
        }
        memcpy(g->packed + (size_t)i * 2, &half, 2);
    }
    return QLORA_OK;
}

// Computes rows [first, first + rows) of an item in f32.
static qlora_result qlora__merge_rows_make(const qlora__merge* g, const qlora__merge_item* item,
                                           const qlora__merge_module* module, int64_t first,
                                           int64_t rows) {
    if (item->norm_at >= 0) {
        qlora_tensor norm;
        qlora__arena_window(&g->m->parameters, item->norm_at, 1, item->cols, &norm);
        return qlora__floats_out(g->ctx, norm.data, item->cols, g->values);
    }
    if (!item->nf4) {
        qlora__st_read_f32(item->tensor, (uint64_t)(first * item->cols),
                           (uint64_t)(rows * item->cols), g->values);
    }
    if (item->projection != NULL) {
        qlora__merge_rows job;
        job.item = item;
        job.module = module;
        // As in a training step, 4-bit values are rounded to bf16 in every mode.
        job.via_bf16 = item->nf4 || (g->trained && g->m->compute == QLORA_BF16);
        job.first = first;
        job.values = g->values;
        qlora__parallel(g->ctx, rows, 1 + 4096 / item->cols, qlora__merge_range, &job);
    }
    return QLORA_OK;
}

static qlora_result qlora__merge_item_write(qlora__merge* g, const qlora__merge_item* item,
                                            qlora__st_writer* w) {
    qlora_ctx* ctx = g->ctx;
    qlora__merge_module module;
    memset(&module, 0, sizeof module);
    if (item->raw) {
        return qlora__st_write(&ctx->env, w, item->tensor->data, (size_t)item->tensor->bytes);
    }
    qlora_result r =
        item->projection != NULL ? qlora__merge_module_open(ctx, g->m, item, &module) : QLORA_OK;
    int64_t most = item->cols > 0 ? (int64_t)g->elements / item->cols : 1;
    for (int64_t row = 0; row < item->rows && item->cols > 0 && r == QLORA_OK; row += most) {
        int64_t rows = qlora__min(most, item->rows - row);
        int64_t n = rows * item->cols;
        r = qlora__merge_rows_make(g, item, &module, row, rows);
        if (r == QLORA_OK && g->dtype != QLORA_F32) {
            r = qlora__merge_pack(g, item, n);
        }
        if (r == QLORA_OK) {
            r = g->dtype == QLORA_F32 ? qlora__st_write(&ctx->env, w, g->values, (size_t)n * 4)
                                      : qlora__st_write(&ctx->env, w, g->packed, (size_t)n * 2);
        }
    }
    qlora__merge_module_close(ctx, &module);
    return r;
}

static qlora__st_dtype qlora__st_dtype_for(qlora_dtype dtype) {
    return dtype == QLORA_F32    ? QLORA__ST_F32
           : dtype == QLORA_BF16 ? QLORA__ST_BF16
                                 : QLORA__ST_F16;
}

// Whether a tensor is an auxiliary part of a bitsandbytes weight, which the merged weight does not
// need.
static bool qlora__is_bnb_part(const char* name) {
    static const char* const ends[] = {".absmax", ".quant_map", ".nested_absmax",
                                       ".nested_quant_map", qlora__bnb_suffix};
    size_t length = strlen(name);
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++) {
        size_t n = strlen(ends[i]);
        if (length > n + 7 && strcmp(name + length - n, ends[i]) == 0 &&
            strncmp(name + length - n - 7, ".weight", 7) == 0) {
            return true;
        }
    }
    return false;
}

// Finds the role of a tensor of the folder: a projection, a trained norm, or neither.
static void qlora__merge_recognise(const qlora_model* m, const char* plain,
                                   qlora__merge_item* item) {
    char name[224];
    qlora__trained norm;
    item->norm_at = -1;
    if (m->desc.train_norms && strcmp(plain, "norm.weight") == 0) {
        item->norm_at = m->final_norm_at;
        item->norm_width = m->plan.config.hidden;
    }
    if (strncmp(plain, "layers.", 7) != 0) {
        return;
    }
    int64_t layer = 0;
    for (const char* at = plain + 7; *at >= '0' && *at <= '9' && layer < QLORA_MAX_LAYERS; at++) {
        layer = layer * 10 + (*at - '0');
    }
    for (int i = 0; i < QLORA__PROJECTIONS && layer < m->plan.config.layers; i++) {
        snprintf(name, sizeof name, "layers.%lld.%s.weight", (long long)layer,
                 qlora__projections[i].module);
        if (strcmp(name, plain) == 0) {
            item->projection = &m->layers[layer].projections[i];
        }
    }
    memset(&norm, 0, sizeof norm);
    for (int i = 0; layer < m->plan.config.layers && qlora__trained_norm(m, layer, i, &norm); i++) {
        if (strcmp(qlora__plain_name(norm.name), plain) == 0) {
            item->norm_at = norm.at;
            item->norm_width = norm.cols;
        }
    }
}

// Describes one tensor. The folder may have changed since the model was opened, so shapes are
// checked.
static qlora_result qlora__merge_describe(const qlora__merge* g, const qlora__folder_entry* entry,
                                          qlora__merge_item* item) {
    const qlora__st_tensor* t = entry->tensor;
    memset(item, 0, sizeof *item);
    item->tensor = t;
    qlora__merge_recognise(g->m, entry->name, item);
    const qlora__projection* p = item->projection;
    bool is_float = qlora__st_is_float(t);
    item->nf4 = p != NULL && p->is_nf4 && (g->trained || !is_float);
    item->raw = !item->nf4 && !is_float;
    if (p != NULL) {
        item->shape[0] = p->out;
        item->shape[1] = p->in;
    }
    bool changed =
        (p != NULL && !item->nf4 &&
         (item->raw || t->rank != 2 || t->shape[0] != p->out || t->shape[1] != p->in)) ||
        (item->norm_at >= 0 && (item->raw || t->rank != 1 || t->shape[0] != item->norm_width));
    if (changed) {
        return qlora__fail(g->ctx, QLORA_ERR_FORMAT,
                           "%s: tensor %s has changed since the model was opened", g->m->dir,
                           t->name);
    }
    item->cols = p != NULL ? p->in : t->rank > 0 ? t->shape[t->rank - 1] : 1;
    int64_t n = p != NULL ? p->out * p->in : (int64_t)qlora__st_elements(t);
    item->rows = item->cols > 0 ? n / item->cols : 0;
    item->bytes = item->raw ? t->bytes : (uint64_t)n * qlora_dtype_bytes(g->dtype);
    return QLORA_OK;
}

// Lists the tensors by name and distributes them over the shards.
static qlora_result qlora__merge_plan(qlora__merge* g, uint64_t shard_bytes) {
    uint64_t filled = 0;
    for (uint32_t i = 0; i < g->folder.count; i++) {
        const qlora__folder_entry* entry = &g->folder.entries[g->folder.by_name[i]];
        if (qlora__is_bnb_part(entry->name)) {
            continue;
        }
        qlora__merge_item* item = &g->items[g->count];
        QLORA__TRY(qlora__merge_describe(g, entry, item));
        if (filled > 0 && (item->bytes > shard_bytes || filled > shard_bytes - item->bytes)) {
            filled = 0;
            g->shards++;
        }
        item->shard = g->shards;
        filled += item->bytes;
        g->total += item->bytes;
        g->most_cols = qlora__max(g->most_cols, item->cols);
        g->count++;
    }
    g->shards++;
    return QLORA_OK;
}

static qlora_result qlora__merge_tell(const qlora__merge* g) {
    if (g->progress != NULL && !g->progress(g->user, "merging", g->done, g->total)) {
        return qlora__fail(g->ctx, QLORA_ERR_STOPPED, "merging was stopped");
    }
    return QLORA_OK;
}

static void qlora__merge_shard_name(const qlora__merge* g, uint32_t shard,
                                    qlora__module_name* out) {
    if (g->shards == 1) {
        snprintf(out->text, sizeof out->text, "model.safetensors");
    } else {
        snprintf(out->text, sizeof out->text, "model-%05u-of-%05u.safetensors", shard + 1,
                 g->shards);
    }
}

static qlora_result qlora__merge_shard(qlora__merge* g, uint32_t shard) {
    char path[QLORA__PATH_ROOM];
    qlora__module_name name;
    uint32_t count = 0;
    qlora__merge_shard_name(g, shard, &name);
    QLORA__TRY(qlora__path_join(&g->ctx->env, g->dir, name.text, path));
    for (uint32_t i = 0; i < g->count; i++) {
        const qlora__merge_item* item = &g->items[i];
        if (item->shard == shard) {
            qlora__st_entry* e = &g->entries[count];
            e->name = item->tensor->name;
            e->shape = item->projection != NULL ? item->shape : item->tensor->shape;
            e->rank = item->projection != NULL ? 2 : item->tensor->rank;
            e->dtype = item->raw ? item->tensor->dtype : qlora__st_dtype_for(g->dtype);
            g->members[count++] = i;
        }
    }
    qlora__st_writer w;
    QLORA__TRY(qlora__st_write_begin(&g->ctx->env, path, g->entries, count, NULL, false, &w));
    qlora_result r = QLORA_OK;
    for (uint32_t i = 0; i < count && r == QLORA_OK; i++) {
        const qlora__merge_item* item = &g->items[g->members[w.order[i]]];
        r = qlora__merge_item_write(g, item, &w);
        g->done += item->bytes;
        r = r == QLORA_OK ? qlora__merge_tell(g) : r;
    }
    if (r != QLORA_OK) {
        qlora__st_write_abort(&g->ctx->env, &w);
        return r;
    }
    return qlora__st_write_commit(&g->ctx->env, &w);
}

static qlora_result qlora__merge_index(qlora__merge* g) {
    qlora_ctx* ctx = g->ctx;
    size_t bytes = g->shards * (sizeof(qlora__module_name) + sizeof(char*));
    qlora__module_name* shards = (qlora__module_name*)qlora__alloc(ctx, bytes);
    if (shards == NULL) {
        return QLORA_ERR_MEMORY;
    }
    const char** names = (const char**)(void*)(shards + g->shards);
    for (uint32_t i = 0; i < g->shards; i++) {
        qlora__merge_shard_name(g, i, &shards[i]);
        names[i] = shards[i].text;
    }
    for (uint32_t i = 0; i < g->count; i++) {
        g->names[i] = g->items[i].tensor->name;
        g->shard_of[i] = g->items[i].shard;
    }
    qlora_result r =
        qlora__index_write(&ctx->env, g->dir, g->names, g->shard_of, g->count, names, g->total);
    qlora__free(ctx, shards, bytes);
    return r;
}

// Copies the other files of a model folder, such as those of the tokenizer.
static qlora_result qlora__merge_copy_files(const qlora__merge* g) {
    static const char* const files[] = {"generation_config.json",
                                        "tokenizer.json",
                                        "tokenizer_config.json",
                                        "special_tokens_map.json",
                                        "added_tokens.json",
                                        "vocab.json",
                                        "merges.txt",
                                        "tokenizer.model",
                                        "chat_template.jinja",
                                        "chat_template.json"};
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        char from[QLORA__PATH_ROOM];
        char to[QLORA__PATH_ROOM];
        bool exists = false;
        QLORA__TRY(qlora__path_join(&g->ctx->env, g->m->dir, files[i], from));
        QLORA__TRY(qlora__path_join(&g->ctx->env, g->dir, files[i], to));
        QLORA__TRY(qlora__file_exists(&g->ctx->env, from, &exists));
        if (exists) {
            QLORA__TRY(qlora__file_copy(&g->ctx->env, from, to));
        }
    }
    return QLORA_OK;
}

static void qlora__merge_close(qlora__merge* g) {
    qlora_ctx* ctx = g->ctx;
    qlora__free(ctx, g->items, g->room * sizeof *g->items);
    qlora__free(ctx, g->entries, g->room * sizeof *g->entries);
    qlora__free(ctx, g->members, g->room * sizeof *g->members);
    qlora__free(ctx, g->names, g->room * sizeof *g->names);
    qlora__free(ctx, g->shard_of, g->room * sizeof *g->shard_of);
    qlora__free(ctx, g->values, g->elements * 4);
    qlora__free(ctx, g->packed, g->elements * 2);
    qlora__folder_close(&ctx->env, &g->folder);
}

static qlora_result qlora__merge_open(qlora__merge* g, uint64_t shard_bytes) {
    qlora_ctx* ctx = g->ctx;
    uint32_t n = g->folder.count;
    g->items = (qlora__merge_item*)qlora__alloc(ctx, n * sizeof *g->items);
    g->room = n;
    g->entries =
        g->items != NULL ? (qlora__st_entry*)qlora__alloc(ctx, n * sizeof *g->entries) : NULL;
    g->members = g->entries != NULL ? (uint32_t*)qlora__alloc(ctx, n * sizeof *g->members) : NULL;
    g->names = g->members != NULL ? (const char**)qlora__alloc(ctx, n * sizeof *g->names) : NULL;
    g->shard_of = g->names != NULL ? (uint32_t*)qlora__alloc(ctx, n * sizeof *g->shard_of) : NULL;
    if (g->shard_of == NULL) {
        return QLORA_ERR_MEMORY;
    }
    QLORA__TRY(qlora__merge_plan(g, shard_bytes));
    g->elements = (size_t)qlora__max((int64_t)1 << 20, g->most_cols);
    g->values = (float*)qlora__alloc(ctx, g->elements * 4);
    g->packed = g->values != NULL ? (uint8_t*)qlora__alloc(ctx, g->elements * 2) : NULL;
    return g->packed != NULL ? QLORA_OK : QLORA_ERR_MEMORY;
}

// Writes config.json last: without it, the folder is not a model.
static qlora_result qlora__merge_run(qlora__merge* g, uint64_t shard_bytes) {
    QLORA__TRY(qlora__merge_open(g, shard_bytes));
    QLORA__TRY(qlora__merge_tell(g));
    QLORA__TRY(qlora__dir_make(&g->ctx->env, g->dir));
    for (uint32_t i = 0; i < g->shards; i++) {
        QLORA__TRY(qlora__merge_shard(g, i));
    }
    // Such a file, left by an earlier attempt with a different number of shards, would be read
    // first.
    qlora__file_remove(&g->ctx->env, g->dir,
                       g->shards > 1 ? "model.safetensors" : "model.safetensors.index.json");
    if (g->shards > 1) {
        QLORA__TRY(qlora__merge_index(g));
    }
    QLORA__TRY(qlora__merge_copy_files(g));
    return qlora__config_export(&g->ctx->env, g->m->dir, g->dir,
                                g->dtype == QLORA_F32    ? "float32"
                                : g->dtype == QLORA_BF16 ? "bfloat16"
                                                         : "float16");
}

static qlora_result qlora__merge_need(qlora_ctx* ctx, const qlora_model* m,
                                      const qlora_merge_desc* d) {
    char path[QLORA__PATH_ROOM];
    bool exists = false;
    if (d == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "the merge desc is NULL");
    }
    if (d->reserved_must_be_zero0 != 0 || d->reserved_must_be_zero1 != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "the merge desc was not zeroed before its fields were set");
    }
    if (d->dir == NULL || d->dir[0] == '\0') {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "desc.dir is %s",
                           d->dir == NULL ? "NULL" : "empty");
    }
    if (d->dtype != QLORA_F32 && d->dtype != QLORA_BF16 && d->dtype != QLORA_F16) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "desc.dtype is %d; it must be QLORA_F32, QLORA_BF16 or QLORA_F16",
                           (int)d->dtype);
    }
    if (d->base != QLORA_MERGE_ORIGINAL && d->base != QLORA_MERGE_TRAINED) {
        return qlora__fail(
            ctx, QLORA_ERR_ARGUMENT,
            "desc.base is %d; it must be QLORA_MERGE_ORIGINAL or QLORA_MERGE_TRAINED",
            (int)d->base);
    }
    if (m->dir == NULL) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "the model has random weights and no folder to merge into");
    }
    QLORA__TRY(qlora__not_in_capture(ctx, "merging"));
    // This also protects the folder of the base from being overwritten, however its path is
    // written.
    QLORA__TRY(qlora__path_join(&ctx->env, d->dir, "config.json", path));
    QLORA__TRY(qlora__file_exists(&ctx->env, path, &exists));
    if (exists) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "%s already exists; choose a folder that does not contain a model",
                           path);
    }
    return QLORA_OK;
}

static qlora_result qlora__merge_save(qlora_ctx* ctx, const qlora_model* m,
                                      const qlora_merge_desc* desc) {
    QLORA__TRY(qlora__merge_need(ctx, m, desc));
    qlora__merge g;
    memset(&g, 0, sizeof g);
    g.ctx = ctx;
    g.m = m;
    g.dir = desc->dir;
    g.dtype = desc->dtype;
    g.trained = desc->base == QLORA_MERGE_TRAINED;
    g.progress = desc->progress;
    g.user = desc->progress_user;
    QLORA__TRY(qlora__folder_open(&ctx->env, m->dir, &g.folder));
    qlora_result r =
        qlora__merge_run(&g, desc->shard_bytes != 0 ? desc->shard_bytes : (uint64_t)5000000000u);
    qlora__merge_close(&g);
    return r;
}

qlora_result qlora_merge_save(qlora_model* model, const qlora_merge_desc* desc) {
    qlora_ctx* ctx = qlora__model_ctx(model);
    QLORA__ENTER(ctx, "qlora_merge_save");
    return qlora__leave(ctx, qlora__merge_save(ctx, model, desc));
}

//@@ src/train/trainer.h

// ---- the trainer --------------------------------------------------------------------------------

// More than the host can be ahead of the device, since every update also takes a slot of the ring.
#define QLORA__RECORDS 8

// The results of a step, copied from the device; pinned memory on CUDA.
typedef struct qlora__record {
    float totals[4];  // losses, their rounding error, weights
    float results[2]; // norm, scale
    qlora_adamw_state adamw;
    int32_t flag; // an id, a position or a label was out of range
} qlora__record;

// The facts about the same step that the host knows.
typedef struct qlora__report {
    void* event; // recorded after the copies into the record
    int64_t step;
    int64_t tokens;
    double lr;
} qlora__report;

enum {
    QLORA__PIECE_BEGIN,
    QLORA__PIECE_FORWARD_ATTENTION,
    QLORA__PIECE_FORWARD_MLP,
    QLORA__PIECE_HEAD,
    QLORA__PIECE_TURN,
    QLORA__PIECE_BACKWARD_MLP,
    QLORA__PIECE_BACKWARD_ATTENTION,
    QLORA__PIECE_UPDATE,
    QLORA__PIECE_KINDS
};

// A step that is run in slices.
typedef struct qlora__sliced {
    bool begun;
    const qlora_batch* batches;
    int64_t count;
    int64_t at;    // current batch
    int64_t piece; // next piece of that batch
    double total_labels;
    double expected[QLORA__PIECE_KINDS]; // milliseconds per piece of each kind; 0 = not known yet
} qlora__sliced;

struct qlora_trainer {
    qlora_ctx* ctx;
    qlora_model* m;
    qlora_train_desc desc; // defaults resolved
    qlora__record* records;
    qlora__report reports[QLORA__RECORDS];
    bool use_graphs;
    qlora_graph** graphs; // one per number of head chunks
    int64_t graph_room;
    qlora_graph* update_graph;
    int64_t step;       // number of updates queued so far
    int64_t tokens;     // of the step that is being accumulated
    bool failed;        // a call failed in the middle of the step
    qlora__micro micro; // current
    qlora__sliced sliced;
};

static qlora_ctx* qlora__trainer_ctx(const qlora_trainer* t) {
    return t != NULL ? t->ctx : NULL;
}

// The index of the record of a step.
static int qlora__record_of(int64_t step) {
    return (int)(step % QLORA__RECORDS);
}

static qlora_result qlora__train_desc_check(qlora_ctx* ctx, const qlora_train_desc* d) {
    if (d->reserved_must_be_zero0 != 0 || d->reserved_must_be_zero1 != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "the train desc was not zeroed before its fields were set");
    }
    const struct {
        const char* name;
        double value;
        double least;
        double below;
    } numbers[] = {{"desc.lr", d->lr, -1e300, 1e300},
                   {"desc.beta1", d->beta1, 0.0, 1.0},
                   {"desc.beta2", d->beta2, 0.0, 1.0},
                   {"desc.eps", d->eps, 0.0, 1e300},
                   {"desc.weight_decay", d->weight_decay, 0.0, 1e300},
                   {"desc.max_norm", d->max_norm, -1e300, 1e300}};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        QLORA__TRY(qlora__need_real(ctx, numbers[i].name, numbers[i].value, numbers[i].least,
                                    numbers[i].below));
    }
    QLORA__TRY(
        qlora__need_whole(ctx, "desc.schedule", (int64_t)d->schedule, 0, QLORA_SCHEDULE_CONSTANT));
    QLORA__TRY(qlora__need_whole(ctx, "desc.warmup_steps", d->warmup_steps, 0, INT64_MAX));
    QLORA__TRY(qlora__need_whole(ctx, "desc.total_steps", d->total_steps, 0, INT64_MAX));
    return qlora__need_whole(ctx, "desc.keep_checkpoints", d->keep_checkpoints, 0, 64);
}

static qlora_result qlora__train_desc_resolve(qlora_ctx* ctx, const qlora_train_desc* given,
                                              qlora_train_desc* d) {
    memset(d, 0, sizeof *d);
    if (given != NULL) {
        QLORA__TRY(qlora__train_desc_check(ctx, given));
        *d = *given;
    }
    d->lr = d->lr < 0.0 ? 0.0 : d->lr > 0.0 ? d->lr : 2e-4;
    d->beta1 = d->beta1 > 0.0 ? d->beta1 : 0.9;
    d->beta2 = d->beta2 > 0.0 ? d->beta2 : 0.999;
    d->eps = d->eps > 0.0 ? d->eps : 1e-8;
    d->max_norm = d->max_norm < 0.0 ? -1.0 : d->max_norm > 0.0 ? d->max_norm : 1.0;
    d->keep_checkpoints = d->keep_checkpoints > 0 ? d->keep_checkpoints : 2;
    return QLORA_OK;
}

static void qlora__trainer_drop(qlora_ctx* ctx, qlora_graph* graph) {
    if (graph != NULL) {
        qlora_result ignored = qlora__graph_destroy(ctx, graph);
        (void)ignored;
    }
}

static void qlora__trainer_free(qlora_trainer* t) {
    qlora_ctx* ctx = t->ctx;
    for (int64_t i = 0; i < t->graph_room && t->graphs != NULL; i++) {
        qlora__trainer_drop(ctx, t->graphs[i]);
    }
    qlora__trainer_drop(ctx, t->update_graph);
    qlora__free(ctx, t->graphs, (size_t)t->graph_room * sizeof *t->graphs);
    for (int i = 0; i < QLORA__RECORDS; i++) {
        qlora__event_destroy(ctx, t->reports[i].event);
    }
    qlora__pinned_free(ctx, t->records, QLORA__RECORDS * sizeof *t->records);
    qlora__free(ctx, t, sizeof *t);
}

static qlora_result qlora__trainer_build(qlora_ctx* ctx, qlora_model* m, qlora_trainer* t) {
    t->ctx = ctx;
    t->m = m;
    t->use_graphs = !t->desc.eager && !qlora__on_cpu(ctx);
    int64_t room = qlora__ceil_div(m->plan.tokens, m->plan.head_chunk) + 1;
    t->graphs = (qlora_graph**)qlora__alloc_zero(ctx, (size_t)room * sizeof *t->graphs);
    if (t->graphs == NULL) {
        return QLORA_ERR_MEMORY;
    }
    t->graph_room = room;
    size_t bytes = QLORA__RECORDS * sizeof *t->records;
    t->records = (qlora__record*)qlora__pinned_alloc(ctx, bytes);
    if (t->records == NULL) {
        return QLORA_ERR_MEMORY;
    }
    memset(t->records, 0, bytes);
    for (int i = 0; i < QLORA__RECORDS; i++) {
        QLORA__TRY(qlora__event_create(ctx, &t->reports[i].event));
    }
    const qlora__adamw_numbers numbers = {t->desc.lr, t->desc.beta1, t->desc.beta2, t->desc.eps,
                                          t->desc.weight_decay};
    QLORA__TRY(qlora__optimizer_start(ctx, m, t->desc.max_norm, &numbers));
    QLORA__TRY(qlora__tensor_zero(ctx, &m->flag));
    return qlora__tensor_zero(ctx, &m->totals);
}

static qlora_result qlora__trainer_create(qlora_ctx* ctx, qlora_model* m,
                                          const qlora_train_desc* desc, qlora_trainer** out) {
    if (out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    if (!qlora__trains(m)) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "the model was opened for evaluation; open it with "
                           "QLORA_PURPOSE_TRAIN");
    }
    if (m->trainers > 0) {
        return qlora__fail(ctx, QLORA_ERR_STATE, "the model already has a trainer");
    }
    QLORA__TRY(qlora__not_in_capture(ctx, "creating a trainer"));
    qlora_trainer* t = (qlora_trainer*)qlora__alloc_zero(ctx, sizeof *t);
    if (t == NULL) {
        return QLORA_ERR_MEMORY;
    }
    t->ctx = ctx;
    qlora_result r = qlora__train_desc_resolve(ctx, desc, &t->desc);
    r = r == QLORA_OK ? qlora__trainer_build(ctx, m, t) : r;
    if (r != QLORA_OK) {
        qlora__trainer_free(t);
        return r;
    }
    m->trainers++;
    ctx->living[QLORA__TRAINERS]++;
    *out = t;
    return QLORA_OK;
}

qlora_result qlora_trainer_create(qlora_model* model, const qlora_train_desc* desc,
                                  qlora_trainer** out) {
    qlora_ctx* ctx = qlora__model_ctx(model);
    QLORA__ENTER(ctx, "qlora_trainer_create");
    return qlora__leave(ctx, qlora__trainer_create(ctx, model, desc, out));
}

qlora_result qlora_trainer_destroy(qlora_trainer* trainer) {
    if (trainer == NULL) {
        return QLORA_OK;
    }
    qlora_ctx* ctx = trainer->ctx;
    QLORA__TRY(qlora__enter_destroy(ctx, "qlora_trainer_destroy"));
    qlora_result r = qlora__not_in_capture(ctx, "destroying a trainer");
    if (r == QLORA_OK) {
        trainer->m->trainers--;
        trainer->m->micro_begun = false;
        ctx->living[QLORA__TRAINERS]--;
        qlora__trainer_free(trainer);
    }
    return qlora__leave(ctx, r);
}

// ---- settings that change -----------------------------------------------------------------------

static qlora_result qlora__train_set(qlora_trainer* t, const qlora_train_desc* desc) {
    qlora_ctx* ctx = t->ctx;
    qlora_train_desc d;
    if (desc == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "desc is NULL");
    }
    QLORA__TRY(qlora__not_in_capture(ctx, "changing the settings of a trainer"));
    if (t->tokens > 0 || t->sliced.begun) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "a step is in progress; finish it or drop it with qlora_train_cancel "
                           "before changing settings");
    }
    QLORA__TRY(qlora__train_desc_resolve(ctx, desc, &d));
    const char* fixed = d.seed != t->desc.seed                     ? "seed"
                        : d.eager != t->desc.eager                 ? "eager"
                        : d.require_graph != t->desc.require_graph ? "require_graph"
                                                                   : NULL;
    if (fixed != NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "desc.%s differs from that of the trainer and cannot be changed", fixed);
    }
    QLORA__TRY(qlora__clip_set(ctx, &t->m->clip, (float)d.max_norm));
    t->desc = d;
    return QLORA_OK;
}

qlora_result qlora_train_set(qlora_trainer* trainer, const qlora_train_desc* desc) {
    QLORA__ENTER(qlora__trainer_ctx(trainer), "qlora_train_set");
    return qlora__leave(trainer->ctx, qlora__train_set(trainer, desc));
}

//@@ src/train/step.h

// ---- steps --------------------------------------------------------------------------------------

// A micro-batch is computed in pieces. Sets the kind of piece number n, and the number of its layer
// or chunk; false past the last piece.
static bool qlora__piece_at(const qlora_trainer* t, int64_t n, int* kind, int64_t* index) {
    int64_t layers = t->m->plan.config.layers;
    int64_t chunks = t->micro.chunks;
    int64_t turn = 1 + 2 * layers + chunks;
    *index = 0;
    if (n == 0) {
        *kind = QLORA__PIECE_BEGIN;
    } else if (n <= 2 * layers) {
        *kind = n % 2 == 1 ? QLORA__PIECE_FORWARD_ATTENTION : QLORA__PIECE_FORWARD_MLP;
        *index = (n - 1) / 2;
    } else if (n < turn) {
        *kind = QLORA__PIECE_HEAD;
        *index = n - 1 - 2 * layers;
    } else if (n == turn) {
        *kind = QLORA__PIECE_TURN;
    } else if (n <= turn + 2 * layers) {
        int64_t back = n - turn - 1;
        *kind = back % 2 == 0 ? QLORA__PIECE_BACKWARD_MLP : QLORA__PIECE_BACKWARD_ATTENTION;
        *index = layers - 1 - back / 2;
    } else {
        return false;
    }
    return true;
}

static qlora_result qlora__piece_run(const qlora__pass* pass, int kind, int64_t index) {
    qlora_tensor totals = qlora__window(&pass->m->totals, 1, 0, 3);
    switch (kind) {
    case QLORA__PIECE_BEGIN:
        return qlora__forward_begin(pass);
    case QLORA__PIECE_FORWARD_ATTENTION:
        return qlora__forward_attention(pass, index);
    case QLORA__PIECE_FORWARD_MLP:
        return qlora__forward_mlp(pass, index);
    case QLORA__PIECE_HEAD:
        return qlora__head_chunk(pass, index, &totals, true);
    case QLORA__PIECE_TURN:
        QLORA__TRY(qlora__head_end(pass));
        return qlora__backward_begin(pass);
    case QLORA__PIECE_BACKWARD_MLP:
        return qlora__backward_mlp(pass, index);
    default:
        QLORA__TRY(qlora__backward_attention(pass, index));
        return index == 0 ? qlora__backward_end(pass) : QLORA_OK;
    }
}

static qlora_result qlora__micro_run(qlora_ctx* ctx, void* user) {
    qlora_trainer* t = (qlora_trainer*)user;
    qlora__pass pass = qlora__pass_of(t->m, t->micro.rows, true);
    int kind = 0;
    int64_t index = 0;
    (void)ctx;
    for (int64_t n = 0; qlora__piece_at(t, n, &kind, &index); n++) {
        QLORA__TRY(qlora__piece_run(&pass, kind, index));
    }
    return QLORA_OK;
}

static qlora_result qlora__update_run(qlora_ctx* ctx, void* user) {
    return qlora__update(ctx, ((qlora_trainer*)user)->m);
}

// Replays the graph, captures it the first time, or runs without graphs. After a failed capture, a
// warning is logged once, and no further capture is tried.
static qlora_result qlora__run(qlora_trainer* t, uint64_t key, qlora_graph_fn fn,
                               qlora_graph** graph) {
    qlora_ctx* ctx = t->ctx;
    if (!t->use_graphs) {
        return fn(ctx, t);
    }
    if (*graph != NULL && !qlora__graph_is_valid(*graph)) {
        QLORA__TRY(qlora__graph_destroy(ctx, *graph));
        *graph = NULL;
    }
    if (*graph != NULL) {
        return qlora__graph_replay(ctx, *graph, key);
    }
    qlora_result r = qlora__graph_capture(ctx, key, fn, t, graph);
    if (r == QLORA_OK || r == QLORA_ERR_DEVICE_LOST || t->desc.require_graph) {
        return r;
    }
    QLORA__LOG(ctx, WARN, GRAPH, "steps run without graphs from now on: %.400s", ctx->env.error);
    t->use_graphs = false;
    ctx->env.error[0] = '\0';
    return fn(ctx, t);
}

// A step in slices accepts no other call that changes it.
static qlora_result qlora__not_sliced(qlora_ctx* ctx, const qlora_trainer* t) {
    if (t->sliced.begun) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "a step is running in slices; finish it with qlora_train_slice or drop "
                           "it with qlora_train_cancel");
    }
    return QLORA_OK;
}

// What every call that computes part of a step needs.
static qlora_result qlora__step_need(qlora_ctx* ctx, const qlora_trainer* t) {
    if (!t->m->use_adapters) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "the adapters are off; switch them on with qlora_adapter_use");
    }
    if (t->failed) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "an earlier call of this step failed, and its gradients are incomplete; "
                           "drop the step with qlora_train_cancel");
    }
    return qlora__not_in_capture(ctx, "a training call");
}

static qlora_result qlora__trainer_need(qlora_ctx* ctx, const qlora_trainer* t) {
    QLORA__TRY(qlora__step_need(ctx, t));
    return qlora__not_sliced(ctx, t);
}

static qlora_result qlora__labels_check(qlora_ctx* ctx, double total_labels) {
    if (total_labels > 1e15) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "total_labels is %g; the maximum is 1e15",
                           total_labels);
    }
    if (!(total_labels > 0.0)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "total_labels is %g; a step needs at least one label with a positive "
                           "weight",
                           total_labels);
    }
    return QLORA_OK;
}

static qlora_result qlora__micro_send(qlora_trainer* t, const qlora_batch* batch,
                                      double total_labels) {
    qlora__micro_desc desc = {total_labels, t->desc.seed, t->step};
    QLORA__TRY(qlora__batch_send(t->ctx, t->m, batch, &desc, &t->micro));
    t->tokens += t->micro.tokens;
    return QLORA_OK;
}

// Queues a micro-batch that has been checked.
static qlora_result qlora__micro_queue(qlora_trainer* t, const qlora_batch* batch,
                                       double total_labels) {
    t->failed = true;
    QLORA__TRY(qlora__micro_send(t, batch, total_labels));
    int64_t chunks = t->micro.chunks;
    QLORA__TRY(qlora__run(t, (uint64_t)chunks, qlora__micro_run, &t->graphs[chunks]));
    t->failed = false;
    return QLORA_OK;
}

static qlora_result qlora__train_micro(qlora_trainer* t, const qlora_batch* batch,
                                       double total_labels) {
    int64_t tokens = 0;
    QLORA__TRY(qlora__trainer_need(t->ctx, t));
    QLORA__TRY(qlora__labels_check(t->ctx, total_labels));
    QLORA__TRY(qlora__batch_check(t->ctx, t->m, batch, &tokens));
    return qlora__micro_queue(t, batch, total_labels);
}

qlora_result qlora_train_micro(qlora_trainer* trainer, const qlora_batch* batch,
                               double total_labels) {
    QLORA__ENTER(qlora__trainer_ctx(trainer), "qlora_train_micro");
    return qlora__leave(trainer->ctx, qlora__train_micro(trainer, batch, total_labels));
}

static double qlora__schedule_lr(const qlora_train_desc* d, int64_t step) {
    if (step < d->warmup_steps) {
        return d->lr * (double)(step + 1) / (double)d->warmup_steps;
    }
    if (d->schedule == QLORA_SCHEDULE_CONSTANT || d->total_steps <= d->warmup_steps) {
        return d->lr;
    }
    double done = (double)(step - d->warmup_steps) / (double)(d->total_steps - d->warmup_steps);
    done = done < 1.0 ? done : 1.0;
    return d->schedule == QLORA_SCHEDULE_LINEAR
               ? d->lr * (1.0 - done)
               : d->lr * 0.5 * (1.0 + cos(3.14159265358979323846 * done));
}

// Queues the copies of the results of a step to the host, without waiting for them.
static qlora_result qlora__record_send(qlora_trainer* t, double lr) {
    qlora_ctx* ctx = t->ctx;
    qlora_model* m = t->m;
    int at = qlora__record_of(t->step + 1);
    qlora__record* record = &t->records[at];
    const struct {
        void* to;
        const void* from;
        size_t bytes;
    } copies[] = {{record->totals, m->totals.data, 3 * sizeof(float)},
                  {record->results, qlora__clip_results(&m->clip), 2 * sizeof(float)},
                  {&record->adamw, m->adamw.data, sizeof(qlora_adamw_state)},
                  {&record->flag, m->flag.data, sizeof(int32_t)}};
    for (size_t i = 0; i < sizeof copies / sizeof copies[0]; i++) {
        QLORA__TRY(qlora__copy_out_later(ctx, copies[i].to, copies[i].from, copies[i].bytes));
    }
    // The CPU in double precision, for tests.
    if (qlora__on_cpu(ctx) && sizeof(QLORA__REAL) != sizeof(float)) {
        for (int i = 0; i < 3; i++) {
            record->totals[i] = (float)qlora__load(m->totals.data, QLORA_F32, i);
        }
        for (int i = 0; i < 2; i++) {
            record->results[i] = (float)qlora__clip_results(&m->clip)[i];
        }
    }
    QLORA__TRY(qlora__event_record(ctx, t->reports[at].event));
    t->reports[at].step = t->step + 1;
    t->reports[at].tokens = t->tokens;
    t->reports[at].lr = lr;
    qlora_tensor totals = qlora__window(&m->totals, 1, 0, 3);
    return qlora__tensor_zero(ctx, &totals);
}

// Queues the update, as a graph if steps are graphs, and the copies of its results.
static qlora_result qlora__update_send(qlora_trainer* t, bool graph) {
    qlora_ctx* ctx = t->ctx;
    qlora_model* m = t->m;
    qlora__slot* slot = NULL;
    t->failed = true;
    QLORA__TRY(qlora__ring_take(ctx, &m->ring, &slot));
    char* memory = slot->memory + m->batch.all.bytes;
    const qlora__adamw_numbers numbers = {qlora__schedule_lr(&t->desc, t->step), t->desc.beta1,
                                          t->desc.beta2, t->desc.eps, t->desc.weight_decay};
    memcpy(memory, &numbers, sizeof numbers);
    QLORA__TRY(qlora__slot_send(ctx, slot, m->adamw.data, memory, sizeof numbers));
    QLORA__TRY(graph ? qlora__run(t, (uint64_t)t->graph_room, qlora__update_run, &t->update_graph)
                     : qlora__update(ctx, m));
    QLORA__TRY(qlora__record_send(t, numbers.lr));
    t->step++;
    t->tokens = 0;
    t->failed = false;
    return QLORA_OK;
}

static qlora_result qlora__train_update(qlora_trainer* t) {
    QLORA__TRY(qlora__trainer_need(t->ctx, t));
    return qlora__update_send(t, true);
}

qlora_result qlora_train_update(qlora_trainer* trainer) {
    QLORA__ENTER(qlora__trainer_ctx(trainer), "qlora_train_update");
    return qlora__leave(trainer->ctx, qlora__train_update(trainer));
}

// ---- information --------------------------------------------------------------------------------

// Reports step number `step`, whose results have arrived.
static void qlora__info_fill(const qlora_trainer* t, int64_t step, qlora_train_info* out) {
    const qlora__record* r = &t->records[qlora__record_of(step)];
    const qlora__report* report = &t->reports[qlora__record_of(step)];
    memset(out, 0, sizeof *out);
    out->step = step;
    out->pending = t->step - step;
    out->graphs = t->use_graphs && t->update_graph != NULL && !qlora__on_cpu(t->ctx);
    out->waits = t->m->ring.waits;
    if (step == 0 || report->step != step) {
        return;
    }
    out->skipped = r->adamw.skipped;
    out->last_skipped = r->adamw.skip != 0;
    out->labels = (double)r->totals[2];
    out->loss = r->totals[2] > 0.0f
                    ? ((double)r->totals[0] + (double)r->totals[1]) / (double)r->totals[2]
                    : 0.0;
    out->tokens = report->tokens;
    out->grad_norm = r->results[0];
    out->lr = report->lr;
}

static qlora_result qlora__train_query(qlora_trainer* t, qlora_train_info* out) {
    qlora_ctx* ctx = t->ctx;
    if (out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    QLORA__TRY(qlora__not_in_capture(ctx, "waiting for a step"));
    QLORA__TRY(qlora__sync(ctx));
    QLORA__TRY(qlora__flag_read(ctx, t->m));
    qlora__info_fill(t, t->step, out);
    return QLORA_OK;
}

qlora_result qlora_train_query(qlora_trainer* trainer, qlora_train_info* out) {
    QLORA__ENTER(qlora__trainer_ctx(trainer), "qlora_train_query");
    return qlora__leave(trainer->ctx, qlora__train_query(trainer, out));
}

static qlora_result qlora__train_poll(qlora_trainer* t, qlora_train_info* out) {
    if (out == NULL) {
        return qlora__fail(t->ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    QLORA__TRY(qlora__not_in_capture(t->ctx, "polling a step"));
    int64_t step = t->step;
    for (bool done = step == 0; !done;) {
        QLORA__TRY(qlora__event_poll(t->ctx, t->reports[qlora__record_of(step)].event, &done));
        if (!done) {
            step--;
            done = step == 0 || step == t->step - QLORA__RECORDS;
        }
    }
    if (step > 0 && t->reports[qlora__record_of(step)].step == step) {
        QLORA__TRY(qlora__flag_check(t->ctx, t->records[qlora__record_of(step)].flag));
    }
    qlora__info_fill(t, step, out);
    return QLORA_OK;
}

qlora_result qlora_train_poll(qlora_trainer* trainer, qlora_train_info* out) {
    QLORA__ENTER(qlora__trainer_ctx(trainer), "qlora_train_poll");
    return qlora__leave(trainer->ctx, qlora__train_poll(trainer, out));
}

qlora_result qlora_gradient_read(qlora_trainer* trainer, int64_t index, float* out) {
    QLORA__ENTER(qlora__trainer_ctx(trainer), "qlora_gradient_read");
    qlora_ctx* ctx = trainer->ctx;
    qlora_model* m = trainer->m;
    return qlora__leave(ctx, qlora__parameter_read(ctx, m, &m->gradients, index, out));
}

// ---- whole steps --------------------------------------------------------------------------------

// Checks every batch of a step before anything is computed, and adds up the labels.
static qlora_result qlora__batches_check(qlora_trainer* t, const qlora_batch* batches,
                                         int64_t count, double* total_labels) {
    qlora_ctx* ctx = t->ctx;
    QLORA__TRY(qlora__trainer_need(ctx, t));
    if (t->tokens > 0) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "a step was started with qlora_train_micro; finish it with "
                           "qlora_train_update or drop it with qlora_train_cancel");
    }
    if (batches == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "batches is NULL");
    }
    QLORA__TRY(qlora__need_whole(ctx, "count", count, 1, INT64_MAX));
    *total_labels = 0.0;
    for (int64_t i = 0; i < count; i++) {
        int64_t tokens = 0;
        QLORA__TRY(qlora__batch_check(ctx, t->m, &batches[i], &tokens));
        *total_labels += qlora_batch_labels(&batches[i]);
    }
    return qlora__labels_check(ctx, *total_labels);
}

static qlora_result qlora__train_step(qlora_trainer* t, const qlora_batch* batches, int64_t count,
                                      qlora_train_info* out) {
    double total_labels = 0.0;
    QLORA__TRY(qlora__batches_check(t, batches, count, &total_labels));
    for (int64_t i = 0; i < count; i++) {
        QLORA__TRY(qlora__micro_queue(t, &batches[i], total_labels));
    }
    QLORA__TRY(qlora__update_send(t, true));
    return out != NULL ? qlora__train_query(t, out) : QLORA_OK;
}

qlora_result qlora_train_step(qlora_trainer* trainer, const qlora_batch* batches, int64_t count,
                              qlora_train_info* out) {
    QLORA__ENTER(qlora__trainer_ctx(trainer), "qlora_train_step");
    return qlora__leave(trainer->ctx, qlora__train_step(trainer, batches, count, out));
}

//@@ src/train/slice.h

// ---- steps in slices ----------------------------------------------------------------------------
//
// Runs the pieces of qlora__piece_at one by one, without graphs, and then the update: the same work
// in the same order as a whole step. A slice waits for each piece, so that the device is idle when
// it returns, and to measure how long pieces of that kind take.

static qlora_result qlora__train_begin(qlora_trainer* t, const qlora_batch* batches,
                                       int64_t count) {
    double total_labels = 0.0;
    QLORA__TRY(qlora__batches_check(t, batches, count, &total_labels));
    t->sliced.begun = true;
    t->sliced.batches = batches;
    t->sliced.count = count;
    t->sliced.at = 0;
    t->sliced.piece = 0;
    t->sliced.total_labels = total_labels;
    return QLORA_OK;
}

qlora_result qlora_train_begin(qlora_trainer* trainer, const qlora_batch* batches, int64_t count) {
    QLORA__ENTER(qlora__trainer_ctx(trainer), "qlora_train_begin");
    return qlora__leave(trainer->ctx, qlora__train_begin(trainer, batches, count));
}

// The kind of the next piece.
static int qlora__slice_kind(const qlora_trainer* t, int64_t* index) {
    int kind = QLORA__PIECE_UPDATE;
    *index = 0;
    if (t->sliced.at < t->sliced.count && t->sliced.piece == 0) {
        return QLORA__PIECE_BEGIN; // t->micro is still that of the previous batch
    }
    if (t->sliced.at < t->sliced.count) {
        qlora__piece_at(t, t->sliced.piece, &kind, index);
    }
    return kind;
}

// Moves to the next piece.
static void qlora__slice_advance(qlora_trainer* t) {
    qlora__sliced* s = &t->sliced;
    int kind = 0;
    int64_t index = 0;
    s->piece++;
    if (!qlora__piece_at(t, s->piece, &kind, &index)) {
        s->at++;
        s->piece = 0;
    }
    t->m->micro_begun = s->piece > 0;
}

static qlora_result qlora__slice_piece(qlora_trainer* t, int kind, int64_t index, bool* done) {
    qlora__sliced* s = &t->sliced;
    if (kind == QLORA__PIECE_UPDATE) {
        QLORA__TRY(qlora__update_send(t, false));
        s->begun = false;
        *done = true;
        return qlora__sync(t->ctx);
    }
    if (s->piece == 0) { // the caller's memory may have changed since the step began
        int64_t tokens = 0;
        QLORA__TRY(qlora__batch_check(t->ctx, t->m, &s->batches[s->at], &tokens));
        QLORA__TRY(qlora__micro_send(t, &s->batches[s->at], s->total_labels));
    }
    qlora__pass pass = qlora__pass_of(t->m, t->micro.rows, true);
    QLORA__TRY(qlora__piece_run(&pass, kind, index));
    QLORA__TRY(qlora__sync(t->ctx));
    qlora__slice_advance(t);
    return QLORA_OK;
}

static qlora_result qlora__train_slice(qlora_trainer* t, double milliseconds, bool* out) {
    qlora_ctx* ctx = t->ctx;
    if (out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "done is NULL");
    }
    if (!t->sliced.begun) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "no step has been started; call qlora_train_begin first");
    }
    QLORA__TRY(qlora__step_need(ctx, t));
    bool done = false;
    double start = qlora__clock_ms();
    for (double now = start; !done;) {
        int64_t index = 0;
        int kind = qlora__slice_kind(t, &index);
        double* expected = &t->sliced.expected[kind];
        // A piece of a kind that has not been timed yet gets its own slice.
        if (now > start && (!(*expected > 0.0) || now - start + *expected > milliseconds)) {
            break;
        }
        t->failed = true;
        QLORA__TRY(qlora__slice_piece(t, kind, index, &done));
        t->failed = false;
        double end = qlora__clock_ms();
        double took = end - now > 1e-6 ? end - now : 1e-6;
        *expected = took > *expected ? took : 0.9 * *expected + 0.1 * took;
        now = end > start ? end : start + 1e-6;
    }
    *out = done;
    return QLORA_OK;
}

qlora_result qlora_train_slice(qlora_trainer* trainer, double milliseconds, bool* done) {
    QLORA__ENTER(qlora__trainer_ctx(trainer), "qlora_train_slice");
    return qlora__leave(trainer->ctx, qlora__train_slice(trainer, milliseconds, done));
}

static qlora_result qlora__train_cancel(qlora_trainer* t) {
    qlora_ctx* ctx = t->ctx;
    qlora_model* m = t->m;
    QLORA__TRY(qlora__not_in_capture(ctx, "a training call"));
    QLORA__TRY(qlora__tensor_zero(ctx, &m->gradients));
    qlora_tensor totals = qlora__window(&m->totals, 1, 0, 3);
    QLORA__TRY(qlora__tensor_zero(ctx, &totals));
    QLORA__TRY(qlora__tensor_zero(ctx, &m->flag));
    t->sliced.begun = false;
    t->tokens = 0;
    t->failed = false;
    m->micro_begun = false;
    return QLORA_OK;
}

qlora_result qlora_train_cancel(qlora_trainer* trainer) {
    QLORA__ENTER(qlora__trainer_ctx(trainer), "qlora_train_cancel");
    return qlora__leave(trainer->ctx, qlora__train_cancel(trainer));
}

//@@ src/train/checkpoint.h

// ---- checkpoints --------------------------------------------------------------------------------

//   DIR/step-N/   adapter_model.safetensors and adapter_config.json, which PEFT reads; trained
//                 norms if any; and, written last, state.safetensors: moments, counters, settings,
//                 position, checksums
//   DIR/latest    names of the complete checkpoints, newest first; a new checkpoint becomes valid
//                 when this file is replaced, so a crash leaves either the old one or the new one
//   DIR/pending   names of folders to remove after a crash unless `latest` contains them
//
// A folder that is named in `latest` is never written to.

#define QLORA__STATE_FILE "state.safetensors"
#define QLORA__MAX_KEPT 64
#define QLORA__STATE_ROWS 48

typedef struct qlora__ckpt_list {
    qlora__module_name names[QLORA__MAX_KEPT + 2];
    int count;
} qlora__ckpt_list;

static const char* const qlora__ckpt_files[] = {"adapter_model.safetensors", "adapter_config.json",
                                                QLORA__NORMS_FILE, QLORA__STATE_FILE};
#define QLORA__CKPT_HASHED 3 // the first three; the state file contains its own checksum

static bool qlora__ckpt_has(const qlora__ckpt_list* list, const char* name) {
    for (int i = 0; i < list->count; i++) {
        if (strcmp(list->names[i].text, name) == 0) {
            return true;
        }
    }
    return false;
}

// Accepts only names that this code creates, so that no file can refer to a path outside the
// folder.
static bool qlora__ckpt_name_fits(const char* name, size_t size) {
    bool fits = size > 5 && size < 40 && memcmp(name, "step-", 5) == 0;
    for (size_t i = 5; i < size && fits; i++) {
        fits = (name[i] >= '0' && name[i] <= '9') || name[i] == '-';
    }
    return fits;
}

// Reads a file of names, one per line; a missing file is an empty list.
static qlora_result qlora__ckpt_list_read(qlora_ctx* ctx, const char* dir, const char* file,
                                          qlora__ckpt_list* list) {
    char path[QLORA__PATH_ROOM];
    bool exists = false;
    memset(list, 0, sizeof *list);
    QLORA__TRY(qlora__path_join(&ctx->env, dir, file, path));
    QLORA__TRY(qlora__file_exists(&ctx->env, path, &exists));
    if (!exists) {
        return QLORA_OK;
    }
    qlora__map map;
    QLORA__TRY(qlora__map_open(&ctx->env, path, &map));
    const char* text = (const char*)map.data;
    bool good = map.size > 0 && map.size < 8192 && text[map.size - 1] == '\n';
    for (size_t at = 0; good && at < map.size;) {
        size_t size = 0;
        while (text[at + size] != '\n') {
            size++;
        }
        good = list->count <= QLORA__MAX_KEPT && qlora__ckpt_name_fits(text + at, size);
        if (good) {
            memcpy(list->names[list->count].text, text + at, size);
            list->names[list->count++].text[size] = '\0';
        }
        at += size + 1;
    }
    qlora__map_close(&ctx->env, &map);
    return good
               ? QLORA_OK
               : qlora__fail(ctx, QLORA_ERR_FORMAT,
                             "%s is damaged; it must contain one checkpoint folder per line", path);
}

static qlora_result qlora__ckpt_list_write(qlora_ctx* ctx, const char* dir, const char* file,
                                           const qlora__ckpt_list* list) {
    char path[QLORA__PATH_ROOM];
    qlora__string text;
    QLORA__TRY(qlora__path_join(&ctx->env, dir, file, path));
    qlora__string_begin(&ctx->env, &text);
    for (int i = 0; i < list->count; i++) {
        qlora__string_puts(&text, list->names[i].text);
        qlora__string_puts(&text, "\n");
    }
    qlora_result r = text.result;
    if (r == QLORA_OK) {
        r = qlora__file_write(&ctx->env, path, text.data, text.size);
    }
    qlora__string_free(&text);
    return r;
}

// Removes a checkpoint. Errors are ignored, because leftovers only take up disk space.
static void qlora__ckpt_remove(qlora_ctx* ctx, const char* dir, const char* name) {
    char folder[QLORA__PATH_ROOM];
    if (qlora__path_join(&ctx->env, dir, name, folder) != QLORA_OK) {
        return;
    }
    // The state is removed first: without it, the folder is not a checkpoint.
    for (int i = (int)(sizeof qlora__ckpt_files / sizeof qlora__ckpt_files[0]) - 1; i >= 0; i--) {
        char temporary[64];
        snprintf(temporary, sizeof temporary, "%s.tmp", qlora__ckpt_files[i]);
        qlora__file_remove(&ctx->env, folder, qlora__ckpt_files[i]);
        qlora__file_remove(&ctx->env, folder, temporary);
    }
    ctx->env.files.remove(folder, ctx->env.files.user);
}

// The numbers stored in a checkpoint. SAME: a different value is an error, because it would change
// the results or their meaning; NOTED: a different value is logged; BACK: the value is restored.
// PRINT: a hash, of which only the difference can be told.
typedef enum qlora__state_kind {
    QLORA__SAME,
    QLORA__PRINT,
    QLORA__NOTED,
    QLORA__BACK
} qlora__state_kind;

typedef struct qlora__state_row {
    const char* name;
    qlora__state_kind kind;
    bool real; // value holds the bits of a double
    int64_t value;
    int64_t* back;
} qlora__state_row;

typedef struct qlora__state {
    int64_t step;
    int64_t tokens;
    int64_t lr_bits;
    int64_t updates;
    int64_t skipped;
    int64_t skip;
    float record[6]; // totals and results of a qlora__record
    qlora__state_row rows[QLORA__STATE_ROWS];
    int count;
} qlora__state;

static void qlora__state_add(qlora__state* s, const char* name, qlora__state_kind kind,
                             int64_t value) {
    QLORA_ASSERT(s->count < QLORA__STATE_ROWS);
    qlora__state_row* row = &s->rows[s->count++];
    memset(row, 0, sizeof *row);
    row->name = name;
    row->kind = kind;
    row->value = value;
}

static void qlora__state_add_real(qlora__state* s, const char* name, qlora__state_kind kind,
                                  double value) {
    int64_t bits = 0;
    memcpy(&bits, &value, sizeof bits);
    qlora__state_add(s, name, kind, bits);
    s->rows[s->count - 1].real = true;
}

static void qlora__state_add_back(qlora__state* s, const char* name, int64_t* back) {
    qlora__state_add(s, name, QLORA__BACK, *back);
    s->rows[s->count - 1].back = back;
}

static void qlora__state_add_machine(qlora__state* s, qlora_ctx* ctx) {
    int64_t capability = 0;
    int64_t driver = 0;
    int64_t cublas = 0;
#ifndef QLORA_NO_CUDA
    if (!qlora__on_cpu(ctx)) {
        capability = ctx->gpu->capability;
        driver = ctx->gpu->driver_version;
        cublas = ctx->gpu->cublas != NULL ? ctx->gpu->cublas_version : 0;
    }
#endif
    qlora__state_add(s, "version", QLORA__NOTED, QLORA_VERSION);
    qlora__state_add(s, "cuda", QLORA__NOTED, qlora__on_cpu(ctx) ? 0 : 1);
    qlora__state_add(s, "capability", QLORA__NOTED, capability);
    qlora__state_add(s, "driver", QLORA__NOTED, driver);
    qlora__state_add(s, "cublas", QLORA__NOTED, cublas);
}

// Fills the table from the trainer. The caller has set the fields of s that are restored.
static void qlora__state_fill(const qlora_trainer* t, qlora__state* s) {
    const qlora_model* m = t->m;
    const qlora_model_config* c = &m->plan.config;
    const qlora_train_desc* d = &t->desc;
    // On the GPU, every micro-batch has the planned number of rows, on which the choice of cuBLAS
    // kernels depends.
    qlora__state_kind tokens = qlora__on_cpu(t->ctx) ? QLORA__NOTED : QLORA__SAME;
    s->count = 0;
    qlora__state_add(s, "state_format", QLORA__SAME, 2);
    qlora__state_add(s, "mode", QLORA__SAME, (int64_t)m->plan.mode);
    qlora__state_add(s, "math", QLORA__SAME, (int64_t)m->math);
    qlora__state_add(s, "base", QLORA__SAME, (int64_t)m->desc.base);
    qlora__state_add(s, "single_quant", QLORA__SAME, m->desc.single_quant ? 1 : 0);
    qlora__state_add(s, "family", QLORA__SAME, (int64_t)c->family);
    qlora__state_add(s, "vocab", QLORA__SAME, c->vocab);
    qlora__state_add(s, "hidden", QLORA__SAME, c->hidden);
    qlora__state_add(s, "intermediate", QLORA__SAME, c->intermediate);
    qlora__state_add(s, "layers", QLORA__SAME, c->layers);
    qlora__state_add(s, "heads", QLORA__SAME, c->heads);
    qlora__state_add(s, "kv_heads", QLORA__SAME, c->kv_heads);
    qlora__state_add(s, "head_dim", QLORA__SAME, c->head_dim);
    qlora__state_add(s, "base_config", QLORA__PRINT, (int64_t)m->base_config);
    qlora__state_add(s, "base_weights", QLORA__PRINT, (int64_t)m->base_weights);
    qlora__state_add(s, "train_norms", QLORA__SAME, m->desc.train_norms ? 1 : 0);
    qlora__state_add_real(s, "dropout", QLORA__SAME, (double)m->desc.dropout);
    qlora__state_add(s, "dropout_seed", QLORA__SAME, (int64_t)d->seed);
    qlora__state_add(s, "tokens", tokens, m->plan.tokens);
    qlora__state_add(s, "head_chunk", QLORA__NOTED, m->plan.head_chunk);
    qlora__state_add(s, "recompute_layers", QLORA__NOTED, m->plan.recompute_layers);
    qlora__state_add(s, "cached_layers", QLORA__NOTED, m->plan.cached_layers);
    qlora__state_add_real(s, "lr", QLORA__NOTED, d->lr);
    qlora__state_add_real(s, "beta1", QLORA__NOTED, d->beta1);
    qlora__state_add_real(s, "beta2", QLORA__NOTED, d->beta2);
    qlora__state_add_real(s, "eps", QLORA__NOTED, d->eps);
    qlora__state_add_real(s, "weight_decay", QLORA__NOTED, d->weight_decay);
    qlora__state_add_real(s, "max_norm", QLORA__NOTED, d->max_norm);
    qlora__state_add(s, "schedule", QLORA__NOTED, (int64_t)d->schedule);
    qlora__state_add(s, "warmup_steps", QLORA__NOTED, d->warmup_steps);
    qlora__state_add(s, "total_steps", QLORA__NOTED, d->total_steps);
    qlora__state_add_machine(s, t->ctx);
    qlora__state_add_back(s, "step", &s->step);
    qlora__state_add_back(s, "last_tokens", &s->tokens);
    qlora__state_add_back(s, "last_lr", &s->lr_bits);
    qlora__state_add_back(s, "updates", &s->updates);
    qlora__state_add_back(s, "skipped", &s->skipped);
    qlora__state_add_back(s, "last_skipped", &s->skip);
}

static qlora_result qlora__ckpt_hash(qlora_ctx* ctx, const char* folder, const char* name,
                                     uint64_t* out) {
    char path[QLORA__PATH_ROOM];
    bool exists = false;
    *out = 0;
    QLORA__TRY(qlora__path_join(&ctx->env, folder, name, path));
    QLORA__TRY(qlora__file_exists(&ctx->env, path, &exists));
    if (exists) {
        qlora__map map;
        qlora__hash hash;
        QLORA__TRY(qlora__map_open(&ctx->env, path, &map));
        qlora__hash_begin(&hash);
        qlora__hash_add(&hash, map.data, (size_t)map.size);
        *out = qlora__hash_end(&hash);
        qlora__map_close(&ctx->env, &map);
    }
    return QLORA_OK;
}

// ---- saving -------------------------------------------------------------------------------------

static qlora_result qlora__state_write(qlora_trainer* t, const char* folder, const qlora__state* s,
                                       const void* position, size_t position_bytes) {
    qlora_ctx* ctx = t->ctx;
    const qlora_model* m = t->m;
    char path[QLORA__PATH_ROOM];
    char texts[QLORA__STATE_ROWS][24];
    const char* metadata[2 * QLORA__STATE_ROWS + 1];
    uint64_t hashes[QLORA__CKPT_HASHED];
    qlora__save_list list;
    for (int i = 0; i < QLORA__CKPT_HASHED; i++) {
        QLORA__TRY(qlora__ckpt_hash(ctx, folder, qlora__ckpt_files[i], &hashes[i]));
    }
    for (int i = 0; i < s->count; i++) {
        snprintf(texts[i], sizeof texts[i], "%lld", (long long)s->rows[i].value);
        metadata[2 * i] = s->rows[i].name;
        metadata[2 * i + 1] = texts[i];
    }
    metadata[2 * s->count] = NULL;
    QLORA__TRY(qlora__path_join(&ctx->env, folder, QLORA__STATE_FILE, path));
    QLORA__TRY(qlora__save_open(ctx, 2 * m->range_count + 3, &list));
    qlora__trained trained;
    for (int64_t i = 0; qlora__trained_at(m, i, &trained); i++) {
        qlora__save_add(&list, "m.", &m->moment1, &trained);
        qlora__save_add(&list, "v.", &m->moment2, &trained);
    }
    qlora__save_add_bytes(&list, "hashes", QLORA__ST_U64, hashes, sizeof hashes);
    qlora__save_add_bytes(&list, "record", QLORA__ST_F32, s->record, sizeof s->record);
    qlora__save_add_bytes(&list, "position", QLORA__ST_U8, position, position_bytes);
    qlora_result r = qlora__save_write(ctx, &list, path, metadata, true);
    qlora__save_close(ctx, &list);
    return r;
}

// Collects the state of the device and the trainer after waiting for all steps.
static qlora_result qlora__state_take(const qlora_trainer* t, qlora__state* s) {
    qlora_adamw_state adamw;
    memset(s, 0, sizeof *s);
    QLORA__TRY(qlora__copy_out(t->ctx, &adamw, t->m->adamw.data, sizeof adamw)); // waits
    s->step = t->step;
    const qlora__record* record = &t->records[qlora__record_of(t->step)];
    const qlora__report* report = &t->reports[qlora__record_of(t->step)];
    s->tokens = report->tokens;
    memcpy(&s->lr_bits, &report->lr, sizeof s->lr_bits);
    s->updates = adamw.updates;
    s->skipped = adamw.skipped;
    s->skip = adamw.skip;
    memcpy(s->record, record->totals, sizeof record->totals);
    memcpy(s->record + 4, record->results, sizeof record->results);
    qlora__state_fill(t, s);
    return QLORA_OK;
}

static qlora_result qlora__ckpt_fill(qlora_trainer* t, const char* dir, const char* name,
                                     const void* position, size_t position_bytes) {
    qlora_ctx* ctx = t->ctx;
    char folder[QLORA__PATH_ROOM];
    qlora__state state;
    QLORA__TRY(qlora__path_join(&ctx->env, dir, name, folder));
    QLORA__TRY(qlora__state_take(t, &state));
    QLORA__TRY(qlora__adapter_write(ctx, t->m, folder, t->m->dir));
    QLORA__TRY(qlora__state_write(t, folder, &state, position, position_bytes));
    return qlora__dir_sync(&ctx->env, dir); // the folder's own name
}

// Chooses a name that no complete checkpoint has: step-N, or step-N-2 and so on if step N is saved
// again.
static void qlora__ckpt_choose(const qlora_trainer* t, const qlora__ckpt_list* list,
                               qlora__module_name* out) {
    snprintf(out->text, sizeof out->text, "step-%lld", (long long)t->step);
    for (int i = 2; qlora__ckpt_has(list, out->text); i++) {
        snprintf(out->text, sizeof out->text, "step-%lld-%d", (long long)t->step, i);
    }
}

static qlora_result qlora__ckpt_need(qlora_trainer* t, const char* dir) {
    if (dir == NULL || dir[0] == '\0') {
        return qlora__fail(t->ctx, QLORA_ERR_ARGUMENT, "dir is %s", dir == NULL ? "NULL" : "empty");
    }
    QLORA__TRY(qlora__not_sliced(t->ctx, t));
    return qlora__not_in_capture(t->ctx, "saving or loading a checkpoint");
}

// Inserts name at the front, and moves names beyond `keep` to `dropped`.
static void qlora__ckpt_list_push(qlora__ckpt_list* list, const qlora__module_name* name, int keep,
                                  qlora__ckpt_list* dropped) {
    memset(dropped, 0, sizeof *dropped);
    for (int i = keep - 1; i < list->count; i++) {
        dropped->names[dropped->count++] = list->names[i];
    }
    list->count = list->count < keep - 1 ? list->count : keep - 1;
    for (int i = list->count; i > 0; i--) {
        list->names[i] = list->names[i - 1];
    }
    list->names[0] = *name;
    list->count++;
}

static qlora_result qlora__checkpoint_save(qlora_trainer* t, const char* dir, const void* position,
                                           size_t position_bytes) {
    qlora_ctx* ctx = t->ctx;
    qlora__ckpt_list list;
    qlora__ckpt_list pending;
    qlora__module_name name;
    QLORA__TRY(qlora__ckpt_need(t, dir));
    if (position == NULL && position_bytes > 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "position is NULL and position_bytes is %llu",
                           (unsigned long long)position_bytes);
    }
    if (t->tokens > 0) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "a step is in progress; call qlora_train_update before saving");
    }
    QLORA__TRY(qlora__dir_make(&ctx->env, dir));
    QLORA__TRY(qlora__ckpt_list_read(ctx, dir, "latest", &list));
    if (qlora__ckpt_list_read(ctx, dir, "pending", &pending) != QLORA_OK) {
        pending.count = 0; // only used to remove leftovers
    }
    for (int i = 0; i < pending.count; i++) {
        if (!qlora__ckpt_has(&list, pending.names[i].text)) {
            qlora__ckpt_remove(ctx, dir, pending.names[i].text);
        }
    }
    int keep = t->desc.keep_checkpoints;
    qlora__ckpt_choose(t, &list, &name);
    qlora__ckpt_list_push(&list, &name, keep, &pending);
    pending.names[pending.count++] = name;
    QLORA__TRY(qlora__ckpt_list_write(ctx, dir, "pending", &pending));
    qlora_result r = qlora__ckpt_fill(t, dir, name.text, position, position_bytes);
    if (r != QLORA_OK) {
        qlora__ckpt_remove(ctx, dir, name.text);
        qlora__file_remove(&ctx->env, dir, "pending");
        return r;
    }
    // If this fails, either list may be on the disk, so the old and the new checkpoint are both
    // kept.
    QLORA__TRY(qlora__ckpt_list_write(ctx, dir, "latest", &list));
    for (int i = 0; i + 1 < pending.count; i++) {
        qlora__ckpt_remove(ctx, dir, pending.names[i].text);
    }
    qlora__file_remove(&ctx->env, dir, "pending");
    QLORA__LOG(ctx, INFO, CHECKPOINT, "saved %s/%s", dir, name.text);
    ctx->env.error[0] = '\0';
    return QLORA_OK;
}

qlora_result qlora_checkpoint_save(qlora_trainer* trainer, const char* dir, const void* position,
                                   size_t position_bytes) {
    QLORA__ENTER(qlora__trainer_ctx(trainer), "qlora_checkpoint_save");
    return qlora__leave(trainer->ctx,
                        qlora__checkpoint_save(trainer, dir, position, position_bytes));
}

// ---- loading ------------------------------------------------------------------------------------

// Opens the state of a checkpoint and verifies all its files; QLORA_ERR_FORMAT if one is damaged.
static qlora_result qlora__ckpt_open(qlora_ctx* ctx, const char* folder, qlora__st* state) {
    char path[QLORA__PATH_ROOM];
    bool exists = false;
    QLORA__TRY(qlora__path_join(&ctx->env, folder, QLORA__STATE_FILE, path));
    QLORA__TRY(qlora__file_exists(&ctx->env, path, &exists));
    if (!exists) {
        return qlora__fail(ctx, QLORA_ERR_FORMAT, "%s is missing", path);
    }
    QLORA__TRY(qlora__st_open(&ctx->env, path, state));
    qlora_result r = qlora__st_verify(&ctx->env, state);
    const qlora__st_tensor* hashes = qlora__st_find(state, "hashes");
    if (r == QLORA_OK && (hashes == NULL || hashes->bytes != 8 * QLORA__CKPT_HASHED)) {
        r = qlora__fail(ctx, QLORA_ERR_FORMAT, "%s contains no checksums of the other files", path);
    }
    for (int i = 0; i < QLORA__CKPT_HASHED && r == QLORA_OK; i++) {
        uint64_t hash = 0;
        r = qlora__ckpt_hash(ctx, folder, qlora__ckpt_files[i], &hash);
        if (r == QLORA_OK && hash != qlora__load_u64(hashes->data + 8 * i)) {
            r = qlora__fail(ctx, QLORA_ERR_FORMAT, "%s/%s is %s", folder, qlora__ckpt_files[i],
                            hash == 0 ? "missing" : "damaged");
        }
    }
    if (r != QLORA_OK) {
        qlora__st_close(&ctx->env, state);
    }
    return r;
}

static bool qlora__state_number(const qlora__st* st, const char* name, int64_t* out) {
    char text[32];
    if (!qlora__st_metadata(st, name, text, sizeof text)) {
        return false;
    }
    bool negative = text[0] == '-';
    uint64_t value = 0;
    const char* p = text + (negative ? 1 : 0);
    size_t digits = 0;
    for (; *p >= '0' && *p <= '9' && digits < 19; p++) {
        value = value * 10 + (uint64_t)(*p - '0');
        digits++;
    }
    if (digits == 0 || *p != '\0' || value > (uint64_t)INT64_MAX + (negative ? 1u : 0u)) {
        return false;
    }
    *out = negative ? (int64_t)(0 - value) : (int64_t)value;
    return true;
}

static double qlora__state_show(const qlora__state_row* row, int64_t value) {
    double real = (double)value;
    if (row->real) {
        memcpy(&real, &value, sizeof real);
    }
    return real;
}

// Compares the numbers of a checkpoint with those of the trainer, and takes those that are
// restored.
static qlora_result qlora__state_compare(qlora_ctx* ctx, const qlora__st* st, qlora__state* s) {
    for (int i = 0; i < s->count; i++) {
        const qlora__state_row* row = &s->rows[i];
        int64_t value = 0;
        if (!qlora__state_number(st, row->name, &value)) {
            return qlora__fail(ctx, QLORA_ERR_FORMAT, "%s: %s is missing", st->label, row->name);
        }
        if (row->kind == QLORA__BACK) {
            *row->back = value;
        } else if (value != row->value && row->kind == QLORA__PRINT) {
            return qlora__fail(
                ctx, QLORA_ERR_STATE, "%s was saved for another base model: %s", st->label,
                strcmp(row->name, "base_config") == 0 ? "its config computes something else"
                                                      : "its weights are not the same");
        } else if (value != row->value && row->kind == QLORA__SAME) {
            return qlora__fail(ctx, QLORA_ERR_STATE,
                               "%s was saved with %s = %g, but this trainer has %g, so results "
                               "would differ",
                               st->label, row->name, qlora__state_show(row, value),
                               qlora__state_show(row, row->value));
        } else if (value != row->value) {
            QLORA__LOG(ctx, WARN, CHECKPOINT, "%s was saved with %s = %g, this trainer has %g",
                       st->label, row->name, qlora__state_show(row, value),
                       qlora__state_show(row, row->value));
        }
    }
    const qlora__st_tensor* record = qlora__st_find(st, "record");
    if (s->step < 0) {
        return qlora__fail(ctx, QLORA_ERR_FORMAT, "%s: step is %lld; it must not be negative",
                           st->label, (long long)s->step);
    }
    if (record == NULL || record->bytes != sizeof s->record) {
        return qlora__fail(ctx, QLORA_ERR_FORMAT, "%s: record has %llu bytes; it must have %d",
                           st->label, (unsigned long long)(record != NULL ? record->bytes : 0),
                           (int)sizeof s->record);
    }
    memcpy(s->record, record->data, sizeof s->record);
    return QLORA_OK;
}

// Finds the moments of a trained tensor in the file; which is 'm' or 'v'.
static qlora_result qlora__state_moment(qlora_ctx* ctx, const qlora__st* st, char which,
                                        const qlora__trained* t, const qlora__st_tensor** out) {
    char name[224];
    snprintf(name, sizeof name, "%c.%s", which, t->name);
    *out = qlora__st_find(st, name);
    if (*out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_STATE, "%s: %s is missing", st->label, name);
    }
    if ((*out)->dtype != QLORA__ST_F32 ||
        qlora__st_elements(*out) != (uint64_t)(t->rows * t->cols)) {
        return qlora__fail(ctx, QLORA_ERR_STATE, "%s: %s does not contain %lld F32 values",
                           st->label, name, (long long)(t->rows * t->cols));
    }
    return QLORA_OK;
}

// Checks that all moments are present; with a buffer for values, also loads them.
static qlora_result qlora__state_moments(qlora_ctx* ctx, const qlora_model* m, const qlora__st* st,
                                         float* values) {
    const struct {
        char which;
        const qlora_tensor* arena;
    } kinds[] = {{'m', &m->moment1}, {'v', &m->moment2}};
    qlora__trained t;
    for (int64_t i = 0; qlora__trained_at(m, i, &t); i++) {
        for (int k = 0; k < 2; k++) {
            const qlora__st_tensor* tensor = NULL;
            QLORA__TRY(qlora__state_moment(ctx, st, kinds[k].which, &t, &tensor));
            if (values != NULL) {
                qlora_tensor window;
                int64_t n = t.rows * t.cols;
                qlora__arena_window(kinds[k].arena, t.at, 1, n, &window);
                qlora__st_read_f32(tensor, 0, (uint64_t)n, values);
                QLORA__TRY(qlora__floats_in(ctx, window.data, n, values));
            }
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__state_apply(qlora_trainer* t, const qlora__st* st, const qlora__state* s,
                                       float* values) {
    qlora_ctx* ctx = t->ctx;
    qlora_model* m = t->m;
    qlora_adamw_state adamw;
    QLORA__TRY(qlora__state_moments(ctx, m, st, values));
    QLORA__TRY(qlora__copy_out(ctx, &adamw, m->adamw.data, sizeof adamw));
    adamw.updates = s->updates;
    adamw.skipped = s->skipped;
    adamw.skip = (int32_t)s->skip;
    QLORA__TRY(qlora__copy_in(ctx, m->adamw.data, &adamw, sizeof adamw));
    QLORA__TRY(qlora__tensor_zero(ctx, &m->gradients));
    QLORA__TRY(qlora__tensor_zero(ctx, &m->totals));
    QLORA__TRY(qlora__tensor_zero(ctx, &m->flag));
    QLORA__TRY(qlora__sync(ctx));
    qlora__record* record = &t->records[qlora__record_of(s->step)];
    qlora__report* report = &t->reports[qlora__record_of(s->step)];
    memcpy(record->totals, s->record, sizeof record->totals);
    memcpy(record->results, s->record + 4, sizeof record->results);
    record->adamw = adamw;
    record->flag = 0;
    report->step = s->step;
    report->tokens = s->tokens;
    memcpy(&report->lr, &s->lr_bits, sizeof report->lr);
    t->step = s->step;
    t->tokens = 0;
    t->failed = false;
    return QLORA_OK;
}

// Checks everything before anything is changed.
static qlora_result qlora__ckpt_load_one(qlora_trainer* t, const char* folder, const qlora__st* st,
                                         void* position, size_t* position_bytes) {
    qlora_ctx* ctx = t->ctx;
    qlora_model* m = t->m;
    qlora__state state;
    memset(&state, 0, sizeof state);
    qlora__state_fill(t, &state);
    QLORA__TRY(qlora__state_compare(ctx, st, &state));
    const qlora__st_tensor* saved = qlora__st_find(st, "position");
    if (saved == NULL) {
        return qlora__fail(ctx, QLORA_ERR_FORMAT, "%s: position is missing", st->label);
    }
    if (position_bytes != NULL &&
        (saved->bytes > *position_bytes || (position == NULL && saved->bytes > 0))) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "the saved position has %llu bytes, but the buffer only %llu",
                           (unsigned long long)saved->bytes,
                           (unsigned long long)(position != NULL ? *position_bytes : 0));
    }
    QLORA__TRY(qlora__state_moments(ctx, m, st, NULL));
    size_t room = (size_t)qlora__max(m->longest_range, m->plan.config.hidden) * 4;
    float* values = (float*)qlora__alloc(ctx, room);
    if (values == NULL) {
        return QLORA_ERR_MEMORY;
    }
    qlora_result r = qlora__adapter_read(ctx, m, folder);
    r = r == QLORA_OK ? qlora__state_apply(t, st, &state, values) : r;
    qlora__free(ctx, values, room);
    if (r == QLORA_OK && position_bytes != NULL) {
        if (saved->bytes > 0) {
            memcpy(position, saved->data, (size_t)saved->bytes);
        }
        *position_bytes = (size_t)saved->bytes;
    }
    return r;
}

static qlora_result qlora__checkpoint_load(qlora_trainer* t, const char* dir, void* position,
                                           size_t* position_bytes) {
    qlora_ctx* ctx = t->ctx;
    qlora__ckpt_list list;
    QLORA__TRY(qlora__ckpt_need(t, dir));
    QLORA__TRY(qlora__ckpt_list_read(ctx, dir, "latest", &list));
    if (list.count == 0) {
        return qlora__fail(ctx, QLORA_ERR_FILE, "%s contains no checkpoint", dir);
    }
    for (int i = 0; i < list.count; i++) {
        char folder[QLORA__PATH_ROOM];
        qlora__st state;
        QLORA__TRY(qlora__path_join(&ctx->env, dir, list.names[i].text, folder));
        qlora_result r = qlora__ckpt_open(ctx, folder, &state);
        if (r == QLORA_ERR_FORMAT && i + 1 < list.count) {
            QLORA__LOG(ctx, WARN, CHECKPOINT, "%s is incomplete, trying an older one: %.300s",
                       folder, ctx->env.error);
            continue;
        }
        QLORA__TRY(r);
        r = qlora__ckpt_load_one(t, folder, &state, position, position_bytes);
        qlora__st_close(&ctx->env, &state);
        if (r == QLORA_OK) {
            QLORA__LOG(ctx, INFO, CHECKPOINT, "loaded %s", folder);
            ctx->env.error[0] = '\0';
        }
        return r;
    }
    return QLORA_ERR_FORMAT; // not reached: the last one returns
}

qlora_result qlora_checkpoint_load(qlora_trainer* trainer, const char* dir, void* position,
                                   size_t* position_bytes) {
    QLORA__ENTER(qlora__trainer_ctx(trainer), "qlora_checkpoint_load");
    return qlora__leave(trainer->ctx,
                        qlora__checkpoint_load(trainer, dir, position, position_bytes));
}

static qlora_result qlora__checkpoint_exists(qlora_ctx* ctx, const char* dir, bool* out) {
    qlora__ckpt_list list;
    if (dir == NULL || out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is NULL", dir == NULL ? "dir" : "out");
    }
    QLORA__TRY(qlora__ckpt_list_read(ctx, dir, "latest", &list));
    *out = list.count > 0;
    return QLORA_OK;
}

qlora_result qlora_checkpoint_exists(qlora_ctx* ctx, const char* dir, bool* out) {
    QLORA__ENTER(ctx, "qlora_checkpoint_exists");
    return qlora__leave(ctx, qlora__checkpoint_exists(ctx, dir, out));
}

//@@ src/generate.h

// ---- the choice of a token ----------------------------------------------------------------------

// One text. Its keys and values are in the model's cache. Its logits are kept on the host, so that
// training and evaluation can use the model between two tokens.
struct qlora_generation {
    qlora_ctx* ctx;
    qlora_model* m;
    qlora_generate_desc desc; // its pointers are NULL
    int32_t* stops;           // a copy
    int64_t stop_count;
    int64_t length;  // tokens in the cache
    int64_t made;    // new tokens in this turn
    int32_t waiting; // the last token returned, if it is not in the cache yet; -1 = none
    bool stopped;    // the turn has ended
    bool broken;     // a pass failed, so the contents of the cache are unknown
    char* memory;    // of the arrays below and stops
    size_t bytes;
    float* logits;  // [V]
    float* weights; // [V], for sampling
    int32_t* order; // [V]
    uint16_t* raw;  // [V]
    int32_t* ints;
};

// Orders tokens by weight, largest first, and equal weights by id.
static bool qlora__sample_before(const float* w, int32_t a, int32_t b) {
    return w[a] > w[b] || (!(w[a] < w[b]) && a < b);
}

static void qlora__sample_sift(const float* w, int32_t* heap, int64_t count, int64_t at) {
    int32_t moved = heap[at];
    for (int64_t child = 2 * at + 1; child < count; child = 2 * at + 1) {
        if (child + 1 < count && qlora__sample_before(w, heap[child + 1], heap[child])) {
            child++;
        }
        if (!qlora__sample_before(w, heap[child], moved)) {
            break;
        }
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = moved;
}

// Selects the tokens to sample from: the top_k largest weights, and of these the fewest that make
// up top_p of their sum. They are stored from the end of g->order backwards, largest first. Returns
// their number.
static int64_t qlora__sample_keep(const qlora_generation* g, int64_t vocab, double* sum) {
    const float* w = g->weights;
    int32_t* heap = g->order;
    int64_t most = g->desc.top_k > 0 ? qlora__min(g->desc.top_k, vocab) : vocab;
    double part = g->desc.top_p > 0.0f ? (double)g->desc.top_p : 1.0;
    double whole = 0.0;
    for (int64_t i = 0; i < vocab; i++) {
        heap[i] = (int32_t)i;
        whole += (double)w[i];
    }
    for (int64_t i = vocab / 2 - 1; i >= 0; i--) {
        qlora__sample_sift(w, heap, vocab, i);
    }
    // The sum of the top_k weights is known only once all of them are selected; without top_k, the
    // selection can stop early.
    double stop_at = g->desc.top_k > 0 ? 1e300 : part * whole;
    int64_t kept = 0;
    double out = 0.0;
    while (kept < most && (kept == 0 || out < stop_at)) {
        int64_t last = vocab - 1 - kept;
        int32_t top = heap[0];
        heap[0] = heap[last];
        heap[last] = top;
        qlora__sample_sift(w, heap, last, 0);
        out += (double)w[top];
        kept++;
    }
    double run = 0.0;
    int64_t count = 0;
    while (count < kept && (count == 0 || run < (g->desc.top_k > 0 ? part * out : stop_at))) {
        run += (double)w[heap[vocab - 1 - count]];
        count++;
    }
    *sum = run;
    return count;
}

// A number in [0, 1) that depends on the seed and the position alone.
static double qlora__sample_number(uint64_t seed, int64_t position) {
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    const uint32_t counter[4] = {(uint32_t)position, (uint32_t)((uint64_t)position >> 32),
                                 0x67656eu, 0};
    uint32_t words[4];
    qlora__philox(counter, key, words);
    return ((double)(words[0] >> 5) * 67108864.0 + (double)(words[1] >> 6)) / 9007199254740992.0;
}

// Chooses the token after `position` from g->logits.
static int32_t qlora__sample(const qlora_generation* g, int64_t vocab, int64_t position) {
    const float* logits = g->logits;
    float* w = g->weights;
    int32_t best = 0;
    for (int64_t i = 1; i < vocab; i++) {
        best = logits[i] > logits[best] ? (int32_t)i : best;
    }
    if (!(g->desc.temperature > 0.0f)) {
        return best;
    }
    double top = (double)logits[best];
    double sum = 0.0;
    for (int64_t i = 0; i < vocab; i++) {
        w[i] = (float)exp(((double)logits[i] - top) / (double)g->desc.temperature);
        sum += (double)w[i];
    }
    bool all = g->desc.top_k == 0 && !(g->desc.top_p > 0.0f);
    int64_t count = all ? vocab : qlora__sample_keep(g, vocab, &sum);
    double left = qlora__sample_number(g->desc.seed, position) * sum;
    int32_t token = best;
    for (int64_t i = 0; i < count; i++) {
        int32_t candidate = all ? (int32_t)i : g->order[vocab - 1 - i];
        if (w[candidate] > 0.0f) {
            token = candidate;
            left -= (double)w[candidate];
        }
        if (left < 0.0) {
            break;
        }
    }
    return token; // if rounding left a remainder, the last token that can be chosen
}

// ---- a text, token by token ---------------------------------------------------------------------

// Checks ids that are to follow `length` tokens of a text.
static qlora_result qlora__generate_ids_check(qlora_ctx* ctx, const qlora_model* m,
                                              const char* what, const int32_t* ids, int64_t count,
                                              int64_t length) {
    int64_t room = m->desc.generate_tokens;
    if (ids == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is NULL", what);
    }
    if (count < 1) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s has %lld tokens; it must have at least 1",
                           what, (long long)count);
    }
    if (count > room - length - 1) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "%s has %lld tokens; the maximum here is %lld, because the text has "
                           "%lld and the model was opened with generate_tokens = %lld",
                           what, (long long)count, (long long)qlora__max(room - length - 1, 0),
                           (long long)length, (long long)room);
    }
    for (int64_t i = 0; i < count; i++) {
        if (ids[i] < 0 || ids[i] >= m->plan.config.vocab) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "token %lld of %s is %d; it must be 0 to %lld", (long long)i, what,
                               (int)ids[i], (long long)m->plan.config.vocab - 1);
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__generate_stops_check(qlora_ctx* ctx, const qlora_generate_desc* d) {
    QLORA__TRY(qlora__need_whole(ctx, "desc.stop_count", d->stop_count, 0, INT32_MAX));
    if (d->stops == NULL && d->stop_count > 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "desc.stops is NULL and desc.stop_count is %d",
                           (int)d->stop_count);
    }
    bool none = d->stops != NULL && d->stop_count == 1 && d->stops[0] == -1;
    for (int32_t i = 0; i < d->stop_count && !none; i++) {
        if (d->stops[i] < 0) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "desc.stops[%d] is %d; it must not be negative", (int)i,
                               (int)d->stops[i]);
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__generate_need(qlora_ctx* ctx, const qlora_model* m,
                                         const qlora_generate_desc* d) {
    if (d == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "the generate desc is NULL");
    }
    if (d->reserved_must_be_zero0 != 0 || d->reserved_must_be_zero1 != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "the generate desc was not zeroed before its fields were set");
    }
    QLORA__TRY(qlora__model_idle(ctx, m, "generating"));
    if (m->desc.generate_tokens == 0) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "the model was opened with generate_tokens = 0; set it to the maximum "
                           "length of a text");
    }
    if (m->generations > 0) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "the model already has a generation; end it with qlora_generate_end");
    }
    QLORA__TRY(qlora__generate_ids_check(ctx, m, "the prompt", d->prompt, d->prompt_tokens, 0));
    int64_t room = m->desc.generate_tokens - d->prompt_tokens;
    if (d->max_tokens < 0 || d->max_tokens > room) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "desc.max_tokens is %lld; it must be from 0 to %lld, because the prompt "
                           "has %lld tokens and the model was opened with generate_tokens = %lld",
                           (long long)d->max_tokens, (long long)room, (long long)d->prompt_tokens,
                           (long long)m->desc.generate_tokens);
    }
    QLORA__TRY(qlora__need_real(ctx, "desc.temperature", (double)d->temperature, 0.0, 1e300));
    QLORA__TRY(qlora__need_whole(ctx, "desc.top_k", d->top_k, 0, INT32_MAX));
    if (!(d->top_p >= 0.0f && d->top_p <= 1.0f)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "desc.top_p is %g; it must be from 0 to 1",
                           (double)d->top_p);
    }
    return qlora__generate_stops_check(ctx, d);
}

static void qlora__generation_free(qlora_generation* g) {
    qlora__free(g->ctx, g->memory, g->bytes);
    qlora__free(g->ctx, g, sizeof *g);
}

static qlora_result qlora__generation_create(qlora_ctx* ctx, qlora_model* m,
                                             const qlora_generate_desc* d, qlora_generation** out) {
    size_t vocab = (size_t)m->plan.config.vocab;
    size_t ints = (size_t)qlora__max(m->plan.tokens, m->plan.max_sequences + 1);
    const int32_t* stops = d->stops != NULL ? d->stops : m->plan.config.stop_ids;
    size_t stop_count = (size_t)(d->stops != NULL ? d->stop_count : m->plan.config.stop_count);
    qlora_generation* g = (qlora_generation*)qlora__alloc_zero(ctx, sizeof *g);
    if (g == NULL) {
        return QLORA_ERR_MEMORY;
    }
    g->ctx = ctx;
    g->m = m;
    g->desc = *d;
    g->desc.prompt = NULL;
    g->desc.stops = NULL;
    g->waiting = -1;
    g->bytes = (vocab * 3 + ints + stop_count) * 4 + vocab * 2;
    g->memory = (char*)qlora__alloc(ctx, g->bytes);
    if (g->memory == NULL) {
        qlora__generation_free(g);
        return QLORA_ERR_MEMORY;
    }
    g->logits = (float*)(void*)g->memory;
    g->weights = g->logits + vocab;
    g->order = (int32_t*)(void*)(g->weights + vocab);
    g->ints = g->order + vocab;
    g->stops = g->ints + ints;
    g->raw = (uint16_t*)(void*)(g->stops + stop_count);
    g->stop_count = (int64_t)stop_count;
    for (size_t i = 0; i < stop_count; i++) {
        g->stops[i] = stops[i];
    }
    *out = g;
    return QLORA_OK;
}

// Runs the next tokens of the text; their output is then in m->x.
static qlora_result qlora__generate_run(qlora_generation* g, const int32_t* ids, int64_t rows) {
    qlora_ctx* ctx = g->ctx;
    qlora_model* m = g->m;
    QLORA__TRY(qlora__copy_in(ctx, m->batch.ids.data, ids, (size_t)rows * 4));
    for (int64_t i = 0; i < rows; i++) {
        g->ints[i] = (int32_t)(g->length + i);
    }
    QLORA__TRY(qlora__copy_in(ctx, m->batch.positions.data, g->ints, (size_t)rows * 4));
    if (rows > 1) { // one sequence
        int64_t count = m->plan.max_sequences + 1;
        for (int64_t i = 0; i < count; i++) {
            g->ints[i] = i > 0 ? (int32_t)rows : 0;
        }
        QLORA__TRY(qlora__copy_in(ctx, m->batch.seqs.data, g->ints, (size_t)count * 4));
    }
    qlora__pass pass = qlora__pass_of(m, rows, false);
    pass.decoding = true;
    pass.first = g->length;
    QLORA__TRY(qlora__forward(&pass));
    g->length += rows;
    return QLORA_OK;
}

// Copies the logits after the last row of a pass to the host.
static qlora_result qlora__generate_logits(qlora_generation* g, int64_t rows) {
    qlora_ctx* ctx = g->ctx;
    qlora_model* m = g->m;
    int64_t vocab = m->plan.config.vocab;
    qlora__pass pass = qlora__pass_of(m, rows, false);
    QLORA__TRY(qlora__head_logits(&pass, rows - 1, 1));
    if (m->logits.dtype == QLORA_F32) {
        QLORA__TRY(qlora__floats_out(ctx, m->logits.data, vocab, g->logits));
    } else {
        QLORA__TRY(qlora__copy_out(ctx, g->raw, m->logits.data, (size_t)vocab * 2));
        for (int64_t i = 0; i < vocab; i++) {
            g->logits[i] = qlora__bf16_to(g->raw[i]);
        }
    }
    for (int64_t i = 0; i < vocab; i++) {
        if (!qlora__finite(g->logits[i])) {
            return qlora__fail(
                ctx, QLORA_ERR_STATE,
                "the logit of token %lld after position %lld is not finite; check the weights "
                "and the adapter",
                (long long)i, (long long)(g->length - 1));
        }
    }
    return QLORA_OK;
}

// Appends tokens to the text: at its beginning as many as fit in one pass, then one by one.
static qlora_result qlora__generate_append(qlora_generation* g, const int32_t* ids, int64_t count) {
    int64_t rows = 1;
    g->broken = true;
    for (int64_t at = 0; at < count; at += rows) {
        rows = g->length == 0 ? qlora__min(count, g->m->plan.tokens) : 1;
        QLORA__TRY(qlora__generate_run(g, ids + at, rows));
    }
    QLORA__TRY(qlora__generate_logits(g, rows));
    g->broken = false;
    return QLORA_OK;
}

static qlora_result qlora__generate_ready(const qlora_generation* g) {
    if (g->broken) {
        return qlora__fail(g->ctx, QLORA_ERR_STATE,
                           "an earlier call on this generation failed; end it and begin again");
    }
    return qlora__model_idle(g->ctx, g->m, "generating");
}

static qlora_result qlora__generate_begin(qlora_ctx* ctx, qlora_model* m,
                                          const qlora_generate_desc* desc, qlora_generation** out) {
    if (out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    QLORA__TRY(qlora__generate_need(ctx, m, desc));
    qlora_generation* g = NULL;
    QLORA__TRY(qlora__generation_create(ctx, m, desc, &g));
    qlora_result r = qlora__generate_append(g, desc->prompt, desc->prompt_tokens);
    if (r != QLORA_OK) {
        qlora__generation_free(g);
        return r;
    }
    m->generations++;
    ctx->living[QLORA__GENERATIONS]++;
    *out = g;
    return QLORA_OK;
}

qlora_result qlora_generate_begin(qlora_model* model, const qlora_generate_desc* desc,
                                  qlora_generation** out) {
    qlora_ctx* ctx = qlora__model_ctx(model);
    QLORA__ENTER(ctx, "qlora_generate_begin");
    return qlora__leave(ctx, qlora__generate_begin(ctx, model, desc, out));
}

static qlora_ctx* qlora__generation_ctx(const qlora_generation* g) {
    return g != NULL ? g->ctx : NULL;
}

static bool qlora__generate_stops(const qlora_generation* g, int32_t token) {
    for (int64_t i = 0; i < g->stop_count; i++) {
        if (g->stops[i] == token) {
            return true;
        }
    }
    return false;
}

// Runs the token that was returned last. This is done only when its logits are needed, so the last
// token of a text is never run.
static qlora_result qlora__generate_catch_up(qlora_generation* g) {
    if (g->waiting >= 0) {
        int32_t token = g->waiting;
        QLORA__TRY(qlora__generate_append(g, &token, 1));
        g->waiting = -1;
    }
    return QLORA_OK;
}

static qlora_result qlora__generate_next(qlora_generation* g, int32_t* token, bool* stopped) {
    qlora_ctx* ctx = g->ctx;
    const qlora_model* m = g->m;
    if (token == NULL || stopped == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is NULL",
                           token == NULL ? "token" : "stopped");
    }
    QLORA__TRY(qlora__generate_ready(g));
    if (g->stopped) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "the turn has ended; start the next one with qlora_generate_feed");
    }
    int64_t length = g->length + (g->waiting >= 0 ? 1 : 0);
    bool full = length >= m->desc.generate_tokens ||
                (g->desc.max_tokens > 0 && g->made == g->desc.max_tokens);
    if (full) {
        g->stopped = true;
        *token = -1;
        *stopped = true;
        return QLORA_OK;
    }
    QLORA__TRY(qlora__generate_catch_up(g));
    int32_t chosen = qlora__sample(g, m->plan.config.vocab, g->length - 1);
    g->waiting = chosen;
    g->made++;
    g->stopped = qlora__generate_stops(g, chosen);
    *token = chosen;
    *stopped = g->stopped;
    return QLORA_OK;
}

qlora_result qlora_generate_next(qlora_generation* generation, int32_t* token, bool* stopped) {
    QLORA__ENTER(qlora__generation_ctx(generation), "qlora_generate_next");
    return qlora__leave(generation->ctx, qlora__generate_next(generation, token, stopped));
}

static qlora_result qlora__generate_feed(qlora_generation* g, const int32_t* ids, int64_t count) {
    int64_t length = g->length + (g->waiting >= 0 ? 1 : 0);
    QLORA__TRY(qlora__generate_ready(g));
    QLORA__TRY(qlora__generate_ids_check(g->ctx, g->m, "ids", ids, count, length));
    QLORA__TRY(qlora__generate_catch_up(g));
    QLORA__TRY(qlora__generate_append(g, ids, count));
    g->made = 0;
    g->stopped = false;
    return QLORA_OK;
}

qlora_result qlora_generate_feed(qlora_generation* generation, const int32_t* ids, int64_t count) {
    QLORA__ENTER(qlora__generation_ctx(generation), "qlora_generate_feed");
    return qlora__leave(generation->ctx, qlora__generate_feed(generation, ids, count));
}

qlora_result qlora_generate_end(qlora_generation* generation) {
    if (generation == NULL) {
        return QLORA_OK;
    }
    qlora_ctx* ctx = generation->ctx;
    QLORA__TRY(qlora__enter_destroy(ctx, "qlora_generate_end"));
    generation->m->generations--;
    ctx->living[QLORA__GENERATIONS]--;
    qlora__generation_free(generation);
    return qlora__leave(ctx, QLORA_OK);
}

// ---- a whole text -------------------------------------------------------------------------------

static qlora_result qlora__generate(qlora_ctx* ctx, qlora_model* m, const qlora_generate_desc* desc,
                                    qlora_token_fn fn, void* user) {
    if (fn == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "fn is NULL");
    }
    qlora_generation* g = NULL;
    QLORA__TRY(qlora__generate_begin(ctx, m, desc, &g));
    qlora_result r = QLORA_OK;
    for (bool stopped = false; r == QLORA_OK && !stopped;) {
        int32_t token = 0;
        r = qlora__generate_next(g, &token, &stopped);
        stopped = stopped || (r == QLORA_OK && !fn(user, token));
    }
    m->generations--;
    ctx->living[QLORA__GENERATIONS]--;
    qlora__generation_free(g);
    return r;
}

qlora_result qlora_generate(qlora_model* model, const qlora_generate_desc* desc, qlora_token_fn fn,
                            void* user) {
    qlora_ctx* ctx = qlora__model_ctx(model);
    QLORA__ENTER(ctx, "qlora_generate");
    return qlora__leave(ctx, qlora__generate(ctx, model, desc, fn, user));
}

//@@ src/qlora.h

#endif // QLORA_NO_MODEL

#if defined(__clang__)
#pragma clang diagnostic pop
#endif

#endif // QLORA_IMPLEMENTATION_DONE
#endif // QLORA_IMPLEMENTATION

/*
    Licence: MIT No Attribution, or the Unlicense, at your choice. See LICENSE for the texts.
*/
//@@ end 1923b54c5ccf479a
