// The methods of all kinds of values, and what the sandbox does not allow.

static qlora_result qlora__jin_str_join(qlora__jin_machine* m, qlora__jin_value* in,
                                        qlora__jin_value* out) {
    qlora__jin_buffer buffer;
    qlora__jin_iter* iter = NULL;
    qlora__jin_value item;
    bool more = true;
    memset(&buffer, 0, sizeof buffer);
    QLORA__TRY(qlora__jin_iter_make(m, in[1], &iter));
    for (size_t i = 0;; i++) {
        QLORA__TRY(m->hooks->next(m, iter, &item, &more));
        if (!more) {
            break;
        }
        if (item.kind != QLORA__JIN_STRING) {
            return qlora__jin_fail(m, "join: element %llu is a %s, not a string",
                                   (unsigned long long)i, qlora__jin_type(item));
        }
        if (i > 0) {
            QLORA__TRY(qlora__jin_print(m, in[0], &buffer));
        }
        QLORA__TRY(in[0].flag != 0 ? qlora__jin_escape_html(m, item, &buffer)
                                   : qlora__jin_print(m, item, &buffer));
    }
    QLORA__TRY(qlora__jin_buffer_string(m, &buffer, out));
    out->flag = in[0].flag;
    return QLORA_OK;
}

static qlora_result qlora__jin_justify(qlora__jin_machine* m, qlora__jin_value* in, char align,
                                       qlora__jin_value* out) {
    qlora__jin_spec spec;
    qlora__jin_buffer buffer;
    memset(&spec, 0, sizeof spec);
    memset(&buffer, 0, sizeof buffer);
    spec.fill = ' ';
    QLORA__TRY(qlora__jin_need_integer(m, "width", in[1], &spec.width));
    if (in[2].kind != QLORA__JIN_MISSING) {
        size_t step = 0;
        QLORA__TRY(qlora__jin_need_string(m, "fill", in[2]));
        if (in[2].as.string->chars != 1) {
            return qlora__jin_fail(m, "the fill must be one character");
        }
        spec.fill = qlora__jin_code_at(in[2].as.string->data, in[2].as.string->bytes, 0, &step);
    }
    int64_t room = spec.width - (int64_t)in[0].as.string->chars;
    // Python's center puts the odd space to the left when the width is odd
    if (align == '^' && room > 0 && room % 2 != 0 && spec.width % 2 != 0) {
        QLORA__TRY(qlora__jin_put_code(m, &buffer, spec.fill));
        spec.width--;
    }
    QLORA__TRY(
        qlora__jin_pad(m, in[0].as.string->data, in[0].as.string->bytes, &spec, align, &buffer));
    QLORA__TRY(qlora__jin_buffer_string(m, &buffer, out));
    out->flag = in[0].flag;
    return QLORA_OK;
}

static qlora_result qlora__jin_str_center(qlora__jin_machine* m, qlora__jin_value* in,
                                          qlora__jin_value* out) {
    return qlora__jin_justify(m, in, '^', out);
}

static qlora_result qlora__jin_str_ljust(qlora__jin_machine* m, qlora__jin_value* in,
                                         qlora__jin_value* out) {
    return qlora__jin_justify(m, in, '<', out);
}

static qlora_result qlora__jin_str_rjust(qlora__jin_machine* m, qlora__jin_value* in,
                                         qlora__jin_value* out) {
    return qlora__jin_justify(m, in, '>', out);
}

static qlora_result qlora__jin_str_zfill(qlora__jin_machine* m, qlora__jin_value* in,
                                         qlora__jin_value* out) {
    const qlora__jin_string* s = in[0].as.string;
    qlora__jin_spec spec;
    qlora__jin_buffer buffer;
    memset(&spec, 0, sizeof spec);
    memset(&buffer, 0, sizeof buffer);
    spec.fill = '0';
    QLORA__TRY(qlora__jin_need_integer(m, "zfill", in[1], &spec.width));
    size_t sign = s->bytes > 0 && (s->data[0] == '-' || s->data[0] == '+') ? 1 : 0;
    QLORA__TRY(qlora__jin_put(m, &buffer, s->data, sign));
    spec.width -= (int64_t)sign;
    QLORA__TRY(qlora__jin_pad(m, s->data + sign, s->bytes - sign, &spec, '>', &buffer));
    return qlora__jin_buffer_string(m, &buffer, out);
}

static qlora_result qlora__jin_str_expandtabs(qlora__jin_machine* m, qlora__jin_value* in,
                                              qlora__jin_value* out) {
    const qlora__jin_string* s = in[0].as.string;
    qlora__jin_buffer buffer;
    int64_t size = 8;
    int64_t column = 0;
    memset(&buffer, 0, sizeof buffer);
    QLORA__TRY(qlora__jin_need_integer(m, "expandtabs", in[1], &size));
    if (size > INT32_MAX || size < INT32_MIN) {
        return qlora__jin_fail(m, "expandtabs: %lld is too large", (long long)size);
    }
    for (size_t at = 0, step = 0; at < s->bytes; at += step) {
        uint32_t code = qlora__jin_code_at(s->data, s->bytes, at, &step);
        if (code != '\t') {
            column = code == '\n' || code == '\r' ? 0 : column + 1;
            QLORA__TRY(qlora__jin_put(m, &buffer, s->data + at, step));
            continue;
        }
        for (int64_t n = size > 0 ? size - column % size : 0; n > 0; n--) {
            QLORA__TRY(qlora__jin_work(m, 1));
            QLORA__TRY(qlora__jin_put(m, &buffer, " ", 1));
            column++;
        }
    }
    return qlora__jin_buffer_string(m, &buffer, out);
}

// ---- questions about characters

static bool qlora__jin_is_decimal(uint32_t code) {
    return qlora__text_in_runs(qlora__text_decimal_runs,
                               QLORA__TEXT_COUNT(qlora__text_decimal_runs), code);
}

static bool qlora__jin_is_digit(uint32_t code) {
    return qlora__text_in_runs(qlora__text_digit_runs, QLORA__TEXT_COUNT(qlora__text_digit_runs),
                               code);
}

static bool qlora__jin_is_numeric(uint32_t code) {
    return qlora__text_in_runs(qlora__text_numeric_runs,
                               QLORA__TEXT_COUNT(qlora__text_numeric_runs), code);
}

static bool qlora__jin_is_alpha(uint32_t code) {
    return (1u << qlora__jin_class(code) & QLORA__TEXT_L) != 0;
}

static bool qlora__jin_is_alnum(uint32_t code) {
    return qlora__jin_is_alpha(code) || qlora__jin_is_numeric(code);
}

static bool qlora__jin_is_ascii(uint32_t code) {
    return code < 0x80;
}

// Whether all characters pass, and how many there are.
static qlora_result qlora__jin_all(qlora__jin_machine* m, const qlora__jin_string* s,
                                   bool (*test)(uint32_t), bool empty, qlora__jin_value* out) {
    bool all = s->bytes > 0 || empty;
    QLORA__TRY(qlora__jin_work(m, s->bytes / 8));
    for (size_t at = 0, step = 0; at < s->bytes && all; at += step) {
        all = test(qlora__jin_code_at(s->data, s->bytes, at, &step));
    }
    *out = qlora__jin_bool(all);
    return QLORA_OK;
}

#define QLORA__JIN_ALL(name, test, empty)                                                          \
    static qlora_result qlora__jin_str_##name(qlora__jin_machine* m, qlora__jin_value* in,         \
                                              qlora__jin_value* out) {                             \
        return qlora__jin_all(m, in[0].as.string, test, empty, out);                               \
    }
QLORA__JIN_ALL(isalpha, qlora__jin_is_alpha, false)
QLORA__JIN_ALL(isalnum, qlora__jin_is_alnum, false)
QLORA__JIN_ALL(isascii, qlora__jin_is_ascii, true)
QLORA__JIN_ALL(isdecimal, qlora__jin_is_decimal, false)
QLORA__JIN_ALL(isdigit, qlora__jin_is_digit, false)
QLORA__JIN_ALL(isnumeric, qlora__jin_is_numeric, false)
QLORA__JIN_ALL(isspace, qlora__jin_is_space, false)
QLORA__JIN_ALL(isprintable, qlora__jin_is_printable, true)

// Whether there are cased characters and all of them are of this case.
static qlora_result qlora__jin_all_case(qlora__jin_machine* m, const qlora__jin_string* s, int kind,
                                        bool* out) {
    bool any = false;
    bool all = true;
    QLORA__TRY(qlora__jin_work(m, s->bytes / 8));
    for (size_t at = 0, step = 0; at < s->bytes && all; at += step) {
        uint32_t code = qlora__jin_code_at(s->data, s->bytes, at, &step);
        int is = qlora__jin_case_of(code);
        any = any || is != QLORA__JIN_NO_CASE;
        all = is == QLORA__JIN_NO_CASE || is == kind;
    }
    *out = any && all;
    return QLORA_OK;
}

static qlora_result qlora__jin_str_isupper(qlora__jin_machine* m, qlora__jin_value* in,
                                           qlora__jin_value* out) {
    bool is = false;
    QLORA__TRY(qlora__jin_all_case(m, in[0].as.string, QLORA__JIN_UPPER_CASE, &is));
    *out = qlora__jin_bool(is);
    return QLORA_OK;
}

static qlora_result qlora__jin_str_islower(qlora__jin_machine* m, qlora__jin_value* in,
                                           qlora__jin_value* out) {
    bool is = false;
    QLORA__TRY(qlora__jin_all_case(m, in[0].as.string, QLORA__JIN_LOWER_CASE, &is));
    *out = qlora__jin_bool(is);
    return QLORA_OK;
}

static qlora_result qlora__jin_str_istitle(qlora__jin_machine* m, qlora__jin_value* in,
                                           qlora__jin_value* out) {
    const qlora__jin_string* s = in[0].as.string;
    bool before = false;
    bool any = false;
    bool good = true;
    QLORA__TRY(qlora__jin_work(m, s->bytes / 8));
    for (size_t at = 0, step = 0; at < s->bytes && good; at += step) {
        int is = qlora__jin_case_of(qlora__jin_code_at(s->data, s->bytes, at, &step));
        bool upper = is == QLORA__JIN_UPPER_CASE || is == QLORA__JIN_TITLE_CASE;
        bool lower = is == QLORA__JIN_LOWER_CASE;
        good = upper ? !before : lower ? before : true;
        any = any || upper || lower;
        before = upper || lower;
    }
    *out = qlora__jin_bool(any && good);
    return QLORA_OK;
}

// ---- lists and dictionaries

// list(value)
static qlora_result qlora__jin_to_list(qlora__jin_machine* m, qlora__jin_value v,
                                       qlora__jin_value* out) {
    qlora__jin_iter* iter = NULL;
    qlora__jin_value list;
    QLORA__TRY(qlora__jin_iter_make(m, v, &iter));
    QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_LIST, 4, &list));
    for (;;) {
        qlora__jin_value item;
        bool more = true;
        QLORA__TRY(m->hooks->next(m, iter, &item, &more));
        if (!more) {
            *out = list;
            return QLORA_OK;
        }
        QLORA__TRY(qlora__jin_list_add(m, list.as.list, item));
    }
}

static qlora_result qlora__jin_list_copy(qlora__jin_machine* m, qlora__jin_value* in,
                                         qlora__jin_value* out) {
    qlora__jin_value empty;
    QLORA__TRY(qlora__jin_list_make(m, in[0].kind, 0, &empty));
    return qlora__jin_append_lists(m, in[0], empty, out);
}

static qlora_result qlora__jin_list_count(qlora__jin_machine* m, qlora__jin_value* in,
                                          qlora__jin_value* out) {
    int64_t count = 0;
    for (size_t i = 0; i < in[0].as.list->count; i++) {
        bool same = false;
        QLORA__TRY(qlora__jin_equal(m, in[0].as.list->items[i], in[1], &same));
        count += same ? 1 : 0;
    }
    *out = qlora__jin_int(count);
    return QLORA_OK;
}

static qlora_result qlora__jin_list_index(qlora__jin_machine* m, qlora__jin_value* in,
                                          qlora__jin_value* out) {
    int64_t count = (int64_t)in[0].as.list->count;
    int64_t from = 0;
    int64_t to = count;
    QLORA__TRY(qlora__jin_need_integer(m, "index", in[2], &from));
    QLORA__TRY(qlora__jin_need_integer(m, "index", in[3], &to));
    from += from < 0 ? count : 0;
    to += to < 0 ? count : 0;
    for (int64_t i = from < 0 ? 0 : from; i < to && i < count; i++) {
        bool same = false;
        QLORA__TRY(qlora__jin_equal(m, in[0].as.list->items[i], in[1], &same));
        if (same) {
            *out = qlora__jin_int(i);
            return QLORA_OK;
        }
    }
    return qlora__jin_fail(m, "index: the value is not in the list");
}

static qlora_result qlora__jin_dict_get(qlora__jin_machine* m, qlora__jin_value* in,
                                        qlora__jin_value* out) {
    size_t at = 0;
    QLORA__TRY(qlora__jin_dict_find(m, in[0].as.dict, in[1], &at));
    *out = at < in[0].as.dict->count          ? in[0].as.dict->values[at]
           : in[2].kind != QLORA__JIN_MISSING ? in[2]
                                              : qlora__jin_none();
    return QLORA_OK;
}

static qlora_result qlora__jin_dict_view(qlora__jin_value* in, int which, qlora__jin_value* out) {
    *out = qlora__jin_of(QLORA__JIN_VIEW);
    out->flag = which;
    out->as.dict = in[0].as.dict;
    return QLORA_OK;
}

static qlora_result qlora__jin_dict_keys(qlora__jin_machine* m, qlora__jin_value* in,
                                         qlora__jin_value* out) {
    (void)m;
    return qlora__jin_dict_view(in, 0, out);
}

static qlora_result qlora__jin_dict_values(qlora__jin_machine* m, qlora__jin_value* in,
                                           qlora__jin_value* out) {
    (void)m;
    return qlora__jin_dict_view(in, 1, out);
}

static qlora_result qlora__jin_dict_items(qlora__jin_machine* m, qlora__jin_value* in,
                                          qlora__jin_value* out) {
    (void)m;
    return qlora__jin_dict_view(in, 2, out);
}

// Whether a view and anything that can be iterated have nothing in common.
static qlora_result qlora__jin_view_isdisjoint(qlora__jin_machine* m, qlora__jin_value* in,
                                               qlora__jin_value* out) {
    qlora__jin_iter* iter = NULL;
    bool found = false;
    bool more = true;
    if (in[0].flag == 1 || !qlora__jin_is_iterable(in[1])) {
        return qlora__jin_fail(m, "isdisjoint of a %s and a %s is not possible",
                               qlora__jin_type(in[0]), qlora__jin_type(in[1]));
    }
    QLORA__TRY(qlora__jin_iter_make(m, in[1], &iter));
    while (more && !found) {
        qlora__jin_value item;
        QLORA__TRY(m->hooks->next(m, iter, &item, &more));
        if (more) {
            QLORA__TRY(qlora__jin_contains(m, in[0], item, &found));
        }
    }
    *out = qlora__jin_bool(!found);
    return QLORA_OK;
}

static qlora_result qlora__jin_dict_copy(qlora__jin_machine* m, qlora__jin_value* in,
                                         qlora__jin_value* out) {
    const qlora__jin_dict* from = in[0].as.dict;
    QLORA__TRY(qlora__jin_dict_make(m, QLORA__JIN_DICT, from->count, out));
    for (size_t i = 0; i < from->count; i++) {
        QLORA__TRY(qlora__jin_dict_add(m, out->as.dict, from->keys[i], from->values[i]));
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_float_is_integer(qlora__jin_machine* m, qlora__jin_value* in,
                                                qlora__jin_value* out) {
    double x = in[0].as.real;
    (void)m;
    *out = qlora__jin_bool(qlora__jin_is_zero(x - qlora__jin_floor(x)));
    return QLORA_OK;
}

// as_integer_ratio(): a float is a whole number times a power of two.
static qlora_result qlora__jin_number_ratio(qlora__jin_machine* m, qlora__jin_value* in,
                                            qlora__jin_value* out) {
    int64_t above = 0;
    int64_t below = 1;
    if (in[0].kind != QLORA__JIN_FLOAT) {
        above = qlora__jin_integer_of(in[0]);
        return qlora__jin_pair_make(m, qlora__jin_int(above), qlora__jin_int(1), out);
    }
    double x = in[0].as.real;
    if (!qlora__jin_is_finite(x)) {
        return qlora__jin_fail(m, "as_integer_ratio: the number is not finite");
    }
    while (qlora__jin_floor(x) < x && below < (int64_t)1 << 61) {
        x *= 2.0;
        below *= 2;
    }
    if (qlora__jin_floor(x) < x || x >= 9223372036854775808.0 || x < -9223372036854775808.0) {
        return qlora__jin_too_big(m);
    }
    return qlora__jin_pair_make(m, qlora__jin_int((int64_t)x), qlora__jin_int(below), out);
}

static qlora_result qlora__jin_number_conjugate(qlora__jin_machine* m, qlora__jin_value* in,
                                                qlora__jin_value* out) {
    (void)m;
    *out = in[0].kind == QLORA__JIN_FLOAT ? in[0] : qlora__jin_int(qlora__jin_integer_of(in[0]));
    return QLORA_OK;
}

static qlora_result qlora__jin_bits(qlora__jin_value v, bool ones, qlora__jin_value* out) {
    int64_t n = qlora__jin_integer_of(v);
    int64_t count = 0;
    for (uint64_t bits = n < 0 ? 0 - (uint64_t)n : (uint64_t)n; bits > 0; bits >>= 1) {
        count += !ones || (bits & 1) != 0 ? 1 : 0;
    }
    *out = qlora__jin_int(count);
    return QLORA_OK;
}

static qlora_result qlora__jin_int_bit_length(qlora__jin_machine* m, qlora__jin_value* in,
                                              qlora__jin_value* out) {
    (void)m;
    return qlora__jin_bits(in[0], false, out);
}

static qlora_result qlora__jin_int_bit_count(qlora__jin_machine* m, qlora__jin_value* in,
                                             qlora__jin_value* out) {
    (void)m;
    return qlora__jin_bits(in[0], true, out);
}

// count() and index() of a range: made a list first, whose length is limited.
static qlora_result qlora__jin_range_count(qlora__jin_machine* m, qlora__jin_value* in,
                                           qlora__jin_value* out) {
    QLORA__TRY(qlora__jin_to_list(m, in[0], &in[0]));
    return qlora__jin_list_count(m, in, out);
}

static qlora_result qlora__jin_range_index(qlora__jin_machine* m, qlora__jin_value* in,
                                           qlora__jin_value* out) {
    QLORA__TRY(qlora__jin_to_list(m, in[0], &in[0]));
    return qlora__jin_list_index(m, in, out);
}

static qlora_result qlora__jin_dict_fromkeys(qlora__jin_machine* m, qlora__jin_value* in,
                                             qlora__jin_value* out) {
    qlora__jin_value keys;
    QLORA__TRY(qlora__jin_to_list(m, in[1], &keys));
    QLORA__TRY(qlora__jin_dict_make(m, QLORA__JIN_DICT, 4, out));
    for (size_t i = 0; i < keys.as.list->count; i++) {
        QLORA__TRY(
            qlora__jin_dict_set(m, out->as.dict, keys.as.list->items[i],
                                in[2].kind != QLORA__JIN_MISSING ? in[2] : qlora__jin_none()));
    }
    return QLORA_OK;
}

// translate(): each character by its number in a dictionary.
static qlora_result qlora__jin_str_translate(qlora__jin_machine* m, qlora__jin_value* in,
                                             qlora__jin_value* out) {
    const qlora__jin_string* s = in[0].as.string;
    qlora__jin_buffer buffer;
    memset(&buffer, 0, sizeof buffer);
    if (in[1].kind != QLORA__JIN_DICT) {
        return qlora__jin_fail(m, "translate: a table that is a %s is not supported",
                               qlora__jin_type(in[1]));
    }
    for (size_t at = 0, step = 0; at < s->bytes; at += step) {
        uint32_t code = qlora__jin_code_at(s->data, s->bytes, at, &step);
        qlora__jin_value to;
        size_t place = 0;
        QLORA__TRY(qlora__jin_dict_find(m, in[1].as.dict, qlora__jin_int(code), &place));
        if (place == in[1].as.dict->count) {
            QLORA__TRY(qlora__jin_put(m, &buffer, s->data + at, step));
            continue;
        }
        to = in[1].as.dict->values[place];
        if (qlora__jin_is_integer(to)) {
            QLORA__TRY(qlora__jin_character(m, qlora__jin_integer_of(to), &to));
        }
        if (to.kind != QLORA__JIN_NONE) {
            QLORA__TRY(qlora__jin_need_string(m, "translate", to));
            QLORA__TRY(qlora__jin_print(m, to, &buffer));
        }
    }
    QLORA__TRY(qlora__jin_buffer_string(m, &buffer, out));
    out->flag = in[0].flag;
    return QLORA_OK;
}

// format_map(): the fields are the keys of a dictionary.
static qlora_result qlora__jin_format_map(qlora__jin_machine* m, qlora__jin_value self,
                                          const qlora__jin_args* args, qlora__jin_value* out) {
    qlora__jin_args given;
    void* names = NULL;
    memset(&given, 0, sizeof given);
    if (args->positional != 1 || args->named != 0 || args->items[0].kind != QLORA__JIN_DICT) {
        return qlora__jin_fail(m, "format_map: one dictionary is needed");
    }
    const qlora__jin_dict* dict = args->items[0].as.dict;
    QLORA__TRY(qlora__jin_get_values(m, dict->count, &given.items));
    QLORA__TRY(qlora__jin_get(m, dict->count * sizeof *given.names, &names));
    given.names = (const qlora__jin_string**)names;
    for (size_t i = 0; i < dict->count; i++) {
        if (dict->keys[i].kind == QLORA__JIN_STRING) {
            given.items[given.named] = dict->values[i];
            given.names[given.named++] = dict->keys[i].as.string;
        }
    }
    return qlora__jin_format(m, self, &given, out);
}

// ---- the table

// A method without a function exists in Python and is not supported here; `unsafe`: the sandbox
// forbids it, as it changes the value.
typedef struct qlora__jin_method_row {
    qlora__jin_kind kind;
    const char* name;
    const char* arguments; // NULL: any, for format and format_map
    size_t required;
    qlora__jin_filter_fn call;
    bool unsafe;
} qlora__jin_method_row;

#define QLORA__JIN_STR(name, arguments, required)                                                  \
    { QLORA__JIN_STRING, #name, arguments, required, qlora__jin_str_##name, false }
#define QLORA__JIN_NOT_YET(kind, name)                                                             \
    { QLORA__JIN_##kind, name, "", 0, NULL, false }
// of an int and of a bool, which is one in Python
#define QLORA__JIN_WHOLE(name, call)                                                               \
    {QLORA__JIN_INT, #name, "", 0, call, false}, {                                                 \
        QLORA__JIN_BOOL, #name, "", 0, call, false                                                 \
    }
#define QLORA__JIN_UNSAFE(kind, name)                                                              \
    { QLORA__JIN_##kind, name, "", 0, NULL, true }

static const qlora__jin_method_row qlora__jin_methods[] = {
    QLORA__JIN_STR(strip, "/chars", 0),
    QLORA__JIN_STR(lstrip, "/chars", 0),
    QLORA__JIN_STR(rstrip, "/chars", 0),
    QLORA__JIN_STR(split, "sep maxsplit", 0),
    QLORA__JIN_STR(rsplit, "sep maxsplit", 0),
    QLORA__JIN_STR(splitlines, "keepends", 0),
    QLORA__JIN_STR(startswith, "/prefix start end", 1),
    QLORA__JIN_STR(endswith, "/suffix start end", 1),
    QLORA__JIN_STR(replace, "/old new count", 2),
    QLORA__JIN_STR(lower, "", 0),
    QLORA__JIN_STR(upper, "", 0),
    QLORA__JIN_STR(title, "", 0),
    QLORA__JIN_STR(capitalize, "", 0),
    QLORA__JIN_STR(swapcase, "", 0),
    QLORA__JIN_STR(join, "/iterable", 1),
    QLORA__JIN_STR(find, "/sub start end", 1),
    QLORA__JIN_STR(rfind, "/sub start end", 1),
    QLORA__JIN_STR(index, "/sub start end", 1),
    QLORA__JIN_STR(rindex, "/sub start end", 1),
    QLORA__JIN_STR(count, "/sub start end", 1),
    QLORA__JIN_STR(partition, "/sep", 1),
    QLORA__JIN_STR(rpartition, "/sep", 1),
    QLORA__JIN_STR(removeprefix, "/prefix", 1),
    QLORA__JIN_STR(removesuffix, "/suffix", 1),
    QLORA__JIN_STR(center, "/width fill", 1),
    QLORA__JIN_STR(ljust, "/width fill", 1),
    QLORA__JIN_STR(rjust, "/width fill", 1),
    QLORA__JIN_STR(zfill, "/width", 1),
    QLORA__JIN_STR(expandtabs, "tabsize", 0),
    QLORA__JIN_STR(isalpha, "", 0),
    QLORA__JIN_STR(isalnum, "", 0),
    QLORA__JIN_STR(isascii, "", 0),
    QLORA__JIN_STR(isdecimal, "", 0),
    QLORA__JIN_STR(isdigit, "", 0),
    QLORA__JIN_STR(isnumeric, "", 0),
    QLORA__JIN_STR(isspace, "", 0),
    QLORA__JIN_STR(isprintable, "", 0),
    QLORA__JIN_STR(isupper, "", 0),
    QLORA__JIN_STR(islower, "", 0),
    QLORA__JIN_STR(istitle, "", 0),
    {QLORA__JIN_STRING, "format", NULL, 0, NULL, false},
    {QLORA__JIN_STRING, "format_map", NULL, 1, NULL, false},
    QLORA__JIN_STR(casefold, "", 0),
    QLORA__JIN_STR(translate, "/table", 1),
    QLORA__JIN_NOT_YET(STRING, "encode"),
    QLORA__JIN_NOT_YET(STRING, "maketrans"),
    QLORA__JIN_NOT_YET(STRING, "isidentifier"),
    {QLORA__JIN_LIST, "copy", "", 0, qlora__jin_list_copy, false},
    {QLORA__JIN_LIST, "count", "/value", 1, qlora__jin_list_count, false},
    {QLORA__JIN_LIST, "index", "/value start stop", 1, qlora__jin_list_index, false},
    QLORA__JIN_UNSAFE(LIST, "append"),
    QLORA__JIN_UNSAFE(LIST, "clear"),
    QLORA__JIN_UNSAFE(LIST, "pop"),
    QLORA__JIN_UNSAFE(LIST, "reverse"),
    QLORA__JIN_UNSAFE(LIST, "insert"),
    QLORA__JIN_UNSAFE(LIST, "sort"),
    QLORA__JIN_UNSAFE(LIST, "extend"),
    QLORA__JIN_UNSAFE(LIST, "remove"),
    {QLORA__JIN_TUPLE, "count", "/value", 1, qlora__jin_list_count, false},
    {QLORA__JIN_TUPLE, "index", "/value start stop", 1, qlora__jin_list_index, false},
    {QLORA__JIN_DICT, "get", "/key default", 1, qlora__jin_dict_get, false},
    {QLORA__JIN_DICT, "keys", "", 0, qlora__jin_dict_keys, false},
    {QLORA__JIN_DICT, "values", "", 0, qlora__jin_dict_values, false},
    {QLORA__JIN_DICT, "items", "", 0, qlora__jin_dict_items, false},
    {QLORA__JIN_DICT, "copy", "", 0, qlora__jin_dict_copy, false},
    {QLORA__JIN_DICT, "fromkeys", "/iterable value", 1, qlora__jin_dict_fromkeys, false},
    {QLORA__JIN_VIEW, "isdisjoint", "/other", 1, qlora__jin_view_isdisjoint, false},
    QLORA__JIN_UNSAFE(DICT, "clear"),
    QLORA__JIN_UNSAFE(DICT, "pop"),
    QLORA__JIN_UNSAFE(DICT, "popitem"),
    QLORA__JIN_UNSAFE(DICT, "setdefault"),
    QLORA__JIN_UNSAFE(DICT, "update"),
    QLORA__JIN_WHOLE(bit_length, qlora__jin_int_bit_length),
    QLORA__JIN_WHOLE(bit_count, qlora__jin_int_bit_count),
    QLORA__JIN_WHOLE(conjugate, qlora__jin_number_conjugate),
    QLORA__JIN_WHOLE(as_integer_ratio, qlora__jin_number_ratio),
    QLORA__JIN_WHOLE(to_bytes, NULL),
    QLORA__JIN_WHOLE(from_bytes, NULL),
    {QLORA__JIN_FLOAT, "is_integer", "", 0, qlora__jin_float_is_integer, false},
    {QLORA__JIN_FLOAT, "conjugate", "", 0, qlora__jin_number_conjugate, false},
    {QLORA__JIN_FLOAT, "as_integer_ratio", "", 0, qlora__jin_number_ratio, false},
    QLORA__JIN_NOT_YET(FLOAT, "hex"),
    QLORA__JIN_NOT_YET(FLOAT, "fromhex"),
    QLORA__JIN_NOT_YET(VIEW, "mapping"),
    {QLORA__JIN_RANGE, "count", "/value", 1, qlora__jin_range_count, false},
    {QLORA__JIN_RANGE, "index", "/value", 1, qlora__jin_range_index, false}};

static bool qlora__jin_method_find(qlora__jin_value self, const char* name, size_t size,
                                   bool* unsafe, const void** found) {
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__jin_methods) && size > 0; i++) {
        const qlora__jin_method_row* row = &qlora__jin_methods[i];
        if (row->kind == self.kind && row->name[0] == name[0] && strlen(row->name) == size &&
            memcmp(row->name, name, size) == 0) {
            *unsafe = row->unsafe;
            *found = row;
            return true;
        }
    }
    *unsafe = true;
    return size > 4 && memcmp(name, "__", 2) == 0 && memcmp(name + size - 2, "__", 2) == 0;
}

static qlora_result qlora__jin_method_call(qlora__jin_machine* m, qlora__jin_value self,
                                           const void* method, const qlora__jin_args* args,
                                           qlora__jin_value* out) {
    const qlora__jin_method_row* row = (const qlora__jin_method_row*)method;
    qlora__jin_value in[8];
    if (row->arguments == NULL) {
        return row->required > 0 ? qlora__jin_format_map(m, self, args, out)
                                 : qlora__jin_format(m, self, args, out);
    }
    if (row->call == NULL) {
        return qlora__jin_fail(m, "the method \"%s\" of a %s is not supported", row->name,
                               qlora__jin_type(self));
    }
    in[0] = self;
    for (size_t i = 1; i < 8; i++) {
        in[i] = qlora__jin_of(QLORA__JIN_MISSING);
    }
    QLORA__TRY(qlora__jin_bind_args(m, row->name, row->arguments, row->required, args, in + 1));
    return row->call(m, in, out);
}
