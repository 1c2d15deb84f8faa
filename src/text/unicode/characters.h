#define QLORA__TEXT_CODES 0x110000u

// The class of every code point, expanded; made when a tokenizer is loaded.
static uint8_t* qlora__text_classes_make(qlora__env* env) {
    uint8_t* classes = (uint8_t*)qlora__text_zalloc(env, QLORA__TEXT_CODES, 1);
    if (classes == NULL) {
        return NULL;
    }
    size_t runs = QLORA__TEXT_COUNT(qlora__text_class_runs);
    for (size_t i = 0; i < runs; i++) {
        uint32_t first = qlora__text_class_runs[i] >> 8;
        uint32_t end = i + 1 < runs ? qlora__text_class_runs[i + 1] >> 8 : QLORA__TEXT_CODES;
        memset(classes + first, (int)(qlora__text_class_runs[i] & 0xFF), end - first);
    }
    return classes;
}

// Length of the UTF-8 character at s (1 to 4), and its code point; 0 when it is invalid.
static size_t qlora__text_utf8(const unsigned char* s, size_t left, uint32_t* code) {
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
    // overlong forms, surrogates, and values above U+10FFFF
    if ((length == 3 && (c < 0x800 || (c >= 0xD800 && c < 0xE000))) ||
        (length == 4 && (c < 0x10000 || c >= QLORA__TEXT_CODES))) {
        return 0;
    }
    *code = c;
    return length;
}

static size_t qlora__text_utf8_put(uint32_t code, char* out) {
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

// At s, where the text is invalid: how many bytes a decoder replaces by one U+FFFD. That is the
// longest valid start of a character, at least one byte. *open: the text ends inside it.
static size_t qlora__text_utf8_broken(const unsigned char* s, size_t left, bool* open) {
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

// Appends the text with U+FFFD for invalid UTF-8. With `keep_open`, an incomplete character at the
// end is not consumed; *used is the number of bytes that were.
static qlora_result qlora__text_utf8_repair(qlora__env* env, const char* data, size_t count,
                                            bool keep_open, size_t* used, qlora_text_bytes* out) {
    const unsigned char* s = (const unsigned char*)data;
    size_t at = 0;
    size_t good = 0; // start of the valid part that is not copied yet
    bool open = false;
    *used = 0;
    if (count == 0) {
        return QLORA_OK;
    }
    while (at < count && !open) {
        uint32_t code;
        size_t length = qlora__text_utf8(s + at, count - at, &code);
        if (length > 0) {
            at += length;
            continue;
        }
        QLORA__TRY(qlora__text_bytes_add(env, out, data + good, at - good));
        length = qlora__text_utf8_broken(s + at, count - at, &open);
        open = open && keep_open;
        if (!open) {
            QLORA__TRY(qlora__text_bytes_add(env, out, "\xEF\xBF\xBD", 3));
            at += length;
        }
        good = at;
    }
    QLORA__TRY(qlora__text_bytes_add(env, out, data + good, at - good));
    *used = at;
    return QLORA_OK;
}

static uint32_t qlora__text_combining_class(uint32_t code) {
    size_t low = 0;
    size_t high = QLORA__TEXT_COUNT(qlora__text_combinings);
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (code > qlora__text_combinings[middle].last) {
            low = middle + 1;
        } else if (code < qlora__text_combinings[middle].first) {
            high = middle;
        } else {
            return qlora__text_combinings[middle].value;
        }
    }
    return 0;
}

// NULL when it does not decompose.
static const qlora__text_decomposition* qlora__text_decompose(uint32_t code) {
    size_t low = 0;
    size_t high = QLORA__TEXT_COUNT(qlora__text_decompositions);
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (qlora__text_decompositions[middle].composed < code) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    bool found = low < QLORA__TEXT_COUNT(qlora__text_decompositions) &&
                 qlora__text_decompositions[low].composed == code;
    return found ? &qlora__text_decompositions[low] : NULL;
}

enum {
    QLORA__TEXT_HANGUL_S = 0xAC00,
    QLORA__TEXT_HANGUL_L = 0x1100,
    QLORA__TEXT_HANGUL_V = 0x1161,
    QLORA__TEXT_HANGUL_T = 0x11A7,
    QLORA__TEXT_HANGUL_LS = 19,
    QLORA__TEXT_HANGUL_VS = 21,
    QLORA__TEXT_HANGUL_TS = 28
};

// The primary composite of two characters, or 0.
static uint32_t qlora__text_compose(uint32_t first, uint32_t second) {
    if (first - QLORA__TEXT_HANGUL_L < QLORA__TEXT_HANGUL_LS &&
        second - QLORA__TEXT_HANGUL_V < QLORA__TEXT_HANGUL_VS) {
        uint32_t lv = (first - QLORA__TEXT_HANGUL_L) * QLORA__TEXT_HANGUL_VS +
                      (second - QLORA__TEXT_HANGUL_V);
        return QLORA__TEXT_HANGUL_S + lv * QLORA__TEXT_HANGUL_TS;
    }
    uint32_t syllable = first - QLORA__TEXT_HANGUL_S;
    if (syllable < QLORA__TEXT_HANGUL_LS * QLORA__TEXT_HANGUL_VS * QLORA__TEXT_HANGUL_TS &&
        syllable % QLORA__TEXT_HANGUL_TS == 0 &&
        second - QLORA__TEXT_HANGUL_T - 1 < QLORA__TEXT_HANGUL_TS - 1) {
        return first + (second - QLORA__TEXT_HANGUL_T);
    }
    size_t low = 0;
    size_t high = QLORA__TEXT_COUNT(qlora__text_compositions);
    while (low < high) {
        size_t middle = (low + high) / 2;
        const qlora__text_decomposition* row =
            &qlora__text_decompositions[qlora__text_compositions[middle]];
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

// A starter and the marks after it. An invalid byte is QLORA__TEXT_CODES + byte, a starter.
typedef struct qlora__text_mark {
    uint32_t code;
    uint32_t order;
} qlora__text_mark;

typedef struct qlora__text_marks {
    qlora__text_mark* data;
    size_t count;
    size_t capacity;
    qlora__text_mark* sorted;
    size_t sorted_capacity;
} qlora__text_marks;

static qlora_result qlora__text_marks_add(qlora__env* env, qlora__text_marks* marks, uint32_t code,
                                          uint32_t order) {
    void* data = marks->data;
    qlora_result r = qlora__text_reserve(env, &data, &marks->capacity, marks->count, 1,
                                         sizeof(qlora__text_mark));
    marks->data = (qlora__text_mark*)data;
    QLORA__TRY(r);
    marks->data[marks->count].code = code;
    marks->data[marks->count].order = order;
    marks->count++;
    return QLORA_OK;
}

// Stable sort of data[begin..) by combining class. It counts, so that a long run is linear.
static qlora_result qlora__text_marks_sort(qlora__env* env, qlora__text_marks* marks,
                                           size_t begin) {
    size_t count = marks->count - begin;
    qlora__text_mark* data = marks->data + begin;
    bool sorted = true;
    for (size_t i = 1; i < count; i++) {
        sorted = sorted && data[i - 1].order <= data[i].order;
    }
    if (sorted) {
        return QLORA_OK;
    }
    void* other = marks->sorted;
    qlora_result r = qlora__text_reserve(env, &other, &marks->sorted_capacity, 0, count,
                                         sizeof(qlora__text_mark));
    marks->sorted = (qlora__text_mark*)other;
    QLORA__TRY(r);
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
    memcpy(data, marks->sorted, count * sizeof(qlora__text_mark));
    return QLORA_OK;
}

// Adds the full canonical decomposition of one character. Decompositions nest at most four deep,
// always in the first part.
static qlora_result qlora__text_marks_add_decomposed(qlora__env* env, qlora__text_marks* marks,
                                                     uint32_t code) {
    uint32_t syllable = code - QLORA__TEXT_HANGUL_S;
    if (syllable < QLORA__TEXT_HANGUL_LS * QLORA__TEXT_HANGUL_VS * QLORA__TEXT_HANGUL_TS) {
        uint32_t tail = syllable % QLORA__TEXT_HANGUL_TS;
        uint32_t lv = syllable / QLORA__TEXT_HANGUL_TS;
        QLORA__TRY(qlora__text_marks_add(env, marks,
                                         QLORA__TEXT_HANGUL_L + lv / QLORA__TEXT_HANGUL_VS, 0));
        QLORA__TRY(qlora__text_marks_add(env, marks,
                                         QLORA__TEXT_HANGUL_V + lv % QLORA__TEXT_HANGUL_VS, 0));
        return tail == 0 ? QLORA_OK
                         : qlora__text_marks_add(env, marks, QLORA__TEXT_HANGUL_T + tail, 0);
    }
    uint32_t tails[8];
    size_t count = 0;
    const qlora__text_decomposition* row = code < 0xC0 ? NULL : qlora__text_decompose(code);
    while (row != NULL && count < QLORA__TEXT_COUNT(tails)) {
        code = row->first;
        if (row->second != 0) {
            tails[count++] = row->second;
        }
        row = qlora__text_decompose(code);
    }
    QLORA__TRY(qlora__text_marks_add(env, marks, code, qlora__text_combining_class(code)));
    while (count > 0) {
        count--;
        QLORA__TRY(qlora__text_marks_add(env, marks, tails[count],
                                         qlora__text_combining_class(tails[count])));
    }
    return QLORA_OK;
}

// Canonical composition in place, of marks that are decomposed and sorted.
static void qlora__text_marks_compose(qlora__text_marks* marks) {
    qlora__text_mark* data = marks->data;
    size_t out = 0;
    size_t starter = SIZE_MAX;
    uint32_t last = 0; // class of the last mark kept after the starter
    for (size_t i = 0; i < marks->count; i++) {
        qlora__text_mark mark = data[i];
        bool adjacent = starter != SIZE_MAX && out == starter + 1;
        bool blocked = !adjacent && (last == 0 || last >= mark.order);
        if (starter != SIZE_MAX && !blocked) {
            uint32_t composed = qlora__text_compose(data[starter].code, mark.code);
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

static qlora_result qlora__text_marks_flush(qlora__env* env, qlora__text_marks* marks, bool compose,
                                            qlora_text_bytes* out) {
    size_t begin = 0;
    for (size_t i = 0; i <= marks->count; i++) {
        if (i == marks->count || marks->data[i].order == 0) {
            size_t whole = marks->count;
            marks->count = i;
            qlora_result r = qlora__text_marks_sort(env, marks, begin);
            marks->count = whole;
            QLORA__TRY(r);
            begin = i + 1;
        }
    }
    if (compose) {
        qlora__text_marks_compose(marks);
    }
    QLORA__TRY(qlora__text_bytes_room(env, out, marks->count * 4));
    for (size_t i = 0; i < marks->count; i++) {
        uint32_t code = marks->data[i].code;
        if (code >= QLORA__TEXT_CODES) {
            out->data[out->count++] = (char)(unsigned char)(code - QLORA__TEXT_CODES);
        } else {
            out->count += qlora__text_utf8_put(code, out->data + out->count);
        }
    }
    marks->count = 0;
    return QLORA_OK;
}

// Appends the NFC (or NFD) of the text. Invalid bytes are copied unchanged.
static qlora_result qlora__text_normalize(qlora__env* env, const uint8_t* classes, bool compose,
                                          const char* text, size_t count, qlora__text_marks* marks,
                                          qlora_text_bytes* out) {
    const unsigned char* s = (const unsigned char*)text;
    size_t at = 0;
    bool change = false;
    while (at < count && !change) {
        uint32_t code = 0;
        size_t length = qlora__text_utf8(s + at, count - at, &code);
        change =
            length > 0 && ((classes[code] & QLORA__TEXT_UNSTABLE) || (!compose && code >= 0xC0));
        at += length > 0 ? length : 1;
    }
    if (!change) {
        return qlora__text_bytes_add(env, out, text, count);
    }
    marks->count = 0;
    at = 0;
    while (at < count) {
        uint32_t code = 0;
        size_t length = qlora__text_utf8(s + at, count - at, &code);
        // An ASCII character never combines with what precedes it: all marks so far are complete.
        if (s[at] < 0x80 && marks->count >= 64) {
            QLORA__TRY(qlora__text_marks_flush(env, marks, compose, out));
        }
        if (length == 0) {
            QLORA__TRY(qlora__text_marks_add(env, marks, QLORA__TEXT_CODES + s[at], 0));
            length = 1;
        } else {
            QLORA__TRY(qlora__text_marks_add_decomposed(env, marks, code));
        }
        at += length;
    }
    return qlora__text_marks_flush(env, marks, compose, out);
}
