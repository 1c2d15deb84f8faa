// files.h - the files of a run: written whole, the log.
#ifndef FINETUNE_FILES_H
#define FINETUNE_FILES_H

// Creates a file and writes it. A leftover of the same name is replaced, never followed: it may be
// a link to something else. Returns 0 or errno.
static int file_create(const qlora_files* f, const char* path, const char* data, size_t size) {
    void* file = NULL;
    int code = f->open(path, QLORA_FILE_CREATE, &file, f->user);
    if (code == EEXIST && (code = f->remove(path, f->user)) == 0) {
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
    if (a->rank > 0) { // rank 0 writes
        return true;
    }
    out_path(a, name, path);
    snprintf(temporary, sizeof temporary, "%s.new", path);
    int code = file_create(&a->files, temporary, data, size);
    if (code == 0) {
        code = a->files.rename(temporary, path, a->files.user);
    }
    if (code != 0) {
        (void)a->files.remove(temporary, a->files.user);
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

static bool points_add(app* a, const point* p) {
    if (a->point_count == a->point_room) {
        size_t room = a->point_room * 2 + 256;
        point* grown = (point*)realloc(a->points, room * sizeof *grown);
        if (grown == NULL) {
            return error_set(a->error, "out of memory");
        }
        a->points = grown;
        a->point_room = room;
    }
    a->points[a->point_count++] = *p;
    return true;
}

static int file_cut(const char* path, long size) {
#ifdef _WIN32
    FILE* file = fopen(path, "r+b");
    int result = file != NULL ? _chsize(_fileno(file), size) : -1;
    if (file != NULL) {
        fclose(file);
    }
    return result;
#else
    return truncate(path, size);
#endif
}

// Writes the pending lines. If the disk is full, a partial write is undone and the lines stay
// pending.
static bool log_flush(app* a) {
    char path[PATH_SIZE];
    if (a->rank > 0) {
        a->log_rest.count = 0;
        return true;
    }
    out_path(a, "log.jsonl", path);
    if (a->log == NULL) {
        a->log = fopen(path, "ab");
        if (a->log == NULL) {
            return error_set(a->error, "cannot write %s: %s", path, strerror(errno));
        }
        fseek(a->log, 0, SEEK_END);
    }
    long before = ftell(a->log);
    size_t count = a->log_rest.count;
    if (count == 0 ||
        (fwrite(a->log_rest.data, 1, count, a->log) == count && fflush(a->log) == 0)) {
        a->log_rest.count = 0;
        return true;
    }
    int code = errno;
    fclose(a->log);
    a->log = NULL;
    a->log_torn = before < 0 || file_cut(path, before) != 0;
    return error_set(a->error, "cannot write %s%s: %s", path,
                     a->log_torn ? " or remove its last, partial line" : "", strerror(code));
}

// Appends one line. If that fails, training continues.
static void log_line(app* a, const blob* line) {
    if (!a->log_torn) {
        bool ok = blob_add(&a->log_rest, line->data, line->count) ||
                  error_set(a->error, "cannot write the log: out of memory");
        bear(a, TOLD_LOG, ok && log_flush(a));
    }
}

static void log_step(app* a, const point* p, const qlora_train_info* info) {
    blob line;
    memset(&line, 0, sizeof line);
    put(&line, "{\"step\":%lld", (long long)p->step);
    put_number(&line, "loss", p->loss, "%.9g");
    put_number(&line, "grad_norm", p->grad_norm, "%.9g");
    put_number(&line, "lr", p->lr, "%.9g");
    put_number(&line, "tokens_per_s", p->tokens_per_s, "%.1f");
    put_number(&line, "seconds", a->seconds, "%.3f");
    if (a->o.method != QLORA_METHOD_SFT) {
        put_number(&line, "rewards_chosen", info->rewards_chosen, "%.9g");
        put_number(&line, "rewards_rejected", info->rewards_rejected, "%.9g");
        put_number(&line, "margins", info->margins, "%.9g");
        put_number(&line, "accuracy", info->accuracy, "%.9g");
    }
    if (a->o.method == QLORA_METHOD_DPO) {
        put_number(&line, "preference_loss", info->preference_loss, "%.9g");
        put_number(&line, "chosen_nll", info->chosen_nll, "%.9g");
    } else if (a->o.method == QLORA_METHOD_KTO) {
        put_number(&line, "kl", info->kl, "%.9g");
    }
    if (a->world > 1) {
        put(&line, ",\"ranks\":%d,\"slowest_rank\":%d,\"sent_bytes\":%lld", (int)a->world,
            (int)a->slowest, (long long)info->sent);
    }
    put(&line, ",\"tokens\":%lld,\"labels\":%.0f,\"memory_bytes\":%llu%s}\n",
        (long long)info->tokens, info->labels, (unsigned long long)memory_used(a),
        info->last_skipped ? ",\"skipped\":true" : "");
    log_line(a, &line);
    blob_free(&line);
}

// accuracy NAN = the held-out loss is that of answers, which has a perplexity.
static void log_eval(app* a, const point* p, double accuracy) {
    blob line;
    memset(&line, 0, sizeof line);
    put(&line, "{\"step\":%lld", (long long)p->step);
    put_number(&line, "eval_loss", p->eval_loss, "%.9g");
    if (known(accuracy)) {
        put_number(&line, "eval_accuracy", accuracy, "%.9g");
    } else {
        put_number(&line, "perplexity", exp(p->eval_loss), "%.9g");
    }
    put(&line, "}\n");
    log_line(a, &line);
    blob_free(&line);
}

static double log_value(const char* line, const char* end, const char* name) {
    char key[40];
    int n = snprintf(key, sizeof key, "\"%s\":", name);
    for (const char* at = line; at + n < end; at++) {
        if (strncmp(at, key, (size_t)n) == 0) {
            return at[n] == 'n' ? (double)NAN : strtod(at + n, NULL);
        }
    }
    return (double)NAN;
}

// Reads a whole file. A missing file leaves `out` empty; one that exists must be readable.
static bool file_read(app* a, const char* path, blob* out) {
    int code = blob_read_path(out, path);
    return code == 0 || code == ENOENT ||
           error_set(a->error, "cannot read %s: %s", path, strerror(code));
}

// Reads one line of the log. False if it is damaged: the numbers come from a file that anything may
// have happened to, and steps index the plot's tables.
static bool log_point(const app* a, const char* line, const char* stop, point* out) {
    int64_t before = a->point_count > 0 ? a->points[a->point_count - 1].step : 0;
    double step = log_value(line, stop, "step");
    if (stop - line < 2 || line[0] != '{' || stop[-1] != '}' || !(step >= (double)before) ||
        step != floor(step) || step > 1e15) {
        return false;
    }
    out->step = (int64_t)step;
    out->loss = log_value(line, stop, "loss");
    out->grad_norm = log_value(line, stop, "grad_norm");
    out->lr = log_value(line, stop, "lr");
    out->tokens_per_s = log_value(line, stop, "tokens_per_s");
    out->eval_loss = log_value(line, stop, "eval_loss");
    return true;
}

// Keeps the log's lines up to a->step and restores the plot's points from them.
static bool log_trim(app* a) {
    char path[PATH_SIZE];
    size_t damaged = 0;
    blob text;
    blob kept;
    memset(&text, 0, sizeof text);
    memset(&kept, 0, sizeof kept);
    out_path(a, "log.jsonl", path);
    bool ok = a->step == 0 || file_read(a, path, &text);
    const char* end = text.data != NULL ? text.data + text.count : NULL;
    for (const char* line = text.data; ok && line < end;) {
        const char* stop = (const char*)memchr(line, '\n', (size_t)(end - line));
        point p;
        if (stop == NULL) {
            break; // the last line of a run that was killed
        }
        bool read = log_point(a, line, stop, &p);
        damaged += read ? 0 : 1;
        if (read && p.step <= a->step) { // later steps will be taken again
            a->last_loss = known(p.loss) ? p.loss : a->last_loss;
            a->last_eval = known(p.eval_loss) ? p.eval_loss : a->last_eval;
            ok = (points_add(a, &p) && blob_add(&kept, line, (size_t)(stop + 1 - line))) ||
                 error_set(a->error, "out of memory");
        }
        line = stop + 1;
    }
    if (damaged > 0) {
        say(a, "note: %s: %zu damaged line%s removed\n", path, damaged,
            damaged == 1 ? " was" : "s were");
    }
    ok = ok && file_replace(a, "log.jsonl", kept.data, kept.count);
    blob_free(&text);
    blob_free(&kept);
    return ok;
}

#endif
