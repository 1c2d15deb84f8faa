// From the source of a template to tokens, as jinja2's lexer with trim_blocks and lstrip_blocks.

typedef enum qlora__jin_token_kind {
    QLORA__JIN_T_END,
    QLORA__JIN_T_DATA,
    QLORA__JIN_T_VARIABLE,     // {{
    QLORA__JIN_T_VARIABLE_END, // }}
    QLORA__JIN_T_BLOCK,        // {%
    QLORA__JIN_T_BLOCK_END,    // %}
    QLORA__JIN_T_NAME,
    QLORA__JIN_T_STRING,
    QLORA__JIN_T_INTEGER,
    QLORA__JIN_T_FLOAT,
    QLORA__JIN_T_OPERATOR
} qlora__jin_token_kind;

typedef struct qlora__jin_token {
    qlora__jin_token_kind kind;
    uint32_t line;
    const char* text;
    size_t size;
} qlora__jin_token;

typedef struct qlora__jin_lexer {
    qlora__jin_machine* m;
    const char* source; // newlines are \n, and one at the end is gone
    size_t size;
    size_t at;
    uint32_t line;
    bool line_start; // the last thing read ended with a newline
    qlora__jin_token* tokens;
    size_t count;
    size_t capacity;
    char* open; // closing brackets that are due
    size_t open_count;
    size_t open_capacity;
} qlora__jin_lexer;

// Python's str.isspace of one character.
static bool qlora__jin_is_space(uint32_t code) {
    if (code <= 0x20) {
        return code == 0x20 || (code >= 9 && code <= 13) || code >= 0x1C;
    }
    return code == 0x85 || code == 0xA0 || code == 0x1680 || (code >= 0x2000 && code <= 0x200A) ||
           code == 0x2028 || code == 0x2029 || code == 0x202F || code == 0x205F || code == 0x3000;
}

// The code point at text[at], which is valid UTF-8, and its size.
static uint32_t qlora__jin_code_at(const char* text, size_t size, size_t at, size_t* step) {
    uint32_t code = 0;
    size_t length = qlora__text_utf8((const unsigned char*)text + at, size - at, &code);
    *step = length > 0 ? length : 1;
    return length > 0 ? code : 0xFFFD;
}

// Where the whitespace that starts at `at` ends.
static size_t qlora__jin_skip_space(const char* text, size_t size, size_t at) {
    size_t step = 0;
    while (at < size && qlora__jin_is_space(qlora__jin_code_at(text, size, at, &step))) {
        at += step;
    }
    return at;
}

// Where the whitespace that ends at `end` starts, not before `begin`.
static size_t qlora__jin_back_space(const char* text, size_t begin, size_t end) {
    while (end > begin) {
        size_t at = end - 1;
        size_t step = 0;
        while (at > begin && ((unsigned char)text[at] & 0xC0) == 0x80) {
            at--;
        }
        if (!qlora__jin_is_space(qlora__jin_code_at(text, end, at, &step))) {
            break;
        }
        end = at;
    }
    return end;
}

static qlora_result qlora__jin_lex_fail(qlora__jin_lexer* x, const char* why) {
    x->m->line = x->line;
    return qlora__jin_fail(x->m, "%s", why);
}

static qlora_result qlora__jin_lex_add(qlora__jin_lexer* x, qlora__jin_token_kind kind,
                                       const char* text, size_t size) {
    if (x->count == x->capacity) {
        size_t grown = x->capacity < 64 ? 64 : x->capacity * 2;
        void* moved = NULL;
        QLORA__TRY(qlora__jin_get(x->m, grown * sizeof(qlora__jin_token), &moved));
        if (x->count > 0) {
            memcpy(moved, x->tokens, x->count * sizeof(qlora__jin_token));
        }
        x->tokens = (qlora__jin_token*)moved;
        x->capacity = grown;
    }
    qlora__jin_token* token = &x->tokens[x->count++];
    token->kind = kind;
    token->line = x->line;
    token->text = text;
    token->size = size;
    return QLORA_OK;
}

// Moves on to `to` and counts the lines.
static void qlora__jin_lex_move(qlora__jin_lexer* x, size_t to) {
    x->line_start = to > x->at ? x->source[to - 1] == '\n' : x->line_start;
    for (; x->at < to; x->at++) {
        x->line += x->source[x->at] == '\n' ? 1 : 0;
    }
}

static bool qlora__jin_lex_sees(const qlora__jin_lexer* x, size_t at, const char* text) {
    size_t size = strlen(text);
    return size <= x->size - at && memcmp(x->source + at, text, size) == 0;
}

// Whether `word` and the end of a tag follow at `at`, which is behind a block's start and its sign:
// {% raw %}. *end is behind the tag. Only the end of a raw block knows +%} and the trimmed newline.
static bool qlora__jin_lex_word(const qlora__jin_lexer* x, size_t at, const char* word, bool trim,
                                size_t* end) {
    at = qlora__jin_skip_space(x->source, x->size, at);
    if (!qlora__jin_lex_sees(x, at, word)) {
        return false;
    }
    at = qlora__jin_skip_space(x->source, x->size, at + strlen(word));
    if (qlora__jin_lex_sees(x, at, "-%}")) {
        *end = qlora__jin_skip_space(x->source, x->size, at + 3);
        return true;
    }
    bool plus = trim && qlora__jin_lex_sees(x, at, "+%}");
    if (plus || qlora__jin_lex_sees(x, at, "%}")) {
        *end = at + (plus ? 3 : 2);
        *end += trim && !plus && *end < x->size && x->source[*end] == '\n' ? 1 : 0;
        return true;
    }
    return false;
}

// Adds the text from x->at to the tag at `tag`, whose sign is '-', '+' or 0.
static qlora_result qlora__jin_lex_data(qlora__jin_lexer* x, size_t tag, char sign, bool variable) {
    size_t begin = x->at;
    size_t end = tag;
    if (sign == '-') {
        end = qlora__jin_back_space(x->source, begin, end);
    } else if (sign != '+' && !variable) {
        size_t line = end;
        while (line > begin && x->source[line - 1] != '\n') {
            line--;
        }
        bool blank = qlora__jin_skip_space(x->source, tag, line) == tag;
        if ((line > begin || x->line_start) && blank) {
            end = line;
        }
    }
    if (end > begin) {
        QLORA__TRY(qlora__jin_lex_add(x, QLORA__JIN_T_DATA, x->source + begin, end - begin));
    }
    qlora__jin_lex_move(x, tag);
    return QLORA_OK;
}

static char qlora__jin_lex_sign(const qlora__jin_lexer* x, size_t at) {
    return at < x->size && (x->source[at] == '-' || x->source[at] == '+') ? x->source[at] : '\0';
}

static qlora_result qlora__jin_lex_raw(qlora__jin_lexer* x, size_t body) {
    qlora__jin_lex_move(x, body);
    for (size_t at = body; at + 1 < x->size; at++) {
        size_t end = 0;
        if (x->source[at] == '{' && x->source[at + 1] == '%') {
            char sign = qlora__jin_lex_sign(x, at + 2);
            if (qlora__jin_lex_word(x, at + (sign != '\0' ? 3 : 2), "endraw", true, &end)) {
                QLORA__TRY(qlora__jin_lex_data(x, at, sign, false));
                qlora__jin_lex_move(x, end);
                return QLORA_OK;
            }
        }
    }
    return body == x->size ? QLORA_OK : qlora__jin_lex_fail(x, "{% raw %} is not closed");
}

static qlora_result qlora__jin_lex_comment(qlora__jin_lexer* x, size_t body) {
    for (size_t at = body; at + 1 < x->size; at++) {
        if (x->source[at] == '#' && x->source[at + 1] == '}') {
            char before = at > body ? x->source[at - 1] : '\0';
            size_t end = at + 2;
            if (before == '-') {
                end = qlora__jin_skip_space(x->source, x->size, end);
            } else if (before != '+') {
                end += end < x->size && x->source[end] == '\n' ? 1 : 0;
            }
            qlora__jin_lex_move(x, end);
            return QLORA_OK;
        }
    }
    if (body >= x->size) { // jinja2 does not look for the end of what is empty
        qlora__jin_lex_move(x, x->size);
        return QLORA_OK;
    }
    return qlora__jin_lex_fail(x, "a comment {# is not closed");
}

// ---- inside a tag

static size_t qlora__jin_lex_digits(const qlora__jin_lexer* x, size_t at, const char* allowed) {
    size_t end = at;
    for (size_t i = at; i < x->size; i++) {
        bool under = x->source[i] == '_' && i + 1 < x->size && x->source[i + 1] != '_' &&
                     strchr(allowed, x->source[i + 1]) != NULL && x->source[i + 1] != '\0';
        if (x->source[i] == '\0' || (strchr(allowed, x->source[i]) == NULL && !under)) {
            break;
        }
        end = i + 1;
    }
    return end;
}

// A number; *kind is left alone when there is none.
static size_t qlora__jin_lex_number(const qlora__jin_lexer* x, qlora__jin_token_kind* kind) {
    static const char decimal[] = "0123456789";
    size_t at = x->at;
    const char* s = x->source;
    if (s[at] < '0' || s[at] > '9') {
        return at;
    }
    bool after_dot = at > 0 && s[at - 1] == '.';
    size_t whole = qlora__jin_lex_digits(x, at, decimal);
    size_t end = whole;
    bool fraction = false;
    if (end + 1 < x->size && s[end] == '.' && s[end + 1] >= '0' && s[end + 1] <= '9') {
        end = qlora__jin_lex_digits(x, end + 1, decimal);
        fraction = true;
    }
    if (end < x->size && (s[end] == 'e' || s[end] == 'E')) {
        size_t power = end + 1;
        power += power < x->size && (s[power] == '+' || s[power] == '-') ? 1 : 0;
        if (power < x->size && s[power] >= '0' && s[power] <= '9') {
            end = qlora__jin_lex_digits(x, power, decimal);
            fraction = true;
        }
    }
    if (fraction && !after_dot) {
        *kind = QLORA__JIN_T_FLOAT;
        return end;
    }
    *kind = QLORA__JIN_T_INTEGER;
    if (s[at] == '0') {
        char base = at + 1 < x->size ? (char)(s[at + 1] | 0x20) : '\0';
        const char* digits = base == 'x'   ? "0123456789abcdefABCDEF"
                             : base == 'o' ? "01234567"
                             : base == 'b' ? "01"
                                           : NULL;
        size_t based = digits != NULL ? qlora__jin_lex_digits(x, at + 2, digits) : at;
        return digits != NULL && based > at + 2 ? based : qlora__jin_lex_digits(x, at, "0");
    }
    return whole;
}

static bool qlora__jin_is_name(uint32_t code) {
    if (code < 0x80) {
        return (code >= 'a' && code <= 'z') || (code >= 'A' && code <= 'Z') ||
               (code >= '0' && code <= '9') || code == '_';
    }
    return (1u << qlora__jin_class(code) & QLORA__TEXT_W) != 0;
}

static size_t qlora__jin_lex_name(const qlora__jin_lexer* x) {
    size_t at = x->at;
    size_t step = 0;
    while (at < x->size && qlora__jin_is_name(qlora__jin_code_at(x->source, x->size, at, &step))) {
        at += step;
    }
    return at;
}

// A quoted string with its quotes, or x->at when it does not end.
static size_t qlora__jin_lex_string(const qlora__jin_lexer* x) {
    char quote = x->source[x->at];
    for (size_t at = x->at + 1; at < x->size; at++) {
        if (x->source[at] == quote) {
            return at + 1;
        }
        at += x->source[at] == '\\' ? 1 : 0;
    }
    return x->at;
}

static qlora_result qlora__jin_lex_bracket(qlora__jin_lexer* x, char c) {
    if (c == '(' || c == '[' || c == '{') {
        if (x->open_count == x->open_capacity) {
            size_t grown = x->open_capacity < 64 ? 64 : x->open_capacity * 2;
            void* moved = NULL;
            QLORA__TRY(qlora__jin_get(x->m, grown, &moved));
            if (x->open_count > 0) {
                memcpy(moved, x->open, x->open_count);
            }
            x->open = (char*)moved;
            x->open_capacity = grown;
        }
        x->open[x->open_count++] = c == '(' ? ')' : c == '[' ? ']' : '}';
    } else if (c == ')' || c == ']' || c == '}') {
        if (x->open_count == 0 || x->open[x->open_count - 1] != c) {
            x->m->line = x->line;
            return qlora__jin_fail(x->m, "unexpected \"%c\"", c);
        }
        x->open_count--;
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_lex_operator(qlora__jin_lexer* x) {
    static const char* const doubles[] = {"//", "**", "==", "!=", ">=", "<="};
    size_t size = 0;
    for (size_t i = 0; i < QLORA__TEXT_COUNT(doubles); i++) {
        size = qlora__jin_lex_sees(x, x->at, doubles[i]) ? 2 : size;
    }
    char c = x->source[x->at];
    if (size == 0 && c != '\0' && strchr("+-/*%~[](){}><=.:|,;", c) != NULL) {
        size = 1;
    }
    if (size == 0) {
        x->m->line = x->line;
        if (c == '\'' || c == '"') {
            return qlora__jin_fail(x->m, "a string that starts with %c is not closed", c);
        }
        return qlora__jin_fail(x->m, "unexpected character \"%c\"",
                               (unsigned char)c < 0x80 ? c : '?');
    }
    QLORA__TRY(qlora__jin_lex_bracket(x, c));
    QLORA__TRY(qlora__jin_lex_add(x, QLORA__JIN_T_OPERATOR, x->source + x->at, size));
    qlora__jin_lex_move(x, x->at + size);
    return QLORA_OK;
}

// Whether the tag ends at x->at, and where the text after it starts.
static bool qlora__jin_lex_tag_end(const qlora__jin_lexer* x, bool variable, size_t* end) {
    if (x->open_count > 0) {
        return false;
    }
    const char* mark = variable ? "}}" : "%}";
    char sign = qlora__jin_lex_sign(x, x->at);
    if (sign == '-' && qlora__jin_lex_sees(x, x->at + 1, mark)) {
        *end = qlora__jin_skip_space(x->source, x->size, x->at + 3);
        return true;
    }
    if (sign == '+' && !variable && qlora__jin_lex_sees(x, x->at + 1, mark)) {
        *end = x->at + 3;
        return true;
    }
    if (qlora__jin_lex_sees(x, x->at, mark)) {
        *end = x->at + 2;
        *end += !variable && *end < x->size && x->source[*end] == '\n' ? 1 : 0;
        return true;
    }
    return false;
}

static qlora_result qlora__jin_lex_tag(qlora__jin_lexer* x, bool variable) {
    while (x->at < x->size) {
        size_t end = 0;
        if (qlora__jin_lex_tag_end(x, variable, &end)) {
            QLORA__TRY(qlora__jin_lex_add(
                x, variable ? QLORA__JIN_T_VARIABLE_END : QLORA__JIN_T_BLOCK_END, NULL, 0));
            qlora__jin_lex_move(x, end);
            return QLORA_OK;
        }
        end = qlora__jin_skip_space(x->source, x->size, x->at);
        if (end > x->at) {
            qlora__jin_lex_move(x, end);
            continue;
        }
        qlora__jin_token_kind kind = QLORA__JIN_T_END;
        end = qlora__jin_lex_number(x, &kind);
        if (end == x->at) {
            kind = QLORA__JIN_T_NAME;
            end = qlora__jin_lex_name(x);
        }
        if (end == x->at && (x->source[x->at] == '\'' || x->source[x->at] == '"')) {
            kind = QLORA__JIN_T_STRING;
            end = qlora__jin_lex_string(x);
        }
        if (end == x->at) {
            QLORA__TRY(qlora__jin_lex_operator(x));
            continue;
        }
        QLORA__TRY(qlora__jin_lex_add(x, kind, x->source + x->at, end - x->at));
        qlora__jin_lex_move(x, end);
    }
    return QLORA_OK; // the parser reports what is missing
}

// ---- the whole template

static qlora_result qlora__jin_lex_next(qlora__jin_lexer* x) {
    size_t tag = x->at;
    while (tag + 1 < x->size &&
           (x->source[tag] != '{' || strchr("%{#", x->source[tag + 1]) == NULL ||
            x->source[tag + 1] == '\0')) {
        tag++;
    }
    if (tag + 1 >= x->size) {
        size_t begin = x->at;
        QLORA__TRY(qlora__jin_lex_add(x, QLORA__JIN_T_DATA, x->source + begin, x->size - begin));
        qlora__jin_lex_move(x, x->size);
        return QLORA_OK;
    }
    char which = x->source[tag + 1];
    char sign = qlora__jin_lex_sign(x, tag + 2);
    size_t body = tag + (sign != '\0' ? 3 : 2);
    size_t raw = 0;
    QLORA__TRY(qlora__jin_lex_data(x, tag, sign, which == '{'));
    if (which == '#') {
        return qlora__jin_lex_comment(x, body);
    }
    if (which == '%' && qlora__jin_lex_word(x, body, "raw", false, &raw)) {
        return qlora__jin_lex_raw(x, raw);
    }
    QLORA__TRY(
        qlora__jin_lex_add(x, which == '{' ? QLORA__JIN_T_VARIABLE : QLORA__JIN_T_BLOCK, NULL, 0));
    qlora__jin_lex_move(x, body);
    return qlora__jin_lex_tag(x, which == '{');
}

// A copy with \n for every line end and without one at the very end.
static qlora_result qlora__jin_lex_lines(qlora__jin_lexer* x, const char* source, size_t size) {
    void* memory = NULL;
    QLORA__TRY(qlora__jin_get(x->m, size + 1, &memory));
    char* copy = (char*)memory;
    size_t count = 0;
    for (size_t i = 0; i < size; i++) {
        char c = source[i];
        if (c == '\r') {
            i += i + 1 < size && source[i + 1] == '\n' ? 1 : 0;
            c = '\n';
        }
        copy[count++] = c;
    }
    count -= count > 0 && copy[count - 1] == '\n' ? 1 : 0;
    copy[count] = '\0';
    x->source = copy;
    x->size = count;
    for (size_t at = 0; at < count;) {
        uint32_t code = 0;
        size_t step = qlora__text_utf8((const unsigned char*)copy + at, count - at, &code);
        if (step == 0) {
            return qlora__jin_lex_fail(x, "the template is not UTF-8");
        }
        x->line += copy[at] == '\n' ? 1 : 0;
        at += step;
    }
    x->line = 1;
    return QLORA_OK;
}

static qlora_result qlora__jin_lex(qlora__jin_lexer* x, qlora__jin_machine* m, const char* source,
                                   size_t size) {
    memset(x, 0, sizeof *x);
    x->m = m;
    x->line = 1;
    x->line_start = true;
    QLORA__TRY(qlora__jin_lex_lines(x, source, size));
    while (x->at < x->size) {
        QLORA__TRY(qlora__jin_lex_next(x));
    }
    return qlora__jin_lex_add(x, QLORA__JIN_T_END, NULL, 0);
}
