// ---- the text object ----------------------------------------------------------------------------

// Owns what the others share: hooks and the text of the last error. Everything made from it must be
// closed before it is destroyed, and is used by one thread at a time with it.
typedef struct qlora_text qlora_text;

typedef struct qlora_text_desc {
    uint32_t reserved_must_be_zero0;
    qlora_allocator allocator; // zero = malloc
    qlora_files files;         // zero = the operating system's
    qlora_log_fn log;          // NULL = silent
    void* log_user;
    char* error_text; // where qlora_text_create explains a failure; may be NULL
    size_t error_text_size;
    uint32_t reserved_must_be_zero1;
} qlora_text_desc;

// desc may be NULL: all defaults.
QLORA_API qlora_result qlora_text_create(const qlora_text_desc* desc, qlora_text** out);
// Fails with QLORA_ERR_STATE, and frees nothing, while tokenizers, chats, templates, patterns or
// data files are open.
// Growing arrays are the caller's and must be freed before.
QLORA_API qlora_result qlora_text_destroy(qlora_text* text);
// What went wrong in the last call, on one line; "" after a success. Never NULL.
QLORA_API const char* qlora_text_last_error(const qlora_text* text);
QLORA_API int qlora_text_version(void); // QLORA_VERSION of the implementation

// ---- growing arrays -----------------------------------------------------------------------------

// Start from all zeros. Functions append to them, and leave them as they were when they fail.
typedef struct qlora_text_bytes {
    char* data; // not terminated by a zero
    size_t count;
    size_t capacity;
} qlora_text_bytes;

typedef struct qlora_text_ids {
    int32_t* data;
    size_t count;
    size_t capacity;
} qlora_text_ids;

QLORA_API qlora_result qlora_text_bytes_add(qlora_text* text, qlora_text_bytes* bytes,
                                            const void* data, size_t size);
QLORA_API void qlora_text_bytes_free(qlora_text* text, qlora_text_bytes* bytes);
QLORA_API qlora_result qlora_text_ids_add(qlora_text* text, qlora_text_ids* ids, int32_t id);
QLORA_API void qlora_text_ids_free(qlora_text* text, qlora_text_ids* ids);

// ---- regular expressions ------------------------------------------------------------------------

typedef struct qlora_text_span {
    size_t begin; // bytes of a text
    size_t end;
} qlora_text_span;

// Supported: literals, ., [sets], \d \w \s \p{..} and their opposites, \b \B ^ $ \A \z \Z,
// groups, (?i:..), (?=..), (?!..), (?>..), |, and * + ? {n,m}, also lazy; * + ? also possessive.
// Anything else is refused by name.
typedef struct qlora_text_pattern qlora_text_pattern;
QLORA_API qlora_result qlora_text_pattern_compile(qlora_text* text, const char* source, size_t size,
                                                  qlora_text_pattern** out);
QLORA_API qlora_result qlora_text_pattern_close(qlora_text_pattern* pattern); // NULL is fine

typedef struct qlora_text_match {
    bool found;
    qlora_text_span whole;
    qlora_text_span group; // the first (..), if it took part; otherwise the whole match
} qlora_text_match;

// Finds the first match that begins at byte `from` or later. One without any text is none. Fails
// with QLORA_ERR_LIMIT if that would take too many steps.
QLORA_API qlora_result qlora_text_pattern_find(qlora_text_pattern* pattern, const char* text,
                                               size_t size, size_t from, qlora_text_match* out);

// ---- tokenizers ---------------------------------------------------------------------------------

typedef struct qlora_text_tok qlora_text_tok;

// `path` is a tokenizer.json, a tokenizer.bin of llama2.c, a GGUF file (its name ends in .gguf), or
// a folder that contains tokenizer.json, tokenizer.bin or tok512.bin.
QLORA_API qlora_result qlora_text_tok_open(qlora_text* text, const char* path,
                                           qlora_text_tok** out);
// The same from memory; `name` appears in messages.
QLORA_API qlora_result qlora_text_tok_load(qlora_text* text, const char* name, const void* data,
                                           size_t size, qlora_text_tok** out);
// NULL is fine. Fails with QLORA_ERR_STATE while chats use the tokenizer.
QLORA_API qlora_result qlora_text_tok_close(qlora_text_tok* tok);

typedef struct qlora_text_tok_info {
    int32_t count; // the largest id + 1
    int32_t bos;   // the first id that QLORA_TEXT_SPECIAL adds, or -1
} qlora_text_tok_info;
QLORA_API qlora_result qlora_text_tok_query(qlora_text_tok* tok, qlora_text_tok_info* out);

typedef struct qlora_text_token_info {
    const char* name; // as the file spells it, not terminated; valid until the tokenizer is closed
    size_t length;
    bool special; // not part of ordinary text
    bool added;   // found in a text before the model splits it
} qlora_text_token_info;
// Fails with QLORA_ERR_ARGUMENT for an id that does not exist.
QLORA_API qlora_result qlora_text_token_query(qlora_text_tok* tok, int32_t id,
                                              qlora_text_token_info* out);
// The id of a token as the file spells it, or -1.
QLORA_API int32_t qlora_text_tok_find(const qlora_text_tok* tok, const char* token);

// A token to add to a tokenizer. It is found in a text as it is spelt here, also within a word.
typedef struct qlora_text_new_token {
    const char* text; // UTF-8
    bool special;     // not part of ordinary text: skipped by QLORA_TEXT_SKIP
    bool known;       // set by qlora_text_tok_open_with: the tokenizer already has it
    int32_t id;       // set by qlora_text_tok_open_with
} qlora_text_new_token;
// Opens tokenizer.json of a folder with more tokens. They get the next ids, in their order; a token
// that exists already keeps its id, and nothing is added for it.
QLORA_API qlora_result qlora_text_tok_open_with(qlora_text* text, const char* folder,
                                                qlora_text_new_token* tokens, size_t count,
                                                qlora_text_tok** out);
// Writes the tokenizer files of a folder with these tokens, whose ids are set, to the folder `to`:
// tokenizer.json, tokenizer_config.json, and added_tokens.json, special_tokens_map.json and chat
// templates where they exist. transformers reads them. See also qlora_text_chat_save.
QLORA_API qlora_result qlora_text_tok_save(qlora_text* text, const char* folder,
                                           const qlora_text_new_token* tokens, size_t count,
                                           const char* to);

enum {
    QLORA_TEXT_SPECIAL = 1,  // encode: add what the post-processor adds (BOS, EOS)
    QLORA_TEXT_LITERAL = 2,  // encode: special tokens that are spelt out are ordinary text
    QLORA_TEXT_CONTINUE = 4, // encode: the text continues another one; no space is prepended
    QLORA_TEXT_SKIP = 8,     // decode: skip special tokens
    QLORA_TEXT_BOS = 32,     // encode: BOS first, unless the text begins with it, as in training
    QLORA_TEXT_REPLACE = 16  // decode: U+FFFD for invalid UTF-8, as the tokenizers library does
};

// Bytes that are not UTF-8 are allowed: each counts as one unknown character.
QLORA_API qlora_result qlora_text_encode(qlora_text_tok* tok, const char* text, size_t length,
                                         uint32_t flags, qlora_text_ids* out);
// Ids that do not exist are skipped.
QLORA_API qlora_result qlora_text_decode(qlora_text_tok* tok, const int32_t* ids, size_t count,
                                         uint32_t flags, qlora_text_bytes* out);

// Decodes id by id: only whole UTF-8 characters come out, the rest is held until it is complete.
// Start from all zeros. Bytes that can no longer become UTF-8 come out as U+FFFD.
typedef struct qlora_text_stream {
    char held[8];
    size_t held_count;
    size_t emitted; // ids so far
    size_t stripped;
} qlora_text_stream;
QLORA_API qlora_result qlora_text_stream_push(qlora_text_tok* tok, qlora_text_stream* stream,
                                              int32_t id, uint32_t flags, qlora_text_bytes* out);
// Emits what is held and zeroes the stream.
QLORA_API qlora_result qlora_text_stream_end(qlora_text_tok* tok, qlora_text_stream* stream,
                                             qlora_text_bytes* out);
