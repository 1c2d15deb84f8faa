#define TEXT_VERSION_STRING "0.1.0"

typedef struct text_error {
    char text[512];
} text_error;

// Growing arrays. Start from all zeros; the functions append; free with
// text_bytes_free/text_ids_free.
typedef struct text_bytes {
    char* data; // not terminated by a zero
    size_t count;
    size_t capacity;
} text_bytes;

typedef struct text_ids {
    int32_t* data;
    size_t count;
    size_t capacity;
} text_ids;

void text_bytes_free(text_bytes* bytes);
void text_ids_free(text_ids* ids);
bool text_bytes_add(text_bytes* bytes, const void* data, size_t size, text_error* error);
bool text_ids_add(text_ids* ids, int32_t id, text_error* error);

// The whole file, with one zero byte after its end that is not counted.
bool text_file_read(const char* path, text_bytes* out, text_error* error);

// A tokenizer. `path` is a tokenizer.json, a .bin of llama2.c, or a folder that holds
// tokenizer.json, tokenizer.bin or tok512.bin.
typedef struct text_tok text_tok;
bool text_tok_open(const char* path, text_tok** out, text_error* error);
bool text_tok_load(const char* name, const void* data, size_t size, text_tok** out,
                   text_error* error);
void text_tok_close(text_tok* tok);

int32_t text_tok_count(const text_tok* tok);                   // one more than the largest id
int32_t text_tok_find(const text_tok* tok, const char* token); // its id, or -1
bool text_tok_is_special(const text_tok* tok, int32_t id);     // not part of ordinary text
bool text_tok_is_added(const text_tok* tok, int32_t id);       // found before the model is asked
int32_t text_tok_bos(const text_tok* tok); // what TEXT_SPECIAL puts in front, or -1
// The token as the file spells it, not terminated; NULL for an id that does not exist.
const char* text_tok_name(const text_tok* tok, int32_t id, size_t* length);

enum {
    TEXT_SPECIAL = 1,  // encode: add what the post-processor says (BOS, EOS)
    TEXT_LITERAL = 2,  // encode: special tokens written out in the text are ordinary text
    TEXT_CONTINUE = 4, // encode: the text continues another one; no space is put in front
    TEXT_SKIP = 8,     // decode: leave special tokens out
    TEXT_REPLACE = 16  // decode: U+FFFD for what is not UTF-8, as the tokenizers library does
};

bool text_encode(text_tok* tok, const char* text, size_t length, unsigned flags, text_ids* out,
                 text_error* error);
bool text_decode(const text_tok* tok, const int32_t* ids, size_t count, unsigned flags,
                 text_bytes* out, text_error* error);

// Decoding id by id: only whole UTF-8 characters come out, the rest is held until it is complete.
// Start from all zeros. What can never become UTF-8 comes out as U+FFFD.
typedef struct text_stream {
    char held[8];
    size_t held_count;
    size_t emitted; // ids so far
    size_t stripped;
} text_stream;
bool text_stream_push(const text_tok* tok, text_stream* stream, int32_t id, unsigned flags,
                      text_bytes* out, text_error* error);
bool text_stream_end(text_stream* stream, text_bytes* out, text_error* error);

// A chat format: how messages become one text and where the trained parts are.
typedef struct text_chat text_chat;
typedef struct text_message {
    const char* role; // "system", "user", "assistant", "tool"
    const char* content;
    size_t length;
    bool masked; // an assistant turn that is not trained
} text_message;

// `folder` is the model's folder (tokenizer_config.json, chat_template.jinja,
// generation_config.json, config.json are read if they exist) or NULL. `name` is chatml, llama3,
// mistral, alpaca, plain, ... or NULL: recognised from the model's template, else from the tokens
// it has, else alpaca.
bool text_chat_open(const text_tok* tok, const char* folder, const char* name, text_chat** out,
                    text_error* error);
void text_chat_close(text_chat* chat);
const char* text_chat_name(const text_chat* chat);
const char* text_chat_source(const text_chat* chat);     // where the choice came from, in words
const char* text_chat_names(size_t index);               // every name; NULL after the last one
int32_t text_chat_eos(const text_chat* chat);            // ends a text; -1 when the model has none
bool text_chat_stops(const text_chat* chat, int32_t id); // generation ends here
// Some templates print today's date: the default is the fixed one of the template.
bool text_chat_set_date(text_chat* chat, const char* date, text_error* error);
// Appends the ids; and the labels (same length, -100 where nothing is trained) unless NULL.
// With `prompt` the result ends where the assistant is to speak.
bool text_chat_encode(const text_chat* chat, text_tok* tok, const text_message* messages,
                      size_t count, bool prompt, text_ids* ids, text_ids* labels,
                      text_error* error);

// Training data, tokenized.
typedef struct text_data text_data;
typedef struct text_data_desc {
    const char* path;
    text_tok* tok;
    const text_chat* chat;
    size_t chunk_tokens; // .txt only: longest sample, BOS included; 0 is no limit
    bool train_prompt;   // train on everything
    bool last_turn_only; // train on the last assistant turn only
} text_data_desc;
typedef struct text_sample {
    const int32_t* ids;
    const int32_t* labels; // label i belongs to id i; -100 is not trained
    size_t count;          // may be 0: an empty record
    size_t trained;        // labels that are not -100, the first position left out
    size_t line;           // where the record starts in the file
} text_sample;
bool text_data_open(const text_data_desc* desc, text_data** out, text_error* error);
// The same from memory; `name` is used in messages, and its ending says what the data is.
bool text_data_load(const text_data_desc* desc, const char* name, const void* data, size_t size,
                    text_data** out, text_error* error);
void text_data_close(text_data* data);
size_t text_data_count(const text_data* data);
text_sample text_data_get(const text_data* data, size_t index); // count 0 when out of range

// JSON, for the programs: the ids in one array; the strings of an array; the elements of an array,
// whatever they are, as JSON; one string written. `name` is the file, for messages.
typedef bool text_json_fn(void* user, const char* text, size_t length, text_error* error);
bool text_json_ids(const char* json, size_t size, text_ids* out, text_error* error);
bool text_json_strings(const char* name, const char* json, size_t size, text_json_fn* fn,
                       void* user, text_error* error);
bool text_json_elements(const char* name, const char* json, size_t size, text_json_fn* fn,
                        void* user, text_error* error);
bool text_json_quote(const char* string, size_t length, text_bytes* out, text_error* error);
