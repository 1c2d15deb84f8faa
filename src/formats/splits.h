#ifndef QLORA__PART_SPLITS
#define QLORA__PART_SPLITS

// Patterns of the tokenizers that there are, in pieces.
#define QLORA__SPLITS_ANY "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define QLORA__SPLITS_ANY2 "'(?i:[sdmt]|ll|ve|re)"
#define QLORA__SPLITS_ASCII "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
#define QLORA__SPLITS_WORD "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
#define QLORA__SPLITS_WORD2 "|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|"
#define QLORA__SPLITS_LINES "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define QLORA__SPLITS_LINES2 "|\\s*[\\r\\n]|\\s+(?!\\S)|\\s+"
#define QLORA__SPLITS_REST "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*" QLORA__SPLITS_LINES
#define QLORA__SPLITS_REST2 "| ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*" QLORA__SPLITS_LINES2
#define QLORA__SPLITS_GPT2 "| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
#define QLORA__SPLITS_UP "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define QLORA__SPLITS_LOW "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define QLORA__SPLITS_PRE "[^\\r\\n\\p{L}\\p{N}]?"
#define QLORA__SPLITS_CASED(tail)                                                                  \
    QLORA__SPLITS_PRE QLORA__SPLITS_UP "*" QLORA__SPLITS_LOW "+" tail                              \
                                       "|" QLORA__SPLITS_PRE QLORA__SPLITS_UP                      \
                                       "+" QLORA__SPLITS_LOW "*" tail "|"
#define QLORA__SPLITS_REST3 "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*" QLORA__SPLITS_LINES
#define QLORA__SPLITS_DEEPSEEK3                                                                    \
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?"           \
    "[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*" QLORA__SPLITS_LINES
#define QLORA__SPLITS_MARKS                                                                        \
    "|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}| "                                              \
    "?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*" QLORA__SPLITS_LINES

#endif // QLORA__PART_SPLITS
