// ---- chat templates -----------------------------------------------------------------------------

// With QLORA_TEXT_NO_TEMPLATES beside the implementation, these functions and those of data are
// declared but left out: a program that calls one does not link.

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

// Left out by QLORA_TEXT_NO_TEMPLATES as well.

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
// no tokenizer.json or is a GGUF file, only chat_template.jinja is written; of a GGUF file,
// qlora_adapter_save_tokenizer of qlora.h writes the rest. A format that neither the caller nor a
// folder chose is written only if a conversation was encoded with it.
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
