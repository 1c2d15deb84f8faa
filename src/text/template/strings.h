// What strings can do: the parts of Python's str that templates use.

// ---- arguments ----------------------------------------------------------------------------------

// Puts the arguments of a call in the order of `names` ("sep maxsplit"; with a slash at the start,
// keywords are not allowed). What is not given is MISSING.
static qlora_result qlora__jin_bind_args(qlora__jin_machine* m, const char* what, const char* names,
                                         size_t required, const qlora__jin_args* args,
                                         qlora__jin_value* out) {
    bool keywords = names[0] != '/';
    const char* at = names + (keywords ? 0 : 1);
    size_t count = 0;
    size_t taken = 0;
    while (*at != '\0') {
        size_t size = strcspn(at, " ");
        out[count] = qlora__jin_of(QLORA__JIN_MISSING);
        if (count < args->positional) {
            out[count] = args->items[count];
        }
        for (size_t i = 0; i < args->named && keywords; i++) {
            if (args->names[i]->bytes == size && memcmp(args->names[i]->data, at, size) == 0) {
                if (count < args->positional) {
                    return qlora__jin_fail(m, "%s: the argument \"%.*s\" is given twice", what,
                                           (int)size, at);
                }
                out[count] = args->items[args->positional + i];
                taken++;
            }
        }
        if (out[count].kind == QLORA__JIN_MISSING && count < required) {
            return qlora__jin_fail(m, "%s: the argument \"%.*s\" is missing", what, (int)size, at);
        }
        count++;
        at += size + (at[size] == ' ' ? 1 : 0);
    }
    if (args->positional > count) {
        return qlora__jin_fail(m, "%s: %llu arguments are given, at most %llu are possible", what,
                               (unsigned long long)args->positional, (unsigned long long)count);
    }
    if (taken < args->named) {
        return qlora__jin_fail(m, "%s: an argument is given by a name that is unknown", what);
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_need_string(qlora__jin_machine* m, const char* what,
                                           qlora__jin_value v) {
    if (v.kind == QLORA__JIN_STRING) {
        return QLORA_OK;
    }
    return v.kind == QLORA__JIN_UNDEFINED
               ? qlora__jin_undefined_error(m, v)
               : qlora__jin_fail(m, "%s: a string is needed, not a %s", what, qlora__jin_type(v));
}

static qlora_result qlora__jin_need_integer(qlora__jin_machine* m, const char* what,
                                            qlora__jin_value v, int64_t* out) {
    if (v.kind == QLORA__JIN_MISSING) {
        return QLORA_OK; // the default stays
    }
    if (!qlora__jin_is_integer(v)) {
        return v.kind == QLORA__JIN_UNDEFINED
                   ? qlora__jin_undefined_error(m, v)
                   : qlora__jin_fail(m, "%s: a whole number is needed, not a %s", what,
                                     qlora__jin_type(v));
    }
    *out = qlora__jin_integer_of(v);
    return QLORA_OK;
}

// A part of a string that shares its memory and stays Markup.
static qlora_result qlora__jin_part(qlora__jin_machine* m, qlora__jin_value s, size_t begin,
                                    size_t end, qlora__jin_value* out) {
    qlora__jin_value whole = s;
    QLORA__TRY(qlora__jin_string_share(m, whole.as.string->data + begin, end - begin, out));
    out->flag = whole.flag;
    return QLORA_OK;
}

// ---- case ---------------------------------------------------------------------------------------

enum { QLORA__JIN_NO_CASE, QLORA__JIN_LOWER_CASE, QLORA__JIN_UPPER_CASE, QLORA__JIN_TITLE_CASE };

// The case of a character. A letter of title case has another upper and another lower case.
static int qlora__jin_case_of(uint32_t code) {
    uint32_t other[3];
    uint32_t kind = qlora__jin_class(code);
    if (kind == QLORA__TEXT_C_UPPER) {
        (void)qlora__text_case_of(code, QLORA__TEXT_UPPER_CASE, other);
        return other[0] == code ? QLORA__JIN_UPPER_CASE : QLORA__JIN_TITLE_CASE;
    }
    if (kind == QLORA__TEXT_C_LOWER ||
        qlora__text_in_runs(qlora__text_lower_more_runs,
                            QLORA__TEXT_COUNT(qlora__text_lower_more_runs), code)) {
        return QLORA__JIN_LOWER_CASE;
    }
    return qlora__text_in_runs(qlora__text_upper_more_runs,
                               QLORA__TEXT_COUNT(qlora__text_upper_more_runs), code)
               ? QLORA__JIN_UPPER_CASE
               : QLORA__JIN_NO_CASE;
}

// Marks, points and the like, which neither begin nor end a word.
static bool qlora__jin_is_ignorable(uint32_t code) {
    return qlora__text_in_runs(qlora__text_ignorable_runs,
                               QLORA__TEXT_COUNT(qlora__text_ignorable_runs), code);
}

// A capital sigma at the end of a word has a lower case of its own. What is before `from` does not
// count.
static bool qlora__jin_final_sigma(const qlora__jin_string* s, size_t from, size_t at) {
    size_t step = 0;
    size_t before = at;
    uint32_t code = 0;
    do {
        if (before <= from) {
            return false;
        }
        before--;
        while (before > 0 && ((unsigned char)s->data[before] & 0xC0) == 0x80) {
            before--;
        }
        code = qlora__jin_code_at(s->data, s->bytes, before, &step);
    } while (qlora__jin_is_ignorable(code));
    if (qlora__jin_case_of(code) == QLORA__JIN_NO_CASE) {
        return false;
    }
    for (size_t after = at + 2; after < s->bytes; after += step) {
        code = qlora__jin_code_at(s->data, s->bytes, after, &step);
        if (!qlora__jin_is_ignorable(code)) {
            return qlora__jin_case_of(code) == QLORA__JIN_NO_CASE;
        }
    }
    return true;
}

static qlora_result qlora__jin_put_case(qlora__jin_machine* m, const qlora__jin_string* s,
                                        size_t from, size_t at, uint32_t code, qlora__text_case to,
                                        qlora__jin_buffer* out) {
    uint32_t codes[3];
    if (code == 0x3A3 && to == QLORA__TEXT_LOWER_CASE) {
        return qlora__jin_put_code(m, out, qlora__jin_final_sigma(s, from, at) ? 0x3C2 : 0x3C3);
    }
    size_t count = qlora__text_case_of(code, to, codes);
    for (size_t i = 0; i < count; i++) {
        QLORA__TRY(qlora__jin_put_code(m, out, codes[i]));
    }
    return QLORA_OK;
}

// How the case of each character is chosen.
enum {
    QLORA__JIN_ALL_LOWER,
    QLORA__JIN_ALL_UPPER,
    QLORA__JIN_SWAP,
    QLORA__JIN_FIRST,     // capitalize()
    QLORA__JIN_EACH_WORD, // title()
    QLORA__JIN_TITLE_FILTER
};

static qlora_result qlora__jin_recase(qlora__jin_machine* m, qlora__jin_value v, int how,
                                      qlora__jin_value* out) {
    const qlora__jin_string* s = v.as.string;
    qlora__jin_buffer buffer;
    bool inside = false; // of a word
    size_t from = 0;
    memset(&buffer, 0, sizeof buffer);
    QLORA__TRY(qlora__jin_work(m, s->bytes / 8));
    QLORA__TRY(qlora__jin_buffer_room(m, &buffer, s->bytes));
    for (size_t at = 0, step = 0; at < s->bytes; at += step) {
        uint32_t code = qlora__jin_code_at(s->data, s->bytes, at, &step);
        qlora__text_case to = QLORA__TEXT_LOWER_CASE;
        if (how == QLORA__JIN_ALL_UPPER) {
            to = QLORA__TEXT_UPPER_CASE;
        } else if (how == QLORA__JIN_SWAP) {
            int is = qlora__jin_case_of(code);
            if (is != QLORA__JIN_LOWER_CASE && is != QLORA__JIN_UPPER_CASE) {
                QLORA__TRY(qlora__jin_put_code(m, &buffer, code));
                continue;
            }
            to = is == QLORA__JIN_UPPER_CASE ? QLORA__TEXT_LOWER_CASE : QLORA__TEXT_UPPER_CASE;
        } else if (how == QLORA__JIN_FIRST) {
            to = at == 0 ? QLORA__TEXT_TITLE_CASE : QLORA__TEXT_LOWER_CASE;
        } else if (how == QLORA__JIN_EACH_WORD) {
            to = inside ? QLORA__TEXT_LOWER_CASE : QLORA__TEXT_TITLE_CASE;
            inside = qlora__jin_case_of(code) != QLORA__JIN_NO_CASE;
        } else if (how == QLORA__JIN_TITLE_FILTER) {
            bool border = qlora__jin_is_space(code) ||
                          (code < 0x80 && code > 0 && strchr("-({[<", (char)code) != NULL);
            to = inside && !border ? QLORA__TEXT_LOWER_CASE : QLORA__TEXT_UPPER_CASE;
            from = inside ? from : at + step; // the filter lowers the rest of a word alone
            inside = !border;
        }
        QLORA__TRY(qlora__jin_put_case(m, s, from, at, code, to, &buffer));
    }
    QLORA__TRY(qlora__jin_buffer_string(m, &buffer, out));
    out->flag = v.flag;
    return QLORA_OK;
}

#define QLORA__JIN_RECASE(name, how)                                                               \
    static qlora_result qlora__jin_str_##name(qlora__jin_machine* m, qlora__jin_value* in,         \
                                              qlora__jin_value* out) {                             \
        return qlora__jin_recase(m, in[0], how, out);                                              \
    }
QLORA__JIN_RECASE(lower, QLORA__JIN_ALL_LOWER)
QLORA__JIN_RECASE(upper, QLORA__JIN_ALL_UPPER)
QLORA__JIN_RECASE(swapcase, QLORA__JIN_SWAP)
QLORA__JIN_RECASE(capitalize, QLORA__JIN_FIRST)
QLORA__JIN_RECASE(title, QLORA__JIN_EACH_WORD)

// casefold(): the lower case of the upper case, but for two letters and a script in which the upper
// case came first.
static qlora_result qlora__jin_str_casefold(qlora__jin_machine* m, qlora__jin_value* in,
                                            qlora__jin_value* out) {
    const qlora__jin_string* s = in[0].as.string;
    qlora__jin_buffer buffer;
    memset(&buffer, 0, sizeof buffer);
    QLORA__TRY(qlora__jin_work(m, s->bytes / 8));
    for (size_t at = 0, step = 0; at < s->bytes; at += step) {
        uint32_t code = qlora__jin_code_at(s->data, s->bytes, at, &step);
        bool cherokee = (code >= 0x13A0 && code <= 0x13FD) || (code >= 0xAB70 && code <= 0xABBF);
        uint32_t upper[3] = {code, 0, 0};
        size_t count = code == 0x131 ? 1 : qlora__text_case_of(code, QLORA__TEXT_UPPER_CASE, upper);
        if (code == 0x1E9E) {
            QLORA__TRY(qlora__jin_puts(m, &buffer, "ss"));
            continue;
        }
        for (size_t i = 0; i < count; i++) {
            uint32_t lower[3] = {upper[i], 0, 0};
            size_t few =
                cherokee ? 1 : qlora__text_case_of(upper[i], QLORA__TEXT_LOWER_CASE, lower);
            for (size_t k = 0; k < few; k++) {
                QLORA__TRY(qlora__jin_put_code(m, &buffer, lower[k]));
            }
        }
    }
    QLORA__TRY(qlora__jin_buffer_string(m, &buffer, out));
    out->flag = in[0].flag;
    return QLORA_OK;
}

// ---- strip --------------------------------------------------------------------------------------

// Whether the character is to be stripped: one of `set`, or whitespace.
static bool qlora__jin_strips(const qlora__jin_string* set, const char* data, size_t size,
                              uint32_t code) {
    return set == NULL ? qlora__jin_is_space(code)
                       : qlora__jin_find_bytes(set->data, set->bytes, 0, data, size) != SIZE_MAX;
}

static qlora_result qlora__jin_strip(qlora__jin_machine* m, qlora__jin_value v,
                                     qlora__jin_value chars, bool left, bool right,
                                     qlora__jin_value* out) {
    const qlora__jin_string* s = v.as.string;
    size_t begin = 0;
    size_t end = s->bytes;
    bool given = chars.kind != QLORA__JIN_MISSING && chars.kind != QLORA__JIN_NONE;
    if (given) {
        QLORA__TRY(qlora__jin_need_string(m, "strip", chars));
    }
    const qlora__jin_string* set = given ? chars.as.string : NULL;
    QLORA__TRY(qlora__jin_work(m, s->bytes / 32));
    while (left && begin < end) {
        size_t step = 0;
        uint32_t code = qlora__jin_code_at(s->data, end, begin, &step);
        if (!qlora__jin_strips(set, s->data + begin, step, code)) {
            break;
        }
        begin += step;
    }
    while (right && end > begin) {
        size_t step = 0;
        size_t at = end - 1;
        while (at > begin && ((unsigned char)s->data[at] & 0xC0) == 0x80) {
            at--;
        }
        uint32_t code = qlora__jin_code_at(s->data, end, at, &step);
        if (!qlora__jin_strips(set, s->data + at, step, code)) {
            break;
        }
        end = at;
    }
    return qlora__jin_part(m, v, begin, end, out);
}

static qlora_result qlora__jin_str_strip(qlora__jin_machine* m, qlora__jin_value* in,
                                         qlora__jin_value* out) {
    return qlora__jin_strip(m, in[0], in[1], true, true, out);
}

static qlora_result qlora__jin_str_lstrip(qlora__jin_machine* m, qlora__jin_value* in,
                                          qlora__jin_value* out) {
    return qlora__jin_strip(m, in[0], in[1], true, false, out);
}

static qlora_result qlora__jin_str_rstrip(qlora__jin_machine* m, qlora__jin_value* in,
                                          qlora__jin_value* out) {
    return qlora__jin_strip(m, in[0], in[1], false, true, out);
}

// ---- split --------------------------------------------------------------------------------------

static qlora_result qlora__jin_add_part(qlora__jin_machine* m, qlora__jin_value v, size_t begin,
                                        size_t end, qlora__jin_value* list) {
    qlora__jin_value part;
    QLORA__TRY(qlora__jin_part(m, v, begin, end, &part));
    return qlora__jin_list_add(m, list->as.list, part);
}

static qlora_result qlora__jin_split_space(qlora__jin_machine* m, qlora__jin_value v, int64_t limit,
                                           qlora__jin_value* out) {
    const qlora__jin_string* s = v.as.string;
    size_t at = qlora__jin_skip_space(s->data, s->bytes, 0);
    int64_t done = 0;
    while (at < s->bytes) {
        size_t end = at;
        size_t step = 0;
        if (limit >= 0 && done == limit) {
            return qlora__jin_add_part(m, v, at, qlora__jin_back_space(s->data, at, s->bytes), out);
        }
        while (end < s->bytes &&
               !qlora__jin_is_space(qlora__jin_code_at(s->data, s->bytes, end, &step))) {
            end += step;
        }
        QLORA__TRY(qlora__jin_add_part(m, v, at, end, out));
        at = qlora__jin_skip_space(s->data, s->bytes, end);
        done++;
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_split(qlora__jin_machine* m, qlora__jin_value v,
                                     qlora__jin_value separator, int64_t limit,
                                     qlora__jin_value* out) {
    const qlora__jin_string* s = v.as.string;
    QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_LIST, 4, out));
    QLORA__TRY(qlora__jin_work(m, s->bytes / 16));
    if (separator.kind == QLORA__JIN_MISSING || separator.kind == QLORA__JIN_NONE) {
        return qlora__jin_split_space(m, v, limit, out);
    }
    QLORA__TRY(qlora__jin_need_string(m, "split", separator));
    const qlora__jin_string* by = separator.as.string;
    if (by->bytes == 0) {
        return qlora__jin_fail(m, "split: the separator is empty");
    }
    size_t at = 0;
    for (int64_t done = 0; limit < 0 || done < limit; done++) {
        size_t hit = qlora__jin_find_bytes(s->data, s->bytes, at, by->data, by->bytes);
        if (hit == SIZE_MAX) {
            break;
        }
        QLORA__TRY(qlora__jin_add_part(m, v, at, hit, out));
        at = hit + by->bytes;
    }
    return qlora__jin_add_part(m, v, at, s->bytes, out);
}

// The last place of `part` in s[begin..end), in bytes; SIZE_MAX when it is not there.
static size_t qlora__jin_rfind_bytes(const char* data, size_t begin, size_t end, const char* part,
                                     size_t length) {
    if (length > end - begin) {
        return SIZE_MAX;
    }
    if (length >= QLORA__JIN_LONG) {
        return qlora__jin_find_long(data, begin, end, part, length, true);
    }
    for (size_t at = end - length + 1; at > begin; at--) {
        if (length == 0 || memcmp(data + at - 1, part, length) == 0) {
            return at - 1;
        }
    }
    return SIZE_MAX;
}

static void qlora__jin_reverse(qlora__jin_list* list) {
    for (size_t i = 0; i < list->count / 2; i++) {
        qlora__jin_value swap = list->items[i];
        list->items[i] = list->items[list->count - 1 - i];
        list->items[list->count - 1 - i] = swap;
    }
}

static qlora_result qlora__jin_rsplit(qlora__jin_machine* m, qlora__jin_value v,
                                      qlora__jin_value separator, int64_t limit,
                                      qlora__jin_value* out) {
    const qlora__jin_string* s = v.as.string;
    bool space = separator.kind == QLORA__JIN_MISSING || separator.kind == QLORA__JIN_NONE;
    if (limit < 0) {
        return qlora__jin_split(m, v, separator, limit, out);
    }
    QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_LIST, 4, out));
    QLORA__TRY(qlora__jin_work(m, s->bytes / 16));
    if (!space) {
        QLORA__TRY(qlora__jin_need_string(m, "rsplit", separator));
        if (separator.as.string->bytes == 0) {
            return qlora__jin_fail(m, "rsplit: the separator is empty");
        }
    }
    size_t end = space ? qlora__jin_back_space(s->data, 0, s->bytes) : s->bytes;
    for (int64_t done = 0; done < limit && (!space || end > 0); done++) {
        size_t hit = end;
        size_t next = 0;
        if (space) {
            while (hit > 0 && qlora__jin_back_space(s->data, 0, hit) == hit) {
                hit--;
                while (hit > 0 && ((unsigned char)s->data[hit] & 0xC0) == 0x80) {
                    hit--;
                }
            }
            next = qlora__jin_back_space(s->data, 0, hit);
            QLORA__TRY(qlora__jin_add_part(m, v, hit, end, out));
            end = next;
            continue;
        }
        const qlora__jin_string* by = separator.as.string;
        hit = qlora__jin_rfind_bytes(s->data, 0, end, by->data, by->bytes);
        if (hit == SIZE_MAX) {
            break;
        }
        QLORA__TRY(qlora__jin_add_part(m, v, hit + by->bytes, end, out));
        end = hit;
    }
    if (!space || end > 0) {
        size_t begin = space ? qlora__jin_skip_space(s->data, end, 0) : 0;
        QLORA__TRY(qlora__jin_add_part(m, v, begin, end, out));
    }
    qlora__jin_reverse(out->as.list);
    return QLORA_OK;
}

static qlora_result qlora__jin_str_split(qlora__jin_machine* m, qlora__jin_value* in,
                                         qlora__jin_value* out) {
    int64_t limit = -1;
    QLORA__TRY(qlora__jin_need_integer(m, "split", in[2], &limit));
    return qlora__jin_split(m, in[0], in[1], limit, out);
}

static qlora_result qlora__jin_str_rsplit(qlora__jin_machine* m, qlora__jin_value* in,
                                          qlora__jin_value* out) {
    int64_t limit = -1;
    QLORA__TRY(qlora__jin_need_integer(m, "rsplit", in[2], &limit));
    return qlora__jin_rsplit(m, in[0], in[1], limit, out);
}

static bool qlora__jin_is_line_end(uint32_t code) {
    return (code >= 10 && code <= 13) || (code >= 0x1C && code <= 0x1E) || code == 0x85 ||
           code == 0x2028 || code == 0x2029;
}

static qlora_result qlora__jin_str_splitlines(qlora__jin_machine* m, qlora__jin_value* in,
                                              qlora__jin_value* out) {
    const qlora__jin_string* s = in[0].as.string;
    int64_t keep = 0;
    size_t begin = 0;
    QLORA__TRY(qlora__jin_need_integer(m, "splitlines", in[1], &keep));
    QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_LIST, 4, out));
    QLORA__TRY(qlora__jin_work(m, s->bytes / 16));
    for (size_t at = 0, step = 0; at < s->bytes; at += step) {
        uint32_t code = qlora__jin_code_at(s->data, s->bytes, at, &step);
        if (qlora__jin_is_line_end(code)) {
            bool two = code == '\r' && at + 1 < s->bytes && s->data[at + 1] == '\n';
            step += two ? 1 : 0;
            QLORA__TRY(qlora__jin_add_part(m, in[0], begin, keep != 0 ? at + step : at, out));
            begin = at + step;
        }
    }
    return begin < s->bytes ? qlora__jin_add_part(m, in[0], begin, s->bytes, out) : QLORA_OK;
}

static qlora_result qlora__jin_partition(qlora__jin_machine* m, qlora__jin_value* in, bool last,
                                         qlora__jin_value* out) {
    const qlora__jin_string* s = in[0].as.string;
    QLORA__TRY(qlora__jin_need_string(m, "partition", in[1]));
    const qlora__jin_string* by = in[1].as.string;
    if (by->bytes == 0) {
        return qlora__jin_fail(m, "partition: the separator is empty");
    }
    QLORA__TRY(qlora__jin_work(m, s->bytes / 16));
    size_t hit = last ? qlora__jin_rfind_bytes(s->data, 0, s->bytes, by->data, by->bytes)
                      : qlora__jin_find_bytes(s->data, s->bytes, 0, by->data, by->bytes);
    size_t first = hit != SIZE_MAX ? hit : last ? 0 : s->bytes;
    size_t second = hit != SIZE_MAX ? hit + by->bytes : first;
    QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_TUPLE, 3, out));
    QLORA__TRY(qlora__jin_add_part(m, in[0], 0, first, out));
    QLORA__TRY(qlora__jin_add_part(m, in[0], first, second, out));
    return qlora__jin_add_part(m, in[0], second, s->bytes, out);
}

static qlora_result qlora__jin_str_partition(qlora__jin_machine* m, qlora__jin_value* in,
                                             qlora__jin_value* out) {
    return qlora__jin_partition(m, in, false, out);
}

static qlora_result qlora__jin_str_rpartition(qlora__jin_machine* m, qlora__jin_value* in,
                                              qlora__jin_value* out) {
    return qlora__jin_partition(m, in, true, out);
}

// ---- searching ----------------------------------------------------------------------------------

// s[start:end] of find, count, startswith: in bytes. False when start is behind the end.
static qlora_result qlora__jin_limits(qlora__jin_machine* m, qlora__jin_value* in, size_t* begin,
                                      size_t* end, bool* valid) {
    const qlora__jin_string* s = in[0].as.string;
    int64_t count = (int64_t)s->chars;
    int64_t from = 0;
    int64_t to = count;
    if (in[2].kind != QLORA__JIN_NONE) {
        QLORA__TRY(qlora__jin_need_integer(m, "start", in[2], &from));
    }
    if (in[3].kind != QLORA__JIN_NONE) {
        QLORA__TRY(qlora__jin_need_integer(m, "end", in[3], &to));
    }
    QLORA__TRY(qlora__jin_work(m, s->bytes / 16));
    from += from < 0 ? count : 0;
    to += to < 0 ? count : 0;
    from = from < 0 ? 0 : from;
    to = to < 0 ? 0 : to > count ? count : to;
    *valid = from <= to;
    *begin = *valid ? qlora__jin_byte_of(s, (size_t)from) : 0;
    *end = *valid ? qlora__jin_byte_of(s, (size_t)to) : 0;
    return QLORA_OK;
}

// The index in characters, or -1.
static qlora_result qlora__jin_find(qlora__jin_machine* m, qlora__jin_value* in, bool last,
                                    int64_t* out) {
    const qlora__jin_string* s = in[0].as.string;
    size_t begin = 0;
    size_t end = 0;
    bool valid = false;
    QLORA__TRY(qlora__jin_need_string(m, "find", in[1]));
    QLORA__TRY(qlora__jin_limits(m, in, &begin, &end, &valid));
    const qlora__jin_string* part = in[1].as.string;
    size_t hit = !valid ? SIZE_MAX
                 : last ? qlora__jin_rfind_bytes(s->data, begin, end, part->data, part->bytes)
                        : qlora__jin_find_bytes(s->data, end, begin, part->data, part->bytes);
    *out = hit == SIZE_MAX ? -1 : (int64_t)qlora__jin_count_chars(s->data, hit);
    return QLORA_OK;
}

#define QLORA__JIN_FIND(name, last, must)                                                          \
    static qlora_result qlora__jin_str_##name(qlora__jin_machine* m, qlora__jin_value* in,         \
                                              qlora__jin_value* out) {                             \
        int64_t at = 0;                                                                            \
        QLORA__TRY(qlora__jin_find(m, in, last, &at));                                             \
        *out = qlora__jin_int(at);                                                                 \
        return at >= 0 || !(must) ? QLORA_OK : qlora__jin_fail(m, "the text is not found");        \
    }
QLORA__JIN_FIND(find, false, false)
QLORA__JIN_FIND(rfind, true, false)
QLORA__JIN_FIND(index, false, true)
QLORA__JIN_FIND(rindex, true, true)

static qlora_result qlora__jin_str_count(qlora__jin_machine* m, qlora__jin_value* in,
                                         qlora__jin_value* out) {
    const qlora__jin_string* s = in[0].as.string;
    size_t begin = 0;
    size_t end = 0;
    bool valid = false;
    int64_t count = 0;
    QLORA__TRY(qlora__jin_need_string(m, "count", in[1]));
    QLORA__TRY(qlora__jin_limits(m, in, &begin, &end, &valid));
    const qlora__jin_string* part = in[1].as.string;
    if (part->bytes == 0) {
        *out = qlora__jin_int(
            valid ? (int64_t)qlora__jin_count_chars(s->data + begin, end - begin) + 1 : 0);
        return QLORA_OK;
    }
    while (valid && (begin = qlora__jin_find_bytes(s->data, end, begin, part->data, part->bytes)) !=
                        SIZE_MAX) {
        QLORA__TRY(qlora__jin_work(m, 1));
        begin += part->bytes;
        count++;
    }
    *out = qlora__jin_int(count);
    return QLORA_OK;
}

// startswith or endswith, for one string or a tuple of them
static qlora_result qlora__jin_edge(qlora__jin_machine* m, qlora__jin_value* in, bool end_wanted,
                                    qlora__jin_value* out) {
    const qlora__jin_string* s = in[0].as.string;
    size_t begin = 0;
    size_t end = 0;
    bool valid = false;
    bool found = false;
    QLORA__TRY(qlora__jin_limits(m, in, &begin, &end, &valid));
    bool many = in[1].kind == QLORA__JIN_TUPLE;
    size_t count = many ? in[1].as.list->count : 1;
    for (size_t i = 0; i < count; i++) {
        qlora__jin_value part = many ? in[1].as.list->items[i] : in[1];
        QLORA__TRY(qlora__jin_need_string(m, "startswith or endswith", part));
        size_t size = part.as.string->bytes;
        size_t at = end_wanted ? end - size : begin;
        found = found || (valid && size <= end - begin &&
                          (size == 0 || memcmp(s->data + at, part.as.string->data, size) == 0));
    }
    *out = qlora__jin_bool(found);
    return QLORA_OK;
}

static qlora_result qlora__jin_str_startswith(qlora__jin_machine* m, qlora__jin_value* in,
                                              qlora__jin_value* out) {
    return qlora__jin_edge(m, in, false, out);
}

static qlora_result qlora__jin_str_endswith(qlora__jin_machine* m, qlora__jin_value* in,
                                            qlora__jin_value* out) {
    return qlora__jin_edge(m, in, true, out);
}

static qlora_result qlora__jin_str_removeprefix(qlora__jin_machine* m, qlora__jin_value* in,
                                                qlora__jin_value* out) {
    const qlora__jin_string* s = in[0].as.string;
    QLORA__TRY(qlora__jin_need_string(m, "removeprefix", in[1]));
    size_t size = in[1].as.string->bytes;
    bool there = size <= s->bytes && size > 0 && memcmp(s->data, in[1].as.string->data, size) == 0;
    return qlora__jin_part(m, in[0], there ? size : 0, s->bytes, out);
}

static qlora_result qlora__jin_str_removesuffix(qlora__jin_machine* m, qlora__jin_value* in,
                                                qlora__jin_value* out) {
    const qlora__jin_string* s = in[0].as.string;
    QLORA__TRY(qlora__jin_need_string(m, "removesuffix", in[1]));
    size_t size = in[1].as.string->bytes;
    bool there = size <= s->bytes && size > 0 &&
                 memcmp(s->data + s->bytes - size, in[1].as.string->data, size) == 0;
    return qlora__jin_part(m, in[0], 0, there ? s->bytes - size : s->bytes, out);
}

static qlora_result qlora__jin_replace(qlora__jin_machine* m, qlora__jin_value v,
                                       const qlora__jin_string* from, const qlora__jin_string* to,
                                       int64_t limit, qlora__jin_value* out) {
    const qlora__jin_string* s = v.as.string;
    qlora__jin_buffer buffer;
    size_t at = 0;
    memset(&buffer, 0, sizeof buffer);
    QLORA__TRY(qlora__jin_work(m, s->bytes / 16));
    for (int64_t done = 0; limit < 0 || done < limit; done++) {
        size_t hit = qlora__jin_find_bytes(s->data, s->bytes, at, from->data, from->bytes);
        if (hit == SIZE_MAX) {
            break;
        }
        QLORA__TRY(qlora__jin_work(m, 1));
        QLORA__TRY(qlora__jin_put(m, &buffer, s->data + at, hit - at));
        QLORA__TRY(qlora__jin_put(m, &buffer, to->data, to->bytes));
        at = hit + from->bytes;
        if (from->bytes == 0) { // between all characters, and at both ends
            size_t step = 0;
            if (at >= s->bytes) {
                break;
            }
            qlora__jin_code_at(s->data, s->bytes, at, &step);
            QLORA__TRY(qlora__jin_put(m, &buffer, s->data + at, step));
            at += step;
        }
    }
    QLORA__TRY(qlora__jin_put(m, &buffer, s->data + at, s->bytes - at));
    QLORA__TRY(qlora__jin_buffer_string(m, &buffer, out));
    out->flag = v.flag;
    return QLORA_OK;
}

static qlora_result qlora__jin_str_replace(qlora__jin_machine* m, qlora__jin_value* in,
                                           qlora__jin_value* out) {
    int64_t limit = -1;
    QLORA__TRY(qlora__jin_need_string(m, "replace", in[1]));
    if (in[0].flag == 0) {
        QLORA__TRY(qlora__jin_need_string(m, "replace", in[2]));
    }
    QLORA__TRY(qlora__jin_need_integer(m, "replace", in[3], &limit));
    qlora__jin_value to = in[2];
    if (in[0].flag != 0) {
        qlora__jin_buffer escaped;
        memset(&escaped, 0, sizeof escaped);
        QLORA__TRY(qlora__jin_escape_html(m, to, &escaped));
        QLORA__TRY(qlora__jin_buffer_string(m, &escaped, &to));
    }
    return qlora__jin_replace(m, in[0], in[1].as.string, to.as.string, limit, out);
}
