// Filters of numbers: abs, float, int, round and filesizeformat.

QLORA__JIN_FILTER(abs) {
    if (!qlora__jin_is_number(in[0])) {
        return qlora__jin_fail(m, "abs: a number is needed, not a %s", qlora__jin_type(in[0]));
    }
    if (in[0].kind == QLORA__JIN_FLOAT) {
        *out = qlora__jin_float(in[0].as.real < 0.0 || qlora__jin_is_zero(in[0].as.real)
                                    ? 0.0 - in[0].as.real
                                    : in[0].as.real);
        return QLORA_OK;
    }
    int64_t x = qlora__jin_integer_of(in[0]);
    *out = qlora__jin_int(x < 0 && x > INT64_MIN ? -x : x);
    return x == INT64_MIN ? qlora__jin_too_big(m) : QLORA_OK;
}

// The text of a number without spaces around it, and with ASCII digits for those of other scripts.
// *size is 0 when there is none.
static qlora_result qlora__jin_number_text(qlora__jin_machine* m, const qlora__jin_string* s,
                                           char* out, size_t room, size_t* size) {
    size_t at = qlora__jin_skip_space(s->data, s->bytes, 0);
    size_t end = qlora__jin_back_space(s->data, at, s->bytes);
    *size = 0;
    for (size_t step = 0; at < end; at += step) {
        uint32_t code = qlora__jin_code_at(s->data, end, at, &step);
        uint32_t zero = code;
        for (size_t i = 0; code >= 0x80 && i < QLORA__TEXT_COUNT(qlora__text_decimal_runs); i++) {
            bool inside = qlora__text_decimal_runs[i].first <= code &&
                          code <= qlora__text_decimal_runs[i].last;
            zero = inside ? qlora__text_decimal_runs[i].first : zero;
        }
        bool full = *size + 1 >= room;
        bool digit = qlora__jin_is_decimal(code) || code == '_';
        if ((code >= 0x80 || full) && !digit) {
            *size = 0;
            return QLORA_OK;
        }
        out[*size] = (char)(code >= 0x80 ? '0' + (code - zero) % 10 : code);
        *size += full ? 0 : 1;
    }
    return *size + 1 < room ? QLORA_OK : qlora__jin_too_big(m);
}

static int64_t qlora__jin_digit_value(char c) {
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'z' ? c - 'a' + 10
           : c >= 'A' && c <= 'Z' ? c - 'A' + 10
                                  : 99;
}

// int(text, base): false when it is none. *big: it does not fit 64 bits.
static bool qlora__jin_read_whole(const char* text, size_t size, int64_t base, int64_t* out,
                                  bool* big) {
    size_t at = size > 0 && (text[0] == '-' || text[0] == '+') ? 1 : 0;
    bool minus = at > 0 && text[0] == '-';
    char letter = at + 1 < size && text[at] == '0' ? (char)(text[at + 1] | 0x20) : '\0';
    int64_t meant = letter == 'x' ? 16 : letter == 'o' ? 8 : letter == 'b' ? 2 : 0;
    bool prefix = meant != 0 && (base == 0 || base == meant);
    bool plain = base == 0 && !prefix; // then a number has no leading zeros
    uint64_t value = 0;
    bool digit = false;
    at += prefix ? 2 : 0;
    at += prefix && at < size && text[at] == '_' ? 1 : 0;
    base = base == 0 ? (prefix ? meant : 10) : base;
    bool zero = at < size && text[at] == '0';
    if (base < 2 || base > 36) {
        return false;
    }
    for (; at < size; at++) {
        int64_t next = qlora__jin_digit_value(text[at]);
        if (text[at] == '_' && digit && at + 1 < size && text[at + 1] != '_') {
            continue;
        }
        if (next >= base) {
            return false;
        }
        *big = *big || value > (INT64_MAX - (uint64_t)next) / (uint64_t)base;
        value = value * (uint64_t)base + (uint64_t)next;
        digit = true;
    }
    *out = minus ? -(int64_t)(value & INT64_MAX) : (int64_t)(value & INT64_MAX);
    return digit && !(plain && zero && (value != 0 || *big));
}

// float(text): false when it is none.
static bool qlora__jin_read_real(const char* text, size_t size, double* out) {
    static const char* const words[] = {"inf", "infinity", "nan"};
    size_t at = size > 0 && (text[0] == '-' || text[0] == '+') ? 1 : 0;
    bool minus = at > 0 && text[0] == '-';
    char digits[1100];
    size_t count = 0;
    bool digit = false;
    bool point = false;
    bool power = false;
    for (size_t i = 0; i < QLORA__TEXT_COUNT(words); i++) {
        size_t k = 0;
        while (at + k < size && (text[at + k] | 0x20) == words[i][k] && words[i][k] != '\0') {
            k++;
        }
        if (at + k == size && words[i][k] == '\0') {
            const uint64_t bits = (uint64_t)0x7FF << 52;
            double infinite = 0.0;
            memcpy(&infinite, &bits, sizeof infinite);
            *out = i == 2 ? infinite - infinite : minus ? -infinite : infinite;
            return true;
        }
    }
    for (; at < size && count + 4 < sizeof digits; at++) {
        char c = text[at];
        bool number = c >= '0' && c <= '9';
        bool after = at + 1 < size && text[at + 1] >= '0' && text[at + 1] <= '9';
        if (c == '_' && at > 0 && text[at - 1] >= '0' && text[at - 1] <= '9' && after) {
            continue;
        }
        bool exponent = (c == 'e' || c == 'E') && digit && !power;
        bool dot = c == '.' && !point && !power;
        bool sign = power && (c == '+' || c == '-') && (text[at - 1] | 0x20) == 'e';
        if (!number && !exponent && !dot && !sign) {
            return false;
        }
        digit = digit || number;
        point = point || dot;
        power = power || exponent;
        digits[count++] = c;
    }
    if (!digit || at < size || strchr("eE+-", digits[count - 1]) != NULL) {
        return false;
    }
    double parsed = qlora__number_parse(digits, count);
    *out = minus ? -parsed : parsed;
    return true;
}

QLORA__JIN_FILTER(float) {
    double x = 0.0;
    char text[1000];
    size_t size = 0;
    *out = in[1].kind == QLORA__JIN_MISSING ? qlora__jin_float(0.0) : in[1];
    if (in[0].kind == QLORA__JIN_UNDEFINED) {
        return qlora__jin_undefined_error(m, in[0]);
    }
    if (qlora__jin_is_number(in[0])) {
        *out = qlora__jin_float(qlora__jin_real_of(in[0]));
    } else if (in[0].kind == QLORA__JIN_BIG) {
        *out = qlora__jin_float(qlora__number_parse(in[0].as.string->data, in[0].as.string->bytes));
    } else if (in[0].kind == QLORA__JIN_STRING) {
        QLORA__TRY(qlora__jin_number_text(m, in[0].as.string, text, sizeof text, &size));
        *out = qlora__jin_read_real(text, size, &x) ? qlora__jin_float(x) : *out;
    }
    return QLORA_OK;
}

QLORA__JIN_FILTER(int) {
    double x = 0.0;
    int64_t n = 0;
    bool big = false;
    int64_t base = 10;
    char text[1000];
    size_t size = 0;
    qlora__jin_value v = in[0];
    *out = in[1].kind == QLORA__JIN_MISSING ? qlora__jin_int(0) : in[1];
    if (v.kind == QLORA__JIN_UNDEFINED) {
        return qlora__jin_undefined_error(m, v);
    }
    if (qlora__jin_is_integer(v) || v.kind == QLORA__JIN_BIG) {
        *out = v.kind == QLORA__JIN_BIG ? v : qlora__jin_int(qlora__jin_integer_of(v));
        return QLORA_OK;
    }
    if (v.kind == QLORA__JIN_FLOAT) {
        return qlora__jin_is_nan(v.as.real) ? QLORA_OK
                                            : qlora__jin_truncate_double(m, v.as.real, out);
    }
    if (v.kind != QLORA__JIN_STRING) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__jin_number_text(m, v.as.string, text, sizeof text, &size));
    bool based = in[2].kind == QLORA__JIN_MISSING || qlora__jin_is_integer(in[2]);
    base = based && in[2].kind != QLORA__JIN_MISSING ? qlora__jin_integer_of(in[2]) : base;
    if (based && qlora__jin_read_whole(text, size, base, &n, &big)) {
        *out = qlora__jin_int(n);
        return big ? qlora__jin_too_big(m) : QLORA_OK;
    }
    bool real = qlora__jin_read_real(text, size, &x) && qlora__jin_is_finite(x);
    return real ? qlora__jin_truncate_double(m, x, out) : QLORA_OK;
}

// Rounds a whole number, given by its digits, to a multiple of ten to the power of `places`; what
// is exactly between two goes to the even one. `more`: there is a fraction behind the digits.
static void qlora__jin_round_digits(char* digits, size_t places, bool more) {
    size_t size = strlen(digits);
    size_t keep = size > places ? size - places : 0;
    char first = size >= places ? digits[keep] : '0';
    for (size_t i = keep + 1; i < size; i++) {
        more = more || digits[i] != '0';
    }
    bool odd = keep > 0 && (digits[keep - 1] - '0') % 2 != 0;
    bool up = first > '5' || (first == '5' && (more || odd));
    memset(digits + keep, '0', size - keep);
    for (size_t i = keep; up && i > 0; i--) {
        up = digits[i - 1] == '9';
        digits[i - 1] = up ? '0' : (char)(digits[i - 1] + 1);
    }
    if (up) { // one more digit in front
        memmove(digits + 1, digits, size + 1);
        digits[0] = '1';
    }
}

// round() with a negative precision.
static qlora_result qlora__jin_round_tens(qlora__jin_machine* m, qlora__jin_value v, int64_t places,
                                          qlora__jin_value* out) {
    char digits[420];
    if (qlora__jin_is_integer(v)) {
        int64_t n = qlora__jin_integer_of(v);
        bool big = false;
        snprintf(digits, sizeof digits, "%llu",
                 (unsigned long long)(n < 0 ? 0 - (uint64_t)n : (uint64_t)n));
        qlora__jin_round_digits(digits, (size_t)places, false);
        (void)qlora__jin_read_whole(digits, strlen(digits), 10, &v.as.integer, &big);
        *out = qlora__jin_int(n < 0 ? -v.as.integer : v.as.integer);
        return big ? qlora__jin_too_big(m) : QLORA_OK;
    }
    double x = v.as.real < 0.0 ? -v.as.real : v.as.real;
    double whole = qlora__jin_floor(x);
    snprintf(digits, sizeof digits, "%.0f", whole);
    qlora__jin_round_digits(digits, (size_t)places, whole < x);
    x = qlora__number_parse(digits, strlen(digits));
    *out = qlora__jin_float(qlora__jin_has_minus(v.as.real) ? -x : x);
    return QLORA_OK;
}

QLORA__JIN_FILTER(round) {
    int64_t precision = 0;
    char text[420];
    QLORA__TRY(qlora__jin_need_integer(m, "round", in[1], &precision));
    bool common = in[2].kind == QLORA__JIN_MISSING || qlora__jin_is(in[2], "common", 6);
    bool down = qlora__jin_is(in[2], "floor", 5);
    if (!common && !down && !qlora__jin_is(in[2], "ceil", 4)) {
        return qlora__jin_fail(m, "round: the method must be common, ceil or floor");
    }
    if (!qlora__jin_is_number(in[0])) {
        return qlora__jin_fail(m, "round: a number is needed, not a %s", qlora__jin_type(in[0]));
    }
    if (common && qlora__jin_is_integer(in[0]) && precision >= 0) {
        *out = qlora__jin_int(qlora__jin_integer_of(in[0]));
        return QLORA_OK;
    }
    if (precision < -60 || precision > 60) {
        return qlora__jin_fail(m, "round: a precision of %lld is not supported",
                               (long long)precision);
    }
    double x = qlora__jin_real_of(in[0]);
    if (!common && qlora__jin_is_integer(in[0]) && precision >= 0) {
        *out = qlora__jin_float(x);
        return QLORA_OK;
    }
    if (!qlora__jin_is_finite(x)) {
        *out = in[0];
        return common ? QLORA_OK : qlora__jin_fail(m, "round: the number is not finite");
    }
    if (common && precision < 0) {
        return qlora__jin_round_tens(m, in[0], -precision, out);
    }
    if (common) {
        size_t n = 0;
        snprintf(text, sizeof text, "%.*f", (int)precision, x);
        for (char* c = text; *c != '\0'; c++) { // the locale's decimal point
            bool plain = (*c >= '0' && *c <= '9') || *c == '-';
            if (plain || (n > 0 && text[n - 1] != '.')) {
                text[n++] = plain ? *c : '.';
            }
        }
        *out = qlora__jin_float(qlora__number_parse(text, n));
        return QLORA_OK;
    }
    double scale = qlora__jin_power_of(10.0, precision);
    double whole = qlora__jin_floor(x * scale);
    if (!qlora__jin_is_finite(whole)) {
        return qlora__jin_fail(m, "round: the number is not finite with %lld more digits",
                               (long long)precision);
    }
    whole += !down && whole < x * scale ? 1.0 : 0.0;
    *out = qlora__jin_float(qlora__jin_is_zero(whole) ? 0.0 : whole / scale); // a whole number
    return QLORA_OK;
}

QLORA__JIN_FILTER(filesizeformat) {
    static const char prefixes[] = "kMGTPEZY";
    char text[400];
    qlora__jin_value number;
    bool binary = qlora__jin_truth(in[1]);
    qlora__jin_value call[2];
    call[0] = in[0];
    call[1] = qlora__jin_none();
    QLORA__TRY(qlora__jin_filter_float(m, call, &number));
    if (number.kind != QLORA__JIN_FLOAT) {
        return qlora__jin_fail(m, "filesizeformat: a number is needed, not a %s",
                               qlora__jin_type(in[0]));
    }
    double x = number.as.real;
    double base = binary ? 1024.0 : 1000.0;
    if (x >= 1.0 && x <= 1.0) {
        return qlora__jin_string_of(m, "1 Byte", out);
    }
    if (x < base) {
        QLORA__TRY(qlora__jin_truncate_double(m, x, &number));
        snprintf(text, sizeof text, "%lld Bytes", (long long)number.as.integer);
    } else {
        double unit = base * base;
        size_t i = 0;
        // Python compares with the whole number, which the seventh unit is a little below
        while (i < 7 && !(x < unit || (i == 6 && !binary && x <= unit))) {
            unit *= base;
            i++;
        }
        snprintf(text, sizeof text, "%.1f %c%s", base * x / unit,
                 binary && i == 0 ? 'K' : prefixes[i], binary ? "iB" : "B");
        qlora__jin_mend_point(text);
    }
    qlora__jin_buffer buffer;
    memset(&buffer, 0, sizeof buffer);
    QLORA__TRY(qlora__jin_puts(m, &buffer, text));
    return qlora__jin_buffer_string(m, &buffer, out);
}
