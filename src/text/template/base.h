// A template engine for chat templates: Jinja as jinja2 3.1 executes it with the settings of
// transformers. Compiling and rendering each have an arena; all values of a rendering live in its
// arena and are freed together. Every function that can descend (expressions, statements, values in
// values) does so through a pointer of the machine and counts its depth, so that no template can
// exhaust the stack.

enum {
    QLORA__JIN_MAX_DEPTH = 1600,    // expressions, statements and values inside each other
    QLORA__JIN_MAX_NESTING = 160,   // of one template's source
    QLORA__JIN_MAX_RANGE = 100000,  // as in jinja2's sandbox
    QLORA__JIN_MAX_STEPS = 3000000, // and two more for each byte of the conversation
    QLORA__JIN_CHUNK = 65536
};
// Python prints the address of a generator. Here it has this one, which must not be printed.
#define QLORA__JIN_ADDRESS "7fa90badc0de"
#define QLORA__JIN_MAX_MEMORY ((size_t)96 << 20) // and 64 more for each byte of the conversation

// ---- memory -------------------------------------------------------------------------------------

typedef struct qlora__jin_chunk {
    struct qlora__jin_chunk* next;
    size_t size; // of the whole block
    size_t used;
} qlora__jin_chunk;

typedef struct qlora__jin_arena {
    qlora__env* env;
    qlora__jin_chunk* first;
    size_t total;
    size_t limit;
} qlora__jin_arena;

static void qlora__jin_arena_free(qlora__jin_arena* arena) {
    while (arena->first != NULL) {
        qlora__jin_chunk* next = arena->first->next;
        qlora__env_free(arena->env, arena->first, arena->first->size);
        arena->first = next;
    }
    arena->total = 0;
}

// Forgets everything but keeps one chunk of the usual size, so that many renderings cost no
// allocation each.
static void qlora__jin_arena_reset(qlora__jin_arena* arena) {
    qlora__jin_chunk* kept = NULL;
    qlora__jin_chunk* chunk = arena->first;
    while (chunk != NULL) {
        qlora__jin_chunk* next = chunk->next;
        if (kept == NULL && chunk->size == QLORA__JIN_CHUNK) {
            kept = chunk;
        } else {
            qlora__env_free(arena->env, chunk, chunk->size);
        }
        chunk = next;
    }
    if (kept != NULL) {
        kept->next = NULL;
        kept->used = sizeof(qlora__jin_chunk);
    }
    arena->first = kept;
    arena->total = kept != NULL ? kept->size : 0;
}

static qlora_result qlora__jin_exhausted(const qlora__jin_arena* arena) {
    (void)qlora__env_fail(arena->env, QLORA_ERR_FORMAT,
                          "the template needs more than %llu MiB of memory",
                          (unsigned long long)(arena->limit >> 20));
    return QLORA_ERR_FORMAT; // a constant, so that compilers know it from success
}

static qlora_result qlora__jin_alloc(qlora__jin_arena* arena, size_t size, void** out) {
    if (size > arena->limit) { // also keeps the sums below from wrapping
        return qlora__jin_exhausted(arena);
    }
    size = (size + 15) & ~(size_t)15;
    qlora__jin_chunk* chunk = arena->first;
    if (chunk == NULL || chunk->size - chunk->used < size) {
        size_t head = (sizeof(qlora__jin_chunk) + 15) & ~(size_t)15;
        size_t wanted = head + size > QLORA__JIN_CHUNK ? head + size : (size_t)QLORA__JIN_CHUNK;
        if (wanted > arena->limit - (arena->total < arena->limit ? arena->total : arena->limit)) {
            return qlora__jin_exhausted(arena);
        }
        chunk = (qlora__jin_chunk*)qlora__env_alloc(arena->env, wanted);
        if (chunk == NULL) {
            return QLORA_ERR_MEMORY;
        }
        chunk->size = wanted;
        chunk->used = head;
        arena->total += wanted;
        // a large block is full at once: the one before it stays in use
        bool behind = arena->first != NULL && wanted > QLORA__JIN_CHUNK;
        chunk->next = behind ? arena->first->next : arena->first;
        if (behind) {
            arena->first->next = chunk;
        } else {
            arena->first = chunk;
        }
    }
    *out = (char*)chunk + chunk->used;
    chunk->used += size;
    return QLORA_OK;
}

// ---- values -------------------------------------------------------------------------------------

typedef enum qlora__jin_kind {
    QLORA__JIN_MISSING, // no value at all: an argument that was not given, a variable not yet set
    QLORA__JIN_UNDEFINED,
    QLORA__JIN_NONE,
    QLORA__JIN_BOOL,
    QLORA__JIN_INT,
    QLORA__JIN_BIG, // an integer of the data that does not fit 64 bits: its digits, for printing
    QLORA__JIN_FLOAT,
    QLORA__JIN_STRING,
    QLORA__JIN_LIST,
    QLORA__JIN_TUPLE,
    QLORA__JIN_DICT,
    QLORA__JIN_VIEW, // keys(), values() or items() of a dictionary; a set is keys of its own
    QLORA__JIN_RANGE,
    QLORA__JIN_ITER, // a generator or iterator, used up once
    QLORA__JIN_NAMESPACE,
    QLORA__JIN_MACRO,
    QLORA__JIN_METHOD, // of a value, not yet called
    QLORA__JIN_FUNCTION,
    QLORA__JIN_LOOP,
    QLORA__JIN_CYCLER,
    QLORA__JIN_JOINER,
    QLORA__JIN_KINDS
} qlora__jin_kind;

static const char* const qlora__jin_kind_names[QLORA__JIN_KINDS] = {
    "missing",   "Undefined", "NoneType", "bool",     "int",       "int",    "float",
    "str",       "list",      "tuple",    "dict",     "dict view", "range",  "generator",
    "namespace", "macro",     "method",   "function", "loop",      "cycler", "joiner"};

struct qlora__jin_node;
struct qlora__jin_machine;
struct qlora__jin_iter;
struct qlora__jin_record;

typedef struct qlora__jin_string {
    const char* data; // UTF-8, not terminated
    size_t bytes;
    size_t chars; // code points
} qlora__jin_string;

typedef struct qlora__jin_value {
    qlora__jin_kind kind;
    int32_t flag; // string: is Markup; view: 0 keys, 1 values, 2 items, 3 set; function: which one
    union {
        bool truth;
        int64_t integer;
        double real;
        const qlora__jin_string* string;
        struct qlora__jin_list* list; // also a tuple
        struct qlora__jin_dict* dict; // also a namespace, and what a view shows
        struct qlora__jin_range* range;
        struct qlora__jin_iter* iter;
        struct qlora__jin_macro* macro;
        struct qlora__jin_method* method;
        struct qlora__jin_loop* loop;
        struct qlora__jin_cycler* cycler; // also a joiner
        struct qlora__jin_hint* hint;     // of an undefined value; may be NULL
    } as;
} qlora__jin_value;

typedef struct qlora__jin_list {
    qlora__jin_value* items;
    size_t count;
    size_t capacity;
} qlora__jin_list;

typedef struct qlora__jin_dict {
    qlora__jin_value* keys;
    qlora__jin_value* values;
    size_t count;
    size_t capacity;
} qlora__jin_dict;

typedef struct qlora__jin_range {
    int64_t start;
    int64_t stop;
    int64_t step;
    int64_t count;
} qlora__jin_range;

typedef struct qlora__jin_hint {
    const char* owner; // type of the object that lacks it, or NULL
    const char* name;
    size_t size;
    bool unsafe;
} qlora__jin_hint;

typedef struct qlora__jin_macro {
    const struct qlora__jin_node* node;
    struct qlora__jin_record* outer; // the variables it can see
} qlora__jin_macro;

typedef struct qlora__jin_cycler {
    qlora__jin_value items; // a joiner has one item, the separator
    size_t at;
} qlora__jin_cycler;

// What a call passes. Keyword arguments follow the positional ones; names[i] belongs to item
// positional + i.
typedef struct qlora__jin_args {
    qlora__jin_value* items;
    size_t positional;
    size_t named;
    const qlora__jin_string** names;
} qlora__jin_args;

// The variables of one activation of a function: the template, a macro or a call block.
typedef struct qlora__jin_record {
    struct qlora__jin_record* outer;
    qlora__jin_value* slots;
} qlora__jin_record;

typedef struct qlora__jin_buffer {
    char* data;
    size_t count;
    size_t capacity;
} qlora__jin_buffer;

typedef struct qlora__jin_machine qlora__jin_machine;
typedef qlora_result (*qlora__jin_filter_fn)(qlora__jin_machine* m, qlora__jin_value* in,
                                             qlora__jin_value* out);

// Where a part needs one that comes later: set once, when the machine is made.
typedef struct qlora__jin_hooks {
    qlora_result (*eval)(qlora__jin_machine* m, const struct qlora__jin_node* node,
                         qlora__jin_value* out);
    qlora_result (*run)(qlora__jin_machine* m, const struct qlora__jin_node* first);
    qlora_result (*call)(qlora__jin_machine* m, qlora__jin_value callee,
                         const qlora__jin_args* args, qlora__jin_value* out);
    // `name` as given to map, select, ...; args has the arguments after the value
    qlora_result (*filter)(qlora__jin_machine* m, const char* name, size_t size,
                           qlora__jin_value value, const qlora__jin_args* args,
                           qlora__jin_value* out);
    qlora_result (*test)(qlora__jin_machine* m, const char* name, size_t size,
                         qlora__jin_value value, const qlora__jin_args* args, bool* out);
    // whether values of this kind have a method, and whether the sandbox forbids it
    bool (*method)(qlora__jin_value self, const char* name, size_t size, bool* unsafe,
                   const void** found);
    // an attribute that is not a method: of loops, macros and the like
    qlora_result (*field)(qlora__jin_machine* m, qlora__jin_value v, const char* name, size_t size,
                          qlora__jin_value* out, bool* found);
    qlora_result (*call_method)(qlora__jin_machine* m, qlora__jin_value self, const void* method,
                                const qlora__jin_args* args, qlora__jin_value* out);
    qlora_result (*next)(qlora__jin_machine* m, struct qlora__jin_iter* iter, qlora__jin_value* out,
                         bool* more);
    qlora_result (*repr)(qlora__jin_machine* m, qlora__jin_value value, qlora__jin_buffer* out);
    qlora_result (*equal)(qlora__jin_machine* m, qlora__jin_value a, qlora__jin_value b, bool* out);
    qlora_result (*less)(qlora__jin_machine* m, qlora__jin_value a, qlora__jin_value b,
                         bool or_equal, bool* out);
    // whether all of one view is in another
    qlora_result (*within)(qlora__jin_machine* m, qlora__jin_value a, qlora__jin_value b,
                           bool* out);
} qlora__jin_hooks;

typedef struct qlora__jin_span {
    size_t begin; // in bytes of the output
    size_t end;
} qlora__jin_span;

// One rendering.
struct qlora__jin_machine {
    qlora__env* env;
    const qlora__jin_hooks* hooks;
    qlora__jin_arena arena;
    const char* name; // of the template
    uint32_t line;    // of what is executed, for messages
    uint32_t depth;
    uint64_t steps;
    uint64_t step_limit;
    int64_t clock; // seconds of local time since 1970, for strftime_now
    qlora__jin_dict* globals;
    qlora__jin_record* record;
    qlora__jin_buffer* out; // what output goes to
    qlora__jin_buffer* top; // what the whole template writes
    int jump;               // a break or continue on its way to its loop
    bool folding;           // computing a constant before the template runs, as jinja2 does
    bool addresses;         // a string with the address of an object was made
    qlora__jin_span* spans; // of generation blocks
    size_t span_count;
    size_t span_capacity;
};

enum { QLORA__JIN_NO_JUMP, QLORA__JIN_BREAK, QLORA__JIN_CONTINUE };

// ---- errors and limits --------------------------------------------------------------------------

QLORA__PRINTF(2, 3)
static qlora_result qlora__jin_fail(qlora__jin_machine* m, const char* format, ...) {
    char text[QLORA__ERROR_SIZE];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return qlora__env_fail(m->env, QLORA_ERR_FORMAT, "%s, line %lu: %s", m->name,
                           (unsigned long)m->line, text);
}

// Counts work, so that a template that does not end is stopped.
static qlora_result qlora__jin_work(qlora__jin_machine* m, uint64_t steps) {
    m->steps += steps;
    return m->steps <= m->step_limit ? QLORA_OK
                                     : qlora__jin_fail(m, "the template takes more than %llu steps",
                                                       (unsigned long long)m->step_limit);
}

static qlora_result qlora__jin_enter(qlora__jin_machine* m) {
    if (m->depth >= QLORA__JIN_MAX_DEPTH) {
        return qlora__jin_fail(m, "nested deeper than %d levels (a macro that calls itself?)",
                               (int)QLORA__JIN_MAX_DEPTH);
    }
    m->depth++;
    return qlora__jin_work(m, 1);
}

static qlora_result qlora__jin_get(qlora__jin_machine* m, size_t size, void** out) {
    qlora_result r = qlora__jin_alloc(&m->arena, size, out);
    if (r == QLORA_ERR_FORMAT) {
        (void)qlora__env_wrap(m->env, r, "%s, line %lu: ", m->name, (unsigned long)m->line);
    }
    return r;
}

// An array of values; SIZE_MAX / 64 of them can never be had.
static qlora_result qlora__jin_get_values(qlora__jin_machine* m, size_t count,
                                          qlora__jin_value** out) {
    void* data = NULL;
    size_t limit = SIZE_MAX / 64;
    QLORA__TRY(
        qlora__jin_get(m, (count < limit ? count : limit) * sizeof(qlora__jin_value), &data));
    *out = (qlora__jin_value*)data;
    return QLORA_OK;
}

// ---- making values ------------------------------------------------------------------------------

static qlora__jin_value qlora__jin_of(qlora__jin_kind kind) {
    qlora__jin_value value;
    memset(&value, 0, sizeof value);
    value.kind = kind;
    return value;
}

static qlora__jin_value qlora__jin_none(void) {
    return qlora__jin_of(QLORA__JIN_NONE);
}

static qlora__jin_value qlora__jin_bool(bool truth) {
    qlora__jin_value value = qlora__jin_of(QLORA__JIN_BOOL);
    value.as.truth = truth;
    return value;
}

static qlora__jin_value qlora__jin_int(int64_t integer) {
    qlora__jin_value value = qlora__jin_of(QLORA__JIN_INT);
    value.as.integer = integer;
    return value;
}

static qlora__jin_value qlora__jin_float(double real) {
    qlora__jin_value value = qlora__jin_of(QLORA__JIN_FLOAT);
    value.as.real = real;
    return value;
}

static size_t qlora__jin_count_chars(const char* data, size_t bytes) {
    size_t chars = 0;
    for (size_t i = 0; i < bytes; i++) {
        chars += ((unsigned char)data[i] & 0xC0) != 0x80 ? 1 : 0;
    }
    return chars;
}

// A string that shares the bytes, which must stay where they are.
static qlora_result qlora__jin_string_share(qlora__jin_machine* m, const char* data, size_t bytes,
                                            qlora__jin_value* out) {
    void* memory = NULL;
    QLORA__TRY(qlora__jin_work(m, bytes / 64));
    QLORA__TRY(qlora__jin_get(m, sizeof(qlora__jin_string), &memory));
    qlora__jin_string* string = (qlora__jin_string*)memory;
    string->data = data != NULL ? data : ""; // so that offsets are always those of an object
    string->bytes = bytes;
    string->chars = qlora__jin_count_chars(data, bytes);
    *out = qlora__jin_of(QLORA__JIN_STRING);
    out->as.string = string;
    return QLORA_OK;
}

static qlora_result qlora__jin_string_of(qlora__jin_machine* m, const char* text,
                                         qlora__jin_value* out) {
    return qlora__jin_string_share(m, text, strlen(text), out);
}

static qlora_result qlora__jin_buffer_room(qlora__jin_machine* m, qlora__jin_buffer* buffer,
                                           size_t extra) {
    if (extra <= buffer->capacity - buffer->count) {
        return QLORA_OK;
    }
    size_t wanted = buffer->count + extra < extra ? SIZE_MAX / 2 : buffer->count + extra;
    size_t grown = buffer->capacity < 64 ? 64 : buffer->capacity * 2;
    grown = grown < wanted ? wanted : grown;
    void* moved = NULL;
    QLORA__TRY(qlora__jin_get(m, grown, &moved));
    if (buffer->count > 0) {
        memcpy(moved, buffer->data, buffer->count);
    }
    buffer->data = (char*)moved;
    buffer->capacity = grown;
    return QLORA_OK;
}

static qlora_result qlora__jin_put(qlora__jin_machine* m, qlora__jin_buffer* buffer,
                                   const char* data, size_t size) {
    if (size > 0) {
        QLORA__TRY(qlora__jin_work(m, size / 64));
        QLORA__TRY(qlora__jin_buffer_room(m, buffer, size));
        memcpy(buffer->data + buffer->count, data, size);
        buffer->count += size;
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_puts(qlora__jin_machine* m, qlora__jin_buffer* buffer,
                                    const char* text) {
    return qlora__jin_put(m, buffer, text, strlen(text));
}

static qlora_result qlora__jin_put_code(qlora__jin_machine* m, qlora__jin_buffer* buffer,
                                        uint32_t code) {
    char bytes[4];
    size_t size = qlora__text_utf8_put(code, bytes);
    return qlora__jin_put(m, buffer, bytes, size);
}

static qlora_result qlora__jin_buffer_string(qlora__jin_machine* m, const qlora__jin_buffer* buffer,
                                             qlora__jin_value* out) {
    return qlora__jin_string_share(m, buffer->data, buffer->count, out);
}

static qlora_result qlora__jin_list_make(qlora__jin_machine* m, qlora__jin_kind kind, size_t room,
                                         qlora__jin_value* out) {
    void* memory = NULL;
    QLORA__TRY(qlora__jin_get(m, sizeof(qlora__jin_list), &memory));
    qlora__jin_list* list = (qlora__jin_list*)memory;
    list->count = 0;
    list->capacity = room;
    QLORA__TRY(qlora__jin_get_values(m, room, &list->items));
    *out = qlora__jin_of(kind);
    out->as.list = list;
    return QLORA_OK;
}

static qlora_result qlora__jin_list_add(qlora__jin_machine* m, qlora__jin_list* list,
                                        qlora__jin_value value) {
    QLORA__TRY(qlora__jin_work(m, 1));
    if (list->count == list->capacity) {
        qlora__jin_value* moved = NULL;
        size_t grown = list->capacity < 8 ? 8 : list->capacity * 2;
        QLORA__TRY(qlora__jin_get_values(m, grown, &moved));
        if (list->count > 0) {
            memcpy(moved, list->items, list->count * sizeof *moved);
        }
        list->items = moved;
        list->capacity = grown;
    }
    list->items[list->count++] = value;
    return QLORA_OK;
}

static qlora_result qlora__jin_pair_make(qlora__jin_machine* m, qlora__jin_value first,
                                         qlora__jin_value second, qlora__jin_value* out) {
    QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_TUPLE, 2, out));
    out->as.list->items[0] = first;
    out->as.list->items[1] = second;
    out->as.list->count = 2;
    return QLORA_OK;
}

static qlora_result qlora__jin_dict_make(qlora__jin_machine* m, qlora__jin_kind kind, size_t room,
                                         qlora__jin_value* out) {
    void* memory = NULL;
    QLORA__TRY(qlora__jin_get(m, sizeof(qlora__jin_dict), &memory));
    qlora__jin_dict* dict = (qlora__jin_dict*)memory;
    dict->count = 0;
    dict->capacity = room;
    QLORA__TRY(qlora__jin_get_values(m, room, &dict->keys));
    QLORA__TRY(qlora__jin_get_values(m, room, &dict->values));
    *out = qlora__jin_of(kind);
    out->as.dict = dict;
    return QLORA_OK;
}

// Adds a key that is not there yet.
static qlora_result qlora__jin_dict_add(qlora__jin_machine* m, qlora__jin_dict* dict,
                                        qlora__jin_value key, qlora__jin_value value) {
    QLORA__TRY(qlora__jin_work(m, 1));
    if (dict->count == dict->capacity) {
        qlora__jin_value* keys = NULL;
        qlora__jin_value* values = NULL;
        size_t grown = dict->capacity < 4 ? 4 : dict->capacity * 2;
        QLORA__TRY(qlora__jin_get_values(m, grown, &keys));
        QLORA__TRY(qlora__jin_get_values(m, grown, &values));
        if (dict->count > 0) {
            memcpy(keys, dict->keys, dict->count * sizeof *keys);
            memcpy(values, dict->values, dict->count * sizeof *values);
        }
        dict->keys = keys;
        dict->values = values;
        dict->capacity = grown;
    }
    dict->keys[dict->count] = key;
    dict->values[dict->count++] = value;
    return QLORA_OK;
}

static bool qlora__jin_is(qlora__jin_value value, const char* text, size_t size) {
    return value.kind == QLORA__JIN_STRING && value.as.string->bytes == size &&
           memcmp(value.as.string->data, text, size) == 0;
}

// The place of a key that is a string, or the count.
static size_t qlora__jin_dict_at(const qlora__jin_dict* dict, const char* key, size_t size) {
    size_t i = 0;
    while (i < dict->count && !qlora__jin_is(dict->keys[i], key, size)) {
        i++;
    }
    return i;
}

static qlora_result qlora__jin_dict_put(qlora__jin_machine* m, qlora__jin_dict* dict,
                                        const char* key, qlora__jin_value value) {
    size_t at = qlora__jin_dict_at(dict, key, strlen(key));
    QLORA__TRY(qlora__jin_work(m, dict->count / 8));
    if (at < dict->count) {
        dict->values[at] = value;
        return QLORA_OK;
    }
    qlora__jin_value name;
    QLORA__TRY(qlora__jin_string_of(m, key, &name));
    return qlora__jin_dict_add(m, dict, name, value);
}

static qlora_result qlora__jin_undefined(qlora__jin_machine* m, const char* owner, const char* name,
                                         size_t size, bool unsafe, qlora__jin_value* out) {
    void* memory = NULL;
    QLORA__TRY(qlora__jin_get(m, sizeof(qlora__jin_hint), &memory));
    qlora__jin_hint* hint = (qlora__jin_hint*)memory;
    hint->owner = owner;
    hint->name = name;
    hint->size = size;
    hint->unsafe = unsafe;
    *out = qlora__jin_of(QLORA__JIN_UNDEFINED);
    out->as.hint = hint;
    return QLORA_OK;
}

static qlora_result qlora__jin_undefined_error(qlora__jin_machine* m, qlora__jin_value value) {
    const qlora__jin_hint* hint = value.as.hint;
    int size = hint != NULL ? (int)(hint->size < 80 ? hint->size : 80) : 0;
    if (hint == NULL) {
        return qlora__jin_fail(m, "an undefined value is used");
    }
    if (hint->unsafe) {
        return qlora__jin_fail(m, "the sandbox does not allow \"%.*s\" of a %s", size, hint->name,
                               hint->owner);
    }
    if (hint->owner != NULL) {
        return qlora__jin_fail(m, "a %s has no attribute or element \"%.*s\"", hint->owner, size,
                               hint->name);
    }
    return qlora__jin_fail(m, "\"%.*s\" is undefined", size, hint->name);
}

static const char* qlora__jin_type(qlora__jin_value value) {
    return value.kind == QLORA__JIN_VIEW && value.flag == 3 ? "set"
                                                            : qlora__jin_kind_names[value.kind];
}
