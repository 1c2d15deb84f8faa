#ifndef QLORA__PART_JSON_READ
#define QLORA__PART_JSON_READ

// ---- reading JSON -------------------------------------------------------------------------------

// A parsed text is a flat array of tokens in the order of the text. The members of an object are
// pairs: a string token followed by the tokens of the value. `next` skips a value with everything
// inside it, so walking one level needs no stack. Token 0 is the root and cannot be a member, so 0
// also means "not found".
typedef enum qlora__json_kind {
    QLORA__JSON_NULL,
    QLORA__JSON_FALSE,
    QLORA__JSON_TRUE,
    QLORA__JSON_NUMBER,
    QLORA__JSON_STRING,
    QLORA__JSON_ARRAY,
    QLORA__JSON_OBJECT
} qlora__json_kind;

#define QLORA__JSON_MAX_DEPTH 256
#define QLORA__JSON_MAX_BYTES 0x7FFFFFFFu
#define QLORA__JSON_ROOT 0xFFFFFFFFu
#define QLORA__JSON_UNIQUE 1u // flag: duplicate keys in an object are an error
// Flag: Infinity, -Infinity and NaN, which Python writes, are numbers; they have no value here.
#define QLORA__JSON_WORDS 2u

// 16 bytes, because a file of short numbers has a token for every two bytes.
typedef struct qlora__json_token {
    uint32_t begin;      // first byte; of a string, the byte after the opening quote
    uint32_t end;        // one past the last byte; of a string, the closing quote
    uint32_t next;       // token after this value and everything inside it
    uint32_t kind : 3;   // a qlora__json_kind
    uint32_t count : 29; // members, elements, or escapes in a string
} qlora__json_token;

#define QLORA__JSON_MAX_COUNT 0x1FFFFFFFu

typedef struct qlora__json {
    const char* text; // owned by the caller; must outlive the tokens
    const char* label;
    const char* strings; // what string tokens point into: the text, or `decoded`
    uint32_t size;
    uint32_t count;
    uint32_t capacity;
    uint32_t line;   // lines of the file before the text, for messages
    uint32_t column; // bytes of its line before the text
    qlora__json_token* tokens;
    char* decoded;
    size_t decoded_capacity;
} qlora__json;

typedef struct qlora__json_parser {
    qlora__env* env;
    qlora__json* json;
    uint32_t at;
    uint32_t parent; // the innermost open container, whose `next` holds its own parent
    uint32_t depth;
    bool words; // QLORA__JSON_WORDS
} qlora__json_parser;

static QLORA__UNUSED void qlora__json_free(qlora__env* env, qlora__json* json) {
    qlora__env_free(env, json->tokens, json->capacity * sizeof *json->tokens);
    qlora__env_free(env, json->decoded, json->decoded_capacity);
    memset(json, 0, sizeof *json);
}

static QLORA__UNUSED qlora_result qlora__json_bad(const qlora__json_parser* p, const char* what) {
    unsigned line = p->json->line + 1;
    unsigned column = p->json->column + 1;
    for (uint32_t i = 0; i < p->at && i < p->json->size; i++) {
        column++;
        if (p->json->text[i] == '\n') {
            line++;
            column = 1;
        }
    }
    return qlora__env_fail(p->env, QLORA_ERR_FORMAT, "%s:%u:%u: invalid JSON: %s", p->json->label,
                           line, column, what);
}

// The value of four hexadecimal digits, or 0x10000 if they are not valid.
static QLORA__UNUSED uint32_t qlora__hex4(const char* text, uint32_t left) {
    uint32_t value = 0;
    if (left < 4) {
        return 0x10000u;
    }
    for (int i = 0; i < 4; i++) {
        char c = text[i];
        uint32_t digit = c >= '0' && c <= '9'   ? (uint32_t)(c - '0')
                         : c >= 'a' && c <= 'f' ? (uint32_t)(c - 'a') + 10
                         : c >= 'A' && c <= 'F' ? (uint32_t)(c - 'A') + 10
                                                : 16u;
        if (digit == 16u) {
            return 0x10000u;
        }
        value = value * 16 + digit;
    }
    return value;
}

// Makes room for `capacity` tokens.
static QLORA__UNUSED qlora_result qlora__json_room(qlora__json_parser* p, uint32_t capacity) {
    qlora__json* json = p->json;
    qlora__json_token* tokens = (qlora__json_token*)qlora__env_realloc(
        p->env, json->tokens, json->count * sizeof *tokens, json->capacity * sizeof *tokens,
        capacity * sizeof *tokens);
    if (tokens == NULL) {
        return QLORA_ERR_MEMORY;
    }
    json->tokens = tokens;
    json->capacity = capacity;
    return QLORA_OK;
}

// How many tokens the value at the start of the text has: brackets, strings and runs of other
// characters. Stops where the value ends or the parser will stop.
static QLORA__UNUSED uint32_t qlora__json_estimate(const qlora__json* json) {
    uint32_t count = 0;
    uint32_t depth = 0;
    bool run = false; // inside a number or a word
    for (uint32_t i = 0; i < json->size; i++) {
        char c = json->text[i];
        if (c == ' ' || c == '\t' || c == '\n' || c == '\r') {
            run = false;
            continue;
        }
        bool opens = c == '[' || c == '{';
        bool ends = c == ']' || c == '}' || c == ',' || c == ':';
        count += opens || c == '"' || (!ends && !run) ? 1 : 0;
        run = !opens && !ends && c != '"';
        depth += opens ? 1 : 0;
        depth -= (c == ']' || c == '}') && depth > 0 ? 1 : 0;
        if (c == '"') {
            for (i++; i < json->size && json->text[i] != '"'; i++) {
                i += json->text[i] == '\\' ? 1 : 0;
            }
        }
        if (depth == 0 || depth > QLORA__JSON_MAX_DEPTH || count >= QLORA__JSON_MAX_COUNT) {
            break;
        }
    }
    return count > 0 ? count : 1;
}

static QLORA__UNUSED qlora_result qlora__json_push(qlora__json_parser* p, qlora__json_kind kind,
                                                   uint32_t begin, uint32_t end) {
    qlora__json* json = p->json;
    if (json->count == QLORA__JSON_MAX_COUNT) {
        return qlora__json_bad(p, "too many values");
    }
    if (json->count == json->capacity) {
        uint32_t half = json->capacity / 2;
        QLORA__TRY(qlora__json_room(p, json->capacity + (half < 64 ? 64 : half)));
    }
    qlora__json_token* t = &json->tokens[json->count];
    json->count++;
    t->kind = (uint32_t)kind & 7u;
    t->begin = begin;
    t->end = end;
    t->next = json->count;
    t->count = 0;
    return QLORA_OK;
}

// Parses an escape; p->at is on the backslash.
static QLORA__UNUSED qlora_result qlora__json_escape(qlora__json_parser* p) {
    const char* text = p->json->text;
    uint32_t left = p->json->size - p->at;
    if (left < 2 || text[p->at + 1] == '\0' || strchr("\"\\/bfnrtu", text[p->at + 1]) == NULL) {
        return qlora__json_bad(p, "invalid escape in a string");
    }
    if (text[p->at + 1] != 'u') {
        p->at += 2;
        return QLORA_OK;
    }
    uint32_t code = qlora__hex4(text + p->at + 2, left - 2);
    if (code > 0xFFFF) {
        return qlora__json_bad(p, "\\u needs four hexadecimal digits");
    }
    if ((code & 0xFC00) == 0xD800 && left >= 12 && text[p->at + 6] == '\\' &&
        text[p->at + 7] == 'u' && (qlora__hex4(text + p->at + 8, left - 8) & 0x1FC00) == 0xDC00) {
        p->at += 12;
        return QLORA_OK;
    }
    if ((code & 0xF800) == 0xD800) {
        return qlora__json_bad(p, "unpaired surrogate in a string");
    }
    p->at += 6;
    return QLORA_OK;
}

// Parses a string; p->at is on the opening quote.
static QLORA__UNUSED qlora_result qlora__json_string_parse(qlora__json_parser* p) {
    const char* text = p->json->text;
    uint32_t size = p->json->size;
    uint32_t begin = p->at + 1;
    uint32_t escapes = 0;
    p->at = begin;
    for (;;) {
        // most bytes of most files: printable ASCII
        uint32_t at = p->at;
        while (at < size && (uint8_t)(text[at] - 0x20) < 0x60 && text[at] != '"' &&
               text[at] != '\\') {
            at++;
        }
        p->at = at;
        if (at >= size || text[at] == '"') {
            break;
        }
        uint8_t c = (uint8_t)text[at];
        if (c == '\\') {
            QLORA__TRY(qlora__json_escape(p));
            escapes++;
        } else if (c < 0x20) {
            return qlora__json_bad(p, "control character in a string");
        } else {
            uint32_t step = qlora__utf8_size(text + at, size - at);
            if (step == 0) {
                return qlora__json_bad(p, "invalid UTF-8 in a string");
            }
            p->at += step;
        }
    }
    if (p->at >= size) {
        return qlora__json_bad(p, "string without a closing quote");
    }
    QLORA__TRY(qlora__json_push(p, QLORA__JSON_STRING, begin, p->at));
    p->json->tokens[p->json->count - 1].count = escapes & QLORA__JSON_MAX_COUNT;
    p->at++;
    return QLORA_OK;
}

static QLORA__UNUSED uint32_t qlora__json_digits(const qlora__json_parser* p, uint32_t at) {
    while (at < p->json->size && p->json->text[at] >= '0' && p->json->text[at] <= '9') {
        at++;
    }
    return at;
}

static QLORA__UNUSED qlora_result qlora__json_number_parse(qlora__json_parser* p) {
    const char* text = p->json->text;
    uint32_t size = p->json->size;
    uint32_t begin = p->at;
    uint32_t at = begin + (text[begin] == '-' ? 1 : 0);
    uint32_t end = qlora__json_digits(p, at);
    if (end == at) {
        return qlora__json_bad(p, "expected a value");
    }
    if (text[at] == '0' && end > at + 1) {
        return qlora__json_bad(p, "number with a leading zero");
    }
    if (end < size && text[end] == '.') {
        at = end + 1;
        end = qlora__json_digits(p, at);
        if (end == at) {
            return qlora__json_bad(p, "number without digits after the decimal point");
        }
    }
    if (end < size && (text[end] == 'e' || text[end] == 'E')) {
        at = end + 1;
        at += at < size && (text[at] == '+' || text[at] == '-') ? 1 : 0;
        end = qlora__json_digits(p, at);
        if (end == at) {
            return qlora__json_bad(p, "number without digits in the exponent");
        }
    }
    p->at = end;
    return qlora__json_push(p, QLORA__JSON_NUMBER, begin, end);
}

// Parses a value that is complete in itself, or the start of a container.
static QLORA__UNUSED qlora_result qlora__json_value(qlora__json_parser* p) {
    static const struct {
        const char* word;
        qlora__json_kind kind;
    } words[6] = {{"null", QLORA__JSON_NULL},       {"false", QLORA__JSON_FALSE},
                  {"true", QLORA__JSON_TRUE},       {"NaN", QLORA__JSON_NUMBER},
                  {"Infinity", QLORA__JSON_NUMBER}, {"-Infinity", QLORA__JSON_NUMBER}};
    const char* text = p->json->text;
    char c = text[p->at];
    if (c == '"') {
        return qlora__json_string_parse(p);
    }
    if (c == '{' || c == '[') {
        if (p->depth == QLORA__JSON_MAX_DEPTH) {
            return qlora__json_bad(p, "nested too deeply; the limit is 256 levels");
        }
        QLORA__TRY(
            qlora__json_push(p, c == '{' ? QLORA__JSON_OBJECT : QLORA__JSON_ARRAY, p->at, p->at));
        p->json->tokens[p->json->count - 1].next = p->parent;
        p->parent = p->json->count - 1;
        p->depth++;
        p->at++;
        return QLORA_OK;
    }
    for (int i = 0; i < (p->words ? 6 : 3); i++) {
        uint32_t length = (uint32_t)strlen(words[i].word);
        if (c == words[i].word[0] && p->json->size - p->at >= length &&
            memcmp(text + p->at, words[i].word, length) == 0) {
            p->at += length;
            return qlora__json_push(p, words[i].kind, p->at - length, p->at);
        }
    }
    return qlora__json_number_parse(p);
}

static QLORA__UNUSED void qlora__json_space(qlora__json_parser* p) {
    const char* text = p->json->text;
    while (p->at < p->json->size && (text[p->at] == ' ' || text[p->at] == '\t' ||
                                     text[p->at] == '\n' || text[p->at] == '\r')) {
        p->at++;
    }
}

// Parses the key of a member and its colon; p->at is on the key.
static QLORA__UNUSED qlora_result qlora__json_key(qlora__json_parser* p) {
    if (p->at >= p->json->size || p->json->text[p->at] != '"') {
        return qlora__json_bad(p, "expected a key in quotes");
    }
    QLORA__TRY(qlora__json_string_parse(p));
    qlora__json_space(p);
    if (p->at >= p->json->size || p->json->text[p->at] != ':') {
        return qlora__json_bad(p, "expected ':' after a key");
    }
    p->at++;
    qlora__json_space(p);
    return QLORA_OK;
}

// After a value: closes containers and skips one comma. Sets *done once the root is complete.
static QLORA__UNUSED qlora_result qlora__json_after(qlora__json_parser* p, bool* done) {
    for (;;) {
        if (p->parent == QLORA__JSON_ROOT) {
            *done = true;
            return QLORA_OK;
        }
        qlora__json_token* open = &p->json->tokens[p->parent];
        bool object = open->kind == QLORA__JSON_OBJECT;
        qlora__json_space(p);
        char c = p->at < p->json->size ? p->json->text[p->at] : '\0';
        if (c != ',' && c != (object ? '}' : ']')) {
            return qlora__json_bad(p, object ? "expected ',' or '}'" : "expected ',' or ']'");
        }
        open->count = (open->count + (p->json->count > p->parent + 1 ? 1u : 0u)) &
                      QLORA__JSON_MAX_COUNT; // there are no more tokens than that
        p->at++;
        if (c == ',') {
            qlora__json_space(p);
            return QLORA_OK;
        }
        p->parent = open->next;
        p->depth--;
        open->end = p->at;
        open->next = p->json->count;
    }
}

// The next code point of a string token, from *at; escapes and UTF-8 were checked by the parser.
static QLORA__UNUSED uint32_t qlora__json_code(const char* text, uint32_t* at) {
    const char* p = text + *at;
    uint8_t c = (uint8_t)p[0];
    if (c != '\\') {
        uint32_t size = c < 0x80 ? 1 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
        uint32_t code = size == 1 ? c : c & (0x7Fu >> size);
        for (uint32_t i = 1; i < size; i++) {
            code = code << 6 | ((uint8_t)p[i] & 0x3Fu);
        }
        *at += size;
        return code;
    }
    if (p[1] != 'u') {
        static const char from[] = "\"\\/bfnrt";
        static const char to[] = "\"\\/\b\f\n\r\t";
        *at += 2;
        return (uint8_t)to[strchr(from, p[1]) - from];
    }
    uint32_t code = qlora__hex4(p + 2, 4);
    *at += 6;
    if ((code & 0xFC00) == 0xD800) {
        code = 0x10000u + ((code & 0x3FF) << 10 | (qlora__hex4(p + 8, 4) & 0x3FF));
        *at += 6;
    }
    return code;
}

static QLORA__UNUSED bool qlora__json_key_less(const void* user, uint32_t a, uint32_t b) {
    const qlora__json* json = (const qlora__json*)user;
    uint32_t i = json->tokens[a].begin;
    uint32_t j = json->tokens[b].begin;
    while (i < json->tokens[a].end && j < json->tokens[b].end) {
        uint32_t x = qlora__json_code(json->text, &i);
        uint32_t y = qlora__json_code(json->text, &j);
        if (x != y) {
            return x < y;
        }
    }
    return i == json->tokens[a].end && j < json->tokens[b].end;
}

// Rejects an object with duplicate keys: sorts the keys of each object and compares neighbours.
static QLORA__UNUSED qlora_result qlora__json_check_unique(qlora__json_parser* p) {
    qlora__json* json = p->json;
    uint32_t largest = 0;
    for (uint32_t i = 0; i < json->count; i++) {
        if (json->tokens[i].kind == QLORA__JSON_OBJECT && json->tokens[i].count > largest) {
            largest = json->tokens[i].count;
        }
    }
    if (largest < 2) {
        return QLORA_OK;
    }
    size_t bytes = largest * sizeof(uint32_t);
    uint32_t* keys = (uint32_t*)qlora__env_alloc(p->env, bytes);
    if (keys == NULL) {
        return QLORA_ERR_MEMORY;
    }
    qlora_result result = QLORA_OK;
    for (uint32_t i = 0; i < json->count && result == QLORA_OK; i++) {
        uint32_t n = json->tokens[i].kind == QLORA__JSON_OBJECT ? json->tokens[i].count : 0;
        uint32_t key = i + 1;
        for (uint32_t k = 0; k < n; k++) {
            keys[k] = key;
            key = json->tokens[key + 1].next;
        }
        qlora__sort(keys, n, qlora__json_key_less, json);
        for (uint32_t k = 1; k < n && result == QLORA_OK; k++) {
            if (!qlora__json_key_less(json, keys[k - 1], keys[k])) {
                const qlora__json_token* t = &json->tokens[keys[k]];
                int shown = t->end - t->begin < 80 ? (int)(t->end - t->begin) : 80;
                result = qlora__env_fail(p->env, QLORA_ERR_FORMAT, "%s: duplicate key \"%.*s\"",
                                         json->label, shown, json->text + t->begin);
            }
        }
    }
    qlora__env_free(p->env, keys, bytes);
    return result;
}

static QLORA__UNUSED qlora_result qlora__json_parse_tokens(qlora__json_parser* p) {
    qlora__json* json = p->json;
    bool done = false;
    uint32_t need = qlora__json_estimate(json);
    if (need > json->capacity) {
        QLORA__TRY(qlora__json_room(p, need));
    }
    qlora__json_space(p);
    while (!done) {
        // A value is expected here, and in an object its key comes first.
        bool object =
            p->parent != QLORA__JSON_ROOT && json->tokens[p->parent].kind == QLORA__JSON_OBJECT;
        if (object) {
            QLORA__TRY(qlora__json_key(p));
        }
        if (p->at >= json->size) {
            return qlora__json_bad(p, "expected a value");
        }
        uint32_t opened = p->parent;
        QLORA__TRY(qlora__json_value(p));
        if (p->parent != opened) {
            qlora__json_space(p);
            char close = json->tokens[p->parent].kind == QLORA__JSON_OBJECT ? '}' : ']';
            if (p->at >= json->size || json->text[p->at] != close) {
                continue;
            }
        }
        QLORA__TRY(qlora__json_after(p, &done));
    }
    return QLORA_OK;
}

static QLORA__UNUSED void qlora__json_begin(qlora__json_parser* p, qlora__env* env,
                                            qlora__json* json) {
    json->strings = json->text;
    json->count = 0;
    p->env = env;
    p->json = json;
    p->at = 0;
    p->parent = QLORA__JSON_ROOT;
    p->depth = 0;
    p->words = false;
}

// Parses `size` bytes of strict RFC 8259 JSON, but for what `flags` allow. `label` names the text
// in messages; it and the text must outlive the tokens. Call qlora__json_free afterwards; after a
// failure there is nothing to free.
static QLORA__UNUSED qlora_result qlora__json_parse(qlora__env* env, const char* label,
                                                    const void* text, uint64_t size, uint32_t flags,
                                                    qlora__json* out) {
    qlora__json json;
    qlora__json_parser p;
    memset(&json, 0, sizeof json);
    if (size > QLORA__JSON_MAX_BYTES) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: JSON texts are limited to 2 GiB", label);
    }
    json.text = (const char*)text;
    json.label = label;
    json.size = (uint32_t)size;
    qlora__json_begin(&p, env, &json);
    p.words = (flags & QLORA__JSON_WORDS) != 0;
    qlora_result result = qlora__json_parse_tokens(&p);
    if (result == QLORA_OK) {
        qlora__json_space(&p);
        if (p.at != json.size) {
            result = qlora__json_bad(&p, "unexpected text after the value");
        }
    }
    if (result == QLORA_OK && (flags & QLORA__JSON_UNIQUE) != 0) {
        result = qlora__json_check_unique(&p);
    }
    if (result != QLORA_OK) {
        qlora__json_free(env, &json);
        return result;
    }
    *out = json;
    return QLORA_OK;
}

// Parses the one value at the start of json->text, for files that hold many. The caller sets text,
// label, size and line; the memory of earlier tokens is used again, and must be freed in the end,
// also after a failure. *end is where the value ends. With `alone`, a line end must follow it.
static QLORA__UNUSED qlora_result qlora__json_parse_one(qlora__env* env, qlora__json* json,
                                                        bool alone, uint32_t* end) {
    qlora__json_parser p;
    qlora__json_begin(&p, env, json);
    QLORA__TRY(qlora__json_parse_tokens(&p));
    while (alone && p.at < json->size && json->text[p.at] != '\n') {
        if (json->text[p.at] != ' ' && json->text[p.at] != '\t' && json->text[p.at] != '\r') {
            return qlora__json_bad(&p, "unexpected text after the value");
        }
        p.at++;
    }
    *end = p.at;
    return QLORA_OK;
}

static QLORA__UNUSED qlora__json_kind qlora__json_kind_of(const qlora__json* json, uint32_t token) {
    return (qlora__json_kind)json->tokens[token].kind;
}

// Whether the decoded text of a string token equals the given bytes.
static QLORA__UNUSED bool qlora__json_equals(const qlora__json* json, uint32_t token,
                                             const char* text, size_t size) {
    const qlora__json_token* t = &json->tokens[token];
    if (t->kind != QLORA__JSON_STRING) {
        return false;
    }
    if (t->count == 0) {
        return t->end - t->begin == size && memcmp(json->strings + t->begin, text, size) == 0;
    }
    uint32_t at = t->begin;
    size_t i = 0;
    while (at < t->end) {
        uint32_t code = qlora__json_code(json->text, &at);
        uint8_t bytes[4];
        uint32_t n = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
        for (uint32_t k = n; k > 1; k--) {
            bytes[k - 1] = (uint8_t)(0x80 | (code & 0x3F));
            code >>= 6;
        }
        bytes[0] = (uint8_t)(n == 1 ? code : (0xF00u >> n & 0xF0u) | code);
        if (size - i < n || memcmp(text + i, bytes, n) != 0) {
            return false;
        }
        i += n;
    }
    return i == size;
}

// The value of a member, or 0 if `object` is not an object or has no such key. Of equal keys, the
// last one counts, as in Python.
static QLORA__UNUSED uint32_t qlora__json_find(const qlora__json* json, uint32_t object,
                                               const char* key) {
    uint32_t found = 0;
    size_t size = strlen(key);
    if (json->tokens[object].kind != QLORA__JSON_OBJECT) {
        return 0;
    }
    for (uint32_t k = object + 1; k < json->tokens[object].next; k = json->tokens[k + 1].next) {
        if (qlora__json_equals(json, k, key, size)) {
            found = k + 1;
        }
    }
    return found;
}

// qlora__json_find through nested objects; the keys are separated by '/'.
static QLORA__UNUSED uint32_t qlora__json_find_path(const qlora__json* json, uint32_t object,
                                                    const char* path) {
    char key[64];
    for (;;) {
        const char* slash = strchr(path, '/');
        size_t n = slash != NULL ? (size_t)(slash - path) : strlen(path);
        if (n >= sizeof key) {
            return 0;
        }
        memcpy(key, path, n);
        key[n] = '\0';
        object = qlora__json_find(json, object, key);
        if (object == 0 || slash == NULL) {
            return object;
        }
        path = slash + 1;
    }
}

// The element of an array, or 0 if it does not exist.
static QLORA__UNUSED uint32_t qlora__json_at(const qlora__json* json, uint32_t array,
                                             uint32_t index) {
    if (json->tokens[array].kind != QLORA__JSON_ARRAY || index >= json->tokens[array].count) {
        return 0;
    }
    uint32_t element = array + 1;
    for (; index > 0; index--) {
        element = json->tokens[element].next;
    }
    return element;
}

static QLORA__UNUSED bool qlora__json_is(const qlora__json* json, uint32_t token,
                                         const char* text) {
    return qlora__json_equals(json, token, text, strlen(text));
}

// The decoded bytes of a string token: as many as fit, always terminated if size > 0. Returns the
// full length; the string is complete if that is less than `size`. A string may contain NUL bytes.
static QLORA__UNUSED size_t qlora__json_string(const qlora__json* json, uint32_t token, char* out,
                                               size_t size) {
    const qlora__json_token* t = &json->tokens[token];
    uint32_t at = t->begin;
    size_t length = 0;
    if (t->kind != QLORA__JSON_STRING) {
        at = t->end;
    } else if (t->count == 0) {
        length = t->end - t->begin;
        if (size > 0) {
            memcpy(out, json->strings + at, length < size ? length : size - 1);
        }
        at = t->end;
    }
    while (at < t->end) {
        uint32_t code = qlora__json_code(json->text, &at);
        uint32_t n = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
        for (uint32_t k = n; k > 0; k--) {
            uint32_t low =
                k == 1 ? (n == 1 ? code : (0xF00u >> n & 0xF0u) | code) : 0x80u | (code & 0x3F);
            if (length + k < size) {
                out[length + k - 1] = (char)(uint8_t)low;
            }
            code >>= 6;
        }
        length += n;
    }
    if (size > 0) {
        out[length < size ? length : size - 1] = '\0';
    }
    return length;
}

// Decodes every string once, into memory of `json`, each with a zero byte after it. From then on
// string tokens point into json->strings and contain no escapes.
static QLORA__UNUSED qlora_result qlora__json_decode(qlora__env* env, qlora__json* json) {
    size_t need = 0;
    for (uint32_t i = 0; i < json->count; i++) {
        const qlora__json_token* t = &json->tokens[i];
        need += t->kind == QLORA__JSON_STRING ? (size_t)(t->end - t->begin) + 1 : 0;
    }
    if (need > json->decoded_capacity) {
        char* decoded =
            (char*)qlora__env_realloc(env, json->decoded, 0, json->decoded_capacity, need);
        if (decoded == NULL) {
            return QLORA_ERR_MEMORY;
        }
        json->decoded = decoded;
        json->decoded_capacity = need;
    }
    uint32_t at = 0; // below the size of the text: every string had two quotes
    for (uint32_t i = 0; i < json->count; i++) {
        qlora__json_token* t = &json->tokens[i];
        if (t->kind == QLORA__JSON_STRING) {
            size_t size = qlora__json_string(json, i, json->decoded + at, need - at);
            t->begin = at;
            t->end = at + (uint32_t)size;
            t->count = 0;
            at = t->end + 1;
        }
    }
    json->strings = json->decoded;
    return QLORA_OK;
}

// A finite number, converted to the nearest double.
static QLORA__UNUSED bool qlora__json_double(const qlora__json* json, uint32_t token, double* out) {
    const qlora__json_token* t = &json->tokens[token];
    char last = t->end > t->begin ? json->text[t->end - 1] : '\0';
    if (t->kind != QLORA__JSON_NUMBER || last < '0' || last > '9') { // QLORA__JSON_WORDS
        return false;
    }
    double x = qlora__number_parse(json->text + t->begin, t->end - t->begin);
    uint64_t bits = 0;
    memcpy(&bits, &x, sizeof bits);
    if ((bits >> 52 & 0x7FF) == 0x7FF) {
        return false;
    }
    *out = x;
    return true;
}

// An integer that an int64_t can represent exactly. 4096, 4.096e3 and 4096.0 are all 4096; beyond
// 2^53 only plain digits are accepted.
static QLORA__UNUSED bool qlora__json_int(const qlora__json* json, uint32_t token, int64_t* out) {
    const qlora__json_token* t = &json->tokens[token];
    if (t->kind != QLORA__JSON_NUMBER) {
        return false;
    }
    bool negative = json->text[t->begin] == '-';
    uint64_t value = 0;
    uint64_t limit = (uint64_t)INT64_MAX + (negative ? 1 : 0);
    uint32_t i = t->begin + (negative ? 1 : 0);
    for (; i < t->end && json->text[i] >= '0' && json->text[i] <= '9'; i++) {
        uint64_t digit = (uint64_t)(json->text[i] - '0');
        if (value > (limit - digit) / 10) {
            return false;
        }
        value = value * 10 + digit;
    }
    if (i < t->end) {
        double x = 0.0;
        if (!qlora__json_double(json, token, &x) || x < -9007199254740992.0 ||
            x > 9007199254740992.0 || (double)(int64_t)x != x) {
            return false;
        }
        *out = (int64_t)x;
        return true;
    }
    *out = negative ? (int64_t)(0 - value) : (int64_t)value;
    return true;
}

// An integer written in plain digits, as in file offsets and shapes.
static QLORA__UNUSED bool qlora__json_offset(const qlora__json* json, uint32_t token,
                                             int64_t* out) {
    const qlora__json_token* t = &json->tokens[token];
    for (uint32_t i = t->begin; i < t->end; i++) {
        if (json->text[i] < '0' || json->text[i] > '9') {
            return false;
        }
    }
    return qlora__json_int(json, token, out);
}

#endif // QLORA__PART_JSON_READ
