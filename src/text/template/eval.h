// Executing expressions.

// ---- functions that are always there ------------------------------------------------------------

enum {
    QLORA__JIN_F_RANGE,
    QLORA__JIN_F_NAMESPACE,
    QLORA__JIN_F_DICT,
    QLORA__JIN_F_CYCLER,
    QLORA__JIN_F_JOINER,
    QLORA__JIN_F_RAISE,
    QLORA__JIN_F_STRFTIME,
    QLORA__JIN_F_LIPSUM,
    QLORA__JIN_F_CYCLER_NEXT,
    QLORA__JIN_F_CYCLER_RESET,
    QLORA__JIN_F_LOOP_CYCLE,
    QLORA__JIN_F_LOOP_CHANGED
};

static const char* const qlora__jin_functions[] = {
    "range", "namespace", "dict", "cycler", "joiner", "raise_exception", "strftime_now", "lipsum"};

typedef struct qlora__jin_loop {
    qlora__jin_value iterable;
    qlora__jin_iter* iter;
    int64_t index0;
    int64_t length; // -1: not asked for yet
    qlora__jin_value before;
    qlora__jin_value current;
    qlora__jin_value after; // peeked; MISSING when not
    bool peeked;
    bool ended; // the peek found nothing
    qlora__jin_value changed;
} qlora__jin_loop;

static qlora_result qlora__jin_call_range(qlora__jin_machine* m, const qlora__jin_args* args,
                                          qlora__jin_value* out) {
    qlora__jin_value in[3];
    int64_t n[3] = {0, 0, 1};
    QLORA__TRY(qlora__jin_bind_args(m, "range", "/start stop step", 1, args, in));
    for (int i = 0; i < 3; i++) {
        QLORA__TRY(qlora__jin_need_integer(m, "range", in[i], &n[i]));
    }
    if (in[1].kind == QLORA__JIN_MISSING) {
        n[1] = n[0];
        n[0] = 0;
    }
    if (n[2] == 0) {
        return qlora__jin_fail(m, "range: the step is zero");
    }
    return qlora__jin_range_make(m, n[0], n[1], n[2], out);
}

// dict(...) and namespace(...): a mapping or pairs, then keyword arguments.
static qlora_result qlora__jin_call_dict(qlora__jin_machine* m, qlora__jin_kind kind,
                                         const qlora__jin_args* args, qlora__jin_value* out) {
    QLORA__TRY(qlora__jin_dict_make(m, kind, args->named, out));
    if (args->positional > 1) {
        return qlora__jin_fail(m, "dict: at most one argument without a name");
    }
    if (args->positional == 1 && args->items[0].kind == QLORA__JIN_UNDEFINED) {
        return qlora__jin_undefined_error(m, args->items[0]); // not an empty list here
    }
    if (args->positional == 1 && args->items[0].kind == QLORA__JIN_DICT) {
        const qlora__jin_dict* from = args->items[0].as.dict;
        for (size_t i = 0; i < from->count; i++) {
            QLORA__TRY(qlora__jin_dict_add(m, out->as.dict, from->keys[i], from->values[i]));
        }
    } else if (args->positional == 1) {
        qlora__jin_value pairs;
        QLORA__TRY(qlora__jin_to_list(m, args->items[0], &pairs));
        for (size_t i = 0; i < pairs.as.list->count; i++) {
            qlora__jin_value pair;
            QLORA__TRY(qlora__jin_to_list(m, pairs.as.list->items[i], &pair));
            if (pair.as.list->count != 2) {
                return qlora__jin_fail(m, "dict: an element is not a pair");
            }
            QLORA__TRY(qlora__jin_dict_set(m, out->as.dict, pair.as.list->items[0],
                                           pair.as.list->items[1]));
        }
    }
    for (size_t i = 0; i < args->named; i++) {
        qlora__jin_value key = qlora__jin_of(QLORA__JIN_STRING);
        key.as.string = args->names[i];
        QLORA__TRY(qlora__jin_dict_set(m, out->as.dict, key, args->items[args->positional + i]));
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_call_cycler(qlora__jin_machine* m, bool joiner,
                                           const qlora__jin_args* args, qlora__jin_value* out) {
    void* memory = NULL;
    QLORA__TRY(qlora__jin_get(m, sizeof(qlora__jin_cycler), &memory));
    qlora__jin_cycler* cycler = (qlora__jin_cycler*)memory;
    memset(cycler, 0, sizeof *cycler);
    if (joiner) {
        QLORA__TRY(qlora__jin_bind_args(m, "joiner", "sep", 0, args, &cycler->items));
        if (cycler->items.kind == QLORA__JIN_MISSING) {
            QLORA__TRY(qlora__jin_string_of(m, ", ", &cycler->items));
        }
    } else {
        if (args->positional == 0 || args->named > 0) {
            return qlora__jin_fail(m, "cycler needs items, without names");
        }
        QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_LIST, args->positional, &cycler->items));
        for (size_t i = 0; i < args->positional; i++) {
            QLORA__TRY(qlora__jin_list_add(m, cycler->items.as.list, args->items[i]));
        }
    }
    *out = qlora__jin_of(joiner ? QLORA__JIN_JOINER : QLORA__JIN_CYCLER);
    out->as.cycler = cycler;
    return QLORA_OK;
}

static qlora_result qlora__jin_call_raise(qlora__jin_machine* m, const qlora__jin_args* args) {
    qlora__jin_value message;
    qlora__jin_buffer text;
    memset(&text, 0, sizeof text);
    QLORA__TRY(qlora__jin_bind_args(m, "raise_exception", "message", 1, args, &message));
    QLORA__TRY(qlora__jin_print(m, message, &text));
    return qlora__jin_fail(m, "%.*s", (int)(text.count < 400 ? text.count : 400),
                           text.count > 0 ? text.data : "");
}

static qlora_result qlora__jin_call_strftime(qlora__jin_machine* m, const qlora__jin_args* args,
                                             qlora__jin_value* out) {
    qlora__jin_value format;
    qlora__jin_buffer text;
    memset(&text, 0, sizeof text);
    QLORA__TRY(qlora__jin_bind_args(m, "strftime_now", "format", 1, args, &format));
    QLORA__TRY(qlora__jin_need_string(m, "strftime_now", format));
    QLORA__TRY(
        qlora__jin_strftime(m, format.as.string->data, format.as.string->bytes, false, &text));
    return qlora__jin_buffer_string(m, &text, out);
}

static qlora_result qlora__jin_call_loop(qlora__jin_machine* m, qlora__jin_value callee,
                                         const qlora__jin_args* args, qlora__jin_value* out) {
    qlora__jin_loop* loop = callee.as.loop;
    if (args->named > 0) {
        return qlora__jin_fail(m, "loop: arguments have no names here");
    }
    if (callee.flag == QLORA__JIN_F_LOOP_CYCLE) {
        if (args->positional == 0) {
            return qlora__jin_fail(m, "loop.cycle: no items are given");
        }
        *out = args->items[(size_t)loop->index0 % args->positional];
        return QLORA_OK;
    }
    bool same = false;
    qlora__jin_value now;
    QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_TUPLE, args->positional, &now));
    for (size_t i = 0; i < args->positional; i++) {
        QLORA__TRY(qlora__jin_list_add(m, now.as.list, args->items[i]));
    }
    if (loop->changed.kind == QLORA__JIN_TUPLE) {
        QLORA__TRY(qlora__jin_equal(m, loop->changed, now, &same));
    }
    loop->changed = now;
    *out = qlora__jin_bool(!same);
    return QLORA_OK;
}

static qlora_result qlora__jin_call_function(qlora__jin_machine* m, qlora__jin_value callee,
                                             const qlora__jin_args* args, qlora__jin_value* out) {
    switch (callee.flag) {
    case QLORA__JIN_F_RANGE:
        return qlora__jin_call_range(m, args, out);
    case QLORA__JIN_F_NAMESPACE:
        return qlora__jin_call_dict(m, QLORA__JIN_NAMESPACE, args, out);
    case QLORA__JIN_F_DICT:
        return qlora__jin_call_dict(m, QLORA__JIN_DICT, args, out);
    case QLORA__JIN_F_CYCLER:
    case QLORA__JIN_F_JOINER:
        return qlora__jin_call_cycler(m, callee.flag == QLORA__JIN_F_JOINER, args, out);
    case QLORA__JIN_F_RAISE:
        return qlora__jin_call_raise(m, args);
    case QLORA__JIN_F_STRFTIME:
        return qlora__jin_call_strftime(m, args, out);
    case QLORA__JIN_F_CYCLER_NEXT:
        *out = callee.as.cycler->items.as.list->items[callee.as.cycler->at];
        callee.as.cycler->at = (callee.as.cycler->at + 1) % callee.as.cycler->items.as.list->count;
        return QLORA_OK;
    case QLORA__JIN_F_CYCLER_RESET:
        callee.as.cycler->at = 0;
        *out = qlora__jin_none();
        return QLORA_OK;
    case QLORA__JIN_F_LOOP_CYCLE:
    case QLORA__JIN_F_LOOP_CHANGED:
        return qlora__jin_call_loop(m, callee, args, out);
    default:
        return qlora__jin_fail(m, "the function \"lipsum\" is not supported");
    }
}

// ---- fields of loops, cyclers, macros -----------------------------------------------------------

static qlora_result qlora__jin_loop_peek(qlora__jin_machine* m, qlora__jin_loop* loop) {
    if (!loop->peeked) {
        bool more = false;
        QLORA__TRY(qlora__jin_next(m, loop->iter, &loop->after, &more));
        loop->peeked = true;
        loop->ended = !more;
    }
    return QLORA_OK;
}

// A generator is read to its end to know its length, as in jinja2.
static qlora_result qlora__jin_loop_length(qlora__jin_machine* m, qlora__jin_loop* loop) {
    if (loop->length >= 0) {
        return QLORA_OK;
    }
    if (loop->iterable.kind != QLORA__JIN_ITER) {
        return qlora__jin_length(m, loop->iterable, &loop->length);
    }
    qlora__jin_value rest;
    qlora__jin_value source = qlora__jin_of(QLORA__JIN_ITER);
    source.as.iter = loop->iter;
    QLORA__TRY(qlora__jin_to_list(m, source, &rest));
    QLORA__TRY(qlora__jin_iter_make(m, rest, &loop->iter));
    loop->length =
        (int64_t)rest.as.list->count + loop->index0 + 1 + (loop->peeked && !loop->ended ? 1 : 0);
    return QLORA_OK;
}

// long because every field is a line
static qlora_result qlora__jin_loop_field(qlora__jin_machine* m, qlora__jin_loop* loop,
                                          const char* name, size_t size, qlora__jin_value* out,
                                          bool* found) {
    static const char* const names[] = {"index",    "index0",    "first",    "last",     "length",
                                        "revindex", "revindex0", "previtem", "nextitem", "depth",
                                        "depth0",   "cycle",     "changed"};
    size_t which = 0;
    while (which < QLORA__TEXT_COUNT(names) && !qlora__jin_named(names[which], name, size)) {
        which++;
    }
    *found = which < QLORA__TEXT_COUNT(names);
    if (which == 3 || which == 8) {
        QLORA__TRY(qlora__jin_loop_peek(m, loop));
    }
    if (which >= 4 && which <= 6) {
        QLORA__TRY(qlora__jin_loop_length(m, loop));
    }
    switch (which) {
    case 0:
        *out = qlora__jin_int(loop->index0 + 1);
        break;
    case 1:
        *out = qlora__jin_int(loop->index0);
        break;
    case 2:
        *out = qlora__jin_bool(loop->index0 == 0);
        break;
    case 3:
        *out = qlora__jin_bool(loop->ended);
        break;
    case 4:
        *out = qlora__jin_int(loop->length);
        break;
    case 5:
        *out = qlora__jin_int(loop->length - loop->index0);
        break;
    case 6:
        *out = qlora__jin_int(loop->length - loop->index0 - 1);
        break;
    case 7:
        *out = loop->before;
        return loop->index0 == 0
                   ? qlora__jin_undefined(m, NULL, "the previous item", 17, false, out)
                   : QLORA_OK;
    case 8:
        *out = loop->after;
        return loop->ended ? qlora__jin_undefined(m, NULL, "the next item", 13, false, out)
                           : QLORA_OK;
    case 9:
        *out = qlora__jin_int(1);
        break;
    case 10:
        *out = qlora__jin_int(0);
        break;
    case 11:
    case 12:
        *out = qlora__jin_of(QLORA__JIN_FUNCTION);
        out->flag = which == 11 ? QLORA__JIN_F_LOOP_CYCLE : QLORA__JIN_F_LOOP_CHANGED;
        out->as.loop = loop;
        break;
    default:
        break;
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_macro_field(qlora__jin_machine* m, const qlora__jin_node* node,
                                           const char* name, size_t size, qlora__jin_value* out,
                                           bool* found) {
    *found = true;
    if (qlora__jin_named("name", name, size)) {
        return qlora__jin_string_share(m, node->name, node->size, out);
    }
    if (qlora__jin_named("arguments", name, size)) {
        QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_TUPLE, 4, out));
        for (const qlora__jin_node* n = node->b; n != NULL; n = n->next) {
            qlora__jin_value text;
            QLORA__TRY(qlora__jin_string_share(m, n->name, n->size, &text));
            QLORA__TRY(qlora__jin_list_add(m, out->as.list, text));
        }
        return QLORA_OK;
    }
    *out =
        qlora__jin_bool(qlora__jin_named("caller", name, size) ? qlora__jin_uses(node->c, "caller")
                        : qlora__jin_named("catch_kwargs", name, size) ? node->uses_kwargs
                                                                       : node->uses_varargs);
    *found = qlora__jin_named("caller", name, size) ||
             qlora__jin_named("catch_kwargs", name, size) ||
             qlora__jin_named("catch_varargs", name, size);
    return QLORA_OK;
}

// A number as a complex one or as a fraction.
static qlora_result qlora__jin_number_field(qlora__jin_value v, const char* name, size_t size,
                                            qlora__jin_value* out, bool* found) {
    bool real = v.kind == QLORA__JIN_FLOAT;
    bool same = qlora__jin_named("real", name, size) ||
                (!real && qlora__jin_named("numerator", name, size));
    bool imaginary = qlora__jin_named("imag", name, size);
    *found = same || imaginary || (!real && qlora__jin_named("denominator", name, size));
    if (*found && real) {
        *out = same ? v : qlora__jin_float(0.0);
    } else if (*found) {
        *out = qlora__jin_int(same ? qlora__jin_integer_of(v) : imaginary ? 0 : 1);
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_field(qlora__jin_machine* m, qlora__jin_value v, const char* name,
                                     size_t size, qlora__jin_value* out, bool* found) {
    *found = false;
    switch (v.kind) {
    case QLORA__JIN_LOOP:
        return qlora__jin_loop_field(m, v.as.loop, name, size, out, found);
    case QLORA__JIN_MACRO:
        return qlora__jin_macro_field(m, v.as.macro->node, name, size, out, found);
    case QLORA__JIN_CYCLER:
        *found = qlora__jin_named("current", name, size) || qlora__jin_named("next", name, size) ||
                 qlora__jin_named("reset", name, size);
        if (*found && name[0] == 'c') {
            *out = v.as.cycler->items.as.list->items[v.as.cycler->at];
        } else if (*found) {
            *out = qlora__jin_of(QLORA__JIN_FUNCTION);
            out->flag = name[0] == 'n' ? QLORA__JIN_F_CYCLER_NEXT : QLORA__JIN_F_CYCLER_RESET;
            out->as.cycler = v.as.cycler;
        }
        return QLORA_OK;
    case QLORA__JIN_RANGE:
        *found = qlora__jin_named("start", name, size) || qlora__jin_named("stop", name, size) ||
                 qlora__jin_named("step", name, size);
        *out = qlora__jin_int(size == 5                  ? v.as.range->start
                              : *found && name[2] == 'o' ? v.as.range->stop
                                                         : v.as.range->step);
        return QLORA_OK;
    case QLORA__JIN_BOOL:
    case QLORA__JIN_INT:
    case QLORA__JIN_FLOAT:
        return qlora__jin_number_field(v, name, size, out, found);
    case QLORA__JIN_TUPLE: // of groupby
        *found = v.flag == 1 &&
                 (qlora__jin_named("grouper", name, size) || qlora__jin_named("list", name, size));
        *out = *found ? v.as.list->items[name[0] == 'g' ? 0 : 1] : *out;
        return QLORA_OK;
    default:
        return QLORA_OK;
    }
}

// ---- expressions --------------------------------------------------------------------------------

// Values that can be written as a constant: numbers, strings, and collections of them.
static bool qlora__jin_is_constant(qlora__jin_machine* m, qlora__jin_value v) {
    const qlora__jin_value* lists[2] = {NULL, NULL};
    size_t count = 0;
    if (v.kind == QLORA__JIN_LIST || v.kind == QLORA__JIN_TUPLE) {
        lists[0] = v.as.list->items;
        count = v.as.list->count;
    } else if (v.kind == QLORA__JIN_DICT) {
        lists[0] = v.as.dict->keys;
        lists[1] = v.as.dict->values;
        count = v.as.dict->count;
    } else {
        return (v.kind >= QLORA__JIN_NONE && v.kind <= QLORA__JIN_STRING) ||
               v.kind == QLORA__JIN_RANGE;
    }
    bool all = m->depth < QLORA__JIN_MAX_DEPTH;
    m->depth++;
    for (size_t i = 0; all && i < count; i++) {
        all = qlora__jin_is_constant(m, lists[0][i]) &&
              (lists[1] == NULL || qlora__jin_is_constant(m, lists[1][i]));
    }
    m->depth--;
    return all;
}

#define QLORA__JIN_EVAL(name)                                                                      \
    static qlora_result qlora__jin_eval_##name(qlora__jin_machine* m, const qlora__jin_node* node, \
                                               qlora__jin_value* out)

static qlora__jin_value* qlora__jin_slot(qlora__jin_machine* m, const qlora__jin_node* node) {
    qlora__jin_record* record = m->record;
    for (uint32_t i = 0; i < node->hops; i++) {
        record = record->outer;
    }
    return &record->slots[node->slot];
}

QLORA__JIN_EVAL(const) {
    (void)m;
    *out = node->value;
    return QLORA_OK;
}

// What depends on the conversation is not a constant.
static qlora_result qlora__jin_no_constant(qlora__jin_machine* m) {
    return m->folding ? qlora__jin_fail(m, "not a constant") : QLORA_OK;
}

QLORA__JIN_EVAL(name) {
    QLORA__TRY(qlora__jin_no_constant(m));
    const qlora__jin_value* value = qlora__jin_slot(m, node);
    if (value->kind == QLORA__JIN_MISSING) {
        if (qlora__jin_named("self", node->name, node->size)) { // jinja2's reference to blocks
            return qlora__jin_fail(m, "\"self\" is not supported, because blocks are not");
        }
        return qlora__jin_undefined(m, NULL, node->name, node->size, false, out);
    }
    *out = *value;
    return QLORA_OK;
}

QLORA__JIN_EVAL(list) {
    qlora__jin_kind kind = node->kind == QLORA__JIN_N_TUPLE ? QLORA__JIN_TUPLE : QLORA__JIN_LIST;
    qlora__jin_value list;
    QLORA__TRY(qlora__jin_list_make(m, kind, 0, &list));
    for (const qlora__jin_node* n = node->a; n != NULL; n = n->next) {
        qlora__jin_value item;
        QLORA__TRY(m->hooks->eval(m, n, &item));
        QLORA__TRY(qlora__jin_list_add(m, list.as.list, item));
    }
    *out = list;
    return QLORA_OK;
}

QLORA__JIN_EVAL(dict) {
    qlora__jin_value dict;
    QLORA__TRY(qlora__jin_dict_make(m, QLORA__JIN_DICT, 0, &dict));
    for (const qlora__jin_node* n = node->a; n != NULL; n = n->next->next) {
        qlora__jin_value key;
        qlora__jin_value value;
        QLORA__TRY(m->hooks->eval(m, n, &key));
        QLORA__TRY(m->hooks->eval(m, n->next, &value));
        QLORA__TRY(qlora__jin_dict_set(m, dict.as.dict, key, value));
    }
    *out = dict;
    return QLORA_OK;
}

QLORA__JIN_EVAL(getattr) {
    qlora__jin_value v;
    QLORA__TRY(m->hooks->eval(m, node->a, &v));
    m->line = node->line;
    return qlora__jin_getattr(m, v, node->name, node->size, out);
}

QLORA__JIN_EVAL(getitem) {
    qlora__jin_value v;
    qlora__jin_value key;
    QLORA__TRY(m->hooks->eval(m, node->a, &v));
    if (node->b->kind != QLORA__JIN_N_SLICE) {
        QLORA__TRY(m->hooks->eval(m, node->b, &key));
        m->line = node->line;
        return qlora__jin_getitem(m, v, key, out);
    }
    const qlora__jin_node* slice[3] = {node->b->a, node->b->b, node->b->c};
    qlora__jin_value parts[3];
    bool found = false;
    for (int i = 0; i < 3; i++) {
        parts[i] = qlora__jin_of(QLORA__JIN_MISSING);
        if (slice[i] != NULL) {
            QLORA__TRY(m->hooks->eval(m, slice[i], &parts[i]));
        }
    }
    m->line = node->line;
    if (v.kind == QLORA__JIN_UNDEFINED) {
        return qlora__jin_undefined_error(m, v);
    }
    QLORA__TRY(qlora__jin_slice(m, v, parts, out, &found));
    if (!found && m->folding) {
        return qlora__jin_undefined(m, qlora__jin_type(v), "slice", 5, false, out);
    }
    return found ? QLORA_OK
                 : qlora__jin_fail(m, "a %s cannot be sliced like this", qlora__jin_type(v));
}

// Room for one more argument at the end of what has been collected.
static qlora_result qlora__jin_args_add(qlora__jin_machine* m, qlora__jin_list* items,
                                        qlora__jin_value value) {
    return qlora__jin_list_add(m, items, value);
}

// *list and **dict of a call
static qlora_result qlora__jin_args_spread(qlora__jin_machine* m, const qlora__jin_node* node,
                                           qlora__jin_list* items, qlora__jin_value* mapping) {
    qlora__jin_value value;
    if (node->d != NULL) {
        QLORA__TRY(m->hooks->eval(m, node->d, &value));
        QLORA__TRY(qlora__jin_to_list(m, value, &value));
        for (size_t i = 0; i < value.as.list->count; i++) {
            QLORA__TRY(qlora__jin_args_add(m, items, value.as.list->items[i]));
        }
    }
    if (node->e != NULL) {
        QLORA__TRY(m->hooks->eval(m, node->e, mapping));
        bool strings = mapping->kind == QLORA__JIN_DICT;
        for (size_t i = 0; strings && i < mapping->as.dict->count; i++) {
            strings = mapping->as.dict->keys[i].kind == QLORA__JIN_STRING;
        }
        if (!strings) {
            return qlora__jin_fail(m, "** needs a dictionary whose keys are strings");
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_args_eval(qlora__jin_machine* m, const qlora__jin_node* node,
                                         const qlora__jin_value* caller, qlora__jin_args* out) {
    static const qlora__jin_string caller_name = {"caller", 6, 6};
    qlora__jin_value list;
    qlora__jin_value mapping = qlora__jin_of(QLORA__JIN_MISSING);
    size_t named = caller != NULL ? 1 : 0;
    void* memory = NULL;
    memset(out, 0, sizeof *out);
    if (node->b == NULL && node->c == NULL && node->d == NULL && node->e == NULL && named == 0) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_LIST, 4, &list));
    qlora__jin_list* items = list.as.list;
    for (const qlora__jin_node* n = node->b; n != NULL; n = n->next) {
        qlora__jin_value value;
        QLORA__TRY(m->hooks->eval(m, n, &value));
        QLORA__TRY(qlora__jin_args_add(m, items, value));
    }
    QLORA__TRY(qlora__jin_args_spread(m, node, items, &mapping));
    out->positional = items->count;
    for (const qlora__jin_node* n = node->c; n != NULL; n = n->next) {
        named++;
    }
    named += mapping.kind == QLORA__JIN_DICT ? mapping.as.dict->count : 0;
    QLORA__TRY(qlora__jin_get(m, (named + 1) * sizeof *out->names, &memory));
    out->names = (const qlora__jin_string**)memory;
    for (const qlora__jin_node* n = node->c; n != NULL; n = n->next) {
        qlora__jin_value value;
        QLORA__TRY(m->hooks->eval(m, n->a, &value));
        QLORA__TRY(qlora__jin_args_add(m, items, value));
        out->names[out->named++] = n->value.as.string;
    }
    if (caller != NULL) {
        QLORA__TRY(qlora__jin_args_add(m, items, *caller));
        out->names[out->named++] = &caller_name;
    }
    for (size_t i = 0; mapping.kind == QLORA__JIN_DICT && i < mapping.as.dict->count; i++) {
        const qlora__jin_string* name = mapping.as.dict->keys[i].as.string;
        for (size_t k = 0; k < out->named; k++) {
            if (qlora__jin_compare_strings(out->names[k], name) == 0) {
                return qlora__jin_fail(m, "an argument is given twice by its name");
            }
        }
        QLORA__TRY(qlora__jin_args_add(m, items, mapping.as.dict->values[i]));
        out->names[out->named++] = name;
    }
    out->items = items->items;
    return QLORA_OK;
}

QLORA__JIN_EVAL(call) {
    qlora__jin_value callee;
    qlora__jin_args args;
    QLORA__TRY(qlora__jin_no_constant(m));
    QLORA__TRY(m->hooks->eval(m, node->a, &callee));
    QLORA__TRY(qlora__jin_args_eval(m, node, NULL, &args));
    m->line = node->line;
    return m->hooks->call(m, callee, &args, out);
}

QLORA__JIN_EVAL(filter) {
    qlora__jin_value v;
    qlora__jin_args args;
    QLORA__TRY(m->hooks->eval(m, node->a, &v));
    QLORA__TRY(qlora__jin_args_eval(m, node, NULL, &args));
    m->line = node->line;
    if (node->found == NULL) {
        return qlora__jin_unknown(m, "filter", node->name, node->size);
    }
    if (((const qlora__jin_filter_row*)node->found)->many != NULL) { // they use the variables
        QLORA__TRY(qlora__jin_no_constant(m));
    }
    return qlora__jin_filter_run(m, (const qlora__jin_filter_row*)node->found, v, &args, out);
}

QLORA__JIN_EVAL(test) {
    qlora__jin_value v;
    qlora__jin_args args;
    bool truth = false;
    QLORA__TRY(m->hooks->eval(m, node->a, &v));
    QLORA__TRY(qlora__jin_args_eval(m, node, NULL, &args));
    m->line = node->line;
    if (node->found == NULL) {
        return qlora__jin_unknown(m, "test", node->name, node->size);
    }
    QLORA__TRY(qlora__jin_test_run(m, (const qlora__jin_test_row*)node->found, v, &args, &truth));
    *out = qlora__jin_bool(truth);
    return QLORA_OK;
}

QLORA__JIN_EVAL(negate) {
    qlora__jin_value v;
    QLORA__TRY(m->hooks->eval(m, node->a, &v));
    *out = qlora__jin_bool(!qlora__jin_truth(v));
    return QLORA_OK;
}

QLORA__JIN_EVAL(sign) {
    qlora__jin_value v;
    QLORA__TRY(m->hooks->eval(m, node->a, &v));
    m->line = node->line;
    if (v.kind == QLORA__JIN_UNDEFINED) {
        return qlora__jin_undefined_error(m, v);
    }
    if (!qlora__jin_is_number(v)) {
        return qlora__jin_fail(m, "a %s has no sign", qlora__jin_type(v));
    }
    if (v.kind == QLORA__JIN_FLOAT) {
        *out = qlora__jin_float(node->kind == QLORA__JIN_N_NEG ? -v.as.real : v.as.real);
        return QLORA_OK;
    }
    int64_t n = qlora__jin_integer_of(v);
    if (node->kind == QLORA__JIN_N_NEG && n == INT64_MIN) {
        return qlora__jin_too_big(m);
    }
    *out = qlora__jin_int(node->kind == QLORA__JIN_N_NEG ? -n : n);
    return QLORA_OK;
}

QLORA__JIN_EVAL(and_or) {
    QLORA__TRY(m->hooks->eval(m, node->a, out));
    bool enough = qlora__jin_truth(*out) == (node->kind == QLORA__JIN_N_OR);
    return enough ? QLORA_OK : m->hooks->eval(m, node->b, out);
}

QLORA__JIN_EVAL(binary) {
    qlora__jin_value a;
    qlora__jin_value b;
    QLORA__TRY(m->hooks->eval(m, node->a, &a));
    QLORA__TRY(m->hooks->eval(m, node->b, &b));
    m->line = node->line;
    char op = node->op[1] == '\0' ? node->op[0] : node->op[0] == '/' ? 'f' : 'p';
    if (op == '%' && a.kind == QLORA__JIN_STRING) {
        return qlora__jin_percent(m, a, b, out);
    }
    return qlora__jin_binary(m, op, a, b, out);
}

static qlora_result qlora__jin_compare(qlora__jin_machine* m, const char op[2], qlora__jin_value a,
                                       qlora__jin_value b, bool* out) {
    switch (op[0]) {
    case '=':
        return qlora__jin_equal(m, a, b, out);
    case '!':
        QLORA__TRY(qlora__jin_equal(m, a, b, out));
        *out = !*out;
        return QLORA_OK;
    case '<':
        return qlora__jin_less(m, a, b, op[1] == '=', out);
    case '>':
        return qlora__jin_less(m, b, a, op[1] == '=', out);
    default:
        QLORA__TRY(qlora__jin_contains(m, b, a, out));
        *out = *out == (op[0] == 'i');
        return QLORA_OK;
    }
}

QLORA__JIN_EVAL(compare) {
    qlora__jin_value left;
    bool truth = true;
    QLORA__TRY(m->hooks->eval(m, node->a, &left));
    for (const qlora__jin_node* n = node->b; n != NULL && truth; n = n->next) {
        qlora__jin_value right;
        QLORA__TRY(m->hooks->eval(m, n->a, &right));
        m->line = n->line;
        QLORA__TRY(qlora__jin_compare(m, n->op, left, right, &truth));
        left = right;
    }
    *out = qlora__jin_bool(truth);
    return QLORA_OK;
}

QLORA__JIN_EVAL(concat) {
    qlora__jin_buffer buffer;
    memset(&buffer, 0, sizeof buffer);
    for (const qlora__jin_node* n = node->a; n != NULL; n = n->next) {
        qlora__jin_value part;
        QLORA__TRY(m->hooks->eval(m, n, &part));
        m->line = node->line;
        QLORA__TRY(qlora__jin_print(m, part, &buffer));
    }
    return qlora__jin_buffer_string(m, &buffer, out);
}

QLORA__JIN_EVAL(cond) {
    qlora__jin_value v;
    QLORA__TRY(m->hooks->eval(m, node->a, &v));
    if (qlora__jin_truth(v)) {
        return m->hooks->eval(m, node->b, out);
    }
    return node->c != NULL ? m->hooks->eval(m, node->c, out)
                           : qlora__jin_undefined(m, NULL, "an if without an else", 21, false, out);
}

QLORA__JIN_EVAL(wrong) {
    (void)out;
    m->line = node->line;
    return qlora__jin_fail(m, "this is not an expression");
}

typedef qlora_result (*qlora__jin_eval_fn)(qlora__jin_machine* m, const qlora__jin_node* node,
                                           qlora__jin_value* out);

// In the order of the kinds; statements are not expressions.
static const qlora__jin_eval_fn qlora__jin_evals[QLORA__JIN_N_OUTPUT] = {
    qlora__jin_eval_const,   qlora__jin_eval_name,    qlora__jin_eval_wrong,
    qlora__jin_eval_list,    qlora__jin_eval_list,    qlora__jin_eval_dict,
    qlora__jin_eval_getattr, qlora__jin_eval_getitem, qlora__jin_eval_wrong,
    qlora__jin_eval_call,    qlora__jin_eval_filter,  qlora__jin_eval_test,
    qlora__jin_eval_wrong,   qlora__jin_eval_negate,  qlora__jin_eval_sign,
    qlora__jin_eval_sign,    qlora__jin_eval_and_or,  qlora__jin_eval_and_or,
    qlora__jin_eval_binary,  qlora__jin_eval_compare, qlora__jin_eval_wrong,
    qlora__jin_eval_concat,  qlora__jin_eval_cond};

// jinja2 computes constants when it compiles a template. There, a slice of what cannot be sliced is
// undefined, while it is an error when the template runs; so such expressions are tried both ways.
// What prints as a constant replaces the expression; `any`: every value does.
static qlora_result qlora__jin_fold(qlora__jin_machine* m, const qlora__jin_node* node, bool any,
                                    qlora__jin_value* out, bool* done) {
    char error[QLORA__ERROR_SIZE];
    uint32_t depth = m->depth;
    memcpy(error, m->env->error, sizeof error);
    m->folding = true;
    qlora_result r = m->hooks->eval(m, node, out);
    m->folding = false;
    m->depth = depth;
    *done = r == QLORA_OK && (any || qlora__jin_is_constant(m, *out));
    if (r != QLORA_OK && r != QLORA_ERR_MEMORY) {
        memcpy(m->env->error, error, sizeof error);
        return m->steps <= m->step_limit ? QLORA_OK : qlora__jin_work(m, 1);
    }
    return r;
}

static qlora_result qlora__jin_eval(qlora__jin_machine* m, const qlora__jin_node* node,
                                    qlora__jin_value* out) {
    if (node->kind == QLORA__JIN_N_CONST) {
        *out = node->value;
        return QLORA_OK;
    }
    if (node->folds && !m->folding) {
        bool done = false;
        QLORA__TRY(qlora__jin_fold(m, node, false, out, &done));
        if (done) {
            return QLORA_OK;
        }
    }
    QLORA__TRY(qlora__jin_enter(m));
    QLORA__TRY(node->kind < QLORA__JIN_N_OUTPUT ? qlora__jin_evals[node->kind](m, node, out)
                                                : qlora__jin_eval_wrong(m, node, out));
    m->depth--;
    return QLORA_OK;
}
