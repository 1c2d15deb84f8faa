// Text from a format: the operator %, str.format, strftime.

typedef struct qlora__jin_spec {
    uint32_t fill;
    char align; // < > ^ = or 0
    char sign;  // + - or a space
    bool alternate;
    bool zero;
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

// Digits in groups of three, from the right, up to a point or exponent.
static void qlora__jin_group(const char* digits, char separator, char* out, size_t room) {
    size_t whole = strspn(digits, "0123456789");
    size_t n = 0;
    for (size_t i = 0; digits[i] != '\0' && n + 2 < room; i++) {
        if (separator != '\0' && i > 0 && i < whole && (whole - i) % 3 == 0) {
            out[n++] = separator;
        }
        out[n++] = digits[i];
    }
    out[n] = '\0';
}

// A number without its sign, as text.
static qlora_result qlora__jin_format_digits(qlora__jin_machine* m, qlora__jin_value v,
                                             const qlora__jin_spec* spec, char* out, size_t room) {
    char type = spec->type;
    if (strchr("eEfFgG%", type) != NULL && type != '\0') {
        char format[8];
        double x = qlora__jin_real_of(v);
        x = type == '%' ? x * 100.0 : x;
        x = x < 0.0 ? -x : x;
        int64_t precision = spec->precision < 0 ? 6 : spec->precision;
        if (precision > 100) {
            return qlora__jin_fail(m, "a precision above 100 is not supported");
        }
        snprintf(format, sizeof format, "%%.*%c", type == '%' || type == 'F' ? 'f' : type);
        // the formats differ only in their last letter, and all take an int and a double
        int wrote = format[3] == 'f'   ? snprintf(out, room, "%.*f", (int)precision, x)
                    : format[3] == 'e' ? snprintf(out, room, "%.*e", (int)precision, x)
                    : format[3] == 'E' ? snprintf(out, room, "%.*E", (int)precision, x)
                    : format[3] == 'g' ? snprintf(out, room, "%.*g", (int)precision, x)
                                       : snprintf(out, room, "%.*G", (int)precision, x);
        for (char* c = out; *c != '\0'; c++) {
            *c = *c == ',' ? '.' : *c; // the locale's decimal point
        }
        if (type == '%' && wrote > 0 && (size_t)wrote + 1 < room) {
            out[wrote] = '%';
            out[wrote + 1] = '\0';
        }
        return QLORA_OK;
    }
    int64_t integer = qlora__jin_integer_of(v);
    uint64_t size = integer < 0 ? 0 - (uint64_t)integer : (uint64_t)integer;
    if (type == 'b') {
        size_t n = 0;
        int top = 63;
        while (top > 0 && (size >> top & 1) == 0) {
            top--;
        }
        for (; top >= 0; top--) {
            out[n++] = (size >> top & 1) != 0 ? '1' : '0';
        }
        out[n] = '\0';
        return QLORA_OK;
    }
    const char* format = type == 'x'   ? "%llx"
                         : type == 'X' ? "%llX"
                         : type == 'o' ? "%llo"
                                       : "%llu";
    snprintf(out, room, format, (unsigned long long)size);
    return QLORA_OK;
}

static qlora_result qlora__jin_format_number(qlora__jin_machine* m, qlora__jin_value v,
                                             const qlora__jin_spec* given, qlora__jin_buffer* out) {
    char digits[512];
    char grouped[700];
    char text[720];
    qlora__jin_spec spec = *given;
    bool real = v.kind == QLORA__JIN_FLOAT;
    bool negative = real ? v.as.real < 0.0 : qlora__jin_integer_of(v) < 0;
    if (spec.type == '\0' && real && spec.precision < 0) {
        char shortest[48];
        qlora__jin_format_double(v.as.real, shortest);
        negative = shortest[0] == '-';
        snprintf(digits, sizeof digits, "%s", shortest + (negative ? 1 : 0));
    } else {
        spec.type = spec.type != '\0' ? spec.type : real ? 'g' : 'd';
        spec.type = spec.type == 'i' || spec.type == 'u' || spec.type == 'n' ? 'd' : spec.type;
        if (strchr("dxXobeEfFgG%", spec.type) == NULL || (real && strchr("dxXob", spec.type))) {
            return qlora__jin_fail(m, "the format \"%c\" does not fit a %s", spec.type,
                                   qlora__jin_type(v));
        }
        QLORA__TRY(qlora__jin_format_digits(m, v, &spec, digits, sizeof digits));
    }
    qlora__jin_group(digits, spec.group, grouped, sizeof grouped);
    const char* sign = negative ? "-" : spec.sign == '+' ? "+" : spec.sign == ' ' ? " " : "";
    const char* prefix = !spec.alternate    ? ""
                         : spec.type == 'x' ? "0x"
                         : spec.type == 'X' ? "0X"
                         : spec.type == 'o' ? "0o"
                         : spec.type == 'b' ? "0b"
                                            : "";
    char align = spec.align != '\0' ? spec.align : '>';
    if (spec.zero && spec.align == '\0') {
        align = '=';
        spec.fill = '0';
    }
    if (align == '=') {
        QLORA__TRY(qlora__jin_puts(m, out, sign));
        QLORA__TRY(qlora__jin_puts(m, out, prefix));
        int64_t used = (int64_t)(strlen(sign) + strlen(prefix));
        spec.width = spec.width > used ? spec.width - used : 0;
        return qlora__jin_pad(m, grouped, strlen(grouped), &spec, '>', out);
    }
    snprintf(text, sizeof text, "%s%s%s", sign, prefix, grouped);
    return qlora__jin_pad(m, text, strlen(text), &spec, align, out);
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

static qlora_result qlora__jin_percent_one(qlora__jin_machine* m, qlora__jin_value v,
                                           qlora__jin_spec* spec, qlora__jin_buffer* out) {
    qlora__jin_value text;
    if (spec->type == 's' || spec->type == 'r' || spec->type == 'a') {
        qlora__jin_buffer buffer;
        memset(&buffer, 0, sizeof buffer);
        QLORA__TRY(spec->type == 's' ? qlora__jin_print(m, v, &buffer)
                                     : qlora__jin_repr(m, v, &buffer));
        QLORA__TRY(qlora__jin_buffer_string(m, &buffer, &text));
        spec->align = spec->align != '\0' ? spec->align : '>';
        return qlora__jin_format_string(m, text, spec, out);
    }
    if (spec->type == 'c') {
        if (v.kind == QLORA__JIN_STRING && v.as.string->chars == 1) {
            return qlora__jin_format_string(m, v, spec, out);
        }
        return qlora__jin_fail(m, "%%c needs one character");
    }
    if (v.kind == QLORA__JIN_UNDEFINED) {
        return qlora__jin_undefined_error(m, v);
    }
    if (strchr("diuxXoeEfFgG", spec->type) == NULL || spec->type == '\0') {
        return qlora__jin_fail(m, "the format %%%c is not supported", spec->type);
    }
    if (!qlora__jin_is_number(v)) {
        return qlora__jin_fail(m, "the format %%%c needs a number, not a %s", spec->type,
                               qlora__jin_type(v));
    }
    if (v.kind == QLORA__JIN_FLOAT && strchr("diu", spec->type) != NULL) {
        v = qlora__jin_int((int64_t)v.as.real);
    }
    if (spec->precision >= 0 && strchr("diuxXo", spec->type) != NULL) {
        return qlora__jin_fail(m, "a precision with %%%c is not supported", spec->type);
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
    if (*at < s->bytes && s->data[*at] == '.') {
        *at += 1;
        QLORA__TRY(qlora__jin_percent_size(m, s, at, p->args, &p->used, &spec.precision));
    }
    if (*at >= s->bytes) {
        return qlora__jin_fail(m, "a format ends inside %%");
    }
    spec.type = s->data[(*at)++];
    if (spec.type == '%') {
        return qlora__jin_put(m, out, "%", 1);
    }
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
    if (at < size && text[at] == '#') {
        spec->alternate = true;
        at++;
    }
    if (at < size && text[at] == '0') {
        spec->zero = true;
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

static qlora_result qlora__jin_format_value(qlora__jin_machine* m, qlora__jin_value v,
                                            const char* text, size_t size, qlora__jin_buffer* out) {
    qlora__jin_spec spec;
    if (size == 0) {
        return qlora__jin_print(m, v, out);
    }
    QLORA__TRY(qlora__jin_read_spec(m, text, size, &spec));
    if (v.kind == QLORA__JIN_STRING && (spec.type == '\0' || spec.type == 's')) {
        if (spec.zero && spec.align == '\0') {
            spec.fill = '0';
        }
        return spec.align == '=' || spec.sign != '\0'
                   ? qlora__jin_fail(m, "a format for numbers is used for a string")
                   : qlora__jin_format_string(m, v, &spec, out);
    }
    if (qlora__jin_is_number(v) && spec.type != 's') {
        if (v.kind == QLORA__JIN_BOOL) {
            v = qlora__jin_int(qlora__jin_integer_of(v));
        }
        return qlora__jin_format_number(m, v, &spec, out);
    }
    return qlora__jin_fail(m, "a %s cannot be printed with a format", qlora__jin_type(v));
}

// The value that {name.attribute[item]} means.
static qlora_result qlora__jin_format_field(qlora__jin_machine* m, const char* text, size_t size,
                                            const qlora__jin_args* args, size_t* automatic,
                                            qlora__jin_value* out) {
    size_t at = 0;
    while (at < size && text[at] != '.' && text[at] != '[') {
        at++;
    }
    size_t digits = 0;
    int64_t index = qlora__jin_read_number(text, at, &digits);
    if (at == 0 || digits == at) {
        index = at == 0 ? (int64_t)(*automatic)++ : index;
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
                                           const qlora__jin_args* args, size_t* automatic,
                                           qlora__jin_buffer* out) {
    size_t colon = 0;
    size_t bang = SIZE_MAX;
    qlora__jin_value value;
    qlora__jin_buffer shown;
    memset(&shown, 0, sizeof shown);
    while (colon < size && text[colon] != ':') {
        bang = text[colon] == '!' && bang == SIZE_MAX ? colon : bang;
        colon++;
    }
    if (memchr(text, '{', size) != NULL) {
        return qlora__jin_fail(m, "format: braces inside braces are not supported");
    }
    size_t name = bang != SIZE_MAX ? bang : colon;
    QLORA__TRY(qlora__jin_format_field(m, text, name, args, automatic, &value));
    if (bang != SIZE_MAX) {
        char how = bang + 1 < colon ? text[bang + 1] : '\0';
        if (bang + 2 != colon || (how != 'r' && how != 's')) {
            return qlora__jin_fail(m, "format: unknown conversion after !");
        }
        QLORA__TRY(how == 'r' ? qlora__jin_repr(m, value, &shown)
                              : qlora__jin_print(m, value, &shown));
        QLORA__TRY(qlora__jin_buffer_string(m, &shown, &value));
    }
    size_t spec = colon < size ? colon + 1 : size;
    return qlora__jin_format_value(m, value, text + spec, size - spec, out);
}

static qlora_result qlora__jin_format(qlora__jin_machine* m, qlora__jin_value format,
                                      const qlora__jin_args* args, qlora__jin_value* out) {
    const qlora__jin_string* s = format.as.string;
    qlora__jin_buffer buffer;
    size_t automatic = 0;
    memset(&buffer, 0, sizeof buffer);
    if (format.flag != 0) {
        return qlora__jin_fail(m, "format of a safe string is not supported");
    }
    for (size_t at = 0; at < s->bytes;) {
        char c = s->data[at];
        bool twice = at + 1 < s->bytes && s->data[at + 1] == c;
        if ((c == '{' || c == '}') && twice) {
            QLORA__TRY(qlora__jin_put(m, &buffer, &c, 1));
            at += 2;
        } else if (c == '{') {
            size_t close = qlora__jin_find_bytes(s->data, s->bytes, at, "}", 1);
            if (close == SIZE_MAX) {
                return qlora__jin_fail(m, "format: a { is not closed");
            }
            QLORA__TRY(qlora__jin_format_part(m, s->data + at + 1, close - at - 1, args, &automatic,
                                              &buffer));
            at = close + 1;
        } else if (c == '}') {
            return qlora__jin_fail(m, "format: a } without a {");
        } else {
            QLORA__TRY(qlora__jin_put(m, &buffer, &c, 1));
            at++;
        }
    }
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
    bool leap = (d->year % 4 == 0 && d->year % 100 != 0) || d->year % 400 == 0;
    static const int before[] = {0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334};
    d->yearday = before[d->month - 1] + d->day + (leap && d->month > 2 ? 1 : 0);
}

// One letter of strftime in the C locale; NULL when it is not known. It is long because each letter
// is a case.
static const char* qlora__jin_date_part(const qlora__jin_date* d, char letter, char out[64]) {
    static const char* const repeated[] = {
        "D%m/%d/%y", "F%Y-%m-%d", "T%H:%M:%S",   "R%H:%M", "c%a %b %e %H:%M:%S %Y",
        "x%m/%d/%y", "X%H:%M:%S", "r%I:%M:%S %p"};
    int hour12 = d->hour % 12 == 0 ? 12 : d->hour % 12;
    switch (letter) {
    case 'Y':
        snprintf(out, 64, "%lld", (long long)d->year);
        return out;
    case 'y':
        snprintf(out, 64, "%02d", (int)(d->year % 100));
        return out;
    case 'm':
        snprintf(out, 64, "%02d", d->month);
        return out;
    case 'd':
        snprintf(out, 64, "%02d", d->day);
        return out;
    case 'e':
        snprintf(out, 64, "%2d", d->day);
        return out;
    case 'H':
        snprintf(out, 64, "%02d", d->hour);
        return out;
    case 'I':
        snprintf(out, 64, "%02d", hour12);
        return out;
    case 'l':
        snprintf(out, 64, "%2d", hour12);
        return out;
    case 'k':
        snprintf(out, 64, "%2d", d->hour);
        return out;
    case 'M':
        snprintf(out, 64, "%02d", d->minute);
        return out;
    case 'S':
        snprintf(out, 64, "%02d", d->second);
        return out;
    case 'f':
        return "000000";
    case 'p':
        return d->hour < 12 ? "AM" : "PM";
    case 'j':
        snprintf(out, 64, "%03d", d->yearday);
        return out;
    case 'w':
        snprintf(out, 64, "%d", d->weekday);
        return out;
    case 'u':
        snprintf(out, 64, "%d", d->weekday == 0 ? 7 : d->weekday);
        return out;
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
