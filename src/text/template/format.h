// Text from a format: the operator %, str.format, strftime.

typedef struct qlora__jin_spec {
    uint32_t fill;
    char align; // < > ^ = or 0
    char sign;  // + - or a space
    bool alternate;
    bool zero;
    bool no_minus_zero; // the letter z: what is rounded to zero has no minus
    bool filled;        // a fill was given
    int64_t width;
    char group;        // , or _ or 0
    int64_t precision; // -1: none
    char type;
} qlora__jin_spec;

// Appends text, padded to the width in characters.
static qlora_result qlora__jin_pad(qlora__jin_machine* m, const char* text, size_t size,
                                   const qlora__jin_spec* spec, char align,
                                   qlora__jin_buffer* out) {
    int64_t chars = (int64_t)qlora__jin_count_chars(text, size);
    int64_t room = spec->width > chars ? spec->width - chars : 0;
    int64_t left = align == '>' ? room : align == '^' ? room / 2 : 0;
    for (int64_t i = 0; i < room; i++) {
        if (i == left) {
            QLORA__TRY(qlora__jin_put(m, out, text, size));
        }
        QLORA__TRY(qlora__jin_work(m, 1));
        QLORA__TRY(qlora__jin_put_code(m, out, spec->fill));
    }
    return left == room ? qlora__jin_put(m, out, text, size) : QLORA_OK;
}

// Digits in groups from the right, up to a point, an exponent or a letter. With `least`, zeros are
// put before them, in groups too, until there are that many characters.
static void qlora__jin_group(const char* digits, char separator, size_t each, int64_t least,
                             char* out, size_t room) {
    size_t whole = strspn(digits, each == 4 ? "0123456789abcdefABCDEF" : "0123456789");
    size_t rest = strlen(digits + whole);
    char back[1400]; // the whole part, from its end
    size_t n = 0;
    int64_t front = least - (int64_t)rest;
    for (size_t i = 0; whole > 0 && n + 2 < sizeof back; i++) {
        if (i >= whole && (int64_t)n >= front) {
            break;
        }
        if (i > 0 && i % each == 0) {
            back[n++] = separator;
        }
        back[n++] = i < whole ? digits[whole - 1 - i] : '0';
    }
    size_t k = 0;
    while (n > 0 && k + 1 < room) {
        out[k++] = back[--n];
    }
    for (size_t i = whole; i < whole + rest && k + 1 < room; i++) {
        out[k++] = digits[i];
    }
    out[k] = '\0';
}

// The zeros at the end of a fraction; an exponent behind them stays.
static void qlora__jin_cut_zeros(char* text) {
    size_t end = strcspn(text, "e");
    size_t keep = end;
    if (memchr(text, '.', end) == NULL) {
        return;
    }
    while (keep > 0 && text[keep - 1] == '0') {
        keep--;
    }
    keep -= keep > 0 && text[keep - 1] == '.' ? 1 : 0;
    memmove(text + keep, text + end, strlen(text + end) + 1);
}

static void qlora__jin_mend_point(char* text) {
    for (; *text != '\0'; text++) {
        *text = *text == ',' ? '.' : *text; // the locale's decimal point
    }
}

// A precision without a type: as g, but with an exponent one digit earlier, and with a point.
static void qlora__jin_format_plain(double x, int precision, char* out, size_t room) {
    precision = precision > 0 ? precision : 1;
    snprintf(out, room, "%.*e", precision - 1, x);
    qlora__jin_mend_point(out);
    int exponent = atoi(strchr(out, 'e') + 1);
    if (exponent < -4 || exponent >= precision - 1) {
        qlora__jin_cut_zeros(out);
        return;
    }
    snprintf(out, room, "%.*f", precision - 1 - exponent, x);
    qlora__jin_mend_point(out);
    qlora__jin_cut_zeros(out);
    size_t size = strlen(out);
    if (strchr(out, '.') == NULL && size + 3 < room) {
        memcpy(out + size, ".0", 3);
    }
}

// A float that is finite and not negative, as text.
static qlora_result qlora__jin_format_real(qlora__jin_machine* m, double x,
                                           const qlora__jin_spec* spec, char* out, size_t room) {
    char type = spec->type;
    if (type == '\0' && spec->precision < 0) {
        char shortest[48];
        qlora__jin_format_double(x, shortest);
        snprintf(out, room, "%s", shortest);
        return QLORA_OK;
    }
    int64_t precision = spec->precision < 0 ? 6 : spec->precision;
    if (precision > 100) {
        return qlora__jin_fail(m, "a precision above 100 is not supported");
    }
    int p = (int)precision;
    if (type == '\0') {
        qlora__jin_format_plain(x, p, out, room);
        return QLORA_OK;
    }
    static const char types[] = "eEgG";
    static const char* const forms[][2] = {{"%.*e", "%#.*e"}, {"%.*E", "%#.*E"},
                                           {"%.*g", "%#.*g"}, {"%.*G", "%#.*G"},
                                           {"%.*f", "%#.*f"}};
    const char* known = strchr(types, type);
    snprintf(out, room, forms[known != NULL ? known - types : 4][spec->alternate ? 1 : 0], p, x);
    qlora__jin_mend_point(out);
    return QLORA_OK;
}

// The digits of an integer without its sign, at least `precision` of them.
static qlora_result qlora__jin_format_whole(qlora__jin_machine* m, int64_t integer,
                                            const qlora__jin_spec* spec, char* out, size_t room) {
    uint64_t size = integer < 0 ? 0 - (uint64_t)integer : (uint64_t)integer;
    uint64_t base = spec->type == 'b' ? 2 : spec->type == 'o' ? 8 : 10;
    const char* letters = spec->type == 'X' ? "0123456789ABCDEF" : "0123456789abcdef";
    char back[64];
    size_t n = 0;
    base = spec->type == 'x' || spec->type == 'X' ? 16 : base;
    do {
        back[n++] = letters[size % base];
        size /= base;
    } while (size > 0);
    int64_t zeros = spec->precision > (int64_t)n ? spec->precision - (int64_t)n : 0;
    if (zeros + (int64_t)n + 1 > (int64_t)room) {
        return qlora__jin_fail(m, "a precision of %lld is not supported",
                               (long long)spec->precision);
    }
    size_t k = (size_t)zeros;
    memset(out, '0', k);
    while (n > 0) {
        out[k++] = back[--n];
    }
    out[k] = '\0';
    return QLORA_OK;
}

// The digits of a number without its sign, and whether it has a minus.
static qlora_result qlora__jin_format_digits(qlora__jin_machine* m, qlora__jin_value v,
                                             const qlora__jin_spec* spec, bool* negative, char* out,
                                             size_t room) {
    bool whole = spec->type != '\0' && strchr("dxXob", spec->type) != NULL;
    if (whole) {
        *negative = qlora__jin_integer_of(v) < 0;
        return qlora__jin_format_whole(m, qlora__jin_integer_of(v), spec, out, room);
    }
    double x = qlora__jin_real_of(v);
    x = spec->type == '%' ? x * 100.0 : x;
    *negative = qlora__jin_has_minus(x) && !qlora__jin_is_nan(x);
    x = *negative ? -x : x;
    if (!qlora__jin_is_finite(x)) {
        bool upper = spec->type == 'E' || spec->type == 'F' || spec->type == 'G';
        bool nan = qlora__jin_is_nan(x);
        snprintf(out, room, "%s", nan ? (upper ? "NAN" : "nan") : (upper ? "INF" : "inf"));
    } else {
        QLORA__TRY(qlora__jin_format_real(m, x, spec, out, room));
        *negative = *negative && !(spec->no_minus_zero && strpbrk(out, "123456789") == NULL);
    }
    size_t size = strlen(out);
    if (spec->type == '%' && size + 2 < room) {
        memcpy(out + size, "%", 2);
    }
    return QLORA_OK;
}

// A number whose type fits it.
static qlora_result qlora__jin_format_number(qlora__jin_machine* m, qlora__jin_value v,
                                             const qlora__jin_spec* given, qlora__jin_buffer* out) {
    char digits[512];
    char grouped[1400];
    char text[1420];
    qlora__jin_spec spec = *given;
    bool negative = false;
    QLORA__TRY(qlora__jin_format_digits(m, v, &spec, &negative, digits, sizeof digits));
    const char* sign = negative ? "-" : spec.sign == '+' ? "+" : spec.sign == ' ' ? " " : "";
    const char* prefix = !spec.alternate    ? ""
                         : spec.type == 'x' ? "0x"
                         : spec.type == 'X' ? "0X"
                         : spec.type == 'o' ? "0o"
                         : spec.type == 'b' ? "0b"
                                            : "";
    int64_t used = (int64_t)(strlen(sign) + strlen(prefix));
    if (spec.align == '=') {
        spec.width = spec.width > used ? spec.width - used : 0;
    }
    const char* shown = digits;
    if (spec.group != '\0' && digits[0] != 'i' && digits[0] != 'n' && digits[0] != 'I' &&
        digits[0] != 'N') {
        bool zeros = spec.align == '=' && spec.fill == '0';
        if (zeros && spec.width > 500) {
            return qlora__jin_fail(m, "a width of %lld with a %c is not supported",
                                   (long long)spec.width, spec.group);
        }
        size_t each = spec.type != '\0' && strchr("xXob", spec.type) != NULL ? 4 : 3;
        qlora__jin_group(digits, spec.group, each, zeros ? spec.width : 0, grouped, sizeof grouped);
        shown = grouped;
    }
    if (spec.align == '=') {
        QLORA__TRY(qlora__jin_puts(m, out, sign));
        QLORA__TRY(qlora__jin_puts(m, out, prefix));
        return qlora__jin_pad(m, shown, strlen(shown), &spec, '>', out);
    }
    snprintf(text, sizeof text, "%s%s%s", sign, prefix, shown);
    return qlora__jin_pad(m, text, strlen(text), &spec, spec.align != '\0' ? spec.align : '>', out);
}

static qlora_result qlora__jin_format_string(qlora__jin_machine* m, qlora__jin_value v,
                                             const qlora__jin_spec* spec, qlora__jin_buffer* out) {
    const qlora__jin_string* s = v.as.string;
    size_t bytes = s->bytes;
    if (spec->precision >= 0 && (uint64_t)spec->precision < s->chars) {
        bytes = qlora__jin_byte_of(s, (size_t)spec->precision);
    }
    return qlora__jin_pad(m, s->data, bytes, spec, spec->align != '\0' ? spec->align : '<', out);
}

static int64_t qlora__jin_read_number(const char* text, size_t size, size_t* at) {
    int64_t value = 0;
    while (*at < size && text[*at] >= '0' && text[*at] <= '9') {
        value = value < 100000000 ? value * 10 + (text[*at] - '0') : value;
        *at += 1;
    }
    return value;
}

// ---- the operator %

// ascii(): what is not ASCII in a text of repr becomes an escape.
static qlora_result qlora__jin_put_ascii(qlora__jin_machine* m, const qlora__jin_string* s,
                                         qlora__jin_buffer* out) {
    for (size_t at = 0, step = 0; at < s->bytes; at += step) {
        char escaped[16];
        uint32_t code = qlora__jin_code_at(s->data, s->bytes, at, &step);
        const char* format = code < 0x100 ? "\\x%02x" : code < 0x10000 ? "\\u%04x" : "\\U%08x";
        snprintf(escaped, sizeof escaped, format, (unsigned)code);
        QLORA__TRY(code < 0x80 ? qlora__jin_put(m, out, s->data + at, 1)
                               : qlora__jin_puts(m, out, escaped));
    }
    return QLORA_OK;
}

// str(), repr() or ascii() of a value, by the letters s, r and a.
static qlora_result qlora__jin_convert(qlora__jin_machine* m, qlora__jin_value v, char how,
                                       qlora__jin_value* out) {
    qlora__jin_buffer buffer;
    qlora__jin_buffer plain;
    memset(&buffer, 0, sizeof buffer);
    memset(&plain, 0, sizeof plain);
    QLORA__TRY(how == 's' ? qlora__jin_print(m, v, &buffer) : qlora__jin_repr(m, v, &buffer));
    QLORA__TRY(qlora__jin_buffer_string(m, &buffer, out));
    if (how == 'a') {
        QLORA__TRY(qlora__jin_put_ascii(m, out->as.string, &plain));
        QLORA__TRY(qlora__jin_buffer_string(m, &plain, out));
    }
    return QLORA_OK;
}

// The character of a number, as chr() gives it.
static qlora_result qlora__jin_character(qlora__jin_machine* m, int64_t code,
                                         qlora__jin_value* out) {
    qlora__jin_buffer buffer;
    memset(&buffer, 0, sizeof buffer);
    if (code < 0 || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) {
        return qlora__jin_fail(m, "%lld is not the number of a character", (long long)code);
    }
    QLORA__TRY(qlora__jin_put_code(m, &buffer, (uint32_t)code));
    return qlora__jin_buffer_string(m, &buffer, out);
}

static qlora_result qlora__jin_percent_one(qlora__jin_machine* m, qlora__jin_value v,
                                           qlora__jin_spec* spec, qlora__jin_buffer* out) {
    qlora__jin_value text = v;
    char left = spec->align;
    spec->align = left != '\0' ? left : '>';
    if (spec->type == 's' || spec->type == 'r' || spec->type == 'a') {
        QLORA__TRY(qlora__jin_convert(m, v, spec->type, &text));
        return qlora__jin_format_string(m, text, spec, out);
    }
    if (spec->type == 'c') {
        bool one = v.kind == QLORA__JIN_STRING && v.as.string->chars == 1;
        if (!one && !qlora__jin_is_integer(v)) {
            return qlora__jin_fail(m, "%%c needs one character or its number");
        }
        if (!one) {
            QLORA__TRY(qlora__jin_character(m, qlora__jin_integer_of(v), &text));
        }
        spec->precision = -1;
        return qlora__jin_format_string(m, text, spec, out);
    }
    if (v.kind == QLORA__JIN_UNDEFINED) {
        return qlora__jin_undefined_error(m, v);
    }
    if (spec->type == '\0' || strchr("diuxXoeEfFgG", spec->type) == NULL) {
        return qlora__jin_fail(m, "%%%c is not a format", spec->type);
    }
    if (v.kind == QLORA__JIN_BIG) {
        return qlora__jin_too_big(m);
    }
    bool real = v.kind == QLORA__JIN_FLOAT;
    if (!qlora__jin_is_number(v) || (real && strchr("xXo", spec->type) != NULL)) {
        return qlora__jin_fail(m, "the format %%%c needs a number, not a %s", spec->type,
                               qlora__jin_type(v));
    }
    if (strchr("diu", spec->type) != NULL) {
        spec->type = 'd';
        if (real) {
            QLORA__TRY(qlora__jin_truncate_double(m, v.as.real, &v));
        }
    }
    if (spec->zero && left == '\0') {
        spec->align = '=';
        spec->fill = '0';
    }
    return qlora__jin_format_number(m, v, spec, out);
}

// A width or precision: digits, or a star that takes the next argument.
static qlora_result qlora__jin_percent_size(qlora__jin_machine* m, const qlora__jin_string* s,
                                            size_t* at, const qlora__jin_list* args, size_t* used,
                                            int64_t* out) {
    if (*at < s->bytes && s->data[*at] == '*') {
        *at += 1;
        if (args == NULL || *used >= args->count || !qlora__jin_is_integer(args->items[*used])) {
            return qlora__jin_fail(m, "a * in a format needs a whole number");
        }
        *out = qlora__jin_integer_of(args->items[(*used)++]);
        *out = *out > INT32_MAX ? INT32_MAX : *out < -INT32_MAX ? -INT32_MAX : *out;
        return QLORA_OK;
    }
    *out = qlora__jin_read_number(s->data, s->bytes, at);
    return QLORA_OK;
}

typedef struct qlora__jin_percent_state {
    qlora__jin_value given;
    const qlora__jin_list* args; // of a tuple
    size_t used;
} qlora__jin_percent_state;

// One % at s->data[*at], behind the sign.
static qlora_result qlora__jin_percent_part(qlora__jin_machine* m, const qlora__jin_string* s,
                                            size_t* at, qlora__jin_percent_state* p,
                                            qlora__jin_buffer* out) {
    qlora__jin_spec spec;
    qlora__jin_value value = qlora__jin_of(QLORA__JIN_MISSING);
    memset(&spec, 0, sizeof spec);
    spec.fill = ' ';
    spec.precision = -1;
    if (*at < s->bytes && s->data[*at] == '%') {
        *at += 1;
        return qlora__jin_put(m, out, "%", 1);
    }
    if (*at < s->bytes && s->data[*at] == '(') {
        size_t close = qlora__jin_find_bytes(s->data, s->bytes, *at, ")", 1);
        size_t place = 0;
        if (close == SIZE_MAX || p->given.kind != QLORA__JIN_DICT) {
            return qlora__jin_fail(m, "a format with (name) needs a dictionary");
        }
        place = qlora__jin_dict_at(p->given.as.dict, s->data + *at + 1, close - *at - 1);
        if (place == p->given.as.dict->count) {
            return qlora__jin_fail(m, "a format names a key that is not there");
        }
        value = p->given.as.dict->values[place];
        *at = close + 1;
        p->used = 1; // from here on, the dictionary itself is not an argument
    }
    for (; *at < s->bytes && s->data[*at] != '\0' && strchr("-+ #0", s->data[*at]) != NULL;
         *at += 1) {
        char c = s->data[*at];
        spec.align = c == '-' ? '<' : spec.align;
        spec.sign = c == '+' || (c == ' ' && spec.sign == '\0') ? c : spec.sign;
        spec.alternate = spec.alternate || c == '#';
        spec.zero = spec.zero || c == '0';
    }
    QLORA__TRY(qlora__jin_percent_size(m, s, at, p->args, &p->used, &spec.width));
    spec.align = spec.width < 0 ? '<' : spec.align;
    spec.width = spec.width < 0 ? -spec.width : spec.width;
    if (*at < s->bytes && s->data[*at] == '.') {
        *at += 1;
        QLORA__TRY(qlora__jin_percent_size(m, s, at, p->args, &p->used, &spec.precision));
        spec.precision = spec.precision < 0 ? 0 : spec.precision;
    }
    bool length = *at < s->bytes && s->data[*at] != '\0' && strchr("hlL", s->data[*at]) != NULL;
    *at += length ? 1 : 0; // of C, without a meaning here
    if (*at >= s->bytes) {
        return qlora__jin_fail(m, "a format ends inside %%");
    }
    spec.type = s->data[(*at)++];
    if (value.kind == QLORA__JIN_MISSING) {
        size_t count = p->args != NULL ? p->args->count : 1;
        if (p->used >= count) {
            return qlora__jin_fail(m, "not enough values for a format");
        }
        value = p->args != NULL ? p->args->items[p->used] : p->given;
        p->used++;
    }
    return qlora__jin_percent_one(m, value, &spec, out);
}

static qlora_result qlora__jin_percent(qlora__jin_machine* m, qlora__jin_value format,
                                       qlora__jin_value given, qlora__jin_value* out) {
    const qlora__jin_string* s = format.as.string;
    qlora__jin_buffer buffer;
    qlora__jin_percent_state p;
    memset(&buffer, 0, sizeof buffer);
    memset(&p, 0, sizeof p);
    p.given = given;
    p.args = given.kind == QLORA__JIN_TUPLE ? given.as.list : NULL;
    if (format.flag != 0) {
        return qlora__jin_fail(m, "%% on a safe string is not supported");
    }
    for (size_t at = 0; at < s->bytes;) {
        size_t sign = qlora__jin_find_bytes(s->data, s->bytes, at, "%", 1);
        size_t end = sign == SIZE_MAX ? s->bytes : sign;
        QLORA__TRY(qlora__jin_put(m, &buffer, s->data + at, end - at));
        at = end;
        if (sign != SIZE_MAX) {
            at++;
            QLORA__TRY(qlora__jin_percent_part(m, s, &at, &p, &buffer));
        }
    }
    // Python asks whether it has a subscript, which these have as well as a dictionary
    bool mapping = given.kind == QLORA__JIN_DICT || given.kind == QLORA__JIN_LIST ||
                   given.kind == QLORA__JIN_RANGE || given.kind == QLORA__JIN_UNDEFINED;
    if (p.args != NULL ? p.used < p.args->count : p.used == 0 && !mapping) {
        return qlora__jin_fail(m, "a format does not use all its values");
    }
    return qlora__jin_buffer_string(m, &buffer, out);
}

// ---- str.format

static qlora_result qlora__jin_read_spec(qlora__jin_machine* m, const char* text, size_t size,
                                         qlora__jin_spec* spec) {
    size_t at = 0;
    size_t step = 0;
    memset(spec, 0, sizeof *spec);
    spec->fill = ' ';
    spec->precision = -1;
    if (size > 0) {
        uint32_t fill = qlora__jin_code_at(text, size, 0, &step);
        if (step < size && strchr("<>^=", text[step]) != NULL && text[step] != '\0') {
            spec->fill = fill;
            spec->filled = true;
            spec->align = text[step];
            at = step + 1;
        } else if (strchr("<>^=", text[0]) != NULL && text[0] != '\0') {
            spec->align = text[0];
            at = 1;
        }
    }
    if (at < size && (text[at] == '+' || text[at] == '-' || text[at] == ' ')) {
        spec->sign = text[at++];
    }
    if (at < size && text[at] == 'z') {
        spec->no_minus_zero = true;
        at++;
    }
    if (at < size && text[at] == '#') {
        spec->alternate = true;
        at++;
    }
    if (at < size && text[at] == '0' && !spec->filled) {
        spec->zero = true;
        spec->fill = '0';
        at++;
    }
    spec->width = qlora__jin_read_number(text, size, &at);
    if (at < size && (text[at] == ',' || text[at] == '_')) {
        spec->group = text[at++];
    }
    if (at < size && text[at] == '.') {
        at++;
        size_t digits = at;
        spec->precision = qlora__jin_read_number(text, size, &at);
        if (at == digits) {
            return qlora__jin_fail(m, "a format has a point without a precision");
        }
    }
    if (at < size) {
        spec->type = text[at++];
    }
    return at == size ? QLORA_OK : qlora__jin_fail(m, "a format has an unknown ending");
}

// A format for a number that Python refuses; its type is already the one to use.
static bool qlora__jin_spec_fits(qlora__jin_value v, const qlora__jin_spec* spec) {
    bool real = v.kind == QLORA__JIN_FLOAT;
    bool whole = spec->type != '\0' && strchr("bcdoxX", spec->type) != NULL;
    bool floats = spec->type == '\0' || strchr("eEfFgG%", spec->type) != NULL;
    if ((!whole && !floats) || (real && whole)) {
        return false;
    }
    bool grouped = spec->group != '\0';
    bool bases = whole && strchr("boxX", spec->type) != NULL;
    if (grouped && (spec->type == 'c' || (bases && spec->group == ','))) {
        return false;
    }
    bool letter = spec->type == 'c' && (spec->sign != '\0' || spec->alternate);
    return !letter && !(whole && (spec->precision >= 0 || spec->no_minus_zero));
}

static qlora_result qlora__jin_format_as_number(qlora__jin_machine* m, qlora__jin_value v,
                                                qlora__jin_spec* spec, qlora__jin_buffer* out) {
    bool real = v.kind == QLORA__JIN_FLOAT;
    qlora__jin_value text;
    if (spec->type == 'n' && spec->group == '\0') {
        spec->type = real ? 'g' : 'd';
    }
    spec->type = spec->type == '\0' && !real ? 'd' : spec->type;
    if (!qlora__jin_spec_fits(v, spec)) {
        return qlora__jin_fail(m, "a format does not fit a %s", qlora__jin_type(v));
    }
    if (spec->zero && spec->align == '\0') {
        spec->align = '=';
    }
    if (spec->type == 'c') {
        QLORA__TRY(qlora__jin_character(m, qlora__jin_integer_of(v), &text));
        spec->align = spec->align == '\0' || spec->align == '=' ? '>' : spec->align;
        return qlora__jin_format_string(m, text, spec, out);
    }
    return qlora__jin_format_number(m, v, spec, out);
}

static qlora_result qlora__jin_format_value(qlora__jin_machine* m, qlora__jin_value v,
                                            const char* text, size_t size, qlora__jin_buffer* out) {
    qlora__jin_spec spec;
    if (size == 0) {
        return qlora__jin_print(m, v, out);
    }
    QLORA__TRY(qlora__jin_read_spec(m, text, size, &spec));
    if (v.kind == QLORA__JIN_STRING && (spec.type == '\0' || spec.type == 's')) {
        bool plain = spec.align != '=' && spec.sign == '\0' && !spec.alternate &&
                     !spec.no_minus_zero && spec.group == '\0';
        return plain ? qlora__jin_format_string(m, v, &spec, out)
                     : qlora__jin_fail(m, "a format for numbers is used for a string");
    }
    if (v.kind == QLORA__JIN_BIG) {
        return qlora__jin_too_big(m);
    }
    if (qlora__jin_is_number(v) && spec.type != 's') {
        v = v.kind == QLORA__JIN_BOOL ? qlora__jin_int(qlora__jin_integer_of(v)) : v;
        return qlora__jin_format_as_number(m, v, &spec, out);
    }
    return qlora__jin_fail(m, "a %s cannot be printed with a format", qlora__jin_type(v));
}

typedef struct qlora__jin_format_state {
    const qlora__jin_args* args;
    size_t automatic; // fields without a number so far
    bool numbered;    // there was a field with a number
    int depth;
    qlora_result (*put)(qlora__jin_machine* m, const char* text, size_t size,
                        struct qlora__jin_format_state* state, qlora__jin_buffer* out);
} qlora__jin_format_state;

// The value that {name.attribute[item]} means.
static qlora_result qlora__jin_format_field(qlora__jin_machine* m, const char* text, size_t size,
                                            qlora__jin_format_state* state, qlora__jin_value* out) {
    const qlora__jin_args* args = state->args;
    size_t at = 0;
    while (at < size && text[at] != '.' && text[at] != '[') {
        at++;
    }
    size_t digits = 0;
    int64_t index = qlora__jin_read_number(text, at, &digits);
    if (size == 0 || (at > 0 && digits == at)) {
        bool numbered = size > 0 && digits == size; // with an attribute, Python does not look
        if (numbered ? state->automatic > 0 : size == 0 && state->numbered) {
            return qlora__jin_fail(m, "format: fields with and without numbers are mixed");
        }
        state->numbered = state->numbered || numbered;
        index = size == 0 ? (int64_t)state->automatic++ : index;
        if ((uint64_t)index >= args->positional) {
            return qlora__jin_fail(m, "format: there is no value number %lld", (long long)index);
        }
        *out = args->items[index];
    } else {
        size_t k = 0;
        while (k < args->named &&
               !(args->names[k]->bytes == at && memcmp(args->names[k]->data, text, at) == 0)) {
            k++;
        }
        if (k == args->named) {
            return qlora__jin_fail(m, "format: there is no value named \"%.*s\"",
                                   (int)(at < 60 ? at : 60), text);
        }
        *out = args->items[args->positional + k];
    }
    while (at < size) {
        bool item = text[at] == '[';
        size_t begin = ++at;
        while (at < size && (item ? text[at] != ']' : text[at] != '.' && text[at] != '[')) {
            at++;
        }
        digits = begin;
        index = qlora__jin_read_number(text, at, &digits);
        qlora__jin_value key = qlora__jin_int(index);
        if (!item || digits != at) {
            QLORA__TRY(qlora__jin_string_share(m, text + begin, at - begin, &key));
        }
        QLORA__TRY(item ? qlora__jin_getitem(m, *out, key, out)
                        : qlora__jin_getattr(m, *out, text + begin, at - begin, out));
        at += item ? 1 : 0;
    }
    return QLORA_OK;
}

// One {...}, without its braces.
static qlora_result qlora__jin_format_part(qlora__jin_machine* m, const char* text, size_t size,
                                           qlora__jin_format_state* state, qlora__jin_buffer* out) {
    size_t colon = 0;
    size_t bang = SIZE_MAX;
    bool item = false; // between [ and ]
    qlora__jin_value value;
    qlora__jin_buffer spec;
    memset(&spec, 0, sizeof spec);
    while (colon < size && (text[colon] != ':' || item)) {
        item = text[colon] == '[' || (item && text[colon] != ']');
        bang = text[colon] == '!' && bang == SIZE_MAX && !item ? colon : bang;
        if (text[colon] == '{' && !item) {
            return qlora__jin_fail(m, "format: a { in the name of a field");
        }
        colon++;
    }
    QLORA__TRY(qlora__jin_format_field(m, text, bang != SIZE_MAX ? bang : colon, state, &value));
    if (bang != SIZE_MAX) {
        char how = bang + 1 < colon ? text[bang + 1] : '\0';
        if (bang + 2 != colon || (how != 'r' && how != 's' && how != 'a')) {
            return qlora__jin_fail(m, "format: unknown conversion after !");
        }
        QLORA__TRY(qlora__jin_convert(m, value, how, &value));
    }
    if (colon < size) {
        state->depth++;
        QLORA__TRY(state->put(m, text + colon + 1, size - colon - 1, state, &spec));
        state->depth--;
    }
    return qlora__jin_format_value(m, value, spec.data != NULL ? spec.data : "", spec.count, out);
}

// Where the field that starts at `at`, behind its brace, ends; SIZE_MAX when it is not closed.
static size_t qlora__jin_format_close(const char* text, size_t size, size_t at) {
    size_t open = 1;
    bool item = false;
    for (; at < size; at++) {
        item = text[at] == '[' || (item && text[at] != ']');
        open += text[at] == '{' && !item ? 1 : 0;
        open -= text[at] == '}' && !item ? 1 : 0;
        if (open == 0) {
            return at;
        }
    }
    return SIZE_MAX;
}

// A text with fields; also what follows the colon of a field, which may have fields, but those no
// more.
static qlora_result qlora__jin_format_put(qlora__jin_machine* m, const char* text, size_t size,
                                          qlora__jin_format_state* state, qlora__jin_buffer* out) {
    if (state->depth > 1 && size > 0) {
        return qlora__jin_fail(m, "format: fields inside fields inside fields");
    }
    for (size_t at = 0; at < size;) {
        char c = text[at];
        bool twice = at + 1 < size && text[at + 1] == c;
        if ((c == '{' || c == '}') && twice) {
            QLORA__TRY(qlora__jin_put(m, out, &c, 1));
            at += 2;
        } else if (c == '{') {
            size_t close = qlora__jin_format_close(text, size, at + 1);
            if (close == SIZE_MAX) {
                return qlora__jin_fail(m, "format: a { is not closed");
            }
            QLORA__TRY(qlora__jin_format_part(m, text + at + 1, close - at - 1, state, out));
            at = close + 1;
        } else if (c == '}') {
            return qlora__jin_fail(m, "format: a } without a {");
        } else {
            QLORA__TRY(qlora__jin_put(m, out, &c, 1));
            at++;
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_format(qlora__jin_machine* m, qlora__jin_value format,
                                      const qlora__jin_args* args, qlora__jin_value* out) {
    qlora__jin_buffer buffer;
    qlora__jin_format_state state;
    memset(&buffer, 0, sizeof buffer);
    memset(&state, 0, sizeof state);
    state.args = args;
    state.put = qlora__jin_format_put;
    if (format.flag != 0) {
        return qlora__jin_fail(m, "format of a safe string is not supported");
    }
    QLORA__TRY(
        qlora__jin_format_put(m, format.as.string->data, format.as.string->bytes, &state, &buffer));
    return qlora__jin_buffer_string(m, &buffer, out);
}

// ---- strftime_now

static const char* const qlora__jin_days[] = {"Sunday",   "Monday", "Tuesday", "Wednesday",
                                              "Thursday", "Friday", "Saturday"};
static const char* const qlora__jin_months[] = {"January",   "February", "March",    "April",
                                                "May",       "June",     "July",     "August",
                                                "September", "October",  "November", "December"};

typedef struct qlora__jin_date {
    int64_t year;
    int month; // from 1
    int day;
    int hour;
    int minute;
    int second;
    int weekday; // 0 is Sunday
    int yearday; // from 1
} qlora__jin_date;

static bool qlora__jin_leap(int64_t year) {
    return (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
}

// From seconds since 1970, without time zones: the clock is given in local time.
static void qlora__jin_date_of(int64_t clock, qlora__jin_date* d) {
    int64_t days = clock / 86400 - (clock % 86400 < 0 ? 1 : 0);
    int64_t seconds = clock - days * 86400;
    // days since 0000-03-01, so that a leap day is the last of its year
    int64_t shifted = days + 719468;
    int64_t era = (shifted >= 0 ? shifted : shifted - 146096) / 146097;
    int64_t of_era = shifted - era * 146097;
    int64_t year = (of_era - of_era / 1460 + of_era / 36524 - of_era / 146096) / 365;
    int64_t of_year = of_era - (365 * year + year / 4 - year / 100);
    int64_t shifted_month = (5 * of_year + 2) / 153;
    d->day = (int)(of_year - (153 * shifted_month + 2) / 5 + 1);
    d->month = (int)(shifted_month < 10 ? shifted_month + 3 : shifted_month - 9);
    d->year = year + era * 400 + (d->month <= 2 ? 1 : 0);
    d->hour = (int)(seconds / 3600);
    d->minute = (int)(seconds / 60 % 60);
    d->second = (int)(seconds % 60);
    d->weekday = (int)(((days + 4) % 7 + 7) % 7);
    bool leap = qlora__jin_leap(d->year);
    static const int before[] = {0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334};
    d->yearday = before[d->month - 1] + d->day + (leap && d->month > 2 ? 1 : 0);
}

// The week of ISO 8601, from Monday to Sunday; the first one has the year's first Thursday. Returns
// the year that the week belongs to.
static int64_t qlora__jin_iso_week(const qlora__jin_date* d, int* week) {
    int from_monday = (d->weekday + 6) % 7;
    int64_t year = d->year;
    *week = (d->yearday - 1 - from_monday + 10) / 7;
    if (*week < 1) {
        year--; // the last week of the year before, whose last day was a day earlier
        int yearday = d->yearday + (qlora__jin_leap(year) ? 366 : 365);
        *week = (yearday - 1 - from_monday + 10) / 7;
    } else if (*week == 53 && d->yearday - from_monday + 3 > (qlora__jin_leap(year) ? 366 : 365)) {
        year++;
        *week = 1;
    }
    return year;
}

typedef struct qlora__jin_date_row {
    char letter;
    const char* format;
    int value;
} qlora__jin_date_row;

// A letter of strftime that stands for a number.
static bool qlora__jin_date_number(const qlora__jin_date* d, char letter, char out[64]) {
    int hour12 = d->hour % 12 == 0 ? 12 : d->hour % 12;
    int from_monday = (d->weekday + 6) % 7;
    int week = 0;
    int week_year = (int)qlora__jin_iso_week(d, &week);
    const qlora__jin_date_row rows[] = {{'Y', "%d", (int)d->year},
                                        {'y', "%02d", (int)(d->year % 100)},
                                        {'C', "%02d", (int)(d->year / 100)},
                                        {'m', "%02d", d->month},
                                        {'d', "%02d", d->day},
                                        {'e', "%2d", d->day},
                                        {'H', "%02d", d->hour},
                                        {'k', "%2d", d->hour},
                                        {'I', "%02d", hour12},
                                        {'l', "%2d", hour12},
                                        {'M', "%02d", d->minute},
                                        {'S', "%02d", d->second},
                                        {'f', "%06d", 0},
                                        {'j', "%03d", d->yearday},
                                        {'w', "%d", d->weekday},
                                        {'u', "%d", d->weekday == 0 ? 7 : d->weekday},
                                        {'U', "%02d", (d->yearday + 6 - d->weekday) / 7},
                                        {'W', "%02d", (d->yearday + 6 - from_monday) / 7},
                                        {'V', "%02d", week},
                                        {'G', "%d", week_year},
                                        {'g', "%02d", week_year % 100}};
    for (size_t i = 0; i < QLORA__TEXT_COUNT(rows); i++) {
        if (rows[i].letter == letter) {
            snprintf(out, 64, rows[i].format, rows[i].value);
            return true;
        }
    }
    return false;
}

// One letter of strftime in the C locale; NULL when it is not known.
static const char* qlora__jin_date_part(const qlora__jin_date* d, char letter, char out[64]) {
    static const char* const repeated[] = {
        "D%m/%d/%y", "F%Y-%m-%d", "T%H:%M:%S",   "R%H:%M", "c%a %b %e %H:%M:%S %Y",
        "x%m/%d/%y", "X%H:%M:%S", "r%I:%M:%S %p"};
    if (qlora__jin_date_number(d, letter, out)) {
        return out;
    }
    switch (letter) {
    case 'p':
        return d->hour < 12 ? "AM" : "PM";
    case 'P':
        return d->hour < 12 ? "am" : "pm";
    case 'A':
        return qlora__jin_days[d->weekday];
    case 'B':
        return qlora__jin_months[d->month - 1];
    case 'a':
        snprintf(out, 64, "%.3s", qlora__jin_days[d->weekday]);
        return out;
    case 'b':
    case 'h':
        snprintf(out, 64, "%.3s", qlora__jin_months[d->month - 1]);
        return out;
    case 'Z':
    case 'z':
        return ""; // the clock has no time zone
    case 'n':
        return "\n";
    case 't':
        return "\t";
    case '%':
        return "%";
    default:
        break;
    }
    for (size_t i = 0; i < QLORA__TEXT_COUNT(repeated); i++) {
        if (repeated[i][0] == letter) {
            return repeated[i] + 1;
        }
    }
    return NULL;
}

static qlora_result qlora__jin_strftime(qlora__jin_machine* m, const char* format, size_t size,
                                        bool inside, qlora__jin_buffer* out) {
    qlora__jin_date date;
    qlora__jin_date_of(m->clock, &date);
    for (size_t i = 0; i < size; i++) {
        char text[64];
        if (format[i] != '%' || i + 1 == size) {
            QLORA__TRY(qlora__jin_put(m, out, format + i, 1));
            continue;
        }
        char letter = format[++i];
        bool unpadded = letter == '-' && i + 1 < size; // %-d: without the zero
        letter = unpadded ? format[++i] : letter;
        const char* part = qlora__jin_date_part(&date, letter, text);
        if (part == NULL) {
            return qlora__jin_fail(m, "strftime_now: %%%c is not supported", letter);
        }
        if (unpadded) {
            while ((*part == '0' || *part == ' ') && part[1] != '\0') {
                part++;
            }
        }
        bool nested = strchr(part, '%') != NULL && letter != '%' && !inside;
        QLORA__TRY(nested ? qlora__jin_strftime(m, part, strlen(part), true, out)
                          : qlora__jin_puts(m, out, part));
    }
    return QLORA_OK;
}
