// A tokenizer: its vocabulary, its steps, and scratch memory.

enum { QLORA__TEXT_CACHE_KEY = 26, QLORA__TEXT_CACHE_IDS = 8, QLORA__TEXT_CACHE_PLACES = 32768 };

// One place per hash value; a newer word replaces the older one. An empty place has size 0.
typedef struct qlora__text_cached {
    uint8_t size;
    uint8_t count;
    char key[QLORA__TEXT_CACHE_KEY];
    int32_t ids[QLORA__TEXT_CACHE_IDS];
} qlora__text_cached;

typedef struct qlora__text_symbol {
    int32_t id; // -1: joined to the previous one
    uint32_t previous;
    uint32_t next;
} qlora__text_symbol;

enum { QLORA__TEXT_PATH_NONE = -1 };

// Unigram: the best way to a position in the word.
typedef struct qlora__text_path {
    double score;
    int64_t start; // of its last token; QLORA__TEXT_PATH_NONE: none is known
    int32_t id;
} qlora__text_path;

typedef struct qlora__text_job { // a possible merge
    uint32_t rank;
    uint32_t at;
    uint32_t id;
} qlora__text_job;

typedef struct qlora__text_span {
    uint32_t at;
    uint32_t size;
} qlora__text_span;

typedef struct qlora__text_added {
    int32_t id;
    qlora__text_span name; // as the file spells it
    bool special;
    bool single_word;
    bool strip_left;
    bool strip_right;
} qlora__text_added;

// A trie of tokens: (node, byte) -> (next node, 1 + index of the token that ends there).
typedef struct qlora__text_trie {
    qlora__text_pairs edges;
    uint32_t nodes;
    bool starts[256];
} qlora__text_trie;

struct qlora_text_tok {
    qlora_text* text;
    int64_t users; // chats that use it
    // vocabulary: names are as the file spells them, by id; `words` is what the model looks up
    qlora_text_bytes names;
    qlora__text_span* spans;
    size_t span_capacity;
    uint8_t* kinds; // bits QLORA__TEXT_K_ by id
    size_t kind_capacity;
    size_t count;     // the largest id + 1
    int64_t id_limit; // ids are below it; 0 = the format's own limit
    qlora__text_words words;
    size_t others; // words of a byte-level vocabulary that do not stand for bytes
    qlora__text_pairs merges;  // (left, right) -> (rank, joined)
    int32_t byte_ids[256];     // one-byte words
    int32_t fallback_ids[256]; // <0x00> ..
    int32_t unknown;
    bool byte_level; // words are bytes, not the file's printable stand-ins
    bool byte_fallback;
    bool fuse_unknown;
    bool ignore_merges;
    // Unigram models
    bool unigram;
    double* scores; // by id
    size_t score_capacity;
    double unknown_score;
    qlora__text_trie words_trie;
    bool cut_safe; // `cut` never follows another character in a word: words can be split there
    char cut[4];
    size_t cut_size;
    // added tokens
    qlora__text_added* added;
    size_t added_count;
    size_t added_capacity;
    qlora__text_trie raw_trie;        // found in the text as given
    qlora__text_trie normalized_trie; // found after normalising
    // steps
    qlora__text_steps normalizer;
    qlora__text_steps splitter;
    qlora__text_steps decoder;
    qlora_text_ids prefix; // of the post-processor
    qlora_text_ids suffix;
    // tables
    uint8_t* classes;
    uint16_t code_of_byte[256];
    int16_t byte_of_code[512];
    qlora__text_cached* cache;
    // scratch
    bool moved; // normalizing dropped the start of the text
    qlora_text_bytes buffers[4];
    qlora__text_pieces pieces[3];
    qlora__text_marks marks;
    qlora__text_symbol* symbols;
    size_t symbol_capacity;
    qlora__text_job* jobs;
    size_t job_count;
    size_t job_capacity;
    qlora__text_path* paths;
    size_t path_capacity;
};

enum {
    QLORA__TEXT_K_EXISTS = 1,
    QLORA__TEXT_K_SPECIAL = 2,
    QLORA__TEXT_K_ADDED = 4,
    QLORA__TEXT_K_BYTE = 8
};

static qlora_result qlora__text_trie_add(qlora__env* env, qlora__text_trie* trie, const char* text,
                                         size_t size, uint32_t token) {
    uint32_t node = 0;
    for (size_t i = 0; i < size; i++) {
        unsigned char c = (unsigned char)text[i];
        const qlora__text_pair* edge = qlora__text_pairs_find(&trie->edges, node, c);
        uint32_t next = edge != NULL ? edge->first : ++trie->nodes;
        uint32_t ends = edge != NULL ? edge->second : 0;
        if (i + 1 == size) {
            ends = token + 1;
        }
        QLORA__TRY(qlora__text_pairs_put(env, &trie->edges, node, c, next, ends));
        trie->starts[c] = trie->starts[c] || i == 0;
        node = next;
    }
    return QLORA_OK;
}

// Length of the character at a position: one byte in byte-level words and in invalid UTF-8.
static size_t qlora__text_symbol_size(const qlora_text_tok* tok, const char* word, size_t left) {
    uint32_t code;
    if (tok->byte_level || (unsigned char)word[0] < 0x80) {
        return 1;
    }
    size_t size = qlora__text_utf8((const unsigned char*)word, left, &code);
    return size > 0 ? size : 1;
}
