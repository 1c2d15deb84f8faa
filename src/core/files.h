// ---- files --------------------------------------------------------------------------------------

typedef struct qlora__map {
    const uint8_t* data;
    uint64_t size;
    void* handle;
} qlora__map;

static QLORA__UNUSED qlora_result qlora__map_open(qlora_ctx* ctx, const char* path,
                                                  qlora__map* out) {
    memset(out, 0, sizeof *out);
    const void* data = NULL;
    int code = ctx->desc.files.map(path, &data, &out->size, &out->handle, ctx->desc.files.user);
    if (code != 0) {
        return qlora__fail(ctx, QLORA_ERR_FILE, "cannot read %s: %s (%d)", path,
                           qlora__errno_text(code), code);
    }
    out->data = (const uint8_t*)data;
    return QLORA_OK;
}

static QLORA__UNUSED void qlora__map_close(qlora_ctx* ctx, qlora__map* map) {
    if (map->data != NULL || map->handle != NULL) {
        ctx->desc.files.unmap(map->data, map->size, map->handle, ctx->desc.files.user);
    }
    memset(map, 0, sizeof *map);
}

// A file in the making: written beside its final name and put there only when it is whole and on
// the disk (C-FILES). A crash leaves the old file or the new one.
typedef struct qlora__out {
    void* file;
    char* path; // final, then temporary, in one block
    char* temporary;
    size_t block;
} qlora__out;

static void qlora__out_forget(qlora_ctx* ctx, qlora__out* out) {
    qlora__free(ctx, out->path, out->block);
    memset(out, 0, sizeof *out);
}

// Gives up: closes and removes the temporary file. Keeps the error text.
static void qlora__out_abort(qlora_ctx* ctx, qlora__out* out) {
    if (out->file != NULL) {
        ctx->desc.files.close(out->file, ctx->desc.files.user);
    }
    if (out->temporary != NULL) {
        ctx->desc.files.remove(out->temporary, ctx->desc.files.user);
    }
    qlora__out_forget(ctx, out);
}

static qlora_result qlora__out_fail(qlora_ctx* ctx, qlora__out* out, const char* what, int code) {
    qlora_result r = qlora__fail(ctx, QLORA_ERR_FILE, "cannot %s %s: %s (%d)", what, out->path,
                                 qlora__errno_text(code), code);
    qlora__out_abort(ctx, out);
    return r;
}

static QLORA__UNUSED qlora_result qlora__out_begin(qlora_ctx* ctx, const char* path,
                                                   qlora__out* out) {
    memset(out, 0, sizeof *out);
    size_t length = strlen(path);
    out->block = 2 * length + 6;
    out->path = (char*)qlora__alloc(ctx, out->block);
    if (out->path == NULL) {
        return QLORA_ERR_MEMORY;
    }
    memcpy(out->path, path, length + 1);
    char* temporary = out->path + length + 1;
    memcpy(temporary, path, length);
    memcpy(temporary + length, ".tmp", 5);
    int code = ctx->desc.files.open(temporary, QLORA_FILE_CREATE, &out->file, ctx->desc.files.user);
    if (code != 0) {
        out->file = NULL; // nothing to remove
        return qlora__out_fail(ctx, out, "create", code);
    }
    out->temporary = temporary;
    return QLORA_OK;
}

// On failure the file is given up already.
static QLORA__UNUSED qlora_result qlora__out_write(qlora_ctx* ctx, qlora__out* out,
                                                   const void* data, size_t bytes) {
    const char* p = (const char*)data;
    while (bytes > 0) {
        int64_t n = ctx->desc.files.write(out->file, p, bytes, ctx->desc.files.user);
        if (n <= 0 || (uint64_t)n > bytes) {
            return qlora__out_fail(ctx, out, "write", n < 0 ? (int)-n : EIO);
        }
        p += n;
        bytes -= (size_t)n;
    }
    return QLORA_OK;
}

static QLORA__UNUSED qlora_result qlora__out_commit(qlora_ctx* ctx, qlora__out* out) {
    const qlora_files* files = &ctx->desc.files;
    int code = files->sync(out->file, files->user);
    if (code != 0) {
        return qlora__out_fail(ctx, out, "sync", code);
    }
    code = files->close(out->file, files->user);
    out->file = NULL;
    if (code == 0) {
        code = files->rename(out->temporary, out->path, files->user);
    }
    if (code != 0) {
        return qlora__out_fail(ctx, out, "replace", code);
    }
    out->temporary = NULL; // it has its final name now
    char* slash = strrchr(out->path, '/');
    const char* folder = slash != NULL ? out->path : ".";
    if (slash != NULL) {
        slash[slash == out->path ? 1 : 0] = '\0';
    }
    code = files->sync_dir(folder, files->user);
    if (code != 0) {
        return qlora__out_fail(ctx, out, "sync the folder of", code);
    }
    qlora__out_forget(ctx, out);
    return QLORA_OK;
}
