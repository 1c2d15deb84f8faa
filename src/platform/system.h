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
#define QLORA__CUBLASLT_NAMES(X) X("cublasLt64_13.dll") X("cublasLt64_12.dll")
#else
#define QLORA__CUDAAPI
#define QLORA__CUDA_NAMES(X)                                                                       \
    X("libcuda.so.1") X("libcuda.so") X("/usr/lib/wsl/lib/libcuda.so.1")
#define QLORA__CUBLAS_NAMES(X)                                                                     \
    X("libcublas.so.13") X("libcublas.so.12") X("libcublas.so.11") X("libcublas.so")               \
    X("/usr/local/cuda/lib64/libcublas.so")
#define QLORA__CUBLASLT_NAMES(X)                                                                   \
    X("libcublasLt.so.13") X("libcublasLt.so.12") X("libcublasLt.so")                              \
    X("/usr/local/cuda/lib64/libcublasLt.so")
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
