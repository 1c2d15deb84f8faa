// Executing statements, calling macros, and the rendering as a whole.

// Loads the variables of a scope, as jinja2 does when it enters one.
static qlora_result qlora__jin_scope_enter(qlora__jin_machine* m, const qlora__jin_scope* scope) {
    for (const qlora__jin_symbol* s = scope->symbols; s != NULL; s = s->next) {
        qlora__jin_value value = qlora__jin_of(QLORA__JIN_MISSING);
        QLORA__TRY(qlora__jin_work(m, 1));
        if (s->load == QLORA__JIN_LOAD_PARAMETER) {
            continue;
        }
        if (s->load == QLORA__JIN_LOAD_RESOLVE) {
            size_t at = qlora__jin_dict_at(m->globals, s->name, s->size);
            value = at < m->globals->count ? m->globals->values[at] : value;
        } else if (s->load == QLORA__JIN_LOAD_ALIAS) {
            const qlora__jin_record* record = m->record;
            for (uint32_t i = 0; i < s->hops; i++) {
                record = record->outer;
            }
            value = record->slots[s->from];
        }
        m->record->slots[s->slot] = value;
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_record_make(qlora__jin_machine* m, const qlora__jin_node* function,
                                           qlora__jin_record* outer, qlora__jin_record** out) {
    void* memory = NULL;
    QLORA__TRY(qlora__jin_get(m, sizeof(qlora__jin_record), &memory));
    *out = (qlora__jin_record*)memory;
    (*out)->outer = outer;
    QLORA__TRY(qlora__jin_get_values(m, function->slots, &(*out)->slots));
    for (uint32_t i = 0; i < function->slots; i++) {
        (*out)->slots[i] = qlora__jin_of(QLORA__JIN_MISSING);
    }
    return QLORA_OK;
}

// ---- macros -------------------------------------------------------------------------------------

static void qlora__jin_set_special(qlora__jin_machine* m, const qlora__jin_node* node,
                                   const char* name, qlora__jin_value value) {
    const qlora__jin_symbol* symbol = qlora__jin_symbol_here(node->scope, name, strlen(name));
    if (symbol != NULL) {
        m->record->slots[symbol->slot] = value;
    }
}

// caller, kwargs and varargs, and what is left over.
static qlora_result qlora__jin_macro_special(qlora__jin_machine* m, const qlora__jin_node* node,
                                             const qlora__jin_args* args, const bool* taken,
                                             size_t count) {
    qlora__jin_value kwargs = qlora__jin_of(QLORA__JIN_MISSING);
    qlora__jin_value varargs = qlora__jin_of(QLORA__JIN_MISSING);
    bool called = false;
    if (node->uses_kwargs) {
        QLORA__TRY(qlora__jin_dict_make(m, QLORA__JIN_DICT, 0, &kwargs));
    }
    for (size_t i = 0; i < args->named; i++) {
        const qlora__jin_string* name = args->names[i];
        qlora__jin_value value = args->items[args->positional + i];
        bool caller = name->bytes == 6 && memcmp(name->data, "caller", 6) == 0;
        if (taken[i]) {
            continue;
        }
        if (node->flag && caller) {
            called = value.kind != QLORA__JIN_NONE;
            qlora__jin_set_special(m, node, "caller", value);
        } else if (node->uses_kwargs) {
            qlora__jin_value key = qlora__jin_of(QLORA__JIN_STRING);
            key.as.string = name;
            QLORA__TRY(qlora__jin_dict_add(m, kwargs.as.dict, key, value));
        } else {
            return qlora__jin_fail(m, "the macro \"%.*s\" has no argument \"%.*s\"",
                                   (int)node->size, node->name != NULL ? node->name : "",
                                   (int)(name->bytes < 60 ? name->bytes : 60), name->data);
        }
    }
    if (node->flag && !called) {
        qlora__jin_value none;
        QLORA__TRY(qlora__jin_undefined(m, NULL, "caller", 6, false, &none));
        qlora__jin_set_special(m, node, "caller", none);
    }
    if (node->uses_varargs) {
        QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_TUPLE, 0, &varargs));
        for (size_t i = count; i < args->positional; i++) {
            QLORA__TRY(qlora__jin_list_add(m, varargs.as.list, args->items[i]));
        }
    } else if (args->positional > count) {
        return qlora__jin_fail(m, "the macro \"%.*s\" takes %llu arguments, %llu are given",
                               (int)node->size, node->name != NULL ? node->name : "",
                               (unsigned long long)count, (unsigned long long)args->positional);
    }
    if (node->uses_kwargs) {
        qlora__jin_set_special(m, node, "kwargs", kwargs);
    }
    if (node->uses_varargs) {
        qlora__jin_set_special(m, node, "varargs", varargs);
    }
    return QLORA_OK;
}

// Fills the arguments of a macro in the record that has just been made.
static qlora_result qlora__jin_macro_args(qlora__jin_machine* m, const qlora__jin_node* node,
                                          const qlora__jin_args* args) {
    size_t count = 0;
    void* memory = NULL;
    QLORA__TRY(qlora__jin_get(m, args->named + 1, &memory));
    bool* taken = (bool*)memory;
    memset(taken, 0, (args->named + 1) * sizeof(bool));
    for (const qlora__jin_node* n = node->b; n != NULL; n = n->next, count++) {
        qlora__jin_value value = qlora__jin_of(QLORA__JIN_MISSING);
        if (count < args->positional) {
            value = args->items[count];
        } else {
            for (size_t i = 0; i < args->named; i++) {
                if (args->names[i]->bytes == n->size &&
                    memcmp(args->names[i]->data, n->name, n->size) == 0) {
                    value = args->items[args->positional + i];
                    taken[i] = true;
                }
            }
        }
        m->record->slots[n->slot] = value;
    }
    QLORA__TRY(qlora__jin_macro_special(m, node, args, taken, count));
    QLORA__TRY(qlora__jin_scope_enter(m, node->scope));
    for (const qlora__jin_node* n = node->b; n != NULL; n = n->next) {
        qlora__jin_value* slot = &m->record->slots[n->slot];
        if (slot->kind == QLORA__JIN_MISSING) {
            QLORA__TRY(n->a != NULL ? m->hooks->eval(m, n->a, slot)
                                    : qlora__jin_undefined(m, NULL, n->name, n->size, false, slot));
        }
    }
    return QLORA_OK;
}

// Runs the body of a node; what it writes goes into a buffer of the caller's.
static qlora_result qlora__jin_run_into(qlora__jin_machine* m, const qlora__jin_node* node,
                                        qlora__jin_buffer* buffer) {
    qlora__jin_buffer* before = m->out;
    m->out = buffer;
    qlora_result r = m->hooks->run(m, node->c);
    m->out = before; // also after an error: the buffer is the caller's
    return r;
}

// The text that a macro, call block or generation block writes.
static qlora_result qlora__jin_macro_call(qlora__jin_machine* m, const qlora__jin_node* node,
                                          qlora__jin_record* outer, const qlora__jin_args* args,
                                          qlora__jin_value* out) {
    qlora__jin_record* record = m->record;
    qlora__jin_buffer buffer;
    qlora__jin_record* inner = NULL;
    memset(&buffer, 0, sizeof buffer);
    QLORA__TRY(qlora__jin_enter(m));
    QLORA__TRY(qlora__jin_record_make(m, node, outer, &inner));
    m->record = inner;
    QLORA__TRY(qlora__jin_macro_args(m, node, args));
    QLORA__TRY(qlora__jin_run_into(m, node, &buffer));
    m->record = record;
    m->depth--;
    return qlora__jin_buffer_string(m, &buffer, out);
}

static qlora_result qlora__jin_call(qlora__jin_machine* m, qlora__jin_value callee,
                                    const qlora__jin_args* args, qlora__jin_value* out) {
    switch (callee.kind) {
    case QLORA__JIN_UNDEFINED:
        return qlora__jin_undefined_error(m, callee);
    case QLORA__JIN_METHOD:
        return qlora__jin_method_call(m, callee.as.method->self, callee.as.method->found, args,
                                      out);
    case QLORA__JIN_FUNCTION:
        return qlora__jin_call_function(m, callee, args, out);
    case QLORA__JIN_MACRO:
        return qlora__jin_macro_call(m, callee.as.macro->node, callee.as.macro->outer, args, out);
    case QLORA__JIN_JOINER:
        if (args->positional + args->named > 0) {
            return qlora__jin_fail(m, "a joiner takes no arguments");
        }
        if (callee.as.cycler->at == 0) {
            callee.as.cycler->at = 1;
            return qlora__jin_string_of(m, "", out);
        }
        *out = callee.as.cycler->items;
        return QLORA_OK;
    default:
        return qlora__jin_fail(m, "a %s cannot be called", qlora__jin_type(callee));
    }
}

static qlora_result qlora__jin_macro_value(qlora__jin_machine* m, const qlora__jin_node* node,
                                           qlora__jin_value* out) {
    void* memory = NULL;
    QLORA__TRY(qlora__jin_get(m, sizeof(qlora__jin_macro), &memory));
    qlora__jin_macro* macro = (qlora__jin_macro*)memory;
    macro->node = node;
    macro->outer = m->record;
    *out = qlora__jin_of(QLORA__JIN_MACRO);
    out->as.macro = macro;
    return QLORA_OK;
}

// ---- statements ---------------------------------------------------------------------------------

#define QLORA__JIN_RUN(name)                                                                       \
    static qlora_result qlora__jin_run_##name(qlora__jin_machine* m, const qlora__jin_node* node)

// Whether the address of a generator was written behind `from`, in any case.
static bool qlora__jin_has_address(const qlora__jin_buffer* out, size_t from) {
    static const char address[] = QLORA__JIN_ADDRESS;
    size_t same = 0;
    for (size_t i = from; i < out->count && same < sizeof address - 1; i++) {
        char c = out->data[i];
        char lower = c >= 'A' && c <= 'Z' ? (char)(c - 'A' + 'a') : c;
        same = lower == address[same] ? same + 1 : lower == address[0] ? 1 : 0;
    }
    return same == sizeof address - 1;
}

QLORA__JIN_RUN(output) {
    for (const qlora__jin_node* n = node->a; n != NULL; n = n->next) {
        qlora__jin_value value;
        bool done = false;
        size_t from = m->out->count;
        if (n->folds) {
            QLORA__TRY(qlora__jin_fold(m, n, true, &value, &done));
        }
        if (!done) {
            QLORA__TRY(m->hooks->eval(m, n, &value));
        }
        QLORA__TRY(qlora__jin_print(m, value, m->out));
        if (m->addresses && qlora__jin_has_address(m->out, from)) {
            return qlora__jin_fail(m, "a generator cannot be printed; make a list of it");
        }
    }
    return QLORA_OK;
}

QLORA__JIN_RUN(if) {
    for (const qlora__jin_node* part = node; part != NULL; part = part->d) {
        qlora__jin_value test;
        QLORA__TRY(m->hooks->eval(m, part->a, &test));
        if (qlora__jin_truth(test)) {
            return m->hooks->run(m, part->b);
        }
        if (part->c != NULL) {
            return m->hooks->run(m, part->c);
        }
    }
    return QLORA_OK;
}

// One target: a name, ns.attribute, or a tuple, which is unpacked. Targets nest as deep as the
// parser allows.
static qlora_result qlora__jin_assign(qlora__jin_machine* m, const qlora__jin_node* target,
                                      qlora__jin_value value) {
    if (target->kind == QLORA__JIN_N_NAME) {
        *qlora__jin_slot(m, target) = value;
        return QLORA_OK;
    }
    if (target->kind == QLORA__JIN_N_NSREF) {
        qlora__jin_value* space = qlora__jin_slot(m, target);
        if (space->kind != QLORA__JIN_NAMESPACE) {
            return qlora__jin_fail(m, "only a namespace can get an attribute, not a %s",
                                   space->kind == QLORA__JIN_MISSING ? "undefined value"
                                                                     : qlora__jin_type(*space));
        }
        return qlora__jin_dict_set(m, space->as.dict, target->value, value);
    }
    qlora__jin_value list;
    size_t i = 0;
    QLORA__TRY(qlora__jin_to_list(m, value, &list));
    for (const qlora__jin_node* n = target->a; n != NULL; n = n->next, i++) {
        if (i < list.as.list->count) {
            QLORA__TRY(qlora__jin_assign(m, n, list.as.list->items[i]));
        }
    }
    if (i != list.as.list->count) {
        return qlora__jin_fail(m, "%llu values cannot be unpacked into %llu names",
                               (unsigned long long)list.as.list->count, (unsigned long long)i);
    }
    return QLORA_OK;
}

QLORA__JIN_RUN(assign) {
    qlora__jin_value value;
    QLORA__TRY(m->hooks->eval(m, node->b, &value));
    m->line = node->line;
    return qlora__jin_assign(m, node->a, value);
}

// The text of a body, in a scope of its own.
static qlora_result qlora__jin_capture(qlora__jin_machine* m, const qlora__jin_node* node,
                                       qlora__jin_value* out) {
    qlora__jin_buffer buffer;
    memset(&buffer, 0, sizeof buffer);
    QLORA__TRY(qlora__jin_scope_enter(m, node->scope));
    QLORA__TRY(qlora__jin_run_into(m, node, &buffer));
    return qlora__jin_buffer_string(m, &buffer, out);
}

// The filters of a set or filter block: the innermost has no value of its own.
static qlora_result qlora__jin_filter_text(qlora__jin_machine* m, const qlora__jin_node* filter,
                                           qlora__jin_value text, qlora__jin_value* out) {
    qlora__jin_args args;
    qlora__jin_value value = text;
    if (filter->a != NULL) {
        QLORA__TRY(qlora__jin_filter_text(m, filter->a, text, &value));
    }
    QLORA__TRY(qlora__jin_args_eval(m, filter, NULL, &args));
    m->line = filter->line;
    return filter->found != NULL
               ? qlora__jin_filter_run(m, (const qlora__jin_filter_row*)filter->found, value, &args,
                                       out)
               : qlora__jin_unknown(m, "filter", filter->name, filter->size);
}

QLORA__JIN_RUN(assign_block) {
    qlora__jin_value text;
    QLORA__TRY(qlora__jin_capture(m, node, &text));
    if (m->jump != QLORA__JIN_NO_JUMP) {
        return QLORA_OK;
    }
    if (node->b != NULL) {
        QLORA__TRY(qlora__jin_filter_text(m, node->b, text, &text));
    }
    return qlora__jin_assign(m, node->a, text);
}

QLORA__JIN_RUN(filter_block) {
    qlora__jin_value text;
    QLORA__TRY(qlora__jin_capture(m, node, &text));
    if (m->jump != QLORA__JIN_NO_JUMP) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__jin_filter_text(m, node->b, text, &text));
    if (text.kind != QLORA__JIN_STRING) { // an expression would print it; this does not
        return qlora__jin_fail(m, "a filter block gives a %s, not a string", qlora__jin_type(text));
    }
    return qlora__jin_print(m, text, m->out);
}

QLORA__JIN_RUN(with) {
    const qlora__jin_node* value = node->b;
    QLORA__TRY(qlora__jin_scope_enter(m, node->scope));
    for (const qlora__jin_node* n = node->a; n != NULL; n = n->next, value = value->next) {
        qlora__jin_value v;
        QLORA__TRY(m->hooks->eval(m, value, &v));
        QLORA__TRY(qlora__jin_assign(m, n, v));
    }
    return m->hooks->run(m, node->c);
}

QLORA__JIN_RUN(macro) {
    return qlora__jin_macro_value(m, node, qlora__jin_slot(m, node));
}

QLORA__JIN_RUN(call_block) {
    qlora__jin_value caller;
    qlora__jin_value callee;
    qlora__jin_value text;
    qlora__jin_args args;
    QLORA__TRY(qlora__jin_macro_value(m, node, &caller));
    QLORA__TRY(m->hooks->eval(m, node->a->a, &callee));
    QLORA__TRY(qlora__jin_args_eval(m, node->a, &caller, &args));
    m->line = node->line;
    QLORA__TRY(qlora__jin_call(m, callee, &args, &text));
    if (text.kind != QLORA__JIN_STRING) {
        return qlora__jin_fail(m, "a call block gives a %s, not text", qlora__jin_type(text));
    }
    return qlora__jin_print(m, text, m->out);
}

QLORA__JIN_RUN(generation) {
    qlora__jin_value text;
    qlora__jin_args none;
    memset(&none, 0, sizeof none);
    QLORA__TRY(qlora__jin_macro_call(m, node, m->record, &none, &text));
    if (m->span_count == m->span_capacity) {
        void* moved = NULL;
        size_t grown = m->span_capacity < 8 ? 8 : m->span_capacity * 2;
        QLORA__TRY(qlora__jin_get(m, grown * sizeof(qlora__jin_span), &moved));
        if (m->span_count > 0) {
            memcpy(moved, m->spans, m->span_count * sizeof(qlora__jin_span));
        }
        m->spans = (qlora__jin_span*)moved;
        m->span_capacity = grown;
    }
    m->spans[m->span_count].begin = m->top->count;
    m->spans[m->span_count++].end = m->top->count + text.as.string->bytes;
    return qlora__jin_print(m, text, m->out);
}

// ---- loops

typedef struct qlora__jin_turn {
    const qlora__jin_node* node;
    qlora__jin_iter* iter;
    qlora__jin_loop* loop; // NULL when the body does not use it
    bool done;             // an iteration reached its end
} qlora__jin_turn;

static qlora_result qlora__jin_assign_test(qlora__jin_machine* m, const qlora__jin_scope* scope,
                                           const qlora__jin_node* target, qlora__jin_value value) {
    if (target->kind == QLORA__JIN_N_NAME) {
        const qlora__jin_symbol* s = qlora__jin_symbol_here(scope, target->name, target->size);
        if (s != NULL) {
            m->record->slots[s->slot] = value;
        }
        return QLORA_OK;
    }
    qlora__jin_value list;
    size_t i = 0;
    QLORA__TRY(qlora__jin_to_list(m, value, &list));
    for (const qlora__jin_node* n = target->a; n != NULL; n = n->next, i++) {
        if (i < list.as.list->count) {
            QLORA__TRY(qlora__jin_assign_test(m, scope, n, list.as.list->items[i]));
        }
    }
    return i == list.as.list->count
               ? QLORA_OK
               : qlora__jin_fail(m, "%llu values cannot be unpacked into %llu names",
                                 (unsigned long long)list.as.list->count, (unsigned long long)i);
}

// Whether a value passes. The loop may be advanced from inside a macro (loop.last), whose variables
// are others.
static qlora_result qlora__jin_loop_test(qlora__jin_machine* m, qlora__jin_iter* iter,
                                         qlora__jin_value item, bool* out) {
    const qlora__jin_node* node = iter->node;
    qlora__jin_record* record = m->record;
    qlora__jin_value test;
    m->record = iter->record;
    if (iter->at == 0) {
        QLORA__TRY(qlora__jin_scope_enter(m, node->scope_test));
        iter->at = 1;
    }
    QLORA__TRY(qlora__jin_assign_test(m, node->scope_test, node->a, item));
    QLORA__TRY(m->hooks->eval(m, node->e, &test));
    m->record = record;
    *out = qlora__jin_truth(test);
    return QLORA_OK;
}

// The next value of a loop, through `loop` where there is one.
static qlora_result qlora__jin_turn_next(qlora__jin_machine* m, qlora__jin_turn* turn,
                                         qlora__jin_value* item, bool* more) {
    qlora__jin_loop* loop = turn->loop;
    if (loop == NULL) {
        return qlora__jin_next(m, turn->iter, item, more);
    }
    if (loop->peeked) {
        *item = loop->after;
        *more = !loop->ended;
        loop->peeked = false;
    } else {
        QLORA__TRY(qlora__jin_next(m, loop->iter, item, more));
    }
    loop->index0++;
    loop->before = loop->current;
    loop->current = *item;
    return QLORA_OK;
}

static qlora_result qlora__jin_loop_make(qlora__jin_machine* m, qlora__jin_turn* turn,
                                         qlora__jin_value iterable) {
    void* memory = NULL;
    QLORA__TRY(qlora__jin_get(m, sizeof(qlora__jin_loop), &memory));
    memset(memory, 0, sizeof(qlora__jin_loop));
    qlora__jin_loop* loop = (qlora__jin_loop*)memory;
    loop->iterable = iterable;
    loop->iter = turn->iter;
    loop->index0 = -1;
    loop->length = -1;
    turn->loop = loop;
    return QLORA_OK;
}

static qlora_result qlora__jin_turn_run(qlora__jin_machine* m, qlora__jin_turn* turn) {
    const qlora__jin_node* node = turn->node;
    for (;;) {
        qlora__jin_value item;
        bool more = false;
        m->line = node->line;
        QLORA__TRY(qlora__jin_turn_next(m, turn, &item, &more));
        if (!more) {
            return QLORA_OK;
        }
        QLORA__TRY(qlora__jin_assign(m, node->a, item));
        if (turn->loop != NULL) {
            qlora__jin_value loop = qlora__jin_of(QLORA__JIN_LOOP);
            loop.as.loop = turn->loop;
            m->record->slots[node->slot] = loop;
        }
        QLORA__TRY(qlora__jin_scope_enter(m, node->scope));
        QLORA__TRY(m->hooks->run(m, node->c));
        int jump = m->jump;
        m->jump = QLORA__JIN_NO_JUMP;
        if (jump == QLORA__JIN_BREAK) {
            return QLORA_OK;
        }
        turn->done = turn->done || jump == QLORA__JIN_NO_JUMP;
    }
}

QLORA__JIN_RUN(for) {
    qlora__jin_value iterable;
    qlora__jin_turn turn;
    memset(&turn, 0, sizeof turn);
    turn.node = node;
    QLORA__TRY(m->hooks->eval(m, node->b, &iterable));
    m->line = node->line;
    if (node->e != NULL) {
        qlora__jin_value source = iterable;
        QLORA__TRY(qlora__jin_iter_of(m, QLORA__JIN_TESTED, source, &iterable));
        QLORA__TRY(qlora__jin_iter_make(m, source, &iterable.as.iter->inner));
        iterable.as.iter->node = node;
        iterable.as.iter->record = m->record;
        iterable.as.iter->tested = qlora__jin_loop_test;
    }
    QLORA__TRY(qlora__jin_iter_make(m, iterable, &turn.iter));
    if (node->flag) {
        QLORA__TRY(qlora__jin_loop_make(m, &turn, iterable));
    }
    QLORA__TRY(qlora__jin_turn_run(m, &turn));
    if (node->d != NULL && !turn.done) {
        QLORA__TRY(qlora__jin_scope_enter(m, node->scope_else));
        return m->hooks->run(m, node->d);
    }
    return QLORA_OK;
}

// ---- all statements

static qlora_result qlora__jin_run_one(qlora__jin_machine* m, const qlora__jin_node* node) {
    m->line = node->line;
    switch (node->kind) {
    case QLORA__JIN_N_OUTPUT:
        return qlora__jin_run_output(m, node);
    case QLORA__JIN_N_IF:
        return qlora__jin_run_if(m, node);
    case QLORA__JIN_N_FOR:
        return qlora__jin_run_for(m, node);
    case QLORA__JIN_N_ASSIGN:
        return qlora__jin_run_assign(m, node);
    case QLORA__JIN_N_ASSIGN_BLOCK:
        return qlora__jin_run_assign_block(m, node);
    case QLORA__JIN_N_MACRO:
        return qlora__jin_run_macro(m, node);
    case QLORA__JIN_N_CALL_BLOCK:
        return qlora__jin_run_call_block(m, node);
    case QLORA__JIN_N_FILTER_BLOCK:
        return qlora__jin_run_filter_block(m, node);
    case QLORA__JIN_N_WITH:
        return qlora__jin_run_with(m, node);
    case QLORA__JIN_N_GENERATION:
        return qlora__jin_run_generation(m, node);
    case QLORA__JIN_N_BREAK:
    case QLORA__JIN_N_CONTINUE:
        m->jump = node->kind == QLORA__JIN_N_BREAK ? QLORA__JIN_BREAK : QLORA__JIN_CONTINUE;
        return QLORA_OK;
    default:
        return qlora__jin_fail(m, "internal: an unknown statement");
    }
}

static qlora_result qlora__jin_run(qlora__jin_machine* m, const qlora__jin_node* first) {
    QLORA__TRY(qlora__jin_enter(m));
    for (const qlora__jin_node* n = first; n != NULL && m->jump == QLORA__JIN_NO_JUMP;
         n = n->next) {
        QLORA__TRY(qlora__jin_work(m, 1));
        QLORA__TRY(qlora__jin_run_one(m, n));
    }
    m->depth--;
    return QLORA_OK;
}

static const qlora__jin_hooks qlora__jin_hook_table = {
    qlora__jin_eval,         qlora__jin_run,         qlora__jin_call,  qlora__jin_filter_by_name,
    qlora__jin_test_by_name, qlora__jin_method_find, qlora__jin_field, qlora__jin_method_call,
    qlora__jin_next,         qlora__jin_repr,        qlora__jin_equal, qlora__jin_less,
    qlora__jin_within};
