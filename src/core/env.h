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

#define QLORA__FILES_ALL 12

// How many of the functions are set.
static QLORA__UNUSED int qlora__files_count(const qlora_files* f) {
    return (f->open != NULL) + (f->read != NULL) + (f->read_at != NULL) + (f->write != NULL) +
           (f->sync != NULL) + (f->close != NULL) + (f->rename != NULL) + (f->remove != NULL) +
           (f->make_dir != NULL) + (f->sync_dir != NULL) + (f->map != NULL) + (f->unmap != NULL);
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
        files->read_at = qlora__os_read_at;
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
