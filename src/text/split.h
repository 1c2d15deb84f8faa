// A text to be split. After the ByteLevel step every byte is one character: code_of_byte is then
// set.
typedef struct text__view {
    const unsigned char* s;
    size_t end;
    const uint8_t* classes;
    const uint16_t* code_of_byte;
} text__view;

// The class of the character at a position as a bit, and its length; 0 and 0 at the end. A byte
// that is not UTF-8 is a character of class OTHER.
static unsigned text__class_at(const text__view* v, size_t at, size_t* length) {
    if (at >= v->end) {
        *length = 0;
        return 0;
    }
    unsigned char c = v->s[at];
    *length = 1;
    if (v->code_of_byte != NULL) {
        return 1u << (v->classes[v->code_of_byte[c]] & 15);
    }
    if (c < 0x80) {
        return 1u << (v->classes[c] & 15);
    }
    uint32_t code;
    size_t found = text__utf8(v->s + at, v->end - at, &code);
    if (found == 0) {
        return TEXT__BIT(OTHER);
    }
    *length = found;
    return 1u << (v->classes[code] & 15);
}

// The end of the run of characters of these classes.
static size_t text__run(const text__view* v, size_t at, unsigned mask) {
    size_t length;
    while (text__class_at(v, at, &length) & mask) {
        at += length;
    }
    return at;
}

static bool text__is(const text__view* v, size_t at, char c) {
    return at < v->end && v->s[at] == (unsigned char)c;
}

static bool text__is_newline(const text__view* v, size_t at) {
    return text__is(v, at, '\n') || text__is(v, at, '\r');
}

// Options of the matchers.
enum {
    TEXT__O_ANY_CASE = 1,   // contractions in any case
    TEXT__O_ASCII_CASE = 2, // ... but only of ASCII letters
    TEXT__O_DIGITS_1 = 4,
    TEXT__O_DIGITS_3 = 8,
    TEXT__O_MARKS = 16,       // marks count as letters
    TEXT__O_CONTRACTED = 32,  // contractions belong to the word before
    TEXT__O_WORD_PATTERN = 64 // \w+ and [^\w\s]+
};

// 's 't 're 've 'm 'll 'd: the length of the match, or 0.
static size_t text__contraction(const text__view* v, size_t at, unsigned option) {
    if (!text__is(v, at, '\'') || at + 1 >= v->end) {
        return 0;
    }
    unsigned fold = option & (TEXT__O_ANY_CASE | TEXT__O_ASCII_CASE) ? 0x20u : 0u;
    unsigned a = v->s[at + 1] | (v->s[at + 1] >= 'A' && v->s[at + 1] <= 'Z' ? fold : 0u);
    if (a == 's' || a == 't' || a == 'm' || a == 'd') {
        return 2;
    }
    if (at + 2 >= v->end) {
        return 0;
    }
    unsigned char next = v->s[at + 2];
    unsigned b = next | (next >= 'A' && next <= 'Z' ? fold : 0u);
    if (((a == 'r' || a == 'v') && b == 'e') || (a == 'l' && b == 'l')) {
        return 3;
    }
    // U+017F, the long s, is an s when the case does not matter
    return (option & TEXT__O_ANY_CASE) && a == 0xC5 && next == 0xBF ? 3 : 0;
}

// \s+(?!\S)|\s+ : white space up to the last one before other text.
static size_t text__match_space(const text__view* v, size_t at) {
    size_t length;
    size_t end = at;
    size_t last = at;
    while (text__class_at(v, end, &length) & TEXT__WS) {
        last = end;
        end += length;
    }
    return end < v->end && last > at ? last : end;
}

// \s*[\r\n]+ : white space through its last line end; `at` when there is none.
static size_t text__match_lines(const text__view* v, size_t at) {
    size_t length;
    size_t found = at;
    while (text__class_at(v, at, &length) & TEXT__WS) {
        if (text__is_newline(v, at)) {
            found = at + 1;
        }
        at += length;
    }
    return found;
}

static size_t text__match_gpt2(const text__view* v, size_t at, unsigned option) {
    size_t length = text__contraction(v, at, option);
    if (length > 0) {
        return at + length;
    }
    static const unsigned masks[] = {TEXT__L, TEXT__N, ~(TEXT__L | TEXT__N | TEXT__WS)};
    size_t begin = text__is(v, at, ' ') ? at + 1 : at;
    unsigned bit = text__class_at(v, begin, &length);
    for (size_t i = 0; i < TEXT__COUNT(masks); i++) {
        if (bit & masks[i]) {
            return text__run(v, begin, masks[i]);
        }
    }
    return text__match_space(v, at);
}

static size_t text__match_digits(const text__view* v, size_t at, unsigned option) {
    size_t limit = option & TEXT__O_DIGITS_1 ? 1 : option & TEXT__O_DIGITS_3 ? 3 : SIZE_MAX;
    size_t length;
    for (size_t i = 0; i < limit && (text__class_at(v, at, &length) & TEXT__N); i++) {
        at += length;
    }
    return at;
}

// ' ?[^\s\p{L}\p{N}]+[\r\n]*' and the white space that ends all these patterns.
static size_t text__match_rest(const text__view* v, size_t at, unsigned others, const char* tail) {
    size_t length;
    size_t begin = text__is(v, at, ' ') ? at + 1 : at;
    if (text__class_at(v, begin, &length) & others) {
        size_t end = text__run(v, begin, others);
        while (end < v->end && v->s[end] != 0 && strchr(tail, v->s[end]) != NULL) {
            end++;
        }
        return end;
    }
    size_t lines = text__match_lines(v, at);
    return lines > at ? lines : text__match_space(v, at);
}

// cl100k and its children (Llama-3, Qwen2, ...).
static size_t text__match_cl100k(const text__view* v, size_t at, unsigned option) {
    size_t length = text__contraction(v, at, option);
    if (length > 0) {
        return at + length;
    }
    unsigned letters = TEXT__L | (option & TEXT__O_MARKS ? TEXT__M : 0u);
    unsigned bit = text__class_at(v, at, &length);
    if (!(bit & (TEXT__L | TEXT__N)) && !text__is_newline(v, at)) {
        size_t unused;
        if (text__class_at(v, at + length, &unused) & letters) {
            return text__run(v, at + length, letters);
        }
    }
    if (bit & letters) {
        return text__run(v, at, letters);
    }
    if (bit & TEXT__N) {
        return text__match_digits(v, at, option);
    }
    return text__match_rest(v, at, ~(TEXT__WS | TEXT__N | letters), "\r\n");
}

// [Lu Lt Lm Lo M]*[Ll Lm Lo M]+ (capitalised) or [Lu Lt Lm Lo M]+[Ll Lm Lo M]* ; `at` if no match.
static size_t text__match_cased(const text__view* v, size_t at, bool capitalised) {
    const unsigned upper = TEXT__BIT(UPPER) | TEXT__BIT(LETTER) | TEXT__M;
    const unsigned lower = TEXT__BIT(LOWER) | TEXT__BIT(LETTER) | TEXT__M;
    size_t length;
    size_t end = at;
    size_t back = at; // after the last character of the first run that is also of the second kind
    unsigned bit;
    while ((bit = text__class_at(v, end, &length)) & upper) {
        end += length;
        if (bit & lower) {
            back = end;
        }
    }
    if (bit & lower) {
        return capitalised || end > at ? text__run(v, end, lower) : at;
    }
    return capitalised ? back : end;
}

// o200k and its children (GPT-4o, Llama-4, Mistral's Tekken).
static size_t text__match_o200k(const text__view* v, size_t at, unsigned option) {
    size_t length;
    unsigned bit = text__class_at(v, at, &length);
    bool prefix = !(bit & (TEXT__L | TEXT__N)) && !text__is_newline(v, at);
    for (int i = 0; i < 4; i++) {
        if (i % 2 == 0 && !prefix) {
            continue;
        }
        size_t begin = i % 2 == 0 ? at + length : at;
        size_t end = text__match_cased(v, begin, i < 2);
        if (end > begin) {
            return end + (option & TEXT__O_CONTRACTED ? text__contraction(v, end, option) : 0);
        }
    }
    if (bit & TEXT__N) {
        return text__match_digits(v, at, option);
    }
    return text__match_rest(v, at, ~(TEXT__WS | TEXT__N | TEXT__L), "\r\n/");
}

static bool text__is_ascii(const text__view* v, size_t at, bool letter) {
    if (at >= v->end) {
        return false;
    }
    unsigned char c = v->s[at];
    bool is_letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    bool is_digit = c >= '0' && c <= '9';
    return letter ? is_letter : c > 0x20 && c < 0x7F && !is_letter && !is_digit;
}

// The words of DeepSeek-V3; numbers are not matched.
static size_t text__match_deepseek3(const text__view* v, size_t at, unsigned option) {
    (void)option;
    if (text__is_ascii(v, at, false) && text__is_ascii(v, at + 1, true)) {
        size_t end = at + 1;
        while (text__is_ascii(v, end, true)) {
            end++;
        }
        return end;
    }
    size_t length;
    size_t unused;
    unsigned bit = text__class_at(v, at, &length);
    if (!(bit & (TEXT__L | TEXT__P | TEXT__S)) && !text__is_newline(v, at) &&
        (text__class_at(v, at + length, &unused) & (TEXT__L | TEXT__M))) {
        return text__run(v, at + length, TEXT__L | TEXT__M);
    }
    if (bit & (TEXT__L | TEXT__M)) {
        return text__run(v, at, TEXT__L | TEXT__M);
    }
    return text__match_rest(v, at, TEXT__P | TEXT__S, "\r\n");
}

// [U+4E00-U+9FA5 U+3040-U+309F U+30A0-U+30FF]+ , also of DeepSeek-V3.
static size_t text__match_chinese(const text__view* v, size_t at, unsigned option) {
    (void)option;
    while (at < v->end && v->s[at] >= 0xE3) {
        uint32_t code;
        size_t length = text__utf8(v->s + at, v->end - at, &code);
        if (length == 0 ||
            !((code >= 0x4E00 && code <= 0x9FA5) || (code >= 0x3040 && code <= 0x30FF))) {
            break;
        }
        at += length;
    }
    return at;
}

// [0-9][0-9][0-9]
static size_t text__match_ascii3(const text__view* v, size_t at, unsigned option) {
    (void)option;
    for (size_t i = 0; i < 3; i++) {
        if (at + i >= v->end || v->s[at + i] < '0' || v->s[at + i] > '9') {
            return at;
        }
    }
    return at + 3;
}

// \w+|[^\w\s]+
static size_t text__match_words(const text__view* v, size_t at, unsigned option) {
    (void)option;
    size_t end = text__run(v, at, TEXT__W);
    return end > at ? end : text__run(v, at, ~(TEXT__W | TEXT__WS));
}

// The end of the match at a position; the position itself when there is none.
typedef size_t text__match_fn(const text__view* v, size_t at, unsigned option);

typedef struct text__pattern {
    const char* regex;
    text__match_fn* match;
    unsigned option;
} text__pattern;

#define TEXT__R_ANY "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define TEXT__R_ANY2 "'(?i:[sdmt]|ll|ve|re)"
#define TEXT__R_ASCII "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
#define TEXT__R_WORD "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
#define TEXT__R_WORD2 "|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|"
#define TEXT__R_LINES "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define TEXT__R_LINES2 "|\\s*[\\r\\n]|\\s+(?!\\S)|\\s+"
#define TEXT__R_REST "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*" TEXT__R_LINES
#define TEXT__R_REST2 "| ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*" TEXT__R_LINES2
#define TEXT__R_GPT2 "| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
#define TEXT__R_UP "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define TEXT__R_LOW "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define TEXT__R_PRE "[^\\r\\n\\p{L}\\p{N}]?"
#define TEXT__R_CASED(tail)                                                                        \
    TEXT__R_PRE TEXT__R_UP "*" TEXT__R_LOW "+" tail "|" TEXT__R_PRE TEXT__R_UP "+" TEXT__R_LOW     \
                           "*" tail "|"
#define TEXT__R_REST3 "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*" TEXT__R_LINES
#define TEXT__R_DEEPSEEK3                                                                          \
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?"           \
    "[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*" TEXT__R_LINES
#define TEXT__R_MARKS                                                                              \
    "|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}| "                                              \
    "?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*" TEXT__R_LINES

static const text__pattern text__patterns[] = {
    // GPT-2, also the pattern of the ByteLevel step; must be the first
    {"'s|'t|'re|'ve|'m|'ll|'d" TEXT__R_GPT2, text__match_gpt2, 0},
    {"'(?:[sdmt]|ll|ve|re)" TEXT__R_GPT2, text__match_gpt2, 0},
    // Llama-3, GLM-4, Phi-4, OLMo-2, ...
    {TEXT__R_ANY TEXT__R_WORD "\\p{N}{1,3}" TEXT__R_REST, text__match_cl100k,
     TEXT__O_ANY_CASE | TEXT__O_DIGITS_3},
    {TEXT__R_ANY2 TEXT__R_WORD "\\p{N}{1,3}" TEXT__R_REST, text__match_cl100k,
     TEXT__O_ANY_CASE | TEXT__O_DIGITS_3},
    {TEXT__R_ANY2 TEXT__R_WORD2 "\\p{N}{1,3}" TEXT__R_REST2, text__match_cl100k,
     TEXT__O_ANY_CASE | TEXT__O_DIGITS_3},
    {TEXT__R_ASCII TEXT__R_WORD "\\p{N}{1,3}" TEXT__R_REST, text__match_cl100k,
     TEXT__O_ASCII_CASE | TEXT__O_DIGITS_3},
    {TEXT__R_ANY2 TEXT__R_WORD2 "\\p{N}" TEXT__R_REST2, text__match_cl100k,
     TEXT__O_ANY_CASE | TEXT__O_DIGITS_1},
    // Qwen2, Qwen2.5, Qwen3
    {TEXT__R_ANY TEXT__R_WORD "\\p{N}" TEXT__R_REST, text__match_cl100k,
     TEXT__O_ANY_CASE | TEXT__O_DIGITS_1},
    {TEXT__R_ASCII TEXT__R_WORD "\\p{N}" TEXT__R_REST, text__match_cl100k,
     TEXT__O_ASCII_CASE | TEXT__O_DIGITS_1},
    // Qwen3.5
    {TEXT__R_ANY TEXT__R_MARKS, text__match_cl100k,
     TEXT__O_ANY_CASE | TEXT__O_DIGITS_1 | TEXT__O_MARKS},
    // GPT-4o, Llama-4, gpt-oss
    {TEXT__R_CASED(TEXT__R_ANY "?") "\\p{N}{1,3}" TEXT__R_REST3, text__match_o200k,
     TEXT__O_ANY_CASE | TEXT__O_CONTRACTED | TEXT__O_DIGITS_3},
    // Tekken
    {TEXT__R_CASED("") "\\p{N}" TEXT__R_REST3, text__match_o200k, TEXT__O_DIGITS_1},
    {TEXT__R_CASED("") "\\p{N}{1,3}" TEXT__R_REST3, text__match_o200k, TEXT__O_DIGITS_3},
    // DeepSeek-V3, in three steps
    {"\\p{N}{1,3}", text__match_digits, TEXT__O_DIGITS_3},
    {"\\p{N}", text__match_digits, TEXT__O_DIGITS_1},
    {"\\p{N}+", text__match_digits, 0},
    {"[\xE4\xB8\x80-\xE9\xBE\xA5\xE3\x81\x80-\xE3\x82\x9F\xE3\x82\xA0-\xE3\x83\xBF]+",
     text__match_chinese, 0},
    {TEXT__R_DEEPSEEK3, text__match_deepseek3, 0},
    {"[0-9][0-9][0-9]", text__match_ascii3, 0}, // Falcon
    {"\\w+|[^\\w\\s]+", text__match_words, 0}   // the Whitespace step
};

static const text__pattern* text__pattern_find(const char* regex) {
    for (size_t i = 0; i < TEXT__COUNT(text__patterns); i++) {
        if (strcmp(text__patterns[i].regex, regex) == 0) {
            return &text__patterns[i];
        }
    }
    return NULL;
}

// What becomes of the matches.
enum { TEXT__B_ISOLATED, TEXT__B_REMOVED, TEXT__B_PREVIOUS, TEXT__B_NEXT, TEXT__B_CONTIGUOUS };

typedef struct text__piece {
    size_t begin;
    size_t end;
    bool match; // while splitting
} text__piece;

typedef struct text__pieces {
    text__piece* data;
    size_t count;
    size_t capacity;
} text__pieces;

static bool text__pieces_add(text__pieces* pieces, size_t begin, size_t end, bool match,
                             text_error* error) {
    void* data = pieces->data;
    bool good =
        text__reserve(&data, &pieces->capacity, pieces->count, 1, sizeof(text__piece), error);
    pieces->data = (text__piece*)data;
    TEXT__TRY(good);
    text__piece* piece = &pieces->data[pieces->count++];
    piece->begin = begin;
    piece->end = end;
    piece->match = match;
    return true;
}

// One step of normalizer, pre-tokenizer or decoder.
enum {
    TEXT__N_NFC,
    TEXT__N_NFD,
    TEXT__N_PREPEND,
    TEXT__N_REPLACE,
    TEXT__N_STRIP,
    TEXT__P_REGEX,
    TEXT__P_STRING,
    TEXT__P_CLASS,
    TEXT__P_PUNCTUATION,
    TEXT__P_PREFIX_SPACE,
    TEXT__P_BYTES,
    TEXT__P_METASPACE,
    TEXT__D_REPLACE,
    TEXT__D_BYTE_FALLBACK,
    TEXT__D_FUSE,
    TEXT__D_STRIP,
    TEXT__D_BYTES,
    TEXT__D_METASPACE,
    TEXT__D_JOIN
};

typedef struct text__step {
    int kind;
    const text__pattern* pattern;
    unsigned mask; // classes of P_CLASS
    int behavior;
    bool invert;
    bool always; // Metaspace: in front of every piece, not only of the first
    bool never;
    char* a; // owned: what is replaced, put in front, stripped, ...
    size_t a_size;
    char* b;
    size_t b_size;
    size_t start; // how many are stripped
    size_t stop;
} text__step;

enum { TEXT__STEPS = 16 };

typedef struct text__steps {
    text__step data[TEXT__STEPS];
    size_t count;
} text__steps;

// The end of a match of the step at a position, or the position.
static size_t text__step_match(const text__step* step, const text__view* v, size_t at) {
    size_t length;
    if (step->kind == TEXT__P_REGEX) {
        return step->pattern->match(v, at, step->pattern->option);
    }
    if (step->kind == TEXT__P_STRING) {
        bool same = v->end - at >= step->a_size && memcmp(v->s + at, step->a, step->a_size) == 0;
        return same ? at + step->a_size : at;
    }
    unsigned bit = text__class_at(v, at, &length);
    if (step->kind == TEXT__P_PUNCTUATION) {
        bool ascii_symbol = length == 1 && v->s[at] < 0x80 && (bit & TEXT__S);
        return (bit & TEXT__P_STEP) || ascii_symbol ? at + length : at;
    }
    return bit & step->mask ? at + length : at;
}

// Matches and what lies between them, in order, all of the piece.
static bool text__step_find(const text__step* step, const text__view* v, size_t begin,
                            text__pieces* out, text_error* error) {
    size_t at = begin;
    size_t gap = begin;
    while (at < v->end) {
        size_t end = text__step_match(step, v, at);
        if (end > at) {
            if (at > gap) {
                TEXT__TRY(text__pieces_add(out, gap, at, step->invert, error));
            }
            TEXT__TRY(text__pieces_add(out, at, end, !step->invert, error));
            at = end;
            gap = end;
        } else {
            size_t length;
            (void)text__class_at(v, at, &length);
            at += length;
        }
    }
    return at == gap || text__pieces_add(out, gap, at, step->invert, error);
}

// Applies the behavior to found[0..) and appends what remains.
static bool text__step_merge(int behavior, const text__pieces* found, text__pieces* out,
                             text_error* error) {
    size_t fence = out->count; // pieces before this one belong to an earlier piece
    bool before = false;
    for (size_t i = 0; i < found->count; i++) {
        text__piece piece = found->data[i];
        bool join = false;
        if (behavior == TEXT__B_REMOVED && piece.match) {
            continue;
        }
        if (behavior == TEXT__B_PREVIOUS) {
            join = piece.match && !before;
        } else if (behavior == TEXT__B_CONTIGUOUS) {
            join = piece.match == before;
        } else if (behavior == TEXT__B_NEXT) {
            // a match goes to the piece after it unless that is a match too
            join = i > 0 && found->data[i - 1].match && !piece.match;
        }
        before = piece.match;
        if (join && out->count > fence) {
            out->data[out->count - 1].end = piece.end;
        } else {
            TEXT__TRY(text__pieces_add(out, piece.begin, piece.end, false, error));
        }
    }
    return true;
}
