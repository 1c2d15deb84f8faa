// ---- Parquet: footer and schema -----------------------------------------------------------------

// A file is columns; a row is put together from them as one JSON object. What is held in memory is
// one page and one dictionary per column that is read, never a row group.

#define QLORA__PARQUET_MAX_ELEMENTS 10000u          // of a schema
#define QLORA__PARQUET_MAX_DEPTH 60                 // of lists and structs
#define QLORA__PARQUET_MAX_PAGE ((uint64_t)1 << 30) // bytes of a page, decompressed
#define QLORA__PARQUET_MAX_HELD ((uint64_t)4 << 30) // bytes of all pages and dictionaries held
#define QLORA__PARQUET_MAX_ROW ((uint64_t)1 << 28)  // bytes of the JSON of one row
#define QLORA__PARQUET_MAX_TEXT ((uint64_t)4 << 30) // bytes of the JSON of a small file
#define QLORA__PARQUET_MAX_GROWTH 1024u             // more of it, per byte of the file

// Physical types, by their number. X(name, bytes); 0 = its size varies.
#define QLORA__PARQUET_TYPES(X)                                                                    \
    X(BOOLEAN, 0)                                                                                  \
    X(INT32, 4)                                                                                    \
    X(INT64, 8)                                                                                    \
    X(INT96, 12)                                                                                   \
    X(FLOAT, 4)                                                                                    \
    X(DOUBLE, 8)                                                                                   \
    X(BYTE_ARRAY, 0)                                                                               \
    X(FIXED, 0)

#define QLORA__PARQUET_ENUM(name, bytes) QLORA__PARQUET_##name,
typedef enum qlora__parquet_type {
    QLORA__PARQUET_TYPES(QLORA__PARQUET_ENUM) QLORA__PARQUET_TYPE_COUNT
} qlora__parquet_type;
#undef QLORA__PARQUET_ENUM

// How a value is written as JSON.
typedef enum qlora__parquet_form {
    QLORA__PARQUET_AS_NONE, // it is not: `why` tells
    QLORA__PARQUET_AS_BOOL,
    QLORA__PARQUET_AS_INT,
    QLORA__PARQUET_AS_UINT,
    QLORA__PARQUET_AS_FLOAT,
    QLORA__PARQUET_AS_DOUBLE,
    QLORA__PARQUET_AS_HALF,
    QLORA__PARQUET_AS_STRING,
    QLORA__PARQUET_AS_NULL
} qlora__parquet_form;

typedef enum qlora__parquet_kind {
    QLORA__PARQUET_STRUCT,
    QLORA__PARQUET_LIST,
    QLORA__PARQUET_LEAF
} qlora__parquet_kind;

// A node of the tree of values, in depth-first order: a struct is followed by its fields, a list by
// its element. The group that Parquet puts between a list and its element has no node.
typedef struct qlora__parquet_node {
    const char* name; // points into the file, not terminated; elements have none
    uint32_t name_size;
    qlora__parquet_kind kind;
    uint32_t depth;
    uint32_t present; // definition level from which it is not null
    uint32_t filled;  // a list: from which it has an element
    uint32_t repeat;  // a list: repetition level of its further elements
    uint32_t end;     // the node after everything inside it
    uint32_t leaf;    // the first leaf inside it
    uint32_t leaf_end;
    const char* why; // it cannot be read because it is "...", or NULL
    bool skip;       // a column that is not read
} qlora__parquet_node;

// An element of the schema as the file has it.
typedef struct qlora__parquet_element {
    const char* name;
    uint32_t name_size;
    int64_t type; // -1: a group
    int64_t type_length;
    int64_t repetition; // 0 required, 1 optional, 2 repeated
    int64_t children;
    int64_t converted; // -1: none
    int64_t logical;   // field of the union, 0: none
    int64_t bits; // of an integer; 0: as many as its type has
    bool is_signed;
} qlora__parquet_element;

// What annotations mean, by the number of the converted type and of the logical type. A leaf that
// has an annotation that is not listed is refused. Types that Python keeps as objects of their own
// (dates, decimals) have no JSON that all readers agree on, and neither have maps.
static const struct {
    int8_t converted; // -1: none
    int8_t logical;   // 0: none
    const char* why;
} qlora__parquet_refused[] = {{1, 2, "a MAP"},        {2, 0, "a MAP"},        {5, 5, "a DECIMAL"},
                              {6, 6, "a DATE"},       {7, 7, "a TIME"},       {8, 7, "a TIME"},
                              {9, 8, "a TIMESTAMP"},  {10, 8, "a TIMESTAMP"}, {20, 13, "BSON"},
                              {21, 0, "an INTERVAL"}, {-1, 14, "a UUID"},     {-1, 16, "a VARIANT"},
                              {-1, 17, "a GEOMETRY"}, {-1, 18, "a GEOGRAPHY"}};

static void qlora__parquet_integer(qlora__thrift* t, qlora__parquet_element* e) {
    qlora__thrift_field field = {0, 0};
    while (qlora__thrift_next(t, &field)) {
        if (field.id == 1 && field.type == QLORA__THRIFT_BYTE) {
            e->bits = qlora__thrift_byte(t);
            continue;
        }
        if (field.id == 2) {
            e->is_signed = field.type == QLORA__THRIFT_TRUE;
        }
        qlora__thrift_skip(t, field.type);
    }
}

// The integer that a converted type means (UINT_8 to UINT_64, INT_8 to INT_64), unless a logical
// type, which is the newer annotation, says it.
static void qlora__parquet_converted(qlora__parquet_element* e) {
    if (e->logical == 0 && e->converted >= 11 && e->converted <= 18) {
        e->is_signed = e->converted >= 15;
        e->bits = 8 << (e->converted - 11) % 4;
    }
}

// The union of logical types: the field that is set.
static void qlora__parquet_logical(qlora__thrift* t, qlora__parquet_element* e) {
    qlora__thrift_field field = {0, 0};
    while (qlora__thrift_next(t, &field)) {
        e->logical = field.id;
        if (field.id == 10 && field.type == QLORA__THRIFT_STRUCT) {
            qlora__parquet_integer(t, e);
        } else {
            qlora__thrift_skip(t, field.type);
        }
    }
}

static void qlora__parquet_element_read(qlora__thrift* t, qlora__parquet_element* e) {
    memset(e, 0, sizeof *e);
    e->type = -1;
    e->converted = -1;
    e->is_signed = true;
    qlora__thrift_field field = {0, 0};
    size_t size = 0;
    while (qlora__thrift_next(t, &field)) {
        bool number = field.type == QLORA__THRIFT_I32;
        if (field.id == 1 && number) {
            e->type = qlora__thrift_int(t);
            t->bad = t->bad || e->type < 0;
        } else if (field.id == 2 && number) {
            e->type_length = qlora__thrift_int(t);
        } else if (field.id == 3 && number) {
            e->repetition = qlora__thrift_int(t);
        } else if (field.id == 4 && field.type == QLORA__THRIFT_BINARY) {
            e->name = (const char*)qlora__thrift_binary(t, &size);
            e->name_size = size < 65536 ? (uint32_t)size : 65536;
            t->bad = t->bad || size > 65535;
        } else if (field.id == 5 && number) {
            e->children = qlora__thrift_int(t);
        } else if (field.id == 6 && number) {
            e->converted = qlora__thrift_int(t);
        } else if (field.id == 10 && field.type == QLORA__THRIFT_STRUCT) {
            qlora__parquet_logical(t, e);
        } else {
            qlora__thrift_skip(t, field.type);
        }
    }
    qlora__parquet_converted(e);
    t->bad = t->bad || e->name == NULL || e->repetition < 0 || e->repetition > 2;
}

static const char* qlora__parquet_type_name(int64_t type) {
#define QLORA__PARQUET_NAME(name, bytes) #name,
    static const char* const names[] = {QLORA__PARQUET_TYPES(QLORA__PARQUET_NAME)};
#undef QLORA__PARQUET_NAME
    return type >= 0 && type < QLORA__PARQUET_TYPE_COUNT ? names[type] : "unknown";
}

// Bytes of a value in PLAIN; 0 if they vary.
static uint32_t qlora__parquet_width(int64_t type, int64_t type_length) {
#define QLORA__PARQUET_BYTES(name, bytes) bytes,
    static const uint8_t widths[] = {QLORA__PARQUET_TYPES(QLORA__PARQUET_BYTES)};
#undef QLORA__PARQUET_BYTES
    return type == QLORA__PARQUET_FIXED ? (uint32_t)type_length : widths[type];
}

static bool qlora__parquet_is_list(const qlora__parquet_element* e) {
    return e->type < 0 && (e->converted == 3 || e->logical == 3);
}

// Why an element cannot be read, or NULL.
static const char* qlora__parquet_why(const qlora__parquet_element* e) {
    for (size_t i = 0; i < sizeof qlora__parquet_refused / sizeof qlora__parquet_refused[0]; i++) {
        if ((e->converted >= 0 && e->converted == qlora__parquet_refused[i].converted) ||
            (e->logical > 0 && e->logical == qlora__parquet_refused[i].logical)) {
            return qlora__parquet_refused[i].why;
        }
    }
    return NULL;
}

// How a leaf becomes JSON; *why if it does not.
static qlora__parquet_form qlora__parquet_form_of(const qlora__parquet_element* e,
                                                  const char** why) {
    bool text = e->converted == 0 || e->converted == 4 || e->converted == 19 || e->logical == 1 ||
                e->logical == 4 || e->logical == 12; // UTF8, ENUM, JSON
    bool integer = e->type == QLORA__PARQUET_INT64
                       ? e->bits == 64
                       : e->bits == 8 || e->bits == 16 || e->bits == 32;
    bool plain = e->converted < 0 && e->logical == 0;
    *why = qlora__parquet_why(e);
    if (*why != NULL) {
        return QLORA__PARQUET_AS_NONE;
    }
    if (e->logical == 11) { // all values are null
        return QLORA__PARQUET_AS_NULL;
    }
    switch (e->type) {
    case QLORA__PARQUET_BOOLEAN:
        if (plain) {
            return QLORA__PARQUET_AS_BOOL;
        }
        break;
    case QLORA__PARQUET_INT32:
    case QLORA__PARQUET_INT64:
        if (plain || integer) {
            return e->is_signed ? QLORA__PARQUET_AS_INT : QLORA__PARQUET_AS_UINT;
        }
        break;
    case QLORA__PARQUET_FLOAT:
    case QLORA__PARQUET_DOUBLE:
        if (plain) {
            return e->type == QLORA__PARQUET_FLOAT ? QLORA__PARQUET_AS_FLOAT
                                                   : QLORA__PARQUET_AS_DOUBLE;
        }
        break;
    case QLORA__PARQUET_BYTE_ARRAY:
        if (text) {
            return QLORA__PARQUET_AS_STRING;
        }
        *why = plain ? "binary data, not a string" : "of an unknown type";
        return QLORA__PARQUET_AS_NONE;
    case QLORA__PARQUET_FIXED:
        if (e->logical == 15 && e->type_length == 2) {
            return QLORA__PARQUET_AS_HALF;
        }
        *why = "binary data, not a string";
        return QLORA__PARQUET_AS_NONE;
    default:
        *why = e->type == QLORA__PARQUET_INT96 ? "an INT96" : "of an unknown type";
        return QLORA__PARQUET_AS_NONE;
    }
    *why = "of an unknown type";
    return QLORA__PARQUET_AS_NONE;
}
