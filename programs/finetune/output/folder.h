// folder.h - the output folder.
#ifndef FINETUNE_FOLDER_H
#define FINETUNE_FOLDER_H

// Calls `found` with every name in a folder. Returns 0 or errno.
typedef void (*name_fn)(void* user, const char* name);
static int folder_names(const char* path, name_fn found, void* user) {
#ifdef _WIN32
    intptr_t folder = -1;
    char name[UTF8_PATH];
    while (utf8_next(path, &folder, name)) {
        found(user, name);
    }
    if (errno != 0) {
        return errno;
    }
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

typedef struct first_name {
    char* first;
    bool demo; // a demo that was killed leaves its model; demo_model_write checks it
} first_name;

static void first_take(void* user, const char* name) {
    const first_name* f = (const first_name*)user;
    bool ours = strcmp(name, ".") == 0 || strcmp(name, "..") == 0 || strcmp(name, LOCK_NAME) == 0 ||
                strcmp(name, ID_NAME) == 0 || (f->demo && strcmp(name, "model") == 0);
    if (!ours && (f->first[0] == '\0' || strcmp(name, f->first) < 0)) {
        snprintf(f->first, 256, "%s", name);
    }
}

// Finds the first name in the output folder, in the order of strcmp ("" if it is empty). Returns 0
// or errno.
static int out_look(const app* a, char first[256]) {
    first_name f = {first, a->o.demo};
    first[0] = '\0';
    return folder_names(a->o.output.folder, first_take, &f);
}

// ---- checkpoints of an earlier run ----

static bool step_named(const char* name) { // step-N, as the library names them
    return strncmp(name, "step-", 5) == 0 && name[5] != '\0' &&
           strspn(name + 5, "0123456789-") == strlen(name + 5);
}

#define BEST_NAME "best.txt" // in best/: the step and the loss of the adapter

// What a checkpoint and an adapter consist of; a file that is being written ends in .tmp.
static bool step_file_named(const char* name) {
    static const char* const names[] = {"adapter_model.safetensors",
                                        "adapter_config.json",
                                        "trained_norms.safetensors",
                                        "state.safetensors",
                                        "tokenizer.json",
                                        "tokenizer_config.json",
                                        "added_tokens.json",
                                        "special_tokens_map.json",
                                        "chat_template.jinja",
                                        "chat_template.json",
                                        "additional_chat_templates",
                                        "README.md",
                                        BEST_NAME};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        size_t length = strlen(names[i]);
        if (strncmp(name, names[i], length) == 0 &&
            (name[length] == '\0' || strcmp(name + length, ".tmp") == 0)) {
            return true;
        }
    }
    return false;
}

typedef struct step_search {
    const char* dir;
    char newest[64];   // the whole checkpoint with the highest step
    int whole;         // the number of whole ones
    char any[64];      // a folder of a checkpoint
    char foreign[320]; // something in such a folder that no checkpoint contains, or a link
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
    if (path_is_link(path)) { // what it leads to is not ours
        snprintf(s->any, sizeof s->any, "%s", name);
        snprintf(s->foreign, sizeof s->foreign, "%s", name);
        return;
    }
    if (folder_names(path, step_file_take, &files) != 0) {
        return; // not a folder
    }
    snprintf(s->any, sizeof s->any, "%s", name);
    if (files.foreign[0] != '\0') {
        snprintf(s->foreign, sizeof s->foreign, "%s/%.250s", name, files.foreign);
    }
    bool newer =
        s->newest[0] == '\0' || strtoll(name + 5, NULL, 10) > strtoll(s->newest + 5, NULL, 10);
    bool whole = !file_missing(path, "state.safetensors"); // it is written last
    s->whole += whole ? 1 : 0;
    if (newer && whole) {
        snprintf(s->newest, sizeof s->newest, "%s", name);
    }
}

// Where folders called step-N are: checkpoints, and snapshots of the adapter.
static const char* const step_places[] = {"checkpoint", "snapshots"};

// Where adapters are that are not in such a folder.
static const char* const adapter_places[] = {"adapter", "best"};

static void steps_search(app* a, const char* place, char dir[PATH_SIZE], step_search* out) {
    memset(out, 0, sizeof *out);
    out_path(a, place, dir);
    out->dir = dir;
    (void)folder_names(dir, step_take, out); // no folder, no checkpoints
}

// Whether everything that steps_remove removes is a run's own.
static bool steps_ours(app* a) {
    char dir[PATH_SIZE];
    step_search found;
    for (size_t i = 0; i < 4; i++) {
        out_path(a, i < 2 ? step_places[i] : adapter_places[i - 2], dir);
        if (path_is_link(dir)) { // what it leads to may belong to another run
            return error_set(
                a->error, "%s is a link; remove it, or use a different --out to start over", dir);
        }
    }
    for (size_t i = 0; i < 2; i++) {
        steps_search(a, step_places[i], dir, &found);
        if (found.foreign[0] != '\0') {
            return error_set(a->error,
                             "--out %s: %s/%s is not part of a checkpoint; move it elsewhere, or "
                             "use a different --out to start over",
                             a->o.output.folder, step_places[i], found.foreign);
        }
    }
    return true;
}

// Whether the only checkpoint is one that a run was about to take into its list when it was killed.
// The library removes it when it saves the next one.
static bool step_pending(const step_search* found) {
    char path[PATH_SIZE + 64];
    blob text;
    memset(&text, 0, sizeof text);
    snprintf(path, sizeof path, "%s/pending", found->dir);
    size_t n = strlen(found->newest);
    bool alone = found->whole == 1 && blob_read_path(&text, path) == 0 && text.count == n + 1 &&
                 memcmp(text.data, found->newest, n) == 0;
    blob_free(&text);
    return alone;
}

// Nothing is resumed by guessing: without the list, it is not known which checkpoint is meant. And
// nothing that an earlier run left is removed unless --resume never asks for it.
static bool steps_check(app* a) {
    char dir[PATH_SIZE];
    step_search found;
    if (a->o.output.resume == RESUME_NEVER) {
        return steps_ours(a);
    }
    steps_search(a, step_places[0], dir, &found);
    if (found.newest[0] != '\0' && !step_pending(&found)) {
        return error_set(
            a->error,
            "%s contains %s but not the file 'latest', which names the newest checkpoint; write %s "
            "into it to resume from there, or use --resume never to start over",
            dir, found.newest, found.newest);
    }
    steps_search(a, step_places[1], dir, &found);
    if (found.any[0] != '\0') {
        return error_set(a->error,
                         "%s contains snapshots of a run, such as %s, but no checkpoint; use "
                         "--resume never to remove them and start over, or a different --out",
                         a->o.output.folder, found.any);
    }
    for (size_t i = 0; i < 2; i++) {
        out_path(a, adapter_places[i], dir);
        if (!file_missing(dir, "adapter_config.json")) {
            return error_set(a->error,
                             "%s contains an adapter%s but no checkpoint; use --resume never to "
                             "replace it, or a different --out",
                             a->o.output.folder, i == 0 ? "" : " in best/");
        }
    }
    return steps_ours(a);
}

static bool folder_remove(const char* path) {
#ifdef _WIN32
    return utf8_rmdir(path) == 0;
#else
    return rmdir(path) == 0;
#endif
}

// Removes the files of a checkpoint or an adapter, and their folder if that leaves it empty.
static bool files_remove(app* a, const char* dir) {
    char file[PATH_SIZE + 400];
    for (;;) {
        step_names files;
        memset(&files, 0, sizeof files);
        if (folder_names(dir, step_file_take, &files) != 0 || files.ours[0] == '\0') {
            (void)folder_remove(dir);
            return true;
        }
        snprintf(file, sizeof file, "%s/additional_chat_templates/tool_use.jinja", dir);
        (void)remove(file); // there is hardly ever one
        snprintf(file, sizeof file, "%s/%s", dir, files.ours);
        if (remove(file) != 0) {
            return error_set(a->error, "cannot remove %s: %s", file, strerror(errno));
        }
    }
}

// Removes the step folders in one place.
static bool place_empty(app* a, const char* place) {
    char dir[PATH_SIZE];
    char path[PATH_SIZE + 64];
    for (;;) {
        step_search found;
        steps_search(a, place, dir, &found);
        if (found.any[0] == '\0') {
            return true;
        }
        snprintf(path, sizeof path, "%s/%s", dir, found.any);
        if (!files_remove(a, path)) {
            return false;
        }
        if (path_exists(path)) {
            return error_set(a->error, "cannot remove %s", path);
        }
    }
}

// Removes the checkpoints and the adapters of the run that --resume never replaces, the list first:
// half of them must never look like a run.
static bool steps_remove(app* a) {
    char path[PATH_SIZE];
    static const char* const files[] = {"checkpoint/latest", "checkpoint/pending", "adapter.gguf"};
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        out_path(a, files[i], path);
        if (remove(path) != 0 && errno != ENOENT && errno != ENOTDIR) {
            return error_set(a->error, "cannot remove %s: %s", path, strerror(errno));
        }
    }
    bool ok = place_empty(a, step_places[0]) && place_empty(a, step_places[1]);
    for (size_t i = 0; i < 2 && ok; i++) {
        out_path(a, adapter_places[i], path);
        ok = files_remove(a, path);
    }
    return ok;
}

// ---- the folder ----

// A run of finetune is recognised by its settings.txt: by its first line or, before version 0.2, by
// the names that came first.
static bool settings_ours(const blob* text) {
    static const char* const names[] = {"model ", "data ", "template ", "adapter ", "rank "};
    const char* line = text->count > 0 ? text->data : "";
    if (strncmp(line, SETTINGS_MARK, 30) == 0) {
        return true;
    }
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
    a->folder.out_empty = first[0] == '\0';
    if (a->folder.out_empty) {
        return true;
    }
    bool ours = false;
    out_path(a, "settings.txt", path);
    bool ok = file_read(a, path, &kept);
    ours = ok && settings_ours(&kept);
    if (ok && kept.data == NULL && a->o.output.resume != RESUME_NEVER) {
        out_path(a, "checkpoint", path);
        ok = lib(a, qlora_checkpoint_exists(a->ctx, path, &ours), "looking for a checkpoint");
    }
    blob_free(&kept);
    return ok &&
           (ours || error_set(a->error,
                              "--out %s: the folder contains '%s' but no finetune run; choose an "
                              "empty or new folder",
                              a->o.output.folder, first));
}

// Creates the folder and its parents and locks it, which also shows that it can be written to,
// before the long start.
static bool out_make(app* a) {
    char first[256];
    if (strlen(a->o.output.folder) + 64 > PATH_SIZE) {
        return error_set(a->error, "--out: the path is longer than %d characters", PATH_SIZE - 64);
    }
    int before = out_look(a, first);
    int code = before;
    if (before != 0) {
        a->folder.parents = folder_parents(a->o.output.folder);
        code = a->files.make_dir(a->o.output.folder, a->files.user);
        if (code != 0) {
            return error_set(a->error, "cannot create the output folder %s: %s", a->o.output.folder,
                             strerror(code));
        }
        code = out_look(a, first);
    }
    if (code == ENOENT || code == ENOTDIR) { // something else has that name
        return error_set(a->error, "--out %s is not a folder", a->o.output.folder);
    }
    if (code != 0) {
        return error_set(a->error, "cannot read the output folder %s: %s", a->o.output.folder,
                         strerror(code));
    }
    a->folder.out_made = before == ENOENT;
    if (!out_check(a, first) || !lock_take(a)) {
        return false;
    }
    // Another run may have ended between the look and the lock.
    code = out_look(a, first);
    return code == 0 ? out_check(a, first)
                     : error_set(a->error, "cannot read the output folder %s: %s",
                                 a->o.output.folder, strerror(code));
}

// ---- the options of a run that is resumed ----

typedef struct weights_search {
    app* a;
    const char* dir;
    blob index; // the model's list of files; empty: one file has all weights
    uint64_t sum;
    bool ok;
} weights_search;

// Whether a file has weights that are loaded; the folder may contain others.
static bool weights_loaded(const weights_search* s, const char* name) {
    char quoted[300];
    snprintf(quoted, sizeof quoted, "\"%.280s\"", name);
    return strcmp(name, "adapter_model.safetensors") == 0 ||
           strcmp(name, "trained_norms.safetensors") == 0 ||
           (s->index.data == NULL ? strcmp(name, "model.safetensors") == 0
                                  : strstr(s->index.data, quoted) != NULL);
}

static void weights_take(void* user, const char* name) {
    weights_search* s = (weights_search*)user;
    char path[FOLDER_PATH + 300];
    uint64_t hash = 0;
    if (ends_in(name, ".safetensors") && weights_loaded(s, name)) {
        snprintf(path, sizeof path, "%s/%s", s->dir, name);
        s->ok = s->ok && file_identity(&s->a->files, path, &hash);
        s->sum += mix(hash ^ hash_more(HASH_START, name, strlen(name)));
    }
}

// A hash of the weights in a folder or a GGUF file, whatever its path is. 0: no path. Of a GGUF
// file in several parts only the first is read; the checkpoint knows all of them.
static bool weights_identity(app* a, const char* dir, uint64_t* out) {
    weights_search s;
    memset(&s, 0, sizeof s);
    s.a = a;
    s.dir = dir;
    s.ok = true;
    if (dir != NULL && file_missing(dir, "model.safetensors")) {
        char path[FOLDER_PATH];
        snprintf(path, sizeof path, "%s/model.safetensors.index.json", dir);
        (void)blob_read_path(&s.index, path); // without it, the library says what is missing
    }
    if (dir != NULL && ends_in(dir, ".gguf")) {
        s.ok = file_identity(&a->files, dir, &s.sum);
    } else if (dir != NULL && folder_names(dir, weights_take, &s) != 0) {
        s.ok = false;
    }
    blob_free(&s.index);
    *out = s.sum;
    return s.ok || error_set(a->error, "cannot read the weights in %s", dir);
}

#define EVENTS_NOTE "# --tensorboard was given, too; a repeated run needs a folder of its own\n"

static bool settings_text(app* a, blob* out) {
    char line[64];
    bool ok = blob_add(out, SETTINGS_MARK, strlen(SETTINGS_MARK));
    snprintf(line, sizeof line, "# model-weights %016llx\n", (unsigned long long)a->identity.model);
    ok = ok && blob_add(out, line, strlen(line));
    snprintf(line, sizeof line, "# adapter-weights %016llx\n",
             (unsigned long long)a->identity.adapter);
    ok = ok && blob_add(out, line, strlen(line));
    if (a->history.patience_from > 0) {
        snprintf(line, sizeof line, "# patience-from %lld\n", (long long)a->history.patience_from);
        ok = ok && blob_add(out, line, strlen(line));
    }
    if (a->o.output.tensorboard != NULL) { // a repeated run needs a folder of its own
        ok = ok && blob_add(out, EVENTS_NOTE, strlen(EVENTS_NOTE));
    }
    ok = ok && settings_write(&a->set, SETTINGS_ALL, out) && parts_write(a, out);
    return ok || error_set(a->error, "out of memory");
}

// The weights that the run started from must be the same, in whatever folder they are now.
static bool weights_compare(app* a, const options* then, const blob* kept, const char* what) {
    bool model = strcmp(what, "model") == 0;
    uint64_t noted = settings_noted(kept->data, model ? "model-weights" : "adapter-weights", 16);
    uint64_t now = model ? a->identity.model : a->identity.adapter;
    const char* path_then = model ? then->model.path : then->adapter.from;
    const char* path_now = model ? a->o.model.path : a->o.adapter.from;
    if (noted == now) {
        return true;
    }
    if (path_then == NULL || path_now == NULL) {
        return error_set(a->error,
                         "%s contains a run that started with%s --%s; use the same "
                         "options, a different --out, or --resume never to start over",
                         a->o.output.folder, path_then == NULL ? "out" : "", what);
    }
    return error_set(a->error,
                     strcmp(path_then, path_now) == 0
                         ? "the weights in --%s %s have changed since the run in %s started; use a "
                           "different --out, or --resume never to start over"
                         : "--%s %s has other weights than the run in %s, which used %s; use the "
                           "same ones, a different --out, or --resume never to start over",
                     what, path_now, a->o.output.folder, path_then);
}

static bool differences_judge(app* a, const differences* d) {
    if (d->count == 0 || (d->hard == 0 && a->o.output.extend)) {
        if (d->count > 0) {
            say(a, "changed: %s instead of %s\n", d->now, d->then);
            a->changed = true;
        }
        return true;
    }
    char more[32] = "";
    if (d->left > 0) {
        snprintf(more, sizeof more, ", and %d more differ", d->left);
    }
    return error_set(a->error,
                     "%s contains a run with different options: it used %s, this command has %s%s; "
                     "use the same options%s, a different --out, or --resume never to start over",
                     a->o.output.folder, d->then, d->now, more,
                     d->hard == 0 ? ", --extend to go on with the new ones" : "");
}

// Compares the options with those of the run, before anything slow starts.
static bool settings_same(app* a) {
    char path[PATH_SIZE];
    options then;
    option_set set = a->set;
    differences d;
    blob kept;
    blob text;
    memset(&kept, 0, sizeof kept);
    memset(&text, 0, sizeof text);
    memset(&d, 0, sizeof d);
    options_clear(&then);
    then.adapter.experts = a->o.adapter.experts;
    set.values = &then;
    out_path(a, "settings.txt", path);
    bool ok = file_read(a, path, &kept);
    if (ok && kept.data != NULL) {
        ok = strncmp(kept.data, SETTINGS_MARK, 30) == 0 ||
             error_set(a->error,
                       "%s contains a run of an older version; use a different --out, or --resume "
                       "never to start over",
                       a->o.output.folder);
        ok = ok &&
             (blob_add(&text, kept.data, kept.count + 1) || error_set(a->error, "out of memory"));
        ok = ok && config_read(&set, path, &text, a->error);
        ok = ok && weights_compare(a, &then, &kept, "model") &&
             weights_compare(a, &then, &kept, "adapter");
        if (ok) {
            settings_compare(&set, &a->set, &d);
            ok = differences_judge(a, &d) && parts_take(a, &set);
            a->parts.patience_from = then.eval.patience == a->o.eval.patience
                                         ? (int64_t)settings_noted(kept.data, "patience-from", 10)
                                         : -1;
        }
    }
    blob_free(&kept);
    blob_free(&text);
    return ok;
}

// Whether a demo is complete: it then starts over, as nobody wants to see it do nothing.
static bool demo_complete(app* a) {
    int64_t done = steps_done(a);
    return done > 0 && done >= a->o.training.steps;
}

static bool settings_hash_make(app* a) {
    blob text;
    memset(&text, 0, sizeof text);
    bool ok = settings_write(&a->set, SETTINGS_HARD, &text) || error_set(a->error, "out of memory");
    a->settings_hash = ok ? hash_more(HASH_START, text.data, text.count) : 0;
    blob_free(&text);
    return ok;
}

// Takes the output folder and decides whether a run is resumed.
static bool settings_check(app* a) {
    char path[PATH_SIZE];
    if (!weights_identity(a, a->o.model.path, &a->identity.model) ||
        !weights_identity(a, a->o.adapter.from, &a->identity.adapter) || !settings_hash_make(a)) {
        return false;
    }
    if (a->ranks.rank > 0) { // rank 0 has the folder; ranks_join follows it
        return true;
    }
    out_path(a, "checkpoint", path);
    if (!out_make(a) ||
        !lib(a, qlora_checkpoint_exists(a->ctx, path, &a->resuming), "looking for a checkpoint")) {
        return false;
    }
    if (a->o.demo && a->o.output.resume == RESUME_AUTO && demo_complete(a)) {
        a->o.output.resume = RESUME_NEVER;
    }
    if (!a->resuming && a->o.output.resume == RESUME_MUST) {
        return steps_check(a) &&
               error_set(a->error, "--resume must: no checkpoint found in %s", path);
    }
    a->resuming = a->resuming && a->o.output.resume != RESUME_NEVER;
    return a->resuming ? settings_same(a) : steps_check(a);
}

// --patience that is given or changed when a run is resumed counts from there on: the evaluations
// before must not end the run at once.
static void patience_start(app* a) {
    bool given = a->parts.patience_from < 0 && a->o.eval.patience > 0;
    a->history.patience_from = given                        ? a->progress.step
                               : a->parts.patience_from > 0 ? a->parts.patience_from
                                                            : 0;
    if (given && a->progress.step > 0 && a->progress.step < a->progress.total_steps) {
        say(a, "note: --patience counts the evaluations after step %lld\n",
            (long long)a->progress.step);
    }
}

// Finds out whose adapter is in best/, and says so if it is not that of the lowest loss. Without
// best.txt, which runs of version 0.1 lack, it is.
static void best_find(app* a) {
    history* h = &a->history;
    char path[PATH_SIZE];
    long long step = 0;
    double loss = 0.0;
    blob text;
    memset(&text, 0, sizeof text);
    if (!a->o.eval.keep_best || !a->resuming || h->best_step == 0) {
        return;
    }
    out_path(a, "best/adapter_config.json", path);
    bool whole = path_exists(path);
    out_path(a, "best/" BEST_NAME, path);
    bool noted = blob_read_path(&text, path) == 0 &&
                 sscanf(text.data, "step %lld\nheld-out loss %lf", &step, &loss) == 2;
    blob_free(&text);
    if (whole && !noted) {
        step = h->best_step;
        loss = h->best_eval_loss;
    }
    if (whole && step > 0 &&
        step <= a->progress.step) { // a later one is of steps that are taken again
        h->kept_step = step;
        h->kept_loss = loss;
    }
    if (h->kept_step == h->best_step || h->best_step == a->progress.step) {
        return;
    }
    say(a,
        "note: the lowest held-out loss so far, %.4f, was that of step %lld, before --keep-best "
        "was given;\n      ",
        h->best_eval_loss, (long long)h->best_step);
    if (h->kept_step > 0) {
        say(a, "best/ has the adapter of step %lld, until a loss is below %.4f\n",
            (long long)h->kept_step, h->kept_loss);
    } else {
        say(a, "best/ is the best adapter from step %lld on\n", (long long)a->progress.step);
    }
}

// The model is ready, so the folder now belongs to this run: its options go into OUT/settings.txt,
// and an earlier run's checkpoints are removed, even if this run ends before it saves one.
static bool out_begin(app* a) {
    blob text;
    memset(&text, 0, sizeof text);
    a->folder.files_made = !a->resuming && a->folder.out_empty;
    patience_start(a);
    if (a->ranks.rank > 0) {
        return log_trim(a);
    }
    bool ok = a->resuming || steps_ours(a); // the folder may have changed since the start
    if (a->changed && a->complete && a->progress.step == a->progress.total_steps) {
        say(a, "note: no step is left, so the changed options have no effect\n");
    } else {
        ok =
            ok && settings_text(a, &text) && file_replace(a, "settings.txt", text.data, text.count);
    }
    blob_free(&text);
    ok = ok && (a->resuming || steps_remove(a)) && log_trim(a) &&
         growing_flush(a, &a->folder.log) && events_open(a);
    if (ok) {
        best_find(a);
    }
    return ok;
}

static const char* const demo_files[] = {"model/model.safetensors", "model/tokenizer.json",
                                         "model/config.json"};

static void demo_unmake(app* a) {
    char path[PATH_SIZE];
    for (size_t i = 0; i < sizeof demo_files / sizeof demo_files[0]; i++) {
        out_path(a, demo_files[i], path);
        remove(path);
    }
    out_path(a, "model", path);
    (void)folder_remove(path);
}

// Removes the folders that folder_parents has created above a path, if they are empty.
static void parents_unmake(const char* path, size_t first) {
    char part[PATH_SIZE];
    if (first == 0) { // there may be no path
        return;
    }
    snprintf(part, sizeof part, "%s", path);
    for (size_t i = strlen(part); i >= first; i--) {
        if (strchr(FOLDER_SEPARATORS, part[i]) != NULL) {
            part[i] = '\0';
            (void)folder_remove(part);
        }
    }
}

// Removes what a failed start has created and nothing else; a run that has started keeps its files.
static void out_unmake(app* a) {
    char path[PATH_SIZE];
    growing_close(&a->folder.log);
    growing_close(&a->folder.events);
    if (a->folder.events_made) {
        remove(a->folder.events.path);
    }
    if (a->folder.events_folder_made) { // only if it is empty
        (void)folder_remove(a->o.output.tensorboard);
    }
    parents_unmake(a->o.output.tensorboard, a->folder.events_parents);
    if (a->folder.files_made) {
        out_path(a, "log.jsonl", path);
        remove(path);
        out_path(a, "settings.txt", path);
        remove(path);
        out_path(a, "references.bin", path);
        remove(path);
    }
    lock_release(a);
    if (a->folder.demo_made) {
        demo_unmake(a);
    }
    if (a->folder.out_made) { // only if it is empty
        (void)folder_remove(a->o.output.folder);
    }
    parents_unmake(a->o.output.folder, a->folder.parents);
}

#endif
