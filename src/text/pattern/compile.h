// ---- regular expressions of pre-tokenizers ------------------------------------------------------

// A pattern is compiled to a small program for a machine that tries the alternatives in order and
// goes back to the last choice when it fails, as Oniguruma does (the engine of the `tokenizers`
// library). Supported: literals, ., [sets], \d \w \s \p{..} and their opposites, \b \B ^ $ \A \z
// \Z, groups, (?i:..), (?=..), (?!..), (?>..), |, and * + ? {n,m}, also lazy; * + ? also
// possessive. Anything else is refused by name. Choices are kept on a stack of our own, so nothing
// recurses, and every match has a limited number of steps, so nothing hangs.

#define QLORA__PATTERN_STEPS 4096
#define QLORA__PATTERN_SETS 256
#define QLORA__PATTERN_RANGES 128 // of one set
#define QLORA__PATTERN_GROUPS 32
#define QLORA__PATTERN_REPEAT 1000

typedef enum qlora__pattern_op {
    QLORA__PATTERN_SET,   // one character of set `a`
    QLORA__PATTERN_RUN,   // `least` to `most` characters of set `a`, in the way `mode`
    QLORA__PATTERN_SPLIT, // continue with the next step; if that fails, at this + a
    QLORA__PATTERN_LAZY,  // continue at this + a; if that fails, with the next step
    QLORA__PATTERN_JUMP,  // continue at this + a
    QLORA__PATTERN_LOOK,  // look-ahead until LOOK_END at this + a; mode 1: negative
    QLORA__PATTERN_LOOK_END,
    QLORA__PATTERN_KEEP,   // note the position: the start of the group to keep; mode 1: its end
    QLORA__PATTERN_ATOMIC, // forget the choices between this and its end
    QLORA__PATTERN_ATOMIC_END,
    QLORA__PATTERN_LINE_BEGIN,
    QLORA__PATTERN_LINE_END,
    QLORA__PATTERN_TEXT_BEGIN,
    QLORA__PATTERN_TEXT_END,
    QLORA__PATTERN_LAST_LINE, // \Z: the end, or before a final line end
    QLORA__PATTERN_WORD,      // \b; mode 1: \B
    QLORA__PATTERN_MATCH
} qlora__pattern_op;

enum { QLORA__PATTERN_GREEDY, QLORA__PATTERN_RELUCTANT, QLORA__PATTERN_POSSESSIVE };

typedef struct qlora__pattern_step {
    qlora__pattern_op op;
    int32_t a;
    int32_t least;
    int32_t most; // -1: no limit
    int32_t mode;
} qlora__pattern_step;

// A set of characters: classes, parts of classes, and ranges.
typedef struct qlora__pattern_set {
    uint32_t ascii[4]; // the answer for the first 128 code points
    unsigned mask;     // classes that belong to it as a whole
    unsigned parts;    // QLORA__PATTERN_LU .. of the classes that have parts
    uint32_t ranges[QLORA__PATTERN_RANGES][2];
    uint32_t count;
    bool negated;
} qlora__pattern_set;

// A class of text/unicode/classes.h may hold two general categories; these are the ones that
// patterns tell apart, and the members of the rarer one.
enum {
    QLORA__PATTERN_LU = 1,
    QLORA__PATTERN_LT = 2,
    QLORA__PATTERN_LM = 4,
    QLORA__PATTERN_LO = 8,
    QLORA__PATTERN_ND = 16,
    QLORA__PATTERN_NL = 32,
    QLORA__PATTERN_Z = 64,       // white space that is a separator
    QLORA__PATTERN_CONTROL = 128 // white space that is a control character
};

// Oniguruma counts these numbers of Latin-1 as word characters in \w and \b, but not in a set.
static const uint32_t qlora__pattern_words[][2] = {{0xB2, 0xB3}, {0xB9, 0xB9}, {0xBC, 0xBE}};

static bool qlora__pattern_in(const uint32_t (*ranges)[2], size_t count, uint32_t code) {
    for (size_t i = 0; i < count; i++) {
        if (code >= ranges[i][0] && code <= ranges[i][1]) {
            return true;
        }
    }
    return false;
}

// The part of its class that a character belongs to; 0 if its class has no parts that differ.
static unsigned qlora__pattern_part(unsigned bit, uint32_t code) {
    static const uint32_t title[][2] = {
        {0x1C5, 0x1C5},   {0x1C8, 0x1C8},   {0x1CB, 0x1CB},   {0x1F2, 0x1F2},   {0x1F88, 0x1F8F},
        {0x1F98, 0x1F9F}, {0x1FA8, 0x1FAF}, {0x1FBC, 0x1FBC}, {0x1FCC, 0x1FCC}, {0x1FFC, 0x1FFC}};
    static const uint32_t letters[][2] = {
        {0x16EE, 0x16F0},   {0x2160, 0x2182},   {0x2185, 0x2188},   {0x3007, 0x3007},
        {0x3021, 0x3029},   {0x3038, 0x303A},   {0xA6E6, 0xA6EF},   {0x10140, 0x10174},
        {0x10341, 0x10341}, {0x1034A, 0x1034A}, {0x103D1, 0x103D5}, {0x12400, 0x1246E}};
    if (bit == QLORA__TEXT_BIT(UPPER)) {
        return qlora__pattern_in(title, QLORA__TEXT_COUNT(title), code) ? QLORA__PATTERN_LT
                                                                        : QLORA__PATTERN_LU;
    }
    if (bit == QLORA__TEXT_BIT(DIGIT)) {
        return qlora__pattern_in(letters, QLORA__TEXT_COUNT(letters), code) ? QLORA__PATTERN_NL
                                                                            : QLORA__PATTERN_ND;
    }
    if (bit == QLORA__TEXT_BIT(SPACE)) {
        return (code >= 9 && code <= 13) || code == 0x85 ? QLORA__PATTERN_CONTROL
                                                         : QLORA__PATTERN_Z;
    }
    return 0;
}

static bool qlora__pattern_has(const qlora__pattern_set* set, unsigned bit, uint32_t code) {
    bool in = (set->mask & bit) != 0 || (set->parts & qlora__pattern_part(bit, code)) != 0 ||
              qlora__pattern_in(set->ranges, set->count, code);
    return in != set->negated;
}

// A choice to come back to, or a mark that a look-ahead or an atomic group left.
typedef struct qlora__pattern_frame {
    size_t at;
    size_t begin; // of a run; a mark: the frame of the mark before it
    int32_t step;
    int32_t kind;
} qlora__pattern_frame;

enum {
    QLORA__PATTERN_CHOICE,  // continue at step
    QLORA__PATTERN_SHORTER, // a greedy run: give back one character, down to `begin`
    QLORA__PATTERN_LONGER,  // a lazy run: take one more
    QLORA__PATTERN_KEPT,    // not a choice: what was noted before, at place `begin`
    QLORA__PATTERN_MARK,    // forgotten when it is reached
    QLORA__PATTERN_MARK_NOT // a negative look-ahead: when everything in it failed, it holds
};

typedef struct qlora__pattern {
    qlora__pattern_step* steps;
    qlora__pattern_set* sets;
    int32_t count;
    int32_t set_count;
    size_t step_capacity;
    size_t set_capacity;
    qlora__pattern_frame* frames;
    size_t frame_capacity;
    size_t kept[2]; // the group to keep in the last match; SIZE_MAX: it took no part
    uint64_t left;  // steps that the present text may still take
    bool empty;    // it can match without taking a character
} qlora__pattern;

static void qlora__pattern_free(qlora__env* env, qlora__pattern* p) {
    if (p != NULL) {
        qlora__env_free(env, p->steps, p->step_capacity * sizeof *p->steps);
        qlora__env_free(env, p->sets, p->set_capacity * sizeof *p->sets);
        qlora__env_free(env, p->frames, p->frame_capacity * sizeof *p->frames);
        qlora__env_free(env, p, sizeof *p);
    }
}

// ---- compiling ----------------------------------------------------------------------------------

typedef struct qlora__pattern_group {
    int32_t begin;  // first step of the group
    int32_t branch; // first step of the current alternative
    int32_t jumps;  // last jump to the end of the group; each links to the previous one, -1 ends
    int32_t kind;   // the op that was opened for it, or -1
    int64_t width;  // least number of characters of the current alternative
    int64_t least;  // and of the shortest one so far; -1: none yet
    bool any_case;
    bool keep;
} qlora__pattern_group;

typedef struct qlora__pattern_parser {
    qlora__env* env;
    qlora__pattern* out;
    const uint8_t* classes;
    const char* text;
    size_t size;
    size_t at;
    qlora__pattern_group groups[QLORA__PATTERN_GROUPS];
    int depth;
    bool keeps;             // the next group without (? is to be kept
    qlora__pattern_set set; // being built
} qlora__pattern_parser;

static qlora_result qlora__pattern_refuse(const qlora__pattern_parser* p, const char* what) {
    return qlora__env_fail(p->env, QLORA_ERR_UNSUPPORTED,
                           "the regular expression %.200s has, at byte %llu, %s, which is not "
                           "supported",
                           p->text, (unsigned long long)p->at, what);
}

static bool qlora__pattern_is(const qlora__pattern_parser* p, const char* word) {
    size_t n = strlen(word);
    return p->size - p->at >= n && memcmp(p->text + p->at, word, n) == 0;
}

// Skips `word` if it comes next.
static bool qlora__pattern_accept(qlora__pattern_parser* p, const char* word) {
    bool found = qlora__pattern_is(p, word);
    p->at += found ? strlen(word) : 0;
    return found;
}

// Makes room for `n` steps at a place. Every jump inside the moved piece is relative and stays
// inside it.
static qlora_result qlora__pattern_open(qlora__pattern_parser* p, int32_t at, int32_t n) {
    qlora__pattern* out = p->out;
    if (n > QLORA__PATTERN_STEPS - out->count) {
        return qlora__pattern_refuse(p, "more than 4096 steps");
    }
    void* data = out->steps;
    qlora_result r = qlora__text_reserve(p->env, &data, &out->step_capacity, (size_t)out->count,
                                         (size_t)n, sizeof *out->steps);
    out->steps = (qlora__pattern_step*)data;
    QLORA__TRY(r);
    memmove(out->steps + at + n, out->steps + at, (size_t)(out->count - at) * sizeof *out->steps);
    memset(out->steps + at, 0, (size_t)n * sizeof *out->steps);
    out->count += n;
    return QLORA_OK;
}

static qlora_result qlora__pattern_insert(qlora__pattern_parser* p, int32_t at,
                                          qlora__pattern_op op, int32_t a, int32_t mode) {
    QLORA__TRY(qlora__pattern_open(p, at, 1));
    p->out->steps[at].op = op;
    p->out->steps[at].a = a;
    p->out->steps[at].mode = mode;
    return QLORA_OK;
}

static qlora_result qlora__pattern_append(qlora__pattern_parser* p, qlora__pattern_op op, int32_t a,
                                          int32_t mode) {
    return qlora__pattern_insert(p, p->out->count, op, a, mode);
}

// ---- sets ---------------------------------------------------------------------------------------

static qlora_result qlora__pattern_range(qlora__pattern_parser* p, uint32_t low, uint32_t high) {
    qlora__pattern_set* set = &p->set;
    if (low > high) {
        return qlora__pattern_refuse(p, "a range whose end is before its start");
    }
    if (set->count == QLORA__PATTERN_RANGES) {
        return qlora__pattern_refuse(p, "a set of more than 128 ranges");
    }
    set->ranges[set->count][0] = low;
    set->ranges[set->count][1] = high;
    set->count++;
    return QLORA_OK;
}

// A character or a range, in both cases if case is ignored: only ASCII letters have a simple rule.
static qlora_result qlora__pattern_chars(qlora__pattern_parser* p, uint32_t low, uint32_t high) {
    QLORA__TRY(qlora__pattern_range(p, low, high));
    if (!p->groups[p->depth].any_case) {
        return QLORA_OK;
    }
    if (high >= 0x80) {
        return qlora__pattern_refuse(p, "a character beyond ASCII where case is ignored");
    }
    for (uint32_t c = low; c <= high; c++) {
        uint32_t lower = c | 0x20u;
        if (lower < 'a' || lower > 'z') {
            continue;
        }
        QLORA__TRY(qlora__pattern_range(p, c ^ 0x20u, c ^ 0x20u));
        if (lower == 's' || lower == 'k') { // the long s, and the Kelvin sign
            uint32_t other = lower == 's' ? 0x17Fu : 0x212Au;
            QLORA__TRY(qlora__pattern_range(p, other, other));
        }
    }
    return QLORA_OK;
}

// Refuses what one character matches where case is ignored: the sharp s is ss, and ligatures are
// letters. The first letter was read, the second one is next.
static qlora_result qlora__pattern_pair(const qlora__pattern_parser* p, uint32_t first) {
    static const char* const pairs[] = {"ss", "st", "ff", "fi", "fl"};
    if (!p->groups[p->depth].any_case || p->at >= p->size) {
        return QLORA_OK;
    }
    for (size_t i = 0; i < QLORA__TEXT_COUNT(pairs); i++) {
        if ((first | 0x20u) == (uint8_t)pairs[i][0] && (p->text[p->at] | 0x20) == pairs[i][1]) {
            return qlora__pattern_refuse(p, "two letters that one character can stand for");
        }
    }
    return QLORA_OK;
}

typedef struct qlora__pattern_property {
    const char* name;
    unsigned mask;
    unsigned parts;
} qlora__pattern_property;

static const qlora__pattern_property qlora__pattern_properties[] = {
    {"L", QLORA__TEXT_L, 0},
    {"Lu", 0, QLORA__PATTERN_LU},
    {"Lt", 0, QLORA__PATTERN_LT},
    {"Ll", QLORA__TEXT_BIT(LOWER), 0},
    {"Lm", 0, QLORA__PATTERN_LM},
    {"Lo", 0, QLORA__PATTERN_LO},
    {"M", QLORA__TEXT_M, 0},
    {"N", QLORA__TEXT_N, 0},
    {"Nd", 0, QLORA__PATTERN_ND},
    {"Nl", 0, QLORA__PATTERN_NL},
    {"No", QLORA__TEXT_BIT(NUMBER), 0},
    {"P", QLORA__TEXT_P, 0},
    {"Pc", QLORA__TEXT_BIT(CONNECTOR), 0},
    {"S", QLORA__TEXT_S, 0},
    {"Z", 0, QLORA__PATTERN_Z},
    {"C", QLORA__TEXT_BIT(OTHER) | QLORA__TEXT_BIT(JOINER), QLORA__PATTERN_CONTROL},
    {"Letter", QLORA__TEXT_L, 0},
    {"Mark", QLORA__TEXT_M, 0},
    {"Number", QLORA__TEXT_N, 0},
    {"Punctuation", QLORA__TEXT_P, 0},
    {"Symbol", QLORA__TEXT_S, 0},
};

// Adds a property, or its opposite. The opposite of a property is one of classes and parts, too.
static void qlora__pattern_add(qlora__pattern_set* set, unsigned mask, unsigned parts,
                               bool opposite) {
    static const struct {
        unsigned bit;
        unsigned parts;
    } shared[] = {{QLORA__TEXT_BIT(UPPER), QLORA__PATTERN_LU | QLORA__PATTERN_LT},
                  {QLORA__TEXT_BIT(DIGIT), QLORA__PATTERN_ND | QLORA__PATTERN_NL},
                  {QLORA__TEXT_BIT(LETTER), QLORA__PATTERN_LM | QLORA__PATTERN_LO},
                  {QLORA__TEXT_BIT(SPACE), QLORA__PATTERN_Z | QLORA__PATTERN_CONTROL}};
    for (size_t i = 0; i < QLORA__TEXT_COUNT(shared); i++) {
        parts |= (mask & shared[i].bit) != 0 ? shared[i].parts : 0u;
        mask &= ~shared[i].bit;
    }
    if (opposite) {
        mask = ~mask & 0x7FFFu;
        parts = ~parts & 0xFFu;
        for (size_t i = 0; i < QLORA__TEXT_COUNT(shared); i++) {
            mask &= ~shared[i].bit;
        }
    }
    set->mask |= mask;
    set->parts |= parts;
}

// \p{..}, \P{..} and \p{^..}; the position is after the p.
static qlora_result qlora__pattern_parse_property(qlora__pattern_parser* p, bool opposite) {
    char name[32];
    size_t n = 0;
    if (!qlora__pattern_accept(p, "{")) {
        return qlora__pattern_refuse(p, "\\p without a name in braces");
    }
    opposite = qlora__pattern_accept(p, "^") ? !opposite : opposite;
    while (p->at + n < p->size && p->text[p->at + n] != '}' && n + 1 < sizeof name) {
        name[n] = p->text[p->at + n];
        n++;
    }
    name[n] = '\0';
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__pattern_properties); i++) {
        const qlora__pattern_property* property = &qlora__pattern_properties[i];
        if (strcmp(property->name, name) == 0) {
            p->at += n + 1;
            qlora__pattern_add(&p->set, property->mask, property->parts, opposite);
            return QLORA_OK;
        }
    }
    char what[64];
    snprintf(what, sizeof what, "the property %s", name);
    return qlora__pattern_refuse(p, what);
}

// \xHH, \x{H...} and \uHHHH; the position is after the letter.
static qlora_result qlora__pattern_parse_hex(qlora__pattern_parser* p, size_t digits,
                                             uint32_t* out) {
    bool braces = qlora__pattern_accept(p, "{");
    size_t most = braces ? 6 : digits;
    uint32_t code = 0;
    size_t n = 0;
    while (n < most && p->at < p->size) {
        static const char hex[] = "0123456789abcdef0123456789ABCDEF";
        const char* found = (const char*)memchr(hex, p->text[p->at], 32);
        if (found == NULL) {
            break;
        }
        code = code * 16 + (uint32_t)((found - hex) % 16);
        p->at++;
        n++;
    }
    if (n == 0 || (!braces && n != digits) || (braces && !qlora__pattern_accept(p, "}")) ||
        code >= QLORA__TEXT_CODES) {
        return qlora__pattern_refuse(p, "a hexadecimal escape that is not a code point");
    }
    *out = code;
    return QLORA_OK;
}

// One item of a set after a backslash: a class is added to the set (*is_class), a character is
// returned.
static qlora_result qlora__pattern_parse_escape(qlora__pattern_parser* p, bool* is_class,
                                                uint32_t* code) {
    static const char letters[] = "rntfvae";
    static const char meaning[] = "\r\n\t\f\v\a\x1b";
    if (p->at == p->size) {
        return qlora__pattern_refuse(p, "a backslash at its end");
    }
    char c = p->text[p->at];
    *is_class = true;
    p->at++;
    if (c == 'p' || c == 'P') {
        return qlora__pattern_parse_property(p, c == 'P');
    }
    if (c == 'd' || c == 'D') {
        qlora__pattern_add(&p->set, 0, QLORA__PATTERN_ND, c == 'D');
        return QLORA_OK;
    }
    if (c == 'w' || c == 'W') {
        qlora__pattern_add(&p->set, QLORA__TEXT_W, 0, c == 'W');
        return QLORA_OK;
    }
    if (c == 's' || c == 'S') {
        qlora__pattern_add(&p->set, QLORA__TEXT_WS, 0, c == 'S');
        return QLORA_OK;
    }
    *is_class = false;
    if (c == 'x' || c == 'u') {
        return qlora__pattern_parse_hex(p, c == 'x' ? 2 : 4, code);
    }
    const char* letter = strchr(letters, c);
    if (letter != NULL && c != '\0') {
        *code = (uint8_t)meaning[letter - letters];
        return QLORA_OK;
    }
    bool plain = (c < '0' || c > '9') && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z');
    if (!plain || (uint8_t)c < 0x20 || (uint8_t)c >= 0x7F) {
        p->at--;
        char what[32];
        snprintf(what, sizeof what, "the escape \\%c", (uint8_t)c < 0x7F && c > 0x20 ? c : '?');
        return qlora__pattern_refuse(p, what);
    }
    *code = (uint8_t)c;
    return QLORA_OK;
}

// The character at the position, which is not a backslash.
static qlora_result qlora__pattern_parse_char(qlora__pattern_parser* p, uint32_t* code) {
    size_t n = qlora__text_utf8((const unsigned char*)p->text + p->at, p->size - p->at, code);
    if (n == 0) {
        return qlora__pattern_refuse(p, "bytes that are not UTF-8");
    }
    p->at += n;
    return QLORA_OK;
}

// A member of a set: a class, a character or a range.
static qlora_result qlora__pattern_parse_member(qlora__pattern_parser* p) {
    uint32_t low = 0;
    uint32_t high = 0;
    bool is_class = false;
    if (qlora__pattern_is(p, "[") || qlora__pattern_is(p, "&&")) {
        return qlora__pattern_refuse(p, "a set inside a set");
    }
    if (qlora__pattern_accept(p, "\\")) {
        QLORA__TRY(qlora__pattern_parse_escape(p, &is_class, &low));
    } else {
        QLORA__TRY(qlora__pattern_parse_char(p, &low));
    }
    if (is_class) {
        return QLORA_OK;
    }
    if (!qlora__pattern_is(p, "-") || p->size - p->at < 2 || p->text[p->at + 1] == ']') {
        return qlora__pattern_chars(p, low, low);
    }
    p->at++;
    if (qlora__pattern_accept(p, "\\")) {
        QLORA__TRY(qlora__pattern_parse_escape(p, &is_class, &high));
    } else {
        QLORA__TRY(qlora__pattern_parse_char(p, &high));
    }
    if (is_class) {
        return qlora__pattern_refuse(p, "a range that ends in a class");
    }
    return qlora__pattern_chars(p, low, high);
}

// Ends the set that was built: a step that matches one of its characters.
static qlora_result qlora__pattern_add_set(qlora__pattern_parser* p) {
    qlora__pattern* out = p->out;
    qlora__pattern_set* set = &p->set;
    unsigned letters = set->parts & (QLORA__PATTERN_LM | QLORA__PATTERN_LO);
    if (letters == QLORA__PATTERN_LM || letters == QLORA__PATTERN_LO) {
        return qlora__pattern_refuse(p, "one of \\p{Lm} and \\p{Lo} without the other");
    }
    set->mask |= letters != 0 ? QLORA__TEXT_BIT(LETTER) : 0u;
    for (uint32_t c = 0; c < 128; c++) {
        if (qlora__pattern_has(set, 1u << (p->classes[c] & 15), c)) {
            set->ascii[c / 32] |= 1u << c % 32;
        }
    }
    if (out->set_count == QLORA__PATTERN_SETS) {
        return qlora__pattern_refuse(p, "more than 256 sets");
    }
    void* data = out->sets;
    qlora_result r = qlora__text_reserve(p->env, &data, &out->set_capacity, (size_t)out->set_count,
                                         1, sizeof *out->sets);
    out->sets = (qlora__pattern_set*)data;
    QLORA__TRY(r);
    out->sets[out->set_count] = *set;
    out->set_count++;
    return qlora__pattern_append(p, QLORA__PATTERN_SET, out->set_count - 1, 0);
}

static void qlora__pattern_new_set(qlora__pattern_parser* p) {
    memset(&p->set, 0, sizeof p->set);
}

// [..]; the position is after the bracket.
static qlora_result qlora__pattern_parse_set(qlora__pattern_parser* p) {
    qlora__pattern_new_set(p);
    p->set.negated = qlora__pattern_accept(p, "^");
    for (bool first = true; first || !qlora__pattern_is(p, "]"); first = false) {
        if (p->at == p->size) {
            return qlora__pattern_refuse(p, "a set without a closing ']'");
        }
        QLORA__TRY(qlora__pattern_parse_member(p));
    }
    p->at++;
    return qlora__pattern_add_set(p);
}

// ---- atoms and groups ---------------------------------------------------------------------------

// An anchor after a backslash, if there is one.
static qlora_result qlora__pattern_parse_anchor(qlora__pattern_parser* p, bool* found) {
    static const struct {
        const char* text;
        qlora__pattern_op op;
        int32_t mode;
    } anchors[] = {{"\\b", QLORA__PATTERN_WORD, 0},       {"\\B", QLORA__PATTERN_WORD, 1},
                   {"\\A", QLORA__PATTERN_TEXT_BEGIN, 0}, {"\\z", QLORA__PATTERN_TEXT_END, 0},
                   {"\\Z", QLORA__PATTERN_LAST_LINE, 0},  {"^", QLORA__PATTERN_LINE_BEGIN, 0},
                   {"$", QLORA__PATTERN_LINE_END, 0}};
    for (size_t i = 0; i < QLORA__TEXT_COUNT(anchors); i++) {
        if (qlora__pattern_accept(p, anchors[i].text)) {
            *found = true;
            return qlora__pattern_append(p, anchors[i].op, 0, anchors[i].mode);
        }
    }
    *found = false;
    return QLORA_OK;
}

// A character, a set, a class or an anchor; *width is the number of characters it takes.
static qlora_result qlora__pattern_parse_atom(qlora__pattern_parser* p, int64_t* width) {
    bool anchor = false;
    bool is_class = false;
    uint32_t code = 0;
    QLORA__TRY(qlora__pattern_parse_anchor(p, &anchor));
    *width = anchor ? 0 : 1;
    if (anchor) {
        return QLORA_OK;
    }
    if (qlora__pattern_accept(p, "[")) {
        return qlora__pattern_parse_set(p);
    }
    qlora__pattern_new_set(p);
    if (qlora__pattern_accept(p, ".")) {
        p->set.negated = true;
        QLORA__TRY(qlora__pattern_range(p, '\n', '\n'));
        return qlora__pattern_add_set(p);
    }
    if (p->text[p->at] == '*' || p->text[p->at] == '+' || p->text[p->at] == '?') {
        return qlora__pattern_refuse(p, "a quantifier with nothing before it");
    }
    if (qlora__pattern_is(p, "\\w") || qlora__pattern_is(p, "\\W")) {
        p->set.negated = qlora__pattern_is(p, "\\W");
        p->at += 2;
        qlora__pattern_add(&p->set, QLORA__TEXT_W, 0, false);
        for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__pattern_words); i++) {
            QLORA__TRY(
                qlora__pattern_range(p, qlora__pattern_words[i][0], qlora__pattern_words[i][1]));
        }
        return qlora__pattern_add_set(p);
    }
    if (qlora__pattern_accept(p, "\\")) {
        QLORA__TRY(qlora__pattern_parse_escape(p, &is_class, &code));
    } else {
        QLORA__TRY(qlora__pattern_parse_char(p, &code));
    }
    if (!is_class) {
        QLORA__TRY(qlora__pattern_pair(p, code));
        QLORA__TRY(qlora__pattern_chars(p, code, code));
    }
    return qlora__pattern_add_set(p);
}

// The start of a group; the position is after the parenthesis.
static qlora_result qlora__pattern_begin(qlora__pattern_parser* p) {
    static const struct {
        const char* text;
        int32_t kind;
        int32_t mode;
        bool any_case;
    } kinds[] = {{"?:", -1, 0, false},
                 {"?i:", -1, 0, true},
                 {"?=", QLORA__PATTERN_LOOK, 0, false},
                 {"?!", QLORA__PATTERN_LOOK, 1, false},
                 {"?>", QLORA__PATTERN_ATOMIC, 0, false}};
    if (p->depth + 1 == QLORA__PATTERN_GROUPS) {
        return qlora__pattern_refuse(p, "groups nested more than 31 deep");
    }
    qlora__pattern_group* g = &p->groups[p->depth + 1];
    memset(g, 0, sizeof *g);
    g->begin = p->out->count;
    g->jumps = -1;
    g->kind = -1;
    g->least = -1;
    g->any_case = p->groups[p->depth].any_case;
    bool known = !qlora__pattern_is(p, "?");
    for (size_t i = 0; !known && i < QLORA__TEXT_COUNT(kinds); i++) {
        if (qlora__pattern_accept(p, kinds[i].text)) {
            known = true;
            g->kind = kinds[i].kind;
            g->any_case = g->any_case || kinds[i].any_case;
            if (g->kind >= 0) {
                QLORA__TRY(qlora__pattern_append(p, (qlora__pattern_op)g->kind, 0, kinds[i].mode));
            }
        }
    }
    if (!known) {
        return qlora__pattern_refuse(p, "a (?..) group other than (?:, (?i:, (?=, (?! and (?>");
    }
    g->keep = p->keeps && p->text[p->at - 1] == '(';
    if (g->keep) {
        p->keeps = false;
        for (int depth = 1; depth <= p->depth; depth++) {
            if (p->groups[depth].kind >= 0) { // going back past it would not undo the note
                return qlora__pattern_refuse(p, "the group to keep inside (?=, (?! or (?>");
            }
        }
        QLORA__TRY(qlora__pattern_append(p, QLORA__PATTERN_KEEP, 0, 0));
    }
    g->branch = p->out->count;
    p->depth++;
    return QLORA_OK;
}

// Ends an alternative: the steps so far become one of two branches.
static qlora_result qlora__pattern_alternative(qlora__pattern_parser* p) {
    qlora__pattern_group* g = &p->groups[p->depth];
    int32_t size = p->out->count - g->branch;
    QLORA__TRY(qlora__pattern_insert(p, g->branch, QLORA__PATTERN_SPLIT, size + 2, 0));
    QLORA__TRY(qlora__pattern_append(p, QLORA__PATTERN_JUMP, g->jumps, 0));
    g->jumps = p->out->count - 1;
    g->branch = p->out->count;
    g->least = g->least < 0 || g->width < g->least ? g->width : g->least;
    g->width = 0;
    return QLORA_OK;
}

// The end of a group; *width is the least number of characters it takes.
static qlora_result qlora__pattern_end(qlora__pattern_parser* p, int64_t* width) {
    qlora__pattern_group* g = &p->groups[p->depth];
    for (int32_t jump = g->jumps; jump >= 0;) {
        int32_t before = p->out->steps[jump].a;
        p->out->steps[jump].a = p->out->count - jump;
        jump = before;
    }
    *width = g->least < 0 || g->width < g->least ? g->width : g->least;
    if (g->keep) {
        QLORA__TRY(qlora__pattern_append(p, QLORA__PATTERN_KEEP, 0, 1));
    }
    if (g->kind >= 0) {
        p->out->steps[g->begin].a = p->out->count - g->begin;
        QLORA__TRY(qlora__pattern_append(
            p, g->kind == QLORA__PATTERN_LOOK ? QLORA__PATTERN_LOOK_END : QLORA__PATTERN_ATOMIC_END,
            0, 0));
        *width = g->kind == QLORA__PATTERN_LOOK ? 0 : *width;
    }
    return QLORA_OK;
}

// ---- quantifiers --------------------------------------------------------------------------------

// {n}, {n,}, {n,m} or {,m}; false, without moving, if it is none of them: then it is literal.
static bool qlora__pattern_parse_counts(qlora__pattern_parser* p, int32_t* least, int32_t* most) {
    size_t at = p->at + 1;
    int32_t numbers[2] = {0, 0};
    int digits[2] = {0, 0};
    int which = 0;
    for (; at < p->size && p->text[at] != '}'; at++) {
        char c = p->text[at];
        if (c == ',' && which == 0) {
            which = 1;
        } else if (c >= '0' && c <= '9' && numbers[which] <= QLORA__PATTERN_REPEAT) {
            numbers[which] = numbers[which] * 10 + (c - '0');
            digits[which]++;
        } else {
            return false;
        }
    }
    if (at == p->size || (digits[0] == 0 && digits[1] == 0)) {
        return false;
    }
    *least = numbers[0];
    *most = which == 0 ? numbers[0] : digits[1] > 0 ? numbers[1] : -1;
    p->at = at + 1;
    return true;
}

// Reads a quantifier; *least is -1 if there is none.
static qlora_result qlora__pattern_parse_quantifier(qlora__pattern_parser* p, int32_t* least,
                                                    int32_t* most, int32_t* mode) {
    bool counted = false;
    *least = -1;
    *most = -1;
    *mode = QLORA__PATTERN_GREEDY;
    if (qlora__pattern_accept(p, "*")) {
        *least = 0;
    } else if (qlora__pattern_accept(p, "+")) {
        *least = 1;
    } else if (qlora__pattern_accept(p, "?")) {
        *least = 0;
        *most = 1;
    } else if (qlora__pattern_is(p, "{")) {
        counted = qlora__pattern_parse_counts(p, least, most);
    }
    if (*least < 0) {
        return QLORA_OK;
    }
    if (*least > QLORA__PATTERN_REPEAT || *most > QLORA__PATTERN_REPEAT ||
        (*most >= 0 && *most < *least)) {
        return qlora__pattern_refuse(p, "a repetition that is not within 0 to 1000");
    }
    if (!counted && qlora__pattern_accept(p, "+")) {
        *mode = QLORA__PATTERN_POSSESSIVE;
    } else if (qlora__pattern_accept(p, "?")) {
        *mode = QLORA__PATTERN_RELUCTANT;
    }
    if (qlora__pattern_is(p, "*") || qlora__pattern_is(p, "+") || qlora__pattern_is(p, "?")) {
        return qlora__pattern_refuse(p, "a quantifier after a quantifier");
    }
    return QLORA_OK;
}

static qlora_result qlora__pattern_copy(qlora__pattern_parser* p, int32_t from, int32_t size) {
    int32_t at = p->out->count;
    QLORA__TRY(qlora__pattern_open(p, at, size));
    memcpy(p->out->steps + at, p->out->steps + from, (size_t)size * sizeof *p->out->steps);
    return QLORA_OK;
}

// Repeats the steps from `atom` on: `least` copies, then optional ones.
static qlora_result qlora__pattern_repeat(qlora__pattern_parser* p, int32_t atom, int32_t least,
                                          int32_t most, int32_t mode) {
    int32_t size = p->out->count - atom;
    bool kept = p->out->steps[atom].op == QLORA__PATTERN_KEEP;
    if (kept && mode == QLORA__PATTERN_POSSESSIVE) {
        return qlora__pattern_refuse(p, "a possessive repetition of the group to keep");
    }
    qlora__pattern_op choice =
        mode == QLORA__PATTERN_RELUCTANT ? QLORA__PATTERN_LAZY : QLORA__PATTERN_SPLIT;
    for (int32_t i = 1; i < least; i++) {
        QLORA__TRY(qlora__pattern_copy(p, atom, size));
    }
    int32_t first = p->out->count; // of the optional part
    if (least == 0) {
        first = atom;
    } else if (most != least) {
        QLORA__TRY(qlora__pattern_copy(p, atom, size));
    }
    if (most < 0) {
        QLORA__TRY(qlora__pattern_insert(p, first, choice, size + 2, 0));
        QLORA__TRY(qlora__pattern_append(p, QLORA__PATTERN_JUMP, -size - 1, 0));
    } else if (most > least) {
        // Each option is followed by the next one: leaving one leaves all.
        int32_t options = most - least;
        for (int32_t i = 1; i < options; i++) {
            QLORA__TRY(qlora__pattern_copy(p, first, size));
        }
        for (int32_t i = options; i > 0; i--) {
            int32_t at = first + (i - 1) * size;
            QLORA__TRY(qlora__pattern_insert(p, at, choice, p->out->count - at + 1, 0));
        }
    } else if (most == 0) {
        p->out->count = atom;
    }
    if (mode == QLORA__PATTERN_POSSESSIVE) {
        size = p->out->count - atom;
        QLORA__TRY(qlora__pattern_insert(p, atom, QLORA__PATTERN_ATOMIC, size + 1, 0));
        return qlora__pattern_append(p, QLORA__PATTERN_ATOMIC_END, 0, 0);
    }
    return QLORA_OK;
}

// Applies the quantifier that follows the steps from `atom` on, and counts their width.
static qlora_result qlora__pattern_quantify(qlora__pattern_parser* p, int32_t atom, int64_t width) {
    int32_t least = 0;
    int32_t most = 0;
    int32_t mode = 0;
    QLORA__TRY(qlora__pattern_parse_quantifier(p, &least, &most, &mode));
    qlora__pattern_group* g = &p->groups[p->depth];
    if (least < 0) {
        g->width += width;
        return QLORA_OK;
    }
    if (width == 0) {
        return qlora__pattern_refuse(p, "a repetition of what may be empty");
    }
    g->width += width * least;
    qlora__pattern_step* step = &p->out->steps[atom];
    if (p->out->count == atom + 1 && step->op == QLORA__PATTERN_SET) {
        step->op = QLORA__PATTERN_RUN;
        step->least = least;
        step->most = most;
        step->mode = mode;
        return QLORA_OK;
    }
    return qlora__pattern_repeat(p, atom, least, most, mode);
}

static qlora_result qlora__pattern_parse(qlora__pattern_parser* p) {
    while (p->at < p->size) {
        int32_t atom = p->out->count;
        int64_t width = 0;
        if (qlora__pattern_accept(p, "(")) {
            QLORA__TRY(qlora__pattern_begin(p));
            continue;
        }
        if (qlora__pattern_accept(p, "|")) {
            QLORA__TRY(qlora__pattern_alternative(p));
            continue;
        }
        if (qlora__pattern_is(p, ")")) {
            if (p->depth == 0) {
                return qlora__pattern_refuse(p, "an unmatched ')'");
            }
            p->at++;
            atom = p->groups[p->depth].begin;
            QLORA__TRY(qlora__pattern_end(p, &width));
            p->depth--;
        } else {
            QLORA__TRY(qlora__pattern_parse_atom(p, &width));
        }
        QLORA__TRY(qlora__pattern_quantify(p, atom, width));
    }
    if (p->depth > 0) {
        return qlora__pattern_refuse(p, "an unmatched '('");
    }
    int64_t width = 0;
    QLORA__TRY(qlora__pattern_end(p, &width));
    p->out->empty = width == 0;
    return qlora__pattern_append(p, QLORA__PATTERN_MATCH, 0, 0);
}

// Compiles a pattern. `classes` is the table of text/unicode/characters.h. `keeps`: note where the
// first group is in a match.
static qlora_result qlora__pattern_make(qlora__env* env, const char* text, size_t size,
                                        const uint8_t* classes, bool keeps, qlora__pattern** out) {
    qlora__pattern_parser p;
    memset(&p, 0, sizeof p);
    p.keeps = keeps;
    p.env = env;
    p.classes = classes;
    p.text = text;
    p.size = size;
    p.groups[0].jumps = -1;
    p.groups[0].kind = -1;
    p.groups[0].least = -1;
    p.out = (qlora__pattern*)qlora__text_zalloc(env, 1, sizeof *p.out);
    if (p.out == NULL) {
        return QLORA_ERR_MEMORY;
    }
    qlora_result r = qlora__pattern_parse(&p);
    if (r != QLORA_OK) {
        qlora__pattern_free(env, p.out);
        return r;
    }
    *out = p.out;
    return QLORA_OK;
}

static qlora_result qlora__pattern_compile(qlora__env* env, const char* text, size_t size,
                                           const uint8_t* classes, qlora__pattern** out) {
    return qlora__pattern_make(env, text, size, classes, false, out);
}
