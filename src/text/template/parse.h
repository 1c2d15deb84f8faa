// From tokens to a tree: expressions. The grammar and its precedence are jinja2's.

typedef enum qlora__jin_node_kind {
    QLORA__JIN_N_CONST, // value
    QLORA__JIN_N_NAME,  // name, slot
    QLORA__JIN_N_NSREF, // name.attribute as a target: name, value
    QLORA__JIN_N_LIST,  // a: items
    QLORA__JIN_N_TUPLE,
    QLORA__JIN_N_DICT,    // a: key, value, key, value, ...
    QLORA__JIN_N_GETATTR, // a.name
    QLORA__JIN_N_GETITEM, // a[b]
    QLORA__JIN_N_SLICE,   // a:b:c
    QLORA__JIN_N_CALL,    // a(b, ..., **e); b: positional, c: keywords, d: *d, e: **e
    QLORA__JIN_N_FILTER,  // a | name(b, c, d, e)
    QLORA__JIN_N_TEST,
    QLORA__JIN_N_KEYWORD, // name=a
    QLORA__JIN_N_NOT,     // a
    QLORA__JIN_N_NEG,
    QLORA__JIN_N_POS,
    QLORA__JIN_N_AND, // a, b
    QLORA__JIN_N_OR,
    QLORA__JIN_N_BINARY,       // a op b
    QLORA__JIN_N_COMPARE,      // a, then b: operands
    QLORA__JIN_N_OPERAND,      // op a
    QLORA__JIN_N_CONCAT,       // a: parts
    QLORA__JIN_N_COND,         // b if a else c
    QLORA__JIN_N_OUTPUT,       // a: expressions
    QLORA__JIN_N_IF,           // a: test, b: body, c: else or elif
    QLORA__JIN_N_FOR,          // a: target, b: iterable, c: body, d: else, e: test
    QLORA__JIN_N_ASSIGN,       // a = b
    QLORA__JIN_N_ASSIGN_BLOCK, // a: target, b: filter, c: body
    QLORA__JIN_N_MACRO,        // name, b: arguments (names with a default in a), c: body
    QLORA__JIN_N_CALL_BLOCK,   // a: call, b: arguments, c: body
    QLORA__JIN_N_FILTER_BLOCK, // b: filter, c: body
    QLORA__JIN_N_WITH,         // a: targets, b: values, c: body
    QLORA__JIN_N_GENERATION,   // c: body
    QLORA__JIN_N_BLOCK,        // name, c: body
    QLORA__JIN_N_LOADER,       // include, import, extends: an error when reached
    QLORA__JIN_N_BREAK,
    QLORA__JIN_N_CONTINUE,
    QLORA__JIN_N_KINDS
} qlora__jin_node_kind;

struct qlora__jin_scope;

typedef struct qlora__jin_node {
    qlora__jin_node_kind kind;
    uint32_t line;
    uint32_t nesting; // of the tree below
    char op[2];       // '*' '*' for **; 'i' in, 'n' not in; "==", "<" and so on
    bool flag;        // const: of a name, may be undefined; macro: uses caller
    bool uses_kwargs;
    bool uses_varargs;
    bool plain; // an expression without variables and calls
    bool folds; // it contains a slice of something plain: see qlora__jin_fold
    const char* name;
    size_t size;
    struct qlora__jin_node* a;
    struct qlora__jin_node* b;
    struct qlora__jin_node* c;
    struct qlora__jin_node* d;
    struct qlora__jin_node* e;
    struct qlora__jin_node* next; // in a list
    qlora__jin_value value;
    uint32_t hops; // functions outwards to the one that has the variable
    uint32_t slot;
    uint32_t slots; // of a function: how many variables
    struct qlora__jin_scope* scope;
    struct qlora__jin_scope* scope_else;
    struct qlora__jin_scope* scope_test;
    const void* found; // of a filter or a test
} qlora__jin_node;

typedef struct qlora__jin_parser {
    qlora__jin_machine* m;
    const qlora__jin_token* token; // the current one
    uint32_t depth;
    uint32_t loops; // around the current place, in the same function
    uint32_t fors;  // the same in all functions, with the else parts
    qlora_result (*expression)(struct qlora__jin_parser* p, bool conditional,
                               qlora__jin_node** out);
    qlora_result (*unary)(struct qlora__jin_parser* p, bool filters, qlora__jin_node** out);
    qlora_result (*negation)(struct qlora__jin_parser* p, qlora__jin_node** out);
    qlora_result (*statements)(struct qlora__jin_parser* p, const char* ends,
                               qlora__jin_node** out);
} qlora__jin_parser;

// Things in the order they are added.
typedef struct qlora__jin_chain {
    qlora__jin_node* first;
    qlora__jin_node* last;
} qlora__jin_chain;

static void qlora__jin_chain_add(qlora__jin_chain* chain, qlora__jin_node* node) {
    if (chain->last != NULL) {
        chain->last->next = node;
    } else {
        chain->first = node;
    }
    chain->last = node;
}

static qlora_result qlora__jin_node_make(qlora__jin_parser* p, qlora__jin_node_kind kind,
                                         qlora__jin_node** out) {
    void* memory = NULL;
    QLORA__TRY(qlora__jin_get(p->m, sizeof(qlora__jin_node), &memory));
    memset(memory, 0, sizeof(qlora__jin_node));
    *out = (qlora__jin_node*)memory;
    (*out)->kind = kind;
    (*out)->line = p->token->line;
    return QLORA_OK;
}

// A node with one or two operands.
static qlora_result qlora__jin_node_of(qlora__jin_parser* p, qlora__jin_node_kind kind,
                                       uint32_t line, qlora__jin_node* a, qlora__jin_node* b,
                                       qlora__jin_node** out) {
    QLORA__TRY(qlora__jin_node_make(p, kind, out));
    (*out)->line = line;
    (*out)->a = a;
    (*out)->b = b;
    return QLORA_OK;
}

// The node after n for functions that walk a whole tree. An elif hangs below its if and follows it
// here, so that a long chain is not a deep recursion; *rest keeps what follows the if.
static const qlora__jin_node* qlora__jin_walk(const qlora__jin_node* n,
                                              const qlora__jin_node** rest) {
    if (n->kind == QLORA__JIN_N_IF && n->d != NULL) {
        *rest = n->next != NULL ? n->next : *rest;
        return n->d;
    }
    const qlora__jin_node* next = n->next != NULL ? n->next : *rest;
    *rest = n->next != NULL ? *rest : NULL;
    return next;
}

// What is below n, without the elif.
static const qlora__jin_node* qlora__jin_below(const qlora__jin_node* n) {
    return n->kind == QLORA__JIN_N_IF ? NULL : n->d;
}

// Measures a finished node, so that whatever walks the tree later is bounded.
static qlora_result qlora__jin_node_done(qlora__jin_parser* p, qlora__jin_node* node) {
    const qlora__jin_node* lists[5] = {node->a, node->b, node->c, node->d, node->e};
    node->plain = node->kind != QLORA__JIN_N_CALL;
    for (size_t i = 0; i < 5; i++) {
        for (const qlora__jin_node* n = lists[i]; n != NULL; n = n->next) {
            node->nesting = n->nesting + 1 > node->nesting ? n->nesting + 1 : node->nesting;
            node->plain = node->plain && (n->plain || n->kind == QLORA__JIN_N_CONST);
            node->folds = node->folds || n->folds;
        }
    }
    node->folds = node->folds || (node->kind == QLORA__JIN_N_GETITEM && node->plain &&
                                  node->b->kind == QLORA__JIN_N_SLICE);
    if (node->nesting > QLORA__JIN_MAX_NESTING) {
        p->m->line = node->line;
        return qlora__jin_fail(p->m, "the template is nested deeper than %d levels",
                               (int)QLORA__JIN_MAX_NESTING);
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_descend(qlora__jin_parser* p) {
    p->depth++;
    if (p->depth > QLORA__JIN_MAX_NESTING) {
        p->m->line = p->token->line;
        return qlora__jin_fail(p->m, "the template is nested deeper than %d levels",
                               (int)QLORA__JIN_MAX_NESTING);
    }
    return QLORA_OK;
}

// ---- tokens

static bool qlora__jin_at_operator(const qlora__jin_parser* p, const char* text) {
    return p->token->kind == QLORA__JIN_T_OPERATOR && p->token->size == strlen(text) &&
           memcmp(p->token->text, text, p->token->size) == 0;
}

static bool qlora__jin_token_is_name(const qlora__jin_token* token, const char* name) {
    return token->kind == QLORA__JIN_T_NAME && token->size == strlen(name) &&
           memcmp(token->text, name, token->size) == 0;
}

static bool qlora__jin_at_name(const qlora__jin_parser* p, const char* name) {
    return qlora__jin_token_is_name(p->token, name);
}

static void qlora__jin_step(qlora__jin_parser* p) {
    p->token += p->token->kind != QLORA__JIN_T_END ? 1 : 0;
}

static bool qlora__jin_skip_operator(qlora__jin_parser* p, const char* text) {
    bool there = qlora__jin_at_operator(p, text);
    if (there) {
        qlora__jin_step(p);
    }
    return there;
}

static bool qlora__jin_skip_name(qlora__jin_parser* p, const char* name) {
    bool there = qlora__jin_at_name(p, name);
    if (there) {
        qlora__jin_step(p);
    }
    return there;
}

static qlora_result qlora__jin_unexpected(qlora__jin_parser* p, const char* wanted) {
    const qlora__jin_token* t = p->token;
    int size = (int)(t->size < 60 ? t->size : 60);
    p->m->line = t->line;
    switch (t->kind) {
    case QLORA__JIN_T_END:
        return qlora__jin_fail(p->m, "expected %s, found the end of the template", wanted);
    case QLORA__JIN_T_VARIABLE_END:
    case QLORA__JIN_T_BLOCK_END:
        return qlora__jin_fail(p->m, "expected %s, found the end of the tag", wanted);
    case QLORA__JIN_T_DATA:
    case QLORA__JIN_T_VARIABLE:
    case QLORA__JIN_T_BLOCK:
        return qlora__jin_fail(p->m, "expected %s, found text", wanted);
    default:
        return qlora__jin_fail(p->m, "expected %s, found %.*s", wanted, size, t->text);
    }
}

static qlora_result qlora__jin_need_operator(qlora__jin_parser* p, const char* text) {
    return qlora__jin_skip_operator(p, text) ? QLORA_OK : qlora__jin_unexpected(p, text);
}

static qlora_result qlora__jin_need_kind(qlora__jin_parser* p, qlora__jin_token_kind kind,
                                         const char* wanted) {
    if (p->token->kind != kind) {
        return qlora__jin_unexpected(p, wanted);
    }
    qlora__jin_step(p);
    return QLORA_OK;
}

// ---- literals

static uint32_t qlora__jin_hex(const char* text, size_t size, bool* good) {
    uint32_t value = 0;
    for (size_t i = 0; i < size; i++) {
        char c = text[i];
        uint32_t digit = c >= '0' && c <= '9'   ? (uint32_t)(c - '0')
                         : c >= 'a' && c <= 'f' ? (uint32_t)(c - 'a' + 10)
                         : c >= 'A' && c <= 'F' ? (uint32_t)(c - 'A' + 10)
                                                : 16;
        *good = *good && digit < 16;
        value = value << 4 | (digit & 15);
    }
    return value;
}

// One escape at text[at], behind the backslash. Python leaves unknown ones as they are.
static qlora_result qlora__jin_escape(qlora__jin_parser* p, const char* text, size_t size,
                                      size_t* at, qlora__jin_buffer* out) {
    static const char plain[] = "\\'\"abfnrtv";
    static const char meant[] = "\\'\"\a\b\f\n\r\t\v";
    char c = text[*at];
    const char* hit = c != '\0' ? strchr(plain, c) : NULL;
    p->m->line = p->token->line;
    if (hit != NULL) {
        *at += 1;
        return qlora__jin_put(p->m, out, meant + (hit - plain), 1);
    }
    if (c == '\n') { // a line that goes on
        *at += 1;
        return QLORA_OK;
    }
    if (c >= '0' && c <= '7') {
        uint32_t code = 0;
        for (int i = 0; i < 3 && *at < size && text[*at] >= '0' && text[*at] <= '7'; i++) {
            code = code * 8 + (uint32_t)(text[*at] - '0');
            *at += 1;
        }
        return qlora__jin_put_code(p->m, out, code);
    }
    size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    if (digits > 0) {
        bool good = size - *at > digits;
        uint32_t code = good ? qlora__jin_hex(text + *at + 1, digits, &good) : 0;
        if (!good || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) {
            return qlora__jin_fail(p->m, "a string has an escape \\%c that is not a character", c);
        }
        *at += digits + 1;
        return qlora__jin_put_code(p->m, out, code);
    }
    if (c == 'N') {
        return qlora__jin_fail(p->m, "the escape \\N{...} is not supported");
    }
    if ((unsigned char)c >= 0x80) { // jinja2 decodes the string through ASCII
        char spelt[16];
        size_t step = 0;
        uint32_t code = qlora__jin_code_at(text, size, *at, &step);
        snprintf(spelt, sizeof spelt,
                 code < 0x100     ? "\\x%02x"
                 : code < 0x10000 ? "\\u%04x"
                                  : "\\U%08x",
                 (unsigned)code);
        *at += step;
        return qlora__jin_puts(p->m, out, spelt);
    }
    return qlora__jin_put(p->m, out, "\\", 1);
}

static qlora_result qlora__jin_unquote(qlora__jin_parser* p, qlora__jin_buffer* out) {
    const char* text = p->token->text + 1;
    size_t size = p->token->size - 2;
    size_t at = 0;
    while (at < size) {
        const char* slash = (const char*)memchr(text + at, '\\', size - at);
        size_t plain = slash != NULL ? (size_t)(slash - text) : size;
        QLORA__TRY(qlora__jin_put(p->m, out, text + at, plain - at));
        at = plain;
        if (slash != NULL) {
            at++;
            QLORA__TRY(qlora__jin_escape(p, text, size, &at, out));
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_integer(qlora__jin_parser* p, qlora__jin_value* out) {
    const char* text = p->token->text;
    size_t size = p->token->size;
    char kind = size > 2 && text[0] == '0' ? (char)(text[1] | 0x20) : '\0';
    uint64_t base = kind == 'x' ? 16 : kind == 'o' ? 8 : kind == 'b' ? 2 : 10;
    uint64_t value = 0;
    for (size_t i = base == 10 ? 0 : 2; i < size; i++) {
        bool good = true;
        if (text[i] == '_') {
            continue;
        }
        uint64_t digit = qlora__jin_hex(text + i, 1, &good);
        if (value > (INT64_MAX - digit) / base) {
            p->m->line = p->token->line;
            return qlora__jin_fail(p->m, "the integer %.*s does not fit 64 bits", (int)size, text);
        }
        value = value * base + digit;
    }
    *out = qlora__jin_int((int64_t)value);
    return QLORA_OK;
}

static qlora_result qlora__jin_real(qlora__jin_parser* p, qlora__jin_value* out) {
    char digits[400];
    size_t count = 0;
    for (size_t i = 0; i < p->token->size; i++) {
        if (p->token->text[i] != '_' && count < sizeof digits) {
            digits[count++] = p->token->text[i];
        }
    }
    *out = qlora__jin_float(qlora__number_parse(digits, count));
    return QLORA_OK;
}

// ---- primary expressions

static qlora_result qlora__jin_parse_tuple(qlora__jin_parser* p, bool conditional, bool parens,
                                           const char* end_name, qlora__jin_node** out) {
    qlora__jin_chain items;
    bool tuple = false;
    uint32_t line = p->token->line;
    memset(&items, 0, sizeof items);
    for (;;) {
        if (items.first != NULL) {
            QLORA__TRY(qlora__jin_need_operator(p, ","));
        }
        if (p->token->kind == QLORA__JIN_T_VARIABLE_END ||
            p->token->kind == QLORA__JIN_T_BLOCK_END || qlora__jin_at_operator(p, ")") ||
            (end_name != NULL && qlora__jin_at_name(p, end_name))) {
            break;
        }
        qlora__jin_node* item = NULL;
        QLORA__TRY(p->expression(p, conditional, &item));
        qlora__jin_chain_add(&items, item);
        if (!qlora__jin_at_operator(p, ",")) {
            break;
        }
        tuple = true;
    }
    if (!tuple && items.first != NULL) {
        *out = items.first;
        return QLORA_OK;
    }
    if (!tuple && !parens) {
        return qlora__jin_unexpected(p, "an expression");
    }
    QLORA__TRY(qlora__jin_node_of(p, QLORA__JIN_N_TUPLE, line, items.first, NULL, out));
    return qlora__jin_node_done(p, *out);
}

// [a, b] or {a: b, c: d}
static qlora_result qlora__jin_parse_items(qlora__jin_parser* p, bool dict, qlora__jin_node** out) {
    const char* close = dict ? "}" : "]";
    qlora__jin_chain items;
    uint32_t line = p->token->line;
    memset(&items, 0, sizeof items);
    qlora__jin_step(p);
    while (!qlora__jin_at_operator(p, close)) {
        if (items.first != NULL) {
            QLORA__TRY(qlora__jin_need_operator(p, ","));
            if (qlora__jin_at_operator(p, close)) {
                break;
            }
        }
        qlora__jin_node* item = NULL;
        QLORA__TRY(p->expression(p, true, &item));
        qlora__jin_chain_add(&items, item);
        if (dict) {
            QLORA__TRY(qlora__jin_need_operator(p, ":"));
            QLORA__TRY(p->expression(p, true, &item));
            qlora__jin_chain_add(&items, item);
        }
    }
    qlora__jin_step(p);
    QLORA__TRY(qlora__jin_node_of(p, dict ? QLORA__JIN_N_DICT : QLORA__JIN_N_LIST, line,
                                  items.first, NULL, out));
    return qlora__jin_node_done(p, *out);
}

static qlora_result qlora__jin_parse_name(qlora__jin_parser* p, qlora__jin_node** out) {
    static const char* const words[] = {"true", "True", "false", "False", "none", "None"};
    QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_NAME, out));
    (*out)->name = p->token->text;
    (*out)->size = p->token->size;
    for (size_t i = 0; i < QLORA__TEXT_COUNT(words); i++) {
        if (qlora__jin_at_name(p, words[i])) {
            (*out)->kind = QLORA__JIN_N_CONST;
            (*out)->value = i < 4 ? qlora__jin_bool(i < 2) : qlora__jin_none();
        }
    }
    qlora__jin_step(p);
    return QLORA_OK;
}

static qlora_result qlora__jin_parse_string(qlora__jin_parser* p, qlora__jin_node** out) {
    qlora__jin_buffer text;
    memset(&text, 0, sizeof text);
    QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_CONST, out));
    while (p->token->kind == QLORA__JIN_T_STRING) {
        QLORA__TRY(qlora__jin_unquote(p, &text));
        qlora__jin_step(p);
    }
    return qlora__jin_buffer_string(p->m, &text, &(*out)->value);
}

static qlora_result qlora__jin_parse_primary(qlora__jin_parser* p, qlora__jin_node** out) {
    switch (p->token->kind) {
    case QLORA__JIN_T_NAME:
        return qlora__jin_parse_name(p, out);
    case QLORA__JIN_T_STRING:
        return qlora__jin_parse_string(p, out);
    case QLORA__JIN_T_INTEGER:
    case QLORA__JIN_T_FLOAT:
        QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_CONST, out));
        QLORA__TRY(p->token->kind == QLORA__JIN_T_INTEGER ? qlora__jin_integer(p, &(*out)->value)
                                                          : qlora__jin_real(p, &(*out)->value));
        qlora__jin_step(p);
        return QLORA_OK;
    default:
        break;
    }
    if (qlora__jin_skip_operator(p, "(")) {
        QLORA__TRY(qlora__jin_parse_tuple(p, true, true, NULL, out));
        return qlora__jin_need_operator(p, ")");
    }
    if (qlora__jin_at_operator(p, "[") || qlora__jin_at_operator(p, "{")) {
        return qlora__jin_parse_items(p, qlora__jin_at_operator(p, "{"), out);
    }
    return qlora__jin_unexpected(p, "an expression");
}

// ---- calls, attributes, items, filters, tests

static qlora_result qlora__jin_parse_argument(qlora__jin_parser* p, qlora__jin_node* node,
                                              qlora__jin_chain* plain, qlora__jin_chain* named) {
    qlora__jin_node* value = NULL;
    bool star = qlora__jin_at_operator(p, "*");
    bool stars = qlora__jin_at_operator(p, "**");
    const qlora__jin_token* ahead = p->token + 1;
    bool keyword = p->token->kind == QLORA__JIN_T_NAME && ahead->kind == QLORA__JIN_T_OPERATOR &&
                   ahead->size == 1 && ahead->text[0] == '=';
    bool late = node->e != NULL || (star && node->d != NULL) ||
                (!keyword && !star && !stars && (node->d != NULL || named->first != NULL));
    if (late) {
        return qlora__jin_unexpected(p, "arguments in order");
    }
    if (star || stars) {
        qlora__jin_step(p);
        return p->expression(p, true, star ? &node->d : &node->e);
    }
    if (keyword) {
        qlora__jin_node* word = NULL;
        QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_KEYWORD, &word));
        word->name = p->token->text;
        word->size = p->token->size;
        p->token += 2;
        QLORA__TRY(p->expression(p, true, &word->a));
        QLORA__TRY(qlora__jin_node_done(p, word));
        // the value as a string is what a call passes on
        QLORA__TRY(qlora__jin_string_share(p->m, word->name, word->size, &word->value));
        for (const qlora__jin_node* n = named->first; n != NULL; n = n->next) {
            if (n->size == word->size && memcmp(n->name, word->name, n->size) == 0) {
                p->m->line = word->line;
                return qlora__jin_fail(p->m, "the argument \"%.*s\" is given twice",
                                       (int)(n->size < 60 ? n->size : 60), n->name);
            }
        }
        qlora__jin_chain_add(named, word);
        return QLORA_OK;
    }
    QLORA__TRY(p->expression(p, true, &value));
    qlora__jin_chain_add(plain, value);
    return QLORA_OK;
}

// (a, b=c, *d, **e) into b, c, d and e of the node.
static qlora_result qlora__jin_parse_arguments(qlora__jin_parser* p, qlora__jin_node* node) {
    qlora__jin_chain plain;
    qlora__jin_chain named;
    bool first = true;
    memset(&plain, 0, sizeof plain);
    memset(&named, 0, sizeof named);
    QLORA__TRY(qlora__jin_need_operator(p, "("));
    while (!qlora__jin_at_operator(p, ")")) {
        if (!first) {
            QLORA__TRY(qlora__jin_need_operator(p, ","));
            if (qlora__jin_at_operator(p, ")")) {
                break;
            }
        }
        QLORA__TRY(qlora__jin_parse_argument(p, node, &plain, &named));
        first = false;
    }
    qlora__jin_step(p);
    node->b = plain.first;
    node->c = named.first;
    return QLORA_OK;
}

static qlora_result qlora__jin_parse_call(qlora__jin_parser* p, qlora__jin_node** node) {
    qlora__jin_node* call = NULL;
    QLORA__TRY(qlora__jin_node_of(p, QLORA__JIN_N_CALL, p->token->line, *node, NULL, &call));
    QLORA__TRY(qlora__jin_parse_arguments(p, call));
    *node = call;
    return qlora__jin_node_done(p, call);
}

// What is between the brackets: an expression or a slice.
static qlora_result qlora__jin_parse_index(qlora__jin_parser* p, qlora__jin_node** out) {
    qlora__jin_node* parts[3] = {NULL, NULL, NULL};
    uint32_t line = p->token->line;
    if (!qlora__jin_at_operator(p, ":")) {
        QLORA__TRY(p->expression(p, true, &parts[0]));
        if (!qlora__jin_at_operator(p, ":")) {
            *out = parts[0];
            return QLORA_OK;
        }
    }
    for (int i = 1; i < 3 && qlora__jin_skip_operator(p, ":"); i++) {
        if (!qlora__jin_at_operator(p, ":") && !qlora__jin_at_operator(p, "]") &&
            !qlora__jin_at_operator(p, ",")) {
            QLORA__TRY(p->expression(p, true, &parts[i]));
        }
    }
    QLORA__TRY(qlora__jin_node_of(p, QLORA__JIN_N_SLICE, line, parts[0], parts[1], out));
    (*out)->c = parts[2];
    return qlora__jin_node_done(p, *out);
}

static qlora_result qlora__jin_parse_brackets(qlora__jin_parser* p, qlora__jin_node** out) {
    qlora__jin_chain items;
    uint32_t line = p->token->line;
    memset(&items, 0, sizeof items);
    while (!qlora__jin_at_operator(p, "]")) {
        qlora__jin_node* item = NULL;
        if (items.first != NULL) {
            QLORA__TRY(qlora__jin_need_operator(p, ","));
        }
        QLORA__TRY(qlora__jin_parse_index(p, &item));
        qlora__jin_chain_add(&items, item);
    }
    qlora__jin_step(p);
    *out = items.first;
    if (items.first == NULL || items.first->next != NULL) {
        QLORA__TRY(qlora__jin_node_of(p, QLORA__JIN_N_TUPLE, line, items.first, NULL, out));
        return qlora__jin_node_done(p, *out);
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_parse_subscript(qlora__jin_parser* p, qlora__jin_node** node) {
    qlora__jin_node* got = NULL;
    uint32_t line = p->token->line;
    if (qlora__jin_skip_operator(p, "[")) {
        QLORA__TRY(qlora__jin_node_of(p, QLORA__JIN_N_GETITEM, line, *node, NULL, &got));
        QLORA__TRY(qlora__jin_parse_brackets(p, &got->b));
        *node = got;
        return qlora__jin_node_done(p, got);
    }
    qlora__jin_step(p);
    if (p->token->kind == QLORA__JIN_T_NAME) {
        QLORA__TRY(qlora__jin_node_of(p, QLORA__JIN_N_GETATTR, line, *node, NULL, &got));
        got->name = p->token->text;
        got->size = p->token->size;
    } else if (p->token->kind == QLORA__JIN_T_INTEGER) {
        QLORA__TRY(qlora__jin_node_of(p, QLORA__JIN_N_GETITEM, line, *node, NULL, &got));
        QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_CONST, &got->b));
        QLORA__TRY(qlora__jin_integer(p, &got->b->value));
    } else {
        return qlora__jin_unexpected(p, "a name or a number");
    }
    qlora__jin_step(p);
    *node = got;
    return qlora__jin_node_done(p, got);
}

static qlora_result qlora__jin_parse_postfix(qlora__jin_parser* p, qlora__jin_node** node) {
    for (;;) {
        if (qlora__jin_at_operator(p, ".") || qlora__jin_at_operator(p, "[")) {
            QLORA__TRY(qlora__jin_parse_subscript(p, node));
        } else if (qlora__jin_at_operator(p, "(")) {
            QLORA__TRY(qlora__jin_parse_call(p, node));
        } else {
            return QLORA_OK;
        }
    }
}

// The name of a filter or a test, with dots.
static qlora_result qlora__jin_parse_dotted(qlora__jin_parser* p, qlora__jin_node* node) {
    qlora__jin_buffer name;
    memset(&name, 0, sizeof name);
    const qlora__jin_token* first = p->token;
    QLORA__TRY(qlora__jin_need_kind(p, QLORA__JIN_T_NAME, "a name"));
    QLORA__TRY(qlora__jin_put(p->m, &name, first->text, first->size));
    while (qlora__jin_skip_operator(p, ".")) {
        const qlora__jin_token* more = p->token;
        QLORA__TRY(qlora__jin_need_kind(p, QLORA__JIN_T_NAME, "a name"));
        QLORA__TRY(qlora__jin_put(p->m, &name, ".", 1));
        QLORA__TRY(qlora__jin_put(p->m, &name, more->text, more->size));
    }
    node->name = name.data;
    node->size = name.count;
    return QLORA_OK;
}

// The filters from here on; with `inlined`, the first one has no bar before it.
static qlora_result qlora__jin_parse_filter(qlora__jin_parser* p, bool inlined,
                                            qlora__jin_node** node) {
    while (inlined || qlora__jin_skip_operator(p, "|")) {
        qlora__jin_node* filter = NULL;
        inlined = false;
        QLORA__TRY(
            qlora__jin_node_of(p, QLORA__JIN_N_FILTER, p->token->line, *node, NULL, &filter));
        QLORA__TRY(qlora__jin_parse_dotted(p, filter));
        if (qlora__jin_at_operator(p, "(")) {
            QLORA__TRY(qlora__jin_parse_arguments(p, filter));
        }
        QLORA__TRY(qlora__jin_node_done(p, filter));
        *node = filter;
    }
    return QLORA_OK;
}

// Whether the argument of a test may start here without parentheses.
static bool qlora__jin_at_test_argument(const qlora__jin_parser* p) {
    switch (p->token->kind) {
    case QLORA__JIN_T_NAME:
        return !qlora__jin_at_name(p, "else") && !qlora__jin_at_name(p, "or") &&
               !qlora__jin_at_name(p, "and");
    case QLORA__JIN_T_STRING:
    case QLORA__JIN_T_INTEGER:
    case QLORA__JIN_T_FLOAT:
        return true;
    default:
        return qlora__jin_at_operator(p, "[") || qlora__jin_at_operator(p, "{");
    }
}

static qlora_result qlora__jin_parse_test(qlora__jin_parser* p, qlora__jin_node** node) {
    qlora__jin_node* test = NULL;
    uint32_t line = p->token->line;
    qlora__jin_step(p);
    bool negated = qlora__jin_skip_name(p, "not");
    QLORA__TRY(qlora__jin_node_of(p, QLORA__JIN_N_TEST, line, *node, NULL, &test));
    QLORA__TRY(qlora__jin_parse_dotted(p, test));
    if (qlora__jin_at_operator(p, "(")) {
        QLORA__TRY(qlora__jin_parse_arguments(p, test));
    } else if (qlora__jin_at_test_argument(p)) {
        if (qlora__jin_at_name(p, "is")) {
            return qlora__jin_unexpected(p, "only one test with is");
        }
        QLORA__TRY(qlora__jin_parse_primary(p, &test->b));
        QLORA__TRY(qlora__jin_parse_postfix(p, &test->b));
    }
    QLORA__TRY(qlora__jin_node_done(p, test));
    *node = test;
    if (negated) {
        QLORA__TRY(qlora__jin_node_of(p, QLORA__JIN_N_NOT, line, test, NULL, node));
        QLORA__TRY(qlora__jin_node_done(p, *node));
    }
    return QLORA_OK;
}

// ---- operators, from the tightest to the loosest

static qlora_result qlora__jin_parse_unary(qlora__jin_parser* p, bool filters,
                                           qlora__jin_node** out) {
    QLORA__TRY(qlora__jin_descend(p));
    uint32_t line = p->token->line;
    bool minus = qlora__jin_skip_operator(p, "-");
    if (minus || qlora__jin_skip_operator(p, "+")) {
        qlora__jin_node* inner = NULL;
        QLORA__TRY(p->unary(p, false, &inner));
        QLORA__TRY(qlora__jin_node_of(p, minus ? QLORA__JIN_N_NEG : QLORA__JIN_N_POS, line, inner,
                                      NULL, out));
        QLORA__TRY(qlora__jin_node_done(p, *out));
    } else {
        QLORA__TRY(qlora__jin_parse_primary(p, out));
    }
    QLORA__TRY(qlora__jin_parse_postfix(p, out));
    while (filters) {
        if (qlora__jin_at_operator(p, "|")) {
            QLORA__TRY(qlora__jin_parse_filter(p, false, out));
        } else if (qlora__jin_at_name(p, "is")) {
            QLORA__TRY(qlora__jin_parse_test(p, out));
        } else if (qlora__jin_at_operator(p, "(")) {
            QLORA__TRY(qlora__jin_parse_call(p, out));
        } else {
            break;
        }
    }
    p->depth--;
    return QLORA_OK;
}

typedef qlora_result (*qlora__jin_parse_fn)(qlora__jin_parser* p, qlora__jin_node** out);

// operand op operand op ..., grouped to the left.
static qlora_result qlora__jin_parse_left(qlora__jin_parser* p, const char* const* operators,
                                          size_t count, qlora__jin_parse_fn operand,
                                          qlora__jin_node** out) {
    QLORA__TRY(operand(p, out));
    for (;;) {
        size_t i = 0;
        uint32_t line = p->token->line;
        while (i < count && !qlora__jin_skip_operator(p, operators[i])) {
            i++;
        }
        if (i == count) {
            return QLORA_OK;
        }
        qlora__jin_node* node = NULL;
        qlora__jin_node* right = NULL;
        QLORA__TRY(operand(p, &right));
        QLORA__TRY(qlora__jin_node_of(p, QLORA__JIN_N_BINARY, line, *out, right, &node));
        node->op[0] = operators[i][0];
        node->op[1] = operators[i][1];
        QLORA__TRY(qlora__jin_node_done(p, node));
        *out = node;
    }
}

static qlora_result qlora__jin_parse_with_filters(qlora__jin_parser* p, qlora__jin_node** out) {
    return qlora__jin_parse_unary(p, true, out);
}

static qlora_result qlora__jin_parse_power(qlora__jin_parser* p, qlora__jin_node** out) {
    static const char* const operators[] = {"**"};
    return qlora__jin_parse_left(p, operators, 1, qlora__jin_parse_with_filters, out);
}

static qlora_result qlora__jin_parse_product(qlora__jin_parser* p, qlora__jin_node** out) {
    static const char* const operators[] = {"*", "/", "//", "%"};
    return qlora__jin_parse_left(p, operators, 4, qlora__jin_parse_power, out);
}

static qlora_result qlora__jin_parse_concat(qlora__jin_parser* p, qlora__jin_node** out) {
    qlora__jin_chain parts;
    uint32_t line = p->token->line;
    memset(&parts, 0, sizeof parts);
    QLORA__TRY(qlora__jin_parse_product(p, out));
    if (!qlora__jin_at_operator(p, "~")) {
        return QLORA_OK;
    }
    qlora__jin_chain_add(&parts, *out);
    while (qlora__jin_skip_operator(p, "~")) {
        qlora__jin_node* part = NULL;
        QLORA__TRY(qlora__jin_parse_product(p, &part));
        qlora__jin_chain_add(&parts, part);
    }
    QLORA__TRY(qlora__jin_node_of(p, QLORA__JIN_N_CONCAT, line, parts.first, NULL, out));
    return qlora__jin_node_done(p, *out);
}

static qlora_result qlora__jin_parse_sum(qlora__jin_parser* p, qlora__jin_node** out) {
    static const char* const operators[] = {"+", "-"};
    return qlora__jin_parse_left(p, operators, 2, qlora__jin_parse_concat, out);
}
