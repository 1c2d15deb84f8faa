// Graphemes: characters as a reader sees them (extended grapheme clusters, Unicode Annex 29).

enum { // the classes of qlora__text_grapheme_runs
    QLORA__TEXT_G_OTHER = 0,
    QLORA__TEXT_G_LINKER, // joins consonants; extends as well
    QLORA__TEXT_G_ZWJ,
    QLORA__TEXT_G_EXTEND,
    QLORA__TEXT_G_EXTEND_ONLY, // ends a series of consonants
    QLORA__TEXT_G_SPACING,
    QLORA__TEXT_G_PREPEND,
    QLORA__TEXT_G_CONTROL,
    QLORA__TEXT_G_L, // Hangul
    QLORA__TEXT_G_V,
    QLORA__TEXT_G_T,
    QLORA__TEXT_G_LV,
    QLORA__TEXT_G_LVT,
    QLORA__TEXT_G_FLAG, // regional indicators, in pairs
    QLORA__TEXT_G_PICTURE,
    QLORA__TEXT_G_CONSONANT
};

static int qlora__text_grapheme_class(uint32_t code) {
    if (code >= 0xAC00 && code <= 0xD7A3) {
        return (code - 0xAC00) % 28 == 0 ? QLORA__TEXT_G_LV : QLORA__TEXT_G_LVT;
    }
    size_t low = 0;
    size_t high = QLORA__TEXT_COUNT(qlora__text_grapheme_runs);
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        bool after = qlora__text_grapheme_runs[middle] >> 8 > code;
        low = after ? low : middle;
        high = after ? middle : high;
    }
    return (int)(qlora__text_grapheme_runs[low] & 0xFF);
}

// Whether no border is between two characters that follow each other: Hangul syllables, and what
// extends the character before it.
static bool qlora__text_grapheme_joins(int a, int b) {
    if (a == QLORA__TEXT_G_CONTROL || b == QLORA__TEXT_G_CONTROL) {
        return false;
    }
    bool syllable = (a == QLORA__TEXT_G_L && (b == QLORA__TEXT_G_L || b == QLORA__TEXT_G_V ||
                                              b == QLORA__TEXT_G_LV || b == QLORA__TEXT_G_LVT)) ||
                    ((a == QLORA__TEXT_G_LV || a == QLORA__TEXT_G_V) &&
                     (b == QLORA__TEXT_G_V || b == QLORA__TEXT_G_T)) ||
                    ((a == QLORA__TEXT_G_LVT || a == QLORA__TEXT_G_T) && b == QLORA__TEXT_G_T);
    return syllable || (b >= QLORA__TEXT_G_LINKER && b <= QLORA__TEXT_G_SPACING) ||
           a == QLORA__TEXT_G_PREPEND;
}

// The length of the grapheme at the start of a text that is not empty. Bytes that are not UTF-8 are
// one each.
static size_t qlora__text_grapheme_size(const unsigned char* text, size_t size) {
    size_t at = 0;
    int before = QLORA__TEXT_G_OTHER;
    size_t flags = 0;
    bool picture = false;   // a picture, extended
    bool consonant = false; // a consonant, extended
    bool linked = false;    // and a linker after it
    while (at < size) {
        uint32_t code = text[at];
        size_t length = code < 0x80 ? 1 : qlora__text_utf8(text + at, size - at, &code);
        int now = length > 0 ? qlora__text_grapheme_class(code) : (int)QLORA__TEXT_G_CONTROL;
        bool line = at == 1 && text[0] == '\r' && text[1] == '\n';
        if (at > 0 && !line && !qlora__text_grapheme_joins(before, now) &&
            !(picture && before == QLORA__TEXT_G_ZWJ && now == QLORA__TEXT_G_PICTURE) &&
            !(linked && now == QLORA__TEXT_G_CONSONANT) &&
            !(flags % 2 == 1 && now == QLORA__TEXT_G_FLAG)) {
            return at;
        }
        bool extends = now >= QLORA__TEXT_G_LINKER && now <= QLORA__TEXT_G_EXTEND;
        flags = now == QLORA__TEXT_G_FLAG ? flags + 1 : 0;
        picture = now == QLORA__TEXT_G_PICTURE ||
                  (picture && (extends || now == QLORA__TEXT_G_EXTEND_ONLY) &&
                   before != QLORA__TEXT_G_ZWJ);
        linked = (linked && extends) || (consonant && now == QLORA__TEXT_G_LINKER);
        consonant = now == QLORA__TEXT_G_CONSONANT || (consonant && extends);
        before = now;
        at += length > 0 ? length : 1;
    }
    return at;
}
