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
#define QLORA__CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM 91
#define QLORA__CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH 95
#define QLORA__CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN 97
#define QLORA__CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES 8
#define QLORA__CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT 9 // in percent
#define QLORA__CU_STREAM_NON_BLOCKING 1
#define QLORA__CU_EVENT_DISABLE_TIMING 2
#define QLORA__CUDA_ERROR_NOT_READY 600
#define QLORA__CU_STREAM_CAPTURE_MODE_THREAD_LOCAL 1
#define QLORA__CU_JIT_INFO_LOG_BUFFER 3
#define QLORA__CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES 4
#define QLORA__CU_JIT_ERROR_LOG_BUFFER 5
#define QLORA__CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES 6
#define QLORA__CU_GRAPH_NODE_TYPE_MEMSET 2
#define QLORA__CU_LAUNCH_ATTRIBUTE_COOPERATIVE 2
#define QLORA__CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION 6
#define QLORA__CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 9
#define QLORA__CU_TENSOR_MAP_SWIZZLE_128B 3
#define QLORA__CU_TENSOR_MAP_L2_PROMOTION_L2_256B 3
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
    X(1, qlora__CUresult, StreamQuery, "cuStreamQuery", (void*))                                   \
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
    X(0, qlora__CUresult, TensorMapEncodeTiled, "cuTensorMapEncodeTiled",                          \
      (void*, int, unsigned, void*, const uint64_t*, const uint64_t*, const uint32_t*,             \
       const uint32_t*, int, int, int, int))                                                       \
    X(1, qlora__CUresult, FuncSetAttribute, "cuFuncSetAttribute", (void*, int, int))               \
    X(1, qlora__CUresult, LaunchKernel, "cuLaunchKernel",                                          \
      (void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, \
       void**))                                                                                    \
    X(0, qlora__CUresult, LaunchKernelEx, "cuLaunchKernelEx",                                      \
      (const void*, void*, void**, void**))                                                        \
    X(1, qlora__CUresult, MemAlloc, "cuMemAlloc_v2", (qlora__CUdeviceptr*, size_t))                \
    X(1, qlora__CUresult, MemFree, "cuMemFree_v2", (qlora__CUdeviceptr))                           \
    X(1, qlora__CUresult, MemHostAlloc, "cuMemHostAlloc", (void**, size_t, unsigned))              \
    X(1, qlora__CUresult, MemFreeHost, "cuMemFreeHost", (void*))                                   \
    X(0, qlora__CUresult, MemHostRegister, "cuMemHostRegister_v2", (void*, size_t, unsigned))      \
    X(0, qlora__CUresult, MemHostUnregister, "cuMemHostUnregister", (void*))                       \
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
typedef struct qlora__lt qlora__lt;         // driver/cublaslt.h

struct qlora__gpu {
    qlora__cuda_table cu;
    qlora__cublas_table blas;
    int driver_version; // 13000 is CUDA 13.0
    int ptx_version;    // highest PTX version that this driver accepts; 90 is 9.0
    qlora__CUdevice device;
    char device_name[128];
    int capability; // 90 is 9.0
    int sm_count;
    int max_shared;  // bytes of shared memory available to one block
    int cooperative; // 1: blocks of a launch may wait for each other
    size_t total_bytes;
    char target[16];   // "sm_90"
    int target_number; // 90
    int target_limit;  // from the environment; INT32_MAX = none
    void* context;
    bool owns_context; // the primary context was retained
    void* own_stream;
    void* stream; // the stream in use
    void* cublas; // handle, NULL without cuBLAS
    int cublas_version;
    bool cublas_exposed; // the caller has the handle, so bind again before every use
    bool cublas_bound;
    char cublas_note[256];
    void* workspace; // for cuBLAS
    qlora__buffer* own_workspace;
    qlora__beside* beside; // tensor/beside.h
    qlora__cache* cache;
    qlora__lt* lt;         // NULL until a model needs FP8 products
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
// or it is above the limit, returns the highest plain target that all three support, or 0 if there
// is none.
static int qlora__target_choose(int capability, int ptx_version, int limit) {
    int best = 0;
    for (size_t i = 0; i < sizeof qlora__targets / sizeof qlora__targets[0]; i++) {
        const qlora__target* t = &qlora__targets[i];
        if (t->number <= capability && t->number <= limit && t->version <= ptx_version &&
            t->number > best) {
            best = t->number;
        }
    }
    return best;
}
