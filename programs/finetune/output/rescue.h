// rescue.h - when the results of a run cannot be written to --out: waiting for room, and a folder
// elsewhere.
#ifndef FINETUNE_RESCUE_H
#define FINETUNE_RESCUE_H

#define RESCUE_SECONDS 2.0 // between two attempts

static volatile sig_atomic_t rescue_asked; // not to wait any longer

static void rescue_handler(int number) {
    (void)number;
    rescue_asked = 1;
}

static const char* rescue_dir(const app* a) {
    static const char* const names[] = {"TMPDIR", "TMP", "TEMP"};
    for (size_t i = 0; i < sizeof names / sizeof names[0] && a->o.output.rescue == NULL; i++) {
        const char* dir = getenv(names[i]);
        if (dir != NULL && dir[0] != '\0' && path_is_folder(dir)) {
            return dir;
        }
    }
    return a->o.output.rescue != NULL ? a->o.output.rescue : "/tmp";
}

static void rescue_sleep(double seconds) {
    double end = seconds_now() + seconds;
    while (seconds_now() < end && rescue_asked == 0) {
#ifdef _WIN32
        Sleep(50);
#else
        struct timespec t = {0, 50000000};
        nanosleep(&t, NULL);
#endif
    }
}

// Tries to save every few seconds until it works. False: Ctrl-C.
static bool rescue_wait(app* a, bool (*save)(app* a)) {
    char size[32];
    bool saved = false;
    uint64_t bytes = 20u * (uint64_t)a->plan.parameters; // adapters, and the state of AdamW
    say(a,
        "the results are still in memory: make room for about %s in %s, or mend what is named "
        "above;\nfinetune tries again every %.0f seconds; Ctrl-C saves to %s instead\n",
        short_bytes(bytes > 1048576 ? bytes : 1048576, size), a->o.output.folder, RESCUE_SECONDS,
        rescue_dir(a));
    void (*interrupt)(int) = signal(SIGINT, rescue_handler);
    void (*terminate)(int) = signal(SIGTERM, rescue_handler);
#ifndef _WIN32
    void (*hang_up)(int) = signal(SIGHUP, rescue_handler);
#endif
    a->muted = true;
    while (!saved && rescue_asked == 0) {
        rescue_sleep(RESCUE_SECONDS);
        saved = rescue_asked == 0 && save(a);
    }
    a->muted = false;
    signal(SIGINT, interrupt);
    signal(SIGTERM, terminate);
#ifndef _WIN32
    signal(SIGHUP, hang_up);
#endif
    rescue_asked = 0;
    if (saved) {
        say(a, "saved\n");
    }
    return saved;
}

// What was created for the new folder.
typedef struct rescue_place {
    bool dir;       // --rescue
    size_t parents; // as folder_parents returns it
} rescue_place;

// Makes a new folder, which nobody else has made.
static bool rescue_make(app* a, char path[PATH_SIZE], rescue_place* place) {
    const char* dir = rescue_dir(a);
    size_t end = strlen(a->o.output.folder);
    while (end > 1 && strchr(FOLDER_SEPARATORS, a->o.output.folder[end - 1]) != NULL) {
        end--;
    }
    size_t start = end;
    while (start > 0 && strchr(FOLDER_SEPARATORS, a->o.output.folder[start - 1]) == NULL) {
        start--;
    }
    int size = (int)(end - start < 60 ? end - start : 60);
    if (a->o.output.rescue != NULL) {
        place->parents = folder_parents(dir);
        place->dir = FOLDER_MAKE(dir) == 0;
    }
    errno = ENAMETOOLONG;
    for (int i = 1; i <= 1000 && strlen(dir) + 128 < PATH_SIZE; i++) {
        snprintf(path, PATH_SIZE, "%s/finetune-%.*s-%d", dir, size, a->o.output.folder + start, i);
        if (FOLDER_MAKE(path) == 0) {
            return true;
        }
        if (errno != EEXIST) {
            break;
        }
    }
    return error_set(a->error, "cannot create a folder in %s: %s", dir, strerror(errno));
}

// The settings and the log of the run in `from`, without which it could not be resumed.
static bool rescue_files(app* a, const char* log) {
    blob text;
    blob settings;
    memset(&text, 0, sizeof text);
    memset(&settings, 0, sizeof settings);
    (void)blob_read_path(&text, log); // it may be gone
    bool ok = blob_add(&text, a->folder.log.rest.data, a->folder.log.rest.count) ||
              error_set(a->error, "out of memory");
    ok = ok && settings_text(a, &settings) &&
         file_replace(a, "settings.txt", settings.data, settings.count) &&
         file_replace(a, "log.jsonl", text.data, text.count);
    blob_free(&text);
    blob_free(&settings);
    return ok;
}

// Whether a folder has anything worth keeping; if not, it is removed.
static bool rescue_worth(const char* folder) {
    static const char* const results[] = {"checkpoint/latest", "adapter/adapter_config.json",
                                          "adapter.gguf"};
    static const char* const others[] = {"settings.txt", "log.jsonl"};
    char path[PATH_SIZE + 64];
    snprintf(path, sizeof path, "%s/checkpoint", folder);
    (void)folder_remove(path); // only if it is empty
    for (size_t i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, results[i]);
        if (path_exists(path)) {
            return true;
        }
    }
    for (size_t i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, others[i]);
        (void)remove(path);
    }
    (void)folder_remove(folder);
    return false;
}

// Removes what was created for a folder that could not be, or has nothing worth keeping.
static void rescue_unmake(const char* dir, const rescue_place* place) {
    if (place->dir) {
        (void)folder_remove(dir);
    }
    parents_unmake(dir, place->parents);
}

// Saves the whole run into a new folder and says so, as an error: it is not where it belongs.
static void rescue_save(app* a, bool (*save)(app* a)) {
    char path[PATH_SIZE];
    const char* out = a->o.output.folder;
    rescue_place place = {false, 0};
    bool made = rescue_make(a, path, &place);
    bool whole = made;
    if (made) {
        a->o.output.folder = path;
        a->muted = true;
        whole = save(a);
        whole = rescue_files(a, a->folder.log.path) && whole;
        a->muted = false;
        a->o.output.folder = out;
    }
    if (!made || !rescue_worth(path)) {
        rescue_unmake(rescue_dir(a), &place);
        error_set(a->error,
                  "the results could not be saved to %s, nor to %s; --rescue DIR names another "
                  "place",
                  out, rescue_dir(a));
    } else if (whole) {
        error_set(a->error,
                  "the results could not be saved to %s; they are in %s: copy them back, or go on "
                  "with --out %s",
                  out, path, path);
    } else {
        error_set(a->error, "the results could not be saved to %s; what could be saved is in %s",
                  out, path);
    }
    complain(a);
}

#endif
