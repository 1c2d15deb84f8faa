// ---- reading safetensors ------------------------------------------------------------------------

// Element types of the format, from the narrowest to the widest; the writer uses the reverse order.
// X(name, bits)
#define QLORA__ST_DTYPES(X)                                                                        \
    X(BOOL, 8)                                                                                     \
    X(F4, 4)                                                                                       \
    X(F6_E2M3, 6)                                                                                  \
    X(F6_E3M2, 6)                                                                                  \
    X(U8, 8)                                                                                       \
    X(I8, 8)                                                                                       \
    X(F8_E5M2, 8)                                                                                  \
    X(F8_E4M3, 8)                                                                                  \
    X(F8_E8M0, 8)                                                                                  \
    X(F8_E4M3FNUZ, 8)                                                                              \
    X(F8_E5M2FNUZ, 8)                                                                              \
    X(I16, 16)                                                                                     \
    X(U16, 16)                                                                                     \
    X(F16, 16)                                                                                     \
    X(BF16, 16)                                                                                    \
    X(I32, 32)                                                                                     \
    X(U32, 32)                                                                                     \
    X(F32, 32)                                                                                     \
    X(C64, 64)                                                                                     \
    X(F64, 64)                                                                                     \
    X(I64, 64)                                                                                     \
    X(U64, 64)

#define QLORA__ST_ENUM(name, bits) QLORA__ST_##name,
typedef enum qlora__st_dtype {
    QLORA__ST_DTYPES(QLORA__ST_ENUM) QLORA__ST_DTYPE_COUNT
} qlora__st_dtype;
#undef QLORA__ST_ENUM

typedef struct qlora__st_dtype_row {
    const char* name;
    uint32_t bits;
} qlora__st_dtype_row;

#define QLORA__ST_ROW(name, bits) {#name, bits},
static const qlora__st_dtype_row qlora__st_dtypes[] = {QLORA__ST_DTYPES(QLORA__ST_ROW)};
#undef QLORA__ST_ROW

#define QLORA__ST_MAX_HEADER 100000000u
#define QLORA__ST_CHECKSUM "~checksum" // the last tensor of a file with a checksum

typedef struct qlora__st_tensor {
    const char* name;     // decoded, terminated
    const int64_t* shape; // `rank` numbers, outermost first
    const uint8_t* data;  // not aligned: read it with memcpy or qlora__st_read_f32
    uint64_t bytes;
    uint64_t begin; // offset in the data part
    qlora__st_dtype dtype;
    uint32_t rank;
    // A tensor of a GGUF file whose values must be made first: data is NULL; see
    // qlora__folder_make.
    const qlora__gguf_view* view;
} qlora__st_tensor;

typedef struct qlora__st {
    const char* label;
    qlora__map map; // data is NULL if the caller owns the bytes
    qlora__json json;
    const uint8_t* file;
    uint64_t file_size;
    uint32_t count;
    qlora__st_tensor* tensors; // in header order
    uint32_t* by_name;
    void* block; // tensors, by_name, shapes and names in one block
    size_t block_bytes;
    char path[QLORA__PATH_ROOM];
} qlora__st;

static void qlora__st_close(qlora__env* env, qlora__st* st) {
    qlora__json_free(env, &st->json);
    qlora__env_free(env, st->block, st->block_bytes);
    qlora__map_close(env, &st->map);
    st->block = NULL;
    st->count = 0;
}

static uint64_t qlora__load_u64(const uint8_t* p) {
    uint64_t value = 0;
    for (int i = 7; i >= 0; i--) {
        value = value << 8 | p[i];
    }
    return value;
}

static void qlora__store_u64(uint8_t* p, uint64_t value) {
    for (int i = 0; i < 8; i++) {
        p[i] = (uint8_t)(value >> (8 * i));
    }
}

// Checks the eight bytes with the length of the header, and its first byte.
static qlora_result qlora__st_check_header(qlora__env* env, const qlora__st* st, uint64_t* header) {
    if (st->file_size < 8) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: a file of %llu bytes is too short for safetensors", st->label,
                               (unsigned long long)st->file_size);
    }
    uint64_t n = qlora__load_u64(st->file);
    if (n > QLORA__ST_MAX_HEADER) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: the header has %llu bytes; the limit of the format is %u",
                               st->label, (unsigned long long)n, QLORA__ST_MAX_HEADER);
    }
    if (n > st->file_size - 8) {
        return qlora__env_fail(
            env, QLORA_ERR_FORMAT,
            "%s: the header needs %llu bytes but the file has only %llu; it is truncated",
            st->label, (unsigned long long)n, (unsigned long long)st->file_size);
    }
    if (n == 0 || st->file[8] != '{') {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: the header does not start with '{'",
                               st->label);
    }
    *header = n;
    return QLORA_OK;
}

// Compares the size of the shape in bytes with the extent, with checked multiplications.
static qlora_result qlora__st_check_size(qlora__env* env, const qlora__st* st,
                                         const qlora__st_tensor* t) {
    uint64_t bits = qlora__st_dtypes[t->dtype].bits;
    for (uint32_t i = 0; i < t->rank; i++) {
        uint64_t dim = (uint64_t)t->shape[i];
        if (dim != 0 && bits > UINT64_MAX / dim) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: %s: the size of the shape overflows",
                                   st->label, t->name);
        }
        bits *= dim;
    }
    if (bits % 8 != 0) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: %s: %llu bits are not a whole number of bytes", st->label,
                               t->name, (unsigned long long)bits);
    }
    if (bits / 8 != t->bytes) {
        return qlora__env_fail(
            env, QLORA_ERR_FORMAT, "%s: %s: the shape needs %llu bytes but data_offsets span %llu",
            st->label, t->name, (unsigned long long)(bits / 8), (unsigned long long)t->bytes);
    }
    return QLORA_OK;
}

// Finds a key of a header entry; its value must be of the given kind.
static qlora_result qlora__st_entry_find(qlora__env* env, const qlora__st* st,
                                         const qlora__st_tensor* t, uint32_t entry, const char* key,
                                         qlora__json_kind kind, uint32_t* out) {
    *out = qlora__json_find(&st->json, entry, key);
    if (*out == 0) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: %s: %s is missing", st->label, t->name,
                               key);
    }
    if (qlora__json_kind_of(&st->json, *out) != kind) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: %s: %s must be %s", st->label, t->name,
                               key, kind == QLORA__JSON_STRING ? "a string" : "a list of integers");
    }
    return QLORA_OK;
}

// Parses one entry of the header into *t, whose name is already set; `shape` receives its numbers.
static qlora_result qlora__st_entry_parse(qlora__env* env, const qlora__st* st, uint32_t value,
                                          int64_t* shape, qlora__st_tensor* t) {
    const qlora__json* json = &st->json;
    uint32_t dtype = 0;
    uint32_t dims = 0;
    uint32_t offsets = 0;
    QLORA__TRY(qlora__st_entry_find(env, st, t, value, "dtype", QLORA__JSON_STRING, &dtype));
    int known = 0;
    while (known < QLORA__ST_DTYPE_COUNT &&
           !qlora__json_is(json, dtype, qlora__st_dtypes[known].name)) {
        known++;
    }
    if (known == QLORA__ST_DTYPE_COUNT) {
        char name[32];
        qlora__json_string(json, dtype, name, sizeof name);
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: %s: unknown dtype \"%s\"", st->label,
                               t->name, name);
    }
    t->dtype = (qlora__st_dtype)known;
    QLORA__TRY(qlora__st_entry_find(env, st, t, value, "shape", QLORA__JSON_ARRAY, &dims));
    t->rank = json->tokens[dims].count;
    t->shape = shape;
    for (uint32_t i = 0; i < t->rank; i++) {
        if (!qlora__json_offset(json, dims + 1 + i, &shape[i])) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "%s: %s: shape must contain non-negative integers", st->label,
                                   t->name);
        }
    }
    int64_t begin = 0;
    int64_t end = 0;
    QLORA__TRY(
        qlora__st_entry_find(env, st, t, value, "data_offsets", QLORA__JSON_ARRAY, &offsets));
    if (json->tokens[offsets].count != 2 || !qlora__json_offset(json, offsets + 1, &begin) ||
        !qlora__json_offset(json, offsets + 2, &end)) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: %s: data_offsets must be two non-negative integers", st->label,
                               t->name);
    }
    if (end < begin) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: %s: data_offsets: the end is before the start", st->label,
                               t->name);
    }
    t->begin = (uint64_t)begin;
    t->bytes = (uint64_t)(end - begin);
    return qlora__st_check_size(env, st, t);
}

static bool qlora__st_offset_less(const void* user, uint32_t a, uint32_t b) {
    const qlora__st_tensor* t = (const qlora__st_tensor*)user;
    if (t[a].begin != t[b].begin) {
        return t[a].begin < t[b].begin;
    }
    return t[a].bytes != t[b].bytes ? t[a].bytes < t[b].bytes : a < b;
}

static bool qlora__st_name_less(const void* user, uint32_t a, uint32_t b) {
    const qlora__st_tensor* t = (const qlora__st_tensor*)user;
    return strcmp(t[a].name, t[b].name) < 0;
}

// Tensors must follow one another without gaps or overlaps, from 0 to the end of the file.
static qlora_result qlora__st_check_layout(qlora__env* env, qlora__st* st, uint64_t data_size) {
    uint64_t at = 0;
    qlora__sort(st->by_name, st->count, qlora__st_offset_less, st->tensors);
    for (uint32_t i = 0; i < st->count; i++) {
        const qlora__st_tensor* t = &st->tensors[st->by_name[i]];
        if (t->begin != at) {
            return qlora__env_fail(
                env, QLORA_ERR_FORMAT, "%s: %s: data_offsets start at %llu, %s %llu", st->label,
                t->name, (unsigned long long)t->begin,
                t->begin < at ? "before the previous tensor ends at" : "leaving a gap after",
                (unsigned long long)at);
        }
        at = t->begin + t->bytes;
    }
    if (at != data_size) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: the tensors need %llu bytes but the file contains %llu%s",
                               st->label, (unsigned long long)at, (unsigned long long)data_size,
                               at > data_size ? "; it is truncated" : "");
    }
    qlora__sort(st->by_name, st->count, qlora__st_name_less, st->tensors);
    return QLORA_OK;
}

// Checks that __metadata__ is an object of strings.
static qlora_result qlora__st_check_metadata(qlora__env* env, const qlora__st* st, uint32_t value) {
    const qlora__json_token* tokens = st->json.tokens;
    bool good = tokens[value].kind == QLORA__JSON_OBJECT;
    for (uint32_t k = value + 1; good && k < tokens[value].next; k = tokens[k + 1].next) {
        good = tokens[k + 1].kind == QLORA__JSON_STRING;
    }
    return good ? QLORA_OK
                : qlora__env_fail(env, QLORA_ERR_FORMAT,
                                  "%s: __metadata__ must map strings to strings", st->label);
}

// Counts the tensors, dimensions and names of the header and allocates one block for them.
static qlora_result qlora__st_reserve(qlora__env* env, qlora__st* st, int64_t** shapes,
                                      char** names) {
    const qlora__json* json = &st->json;
    size_t dims = 0;
    size_t bytes = 0;
    size_t part = 0;
    for (uint32_t k = 1; k < json->count; k = json->tokens[k + 1].next) {
        if (qlora__json_is(json, k, "__metadata__")) {
            QLORA__TRY(qlora__st_check_metadata(env, st, k + 1));
            continue;
        }
        uint32_t shape = qlora__json_find(json, k + 1, "shape");
        dims += shape != 0 ? json->tokens[shape].count : 0;
        bytes += qlora__json_string(json, k, NULL, 0) + 1;
        st->count++;
    }
    bool fits = qlora__mul(dims, sizeof(int64_t), &part) && qlora__add(bytes, part, &bytes) &&
                qlora__mul(st->count, sizeof(qlora__st_tensor) + sizeof(uint32_t), &part) &&
                qlora__add(bytes, part, &bytes);
    if (!fits) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: too many tensors", st->label);
    }
    if (st->count == 0) {
        return QLORA_OK;
    }
    st->block = qlora__env_alloc(env, bytes);
    if (st->block == NULL) {
        return QLORA_ERR_MEMORY;
    }
    st->block_bytes = bytes;
    st->tensors = (qlora__st_tensor*)st->block;
    *shapes = (int64_t*)(void*)(st->tensors + st->count);
    st->by_name = (uint32_t*)(void*)(*shapes + dims);
    *names = (char*)(void*)(st->by_name + st->count);
    return QLORA_OK;
}

static qlora_result qlora__st_parse_header(qlora__env* env, qlora__st* st) {
    uint64_t header = 0;
    int64_t* shapes = NULL;
    char* names = NULL;
    QLORA__TRY(qlora__st_check_header(env, st, &header));
    QLORA__TRY(
        qlora__json_parse(env, st->label, st->file + 8, header, QLORA__JSON_UNIQUE, &st->json));
    const qlora__json* json = &st->json;
    for (uint64_t i = json->tokens[0].end; i < header; i++) {
        if (st->file[8 + i] != ' ') {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "%s: the header may only be padded with spaces", st->label);
        }
    }
    QLORA__TRY(qlora__st_reserve(env, st, &shapes, &names));
    uint32_t index = 0;
    for (uint32_t k = 1; k < json->count; k = json->tokens[k + 1].next) {
        if (qlora__json_is(json, k, "__metadata__")) {
            continue;
        }
        qlora__st_tensor* t = &st->tensors[index];
        memset(t, 0, sizeof *t);
        size_t length = qlora__json_string(json, k, NULL, 0) + 1;
        qlora__json_string(json, k, names, length);
        t->name = names;
        if (strlen(names) + 1 != length) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "%s: %s: the name of a tensor contains a NUL byte", st->label,
                                   names);
        }
        QLORA__TRY(qlora__st_entry_parse(env, st, k + 1, shapes, t));
        st->by_name[index] = index;
        names += length;
        shapes += t->rank;
        index++;
    }
    QLORA__TRY(qlora__st_check_layout(env, st, st->file_size - 8 - header));
    for (uint32_t i = 0; i < st->count; i++) {
        st->tensors[i].data = st->file + 8 + header + st->tensors[i].begin;
    }
    return QLORA_OK;
}

// Reads a complete file from memory, which must outlive *st. Call qlora__st_close afterwards. *st
// is large and must not be moved. After a failure there is nothing to close.
static QLORA__UNUSED qlora_result qlora__st_parse(qlora__env* env, const char* label,
                                                  const void* bytes, uint64_t size, qlora__st* st) {
    memset(st, 0, sizeof *st);
    st->label = label;
    st->file = (const uint8_t*)bytes;
    st->file_size = size;
    qlora_result result = qlora__st_parse_header(env, st);
    if (result != QLORA_OK) {
        qlora__st_close(env, st);
    }
    return result;
}

// Maps a file and reads its header.
static qlora_result qlora__st_open(qlora__env* env, const char* path, qlora__st* st) {
    qlora__map map;
    memset(st, 0, sizeof *st);
    QLORA__TRY(qlora__path_join(env, "", path, st->path));
    QLORA__TRY(qlora__map_open(env, path, &map));
    st->map = map;
    st->label = st->path;
    st->file = map.data;
    st->file_size = map.size;
    qlora_result result = qlora__st_parse_header(env, st);
    if (result != QLORA_OK) {
        qlora__st_close(env, st);
    }
    return result;
}

// Returns NULL if there is no tensor of that name.
static const qlora__st_tensor* qlora__st_find(const qlora__st* st, const char* name) {
    uint32_t low = 0;
    uint32_t high = st->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        int order = strcmp(st->tensors[st->by_name[middle]].name, name);
        if (order == 0) {
            return &st->tensors[st->by_name[middle]];
        }
        if (order < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return NULL;
}

// Copies the text of a __metadata__ entry, as qlora__json_string does. Returns false if it does not
// exist or does not fit.
static QLORA__UNUSED bool qlora__st_metadata(const qlora__st* st, const char* key, char* out,
                                             size_t size) {
    uint32_t all = qlora__json_find(&st->json, 0, "__metadata__");
    uint32_t value = all == 0 ? 0 : qlora__json_find(&st->json, all, key);
    return value != 0 && qlora__json_string(&st->json, value, out, size) < size;
}

// Formats a shape for messages, such as "[8,128]".
static const char* qlora__shape_text(const int64_t* shape, uint32_t rank, char out[96]) {
    size_t n = 1;
    out[0] = '[';
    for (uint32_t i = 0; i < rank && n < 70; i++) {
        n += (size_t)snprintf(out + n, 96 - n, i == 0 ? "%lld" : ",%lld", (long long)shape[i]);
    }
    out[n] = ']';
    out[n + 1] = '\0';
    return out;
}

static uint64_t qlora__st_elements(const qlora__st_tensor* t) {
    return t->bytes * 8 / qlora__st_dtypes[t->dtype].bits;
}

static bool qlora__st_is_float(const qlora__st_tensor* t) {
    return t->dtype == QLORA__ST_F32 || t->dtype == QLORA__ST_BF16 || t->dtype == QLORA__ST_F16;
}

// Converts elements [first, first + count) of an F32, BF16 or F16 tensor to floats, exactly.
static void qlora__st_read_f32(const qlora__st_tensor* t, uint64_t first, uint64_t count,
                               float* out) {
    if (QLORA__GGUF && t->view != NULL) {
        qlora__gguf_view_read(t->view, first, count, out);
        return;
    }
    if (t->dtype == QLORA__ST_F32) {
        memcpy(out, t->data + first * 4, (size_t)count * 4);
        return;
    }
    for (uint64_t i = 0; i < count; i++) {
        uint16_t half = 0;
        memcpy(&half, t->data + (first + i) * 2, 2);
        out[i] = t->dtype == QLORA__ST_BF16 ? qlora__bf16_to(half) : qlora__f16_to(half);
    }
}

// Checks a file that was written with a checksum: it must be present and correct.
static QLORA__UNUSED qlora_result qlora__st_verify(qlora__env* env, const qlora__st* st) {
    const qlora__st_tensor* t = qlora__st_find(st, QLORA__ST_CHECKSUM);
    if (t == NULL || t->bytes != 8 || t->data + 8 != st->file + st->file_size) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: the checksum at the end of the file is missing", st->label);
    }
    qlora__hash hash;
    qlora__hash_begin(&hash);
    qlora__hash_add(&hash, st->file, (size_t)(st->file_size - 8));
    if (qlora__hash_end(&hash) != qlora__load_u64(t->data)) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: the checksum does not match; the file is damaged", st->label);
    }
    return QLORA_OK;
}

// ---- writing safetensors ------------------------------------------------------------------------

// A tensor to be written. Names must be distinct; names and shapes are read only by
// qlora__st_write_begin.
typedef struct qlora__st_entry {
    const char* name;
    const int64_t* shape;
    qlora__st_dtype dtype;
    uint32_t rank;
} qlora__st_entry;

typedef struct qlora__st_writer {
    qlora__out out;
    uint32_t* order; // order[i] is the entry whose bytes are written i-th
    uint32_t count;
    uint64_t written;
    uint64_t data_bytes;
    qlora__hash hash;
    bool checksum;
} qlora__st_writer;

static bool qlora__st_entry_less(const void* user, uint32_t a, uint32_t b) {
    const qlora__st_entry* e = (const qlora__st_entry*)user;
    return e[a].dtype != e[b].dtype ? e[a].dtype > e[b].dtype : strcmp(e[a].name, e[b].name) < 0;
}

static uint64_t qlora__st_entry_bytes(const qlora__st_entry* e) {
    uint64_t bits = qlora__st_dtypes[e->dtype].bits;
    for (uint32_t i = 0; i < e->rank; i++) {
        bits *= (uint64_t)e->shape[i];
    }
    return bits / 8;
}

static void qlora__st_write_entry(qlora__json_writer* w, const char* name, qlora__st_dtype dtype,
                                  const int64_t* shape, uint32_t rank, uint64_t begin,
                                  uint64_t end) {
    qlora__json_write_open(w, name, '{');
    qlora__json_write_string(w, "dtype", qlora__st_dtypes[dtype].name);
    qlora__json_write_open(w, "shape", '[');
    for (uint32_t i = 0; i < rank; i++) {
        qlora__json_write_int(w, NULL, shape[i]);
    }
    qlora__json_write_close(w, ']');
    qlora__json_write_open(w, "data_offsets", '[');
    qlora__json_write_int(w, NULL, (int64_t)begin);
    qlora__json_write_int(w, NULL, (int64_t)end);
    qlora__json_write_close(w, ']');
    qlora__json_write_close(w, '}');
}

// Writes the header: its length, then its text, padded with spaces to a multiple of eight bytes.
static void qlora__st_write_header(qlora__st_writer* w, qlora__string* text,
                                   const qlora__st_entry* entries, const char* const* metadata) {
    static const int64_t eight = 8;
    qlora__json_writer json;
    qlora__string_add(text, "\0\0\0\0\0\0\0\0", 8);
    qlora__json_write_begin(&json, text, 0);
    qlora__json_write_open(&json, NULL, '{');
    qlora__json_write_open(&json, "__metadata__", '{');
    qlora__json_write_string(&json, "format", "pt");
    for (size_t i = 0; metadata != NULL && metadata[i] != NULL; i += 2) {
        qlora__json_write_string(&json, metadata[i], metadata[i + 1]);
    }
    qlora__json_write_close(&json, '}');
    uint64_t at = 0;
    for (uint32_t i = 0; i < w->count; i++) {
        const qlora__st_entry* e = &entries[w->order[i]];
        uint64_t bytes = qlora__st_entry_bytes(e);
        qlora__st_write_entry(&json, e->name, e->dtype, e->shape, e->rank, at, at + bytes);
        at += bytes;
    }
    w->data_bytes = at;
    if (w->checksum) {
        qlora__st_write_entry(&json, QLORA__ST_CHECKSUM, QLORA__ST_U8, &eight, 1, at, at + 8);
    }
    qlora__json_write_close(&json, '}');
    while (text->result == QLORA_OK && text->size % 8 != 0) {
        qlora__string_add(text, " ", 1);
    }
    if (text->result == QLORA_OK) {
        qlora__store_u64((uint8_t*)(void*)text->data, text->size - 8);
    }
}

static void qlora__st_write_abort(qlora__env* env, qlora__st_writer* w) {
    qlora__out_abort(env, &w->out);
    qlora__env_free(env, w->order, w->count * sizeof *w->order);
    memset(w, 0, sizeof *w);
}

// Starts a file; all its tensors must be known. `metadata` is a list of pairs of strings that ends
// with NULL, or NULL; {"format":"pt"} is always included. `checksum` adds a last tensor that
// qlora__st_verify checks. Then write the bytes of entries order[0], order[1], ... in pieces of any
// size, and commit or abort.
static QLORA__UNUSED qlora_result qlora__st_write_begin(qlora__env* env, const char* path,
                                                        const qlora__st_entry* entries,
                                                        uint32_t count, const char* const* metadata,
                                                        bool checksum, qlora__st_writer* w) {
    qlora__string text;
    memset(w, 0, sizeof *w);
    qlora__string_begin(env, &text);
    w->count = count;
    w->checksum = checksum;
    qlora__hash_begin(&w->hash);
    qlora_result result = QLORA_OK;
    if (count > 0) {
        w->order = (uint32_t*)qlora__env_alloc(env, count * sizeof *w->order);
        result = w->order == NULL ? QLORA_ERR_MEMORY : QLORA_OK;
    }
    for (uint32_t i = 0; i < count && result == QLORA_OK; i++) {
        w->order[i] = i;
    }
    if (result == QLORA_OK) {
        qlora__sort(w->order, count, qlora__st_entry_less, entries);
        qlora__st_write_header(w, &text, entries, metadata);
        result = text.result;
    }
    if (result == QLORA_OK) {
        result = qlora__out_begin(env, path, &w->out);
    }
    if (result == QLORA_OK) {
        qlora__hash_add(&w->hash, text.data, text.size);
        result = qlora__out_write(env, &w->out, text.data, text.size);
    }
    qlora__string_free(&text);
    if (result != QLORA_OK) {
        qlora__st_write_abort(env, w);
    }
    return result;
}

static QLORA__UNUSED qlora_result qlora__st_write(qlora__env* env, qlora__st_writer* w,
                                                  const void* bytes, size_t size) {
    if (size > w->data_bytes - w->written) {
        return qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                               "safetensors: %llu bytes more than the header declares",
                               (unsigned long long)(size - (w->data_bytes - w->written)));
    }
    w->written += size;
    if (w->checksum) {
        qlora__hash_add(&w->hash, bytes, size);
    }
    return qlora__out_write(env, &w->out, bytes, size);
}

// Completes the file under its temporary name. On failure, it has been abandoned.
static QLORA__UNUSED qlora_result qlora__st_write_finish(qlora__env* env, qlora__st_writer* w) {
    qlora_result result = QLORA_OK;
    if (w->written != w->data_bytes) {
        result = qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                                 "safetensors: only %llu of %llu bytes have been written",
                                 (unsigned long long)w->written, (unsigned long long)w->data_bytes);
    }
    if (result == QLORA_OK && w->checksum) {
        uint8_t sum[8];
        qlora__store_u64(sum, qlora__hash_end(&w->hash));
        result = qlora__out_write(env, &w->out, sum, sizeof sum);
    }
    if (result == QLORA_OK) {
        result = qlora__out_finish(env, &w->out);
    }
    if (result != QLORA_OK) {
        qlora__st_write_abort(env, w);
    }
    return result;
}

// Gives a finished file its final name. On failure, an existing file is left unchanged.
static QLORA__UNUSED qlora_result qlora__st_write_publish(qlora__env* env, qlora__st_writer* w) {
    qlora_result result = qlora__out_publish(env, &w->out);
    qlora__st_write_abort(env, w);
    return result;
}

static QLORA__UNUSED qlora_result qlora__st_write_commit(qlora__env* env, qlora__st_writer* w) {
    QLORA__TRY(qlora__st_write_finish(env, w));
    return qlora__st_write_publish(env, w);
}

// ---- types of files and of tensors --------------------------------------------------------------

// The type of a tensor whose values are floating-point numbers.
static QLORA__UNUSED qlora_dtype qlora__st_dtype_of(const qlora__st_tensor* t) {
    return t->dtype == QLORA__ST_F32    ? QLORA_F32
           : t->dtype == QLORA__ST_BF16 ? QLORA_BF16
                                        : QLORA_F16;
}

static QLORA__UNUSED qlora__st_dtype qlora__st_dtype_for(qlora_dtype dtype) {
    return dtype == QLORA_F32    ? QLORA__ST_F32
           : dtype == QLORA_BF16 ? QLORA__ST_BF16
                                 : QLORA__ST_F16;
}
