// Filters that lay text out: wordwrap and pprint.

// ---- wordwrap -----------------------------------------------------------------------------------

// A line as code points, and where each starts; starts[count] is its end.
typedef struct qlora__jin_line {
    uint32_t* codes;
    size_t* starts;
    size_t count;
} qlora__jin_line;

static qlora_result qlora__jin_line_make(qlora__jin_machine* m, const qlora__jin_string* s,
                                         qlora__jin_line* line) {
    void* codes = NULL;
    void* starts = NULL;
    QLORA__TRY(qlora__jin_work(m, s->bytes / 4));
    QLORA__TRY(qlora__jin_get(m, (s->chars + 1) * sizeof(uint32_t), &codes));
    QLORA__TRY(qlora__jin_get(m, (s->chars + 1) * sizeof(size_t), &starts));
    line->codes = (uint32_t*)codes;
    line->starts = (size_t*)starts;
    line->count = 0;
    for (size_t at = 0, step = 0; at < s->bytes && line->count < s->chars; at += step) {
        line->starts[line->count] = at;
        line->codes[line->count++] = qlora__jin_code_at(s->data, s->bytes, at, &step);
    }
    line->starts[line->count] = s->bytes;
    return QLORA_OK;
}

// The classes of characters that Python's textwrap has: \w, \w without digits, and spaces of ASCII.
static bool qlora__jin_is_word(uint32_t code) {
    return code == '_' || qlora__jin_is_alnum(code);
}

static bool qlora__jin_is_wrap_letter(uint32_t code) {
    return qlora__jin_is_word(code) && !qlora__jin_is_decimal(code);
}

static bool qlora__jin_is_wrap_space(uint32_t code) {
    return code == ' ' || (code >= '\t' && code <= '\r');
}

static bool qlora__jin_is_wrap_mark(uint32_t code) {
    return qlora__jin_is_word(code) ||
           (code < 0x80 && code > 0 && strchr("!\"'&.,?", (char)code) != NULL);
}

// Behind how many dashes at `at` a word goes on, two at least; 0 when it is not a dash between
// words.
static size_t qlora__jin_long_dash(const qlora__jin_line* line, size_t at) {
    size_t end = at;
    if (at == 0 || !qlora__jin_is_wrap_mark(line->codes[at - 1])) {
        return 0; // before the dashes are counted: once for each row of them
    }
    while (end < line->count && line->codes[end] == '-') {
        end++;
    }
    bool dash = end - at >= 2 && end < line->count && qlora__jin_is_word(line->codes[end]);
    return dash ? end : 0;
}

// Whether a word may be broken behind the hyphen at `at`: letters on both sides, two at least.
static bool qlora__jin_breaks_after(const qlora__jin_line* line, size_t at) {
    const uint32_t* c = line->codes;
    bool before = at >= 2 && qlora__jin_is_wrap_letter(c[at - 1]) &&
                  (qlora__jin_is_wrap_letter(c[at - 2]) ||
                   (at >= 3 && c[at - 2] == '-' && qlora__jin_is_wrap_letter(c[at - 3])));
    size_t next = at + 1;
    if (!before || next >= line->count || !qlora__jin_is_wrap_letter(c[next])) {
        return false;
    }
    next++;
    next += next < line->count && c[next] == '-' ? 1 : 0;
    return next < line->count && qlora__jin_is_wrap_letter(c[next]);
}

// Where the piece that starts at `begin` ends: spaces, a long dash, or a word up to a hyphen.
static size_t qlora__jin_piece_end(const qlora__jin_line* line, size_t begin, bool hyphens) {
    size_t at = begin;
    bool space = qlora__jin_is_wrap_space(line->codes[begin]);
    size_t dash = hyphens && !space ? qlora__jin_long_dash(line, begin) : 0;
    if (dash > 0) {
        return dash;
    }
    for (at++; at < line->count && qlora__jin_is_wrap_space(line->codes[at]) == space; at++) {
        if (hyphens && !space && line->codes[at] == '-') {
            if (qlora__jin_breaks_after(line, at)) {
                return at + 1;
            }
            if (qlora__jin_long_dash(line, at) > 0) {
                return at;
            }
        }
    }
    return at;
}

typedef struct qlora__jin_wrap {
    const qlora__jin_string* text;
    qlora__jin_line line;
    size_t width;
    bool break_words;
    bool pieces_at_hyphens; // only for the value true itself
    bool break_at_hyphens;
    qlora__jin_value between;
    bool started; // a line was written
    qlora__jin_buffer out;
} qlora__jin_wrap;

static bool qlora__jin_is_blank(const qlora__jin_line* line, size_t begin, size_t end) {
    while (begin < end && qlora__jin_is_space(line->codes[begin])) {
        begin++;
    }
    return begin == end;
}

// How much of a word that fits no line goes onto this one: up to its last hyphen, if it has one
// with something else before it.
static size_t qlora__jin_cut_word(const qlora__jin_wrap* w, size_t begin, size_t end, size_t room) {
    const uint32_t* c = w->line.codes;
    if (w->break_at_hyphens && end - begin > room) {
        size_t hyphen = begin + room;
        while (hyphen > begin + 1 && c[hyphen - 1] != '-') {
            hyphen--;
        }
        bool other = false;
        for (size_t i = begin; i + 1 < hyphen; i++) {
            other = other || c[i] != '-';
        }
        if (hyphen > begin + 1 && other) {
            return hyphen;
        }
    }
    return end - begin < room ? end : begin + room;
}

// Writes one paragraph. The pieces of a line lie one behind the other, so that a line is a range.
static qlora_result qlora__jin_wrap_line(qlora__jin_machine* m, qlora__jin_wrap* w) {
    size_t count = w->line.count;
    size_t at = 0;    // of the next piece
    size_t lines = 0; // of this paragraph
    size_t cut = 0;   // a piece that was broken goes on to here
    while (at < count) {
        size_t next = cut > at ? cut : qlora__jin_piece_end(&w->line, at, w->pieces_at_hyphens);
        QLORA__TRY(qlora__jin_work(m, 1 + (next - at) / 16));
        if (lines > 0 && qlora__jin_is_blank(&w->line, at, next)) {
            at = next;
            next = at < count ? qlora__jin_piece_end(&w->line, at, w->pieces_at_hyphens) : at;
        }
        size_t begin = at;
        size_t last = at; // where the last piece of the line starts
        while (at < count && next - begin <= w->width) {
            last = at;
            at = next;
            next = at < count ? qlora__jin_piece_end(&w->line, at, w->pieces_at_hyphens) : at;
        }
        cut = next;
        if (at < count && next - at > w->width && (w->break_words || at == begin)) {
            last = at;
            at = w->break_words ? qlora__jin_cut_word(w, at, next, w->width - (at - begin)) : next;
        }
        size_t end = at > begin && qlora__jin_is_blank(&w->line, last, at) ? last : at;
        if (end > begin) {
            size_t first = w->line.starts[begin];
            if (w->started) {
                QLORA__TRY(qlora__jin_print(m, w->between, &w->out));
            }
            QLORA__TRY(
                qlora__jin_put(m, &w->out, w->text->data + first, w->line.starts[end] - first));
            w->started = true;
            lines++;
        }
    }
    return QLORA_OK;
}

QLORA__JIN_FILTER(wordwrap) {
    qlora__jin_wrap w;
    qlora__jin_value call[2];
    qlora__jin_value lines;
    int64_t width = 79;
    memset(&w, 0, sizeof w);
    QLORA__TRY(qlora__jin_need_string(m, "wordwrap", in[0]));
    call[0] = in[0];
    call[1] = qlora__jin_of(QLORA__JIN_MISSING);
    QLORA__TRY(qlora__jin_str_splitlines(m, call, &lines));
    w.break_words = in[2].kind == QLORA__JIN_MISSING || qlora__jin_truth(in[2]);
    w.break_at_hyphens = in[4].kind == QLORA__JIN_MISSING || qlora__jin_truth(in[4]);
    w.pieces_at_hyphens = w.break_at_hyphens && in[4].kind != QLORA__JIN_INT &&
                          (in[4].kind == QLORA__JIN_MISSING || in[4].kind == QLORA__JIN_BOOL);
    w.between = in[3];
    if (!qlora__jin_given(in[3])) {
        QLORA__TRY(qlora__jin_string_of(m, "\n", &w.between));
    }
    QLORA__TRY(qlora__jin_need_string(m, "wordwrap", w.between));
    if (w.between.flag != 0) {
        return qlora__jin_fail(m, "wordwrap: a safe string between the lines is not supported");
    }
    for (size_t i = 0; i < lines.as.list->count; i++) {
        QLORA__TRY(qlora__jin_need_integer(m, "wordwrap", in[1], &width));
        if (width <= 0) {
            return qlora__jin_fail(m, "wordwrap: the width is %lld; it must be at least 1",
                                   (long long)width);
        }
        w.width = (size_t)(width < INT32_MAX ? width : INT32_MAX);
        w.text = lines.as.list->items[i].as.string;
        if (i > 0) {
            QLORA__TRY(qlora__jin_print(m, w.between, &w.out));
        }
        w.started = false;
        QLORA__TRY(qlora__jin_line_make(m, w.text, &w.line));
        QLORA__TRY(qlora__jin_wrap_line(m, &w));
    }
    return qlora__jin_buffer_string(m, &w.out, out);
}

// ---- pprint -------------------------------------------------------------------------------------

// Python's order of keys of different types: by the name of the type.
static qlora_result qlora__jin_key_before(qlora__jin_machine* m, qlora__jin_value a,
                                          qlora__jin_value b, bool* out) {
    bool numbers = qlora__jin_is_number(a) && qlora__jin_is_number(b);
    if (numbers || a.kind == b.kind) {
        return qlora__jin_less(m, a, b, false, out);
    }
    *out = strcmp(qlora__jin_type(a), qlora__jin_type(b)) < 0;
    return QLORA_OK;
}

// A copy in which all dictionaries are sorted by their keys.
static qlora_result qlora__jin_sorted(qlora__jin_machine* m, qlora__jin_value v,
                                      qlora__jin_value* out) {
    *out = v;
    QLORA__TRY(qlora__jin_enter(m));
    if (v.kind == QLORA__JIN_LIST || v.kind == QLORA__JIN_TUPLE) {
        QLORA__TRY(qlora__jin_list_make(m, v.kind, v.as.list->count, out));
        for (size_t i = 0; i < v.as.list->count; i++) {
            qlora__jin_value item;
            QLORA__TRY(qlora__jin_sorted(m, v.as.list->items[i], &item));
            QLORA__TRY(qlora__jin_list_add(m, out->as.list, item));
        }
    } else if (v.kind == QLORA__JIN_DICT) {
        QLORA__TRY(qlora__jin_dict_make(m, v.kind, v.as.dict->count, out));
        qlora__jin_dict* dict = out->as.dict;
        for (size_t i = 0; i < v.as.dict->count; i++) {
            qlora__jin_value item;
            qlora__jin_value key = v.as.dict->keys[i];
            QLORA__TRY(qlora__jin_sorted(m, v.as.dict->values[i], &item));
            QLORA__TRY(qlora__jin_dict_add(m, dict, key, item));
            size_t at = dict->count - 1;
            for (bool before = true; at > 0; at--) { // insertion: equal keys do not exist
                QLORA__TRY(qlora__jin_key_before(m, key, dict->keys[at - 1], &before));
                if (!before) {
                    break;
                }
                dict->keys[at] = dict->keys[at - 1];
                dict->values[at] = dict->values[at - 1];
            }
            dict->keys[at] = key;
            dict->values[at] = item;
        }
    }
    m->depth--;
    return QLORA_OK;
}

static qlora_result qlora__jin_new_line(qlora__jin_machine* m, int64_t indent,
                                        qlora__jin_buffer* out) {
    QLORA__TRY(qlora__jin_puts(m, out, "\n"));
    for (int64_t i = 0; i < indent; i++) {
        QLORA__TRY(qlora__jin_puts(m, out, " "));
    }
    return QLORA_OK;
}

enum { QLORA__JIN_PRETTY_WIDTH = 80 };

// The words of a line that is too long, each with the spaces behind it, as long as they fit. The
// pieces are added to `chunks`, as repr prints them.
static qlora_result qlora__jin_pretty_words(qlora__jin_machine* m, qlora__jin_value line,
                                            int64_t width, int64_t last_width,
                                            qlora__jin_list* chunks) {
    const qlora__jin_string* s = line.as.string;
    qlora__jin_value shown;
    size_t begin = 0;
    size_t end = 0;
    while (end < s->bytes) {
        size_t step = 0;
        size_t next = end;
        while (next < s->bytes &&
               !qlora__jin_is_space(qlora__jin_code_at(s->data, s->bytes, next, &step))) {
            next += step;
        }
        next = qlora__jin_skip_space(s->data, s->bytes, next);
        qlora__jin_value candidate;
        QLORA__TRY(qlora__jin_part(m, line, begin, next, &candidate));
        QLORA__TRY(qlora__jin_convert(m, candidate, 'r', &shown));
        int64_t room = next == s->bytes ? last_width : width;
        if ((int64_t)shown.as.string->chars > room && end > begin) {
            QLORA__TRY(qlora__jin_part(m, line, begin, end, &candidate));
            QLORA__TRY(qlora__jin_convert(m, candidate, 'r', &shown));
            QLORA__TRY(qlora__jin_list_add(m, chunks, shown));
            begin = end;
        }
        end = next;
    }
    QLORA__TRY(qlora__jin_part(m, line, begin, end, &shown));
    QLORA__TRY(qlora__jin_convert(m, shown, 'r', &shown));
    return qlora__jin_list_add(m, chunks, shown);
}

// A string that is too long: in several literals, in parentheses when it stands alone.
static qlora_result qlora__jin_pretty_string(qlora__jin_machine* m, qlora__jin_value v,
                                             int64_t indent, int64_t allowance, bool alone,
                                             qlora__jin_buffer* out) {
    qlora__jin_value call[2];
    qlora__jin_value lines;
    qlora__jin_value chunks;
    qlora__jin_value shown = v;
    call[0] = v;
    call[1] = qlora__jin_bool(true);
    indent += alone ? 1 : 0;
    allowance += alone ? 1 : 0;
    int64_t width = QLORA__JIN_PRETTY_WIDTH - indent;
    QLORA__TRY(qlora__jin_str_splitlines(m, call, &lines));
    QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_LIST, 4, &chunks));
    for (size_t i = 0; i < lines.as.list->count; i++) {
        bool last = i + 1 == lines.as.list->count;
        QLORA__TRY(qlora__jin_convert(m, lines.as.list->items[i], 'r', &shown));
        if ((int64_t)shown.as.string->chars <= (last ? width - allowance : width)) {
            QLORA__TRY(qlora__jin_list_add(m, chunks.as.list, shown));
        } else {
            QLORA__TRY(qlora__jin_pretty_words(m, lines.as.list->items[i], width,
                                               last ? width - allowance : width, chunks.as.list));
        }
    }
    if (chunks.as.list->count == 1) {
        return qlora__jin_print(m, shown, out);
    }
    if (alone) {
        QLORA__TRY(qlora__jin_puts(m, out, "("));
    }
    for (size_t i = 0; i < chunks.as.list->count; i++) {
        if (i > 0) {
            QLORA__TRY(qlora__jin_new_line(m, indent, out));
        }
        QLORA__TRY(qlora__jin_print(m, chunks.as.list->items[i], out));
    }
    return alone ? qlora__jin_puts(m, out, ")") : QLORA_OK;
}

// `allowance` is the room that closing brackets behind the value need.
static qlora_result qlora__jin_pretty(qlora__jin_machine* m, qlora__jin_value v, int64_t indent,
                                      int64_t allowance, bool alone, qlora__jin_buffer* out) {
    qlora__jin_value shown;
    bool dict = v.kind == QLORA__JIN_DICT;
    bool list = v.kind == QLORA__JIN_LIST || v.kind == QLORA__JIN_TUPLE;
    QLORA__TRY(qlora__jin_convert(m, v, 'r', &shown));
    bool fits = (int64_t)shown.as.string->chars <= QLORA__JIN_PRETTY_WIDTH - indent - allowance;
    if (!fits && v.kind == QLORA__JIN_VIEW && v.flag == 3) {
        return qlora__jin_fail(m, "pprint of a set that needs several lines is not supported");
    }
    if (!fits && v.kind == QLORA__JIN_STRING && v.flag == 0 && v.as.string->bytes > 0) {
        return qlora__jin_pretty_string(m, v, indent, allowance, alone, out);
    }
    if (fits || (!dict && !list)) {
        return qlora__jin_print(m, shown, out);
    }
    size_t count = dict ? v.as.dict->count : v.as.list->count;
    bool one = v.kind == QLORA__JIN_TUPLE && count == 1;
    QLORA__TRY(qlora__jin_enter(m));
    QLORA__TRY(qlora__jin_puts(m, out, dict ? "{" : v.kind == QLORA__JIN_LIST ? "[" : "("));
    for (size_t i = 0; i < count; i++) {
        int64_t inner = indent + 1;
        int64_t behind = i + 1 < count ? 1 : allowance + (one ? 2 : 1);
        if (i > 0) {
            QLORA__TRY(qlora__jin_puts(m, out, ","));
        }
        if (i > 0) {
            QLORA__TRY(qlora__jin_new_line(m, inner, out));
        }
        if (dict) {
            QLORA__TRY(qlora__jin_convert(m, v.as.dict->keys[i], 'r', &shown));
            QLORA__TRY(qlora__jin_print(m, shown, out));
            QLORA__TRY(qlora__jin_puts(m, out, ": "));
            inner += (int64_t)shown.as.string->chars + 2;
        }
        QLORA__TRY(qlora__jin_pretty(m, dict ? v.as.dict->values[i] : v.as.list->items[i], inner,
                                     behind, false, out));
    }
    m->depth--;
    return qlora__jin_puts(m, out, dict ? "}" : v.kind == QLORA__JIN_LIST ? "]" : one ? ",)" : ")");
}

QLORA__JIN_FILTER(pprint) {
    qlora__jin_buffer buffer;
    qlora__jin_value sorted;
    memset(&buffer, 0, sizeof buffer);
    QLORA__TRY(qlora__jin_sorted(m, in[0], &sorted));
    QLORA__TRY(qlora__jin_pretty(m, sorted, 0, 0, true, &buffer));
    return qlora__jin_buffer_string(m, &buffer, out);
}
