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

// The instructions that CPU contexts use. Each tier has its own order of summation, so results
// differ between tiers by rounding; within a tier they do not depend on the number of threads.
typedef enum qlora_cpu_tier {
    QLORA_CPU_TIER_BEST = 0,     // the fastest that this processor has and that has been tested
    QLORA_CPU_TIER_PORTABLE = 1, // plain C; the reference for the others
    QLORA_CPU_TIER_NEON = 2,     // 64-bit ARM
    QLORA_CPU_TIER_AVX2 = 3,     // with FMA and F16C
    QLORA_CPU_TIER_AVX512 = 4,   // F, BW, DQ and VL
    // NEON with the BF16 instructions, for QLORA_MODE_BF16 and products of two bf16 matrices;
    // anything else has the bits of NEON
    QLORA_CPU_TIER_NEON_BF16 = 5,
    // The same for AVX512
    QLORA_CPU_TIER_AVX512_BF16 = 6,
    QLORA_CPU_TIER_AMX = 7, // Linux only
    QLORA_CPU_TIER_COUNT = 8
} qlora_cpu_tier;
// "portable" and so on; "unknown" for any other value.
QLORA_API const char* qlora_cpu_tier_name(qlora_cpu_tier tier);
// Whether this processor and this build have the tier.
QLORA_API bool qlora_cpu_tier_usable(qlora_cpu_tier tier);

// Zero it before setting fields: 0 is the default of every field.
typedef struct qlora_ctx_desc {
    uint32_t reserved_must_be_zero0;
    // These two keep their place in every version, so that a version mismatch can be reported.
    char* error_text; // receives the reason if qlora_ctx_create fails; may be NULL
    size_t error_text_size;
    qlora_backend require_backend; // fail unless this backend can be used; 0 = ANY
    int32_t device;                // CUDA device number, then required; 0 = the first, if any
    int32_t threads;               // CPU threads, at most 64; 0 = one per core
    qlora_cpu_tier cpu_tier;       // 0 = as the environment variable QLORA_CPU_TIER says, or BEST
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
#define qlora_ctx_create(desc, out) qlora_ctx_create_abi((desc), (out), QLORA_VERSION, QLORA_ABI)
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
// "sm_90"; "cpu" without a GPU. The environment variable QLORA_GPU_TARGET ("sm_80") limits it, to
// measure or test on a newer device the kernels that an older one would use.
QLORA_API const char* qlora_ctx_target(const qlora_ctx* ctx);
// Applies to products from now on; models that are already open keep the math they were opened
// with.
QLORA_API qlora_result qlora_ctx_set_math(qlora_ctx* ctx, qlora_math math);
// Binds the caller's stream; NULL = the context's own. The stream must belong to this CUDA context
// and must not be the legacy default stream, which cannot be captured, or the per-thread default
// stream, which is a different one in every thread. Waits for the work queued on the old stream and
// invalidates all graphs.
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
// Work of a context must not run in parallel with itself: launch a graph that you captured from its
// stream on that stream only.
QLORA_API qlora_result qlora_ctx_native(qlora_ctx* ctx, qlora_native* out);

// Writes the version, the backend and the reason for it, on the CPU the tier and the number of
// threads, and on CUDA the device, driver, cuBLAS and kernel target, as lines of text; truncated
// if the buffer is too small. Returns the number of bytes needed, including the final NUL. ctx and
// buffer may be NULL.
QLORA_API size_t qlora_describe(const qlora_ctx* ctx, char* buffer, size_t size);

typedef struct qlora_memory_info {
    uint64_t device_bytes;       // device memory allocated by the context at present
    uint64_t device_peak;        // maximum of device_bytes so far
    uint64_t device_allocations; // number of device allocations so far
    uint64_t device_free;        // free memory reported by the driver; 0 on the CPU
    uint64_t device_total;       // memory of the device; 0 on the CPU
    uint64_t host_bytes;         // host memory allocated by the context at present
    uint64_t host_free;          // host memory that this process can still use; 0 = unknown
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
QLORA_API qlora_result qlora_tensor_read(qlora_ctx* ctx, const qlora_tensor* tensor, void* target,
                                         size_t bytes);
// Zeroes the elements of the tensor, but not the padding between its rows. Does not wait for the
// device.
QLORA_API qlora_result qlora_tensor_zero(qlora_ctx* ctx, const qlora_tensor* tensor);
// "f32" and so on, and the size of an element; "unknown" and 0 for any other value.
QLORA_API const char* qlora_dtype_name(qlora_dtype dtype);
QLORA_API size_t qlora_dtype_bytes(qlora_dtype dtype);
