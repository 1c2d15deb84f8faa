// files.h - the files of a run: written whole, or growing.
#ifndef FINETUNE_FILES_H
#define FINETUNE_FILES_H

// Creates a file and writes it. A leftover of the same name is replaced, never followed: it may be
// a link to something else. Returns 0 or errno.
static int file_create(const qlora_files* f, const char* path, const char* data, size_t size) {
    void* file = NULL;
    int code = f->open(path, QLORA_FILE_CREATE, &file, f->user);
    if (code == EEXIST && (code = (f->remove)(path, f->user)) == 0) {
        code = f->open(path, QLORA_FILE_CREATE, &file, f->user);
    }
    if (code != 0) {
        return code;
    }
    for (size_t done = 0; done < size && code == 0;) {
        int64_t wrote = f->write(file, data + done, size - done, f->user);
        code = wrote < 0 ? (int)-wrote : wrote == 0 ? EIO : 0;
        done += wrote > 0 ? (size_t)wrote : 0;
    }
    int closed = f->close(file, f->user);
    return code != 0 ? code : closed;
}

// Writes to a temporary name, then renames, so that readers never see a partial file.
static bool file_replace(app* a, const char* name, const char* data, size_t size) {
    char path[PATH_SIZE];
    char temporary[PATH_SIZE + 8];
    if (a->ranks.rank > 0) { // rank 0 writes
        return true;
    }
    out_path(a, name, path);
    snprintf(temporary, sizeof temporary, "%s.new", path);
    int code = file_create(&a->files, temporary, data, size);
    if (code == 0) {
        code = a->files.rename(temporary, path, a->files.user);
    }
    if (code != 0) {
        (void)(a->files.remove)(temporary, a->files.user);
    }
    return code == 0 || error_set(a->error, "cannot write %s: %s", path, strerror(code));
}

PRINTF(2, 3)
static void put(blob* out, const char* format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (n > 0) {
        blob_add(out, text, (size_t)n < sizeof text ? (size_t)n : sizeof text - 1);
    }
}

static void put_number(blob* out, const char* name, double value, const char* format) {
    put(out, ",\"%s\":", name);
    if (known(value)) {
        put(out, format, value);
    } else {
        put(out, "null"); // JSON has no NaN
    }
}

// Writes what is pending. If the disk is full, a partial write is undone and the entries stay
// pending.
static bool growing_flush(app* a, growing* g) {
    if (a->ranks.rank > 0) {
        g->rest.count = 0;
        return true;
    }
    if (g->file == NULL) {
        g->file = fopen(g->path, "ab");
        if (g->file == NULL) {
            return error_set(a->error, "cannot write %.800s: %s", g->path, strerror(errno));
        }
        fseek(g->file, 0, SEEK_END);
    }
    long before = ftell(g->file);
    size_t count = g->rest.count;
    if (count == 0 || (fwrite(g->rest.data, 1, count, g->file) == count && fflush(g->file) == 0)) {
        g->rest.count = 0;
        return true;
    }
    int code = errno;
    fclose(g->file);
    g->file = NULL;
    g->torn = before < 0 || file_cut(g->path, before) != 0;
    return error_set(a->error, "cannot write %.800s%s: %s", g->path,
                     g->torn ? " or remove its last, partial entry" : "", strerror(code));
}

// Appends one entry. If that fails, training continues.
static void growing_add(app* a, growing* g, int told, const blob* entry) {
    if (!g->torn) {
        bool ok = blob_add(&g->rest, entry->data, entry->count) ||
                  error_set(a->error, "cannot write %.800s: out of memory", g->path);
        bear(a, told, ok && growing_flush(a, g));
    }
}

static void growing_close(growing* g) {
    if (g->file != NULL) {
        fclose(g->file);
        g->file = NULL;
    }
    blob_free(&g->rest);
}

// Reads a whole file. A missing file leaves `out` empty; one that exists must be readable.
static bool file_read(app* a, const char* path, blob* out) {
    int code = blob_read_path(out, path);
    return code == 0 || code == ENOENT ||
           error_set(a->error, "cannot read %s: %s", path, strerror(code));
}

#endif
