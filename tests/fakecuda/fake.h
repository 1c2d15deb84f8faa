// fake.h - the interface of the fake CUDA driver (cuda.c) and the fake cuBLAS (cublas.c) for tests.
//
// The library under test finds both through its normal loading path: LD_LIBRARY_PATH=build/fake.
// The test opens the same libcuda.so.1 and gets this interface from it:
//
//     const fake_api* fake = fake_open();        // NULL: the real driver, or none
//     fake->reset(NULL);                         // a fresh machine: one 9.0 device, driver 13.0
//     fake->machine(75, 11040);                  // or one 7.5 device with driver 11.4
//     fake_config cfg = fake->defaults();        // or any other machine
//     cfg.devices = 2;
//     cfg.device[1].cc = 120;
//     fake->reset(&cfg);
//
//     fake->fail_at("ALLOC", 3, 2, false);       // the third allocation from now gets error 2
//     uint64_t before = fake->calls("ALLOC");    // "no allocation after this point":
//     ...                                        //     two readings that must be equal
//     const char* wrong = fake->done();          // NULL, or the first broken rule or a leak
//
// Device addresses are in a reserved range that the host cannot access: dereferencing a device
// pointer on the host crashes, as on hardware. Queued work runs only when something waits for it,
// so a missing wait shows up as a wrong number. Nothing depends on time, so the same calls always
// give the same log.
#ifndef FAKECUDA_FAKE_H
#define FAKECUDA_FAKE_H

#include <dlfcn.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define FAKE_MAX_DEVICES 8

typedef enum fake_order { FAKE_FORWARD, FAKE_REVERSE, FAKE_RANDOM } fake_order;

typedef struct fake_device {
    int cc;        // 75 = 7.5, 90 = 9.0, 121 = 12.1
    int sms;       // multiprocessors
    char name[64]; // "" = "Fake GPU 9.0"
    uint64_t total_bytes;
    uint64_t free_bytes;   // before the allocations of the program under test; 0 = total_bytes
    uint32_t shared_block; // shared memory per block; 0 = 48 KB
    uint32_t shared_optin; // maximum with cuFuncSetAttribute; 0 = that of the compute capability
} fake_device;

typedef struct fake_config {
    int driver_version; // 13000
    int devices;        // 0..8; with 0, cuInit returns 100
    fake_device device[FAKE_MAX_DEVICES];
    fake_order order;      // order of warps, blocks, independent streams and graph branches
    uint64_t seed;         // for FAKE_RANDOM
    uint64_t max_steps;    // warp instructions before a launch counts as hung
    uint64_t host_bytes;   // host memory that may back device memory; beyond it, error 2
    int init_result;       // result of cuInit: 0, 34, 100, 803 ...
    int cublas_create;     // result of cublasCreate_v2: 0, 1, 3 ...
    int cublas_version;    // 130100; also that of cuBLASLt
    bool races; // two nodes of a graph that use the same memory, one of which writes, must have an
                // order: without one, a rule is broken, whatever the results are
    bool allow_host_nodes; // copies from or to host memory that is not mapped inside a graph are
                           // not a broken rule
} fake_config;

typedef struct fake_stats {
    uint64_t live_bytes;  // device memory currently allocated
    uint64_t peak_bytes;  // maximum since reset
    uint64_t live_pinned; // pinned host memory currently allocated
    uint64_t kernels;     // executed kernels (a replayed graph counts each node)
    uint64_t gemms;
    uint64_t copies;
    uint64_t warp_instructions;
    uint64_t mma;
    uint64_t queued; // entries currently waiting in all streams
    uint64_t faults; // injected faults that fired
} fake_stats;

// Every driver function of the fake: name, fault class, R or N, parameters.
// R: a release. It is carried out despite an injected fault or a sticky error, which is then
// reported, just as the real driver reports errors of earlier work. N: not a release.
#define FAKE_CU_FUNCTIONS(X)                                                                       \
    X(cuInit, CTX, N, (unsigned flags))                                                            \
    X(cuDriverGetVersion, CTX, N, (int* version))                                                  \
    X(cuDeviceGetCount, CTX, N, (int* count))                                                      \
    X(cuDeviceGet, CTX, N, (int* device, int ordinal))                                             \
    X(cuDeviceGetName, CTX, N, (char* name, int bytes, int device))                                \
    X(cuDeviceGetAttribute, CTX, N, (int* value, int attribute, int device))                       \
    X(cuDeviceTotalMem_v2, CTX, N, (size_t * bytes, int device))                                   \
    X(cuDeviceGetUuid_v2, CTX, N, (void* uuid, int device))                                        \
    X(cuDevicePrimaryCtxRetain, CTX, N, (void** ctx, int device))                                  \
    X(cuDevicePrimaryCtxRelease_v2, CTX, R, (int device))                                          \
    X(cuDevicePrimaryCtxGetState, CTX, N, (int device, unsigned* flags, int* active))              \
    X(cuCtxCreate_v2, CTX, N, (void** ctx, unsigned flags, int device))                            \
    X(cuCtxDestroy_v2, CTX, R, (void* ctx))                                                        \
    X(cuCtxGetDevice, CTX, N, (int* device))                                                       \
    X(cuCtxGetCurrent, CTX, N, (void** ctx))                                                       \
    X(cuCtxSetCurrent, CTX, R, (void* ctx))                                                        \
    X(cuCtxPushCurrent_v2, CTX, N, (void* ctx))                                                    \
    X(cuCtxPopCurrent_v2, CTX, R, (void** ctx))                                                    \
    X(cuCtxSynchronize, SYNC, N, (void))                                                           \
    X(cuStreamCreate, STREAM, N, (void** stream, unsigned flags))                                  \
    X(cuStreamCreateWithPriority, STREAM, N, (void** stream, unsigned flags, int priority))        \
    X(cuStreamDestroy_v2, STREAM, R, (void* stream))                                               \
    X(cuStreamSynchronize, SYNC, N, (void* stream))                                                \
    X(cuStreamQuery, STREAM, N, (void* stream))                                                    \
    X(cuStreamGetCtx, STREAM, N, (void* stream, void** ctx))                                       \
    X(cuStreamWaitEvent, STREAM, N, (void* stream, void* event, unsigned flags))                   \
    X(cuStreamIsCapturing, CAPTURE, N, (void* stream, int* status))                                \
    X(cuStreamGetCaptureInfo_v2, CAPTURE, N,                                                       \
      (void* stream, int* status, uint64_t* id, void** graph, const void** deps, size_t* count))   \
    X(cuStreamBeginCapture_v2, CAPTURE, N, (void* stream, int mode))                               \
    X(cuStreamEndCapture, CAPTURE, N, (void* stream, void** graph))                                \
    X(cuThreadExchangeStreamCaptureMode, CAPTURE, N, (int* mode))                                  \
    X(cuGraphInstantiateWithFlags, GRAPH, N, (void** exec, void* graph, unsigned long long flags)) \
    X(cuGraphLaunch, GRAPH, N, (void* exec, void* stream))                                         \
    X(cuGraphUpload, GRAPH, N, (void* exec, void* stream))                                         \
    X(cuGraphGetNodes, GRAPH, N, (void* graph, void** nodes, size_t* count))                       \
    X(cuGraphNodeGetType, GRAPH, N, (void* node, int* type))                                       \
    X(cuGraphMemsetNodeGetParams, GRAPH, N, (void* node, void* params))                            \
    X(cuGraphNodeGetDependencies_v2, GRAPH, N,                                                     \
      (void* node, void** list, void* edges, size_t* count))                                       \
    X(cuGraphNodeGetDependentNodes_v2, GRAPH, N,                                                   \
      (void* node, void** list, void* edges, size_t* count))                                       \
    X(cuGraphAddKernelNode_v2, GRAPH, N,                                                           \
      (void** node, void* graph, void* const* before, size_t count, const void* params))           \
    X(cuGraphAddDependencies_v2, GRAPH, N,                                                         \
      (void* graph, void* const* from, void* const* to, const void* edges, size_t count))          \
    X(cuGraphDestroyNode, GRAPH, N, (void* node))                                                  \
    X(cuGraphDestroy, GRAPH, R, (void* graph))                                                     \
    X(cuGraphExecDestroy, GRAPH, R, (void* exec))                                                  \
    X(cuEventCreate, EVENT, N, (void** event, unsigned flags))                                     \
    X(cuEventRecord, EVENT, N, (void* event, void* stream))                                        \
    X(cuEventQuery, EVENT, N, (void* event))                                                       \
    X(cuEventSynchronize, SYNC, N, (void* event))                                                  \
    X(cuEventElapsedTime, EVENT, N, (float* ms, void* start, void* end))                           \
    X(cuEventDestroy_v2, EVENT, R, (void* event))                                                  \
    X(cuTensorMapEncodeTiled, CTX, N,                                                              \
      (void* map, int type, unsigned rank, void* base, const uint64_t* size,                       \
       const uint64_t* strides, const unsigned* box, const unsigned* steps, int interleave,        \
       int swizzle, int promotion, int fill))                                                      \
    X(cuModuleLoadData, LOAD, N, (void** module, const void* image))                               \
    X(cuModuleLoadDataEx, LOAD, N,                                                                 \
      (void** module, const void* image, unsigned count, int* options, void** values))             \
    X(cuModuleGetFunction, LOAD, N, (void** function, void* module, const char* name))             \
    X(cuModuleUnload, LOAD, R, (void* module))                                                     \
    X(cuFuncSetAttribute, LAUNCH, N, (void* function, int attribute, int value))                   \
    X(cuFuncGetAttribute, LAUNCH, N, (int* value, int attribute, void* function))                  \
    X(cuLaunchKernel, LAUNCH, N,                                                                   \
      (void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,            \
       unsigned bz, unsigned shared, void* stream, void** args, void** extra))                     \
    X(cuLaunchKernelEx, LAUNCH, N,                                                                 \
      (const void* config, void* function, void** args, void** extra))                             \
    X(cuMemAlloc_v2, ALLOC, N, (uint64_t * address, size_t bytes))                                 \
    X(cuMemFree_v2, ALLOC, R, (uint64_t address))                                                  \
    X(cuMemHostAlloc, ALLOC, N, (void** pointer, size_t bytes, unsigned flags))                    \
    X(cuMemAllocHost_v2, ALLOC, N, (void** pointer, size_t bytes))                                 \
    X(cuMemFreeHost, ALLOC, R, (void* pointer))                                                    \
    X(cuMemHostRegister_v2, ALLOC, N, (void* pointer, size_t bytes, unsigned flags))               \
    X(cuMemHostUnregister, ALLOC, R, (void* pointer))                                              \
    X(cuMemcpyHtoD_v2, COPY, N, (uint64_t dst, const void* src, size_t bytes))                     \
    X(cuMemcpyDtoH_v2, COPY, N, (void* dst, uint64_t src, size_t bytes))                           \
    X(cuMemcpyHtoDAsync_v2, COPY, N, (uint64_t dst, const void* src, size_t bytes, void* stream))  \
    X(cuMemcpyDtoHAsync_v2, COPY, N, (void* dst, uint64_t src, size_t bytes, void* stream))        \
    X(cuMemcpyDtoDAsync_v2, COPY, N, (uint64_t dst, uint64_t src, size_t bytes, void* stream))     \
    X(cuMemcpy2DAsync_v2, COPY, N, (const fake_copy2d* copy, void* stream))                        \
    X(cuMemsetD8Async, COPY, N, (uint64_t dst, unsigned char value, size_t count, void* stream))   \
    X(cuMemsetD16Async, COPY, N, (uint64_t dst, unsigned short value, size_t count, void* stream)) \
    X(cuMemsetD32Async, COPY, N, (uint64_t dst, unsigned value, size_t count, void* stream))       \
    X(cuMemsetD2D8Async, COPY, N,                                                                  \
      (uint64_t dst, size_t pitch, unsigned char value, size_t width, size_t height,               \
       void* stream))                                                                              \
    X(cuMemGetInfo_v2, CTX, N, (size_t * free_bytes, size_t * total_bytes))                        \
    X(cuMemGetAddressRange_v2, CTX, N, (uint64_t * base, size_t * bytes, uint64_t address))        \
    X(cuPointerGetAttribute, CTX, N, (void* value, int attribute, uint64_t address))               \
    X(cuGetErrorName, NONE, N, (int code, const char** text))                                      \
    X(cuGetErrorString, NONE, N, (int code, const char** text))                                    \
    X(cuGetProcAddress_v2, NONE, N,                                                                \
      (const char* symbol, void** function, int version, uint64_t flags, int* status))

#define FAKE_CUBLAS_FUNCTIONS(X)                                                                   \
    X(cublasCreate_v2, CUBLAS, N, (void** handle))                                                 \
    X(cublasDestroy_v2, CUBLAS, R, (void* handle))                                                 \
    X(cublasGetVersion_v2, CUBLAS, N, (void* handle, int* version))                                \
    X(cublasSetStream_v2, CUBLAS, N, (void* handle, void* stream))                                 \
    X(cublasGetStream_v2, CUBLAS, N, (void* handle, void** stream))                                \
    X(cublasSetWorkspace_v2, CUBLAS, N, (void* handle, void* workspace, size_t bytes))             \
    X(cublasSetMathMode, CUBLAS, N, (void* handle, int mode))                                      \
    X(cublasGetMathMode, CUBLAS, N, (void* handle, int* mode))                                     \
    X(cublasSetPointerMode_v2, CUBLAS, N, (void* handle, int mode))                                \
    X(cublasGetPointerMode_v2, CUBLAS, N, (void* handle, int* mode))                               \
    X(cublasSetAtomicsMode, CUBLAS, N, (void* handle, int mode))                                   \
    X(cublasGemmEx, CUBLAS, N,                                                                     \
      (void* handle, int ta, int tb, int m, int n, int k, const void* alpha, const void* a,        \
       int atype, int lda, const void* b, int btype, int ldb, const void* beta, void* c,           \
       int ctype, int ldc, int compute, int algo))                                                 \
    X(cublasGemmStridedBatchedEx, CUBLAS, N,                                                       \
      (void* handle, int ta, int tb, int m, int n, int k, const void* alpha, const void* a,        \
       int atype, int lda, long long stride_a, const void* b, int btype, int ldb,                  \
       long long stride_b, const void* beta, void* c, int ctype, int ldc, long long stride_c,      \
       int batch, int compute, int algo))

// The functions of the fake cuBLASLt (cublaslt.c).
#define FAKE_CUBLASLT_FUNCTIONS(X)                                                                 \
    X(cublasLtCreate, CUBLAS, N, (void** handle))                                                  \
    X(cublasLtDestroy, CUBLAS, R, (void* handle))                                                  \
    X(cublasLtMatmulDescCreate, CUBLAS, N, (void** desc, int compute, int scale))                  \
    X(cublasLtMatmulDescDestroy, CUBLAS, R, (void* desc))                                          \
    X(cublasLtMatmulDescSetAttribute, CUBLAS, N,                                                   \
      (void* desc, int attribute, const void* value, size_t bytes))                                \
    X(cublasLtMatrixLayoutCreate, CUBLAS, N,                                                       \
      (void** layout, int type, uint64_t rows, uint64_t cols, int64_t ld))                         \
    X(cublasLtMatrixLayoutDestroy, CUBLAS, R, (void* layout))                                      \
    X(cublasLtMatmulPreferenceCreate, CUBLAS, N, (void** preference))                              \
    X(cublasLtMatmulPreferenceDestroy, CUBLAS, R, (void* preference))                              \
    X(cublasLtMatmulPreferenceSetAttribute, CUBLAS, N,                                             \
      (void* preference, int attribute, const void* value, size_t bytes))                          \
    X(cublasLtMatmulAlgoGetHeuristic, CUBLAS, N,                                                   \
      (void* handle, void* desc, void* a, void* b, void* c, void* d, void* preference, int wanted, \
       void* results, int* found))                                                                 \
    X(cublasLtMatmul, CUBLAS, N,                                                                   \
      (void* handle, void* desc, const void* alpha, const void* a, void* a_layout, const void* b,  \
       void* b_layout, const void* beta, const void* c, void* c_layout, void* d, void* d_layout,   \
       const void* algo, void* workspace, size_t bytes, void* stream))

// The functions of the fake NCCL (nccl.c).
typedef struct fake_nccl_id {
    char bytes[128];
} fake_nccl_id;

#define FAKE_NCCL_FUNCTIONS(X)                                                                     \
    X(ncclGetVersion, NCCL, N, (int* version))                                                     \
    X(ncclGetUniqueId, NCCL, N, (fake_nccl_id * id))                                               \
    X(ncclCommInitRankConfig, NCCL, N,                                                             \
      (void** comm, int world, fake_nccl_id id, int rank, const void* config))                     \
    X(ncclSend, NCCL, N,                                                                           \
      (const void* data, size_t bytes, int type, int peer, void* comm, void* stream))              \
    X(ncclRecv, NCCL, N, (void* data, size_t bytes, int type, int peer, void* comm, void* stream)) \
    X(ncclGroupStart, NCCL, N, (void))                                                             \
    X(ncclGroupEnd, NCCL, N, (void))                                                               \
    X(ncclCommGetAsyncError, NCCL, N, (void* comm, int* state))                                    \
    X(ncclCommFinalize, NCCL, N, (void* comm))                                                     \
    X(ncclCommDestroy, NCCL, R, (void* comm))                                                      \
    X(ncclCommAbort, NCCL, R, (void* comm))

// CUDA_MEMCPY2D
typedef struct fake_copy2d {
    size_t src_x;
    size_t src_y;
    int src_type; // 1 host, 2 device
    const void* src_host;
    uint64_t src_device;
    void* src_array;
    size_t src_pitch;
    size_t dst_x;
    size_t dst_y;
    int dst_type;
    void* dst_host;
    uint64_t dst_device;
    void* dst_array;
    size_t dst_pitch;
    size_t width; // bytes
    size_t height;
} fake_copy2d;

// The driver's functions for tests to call, for example to create foreign contexts and streams:
// fake->cu.cuCtxCreate_v2(...). These calls are counted and checked like all others.
typedef struct fake_cu {
#define FAKE_CU_MEMBER(name, kind, release, args) int(*name) args;
    FAKE_CU_FUNCTIONS(FAKE_CU_MEMBER)
#undef FAKE_CU_MEMBER
} fake_cu;

// Returned strings stay valid until the next call that returns one.
typedef struct fake_api {
    fake_config (*defaults)(void);
    void (*reset)(const fake_config* config);    // discards all state; NULL: the defaults
    void (*machine)(int cc, int driver_version); // reset to one such device

    // Faults. `what` is a function's name or a class: ALLOC LOAD LAUNCH COPY SYNC STREAM EVENT
    // GRAPH CAPTURE CUBLAS NCCL CTX, or ANY (every call), or RUN (a kernel or GEMM when it is
    // executed, so that the error surfaces in a later call). nth counts from now; 1 is the next
    // call. code is a CUresult, or a cublasStatus_t for the class CUBLAS and for functions of
    // cuBLAS. sticky: from then on, every call on the context returns the code.
    void (*fail_at)(const char* what, uint64_t nth, int code, bool sticky);
    void (*fail_from)(const char* what, uint64_t nth, int code); // this call and all later ones
    void (*fail_clear)(void);

    uint64_t (*calls)(const char* what);       // since reset; a function, a class or ANY
    uint64_t (*kernel_runs)(const char* name); // executions of an entry point; NULL: all
    fake_stats (*stats)(void);
    const char* (*log)(void); // all calls since log_clear, one per line, handles numbered
    void (*log_clear)(void);

    const char* (*check)(void); // first broken rule, after checking the guard bands; NULL if none
    const char* (*leaks)(void); // objects that still exist, by kind; NULL if none
    const char* (*done)(void);  // check(), or else leaks()
    const char* (*trap)(void);  // text of the last kernel trap, "" if none
    void (*forgive)(void);      // forgets broken rules, for tests that break one on purpose

    fake_cu cu;
} fake_api;

// The services of cuda.c that cublas.c uses, only between enter and leave, which hold the one lock.
typedef struct fake_inside {
    int (*enter)(const char* function,
                 int* late); // 0, or the status to return; late: after a release
    int (*leave)(const char* function, int status, const char* said);
    const fake_config* (*config)(void);
    int (*current)(void** ctx);                    // 0, or a CUresult
    int (*unsafe)(const char* function);           // 0, or 900: not allowed during a capture
    void* (*object_make)(size_t bytes, void* ctx); // a cuBLAS handle with zeroed data of that size
    void* (*object_data)(void* handle);            // NULL if not a live handle
    void* (*object_owner)(void* handle);
    void (*object_drop)(void* handle);
    const char* (*tag)(const void* handle);
    const char* (*tag_address)(uint64_t address);
    bool (*stream_valid)(void* ctx, void* stream, bool* capturing);
    void (*capture_break)(void* ctx, void* stream, const char* why);
    // Queues run(ctx, payload) on the stream. run returns 0 or a CUresult that becomes sticky.
    int (*submit)(void* ctx, void* stream, int (*run)(void* ctx, const void* payload),
                  const void* payload, size_t bytes);
    void* (*resolve)(void* ctx, uint64_t address, size_t bytes, bool write);
    void (*broken)(const char* said); // records a broken rule
    void (*count_gemm)(void);
    // What the work that runs uses: rows of so many bytes, `pitch` bytes apart.
    void (*touch)(uint64_t address, size_t bytes, size_t rows, size_t pitch, bool write);
} fake_inside;

// variant.c: what the variants of the library differ in.
extern const bool fake_is_stub;
bool fake_omits(const char* name);

static inline const fake_api* fake_from(void* library) {
    const fake_api* (*get)(void);
    void* symbol = library ? dlsym(library, "fake_get_api") : NULL;
    if (!symbol) {
        return NULL;
    }
    memcpy(&get, &symbol, sizeof get);
    return get();
}

static inline const fake_api* fake_open(void) {
    return fake_from(dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL));
}

#endif
