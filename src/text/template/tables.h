// The tables of filters and tests, and how they are called.

typedef qlora_result (*qlora__jin_many_fn)(qlora__jin_machine* m, qlora__jin_value v,
                                           const qlora__jin_args* args, qlora__jin_value* out);

// A filter without functions exists in jinja2 and is refused: its result is another one each time.
typedef struct qlora__jin_filter_row {
    const char* name;
    const char* arguments;
    size_t required;
    qlora__jin_filter_fn call;
    qlora__jin_many_fn many; // takes any arguments
} qlora__jin_filter_row;

static const qlora__jin_filter_row qlora__jin_filters[] = {
    {"trim", "chars", 0, qlora__jin_filter_trim, NULL},
    {"tojson", "ensure_ascii indent separators sort_keys", 0, qlora__jin_tojson, NULL},
    {"length", "", 0, qlora__jin_filter_length, NULL},
    {"count", "", 0, qlora__jin_filter_length, NULL},
    {"string", "", 0, qlora__jin_filter_string, NULL},
    {"default", "default_value boolean", 0, qlora__jin_filter_default, NULL},
    {"d", "default_value boolean", 0, qlora__jin_filter_default, NULL},
    {"join", "d attribute", 0, qlora__jin_filter_join, NULL},
    {"list", "", 0, qlora__jin_filter_list, NULL},
    {"items", "", 0, qlora__jin_filter_items, NULL},
    {"upper", "", 0, qlora__jin_filter_upper, NULL},
    {"lower", "", 0, qlora__jin_filter_lower, NULL},
    {"title", "", 0, qlora__jin_filter_title, NULL},
    {"capitalize", "", 0, qlora__jin_filter_capitalize, NULL},
    {"safe", "", 0, qlora__jin_filter_safe, NULL},
    {"escape", "", 0, qlora__jin_filter_escape, NULL},
    {"e", "", 0, qlora__jin_filter_escape, NULL},
    {"forceescape", "", 0, qlora__jin_filter_forceescape, NULL},
    {"replace", "old new count", 2, qlora__jin_filter_replace, NULL},
    {"indent", "width first blank", 0, qlora__jin_filter_indent, NULL},
    {"truncate", "length killwords end leeway", 0, qlora__jin_filter_truncate, NULL},
    {"wordcount", "", 0, qlora__jin_filter_wordcount, NULL},
    {"urlencode", "", 0, qlora__jin_filter_urlencode, NULL},
    {"center", "width", 0, qlora__jin_filter_center, NULL},
    {"abs", "", 0, qlora__jin_filter_abs, NULL},
    {"int", "default base", 0, qlora__jin_filter_int, NULL},
    {"float", "default", 0, qlora__jin_filter_float, NULL},
    {"round", "precision method", 0, qlora__jin_filter_round, NULL},
    {"first", "", 0, qlora__jin_filter_first, NULL},
    {"last", "", 0, qlora__jin_filter_last, NULL},
    {"reverse", "", 0, qlora__jin_filter_reverse, NULL},
    {"batch", "linecount fill_with", 1, qlora__jin_filter_batch, NULL},
    {"slice", "slices fill_with", 1, qlora__jin_filter_slice, NULL},
    {"unique", "case_sensitive attribute", 0, qlora__jin_filter_unique, NULL},
    {"sort", "reverse case_sensitive attribute", 0, qlora__jin_filter_sort, NULL},
    {"max", "case_sensitive attribute", 0, qlora__jin_filter_max, NULL},
    {"min", "case_sensitive attribute", 0, qlora__jin_filter_min, NULL},
    {"sum", "attribute start", 0, qlora__jin_filter_sum, NULL},
    {"dictsort", "case_sensitive by reverse", 0, qlora__jin_filter_dictsort, NULL},
    {"groupby", "attribute default case_sensitive", 1, qlora__jin_filter_groupby, NULL},
    {"attr", "name", 1, qlora__jin_filter_attr, NULL},
    {"map", NULL, 0, NULL, qlora__jin_filter_map},
    {"select", NULL, 0, NULL, qlora__jin_filter_select},
    {"reject", NULL, 0, NULL, qlora__jin_filter_reject},
    {"selectattr", NULL, 0, NULL, qlora__jin_filter_selectattr},
    {"rejectattr", NULL, 0, NULL, qlora__jin_filter_rejectattr},
    {"format", NULL, 0, NULL, qlora__jin_filter_format},
    {"filesizeformat", "binary", 0, qlora__jin_filter_filesizeformat, NULL},
    {"pprint", "", 0, qlora__jin_filter_pprint, NULL},
    {"striptags", "", 0, qlora__jin_filter_striptags, NULL},
    {"urlize", "trim_url_limit nofollow target rel extra_schemes", 0, qlora__jin_filter_urlize,
     NULL},
    {"wordwrap", "width break_long_words wrapstring break_on_hyphens", 0,
     qlora__jin_filter_wordwrap, NULL},
    {"xmlattr", "autospace", 0, qlora__jin_filter_xmlattr, NULL},
    {"random", NULL, 0, NULL, NULL}};

static qlora_result qlora__jin_filter_run(qlora__jin_machine* m, const qlora__jin_filter_row* row,
                                          qlora__jin_value v, const qlora__jin_args* args,
                                          qlora__jin_value* out) {
    qlora__jin_value in[8];
    if (row->many != NULL) {
        return row->many(m, v, args, out);
    }
    if (row->call == NULL) {
        return qlora__jin_fail(
            m, "the filter \"%s\" is not supported: its result cannot be repeated", row->name);
    }
    in[0] = v;
    for (size_t i = 1; i < 8; i++) {
        in[i] = qlora__jin_of(QLORA__JIN_MISSING);
    }
    QLORA__TRY(qlora__jin_bind_args(m, row->name, row->arguments, row->required, args, in + 1));
    return row->call(m, in, out);
}

// ---- tests --------------------------------------------------------------------------------------

typedef qlora_result (*qlora__jin_test_fn)(qlora__jin_machine* m, qlora__jin_value v,
                                           qlora__jin_value other, bool* out);

typedef struct qlora__jin_test_row {
    const char* name;
    const char* arguments;
    qlora__jin_test_fn call;
} qlora__jin_test_row;

#define QLORA__JIN_TEST(name)                                                                      \
    static qlora_result qlora__jin_test_##name(qlora__jin_machine* m, qlora__jin_value v,          \
                                               qlora__jin_value other, bool* out)
#define QLORA__JIN_KIND_TEST(name, condition)                                                      \
    QLORA__JIN_TEST(name) {                                                                        \
        (void)m;                                                                                   \
        (void)other;                                                                               \
        *out = condition;                                                                          \
        return QLORA_OK;                                                                           \
    }

QLORA__JIN_KIND_TEST(defined, v.kind != QLORA__JIN_UNDEFINED)
QLORA__JIN_KIND_TEST(undefined, v.kind == QLORA__JIN_UNDEFINED)
QLORA__JIN_KIND_TEST(none, v.kind == QLORA__JIN_NONE)
QLORA__JIN_KIND_TEST(string, v.kind == QLORA__JIN_STRING)
QLORA__JIN_KIND_TEST(boolean, v.kind == QLORA__JIN_BOOL)
QLORA__JIN_KIND_TEST(is_true, v.kind == QLORA__JIN_BOOL && v.as.truth)
QLORA__JIN_KIND_TEST(is_false, v.kind == QLORA__JIN_BOOL && !v.as.truth)
QLORA__JIN_KIND_TEST(integer, v.kind == QLORA__JIN_INT || v.kind == QLORA__JIN_BIG)
QLORA__JIN_KIND_TEST(float, v.kind == QLORA__JIN_FLOAT)
QLORA__JIN_KIND_TEST(number, qlora__jin_is_number(v) || v.kind == QLORA__JIN_BIG)
QLORA__JIN_KIND_TEST(mapping, v.kind == QLORA__JIN_DICT)
QLORA__JIN_KIND_TEST(iterable, qlora__jin_is_iterable(v))
QLORA__JIN_KIND_TEST(escaped, v.kind == QLORA__JIN_STRING && v.flag != 0)
// what has a length and items by number
QLORA__JIN_KIND_TEST(sequence, qlora__jin_is_sequence(v) || v.kind == QLORA__JIN_DICT ||
                                   v.kind == QLORA__JIN_RANGE || v.kind == QLORA__JIN_UNDEFINED)
QLORA__JIN_KIND_TEST(callable, v.kind == QLORA__JIN_MACRO || v.kind == QLORA__JIN_METHOD ||
                                   v.kind == QLORA__JIN_FUNCTION || v.kind == QLORA__JIN_JOINER ||
                                   v.kind == QLORA__JIN_LOOP || v.kind == QLORA__JIN_UNDEFINED)
// Whether two values are one object. Of equal strings and numbers, Python may keep one or two.
QLORA__JIN_TEST(sameas) {
    *out = v.kind == other.kind && (v.kind == QLORA__JIN_NONE || v.as.list == other.as.list);
    if (v.kind == QLORA__JIN_BOOL) {
        *out = v.kind == other.kind && v.as.truth == other.as.truth;
        return QLORA_OK;
    }
    bool kept = v.kind == QLORA__JIN_INT && v.as.integer >= -5 && v.as.integer <= 256;
    bool number = v.kind == QLORA__JIN_INT || v.kind == QLORA__JIN_FLOAT;
    bool unsure = number && !kept && *out;
    if (v.kind == QLORA__JIN_STRING && other.kind == QLORA__JIN_STRING && !*out) {
        QLORA__TRY(qlora__jin_equal(m, v, other, &unsure));
    }
    return unsure
               ? qlora__jin_fail(m, "sameas is not supported for equal values of type %s; use ==",
                                 qlora__jin_type(v))
               : QLORA_OK;
}

QLORA__JIN_TEST(eq) {
    return qlora__jin_equal(m, v, other, out);
}

QLORA__JIN_TEST(ne) {
    QLORA__TRY(qlora__jin_equal(m, v, other, out));
    *out = !*out;
    return QLORA_OK;
}

QLORA__JIN_TEST(lt) {
    return qlora__jin_less(m, v, other, false, out);
}

QLORA__JIN_TEST(le) {
    return qlora__jin_less(m, v, other, true, out);
}

QLORA__JIN_TEST(gt) {
    return qlora__jin_less(m, other, v, false, out);
}

QLORA__JIN_TEST(ge) {
    return qlora__jin_less(m, other, v, true, out);
}

QLORA__JIN_TEST(in) {
    return qlora__jin_contains(m, other, v, out);
}

QLORA__JIN_TEST(divisibleby) {
    qlora__jin_value rest;
    QLORA__TRY(v.kind == QLORA__JIN_STRING // a format, which is never equal to zero
                   ? qlora__jin_percent(m, v, other, &rest)
                   : qlora__jin_binary(m, '%', v, other, &rest));
    QLORA__TRY(qlora__jin_equal(m, rest, qlora__jin_int(0), out));
    return QLORA_OK;
}

QLORA__JIN_TEST(even) {
    (void)other;
    return qlora__jin_test_divisibleby(m, v, qlora__jin_int(2), out);
}

QLORA__JIN_TEST(odd) {
    qlora__jin_value rest;
    (void)other;
    QLORA__TRY(qlora__jin_binary(m, '%', v, qlora__jin_int(2), &rest));
    return qlora__jin_equal(m, rest, qlora__jin_int(1), out);
}

QLORA__JIN_TEST(lower) {
    qlora__jin_value text;
    (void)other;
    QLORA__TRY(qlora__jin_text(m, v, &text));
    return qlora__jin_all_case(m, text.as.string, QLORA__JIN_LOWER_CASE, out);
}

QLORA__JIN_TEST(upper) {
    qlora__jin_value text;
    (void)other;
    QLORA__TRY(qlora__jin_text(m, v, &text));
    return qlora__jin_all_case(m, text.as.string, QLORA__JIN_UPPER_CASE, out);
}

static const qlora__jin_filter_row* qlora__jin_filter_find(const char* name, size_t size) {
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__jin_filters); i++) {
        if (qlora__jin_named(qlora__jin_filters[i].name, name, size)) {
            return &qlora__jin_filters[i];
        }
    }
    return NULL;
}

QLORA__JIN_TEST(filter) {
    (void)other;
    if (!qlora__jin_hashable(v)) {
        return qlora__jin_fail(m, "a %s is not the name of a filter", qlora__jin_type(v));
    }
    *out = v.kind == QLORA__JIN_STRING &&
           qlora__jin_filter_find(v.as.string->data, v.as.string->bytes) != NULL;
    return QLORA_OK;
}

static const qlora__jin_test_row qlora__jin_tests[] = {
    {"defined", "", qlora__jin_test_defined},
    {"undefined", "", qlora__jin_test_undefined},
    {"none", "", qlora__jin_test_none},
    {"string", "", qlora__jin_test_string},
    {"mapping", "", qlora__jin_test_mapping},
    {"iterable", "", qlora__jin_test_iterable},
    {"sequence", "", qlora__jin_test_sequence},
    {"boolean", "", qlora__jin_test_boolean},
    {"true", "", qlora__jin_test_is_true},
    {"false", "", qlora__jin_test_is_false},
    {"number", "", qlora__jin_test_number},
    {"integer", "", qlora__jin_test_integer},
    {"float", "", qlora__jin_test_float},
    {"callable", "", qlora__jin_test_callable},
    {"escaped", "", qlora__jin_test_escaped},
    {"odd", "", qlora__jin_test_odd},
    {"even", "", qlora__jin_test_even},
    {"lower", "", qlora__jin_test_lower},
    {"upper", "", qlora__jin_test_upper},
    {"filter", "", qlora__jin_test_filter},
    {"test", "", NULL},
    {"divisibleby", "num", qlora__jin_test_divisibleby},
    {"sameas", "other", qlora__jin_test_sameas},
    {"in", "/seq", qlora__jin_test_in},
    {"eq", "/other", qlora__jin_test_eq},
    {"equalto", "/other", qlora__jin_test_eq},
    {"==", "/other", qlora__jin_test_eq},
    {"ne", "/other", qlora__jin_test_ne},
    {"!=", "/other", qlora__jin_test_ne},
    {"lt", "/other", qlora__jin_test_lt},
    {"lessthan", "/other", qlora__jin_test_lt},
    {"<", "/other", qlora__jin_test_lt},
    {"le", "/other", qlora__jin_test_le},
    {"<=", "/other", qlora__jin_test_le},
    {"gt", "/other", qlora__jin_test_gt},
    {"greaterthan", "/other", qlora__jin_test_gt},
    {">", "/other", qlora__jin_test_gt},
    {"ge", "/other", qlora__jin_test_ge},
    {">=", "/other", qlora__jin_test_ge}};

static const qlora__jin_test_row* qlora__jin_test_find(const char* name, size_t size) {
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__jin_tests); i++) {
        if (qlora__jin_named(qlora__jin_tests[i].name, name, size)) {
            return &qlora__jin_tests[i];
        }
    }
    return NULL;
}

static qlora_result qlora__jin_test_run(qlora__jin_machine* m, const qlora__jin_test_row* row,
                                        qlora__jin_value v, const qlora__jin_args* args,
                                        bool* out) {
    qlora__jin_value in[2];
    in[0] = qlora__jin_of(QLORA__JIN_MISSING);
    QLORA__TRY(qlora__jin_bind_args(m, row->name, row->arguments, row->arguments[0] != '\0' ? 1 : 0,
                                    args, in));
    if (row->call == NULL && !qlora__jin_hashable(v)) {
        return qlora__jin_fail(m, "a %s is not the name of a test", qlora__jin_type(v));
    }
    if (row->call == NULL) { // "test": whether there is a test of that name
        *out = v.kind == QLORA__JIN_STRING &&
               qlora__jin_test_find(v.as.string->data, v.as.string->bytes) != NULL;
        return QLORA_OK;
    }
    return row->call(m, v, in[0], out);
}

// ---- by name

static const void* qlora__jin_find_named(const char* name, size_t size, bool test) {
    return test ? (const void*)qlora__jin_test_find(name, size)
                : (const void*)qlora__jin_filter_find(name, size);
}

static qlora_result qlora__jin_unknown(qlora__jin_machine* m, const char* what, const char* name,
                                       size_t size) {
    return qlora__jin_fail(m, "there is no %s named \"%.*s\"", what, (int)(size < 60 ? size : 60),
                           name);
}

static qlora_result qlora__jin_filter_by_name(qlora__jin_machine* m, const char* name, size_t size,
                                              qlora__jin_value v, const qlora__jin_args* args,
                                              qlora__jin_value* out) {
    const qlora__jin_filter_row* row = qlora__jin_filter_find(name, size);
    return row != NULL ? qlora__jin_filter_run(m, row, v, args, out)
                       : qlora__jin_unknown(m, "filter", name, size);
}

static qlora_result qlora__jin_test_by_name(qlora__jin_machine* m, const char* name, size_t size,
                                            qlora__jin_value v, const qlora__jin_args* args,
                                            bool* out) {
    const qlora__jin_test_row* row = qlora__jin_test_find(name, size);
    return row != NULL ? qlora__jin_test_run(m, row, v, args, out)
                       : qlora__jin_unknown(m, "test", name, size);
}
