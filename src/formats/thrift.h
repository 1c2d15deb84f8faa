// ---- Thrift, compact protocol: reading ----------------------------------------------------------

// Types of fields and elements.
enum {
    QLORA__THRIFT_STOP = 0,
    QLORA__THRIFT_TRUE = 1,
    QLORA__THRIFT_FALSE = 2,
    QLORA__THRIFT_BYTE = 3,
    QLORA__THRIFT_I16 = 4,
    QLORA__THRIFT_I32 = 5,
    QLORA__THRIFT_I64 = 6,
    QLORA__THRIFT_DOUBLE = 7,
    QLORA__THRIFT_BINARY = 8,
    QLORA__THRIFT_LIST = 9,
    QLORA__THRIFT_SET = 10,
    QLORA__THRIFT_MAP = 11,
    QLORA__THRIFT_STRUCT = 12
};

#define QLORA__THRIFT_MAX_DEPTH 32

// Reads forwards. What does not fit sets `bad` and gives zeros, so that a caller can check once.
typedef struct qlora__thrift {
    const uint8_t* at;
    const uint8_t* end;
    bool bad;
} qlora__thrift;

// A field of a struct. Its value follows and must be read or skipped.
typedef struct qlora__thrift_field {
    int64_t id; // 0 before the first one
    int type;
} qlora__thrift_field;

static size_t qlora__thrift_left(const qlora__thrift* t) {
    return t->bad ? 0 : (size_t)(t->end - t->at);
}

static uint8_t qlora__thrift_byte(qlora__thrift* t) {
    if (qlora__thrift_left(t) == 0) {
        t->bad = true;
        return 0;
    }
    return *t->at++;
}

static uint64_t qlora__thrift_varint(qlora__thrift* t) {
    uint64_t value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
        uint8_t byte = qlora__thrift_byte(t);
        value |= (uint64_t)(byte & 127) << shift;
        if (byte < 128) {
            return value;
        }
    }
    t->bad = true;
    return 0;
}

static int64_t qlora__zigzag(uint64_t value) {
    return (int64_t)(value >> 1 ^ (0 - (value & 1)));
}

static int64_t qlora__thrift_int(qlora__thrift* t) {
    return qlora__zigzag(qlora__thrift_varint(t));
}

// Bytes that stay where they are.
static const uint8_t* qlora__thrift_binary(qlora__thrift* t, size_t* size) {
    uint64_t length = qlora__thrift_varint(t);
    if (length > qlora__thrift_left(t)) {
        t->bad = true;
    }
    *size = t->bad ? 0 : (size_t)length;
    const uint8_t* data = t->at;
    t->at += *size;
    return data;
}

// The next field of a struct; false at its end, and where the data are not valid.
static bool qlora__thrift_next(qlora__thrift* t, qlora__thrift_field* field) {
    uint8_t header = qlora__thrift_byte(t);
    if (t->bad || header == QLORA__THRIFT_STOP) {
        return false;
    }
    field->type = header & 15;
    field->id = header >> 4 != 0 ? field->id + (header >> 4) : qlora__thrift_int(t);
    t->bad = t->bad || field->type == 0 || field->type > QLORA__THRIFT_STRUCT || field->id < 0 ||
             field->id > 32767;
    return !t->bad;
}

// The header of a list or a set. Every element takes at least one byte.
static uint64_t qlora__thrift_list(qlora__thrift* t, int* type) {
    uint8_t header = qlora__thrift_byte(t);
    uint64_t count = header >> 4 == 15 ? qlora__thrift_varint(t) : header >> 4;
    *type = header & 15;
    if (count > qlora__thrift_left(t) || (count > 0 && (*type == 0 || *type > 12))) {
        t->bad = true;
        return 0;
    }
    return count;
}

// A container whose values are being skipped.
typedef struct qlora__thrift_open {
    uint64_t left; // values; UINT64_MAX: a struct
    int type;
    int other; // of every second value: a map
} qlora__thrift_open;

// Enters a list, a set, a map or a struct.
static void qlora__thrift_enter(qlora__thrift* t, int type, qlora__thrift_open* into) {
    into->left = UINT64_MAX;
    into->type = 0;
    into->other = 0;
    if (type == QLORA__THRIFT_MAP) {
        uint64_t count = qlora__thrift_varint(t);
        uint8_t types = count > 0 ? qlora__thrift_byte(t) : 0x33;
        into->type = types >> 4;
        into->other = types & 15;
        t->bad = t->bad || count > qlora__thrift_left(t) || into->type > QLORA__THRIFT_STRUCT ||
                 into->other > QLORA__THRIFT_STRUCT || into->type == 0 || into->other == 0;
        into->left = t->bad ? 0 : 2 * count;
    } else if (type != QLORA__THRIFT_STRUCT) {
        into->left = qlora__thrift_list(t, &into->type);
        into->other = into->type;
    }
}

// Skips a value that contains no others. In a container, a truth value is a byte; as a field, its
// type says all.
static void qlora__thrift_pass(qlora__thrift* t, int type, bool element) {
    size_t size = 0;
    if (type == QLORA__THRIFT_BINARY) {
        qlora__thrift_binary(t, &size);
    } else if (type == QLORA__THRIFT_DOUBLE) {
        size = qlora__thrift_left(t) < 8 ? 0 : 8;
        t->bad = t->bad || size == 0;
        t->at += size;
    } else if (type == QLORA__THRIFT_BYTE || (type <= QLORA__THRIFT_FALSE && element)) {
        qlora__thrift_byte(t);
    } else if (type > QLORA__THRIFT_FALSE) {
        qlora__thrift_varint(t);
    }
}

// Skips a value with everything inside it.
static void qlora__thrift_skip(qlora__thrift* t, int type) {
    qlora__thrift_open stack[QLORA__THRIFT_MAX_DEPTH];
    int depth = 0;
    bool element = false;
    for (;;) {
        if (type < QLORA__THRIFT_LIST) {
            qlora__thrift_pass(t, type, element);
        } else if (depth < QLORA__THRIFT_MAX_DEPTH) {
            qlora__thrift_enter(t, type, &stack[depth++]);
        } else {
            t->bad = true;
        }
        // the next value of the innermost container that has one
        qlora__thrift_field field = {0, 0};
        while (depth > 0 && (stack[depth - 1].left == 0 || (stack[depth - 1].left == UINT64_MAX &&
                                                            !qlora__thrift_next(t, &field)))) {
            depth--;
        }
        if (t->bad || depth == 0) {
            return;
        }
        qlora__thrift_open* top = &stack[depth - 1];
        element = top->left != UINT64_MAX;
        if (element) {
            top->left--;
        }
        type = !element ? field.type : top->left % 2 == 1 ? top->type : top->other;
    }
}
