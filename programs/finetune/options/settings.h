// settings.h - the options of a run, kept in OUT/settings.txt and compared when it is resumed.
//
// The file can be given to --config. Paths are kept for the reader; what is compared is the content
// that they lead to.
#ifndef FINETUNE_SETTINGS_H
#define FINETUNE_SETTINGS_H

#define SETTINGS_MARK "# The options of a finetune run. Usage: finetune --config FILE --out DIR\n"

typedef struct
    identity { // hashes of the weights of the model and of the adapter that it starts from
    uint64_t model;
    uint64_t adapter;
} identity;

enum { MODE_TF32 = 2 }; // its place in the list of --mode: F32 with the context's math

// The mode of a run, whatever --mode says.
static const char* mode_name(const options* o, const qlora_plan* plan) {
    return o->model.mode == MODE_TF32      ? "tf32"
           : plan->mode == QLORA_MODE_BF16 ? "bf16"
           : plan->mode == QLORA_MODE_FP8  ? "fp8"
                                           : "f32";
}

static bool name_among(const char* name, const char* const* names, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (strcmp(name, names[i]) == 0) {
            return true;
        }
    }
    return false;
}

static bool setting_path(const option* row) { // compared by content
    static const char* const names[] = {"model",     "adapter",       "data",
                                        "eval-data", "chat-template", "add-tokens"};
    return name_among(row->name, names, sizeof names / sizeof names[0]);
}

static bool setting_soft(const option* row) { // --extend may change it
    static const char* const names[] = {"steps",  "epochs", "lr",           "schedule",
                                        "warmup", "beta2",  "weight-decay", "max-norm"};
    return name_among(row->name, names, sizeof names / sizeof names[0]);
}

// Options that may differ when a run is resumed, and that decide what it writes or how it rounds.
static bool setting_kept(const option* row) {
    static const char* const names[] = {"base-name",     "reference",      "eval-every",
                                        "keep-best",     "patience",       "csv",
                                        "sample-prompt", "sample-message", "sample-file",
                                        "sample-tokens", "save-every",     "sample-temperature",
                                        "backend",       "snapshot-every", "ranks",
                                        "recompute",     "cache",          "offload",
                                        "tile",          "memory",         "host-budget"};
    return name_among(row->name, names, sizeof names / sizeof names[0]);
}

static bool samples_wanted(const options* o) {
    return o->sampling.prompts.count + o->sampling.messages.count > 0 || o->sampling.file != NULL;
}

// Whether such an option has an effect in this run. A choice that is not made is the first one.
static bool setting_kept_used(const option_set* set, const option* row) {
    const options* o = (const options*)set->values;
    bool of_samples =
        strcmp(row->name, "sample-tokens") == 0 || strcmp(row->name, "sample-temperature") == 0;
    return setting_kept(row) && (!of_samples || samples_wanted(o)) &&
           (row->kind != OPT_CHOICE || *(const int64_t*)option_at(set, row) != 0);
}

// Whether the option decides anything in this run.
static bool setting_used(const options* o, const option* row) {
    static const char* const by_adapter[] = {"rank", "alpha",        "targets",     "rslora",
                                             "dora", "save-modules", "train-tokens"};
    if (!row->fixed || (strcmp(row->name, "epochs") == 0 && o->training.steps > 0) ||
        (strcmp(row->name, "eval") == 0 && o->data.eval_files.count > 0)) {
        return false;
    }
    static const char* const pairs[] = {"label-smoothing", "sft-alpha"};
    if ((method_of(o->method.kind)->options & METHOD_PAIRS) == 0 &&
        name_among(row->name, pairs, 2)) {
        return false;
    }
    return o->adapter.from == NULL || !name_among(row->name, by_adapter, 7);
}

static void real_text(double value, char out[32]) { // the shortest that reads back the same
    for (int digits = 6; digits <= 17; digits++) {
        snprintf(out, 32, "%.*g", digits, value);
        if (strtod(out, NULL) == value) {
            return;
        }
    }
}

// Whether these are all modules of a model. A model that lacks one of them refuses the list, so it
// is enough to know the lists that models have; with experts, none of them is all.
static bool targets_all(const option_set* set, int64_t targets) {
    static const int64_t lists[] = {
        QLORA_TARGET_Q | QLORA_TARGET_K | QLORA_TARGET_V | QLORA_TARGET_O | QLORA_TARGET_GATE |
            QLORA_TARGET_UP | QLORA_TARGET_DOWN,
        QLORA_TARGET_Q | QLORA_TARGET_K | QLORA_TARGET_V | QLORA_TARGET_O | QLORA_TARGET_GATE_UP |
            QLORA_TARGET_DOWN,
        QLORA_TARGET_QKV | QLORA_TARGET_O | QLORA_TARGET_GATE_UP | QLORA_TARGET_DOWN};
    bool all = targets == QLORA_TARGET_ALL;
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++) {
        all = all || (targets == lists[i] && !((const options*)set->values)->adapter.experts);
    }
    return all;
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
    } else if (row->kind == OPT_TARGETS && targets_all(set, number)) {
        snprintf(room, 256, "all");
    } else if (row->kind == OPT_TARGETS) {
        for (int i = 0; i < OPTION_TARGETS; i++) {
            if ((number & option_targets[i].bits) != 0) {
                strcat(room, room[0] != '\0' ? "," : "");
                strcat(room, option_targets[i].name);
            }
        }
    } else {
        snprintf(room, 256, "%lld", (long long)number);
        return number < 0 || (number == 0 && row->low > 0.0) ? NULL : room;
    }
    return room;
}

// In quotes, if reading the line would change the value; as a JSON string, if it has several lines.
static bool setting_line(const option* row, const char* value, blob* out) {
    size_t size = strlen(value);
    if (strpbrk(value, "\r\n") != NULL) {
        return blob_add(out, row->name, strlen(row->name)) && blob_add(out, ": ", 2) &&
               json_quote(value, size, out) && blob_add(out, "\n", 1);
    }
    bool odd = size > 0 &&
               (strchr("= \t\r'\"", value[0]) != NULL || strchr(" \t\r", value[size - 1]) != NULL);
    return blob_add(out, row->name, strlen(row->name)) &&
           (size == 0 || (blob_add(out, " \"", odd ? 2 : 1) && blob_add(out, value, size) &&
                          blob_add(out, "\"", odd ? 1 : 0))) &&
           blob_add(out, "\n", 1);
}

typedef enum settings_part {
    SETTINGS_ALL,
    SETTINGS_HARD, // what must not change when the run is resumed, but for paths
    SETTINGS_PART  // what may change
} settings_part;

static bool setting_written(const option_set* set, const option* row, settings_part part) {
    const options* o = (const options*)set->values;
    // Runs that began before there was a choice of methods go on.
    bool usual =
        (strcmp(row->name, "method") == 0 && method_of(o->method.kind) == &method_rows[0]) ||
        (strcmp(row->name, "save-modules") == 0 && o->adapter.save_modules == 0) ||
        (strcmp(row->name, "neftune") == 0 && o->training.neftune == 0.0) ||
        (strcmp(row->name, "router-aux-loss") == 0 && o->training.router_aux_loss == 0.0) ||
        (strcmp(row->name, "head") == 0 && o->model.head == QLORA_HEAD_FULL) ||
        (strcmp(row->name, "optimizer") == 0 && o->optimizer.kind == QLORA_OPTIMIZER_ADAMW);
    bool fixed = !usual && setting_used(o, row);
    bool kept = setting_kept_used(set, row);
    switch (part) {
    case SETTINGS_HARD:
        return fixed && !setting_path(row) && !setting_soft(row);
    case SETTINGS_PART:
        return kept || (fixed && setting_soft(row));
    default:
        return kept || fixed;
    }
}

// Writes the options of a run. False: out of memory.
static bool settings_write(const option_set* set, settings_part part, blob* out) {
    char room[256];
    for (size_t i = 0; i < set->count; i++) {
        const option* row = &set->rows[i];
        if (!setting_written(set, row, part)) {
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
    int left; // those that are not in the lists
} differences;

static void difference_show(const option* row, const char* value, char out[160]) {
    snprintf(out, 160, "%s--%s%s%.100s", value == NULL ? "no " : "", row->name,
             value != NULL && value[0] != '\0' ? " " : "", value != NULL ? value : "");
}

// Adds an option to both lists, or to neither if there is no room: none is cut.
static void difference_add(differences* d, const option* row, const char* then, const char* now) {
    char before[160];
    char after[160];
    size_t a = strlen(d->then);
    size_t b = strlen(d->now);
    difference_show(row, then, before);
    difference_show(row, now, after);
    if (a + strlen(before) + 2 <= sizeof d->then && b + strlen(after) + 2 <= sizeof d->now) {
        snprintf(d->then + a, sizeof d->then - a, "%s%s", a > 0 ? " " : "", before);
        snprintf(d->now + b, sizeof d->now - b, "%s%s", b > 0 ? " " : "", after);
    } else {
        d->left++;
    }
    d->count++;
    d->hard += setting_soft(row) ? 0 : 1;
}

// More steps or epochs are what the run wants; fewer may be a mistake.
static bool setting_higher(const options* then, const options* now, const option* row) {
    if (strcmp(row->name, "steps") == 0) {
        return then->training.steps == 0 || now->training.steps == 0 ||
               now->training.steps >= then->training.steps;
    }
    return strcmp(row->name, "epochs") == 0 &&
           (then->training.steps > 0 || now->training.epochs >= then->training.epochs);
}

// The default of alpha follows the rank, whose difference is told.
static bool alpha_same(const options* then, const options* now, const option* row) {
    double a = then->adapter.alpha > 0.0 ? then->adapter.alpha : 2.0 * (double)then->adapter.rank;
    double b = now->adapter.alpha > 0.0 ? now->adapter.alpha : 2.0 * (double)now->adapter.rank;
    return strcmp(row->name, "alpha") == 0 &&
           (a == b || (then->adapter.alpha == 0.0 && now->adapter.alpha == 0.0));
}

// Files for evaluation are compared by their content, but a run has them or has not.
static bool eval_files_same(const options* then, const options* now, const option* row,
                            differences* d) {
    const option_texts* a = &then->data.eval_files;
    const option_texts* b = &now->data.eval_files;
    if (strcmp(row->name, "eval-data") == 0 && (a->count > 0) != (b->count > 0)) {
        difference_add(d, row, a->count > 0 ? a->items[0] : NULL,
                       b->count > 0 ? b->items[0] : NULL);
    }
    return strcmp(row->name, "eval") == 0 && (a->count > 0 || b->count > 0);
}

// What these files say shows in the tokenised data, which is compared, but a run has them or has
// not.
static void text_files_compare(const option* row, const char* then, const char* now,
                               differences* d) {
    static const char* const names[] = {"chat-template", "add-tokens"};
    if (name_among(row->name, names, 2) && (then == NULL) != (now == NULL)) {
        difference_add(d, row, then, now);
    }
}

// Collects every option that differs; paths are compared by content.
static void settings_compare(const option_set* then, const option_set* now, differences* d) {
    char room_then[256];
    char room_now[256];
    const options* before = (const options*)then->values;
    const options* o = (const options*)now->values;
    for (size_t i = 0; i < now->count; i++) {
        const option* row = &now->rows[i];
        if (!setting_used(o, row) || eval_files_same(before, o, row, d) || row->kind == OPT_TEXTS ||
            setting_higher(before, o, row) || alpha_same(before, o, row)) {
            continue;
        }
        const char* a = setting_text(then, row, room_then);
        const char* b = setting_text(now, row, room_now);
        if (setting_path(row)) {
            text_files_compare(row, a, b, d);
        } else if ((a == NULL) != (b == NULL) || (a != NULL && strcmp(a, b) != 0)) {
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

// The number that is noted in settings.txt as "# NAME NUMBER"; 0 if there is none.
static uint64_t settings_noted(const char* text, const char* name, int base) {
    char key[64];
    snprintf(key, sizeof key, "\n# %s ", name);
    const char* at = strstr(text, key);
    return at != NULL ? strtoull(at + strlen(key), NULL, base) : 0;
}

#endif
