// Operators: arithmetic, concatenation, repetition, slices, membership.

static qlora_result qlora__jin_too_big(qlora__jin_machine* m) {
    return qlora__jin_fail(m, "an integer does not fit 64 bits");
}

static qlora_result qlora__jin_truncate_double(qlora__jin_machine* m, double x,
                                               qlora__jin_value* out) {
    if (!(x > -9223372036854775808.0 && x < 9223372036854775808.0)) {
        return qlora__jin_too_big(m);
    }
    *out = qlora__jin_int((int64_t)x);
    return QLORA_OK;
}

// The largest whole number that is not above x.
static double qlora__jin_floor(double x) {
    if (x >= 4503599627370496.0 || x <= -4503599627370496.0 || qlora__jin_is_nan(x)) {
        return x; // 2 to the 52: no fraction is left
    }
    double whole = (double)(int64_t)x;
    return whole > x ? whole - 1.0 : whole;
}

static bool qlora__jin_is_zero(double x) {
    return x <= 0.0 && x >= 0.0;
}

static bool qlora__jin_has_minus(double x) {
    uint64_t bits = 0;
    memcpy(&bits, &x, sizeof bits);
    return (bits >> 63) != 0;
}

static bool qlora__jin_is_finite(double x) {
    return x - x <= 0.0;
}

static bool qlora__jin_multiply(int64_t a, int64_t b, int64_t* out) {
    if (a != 0 && b != 0) {
        bool same = (a < 0) == (b < 0);
        uint64_t x = a < 0 ? 0 - (uint64_t)a : (uint64_t)a;
        uint64_t y = b < 0 ? 0 - (uint64_t)b : (uint64_t)b;
        uint64_t limit = same ? (uint64_t)INT64_MAX : (uint64_t)INT64_MAX + 1;
        if (x > limit / y) {
            return false;
        }
        uint64_t product = x * y;
        *out = same ? (int64_t)product : (int64_t)(0 - product);
        return true;
    }
    *out = 0;
    return true;
}

static bool qlora__jin_add_integers(int64_t a, int64_t b, int64_t* out) {
    if ((b > 0 && a > INT64_MAX - b) || (b < 0 && a < INT64_MIN - b)) {
        return false;
    }
    *out = a + b;
    return true;
}

// A number of twice the precision, high + low, whose high part is from a half to below one in size,
// times two to the power of `exponent`.
typedef struct qlora__jin_wide {
    double high;
    double low;
    int64_t exponent;
} qlora__jin_wide;

static void qlora__jin_wide_scale(qlora__jin_wide* x) {
    uint64_t bits = 0;
    memcpy(&bits, &x->high, sizeof bits);
    int64_t shift = (int64_t)(bits >> 52 & 0x7FF) - 1022;
    double factor = 1.0;
    for (int64_t i = 0; i < (shift < 0 ? -shift : shift); i++) {
        factor *= shift < 0 ? 2.0 : 0.5;
    }
    x->high *= factor;
    x->low *= factor;
    x->exponent += shift;
}

static qlora__jin_wide qlora__jin_wide_multiply(qlora__jin_wide a, qlora__jin_wide b) {
    qlora__jin_wide out;
    // halves of 26 bits, whose products are exact
    double split = a.high * 134217729.0;
    double a_high = split - (split - a.high);
    double a_low = a.high - a_high;
    split = b.high * 134217729.0;
    double b_high = split - (split - b.high);
    double b_low = b.high - b_high;
    double product = a.high * b.high;
    double rest = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low;
    rest += a.high * b.low + a.low * b.high;
    out.high = product + rest;
    out.low = rest - (out.high - product);
    out.exponent = a.exponent + b.exponent;
    qlora__jin_wide_scale(&out);
    return out;
}

// base to the power of times, for a base that is finite and not zero. Without pow(), so that
// nothing needs to be linked; twice the precision, so that the result is rounded as well as there.
static double qlora__jin_power_of(double base, int64_t times) {
    qlora__jin_wide square;
    qlora__jin_wide result;
    uint64_t left = times < 0 ? 0 - (uint64_t)times : (uint64_t)times;
    memset(&square, 0, sizeof square);
    result = square;
    bool tiny = base < 1e-300 && base > -1e-300; // may have leading zeros
    square.high = tiny ? base * 18014398509481984.0 : base;
    square.exponent = tiny ? -54 : 0;
    qlora__jin_wide_scale(&square);
    result.high = 0.5;
    result.exponent = 1;
    for (; left > 0; left >>= 1) {
        if ((left & 1) != 0) {
            result = qlora__jin_wide_multiply(result, square);
        }
        square = qlora__jin_wide_multiply(square, square);
    }
    if (times < 0) {
        qlora__jin_wide whole = result;
        qlora__jin_wide guess;
        memset(&guess, 0, sizeof guess);
        guess.high = 1.0 / result.high;
        qlora__jin_wide product = qlora__jin_wide_multiply(guess, whole);
        double scale = product.exponent - whole.exponent == 1 ? 2.0 : 1.0;
        double error = (1.0 - product.high * scale) - product.low * scale;
        result.high = guess.high + error / whole.high;
        result.exponent = -whole.exponent;
    }
    double out = result.high;
    int64_t exponent = result.exponent;
    for (; exponent > 0 && qlora__jin_is_finite(out); exponent--) {
        out *= 2.0;
    }
    // in two steps, because only the last one may round
    for (; exponent < -1000; exponent += 1) {
        out *= 0.5;
    }
    double factor = 1.0;
    for (; exponent < 0; exponent++) {
        factor *= 0.5;
    }
    return out * factor;
}

static qlora_result qlora__jin_power(qlora__jin_machine* m, qlora__jin_value a, qlora__jin_value b,
                                     qlora__jin_value* out) {
    if (!qlora__jin_is_integer(b)) {
        double whole = qlora__jin_floor(b.as.real);
        if (whole < b.as.real || !(whole <= 1024.0 && whole >= -1024.0)) {
            return qlora__jin_fail(m, "a power whose exponent is not a whole number from -1024 to "
                                      "1024 is not supported");
        }
    }
    int64_t times = qlora__jin_is_integer(b) ? qlora__jin_integer_of(b) : (int64_t)b.as.real;
    if (qlora__jin_is_integer(a) && qlora__jin_is_integer(b) && times >= 0) {
        int64_t base = qlora__jin_integer_of(a);
        int64_t result = 1;
        for (int64_t i = 0; i < times && !((base == 0 || base == 1) && i > 0); i++) {
            QLORA__TRY(qlora__jin_work(m, 1));
            if (!qlora__jin_multiply(result, base, &result)) {
                return qlora__jin_too_big(m);
            }
        }
        *out = qlora__jin_int(result);
        return QLORA_OK;
    }
    double base = qlora__jin_real_of(a);
    bool finite = qlora__jin_is_finite(base);
    if (qlora__jin_is_zero(base) && times < 0) {
        return qlora__jin_fail(m, "division by zero");
    }
    if (times > 1024 || times < -1024) {
        return qlora__jin_fail(m, "a power whose exponent is not a whole number from -1024 to 1024 "
                                  "is not supported");
    }
    if (!finite || qlora__jin_is_zero(base) || times == 0) {
        double result = 1.0;
        for (int64_t i = 0; i < (times < 0 ? -times : times); i++) {
            result *= base;
        }
        *out = qlora__jin_float(times < 0 ? 1.0 / result : result);
        return QLORA_OK;
    }
    double result = qlora__jin_power_of(base, times);
    *out = qlora__jin_float(result);
    return qlora__jin_is_finite(result) ? QLORA_OK : qlora__jin_fail(m, "a power is too large");
}

// What is left of x when y is taken from it as often as possible; x is not negative, y above zero.
// Each subtraction is exact.
static double qlora__jin_remainder(double x, double y) {
    double step = y;
    while (step <= x / 2.0) {
        step *= 2.0;
    }
    for (; x >= y; step /= 2.0) {
        x -= x >= step ? step : 0.0;
    }
    return x;
}

// x // y and x % y of floats, as Python computes them.
static void qlora__jin_divide_floats(double x, double y, double* quotient, double* rest) {
    bool finite = qlora__jin_is_finite(x) && !qlora__jin_is_nan(y);
    double size = y < 0.0 ? -y : y;
    double left = x;
    if (finite && qlora__jin_is_finite(size)) {
        left = qlora__jin_remainder(x < 0.0 ? -x : x, size);
        left = x < 0.0 ? -left : left;
    }
    left = finite ? left : x - x + (y - y);
    double whole = (x - left) / y;
    if (left < 0.0 || left > 0.0) {
        bool other = (left < 0.0) != (y < 0.0);
        left += other ? y : 0.0;
        whole -= other ? 1.0 : 0.0;
    } else if (finite) {
        left = y < 0.0 ? -0.0 : 0.0;
    }
    double below = qlora__jin_floor(whole);
    below += whole - below > 0.5 ? 1.0 : 0.0;
    bool zero = qlora__jin_is_zero(whole);
    bool minus = qlora__jin_has_minus(x) != qlora__jin_has_minus(y);
    *quotient = zero ? (minus ? -0.0 : 0.0) : below;
    *rest = left;
}

// p / q as a double that is rounded once, where the numbers themselves need more than its 53 bits.
static double qlora__jin_divide_integers(int64_t p, int64_t q) {
    uint64_t x = p < 0 ? 0 - (uint64_t)p : (uint64_t)p;
    uint64_t y = q < 0 ? 0 - (uint64_t)q : (uint64_t)q;
    uint64_t limit = (uint64_t)1 << 53;
    if ((x <= limit && y <= limit) || x == 0) {
        return (double)p / (double)q;
    }
    uint64_t quotient = x / y;
    uint64_t rest = x % y; // below 2 to the 63, so that it can be doubled
    double scale = 1.0;
    while (quotient >> 62 == 0) {
        rest *= 2;
        quotient = quotient * 2 + (rest >= y ? 1 : 0);
        rest -= rest >= y ? y : 0;
        scale *= 0.5;
    }
    double result = (double)(quotient | (rest != 0 ? 1 : 0)) * scale;
    return (p < 0) != (q < 0) ? -result : result;
}

static qlora_result qlora__jin_divide(qlora__jin_machine* m, char op, qlora__jin_value a,
                                      qlora__jin_value b, qlora__jin_value* out) {
    double x = qlora__jin_real_of(a);
    double y = qlora__jin_real_of(b);
    if (qlora__jin_is_zero(y)) {
        return qlora__jin_fail(m, "division by zero");
    }
    if (op == '/') {
        bool whole = qlora__jin_is_integer(a) && qlora__jin_is_integer(b);
        *out = qlora__jin_float(
            whole ? qlora__jin_divide_integers(qlora__jin_integer_of(a), qlora__jin_integer_of(b))
                  : x / y);
        return QLORA_OK;
    }
    if (qlora__jin_is_integer(a) && qlora__jin_is_integer(b)) {
        int64_t p = qlora__jin_integer_of(a);
        int64_t q = qlora__jin_integer_of(b);
        if (q == -1) { // the one quotient that can overflow
            if (p == INT64_MIN) {
                return qlora__jin_too_big(m);
            }
            *out = qlora__jin_int(op == 'f' ? -p : 0);
            return QLORA_OK;
        }
        int64_t quotient = p / q;
        int64_t rest = p % q;
        bool below = rest != 0 && (rest < 0) != (q < 0);
        *out = qlora__jin_int(op == 'f' ? quotient - (below ? 1 : 0) : rest + (below ? q : 0));
        return QLORA_OK;
    }
    double quotient = 0.0;
    double rest = 0.0;
    qlora__jin_divide_floats(x, y, &quotient, &rest);
    *out = qlora__jin_float(op == 'f' ? quotient : rest);
    return QLORA_OK;
}

// + - * on numbers
static qlora_result qlora__jin_arithmetic(qlora__jin_machine* m, char op, qlora__jin_value a,
                                          qlora__jin_value b, qlora__jin_value* out) {
    if (qlora__jin_is_integer(a) && qlora__jin_is_integer(b)) {
        int64_t x = qlora__jin_integer_of(a);
        int64_t y = qlora__jin_integer_of(b);
        int64_t result = 0;
        bool fits = op == '*' ? qlora__jin_multiply(x, y, &result)
                    : op == '-' && y == INT64_MIN
                        ? false
                        : qlora__jin_add_integers(x, op == '-' ? -y : y, &result);
        *out = qlora__jin_int(result);
        return fits ? QLORA_OK : qlora__jin_too_big(m);
    }
    double x = qlora__jin_real_of(a);
    double y = qlora__jin_real_of(b);
    *out = qlora__jin_float(op == '+' ? x + y : op == '-' ? x - y : x * y);
    return QLORA_OK;
}

// ---- strings and lists

// Markup: & < > ' " become entities.
static qlora_result qlora__jin_escape_html(qlora__jin_machine* m, qlora__jin_value v,
                                           qlora__jin_buffer* out) {
    static const char* const entities[] = {"&amp;", "&lt;", "&gt;", "&#39;", "&#34;"};
    static const char marks[] = "&<>'\"";
    qlora__jin_value text;
    QLORA__TRY(qlora__jin_text(m, v, &text));
    const qlora__jin_string* s = text.as.string;
    if (text.flag != 0) {
        return qlora__jin_put(m, out, s->data, s->bytes);
    }
    for (size_t i = 0; i < s->bytes; i++) {
        const char* mark = s->data[i] != '\0' ? strchr(marks, s->data[i]) : NULL;
        QLORA__TRY(mark != NULL ? qlora__jin_puts(m, out, entities[mark - marks])
                                : qlora__jin_put(m, out, s->data + i, 1));
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_join_strings(qlora__jin_machine* m, qlora__jin_value a,
                                            qlora__jin_value b, qlora__jin_value* out) {
    qlora__jin_buffer buffer;
    memset(&buffer, 0, sizeof buffer);
    bool markup = a.flag != 0 || b.flag != 0;
    if (markup) {
        QLORA__TRY(qlora__jin_escape_html(m, a, &buffer));
        QLORA__TRY(qlora__jin_escape_html(m, b, &buffer));
    } else {
        QLORA__TRY(qlora__jin_buffer_room(m, &buffer, a.as.string->bytes + b.as.string->bytes));
        QLORA__TRY(qlora__jin_print(m, a, &buffer));
        QLORA__TRY(qlora__jin_print(m, b, &buffer));
    }
    QLORA__TRY(qlora__jin_buffer_string(m, &buffer, out));
    out->flag = markup ? 1 : 0;
    return QLORA_OK;
}

static qlora_result qlora__jin_repeat(qlora__jin_machine* m, qlora__jin_value v, int64_t times,
                                      qlora__jin_value* out) {
    times = times < 0 ? 0 : times;
    if (v.kind == QLORA__JIN_STRING) {
        const qlora__jin_string* s = v.as.string;
        qlora__jin_buffer buffer;
        memset(&buffer, 0, sizeof buffer);
        for (int64_t i = 0; i < times && s->bytes > 0; i++) {
            QLORA__TRY(qlora__jin_work(m, 1));
            QLORA__TRY(qlora__jin_put(m, &buffer, s->data, s->bytes));
        }
        QLORA__TRY(qlora__jin_buffer_string(m, &buffer, out));
        out->flag = v.flag;
        return QLORA_OK;
    }
    const qlora__jin_list* list = v.as.list;
    QLORA__TRY(qlora__jin_list_make(m, v.kind, 0, out));
    for (int64_t i = 0; i < times && list->count > 0; i++) {
        for (size_t k = 0; k < list->count; k++) {
            QLORA__TRY(qlora__jin_list_add(m, out->as.list, list->items[k]));
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_append_lists(qlora__jin_machine* m, qlora__jin_value a,
                                            qlora__jin_value b, qlora__jin_value* out) {
    size_t first = a.as.list->count;
    size_t second = b.as.list->count;
    QLORA__TRY(qlora__jin_work(m, (first + second) / 4));
    QLORA__TRY(qlora__jin_list_make(m, a.kind, first + second, out));
    qlora__jin_list* list = out->as.list;
    if (first > 0) {
        memcpy(list->items, a.as.list->items, first * sizeof(qlora__jin_value));
    }
    if (second > 0) {
        memcpy(list->items + first, b.as.list->items, second * sizeof(qlora__jin_value));
    }
    list->count = first + second;
    return QLORA_OK;
}

static bool qlora__jin_is_sequence(qlora__jin_value v) {
    return v.kind == QLORA__JIN_STRING || v.kind == QLORA__JIN_LIST || v.kind == QLORA__JIN_TUPLE;
}

// Whether a view takes part in a difference: keys and items with whatever can be iterated, a set
// with another one only.
static bool qlora__jin_subtracts(qlora__jin_value view, qlora__jin_value other) {
    bool set = other.kind == QLORA__JIN_VIEW && other.flag == 3;
    return view.kind == QLORA__JIN_VIEW && view.flag != 1 &&
           (view.flag != 3 || set || (other.kind == QLORA__JIN_VIEW && other.flag != 1));
}

// Adds what can be iterated to a set, except what is in `without`, which may be NULL.
static qlora_result qlora__jin_set_add(qlora__jin_machine* m, qlora__jin_dict* set,
                                       qlora__jin_value from, const qlora__jin_dict* without) {
    qlora__jin_iter* iter = NULL;
    if (!qlora__jin_is_iterable(from)) {
        return qlora__jin_fail(m, "a %s cannot be made a set", qlora__jin_type(from));
    }
    QLORA__TRY(qlora__jin_iter_make(m, from, &iter));
    for (;;) {
        qlora__jin_value item;
        bool more = true;
        size_t at = 0;
        QLORA__TRY(m->hooks->next(m, iter, &item, &more));
        if (!more) {
            return QLORA_OK;
        }
        if (without != NULL) {
            QLORA__TRY(qlora__jin_dict_find(m, without, item, &at));
        }
        if (without == NULL || at == without->count) {
            QLORA__TRY(qlora__jin_dict_set(m, set, item, qlora__jin_none()));
        }
    }
}

// a - b as sets. The order is that of a; in Python it can be any.
static qlora_result qlora__jin_difference(qlora__jin_machine* m, qlora__jin_value a,
                                          qlora__jin_value b, qlora__jin_value* out) {
    qlora__jin_value without;
    QLORA__TRY(qlora__jin_dict_make(m, QLORA__JIN_DICT, 0, &without));
    QLORA__TRY(qlora__jin_set_add(m, without.as.dict, b, NULL));
    QLORA__TRY(qlora__jin_dict_make(m, QLORA__JIN_DICT, 0, out));
    QLORA__TRY(qlora__jin_set_add(m, out->as.dict, a, without.as.dict));
    out->kind = QLORA__JIN_VIEW;
    out->flag = 3;
    return QLORA_OK;
}

// a op b, where op is + - * / f (//) % p (**). % on a string is for the caller.
static qlora_result qlora__jin_binary(qlora__jin_machine* m, char op, qlora__jin_value a,
                                      qlora__jin_value b, qlora__jin_value* out) {
    if (a.kind == QLORA__JIN_UNDEFINED || b.kind == QLORA__JIN_UNDEFINED) {
        return qlora__jin_undefined_error(m, a.kind == QLORA__JIN_UNDEFINED ? a : b);
    }
    if (qlora__jin_is_number(a) && qlora__jin_is_number(b)) {
        return op == 'p'                             ? qlora__jin_power(m, a, b, out)
               : op == '/' || op == 'f' || op == '%' ? qlora__jin_divide(m, op, a, b, out)
                                                     : qlora__jin_arithmetic(m, op, a, b, out);
    }
    if (a.kind == QLORA__JIN_BIG || b.kind == QLORA__JIN_BIG) {
        return qlora__jin_too_big(m);
    }
    if (op == '+' && a.kind == b.kind && qlora__jin_is_sequence(a)) {
        return a.kind == QLORA__JIN_STRING ? qlora__jin_join_strings(m, a, b, out)
                                           : qlora__jin_append_lists(m, a, b, out);
    }
    if (op == '*' && qlora__jin_is_sequence(a) && qlora__jin_is_integer(b)) {
        return qlora__jin_repeat(m, a, qlora__jin_integer_of(b), out);
    }
    if (op == '*' && qlora__jin_is_sequence(b) && qlora__jin_is_integer(a)) {
        return qlora__jin_repeat(m, b, qlora__jin_integer_of(a), out);
    }
    if (op == '-' && (qlora__jin_subtracts(a, b) || qlora__jin_subtracts(b, a))) {
        return qlora__jin_difference(m, a, b, out);
    }
    char name[3] = {op, '\0', '\0'};
    if (op == 'f' || op == 'p') {
        name[0] = op == 'f' ? '/' : '*';
        name[1] = name[0];
    }
    return qlora__jin_fail(m, "a %s %s a %s is not possible", qlora__jin_type(a), name,
                           qlora__jin_type(b));
}

// ---- slices

// One end of a slice, as Python limits it.
static int64_t qlora__jin_slice_end(qlora__jin_value end, int64_t count, bool backwards,
                                    bool start) {
    if (end.kind == QLORA__JIN_NONE || end.kind == QLORA__JIN_MISSING) {
        return start == backwards ? (backwards ? count - 1 : count) : (backwards ? -1 : 0);
    }
    int64_t at = qlora__jin_integer_of(end);
    at += at < 0 ? count : 0;
    int64_t low = backwards ? -1 : 0;
    int64_t high = backwards ? count - 1 : count;
    return at < low ? low : at > high ? high : at;
}

static qlora_result qlora__jin_slice_string(qlora__jin_machine* m, qlora__jin_value v,
                                            int64_t start, int64_t stop, int64_t step,
                                            qlora__jin_value* out) {
    const qlora__jin_string* s = v.as.string;
    qlora__jin_buffer buffer;
    memset(&buffer, 0, sizeof buffer);
    QLORA__TRY(qlora__jin_work(m, s->bytes / 32));
    if (step == 1) {
        size_t begin = qlora__jin_byte_of(s, (size_t)start);
        size_t end = stop > start ? qlora__jin_byte_of(s, (size_t)stop) : begin;
        QLORA__TRY(qlora__jin_string_share(m, s->data + begin, end - begin, out));
        out->flag = v.flag;
        return QLORA_OK;
    }
    for (int64_t i = start; step > 0 ? i < stop : i > stop; i += step) {
        size_t size = 0;
        QLORA__TRY(qlora__jin_work(m, s->bytes == s->chars ? 1 : 1 + s->bytes / 32));
        size_t at = qlora__jin_byte_of(s, (size_t)i);
        qlora__jin_code_at(s->data, s->bytes, at, &size);
        QLORA__TRY(qlora__jin_put(m, &buffer, s->data + at, size));
        if (step > 0 ? i > INT64_MAX - step : i < INT64_MIN - step) {
            break;
        }
    }
    QLORA__TRY(qlora__jin_buffer_string(m, &buffer, out));
    out->flag = v.flag;
    return QLORA_OK;
}

static qlora_result qlora__jin_range_make(qlora__jin_machine* m, int64_t start, int64_t stop,
                                          int64_t step, qlora__jin_value* out) {
    void* memory = NULL;
    QLORA__TRY(qlora__jin_get(m, sizeof(qlora__jin_range), &memory));
    qlora__jin_range* range = (qlora__jin_range*)memory;
    range->start = start;
    range->stop = stop;
    range->step = step;
    range->count = 0;
    // unsigned, because the distance may be more than an int64_t holds
    uint64_t way = step > 0 ? (uint64_t)stop - (uint64_t)start : (uint64_t)start - (uint64_t)stop;
    uint64_t stride = step > 0 ? (uint64_t)step : 0 - (uint64_t)step;
    if (step > 0 ? start < stop : start > stop) {
        uint64_t count = (way - 1) / stride + 1;
        if (count > QLORA__JIN_MAX_RANGE) {
            return qlora__jin_fail(m, "a range of %llu numbers; the sandbox allows %d",
                                   (unsigned long long)count, (int)QLORA__JIN_MAX_RANGE);
        }
        range->count = (int64_t)count;
    }
    *out = qlora__jin_of(QLORA__JIN_RANGE);
    out->as.range = range;
    return QLORA_OK;
}

// v[start:stop:step]; missing parts are of kind MISSING or NONE. *found is false where Python
// raises a TypeError.
static qlora_result qlora__jin_slice(qlora__jin_machine* m, qlora__jin_value v,
                                     const qlora__jin_value parts[3], qlora__jin_value* out,
                                     bool* found) {
    int64_t count = 0;
    *found = qlora__jin_is_sequence(v) || v.kind == QLORA__JIN_RANGE;
    for (int i = 0; i < 3; i++) {
        *found = *found && (parts[i].kind == QLORA__JIN_MISSING ||
                            parts[i].kind == QLORA__JIN_NONE || qlora__jin_is_integer(parts[i]));
    }
    if (!*found) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__jin_length(m, v, &count));
    int64_t step = qlora__jin_is_integer(parts[2]) ? qlora__jin_integer_of(parts[2]) : 1;
    if (step == 0) {
        return qlora__jin_fail(m, "the step of a slice is zero");
    }
    step = step > INT32_MAX ? INT32_MAX : step < -INT32_MAX ? -INT32_MAX : step;
    int64_t start = qlora__jin_slice_end(parts[0], count, step < 0, true);
    int64_t stop = qlora__jin_slice_end(parts[1], count, step < 0, false);
    if (v.kind == QLORA__JIN_STRING) {
        return qlora__jin_slice_string(m, v, start, stop, step, out);
    }
    if (v.kind == QLORA__JIN_RANGE) {
        const qlora__jin_range* r = v.as.range;
        return qlora__jin_range_make(m, r->start + start * r->step, r->start + stop * r->step,
                                     r->step * step, out);
    }
    QLORA__TRY(qlora__jin_list_make(m, v.kind, 0, out));
    for (int64_t i = start; step > 0 ? i < stop : i > stop; i += step) {
        QLORA__TRY(qlora__jin_list_add(m, out->as.list, v.as.list->items[i]));
    }
    return QLORA_OK;
}

// ---- membership

enum { QLORA__JIN_LONG = 64 };

static size_t qlora__jin_find_short(const char* data, size_t size, size_t from, const char* part,
                                    size_t length) {
    while (from < size && size - from >= length) {
        const char* hit = (const char*)memchr(data + from, part[0], size - from - length + 1);
        if (hit == NULL) {
            return SIZE_MAX;
        }
        from = (size_t)(hit - data);
        if (memcmp(hit, part, length) == 0) {
            return from;
        }
        from++;
    }
    return SIZE_MAX;
}

// A long part is compared only where a hash of as many bytes, which moves along s[begin..end), is
// equal: otherwise a text of equal letters would take time by the product of both lengths. Finds
// the first place or, backwards, the last one.
static size_t qlora__jin_find_long(const char* data, size_t begin, size_t end, const char* part,
                                   size_t length, bool backwards) {
    const uint64_t base = 0x9e3779b97f4a7c15u;
    uint64_t wanted = 0;
    uint64_t here = 0;
    uint64_t top = 1; // base to the power of the length, for the byte that leaves
    if (begin > end || end - begin < length) {
        return SIZE_MAX;
    }
    for (size_t i = 0; i < length; i++) {
        wanted = wanted * base + (unsigned char)part[backwards ? length - 1 - i : i];
        here = here * base + (unsigned char)data[backwards ? end - 1 - i : begin + i];
        top *= base;
    }
    for (size_t moved = 0;; moved++) {
        size_t at = backwards ? end - moved - length : begin + moved;
        if (here == wanted && memcmp(data + at, part, length) == 0) {
            return at;
        }
        if (moved == end - begin - length) {
            return SIZE_MAX;
        }
        unsigned char comes = (unsigned char)data[backwards ? at - 1 : at + length];
        unsigned char leaves = (unsigned char)data[backwards ? at + length - 1 : at];
        here = here * base + comes - top * leaves;
    }
}

// Where `part` starts in s at or after `from`, in bytes; SIZE_MAX when it is not there.
static size_t qlora__jin_find_bytes(const char* data, size_t size, size_t from, const char* part,
                                    size_t length) {
    return length == 0                ? from
           : length < QLORA__JIN_LONG ? qlora__jin_find_short(data, size, from, part, length)
                                      : qlora__jin_find_long(data, from, size, part, length, false);
}

// item in v
static qlora_result qlora__jin_contains(qlora__jin_machine* m, qlora__jin_value v,
                                        qlora__jin_value item, bool* out) {
    qlora__jin_iter* iter = NULL;
    qlora__jin_value next;
    bool more = true;
    *out = false;
    if (v.kind == QLORA__JIN_STRING) {
        if (item.kind != QLORA__JIN_STRING) {
            return item.kind == QLORA__JIN_UNDEFINED
                       ? qlora__jin_fail(m, "an undefined value cannot be in a string")
                       : qlora__jin_fail(m, "a %s cannot be in a string", qlora__jin_type(item));
        }
        const qlora__jin_string* s = v.as.string;
        QLORA__TRY(qlora__jin_work(m, s->bytes / 16));
        *out = qlora__jin_find_bytes(s->data, s->bytes, 0, item.as.string->data,
                                     item.as.string->bytes) != SIZE_MAX;
        return QLORA_OK;
    }
    if (v.kind == QLORA__JIN_DICT || (v.kind == QLORA__JIN_VIEW && (v.flag == 0 || v.flag == 3))) {
        size_t at = v.as.dict->count;
        if (v.flag != 3 || item.kind != QLORA__JIN_VIEW || item.flag != 3) { // a set is in no set
            QLORA__TRY(qlora__jin_dict_find(m, v.as.dict, item, &at));
        }
        *out = at < v.as.dict->count;
        return QLORA_OK;
    }
    if (!qlora__jin_is_iterable(v)) {
        return qlora__jin_fail(m, "a %s contains nothing: \"in\" is not possible",
                               qlora__jin_type(v));
    }
    QLORA__TRY(qlora__jin_iter_make(m, v, &iter));
    while (!*out) {
        QLORA__TRY(m->hooks->next(m, iter, &next, &more));
        if (!more) {
            break;
        }
        QLORA__TRY(qlora__jin_equal(m, next, item, out));
    }
    return QLORA_OK;
}

// Whether every item of one view is in another.
static qlora_result qlora__jin_within(qlora__jin_machine* m, qlora__jin_value a, qlora__jin_value b,
                                      bool* out) {
    qlora__jin_iter* iter = NULL;
    *out = true;
    QLORA__TRY(qlora__jin_iter_make(m, a, &iter));
    while (*out) {
        qlora__jin_value item;
        bool more = true;
        QLORA__TRY(m->hooks->next(m, iter, &item, &more));
        if (!more) {
            break;
        }
        QLORA__TRY(qlora__jin_contains(m, b, item, out));
    }
    return QLORA_OK;
}
