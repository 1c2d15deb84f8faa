// contract_cuda.cpp - compares qlora.h's declarations of the CUDA driver, cuBLAS and cuBLASLt with
// NVIDIA's headers and libraries: parameter by parameter, value by value, name by name. It is built
// by `make check` if cuda.h is installed; no GPU is needed. It is C++ because templates can take
// function types apart.
//
//   contract [stub libcuda.so [libcublas.so.13]]

#define QLORA_IMPLEMENTATION
#define QLORA_STATIC
#include "qlora.h"

#include <cuda.h>

#include <cublas_v2.h>

#include <cublasLt.h>

#include <type_traits>

static int faults;

static void fault(const char* what, const char* which) {
    printf("%s: %s\n", which, what);
    faults++;
}

// ---- types: ours are int for enums and void* for handles; the values passed must be the same ----

// Pointer targets: void matches any opaque type; otherwise the targets must match in turn.
template <class Ours, class Theirs> struct same_value;

template <class Ours, class Theirs> struct same_target {
    static const bool value =
        std::is_const<Ours>::value == std::is_const<Theirs>::value &&
        same_value<typename std::remove_cv<Ours>::type,
                   typename std::remove_cv<Theirs>::type>::value;
};
template <class Theirs> struct same_target<void, Theirs> {
    static const bool value = !std::is_const<Theirs>::value && !std::is_arithmetic<Theirs>::value;
};
template <class Theirs> struct same_target<const void, Theirs> {
    static const bool value = !std::is_arithmetic<Theirs>::value;
};

template <class Ours, class Theirs> struct same_value {
    static const bool whole = (std::is_integral<Ours>::value || std::is_enum<Ours>::value) &&
                              (std::is_integral<Theirs>::value || std::is_enum<Theirs>::value);
    static const bool real = std::is_floating_point<Ours>::value &&
                             std::is_floating_point<Theirs>::value;
    // In C++, enums without negative values are unsigned; integers must agree in signedness.
    static const bool sign = std::is_enum<Theirs>::value ||
                             std::is_signed<Ours>::value == std::is_signed<Theirs>::value;
    static const bool value = sizeof(Ours) == sizeof(Theirs) && ((whole && sign) || real);
};
template <class Ours, class Theirs> struct same_value<Ours*, Theirs*> {
    static const bool value = same_target<Ours, Theirs>::value;
};

template <class Ours, class Theirs> struct same_call {
    static const bool value = false; // a different number of parameters
};
template <class R, class S> struct same_call<R (*)(), S (*)()> {
    static const bool value = same_value<R, S>::value;
};
template <class R, class S, class A, class B, class... As, class... Bs>
struct same_call<R (*)(A, As...), S (*)(B, Bs...)> {
    static const bool value =
        same_value<A, B>::value && same_call<R (*)(As...), S (*)(Bs...)>::value;
};

// ---- names: NVIDIA's headers map the plain name to the current version of the symbol ----

#define TEXT_2(name) #name
#define TEXT(name) TEXT_2(name)

// An older symbol than the one the headers map to, with the same parameters: older drivers have it
// as well.
static bool is_known_older(const char* ours) {
    return strcmp(ours, "cuEventElapsedTime") == 0;
}

static void compare_name(const char* ours, const char* theirs) {
    if (strcmp(ours, theirs) != 0 && !is_known_older(ours)) {
        fault(theirs, ours);
    }
}

#define COMPARE_CUDA(required, type, field, symbol, args)                                          \
    if (!same_call<decltype(qlora__cuda_table::field), decltype(&cu##field)>::value) {             \
        fault("the parameters differ from cuda.h", symbol);                                        \
    }                                                                                              \
    compare_name(symbol, TEXT(cu##field));
// cublas_api.h overloads these two in C++; the casts check that the C signatures are as written.
typedef cublasStatus_t gemm_ex(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int,
                               const void*, const void*, cudaDataType, int, const void*,
                               cudaDataType, int, const void*, void*, cudaDataType, int,
                               cublasComputeType_t, cublasGemmAlgo_t);
typedef cublasStatus_t gemm_batched_ex(cublasHandle_t, cublasOperation_t, cublasOperation_t, int,
                                       int, int, const void*, const void*, cudaDataType, int,
                                       long long, const void*, cudaDataType, int, long long,
                                       const void*, void*, cudaDataType, int, long long, int,
                                       cublasComputeType_t, cublasGemmAlgo_t);
static_assert(sizeof(static_cast<gemm_ex*>(&cublasGemmEx)) > 0, "");
static_assert(sizeof(static_cast<gemm_batched_ex*>(&cublasGemmStridedBatchedEx)) > 0, "");
#define OVERLOADED_GemmEx ~, gemm_ex*
#define OVERLOADED_GemmStridedBatchedEx ~, gemm_batched_ex*
#define SECOND(first, second, ...) second
#define PICK(...) SECOND(__VA_ARGS__)

// Structures that are passed as void*.
static_assert(sizeof(qlora__memset_node) == sizeof(CUDA_MEMSET_NODE_PARAMS) &&
                  offsetof(qlora__memset_node, value) == offsetof(CUDA_MEMSET_NODE_PARAMS, value) &&
                  offsetof(qlora__memset_node, height) == offsetof(CUDA_MEMSET_NODE_PARAMS, height),
              "");
static_assert(sizeof(qlora__launch_attribute) == sizeof(CUlaunchAttribute) &&
                  offsetof(qlora__launch_attribute, value) == offsetof(CUlaunchAttribute, value),
              "");
static_assert(sizeof(qlora__launch_config) == sizeof(CUlaunchConfig) &&
                  offsetof(qlora__launch_config, shared) ==
                      offsetof(CUlaunchConfig, sharedMemBytes) &&
                  offsetof(qlora__launch_config, stream) == offsetof(CUlaunchConfig, hStream) &&
                  offsetof(qlora__launch_config, attributes) == offsetof(CUlaunchConfig, attrs) &&
                  offsetof(qlora__launch_config, count) == offsetof(CUlaunchConfig, numAttrs),
              "");
static_assert(sizeof(qlora__kernel_node) == sizeof(CUDA_KERNEL_NODE_PARAMS) &&
                  offsetof(qlora__kernel_node, block) ==
                      offsetof(CUDA_KERNEL_NODE_PARAMS, blockDimX) &&
                  offsetof(qlora__kernel_node, args) ==
                      offsetof(CUDA_KERNEL_NODE_PARAMS, kernelParams) &&
                  offsetof(qlora__kernel_node, context) == offsetof(CUDA_KERNEL_NODE_PARAMS, ctx),
              "");

#define COMPARE_CUBLAS(required, type, field, symbol, args)                                        \
    if (!same_call<decltype(qlora__cublas_table::field),                                           \
                   PICK(OVERLOADED_##field, decltype(&cublas##field), ~)>::value) {                \
        fault("the parameters differ from cublas_v2.h", symbol);                                   \
    }                                                                                              \
    compare_name(symbol, TEXT(cublas##field));

#define COMPARE_CUBLASLT(required, type, field, symbol, args)                                      \
    if (!same_call<decltype(qlora__lt_table::field), decltype(&cublasLt##field)>::value) {         \
        fault("the parameters differ from cublasLt.h", symbol);                                    \
    }                                                                                              \
    compare_name(symbol, TEXT(cublasLt##field));

static_assert(sizeof(qlora__lt_choice) == sizeof(cublasLtMatmulHeuristicResult_t) &&
                  offsetof(qlora__lt_choice, workspace) ==
                      offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize) &&
                  offsetof(qlora__lt_choice, state) ==
                      offsetof(cublasLtMatmulHeuristicResult_t, state),
              "");

// The comparison itself must be able to fail.
static_assert(same_call<int (*)(void**, unsigned), CUresult (*)(CUstream*, unsigned)>::value, "");
static_assert(!same_call<int (*)(void*, unsigned), CUresult (*)(CUdeviceptr, unsigned)>::value, "");
static_assert(!same_call<int (*)(void*), CUresult (*)(CUstream, unsigned)>::value, "");
static_assert(!same_call<int (*)(unsigned*), CUresult (*)(size_t*)>::value, "");
static_assert(!same_call<int (*)(const void*), CUresult (*)(CUdeviceptr)>::value, "");
static_assert(!same_call<int (*)(float), CUresult (*)(int)>::value, "");

static int compare_symbols(void* library, const qlora__symbol* symbols, size_t count) {
    int found = 0;
    for (size_t i = 0; i < count; i++) {
        if (dlsym(library, symbols[i].name)) {
            found++;
        } else {
            fault("not in the library", symbols[i].name);
        }
    }
    return found;
}

static void compare_library(const char* path, const qlora__symbol* symbols, size_t count) {
    void* library = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
    if (library) {
        const char* slash = strrchr(path, '/');
        printf("%d symbols in %s\n", compare_symbols(library, symbols, count),
               slash ? slash + 1 : path);
    } else {
        printf("(%s)\n", dlerror());
    }
}

// cuBLAS returns the names of its statuses even without a GPU.
static void compare_statuses(const char* path) {
    void* library = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
    const char* (*name)(cublasStatus_t);
    void* address = library ? dlsym(library, "cublasGetStatusName") : NULL;
    if (!address) {
        return;
    }
    memcpy(&name, &address, sizeof(name));
    for (int status = 1; status < 20; status++) {
        const char* ours = qlora__cublas_name(status);
        if (strncmp(ours, "CUBLAS_", 7) == 0 && strcmp(ours, name((cublasStatus_t)status)) != 0) {
            fault(name((cublasStatus_t)status), ours);
        }
    }
}

int main(int argc, char** argv) {
    QLORA__CUDA_SYMBOLS(COMPARE_CUDA)
    QLORA__CUBLAS_SYMBOLS(COMPARE_CUBLAS)
    QLORA__CUBLASLT_SYMBOLS(COMPARE_CUBLASLT)
    int values = 0;
#define VALUE(name)                                                                                \
    values++;                                                                                      \
    if ((long long)QLORA__##name != (long long)name) {                                             \
        fault("the value differs from NVIDIA's header", #name);                                    \
    }
#include CONTRACT_VALUES // generated by check.sh: VALUE(name) for each QLORA__name in qlora.h
    printf("%d values compared\n", values);
    if (values == 0) {
        fault("nothing was compared", "values");
    }
    const char* cublas = argc > 2 ? argv[2] : "libcublas.so.13";
    if (argc > 1) {
        compare_library(argv[1], qlora__cuda_symbols,
                        sizeof(qlora__cuda_symbols) / sizeof(qlora__cuda_symbols[0]));
    }
    compare_library(cublas, qlora__cublas_symbols,
                    sizeof(qlora__cublas_symbols) / sizeof(qlora__cublas_symbols[0]));
    compare_library("libcublasLt.so.13", qlora__lt_symbols,
                    sizeof(qlora__lt_symbols) / sizeof(qlora__lt_symbols[0]));
    compare_statuses(cublas);
    return faults != 0;
}
