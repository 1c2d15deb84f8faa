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
    X(ERR_COMM,          -8,    "the exchange with other processes failed")                 \
    X(ERR_FULL,          -9,    "there is no room until something else ends")               \
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

// Set all functions or none. Those that return int return 0 or an errno value. read, read_at and
// write return the number of bytes or a negative errno value: after a short write, the rest is
// written again; a read of 0 bytes is the end of the file.
typedef struct qlora_files {
    int (*open)(const char* path, qlora_file_mode mode, void** file, void* user);
    int64_t (*read)(void* file, void* buffer, size_t bytes, void* user);
    // Reads from a place in the file; where `read` goes on does not change. ESPIPE for a pipe.
    int64_t (*read_at)(void* file, void* buffer, size_t bytes, uint64_t offset, void* user);
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
