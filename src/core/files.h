#ifndef QLORA__PART_FILES
#define QLORA__PART_FILES

// ---- files --------------------------------------------------------------------------------------

typedef struct qlora__map {
    const uint8_t* data;
    uint64_t size;
    void* handle;
} qlora__map;

static QLORA__UNUSED qlora_result qlora__map_open(qlora__env* env, const char* path,
                                                  qlora__map* out) {
    memset(out, 0, sizeof *out);
    const void* data = NULL;
    int code = env->files.map(path, &data, &out->size, &out->handle, env->files.user);
    if (code != 0) {
        return qlora__env_fail(env, QLORA_ERR_FILE, "cannot read %s: %s (%d)", path,
                               qlora__errno_text(code), code);
    }
    out->data = (const uint8_t*)data;
    return QLORA_OK;
}

static QLORA__UNUSED void qlora__map_close(qlora__env* env, qlora__map* map) {
    if (map->data != NULL || map->handle != NULL) {
        env->files.unmap(map->data, map->size, map->handle, env->files.user);
    }
    memset(map, 0, sizeof *map);
}

// A file being written: the data goes to a temporary name next to the final one, and the file is
// renamed only once it is complete and on disk. A crash leaves either the old file or the new one.
typedef struct qlora__out {
    void* file;
    char* path; // the final and the temporary path, in one block
    char* temporary;
    size_t block;
} qlora__out;

static QLORA__UNUSED void qlora__out_forget(qlora__env* env, qlora__out* out) {
    qlora__env_free(env, out->path, out->block);
    memset(out, 0, sizeof *out);
}

// Abandons the file: closes and removes the temporary one. Keeps the error text.
static QLORA__UNUSED void qlora__out_abort(qlora__env* env, qlora__out* out) {
    if (out->file != NULL) {
        env->files.close(out->file, env->files.user);
    }
    if (out->temporary != NULL) {
        env->files.remove(out->temporary, env->files.user);
    }
    qlora__out_forget(env, out);
}

static QLORA__UNUSED qlora_result qlora__out_fail(qlora__env* env, qlora__out* out,
                                                  const char* what, int code) {
    qlora_result r = qlora__env_fail(env, QLORA_ERR_FILE, "cannot %s %s: %s (%d)", what, out->path,
                                     qlora__errno_text(code), code);
    qlora__out_abort(env, out);
    return r;
}

static QLORA__UNUSED qlora_result qlora__out_begin(qlora__env* env, const char* path,
                                                   qlora__out* out) {
    memset(out, 0, sizeof *out);
    size_t length = strlen(path);
    out->block = 2 * length + 6;
    out->path = (char*)qlora__env_alloc(env, out->block);
    if (out->path == NULL) {
        return QLORA_ERR_MEMORY;
    }
    memcpy(out->path, path, length + 1);
    char* temporary = out->path + length + 1;
    memcpy(temporary, path, length);
    memcpy(temporary + length, ".tmp", 5);
    int code = env->files.open(temporary, QLORA_FILE_CREATE, &out->file, env->files.user);
    if (code == EEXIST) { // left by a crash, or a link: the name is removed, never what it names
        env->files.remove(temporary, env->files.user);
        code = env->files.open(temporary, QLORA_FILE_CREATE, &out->file, env->files.user);
    }
    if (code != 0) {
        out->file = NULL; // nothing to remove
        return qlora__out_fail(env, out, "create", code);
    }
    out->temporary = temporary;
    return QLORA_OK;
}

// On failure, the file has already been abandoned.
static QLORA__UNUSED qlora_result qlora__out_write(qlora__env* env, qlora__out* out,
                                                   const void* data, size_t bytes) {
    const char* p = (const char*)data;
    while (bytes > 0) {
        int64_t n = env->files.write(out->file, p, bytes, env->files.user);
        if (n <= 0 || (uint64_t)n > bytes) {
            return qlora__out_fail(env, out, "write", n < 0 ? (int)-n : EIO);
        }
        p += n;
        bytes -= (size_t)n;
    }
    return QLORA_OK;
}

// Completes the temporary file: everything that was written is on disk. It still has to be
// published.
static QLORA__UNUSED qlora_result qlora__out_finish(qlora__env* env, qlora__out* out) {
    const qlora_files* files = &env->files;
    int code = files->sync(out->file, files->user);
    if (code != 0) {
        return qlora__out_fail(env, out, "sync", code);
    }
    code = files->close(out->file, files->user);
    out->file = NULL;
    return code == 0 ? QLORA_OK : qlora__out_fail(env, out, "close", code);
}

// Gives a finished file its final name.
static QLORA__UNUSED qlora_result qlora__out_publish(qlora__env* env, qlora__out* out) {
    const qlora_files* files = &env->files;
    int code = files->rename(out->temporary, out->path, files->user);
    if (code != 0) {
        return qlora__out_fail(env, out, "replace", code);
    }
    out->temporary = NULL; // the file has its final name now
    char* slash = strrchr(out->path, '/');
    const char* folder = slash != NULL ? out->path : ".";
    if (slash != NULL) {
        slash[slash == out->path ? 1 : 0] = '\0';
    }
    code = files->sync_dir(folder, files->user);
    if (code != 0) {
        return qlora__out_fail(env, out, "sync the folder of", code);
    }
    qlora__out_forget(env, out);
    return QLORA_OK;
}

static QLORA__UNUSED qlora_result qlora__out_commit(qlora__env* env, qlora__out* out) {
    QLORA__TRY(qlora__out_finish(env, out));
    return qlora__out_publish(env, out);
}

// Writes a small file atomically.
static QLORA__UNUSED qlora_result qlora__file_write(qlora__env* env, const char* path,
                                                    const void* bytes, size_t size) {
    qlora__out out;
    QLORA__TRY(qlora__out_begin(env, path, &out));
    QLORA__TRY(qlora__out_write(env, &out, bytes, size));
    return qlora__out_commit(env, &out);
}

#define QLORA__PATH_ROOM 4096

// Joins a folder and a file name into `out` (QLORA__PATH_ROOM bytes).
static QLORA__UNUSED qlora_result qlora__path_join(qlora__env* env, const char* dir,
                                                   const char* name, char* out) {
    size_t a = strlen(dir);
    size_t b = strlen(name);
    if (a + b + 2 > QLORA__PATH_ROOM) {
        return qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                               "the path %.60s.../%.60s is longer than %d bytes", dir, name,
                               QLORA__PATH_ROOM);
    }
    memcpy(out, dir, a);
    if (a > 0 && dir[a - 1] != '/') {
        out[a] = '/';
        a++;
    }
    memcpy(out + a, name, b + 1);
    return QLORA_OK;
}

// Checks whether a file exists. Any failure to open it other than "no such file" is an error.
static QLORA__UNUSED qlora_result qlora__file_exists(qlora__env* env, const char* path, bool* out) {
    void* file = NULL;
    int code = env->files.open(path, QLORA_FILE_READ, &file, env->files.user);
    if (code != 0 && code != ENOENT) {
        return qlora__env_fail(env, QLORA_ERR_FILE, "cannot read %s: %s (%d)", path,
                               qlora__errno_text(code), code);
    }
    if (code == 0) {
        env->files.close(file, env->files.user);
    }
    *out = code == 0;
    return QLORA_OK;
}

static QLORA__UNUSED qlora_result qlora__dir_make(qlora__env* env, const char* dir) {
    int code = env->files.make_dir(dir, env->files.user);
    return code == 0 ? QLORA_OK
                     : qlora__env_fail(env, QLORA_ERR_FILE, "cannot create the folder %s: %s (%d)",
                                       dir, qlora__errno_text(code), code);
}

static QLORA__UNUSED qlora_result qlora__dir_sync(qlora__env* env, const char* dir) {
    int code = env->files.sync_dir(dir, env->files.user);
    return code == 0 ? QLORA_OK
                     : qlora__env_fail(env, QLORA_ERR_FILE, "cannot sync the folder %s: %s (%d)",
                                       dir, qlora__errno_text(code), code);
}

// Removes a file if it exists.
static QLORA__UNUSED void qlora__file_remove(qlora__env* env, const char* dir, const char* name) {
    char path[QLORA__PATH_ROOM];
    if (qlora__path_join(env, dir, name, path) == QLORA_OK) {
        env->files.remove(path, env->files.user);
    }
}

#endif // QLORA__PART_FILES
