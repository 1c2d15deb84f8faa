#ifndef QLORA__PART_REGEX
#define QLORA__PART_REGEX

// ---- regular expressions in PEFT configs --------------------------------------------------------

// Matches a short pattern against the complete name of a module. Supported are literals, ., the
// escapes \d \w \s \b, [sets], groups, |, * + ? and their lazy forms, {0,} {0,1} {1} {1,}, ^ and $.
// The pattern is compiled to a small program for a machine that follows all alternatives at once:
// linear time, no recursion.
#define QLORA__RE_MAX 1024
#define QLORA__RE_SETS 32
#define QLORA__RE_GROUPS 32

typedef enum qlora__re_op {
    QLORA__RE_CHAR, // arg: the byte
    QLORA__RE_ANY,
    QLORA__RE_SET,   // arg: index of the set
    QLORA__RE_SPLIT, // continue with the next step and with this + arg
    QLORA__RE_JUMP,  // continue with this + arg
    QLORA__RE_BEGIN,
    QLORA__RE_END,
    QLORA__RE_WORD, // \b
    QLORA__RE_MATCH
} qlora__re_op;

typedef struct qlora__re_step {
    qlora__re_op op;
    int32_t arg;
} qlora__re_step;

typedef struct qlora__re {
    qlora__re_step step[QLORA__RE_MAX];
    uint8_t set[QLORA__RE_SETS][32];
    int32_t count;
    int32_t sets;
    const char* wrong; // the unsupported part of the pattern; NULL if there is none
} qlora__re;

typedef struct qlora__re_group {
    int32_t begin;  // first step of the group
    int32_t branch; // first step of the current alternative
    int32_t jumps;  // last jump to the end of the group; each links to the previous one, -1 ends
} qlora__re_group;

static QLORA__UNUSED void qlora__re_insert(qlora__re* re, int32_t at, qlora__re_op op,
                                           int32_t arg) {
    if (re->count >= QLORA__RE_MAX - 1) {
        re->wrong = "too many steps";
        return;
    }
    // Every jump inside the moved piece is relative and stays inside it.
    memmove(&re->step[at + 1], &re->step[at], (size_t)(re->count - at) * sizeof re->step[0]);
    re->step[at].op = op;
    re->step[at].arg = arg;
    re->count++;
}

static QLORA__UNUSED void qlora__re_append(qlora__re* re, qlora__re_op op, int32_t arg) {
    qlora__re_insert(re, re->count, op, arg);
}

static QLORA__UNUSED bool qlora__re_is_word(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

// Adds \d, \w, \s or their opposites to a set; returns false for any other letter.
static QLORA__UNUSED bool qlora__re_class(uint8_t* set, char letter) {
    char lower = letter >= 'A' && letter <= 'Z' ? (char)(letter + 32) : letter;
    if (lower != 'd' && lower != 'w' && lower != 's') {
        return false;
    }
    for (int c = 0; c < 128; c++) {
        bool in = lower == 'd'   ? c >= '0' && c <= '9'
                  : lower == 'w' ? qlora__re_is_word((char)c)
                                 : c == ' ' || (c >= 9 && c <= 13);
        if (in == (letter == lower)) {
            set[c / 8] = (uint8_t)(set[c / 8] | 1u << c % 8);
        }
    }
    return true;
}

static QLORA__UNUSED uint8_t* qlora__re_new_set(qlora__re* re) {
    if (re->sets == QLORA__RE_SETS) {
        re->wrong = "too many sets";
        return re->set[0];
    }
    memset(re->set[re->sets], 0, sizeof re->set[0]);
    qlora__re_append(re, QLORA__RE_SET, re->sets);
    re->sets++;
    return re->set[re->sets - 1];
}

// Compiles an escape; `p` is on the letter after the backslash.
static const char* qlora__re_escape(qlora__re* re, const char* p) {
    if (*p == 'b') {
        qlora__re_append(re, QLORA__RE_WORD, 0);
    } else if (*p == 'A') {
        qlora__re_append(re, QLORA__RE_BEGIN, 0);
    } else if (*p == 'Z') {
        qlora__re_append(re, QLORA__RE_END, 0);
    } else if (*p == '\0' || (qlora__re_is_word(*p) && strchr("dwsDWS", *p) == NULL && *p != '_')) {
        re->wrong = "an escape other than \\d \\w \\s \\b";
        return p;
    } else if (strchr("dwsDWS", *p) != NULL) {
        qlora__re_class(qlora__re_new_set(re), *p);
    } else {
        qlora__re_append(re, QLORA__RE_CHAR, (uint8_t)*p);
    }
    return p + 1;
}

// Compiles a set; `p` is after the opening bracket. Returns the place after the closing one.
static const char* qlora__re_set(qlora__re* re, const char* p) {
    uint8_t* set = qlora__re_new_set(re);
    bool negate = *p == '^';
    p += negate ? 1 : 0;
    for (bool first = true; first || *p != ']'; first = false) {
        uint8_t low = (uint8_t)*p;
        if (low == '\\') {
            p++;
            low = (uint8_t)*p;
            if (low != 0 && qlora__re_class(set, *p)) {
                p++;
                continue;
            }
        }
        if (low == 0) {
            re->wrong = "a set without a closing ']'";
            return p;
        }
        uint8_t high = low;
        if (p[1] == '-' && p[2] != ']' && p[2] != '\\' && p[2] != '\0') {
            high = (uint8_t)p[2];
            p += 2;
        }
        for (unsigned c = low; c <= high; c++) {
            set[c / 8] = (uint8_t)(set[c / 8] | 1u << c % 8);
        }
        p++;
    }
    for (int i = 0; negate && i < 32; i++) {
        set[i] = (uint8_t)~set[i];
    }
    return p + 1;
}

// Compiles a quantifier for the steps from `atom` on, if there is one at p.
static const char* qlora__re_repeat(qlora__re* re, const char* p, int32_t atom) {
    static const struct {
        const char* text;
        char meaning;
    } forms[9] = {{"*", '*'},     {"+", '+'},    {"?", '?'},     {"{0,}", '*'}, {"{1,}", '+'},
                  {"{0,1}", '?'}, {"{,1}", '?'}, {"{1,1}", '1'}, {"{1}", '1'}};
    for (int i = 0; i < 9; i++) {
        size_t n = strlen(forms[i].text);
        if (strncmp(p, forms[i].text, n) != 0) {
            continue;
        }
        int32_t size = re->count - atom;
        if (forms[i].meaning == '+') {
            qlora__re_append(re, QLORA__RE_SPLIT, -size);
        } else if (forms[i].meaning == '?') {
            qlora__re_insert(re, atom, QLORA__RE_SPLIT, size + 1);
        } else if (forms[i].meaning == '*') {
            qlora__re_insert(re, atom, QLORA__RE_SPLIT, size + 2);
            qlora__re_append(re, QLORA__RE_JUMP, -size - 1);
        }
        p += n;
        if (*p == '*' || *p == '+' || *p == '{') {
            re->wrong = "a quantifier after a quantifier";
        }
        return p + (*p == '?' ? 1 : 0); // a full match does not depend on laziness
    }
    if (*p == '{') {
        re->wrong = "a counted repetition";
    }
    return p;
}

static QLORA__UNUSED void qlora__re_close(qlora__re* re, const qlora__re_group* g) {
    for (int32_t jump = g->jumps; jump >= 0;) {
        int32_t before = re->step[jump].arg;
        re->step[jump].arg = re->count - jump;
        jump = before;
    }
}

// Compiles the start of a group; `p` is after the parenthesis.
static const char* qlora__re_open(qlora__re* re, const char* p, qlora__re_group* g) {
    if (*p == '?' && p[1] != ':') {
        re->wrong = "a (?...) group other than (?:...)";
        return p;
    }
    g->begin = re->count;
    g->branch = re->count;
    g->jumps = -1;
    return p + (*p == '?' ? 2 : 0);
}

// Ends an alternative: the steps so far become one of two branches.
static QLORA__UNUSED void qlora__re_alternative(qlora__re* re, qlora__re_group* g) {
    qlora__re_insert(re, g->branch, QLORA__RE_SPLIT, re->count - g->branch + 2);
    qlora__re_append(re, QLORA__RE_JUMP, g->jumps);
    g->jumps = re->count - 1;
    g->branch = re->count;
}

// Compiles a literal character, a set, an escape or an anchor; `p` is on it.
static const char* qlora__re_single(qlora__re* re, const char* p) {
    if (*p == '\\') {
        return qlora__re_escape(re, p + 1);
    }
    if (*p == '[') {
        return qlora__re_set(re, p + 1);
    }
    if (strchr("*+?{", *p) != NULL) {
        re->wrong = "a quantifier with nothing before it";
        return p;
    }
    qlora__re_op op = *p == '.'   ? QLORA__RE_ANY
                      : *p == '^' ? QLORA__RE_BEGIN
                      : *p == '$' ? QLORA__RE_END
                                  : QLORA__RE_CHAR;
    qlora__re_append(re, op, (uint8_t)*p);
    return p + 1;
}

// Compiles a pattern; on failure, re->wrong describes the unsupported part.
static QLORA__UNUSED void qlora__re_compile(qlora__re* re, const char* p) {
    qlora__re_group stack[QLORA__RE_GROUPS];
    int depth = 0;
    memset(re, 0, sizeof *re);
    qlora__re_open(re, "", &stack[0]);
    while (*p != '\0' && re->wrong == NULL) {
        int32_t atom = re->count;
        if (*p == '(' && depth + 1 < QLORA__RE_GROUPS) {
            depth++;
            p = qlora__re_open(re, p + 1, &stack[depth]);
            continue;
        }
        if (*p == '|') {
            qlora__re_alternative(re, &stack[depth]);
            p++;
            continue;
        }
        if (*p == '(' || (*p == ')' && depth == 0)) {
            re->wrong = *p == '(' ? "too many groups" : "an unmatched ')'";
        } else if (*p == ')') {
            qlora__re_close(re, &stack[depth]);
            atom = stack[depth].begin;
            depth--;
            p++;
        } else {
            p = qlora__re_single(re, p);
        }
        if (re->wrong == NULL) {
            p = qlora__re_repeat(re, p, atom);
        }
    }
    if (re->wrong == NULL && depth > 0) {
        re->wrong = "an unmatched '('";
    }
    if (re->wrong == NULL) {
        qlora__re_close(re, &stack[0]);
        re->step[re->count].op = QLORA__RE_MATCH;
        re->count++;
    }
}

typedef struct qlora__re_list {
    int32_t step[QLORA__RE_MAX];
    int32_t count;
    uint8_t seen[QLORA__RE_MAX];
} qlora__re_list;

// Adds a step and all steps that are reachable from it without consuming a character at text[at].
static QLORA__UNUSED void qlora__re_reach(const qlora__re* re, qlora__re_list* list, int32_t from,
                                          const char* text, size_t at) {
    int32_t stack[QLORA__RE_MAX];
    int32_t depth = 0;
    if (list->seen[from]) {
        return;
    }
    stack[depth++] = from;
    list->seen[from] = 1;
    while (depth > 0) {
        int32_t i = stack[--depth];
        qlora__re_step s = re->step[i];
        bool before = at > 0 && qlora__re_is_word(text[at - 1]);
        bool after = text[at] != '\0' && qlora__re_is_word(text[at]);
        bool go = s.op == QLORA__RE_SPLIT || (s.op == QLORA__RE_BEGIN && at == 0) ||
                  (s.op == QLORA__RE_END && text[at] == '\0') ||
                  (s.op == QLORA__RE_WORD && before != after);
        int32_t jump = s.op == QLORA__RE_SPLIT || s.op == QLORA__RE_JUMP ? i + s.arg : -1;
        if (go && !list->seen[i + 1]) {
            list->seen[i + 1] = 1;
            stack[depth++] = i + 1;
        }
        if (jump >= 0 && !list->seen[jump]) {
            list->seen[jump] = 1;
            stack[depth++] = jump;
        }
        if (s.op <= QLORA__RE_SET || s.op == QLORA__RE_MATCH) {
            list->step[list->count++] = i;
        }
    }
}

// Whether the pattern matches the whole text.
static QLORA__UNUSED bool qlora__re_match(const qlora__re* re, const char* text) {
    qlora__re_list lists[2];
    int now = 0;
    lists[0].count = 0;
    memset(lists[0].seen, 0, sizeof lists[0].seen);
    qlora__re_reach(re, &lists[0], 0, text, 0);
    for (size_t at = 0; text[at] != '\0'; at++) {
        qlora__re_list* next = &lists[1 - now];
        uint8_t c = (uint8_t)text[at];
        next->count = 0;
        memset(next->seen, 0, sizeof next->seen);
        for (int32_t k = 0; k < lists[now].count; k++) {
            int32_t i = lists[now].step[k];
            qlora__re_step s = re->step[i];
            if (s.op == QLORA__RE_ANY || (s.op == QLORA__RE_CHAR && s.arg == c) ||
                (s.op == QLORA__RE_SET && (re->set[s.arg][c / 8] >> c % 8 & 1) != 0)) {
                qlora__re_reach(re, next, i + 1, text, at + 1);
            }
        }
        now = 1 - now;
    }
    for (int32_t k = 0; k < lists[now].count; k++) {
        if (re->step[lists[now].step[k]].op == QLORA__RE_MATCH) {
            return true;
        }
    }
    return false;
}

#endif // QLORA__PART_REGEX
