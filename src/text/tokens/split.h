static bool qlora__text_is(const qlora__text_view* v, size_t at, char c) {
    return at < v->end && v->s[at] == (unsigned char)c;
}

static bool qlora__text_is_newline(const qlora__text_view* v, size_t at) {
    return qlora__text_is(v, at, '\n') || qlora__text_is(v, at, '\r');
}

// Options of the matchers.
enum {
    QLORA__TEXT_O_ANY_CASE = 1,   // contractions in any case
    QLORA__TEXT_O_ASCII_CASE = 2, // ASCII letters only
    QLORA__TEXT_O_DIGITS_1 = 4,
    QLORA__TEXT_O_DIGITS_3 = 8,
    QLORA__TEXT_O_MARKS = 16,       // marks count as letters
    QLORA__TEXT_O_CONTRACTED = 32,  // contractions belong to the preceding word
    QLORA__TEXT_O_WORD_PATTERN = 64 // \w+ and [^\w\s]+
};

// 's 't 're 've 'm 'll 'd: the length of the match, or 0.
static size_t qlora__text_contraction(const qlora__text_view* v, size_t at, unsigned option) {
    if (!qlora__text_is(v, at, '\'') || at + 1 >= v->end) {
        return 0;
    }
    unsigned fold = option & (QLORA__TEXT_O_ANY_CASE | QLORA__TEXT_O_ASCII_CASE) ? 0x20u : 0u;
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
    // U+017F, the long s, equals s when case is ignored
    return (option & QLORA__TEXT_O_ANY_CASE) && a == 0xC5 && next == 0xBF ? 3 : 0;
}

// \s+(?!\S)|\s+ : white space, without its last character if other text follows.
static size_t qlora__text_match_space(const qlora__text_view* v, size_t at) {
    size_t length;
    size_t end = at;
    size_t last = at;
    while (qlora__text_class_at(v, end, &length) & QLORA__TEXT_WS) {
        last = end;
        end += length;
    }
    return end < v->end && last > at ? last : end;
}

// \s*[\r\n]+ : white space through its last line end; `at` when there is none.
static size_t qlora__text_match_lines(const qlora__text_view* v, size_t at) {
    size_t length;
    size_t found = at;
    while (qlora__text_class_at(v, at, &length) & QLORA__TEXT_WS) {
        if (qlora__text_is_newline(v, at)) {
            found = at + 1;
        }
        at += length;
    }
    return found;
}

static size_t qlora__text_match_gpt2(const qlora__text_view* v, size_t at, unsigned option) {
    size_t length = qlora__text_contraction(v, at, option);
    if (length > 0) {
        return at + length;
    }
    static const unsigned masks[] = {QLORA__TEXT_L, QLORA__TEXT_N,
                                     ~(QLORA__TEXT_L | QLORA__TEXT_N | QLORA__TEXT_WS)};
    size_t begin = qlora__text_is(v, at, ' ') ? at + 1 : at;
    unsigned bit = qlora__text_class_at(v, begin, &length);
    for (size_t i = 0; i < QLORA__TEXT_COUNT(masks); i++) {
        if (bit & masks[i]) {
            return qlora__text_run(v, begin, masks[i]);
        }
    }
    return qlora__text_match_space(v, at);
}

static size_t qlora__text_match_digits(const qlora__text_view* v, size_t at, unsigned option) {
    size_t limit = option & QLORA__TEXT_O_DIGITS_1   ? 1
                   : option & QLORA__TEXT_O_DIGITS_3 ? 3
                                                     : SIZE_MAX;
    size_t length;
    for (size_t i = 0; i < limit && (qlora__text_class_at(v, at, &length) & QLORA__TEXT_N); i++) {
        at += length;
    }
    return at;
}

// ' ?[^\s\p{L}\p{N}]+[\r\n]*' and the white space that ends all these patterns.
static size_t qlora__text_match_rest(const qlora__text_view* v, size_t at, unsigned others,
                                     const char* tail) {
    size_t length;
    size_t begin = qlora__text_is(v, at, ' ') ? at + 1 : at;
    if (qlora__text_class_at(v, begin, &length) & others) {
        size_t end = qlora__text_run(v, begin, others);
        while (end < v->end && v->s[end] != 0 && strchr(tail, v->s[end]) != NULL) {
            end++;
        }
        return end;
    }
    size_t lines = qlora__text_match_lines(v, at);
    return lines > at ? lines : qlora__text_match_space(v, at);
}

// cl100k and its descendants (Llama 3, Qwen2, ...).
static size_t qlora__text_match_cl100k(const qlora__text_view* v, size_t at, unsigned option) {
    size_t length = qlora__text_contraction(v, at, option);
    if (length > 0) {
        return at + length;
    }
    unsigned letters = QLORA__TEXT_L | (option & QLORA__TEXT_O_MARKS ? QLORA__TEXT_M : 0u);
    unsigned bit = qlora__text_class_at(v, at, &length);
    if (!(bit & (QLORA__TEXT_L | QLORA__TEXT_N)) && !qlora__text_is_newline(v, at)) {
        size_t unused;
        if (qlora__text_class_at(v, at + length, &unused) & letters) {
            return qlora__text_run(v, at + length, letters);
        }
    }
    if (bit & letters) {
        return qlora__text_run(v, at, letters);
    }
    if (bit & QLORA__TEXT_N) {
        return qlora__text_match_digits(v, at, option);
    }
    return qlora__text_match_rest(v, at, ~(QLORA__TEXT_WS | QLORA__TEXT_N | letters), "\r\n");
}

// [Lu Lt Lm Lo M]*[Ll Lm Lo M]+ (capitalised) or [Lu Lt Lm Lo M]+[Ll Lm Lo M]*; `at` if no match.
static size_t qlora__text_match_cased(const qlora__text_view* v, size_t at, bool capitalised) {
    const unsigned upper = QLORA__TEXT_BIT(UPPER) | QLORA__TEXT_BIT(LETTER) | QLORA__TEXT_M;
    const unsigned lower = QLORA__TEXT_BIT(LOWER) | QLORA__TEXT_BIT(LETTER) | QLORA__TEXT_M;
    size_t length;
    size_t end = at;
    size_t back = at; // after the last character of the first run that is also of the second kind
    unsigned bit;
    while ((bit = qlora__text_class_at(v, end, &length)) & upper) {
        end += length;
        if (bit & lower) {
            back = end;
        }
    }
    if (bit & lower) {
        return capitalised || end > at ? qlora__text_run(v, end, lower) : at;
    }
    return capitalised ? back : end;
}

// o200k and its descendants (GPT-4o, Llama 4, Mistral's Tekken).
static size_t qlora__text_match_o200k(const qlora__text_view* v, size_t at, unsigned option) {
    size_t length;
    unsigned bit = qlora__text_class_at(v, at, &length);
    bool prefix = !(bit & (QLORA__TEXT_L | QLORA__TEXT_N)) && !qlora__text_is_newline(v, at);
    for (int i = 0; i < 4; i++) {
        if (i % 2 == 0 && !prefix) {
            continue;
        }
        size_t begin = i % 2 == 0 ? at + length : at;
        size_t end = qlora__text_match_cased(v, begin, i < 2);
        if (end > begin) {
            return end + (option & QLORA__TEXT_O_CONTRACTED
                              ? qlora__text_contraction(v, end, option)
                              : 0);
        }
    }
    if (bit & QLORA__TEXT_N) {
        return qlora__text_match_digits(v, at, option);
    }
    return qlora__text_match_rest(v, at, ~(QLORA__TEXT_WS | QLORA__TEXT_N | QLORA__TEXT_L),
                                  "\r\n/");
}

static bool qlora__text_is_ascii(const qlora__text_view* v, size_t at, bool letter) {
    if (at >= v->end) {
        return false;
    }
    unsigned char c = v->s[at];
    bool is_letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    bool is_digit = c >= '0' && c <= '9';
    return letter ? is_letter : c > 0x20 && c < 0x7F && !is_letter && !is_digit;
}

// The words of DeepSeek-V3; numbers are not matched.
static size_t qlora__text_match_deepseek3(const qlora__text_view* v, size_t at, unsigned option) {
    (void)option;
    if (qlora__text_is_ascii(v, at, false) && qlora__text_is_ascii(v, at + 1, true)) {
        size_t end = at + 1;
        while (qlora__text_is_ascii(v, end, true)) {
            end++;
        }
        return end;
    }
    size_t length;
    size_t unused;
    unsigned bit = qlora__text_class_at(v, at, &length);
    if (!(bit & (QLORA__TEXT_L | QLORA__TEXT_P | QLORA__TEXT_S)) &&
        !qlora__text_is_newline(v, at) &&
        (qlora__text_class_at(v, at + length, &unused) & (QLORA__TEXT_L | QLORA__TEXT_M))) {
        return qlora__text_run(v, at + length, QLORA__TEXT_L | QLORA__TEXT_M);
    }
    if (bit & (QLORA__TEXT_L | QLORA__TEXT_M)) {
        return qlora__text_run(v, at, QLORA__TEXT_L | QLORA__TEXT_M);
    }
    return qlora__text_match_rest(v, at, QLORA__TEXT_P | QLORA__TEXT_S, "\r\n");
}

// [U+4E00-U+9FA5 U+3040-U+309F U+30A0-U+30FF]+ , also of DeepSeek-V3.
static size_t qlora__text_match_chinese(const qlora__text_view* v, size_t at, unsigned option) {
    (void)option;
    while (at < v->end && v->s[at] >= 0xE3) {
        uint32_t code;
        size_t length = qlora__text_utf8(v->s + at, v->end - at, &code);
        if (length == 0 ||
            !((code >= 0x4E00 && code <= 0x9FA5) || (code >= 0x3040 && code <= 0x30FF))) {
            break;
        }
        at += length;
    }
    return at;
}

// [0-9][0-9][0-9]
static size_t qlora__text_match_ascii3(const qlora__text_view* v, size_t at, unsigned option) {
    (void)option;
    for (size_t i = 0; i < 3; i++) {
        if (at + i >= v->end || v->s[at + i] < '0' || v->s[at + i] > '9') {
            return at;
        }
    }
    return at + 3;
}

// \w+|[^\w\s]+ where \w has the joiners
static size_t qlora__text_match_words(const qlora__text_view* v, size_t at, unsigned option) {
    const unsigned word = QLORA__TEXT_W | QLORA__TEXT_BIT(JOINER);
    (void)option;
    size_t end = qlora__text_run(v, at, word);
    return end > at ? end : qlora__text_run(v, at, ~(word | QLORA__TEXT_WS));
}

// The end of the match at a position; the position itself when there is none.
typedef size_t qlora__text_match_fn(const qlora__text_view* v, size_t at, unsigned option);

typedef struct qlora__text_pattern {
    const char* regex;
    qlora__text_match_fn* match;
    unsigned option;
} qlora__text_pattern;

static const qlora__text_pattern qlora__text_patterns[] = {
    // GPT-2, also the pattern of the ByteLevel step; must be first
    {"'s|'t|'re|'ve|'m|'ll|'d" QLORA__SPLITS_GPT2, qlora__text_match_gpt2, 0},
    {"'(?:[sdmt]|ll|ve|re)" QLORA__SPLITS_GPT2, qlora__text_match_gpt2, 0},
    // Llama-3, GLM-4, Phi-4, OLMo-2, ...
    {QLORA__SPLITS_ANY QLORA__SPLITS_WORD "\\p{N}{1,3}" QLORA__SPLITS_REST,
     qlora__text_match_cl100k, QLORA__TEXT_O_ANY_CASE | QLORA__TEXT_O_DIGITS_3},
    {QLORA__SPLITS_ANY2 QLORA__SPLITS_WORD "\\p{N}{1,3}" QLORA__SPLITS_REST,
     qlora__text_match_cl100k, QLORA__TEXT_O_ANY_CASE | QLORA__TEXT_O_DIGITS_3},
    {QLORA__SPLITS_ANY2 QLORA__SPLITS_WORD2 "\\p{N}{1,3}" QLORA__SPLITS_REST2,
     qlora__text_match_cl100k, QLORA__TEXT_O_ANY_CASE | QLORA__TEXT_O_DIGITS_3},
    {QLORA__SPLITS_ASCII QLORA__SPLITS_WORD "\\p{N}{1,3}" QLORA__SPLITS_REST,
     qlora__text_match_cl100k, QLORA__TEXT_O_ASCII_CASE | QLORA__TEXT_O_DIGITS_3},
    {QLORA__SPLITS_ANY2 QLORA__SPLITS_WORD2 "\\p{N}" QLORA__SPLITS_REST2, qlora__text_match_cl100k,
     QLORA__TEXT_O_ANY_CASE | QLORA__TEXT_O_DIGITS_1},
    // Qwen2, Qwen2.5, Qwen3
    {QLORA__SPLITS_ANY QLORA__SPLITS_WORD "\\p{N}" QLORA__SPLITS_REST, qlora__text_match_cl100k,
     QLORA__TEXT_O_ANY_CASE | QLORA__TEXT_O_DIGITS_1},
    {QLORA__SPLITS_ASCII QLORA__SPLITS_WORD "\\p{N}" QLORA__SPLITS_REST, qlora__text_match_cl100k,
     QLORA__TEXT_O_ASCII_CASE | QLORA__TEXT_O_DIGITS_1},
    // Qwen3.5
    {QLORA__SPLITS_ANY QLORA__SPLITS_MARKS, qlora__text_match_cl100k,
     QLORA__TEXT_O_ANY_CASE | QLORA__TEXT_O_DIGITS_1 | QLORA__TEXT_O_MARKS},
    // GPT-4o, Llama-4, gpt-oss
    {QLORA__SPLITS_CASED(QLORA__SPLITS_ANY "?") "\\p{N}{1,3}" QLORA__SPLITS_REST3,
     qlora__text_match_o200k,
     QLORA__TEXT_O_ANY_CASE | QLORA__TEXT_O_CONTRACTED | QLORA__TEXT_O_DIGITS_3},
    // Tekken
    {QLORA__SPLITS_CASED("") "\\p{N}" QLORA__SPLITS_REST3, qlora__text_match_o200k,
     QLORA__TEXT_O_DIGITS_1},
    {QLORA__SPLITS_CASED("") "\\p{N}{1,3}" QLORA__SPLITS_REST3, qlora__text_match_o200k,
     QLORA__TEXT_O_DIGITS_3},
    // DeepSeek-V3, in three steps
    {"\\p{N}{1,3}", qlora__text_match_digits, QLORA__TEXT_O_DIGITS_3},
    {"\\p{N}", qlora__text_match_digits, QLORA__TEXT_O_DIGITS_1},
    {"\\p{N}+", qlora__text_match_digits, 0},
    {"[\xE4\xB8\x80-\xE9\xBE\xA5\xE3\x81\x80-\xE3\x82\x9F\xE3\x82\xA0-\xE3\x83\xBF]+",
     qlora__text_match_chinese, 0},
    {QLORA__SPLITS_DEEPSEEK3, qlora__text_match_deepseek3, 0},
    {"[0-9][0-9][0-9]", qlora__text_match_ascii3, 0}, // Falcon
    // The Whitespace step: \w+|[^\w\s]+ in another engine, whose \w differs.
    {"Whitespace", qlora__text_match_words, 0}};

// Whether an expression is a known one. Files have line ends as they are, or escaped.
static bool qlora__text_pattern_same(const char* known, const char* regex) {
    while (*known != '\0' && *regex != '\0') {
        bool escaped = *regex == '\n' || *regex == '\r';
        if (escaped ? known[0] != '\\' || known[1] != (*regex == '\n' ? 'n' : 'r')
                    : known[0] != *regex) {
            return false;
        }
        known += escaped ? 2 : 1;
        regex++;
    }
    return *known == *regex;
}

static const qlora__text_pattern* qlora__text_pattern_find(const char* regex) {
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__text_patterns); i++) {
        if (qlora__text_pattern_same(qlora__text_patterns[i].regex, regex)) {
            return &qlora__text_patterns[i];
        }
    }
    return NULL;
}

// What happens to the matches.
enum {
    QLORA__TEXT_B_ISOLATED,
    QLORA__TEXT_B_REMOVED,
    QLORA__TEXT_B_PREVIOUS,
    QLORA__TEXT_B_NEXT,
    QLORA__TEXT_B_CONTIGUOUS
};

typedef struct qlora__text_piece {
    size_t begin;
    size_t end;
    bool match; // used while splitting
} qlora__text_piece;

typedef struct qlora__text_pieces {
    qlora__text_piece* data;
    size_t count;
    size_t capacity;
} qlora__text_pieces;

static qlora_result qlora__text_pieces_add(qlora__env* env, qlora__text_pieces* pieces,
                                           size_t begin, size_t end, bool match) {
    void* data = pieces->data;
    qlora_result r = qlora__text_reserve(env, &data, &pieces->capacity, pieces->count, 1,
                                         sizeof(qlora__text_piece));
    pieces->data = (qlora__text_piece*)data;
    QLORA__TRY(r);
    qlora__text_piece* piece = &pieces->data[pieces->count++];
    piece->begin = begin;
    piece->end = end;
    piece->match = match;
    return QLORA_OK;
}

// One step of a normalizer, pre-tokenizer or decoder.
enum {
    QLORA__TEXT_N_NFC,
    QLORA__TEXT_N_NFD,
    QLORA__TEXT_N_PREPEND,
    QLORA__TEXT_N_REPLACE,
    QLORA__TEXT_N_STRIP,
    QLORA__TEXT_N_REPLACE_PATTERN,
    QLORA__TEXT_N_CHARSMAP,
    QLORA__TEXT_N_NMT,
    QLORA__TEXT_N_LOWER,
    QLORA__TEXT_P_REGEX,
    QLORA__TEXT_P_STRING,
    QLORA__TEXT_P_CLASS,
    QLORA__TEXT_P_PUNCTUATION,
    QLORA__TEXT_P_PREFIX_SPACE,
    QLORA__TEXT_P_BYTES,
    QLORA__TEXT_P_METASPACE,
    QLORA__TEXT_D_REPLACE,
    QLORA__TEXT_D_BYTE_FALLBACK,
    QLORA__TEXT_D_FUSE,
    QLORA__TEXT_D_STRIP,
    QLORA__TEXT_D_BYTES,
    QLORA__TEXT_D_METASPACE,
    QLORA__TEXT_D_JOIN
};

typedef struct qlora__text_step {
    int kind;
    const qlora__text_pattern* pattern; // P_REGEX: a known pattern,
    qlora__pattern* program;            // or, owned, any other one; also N_REPLACE_PATTERN
    unsigned mask;                      // classes of P_CLASS
    int behavior;
    bool invert;
    bool always; // Metaspace: before every piece, not only the first
    bool never;
    char* a; // owned: what is replaced, prepended, stripped, ...
    size_t a_size;
    char* b;
    size_t b_size;
    size_t start; // how many copies are stripped
    size_t stop;
} qlora__text_step;

enum { QLORA__TEXT_STEPS = 16 };

typedef struct qlora__text_steps {
    qlora__text_step data[QLORA__TEXT_STEPS];
    size_t count;
} qlora__text_steps;

// Numbers of Unicode 17, which the Digits step knows but regular expressions do not: U+11DE0 to
// U+11DE9, U+16FF4 to U+16FF6. The character has four bytes.
static bool qlora__text_new_number(const unsigned char* s) {
    static const unsigned char runs[][4] = {{0x91, 0xB7, 0xA0, 0xA9}, {0x96, 0xBF, 0xB4, 0xB6}};
    for (size_t i = 0; i < QLORA__TEXT_COUNT(runs); i++) {
        if (s[1] == runs[i][0] && s[2] == runs[i][1] && s[3] >= runs[i][2] && s[3] <= runs[i][3]) {
            return s[0] == 0xF0;
        }
    }
    return false;
}

// The end of a match of the step at a position, or the position. Not for programs.
static size_t qlora__text_step_match(const qlora__text_step* step, const qlora__text_view* v,
                                     size_t at) {
    size_t length;
    if (step->kind == QLORA__TEXT_P_REGEX) {
        return step->pattern->match(v, at, step->pattern->option);
    }
    if (step->kind == QLORA__TEXT_P_STRING) {
        bool same = v->end - at >= step->a_size && memcmp(v->s + at, step->a, step->a_size) == 0;
        return same ? at + step->a_size : at;
    }
    unsigned bit = qlora__text_class_at(v, at, &length);
    if (step->kind == QLORA__TEXT_P_PUNCTUATION) {
        bool ascii_symbol = length == 1 && v->s[at] < 0x80 && (bit & QLORA__TEXT_S);
        bool mark = length == 4 && memcmp(v->s + at, "\xF0\x91\x87\x89", 4) == 0; // U+111C9
        return (bit & QLORA__TEXT_P_STEP) || ascii_symbol || mark ? at + length : at;
    }
    bool number = (step->mask & QLORA__TEXT_N) && length == 4 && qlora__text_new_number(v->s + at);
    return (bit & step->mask) || number ? at + length : at;
}

// The same for a step of any kind; the text that is searched begins at `begin`.
static qlora_result qlora__text_step_end(qlora__env* env, const qlora__text_step* step,
                                         const qlora__text_view* v, size_t begin, size_t at,
                                         size_t* end) {
    if (step->program != NULL) {
        return qlora__pattern_match(env, step->program, v, begin, at, end);
    }
    *end = qlora__text_step_match(step, v, at);
    return QLORA_OK;
}

// Matches and the text between them, in order: together, the text from *begin to the end of the
// first match at or after `stop`, or to the end of the piece. *begin moves there. The whole piece,
// which a pattern may look back into, begins at `first`.
static qlora_result qlora__text_step_find(qlora__env* env, const qlora__text_step* step,
                                          const qlora__text_view* v, size_t first, size_t* begin,
                                          size_t stop, qlora__text_pieces* out) {
    size_t at = *begin;
    size_t gap = *begin;
    if (step->program != NULL) {
        qlora__pattern_allow(step->program, v->end - at);
    }
    while (at < v->end && (at < stop || at > gap)) {
        size_t end = at;
        QLORA__TRY(qlora__text_step_end(env, step, v, first, at, &end));
        if (end > at) {
            if (at > gap) {
                QLORA__TRY(qlora__text_pieces_add(env, out, gap, at, step->invert));
            }
            QLORA__TRY(qlora__text_pieces_add(env, out, at, end, !step->invert));
            at = end;
            gap = end;
        } else {
            size_t length;
            (void)qlora__text_class_at(v, at, &length);
            at += length;
        }
    }
    *begin = at;
    return at == gap ? QLORA_OK : qlora__text_pieces_add(env, out, gap, at, step->invert);
}

// Applies the behavior to found[0..) and appends what remains.
static qlora_result qlora__text_step_merge(qlora__env* env, int behavior,
                                           const qlora__text_pieces* found,
                                           qlora__text_pieces* out) {
    size_t fence = out->count; // pieces before this one belong to an earlier piece
    bool before = false;
    for (size_t i = 0; i < found->count; i++) {
        qlora__text_piece piece = found->data[i];
        bool join = false;
        if (behavior == QLORA__TEXT_B_REMOVED && piece.match) {
            continue;
        }
        if (behavior == QLORA__TEXT_B_PREVIOUS) {
            join = piece.match && !before;
        } else if (behavior == QLORA__TEXT_B_CONTIGUOUS) {
            join = piece.match == before;
        } else if (behavior == QLORA__TEXT_B_NEXT) {
            // a match joins the piece after it, unless that is also a match
            join = i > 0 && found->data[i - 1].match && !piece.match;
        }
        before = piece.match;
        if (join && out->count > fence) {
            out->data[out->count - 1].end = piece.end;
        } else {
            QLORA__TRY(qlora__text_pieces_add(env, out, piece.begin, piece.end, false));
        }
    }
    return QLORA_OK;
}
