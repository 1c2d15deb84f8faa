// What Python does with values: truth, text, comparison, iteration, items.

// ---- text ---------------------------------------------------------------------------------------

// Digits with their decimal point, as Python places it: an exponent only below -4 or above 15.
static void qlora__jin_place_point(bool negative, const char* digits, int count, int exponent,
                                   char out[48]) {
    size_t n = 0;
    if (negative) {
        out[n++] = '-';
    }
    if (exponent < -4 || exponent >= 16) {
        out[n++] = digits[0];
        if (count > 1) {
            out[n++] = '.';
            memcpy(out + n, digits + 1, (size_t)(count - 1));
            n += (size_t)(count - 1);
        }
        snprintf(out + n, 48 - n, "e%c%02d", exponent < 0 ? '-' : '+', abs(exponent));
        return;
    }
    if (exponent < 0) {
        out[n++] = '0';
    }
    for (int i = 0; i <= exponent; i++) {
        out[n++] = i < count ? digits[i] : '0';
    }
    out[n++] = '.';
    for (int i = -1; i > exponent; i--) {
        out[n++] = '0';
    }
    int rest = exponent < 0 ? 0 : exponent + 1;
    for (int i = rest; i < count; i++) {
        out[n++] = digits[i];
    }
    if (rest >= count) {
        out[n++] = '0';
    }
    out[n] = '\0';
}

// The shortest digits that read back as the same number, as Python's repr writes them.
static void qlora__jin_format_double(double x, char out[48]) {
    uint64_t bits = 0;
    char digits[32];
    char printed[40];
    int count = 0;
    int exponent = 0;
    memcpy(&bits, &x, sizeof bits);
    if ((bits >> 52 & 0x7FF) == 0x7FF) {
        bool nan = (bits & 0xFFFFFFFFFFFFFu) != 0;
        snprintf(out, 48, "%s", nan ? "nan" : (bits >> 63) != 0 ? "-inf" : "inf");
        return;
    }
    for (int precision = 1; precision <= 17; precision++) {
        snprintf(printed, sizeof printed, "%.*e", precision - 1, x);
        count = 0;
        const char* c = printed;
        for (; *c != 'e' && *c != '\0'; c++) { // the decimal point may be the locale's
            if (*c >= '0' && *c <= '9' && count < 31) {
                digits[count++] = *c;
            }
        }
        exponent = *c == 'e' ? atoi(c + 1) : 0;
        char back[48];
        digits[count] = '\0';
        snprintf(back, sizeof back, "%s%se%d", printed[0] == '-' ? "-" : "", digits,
                 exponent - count + 1);
        double again = qlora__number_parse(back, strlen(back));
        if (memcmp(&again, &x, sizeof x) == 0) {
            break;
        }
    }
    while (count > 1 && digits[count - 1] == '0') {
        count--;
    }
    qlora__jin_place_point((bits >> 63) != 0, digits, count, exponent, out);
}

static bool qlora__jin_is_printable(uint32_t code) {
    if (code < 0x7F) {
        return code >= 0x20;
    }
    uint32_t kind = qlora__jin_class(code);
    return kind != QLORA__TEXT_C_OTHER && kind != QLORA__TEXT_C_SPACE &&
           kind != QLORA__TEXT_C_JOINER;
}

// A string in quotes, as repr prints it.
static qlora_result qlora__jin_repr_string(qlora__jin_machine* m, const qlora__jin_string* s,
                                           qlora__jin_buffer* out) {
    bool single = memchr(s->bytes > 0 ? s->data : "", '\'', s->bytes) != NULL;
    bool twice = memchr(s->bytes > 0 ? s->data : "", '"', s->bytes) != NULL;
    char quote = single && !twice ? '"' : '\'';
    QLORA__TRY(qlora__jin_work(m, s->bytes / 16));
    QLORA__TRY(qlora__jin_put(m, out, &quote, 1));
    for (size_t at = 0, step = 0; at < s->bytes; at += step) {
        char escaped[16];
        uint32_t code = qlora__jin_code_at(s->data, s->bytes, at, &step);
        if (code == (uint32_t)quote || code == '\\') {
            snprintf(escaped, sizeof escaped, "\\%c", (char)code);
        } else if (code == '\n' || code == '\r' || code == '\t') {
            snprintf(escaped, sizeof escaped, "\\%c",
                     code == '\n'   ? 'n'
                     : code == '\r' ? 'r'
                                    : 't');
        } else if (!qlora__jin_is_printable(code)) {
            const char* format = code < 0x100 ? "\\x%02x" : code < 0x10000 ? "\\u%04x" : "\\U%08x";
            snprintf(escaped, sizeof escaped, format, (unsigned)code);
        } else {
            QLORA__TRY(qlora__jin_put(m, out, s->data + at, step));
            continue;
        }
        QLORA__TRY(qlora__jin_puts(m, out, escaped));
    }
    return qlora__jin_put(m, out, &quote, 1);
}

// (a, b), [a, b], or what a view shows.
static qlora_result qlora__jin_repr_items(qlora__jin_machine* m, const char* open,
                                          const qlora__jin_value* items, size_t count,
                                          const char* close, qlora__jin_buffer* out) {
    QLORA__TRY(qlora__jin_puts(m, out, open));
    for (size_t i = 0; i < count; i++) {
        if (i > 0) {
            QLORA__TRY(qlora__jin_puts(m, out, ", "));
        }
        QLORA__TRY(m->hooks->repr(m, items[i], out));
    }
    return qlora__jin_puts(m, out, close);
}

static qlora_result qlora__jin_repr_dict(qlora__jin_machine* m, const qlora__jin_dict* dict,
                                         const char* between, bool pairs, qlora__jin_buffer* out) {
    for (size_t i = 0; i < dict->count; i++) {
        if (i > 0) {
            QLORA__TRY(qlora__jin_puts(m, out, ", "));
        }
        if (pairs) {
            QLORA__TRY(qlora__jin_puts(m, out, "("));
        }
        QLORA__TRY(m->hooks->repr(m, dict->keys[i], out));
        QLORA__TRY(qlora__jin_puts(m, out, between));
        QLORA__TRY(m->hooks->repr(m, dict->values[i], out));
        if (pairs) {
            QLORA__TRY(qlora__jin_puts(m, out, ")"));
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_repr_view(qlora__jin_machine* m, qlora__jin_value v,
                                         qlora__jin_buffer* out) {
    const qlora__jin_dict* dict = v.as.dict;
    if (v.flag == 2) {
        QLORA__TRY(qlora__jin_puts(m, out, "dict_items(["));
        QLORA__TRY(qlora__jin_repr_dict(m, dict, ", ", true, out));
        return qlora__jin_puts(m, out, "])");
    }
    if (v.flag == 3) {
        return dict->count == 0 ? qlora__jin_puts(m, out, "set()")
                                : qlora__jin_repr_items(m, "{", dict->keys, dict->count, "}", out);
    }
    return qlora__jin_repr_items(m, v.flag == 0 ? "dict_keys([" : "dict_values([",
                                 v.flag == 0 ? dict->keys : dict->values, dict->count, "])", out);
}

// What is neither a number nor a string.
static qlora_result qlora__jin_repr_inner(qlora__jin_machine* m, qlora__jin_value v,
                                          qlora__jin_buffer* out) {
    char text[96];
    switch (v.kind) {
    case QLORA__JIN_LIST:
        return qlora__jin_repr_items(m, "[", v.as.list->items, v.as.list->count, "]", out);
    case QLORA__JIN_TUPLE:
        return qlora__jin_repr_items(m, "(", v.as.list->items, v.as.list->count,
                                     v.as.list->count == 1 ? ",)" : ")", out);
    case QLORA__JIN_DICT:
        QLORA__TRY(qlora__jin_puts(m, out, "{"));
        QLORA__TRY(qlora__jin_repr_dict(m, v.as.dict, ": ", false, out));
        return qlora__jin_puts(m, out, "}");
    case QLORA__JIN_NAMESPACE:
        QLORA__TRY(qlora__jin_puts(m, out, "<Namespace {"));
        QLORA__TRY(qlora__jin_repr_dict(m, v.as.dict, ": ", false, out));
        return qlora__jin_puts(m, out, "}>");
    case QLORA__JIN_VIEW:
        return qlora__jin_repr_view(m, v, out);
    case QLORA__JIN_RANGE:
        snprintf(text, sizeof text,
                 v.as.range->step == 1 ? "range(%lld, %lld)" : "range(%lld, %lld, %lld)",
                 (long long)v.as.range->start, (long long)v.as.range->stop,
                 (long long)v.as.range->step);
        return qlora__jin_puts(m, out, text);
    case QLORA__JIN_ITER: // it may be a string in between, but not in the output
        m->addresses = true;
        return qlora__jin_puts(m, out,
                               "<generator object sync_do_map at 0x" QLORA__JIN_ADDRESS ">");
    default:
        // Python prints an address here, which is different each time
        return qlora__jin_fail(m, "a %s cannot be printed", qlora__jin_type(v));
    }
}

static qlora_result qlora__jin_repr(qlora__jin_machine* m, qlora__jin_value v,
                                    qlora__jin_buffer* out) {
    char text[64];
    switch (v.kind) {
    case QLORA__JIN_UNDEFINED:
        return qlora__jin_puts(m, out, "Undefined");
    case QLORA__JIN_NONE:
        return qlora__jin_puts(m, out, "None");
    case QLORA__JIN_BOOL:
        return qlora__jin_puts(m, out, v.as.truth ? "True" : "False");
    case QLORA__JIN_INT:
        snprintf(text, sizeof text, "%lld", (long long)v.as.integer);
        return qlora__jin_puts(m, out, text);
    case QLORA__JIN_BIG:
        return qlora__jin_put(m, out, v.as.string->data, v.as.string->bytes);
    case QLORA__JIN_FLOAT:
        qlora__jin_format_double(v.as.real, text);
        return qlora__jin_puts(m, out, text);
    case QLORA__JIN_STRING:
        if (v.flag != 0) {
            QLORA__TRY(qlora__jin_puts(m, out, "Markup("));
            QLORA__TRY(qlora__jin_repr_string(m, v.as.string, out));
            return qlora__jin_puts(m, out, ")");
        }
        return qlora__jin_repr_string(m, v.as.string, out);
    default:
        QLORA__TRY(qlora__jin_enter(m));
        QLORA__TRY(qlora__jin_repr_inner(m, v, out));
        m->depth--;
        return QLORA_OK;
    }
}

// str(): appends.
static qlora_result qlora__jin_print(qlora__jin_machine* m, qlora__jin_value v,
                                     qlora__jin_buffer* out) {
    if (v.kind == QLORA__JIN_STRING) {
        return qlora__jin_put(m, out, v.as.string->data, v.as.string->bytes);
    }
    return v.kind == QLORA__JIN_UNDEFINED ? QLORA_OK : qlora__jin_repr(m, v, out);
}

// str() as a value; a string stays what it is, Markup too.
static qlora_result qlora__jin_text(qlora__jin_machine* m, qlora__jin_value v,
                                    qlora__jin_value* out) {
    qlora__jin_buffer buffer;
    if (v.kind == QLORA__JIN_STRING) {
        *out = v;
        return QLORA_OK;
    }
    memset(&buffer, 0, sizeof buffer);
    QLORA__TRY(qlora__jin_print(m, v, &buffer));
    return qlora__jin_buffer_string(m, &buffer, out);
}

// ---- truth, numbers, equality, order ------------------------------------------------------------

static bool qlora__jin_is_nan(double x) {
    return !(x <= 0.0 || x >= 0.0);
}

static bool qlora__jin_truth(qlora__jin_value v) {
    switch (v.kind) {
    case QLORA__JIN_MISSING:
    case QLORA__JIN_UNDEFINED:
    case QLORA__JIN_NONE:
        return false;
    case QLORA__JIN_BOOL:
        return v.as.truth;
    case QLORA__JIN_INT:
        return v.as.integer != 0;
    case QLORA__JIN_FLOAT:
        return v.as.real < 0.0 || v.as.real > 0.0 || qlora__jin_is_nan(v.as.real);
    case QLORA__JIN_STRING:
        return v.as.string->bytes > 0;
    case QLORA__JIN_LIST:
    case QLORA__JIN_TUPLE:
        return v.as.list->count > 0;
    case QLORA__JIN_DICT:
    case QLORA__JIN_VIEW:
        return v.as.dict->count > 0;
    case QLORA__JIN_RANGE:
        return v.as.range->count > 0;
    default:
        return true;
    }
}

static bool qlora__jin_is_number(qlora__jin_value v) {
    return v.kind == QLORA__JIN_BOOL || v.kind == QLORA__JIN_INT || v.kind == QLORA__JIN_FLOAT;
}

static bool qlora__jin_is_integer(qlora__jin_value v) {
    return v.kind == QLORA__JIN_BOOL || v.kind == QLORA__JIN_INT;
}

static int64_t qlora__jin_integer_of(qlora__jin_value v) {
    return v.kind == QLORA__JIN_BOOL ? (v.as.truth ? 1 : 0) : v.as.integer;
}

static double qlora__jin_real_of(qlora__jin_value v) {
    return v.kind == QLORA__JIN_FLOAT ? v.as.real : (double)qlora__jin_integer_of(v);
}

// Compares a whole number with a double, exactly: -1, 0, 1, or 2 for NaN.
static int qlora__jin_compare_mixed(int64_t x, double y) {
    if (qlora__jin_is_nan(y)) {
        return 2;
    }
    if (y >= 9223372036854775808.0 || y < -9223372036854775808.0) {
        return y > 0.0 ? -1 : 1;
    }
    int64_t whole = (int64_t)y; // towards zero
    double part = y - (double)whole;
    return x < whole ? -1 : x > whole ? 1 : part > 0.0 ? -1 : part < 0.0 ? 1 : 0;
}

// The same where a number does not fit 64 bits: by the digits. A double of that size is whole, and
// the fraction of a smaller one does not matter.
static int qlora__jin_compare_big(qlora__jin_value a, qlora__jin_value b) {
    char printed[2][330];
    const qlora__jin_value both[2] = {a, b};
    const char* digits[2] = {printed[0], printed[1]};
    size_t sizes[2] = {0, 0};
    for (size_t i = 0; i < 2; i++) {
        double x = both[i].kind == QLORA__JIN_FLOAT ? both[i].as.real : 0.0;
        bool above = x > 0.0;
        if (!(x - x <= 0.0)) { // not finite
            return qlora__jin_is_nan(x) ? 2 : above == (i == 0) ? 1 : -1;
        }
        if (both[i].kind == QLORA__JIN_BIG) {
            digits[i] = both[i].as.string->data;
            sizes[i] = both[i].as.string->bytes;
            continue;
        }
        if (both[i].kind == QLORA__JIN_FLOAT) {
            snprintf(printed[i], sizeof printed[i], "%.0f", x);
        } else {
            snprintf(printed[i], sizeof printed[i], "%lld",
                     (long long)qlora__jin_integer_of(both[i]));
        }
        sizes[i] = strlen(printed[i]);
    }
    bool minus = digits[0][0] == '-';
    if (minus != (digits[1][0] == '-')) {
        return minus ? -1 : 1;
    }
    int order = sizes[0] < sizes[1]   ? -1
                : sizes[0] > sizes[1] ? 1
                                      : memcmp(digits[0], digits[1], sizes[0]);
    order = order < 0 ? -1 : order > 0 ? 1 : 0;
    return minus ? -order : order;
}

// -1, 0, 1, or 2 when one of them is not a number (NaN).
static int qlora__jin_compare_numbers(qlora__jin_value a, qlora__jin_value b) {
    if (a.kind == QLORA__JIN_BIG || b.kind == QLORA__JIN_BIG) {
        return qlora__jin_compare_big(a, b);
    }
    if (qlora__jin_is_integer(a) && qlora__jin_is_integer(b)) {
        int64_t x = qlora__jin_integer_of(a);
        int64_t y = qlora__jin_integer_of(b);
        return x < y ? -1 : x > y ? 1 : 0;
    }
    if (qlora__jin_is_integer(a)) {
        return qlora__jin_compare_mixed(qlora__jin_integer_of(a), b.as.real);
    }
    if (qlora__jin_is_integer(b)) {
        int order = qlora__jin_compare_mixed(qlora__jin_integer_of(b), a.as.real);
        return order == 2 ? 2 : -order;
    }
    double x = a.as.real;
    double y = b.as.real;
    return x < y ? -1 : x > y ? 1 : qlora__jin_is_nan(x) || qlora__jin_is_nan(y) ? 2 : 0;
}

static bool qlora__jin_is_any_number(qlora__jin_value v) {
    return qlora__jin_is_number(v) || v.kind == QLORA__JIN_BIG;
}

static int qlora__jin_compare_strings(const qlora__jin_string* a, const qlora__jin_string* b) {
    size_t common = a->bytes < b->bytes ? a->bytes : b->bytes;
    int order = common > 0 ? memcmp(a->data, b->data, common) : 0; // UTF-8 sorts as code points do
    return order != 0 ? order : a->bytes < b->bytes ? -1 : a->bytes > b->bytes ? 1 : 0;
}

static qlora_result qlora__jin_equal_dicts(qlora__jin_machine* m, const qlora__jin_dict* a,
                                           const qlora__jin_dict* b, bool* out) {
    *out = a->count == b->count;
    for (size_t i = 0; i < a->count && *out; i++) {
        bool found = false;
        QLORA__TRY(qlora__jin_work(m, b->count / 4));
        for (size_t k = 0; k < b->count && !found; k++) {
            QLORA__TRY(m->hooks->equal(m, a->keys[i], b->keys[k], &found));
            if (found) {
                QLORA__TRY(m->hooks->equal(m, a->values[i], b->values[k], out));
            }
        }
        *out = *out && found;
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_equal_lists(qlora__jin_machine* m, const qlora__jin_list* a,
                                           const qlora__jin_list* b, bool* out) {
    *out = a->count == b->count;
    for (size_t i = 0; i < a->count && *out; i++) {
        QLORA__TRY(m->hooks->equal(m, a->items[i], b->items[i], out));
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_equal(qlora__jin_machine* m, qlora__jin_value a, qlora__jin_value b,
                                     bool* out) {
    *out = false;
    if (qlora__jin_is_any_number(a) && qlora__jin_is_any_number(b)) {
        *out = qlora__jin_compare_numbers(a, b) == 0;
        return QLORA_OK;
    }
    if (a.kind != b.kind) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__jin_enter(m));
    switch (a.kind) {
    case QLORA__JIN_UNDEFINED:
    case QLORA__JIN_NONE:
        *out = true;
        break;
    case QLORA__JIN_STRING:
        *out = a.as.string->bytes == b.as.string->bytes &&
               qlora__jin_compare_strings(a.as.string, b.as.string) == 0;
        break;
    case QLORA__JIN_LIST:
    case QLORA__JIN_TUPLE:
        QLORA__TRY(qlora__jin_equal_lists(m, a.as.list, b.as.list, out));
        break;
    case QLORA__JIN_DICT:
        QLORA__TRY(qlora__jin_equal_dicts(m, a.as.dict, b.as.dict, out));
        break;
    case QLORA__JIN_RANGE:
        *out = a.as.range->count == b.as.range->count &&
               (a.as.range->count == 0 ||
                (a.as.range->start == b.as.range->start &&
                 (a.as.range->count == 1 || a.as.range->step == b.as.range->step)));
        break;
    case QLORA__JIN_VIEW: // of values, each is equal to itself only
        if (a.flag != 1 && b.flag != 1 && a.as.dict->count == b.as.dict->count) {
            QLORA__TRY(m->hooks->within(m, a, b, out));
        }
        break;
    default:
        *out = a.as.list == b.as.list && a.flag == b.flag;
        break;
    }
    m->depth--;
    return QLORA_OK;
}

// a < b, or a <= b.
static qlora_result qlora__jin_less(qlora__jin_machine* m, qlora__jin_value a, qlora__jin_value b,
                                    bool or_equal, bool* out) {
    QLORA__TRY(qlora__jin_work(m, 1));
    if (a.kind == QLORA__JIN_UNDEFINED || b.kind == QLORA__JIN_UNDEFINED) {
        return qlora__jin_undefined_error(m, a.kind == QLORA__JIN_UNDEFINED ? a : b);
    }
    if (qlora__jin_is_any_number(a) && qlora__jin_is_any_number(b)) {
        int order = qlora__jin_compare_numbers(a, b);
        *out = order < 0 || (order == 0 && or_equal);
        return QLORA_OK;
    }
    if (a.kind == QLORA__JIN_STRING && b.kind == QLORA__JIN_STRING) {
        int order = qlora__jin_compare_strings(a.as.string, b.as.string);
        *out = order < 0 || (order == 0 && or_equal);
        return QLORA_OK;
    }
    if (a.kind == QLORA__JIN_VIEW && b.kind == QLORA__JIN_VIEW && a.flag != 1 && b.flag != 1) {
        *out = false; // a part of the other
        bool fits = a.as.dict->count < b.as.dict->count ||
                    (or_equal && a.as.dict->count == b.as.dict->count);
        return fits ? m->hooks->within(m, a, b, out) : QLORA_OK;
    }
    if (a.kind != b.kind || (a.kind != QLORA__JIN_LIST && a.kind != QLORA__JIN_TUPLE)) {
        return qlora__jin_fail(m, "a %s and a %s cannot be ordered", qlora__jin_type(a),
                               qlora__jin_type(b));
    }
    QLORA__TRY(qlora__jin_enter(m));
    const qlora__jin_list* x = a.as.list;
    const qlora__jin_list* y = b.as.list;
    size_t i = 0;
    bool same = true;
    while (i < x->count && i < y->count && same) {
        QLORA__TRY(m->hooks->equal(m, x->items[i], y->items[i], &same));
        i += same ? 1 : 0;
    }
    if (i == x->count || i == y->count) {
        *out = x->count < y->count || (x->count == y->count && or_equal);
    } else {
        QLORA__TRY(m->hooks->less(m, x->items[i], y->items[i], or_equal, out));
    }
    m->depth--;
    return QLORA_OK;
}

// Lists, dictionaries and what contains them cannot be keys.
static bool qlora__jin_hashable(qlora__jin_value v) {
    if (v.kind == QLORA__JIN_TUPLE) {
        for (size_t i = 0; i < v.as.list->count; i++) {
            qlora__jin_kind kind = v.as.list->items[i].kind;
            if (kind == QLORA__JIN_LIST || kind == QLORA__JIN_DICT) {
                return false;
            }
        }
    }
    return v.kind != QLORA__JIN_LIST && v.kind != QLORA__JIN_DICT &&
           (v.kind != QLORA__JIN_VIEW || v.flag == 1);
}

// The place of any key in a dictionary, or the count.
static qlora_result qlora__jin_dict_find(qlora__jin_machine* m, const qlora__jin_dict* dict,
                                         qlora__jin_value key, size_t* at) {
    if (!qlora__jin_hashable(key)) {
        return qlora__jin_fail(m, "a %s cannot be the key of a dictionary", qlora__jin_type(key));
    }
    QLORA__TRY(qlora__jin_work(m, dict->count / 8));
    if (key.kind == QLORA__JIN_STRING) {
        *at = qlora__jin_dict_at(dict, key.as.string->data, key.as.string->bytes);
        return QLORA_OK;
    }
    bool same = false;
    for (*at = 0; *at < dict->count; (*at)++) {
        QLORA__TRY(qlora__jin_equal(m, dict->keys[*at], key, &same));
        if (same) {
            break;
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_dict_set(qlora__jin_machine* m, qlora__jin_dict* dict,
                                        qlora__jin_value key, qlora__jin_value value) {
    size_t at = 0;
    QLORA__TRY(qlora__jin_dict_find(m, dict, key, &at));
    if (at < dict->count) {
        dict->values[at] = value;
        return QLORA_OK;
    }
    return qlora__jin_dict_add(m, dict, key, value);
}

// ---- iteration ----------------------------------------------------------------------------------

// How an iterator makes its values from those of `source`.
enum {
    QLORA__JIN_PLAIN,
    QLORA__JIN_MAP_FILTER,
    QLORA__JIN_MAP_ATTRIBUTE,
    QLORA__JIN_SELECT, // with `attribute`, the attribute is tested
    QLORA__JIN_LAZY,   // `late` makes the whole list when the first value is asked for
    QLORA__JIN_TESTED  // the values that pass the test of a loop
};

typedef struct qlora__jin_iter {
    int how;
    qlora__jin_value source;
    size_t at;      // items, or bytes of a string
    bool backwards; // a list from its end
    struct qlora__jin_iter* inner;
    qlora__jin_value function; // the name of a filter or test; missing: truth
    qlora__jin_value attribute;
    qlora__jin_value fallback;
    bool wanted; // select keeps what is true, reject what is false
    qlora__jin_args args;
    qlora__jin_filter_fn late;
    qlora__jin_value* late_in;
    const struct qlora__jin_node* node; // of a loop with a test
    qlora__jin_record* record;
    qlora_result (*tested)(qlora__jin_machine* m, struct qlora__jin_iter* iter,
                           qlora__jin_value item, bool* out);
} qlora__jin_iter;

static bool qlora__jin_is_iterable(qlora__jin_value v) {
    switch (v.kind) {
    case QLORA__JIN_UNDEFINED:
    case QLORA__JIN_STRING:
    case QLORA__JIN_LIST:
    case QLORA__JIN_TUPLE:
    case QLORA__JIN_DICT:
    case QLORA__JIN_VIEW:
    case QLORA__JIN_RANGE:
    case QLORA__JIN_ITER:
    case QLORA__JIN_LOOP:
        return true;
    default:
        return false;
    }
}

static qlora_result qlora__jin_iter_make(qlora__jin_machine* m, qlora__jin_value source,
                                         qlora__jin_iter** out) {
    void* memory = NULL;
    if (source.kind == QLORA__JIN_ITER) {
        *out = source.as.iter;
        return QLORA_OK;
    }
    if (!qlora__jin_is_iterable(source) || source.kind == QLORA__JIN_LOOP) {
        return qlora__jin_fail(m, "a %s is not a list or anything else to loop over",
                               qlora__jin_type(source));
    }
    QLORA__TRY(qlora__jin_get(m, sizeof(qlora__jin_iter), &memory));
    memset(memory, 0, sizeof(qlora__jin_iter));
    *out = (qlora__jin_iter*)memory;
    (*out)->source = source;
    return QLORA_OK;
}

// The next value of something that is not computed.
static qlora_result qlora__jin_next_plain(qlora__jin_machine* m, qlora__jin_iter* iter,
                                          qlora__jin_value* out, bool* more) {
    qlora__jin_value source = iter->source;
    size_t at = iter->at;
    size_t step = 1;
    switch (source.kind) {
    case QLORA__JIN_LIST:
    case QLORA__JIN_TUPLE:
        *more = at < source.as.list->count;
        if (*more) {
            *out = source.as.list->items[iter->backwards ? source.as.list->count - 1 - at : at];
        }
        break;
    case QLORA__JIN_DICT:
    case QLORA__JIN_VIEW:
        *more = at < source.as.dict->count;
        if (*more && source.kind == QLORA__JIN_VIEW && source.flag == 2) {
            QLORA__TRY(
                qlora__jin_pair_make(m, source.as.dict->keys[at], source.as.dict->values[at], out));
        } else if (*more) {
            bool values = source.kind == QLORA__JIN_VIEW && source.flag == 1;
            *out = values ? source.as.dict->values[at] : source.as.dict->keys[at];
        }
        break;
    case QLORA__JIN_RANGE:
        *more = (int64_t)at < source.as.range->count;
        *out = qlora__jin_int(source.as.range->start + (int64_t)at * source.as.range->step);
        break;
    case QLORA__JIN_STRING:
        *more = at < source.as.string->bytes;
        if (*more) {
            qlora__jin_code_at(source.as.string->data, source.as.string->bytes, at, &step);
            QLORA__TRY(qlora__jin_string_share(m, source.as.string->data + at, step, out));
        }
        break;
    default:
        *more = false;
        break;
    }
    iter->at += *more ? step : 0;
    return QLORA_OK;
}

// ---- length, items, attributes ------------------------------------------------------------------

static qlora_result qlora__jin_length(qlora__jin_machine* m, qlora__jin_value v, int64_t* out) {
    switch (v.kind) {
    case QLORA__JIN_UNDEFINED:
        *out = 0;
        return QLORA_OK;
    case QLORA__JIN_STRING:
        *out = (int64_t)v.as.string->chars;
        return QLORA_OK;
    case QLORA__JIN_LIST:
    case QLORA__JIN_TUPLE:
        *out = (int64_t)v.as.list->count;
        return QLORA_OK;
    case QLORA__JIN_DICT:
    case QLORA__JIN_VIEW:
        *out = (int64_t)v.as.dict->count;
        return QLORA_OK;
    case QLORA__JIN_RANGE:
        *out = v.as.range->count;
        return QLORA_OK;
    default:
        return qlora__jin_fail(m, "a %s has no length", qlora__jin_type(v));
    }
}

// The byte at which character `index` of a string starts.
static size_t qlora__jin_byte_of(const qlora__jin_string* s, size_t index) {
    if (s->bytes == s->chars) {
        return index;
    }
    size_t at = 0;
    while (index > 0 && at < s->bytes) {
        at++;
        while (at < s->bytes && ((unsigned char)s->data[at] & 0xC0) == 0x80) {
            at++;
        }
        index--;
    }
    return at;
}

static qlora_result qlora__jin_char_at(qlora__jin_machine* m, const qlora__jin_string* s,
                                       size_t index, qlora__jin_value* out) {
    size_t step = 0;
    QLORA__TRY(qlora__jin_work(m, s->bytes == s->chars ? 0 : s->bytes / 32));
    size_t at = qlora__jin_byte_of(s, index);
    qlora__jin_code_at(s->data, s->bytes, at, &step);
    return qlora__jin_string_share(m, s->data + at, step, out);
}

// v[key] without attributes; *found is false where Python raises a TypeError or LookupError.
static qlora_result qlora__jin_item(qlora__jin_machine* m, qlora__jin_value v, qlora__jin_value key,
                                    qlora__jin_value* out, bool* found) {
    *found = false;
    if (v.kind == QLORA__JIN_DICT) {
        size_t at = 0;
        if (!qlora__jin_hashable(key)) {
            return QLORA_OK;
        }
        QLORA__TRY(qlora__jin_dict_find(m, v.as.dict, key, &at));
        *found = at < v.as.dict->count;
        *out = *found ? v.as.dict->values[at] : *out;
        return QLORA_OK;
    }
    bool sequence = v.kind == QLORA__JIN_LIST || v.kind == QLORA__JIN_TUPLE ||
                    v.kind == QLORA__JIN_STRING || v.kind == QLORA__JIN_RANGE;
    if (!sequence || !qlora__jin_is_integer(key)) {
        return QLORA_OK;
    }
    int64_t count = 0;
    int64_t index = qlora__jin_integer_of(key);
    QLORA__TRY(qlora__jin_length(m, v, &count));
    index += index < 0 ? count : 0;
    if (index < 0 || index >= count) {
        return QLORA_OK;
    }
    *found = true;
    if (v.kind == QLORA__JIN_STRING) {
        QLORA__TRY(qlora__jin_char_at(m, v.as.string, (size_t)index, out));
        out->flag = v.flag;
        return QLORA_OK;
    }
    *out = v.kind == QLORA__JIN_RANGE ? qlora__jin_int(v.as.range->start + index * v.as.range->step)
                                      : v.as.list->items[index];
    return QLORA_OK;
}

typedef struct qlora__jin_method {
    qlora__jin_value self;
    const void* found;
} qlora__jin_method;

// An attribute in Python's sense: a method, or a field of a namespace, loop or macro.
static qlora_result qlora__jin_attribute(qlora__jin_machine* m, qlora__jin_value v,
                                         const char* name, size_t size, qlora__jin_value* out,
                                         bool* found) {
    bool unsafe = false;
    const void* method = NULL;
    if (v.kind == QLORA__JIN_NAMESPACE) {
        size_t at = qlora__jin_dict_at(v.as.dict, name, size);
        *found = at < v.as.dict->count;
        *out = *found ? v.as.dict->values[at] : *out;
        return QLORA_OK;
    }
    QLORA__TRY(m->hooks->field(m, v, name, size, out, found));
    if (*found) {
        return QLORA_OK;
    }
    *found = m->hooks->method(v, name, size, &unsafe, &method);
    if (!*found) {
        return QLORA_OK;
    }
    if (unsafe) {
        return qlora__jin_undefined(m, qlora__jin_type(v), name, size, true, out);
    }
    void* memory = NULL;
    QLORA__TRY(qlora__jin_get(m, sizeof(qlora__jin_method), &memory));
    qlora__jin_method* bound = (qlora__jin_method*)memory;
    bound->self = v;
    bound->found = method;
    *out = qlora__jin_of(QLORA__JIN_METHOD);
    out->as.method = bound;
    return QLORA_OK;
}

// v[key], as a template sees it: the item, else the attribute, else undefined.
static qlora_result qlora__jin_getitem(qlora__jin_machine* m, qlora__jin_value v,
                                       qlora__jin_value key, qlora__jin_value* out) {
    bool found = false;
    if (v.kind == QLORA__JIN_UNDEFINED) {
        return qlora__jin_undefined_error(m, v);
    }
    QLORA__TRY(qlora__jin_item(m, v, key, out, &found));
    if (found) {
        return QLORA_OK;
    }
    if (key.kind == QLORA__JIN_STRING) {
        const qlora__jin_string* name = key.as.string;
        QLORA__TRY(qlora__jin_attribute(m, v, name->data, name->bytes, out, &found));
        return found ? QLORA_OK
                     : qlora__jin_undefined(m, qlora__jin_type(v), name->data, name->bytes, false,
                                            out);
    }
    qlora__jin_buffer text;
    memset(&text, 0, sizeof text);
    if (key.kind == QLORA__JIN_INT) {
        QLORA__TRY(qlora__jin_repr(m, key, &text));
    }
    return qlora__jin_undefined(m, qlora__jin_type(v), text.data, text.count, false, out);
}

// v.name: the attribute, else the item, else undefined.
static qlora_result qlora__jin_getattr(qlora__jin_machine* m, qlora__jin_value v, const char* name,
                                       size_t size, qlora__jin_value* out) {
    bool found = false;
    if (v.kind == QLORA__JIN_UNDEFINED) {
        bool dunder =
            size > 3 && memcmp(name, "__", 2) == 0 && memcmp(name + size - 2, "__", 2) == 0;
        return dunder ? qlora__jin_undefined(m, qlora__jin_type(v), name, size, true, out)
                      : qlora__jin_undefined_error(m, v);
    }
    QLORA__TRY(qlora__jin_attribute(m, v, name, size, out, &found));
    if (found) {
        return QLORA_OK;
    }
    if (v.kind == QLORA__JIN_DICT) {
        size_t at = qlora__jin_dict_at(v.as.dict, name, size);
        QLORA__TRY(qlora__jin_work(m, v.as.dict->count / 8));
        if (at < v.as.dict->count) {
            *out = v.as.dict->values[at];
            return QLORA_OK;
        }
    }
    return qlora__jin_undefined(m, qlora__jin_type(v), name, size, false, out);
}
