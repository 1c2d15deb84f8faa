// Where a long text can be split so that the ids of its parts are the ids of the whole.
//
// That is at a line that starts with a letter, if nothing in the tokenizer joins a line end and a
// letter. A part that is not the first one is encoded with QLORA_TEXT_CONTINUE.

typedef enum qlora__text_lines_kind {
    QLORA__TEXT_LINES_NONE = 0, // not known of this tokenizer
    QLORA__TEXT_LINES_AFTER,    // between the line end and the letter
    QLORA__TEXT_LINES_BEFORE    // before the line end: the pattern takes white space apart there
} qlora__text_lines_kind;

// Sets *kind if a step of the pre-tokenizer splits at lines. False: what it does is not known.
static bool qlora__text_lines_step(const qlora__text_step* step, bool first,
                                   qlora__text_lines_kind* kind) {
    static const struct {
        qlora__text_match_fn* match;
        qlora__text_lines_kind kind;
    } known[] = {{qlora__text_match_gpt2, QLORA__TEXT_LINES_BEFORE},
                 {qlora__text_match_cl100k, QLORA__TEXT_LINES_AFTER},
                 {qlora__text_match_o200k, QLORA__TEXT_LINES_AFTER},
                 {qlora__text_match_deepseek3, QLORA__TEXT_LINES_AFTER},
                 {qlora__text_match_digits, QLORA__TEXT_LINES_NONE},
                 {qlora__text_match_chinese, QLORA__TEXT_LINES_NONE},
                 {qlora__text_match_ascii3, QLORA__TEXT_LINES_NONE}};
    switch (step->kind) {
    case QLORA__TEXT_P_BYTES:
        return true;
    case QLORA__TEXT_P_METASPACE:
    case QLORA__TEXT_P_PREFIX_SPACE: // a later one would also mark the start of a part
        return first || step->never;
    case QLORA__TEXT_P_CLASS:
        return step->mask == QLORA__TEXT_N;
    case QLORA__TEXT_P_PUNCTUATION:
        return step->behavior == QLORA__TEXT_B_ISOLATED;
    case QLORA__TEXT_P_STRING:
        return memchr(step->a, '\n', step->a_size) == NULL;
    case QLORA__TEXT_P_REGEX:
        for (size_t i = 0; step->pattern != NULL && i < QLORA__TEXT_COUNT(known); i++) {
            if (known[i].match == step->pattern->match) {
                bool twice = known[i].kind != QLORA__TEXT_LINES_NONE &&
                             *kind != QLORA__TEXT_LINES_NONE && *kind != known[i].kind;
                *kind = known[i].kind != QLORA__TEXT_LINES_NONE ? known[i].kind : *kind;
                return !twice && !step->invert && step->behavior == QLORA__TEXT_B_ISOLATED;
            }
        }
        return false;
    default:
        return false;
    }
}

// Whether a text contains a line end that a letter follows.
static bool qlora__text_lines_joined(const qlora_text_tok* tok, const char* text, size_t size) {
    qlora__text_view view = qlora__text_view_of(tok, text, size);
    for (size_t i = 0; i + 1 < size; i++) {
        size_t length;
        if (text[i] == '\n' && (qlora__text_class_at(&view, i + 1, &length) & QLORA__TEXT_L)) {
            return true;
        }
    }
    return false;
}

// Whether the added tokens leave the place between a line end and a letter alone.
static bool qlora__text_lines_added(const qlora_text_tok* tok, qlora__text_lines_kind kind) {
    for (size_t i = 0; i < tok->added_count; i++) {
        const qlora__text_added* added = &tok->added[i];
        const char* name = tok->names.data + added->name.at;
        size_t size = added->name.size;
        qlora__text_view view = qlora__text_view_of(tok, name, size);
        size_t length;
        bool letter = size > 0 && (qlora__text_class_at(&view, 0, &length) & QLORA__TEXT_L) != 0;
        bool line = size > 0 && memchr(name, '\n', size) != NULL;
        if ((letter && added->strip_left) || qlora__text_lines_joined(tok, name, size) ||
            (kind == QLORA__TEXT_LINES_BEFORE && (line || added->strip_right))) {
            return false;
        }
    }
    return true;
}

// Whether no word that merging can make has a letter after a line end.
static bool qlora__text_lines_words(const qlora_text_tok* tok) {
    const unsigned char end = '\n';
    bool known = tok->byte_ids[end] >= 0 || (tok->byte_fallback && tok->fallback_ids[end] >= 0);
    if (!known || tok->ignore_merges || tok->byte_level) {
        return false;
    }
    for (size_t i = 0; i < tok->words.count; i++) {
        const qlora__text_word* word = &tok->words.data[i];
        if (qlora__text_lines_joined(tok, tok->words.bytes.data + word->at, word->size)) {
            return false;
        }
    }
    return true;
}

// Where texts of this tokenizer can be split. It looks at every word: ask once.
static qlora__text_lines_kind qlora__text_lines_of(const qlora_text_tok* tok) {
    qlora__text_lines_kind kind = QLORA__TEXT_LINES_NONE;
    if (tok->unigram) { // what is unknown may be joined over lines
        return kind;
    }
    for (size_t i = 0; i < tok->normalizer.count; i++) {
        const qlora__text_step* step = &tok->normalizer.data[i];
        bool local =
            step->kind == QLORA__TEXT_N_NFC || step->kind == QLORA__TEXT_N_NFD ||
            step->kind == QLORA__TEXT_N_PREPEND ||
            (step->kind == QLORA__TEXT_N_REPLACE && memchr(step->a, '\n', step->a_size) == NULL);
        if (!local) {
            return QLORA__TEXT_LINES_NONE;
        }
    }
    for (size_t i = 0; i < tok->splitter.count; i++) {
        if (!qlora__text_lines_step(&tok->splitter.data[i], i == 0, &kind)) {
            return QLORA__TEXT_LINES_NONE;
        }
    }
    if (kind == QLORA__TEXT_LINES_NONE && qlora__text_lines_words(tok)) {
        kind = QLORA__TEXT_LINES_AFTER;
    }
    return qlora__text_lines_added(tok, kind) ? kind : QLORA__TEXT_LINES_NONE;
}

// The first place at or after `from`, which is at least 1, where the text can be split; `size` if
// there is none.
static size_t qlora__text_lines_cut(const qlora_text_tok* tok, qlora__text_lines_kind kind,
                                    const char* text, size_t size, size_t from) {
    qlora__text_view view = qlora__text_view_of(tok, text, size);
    for (size_t at = from - 1; kind != QLORA__TEXT_LINES_NONE && at < size;) {
        const char* newline = (const char*)memchr(text + at, '\n', size - at);
        size_t length;
        if (newline == NULL) {
            break;
        }
        at = (size_t)(newline - text) + 1;
        size_t cut = kind == QLORA__TEXT_LINES_AFTER ? at : at - 1;
        if (cut >= from && at < size &&
            (qlora__text_class_at(&view, at, &length) & QLORA__TEXT_L) != 0) {
            return cut;
        }
    }
    return size;
}
