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
    QLORA_BACKEND_ANY = 0, // CUDA if usable, else the CPU
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

typedef struct qlora_ctx_desc {
    uint32_t reserved_must_be_zero0;
    // These two stay here in every version, so that another version can explain itself.
    char* error_text;              // where qlora_ctx_create explains a failure; may be NULL
    size_t error_text_size;
    qlora_backend require_backend; // ANY
    int32_t device;                // CUDA ordinal; 0 is the first
    int32_t threads;               // CPU threads; 0 = one per core, at most 64
    qlora_math math;               // F32
    void* cu_context;              // CUcontext to use; NULL = the device's primary context
    void* cu_stream;               // CUstream to use; NULL = one of our own
    int32_t stream_priority;       // of our own streams, as CUDA counts: lower is more urgent; 0
    const char* cuda_library;      // path; NULL = the usual names
    const char* cublas_library; // path; NULL = the usual names, newest first; "none" = do without
    size_t workspace_bytes;        // for cuBLAS, of each of two; 0 = 32 MiB
    void* workspace;               // the caller's device memory for the first; NULL = ours
    size_t scratch_bytes;          // for operators; 0 = 64 MiB on CUDA, 16 MiB on the CPU
    qlora_allocator allocator;     // host memory; zero = malloc
    qlora_device_allocator device_allocator; // zero = cuMemAlloc
    qlora_files files;             // zero = the operating system's
    qlora_log_fn log;              // NULL = silent
    void* log_user;
    uint32_t reserved_must_be_zero1;
} qlora_ctx_desc;

// desc NULL = all defaults. Refuses (QLORA_ERR_VERSION) to serve a program that was compiled with
// another version of this header, or with structs of other sizes.
#define qlora_ctx_create(desc, out)                                                                \
    qlora_ctx_create_abi((desc), (out), QLORA_VERSION, QLORA_ABI)
QLORA_API qlora_result qlora_ctx_create_abi(const qlora_ctx_desc* desc, qlora_ctx** out,
                                            int version, uint64_t abi);
// Refuses (QLORA_ERR_STATE, nothing freed) while objects of the context exist, and names them.
QLORA_API qlora_result qlora_ctx_destroy(qlora_ctx* ctx);
QLORA_API const char* qlora_last_error(const qlora_ctx* ctx);
QLORA_API qlora_backend qlora_ctx_backend(const qlora_ctx* ctx);
QLORA_API const char* qlora_ctx_reason(const qlora_ctx* ctx); // why this backend
QLORA_API const char* qlora_ctx_target(const qlora_ctx* ctx); // "sm_90"; "cpu" without a GPU
// For products from here on; models that are open keep their own.
QLORA_API qlora_result qlora_ctx_set_math(qlora_ctx* ctx, qlora_math math);
// Binds a stream of the caller's (NULL: back to our own). It must belong to this CUDA context and
// may not be the legacy default stream, which cannot be captured. Invalidates the graphs.
QLORA_API qlora_result qlora_ctx_set_stream(qlora_ctx* ctx, void* cu_stream);
// Changes the memory that cuBLAS works in, as desc.workspace and desc.workspace_bytes set it at
// first: bytes for each of our two lines of work, the first one's at memory (device memory of the
// caller's, 256-byte aligned; NULL = ours), the second one's ours; 0 bytes = 32 MiB. Waits for the
// device and invalidates the graphs.
QLORA_API qlora_result qlora_ctx_set_workspace(qlora_ctx* ctx, void* memory, size_t bytes);
QLORA_API qlora_result qlora_ctx_sync(qlora_ctx* ctx);

typedef struct qlora_native {
    void* cu_context;
    void* cu_stream;
    void* cublas; // cublasHandle_t, NULL without cuBLAS
    int32_t cu_device;
} qlora_native;
// All NULL on the CPU. Once handed out, the handle's stream and workspace are set anew at every
// use.
QLORA_API qlora_result qlora_ctx_native(qlora_ctx* ctx, qlora_native* out);

// Version, backend and why, device, driver, cuBLAS, kernel targets, as lines of text. Returns the
// bytes needed with the final NUL; writes as much as fits.
QLORA_API size_t qlora_describe(const qlora_ctx* ctx, char* buffer, size_t size);

typedef struct qlora_memory_info {
    uint64_t device_bytes;       // live device memory that we allocated
    uint64_t device_peak;        // most of it at one time
    uint64_t device_allocations; // how many so far
    uint64_t device_free;        // what the driver says is free, 0 on the CPU
    uint64_t device_total;
    uint64_t host_bytes; // live host memory that we allocated
} qlora_memory_info;

typedef enum qlora_path {
    QLORA_PATH_AUTO = 0, // cuBLAS when bound, else our PTX; the CPU on a CPU context
    QLORA_PATH_CPU = 1,
    QLORA_PATH_PTX = 2,
    QLORA_PATH_CUBLAS = 3,
    QLORA_PATH_NF4 = 4 // reported only: weights were dequantised inside the product
} qlora_path;

typedef struct qlora_ctx_info {
    const qlora_ctx_desc* desc; // defaults resolved; valid as long as the context
    qlora_memory_info memory;
    qlora_path last_path; // of the last product
    int64_t tensors;      // how many objects of each kind exist
    int64_t clips;
    int64_t graphs; // a trainer's own included
    int64_t models;
    int64_t trainers;
    int64_t generations;
} qlora_ctx_info;
QLORA_API qlora_result qlora_ctx_query(qlora_ctx* ctx, qlora_ctx_info* out);

// ---- tensors ------------------------------------------------------------------------------------
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
QLORA_API qlora_result qlora_tensor_wrap(qlora_ctx* ctx, void* data, size_t bytes,
                                         qlora_dtype dtype, int64_t rows, int64_t cols, int64_t ld,
                                         qlora_tensor* out);
// A window of a tensor of batch 1; shares its memory, is not destroyed.
QLORA_API qlora_result qlora_tensor_view(qlora_ctx* ctx, const qlora_tensor* tensor, int64_t row,
                                         int64_t rows, int64_t col, int64_t cols,
                                         qlora_tensor* out);
// Whole contiguous tensors; bytes must be the tensor's size. Both wait for the device.
QLORA_API qlora_result qlora_tensor_write(qlora_ctx* ctx, const qlora_tensor* tensor,
                                           const void* source, size_t bytes);
QLORA_API qlora_result qlora_tensor_read(qlora_ctx* ctx, const qlora_tensor* tensor,
                                             void* target, size_t bytes);
// Bytes of zero over the elements of the tensor (not over padding between rows). Does not wait.
QLORA_API qlora_result qlora_tensor_zero(qlora_ctx* ctx, const qlora_tensor* tensor);
QLORA_API const char* qlora_dtype_name(qlora_dtype dtype);
QLORA_API size_t qlora_dtype_bytes(qlora_dtype dtype);
