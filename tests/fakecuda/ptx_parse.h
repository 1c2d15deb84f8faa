// ptx_parse.h - turns PTX text into a module: directives, kernels, statements.
#ifndef FAKECUDA_PTX_PARSE_H
#define FAKECUDA_PTX_PARSE_H

#include "ptx_forms.h"
#include "ptx_registers.h"

// ---- Instructions -------------------------------------------------------------------------------

typedef struct ptx_modifier {
    const char* name;
    u32 flags;
    ptx_round round;
} ptx_modifier;

// Modifiers with the same meaning in every instruction.
static const ptx_modifier PTX_MODIFIERS[] = {
    {"ftz", FLAG_FTZ, ROUND_NEAREST},
    {"sat", FLAG_SAT, ROUND_NEAREST},
    {"relu", FLAG_RELU, ROUND_NEAREST},
    {"trans", FLAG_TRANS, ROUND_NEAREST},
    {"rn", FLAG_ROUNDED, ROUND_NEAREST},
    {"rz", FLAG_ROUNDED, ROUND_ZERO},
    {"rm", FLAG_ROUNDED, ROUND_DOWN},
    {"rp", FLAG_ROUNDED, ROUND_UP},
    {"rna", FLAG_ROUNDED, ROUND_AWAY},
    {"rni", FLAG_ROUNDED | FLAG_TO_INTEGER, ROUND_NEAREST},
    {"rzi", FLAG_ROUNDED | FLAG_TO_INTEGER, ROUND_ZERO},
    {"rmi", FLAG_ROUNDED | FLAG_TO_INTEGER, ROUND_DOWN},
    {"rpi", FLAG_ROUNDED | FLAG_TO_INTEGER, ROUND_UP},
};

// Whether the form can belong to this opcode: a quick test before the full comparison.
static bool form_may_be(const char* form, const char* opcode, size_t length) {
    if (strncmp(form, opcode, length) == 0 && !isalnum((unsigned char)form[length])) {
        return true;
    }
    while (isalnum((unsigned char)*form)) {
        form++;
    }
    return *form == '|';
}

static const ptx_form* find_form(char* const* words, u32 count, ptx_match* match) {
    const size_t length = strlen(words[0]);
    for (u32 i = 0; i < sizeof PTX_FORMS / sizeof PTX_FORMS[0]; i++) {
        const char* form = PTX_FORMS[i].form;
        if (form_may_be(form, words[0], length) && form_matches(form, words, count, match)) {
            return &PTX_FORMS[i];
        }
    }
    return NULL;
}

// A mnemonic seen before, with everything that depends on it alone. A module has some hundred of
// them and tens of thousands of instructions.
struct ptx_known {
    const char* name; // NULL: free
    const ptx_form* form;
    ptx_match match; // points into words
    u32 flags;
    u8 round;
    char words[160];
};

static bool know(ptx_parser* p, ptx_known* k, const char* name, int line) {
    if (strlen(name) >= sizeof k->words) {
        return refuse(p, line, "instruction too long");
    }
    memcpy(k->words, name, strlen(name) + 1);
    char* words[PTX_MAX_MODIFIERS];
    u32 count = 0;
    for (char* s = k->words; s != NULL;) {
        if (count == PTX_MAX_MODIFIERS) {
            return refuse(p, line, "too many modifiers: %s", name);
        }
        words[count++] = s;
        s = strchr(s, '.');
        if (s != NULL) {
            *s++ = 0;
        }
    }
    k->form = find_form(words, count, &k->match);
    if (k->form == NULL) {
        return refuse(p, line, "unknown instruction '%s'", name);
    }
    for (u32 i = 1; i < count; i++) {
        for (u32 m = 0; m < sizeof PTX_MODIFIERS / sizeof PTX_MODIFIERS[0]; m++) {
            if (same(words[i], PTX_MODIFIERS[m].name)) {
                k->flags |= PTX_MODIFIERS[m].flags;
                k->round = (u8)(k->round | PTX_MODIFIERS[m].round);
            }
        }
    }
    k->name = name;
    return true;
}

// The entry of a mnemonic, created on first use; NULL if the form is rejected.
static const ptx_known* look_up(ptx_parser* p, const char* name, int line) {
    u32 hash = 2166136261u;
    for (const char* s = name; *s != 0; s++) {
        hash = (hash ^ (u8)*s) * 16777619u;
    }
    u32 at = hash % PTX_KNOWN;
    for (u32 tries = 0; p->known[at].name != NULL; tries++, at = (at + 1) % PTX_KNOWN) {
        if (same(p->known[at].name, name)) {
            return &p->known[at];
        }
        if (tries == PTX_KNOWN / 2) { // nearly full: replace this entry
            memset(&p->known[at], 0, sizeof p->known[at]);
            break;
        }
    }
    return know(p, &p->known[at], name, line) ? &p->known[at] : NULL;
}

// Reads the operands that the letters of a row call for.
static bool take_args(ptx_parser* p, const char* letters, ptx_insn* in) {
    for (u32 i = 0; letters[i] != 0; i++) {
        ptx_type type = TYPE_B32;
        switch (letters[i]) {
        case 'p':
            type = TYPE_PRED;
            break;
        case 'h':
            type = TYPE_B16;
            break;
        case 'l':
            type = TYPE_B64;
            break;
        case 'f':
            type = TYPE_F32;
            break;
        case 'd':
            type = TYPE_F64;
            break;
        default:
            break;
        }
        if (i > 0 && !expect(p, ",")) {
            return false;
        }
        if (letters[i] == 'i') {
            if (!take_integer(p, &in->offset)) {
                return false;
            }
        } else if (i == 0 && letters[i] != 'n') {
            if (!take_result_arg(p, in, i, type, false)) {
                return false;
            }
            if (in->arg[i] == PTX_NONE) {
                return refuse(p, in->line, "%s needs a result register", in->name);
            }
        } else if (!take_source_arg(p, in, i, type, false)) {
            return false;
        }
    }
    return true;
}

static void add_insn(ptx_kernel* k, const ptx_insn* in) {
    k->code = (ptx_insn*)grow(k->code, k->code_count, sizeof *k->code);
    k->code[k->code_count++] = *in;
}

static bool read_guard(ptx_parser* p, ptx_insn* in) {
    in->guard = PTX_NONE;
    if (!accept(p, "@")) {
        return true;
    }
    if (accept(p, "!")) {
        in->negated |= 1u << 31;
    }
    ptx_ref ref;
    if (!take_source(p, TYPE_PRED, false, &ref)) {
        return false;
    }
    in->guard = ref.at;
    return true;
}

static bool read_instruction(ptx_parser* p) {
    ptx_insn in;
    memset(&in, 0, sizeof in);
    in.line = parser_line(p);
    if (!read_guard(p, &in)) {
        return false;
    }
    in.name = take(p);
    const ptx_known* known = look_up(p, in.name, in.line);
    if (known == NULL) {
        return false;
    }
    const ptx_form* form = known->form;
    in.flags = known->flags;
    in.round = known->round;
    in.exec = form->exec;
    const bool ok = form->decode ? form->decode(p, &known->match, &in)
                    : form->args ? take_args(p, form->args, &in)
                                 : true;
    if (!ok || !expect(p, ";")) {
        return false;
    }
    add_insn(p->kernel, &in);
    return true;
}

// ---- Statements ---------------------------------------------------------------------------------

// .reg .b32 %r<57>, a, b; starting after the type
static bool read_registers(ptx_parser* p, const char* word) {
    const int line = parser_line(p);
    const ptx_type type = word[0] == '.' ? type_named(word + 1) : TYPE_NONE;
    if (type == TYPE_NONE) {
        return refuse(p, line, "registers of type '%s'", word);
    }
    ptx_kernel* k = p->kernel;
    do {
        const u32 bytes = PTX_TYPES[type].bytes < 2 ? 2 : PTX_TYPES[type].bytes;
        ptx_registers r = {take(p), 0, round_up(k->register_bytes, 64), bytes, type == TYPE_PRED};
        if (accept(p, "<") && (!take_u32(p, &r.count) || !expect(p, ">"))) {
            return false;
        }
        const u64 size = (u64)register_stride(bytes, r.pred) * (r.count ? r.count : 1);
        if (size + r.at > 0x10000000u) {
            return refuse(p, line, "too many registers");
        }
        k->register_bytes = r.at + (u32)size;
        p->registers = (ptx_registers*)grow(p->registers, p->register_count, sizeof *p->registers);
        p->registers[p->register_count++] = r;
    } while (accept(p, ","));
    return expect(p, ";");
}

// name: .branchtargets a, b, c;
static bool read_table(ptx_parser* p, u32 label) {
    ptx_kernel* k = p->kernel;
    k->tables = (ptx_table*)grow(k->tables, k->table_count, sizeof *k->tables);
    ptx_table* table = &k->tables[k->table_count];
    memset(table, 0, sizeof *table);
    p->labels[label].at = k->table_count++ | PTX_CONSTANT_BIT;
    do {
        table->target = (u32*)grow(table->target, table->count, sizeof *table->target);
        table->target[table->count++] = label_named(p, take(p));
    } while (accept(p, ","));
    return expect(p, ";");
}

static bool read_label(ptx_parser* p) {
    const int line = parser_line(p);
    const char* name = take(p);
    const u32 label = label_named(p, name);
    take(p); // the colon
    if (p->labels[label].at != PTX_NONE) {
        return refuse(p, line, "duplicate label '%s'", name);
    }
    if (accept(p, ".branchtargets")) {
        return read_table(p, label);
    }
    p->labels[label].at = p->kernel->code_count;
    return true;
}

static bool read_scope(ptx_parser* p, bool open) {
    if (open) {
        if (p->depth == PTX_MAX_DEPTH) {
            return refuse(p, parser_line(p), "scopes nest too deeply");
        }
        p->scope_registers[p->depth] = p->register_count;
        p->scope_symbols[p->depth] = p->symbol_count;
        p->depth++;
        return true;
    }
    p->depth--;
    // The capacity of an array is derived from its count, so the count is kept and the names are
    // hidden instead of removed.
    for (u32 i = p->scope_registers[p->depth]; i < p->register_count; i++) {
        p->registers[i].name = "";
    }
    for (u32 i = p->scope_symbols[p->depth]; i < p->symbol_count; i++) {
        p->symbols[i].name = "";
    }
    return true;
}

static bool read_directive(ptx_parser* p) {
    const int line = parser_line(p);
    const char* word = take(p);
    if (same(word, ".reg")) {
        return read_registers(p, take(p));
    }
    if (strncmp(word, ".reg.", 5) == 0) {
        return read_registers(p, word + 4);
    }
    if (same(word, ".shared")) {
        return read_variable(p, SPACE_SHARED, false);
    }
    if (same(word, ".local")) {
        return read_variable(p, SPACE_LOCAL, false);
    }
    if (same(word, ".pragma")) {
        take(p);
        return expect(p, ";");
    }
    return refuse(p, line, "directive '%s' is not supported", word);
}

// Everything between the braces of a kernel.
static bool read_body(ptx_parser* p) {
    if (!expect(p, "{")) {
        return false;
    }
    p->depth = 0;
    read_scope(p, true);
    while (p->depth > 0) {
        const char* word = peek(p);
        if (word[0] == 0) {
            return refuse(p, parser_line(p), "the text ends inside a kernel");
        }
        const bool label = p->next + 1 < p->token_count && same(p->tokens[p->next + 1].text, ":");
        bool ok = true;
        if (word[0] == '{' || word[0] == '}') {
            ok = read_scope(p, take(p)[0] == '{');
        } else if (label) {
            ok = read_label(p);
        } else if (word[0] == '.') {
            ok = read_directive(p);
        } else {
            ok = read_instruction(p);
        }
        if (!ok) {
            return false;
        }
    }
    return true;
}

// ---- Kernels ------------------------------------------------------------------------------------

// .param .u64 name, .param .align 8 .b8 name[24], .param .u64 .ptr .global .align 16 name
static bool read_param(ptx_parser* p) {
    const int line = parser_line(p);
    ptx_kernel* k = p->kernel;
    ptx_type type = TYPE_NONE;
    u32 align = 0;
    bool pointer = false;
    if (!expect(p, ".param")) {
        return false;
    }
    while (peek(p)[0] == '.') {
        const char* word = take(p);
        u32 value = 0;
        if (same(word, ".align")) {
            if (!take_u32(p, &value)) {
                return false;
            }
            align = pointer ? align : value; // after .ptr, it applies to the memory pointed to
        } else if (same(word, ".ptr")) {
            pointer = true;
        } else if (!pointer && (type = type_named(word + 1)) == TYPE_NONE) {
            return refuse(p, line, "parameter with '%s'", word);
        }
    }
    ptx_param param = {take(p), 0, PTX_TYPES[type].bytes};
    if (accept(p, "[")) {
        u32 count = 0;
        if (!take_u32(p, &count) || !expect(p, "]")) {
            return false;
        }
        param.bytes *= count;
    }
    if (param.bytes == 0 || param.bytes > 4096) {
        return refuse(p, line, "parameter '%s' of %u bytes", param.name, param.bytes);
    }
    param.at = round_up(k->param_bytes, align ? align : PTX_TYPES[type].bytes);
    k->param_bytes = param.at + param.bytes;
    k->params = (ptx_param*)grow(k->params, k->param_count, sizeof *k->params);
    k->params[k->param_count++] = param;
    return true;
}

static bool read_limits(ptx_parser* p) {
    while (peek(p)[0] == '.') {
        const int line = parser_line(p);
        const char* word = take(p);
        u32 product = 1;
        do {
            u32 value = 0;
            if (!take_u32(p, &value)) {
                return false;
            }
            product *= value;
        } while (accept(p, ","));
        if (same(word, ".maxntid") || same(word, ".reqntid")) {
            p->kernel->max_threads = product;
        } else if (!same(word, ".minnctapersm") && !same(word, ".maxnreg") &&
                   !same(word, ".maxnctapersm")) {
            return refuse(p, line, "directive '%s' is not supported", word);
        }
    }
    return true;
}

static bool settle_label(ptx_parser* p, u32* target, bool table) {
    const ptx_label* label = &p->labels[*target];
    const bool is_table = (label->at & PTX_CONSTANT_BIT) != 0;
    if (label->at == PTX_NONE || is_table != table) {
        return refuse(p, label->line, "label '%s' is missing", label->name);
    }
    *target = label->at & ~PTX_CONSTANT_BIT;
    return true;
}

// Labels become instruction numbers.
static bool settle_labels(ptx_parser* p) {
    ptx_kernel* k = p->kernel;
    for (u32 i = 0; i < k->code_count; i++) {
        ptx_insn* in = &k->code[i];
        if ((in->kind == KIND_BRANCH && !settle_label(p, &in->target, false)) ||
            (in->kind == KIND_BRANCH_INDEX && !settle_label(p, &in->target, true))) {
            return false;
        }
    }
    for (u32 i = 0; i < k->table_count; i++) {
        for (u32 n = 0; n < k->tables[i].count; n++) {
            if (!settle_label(p, &k->tables[i].target[n], false)) {
                return false;
            }
        }
    }
    return true;
}

// Registers share their storage, and constants are placed after them.
static bool settle_kernel(ptx_parser* p) {
    ptx_kernel* k = p->kernel;
    if (!settle_labels(p)) {
        return false;
    }
    share_registers(k, p->registers, p->register_count);
    k->register_bytes = round_up(k->register_bytes, 256);
    k->file_bytes = k->register_bytes + round_up(p->constant_bytes, 256);
    for (u32 i = 0; i < k->code_count; i++) {
        ptx_insn* in = &k->code[i];
        for (u32 a = 0; a < PTX_MAX_ARGS; a++) {
            if (in->arg[a] != PTX_NONE && (in->arg[a] & PTX_CONSTANT_BIT) != 0) {
                in->arg[a] = k->register_bytes + (in->arg[a] & ~PTX_CONSTANT_BIT);
            }
        }
        if (in->guard != PTX_NONE && (in->guard & PTX_CONSTANT_BIT) != 0) {
            in->guard = k->register_bytes + (in->guard & ~PTX_CONSTANT_BIT);
        }
    }
    for (u32 i = 0; i < k->constant_count; i++) {
        ptx_constant* c = &k->constants[i];
        c->at = k->register_bytes + (c->at & ~PTX_CONSTANT_BIT);
        c->value += c->dynamic_shared ? round_up(k->static_shared, k->dynamic_align) : 0;
    }
    for (u32 i = 0; i < k->special_count; i++) {
        k->specials[i].at = k->register_bytes + (k->specials[i].at & ~PTX_CONSTANT_BIT);
    }
    return true;
}

static void forget_kernel(ptx_parser* p) {
    free(p->registers);
    free(p->symbols);
    free(p->placed);
    free(p->labels);
    p->registers = NULL;
    p->symbols = NULL;
    p->placed = NULL;
    p->labels = NULL;
    p->register_count = 0;
    p->symbol_count = 0;
    p->placed_count = 0;
    p->label_count = 0;
    p->constant_bytes = 0;
    p->kernel = NULL;
}

static bool read_kernel(ptx_parser* p) {
    ptx_module* m = p->module;
    m->kernels = (ptx_kernel*)grow(m->kernels, m->kernel_count, sizeof *m->kernels);
    ptx_kernel* k = &m->kernels[m->kernel_count++];
    memset(k, 0, sizeof *k);
    p->kernel = k;
    k->name = take(p);
    k->dynamic_align = 16;
    if (accept(p, "(") && !accept(p, ")")) {
        do {
            if (!read_param(p)) {
                return false;
            }
        } while (accept(p, ","));
        if (!expect(p, ")")) {
            return false;
        }
    }
    if (!read_limits(p) || !read_body(p)) {
        return false;
    }
    ptx_insn end; // running off the end exits the kernel
    memset(&end, 0, sizeof end);
    end.kind = KIND_EXIT;
    end.guard = PTX_NONE;
    end.line = parser_line(p);
    end.name = "end of kernel";
    add_insn(k, &end);
    return settle_kernel(p);
}

// ---- Modules ------------------------------------------------------------------------------------

static bool read_version(ptx_parser* p) {
    const int line = parser_line(p);
    const char* word = take(p);
    int major = 0;
    int minor = 0;
    if (sscanf(word, "%d.%d", &major, &minor) != 2) {
        return refuse(p, line, "version '%s'", word);
    }
    p->module->version = major * 10 + minor;
    return true;
}

static bool skip_section(ptx_parser* p) {
    u32 depth = 0;
    do {
        const char* word = take(p);
        if (word[0] == 0) {
            return refuse(p, parser_line(p), "the text ends inside a section");
        }
        depth += word[0] == '{';
        depth -= word[0] == '}';
        if (depth == 0 && word[0] == '}') {
            return true;
        }
    } while (true);
}

static bool read_top(ptx_parser* p) {
    const int line = parser_line(p);
    bool is_extern = false;
    while (same(peek(p), ".visible") || same(peek(p), ".weak") || same(peek(p), ".extern")) {
        is_extern = same(take(p), ".extern") || is_extern;
    }
    const char* word = take(p);
    if (same(word, ".version")) {
        return read_version(p);
    }
    if (same(word, ".target")) {
        p->module->target = take(p);
        while (accept(p, ",")) {
            take(p); // debug sections and the like
        }
        return true;
    }
    if (same(word, ".address_size")) {
        return expect(p, "64");
    }
    if (same(word, ".entry")) {
        const bool ok = !is_extern && read_kernel(p);
        forget_kernel(p);
        return ok || refuse(p, line, "kernel not understood");
    }
    if (same(word, ".const") || same(word, ".global") || same(word, ".shared")) {
        const ptx_space space = word[1] == 'c'   ? SPACE_CONST
                                : word[1] == 'g' ? SPACE_GLOBAL
                                                 : SPACE_SHARED;
        return read_variable(p, space, is_extern);
    }
    if (same(word, ".section")) {
        return skip_section(p);
    }
    if (same(word, ".func")) {
        return refuse(p, line, "device functions are not supported: force them inline");
    }
    return refuse(p, line, "'%s' is not supported here", word);
}

static bool read_module(ptx_parser* p, const char* text) {
    tokenize(p, text);
    while (p->next < p->token_count) {
        if (!read_top(p)) {
            return false;
        }
    }
    if (p->module->version == 0 || p->module->target == NULL) {
        return refuse(p, 1, "no .version or no .target");
    }
    for (u32 i = 0; i < p->module->kernel_count; i++) {
        p->module->kernels[i].module = p->module; // the array no longer moves
    }
    return true;
}

#endif
