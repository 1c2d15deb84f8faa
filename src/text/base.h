struct qlora_text {
    qlora__env env;
    int64_t toks; // open ones
    int64_t chats;
    int64_t datas;
    int64_t templates;
    int64_t patterns;
};

#define QLORA__TEXT_COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define QLORA__TEXT_LOG(env, item_level, ...)                                                      \
    qlora__env_log((env), QLORA_LOG_##item_level, QLORA_LOG_ITEM_TEXT, "qlora_text.h", __LINE__,   \
                   __VA_ARGS__)

// The first thing a public call does. Public functions do not call each other.
static void qlora__text_enter(qlora_text* text, const char* call) {
    text->env.call = call;
    text->env.error[0] = '\0';
}

// An argument that must not be NULL.
#define QLORA__TEXT_NEED(env, argument)                                                            \
    do {                                                                                           \
        if ((argument) == NULL) {                                                                  \
            return qlora__env_fail((env), QLORA_ERR_ARGUMENT, #argument " is NULL");               \
        }                                                                                          \
    } while (0)

// ---- create, destroy ----------------------------------------------------------------------------

static void qlora__text_tell(const qlora_text_desc* desc, const char* text) {
    if (desc != NULL && desc->error_text != NULL && desc->error_text_size > 0) {
        snprintf(desc->error_text, desc->error_text_size, "%s", text);
    }
}

// What is wrong with a desc, or NULL.
static const char* qlora__text_desc_fault(const qlora_text_desc* d) {
    if (d->reserved_must_be_zero0 != 0 || d->reserved_must_be_zero1 != 0) {
        return "desc was not zeroed: a reserved field is set";
    }
    if ((d->allocator.alloc == NULL) != (d->allocator.free == NULL)) {
        return "desc.allocator needs both functions or none";
    }
    int hooks = qlora__files_count(&d->files);
    if (hooks != 0 && hooks != QLORA__FILES_ALL) {
        return "desc.files needs all functions or none";
    }
    return NULL;
}

qlora_result qlora_text_create(const qlora_text_desc* desc, qlora_text** out) {
    qlora__text_tell(desc, "");
    const char* fault = out == NULL ? "out is NULL" : NULL;
    if (fault == NULL && desc != NULL) {
        fault = qlora__text_desc_fault(desc);
    }
    if (fault != NULL) {
        char message[160];
        snprintf(message, sizeof message, "qlora_text_create: %s", fault);
        qlora__text_tell(desc, message);
        return QLORA_ERR_ARGUMENT;
    }
    qlora__env env;
    memset(&env, 0, sizeof env);
    env.call = "qlora_text_create";
    env.one_line = true;
    if (desc != NULL) {
        env.allocator = desc->allocator;
        env.files = desc->files;
        env.log = desc->log;
        env.log_user = desc->log_user;
    }
    qlora__hooks_default(&env.allocator, &env.files);
    qlora_text* text = (qlora_text*)qlora__env_alloc_zero(&env, sizeof *text);
    if (text == NULL) {
        qlora__text_tell(desc, env.error);
        return QLORA_ERR_MEMORY;
    }
    text->env = env;
    *out = text;
    return QLORA_OK;
}

qlora_result qlora_text_destroy(qlora_text* text) {
    if (text == NULL) {
        return QLORA_OK;
    }
    qlora__text_enter(text, "qlora_text_destroy");
    if (text->toks + text->chats + text->datas + text->templates + text->patterns > 0) {
        return qlora__env_fail(&text->env, QLORA_ERR_STATE,
                               "still open: tokenizers %lld, chats %lld, data files %lld, "
                               "templates %lld, patterns %lld; close them first",
                               (long long)text->toks, (long long)text->chats,
                               (long long)text->datas, (long long)text->templates,
                               (long long)text->patterns);
    }
    qlora__env env = text->env;
    qlora__env_free(&env, text, sizeof *text);
    return QLORA_OK;
}

const char* qlora_text_last_error(const qlora_text* text) {
    return text != NULL ? text->env.error : "no text object (NULL)";
}

int qlora_text_version(void) {
    return QLORA_VERSION;
}

// ---- growing arrays -----------------------------------------------------------------------------

// Makes room for `extra` more elements.
static qlora_result qlora__text_reserve(qlora__env* env, void** data, size_t* capacity,
                                        size_t count, size_t extra, size_t element) {
    if (extra <= *capacity - count) {
        return QLORA_OK;
    }
    size_t limit = SIZE_MAX / 2 / element;
    if (extra > limit || count > limit - extra) {
        return qlora__env_fail(env, QLORA_ERR_MEMORY, "out of host memory: over %llu elements",
                               (unsigned long long)limit);
    }
    size_t wanted = count + extra;
    // large arrays grow by a quarter: half of a large file's memory would otherwise be unused
    size_t more = *capacity < ((size_t)1 << 20) / element ? *capacity : *capacity / 4;
    size_t grown = *capacity <= limit - more ? *capacity + more : limit;
    grown = grown < wanted ? wanted : grown;
    grown = grown < 16 ? 16 : grown;
    void* moved =
        qlora__env_realloc(env, *data, count * element, *capacity * element, grown * element);
    if (moved == NULL) {
        return QLORA_ERR_MEMORY;
    }
    *data = moved;
    *capacity = grown;
    return QLORA_OK;
}

// NULL when out of memory, and when the size overflows.
static void* qlora__text_zalloc(qlora__env* env, size_t count, size_t element) {
    size_t bytes = 0;
    if (!qlora__mul(count, element, &bytes)) {
        qlora__env_fail(env, QLORA_ERR_MEMORY, "out of host memory (%llu x %llu bytes)",
                        (unsigned long long)count, (unsigned long long)element);
        return NULL;
    }
    return qlora__env_alloc_zero(env, bytes);
}

static qlora_result qlora__text_bytes_room(qlora__env* env, qlora_text_bytes* bytes, size_t extra) {
    void* data = bytes->data;
    qlora_result r = qlora__text_reserve(env, &data, &bytes->capacity, bytes->count, extra, 1);
    bytes->data = (char*)data;
    return r;
}

static qlora_result qlora__text_ids_room(qlora__env* env, qlora_text_ids* ids, size_t extra) {
    void* data = ids->data;
    qlora_result r =
        qlora__text_reserve(env, &data, &ids->capacity, ids->count, extra, sizeof(int32_t));
    ids->data = (int32_t*)data;
    return r;
}

static void qlora__text_bytes_free(qlora__env* env, qlora_text_bytes* bytes) {
    qlora__env_free(env, bytes->data, bytes->capacity);
    memset(bytes, 0, sizeof *bytes);
}

static void qlora__text_ids_free(qlora__env* env, qlora_text_ids* ids) {
    qlora__env_free(env, ids->data, ids->capacity * sizeof(int32_t));
    memset(ids, 0, sizeof *ids);
}

static qlora_result qlora__text_bytes_add(qlora__env* env, qlora_text_bytes* bytes,
                                          const void* data, size_t size) {
    QLORA__TRY(qlora__text_bytes_room(env, bytes, size));
    if (size > 0) {
        memcpy(bytes->data + bytes->count, data, size);
        bytes->count += size;
    }
    return QLORA_OK;
}

static qlora_result qlora__text_ids_add(qlora__env* env, qlora_text_ids* ids, int32_t id) {
    QLORA__TRY(qlora__text_ids_room(env, ids, 1));
    ids->data[ids->count++] = id;
    return QLORA_OK;
}

qlora_result qlora_text_bytes_add(qlora_text* text, qlora_text_bytes* bytes, const void* data,
                                  size_t size) {
    if (text == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__text_enter(text, "qlora_text_bytes_add");
    QLORA__TEXT_NEED(&text->env, bytes);
    if (data == NULL && size > 0) {
        return qlora__env_fail(&text->env, QLORA_ERR_ARGUMENT, "data is NULL");
    }
    return qlora__text_bytes_add(&text->env, bytes, data, size);
}

void qlora_text_bytes_free(qlora_text* text, qlora_text_bytes* bytes) {
    if (text != NULL && bytes != NULL) {
        qlora__text_bytes_free(&text->env, bytes);
    }
}

qlora_result qlora_text_ids_add(qlora_text* text, qlora_text_ids* ids, int32_t id) {
    if (text == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__text_enter(text, "qlora_text_ids_add");
    QLORA__TEXT_NEED(&text->env, ids);
    return qlora__text_ids_add(&text->env, ids, id);
}

void qlora_text_ids_free(qlora_text* text, qlora_text_ids* ids) {
    if (text != NULL && ids != NULL) {
        qlora__text_ids_free(&text->env, ids);
    }
}

// ---- files --------------------------------------------------------------------------------------

// Appends a whole file. A pipe can be read as well: the file is read, not mapped.
static qlora_result qlora__text_file_append(qlora__env* env, const char* path, void* file,
                                            qlora_text_bytes* out) {
    for (;;) {
        size_t step = 65536;
        QLORA__TRY(qlora__text_bytes_room(env, out, step));
        int64_t got = env->files.read(file, out->data + out->count, step, env->files.user);
        if (got < 0 || (uint64_t)got > step) {
            int code = got < 0 ? (int)-got : EIO;
            return qlora__env_fail(env, QLORA_ERR_FILE, "cannot read %s: %s (%d)", path,
                                   qlora__errno_text(code), code);
        }
        if (got == 0) {
            return QLORA_OK;
        }
        out->count += (size_t)got;
    }
}

// Reads a whole file. With `found`, a file that does not exist is not an error.
static qlora_result qlora__text_file_read(qlora__env* env, const char* path, qlora_text_bytes* out,
                                          bool* found) {
    void* file = NULL;
    int code = env->files.open(path, QLORA_FILE_READ, &file, env->files.user);
    if (found != NULL) {
        *found = code == 0 || code == EISDIR;
        if (code == ENOENT || code == ENOTDIR) {
            return QLORA_OK;
        }
    }
    if (code != 0) {
        return qlora__env_fail(env, QLORA_ERR_FILE, "cannot read %s: %s (%d)", path,
                               qlora__errno_text(code), code);
    }
    qlora_result r = qlora__text_file_append(env, path, file, out);
    env->files.close(file, env->files.user); // nothing was written: a failure loses nothing
    return r;
}
