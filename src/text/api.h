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

// ---- chat templates -----------------------------------------------------------------------------

// A Jinja template as models bring it, executed as transformers does (jinja2 in its immutable
// sandbox, trim_blocks, lstrip_blocks, break, continue, generation blocks). A template cannot read
// files, and stops with an error at limits for steps, memory and depth.
typedef struct qlora_text_template qlora_text_template;

// `name` appears in messages.
QLORA_API qlora_result qlora_text_template_compile(qlora_text* text, const char* name,
                                                   const char* source, size_t size,
                                                   qlora_text_template** out);
QLORA_API qlora_result qlora_text_template_close(qlora_text_template* source); // NULL is fine

typedef struct qlora_text_spans {
    qlora_text_span* data;
    size_t count;
    size_t capacity;
} qlora_text_spans;
QLORA_API void qlora_text_spans_free(qlora_text* text, qlora_text_spans* spans);

typedef struct qlora_text_render_desc {
    uint32_t reserved_must_be_zero0;
    // A JSON object: "messages", perhaps "tools", and any other variable of the template. null is
    // None, and nothing is changed before rendering.
    const char* conversation;
    size_t conversation_size;
    bool generation_prompt;
    const char* bos_token; // NULL: not defined
    const char* eos_token;
    const char* pad_token;
    const char* unk_token;
    int64_t clock; // for strftime_now: seconds since 1970 in local time
    uint32_t reserved_must_be_zero1;
} qlora_text_render_desc;

// Appends the rendering and, unless `spans` is NULL, what {% generation %} blocks wrote.
QLORA_API qlora_result qlora_text_template_render(qlora_text_template* source,
                                                  const qlora_text_render_desc* desc,
                                                  qlora_text_bytes* out, qlora_text_spans* spans);

// ---- chat formats -------------------------------------------------------------------------------

// How messages become one text, and which parts of it are trained.
typedef struct qlora_text_chat qlora_text_chat;

typedef struct qlora_text_message {
    const char* role; // "system", "user" or "assistant"
    const char* content;
    size_t length;
    bool masked; // an assistant turn that is not trained
} qlora_text_message;

typedef struct qlora_text_chat_desc {
    uint32_t reserved_must_be_zero0;
    qlora_text_tok* tok; // required; must stay open as long as the chat
    // The model's folder: chat_template.jinja, chat_template.json, tokenizer_config.json,
    // generation_config.json and config.json are read if they exist. Or a GGUF file, which has the
    // same inside. NULL = none.
    const char* folder;
    // An adapter's folder, whose chat template and tokenizer_config.json come before the model's,
    // as its tokenizer does. NULL = none.
    const char* tokenizer_folder;
    // A built-in format: chatml, llama3, mistral, alpaca, plain, ...; NULL = the model's template,
    // else a format whose tokens the tokenizer has, else alpaca.
    const char* name;
    const char* template_file; // a Jinja template in a file; then `name` must be NULL
    int64_t clock;             // for strftime_now: seconds since 1970 in local time; 0 = 2024-07-26
    uint32_t reserved_must_be_zero1;
} qlora_text_chat_desc;

QLORA_API qlora_result qlora_text_chat_open(qlora_text* text, const qlora_text_chat_desc* desc,
                                            qlora_text_chat** out);
// NULL is fine. Fails with QLORA_ERR_STATE while data that was opened with `stream` uses the chat.
QLORA_API qlora_result qlora_text_chat_close(qlora_text_chat* chat);
QLORA_API const char* qlora_text_chat_names(size_t index); // every name; NULL after the last one
// The Jinja template of a built-in format; NULL if there is no format of this name.
QLORA_API const char* qlora_text_chat_template(const char* name);
QLORA_API qlora_result qlora_text_chat_set_clock(qlora_text_chat* chat, int64_t clock);

typedef struct qlora_text_chat_info {
    const char* name;     // of the built-in format, or "model"
    const char* source;   // where the choice came from, in words
    int32_t eos;          // ends a text; -1 when the model has none
    const int32_t* stops; // ids that end generation; valid until the chat is closed
    size_t stop_count;
    const char* missing; // the end marker of the built-in format, if the tokenizer does not have it
                         // and it is therefore ordinary text, followed by eos; otherwise NULL
    bool own;            // the template is that of tokenizer_folder
    bool replaced;       // tokenizer_folder has another template than the one that was chosen
} qlora_text_chat_info;
QLORA_API qlora_result qlora_text_chat_query(qlora_text_chat* chat, qlora_text_chat_info* out);

// Keeps the format of a chat with an adapter that was trained with it: writes the tokenizer files
// of `folder` to the folder `to`, as qlora_text_tok_save does, with the chat's template. There,
// transformers and qlora_text_chat_open (tokenizer_folder) find what was trained. If `folder` has
// no tokenizer.json or is a GGUF file, only chat_template.jinja is written. A format that neither
// the caller nor a folder chose is written only if a conversation was encoded with it.
QLORA_API qlora_result qlora_text_chat_save(qlora_text_chat* chat, const char* folder,
                                            const qlora_text_new_token* tokens, size_t count,
                                            const char* to);

// Appends the ids and, unless `labels` is NULL, as many labels: -100 where nothing is trained.
// With `prompt` the result ends where the assistant's answer begins.
QLORA_API qlora_result qlora_text_chat_encode(qlora_text_chat* chat,
                                              const qlora_text_message* messages, size_t count,
                                              bool prompt, qlora_text_ids* ids,
                                              qlora_text_ids* labels);

// The same for a conversation as JSON: an object with "messages", perhaps "tools", and any other
// variable of the template. Appends the rendering to `text` as well; text and labels may be NULL.
// What is changed in the messages: see qlora_text_data_desc.
// The ids are those of the whole text. An answer that the template renders differently once later
// turns follow is trained in a sample of its own: it has no labels here, and a warning is logged.
QLORA_API qlora_result qlora_text_chat_encode_json(qlora_text_chat* chat, const char* conversation,
                                                   size_t size, bool prompt, qlora_text_bytes* text,
                                                   qlora_text_ids* ids, qlora_text_ids* labels);

// ---- training data ------------------------------------------------------------------------------

// A file of samples, tokenized. It keeps nothing of the tokenizer and the chat, unless it is a
// stream.
typedef struct qlora_text_data qlora_text_data;

// What a record is, for training with preferences.
typedef enum qlora_text_preference {
    QLORA_TEXT_ANSWERS = 0, // an answer to learn; pairs and judged answers are refused
    QLORA_TEXT_PAIRS = 1,   // "chosen" and "rejected": two samples, in this order
    QLORA_TEXT_JUDGED = 2   // an answer with a "label", true or false
} qlora_text_preference;

// What a sample of data is: what to learn, or what to ask.
typedef enum qlora_text_prompts {
    QLORA_TEXT_LEARN = 0,
    QLORA_TEXT_ASK = 1,     // a prompt without its answer; one that is a string is continued
    QLORA_TEXT_ASK_CHAT = 2 // the same; one that is a string is a message of the user
} qlora_text_prompts;

// A conversation, here and in qlora_text_chat_encode_json: the messages are passed to the template
// as they are, and those with the role "assistant" are trained. Three things are changed.
// ShareGPT's {"from", "value"} becomes {"role", "content"}: from human, prompter or input is the
// user; gpt, model, bot, chatgpt, bing, bard or output is the assistant; developer is the system;
// observation, function, ipython, function_response, tool_response or tool_results is the tool.
// Arguments of a tool call that are JSON in a string become the object, unless the template asks
// whether they are a string. A content in parts becomes one string if the template does not take
// parts.
typedef struct qlora_text_data_desc {
    uint32_t reserved_must_be_zero0;
    const char* path;      // ends in one of qlora_text_data_formats; .gz may follow
    qlora_text_chat* chat; // required; its tokenizer is used
    size_t chunk_tokens;   // .txt: longest sample, BOS included; 0 = no limit, else at least 2
    bool train_prompt;     // train on everything, each token of a record once
    bool last_turn_only;   // train on the last assistant turn only
    // Keeps an index instead of the samples: qlora_text_sample_read makes a sample from its record
    // in the file, and the chat must stay open. Standard input, memory, compressed and Parquet
    // files are kept as without it, and so are .txt documents that cannot be split (up to 16 MiB).
    bool stream;
    // One of qlora_text_data_formats: what the file is (jsonl, csv, txt, ...), or the only form of
    // record that is read (text, messages, ...). NULL = from the ending and the names in each
    // record.
    const char* format;
    // Names in the file that stand for those of a record: "prompt=question,completion=answer".
    // NULL = they are as they should be.
    const char* columns;
    // One of several files: a name of `columns` that no record of this file has is not an error.
    // The file is then read as if the name had not been given, and qlora_text_data_query lists it.
    // A pipe can be read only once: there it is an error.
    bool columns_partial;
    // Called for each record that cannot be used, with its line and what qlora_text_last_error
    // would say. Reading goes on if it returns true. NULL = the first one is an error.
    bool (*bad)(void* user, size_t line, const char* what);
    void* bad_user;
    qlora_text_preference preference; // except for ANSWERS, only the last answer is trained
    // Other than LEARN: each record is one sample, which ends where its answer begins; nothing is
    // trained. The answer, which a record may lack, is the sample's reference. A conversation that
    // ends with an answer of the assistant is asked without it. Records are kept in memory.
    qlora_text_prompts prompts;
    const char* system; // for prompts: the system message of conversations; NULL = none
    uint32_t reserved_must_be_zero1;
} qlora_text_data_desc;

QLORA_API qlora_result qlora_text_data_open(qlora_text* text, const qlora_text_data_desc* desc,
                                            qlora_text_data** out);
// The same from memory; desc->path is used in messages, and its ending says what the data is. The
// path "-" stands for standard input, which is JSON unless desc->format is set.
QLORA_API qlora_result qlora_text_data_load(qlora_text* text, const qlora_text_data_desc* desc,
                                            const void* data, size_t size, qlora_text_data** out);
QLORA_API qlora_result qlora_text_data_close(qlora_text_data* data); // NULL is fine
QLORA_API const char* qlora_text_data_formats(size_t index); // every name; NULL after the last one
// Whether a file name ends like a data file, in any case.
QLORA_API bool qlora_text_data_known(const char* path);
QLORA_API size_t qlora_text_data_count(const qlora_text_data* data);

typedef struct qlora_text_data_info {
    size_t count;        // samples
    const char* ignored; // names in the records that were not used: "id, source"; "" = none
    const char* lacking; // names of desc.columns that the file does not have, in the same way
    bool chat;           // whether a record is a conversation, for which the chat format was used
} qlora_text_data_info;
QLORA_API qlora_result qlora_text_data_query(qlora_text_data* data, qlora_text_data_info* out);

typedef struct qlora_text_sample {
    const int32_t* ids;    // valid until the next sample is read or the data is closed
    const int32_t* labels; // label i belongs to id i; -100 is not trained
    size_t count;          // 0 for an empty record
    size_t trained;        // labels other than -100, not counting the first position
    size_t line;           // where the record starts in the file
    bool desirable;        // QLORA_TEXT_JUDGED: its "label"; QLORA_TEXT_PAIRS: the chosen one
    // Made of the same record as the sample before it: the rejected text of a pair, or a later turn
    // of a conversation whose template changes earlier turns when others follow. Data must be split
    // between records, never within one. Parts of a .txt document are records of their own.
    bool continues;
    bool chat;             // for prompts: the sample is in the chat format
    const char* reference; // for prompts: the record's answer, valid like ids; NULL if it has none
    size_t reference_size;
    bool endless;          // the last answer of a conversation is trained without an end marker
} qlora_text_sample;
// Fails with QLORA_ERR_ARGUMENT when index is not below qlora_text_data_count, and for a stream
// with QLORA_ERR_FILE when the file has changed.
QLORA_API qlora_result qlora_text_sample_read(qlora_text_data* data, size_t index,
                                              qlora_text_sample* out);
