// settings.h - the options of a run, kept in OUT/settings.txt and compared when it is resumed.
//
// The file can be given to --config. Paths are kept for the reader; what is compared is the content
// that they lead to.
#ifndef FINETUNE_SETTINGS_H
#define FINETUNE_SETTINGS_H

#define SETTINGS_MARK "# The options of a finetune run. Usage: finetune --config FILE\n"

typedef struct
    identity { // hashes of the weights of the model and of the adapter that it starts from
    uint64_t model;
    uint64_t adapter;
} identity;

static bool name_among(const char* name, const char* const* names, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (strcmp(name, names[i]) == 0) {
            return true;
        }
    }
    return false;
}

static bool setting_path(const option* row) { // compared by content
    static const char* const names[] = {"model", "adapter", "data", "eval-data"};
    return name_among(row->name, names, sizeof names / sizeof names[0]);
}

static bool setting_soft(const option* row) { // --extend may change it
    static const char* const names[] = {"steps",  "epochs", "lr",           "schedule",
                                        "warmup", "beta2",  "weight-decay", "max-norm"};
    return name_among(row->name, names, sizeof names / sizeof names[0]);
}

// Whether the option decides anything in this run.
static bool setting_used(const options* o, const option* row) {
    static const char* const by_adapter[] = {"rank", "alpha", "targets", "rslora"};
    if (!row->fixed || (strcmp(row->name, "epochs") == 0 && o->steps > 0) ||
        (strcmp(row->name, "eval") == 0 && o->eval_data.count > 0)) {
        return false;
    }
    return o->adapter == NULL || !name_among(row->name, by_adapter, 4);
}

static void real_text(double value, char out[32]) { // the shortest that reads back the same
    for (int digits = 6; digits <= 17; digits++) {
        snprintf(out, 32, "%.*g", digits, value);
        if (strtod(out, NULL) == value) {
            return;
        }
    }
}

// The value of an option as a user would type it, and NULL if it was not given. `room` holds
// numbers and words.
static const char* setting_text(const option_set* set, const option* row, char room[256]) {
    const void* at = option_at(set, row);
    int64_t number = 0;
    room[0] = '\0';
    switch (row->kind) {
    case OPT_TEXT:
        return *(const char* const*)at;
    case OPT_FLAG:
        return *(const bool*)at ? room : NULL;
    case OPT_REAL:
        real_text(*(const double*)at, room);
        return *(const double*)at == 0.0 && row->low > 0.0 ? NULL : room;
    default:
        number = *(const int64_t*)at;
    }
    if (row->kind == OPT_CHOICE) {
        const char* word = row->words;
        for (; number > 0 && strchr(word, '|') != NULL; number--) {
            word = strchr(word, '|') + 1;
        }
        snprintf(room, 256, "%.*s", (int)strcspn(word, "|"), word);
    } else if (row->kind == OPT_TARGETS && number == QLORA_TARGET_ALL) {
        snprintf(room, 256, "all");
    } else if (row->kind == OPT_TARGETS) {
        for (int i = 0; i < OPTION_TARGETS; i++) {
            if ((number >> i & 1) != 0) {
                strcat(room, room[0] != '\0' ? "," : "");
                strcat(room, option_targets[i]);
            }
        }
    } else {
        snprintf(room, 256, "%lld", (long long)number);
        return number < 0 || (number == 0 && row->low > 0.0) ? NULL : room;
    }
    return room;
}

static bool setting_line(const option* row, const char* value, blob* out) {
    return blob_add(out, row->name, strlen(row->name)) &&
           (value[0] == '\0' || (blob_add(out, " ", 1) && blob_add(out, value, strlen(value)))) &&
           blob_add(out, "\n", 1);
}

// Writes the options of a run. With `hard`, only those that cannot change. False: out of memory.
static bool settings_write(const option_set* set, bool hard, blob* out) {
    char room[256];
    const options* o = (const options*)set->values;
    for (size_t i = 0; i < set->count; i++) {
        const option* row = &set->rows[i];
        if (!setting_used(o, row) || (hard && (setting_path(row) || setting_soft(row)))) {
            continue;
        }
        if (row->kind == OPT_TEXTS) {
            const option_texts* list = (const option_texts*)option_at(set, row);
            for (int64_t k = 0; k < list->count; k++) {
                if (!setting_line(row, list->items[k], out)) {
                    return false;
                }
            }
            continue;
        }
        const char* value = setting_text(set, row, room);
        if (value != NULL && !setting_line(row, value, out)) {
            return false;
        }
    }
    return true;
}

typedef struct differences {
    char then[320];
    char now[320];
    int count;
    int hard; // those that --extend does not allow
} differences;

static void difference_show(const option* row, const char* value, char list[320]) {
    size_t used = strlen(list);
    snprintf(list + used, 320 - used, "%s%s--%s%s%.100s", used > 0 ? " " : "",
             value == NULL ? "no " : "", row->name, value != NULL && value[0] != '\0' ? " " : "",
             value != NULL ? value : "");
}

static void difference_add(differences* d, const option* row, const char* then, const char* now) {
    difference_show(row, then, d->then);
    difference_show(row, now, d->now);
    d->count++;
    d->hard += setting_soft(row) ? 0 : 1;
}

// More steps or epochs are what the run wants; fewer may be a mistake.
static bool setting_higher(const options* then, const options* now, const option* row) {
    if (strcmp(row->name, "steps") == 0) {
        return then->steps == 0 || now->steps == 0 || now->steps >= then->steps;
    }
    return strcmp(row->name, "epochs") == 0 && (then->steps > 0 || now->epochs >= then->epochs);
}

// The default of alpha follows the rank, whose difference is told.
static bool alpha_same(const options* then, const options* now, const option* row) {
    double a = then->alpha > 0.0 ? then->alpha : 2.0 * (double)then->rank;
    double b = now->alpha > 0.0 ? now->alpha : 2.0 * (double)now->rank;
    return strcmp(row->name, "alpha") == 0 && (a == b || (then->alpha == 0.0 && now->alpha == 0.0));
}

// Collects every option that differs, except for paths.
static void settings_compare(const option_set* then, const option_set* now, differences* d) {
    char room_then[256];
    char room_now[256];
    const options* o = (const options*)now->values;
    for (size_t i = 0; i < now->count; i++) {
        const option* row = &now->rows[i];
        if (!setting_used(o, row) || row->kind == OPT_TEXTS || setting_path(row) ||
            setting_higher((const options*)then->values, o, row) ||
            alpha_same((const options*)then->values, o, row)) {
            continue;
        }
        const char* a = setting_text(then, row, room_then);
        const char* b = setting_text(now, row, room_now);
        if ((a == NULL) != (b == NULL) || (a != NULL && strcmp(a, b) != 0)) {
            difference_add(d, row, a, b);
        }
    }
}

// ---- identity ----

#define HASH_START 0xcbf29ce484222325u

static uint64_t hash_more(uint64_t hash, const void* data, size_t bytes) {
    const unsigned char* p = (const unsigned char*)data;
    for (size_t i = 0; i < bytes; i++) {
        hash = (hash ^ p[i]) * 0x100000001b3u;
    }
    return hash;
}

#define SAMPLED_BLOCKS 64
#define SAMPLED_BYTES 4096

// A hash of a file's size and of blocks that are spread over it; all of it, if it is small.
static bool file_identity(const qlora_files* files, const char* path, uint64_t* hash) {
    const void* data = NULL;
    uint64_t bytes = 0;
    void* handle = NULL;
    if (files->map(path, &data, &bytes, &handle, files->user) != 0) {
        return false;
    }
    const unsigned char* at = (const unsigned char*)data;
    uint64_t whole = (uint64_t)SAMPLED_BLOCKS * SAMPLED_BYTES;
    uint64_t sum = hash_more(HASH_START, &bytes, sizeof bytes);
    if (bytes <= whole) {
        sum = hash_more(sum, at, (size_t)bytes);
    } else {
        for (uint64_t i = 0; i < SAMPLED_BLOCKS; i++) {
            uint64_t offset = (bytes - SAMPLED_BYTES) / (SAMPLED_BLOCKS - 1) * i;
            sum = hash_more(sum, at + offset, SAMPLED_BYTES);
        }
    }
    files->unmap(data, bytes, handle, files->user);
    *hash = sum;
    return true;
}

// The identity that is noted in settings.txt as "# NAME HASH"; 0 if there is none.
static uint64_t identity_noted(const char* text, const char* name) {
    char key[64];
    snprintf(key, sizeof key, "\n# %s ", name);
    const char* at = strstr(text, key);
    return at != NULL ? strtoull(at + strlen(key), NULL, 16) : 0;
}

#endif
