// The filters. in[0] is the value, the arguments follow in the order of the table below.

#define QLORA__JIN_FILTER(name)                                                                    \
    static qlora_result qlora__jin_filter_##name(qlora__jin_machine* m, qlora__jin_value* in,      \
                                                 qlora__jin_value* out)

static bool qlora__jin_given(qlora__jin_value v) {
    return v.kind != QLORA__JIN_MISSING && v.kind != QLORA__JIN_NONE;
}

static bool qlora__jin_named(const char* row, const char* name, size_t size) {
    return strlen(row) == size && memcmp(row, name, size) == 0;
}

// ---- strings

QLORA__JIN_FILTER(trim) {
    QLORA__TRY(qlora__jin_text(m, in[0], &in[0]));
    return qlora__jin_strip(m, in[0], in[1], true, true, out);
}

QLORA__JIN_FILTER(string) {
    return qlora__jin_text(m, in[0], out);
}

QLORA__JIN_FILTER(lower) {
    QLORA__TRY(qlora__jin_text(m, in[0], &in[0]));
    return qlora__jin_recase(m, in[0], QLORA__JIN_ALL_LOWER, out);
}

QLORA__JIN_FILTER(upper) {
    QLORA__TRY(qlora__jin_text(m, in[0], &in[0]));
    return qlora__jin_recase(m, in[0], QLORA__JIN_ALL_UPPER, out);
}

QLORA__JIN_FILTER(capitalize) {
    QLORA__TRY(qlora__jin_text(m, in[0], &in[0]));
    return qlora__jin_recase(m, in[0], QLORA__JIN_FIRST, out);
}

QLORA__JIN_FILTER(title) {
    QLORA__TRY(qlora__jin_text(m, in[0], &in[0]));
    QLORA__TRY(qlora__jin_recase(m, in[0], QLORA__JIN_TITLE_FILTER, out));
    out->flag = 0; // joined from its words
    return QLORA_OK;
}

QLORA__JIN_FILTER(safe) {
    QLORA__TRY(qlora__jin_text(m, in[0], out));
    out->flag = 1;
    return QLORA_OK;
}

QLORA__JIN_FILTER(escape) {
    qlora__jin_buffer buffer;
    memset(&buffer, 0, sizeof buffer);
    QLORA__TRY(qlora__jin_escape_html(m, in[0], &buffer));
    QLORA__TRY(qlora__jin_buffer_string(m, &buffer, out));
    out->flag = 1;
    return QLORA_OK;
}

QLORA__JIN_FILTER(forceescape) {
    QLORA__TRY(qlora__jin_text(m, in[0], &in[0]));
    in[0].flag = 0;
    return qlora__jin_filter_escape(m, in, out);
}

QLORA__JIN_FILTER(center) {
    qlora__jin_value call[3];
    QLORA__TRY(qlora__jin_text(m, in[0], &call[0]));
    call[1] = in[1].kind == QLORA__JIN_MISSING ? qlora__jin_int(80) : in[1];
    call[2] = qlora__jin_of(QLORA__JIN_MISSING);
    return qlora__jin_justify(m, call, '^', out);
}

QLORA__JIN_FILTER(replace) {
    int64_t limit = -1;
    qlora__jin_value s;
    qlora__jin_value from;
    qlora__jin_value to;
    QLORA__TRY(qlora__jin_text(m, in[0], &s));
    QLORA__TRY(qlora__jin_text(m, in[1], &from));
    QLORA__TRY(qlora__jin_text(m, in[2], &to));
    if (qlora__jin_given(in[3])) {
        QLORA__TRY(qlora__jin_need_integer(m, "replace", in[3], &limit));
    }
    s.flag = 0;
    return qlora__jin_replace(m, s, from.as.string, to.as.string, limit, out);
}

QLORA__JIN_FILTER(indent) {
    qlora__jin_value lines;
    qlora__jin_value by = in[1];
    qlora__jin_buffer buffer;
    memset(&buffer, 0, sizeof buffer);
    QLORA__TRY(qlora__jin_need_string(m, "indent", in[0]));
    if (by.kind != QLORA__JIN_STRING) {
        int64_t width = 4;
        qlora__jin_value space;
        QLORA__TRY(qlora__jin_need_integer(m, "indent", by, &width));
        QLORA__TRY(qlora__jin_string_of(m, " ", &space));
        QLORA__TRY(qlora__jin_repeat(m, space, width, &by));
    }
    bool blank = qlora__jin_truth(in[3]);
    qlora__jin_value split[2];
    qlora__jin_value newline;
    QLORA__TRY(qlora__jin_string_of(m, "\n", &newline));
    QLORA__TRY(qlora__jin_join_strings(m, in[0], newline, &split[0]));
    split[1] = qlora__jin_of(QLORA__JIN_MISSING);
    QLORA__TRY(qlora__jin_str_splitlines(m, split, &lines));
    for (size_t i = 0; i < lines.as.list->count; i++) {
        qlora__jin_value line = lines.as.list->items[i];
        bool indented = i == 0 ? qlora__jin_truth(in[2]) : blank || line.as.string->bytes > 0;
        if (i > 0) {
            QLORA__TRY(qlora__jin_put(m, &buffer, "\n", 1));
        }
        if (indented) {
            QLORA__TRY(qlora__jin_print(m, by, &buffer));
        }
        QLORA__TRY(qlora__jin_print(m, line, &buffer));
    }
    QLORA__TRY(qlora__jin_buffer_string(m, &buffer, out));
    out->flag = in[0].flag;
    return QLORA_OK;
}

QLORA__JIN_FILTER(truncate) {
    int64_t length = 255;
    int64_t leeway = 5;
    qlora__jin_value end = in[3];
    qlora__jin_value cut;
    int64_t count = 0;
    QLORA__TRY(qlora__jin_length(m, in[0], &count));
    QLORA__TRY(qlora__jin_need_integer(m, "truncate", in[1], &length));
    if (qlora__jin_given(in[4])) {
        QLORA__TRY(qlora__jin_need_integer(m, "truncate", in[4], &leeway));
    }
    if (end.kind == QLORA__JIN_MISSING) {
        QLORA__TRY(qlora__jin_string_of(m, "...", &end));
    }
    QLORA__TRY(qlora__jin_need_string(m, "truncate", end));
    int64_t keep = length - (int64_t)end.as.string->chars;
    if (keep < 0 || leeway < 0) {
        return qlora__jin_fail(m, "truncate: the length is shorter than the end");
    }
    if (count <= length + leeway) {
        *out = in[0];
        return QLORA_OK;
    }
    QLORA__TRY(qlora__jin_need_string(m, "truncate", in[0]));
    QLORA__TRY(
        qlora__jin_part(m, in[0], 0, qlora__jin_byte_of(in[0].as.string, (size_t)keep), &cut));
    if (!qlora__jin_truth(in[2])) {
        const qlora__jin_string* s = cut.as.string;
        size_t space = qlora__jin_rfind_bytes(s->data, 0, s->bytes, " ", 1);
        QLORA__TRY(qlora__jin_part(m, cut, 0, space == SIZE_MAX ? s->bytes : space, &cut));
    }
    return qlora__jin_join_strings(m, cut, end, out);
}

QLORA__JIN_FILTER(wordcount) {
    qlora__jin_value text;
    int64_t count = 0;
    bool inside = false;
    QLORA__TRY(qlora__jin_text(m, in[0], &text));
    const qlora__jin_string* s = text.as.string;
    QLORA__TRY(qlora__jin_work(m, s->bytes / 8));
    for (size_t at = 0, step = 0; at < s->bytes; at += step) {
        uint32_t code = qlora__jin_code_at(s->data, s->bytes, at, &step);
        bool word = code == '_' || qlora__jin_is_alnum(code); // Python's \w
        count += word && !inside ? 1 : 0;
        inside = word;
    }
    *out = qlora__jin_int(count);
    return QLORA_OK;
}

// Adds the text of a value with %XX. In a query, a space is a plus.
static qlora_result qlora__jin_url_quote(qlora__jin_machine* m, qlora__jin_value v, bool query,
                                         qlora__jin_buffer* out) {
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                "_.-~";
    qlora__jin_value text;
    QLORA__TRY(qlora__jin_text(m, v, &text));
    const qlora__jin_string* s = text.as.string;
    QLORA__TRY(qlora__jin_work(m, s->bytes / 8));
    for (size_t i = 0; i < s->bytes; i++) {
        char c = s->data[i];
        char code[4];
        bool keep = c != 0 && (strchr(plain, c) != NULL || (c == '/' && !query));
        snprintf(code, sizeof code, "%%%02X", (unsigned)(unsigned char)c);
        const char* put = keep ? &s->data[i] : query && c == ' ' ? "+" : code;
        QLORA__TRY(qlora__jin_put(m, out, put, put == code ? 3 : 1));
    }
    return QLORA_OK;
}

QLORA__JIN_FILTER(urlencode) {
    qlora__jin_buffer buffer;
    qlora__jin_iter* iter = NULL;
    qlora__jin_value items = in[0];
    memset(&buffer, 0, sizeof buffer);
    if (in[0].kind == QLORA__JIN_STRING || !qlora__jin_is_iterable(in[0])) {
        QLORA__TRY(qlora__jin_url_quote(m, in[0], false, &buffer));
        return qlora__jin_buffer_string(m, &buffer, out);
    }
    if (in[0].kind == QLORA__JIN_DICT) {
        QLORA__TRY(qlora__jin_dict_view(in, 2, &items));
    }
    QLORA__TRY(qlora__jin_iter_make(m, items, &iter));
    for (size_t i = 0;; i++) {
        qlora__jin_value pair;
        bool more = true;
        QLORA__TRY(qlora__jin_next(m, iter, &pair, &more));
        if (!more) {
            return qlora__jin_buffer_string(m, &buffer, out);
        }
        if (qlora__jin_is_iterable(pair)) {
            QLORA__TRY(qlora__jin_to_list(m, pair, &pair));
        }
        bool two = pair.kind == QLORA__JIN_LIST && pair.as.list->count == 2;
        if (!two) {
            return qlora__jin_fail(m, "urlencode: item %llu is not a pair", (unsigned long long)i);
        }
        QLORA__TRY(qlora__jin_puts(m, &buffer, i > 0 ? "&" : ""));
        QLORA__TRY(qlora__jin_url_quote(m, pair.as.list->items[0], true, &buffer));
        QLORA__TRY(qlora__jin_puts(m, &buffer, "="));
        QLORA__TRY(qlora__jin_url_quote(m, pair.as.list->items[1], true, &buffer));
    }
}

static qlora_result qlora__jin_filter_format(qlora__jin_machine* m, qlora__jin_value v,
                                             const qlora__jin_args* args, qlora__jin_value* out) {
    qlora__jin_value values;
    QLORA__TRY(qlora__jin_text(m, v, &v));
    if (args->positional > 0 && args->named > 0) {
        return qlora__jin_fail(m, "format: arguments by position and by name at once");
    }
    if (args->named > 0) {
        QLORA__TRY(qlora__jin_dict_make(m, QLORA__JIN_DICT, args->named, &values));
        for (size_t i = 0; i < args->named; i++) {
            qlora__jin_value key = qlora__jin_of(QLORA__JIN_STRING);
            key.as.string = args->names[i];
            QLORA__TRY(qlora__jin_dict_add(m, values.as.dict, key, args->items[i]));
        }
    } else {
        QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_TUPLE, args->positional, &values));
        for (size_t i = 0; i < args->positional; i++) {
            QLORA__TRY(qlora__jin_list_add(m, values.as.list, args->items[i]));
        }
    }
    return qlora__jin_percent(m, v, values, out);
}

// ---- sequences

QLORA__JIN_FILTER(length) {
    int64_t count = 0;
    QLORA__TRY(qlora__jin_length(m, in[0], &count));
    *out = qlora__jin_int(count);
    return QLORA_OK;
}

QLORA__JIN_FILTER(list) {
    return qlora__jin_to_list(m, in[0], out);
}

QLORA__JIN_FILTER(default) {
    (void)m;
    bool replace =
        in[0].kind == QLORA__JIN_UNDEFINED || (qlora__jin_truth(in[2]) && !qlora__jin_truth(in[0]));
    *out = replace ? in[1] : in[0];
    return replace && in[1].kind == QLORA__JIN_MISSING ? qlora__jin_string_of(m, "", out)
                                                       : QLORA_OK;
}

QLORA__JIN_FILTER(first) {
    qlora__jin_iter* iter = NULL;
    bool more = false;
    QLORA__TRY(qlora__jin_iter_make(m, in[0], &iter));
    QLORA__TRY(qlora__jin_next(m, iter, out, &more));
    if (!more) {
        return qlora__jin_undefined(m, NULL, "the first item of nothing", 25, false, out);
    }
    return QLORA_OK;
}

// reversed(value): for what has an order and a length.
static qlora_result qlora__jin_reversed(qlora__jin_machine* m, qlora__jin_value v,
                                        qlora__jin_value* out) {
    qlora__jin_value list = v;
    if (v.kind != QLORA__JIN_LIST && v.kind != QLORA__JIN_TUPLE) {
        QLORA__TRY(qlora__jin_to_list(m, v, &list));
    }
    QLORA__TRY(qlora__jin_iter_of(m, QLORA__JIN_PLAIN, list, out));
    out->as.iter->backwards = true;
    return QLORA_OK;
}

QLORA__JIN_FILTER(last) {
    qlora__jin_value back;
    bool more = false;
    if (in[0].kind == QLORA__JIN_ITER) {
        return qlora__jin_fail(m, "last: a generator has no last item; make a list of it");
    }
    if (in[0].kind == QLORA__JIN_VIEW && in[0].flag == 3) {
        return qlora__jin_fail(m, "last: a set has no order; make a list of it");
    }
    QLORA__TRY(qlora__jin_reversed(m, in[0], &back));
    QLORA__TRY(qlora__jin_next(m, back.as.iter, out, &more));
    if (!more) {
        return qlora__jin_undefined(m, NULL, "the last item of nothing", 24, false, out);
    }
    return QLORA_OK;
}

QLORA__JIN_FILTER(reverse) {
    if (in[0].kind == QLORA__JIN_STRING) {
        qlora__jin_value parts[3];
        bool found = false;
        parts[0] = qlora__jin_none();
        parts[1] = qlora__jin_none();
        parts[2] = qlora__jin_int(-1);
        return qlora__jin_slice(m, in[0], parts, out, &found);
    }
    if (in[0].kind == QLORA__JIN_ITER) {
        QLORA__TRY(qlora__jin_to_list(m, in[0], out));
        qlora__jin_reverse(out->as.list);
        return QLORA_OK;
    }
    return qlora__jin_reversed(m, in[0], out);
}

QLORA__JIN_FILTER(join) {
    qlora__jin_buffer buffer;
    qlora__jin_iter* iter = NULL;
    qlora__jin_value item;
    bool more = true;
    memset(&buffer, 0, sizeof buffer);
    QLORA__TRY(qlora__jin_iter_make(m, in[0], &iter));
    for (size_t i = 0;; i++) {
        QLORA__TRY(qlora__jin_next(m, iter, &item, &more));
        if (!more) {
            return qlora__jin_buffer_string(m, &buffer, out);
        }
        QLORA__TRY(qlora__jin_follow(m, item, in[2], qlora__jin_of(QLORA__JIN_MISSING), &item));
        if (i > 0 && in[1].kind != QLORA__JIN_MISSING) {
            QLORA__TRY(qlora__jin_print(m, in[1], &buffer));
        }
        QLORA__TRY(qlora__jin_print(m, item, &buffer));
    }
}

QLORA__JIN_FILTER(items_late) {
    if (in[0].kind == QLORA__JIN_UNDEFINED) {
        return qlora__jin_list_make(m, QLORA__JIN_LIST, 0, out);
    }
    if (in[0].kind != QLORA__JIN_DICT) {
        return qlora__jin_fail(m, "items: a dictionary is needed, not a %s",
                               qlora__jin_type(in[0]));
    }
    qlora__jin_value view;
    QLORA__TRY(qlora__jin_dict_view(in, 2, &view));
    return qlora__jin_to_list(m, view, out);
}

QLORA__JIN_FILTER(items) {
    return qlora__jin_lazy(m, qlora__jin_filter_items_late, in, 1, out);
}

QLORA__JIN_FILTER(batch_late) {
    qlora__jin_value all;
    int64_t size = -1; // what is not a number is never reached
    QLORA__TRY(qlora__jin_to_list(m, in[0], &all));
    bool fill = qlora__jin_given(in[2]) && all.as.list->count > 0;
    if (qlora__jin_is_number(in[1])) {
        double x = qlora__jin_real_of(in[1]);
        size = x >= 0.0 && x <= 1e9 && qlora__jin_floor(x) >= x ? (int64_t)x : -1;
    }
    if (in[1].kind == QLORA__JIN_UNDEFINED || (fill && !qlora__jin_is_integer(in[1]))) {
        QLORA__TRY(qlora__jin_need_integer(m, "batch", in[1], &size));
    }
    QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_LIST, 4, out));
    qlora__jin_value row = qlora__jin_of(QLORA__JIN_MISSING);
    for (size_t i = 0; i < all.as.list->count; i++) {
        for (int k = 0; k < (i == 0 && size == 0 ? 2 : 1); k++) { // Python begins with an empty one
            if (row.kind == QLORA__JIN_MISSING || (int64_t)row.as.list->count == size) {
                QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_LIST, 4, &row));
                QLORA__TRY(qlora__jin_list_add(m, out->as.list, row));
            }
        }
        QLORA__TRY(qlora__jin_list_add(m, row.as.list, all.as.list->items[i]));
    }
    while (fill && (int64_t)row.as.list->count < size) {
        QLORA__TRY(qlora__jin_list_add(m, row.as.list, in[2]));
    }
    return QLORA_OK;
}

QLORA__JIN_FILTER(batch) {
    return qlora__jin_lazy(m, qlora__jin_filter_batch_late, in, 3, out);
}

QLORA__JIN_FILTER(slice_late) {
    qlora__jin_value all;
    int64_t slices = 0;
    QLORA__TRY(qlora__jin_need_integer(m, "slice", in[1], &slices));
    QLORA__TRY(qlora__jin_to_list(m, in[0], &all));
    if (slices == 0) {
        return qlora__jin_fail(m, "slice: division by zero");
    }
    int64_t count = (int64_t)all.as.list->count;
    int64_t each = slices > 0 ? count / slices : 0;
    int64_t longer = slices > 0 ? count % slices : 0;
    int64_t at = 0;
    QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_LIST, 4, out));
    for (int64_t i = 0; i < slices; i++) {
        qlora__jin_value row;
        QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_LIST, 4, &row));
        for (int64_t k = 0; k < each + (i < longer ? 1 : 0); k++) {
            QLORA__TRY(qlora__jin_list_add(m, row.as.list, all.as.list->items[at++]));
        }
        if (qlora__jin_given(in[2]) && i >= longer) {
            QLORA__TRY(qlora__jin_list_add(m, row.as.list, in[2]));
        }
        QLORA__TRY(qlora__jin_list_add(m, out->as.list, row));
    }
    return QLORA_OK;
}

QLORA__JIN_FILTER(slice) {
    return qlora__jin_lazy(m, qlora__jin_filter_slice_late, in, 3, out);
}

QLORA__JIN_FILTER(unique_late) {
    qlora__jin_value all;
    qlora__jin_value seen;
    QLORA__TRY(qlora__jin_to_list(m, in[0], &all));
    QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_LIST, 4, out));
    QLORA__TRY(qlora__jin_dict_make(m, QLORA__JIN_DICT, 4, &seen));
    for (size_t i = 0; i < all.as.list->count; i++) {
        qlora__jin_value key;
        size_t at = 0;
        QLORA__TRY(
            qlora__jin_sort_key(m, all.as.list->items[i], in[2], qlora__jin_truth(in[1]), &key));
        QLORA__TRY(qlora__jin_dict_find(m, seen.as.dict, key, &at));
        if (at == seen.as.dict->count) {
            QLORA__TRY(qlora__jin_dict_add(m, seen.as.dict, key, key));
            QLORA__TRY(qlora__jin_list_add(m, out->as.list, all.as.list->items[i]));
        }
    }
    return QLORA_OK;
}

QLORA__JIN_FILTER(unique) {
    return qlora__jin_lazy(m, qlora__jin_filter_unique_late, in, 3, out);
}

QLORA__JIN_FILTER(sort) {
    qlora__jin_value* keys = NULL;
    int64_t reverse = 0;
    QLORA__TRY(qlora__jin_need_integer(m, "sort: reverse", in[1], &reverse));
    QLORA__TRY(qlora__jin_to_list(m, in[0], out));
    QLORA__TRY(qlora__jin_sort_keys_of(m, out->as.list, in[3], qlora__jin_truth(in[2]), &keys));
    for (size_t i = 0; i < out->as.list->count; i++) {
        // in a list, as in jinja2: there, values without an order may be equal
        qlora__jin_value key;
        QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_LIST, 1, &key));
        QLORA__TRY(qlora__jin_list_add(m, key.as.list, keys[i]));
        keys[i] = key;
    }
    return qlora__jin_sort(m, out->as.list, keys, reverse != 0);
}

static qlora_result qlora__jin_extreme(qlora__jin_machine* m, qlora__jin_value* in, bool largest,
                                       qlora__jin_value* out) {
    qlora__jin_value all;
    qlora__jin_value best;
    QLORA__TRY(qlora__jin_to_list(m, in[0], &all));
    const qlora__jin_list* list = all.as.list;
    if (list->count == 0) {
        return qlora__jin_undefined(m, NULL, "an item of nothing", 18, false, out);
    }
    bool cased = qlora__jin_truth(in[1]);
    QLORA__TRY(qlora__jin_sort_key(m, list->items[0], in[2], cased, &best));
    *out = list->items[0];
    for (size_t i = 1; i < list->count; i++) {
        qlora__jin_value key;
        bool better = false;
        QLORA__TRY(qlora__jin_sort_key(m, list->items[i], in[2], cased, &key));
        QLORA__TRY(largest ? qlora__jin_less(m, best, key, false, &better)
                           : qlora__jin_less(m, key, best, false, &better));
        best = better ? key : best;
        *out = better ? list->items[i] : *out;
    }
    return QLORA_OK;
}

QLORA__JIN_FILTER(max) {
    return qlora__jin_extreme(m, in, true, out);
}

QLORA__JIN_FILTER(min) {
    return qlora__jin_extreme(m, in, false, out);
}

QLORA__JIN_FILTER(sum) {
    qlora__jin_value all;
    QLORA__TRY(qlora__jin_to_list(m, in[0], &all));
    *out = in[2].kind == QLORA__JIN_MISSING ? qlora__jin_int(0) : in[2];
    if (out->kind == QLORA__JIN_STRING) {
        return qlora__jin_fail(m, "sum: strings are joined, not added");
    }
    for (size_t i = 0; i < all.as.list->count; i++) {
        qlora__jin_value item;
        QLORA__TRY(qlora__jin_follow(m, all.as.list->items[i], in[1],
                                     qlora__jin_of(QLORA__JIN_MISSING), &item));
        QLORA__TRY(qlora__jin_binary(m, '+', *out, item, out));
    }
    return QLORA_OK;
}

QLORA__JIN_FILTER(dictsort) {
    bool by_value = qlora__jin_is(in[2], "value", 5);
    if (!by_value && in[2].kind != QLORA__JIN_MISSING && !qlora__jin_is(in[2], "key", 3)) {
        return qlora__jin_fail(m, "dictsort: by must be key or value");
    }
    if (in[0].kind != QLORA__JIN_DICT) {
        return in[0].kind == QLORA__JIN_UNDEFINED
                   ? qlora__jin_undefined_error(m, in[0])
                   : qlora__jin_fail(m, "dictsort: a dictionary is needed, not a %s",
                                     qlora__jin_type(in[0]));
    }
    qlora__jin_value view;
    qlora__jin_value* keys = NULL;
    int64_t reverse = 0;
    QLORA__TRY(qlora__jin_need_integer(m, "dictsort: reverse", in[3], &reverse));
    QLORA__TRY(qlora__jin_dict_view(in, 2, &view));
    QLORA__TRY(qlora__jin_to_list(m, view, out));
    QLORA__TRY(qlora__jin_sort_keys_of(m, out->as.list, qlora__jin_int(by_value ? 1 : 0),
                                       qlora__jin_truth(in[1]), &keys));
    return qlora__jin_sort(m, out->as.list, keys, reverse != 0);
}

QLORA__JIN_FILTER(groupby) {
    qlora__jin_value all;
    qlora__jin_value* keys = NULL;
    bool cased = qlora__jin_truth(in[3]);
    QLORA__TRY(qlora__jin_to_list(m, in[0], &all));
    qlora__jin_list* list = all.as.list;
    for (int pass = 0; pass < 2; pass++) { // the keys, before and after sorting
        QLORA__TRY(qlora__jin_get_values(m, list->count, &keys));
        for (size_t i = 0; i < list->count; i++) {
            QLORA__TRY(qlora__jin_follow(m, list->items[i], in[1], in[2], &keys[i]));
            QLORA__TRY(qlora__jin_sort_key(m, keys[i], qlora__jin_none(), cased, &keys[i]));
        }
        if (pass == 0) {
            QLORA__TRY(qlora__jin_sort(m, list, keys, false));
        }
    }
    QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_LIST, 4, out));
    qlora__jin_value group = qlora__jin_of(QLORA__JIN_MISSING);
    for (size_t i = 0; i < list->count; i++) {
        bool same = false;
        if (i > 0) {
            QLORA__TRY(qlora__jin_equal(m, keys[i - 1], keys[i], &same));
        }
        if (!same) {
            qlora__jin_value pair;
            qlora__jin_value shown;
            QLORA__TRY(qlora__jin_follow(m, list->items[i], in[1], in[2], &shown));
            QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_LIST, 4, &group));
            QLORA__TRY(qlora__jin_pair_make(m, shown, group, &pair));
            pair.flag = 1; // has the attributes grouper and list
            QLORA__TRY(qlora__jin_list_add(m, out->as.list, pair));
        }
        QLORA__TRY(qlora__jin_list_add(m, group.as.list, list->items[i]));
    }
    return QLORA_OK;
}

QLORA__JIN_FILTER(attr) {
    bool found = false;
    QLORA__TRY(qlora__jin_need_string(m, "attr", in[1]));
    const qlora__jin_string* name = in[1].as.string;
    if (in[0].kind == QLORA__JIN_UNDEFINED) {
        return qlora__jin_undefined_error(m, in[0]);
    }
    QLORA__TRY(qlora__jin_attribute(m, in[0], name->data, name->bytes, out, &found));
    return found ? QLORA_OK
                 : qlora__jin_undefined(m, qlora__jin_type(in[0]), name->data, name->bytes, false,
                                        out);
}
