// inputs.h - the data files: from the values of --data to single files with weights.
#ifndef FINETUNE_INPUTS_H
#define FINETUNE_INPUTS_H

static void inputs_free(input_list* list) {
    for (size_t i = 0; i < list->count; i++) {
        qlora_text_data_close(list->data[i].data);
        free(list->data[i].path);
    }
    free(list->data);
    memset(list, 0, sizeof *list);
}

static bool input_add(app* a, input_list* list, const char* path, double weight) {
    size_t size = strlen(path) + 1;
    input* grown = (input*)realloc(list->data, (list->count + 1) * sizeof *grown);
    char* copy = (char*)malloc(size);
    list->data = grown != NULL ? grown : list->data;
    if (grown == NULL || copy == NULL) {
        free(copy);
        return error_set(a->error, "out of memory");
    }
    memcpy(copy, path, size);
    input* one = &list->data[list->count++];
    memset(one, 0, sizeof *one);
    one->path = copy;
    one->weight = weight;
    return true;
}

// ---- folders ----

typedef struct listing {
    char** names;
    size_t count;
    bool full; // out of memory
} listing;

static bool listing_add(void* user, const char* name) {
    listing* l = (listing*)user;
    size_t size = strlen(name) + 1;
    char** grown = (char**)realloc(l->names, (l->count + 1) * sizeof *grown);
    char* copy = (char*)malloc(size);
    l->names = grown != NULL ? grown : l->names;
    l->full = grown == NULL || copy == NULL;
    if (l->full) {
        free(copy);
        return false;
    }
    memcpy(copy, name, size);
    l->names[l->count++] = copy;
    return true;
}

static void listing_free(listing* l) {
    for (size_t i = 0; i < l->count; i++) {
        free(l->names[i]);
    }
    free(l->names);
}

static int name_compare(const void* a, const void* b) {
    return strcmp(*(char* const*)a, *(char* const*)b);
}

static void name_append(char list[200], const char* name) {
    size_t used = strlen(list);
    bool room = used + strlen(name) + 8 < 200;
    if (room) {
        snprintf(list + used, 200 - used, "%s%s", used > 0 ? ", " : "", name);
    } else if (used < 3 || strcmp(list + used - 3, "...") != 0) {
        snprintf(list + used, 200 - used, ", ...");
    }
}

// The data files in a folder, in the order of their names. What else is there is named.
static bool folder_add(app* a, input_list* list, const char* folder, double weight) {
    listing all;
    char skipped[200] = "";
    char path[FOLDER_PATH];
    size_t before = list->count;
    memset(&all, 0, sizeof all);
    int code = folder_each(folder, listing_add, &all);
    bool ok = code == 0 ? !all.full || error_set(a->error, "out of memory")
                        : error_set(a->error, "cannot read %s: %s", folder, strerror(code));
    if (all.count > 0) {
        qsort(all.names, all.count, sizeof *all.names, name_compare);
    }
    for (size_t i = 0; i < all.count && ok; i++) {
        int size = snprintf(path, sizeof path, "%s/%s", folder, all.names[i]);
        bool fits = size > 0 && (size_t)size < sizeof path;
        if (fits && qlora_text_data_known(path) && path_is_file(path)) {
            ok = input_add(a, list, path, weight);
        } else {
            name_append(skipped, all.names[i]);
        }
    }
    listing_free(&all);
    if (ok && list->count == before) {
        return error_set(a->error, "%s: the folder has no data files%s%s", folder,
                         skipped[0] != '\0' ? "; it has " : "", skipped);
    }
    if (ok) {
        size_t count = list->count - before;
        say(a, "note: %s: %zu data file%s%s%s\n", folder, count, count == 1 ? "" : "s",
            skipped[0] != '\0' ? "; skipped: " : "", skipped);
    }
    return ok;
}

// ---- weights ----

// Splits PATH:WEIGHT. A path that exists as it stands has no weight, so names may contain colons.
static bool weight_split(app* a, const char* text, char path[FOLDER_PATH], double* weight) {
    const char* colon = strrchr(text, ':');
    char* end = NULL;
    size_t size = strlen(text);
    *weight = 1.0;
    if (colon != NULL && colon > text && !path_exists(text)) {
        double value = strtod(colon + 1, &end);
        bool number = end != colon + 1 && *end == '\0' && strchr("+-.0123456789", colon[1]) != NULL;
        if (number && !(value > 0.0 && value <= MAX_WEIGHT)) {
            return error_set(a->error,
                             "--data %s: the weight %s is out of range; use more than 0, "
                             "at most %d",
                             text, colon + 1, MAX_WEIGHT);
        }
        *weight = number ? value : 1.0;
        size = number ? (size_t)(colon - text) : size;
    }
    if (size >= FOLDER_PATH) {
        return error_set(a->error, "--data %.80s...: the path is too long", text);
    }
    memcpy(path, text, size);
    path[size] = '\0';
    return true;
}

// The files that the values of an option stand for.
static bool inputs_make(app* a, const option_texts* texts, bool weighted, input_list* list) {
    for (int64_t i = 0; i < texts->count; i++) {
        char path[FOLDER_PATH];
        double weight = 1.0;
        if (!weight_split(a, texts->items[i], path, &weight)) {
            return false;
        }
        if (!weighted && weight != 1.0) {
            return error_set(a->error, "%s: data for evaluation cannot have a weight",
                             texts->items[i]);
        }
        if (strcmp(path, "-") != 0 && !path_exists(path)) {
            return error_set(a->error, "--%s %s: %s", weighted ? "data" : "eval-data", path,
                             strerror(errno));
        }
        if (!data_is_not_gguf(&a->o, !weighted, path, a->error)) {
            return false; // with a weight, it was not looked at before
        }
        if (!(path_is_folder(path) ? folder_add(a, list, path, weight)
                                   : input_add(a, list, path, weight))) {
            return false;
        }
    }
    return true;
}

static bool weights_used(const app* a) {
    for (size_t i = 0; i < a->data.inputs.count; i++) {
        if (a->data.inputs.data[i].weight != 1.0) {
            return true;
        }
    }
    return false;
}

// How many records of a file an epoch has.
static size_t input_takes(const input* one) {
    double whole = floor(one->weight);
    double part = one->weight - whole;
    double count = (double)one->records;
    return (size_t)(whole * count + ceil(part * count - 1e-9));
}

#endif
