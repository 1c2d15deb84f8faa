enum {
    TEXT__J_NULL,
    TEXT__J_FALSE,
    TEXT__J_TRUE,
    TEXT__J_INTEGER,
    TEXT__J_REAL,
    TEXT__J_STRING,
    TEXT__J_ARRAY,
    TEXT__J_OBJECT
};

enum { TEXT__JSON_DEPTH = 256 };

// The values lie in one array in the order of the text: the first child of node i is i + 1, the
// next sibling of i is nodes[i].next. The children of an object are key, value, key, value, ...
typedef struct text__node {
    uint32_t type;
    uint32_t next;
    uint32_t at;     // strings: where in `strings`; all others: where in the source
    uint32_t size;   // strings: bytes; arrays: elements; objects: pairs
    int64_t integer; // arrays and objects: where they end in the source
} text__node;

typedef struct text__json {
    const char* name; // for messages
    const char* source;
    size_t size;
    size_t at;
    size_t line_offset; // lines before the source, for messages
    text__node* nodes;
    size_t count;
    size_t capacity;
    text_bytes strings;
} text__json;

static void text__json_free(text__json* json) {
    TEXT_FREE(json->nodes);
    text_bytes_free(&json->strings);
    json->nodes = NULL;
    json->count = 0;
    json->capacity = 0;
}

static size_t text__line_of(const char* text, size_t at) {
    size_t line = 1;
    const char* p = text;
    const char* end = text + at;
    while (p < end && (p = (const char*)memchr(p, '\n', (size_t)(end - p))) != NULL) {
        line++;
        p++;
    }
    return line;
}

static bool text__json_fail(const text__json* json, const char* what, text_error* error) {
    size_t start = json->at;
    while (start > 0 && json->source[start - 1] != '\n') {
        start--;
    }
    size_t line = json->line_offset + text__line_of(json->source, json->at);
    return text__fail(error, "%s:%lu:%lu: bad JSON: %s", json->name, (unsigned long)line,
                      (unsigned long)(json->at - start + 1), what);
}

static void text__json_space(text__json* json) {
    while (json->at < json->size) {
        char c = json->source[json->at];
        if (c != ' ' && c != '\n' && c != '\r' && c != '\t') {
            return;
        }
        json->at++;
    }
}

static bool text__json_node(text__json* json, uint32_t type, uint32_t* index, text_error* error) {
    if (json->count >= UINT32_MAX - 1) {
        return text__json_fail(json, "too many values", error);
    }
    void* data = json->nodes;
    bool good = text__reserve(&data, &json->capacity, json->count, 1, sizeof(text__node), error);
    json->nodes = (text__node*)data;
    TEXT__TRY(good);
    text__node* node = &json->nodes[json->count];
    memset(node, 0, sizeof(*node));
    node->type = type;
    node->at = (uint32_t)json->at;
    *index = (uint32_t)json->count;
    json->count++;
    node->next = (uint32_t)json->count;
    return true;
}

// Four hexadecimal digits at the position; -1 when they are not.
static int32_t text__json_hex4(const text__json* json, size_t at) {
    int32_t value = 0;
    if (json->size - at < 4) {
        return -1;
    }
    for (size_t i = 0; i < 4; i++) {
        char c = json->source[at + i];
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (digit < 0) {
            return -1;
        }
        value = value * 16 + digit;
    }
    return value;
}

// After the backslash. There is room for four bytes.
static bool text__json_escape(text__json* json, text_error* error) {
    static const char plain[] = "\"\\/bfnrt";
    static const char meaning[] = "\"\\/\b\f\n\r\t";
    text_bytes* out = &json->strings;
    char c = json->at < json->size ? json->source[json->at] : 0;
    const char* found = c == 0 ? NULL : strchr(plain, c);
    if (found != NULL) {
        out->data[out->count++] = meaning[found - plain];
        json->at++;
        return true;
    }
    int32_t code = c == 'u' ? text__json_hex4(json, json->at + 1) : -1;
    if (code < 0) {
        return text__json_fail(json, "unknown escape in a string", error);
    }
    json->at += 5;
    if (code >= 0xDC00 && code < 0xE000) {
        return text__json_fail(json, "half of a surrogate pair in a string", error);
    }
    if (code >= 0xD800 && code < 0xDC00) {
        int32_t low = -1;
        if (json->size - json->at >= 6 && json->source[json->at] == '\\' &&
            json->source[json->at + 1] == 'u') {
            low = text__json_hex4(json, json->at + 2);
        }
        if (low < 0xDC00 || low >= 0xE000) {
            return text__json_fail(json, "half of a surrogate pair in a string", error);
        }
        json->at += 6;
        code = 0x10000 + (code - 0xD800) * 0x400 + (low - 0xDC00);
    }
    out->count += text__utf8_put((uint32_t)code, out->data + out->count);
    return true;
}

// At the opening quote. Unescaped into `strings`, followed by a zero byte.
static bool text__json_string(text__json* json, text_error* error) {
    uint32_t index = 0;
    TEXT__TRY(text__json_node(json, TEXT__J_STRING, &index, error));
    text_bytes* out = &json->strings;
    json->nodes[index].at = (uint32_t)out->count;
    json->at++;
    for (;;) {
        if (json->at >= json->size) {
            return text__json_fail(json, "the string does not end", error);
        }
        // room for one character or escape and the zero byte
        TEXT__TRY(text__bytes_room(out, 8, error));
        unsigned char c = (unsigned char)json->source[json->at];
        if (c == '"') {
            break;
        }
        if (c == '\\') {
            json->at++;
            TEXT__TRY(text__json_escape(json, error));
        } else if (c < 0x20) {
            return text__json_fail(json, "control character in a string", error);
        } else if (c < 0x80) {
            out->data[out->count++] = (char)c;
            json->at++;
        } else {
            uint32_t code;
            const unsigned char* s = (const unsigned char*)json->source + json->at;
            size_t length = text__utf8(s, json->size - json->at, &code);
            if (length == 0) {
                return text__json_fail(json, "not UTF-8", error);
            }
            memcpy(out->data + out->count, s, length);
            out->count += length;
            json->at += length;
        }
    }
    json->at++;
    json->nodes[index].size = (uint32_t)(out->count - json->nodes[index].at);
    out->data[out->count++] = 0;
    return true;
}

static size_t text__json_digits(text__json* json) {
    size_t begin = json->at;
    while (json->at < json->size && json->source[json->at] >= '0' &&
           json->source[json->at] <= '9') {
        json->at++;
    }
    return json->at - begin;
}

static bool text__json_number(text__json* json, text_error* error) {
    uint32_t index = 0;
    TEXT__TRY(text__json_node(json, TEXT__J_INTEGER, &index, error));
    const char* s = json->source;
    bool negative = s[json->at] == '-';
    json->at += negative ? 1 : 0;
    size_t begin = json->at;
    size_t digits = text__json_digits(json);
    if (digits == 0 || (digits > 1 && s[begin] == '0')) {
        return text__json_fail(json, "bad number", error);
    }
    text__node* node = &json->nodes[index];
    for (size_t i = 0; i < digits; i++) {
        if (node->integer > (INT64_MAX - 9) / 10) {
            node->type = TEXT__J_REAL; // too large: nobody here needs it
            break;
        }
        node->integer = node->integer * 10 + (s[begin + i] - '0');
    }
    if (json->at < json->size && s[json->at] == '.') {
        node->type = TEXT__J_REAL;
        json->at++;
        if (text__json_digits(json) == 0) {
            return text__json_fail(json, "bad number", error);
        }
    }
    if (json->at < json->size && (s[json->at] == 'e' || s[json->at] == 'E')) {
        node->type = TEXT__J_REAL;
        json->at++;
        if (json->at < json->size && (s[json->at] == '+' || s[json->at] == '-')) {
            json->at++;
        }
        if (text__json_digits(json) == 0) {
            return text__json_fail(json, "bad number", error);
        }
    }
    if (negative) {
        node->integer = -node->integer;
    }
    return true;
}

static bool text__json_word(text__json* json, text_error* error) {
    static const struct {
        const char* word;
        uint32_t type;
    } words[] = {{"null", TEXT__J_NULL}, {"false", TEXT__J_FALSE}, {"true", TEXT__J_TRUE}};
    for (size_t i = 0; i < TEXT__COUNT(words); i++) {
        size_t length = strlen(words[i].word);
        if (json->size - json->at >= length &&
            memcmp(json->source + json->at, words[i].word, length) == 0) {
            uint32_t index;
            TEXT__TRY(text__json_node(json, words[i].type, &index, error));
            json->at += length;
            return true;
        }
    }
    return text__json_fail(
        json, json->at < json->size ? "a value was expected" : "it ends too early", error);
}

// A value that is not an array or object, or the start of one of those (*opened).
static bool text__json_value(text__json* json, bool* opened, text_error* error) {
    *opened = false;
    char c = json->at < json->size ? json->source[json->at] : 0;
    if (c == '{' || c == '[') {
        uint32_t index;
        TEXT__TRY(text__json_node(json, c == '{' ? TEXT__J_OBJECT : TEXT__J_ARRAY, &index, error));
        json->at++;
        *opened = true;
        return true;
    }
    if (c == '"') {
        return text__json_string(json, error);
    }
    if (c == '-' || (c >= '0' && c <= '9')) {
        return text__json_number(json, error);
    }
    return text__json_word(json, error);
}

static bool text__json_key(text__json* json, text_error* error) {
    text__json_space(json);
    if (json->at >= json->size || json->source[json->at] != '"') {
        return text__json_fail(json, "a name in quotes was expected", error);
    }
    TEXT__TRY(text__json_string(json, error));
    text__json_space(json);
    if (json->at >= json->size || json->source[json->at] != ':') {
        return text__json_fail(json, "':' was expected", error);
    }
    json->at++;
    return true;
}

// After a value: closes what ends here, and stands before the next value (*depth > 0) or after the
// outermost one.
static bool text__json_after(text__json* json, const uint32_t* stack, size_t* depth, bool fresh,
                             text_error* error) {
    while (*depth > 0) {
        text__node* top = &json->nodes[stack[*depth - 1]];
        bool object = top->type == TEXT__J_OBJECT;
        text__json_space(json);
        char c = json->at < json->size ? json->source[json->at] : 0;
        if (!fresh && top->size == UINT32_MAX) {
            return text__json_fail(json, "too many values", error);
        }
        top->size += fresh ? 0 : 1;
        if (c == (object ? '}' : ']')) {
            json->at++;
            top->next = (uint32_t)json->count;
            top->integer = (int64_t)json->at;
            (*depth)--;
            fresh = false;
            continue;
        }
        if (!fresh && c != ',') {
            return text__json_fail(
                json, object ? "',' or '}' was expected" : "',' or ']' was expected", error);
        }
        json->at += fresh ? 0 : 1;
        TEXT__TRY(!object || text__json_key(json, error));
        text__json_space(json);
        return true;
    }
    return true;
}

// One value from the current position; the position is after it then. The root is node 0.
static bool text__json_parse(text__json* json, text_error* error) {
    uint32_t stack[TEXT__JSON_DEPTH];
    size_t depth = 0;
    json->count = 0;
    json->strings.count = 0;
    if (json->size >= UINT32_MAX / 2) {
        return text__fail(error, "%s: one JSON value of 2 GiB or more", json->name);
    }
    text__json_space(json);
    do {
        bool opened;
        TEXT__TRY(text__json_value(json, &opened, error));
        if (opened) {
            if (depth == TEXT__JSON_DEPTH) {
                return text__json_fail(json, "nested too deep", error);
            }
            stack[depth++] = (uint32_t)(json->count - 1);
        }
        TEXT__TRY(text__json_after(json, stack, &depth, opened, error));
    } while (depth > 0);
    return true;
}

// A whole text that holds one value. A byte order mark in front is allowed.
static bool text__json_open(text__json* json, const char* name, const char* source, size_t size,
                            text_error* error) {
    memset(json, 0, sizeof(*json));
    json->name = name;
    json->source = source;
    json->size = size;
    if (size >= 3 && memcmp(source, "\xEF\xBB\xBF", 3) == 0) {
        json->at = 3;
    }
    TEXT__TRY(text__json_parse(json, error));
    text__json_space(json);
    return json->at == size || text__json_fail(json, "more text after the value", error);
}

// The value of a name in an object (the last one if it is there twice), or NULL.
static const text__node* text__json_get(const text__json* json, const text__node* object,
                                        const char* name) {
    const text__node* found = NULL;
    if (object == NULL || object->type != TEXT__J_OBJECT) {
        return NULL;
    }
    size_t length = strlen(name);
    size_t at = (size_t)(object - json->nodes) + 1;
    for (uint32_t i = 0; i < object->size; i++) {
        const text__node* key = &json->nodes[at];
        const text__node* value = &json->nodes[key->next];
        if (key->size == length && memcmp(json->strings.data + key->at, name, length) == 0) {
            found = value;
        }
        at = value->next;
    }
    return found;
}

// Element by element: `i` counts, `node` starts at array + 1.
static const text__node* text__json_next(const text__json* json, const text__node* node) {
    return json->nodes + node->next;
}

static const char* text__json_text(const text__json* json, const text__node* node) {
    return json->strings.data + node->at;
}

static bool text__json_is(const text__json* json, const text__node* node, const char* string) {
    return node != NULL && node->type == TEXT__J_STRING && node->size == strlen(string) &&
           memcmp(text__json_text(json, node), string, node->size) == 0;
}

static bool text__json_true(const text__node* node) {
    return node != NULL && node->type == TEXT__J_TRUE;
}

static bool text__json_absent(const text__node* node) {
    return node == NULL || node->type == TEXT__J_NULL;
}

// NULL stands for an absent or null string.
static const char* text__json_cstring(const text__json* json, const text__node* node) {
    bool string = node != NULL && node->type == TEXT__J_STRING;
    return string ? text__json_text(json, node) : NULL;
}

bool text_json_quote(const char* string, size_t length, text_bytes* out, text_error* error) {
    static const char hex[] = "0123456789abcdef";
    TEXT__TRY(text_bytes_add(out, "\"", 1, error));
    for (size_t i = 0; i < length; i++) {
        char escaped[8] = "\\u00";
        unsigned char c = (unsigned char)string[i];
        if (c == '"' || c == '\\') {
            escaped[1] = (char)c;
            TEXT__TRY(text_bytes_add(out, escaped, 2, error));
        } else if (c < 0x20 || c == 0x7F) {
            escaped[4] = hex[c >> 4];
            escaped[5] = hex[c & 15];
            TEXT__TRY(text_bytes_add(out, escaped, 6, error));
        } else {
            TEXT__TRY(text_bytes_add(out, string + i, 1, error));
        }
    }
    return text_bytes_add(out, "\"", 1, error);
}

static bool text__json_ids(const text__json* json, const text__node* array, text_ids* out,
                           text_error* error) {
    if (array->type != TEXT__J_ARRAY) {
        return text__fail(error, "an array of whole numbers was expected");
    }
    const text__node* node = array + 1;
    for (uint32_t i = 0; i < array->size; i++) {
        if (node->type != TEXT__J_INTEGER || node->integer > INT32_MAX ||
            node->integer < INT32_MIN) {
            return text__fail(error, "element %lu is not a whole number of 32 bits",
                              (unsigned long)i);
        }
        TEXT__TRY(text_ids_add(out, (int32_t)node->integer, error));
        node = text__json_next(json, node);
    }
    return true;
}

bool text_json_ids(const char* source, size_t size, text_ids* out, text_error* error) {
    text__json json;
    bool good = text__json_open(&json, "ids", source, size, error) &&
                text__json_ids(&json, json.nodes, out, error);
    text__json_free(&json);
    return good;
}

static bool text__json_each(const char* name, const char* source, size_t size, bool strings,
                            text_json_fn* fn, void* user, text_error* error) {
    text__json json;
    text_error why;
    why.text[0] = 0;
    bool good = text__json_open(&json, name, source, size, error);
    if (good && json.nodes[0].type != TEXT__J_ARRAY) {
        good = text__fail(error, "%s: an array was expected", name);
    }
    const text__node* node = good ? json.nodes + 1 : NULL;
    for (uint32_t i = 0; good && i < json.nodes[0].size; i++) {
        bool string = node->type == TEXT__J_STRING;
        if (strings) {
            good = string ? fn(user, text__json_text(&json, node), node->size, &why)
                          : text__fail(&why, "is not a string");
        } else {
            bool array = node->type == TEXT__J_ARRAY || node->type == TEXT__J_OBJECT;
            good = !array ? text__fail(&why, "is not an array")
                          : fn(user, source + node->at, (size_t)node->integer - node->at, &why);
        }
        if (!good) {
            (void)text__fail(error, "%s: element %lu: %s", name, (unsigned long)i, why.text);
        }
        node = text__json_next(&json, node);
    }
    text__json_free(&json);
    return good;
}

bool text_json_strings(const char* name, const char* json, size_t size, text_json_fn* fn,
                       void* user, text_error* error) {
    return text__json_each(name, json, size, true, fn, user, error);
}

bool text_json_elements(const char* name, const char* json, size_t size, text_json_fn* fn,
                        void* user, text_error* error) {
    return text__json_each(name, json, size, false, fn, user, error);
}
