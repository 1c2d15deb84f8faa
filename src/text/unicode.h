#define TEXT__COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define TEXT__CODES 0x110000u

// The class of every code point, spread out; made when a tokenizer is loaded.
static uint8_t* text__classes_make(text_error* error) {
    uint8_t* classes = (uint8_t*)text__zalloc(TEXT__CODES, 1, error);
    if (classes == NULL) {
        return NULL;
    }
    size_t runs = TEXT__COUNT(text__class_runs);
    for (size_t i = 0; i < runs; i++) {
        uint32_t first = text__class_runs[i] >> 8;
        uint32_t end = i + 1 < runs ? text__class_runs[i + 1] >> 8 : TEXT__CODES;
        memset(classes + first, (int)(text__class_runs[i] & 0xFF), end - first);
    }
    return classes;
}

// The length of the UTF-8 character at s (1 to 4) and its code point; 0 when it is not UTF-8.
static size_t text__utf8(const unsigned char* s, size_t left, uint32_t* code) {
    uint32_t c = s[0];
    if (c < 0x80) {
        *code = c;
        return 1;
    }
    size_t length = c >= 0xF0 ? 4 : c >= 0xE0 ? 3 : 2;
    if (c < 0xC2 || c > 0xF4 || left < length) {
        return 0;
    }
    c &= 0x7Fu >> length;
    for (size_t i = 1; i < length; i++) {
        if ((s[i] & 0xC0) != 0x80) {
            return 0;
        }
        c = c << 6 | (s[i] & 0x3Fu);
    }
    // overlong, surrogate, beyond the last code point
    if ((length == 3 && (c < 0x800 || (c >= 0xD800 && c < 0xE000))) ||
        (length == 4 && (c < 0x10000 || c >= TEXT__CODES))) {
        return 0;
    }
    *code = c;
    return length;
}

static size_t text__utf8_put(uint32_t code, char* out) {
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    size_t length = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (size_t i = length - 1; i > 0; i--) {
        out[i] = (char)(unsigned char)(0x80 | (code & 0x3F));
        code >>= 6;
    }
    static const unsigned char lead[5] = {0, 0, 0xC0, 0xE0, 0xF0};
    out[0] = (char)(unsigned char)(lead[length] | code);
    return length;
}

// How many bytes at s could still become one character: s is not UTF-8 here. What a decoder with
// replacement puts one U+FFFD for (the longest start of a character, at least one byte).
// *open: the end of the text came first.
static size_t text__utf8_broken(const unsigned char* s, size_t left, bool* open) {
    *open = false;
    unsigned c = s[0];
    if (c < 0xC2 || c > 0xF4) {
        return 1;
    }
    size_t length = c >= 0xF0 ? 4 : c >= 0xE0 ? 3 : 2;
    for (size_t i = 1; i < length; i++) {
        if (i >= left) {
            *open = true;
            return i;
        }
        unsigned low = 0x80;
        unsigned high = 0xBF;
        if (i == 1) {
            low = c == 0xE0 ? 0xA0 : c == 0xF0 ? 0x90 : 0x80;
            high = c == 0xED ? 0x9F : c == 0xF4 ? 0x8F : 0xBF;
        }
        if (s[i] < low || s[i] > high) {
            return i;
        }
    }
    return length;
}

// Appends with U+FFFD for what is not UTF-8. With `open` an unfinished character at the end is
// left: *used says how far it came.
static bool text__utf8_repair(const char* data, size_t count, bool keep_open, size_t* used,
                              text_bytes* out, text_error* error) {
    const unsigned char* s = (const unsigned char*)data;
    size_t at = 0;
    size_t good = 0; // start of what is fine and not yet copied
    bool open = false;
    *used = 0;
    if (count == 0) {
        return true;
    }
    while (at < count && !open) {
        uint32_t code;
        size_t length = text__utf8(s + at, count - at, &code);
        if (length > 0) {
            at += length;
            continue;
        }
        TEXT__TRY(text_bytes_add(out, data + good, at - good, error));
        length = text__utf8_broken(s + at, count - at, &open);
        open = open && keep_open;
        if (!open) {
            TEXT__TRY(text_bytes_add(out, "\xEF\xBF\xBD", 3, error));
            at += length;
        }
        good = at;
    }
    TEXT__TRY(text_bytes_add(out, data + good, at - good, error));
    *used = at;
    return true;
}

static uint32_t text__combining_class(uint32_t code) {
    size_t low = 0;
    size_t high = TEXT__COUNT(text__combinings);
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (code > text__combinings[middle].last) {
            low = middle + 1;
        } else if (code < text__combinings[middle].first) {
            high = middle;
        } else {
            return text__combinings[middle].value;
        }
    }
    return 0;
}

// NULL when it does not decompose.
static const text__decomposition* text__decompose(uint32_t code) {
    size_t low = 0;
    size_t high = TEXT__COUNT(text__decompositions);
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (text__decompositions[middle].composed < code) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    bool found =
        low < TEXT__COUNT(text__decompositions) && text__decompositions[low].composed == code;
    return found ? &text__decompositions[low] : NULL;
}

enum {
    TEXT__HANGUL_S = 0xAC00,
    TEXT__HANGUL_L = 0x1100,
    TEXT__HANGUL_V = 0x1161,
    TEXT__HANGUL_T = 0x11A7,
    TEXT__HANGUL_LS = 19,
    TEXT__HANGUL_VS = 21,
    TEXT__HANGUL_TS = 28
};

// The primary composite of two characters, or 0.
static uint32_t text__compose(uint32_t first, uint32_t second) {
    if (first - TEXT__HANGUL_L < TEXT__HANGUL_LS && second - TEXT__HANGUL_V < TEXT__HANGUL_VS) {
        uint32_t lv = (first - TEXT__HANGUL_L) * TEXT__HANGUL_VS + (second - TEXT__HANGUL_V);
        return TEXT__HANGUL_S + lv * TEXT__HANGUL_TS;
    }
    uint32_t syllable = first - TEXT__HANGUL_S;
    if (syllable < TEXT__HANGUL_LS * TEXT__HANGUL_VS * TEXT__HANGUL_TS &&
        syllable % TEXT__HANGUL_TS == 0 && second - TEXT__HANGUL_T - 1 < TEXT__HANGUL_TS - 1) {
        return first + (second - TEXT__HANGUL_T);
    }
    size_t low = 0;
    size_t high = TEXT__COUNT(text__compositions);
    while (low < high) {
        size_t middle = (low + high) / 2;
        const text__decomposition* row = &text__decompositions[text__compositions[middle]];
        if (row->first == first && row->second == second) {
            return row->composed;
        }
        if (row->first < first || (row->first == first && row->second < second)) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return 0;
}

// A starter and the marks after it. A byte that is not UTF-8 is TEXT__CODES + byte, a starter.
typedef struct text__mark {
    uint32_t code;
    uint32_t order;
} text__mark;

typedef struct text__marks {
    text__mark* data;
    size_t count;
    size_t capacity;
    text__mark* sorted;
    size_t sorted_capacity;
} text__marks;

static bool text__marks_add(text__marks* marks, uint32_t code, uint32_t order, text_error* error) {
    void* data = marks->data;
    bool good = text__reserve(&data, &marks->capacity, marks->count, 1, sizeof(text__mark), error);
    marks->data = (text__mark*)data;
    TEXT__TRY(good);
    marks->data[marks->count].code = code;
    marks->data[marks->count].order = order;
    marks->count++;
    return true;
}

// Stable sort by combining class of data[begin..): by counting, so that a long run costs no more.
static bool text__marks_sort(text__marks* marks, size_t begin, text_error* error) {
    size_t count = marks->count - begin;
    text__mark* data = marks->data + begin;
    bool sorted = true;
    for (size_t i = 1; i < count; i++) {
        sorted = sorted && data[i - 1].order <= data[i].order;
    }
    if (sorted) {
        return true;
    }
    void* other = marks->sorted;
    bool good = text__reserve(&other, &marks->sorted_capacity, 0, count, sizeof(text__mark), error);
    marks->sorted = (text__mark*)other;
    TEXT__TRY(good);
    size_t starts[257];
    memset(starts, 0, sizeof(starts));
    for (size_t i = 0; i < count; i++) {
        starts[(data[i].order & 0xFF) + 1]++;
    }
    for (size_t i = 1; i < 257; i++) {
        starts[i] += starts[i - 1];
    }
    for (size_t i = 0; i < count; i++) {
        marks->sorted[starts[data[i].order & 0xFF]++] = data[i];
    }
    memcpy(data, marks->sorted, count * sizeof(text__mark));
    return true;
}

// Adds the full canonical decomposition of one character. Decompositions nest at most four deep,
// always in the first part.
static bool text__marks_add_decomposed(text__marks* marks, uint32_t code, text_error* error) {
    uint32_t syllable = code - TEXT__HANGUL_S;
    if (syllable < TEXT__HANGUL_LS * TEXT__HANGUL_VS * TEXT__HANGUL_TS) {
        uint32_t tail = syllable % TEXT__HANGUL_TS;
        uint32_t lv = syllable / TEXT__HANGUL_TS;
        TEXT__TRY(text__marks_add(marks, TEXT__HANGUL_L + lv / TEXT__HANGUL_VS, 0, error));
        TEXT__TRY(text__marks_add(marks, TEXT__HANGUL_V + lv % TEXT__HANGUL_VS, 0, error));
        return tail == 0 || text__marks_add(marks, TEXT__HANGUL_T + tail, 0, error);
    }
    uint32_t tails[8];
    size_t count = 0;
    const text__decomposition* row = code < 0xC0 ? NULL : text__decompose(code);
    while (row != NULL && count < TEXT__COUNT(tails)) {
        code = row->first;
        if (row->second != 0) {
            tails[count++] = row->second;
        }
        row = text__decompose(code);
    }
    TEXT__TRY(text__marks_add(marks, code, text__combining_class(code), error));
    while (count > 0) {
        count--;
        TEXT__TRY(text__marks_add(marks, tails[count], text__combining_class(tails[count]), error));
    }
    return true;
}

// Canonical composition in place. All of it was decomposed and sorted.
static void text__marks_compose(text__marks* marks) {
    text__mark* data = marks->data;
    size_t out = 0;
    size_t starter = SIZE_MAX;
    uint32_t last = 0; // class of the last mark kept after the starter
    for (size_t i = 0; i < marks->count; i++) {
        text__mark mark = data[i];
        bool adjacent = starter != SIZE_MAX && out == starter + 1;
        bool blocked = !adjacent && (last == 0 || last >= mark.order);
        if (starter != SIZE_MAX && !blocked) {
            uint32_t composed = text__compose(data[starter].code, mark.code);
            if (composed != 0) {
                data[starter].code = composed;
                continue;
            }
        }
        if (mark.order == 0) {
            starter = out;
        }
        last = mark.order;
        data[out++] = mark;
    }
    marks->count = out;
}

static bool text__marks_flush(text__marks* marks, bool compose, text_bytes* out,
                              text_error* error) {
    size_t begin = 0;
    for (size_t i = 0; i <= marks->count; i++) {
        if (i == marks->count || marks->data[i].order == 0) {
            size_t whole = marks->count;
            marks->count = i;
            bool good = text__marks_sort(marks, begin, error);
            marks->count = whole;
            TEXT__TRY(good);
            begin = i + 1;
        }
    }
    if (compose) {
        text__marks_compose(marks);
    }
    TEXT__TRY(text__bytes_room(out, marks->count * 4, error));
    for (size_t i = 0; i < marks->count; i++) {
        uint32_t code = marks->data[i].code;
        if (code >= TEXT__CODES) {
            out->data[out->count++] = (char)(unsigned char)(code - TEXT__CODES);
        } else {
            out->count += text__utf8_put(code, out->data + out->count);
        }
    }
    marks->count = 0;
    return true;
}

// Appends the NFC (or NFD) of the text. Bytes that are not UTF-8 stay as they are.
static bool text__normalize(const uint8_t* classes, bool compose, const char* text, size_t count,
                            text__marks* marks, text_bytes* out, text_error* error) {
    const unsigned char* s = (const unsigned char*)text;
    size_t at = 0;
    bool change = false;
    while (at < count && !change) {
        uint32_t code = 0;
        size_t length = text__utf8(s + at, count - at, &code);
        change = length > 0 && ((classes[code] & TEXT__UNSTABLE) || (!compose && code >= 0xC0));
        at += length > 0 ? length : 1;
    }
    if (!change) {
        return text_bytes_add(out, text, count, error);
    }
    marks->count = 0;
    at = 0;
    while (at < count) {
        uint32_t code = 0;
        size_t length = text__utf8(s + at, count - at, &code);
        // An ASCII character never joins what is before it: everything so far is complete.
        if (s[at] < 0x80 && marks->count >= 64) {
            TEXT__TRY(text__marks_flush(marks, compose, out, error));
        }
        if (length == 0) {
            TEXT__TRY(text__marks_add(marks, TEXT__CODES + s[at], 0, error));
            length = 1;
        } else {
            TEXT__TRY(text__marks_add_decomposed(marks, code, error));
        }
        at += length;
    }
    return text__marks_flush(marks, compose, out, error);
}
