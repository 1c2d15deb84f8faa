// folder.h - the output folder.
#ifndef FINETUNE_FOLDER_H
#define FINETUNE_FOLDER_H

// Calls `found` with every name in a folder. Returns 0 or errno.
typedef void (*name_fn)(void* user, const char* name);
static int folder_names(const char* path, name_fn found, void* user) {
#ifdef _WIN32
    struct _finddata_t entry;
    char all[PATH_SIZE + 8];
    snprintf(all, sizeof all, "%s/*", path);
    intptr_t folder = _findfirst(all, &entry);
    if (folder == -1) {
        return errno;
    }
    do {
        found(user, entry.name);
    } while (_findnext(folder, &entry) == 0);
    _findclose(folder);
#else
    DIR* folder = opendir(path);
    if (folder == NULL) {
        return errno;
    }
    for (struct dirent* entry = readdir(folder); entry != NULL; entry = readdir(folder)) {
        found(user, entry->d_name);
    }
    closedir(folder);
#endif
    return 0;
}

static void first_take(void* user, const char* name) {
    char* first = (char*)user;
    bool ours = strcmp(name, ".") == 0 || strcmp(name, "..") == 0 || strcmp(name, LOCK_NAME) == 0;
    if (!ours && (first[0] == '\0' || strcmp(name, first) < 0)) {
        snprintf(first, 256, "%s", name);
    }
}

// Finds the first name in a folder, in the order of strcmp ("" if it is empty). Returns 0 or errno.
static int folder_look(const char* path, char first[256]) {
    first[0] = '\0';
    return folder_names(path, first_take, first);
}

// ---- checkpoints of an earlier run ----

static bool step_named(const char* name) { // step-N, as the library names them
    return strncmp(name, "step-", 5) == 0 && name[5] != '\0' &&
           strspn(name + 5, "0123456789-") == strlen(name + 5);
}

// What a checkpoint consists of; temporary files have these names with an ending.
static bool step_file_named(const char* name) {
    static const char* const names[] = {"adapter_model.safetensors", "adapter_config.json",
                                        "trained_norms.safetensors", "state.safetensors"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (strncmp(name, names[i], strlen(names[i])) == 0) {
            return true;
        }
    }
    return strcmp(name, ".") == 0 || strcmp(name, "..") == 0;
}

typedef struct step_search {
    const char* dir;
    char newest[64];   // the whole checkpoint with the highest step
    char any[64];      // a folder of a checkpoint
    char foreign[320]; // something in such a folder that no checkpoint contains
} step_search;

typedef struct step_names {
    char ours[256];
    char foreign[256];
} step_names;

static void step_file_take(void* user, const char* name) {
    step_names* s = (step_names*)user;
    if (strcmp(name, ".") != 0 && strcmp(name, "..") != 0) {
        snprintf(step_file_named(name) ? s->ours : s->foreign, 256, "%s", name);
    }
}

static void step_take(void* user, const char* name) {
    step_search* s = (step_search*)user;
    char path[PATH_SIZE + 64];
    step_names files;
    memset(&files, 0, sizeof files);
    if (!step_named(name) || strlen(name) >= sizeof s->any) {
        return;
    }
    snprintf(path, sizeof path, "%s/%s", s->dir, name);
    if (folder_names(path, step_file_take, &files) != 0) {
        return; // not a folder
    }
    snprintf(s->any, sizeof s->any, "%s", name);
    if (files.foreign[0] != '\0') {
        snprintf(s->foreign, sizeof s->foreign, "%s/%.250s", name, files.foreign);
    }
    bool newer =
        s->newest[0] == '\0' || strtoll(name + 5, NULL, 10) > strtoll(s->newest + 5, NULL, 10);
    if (newer && !file_missing(path, "state.safetensors")) { // it is written last
        snprintf(s->newest, sizeof s->newest, "%s", name);
    }
}

static void steps_search(app* a, char dir[PATH_SIZE], step_search* out) {
    memset(out, 0, sizeof *out);
    out_path(a, "checkpoint", dir);
    out->dir = dir;
    (void)folder_names(dir, step_take, out); // no folder, no checkpoints
}

// Nothing is resumed by guessing: without the list, it is not known which checkpoint is meant.
static bool steps_check(app* a) {
    char dir[PATH_SIZE];
    step_search found;
    steps_search(a, dir, &found);
    if (a->o.resume != RESUME_NEVER && !a->resuming && found.newest[0] != '\0') {
        return fail(a->error,
                    "%s contains %s but not the file 'latest', which names the newest checkpoint; "
                    "write %s into it to resume from there, or use --resume never to start over",
                    dir, found.newest, found.newest);
    }
    if (a->o.resume == RESUME_NEVER && found.foreign[0] != '\0') {
        return fail(a->error,
                    "--resume never: %s/%s is not part of a checkpoint; move it elsewhere, or use "
                    "a different --out",
                    dir, found.foreign);
    }
    return true;
}

static bool folder_remove(const char* path) {
#ifdef _WIN32
    return _rmdir(path) == 0;
#else
    return rmdir(path) == 0;
#endif
}

// Removes the checkpoints of the run that --resume never replaces, the list first: half of them
// must never look like a run.
static bool steps_remove(app* a) {
    char dir[PATH_SIZE];
    char path[PATH_SIZE + 64];
    char file[PATH_SIZE + 400];
    static const char* const lists[] = {"checkpoint/latest", "checkpoint/pending"};
    for (size_t i = 0; i < 2; i++) {
        out_path(a, lists[i], dir);
        if (remove(dir) != 0 && errno != ENOENT && errno != ENOTDIR) {
            return fail(a->error, "cannot remove %s: %s", dir, strerror(errno));
        }
    }
    for (;;) {
        step_search found;
        steps_search(a, dir, &found);
        if (found.any[0] == '\0') {
            return true;
        }
        snprintf(path, sizeof path, "%s/%s", dir, found.any);
        for (;;) {
            step_names files;
            memset(&files, 0, sizeof files);
            if (folder_names(path, step_file_take, &files) != 0 || files.ours[0] == '\0') {
                break;
            }
            snprintf(file, sizeof file, "%s/%s", path, files.ours);
            if (remove(file) != 0) {
                return fail(a->error, "cannot remove %s: %s", file, strerror(errno));
            }
        }
        if (!folder_remove(path)) {
            return fail(a->error, "cannot remove %s: %s", path, strerror(errno));
        }
    }
}

// ---- the folder ----

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

// Creates the folder and its parents and locks it, which also shows that it can be written to,
// before the long start.
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
            if (strchr(PATH_SEPARATORS, path[i]) != NULL) {
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
    if (!out_check(a, first) || !lock_take(a)) {
        return false;
    }
    // Another run may have ended between the look and the lock.
    code = folder_look(a->o.out, first);
    return code == 0
               ? out_check(a, first)
               : fail(a->error, "cannot read the output folder %s: %s", a->o.out, strerror(code));
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
        return steps_check(a) && fail(a->error, "--resume must: no checkpoint found in %s", path);
    }
    a->resuming = a->resuming && a->o.resume != RESUME_NEVER;
    if (!a->resuming) {
        return steps_check(a);
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
// and an earlier run's checkpoints are removed, even if this run ends before it saves one.
static bool out_begin(app* a) {
    char settings[SETTINGS_SIZE];
    if (!a->resuming) {
        a->files_made = a->out_empty;
        settings_write(&a->o, settings, sizeof settings);
        if (!file_replace(a, "settings.txt", settings, strlen(settings)) || !steps_remove(a)) {
            return false;
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
    lock_release(a);
    if (a->out_made) { // only if it is empty
        (void)folder_remove(a->o.out);
    }
}

#endif
