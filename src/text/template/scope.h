// Which variable a name means. jinja2 decides this when it compiles: each scope (the template, the
// body of a loop, a macro, ...) has a table of the names it uses, and each name is loaded when the
// scope is entered: from the scope around it, from the values given to the rendering, or not at
// all. The rules are those of jinja2's idtracking, so that its oddities are the same.

enum {
    QLORA__JIN_LOAD_PARAMETER, // set by a loop or a call
    QLORA__JIN_LOAD_RESOLVE,   // from what is given to the rendering
    QLORA__JIN_LOAD_ALIAS,     // a copy of the variable outside
    QLORA__JIN_LOAD_UNDEFINED
};

typedef struct qlora__jin_symbol {
    struct qlora__jin_symbol* next;
    const char* name;
    size_t size;
    uint32_t slot;
    int load;
    uint32_t hops; // of an alias: where the variable outside is
    uint32_t from;
} qlora__jin_symbol;

typedef struct qlora__jin_scope {
    struct qlora__jin_scope* outer;
    qlora__jin_symbol* symbols;
    qlora__jin_symbol** tail;
    uint32_t function; // how many functions are around it
    uint32_t* slots;   // of that function, counted
} qlora__jin_scope;

typedef struct qlora__jin_binder {
    qlora__jin_machine* m;
    const void* (*filter)(const char* name, size_t size, bool test);
} qlora__jin_binder;

static qlora__jin_symbol* qlora__jin_symbol_here(const qlora__jin_scope* scope, const char* name,
                                                 size_t size) {
    for (qlora__jin_symbol* s = scope->symbols; s != NULL; s = s->next) {
        if (s->size == size && memcmp(s->name, name, size) == 0) {
            return s;
        }
    }
    return NULL;
}

// The symbol in this scope or around it; *function says whose variable it is.
static qlora__jin_symbol* qlora__jin_symbol_find(const qlora__jin_scope* scope, const char* name,
                                                 size_t size, uint32_t* function) {
    for (; scope != NULL; scope = scope->outer) {
        qlora__jin_symbol* symbol = qlora__jin_symbol_here(scope, name, size);
        if (symbol != NULL) {
            *function = scope->function;
            return symbol;
        }
    }
    return NULL;
}

static qlora_result qlora__jin_symbol_add(qlora__jin_binder* b, qlora__jin_scope* scope,
                                          const char* name, size_t size, int load,
                                          qlora__jin_symbol** out) {
    void* memory = NULL;
    QLORA__TRY(qlora__jin_get(b->m, sizeof(qlora__jin_symbol), &memory));
    memset(memory, 0, sizeof(qlora__jin_symbol));
    qlora__jin_symbol* symbol = (qlora__jin_symbol*)memory;
    symbol->name = name;
    symbol->size = size;
    symbol->load = load;
    symbol->slot = (*scope->slots)++;
    *scope->tail = symbol;
    scope->tail = &symbol->next;
    *out = symbol;
    return QLORA_OK;
}

static qlora_result qlora__jin_scope_make(qlora__jin_binder* b, qlora__jin_scope* outer,
                                          uint32_t* slots, qlora__jin_scope** out) {
    void* memory = NULL;
    QLORA__TRY(qlora__jin_get(b->m, sizeof(qlora__jin_scope), &memory));
    memset(memory, 0, sizeof(qlora__jin_scope));
    *out = (qlora__jin_scope*)memory;
    (*out)->outer = outer;
    (*out)->tail = &(*out)->symbols;
    (*out)->function = outer == NULL ? 0 : outer->function + (slots != NULL ? 1 : 0);
    (*out)->slots = slots != NULL ? slots : outer->slots;
    return QLORA_OK;
}

static qlora_result qlora__jin_declare(qlora__jin_binder* b, qlora__jin_scope* scope,
                                       const char* name, size_t size) {
    qlora__jin_symbol* symbol = qlora__jin_symbol_here(scope, name, size);
    if (symbol != NULL) {
        symbol->load = QLORA__JIN_LOAD_PARAMETER;
        return QLORA_OK;
    }
    return qlora__jin_symbol_add(b, scope, name, size, QLORA__JIN_LOAD_PARAMETER, &symbol);
}

static qlora_result qlora__jin_loads(qlora__jin_binder* b, qlora__jin_scope* scope,
                                     const char* name, size_t size) {
    uint32_t function = 0;
    qlora__jin_symbol* symbol = qlora__jin_symbol_find(scope, name, size, &function);
    return symbol != NULL
               ? QLORA_OK
               : qlora__jin_symbol_add(b, scope, name, size, QLORA__JIN_LOAD_RESOLVE, &symbol);
}

// A name that is set. `branch`: perhaps not, because it stands in an if.
static qlora_result qlora__jin_stores(qlora__jin_binder* b, qlora__jin_scope* scope,
                                      const char* name, size_t size, bool branch) {
    uint32_t function = 0;
    qlora__jin_symbol* symbol = qlora__jin_symbol_here(scope, name, size);
    if (symbol != NULL) {
        return QLORA_OK;
    }
    const qlora__jin_symbol* outside =
        scope->outer != NULL ? qlora__jin_symbol_find(scope->outer, name, size, &function) : NULL;
    int load = branch ? QLORA__JIN_LOAD_RESOLVE : QLORA__JIN_LOAD_UNDEFINED;
    load = outside != NULL ? QLORA__JIN_LOAD_ALIAS : load;
    QLORA__TRY(qlora__jin_symbol_add(b, scope, name, size, load, &symbol));
    if (outside != NULL) {
        symbol->hops = scope->function - function;
        symbol->from = outside->slot;
    }
    return QLORA_OK;
}

// ---- first pass over a scope: which names does it use, in the order jinja2 sees them

enum { QLORA__JIN_AS_LOAD, QLORA__JIN_AS_STORE, QLORA__JIN_AS_PARAMETER };

// A list of expressions. Recursive in the tree, whose nesting the parser has limited.
static qlora_result qlora__jin_note_expressions(qlora__jin_binder* b, qlora__jin_scope* scope,
                                                const qlora__jin_node* first, int as, bool branch) {
    for (const qlora__jin_node* n = first; n != NULL; n = n->next) {
        if (n->kind == QLORA__JIN_N_NAME && as != QLORA__JIN_AS_LOAD) {
            QLORA__TRY(as == QLORA__JIN_AS_STORE
                           ? qlora__jin_stores(b, scope, n->name, n->size, branch)
                           : qlora__jin_declare(b, scope, n->name, n->size));
            continue;
        }
        if (n->kind == QLORA__JIN_N_NAME || n->kind == QLORA__JIN_N_NSREF) {
            QLORA__TRY(qlora__jin_loads(b, scope, n->name, n->size));
            continue;
        }
        // jinja2 visits a condition before the two values; the order does not matter for loads
        const qlora__jin_node* parts[5] = {n->a, n->b, n->c, n->d, n->e};
        for (size_t i = 0; i < 5; i++) {
            if (parts[i] != NULL) {
                QLORA__TRY(qlora__jin_note_expressions(b, scope, parts[i], as, branch));
            }
        }
    }
    return QLORA_OK;
}

// Statements of one scope; what is inside loops, macros and blocks belongs to their own scopes.
static qlora_result qlora__jin_note_statements(qlora__jin_binder* b, qlora__jin_scope* scope,
                                               const qlora__jin_node* first, bool branch) {
    for (const qlora__jin_node* n = first; n != NULL; n = n->next) {
        int load = QLORA__JIN_AS_LOAD;
        switch (n->kind) {
        case QLORA__JIN_N_OUTPUT:
        case QLORA__JIN_N_CALL_BLOCK:
            QLORA__TRY(qlora__jin_note_expressions(b, scope, n->a, load, branch));
            break;
        case QLORA__JIN_N_FOR:
        case QLORA__JIN_N_FILTER_BLOCK:
        case QLORA__JIN_N_WITH:
            QLORA__TRY(qlora__jin_note_expressions(b, scope, n->b, load, branch));
            break;
        case QLORA__JIN_N_ASSIGN:
            QLORA__TRY(qlora__jin_note_expressions(b, scope, n->b, load, branch));
            QLORA__TRY(qlora__jin_note_expressions(b, scope, n->a, QLORA__JIN_AS_STORE, branch));
            break;
        case QLORA__JIN_N_ASSIGN_BLOCK:
            QLORA__TRY(qlora__jin_note_expressions(b, scope, n->a, QLORA__JIN_AS_STORE, branch));
            break;
        case QLORA__JIN_N_MACRO:
            QLORA__TRY(qlora__jin_stores(b, scope, n->name, n->size, branch));
            break;
        case QLORA__JIN_N_IF:
            for (const qlora__jin_node* part = n; part != NULL; part = part->d) {
                QLORA__TRY(
                    qlora__jin_note_expressions(b, scope, part->a, load, branch || part != n));
                QLORA__TRY(qlora__jin_note_statements(b, scope, part->b, true));
                QLORA__TRY(qlora__jin_note_statements(b, scope, part->c, true));
            }
            break;
        default:
            break;
        }
    }
    return QLORA_OK;
}

// ---- second pass: every name gets its variable

static qlora_result qlora__jin_bind_name(qlora__jin_binder* b, const qlora__jin_scope* scope,
                                         qlora__jin_node* node) {
    uint32_t function = 0;
    const qlora__jin_symbol* symbol =
        qlora__jin_symbol_find(scope, node->name, node->size, &function);
    if (symbol == NULL) {
        b->m->line = node->line;
        return qlora__jin_fail(b->m, "internal: no variable for \"%.*s\"", (int)node->size,
                               node->name);
    }
    node->hops = scope->function - function;
    node->slot = symbol->slot;
    return QLORA_OK;
}

// A filter that does not exist is an error at once, unless it stands in an if (`soft`).
static qlora_result qlora__jin_bind_filter(qlora__jin_binder* b, qlora__jin_node* node, bool soft) {
    bool test = node->kind == QLORA__JIN_N_TEST;
    node->found = b->filter(node->name, node->size, test);
    if (node->found == NULL && !soft) {
        b->m->line = node->line;
        return qlora__jin_fail(b->m, "there is no %s named \"%.*s\"", test ? "test" : "filter",
                               (int)(node->size < 60 ? node->size : 60), node->name);
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_bind_expressions(qlora__jin_binder* b, const qlora__jin_scope* scope,
                                                qlora__jin_node* first, bool soft) {
    for (qlora__jin_node* n = first; n != NULL; n = n->next) {
        if (n->kind == QLORA__JIN_N_NAME || n->kind == QLORA__JIN_N_NSREF) {
            QLORA__TRY(qlora__jin_bind_name(b, scope, n));
            continue;
        }
        if (n->kind == QLORA__JIN_N_FILTER || n->kind == QLORA__JIN_N_TEST) {
            QLORA__TRY(qlora__jin_bind_filter(b, n, soft));
        }
        bool inside = soft || n->kind == QLORA__JIN_N_COND;
        qlora__jin_node* parts[5] = {n->a, n->b, n->c, n->d, n->e};
        for (size_t i = 0; i < 5; i++) {
            if (parts[i] != NULL) {
                QLORA__TRY(qlora__jin_bind_expressions(b, scope, parts[i], inside));
            }
        }
    }
    return QLORA_OK;
}

// Whether a list of targets or arguments sets `name`.
static bool qlora__jin_sets(const qlora__jin_node* targets, const char* name) {
    for (const qlora__jin_node* n = targets; n != NULL; n = n->next) {
        if (n->kind == QLORA__JIN_N_NAME
                ? n->size == strlen(name) && memcmp(n->name, name, n->size) == 0
                : n->kind == QLORA__JIN_N_TUPLE && qlora__jin_sets(n->a, name)) {
            return true;
        }
    }
    return false;
}

static bool qlora__jin_is_function(const qlora__jin_node* n) {
    return n->kind == QLORA__JIN_N_MACRO || n->kind == QLORA__JIN_N_CALL_BLOCK;
}

// What a statement sets in the eyes of jinja2, arguments included.
static const qlora__jin_node* qlora__jin_targets(const qlora__jin_node* n) {
    bool assigns = n->kind == QLORA__JIN_N_ASSIGN || n->kind == QLORA__JIN_N_ASSIGN_BLOCK ||
                   n->kind == QLORA__JIN_N_FOR || n->kind == QLORA__JIN_N_WITH;
    return assigns ? n->a : qlora__jin_is_function(n) ? n->b : NULL;
}

// Whether the names in the list, which are not set there first, contain `name`. jinja2 looks this
// up to know whether a loop needs `loop`, or a macro `caller`; in its order, and wherever the name
// is set, even in a scope further in.
static bool qlora__jin_mentions(const qlora__jin_node* first, const char* name, bool* stored) {
    bool found = false;
    const qlora__jin_node* rest = NULL;
    for (const qlora__jin_node* n = first; n != NULL && !found && !*stored;
         n = qlora__jin_walk(n, &rest)) {
        if (n->kind == QLORA__JIN_N_NAME) {
            found = n->size == strlen(name) && memcmp(n->name, name, n->size) == 0;
            continue;
        }
        const qlora__jin_node* targets = qlora__jin_targets(n);
        const qlora__jin_node* parts[5] = {n->a, n->b, n->c, qlora__jin_below(n), n->e};
        if (n->kind == QLORA__JIN_N_CALL_BLOCK) {
            found = qlora__jin_mentions(n->a, name, stored);
        }
        *stored = *stored || (!found && qlora__jin_sets(targets, name));
        if (qlora__jin_is_function(n)) {
            parts[0] = NULL;
            parts[1] = NULL;
            for (const qlora__jin_node* arg = n->b; arg != NULL && !found && !*stored;
                 arg = arg->next) {
                found = arg->a != NULL && qlora__jin_mentions(arg->a, name, stored);
            }
        } else if (n->kind == QLORA__JIN_N_FILTER_BLOCK) { // its filter comes last
            parts[1] = n->c;
            parts[2] = n->b;
        }
        for (size_t i = targets != NULL ? 1 : 0; i < 5 && !found && !*stored; i++) {
            found = parts[i] != NULL && qlora__jin_mentions(parts[i], name, stored);
        }
    }
    return found;
}

static bool qlora__jin_uses(const qlora__jin_node* body, const char* name) {
    bool stored = false;
    return qlora__jin_mentions(body, name, &stored);
}

typedef struct qlora__jin_bind_next {
    qlora_result (*statements)(qlora__jin_binder* b, qlora__jin_scope* scope,
                               qlora__jin_node* first, bool soft,
                               const struct qlora__jin_bind_next* next);
} qlora__jin_bind_next;

static qlora_result qlora__jin_bind_for(qlora__jin_binder* b, qlora__jin_scope* scope,
                                        qlora__jin_node* n, bool soft,
                                        const qlora__jin_bind_next* next) {
    QLORA__TRY(qlora__jin_bind_expressions(b, scope, n->b, soft));
    QLORA__TRY(qlora__jin_scope_make(b, scope, NULL, &n->scope));
    n->flag = qlora__jin_uses(n->c, "loop");
    n->slot = UINT32_MAX;
    if (n->flag) {
        QLORA__TRY(qlora__jin_declare(b, n->scope, "loop", 4));
        n->slot = n->scope->symbols->slot;
    }
    if (n->e != NULL) {
        QLORA__TRY(qlora__jin_scope_make(b, scope, NULL, &n->scope_test));
        QLORA__TRY(
            qlora__jin_note_expressions(b, n->scope_test, n->a, QLORA__JIN_AS_PARAMETER, false));
        QLORA__TRY(qlora__jin_note_expressions(b, n->scope_test, n->e, QLORA__JIN_AS_LOAD, false));
        QLORA__TRY(qlora__jin_bind_expressions(b, n->scope_test, n->e, false));
    }
    QLORA__TRY(qlora__jin_note_expressions(b, n->scope, n->a, QLORA__JIN_AS_PARAMETER, false));
    QLORA__TRY(qlora__jin_note_statements(b, n->scope, n->c, false));
    QLORA__TRY(qlora__jin_bind_expressions(b, n->scope, n->a, false));
    QLORA__TRY(next->statements(b, n->scope, n->c, false, next));
    if (n->d != NULL) {
        QLORA__TRY(qlora__jin_scope_make(b, scope, NULL, &n->scope_else));
        QLORA__TRY(qlora__jin_note_statements(b, n->scope_else, n->d, false));
        QLORA__TRY(next->statements(b, n->scope_else, n->d, false, next));
    }
    return QLORA_OK;
}

// An argument named caller needs a default where the body uses it.
static qlora_result qlora__jin_check_caller(qlora__jin_binder* b, const qlora__jin_node* n) {
    for (const qlora__jin_node* name = n->b; name != NULL; name = name->next) {
        bool caller = name->size == 6 && memcmp(name->name, "caller", 6) == 0;
        if (caller && name->a == NULL && qlora__jin_uses(n->c, "caller")) {
            b->m->line = name->line;
            return qlora__jin_fail(b->m, "the argument \"caller\" needs a default");
        }
    }
    return QLORA_OK;
}

// The body of a macro, call block or generation block: a function with its own variables.
static qlora_result qlora__jin_bind_function(qlora__jin_binder* b, qlora__jin_scope* scope,
                                             qlora__jin_node* n, const qlora__jin_bind_next* next) {
    static const char* const special[] = {"caller", "kwargs", "varargs"};
    bool* uses[3] = {&n->flag, &n->uses_kwargs, &n->uses_varargs};
    QLORA__TRY(qlora__jin_scope_make(b, scope, &n->slots, &n->scope));
    for (qlora__jin_node* name = n->b; name != NULL; name = name->next) {
        QLORA__TRY(qlora__jin_declare(b, n->scope, name->name, name->size));
        QLORA__TRY(qlora__jin_bind_name(b, n->scope, name));
    }
    for (size_t i = 0; i < 3; i++) {
        *uses[i] = qlora__jin_uses(n->c, special[i]);
        size_t size = strlen(special[i]);
        if (*uses[i] && qlora__jin_symbol_here(n->scope, special[i], size) == NULL) {
            QLORA__TRY(qlora__jin_declare(b, n->scope, special[i], size));
        } else if (*uses[i]) { // an argument of that name is an ordinary one
            *uses[i] = false;
        }
    }
    QLORA__TRY(qlora__jin_check_caller(b, n));
    for (qlora__jin_node* name = n->b; name != NULL; name = name->next) {
        QLORA__TRY(qlora__jin_note_expressions(b, n->scope, name->a, QLORA__JIN_AS_LOAD, false));
    }
    QLORA__TRY(qlora__jin_note_statements(b, n->scope, n->c, false));
    for (qlora__jin_node* name = n->b; name != NULL; name = name->next) {
        QLORA__TRY(qlora__jin_bind_expressions(b, n->scope, name->a, false));
    }
    return next->statements(b, n->scope, n->c, false, next);
}

// A body in a scope of its own, in the same function.
static qlora_result qlora__jin_bind_body(qlora__jin_binder* b, qlora__jin_scope* scope,
                                         qlora__jin_node* n, const qlora__jin_bind_next* next) {
    QLORA__TRY(qlora__jin_scope_make(b, scope, NULL, &n->scope));
    if (n->kind == QLORA__JIN_N_WITH) {
        QLORA__TRY(qlora__jin_note_expressions(b, n->scope, n->a, QLORA__JIN_AS_PARAMETER, false));
    }
    if (n->kind == QLORA__JIN_N_FILTER_BLOCK) {
        QLORA__TRY(qlora__jin_note_expressions(b, n->scope, n->b, QLORA__JIN_AS_LOAD, false));
    }
    QLORA__TRY(qlora__jin_note_statements(b, n->scope, n->c, false));
    if (n->kind == QLORA__JIN_N_WITH) {
        QLORA__TRY(qlora__jin_bind_expressions(b, n->scope, n->a, false));
    } else if (n->b != NULL) { // the filter of a set or filter block
        if (n->kind == QLORA__JIN_N_ASSIGN_BLOCK) {
            QLORA__TRY(qlora__jin_note_expressions(b, n->scope, n->b, QLORA__JIN_AS_LOAD, false));
        }
        QLORA__TRY(qlora__jin_bind_expressions(b, n->scope, n->b, false));
    }
    return next->statements(b, n->scope, n->c, false, next);
}

static qlora_result qlora__jin_bind_statements(qlora__jin_binder* b, qlora__jin_scope* scope,
                                               qlora__jin_node* first, bool soft,
                                               const qlora__jin_bind_next* next) {
    for (qlora__jin_node* n = first; n != NULL; n = n->next) {
        switch (n->kind) {
        case QLORA__JIN_N_IF:
            for (qlora__jin_node* part = n; part != NULL; part = part->d) {
                QLORA__TRY(qlora__jin_bind_expressions(b, scope, part->a, true));
                QLORA__TRY(next->statements(b, scope, part->b, true, next));
                QLORA__TRY(next->statements(b, scope, part->c, true, next));
            }
            break;
        case QLORA__JIN_N_FOR:
            QLORA__TRY(qlora__jin_bind_for(b, scope, n, soft, next));
            break;
        case QLORA__JIN_N_OUTPUT:
            QLORA__TRY(qlora__jin_bind_expressions(b, scope, n->a, soft));
            break;
        case QLORA__JIN_N_ASSIGN:
            QLORA__TRY(qlora__jin_bind_expressions(b, scope, n->a, soft));
            QLORA__TRY(qlora__jin_bind_expressions(b, scope, n->b, soft));
            break;
        case QLORA__JIN_N_MACRO:
            QLORA__TRY(qlora__jin_bind_name(b, scope, n));
            QLORA__TRY(qlora__jin_bind_function(b, scope, n, next));
            break;
        case QLORA__JIN_N_CALL_BLOCK:
            QLORA__TRY(qlora__jin_bind_expressions(b, scope, n->a, soft));
            QLORA__TRY(qlora__jin_bind_function(b, scope, n, next));
            break;
        case QLORA__JIN_N_GENERATION:
            QLORA__TRY(qlora__jin_bind_function(b, scope, n, next));
            break;
        case QLORA__JIN_N_ASSIGN_BLOCK:
            QLORA__TRY(qlora__jin_bind_expressions(b, scope, n->a, soft));
            QLORA__TRY(qlora__jin_bind_body(b, scope, n, next));
            break;
        case QLORA__JIN_N_WITH:
            QLORA__TRY(qlora__jin_bind_expressions(b, scope, n->b, soft));
            QLORA__TRY(qlora__jin_bind_body(b, scope, n, next));
            break;
        case QLORA__JIN_N_FILTER_BLOCK:
            QLORA__TRY(qlora__jin_bind_body(b, scope, n, next));
            break;
        default:
            break;
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_bind(qlora__jin_machine* m, qlora__jin_node* root,
                                    const void* (*filter)(const char*, size_t, bool)) {
    qlora__jin_binder binder;
    qlora__jin_bind_next next;
    binder.m = m;
    binder.filter = filter;
    next.statements = qlora__jin_bind_statements;
    QLORA__TRY(qlora__jin_scope_make(&binder, NULL, &root->slots, &root->scope));
    QLORA__TRY(qlora__jin_note_statements(&binder, root->scope, root->c, false));
    return qlora__jin_bind_statements(&binder, root->scope, root->c, false, &next);
}
