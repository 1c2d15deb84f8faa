// The context: its fields, entering and leaving public calls, host memory and scratch memory.

// The type of CPU arithmetic and of the elements of f32 tensors on the CPU. Tests compile it as
// double to check gradients by finite differences; everything else uses float. Only the portable
// tier has loops in double.
#ifndef QLORA__REAL
#define QLORA__REAL float
#elif !defined(QLORA_NO_SIMD)
#define QLORA_NO_SIMD
#endif

#define QLORA__MAX_THREADS 64
#define QLORA__MAX_DEPTH 16

typedef struct qlora__errand qlora__errand;   // core/errand.h
typedef struct qlora__working qlora__working; // cpu/errands.h
typedef struct qlora__pool qlora__pool;
typedef struct qlora__cpu_table qlora__cpu_table; // cpu/table.h
typedef struct qlora__packing qlora__packing;     // cpu/panels.h
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
    qlora__floating floating;               // the caller's
    uint64_t calls;                         // public ones so far, with nested ones
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
    qlora__errand* errand;  // that has its turn; NULL = none
    qlora__errand* errands; // all that have been created
    qlora__errand* sharing; // the one in the middle of which scratch and packing are; NULL = none
    qlora__working* workings; // the memory that scratch and packing can be, if there is a choice
    qlora_result (*part)(qlora_ctx* ctx); // lets `sharing` have the memory to itself
    const qlora__cpu_table* cpu; // the kernels of its tier
    qlora__packing* packing;     // working memory of CPU products; NULL if the tier needs none
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
    bool exchanges; // with other processes
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
    ctx->calls++;
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
        qlora__floating_default(&ctx->floating);
    }
    QLORA_ASSERT(ctx->depth < QLORA__MAX_DEPTH);
    ctx->scratch_marks[ctx->depth++] = ctx->scratch_used;
    return QLORA_OK;
}

// Releases the scratch memory of the call; the next call on the stream may reuse it. A public call
// that succeeds leaves no error text, whatever failed and was mended inside it.
static qlora_result qlora__leave(qlora_ctx* ctx, qlora_result result) {
    ctx->scratch_used = ctx->scratch_marks[--ctx->depth];
    if (ctx->depth == 0 && result == QLORA_OK) {
        ctx->env.error[0] = '\0';
    }
    if (ctx->depth == 0 && ctx->deactivate != NULL && !ctx->not_current) {
        ctx->deactivate(ctx);
    }
    if (ctx->depth == 0) {
        qlora__floating_restore(&ctx->floating);
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

// Before scratch memory or that of packed products is used: an errand may be in the middle of it.
static QLORA__UNUSED qlora_result qlora__working_need(qlora_ctx* ctx) {
    return ctx->sharing != NULL && ctx->errand == NULL ? ctx->part(ctx) : QLORA_OK;
}

// Takes a 256-byte aligned block of scratch memory, which is released when the public call ends.
static QLORA__UNUSED qlora_result qlora__scratch(qlora_ctx* ctx, size_t bytes, void** out) {
    size_t end = 0;
    QLORA__TRY(qlora__working_need(ctx));
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
