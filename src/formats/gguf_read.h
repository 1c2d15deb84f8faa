#ifndef QLORA__PART_GGUF_READ
#define QLORA__PART_GGUF_READ

// ---- reading GGUF: header and metadata ----------------------------------------------------------

// The types of values, by their number in the file. X(name, bytes); 0 = its size varies.
#define QLORA__GGUF_VALUES(X)                                                                      \
    X(U8, 1)                                                                                       \
    X(I8, 1)                                                                                       \
    X(U16, 2)                                                                                      \
    X(I16, 2)                                                                                      \
    X(U32, 4)                                                                                      \
    X(I32, 4)                                                                                      \
    X(F32, 4)                                                                                      \
    X(BOOL, 1)                                                                                     \
    X(STRING, 0)                                                                                   \
    X(ARRAY, 0)                                                                                    \
    X(U64, 8)                                                                                      \
    X(I64, 8)                                                                                      \
    X(F64, 8)

#define QLORA__GGUF_ENUM(name, bytes) QLORA__GGUF_##name,
typedef enum qlora__gguf_kind {
    QLORA__GGUF_VALUES(QLORA__GGUF_ENUM) QLORA__GGUF_KIND_COUNT
} qlora__gguf_kind;
#undef QLORA__GGUF_ENUM

// Longer keys are not valid; a key of this length does not occur.
#define QLORA__GGUF_MAX_KEY 65535u
#define QLORA__GGUF_MAX_ALIGN ((uint64_t)1 << 30)

// A value of the metadata. `data` and `key` point into the file and are not terminated.
typedef struct qlora__gguf_value {
    const char* key;
    const uint8_t* data; // the number, the characters, or the first element
    uint64_t bytes;      // of data
    uint64_t count;      // elements of an array, else 1
    uint32_t key_size;
    qlora__gguf_kind kind;
    qlora__gguf_kind element; // of an array; else the same as `kind`
} qlora__gguf_value;

typedef struct qlora__gguf {
    const char* label;
    const uint8_t* file;
    uint64_t size;
    uint64_t tensor_count; // announced; the table is checked by those who need it
    uint64_t table;        // where the table of tensors begins
    uint64_t alignment;
    qlora__gguf_value* values; // in file order
    uint32_t* by_key;
    uint32_t count;
    size_t block; // bytes of values and by_key
} qlora__gguf;

// Reads forwards through the file. A read that does not fit sets `ended` and returns zeros, so
// that a caller can check once.
typedef struct qlora__gguf_cursor {
    const uint8_t* file;
    uint64_t at;
    uint64_t size;
    bool ended;
} qlora__gguf_cursor;

// The next n bytes, or NULL.
static const uint8_t* qlora__gguf_take(qlora__gguf_cursor* c, uint64_t n) {
    if (c->ended || n > c->size - c->at) {
        c->ended = true;
        return NULL;
    }
    c->at += n;
    return c->file + (c->at - n);
}

// A little-endian number of `bytes` bytes.
static uint64_t qlora__gguf_bits(const uint8_t* p, uint32_t bytes) {
    uint64_t value = 0;
    for (uint32_t i = bytes; i > 0; i--) {
        value = value << 8 | p[i - 1];
    }
    return value;
}

static uint64_t qlora__gguf_number(qlora__gguf_cursor* c, uint32_t bytes) {
    const uint8_t* p = qlora__gguf_take(c, bytes);
    return p != NULL ? qlora__gguf_bits(p, bytes) : 0;
}

static uint32_t qlora__gguf_kind_bytes(qlora__gguf_kind kind) {
#define QLORA__GGUF_SIZE(name, bytes) bytes,
    static const uint8_t sizes[] = {QLORA__GGUF_VALUES(QLORA__GGUF_SIZE)};
#undef QLORA__GGUF_SIZE
    return sizes[kind];
}

static const char* qlora__gguf_kind_name(qlora__gguf_kind kind) {
#define QLORA__GGUF_NAMED(name, bytes) #name,
    static const char* const names[] = {QLORA__GGUF_VALUES(QLORA__GGUF_NAMED)};
#undef QLORA__GGUF_NAMED
    return names[kind];
}

static void qlora__gguf_free(qlora__env* env, qlora__gguf* g) {
    qlora__env_free(env, g->values, g->block);
    memset(g, 0, sizeof *g);
}

// The part of a key that a message shows.
static int qlora__gguf_shown(uint64_t size) {
    return size < 80 ? (int)size : 80;
}

static qlora_result qlora__gguf_cut(qlora__env* env, const qlora__gguf* g, const char* where) {
    return qlora__env_fail(env, QLORA_ERR_FORMAT,
                           "%s: the file ends inside %s, after %llu bytes; it is truncated",
                           g->label, where, (unsigned long long)g->size);
}

// The characters of a string; *size is their number.
static qlora_result qlora__gguf_chars(qlora__env* env, const qlora__gguf* g, qlora__gguf_cursor* c,
                                      const char* what, const uint8_t** out, uint64_t* size) {
    uint64_t n = qlora__gguf_number(c, 8);
    const uint8_t* p = qlora__gguf_take(c, n);
    if (p == NULL) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: %s has %llu bytes, more than the file contains", g->label, what,
                               (unsigned long long)n);
    }
    *out = p;
    *size = n;
    return QLORA_OK;
}

static qlora_result qlora__gguf_bad_kind(qlora__env* env, const qlora__gguf* g,
                                         const qlora__gguf_value* v, const char* what,
                                         uint64_t kind) {
    return qlora__env_fail(env, QLORA_ERR_FORMAT,
                           "%s: %.*s: %s %llu does not exist; the last one is %d", g->label,
                           qlora__gguf_shown(v->key_size), v->key, what, (unsigned long long)kind,
                           (int)QLORA__GGUF_KIND_COUNT - 1);
}

static qlora_result qlora__gguf_read_array(qlora__env* env, const qlora__gguf* g,
                                           qlora__gguf_cursor* c, qlora__gguf_value* v) {
    uint64_t element = qlora__gguf_number(c, 4);
    v->count = qlora__gguf_number(c, 8);
    if (c->ended) {
        return qlora__gguf_cut(env, g, "an array");
    }
    if (element >= QLORA__GGUF_KIND_COUNT) {
        return qlora__gguf_bad_kind(env, g, v, "element type", element);
    }
    v->element = (qlora__gguf_kind)element;
    if (v->element == QLORA__GGUF_ARRAY) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: %.*s is an array of arrays, which GGUF does not allow",
                               g->label, qlora__gguf_shown(v->key_size), v->key);
    }
    uint64_t least = v->element == QLORA__GGUF_STRING ? 8 : qlora__gguf_kind_bytes(v->element);
    if (v->count > (c->size - c->at) / least) {
        return qlora__env_fail(
            env, QLORA_ERR_FORMAT, "%s: %.*s has %llu elements, more than the file can contain",
            g->label, qlora__gguf_shown(v->key_size), v->key, (unsigned long long)v->count);
    }
    v->data = c->file + c->at;
    if (v->element != QLORA__GGUF_STRING) {
        v->bytes = v->count * least;
        qlora__gguf_take(c, v->bytes);
        return QLORA_OK;
    }
    uint64_t begin = c->at;
    for (uint64_t i = 0; i < v->count; i++) {
        const uint8_t* text = NULL;
        uint64_t size = 0;
        QLORA__TRY(qlora__gguf_chars(env, g, c, "a string of an array", &text, &size));
    }
    v->bytes = c->at - begin;
    return QLORA_OK;
}

static qlora_result qlora__gguf_read_value(qlora__env* env, const qlora__gguf* g,
                                           qlora__gguf_cursor* c, qlora__gguf_value* v) {
    const uint8_t* key = NULL;
    uint64_t size = 0;
    memset(v, 0, sizeof *v);
    QLORA__TRY(qlora__gguf_chars(env, g, c, "a key", &key, &size));
    v->key = (const char*)key;
    if (size == 0 || size > QLORA__GGUF_MAX_KEY || memchr(key, 0, (size_t)size) != NULL) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: a key has %llu bytes; it must have 1 to %u and no zero byte",
                               g->label, (unsigned long long)size, QLORA__GGUF_MAX_KEY);
    }
    v->key_size = (uint32_t)size;
    uint64_t kind = qlora__gguf_number(c, 4);
    if (c->ended) {
        return qlora__gguf_cut(env, g, "the metadata");
    }
    if (kind >= QLORA__GGUF_KIND_COUNT) {
        return qlora__gguf_bad_kind(env, g, v, "type", kind);
    }
    v->kind = (qlora__gguf_kind)kind;
    v->element = v->kind;
    v->count = 1;
    if (v->kind == QLORA__GGUF_ARRAY) {
        QLORA__TRY(qlora__gguf_read_array(env, g, c, v));
    } else if (v->kind == QLORA__GGUF_STRING) {
        QLORA__TRY(qlora__gguf_chars(env, g, c, "a string", &v->data, &v->bytes));
    } else {
        v->bytes = qlora__gguf_kind_bytes(v->kind);
        v->data = qlora__gguf_take(c, v->bytes);
        if (v->data == NULL) {
            return qlora__gguf_cut(env, g, "the metadata");
        }
    }
    for (uint64_t i = 0; v->element == QLORA__GGUF_BOOL && i < v->count; i++) {
        if (v->data[i] > 1) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "%s: %.*s: a BOOL is %u; it must be 0 or 1", g->label,
                                   qlora__gguf_shown(v->key_size), v->key, v->data[i]);
        }
    }
    return QLORA_OK;
}

static int qlora__gguf_key_order(const qlora__gguf_value* a, const char* key, size_t size) {
    size_t n = a->key_size < size ? a->key_size : size;
    int order = memcmp(a->key, key, n);
    return order != 0 ? order : a->key_size < size ? -1 : a->key_size > size ? 1 : 0;
}

static bool qlora__gguf_key_less(const void* user, uint32_t a, uint32_t b) {
    const qlora__gguf_value* v = (const qlora__gguf_value*)user;
    return qlora__gguf_key_order(&v[a], v[b].key, v[b].key_size) < 0;
}

// NULL if there is no such key.
static const qlora__gguf_value* qlora__gguf_find(const qlora__gguf* g, const char* key) {
    uint32_t low = 0;
    uint32_t high = g->count;
    size_t size = strlen(key);
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        const qlora__gguf_value* v = &g->values[g->by_key[middle]];
        int order = qlora__gguf_key_order(v, key, size);
        if (order == 0) {
            return v;
        }
        if (order < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return NULL;
}

static qlora_result qlora__gguf_read_values(qlora__env* env, qlora__gguf* g, qlora__gguf_cursor* c,
                                            uint64_t count) {
    // The smallest pair has a key of one byte and a value of one.
    if (count > (c->size - c->at) / 14 || count > INT32_MAX) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: %llu keys are announced, more than the file can contain",
                               g->label, (unsigned long long)count);
    }
    size_t bytes = (size_t)count * (sizeof *g->values + sizeof *g->by_key);
    if (count > 0) {
        g->values = (qlora__gguf_value*)qlora__env_alloc(env, bytes);
        if (g->values == NULL) {
            return QLORA_ERR_MEMORY;
        }
        g->block = bytes;
        g->by_key = (uint32_t*)(void*)(g->values + count);
    }
    for (uint64_t i = 0; i < count; i++) {
        QLORA__TRY(qlora__gguf_read_value(env, g, c, &g->values[i]));
        g->by_key[i] = (uint32_t)i;
    }
    g->count = (uint32_t)count;
    qlora__sort(g->by_key, g->count, qlora__gguf_key_less, g->values);
    for (uint32_t i = 1; i < g->count; i++) {
        const qlora__gguf_value* v = &g->values[g->by_key[i]];
        if (qlora__gguf_key_order(&g->values[g->by_key[i - 1]], v->key, v->key_size) == 0) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: the key %.*s occurs twice", g->label,
                                   qlora__gguf_shown(v->key_size), v->key);
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__gguf_read_version(qlora__env* env, const qlora__gguf* g,
                                             qlora__gguf_cursor* c) {
    const uint8_t* magic = qlora__gguf_take(c, 4);
    uint64_t version = qlora__gguf_number(c, 4);
    if (magic == NULL || memcmp(magic, "GGUF", 4) != 0) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: this is not a GGUF file: it does not begin with \"GGUF\"",
                               g->label);
    }
    if (c->ended) {
        return qlora__gguf_cut(env, g, "the header");
    }
    if (version != 0 && (version & 0xFFFF) == 0) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "%s: this is a big-endian GGUF file; only little-endian ones are "
                               "supported",
                               g->label);
    }
    if (version != 2 && version != 3) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "%s: GGUF version %llu is not supported; supported are 2 and 3",
                               g->label, (unsigned long long)version);
    }
    return QLORA_OK;
}

static qlora_result qlora__gguf_read_alignment(qlora__env* env, qlora__gguf* g) {
    const qlora__gguf_value* v = qlora__gguf_find(g, "general.alignment");
    g->alignment = 32;
    if (v == NULL) {
        return QLORA_OK;
    }
    if (v->kind != QLORA__GGUF_U32) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: general.alignment has type %s; it must be U32", g->label,
                               qlora__gguf_kind_name(v->kind));
    }
    g->alignment = qlora__gguf_bits(v->data, 4);
    if (g->alignment == 0 || (g->alignment & (g->alignment - 1)) != 0 ||
        g->alignment > QLORA__GGUF_MAX_ALIGN) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: general.alignment is %llu; it must be a power of two up to "
                               "2^30",
                               g->label, (unsigned long long)g->alignment);
    }
    return QLORA_OK;
}

static qlora_result qlora__gguf_read_all(qlora__env* env, qlora__gguf* g) {
    qlora__gguf_cursor c;
    memset(&c, 0, sizeof c);
    c.file = g->file;
    c.size = g->size;
    QLORA__TRY(qlora__gguf_read_version(env, g, &c));
    g->tensor_count = qlora__gguf_number(&c, 8);
    uint64_t count = qlora__gguf_number(&c, 8);
    if (c.ended) {
        return qlora__gguf_cut(env, g, "the header");
    }
    QLORA__TRY(qlora__gguf_read_values(env, g, &c, count));
    g->table = c.at;
    return qlora__gguf_read_alignment(env, g);
}

// Reads the header and the metadata of a file in memory, which must outlive *g. Call
// qlora__gguf_free afterwards. After a failure there is nothing to free.
static QLORA__UNUSED qlora_result qlora__gguf_parse(qlora__env* env, const char* label,
                                                    const void* bytes, uint64_t size,
                                                    qlora__gguf* g) {
    memset(g, 0, sizeof *g);
    g->label = label;
    g->file = (const uint8_t*)bytes;
    g->size = size;
    qlora_result result = qlora__gguf_read_all(env, g);
    if (result != QLORA_OK) {
        qlora__gguf_free(env, g);
    }
    return result;
}

// ---- values -------------------------------------------------------------------------------------

static qlora_result qlora__gguf_wrong(qlora__env* env, const qlora__gguf* g, const char* key,
                                      const qlora__gguf_value* v, const char* wanted) {
    if (v == NULL) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: %s is missing", g->label, key);
    }
    return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: %s has type %s%s; it must be %s", g->label,
                           key, v->kind == QLORA__GGUF_ARRAY ? "ARRAY of " : "",
                           qlora__gguf_kind_name(v->element), wanted);
}

// Element `index` as an integer; false if it is not one, or does not fit.
static QLORA__UNUSED bool qlora__gguf_integer(const qlora__gguf_value* v, uint64_t index,
                                              int64_t* out) {
    uint32_t bytes = qlora__gguf_kind_bytes(v->element);
    bool is_signed = v->element == QLORA__GGUF_I8 || v->element == QLORA__GGUF_I16 ||
                     v->element == QLORA__GGUF_I32 || v->element == QLORA__GGUF_I64;
    bool is_unsigned = v->element == QLORA__GGUF_U8 || v->element == QLORA__GGUF_U16 ||
                       v->element == QLORA__GGUF_U32 || v->element == QLORA__GGUF_U64;
    if ((!is_signed && !is_unsigned) || index >= v->count) {
        return false;
    }
    uint64_t bits = qlora__gguf_bits(v->data + index * bytes, bytes);
    uint64_t sign = (uint64_t)1 << (8 * bytes - 1);
    if (is_signed && (bits & sign) != 0) {
        // minus the distance from 2^n, without a conversion that overflows
        *out = -(int64_t)((~bits & (sign - 1))) - 1;
        return true;
    }
    *out = (int64_t)(bits & INT64_MAX);
    return bits <= INT64_MAX;
}

// Element `index` as a real number; false if it is not an F32 or F64.
static QLORA__UNUSED bool qlora__gguf_real(const qlora__gguf_value* v, uint64_t index,
                                           double* out) {
    if (index >= v->count) {
        return false;
    }
    if (v->element == QLORA__GGUF_F32) {
        uint32_t bits = (uint32_t)qlora__gguf_bits(v->data + index * 4, 4);
        float number;
        memcpy(&number, &bits, sizeof number);
        *out = (double)number;
        return true;
    }
    if (v->element == QLORA__GGUF_F64) {
        uint64_t bits = qlora__gguf_bits(v->data + index * 8, 8);
        memcpy(out, &bits, sizeof *out);
        return true;
    }
    return false;
}

// An integer within [least, most]. If it is absent, the result is `fallback`; a negative fallback
// makes that an error. An array is accepted when all its elements are equal.
static QLORA__UNUSED qlora_result qlora__gguf_get_int(qlora__env* env, const qlora__gguf* g,
                                                      const char* key, int64_t fallback,
                                                      int64_t least, int64_t most, int64_t* out) {
    const qlora__gguf_value* v = qlora__gguf_find(g, key);
    int64_t number = fallback;
    if (v == NULL && fallback >= 0) {
        *out = fallback;
        return QLORA_OK;
    }
    if (v == NULL || v->count == 0 || !qlora__gguf_integer(v, 0, &number)) {
        return qlora__gguf_wrong(env, g, key, v, "an integer");
    }
    for (uint64_t i = 1; i < v->count; i++) {
        int64_t other = 0;
        if (!qlora__gguf_integer(v, i, &other) || other != number) {
            return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                   "%s: %s differs between the layers (%lld, then %lld), which is "
                                   "not supported",
                                   g->label, key, (long long)number, (long long)other);
        }
    }
    if (number < least || number > most) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: %s is %lld; it must be an integer from %lld to %lld", g->label,
                               key, (long long)number, (long long)least, (long long)most);
    }
    *out = number;
    return QLORA_OK;
}

// A positive number. If it is absent, the result is `fallback`; a negative fallback makes that an
// error.
static QLORA__UNUSED qlora_result qlora__gguf_get_positive(qlora__env* env, const qlora__gguf* g,
                                                           const char* key, double fallback,
                                                           double* out) {
    const qlora__gguf_value* v = qlora__gguf_find(g, key);
    double number = 0.0;
    if (v == NULL && fallback >= 0.0) {
        *out = fallback;
        return QLORA_OK;
    }
    if (v == NULL || v->kind == QLORA__GGUF_ARRAY || !qlora__gguf_real(v, 0, &number)) {
        return qlora__gguf_wrong(env, g, key, v, "F32 or F64");
    }
    if (!(number > 0.0) || number > 1e30) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: %s is %g; it must be positive and at most 1e30", g->label, key,
                               number);
    }
    *out = number;
    return QLORA_OK;
}

static QLORA__UNUSED qlora_result qlora__gguf_get_bool(qlora__env* env, const qlora__gguf* g,
                                                       const char* key, bool fallback, bool* out) {
    const qlora__gguf_value* v = qlora__gguf_find(g, key);
    if (v != NULL && v->kind != QLORA__GGUF_BOOL) {
        return qlora__gguf_wrong(env, g, key, v, "BOOL");
    }
    *out = v != NULL ? v->data[0] != 0 : fallback;
    return QLORA_OK;
}

// A string, which is not terminated. If it is absent, *out is NULL, or an error if it is needed.
static QLORA__UNUSED qlora_result qlora__gguf_get_string(qlora__env* env, const qlora__gguf* g,
                                                         const char* key, bool need,
                                                         const char** out, size_t* size) {
    const qlora__gguf_value* v = qlora__gguf_find(g, key);
    *out = NULL;
    *size = 0;
    if (v == NULL && !need) {
        return QLORA_OK;
    }
    if (v == NULL || v->kind != QLORA__GGUF_STRING) {
        return qlora__gguf_wrong(env, g, key, v, "STRING");
    }
    *out = (const char*)v->data;
    *size = (size_t)v->bytes;
    return QLORA_OK;
}

// An array of `element`; if it is absent, *out is NULL, or an error if it is needed.
static QLORA__UNUSED qlora_result qlora__gguf_get_array(qlora__env* env, const qlora__gguf* g,
                                                        const char* key, qlora__gguf_kind element,
                                                        bool need, const qlora__gguf_value** out) {
    char wanted[32];
    const qlora__gguf_value* v = qlora__gguf_find(g, key);
    *out = v;
    if (v == NULL && !need) {
        return QLORA_OK;
    }
    if (v == NULL || v->kind != QLORA__GGUF_ARRAY || v->element != element) {
        snprintf(wanted, sizeof wanted, "ARRAY of %s", qlora__gguf_kind_name(element));
        return qlora__gguf_wrong(env, g, key, v, wanted);
    }
    return QLORA_OK;
}

// Goes through the strings of an array: start with *at = 0 and call it once per element. The array
// has been checked when the file was read.
static QLORA__UNUSED const char* qlora__gguf_next_string(const qlora__gguf_value* v, uint64_t* at,
                                                         size_t* size) {
    uint64_t n = qlora__gguf_bits(v->data + *at, 8);
    const uint8_t* text = v->data + *at + 8;
    *at += 8 + n;
    *size = (size_t)n;
    return (const char*)text;
}

static QLORA__UNUSED bool qlora__gguf_is(const char* text, size_t size, const char* word) {
    return text != NULL && strlen(word) == size && memcmp(text, word, size) == 0;
}

#endif // QLORA__PART_GGUF_READ
