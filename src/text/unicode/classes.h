typedef struct qlora__text_decomposition {
    uint32_t composed;
    uint32_t first;
    uint32_t second;
} qlora__text_decomposition;

typedef struct qlora__text_combining {
    uint32_t first;
    uint32_t last;
    uint32_t value;
} qlora__text_combining;

// Classes of characters; the generator has the same list.
enum {
    QLORA__TEXT_C_OTHER,
    QLORA__TEXT_C_UPPER,       // Lu Lt
    QLORA__TEXT_C_LOWER,       // Ll
    QLORA__TEXT_C_LETTER,      // Lm Lo
    QLORA__TEXT_C_MARK,        // M
    QLORA__TEXT_C_DIGIT,       // Nd Nl
    QLORA__TEXT_C_NUMBER,      // No
    QLORA__TEXT_C_CONNECTOR,   // Pc
    QLORA__TEXT_C_PUNCT,       // the other P
    QLORA__TEXT_C_SYMBOL,      // S
    QLORA__TEXT_C_WORD_SYMBOL, // S that counts as alphabetic
    QLORA__TEXT_C_SPACE,       // White_Space
    QLORA__TEXT_C_JOINER,      // U+200C U+200D
    QLORA__TEXT_C_PUNCT_NEW,   // P that the Punctuation step does not know
    QLORA__TEXT_C_OLD_PUNCT    // S or M that it counts as punctuation
};

#define QLORA__TEXT_BIT(name) (1u << QLORA__TEXT_C_##name)
#define QLORA__TEXT_L (QLORA__TEXT_BIT(UPPER) | QLORA__TEXT_BIT(LOWER) | QLORA__TEXT_BIT(LETTER))
#define QLORA__TEXT_M QLORA__TEXT_BIT(MARK)
#define QLORA__TEXT_N (QLORA__TEXT_BIT(DIGIT) | QLORA__TEXT_BIT(NUMBER))
#define QLORA__TEXT_P                                                                              \
    (QLORA__TEXT_BIT(CONNECTOR) | QLORA__TEXT_BIT(PUNCT) | QLORA__TEXT_BIT(PUNCT_NEW))
#define QLORA__TEXT_P_STEP                                                                         \
    (QLORA__TEXT_BIT(CONNECTOR) | QLORA__TEXT_BIT(PUNCT) | QLORA__TEXT_BIT(OLD_PUNCT))
#define QLORA__TEXT_S                                                                              \
    (QLORA__TEXT_BIT(SYMBOL) | QLORA__TEXT_BIT(WORD_SYMBOL) | QLORA__TEXT_BIT(OLD_PUNCT))
#define QLORA__TEXT_WS QLORA__TEXT_BIT(SPACE)
// \w of the regular expressions; single_word and Whitespace also count the joiners
#define QLORA__TEXT_W                                                                              \
    (QLORA__TEXT_L | QLORA__TEXT_M | QLORA__TEXT_BIT(DIGIT) | QLORA__TEXT_BIT(CONNECTOR) |         \
     QLORA__TEXT_BIT(WORD_SYMBOL))
#define QLORA__TEXT_UNSTABLE 0x80u // may change under NFC
