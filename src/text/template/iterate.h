// Iterators that compute: map, select and their kin. As in jinja2 they do nothing, not even check
// their arguments, until a value is asked for.

// Follows "a.b.0" (or a number) from an item. `fallback` replaces an undefined value.
static qlora_result qlora__jin_follow(qlora__jin_machine* m, qlora__jin_value item,
                                      qlora__jin_value path, qlora__jin_value fallback,
                                      qlora__jin_value* out) {
    *out = item;
    if (path.kind == QLORA__JIN_NONE || path.kind == QLORA__JIN_MISSING) {
        return QLORA_OK;
    }
    if (path.kind != QLORA__JIN_STRING) {
        QLORA__TRY(qlora__jin_getitem(m, item, path, out));
    }
    size_t at = 0;
    while (path.kind == QLORA__JIN_STRING && at <= path.as.string->bytes) {
        const qlora__jin_string* s = path.as.string;
        size_t dot = qlora__jin_find_bytes(s->data, s->bytes, at, ".", 1);
        size_t end = dot == SIZE_MAX ? s->bytes : dot;
        size_t digits = at;
        qlora__jin_value key = qlora__jin_int(qlora__jin_read_number(s->data, end, &digits));
        if (digits != end || end == at) {
            QLORA__TRY(qlora__jin_string_share(m, s->data + at, end - at, &key));
        }
        QLORA__TRY(qlora__jin_getitem(m, *out, key, out));
        if (out->kind == QLORA__JIN_UNDEFINED && fallback.kind != QLORA__JIN_MISSING &&
            fallback.kind != QLORA__JIN_NONE) {
            *out = fallback;
        }
        at = end + 1;
    }
    if (out->kind == QLORA__JIN_UNDEFINED && fallback.kind != QLORA__JIN_MISSING &&
        fallback.kind != QLORA__JIN_NONE) {
        *out = fallback;
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_next_mapped(qlora__jin_machine* m, qlora__jin_iter* iter,
                                           qlora__jin_value* out) {
    qlora__jin_value item = *out;
    if (iter->how == QLORA__JIN_MAP_ATTRIBUTE) {
        return qlora__jin_follow(m, item, iter->attribute, iter->fallback, out);
    }
    if (iter->function.kind != QLORA__JIN_STRING) {
        return iter->function.kind == QLORA__JIN_MISSING
                   ? qlora__jin_fail(m, "map needs the name of a filter, or attribute=")
                   : qlora__jin_fail(m, "map: the name of a filter is a %s",
                                     qlora__jin_type(iter->function));
    }
    const qlora__jin_string* name = iter->function.as.string;
    return m->hooks->filter(m, name->data, name->bytes, item, &iter->args, out);
}

static qlora_result qlora__jin_selects(qlora__jin_machine* m, qlora__jin_iter* iter,
                                       qlora__jin_value item, bool* out) {
    qlora__jin_value tested = item;
    bool truth = false;
    if (iter->attribute.kind != QLORA__JIN_MISSING) {
        QLORA__TRY(qlora__jin_follow(m, item, iter->attribute, iter->fallback, &tested));
    }
    if (iter->function.kind == QLORA__JIN_MISSING) {
        truth = qlora__jin_truth(tested);
    } else if (iter->function.kind != QLORA__JIN_STRING) {
        return qlora__jin_fail(m, "the name of a test is a %s", qlora__jin_type(iter->function));
    } else {
        const qlora__jin_string* name = iter->function.as.string;
        QLORA__TRY(m->hooks->test(m, name->data, name->bytes, tested, &iter->args, &truth));
    }
    *out = truth == iter->wanted;
    return QLORA_OK;
}

static qlora_result qlora__jin_next_computed(qlora__jin_machine* m, qlora__jin_iter* iter,
                                             qlora__jin_value* out, bool* more) {
    if (iter->how == QLORA__JIN_LAZY) {
        QLORA__TRY(iter->late(m, iter->late_in, &iter->source));
        iter->how = QLORA__JIN_PLAIN;
        return qlora__jin_next_plain(m, iter, out, more);
    }
    if (iter->inner == NULL) {
        // jinja2's filters: nothing, even for None
        if (!qlora__jin_truth(iter->source) && iter->how != QLORA__JIN_TESTED) {
            iter->source = qlora__jin_of(QLORA__JIN_UNDEFINED);
        }
        QLORA__TRY(qlora__jin_iter_make(m, iter->source, &iter->inner));
    }
    for (;;) {
        bool keep = true;
        QLORA__TRY(m->hooks->next(m, iter->inner, out, more));
        if (!*more) {
            return QLORA_OK;
        }
        if (iter->how != QLORA__JIN_SELECT && iter->how != QLORA__JIN_TESTED) {
            return qlora__jin_next_mapped(m, iter, out);
        }
        QLORA__TRY(iter->how == QLORA__JIN_SELECT ? qlora__jin_selects(m, iter, *out, &keep)
                                                  : iter->tested(m, iter, *out, &keep));
        if (keep) {
            return QLORA_OK;
        }
    }
}

static qlora_result qlora__jin_next(qlora__jin_machine* m, qlora__jin_iter* iter,
                                    qlora__jin_value* out, bool* more) {
    QLORA__TRY(qlora__jin_enter(m));
    QLORA__TRY(iter->how == QLORA__JIN_PLAIN ? qlora__jin_next_plain(m, iter, out, more)
                                             : qlora__jin_next_computed(m, iter, out, more));
    m->depth--;
    return QLORA_OK;
}

static qlora_result qlora__jin_iter_of(qlora__jin_machine* m, int how, qlora__jin_value source,
                                       qlora__jin_value* out) {
    void* memory = NULL;
    QLORA__TRY(qlora__jin_get(m, sizeof(qlora__jin_iter), &memory));
    memset(memory, 0, sizeof(qlora__jin_iter));
    qlora__jin_iter* iter = (qlora__jin_iter*)memory;
    iter->how = how;
    iter->source = source;
    *out = qlora__jin_of(QLORA__JIN_ITER);
    out->as.iter = iter;
    return QLORA_OK;
}

// A generator whose values are those of the list that `late` makes.
static qlora_result qlora__jin_lazy(qlora__jin_machine* m, qlora__jin_filter_fn late,
                                    const qlora__jin_value* in, size_t count,
                                    qlora__jin_value* out) {
    QLORA__TRY(qlora__jin_iter_of(m, QLORA__JIN_LAZY, qlora__jin_of(QLORA__JIN_MISSING), out));
    qlora__jin_iter* iter = out->as.iter;
    iter->late = late;
    QLORA__TRY(qlora__jin_get_values(m, count, &iter->late_in));
    memcpy(iter->late_in, in, count * sizeof *in);
    return QLORA_OK;
}

static qlora_result qlora__jin_copy_args(qlora__jin_machine* m, const qlora__jin_args* from,
                                         size_t skip, qlora__jin_args* out) {
    memset(out, 0, sizeof *out);
    skip = skip < from->positional ? skip : from->positional;
    out->positional = from->positional - skip;
    out->named = from->named;
    size_t count = out->positional + out->named;
    QLORA__TRY(qlora__jin_get_values(m, count, &out->items));
    if (count > 0) {
        memcpy(out->items, from->items + skip, count * sizeof *out->items);
    }
    if (out->named > 0) {
        void* names = NULL;
        QLORA__TRY(qlora__jin_get(m, out->named * sizeof *out->names, &names));
        memcpy(names, from->names, out->named * sizeof *out->names);
        out->names = (const qlora__jin_string**)names;
    }
    return QLORA_OK;
}

// The keyword argument of that name, or NULL.
static const qlora__jin_value* qlora__jin_keyword(const qlora__jin_args* args, const char* name) {
    for (size_t i = 0; i < args->named; i++) {
        if (args->names[i]->bytes == strlen(name) &&
            memcmp(args->names[i]->data, name, args->names[i]->bytes) == 0) {
            return &args->items[args->positional + i];
        }
    }
    return NULL;
}

static qlora_result qlora__jin_filter_map(qlora__jin_machine* m, qlora__jin_value v,
                                          const qlora__jin_args* args, qlora__jin_value* out) {
    const qlora__jin_value* attribute = qlora__jin_keyword(args, "attribute");
    const qlora__jin_value* fallback = qlora__jin_keyword(args, "default");
    if (args->positional == 0 && attribute != NULL) {
        if (args->named > (fallback != NULL ? 2u : 1u)) {
            return qlora__jin_fail(m, "map: an argument is given by a name that is unknown");
        }
        QLORA__TRY(qlora__jin_iter_of(m, QLORA__JIN_MAP_ATTRIBUTE, v, out));
        out->as.iter->attribute = *attribute;
        out->as.iter->fallback = fallback != NULL ? *fallback : qlora__jin_none();
        return QLORA_OK;
    }
    QLORA__TRY(qlora__jin_iter_of(m, QLORA__JIN_MAP_FILTER, v, out));
    out->as.iter->function =
        args->positional > 0 ? args->items[0] : qlora__jin_of(QLORA__JIN_MISSING);
    return qlora__jin_copy_args(m, args, 1, &out->as.iter->args);
}

static qlora_result qlora__jin_select(qlora__jin_machine* m, qlora__jin_value v,
                                      const qlora__jin_args* args, bool wanted, bool attribute,
                                      qlora__jin_value* out) {
    size_t skip = attribute ? 1 : 0;
    if (attribute && args->positional == 0) {
        return qlora__jin_fail(m, "selectattr and rejectattr need the name of an attribute");
    }
    QLORA__TRY(qlora__jin_iter_of(m, QLORA__JIN_SELECT, v, out));
    qlora__jin_iter* iter = out->as.iter;
    iter->wanted = wanted;
    if (attribute) {
        iter->attribute = args->items[0];
    }
    if (args->positional > skip) {
        iter->function = args->items[skip];
    }
    return qlora__jin_copy_args(m, args, skip + 1, &iter->args);
}

static qlora_result qlora__jin_filter_select(qlora__jin_machine* m, qlora__jin_value v,
                                             const qlora__jin_args* args, qlora__jin_value* out) {
    return qlora__jin_select(m, v, args, true, false, out);
}

static qlora_result qlora__jin_filter_reject(qlora__jin_machine* m, qlora__jin_value v,
                                             const qlora__jin_args* args, qlora__jin_value* out) {
    return qlora__jin_select(m, v, args, false, false, out);
}

static qlora_result qlora__jin_filter_selectattr(qlora__jin_machine* m, qlora__jin_value v,
                                                 const qlora__jin_args* args,
                                                 qlora__jin_value* out) {
    return qlora__jin_select(m, v, args, true, true, out);
}

static qlora_result qlora__jin_filter_rejectattr(qlora__jin_machine* m, qlora__jin_value v,
                                                 const qlora__jin_args* args,
                                                 qlora__jin_value* out) {
    return qlora__jin_select(m, v, args, false, true, out);
}

// ---- sorting ------------------------------------------------------------------------------------

// The keys by which items are compared: an attribute, in lower case unless the case counts.
static qlora_result qlora__jin_sort_key(qlora__jin_machine* m, qlora__jin_value item,
                                        qlora__jin_value path, bool case_sensitive,
                                        qlora__jin_value* out) {
    QLORA__TRY(qlora__jin_follow(m, item, path, qlora__jin_of(QLORA__JIN_MISSING), out));
    if (!case_sensitive && out->kind == QLORA__JIN_STRING) {
        qlora__jin_value text = *out;
        return qlora__jin_recase(m, text, QLORA__JIN_ALL_LOWER, out);
    }
    return QLORA_OK;
}

// Merges two runs of `order`, which has been sorted by keys so far, stably.
static qlora_result qlora__jin_merge(qlora__jin_machine* m, const qlora__jin_value* keys,
                                     const size_t* from, size_t* to, size_t begin, size_t middle,
                                     size_t end, bool reverse) {
    size_t left = begin;
    size_t right = middle;
    for (size_t i = begin; i < end; i++) {
        bool second = left == middle;
        if (left < middle && right < end) {
            QLORA__TRY(
                reverse ? m->hooks->less(m, keys[from[left]], keys[from[right]], false, &second)
                        : m->hooks->less(m, keys[from[right]], keys[from[left]], false, &second));
        }
        to[i] = second ? from[right++] : from[left++];
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_sort(qlora__jin_machine* m, qlora__jin_list* list,
                                    const qlora__jin_value* keys, bool reverse) {
    size_t count = list->count;
    void* memory = NULL;
    qlora__jin_value* sorted = NULL;
    QLORA__TRY(qlora__jin_get(m, 2 * count * sizeof(size_t), &memory));
    QLORA__TRY(qlora__jin_get_values(m, count, &sorted));
    size_t* from = (size_t*)memory;
    size_t* to = from + count;
    for (size_t i = 0; i < count; i++) {
        from[i] = i;
    }
    for (size_t width = 1; width < count; width *= 2) {
        for (size_t begin = 0; begin < count; begin += 2 * width) {
            size_t middle = begin + width < count ? begin + width : count;
            size_t end = begin + 2 * width < count ? begin + 2 * width : count;
            QLORA__TRY(qlora__jin_merge(m, keys, from, to, begin, middle, end, reverse));
        }
        size_t* swap = from;
        from = to;
        to = swap;
    }
    for (size_t i = 0; i < count; i++) {
        sorted[i] = list->items[from[i]];
    }
    list->items = sorted;
    list->capacity = count;
    return QLORA_OK;
}

// Python compares the keys of several attributes, "a,b", as a list.
static qlora_result qlora__jin_sort_keys_of(qlora__jin_machine* m, const qlora__jin_list* list,
                                            qlora__jin_value path, bool case_sensitive,
                                            qlora__jin_value** out) {
    QLORA__TRY(qlora__jin_get_values(m, list->count, out));
    bool several = path.kind == QLORA__JIN_STRING && path.as.string->bytes > 0 &&
                   memchr(path.as.string->data, ',', path.as.string->bytes) != NULL;
    for (size_t i = 0; i < list->count; i++) {
        if (!several) {
            QLORA__TRY(qlora__jin_sort_key(m, list->items[i], path, case_sensitive, &(*out)[i]));
            continue;
        }
        qlora__jin_value parts;
        qlora__jin_value comma;
        QLORA__TRY(qlora__jin_string_of(m, ",", &comma));
        QLORA__TRY(qlora__jin_split(m, path, comma, -1, &parts));
        for (size_t k = 0; k < parts.as.list->count; k++) {
            qlora__jin_value one = parts.as.list->items[k];
            QLORA__TRY(qlora__jin_sort_key(m, list->items[i], one, case_sensitive,
                                           &parts.as.list->items[k]));
        }
        (*out)[i] = parts;
    }
    return QLORA_OK;
}
