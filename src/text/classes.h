typedef struct text__decomposition {
    uint32_t composed;
    uint32_t first;
    uint32_t second;
} text__decomposition;

typedef struct text__combining {
    uint32_t first;
    uint32_t last;
    uint32_t value;
} text__combining;

// Classes of characters; the generator has the same list.
enum {
    TEXT__C_OTHER,
    TEXT__C_UPPER,       // Lu Lt
    TEXT__C_LOWER,       // Ll
    TEXT__C_LETTER,      // Lm Lo
    TEXT__C_MARK,        // M
    TEXT__C_DIGIT,       // Nd Nl
    TEXT__C_NUMBER,      // No
    TEXT__C_CONNECTOR,   // Pc
    TEXT__C_PUNCT,       // the other P
    TEXT__C_SYMBOL,      // S
    TEXT__C_WORD_SYMBOL, // S that counts as alphabetic
    TEXT__C_SPACE,       // White_Space
    TEXT__C_JOINER,      // U+200C U+200D
    TEXT__C_PUNCT_NEW,   // P that the Punctuation step does not know
    TEXT__C_OLD_PUNCT    // S or M that it takes for punctuation
};

#define TEXT__BIT(name) (1u << TEXT__C_##name)
#define TEXT__L (TEXT__BIT(UPPER) | TEXT__BIT(LOWER) | TEXT__BIT(LETTER))
#define TEXT__M TEXT__BIT(MARK)
#define TEXT__N (TEXT__BIT(DIGIT) | TEXT__BIT(NUMBER))
#define TEXT__P (TEXT__BIT(CONNECTOR) | TEXT__BIT(PUNCT) | TEXT__BIT(PUNCT_NEW))
#define TEXT__P_STEP (TEXT__BIT(CONNECTOR) | TEXT__BIT(PUNCT) | TEXT__BIT(OLD_PUNCT))
#define TEXT__S (TEXT__BIT(SYMBOL) | TEXT__BIT(WORD_SYMBOL) | TEXT__BIT(OLD_PUNCT))
#define TEXT__WS TEXT__BIT(SPACE)
// \w of the regular expressions, and of single_word (which has the joiners too)
#define TEXT__W                                                                                    \
    (TEXT__L | TEXT__M | TEXT__BIT(DIGIT) | TEXT__BIT(CONNECTOR) | TEXT__BIT(WORD_SYMBOL))
#define TEXT__UNSTABLE 0x80u // may change under NFC
