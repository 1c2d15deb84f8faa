// ---- reading GGUF: tensors ----------------------------------------------------------------------

#define QLORA__GGUF_NAME 64 // with the terminating zero
#define QLORA__GGUF_DIMS 4
#define QLORA__GGUF_MAX_SPLITS 4096

typedef struct qlora__gguf_tensor {
    char name[QLORA__GGUF_NAME];
    uint64_t shape[QLORA__GGUF_DIMS]; // fastest first; 1 beyond `rank`
    uint64_t elements;
    uint64_t begin; // offset in the data part
    uint64_t bytes;
    const uint8_t* data; // not aligned
    const qlora__gguf_type* type;
    uint32_t rank;
} qlora__gguf_tensor;

// One file of a model.
typedef struct qlora__gguf_file {
    qlora__gguf meta;
    qlora__map map;              // data is NULL if the caller owns the bytes
    qlora__gguf_tensor* tensors; // in file order
    uint32_t* by_name;
    uint32_t count;
    size_t block; // bytes of tensors and by_name
    char path[QLORA__PATH_ROOM];
} qlora__gguf_file;

static void qlora__gguf_close(qlora__env* env, qlora__gguf_file* f) {
    qlora__env_free(env, f->tensors, f->block);
    qlora__gguf_free(env, &f->meta);
    qlora__map_close(env, &f->map);
    f->tensors = NULL;
    f->count = 0;
}

// Reads the type of a tensor and computes its size, with checked multiplications.
static qlora_result qlora__gguf_read_type(qlora__env* env, const qlora__gguf* g, uint64_t id,
                                          qlora__gguf_tensor* t) {
    t->type = id <= UINT32_MAX ? qlora__gguf_type_of((uint32_t)id) : NULL;
    if (t->type == NULL) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: %s: tensor type %llu does not exist",
                               g->label, t->name, (unsigned long long)id);
    }
    if (t->type->widen == NULL) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "%s: %s has type %s, which is not supported; supported are F32, "
                               "F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K to Q6_K, IQ4_NL, "
                               "IQ4_XS and MXFP4",
                               g->label, t->name, t->type->name);
    }
    if (t->shape[0] % t->type->block != 0) {
        return qlora__env_fail(
            env, QLORA_ERR_FORMAT, "%s: %s has rows of %llu values; %s needs a multiple of %u",
            g->label, t->name, (unsigned long long)t->shape[0], t->type->name, t->type->block);
    }
    t->elements = 1;
    for (uint32_t i = 0; i < t->rank; i++) {
        if (t->shape[i] == 0 || t->elements > ((uint64_t)1 << 60) / t->shape[i]) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "%s: %s: dimension %u is %llu; each must be at least 1, and "
                                   "their product at most 2^60",
                                   g->label, t->name, i, (unsigned long long)t->shape[i]);
        }
        t->elements *= t->shape[i];
    }
    uint64_t blocks = t->elements / t->type->block;
    if (blocks > INT64_MAX / t->type->bytes) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: %s: the size of the tensor overflows",
                               g->label, t->name);
    }
    t->bytes = blocks * t->type->bytes;
    return QLORA_OK;
}

static qlora_result qlora__gguf_read_tensor(qlora__env* env, const qlora__gguf* g,
                                            qlora__gguf_cursor* c, qlora__gguf_tensor* t) {
    const uint8_t* name = NULL;
    uint64_t size = 0;
    memset(t, 0, sizeof *t);
    QLORA__TRY(qlora__gguf_chars(env, g, c, "the name of a tensor", &name, &size));
    if (size == 0 || size >= QLORA__GGUF_NAME || memchr(name, 0, (size_t)size) != NULL) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: the name of a tensor has %llu bytes; it must have 1 to %d and "
                               "no zero byte",
                               g->label, (unsigned long long)size, QLORA__GGUF_NAME - 1);
    }
    memcpy(t->name, name, (size_t)size);
    uint64_t rank = qlora__gguf_number(c, 4);
    if (!c->ended && (rank < 1 || rank > QLORA__GGUF_DIMS)) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: %s has %llu dimensions; it must have 1 to %d", g->label,
                               t->name, (unsigned long long)rank, QLORA__GGUF_DIMS);
    }
    t->rank = (uint32_t)rank;
    for (uint32_t i = 0; i < QLORA__GGUF_DIMS; i++) {
        t->shape[i] = i < t->rank ? qlora__gguf_number(c, 8) : 1;
    }
    uint64_t type = qlora__gguf_number(c, 4);
    t->begin = qlora__gguf_number(c, 8);
    if (c->ended) {
        return qlora__gguf_cut(env, g, "the table of tensors");
    }
    return qlora__gguf_read_type(env, g, type, t);
}

static bool qlora__gguf_offset_less(const void* user, uint32_t a, uint32_t b) {
    const qlora__gguf_tensor* t = (const qlora__gguf_tensor*)user;
    return t[a].begin != t[b].begin ? t[a].begin < t[b].begin : a < b;
}

static bool qlora__gguf_name_less(const void* user, uint32_t a, uint32_t b) {
    const qlora__gguf_tensor* t = (const qlora__gguf_tensor*)user;
    return strcmp(t[a].name, t[b].name) < 0;
}

// Tensors must follow one another without gaps or overlaps, each at a multiple of the alignment,
// and end within the file.
static qlora_result qlora__gguf_check_layout(qlora__env* env, qlora__gguf_file* f, uint64_t data) {
    const qlora__gguf* g = &f->meta;
    uint64_t room = g->size - data;
    uint64_t at = 0;
    qlora__sort(f->by_name, f->count, qlora__gguf_offset_less, f->tensors);
    for (uint32_t i = 0; i < f->count; i++) {
        qlora__gguf_tensor* t = &f->tensors[f->by_name[i]];
        if (t->begin % g->alignment != 0) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "%s: %s begins at %llu, which is not a multiple of the "
                                   "alignment (%llu)",
                                   g->label, t->name, (unsigned long long)t->begin,
                                   (unsigned long long)g->alignment);
        }
        if (t->begin > room || t->bytes > room - t->begin) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "%s: %s needs %llu bytes at %llu, but the file has only %llu "
                                   "bytes of data; it is truncated",
                                   g->label, t->name, (unsigned long long)t->bytes,
                                   (unsigned long long)t->begin, (unsigned long long)room);
        }
        if (t->begin != at) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: %s begins at %llu, %s %llu",
                                   g->label, t->name, (unsigned long long)t->begin,
                                   t->begin < at ? "before the previous tensor ends at"
                                                 : "leaving a gap after",
                                   (unsigned long long)at);
        }
        t->data = g->file + data + t->begin;
        at = (t->begin + t->bytes + g->alignment - 1) / g->alignment * g->alignment;
    }
    return QLORA_OK;
}

static qlora_result qlora__gguf_read_table(qlora__env* env, qlora__gguf_file* f) {
    const qlora__gguf* g = &f->meta;
    qlora__gguf_cursor c;
    memset(&c, 0, sizeof c);
    c.file = g->file;
    c.size = g->size;
    c.at = g->table;
    // The smallest entry has a name of one byte and one dimension.
    if (g->tensor_count > (c.size - c.at) / 33 || g->tensor_count > INT32_MAX) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: %llu tensors are announced, more than the file can contain",
                               g->label, (unsigned long long)g->tensor_count);
    }
    f->count = (uint32_t)g->tensor_count;
    if (f->count == 0) {
        return QLORA_OK;
    }
    f->block = f->count * (sizeof *f->tensors + sizeof *f->by_name);
    f->tensors = (qlora__gguf_tensor*)qlora__env_alloc(env, f->block);
    if (f->tensors == NULL) {
        return QLORA_ERR_MEMORY;
    }
    f->by_name = (uint32_t*)(void*)(f->tensors + f->count);
    for (uint32_t i = 0; i < f->count; i++) {
        QLORA__TRY(qlora__gguf_read_tensor(env, g, &c, &f->tensors[i]));
        f->by_name[i] = i;
    }
    uint64_t data = (c.at + g->alignment - 1) / g->alignment * g->alignment;
    if (data > g->size) {
        return qlora__gguf_cut(env, g, "the table of tensors");
    }
    QLORA__TRY(qlora__gguf_check_layout(env, f, data));
    qlora__sort(f->by_name, f->count, qlora__gguf_name_less, f->tensors);
    for (uint32_t i = 1; i < f->count; i++) {
        const char* name = f->tensors[f->by_name[i]].name;
        if (strcmp(f->tensors[f->by_name[i - 1]].name, name) == 0) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: two tensors are named %s", g->label,
                                   name);
        }
    }
    return QLORA_OK;
}

// Reads a complete file from memory, which must outlive *f. *f is large. After a failure there is
// nothing to close.
static QLORA__UNUSED qlora_result qlora__gguf_file_parse(qlora__env* env, const char* label,
                                                         const void* bytes, uint64_t size,
                                                         qlora__gguf_file* f) {
    memset(f, 0, sizeof *f);
    QLORA__TRY(qlora__gguf_parse(env, label, bytes, size, &f->meta));
    qlora_result result = qlora__gguf_read_table(env, f);
    if (result != QLORA_OK) {
        qlora__gguf_close(env, f);
    }
    return result;
}

static QLORA__UNUSED qlora_result qlora__gguf_file_open(qlora__env* env, const char* path,
                                                        qlora__gguf_file* f) {
    memset(f, 0, sizeof *f);
    QLORA__TRY(qlora__path_join(env, "", path, f->path));
    QLORA__TRY(qlora__map_open(env, path, &f->map));
    qlora_result result = qlora__gguf_parse(env, f->path, f->map.data, f->map.size, &f->meta);
    if (result == QLORA_OK) {
        result = qlora__gguf_read_table(env, f);
    }
    if (result != QLORA_OK) {
        qlora__gguf_close(env, f);
    }
    return result;
}

// NULL if the file has no such tensor.
static QLORA__UNUSED const qlora__gguf_tensor* qlora__gguf_tensor_find(const qlora__gguf_file* f,
                                                                       const char* name) {
    uint32_t low = 0;
    uint32_t high = f->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        const qlora__gguf_tensor* t = &f->tensors[f->by_name[middle]];
        int order = strcmp(t->name, name);
        if (order == 0) {
            return t;
        }
        if (order < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return NULL;
}

// ---- split models -------------------------------------------------------------------------------

// The files of a model; the first one has the metadata.
typedef struct qlora__gguf_model {
    qlora__gguf_file* files;
    uint32_t count;
    uint32_t room;
} qlora__gguf_model;

static QLORA__UNUSED void qlora__gguf_model_close(qlora__env* env, qlora__gguf_model* m) {
    for (uint32_t i = 0; i < m->count; i++) {
        qlora__gguf_close(env, &m->files[i]);
    }
    qlora__env_free(env, m->files, m->room * sizeof *m->files);
    memset(m, 0, sizeof *m);
}

static QLORA__UNUSED const qlora__gguf_tensor* qlora__gguf_model_find(const qlora__gguf_model* m,
                                                                      const char* name) {
    for (uint32_t i = 0; i < m->count; i++) {
        const qlora__gguf_tensor* t = qlora__gguf_tensor_find(&m->files[i], name);
        if (t != NULL) {
            return t;
        }
    }
    return NULL;
}

// The path of part `number` (from 1): PREFIX-00001-of-00003.gguf with the digits replaced.
static qlora_result qlora__gguf_part_path(qlora__env* env, const char* first, int64_t number,
                                          int64_t parts, char* out) {
    char want[32];
    char name[32];
    size_t n = strlen(first);
    snprintf(want, sizeof want, "-00001-of-%05lld.gguf", (long long)parts);
    snprintf(name, sizeof name, "-%05lld-of-%05lld.gguf", (long long)number, (long long)parts);
    size_t tail = strlen(want);
    if (n < tail || strcmp(first + n - tail, want) != 0) {
        return qlora__env_fail(env, QLORA_ERR_FILE,
                               "%s: this is part 1 of %lld (split.count); its name must end in %s, "
                               "so that the others can be found",
                               first, (long long)parts, want);
    }
    memcpy(out, first, n - tail);
    memcpy(out + n - tail, name, tail + 1);
    return QLORA_OK;
}

// Opens and checks part `index` (from 0) of `parts`.
static qlora_result qlora__gguf_open_part(qlora__env* env, qlora__gguf_model* m, int64_t index,
                                          int64_t parts) {
    char path[QLORA__PATH_ROOM];
    bool exists = false;
    int64_t number = 0;
    QLORA__TRY(qlora__gguf_part_path(env, m->files[0].path, index + 1, parts, path));
    QLORA__TRY(qlora__file_exists(env, path, &exists));
    if (!exists) {
        return qlora__env_fail(env, QLORA_ERR_FILE,
                               "%s: part %lld of %lld does not exist; all parts must be in one "
                               "folder",
                               path, (long long)index + 1, (long long)parts);
    }
    QLORA__TRY(qlora__gguf_file_open(env, path, &m->files[index]));
    m->count++;
    const qlora__gguf* g = &m->files[index].meta;
    QLORA__TRY(qlora__gguf_get_int(env, g, "split.no", -1, 0, UINT16_MAX, &number));
    if (number != index) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: split.no is %lld; it must be %lld, as the name says", path,
                               (long long)number, (long long)index);
    }
    return QLORA_OK;
}

// No tensor in two parts, and as many as the first part announces.
static qlora_result qlora__gguf_check_parts(qlora__env* env, const qlora__gguf_model* m) {
    const qlora__gguf* g = &m->files[0].meta;
    uint64_t total = 0;
    int64_t announced = 0;
    for (uint32_t i = 0; i < m->count; i++) {
        for (uint32_t k = 0; k < m->files[i].count; k++) {
            const char* name = m->files[i].tensors[k].name;
            for (uint32_t j = 0; j < i; j++) {
                if (qlora__gguf_tensor_find(&m->files[j], name) != NULL) {
                    return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: %s is also in %s",
                                           m->files[i].path, name, m->files[j].path);
                }
            }
        }
        total += m->files[i].count;
    }
    QLORA__TRY(qlora__gguf_get_int(env, g, "split.tensors.count", (int64_t)total, 0, INT32_MAX,
                                   &announced));
    if ((uint64_t)announced != total) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: split.tensors.count is %lld, but the %u parts have %llu "
                               "tensors",
                               g->label, (long long)announced, m->count, (unsigned long long)total);
    }
    return QLORA_OK;
}

static qlora_result qlora__gguf_open_parts(qlora__env* env, const char* path,
                                           qlora__gguf_model* m) {
    int64_t parts = 0;
    int64_t number = 0;
    m->files = (qlora__gguf_file*)qlora__env_alloc(env, sizeof *m->files);
    if (m->files == NULL) {
        return QLORA_ERR_MEMORY;
    }
    m->room = 1;
    QLORA__TRY(qlora__gguf_file_open(env, path, &m->files[0]));
    m->count = 1;
    const qlora__gguf* g = &m->files[0].meta;
    QLORA__TRY(qlora__gguf_get_int(env, g, "split.count", 1, 0, QLORA__GGUF_MAX_SPLITS, &parts));
    if (parts <= 1) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__gguf_get_int(env, g, "split.no", -1, 0, UINT16_MAX, &number));
    if (number != 0) {
        return qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                               "%s: this is part %lld of %lld; give part 1", path,
                               (long long)number + 1, (long long)parts);
    }
    // Nothing is allocated for parts that are only announced.
    char last[QLORA__PATH_ROOM];
    bool exists = false;
    QLORA__TRY(qlora__gguf_part_path(env, path, parts, parts, last));
    QLORA__TRY(qlora__file_exists(env, last, &exists));
    if (!exists) {
        return qlora__env_fail(env, QLORA_ERR_FILE,
                               "%s: this is part 1 of %lld, but part %lld does not exist; all "
                               "parts must be in one folder",
                               path, (long long)parts, (long long)parts);
    }
    qlora__gguf_file* files =
        (qlora__gguf_file*)qlora__env_alloc(env, (size_t)parts * sizeof *files);
    if (files == NULL) {
        return QLORA_ERR_MEMORY;
    }
    files[0] = m->files[0];
    files[0].meta.label = files[0].path;
    qlora__env_free(env, m->files, sizeof *m->files);
    m->files = files;
    m->room = (uint32_t)parts;
    for (int64_t i = 1; i < parts; i++) {
        QLORA__TRY(qlora__gguf_open_part(env, m, i, parts));
    }
    return qlora__gguf_check_parts(env, m);
}

// Opens a model, given its only file or the first of its parts. After a failure there is nothing to
// close.
static QLORA__UNUSED qlora_result qlora__gguf_model_open(qlora__env* env, const char* path,
                                                         qlora__gguf_model* m) {
    memset(m, 0, sizeof *m);
    qlora_result result = qlora__gguf_open_parts(env, path, m);
    if (result != QLORA_OK) {
        qlora__gguf_model_close(env, m);
    }
    return result;
}
