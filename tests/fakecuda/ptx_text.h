// ptx_text.h - reading PTX text: words, operands, variables. ptx_forms.h has the meaning of
// the forms.
#ifndef FAKECUDA_PTX_TEXT_H
#define FAKECUDA_PTX_TEXT_H

#include "ptx_hopper.h"

#define PTX_MAX_MODIFIERS 16
#define PTX_MAX_DEPTH 16
#define PTX_KNOWN 1024
#define PTX_CONSTANT_BIT 0x80000000u // an arg after the registers; resolved at kernel end

typedef struct ptx_token {
    const char* text;
    int line;
} ptx_token;

typedef struct ptx_registers { // .reg .b32 %r<57>; or one name, with count 0
    const char* name;
    u32 count;
    u32 at;
    u32 bytes;
    bool pred;
} ptx_registers;

typedef struct ptx_label {
    const char* name;
    u32 at; // instruction, or PTX_NONE until it is found
    int line;
} ptx_label;

typedef struct ptx_placed { // where this kernel placed a shared variable of the module
    const ptx_symbol* symbol;
    u32 at;
} ptx_placed;

typedef struct ptx_known ptx_known; // ptx_parse.h

typedef struct ptx_parser {
    ptx_token* tokens;
    u32 token_count;
    u32 next;
    char* log;
    size_t log_size;
    ptx_module* module;
    ptx_known* known; // an array of PTX_KNOWN
    // The kernel being parsed.
    ptx_kernel* kernel;
    ptx_registers* registers;
    u32 register_count;
    ptx_symbol* symbols; // symbols declared inside the kernel
    u32 symbol_count;
    ptx_placed* placed;
    u32 placed_count;
    ptx_label* labels;
    u32 label_count;
    u32 constant_bytes;
    u32 scope_registers[PTX_MAX_DEPTH];
    u32 scope_symbols[PTX_MAX_DEPTH];
    u32 depth;
} ptx_parser;

// ---- Errors and tokens --------------------------------------------------------------------------

static int parser_line(const ptx_parser* p) {
    const u32 at = p->next < p->token_count ? p->next : p->token_count - 1;
    return p->tokens[at].line;
}

#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
static bool
refuse(ptx_parser* p, int line, const char* format, ...) {
    if (p->log != NULL && p->log_size > 0 && p->log[0] == 0) { // the first reason is kept
        char text[256];
        va_list args;
        va_start(args, format);
        vsnprintf(text, sizeof text, format, args);
        va_end(args);
        snprintf(p->log, p->log_size, "line %d: %s", line, text);
    }
    return false;
}

static const char* peek(const ptx_parser* p) {
    return p->next < p->token_count ? p->tokens[p->next].text : "";
}

static const char* take(ptx_parser* p) {
    const char* text = peek(p);
    p->next += p->next < p->token_count;
    return text;
}

static bool accept(ptx_parser* p, const char* text) {
    if (!same(peek(p), text)) {
        return false;
    }
    p->next++;
    return true;
}

static bool expect(ptx_parser* p, const char* text) {
    if (accept(p, text)) {
        return true;
    }
    return refuse(p, parser_line(p), "expected '%s', found '%s'", text, peek(p));
}

static bool is_word_char(const char* s) {
    return isalnum((unsigned char)*s) || *s == '_' || *s == '$' || *s == '%' || *s == '.';
}

// Length of the word at s. "::" belongs to a word (L2::128B), a single colon ends a label.
static size_t word_length(const char* s) {
    size_t n = 0;
    while (s[n] != 0) {
        if (is_word_char(s + n)) {
            n++;
        } else if (n > 0 && s[n] == ':' && s[n + 1] == ':') {
            n += 2;
        } else {
            break;
        }
    }
    return n;
}

// Skips white space, comments and the line directives of debug information.
static const char* skip_blank(const char* s, int* line) {
    for (;;) {
        if (*s == '\n') {
            (*line)++;
            s++;
        } else if (isspace((unsigned char)*s)) {
            s++;
        } else if (s[0] == '/' && s[1] == '/') {
            s += strcspn(s, "\n");
        } else if (s[0] == '/' && s[1] == '*') {
            for (s += 2; *s != 0 && !(s[0] == '*' && s[1] == '/'); s++) {
                *line += *s == '\n';
            }
            s += *s != 0 ? 2 : 0;
        } else if (strncmp(s, ".loc", 4) == 0 && !is_word_char(s + 4)) {
            s += strcspn(s, "\n");
        } else if (strncmp(s, ".file", 5) == 0 && !is_word_char(s + 5)) {
            s += strcspn(s, "\n");
        } else {
            return s;
        }
    }
}

// Splits the text into words, strings and single characters, which are stored in module->pool.
static void tokenize(ptx_parser* p, const char* text) {
    const size_t length = strlen(text);
    char* out = (char*)must_alloc(2 * length + 2);
    p->module->pool = out;
    int line = 1;
    for (const char* s = skip_blank(text, &line); *s != 0; s = skip_blank(s, &line)) {
        size_t n = word_length(s);
        if (*s == '"') {
            n = 1 + strcspn(s + 1, "\"\n");
            n += s[n] == '"';
        }
        n = n == 0 ? 1 : n;
        p->tokens = (ptx_token*)grow(p->tokens, p->token_count, sizeof *p->tokens);
        const ptx_token token = {out, line};
        p->tokens[p->token_count++] = token;
        memcpy(out, s, n);
        out[n] = 0;
        out += n + 1;
        s += n;
    }
}

static ptx_type type_named(const char* name) {
    for (u32 i = 1; i < PTX_TYPE_COUNT; i++) {
        if (same(PTX_TYPES[i].name, name)) {
            return (ptx_type)i;
        }
    }
    return TYPE_NONE;
}

// ---- Numbers ------------------------------------------------------------------------------------

typedef enum ptx_number_kind {
    NUMBER_NONE,
    NUMBER_INTEGER,
    NUMBER_F32,
    NUMBER_F64
} ptx_number_kind;

// 12, 0x1F, 017, 5U, 0f3F800000 (f32 bits), 0d3FF0000000000000 (f64 bits).
static ptx_number_kind read_number(const char* s, u64* value) {
    char* end = NULL;
    if (!isdigit((unsigned char)s[0])) {
        return NUMBER_NONE;
    }
    const bool f32_form = s[0] == '0' && (s[1] == 'f' || s[1] == 'F');
    const bool f64_form = s[0] == '0' && (s[1] == 'd' || s[1] == 'D');
    if (f32_form || f64_form) {
        *value = strtoull(s + 2, &end, 16);
        const size_t digits = f32_form ? 8 : 16;
        if (*end != 0 || strlen(s + 2) != digits) {
            return NUMBER_NONE;
        }
        return f32_form ? NUMBER_F32 : NUMBER_F64;
    }
    *value = strtoull(s, &end, 0);
    end += *end == 'U';
    return *end == 0 ? NUMBER_INTEGER : NUMBER_NONE;
}

static bool take_integer(ptx_parser* p, s64* value) {
    const bool negative = accept(p, "-");
    u64 raw = 0;
    if (read_number(peek(p), &raw) != NUMBER_INTEGER) {
        return refuse(p, parser_line(p), "expected a number, found '%s'", peek(p));
    }
    take(p);
    *value = (s64)(negative ? 0 - raw : raw);
    return true;
}

static bool take_u32(ptx_parser* p, u32* value) {
    s64 wide = 0;
    if (!take_integer(p, &wide)) {
        return false;
    }
    if (wide < 0 || wide > 0x7fffffff) {
        return refuse(p, parser_line(p), "number out of range");
    }
    *value = (u32)wide;
    return true;
}

// ---- Names --------------------------------------------------------------------------------------

enum { // rows of PTX_SPECIALS
    SPECIAL_TID,
    SPECIAL_NTID = 3,
    SPECIAL_CTAID = 6,
    SPECIAL_NCTAID = 9,
    SPECIAL_LANEID = 12,
    SPECIAL_WARPID,
    SPECIAL_NWARPID,
    SPECIAL_MASK_EQ,
    SPECIAL_MASK_LE,
    SPECIAL_MASK_LT,
    SPECIAL_MASK_GE,
    SPECIAL_MASK_GT,
    SPECIAL_SMID,
    SPECIAL_NSMID,
    SPECIAL_GRIDID,
    SPECIAL_DYNAMIC_SHARED,
    SPECIAL_TOTAL_SHARED
};

static const char* const PTX_SPECIALS[] = {
    "%tid.x",           "%tid.y",       "%tid.z",
    "%ntid.x",          "%ntid.y",      "%ntid.z",
    "%ctaid.x",         "%ctaid.y",     "%ctaid.z",
    "%nctaid.x",        "%nctaid.y",    "%nctaid.z",
    "%laneid",          "%warpid",      "%nwarpid",
    "%lanemask_eq",     "%lanemask_le", "%lanemask_lt",
    "%lanemask_ge",     "%lanemask_gt", "%smid",
    "%nsmid",           "%gridid",      "%dynamic_smem_size",
    "%total_smem_size",
};

#define PTX_SPECIAL_COUNT (sizeof PTX_SPECIALS / sizeof PTX_SPECIALS[0])

static bool is_clock(const char* name) {
    return same(name, "%clock") || same(name, "%clock64") || same(name, "%globaltimer") ||
           same(name, "%clock_hi") || same(name, "%globaltimer_lo");
}

// Bytes of one register, for all lanes; a predicate is one word.
static u32 register_stride(u32 bytes, bool pred) {
    return pred ? 4 : bytes * PTX_LANES;
}

typedef struct ptx_ref {
    u32 at;
    u32 bytes;
    bool pred;
    bool writable;
} ptx_ref;

// %r12 in a range %r<57>, or a name declared on its own. The newest declaration wins.
static bool find_register(const ptx_parser* p, const char* name, ptx_ref* ref) {
    size_t stem = strlen(name);
    while (stem > 0 && isdigit((unsigned char)name[stem - 1])) {
        stem--;
    }
    const u64 number = name[stem] ? strtoull(name + stem, NULL, 10) : 0;
    for (u32 i = p->register_count; i-- > 0;) {
        const ptx_registers* r = &p->registers[i];
        u32 index = 0;
        if (r->count > 0) {
            if (name[stem] == 0 || strlen(r->name) != stem || strncmp(r->name, name, stem) != 0 ||
                number >= r->count) {
                continue;
            }
            index = (u32)number;
        } else if (!same(r->name, name)) {
            continue;
        }
        ref->at = r->at + index * register_stride(r->bytes, r->pred);
        ref->bytes = r->bytes;
        ref->pred = r->pred;
        ref->writable = true;
        return true;
    }
    return false;
}

static const ptx_symbol* find_symbol(const ptx_parser* p, const char* name) {
    for (u32 i = p->symbol_count; i-- > 0;) {
        if (same(p->symbols[i].name, name)) {
            return &p->symbols[i];
        }
    }
    for (u32 i = 0; i < p->module->symbol_count; i++) {
        if (same(p->module->symbols[i].name, name)) {
            return &p->module->symbols[i];
        }
    }
    return NULL;
}

static const ptx_param* find_param(const ptx_parser* p, const char* name) {
    for (u32 i = 0; i < p->kernel->param_count; i++) {
        if (same(p->kernel->params[i].name, name)) {
            return &p->kernel->params[i];
        }
    }
    return NULL;
}

// A constant is a register that is never written, one per width and value.
static u32 add_constant(ptx_parser* p, u32 bytes, u64 value, bool dynamic) {
    ptx_kernel* k = p->kernel;
    for (u32 i = 0; i < k->constant_count; i++) {
        const ptx_constant* c = &k->constants[i];
        if (c->bytes == bytes && c->value == value && c->dynamic_shared == dynamic) {
            return c->at;
        }
    }
    k->constants = (ptx_constant*)grow(k->constants, k->constant_count, sizeof *k->constants);
    const ptx_constant c = {p->constant_bytes | PTX_CONSTANT_BIT, bytes, value, dynamic};
    k->constants[k->constant_count++] = c;
    p->constant_bytes += bytes * PTX_LANES;
    return c.at;
}

static u32 add_special(ptx_parser* p, u32 id) {
    ptx_kernel* k = p->kernel;
    for (u32 i = 0; i < k->special_count; i++) {
        if (k->specials[i].id == id) {
            return k->specials[i].at;
        }
    }
    k->specials = (ptx_special*)grow(k->specials, k->special_count, sizeof *k->specials);
    const ptx_special s = {p->constant_bytes | PTX_CONSTANT_BIT, id};
    k->specials[k->special_count++] = s;
    p->constant_bytes += 4 * PTX_LANES;
    return s.at;
}

// Address of a symbol. A shared variable of the module is placed separately in each kernel that
// uses it.
static u64 symbol_address(ptx_parser* p, const ptx_symbol* symbol) {
    ptx_kernel* k = p->kernel;
    const bool inside_kernel =
        p->symbol_count > 0 && symbol >= p->symbols && symbol < p->symbols + p->symbol_count;
    if (symbol->space != SPACE_SHARED || symbol->dynamic || inside_kernel) {
        if (symbol->dynamic && symbol->align > k->dynamic_align) {
            k->dynamic_align = symbol->align;
        }
        return symbol->address;
    }
    for (u32 i = 0; i < p->placed_count; i++) {
        if (p->placed[i].symbol == symbol) {
            return p->placed[i].at;
        }
    }
    k->static_shared = round_up(k->static_shared, symbol->align);
    p->placed = (ptx_placed*)grow(p->placed, p->placed_count, sizeof *p->placed);
    const ptx_placed placed = {symbol, k->static_shared};
    p->placed[p->placed_count++] = placed;
    k->static_shared += symbol->bytes;
    return placed.at;
}

// ---- Operands -----------------------------------------------------------------------------------

static bool constant_ref(ptx_parser* p, u32 bytes, u64 value, bool dynamic, ptx_ref* ref) {
    ref->at = add_constant(p, bytes, value, dynamic);
    ref->bytes = bytes;
    ref->pred = false;
    ref->writable = false;
    return true;
}

static bool take_immediate(ptx_parser* p, ptx_type type, ptx_ref* ref) {
    const int line = parser_line(p);
    const bool negative = accept(p, "-");
    const char* text = take(p);
    const ptx_type_info* info = &PTX_TYPES[type];
    u64 value = 0;
    const ptx_number_kind kind = read_number(text, &value);
    if (kind == NUMBER_F32 || kind == NUMBER_F64) {
        const bool fits = info->bytes == (kind == NUMBER_F32 ? 4u : 8u) && type != TYPE_PRED;
        if (!fits || negative) {
            return refuse(p, line, "'%s' does not fit .%s", text, info->name);
        }
        return constant_ref(p, info->bytes, value, false, ref);
    }
    if (kind != NUMBER_INTEGER || info->kind == 'f') {
        return refuse(p, line, "operand '%s' is unknown or not of type .%s", text, info->name);
    }
    if (type == TYPE_PRED) {
        constant_ref(p, 4, value ? PTX_FULL : 0, false, ref);
        ref->pred = true;
        return true;
    }
    const u32 bits = 8 * info->bytes;
    const u64 limit = negative ? (u64)1 << (bits - 1) : field_mask(bits);
    if (value > limit) {
        return refuse(p, line, "'%s%s' does not fit .%s", negative ? "-" : "", text, info->name);
    }
    const u32 bytes = info->bytes < 2 ? 2 : info->bytes;
    return constant_ref(p, bytes, (negative ? 0 - value : value) & field_mask(8 * bytes), false,
                        ref);
}

// The address of a variable or parameter as a number.
static bool take_symbol(ptx_parser* p, u32 bytes, ptx_ref* ref) {
    const int line = parser_line(p);
    const char* name = take(p);
    const ptx_param* param = find_param(p, name);
    if (param != NULL) {
        return constant_ref(p, bytes, param->at, false, ref);
    }
    const ptx_symbol* symbol = find_symbol(p, name);
    if (symbol == NULL) {
        return refuse(p, line, "unknown name '%s'", name);
    }
    const bool narrow = symbol->space == SPACE_SHARED || symbol->space == SPACE_LOCAL;
    if (bytes != 8 && !(bytes == 4 && narrow)) {
        return refuse(p, line, "the address of '%s' does not fit %u bytes", name, bytes);
    }
    return constant_ref(p, bytes, symbol_address(p, symbol), symbol->dynamic, ref);
}

// One operand as a source. A register may be wider than the type if the instruction allows it.
static bool take_source(ptx_parser* p, ptx_type type, bool wider, ptx_ref* ref) {
    const int line = parser_line(p);
    const char* name = peek(p);
    const u32 bytes = PTX_TYPES[type].bytes < 2 ? 2 : PTX_TYPES[type].bytes;
    if (name[0] == '-' || isdigit((unsigned char)name[0])) {
        return take_immediate(p, type, ref);
    }
    if (same(name, "WARP_SZ")) {
        take(p);
        return constant_ref(p, bytes, PTX_LANES, false, ref);
    }
    if (find_register(p, name, ref)) {
        take(p);
        if (ref->pred != (type == TYPE_PRED) || ref->bytes < bytes ||
            (ref->bytes > bytes && !wider)) {
            return refuse(p, line, "register '%s' does not hold .%s", name, PTX_TYPES[type].name);
        }
        return true;
    }
    for (u32 i = 0; i < PTX_SPECIAL_COUNT; i++) {
        if (same(name, PTX_SPECIALS[i])) {
            take(p);
            if (bytes != 4) {
                return refuse(p, line, "'%s' is read as .u32 only", name);
            }
            ref->at = add_special(p, i);
            ref->bytes = 4;
            ref->pred = false;
            ref->writable = false;
            return true;
        }
    }
    if (PTX_TYPES[type].kind == 'f' || type == TYPE_PRED) {
        return refuse(p, line, "operand '%s' is unknown or not .%s", name, PTX_TYPES[type].name);
    }
    return take_symbol(p, bytes, ref);
}

static bool put_arg(ptx_insn* in, u32 index, const ptx_ref* ref) {
    in->arg[index] = ref->at;
    in->width[index] = (u8)ref->bytes;
    return true;
}

static bool take_source_arg(ptx_parser* p, ptx_insn* in, u32 index, ptx_type type, bool wider) {
    ptx_ref ref;
    return take_source(p, type, wider, &ref) && put_arg(in, index, &ref);
}

// A result register, or "_" if the value is discarded.
static bool take_result_arg(ptx_parser* p, ptx_insn* in, u32 index, ptx_type type, bool wider) {
    const int line = parser_line(p);
    const char* name = take(p);
    const u32 bytes = PTX_TYPES[type].bytes < 2 ? 2 : PTX_TYPES[type].bytes;
    in->results |= 1u << index;
    if (same(name, "_")) {
        in->arg[index] = PTX_NONE;
        in->width[index] = (u8)bytes;
        return true;
    }
    ptx_ref ref;
    if (!find_register(p, name, &ref)) {
        return refuse(p, line, "'%s' is not a register", name);
    }
    if (ref.pred != (type == TYPE_PRED) || ref.bytes < bytes || (ref.bytes > bytes && !wider)) {
        return refuse(p, line, "register '%s' does not hold .%s", name, PTX_TYPES[type].name);
    }
    return put_arg(in, index, &ref);
}

// A predicate, which may be written as !p.
static bool take_pred_arg(ptx_parser* p, ptx_insn* in, u32 index) {
    if (accept(p, "!")) {
        in->negated |= 1u << index;
    }
    return take_source_arg(p, in, index, TYPE_PRED, false);
}

// [%rd1+-4], [name+8], [1024]
static bool take_address(ptx_parser* p, ptx_insn* in, u32 index, s64* offset) {
    const int line = parser_line(p);
    if (!expect(p, "[")) {
        return false;
    }
    ptx_ref ref;
    const char* name = peek(p);
    *offset = 0;
    if (find_register(p, name, &ref)) {
        take(p);
        if (ref.pred || ref.bytes < 4) {
            return refuse(p, line, "register '%s' does not hold an address", name);
        }
    } else if (isdigit((unsigned char)name[0])) {
        if (!take_immediate(p, TYPE_U64, &ref)) {
            return false;
        }
    } else if (!take_symbol(p, 8, &ref)) {
        return false;
    }
    if (accept(p, "+")) {
        if (!take_integer(p, offset)) {
            return false;
        }
    } else if (same(peek(p), "-") && !take_integer(p, offset)) {
        return false;
    }
    return expect(p, "]") && put_arg(in, index, &ref);
}

// ---- Variables ----------------------------------------------------------------------------------

static bool read_initial(ptx_parser* p, u8* to, u32 bytes, ptx_type type) {
    const int line = parser_line(p);
    const u32 element = PTX_TYPES[type].bytes;
    const bool list = accept(p, "{");
    u32 at = 0;
    do {
        const bool negative = accept(p, "-");
        u64 value = 0;
        if (at + element > bytes || read_number(take(p), &value) == NUMBER_NONE) {
            return refuse(p, line, "initial value is not a number, or one too many");
        }
        memory_put(to + at, element, negative ? 0 - value : value);
        at += element;
    } while (list && accept(p, ","));
    return !list || expect(p, "}");
}

// Allocates a .global or .const variable in the module's own memory.
static u32 place_data(ptx_module* m, u32 bytes, u32 align, bool readonly) {
    const u32 at = round_up(m->data_bytes, align);
    m->data = (u8*)must(realloc(m->data, (size_t)at + bytes + 1));
    m->readonly = (bool*)must(realloc(m->readonly, ((size_t)at + bytes + 1) * sizeof *m->readonly));
    memset(m->data + m->data_bytes, 0, at + bytes - m->data_bytes);
    for (u32 i = m->data_bytes; i < at + bytes; i++) {
        m->readonly[i] = readonly;
    }
    m->data_bytes = at + bytes;
    return at;
}

static bool place_symbol(ptx_parser* p, ptx_symbol* symbol, ptx_type type, bool is_extern) {
    ptx_kernel* k = p->kernel;
    const int line = parser_line(p);
    switch (symbol->space) {
    case SPACE_SHARED:
        symbol->dynamic = is_extern;
        if (is_extern || k == NULL) {
            break;
        }
        k->static_shared = round_up(k->static_shared, symbol->align);
        symbol->address = k->static_shared;
        k->static_shared += symbol->bytes;
        break;
    case SPACE_LOCAL:
        if (k == NULL) {
            return refuse(p, line, ".local outside a kernel");
        }
        k->local_bytes = round_up(k->local_bytes, symbol->align);
        symbol->address = k->local_bytes;
        k->local_bytes += symbol->bytes;
        break;
    default: {
        const u32 at =
            place_data(p->module, symbol->bytes, symbol->align, symbol->space == SPACE_CONST);
        symbol->address = PTX_MODULE_BASE + at;
        if (accept(p, "=")) {
            return read_initial(p, p->module->data + at, symbol->bytes, type);
        }
        break;
    }
    }
    return true;
}

static bool read_extent(ptx_parser* p, ptx_symbol* symbol, bool is_extern) {
    while (accept(p, "[")) {
        u32 count = 0;
        if (!same(peek(p), "]") && !take_u32(p, &count)) {
            return false;
        }
        if (count == 0 && !is_extern) {
            return refuse(p, parser_line(p), "'%s' has no size", symbol->name);
        }
        symbol->bytes *= count;
        if (!expect(p, "]")) {
            return false;
        }
    }
    return true;
}

// After .shared and similar: [.align n] .type name[n] [= value];
static bool read_variable(ptx_parser* p, ptx_space space, bool is_extern) {
    const int line = parser_line(p);
    ptx_symbol symbol = {"", space, 0, 0, 0, false};
    ptx_type type = TYPE_NONE;
    while (peek(p)[0] == '.') {
        const char* word = take(p);
        if (same(word, ".align")) {
            if (!take_u32(p, &symbol.align)) {
                return false;
            }
        } else if ((type = type_named(word + 1)) == TYPE_NONE || type == TYPE_PRED) {
            return refuse(p, line, "'%s' in a variable is not supported", word);
        }
    }
    if (type == TYPE_NONE) {
        return refuse(p, line, "variable without a type");
    }
    symbol.name = take(p);
    symbol.bytes = PTX_TYPES[type].bytes;
    symbol.align = symbol.align ? symbol.align : symbol.bytes;
    if ((symbol.align & (symbol.align - 1)) != 0 || symbol.align > 1024) {
        return refuse(p, line, "alignment %u", symbol.align);
    }
    if (is_extern && space != SPACE_SHARED) {
        return refuse(p, line, ".extern is supported for .shared only");
    }
    if (!read_extent(p, &symbol, is_extern) || !place_symbol(p, &symbol, type, is_extern)) {
        return false;
    }
    if (p->kernel != NULL) {
        p->symbols = (ptx_symbol*)grow(p->symbols, p->symbol_count, sizeof *p->symbols);
        p->symbols[p->symbol_count++] = symbol;
    } else {
        ptx_module* m = p->module;
        m->symbols = (ptx_symbol*)grow(m->symbols, m->symbol_count, sizeof *m->symbols);
        m->symbols[m->symbol_count++] = symbol;
    }
    return expect(p, ";");
}

#endif
