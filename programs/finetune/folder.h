// folder.h - the output folder.
#ifndef FINETUNE_FOLDER_H
#define FINETUNE_FOLDER_H

static void name_take(const char* name, char first[256]) {
    bool ours = strcmp(name, ".") == 0 || strcmp(name, "..") == 0 ||
                strcmp(name, ".finetune") == 0 || strcmp(name, ".finetune.new") == 0;
    if (!ours && (first[0] == '\0' || strcmp(name, first) < 0)) {
        snprintf(first, 256, "%s", name);
    }
}

// Finds the first name in a folder, in the order of strcmp ("" if it is empty). Returns 0 or errno.
static int folder_look(const char* path, char first[256]) {
    first[0] = '\0';
#ifdef _WIN32
    struct _finddata_t entry;
    char all[PATH_SIZE + 8];
    snprintf(all, sizeof all, "%s/*", path);
    intptr_t folder = _findfirst(all, &entry);
    if (folder == -1) {
        return errno;
    }
    do {
        name_take(entry.name, first);
    } while (_findnext(folder, &entry) == 0);
    _findclose(folder);
#else
    DIR* folder = opendir(path);
    if (folder == NULL) {
        return errno;
    }
    for (struct dirent* entry = readdir(folder); entry != NULL; entry = readdir(folder)) {
        name_take(entry->d_name, first);
    }
    closedir(folder);
#endif
    return 0;
}

// A run of finetune is recognised by its settings.txt: these names come first in every version.
static bool settings_ours(const blob* text) {
    static const char* const names[] = {"model ", "data ", "template ", "adapter ", "rank "};
    const char* line = text->count > 0 ? text->data : "";
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (strncmp(line, names[i], strlen(names[i])) != 0) {
            return false;
        }
        line += strcspn(line, "\n");
        line += *line == '\n' ? 1 : 0;
    }
    return true;
}

// A folder that is not empty must contain a run of finetune. If only its settings are missing, the
// checkpoint identifies it; nothing is overwritten before that has been read.
static bool out_check(app* a, const char* first) {
    char path[PATH_SIZE];
    blob kept;
    memset(&kept, 0, sizeof kept);
    a->out_empty = first[0] == '\0';
    if (a->out_empty) {
        return true;
    }
    bool ours = false;
    out_path(a, "settings.txt", path);
    bool ok = file_read(a, path, &kept);
    ours = ok && settings_ours(&kept);
    if (ok && kept.data == NULL && a->o.resume != RESUME_NEVER) {
        out_path(a, "checkpoint", path);
        ok = lib(a, qlora_checkpoint_exists(a->ctx, path, &ours), "looking for a checkpoint");
    }
    blob_free(&kept);
    return ok && (ours || fail(a->error,
                               "--out %s: the folder contains '%s' but no finetune run; choose an "
                               "empty or new folder",
                               a->o.out, first));
}

// Creates the folder and its parents, and checks that it is writable before the long start.
static bool out_make(app* a) {
    char path[PATH_SIZE];
    char first[256];
    snprintf(path, sizeof path, "%s", a->o.out);
    if (strlen(a->o.out) + 64 > PATH_SIZE) {
        return fail(a->error, "--out: the path is longer than %d characters", PATH_SIZE - 64);
    }
    int before = folder_look(a->o.out, first);
    int code = before;
    if (before != 0) {
        for (size_t i = 1; path[i] != '\0'; i++) {
            if (path[i] == '/' || path[i] == '\\') {
                char keep = path[i];
                path[i] = '\0';
                a->files.make_dir(path, a->files.user); // errors show up in the last call
                path[i] = keep;
            }
        }
        code = a->files.make_dir(a->o.out, a->files.user);
        if (code != 0) {
            return fail(a->error, "cannot create the output folder %s: %s", a->o.out,
                        strerror(code));
        }
        code = folder_look(a->o.out, first);
    }
    if (code == ENOENT || code == ENOTDIR) { // something else has that name
        return fail(a->error, "--out %s is not a folder", a->o.out);
    }
    if (code != 0) {
        return fail(a->error, "cannot read the output folder %s: %s", a->o.out, strerror(code));
    }
    a->out_made = before == ENOENT;
    if (!out_check(a, first) || !file_replace(a, ".finetune", "1\n", 2)) {
        return false;
    }
    out_path(a, ".finetune", path);
    remove(path);
    return true;
}

// Compares the options with those of a run to be resumed, before anything slow starts.
static bool settings_check(app* a) {
    char path[PATH_SIZE];
    char settings[SETTINGS_SIZE];
    char then[256];
    char now[256];
    blob kept;
    memset(&kept, 0, sizeof kept);
    settings_write(&a->o, settings, sizeof settings);
    a->settings_hash = hash_more(HASH_START, settings, strlen(settings));
    out_path(a, "checkpoint", path);
    if (!out_make(a) ||
        !lib(a, qlora_checkpoint_exists(a->ctx, path, &a->resuming), "looking for a checkpoint")) {
        return false;
    }
    if (!a->resuming && a->o.resume == RESUME_MUST) {
        return fail(a->error, "--resume must: no checkpoint found in %s", path);
    }
    a->resuming = a->resuming && a->o.resume != RESUME_NEVER;
    if (!a->resuming) {
        return true;
    }
    out_path(a, "settings.txt", path);
    bool ok = file_read(a, path, &kept) &&
              (kept.data == NULL || settings_equal(kept.data, settings, then, now) ||
               fail(a->error,
                    "%s contains a run with different options: it used %s, this command has %s; "
                    "use the same options, a different --out, or --resume never to start over",
                    a->o.out, then, now));
    blob_free(&kept);
    return ok;
}

// The model is ready, so the folder now belongs to this run: its options go into OUT/settings.txt,
// and an earlier run's checkpoint is invalidated by removing its list, even if this run ends before
// it saves one.
static bool out_begin(app* a) {
    char path[PATH_SIZE];
    char settings[SETTINGS_SIZE];
    if (!a->resuming) {
        a->files_made = a->out_empty;
        settings_write(&a->o, settings, sizeof settings);
        if (!file_replace(a, "settings.txt", settings, strlen(settings))) {
            return false;
        }
        out_path(a, "checkpoint/latest", path);
        if (remove(path) != 0 && errno != ENOENT) {
            return fail(a->error, "cannot remove %s: %s", path, strerror(errno));
        }
    }
    return log_trim(a) && log_flush(a);
}

// Removes what a failed start has created and nothing else; a run that has started keeps its files.
static void out_unmake(app* a) {
    char path[PATH_SIZE];
    if (a->log != NULL) {
        fclose(a->log);
        a->log = NULL;
    }
    if (a->files_made) {
        out_path(a, "log.jsonl", path);
        remove(path);
        out_path(a, "settings.txt", path);
        remove(path);
    }
    if (a->out_made) { // rmdir removes it only if it is empty
#ifdef _WIN32
        (void)_rmdir(a->o.out);
#else
        (void)rmdir(a->o.out);
#endif
    }
}

#endif
