/* qlora_text.h - v0.2.0 - tokenizers, chat templates and training data - SPDX: MIT-0 OR Unlicense

   Do this in ONE C or C++ file:

       #define QLORA_TEXT_IMPLEMENTATION
       #include "qlora_text.h"

   and include "qlora_text.h" without the macro everywhere else. It needs no other file; a program
   may include qlora.h of the same version as well, in either order.

   CONTENTS  (grep -n '^//@@' qlora_text.h lists every part)

       api                  linkage, results and hooks; shared with qlora.h
       text/api             declarations: text, arrays, tokenizers, templates, chats, data
       platform             files and memory of the operating system; shared with qlora.h
       core                 errors, log, memory, files; shared with qlora.h
       formats              JSON, regular expressions, stop ids, GGUF metadata; shared with qlora.h
       text/base            the text object, growing arrays, whole files
       text/folder          files of a model folder, also made from a GGUF file
       text/classes         classes of characters
       text/unicode_tables  generated tables
       text/unicode         UTF-8, normalisation
       text/unicode_case    generated tables of upper and lower case
       text/case            upper and lower case, digits
       text/values          JSON values as the loaders use them
       text/maps            hash tables: byte strings, pairs of numbers
       text/view            a text to be split, by characters
       text/pattern         regular expressions: compiling
       text/pattern_match   regular expressions: matching
       text/split           pre-tokenizers
       text/bpe             one word to ids
       text/normalize       normalizers
       text/load_model      tokenizer.json: tokens and merges
       text/load            tokenizer.json: the steps around them
       text/load_scored     vocabularies whose tokens have scores
       text/load_gguf       the tokenizer in a GGUF file
       text/load_bin        tokenizer.bin of llama2.c; opening and asking
       text/encode          text to ids
       text/decode          ids to text
       text/jinja_base       values of templates, memory, limits
       text/jinja_lex        templates: tokens
       text/jinja_parse      templates: expressions to a tree
       text/jinja_parse_tags  templates: statements to a tree
       text/jinja_scope      templates: which variable a name means
       text/jinja_value      text, comparison, iteration of values
       text/jinja_number     operators
       text/jinja_json       JSON to values and back
       text/jinja_format     formats and dates
       text/jinja_strings    what strings can do
       text/jinja_methods    methods of values
       text/jinja_iterate    map, select, sorting
       text/jinja_filters    filters
       text/jinja_tables     tables of filters and tests
       text/jinja_eval       expressions
       text/jinja_run        statements and macros
       text/jinja_api        templates as objects
       text/chat_formats    built-in chat templates
       text/chat            which template a model has
       text/chat_encode     conversations to ids, and what is trained
       text/data            samples, messages
       text/records         one record of a JSON file to a sample
       text/data_files      training files to samples

   This file is assembled from the parts in src/ of the repository; changes are made there.

   QUICK START

       qlora_text* text = NULL;
       qlora_text_tok* tok = NULL;
       qlora_text_ids ids = {0};
       if (qlora_text_create(NULL, &text) != QLORA_OK ||
           qlora_text_tok_open(text, "model/tokenizer.json", &tok) != QLORA_OK ||
           qlora_text_encode(tok, "Hello", 5, QLORA_TEXT_SPECIAL, &ids) != QLORA_OK) {
           puts(qlora_text_last_error(text));
       }
       qlora_text_ids_free(text, &ids);
       qlora_text_tok_close(tok);
       qlora_text_destroy(text);

   BUILD AND LINK
       C99 or C++11, 64-bit, little endian; Linux, macOS, BSD, Windows. Nothing to link. Include
       the implementation before any system header, or build with -D_POSIX_C_SOURCE=200809L.
       QLORA_STATIC and QLORA_DLL have the same meaning as for qlora.h.

   TOKENIZERS
       BPE models of tokenizer.json, byte-level (GPT-2, Llama 3, Qwen, SmolLM, ...) and
       SentencePiece style with byte fallback (Llama 2, Mistral, TinyLlama, Gemma, ...), and the
       tokenizer.bin of llama2.c. For valid UTF-8 the ids are those of the `tokenizers` library.
       GGUF files: the models "llama" (SentencePiece with scores) and "gpt2" (byte-level BPE, with
       the pattern that tokenizer.ggml.pre names); the ids are those of llama.cpp.
       Anything in the file that is not supported is reported by name and rejected when it is
       loaded: a model other than BPE, an unknown normalizer, a part of a regular expression.
       The file's "truncation" and "padding" settings are ignored: text is encoded in full.

   DATA
       .jsonl or .ndjson (one object per line), .json (an array of objects, {"data": [...]}, or as
       .jsonl), .txt; desc.format overrides the ending.

       {"text"}                            all of it is trained
       {"prompt", "completion"}            two strings, joined as they are; the completion is
                                           trained (two lists of messages: see messages)
       {"messages": [{"role", "content"}]} rendered by the chat template; assistant turns are
                                           trained
       {"conversations": [{"from", "value"}]}                 the same (ShareGPT)
       {"instruction", "input", "output", "history"}          the same (Alpaca)
       {"question", "answer"}, {"input", "output"}            the same
       {"input_ids", "labels"}             taken as they are

       "response" is accepted for "completion", "output" and "answer", and "context" for "input"
       (Dolly, SQuAD). "system" becomes the first message. In a message, "weight" or "train" 0 or
       false means that this turn is not trained. Padding that an "attention_mask" marks is
       dropped. null is the same as no value. A name above with another type is an error, and so is
       a record that fits two forms, unless desc.format names one of them; all other names have no
       effect and are listed by qlora_text_data_query. What would change the text or its training
       but is not supported (other weights, images) is an error.
       With a model's own template, messages may have tool_calls, tool_call_id, name,
       reasoning_content and thinking, roles may be "tool", and "tools", "documents",
       "enable_thinking" and "chat_template_kwargs" of a record are variables of the template.
       Arguments of a tool call that are a string are parsed before rendering, unless the template
       itself asks whether they are a string. Contents in parts are joined.

       .txt: documents are separated by lines that contain only <|endoftext|>; a file without
       such a line is one document. A document longer than desc.chunk_tokens is split into
       samples of that length, and no token is lost.

       A sample gets BOS exactly once: from the template, or where the tokenizer's post-processor
       adds it. Its end is trained: the end marker of the template, otherwise EOS.

   CHAT TEMPLATES
       A conversation is rendered by the Jinja template that the model brings, in
       chat_template.jinja, chat_template.json, tokenizer_config.json or a GGUF file, as
       transformers executes it; a built-in one is used on request, or when there is none.
       Statements: if, for (not recursive), set, macro, call, filter, with, break, continue, print,
       raw, generation. Filters, tests and methods are those of jinja2 and Python's str, list and
       dict. What is not supported is an error that names it: include, import, block, extends,
       autoescape; the filters filesizeformat, pprint, random, striptags, urlize, wordwrap and
       xmlattr; integers beyond 64 bits, unless they are only printed; printing an object that
       Python shows with its address. A template stops with an error at limits for steps, memory
       and depth. strftime_now prints desc.clock.

       What is trained is derived. With {% generation %} blocks it is what they write. Otherwise an
       answer is what the rendering up to it has more than the rendering before it with the
       generation prompt, up to its end marker. If a template renders earlier turns differently
       when later ones follow (it drops their thoughts), each turn becomes a sample of its own, as
       inference sees it. If an answer does not continue its prompt, the record is refused. Text is
       split into tokens where an answer begins and ends, as in generation.

   STOP IDS
       As in transformers: those of generation_config.json if it has an "eos_token_id", else those
       of config.json; also EOS and the marker with which the template ends an answer.

   ERRORS
       Every call that can fail returns a qlora_result and writes its outputs only on success;
       growing arrays are left as they were. qlora_text_last_error says what, where and why, on one
       line of valid UTF-8. Nothing is printed, nothing exits.

   MEMORY AND FILES
       Both go through the hooks of qlora_text_desc, the same as those of qlora.h. Every allocation
       is checked. Paths are UTF-8, on Windows as well.

   THREADS
       A text object and everything opened from it are used by one thread at a time. Different text
       objects are independent.
*/

#if !defined(__cplusplus) && (!defined(__STDC_VERSION__) || __STDC_VERSION__ < 199901L) &&         \
    !defined(_MSC_VER)
#error "qlora_text.h needs C99 or C++11: compile with -std=c99 or later"
#include <stop> /* there is no such file: the compiler stops here */
#endif

//@@ src/qlora_text.h

#ifndef QLORA_TEXT_H
#define QLORA_TEXT_H


//@@ src/api/linkage.h

// The implementations need POSIX names that -std=c99 hides; harmless when the user set them
// already.
#if (defined(QLORA_IMPLEMENTATION) || defined(QLORA_TEXT_IMPLEMENTATION)) && !defined(_WIN32)
#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L
#endif
#ifndef _DARWIN_C_SOURCE
#define _DARWIN_C_SOURCE 1
#endif
#ifndef _FILE_OFFSET_BITS
#define _FILE_OFFSET_BITS 64
#endif
#endif

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// qlora.h and qlora_text.h each carry this part; whichever comes second compares.
#ifndef QLORA_VERSION_MAJOR
#define QLORA_VERSION_MAJOR 0
#define QLORA_VERSION_MINOR 2
#define QLORA_VERSION_PATCH 0
#define QLORA_VERSION                                                                              \
    (QLORA_VERSION_MAJOR * 10000 + QLORA_VERSION_MINOR * 100 + QLORA_VERSION_PATCH)
#define QLORA_VERSION_STRING "0.2.0"
#elif QLORA_VERSION_MAJOR != 0 || QLORA_VERSION_MINOR != 2 || QLORA_VERSION_PATCH != 0
#error "qlora.h and qlora_text.h are of different versions; take both from one release"
#endif

#ifndef QLORA_API
#if defined(QLORA_STATIC)
#if defined(__GNUC__)
#define QLORA_API static __attribute__((unused))
#else
#define QLORA_API static
#endif
#elif defined(QLORA_DLL) && defined(_WIN32)
#if defined(QLORA_IMPLEMENTATION) || defined(QLORA_TEXT_IMPLEMENTATION)
#define QLORA_API __declspec(dllexport) extern
#else
#define QLORA_API __declspec(dllimport) extern
#endif
#elif defined(QLORA_DLL) && defined(__GNUC__)
#define QLORA_API __attribute__((visibility("default"))) extern
#else
#define QLORA_API extern
#endif
#endif // QLORA_API

//@@ src/qlora_text.h

#ifdef __cplusplus
extern "C" {
#endif


//@@ src/api/base.h

#ifndef QLORA_BASE_INCLUDED
#define QLORA_BASE_INCLUDED

// ---- results ------------------------------------------------------------------------------------
// clang-format off
// Name, value (never reused for another result), description.
#define QLORA_RESULTS(X)                                                                    \
    X(OK,                 0,    "ok")                                                       \
    X(ERR_ARGUMENT,      -1,    "an argument is invalid")                                   \
    X(ERR_MEMORY,        -2,    "out of host memory")                                       \
    X(ERR_LIMIT,         -3,    "a size is too large")                                      \
    X(ERR_STATE,         -4,    "the object is not in a state that allows this call")       \
    X(ERR_UNSUPPORTED,   -5,    "not supported")                                            \
    X(ERR_STOPPED,       -6,    "stopped by the caller")                                    \
    X(ERR_VERSION,       -7,    "the program and the library use different headers")        \
    X(ERR_FILE,          -100,  "a file could not be read or written")                      \
    X(ERR_FORMAT,        -101,  "a file is malformed")                                      \
    X(ERR_CUDA,          -200,  "a CUDA call failed")                                       \
    X(ERR_DEVICE_MEMORY, -201,  "out of device memory")                                     \
    X(ERR_DEVICE_LOST,   -202,  "the CUDA context is unusable after an earlier fault")      \
    X(ERR_BACKEND,       -203,  "the required backend is not available")                    \
    X(ERR_KERNEL,        -204,  "a kernel could not be compiled or found")                  \
    X(ERR_TARGET,        -205,  "the PTX has a different target from this device")           \
    X(ERR_SEALED,        -206,  "the kernel cache is sealed")                               \
    X(ERR_CUBLAS,        -207,  "a cuBLAS call failed")                                     \
    X(ERR_CAPTURE,       -208,  "graph capture failed")
// clang-format on

typedef enum qlora_result {
#define QLORA_X_RESULT(name, value, text) QLORA_##name = (value),
    QLORA_RESULTS(QLORA_X_RESULT)
#undef QLORA_X_RESULT
    QLORA_RESULT_FORCE_INT = 0x7fffffff
} qlora_result;

// ---- hooks --------------------------------------------------------------------------------------
typedef enum qlora_log_level {
    QLORA_LOG_ERROR = 1,
    QLORA_LOG_WARN = 2,
    QLORA_LOG_INFO = 3,
    QLORA_LOG_DEBUG = 4
} qlora_log_level;

// clang-format off
#define QLORA_LOG_ITEMS(X)                                                                  \
    X(BACKEND,        "the backend in use, and why")                                        \
    X(CUBLAS,         "cuBLAS was loaded, or why not")                                      \
    X(KERNEL_COMPILE, "a module was compiled, or could not be")                             \
    X(PREWARM,        "pre-warm finished")                                                  \
    X(GRAPH,          "a graph was captured, invalidated, or capture failed")               \
    X(MODEL,          "a model is ready")                                                   \
    X(DEVICE_LOST,    "a fault made the device unusable")                                   \
    X(LEAK,           "an object still exists when its context is destroyed")               \
    X(CHECKPOINT,     "a checkpoint was saved, loaded, or skipped")                         \
    X(TEXT,           "a tokenizer, chat format or data file was read")
// clang-format on

typedef enum qlora_log_item {
#define QLORA_X_LOG(name, text) QLORA_LOG_ITEM_##name,
    QLORA_LOG_ITEMS(QLORA_X_LOG)
#undef QLORA_X_LOG
    QLORA_LOG_ITEM_COUNT
} qlora_log_item;

// text is never NULL; file may be NULL. Both are valid only during the call.
typedef void (*qlora_log_fn)(void* user, qlora_log_level level, qlora_log_item item,
                             const char* text, const char* file, int line);

// Host memory. Set both functions or neither. align is a power of two. alloc returns NULL on
// failure; free receives the size that was passed to alloc.
typedef struct qlora_allocator {
    void* (*alloc)(size_t bytes, size_t align, void* user);
    void (*free)(void* pointer, size_t bytes, void* user);
    void* user;
} qlora_allocator;

// Device memory of the current CUDA context. Set both functions or neither. alloc returns memory
// that is at least 256-byte aligned, or NULL on failure.
typedef struct qlora_device_allocator {
    void* (*alloc)(size_t bytes, void* user);
    void (*free)(void* pointer, size_t bytes, void* user);
    void* user;
} qlora_device_allocator;

typedef enum qlora_file_mode {
    QLORA_FILE_READ = 0,
    QLORA_FILE_CREATE = 1 // a new file for writing; EEXIST if the name exists, even as a link
} qlora_file_mode;

// Set all functions or none. Those that return int return 0 or an errno value. read and write
// return the number of bytes or a negative errno value: after a short write, the rest is written
// again; a read of 0 bytes is the end of the file.
typedef struct qlora_files {
    int (*open)(const char* path, qlora_file_mode mode, void** file, void* user);
    int64_t (*read)(void* file, void* buffer, size_t bytes, void* user);
    int64_t (*write)(void* file, const void* data, size_t bytes, void* user);
    int (*sync)(void* file, void* user); // returns once the data is on disk
    int (*close)(void* file, void* user);
    int (*rename)(const char* from, const char* to, void* user); // replaces `to` atomically
    int (*remove)(const char* path, void* user);
    int (*make_dir)(const char* path, void* user); // also 0 if it already exists
    int (*sync_dir)(const char* path, void* user); // makes names in the directory durable
    // Maps a whole file for reading. handle is passed to unmap.
    int (*map)(const char* path, const void** data, uint64_t* bytes, void** handle, void* user);
    void (*unmap)(const void* data, uint64_t bytes, void* handle, void* user);
    void* user;
} qlora_files;

#endif // QLORA_BASE_INCLUDED

//@@ src/text/api.h

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
// Fails with QLORA_ERR_STATE, and frees nothing, while tokenizers, chats, templates or data files
// are open.
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

enum {
    QLORA_TEXT_SPECIAL = 1,  // encode: add what the post-processor adds (BOS, EOS)
    QLORA_TEXT_LITERAL = 2,  // encode: special tokens that are spelt out are ordinary text
    QLORA_TEXT_CONTINUE = 4, // encode: the text continues another one; no space is prepended
    QLORA_TEXT_SKIP = 8,     // decode: skip special tokens
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

typedef struct qlora_text_span {
    size_t begin; // bytes of the rendering
    size_t end;
} qlora_text_span;

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
    // A built-in format: chatml, llama3, mistral, alpaca, plain, ...; NULL = the model's template,
    // else a format whose tokens the tokenizer has, else alpaca.
    const char* name;
    const char* template_file; // a Jinja template in a file; NULL = as `name` says
    int64_t clock; // for strftime_now: seconds since 1970 in local time; 0 = 2024-07-26
    uint32_t reserved_must_be_zero1;
} qlora_text_chat_desc;

QLORA_API qlora_result qlora_text_chat_open(qlora_text* text, const qlora_text_chat_desc* desc,
                                            qlora_text_chat** out);
QLORA_API qlora_result qlora_text_chat_close(qlora_text_chat* chat); // NULL is fine
QLORA_API const char* qlora_text_chat_names(size_t index); // every name; NULL after the last one
QLORA_API qlora_result qlora_text_chat_set_clock(qlora_text_chat* chat, int64_t clock);

typedef struct qlora_text_chat_info {
    const char* name;     // of the built-in format, or "model"
    const char* source;   // where the choice came from, in words
    int32_t eos;          // ends a text; -1 when the model has none
    const int32_t* stops; // ids that end generation; valid until the chat is closed
    size_t stop_count;
} qlora_text_chat_info;
QLORA_API qlora_result qlora_text_chat_query(qlora_text_chat* chat, qlora_text_chat_info* out);

// Appends the ids and, unless `labels` is NULL, as many labels: -100 where nothing is trained.
// With `prompt` the result ends where the assistant's answer begins.
QLORA_API qlora_result qlora_text_chat_encode(qlora_text_chat* chat,
                                              const qlora_text_message* messages, size_t count,
                                              bool prompt, qlora_text_ids* ids,
                                              qlora_text_ids* labels);

// The same for a conversation as JSON: an object with "messages", perhaps "tools", and any other
// variable of the template. Appends the rendering to `text` as well; text and labels may be NULL.
QLORA_API qlora_result qlora_text_chat_encode_json(qlora_text_chat* chat, const char* conversation,
                                                   size_t size, bool prompt, qlora_text_bytes* text,
                                                   qlora_text_ids* ids, qlora_text_ids* labels);

// ---- training data ------------------------------------------------------------------------------

// A file of samples, tokenized. It keeps nothing of the tokenizer and the chat.
typedef struct qlora_text_data qlora_text_data;

typedef struct qlora_text_data_desc {
    uint32_t reserved_must_be_zero0;
    const char* path;      // ends in .jsonl, .ndjson, .json or .txt, in any case
    qlora_text_chat* chat; // required; its tokenizer is used
    size_t chunk_tokens;   // .txt: longest sample, BOS included; 0 = no limit, else at least 2
    bool train_prompt;     // train on everything
    bool last_turn_only;   // train on the last assistant turn only
    // One of qlora_text_data_formats: what the file is (jsonl, ndjson, json, txt), or the only form
    // of record that is read from a JSON file (text, messages, ...). NULL = from the ending and the
    // names in each record.
    const char* format;
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
QLORA_API size_t qlora_text_data_count(const qlora_text_data* data);

typedef struct qlora_text_data_info {
    size_t count;        // samples
    const char* ignored; // names in the records that were not used: "id, source"; "" = none
} qlora_text_data_info;
QLORA_API qlora_result qlora_text_data_query(qlora_text_data* data, qlora_text_data_info* out);

typedef struct qlora_text_sample {
    const int32_t* ids;    // valid until the data is closed
    const int32_t* labels; // label i belongs to id i; -100 is not trained
    size_t count;          // 0 for an empty record
    size_t trained;        // labels other than -100, not counting the first position
    size_t line;           // where the record starts in the file
} qlora_text_sample;
// Fails with QLORA_ERR_ARGUMENT when index is not below qlora_text_data_count.
QLORA_API qlora_result qlora_text_sample_read(qlora_text_data* data, size_t index,
                                              qlora_text_sample* out);

//@@ src/qlora_text.h

#ifdef __cplusplus
}
#endif

#endif // QLORA_TEXT_H

#ifdef QLORA_TEXT_IMPLEMENTATION
#ifndef QLORA_TEXT_IMPLEMENTATION_DONE
#define QLORA_TEXT_IMPLEMENTATION_DONE

#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wunknown-warning-option"
#pragma clang diagnostic ignored "-Wreserved-identifier"
#endif


//@@ src/platform/base.h

#ifndef QLORA__PART_PLATFORM
#define QLORA__PART_PLATFORM

// System headers, the targets that are supported, and compiler attributes.

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef _WIN32
#include <direct.h>
#include <fcntl.h>
#include <io.h>
#include <process.h>
#include <sys/stat.h>
#include <wchar.h>
#else
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#ifndef CLOCK_MONOTONIC
#error "qlora.h: include the implementation before system headers, or use -D_POSIX_C_SOURCE=200809L"
#endif
#endif

#if !defined(__LP64__) && !defined(_WIN64)
#error "qlora.h needs a 64-bit target"
#endif
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "qlora.h needs a little-endian target"
#endif

// Marks private functions that a configuration may leave without a caller.
#if defined(__MINGW32__)
#define QLORA__UNUSED __attribute__((unused))
#define QLORA__PRINTF(fmt, first) __attribute__((format(gnu_printf, fmt, first)))
#elif defined(__GNUC__)
#define QLORA__UNUSED __attribute__((unused))
#define QLORA__PRINTF(fmt, first) __attribute__((format(printf, fmt, first)))
#else
#define QLORA__UNUSED
#define QLORA__PRINTF(fmt, first)
#endif

#ifndef QLORA_ASSERT
#define QLORA_ASSERT(condition) ((void)(condition))
#endif

typedef void (*qlora__thread_fn)(void* user);

#endif // QLORA__PART_PLATFORM

//@@ src/qlora_text.h

#ifdef _WIN32

//@@ src/platform/windows.h

#ifndef QLORA__PART_WINDOWS
#define QLORA__PART_WINDOWS

// The system functions are declared here so that <windows.h> and its macros stay out of the user's
// file.
#ifdef _WINDOWS_
#ifdef __cplusplus
#error "qlora.h: include the implementation before <windows.h>"
#endif
#else
#ifdef __cplusplus
extern "C" {
#endif
__declspec(dllimport) void* __stdcall LoadLibraryExA(const char*, void*, unsigned long);
__declspec(dllimport) unsigned long __stdcall GetEnvironmentVariableA(const char*, char*,
                                                                      unsigned long);
__declspec(dllimport) int __stdcall GlobalMemoryStatusEx(void*); // MEMORYSTATUSEX*
__declspec(dllimport) void* __stdcall GetProcAddress(void*, const char*);
__declspec(dllimport) unsigned long __stdcall GetLastError(void);
__declspec(dllimport) int __stdcall QueryPerformanceCounter(void*); // LARGE_INTEGER*
__declspec(dllimport) int __stdcall QueryPerformanceFrequency(void*);
__declspec(dllimport) unsigned long __stdcall GetActiveProcessorCount(unsigned short);
__declspec(dllimport) void __stdcall AcquireSRWLockExclusive(void*);
__declspec(dllimport) void __stdcall ReleaseSRWLockExclusive(void*);
__declspec(dllimport) int __stdcall SleepConditionVariableSRW(void*, void*, unsigned long,
                                                              unsigned long);
__declspec(dllimport) void __stdcall WakeAllConditionVariable(void*);
__declspec(dllimport) unsigned long __stdcall WaitForSingleObject(void*, unsigned long);
__declspec(dllimport) int __stdcall CloseHandle(void*);
__declspec(dllimport) int __stdcall MultiByteToWideChar(unsigned, unsigned long, const char*, int,
                                                        wchar_t*, int);
__declspec(dllimport) int __stdcall MoveFileExW(const wchar_t*, const wchar_t*, unsigned long);
__declspec(dllimport) void* __stdcall CreateFileW(const wchar_t*, unsigned long, unsigned long,
                                                  void*, unsigned long, unsigned long, void*);
__declspec(dllimport) int __stdcall GetFileSizeEx(void*, void*);
__declspec(dllimport) void* __stdcall CreateFileMappingW(void*, void*, unsigned long, unsigned long,
                                                         unsigned long, const wchar_t*);
__declspec(dllimport) void* __stdcall MapViewOfFile(void*, unsigned long, unsigned long,
                                                    unsigned long, size_t);
__declspec(dllimport) int __stdcall UnmapViewOfFile(const void*);
#ifdef __cplusplus
}
#endif
#endif

// Whether a path does not depend on the current folder or drive: "C:\\x" or "\\\\server\\x".
static QLORA__UNUSED bool qlora__path_is_whole(const char* path) {
    bool drive = path[0] != '\0' && path[1] == ':' && (path[2] == '\\' || path[2] == '/');
    return drive || (path[0] == '\\' && path[1] == '\\');
}

// Looks for a library in the folders of PATH, where CUDA's installer puts its own. Entries that
// depend on the current folder are left out.
static QLORA__UNUSED void* qlora__library_in_path(const char* name) {
    static const char variable[] = "PATH";
    char path[32768];
    char file[1200];
    void* library = NULL;
    unsigned long size = GetEnvironmentVariableA(variable, path, (unsigned long)sizeof path);
    if (size == 0 || size >= sizeof path) {
        return NULL;
    }
    for (char* at = path; *at != '\0' && library == NULL;) {
        char* end = at + strcspn(at, ";");
        char* next = *end != '\0' ? end + 1 : end;
        *end = '\0';
        int n = snprintf(file, sizeof file, "%s\\%s", at, name);
        if (qlora__path_is_whole(at) && n > 0 && (size_t)n < sizeof file) {
            library = (void*)LoadLibraryExA(file, NULL, 0x1100UL); // its folder, then the defaults
        }
        at = next;
    }
    return library;
}

// LoadLibraryA would also look in the current folder, where anybody may have put a file.
static QLORA__UNUSED void* qlora__library_open(const char* name, char* why, size_t size) {
    bool whole = qlora__path_is_whole(name);
    if (!whole && strpbrk(name, "/\\:") != NULL) {
        snprintf(why, size, "%s is a relative path; give an absolute one, or a name alone", name);
        return NULL;
    }
    // the program's folder and the system's; for a path, also the folder it names
    void* library = (void*)LoadLibraryExA(name, NULL, whole ? 0x1100UL : 0x1000UL);
    unsigned long code = library == NULL ? GetLastError() : 0;
    if (library == NULL && !whole) {
        library = qlora__library_in_path(name);
    }
    if (library == NULL) {
        snprintf(why, size, "%s: error %lu", name, code);
    }
    return library;
}

static QLORA__UNUSED void* qlora__library_symbol(void* library, const char* name) {
    return (void*)GetProcAddress(library, name);
}

static QLORA__UNUSED double qlora__clock_ms(void) {
    int64_t count = 0;
    int64_t rate = 1;
    QueryPerformanceCounter((void*)&count);
    QueryPerformanceFrequency((void*)&rate);
    return (double)count * 1e3 / (double)rate;
}

static QLORA__UNUSED int32_t qlora__core_count(void) {
    return (int32_t)GetActiveProcessorCount(0xffff);
}

// Bytes of physical memory that are available; 0 = not known.
static QLORA__UNUSED uint64_t qlora__os_memory(const char* root) {
    struct {
        uint32_t size;
        uint32_t load;
        uint64_t bytes[7]; // the second is the available physical memory
    } status;
    (void)root;
    memset(&status, 0, sizeof status);
    status.size = (uint32_t)sizeof status;
    return GlobalMemoryStatusEx((void*)&status) ? status.bytes[1] : 0;
}

typedef struct qlora__mutex {
    void* srw;
} qlora__mutex;
typedef struct qlora__cond {
    void* variable;
} qlora__cond;
typedef struct qlora__thread {
    uintptr_t handle;
    qlora__thread_fn fn;
    void* user;
} qlora__thread;

static QLORA__UNUSED bool qlora__mutex_init(qlora__mutex* m) {
    m->srw = NULL;
    return true;
}
static QLORA__UNUSED void qlora__mutex_free(qlora__mutex* m) {
    (void)m;
}
static QLORA__UNUSED void qlora__mutex_lock(qlora__mutex* m) {
    AcquireSRWLockExclusive((void*)m);
}
static QLORA__UNUSED void qlora__mutex_unlock(qlora__mutex* m) {
    ReleaseSRWLockExclusive((void*)m);
}
static QLORA__UNUSED bool qlora__cond_init(qlora__cond* c) {
    c->variable = NULL;
    return true;
}
static QLORA__UNUSED void qlora__cond_free(qlora__cond* c) {
    (void)c;
}
static QLORA__UNUSED void qlora__cond_wait(qlora__cond* c, qlora__mutex* m) {
    SleepConditionVariableSRW((void*)c, (void*)m, 0xffffffffUL, 0);
}
static QLORA__UNUSED void qlora__cond_wake(qlora__cond* c) {
    WakeAllConditionVariable((void*)c);
}
static unsigned __stdcall qlora__thread_entry(void* p) {
    qlora__thread* t = (qlora__thread*)p;
    t->fn(t->user);
    return 0;
}
static QLORA__UNUSED bool qlora__thread_start(qlora__thread* t, qlora__thread_fn fn, void* user) {
    t->fn = fn;
    t->user = user;
    t->handle = _beginthreadex(NULL, 0, qlora__thread_entry, t, 0, NULL);
    return t->handle != 0;
}
static QLORA__UNUSED void qlora__thread_join(qlora__thread* t) {
    WaitForSingleObject((void*)t->handle, 0xffffffffUL);
    CloseHandle((void*)t->handle);
}

// Paths are UTF-8; those that do not fit are rejected with ENAMETOOLONG.
#define QLORA__PATH_MAX 1024
static QLORA__UNUSED bool qlora__wide(const char* path, wchar_t* out) {
    return MultiByteToWideChar(65001, 8, path, -1, out, QLORA__PATH_MAX) > 0;
}

static QLORA__UNUSED int qlora__os_open(const char* path, qlora_file_mode mode, void** file,
                                        void* user) {
    (void)user;
    wchar_t wide[QLORA__PATH_MAX];
    if (!qlora__wide(path, wide)) {
        return ENAMETOOLONG;
    }
    FILE* f = NULL;
    if (mode == QLORA_FILE_READ) {
        f = _wfopen(wide, L"rb");
    } else {
        int fd = _wopen(wide, _O_WRONLY | _O_CREAT | _O_EXCL | _O_BINARY | _O_NOINHERIT,
                        _S_IREAD | _S_IWRITE);
        f = fd >= 0 ? _fdopen(fd, "wb") : NULL;
        if (fd >= 0 && f == NULL) {
            _close(fd);
        }
    }
    if (f == NULL) {
        return errno != 0 ? errno : EIO;
    }
    *file = f;
    return 0;
}

static QLORA__UNUSED int64_t qlora__os_read(void* file, void* buffer, size_t bytes, void* user) {
    (void)user;
    size_t n = fread(buffer, 1, bytes, (FILE*)file);
    return n == 0 && ferror((FILE*)file) ? -(int64_t)EIO : (int64_t)n;
}

static QLORA__UNUSED int64_t qlora__os_write(void* file, const void* data, size_t bytes,
                                             void* user) {
    (void)user;
    size_t n = fwrite(data, 1, bytes, (FILE*)file);
    return n == 0 && bytes > 0 ? -(int64_t)(errno != 0 ? errno : EIO) : (int64_t)n;
}

static QLORA__UNUSED int qlora__os_sync(void* file, void* user) {
    (void)user;
    if (fflush((FILE*)file) != 0) {
        return errno != 0 ? errno : EIO;
    }
    return _commit(_fileno((FILE*)file)) == 0 ? 0 : EIO;
}

static QLORA__UNUSED int qlora__os_close(void* file, void* user) {
    (void)user;
    return fclose((FILE*)file) == 0 ? 0 : EIO;
}

static QLORA__UNUSED int qlora__os_rename(const char* from, const char* to, void* user) {
    (void)user;
    wchar_t wide_from[QLORA__PATH_MAX];
    wchar_t wide_to[QLORA__PATH_MAX];
    if (!qlora__wide(from, wide_from) || !qlora__wide(to, wide_to)) {
        return ENAMETOOLONG;
    }
    return MoveFileExW(wide_from, wide_to, 1 | 8) ? 0 : EIO; // replace the target, write through
}

static QLORA__UNUSED int qlora__os_remove(const char* path, void* user) {
    (void)user;
    wchar_t wide[QLORA__PATH_MAX];
    if (!qlora__wide(path, wide)) {
        return ENAMETOOLONG;
    }
    return _wremove(wide) == 0 ? 0 : errno;
}

static QLORA__UNUSED int qlora__os_make_dir(const char* path, void* user) {
    (void)user;
    wchar_t wide[QLORA__PATH_MAX];
    if (!qlora__wide(path, wide)) {
        return ENAMETOOLONG;
    }
    return _wmkdir(wide) == 0 || errno == EEXIST ? 0 : errno;
}

static QLORA__UNUSED int qlora__os_sync_dir(const char* path, void* user) {
    (void)path;
    (void)user;
    return 0; // MoveFileEx has already written through
}

static QLORA__UNUSED int qlora__os_map(const char* path, const void** data, uint64_t* bytes,
                                       void** handle, void* user) {
    (void)user;
    wchar_t wide[QLORA__PATH_MAX];
    if (!qlora__wide(path, wide)) {
        return ENAMETOOLONG;
    }
    void* file = CreateFileW(wide, 0x80000000UL, 1, NULL, 3, 0, NULL);
    if (file == (void*)(intptr_t)-1) {
        return ENOENT;
    }
    int64_t size = 0;
    void* view = NULL;
    void* mapping = NULL;
    if (GetFileSizeEx(file, (void*)&size) && size > 0) {
        mapping = CreateFileMappingW(file, NULL, 2, 0, 0, NULL);
        view = mapping != NULL ? MapViewOfFile(mapping, 4, 0, 0, 0) : NULL;
    }
    if (mapping != NULL) {
        CloseHandle(mapping); // the view keeps the mapping open
    }
    CloseHandle(file);
    if (size > 0 && view == NULL) {
        return EIO;
    }
    *data = view;
    *bytes = (uint64_t)size;
    *handle = NULL;
    return 0;
}

static QLORA__UNUSED void qlora__os_unmap(const void* data, uint64_t bytes, void* handle,
                                          void* user) {
    (void)bytes;
    (void)handle;
    (void)user;
    if (data != NULL) {
        UnmapViewOfFile(data);
    }
}

#endif // QLORA__PART_WINDOWS

//@@ src/qlora_text.h

#else // POSIX

//@@ src/platform/posix.h

#ifndef QLORA__PART_POSIX
#define QLORA__PART_POSIX

// POSIX: shared libraries, clock, threads and files.

// A path that depends on the current folder would let whoever can write there run code here.
static QLORA__UNUSED void* qlora__library_open(const char* name, char* why, size_t size) {
    if (name[0] != '/' && strchr(name, '/') != NULL) {
        snprintf(why, size, "%s is a relative path; give an absolute one, or a name alone", name);
        return NULL;
    }
    void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        const char* text = dlerror();
        snprintf(why, size, "%s", text != NULL ? text : name);
    }
    return library;
}

static QLORA__UNUSED void* qlora__library_symbol(void* library, const char* name) {
    return dlsym(library, name);
}

static QLORA__UNUSED double qlora__clock_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static QLORA__UNUSED int32_t qlora__core_count(void) {
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 && n < 4096 ? (int32_t)n : 1;
}

// Reads a small text file, such as those of /proc; "" if there is none.
static QLORA__UNUSED void qlora__os_text(const char* root, const char* folder, const char* name,
                                         char* out, size_t size) {
    char path[1200];
    size_t used = 0;
    int n = snprintf(path, sizeof path, "%s%s%s", root, folder, name);
    int fd = n > 0 && (size_t)n < sizeof path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    while (fd >= 0 && used < size - 1) {
        ssize_t got = read(fd, out + used, size - 1 - used);
        if (got <= 0) {
            break;
        }
        used += (size_t)got;
    }
    if (fd >= 0) {
        close(fd);
    }
    out[used] = '\0';
}

// The number after a key at the start of a line; UINT64_MAX if there is none ("max" in a cgroup).
static QLORA__UNUSED uint64_t qlora__os_number(const char* text, const char* key) {
    size_t length = strlen(key);
    while (text != NULL && strncmp(text, key, length) != 0) {
        text = strchr(text, '\n');
        text = text != NULL ? text + 1 : NULL;
    }
    text = text != NULL ? text + length : "";
    while (*text == ' ') {
        text++;
    }
    uint64_t value = *text >= '0' && *text <= '9' ? 0 : UINT64_MAX;
    for (; *text >= '0' && *text <= '9' && value < UINT64_MAX / 16; text++) {
        value = value * 10 + (uint64_t)(*text - '0');
    }
    return value;
}

// What one cgroup leaves: its limit less what it uses, without the file cache that it can drop.
static QLORA__UNUSED uint64_t qlora__os_cgroup(const char* root, const char* folder, bool second) {
    char text[8192];
    qlora__os_text(root, folder, second ? "/memory.max" : "/memory.limit_in_bytes", text,
                   sizeof text);
    uint64_t limit = qlora__os_number(text, "");
    qlora__os_text(root, folder, second ? "/memory.current" : "/memory.usage_in_bytes", text,
                   sizeof text);
    uint64_t used = qlora__os_number(text, "");
    qlora__os_text(root, folder, "/memory.stat", text, sizeof text);
    uint64_t cache = qlora__os_number(text, second ? "inactive_file " : "total_inactive_file ");
    if (limit == UINT64_MAX || used == UINT64_MAX) {
        return UINT64_MAX;
    }
    used -= cache != UINT64_MAX && cache < used ? cache : 0;
    return limit > used ? limit - used : 0;
}

// Bytes of memory that this process can still take without swapping: what the system has available
// and what every cgroup that it is in allows; at least 1. 0 = not known. Tests give another root
// than "".
static QLORA__UNUSED uint64_t qlora__os_memory(const char* root) {
    char text[8192];
    qlora__os_text(root, "/proc/meminfo", "", text, sizeof text);
    uint64_t most = qlora__os_number(text, "MemAvailable:");
    most = most != UINT64_MAX ? most * 1024 : UINT64_MAX;
    qlora__os_text(root, "/proc/self/cgroup", "", text, sizeof text);
    for (char* line = text; *line != '\0';) { // number:controllers:folder
        char folder[1024];
        char* end = line + strcspn(line, "\n");
        char* next = *end != '\0' ? end + 1 : end;
        *end = '\0';
        bool second = strncmp(line, "0::", 3) == 0;
        char* first = strstr(line, ":memory:");
        const char* own = second ? line + 3 : first != NULL ? first + 8 : NULL;
        const char* base = second ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
        int n = own != NULL ? snprintf(folder, sizeof folder, "%s%s", base, own) : -1;
        bool inside = n > 0 && (size_t)n < sizeof folder;
        while (inside) { // up to the root, which in a container is the container's own
            uint64_t left = qlora__os_cgroup(root, folder, second);
            most = left < most ? left : most;
            char* slash = strrchr(folder, '/');
            inside = slash != NULL && (size_t)(slash - folder) >= strlen(base);
            if (inside) {
                *slash = '\0';
            }
        }
        line = next;
    }
    return most == UINT64_MAX ? 0 : most > 0 ? most : 1;
}

typedef pthread_mutex_t qlora__mutex;
typedef pthread_cond_t qlora__cond;
typedef struct qlora__thread {
    pthread_t handle;
    qlora__thread_fn fn;
    void* user;
} qlora__thread;

static QLORA__UNUSED bool qlora__mutex_init(qlora__mutex* m) {
    return pthread_mutex_init(m, NULL) == 0;
}
static QLORA__UNUSED void qlora__mutex_free(qlora__mutex* m) {
    pthread_mutex_destroy(m);
}
static QLORA__UNUSED void qlora__mutex_lock(qlora__mutex* m) {
    pthread_mutex_lock(m);
}
static QLORA__UNUSED void qlora__mutex_unlock(qlora__mutex* m) {
    pthread_mutex_unlock(m);
}
static QLORA__UNUSED bool qlora__cond_init(qlora__cond* c) {
    return pthread_cond_init(c, NULL) == 0;
}
static QLORA__UNUSED void qlora__cond_free(qlora__cond* c) {
    pthread_cond_destroy(c);
}
static QLORA__UNUSED void qlora__cond_wait(qlora__cond* c, qlora__mutex* m) {
    pthread_cond_wait(c, m);
}
static QLORA__UNUSED void qlora__cond_wake(qlora__cond* c) {
    pthread_cond_broadcast(c);
}
static QLORA__UNUSED void* qlora__thread_entry(void* p) {
    qlora__thread* t = (qlora__thread*)p;
    t->fn(t->user);
    return NULL;
}
static QLORA__UNUSED bool qlora__thread_start(qlora__thread* t, qlora__thread_fn fn, void* user) {
    t->fn = fn;
    t->user = user;
    return pthread_create(&t->handle, NULL, qlora__thread_entry, t) == 0;
}
static QLORA__UNUSED void qlora__thread_join(qlora__thread* t) {
    pthread_join(t->handle, NULL);
}

// A file handle is its descriptor plus one, so that NULL can mean "no file".
static QLORA__UNUSED int qlora__os_fd(void* file) {
    return (int)((intptr_t)file - 1);
}

static QLORA__UNUSED int qlora__os_open(const char* path, qlora_file_mode mode, void** file,
                                        void* user) {
    (void)user;
    int flags = mode == QLORA_FILE_READ ? O_RDONLY : O_WRONLY | O_CREAT | O_EXCL;
    int fd = open(path, flags | O_CLOEXEC, 0666);
    if (fd < 0) {
        return errno;
    }
    *file = (void*)((intptr_t)fd + 1);
    return 0;
}

static QLORA__UNUSED int64_t qlora__os_read(void* file, void* buffer, size_t bytes, void* user) {
    (void)user;
    size_t most = bytes < ((size_t)1 << 30) ? bytes : (size_t)1 << 30; // Linux caps a call at 2 GiB
    ssize_t n;
    do {
        n = read(qlora__os_fd(file), buffer, most);
    } while (n < 0 && errno == EINTR);
    return n < 0 ? -(int64_t)errno : (int64_t)n;
}

static QLORA__UNUSED int64_t qlora__os_write(void* file, const void* data, size_t bytes,
                                             void* user) {
    (void)user;
    size_t most = bytes < ((size_t)1 << 30) ? bytes : (size_t)1 << 30;
    ssize_t n;
    do {
        n = write(qlora__os_fd(file), data, most);
    } while (n < 0 && errno == EINTR);
    return n < 0 ? -(int64_t)errno : (int64_t)n;
}

static QLORA__UNUSED int qlora__os_sync(void* file, void* user) {
    (void)user;
    return fsync(qlora__os_fd(file)) == 0 ? 0 : errno;
}

static QLORA__UNUSED int qlora__os_close(void* file, void* user) {
    (void)user;
    return close(qlora__os_fd(file)) == 0 ? 0 : errno;
}

static QLORA__UNUSED int qlora__os_rename(const char* from, const char* to, void* user) {
    (void)user;
    return rename(from, to) == 0 ? 0 : errno;
}

static QLORA__UNUSED int qlora__os_remove(const char* path, void* user) {
    (void)user;
    return remove(path) == 0 ? 0 : errno;
}

static QLORA__UNUSED int qlora__os_make_dir(const char* path, void* user) {
    (void)user;
    return mkdir(path, 0777) == 0 || errno == EEXIST ? 0 : errno;
}

static QLORA__UNUSED int qlora__os_sync_dir(const char* path, void* user) {
    (void)user;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return errno;
    }
    int code = fsync(fd) == 0 ? 0 : errno;
    close(fd);
    // Some file systems cannot sync a folder and return EINVAL; nothing more can be done about it.
    return code == EINVAL ? 0 : code;
}

static QLORA__UNUSED int qlora__os_map(const char* path, const void** data, uint64_t* bytes,
                                       void** handle, void* user) {
    (void)user;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return errno;
    }
    struct stat info;
    int code = fstat(fd, &info) == 0 ? 0 : errno;
    void* view = NULL;
    if (code == 0 && !S_ISREG(info.st_mode)) {
        code = S_ISDIR(info.st_mode) ? EISDIR : EINVAL;
    }
    if (code == 0 && info.st_size > 0) {
        view = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (view == MAP_FAILED) {
            code = errno;
        }
    }
    close(fd);
    if (code != 0) {
        return code;
    }
    *data = view;
    *bytes = (uint64_t)info.st_size;
    *handle = NULL;
    return 0;
}

static QLORA__UNUSED void qlora__os_unmap(const void* data, uint64_t bytes, void* handle,
                                          void* user) {
    (void)handle;
    (void)user;
    if (data != NULL) {
        munmap((void*)(uintptr_t)data, (size_t)bytes);
    }
}

#endif // QLORA__PART_POSIX

//@@ src/qlora_text.h

#endif // _WIN32


//@@ src/platform/system.h

#ifndef QLORA__PART_SYSTEM
#define QLORA__PART_SYSTEM

static QLORA__UNUSED void* qlora__os_alloc(size_t bytes, size_t align, void* user) {

// Allocation, the names of NVIDIA's libraries, and error texts, on every system.
    (void)user;
#ifdef _WIN32
    return _aligned_malloc(bytes, align);
#else
    void* p = NULL;
    return posix_memalign(&p, align < sizeof(void*) ? sizeof(void*) : align, bytes) == 0 ? p : NULL;
#endif
}

static QLORA__UNUSED void qlora__os_free(void* pointer, size_t bytes, void* user) {
    (void)bytes;
    (void)user;
#ifdef _WIN32
    _aligned_free(pointer);
#else
    free(pointer);
#endif
}

// The calling convention and the file names of NVIDIA's libraries.
// clang-format off
#ifdef _WIN32
#define QLORA__CUDAAPI __stdcall
#define QLORA__CUDA_NAMES(X) X("nvcuda.dll")
#define QLORA__CUBLAS_NAMES(X) X("cublas64_13.dll") X("cublas64_12.dll") X("cublas64_11.dll")
#else
#define QLORA__CUDAAPI
#define QLORA__CUDA_NAMES(X)                                                                       \
    X("libcuda.so.1") X("libcuda.so") X("/usr/lib/wsl/lib/libcuda.so.1")
#define QLORA__CUBLAS_NAMES(X)                                                                     \
    X("libcublas.so.13") X("libcublas.so.12") X("libcublas.so.11") X("libcublas.so")               \
    X("/usr/local/cuda/lib64/libcublas.so")
#endif
// clang-format on

// strerror is not thread-safe, so the common codes are listed here.
static const char* qlora__errno_text(int code) {
    static const struct {
        int code;
        const char* text;
    } table[] = {
        {ENOENT, "no such file or folder"},  {EACCES, "permission denied"},
        {EPERM, "not permitted"},            {ENOSPC, "no space left on the device"},
        {EROFS, "read-only file system"},    {EISDIR, "is a folder"},
        {ENOTDIR, "not a folder"},           {EEXIST, "already exists"},
        {EMFILE, "too many open files"},     {ENAMETOOLONG, "path too long or not UTF-8"},
        {EFBIG, "file too large"},           {EIO, "input/output error"},
        {ENOMEM, "out of memory"},           {EINVAL, "invalid argument"},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        if (table[i].code == code) {
            return table[i].text;
        }
    }
    return "file error";
}

#endif // QLORA__PART_SYSTEM

//@@ src/core/env.h

#ifndef QLORA__PART_ENV
#define QLORA__PART_ENV

// The environment of all code that reads or writes files: memory, files, a log and the error text.
// Each context has one, and so does each object of qlora_text.h.
#define QLORA__ERROR_SIZE 768

typedef struct qlora__env {
    qlora_allocator allocator; // both functions set
    qlora_files files;         // all functions set
    qlora_log_fn log;          // NULL: silent
    void* log_user;
    const char* call;    // the outermost public call, for messages
    bool one_line;       // replace control characters, which quoted files may contain
    uint64_t host_bytes; // allocated and not yet freed
    char error[QLORA__ERROR_SIZE];
} qlora__env;

#define QLORA__TRY(expression)                                                                     \
    do {                                                                                           \
        qlora_result qlora_try_ = (expression);                                                    \
        if (qlora_try_ != QLORA_OK) {                                                              \
            return qlora_try_;                                                                     \
        }                                                                                          \
    } while (0)

// ---- hooks --------------------------------------------------------------------------------------

#define QLORA__FILES_ALL 11

// How many of the functions are set.
static QLORA__UNUSED int qlora__files_count(const qlora_files* f) {
    return (f->open != NULL) + (f->read != NULL) + (f->write != NULL) + (f->sync != NULL) +
           (f->close != NULL) + (f->rename != NULL) + (f->remove != NULL) + (f->make_dir != NULL) +
           (f->sync_dir != NULL) + (f->map != NULL) + (f->unmap != NULL);
}

// The operating system's functions where there are none.
static QLORA__UNUSED void qlora__hooks_default(qlora_allocator* allocator, qlora_files* files) {
    if (allocator->alloc == NULL) {
        allocator->alloc = qlora__os_alloc;
        allocator->free = qlora__os_free;
    }
    if (files->open == NULL) {
        files->open = qlora__os_open;
        files->read = qlora__os_read;
        files->write = qlora__os_write;
        files->sync = qlora__os_sync;
        files->close = qlora__os_close;
        files->rename = qlora__os_rename;
        files->remove = qlora__os_remove;
        files->make_dir = qlora__os_make_dir;
        files->sync_dir = qlora__os_sync_dir;
        files->map = qlora__os_map;
        files->unmap = qlora__os_unmap;
    }
}

// ---- errors and log -----------------------------------------------------------------------------

// Length of the UTF-8 character at p (1 to 4), 0 when it is not valid.
static QLORA__UNUSED uint32_t qlora__utf8_size(const char* text, uint32_t left) {
    const uint8_t* p = (const uint8_t*)text;
    uint32_t size = p[0] < 0x80 ? 1 : p[0] < 0xC2 ? 0 : p[0] < 0xE0 ? 2 : p[0] < 0xF0 ? 3 : 4;
    if (size == 0 || size > left || p[0] > 0xF4) {
        return 0;
    }
    for (uint32_t i = 1; i < size; i++) {
        if ((p[i] & 0xC0) != 0x80) {
            return 0;
        }
    }
    // the second byte shows overlong forms, surrogates and code points above U+10FFFF
    if ((p[0] == 0xE0 && p[1] < 0xA0) || (p[0] == 0xED && p[1] > 0x9F) ||
        (p[0] == 0xF0 && p[1] < 0x90) || (p[0] == 0xF4 && p[1] > 0x8F)) {
        return 0;
    }
    return size;
}

// Messages quote files and are truncated: what is left of a UTF-8 character at the end is dropped.
// On one line, control characters and invalid UTF-8 elsewhere become '?'.
static void qlora__env_clean(const qlora__env* env, char* text, size_t room) {
    size_t count = strlen(text);
    if (count + 1 == room) {
        while (count > 0 && ((uint8_t)text[count - 1] & 0xC0) == 0x80) {
            count--;
        }
        if (count > 0 && (uint8_t)text[count - 1] >= 0xC0) {
            count--;
        }
        text[count] = '\0';
    }
    for (size_t i = 0; env->one_line && i < count;) {
        uint32_t left = count - i < 4 ? (uint32_t)(count - i) : 4;
        uint32_t size = qlora__utf8_size(text + i, left);
        if (size == 0 || (uint8_t)text[i] < 0x20 || text[i] == 0x7F) {
            text[i] = '?';
        }
        i += size > 0 ? size : 1;
    }
}

// Sets the error text, which starts with the name of the public call.
static void qlora__env_vfail(qlora__env* env, const char* format, va_list args) {
    int used = 0;
    if (env->call != NULL) {
        used = snprintf(env->error, sizeof env->error, "%s: ", env->call);
    }
    vsnprintf(env->error + used, sizeof env->error - (size_t)used, format, args);
    qlora__env_clean(env, env->error, sizeof env->error);
}

// Sets the error text and returns the result.
QLORA__PRINTF(3, 4)
static QLORA__UNUSED qlora_result qlora__env_fail(qlora__env* env, qlora_result result,
                                                  const char* format, ...) {
    va_list args;
    va_start(args, format);
    qlora__env_vfail(env, format, args);
    va_end(args);
    return result;
}

// The error text without the name of the call.
static QLORA__UNUSED const char* qlora__env_reason(const qlora__env* env) {
    size_t prefix = env->call != NULL ? strlen(env->call) + 2 : 0;
    return strlen(env->error) >= prefix ? env->error + prefix : env->error;
}

// Puts words before the error text of what failed inside: "model.merges[3] ", then "is not ...".
QLORA__PRINTF(3, 4)
static QLORA__UNUSED qlora_result qlora__env_wrap(qlora__env* env, qlora_result result,
                                                  const char* format, ...) {
    char inner[QLORA__ERROR_SIZE];
    snprintf(inner, sizeof inner, "%s", qlora__env_reason(env));
    va_list args;
    va_start(args, format);
    qlora__env_vfail(env, format, args);
    va_end(args);
    size_t used = strlen(env->error);
    snprintf(env->error + used, sizeof env->error - used, "%s", inner);
    qlora__env_clean(env, env->error, sizeof env->error);
    return result;
}

QLORA__PRINTF(6, 7)
static QLORA__UNUSED void qlora__env_log(const qlora__env* env, qlora_log_level level,
                                         qlora_log_item item, const char* file, int line,
                                         const char* format, ...) {
    if (env->log == NULL) {
        return;
    }
    char text[QLORA__ERROR_SIZE];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    qlora__env_clean(env, text, sizeof text);
    env->log(env->log_user, level, item, text, file, line);
}

// ---- sizes --------------------------------------------------------------------------------------

static QLORA__UNUSED bool qlora__mul(size_t a, size_t b, size_t* out) {
    if (b != 0 && a > SIZE_MAX / b) {
        return false;
    }
    *out = a * b;
    return true;
}

static QLORA__UNUSED bool qlora__add(size_t a, size_t b, size_t* out) {
    if (a > SIZE_MAX - b) {
        return false;
    }
    *out = a + b;
    return true;
}

static QLORA__UNUSED int64_t qlora__min(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static QLORA__UNUSED int64_t qlora__max(int64_t a, int64_t b) {
    return a > b ? a : b;
}

static QLORA__UNUSED int64_t qlora__ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

static QLORA__UNUSED size_t qlora__align_up(size_t n, size_t align) {
    return (n + align - 1) / align * align;
}

// ---- host memory --------------------------------------------------------------------------------

// Allocates host memory through the hook, 64-byte aligned. Sets the error text on failure.
static void* qlora__env_alloc(qlora__env* env, size_t bytes) {
    size_t wanted = bytes > 0 ? bytes : 1;
    void* p = env->allocator.alloc(wanted, 64, env->allocator.user);
    if (p == NULL) {
        qlora__env_fail(env, QLORA_ERR_MEMORY, "cannot allocate %llu bytes of host memory",
                        (unsigned long long)bytes);
        return NULL;
    }
    env->host_bytes += wanted;
    return p;
}

static QLORA__UNUSED void* qlora__env_alloc_zero(qlora__env* env, size_t bytes) {
    void* p = qlora__env_alloc(env, bytes);
    if (p != NULL) {
        memset(p, 0, bytes);
    }
    return p;
}

// `bytes` is the size that was passed to qlora__env_alloc; the pointer may be NULL.
static void qlora__env_free(qlora__env* env, void* pointer, size_t bytes) {
    if (pointer != NULL) {
        size_t wanted = bytes > 0 ? bytes : 1;
        env->allocator.free(pointer, wanted, env->allocator.user);
        env->host_bytes -= wanted;
    }
}

// Moves the first `used` bytes of a block of `bytes` bytes into a new block of `wanted` bytes. If
// it returns NULL, the old block is unchanged.
static QLORA__UNUSED void* qlora__env_realloc(qlora__env* env, void* pointer, size_t used,
                                              size_t bytes, size_t wanted) {
    void* moved = qlora__env_alloc(env, wanted);
    if (moved != NULL && pointer != NULL) {
        memcpy(moved, pointer, used);
        qlora__env_free(env, pointer, bytes);
    }
    return moved;
}

// ---- strings ------------------------------------------------------------------------------------

// Appends to a buffer that may be too small; `used` counts the characters that would have been
// written.
QLORA__PRINTF(4, 5)
static QLORA__UNUSED void qlora__append(char* buffer, size_t size, size_t* used, const char* format,
                                        ...) {
    va_list args;
    va_start(args, format);
    bool room = buffer != NULL && *used < size;
    int n = vsnprintf(room ? buffer + *used : NULL, room ? size - *used : 0, format, args);
    va_end(args);
    *used += n > 0 ? (size_t)n : 0;
}

// A growing string. The first failure is kept and later additions do nothing, so callers check
// once.
typedef struct qlora__string {
    qlora__env* env;
    char* data;
    size_t size;
    size_t capacity;
    qlora_result result;
} qlora__string;

static QLORA__UNUSED void qlora__string_begin(qlora__env* env, qlora__string* s) {
    memset(s, 0, sizeof *s);
    s->env = env;
    s->result = QLORA_OK;
}

static QLORA__UNUSED void qlora__string_free(qlora__string* s) {
    qlora__env_free(s->env, s->data, s->capacity);
    s->data = NULL;
    s->size = 0;
    s->capacity = 0;
}

static QLORA__UNUSED void qlora__string_add(qlora__string* s, const void* bytes, size_t size) {
    size_t need = 0;
    if (s->result != QLORA_OK || size == 0) {
        return;
    }
    if (!qlora__add(s->size, size, &need)) {
        s->result = qlora__env_fail(s->env, QLORA_ERR_MEMORY,
                                    "a text of more than %llu bytes does not fit in memory",
                                    (unsigned long long)SIZE_MAX);
        return;
    }
    if (need > s->capacity) {
        size_t capacity = s->capacity < 256 ? 256 : s->capacity;
        while (capacity < need) {
            capacity = capacity > SIZE_MAX / 2 ? need : capacity * 2;
        }
        char* data = (char*)qlora__env_realloc(s->env, s->data, s->size, s->capacity, capacity);
        if (data == NULL) {
            s->result = QLORA_ERR_MEMORY;
            return;
        }
        s->data = data;
        s->capacity = capacity;
    }
    memcpy(s->data + s->size, bytes, size);
    s->size = need;
}

static QLORA__UNUSED void qlora__string_puts(qlora__string* s, const char* string) {
    qlora__string_add(s, string, strlen(string));
}

#endif // QLORA__PART_ENV

//@@ src/core/files.h

#ifndef QLORA__PART_FILES
#define QLORA__PART_FILES

// ---- files --------------------------------------------------------------------------------------

typedef struct qlora__map {
    const uint8_t* data;
    uint64_t size;
    void* handle;
} qlora__map;

static QLORA__UNUSED qlora_result qlora__map_open(qlora__env* env, const char* path,
                                                  qlora__map* out) {
    memset(out, 0, sizeof *out);
    const void* data = NULL;
    int code = env->files.map(path, &data, &out->size, &out->handle, env->files.user);
    if (code != 0) {
        return qlora__env_fail(env, QLORA_ERR_FILE, "cannot read %s: %s (%d)", path,
                               qlora__errno_text(code), code);
    }
    out->data = (const uint8_t*)data;
    return QLORA_OK;
}

static QLORA__UNUSED void qlora__map_close(qlora__env* env, qlora__map* map) {
    if (map->data != NULL || map->handle != NULL) {
        env->files.unmap(map->data, map->size, map->handle, env->files.user);
    }
    memset(map, 0, sizeof *map);
}

// A file being written: the data goes to a temporary name next to the final one, and the file is
// renamed only once it is complete and on disk. A crash leaves either the old file or the new one.
typedef struct qlora__out {
    void* file;
    char* path; // the final and the temporary path, in one block
    char* temporary;
    size_t block;
} qlora__out;

static QLORA__UNUSED void qlora__out_forget(qlora__env* env, qlora__out* out) {
    qlora__env_free(env, out->path, out->block);
    memset(out, 0, sizeof *out);
}

// Abandons the file: closes and removes the temporary one. Keeps the error text.
static QLORA__UNUSED void qlora__out_abort(qlora__env* env, qlora__out* out) {
    if (out->file != NULL) {
        env->files.close(out->file, env->files.user);
    }
    if (out->temporary != NULL) {
        env->files.remove(out->temporary, env->files.user);
    }
    qlora__out_forget(env, out);
}

static QLORA__UNUSED qlora_result qlora__out_fail(qlora__env* env, qlora__out* out,
                                                  const char* what, int code) {
    qlora_result r = qlora__env_fail(env, QLORA_ERR_FILE, "cannot %s %s: %s (%d)", what, out->path,
                                     qlora__errno_text(code), code);
    qlora__out_abort(env, out);
    return r;
}

static QLORA__UNUSED qlora_result qlora__out_begin(qlora__env* env, const char* path,
                                                   qlora__out* out) {
    memset(out, 0, sizeof *out);
    size_t length = strlen(path);
    out->block = 2 * length + 6;
    out->path = (char*)qlora__env_alloc(env, out->block);
    if (out->path == NULL) {
        return QLORA_ERR_MEMORY;
    }
    memcpy(out->path, path, length + 1);
    char* temporary = out->path + length + 1;
    memcpy(temporary, path, length);
    memcpy(temporary + length, ".tmp", 5);
    int code = env->files.open(temporary, QLORA_FILE_CREATE, &out->file, env->files.user);
    if (code == EEXIST) { // left by a crash, or a link: the name is removed, never what it names
        env->files.remove(temporary, env->files.user);
        code = env->files.open(temporary, QLORA_FILE_CREATE, &out->file, env->files.user);
    }
    if (code != 0) {
        out->file = NULL; // nothing to remove
        return qlora__out_fail(env, out, "create", code);
    }
    out->temporary = temporary;
    return QLORA_OK;
}

// On failure, the file has already been abandoned.
static QLORA__UNUSED qlora_result qlora__out_write(qlora__env* env, qlora__out* out,
                                                   const void* data, size_t bytes) {
    const char* p = (const char*)data;
    while (bytes > 0) {
        int64_t n = env->files.write(out->file, p, bytes, env->files.user);
        if (n <= 0 || (uint64_t)n > bytes) {
            return qlora__out_fail(env, out, "write", n < 0 ? (int)-n : EIO);
        }
        p += n;
        bytes -= (size_t)n;
    }
    return QLORA_OK;
}

// Completes the temporary file: everything that was written is on disk. It still has to be
// published.
static QLORA__UNUSED qlora_result qlora__out_finish(qlora__env* env, qlora__out* out) {
    const qlora_files* files = &env->files;
    int code = files->sync(out->file, files->user);
    if (code != 0) {
        return qlora__out_fail(env, out, "sync", code);
    }
    code = files->close(out->file, files->user);
    out->file = NULL;
    return code == 0 ? QLORA_OK : qlora__out_fail(env, out, "close", code);
}

// Gives a finished file its final name.
static QLORA__UNUSED qlora_result qlora__out_publish(qlora__env* env, qlora__out* out) {
    const qlora_files* files = &env->files;
    int code = files->rename(out->temporary, out->path, files->user);
    if (code != 0) {
        return qlora__out_fail(env, out, "replace", code);
    }
    out->temporary = NULL; // the file has its final name now
    char* slash = strrchr(out->path, '/');
    const char* folder = slash != NULL ? out->path : ".";
    if (slash != NULL) {
        slash[slash == out->path ? 1 : 0] = '\0';
    }
    code = files->sync_dir(folder, files->user);
    if (code != 0) {
        return qlora__out_fail(env, out, "sync the folder of", code);
    }
    qlora__out_forget(env, out);
    return QLORA_OK;
}

static QLORA__UNUSED qlora_result qlora__out_commit(qlora__env* env, qlora__out* out) {
    QLORA__TRY(qlora__out_finish(env, out));
    return qlora__out_publish(env, out);
}

// Writes a small file atomically.
static QLORA__UNUSED qlora_result qlora__file_write(qlora__env* env, const char* path,
                                                    const void* bytes, size_t size) {
    qlora__out out;
    QLORA__TRY(qlora__out_begin(env, path, &out));
    QLORA__TRY(qlora__out_write(env, &out, bytes, size));
    return qlora__out_commit(env, &out);
}

#define QLORA__PATH_ROOM 4096

// Joins a folder and a file name into `out` (QLORA__PATH_ROOM bytes).
static QLORA__UNUSED qlora_result qlora__path_join(qlora__env* env, const char* dir,
                                                   const char* name, char* out) {
    size_t a = strlen(dir);
    size_t b = strlen(name);
    if (a + b + 2 > QLORA__PATH_ROOM) {
        return qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                               "the path %.60s.../%.60s is longer than %d bytes", dir, name,
                               QLORA__PATH_ROOM);
    }
    memcpy(out, dir, a);
    if (a > 0 && dir[a - 1] != '/') {
        out[a] = '/';
        a++;
    }
    memcpy(out + a, name, b + 1);
    return QLORA_OK;
}

// Checks whether a file exists. Any failure to open it other than "no such file" is an error.
static QLORA__UNUSED qlora_result qlora__file_exists(qlora__env* env, const char* path, bool* out) {
    void* file = NULL;
    int code = env->files.open(path, QLORA_FILE_READ, &file, env->files.user);
    if (code != 0 && code != ENOENT) {
        return qlora__env_fail(env, QLORA_ERR_FILE, "cannot read %s: %s (%d)", path,
                               qlora__errno_text(code), code);
    }
    if (code == 0) {
        env->files.close(file, env->files.user);
    }
    *out = code == 0;
    return QLORA_OK;
}

static QLORA__UNUSED qlora_result qlora__dir_make(qlora__env* env, const char* dir) {
    int code = env->files.make_dir(dir, env->files.user);
    return code == 0 ? QLORA_OK
                     : qlora__env_fail(env, QLORA_ERR_FILE, "cannot create the folder %s: %s (%d)",
                                       dir, qlora__errno_text(code), code);
}

static QLORA__UNUSED qlora_result qlora__dir_sync(qlora__env* env, const char* dir) {
    int code = env->files.sync_dir(dir, env->files.user);
    return code == 0 ? QLORA_OK
                     : qlora__env_fail(env, QLORA_ERR_FILE, "cannot sync the folder %s: %s (%d)",
                                       dir, qlora__errno_text(code), code);
}

// Removes a file if it exists.
static QLORA__UNUSED void qlora__file_remove(qlora__env* env, const char* dir, const char* name) {
    char path[QLORA__PATH_ROOM];
    if (qlora__path_join(env, dir, name, path) == QLORA_OK) {
        env->files.remove(path, env->files.user);
    }
}

#endif // QLORA__PART_FILES

//@@ src/core/tools.h

#ifndef QLORA__PART_TOOLS
#define QLORA__PART_TOOLS

// ---- sorting ------------------------------------------------------------------------------------

// Heap sort of an index array: no recursion, no quadratic worst case, and the same order on every
// platform as long as `less` is a strict total order.
typedef bool (*qlora__less_fn)(const void* user, uint32_t a, uint32_t b);

static QLORA__UNUSED void qlora__sort_sift(uint32_t* index, size_t root, size_t count,
                                           qlora__less_fn less, const void* user) {
    for (;;) {
        size_t child = 2 * root + 1;
        if (child >= count) {
            return;
        }
        if (child + 1 < count && less(user, index[child], index[child + 1])) {
            child++;
        }
        if (!less(user, index[root], index[child])) {
            return;
        }
        uint32_t swap = index[root];
        index[root] = index[child];
        index[child] = swap;
        root = child;
    }
}

static QLORA__UNUSED void qlora__sort(uint32_t* index, size_t count, qlora__less_fn less,
                                      const void* user) {
    for (size_t i = count / 2; i > 0; i--) {
        qlora__sort_sift(index, i - 1, count, less, user);
    }
    for (size_t i = count; i > 1; i--) {
        uint32_t swap = index[0];
        index[0] = index[i - 1];
        index[i - 1] = swap;
        qlora__sort_sift(index, 0, i - 1, less, user);
    }
}

// ---- checksums ----------------------------------------------------------------------------------

// 64-bit checksum of a byte stream, eight bytes at a time; the result does not depend on how the
// stream is split into pieces. Each step is a bijection of the state for a given word and of the
// word for a given state, so damage inside one aligned word is always detected, and other damage
// with probability 1 - 2^-64. It gives no protection against deliberate changes.
typedef struct qlora__hash {
    uint64_t state;
    uint64_t bytes;
    uint64_t word; // bytes that do not fill a word yet, little-endian
} qlora__hash;

static QLORA__UNUSED void qlora__hash_begin(qlora__hash* h) {
    h->state = 0x9E3779B97F4A7C15u;
    h->bytes = 0;
    h->word = 0;
}

static QLORA__UNUSED uint64_t qlora__hash_mix(uint64_t state, uint64_t word) {
    state = (state ^ word) * 0xD6E8FEB86659FD93u;
    return state ^ (state >> 32);
}

static QLORA__UNUSED void qlora__hash_add(qlora__hash* h, const void* data, size_t size) {
    const uint8_t* p = (const uint8_t*)data;
    while (size > 0) {
        unsigned filled = (unsigned)(h->bytes & 7);
        if (filled == 0 && size >= 8) {
            uint64_t word = 0;
            for (unsigned i = 0; i < 8; i++) {
                word |= (uint64_t)p[i] << (8 * i);
            }
            h->state = qlora__hash_mix(h->state, word);
            h->bytes += 8;
            p += 8;
            size -= 8;
            continue;
        }
        h->word |= (uint64_t)p[0] << (8 * filled);
        h->bytes++;
        p++;
        size--;
        if (filled == 7) {
            h->state = qlora__hash_mix(h->state, h->word);
            h->word = 0;
        }
    }
}

static QLORA__UNUSED uint64_t qlora__hash_end(const qlora__hash* h) {
    return qlora__hash_mix(qlora__hash_mix(h->state, h->word), h->bytes);
}

// FNV-1a, for short keys.
static QLORA__UNUSED uint64_t qlora__fnv(const void* data, size_t bytes, uint64_t seed) {
    const uint8_t* p = (const uint8_t*)data;
    uint64_t h = seed ^ 0xcbf29ce484222325ull;
    for (size_t i = 0; i < bytes; i++) {
        h = (h ^ p[i]) * 0x100000001b3ull;
    }
    return h;
}

#endif // QLORA__PART_TOOLS

//@@ src/formats/decimal.h

#ifndef QLORA__PART_DECIMAL
#define QLORA__PART_DECIMAL

// Every reader of this floor processes untrusted bytes. It either returns a value that obeys all
// rules of its format, or fails with an error text that names the file and the fault; it never
// reads outside the bytes that were passed to it. Nothing here depends on devices.

// ---- numbers in text, independent of the C locale -----------------------------------------------

// A natural number of up to 5120 bits: enough to compare 801 digits times a power of ten with the
// neighbourhood of any double.
#define QLORA__BIG_WORDS 160
typedef struct qlora__big {
    uint32_t word[QLORA__BIG_WORDS];
    uint32_t count;
} qlora__big;

static QLORA__UNUSED void qlora__big_mul_add(qlora__big* b, uint32_t factor, uint32_t carry_in) {
    uint64_t carry = carry_in;
    for (uint32_t i = 0; i < b->count; i++) {
        carry += (uint64_t)b->word[i] * factor;
        b->word[i] = (uint32_t)carry;
        carry >>= 32;
    }
    if (carry != 0 && b->count < QLORA__BIG_WORDS) {
        b->word[b->count] = (uint32_t)carry;
        b->count++;
    }
}

static QLORA__UNUSED void qlora__big_shift(qlora__big* b, int bits) {
    for (; bits >= 31; bits -= 31) {
        qlora__big_mul_add(b, 1u << 31, 0);
    }
    qlora__big_mul_add(b, 1u << bits, 0);
}

static QLORA__UNUSED void qlora__big_mul_pow10(qlora__big* b, int power) {
    for (; power >= 9; power -= 9) {
        qlora__big_mul_add(b, 1000000000u, 0);
    }
    for (; power > 0; power--) {
        qlora__big_mul_add(b, 10u, 0);
    }
}

static QLORA__UNUSED int qlora__big_compare(const qlora__big* a, const qlora__big* b) {
    if (a->count != b->count) {
        return a->count < b->count ? -1 : 1;
    }
    for (uint32_t i = a->count; i > 0; i--) {
        if (a->word[i - 1] != b->word[i - 1]) {
            return a->word[i - 1] < b->word[i - 1] ? -1 : 1;
        }
    }
    return 0;
}

// A decimal number without a sign: digits x 10^exponent, with no leading zero. Digits after the
// 800th matter only in that they make the number a little larger: a single further digit 1
// represents them.
#define QLORA__DECIMAL_DIGITS 800
typedef struct qlora__decimal {
    uint8_t digit[QLORA__DECIMAL_DIGITS + 1];
    int count;
    int exponent;
} qlora__decimal;

// The sign of decimal - n x 2^power.
static QLORA__UNUSED int qlora__decimal_compare(const qlora__decimal* d, uint64_t n, int power) {
    qlora__big left;
    qlora__big right;
    left.count = 0;
    for (int i = 0; i < d->count; i++) {
        qlora__big_mul_add(&left, 10u, d->digit[i]);
    }
    right.word[0] = (uint32_t)n;
    right.word[1] = (uint32_t)(n >> 32);
    right.count = right.word[1] != 0 ? 2 : 1;
    qlora__big_mul_pow10(d->exponent > 0 ? &left : &right, abs(d->exponent));
    qlora__big_shift(power > 0 ? &right : &left, abs(power));
    return qlora__big_compare(&left, &right);
}

// The double nearest to d, with ties to even: an estimate that is good to a few units, followed by
// exact comparisons with the midpoints to its neighbours. Infinity if d is out of range.
static QLORA__UNUSED double qlora__decimal_to_double(const qlora__decimal* d) {
    static const double pow10[23] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,
                                     1e8,  1e9,  1e10, 1e11, 1e12, 1e13, 1e14, 1e15,
                                     1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
    uint64_t bits = 0;
    double x = 0.0;
    int magnitude = d->count + d->exponent;
    if (d->count == 0 || magnitude < -330) {
        return 0.0;
    }
    if (magnitude > 310) {
        bits = 0x7FF0000000000000u;
        memcpy(&x, &bits, sizeof x);
        return x;
    }
    uint64_t lead = 0;
    int used = 0;
    for (; used < d->count && used < 18; used++) {
        lead = lead * 10 + d->digit[used];
    }
    int scale = d->exponent + d->count - used;
    x = (double)lead;
    for (; scale > 0; scale -= scale < 22 ? scale : 22) {
        x *= pow10[scale < 22 ? scale : 22];
    }
    for (; scale < 0; scale += -scale < 22 ? -scale : 22) {
        x /= pow10[-scale < 22 ? -scale : 22];
    }
    memcpy(&bits, &x, sizeof bits);
    if (bits >= 0x7FF0000000000000u) {
        bits = 0x7FEFFFFFFFFFFFFFu;
    }
    while (bits < 0x7FF0000000000000u) {
        uint64_t mantissa = bits & 0xFFFFFFFFFFFFFu;
        int exponent = (int)(bits >> 52);
        int power = (exponent == 0 ? 1 : exponent) - 1075;
        mantissa |= exponent == 0 ? 0 : (uint64_t)1 << 52;
        int above = qlora__decimal_compare(d, 2 * mantissa + 1, power - 1);
        if (above > 0 || (above == 0 && (mantissa & 1) != 0)) {
            bits++;
            continue;
        }
        if (bits == 0) {
            break;
        }
        // Just below a power of two, the neighbour is only half a step away.
        bool edge = (bits & 0xFFFFFFFFFFFFFu) == 0 && exponent > 1;
        int below = edge ? qlora__decimal_compare(d, 4 * mantissa - 1, power - 2)
                         : qlora__decimal_compare(d, 2 * mantissa - 1, power - 1);
        if (below < 0 || (below == 0 && (mantissa & 1) != 0)) {
            bits--;
            continue;
        }
        break;
    }
    memcpy(&x, &bits, sizeof x);
    return x;
}

// Converts a number in JSON syntax (already checked) to the nearest double.
static QLORA__UNUSED double qlora__number_parse(const char* text, size_t size) {
    qlora__decimal d;
    size_t i = 0;
    bool negative = size > 0 && text[0] == '-';
    bool fraction = false;
    bool more = false;
    d.count = 0;
    d.exponent = 0;
    for (i = negative ? 1 : 0; i < size && text[i] != 'e' && text[i] != 'E'; i++) {
        if (text[i] == '.') {
            fraction = true;
            continue;
        }
        // An exponent of a million is as good as any larger one, and cannot overflow.
        if (d.count == QLORA__DECIMAL_DIGITS) {
            more = more || text[i] != '0';
            d.exponent += fraction || d.exponent > 1000000 ? 0 : 1;
            continue;
        }
        if (d.count > 0 || text[i] != '0') {
            d.digit[d.count] = (uint8_t)(text[i] - '0');
            d.count++;
        }
        d.exponent -= fraction && d.exponent > -1000000 ? 1 : 0;
    }
    if (more) {
        d.digit[d.count] = 1;
        d.count++;
        d.exponent--;
    }
    if (i < size) {
        bool minus = text[i + 1] == '-';
        int power = 0;
        for (i += minus || text[i + 1] == '+' ? 2 : 1; i < size; i++) {
            power = power > 1000000 ? power : power * 10 + (text[i] - '0');
        }
        d.exponent += minus ? -power : power;
    }
    double x = qlora__decimal_to_double(&d);
    return negative ? -x : x;
}

#endif // QLORA__PART_DECIMAL

//@@ src/formats/json_read.h

#ifndef QLORA__PART_JSON_READ
#define QLORA__PART_JSON_READ

// ---- reading JSON -------------------------------------------------------------------------------

// A parsed text is a flat array of tokens in the order of the text. The members of an object are
// pairs: a string token followed by the tokens of the value. `next` skips a value with everything
// inside it, so walking one level needs no stack. Token 0 is the root and cannot be a member, so 0
// also means "not found".
typedef enum qlora__json_kind {
    QLORA__JSON_NULL,
    QLORA__JSON_FALSE,
    QLORA__JSON_TRUE,
    QLORA__JSON_NUMBER,
    QLORA__JSON_STRING,
    QLORA__JSON_ARRAY,
    QLORA__JSON_OBJECT
} qlora__json_kind;

#define QLORA__JSON_MAX_DEPTH 256
#define QLORA__JSON_MAX_BYTES 0x7FFFFFFFu
#define QLORA__JSON_ROOT 0xFFFFFFFFu
#define QLORA__JSON_UNIQUE 1u // flag: duplicate keys in an object are an error

// 16 bytes, because a file of short numbers has a token for every two bytes.
typedef struct qlora__json_token {
    uint32_t begin;      // first byte; of a string, the byte after the opening quote
    uint32_t end;        // one past the last byte; of a string, the closing quote
    uint32_t next;       // token after this value and everything inside it
    uint32_t kind : 3;   // a qlora__json_kind
    uint32_t count : 29; // members, elements, or escapes in a string
} qlora__json_token;

#define QLORA__JSON_MAX_COUNT 0x1FFFFFFFu

typedef struct qlora__json {
    const char* text; // owned by the caller; must outlive the tokens
    const char* label;
    const char* strings; // what string tokens point into: the text, or `decoded`
    uint32_t size;
    uint32_t count;
    uint32_t capacity;
    uint32_t line; // lines of the file before the text, for messages
    qlora__json_token* tokens;
    char* decoded;
    size_t decoded_capacity;
} qlora__json;

typedef struct qlora__json_parser {
    qlora__env* env;
    qlora__json* json;
    uint32_t at;
    uint32_t parent; // the innermost open container, whose `next` holds its own parent
    uint32_t depth;
} qlora__json_parser;

static QLORA__UNUSED void qlora__json_free(qlora__env* env, qlora__json* json) {
    qlora__env_free(env, json->tokens, json->capacity * sizeof *json->tokens);
    qlora__env_free(env, json->decoded, json->decoded_capacity);
    memset(json, 0, sizeof *json);
}

static QLORA__UNUSED qlora_result qlora__json_bad(const qlora__json_parser* p, const char* what) {
    unsigned line = p->json->line + 1;
    unsigned column = 1;
    for (uint32_t i = 0; i < p->at && i < p->json->size; i++) {
        column++;
        if (p->json->text[i] == '\n') {
            line++;
            column = 1;
        }
    }
    return qlora__env_fail(p->env, QLORA_ERR_FORMAT, "%s:%u:%u: invalid JSON: %s", p->json->label,
                           line, column, what);
}

// The value of four hexadecimal digits, or 0x10000 if they are not valid.
static QLORA__UNUSED uint32_t qlora__hex4(const char* text, uint32_t left) {
    uint32_t value = 0;
    if (left < 4) {
        return 0x10000u;
    }
    for (int i = 0; i < 4; i++) {
        char c = text[i];
        uint32_t digit = c >= '0' && c <= '9'   ? (uint32_t)(c - '0')
                         : c >= 'a' && c <= 'f' ? (uint32_t)(c - 'a') + 10
                         : c >= 'A' && c <= 'F' ? (uint32_t)(c - 'A') + 10
                                                : 16u;
        if (digit == 16u) {
            return 0x10000u;
        }
        value = value * 16 + digit;
    }
    return value;
}

// Makes room for `capacity` tokens.
static QLORA__UNUSED qlora_result qlora__json_room(qlora__json_parser* p, uint32_t capacity) {
    qlora__json* json = p->json;
    qlora__json_token* tokens = (qlora__json_token*)qlora__env_realloc(
        p->env, json->tokens, json->count * sizeof *tokens, json->capacity * sizeof *tokens,
        capacity * sizeof *tokens);
    if (tokens == NULL) {
        return QLORA_ERR_MEMORY;
    }
    json->tokens = tokens;
    json->capacity = capacity;
    return QLORA_OK;
}

// How many tokens the value at the start of the text has: brackets, strings and runs of other
// characters. Stops where the value ends or the parser will stop.
static QLORA__UNUSED uint32_t qlora__json_estimate(const qlora__json* json) {
    uint32_t count = 0;
    uint32_t depth = 0;
    bool run = false; // inside a number or a word
    for (uint32_t i = 0; i < json->size; i++) {
        char c = json->text[i];
        if (c == ' ' || c == '\t' || c == '\n' || c == '\r') {
            run = false;
            continue;
        }
        bool opens = c == '[' || c == '{';
        bool ends = c == ']' || c == '}' || c == ',' || c == ':';
        count += opens || c == '"' || (!ends && !run) ? 1 : 0;
        run = !opens && !ends && c != '"';
        depth += opens ? 1 : 0;
        depth -= (c == ']' || c == '}') && depth > 0 ? 1 : 0;
        if (c == '"') {
            for (i++; i < json->size && json->text[i] != '"'; i++) {
                i += json->text[i] == '\\' ? 1 : 0;
            }
        }
        if (depth == 0 || depth > QLORA__JSON_MAX_DEPTH || count >= QLORA__JSON_MAX_COUNT) {
            break;
        }
    }
    return count > 0 ? count : 1;
}

static QLORA__UNUSED qlora_result qlora__json_push(qlora__json_parser* p, qlora__json_kind kind,
                                                   uint32_t begin, uint32_t end) {
    qlora__json* json = p->json;
    if (json->count == QLORA__JSON_MAX_COUNT) {
        return qlora__json_bad(p, "too many values");
    }
    if (json->count == json->capacity) {
        uint32_t half = json->capacity / 2;
        QLORA__TRY(qlora__json_room(p, json->capacity + (half < 64 ? 64 : half)));
    }
    qlora__json_token* t = &json->tokens[json->count];
    json->count++;
    t->kind = (uint32_t)kind & 7u;
    t->begin = begin;
    t->end = end;
    t->next = json->count;
    t->count = 0;
    return QLORA_OK;
}

// Parses an escape; p->at is on the backslash.
static QLORA__UNUSED qlora_result qlora__json_escape(qlora__json_parser* p) {
    const char* text = p->json->text;
    uint32_t left = p->json->size - p->at;
    if (left < 2 || text[p->at + 1] == '\0' || strchr("\"\\/bfnrtu", text[p->at + 1]) == NULL) {
        return qlora__json_bad(p, "invalid escape in a string");
    }
    if (text[p->at + 1] != 'u') {
        p->at += 2;
        return QLORA_OK;
    }
    uint32_t code = qlora__hex4(text + p->at + 2, left - 2);
    if (code > 0xFFFF) {
        return qlora__json_bad(p, "\\u needs four hexadecimal digits");
    }
    if ((code & 0xFC00) == 0xD800 && left >= 12 && text[p->at + 6] == '\\' &&
        text[p->at + 7] == 'u' && (qlora__hex4(text + p->at + 8, left - 8) & 0x1FC00) == 0xDC00) {
        p->at += 12;
        return QLORA_OK;
    }
    if ((code & 0xF800) == 0xD800) {
        return qlora__json_bad(p, "unpaired surrogate in a string");
    }
    p->at += 6;
    return QLORA_OK;
}

// Parses a string; p->at is on the opening quote.
static QLORA__UNUSED qlora_result qlora__json_string_parse(qlora__json_parser* p) {
    const char* text = p->json->text;
    uint32_t size = p->json->size;
    uint32_t begin = p->at + 1;
    uint32_t escapes = 0;
    p->at = begin;
    for (;;) {
        // most bytes of most files: printable ASCII
        uint32_t at = p->at;
        while (at < size && (uint8_t)(text[at] - 0x20) < 0x60 && text[at] != '"' &&
               text[at] != '\\') {
            at++;
        }
        p->at = at;
        if (at >= size || text[at] == '"') {
            break;
        }
        uint8_t c = (uint8_t)text[at];
        if (c == '\\') {
            QLORA__TRY(qlora__json_escape(p));
            escapes++;
        } else if (c < 0x20) {
            return qlora__json_bad(p, "control character in a string");
        } else {
            uint32_t step = qlora__utf8_size(text + at, size - at);
            if (step == 0) {
                return qlora__json_bad(p, "invalid UTF-8 in a string");
            }
            p->at += step;
        }
    }
    if (p->at >= size) {
        return qlora__json_bad(p, "string without a closing quote");
    }
    QLORA__TRY(qlora__json_push(p, QLORA__JSON_STRING, begin, p->at));
    p->json->tokens[p->json->count - 1].count = escapes & QLORA__JSON_MAX_COUNT;
    p->at++;
    return QLORA_OK;
}

static QLORA__UNUSED uint32_t qlora__json_digits(const qlora__json_parser* p, uint32_t at) {
    while (at < p->json->size && p->json->text[at] >= '0' && p->json->text[at] <= '9') {
        at++;
    }
    return at;
}

static QLORA__UNUSED qlora_result qlora__json_number_parse(qlora__json_parser* p) {
    const char* text = p->json->text;
    uint32_t size = p->json->size;
    uint32_t begin = p->at;
    uint32_t at = begin + (text[begin] == '-' ? 1 : 0);
    uint32_t end = qlora__json_digits(p, at);
    if (end == at) {
        return qlora__json_bad(p, "expected a value");
    }
    if (text[at] == '0' && end > at + 1) {
        return qlora__json_bad(p, "number with a leading zero");
    }
    if (end < size && text[end] == '.') {
        at = end + 1;
        end = qlora__json_digits(p, at);
        if (end == at) {
            return qlora__json_bad(p, "number without digits after the decimal point");
        }
    }
    if (end < size && (text[end] == 'e' || text[end] == 'E')) {
        at = end + 1;
        at += at < size && (text[at] == '+' || text[at] == '-') ? 1 : 0;
        end = qlora__json_digits(p, at);
        if (end == at) {
            return qlora__json_bad(p, "number without digits in the exponent");
        }
    }
    p->at = end;
    return qlora__json_push(p, QLORA__JSON_NUMBER, begin, end);
}

// Parses a value that is complete in itself, or the start of a container.
static QLORA__UNUSED qlora_result qlora__json_value(qlora__json_parser* p) {
    static const struct {
        const char* word;
        qlora__json_kind kind;
    } words[3] = {
        {"null", QLORA__JSON_NULL}, {"false", QLORA__JSON_FALSE}, {"true", QLORA__JSON_TRUE}};
    const char* text = p->json->text;
    char c = text[p->at];
    if (c == '"') {
        return qlora__json_string_parse(p);
    }
    if (c == '{' || c == '[') {
        if (p->depth == QLORA__JSON_MAX_DEPTH) {
            return qlora__json_bad(p, "nested too deeply; the limit is 256 levels");
        }
        QLORA__TRY(
            qlora__json_push(p, c == '{' ? QLORA__JSON_OBJECT : QLORA__JSON_ARRAY, p->at, p->at));
        p->json->tokens[p->json->count - 1].next = p->parent;
        p->parent = p->json->count - 1;
        p->depth++;
        p->at++;
        return QLORA_OK;
    }
    for (int i = 0; i < 3; i++) {
        uint32_t length = (uint32_t)strlen(words[i].word);
        if (c == words[i].word[0] && p->json->size - p->at >= length &&
            memcmp(text + p->at, words[i].word, length) == 0) {
            p->at += length;
            return qlora__json_push(p, words[i].kind, p->at - length, p->at);
        }
    }
    return qlora__json_number_parse(p);
}

static QLORA__UNUSED void qlora__json_space(qlora__json_parser* p) {
    const char* text = p->json->text;
    while (p->at < p->json->size && (text[p->at] == ' ' || text[p->at] == '\t' ||
                                     text[p->at] == '\n' || text[p->at] == '\r')) {
        p->at++;
    }
}

// Parses the key of a member and its colon; p->at is on the key.
static QLORA__UNUSED qlora_result qlora__json_key(qlora__json_parser* p) {
    if (p->at >= p->json->size || p->json->text[p->at] != '"') {
        return qlora__json_bad(p, "expected a key in quotes");
    }
    QLORA__TRY(qlora__json_string_parse(p));
    qlora__json_space(p);
    if (p->at >= p->json->size || p->json->text[p->at] != ':') {
        return qlora__json_bad(p, "expected ':' after a key");
    }
    p->at++;
    qlora__json_space(p);
    return QLORA_OK;
}

// After a value: closes containers and skips one comma. Sets *done once the root is complete.
static QLORA__UNUSED qlora_result qlora__json_after(qlora__json_parser* p, bool* done) {
    for (;;) {
        if (p->parent == QLORA__JSON_ROOT) {
            *done = true;
            return QLORA_OK;
        }
        qlora__json_token* open = &p->json->tokens[p->parent];
        bool object = open->kind == QLORA__JSON_OBJECT;
        qlora__json_space(p);
        char c = p->at < p->json->size ? p->json->text[p->at] : '\0';
        if (c != ',' && c != (object ? '}' : ']')) {
            return qlora__json_bad(p, object ? "expected ',' or '}'" : "expected ',' or ']'");
        }
        open->count = (open->count + (p->json->count > p->parent + 1 ? 1u : 0u)) &
                      QLORA__JSON_MAX_COUNT; // there are no more tokens than that
        p->at++;
        if (c == ',') {
            qlora__json_space(p);
            return QLORA_OK;
        }
        p->parent = open->next;
        p->depth--;
        open->end = p->at;
        open->next = p->json->count;
    }
}

// The next code point of a string token, from *at; escapes and UTF-8 were checked by the parser.
static QLORA__UNUSED uint32_t qlora__json_code(const char* text, uint32_t* at) {
    const char* p = text + *at;
    uint8_t c = (uint8_t)p[0];
    if (c != '\\') {
        uint32_t size = c < 0x80 ? 1 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
        uint32_t code = size == 1 ? c : c & (0x7Fu >> size);
        for (uint32_t i = 1; i < size; i++) {
            code = code << 6 | ((uint8_t)p[i] & 0x3Fu);
        }
        *at += size;
        return code;
    }
    if (p[1] != 'u') {
        static const char from[] = "\"\\/bfnrt";
        static const char to[] = "\"\\/\b\f\n\r\t";
        *at += 2;
        return (uint8_t)to[strchr(from, p[1]) - from];
    }
    uint32_t code = qlora__hex4(p + 2, 4);
    *at += 6;
    if ((code & 0xFC00) == 0xD800) {
        code = 0x10000u + ((code & 0x3FF) << 10 | (qlora__hex4(p + 8, 4) & 0x3FF));
        *at += 6;
    }
    return code;
}

static QLORA__UNUSED bool qlora__json_key_less(const void* user, uint32_t a, uint32_t b) {
    const qlora__json* json = (const qlora__json*)user;
    uint32_t i = json->tokens[a].begin;
    uint32_t j = json->tokens[b].begin;
    while (i < json->tokens[a].end && j < json->tokens[b].end) {
        uint32_t x = qlora__json_code(json->text, &i);
        uint32_t y = qlora__json_code(json->text, &j);
        if (x != y) {
            return x < y;
        }
    }
    return i == json->tokens[a].end && j < json->tokens[b].end;
}

// Rejects an object with duplicate keys: sorts the keys of each object and compares neighbours.
static QLORA__UNUSED qlora_result qlora__json_check_unique(qlora__json_parser* p) {
    qlora__json* json = p->json;
    uint32_t largest = 0;
    for (uint32_t i = 0; i < json->count; i++) {
        if (json->tokens[i].kind == QLORA__JSON_OBJECT && json->tokens[i].count > largest) {
            largest = json->tokens[i].count;
        }
    }
    if (largest < 2) {
        return QLORA_OK;
    }
    size_t bytes = largest * sizeof(uint32_t);
    uint32_t* keys = (uint32_t*)qlora__env_alloc(p->env, bytes);
    if (keys == NULL) {
        return QLORA_ERR_MEMORY;
    }
    qlora_result result = QLORA_OK;
    for (uint32_t i = 0; i < json->count && result == QLORA_OK; i++) {
        uint32_t n = json->tokens[i].kind == QLORA__JSON_OBJECT ? json->tokens[i].count : 0;
        uint32_t key = i + 1;
        for (uint32_t k = 0; k < n; k++) {
            keys[k] = key;
            key = json->tokens[key + 1].next;
        }
        qlora__sort(keys, n, qlora__json_key_less, json);
        for (uint32_t k = 1; k < n && result == QLORA_OK; k++) {
            if (!qlora__json_key_less(json, keys[k - 1], keys[k])) {
                const qlora__json_token* t = &json->tokens[keys[k]];
                int shown = t->end - t->begin < 80 ? (int)(t->end - t->begin) : 80;
                result = qlora__env_fail(p->env, QLORA_ERR_FORMAT, "%s: duplicate key \"%.*s\"",
                                         json->label, shown, json->text + t->begin);
            }
        }
    }
    qlora__env_free(p->env, keys, bytes);
    return result;
}

static QLORA__UNUSED qlora_result qlora__json_parse_tokens(qlora__json_parser* p) {
    qlora__json* json = p->json;
    bool done = false;
    uint32_t need = qlora__json_estimate(json);
    QLORA__TRY(need > json->capacity ? qlora__json_room(p, need) : QLORA_OK);
    qlora__json_space(p);
    while (!done) {
        // A value is expected here, and in an object its key comes first.
        bool object =
            p->parent != QLORA__JSON_ROOT && json->tokens[p->parent].kind == QLORA__JSON_OBJECT;
        if (object) {
            QLORA__TRY(qlora__json_key(p));
        }
        if (p->at >= json->size) {
            return qlora__json_bad(p, "expected a value");
        }
        uint32_t opened = p->parent;
        QLORA__TRY(qlora__json_value(p));
        if (p->parent != opened) {
            qlora__json_space(p);
            char close = json->tokens[p->parent].kind == QLORA__JSON_OBJECT ? '}' : ']';
            if (p->at >= json->size || json->text[p->at] != close) {
                continue;
            }
        }
        QLORA__TRY(qlora__json_after(p, &done));
    }
    return QLORA_OK;
}

static QLORA__UNUSED void qlora__json_begin(qlora__json_parser* p, qlora__env* env,
                                            qlora__json* json) {
    json->strings = json->text;
    json->count = 0;
    p->env = env;
    p->json = json;
    p->at = 0;
    p->parent = QLORA__JSON_ROOT;
    p->depth = 0;
}

// Parses `size` bytes of strict RFC 8259 JSON. `label` names the text in messages; it and the text
// must outlive the tokens. Call qlora__json_free afterwards; after a failure there is nothing to
// free.
static QLORA__UNUSED qlora_result qlora__json_parse(qlora__env* env, const char* label,
                                                    const void* text, uint64_t size, uint32_t flags,
                                                    qlora__json* out) {
    qlora__json json;
    qlora__json_parser p;
    memset(&json, 0, sizeof json);
    if (size > QLORA__JSON_MAX_BYTES) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: JSON texts are limited to 2 GiB", label);
    }
    json.text = (const char*)text;
    json.label = label;
    json.size = (uint32_t)size;
    qlora__json_begin(&p, env, &json);
    qlora_result result = qlora__json_parse_tokens(&p);
    if (result == QLORA_OK) {
        qlora__json_space(&p);
        if (p.at != json.size) {
            result = qlora__json_bad(&p, "unexpected text after the value");
        }
    }
    if (result == QLORA_OK && (flags & QLORA__JSON_UNIQUE) != 0) {
        result = qlora__json_check_unique(&p);
    }
    if (result != QLORA_OK) {
        qlora__json_free(env, &json);
        return result;
    }
    *out = json;
    return QLORA_OK;
}

// Parses the one value at the start of json->text, for files that hold many. The caller sets text,
// label, size and line; the memory of earlier tokens is used again, and must be freed in the end,
// also after a failure. *end is where the value ends. With `alone`, a line end must follow it.
static QLORA__UNUSED qlora_result qlora__json_parse_one(qlora__env* env, qlora__json* json,
                                                        bool alone, uint32_t* end) {
    qlora__json_parser p;
    qlora__json_begin(&p, env, json);
    QLORA__TRY(qlora__json_parse_tokens(&p));
    while (alone && p.at < json->size && json->text[p.at] != '\n') {
        if (json->text[p.at] != ' ' && json->text[p.at] != '\t' && json->text[p.at] != '\r') {
            return qlora__json_bad(&p, "unexpected text after the value");
        }
        p.at++;
    }
    *end = p.at;
    return QLORA_OK;
}

static QLORA__UNUSED qlora__json_kind qlora__json_kind_of(const qlora__json* json, uint32_t token) {
    return (qlora__json_kind)json->tokens[token].kind;
}

// Whether the decoded text of a string token equals the given bytes.
static QLORA__UNUSED bool qlora__json_equals(const qlora__json* json, uint32_t token,
                                             const char* text, size_t size) {
    const qlora__json_token* t = &json->tokens[token];
    if (t->kind != QLORA__JSON_STRING) {
        return false;
    }
    if (t->count == 0) {
        return t->end - t->begin == size && memcmp(json->strings + t->begin, text, size) == 0;
    }
    uint32_t at = t->begin;
    size_t i = 0;
    while (at < t->end) {
        uint32_t code = qlora__json_code(json->text, &at);
        uint8_t bytes[4];
        uint32_t n = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
        for (uint32_t k = n; k > 1; k--) {
            bytes[k - 1] = (uint8_t)(0x80 | (code & 0x3F));
            code >>= 6;
        }
        bytes[0] = (uint8_t)(n == 1 ? code : (0xF00u >> n & 0xF0u) | code);
        if (size - i < n || memcmp(text + i, bytes, n) != 0) {
            return false;
        }
        i += n;
    }
    return i == size;
}

// The value of a member, or 0 if `object` is not an object or has no such key. Of equal keys, the
// last one counts, as in Python.
static QLORA__UNUSED uint32_t qlora__json_find(const qlora__json* json, uint32_t object,
                                               const char* key) {
    uint32_t found = 0;
    size_t size = strlen(key);
    if (json->tokens[object].kind != QLORA__JSON_OBJECT) {
        return 0;
    }
    for (uint32_t k = object + 1; k < json->tokens[object].next; k = json->tokens[k + 1].next) {
        if (qlora__json_equals(json, k, key, size)) {
            found = k + 1;
        }
    }
    return found;
}

// qlora__json_find through nested objects; the keys are separated by '/'.
static QLORA__UNUSED uint32_t qlora__json_find_path(const qlora__json* json, uint32_t object,
                                                    const char* path) {
    char key[64];
    for (;;) {
        const char* slash = strchr(path, '/');
        size_t n = slash != NULL ? (size_t)(slash - path) : strlen(path);
        if (n >= sizeof key) {
            return 0;
        }
        memcpy(key, path, n);
        key[n] = '\0';
        object = qlora__json_find(json, object, key);
        if (object == 0 || slash == NULL) {
            return object;
        }
        path = slash + 1;
    }
}

// The element of an array, or 0 if it does not exist.
static QLORA__UNUSED uint32_t qlora__json_at(const qlora__json* json, uint32_t array,
                                             uint32_t index) {
    if (json->tokens[array].kind != QLORA__JSON_ARRAY || index >= json->tokens[array].count) {
        return 0;
    }
    uint32_t element = array + 1;
    for (; index > 0; index--) {
        element = json->tokens[element].next;
    }
    return element;
}

static QLORA__UNUSED bool qlora__json_is(const qlora__json* json, uint32_t token,
                                         const char* text) {
    return qlora__json_equals(json, token, text, strlen(text));
}

// The decoded bytes of a string token: as many as fit, always terminated if size > 0. Returns the
// full length; the string is complete if that is less than `size`. A string may contain NUL bytes.
static QLORA__UNUSED size_t qlora__json_string(const qlora__json* json, uint32_t token, char* out,
                                               size_t size) {
    const qlora__json_token* t = &json->tokens[token];
    uint32_t at = t->begin;
    size_t length = 0;
    if (t->kind != QLORA__JSON_STRING) {
        at = t->end;
    } else if (t->count == 0) {
        length = t->end - t->begin;
        if (size > 0) {
            memcpy(out, json->strings + at, length < size ? length : size - 1);
        }
        at = t->end;
    }
    while (at < t->end) {
        uint32_t code = qlora__json_code(json->text, &at);
        uint32_t n = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
        for (uint32_t k = n; k > 0; k--) {
            uint32_t low =
                k == 1 ? (n == 1 ? code : (0xF00u >> n & 0xF0u) | code) : 0x80u | (code & 0x3F);
            if (length + k < size) {
                out[length + k - 1] = (char)(uint8_t)low;
            }
            code >>= 6;
        }
        length += n;
    }
    if (size > 0) {
        out[length < size ? length : size - 1] = '\0';
    }
    return length;
}

// Decodes every string once, into memory of `json`, each with a zero byte after it. From then on
// string tokens point into json->strings and contain no escapes.
static QLORA__UNUSED qlora_result qlora__json_decode(qlora__env* env, qlora__json* json) {
    size_t need = 0;
    for (uint32_t i = 0; i < json->count; i++) {
        const qlora__json_token* t = &json->tokens[i];
        need += t->kind == QLORA__JSON_STRING ? (size_t)(t->end - t->begin) + 1 : 0;
    }
    if (need > json->decoded_capacity) {
        char* decoded =
            (char*)qlora__env_realloc(env, json->decoded, 0, json->decoded_capacity, need);
        if (decoded == NULL) {
            return QLORA_ERR_MEMORY;
        }
        json->decoded = decoded;
        json->decoded_capacity = need;
    }
    uint32_t at = 0; // below the size of the text: every string had two quotes
    for (uint32_t i = 0; i < json->count; i++) {
        qlora__json_token* t = &json->tokens[i];
        if (t->kind == QLORA__JSON_STRING) {
            size_t size = qlora__json_string(json, i, json->decoded + at, need - at);
            t->begin = at;
            t->end = at + (uint32_t)size;
            t->count = 0;
            at = t->end + 1;
        }
    }
    json->strings = json->decoded;
    return QLORA_OK;
}

// A finite number, converted to the nearest double.
static QLORA__UNUSED bool qlora__json_double(const qlora__json* json, uint32_t token, double* out) {
    const qlora__json_token* t = &json->tokens[token];
    if (t->kind != QLORA__JSON_NUMBER) {
        return false;
    }
    double x = qlora__number_parse(json->text + t->begin, t->end - t->begin);
    uint64_t bits = 0;
    memcpy(&bits, &x, sizeof bits);
    if ((bits >> 52 & 0x7FF) == 0x7FF) {
        return false;
    }
    *out = x;
    return true;
}

// An integer that an int64_t can represent exactly. 4096, 4.096e3 and 4096.0 are all 4096; beyond
// 2^53 only plain digits are accepted.
static QLORA__UNUSED bool qlora__json_int(const qlora__json* json, uint32_t token, int64_t* out) {
    const qlora__json_token* t = &json->tokens[token];
    if (t->kind != QLORA__JSON_NUMBER) {
        return false;
    }
    bool negative = json->text[t->begin] == '-';
    uint64_t value = 0;
    uint64_t limit = (uint64_t)INT64_MAX + (negative ? 1 : 0);
    uint32_t i = t->begin + (negative ? 1 : 0);
    for (; i < t->end && json->text[i] >= '0' && json->text[i] <= '9'; i++) {
        uint64_t digit = (uint64_t)(json->text[i] - '0');
        if (value > (limit - digit) / 10) {
            return false;
        }
        value = value * 10 + digit;
    }
    if (i < t->end) {
        double x = 0.0;
        if (!qlora__json_double(json, token, &x) || x < -9007199254740992.0 ||
            x > 9007199254740992.0 || (double)(int64_t)x != x) {
            return false;
        }
        *out = (int64_t)x;
        return true;
    }
    *out = negative ? (int64_t)(0 - value) : (int64_t)value;
    return true;
}

// An integer written in plain digits, as in file offsets and shapes.
static QLORA__UNUSED bool qlora__json_offset(const qlora__json* json, uint32_t token,
                                             int64_t* out) {
    const qlora__json_token* t = &json->tokens[token];
    for (uint32_t i = t->begin; i < t->end; i++) {
        if (json->text[i] < '0' || json->text[i] > '9') {
            return false;
        }
    }
    return qlora__json_int(json, token, out);
}

#endif // QLORA__PART_JSON_READ

//@@ src/formats/json_write.h

#ifndef QLORA__PART_JSON_WRITE
#define QLORA__PART_JSON_WRITE

// ---- writing JSON -------------------------------------------------------------------------------

// Writes JSON into a string. Keys are written in the order of the calls; `key` is NULL inside
// arrays and for the root. With indent 0, no spaces are written; otherwise each value has its own
// line, as in Python's json.dumps.
typedef struct qlora__json_writer {
    qlora__string* text;
    int indent;
    int depth;
    bool empty; // nothing has been written into the innermost container
} qlora__json_writer;

static QLORA__UNUSED void qlora__json_write_begin(qlora__json_writer* w, qlora__string* text,
                                                  int indent) {
    w->text = text;
    w->indent = indent;
    w->depth = 0;
    w->empty = true;
}

static QLORA__UNUSED void qlora__json_write_line(qlora__json_writer* w) {
    if (w->indent > 0) {
        qlora__string_add(w->text, "\n", 1);
        for (int i = 0; i < w->depth * w->indent; i++) {
            qlora__string_add(w->text, " ", 1);
        }
    }
}

static QLORA__UNUSED void qlora__json_write_quoted(qlora__string* t, const char* string,
                                                   size_t size) {
    static const char hex[] = "0123456789abcdef";
    qlora__string_add(t, "\"", 1);
    for (size_t i = 0; i < size; i++) {
        uint8_t c = (uint8_t)string[i];
        if (c == '"' || c == '\\') {
            qlora__string_add(t, "\\", 1);
            qlora__string_add(t, string + i, 1);
        } else if (c < 0x20) {
            char escape[6] = {'\\', 'u', '0', '0', hex[c >> 4], hex[c & 15]};
            qlora__string_add(t, escape, 6);
        } else {
            // A path may contain any bytes, but the file must be UTF-8.
            uint32_t left = size - i < 4 ? (uint32_t)(size - i) : 4;
            uint32_t step = qlora__utf8_size(string + i, left);
            qlora__string_add(t, step > 0 ? string + i : "\\ufffd", step > 0 ? step : 6);
            i += step > 0 ? step - 1 : 0;
        }
    }
    qlora__string_add(t, "\"", 1);
}

// Writes the prefix of a value: comma, line break and key.
static QLORA__UNUSED void qlora__json_write_key(qlora__json_writer* w, const char* key) {
    if (!w->empty) {
        qlora__string_add(w->text, ",", 1);
    }
    if (w->depth > 0) {
        qlora__json_write_line(w);
    }
    if (key != NULL) {
        qlora__json_write_quoted(w->text, key, strlen(key));
        qlora__string_puts(w->text, w->indent > 0 ? ": " : ":");
    }
    w->empty = false;
}

static QLORA__UNUSED void qlora__json_write_open(qlora__json_writer* w, const char* key,
                                                 char bracket) {
    qlora__json_write_key(w, key);
    qlora__string_add(w->text, &bracket, 1);
    w->depth++;
    w->empty = true;
}

static QLORA__UNUSED void qlora__json_write_close(qlora__json_writer* w, char bracket) {
    w->depth--;
    if (!w->empty) {
        qlora__json_write_line(w);
    }
    qlora__string_add(w->text, &bracket, 1);
    w->empty = false;
}

// Writes a word unchanged: null, true, false, or a number that is already text.
static QLORA__UNUSED void qlora__json_write_word(qlora__json_writer* w, const char* key,
                                                 const char* word) {
    qlora__json_write_key(w, key);
    qlora__string_puts(w->text, word);
}

static QLORA__UNUSED void qlora__json_write_string(qlora__json_writer* w, const char* key,
                                                   const char* string) {
    qlora__json_write_key(w, key);
    qlora__json_write_quoted(w->text, string, strlen(string));
}

static QLORA__UNUSED void qlora__json_write_int(qlora__json_writer* w, const char* key,
                                                int64_t value) {
    char digits[24];
    snprintf(digits, sizeof digits, "%lld", (long long)value);
    qlora__json_write_word(w, key, digits);
}

// Writes the shortest digits that read back as the same double, with a decimal point or an exponent
// so that Python reads a float. The decimal point of the locale is replaced by a point.
static QLORA__UNUSED void qlora__json_write_double(qlora__json_writer* w, const char* key,
                                                   double value) {
    char digits[40];
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof bits);
    if ((bits >> 52 & 0x7FF) == 0x7FF) {
        w->text->result = qlora__env_fail(w->text->env, QLORA_ERR_ARGUMENT,
                                          "%s is not a finite number", key != NULL ? key : "value");
        return;
    }
    for (int precision = 1; precision <= 17; precision++) {
        char printed[40];
        size_t n = 0;
        bool plain = true;
        snprintf(printed, sizeof printed, "%.*g", precision, value);
        for (const char* c = printed; *c != '\0'; c++) {
            bool usual = (*c >= '0' && *c <= '9') || *c == '-' || *c == '+' || *c == 'e';
            if (usual) {
                digits[n++] = *c;
            } else if (n > 0 && digits[n - 1] != '.') {
                digits[n++] = '.';
            }
            plain = plain && ((*c >= '0' && *c <= '9') || *c == '-');
        }
        if (plain) {
            digits[n++] = '.';
            digits[n++] = '0';
        }
        digits[n] = '\0';
        double back = qlora__number_parse(digits, n);
        if (memcmp(&back, &value, sizeof back) == 0) {
            break;
        }
    }
    qlora__json_write_word(w, key, digits);
}

#endif // QLORA__PART_JSON_WRITE

//@@ src/formats/regex.h

#ifndef QLORA__PART_REGEX
#define QLORA__PART_REGEX

// ---- regular expressions in PEFT configs --------------------------------------------------------

// Matches a short pattern against the complete name of a module. Supported are literals, ., the
// escapes \d \w \s \b, [sets], groups, |, * + ? and their lazy forms, {0,} {0,1} {1} {1,}, ^ and $.
// The pattern is compiled to a small program for a machine that follows all alternatives at once:
// linear time, no recursion.
#define QLORA__RE_MAX 1024
#define QLORA__RE_SETS 32
#define QLORA__RE_GROUPS 32

typedef enum qlora__re_op {
    QLORA__RE_CHAR, // arg: the byte
    QLORA__RE_ANY,
    QLORA__RE_SET,   // arg: index of the set
    QLORA__RE_SPLIT, // continue with the next step and with this + arg
    QLORA__RE_JUMP,  // continue with this + arg
    QLORA__RE_BEGIN,
    QLORA__RE_END,
    QLORA__RE_WORD, // \b
    QLORA__RE_MATCH
} qlora__re_op;

typedef struct qlora__re_step {
    qlora__re_op op;
    int32_t arg;
} qlora__re_step;

typedef struct qlora__re {
    qlora__re_step step[QLORA__RE_MAX];
    uint8_t set[QLORA__RE_SETS][32];
    int32_t count;
    int32_t sets;
    const char* wrong; // the unsupported part of the pattern; NULL if there is none
} qlora__re;

typedef struct qlora__re_group {
    int32_t begin;  // first step of the group
    int32_t branch; // first step of the current alternative
    int32_t jumps;  // last jump to the end of the group; each links to the previous one, -1 ends
} qlora__re_group;

static QLORA__UNUSED void qlora__re_insert(qlora__re* re, int32_t at, qlora__re_op op,
                                           int32_t arg) {
    if (re->count >= QLORA__RE_MAX - 1) {
        re->wrong = "too many steps";
        return;
    }
    // Every jump inside the moved piece is relative and stays inside it.
    memmove(&re->step[at + 1], &re->step[at], (size_t)(re->count - at) * sizeof re->step[0]);
    re->step[at].op = op;
    re->step[at].arg = arg;
    re->count++;
}

static QLORA__UNUSED void qlora__re_append(qlora__re* re, qlora__re_op op, int32_t arg) {
    qlora__re_insert(re, re->count, op, arg);
}

static QLORA__UNUSED bool qlora__re_is_word(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

// Adds \d, \w, \s or their opposites to a set; returns false for any other letter.
static QLORA__UNUSED bool qlora__re_class(uint8_t* set, char letter) {
    char lower = letter >= 'A' && letter <= 'Z' ? (char)(letter + 32) : letter;
    if (lower != 'd' && lower != 'w' && lower != 's') {
        return false;
    }
    for (int c = 0; c < 128; c++) {
        bool in = lower == 'd'   ? c >= '0' && c <= '9'
                  : lower == 'w' ? qlora__re_is_word((char)c)
                                 : c == ' ' || (c >= 9 && c <= 13);
        if (in == (letter == lower)) {
            set[c / 8] = (uint8_t)(set[c / 8] | 1u << c % 8);
        }
    }
    return true;
}

static QLORA__UNUSED uint8_t* qlora__re_new_set(qlora__re* re) {
    if (re->sets == QLORA__RE_SETS) {
        re->wrong = "too many sets";
        return re->set[0];
    }
    memset(re->set[re->sets], 0, sizeof re->set[0]);
    qlora__re_append(re, QLORA__RE_SET, re->sets);
    re->sets++;
    return re->set[re->sets - 1];
}

// Compiles an escape; `p` is on the letter after the backslash.
static const char* qlora__re_escape(qlora__re* re, const char* p) {
    if (*p == 'b') {
        qlora__re_append(re, QLORA__RE_WORD, 0);
    } else if (*p == 'A') {
        qlora__re_append(re, QLORA__RE_BEGIN, 0);
    } else if (*p == 'Z') {
        qlora__re_append(re, QLORA__RE_END, 0);
    } else if (*p == '\0' || (qlora__re_is_word(*p) && strchr("dwsDWS", *p) == NULL && *p != '_')) {
        re->wrong = "an escape other than \\d \\w \\s \\b";
        return p;
    } else if (strchr("dwsDWS", *p) != NULL) {
        qlora__re_class(qlora__re_new_set(re), *p);
    } else {
        qlora__re_append(re, QLORA__RE_CHAR, (uint8_t)*p);
    }
    return p + 1;
}

// Compiles a set; `p` is after the opening bracket. Returns the place after the closing one.
static const char* qlora__re_set(qlora__re* re, const char* p) {
    uint8_t* set = qlora__re_new_set(re);
    bool negate = *p == '^';
    p += negate ? 1 : 0;
    for (bool first = true; first || *p != ']'; first = false) {
        uint8_t low = (uint8_t)*p;
        if (low == '\\') {
            p++;
            low = (uint8_t)*p;
            if (low != 0 && qlora__re_class(set, *p)) {
                p++;
                continue;
            }
        }
        if (low == 0) {
            re->wrong = "a set without a closing ']'";
            return p;
        }
        uint8_t high = low;
        if (p[1] == '-' && p[2] != ']' && p[2] != '\\' && p[2] != '\0') {
            high = (uint8_t)p[2];
            p += 2;
        }
        for (unsigned c = low; c <= high; c++) {
            set[c / 8] = (uint8_t)(set[c / 8] | 1u << c % 8);
        }
        p++;
    }
    for (int i = 0; negate && i < 32; i++) {
        set[i] = (uint8_t)~set[i];
    }
    return p + 1;
}

// Compiles a quantifier for the steps from `atom` on, if there is one at p.
static const char* qlora__re_repeat(qlora__re* re, const char* p, int32_t atom) {
    static const struct {
        const char* text;
        char meaning;
    } forms[9] = {{"*", '*'},     {"+", '+'},    {"?", '?'},     {"{0,}", '*'}, {"{1,}", '+'},
                  {"{0,1}", '?'}, {"{,1}", '?'}, {"{1,1}", '1'}, {"{1}", '1'}};
    for (int i = 0; i < 9; i++) {
        size_t n = strlen(forms[i].text);
        if (strncmp(p, forms[i].text, n) != 0) {
            continue;
        }
        int32_t size = re->count - atom;
        if (forms[i].meaning == '+') {
            qlora__re_append(re, QLORA__RE_SPLIT, -size);
        } else if (forms[i].meaning == '?') {
            qlora__re_insert(re, atom, QLORA__RE_SPLIT, size + 1);
        } else if (forms[i].meaning == '*') {
            qlora__re_insert(re, atom, QLORA__RE_SPLIT, size + 2);
            qlora__re_append(re, QLORA__RE_JUMP, -size - 1);
        }
        p += n;
        if (*p == '*' || *p == '+' || *p == '{') {
            re->wrong = "a quantifier after a quantifier";
        }
        return p + (*p == '?' ? 1 : 0); // a full match does not depend on laziness
    }
    if (*p == '{') {
        re->wrong = "a counted repetition";
    }
    return p;
}

static QLORA__UNUSED void qlora__re_close(qlora__re* re, const qlora__re_group* g) {
    for (int32_t jump = g->jumps; jump >= 0;) {
        int32_t before = re->step[jump].arg;
        re->step[jump].arg = re->count - jump;
        jump = before;
    }
}

// Compiles the start of a group; `p` is after the parenthesis.
static const char* qlora__re_open(qlora__re* re, const char* p, qlora__re_group* g) {
    if (*p == '?' && p[1] != ':') {
        re->wrong = "a (?...) group other than (?:...)";
        return p;
    }
    g->begin = re->count;
    g->branch = re->count;
    g->jumps = -1;
    return p + (*p == '?' ? 2 : 0);
}

// Ends an alternative: the steps so far become one of two branches.
static QLORA__UNUSED void qlora__re_alternative(qlora__re* re, qlora__re_group* g) {
    qlora__re_insert(re, g->branch, QLORA__RE_SPLIT, re->count - g->branch + 2);
    qlora__re_append(re, QLORA__RE_JUMP, g->jumps);
    g->jumps = re->count - 1;
    g->branch = re->count;
}

// Compiles a literal character, a set, an escape or an anchor; `p` is on it.
static const char* qlora__re_single(qlora__re* re, const char* p) {
    if (*p == '\\') {
        return qlora__re_escape(re, p + 1);
    }
    if (*p == '[') {
        return qlora__re_set(re, p + 1);
    }
    if (strchr("*+?{", *p) != NULL) {
        re->wrong = "a quantifier with nothing before it";
        return p;
    }
    qlora__re_op op = *p == '.'   ? QLORA__RE_ANY
                      : *p == '^' ? QLORA__RE_BEGIN
                      : *p == '$' ? QLORA__RE_END
                                  : QLORA__RE_CHAR;
    qlora__re_append(re, op, (uint8_t)*p);
    return p + 1;
}

// Compiles a pattern; on failure, re->wrong describes the unsupported part.
static QLORA__UNUSED void qlora__re_compile(qlora__re* re, const char* p) {
    qlora__re_group stack[QLORA__RE_GROUPS];
    int depth = 0;
    memset(re, 0, sizeof *re);
    qlora__re_open(re, "", &stack[0]);
    while (*p != '\0' && re->wrong == NULL) {
        int32_t atom = re->count;
        if (*p == '(' && depth + 1 < QLORA__RE_GROUPS) {
            depth++;
            p = qlora__re_open(re, p + 1, &stack[depth]);
            continue;
        }
        if (*p == '|') {
            qlora__re_alternative(re, &stack[depth]);
            p++;
            continue;
        }
        if (*p == '(' || (*p == ')' && depth == 0)) {
            re->wrong = *p == '(' ? "too many groups" : "an unmatched ')'";
        } else if (*p == ')') {
            qlora__re_close(re, &stack[depth]);
            atom = stack[depth].begin;
            depth--;
            p++;
        } else {
            p = qlora__re_single(re, p);
        }
        if (re->wrong == NULL) {
            p = qlora__re_repeat(re, p, atom);
        }
    }
    if (re->wrong == NULL && depth > 0) {
        re->wrong = "an unmatched '('";
    }
    if (re->wrong == NULL) {
        qlora__re_close(re, &stack[0]);
        re->step[re->count].op = QLORA__RE_MATCH;
        re->count++;
    }
}

typedef struct qlora__re_list {
    int32_t step[QLORA__RE_MAX];
    int32_t count;
    uint8_t seen[QLORA__RE_MAX];
} qlora__re_list;

// Adds a step and all steps that are reachable from it without consuming a character at text[at].
static QLORA__UNUSED void qlora__re_reach(const qlora__re* re, qlora__re_list* list, int32_t from,
                                          const char* text, size_t at) {
    int32_t stack[QLORA__RE_MAX];
    int32_t depth = 0;
    if (list->seen[from]) {
        return;
    }
    stack[depth++] = from;
    list->seen[from] = 1;
    while (depth > 0) {
        int32_t i = stack[--depth];
        qlora__re_step s = re->step[i];
        bool before = at > 0 && qlora__re_is_word(text[at - 1]);
        bool after = text[at] != '\0' && qlora__re_is_word(text[at]);
        bool go = s.op == QLORA__RE_SPLIT || (s.op == QLORA__RE_BEGIN && at == 0) ||
                  (s.op == QLORA__RE_END && text[at] == '\0') ||
                  (s.op == QLORA__RE_WORD && before != after);
        int32_t jump = s.op == QLORA__RE_SPLIT || s.op == QLORA__RE_JUMP ? i + s.arg : -1;
        if (go && !list->seen[i + 1]) {
            list->seen[i + 1] = 1;
            stack[depth++] = i + 1;
        }
        if (jump >= 0 && !list->seen[jump]) {
            list->seen[jump] = 1;
            stack[depth++] = jump;
        }
        if (s.op <= QLORA__RE_SET || s.op == QLORA__RE_MATCH) {
            list->step[list->count++] = i;
        }
    }
}

// Whether the pattern matches the whole text.
static QLORA__UNUSED bool qlora__re_match(const qlora__re* re, const char* text) {
    qlora__re_list lists[2];
    int now = 0;
    lists[0].count = 0;
    memset(lists[0].seen, 0, sizeof lists[0].seen);
    qlora__re_reach(re, &lists[0], 0, text, 0);
    for (size_t at = 0; text[at] != '\0'; at++) {
        qlora__re_list* next = &lists[1 - now];
        uint8_t c = (uint8_t)text[at];
        next->count = 0;
        memset(next->seen, 0, sizeof next->seen);
        for (int32_t k = 0; k < lists[now].count; k++) {
            int32_t i = lists[now].step[k];
            qlora__re_step s = re->step[i];
            if (s.op == QLORA__RE_ANY || (s.op == QLORA__RE_CHAR && s.arg == c) ||
                (s.op == QLORA__RE_SET && (re->set[s.arg][c / 8] >> c % 8 & 1) != 0)) {
                qlora__re_reach(re, next, i + 1, text, at + 1);
            }
        }
        now = 1 - now;
    }
    for (int32_t k = 0; k < lists[now].count; k++) {
        if (re->step[lists[now].step[k]].op == QLORA__RE_MATCH) {
            return true;
        }
    }
    return false;
}

#endif // QLORA__PART_REGEX

//@@ src/formats/stop_ids.h

#ifndef QLORA__PART_STOP_IDS
#define QLORA__PART_STOP_IDS

// ---- the ids that end a text --------------------------------------------------------------------

// As transformers (5.22) reads them: where there is a generation_config.json, it alone decides,
// even if it names none; else config.json does (in "text_config", where a model that also sees or
// hears keeps its language part). The key "eos_token_id" holds one id or a list; null and an empty
// list name none.
#define QLORA__MAX_STOP_IDS 16

typedef struct qlora__stop_ids {
    int32_t id[QLORA__MAX_STOP_IDS];
    int32_t count;
} qlora__stop_ids;

// Reads one object, which replaces *out. Ids must be below `vocab`.
static QLORA__UNUSED qlora_result qlora__stop_ids_read(qlora__env* env, const qlora__json* json,
                                                       uint32_t object, int64_t vocab,
                                                       qlora__stop_ids* out) {
    uint32_t value = qlora__json_find(json, object, "eos_token_id");
    if (value == 0 || qlora__json_kind_of(json, value) == QLORA__JSON_NULL) {
        out->count = 0;
        return QLORA_OK;
    }
    bool list = qlora__json_kind_of(json, value) == QLORA__JSON_ARRAY;
    uint32_t count = list ? json->tokens[value].count : 1;
    if (count > QLORA__MAX_STOP_IDS) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "%s: eos_token_id lists %u ids; %d at most", json->label, count,
                               QLORA__MAX_STOP_IDS);
    }
    qlora__stop_ids ids;
    memset(&ids, 0, sizeof ids);
    for (uint32_t i = 0; i < count; i++) {
        int64_t id = 0;
        if (!qlora__json_int(json, list ? value + 1 + i : value, &id) || id < 0 || id >= vocab) {
            const qlora__json_token* t = &json->tokens[value];
            bool string = t->kind == QLORA__JSON_STRING;
            return qlora__env_fail(
                env, QLORA_ERR_FORMAT,
                "%s: eos_token_id is %.*s; ids must be from 0 to vocab_size - 1 (%lld)",
                json->label, t->end - t->begin < 44 ? (int)(t->end - t->begin) : 44,
                (string ? json->strings : json->text) + t->begin, (long long)vocab - 1);
        }
        ids.id[i] = (int32_t)id;
    }
    ids.count = (int32_t)count;
    *out = ids;
    return QLORA_OK;
}

#endif // QLORA__PART_STOP_IDS

//@@ src/formats/gguf_read.h

#ifndef QLORA__PART_GGUF_READ
#define QLORA__PART_GGUF_READ

// ---- reading GGUF: header and metadata ----------------------------------------------------------

// The types of values, by their number in the file. X(name, bytes); 0 = its size varies.
#define QLORA__GGUF_VALUES(X)                                                                      \
    X(U8, 1)                                                                                       \
    X(I8, 1)                                                                                       \
    X(U16, 2)                                                                                      \
    X(I16, 2)                                                                                      \
    X(U32, 4)                                                                                      \
    X(I32, 4)                                                                                      \
    X(F32, 4)                                                                                      \
    X(BOOL, 1)                                                                                     \
    X(STRING, 0)                                                                                   \
    X(ARRAY, 0)                                                                                    \
    X(U64, 8)                                                                                      \
    X(I64, 8)                                                                                      \
    X(F64, 8)

#define QLORA__GGUF_ENUM(name, bytes) QLORA__GGUF_##name,
typedef enum qlora__gguf_kind {
    QLORA__GGUF_VALUES(QLORA__GGUF_ENUM) QLORA__GGUF_KIND_COUNT
} qlora__gguf_kind;
#undef QLORA__GGUF_ENUM

// Longer keys are not valid; a key of this length does not occur.
#define QLORA__GGUF_MAX_KEY 65535u
#define QLORA__GGUF_MAX_ALIGN ((uint64_t)1 << 30)

// A value of the metadata. `data` and `key` point into the file and are not terminated.
typedef struct qlora__gguf_value {
    const char* key;
    const uint8_t* data; // the number, the characters, or the first element
    uint64_t bytes;      // of data
    uint64_t count;      // elements of an array, else 1
    uint32_t key_size;
    qlora__gguf_kind kind;
    qlora__gguf_kind element; // of an array; else the same as `kind`
} qlora__gguf_value;

typedef struct qlora__gguf {
    const char* label;
    const uint8_t* file;
    uint64_t size;
    uint64_t tensor_count; // announced; the table is checked by those who need it
    uint64_t table;        // where the table of tensors begins
    uint64_t alignment;
    qlora__gguf_value* values; // in file order
    uint32_t* by_key;
    uint32_t count;
    size_t block; // bytes of values and by_key
} qlora__gguf;

// Reads forwards through the file. A read that does not fit sets `ended` and returns zeros, so
// that a caller can check once.
typedef struct qlora__gguf_cursor {
    const uint8_t* file;
    uint64_t at;
    uint64_t size;
    bool ended;
} qlora__gguf_cursor;

// The next n bytes, or NULL.
static const uint8_t* qlora__gguf_take(qlora__gguf_cursor* c, uint64_t n) {
    if (c->ended || n > c->size - c->at) {
        c->ended = true;
        return NULL;
    }
    c->at += n;
    return c->file + (c->at - n);
}

// A little-endian number of `bytes` bytes.
static uint64_t qlora__gguf_bits(const uint8_t* p, uint32_t bytes) {
    uint64_t value = 0;
    for (uint32_t i = bytes; i > 0; i--) {
        value = value << 8 | p[i - 1];
    }
    return value;
}

static uint64_t qlora__gguf_number(qlora__gguf_cursor* c, uint32_t bytes) {
    const uint8_t* p = qlora__gguf_take(c, bytes);
    return p != NULL ? qlora__gguf_bits(p, bytes) : 0;
}

static uint32_t qlora__gguf_kind_bytes(qlora__gguf_kind kind) {
#define QLORA__GGUF_SIZE(name, bytes) bytes,
    static const uint8_t sizes[] = {QLORA__GGUF_VALUES(QLORA__GGUF_SIZE)};
#undef QLORA__GGUF_SIZE
    return sizes[kind];
}

static const char* qlora__gguf_kind_name(qlora__gguf_kind kind) {
#define QLORA__GGUF_NAMED(name, bytes) #name,
    static const char* const names[] = {QLORA__GGUF_VALUES(QLORA__GGUF_NAMED)};
#undef QLORA__GGUF_NAMED
    return names[kind];
}

static void qlora__gguf_free(qlora__env* env, qlora__gguf* g) {
    qlora__env_free(env, g->values, g->block);
    memset(g, 0, sizeof *g);
}

// The part of a key that a message shows.
static int qlora__gguf_shown(uint64_t size) {
    return size < 80 ? (int)size : 80;
}

static qlora_result qlora__gguf_cut(qlora__env* env, const qlora__gguf* g, const char* where) {
    return qlora__env_fail(env, QLORA_ERR_FORMAT,
                           "%s: the file ends inside %s, after %llu bytes; it is truncated",
                           g->label, where, (unsigned long long)g->size);
}

// The characters of a string; *size is their number.
static qlora_result qlora__gguf_chars(qlora__env* env, const qlora__gguf* g, qlora__gguf_cursor* c,
                                      const char* what, const uint8_t** out, uint64_t* size) {
    uint64_t n = qlora__gguf_number(c, 8);
    const uint8_t* p = qlora__gguf_take(c, n);
    if (p == NULL) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: %s has %llu bytes, more than the file contains", g->label, what,
                               (unsigned long long)n);
    }
    *out = p;
    *size = n;
    return QLORA_OK;
}

static qlora_result qlora__gguf_bad_kind(qlora__env* env, const qlora__gguf* g,
                                         const qlora__gguf_value* v, const char* what,
                                         uint64_t kind) {
    return qlora__env_fail(env, QLORA_ERR_FORMAT,
                           "%s: %.*s: %s %llu does not exist; the last one is %d", g->label,
                           qlora__gguf_shown(v->key_size), v->key, what, (unsigned long long)kind,
                           (int)QLORA__GGUF_KIND_COUNT - 1);
}

static qlora_result qlora__gguf_read_array(qlora__env* env, const qlora__gguf* g,
                                           qlora__gguf_cursor* c, qlora__gguf_value* v) {
    uint64_t element = qlora__gguf_number(c, 4);
    v->count = qlora__gguf_number(c, 8);
    if (c->ended) {
        return qlora__gguf_cut(env, g, "an array");
    }
    if (element >= QLORA__GGUF_KIND_COUNT) {
        return qlora__gguf_bad_kind(env, g, v, "element type", element);
    }
    v->element = (qlora__gguf_kind)element;
    if (v->element == QLORA__GGUF_ARRAY) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: %.*s is an array of arrays, which GGUF does not allow",
                               g->label, qlora__gguf_shown(v->key_size), v->key);
    }
    uint64_t least = v->element == QLORA__GGUF_STRING ? 8 : qlora__gguf_kind_bytes(v->element);
    if (v->count > (c->size - c->at) / least) {
        return qlora__env_fail(
            env, QLORA_ERR_FORMAT, "%s: %.*s has %llu elements, more than the file can contain",
            g->label, qlora__gguf_shown(v->key_size), v->key, (unsigned long long)v->count);
    }
    v->data = c->file + c->at;
    if (v->element != QLORA__GGUF_STRING) {
        v->bytes = v->count * least;
        qlora__gguf_take(c, v->bytes);
        return QLORA_OK;
    }
    uint64_t begin = c->at;
    for (uint64_t i = 0; i < v->count; i++) {
        const uint8_t* text = NULL;
        uint64_t size = 0;
        QLORA__TRY(qlora__gguf_chars(env, g, c, "a string of an array", &text, &size));
    }
    v->bytes = c->at - begin;
    return QLORA_OK;
}

static qlora_result qlora__gguf_read_value(qlora__env* env, const qlora__gguf* g,
                                           qlora__gguf_cursor* c, qlora__gguf_value* v) {
    const uint8_t* key = NULL;
    uint64_t size = 0;
    memset(v, 0, sizeof *v);
    QLORA__TRY(qlora__gguf_chars(env, g, c, "a key", &key, &size));
    v->key = (const char*)key;
    if (size == 0 || size > QLORA__GGUF_MAX_KEY || memchr(key, 0, (size_t)size) != NULL) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: a key has %llu bytes; it must have 1 to %u and no zero byte",
                               g->label, (unsigned long long)size, QLORA__GGUF_MAX_KEY);
    }
    v->key_size = (uint32_t)size;
    uint64_t kind = qlora__gguf_number(c, 4);
    if (c->ended) {
        return qlora__gguf_cut(env, g, "the metadata");
    }
    if (kind >= QLORA__GGUF_KIND_COUNT) {
        return qlora__gguf_bad_kind(env, g, v, "type", kind);
    }
    v->kind = (qlora__gguf_kind)kind;
    v->element = v->kind;
    v->count = 1;
    if (v->kind == QLORA__GGUF_ARRAY) {
        QLORA__TRY(qlora__gguf_read_array(env, g, c, v));
    } else if (v->kind == QLORA__GGUF_STRING) {
        QLORA__TRY(qlora__gguf_chars(env, g, c, "a string", &v->data, &v->bytes));
    } else {
        v->bytes = qlora__gguf_kind_bytes(v->kind);
        v->data = qlora__gguf_take(c, v->bytes);
        if (v->data == NULL) {
            return qlora__gguf_cut(env, g, "the metadata");
        }
    }
    for (uint64_t i = 0; v->element == QLORA__GGUF_BOOL && i < v->count; i++) {
        if (v->data[i] > 1) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "%s: %.*s: a BOOL is %u; it must be 0 or 1", g->label,
                                   qlora__gguf_shown(v->key_size), v->key, v->data[i]);
        }
    }
    return QLORA_OK;
}

static int qlora__gguf_key_order(const qlora__gguf_value* a, const char* key, size_t size) {
    size_t n = a->key_size < size ? a->key_size : size;
    int order = memcmp(a->key, key, n);
    return order != 0 ? order : a->key_size < size ? -1 : a->key_size > size ? 1 : 0;
}

static bool qlora__gguf_key_less(const void* user, uint32_t a, uint32_t b) {
    const qlora__gguf_value* v = (const qlora__gguf_value*)user;
    return qlora__gguf_key_order(&v[a], v[b].key, v[b].key_size) < 0;
}

// NULL if there is no such key.
static const qlora__gguf_value* qlora__gguf_find(const qlora__gguf* g, const char* key) {
    uint32_t low = 0;
    uint32_t high = g->count;
    size_t size = strlen(key);
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        const qlora__gguf_value* v = &g->values[g->by_key[middle]];
        int order = qlora__gguf_key_order(v, key, size);
        if (order == 0) {
            return v;
        }
        if (order < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return NULL;
}

static qlora_result qlora__gguf_read_values(qlora__env* env, qlora__gguf* g, qlora__gguf_cursor* c,
                                            uint64_t count) {
    // The smallest pair has a key of one byte and a value of one.
    if (count > (c->size - c->at) / 14 || count > INT32_MAX) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: %llu keys are announced, more than the file can contain",
                               g->label, (unsigned long long)count);
    }
    size_t bytes = (size_t)count * (sizeof *g->values + sizeof *g->by_key);
    if (count > 0) {
        g->values = (qlora__gguf_value*)qlora__env_alloc(env, bytes);
        if (g->values == NULL) {
            return QLORA_ERR_MEMORY;
        }
        g->block = bytes;
        g->by_key = (uint32_t*)(void*)(g->values + count);
    }
    for (uint64_t i = 0; i < count; i++) {
        QLORA__TRY(qlora__gguf_read_value(env, g, c, &g->values[i]));
        g->by_key[i] = (uint32_t)i;
    }
    g->count = (uint32_t)count;
    qlora__sort(g->by_key, g->count, qlora__gguf_key_less, g->values);
    for (uint32_t i = 1; i < g->count; i++) {
        const qlora__gguf_value* v = &g->values[g->by_key[i]];
        if (qlora__gguf_key_order(&g->values[g->by_key[i - 1]], v->key, v->key_size) == 0) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: the key %.*s occurs twice", g->label,
                                   qlora__gguf_shown(v->key_size), v->key);
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__gguf_read_version(qlora__env* env, const qlora__gguf* g,
                                             qlora__gguf_cursor* c) {
    const uint8_t* magic = qlora__gguf_take(c, 4);
    uint64_t version = qlora__gguf_number(c, 4);
    if (magic == NULL || memcmp(magic, "GGUF", 4) != 0) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: this is not a GGUF file: it does not begin with \"GGUF\"",
                               g->label);
    }
    if (c->ended) {
        return qlora__gguf_cut(env, g, "the header");
    }
    if (version != 0 && (version & 0xFFFF) == 0) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "%s: this is a big-endian GGUF file; only little-endian ones are "
                               "supported",
                               g->label);
    }
    if (version != 2 && version != 3) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "%s: GGUF version %llu is not supported; supported are 2 and 3",
                               g->label, (unsigned long long)version);
    }
    return QLORA_OK;
}

static qlora_result qlora__gguf_read_alignment(qlora__env* env, qlora__gguf* g) {
    const qlora__gguf_value* v = qlora__gguf_find(g, "general.alignment");
    g->alignment = 32;
    if (v == NULL) {
        return QLORA_OK;
    }
    if (v->kind != QLORA__GGUF_U32) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: general.alignment has type %s; it must be U32", g->label,
                               qlora__gguf_kind_name(v->kind));
    }
    g->alignment = qlora__gguf_bits(v->data, 4);
    if (g->alignment == 0 || (g->alignment & (g->alignment - 1)) != 0 ||
        g->alignment > QLORA__GGUF_MAX_ALIGN) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: general.alignment is %llu; it must be a power of two up to "
                               "2^30",
                               g->label, (unsigned long long)g->alignment);
    }
    return QLORA_OK;
}

static qlora_result qlora__gguf_read_all(qlora__env* env, qlora__gguf* g) {
    qlora__gguf_cursor c;
    memset(&c, 0, sizeof c);
    c.file = g->file;
    c.size = g->size;
    QLORA__TRY(qlora__gguf_read_version(env, g, &c));
    g->tensor_count = qlora__gguf_number(&c, 8);
    uint64_t count = qlora__gguf_number(&c, 8);
    if (c.ended) {
        return qlora__gguf_cut(env, g, "the header");
    }
    QLORA__TRY(qlora__gguf_read_values(env, g, &c, count));
    g->table = c.at;
    return qlora__gguf_read_alignment(env, g);
}

// Reads the header and the metadata of a file in memory, which must outlive *g. Call
// qlora__gguf_free afterwards. After a failure there is nothing to free.
static QLORA__UNUSED qlora_result qlora__gguf_parse(qlora__env* env, const char* label,
                                                    const void* bytes, uint64_t size,
                                                    qlora__gguf* g) {
    memset(g, 0, sizeof *g);
    g->label = label;
    g->file = (const uint8_t*)bytes;
    g->size = size;
    qlora_result result = qlora__gguf_read_all(env, g);
    if (result != QLORA_OK) {
        qlora__gguf_free(env, g);
    }
    return result;
}

// ---- values -------------------------------------------------------------------------------------

static qlora_result qlora__gguf_wrong(qlora__env* env, const qlora__gguf* g, const char* key,
                                      const qlora__gguf_value* v, const char* wanted) {
    if (v == NULL) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: %s is missing", g->label, key);
    }
    return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: %s has type %s%s; it must be %s", g->label,
                           key, v->kind == QLORA__GGUF_ARRAY ? "ARRAY of " : "",
                           qlora__gguf_kind_name(v->element), wanted);
}

// Element `index` as an integer; false if it is not one, or does not fit.
static QLORA__UNUSED bool qlora__gguf_integer(const qlora__gguf_value* v, uint64_t index,
                                              int64_t* out) {
    uint32_t bytes = qlora__gguf_kind_bytes(v->element);
    bool is_signed = v->element == QLORA__GGUF_I8 || v->element == QLORA__GGUF_I16 ||
                     v->element == QLORA__GGUF_I32 || v->element == QLORA__GGUF_I64;
    bool is_unsigned = v->element == QLORA__GGUF_U8 || v->element == QLORA__GGUF_U16 ||
                       v->element == QLORA__GGUF_U32 || v->element == QLORA__GGUF_U64;
    if ((!is_signed && !is_unsigned) || index >= v->count) {
        return false;
    }
    uint64_t bits = qlora__gguf_bits(v->data + index * bytes, bytes);
    uint64_t sign = (uint64_t)1 << (8 * bytes - 1);
    if (is_signed && (bits & sign) != 0) {
        // minus the distance from 2^n, without a conversion that overflows
        *out = -(int64_t)((~bits & (sign - 1))) - 1;
        return true;
    }
    *out = (int64_t)(bits & INT64_MAX);
    return bits <= INT64_MAX;
}

// Element `index` as a real number; false if it is not an F32 or F64.
static QLORA__UNUSED bool qlora__gguf_real(const qlora__gguf_value* v, uint64_t index,
                                           double* out) {
    if (index >= v->count) {
        return false;
    }
    if (v->element == QLORA__GGUF_F32) {
        uint32_t bits = (uint32_t)qlora__gguf_bits(v->data + index * 4, 4);
        float number;
        memcpy(&number, &bits, sizeof number);
        *out = (double)number;
        return true;
    }
    if (v->element == QLORA__GGUF_F64) {
        uint64_t bits = qlora__gguf_bits(v->data + index * 8, 8);
        memcpy(out, &bits, sizeof *out);
        return true;
    }
    return false;
}

// An integer within [least, most]. If it is absent, the result is `fallback`; a negative fallback
// makes that an error. An array is accepted when all its elements are equal.
static QLORA__UNUSED qlora_result qlora__gguf_get_int(qlora__env* env, const qlora__gguf* g,
                                                      const char* key, int64_t fallback,
                                                      int64_t least, int64_t most, int64_t* out) {
    const qlora__gguf_value* v = qlora__gguf_find(g, key);
    int64_t number = fallback;
    if (v == NULL && fallback >= 0) {
        *out = fallback;
        return QLORA_OK;
    }
    if (v == NULL || v->count == 0 || !qlora__gguf_integer(v, 0, &number)) {
        return qlora__gguf_wrong(env, g, key, v, "an integer");
    }
    for (uint64_t i = 1; i < v->count; i++) {
        int64_t other = 0;
        if (!qlora__gguf_integer(v, i, &other) || other != number) {
            return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                   "%s: %s differs between the layers (%lld, then %lld), which is "
                                   "not supported",
                                   g->label, key, (long long)number, (long long)other);
        }
    }
    if (number < least || number > most) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: %s is %lld; it must be an integer from %lld to %lld", g->label,
                               key, (long long)number, (long long)least, (long long)most);
    }
    *out = number;
    return QLORA_OK;
}

// A positive number. If it is absent, the result is `fallback`; a negative fallback makes that an
// error.
static QLORA__UNUSED qlora_result qlora__gguf_get_positive(qlora__env* env, const qlora__gguf* g,
                                                           const char* key, double fallback,
                                                           double* out) {
    const qlora__gguf_value* v = qlora__gguf_find(g, key);
    double number = 0.0;
    if (v == NULL && fallback >= 0.0) {
        *out = fallback;
        return QLORA_OK;
    }
    if (v == NULL || v->kind == QLORA__GGUF_ARRAY || !qlora__gguf_real(v, 0, &number)) {
        return qlora__gguf_wrong(env, g, key, v, "F32 or F64");
    }
    if (!(number > 0.0) || number > 1e30) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: %s is %g; it must be positive and at most 1e30", g->label, key,
                               number);
    }
    *out = number;
    return QLORA_OK;
}

static QLORA__UNUSED qlora_result qlora__gguf_get_bool(qlora__env* env, const qlora__gguf* g,
                                                       const char* key, bool fallback, bool* out) {
    const qlora__gguf_value* v = qlora__gguf_find(g, key);
    if (v != NULL && v->kind != QLORA__GGUF_BOOL) {
        return qlora__gguf_wrong(env, g, key, v, "BOOL");
    }
    *out = v != NULL ? v->data[0] != 0 : fallback;
    return QLORA_OK;
}

// A string, which is not terminated. If it is absent, *out is NULL, or an error if it is needed.
static QLORA__UNUSED qlora_result qlora__gguf_get_string(qlora__env* env, const qlora__gguf* g,
                                                         const char* key, bool need,
                                                         const char** out, size_t* size) {
    const qlora__gguf_value* v = qlora__gguf_find(g, key);
    *out = NULL;
    *size = 0;
    if (v == NULL && !need) {
        return QLORA_OK;
    }
    if (v == NULL || v->kind != QLORA__GGUF_STRING) {
        return qlora__gguf_wrong(env, g, key, v, "STRING");
    }
    *out = (const char*)v->data;
    *size = (size_t)v->bytes;
    return QLORA_OK;
}

// An array of `element`; if it is absent, *out is NULL, or an error if it is needed.
static QLORA__UNUSED qlora_result qlora__gguf_get_array(qlora__env* env, const qlora__gguf* g,
                                                        const char* key, qlora__gguf_kind element,
                                                        bool need, const qlora__gguf_value** out) {
    char wanted[32];
    const qlora__gguf_value* v = qlora__gguf_find(g, key);
    *out = v;
    if (v == NULL && !need) {
        return QLORA_OK;
    }
    if (v == NULL || v->kind != QLORA__GGUF_ARRAY || v->element != element) {
        snprintf(wanted, sizeof wanted, "ARRAY of %s", qlora__gguf_kind_name(element));
        return qlora__gguf_wrong(env, g, key, v, wanted);
    }
    return QLORA_OK;
}

// Goes through the strings of an array: start with *at = 0 and call it once per element. The array
// has been checked when the file was read.
static QLORA__UNUSED const char* qlora__gguf_next_string(const qlora__gguf_value* v, uint64_t* at,
                                                         size_t* size) {
    uint64_t n = qlora__gguf_bits(v->data + *at, 8);
    const uint8_t* text = v->data + *at + 8;
    *at += 8 + n;
    *size = (size_t)n;
    return (const char*)text;
}

static QLORA__UNUSED bool qlora__gguf_is(const char* text, size_t size, const char* word) {
    return text != NULL && strlen(word) == size && memcmp(text, word, size) == 0;
}

// Whether a path names a GGUF file, by its ending.
static QLORA__UNUSED bool qlora__gguf_path(const char* path) {
    size_t n = strlen(path);
    return n >= 5 &&
           (memcmp(path + n - 5, ".gguf", 5) == 0 || memcmp(path + n - 5, ".GGUF", 5) == 0);
}

#endif // QLORA__PART_GGUF_READ

//@@ src/text/base.h

struct qlora_text {
    qlora__env env;
    int64_t toks; // open ones
    int64_t chats;
    int64_t datas;
    int64_t templates;
};

#define QLORA__TEXT_COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define QLORA__TEXT_LOG(env, item_level, ...)                                                      \
    qlora__env_log((env), QLORA_LOG_##item_level, QLORA_LOG_ITEM_TEXT, "qlora_text.h", __LINE__,   \
                   __VA_ARGS__)

// The first thing a public call does. Public functions do not call each other.
static void qlora__text_enter(qlora_text* text, const char* call) {
    text->env.call = call;
    text->env.error[0] = '\0';
}

// An argument that must not be NULL.
#define QLORA__TEXT_NEED(env, argument)                                                            \
    do {                                                                                           \
        if ((argument) == NULL) {                                                                  \
            return qlora__env_fail((env), QLORA_ERR_ARGUMENT, #argument " is NULL");               \
        }                                                                                          \
    } while (0)

// ---- create, destroy ----------------------------------------------------------------------------

static void qlora__text_tell(const qlora_text_desc* desc, const char* text) {
    if (desc != NULL && desc->error_text != NULL && desc->error_text_size > 0) {
        snprintf(desc->error_text, desc->error_text_size, "%s", text);
    }
}

// What is wrong with a desc, or NULL.
static const char* qlora__text_desc_fault(const qlora_text_desc* d) {
    if (d->reserved_must_be_zero0 != 0 || d->reserved_must_be_zero1 != 0) {
        return "desc was not zeroed: a reserved field is set";
    }
    if ((d->allocator.alloc == NULL) != (d->allocator.free == NULL)) {
        return "desc.allocator needs both functions or none";
    }
    int hooks = qlora__files_count(&d->files);
    if (hooks != 0 && hooks != QLORA__FILES_ALL) {
        return "desc.files needs all functions or none";
    }
    return NULL;
}

qlora_result qlora_text_create(const qlora_text_desc* desc, qlora_text** out) {
    qlora__text_tell(desc, "");
    const char* fault = out == NULL ? "out is NULL" : NULL;
    if (fault == NULL && desc != NULL) {
        fault = qlora__text_desc_fault(desc);
    }
    if (fault != NULL) {
        char message[160];
        snprintf(message, sizeof message, "qlora_text_create: %s", fault);
        qlora__text_tell(desc, message);
        return QLORA_ERR_ARGUMENT;
    }
    qlora__env env;
    memset(&env, 0, sizeof env);
    env.call = "qlora_text_create";
    env.one_line = true;
    if (desc != NULL) {
        env.allocator = desc->allocator;
        env.files = desc->files;
        env.log = desc->log;
        env.log_user = desc->log_user;
    }
    qlora__hooks_default(&env.allocator, &env.files);
    qlora_text* text = (qlora_text*)qlora__env_alloc_zero(&env, sizeof *text);
    if (text == NULL) {
        qlora__text_tell(desc, env.error);
        return QLORA_ERR_MEMORY;
    }
    text->env = env;
    *out = text;
    return QLORA_OK;
}

qlora_result qlora_text_destroy(qlora_text* text) {
    if (text == NULL) {
        return QLORA_OK;
    }
    qlora__text_enter(text, "qlora_text_destroy");
    if (text->toks + text->chats + text->datas + text->templates > 0) {
        return qlora__env_fail(&text->env, QLORA_ERR_STATE,
                               "still open: tokenizers %lld, chats %lld, data files %lld, "
                               "templates %lld; close them first",
                               (long long)text->toks, (long long)text->chats,
                               (long long)text->datas, (long long)text->templates);
    }
    qlora__env env = text->env;
    qlora__env_free(&env, text, sizeof *text);
    return QLORA_OK;
}

const char* qlora_text_last_error(const qlora_text* text) {
    return text != NULL ? text->env.error : "no text object (NULL)";
}

int qlora_text_version(void) {
    return QLORA_VERSION;
}

// ---- growing arrays -----------------------------------------------------------------------------

// Makes room for `extra` more elements.
static qlora_result qlora__text_reserve(qlora__env* env, void** data, size_t* capacity,
                                        size_t count, size_t extra, size_t element) {
    if (extra <= *capacity - count) {
        return QLORA_OK;
    }
    size_t limit = SIZE_MAX / 2 / element;
    if (extra > limit || count > limit - extra) {
        return qlora__env_fail(env, QLORA_ERR_MEMORY, "out of host memory: over %llu elements",
                               (unsigned long long)limit);
    }
    size_t wanted = count + extra;
    // large arrays grow by a quarter: half of a large file's memory would otherwise be unused
    size_t more = *capacity < ((size_t)1 << 20) / element ? *capacity : *capacity / 4;
    size_t grown = *capacity <= limit - more ? *capacity + more : limit;
    grown = grown < wanted ? wanted : grown;
    grown = grown < 16 ? 16 : grown;
    void* moved =
        qlora__env_realloc(env, *data, count * element, *capacity * element, grown * element);
    if (moved == NULL) {
        return QLORA_ERR_MEMORY;
    }
    *data = moved;
    *capacity = grown;
    return QLORA_OK;
}

// NULL when out of memory, and when the size overflows.
static void* qlora__text_zalloc(qlora__env* env, size_t count, size_t element) {
    size_t bytes = 0;
    if (!qlora__mul(count, element, &bytes)) {
        qlora__env_fail(env, QLORA_ERR_MEMORY, "out of host memory (%llu x %llu bytes)",
                        (unsigned long long)count, (unsigned long long)element);
        return NULL;
    }
    return qlora__env_alloc_zero(env, bytes);
}

static qlora_result qlora__text_bytes_room(qlora__env* env, qlora_text_bytes* bytes, size_t extra) {
    void* data = bytes->data;
    qlora_result r = qlora__text_reserve(env, &data, &bytes->capacity, bytes->count, extra, 1);
    bytes->data = (char*)data;
    return r;
}

static qlora_result qlora__text_ids_room(qlora__env* env, qlora_text_ids* ids, size_t extra) {
    void* data = ids->data;
    qlora_result r =
        qlora__text_reserve(env, &data, &ids->capacity, ids->count, extra, sizeof(int32_t));
    ids->data = (int32_t*)data;
    return r;
}

static void qlora__text_bytes_free(qlora__env* env, qlora_text_bytes* bytes) {
    qlora__env_free(env, bytes->data, bytes->capacity);
    memset(bytes, 0, sizeof *bytes);
}

static void qlora__text_ids_free(qlora__env* env, qlora_text_ids* ids) {
    qlora__env_free(env, ids->data, ids->capacity * sizeof(int32_t));
    memset(ids, 0, sizeof *ids);
}

static qlora_result qlora__text_bytes_add(qlora__env* env, qlora_text_bytes* bytes,
                                          const void* data, size_t size) {
    QLORA__TRY(qlora__text_bytes_room(env, bytes, size));
    if (size > 0) {
        memcpy(bytes->data + bytes->count, data, size);
        bytes->count += size;
    }
    return QLORA_OK;
}

static qlora_result qlora__text_ids_add(qlora__env* env, qlora_text_ids* ids, int32_t id) {
    QLORA__TRY(qlora__text_ids_room(env, ids, 1));
    ids->data[ids->count++] = id;
    return QLORA_OK;
}

qlora_result qlora_text_bytes_add(qlora_text* text, qlora_text_bytes* bytes, const void* data,
                                  size_t size) {
    if (text == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__text_enter(text, "qlora_text_bytes_add");
    QLORA__TEXT_NEED(&text->env, bytes);
    if (data == NULL && size > 0) {
        return qlora__env_fail(&text->env, QLORA_ERR_ARGUMENT, "data is NULL");
    }
    return qlora__text_bytes_add(&text->env, bytes, data, size);
}

void qlora_text_bytes_free(qlora_text* text, qlora_text_bytes* bytes) {
    if (text != NULL && bytes != NULL) {
        qlora__text_bytes_free(&text->env, bytes);
    }
}

qlora_result qlora_text_ids_add(qlora_text* text, qlora_text_ids* ids, int32_t id) {
    if (text == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__text_enter(text, "qlora_text_ids_add");
    QLORA__TEXT_NEED(&text->env, ids);
    return qlora__text_ids_add(&text->env, ids, id);
}

void qlora_text_ids_free(qlora_text* text, qlora_text_ids* ids) {
    if (text != NULL && ids != NULL) {
        qlora__text_ids_free(&text->env, ids);
    }
}

// ---- files --------------------------------------------------------------------------------------

// Appends a whole file. A pipe can be read as well: the file is read, not mapped.
static qlora_result qlora__text_file_append(qlora__env* env, const char* path, void* file,
                                            qlora_text_bytes* out) {
    for (;;) {
        size_t step = 65536;
        QLORA__TRY(qlora__text_bytes_room(env, out, step));
        int64_t got = env->files.read(file, out->data + out->count, step, env->files.user);
        if (got < 0 || (uint64_t)got > step) {
            int code = got < 0 ? (int)-got : EIO;
            return qlora__env_fail(env, QLORA_ERR_FILE, "cannot read %s: %s (%d)", path,
                                   qlora__errno_text(code), code);
        }
        if (got == 0) {
            return QLORA_OK;
        }
        out->count += (size_t)got;
    }
}

// Reads a whole file. With `found`, a file that does not exist is not an error.
static qlora_result qlora__text_file_read(qlora__env* env, const char* path, qlora_text_bytes* out,
                                          bool* found) {
    void* file = NULL;
    int code = env->files.open(path, QLORA_FILE_READ, &file, env->files.user);
    if (found != NULL) {
        *found = code == 0;
        if (code == ENOENT || code == ENOTDIR) {
            return QLORA_OK;
        }
    }
    if (code != 0) {
        return qlora__env_fail(env, QLORA_ERR_FILE, "cannot read %s: %s (%d)", path,
                               qlora__errno_text(code), code);
    }
    qlora_result r = qlora__text_file_append(env, path, file, out);
    env->files.close(file, env->files.user); // nothing was written: a failure loses nothing
    return r;
}

//@@ src/text/folder.h

// ---- the files of a model folder, and of a GGUF file in their place -----------------------------

// The text of the token whose id a key holds, as a member of a JSON object; nothing if there is no
// such key or token.
static void qlora__text_gguf_token(const qlora__gguf* g, const char* key, const char* name,
                                   qlora__json_writer* w, qlora__string* text) {
    const qlora__gguf_value* id = qlora__gguf_find(g, key);
    const qlora__gguf_value* tokens = qlora__gguf_find(g, "tokenizer.ggml.tokens");
    int64_t number = 0;
    uint64_t at = 0;
    size_t size = 0;
    if (id == NULL || tokens == NULL || tokens->element != QLORA__GGUF_STRING ||
        !qlora__gguf_integer(id, 0, &number) || number < 0 || (uint64_t)number >= tokens->count) {
        return;
    }
    const char* token = NULL;
    for (int64_t i = 0; i <= number; i++) {
        token = qlora__gguf_next_string(tokens, &at, &size);
    }
    qlora__json_write_key(w, name);
    qlora__json_write_quoted(text, token, size);
}

// tokenizer_config.json: the names of the special tokens.
static void qlora__text_gguf_config(const qlora__gguf* g, qlora__json_writer* w,
                                    qlora__string* text) {
    qlora__text_gguf_token(g, "tokenizer.ggml.bos_token_id", "bos_token", w, text);
    qlora__text_gguf_token(g, "tokenizer.ggml.eos_token_id", "eos_token", w, text);
    qlora__text_gguf_token(g, "tokenizer.ggml.unknown_token_id", "unk_token", w, text);
    qlora__text_gguf_token(g, "tokenizer.ggml.padding_token_id", "pad_token", w, text);
}

// config.json: the ids at which generation ends.
static void qlora__text_gguf_stops(const qlora__gguf* g, qlora__json_writer* w) {
    static const char* const keys[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                                       "tokenizer.ggml.eom_token_id"};
    qlora__json_write_open(w, "eos_token_id", '[');
    int64_t seen[3] = {-1, -1, -1};
    for (int i = 0; i < 3; i++) {
        const qlora__gguf_value* v = qlora__gguf_find(g, keys[i]);
        int64_t id = -1;
        bool is_id = v != NULL && qlora__gguf_integer(v, 0, &id) && id >= 0 && id <= INT32_MAX;
        if (is_id && id != seen[0] && id != seen[1]) {
            qlora__json_write_int(w, NULL, id);
            seen[i] = id;
        }
    }
    qlora__json_write_close(w, ']');
}

// What a file of a model folder would contain, made from the metadata.
static qlora_result qlora__text_gguf_make(qlora__env* env, const qlora__gguf* g, const char* name,
                                          qlora_text_bytes* out, bool* found) {
    qlora__string text;
    qlora__json_writer w;
    bool config = strcmp(name, "tokenizer_config.json") == 0;
    if (strcmp(name, "chat_template.jinja") == 0) {
        const char* chat = NULL;
        size_t size = 0;
        QLORA__TRY(qlora__gguf_get_string(env, g, "tokenizer.chat_template", false, &chat, &size));
        *found = chat != NULL;
        return *found ? qlora__text_bytes_add(env, out, chat, size) : QLORA_OK;
    }
    *found = config || strcmp(name, "config.json") == 0;
    if (!*found) {
        return QLORA_OK;
    }
    qlora__string_begin(env, &text);
    qlora__json_write_begin(&w, &text, 2);
    qlora__json_write_open(&w, NULL, '{');
    if (config) {
        qlora__text_gguf_config(g, &w, &text);
    } else {
        qlora__text_gguf_stops(g, &w);
    }
    qlora__json_write_close(&w, '}');
    qlora_result r = text.result;
    r = r == QLORA_OK ? qlora__text_bytes_add(env, out, text.data, text.size) : r;
    qlora__string_free(&text);
    return r;
}

static qlora_result qlora__text_gguf_read(qlora__env* env, const char* path, const char* name,
                                          qlora_text_bytes* out, bool* found) {
    qlora__map map;
    qlora__gguf g;
    QLORA__TRY(qlora__map_open(env, path, &map));
    qlora_result r = qlora__gguf_parse(env, path, map.data, map.size, &g);
    if (r == QLORA_OK) {
        r = qlora__text_gguf_make(env, &g, name, out, found);
        qlora__gguf_free(env, &g);
    }
    qlora__map_close(env, &map);
    return r;
}

// Reads folder/name, if there is such a file. `folder` may also be a GGUF file.
static qlora_result qlora__text_folder_read(qlora__env* env, const char* folder, const char* name,
                                            qlora_text_bytes* out, bool* found) {
    char path[QLORA__PATH_ROOM];
    if (qlora__gguf_path(folder)) {
        return qlora__text_gguf_read(env, folder, name, out, found);
    }
    QLORA__TRY(qlora__path_join(env, folder, name, path));
    return qlora__text_file_read(env, path, out, found);
}

//@@ src/text/classes.h

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
// \w of the regular expressions; single_word also counts the joiners
#define QLORA__TEXT_W                                                                              \
    (QLORA__TEXT_L | QLORA__TEXT_M | QLORA__TEXT_BIT(DIGIT) | QLORA__TEXT_BIT(CONNECTOR) |         \
     QLORA__TEXT_BIT(WORD_SYMBOL))
#define QLORA__TEXT_UNSTABLE 0x80u // may change under NFC

//@@ src/text/unicode_tables.h

// GENERATED BEGIN
// clang-format off
// Unicode 16.0.0 (normalisation as of 9.0), made by tools/unicode_gen.py.
// Data: Copyright (c) 1991-2024 Unicode, Inc., Unicode License V3, SPDX Unicode-3.0,
// https://www.unicode.org/license.txt
// Runs of equal class: first code point << 8 | may change under NFC << 7 | class.
static const uint32_t qlora__text_class_runs[] = {
    0x0, 0x90b, 0xe00, 0x200b, 0x2108, 0x2409, 0x2508, 0x2b09, 0x2c08, 0x3005, 0x3a08, 0x3c09,
    0x3f08, 0x4101, 0x5b08, 0x5e09, 0x5f07, 0x6009, 0x6102, 0x7b08, 0x7c09, 0x7d08, 0x7e09, 0x7f00,
    0x850b, 0x8600, 0xa00b, 0xa108, 0xa209, 0xa708, 0xa809, 0xaa03, 0xab08, 0xac09, 0xad00, 0xae09,
    0xb206, 0xb409, 0xb502, 0xb608, 0xb809, 0xb906, 0xba03, 0xbb08, 0xbc06, 0xbf08, 0xc001, 0xd709,
    0xd801, 0xdf02, 0xf709, 0xf802, 0x10001, 0x10102, 0x10201, 0x10302, 0x10401, 0x10502, 0x10601,
    0x10702, 0x10801, 0x10902, 0x10a01, 0x10b02, 0x10c01, 0x10d02, 0x10e01, 0x10f02, 0x11001,
    0x11102, 0x11201, 0x11302, 0x11401, 0x11502, 0x11601, 0x11702, 0x11801, 0x11902, 0x11a01,
    0x11b02, 0x11c01, 0x11d02, 0x11e01, 0x11f02, 0x12001, 0x12102, 0x12201, 0x12302, 0x12401,
    0x12502, 0x12601, 0x12702, 0x12801, 0x12902, 0x12a01, 0x12b02, 0x12c01, 0x12d02, 0x12e01,
    0x12f02, 0x13001, 0x13102, 0x13201, 0x13302, 0x13401, 0x13502, 0x13601, 0x13702, 0x13901,
    0x13a02, 0x13b01, 0x13c02, 0x13d01, 0x13e02, 0x13f01, 0x14002, 0x14101, 0x14202, 0x14301,
    0x14402, 0x14501, 0x14602, 0x14701, 0x14802, 0x14a01, 0x14b02, 0x14c01, 0x14d02, 0x14e01,
    0x14f02, 0x15001, 0x15102, 0x15201, 0x15302, 0x15401, 0x15502, 0x15601, 0x15702, 0x15801,
    0x15902, 0x15a01, 0x15b02, 0x15c01, 0x15d02, 0x15e01, 0x15f02, 0x16001, 0x16102, 0x16201,
    0x16302, 0x16401, 0x16502, 0x16601, 0x16702, 0x16801, 0x16902, 0x16a01, 0x16b02, 0x16c01,
    0x16d02, 0x16e01, 0x16f02, 0x17001, 0x17102, 0x17201, 0x17302, 0x17401, 0x17502, 0x17601,
    0x17702, 0x17801, 0x17a02, 0x17b01, 0x17c02, 0x17d01, 0x17e02, 0x18101, 0x18302, 0x18401,
    0x18502, 0x18601, 0x18802, 0x18901, 0x18c02, 0x18e01, 0x19202, 0x19301, 0x19502, 0x19601,
    0x19902, 0x19c01, 0x19e02, 0x19f01, 0x1a102, 0x1a201, 0x1a302, 0x1a401, 0x1a502, 0x1a601,
    0x1a802, 0x1a901, 0x1aa02, 0x1ac01, 0x1ad02, 0x1ae01, 0x1b002, 0x1b101, 0x1b402, 0x1b501,
    0x1b602, 0x1b701, 0x1b902, 0x1bb03, 0x1bc01, 0x1bd02, 0x1c003, 0x1c401, 0x1c602, 0x1c701,
    0x1c902, 0x1ca01, 0x1cc02, 0x1cd01, 0x1ce02, 0x1cf01, 0x1d002, 0x1d101, 0x1d202, 0x1d301,
    0x1d402, 0x1d501, 0x1d602, 0x1d701, 0x1d802, 0x1d901, 0x1da02, 0x1db01, 0x1dc02, 0x1de01,
    0x1df02, 0x1e001, 0x1e102, 0x1e201, 0x1e302, 0x1e401, 0x1e502, 0x1e601, 0x1e702, 0x1e801,
    0x1e902, 0x1ea01, 0x1eb02, 0x1ec01, 0x1ed02, 0x1ee01, 0x1ef02, 0x1f101, 0x1f302, 0x1f401,
    0x1f502, 0x1f601, 0x1f902, 0x1fa01, 0x1fb02, 0x1fc01, 0x1fd02, 0x1fe01, 0x1ff02, 0x20001,
    0x20102, 0x20201, 0x20302, 0x20401, 0x20502, 0x20601, 0x20702, 0x20801, 0x20902, 0x20a01,
    0x20b02, 0x20c01, 0x20d02, 0x20e01, 0x20f02, 0x21001, 0x21102, 0x21201, 0x21302, 0x21401,
    0x21502, 0x21601, 0x21702, 0x21801, 0x21902, 0x21a01, 0x21b02, 0x21c01, 0x21d02, 0x21e01,
    0x21f02, 0x22001, 0x22102, 0x22201, 0x22302, 0x22401, 0x22502, 0x22601, 0x22702, 0x22801,
    0x22902, 0x22a01, 0x22b02, 0x22c01, 0x22d02, 0x22e01, 0x22f02, 0x23001, 0x23102, 0x23201,
    0x23302, 0x23a01, 0x23c02, 0x23d01, 0x23f02, 0x24101, 0x24202, 0x24301, 0x24702, 0x24801,
    0x24902, 0x24a01, 0x24b02, 0x24c01, 0x24d02, 0x24e01, 0x24f02, 0x29403, 0x29502, 0x2b003,
    0x2c209, 0x2c603, 0x2d209, 0x2e003, 0x2e509, 0x2ec03, 0x2ed09, 0x2ee03, 0x2ef09, 0x30084,
    0x34f04, 0x35084, 0x37001, 0x37102, 0x37201, 0x37302, 0x37483, 0x37509, 0x37601, 0x37702,
    0x37800, 0x37a03, 0x37b02, 0x37e88, 0x37f01, 0x38000, 0x38409, 0x38601, 0x38788, 0x38801,
    0x38b00, 0x38c01, 0x38d00, 0x38e01, 0x39002, 0x39101, 0x3a200, 0x3a301, 0x3ac02, 0x3cf01,
    0x3d002, 0x3d201, 0x3d502, 0x3d801, 0x3d902, 0x3da01, 0x3db02, 0x3dc01, 0x3dd02, 0x3de01,
    0x3df02, 0x3e001, 0x3e102, 0x3e201, 0x3e302, 0x3e401, 0x3e502, 0x3e601, 0x3e702, 0x3e801,
    0x3e902, 0x3ea01, 0x3eb02, 0x3ec01, 0x3ed02, 0x3ee01, 0x3ef02, 0x3f401, 0x3f502, 0x3f609,
    0x3f701, 0x3f802, 0x3f901, 0x3fb02, 0x3fd01, 0x43002, 0x46001, 0x46102, 0x46201, 0x46302,
    0x46401, 0x46502, 0x46601, 0x46702, 0x46801, 0x46902, 0x46a01, 0x46b02, 0x46c01, 0x46d02,
    0x46e01, 0x46f02, 0x47001, 0x47102, 0x47201, 0x47302, 0x47401, 0x47502, 0x47601, 0x47702,
    0x47801, 0x47902, 0x47a01, 0x47b02, 0x47c01, 0x47d02, 0x47e01, 0x47f02, 0x48001, 0x48102,
    0x48209, 0x48384, 0x48804, 0x48a01, 0x48b02, 0x48c01, 0x48d02, 0x48e01, 0x48f02, 0x49001,
    0x49102, 0x49201, 0x49302, 0x49401, 0x49502, 0x49601, 0x49702, 0x49801, 0x49902, 0x49a01,
    0x49b02, 0x49c01, 0x49d02, 0x49e01, 0x49f02, 0x4a001, 0x4a102, 0x4a201, 0x4a302, 0x4a401,
    0x4a502, 0x4a601, 0x4a702, 0x4a801, 0x4a902, 0x4aa01, 0x4ab02, 0x4ac01, 0x4ad02, 0x4ae01,
    0x4af02, 0x4b001, 0x4b102, 0x4b201, 0x4b302, 0x4b401, 0x4b502, 0x4b601, 0x4b702, 0x4b801,
    0x4b902, 0x4ba01, 0x4bb02, 0x4bc01, 0x4bd02, 0x4be01, 0x4bf02, 0x4c001, 0x4c202, 0x4c301,
    0x4c402, 0x4c501, 0x4c602, 0x4c701, 0x4c802, 0x4c901, 0x4ca02, 0x4cb01, 0x4cc02, 0x4cd01,
    0x4ce02, 0x4d001, 0x4d102, 0x4d201, 0x4d302, 0x4d401, 0x4d502, 0x4d601, 0x4d702, 0x4d801,
    0x4d902, 0x4da01, 0x4db02, 0x4dc01, 0x4dd02, 0x4de01, 0x4df02, 0x4e001, 0x4e102, 0x4e201,
    0x4e302, 0x4e401, 0x4e502, 0x4e601, 0x4e702, 0x4e801, 0x4e902, 0x4ea01, 0x4eb02, 0x4ec01,
    0x4ed02, 0x4ee01, 0x4ef02, 0x4f001, 0x4f102, 0x4f201, 0x4f302, 0x4f401, 0x4f502, 0x4f601,
    0x4f702, 0x4f801, 0x4f902, 0x4fa01, 0x4fb02, 0x4fc01, 0x4fd02, 0x4fe01, 0x4ff02, 0x50001,
    0x50102, 0x50201, 0x50302, 0x50401, 0x50502, 0x50601, 0x50702, 0x50801, 0x50902, 0x50a01,
    0x50b02, 0x50c01, 0x50d02, 0x50e01, 0x50f02, 0x51001, 0x51102, 0x51201, 0x51302, 0x51401,
    0x51502, 0x51601, 0x51702, 0x51801, 0x51902, 0x51a01, 0x51b02, 0x51c01, 0x51d02, 0x51e01,
    0x51f02, 0x52001, 0x52102, 0x52201, 0x52302, 0x52401, 0x52502, 0x52601, 0x52702, 0x52801,
    0x52902, 0x52a01, 0x52b02, 0x52c01, 0x52d02, 0x52e01, 0x52f02, 0x53000, 0x53101, 0x55700,
    0x55903, 0x55a08, 0x56002, 0x58908, 0x58b00, 0x58d09, 0x59000, 0x59184, 0x5be08, 0x5bf84,
    0x5c008, 0x5c184, 0x5c308, 0x5c484, 0x5c608, 0x5c784, 0x5c800, 0x5d003, 0x5eb00, 0x5ef03,
    0x5f308, 0x5f500, 0x60609, 0x60908, 0x60b09, 0x60c08, 0x60e09, 0x61084, 0x61b08, 0x61c00,
    0x61d0d, 0x61e08, 0x62003, 0x64b84, 0x66005, 0x66a08, 0x66e03, 0x67084, 0x67103, 0x6d408,
    0x6d503, 0x6d684, 0x6dd00, 0x6de09, 0x6df84, 0x6e503, 0x6e784, 0x6e909, 0x6ea84, 0x6ee03,
    0x6f005, 0x6fa03, 0x6fd09, 0x6ff03, 0x70008, 0x70e00, 0x71003, 0x71184, 0x71203, 0x73084,
    0x74b00, 0x74d03, 0x7a604, 0x7b103, 0x7b200, 0x7c005, 0x7ca03, 0x7eb84, 0x7f403, 0x7f609,
    0x7f708, 0x7fa03, 0x7fb00, 0x7fd04, 0x7fe09, 0x80003, 0x81684, 0x81a03, 0x81b84, 0x82403,
    0x82584, 0x82803, 0x82984, 0x82e00, 0x83008, 0x83f00, 0x84003, 0x85984, 0x85c00, 0x85e08,
    0x85f00, 0x86003, 0x86b00, 0x87003, 0x88809, 0x88903, 0x88f00, 0x89704, 0x8a003, 0x8ca04,
    0x8d484, 0x8e200, 0x8e384, 0x90004, 0x90403, 0x93a04, 0x93c84, 0x93d03, 0x93e04, 0x94d84,
    0x94e04, 0x95003, 0x95184, 0x95504, 0x95883, 0x96003, 0x96204, 0x96408, 0x96605, 0x97008,
    0x97103, 0x98104, 0x98400, 0x98503, 0x98d00, 0x98f03, 0x99100, 0x99303, 0x9a900, 0x9aa03,
    0x9b100, 0x9b203, 0x9b300, 0x9b603, 0x9ba00, 0x9bc84, 0x9bd03, 0x9be84, 0x9bf04, 0x9c500,
    0x9c704, 0x9c900, 0x9cb04, 0x9cd84, 0x9ce03, 0x9cf00, 0x9d784, 0x9d800, 0x9dc83, 0x9de00,
    0x9df83, 0x9e003, 0x9e204, 0x9e400, 0x9e605, 0x9f003, 0x9f209, 0x9f406, 0x9fa09, 0x9fc03,
    0x9fd0d, 0x9fe04, 0x9ff00, 0xa0104, 0xa0400, 0xa0503, 0xa0b00, 0xa0f03, 0xa1100, 0xa1303,
    0xa2900, 0xa2a03, 0xa3100, 0xa3203, 0xa3383, 0xa3400, 0xa3503, 0xa3683, 0xa3700, 0xa3803,
    0xa3a00, 0xa3c84, 0xa3d00, 0xa3e04, 0xa4300, 0xa4704, 0xa4900, 0xa4b04, 0xa4d84, 0xa4e00,
    0xa5104, 0xa5200, 0xa5983, 0xa5c03, 0xa5d00, 0xa5e83, 0xa5f00, 0xa6605, 0xa7004, 0xa7203,
    0xa7504, 0xa760d, 0xa7700, 0xa8104, 0xa8400, 0xa8503, 0xa8e00, 0xa8f03, 0xa9200, 0xa9303,
    0xaa900, 0xaaa03, 0xab100, 0xab203, 0xab400, 0xab503, 0xaba00, 0xabc84, 0xabd03, 0xabe04,
    0xac600, 0xac704, 0xaca00, 0xacb04, 0xacd84, 0xace00, 0xad003, 0xad100, 0xae003, 0xae204,
    0xae400, 0xae605, 0xaf008, 0xaf109, 0xaf200, 0xaf903, 0xafa04, 0xb0000, 0xb0104, 0xb0400,
    0xb0503, 0xb0d00, 0xb0f03, 0xb1100, 0xb1303, 0xb2900, 0xb2a03, 0xb3100, 0xb3203, 0xb3400,
    0xb3503, 0xb3a00, 0xb3c84, 0xb3d03, 0xb3e84, 0xb3f04, 0xb4500, 0xb4704, 0xb4900, 0xb4b04,
    0xb4d84, 0xb4e00, 0xb5504, 0xb5684, 0xb5800, 0xb5c83, 0xb5e00, 0xb5f03, 0xb6204, 0xb6400,
    0xb6605, 0xb7009, 0xb7103, 0xb7206, 0xb7800, 0xb8204, 0xb8303, 0xb8400, 0xb8503, 0xb8b00,
    0xb8e03, 0xb9100, 0xb9203, 0xb9600, 0xb9903, 0xb9b00, 0xb9c03, 0xb9d00, 0xb9e03, 0xba000,
    0xba303, 0xba500, 0xba803, 0xbab00, 0xbae03, 0xbba00, 0xbbe84, 0xbbf04, 0xbc300, 0xbc604,
    0xbc900, 0xbca04, 0xbcd84, 0xbce00, 0xbd003, 0xbd100, 0xbd784, 0xbd800, 0xbe605, 0xbf006,
    0xbf309, 0xbfb00, 0xc0004, 0xc0503, 0xc0d00, 0xc0e03, 0xc1100, 0xc1203, 0xc2900, 0xc2a03,
    0xc3a00, 0xc3c04, 0xc3d03, 0xc3e04, 0xc4500, 0xc4604, 0xc4900, 0xc4a04, 0xc4d84, 0xc4e00,
    0xc5584, 0xc5700, 0xc5803, 0xc5b00, 0xc5d03, 0xc5e00, 0xc6003, 0xc6204, 0xc6400, 0xc6605,
    0xc7000, 0xc770d, 0xc7806, 0xc7f09, 0xc8003, 0xc8104, 0xc840d, 0xc8503, 0xc8d00, 0xc8e03,
    0xc9100, 0xc9203, 0xca900, 0xcaa03, 0xcb400, 0xcb503, 0xcba00, 0xcbc84, 0xcbd03, 0xcbe04,
    0xcc284, 0xcc304, 0xcc500, 0xcc604, 0xcc900, 0xcca04, 0xccd84, 0xcce00, 0xcd584, 0xcd700,
    0xcdd03, 0xcdf00, 0xce003, 0xce204, 0xce400, 0xce605, 0xcf000, 0xcf103, 0xcf304, 0xcf400,
    0xd0004, 0xd0403, 0xd0d00, 0xd0e03, 0xd1100, 0xd1203, 0xd3b04, 0xd3d03, 0xd3e84, 0xd3f04,
    0xd4500, 0xd4604, 0xd4900, 0xd4a04, 0xd4d84, 0xd4e03, 0xd4f09, 0xd5000, 0xd5403, 0xd5784,
    0xd5806, 0xd5f03, 0xd6204, 0xd6400, 0xd6605, 0xd7006, 0xd7909, 0xd7a03, 0xd8000, 0xd8104,
    0xd8400, 0xd8503, 0xd9700, 0xd9a03, 0xdb200, 0xdb303, 0xdbc00, 0xdbd03, 0xdbe00, 0xdc003,
    0xdc700, 0xdca84, 0xdcb00, 0xdcf84, 0xdd004, 0xdd500, 0xdd604, 0xdd700, 0xdd804, 0xddf84,
    0xde000, 0xde605, 0xdf000, 0xdf204, 0xdf408, 0xdf500, 0xe0103, 0xe3104, 0xe3203, 0xe3404,
    0xe3884, 0xe3b00, 0xe3f09, 0xe4003, 0xe4704, 0xe4884, 0xe4c04, 0xe4f08, 0xe5005, 0xe5a08,
    0xe5c00, 0xe8103, 0xe8300, 0xe8403, 0xe8500, 0xe8603, 0xe8b00, 0xe8c03, 0xea400, 0xea503,
    0xea600, 0xea703, 0xeb104, 0xeb203, 0xeb404, 0xeb884, 0xeba04, 0xebd03, 0xebe00, 0xec003,
    0xec500, 0xec603, 0xec700, 0xec884, 0xecc04, 0xecf00, 0xed005, 0xeda00, 0xedc03, 0xee000,
    0xf0003, 0xf0109, 0xf0408, 0xf1309, 0xf1408, 0xf1509, 0xf1884, 0xf1a09, 0xf2005, 0xf2a06,
    0xf3409, 0xf3584, 0xf3609, 0xf3784, 0xf3809, 0xf3984, 0xf3a08, 0xf3e04, 0xf4003, 0xf4383,
    0xf4403, 0xf4800, 0xf4903, 0xf4d83, 0xf4e03, 0xf5283, 0xf5303, 0xf5783, 0xf5803, 0xf5c83,
    0xf5d03, 0xf6983, 0xf6a03, 0xf6d00, 0xf7184, 0xf7704, 0xf7884, 0xf7904, 0xf7a84, 0xf7e04,
    0xf8084, 0xf8508, 0xf8684, 0xf8803, 0xf8d04, 0xf9384, 0xf9404, 0xf9800, 0xf9904, 0xf9d84,
    0xf9e04, 0xfa284, 0xfa304, 0xfa784, 0xfa804, 0xfac84, 0xfad04, 0xfb984, 0xfba04, 0xfbd00,
    0xfbe09, 0xfc684, 0xfc709, 0xfcd00, 0xfce09, 0xfd008, 0xfd509, 0xfd908, 0xfdb00, 0x100003,
    0x102b04, 0x102e84, 0x102f04, 0x103784, 0x103804, 0x103984, 0x103b04, 0x103f03, 0x104005,
    0x104a08, 0x105003, 0x105604, 0x105a03, 0x105e04, 0x106103, 0x106204, 0x106503, 0x106704,
    0x106e03, 0x107104, 0x107503, 0x108204, 0x108d84, 0x108e03, 0x108f04, 0x109005, 0x109a04,
    0x109e09, 0x10a001, 0x10c600, 0x10c701, 0x10c800, 0x10cd01, 0x10ce00, 0x10d002, 0x10fb08,
    0x10fc03, 0x10fd02, 0x110003, 0x116183, 0x117603, 0x11a883, 0x11c303, 0x124900, 0x124a03,
    0x124e00, 0x125003, 0x125700, 0x125803, 0x125900, 0x125a03, 0x125e00, 0x126003, 0x128900,
    0x128a03, 0x128e00, 0x129003, 0x12b100, 0x12b203, 0x12b600, 0x12b803, 0x12bf00, 0x12c003,
    0x12c100, 0x12c203, 0x12c600, 0x12c803, 0x12d700, 0x12d803, 0x131100, 0x131203, 0x131600,
    0x131803, 0x135b00, 0x135d84, 0x136008, 0x136906, 0x137d00, 0x138003, 0x139009, 0x139a00,
    0x13a001, 0x13f600, 0x13f802, 0x13fe00, 0x140008, 0x140103, 0x166d0e, 0x166e08, 0x166f03,
    0x16800b, 0x168103, 0x169b08, 0x169d00, 0x16a003, 0x16eb08, 0x16ee05, 0x16f103, 0x16f900,
    0x170003, 0x171204, 0x171484, 0x171504, 0x171600, 0x171f03, 0x173204, 0x173484, 0x173508,
    0x173700, 0x174003, 0x175204, 0x175400, 0x176003, 0x176d00, 0x176e03, 0x177100, 0x177204,
    0x177400, 0x178003, 0x17b404, 0x17d284, 0x17d304, 0x17d408, 0x17d703, 0x17d808, 0x17db09,
    0x17dc03, 0x17dd84, 0x17de00, 0x17e005, 0x17ea00, 0x17f006, 0x17fa00, 0x180008, 0x180b04,
    0x180e00, 0x180f04, 0x181005, 0x181a00, 0x182003, 0x187900, 0x188003, 0x188504, 0x188703,
    0x18a984, 0x18aa03, 0x18ab00, 0x18b003, 0x18f600, 0x190003, 0x191f00, 0x192004, 0x192c00,
    0x193004, 0x193984, 0x193c00, 0x194009, 0x194100, 0x194408, 0x194605, 0x195003, 0x196e00,
    0x197003, 0x197500, 0x198003, 0x19ac00, 0x19b003, 0x19ca00, 0x19d005, 0x19da06, 0x19db00,
    0x19de09, 0x1a0003, 0x1a1784, 0x1a1904, 0x1a1c00, 0x1a1e08, 0x1a2003, 0x1a5504, 0x1a5f00,
    0x1a6084, 0x1a6104, 0x1a7584, 0x1a7d00, 0x1a7f84, 0x1a8005, 0x1a8a00, 0x1a9005, 0x1a9a00,
    0x1aa008, 0x1aa703, 0x1aa808, 0x1aae00, 0x1ab084, 0x1abe04, 0x1acf00, 0x1b0004, 0x1b0503,
    0x1b3484, 0x1b3604, 0x1b4484, 0x1b4503, 0x1b4d00, 0x1b4e0d, 0x1b5005, 0x1b5a08, 0x1b6109,
    0x1b6b84, 0x1b7409, 0x1b7d0d, 0x1b8004, 0x1b8303, 0x1ba104, 0x1baa84, 0x1bac04, 0x1bae03,
    0x1bb005, 0x1bba03, 0x1be684, 0x1be704, 0x1bf284, 0x1bf400, 0x1bfc08, 0x1c0003, 0x1c2404,
    0x1c3784, 0x1c3800, 0x1c3b08, 0x1c4005, 0x1c4a00, 0x1c4d03, 0x1c5005, 0x1c5a03, 0x1c7e08,
    0x1c8002, 0x1c8901, 0x1c8a02, 0x1c8b00, 0x1c9001, 0x1cbb00, 0x1cbd01, 0x1cc008, 0x1cc800,
    0x1cd084, 0x1cd308, 0x1cd484, 0x1ce104, 0x1ce284, 0x1ce903, 0x1ced84, 0x1cee03, 0x1cf484,
    0x1cf503, 0x1cf704, 0x1cf884, 0x1cfa03, 0x1cfb00, 0x1d0002, 0x1d2c03, 0x1d6b02, 0x1d7803,
    0x1d7902, 0x1d9b03, 0x1dc084, 0x1df604, 0x1dfb84, 0x1e0001, 0x1e0102, 0x1e0201, 0x1e0302,
    0x1e0401, 0x1e0502, 0x1e0601, 0x1e0702, 0x1e0801, 0x1e0902, 0x1e0a01, 0x1e0b02, 0x1e0c01,
    0x1e0d02, 0x1e0e01, 0x1e0f02, 0x1e1001, 0x1e1102, 0x1e1201, 0x1e1302, 0x1e1401, 0x1e1502,
    0x1e1601, 0x1e1702, 0x1e1801, 0x1e1902, 0x1e1a01, 0x1e1b02, 0x1e1c01, 0x1e1d02, 0x1e1e01,
    0x1e1f02, 0x1e2001, 0x1e2102, 0x1e2201, 0x1e2302, 0x1e2401, 0x1e2502, 0x1e2601, 0x1e2702,
    0x1e2801, 0x1e2902, 0x1e2a01, 0x1e2b02, 0x1e2c01, 0x1e2d02, 0x1e2e01, 0x1e2f02, 0x1e3001,
    0x1e3102, 0x1e3201, 0x1e3302, 0x1e3401, 0x1e3502, 0x1e3601, 0x1e3702, 0x1e3801, 0x1e3902,
    0x1e3a01, 0x1e3b02, 0x1e3c01, 0x1e3d02, 0x1e3e01, 0x1e3f02, 0x1e4001, 0x1e4102, 0x1e4201,
    0x1e4302, 0x1e4401, 0x1e4502, 0x1e4601, 0x1e4702, 0x1e4801, 0x1e4902, 0x1e4a01, 0x1e4b02,
    0x1e4c01, 0x1e4d02, 0x1e4e01, 0x1e4f02, 0x1e5001, 0x1e5102, 0x1e5201, 0x1e5302, 0x1e5401,
    0x1e5502, 0x1e5601, 0x1e5702, 0x1e5801, 0x1e5902, 0x1e5a01, 0x1e5b02, 0x1e5c01, 0x1e5d02,
    0x1e5e01, 0x1e5f02, 0x1e6001, 0x1e6102, 0x1e6201, 0x1e6302, 0x1e6401, 0x1e6502, 0x1e6601,
    0x1e6702, 0x1e6801, 0x1e6902, 0x1e6a01, 0x1e6b02, 0x1e6c01, 0x1e6d02, 0x1e6e01, 0x1e6f02,
    0x1e7001, 0x1e7102, 0x1e7201, 0x1e7302, 0x1e7401, 0x1e7502, 0x1e7601, 0x1e7702, 0x1e7801,
    0x1e7902, 0x1e7a01, 0x1e7b02, 0x1e7c01, 0x1e7d02, 0x1e7e01, 0x1e7f02, 0x1e8001, 0x1e8102,
    0x1e8201, 0x1e8302, 0x1e8401, 0x1e8502, 0x1e8601, 0x1e8702, 0x1e8801, 0x1e8902, 0x1e8a01,
    0x1e8b02, 0x1e8c01, 0x1e8d02, 0x1e8e01, 0x1e8f02, 0x1e9001, 0x1e9102, 0x1e9201, 0x1e9302,
    0x1e9401, 0x1e9502, 0x1e9e01, 0x1e9f02, 0x1ea001, 0x1ea102, 0x1ea201, 0x1ea302, 0x1ea401,
    0x1ea502, 0x1ea601, 0x1ea702, 0x1ea801, 0x1ea902, 0x1eaa01, 0x1eab02, 0x1eac01, 0x1ead02,
    0x1eae01, 0x1eaf02, 0x1eb001, 0x1eb102, 0x1eb201, 0x1eb302, 0x1eb401, 0x1eb502, 0x1eb601,
    0x1eb702, 0x1eb801, 0x1eb902, 0x1eba01, 0x1ebb02, 0x1ebc01, 0x1ebd02, 0x1ebe01, 0x1ebf02,
    0x1ec001, 0x1ec102, 0x1ec201, 0x1ec302, 0x1ec401, 0x1ec502, 0x1ec601, 0x1ec702, 0x1ec801,
    0x1ec902, 0x1eca01, 0x1ecb02, 0x1ecc01, 0x1ecd02, 0x1ece01, 0x1ecf02, 0x1ed001, 0x1ed102,
    0x1ed201, 0x1ed302, 0x1ed401, 0x1ed502, 0x1ed601, 0x1ed702, 0x1ed801, 0x1ed902, 0x1eda01,
    0x1edb02, 0x1edc01, 0x1edd02, 0x1ede01, 0x1edf02, 0x1ee001, 0x1ee102, 0x1ee201, 0x1ee302,
    0x1ee401, 0x1ee502, 0x1ee601, 0x1ee702, 0x1ee801, 0x1ee902, 0x1eea01, 0x1eeb02, 0x1eec01,
    0x1eed02, 0x1eee01, 0x1eef02, 0x1ef001, 0x1ef102, 0x1ef201, 0x1ef302, 0x1ef401, 0x1ef502,
    0x1ef601, 0x1ef702, 0x1ef801, 0x1ef902, 0x1efa01, 0x1efb02, 0x1efc01, 0x1efd02, 0x1efe01,
    0x1eff02, 0x1f0801, 0x1f1002, 0x1f1600, 0x1f1801, 0x1f1e00, 0x1f2002, 0x1f2801, 0x1f3002,
    0x1f3801, 0x1f4002, 0x1f4600, 0x1f4801, 0x1f4e00, 0x1f5002, 0x1f5800, 0x1f5901, 0x1f5a00,
    0x1f5b01, 0x1f5c00, 0x1f5d01, 0x1f5e00, 0x1f5f01, 0x1f6002, 0x1f6801, 0x1f7002, 0x1f7182,
    0x1f7202, 0x1f7382, 0x1f7402, 0x1f7582, 0x1f7602, 0x1f7782, 0x1f7802, 0x1f7982, 0x1f7a02,
    0x1f7b82, 0x1f7c02, 0x1f7d82, 0x1f7e00, 0x1f8002, 0x1f8801, 0x1f9002, 0x1f9801, 0x1fa002,
    0x1fa801, 0x1fb002, 0x1fb500, 0x1fb602, 0x1fb801, 0x1fbb81, 0x1fbc01, 0x1fbd09, 0x1fbe82,
    0x1fbf09, 0x1fc202, 0x1fc500, 0x1fc602, 0x1fc801, 0x1fc981, 0x1fca01, 0x1fcb81, 0x1fcc01,
    0x1fcd09, 0x1fd002, 0x1fd382, 0x1fd400, 0x1fd602, 0x1fd801, 0x1fdb81, 0x1fdc00, 0x1fdd09,
    0x1fe002, 0x1fe382, 0x1fe402, 0x1fe801, 0x1feb81, 0x1fec01, 0x1fed09, 0x1fee89, 0x1ff000,
    0x1ff202, 0x1ff500, 0x1ff602, 0x1ff801, 0x1ff981, 0x1ffa01, 0x1ffb81, 0x1ffc01, 0x1ffd89,
    0x1ffe09, 0x1fff00, 0x20008b, 0x20020b, 0x200b00, 0x200c0c, 0x200e00, 0x201008, 0x20280b,
    0x202a00, 0x202f0b, 0x203008, 0x203f07, 0x204108, 0x204409, 0x204508, 0x205209, 0x205308,
    0x205407, 0x205508, 0x205f0b, 0x206000, 0x207006, 0x207103, 0x207200, 0x207406, 0x207a09,
    0x207d08, 0x207f03, 0x208006, 0x208a09, 0x208d08, 0x208f00, 0x209003, 0x209d00, 0x20a009,
    0x20c100, 0x20d084, 0x20dd04, 0x20e184, 0x20e204, 0x20e584, 0x20f100, 0x210009, 0x210201,
    0x210309, 0x210701, 0x210809, 0x210a02, 0x210b01, 0x210e02, 0x211001, 0x211302, 0x211409,
    0x211501, 0x211609, 0x211901, 0x211e09, 0x212401, 0x212509, 0x212681, 0x212709, 0x212801,
    0x212909, 0x212a81, 0x212c01, 0x212e09, 0x212f02, 0x213001, 0x213402, 0x213503, 0x213902,
    0x213a09, 0x213c02, 0x213e01, 0x214009, 0x214501, 0x214602, 0x214a09, 0x214e02, 0x214f09,
    0x215006, 0x216005, 0x218301, 0x218402, 0x218505, 0x218906, 0x218a09, 0x218c00, 0x219009,
    0x230808, 0x230c09, 0x232988, 0x232b09, 0x242a00, 0x244009, 0x244b00, 0x246006, 0x249c09,
    0x24b60a, 0x24ea06, 0x250009, 0x276808, 0x277606, 0x279409, 0x27c508, 0x27c709, 0x27e608,
    0x27f009, 0x298308, 0x299909, 0x29d808, 0x29dc09, 0x29fc08, 0x29fe09, 0x2adc89, 0x2add09,
    0x2b7400, 0x2b7609, 0x2b9600, 0x2b9709, 0x2c0001, 0x2c3002, 0x2c6001, 0x2c6102, 0x2c6201,
    0x2c6502, 0x2c6701, 0x2c6802, 0x2c6901, 0x2c6a02, 0x2c6b01, 0x2c6c02, 0x2c6d01, 0x2c7102,
    0x2c7201, 0x2c7302, 0x2c7501, 0x2c7602, 0x2c7c03, 0x2c7e01, 0x2c8102, 0x2c8201, 0x2c8302,
    0x2c8401, 0x2c8502, 0x2c8601, 0x2c8702, 0x2c8801, 0x2c8902, 0x2c8a01, 0x2c8b02, 0x2c8c01,
    0x2c8d02, 0x2c8e01, 0x2c8f02, 0x2c9001, 0x2c9102, 0x2c9201, 0x2c9302, 0x2c9401, 0x2c9502,
    0x2c9601, 0x2c9702, 0x2c9801, 0x2c9902, 0x2c9a01, 0x2c9b02, 0x2c9c01, 0x2c9d02, 0x2c9e01,
    0x2c9f02, 0x2ca001, 0x2ca102, 0x2ca201, 0x2ca302, 0x2ca401, 0x2ca502, 0x2ca601, 0x2ca702,
    0x2ca801, 0x2ca902, 0x2caa01, 0x2cab02, 0x2cac01, 0x2cad02, 0x2cae01, 0x2caf02, 0x2cb001,
    0x2cb102, 0x2cb201, 0x2cb302, 0x2cb401, 0x2cb502, 0x2cb601, 0x2cb702, 0x2cb801, 0x2cb902,
    0x2cba01, 0x2cbb02, 0x2cbc01, 0x2cbd02, 0x2cbe01, 0x2cbf02, 0x2cc001, 0x2cc102, 0x2cc201,
    0x2cc302, 0x2cc401, 0x2cc502, 0x2cc601, 0x2cc702, 0x2cc801, 0x2cc902, 0x2cca01, 0x2ccb02,
    0x2ccc01, 0x2ccd02, 0x2cce01, 0x2ccf02, 0x2cd001, 0x2cd102, 0x2cd201, 0x2cd302, 0x2cd401,
    0x2cd502, 0x2cd601, 0x2cd702, 0x2cd801, 0x2cd902, 0x2cda01, 0x2cdb02, 0x2cdc01, 0x2cdd02,
    0x2cde01, 0x2cdf02, 0x2ce001, 0x2ce102, 0x2ce201, 0x2ce302, 0x2ce509, 0x2ceb01, 0x2cec02,
    0x2ced01, 0x2cee02, 0x2cef84, 0x2cf201, 0x2cf302, 0x2cf400, 0x2cf908, 0x2cfd06, 0x2cfe08,
    0x2d0002, 0x2d2600, 0x2d2702, 0x2d2800, 0x2d2d02, 0x2d2e00, 0x2d3003, 0x2d6800, 0x2d6f03,
    0x2d7008, 0x2d7100, 0x2d7f84, 0x2d8003, 0x2d9700, 0x2da003, 0x2da700, 0x2da803, 0x2daf00,
    0x2db003, 0x2db700, 0x2db803, 0x2dbf00, 0x2dc003, 0x2dc700, 0x2dc803, 0x2dcf00, 0x2dd003,
    0x2dd700, 0x2dd803, 0x2ddf00, 0x2de084, 0x2e0008, 0x2e2f03, 0x2e3008, 0x2e430d, 0x2e5009,
    0x2e520d, 0x2e5e00, 0x2e8009, 0x2e9a00, 0x2e9b09, 0x2ef400, 0x2f0009, 0x2fd600, 0x2ff009,
    0x30000b, 0x300108, 0x300409, 0x300503, 0x300705, 0x300808, 0x301209, 0x301408, 0x302009,
    0x302105, 0x302a84, 0x303008, 0x303103, 0x303609, 0x303805, 0x303b03, 0x303d08, 0x303e09,
    0x304000, 0x304103, 0x309700, 0x309984, 0x309b09, 0x309d03, 0x30a008, 0x30a103, 0x30fb08,
    0x30fc03, 0x310000, 0x310503, 0x313000, 0x313103, 0x318f00, 0x319009, 0x319206, 0x319609,
    0x31a003, 0x31c009, 0x31e600, 0x31ef09, 0x31f003, 0x320009, 0x321f00, 0x322006, 0x322a09,
    0x324806, 0x325009, 0x325106, 0x326009, 0x328006, 0x328a09, 0x32b106, 0x32c009, 0x340003,
    0x4dc009, 0x4e0003, 0xa48d00, 0xa49009, 0xa4c700, 0xa4d003, 0xa4fe08, 0xa50003, 0xa60d08,
    0xa61003, 0xa62005, 0xa62a03, 0xa62c00, 0xa64001, 0xa64102, 0xa64201, 0xa64302, 0xa64401,
    0xa64502, 0xa64601, 0xa64702, 0xa64801, 0xa64902, 0xa64a01, 0xa64b02, 0xa64c01, 0xa64d02,
    0xa64e01, 0xa64f02, 0xa65001, 0xa65102, 0xa65201, 0xa65302, 0xa65401, 0xa65502, 0xa65601,
    0xa65702, 0xa65801, 0xa65902, 0xa65a01, 0xa65b02, 0xa65c01, 0xa65d02, 0xa65e01, 0xa65f02,
    0xa66001, 0xa66102, 0xa66201, 0xa66302, 0xa66401, 0xa66502, 0xa66601, 0xa66702, 0xa66801,
    0xa66902, 0xa66a01, 0xa66b02, 0xa66c01, 0xa66d02, 0xa66e03, 0xa66f84, 0xa67004, 0xa67308,
    0xa67484, 0xa67e08, 0xa67f03, 0xa68001, 0xa68102, 0xa68201, 0xa68302, 0xa68401, 0xa68502,
    0xa68601, 0xa68702, 0xa68801, 0xa68902, 0xa68a01, 0xa68b02, 0xa68c01, 0xa68d02, 0xa68e01,
    0xa68f02, 0xa69001, 0xa69102, 0xa69201, 0xa69302, 0xa69401, 0xa69502, 0xa69601, 0xa69702,
    0xa69801, 0xa69902, 0xa69a01, 0xa69b02, 0xa69c03, 0xa69e84, 0xa6a003, 0xa6e605, 0xa6f084,
    0xa6f208, 0xa6f800, 0xa70009, 0xa71703, 0xa72009, 0xa72201, 0xa72302, 0xa72401, 0xa72502,
    0xa72601, 0xa72702, 0xa72801, 0xa72902, 0xa72a01, 0xa72b02, 0xa72c01, 0xa72d02, 0xa72e01,
    0xa72f02, 0xa73201, 0xa73302, 0xa73401, 0xa73502, 0xa73601, 0xa73702, 0xa73801, 0xa73902,
    0xa73a01, 0xa73b02, 0xa73c01, 0xa73d02, 0xa73e01, 0xa73f02, 0xa74001, 0xa74102, 0xa74201,
    0xa74302, 0xa74401, 0xa74502, 0xa74601, 0xa74702, 0xa74801, 0xa74902, 0xa74a01, 0xa74b02,
    0xa74c01, 0xa74d02, 0xa74e01, 0xa74f02, 0xa75001, 0xa75102, 0xa75201, 0xa75302, 0xa75401,
    0xa75502, 0xa75601, 0xa75702, 0xa75801, 0xa75902, 0xa75a01, 0xa75b02, 0xa75c01, 0xa75d02,
    0xa75e01, 0xa75f02, 0xa76001, 0xa76102, 0xa76201, 0xa76302, 0xa76401, 0xa76502, 0xa76601,
    0xa76702, 0xa76801, 0xa76902, 0xa76a01, 0xa76b02, 0xa76c01, 0xa76d02, 0xa76e01, 0xa76f02,
    0xa77003, 0xa77102, 0xa77901, 0xa77a02, 0xa77b01, 0xa77c02, 0xa77d01, 0xa77f02, 0xa78001,
    0xa78102, 0xa78201, 0xa78302, 0xa78401, 0xa78502, 0xa78601, 0xa78702, 0xa78803, 0xa78909,
    0xa78b01, 0xa78c02, 0xa78d01, 0xa78e02, 0xa78f03, 0xa79001, 0xa79102, 0xa79201, 0xa79302,
    0xa79601, 0xa79702, 0xa79801, 0xa79902, 0xa79a01, 0xa79b02, 0xa79c01, 0xa79d02, 0xa79e01,
    0xa79f02, 0xa7a001, 0xa7a102, 0xa7a201, 0xa7a302, 0xa7a401, 0xa7a502, 0xa7a601, 0xa7a702,
    0xa7a801, 0xa7a902, 0xa7aa01, 0xa7af02, 0xa7b001, 0xa7b502, 0xa7b601, 0xa7b702, 0xa7b801,
    0xa7b902, 0xa7ba01, 0xa7bb02, 0xa7bc01, 0xa7bd02, 0xa7be01, 0xa7bf02, 0xa7c001, 0xa7c102,
    0xa7c201, 0xa7c302, 0xa7c401, 0xa7c802, 0xa7c901, 0xa7ca02, 0xa7cb01, 0xa7cd02, 0xa7ce00,
    0xa7d001, 0xa7d102, 0xa7d200, 0xa7d302, 0xa7d400, 0xa7d502, 0xa7d601, 0xa7d702, 0xa7d801,
    0xa7d902, 0xa7da01, 0xa7db02, 0xa7dc01, 0xa7dd00, 0xa7f203, 0xa7f501, 0xa7f602, 0xa7f703,
    0xa7fa02, 0xa7fb03, 0xa80204, 0xa80303, 0xa80684, 0xa80703, 0xa80b04, 0xa80c03, 0xa82304,
    0xa82809, 0xa82c04, 0xa82d00, 0xa83006, 0xa83609, 0xa83a00, 0xa84003, 0xa87408, 0xa87800,
    0xa88004, 0xa88203, 0xa8b404, 0xa8c484, 0xa8c504, 0xa8c600, 0xa8ce08, 0xa8d005, 0xa8da00,
    0xa8e084, 0xa8f203, 0xa8f808, 0xa8fb03, 0xa8fc08, 0xa8fd03, 0xa8ff04, 0xa90005, 0xa90a03,
    0xa92604, 0xa92b84, 0xa92e08, 0xa93003, 0xa94704, 0xa95384, 0xa95400, 0xa95f08, 0xa96003,
    0xa97d00, 0xa98004, 0xa98403, 0xa9b384, 0xa9b404, 0xa9c084, 0xa9c108, 0xa9ce00, 0xa9cf03,
    0xa9d005, 0xa9da00, 0xa9de08, 0xa9e003, 0xa9e504, 0xa9e603, 0xa9f005, 0xa9fa03, 0xa9ff00,
    0xaa0003, 0xaa2904, 0xaa3700, 0xaa4003, 0xaa4304, 0xaa4403, 0xaa4c04, 0xaa4e00, 0xaa5005,
    0xaa5a00, 0xaa5c08, 0xaa6003, 0xaa7709, 0xaa7a03, 0xaa7b04, 0xaa7e03, 0xaab084, 0xaab103,
    0xaab284, 0xaab503, 0xaab784, 0xaab903, 0xaabe84, 0xaac003, 0xaac184, 0xaac203, 0xaac300,
    0xaadb03, 0xaade08, 0xaae003, 0xaaeb04, 0xaaf008, 0xaaf203, 0xaaf504, 0xaaf684, 0xaaf700,
    0xab0103, 0xab0700, 0xab0903, 0xab0f00, 0xab1103, 0xab1700, 0xab2003, 0xab2700, 0xab2803,
    0xab2f00, 0xab3002, 0xab5b09, 0xab5c03, 0xab6002, 0xab6903, 0xab6a09, 0xab6c00, 0xab7002,
    0xabc003, 0xabe304, 0xabeb08, 0xabec04, 0xabed84, 0xabee00, 0xabf005, 0xabfa00, 0xac0003,
    0xd7a400, 0xd7b003, 0xd7c700, 0xd7cb03, 0xd7fc00, 0xf90083, 0xfa0e03, 0xfa1083, 0xfa1103,
    0xfa1283, 0xfa1303, 0xfa1583, 0xfa1f03, 0xfa2083, 0xfa2103, 0xfa2283, 0xfa2303, 0xfa2583,
    0xfa2703, 0xfa2a83, 0xfa6e00, 0xfa7083, 0xfada00, 0xfb0002, 0xfb0700, 0xfb1302, 0xfb1800,
    0xfb1d83, 0xfb1e84, 0xfb1f83, 0xfb2003, 0xfb2909, 0xfb2a83, 0xfb3700, 0xfb3883, 0xfb3d00,
    0xfb3e83, 0xfb3f00, 0xfb4083, 0xfb4200, 0xfb4383, 0xfb4500, 0xfb4683, 0xfb4f03, 0xfbb209,
    0xfbc300, 0xfbd303, 0xfd3e08, 0xfd4009, 0xfd5003, 0xfd9000, 0xfd9203, 0xfdc800, 0xfdcf09,
    0xfdd000, 0xfdf003, 0xfdfc09, 0xfe0004, 0xfe1008, 0xfe1a00, 0xfe2084, 0xfe3008, 0xfe3307,
    0xfe3508, 0xfe4d07, 0xfe5008, 0xfe5300, 0xfe5408, 0xfe6209, 0xfe6308, 0xfe6409, 0xfe6700,
    0xfe6808, 0xfe6909, 0xfe6a08, 0xfe6c00, 0xfe7003, 0xfe7500, 0xfe7603, 0xfefd00, 0xff0108,
    0xff0409, 0xff0508, 0xff0b09, 0xff0c08, 0xff1005, 0xff1a08, 0xff1c09, 0xff1f08, 0xff2101,
    0xff3b08, 0xff3e09, 0xff3f07, 0xff4009, 0xff4102, 0xff5b08, 0xff5c09, 0xff5d08, 0xff5e09,
    0xff5f08, 0xff6603, 0xffbf00, 0xffc203, 0xffc800, 0xffca03, 0xffd000, 0xffd203, 0xffd800,
    0xffda03, 0xffdd00, 0xffe009, 0xffe700, 0xffe809, 0xffef00, 0xfffc09, 0xfffe00, 0x1000003,
    0x1000c00, 0x1000d03, 0x1002700, 0x1002803, 0x1003b00, 0x1003c03, 0x1003e00, 0x1003f03,
    0x1004e00, 0x1005003, 0x1005e00, 0x1008003, 0x100fb00, 0x1010008, 0x1010300, 0x1010706,
    0x1013400, 0x1013709, 0x1014005, 0x1017506, 0x1017909, 0x1018a06, 0x1018c09, 0x1018f00,
    0x1019009, 0x1019d00, 0x101a009, 0x101a100, 0x101d009, 0x101fd84, 0x101fe00, 0x1028003,
    0x1029d00, 0x102a003, 0x102d100, 0x102e084, 0x102e106, 0x102fc00, 0x1030003, 0x1032006,
    0x1032400, 0x1032d03, 0x1034105, 0x1034203, 0x1034a05, 0x1034b00, 0x1035003, 0x1037684,
    0x1037b00, 0x1038003, 0x1039e00, 0x1039f08, 0x103a003, 0x103c400, 0x103c803, 0x103d008,
    0x103d105, 0x103d600, 0x1040001, 0x1042802, 0x1045003, 0x1049e00, 0x104a005, 0x104aa00,
    0x104b001, 0x104d400, 0x104d802, 0x104fc00, 0x1050003, 0x1052800, 0x1053003, 0x1056400,
    0x1056f08, 0x1057001, 0x1057b00, 0x1057c01, 0x1058b00, 0x1058c01, 0x1059300, 0x1059401,
    0x1059600, 0x1059702, 0x105a200, 0x105a302, 0x105b200, 0x105b302, 0x105ba00, 0x105bb02,
    0x105bd00, 0x105c003, 0x105f400, 0x1060003, 0x1073700, 0x1074003, 0x1075600, 0x1076003,
    0x1076800, 0x1078003, 0x1078600, 0x1078703, 0x107b100, 0x107b203, 0x107bb00, 0x1080003,
    0x1080600, 0x1080803, 0x1080900, 0x1080a03, 0x1083600, 0x1083703, 0x1083900, 0x1083c03,
    0x1083d00, 0x1083f03, 0x1085600, 0x1085708, 0x1085806, 0x1086003, 0x1087709, 0x1087906,
    0x1088003, 0x1089f00, 0x108a706, 0x108b000, 0x108e003, 0x108f300, 0x108f403, 0x108f600,
    0x108fb06, 0x1090003, 0x1091606, 0x1091c00, 0x1091f08, 0x1092003, 0x1093a00, 0x1093f08,
    0x1094000, 0x1098003, 0x109b800, 0x109bc06, 0x109be03, 0x109c006, 0x109d000, 0x109d206,
    0x10a0003, 0x10a0104, 0x10a0400, 0x10a0504, 0x10a0700, 0x10a0c04, 0x10a0d84, 0x10a0e04,
    0x10a0f84, 0x10a1003, 0x10a1400, 0x10a1503, 0x10a1800, 0x10a1903, 0x10a3600, 0x10a3884,
    0x10a3b00, 0x10a3f84, 0x10a4006, 0x10a4900, 0x10a5008, 0x10a5900, 0x10a6003, 0x10a7d06,
    0x10a7f08, 0x10a8003, 0x10a9d06, 0x10aa000, 0x10ac003, 0x10ac809, 0x10ac903, 0x10ae584,
    0x10ae700, 0x10aeb06, 0x10af008, 0x10af700, 0x10b0003, 0x10b3600, 0x10b3908, 0x10b4003,
    0x10b5600, 0x10b5806, 0x10b6003, 0x10b7300, 0x10b7806, 0x10b8003, 0x10b9200, 0x10b9908,
    0x10b9d00, 0x10ba906, 0x10bb000, 0x10c0003, 0x10c4900, 0x10c8001, 0x10cb300, 0x10cc002,
    0x10cf300, 0x10cfa06, 0x10d0003, 0x10d2404, 0x10d2800, 0x10d3005, 0x10d3a00, 0x10d4005,
    0x10d4a03, 0x10d5001, 0x10d6600, 0x10d6904, 0x10d6e0d, 0x10d6f03, 0x10d7002, 0x10d8600,
    0x10d8e09, 0x10d9000, 0x10e6006, 0x10e7f00, 0x10e8003, 0x10eaa00, 0x10eab04, 0x10ead0d,
    0x10eae00, 0x10eb003, 0x10eb200, 0x10ec203, 0x10ec500, 0x10efc04, 0x10f0003, 0x10f1d06,
    0x10f2703, 0x10f2800, 0x10f3003, 0x10f4604, 0x10f5106, 0x10f550d, 0x10f5a00, 0x10f7003,
    0x10f8204, 0x10f860d, 0x10f8a00, 0x10fb003, 0x10fc506, 0x10fcc00, 0x10fe003, 0x10ff700,
    0x1100004, 0x1100303, 0x1103804, 0x1104684, 0x1104708, 0x1104e00, 0x1105206, 0x1106605,
    0x1107004, 0x1107103, 0x1107304, 0x1107503, 0x1107600, 0x1107f84, 0x1108004, 0x1108303,
    0x110b004, 0x110b984, 0x110bb08, 0x110bd00, 0x110be08, 0x110c204, 0x110c300, 0x110d003,
    0x110e900, 0x110f005, 0x110fa00, 0x1110084, 0x1110303, 0x1112784, 0x1112804, 0x1113384,
    0x1113500, 0x1113605, 0x1114008, 0x1114403, 0x1114504, 0x1114703, 0x1114800, 0x1115003,
    0x1117384, 0x1117408, 0x1117603, 0x1117700, 0x1118004, 0x1118303, 0x111b304, 0x111c084,
    0x111c103, 0x111c508, 0x111c904, 0x111ca84, 0x111cb04, 0x111cd08, 0x111ce04, 0x111d005,
    0x111da03, 0x111db08, 0x111dc03, 0x111dd08, 0x111e000, 0x111e106, 0x111f500, 0x1120003,
    0x1121200, 0x1121303, 0x1122c04, 0x1123584, 0x1123704, 0x1123808, 0x1123e04, 0x1123f03,
    0x1124104, 0x1124200, 0x1128003, 0x1128700, 0x1128803, 0x1128900, 0x1128a03, 0x1128e00,
    0x1128f03, 0x1129e00, 0x1129f03, 0x112a908, 0x112aa00, 0x112b003, 0x112df04, 0x112e984,
    0x112eb00, 0x112f005, 0x112fa00, 0x1130004, 0x1130400, 0x1130503, 0x1130d00, 0x1130f03,
    0x1131100, 0x1131303, 0x1132900, 0x1132a03, 0x1133100, 0x1133203, 0x1133400, 0x1133503,
    0x1133a00, 0x1133b04, 0x1133c84, 0x1133d03, 0x1133e84, 0x1133f04, 0x1134500, 0x1134704,
    0x1134900, 0x1134b04, 0x1134d84, 0x1134e00, 0x1135003, 0x1135100, 0x1135784, 0x1135800,
    0x1135d03, 0x1136204, 0x1136400, 0x1136684, 0x1136d00, 0x1137084, 0x1137500, 0x1138003,
    0x1138a00, 0x1138b03, 0x1138c00, 0x1138e03, 0x1138f00, 0x1139003, 0x113b600, 0x113b703,
    0x113b804, 0x113c100, 0x113c204, 0x113c300, 0x113c504, 0x113c600, 0x113c704, 0x113cb00,
    0x113cc04, 0x113d103, 0x113d204, 0x113d303, 0x113d40d, 0x113d600, 0x113d70d, 0x113d900,
    0x113e104, 0x113e300, 0x1140003, 0x1143504, 0x1144284, 0x1144304, 0x1144684, 0x1144703,
    0x1144b0d, 0x1145005, 0x1145a0d, 0x1145c00, 0x1145d0d, 0x1145e04, 0x1145f03, 0x1146200,
    0x1148003, 0x114b084, 0x114b104, 0x114ba84, 0x114bb04, 0x114bd84, 0x114be04, 0x114c284,
    0x114c403, 0x114c608, 0x114c703, 0x114c800, 0x114d005, 0x114da00, 0x1158003, 0x115af84,
    0x115b004, 0x115b600, 0x115b804, 0x115bf84, 0x115c108, 0x115d803, 0x115dc04, 0x115de00,
    0x1160003, 0x1163004, 0x1163f84, 0x1164004, 0x1164108, 0x1164403, 0x1164500, 0x1165005,
    0x1165a00, 0x116600d, 0x1166d00, 0x1168003, 0x116ab04, 0x116b684, 0x116b803, 0x116b90d,
    0x116ba00, 0x116c005, 0x116ca00, 0x116d005, 0x116e400, 0x1170003, 0x1171b00, 0x1171d04,
    0x1172b84, 0x1172c00, 0x1173005, 0x1173a06, 0x1173c08, 0x1173f09, 0x1174003, 0x1174700,
    0x1180003, 0x1182c04, 0x1183b0d, 0x1183c00, 0x118a001, 0x118c002, 0x118e005, 0x118ea06,
    0x118f300, 0x118ff03, 0x1190700, 0x1190903, 0x1190a00, 0x1190c03, 0x1191400, 0x1191503,
    0x1191700, 0x1191803, 0x1193004, 0x1193600, 0x1193704, 0x1193900, 0x1193b04, 0x1193f03,
    0x1194004, 0x1194103, 0x1194204, 0x119440d, 0x1194700, 0x1195005, 0x1195a00, 0x119a003,
    0x119a800, 0x119aa03, 0x119d104, 0x119d800, 0x119da04, 0x119e103, 0x119e20d, 0x119e303,
    0x119e404, 0x119e500, 0x11a0003, 0x11a0104, 0x11a0b03, 0x11a3304, 0x11a3a03, 0x11a3b04,
    0x11a3f0d, 0x11a4704, 0x11a4800, 0x11a5003, 0x11a5104, 0x11a5c03, 0x11a8a04, 0x11a9a0d,
    0x11a9d03, 0x11a9e0d, 0x11aa300, 0x11ab003, 0x11af900, 0x11b000d, 0x11b0a00, 0x11bc003,
    0x11be10d, 0x11be200, 0x11bf005, 0x11bfa00, 0x11c0003, 0x11c0900, 0x11c0a03, 0x11c2f04,
    0x11c3700, 0x11c3804, 0x11c3f84, 0x11c4003, 0x11c410d, 0x11c4600, 0x11c5005, 0x11c5a06,
    0x11c6d00, 0x11c700d, 0x11c7203, 0x11c9000, 0x11c9204, 0x11ca800, 0x11ca904, 0x11cb700,
    0x11d0003, 0x11d0700, 0x11d0803, 0x11d0a00, 0x11d0b03, 0x11d3104, 0x11d3700, 0x11d3a04,
    0x11d3b00, 0x11d3c04, 0x11d3e00, 0x11d3f04, 0x11d4603, 0x11d4704, 0x11d4800, 0x11d5005,
    0x11d5a00, 0x11d6003, 0x11d6600, 0x11d6703, 0x11d6900, 0x11d6a03, 0x11d8a04, 0x11d8f00,
    0x11d9004, 0x11d9200, 0x11d9304, 0x11d9803, 0x11d9900, 0x11da005, 0x11daa00, 0x11ee003,
    0x11ef304, 0x11ef70d, 0x11ef900, 0x11f0004, 0x11f0203, 0x11f0304, 0x11f0403, 0x11f1100,
    0x11f1203, 0x11f3404, 0x11f3b00, 0x11f3e04, 0x11f430d, 0x11f5005, 0x11f5a04, 0x11f5b00,
    0x11fb003, 0x11fb100, 0x11fc006, 0x11fd509, 0x11ff200, 0x11fff0d, 0x1200003, 0x1239a00,
    0x1240005, 0x1246f00, 0x1247008, 0x1247500, 0x1248003, 0x1254400, 0x12f9003, 0x12ff10d,
    0x12ff300, 0x1300003, 0x1343000, 0x1344004, 0x1344103, 0x1344704, 0x1345600, 0x1346003,
    0x143fb00, 0x1440003, 0x1464700, 0x1610003, 0x1611e04, 0x1613005, 0x1613a00, 0x1680003,
    0x16a3900, 0x16a4003, 0x16a5f00, 0x16a6005, 0x16a6a00, 0x16a6e08, 0x16a7003, 0x16abf00,
    0x16ac005, 0x16aca00, 0x16ad003, 0x16aee00, 0x16af084, 0x16af508, 0x16af600, 0x16b0003,
    0x16b3084, 0x16b3708, 0x16b3c09, 0x16b4003, 0x16b4408, 0x16b4509, 0x16b4600, 0x16b5005,
    0x16b5a00, 0x16b5b06, 0x16b6200, 0x16b6303, 0x16b7800, 0x16b7d03, 0x16b9000, 0x16d4003,
    0x16d6d0d, 0x16d7005, 0x16d7a00, 0x16e4001, 0x16e6002, 0x16e8006, 0x16e970d, 0x16e9b00,
    0x16f0003, 0x16f4b00, 0x16f4f04, 0x16f5003, 0x16f5104, 0x16f8800, 0x16f8f04, 0x16f9303,
    0x16fa000, 0x16fe003, 0x16fe20d, 0x16fe303, 0x16fe404, 0x16fe500, 0x16ff004, 0x16ff200,
    0x1700003, 0x187f800, 0x1880003, 0x18cd600, 0x18cff03, 0x18d0900, 0x1aff003, 0x1aff400,
    0x1aff503, 0x1affc00, 0x1affd03, 0x1afff00, 0x1b00003, 0x1b12300, 0x1b13203, 0x1b13300,
    0x1b15003, 0x1b15300, 0x1b15503, 0x1b15600, 0x1b16403, 0x1b16800, 0x1b17003, 0x1b2fc00,
    0x1bc0003, 0x1bc6b00, 0x1bc7003, 0x1bc7d00, 0x1bc8003, 0x1bc8900, 0x1bc9003, 0x1bc9a00,
    0x1bc9c09, 0x1bc9d04, 0x1bc9e84, 0x1bc9f08, 0x1bca000, 0x1cc0009, 0x1ccf005, 0x1ccfa00,
    0x1cd0009, 0x1ceb400, 0x1cf0004, 0x1cf2e00, 0x1cf3004, 0x1cf4700, 0x1cf5009, 0x1cfc400,
    0x1d00009, 0x1d0f600, 0x1d10009, 0x1d12700, 0x1d12909, 0x1d15e89, 0x1d16584, 0x1d16a09,
    0x1d16d84, 0x1d17300, 0x1d17b84, 0x1d18309, 0x1d18584, 0x1d18c09, 0x1d1aa84, 0x1d1ae09,
    0x1d1bb89, 0x1d1c109, 0x1d1eb00, 0x1d20009, 0x1d24284, 0x1d24509, 0x1d24600, 0x1d2c006,
    0x1d2d400, 0x1d2e006, 0x1d2f400, 0x1d30009, 0x1d35700, 0x1d36006, 0x1d37900, 0x1d40001,
    0x1d41a02, 0x1d43401, 0x1d44e02, 0x1d45500, 0x1d45602, 0x1d46801, 0x1d48202, 0x1d49c01,
    0x1d49d00, 0x1d49e01, 0x1d4a000, 0x1d4a201, 0x1d4a300, 0x1d4a501, 0x1d4a700, 0x1d4a901,
    0x1d4ad00, 0x1d4ae01, 0x1d4b602, 0x1d4ba00, 0x1d4bb02, 0x1d4bc00, 0x1d4bd02, 0x1d4c400,
    0x1d4c502, 0x1d4d001, 0x1d4ea02, 0x1d50401, 0x1d50600, 0x1d50701, 0x1d50b00, 0x1d50d01,
    0x1d51500, 0x1d51601, 0x1d51d00, 0x1d51e02, 0x1d53801, 0x1d53a00, 0x1d53b01, 0x1d53f00,
    0x1d54001, 0x1d54500, 0x1d54601, 0x1d54700, 0x1d54a01, 0x1d55100, 0x1d55202, 0x1d56c01,
    0x1d58602, 0x1d5a001, 0x1d5ba02, 0x1d5d401, 0x1d5ee02, 0x1d60801, 0x1d62202, 0x1d63c01,
    0x1d65602, 0x1d67001, 0x1d68a02, 0x1d6a600, 0x1d6a801, 0x1d6c109, 0x1d6c202, 0x1d6db09,
    0x1d6dc02, 0x1d6e201, 0x1d6fb09, 0x1d6fc02, 0x1d71509, 0x1d71602, 0x1d71c01, 0x1d73509,
    0x1d73602, 0x1d74f09, 0x1d75002, 0x1d75601, 0x1d76f09, 0x1d77002, 0x1d78909, 0x1d78a02,
    0x1d79001, 0x1d7a909, 0x1d7aa02, 0x1d7c309, 0x1d7c402, 0x1d7ca01, 0x1d7cb02, 0x1d7cc00,
    0x1d7ce05, 0x1d80009, 0x1da0004, 0x1da3709, 0x1da3b04, 0x1da6d09, 0x1da7504, 0x1da7609,
    0x1da8404, 0x1da8509, 0x1da8708, 0x1da8c00, 0x1da9b04, 0x1daa000, 0x1daa104, 0x1dab000,
    0x1df0002, 0x1df0a03, 0x1df0b02, 0x1df1f00, 0x1df2502, 0x1df2b00, 0x1e00084, 0x1e00700,
    0x1e00884, 0x1e01900, 0x1e01b84, 0x1e02200, 0x1e02384, 0x1e02500, 0x1e02684, 0x1e02b00,
    0x1e03003, 0x1e06e00, 0x1e08f04, 0x1e09000, 0x1e10003, 0x1e12d00, 0x1e13004, 0x1e13703,
    0x1e13e00, 0x1e14005, 0x1e14a00, 0x1e14e03, 0x1e14f09, 0x1e15000, 0x1e29003, 0x1e2ae04,
    0x1e2af00, 0x1e2c003, 0x1e2ec04, 0x1e2f005, 0x1e2fa00, 0x1e2ff09, 0x1e30000, 0x1e4d003,
    0x1e4ec04, 0x1e4f005, 0x1e4fa00, 0x1e5d003, 0x1e5ee04, 0x1e5f003, 0x1e5f105, 0x1e5fb00,
    0x1e5ff0d, 0x1e60000, 0x1e7e003, 0x1e7e700, 0x1e7e803, 0x1e7ec00, 0x1e7ed03, 0x1e7ef00,
    0x1e7f003, 0x1e7ff00, 0x1e80003, 0x1e8c500, 0x1e8c706, 0x1e8d084, 0x1e8d700, 0x1e90001,
    0x1e92202, 0x1e94484, 0x1e94b03, 0x1e94c00, 0x1e95005, 0x1e95a00, 0x1e95e0d, 0x1e96000,
    0x1ec7106, 0x1ecac09, 0x1ecad06, 0x1ecb009, 0x1ecb106, 0x1ecb500, 0x1ed0106, 0x1ed2e09,
    0x1ed2f06, 0x1ed3e00, 0x1ee0003, 0x1ee0400, 0x1ee0503, 0x1ee2000, 0x1ee2103, 0x1ee2300,
    0x1ee2403, 0x1ee2500, 0x1ee2703, 0x1ee2800, 0x1ee2903, 0x1ee3300, 0x1ee3403, 0x1ee3800,
    0x1ee3903, 0x1ee3a00, 0x1ee3b03, 0x1ee3c00, 0x1ee4203, 0x1ee4300, 0x1ee4703, 0x1ee4800,
    0x1ee4903, 0x1ee4a00, 0x1ee4b03, 0x1ee4c00, 0x1ee4d03, 0x1ee5000, 0x1ee5103, 0x1ee5300,
    0x1ee5403, 0x1ee5500, 0x1ee5703, 0x1ee5800, 0x1ee5903, 0x1ee5a00, 0x1ee5b03, 0x1ee5c00,
    0x1ee5d03, 0x1ee5e00, 0x1ee5f03, 0x1ee6000, 0x1ee6103, 0x1ee6300, 0x1ee6403, 0x1ee6500,
    0x1ee6703, 0x1ee6b00, 0x1ee6c03, 0x1ee7300, 0x1ee7403, 0x1ee7800, 0x1ee7903, 0x1ee7d00,
    0x1ee7e03, 0x1ee7f00, 0x1ee8003, 0x1ee8a00, 0x1ee8b03, 0x1ee9c00, 0x1eea103, 0x1eea400,
    0x1eea503, 0x1eeaa00, 0x1eeab03, 0x1eebc00, 0x1eef009, 0x1eef200, 0x1f00009, 0x1f02c00,
    0x1f03009, 0x1f09400, 0x1f0a009, 0x1f0af00, 0x1f0b109, 0x1f0c000, 0x1f0c109, 0x1f0d000,
    0x1f0d109, 0x1f0f600, 0x1f10006, 0x1f10d09, 0x1f1300a, 0x1f14a09, 0x1f1500a, 0x1f16a09,
    0x1f1700a, 0x1f18a09, 0x1f1ae00, 0x1f1e609, 0x1f20300, 0x1f21009, 0x1f23c00, 0x1f24009,
    0x1f24900, 0x1f25009, 0x1f25200, 0x1f26009, 0x1f26600, 0x1f30009, 0x1f6d800, 0x1f6dc09,
    0x1f6ed00, 0x1f6f009, 0x1f6fd00, 0x1f70009, 0x1f77700, 0x1f77b09, 0x1f7da00, 0x1f7e009,
    0x1f7ec00, 0x1f7f009, 0x1f7f100, 0x1f80009, 0x1f80c00, 0x1f81009, 0x1f84800, 0x1f85009,
    0x1f85a00, 0x1f86009, 0x1f88800, 0x1f89009, 0x1f8ae00, 0x1f8b009, 0x1f8bc00, 0x1f8c009,
    0x1f8c200, 0x1f90009, 0x1fa5400, 0x1fa6009, 0x1fa6e00, 0x1fa7009, 0x1fa7d00, 0x1fa8009,
    0x1fa8a00, 0x1fa8f09, 0x1fac700, 0x1face09, 0x1fadd00, 0x1fadf09, 0x1faea00, 0x1faf009,
    0x1faf900, 0x1fb0009, 0x1fb9300, 0x1fb9409, 0x1fbf005, 0x1fbfa00, 0x2000003, 0x2a6e000,
    0x2a70003, 0x2b73a00, 0x2b74003, 0x2b81e00, 0x2b82003, 0x2cea200, 0x2ceb003, 0x2ebe100,
    0x2ebf003, 0x2ee5e00, 0x2f80083, 0x2fa1e00, 0x3000003, 0x3134b00, 0x3135003, 0x323b000,
    0xe010004, 0xe01f000,
};
// Canonical decompositions, sorted: character, first, second (0: there is none).
static const qlora__text_decomposition qlora__text_decompositions[] = {
    {0xc0,0x41,0x300}, {0xc1,0x41,0x301}, {0xc2,0x41,0x302}, {0xc3,0x41,0x303}, {0xc4,0x41,0x308},
    {0xc5,0x41,0x30a}, {0xc7,0x43,0x327}, {0xc8,0x45,0x300}, {0xc9,0x45,0x301}, {0xca,0x45,0x302},
    {0xcb,0x45,0x308}, {0xcc,0x49,0x300}, {0xcd,0x49,0x301}, {0xce,0x49,0x302}, {0xcf,0x49,0x308},
    {0xd1,0x4e,0x303}, {0xd2,0x4f,0x300}, {0xd3,0x4f,0x301}, {0xd4,0x4f,0x302}, {0xd5,0x4f,0x303},
    {0xd6,0x4f,0x308}, {0xd9,0x55,0x300}, {0xda,0x55,0x301}, {0xdb,0x55,0x302}, {0xdc,0x55,0x308},
    {0xdd,0x59,0x301}, {0xe0,0x61,0x300}, {0xe1,0x61,0x301}, {0xe2,0x61,0x302}, {0xe3,0x61,0x303},
    {0xe4,0x61,0x308}, {0xe5,0x61,0x30a}, {0xe7,0x63,0x327}, {0xe8,0x65,0x300}, {0xe9,0x65,0x301},
    {0xea,0x65,0x302}, {0xeb,0x65,0x308}, {0xec,0x69,0x300}, {0xed,0x69,0x301}, {0xee,0x69,0x302},
    {0xef,0x69,0x308}, {0xf1,0x6e,0x303}, {0xf2,0x6f,0x300}, {0xf3,0x6f,0x301}, {0xf4,0x6f,0x302},
    {0xf5,0x6f,0x303}, {0xf6,0x6f,0x308}, {0xf9,0x75,0x300}, {0xfa,0x75,0x301}, {0xfb,0x75,0x302},
    {0xfc,0x75,0x308}, {0xfd,0x79,0x301}, {0xff,0x79,0x308}, {0x100,0x41,0x304}, {0x101,0x61,0x304},
    {0x102,0x41,0x306}, {0x103,0x61,0x306}, {0x104,0x41,0x328}, {0x105,0x61,0x328},
    {0x106,0x43,0x301}, {0x107,0x63,0x301}, {0x108,0x43,0x302}, {0x109,0x63,0x302},
    {0x10a,0x43,0x307}, {0x10b,0x63,0x307}, {0x10c,0x43,0x30c}, {0x10d,0x63,0x30c},
    {0x10e,0x44,0x30c}, {0x10f,0x64,0x30c}, {0x112,0x45,0x304}, {0x113,0x65,0x304},
    {0x114,0x45,0x306}, {0x115,0x65,0x306}, {0x116,0x45,0x307}, {0x117,0x65,0x307},
    {0x118,0x45,0x328}, {0x119,0x65,0x328}, {0x11a,0x45,0x30c}, {0x11b,0x65,0x30c},
    {0x11c,0x47,0x302}, {0x11d,0x67,0x302}, {0x11e,0x47,0x306}, {0x11f,0x67,0x306},
    {0x120,0x47,0x307}, {0x121,0x67,0x307}, {0x122,0x47,0x327}, {0x123,0x67,0x327},
    {0x124,0x48,0x302}, {0x125,0x68,0x302}, {0x128,0x49,0x303}, {0x129,0x69,0x303},
    {0x12a,0x49,0x304}, {0x12b,0x69,0x304}, {0x12c,0x49,0x306}, {0x12d,0x69,0x306},
    {0x12e,0x49,0x328}, {0x12f,0x69,0x328}, {0x130,0x49,0x307}, {0x134,0x4a,0x302},
    {0x135,0x6a,0x302}, {0x136,0x4b,0x327}, {0x137,0x6b,0x327}, {0x139,0x4c,0x301},
    {0x13a,0x6c,0x301}, {0x13b,0x4c,0x327}, {0x13c,0x6c,0x327}, {0x13d,0x4c,0x30c},
    {0x13e,0x6c,0x30c}, {0x143,0x4e,0x301}, {0x144,0x6e,0x301}, {0x145,0x4e,0x327},
    {0x146,0x6e,0x327}, {0x147,0x4e,0x30c}, {0x148,0x6e,0x30c}, {0x14c,0x4f,0x304},
    {0x14d,0x6f,0x304}, {0x14e,0x4f,0x306}, {0x14f,0x6f,0x306}, {0x150,0x4f,0x30b},
    {0x151,0x6f,0x30b}, {0x154,0x52,0x301}, {0x155,0x72,0x301}, {0x156,0x52,0x327},
    {0x157,0x72,0x327}, {0x158,0x52,0x30c}, {0x159,0x72,0x30c}, {0x15a,0x53,0x301},
    {0x15b,0x73,0x301}, {0x15c,0x53,0x302}, {0x15d,0x73,0x302}, {0x15e,0x53,0x327},
    {0x15f,0x73,0x327}, {0x160,0x53,0x30c}, {0x161,0x73,0x30c}, {0x162,0x54,0x327},
    {0x163,0x74,0x327}, {0x164,0x54,0x30c}, {0x165,0x74,0x30c}, {0x168,0x55,0x303},
    {0x169,0x75,0x303}, {0x16a,0x55,0x304}, {0x16b,0x75,0x304}, {0x16c,0x55,0x306},
    {0x16d,0x75,0x306}, {0x16e,0x55,0x30a}, {0x16f,0x75,0x30a}, {0x170,0x55,0x30b},
    {0x171,0x75,0x30b}, {0x172,0x55,0x328}, {0x173,0x75,0x328}, {0x174,0x57,0x302},
    {0x175,0x77,0x302}, {0x176,0x59,0x302}, {0x177,0x79,0x302}, {0x178,0x59,0x308},
    {0x179,0x5a,0x301}, {0x17a,0x7a,0x301}, {0x17b,0x5a,0x307}, {0x17c,0x7a,0x307},
    {0x17d,0x5a,0x30c}, {0x17e,0x7a,0x30c}, {0x1a0,0x4f,0x31b}, {0x1a1,0x6f,0x31b},
    {0x1af,0x55,0x31b}, {0x1b0,0x75,0x31b}, {0x1cd,0x41,0x30c}, {0x1ce,0x61,0x30c},
    {0x1cf,0x49,0x30c}, {0x1d0,0x69,0x30c}, {0x1d1,0x4f,0x30c}, {0x1d2,0x6f,0x30c},
    {0x1d3,0x55,0x30c}, {0x1d4,0x75,0x30c}, {0x1d5,0xdc,0x304}, {0x1d6,0xfc,0x304},
    {0x1d7,0xdc,0x301}, {0x1d8,0xfc,0x301}, {0x1d9,0xdc,0x30c}, {0x1da,0xfc,0x30c},
    {0x1db,0xdc,0x300}, {0x1dc,0xfc,0x300}, {0x1de,0xc4,0x304}, {0x1df,0xe4,0x304},
    {0x1e0,0x226,0x304}, {0x1e1,0x227,0x304}, {0x1e2,0xc6,0x304}, {0x1e3,0xe6,0x304},
    {0x1e6,0x47,0x30c}, {0x1e7,0x67,0x30c}, {0x1e8,0x4b,0x30c}, {0x1e9,0x6b,0x30c},
    {0x1ea,0x4f,0x328}, {0x1eb,0x6f,0x328}, {0x1ec,0x1ea,0x304}, {0x1ed,0x1eb,0x304},
    {0x1ee,0x1b7,0x30c}, {0x1ef,0x292,0x30c}, {0x1f0,0x6a,0x30c}, {0x1f4,0x47,0x301},
    {0x1f5,0x67,0x301}, {0x1f8,0x4e,0x300}, {0x1f9,0x6e,0x300}, {0x1fa,0xc5,0x301},
    {0x1fb,0xe5,0x301}, {0x1fc,0xc6,0x301}, {0x1fd,0xe6,0x301}, {0x1fe,0xd8,0x301},
    {0x1ff,0xf8,0x301}, {0x200,0x41,0x30f}, {0x201,0x61,0x30f}, {0x202,0x41,0x311},
    {0x203,0x61,0x311}, {0x204,0x45,0x30f}, {0x205,0x65,0x30f}, {0x206,0x45,0x311},
    {0x207,0x65,0x311}, {0x208,0x49,0x30f}, {0x209,0x69,0x30f}, {0x20a,0x49,0x311},
    {0x20b,0x69,0x311}, {0x20c,0x4f,0x30f}, {0x20d,0x6f,0x30f}, {0x20e,0x4f,0x311},
    {0x20f,0x6f,0x311}, {0x210,0x52,0x30f}, {0x211,0x72,0x30f}, {0x212,0x52,0x311},
    {0x213,0x72,0x311}, {0x214,0x55,0x30f}, {0x215,0x75,0x30f}, {0x216,0x55,0x311},
    {0x217,0x75,0x311}, {0x218,0x53,0x326}, {0x219,0x73,0x326}, {0x21a,0x54,0x326},
    {0x21b,0x74,0x326}, {0x21e,0x48,0x30c}, {0x21f,0x68,0x30c}, {0x226,0x41,0x307},
    {0x227,0x61,0x307}, {0x228,0x45,0x327}, {0x229,0x65,0x327}, {0x22a,0xd6,0x304},
    {0x22b,0xf6,0x304}, {0x22c,0xd5,0x304}, {0x22d,0xf5,0x304}, {0x22e,0x4f,0x307},
    {0x22f,0x6f,0x307}, {0x230,0x22e,0x304}, {0x231,0x22f,0x304}, {0x232,0x59,0x304},
    {0x233,0x79,0x304}, {0x340,0x300,0x0}, {0x341,0x301,0x0}, {0x343,0x313,0x0},
    {0x344,0x308,0x301}, {0x374,0x2b9,0x0}, {0x37e,0x3b,0x0}, {0x385,0xa8,0x301},
    {0x386,0x391,0x301}, {0x387,0xb7,0x0}, {0x388,0x395,0x301}, {0x389,0x397,0x301},
    {0x38a,0x399,0x301}, {0x38c,0x39f,0x301}, {0x38e,0x3a5,0x301}, {0x38f,0x3a9,0x301},
    {0x390,0x3ca,0x301}, {0x3aa,0x399,0x308}, {0x3ab,0x3a5,0x308}, {0x3ac,0x3b1,0x301},
    {0x3ad,0x3b5,0x301}, {0x3ae,0x3b7,0x301}, {0x3af,0x3b9,0x301}, {0x3b0,0x3cb,0x301},
    {0x3ca,0x3b9,0x308}, {0x3cb,0x3c5,0x308}, {0x3cc,0x3bf,0x301}, {0x3cd,0x3c5,0x301},
    {0x3ce,0x3c9,0x301}, {0x3d3,0x3d2,0x301}, {0x3d4,0x3d2,0x308}, {0x400,0x415,0x300},
    {0x401,0x415,0x308}, {0x403,0x413,0x301}, {0x407,0x406,0x308}, {0x40c,0x41a,0x301},
    {0x40d,0x418,0x300}, {0x40e,0x423,0x306}, {0x419,0x418,0x306}, {0x439,0x438,0x306},
    {0x450,0x435,0x300}, {0x451,0x435,0x308}, {0x453,0x433,0x301}, {0x457,0x456,0x308},
    {0x45c,0x43a,0x301}, {0x45d,0x438,0x300}, {0x45e,0x443,0x306}, {0x476,0x474,0x30f},
    {0x477,0x475,0x30f}, {0x4c1,0x416,0x306}, {0x4c2,0x436,0x306}, {0x4d0,0x410,0x306},
    {0x4d1,0x430,0x306}, {0x4d2,0x410,0x308}, {0x4d3,0x430,0x308}, {0x4d6,0x415,0x306},
    {0x4d7,0x435,0x306}, {0x4da,0x4d8,0x308}, {0x4db,0x4d9,0x308}, {0x4dc,0x416,0x308},
    {0x4dd,0x436,0x308}, {0x4de,0x417,0x308}, {0x4df,0x437,0x308}, {0x4e2,0x418,0x304},
    {0x4e3,0x438,0x304}, {0x4e4,0x418,0x308}, {0x4e5,0x438,0x308}, {0x4e6,0x41e,0x308},
    {0x4e7,0x43e,0x308}, {0x4ea,0x4e8,0x308}, {0x4eb,0x4e9,0x308}, {0x4ec,0x42d,0x308},
    {0x4ed,0x44d,0x308}, {0x4ee,0x423,0x304}, {0x4ef,0x443,0x304}, {0x4f0,0x423,0x308},
    {0x4f1,0x443,0x308}, {0x4f2,0x423,0x30b}, {0x4f3,0x443,0x30b}, {0x4f4,0x427,0x308},
    {0x4f5,0x447,0x308}, {0x4f8,0x42b,0x308}, {0x4f9,0x44b,0x308}, {0x622,0x627,0x653},
    {0x623,0x627,0x654}, {0x624,0x648,0x654}, {0x625,0x627,0x655}, {0x626,0x64a,0x654},
    {0x6c0,0x6d5,0x654}, {0x6c2,0x6c1,0x654}, {0x6d3,0x6d2,0x654}, {0x929,0x928,0x93c},
    {0x931,0x930,0x93c}, {0x934,0x933,0x93c}, {0x958,0x915,0x93c}, {0x959,0x916,0x93c},
    {0x95a,0x917,0x93c}, {0x95b,0x91c,0x93c}, {0x95c,0x921,0x93c}, {0x95d,0x922,0x93c},
    {0x95e,0x92b,0x93c}, {0x95f,0x92f,0x93c}, {0x9cb,0x9c7,0x9be}, {0x9cc,0x9c7,0x9d7},
    {0x9dc,0x9a1,0x9bc}, {0x9dd,0x9a2,0x9bc}, {0x9df,0x9af,0x9bc}, {0xa33,0xa32,0xa3c},
    {0xa36,0xa38,0xa3c}, {0xa59,0xa16,0xa3c}, {0xa5a,0xa17,0xa3c}, {0xa5b,0xa1c,0xa3c},
    {0xa5e,0xa2b,0xa3c}, {0xb48,0xb47,0xb56}, {0xb4b,0xb47,0xb3e}, {0xb4c,0xb47,0xb57},
    {0xb5c,0xb21,0xb3c}, {0xb5d,0xb22,0xb3c}, {0xb94,0xb92,0xbd7}, {0xbca,0xbc6,0xbbe},
    {0xbcb,0xbc7,0xbbe}, {0xbcc,0xbc6,0xbd7}, {0xc48,0xc46,0xc56}, {0xcc0,0xcbf,0xcd5},
    {0xcc7,0xcc6,0xcd5}, {0xcc8,0xcc6,0xcd6}, {0xcca,0xcc6,0xcc2}, {0xccb,0xcca,0xcd5},
    {0xd4a,0xd46,0xd3e}, {0xd4b,0xd47,0xd3e}, {0xd4c,0xd46,0xd57}, {0xdda,0xdd9,0xdca},
    {0xddc,0xdd9,0xdcf}, {0xddd,0xddc,0xdca}, {0xdde,0xdd9,0xddf}, {0xf43,0xf42,0xfb7},
    {0xf4d,0xf4c,0xfb7}, {0xf52,0xf51,0xfb7}, {0xf57,0xf56,0xfb7}, {0xf5c,0xf5b,0xfb7},
    {0xf69,0xf40,0xfb5}, {0xf73,0xf71,0xf72}, {0xf75,0xf71,0xf74}, {0xf76,0xfb2,0xf80},
    {0xf78,0xfb3,0xf80}, {0xf81,0xf71,0xf80}, {0xf93,0xf92,0xfb7}, {0xf9d,0xf9c,0xfb7},
    {0xfa2,0xfa1,0xfb7}, {0xfa7,0xfa6,0xfb7}, {0xfac,0xfab,0xfb7}, {0xfb9,0xf90,0xfb5},
    {0x1026,0x1025,0x102e}, {0x1b06,0x1b05,0x1b35}, {0x1b08,0x1b07,0x1b35}, {0x1b0a,0x1b09,0x1b35},
    {0x1b0c,0x1b0b,0x1b35}, {0x1b0e,0x1b0d,0x1b35}, {0x1b12,0x1b11,0x1b35}, {0x1b3b,0x1b3a,0x1b35},
    {0x1b3d,0x1b3c,0x1b35}, {0x1b40,0x1b3e,0x1b35}, {0x1b41,0x1b3f,0x1b35}, {0x1b43,0x1b42,0x1b35},
    {0x1e00,0x41,0x325}, {0x1e01,0x61,0x325}, {0x1e02,0x42,0x307}, {0x1e03,0x62,0x307},
    {0x1e04,0x42,0x323}, {0x1e05,0x62,0x323}, {0x1e06,0x42,0x331}, {0x1e07,0x62,0x331},
    {0x1e08,0xc7,0x301}, {0x1e09,0xe7,0x301}, {0x1e0a,0x44,0x307}, {0x1e0b,0x64,0x307},
    {0x1e0c,0x44,0x323}, {0x1e0d,0x64,0x323}, {0x1e0e,0x44,0x331}, {0x1e0f,0x64,0x331},
    {0x1e10,0x44,0x327}, {0x1e11,0x64,0x327}, {0x1e12,0x44,0x32d}, {0x1e13,0x64,0x32d},
    {0x1e14,0x112,0x300}, {0x1e15,0x113,0x300}, {0x1e16,0x112,0x301}, {0x1e17,0x113,0x301},
    {0x1e18,0x45,0x32d}, {0x1e19,0x65,0x32d}, {0x1e1a,0x45,0x330}, {0x1e1b,0x65,0x330},
    {0x1e1c,0x228,0x306}, {0x1e1d,0x229,0x306}, {0x1e1e,0x46,0x307}, {0x1e1f,0x66,0x307},
    {0x1e20,0x47,0x304}, {0x1e21,0x67,0x304}, {0x1e22,0x48,0x307}, {0x1e23,0x68,0x307},
    {0x1e24,0x48,0x323}, {0x1e25,0x68,0x323}, {0x1e26,0x48,0x308}, {0x1e27,0x68,0x308},
    {0x1e28,0x48,0x327}, {0x1e29,0x68,0x327}, {0x1e2a,0x48,0x32e}, {0x1e2b,0x68,0x32e},
    {0x1e2c,0x49,0x330}, {0x1e2d,0x69,0x330}, {0x1e2e,0xcf,0x301}, {0x1e2f,0xef,0x301},
    {0x1e30,0x4b,0x301}, {0x1e31,0x6b,0x301}, {0x1e32,0x4b,0x323}, {0x1e33,0x6b,0x323},
    {0x1e34,0x4b,0x331}, {0x1e35,0x6b,0x331}, {0x1e36,0x4c,0x323}, {0x1e37,0x6c,0x323},
    {0x1e38,0x1e36,0x304}, {0x1e39,0x1e37,0x304}, {0x1e3a,0x4c,0x331}, {0x1e3b,0x6c,0x331},
    {0x1e3c,0x4c,0x32d}, {0x1e3d,0x6c,0x32d}, {0x1e3e,0x4d,0x301}, {0x1e3f,0x6d,0x301},
    {0x1e40,0x4d,0x307}, {0x1e41,0x6d,0x307}, {0x1e42,0x4d,0x323}, {0x1e43,0x6d,0x323},
    {0x1e44,0x4e,0x307}, {0x1e45,0x6e,0x307}, {0x1e46,0x4e,0x323}, {0x1e47,0x6e,0x323},
    {0x1e48,0x4e,0x331}, {0x1e49,0x6e,0x331}, {0x1e4a,0x4e,0x32d}, {0x1e4b,0x6e,0x32d},
    {0x1e4c,0xd5,0x301}, {0x1e4d,0xf5,0x301}, {0x1e4e,0xd5,0x308}, {0x1e4f,0xf5,0x308},
    {0x1e50,0x14c,0x300}, {0x1e51,0x14d,0x300}, {0x1e52,0x14c,0x301}, {0x1e53,0x14d,0x301},
    {0x1e54,0x50,0x301}, {0x1e55,0x70,0x301}, {0x1e56,0x50,0x307}, {0x1e57,0x70,0x307},
    {0x1e58,0x52,0x307}, {0x1e59,0x72,0x307}, {0x1e5a,0x52,0x323}, {0x1e5b,0x72,0x323},
    {0x1e5c,0x1e5a,0x304}, {0x1e5d,0x1e5b,0x304}, {0x1e5e,0x52,0x331}, {0x1e5f,0x72,0x331},
    {0x1e60,0x53,0x307}, {0x1e61,0x73,0x307}, {0x1e62,0x53,0x323}, {0x1e63,0x73,0x323},
    {0x1e64,0x15a,0x307}, {0x1e65,0x15b,0x307}, {0x1e66,0x160,0x307}, {0x1e67,0x161,0x307},
    {0x1e68,0x1e62,0x307}, {0x1e69,0x1e63,0x307}, {0x1e6a,0x54,0x307}, {0x1e6b,0x74,0x307},
    {0x1e6c,0x54,0x323}, {0x1e6d,0x74,0x323}, {0x1e6e,0x54,0x331}, {0x1e6f,0x74,0x331},
    {0x1e70,0x54,0x32d}, {0x1e71,0x74,0x32d}, {0x1e72,0x55,0x324}, {0x1e73,0x75,0x324},
    {0x1e74,0x55,0x330}, {0x1e75,0x75,0x330}, {0x1e76,0x55,0x32d}, {0x1e77,0x75,0x32d},
    {0x1e78,0x168,0x301}, {0x1e79,0x169,0x301}, {0x1e7a,0x16a,0x308}, {0x1e7b,0x16b,0x308},
    {0x1e7c,0x56,0x303}, {0x1e7d,0x76,0x303}, {0x1e7e,0x56,0x323}, {0x1e7f,0x76,0x323},
    {0x1e80,0x57,0x300}, {0x1e81,0x77,0x300}, {0x1e82,0x57,0x301}, {0x1e83,0x77,0x301},
    {0x1e84,0x57,0x308}, {0x1e85,0x77,0x308}, {0x1e86,0x57,0x307}, {0x1e87,0x77,0x307},
    {0x1e88,0x57,0x323}, {0x1e89,0x77,0x323}, {0x1e8a,0x58,0x307}, {0x1e8b,0x78,0x307},
    {0x1e8c,0x58,0x308}, {0x1e8d,0x78,0x308}, {0x1e8e,0x59,0x307}, {0x1e8f,0x79,0x307},
    {0x1e90,0x5a,0x302}, {0x1e91,0x7a,0x302}, {0x1e92,0x5a,0x323}, {0x1e93,0x7a,0x323},
    {0x1e94,0x5a,0x331}, {0x1e95,0x7a,0x331}, {0x1e96,0x68,0x331}, {0x1e97,0x74,0x308},
    {0x1e98,0x77,0x30a}, {0x1e99,0x79,0x30a}, {0x1e9b,0x17f,0x307}, {0x1ea0,0x41,0x323},
    {0x1ea1,0x61,0x323}, {0x1ea2,0x41,0x309}, {0x1ea3,0x61,0x309}, {0x1ea4,0xc2,0x301},
    {0x1ea5,0xe2,0x301}, {0x1ea6,0xc2,0x300}, {0x1ea7,0xe2,0x300}, {0x1ea8,0xc2,0x309},
    {0x1ea9,0xe2,0x309}, {0x1eaa,0xc2,0x303}, {0x1eab,0xe2,0x303}, {0x1eac,0x1ea0,0x302},
    {0x1ead,0x1ea1,0x302}, {0x1eae,0x102,0x301}, {0x1eaf,0x103,0x301}, {0x1eb0,0x102,0x300},
    {0x1eb1,0x103,0x300}, {0x1eb2,0x102,0x309}, {0x1eb3,0x103,0x309}, {0x1eb4,0x102,0x303},
    {0x1eb5,0x103,0x303}, {0x1eb6,0x1ea0,0x306}, {0x1eb7,0x1ea1,0x306}, {0x1eb8,0x45,0x323},
    {0x1eb9,0x65,0x323}, {0x1eba,0x45,0x309}, {0x1ebb,0x65,0x309}, {0x1ebc,0x45,0x303},
    {0x1ebd,0x65,0x303}, {0x1ebe,0xca,0x301}, {0x1ebf,0xea,0x301}, {0x1ec0,0xca,0x300},
    {0x1ec1,0xea,0x300}, {0x1ec2,0xca,0x309}, {0x1ec3,0xea,0x309}, {0x1ec4,0xca,0x303},
    {0x1ec5,0xea,0x303}, {0x1ec6,0x1eb8,0x302}, {0x1ec7,0x1eb9,0x302}, {0x1ec8,0x49,0x309},
    {0x1ec9,0x69,0x309}, {0x1eca,0x49,0x323}, {0x1ecb,0x69,0x323}, {0x1ecc,0x4f,0x323},
    {0x1ecd,0x6f,0x323}, {0x1ece,0x4f,0x309}, {0x1ecf,0x6f,0x309}, {0x1ed0,0xd4,0x301},
    {0x1ed1,0xf4,0x301}, {0x1ed2,0xd4,0x300}, {0x1ed3,0xf4,0x300}, {0x1ed4,0xd4,0x309},
    {0x1ed5,0xf4,0x309}, {0x1ed6,0xd4,0x303}, {0x1ed7,0xf4,0x303}, {0x1ed8,0x1ecc,0x302},
    {0x1ed9,0x1ecd,0x302}, {0x1eda,0x1a0,0x301}, {0x1edb,0x1a1,0x301}, {0x1edc,0x1a0,0x300},
    {0x1edd,0x1a1,0x300}, {0x1ede,0x1a0,0x309}, {0x1edf,0x1a1,0x309}, {0x1ee0,0x1a0,0x303},
    {0x1ee1,0x1a1,0x303}, {0x1ee2,0x1a0,0x323}, {0x1ee3,0x1a1,0x323}, {0x1ee4,0x55,0x323},
    {0x1ee5,0x75,0x323}, {0x1ee6,0x55,0x309}, {0x1ee7,0x75,0x309}, {0x1ee8,0x1af,0x301},
    {0x1ee9,0x1b0,0x301}, {0x1eea,0x1af,0x300}, {0x1eeb,0x1b0,0x300}, {0x1eec,0x1af,0x309},
    {0x1eed,0x1b0,0x309}, {0x1eee,0x1af,0x303}, {0x1eef,0x1b0,0x303}, {0x1ef0,0x1af,0x323},
    {0x1ef1,0x1b0,0x323}, {0x1ef2,0x59,0x300}, {0x1ef3,0x79,0x300}, {0x1ef4,0x59,0x323},
    {0x1ef5,0x79,0x323}, {0x1ef6,0x59,0x309}, {0x1ef7,0x79,0x309}, {0x1ef8,0x59,0x303},
    {0x1ef9,0x79,0x303}, {0x1f00,0x3b1,0x313}, {0x1f01,0x3b1,0x314}, {0x1f02,0x1f00,0x300},
    {0x1f03,0x1f01,0x300}, {0x1f04,0x1f00,0x301}, {0x1f05,0x1f01,0x301}, {0x1f06,0x1f00,0x342},
    {0x1f07,0x1f01,0x342}, {0x1f08,0x391,0x313}, {0x1f09,0x391,0x314}, {0x1f0a,0x1f08,0x300},
    {0x1f0b,0x1f09,0x300}, {0x1f0c,0x1f08,0x301}, {0x1f0d,0x1f09,0x301}, {0x1f0e,0x1f08,0x342},
    {0x1f0f,0x1f09,0x342}, {0x1f10,0x3b5,0x313}, {0x1f11,0x3b5,0x314}, {0x1f12,0x1f10,0x300},
    {0x1f13,0x1f11,0x300}, {0x1f14,0x1f10,0x301}, {0x1f15,0x1f11,0x301}, {0x1f18,0x395,0x313},
    {0x1f19,0x395,0x314}, {0x1f1a,0x1f18,0x300}, {0x1f1b,0x1f19,0x300}, {0x1f1c,0x1f18,0x301},
    {0x1f1d,0x1f19,0x301}, {0x1f20,0x3b7,0x313}, {0x1f21,0x3b7,0x314}, {0x1f22,0x1f20,0x300},
    {0x1f23,0x1f21,0x300}, {0x1f24,0x1f20,0x301}, {0x1f25,0x1f21,0x301}, {0x1f26,0x1f20,0x342},
    {0x1f27,0x1f21,0x342}, {0x1f28,0x397,0x313}, {0x1f29,0x397,0x314}, {0x1f2a,0x1f28,0x300},
    {0x1f2b,0x1f29,0x300}, {0x1f2c,0x1f28,0x301}, {0x1f2d,0x1f29,0x301}, {0x1f2e,0x1f28,0x342},
    {0x1f2f,0x1f29,0x342}, {0x1f30,0x3b9,0x313}, {0x1f31,0x3b9,0x314}, {0x1f32,0x1f30,0x300},
    {0x1f33,0x1f31,0x300}, {0x1f34,0x1f30,0x301}, {0x1f35,0x1f31,0x301}, {0x1f36,0x1f30,0x342},
    {0x1f37,0x1f31,0x342}, {0x1f38,0x399,0x313}, {0x1f39,0x399,0x314}, {0x1f3a,0x1f38,0x300},
    {0x1f3b,0x1f39,0x300}, {0x1f3c,0x1f38,0x301}, {0x1f3d,0x1f39,0x301}, {0x1f3e,0x1f38,0x342},
    {0x1f3f,0x1f39,0x342}, {0x1f40,0x3bf,0x313}, {0x1f41,0x3bf,0x314}, {0x1f42,0x1f40,0x300},
    {0x1f43,0x1f41,0x300}, {0x1f44,0x1f40,0x301}, {0x1f45,0x1f41,0x301}, {0x1f48,0x39f,0x313},
    {0x1f49,0x39f,0x314}, {0x1f4a,0x1f48,0x300}, {0x1f4b,0x1f49,0x300}, {0x1f4c,0x1f48,0x301},
    {0x1f4d,0x1f49,0x301}, {0x1f50,0x3c5,0x313}, {0x1f51,0x3c5,0x314}, {0x1f52,0x1f50,0x300},
    {0x1f53,0x1f51,0x300}, {0x1f54,0x1f50,0x301}, {0x1f55,0x1f51,0x301}, {0x1f56,0x1f50,0x342},
    {0x1f57,0x1f51,0x342}, {0x1f59,0x3a5,0x314}, {0x1f5b,0x1f59,0x300}, {0x1f5d,0x1f59,0x301},
    {0x1f5f,0x1f59,0x342}, {0x1f60,0x3c9,0x313}, {0x1f61,0x3c9,0x314}, {0x1f62,0x1f60,0x300},
    {0x1f63,0x1f61,0x300}, {0x1f64,0x1f60,0x301}, {0x1f65,0x1f61,0x301}, {0x1f66,0x1f60,0x342},
    {0x1f67,0x1f61,0x342}, {0x1f68,0x3a9,0x313}, {0x1f69,0x3a9,0x314}, {0x1f6a,0x1f68,0x300},
    {0x1f6b,0x1f69,0x300}, {0x1f6c,0x1f68,0x301}, {0x1f6d,0x1f69,0x301}, {0x1f6e,0x1f68,0x342},
    {0x1f6f,0x1f69,0x342}, {0x1f70,0x3b1,0x300}, {0x1f71,0x3ac,0x0}, {0x1f72,0x3b5,0x300},
    {0x1f73,0x3ad,0x0}, {0x1f74,0x3b7,0x300}, {0x1f75,0x3ae,0x0}, {0x1f76,0x3b9,0x300},
    {0x1f77,0x3af,0x0}, {0x1f78,0x3bf,0x300}, {0x1f79,0x3cc,0x0}, {0x1f7a,0x3c5,0x300},
    {0x1f7b,0x3cd,0x0}, {0x1f7c,0x3c9,0x300}, {0x1f7d,0x3ce,0x0}, {0x1f80,0x1f00,0x345},
    {0x1f81,0x1f01,0x345}, {0x1f82,0x1f02,0x345}, {0x1f83,0x1f03,0x345}, {0x1f84,0x1f04,0x345},
    {0x1f85,0x1f05,0x345}, {0x1f86,0x1f06,0x345}, {0x1f87,0x1f07,0x345}, {0x1f88,0x1f08,0x345},
    {0x1f89,0x1f09,0x345}, {0x1f8a,0x1f0a,0x345}, {0x1f8b,0x1f0b,0x345}, {0x1f8c,0x1f0c,0x345},
    {0x1f8d,0x1f0d,0x345}, {0x1f8e,0x1f0e,0x345}, {0x1f8f,0x1f0f,0x345}, {0x1f90,0x1f20,0x345},
    {0x1f91,0x1f21,0x345}, {0x1f92,0x1f22,0x345}, {0x1f93,0x1f23,0x345}, {0x1f94,0x1f24,0x345},
    {0x1f95,0x1f25,0x345}, {0x1f96,0x1f26,0x345}, {0x1f97,0x1f27,0x345}, {0x1f98,0x1f28,0x345},
    {0x1f99,0x1f29,0x345}, {0x1f9a,0x1f2a,0x345}, {0x1f9b,0x1f2b,0x345}, {0x1f9c,0x1f2c,0x345},
    {0x1f9d,0x1f2d,0x345}, {0x1f9e,0x1f2e,0x345}, {0x1f9f,0x1f2f,0x345}, {0x1fa0,0x1f60,0x345},
    {0x1fa1,0x1f61,0x345}, {0x1fa2,0x1f62,0x345}, {0x1fa3,0x1f63,0x345}, {0x1fa4,0x1f64,0x345},
    {0x1fa5,0x1f65,0x345}, {0x1fa6,0x1f66,0x345}, {0x1fa7,0x1f67,0x345}, {0x1fa8,0x1f68,0x345},
    {0x1fa9,0x1f69,0x345}, {0x1faa,0x1f6a,0x345}, {0x1fab,0x1f6b,0x345}, {0x1fac,0x1f6c,0x345},
    {0x1fad,0x1f6d,0x345}, {0x1fae,0x1f6e,0x345}, {0x1faf,0x1f6f,0x345}, {0x1fb0,0x3b1,0x306},
    {0x1fb1,0x3b1,0x304}, {0x1fb2,0x1f70,0x345}, {0x1fb3,0x3b1,0x345}, {0x1fb4,0x3ac,0x345},
    {0x1fb6,0x3b1,0x342}, {0x1fb7,0x1fb6,0x345}, {0x1fb8,0x391,0x306}, {0x1fb9,0x391,0x304},
    {0x1fba,0x391,0x300}, {0x1fbb,0x386,0x0}, {0x1fbc,0x391,0x345}, {0x1fbe,0x3b9,0x0},
    {0x1fc1,0xa8,0x342}, {0x1fc2,0x1f74,0x345}, {0x1fc3,0x3b7,0x345}, {0x1fc4,0x3ae,0x345},
    {0x1fc6,0x3b7,0x342}, {0x1fc7,0x1fc6,0x345}, {0x1fc8,0x395,0x300}, {0x1fc9,0x388,0x0},
    {0x1fca,0x397,0x300}, {0x1fcb,0x389,0x0}, {0x1fcc,0x397,0x345}, {0x1fcd,0x1fbf,0x300},
    {0x1fce,0x1fbf,0x301}, {0x1fcf,0x1fbf,0x342}, {0x1fd0,0x3b9,0x306}, {0x1fd1,0x3b9,0x304},
    {0x1fd2,0x3ca,0x300}, {0x1fd3,0x390,0x0}, {0x1fd6,0x3b9,0x342}, {0x1fd7,0x3ca,0x342},
    {0x1fd8,0x399,0x306}, {0x1fd9,0x399,0x304}, {0x1fda,0x399,0x300}, {0x1fdb,0x38a,0x0},
    {0x1fdd,0x1ffe,0x300}, {0x1fde,0x1ffe,0x301}, {0x1fdf,0x1ffe,0x342}, {0x1fe0,0x3c5,0x306},
    {0x1fe1,0x3c5,0x304}, {0x1fe2,0x3cb,0x300}, {0x1fe3,0x3b0,0x0}, {0x1fe4,0x3c1,0x313},
    {0x1fe5,0x3c1,0x314}, {0x1fe6,0x3c5,0x342}, {0x1fe7,0x3cb,0x342}, {0x1fe8,0x3a5,0x306},
    {0x1fe9,0x3a5,0x304}, {0x1fea,0x3a5,0x300}, {0x1feb,0x38e,0x0}, {0x1fec,0x3a1,0x314},
    {0x1fed,0xa8,0x300}, {0x1fee,0x385,0x0}, {0x1fef,0x60,0x0}, {0x1ff2,0x1f7c,0x345},
    {0x1ff3,0x3c9,0x345}, {0x1ff4,0x3ce,0x345}, {0x1ff6,0x3c9,0x342}, {0x1ff7,0x1ff6,0x345},
    {0x1ff8,0x39f,0x300}, {0x1ff9,0x38c,0x0}, {0x1ffa,0x3a9,0x300}, {0x1ffb,0x38f,0x0},
    {0x1ffc,0x3a9,0x345}, {0x1ffd,0xb4,0x0}, {0x2000,0x2002,0x0}, {0x2001,0x2003,0x0},
    {0x2126,0x3a9,0x0}, {0x212a,0x4b,0x0}, {0x212b,0xc5,0x0}, {0x219a,0x2190,0x338},
    {0x219b,0x2192,0x338}, {0x21ae,0x2194,0x338}, {0x21cd,0x21d0,0x338}, {0x21ce,0x21d4,0x338},
    {0x21cf,0x21d2,0x338}, {0x2204,0x2203,0x338}, {0x2209,0x2208,0x338}, {0x220c,0x220b,0x338},
    {0x2224,0x2223,0x338}, {0x2226,0x2225,0x338}, {0x2241,0x223c,0x338}, {0x2244,0x2243,0x338},
    {0x2247,0x2245,0x338}, {0x2249,0x2248,0x338}, {0x2260,0x3d,0x338}, {0x2262,0x2261,0x338},
    {0x226d,0x224d,0x338}, {0x226e,0x3c,0x338}, {0x226f,0x3e,0x338}, {0x2270,0x2264,0x338},
    {0x2271,0x2265,0x338}, {0x2274,0x2272,0x338}, {0x2275,0x2273,0x338}, {0x2278,0x2276,0x338},
    {0x2279,0x2277,0x338}, {0x2280,0x227a,0x338}, {0x2281,0x227b,0x338}, {0x2284,0x2282,0x338},
    {0x2285,0x2283,0x338}, {0x2288,0x2286,0x338}, {0x2289,0x2287,0x338}, {0x22ac,0x22a2,0x338},
    {0x22ad,0x22a8,0x338}, {0x22ae,0x22a9,0x338}, {0x22af,0x22ab,0x338}, {0x22e0,0x227c,0x338},
    {0x22e1,0x227d,0x338}, {0x22e2,0x2291,0x338}, {0x22e3,0x2292,0x338}, {0x22ea,0x22b2,0x338},
    {0x22eb,0x22b3,0x338}, {0x22ec,0x22b4,0x338}, {0x22ed,0x22b5,0x338}, {0x2329,0x3008,0x0},
    {0x232a,0x3009,0x0}, {0x2adc,0x2add,0x338}, {0x304c,0x304b,0x3099}, {0x304e,0x304d,0x3099},
    {0x3050,0x304f,0x3099}, {0x3052,0x3051,0x3099}, {0x3054,0x3053,0x3099}, {0x3056,0x3055,0x3099},
    {0x3058,0x3057,0x3099}, {0x305a,0x3059,0x3099}, {0x305c,0x305b,0x3099}, {0x305e,0x305d,0x3099},
    {0x3060,0x305f,0x3099}, {0x3062,0x3061,0x3099}, {0x3065,0x3064,0x3099}, {0x3067,0x3066,0x3099},
    {0x3069,0x3068,0x3099}, {0x3070,0x306f,0x3099}, {0x3071,0x306f,0x309a}, {0x3073,0x3072,0x3099},
    {0x3074,0x3072,0x309a}, {0x3076,0x3075,0x3099}, {0x3077,0x3075,0x309a}, {0x3079,0x3078,0x3099},
    {0x307a,0x3078,0x309a}, {0x307c,0x307b,0x3099}, {0x307d,0x307b,0x309a}, {0x3094,0x3046,0x3099},
    {0x309e,0x309d,0x3099}, {0x30ac,0x30ab,0x3099}, {0x30ae,0x30ad,0x3099}, {0x30b0,0x30af,0x3099},
    {0x30b2,0x30b1,0x3099}, {0x30b4,0x30b3,0x3099}, {0x30b6,0x30b5,0x3099}, {0x30b8,0x30b7,0x3099},
    {0x30ba,0x30b9,0x3099}, {0x30bc,0x30bb,0x3099}, {0x30be,0x30bd,0x3099}, {0x30c0,0x30bf,0x3099},
    {0x30c2,0x30c1,0x3099}, {0x30c5,0x30c4,0x3099}, {0x30c7,0x30c6,0x3099}, {0x30c9,0x30c8,0x3099},
    {0x30d0,0x30cf,0x3099}, {0x30d1,0x30cf,0x309a}, {0x30d3,0x30d2,0x3099}, {0x30d4,0x30d2,0x309a},
    {0x30d6,0x30d5,0x3099}, {0x30d7,0x30d5,0x309a}, {0x30d9,0x30d8,0x3099}, {0x30da,0x30d8,0x309a},
    {0x30dc,0x30db,0x3099}, {0x30dd,0x30db,0x309a}, {0x30f4,0x30a6,0x3099}, {0x30f7,0x30ef,0x3099},
    {0x30f8,0x30f0,0x3099}, {0x30f9,0x30f1,0x3099}, {0x30fa,0x30f2,0x3099}, {0x30fe,0x30fd,0x3099},
    {0xf900,0x8c48,0x0}, {0xf901,0x66f4,0x0}, {0xf902,0x8eca,0x0}, {0xf903,0x8cc8,0x0},
    {0xf904,0x6ed1,0x0}, {0xf905,0x4e32,0x0}, {0xf906,0x53e5,0x0}, {0xf907,0x9f9c,0x0},
    {0xf908,0x9f9c,0x0}, {0xf909,0x5951,0x0}, {0xf90a,0x91d1,0x0}, {0xf90b,0x5587,0x0},
    {0xf90c,0x5948,0x0}, {0xf90d,0x61f6,0x0}, {0xf90e,0x7669,0x0}, {0xf90f,0x7f85,0x0},
    {0xf910,0x863f,0x0}, {0xf911,0x87ba,0x0}, {0xf912,0x88f8,0x0}, {0xf913,0x908f,0x0},
    {0xf914,0x6a02,0x0}, {0xf915,0x6d1b,0x0}, {0xf916,0x70d9,0x0}, {0xf917,0x73de,0x0},
    {0xf918,0x843d,0x0}, {0xf919,0x916a,0x0}, {0xf91a,0x99f1,0x0}, {0xf91b,0x4e82,0x0},
    {0xf91c,0x5375,0x0}, {0xf91d,0x6b04,0x0}, {0xf91e,0x721b,0x0}, {0xf91f,0x862d,0x0},
    {0xf920,0x9e1e,0x0}, {0xf921,0x5d50,0x0}, {0xf922,0x6feb,0x0}, {0xf923,0x85cd,0x0},
    {0xf924,0x8964,0x0}, {0xf925,0x62c9,0x0}, {0xf926,0x81d8,0x0}, {0xf927,0x881f,0x0},
    {0xf928,0x5eca,0x0}, {0xf929,0x6717,0x0}, {0xf92a,0x6d6a,0x0}, {0xf92b,0x72fc,0x0},
    {0xf92c,0x90ce,0x0}, {0xf92d,0x4f86,0x0}, {0xf92e,0x51b7,0x0}, {0xf92f,0x52de,0x0},
    {0xf930,0x64c4,0x0}, {0xf931,0x6ad3,0x0}, {0xf932,0x7210,0x0}, {0xf933,0x76e7,0x0},
    {0xf934,0x8001,0x0}, {0xf935,0x8606,0x0}, {0xf936,0x865c,0x0}, {0xf937,0x8def,0x0},
    {0xf938,0x9732,0x0}, {0xf939,0x9b6f,0x0}, {0xf93a,0x9dfa,0x0}, {0xf93b,0x788c,0x0},
    {0xf93c,0x797f,0x0}, {0xf93d,0x7da0,0x0}, {0xf93e,0x83c9,0x0}, {0xf93f,0x9304,0x0},
    {0xf940,0x9e7f,0x0}, {0xf941,0x8ad6,0x0}, {0xf942,0x58df,0x0}, {0xf943,0x5f04,0x0},
    {0xf944,0x7c60,0x0}, {0xf945,0x807e,0x0}, {0xf946,0x7262,0x0}, {0xf947,0x78ca,0x0},
    {0xf948,0x8cc2,0x0}, {0xf949,0x96f7,0x0}, {0xf94a,0x58d8,0x0}, {0xf94b,0x5c62,0x0},
    {0xf94c,0x6a13,0x0}, {0xf94d,0x6dda,0x0}, {0xf94e,0x6f0f,0x0}, {0xf94f,0x7d2f,0x0},
    {0xf950,0x7e37,0x0}, {0xf951,0x964b,0x0}, {0xf952,0x52d2,0x0}, {0xf953,0x808b,0x0},
    {0xf954,0x51dc,0x0}, {0xf955,0x51cc,0x0}, {0xf956,0x7a1c,0x0}, {0xf957,0x7dbe,0x0},
    {0xf958,0x83f1,0x0}, {0xf959,0x9675,0x0}, {0xf95a,0x8b80,0x0}, {0xf95b,0x62cf,0x0},
    {0xf95c,0x6a02,0x0}, {0xf95d,0x8afe,0x0}, {0xf95e,0x4e39,0x0}, {0xf95f,0x5be7,0x0},
    {0xf960,0x6012,0x0}, {0xf961,0x7387,0x0}, {0xf962,0x7570,0x0}, {0xf963,0x5317,0x0},
    {0xf964,0x78fb,0x0}, {0xf965,0x4fbf,0x0}, {0xf966,0x5fa9,0x0}, {0xf967,0x4e0d,0x0},
    {0xf968,0x6ccc,0x0}, {0xf969,0x6578,0x0}, {0xf96a,0x7d22,0x0}, {0xf96b,0x53c3,0x0},
    {0xf96c,0x585e,0x0}, {0xf96d,0x7701,0x0}, {0xf96e,0x8449,0x0}, {0xf96f,0x8aaa,0x0},
    {0xf970,0x6bba,0x0}, {0xf971,0x8fb0,0x0}, {0xf972,0x6c88,0x0}, {0xf973,0x62fe,0x0},
    {0xf974,0x82e5,0x0}, {0xf975,0x63a0,0x0}, {0xf976,0x7565,0x0}, {0xf977,0x4eae,0x0},
    {0xf978,0x5169,0x0}, {0xf979,0x51c9,0x0}, {0xf97a,0x6881,0x0}, {0xf97b,0x7ce7,0x0},
    {0xf97c,0x826f,0x0}, {0xf97d,0x8ad2,0x0}, {0xf97e,0x91cf,0x0}, {0xf97f,0x52f5,0x0},
    {0xf980,0x5442,0x0}, {0xf981,0x5973,0x0}, {0xf982,0x5eec,0x0}, {0xf983,0x65c5,0x0},
    {0xf984,0x6ffe,0x0}, {0xf985,0x792a,0x0}, {0xf986,0x95ad,0x0}, {0xf987,0x9a6a,0x0},
    {0xf988,0x9e97,0x0}, {0xf989,0x9ece,0x0}, {0xf98a,0x529b,0x0}, {0xf98b,0x66c6,0x0},
    {0xf98c,0x6b77,0x0}, {0xf98d,0x8f62,0x0}, {0xf98e,0x5e74,0x0}, {0xf98f,0x6190,0x0},
    {0xf990,0x6200,0x0}, {0xf991,0x649a,0x0}, {0xf992,0x6f23,0x0}, {0xf993,0x7149,0x0},
    {0xf994,0x7489,0x0}, {0xf995,0x79ca,0x0}, {0xf996,0x7df4,0x0}, {0xf997,0x806f,0x0},
    {0xf998,0x8f26,0x0}, {0xf999,0x84ee,0x0}, {0xf99a,0x9023,0x0}, {0xf99b,0x934a,0x0},
    {0xf99c,0x5217,0x0}, {0xf99d,0x52a3,0x0}, {0xf99e,0x54bd,0x0}, {0xf99f,0x70c8,0x0},
    {0xf9a0,0x88c2,0x0}, {0xf9a1,0x8aaa,0x0}, {0xf9a2,0x5ec9,0x0}, {0xf9a3,0x5ff5,0x0},
    {0xf9a4,0x637b,0x0}, {0xf9a5,0x6bae,0x0}, {0xf9a6,0x7c3e,0x0}, {0xf9a7,0x7375,0x0},
    {0xf9a8,0x4ee4,0x0}, {0xf9a9,0x56f9,0x0}, {0xf9aa,0x5be7,0x0}, {0xf9ab,0x5dba,0x0},
    {0xf9ac,0x601c,0x0}, {0xf9ad,0x73b2,0x0}, {0xf9ae,0x7469,0x0}, {0xf9af,0x7f9a,0x0},
    {0xf9b0,0x8046,0x0}, {0xf9b1,0x9234,0x0}, {0xf9b2,0x96f6,0x0}, {0xf9b3,0x9748,0x0},
    {0xf9b4,0x9818,0x0}, {0xf9b5,0x4f8b,0x0}, {0xf9b6,0x79ae,0x0}, {0xf9b7,0x91b4,0x0},
    {0xf9b8,0x96b8,0x0}, {0xf9b9,0x60e1,0x0}, {0xf9ba,0x4e86,0x0}, {0xf9bb,0x50da,0x0},
    {0xf9bc,0x5bee,0x0}, {0xf9bd,0x5c3f,0x0}, {0xf9be,0x6599,0x0}, {0xf9bf,0x6a02,0x0},
    {0xf9c0,0x71ce,0x0}, {0xf9c1,0x7642,0x0}, {0xf9c2,0x84fc,0x0}, {0xf9c3,0x907c,0x0},
    {0xf9c4,0x9f8d,0x0}, {0xf9c5,0x6688,0x0}, {0xf9c6,0x962e,0x0}, {0xf9c7,0x5289,0x0},
    {0xf9c8,0x677b,0x0}, {0xf9c9,0x67f3,0x0}, {0xf9ca,0x6d41,0x0}, {0xf9cb,0x6e9c,0x0},
    {0xf9cc,0x7409,0x0}, {0xf9cd,0x7559,0x0}, {0xf9ce,0x786b,0x0}, {0xf9cf,0x7d10,0x0},
    {0xf9d0,0x985e,0x0}, {0xf9d1,0x516d,0x0}, {0xf9d2,0x622e,0x0}, {0xf9d3,0x9678,0x0},
    {0xf9d4,0x502b,0x0}, {0xf9d5,0x5d19,0x0}, {0xf9d6,0x6dea,0x0}, {0xf9d7,0x8f2a,0x0},
    {0xf9d8,0x5f8b,0x0}, {0xf9d9,0x6144,0x0}, {0xf9da,0x6817,0x0}, {0xf9db,0x7387,0x0},
    {0xf9dc,0x9686,0x0}, {0xf9dd,0x5229,0x0}, {0xf9de,0x540f,0x0}, {0xf9df,0x5c65,0x0},
    {0xf9e0,0x6613,0x0}, {0xf9e1,0x674e,0x0}, {0xf9e2,0x68a8,0x0}, {0xf9e3,0x6ce5,0x0},
    {0xf9e4,0x7406,0x0}, {0xf9e5,0x75e2,0x0}, {0xf9e6,0x7f79,0x0}, {0xf9e7,0x88cf,0x0},
    {0xf9e8,0x88e1,0x0}, {0xf9e9,0x91cc,0x0}, {0xf9ea,0x96e2,0x0}, {0xf9eb,0x533f,0x0},
    {0xf9ec,0x6eba,0x0}, {0xf9ed,0x541d,0x0}, {0xf9ee,0x71d0,0x0}, {0xf9ef,0x7498,0x0},
    {0xf9f0,0x85fa,0x0}, {0xf9f1,0x96a3,0x0}, {0xf9f2,0x9c57,0x0}, {0xf9f3,0x9e9f,0x0},
    {0xf9f4,0x6797,0x0}, {0xf9f5,0x6dcb,0x0}, {0xf9f6,0x81e8,0x0}, {0xf9f7,0x7acb,0x0},
    {0xf9f8,0x7b20,0x0}, {0xf9f9,0x7c92,0x0}, {0xf9fa,0x72c0,0x0}, {0xf9fb,0x7099,0x0},
    {0xf9fc,0x8b58,0x0}, {0xf9fd,0x4ec0,0x0}, {0xf9fe,0x8336,0x0}, {0xf9ff,0x523a,0x0},
    {0xfa00,0x5207,0x0}, {0xfa01,0x5ea6,0x0}, {0xfa02,0x62d3,0x0}, {0xfa03,0x7cd6,0x0},
    {0xfa04,0x5b85,0x0}, {0xfa05,0x6d1e,0x0}, {0xfa06,0x66b4,0x0}, {0xfa07,0x8f3b,0x0},
    {0xfa08,0x884c,0x0}, {0xfa09,0x964d,0x0}, {0xfa0a,0x898b,0x0}, {0xfa0b,0x5ed3,0x0},
    {0xfa0c,0x5140,0x0}, {0xfa0d,0x55c0,0x0}, {0xfa10,0x585a,0x0}, {0xfa12,0x6674,0x0},
    {0xfa15,0x51de,0x0}, {0xfa16,0x732a,0x0}, {0xfa17,0x76ca,0x0}, {0xfa18,0x793c,0x0},
    {0xfa19,0x795e,0x0}, {0xfa1a,0x7965,0x0}, {0xfa1b,0x798f,0x0}, {0xfa1c,0x9756,0x0},
    {0xfa1d,0x7cbe,0x0}, {0xfa1e,0x7fbd,0x0}, {0xfa20,0x8612,0x0}, {0xfa22,0x8af8,0x0},
    {0xfa25,0x9038,0x0}, {0xfa26,0x90fd,0x0}, {0xfa2a,0x98ef,0x0}, {0xfa2b,0x98fc,0x0},
    {0xfa2c,0x9928,0x0}, {0xfa2d,0x9db4,0x0}, {0xfa2e,0x90de,0x0}, {0xfa2f,0x96b7,0x0},
    {0xfa30,0x4fae,0x0}, {0xfa31,0x50e7,0x0}, {0xfa32,0x514d,0x0}, {0xfa33,0x52c9,0x0},
    {0xfa34,0x52e4,0x0}, {0xfa35,0x5351,0x0}, {0xfa36,0x559d,0x0}, {0xfa37,0x5606,0x0},
    {0xfa38,0x5668,0x0}, {0xfa39,0x5840,0x0}, {0xfa3a,0x58a8,0x0}, {0xfa3b,0x5c64,0x0},
    {0xfa3c,0x5c6e,0x0}, {0xfa3d,0x6094,0x0}, {0xfa3e,0x6168,0x0}, {0xfa3f,0x618e,0x0},
    {0xfa40,0x61f2,0x0}, {0xfa41,0x654f,0x0}, {0xfa42,0x65e2,0x0}, {0xfa43,0x6691,0x0},
    {0xfa44,0x6885,0x0}, {0xfa45,0x6d77,0x0}, {0xfa46,0x6e1a,0x0}, {0xfa47,0x6f22,0x0},
    {0xfa48,0x716e,0x0}, {0xfa49,0x722b,0x0}, {0xfa4a,0x7422,0x0}, {0xfa4b,0x7891,0x0},
    {0xfa4c,0x793e,0x0}, {0xfa4d,0x7949,0x0}, {0xfa4e,0x7948,0x0}, {0xfa4f,0x7950,0x0},
    {0xfa50,0x7956,0x0}, {0xfa51,0x795d,0x0}, {0xfa52,0x798d,0x0}, {0xfa53,0x798e,0x0},
    {0xfa54,0x7a40,0x0}, {0xfa55,0x7a81,0x0}, {0xfa56,0x7bc0,0x0}, {0xfa57,0x7df4,0x0},
    {0xfa58,0x7e09,0x0}, {0xfa59,0x7e41,0x0}, {0xfa5a,0x7f72,0x0}, {0xfa5b,0x8005,0x0},
    {0xfa5c,0x81ed,0x0}, {0xfa5d,0x8279,0x0}, {0xfa5e,0x8279,0x0}, {0xfa5f,0x8457,0x0},
    {0xfa60,0x8910,0x0}, {0xfa61,0x8996,0x0}, {0xfa62,0x8b01,0x0}, {0xfa63,0x8b39,0x0},
    {0xfa64,0x8cd3,0x0}, {0xfa65,0x8d08,0x0}, {0xfa66,0x8fb6,0x0}, {0xfa67,0x9038,0x0},
    {0xfa68,0x96e3,0x0}, {0xfa69,0x97ff,0x0}, {0xfa6a,0x983b,0x0}, {0xfa6b,0x6075,0x0},
    {0xfa6c,0x242ee,0x0}, {0xfa6d,0x8218,0x0}, {0xfa70,0x4e26,0x0}, {0xfa71,0x51b5,0x0},
    {0xfa72,0x5168,0x0}, {0xfa73,0x4f80,0x0}, {0xfa74,0x5145,0x0}, {0xfa75,0x5180,0x0},
    {0xfa76,0x52c7,0x0}, {0xfa77,0x52fa,0x0}, {0xfa78,0x559d,0x0}, {0xfa79,0x5555,0x0},
    {0xfa7a,0x5599,0x0}, {0xfa7b,0x55e2,0x0}, {0xfa7c,0x585a,0x0}, {0xfa7d,0x58b3,0x0},
    {0xfa7e,0x5944,0x0}, {0xfa7f,0x5954,0x0}, {0xfa80,0x5a62,0x0}, {0xfa81,0x5b28,0x0},
    {0xfa82,0x5ed2,0x0}, {0xfa83,0x5ed9,0x0}, {0xfa84,0x5f69,0x0}, {0xfa85,0x5fad,0x0},
    {0xfa86,0x60d8,0x0}, {0xfa87,0x614e,0x0}, {0xfa88,0x6108,0x0}, {0xfa89,0x618e,0x0},
    {0xfa8a,0x6160,0x0}, {0xfa8b,0x61f2,0x0}, {0xfa8c,0x6234,0x0}, {0xfa8d,0x63c4,0x0},
    {0xfa8e,0x641c,0x0}, {0xfa8f,0x6452,0x0}, {0xfa90,0x6556,0x0}, {0xfa91,0x6674,0x0},
    {0xfa92,0x6717,0x0}, {0xfa93,0x671b,0x0}, {0xfa94,0x6756,0x0}, {0xfa95,0x6b79,0x0},
    {0xfa96,0x6bba,0x0}, {0xfa97,0x6d41,0x0}, {0xfa98,0x6edb,0x0}, {0xfa99,0x6ecb,0x0},
    {0xfa9a,0x6f22,0x0}, {0xfa9b,0x701e,0x0}, {0xfa9c,0x716e,0x0}, {0xfa9d,0x77a7,0x0},
    {0xfa9e,0x7235,0x0}, {0xfa9f,0x72af,0x0}, {0xfaa0,0x732a,0x0}, {0xfaa1,0x7471,0x0},
    {0xfaa2,0x7506,0x0}, {0xfaa3,0x753b,0x0}, {0xfaa4,0x761d,0x0}, {0xfaa5,0x761f,0x0},
    {0xfaa6,0x76ca,0x0}, {0xfaa7,0x76db,0x0}, {0xfaa8,0x76f4,0x0}, {0xfaa9,0x774a,0x0},
    {0xfaaa,0x7740,0x0}, {0xfaab,0x78cc,0x0}, {0xfaac,0x7ab1,0x0}, {0xfaad,0x7bc0,0x0},
    {0xfaae,0x7c7b,0x0}, {0xfaaf,0x7d5b,0x0}, {0xfab0,0x7df4,0x0}, {0xfab1,0x7f3e,0x0},
    {0xfab2,0x8005,0x0}, {0xfab3,0x8352,0x0}, {0xfab4,0x83ef,0x0}, {0xfab5,0x8779,0x0},
    {0xfab6,0x8941,0x0}, {0xfab7,0x8986,0x0}, {0xfab8,0x8996,0x0}, {0xfab9,0x8abf,0x0},
    {0xfaba,0x8af8,0x0}, {0xfabb,0x8acb,0x0}, {0xfabc,0x8b01,0x0}, {0xfabd,0x8afe,0x0},
    {0xfabe,0x8aed,0x0}, {0xfabf,0x8b39,0x0}, {0xfac0,0x8b8a,0x0}, {0xfac1,0x8d08,0x0},
    {0xfac2,0x8f38,0x0}, {0xfac3,0x9072,0x0}, {0xfac4,0x9199,0x0}, {0xfac5,0x9276,0x0},
    {0xfac6,0x967c,0x0}, {0xfac7,0x96e3,0x0}, {0xfac8,0x9756,0x0}, {0xfac9,0x97db,0x0},
    {0xfaca,0x97ff,0x0}, {0xfacb,0x980b,0x0}, {0xfacc,0x983b,0x0}, {0xfacd,0x9b12,0x0},
    {0xface,0x9f9c,0x0}, {0xfacf,0x2284a,0x0}, {0xfad0,0x22844,0x0}, {0xfad1,0x233d5,0x0},
    {0xfad2,0x3b9d,0x0}, {0xfad3,0x4018,0x0}, {0xfad4,0x4039,0x0}, {0xfad5,0x25249,0x0},
    {0xfad6,0x25cd0,0x0}, {0xfad7,0x27ed3,0x0}, {0xfad8,0x9f43,0x0}, {0xfad9,0x9f8e,0x0},
    {0xfb1d,0x5d9,0x5b4}, {0xfb1f,0x5f2,0x5b7}, {0xfb2a,0x5e9,0x5c1}, {0xfb2b,0x5e9,0x5c2},
    {0xfb2c,0xfb49,0x5c1}, {0xfb2d,0xfb49,0x5c2}, {0xfb2e,0x5d0,0x5b7}, {0xfb2f,0x5d0,0x5b8},
    {0xfb30,0x5d0,0x5bc}, {0xfb31,0x5d1,0x5bc}, {0xfb32,0x5d2,0x5bc}, {0xfb33,0x5d3,0x5bc},
    {0xfb34,0x5d4,0x5bc}, {0xfb35,0x5d5,0x5bc}, {0xfb36,0x5d6,0x5bc}, {0xfb38,0x5d8,0x5bc},
    {0xfb39,0x5d9,0x5bc}, {0xfb3a,0x5da,0x5bc}, {0xfb3b,0x5db,0x5bc}, {0xfb3c,0x5dc,0x5bc},
    {0xfb3e,0x5de,0x5bc}, {0xfb40,0x5e0,0x5bc}, {0xfb41,0x5e1,0x5bc}, {0xfb43,0x5e3,0x5bc},
    {0xfb44,0x5e4,0x5bc}, {0xfb46,0x5e6,0x5bc}, {0xfb47,0x5e7,0x5bc}, {0xfb48,0x5e8,0x5bc},
    {0xfb49,0x5e9,0x5bc}, {0xfb4a,0x5ea,0x5bc}, {0xfb4b,0x5d5,0x5b9}, {0xfb4c,0x5d1,0x5bf},
    {0xfb4d,0x5db,0x5bf}, {0xfb4e,0x5e4,0x5bf}, {0x1109a,0x11099,0x110ba},
    {0x1109c,0x1109b,0x110ba}, {0x110ab,0x110a5,0x110ba}, {0x1112e,0x11131,0x11127},
    {0x1112f,0x11132,0x11127}, {0x1134b,0x11347,0x1133e}, {0x1134c,0x11347,0x11357},
    {0x114bb,0x114b9,0x114ba}, {0x114bc,0x114b9,0x114b0}, {0x114be,0x114b9,0x114bd},
    {0x115ba,0x115b8,0x115af}, {0x115bb,0x115b9,0x115af}, {0x1d15e,0x1d157,0x1d165},
    {0x1d15f,0x1d158,0x1d165}, {0x1d160,0x1d15f,0x1d16e}, {0x1d161,0x1d15f,0x1d16f},
    {0x1d162,0x1d15f,0x1d170}, {0x1d163,0x1d15f,0x1d171}, {0x1d164,0x1d15f,0x1d172},
    {0x1d1bb,0x1d1b9,0x1d165}, {0x1d1bc,0x1d1ba,0x1d165}, {0x1d1bd,0x1d1bb,0x1d16e},
    {0x1d1be,0x1d1bc,0x1d16e}, {0x1d1bf,0x1d1bb,0x1d16f}, {0x1d1c0,0x1d1bc,0x1d16f},
    {0x2f800,0x4e3d,0x0}, {0x2f801,0x4e38,0x0}, {0x2f802,0x4e41,0x0}, {0x2f803,0x20122,0x0},
    {0x2f804,0x4f60,0x0}, {0x2f805,0x4fae,0x0}, {0x2f806,0x4fbb,0x0}, {0x2f807,0x5002,0x0},
    {0x2f808,0x507a,0x0}, {0x2f809,0x5099,0x0}, {0x2f80a,0x50e7,0x0}, {0x2f80b,0x50cf,0x0},
    {0x2f80c,0x349e,0x0}, {0x2f80d,0x2063a,0x0}, {0x2f80e,0x514d,0x0}, {0x2f80f,0x5154,0x0},
    {0x2f810,0x5164,0x0}, {0x2f811,0x5177,0x0}, {0x2f812,0x2051c,0x0}, {0x2f813,0x34b9,0x0},
    {0x2f814,0x5167,0x0}, {0x2f815,0x518d,0x0}, {0x2f816,0x2054b,0x0}, {0x2f817,0x5197,0x0},
    {0x2f818,0x51a4,0x0}, {0x2f819,0x4ecc,0x0}, {0x2f81a,0x51ac,0x0}, {0x2f81b,0x51b5,0x0},
    {0x2f81c,0x291df,0x0}, {0x2f81d,0x51f5,0x0}, {0x2f81e,0x5203,0x0}, {0x2f81f,0x34df,0x0},
    {0x2f820,0x523b,0x0}, {0x2f821,0x5246,0x0}, {0x2f822,0x5272,0x0}, {0x2f823,0x5277,0x0},
    {0x2f824,0x3515,0x0}, {0x2f825,0x52c7,0x0}, {0x2f826,0x52c9,0x0}, {0x2f827,0x52e4,0x0},
    {0x2f828,0x52fa,0x0}, {0x2f829,0x5305,0x0}, {0x2f82a,0x5306,0x0}, {0x2f82b,0x5317,0x0},
    {0x2f82c,0x5349,0x0}, {0x2f82d,0x5351,0x0}, {0x2f82e,0x535a,0x0}, {0x2f82f,0x5373,0x0},
    {0x2f830,0x537d,0x0}, {0x2f831,0x537f,0x0}, {0x2f832,0x537f,0x0}, {0x2f833,0x537f,0x0},
    {0x2f834,0x20a2c,0x0}, {0x2f835,0x7070,0x0}, {0x2f836,0x53ca,0x0}, {0x2f837,0x53df,0x0},
    {0x2f838,0x20b63,0x0}, {0x2f839,0x53eb,0x0}, {0x2f83a,0x53f1,0x0}, {0x2f83b,0x5406,0x0},
    {0x2f83c,0x549e,0x0}, {0x2f83d,0x5438,0x0}, {0x2f83e,0x5448,0x0}, {0x2f83f,0x5468,0x0},
    {0x2f840,0x54a2,0x0}, {0x2f841,0x54f6,0x0}, {0x2f842,0x5510,0x0}, {0x2f843,0x5553,0x0},
    {0x2f844,0x5563,0x0}, {0x2f845,0x5584,0x0}, {0x2f846,0x5584,0x0}, {0x2f847,0x5599,0x0},
    {0x2f848,0x55ab,0x0}, {0x2f849,0x55b3,0x0}, {0x2f84a,0x55c2,0x0}, {0x2f84b,0x5716,0x0},
    {0x2f84c,0x5606,0x0}, {0x2f84d,0x5717,0x0}, {0x2f84e,0x5651,0x0}, {0x2f84f,0x5674,0x0},
    {0x2f850,0x5207,0x0}, {0x2f851,0x58ee,0x0}, {0x2f852,0x57ce,0x0}, {0x2f853,0x57f4,0x0},
    {0x2f854,0x580d,0x0}, {0x2f855,0x578b,0x0}, {0x2f856,0x5832,0x0}, {0x2f857,0x5831,0x0},
    {0x2f858,0x58ac,0x0}, {0x2f859,0x214e4,0x0}, {0x2f85a,0x58f2,0x0}, {0x2f85b,0x58f7,0x0},
    {0x2f85c,0x5906,0x0}, {0x2f85d,0x591a,0x0}, {0x2f85e,0x5922,0x0}, {0x2f85f,0x5962,0x0},
    {0x2f860,0x216a8,0x0}, {0x2f861,0x216ea,0x0}, {0x2f862,0x59ec,0x0}, {0x2f863,0x5a1b,0x0},
    {0x2f864,0x5a27,0x0}, {0x2f865,0x59d8,0x0}, {0x2f866,0x5a66,0x0}, {0x2f867,0x36ee,0x0},
    {0x2f868,0x36fc,0x0}, {0x2f869,0x5b08,0x0}, {0x2f86a,0x5b3e,0x0}, {0x2f86b,0x5b3e,0x0},
    {0x2f86c,0x219c8,0x0}, {0x2f86d,0x5bc3,0x0}, {0x2f86e,0x5bd8,0x0}, {0x2f86f,0x5be7,0x0},
    {0x2f870,0x5bf3,0x0}, {0x2f871,0x21b18,0x0}, {0x2f872,0x5bff,0x0}, {0x2f873,0x5c06,0x0},
    {0x2f874,0x5f53,0x0}, {0x2f875,0x5c22,0x0}, {0x2f876,0x3781,0x0}, {0x2f877,0x5c60,0x0},
    {0x2f878,0x5c6e,0x0}, {0x2f879,0x5cc0,0x0}, {0x2f87a,0x5c8d,0x0}, {0x2f87b,0x21de4,0x0},
    {0x2f87c,0x5d43,0x0}, {0x2f87d,0x21de6,0x0}, {0x2f87e,0x5d6e,0x0}, {0x2f87f,0x5d6b,0x0},
    {0x2f880,0x5d7c,0x0}, {0x2f881,0x5de1,0x0}, {0x2f882,0x5de2,0x0}, {0x2f883,0x382f,0x0},
    {0x2f884,0x5dfd,0x0}, {0x2f885,0x5e28,0x0}, {0x2f886,0x5e3d,0x0}, {0x2f887,0x5e69,0x0},
    {0x2f888,0x3862,0x0}, {0x2f889,0x22183,0x0}, {0x2f88a,0x387c,0x0}, {0x2f88b,0x5eb0,0x0},
    {0x2f88c,0x5eb3,0x0}, {0x2f88d,0x5eb6,0x0}, {0x2f88e,0x5eca,0x0}, {0x2f88f,0x2a392,0x0},
    {0x2f890,0x5efe,0x0}, {0x2f891,0x22331,0x0}, {0x2f892,0x22331,0x0}, {0x2f893,0x8201,0x0},
    {0x2f894,0x5f22,0x0}, {0x2f895,0x5f22,0x0}, {0x2f896,0x38c7,0x0}, {0x2f897,0x232b8,0x0},
    {0x2f898,0x261da,0x0}, {0x2f899,0x5f62,0x0}, {0x2f89a,0x5f6b,0x0}, {0x2f89b,0x38e3,0x0},
    {0x2f89c,0x5f9a,0x0}, {0x2f89d,0x5fcd,0x0}, {0x2f89e,0x5fd7,0x0}, {0x2f89f,0x5ff9,0x0},
    {0x2f8a0,0x6081,0x0}, {0x2f8a1,0x393a,0x0}, {0x2f8a2,0x391c,0x0}, {0x2f8a3,0x6094,0x0},
    {0x2f8a4,0x226d4,0x0}, {0x2f8a5,0x60c7,0x0}, {0x2f8a6,0x6148,0x0}, {0x2f8a7,0x614c,0x0},
    {0x2f8a8,0x614e,0x0}, {0x2f8a9,0x614c,0x0}, {0x2f8aa,0x617a,0x0}, {0x2f8ab,0x618e,0x0},
    {0x2f8ac,0x61b2,0x0}, {0x2f8ad,0x61a4,0x0}, {0x2f8ae,0x61af,0x0}, {0x2f8af,0x61de,0x0},
    {0x2f8b0,0x61f2,0x0}, {0x2f8b1,0x61f6,0x0}, {0x2f8b2,0x6210,0x0}, {0x2f8b3,0x621b,0x0},
    {0x2f8b4,0x625d,0x0}, {0x2f8b5,0x62b1,0x0}, {0x2f8b6,0x62d4,0x0}, {0x2f8b7,0x6350,0x0},
    {0x2f8b8,0x22b0c,0x0}, {0x2f8b9,0x633d,0x0}, {0x2f8ba,0x62fc,0x0}, {0x2f8bb,0x6368,0x0},
    {0x2f8bc,0x6383,0x0}, {0x2f8bd,0x63e4,0x0}, {0x2f8be,0x22bf1,0x0}, {0x2f8bf,0x6422,0x0},
    {0x2f8c0,0x63c5,0x0}, {0x2f8c1,0x63a9,0x0}, {0x2f8c2,0x3a2e,0x0}, {0x2f8c3,0x6469,0x0},
    {0x2f8c4,0x647e,0x0}, {0x2f8c5,0x649d,0x0}, {0x2f8c6,0x6477,0x0}, {0x2f8c7,0x3a6c,0x0},
    {0x2f8c8,0x654f,0x0}, {0x2f8c9,0x656c,0x0}, {0x2f8ca,0x2300a,0x0}, {0x2f8cb,0x65e3,0x0},
    {0x2f8cc,0x66f8,0x0}, {0x2f8cd,0x6649,0x0}, {0x2f8ce,0x3b19,0x0}, {0x2f8cf,0x6691,0x0},
    {0x2f8d0,0x3b08,0x0}, {0x2f8d1,0x3ae4,0x0}, {0x2f8d2,0x5192,0x0}, {0x2f8d3,0x5195,0x0},
    {0x2f8d4,0x6700,0x0}, {0x2f8d5,0x669c,0x0}, {0x2f8d6,0x80ad,0x0}, {0x2f8d7,0x43d9,0x0},
    {0x2f8d8,0x6717,0x0}, {0x2f8d9,0x671b,0x0}, {0x2f8da,0x6721,0x0}, {0x2f8db,0x675e,0x0},
    {0x2f8dc,0x6753,0x0}, {0x2f8dd,0x233c3,0x0}, {0x2f8de,0x3b49,0x0}, {0x2f8df,0x67fa,0x0},
    {0x2f8e0,0x6785,0x0}, {0x2f8e1,0x6852,0x0}, {0x2f8e2,0x6885,0x0}, {0x2f8e3,0x2346d,0x0},
    {0x2f8e4,0x688e,0x0}, {0x2f8e5,0x681f,0x0}, {0x2f8e6,0x6914,0x0}, {0x2f8e7,0x3b9d,0x0},
    {0x2f8e8,0x6942,0x0}, {0x2f8e9,0x69a3,0x0}, {0x2f8ea,0x69ea,0x0}, {0x2f8eb,0x6aa8,0x0},
    {0x2f8ec,0x236a3,0x0}, {0x2f8ed,0x6adb,0x0}, {0x2f8ee,0x3c18,0x0}, {0x2f8ef,0x6b21,0x0},
    {0x2f8f0,0x238a7,0x0}, {0x2f8f1,0x6b54,0x0}, {0x2f8f2,0x3c4e,0x0}, {0x2f8f3,0x6b72,0x0},
    {0x2f8f4,0x6b9f,0x0}, {0x2f8f5,0x6bba,0x0}, {0x2f8f6,0x6bbb,0x0}, {0x2f8f7,0x23a8d,0x0},
    {0x2f8f8,0x21d0b,0x0}, {0x2f8f9,0x23afa,0x0}, {0x2f8fa,0x6c4e,0x0}, {0x2f8fb,0x23cbc,0x0},
    {0x2f8fc,0x6cbf,0x0}, {0x2f8fd,0x6ccd,0x0}, {0x2f8fe,0x6c67,0x0}, {0x2f8ff,0x6d16,0x0},
    {0x2f900,0x6d3e,0x0}, {0x2f901,0x6d77,0x0}, {0x2f902,0x6d41,0x0}, {0x2f903,0x6d69,0x0},
    {0x2f904,0x6d78,0x0}, {0x2f905,0x6d85,0x0}, {0x2f906,0x23d1e,0x0}, {0x2f907,0x6d34,0x0},
    {0x2f908,0x6e2f,0x0}, {0x2f909,0x6e6e,0x0}, {0x2f90a,0x3d33,0x0}, {0x2f90b,0x6ecb,0x0},
    {0x2f90c,0x6ec7,0x0}, {0x2f90d,0x23ed1,0x0}, {0x2f90e,0x6df9,0x0}, {0x2f90f,0x6f6e,0x0},
    {0x2f910,0x23f5e,0x0}, {0x2f911,0x23f8e,0x0}, {0x2f912,0x6fc6,0x0}, {0x2f913,0x7039,0x0},
    {0x2f914,0x701e,0x0}, {0x2f915,0x701b,0x0}, {0x2f916,0x3d96,0x0}, {0x2f917,0x704a,0x0},
    {0x2f918,0x707d,0x0}, {0x2f919,0x7077,0x0}, {0x2f91a,0x70ad,0x0}, {0x2f91b,0x20525,0x0},
    {0x2f91c,0x7145,0x0}, {0x2f91d,0x24263,0x0}, {0x2f91e,0x719c,0x0}, {0x2f91f,0x243ab,0x0},
    {0x2f920,0x7228,0x0}, {0x2f921,0x7235,0x0}, {0x2f922,0x7250,0x0}, {0x2f923,0x24608,0x0},
    {0x2f924,0x7280,0x0}, {0x2f925,0x7295,0x0}, {0x2f926,0x24735,0x0}, {0x2f927,0x24814,0x0},
    {0x2f928,0x737a,0x0}, {0x2f929,0x738b,0x0}, {0x2f92a,0x3eac,0x0}, {0x2f92b,0x73a5,0x0},
    {0x2f92c,0x3eb8,0x0}, {0x2f92d,0x3eb8,0x0}, {0x2f92e,0x7447,0x0}, {0x2f92f,0x745c,0x0},
    {0x2f930,0x7471,0x0}, {0x2f931,0x7485,0x0}, {0x2f932,0x74ca,0x0}, {0x2f933,0x3f1b,0x0},
    {0x2f934,0x7524,0x0}, {0x2f935,0x24c36,0x0}, {0x2f936,0x753e,0x0}, {0x2f937,0x24c92,0x0},
    {0x2f938,0x7570,0x0}, {0x2f939,0x2219f,0x0}, {0x2f93a,0x7610,0x0}, {0x2f93b,0x24fa1,0x0},
    {0x2f93c,0x24fb8,0x0}, {0x2f93d,0x25044,0x0}, {0x2f93e,0x3ffc,0x0}, {0x2f93f,0x4008,0x0},
    {0x2f940,0x76f4,0x0}, {0x2f941,0x250f3,0x0}, {0x2f942,0x250f2,0x0}, {0x2f943,0x25119,0x0},
    {0x2f944,0x25133,0x0}, {0x2f945,0x771e,0x0}, {0x2f946,0x771f,0x0}, {0x2f947,0x771f,0x0},
    {0x2f948,0x774a,0x0}, {0x2f949,0x4039,0x0}, {0x2f94a,0x778b,0x0}, {0x2f94b,0x4046,0x0},
    {0x2f94c,0x4096,0x0}, {0x2f94d,0x2541d,0x0}, {0x2f94e,0x784e,0x0}, {0x2f94f,0x788c,0x0},
    {0x2f950,0x78cc,0x0}, {0x2f951,0x40e3,0x0}, {0x2f952,0x25626,0x0}, {0x2f953,0x7956,0x0},
    {0x2f954,0x2569a,0x0}, {0x2f955,0x256c5,0x0}, {0x2f956,0x798f,0x0}, {0x2f957,0x79eb,0x0},
    {0x2f958,0x412f,0x0}, {0x2f959,0x7a40,0x0}, {0x2f95a,0x7a4a,0x0}, {0x2f95b,0x7a4f,0x0},
    {0x2f95c,0x2597c,0x0}, {0x2f95d,0x25aa7,0x0}, {0x2f95e,0x25aa7,0x0}, {0x2f95f,0x7aee,0x0},
    {0x2f960,0x4202,0x0}, {0x2f961,0x25bab,0x0}, {0x2f962,0x7bc6,0x0}, {0x2f963,0x7bc9,0x0},
    {0x2f964,0x4227,0x0}, {0x2f965,0x25c80,0x0}, {0x2f966,0x7cd2,0x0}, {0x2f967,0x42a0,0x0},
    {0x2f968,0x7ce8,0x0}, {0x2f969,0x7ce3,0x0}, {0x2f96a,0x7d00,0x0}, {0x2f96b,0x25f86,0x0},
    {0x2f96c,0x7d63,0x0}, {0x2f96d,0x4301,0x0}, {0x2f96e,0x7dc7,0x0}, {0x2f96f,0x7e02,0x0},
    {0x2f970,0x7e45,0x0}, {0x2f971,0x4334,0x0}, {0x2f972,0x26228,0x0}, {0x2f973,0x26247,0x0},
    {0x2f974,0x4359,0x0}, {0x2f975,0x262d9,0x0}, {0x2f976,0x7f7a,0x0}, {0x2f977,0x2633e,0x0},
    {0x2f978,0x7f95,0x0}, {0x2f979,0x7ffa,0x0}, {0x2f97a,0x8005,0x0}, {0x2f97b,0x264da,0x0},
    {0x2f97c,0x26523,0x0}, {0x2f97d,0x8060,0x0}, {0x2f97e,0x265a8,0x0}, {0x2f97f,0x8070,0x0},
    {0x2f980,0x2335f,0x0}, {0x2f981,0x43d5,0x0}, {0x2f982,0x80b2,0x0}, {0x2f983,0x8103,0x0},
    {0x2f984,0x440b,0x0}, {0x2f985,0x813e,0x0}, {0x2f986,0x5ab5,0x0}, {0x2f987,0x267a7,0x0},
    {0x2f988,0x267b5,0x0}, {0x2f989,0x23393,0x0}, {0x2f98a,0x2339c,0x0}, {0x2f98b,0x8201,0x0},
    {0x2f98c,0x8204,0x0}, {0x2f98d,0x8f9e,0x0}, {0x2f98e,0x446b,0x0}, {0x2f98f,0x8291,0x0},
    {0x2f990,0x828b,0x0}, {0x2f991,0x829d,0x0}, {0x2f992,0x52b3,0x0}, {0x2f993,0x82b1,0x0},
    {0x2f994,0x82b3,0x0}, {0x2f995,0x82bd,0x0}, {0x2f996,0x82e6,0x0}, {0x2f997,0x26b3c,0x0},
    {0x2f998,0x82e5,0x0}, {0x2f999,0x831d,0x0}, {0x2f99a,0x8363,0x0}, {0x2f99b,0x83ad,0x0},
    {0x2f99c,0x8323,0x0}, {0x2f99d,0x83bd,0x0}, {0x2f99e,0x83e7,0x0}, {0x2f99f,0x8457,0x0},
    {0x2f9a0,0x8353,0x0}, {0x2f9a1,0x83ca,0x0}, {0x2f9a2,0x83cc,0x0}, {0x2f9a3,0x83dc,0x0},
    {0x2f9a4,0x26c36,0x0}, {0x2f9a5,0x26d6b,0x0}, {0x2f9a6,0x26cd5,0x0}, {0x2f9a7,0x452b,0x0},
    {0x2f9a8,0x84f1,0x0}, {0x2f9a9,0x84f3,0x0}, {0x2f9aa,0x8516,0x0}, {0x2f9ab,0x273ca,0x0},
    {0x2f9ac,0x8564,0x0}, {0x2f9ad,0x26f2c,0x0}, {0x2f9ae,0x455d,0x0}, {0x2f9af,0x4561,0x0},
    {0x2f9b0,0x26fb1,0x0}, {0x2f9b1,0x270d2,0x0}, {0x2f9b2,0x456b,0x0}, {0x2f9b3,0x8650,0x0},
    {0x2f9b4,0x865c,0x0}, {0x2f9b5,0x8667,0x0}, {0x2f9b6,0x8669,0x0}, {0x2f9b7,0x86a9,0x0},
    {0x2f9b8,0x8688,0x0}, {0x2f9b9,0x870e,0x0}, {0x2f9ba,0x86e2,0x0}, {0x2f9bb,0x8779,0x0},
    {0x2f9bc,0x8728,0x0}, {0x2f9bd,0x876b,0x0}, {0x2f9be,0x8786,0x0}, {0x2f9bf,0x45d7,0x0},
    {0x2f9c0,0x87e1,0x0}, {0x2f9c1,0x8801,0x0}, {0x2f9c2,0x45f9,0x0}, {0x2f9c3,0x8860,0x0},
    {0x2f9c4,0x8863,0x0}, {0x2f9c5,0x27667,0x0}, {0x2f9c6,0x88d7,0x0}, {0x2f9c7,0x88de,0x0},
    {0x2f9c8,0x4635,0x0}, {0x2f9c9,0x88fa,0x0}, {0x2f9ca,0x34bb,0x0}, {0x2f9cb,0x278ae,0x0},
    {0x2f9cc,0x27966,0x0}, {0x2f9cd,0x46be,0x0}, {0x2f9ce,0x46c7,0x0}, {0x2f9cf,0x8aa0,0x0},
    {0x2f9d0,0x8aed,0x0}, {0x2f9d1,0x8b8a,0x0}, {0x2f9d2,0x8c55,0x0}, {0x2f9d3,0x27ca8,0x0},
    {0x2f9d4,0x8cab,0x0}, {0x2f9d5,0x8cc1,0x0}, {0x2f9d6,0x8d1b,0x0}, {0x2f9d7,0x8d77,0x0},
    {0x2f9d8,0x27f2f,0x0}, {0x2f9d9,0x20804,0x0}, {0x2f9da,0x8dcb,0x0}, {0x2f9db,0x8dbc,0x0},
    {0x2f9dc,0x8df0,0x0}, {0x2f9dd,0x208de,0x0}, {0x2f9de,0x8ed4,0x0}, {0x2f9df,0x8f38,0x0},
    {0x2f9e0,0x285d2,0x0}, {0x2f9e1,0x285ed,0x0}, {0x2f9e2,0x9094,0x0}, {0x2f9e3,0x90f1,0x0},
    {0x2f9e4,0x9111,0x0}, {0x2f9e5,0x2872e,0x0}, {0x2f9e6,0x911b,0x0}, {0x2f9e7,0x9238,0x0},
    {0x2f9e8,0x92d7,0x0}, {0x2f9e9,0x92d8,0x0}, {0x2f9ea,0x927c,0x0}, {0x2f9eb,0x93f9,0x0},
    {0x2f9ec,0x9415,0x0}, {0x2f9ed,0x28bfa,0x0}, {0x2f9ee,0x958b,0x0}, {0x2f9ef,0x4995,0x0},
    {0x2f9f0,0x95b7,0x0}, {0x2f9f1,0x28d77,0x0}, {0x2f9f2,0x49e6,0x0}, {0x2f9f3,0x96c3,0x0},
    {0x2f9f4,0x5db2,0x0}, {0x2f9f5,0x9723,0x0}, {0x2f9f6,0x29145,0x0}, {0x2f9f7,0x2921a,0x0},
    {0x2f9f8,0x4a6e,0x0}, {0x2f9f9,0x4a76,0x0}, {0x2f9fa,0x97e0,0x0}, {0x2f9fb,0x2940a,0x0},
    {0x2f9fc,0x4ab2,0x0}, {0x2f9fd,0x29496,0x0}, {0x2f9fe,0x980b,0x0}, {0x2f9ff,0x980b,0x0},
    {0x2fa00,0x9829,0x0}, {0x2fa01,0x295b6,0x0}, {0x2fa02,0x98e2,0x0}, {0x2fa03,0x4b33,0x0},
    {0x2fa04,0x9929,0x0}, {0x2fa05,0x99a7,0x0}, {0x2fa06,0x99c2,0x0}, {0x2fa07,0x99fe,0x0},
    {0x2fa08,0x4bce,0x0}, {0x2fa09,0x29b30,0x0}, {0x2fa0a,0x9b12,0x0}, {0x2fa0b,0x9c40,0x0},
    {0x2fa0c,0x9cfd,0x0}, {0x2fa0d,0x4cce,0x0}, {0x2fa0e,0x4ced,0x0}, {0x2fa0f,0x9d67,0x0},
    {0x2fa10,0x2a0ce,0x0}, {0x2fa11,0x4cf8,0x0}, {0x2fa12,0x2a105,0x0}, {0x2fa13,0x2a20e,0x0},
    {0x2fa14,0x2a291,0x0}, {0x2fa15,0x9ebb,0x0}, {0x2fa16,0x4d56,0x0}, {0x2fa17,0x9ef9,0x0},
    {0x2fa18,0x9efe,0x0}, {0x2fa19,0x9f05,0x0}, {0x2fa1a,0x9f0f,0x0}, {0x2fa1b,0x9f16,0x0},
    {0x2fa1c,0x9f3b,0x0}, {0x2fa1d,0x2a600,0x0},
};
// Rows of the table above that compose, sorted by first and second.
static const uint16_t qlora__text_compositions[] = {
    912, 909, 913, 0, 1, 2, 3, 53, 55, 238, 4, 572, 5, 165, 208, 210, 570, 415, 57, 417, 419, 421,
    59, 61, 63, 65, 6, 425, 67, 427, 431, 433, 429, 7, 8, 9, 598, 69, 71, 73, 10, 596, 77, 212, 214,
    594, 240, 75, 439, 441, 445, 198, 79, 447, 81, 83, 187, 85, 87, 449, 453, 236, 451, 455, 457,
    11, 12, 13, 89, 91, 93, 97, 14, 610, 167, 216, 218, 612, 95, 459, 98, 463, 189, 465, 100, 467,
    102, 106, 469, 104, 475, 473, 477, 479, 481, 200, 108, 15, 483, 112, 485, 110, 489, 487, 16, 17,
    18, 19, 114, 116, 246, 20, 616, 118, 169, 220, 222, 161, 614, 191, 499, 501, 120, 503, 124, 224,
    226, 505, 122, 509, 126, 128, 511, 132, 513, 232, 130, 521, 136, 523, 234, 134, 527, 525, 21,
    22, 23, 138, 140, 142, 24, 640, 144, 146, 171, 228, 230, 163, 638, 529, 148, 533, 531, 539, 541,
    543, 545, 150, 549, 547, 551, 553, 555, 652, 25, 152, 658, 250, 557, 154, 656, 654, 155, 559,
    157, 159, 561, 563, 26, 27, 28, 29, 54, 56, 239, 30, 573, 31, 166, 209, 211, 571, 416, 58, 418,
    420, 422, 60, 62, 64, 66, 32, 426, 68, 428, 432, 434, 430, 33, 34, 35, 599, 70, 72, 74, 36, 597,
    78, 213, 215, 595, 241, 76, 440, 442, 446, 199, 80, 448, 82, 84, 188, 86, 88, 450, 454, 237,
    452, 456, 458, 565, 37, 38, 39, 90, 92, 94, 40, 611, 168, 217, 219, 613, 96, 460, 99, 197, 464,
    190, 466, 101, 468, 103, 107, 470, 105, 476, 474, 478, 480, 482, 201, 109, 41, 484, 113, 486,
    111, 490, 488, 42, 43, 44, 45, 115, 117, 247, 46, 617, 119, 170, 221, 223, 162, 615, 192, 500,
    502, 121, 504, 125, 225, 227, 506, 123, 510, 127, 129, 512, 133, 514, 233, 131, 522, 566, 137,
    524, 235, 135, 528, 526, 47, 48, 49, 139, 141, 143, 50, 641, 145, 147, 172, 229, 231, 164, 639,
    530, 149, 534, 532, 540, 542, 544, 546, 151, 550, 548, 567, 552, 554, 556, 653, 51, 153, 659,
    251, 558, 52, 657, 568, 655, 156, 560, 158, 160, 562, 564, 875, 258, 835, 576, 574, 580, 578,
    181, 202, 204, 185, 423, 602, 600, 606, 604, 461, 620, 618, 624, 622, 491, 244, 493, 242, 206,
    179, 175, 173, 177, 577, 575, 581, 579, 182, 203, 205, 186, 424, 603, 601, 607, 605, 462, 621,
    619, 625, 623, 492, 245, 494, 243, 207, 180, 176, 174, 178, 586, 584, 590, 588, 587, 585, 591,
    589, 435, 437, 436, 438, 495, 497, 496, 498, 515, 516, 517, 518, 535, 536, 537, 538, 569, 630,
    628, 634, 632, 636, 631, 629, 635, 633, 637, 644, 642, 648, 646, 650, 645, 643, 649, 647, 651,
    195, 193, 194, 183, 184, 443, 444, 248, 249, 196, 831, 259, 830, 829, 668, 669, 833, 841, 261,
    682, 683, 843, 262, 696, 697, 845, 857, 263, 856, 855, 268, 712, 713, 883, 264, 726, 727, 874,
    872, 265, 871, 870, 269, 740, 885, 266, 752, 753, 887, 826, 838, 760, 270, 823, 822, 660, 661,
    827, 825, 762, 271, 676, 677, 764, 272, 688, 689, 839, 837, 766, 273, 850, 849, 275, 704, 705,
    853, 768, 277, 720, 721, 866, 867, 770, 278, 863, 862, 276, 732, 733, 868, 772, 279, 744, 745,
    881, 879, 851, 267, 854, 864, 274, 869, 880, 280, 281, 285, 302, 304, 284, 282, 306, 283, 300,
    310, 312, 287, 314, 289, 316, 286, 318, 324, 288, 326, 328, 330, 332, 322, 303, 305, 293, 291,
    307, 292, 301, 311, 313, 296, 315, 290, 317, 295, 319, 325, 297, 327, 329, 331, 333, 323, 294,
    298, 299, 308, 309, 320, 321, 334, 335, 337, 336, 338, 340, 341, 339, 342, 343, 344, 353, 354,
    365, 364, 366, 369, 370, 372, 371, 373, 374, 377, 375, 376, 378, 379, 381, 380, 382, 383, 385,
    384, 403, 404, 405, 406, 407, 408, 409, 410, 411, 412, 413, 414, 471, 472, 507, 508, 519, 520,
    582, 592, 583, 593, 608, 609, 626, 627, 662, 664, 666, 774, 663, 665, 667, 775, 776, 777, 778,
    779, 780, 781, 670, 672, 674, 782, 671, 673, 675, 783, 784, 785, 786, 787, 788, 789, 678, 680,
    679, 681, 684, 686, 685, 687, 690, 692, 694, 790, 691, 693, 695, 791, 792, 793, 794, 795, 796,
    797, 698, 700, 702, 798, 699, 701, 703, 799, 800, 801, 802, 803, 804, 805, 706, 708, 710, 707,
    709, 711, 714, 716, 718, 715, 717, 719, 722, 724, 723, 725, 728, 730, 729, 731, 734, 736, 738,
    735, 737, 739, 741, 742, 743, 746, 748, 750, 806, 747, 749, 751, 807, 808, 809, 810, 811, 812,
    813, 754, 756, 758, 814, 755, 757, 759, 815, 816, 817, 818, 819, 820, 821, 824, 836, 878, 828,
    846, 847, 848, 840, 882, 859, 860, 861, 894, 895, 896, 897, 899, 898, 900, 901, 902, 903, 904,
    905, 906, 907, 908, 911, 910, 914, 915, 916, 917, 918, 919, 920, 921, 930, 931, 922, 923, 924,
    925, 932, 933, 926, 927, 928, 929, 934, 935, 936, 937, 966, 941, 942, 943, 944, 945, 946, 947,
    948, 949, 950, 951, 952, 953, 954, 955, 956, 957, 958, 959, 960, 961, 962, 963, 964, 965, 967,
    993, 968, 969, 970, 971, 972, 973, 974, 975, 976, 977, 978, 979, 980, 981, 982, 983, 984, 985,
    986, 987, 988, 989, 990, 991, 992, 994, 995, 996, 997, 998, 1493, 1494, 1495, 1496, 1497, 1498,
    1499, 1501, 1500, 1502, 1503, 1504,
};
// Canonical combining classes, sorted: first, last, class.
static const qlora__text_combining qlora__text_combinings[] = {
    {0x300,0x314,230}, {0x315,0x315,232}, {0x316,0x319,220}, {0x31a,0x31a,232}, {0x31b,0x31b,216},
    {0x31c,0x320,220}, {0x321,0x322,202}, {0x323,0x326,220}, {0x327,0x328,202}, {0x329,0x333,220},
    {0x334,0x338,1}, {0x339,0x33c,220}, {0x33d,0x344,230}, {0x345,0x345,240}, {0x346,0x346,230},
    {0x347,0x349,220}, {0x34a,0x34c,230}, {0x34d,0x34e,220}, {0x350,0x352,230}, {0x353,0x356,220},
    {0x357,0x357,230}, {0x358,0x358,232}, {0x359,0x35a,220}, {0x35b,0x35b,230}, {0x35c,0x35c,233},
    {0x35d,0x35e,234}, {0x35f,0x35f,233}, {0x360,0x361,234}, {0x362,0x362,233}, {0x363,0x36f,230},
    {0x483,0x487,230}, {0x591,0x591,220}, {0x592,0x595,230}, {0x596,0x596,220}, {0x597,0x599,230},
    {0x59a,0x59a,222}, {0x59b,0x59b,220}, {0x59c,0x5a1,230}, {0x5a2,0x5a7,220}, {0x5a8,0x5a9,230},
    {0x5aa,0x5aa,220}, {0x5ab,0x5ac,230}, {0x5ad,0x5ad,222}, {0x5ae,0x5ae,228}, {0x5af,0x5af,230},
    {0x5b0,0x5b0,10}, {0x5b1,0x5b1,11}, {0x5b2,0x5b2,12}, {0x5b3,0x5b3,13}, {0x5b4,0x5b4,14},
    {0x5b5,0x5b5,15}, {0x5b6,0x5b6,16}, {0x5b7,0x5b7,17}, {0x5b8,0x5b8,18}, {0x5b9,0x5ba,19},
    {0x5bb,0x5bb,20}, {0x5bc,0x5bc,21}, {0x5bd,0x5bd,22}, {0x5bf,0x5bf,23}, {0x5c1,0x5c1,24},
    {0x5c2,0x5c2,25}, {0x5c4,0x5c4,230}, {0x5c5,0x5c5,220}, {0x5c7,0x5c7,18}, {0x610,0x617,230},
    {0x618,0x618,30}, {0x619,0x619,31}, {0x61a,0x61a,32}, {0x64b,0x64b,27}, {0x64c,0x64c,28},
    {0x64d,0x64d,29}, {0x64e,0x64e,30}, {0x64f,0x64f,31}, {0x650,0x650,32}, {0x651,0x651,33},
    {0x652,0x652,34}, {0x653,0x654,230}, {0x655,0x656,220}, {0x657,0x65b,230}, {0x65c,0x65c,220},
    {0x65d,0x65e,230}, {0x65f,0x65f,220}, {0x670,0x670,35}, {0x6d6,0x6dc,230}, {0x6df,0x6e2,230},
    {0x6e3,0x6e3,220}, {0x6e4,0x6e4,230}, {0x6e7,0x6e8,230}, {0x6ea,0x6ea,220}, {0x6eb,0x6ec,230},
    {0x6ed,0x6ed,220}, {0x711,0x711,36}, {0x730,0x730,230}, {0x731,0x731,220}, {0x732,0x733,230},
    {0x734,0x734,220}, {0x735,0x736,230}, {0x737,0x739,220}, {0x73a,0x73a,230}, {0x73b,0x73c,220},
    {0x73d,0x73d,230}, {0x73e,0x73e,220}, {0x73f,0x741,230}, {0x742,0x742,220}, {0x743,0x743,230},
    {0x744,0x744,220}, {0x745,0x745,230}, {0x746,0x746,220}, {0x747,0x747,230}, {0x748,0x748,220},
    {0x749,0x74a,230}, {0x7eb,0x7f1,230}, {0x7f2,0x7f2,220}, {0x7f3,0x7f3,230}, {0x816,0x819,230},
    {0x81b,0x823,230}, {0x825,0x827,230}, {0x829,0x82d,230}, {0x859,0x85b,220}, {0x8d4,0x8e1,230},
    {0x8e3,0x8e3,220}, {0x8e4,0x8e5,230}, {0x8e6,0x8e6,220}, {0x8e7,0x8e8,230}, {0x8e9,0x8e9,220},
    {0x8ea,0x8ec,230}, {0x8ed,0x8ef,220}, {0x8f0,0x8f0,27}, {0x8f1,0x8f1,28}, {0x8f2,0x8f2,29},
    {0x8f3,0x8f5,230}, {0x8f6,0x8f6,220}, {0x8f7,0x8f8,230}, {0x8f9,0x8fa,220}, {0x8fb,0x8ff,230},
    {0x93c,0x93c,7}, {0x94d,0x94d,9}, {0x951,0x951,230}, {0x952,0x952,220}, {0x953,0x954,230},
    {0x9bc,0x9bc,7}, {0x9cd,0x9cd,9}, {0xa3c,0xa3c,7}, {0xa4d,0xa4d,9}, {0xabc,0xabc,7},
    {0xacd,0xacd,9}, {0xb3c,0xb3c,7}, {0xb4d,0xb4d,9}, {0xbcd,0xbcd,9}, {0xc4d,0xc4d,9},
    {0xc55,0xc55,84}, {0xc56,0xc56,91}, {0xcbc,0xcbc,7}, {0xccd,0xccd,9}, {0xd4d,0xd4d,9},
    {0xdca,0xdca,9}, {0xe38,0xe39,103}, {0xe3a,0xe3a,9}, {0xe48,0xe4b,107}, {0xeb8,0xeb9,118},
    {0xec8,0xecb,122}, {0xf18,0xf19,220}, {0xf35,0xf35,220}, {0xf37,0xf37,220}, {0xf39,0xf39,216},
    {0xf71,0xf71,129}, {0xf72,0xf72,130}, {0xf74,0xf74,132}, {0xf7a,0xf7d,130}, {0xf80,0xf80,130},
    {0xf82,0xf83,230}, {0xf84,0xf84,9}, {0xf86,0xf87,230}, {0xfc6,0xfc6,220}, {0x1037,0x1037,7},
    {0x1039,0x103a,9}, {0x108d,0x108d,220}, {0x135d,0x135f,230}, {0x1714,0x1714,9},
    {0x1734,0x1734,9}, {0x17d2,0x17d2,9}, {0x17dd,0x17dd,230}, {0x18a9,0x18a9,228},
    {0x1939,0x1939,222}, {0x193a,0x193a,230}, {0x193b,0x193b,220}, {0x1a17,0x1a17,230},
    {0x1a18,0x1a18,220}, {0x1a60,0x1a60,9}, {0x1a75,0x1a7c,230}, {0x1a7f,0x1a7f,220},
    {0x1ab0,0x1ab4,230}, {0x1ab5,0x1aba,220}, {0x1abb,0x1abc,230}, {0x1abd,0x1abd,220},
    {0x1b34,0x1b34,7}, {0x1b44,0x1b44,9}, {0x1b6b,0x1b6b,230}, {0x1b6c,0x1b6c,220},
    {0x1b6d,0x1b73,230}, {0x1baa,0x1bab,9}, {0x1be6,0x1be6,7}, {0x1bf2,0x1bf3,9}, {0x1c37,0x1c37,7},
    {0x1cd0,0x1cd2,230}, {0x1cd4,0x1cd4,1}, {0x1cd5,0x1cd9,220}, {0x1cda,0x1cdb,230},
    {0x1cdc,0x1cdf,220}, {0x1ce0,0x1ce0,230}, {0x1ce2,0x1ce8,1}, {0x1ced,0x1ced,220},
    {0x1cf4,0x1cf4,230}, {0x1cf8,0x1cf9,230}, {0x1dc0,0x1dc1,230}, {0x1dc2,0x1dc2,220},
    {0x1dc3,0x1dc9,230}, {0x1dca,0x1dca,220}, {0x1dcb,0x1dcc,230}, {0x1dcd,0x1dcd,234},
    {0x1dce,0x1dce,214}, {0x1dcf,0x1dcf,220}, {0x1dd0,0x1dd0,202}, {0x1dd1,0x1df5,230},
    {0x1dfb,0x1dfb,230}, {0x1dfc,0x1dfc,233}, {0x1dfd,0x1dfd,220}, {0x1dfe,0x1dfe,230},
    {0x1dff,0x1dff,220}, {0x20d0,0x20d1,230}, {0x20d2,0x20d3,1}, {0x20d4,0x20d7,230},
    {0x20d8,0x20da,1}, {0x20db,0x20dc,230}, {0x20e1,0x20e1,230}, {0x20e5,0x20e6,1},
    {0x20e7,0x20e7,230}, {0x20e8,0x20e8,220}, {0x20e9,0x20e9,230}, {0x20ea,0x20eb,1},
    {0x20ec,0x20ef,220}, {0x20f0,0x20f0,230}, {0x2cef,0x2cf1,230}, {0x2d7f,0x2d7f,9},
    {0x2de0,0x2dff,230}, {0x302a,0x302a,218}, {0x302b,0x302b,228}, {0x302c,0x302c,232},
    {0x302d,0x302d,222}, {0x302e,0x302f,224}, {0x3099,0x309a,8}, {0xa66f,0xa66f,230},
    {0xa674,0xa67d,230}, {0xa69e,0xa69f,230}, {0xa6f0,0xa6f1,230}, {0xa806,0xa806,9},
    {0xa8c4,0xa8c4,9}, {0xa8e0,0xa8f1,230}, {0xa92b,0xa92d,220}, {0xa953,0xa953,9},
    {0xa9b3,0xa9b3,7}, {0xa9c0,0xa9c0,9}, {0xaab0,0xaab0,230}, {0xaab2,0xaab3,230},
    {0xaab4,0xaab4,220}, {0xaab7,0xaab8,230}, {0xaabe,0xaabf,230}, {0xaac1,0xaac1,230},
    {0xaaf6,0xaaf6,9}, {0xabed,0xabed,9}, {0xfb1e,0xfb1e,26}, {0xfe20,0xfe26,230},
    {0xfe27,0xfe2d,220}, {0xfe2e,0xfe2f,230}, {0x101fd,0x101fd,220}, {0x102e0,0x102e0,220},
    {0x10376,0x1037a,230}, {0x10a0d,0x10a0d,220}, {0x10a0f,0x10a0f,230}, {0x10a38,0x10a38,230},
    {0x10a39,0x10a39,1}, {0x10a3a,0x10a3a,220}, {0x10a3f,0x10a3f,9}, {0x10ae5,0x10ae5,230},
    {0x10ae6,0x10ae6,220}, {0x11046,0x11046,9}, {0x1107f,0x1107f,9}, {0x110b9,0x110b9,9},
    {0x110ba,0x110ba,7}, {0x11100,0x11102,230}, {0x11133,0x11134,9}, {0x11173,0x11173,7},
    {0x111c0,0x111c0,9}, {0x111ca,0x111ca,7}, {0x11235,0x11235,9}, {0x11236,0x11236,7},
    {0x112e9,0x112e9,7}, {0x112ea,0x112ea,9}, {0x1133c,0x1133c,7}, {0x1134d,0x1134d,9},
    {0x11366,0x1136c,230}, {0x11370,0x11374,230}, {0x11442,0x11442,9}, {0x11446,0x11446,7},
    {0x114c2,0x114c2,9}, {0x114c3,0x114c3,7}, {0x115bf,0x115bf,9}, {0x115c0,0x115c0,7},
    {0x1163f,0x1163f,9}, {0x116b6,0x116b6,9}, {0x116b7,0x116b7,7}, {0x1172b,0x1172b,9},
    {0x11c3f,0x11c3f,9}, {0x16af0,0x16af4,1}, {0x16b30,0x16b36,230}, {0x1bc9e,0x1bc9e,1},
    {0x1d165,0x1d166,216}, {0x1d167,0x1d169,1}, {0x1d16d,0x1d16d,226}, {0x1d16e,0x1d172,216},
    {0x1d17b,0x1d182,220}, {0x1d185,0x1d189,230}, {0x1d18a,0x1d18b,220}, {0x1d1aa,0x1d1ad,230},
    {0x1d242,0x1d244,230}, {0x1e000,0x1e006,230}, {0x1e008,0x1e018,230}, {0x1e01b,0x1e021,230},
    {0x1e023,0x1e024,230}, {0x1e026,0x1e02a,230}, {0x1e8d0,0x1e8d6,220}, {0x1e944,0x1e949,230},
    {0x1e94a,0x1e94a,7},
};
// clang-format on
// GENERATED END

//@@ src/text/unicode.h

#define QLORA__TEXT_CODES 0x110000u

// The class of every code point, expanded; made when a tokenizer is loaded.
static uint8_t* qlora__text_classes_make(qlora__env* env) {
    uint8_t* classes = (uint8_t*)qlora__text_zalloc(env, QLORA__TEXT_CODES, 1);
    if (classes == NULL) {
        return NULL;
    }
    size_t runs = QLORA__TEXT_COUNT(qlora__text_class_runs);
    for (size_t i = 0; i < runs; i++) {
        uint32_t first = qlora__text_class_runs[i] >> 8;
        uint32_t end = i + 1 < runs ? qlora__text_class_runs[i + 1] >> 8 : QLORA__TEXT_CODES;
        memset(classes + first, (int)(qlora__text_class_runs[i] & 0xFF), end - first);
    }
    return classes;
}

// Length of the UTF-8 character at s (1 to 4), and its code point; 0 when it is invalid.
static size_t qlora__text_utf8(const unsigned char* s, size_t left, uint32_t* code) {
    uint32_t c = s[0];
    if (c < 0x80) {
        *code = c;
        return 1;
    }
    size_t length = c >= 0xF0 ? 4 : c >= 0xE0 ? 3 : 2;
    if (c < 0xC2 || c > 0xF4 || left < length) {
        return 0;
    }
    c &= 0x7Fu >> length;
    for (size_t i = 1; i < length; i++) {
        if ((s[i] & 0xC0) != 0x80) {
            return 0;
        }
        c = c << 6 | (s[i] & 0x3Fu);
    }
    // overlong forms, surrogates, and values above U+10FFFF
    if ((length == 3 && (c < 0x800 || (c >= 0xD800 && c < 0xE000))) ||
        (length == 4 && (c < 0x10000 || c >= QLORA__TEXT_CODES))) {
        return 0;
    }
    *code = c;
    return length;
}

static size_t qlora__text_utf8_put(uint32_t code, char* out) {
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    size_t length = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (size_t i = length - 1; i > 0; i--) {
        out[i] = (char)(unsigned char)(0x80 | (code & 0x3F));
        code >>= 6;
    }
    static const unsigned char lead[5] = {0, 0, 0xC0, 0xE0, 0xF0};
    out[0] = (char)(unsigned char)(lead[length] | code);
    return length;
}

// At s, where the text is invalid: how many bytes a decoder replaces by one U+FFFD. That is the
// longest valid start of a character, at least one byte. *open: the text ends inside it.
static size_t qlora__text_utf8_broken(const unsigned char* s, size_t left, bool* open) {
    *open = false;
    unsigned c = s[0];
    if (c < 0xC2 || c > 0xF4) {
        return 1;
    }
    size_t length = c >= 0xF0 ? 4 : c >= 0xE0 ? 3 : 2;
    for (size_t i = 1; i < length; i++) {
        if (i >= left) {
            *open = true;
            return i;
        }
        unsigned low = 0x80;
        unsigned high = 0xBF;
        if (i == 1) {
            low = c == 0xE0 ? 0xA0 : c == 0xF0 ? 0x90 : 0x80;
            high = c == 0xED ? 0x9F : c == 0xF4 ? 0x8F : 0xBF;
        }
        if (s[i] < low || s[i] > high) {
            return i;
        }
    }
    return length;
}

// Appends the text with U+FFFD for invalid UTF-8. With `keep_open`, an incomplete character at the
// end is not consumed; *used is the number of bytes that were.
static qlora_result qlora__text_utf8_repair(qlora__env* env, const char* data, size_t count,
                                            bool keep_open, size_t* used, qlora_text_bytes* out) {
    const unsigned char* s = (const unsigned char*)data;
    size_t at = 0;
    size_t good = 0; // start of the valid part that is not copied yet
    bool open = false;
    *used = 0;
    if (count == 0) {
        return QLORA_OK;
    }
    while (at < count && !open) {
        uint32_t code;
        size_t length = qlora__text_utf8(s + at, count - at, &code);
        if (length > 0) {
            at += length;
            continue;
        }
        QLORA__TRY(qlora__text_bytes_add(env, out, data + good, at - good));
        length = qlora__text_utf8_broken(s + at, count - at, &open);
        open = open && keep_open;
        if (!open) {
            QLORA__TRY(qlora__text_bytes_add(env, out, "\xEF\xBF\xBD", 3));
            at += length;
        }
        good = at;
    }
    QLORA__TRY(qlora__text_bytes_add(env, out, data + good, at - good));
    *used = at;
    return QLORA_OK;
}

static uint32_t qlora__text_combining_class(uint32_t code) {
    size_t low = 0;
    size_t high = QLORA__TEXT_COUNT(qlora__text_combinings);
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (code > qlora__text_combinings[middle].last) {
            low = middle + 1;
        } else if (code < qlora__text_combinings[middle].first) {
            high = middle;
        } else {
            return qlora__text_combinings[middle].value;
        }
    }
    return 0;
}

// NULL when it does not decompose.
static const qlora__text_decomposition* qlora__text_decompose(uint32_t code) {
    size_t low = 0;
    size_t high = QLORA__TEXT_COUNT(qlora__text_decompositions);
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (qlora__text_decompositions[middle].composed < code) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    bool found = low < QLORA__TEXT_COUNT(qlora__text_decompositions) &&
                 qlora__text_decompositions[low].composed == code;
    return found ? &qlora__text_decompositions[low] : NULL;
}

enum {
    QLORA__TEXT_HANGUL_S = 0xAC00,
    QLORA__TEXT_HANGUL_L = 0x1100,
    QLORA__TEXT_HANGUL_V = 0x1161,
    QLORA__TEXT_HANGUL_T = 0x11A7,
    QLORA__TEXT_HANGUL_LS = 19,
    QLORA__TEXT_HANGUL_VS = 21,
    QLORA__TEXT_HANGUL_TS = 28
};

// The primary composite of two characters, or 0.
static uint32_t qlora__text_compose(uint32_t first, uint32_t second) {
    if (first - QLORA__TEXT_HANGUL_L < QLORA__TEXT_HANGUL_LS &&
        second - QLORA__TEXT_HANGUL_V < QLORA__TEXT_HANGUL_VS) {
        uint32_t lv = (first - QLORA__TEXT_HANGUL_L) * QLORA__TEXT_HANGUL_VS +
                      (second - QLORA__TEXT_HANGUL_V);
        return QLORA__TEXT_HANGUL_S + lv * QLORA__TEXT_HANGUL_TS;
    }
    uint32_t syllable = first - QLORA__TEXT_HANGUL_S;
    if (syllable < QLORA__TEXT_HANGUL_LS * QLORA__TEXT_HANGUL_VS * QLORA__TEXT_HANGUL_TS &&
        syllable % QLORA__TEXT_HANGUL_TS == 0 &&
        second - QLORA__TEXT_HANGUL_T - 1 < QLORA__TEXT_HANGUL_TS - 1) {
        return first + (second - QLORA__TEXT_HANGUL_T);
    }
    size_t low = 0;
    size_t high = QLORA__TEXT_COUNT(qlora__text_compositions);
    while (low < high) {
        size_t middle = (low + high) / 2;
        const qlora__text_decomposition* row =
            &qlora__text_decompositions[qlora__text_compositions[middle]];
        if (row->first == first && row->second == second) {
            return row->composed;
        }
        if (row->first < first || (row->first == first && row->second < second)) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return 0;
}

// A starter and the marks after it. An invalid byte is QLORA__TEXT_CODES + byte, a starter.
typedef struct qlora__text_mark {
    uint32_t code;
    uint32_t order;
} qlora__text_mark;

typedef struct qlora__text_marks {
    qlora__text_mark* data;
    size_t count;
    size_t capacity;
    qlora__text_mark* sorted;
    size_t sorted_capacity;
} qlora__text_marks;

static qlora_result qlora__text_marks_add(qlora__env* env, qlora__text_marks* marks, uint32_t code,
                                          uint32_t order) {
    void* data = marks->data;
    qlora_result r = qlora__text_reserve(env, &data, &marks->capacity, marks->count, 1,
                                         sizeof(qlora__text_mark));
    marks->data = (qlora__text_mark*)data;
    QLORA__TRY(r);
    marks->data[marks->count].code = code;
    marks->data[marks->count].order = order;
    marks->count++;
    return QLORA_OK;
}

// Stable sort of data[begin..) by combining class. It counts, so that a long run is linear.
static qlora_result qlora__text_marks_sort(qlora__env* env, qlora__text_marks* marks,
                                           size_t begin) {
    size_t count = marks->count - begin;
    qlora__text_mark* data = marks->data + begin;
    bool sorted = true;
    for (size_t i = 1; i < count; i++) {
        sorted = sorted && data[i - 1].order <= data[i].order;
    }
    if (sorted) {
        return QLORA_OK;
    }
    void* other = marks->sorted;
    qlora_result r = qlora__text_reserve(env, &other, &marks->sorted_capacity, 0, count,
                                         sizeof(qlora__text_mark));
    marks->sorted = (qlora__text_mark*)other;
    QLORA__TRY(r);
    size_t starts[257];
    memset(starts, 0, sizeof(starts));
    for (size_t i = 0; i < count; i++) {
        starts[(data[i].order & 0xFF) + 1]++;
    }
    for (size_t i = 1; i < 257; i++) {
        starts[i] += starts[i - 1];
    }
    for (size_t i = 0; i < count; i++) {
        marks->sorted[starts[data[i].order & 0xFF]++] = data[i];
    }
    memcpy(data, marks->sorted, count * sizeof(qlora__text_mark));
    return QLORA_OK;
}

// Adds the full canonical decomposition of one character. Decompositions nest at most four deep,
// always in the first part.
static qlora_result qlora__text_marks_add_decomposed(qlora__env* env, qlora__text_marks* marks,
                                                     uint32_t code) {
    uint32_t syllable = code - QLORA__TEXT_HANGUL_S;
    if (syllable < QLORA__TEXT_HANGUL_LS * QLORA__TEXT_HANGUL_VS * QLORA__TEXT_HANGUL_TS) {
        uint32_t tail = syllable % QLORA__TEXT_HANGUL_TS;
        uint32_t lv = syllable / QLORA__TEXT_HANGUL_TS;
        QLORA__TRY(qlora__text_marks_add(env, marks,
                                         QLORA__TEXT_HANGUL_L + lv / QLORA__TEXT_HANGUL_VS, 0));
        QLORA__TRY(qlora__text_marks_add(env, marks,
                                         QLORA__TEXT_HANGUL_V + lv % QLORA__TEXT_HANGUL_VS, 0));
        return tail == 0 ? QLORA_OK
                         : qlora__text_marks_add(env, marks, QLORA__TEXT_HANGUL_T + tail, 0);
    }
    uint32_t tails[8];
    size_t count = 0;
    const qlora__text_decomposition* row = code < 0xC0 ? NULL : qlora__text_decompose(code);
    while (row != NULL && count < QLORA__TEXT_COUNT(tails)) {
        code = row->first;
        if (row->second != 0) {
            tails[count++] = row->second;
        }
        row = qlora__text_decompose(code);
    }
    QLORA__TRY(qlora__text_marks_add(env, marks, code, qlora__text_combining_class(code)));
    while (count > 0) {
        count--;
        QLORA__TRY(qlora__text_marks_add(env, marks, tails[count],
                                         qlora__text_combining_class(tails[count])));
    }
    return QLORA_OK;
}

// Canonical composition in place, of marks that are decomposed and sorted.
static void qlora__text_marks_compose(qlora__text_marks* marks) {
    qlora__text_mark* data = marks->data;
    size_t out = 0;
    size_t starter = SIZE_MAX;
    uint32_t last = 0; // class of the last mark kept after the starter
    for (size_t i = 0; i < marks->count; i++) {
        qlora__text_mark mark = data[i];
        bool adjacent = starter != SIZE_MAX && out == starter + 1;
        bool blocked = !adjacent && (last == 0 || last >= mark.order);
        if (starter != SIZE_MAX && !blocked) {
            uint32_t composed = qlora__text_compose(data[starter].code, mark.code);
            if (composed != 0) {
                data[starter].code = composed;
                continue;
            }
        }
        if (mark.order == 0) {
            starter = out;
        }
        last = mark.order;
        data[out++] = mark;
    }
    marks->count = out;
}

static qlora_result qlora__text_marks_flush(qlora__env* env, qlora__text_marks* marks, bool compose,
                                            qlora_text_bytes* out) {
    size_t begin = 0;
    for (size_t i = 0; i <= marks->count; i++) {
        if (i == marks->count || marks->data[i].order == 0) {
            size_t whole = marks->count;
            marks->count = i;
            qlora_result r = qlora__text_marks_sort(env, marks, begin);
            marks->count = whole;
            QLORA__TRY(r);
            begin = i + 1;
        }
    }
    if (compose) {
        qlora__text_marks_compose(marks);
    }
    QLORA__TRY(qlora__text_bytes_room(env, out, marks->count * 4));
    for (size_t i = 0; i < marks->count; i++) {
        uint32_t code = marks->data[i].code;
        if (code >= QLORA__TEXT_CODES) {
            out->data[out->count++] = (char)(unsigned char)(code - QLORA__TEXT_CODES);
        } else {
            out->count += qlora__text_utf8_put(code, out->data + out->count);
        }
    }
    marks->count = 0;
    return QLORA_OK;
}

// Appends the NFC (or NFD) of the text. Invalid bytes are copied unchanged.
static qlora_result qlora__text_normalize(qlora__env* env, const uint8_t* classes, bool compose,
                                          const char* text, size_t count, qlora__text_marks* marks,
                                          qlora_text_bytes* out) {
    const unsigned char* s = (const unsigned char*)text;
    size_t at = 0;
    bool change = false;
    while (at < count && !change) {
        uint32_t code = 0;
        size_t length = qlora__text_utf8(s + at, count - at, &code);
        change =
            length > 0 && ((classes[code] & QLORA__TEXT_UNSTABLE) || (!compose && code >= 0xC0));
        at += length > 0 ? length : 1;
    }
    if (!change) {
        return qlora__text_bytes_add(env, out, text, count);
    }
    marks->count = 0;
    at = 0;
    while (at < count) {
        uint32_t code = 0;
        size_t length = qlora__text_utf8(s + at, count - at, &code);
        // An ASCII character never combines with what precedes it: all marks so far are complete.
        if (s[at] < 0x80 && marks->count >= 64) {
            QLORA__TRY(qlora__text_marks_flush(env, marks, compose, out));
        }
        if (length == 0) {
            QLORA__TRY(qlora__text_marks_add(env, marks, QLORA__TEXT_CODES + s[at], 0));
            length = 1;
        } else {
            QLORA__TRY(qlora__text_marks_add_decomposed(env, marks, code));
        }
        at += length;
    }
    return qlora__text_marks_flush(env, marks, compose, out);
}

//@@ src/text/unicode_case.h

// Case and digits of characters, for the string methods of templates.
typedef struct qlora__text_case_run {
    uint32_t first;
    uint32_t last;
    int32_t change;
    uint32_t stride;
} qlora__text_case_run;

// A character that becomes several: zeros at the end are none.
typedef struct qlora__text_case_long {
    uint32_t code;
    uint32_t to[3];
} qlora__text_case_long;

typedef struct qlora__text_digit_run {
    uint32_t first;
    uint32_t last;
} qlora__text_digit_run;

// clang-format off
// Unicode 14.0.0, made by tools/case_gen.py.
// Data: Copyright (c) 1991-2024 Unicode, Inc., Unicode License V3, SPDX Unicode-3.0,
// https://www.unicode.org/license.txt
static const qlora__text_case_run qlora__text_upper_runs[] = {
    {0x61, 0x7a, -0x20, 1}, {0xb5, 0xb5, 0x2e7, 1}, {0xe0, 0xf6, -0x20, 1},
    {0xf8, 0xfe, -0x20, 1}, {0xff, 0xff, 0x79, 1}, {0x101, 0x12f, -1, 2},
    {0x131, 0x131, -0xe8, 1}, {0x133, 0x137, -1, 2}, {0x13a, 0x148, -1, 2}, {0x14b, 0x177, -1, 2},
    {0x17a, 0x17e, -1, 2}, {0x17f, 0x17f, -0x12c, 1}, {0x180, 0x180, 0xc3, 1},
    {0x183, 0x185, -1, 2}, {0x188, 0x188, -1, 1}, {0x18c, 0x18c, -1, 1}, {0x192, 0x192, -1, 1},
    {0x195, 0x195, 0x61, 1}, {0x199, 0x199, -1, 1}, {0x19a, 0x19a, 0xa3, 1},
    {0x19e, 0x19e, 0x82, 1}, {0x1a1, 0x1a5, -1, 2}, {0x1a8, 0x1a8, -1, 1}, {0x1ad, 0x1ad, -1, 1},
    {0x1b0, 0x1b0, -1, 1}, {0x1b4, 0x1b6, -1, 2}, {0x1b9, 0x1b9, -1, 1}, {0x1bd, 0x1bd, -1, 1},
    {0x1bf, 0x1bf, 0x38, 1}, {0x1c5, 0x1c5, -1, 1}, {0x1c6, 0x1c6, -2, 1}, {0x1c8, 0x1c8, -1, 1},
    {0x1c9, 0x1c9, -2, 1}, {0x1cb, 0x1cb, -1, 1}, {0x1cc, 0x1cc, -2, 1}, {0x1ce, 0x1dc, -1, 2},
    {0x1dd, 0x1dd, -0x4f, 1}, {0x1df, 0x1ef, -1, 2}, {0x1f2, 0x1f2, -1, 1}, {0x1f3, 0x1f3, -2, 1},
    {0x1f5, 0x1f5, -1, 1}, {0x1f9, 0x21f, -1, 2}, {0x223, 0x233, -1, 2}, {0x23c, 0x23c, -1, 1},
    {0x23f, 0x240, 0x2a3f, 1}, {0x242, 0x242, -1, 1}, {0x247, 0x24f, -1, 2},
    {0x250, 0x250, 0x2a1f, 1}, {0x251, 0x251, 0x2a1c, 1}, {0x252, 0x252, 0x2a1e, 1},
    {0x253, 0x253, -0xd2, 1}, {0x254, 0x254, -0xce, 1}, {0x256, 0x257, -0xcd, 1},
    {0x259, 0x259, -0xca, 1}, {0x25b, 0x25b, -0xcb, 1}, {0x25c, 0x25c, 0xa54f, 1},
    {0x260, 0x260, -0xcd, 1}, {0x261, 0x261, 0xa54b, 1}, {0x263, 0x263, -0xcf, 1},
    {0x265, 0x265, 0xa528, 1}, {0x266, 0x266, 0xa544, 1}, {0x268, 0x268, -0xd1, 1},
    {0x269, 0x269, -0xd3, 1}, {0x26a, 0x26a, 0xa544, 1}, {0x26b, 0x26b, 0x29f7, 1},
    {0x26c, 0x26c, 0xa541, 1}, {0x26f, 0x26f, -0xd3, 1}, {0x271, 0x271, 0x29fd, 1},
    {0x272, 0x272, -0xd5, 1}, {0x275, 0x275, -0xd6, 1}, {0x27d, 0x27d, 0x29e7, 1},
    {0x280, 0x280, -0xda, 1}, {0x282, 0x282, 0xa543, 1}, {0x283, 0x283, -0xda, 1},
    {0x287, 0x287, 0xa52a, 1}, {0x288, 0x288, -0xda, 1}, {0x289, 0x289, -0x45, 1},
    {0x28a, 0x28b, -0xd9, 1}, {0x28c, 0x28c, -0x47, 1}, {0x292, 0x292, -0xdb, 1},
    {0x29d, 0x29d, 0xa515, 1}, {0x29e, 0x29e, 0xa512, 1}, {0x345, 0x345, 0x54, 1},
    {0x371, 0x373, -1, 2}, {0x377, 0x377, -1, 1}, {0x37b, 0x37d, 0x82, 1},
    {0x3ac, 0x3ac, -0x26, 1}, {0x3ad, 0x3af, -0x25, 1}, {0x3b1, 0x3c1, -0x20, 1},
    {0x3c2, 0x3c2, -0x1f, 1}, {0x3c3, 0x3cb, -0x20, 1}, {0x3cc, 0x3cc, -0x40, 1},
    {0x3cd, 0x3ce, -0x3f, 1}, {0x3d0, 0x3d0, -0x3e, 1}, {0x3d1, 0x3d1, -0x39, 1},
    {0x3d5, 0x3d5, -0x2f, 1}, {0x3d6, 0x3d6, -0x36, 1}, {0x3d7, 0x3d7, -8, 1},
    {0x3d9, 0x3ef, -1, 2}, {0x3f0, 0x3f0, -0x56, 1}, {0x3f1, 0x3f1, -0x50, 1},
    {0x3f2, 0x3f2, 7, 1}, {0x3f3, 0x3f3, -0x74, 1}, {0x3f5, 0x3f5, -0x60, 1},
    {0x3f8, 0x3f8, -1, 1}, {0x3fb, 0x3fb, -1, 1}, {0x430, 0x44f, -0x20, 1},
    {0x450, 0x45f, -0x50, 1}, {0x461, 0x481, -1, 2}, {0x48b, 0x4bf, -1, 2}, {0x4c2, 0x4ce, -1, 2},
    {0x4cf, 0x4cf, -0xf, 1}, {0x4d1, 0x52f, -1, 2}, {0x561, 0x586, -0x30, 1},
    {0x10d0, 0x10fa, 0xbc0, 1}, {0x10fd, 0x10ff, 0xbc0, 1}, {0x13f8, 0x13fd, -8, 1},
    {0x1c80, 0x1c80, -0x186e, 1}, {0x1c81, 0x1c81, -0x186d, 1}, {0x1c82, 0x1c82, -0x1864, 1},
    {0x1c83, 0x1c84, -0x1862, 1}, {0x1c85, 0x1c85, -0x1863, 1}, {0x1c86, 0x1c86, -0x185c, 1},
    {0x1c87, 0x1c87, -0x1825, 1}, {0x1c88, 0x1c88, 0x89c2, 1}, {0x1d79, 0x1d79, 0x8a04, 1},
    {0x1d7d, 0x1d7d, 0xee6, 1}, {0x1d8e, 0x1d8e, 0x8a38, 1}, {0x1e01, 0x1e95, -1, 2},
    {0x1e9b, 0x1e9b, -0x3b, 1}, {0x1ea1, 0x1eff, -1, 2}, {0x1f00, 0x1f07, 8, 1},
    {0x1f10, 0x1f15, 8, 1}, {0x1f20, 0x1f27, 8, 1}, {0x1f30, 0x1f37, 8, 1},
    {0x1f40, 0x1f45, 8, 1}, {0x1f51, 0x1f57, 8, 2}, {0x1f60, 0x1f67, 8, 1},
    {0x1f70, 0x1f71, 0x4a, 1}, {0x1f72, 0x1f75, 0x56, 1}, {0x1f76, 0x1f77, 0x64, 1},
    {0x1f78, 0x1f79, 0x80, 1}, {0x1f7a, 0x1f7b, 0x70, 1}, {0x1f7c, 0x1f7d, 0x7e, 1},
    {0x1fb0, 0x1fb1, 8, 1}, {0x1fbe, 0x1fbe, -0x1c25, 1}, {0x1fd0, 0x1fd1, 8, 1},
    {0x1fe0, 0x1fe1, 8, 1}, {0x1fe5, 0x1fe5, 7, 1}, {0x214e, 0x214e, -0x1c, 1},
    {0x2170, 0x217f, -0x10, 1}, {0x2184, 0x2184, -1, 1}, {0x24d0, 0x24e9, -0x1a, 1},
    {0x2c30, 0x2c5f, -0x30, 1}, {0x2c61, 0x2c61, -1, 1}, {0x2c65, 0x2c65, -0x2a2b, 1},
    {0x2c66, 0x2c66, -0x2a28, 1}, {0x2c68, 0x2c6c, -1, 2}, {0x2c73, 0x2c73, -1, 1},
    {0x2c76, 0x2c76, -1, 1}, {0x2c81, 0x2ce3, -1, 2}, {0x2cec, 0x2cee, -1, 2},
    {0x2cf3, 0x2cf3, -1, 1}, {0x2d00, 0x2d25, -0x1c60, 1}, {0x2d27, 0x2d27, -0x1c60, 1},
    {0x2d2d, 0x2d2d, -0x1c60, 1}, {0xa641, 0xa66d, -1, 2}, {0xa681, 0xa69b, -1, 2},
    {0xa723, 0xa72f, -1, 2}, {0xa733, 0xa76f, -1, 2}, {0xa77a, 0xa77c, -1, 2},
    {0xa77f, 0xa787, -1, 2}, {0xa78c, 0xa78c, -1, 1}, {0xa791, 0xa793, -1, 2},
    {0xa794, 0xa794, 0x30, 1}, {0xa797, 0xa7a9, -1, 2}, {0xa7b5, 0xa7c3, -1, 2},
    {0xa7c8, 0xa7ca, -1, 2}, {0xa7d1, 0xa7d1, -1, 1}, {0xa7d7, 0xa7d9, -1, 2},
    {0xa7f6, 0xa7f6, -1, 1}, {0xab53, 0xab53, -0x3a0, 1}, {0xab70, 0xabbf, -0x97d0, 1},
    {0xff41, 0xff5a, -0x20, 1}, {0x10428, 0x1044f, -0x28, 1}, {0x104d8, 0x104fb, -0x28, 1},
    {0x10597, 0x105a1, -0x27, 1}, {0x105a3, 0x105b1, -0x27, 1}, {0x105b3, 0x105b9, -0x27, 1},
    {0x105bb, 0x105bc, -0x27, 1}, {0x10cc0, 0x10cf2, -0x40, 1}, {0x118c0, 0x118df, -0x20, 1},
    {0x16e60, 0x16e7f, -0x20, 1}, {0x1e922, 0x1e943, -0x22, 1}};
static const qlora__text_case_run qlora__text_lower_runs[] = {
    {0x41, 0x5a, 0x20, 1}, {0xc0, 0xd6, 0x20, 1}, {0xd8, 0xde, 0x20, 1}, {0x100, 0x12e, 1, 2},
    {0x132, 0x136, 1, 2}, {0x139, 0x147, 1, 2}, {0x14a, 0x176, 1, 2}, {0x178, 0x178, -0x79, 1},
    {0x179, 0x17d, 1, 2}, {0x181, 0x181, 0xd2, 1}, {0x182, 0x184, 1, 2}, {0x186, 0x186, 0xce, 1},
    {0x187, 0x187, 1, 1}, {0x189, 0x18a, 0xcd, 1}, {0x18b, 0x18b, 1, 1}, {0x18e, 0x18e, 0x4f, 1},
    {0x18f, 0x18f, 0xca, 1}, {0x190, 0x190, 0xcb, 1}, {0x191, 0x191, 1, 1},
    {0x193, 0x193, 0xcd, 1}, {0x194, 0x194, 0xcf, 1}, {0x196, 0x196, 0xd3, 1},
    {0x197, 0x197, 0xd1, 1}, {0x198, 0x198, 1, 1}, {0x19c, 0x19c, 0xd3, 1},
    {0x19d, 0x19d, 0xd5, 1}, {0x19f, 0x19f, 0xd6, 1}, {0x1a0, 0x1a4, 1, 2},
    {0x1a6, 0x1a6, 0xda, 1}, {0x1a7, 0x1a7, 1, 1}, {0x1a9, 0x1a9, 0xda, 1}, {0x1ac, 0x1ac, 1, 1},
    {0x1ae, 0x1ae, 0xda, 1}, {0x1af, 0x1af, 1, 1}, {0x1b1, 0x1b2, 0xd9, 1}, {0x1b3, 0x1b5, 1, 2},
    {0x1b7, 0x1b7, 0xdb, 1}, {0x1b8, 0x1b8, 1, 1}, {0x1bc, 0x1bc, 1, 1}, {0x1c4, 0x1c4, 2, 1},
    {0x1c5, 0x1c5, 1, 1}, {0x1c7, 0x1c7, 2, 1}, {0x1c8, 0x1c8, 1, 1}, {0x1ca, 0x1ca, 2, 1},
    {0x1cb, 0x1db, 1, 2}, {0x1de, 0x1ee, 1, 2}, {0x1f1, 0x1f1, 2, 1}, {0x1f2, 0x1f4, 1, 2},
    {0x1f6, 0x1f6, -0x61, 1}, {0x1f7, 0x1f7, -0x38, 1}, {0x1f8, 0x21e, 1, 2},
    {0x220, 0x220, -0x82, 1}, {0x222, 0x232, 1, 2}, {0x23a, 0x23a, 0x2a2b, 1},
    {0x23b, 0x23b, 1, 1}, {0x23d, 0x23d, -0xa3, 1}, {0x23e, 0x23e, 0x2a28, 1},
    {0x241, 0x241, 1, 1}, {0x243, 0x243, -0xc3, 1}, {0x244, 0x244, 0x45, 1},
    {0x245, 0x245, 0x47, 1}, {0x246, 0x24e, 1, 2}, {0x370, 0x372, 1, 2}, {0x376, 0x376, 1, 1},
    {0x37f, 0x37f, 0x74, 1}, {0x386, 0x386, 0x26, 1}, {0x388, 0x38a, 0x25, 1},
    {0x38c, 0x38c, 0x40, 1}, {0x38e, 0x38f, 0x3f, 1}, {0x391, 0x3a1, 0x20, 1},
    {0x3a3, 0x3ab, 0x20, 1}, {0x3cf, 0x3cf, 8, 1}, {0x3d8, 0x3ee, 1, 2}, {0x3f4, 0x3f4, -0x3c, 1},
    {0x3f7, 0x3f7, 1, 1}, {0x3f9, 0x3f9, -7, 1}, {0x3fa, 0x3fa, 1, 1}, {0x3fd, 0x3ff, -0x82, 1},
    {0x400, 0x40f, 0x50, 1}, {0x410, 0x42f, 0x20, 1}, {0x460, 0x480, 1, 2}, {0x48a, 0x4be, 1, 2},
    {0x4c0, 0x4c0, 0xf, 1}, {0x4c1, 0x4cd, 1, 2}, {0x4d0, 0x52e, 1, 2}, {0x531, 0x556, 0x30, 1},
    {0x10a0, 0x10c5, 0x1c60, 1}, {0x10c7, 0x10c7, 0x1c60, 1}, {0x10cd, 0x10cd, 0x1c60, 1},
    {0x13a0, 0x13ef, 0x97d0, 1}, {0x13f0, 0x13f5, 8, 1}, {0x1c90, 0x1cba, -0xbc0, 1},
    {0x1cbd, 0x1cbf, -0xbc0, 1}, {0x1e00, 0x1e94, 1, 2}, {0x1e9e, 0x1e9e, -0x1dbf, 1},
    {0x1ea0, 0x1efe, 1, 2}, {0x1f08, 0x1f0f, -8, 1}, {0x1f18, 0x1f1d, -8, 1},
    {0x1f28, 0x1f2f, -8, 1}, {0x1f38, 0x1f3f, -8, 1}, {0x1f48, 0x1f4d, -8, 1},
    {0x1f59, 0x1f5f, -8, 2}, {0x1f68, 0x1f6f, -8, 1}, {0x1f88, 0x1f8f, -8, 1},
    {0x1f98, 0x1f9f, -8, 1}, {0x1fa8, 0x1faf, -8, 1}, {0x1fb8, 0x1fb9, -8, 1},
    {0x1fba, 0x1fbb, -0x4a, 1}, {0x1fbc, 0x1fbc, -9, 1}, {0x1fc8, 0x1fcb, -0x56, 1},
    {0x1fcc, 0x1fcc, -9, 1}, {0x1fd8, 0x1fd9, -8, 1}, {0x1fda, 0x1fdb, -0x64, 1},
    {0x1fe8, 0x1fe9, -8, 1}, {0x1fea, 0x1feb, -0x70, 1}, {0x1fec, 0x1fec, -7, 1},
    {0x1ff8, 0x1ff9, -0x80, 1}, {0x1ffa, 0x1ffb, -0x7e, 1}, {0x1ffc, 0x1ffc, -9, 1},
    {0x2126, 0x2126, -0x1d5d, 1}, {0x212a, 0x212a, -0x20bf, 1}, {0x212b, 0x212b, -0x2046, 1},
    {0x2132, 0x2132, 0x1c, 1}, {0x2160, 0x216f, 0x10, 1}, {0x2183, 0x2183, 1, 1},
    {0x24b6, 0x24cf, 0x1a, 1}, {0x2c00, 0x2c2f, 0x30, 1}, {0x2c60, 0x2c60, 1, 1},
    {0x2c62, 0x2c62, -0x29f7, 1}, {0x2c63, 0x2c63, -0xee6, 1}, {0x2c64, 0x2c64, -0x29e7, 1},
    {0x2c67, 0x2c6b, 1, 2}, {0x2c6d, 0x2c6d, -0x2a1c, 1}, {0x2c6e, 0x2c6e, -0x29fd, 1},
    {0x2c6f, 0x2c6f, -0x2a1f, 1}, {0x2c70, 0x2c70, -0x2a1e, 1}, {0x2c72, 0x2c72, 1, 1},
    {0x2c75, 0x2c75, 1, 1}, {0x2c7e, 0x2c7f, -0x2a3f, 1}, {0x2c80, 0x2ce2, 1, 2},
    {0x2ceb, 0x2ced, 1, 2}, {0x2cf2, 0x2cf2, 1, 1}, {0xa640, 0xa66c, 1, 2},
    {0xa680, 0xa69a, 1, 2}, {0xa722, 0xa72e, 1, 2}, {0xa732, 0xa76e, 1, 2},
    {0xa779, 0xa77b, 1, 2}, {0xa77d, 0xa77d, -0x8a04, 1}, {0xa77e, 0xa786, 1, 2},
    {0xa78b, 0xa78b, 1, 1}, {0xa78d, 0xa78d, -0xa528, 1}, {0xa790, 0xa792, 1, 2},
    {0xa796, 0xa7a8, 1, 2}, {0xa7aa, 0xa7aa, -0xa544, 1}, {0xa7ab, 0xa7ab, -0xa54f, 1},
    {0xa7ac, 0xa7ac, -0xa54b, 1}, {0xa7ad, 0xa7ad, -0xa541, 1}, {0xa7ae, 0xa7ae, -0xa544, 1},
    {0xa7b0, 0xa7b0, -0xa512, 1}, {0xa7b1, 0xa7b1, -0xa52a, 1}, {0xa7b2, 0xa7b2, -0xa515, 1},
    {0xa7b3, 0xa7b3, 0x3a0, 1}, {0xa7b4, 0xa7c2, 1, 2}, {0xa7c4, 0xa7c4, -0x30, 1},
    {0xa7c5, 0xa7c5, -0xa543, 1}, {0xa7c6, 0xa7c6, -0x8a38, 1}, {0xa7c7, 0xa7c9, 1, 2},
    {0xa7d0, 0xa7d0, 1, 1}, {0xa7d6, 0xa7d8, 1, 2}, {0xa7f5, 0xa7f5, 1, 1},
    {0xff21, 0xff3a, 0x20, 1}, {0x10400, 0x10427, 0x28, 1}, {0x104b0, 0x104d3, 0x28, 1},
    {0x10570, 0x1057a, 0x27, 1}, {0x1057c, 0x1058a, 0x27, 1}, {0x1058c, 0x10592, 0x27, 1},
    {0x10594, 0x10595, 0x27, 1}, {0x10c80, 0x10cb2, 0x40, 1}, {0x118a0, 0x118bf, 0x20, 1},
    {0x16e40, 0x16e5f, 0x20, 1}, {0x1e900, 0x1e921, 0x22, 1}};
static const qlora__text_case_long qlora__text_upper_long[] = {
    {0xdf, {0x53, 0x53, 0}}, {0x149, {0x2bc, 0x4e, 0}}, {0x1f0, {0x4a, 0x30c, 0}},
    {0x390, {0x399, 0x308, 0x301}}, {0x3b0, {0x3a5, 0x308, 0x301}}, {0x587, {0x535, 0x552, 0}},
    {0x1e96, {0x48, 0x331, 0}}, {0x1e97, {0x54, 0x308, 0}}, {0x1e98, {0x57, 0x30a, 0}},
    {0x1e99, {0x59, 0x30a, 0}}, {0x1e9a, {0x41, 0x2be, 0}}, {0x1f50, {0x3a5, 0x313, 0}},
    {0x1f52, {0x3a5, 0x313, 0x300}}, {0x1f54, {0x3a5, 0x313, 0x301}},
    {0x1f56, {0x3a5, 0x313, 0x342}}, {0x1f80, {0x1f08, 0x399, 0}}, {0x1f81, {0x1f09, 0x399, 0}},
    {0x1f82, {0x1f0a, 0x399, 0}}, {0x1f83, {0x1f0b, 0x399, 0}}, {0x1f84, {0x1f0c, 0x399, 0}},
    {0x1f85, {0x1f0d, 0x399, 0}}, {0x1f86, {0x1f0e, 0x399, 0}}, {0x1f87, {0x1f0f, 0x399, 0}},
    {0x1f88, {0x1f08, 0x399, 0}}, {0x1f89, {0x1f09, 0x399, 0}}, {0x1f8a, {0x1f0a, 0x399, 0}},
    {0x1f8b, {0x1f0b, 0x399, 0}}, {0x1f8c, {0x1f0c, 0x399, 0}}, {0x1f8d, {0x1f0d, 0x399, 0}},
    {0x1f8e, {0x1f0e, 0x399, 0}}, {0x1f8f, {0x1f0f, 0x399, 0}}, {0x1f90, {0x1f28, 0x399, 0}},
    {0x1f91, {0x1f29, 0x399, 0}}, {0x1f92, {0x1f2a, 0x399, 0}}, {0x1f93, {0x1f2b, 0x399, 0}},
    {0x1f94, {0x1f2c, 0x399, 0}}, {0x1f95, {0x1f2d, 0x399, 0}}, {0x1f96, {0x1f2e, 0x399, 0}},
    {0x1f97, {0x1f2f, 0x399, 0}}, {0x1f98, {0x1f28, 0x399, 0}}, {0x1f99, {0x1f29, 0x399, 0}},
    {0x1f9a, {0x1f2a, 0x399, 0}}, {0x1f9b, {0x1f2b, 0x399, 0}}, {0x1f9c, {0x1f2c, 0x399, 0}},
    {0x1f9d, {0x1f2d, 0x399, 0}}, {0x1f9e, {0x1f2e, 0x399, 0}}, {0x1f9f, {0x1f2f, 0x399, 0}},
    {0x1fa0, {0x1f68, 0x399, 0}}, {0x1fa1, {0x1f69, 0x399, 0}}, {0x1fa2, {0x1f6a, 0x399, 0}},
    {0x1fa3, {0x1f6b, 0x399, 0}}, {0x1fa4, {0x1f6c, 0x399, 0}}, {0x1fa5, {0x1f6d, 0x399, 0}},
    {0x1fa6, {0x1f6e, 0x399, 0}}, {0x1fa7, {0x1f6f, 0x399, 0}}, {0x1fa8, {0x1f68, 0x399, 0}},
    {0x1fa9, {0x1f69, 0x399, 0}}, {0x1faa, {0x1f6a, 0x399, 0}}, {0x1fab, {0x1f6b, 0x399, 0}},
    {0x1fac, {0x1f6c, 0x399, 0}}, {0x1fad, {0x1f6d, 0x399, 0}}, {0x1fae, {0x1f6e, 0x399, 0}},
    {0x1faf, {0x1f6f, 0x399, 0}}, {0x1fb2, {0x1fba, 0x399, 0}}, {0x1fb3, {0x391, 0x399, 0}},
    {0x1fb4, {0x386, 0x399, 0}}, {0x1fb6, {0x391, 0x342, 0}}, {0x1fb7, {0x391, 0x342, 0x399}},
    {0x1fbc, {0x391, 0x399, 0}}, {0x1fc2, {0x1fca, 0x399, 0}}, {0x1fc3, {0x397, 0x399, 0}},
    {0x1fc4, {0x389, 0x399, 0}}, {0x1fc6, {0x397, 0x342, 0}}, {0x1fc7, {0x397, 0x342, 0x399}},
    {0x1fcc, {0x397, 0x399, 0}}, {0x1fd2, {0x399, 0x308, 0x300}}, {0x1fd3, {0x399, 0x308, 0x301}},
    {0x1fd6, {0x399, 0x342, 0}}, {0x1fd7, {0x399, 0x308, 0x342}}, {0x1fe2, {0x3a5, 0x308, 0x300}},
    {0x1fe3, {0x3a5, 0x308, 0x301}}, {0x1fe4, {0x3a1, 0x313, 0}}, {0x1fe6, {0x3a5, 0x342, 0}},
    {0x1fe7, {0x3a5, 0x308, 0x342}}, {0x1ff2, {0x1ffa, 0x399, 0}}, {0x1ff3, {0x3a9, 0x399, 0}},
    {0x1ff4, {0x38f, 0x399, 0}}, {0x1ff6, {0x3a9, 0x342, 0}}, {0x1ff7, {0x3a9, 0x342, 0x399}},
    {0x1ffc, {0x3a9, 0x399, 0}}, {0xfb00, {0x46, 0x46, 0}}, {0xfb01, {0x46, 0x49, 0}},
    {0xfb02, {0x46, 0x4c, 0}}, {0xfb03, {0x46, 0x46, 0x49}}, {0xfb04, {0x46, 0x46, 0x4c}},
    {0xfb05, {0x53, 0x54, 0}}, {0xfb06, {0x53, 0x54, 0}}, {0xfb13, {0x544, 0x546, 0}},
    {0xfb14, {0x544, 0x535, 0}}, {0xfb15, {0x544, 0x53b, 0}}, {0xfb16, {0x54e, 0x546, 0}},
    {0xfb17, {0x544, 0x53d, 0}}};
static const qlora__text_case_long qlora__text_title_long[] = {
    {0xdf, {0x53, 0x73, 0}}, {0x1c4, {0x1c5, 0, 0}}, {0x1c5, {0x1c5, 0, 0}},
    {0x1c6, {0x1c5, 0, 0}}, {0x1c7, {0x1c8, 0, 0}}, {0x1c8, {0x1c8, 0, 0}},
    {0x1c9, {0x1c8, 0, 0}}, {0x1ca, {0x1cb, 0, 0}}, {0x1cb, {0x1cb, 0, 0}},
    {0x1cc, {0x1cb, 0, 0}}, {0x1f1, {0x1f2, 0, 0}}, {0x1f2, {0x1f2, 0, 0}},
    {0x1f3, {0x1f2, 0, 0}}, {0x587, {0x535, 0x582, 0}}, {0x10d0, {0x10d0, 0, 0}},
    {0x10d1, {0x10d1, 0, 0}}, {0x10d2, {0x10d2, 0, 0}}, {0x10d3, {0x10d3, 0, 0}},
    {0x10d4, {0x10d4, 0, 0}}, {0x10d5, {0x10d5, 0, 0}}, {0x10d6, {0x10d6, 0, 0}},
    {0x10d7, {0x10d7, 0, 0}}, {0x10d8, {0x10d8, 0, 0}}, {0x10d9, {0x10d9, 0, 0}},
    {0x10da, {0x10da, 0, 0}}, {0x10db, {0x10db, 0, 0}}, {0x10dc, {0x10dc, 0, 0}},
    {0x10dd, {0x10dd, 0, 0}}, {0x10de, {0x10de, 0, 0}}, {0x10df, {0x10df, 0, 0}},
    {0x10e0, {0x10e0, 0, 0}}, {0x10e1, {0x10e1, 0, 0}}, {0x10e2, {0x10e2, 0, 0}},
    {0x10e3, {0x10e3, 0, 0}}, {0x10e4, {0x10e4, 0, 0}}, {0x10e5, {0x10e5, 0, 0}},
    {0x10e6, {0x10e6, 0, 0}}, {0x10e7, {0x10e7, 0, 0}}, {0x10e8, {0x10e8, 0, 0}},
    {0x10e9, {0x10e9, 0, 0}}, {0x10ea, {0x10ea, 0, 0}}, {0x10eb, {0x10eb, 0, 0}},
    {0x10ec, {0x10ec, 0, 0}}, {0x10ed, {0x10ed, 0, 0}}, {0x10ee, {0x10ee, 0, 0}},
    {0x10ef, {0x10ef, 0, 0}}, {0x10f0, {0x10f0, 0, 0}}, {0x10f1, {0x10f1, 0, 0}},
    {0x10f2, {0x10f2, 0, 0}}, {0x10f3, {0x10f3, 0, 0}}, {0x10f4, {0x10f4, 0, 0}},
    {0x10f5, {0x10f5, 0, 0}}, {0x10f6, {0x10f6, 0, 0}}, {0x10f7, {0x10f7, 0, 0}},
    {0x10f8, {0x10f8, 0, 0}}, {0x10f9, {0x10f9, 0, 0}}, {0x10fa, {0x10fa, 0, 0}},
    {0x10fd, {0x10fd, 0, 0}}, {0x10fe, {0x10fe, 0, 0}}, {0x10ff, {0x10ff, 0, 0}},
    {0x1f80, {0x1f88, 0, 0}}, {0x1f81, {0x1f89, 0, 0}}, {0x1f82, {0x1f8a, 0, 0}},
    {0x1f83, {0x1f8b, 0, 0}}, {0x1f84, {0x1f8c, 0, 0}}, {0x1f85, {0x1f8d, 0, 0}},
    {0x1f86, {0x1f8e, 0, 0}}, {0x1f87, {0x1f8f, 0, 0}}, {0x1f88, {0x1f88, 0, 0}},
    {0x1f89, {0x1f89, 0, 0}}, {0x1f8a, {0x1f8a, 0, 0}}, {0x1f8b, {0x1f8b, 0, 0}},
    {0x1f8c, {0x1f8c, 0, 0}}, {0x1f8d, {0x1f8d, 0, 0}}, {0x1f8e, {0x1f8e, 0, 0}},
    {0x1f8f, {0x1f8f, 0, 0}}, {0x1f90, {0x1f98, 0, 0}}, {0x1f91, {0x1f99, 0, 0}},
    {0x1f92, {0x1f9a, 0, 0}}, {0x1f93, {0x1f9b, 0, 0}}, {0x1f94, {0x1f9c, 0, 0}},
    {0x1f95, {0x1f9d, 0, 0}}, {0x1f96, {0x1f9e, 0, 0}}, {0x1f97, {0x1f9f, 0, 0}},
    {0x1f98, {0x1f98, 0, 0}}, {0x1f99, {0x1f99, 0, 0}}, {0x1f9a, {0x1f9a, 0, 0}},
    {0x1f9b, {0x1f9b, 0, 0}}, {0x1f9c, {0x1f9c, 0, 0}}, {0x1f9d, {0x1f9d, 0, 0}},
    {0x1f9e, {0x1f9e, 0, 0}}, {0x1f9f, {0x1f9f, 0, 0}}, {0x1fa0, {0x1fa8, 0, 0}},
    {0x1fa1, {0x1fa9, 0, 0}}, {0x1fa2, {0x1faa, 0, 0}}, {0x1fa3, {0x1fab, 0, 0}},
    {0x1fa4, {0x1fac, 0, 0}}, {0x1fa5, {0x1fad, 0, 0}}, {0x1fa6, {0x1fae, 0, 0}},
    {0x1fa7, {0x1faf, 0, 0}}, {0x1fa8, {0x1fa8, 0, 0}}, {0x1fa9, {0x1fa9, 0, 0}},
    {0x1faa, {0x1faa, 0, 0}}, {0x1fab, {0x1fab, 0, 0}}, {0x1fac, {0x1fac, 0, 0}},
    {0x1fad, {0x1fad, 0, 0}}, {0x1fae, {0x1fae, 0, 0}}, {0x1faf, {0x1faf, 0, 0}},
    {0x1fb2, {0x1fba, 0x345, 0}}, {0x1fb3, {0x1fbc, 0, 0}}, {0x1fb4, {0x386, 0x345, 0}},
    {0x1fb7, {0x391, 0x342, 0x345}}, {0x1fbc, {0x1fbc, 0, 0}}, {0x1fc2, {0x1fca, 0x345, 0}},
    {0x1fc3, {0x1fcc, 0, 0}}, {0x1fc4, {0x389, 0x345, 0}}, {0x1fc7, {0x397, 0x342, 0x345}},
    {0x1fcc, {0x1fcc, 0, 0}}, {0x1ff2, {0x1ffa, 0x345, 0}}, {0x1ff3, {0x1ffc, 0, 0}},
    {0x1ff4, {0x38f, 0x345, 0}}, {0x1ff7, {0x3a9, 0x342, 0x345}}, {0x1ffc, {0x1ffc, 0, 0}},
    {0xfb00, {0x46, 0x66, 0}}, {0xfb01, {0x46, 0x69, 0}}, {0xfb02, {0x46, 0x6c, 0}},
    {0xfb03, {0x46, 0x66, 0x69}}, {0xfb04, {0x46, 0x66, 0x6c}}, {0xfb05, {0x53, 0x74, 0}},
    {0xfb06, {0x53, 0x74, 0}}, {0xfb13, {0x544, 0x576, 0}}, {0xfb14, {0x544, 0x565, 0}},
    {0xfb15, {0x544, 0x56b, 0}}, {0xfb16, {0x54e, 0x576, 0}}, {0xfb17, {0x544, 0x56d, 0}}};
static const qlora__text_digit_run qlora__text_decimal_runs[] = {
    {0x30, 0x39}, {0x660, 0x669}, {0x6f0, 0x6f9}, {0x7c0, 0x7c9}, {0x966, 0x96f}, {0x9e6, 0x9ef},
    {0xa66, 0xa6f}, {0xae6, 0xaef}, {0xb66, 0xb6f}, {0xbe6, 0xbef}, {0xc66, 0xc6f},
    {0xce6, 0xcef}, {0xd66, 0xd6f}, {0xde6, 0xdef}, {0xe50, 0xe59}, {0xed0, 0xed9},
    {0xf20, 0xf29}, {0x1040, 0x1049}, {0x1090, 0x1099}, {0x17e0, 0x17e9}, {0x1810, 0x1819},
    {0x1946, 0x194f}, {0x19d0, 0x19d9}, {0x1a80, 0x1a89}, {0x1a90, 0x1a99}, {0x1b50, 0x1b59},
    {0x1bb0, 0x1bb9}, {0x1c40, 0x1c49}, {0x1c50, 0x1c59}, {0xa620, 0xa629}, {0xa8d0, 0xa8d9},
    {0xa900, 0xa909}, {0xa9d0, 0xa9d9}, {0xa9f0, 0xa9f9}, {0xaa50, 0xaa59}, {0xabf0, 0xabf9},
    {0xff10, 0xff19}, {0x104a0, 0x104a9}, {0x10d30, 0x10d39}, {0x11066, 0x1106f},
    {0x110f0, 0x110f9}, {0x11136, 0x1113f}, {0x111d0, 0x111d9}, {0x112f0, 0x112f9},
    {0x11450, 0x11459}, {0x114d0, 0x114d9}, {0x11650, 0x11659}, {0x116c0, 0x116c9},
    {0x11730, 0x11739}, {0x118e0, 0x118e9}, {0x11950, 0x11959}, {0x11c50, 0x11c59},
    {0x11d50, 0x11d59}, {0x11da0, 0x11da9}, {0x16a60, 0x16a69}, {0x16ac0, 0x16ac9},
    {0x16b50, 0x16b59}, {0x1d7ce, 0x1d7ff}, {0x1e140, 0x1e149}, {0x1e2f0, 0x1e2f9},
    {0x1e950, 0x1e959}, {0x1fbf0, 0x1fbf9}};
static const qlora__text_digit_run qlora__text_digit_runs[] = {
    {0x30, 0x39}, {0xb2, 0xb3}, {0xb9, 0xb9}, {0x660, 0x669}, {0x6f0, 0x6f9}, {0x7c0, 0x7c9},
    {0x966, 0x96f}, {0x9e6, 0x9ef}, {0xa66, 0xa6f}, {0xae6, 0xaef}, {0xb66, 0xb6f},
    {0xbe6, 0xbef}, {0xc66, 0xc6f}, {0xce6, 0xcef}, {0xd66, 0xd6f}, {0xde6, 0xdef},
    {0xe50, 0xe59}, {0xed0, 0xed9}, {0xf20, 0xf29}, {0x1040, 0x1049}, {0x1090, 0x1099},
    {0x1369, 0x1371}, {0x17e0, 0x17e9}, {0x1810, 0x1819}, {0x1946, 0x194f}, {0x19d0, 0x19da},
    {0x1a80, 0x1a89}, {0x1a90, 0x1a99}, {0x1b50, 0x1b59}, {0x1bb0, 0x1bb9}, {0x1c40, 0x1c49},
    {0x1c50, 0x1c59}, {0x2070, 0x2070}, {0x2074, 0x2079}, {0x2080, 0x2089}, {0x2460, 0x2468},
    {0x2474, 0x247c}, {0x2488, 0x2490}, {0x24ea, 0x24ea}, {0x24f5, 0x24fd}, {0x24ff, 0x24ff},
    {0x2776, 0x277e}, {0x2780, 0x2788}, {0x278a, 0x2792}, {0xa620, 0xa629}, {0xa8d0, 0xa8d9},
    {0xa900, 0xa909}, {0xa9d0, 0xa9d9}, {0xa9f0, 0xa9f9}, {0xaa50, 0xaa59}, {0xabf0, 0xabf9},
    {0xff10, 0xff19}, {0x104a0, 0x104a9}, {0x10a40, 0x10a43}, {0x10d30, 0x10d39},
    {0x10e60, 0x10e68}, {0x11052, 0x1105a}, {0x11066, 0x1106f}, {0x110f0, 0x110f9},
    {0x11136, 0x1113f}, {0x111d0, 0x111d9}, {0x112f0, 0x112f9}, {0x11450, 0x11459},
    {0x114d0, 0x114d9}, {0x11650, 0x11659}, {0x116c0, 0x116c9}, {0x11730, 0x11739},
    {0x118e0, 0x118e9}, {0x11950, 0x11959}, {0x11c50, 0x11c59}, {0x11d50, 0x11d59},
    {0x11da0, 0x11da9}, {0x16a60, 0x16a69}, {0x16ac0, 0x16ac9}, {0x16b50, 0x16b59},
    {0x1d7ce, 0x1d7ff}, {0x1e140, 0x1e149}, {0x1e2f0, 0x1e2f9}, {0x1e950, 0x1e959},
    {0x1f100, 0x1f10a}, {0x1fbf0, 0x1fbf9}};
static const qlora__text_digit_run qlora__text_numeric_runs[] = {
    {0x30, 0x39}, {0xb2, 0xb3}, {0xb9, 0xb9}, {0xbc, 0xbe}, {0x660, 0x669}, {0x6f0, 0x6f9},
    {0x7c0, 0x7c9}, {0x966, 0x96f}, {0x9e6, 0x9ef}, {0x9f4, 0x9f9}, {0xa66, 0xa6f},
    {0xae6, 0xaef}, {0xb66, 0xb6f}, {0xb72, 0xb77}, {0xbe6, 0xbf2}, {0xc66, 0xc6f},
    {0xc78, 0xc7e}, {0xce6, 0xcef}, {0xd58, 0xd5e}, {0xd66, 0xd78}, {0xde6, 0xdef},
    {0xe50, 0xe59}, {0xed0, 0xed9}, {0xf20, 0xf33}, {0x1040, 0x1049}, {0x1090, 0x1099},
    {0x1369, 0x137c}, {0x16ee, 0x16f0}, {0x17e0, 0x17e9}, {0x17f0, 0x17f9}, {0x1810, 0x1819},
    {0x1946, 0x194f}, {0x19d0, 0x19da}, {0x1a80, 0x1a89}, {0x1a90, 0x1a99}, {0x1b50, 0x1b59},
    {0x1bb0, 0x1bb9}, {0x1c40, 0x1c49}, {0x1c50, 0x1c59}, {0x2070, 0x2070}, {0x2074, 0x2079},
    {0x2080, 0x2089}, {0x2150, 0x2182}, {0x2185, 0x2189}, {0x2460, 0x249b}, {0x24ea, 0x24ff},
    {0x2776, 0x2793}, {0x2cfd, 0x2cfd}, {0x3007, 0x3007}, {0x3021, 0x3029}, {0x3038, 0x303a},
    {0x3192, 0x3195}, {0x3220, 0x3229}, {0x3248, 0x324f}, {0x3251, 0x325f}, {0x3280, 0x3289},
    {0x32b1, 0x32bf}, {0x3405, 0x3405}, {0x3483, 0x3483}, {0x382a, 0x382a}, {0x3b4d, 0x3b4d},
    {0x4e00, 0x4e00}, {0x4e03, 0x4e03}, {0x4e07, 0x4e07}, {0x4e09, 0x4e09}, {0x4e5d, 0x4e5d},
    {0x4e8c, 0x4e8c}, {0x4e94, 0x4e94}, {0x4e96, 0x4e96}, {0x4ebf, 0x4ec0}, {0x4edf, 0x4edf},
    {0x4ee8, 0x4ee8}, {0x4f0d, 0x4f0d}, {0x4f70, 0x4f70}, {0x5104, 0x5104}, {0x5146, 0x5146},
    {0x5169, 0x5169}, {0x516b, 0x516b}, {0x516d, 0x516d}, {0x5341, 0x5341}, {0x5343, 0x5345},
    {0x534c, 0x534c}, {0x53c1, 0x53c4}, {0x56db, 0x56db}, {0x58f1, 0x58f1}, {0x58f9, 0x58f9},
    {0x5e7a, 0x5e7a}, {0x5efe, 0x5eff}, {0x5f0c, 0x5f0e}, {0x5f10, 0x5f10}, {0x62fe, 0x62fe},
    {0x634c, 0x634c}, {0x67d2, 0x67d2}, {0x6f06, 0x6f06}, {0x7396, 0x7396}, {0x767e, 0x767e},
    {0x8086, 0x8086}, {0x842c, 0x842c}, {0x8cae, 0x8cae}, {0x8cb3, 0x8cb3}, {0x8d30, 0x8d30},
    {0x9621, 0x9621}, {0x9646, 0x9646}, {0x964c, 0x964c}, {0x9678, 0x9678}, {0x96f6, 0x96f6},
    {0xa620, 0xa629}, {0xa6e6, 0xa6ef}, {0xa830, 0xa835}, {0xa8d0, 0xa8d9}, {0xa900, 0xa909},
    {0xa9d0, 0xa9d9}, {0xa9f0, 0xa9f9}, {0xaa50, 0xaa59}, {0xabf0, 0xabf9}, {0xf96b, 0xf96b},
    {0xf973, 0xf973}, {0xf978, 0xf978}, {0xf9b2, 0xf9b2}, {0xf9d1, 0xf9d1}, {0xf9d3, 0xf9d3},
    {0xf9fd, 0xf9fd}, {0xff10, 0xff19}, {0x10107, 0x10133}, {0x10140, 0x10178},
    {0x1018a, 0x1018b}, {0x102e1, 0x102fb}, {0x10320, 0x10323}, {0x10341, 0x10341},
    {0x1034a, 0x1034a}, {0x103d1, 0x103d5}, {0x104a0, 0x104a9}, {0x10858, 0x1085f},
    {0x10879, 0x1087f}, {0x108a7, 0x108af}, {0x108fb, 0x108ff}, {0x10916, 0x1091b},
    {0x109bc, 0x109bd}, {0x109c0, 0x109cf}, {0x109d2, 0x109ff}, {0x10a40, 0x10a48},
    {0x10a7d, 0x10a7e}, {0x10a9d, 0x10a9f}, {0x10aeb, 0x10aef}, {0x10b58, 0x10b5f},
    {0x10b78, 0x10b7f}, {0x10ba9, 0x10baf}, {0x10cfa, 0x10cff}, {0x10d30, 0x10d39},
    {0x10e60, 0x10e7e}, {0x10f1d, 0x10f26}, {0x10f51, 0x10f54}, {0x10fc5, 0x10fcb},
    {0x11052, 0x1106f}, {0x110f0, 0x110f9}, {0x11136, 0x1113f}, {0x111d0, 0x111d9},
    {0x111e1, 0x111f4}, {0x112f0, 0x112f9}, {0x11450, 0x11459}, {0x114d0, 0x114d9},
    {0x11650, 0x11659}, {0x116c0, 0x116c9}, {0x11730, 0x1173b}, {0x118e0, 0x118f2},
    {0x11950, 0x11959}, {0x11c50, 0x11c6c}, {0x11d50, 0x11d59}, {0x11da0, 0x11da9},
    {0x11fc0, 0x11fd4}, {0x12400, 0x1246e}, {0x16a60, 0x16a69}, {0x16ac0, 0x16ac9},
    {0x16b50, 0x16b59}, {0x16b5b, 0x16b61}, {0x16e80, 0x16e96}, {0x1d2e0, 0x1d2f3},
    {0x1d360, 0x1d378}, {0x1d7ce, 0x1d7ff}, {0x1e140, 0x1e149}, {0x1e2f0, 0x1e2f9},
    {0x1e8c7, 0x1e8cf}, {0x1e950, 0x1e959}, {0x1ec71, 0x1ecab}, {0x1ecad, 0x1ecaf},
    {0x1ecb1, 0x1ecb4}, {0x1ed01, 0x1ed2d}, {0x1ed2f, 0x1ed3d}, {0x1f100, 0x1f10c},
    {0x1fbf0, 0x1fbf9}, {0x20001, 0x20001}, {0x20064, 0x20064}, {0x200e2, 0x200e2},
    {0x20121, 0x20121}, {0x2092a, 0x2092a}, {0x20983, 0x20983}, {0x2098c, 0x2098c},
    {0x2099c, 0x2099c}, {0x20aea, 0x20aea}, {0x20afd, 0x20afd}, {0x20b19, 0x20b19},
    {0x22390, 0x22390}, {0x22998, 0x22998}, {0x23b1b, 0x23b1b}, {0x2626d, 0x2626d},
    {0x2f890, 0x2f890}};
// clang-format on

//@@ src/text/case.h

// The class of a character without the expanded table.
static uint32_t qlora__jin_class(uint32_t code) {
    size_t low = 0;
    size_t high = QLORA__TEXT_COUNT(qlora__text_class_runs);
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (qlora__text_class_runs[middle] >> 8 <= code) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return qlora__text_class_runs[low] & 0x7F;
}

static bool qlora__text_digit_in(const qlora__text_digit_run* runs, size_t count, uint32_t code) {
    for (size_t i = 0; i < count && runs[i].first <= code; i++) {
        if (code <= runs[i].last) {
            return true;
        }
    }
    return false;
}

static uint32_t qlora__text_case_map(const qlora__text_case_run* runs, size_t count,
                                     uint32_t code) {
    size_t low = 0;
    size_t high = count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (runs[middle].last < code) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    bool inside =
        low < count && runs[low].first <= code && (code - runs[low].first) % runs[low].stride == 0;
    return inside ? (uint32_t)((int32_t)code + runs[low].change) : code;
}

static const qlora__text_case_long* qlora__text_case_find(const qlora__text_case_long* rows,
                                                          size_t count, uint32_t code) {
    for (size_t i = 0; i < count && rows[i].code <= code; i++) {
        if (rows[i].code == code) {
            return &rows[i];
        }
    }
    return NULL;
}

typedef enum qlora__text_case {
    QLORA__TEXT_LOWER_CASE,
    QLORA__TEXT_UPPER_CASE,
    QLORA__TEXT_TITLE_CASE
} qlora__text_case;

// What a character becomes: up to three. The final sigma is up to the caller.
static size_t qlora__text_case_of(uint32_t code, qlora__text_case to, uint32_t out[3]) {
    out[0] = code;
    if (code < 0x80) {
        bool lower = code >= 'a' && code <= 'z';
        bool upper = code >= 'A' && code <= 'Z';
        out[0] =
            to == QLORA__TEXT_LOWER_CASE ? (upper ? code + 32 : code) : (lower ? code - 32 : code);
        return 1;
    }
    const qlora__text_case_long* row = NULL;
    if (to == QLORA__TEXT_LOWER_CASE) {
        if (code == 0x130) { // the only character whose lower case is two
            out[0] = 'i';
            out[1] = 0x307;
            return 2;
        }
        out[0] = qlora__text_case_map(qlora__text_lower_runs,
                                      QLORA__TEXT_COUNT(qlora__text_lower_runs), code);
        return 1;
    }
    if (to == QLORA__TEXT_TITLE_CASE) {
        row = qlora__text_case_find(qlora__text_title_long,
                                    QLORA__TEXT_COUNT(qlora__text_title_long), code);
    }
    if (row == NULL) {
        row = qlora__text_case_find(qlora__text_upper_long,
                                    QLORA__TEXT_COUNT(qlora__text_upper_long), code);
    }
    if (row == NULL) {
        out[0] = qlora__text_case_map(qlora__text_upper_runs,
                                      QLORA__TEXT_COUNT(qlora__text_upper_runs), code);
        return 1;
    }
    size_t count = 0;
    while (count < 3 && row->to[count] != 0) {
        out[count] = row->to[count];
        count++;
    }
    return count;
}

//@@ src/text/values.h

// JSON values as the loaders use them: pointers to tokens, NULL for a value that is not there.
// Strings are decoded and end with a zero byte.

// Parses a text that holds one value. A byte order mark before it is allowed.
static qlora_result qlora__text_json(qlora__env* env, const char* name, const char* source,
                                     size_t size, qlora__json* json) {
    if (size >= 3 && memcmp(source, "\xEF\xBB\xBF", 3) == 0) {
        source += 3;
        size -= 3;
    }
    memset(json, 0, sizeof *json);
    QLORA__TRY(qlora__json_parse(env, name, source, size, 0, json));
    qlora_result r = qlora__json_decode(env, json);
    if (r != QLORA_OK) {
        qlora__json_free(env, json);
    }
    return r;
}

// The value of a key (the last one if there are several), or NULL.
static const qlora__json_token*
qlora__text_json_get(const qlora__json* json, const qlora__json_token* object, const char* key) {
    uint32_t found =
        object != NULL ? qlora__json_find(json, (uint32_t)(object - json->tokens), key) : 0;
    return found != 0 ? &json->tokens[found] : NULL;
}

// The value after this one and everything inside it; the first element of an array is array + 1.
static const qlora__json_token* qlora__text_json_next(const qlora__json* json,
                                                      const qlora__json_token* value) {
    return json->tokens + value->next;
}

static bool qlora__text_json_string(const qlora__json_token* value) {
    return value != NULL && value->kind == QLORA__JSON_STRING;
}

static const char* qlora__text_json_text(const qlora__json* json, const qlora__json_token* value) {
    return json->strings + value->begin;
}

static size_t qlora__text_json_size(const qlora__json_token* value) {
    return value->end - value->begin;
}

// The string, or NULL when the value is not one.
static const char* qlora__text_json_cstring(const qlora__json* json,
                                            const qlora__json_token* value) {
    return qlora__text_json_string(value) ? qlora__text_json_text(json, value) : NULL;
}

static bool qlora__text_json_is(const qlora__json* json, const qlora__json_token* value,
                                const char* string) {
    return value != NULL && qlora__json_is(json, (uint32_t)(value - json->tokens), string);
}

static bool qlora__text_json_true(const qlora__json_token* value) {
    return value != NULL && value->kind == QLORA__JSON_TRUE;
}

static bool qlora__text_json_false(const qlora__json_token* value) {
    return value != NULL && value->kind == QLORA__JSON_FALSE;
}

static bool qlora__text_json_absent(const qlora__json_token* value) {
    return value == NULL || value->kind == QLORA__JSON_NULL;
}

// A whole number without a point and without an exponent.
static bool qlora__text_json_integer(const qlora__json* json, const qlora__json_token* value,
                                     int64_t* out) {
    if (value == NULL || value->kind != QLORA__JSON_NUMBER) {
        return false;
    }
    for (uint32_t i = value->begin; i < value->end; i++) {
        if (json->text[i] != '-' && (json->text[i] < '0' || json->text[i] > '9')) {
            return false;
        }
    }
    return qlora__json_int(json, (uint32_t)(value - json->tokens), out);
}

static qlora_result qlora__text_json_ids(qlora__env* env, const qlora__json* json,
                                         const qlora__json_token* array, qlora_text_ids* out) {
    if (array->kind != QLORA__JSON_ARRAY) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "an array of whole numbers was expected");
    }
    const qlora__json_token* value = array + 1;
    for (uint32_t i = 0; i < array->count; i++) {
        int64_t id = 0;
        if (!qlora__text_json_integer(json, value, &id) || id > INT32_MAX || id < INT32_MIN) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "element %lu is not a whole number of 32 bits",
                                   (unsigned long)i);
        }
        QLORA__TRY(qlora__text_ids_add(env, out, (int32_t)id));
        value = qlora__text_json_next(json, value);
    }
    return QLORA_OK;
}

//@@ src/text/maps.h

static uint64_t qlora__text_mix(uint64_t x) {
    x ^= x >> 32;
    x *= 0x9E3779B97F4A7C15u;
    x ^= x >> 29;
    x *= 0xBF58476D1CE4E5B9u;
    return x ^ x >> 32;
}

static uint64_t qlora__text_hash(const char* data, size_t count) {
    uint64_t hash = 0x243F6A8885A308D3u ^ count;
    while (count >= 8) {
        uint64_t word;
        memcpy(&word, data, 8);
        hash = qlora__text_mix(hash ^ word);
        data += 8;
        count -= 8;
    }
    uint64_t word = 0;
    for (size_t i = 0; i < count; i++) {
        word = word << 8 | (unsigned char)data[i];
    }
    return qlora__text_mix(hash ^ word);
}

// Pairs of numbers to pairs of numbers. An empty place has key UINT64_MAX.
typedef struct qlora__text_pair {
    uint64_t key;
    uint32_t first;
    uint32_t second;
} qlora__text_pair;

typedef struct qlora__text_pairs {
    qlora__text_pair* data;
    size_t places; // a power of two, or 0
    size_t count;
} qlora__text_pairs;

static const qlora__text_pair* qlora__text_pairs_find(const qlora__text_pairs* pairs, uint32_t a,
                                                      uint32_t b) {
    if (pairs->places == 0) {
        return NULL;
    }
    uint64_t key = (uint64_t)a << 32 | b;
    size_t place = (size_t)qlora__text_mix(key) & (pairs->places - 1);
    while (pairs->data[place].key != key) {
        if (pairs->data[place].key == UINT64_MAX) {
            return NULL;
        }
        place = (place + 1) & (pairs->places - 1);
    }
    return &pairs->data[place];
}

static void qlora__text_pairs_place(qlora__text_pairs* pairs, qlora__text_pair pair) {
    size_t place = (size_t)qlora__text_mix(pair.key) & (pairs->places - 1);
    while (pairs->data[place].key != UINT64_MAX && pairs->data[place].key != pair.key) {
        place = (place + 1) & (pairs->places - 1);
    }
    pairs->count += pairs->data[place].key == UINT64_MAX ? 1 : 0;
    pairs->data[place] = pair;
}

static void qlora__text_pairs_free(qlora__env* env, qlora__text_pairs* pairs) {
    qlora__env_free(env, pairs->data, pairs->places * sizeof *pairs->data);
    memset(pairs, 0, sizeof *pairs);
}

// Places for `count` pairs, at most half of them used. Filling a table that fits is much faster
// than letting it grow.
static qlora_result qlora__text_pairs_reserve(qlora__env* env, qlora__text_pairs* pairs,
                                              size_t count) {
    qlora__text_pairs grown;
    grown.places = pairs->places > 0 ? pairs->places : 64;
    grown.count = 0;
    while (grown.places / 2 < count) {
        grown.places *= 2;
    }
    if (grown.places == pairs->places) {
        return QLORA_OK;
    }
    size_t bytes = 0;
    if (!qlora__mul(grown.places, sizeof(qlora__text_pair), &bytes)) {
        return qlora__env_fail(env, QLORA_ERR_MEMORY, "out of host memory");
    }
    grown.data = (qlora__text_pair*)qlora__env_alloc(env, bytes);
    if (grown.data == NULL) {
        return QLORA_ERR_MEMORY;
    }
    memset(grown.data, 0xFF, bytes);
    for (size_t i = 0; i < pairs->places; i++) {
        if (pairs->data[i].key != UINT64_MAX) {
            qlora__text_pairs_place(&grown, pairs->data[i]);
        }
    }
    qlora__text_pairs_free(env, pairs);
    *pairs = grown;
    return QLORA_OK;
}

// A later value for the same key replaces the earlier one.
static qlora_result qlora__text_pairs_put(qlora__env* env, qlora__text_pairs* pairs, uint32_t a,
                                          uint32_t b, uint32_t first, uint32_t second) {
    QLORA__TRY(qlora__text_pairs_reserve(env, pairs, pairs->count + 1));
    qlora__text_pair pair;
    pair.key = (uint64_t)a << 32 | b;
    pair.first = first;
    pair.second = second;
    qlora__text_pairs_place(pairs, pair);
    return QLORA_OK;
}

// Byte strings to ids. The strings follow one another in `bytes`.
typedef struct qlora__text_word {
    uint32_t at;
    uint32_t size;
    int32_t id;
} qlora__text_word;

typedef struct qlora__text_words {
    qlora_text_bytes bytes;
    qlora__text_word* data;
    size_t count;
    size_t capacity;
    uint32_t* table; // 1 + index into data, 0 is empty
    size_t places;
} qlora__text_words;

static size_t qlora__text_words_place(const qlora__text_words* words, const char* text,
                                      size_t size) {
    size_t place = (size_t)qlora__text_hash(text, size) & (words->places - 1);
    while (words->table[place] != 0) {
        const qlora__text_word* word = &words->data[words->table[place] - 1];
        if (word->size == size &&
            (size == 0 || memcmp(words->bytes.data + word->at, text, size) == 0)) {
            break;
        }
        place = (place + 1) & (words->places - 1);
    }
    return place;
}

static int32_t qlora__text_words_find(const qlora__text_words* words, const char* text,
                                      size_t size) {
    if (words->places == 0) {
        return -1;
    }
    uint32_t found = words->table[qlora__text_words_place(words, text, size)];
    return found == 0 ? -1 : words->data[found - 1].id;
}

// Places for `count` words, at most half of them used.
static qlora_result qlora__text_words_reserve(qlora__env* env, qlora__text_words* words,
                                              size_t count) {
    size_t places = words->places > 0 ? words->places : 64;
    while (places / 2 < count) {
        places *= 2;
    }
    if (places == words->places) {
        return QLORA_OK;
    }
    uint32_t* table = (uint32_t*)qlora__text_zalloc(env, places, sizeof(uint32_t));
    if (table == NULL) {
        return QLORA_ERR_MEMORY;
    }
    qlora__env_free(env, words->table, words->places * sizeof *words->table);
    words->table = table;
    words->places = places;
    for (size_t i = 0; i < words->count; i++) {
        const qlora__text_word* word = &words->data[i];
        table[qlora__text_words_place(words, words->bytes.data + word->at, word->size)] =
            (uint32_t)i + 1;
    }
    return QLORA_OK;
}

// A string that exists already gets the new id.
static qlora_result qlora__text_words_put(qlora__env* env, qlora__text_words* words,
                                          const char* text, size_t size, int32_t id) {
    QLORA__TRY(qlora__text_words_reserve(env, words, words->count + 1));
    size_t place = qlora__text_words_place(words, text, size);
    if (words->table[place] != 0) {
        words->data[words->table[place] - 1].id = id;
        return QLORA_OK;
    }
    if (words->bytes.count + size >= UINT32_MAX || words->count >= UINT32_MAX - 1) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "the vocabulary is larger than 4 GiB");
    }
    void* data = words->data;
    qlora_result r = qlora__text_reserve(env, &data, &words->capacity, words->count, 1,
                                         sizeof(qlora__text_word));
    words->data = (qlora__text_word*)data;
    QLORA__TRY(r);
    qlora__text_word* word = &words->data[words->count];
    word->at = (uint32_t)words->bytes.count;
    word->size = (uint32_t)size;
    word->id = id;
    QLORA__TRY(qlora__text_bytes_add(env, &words->bytes, text, size));
    words->count++;
    words->table[place] = (uint32_t)words->count;
    return QLORA_OK;
}

static void qlora__text_words_free(qlora__env* env, qlora__text_words* words) {
    qlora__text_bytes_free(env, &words->bytes);
    qlora__env_free(env, words->data, words->capacity * sizeof *words->data);
    qlora__env_free(env, words->table, words->places * sizeof *words->table);
    memset(words, 0, sizeof(*words));
}

//@@ src/text/view.h

// A text to be split. After the ByteLevel step, every byte is one character: code_of_byte is set.
typedef struct qlora__text_view {
    const unsigned char* s;
    size_t end;
    const uint8_t* classes;
    const uint16_t* code_of_byte;
} qlora__text_view;

// The class of the character at a position as a bit, and its length; both are 0 at the end. An
// invalid byte is a character of class OTHER.
static unsigned qlora__text_class_at(const qlora__text_view* v, size_t at, size_t* length) {
    if (at >= v->end) {
        *length = 0;
        return 0;
    }
    unsigned char c = v->s[at];
    *length = 1;
    if (v->code_of_byte != NULL) {
        return 1u << (v->classes[v->code_of_byte[c]] & 15);
    }
    if (c < 0x80) {
        return 1u << (v->classes[c] & 15);
    }
    uint32_t code;
    size_t found = qlora__text_utf8(v->s + at, v->end - at, &code);
    if (found == 0) {
        return QLORA__TEXT_BIT(OTHER);
    }
    *length = found;
    return 1u << (v->classes[code] & 15);
}

// The end of the run of characters of these classes.
static size_t qlora__text_run(const qlora__text_view* v, size_t at, unsigned mask) {
    size_t length;
    while (qlora__text_class_at(v, at, &length) & mask) {
        at += length;
    }
    return at;
}

//@@ src/text/pattern.h

// ---- regular expressions of pre-tokenizers ------------------------------------------------------

// A pattern is compiled to a small program for a machine that tries the alternatives in order and
// goes back to the last choice when it fails, as Oniguruma does (the engine of the `tokenizers`
// library). Supported: literals, ., [sets], \d \w \s \p{..} and their opposites, \b \B ^ $ \A \z
// \Z, groups, (?i:..), (?=..), (?!..), (?>..), |, and * + ? {n,m}, also lazy; * + ? also
// possessive. Anything else is refused by name. Choices are kept on a stack of our own, so nothing
// recurses, and every match has a limited number of steps, so nothing hangs.

#define QLORA__PATTERN_STEPS 4096
#define QLORA__PATTERN_SETS 256
#define QLORA__PATTERN_RANGES 128 // of one set
#define QLORA__PATTERN_GROUPS 32
#define QLORA__PATTERN_REPEAT 1000

typedef enum qlora__pattern_op {
    QLORA__PATTERN_SET,   // one character of set `a`
    QLORA__PATTERN_RUN,   // `least` to `most` characters of set `a`, in the way `mode`
    QLORA__PATTERN_SPLIT, // continue with the next step; if that fails, at this + a
    QLORA__PATTERN_LAZY,  // continue at this + a; if that fails, with the next step
    QLORA__PATTERN_JUMP,  // continue at this + a
    QLORA__PATTERN_LOOK,  // look-ahead until LOOK_END at this + a; mode 1: negative
    QLORA__PATTERN_LOOK_END,
    QLORA__PATTERN_ATOMIC, // forget the choices between this and its end
    QLORA__PATTERN_ATOMIC_END,
    QLORA__PATTERN_LINE_BEGIN,
    QLORA__PATTERN_LINE_END,
    QLORA__PATTERN_TEXT_BEGIN,
    QLORA__PATTERN_TEXT_END,
    QLORA__PATTERN_LAST_LINE, // \Z: the end, or before a final line end
    QLORA__PATTERN_WORD,      // \b; mode 1: \B
    QLORA__PATTERN_MATCH
} qlora__pattern_op;

enum { QLORA__PATTERN_GREEDY, QLORA__PATTERN_RELUCTANT, QLORA__PATTERN_POSSESSIVE };

typedef struct qlora__pattern_step {
    qlora__pattern_op op;
    int32_t a;
    int32_t least;
    int32_t most; // -1: no limit
    int32_t mode;
} qlora__pattern_step;

// A set of characters: classes, parts of classes, and ranges.
typedef struct qlora__pattern_set {
    uint32_t ascii[4]; // the answer for the first 128 code points
    unsigned mask;     // classes that belong to it as a whole
    unsigned parts;    // QLORA__PATTERN_LU .. of the classes that have parts
    uint32_t ranges[QLORA__PATTERN_RANGES][2];
    uint32_t count;
    bool negated;
} qlora__pattern_set;

// A class of text/classes.h may hold two general categories; these are the ones that patterns tell
// apart, and the members of the rarer one.
enum {
    QLORA__PATTERN_LU = 1,
    QLORA__PATTERN_LT = 2,
    QLORA__PATTERN_LM = 4,
    QLORA__PATTERN_LO = 8,
    QLORA__PATTERN_ND = 16,
    QLORA__PATTERN_NL = 32,
    QLORA__PATTERN_Z = 64,       // white space that is a separator
    QLORA__PATTERN_CONTROL = 128 // white space that is a control character
};

// Oniguruma counts these numbers of Latin-1 as word characters in \w and \b, but not in a set.
static const uint32_t qlora__pattern_words[][2] = {{0xB2, 0xB3}, {0xB9, 0xB9}, {0xBC, 0xBE}};

static bool qlora__pattern_in(const uint32_t (*ranges)[2], size_t count, uint32_t code) {
    for (size_t i = 0; i < count; i++) {
        if (code >= ranges[i][0] && code <= ranges[i][1]) {
            return true;
        }
    }
    return false;
}

// The part of its class that a character belongs to; 0 if its class has no parts that differ.
static unsigned qlora__pattern_part(unsigned bit, uint32_t code) {
    static const uint32_t title[][2] = {
        {0x1C5, 0x1C5},   {0x1C8, 0x1C8},   {0x1CB, 0x1CB},   {0x1F2, 0x1F2},   {0x1F88, 0x1F8F},
        {0x1F98, 0x1F9F}, {0x1FA8, 0x1FAF}, {0x1FBC, 0x1FBC}, {0x1FCC, 0x1FCC}, {0x1FFC, 0x1FFC}};
    static const uint32_t letters[][2] = {
        {0x16EE, 0x16F0},   {0x2160, 0x2182},   {0x2185, 0x2188},   {0x3007, 0x3007},
        {0x3021, 0x3029},   {0x3038, 0x303A},   {0xA6E6, 0xA6EF},   {0x10140, 0x10174},
        {0x10341, 0x10341}, {0x1034A, 0x1034A}, {0x103D1, 0x103D5}, {0x12400, 0x1246E}};
    if (bit == QLORA__TEXT_BIT(UPPER)) {
        return qlora__pattern_in(title, QLORA__TEXT_COUNT(title), code) ? QLORA__PATTERN_LT
                                                                        : QLORA__PATTERN_LU;
    }
    if (bit == QLORA__TEXT_BIT(DIGIT)) {
        return qlora__pattern_in(letters, QLORA__TEXT_COUNT(letters), code) ? QLORA__PATTERN_NL
                                                                            : QLORA__PATTERN_ND;
    }
    if (bit == QLORA__TEXT_BIT(SPACE)) {
        return (code >= 9 && code <= 13) || code == 0x85 ? QLORA__PATTERN_CONTROL
                                                         : QLORA__PATTERN_Z;
    }
    return 0;
}

static bool qlora__pattern_has(const qlora__pattern_set* set, unsigned bit, uint32_t code) {
    bool in = (set->mask & bit) != 0 || (set->parts & qlora__pattern_part(bit, code)) != 0 ||
              qlora__pattern_in(set->ranges, set->count, code);
    return in != set->negated;
}

// A choice to come back to, or a mark that a look-ahead or an atomic group left.
typedef struct qlora__pattern_frame {
    size_t at;
    size_t begin; // of a run; a mark: the frame of the mark before it
    int32_t step;
    int32_t kind;
} qlora__pattern_frame;

enum {
    QLORA__PATTERN_CHOICE,  // continue at step
    QLORA__PATTERN_SHORTER, // a greedy run: give back one character, down to `begin`
    QLORA__PATTERN_LONGER,  // a lazy run: take one more
    QLORA__PATTERN_MARK,    // forgotten when it is reached
    QLORA__PATTERN_MARK_NOT // a negative look-ahead: when everything in it failed, it holds
};

typedef struct qlora__pattern {
    qlora__pattern_step* steps;
    qlora__pattern_set* sets;
    int32_t count;
    int32_t set_count;
    size_t step_capacity;
    size_t set_capacity;
    qlora__pattern_frame* frames;
    size_t frame_capacity;
    uint64_t left; // steps that the present text may still take
} qlora__pattern;

static void qlora__pattern_free(qlora__env* env, qlora__pattern* p) {
    if (p != NULL) {
        qlora__env_free(env, p->steps, p->step_capacity * sizeof *p->steps);
        qlora__env_free(env, p->sets, p->set_capacity * sizeof *p->sets);
        qlora__env_free(env, p->frames, p->frame_capacity * sizeof *p->frames);
        qlora__env_free(env, p, sizeof *p);
    }
}

// ---- compiling ----------------------------------------------------------------------------------

typedef struct qlora__pattern_group {
    int32_t begin;  // first step of the group
    int32_t branch; // first step of the current alternative
    int32_t jumps;  // last jump to the end of the group; each links to the previous one, -1 ends
    int32_t kind;   // the op that was opened for it, or -1
    int64_t width;  // least number of characters of the current alternative
    int64_t least;  // and of the shortest one so far; -1: none yet
    bool any_case;
} qlora__pattern_group;

typedef struct qlora__pattern_parser {
    qlora__env* env;
    qlora__pattern* out;
    const uint8_t* classes;
    const char* text;
    size_t size;
    size_t at;
    qlora__pattern_group groups[QLORA__PATTERN_GROUPS];
    int depth;
    qlora__pattern_set set; // being built
} qlora__pattern_parser;

static qlora_result qlora__pattern_refuse(const qlora__pattern_parser* p, const char* what) {
    return qlora__env_fail(p->env, QLORA_ERR_UNSUPPORTED,
                           "the regular expression %.200s has, at byte %llu, %s, which is not "
                           "supported",
                           p->text, (unsigned long long)p->at, what);
}

static bool qlora__pattern_is(const qlora__pattern_parser* p, const char* word) {
    size_t n = strlen(word);
    return p->size - p->at >= n && memcmp(p->text + p->at, word, n) == 0;
}

// Skips `word` if it comes next.
static bool qlora__pattern_accept(qlora__pattern_parser* p, const char* word) {
    bool found = qlora__pattern_is(p, word);
    p->at += found ? strlen(word) : 0;
    return found;
}

// Makes room for `n` steps at a place. Every jump inside the moved piece is relative and stays
// inside it.
static qlora_result qlora__pattern_open(qlora__pattern_parser* p, int32_t at, int32_t n) {
    qlora__pattern* out = p->out;
    if (n > QLORA__PATTERN_STEPS - out->count) {
        return qlora__pattern_refuse(p, "more than 4096 steps");
    }
    void* data = out->steps;
    qlora_result r = qlora__text_reserve(p->env, &data, &out->step_capacity, (size_t)out->count,
                                         (size_t)n, sizeof *out->steps);
    out->steps = (qlora__pattern_step*)data;
    QLORA__TRY(r);
    memmove(out->steps + at + n, out->steps + at, (size_t)(out->count - at) * sizeof *out->steps);
    memset(out->steps + at, 0, (size_t)n * sizeof *out->steps);
    out->count += n;
    return QLORA_OK;
}

static qlora_result qlora__pattern_insert(qlora__pattern_parser* p, int32_t at,
                                          qlora__pattern_op op, int32_t a, int32_t mode) {
    QLORA__TRY(qlora__pattern_open(p, at, 1));
    p->out->steps[at].op = op;
    p->out->steps[at].a = a;
    p->out->steps[at].mode = mode;
    return QLORA_OK;
}

static qlora_result qlora__pattern_append(qlora__pattern_parser* p, qlora__pattern_op op, int32_t a,
                                          int32_t mode) {
    return qlora__pattern_insert(p, p->out->count, op, a, mode);
}

// ---- sets ---------------------------------------------------------------------------------------

static qlora_result qlora__pattern_range(qlora__pattern_parser* p, uint32_t low, uint32_t high) {
    qlora__pattern_set* set = &p->set;
    if (low > high) {
        return qlora__pattern_refuse(p, "a range whose end is before its start");
    }
    if (set->count == QLORA__PATTERN_RANGES) {
        return qlora__pattern_refuse(p, "a set of more than 128 ranges");
    }
    set->ranges[set->count][0] = low;
    set->ranges[set->count][1] = high;
    set->count++;
    return QLORA_OK;
}

// A character or a range, in both cases if case is ignored: only ASCII letters have a simple rule.
static qlora_result qlora__pattern_chars(qlora__pattern_parser* p, uint32_t low, uint32_t high) {
    QLORA__TRY(qlora__pattern_range(p, low, high));
    if (!p->groups[p->depth].any_case) {
        return QLORA_OK;
    }
    if (high >= 0x80) {
        return qlora__pattern_refuse(p, "a character beyond ASCII where case is ignored");
    }
    for (uint32_t c = low; c <= high; c++) {
        uint32_t lower = c | 0x20u;
        if (lower < 'a' || lower > 'z') {
            continue;
        }
        QLORA__TRY(qlora__pattern_range(p, c ^ 0x20u, c ^ 0x20u));
        if (lower == 's' || lower == 'k') { // the long s, and the Kelvin sign
            uint32_t other = lower == 's' ? 0x17Fu : 0x212Au;
            QLORA__TRY(qlora__pattern_range(p, other, other));
        }
    }
    return QLORA_OK;
}

typedef struct qlora__pattern_property {
    const char* name;
    unsigned mask;
    unsigned parts;
} qlora__pattern_property;

static const qlora__pattern_property qlora__pattern_properties[] = {
    {"L", QLORA__TEXT_L, 0},
    {"Lu", 0, QLORA__PATTERN_LU},
    {"Lt", 0, QLORA__PATTERN_LT},
    {"Ll", QLORA__TEXT_BIT(LOWER), 0},
    {"Lm", 0, QLORA__PATTERN_LM},
    {"Lo", 0, QLORA__PATTERN_LO},
    {"M", QLORA__TEXT_M, 0},
    {"N", QLORA__TEXT_N, 0},
    {"Nd", 0, QLORA__PATTERN_ND},
    {"Nl", 0, QLORA__PATTERN_NL},
    {"No", QLORA__TEXT_BIT(NUMBER), 0},
    {"P", QLORA__TEXT_P, 0},
    {"Pc", QLORA__TEXT_BIT(CONNECTOR), 0},
    {"S", QLORA__TEXT_S, 0},
    {"Z", 0, QLORA__PATTERN_Z},
    {"C", QLORA__TEXT_BIT(OTHER) | QLORA__TEXT_BIT(JOINER), QLORA__PATTERN_CONTROL},
    {"Letter", QLORA__TEXT_L, 0},
    {"Mark", QLORA__TEXT_M, 0},
    {"Number", QLORA__TEXT_N, 0},
    {"Punctuation", QLORA__TEXT_P, 0},
    {"Symbol", QLORA__TEXT_S, 0},
};

// Adds a property, or its opposite. The opposite of a property is one of classes and parts, too.
static void qlora__pattern_add(qlora__pattern_set* set, unsigned mask, unsigned parts,
                               bool opposite) {
    static const struct {
        unsigned bit;
        unsigned parts;
    } shared[] = {{QLORA__TEXT_BIT(UPPER), QLORA__PATTERN_LU | QLORA__PATTERN_LT},
                  {QLORA__TEXT_BIT(DIGIT), QLORA__PATTERN_ND | QLORA__PATTERN_NL},
                  {QLORA__TEXT_BIT(LETTER), QLORA__PATTERN_LM | QLORA__PATTERN_LO},
                  {QLORA__TEXT_BIT(SPACE), QLORA__PATTERN_Z | QLORA__PATTERN_CONTROL}};
    for (size_t i = 0; i < QLORA__TEXT_COUNT(shared); i++) {
        parts |= (mask & shared[i].bit) != 0 ? shared[i].parts : 0u;
        mask &= ~shared[i].bit;
    }
    if (opposite) {
        mask = ~mask & 0x7FFFu;
        parts = ~parts & 0xFFu;
        for (size_t i = 0; i < QLORA__TEXT_COUNT(shared); i++) {
            mask &= ~shared[i].bit;
        }
    }
    set->mask |= mask;
    set->parts |= parts;
}

// \p{..}, \P{..} and \p{^..}; the position is after the p.
static qlora_result qlora__pattern_parse_property(qlora__pattern_parser* p, bool opposite) {
    char name[32];
    size_t n = 0;
    if (!qlora__pattern_accept(p, "{")) {
        return qlora__pattern_refuse(p, "\\p without a name in braces");
    }
    opposite = qlora__pattern_accept(p, "^") ? !opposite : opposite;
    while (p->at + n < p->size && p->text[p->at + n] != '}' && n + 1 < sizeof name) {
        name[n] = p->text[p->at + n];
        n++;
    }
    name[n] = '\0';
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__pattern_properties); i++) {
        const qlora__pattern_property* property = &qlora__pattern_properties[i];
        if (strcmp(property->name, name) == 0) {
            p->at += n + 1;
            qlora__pattern_add(&p->set, property->mask, property->parts, opposite);
            return QLORA_OK;
        }
    }
    char what[64];
    snprintf(what, sizeof what, "the property %s", name);
    return qlora__pattern_refuse(p, what);
}

// \xHH, \x{H...} and \uHHHH; the position is after the letter.
static qlora_result qlora__pattern_parse_hex(qlora__pattern_parser* p, size_t digits,
                                             uint32_t* out) {
    bool braces = qlora__pattern_accept(p, "{");
    size_t most = braces ? 6 : digits;
    uint32_t code = 0;
    size_t n = 0;
    while (n < most && p->at < p->size) {
        static const char hex[] = "0123456789abcdef0123456789ABCDEF";
        const char* found = (const char*)memchr(hex, p->text[p->at], 32);
        if (found == NULL) {
            break;
        }
        code = code * 16 + (uint32_t)((found - hex) % 16);
        p->at++;
        n++;
    }
    if (n == 0 || (!braces && n != digits) || (braces && !qlora__pattern_accept(p, "}")) ||
        code >= QLORA__TEXT_CODES) {
        return qlora__pattern_refuse(p, "a hexadecimal escape that is not a code point");
    }
    *out = code;
    return QLORA_OK;
}

// One item of a set after a backslash: a class is added to the set (*is_class), a character is
// returned.
static qlora_result qlora__pattern_parse_escape(qlora__pattern_parser* p, bool* is_class,
                                                uint32_t* code) {
    static const char letters[] = "rntfvae";
    static const char meaning[] = "\r\n\t\f\v\a\x1b";
    if (p->at == p->size) {
        return qlora__pattern_refuse(p, "a backslash at its end");
    }
    char c = p->text[p->at];
    *is_class = true;
    p->at++;
    if (c == 'p' || c == 'P') {
        return qlora__pattern_parse_property(p, c == 'P');
    }
    if (c == 'd' || c == 'D') {
        qlora__pattern_add(&p->set, 0, QLORA__PATTERN_ND, c == 'D');
        return QLORA_OK;
    }
    if (c == 'w' || c == 'W') {
        qlora__pattern_add(&p->set, QLORA__TEXT_W, 0, c == 'W');
        return QLORA_OK;
    }
    if (c == 's' || c == 'S') {
        qlora__pattern_add(&p->set, QLORA__TEXT_WS, 0, c == 'S');
        return QLORA_OK;
    }
    *is_class = false;
    if (c == 'x' || c == 'u') {
        return qlora__pattern_parse_hex(p, c == 'x' ? 2 : 4, code);
    }
    const char* letter = strchr(letters, c);
    if (letter != NULL && c != '\0') {
        *code = (uint8_t)meaning[letter - letters];
        return QLORA_OK;
    }
    bool plain = (c < '0' || c > '9') && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z');
    if (!plain || (uint8_t)c < 0x20 || (uint8_t)c >= 0x7F) {
        p->at--;
        char what[32];
        snprintf(what, sizeof what, "the escape \\%c", (uint8_t)c < 0x7F && c > 0x20 ? c : '?');
        return qlora__pattern_refuse(p, what);
    }
    *code = (uint8_t)c;
    return QLORA_OK;
}

// The character at the position, which is not a backslash.
static qlora_result qlora__pattern_parse_char(qlora__pattern_parser* p, uint32_t* code) {
    size_t n = qlora__text_utf8((const unsigned char*)p->text + p->at, p->size - p->at, code);
    if (n == 0) {
        return qlora__pattern_refuse(p, "bytes that are not UTF-8");
    }
    p->at += n;
    return QLORA_OK;
}

// A member of a set: a class, a character or a range.
static qlora_result qlora__pattern_parse_member(qlora__pattern_parser* p) {
    uint32_t low = 0;
    uint32_t high = 0;
    bool is_class = false;
    if (qlora__pattern_is(p, "[") || qlora__pattern_is(p, "&&")) {
        return qlora__pattern_refuse(p, "a set inside a set");
    }
    if (qlora__pattern_accept(p, "\\")) {
        QLORA__TRY(qlora__pattern_parse_escape(p, &is_class, &low));
    } else {
        QLORA__TRY(qlora__pattern_parse_char(p, &low));
    }
    if (is_class) {
        return QLORA_OK;
    }
    if (!qlora__pattern_is(p, "-") || p->size - p->at < 2 || p->text[p->at + 1] == ']') {
        return qlora__pattern_chars(p, low, low);
    }
    p->at++;
    if (qlora__pattern_accept(p, "\\")) {
        QLORA__TRY(qlora__pattern_parse_escape(p, &is_class, &high));
    } else {
        QLORA__TRY(qlora__pattern_parse_char(p, &high));
    }
    if (is_class) {
        return qlora__pattern_refuse(p, "a range that ends in a class");
    }
    return qlora__pattern_chars(p, low, high);
}

// Ends the set that was built: a step that matches one of its characters.
static qlora_result qlora__pattern_add_set(qlora__pattern_parser* p) {
    qlora__pattern* out = p->out;
    qlora__pattern_set* set = &p->set;
    unsigned letters = set->parts & (QLORA__PATTERN_LM | QLORA__PATTERN_LO);
    if (letters == QLORA__PATTERN_LM || letters == QLORA__PATTERN_LO) {
        return qlora__pattern_refuse(p, "one of \\p{Lm} and \\p{Lo} without the other");
    }
    set->mask |= letters != 0 ? QLORA__TEXT_BIT(LETTER) : 0u;
    for (uint32_t c = 0; c < 128; c++) {
        if (qlora__pattern_has(set, 1u << (p->classes[c] & 15), c)) {
            set->ascii[c / 32] |= 1u << c % 32;
        }
    }
    if (out->set_count == QLORA__PATTERN_SETS) {
        return qlora__pattern_refuse(p, "more than 256 sets");
    }
    void* data = out->sets;
    qlora_result r = qlora__text_reserve(p->env, &data, &out->set_capacity, (size_t)out->set_count,
                                         1, sizeof *out->sets);
    out->sets = (qlora__pattern_set*)data;
    QLORA__TRY(r);
    out->sets[out->set_count] = *set;
    out->set_count++;
    return qlora__pattern_append(p, QLORA__PATTERN_SET, out->set_count - 1, 0);
}

static void qlora__pattern_new_set(qlora__pattern_parser* p) {
    memset(&p->set, 0, sizeof p->set);
}

// [..]; the position is after the bracket.
static qlora_result qlora__pattern_parse_set(qlora__pattern_parser* p) {
    qlora__pattern_new_set(p);
    p->set.negated = qlora__pattern_accept(p, "^");
    for (bool first = true; first || !qlora__pattern_is(p, "]"); first = false) {
        if (p->at == p->size) {
            return qlora__pattern_refuse(p, "a set without a closing ']'");
        }
        QLORA__TRY(qlora__pattern_parse_member(p));
    }
    p->at++;
    return qlora__pattern_add_set(p);
}

// ---- atoms and groups ---------------------------------------------------------------------------

// An anchor after a backslash, if there is one.
static qlora_result qlora__pattern_parse_anchor(qlora__pattern_parser* p, bool* found) {
    static const struct {
        const char* text;
        qlora__pattern_op op;
        int32_t mode;
    } anchors[] = {{"\\b", QLORA__PATTERN_WORD, 0},       {"\\B", QLORA__PATTERN_WORD, 1},
                   {"\\A", QLORA__PATTERN_TEXT_BEGIN, 0}, {"\\z", QLORA__PATTERN_TEXT_END, 0},
                   {"\\Z", QLORA__PATTERN_LAST_LINE, 0},  {"^", QLORA__PATTERN_LINE_BEGIN, 0},
                   {"$", QLORA__PATTERN_LINE_END, 0}};
    for (size_t i = 0; i < QLORA__TEXT_COUNT(anchors); i++) {
        if (qlora__pattern_accept(p, anchors[i].text)) {
            *found = true;
            return qlora__pattern_append(p, anchors[i].op, 0, anchors[i].mode);
        }
    }
    *found = false;
    return QLORA_OK;
}

// A character, a set, a class or an anchor; *width is the number of characters it takes.
static qlora_result qlora__pattern_parse_atom(qlora__pattern_parser* p, int64_t* width) {
    bool anchor = false;
    bool is_class = false;
    uint32_t code = 0;
    QLORA__TRY(qlora__pattern_parse_anchor(p, &anchor));
    *width = anchor ? 0 : 1;
    if (anchor) {
        return QLORA_OK;
    }
    if (qlora__pattern_accept(p, "[")) {
        return qlora__pattern_parse_set(p);
    }
    qlora__pattern_new_set(p);
    if (qlora__pattern_accept(p, ".")) {
        p->set.negated = true;
        QLORA__TRY(qlora__pattern_range(p, '\n', '\n'));
        return qlora__pattern_add_set(p);
    }
    if (p->text[p->at] == '*' || p->text[p->at] == '+' || p->text[p->at] == '?') {
        return qlora__pattern_refuse(p, "a quantifier with nothing before it");
    }
    if (qlora__pattern_is(p, "\\w") || qlora__pattern_is(p, "\\W")) {
        p->set.negated = qlora__pattern_is(p, "\\W");
        p->at += 2;
        qlora__pattern_add(&p->set, QLORA__TEXT_W, 0, false);
        for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__pattern_words); i++) {
            QLORA__TRY(
                qlora__pattern_range(p, qlora__pattern_words[i][0], qlora__pattern_words[i][1]));
        }
        return qlora__pattern_add_set(p);
    }
    if (qlora__pattern_accept(p, "\\")) {
        QLORA__TRY(qlora__pattern_parse_escape(p, &is_class, &code));
    } else {
        QLORA__TRY(qlora__pattern_parse_char(p, &code));
    }
    if (!is_class) {
        QLORA__TRY(qlora__pattern_chars(p, code, code));
    }
    return qlora__pattern_add_set(p);
}

// The start of a group; the position is after the parenthesis.
static qlora_result qlora__pattern_begin(qlora__pattern_parser* p) {
    static const struct {
        const char* text;
        int32_t kind;
        int32_t mode;
        bool any_case;
    } kinds[] = {{"?:", -1, 0, false},
                 {"?i:", -1, 0, true},
                 {"?=", QLORA__PATTERN_LOOK, 0, false},
                 {"?!", QLORA__PATTERN_LOOK, 1, false},
                 {"?>", QLORA__PATTERN_ATOMIC, 0, false}};
    if (p->depth + 1 == QLORA__PATTERN_GROUPS) {
        return qlora__pattern_refuse(p, "groups nested more than 31 deep");
    }
    qlora__pattern_group* g = &p->groups[p->depth + 1];
    memset(g, 0, sizeof *g);
    g->begin = p->out->count;
    g->jumps = -1;
    g->kind = -1;
    g->least = -1;
    g->any_case = p->groups[p->depth].any_case;
    bool known = !qlora__pattern_is(p, "?");
    for (size_t i = 0; !known && i < QLORA__TEXT_COUNT(kinds); i++) {
        if (qlora__pattern_accept(p, kinds[i].text)) {
            known = true;
            g->kind = kinds[i].kind;
            g->any_case = g->any_case || kinds[i].any_case;
            if (g->kind >= 0) {
                QLORA__TRY(qlora__pattern_append(p, (qlora__pattern_op)g->kind, 0, kinds[i].mode));
            }
        }
    }
    if (!known) {
        return qlora__pattern_refuse(p, "a (?..) group other than (?:, (?i:, (?=, (?! and (?>");
    }
    g->branch = p->out->count;
    p->depth++;
    return QLORA_OK;
}

// Ends an alternative: the steps so far become one of two branches.
static qlora_result qlora__pattern_alternative(qlora__pattern_parser* p) {
    qlora__pattern_group* g = &p->groups[p->depth];
    int32_t size = p->out->count - g->branch;
    QLORA__TRY(qlora__pattern_insert(p, g->branch, QLORA__PATTERN_SPLIT, size + 2, 0));
    QLORA__TRY(qlora__pattern_append(p, QLORA__PATTERN_JUMP, g->jumps, 0));
    g->jumps = p->out->count - 1;
    g->branch = p->out->count;
    g->least = g->least < 0 || g->width < g->least ? g->width : g->least;
    g->width = 0;
    return QLORA_OK;
}

// The end of a group; *width is the least number of characters it takes.
static qlora_result qlora__pattern_end(qlora__pattern_parser* p, int64_t* width) {
    qlora__pattern_group* g = &p->groups[p->depth];
    for (int32_t jump = g->jumps; jump >= 0;) {
        int32_t before = p->out->steps[jump].a;
        p->out->steps[jump].a = p->out->count - jump;
        jump = before;
    }
    *width = g->least < 0 || g->width < g->least ? g->width : g->least;
    if (g->kind >= 0) {
        p->out->steps[g->begin].a = p->out->count - g->begin;
        QLORA__TRY(qlora__pattern_append(
            p, g->kind == QLORA__PATTERN_LOOK ? QLORA__PATTERN_LOOK_END : QLORA__PATTERN_ATOMIC_END,
            0, 0));
        *width = g->kind == QLORA__PATTERN_LOOK ? 0 : *width;
    }
    return QLORA_OK;
}

// ---- quantifiers --------------------------------------------------------------------------------

// {n}, {n,}, {n,m} or {,m}; false, without moving, if it is none of them: then it is literal.
static bool qlora__pattern_parse_counts(qlora__pattern_parser* p, int32_t* least, int32_t* most) {
    size_t at = p->at + 1;
    int32_t numbers[2] = {0, 0};
    int digits[2] = {0, 0};
    int which = 0;
    for (; at < p->size && p->text[at] != '}'; at++) {
        char c = p->text[at];
        if (c == ',' && which == 0) {
            which = 1;
        } else if (c >= '0' && c <= '9' && numbers[which] <= QLORA__PATTERN_REPEAT) {
            numbers[which] = numbers[which] * 10 + (c - '0');
            digits[which]++;
        } else {
            return false;
        }
    }
    if (at == p->size || (digits[0] == 0 && digits[1] == 0)) {
        return false;
    }
    *least = numbers[0];
    *most = which == 0 ? numbers[0] : digits[1] > 0 ? numbers[1] : -1;
    p->at = at + 1;
    return true;
}

// Reads a quantifier; *least is -1 if there is none.
static qlora_result qlora__pattern_parse_quantifier(qlora__pattern_parser* p, int32_t* least,
                                                    int32_t* most, int32_t* mode) {
    bool counted = false;
    *least = -1;
    *most = -1;
    *mode = QLORA__PATTERN_GREEDY;
    if (qlora__pattern_accept(p, "*")) {
        *least = 0;
    } else if (qlora__pattern_accept(p, "+")) {
        *least = 1;
    } else if (qlora__pattern_accept(p, "?")) {
        *least = 0;
        *most = 1;
    } else if (qlora__pattern_is(p, "{")) {
        counted = qlora__pattern_parse_counts(p, least, most);
    }
    if (*least < 0) {
        return QLORA_OK;
    }
    if (*least > QLORA__PATTERN_REPEAT || *most > QLORA__PATTERN_REPEAT ||
        (*most >= 0 && *most < *least)) {
        return qlora__pattern_refuse(p, "a repetition that is not within 0 to 1000");
    }
    if (!counted && qlora__pattern_accept(p, "+")) {
        *mode = QLORA__PATTERN_POSSESSIVE;
    } else if (qlora__pattern_accept(p, "?")) {
        *mode = QLORA__PATTERN_RELUCTANT;
    }
    if (qlora__pattern_is(p, "*") || qlora__pattern_is(p, "+") || qlora__pattern_is(p, "?")) {
        return qlora__pattern_refuse(p, "a quantifier after a quantifier");
    }
    return QLORA_OK;
}

static qlora_result qlora__pattern_copy(qlora__pattern_parser* p, int32_t from, int32_t size) {
    int32_t at = p->out->count;
    QLORA__TRY(qlora__pattern_open(p, at, size));
    memcpy(p->out->steps + at, p->out->steps + from, (size_t)size * sizeof *p->out->steps);
    return QLORA_OK;
}

// Repeats the steps from `atom` on: `least` copies, then optional ones.
static qlora_result qlora__pattern_repeat(qlora__pattern_parser* p, int32_t atom, int32_t least,
                                          int32_t most, int32_t mode) {
    int32_t size = p->out->count - atom;
    qlora__pattern_op choice =
        mode == QLORA__PATTERN_RELUCTANT ? QLORA__PATTERN_LAZY : QLORA__PATTERN_SPLIT;
    for (int32_t i = 1; i < least; i++) {
        QLORA__TRY(qlora__pattern_copy(p, atom, size));
    }
    int32_t first = p->out->count; // of the optional part
    if (least == 0) {
        first = atom;
    } else if (most != least) {
        QLORA__TRY(qlora__pattern_copy(p, atom, size));
    }
    if (most < 0) {
        QLORA__TRY(qlora__pattern_insert(p, first, choice, size + 2, 0));
        QLORA__TRY(qlora__pattern_append(p, QLORA__PATTERN_JUMP, -size - 1, 0));
    } else if (most > least) {
        // Each option is followed by the next one: leaving one leaves all.
        int32_t options = most - least;
        for (int32_t i = 1; i < options; i++) {
            QLORA__TRY(qlora__pattern_copy(p, first, size));
        }
        for (int32_t i = options; i > 0; i--) {
            int32_t at = first + (i - 1) * size;
            QLORA__TRY(qlora__pattern_insert(p, at, choice, p->out->count - at + 1, 0));
        }
    } else if (most == 0) {
        p->out->count = atom;
    }
    if (mode == QLORA__PATTERN_POSSESSIVE) {
        size = p->out->count - atom;
        QLORA__TRY(qlora__pattern_insert(p, atom, QLORA__PATTERN_ATOMIC, size + 1, 0));
        return qlora__pattern_append(p, QLORA__PATTERN_ATOMIC_END, 0, 0);
    }
    return QLORA_OK;
}

// Applies the quantifier that follows the steps from `atom` on, and counts their width.
static qlora_result qlora__pattern_quantify(qlora__pattern_parser* p, int32_t atom, int64_t width) {
    int32_t least = 0;
    int32_t most = 0;
    int32_t mode = 0;
    QLORA__TRY(qlora__pattern_parse_quantifier(p, &least, &most, &mode));
    qlora__pattern_group* g = &p->groups[p->depth];
    if (least < 0) {
        g->width += width;
        return QLORA_OK;
    }
    if (width == 0) {
        return qlora__pattern_refuse(p, "a repetition of what may be empty");
    }
    g->width += width * least;
    qlora__pattern_step* step = &p->out->steps[atom];
    if (p->out->count == atom + 1 && step->op == QLORA__PATTERN_SET) {
        step->op = QLORA__PATTERN_RUN;
        step->least = least;
        step->most = most;
        step->mode = mode;
        return QLORA_OK;
    }
    return qlora__pattern_repeat(p, atom, least, most, mode);
}

static qlora_result qlora__pattern_parse(qlora__pattern_parser* p) {
    while (p->at < p->size) {
        int32_t atom = p->out->count;
        int64_t width = 0;
        if (qlora__pattern_accept(p, "(")) {
            QLORA__TRY(qlora__pattern_begin(p));
            continue;
        }
        if (qlora__pattern_accept(p, "|")) {
            QLORA__TRY(qlora__pattern_alternative(p));
            continue;
        }
        if (qlora__pattern_is(p, ")")) {
            if (p->depth == 0) {
                return qlora__pattern_refuse(p, "an unmatched ')'");
            }
            p->at++;
            atom = p->groups[p->depth].begin;
            QLORA__TRY(qlora__pattern_end(p, &width));
            p->depth--;
        } else {
            QLORA__TRY(qlora__pattern_parse_atom(p, &width));
        }
        QLORA__TRY(qlora__pattern_quantify(p, atom, width));
    }
    if (p->depth > 0) {
        return qlora__pattern_refuse(p, "an unmatched '('");
    }
    int64_t width = 0;
    QLORA__TRY(qlora__pattern_end(p, &width));
    return qlora__pattern_append(p, QLORA__PATTERN_MATCH, 0, 0);
}

// Compiles a pattern. `classes` is the table of text/unicode.h.
static qlora_result qlora__pattern_compile(qlora__env* env, const char* text, size_t size,
                                           const uint8_t* classes, qlora__pattern** out) {
    qlora__pattern_parser p;
    memset(&p, 0, sizeof p);
    p.env = env;
    p.classes = classes;
    p.text = text;
    p.size = size;
    p.groups[0].jumps = -1;
    p.groups[0].kind = -1;
    p.groups[0].least = -1;
    p.out = (qlora__pattern*)qlora__text_zalloc(env, 1, sizeof *p.out);
    if (p.out == NULL) {
        return QLORA_ERR_MEMORY;
    }
    qlora_result r = qlora__pattern_parse(&p);
    if (r != QLORA_OK) {
        qlora__pattern_free(env, p.out);
        return r;
    }
    *out = p.out;
    return QLORA_OK;
}

//@@ src/text/pattern_match.h

// ---- matching a compiled pattern ----------------------------------------------------------------

// The machine: a position in the text and in the program, and the choices to come back to.
typedef struct qlora__pattern_run {
    qlora__env* env;
    qlora__pattern* p;
    const qlora__text_view* v;
    size_t begin; // of the text that is searched
    size_t at;
    int32_t step;
    size_t depth; // frames in use
    size_t mark;  // the last mark, or SIZE_MAX
} qlora__pattern_run;

// The length of the character at a position if the set has it, else 0.
static size_t qlora__pattern_one(const qlora__text_view* v, size_t at,
                                 const qlora__pattern_set* set) {
    if (at >= v->end) {
        return 0;
    }
    unsigned char c = v->s[at];
    if (c < 0x80 && v->code_of_byte == NULL) {
        return set->ascii[c / 32] >> c % 32 & 1;
    }
    size_t length = 1;
    uint32_t code = 0;
    unsigned bit = qlora__text_class_at(v, at, &length);
    if (v->code_of_byte != NULL) {
        code = v->code_of_byte[c];
    } else if (qlora__text_utf8(v->s + at, v->end - at, &code) == 0) {
        code = QLORA__TEXT_CODES + c; // an invalid byte is in no range
    }
    return qlora__pattern_has(set, bit, code) ? length : 0;
}

// The start of the character before a position. An invalid byte is a character of its own.
static size_t qlora__pattern_before(const qlora__pattern_run* r, size_t at) {
    size_t back = at - 1;
    uint32_t code;
    while (r->v->code_of_byte == NULL && back > r->begin && at - back < 4 &&
           (r->v->s[back] & 0xC0) == 0x80) {
        back--;
    }
    bool whole = qlora__text_utf8(r->v->s + back, at - back, &code) == at - back;
    return whole ? back : at - 1;
}

static bool qlora__pattern_line_end(const qlora__text_view* v, size_t at) {
    return v->code_of_byte == NULL && v->s[at] == '\n';
}

static bool qlora__pattern_is_word(const qlora__pattern_run* r, size_t at) {
    size_t length;
    uint32_t code = 0;
    if (qlora__text_class_at(r->v, at, &length) & QLORA__TEXT_W) {
        return true;
    }
    return length == 2 && qlora__text_utf8(r->v->s + at, length, &code) == 2 &&
           qlora__pattern_in(qlora__pattern_words, QLORA__TEXT_COUNT(qlora__pattern_words), code);
}

static qlora_result qlora__pattern_push(qlora__pattern_run* r, int32_t kind, int32_t step,
                                        size_t at, size_t begin) {
    void* data = r->p->frames;
    qlora_result result = qlora__text_reserve(r->env, &data, &r->p->frame_capacity, r->depth, 1,
                                              sizeof *r->p->frames);
    r->p->frames = (qlora__pattern_frame*)data;
    QLORA__TRY(result);
    qlora__pattern_frame* f = &r->p->frames[r->depth];
    f->kind = kind;
    f->step = step;
    f->at = at;
    f->begin = begin;
    if (kind >= QLORA__PATTERN_MARK) {
        f->begin = r->mark;
        r->mark = r->depth;
    }
    r->depth++;
    return QLORA_OK;
}

// Goes back to the last choice; false if there is none.
static bool qlora__pattern_back(qlora__pattern_run* r) {
    while (r->depth > 0) {
        qlora__pattern_frame* f = &r->p->frames[r->depth - 1];
        r->step = f->step;
        r->at = f->at;
        if (f->kind == QLORA__PATTERN_SHORTER) {
            r->at = qlora__pattern_before(r, f->at);
            f->at = r->at;
            r->depth -= r->at <= f->begin ? 1 : 0;
            return true;
        }
        if (f->kind == QLORA__PATTERN_LONGER) {
            const qlora__pattern_step* s = &r->p->steps[f->step - 1];
            size_t n = qlora__pattern_one(r->v, f->at, &r->p->sets[s->a]);
            f->begin -= 1; // how many more it may take
            f->at += n;
            r->at = f->at;
            r->depth -= n == 0 || f->begin == 0 ? 1 : 0;
            if (n > 0) {
                return true;
            }
            continue;
        }
        r->depth--;
        if (f->kind == QLORA__PATTERN_CHOICE) {
            return true;
        }
        r->mark = f->begin;
        if (f->kind == QLORA__PATTERN_MARK_NOT) {
            return true; // what must not follow does not: continue after it
        }
    }
    return false;
}

static qlora_result qlora__pattern_take_run(qlora__pattern_run* r, const qlora__pattern_step* s,
                                            bool* fits) {
    const qlora__pattern_set* set = &r->p->sets[s->a];
    int32_t count = 0;
    size_t floor = r->at; // the end of the shortest run
    size_t at = r->at;
    int32_t most = s->mode == QLORA__PATTERN_RELUCTANT ? s->least : s->most;
    while (most < 0 || count < most) {
        size_t n = qlora__pattern_one(r->v, at, set);
        if (n == 0) {
            break;
        }
        at += n;
        count++;
        floor = count <= s->least ? at : floor;
        r->p->left -= r->p->left > 0 ? 1 : 0;
    }
    *fits = count >= s->least;
    r->at = at;
    r->step++;
    if (!*fits || s->mode == QLORA__PATTERN_POSSESSIVE) {
        return QLORA_OK;
    }
    if (s->mode == QLORA__PATTERN_RELUCTANT) {
        size_t more = s->most < 0 ? SIZE_MAX : (size_t)(s->most - s->least);
        return more > 0 ? qlora__pattern_push(r, QLORA__PATTERN_LONGER, r->step, at, more)
                        : QLORA_OK;
    }
    return at > floor ? qlora__pattern_push(r, QLORA__PATTERN_SHORTER, r->step, at, floor)
                      : QLORA_OK;
}

// Whether an anchor holds at the present position.
static bool qlora__pattern_holds(const qlora__pattern_run* r, const qlora__pattern_step* s) {
    const qlora__text_view* v = r->v;
    bool first = r->at == r->begin;
    bool last = r->at >= v->end;
    switch (s->op) {
    case QLORA__PATTERN_LINE_BEGIN:
        return first || qlora__pattern_line_end(v, r->at - 1);
    case QLORA__PATTERN_LINE_END:
        return last || qlora__pattern_line_end(v, r->at);
    case QLORA__PATTERN_TEXT_BEGIN:
        return first;
    case QLORA__PATTERN_TEXT_END:
        return last;
    case QLORA__PATTERN_LAST_LINE:
        return last || (r->at + 1 == v->end && qlora__pattern_line_end(v, r->at));
    default: { // WORD
        bool before = !first && qlora__pattern_is_word(r, qlora__pattern_before(r, r->at));
        bool after = !last && qlora__pattern_is_word(r, r->at);
        return (before != after) != (s->mode != 0);
    }
    }
}

// The end of a look-ahead or an atomic group: forgets the choices made inside.
static void qlora__pattern_forget(qlora__pattern_run* r) {
    r->depth = r->mark;
    r->mark = r->p->frames[r->depth].begin;
}

// Executes one step; *fits is false if it fails.
static qlora_result qlora__pattern_execute(qlora__pattern_run* r, bool* fits) {
    const qlora__pattern_step* s = &r->p->steps[r->step];
    size_t n = 0;
    *fits = true;
    switch (s->op) {
    case QLORA__PATTERN_SET:
        n = qlora__pattern_one(r->v, r->at, &r->p->sets[s->a]);
        r->at += n;
        r->step++;
        *fits = n > 0;
        return QLORA_OK;
    case QLORA__PATTERN_RUN:
        return qlora__pattern_take_run(r, s, fits);
    case QLORA__PATTERN_SPLIT:
        r->step++;
        return qlora__pattern_push(r, QLORA__PATTERN_CHOICE, r->step - 1 + s->a, r->at, 0);
    case QLORA__PATTERN_LAZY:
        r->step += s->a;
        return qlora__pattern_push(r, QLORA__PATTERN_CHOICE, r->step - s->a + 1, r->at, 0);
    case QLORA__PATTERN_JUMP:
        r->step += s->a;
        return QLORA_OK;
    case QLORA__PATTERN_LOOK:
        r->step++;
        return qlora__pattern_push(r, s->mode != 0 ? QLORA__PATTERN_MARK_NOT : QLORA__PATTERN_MARK,
                                   r->step + s->a, r->at, 0);
    case QLORA__PATTERN_ATOMIC:
        r->step++;
        return qlora__pattern_push(r, QLORA__PATTERN_MARK, r->step, r->at, 0);
    case QLORA__PATTERN_LOOK_END:
        qlora__pattern_forget(r);
        *fits = r->p->frames[r->depth].kind == QLORA__PATTERN_MARK; // else it must not follow
        r->at = r->p->frames[r->depth].at;
        r->step++;
        return QLORA_OK;
    case QLORA__PATTERN_ATOMIC_END:
        qlora__pattern_forget(r);
        r->step++;
        return QLORA_OK;
    default:
        *fits = qlora__pattern_holds(r, s);
        r->step++;
        return QLORA_OK;
    }
}

// Allows as many steps as matching a text of this size may take. The patterns of tokenizers need a
// few per character; the limit is far above that.
static void qlora__pattern_allow(qlora__pattern* p, size_t size) {
    p->left = 1000000 + 256 * (uint64_t)size;
}

// The end of the match at a position; the position itself if there is none, or an empty one. The
// text that is searched begins at `begin`.
static qlora_result qlora__pattern_match(qlora__env* env, qlora__pattern* p,
                                         const qlora__text_view* v, size_t begin, size_t at,
                                         size_t* end) {
    qlora__pattern_run r;
    memset(&r, 0, sizeof r);
    r.env = env;
    r.p = p;
    r.v = v;
    r.begin = begin;
    r.at = at;
    r.mark = SIZE_MAX;
    *end = at;
    while (p->steps[r.step].op != QLORA__PATTERN_MATCH) {
        bool fits = true;
        QLORA__TRY(qlora__pattern_execute(&r, &fits));
        if (!fits && !qlora__pattern_back(&r)) {
            return QLORA_OK;
        }
        if (p->left == 0) {
            return qlora__env_fail(env, QLORA_ERR_LIMIT,
                                   "a regular expression of the tokenizer takes too many steps on "
                                   "this text");
        }
        p->left--;
    }
    *end = r.at;
    return QLORA_OK;
}

//@@ src/text/split.h

static bool qlora__text_is(const qlora__text_view* v, size_t at, char c) {
    return at < v->end && v->s[at] == (unsigned char)c;
}

static bool qlora__text_is_newline(const qlora__text_view* v, size_t at) {
    return qlora__text_is(v, at, '\n') || qlora__text_is(v, at, '\r');
}

// Options of the matchers.
enum {
    QLORA__TEXT_O_ANY_CASE = 1,   // contractions in any case
    QLORA__TEXT_O_ASCII_CASE = 2, // ASCII letters only
    QLORA__TEXT_O_DIGITS_1 = 4,
    QLORA__TEXT_O_DIGITS_3 = 8,
    QLORA__TEXT_O_MARKS = 16,       // marks count as letters
    QLORA__TEXT_O_CONTRACTED = 32,  // contractions belong to the preceding word
    QLORA__TEXT_O_WORD_PATTERN = 64 // \w+ and [^\w\s]+
};

// 's 't 're 've 'm 'll 'd: the length of the match, or 0.
static size_t qlora__text_contraction(const qlora__text_view* v, size_t at, unsigned option) {
    if (!qlora__text_is(v, at, '\'') || at + 1 >= v->end) {
        return 0;
    }
    unsigned fold = option & (QLORA__TEXT_O_ANY_CASE | QLORA__TEXT_O_ASCII_CASE) ? 0x20u : 0u;
    unsigned a = v->s[at + 1] | (v->s[at + 1] >= 'A' && v->s[at + 1] <= 'Z' ? fold : 0u);
    if (a == 's' || a == 't' || a == 'm' || a == 'd') {
        return 2;
    }
    if (at + 2 >= v->end) {
        return 0;
    }
    unsigned char next = v->s[at + 2];
    unsigned b = next | (next >= 'A' && next <= 'Z' ? fold : 0u);
    if (((a == 'r' || a == 'v') && b == 'e') || (a == 'l' && b == 'l')) {
        return 3;
    }
    // U+017F, the long s, equals s when case is ignored
    return (option & QLORA__TEXT_O_ANY_CASE) && a == 0xC5 && next == 0xBF ? 3 : 0;
}

// \s+(?!\S)|\s+ : white space, without its last character if other text follows.
static size_t qlora__text_match_space(const qlora__text_view* v, size_t at) {
    size_t length;
    size_t end = at;
    size_t last = at;
    while (qlora__text_class_at(v, end, &length) & QLORA__TEXT_WS) {
        last = end;
        end += length;
    }
    return end < v->end && last > at ? last : end;
}

// \s*[\r\n]+ : white space through its last line end; `at` when there is none.
static size_t qlora__text_match_lines(const qlora__text_view* v, size_t at) {
    size_t length;
    size_t found = at;
    while (qlora__text_class_at(v, at, &length) & QLORA__TEXT_WS) {
        if (qlora__text_is_newline(v, at)) {
            found = at + 1;
        }
        at += length;
    }
    return found;
}

static size_t qlora__text_match_gpt2(const qlora__text_view* v, size_t at, unsigned option) {
    size_t length = qlora__text_contraction(v, at, option);
    if (length > 0) {
        return at + length;
    }
    static const unsigned masks[] = {QLORA__TEXT_L, QLORA__TEXT_N,
                                     ~(QLORA__TEXT_L | QLORA__TEXT_N | QLORA__TEXT_WS)};
    size_t begin = qlora__text_is(v, at, ' ') ? at + 1 : at;
    unsigned bit = qlora__text_class_at(v, begin, &length);
    for (size_t i = 0; i < QLORA__TEXT_COUNT(masks); i++) {
        if (bit & masks[i]) {
            return qlora__text_run(v, begin, masks[i]);
        }
    }
    return qlora__text_match_space(v, at);
}

static size_t qlora__text_match_digits(const qlora__text_view* v, size_t at, unsigned option) {
    size_t limit = option & QLORA__TEXT_O_DIGITS_1   ? 1
                   : option & QLORA__TEXT_O_DIGITS_3 ? 3
                                                     : SIZE_MAX;
    size_t length;
    for (size_t i = 0; i < limit && (qlora__text_class_at(v, at, &length) & QLORA__TEXT_N); i++) {
        at += length;
    }
    return at;
}

// ' ?[^\s\p{L}\p{N}]+[\r\n]*' and the white space that ends all these patterns.
static size_t qlora__text_match_rest(const qlora__text_view* v, size_t at, unsigned others,
                                     const char* tail) {
    size_t length;
    size_t begin = qlora__text_is(v, at, ' ') ? at + 1 : at;
    if (qlora__text_class_at(v, begin, &length) & others) {
        size_t end = qlora__text_run(v, begin, others);
        while (end < v->end && v->s[end] != 0 && strchr(tail, v->s[end]) != NULL) {
            end++;
        }
        return end;
    }
    size_t lines = qlora__text_match_lines(v, at);
    return lines > at ? lines : qlora__text_match_space(v, at);
}

// cl100k and its descendants (Llama 3, Qwen2, ...).
static size_t qlora__text_match_cl100k(const qlora__text_view* v, size_t at, unsigned option) {
    size_t length = qlora__text_contraction(v, at, option);
    if (length > 0) {
        return at + length;
    }
    unsigned letters = QLORA__TEXT_L | (option & QLORA__TEXT_O_MARKS ? QLORA__TEXT_M : 0u);
    unsigned bit = qlora__text_class_at(v, at, &length);
    if (!(bit & (QLORA__TEXT_L | QLORA__TEXT_N)) && !qlora__text_is_newline(v, at)) {
        size_t unused;
        if (qlora__text_class_at(v, at + length, &unused) & letters) {
            return qlora__text_run(v, at + length, letters);
        }
    }
    if (bit & letters) {
        return qlora__text_run(v, at, letters);
    }
    if (bit & QLORA__TEXT_N) {
        return qlora__text_match_digits(v, at, option);
    }
    return qlora__text_match_rest(v, at, ~(QLORA__TEXT_WS | QLORA__TEXT_N | letters), "\r\n");
}

// [Lu Lt Lm Lo M]*[Ll Lm Lo M]+ (capitalised) or [Lu Lt Lm Lo M]+[Ll Lm Lo M]*; `at` if no match.
static size_t qlora__text_match_cased(const qlora__text_view* v, size_t at, bool capitalised) {
    const unsigned upper = QLORA__TEXT_BIT(UPPER) | QLORA__TEXT_BIT(LETTER) | QLORA__TEXT_M;
    const unsigned lower = QLORA__TEXT_BIT(LOWER) | QLORA__TEXT_BIT(LETTER) | QLORA__TEXT_M;
    size_t length;
    size_t end = at;
    size_t back = at; // after the last character of the first run that is also of the second kind
    unsigned bit;
    while ((bit = qlora__text_class_at(v, end, &length)) & upper) {
        end += length;
        if (bit & lower) {
            back = end;
        }
    }
    if (bit & lower) {
        return capitalised || end > at ? qlora__text_run(v, end, lower) : at;
    }
    return capitalised ? back : end;
}

// o200k and its descendants (GPT-4o, Llama 4, Mistral's Tekken).
static size_t qlora__text_match_o200k(const qlora__text_view* v, size_t at, unsigned option) {
    size_t length;
    unsigned bit = qlora__text_class_at(v, at, &length);
    bool prefix = !(bit & (QLORA__TEXT_L | QLORA__TEXT_N)) && !qlora__text_is_newline(v, at);
    for (int i = 0; i < 4; i++) {
        if (i % 2 == 0 && !prefix) {
            continue;
        }
        size_t begin = i % 2 == 0 ? at + length : at;
        size_t end = qlora__text_match_cased(v, begin, i < 2);
        if (end > begin) {
            return end + (option & QLORA__TEXT_O_CONTRACTED
                              ? qlora__text_contraction(v, end, option)
                              : 0);
        }
    }
    if (bit & QLORA__TEXT_N) {
        return qlora__text_match_digits(v, at, option);
    }
    return qlora__text_match_rest(v, at, ~(QLORA__TEXT_WS | QLORA__TEXT_N | QLORA__TEXT_L),
                                  "\r\n/");
}

static bool qlora__text_is_ascii(const qlora__text_view* v, size_t at, bool letter) {
    if (at >= v->end) {
        return false;
    }
    unsigned char c = v->s[at];
    bool is_letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    bool is_digit = c >= '0' && c <= '9';
    return letter ? is_letter : c > 0x20 && c < 0x7F && !is_letter && !is_digit;
}

// The words of DeepSeek-V3; numbers are not matched.
static size_t qlora__text_match_deepseek3(const qlora__text_view* v, size_t at, unsigned option) {
    (void)option;
    if (qlora__text_is_ascii(v, at, false) && qlora__text_is_ascii(v, at + 1, true)) {
        size_t end = at + 1;
        while (qlora__text_is_ascii(v, end, true)) {
            end++;
        }
        return end;
    }
    size_t length;
    size_t unused;
    unsigned bit = qlora__text_class_at(v, at, &length);
    if (!(bit & (QLORA__TEXT_L | QLORA__TEXT_P | QLORA__TEXT_S)) &&
        !qlora__text_is_newline(v, at) &&
        (qlora__text_class_at(v, at + length, &unused) & (QLORA__TEXT_L | QLORA__TEXT_M))) {
        return qlora__text_run(v, at + length, QLORA__TEXT_L | QLORA__TEXT_M);
    }
    if (bit & (QLORA__TEXT_L | QLORA__TEXT_M)) {
        return qlora__text_run(v, at, QLORA__TEXT_L | QLORA__TEXT_M);
    }
    return qlora__text_match_rest(v, at, QLORA__TEXT_P | QLORA__TEXT_S, "\r\n");
}

// [U+4E00-U+9FA5 U+3040-U+309F U+30A0-U+30FF]+ , also of DeepSeek-V3.
static size_t qlora__text_match_chinese(const qlora__text_view* v, size_t at, unsigned option) {
    (void)option;
    while (at < v->end && v->s[at] >= 0xE3) {
        uint32_t code;
        size_t length = qlora__text_utf8(v->s + at, v->end - at, &code);
        if (length == 0 ||
            !((code >= 0x4E00 && code <= 0x9FA5) || (code >= 0x3040 && code <= 0x30FF))) {
            break;
        }
        at += length;
    }
    return at;
}

// [0-9][0-9][0-9]
static size_t qlora__text_match_ascii3(const qlora__text_view* v, size_t at, unsigned option) {
    (void)option;
    for (size_t i = 0; i < 3; i++) {
        if (at + i >= v->end || v->s[at + i] < '0' || v->s[at + i] > '9') {
            return at;
        }
    }
    return at + 3;
}

// \w+|[^\w\s]+
static size_t qlora__text_match_words(const qlora__text_view* v, size_t at, unsigned option) {
    (void)option;
    size_t end = qlora__text_run(v, at, QLORA__TEXT_W);
    return end > at ? end : qlora__text_run(v, at, ~(QLORA__TEXT_W | QLORA__TEXT_WS));
}

// The end of the match at a position; the position itself when there is none.
typedef size_t qlora__text_match_fn(const qlora__text_view* v, size_t at, unsigned option);

typedef struct qlora__text_pattern {
    const char* regex;
    qlora__text_match_fn* match;
    unsigned option;
} qlora__text_pattern;

#define QLORA__TEXT_R_ANY "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define QLORA__TEXT_R_ANY2 "'(?i:[sdmt]|ll|ve|re)"
#define QLORA__TEXT_R_ASCII "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
#define QLORA__TEXT_R_WORD "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
#define QLORA__TEXT_R_WORD2 "|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|"
#define QLORA__TEXT_R_LINES "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define QLORA__TEXT_R_LINES2 "|\\s*[\\r\\n]|\\s+(?!\\S)|\\s+"
#define QLORA__TEXT_R_REST "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*" QLORA__TEXT_R_LINES
#define QLORA__TEXT_R_REST2 "| ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*" QLORA__TEXT_R_LINES2
#define QLORA__TEXT_R_GPT2 "| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
#define QLORA__TEXT_R_UP "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define QLORA__TEXT_R_LOW "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define QLORA__TEXT_R_PRE "[^\\r\\n\\p{L}\\p{N}]?"
#define QLORA__TEXT_R_CASED(tail)                                                                  \
    QLORA__TEXT_R_PRE QLORA__TEXT_R_UP "*" QLORA__TEXT_R_LOW "+" tail                              \
                                       "|" QLORA__TEXT_R_PRE QLORA__TEXT_R_UP                      \
                                       "+" QLORA__TEXT_R_LOW "*" tail "|"
#define QLORA__TEXT_R_REST3 "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*" QLORA__TEXT_R_LINES
#define QLORA__TEXT_R_DEEPSEEK3                                                                    \
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?"           \
    "[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*" QLORA__TEXT_R_LINES
#define QLORA__TEXT_R_MARKS                                                                        \
    "|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}| "                                              \
    "?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*" QLORA__TEXT_R_LINES

static const qlora__text_pattern qlora__text_patterns[] = {
    // GPT-2, also the pattern of the ByteLevel step; must be first
    {"'s|'t|'re|'ve|'m|'ll|'d" QLORA__TEXT_R_GPT2, qlora__text_match_gpt2, 0},
    {"'(?:[sdmt]|ll|ve|re)" QLORA__TEXT_R_GPT2, qlora__text_match_gpt2, 0},
    // Llama-3, GLM-4, Phi-4, OLMo-2, ...
    {QLORA__TEXT_R_ANY QLORA__TEXT_R_WORD "\\p{N}{1,3}" QLORA__TEXT_R_REST,
     qlora__text_match_cl100k, QLORA__TEXT_O_ANY_CASE | QLORA__TEXT_O_DIGITS_3},
    {QLORA__TEXT_R_ANY2 QLORA__TEXT_R_WORD "\\p{N}{1,3}" QLORA__TEXT_R_REST,
     qlora__text_match_cl100k, QLORA__TEXT_O_ANY_CASE | QLORA__TEXT_O_DIGITS_3},
    {QLORA__TEXT_R_ANY2 QLORA__TEXT_R_WORD2 "\\p{N}{1,3}" QLORA__TEXT_R_REST2,
     qlora__text_match_cl100k, QLORA__TEXT_O_ANY_CASE | QLORA__TEXT_O_DIGITS_3},
    {QLORA__TEXT_R_ASCII QLORA__TEXT_R_WORD "\\p{N}{1,3}" QLORA__TEXT_R_REST,
     qlora__text_match_cl100k, QLORA__TEXT_O_ASCII_CASE | QLORA__TEXT_O_DIGITS_3},
    {QLORA__TEXT_R_ANY2 QLORA__TEXT_R_WORD2 "\\p{N}" QLORA__TEXT_R_REST2, qlora__text_match_cl100k,
     QLORA__TEXT_O_ANY_CASE | QLORA__TEXT_O_DIGITS_1},
    // Qwen2, Qwen2.5, Qwen3
    {QLORA__TEXT_R_ANY QLORA__TEXT_R_WORD "\\p{N}" QLORA__TEXT_R_REST, qlora__text_match_cl100k,
     QLORA__TEXT_O_ANY_CASE | QLORA__TEXT_O_DIGITS_1},
    {QLORA__TEXT_R_ASCII QLORA__TEXT_R_WORD "\\p{N}" QLORA__TEXT_R_REST, qlora__text_match_cl100k,
     QLORA__TEXT_O_ASCII_CASE | QLORA__TEXT_O_DIGITS_1},
    // Qwen3.5
    {QLORA__TEXT_R_ANY QLORA__TEXT_R_MARKS, qlora__text_match_cl100k,
     QLORA__TEXT_O_ANY_CASE | QLORA__TEXT_O_DIGITS_1 | QLORA__TEXT_O_MARKS},
    // GPT-4o, Llama-4, gpt-oss
    {QLORA__TEXT_R_CASED(QLORA__TEXT_R_ANY "?") "\\p{N}{1,3}" QLORA__TEXT_R_REST3,
     qlora__text_match_o200k,
     QLORA__TEXT_O_ANY_CASE | QLORA__TEXT_O_CONTRACTED | QLORA__TEXT_O_DIGITS_3},
    // Tekken
    {QLORA__TEXT_R_CASED("") "\\p{N}" QLORA__TEXT_R_REST3, qlora__text_match_o200k,
     QLORA__TEXT_O_DIGITS_1},
    {QLORA__TEXT_R_CASED("") "\\p{N}{1,3}" QLORA__TEXT_R_REST3, qlora__text_match_o200k,
     QLORA__TEXT_O_DIGITS_3},
    // DeepSeek-V3, in three steps
    {"\\p{N}{1,3}", qlora__text_match_digits, QLORA__TEXT_O_DIGITS_3},
    {"\\p{N}", qlora__text_match_digits, QLORA__TEXT_O_DIGITS_1},
    {"\\p{N}+", qlora__text_match_digits, 0},
    {"[\xE4\xB8\x80-\xE9\xBE\xA5\xE3\x81\x80-\xE3\x82\x9F\xE3\x82\xA0-\xE3\x83\xBF]+",
     qlora__text_match_chinese, 0},
    {QLORA__TEXT_R_DEEPSEEK3, qlora__text_match_deepseek3, 0},
    {"[0-9][0-9][0-9]", qlora__text_match_ascii3, 0}, // Falcon
    // The Whitespace step: \w+|[^\w\s]+ in another engine, whose \w differs.
    {"Whitespace", qlora__text_match_words, 0}};

static const qlora__text_pattern* qlora__text_pattern_find(const char* regex) {
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__text_patterns); i++) {
        if (strcmp(qlora__text_patterns[i].regex, regex) == 0) {
            return &qlora__text_patterns[i];
        }
    }
    return NULL;
}

// What happens to the matches.
enum {
    QLORA__TEXT_B_ISOLATED,
    QLORA__TEXT_B_REMOVED,
    QLORA__TEXT_B_PREVIOUS,
    QLORA__TEXT_B_NEXT,
    QLORA__TEXT_B_CONTIGUOUS
};

typedef struct qlora__text_piece {
    size_t begin;
    size_t end;
    bool match; // used while splitting
} qlora__text_piece;

typedef struct qlora__text_pieces {
    qlora__text_piece* data;
    size_t count;
    size_t capacity;
} qlora__text_pieces;

static qlora_result qlora__text_pieces_add(qlora__env* env, qlora__text_pieces* pieces,
                                           size_t begin, size_t end, bool match) {
    void* data = pieces->data;
    qlora_result r = qlora__text_reserve(env, &data, &pieces->capacity, pieces->count, 1,
                                         sizeof(qlora__text_piece));
    pieces->data = (qlora__text_piece*)data;
    QLORA__TRY(r);
    qlora__text_piece* piece = &pieces->data[pieces->count++];
    piece->begin = begin;
    piece->end = end;
    piece->match = match;
    return QLORA_OK;
}

// One step of a normalizer, pre-tokenizer or decoder.
enum {
    QLORA__TEXT_N_NFC,
    QLORA__TEXT_N_NFD,
    QLORA__TEXT_N_PREPEND,
    QLORA__TEXT_N_REPLACE,
    QLORA__TEXT_N_STRIP,
    QLORA__TEXT_P_REGEX,
    QLORA__TEXT_P_STRING,
    QLORA__TEXT_P_CLASS,
    QLORA__TEXT_P_PUNCTUATION,
    QLORA__TEXT_P_PREFIX_SPACE,
    QLORA__TEXT_P_BYTES,
    QLORA__TEXT_P_METASPACE,
    QLORA__TEXT_D_REPLACE,
    QLORA__TEXT_D_BYTE_FALLBACK,
    QLORA__TEXT_D_FUSE,
    QLORA__TEXT_D_STRIP,
    QLORA__TEXT_D_BYTES,
    QLORA__TEXT_D_METASPACE,
    QLORA__TEXT_D_JOIN
};

typedef struct qlora__text_step {
    int kind;
    const qlora__text_pattern* pattern; // P_REGEX: a known pattern,
    qlora__pattern* program;            // or, owned, any other one
    unsigned mask;                      // classes of P_CLASS
    int behavior;
    bool invert;
    bool always; // Metaspace: before every piece, not only the first
    bool never;
    char* a; // owned: what is replaced, prepended, stripped, ...
    size_t a_size;
    char* b;
    size_t b_size;
    size_t start; // how many copies are stripped
    size_t stop;
} qlora__text_step;

enum { QLORA__TEXT_STEPS = 16 };

typedef struct qlora__text_steps {
    qlora__text_step data[QLORA__TEXT_STEPS];
    size_t count;
} qlora__text_steps;

// The end of a match of the step at a position, or the position. Not for programs.
static size_t qlora__text_step_match(const qlora__text_step* step, const qlora__text_view* v,
                                     size_t at) {
    size_t length;
    if (step->kind == QLORA__TEXT_P_REGEX) {
        return step->pattern->match(v, at, step->pattern->option);
    }
    if (step->kind == QLORA__TEXT_P_STRING) {
        bool same = v->end - at >= step->a_size && memcmp(v->s + at, step->a, step->a_size) == 0;
        return same ? at + step->a_size : at;
    }
    unsigned bit = qlora__text_class_at(v, at, &length);
    if (step->kind == QLORA__TEXT_P_PUNCTUATION) {
        bool ascii_symbol = length == 1 && v->s[at] < 0x80 && (bit & QLORA__TEXT_S);
        return (bit & QLORA__TEXT_P_STEP) || ascii_symbol ? at + length : at;
    }
    return bit & step->mask ? at + length : at;
}

// The same for a step of any kind; the text that is searched begins at `begin`.
static qlora_result qlora__text_step_end(qlora__env* env, const qlora__text_step* step,
                                         const qlora__text_view* v, size_t begin, size_t at,
                                         size_t* end) {
    if (step->program != NULL) {
        return qlora__pattern_match(env, step->program, v, begin, at, end);
    }
    *end = qlora__text_step_match(step, v, at);
    return QLORA_OK;
}

// Matches and the text between them, in order: together, the text from *begin to the end of the
// first match at or after `stop`, or to the end of the piece. *begin moves there. The whole piece,
// which a pattern may look back into, begins at `first`.
static qlora_result qlora__text_step_find(qlora__env* env, const qlora__text_step* step,
                                          const qlora__text_view* v, size_t first, size_t* begin,
                                          size_t stop, qlora__text_pieces* out) {
    size_t at = *begin;
    size_t gap = *begin;
    if (step->program != NULL) {
        qlora__pattern_allow(step->program, v->end - at);
    }
    while (at < v->end && (at < stop || at > gap)) {
        size_t end = at;
        QLORA__TRY(qlora__text_step_end(env, step, v, first, at, &end));
        if (end > at) {
            if (at > gap) {
                QLORA__TRY(qlora__text_pieces_add(env, out, gap, at, step->invert));
            }
            QLORA__TRY(qlora__text_pieces_add(env, out, at, end, !step->invert));
            at = end;
            gap = end;
        } else {
            size_t length;
            (void)qlora__text_class_at(v, at, &length);
            at += length;
        }
    }
    *begin = at;
    return at == gap ? QLORA_OK : qlora__text_pieces_add(env, out, gap, at, step->invert);
}

// Applies the behavior to found[0..) and appends what remains.
static qlora_result qlora__text_step_merge(qlora__env* env, int behavior,
                                           const qlora__text_pieces* found,
                                           qlora__text_pieces* out) {
    size_t fence = out->count; // pieces before this one belong to an earlier piece
    bool before = false;
    for (size_t i = 0; i < found->count; i++) {
        qlora__text_piece piece = found->data[i];
        bool join = false;
        if (behavior == QLORA__TEXT_B_REMOVED && piece.match) {
            continue;
        }
        if (behavior == QLORA__TEXT_B_PREVIOUS) {
            join = piece.match && !before;
        } else if (behavior == QLORA__TEXT_B_CONTIGUOUS) {
            join = piece.match == before;
        } else if (behavior == QLORA__TEXT_B_NEXT) {
            // a match joins the piece after it, unless that is also a match
            join = i > 0 && found->data[i - 1].match && !piece.match;
        }
        before = piece.match;
        if (join && out->count > fence) {
            out->data[out->count - 1].end = piece.end;
        } else {
            QLORA__TRY(qlora__text_pieces_add(env, out, piece.begin, piece.end, false));
        }
    }
    return QLORA_OK;
}

//@@ src/text/bpe.h

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

// A trie of added tokens: (node, byte) -> (next node, 1 + index of the token that ends there).
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
    qlora__text_pairs merges;  // (left, right) -> (rank, joined)
    int32_t byte_ids[256];     // one-byte words
    int32_t fallback_ids[256]; // <0x00> ..
    int32_t unknown;
    bool byte_level; // words are bytes, not the file's printable stand-ins
    bool byte_fallback;
    bool fuse_unknown;
    bool ignore_merges;
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
    qlora_text_bytes buffers[4];
    qlora__text_pieces pieces[3];
    qlora__text_marks marks;
    qlora__text_symbol* symbols;
    size_t symbol_capacity;
    qlora__text_job* jobs;
    size_t job_count;
    size_t job_capacity;
};

enum {
    QLORA__TEXT_K_EXISTS = 1,
    QLORA__TEXT_K_SPECIAL = 2,
    QLORA__TEXT_K_ADDED = 4,
    QLORA__TEXT_K_BYTE = 8
};

static bool qlora__text_job_before(const qlora__text_job* a, const qlora__text_job* b) {
    return a->rank < b->rank || (a->rank == b->rank && a->at < b->at);
}

static qlora_result qlora__text_jobs_push(qlora__env* env, qlora_text_tok* tok,
                                          qlora__text_job job) {
    void* data = tok->jobs;
    qlora_result r = qlora__text_reserve(env, &data, &tok->job_capacity, tok->job_count, 1,
                                         sizeof(qlora__text_job));
    tok->jobs = (qlora__text_job*)data;
    QLORA__TRY(r);
    size_t i = tok->job_count++;
    while (i > 0 && qlora__text_job_before(&job, &tok->jobs[(i - 1) / 2])) {
        tok->jobs[i] = tok->jobs[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    tok->jobs[i] = job;
    return QLORA_OK;
}

static qlora__text_job qlora__text_jobs_pop(qlora_text_tok* tok) {
    qlora__text_job top = tok->jobs[0];
    qlora__text_job last = tok->jobs[--tok->job_count];
    size_t i = 0;
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= tok->job_count) {
            break;
        }
        if (child + 1 < tok->job_count &&
            qlora__text_job_before(&tok->jobs[child + 1], &tok->jobs[child])) {
            child++;
        }
        if (!qlora__text_job_before(&tok->jobs[child], &last)) {
            break;
        }
        tok->jobs[i] = tok->jobs[child];
        i = child;
    }
    tok->jobs[i] = last;
    return top;
}

// Puts the merge of the symbols at a and b on the heap, if there is one.
static qlora_result qlora__text_jobs_try(qlora__env* env, qlora_text_tok* tok, uint32_t a,
                                         uint32_t b) {
    const qlora__text_pair* pair = qlora__text_pairs_find(
        &tok->merges, (uint32_t)tok->symbols[a].id, (uint32_t)tok->symbols[b].id);
    if (pair == NULL) {
        return QLORA_OK;
    }
    qlora__text_job job;
    job.rank = pair->first;
    job.at = a;
    job.id = pair->second;
    return qlora__text_jobs_push(env, tok, job);
}

// Joins pairs, lowest rank first, the leftmost among equals, in n log n steps.
static qlora_result qlora__text_merge_many(qlora__env* env, qlora_text_tok* tok, size_t count) {
    const uint32_t none = UINT32_MAX;
    qlora__text_symbol* s = tok->symbols;
    tok->job_count = 0;
    for (size_t i = 0; i < count; i++) {
        s[i].previous = i > 0 ? (uint32_t)i - 1 : none;
        s[i].next = i + 1 < count ? (uint32_t)i + 1 : none;
        if (i > 0) {
            QLORA__TRY(qlora__text_jobs_try(env, tok, (uint32_t)i - 1, (uint32_t)i));
        }
    }
    while (tok->job_count > 0) {
        qlora__text_job job = qlora__text_jobs_pop(tok);
        uint32_t a = job.at;
        uint32_t b = s[a].next;
        if (s[a].id < 0 || b == none) {
            continue;
        }
        // the pair is gone if these two now join to something else
        const qlora__text_pair* pair =
            qlora__text_pairs_find(&tok->merges, (uint32_t)s[a].id, (uint32_t)s[b].id);
        if (pair == NULL || pair->second != job.id) {
            continue;
        }
        s[a].id = (int32_t)job.id;
        s[a].next = s[b].next;
        s[b].id = -1;
        if (s[a].next != none) {
            s[s[a].next].previous = a;
            QLORA__TRY(qlora__text_jobs_try(env, tok, a, s[a].next));
        }
        if (s[a].previous != none) {
            QLORA__TRY(qlora__text_jobs_try(env, tok, s[a].previous, a));
        }
    }
    return QLORA_OK;
}

// The same for few symbols: looks at all pairs each time. Symbols stay packed; returns their count.
enum { QLORA__TEXT_FEW = 24 };

static size_t qlora__text_merge_few(qlora_text_tok* tok, size_t count) {
    uint32_t ranks[QLORA__TEXT_FEW];
    uint32_t joined[QLORA__TEXT_FEW];
    qlora__text_symbol* s = tok->symbols;
    for (size_t i = 0; i + 1 < count; i++) {
        const qlora__text_pair* pair =
            qlora__text_pairs_find(&tok->merges, (uint32_t)s[i].id, (uint32_t)s[i + 1].id);
        ranks[i] = pair != NULL ? pair->first : UINT32_MAX;
        joined[i] = pair != NULL ? pair->second : 0;
    }
    while (count > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < count; i++) {
            if (ranks[i] < ranks[best]) {
                best = i;
            }
        }
        if (ranks[best] == UINT32_MAX) {
            break;
        }
        s[best].id = (int32_t)joined[best];
        count--;
        for (size_t i = best + 1; i < count; i++) {
            s[i].id = s[i + 1].id;
            ranks[i - 1] = ranks[i];
            joined[i - 1] = joined[i];
        }
        for (size_t i = best > 0 ? best - 1 : 0; i <= best && i + 1 < count; i++) {
            const qlora__text_pair* pair =
                qlora__text_pairs_find(&tok->merges, (uint32_t)s[i].id, (uint32_t)s[i + 1].id);
            ranks[i] = pair != NULL ? pair->first : UINT32_MAX;
            joined[i] = pair != NULL ? pair->second : 0;
        }
    }
    return count;
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

// Characters to symbols. A character without an id is spelt in bytes, else becomes unknown, else is
// dropped, as far as the file allows. Unknown ones wait for the next known one, because the file
// may fuse neighbours into one. Returns the number of symbols; there is room for `size`.
static size_t qlora__text_symbols_make(qlora_text_tok* tok, const char* word, size_t size) {
    size_t count = 0;
    bool waiting = false;
    for (size_t at = 0; at < size;) {
        size_t length = qlora__text_symbol_size(tok, word + at, size - at);
        int32_t id = length == 1 ? tok->byte_ids[(unsigned char)word[at]]
                                 : qlora__text_words_find(&tok->words, word + at, length);
        if (id >= 0) {
            if (waiting) {
                tok->symbols[count++].id = tok->unknown;
                waiting = false;
            }
            tok->symbols[count++].id = id;
            at += length;
            continue;
        }
        bool bytes = tok->byte_fallback;
        for (size_t i = 0; i < length; i++) {
            bytes = bytes && tok->fallback_ids[(unsigned char)word[at + i]] >= 0;
        }
        if (bytes) {
            for (size_t i = 0; i < length; i++) {
                tok->symbols[count++].id = tok->fallback_ids[(unsigned char)word[at + i]];
            }
        } else if (tok->unknown >= 0) {
            if (waiting && !tok->fuse_unknown) {
                tok->symbols[count++].id = tok->unknown;
            }
            waiting = true;
        }
        at += length;
    }
    if (waiting) {
        tok->symbols[count++].id = tok->unknown;
    }
    return count;
}

static qlora_result qlora__text_word_merge(qlora__env* env, qlora_text_tok* tok, const char* word,
                                           size_t size, qlora_text_ids* out) {
    if (size >= UINT32_MAX / 2) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "one word of 2 GiB or more");
    }
    void* data = tok->symbols;
    qlora_result r = qlora__text_reserve(env, &data, &tok->symbol_capacity, 0, size + 1,
                                         sizeof(qlora__text_symbol));
    tok->symbols = (qlora__text_symbol*)data;
    QLORA__TRY(r);
    size_t count = qlora__text_symbols_make(tok, word, size);
    if (count <= QLORA__TEXT_FEW) {
        count = qlora__text_merge_few(tok, count);
    } else {
        QLORA__TRY(qlora__text_merge_many(env, tok, count));
    }
    QLORA__TRY(qlora__text_ids_room(env, out, count));
    for (size_t i = 0; i < count; i++) {
        if (tok->symbols[i].id >= 0) {
            out->data[out->count++] = tok->symbols[i].id;
        }
    }
    return QLORA_OK;
}

// Encodes one word, through the cache.
static qlora_result qlora__text_word_encode(qlora__env* env, qlora_text_tok* tok, const char* word,
                                            size_t size, qlora_text_ids* out) {
    if (tok->ignore_merges) {
        int32_t id = qlora__text_words_find(&tok->words, word, size);
        if (id >= 0) {
            return qlora__text_ids_add(env, out, id);
        }
    }
    if (size > QLORA__TEXT_CACHE_KEY) {
        return qlora__text_word_merge(env, tok, word, size, out);
    }
    qlora__text_cached* cached =
        &tok->cache[qlora__text_hash(word, size) % QLORA__TEXT_CACHE_PLACES];
    if (cached->size == size && memcmp(cached->key, word, size) == 0) {
        QLORA__TRY(qlora__text_ids_room(env, out, cached->count));
        memcpy(out->data + out->count, cached->ids, cached->count * sizeof(int32_t));
        out->count += cached->count;
        return QLORA_OK;
    }
    size_t before = out->count;
    QLORA__TRY(qlora__text_word_merge(env, tok, word, size, out));
    if (out->count - before <= QLORA__TEXT_CACHE_IDS) {
        cached->size = (uint8_t)size;
        cached->count = (uint8_t)(out->count - before);
        memcpy(cached->key, word, size);
        memcpy(cached->ids, out->data + before, cached->count * sizeof(int32_t));
    }
    return QLORA_OK;
}

// Encodes one pre-token. Where it is safe, it is split before each word mark (the space or its
// stand-in) that follows another character: no merge crosses it, so the ids are the same and the
// cache is useful.
static qlora_result qlora__text_piece_encode(qlora__env* env, qlora_text_tok* tok, const char* text,
                                             size_t size, qlora_text_ids* out) {
    if (!tok->cut_safe) {
        return size == 0 ? QLORA_OK : qlora__text_word_encode(env, tok, text, size, out);
    }
    size_t begin = 0;
    bool before = true; // the previous character is a mark, or there is none
    for (size_t at = 0; at < size;) {
        bool mark = size - at >= tok->cut_size && memcmp(text + at, tok->cut, tok->cut_size) == 0;
        if (mark && !before) {
            QLORA__TRY(qlora__text_word_encode(env, tok, text + begin, at - begin, out));
            begin = at;
        }
        before = mark;
        at += mark ? tok->cut_size : 1;
    }
    return begin == size ? QLORA_OK
                         : qlora__text_word_encode(env, tok, text + begin, size - begin, out);
}

//@@ src/text/normalize.h

static qlora_result qlora__text_replace(qlora__env* env, const char* text, size_t size,
                                        const qlora__text_step* step, qlora_text_bytes* out) {
    size_t copied = 0;
    size_t at = 0;
    while (size - at >= step->a_size) {
        const char* hit = (const char*)memchr(text + at, step->a[0], size - at - step->a_size + 1);
        if (hit == NULL) {
            break;
        }
        at = (size_t)(hit - text);
        if (memcmp(hit, step->a, step->a_size) != 0) {
            at++;
            continue;
        }
        QLORA__TRY(qlora__text_bytes_add(env, out, text + copied, at - copied));
        QLORA__TRY(qlora__text_bytes_add(env, out, step->b, step->b_size));
        at += step->a_size;
        copied = at;
    }
    return qlora__text_bytes_add(env, out, text + copied, size - copied);
}

static qlora__text_view qlora__text_view_of(const qlora_text_tok* tok, const char* text,
                                            size_t end) {
    qlora__text_view view;
    view.s = (const unsigned char*)text;
    view.end = end;
    view.classes = tok->classes;
    view.code_of_byte = NULL;
    return view;
}

// The start of the white space that ends text[floor..end).
static size_t qlora__text_space_before(const qlora_text_tok* tok, const char* text, size_t floor,
                                       size_t end) {
    while (end > floor) {
        size_t start = end - 1;
        while (start > floor && end - start < 4 && ((unsigned char)text[start] & 0xC0) == 0x80) {
            start--;
        }
        qlora__text_view view = qlora__text_view_of(tok, text, end);
        size_t length;
        if (!(qlora__text_class_at(&view, start, &length) & QLORA__TEXT_WS) ||
            start + length != end) {
            break;
        }
        end = start;
    }
    return end;
}

static qlora_result qlora__text_normalizer_step(qlora__env* env, qlora_text_tok* tok,
                                                const qlora__text_step* step, const char* text,
                                                size_t size, bool front, qlora_text_bytes* out) {
    switch (step->kind) {
    case QLORA__TEXT_N_NFC:
    case QLORA__TEXT_N_NFD:
        return qlora__text_normalize(env, tok->classes, step->kind == QLORA__TEXT_N_NFC, text, size,
                                     &tok->marks, out);
    case QLORA__TEXT_N_PREPEND:
        if (front && size > 0) {
            QLORA__TRY(qlora__text_bytes_add(env, out, step->a, step->a_size));
        }
        return qlora__text_bytes_add(env, out, text, size);
    case QLORA__TEXT_N_REPLACE:
        return qlora__text_replace(env, text, size, step, out);
    default: { // QLORA__TEXT_N_STRIP
        qlora__text_view view = qlora__text_view_of(tok, text, size);
        size_t begin = step->start > 0 ? qlora__text_run(&view, 0, QLORA__TEXT_WS) : 0;
        size_t end = step->stop > 0 ? qlora__text_space_before(tok, text, 0, size) : size;
        return begin >= end ? QLORA_OK : qlora__text_bytes_add(env, out, text + begin, end - begin);
    }
    }
}

// Runs all steps; *out is one of the tokenizer's buffers. `front`: text may be prepended.
static qlora_result qlora__text_apply_normalizer(qlora__env* env, qlora_text_tok* tok,
                                                 const char* text, size_t size, bool front,
                                                 qlora_text_bytes** out) {
    *out = &tok->buffers[1];
    if (tok->normalizer.count == 0) {
        tok->buffers[1].count = 0;
        return qlora__text_bytes_add(env, &tok->buffers[1], text, size);
    }
    for (size_t i = 0; i < tok->normalizer.count; i++) {
        *out = &tok->buffers[1 + i % 2];
        (*out)->count = 0;
        QLORA__TRY(qlora__text_normalizer_step(env, tok, &tok->normalizer.data[i], text, size,
                                               front, *out));
        text = (*out)->data;
        size = (*out)->count;
    }
    return QLORA_OK;
}

//@@ src/text/load_model.h

// The model of a tokenizer.json: its tokens, merges and unknown token.

enum {
    QLORA__TEXT_MAX_ID = 1 << 24,
    QLORA__TEXT_MAX_GAP = 4096, // ids without a token, beyond twice the number of tokens
    QLORA__TEXT_MAX_ADDED = 1024,
    QLORA__TEXT_MAX_LIST = 64,
    QLORA__TEXT_MAX_STEP = 64
};

static void qlora__text_steps_free(qlora__env* env, qlora__text_steps* steps) {
    for (size_t i = 0; i < steps->count; i++) {
        qlora__text_step* step = &steps->data[i];
        qlora__env_free(env, step->a, step->a_size + 1);
        qlora__env_free(env, step->b, step->b_size + 1);
        qlora__pattern_free(env, step->program);
    }
    steps->count = 0;
}

#define QLORA__TEXT_FREE(env, array, capacity)                                                     \
    qlora__env_free((env), (array), (capacity) * sizeof *(array))

static void qlora__text_tok_free(qlora__env* env, qlora_text_tok* tok) {
    qlora__text_bytes_free(env, &tok->names);
    QLORA__TEXT_FREE(env, tok->spans, tok->span_capacity);
    QLORA__TEXT_FREE(env, tok->kinds, tok->kind_capacity);
    qlora__text_words_free(env, &tok->words);
    qlora__text_pairs_free(env, &tok->merges);
    QLORA__TEXT_FREE(env, tok->added, tok->added_capacity);
    qlora__text_pairs_free(env, &tok->raw_trie.edges);
    qlora__text_pairs_free(env, &tok->normalized_trie.edges);
    qlora__text_steps_free(env, &tok->normalizer);
    qlora__text_steps_free(env, &tok->splitter);
    qlora__text_steps_free(env, &tok->decoder);
    qlora__text_ids_free(env, &tok->prefix);
    qlora__text_ids_free(env, &tok->suffix);
    QLORA__TEXT_FREE(env, tok->classes, QLORA__TEXT_CODES);
    QLORA__TEXT_FREE(env, tok->cache, QLORA__TEXT_CACHE_PLACES);
    for (size_t i = 0; i < QLORA__TEXT_COUNT(tok->buffers); i++) {
        qlora__text_bytes_free(env, &tok->buffers[i]);
    }
    for (size_t i = 0; i < QLORA__TEXT_COUNT(tok->pieces); i++) {
        QLORA__TEXT_FREE(env, tok->pieces[i].data, tok->pieces[i].capacity);
    }
    QLORA__TEXT_FREE(env, tok->marks.data, tok->marks.capacity);
    QLORA__TEXT_FREE(env, tok->marks.sorted, tok->marks.sorted_capacity);
    QLORA__TEXT_FREE(env, tok->symbols, tok->symbol_capacity);
    QLORA__TEXT_FREE(env, tok->jobs, tok->job_capacity);
    qlora__env_free(env, tok, sizeof *tok);
}

// The stand-ins of byte-level files: printable Latin-1 bytes for themselves, 256 + n for the rest.
static void qlora__text_byte_tables(qlora_text_tok* tok) {
    uint16_t next = 256;
    for (size_t i = 0; i < QLORA__TEXT_COUNT(tok->byte_of_code); i++) {
        tok->byte_of_code[i] = -1;
    }
    for (unsigned b = 0; b < 256; b++) {
        bool printable = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        tok->code_of_byte[b] = printable ? (uint16_t)b : next++;
        tok->byte_of_code[tok->code_of_byte[b]] = (int16_t)b;
        tok->byte_ids[b] = -1;
        tok->fallback_ids[b] = -1;
    }
}

// On failure, *out is NULL and nothing is left to free.
static qlora_result qlora__text_tok_new(qlora_text* text, qlora_text_tok** out) {
    qlora__env* env = &text->env;
    qlora_text_tok* tok = (qlora_text_tok*)qlora__text_zalloc(env, 1, sizeof(qlora_text_tok));
    *out = NULL;
    if (tok == NULL) {
        return QLORA_ERR_MEMORY;
    }
    tok->text = text;
    tok->unknown = -1;
    qlora__text_byte_tables(tok);
    tok->classes = qlora__text_classes_make(env);
    tok->cache = (qlora__text_cached*)qlora__text_zalloc(env, QLORA__TEXT_CACHE_PLACES,
                                                         sizeof(qlora__text_cached));
    if (tok->classes == NULL || tok->cache == NULL) {
        qlora__text_tok_free(env, tok);
        return QLORA_ERR_MEMORY;
    }
    *out = tok;
    return QLORA_OK;
}

// The stand-ins back to bytes: at most `size` of them. False when a character is not a stand-in.
static bool qlora__text_unstand_to(const qlora_text_tok* tok, const char* text, size_t size,
                                   char* out, size_t* count) {
    *count = 0;
    for (size_t at = 0; at < size;) {
        uint32_t code = 0;
        size_t length = qlora__text_utf8((const unsigned char*)text + at, size - at, &code);
        if (length == 0 || code >= QLORA__TEXT_COUNT(tok->byte_of_code) ||
            tok->byte_of_code[code] < 0) {
            return false;
        }
        out[(*count)++] = (char)(unsigned char)tok->byte_of_code[code];
        at += length;
    }
    return true;
}

// The same, appended; nothing is appended unless *known.
static qlora_result qlora__text_unstand(qlora__env* env, const qlora_text_tok* tok,
                                        const char* text, size_t size, qlora_text_bytes* out,
                                        bool* known) {
    size_t count = 0;
    QLORA__TRY(qlora__text_bytes_room(env, out, size));
    *known = size == 0 || qlora__text_unstand_to(tok, text, size, out->data + out->count, &count);
    out->count += *known ? count : 0;
    return QLORA_OK;
}

// The id of a word as the file spells it, or -1.
static int32_t qlora__text_model_find(const qlora_text_tok* tok, const char* name, size_t size) {
    char raw[QLORA__TEXT_MAX_ADDED];
    size_t count = 0;
    if (!tok->byte_level) {
        return qlora__text_words_find(&tok->words, name, size);
    }
    if (size > sizeof(raw) || !qlora__text_unstand_to(tok, name, size, raw, &count)) {
        return -1;
    }
    return qlora__text_words_find(&tok->words, raw, count);
}

// Gives an id its name. A new id is created.
static qlora_result qlora__text_tok_name(qlora__env* env, qlora_text_tok* tok, int64_t id,
                                         const char* name, size_t size, unsigned kind) {
    int64_t limit = tok->id_limit > 0 ? tok->id_limit : QLORA__TEXT_MAX_ID;
    if (id < 0 || id >= limit) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "token \"%.60s\" has id %lld; ids must be 0 to %lld in a file of "
                               "this size",
                               name, (long long)id, (long long)limit - 1);
    }
    size_t index = (size_t)id;
    if (index >= tok->count) {
        size_t extra = index + 1 - tok->count;
        void* spans = tok->spans;
        qlora_result r = qlora__text_reserve(env, &spans, &tok->span_capacity, tok->count, extra,
                                             sizeof(qlora__text_span));
        tok->spans = (qlora__text_span*)spans;
        QLORA__TRY(r);
        void* kinds = tok->kinds;
        r = qlora__text_reserve(env, &kinds, &tok->kind_capacity, tok->count, extra, 1);
        tok->kinds = (uint8_t*)kinds;
        QLORA__TRY(r);
        memset(tok->spans + tok->count, 0, extra * sizeof(qlora__text_span));
        memset(tok->kinds + tok->count, 0, extra);
        tok->count = index + 1;
    }
    if (tok->names.count + size >= UINT32_MAX) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "the vocabulary is larger than 4 GiB");
    }
    tok->spans[index].at = (uint32_t)tok->names.count;
    tok->spans[index].size = (uint32_t)size;
    tok->kinds[index] = (uint8_t)(tok->kinds[index] | kind | QLORA__TEXT_K_EXISTS);
    return qlora__text_bytes_add(env, &tok->names, name, size);
}

// <0x00> to <0xFF>: the byte, or -1.
static int qlora__text_byte_token(const char* name, size_t size) {
    if (size != 6 || memcmp(name, "<0x", 3) != 0 || name[5] != '>') {
        return -1;
    }
    int value = 0;
    for (size_t i = 3; i < 5; i++) {
        char c = name[i];
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                           : -1;
        if (digit < 0) {
            return -1;
        }
        value = value * 16 + digit;
    }
    return value;
}

// Adds a word of the vocabulary: its name, and its entry in the model's table.
static qlora_result qlora__text_tok_word(qlora__env* env, qlora_text_tok* tok, const char* name,
                                         size_t size, int64_t id) {
    int byte = qlora__text_byte_token(name, size);
    QLORA__TRY(qlora__text_tok_name(env, tok, id, name, size, byte >= 0 ? QLORA__TEXT_K_BYTE : 0));
    if (byte >= 0 && name[3] < 'a' && name[4] < 'a') {
        tok->fallback_ids[byte] = (int32_t)id;
    }
    if (!tok->byte_level) {
        return qlora__text_words_put(env, &tok->words, name, size, (int32_t)id);
    }
    qlora_text_bytes* raw = &tok->buffers[0];
    bool known = false;
    raw->count = 0;
    QLORA__TRY(qlora__text_unstand(env, tok, name, size, raw, &known));
    return !known ? QLORA_OK
                  : qlora__text_words_put(env, &tok->words, raw->data, raw->count, (int32_t)id);
}

static qlora_result qlora__text_load_vocab(qlora__env* env, qlora_text_tok* tok,
                                           const qlora__json* json,
                                           const qlora__json_token* vocab) {
    if (vocab == NULL || vocab->kind != QLORA__JSON_OBJECT) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "model.vocab is not an object");
    }
    const qlora__json_token* key = vocab + 1;
    QLORA__TRY(qlora__text_words_reserve(env, &tok->words, vocab->count));
    for (uint32_t i = 0; i < vocab->count; i++) {
        const qlora__json_token* value = qlora__text_json_next(json, key);
        const char* name = qlora__text_json_text(json, key);
        int64_t id = 0;
        if (!qlora__text_json_integer(json, value, &id)) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "model.vocab: the id of \"%.60s\" is not a whole number", name);
        }
        QLORA__TRY(qlora__text_tok_word(env, tok, name, qlora__text_json_size(key), id));
        key = qlora__text_json_next(json, value);
    }
    for (unsigned b = 0; b < 256; b++) {
        char byte = (char)(unsigned char)b;
        tok->byte_ids[b] = qlora__text_words_find(&tok->words, &byte, 1);
    }
    return QLORA_OK;
}

// The two halves of a merge, "a b" or ["a", "b"], as places in json->strings.
static bool qlora__text_merge_halves(const qlora__json* json, const qlora__json_token* merge,
                                     qlora__text_span halves[2]) {
    if (merge->kind == QLORA__JSON_ARRAY && merge->count == 2) {
        const qlora__json_token* a = merge + 1;
        const qlora__json_token* b = qlora__text_json_next(json, a);
        if (qlora__text_json_string(a) && qlora__text_json_string(b)) {
            halves[0].at = a->begin;
            halves[0].size = a->end - a->begin;
            halves[1].at = b->begin;
            halves[1].size = b->end - b->begin;
            return true;
        }
    }
    if (merge->kind == QLORA__JSON_STRING) {
        const char* text = qlora__text_json_text(json, merge);
        size_t size = qlora__text_json_size(merge);
        const char* space = (const char*)memchr(text, ' ', size);
        size_t left = space != NULL ? (size_t)(space - text) : 0;
        if (space != NULL && memchr(space + 1, ' ', size - left - 1) == NULL) {
            halves[0].at = merge->begin;
            halves[0].size = (uint32_t)left;
            halves[1].at = merge->begin + (uint32_t)left + 1;
            halves[1].size = (uint32_t)(size - left - 1);
            return true;
        }
    }
    return false;
}

// Adds a merge of two tokens as the file spells them.
static qlora_result qlora__text_put_merge(qlora__env* env, qlora_text_tok* tok,
                                          const char* const halves[2], const size_t sizes[2],
                                          uint32_t rank) {
    qlora_text_bytes* raw = &tok->buffers[0];
    raw->count = 0;
    int32_t ids[2];
    size_t begin = 0;
    for (size_t i = 0; i < 2; i++) {
        bool known = true;
        if (tok->byte_level) {
            QLORA__TRY(qlora__text_unstand(env, tok, halves[i], sizes[i], raw, &known));
        } else {
            QLORA__TRY(qlora__text_bytes_add(env, raw, halves[i], sizes[i]));
        }
        ids[i] =
            known ? qlora__text_words_find(&tok->words, raw->data + begin, raw->count - begin) : -1;
        if (ids[i] < 0) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "uses \"%.*s\", which is not in the vocabulary",
                                   (int)(sizes[i] < 60 ? sizes[i] : 60), halves[i]);
        }
        begin = raw->count;
    }
    int32_t joined = qlora__text_words_find(&tok->words, raw->data, raw->count);
    if (joined < 0) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "joins to a token that is not in the vocabulary");
    }
    return qlora__text_pairs_put(env, &tok->merges, (uint32_t)ids[0], (uint32_t)ids[1], rank,
                                 (uint32_t)joined);
}

static qlora_result qlora__text_load_merge(qlora__env* env, qlora_text_tok* tok,
                                           const qlora__json* json, const qlora__json_token* merge,
                                           uint32_t rank) {
    qlora__text_span halves[2];
    memset(halves, 0, sizeof(halves));
    if (!qlora__text_merge_halves(json, merge, halves)) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "is neither \"a b\" nor [\"a\", \"b\"]");
    }
    const char* const texts[2] = {json->strings + halves[0].at, json->strings + halves[1].at};
    const size_t sizes[2] = {halves[0].size, halves[1].size};
    return qlora__text_put_merge(env, tok, texts, sizes, rank);
}

static qlora_result qlora__text_load_merges(qlora__env* env, qlora_text_tok* tok,
                                            const qlora__json* json,
                                            const qlora__json_token* merges) {
    if (merges == NULL || merges->kind != QLORA__JSON_ARRAY) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "model.merges is not an array");
    }
    const qlora__json_token* merge = merges + 1;
    QLORA__TRY(qlora__text_pairs_reserve(env, &tok->merges, merges->count));
    for (uint32_t i = 0; i < merges->count; i++) {
        qlora_result r = qlora__text_load_merge(env, tok, json, merge, i);
        if (r != QLORA_OK) {
            return qlora__env_wrap(env, r, "model.merges[%lu] ", (unsigned long)i);
        }
        merge = qlora__text_json_next(json, merge);
    }
    return QLORA_OK;
}

// Whether the word mark never follows another character in any word that merging can make.
static bool qlora__text_cut_is_safe(const qlora_text_tok* tok) {
    size_t size = tok->cut_size;
    if (tok->byte_level || tok->ignore_merges || size == 0 ||
        qlora__text_words_find(&tok->words, tok->cut, size) < 0) {
        return false;
    }
    for (size_t place = 0; place < tok->merges.places; place++) {
        const qlora__text_pair* pair = &tok->merges.data[place];
        if (pair->key == UINT64_MAX) {
            continue;
        }
        const char* name = tok->names.data + tok->spans[pair->second].at;
        size_t count = tok->spans[pair->second].size;
        bool before = true;
        for (size_t at = 0; at < count;) {
            bool mark = count - at >= size && memcmp(name + at, tok->cut, size) == 0;
            if (mark && !before) {
                return false;
            }
            before = mark;
            at += mark ? size : 1;
        }
    }
    return true;
}

static qlora_result qlora__text_load_model(qlora__env* env, qlora_text_tok* tok,
                                           const qlora__json* json,
                                           const qlora__json_token* model) {
    const qlora__json_token* type = qlora__text_json_get(json, model, "type");
    if (model == NULL || model->kind != QLORA__JSON_OBJECT) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "missing \"model\"; this is not a tokenizer.json");
    }
    if (!qlora__text_json_absent(type) && !qlora__text_json_is(json, type, "BPE")) {
        const char* name = qlora__text_json_cstring(json, type);
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "the model type is %.60s; only BPE is supported",
                               name != NULL ? name : "not a string");
    }
    static const char* const refused[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    for (size_t i = 0; i < QLORA__TEXT_COUNT(refused); i++) {
        const qlora__json_token* node = qlora__text_json_get(json, model, refused[i]);
        if (!qlora__text_json_absent(node) && !qlora__text_json_is(json, node, "")) {
            return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED, "model.%s is not supported",
                                   refused[i]);
        }
    }
    const qlora__json_token* dropout = qlora__text_json_get(json, model, "dropout");
    int64_t rate = 1;
    if (!qlora__text_json_absent(dropout) &&
        !(qlora__text_json_integer(json, dropout, &rate) && rate == 0)) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED, "model.dropout is not supported");
    }
    tok->byte_fallback = qlora__text_json_true(qlora__text_json_get(json, model, "byte_fallback"));
    tok->fuse_unknown = qlora__text_json_true(qlora__text_json_get(json, model, "fuse_unk"));
    tok->ignore_merges = qlora__text_json_true(qlora__text_json_get(json, model, "ignore_merges"));
    QLORA__TRY(qlora__text_load_vocab(env, tok, json, qlora__text_json_get(json, model, "vocab")));
    QLORA__TRY(
        qlora__text_load_merges(env, tok, json, qlora__text_json_get(json, model, "merges")));
    const qlora__json_token* unknown = qlora__text_json_get(json, model, "unk_token");
    if (!qlora__text_json_absent(unknown)) {
        const char* name = qlora__text_json_cstring(json, unknown);
        tok->unknown =
            name != NULL ? qlora__text_model_find(tok, name, qlora__text_json_size(unknown)) : -1;
        if (tok->unknown < 0) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "model.unk_token is not in the vocabulary");
        }
    }
    return QLORA_OK;
}

//@@ src/text/load.h

// tokenizer.json: normaliser, splitter, decoder, post-processor and added tokens around the model.

// Flattens a "Sequence" in order. `list` is the name of its array.
static qlora_result qlora__text_flatten(qlora__env* env, const qlora__json* json,
                                        const qlora__json_token* root, const char* list,
                                        const qlora__json_token** out, size_t* count) {
    *count = 0;
    if (qlora__text_json_absent(root)) {
        return QLORA_OK;
    }
    const qlora__json_token* stack[QLORA__TEXT_MAX_LIST];
    size_t depth = 0;
    stack[depth++] = root;
    while (depth > 0) {
        const qlora__json_token* node = stack[--depth];
        const qlora__json_token* type = qlora__text_json_get(json, node, "type");
        if (!qlora__text_json_is(json, type, "Sequence")) {
            if (!qlora__text_json_string(type)) {
                return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: a step has no \"type\"", list);
            }
            if (*count == QLORA__TEXT_MAX_LIST) {
                return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: too many steps", list);
            }
            out[(*count)++] = node;
            continue;
        }
        const qlora__json_token* array = qlora__text_json_get(json, node, list);
        if (array == NULL || array->kind != QLORA__JSON_ARRAY) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: a Sequence has no list of steps",
                                   list);
        }
        if (array->count > QLORA__TEXT_MAX_LIST - depth) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: too many steps", list);
        }
        const qlora__json_token* child = array + 1;
        for (uint32_t i = 0; i < array->count; i++) { // the first child on top
            stack[depth + array->count - 1 - i] = child;
            child = qlora__text_json_next(json, child);
        }
        depth += array->count;
    }
    return QLORA_OK;
}

// Replaces a string of size + 1 bytes by a copy of another one.
static qlora_result qlora__text_copy(qlora__env* env, const char* data, size_t size, char** out,
                                     size_t* out_size) {
    char* copy = (char*)qlora__text_zalloc(env, size + 1, 1);
    if (copy == NULL) {
        return QLORA_ERR_MEMORY;
    }
    if (size > 0) {
        memcpy(copy, data, size);
    }
    qlora__env_free(env, *out, *out_size + 1);
    *out = copy;
    *out_size = size;
    return QLORA_OK;
}

static qlora_result qlora__text_steps_add(qlora__env* env, qlora__text_steps* steps, int kind,
                                          qlora__text_step** out) {
    if (steps->count == QLORA__TEXT_STEPS) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED, "more than %d steps", QLORA__TEXT_STEPS);
    }
    *out = &steps->data[steps->count++];
    memset(*out, 0, sizeof(**out));
    (*out)->kind = kind;
    return QLORA_OK;
}

// Copies a string member into a step.
static qlora_result qlora__text_step_string(qlora__env* env, const qlora__json* json,
                                            const qlora__json_token* node, const char* name,
                                            char** out, size_t* size) {
    const qlora__json_token* value = qlora__text_json_get(json, node, name);
    if (!qlora__text_json_string(value)) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "a step has no string \"%s\"", name);
    }
    if (qlora__text_json_size(value) > QLORA__TEXT_MAX_STEP) { // a text could grow out of bounds
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "\"%s\" is longer than %d bytes", name,
                               QLORA__TEXT_MAX_STEP);
    }
    return qlora__text_copy(env, qlora__text_json_text(json, value), qlora__text_json_size(value),
                            out, size);
}

// A known expression has a function of its own, which is faster; any other one is compiled. After
// ByteLevel, characters stand for bytes: only the compiled form knows that.
static qlora_result qlora__text_step_regex(qlora__env* env, const qlora_text_tok* tok,
                                           const char* text, size_t size, qlora__text_step* step) {
    bool plain = strlen(text) == size;
    step->pattern = plain && !tok->byte_level ? qlora__text_pattern_find(text) : NULL;
    if (step->pattern != NULL) {
        return QLORA_OK;
    }
    return qlora__pattern_compile(env, text, size, tok->classes, &step->program);
}

// {"String": x} goes to step->a; {"Regex": x} to the pattern or the program, if it is allowed here.
static qlora_result qlora__text_step_pattern(qlora__env* env, const qlora__json* json,
                                             const qlora__json_token* node, bool regex,
                                             const qlora_text_tok* tok, qlora__text_step* step) {
    const qlora__json_token* pattern = qlora__text_json_get(json, node, "pattern");
    const qlora__json_token* string = qlora__text_json_get(json, pattern, "String");
    const qlora__json_token* expression = qlora__text_json_get(json, pattern, "Regex");
    if (qlora__text_json_string(pattern)) {
        string = pattern;
    }
    if (qlora__text_json_string(string) && qlora__text_json_size(string) > 0) {
        return qlora__text_copy(env, qlora__text_json_text(json, string),
                                qlora__text_json_size(string), &step->a, &step->a_size);
    }
    if (qlora__text_json_string(expression)) {
        const char* text = qlora__text_json_text(json, expression);
        size_t size = qlora__text_json_size(expression);
        if (!regex) {
            return qlora__env_fail(
                env, QLORA_ERR_UNSUPPORTED,
                "a normalizer with a regular expression is not supported: %.300s", text);
        }
        return qlora__text_step_regex(env, tok, text, size, step);
    }
    return qlora__env_fail(env, QLORA_ERR_FORMAT, "a step has no \"pattern\"");
}

static qlora_result qlora__text_load_normalizer(qlora__env* env, qlora_text_tok* tok,
                                                const qlora__json* json,
                                                const qlora__json_token* root) {
    const qlora__json_token* nodes[QLORA__TEXT_MAX_LIST];
    size_t count;
    QLORA__TRY(qlora__text_flatten(env, json, root, "normalizers", nodes, &count));
    static const struct {
        const char* name;
        int kind;
    } kinds[] = {{"NFC", QLORA__TEXT_N_NFC},
                 {"NFD", QLORA__TEXT_N_NFD},
                 {"Prepend", QLORA__TEXT_N_PREPEND},
                 {"Replace", QLORA__TEXT_N_REPLACE},
                 {"Strip", QLORA__TEXT_N_STRIP}};
    for (size_t i = 0; i < count; i++) {
        const qlora__json_token* type = qlora__text_json_get(json, nodes[i], "type");
        size_t k = 0;
        while (k < QLORA__TEXT_COUNT(kinds) && !qlora__text_json_is(json, type, kinds[k].name)) {
            k++;
        }
        if (k == QLORA__TEXT_COUNT(kinds)) {
            return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                   "the normalizer %.60s is not supported",
                                   qlora__text_json_text(json, type));
        }
        qlora__text_step* step = NULL;
        QLORA__TRY(qlora__text_steps_add(env, &tok->normalizer, kinds[k].kind, &step));
        if (step->kind == QLORA__TEXT_N_PREPEND) {
            QLORA__TRY(
                qlora__text_step_string(env, json, nodes[i], "prepend", &step->a, &step->a_size));
        } else if (step->kind == QLORA__TEXT_N_REPLACE) {
            QLORA__TRY(qlora__text_step_pattern(env, json, nodes[i], false, tok, step));
            QLORA__TRY(
                qlora__text_step_string(env, json, nodes[i], "content", &step->b, &step->b_size));
        } else if (step->kind == QLORA__TEXT_N_STRIP) {
            step->start = qlora__text_json_true(qlora__text_json_get(json, nodes[i], "strip_left"));
            step->stop = qlora__text_json_true(qlora__text_json_get(json, nodes[i], "strip_right"));
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__text_load_behavior(qlora__env* env, const qlora__json* json,
                                              const qlora__json_token* node, int* out) {
    static const char* const names[] = {"Isolated", "Removed", "MergedWithPrevious",
                                        "MergedWithNext", "Contiguous"};
    const qlora__json_token* value = qlora__text_json_get(json, node, "behavior");
    for (size_t i = 0; i < QLORA__TEXT_COUNT(names); i++) {
        if (qlora__text_json_is(json, value, names[i])) {
            *out = (int)i;
            return QLORA_OK;
        }
    }
    return qlora__env_fail(env, QLORA_ERR_FORMAT, "pre_tokenizer: unknown behavior");
}

static qlora_result qlora__text_load_metaspace(qlora__env* env, const qlora__json* json,
                                               const qlora__json_token* node,
                                               qlora__text_step* step, bool decoder) {
    const qlora__json_token* scheme = qlora__text_json_get(json, node, "prepend_scheme");
    const qlora__json_token* legacy = qlora__text_json_get(json, node, "add_prefix_space");
    const qlora__json_token* split = qlora__text_json_get(json, node, "split");
    QLORA__TRY(qlora__text_step_string(env, json, node, "replacement", &step->a, &step->a_size));
    if (step->a_size == 0) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "Metaspace: the replacement is empty");
    }
    step->always = qlora__text_json_absent(scheme) || qlora__text_json_is(json, scheme, "always");
    step->never = qlora__text_json_is(json, scheme, "never");
    if (!step->always && !step->never && !qlora__text_json_is(json, scheme, "first")) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "Metaspace: unknown prepend_scheme");
    }
    if (scheme == NULL && qlora__text_json_false(legacy)) {
        step->always = false;
        step->never = true;
    }
    step->invert = !decoder && !qlora__text_json_false(split); // splits
    return QLORA_OK;
}

static qlora_result qlora__text_load_bytelevel(qlora__env* env, qlora_text_tok* tok,
                                               const qlora__json* json,
                                               const qlora__json_token* node) {
    const qlora__json_token* prefix = qlora__text_json_get(json, node, "add_prefix_space");
    const qlora__json_token* regex = qlora__text_json_get(json, node, "use_regex");
    qlora__text_step* step = NULL;
    if (!qlora__text_json_false(prefix)) {
        QLORA__TRY(qlora__text_steps_add(env, &tok->splitter, QLORA__TEXT_P_PREFIX_SPACE, &step));
    }
    if (!qlora__text_json_false(regex)) {
        QLORA__TRY(qlora__text_steps_add(env, &tok->splitter, QLORA__TEXT_P_REGEX, &step));
        step->pattern = &qlora__text_patterns[0];
    }
    tok->byte_level = true;
    return qlora__text_steps_add(env, &tok->splitter, QLORA__TEXT_P_BYTES, &step);
}

// The steps that only look at classes: Digits, Punctuation, Whitespace, WhitespaceSplit.
static qlora_result qlora__text_load_classes(qlora__env* env, qlora_text_tok* tok,
                                             const qlora__json* json, const qlora__json_token* node,
                                             bool* found) {
    const qlora__json_token* type = qlora__text_json_get(json, node, "type");
    static const struct {
        const char* name;
        int kind;
        unsigned mask;
        int behavior;
    } kinds[] = {{"Digits", QLORA__TEXT_P_CLASS, QLORA__TEXT_N, QLORA__TEXT_B_CONTIGUOUS},
                 {"Punctuation", QLORA__TEXT_P_PUNCTUATION, 0, QLORA__TEXT_B_ISOLATED},
                 {"WhitespaceSplit", QLORA__TEXT_P_CLASS, QLORA__TEXT_WS, QLORA__TEXT_B_REMOVED},
                 {"Whitespace", QLORA__TEXT_P_REGEX, 0, QLORA__TEXT_B_REMOVED}};
    size_t k = 0;
    while (k < QLORA__TEXT_COUNT(kinds) && !qlora__text_json_is(json, type, kinds[k].name)) {
        k++;
    }
    *found = k < QLORA__TEXT_COUNT(kinds);
    if (!*found) {
        return QLORA_OK;
    }
    qlora__text_step* step = NULL;
    QLORA__TRY(qlora__text_steps_add(env, &tok->splitter, kinds[k].kind, &step));
    step->mask = kinds[k].mask;
    step->behavior = kinds[k].behavior;
    if (step->kind == QLORA__TEXT_P_REGEX) {
        step->pattern = qlora__text_pattern_find("Whitespace");
        step->invert = true;
    }
    if (qlora__text_json_true(qlora__text_json_get(json, node, "individual_digits"))) {
        step->behavior = QLORA__TEXT_B_ISOLATED;
    }
    if (step->kind == QLORA__TEXT_P_PUNCTUATION &&
        qlora__text_json_get(json, node, "behavior") != NULL) {
        return qlora__text_load_behavior(env, json, node, &step->behavior);
    }
    return QLORA_OK;
}

static qlora_result qlora__text_load_splitter_step(qlora__env* env, qlora_text_tok* tok,
                                                   const qlora__json* json,
                                                   const qlora__json_token* node) {
    const qlora__json_token* type = qlora__text_json_get(json, node, "type");
    if (qlora__text_json_is(json, type, "ByteLevel")) {
        return tok->byte_level ? qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                                 "pre_tokenizer: ByteLevel appears twice")
                               : qlora__text_load_bytelevel(env, tok, json, node);
    }
    if (qlora__text_json_is(json, type, "Metaspace")) {
        qlora__text_step* step = NULL;
        QLORA__TRY(qlora__text_steps_add(env, &tok->splitter, QLORA__TEXT_P_METASPACE, &step));
        return qlora__text_load_metaspace(env, json, node, step, false);
    }
    if (qlora__text_json_is(json, type, "Split")) {
        qlora__text_step* step = NULL;
        QLORA__TRY(qlora__text_steps_add(env, &tok->splitter, QLORA__TEXT_P_REGEX, &step));
        QLORA__TRY(qlora__text_step_pattern(env, json, node, true, tok, step));
        step->kind = step->a == NULL ? QLORA__TEXT_P_REGEX : QLORA__TEXT_P_STRING;
        step->invert = qlora__text_json_true(qlora__text_json_get(json, node, "invert"));
        if (tok->byte_level && step->kind == QLORA__TEXT_P_STRING) {
            return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                   "pre_tokenizer: a Split on a string after ByteLevel is not "
                                   "supported");
        }
        return qlora__text_load_behavior(env, json, node, &step->behavior);
    }
    bool found = false;
    QLORA__TRY(qlora__text_load_classes(env, tok, json, node, &found));
    return found ? QLORA_OK
                 : qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                   "the pre_tokenizer %.60s is not supported",
                                   qlora__text_json_text(json, type));
}

static qlora_result qlora__text_load_splitter(qlora__env* env, qlora_text_tok* tok,
                                              const qlora__json* json,
                                              const qlora__json_token* root) {
    const qlora__json_token* nodes[QLORA__TEXT_MAX_LIST];
    size_t count;
    QLORA__TRY(qlora__text_flatten(env, json, root, "pretokenizers", nodes, &count));
    for (size_t i = 0; i < count; i++) {
        QLORA__TRY(qlora__text_load_splitter_step(env, tok, json, nodes[i]));
    }
    return QLORA_OK;
}

static qlora_result qlora__text_load_decoder_step(qlora__env* env, qlora_text_tok* tok,
                                                  const qlora__json* json,
                                                  const qlora__json_token* node) {
    const qlora__json_token* type = qlora__text_json_get(json, node, "type");
    static const struct {
        const char* name;
        int kind;
    } kinds[] = {{"Replace", QLORA__TEXT_D_REPLACE}, {"ByteFallback", QLORA__TEXT_D_BYTE_FALLBACK},
                 {"Fuse", QLORA__TEXT_D_FUSE},       {"Strip", QLORA__TEXT_D_STRIP},
                 {"ByteLevel", QLORA__TEXT_D_BYTES}, {"Metaspace", QLORA__TEXT_D_METASPACE}};
    size_t k = 0;
    while (k < QLORA__TEXT_COUNT(kinds) && !qlora__text_json_is(json, type, kinds[k].name)) {
        k++;
    }
    if (k == QLORA__TEXT_COUNT(kinds)) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED, "the decoder %.60s is not supported",
                               qlora__text_json_text(json, type));
    }
    qlora__text_step* step = NULL;
    QLORA__TRY(qlora__text_steps_add(env, &tok->decoder, kinds[k].kind, &step));
    if (step->kind == QLORA__TEXT_D_REPLACE) {
        QLORA__TRY(qlora__text_step_pattern(env, json, node, false, tok, step));
        return qlora__text_step_string(env, json, node, "content", &step->b, &step->b_size);
    }
    if (step->kind == QLORA__TEXT_D_METASPACE) {
        return qlora__text_load_metaspace(env, json, node, step, true);
    }
    if (step->kind == QLORA__TEXT_D_STRIP) {
        const qlora__json_token* start = qlora__text_json_get(json, node, "start");
        const qlora__json_token* stop = qlora__text_json_get(json, node, "stop");
        int64_t counts[2] = {-1, -1};
        bool numbers = qlora__text_json_integer(json, start, &counts[0]) &&
                       qlora__text_json_integer(json, stop, &counts[1]);
        if (!numbers || counts[0] < 0 || counts[0] > 1000 || counts[1] < 0 || counts[1] > 1000) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "decoder Strip: start and stop must be numbers from 0 to 1000");
        }
        step->start = (size_t)counts[0];
        step->stop = (size_t)counts[1];
        QLORA__TRY(qlora__text_step_string(env, json, node, "content", &step->a, &step->a_size));
        return step->a_size > 0
                   ? QLORA_OK
                   : qlora__env_fail(env, QLORA_ERR_FORMAT, "decoder Strip: the content is empty");
    }
    return QLORA_OK;
}

static qlora_result qlora__text_load_decoder(qlora__env* env, qlora_text_tok* tok,
                                             const qlora__json* json,
                                             const qlora__json_token* root) {
    const qlora__json_token* nodes[QLORA__TEXT_MAX_LIST];
    size_t count;
    QLORA__TRY(qlora__text_flatten(env, json, root, "decoders", nodes, &count));
    if (qlora__text_json_absent(root)) { // the library then puts a space between tokens
        qlora__text_step* step = NULL;
        return qlora__text_steps_add(env, &tok->decoder, QLORA__TEXT_D_JOIN, &step);
    }
    bool fused = false;
    for (size_t i = 0; i < count; i++) {
        QLORA__TRY(qlora__text_load_decoder_step(env, tok, json, nodes[i]));
        int kind = tok->decoder.data[tok->decoder.count - 1].kind;
        if (fused && kind != QLORA__TEXT_D_STRIP && kind != QLORA__TEXT_D_FUSE) {
            return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                   "decoder: only Strip is supported after Fuse and ByteLevel");
        }
        fused = fused || kind == QLORA__TEXT_D_FUSE || kind == QLORA__TEXT_D_BYTES;
    }
    return QLORA_OK;
}

// The ids of one element of a template: {"SpecialToken": {"id": name}}.
static qlora_result qlora__text_load_template_token(qlora__env* env, const qlora__json* json,
                                                    const qlora__json_token* tokens,
                                                    const qlora__json_token* item,
                                                    qlora_text_ids* out) {
    const char* name = qlora__text_json_cstring(json, qlora__text_json_get(json, item, "id"));
    const qlora__json_token* ids = NULL;
    if (name != NULL) {
        ids = qlora__text_json_get(json, qlora__text_json_get(json, tokens, name), "ids");
    }
    if (ids == NULL) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "post_processor: a special token has no ids");
    }
    return qlora__text_json_ids(env, json, ids, out);
}

// Inserts `front` before ids.
static qlora_result qlora__text_ids_prepend(qlora__env* env, qlora_text_ids* ids,
                                            const qlora_text_ids* front) {
    QLORA__TRY(qlora__text_ids_room(env, ids, front->count));
    if (front->count > 0) {
        memmove(ids->data + front->count, ids->data, ids->count * sizeof(int32_t));
        memcpy(ids->data, front->data, front->count * sizeof(int32_t));
        ids->count += front->count;
    }
    return QLORA_OK;
}

static qlora_result qlora__text_load_template(qlora__env* env, qlora_text_tok* tok,
                                              const qlora__json* json,
                                              const qlora__json_token* node,
                                              qlora_text_ids* front) {
    const qlora__json_token* single = qlora__text_json_get(json, node, "single");
    const qlora__json_token* tokens = qlora__text_json_get(json, node, "special_tokens");
    if (single == NULL || single->kind != QLORA__JSON_ARRAY ||
        single->count > QLORA__TEXT_MAX_LIST) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "post_processor: \"single\" must be a list of up to %d items",
                               QLORA__TEXT_MAX_LIST);
    }
    bool before = true;
    const qlora__json_token* item = single + 1;
    for (uint32_t i = 0; i < single->count; i++) {
        const qlora__json_token* special = qlora__text_json_get(json, item, "SpecialToken");
        const qlora__json_token* sequence = qlora__text_json_get(json, item, "Sequence");
        if (special != NULL) {
            QLORA__TRY(qlora__text_load_template_token(env, json, tokens, special,
                                                       before ? front : &tok->suffix));
        } else if (sequence != NULL && before &&
                   qlora__text_json_is(json, qlora__text_json_get(json, sequence, "id"), "A")) {
            before = false;
        } else {
            return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                   "post_processor: this template is not supported");
        }
        item = qlora__text_json_next(json, item);
    }
    return !before
               ? QLORA_OK
               : qlora__env_fail(env, QLORA_ERR_FORMAT, "post_processor: the template has no text");
}

// [token, id] of the RoBERTa and BERT processors.
static qlora_result qlora__text_load_framing(qlora__env* env, const qlora__json* json,
                                             const qlora__json_token* node, const char* name,
                                             qlora_text_ids* out) {
    const qlora__json_token* pair = qlora__text_json_get(json, node, name);
    if (pair != NULL && pair->kind == QLORA__JSON_ARRAY && pair->count == 2) {
        const qlora__json_token* id = qlora__text_json_next(json, pair + 1);
        int64_t value = 0;
        if (qlora__text_json_integer(json, id, &value) && value >= 0 &&
            value < QLORA__TEXT_MAX_ID) {
            return qlora__text_ids_add(env, out, (int32_t)value);
        }
    }
    return qlora__env_fail(env, QLORA_ERR_FORMAT, "post_processor: \"%s\" is not [token, id]",
                           name);
}

static qlora_result qlora__text_load_post_step(qlora__env* env, qlora_text_tok* tok,
                                               const qlora__json* json,
                                               const qlora__json_token* node,
                                               qlora_text_ids* front) {
    const qlora__json_token* type = qlora__text_json_get(json, node, "type");
    if (qlora__text_json_is(json, type, "ByteLevel")) {
        return QLORA_OK; // it only changes offsets
    }
    if (qlora__text_json_is(json, type, "TemplateProcessing")) {
        return qlora__text_load_template(env, tok, json, node, front);
    }
    if (qlora__text_json_is(json, type, "RobertaProcessing") ||
        qlora__text_json_is(json, type, "BertProcessing")) {
        QLORA__TRY(qlora__text_load_framing(env, json, node, "cls", front));
        return qlora__text_load_framing(env, json, node, "sep", &tok->suffix);
    }
    return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED, "the post_processor %.60s is not supported",
                           qlora__text_json_text(json, type));
}

static qlora_result qlora__text_load_post(qlora__env* env, qlora_text_tok* tok,
                                          const qlora__json* json, const qlora__json_token* root) {
    const qlora__json_token* nodes[QLORA__TEXT_MAX_LIST];
    size_t count;
    QLORA__TRY(qlora__text_flatten(env, json, root, "processors", nodes, &count));
    qlora_result r = QLORA_OK;
    for (size_t i = 0; r == QLORA_OK && i < count; i++) {
        qlora_text_ids front;
        memset(&front, 0, sizeof(front));
        r = qlora__text_load_post_step(env, tok, json, nodes[i], &front);
        r = r == QLORA_OK ? qlora__text_ids_prepend(env, &tok->prefix, &front) : r;
        qlora__text_ids_free(env, &front);
    }
    return r;
}

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

static qlora_result qlora__text_load_added_token(qlora__env* env, qlora_text_tok* tok,
                                                 const qlora__json* json,
                                                 const qlora__json_token* node, uint32_t number) {
    const qlora__json_token* content = qlora__text_json_get(json, node, "content");
    const qlora__json_token* id = qlora__text_json_get(json, node, "id");
    int64_t given = -1;
    if (!qlora__text_json_string(content) || !qlora__text_json_integer(json, id, &given)) {
        return qlora__env_fail(
            env, QLORA_ERR_FORMAT,
            "added_tokens[%lu] needs a string \"content\" and a whole number \"id\"",
            (unsigned long)number);
    }
    size_t size = qlora__text_json_size(content);
    if (size == 0) {
        return QLORA_OK;
    }
    const char* text = qlora__text_json_text(json, content);
    if (size > QLORA__TEXT_MAX_ADDED) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "added_tokens: \"%.60s...\" is longer than %d bytes", text,
                               QLORA__TEXT_MAX_ADDED);
    }
    qlora__text_added* added = &tok->added[tok->added_count];
    // the id of the vocabulary takes precedence over the one given here
    int32_t known = qlora__text_model_find(tok, text, size);
    int64_t use = known >= 0 ? known : given;
    added->special = qlora__text_json_true(qlora__text_json_get(json, node, "special"));
    added->single_word = qlora__text_json_true(qlora__text_json_get(json, node, "single_word"));
    added->strip_left = qlora__text_json_true(qlora__text_json_get(json, node, "lstrip"));
    added->strip_right = qlora__text_json_true(qlora__text_json_get(json, node, "rstrip"));
    unsigned kind = QLORA__TEXT_K_ADDED | (added->special ? (unsigned)QLORA__TEXT_K_SPECIAL : 0u);
    QLORA__TRY(qlora__text_tok_name(env, tok, use, text, size, kind));
    added->id = (int32_t)use;
    added->name = tok->spans[use];
    tok->added_count++;
    if (!qlora__text_json_true(qlora__text_json_get(json, node, "normalized"))) {
        return qlora__text_trie_add(env, &tok->raw_trie, text, size,
                                    (uint32_t)tok->added_count - 1);
    }
    qlora_text_bytes* normal;
    QLORA__TRY(qlora__text_apply_normalizer(env, tok, text, size, true, &normal));
    // decoding gives the normalised form, as the library does
    QLORA__TRY(qlora__text_tok_name(env, tok, use, normal->data, normal->count, kind));
    return qlora__text_trie_add(env, &tok->normalized_trie, normal->data, normal->count,
                                (uint32_t)tok->added_count - 1);
}

static qlora_result qlora__text_load_added(qlora__env* env, qlora_text_tok* tok,
                                           const qlora__json* json, const qlora__json_token* list) {
    if (qlora__text_json_absent(list)) {
        return QLORA_OK;
    }
    if (list->kind != QLORA__JSON_ARRAY) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "added_tokens is not an array");
    }
    tok->added =
        (qlora__text_added*)qlora__text_zalloc(env, list->count, sizeof(qlora__text_added));
    if (tok->added == NULL) {
        return QLORA_ERR_MEMORY;
    }
    tok->added_capacity = list->count;
    const qlora__json_token* node = list + 1;
    for (uint32_t i = 0; i < list->count; i++) {
        QLORA__TRY(qlora__text_load_added_token(env, tok, json, node, i));
        node = qlora__text_json_next(json, node);
    }
    return QLORA_OK;
}

static qlora_result qlora__text_load_parts(qlora__env* env, qlora_text_tok* tok,
                                           const qlora__json* json) {
    const qlora__json_token* root = json->tokens;
    if (root->kind != QLORA__JSON_OBJECT) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "a JSON object was expected");
    }
    memcpy(tok->cut, "\xE2\x96\x81", 3); // U+2581, the stand-in for a space
    tok->cut_size = 3;
    QLORA__TRY(qlora__text_load_normalizer(env, tok, json,
                                           qlora__text_json_get(json, root, "normalizer")));
    QLORA__TRY(qlora__text_load_splitter(env, tok, json,
                                         qlora__text_json_get(json, root, "pre_tokenizer")));
    QLORA__TRY(qlora__text_load_model(env, tok, json, qlora__text_json_get(json, root, "model")));
    QLORA__TRY(
        qlora__text_load_added(env, tok, json, qlora__text_json_get(json, root, "added_tokens")));
    QLORA__TRY(
        qlora__text_load_post(env, tok, json, qlora__text_json_get(json, root, "post_processor")));
    QLORA__TRY(
        qlora__text_load_decoder(env, tok, json, qlora__text_json_get(json, root, "decoder")));
    tok->cut_safe = qlora__text_cut_is_safe(tok);
    return QLORA_OK;
}

static qlora_result qlora__text_load_json(qlora__env* env, qlora_text_tok* tok, const char* name,
                                          const char* data, size_t size) {
    qlora__json json;
    QLORA__TRY(qlora__text_json(env, name, data, size, &json));
    // Each word of the vocabulary has at least two JSON tokens. There is a table entry per id, so
    // that a single large id would cost much more memory than the file.
    tok->id_limit = (int64_t)json.count + QLORA__TEXT_MAX_GAP;
    tok->id_limit = tok->id_limit < QLORA__TEXT_MAX_ID ? tok->id_limit : QLORA__TEXT_MAX_ID;
    qlora_result r = qlora__text_load_parts(env, tok, &json);
    qlora__json_free(env, &json);
    return r == QLORA_OK ? r : qlora__env_wrap(env, r, "%s: ", name);
}

//@@ src/text/load_scored.h

// ---- vocabularies whose tokens have scores: SentencePiece models --------------------------------

typedef struct qlora__text_scored {
    float score;
    int32_t id;
} qlora__text_scored;

static int qlora__text_scored_compare(const void* a, const void* b) {
    float x = ((const qlora__text_scored*)a)->score;
    float y = ((const qlora__text_scored*)b)->score;
    return x > y ? -1 : x < y ? 1 : 0;
}

// Every split of a token into two others is a merge; a better score is a lower rank.
static qlora_result qlora__text_load_scored_merges(qlora__env* env, qlora_text_tok* tok,
                                                   qlora__text_scored* scored, size_t count) {
    qsort(scored, count, sizeof(scored[0]), qlora__text_scored_compare);
    uint32_t rank = 0;
    for (size_t i = 0; i < count; i++) {
        rank += i > 0 && scored[i].score < scored[i - 1].score ? 1 : 0;
        qlora__text_span span = tok->spans[scored[i].id];
        for (uint32_t left = 1; left < span.size; left++) {
            const char* name = tok->names.data + span.at;
            int32_t a = qlora__text_words_find(&tok->words, name, left);
            int32_t b =
                a < 0 ? -1 : qlora__text_words_find(&tok->words, name + left, span.size - left);
            if (b >= 0) {
                QLORA__TRY(qlora__text_pairs_put(env, &tok->merges, (uint32_t)a, (uint32_t)b, rank,
                                                 (uint32_t)scored[i].id));
            }
        }
    }
    return QLORA_OK;
}

//@@ src/text/load_gguf.h

// ---- the tokenizer in a GGUF file ---------------------------------------------------------------

// The patterns behind the names of tokenizer.ggml.pre. Several patterns of one name are applied in
// turn, each to the pieces that the one before left.
#define QLORA__TEXT_GGUF_PATTERNS 6

typedef struct qlora__text_pre {
    const char* names; // separated and surrounded by blanks
    const char* patterns[QLORA__TEXT_GGUF_PATTERNS];
    bool ignore_merges;
    bool add_bos;
} qlora__text_pre;

#define QLORA__TEXT_G_GPT2 "'s|'t|'re|'ve|'m|'ll|'d" QLORA__TEXT_R_GPT2
#define QLORA__TEXT_G_LLAMA3 QLORA__TEXT_R_ASCII QLORA__TEXT_R_WORD "\\p{N}{1,3}" QLORA__TEXT_R_REST
#define QLORA__TEXT_G_CJK "[\\x{4e00}-\\x{9fa5}\\x{800}-\\x{4e00}\\x{ac00}-\\x{d7ff}]+"
#define QLORA__TEXT_G_KANA "[\\x{4e00}-\\x{9fa5}\\x{3040}-\\x{309f}\\x{30a0}-\\x{30ff}]+"
// Cased letters, as the pattern of the first DeepSeek models lists them.
#define QLORA__TEXT_G_CASED                                                                        \
    "\\x{41}-\\x{5a}\\x{61}-\\x{7a}\\x{b5}\\x{c0}-\\x{d6}\\x{d8}-\\x{f6}\\x{f8}-\\x{1ba}"          \
    "\\x{1bc}-\\x{1bf}\\x{1c4}-\\x{293}\\x{295}-\\x{2af}\\x{370}-\\x{373}\\x{376}\\x{377}"         \
    "\\x{37b}-\\x{37d}\\x{37f}\\x{386}\\x{388}-\\x{38a}\\x{38c}\\x{38e}-\\x{3a1}"                  \
    "\\x{3a3}-\\x{3f5}\\x{3f7}-\\x{481}\\x{48a}-\\x{52f}\\x{531}-\\x{556}\\x{10a0}-\\x{10c5}"      \
    "\\x{13a0}-\\x{13f5}\\x{13f8}-\\x{13fd}\\x{1c90}-\\x{1cba}\\x{1cbd}-\\x{1cbf}"                 \
    "\\x{1d00}-\\x{1d2b}\\x{1d6b}-\\x{1d77}\\x{1d79}-\\x{1d9a}\\x{1e00}-\\x{1f15}"                 \
    "\\x{1f18}-\\x{1f1d}\\x{1f20}-\\x{1f45}\\x{1f48}-\\x{1f4d}\\x{1f50}-\\x{1f57}\\x{1f59}"        \
    "\\x{1f5b}\\x{1f5d}\\x{1f5f}-\\x{1f7d}\\x{1f80}-\\x{1fb4}\\x{1fb6}-\\x{1fbc}\\x{1fbe}"         \
    "\\x{1fc2}-\\x{1fc4}\\x{1fc6}-\\x{1fcc}\\x{1fd0}-\\x{1fd3}\\x{1fd6}-\\x{1fdb}"                 \
    "\\x{1fe0}-\\x{1fec}\\x{1ff2}-\\x{1ff4}\\x{1ff6}-\\x{1ffc}\\x{2102}\\x{2107}"                  \
    "\\x{210a}-\\x{2113}\\x{2115}\\x{2119}-\\x{211d}\\x{2124}\\x{2126}\\x{2128}"                   \
    "\\x{212a}-\\x{212d}\\x{212f}-\\x{2134}\\x{2139}\\x{213c}-\\x{213f}\\x{2145}-\\x{2149}"        \
    "\\x{214e}\\x{2183}\\x{2184}\\x{2c00}-\\x{2c7b}\\x{2c7e}-\\x{2ce4}\\x{2ceb}-\\x{2cee}"         \
    "\\x{2cf2}\\x{2cf3}\\x{a640}-\\x{a66d}\\x{a680}-\\x{a69b}\\x{a722}-\\x{a76f}"                  \
    "\\x{a771}-\\x{a787}\\x{a78b}-\\x{a78e}\\x{ab70}-\\x{abbf}\\x{fb00}-\\x{fb06}"                 \
    "\\x{fb13}-\\x{fb17}\\x{ff21}-\\x{ff3a}\\x{ff41}-\\x{ff5a}\\x{10400}-\\x{1044f}"               \
    "\\x{104b0}-\\x{104d3}\\x{104d8}-\\x{104fb}\\x{10c80}-\\x{10cb2}\\x{10cc0}-\\x{10cf2}"         \
    "\\x{118a0}-\\x{118df}\\x{1e900}-\\x{1e943}"

static const qlora__text_pre qlora__text_pres[] = {
    {" llama-bpe llama3 llama-v3 falcon3 pixtral lfm2 ",
     {QLORA__TEXT_G_LLAMA3, NULL, NULL, NULL, NULL, NULL},
     true,
     true},
    {" smaug-bpe dbrx glm4 chatglm-bpe ",
     {QLORA__TEXT_G_LLAMA3, NULL, NULL, NULL, NULL, NULL},
     false,
     false},
    {" qwen2 deepseek-r1-qwen stablelm2 ",
     {QLORA__TEXT_R_ASCII QLORA__TEXT_R_WORD "\\p{N}" QLORA__TEXT_R_REST, NULL, NULL, NULL, NULL,
      NULL},
     false,
     false},
    {" qwen35 ",
     {QLORA__TEXT_R_ASCII QLORA__TEXT_R_MARKS, NULL, NULL, NULL, NULL, NULL},
     false,
     false},
    {" tekken ",
     {QLORA__TEXT_R_CASED("") "\\p{N}" QLORA__TEXT_R_REST3, NULL, NULL, NULL, NULL, NULL},
     true,
     true},
    {" gpt-4o llama4 ",
     {QLORA__TEXT_R_CASED(QLORA__TEXT_R_ASCII "?") "\\p{N}{1,3}" QLORA__TEXT_R_REST3, NULL, NULL,
      NULL, NULL, NULL},
     false,
     false},
    {" gpt-2 phi-2 olmo exaone4 jais mpt ",
     {QLORA__TEXT_G_GPT2, NULL, NULL, NULL, NULL, NULL},
     false,
     false},
    {" refact starcoder smollm command-r exaone codeshell ",
     {"\\p{N}", QLORA__TEXT_G_GPT2, NULL, NULL, NULL, NULL},
     false,
     false},
    {" seed-coder ",
     {QLORA__TEXT_R_ASCII QLORA__TEXT_R_WORD
      "\\p{N}{1}| ?[^\\s\\p{L}\\p{N}\\r\\n]+" QLORA__TEXT_R_LINES,
      NULL, NULL, NULL, NULL, NULL},
     false,
     false},
    {" deepseek-v3 ",
     {"\\p{N}{1,3}", QLORA__TEXT_G_KANA, QLORA__TEXT_R_DEEPSEEK3, NULL, NULL, NULL},
     false,
     false},
    {" deepseek-llm ",
     {"[\\r\\n]", "\\s?[" QLORA__TEXT_G_CASED "]+",
      "\\s?[!-/:-~\\x{ff01}-\\x{ff0f}\\x{ff1a}-\\x{ff5e}\\x{2018}-\\x{201f}\\x{3000}-\\x{3002}]+",
      "\\s+$", QLORA__TEXT_G_CJK, "\\p{N}+"},
     false,
     false},
    {" deepseek-coder ",
     {"[\\r\\n]", "\\s?\\p{L}+", "\\s?\\p{P}+", QLORA__TEXT_G_CJK, "\\p{N}", NULL},
     false,
     false},
    {" default ",
     {"[\\p{P}\\$\\+<=>\\^~\\|]+", QLORA__TEXT_G_GPT2, "\\p{N}+", "[0-9][0-9][0-9]", NULL, NULL},
     false,
     false},
};

static const qlora__text_pre* qlora__text_pre_find(const char* name, size_t size) {
    char word[66];
    if (name == NULL) {
        name = "default";
        size = 7;
    }
    if (size == 0 || size > 64) {
        return NULL;
    }
    word[0] = ' ';
    memcpy(word + 1, name, size);
    word[size + 1] = ' ';
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__text_pres); i++) {
        const char* at = qlora__text_pres[i].names;
        size_t room = strlen(at);
        for (size_t k = 0; k + size + 2 <= room; k++) {
            if (memcmp(at + k, word, size + 2) == 0) {
                return &qlora__text_pres[i];
            }
        }
    }
    return NULL;
}

// ---- tokens -------------------------------------------------------------------------------------

// tokenizer.ggml.token_type
enum {
    QLORA__TEXT_T_NORMAL = 1,
    QLORA__TEXT_T_UNKNOWN = 2,
    QLORA__TEXT_T_CONTROL = 3,
    QLORA__TEXT_T_USER = 4,
    QLORA__TEXT_T_UNUSED = 5,
    QLORA__TEXT_T_BYTE = 6
};

typedef struct qlora__text_gguf {
    qlora__env* env;
    qlora_text_tok* tok;
    const qlora__gguf* g;
    const qlora__gguf_value* tokens;
    const qlora__gguf_value* types;  // NULL: all normal
    const qlora__gguf_value* scores; // NULL: none
    bool pieces;                     // SentencePiece, not byte-level BPE
    bool phi3;
} qlora__text_gguf;

// A token that is found in a text before the model splits it.
static qlora_result qlora__text_gguf_added(const qlora__text_gguf* t, int32_t id, int64_t type) {
    qlora_text_tok* tok = t->tok;
    void* data = tok->added;
    qlora_result r = qlora__text_reserve(t->env, &data, &tok->added_capacity, tok->added_count, 1,
                                         sizeof *tok->added);
    tok->added = (qlora__text_added*)data;
    QLORA__TRY(r);
    qlora__text_added* added = &tok->added[tok->added_count];
    memset(added, 0, sizeof *added);
    added->special = type != QLORA__TEXT_T_USER;
    added->id = id;
    added->name = tok->spans[id];
    const char* name = tok->names.data + added->name.at;
    // llama.cpp treats files of this name so, whatever they say; their tokenizer.json agrees.
    added->strip_right = t->phi3 && !qlora__gguf_is(name, added->name.size, "<unk>") &&
                         !qlora__gguf_is(name, added->name.size, "<s>") &&
                         !qlora__gguf_is(name, added->name.size, "<|endoftext|>");
    tok->kinds[id] = (uint8_t)(tok->kinds[id] | QLORA__TEXT_K_ADDED |
                               (added->special ? QLORA__TEXT_K_SPECIAL : 0));
    tok->added_count++;
    return qlora__text_trie_add(t->env, &tok->raw_trie, name, added->name.size,
                                (uint32_t)tok->added_count - 1);
}

// llama.cpp takes these ends of a text or a turn for special tokens, whatever their type is.
static bool qlora__text_gguf_is_end(const char* name, size_t size) {
    static const char* const ends[] = {
        "</s>",       "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>",
        "<|eom_id|>", "<|end|>",       "<end_of_turn>",   "<EOT>",      "[EOT]"};
    for (size_t i = 0; i < QLORA__TEXT_COUNT(ends); i++) {
        if (qlora__gguf_is(name, size, ends[i])) {
            return true;
        }
    }
    return false;
}

static qlora_result qlora__text_gguf_token_add(const qlora__text_gguf* t, int32_t id,
                                               const char* name, size_t size, int64_t type) {
    qlora_text_tok* tok = t->tok;
    // In byte-level files, added tokens are spelt plainly, so they are not words of the model.
    bool word = t->pieces || type == QLORA__TEXT_T_NORMAL || type == QLORA__TEXT_T_BYTE;
    type = qlora__text_gguf_is_end(name, size) ? (int64_t)QLORA__TEXT_T_CONTROL : type;
    bool added = type == QLORA__TEXT_T_CONTROL || type == QLORA__TEXT_T_USER ||
                 type == QLORA__TEXT_T_UNKNOWN;
    if (added && size > QLORA__TEXT_MAX_ADDED) {
        return qlora__env_fail(t->env, QLORA_ERR_FORMAT,
                               "token %d is special and has %llu bytes; the limit is %d", (int)id,
                               (unsigned long long)size, QLORA__TEXT_MAX_ADDED);
    }
    if (word && size > 0) {
        QLORA__TRY(qlora__text_tok_word(t->env, tok, name, size, id));
    } else {
        QLORA__TRY(qlora__text_tok_name(t->env, tok, id, name, size, 0));
    }
    return added && size > 0 ? qlora__text_gguf_added(t, id, type) : QLORA_OK;
}

static qlora_result qlora__text_gguf_tokens(const qlora__text_gguf* t) {
    uint64_t at = 0;
    QLORA__TRY(qlora__text_words_reserve(t->env, &t->tok->words, (size_t)t->tokens->count));
    for (uint64_t i = 0; i < t->tokens->count; i++) {
        size_t size = 0;
        int64_t type = QLORA__TEXT_T_NORMAL;
        const char* name = qlora__gguf_next_string(t->tokens, &at, &size);
        if (t->types != NULL && (!qlora__gguf_integer(t->types, i, &type) ||
                                 type < QLORA__TEXT_T_NORMAL || type > QLORA__TEXT_T_BYTE)) {
            return qlora__env_fail(t->env, QLORA_ERR_FORMAT,
                                   "tokenizer.ggml.token_type[%llu] is %lld; it must be 1 to 6",
                                   (unsigned long long)i, (long long)type);
        }
        QLORA__TRY(qlora__text_gguf_token_add(t, (int32_t)i, name, size, type));
    }
    for (unsigned b = 0; b < 256; b++) {
        char byte = (char)(unsigned char)b;
        t->tok->byte_ids[b] = qlora__text_words_find(&t->tok->words, &byte, 1);
    }
    return QLORA_OK;
}

// ---- models -------------------------------------------------------------------------------------

// SentencePiece: any two neighbours whose text is a token are joined, the best score first.
static qlora_result qlora__text_gguf_scores(const qlora__text_gguf* t, qlora__text_scored* scored) {
    size_t count = 0;
    for (uint64_t i = 0; i < t->tokens->count; i++) {
        double score = 0.0;
        int64_t whole = 0;
        if (qlora__gguf_integer(t->scores, i, &whole)) { // some files have integers
            score = (double)whole;
        } else if (!qlora__gguf_real(t->scores, i, &score) || !(score > -1e30 && score < 1e30)) {
            return qlora__env_fail(t->env, QLORA_ERR_FORMAT,
                                   "tokenizer.ggml.scores[%llu] is not a finite number",
                                   (unsigned long long)i);
        }
        if (t->tok->spans[i].size > 0 && (t->tok->kinds[i] & QLORA__TEXT_K_BYTE) == 0) {
            scored[count].score = (float)score;
            scored[count].id = (int32_t)i;
            count++;
        }
    }
    return qlora__text_load_scored_merges(t->env, t->tok, scored, count);
}

static qlora_result qlora__text_gguf_pieces(const qlora__text_gguf* t) {
    size_t room = (size_t)t->tokens->count;
    qlora__text_scored* scored =
        (qlora__text_scored*)qlora__text_zalloc(t->env, room, sizeof *scored);
    if (scored == NULL) {
        return QLORA_ERR_MEMORY;
    }
    qlora_result r = qlora__text_gguf_scores(t, scored);
    qlora__env_free(t->env, scored, room * sizeof *scored);
    return r;
}

// Byte-level BPE: "left right", divided at the first blank that is not the first character.
static qlora_result qlora__text_gguf_merges(const qlora__text_gguf* t) {
    const qlora__gguf_value* merges = NULL;
    uint64_t at = 0;
    QLORA__TRY(qlora__gguf_get_array(t->env, t->g, "tokenizer.ggml.merges", QLORA__GGUF_STRING,
                                     true, &merges));
    if (merges->count > UINT32_MAX) {
        return qlora__env_fail(t->env, QLORA_ERR_FORMAT, "tokenizer.ggml.merges is too long");
    }
    QLORA__TRY(qlora__text_pairs_reserve(t->env, &t->tok->merges, (size_t)merges->count));
    for (uint64_t i = 0; i < merges->count; i++) {
        size_t size = 0;
        const char* merge = qlora__gguf_next_string(merges, &at, &size);
        const char* blank = size > 1 ? (const char*)memchr(merge + 1, ' ', size - 1) : NULL;
        qlora_result r = QLORA_OK;
        if (blank == NULL) {
            r = qlora__env_fail(t->env, QLORA_ERR_FORMAT, "has no blank between its two parts");
        } else {
            const char* const halves[2] = {merge, blank + 1};
            const size_t sizes[2] = {(size_t)(blank - merge), size - (size_t)(blank - merge) - 1};
            r = qlora__text_put_merge(t->env, t->tok, halves, sizes, (uint32_t)i);
        }
        if (r != QLORA_OK) {
            return qlora__env_wrap(t->env, r, "tokenizer.ggml.merges[%llu] ",
                                   (unsigned long long)i);
        }
    }
    return QLORA_OK;
}

// ---- the steps around the model -----------------------------------------------------------------

// Blanks become U+2581; one is put in front of a text and after a special token.
static qlora_result qlora__text_gguf_piece_steps(const qlora__text_gguf* t) {
    qlora__env* env = t->env;
    qlora_text_tok* tok = t->tok;
    qlora__text_step* step = NULL;
    bool prefix = true;
    QLORA__TRY(qlora__gguf_get_bool(env, t->g, "tokenizer.ggml.add_space_prefix", true, &prefix));
    if (prefix) {
        QLORA__TRY(qlora__text_steps_add(env, &tok->normalizer, QLORA__TEXT_N_PREPEND, &step));
        QLORA__TRY(qlora__text_copy(env, " ", 1, &step->a, &step->a_size));
    }
    QLORA__TRY(qlora__text_steps_add(env, &tok->normalizer, QLORA__TEXT_N_REPLACE, &step));
    QLORA__TRY(qlora__text_copy(env, " ", 1, &step->a, &step->a_size));
    QLORA__TRY(qlora__text_copy(env, "\xE2\x96\x81", 3, &step->b, &step->b_size));
    QLORA__TRY(qlora__text_steps_add(env, &tok->decoder, QLORA__TEXT_D_REPLACE, &step));
    QLORA__TRY(qlora__text_copy(env, "\xE2\x96\x81", 3, &step->a, &step->a_size));
    QLORA__TRY(qlora__text_copy(env, " ", 1, &step->b, &step->b_size));
    QLORA__TRY(qlora__text_steps_add(env, &tok->decoder, QLORA__TEXT_D_BYTE_FALLBACK, &step));
    QLORA__TRY(qlora__text_steps_add(env, &tok->decoder, QLORA__TEXT_D_FUSE, &step));
    if (!prefix) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__text_steps_add(env, &tok->decoder, QLORA__TEXT_D_STRIP, &step));
    step->start = 1;
    return qlora__text_copy(env, " ", 1, &step->a, &step->a_size);
}

static qlora_result qlora__text_gguf_byte_steps(const qlora__text_gguf* t,
                                                const qlora__text_pre* pre) {
    qlora__env* env = t->env;
    qlora_text_tok* tok = t->tok;
    qlora__text_step* step = NULL;
    bool prefix = false;
    QLORA__TRY(qlora__gguf_get_bool(env, t->g, "tokenizer.ggml.add_space_prefix", false, &prefix));
    if (prefix) {
        QLORA__TRY(qlora__text_steps_add(env, &tok->splitter, QLORA__TEXT_P_PREFIX_SPACE, &step));
    }
    for (int i = 0; i < QLORA__TEXT_GGUF_PATTERNS && pre->patterns[i] != NULL; i++) {
        QLORA__TRY(qlora__text_steps_add(env, &tok->splitter, QLORA__TEXT_P_REGEX, &step));
        QLORA__TRY(
            qlora__text_step_regex(env, tok, pre->patterns[i], strlen(pre->patterns[i]), step));
    }
    tok->byte_level = true;
    QLORA__TRY(qlora__text_steps_add(env, &tok->splitter, QLORA__TEXT_P_BYTES, &step));
    return qlora__text_steps_add(env, &tok->decoder, QLORA__TEXT_D_BYTES, &step);
}

// What is added before and after a text.
static qlora_result qlora__text_gguf_ends(const qlora__text_gguf* t, bool bos_by_default) {
    const struct {
        const char* flag;
        const char* key;
        bool fallback;
        int64_t id; // if the key is absent
        qlora_text_ids* out;
    } ends[] = {{"tokenizer.ggml.add_bos_token", "tokenizer.ggml.bos_token_id", bos_by_default,
                 t->pieces ? 1 : -1, &t->tok->prefix},
                {"tokenizer.ggml.add_eos_token", "tokenizer.ggml.eos_token_id", false,
                 t->pieces ? 2 : -1, &t->tok->suffix}};
    for (int i = 0; i < 2; i++) {
        bool add = false;
        int64_t id = ends[i].id;
        QLORA__TRY(qlora__gguf_get_bool(t->env, t->g, ends[i].flag, ends[i].fallback, &add));
        if (!add) {
            continue;
        }
        QLORA__TRY(qlora__gguf_get_int(t->env, t->g, ends[i].key, id, 0,
                                       (int64_t)t->tokens->count - 1, &id));
        QLORA__TRY(qlora__text_ids_add(t->env, ends[i].out, (int32_t)id));
    }
    return QLORA_OK;
}

static bool qlora__text_has_word(const char* text, size_t size, const char* word) {
    size_t n = strlen(word);
    for (size_t i = 0; text != NULL && i + n <= size; i++) {
        size_t k = 0;
        while (k < n && (text[i + k] | 0x20) == word[k]) {
            k++;
        }
        if (k == n) {
            return true;
        }
    }
    return false;
}

static qlora_result qlora__text_gguf_begin(qlora__text_gguf* t) {
    const qlora__gguf* g = t->g;
    const char* model = NULL;
    const char* name = NULL;
    size_t size = 0;
    QLORA__TRY(qlora__gguf_get_string(t->env, g, "tokenizer.ggml.model", true, &model, &size));
    t->pieces = qlora__gguf_is(model, size, "llama");
    if (!t->pieces && !qlora__gguf_is(model, size, "gpt2")) {
        return qlora__env_fail(t->env, QLORA_ERR_UNSUPPORTED,
                               "%s: tokenizer.ggml.model \"%.*s\" is not supported; supported are "
                               "llama (SentencePiece) and gpt2 (byte-level BPE)",
                               g->label, qlora__gguf_shown(size), model);
    }
    QLORA__TRY(qlora__gguf_get_array(t->env, g, "tokenizer.ggml.tokens", QLORA__GGUF_STRING, true,
                                     &t->tokens));
    if (t->tokens->count == 0 || t->tokens->count >= QLORA__TEXT_MAX_ID) {
        return qlora__env_fail(t->env, QLORA_ERR_FORMAT,
                               "%s: tokenizer.ggml.tokens has %llu tokens; it must have 1 to %d",
                               g->label, (unsigned long long)t->tokens->count,
                               QLORA__TEXT_MAX_ID - 1);
    }
    t->types = qlora__gguf_find(g, "tokenizer.ggml.token_type");
    t->scores = t->pieces ? qlora__gguf_find(g, "tokenizer.ggml.scores") : NULL;
    const struct {
        const char* key;
        const qlora__gguf_value* value;
    } lists[] = {{"tokenizer.ggml.token_type", t->types}, {"tokenizer.ggml.scores", t->scores}};
    for (int i = 0; i < 2; i++) {
        const qlora__gguf_value* v = lists[i].value;
        if (v != NULL && (v->kind != QLORA__GGUF_ARRAY || v->count != t->tokens->count)) {
            return qlora__env_fail(t->env, QLORA_ERR_FORMAT,
                                   "%s: %s must be an array with one number for each of the %llu "
                                   "tokens",
                                   g->label, lists[i].key, (unsigned long long)t->tokens->count);
        }
    }
    if (t->pieces && t->scores == NULL) {
        return qlora__env_fail(t->env, QLORA_ERR_FORMAT, "%s: tokenizer.ggml.scores is missing",
                               g->label);
    }
    QLORA__TRY(qlora__gguf_get_string(t->env, g, "general.name", false, &name, &size));
    t->phi3 = t->pieces && (qlora__text_has_word(name, size, "phi-3") ||
                            qlora__text_has_word(name, size, "phi3"));
    return QLORA_OK;
}

static qlora_result qlora__text_gguf_fill(qlora__text_gguf* t) {
    qlora_text_tok* tok = t->tok;
    const char* name = NULL;
    size_t size = 0;
    QLORA__TRY(qlora__text_gguf_begin(t));
    if (t->pieces) {
        int64_t unknown = 0;
        memcpy(tok->cut, "\xE2\x96\x81", 3);
        tok->cut_size = 3;
        tok->byte_fallback = true;
        QLORA__TRY(qlora__gguf_get_int(t->env, t->g, "tokenizer.ggml.unknown_token_id", 0, 0,
                                       (int64_t)t->tokens->count - 1, &unknown));
        tok->unknown = (int32_t)unknown;
        QLORA__TRY(qlora__text_gguf_piece_steps(t));
        QLORA__TRY(qlora__text_gguf_tokens(t));
        QLORA__TRY(qlora__text_gguf_pieces(t));
        tok->cut_safe = qlora__text_cut_is_safe(tok);
        return qlora__text_gguf_ends(t, true);
    }
    QLORA__TRY(qlora__gguf_get_string(t->env, t->g, "tokenizer.ggml.pre", false, &name, &size));
    const qlora__text_pre* pre = qlora__text_pre_find(name, size);
    if (pre == NULL) {
        return qlora__env_fail(t->env, QLORA_ERR_UNSUPPORTED,
                               "%s: tokenizer.ggml.pre \"%.*s\" is not known", t->g->label,
                               qlora__gguf_shown(size), name);
    }
    tok->ignore_merges = pre->ignore_merges;
    QLORA__TRY(qlora__text_gguf_byte_steps(t, pre));
    QLORA__TRY(qlora__text_gguf_tokens(t));
    QLORA__TRY(qlora__text_gguf_merges(t));
    return qlora__text_gguf_ends(t, pre->add_bos);
}

// Reads the tokenizer of a GGUF file in memory.
static qlora_result qlora__text_load_gguf(qlora__env* env, qlora_text_tok* tok, const char* label,
                                          const void* data, uint64_t size) {
    qlora__gguf g;
    qlora__text_gguf t;
    QLORA__TRY(qlora__gguf_parse(env, label, data, size, &g));
    memset(&t, 0, sizeof t);
    t.env = env;
    t.tok = tok;
    t.g = &g;
    qlora_result r = qlora__text_gguf_fill(&t);
    qlora__gguf_free(env, &g);
    return r;
}

//@@ src/text/load_bin.h

// ---- the .bin form: int32 longest token; then per id float score, int32 length, bytes

static uint32_t qlora__text_little32(const unsigned char* p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

enum { QLORA__TEXT_MAX_SCORED = 1024 };

// Reads names and words; `scored` receives the ids that merging can make. The first three ids are
// <unk>, <s> and </s>, whatever the file calls them.
static qlora_result qlora__text_load_scored(qlora__env* env, qlora_text_tok* tok,
                                            const unsigned char* p, size_t size,
                                            qlora__text_scored* scored, size_t* scored_count) {
    static const char* const control[] = {"<unk>", "<s>", "</s>"};
    size_t at = 4;
    for (int32_t id = 0; at < size; id++) {
        uint32_t length = size - at >= 8 ? qlora__text_little32(p + at + 4) : UINT32_MAX;
        if (size - at < 8 || length > QLORA__TEXT_MAX_SCORED || length > size - at - 8) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "token %d: invalid length, or the file is truncated", (int)id);
        }
        uint32_t bits = qlora__text_little32(p + at);
        float score;
        memcpy(&score, &bits, sizeof(score));
        if (!(score > -1e30f && score < 1e30f)) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "token %d: the score is not a finite number", (int)id);
        }
        const char* name = (const char*)p + at + 8;
        if (id < 3) {
            QLORA__TRY(qlora__text_tok_name(env, tok, id, control[id], strlen(control[id]),
                                            QLORA__TEXT_K_SPECIAL));
        } else {
            QLORA__TRY(qlora__text_tok_word(env, tok, name, length, id));
            if (length > 0 && !(tok->kinds[id] & QLORA__TEXT_K_BYTE)) {
                scored[*scored_count].score = score;
                scored[*scored_count].id = id;
                (*scored_count)++;
            }
        }
        at += 8 + length;
    }
    return tok->count > 3 ? QLORA_OK
                          : qlora__env_fail(env, QLORA_ERR_FORMAT, "the file contains no tokens");
}

static qlora_result qlora__text_load_bin_steps(qlora__env* env, qlora_text_tok* tok) {
    qlora__text_step* step = NULL;
    QLORA__TRY(qlora__text_steps_add(env, &tok->normalizer, QLORA__TEXT_N_PREPEND, &step));
    QLORA__TRY(qlora__text_copy(env, " ", 1, &step->a, &step->a_size));
    QLORA__TRY(qlora__text_steps_add(env, &tok->decoder, QLORA__TEXT_D_BYTE_FALLBACK, &step));
    QLORA__TRY(qlora__text_steps_add(env, &tok->decoder, QLORA__TEXT_D_FUSE, &step));
    QLORA__TRY(qlora__text_steps_add(env, &tok->decoder, QLORA__TEXT_D_STRIP, &step));
    step->start = 1;
    QLORA__TRY(qlora__text_copy(env, " ", 1, &step->a, &step->a_size));
    return qlora__text_ids_add(env, &tok->prefix, 1);
}

static qlora_result qlora__text_load_bin(qlora__env* env, qlora_text_tok* tok, const char* file,
                                         const char* data, size_t size) {
    const unsigned char* p = (const unsigned char*)data;
    if (size < 4 || qlora__text_little32(p) == 0 ||
        qlora__text_little32(p) > QLORA__TEXT_MAX_SCORED) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: neither a tokenizer.json nor a tokenizer.bin of llama2.c",
                               file);
    }
    tok->byte_fallback = true;
    tok->fuse_unknown = true;
    tok->unknown = 0;
    tok->cut[0] = ' ';
    tok->cut_size = 1;
    size_t room = size / 8 + 1;
    qlora__text_scored* scored =
        (qlora__text_scored*)qlora__text_zalloc(env, room, sizeof(qlora__text_scored));
    if (scored == NULL) {
        return QLORA_ERR_MEMORY;
    }
    size_t count = 0;
    qlora_result r = qlora__text_load_scored(env, tok, p, size, scored, &count);
    r = r == QLORA_OK ? qlora__text_load_scored_merges(env, tok, scored, count) : r;
    r = r == QLORA_OK ? qlora__text_load_bin_steps(env, tok) : r;
    qlora__env_free(env, scored, room * sizeof *scored);
    if (r != QLORA_OK) {
        return qlora__env_wrap(env, r, "%s: ", file);
    }
    for (unsigned b = 0; b < 256; b++) {
        char byte = (char)(unsigned char)b;
        tok->byte_ids[b] = qlora__text_words_find(&tok->words, &byte, 1);
    }
    tok->cut_safe = qlora__text_cut_is_safe(tok);
    return QLORA_OK;
}

// ---- opening and asking

static qlora_result qlora__text_tok_load(qlora_text* text, const char* name, const char* data,
                                         size_t size, qlora_text_tok** out) {
    qlora__env* env = &text->env;
    qlora_text_tok* tok = NULL;
    QLORA__TRY(qlora__text_tok_new(text, &tok));
    // the .bin starts with a small number, so its fourth byte is zero
    bool binary = size >= 4 && data[3] == 0;
    bool gguf = size >= 4 && memcmp(data, "GGUF", 4) == 0;
    qlora_result r = gguf     ? qlora__text_load_gguf(env, tok, name, data, size)
                     : binary ? qlora__text_load_bin(env, tok, name, data, size)
                              : qlora__text_load_json(env, tok, name, data, size);
    if (r != QLORA_OK) {
        qlora__text_tok_free(env, tok);
        return r;
    }
    QLORA__TEXT_LOG(env, INFO, "%s: %llu tokens", name, (unsigned long long)tok->count);
    text->toks++;
    *out = tok;
    return QLORA_OK;
}

static qlora_result qlora__text_tok_open(qlora_text* text, const char* path, qlora_text_bytes* file,
                                         qlora_text_tok** out) {
    static const char* const names[] = {"tokenizer.json", "tokenizer.bin", "tok512.bin"};
    qlora__env* env = &text->env;
    bool found = false;
    if (qlora__gguf_path(path)) { // may be large: it is mapped, not read
        qlora__map map;
        QLORA__TRY(qlora__map_open(env, path, &map));
        qlora_result r =
            qlora__text_tok_load(text, path, (const char*)map.data, (size_t)map.size, out);
        qlora__map_close(env, &map);
        return r;
    }
    for (size_t i = 0; !found && i < QLORA__TEXT_COUNT(names); i++) {
        QLORA__TRY(qlora__text_folder_read(env, path, names[i], file, &found));
    }
    if (!found) {
        qlora_result r = qlora__text_file_read(env, path, file, &found);
        if (r == QLORA_OK && !found) {
            r = qlora__env_fail(env, QLORA_ERR_FILE, "cannot read %s: %s (%d)", path,
                                qlora__errno_text(ENOENT), ENOENT);
        } else if (r == QLORA_ERR_FILE && found) { // a folder can be opened, but not read
            r = qlora__env_fail(env, QLORA_ERR_FILE,
                                "%s: no tokenizer found (tokenizer.json, tokenizer.bin or "
                                "tok512.bin)",
                                path);
        }
        QLORA__TRY(r);
    }
    return qlora__text_tok_load(text, path, file->data, file->count, out);
}

qlora_result qlora_text_tok_load(qlora_text* text, const char* name, const void* data, size_t size,
                                 qlora_text_tok** out) {
    if (text == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__text_enter(text, "qlora_text_tok_load");
    QLORA__TEXT_NEED(&text->env, name);
    QLORA__TEXT_NEED(&text->env, out);
    if (data == NULL && size > 0) {
        return qlora__env_fail(&text->env, QLORA_ERR_ARGUMENT, "data is NULL");
    }
    return qlora__text_tok_load(text, name, (const char*)data, size, out);
}

qlora_result qlora_text_tok_open(qlora_text* text, const char* path, qlora_text_tok** out) {
    if (text == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__text_enter(text, "qlora_text_tok_open");
    QLORA__TEXT_NEED(&text->env, path);
    QLORA__TEXT_NEED(&text->env, out);
    qlora_text_bytes file;
    memset(&file, 0, sizeof(file));
    qlora_result r = qlora__text_tok_open(text, path, &file, out);
    qlora__text_bytes_free(&text->env, &file);
    return r;
}

qlora_result qlora_text_tok_close(qlora_text_tok* tok) {
    if (tok == NULL) {
        return QLORA_OK;
    }
    qlora_text* text = tok->text;
    qlora__text_enter(text, "qlora_text_tok_close");
    if (tok->users > 0) {
        return qlora__env_fail(
            &text->env, QLORA_ERR_STATE,
            "chats that use this tokenizer are still open: %lld; close them first",
            (long long)tok->users);
    }
    qlora__text_tok_free(&text->env, tok);
    text->toks--;
    return QLORA_OK;
}

static bool qlora__text_tok_has(const qlora_text_tok* tok, int32_t id, unsigned kind) {
    return id >= 0 && (size_t)id < tok->count && (tok->kinds[id] & kind) != 0;
}

static int32_t qlora__text_tok_bos(const qlora_text_tok* tok) {
    return tok->prefix.count > 0 ? tok->prefix.data[0] : -1;
}

qlora_result qlora_text_tok_query(qlora_text_tok* tok, qlora_text_tok_info* out) {
    if (tok == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__text_enter(tok->text, "qlora_text_tok_query");
    QLORA__TEXT_NEED(&tok->text->env, out);
    out->count = (int32_t)tok->count;
    out->bos = qlora__text_tok_bos(tok);
    return QLORA_OK;
}

qlora_result qlora_text_token_query(qlora_text_tok* tok, int32_t id, qlora_text_token_info* out) {
    if (tok == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__text_enter(tok->text, "qlora_text_token_query");
    QLORA__TEXT_NEED(&tok->text->env, out);
    if (!qlora__text_tok_has(tok, id, QLORA__TEXT_K_EXISTS)) {
        return qlora__env_fail(&tok->text->env, QLORA_ERR_ARGUMENT,
                               "the tokenizer has no token with id %d", (int)id);
    }
    out->name = tok->names.data + tok->spans[id].at;
    out->length = tok->spans[id].size;
    out->special = qlora__text_tok_has(tok, id, QLORA__TEXT_K_SPECIAL);
    out->added = qlora__text_tok_has(tok, id, QLORA__TEXT_K_ADDED);
    return QLORA_OK;
}

static bool qlora__text_name_is(const qlora_text_tok* tok, int32_t id, const char* name,
                                size_t size) {
    return qlora__text_tok_has(tok, id, QLORA__TEXT_K_EXISTS) && tok->spans[id].size == size &&
           memcmp(tok->names.data + tok->spans[id].at, name, size) == 0;
}

static int32_t qlora__text_tok_find(const qlora_text_tok* tok, const char* token) {
    size_t size = strlen(token);
    for (size_t i = 0; i < tok->added_count; i++) {
        qlora__text_span name = tok->added[i].name;
        if (name.size == size && memcmp(tok->names.data + name.at, token, size) == 0) {
            return tok->added[i].id;
        }
    }
    for (int32_t id = 0; id < 3; id++) { // the control tokens of a .bin
        if (qlora__text_tok_has(tok, id, QLORA__TEXT_K_SPECIAL) &&
            qlora__text_name_is(tok, id, token, size)) {
            return id;
        }
    }
    return size == 0 ? -1 : qlora__text_model_find(tok, token, size);
}

int32_t qlora_text_tok_find(const qlora_text_tok* tok, const char* token) {
    return tok != NULL && token != NULL ? qlora__text_tok_find(tok, token) : -1;
}

//@@ src/text/encode.h

// The steps that change the text: a space (or Metaspace's stand-in) before the pieces. `open` is
// false when nothing may be prepended to the first piece; `first`: it starts the whole text.
static qlora_result qlora__text_rewrite(qlora__env* env, const qlora__text_step* step,
                                        const char* text, qlora__text_pieces* pieces, bool first,
                                        bool open, qlora_text_bytes* out) {
    qlora__text_step spaces;
    memset(&spaces, 0, sizeof(spaces));
    char space[] = " ";
    spaces.a = space;
    spaces.a_size = 1;
    spaces.b = step->a;
    spaces.b_size = step->a_size;
    const char* put = step->kind == QLORA__TEXT_P_METASPACE ? step->a : " ";
    size_t put_size = step->kind == QLORA__TEXT_P_METASPACE ? step->a_size : 1;
    out->count = 0;
    for (size_t i = 0; i < pieces->count; i++) {
        qlora__text_piece* piece = &pieces->data[i];
        const char* from = text + piece->begin;
        size_t size = piece->end - piece->begin;
        bool there =
            size > 0 && (*from == ' ' || (size >= put_size && memcmp(from, put, put_size) == 0));
        bool want = step->kind == QLORA__TEXT_P_PREFIX_SPACE || step->always ||
                    (!step->never && first && i == 0);
        piece->begin = out->count;
        if (want && !there && (open || i > 0)) {
            QLORA__TRY(qlora__text_bytes_add(env, out, put, put_size));
        }
        if (step->kind == QLORA__TEXT_P_METASPACE) {
            QLORA__TRY(qlora__text_replace(env, from, size, &spaces, out));
        } else {
            QLORA__TRY(qlora__text_bytes_add(env, out, from, size));
        }
        piece->end = out->count;
    }
    return QLORA_OK;
}

// One splitting step over all pieces.
static qlora_result qlora__text_resplit(qlora__env* env, qlora_text_tok* tok,
                                        const qlora__text_step* step, qlora__text_view view,
                                        const qlora__text_pieces* in, qlora__text_pieces* out) {
    qlora__text_pieces* found = &tok->pieces[2];
    out->count = 0;
    for (size_t i = 0; i < in->count; i++) {
        view.end = in->data[i].end;
        size_t at = in->data[i].begin;
        if (step->behavior == QLORA__TEXT_B_ISOLATED) {
            QLORA__TRY(
                qlora__text_step_find(env, step, &view, in->data[i].begin, &at, view.end, out));
            continue;
        }
        found->count = 0;
        QLORA__TRY(
            qlora__text_step_find(env, step, &view, in->data[i].begin, &at, view.end, found));
        QLORA__TRY(qlora__text_step_merge(env, step->behavior, found, out));
    }
    return QLORA_OK;
}

// Applies the splitting steps from number `from` on to the pieces in tok->pieces[0], and encodes
// what results.
static qlora_result qlora__text_pieces_encode(qlora__env* env, qlora_text_tok* tok,
                                              qlora__text_view view, size_t from, bool first,
                                              bool open, qlora_text_ids* out) {
    qlora__text_pieces* now = &tok->pieces[0];
    qlora__text_pieces* then = &tok->pieces[1];
    size_t written = 0;
    for (size_t i = from; i < tok->splitter.count; i++) {
        const qlora__text_step* step = &tok->splitter.data[i];
        if (step->kind == QLORA__TEXT_P_BYTES) {
            view.code_of_byte = tok->code_of_byte;
            continue;
        }
        qlora__text_step after = *step;
        bool split = true;
        if (step->kind == QLORA__TEXT_P_METASPACE || step->kind == QLORA__TEXT_P_PREFIX_SPACE) {
            qlora_text_bytes* buffer = &tok->buffers[written++ % 2 == 0 ? 3 : 0];
            QLORA__TRY(
                qlora__text_rewrite(env, step, (const char*)view.s, now, first, open, buffer));
            view.s = (const unsigned char*)buffer->data;
            split = step->kind == QLORA__TEXT_P_METASPACE && step->invert;
            after.kind = QLORA__TEXT_P_STRING;
            after.behavior = QLORA__TEXT_B_NEXT;
            after.invert = false;
        }
        if (split) {
            QLORA__TRY(qlora__text_resplit(env, tok, &after, view, now, then));
            qlora__text_pieces* swap = now;
            now = then;
            then = swap;
        }
    }
    for (size_t i = 0; i < now->count; i++) {
        const qlora__text_piece* piece = &now->data[i];
        QLORA__TRY(qlora__text_piece_encode(env, tok, (const char*)view.s + piece->begin,
                                            piece->end - piece->begin, out));
    }
    return QLORA_OK;
}

enum { QLORA__TEXT_WINDOW = 1 << 16 }; // bytes that are split at a time

// Splits and encodes normalised text without added tokens. If the first step only cuts, later steps
// see each of its pieces alone; a long text is then split in windows, whose pieces would otherwise
// take more memory than the ids.
static qlora_result qlora__text_plain_encode(qlora__env* env, qlora_text_tok* tok, const char* text,
                                             size_t size, bool first, bool open,
                                             qlora_text_ids* out) {
    qlora__text_view view = qlora__text_view_of(tok, text, size);
    qlora__text_pieces* pieces = &tok->pieces[0];
    const qlora__text_step* cut = tok->splitter.count > 0 ? &tok->splitter.data[0] : NULL;
    if (cut == NULL || cut->behavior != QLORA__TEXT_B_ISOLATED ||
        cut->kind == QLORA__TEXT_P_METASPACE || cut->kind == QLORA__TEXT_P_PREFIX_SPACE ||
        cut->kind == QLORA__TEXT_P_BYTES) {
        pieces->count = 0;
        QLORA__TRY(qlora__text_pieces_add(env, pieces, 0, size, false));
        return qlora__text_pieces_encode(env, tok, view, 0, first, open, out);
    }
    for (size_t at = 0; at < size;) {
        bool start = at == 0;
        size_t stop = size - at < QLORA__TEXT_WINDOW ? size : at + QLORA__TEXT_WINDOW;
        pieces->count = 0;
        QLORA__TRY(qlora__text_step_find(env, cut, &view, 0, &at, stop, pieces));
        QLORA__TRY(
            qlora__text_pieces_encode(env, tok, view, 1, first && start, open || !start, out));
    }
    return QLORA_OK;
}

// Finds added tokens in a text: leftmost first, longest first.
typedef struct qlora__text_scan {
    const qlora__text_trie* trie;
    const char* text;
    size_t size;
    size_t at;
    size_t done;   // everything before it was returned
    size_t spaces; // end of the last white space seen
    const qlora__text_added* waiting;
    size_t waiting_end;
    bool literal;
} qlora__text_scan;

// The longest token that starts here, and its length.
static const qlora__text_added*
qlora__text_scan_here(const qlora_text_tok* tok, const qlora__text_scan* scan, size_t* length) {
    const qlora__text_added* found = NULL;
    uint32_t node = 0;
    for (size_t i = scan->at; i < scan->size; i++) {
        const qlora__text_pair* edge =
            qlora__text_pairs_find(&scan->trie->edges, node, (unsigned char)scan->text[i]);
        if (edge == NULL) {
            break;
        }
        node = edge->first;
        if (edge->second != 0) {
            found = &tok->added[edge->second - 1];
            *length = i + 1 - scan->at;
        }
    }
    return found;
}

// single_word: no word character on either side.
static bool qlora__text_scan_alone(const qlora_text_tok* tok, const qlora__text_scan* scan,
                                   size_t begin, size_t end) {
    const unsigned word = QLORA__TEXT_W | QLORA__TEXT_BIT(JOINER);
    qlora__text_view view = qlora__text_view_of(tok, scan->text, scan->size);
    size_t length;
    if (qlora__text_class_at(&view, end, &length) & word) {
        return false;
    }
    size_t start = begin;
    while (start > 0 && begin - start < 4) {
        start--;
        if (((unsigned char)scan->text[start] & 0xC0) != 0x80) {
            break;
        }
    }
    return begin == 0 || !(qlora__text_class_at(&view, start, &length) & word);
}

// The next stretch: plain text (*added is NULL) or a token. False at the end.
static bool qlora__text_scan_next(const qlora_text_tok* tok, qlora__text_scan* scan, size_t* begin,
                                  size_t* end, const qlora__text_added** added) {
    *added = scan->waiting;
    if (scan->waiting != NULL) {
        scan->waiting = NULL;
        *begin = scan->done;
        *end = scan->done = scan->waiting_end;
        return true;
    }
    while (scan->at < scan->size) {
        size_t length = 0;
        const qlora__text_added* found = NULL;
        if (scan->trie->starts[(unsigned char)scan->text[scan->at]]) {
            found = qlora__text_scan_here(tok, scan, &length);
        }
        if (found == NULL) {
            scan->at++;
            continue;
        }
        size_t start = scan->at;
        size_t stop = scan->at + length;
        scan->at = stop;
        if ((scan->literal && found->special) ||
            (found->single_word && !qlora__text_scan_alone(tok, scan, start, stop))) {
            continue;
        }
        if (found->strip_left) {
            start = qlora__text_space_before(tok, scan->text, scan->done, start);
        }
        if (found->strip_right) {
            if (stop >= scan->spaces) { // white space is scanned only once
                qlora__text_view view = qlora__text_view_of(tok, scan->text, scan->size);
                scan->spaces = qlora__text_run(&view, stop, QLORA__TEXT_WS);
            }
            stop = scan->spaces > stop ? scan->spaces : stop;
        }
        // Stripped white space may contain the next token. The library then returns to the end of
        // this one; so does this function.
        *begin = scan->done;
        if (start > scan->done) {
            scan->waiting = found;
            scan->waiting_end = stop;
            *end = scan->done = start;
            return true;
        }
        *added = found;
        *end = scan->done = stop;
        return true;
    }
    *begin = scan->done;
    *end = scan->done = scan->size;
    return *end > *begin;
}

static qlora__text_scan qlora__text_scan_of(const qlora__text_trie* trie, const char* text,
                                            size_t size, uint32_t flags) {
    qlora__text_scan scan;
    memset(&scan, 0, sizeof(scan));
    scan.trie = trie;
    scan.text = text;
    scan.size = size;
    scan.literal = (flags & QLORA_TEXT_LITERAL) != 0;
    return scan;
}

// Encodes the text between two tokens that were found in the original. `first`: it starts the text.
static qlora_result qlora__text_stretch_encode(qlora__env* env, qlora_text_tok* tok,
                                               const char* text, size_t size, bool first,
                                               uint32_t flags, qlora_text_ids* out) {
    bool open = !(first && (flags & QLORA_TEXT_CONTINUE));
    if (tok->normalizer.count > 0) {
        qlora_text_bytes* normal;
        QLORA__TRY(qlora__text_apply_normalizer(env, tok, text, size, open, &normal));
        text = normal->data;
        size = normal->count;
    }
    if (tok->normalized_trie.nodes == 0) {
        return size == 0 ? QLORA_OK
                         : qlora__text_plain_encode(env, tok, text, size, first, open, out);
    }
    qlora__text_scan scan = qlora__text_scan_of(&tok->normalized_trie, text, size, flags);
    size_t begin;
    size_t end;
    const qlora__text_added* added;
    while (qlora__text_scan_next(tok, &scan, &begin, &end, &added)) {
        if (added != NULL) {
            QLORA__TRY(qlora__text_ids_add(env, out, added->id));
        } else {
            bool start = begin == 0;
            QLORA__TRY(qlora__text_plain_encode(env, tok, text + begin, end - begin, first && start,
                                                open || !start, out));
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__text_ids_append(qlora__env* env, qlora_text_ids* ids,
                                           const qlora_text_ids* more) {
    QLORA__TRY(qlora__text_ids_room(env, ids, more->count));
    if (more->count > 0) {
        memcpy(ids->data + ids->count, more->data, more->count * sizeof(int32_t));
        ids->count += more->count;
    }
    return QLORA_OK;
}

// Text to ids, for the public call and for chats and data.
static qlora_result qlora__text_encode(qlora__env* env, qlora_text_tok* tok, const char* text,
                                       size_t length, uint32_t flags, qlora_text_ids* out) {
    if ((flags & QLORA_TEXT_SPECIAL) != 0) {
        QLORA__TRY(qlora__text_ids_append(env, out, &tok->prefix));
    }
    qlora__text_scan scan = qlora__text_scan_of(&tok->raw_trie, text, length, flags);
    size_t begin;
    size_t end;
    const qlora__text_added* added;
    while (qlora__text_scan_next(tok, &scan, &begin, &end, &added)) {
        if (added != NULL) {
            QLORA__TRY(qlora__text_ids_add(env, out, added->id));
        } else {
            QLORA__TRY(qlora__text_stretch_encode(env, tok, text + begin, end - begin, begin == 0,
                                                  flags, out));
        }
    }
    return (flags & QLORA_TEXT_SPECIAL) != 0 ? qlora__text_ids_append(env, out, &tok->suffix)
                                             : QLORA_OK;
}

qlora_result qlora_text_encode(qlora_text_tok* tok, const char* text, size_t length, uint32_t flags,
                               qlora_text_ids* out) {
    if (tok == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__env* env = &tok->text->env;
    qlora__text_enter(tok->text, "qlora_text_encode");
    QLORA__TEXT_NEED(env, out);
    if (text == NULL && length > 0) {
        return qlora__env_fail(env, QLORA_ERR_ARGUMENT, "text is NULL");
    }
    size_t before = out->count;
    qlora_result r = qlora__text_encode(env, tok, text, length, flags, out);
    out->count = r == QLORA_OK ? out->count : before;
    return r;
}

//@@ src/text/decode.h

// Replaces in out[begin..).
static qlora_result qlora__text_replace_tail(qlora__env* env, const qlora__text_step* step,
                                             qlora_text_bytes* out, size_t begin) {
    size_t size = out->count - begin;
    if (size < step->a_size || memchr(out->data + begin, step->a[0], size) == NULL) {
        return QLORA_OK;
    }
    qlora_text_bytes work;
    memset(&work, 0, sizeof(work));
    qlora_result r = qlora__text_replace(env, out->data + begin, size, step, &work);
    out->count = begin;
    r = r == QLORA_OK ? qlora__text_bytes_add(env, out, work.data, work.count) : r;
    qlora__text_bytes_free(env, &work);
    return r;
}

// Removes up to `start` copies of a at `begin`, and up to `stop` at the end.
static void qlora__text_strip_tail(const qlora__text_step* step, qlora_text_bytes* out,
                                   size_t begin) {
    size_t unit = step->a_size;
    size_t from = begin;
    for (size_t i = 0; i < step->start && out->count - from >= unit &&
                       memcmp(out->data + from, step->a, unit) == 0;
         i++) {
        from += unit;
    }
    for (size_t i = 0; i < step->stop && out->count - from >= unit &&
                       memcmp(out->data + out->count - unit, step->a, unit) == 0;
         i++) {
        out->count -= unit;
    }
    if (from > begin) {
        memmove(out->data + begin, out->data + from, out->count - from);
        out->count -= from - begin;
    }
}

static qlora_result qlora__text_bytes_tail(qlora__env* env, const qlora_text_tok* tok,
                                           qlora_text_bytes* out, size_t begin) {
    qlora_text_bytes work;
    memset(&work, 0, sizeof(work));
    bool known = false;
    qlora_result r =
        qlora__text_unstand(env, tok, out->data + begin, out->count - begin, &work, &known);
    if (r == QLORA_OK && known) {
        out->count = begin;
        r = qlora__text_bytes_add(env, out, work.data, work.count);
    }
    qlora__text_bytes_free(env, &work);
    return r;
}

static qlora_result qlora__text_metaspace_tail(qlora__env* env, const qlora__text_step* step,
                                               qlora_text_bytes* out, size_t begin, bool first) {
    qlora__text_step replace = *step;
    char space[] = " ";
    replace.b = space;
    replace.b_size = first && !step->never ? 0 : 1; // all of them, as the library does
    return qlora__text_replace_tail(env, &replace, out, begin);
}

// The steps that look at one token, up to the one that joins them. *whole is the first step that
// looks at the whole text.
static qlora_result qlora__text_token_decode(qlora__env* env, const qlora_text_tok* tok, int32_t id,
                                             bool first, qlora_text_bytes* out, size_t* whole) {
    size_t begin = out->count;
    bool fused = false;
    size_t i;
    if (tok->decoder.count > 0 && tok->decoder.data[0].kind == QLORA__TEXT_D_JOIN && !first) {
        QLORA__TRY(qlora__text_bytes_add(env, out, " ", 1));
    }
    QLORA__TRY(
        qlora__text_bytes_add(env, out, tok->names.data + tok->spans[id].at, tok->spans[id].size));
    for (i = 0; i < tok->decoder.count && !fused; i++) {
        const qlora__text_step* step = &tok->decoder.data[i];
        if (step->kind == QLORA__TEXT_D_REPLACE) {
            QLORA__TRY(qlora__text_replace_tail(env, step, out, begin));
        } else if (step->kind == QLORA__TEXT_D_BYTE_FALLBACK) {
            int byte = qlora__text_byte_token(out->data + begin, out->count - begin);
            if (byte >= 0) {
                out->data[begin] = (char)(unsigned char)byte;
                out->count = begin + 1;
            }
        } else if (step->kind == QLORA__TEXT_D_BYTES) {
            QLORA__TRY(qlora__text_bytes_tail(env, tok, out, begin));
        } else if (step->kind == QLORA__TEXT_D_STRIP) {
            qlora__text_strip_tail(step, out, begin);
        } else if (step->kind == QLORA__TEXT_D_METASPACE) {
            QLORA__TRY(qlora__text_metaspace_tail(env, step, out, begin, first));
        }
        fused = step->kind == QLORA__TEXT_D_FUSE || step->kind == QLORA__TEXT_D_BYTES;
    }
    *whole = i;
    return QLORA_OK;
}

static bool qlora__text_decoder_has(const qlora_text_tok* tok, int kind) {
    for (size_t i = 0; i < tok->decoder.count; i++) {
        if (tok->decoder.data[i].kind == kind) {
            return true;
        }
    }
    return false;
}

// Repairs out[begin..): one U+FFFD for each broken character or, with `each_byte`, for every byte
// of an invalid run of byte tokens.
static qlora_result qlora__text_repair_tail(qlora__env* env, qlora_text_bytes* out, size_t begin,
                                            bool each_byte) {
    qlora_text_bytes work;
    memset(&work, 0, sizeof(work));
    size_t used;
    size_t size = out->count - begin;
    if (size == 0) {
        return QLORA_OK; // out->data may be NULL
    }
    qlora_result r = qlora__text_utf8_repair(env, out->data + begin, size, false, &used, &work);
    bool same =
        r == QLORA_OK && work.count == size && memcmp(work.data, out->data + begin, size) == 0;
    if (r == QLORA_OK && !same) {
        out->count = begin;
        if (each_byte) {
            for (size_t i = 0; r == QLORA_OK && i < size; i++) {
                r = qlora__text_bytes_add(env, out, "\xEF\xBF\xBD", 3);
            }
        } else {
            r = qlora__text_bytes_add(env, out, work.data, work.count);
        }
    }
    qlora__text_bytes_free(env, &work);
    return r;
}

static qlora_result qlora__text_decode(qlora__env* env, const qlora_text_tok* tok,
                                       const int32_t* ids, size_t count, uint32_t flags,
                                       qlora_text_bytes* out) {
    size_t begin = out->count;
    size_t run = SIZE_MAX; // start of a run of byte tokens
    size_t whole = tok->decoder.count;
    bool first = true;
    bool replace = (flags & QLORA_TEXT_REPLACE) != 0;
    bool runs = replace && qlora__text_decoder_has(tok, QLORA__TEXT_D_BYTE_FALLBACK);
    for (size_t i = 0; i < count; i++) {
        if (!qlora__text_tok_has(tok, ids[i], QLORA__TEXT_K_EXISTS) ||
            ((flags & QLORA_TEXT_SKIP) &&
             qlora__text_tok_has(tok, ids[i], QLORA__TEXT_K_SPECIAL))) {
            continue;
        }
        bool byte = (tok->kinds[ids[i]] & QLORA__TEXT_K_BYTE) != 0;
        if (runs && !byte && run != SIZE_MAX) {
            QLORA__TRY(qlora__text_repair_tail(env, out, run, true));
            run = SIZE_MAX;
        }
        if (byte && run == SIZE_MAX) {
            run = out->count;
        }
        QLORA__TRY(qlora__text_token_decode(env, tok, ids[i], first, out, &whole));
        first = false;
    }
    if (runs && run != SIZE_MAX) {
        QLORA__TRY(qlora__text_repair_tail(env, out, run, true));
    }
    for (; !first && whole < tok->decoder.count; whole++) {
        if (tok->decoder.data[whole].kind == QLORA__TEXT_D_STRIP) {
            qlora__text_strip_tail(&tok->decoder.data[whole], out, begin);
        }
    }
    return replace ? qlora__text_repair_tail(env, out, begin, false) : QLORA_OK;
}

qlora_result qlora_text_decode(qlora_text_tok* tok, const int32_t* ids, size_t count,
                               uint32_t flags, qlora_text_bytes* out) {
    if (tok == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__env* env = &tok->text->env;
    qlora__text_enter(tok->text, "qlora_text_decode");
    QLORA__TEXT_NEED(env, out);
    if (ids == NULL && count > 0) {
        return qlora__env_fail(env, QLORA_ERR_ARGUMENT, "ids is NULL");
    }
    size_t before = out->count;
    qlora_result r = qlora__text_decode(env, tok, ids, count, flags, out);
    out->count = r == QLORA_OK ? out->count : before;
    return r;
}

// Removes, piece by piece, what the whole-text Strip steps remove at the start.
static void qlora__text_stream_strip(const qlora_text_tok* tok, qlora_text_stream* stream,
                                     size_t whole, qlora_text_bytes* work) {
    for (size_t i = whole; i < tok->decoder.count; i++) {
        const qlora__text_step* step = &tok->decoder.data[i];
        size_t unit = step->a_size;
        if (step->kind != QLORA__TEXT_D_STRIP) {
            continue;
        }
        size_t cut = 0;
        while (stream->stripped < step->start && work->count - cut >= unit &&
               memcmp(work->data + cut, step->a, unit) == 0) {
            cut += unit;
            stream->stripped++;
        }
        if (work->count > cut) {
            stream->stripped = SIZE_MAX;
        }
        memmove(work->data, work->data + cut, work->count - cut);
        work->count -= cut;
        return; // no known file has more than one such step
    }
}

static qlora_result qlora__text_stream_push(qlora__env* env, const qlora_text_tok* tok,
                                            qlora_text_stream* stream, int32_t id,
                                            qlora_text_bytes* work, qlora_text_bytes* out) {
    size_t whole = 0;
    size_t used = 0;
    // `work` receives the held bytes, followed by those of the token
    QLORA__TRY(qlora__text_token_decode(env, tok, id, stream->emitted == 0, work, &whole));
    qlora_text_stream next = *stream;
    next.emitted++;
    if (work->count > 0) {
        qlora__text_stream_strip(tok, &next, whole, work);
    }
    size_t held = stream->held_count;
    QLORA__TRY(qlora__text_bytes_room(env, work, held));
    if (held > 0) {
        memmove(work->data + held, work->data, work->count);
        memcpy(work->data, stream->held, held);
        work->count += held;
    }
    QLORA__TRY(qlora__text_utf8_repair(env, work->data, work->count, true, &used, out));
    next.held_count = work->count - used; // at most three
    if (next.held_count > 0) {
        memcpy(next.held, work->data + used, next.held_count);
    }
    *stream = next;
    return QLORA_OK;
}

qlora_result qlora_text_stream_push(qlora_text_tok* tok, qlora_text_stream* stream, int32_t id,
                                    uint32_t flags, qlora_text_bytes* out) {
    if (tok == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__env* env = &tok->text->env;
    qlora__text_enter(tok->text, "qlora_text_stream_push");
    QLORA__TEXT_NEED(env, stream);
    QLORA__TEXT_NEED(env, out);
    if (!qlora__text_tok_has(tok, id, QLORA__TEXT_K_EXISTS) ||
        ((flags & QLORA_TEXT_SKIP) && qlora__text_tok_has(tok, id, QLORA__TEXT_K_SPECIAL))) {
        return QLORA_OK;
    }
    size_t before = out->count;
    qlora_text_bytes work;
    memset(&work, 0, sizeof(work));
    qlora_result r = qlora__text_stream_push(env, tok, stream, id, &work, out);
    qlora__text_bytes_free(env, &work);
    out->count = r == QLORA_OK ? out->count : before;
    return r;
}

qlora_result qlora_text_stream_end(qlora_text_tok* tok, qlora_text_stream* stream,
                                   qlora_text_bytes* out) {
    if (tok == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__env* env = &tok->text->env;
    qlora__text_enter(tok->text, "qlora_text_stream_end");
    QLORA__TEXT_NEED(env, stream);
    QLORA__TEXT_NEED(env, out);
    size_t used = 0;
    size_t before = out->count;
    qlora_result r =
        qlora__text_utf8_repair(env, stream->held, stream->held_count, false, &used, out);
    out->count = r == QLORA_OK ? out->count : before;
    if (r == QLORA_OK) {
        memset(stream, 0, sizeof(*stream));
    }
    return r;
}

//@@ src/text/jinja_base.h

// A template engine for chat templates: Jinja as jinja2 3.1 executes it with the settings of
// transformers. Compiling and rendering each have an arena; all values of a rendering live in its
// arena and are freed together. Every function that can descend (expressions, statements, values in
// values) does so through a pointer of the machine and counts its depth, so that no template can
// exhaust the stack.

enum {
    QLORA__JIN_MAX_DEPTH = 1600,    // expressions, statements and values inside each other
    QLORA__JIN_MAX_NESTING = 160,   // of one template's source
    QLORA__JIN_MAX_RANGE = 100000,  // as in jinja2's sandbox
    QLORA__JIN_MAX_STEPS = 3000000, // and two more for each byte of the conversation
    QLORA__JIN_CHUNK = 65536
};
#define QLORA__JIN_MAX_MEMORY ((size_t)96 << 20) // and 64 more for each byte of the conversation

// ---- memory -------------------------------------------------------------------------------------

typedef struct qlora__jin_chunk {
    struct qlora__jin_chunk* next;
    size_t size; // of the whole block
    size_t used;
} qlora__jin_chunk;

typedef struct qlora__jin_arena {
    qlora__env* env;
    qlora__jin_chunk* first;
    size_t total;
    size_t limit;
} qlora__jin_arena;

static void qlora__jin_arena_free(qlora__jin_arena* arena) {
    while (arena->first != NULL) {
        qlora__jin_chunk* next = arena->first->next;
        qlora__env_free(arena->env, arena->first, arena->first->size);
        arena->first = next;
    }
    arena->total = 0;
}

// Forgets everything but keeps one chunk of the usual size, so that many renderings cost no
// allocation each.
static void qlora__jin_arena_reset(qlora__jin_arena* arena) {
    qlora__jin_chunk* kept = NULL;
    qlora__jin_chunk* chunk = arena->first;
    while (chunk != NULL) {
        qlora__jin_chunk* next = chunk->next;
        if (kept == NULL && chunk->size == QLORA__JIN_CHUNK) {
            kept = chunk;
        } else {
            qlora__env_free(arena->env, chunk, chunk->size);
        }
        chunk = next;
    }
    if (kept != NULL) {
        kept->next = NULL;
        kept->used = sizeof(qlora__jin_chunk);
    }
    arena->first = kept;
    arena->total = kept != NULL ? kept->size : 0;
}

static qlora_result qlora__jin_exhausted(const qlora__jin_arena* arena) {
    (void)qlora__env_fail(arena->env, QLORA_ERR_FORMAT,
                          "the template needs more than %llu MiB of memory",
                          (unsigned long long)(arena->limit >> 20));
    return QLORA_ERR_FORMAT; // a constant, so that compilers know it from success
}

static qlora_result qlora__jin_alloc(qlora__jin_arena* arena, size_t size, void** out) {
    if (size > arena->limit) { // also keeps the sums below from wrapping
        return qlora__jin_exhausted(arena);
    }
    size = (size + 15) & ~(size_t)15;
    qlora__jin_chunk* chunk = arena->first;
    if (chunk == NULL || chunk->size - chunk->used < size) {
        size_t head = (sizeof(qlora__jin_chunk) + 15) & ~(size_t)15;
        size_t wanted = head + size > QLORA__JIN_CHUNK ? head + size : (size_t)QLORA__JIN_CHUNK;
        if (wanted > arena->limit - (arena->total < arena->limit ? arena->total : arena->limit)) {
            return qlora__jin_exhausted(arena);
        }
        chunk = (qlora__jin_chunk*)qlora__env_alloc(arena->env, wanted);
        if (chunk == NULL) {
            return QLORA_ERR_MEMORY;
        }
        chunk->size = wanted;
        chunk->used = head;
        arena->total += wanted;
        // a large block is full at once: the one before it stays in use
        bool behind = arena->first != NULL && wanted > QLORA__JIN_CHUNK;
        chunk->next = behind ? arena->first->next : arena->first;
        if (behind) {
            arena->first->next = chunk;
        } else {
            arena->first = chunk;
        }
    }
    *out = (char*)chunk + chunk->used;
    chunk->used += size;
    return QLORA_OK;
}

// ---- values -------------------------------------------------------------------------------------

typedef enum qlora__jin_kind {
    QLORA__JIN_MISSING, // no value at all: an argument that was not given, a variable not yet set
    QLORA__JIN_UNDEFINED,
    QLORA__JIN_NONE,
    QLORA__JIN_BOOL,
    QLORA__JIN_INT,
    QLORA__JIN_BIG, // an integer of the data that does not fit 64 bits: its digits, for printing
    QLORA__JIN_FLOAT,
    QLORA__JIN_STRING,
    QLORA__JIN_LIST,
    QLORA__JIN_TUPLE,
    QLORA__JIN_DICT,
    QLORA__JIN_VIEW, // keys(), values() or items() of a dictionary
    QLORA__JIN_RANGE,
    QLORA__JIN_ITER, // a generator or iterator, used up once
    QLORA__JIN_NAMESPACE,
    QLORA__JIN_MACRO,
    QLORA__JIN_METHOD, // of a value, not yet called
    QLORA__JIN_FUNCTION,
    QLORA__JIN_LOOP,
    QLORA__JIN_CYCLER,
    QLORA__JIN_JOINER,
    QLORA__JIN_KINDS
} qlora__jin_kind;

static const char* const qlora__jin_kind_names[QLORA__JIN_KINDS] = {
    "missing",   "Undefined", "NoneType", "bool",     "int",       "int",    "float",
    "str",       "list",      "tuple",    "dict",     "dict view", "range",  "generator",
    "namespace", "macro",     "method",   "function", "loop",      "cycler", "joiner"};

struct qlora__jin_node;
struct qlora__jin_machine;
struct qlora__jin_iter;
struct qlora__jin_record;

typedef struct qlora__jin_string {
    const char* data; // UTF-8, not terminated
    size_t bytes;
    size_t chars; // code points
} qlora__jin_string;

typedef struct qlora__jin_value {
    qlora__jin_kind kind;
    int32_t flag; // string: is Markup; view: 0 keys, 1 values, 2 items; function: which one
    union {
        bool truth;
        int64_t integer;
        double real;
        const qlora__jin_string* string;
        struct qlora__jin_list* list; // also a tuple
        struct qlora__jin_dict* dict; // also a namespace, and what a view shows
        struct qlora__jin_range* range;
        struct qlora__jin_iter* iter;
        struct qlora__jin_macro* macro;
        struct qlora__jin_method* method;
        struct qlora__jin_loop* loop;
        struct qlora__jin_cycler* cycler; // also a joiner
        struct qlora__jin_hint* hint;     // of an undefined value; may be NULL
    } as;
} qlora__jin_value;

typedef struct qlora__jin_list {
    qlora__jin_value* items;
    size_t count;
    size_t capacity;
} qlora__jin_list;

typedef struct qlora__jin_dict {
    qlora__jin_value* keys;
    qlora__jin_value* values;
    size_t count;
    size_t capacity;
} qlora__jin_dict;

typedef struct qlora__jin_range {
    int64_t start;
    int64_t stop;
    int64_t step;
    int64_t count;
} qlora__jin_range;

typedef struct qlora__jin_hint {
    const char* owner; // type of the object that lacks it, or NULL
    const char* name;
    size_t size;
    bool unsafe;
} qlora__jin_hint;

typedef struct qlora__jin_macro {
    const struct qlora__jin_node* node;
    struct qlora__jin_record* outer; // the variables it can see
} qlora__jin_macro;

typedef struct qlora__jin_cycler {
    qlora__jin_value items; // a joiner has one item, the separator
    size_t at;
} qlora__jin_cycler;

// What a call passes. Keyword arguments follow the positional ones; names[i] belongs to item
// positional + i.
typedef struct qlora__jin_args {
    qlora__jin_value* items;
    size_t positional;
    size_t named;
    const qlora__jin_string** names;
} qlora__jin_args;

// The variables of one activation of a function: the template, a macro or a call block.
typedef struct qlora__jin_record {
    struct qlora__jin_record* outer;
    qlora__jin_value* slots;
} qlora__jin_record;

typedef struct qlora__jin_buffer {
    char* data;
    size_t count;
    size_t capacity;
} qlora__jin_buffer;

typedef struct qlora__jin_machine qlora__jin_machine;
typedef qlora_result (*qlora__jin_filter_fn)(qlora__jin_machine* m, qlora__jin_value* in,
                                             qlora__jin_value* out);

// Where a part needs one that comes later: set once, when the machine is made.
typedef struct qlora__jin_hooks {
    qlora_result (*eval)(qlora__jin_machine* m, const struct qlora__jin_node* node,
                         qlora__jin_value* out);
    qlora_result (*run)(qlora__jin_machine* m, const struct qlora__jin_node* first);
    qlora_result (*call)(qlora__jin_machine* m, qlora__jin_value callee,
                         const qlora__jin_args* args, qlora__jin_value* out);
    // `name` as given to map, select, ...; args has the arguments after the value
    qlora_result (*filter)(qlora__jin_machine* m, const char* name, size_t size,
                           qlora__jin_value value, const qlora__jin_args* args,
                           qlora__jin_value* out);
    qlora_result (*test)(qlora__jin_machine* m, const char* name, size_t size,
                         qlora__jin_value value, const qlora__jin_args* args, bool* out);
    // whether values of this kind have a method, and whether the sandbox forbids it
    bool (*method)(qlora__jin_value self, const char* name, size_t size, bool* unsafe,
                   const void** found);
    // an attribute that is not a method: of loops, macros and the like
    qlora_result (*field)(qlora__jin_machine* m, qlora__jin_value v, const char* name, size_t size,
                          qlora__jin_value* out, bool* found);
    qlora_result (*call_method)(qlora__jin_machine* m, qlora__jin_value self, const void* method,
                                const qlora__jin_args* args, qlora__jin_value* out);
    qlora_result (*next)(qlora__jin_machine* m, struct qlora__jin_iter* iter, qlora__jin_value* out,
                         bool* more);
    qlora_result (*repr)(qlora__jin_machine* m, qlora__jin_value value, qlora__jin_buffer* out);
    qlora_result (*equal)(qlora__jin_machine* m, qlora__jin_value a, qlora__jin_value b, bool* out);
    qlora_result (*less)(qlora__jin_machine* m, qlora__jin_value a, qlora__jin_value b,
                         bool or_equal, bool* out);
} qlora__jin_hooks;

typedef struct qlora__jin_span {
    size_t begin; // in bytes of the output
    size_t end;
} qlora__jin_span;

// One rendering.
struct qlora__jin_machine {
    qlora__env* env;
    const qlora__jin_hooks* hooks;
    qlora__jin_arena arena;
    const char* name; // of the template
    uint32_t line;    // of what is executed, for messages
    uint32_t depth;
    uint64_t steps;
    uint64_t step_limit;
    int64_t clock; // seconds of local time since 1970, for strftime_now
    qlora__jin_dict* globals;
    qlora__jin_record* record;
    qlora__jin_buffer* out; // what output goes to
    qlora__jin_buffer* top; // what the whole template writes
    int jump;               // a break or continue on its way to its loop
    qlora__jin_span* spans; // of generation blocks
    size_t span_count;
    size_t span_capacity;
};

enum { QLORA__JIN_NO_JUMP, QLORA__JIN_BREAK, QLORA__JIN_CONTINUE };

// ---- errors and limits --------------------------------------------------------------------------

QLORA__PRINTF(2, 3)
static qlora_result qlora__jin_fail(qlora__jin_machine* m, const char* format, ...) {
    char text[QLORA__ERROR_SIZE];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return qlora__env_fail(m->env, QLORA_ERR_FORMAT, "%s, line %lu: %s", m->name,
                           (unsigned long)m->line, text);
}

// Counts work, so that a template that does not end is stopped.
static qlora_result qlora__jin_work(qlora__jin_machine* m, uint64_t steps) {
    m->steps += steps;
    return m->steps <= m->step_limit ? QLORA_OK
                                     : qlora__jin_fail(m, "the template takes more than %llu steps",
                                                       (unsigned long long)m->step_limit);
}

static qlora_result qlora__jin_enter(qlora__jin_machine* m) {
    if (m->depth >= QLORA__JIN_MAX_DEPTH) {
        return qlora__jin_fail(m, "nested deeper than %d levels (a macro that calls itself?)",
                               (int)QLORA__JIN_MAX_DEPTH);
    }
    m->depth++;
    return qlora__jin_work(m, 1);
}

static qlora_result qlora__jin_get(qlora__jin_machine* m, size_t size, void** out) {
    qlora_result r = qlora__jin_alloc(&m->arena, size, out);
    if (r == QLORA_ERR_FORMAT) {
        (void)qlora__env_wrap(m->env, r, "%s, line %lu: ", m->name, (unsigned long)m->line);
    }
    return r;
}

// An array of values; SIZE_MAX / 64 of them can never be had.
static qlora_result qlora__jin_get_values(qlora__jin_machine* m, size_t count,
                                          qlora__jin_value** out) {
    void* data = NULL;
    size_t limit = SIZE_MAX / 64;
    QLORA__TRY(
        qlora__jin_get(m, (count < limit ? count : limit) * sizeof(qlora__jin_value), &data));
    *out = (qlora__jin_value*)data;
    return QLORA_OK;
}

// ---- making values ------------------------------------------------------------------------------

static qlora__jin_value qlora__jin_of(qlora__jin_kind kind) {
    qlora__jin_value value;
    memset(&value, 0, sizeof value);
    value.kind = kind;
    return value;
}

static qlora__jin_value qlora__jin_none(void) {
    return qlora__jin_of(QLORA__JIN_NONE);
}

static qlora__jin_value qlora__jin_bool(bool truth) {
    qlora__jin_value value = qlora__jin_of(QLORA__JIN_BOOL);
    value.as.truth = truth;
    return value;
}

static qlora__jin_value qlora__jin_int(int64_t integer) {
    qlora__jin_value value = qlora__jin_of(QLORA__JIN_INT);
    value.as.integer = integer;
    return value;
}

static qlora__jin_value qlora__jin_float(double real) {
    qlora__jin_value value = qlora__jin_of(QLORA__JIN_FLOAT);
    value.as.real = real;
    return value;
}

static size_t qlora__jin_count_chars(const char* data, size_t bytes) {
    size_t chars = 0;
    for (size_t i = 0; i < bytes; i++) {
        chars += ((unsigned char)data[i] & 0xC0) != 0x80 ? 1 : 0;
    }
    return chars;
}

// A string that shares the bytes, which must stay where they are.
static qlora_result qlora__jin_string_share(qlora__jin_machine* m, const char* data, size_t bytes,
                                            qlora__jin_value* out) {
    void* memory = NULL;
    QLORA__TRY(qlora__jin_work(m, bytes / 64));
    QLORA__TRY(qlora__jin_get(m, sizeof(qlora__jin_string), &memory));
    qlora__jin_string* string = (qlora__jin_string*)memory;
    string->data = data != NULL ? data : ""; // so that offsets are always those of an object
    string->bytes = bytes;
    string->chars = qlora__jin_count_chars(data, bytes);
    *out = qlora__jin_of(QLORA__JIN_STRING);
    out->as.string = string;
    return QLORA_OK;
}

static qlora_result qlora__jin_string_of(qlora__jin_machine* m, const char* text,
                                         qlora__jin_value* out) {
    return qlora__jin_string_share(m, text, strlen(text), out);
}

static qlora_result qlora__jin_buffer_room(qlora__jin_machine* m, qlora__jin_buffer* buffer,
                                           size_t extra) {
    if (extra <= buffer->capacity - buffer->count) {
        return QLORA_OK;
    }
    size_t wanted = buffer->count + extra < extra ? SIZE_MAX / 2 : buffer->count + extra;
    size_t grown = buffer->capacity < 64 ? 64 : buffer->capacity * 2;
    grown = grown < wanted ? wanted : grown;
    void* moved = NULL;
    QLORA__TRY(qlora__jin_get(m, grown, &moved));
    if (buffer->count > 0) {
        memcpy(moved, buffer->data, buffer->count);
    }
    buffer->data = (char*)moved;
    buffer->capacity = grown;
    return QLORA_OK;
}

static qlora_result qlora__jin_put(qlora__jin_machine* m, qlora__jin_buffer* buffer,
                                   const char* data, size_t size) {
    if (size > 0) {
        QLORA__TRY(qlora__jin_work(m, size / 64));
        QLORA__TRY(qlora__jin_buffer_room(m, buffer, size));
        memcpy(buffer->data + buffer->count, data, size);
        buffer->count += size;
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_puts(qlora__jin_machine* m, qlora__jin_buffer* buffer,
                                    const char* text) {
    return qlora__jin_put(m, buffer, text, strlen(text));
}

static qlora_result qlora__jin_put_code(qlora__jin_machine* m, qlora__jin_buffer* buffer,
                                        uint32_t code) {
    char bytes[4];
    size_t size = qlora__text_utf8_put(code, bytes);
    return qlora__jin_put(m, buffer, bytes, size);
}

static qlora_result qlora__jin_buffer_string(qlora__jin_machine* m, const qlora__jin_buffer* buffer,
                                             qlora__jin_value* out) {
    return qlora__jin_string_share(m, buffer->data, buffer->count, out);
}

static qlora_result qlora__jin_list_make(qlora__jin_machine* m, qlora__jin_kind kind, size_t room,
                                         qlora__jin_value* out) {
    void* memory = NULL;
    QLORA__TRY(qlora__jin_get(m, sizeof(qlora__jin_list), &memory));
    qlora__jin_list* list = (qlora__jin_list*)memory;
    list->count = 0;
    list->capacity = room;
    QLORA__TRY(qlora__jin_get_values(m, room, &list->items));
    *out = qlora__jin_of(kind);
    out->as.list = list;
    return QLORA_OK;
}

static qlora_result qlora__jin_list_add(qlora__jin_machine* m, qlora__jin_list* list,
                                        qlora__jin_value value) {
    QLORA__TRY(qlora__jin_work(m, 1));
    if (list->count == list->capacity) {
        qlora__jin_value* moved = NULL;
        size_t grown = list->capacity < 8 ? 8 : list->capacity * 2;
        QLORA__TRY(qlora__jin_get_values(m, grown, &moved));
        if (list->count > 0) {
            memcpy(moved, list->items, list->count * sizeof *moved);
        }
        list->items = moved;
        list->capacity = grown;
    }
    list->items[list->count++] = value;
    return QLORA_OK;
}

static qlora_result qlora__jin_pair_make(qlora__jin_machine* m, qlora__jin_value first,
                                         qlora__jin_value second, qlora__jin_value* out) {
    QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_TUPLE, 2, out));
    out->as.list->items[0] = first;
    out->as.list->items[1] = second;
    out->as.list->count = 2;
    return QLORA_OK;
}

static qlora_result qlora__jin_dict_make(qlora__jin_machine* m, qlora__jin_kind kind, size_t room,
                                         qlora__jin_value* out) {
    void* memory = NULL;
    QLORA__TRY(qlora__jin_get(m, sizeof(qlora__jin_dict), &memory));
    qlora__jin_dict* dict = (qlora__jin_dict*)memory;
    dict->count = 0;
    dict->capacity = room;
    QLORA__TRY(qlora__jin_get_values(m, room, &dict->keys));
    QLORA__TRY(qlora__jin_get_values(m, room, &dict->values));
    *out = qlora__jin_of(kind);
    out->as.dict = dict;
    return QLORA_OK;
}

// Adds a key that is not there yet.
static qlora_result qlora__jin_dict_add(qlora__jin_machine* m, qlora__jin_dict* dict,
                                        qlora__jin_value key, qlora__jin_value value) {
    QLORA__TRY(qlora__jin_work(m, 1));
    if (dict->count == dict->capacity) {
        qlora__jin_value* keys = NULL;
        qlora__jin_value* values = NULL;
        size_t grown = dict->capacity < 4 ? 4 : dict->capacity * 2;
        QLORA__TRY(qlora__jin_get_values(m, grown, &keys));
        QLORA__TRY(qlora__jin_get_values(m, grown, &values));
        if (dict->count > 0) {
            memcpy(keys, dict->keys, dict->count * sizeof *keys);
            memcpy(values, dict->values, dict->count * sizeof *values);
        }
        dict->keys = keys;
        dict->values = values;
        dict->capacity = grown;
    }
    dict->keys[dict->count] = key;
    dict->values[dict->count++] = value;
    return QLORA_OK;
}

static bool qlora__jin_is(qlora__jin_value value, const char* text, size_t size) {
    return value.kind == QLORA__JIN_STRING && value.as.string->bytes == size &&
           memcmp(value.as.string->data, text, size) == 0;
}

// The place of a key that is a string, or the count.
static size_t qlora__jin_dict_at(const qlora__jin_dict* dict, const char* key, size_t size) {
    size_t i = 0;
    while (i < dict->count && !qlora__jin_is(dict->keys[i], key, size)) {
        i++;
    }
    return i;
}

static qlora_result qlora__jin_dict_put(qlora__jin_machine* m, qlora__jin_dict* dict,
                                        const char* key, qlora__jin_value value) {
    size_t at = qlora__jin_dict_at(dict, key, strlen(key));
    QLORA__TRY(qlora__jin_work(m, dict->count / 8));
    if (at < dict->count) {
        dict->values[at] = value;
        return QLORA_OK;
    }
    qlora__jin_value name;
    QLORA__TRY(qlora__jin_string_of(m, key, &name));
    return qlora__jin_dict_add(m, dict, name, value);
}

static qlora_result qlora__jin_undefined(qlora__jin_machine* m, const char* owner, const char* name,
                                         size_t size, bool unsafe, qlora__jin_value* out) {
    void* memory = NULL;
    QLORA__TRY(qlora__jin_get(m, sizeof(qlora__jin_hint), &memory));
    qlora__jin_hint* hint = (qlora__jin_hint*)memory;
    hint->owner = owner;
    hint->name = name;
    hint->size = size;
    hint->unsafe = unsafe;
    *out = qlora__jin_of(QLORA__JIN_UNDEFINED);
    out->as.hint = hint;
    return QLORA_OK;
}

static qlora_result qlora__jin_undefined_error(qlora__jin_machine* m, qlora__jin_value value) {
    const qlora__jin_hint* hint = value.as.hint;
    int size = hint != NULL ? (int)(hint->size < 80 ? hint->size : 80) : 0;
    if (hint == NULL) {
        return qlora__jin_fail(m, "an undefined value is used");
    }
    if (hint->unsafe) {
        return qlora__jin_fail(m, "the sandbox does not allow \"%.*s\" of a %s", size, hint->name,
                               hint->owner);
    }
    if (hint->owner != NULL) {
        return qlora__jin_fail(m, "a %s has no attribute or element \"%.*s\"", hint->owner, size,
                               hint->name);
    }
    return qlora__jin_fail(m, "\"%.*s\" is undefined", size, hint->name);
}

static const char* qlora__jin_type(qlora__jin_value value) {
    return qlora__jin_kind_names[value.kind];
}

//@@ src/text/jinja_lex.h

// From the source of a template to tokens, as jinja2's lexer with trim_blocks and lstrip_blocks.

typedef enum qlora__jin_token_kind {
    QLORA__JIN_T_END,
    QLORA__JIN_T_DATA,
    QLORA__JIN_T_VARIABLE,     // {{
    QLORA__JIN_T_VARIABLE_END, // }}
    QLORA__JIN_T_BLOCK,        // {%
    QLORA__JIN_T_BLOCK_END,    // %}
    QLORA__JIN_T_NAME,
    QLORA__JIN_T_STRING,
    QLORA__JIN_T_INTEGER,
    QLORA__JIN_T_FLOAT,
    QLORA__JIN_T_OPERATOR
} qlora__jin_token_kind;

typedef struct qlora__jin_token {
    qlora__jin_token_kind kind;
    uint32_t line;
    const char* text;
    size_t size;
} qlora__jin_token;

typedef struct qlora__jin_lexer {
    qlora__jin_machine* m;
    const char* source; // newlines are \n, and one at the end is gone
    size_t size;
    size_t at;
    uint32_t line;
    bool line_start; // the last thing read ended with a newline
    qlora__jin_token* tokens;
    size_t count;
    size_t capacity;
    char* open; // closing brackets that are due
    size_t open_count;
    size_t open_capacity;
} qlora__jin_lexer;

// Python's str.isspace of one character.
static bool qlora__jin_is_space(uint32_t code) {
    if (code <= 0x20) {
        return code == 0x20 || (code >= 9 && code <= 13) || code >= 0x1C;
    }
    return code == 0x85 || code == 0xA0 || code == 0x1680 || (code >= 0x2000 && code <= 0x200A) ||
           code == 0x2028 || code == 0x2029 || code == 0x202F || code == 0x205F || code == 0x3000;
}

// The code point at text[at], which is valid UTF-8, and its size.
static uint32_t qlora__jin_code_at(const char* text, size_t size, size_t at, size_t* step) {
    uint32_t code = 0;
    size_t length = qlora__text_utf8((const unsigned char*)text + at, size - at, &code);
    *step = length > 0 ? length : 1;
    return length > 0 ? code : 0xFFFD;
}

// Where the whitespace that starts at `at` ends.
static size_t qlora__jin_skip_space(const char* text, size_t size, size_t at) {
    size_t step = 0;
    while (at < size && qlora__jin_is_space(qlora__jin_code_at(text, size, at, &step))) {
        at += step;
    }
    return at;
}

// Where the whitespace that ends at `end` starts, not before `begin`.
static size_t qlora__jin_back_space(const char* text, size_t begin, size_t end) {
    while (end > begin) {
        size_t at = end - 1;
        size_t step = 0;
        while (at > begin && ((unsigned char)text[at] & 0xC0) == 0x80) {
            at--;
        }
        if (!qlora__jin_is_space(qlora__jin_code_at(text, end, at, &step))) {
            break;
        }
        end = at;
    }
    return end;
}

static qlora_result qlora__jin_lex_fail(const qlora__jin_lexer* x, const char* why) {
    x->m->line = x->line;
    return qlora__jin_fail(x->m, "%s", why);
}

static qlora_result qlora__jin_lex_add(qlora__jin_lexer* x, qlora__jin_token_kind kind,
                                       const char* text, size_t size) {
    if (x->count == x->capacity) {
        size_t grown = x->capacity < 64 ? 64 : x->capacity * 2;
        void* moved = NULL;
        QLORA__TRY(qlora__jin_get(x->m, grown * sizeof(qlora__jin_token), &moved));
        if (x->count > 0) {
            memcpy(moved, x->tokens, x->count * sizeof(qlora__jin_token));
        }
        x->tokens = (qlora__jin_token*)moved;
        x->capacity = grown;
    }
    qlora__jin_token* token = &x->tokens[x->count++];
    token->kind = kind;
    token->line = x->line;
    token->text = text;
    token->size = size;
    return QLORA_OK;
}

// Moves on to `to` and counts the lines.
static void qlora__jin_lex_move(qlora__jin_lexer* x, size_t to) {
    x->line_start = to > x->at ? x->source[to - 1] == '\n' : x->line_start;
    for (; x->at < to; x->at++) {
        x->line += x->source[x->at] == '\n' ? 1 : 0;
    }
}

static bool qlora__jin_lex_sees(const qlora__jin_lexer* x, size_t at, const char* text) {
    size_t size = strlen(text);
    return size <= x->size - at && memcmp(x->source + at, text, size) == 0;
}

// Whether `word` and the end of a tag follow at `at`, which is behind a block's start and its sign:
// {% raw %}. *end is behind the tag. Only the end of a raw block knows +%} and the trimmed newline.
static bool qlora__jin_lex_word(const qlora__jin_lexer* x, size_t at, const char* word, bool trim,
                                size_t* end) {
    at = qlora__jin_skip_space(x->source, x->size, at);
    if (!qlora__jin_lex_sees(x, at, word)) {
        return false;
    }
    at = qlora__jin_skip_space(x->source, x->size, at + strlen(word));
    if (qlora__jin_lex_sees(x, at, "-%}")) {
        *end = qlora__jin_skip_space(x->source, x->size, at + 3);
        return true;
    }
    bool plus = trim && qlora__jin_lex_sees(x, at, "+%}");
    if (plus || qlora__jin_lex_sees(x, at, "%}")) {
        *end = at + (plus ? 3 : 2);
        *end += trim && !plus && *end < x->size && x->source[*end] == '\n' ? 1 : 0;
        return true;
    }
    return false;
}

// Adds the text from x->at to the tag at `tag`, whose sign is '-', '+' or 0.
static qlora_result qlora__jin_lex_data(qlora__jin_lexer* x, size_t tag, char sign, bool variable) {
    size_t begin = x->at;
    size_t end = tag;
    if (sign == '-') {
        end = qlora__jin_back_space(x->source, begin, end);
    } else if (sign != '+' && !variable) {
        size_t line = end;
        while (line > begin && x->source[line - 1] != '\n') {
            line--;
        }
        bool blank = qlora__jin_skip_space(x->source, tag, line) == tag;
        if ((line > begin || x->line_start) && blank) {
            end = line;
        }
    }
    if (end > begin) {
        QLORA__TRY(qlora__jin_lex_add(x, QLORA__JIN_T_DATA, x->source + begin, end - begin));
    }
    qlora__jin_lex_move(x, tag);
    return QLORA_OK;
}

static char qlora__jin_lex_sign(const qlora__jin_lexer* x, size_t at) {
    return at < x->size && (x->source[at] == '-' || x->source[at] == '+') ? x->source[at] : '\0';
}

static qlora_result qlora__jin_lex_raw(qlora__jin_lexer* x, size_t body) {
    qlora__jin_lex_move(x, body);
    for (size_t at = body; at + 1 < x->size; at++) {
        size_t end = 0;
        if (x->source[at] == '{' && x->source[at + 1] == '%') {
            char sign = qlora__jin_lex_sign(x, at + 2);
            if (qlora__jin_lex_word(x, at + (sign != '\0' ? 3 : 2), "endraw", true, &end)) {
                QLORA__TRY(qlora__jin_lex_data(x, at, sign, false));
                qlora__jin_lex_move(x, end);
                return QLORA_OK;
            }
        }
    }
    return qlora__jin_lex_fail(x, "{% raw %} is not closed");
}

static qlora_result qlora__jin_lex_comment(qlora__jin_lexer* x, size_t body) {
    for (size_t at = body; at + 1 < x->size; at++) {
        if (x->source[at] == '#' && x->source[at + 1] == '}') {
            char before = at > body ? x->source[at - 1] : '\0';
            size_t end = at + 2;
            if (before == '-') {
                end = qlora__jin_skip_space(x->source, x->size, end);
            } else if (before != '+') {
                end += end < x->size && x->source[end] == '\n' ? 1 : 0;
            }
            qlora__jin_lex_move(x, end);
            return QLORA_OK;
        }
    }
    return qlora__jin_lex_fail(x, "a comment {# is not closed");
}

// ---- inside a tag

static size_t qlora__jin_lex_digits(const qlora__jin_lexer* x, size_t at, const char* allowed) {
    size_t end = at;
    for (size_t i = at; i < x->size; i++) {
        bool under = x->source[i] == '_' && i + 1 < x->size && x->source[i + 1] != '_' &&
                     strchr(allowed, x->source[i + 1]) != NULL && x->source[i + 1] != '\0';
        if (x->source[i] == '\0' || (strchr(allowed, x->source[i]) == NULL && !under)) {
            break;
        }
        end = i + 1;
    }
    return end;
}

// A number; *kind is left alone when there is none.
static size_t qlora__jin_lex_number(const qlora__jin_lexer* x, qlora__jin_token_kind* kind) {
    static const char decimal[] = "0123456789";
    size_t at = x->at;
    const char* s = x->source;
    if (s[at] < '0' || s[at] > '9') {
        return at;
    }
    bool after_dot = at > 0 && s[at - 1] == '.';
    size_t whole = qlora__jin_lex_digits(x, at, decimal);
    size_t end = whole;
    bool fraction = false;
    if (end + 1 < x->size && s[end] == '.' && s[end + 1] >= '0' && s[end + 1] <= '9') {
        end = qlora__jin_lex_digits(x, end + 1, decimal);
        fraction = true;
    }
    if (end < x->size && (s[end] == 'e' || s[end] == 'E')) {
        size_t power = end + 1;
        power += power < x->size && (s[power] == '+' || s[power] == '-') ? 1 : 0;
        if (power < x->size && s[power] >= '0' && s[power] <= '9') {
            end = qlora__jin_lex_digits(x, power, decimal);
            fraction = true;
        }
    }
    if (fraction && !after_dot) {
        *kind = QLORA__JIN_T_FLOAT;
        return end;
    }
    *kind = QLORA__JIN_T_INTEGER;
    if (s[at] == '0') {
        char base = at + 1 < x->size ? (char)(s[at + 1] | 0x20) : '\0';
        const char* digits = base == 'x'   ? "0123456789abcdefABCDEF"
                             : base == 'o' ? "01234567"
                             : base == 'b' ? "01"
                                           : NULL;
        size_t based = digits != NULL ? qlora__jin_lex_digits(x, at + 2, digits) : at;
        return digits != NULL && based > at + 2 ? based : qlora__jin_lex_digits(x, at, "0");
    }
    return whole;
}

static bool qlora__jin_is_name(uint32_t code) {
    if (code < 0x80) {
        return (code >= 'a' && code <= 'z') || (code >= 'A' && code <= 'Z') ||
               (code >= '0' && code <= '9') || code == '_';
    }
    return (1u << qlora__jin_class(code) & QLORA__TEXT_W) != 0;
}

static size_t qlora__jin_lex_name(const qlora__jin_lexer* x) {
    size_t at = x->at;
    size_t step = 0;
    while (at < x->size && qlora__jin_is_name(qlora__jin_code_at(x->source, x->size, at, &step))) {
        at += step;
    }
    return at;
}

// A quoted string with its quotes, or x->at when it does not end.
static size_t qlora__jin_lex_string(const qlora__jin_lexer* x) {
    char quote = x->source[x->at];
    for (size_t at = x->at + 1; at < x->size; at++) {
        if (x->source[at] == quote) {
            return at + 1;
        }
        at += x->source[at] == '\\' ? 1 : 0;
    }
    return x->at;
}

static qlora_result qlora__jin_lex_bracket(qlora__jin_lexer* x, char c) {
    if (c == '(' || c == '[' || c == '{') {
        if (x->open_count == x->open_capacity) {
            size_t grown = x->open_capacity < 64 ? 64 : x->open_capacity * 2;
            void* moved = NULL;
            QLORA__TRY(qlora__jin_get(x->m, grown, &moved));
            if (x->open_count > 0) {
                memcpy(moved, x->open, x->open_count);
            }
            x->open = (char*)moved;
            x->open_capacity = grown;
        }
        x->open[x->open_count++] = c == '(' ? ')' : c == '[' ? ']' : '}';
    } else if (c == ')' || c == ']' || c == '}') {
        if (x->open_count == 0 || x->open[x->open_count - 1] != c) {
            x->m->line = x->line;
            return qlora__jin_fail(x->m, "unexpected \"%c\"", c);
        }
        x->open_count--;
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_lex_operator(qlora__jin_lexer* x) {
    static const char* const doubles[] = {"//", "**", "==", "!=", ">=", "<="};
    size_t size = 0;
    for (size_t i = 0; i < QLORA__TEXT_COUNT(doubles); i++) {
        size = qlora__jin_lex_sees(x, x->at, doubles[i]) ? 2 : size;
    }
    char c = x->source[x->at];
    if (size == 0 && c != '\0' && strchr("+-/*%~[](){}><=.:|,;", c) != NULL) {
        size = 1;
    }
    if (size == 0) {
        x->m->line = x->line;
        if (c == '\'' || c == '"') {
            return qlora__jin_fail(x->m, "a string that starts with %c is not closed", c);
        }
        return qlora__jin_fail(x->m, "unexpected character \"%c\"",
                               (unsigned char)c < 0x80 ? c : '?');
    }
    QLORA__TRY(qlora__jin_lex_bracket(x, c));
    QLORA__TRY(qlora__jin_lex_add(x, QLORA__JIN_T_OPERATOR, x->source + x->at, size));
    qlora__jin_lex_move(x, x->at + size);
    return QLORA_OK;
}

// Whether the tag ends at x->at, and where the text after it starts.
static bool qlora__jin_lex_tag_end(const qlora__jin_lexer* x, bool variable, size_t* end) {
    if (x->open_count > 0) {
        return false;
    }
    const char* mark = variable ? "}}" : "%}";
    char sign = qlora__jin_lex_sign(x, x->at);
    if (sign == '-' && qlora__jin_lex_sees(x, x->at + 1, mark)) {
        *end = qlora__jin_skip_space(x->source, x->size, x->at + 3);
        return true;
    }
    if (sign == '+' && !variable && qlora__jin_lex_sees(x, x->at + 1, mark)) {
        *end = x->at + 3;
        return true;
    }
    if (qlora__jin_lex_sees(x, x->at, mark)) {
        *end = x->at + 2;
        *end += !variable && *end < x->size && x->source[*end] == '\n' ? 1 : 0;
        return true;
    }
    return false;
}

static qlora_result qlora__jin_lex_tag(qlora__jin_lexer* x, bool variable) {
    while (x->at < x->size) {
        size_t end = 0;
        if (qlora__jin_lex_tag_end(x, variable, &end)) {
            QLORA__TRY(qlora__jin_lex_add(
                x, variable ? QLORA__JIN_T_VARIABLE_END : QLORA__JIN_T_BLOCK_END, NULL, 0));
            qlora__jin_lex_move(x, end);
            return QLORA_OK;
        }
        end = qlora__jin_skip_space(x->source, x->size, x->at);
        if (end > x->at) {
            qlora__jin_lex_move(x, end);
            continue;
        }
        qlora__jin_token_kind kind = QLORA__JIN_T_END;
        end = qlora__jin_lex_number(x, &kind);
        if (end == x->at) {
            kind = QLORA__JIN_T_NAME;
            end = qlora__jin_lex_name(x);
        }
        if (end == x->at && (x->source[x->at] == '\'' || x->source[x->at] == '"')) {
            kind = QLORA__JIN_T_STRING;
            end = qlora__jin_lex_string(x);
        }
        if (end == x->at) {
            QLORA__TRY(qlora__jin_lex_operator(x));
            continue;
        }
        QLORA__TRY(qlora__jin_lex_add(x, kind, x->source + x->at, end - x->at));
        qlora__jin_lex_move(x, end);
    }
    return QLORA_OK; // the parser reports what is missing
}

// ---- the whole template

static qlora_result qlora__jin_lex_next(qlora__jin_lexer* x) {
    size_t tag = x->at;
    while (tag + 1 < x->size &&
           (x->source[tag] != '{' || strchr("%{#", x->source[tag + 1]) == NULL ||
            x->source[tag + 1] == '\0')) {
        tag++;
    }
    if (tag + 1 >= x->size) {
        size_t begin = x->at;
        QLORA__TRY(qlora__jin_lex_add(x, QLORA__JIN_T_DATA, x->source + begin, x->size - begin));
        qlora__jin_lex_move(x, x->size);
        return QLORA_OK;
    }
    char which = x->source[tag + 1];
    char sign = qlora__jin_lex_sign(x, tag + 2);
    size_t body = tag + (sign != '\0' ? 3 : 2);
    size_t raw = 0;
    QLORA__TRY(qlora__jin_lex_data(x, tag, sign, which == '{'));
    if (which == '#') {
        return qlora__jin_lex_comment(x, body);
    }
    if (which == '%' && qlora__jin_lex_word(x, body, "raw", false, &raw)) {
        return qlora__jin_lex_raw(x, raw);
    }
    QLORA__TRY(
        qlora__jin_lex_add(x, which == '{' ? QLORA__JIN_T_VARIABLE : QLORA__JIN_T_BLOCK, NULL, 0));
    qlora__jin_lex_move(x, body);
    return qlora__jin_lex_tag(x, which == '{');
}

// A copy with \n for every line end and without one at the very end.
static qlora_result qlora__jin_lex_lines(qlora__jin_lexer* x, const char* source, size_t size) {
    void* memory = NULL;
    QLORA__TRY(qlora__jin_get(x->m, size + 1, &memory));
    char* copy = (char*)memory;
    size_t count = 0;
    for (size_t i = 0; i < size; i++) {
        char c = source[i];
        if (c == '\r') {
            i += i + 1 < size && source[i + 1] == '\n' ? 1 : 0;
            c = '\n';
        }
        copy[count++] = c;
    }
    count -= count > 0 && copy[count - 1] == '\n' ? 1 : 0;
    copy[count] = '\0';
    x->source = copy;
    x->size = count;
    for (size_t at = 0; at < count;) {
        uint32_t code = 0;
        size_t step = qlora__text_utf8((const unsigned char*)copy + at, count - at, &code);
        if (step == 0) {
            return qlora__jin_lex_fail(x, "the template is not UTF-8");
        }
        x->line += copy[at] == '\n' ? 1 : 0;
        at += step;
    }
    x->line = 1;
    return QLORA_OK;
}

static qlora_result qlora__jin_lex(qlora__jin_lexer* x, qlora__jin_machine* m, const char* source,
                                   size_t size) {
    memset(x, 0, sizeof *x);
    x->m = m;
    x->line = 1;
    x->line_start = true;
    QLORA__TRY(qlora__jin_lex_lines(x, source, size));
    while (x->at < x->size) {
        QLORA__TRY(qlora__jin_lex_next(x));
    }
    return qlora__jin_lex_add(x, QLORA__JIN_T_END, NULL, 0);
}

//@@ src/text/jinja_parse.h

// From tokens to a tree: expressions. The grammar and its precedence are jinja2's.

typedef enum qlora__jin_node_kind {
    QLORA__JIN_N_CONST, // value
    QLORA__JIN_N_NAME,  // name, slot
    QLORA__JIN_N_NSREF, // name.attribute as a target: name, value
    QLORA__JIN_N_LIST,  // a: items
    QLORA__JIN_N_TUPLE,
    QLORA__JIN_N_DICT,    // a: key, value, key, value, ...
    QLORA__JIN_N_GETATTR, // a.name
    QLORA__JIN_N_GETITEM, // a[b]
    QLORA__JIN_N_SLICE,   // a:b:c
    QLORA__JIN_N_CALL,    // a(b, ..., **e); b: positional, c: keywords, d: *d, e: **e
    QLORA__JIN_N_FILTER,  // a | name(b, c, d, e)
    QLORA__JIN_N_TEST,
    QLORA__JIN_N_KEYWORD, // name=a
    QLORA__JIN_N_NOT,     // a
    QLORA__JIN_N_NEG,
    QLORA__JIN_N_POS,
    QLORA__JIN_N_AND, // a, b
    QLORA__JIN_N_OR,
    QLORA__JIN_N_BINARY,       // a op b
    QLORA__JIN_N_COMPARE,      // a, then b: operands
    QLORA__JIN_N_OPERAND,      // op a
    QLORA__JIN_N_CONCAT,       // a: parts
    QLORA__JIN_N_COND,         // b if a else c
    QLORA__JIN_N_OUTPUT,       // a: expressions
    QLORA__JIN_N_IF,           // a: test, b: body, c: else or elif
    QLORA__JIN_N_FOR,          // a: target, b: iterable, c: body, d: else, e: test
    QLORA__JIN_N_ASSIGN,       // a = b
    QLORA__JIN_N_ASSIGN_BLOCK, // a: target, b: filter, c: body
    QLORA__JIN_N_MACRO,        // name, b: arguments (names with a default in a), c: body
    QLORA__JIN_N_CALL_BLOCK,   // a: call, b: arguments, c: body
    QLORA__JIN_N_FILTER_BLOCK, // b: filter, c: body
    QLORA__JIN_N_WITH,         // a: targets, b: values, c: body
    QLORA__JIN_N_GENERATION,   // c: body
    QLORA__JIN_N_BLOCK,        // name, c: body
    QLORA__JIN_N_LOADER,       // include, import, extends: an error when reached
    QLORA__JIN_N_BREAK,
    QLORA__JIN_N_CONTINUE,
    QLORA__JIN_N_KINDS
} qlora__jin_node_kind;

struct qlora__jin_scope;

typedef struct qlora__jin_node {
    qlora__jin_node_kind kind;
    uint32_t line;
    uint32_t nesting; // of the tree below
    char op[2];       // '*' '*' for **; 'i' in, 'n' not in; "==", "<" and so on
    bool flag;        // const: of a name, may be undefined; macro: uses caller
    bool uses_kwargs;
    bool uses_varargs;
    const char* name;
    size_t size;
    struct qlora__jin_node* a;
    struct qlora__jin_node* b;
    struct qlora__jin_node* c;
    struct qlora__jin_node* d;
    struct qlora__jin_node* e;
    struct qlora__jin_node* next; // in a list
    qlora__jin_value value;
    uint32_t hops; // functions outwards to the one that has the variable
    uint32_t slot;
    uint32_t slots; // of a function: how many variables
    struct qlora__jin_scope* scope;
    struct qlora__jin_scope* scope_else;
    struct qlora__jin_scope* scope_test;
    const void* found; // of a filter or a test
} qlora__jin_node;

typedef struct qlora__jin_parser {
    qlora__jin_machine* m;
    const qlora__jin_token* token; // the current one
    uint32_t depth;
    uint32_t loops; // around the current place, in the same function
    qlora_result (*expression)(struct qlora__jin_parser* p, bool conditional,
                               qlora__jin_node** out);
    qlora_result (*unary)(struct qlora__jin_parser* p, bool filters, qlora__jin_node** out);
    qlora_result (*negation)(struct qlora__jin_parser* p, qlora__jin_node** out);
    qlora_result (*statements)(struct qlora__jin_parser* p, const char* ends,
                               qlora__jin_node** out);
} qlora__jin_parser;

// Things in the order they are added.
typedef struct qlora__jin_chain {
    qlora__jin_node* first;
    qlora__jin_node* last;
} qlora__jin_chain;

static void qlora__jin_chain_add(qlora__jin_chain* chain, qlora__jin_node* node) {
    if (chain->last != NULL) {
        chain->last->next = node;
    } else {
        chain->first = node;
    }
    chain->last = node;
}

static qlora_result qlora__jin_node_make(qlora__jin_parser* p, qlora__jin_node_kind kind,
                                         qlora__jin_node** out) {
    void* memory = NULL;
    QLORA__TRY(qlora__jin_get(p->m, sizeof(qlora__jin_node), &memory));
    memset(memory, 0, sizeof(qlora__jin_node));
    *out = (qlora__jin_node*)memory;
    (*out)->kind = kind;
    (*out)->line = p->token->line;
    return QLORA_OK;
}

// A node with one or two operands.
static qlora_result qlora__jin_node_of(qlora__jin_parser* p, qlora__jin_node_kind kind,
                                       uint32_t line, qlora__jin_node* a, qlora__jin_node* b,
                                       qlora__jin_node** out) {
    QLORA__TRY(qlora__jin_node_make(p, kind, out));
    (*out)->line = line;
    (*out)->a = a;
    (*out)->b = b;
    return QLORA_OK;
}

// Measures a finished node, so that whatever walks the tree later is bounded.
static qlora_result qlora__jin_node_done(qlora__jin_parser* p, qlora__jin_node* node) {
    const qlora__jin_node* lists[5] = {node->a, node->b, node->c, node->d, node->e};
    for (size_t i = 0; i < 5; i++) {
        for (const qlora__jin_node* n = lists[i]; n != NULL; n = n->next) {
            node->nesting = n->nesting + 1 > node->nesting ? n->nesting + 1 : node->nesting;
        }
    }
    if (node->nesting > QLORA__JIN_MAX_NESTING) {
        p->m->line = node->line;
        return qlora__jin_fail(p->m, "the template is nested deeper than %d levels",
                               (int)QLORA__JIN_MAX_NESTING);
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_descend(qlora__jin_parser* p) {
    p->depth++;
    if (p->depth > QLORA__JIN_MAX_NESTING) {
        p->m->line = p->token->line;
        return qlora__jin_fail(p->m, "the template is nested deeper than %d levels",
                               (int)QLORA__JIN_MAX_NESTING);
    }
    return QLORA_OK;
}

// ---- tokens

static bool qlora__jin_at_operator(const qlora__jin_parser* p, const char* text) {
    return p->token->kind == QLORA__JIN_T_OPERATOR && p->token->size == strlen(text) &&
           memcmp(p->token->text, text, p->token->size) == 0;
}

static bool qlora__jin_token_is_name(const qlora__jin_token* token, const char* name) {
    return token->kind == QLORA__JIN_T_NAME && token->size == strlen(name) &&
           memcmp(token->text, name, token->size) == 0;
}

static bool qlora__jin_at_name(const qlora__jin_parser* p, const char* name) {
    return qlora__jin_token_is_name(p->token, name);
}

static void qlora__jin_step(qlora__jin_parser* p) {
    p->token += p->token->kind != QLORA__JIN_T_END ? 1 : 0;
}

static bool qlora__jin_skip_operator(qlora__jin_parser* p, const char* text) {
    bool there = qlora__jin_at_operator(p, text);
    if (there) {
        qlora__jin_step(p);
    }
    return there;
}

static bool qlora__jin_skip_name(qlora__jin_parser* p, const char* name) {
    bool there = qlora__jin_at_name(p, name);
    if (there) {
        qlora__jin_step(p);
    }
    return there;
}

static qlora_result qlora__jin_unexpected(qlora__jin_parser* p, const char* wanted) {
    const qlora__jin_token* t = p->token;
    int size = (int)(t->size < 60 ? t->size : 60);
    p->m->line = t->line;
    switch (t->kind) {
    case QLORA__JIN_T_END:
        return qlora__jin_fail(p->m, "expected %s, found the end of the template", wanted);
    case QLORA__JIN_T_VARIABLE_END:
    case QLORA__JIN_T_BLOCK_END:
        return qlora__jin_fail(p->m, "expected %s, found the end of the tag", wanted);
    case QLORA__JIN_T_DATA:
    case QLORA__JIN_T_VARIABLE:
    case QLORA__JIN_T_BLOCK:
        return qlora__jin_fail(p->m, "expected %s, found text", wanted);
    default:
        return qlora__jin_fail(p->m, "expected %s, found %.*s", wanted, size, t->text);
    }
}

static qlora_result qlora__jin_need_operator(qlora__jin_parser* p, const char* text) {
    return qlora__jin_skip_operator(p, text) ? QLORA_OK : qlora__jin_unexpected(p, text);
}

static qlora_result qlora__jin_need_kind(qlora__jin_parser* p, qlora__jin_token_kind kind,
                                         const char* wanted) {
    if (p->token->kind != kind) {
        return qlora__jin_unexpected(p, wanted);
    }
    qlora__jin_step(p);
    return QLORA_OK;
}

// ---- literals

static uint32_t qlora__jin_hex(const char* text, size_t size, bool* good) {
    uint32_t value = 0;
    for (size_t i = 0; i < size; i++) {
        char c = text[i];
        uint32_t digit = c >= '0' && c <= '9'   ? (uint32_t)(c - '0')
                         : c >= 'a' && c <= 'f' ? (uint32_t)(c - 'a' + 10)
                         : c >= 'A' && c <= 'F' ? (uint32_t)(c - 'A' + 10)
                                                : 16;
        *good = *good && digit < 16;
        value = value << 4 | (digit & 15);
    }
    return value;
}

// One escape at text[at], behind the backslash. Python leaves unknown ones as they are.
static qlora_result qlora__jin_escape(qlora__jin_parser* p, const char* text, size_t size,
                                      size_t* at, qlora__jin_buffer* out) {
    static const char plain[] = "\\'\"abfnrtv";
    static const char meant[] = "\\'\"\a\b\f\n\r\t\v";
    char c = text[*at];
    const char* hit = c != '\0' ? strchr(plain, c) : NULL;
    p->m->line = p->token->line;
    if (hit != NULL) {
        *at += 1;
        return qlora__jin_put(p->m, out, meant + (hit - plain), 1);
    }
    if (c == '\n') { // a line that goes on
        *at += 1;
        return QLORA_OK;
    }
    if (c >= '0' && c <= '7') {
        uint32_t code = 0;
        for (int i = 0; i < 3 && *at < size && text[*at] >= '0' && text[*at] <= '7'; i++) {
            code = code * 8 + (uint32_t)(text[*at] - '0');
            *at += 1;
        }
        return qlora__jin_put_code(p->m, out, code);
    }
    size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    if (digits > 0) {
        bool good = size - *at > digits;
        uint32_t code = good ? qlora__jin_hex(text + *at + 1, digits, &good) : 0;
        if (!good || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) {
            return qlora__jin_fail(p->m, "a string has an escape \\%c that is not a character", c);
        }
        *at += digits + 1;
        return qlora__jin_put_code(p->m, out, code);
    }
    if (c == 'N') {
        return qlora__jin_fail(p->m, "the escape \\N{...} is not supported");
    }
    if ((unsigned char)c >= 0x80) { // jinja2 decodes the string through ASCII
        char spelt[16];
        size_t step = 0;
        uint32_t code = qlora__jin_code_at(text, size, *at, &step);
        snprintf(spelt, sizeof spelt,
                 code < 0x100     ? "\\x%02x"
                 : code < 0x10000 ? "\\u%04x"
                                  : "\\U%08x",
                 (unsigned)code);
        *at += step;
        return qlora__jin_puts(p->m, out, spelt);
    }
    return qlora__jin_put(p->m, out, "\\", 1);
}

static qlora_result qlora__jin_unquote(qlora__jin_parser* p, qlora__jin_buffer* out) {
    const char* text = p->token->text + 1;
    size_t size = p->token->size - 2;
    size_t at = 0;
    while (at < size) {
        const char* slash = (const char*)memchr(text + at, '\\', size - at);
        size_t plain = slash != NULL ? (size_t)(slash - text) : size;
        QLORA__TRY(qlora__jin_put(p->m, out, text + at, plain - at));
        at = plain;
        if (slash != NULL) {
            at++;
            QLORA__TRY(qlora__jin_escape(p, text, size, &at, out));
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_integer(qlora__jin_parser* p, qlora__jin_value* out) {
    const char* text = p->token->text;
    size_t size = p->token->size;
    char kind = size > 2 && text[0] == '0' ? (char)(text[1] | 0x20) : '\0';
    uint64_t base = kind == 'x' ? 16 : kind == 'o' ? 8 : kind == 'b' ? 2 : 10;
    uint64_t value = 0;
    for (size_t i = base == 10 ? 0 : 2; i < size; i++) {
        bool good = true;
        if (text[i] == '_') {
            continue;
        }
        uint64_t digit = qlora__jin_hex(text + i, 1, &good);
        if (value > (INT64_MAX - digit) / base) {
            p->m->line = p->token->line;
            return qlora__jin_fail(p->m, "the integer %.*s does not fit 64 bits", (int)size, text);
        }
        value = value * base + digit;
    }
    *out = qlora__jin_int((int64_t)value);
    return QLORA_OK;
}

static qlora_result qlora__jin_real(qlora__jin_parser* p, qlora__jin_value* out) {
    char digits[400];
    size_t count = 0;
    for (size_t i = 0; i < p->token->size; i++) {
        if (p->token->text[i] != '_' && count < sizeof digits) {
            digits[count++] = p->token->text[i];
        }
    }
    *out = qlora__jin_float(qlora__number_parse(digits, count));
    return QLORA_OK;
}

// ---- primary expressions

static qlora_result qlora__jin_parse_tuple(qlora__jin_parser* p, bool conditional, bool parens,
                                           const char* end_name, qlora__jin_node** out) {
    qlora__jin_chain items;
    bool tuple = false;
    uint32_t line = p->token->line;
    memset(&items, 0, sizeof items);
    for (;;) {
        if (items.first != NULL) {
            QLORA__TRY(qlora__jin_need_operator(p, ","));
        }
        if (p->token->kind == QLORA__JIN_T_VARIABLE_END ||
            p->token->kind == QLORA__JIN_T_BLOCK_END || qlora__jin_at_operator(p, ")") ||
            (end_name != NULL && qlora__jin_at_name(p, end_name))) {
            break;
        }
        qlora__jin_node* item = NULL;
        QLORA__TRY(p->expression(p, conditional, &item));
        qlora__jin_chain_add(&items, item);
        if (!qlora__jin_at_operator(p, ",")) {
            break;
        }
        tuple = true;
    }
    if (!tuple && items.first != NULL) {
        *out = items.first;
        return QLORA_OK;
    }
    if (!tuple && !parens) {
        return qlora__jin_unexpected(p, "an expression");
    }
    QLORA__TRY(qlora__jin_node_of(p, QLORA__JIN_N_TUPLE, line, items.first, NULL, out));
    return qlora__jin_node_done(p, *out);
}

// [a, b] or {a: b, c: d}
static qlora_result qlora__jin_parse_items(qlora__jin_parser* p, bool dict, qlora__jin_node** out) {
    const char* close = dict ? "}" : "]";
    qlora__jin_chain items;
    uint32_t line = p->token->line;
    memset(&items, 0, sizeof items);
    qlora__jin_step(p);
    while (!qlora__jin_at_operator(p, close)) {
        if (items.first != NULL) {
            QLORA__TRY(qlora__jin_need_operator(p, ","));
            if (qlora__jin_at_operator(p, close)) {
                break;
            }
        }
        qlora__jin_node* item = NULL;
        QLORA__TRY(p->expression(p, true, &item));
        qlora__jin_chain_add(&items, item);
        if (dict) {
            QLORA__TRY(qlora__jin_need_operator(p, ":"));
            QLORA__TRY(p->expression(p, true, &item));
            qlora__jin_chain_add(&items, item);
        }
    }
    qlora__jin_step(p);
    QLORA__TRY(qlora__jin_node_of(p, dict ? QLORA__JIN_N_DICT : QLORA__JIN_N_LIST, line,
                                  items.first, NULL, out));
    return qlora__jin_node_done(p, *out);
}

static qlora_result qlora__jin_parse_name(qlora__jin_parser* p, qlora__jin_node** out) {
    static const char* const words[] = {"true", "True", "false", "False", "none", "None"};
    QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_NAME, out));
    (*out)->name = p->token->text;
    (*out)->size = p->token->size;
    for (size_t i = 0; i < QLORA__TEXT_COUNT(words); i++) {
        if (qlora__jin_at_name(p, words[i])) {
            (*out)->kind = QLORA__JIN_N_CONST;
            (*out)->value = i < 4 ? qlora__jin_bool(i < 2) : qlora__jin_none();
        }
    }
    qlora__jin_step(p);
    return QLORA_OK;
}

static qlora_result qlora__jin_parse_string(qlora__jin_parser* p, qlora__jin_node** out) {
    qlora__jin_buffer text;
    memset(&text, 0, sizeof text);
    QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_CONST, out));
    while (p->token->kind == QLORA__JIN_T_STRING) {
        QLORA__TRY(qlora__jin_unquote(p, &text));
        qlora__jin_step(p);
    }
    return qlora__jin_buffer_string(p->m, &text, &(*out)->value);
}

static qlora_result qlora__jin_parse_primary(qlora__jin_parser* p, qlora__jin_node** out) {
    switch (p->token->kind) {
    case QLORA__JIN_T_NAME:
        return qlora__jin_parse_name(p, out);
    case QLORA__JIN_T_STRING:
        return qlora__jin_parse_string(p, out);
    case QLORA__JIN_T_INTEGER:
    case QLORA__JIN_T_FLOAT:
        QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_CONST, out));
        QLORA__TRY(p->token->kind == QLORA__JIN_T_INTEGER ? qlora__jin_integer(p, &(*out)->value)
                                                          : qlora__jin_real(p, &(*out)->value));
        qlora__jin_step(p);
        return QLORA_OK;
    default:
        break;
    }
    if (qlora__jin_skip_operator(p, "(")) {
        QLORA__TRY(qlora__jin_parse_tuple(p, true, true, NULL, out));
        return qlora__jin_need_operator(p, ")");
    }
    if (qlora__jin_at_operator(p, "[") || qlora__jin_at_operator(p, "{")) {
        return qlora__jin_parse_items(p, qlora__jin_at_operator(p, "{"), out);
    }
    return qlora__jin_unexpected(p, "an expression");
}

// ---- calls, attributes, items, filters, tests

static qlora_result qlora__jin_parse_argument(qlora__jin_parser* p, qlora__jin_node* node,
                                              qlora__jin_chain* plain, qlora__jin_chain* named) {
    qlora__jin_node* value = NULL;
    bool star = qlora__jin_at_operator(p, "*");
    bool stars = qlora__jin_at_operator(p, "**");
    const qlora__jin_token* ahead = p->token + 1;
    bool keyword = p->token->kind == QLORA__JIN_T_NAME && ahead->kind == QLORA__JIN_T_OPERATOR &&
                   ahead->size == 1 && ahead->text[0] == '=';
    bool late = node->e != NULL || (star && node->d != NULL) ||
                (!keyword && !star && !stars && (node->d != NULL || named->first != NULL));
    if (late) {
        return qlora__jin_unexpected(p, "arguments in order");
    }
    if (star || stars) {
        qlora__jin_step(p);
        return p->expression(p, true, star ? &node->d : &node->e);
    }
    if (keyword) {
        qlora__jin_node* word = NULL;
        QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_KEYWORD, &word));
        word->name = p->token->text;
        word->size = p->token->size;
        p->token += 2;
        QLORA__TRY(p->expression(p, true, &word->a));
        QLORA__TRY(qlora__jin_node_done(p, word));
        // the value as a string is what a call passes on
        QLORA__TRY(qlora__jin_string_share(p->m, word->name, word->size, &word->value));
        for (const qlora__jin_node* n = named->first; n != NULL; n = n->next) {
            if (n->size == word->size && memcmp(n->name, word->name, n->size) == 0) {
                p->m->line = word->line;
                return qlora__jin_fail(p->m, "the argument \"%.*s\" is given twice",
                                       (int)(n->size < 60 ? n->size : 60), n->name);
            }
        }
        qlora__jin_chain_add(named, word);
        return QLORA_OK;
    }
    QLORA__TRY(p->expression(p, true, &value));
    qlora__jin_chain_add(plain, value);
    return QLORA_OK;
}

// (a, b=c, *d, **e) into b, c, d and e of the node.
static qlora_result qlora__jin_parse_arguments(qlora__jin_parser* p, qlora__jin_node* node) {
    qlora__jin_chain plain;
    qlora__jin_chain named;
    bool first = true;
    memset(&plain, 0, sizeof plain);
    memset(&named, 0, sizeof named);
    QLORA__TRY(qlora__jin_need_operator(p, "("));
    while (!qlora__jin_at_operator(p, ")")) {
        if (!first) {
            QLORA__TRY(qlora__jin_need_operator(p, ","));
            if (qlora__jin_at_operator(p, ")")) {
                break;
            }
        }
        QLORA__TRY(qlora__jin_parse_argument(p, node, &plain, &named));
        first = false;
    }
    qlora__jin_step(p);
    node->b = plain.first;
    node->c = named.first;
    return QLORA_OK;
}

static qlora_result qlora__jin_parse_call(qlora__jin_parser* p, qlora__jin_node** node) {
    qlora__jin_node* call = NULL;
    QLORA__TRY(qlora__jin_node_of(p, QLORA__JIN_N_CALL, p->token->line, *node, NULL, &call));
    QLORA__TRY(qlora__jin_parse_arguments(p, call));
    *node = call;
    return qlora__jin_node_done(p, call);
}

// What is between the brackets: an expression or a slice.
static qlora_result qlora__jin_parse_index(qlora__jin_parser* p, qlora__jin_node** out) {
    qlora__jin_node* parts[3] = {NULL, NULL, NULL};
    uint32_t line = p->token->line;
    if (!qlora__jin_at_operator(p, ":")) {
        QLORA__TRY(p->expression(p, true, &parts[0]));
        if (!qlora__jin_at_operator(p, ":")) {
            *out = parts[0];
            return QLORA_OK;
        }
    }
    for (int i = 1; i < 3 && qlora__jin_skip_operator(p, ":"); i++) {
        if (!qlora__jin_at_operator(p, ":") && !qlora__jin_at_operator(p, "]") &&
            !qlora__jin_at_operator(p, ",")) {
            QLORA__TRY(p->expression(p, true, &parts[i]));
        }
    }
    QLORA__TRY(qlora__jin_node_of(p, QLORA__JIN_N_SLICE, line, parts[0], parts[1], out));
    (*out)->c = parts[2];
    return qlora__jin_node_done(p, *out);
}

static qlora_result qlora__jin_parse_brackets(qlora__jin_parser* p, qlora__jin_node** out) {
    qlora__jin_chain items;
    uint32_t line = p->token->line;
    memset(&items, 0, sizeof items);
    while (!qlora__jin_at_operator(p, "]")) {
        qlora__jin_node* item = NULL;
        if (items.first != NULL) {
            QLORA__TRY(qlora__jin_need_operator(p, ","));
        }
        QLORA__TRY(qlora__jin_parse_index(p, &item));
        qlora__jin_chain_add(&items, item);
    }
    qlora__jin_step(p);
    *out = items.first;
    if (items.first == NULL || items.first->next != NULL) {
        QLORA__TRY(qlora__jin_node_of(p, QLORA__JIN_N_TUPLE, line, items.first, NULL, out));
        return qlora__jin_node_done(p, *out);
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_parse_subscript(qlora__jin_parser* p, qlora__jin_node** node) {
    qlora__jin_node* got = NULL;
    uint32_t line = p->token->line;
    if (qlora__jin_skip_operator(p, "[")) {
        QLORA__TRY(qlora__jin_node_of(p, QLORA__JIN_N_GETITEM, line, *node, NULL, &got));
        QLORA__TRY(qlora__jin_parse_brackets(p, &got->b));
        *node = got;
        return qlora__jin_node_done(p, got);
    }
    qlora__jin_step(p);
    if (p->token->kind == QLORA__JIN_T_NAME) {
        QLORA__TRY(qlora__jin_node_of(p, QLORA__JIN_N_GETATTR, line, *node, NULL, &got));
        got->name = p->token->text;
        got->size = p->token->size;
    } else if (p->token->kind == QLORA__JIN_T_INTEGER) {
        QLORA__TRY(qlora__jin_node_of(p, QLORA__JIN_N_GETITEM, line, *node, NULL, &got));
        QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_CONST, &got->b));
        QLORA__TRY(qlora__jin_integer(p, &got->b->value));
    } else {
        return qlora__jin_unexpected(p, "a name or a number");
    }
    qlora__jin_step(p);
    *node = got;
    return qlora__jin_node_done(p, got);
}

static qlora_result qlora__jin_parse_postfix(qlora__jin_parser* p, qlora__jin_node** node) {
    for (;;) {
        if (qlora__jin_at_operator(p, ".") || qlora__jin_at_operator(p, "[")) {
            QLORA__TRY(qlora__jin_parse_subscript(p, node));
        } else if (qlora__jin_at_operator(p, "(")) {
            QLORA__TRY(qlora__jin_parse_call(p, node));
        } else {
            return QLORA_OK;
        }
    }
}

// The name of a filter or a test, with dots.
static qlora_result qlora__jin_parse_dotted(qlora__jin_parser* p, qlora__jin_node* node) {
    qlora__jin_buffer name;
    memset(&name, 0, sizeof name);
    const qlora__jin_token* first = p->token;
    QLORA__TRY(qlora__jin_need_kind(p, QLORA__JIN_T_NAME, "a name"));
    QLORA__TRY(qlora__jin_put(p->m, &name, first->text, first->size));
    while (qlora__jin_skip_operator(p, ".")) {
        const qlora__jin_token* more = p->token;
        QLORA__TRY(qlora__jin_need_kind(p, QLORA__JIN_T_NAME, "a name"));
        QLORA__TRY(qlora__jin_put(p->m, &name, ".", 1));
        QLORA__TRY(qlora__jin_put(p->m, &name, more->text, more->size));
    }
    node->name = name.data;
    node->size = name.count;
    return QLORA_OK;
}

// The filters from here on; with `inlined`, the first one has no bar before it.
static qlora_result qlora__jin_parse_filter(qlora__jin_parser* p, bool inlined,
                                            qlora__jin_node** node) {
    while (inlined || qlora__jin_skip_operator(p, "|")) {
        qlora__jin_node* filter = NULL;
        inlined = false;
        QLORA__TRY(
            qlora__jin_node_of(p, QLORA__JIN_N_FILTER, p->token->line, *node, NULL, &filter));
        QLORA__TRY(qlora__jin_parse_dotted(p, filter));
        if (qlora__jin_at_operator(p, "(")) {
            QLORA__TRY(qlora__jin_parse_arguments(p, filter));
        }
        QLORA__TRY(qlora__jin_node_done(p, filter));
        *node = filter;
    }
    return QLORA_OK;
}

// Whether the argument of a test may start here without parentheses.
static bool qlora__jin_at_test_argument(const qlora__jin_parser* p) {
    switch (p->token->kind) {
    case QLORA__JIN_T_NAME:
        return !qlora__jin_at_name(p, "else") && !qlora__jin_at_name(p, "or") &&
               !qlora__jin_at_name(p, "and");
    case QLORA__JIN_T_STRING:
    case QLORA__JIN_T_INTEGER:
    case QLORA__JIN_T_FLOAT:
        return true;
    default:
        return qlora__jin_at_operator(p, "[") || qlora__jin_at_operator(p, "{");
    }
}

static qlora_result qlora__jin_parse_test(qlora__jin_parser* p, qlora__jin_node** node) {
    qlora__jin_node* test = NULL;
    uint32_t line = p->token->line;
    qlora__jin_step(p);
    bool negated = qlora__jin_skip_name(p, "not");
    QLORA__TRY(qlora__jin_node_of(p, QLORA__JIN_N_TEST, line, *node, NULL, &test));
    QLORA__TRY(qlora__jin_parse_dotted(p, test));
    if (qlora__jin_at_operator(p, "(")) {
        QLORA__TRY(qlora__jin_parse_arguments(p, test));
    } else if (qlora__jin_at_test_argument(p)) {
        if (qlora__jin_at_name(p, "is")) {
            return qlora__jin_unexpected(p, "only one test with is");
        }
        QLORA__TRY(qlora__jin_parse_primary(p, &test->b));
        QLORA__TRY(qlora__jin_parse_postfix(p, &test->b));
    }
    QLORA__TRY(qlora__jin_node_done(p, test));
    *node = test;
    if (negated) {
        QLORA__TRY(qlora__jin_node_of(p, QLORA__JIN_N_NOT, line, test, NULL, node));
        QLORA__TRY(qlora__jin_node_done(p, *node));
    }
    return QLORA_OK;
}

// ---- operators, from the tightest to the loosest

static qlora_result qlora__jin_parse_unary(qlora__jin_parser* p, bool filters,
                                           qlora__jin_node** out) {
    QLORA__TRY(qlora__jin_descend(p));
    uint32_t line = p->token->line;
    bool minus = qlora__jin_skip_operator(p, "-");
    if (minus || qlora__jin_skip_operator(p, "+")) {
        qlora__jin_node* inner = NULL;
        QLORA__TRY(p->unary(p, false, &inner));
        QLORA__TRY(qlora__jin_node_of(p, minus ? QLORA__JIN_N_NEG : QLORA__JIN_N_POS, line, inner,
                                      NULL, out));
        QLORA__TRY(qlora__jin_node_done(p, *out));
    } else {
        QLORA__TRY(qlora__jin_parse_primary(p, out));
    }
    QLORA__TRY(qlora__jin_parse_postfix(p, out));
    while (filters) {
        if (qlora__jin_at_operator(p, "|")) {
            QLORA__TRY(qlora__jin_parse_filter(p, false, out));
        } else if (qlora__jin_at_name(p, "is")) {
            QLORA__TRY(qlora__jin_parse_test(p, out));
        } else if (qlora__jin_at_operator(p, "(")) {
            QLORA__TRY(qlora__jin_parse_call(p, out));
        } else {
            break;
        }
    }
    p->depth--;
    return QLORA_OK;
}

typedef qlora_result (*qlora__jin_parse_fn)(qlora__jin_parser* p, qlora__jin_node** out);

// operand op operand op ..., grouped to the left.
static qlora_result qlora__jin_parse_left(qlora__jin_parser* p, const char* const* operators,
                                          size_t count, qlora__jin_parse_fn operand,
                                          qlora__jin_node** out) {
    QLORA__TRY(operand(p, out));
    for (;;) {
        size_t i = 0;
        uint32_t line = p->token->line;
        while (i < count && !qlora__jin_skip_operator(p, operators[i])) {
            i++;
        }
        if (i == count) {
            return QLORA_OK;
        }
        qlora__jin_node* node = NULL;
        qlora__jin_node* right = NULL;
        QLORA__TRY(operand(p, &right));
        QLORA__TRY(qlora__jin_node_of(p, QLORA__JIN_N_BINARY, line, *out, right, &node));
        node->op[0] = operators[i][0];
        node->op[1] = operators[i][1];
        QLORA__TRY(qlora__jin_node_done(p, node));
        *out = node;
    }
}

static qlora_result qlora__jin_parse_with_filters(qlora__jin_parser* p, qlora__jin_node** out) {
    return qlora__jin_parse_unary(p, true, out);
}

static qlora_result qlora__jin_parse_power(qlora__jin_parser* p, qlora__jin_node** out) {
    static const char* const operators[] = {"**"};
    return qlora__jin_parse_left(p, operators, 1, qlora__jin_parse_with_filters, out);
}

static qlora_result qlora__jin_parse_product(qlora__jin_parser* p, qlora__jin_node** out) {
    static const char* const operators[] = {"*", "/", "//", "%"};
    return qlora__jin_parse_left(p, operators, 4, qlora__jin_parse_power, out);
}

static qlora_result qlora__jin_parse_concat(qlora__jin_parser* p, qlora__jin_node** out) {
    qlora__jin_chain parts;
    uint32_t line = p->token->line;
    memset(&parts, 0, sizeof parts);
    QLORA__TRY(qlora__jin_parse_product(p, out));
    if (!qlora__jin_at_operator(p, "~")) {
        return QLORA_OK;
    }
    qlora__jin_chain_add(&parts, *out);
    while (qlora__jin_skip_operator(p, "~")) {
        qlora__jin_node* part = NULL;
        QLORA__TRY(qlora__jin_parse_product(p, &part));
        qlora__jin_chain_add(&parts, part);
    }
    QLORA__TRY(qlora__jin_node_of(p, QLORA__JIN_N_CONCAT, line, parts.first, NULL, out));
    return qlora__jin_node_done(p, *out);
}

static qlora_result qlora__jin_parse_sum(qlora__jin_parser* p, qlora__jin_node** out) {
    static const char* const operators[] = {"+", "-"};
    return qlora__jin_parse_left(p, operators, 2, qlora__jin_parse_concat, out);
}

//@@ src/text/jinja_parse_tags.h

// From tokens to a tree: comparisons, conditions and statements.

// The operator of a comparison at this place, as a node's op; false when there is none.
static bool qlora__jin_comparison(qlora__jin_parser* p, char op[2]) {
    static const char* const operators[] = {"==", "!=", "<", "<=", ">", ">="};
    op[1] = '\0';
    for (size_t i = 0; i < QLORA__TEXT_COUNT(operators); i++) {
        if (qlora__jin_skip_operator(p, operators[i])) {
            op[0] = operators[i][0];
            op[1] = operators[i][1];
            return true;
        }
    }
    op[0] = 'i';
    if (qlora__jin_skip_name(p, "in")) {
        return true;
    }
    op[0] = 'n';
    if (qlora__jin_at_name(p, "not") && qlora__jin_token_is_name(p->token + 1, "in")) {
        p->token += 2;
        return true;
    }
    return false;
}

static qlora_result qlora__jin_parse_compare(qlora__jin_parser* p, qlora__jin_node** out) {
    qlora__jin_chain operands;
    char op[2];
    uint32_t line = p->token->line;
    memset(&operands, 0, sizeof operands);
    QLORA__TRY(qlora__jin_parse_sum(p, out));
    while (qlora__jin_comparison(p, op)) {
        qlora__jin_node* operand = NULL;
        QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_OPERAND, &operand));
        QLORA__TRY(qlora__jin_parse_sum(p, &operand->a));
        memcpy(operand->op, op, sizeof op);
        QLORA__TRY(qlora__jin_node_done(p, operand));
        qlora__jin_chain_add(&operands, operand);
    }
    if (operands.first == NULL) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__jin_node_of(p, QLORA__JIN_N_COMPARE, line, *out, operands.first, out));
    return qlora__jin_node_done(p, *out);
}

static qlora_result qlora__jin_parse_not(qlora__jin_parser* p, qlora__jin_node** out) {
    uint32_t line = p->token->line;
    if (!qlora__jin_skip_name(p, "not")) {
        return qlora__jin_parse_compare(p, out);
    }
    qlora__jin_node* inner = NULL;
    QLORA__TRY(qlora__jin_descend(p));
    QLORA__TRY(p->negation(p, &inner));
    p->depth--;
    QLORA__TRY(qlora__jin_node_of(p, QLORA__JIN_N_NOT, line, inner, NULL, out));
    return qlora__jin_node_done(p, *out);
}

static qlora_result qlora__jin_parse_and(qlora__jin_parser* p, qlora__jin_node** out) {
    QLORA__TRY(qlora__jin_parse_not(p, out));
    while (qlora__jin_skip_name(p, "and")) {
        qlora__jin_node* right = NULL;
        uint32_t line = p->token->line;
        QLORA__TRY(qlora__jin_parse_not(p, &right));
        QLORA__TRY(qlora__jin_node_of(p, QLORA__JIN_N_AND, line, *out, right, out));
        QLORA__TRY(qlora__jin_node_done(p, *out));
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_parse_or(qlora__jin_parser* p, qlora__jin_node** out) {
    QLORA__TRY(qlora__jin_parse_and(p, out));
    while (qlora__jin_skip_name(p, "or")) {
        qlora__jin_node* right = NULL;
        uint32_t line = p->token->line;
        QLORA__TRY(qlora__jin_parse_and(p, &right));
        QLORA__TRY(qlora__jin_node_of(p, QLORA__JIN_N_OR, line, *out, right, out));
        QLORA__TRY(qlora__jin_node_done(p, *out));
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_parse_expression(qlora__jin_parser* p, bool conditional,
                                                qlora__jin_node** out) {
    QLORA__TRY(qlora__jin_descend(p));
    QLORA__TRY(qlora__jin_parse_or(p, out));
    while (conditional && qlora__jin_skip_name(p, "if")) {
        qlora__jin_node* node = NULL;
        QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_COND, &node));
        node->b = *out;
        QLORA__TRY(qlora__jin_parse_or(p, &node->a));
        if (qlora__jin_skip_name(p, "else")) {
            QLORA__TRY(p->expression(p, true, &node->c));
        }
        QLORA__TRY(qlora__jin_node_done(p, node));
        *out = node;
    }
    p->depth--;
    return QLORA_OK;
}

// ---- targets of assignments

static bool qlora__jin_is_literal(const qlora__jin_token* token) {
    static const char* const words[] = {"true", "True", "false", "False", "none", "None"};
    for (size_t i = 0; i < QLORA__TEXT_COUNT(words); i++) {
        if (qlora__jin_token_is_name(token, words[i])) {
            return true;
        }
    }
    return false;
}

static qlora_result qlora__jin_parse_target_name(qlora__jin_parser* p, bool attribute,
                                                 qlora__jin_node** out) {
    if (p->token->kind != QLORA__JIN_T_NAME || qlora__jin_is_literal(p->token)) {
        return qlora__jin_unexpected(p, "the name of a variable");
    }
    QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_NAME, out));
    (*out)->name = p->token->text;
    (*out)->size = p->token->size;
    qlora__jin_step(p);
    if (attribute && qlora__jin_skip_operator(p, ".")) {
        const qlora__jin_token* name = p->token;
        QLORA__TRY(qlora__jin_need_kind(p, QLORA__JIN_T_NAME, "the name of an attribute"));
        (*out)->kind = QLORA__JIN_N_NSREF;
        return qlora__jin_string_share(p->m, name->text, name->size, &(*out)->value);
    }
    return QLORA_OK;
}

// a, or a, b, or (a, (b, c)): the ends are "in", "=" or the end of the tag.
static qlora_result qlora__jin_parse_target(qlora__jin_parser* p, bool attribute,
                                            const char* end_name, qlora__jin_node** out) {
    // one open tuple per level
    qlora__jin_chain chains[16];
    size_t level = 0;
    bool tuples[16];
    memset(chains, 0, sizeof chains);
    memset(tuples, 0, sizeof tuples);
    for (;;) {
        qlora__jin_node* node = NULL;
        bool end = p->token->kind == QLORA__JIN_T_BLOCK_END || qlora__jin_at_operator(p, ")") ||
                   (level == 0 && end_name != NULL && qlora__jin_at_name(p, end_name));
        if (!end && qlora__jin_skip_operator(p, "(")) {
            level++;
            if (level == QLORA__TEXT_COUNT(chains)) {
                return qlora__jin_unexpected(p, "a target with fewer parentheses");
            }
            memset(&chains[level], 0, sizeof chains[level]);
            tuples[level] = false;
            continue;
        }
        if (!end) {
            QLORA__TRY(qlora__jin_parse_target_name(p, attribute, &node));
            qlora__jin_chain_add(&chains[level], node);
        }
        while (!qlora__jin_skip_operator(p, ",")) {
            if (chains[level].first == NULL) {
                return qlora__jin_unexpected(p, "the name of a variable");
            }
            node = chains[level].first;
            if (tuples[level]) {
                QLORA__TRY(
                    qlora__jin_node_of(p, QLORA__JIN_N_TUPLE, node->line, node, NULL, &node));
                QLORA__TRY(qlora__jin_node_done(p, node));
            }
            if (level == 0) {
                *out = node;
                return QLORA_OK;
            }
            QLORA__TRY(qlora__jin_need_operator(p, ")"));
            level--;
            qlora__jin_chain_add(&chains[level], node);
        }
        if (chains[level].first == NULL) {
            return qlora__jin_unexpected(p, "the name of a variable");
        }
        tuples[level] = true;
    }
}

// ---- statements

// What follows a tag up to one of the tags in `ends` ("endif else "), which is left as the current
// token.
static qlora_result qlora__jin_parse_body(qlora__jin_parser* p, const char* ends,
                                          qlora__jin_node** out) {
    qlora__jin_skip_operator(p, ":");
    QLORA__TRY(qlora__jin_need_kind(p, QLORA__JIN_T_BLOCK_END, "the end of the tag"));
    QLORA__TRY(qlora__jin_descend(p));
    QLORA__TRY(p->statements(p, ends, out));
    p->depth--;
    if (p->token->kind == QLORA__JIN_T_END) {
        p->m->line = p->token->line;
        return qlora__jin_fail(p->m, "the template ends, but one of these tags is missing: %s",
                               ends);
    }
    return QLORA_OK;
}

// The same for one end tag, which is skipped.
static qlora_result qlora__jin_parse_whole(qlora__jin_parser* p, const char* end,
                                           qlora__jin_node** out) {
    QLORA__TRY(qlora__jin_parse_body(p, end, out));
    qlora__jin_step(p);
    return QLORA_OK;
}

static qlora_result qlora__jin_parse_set(qlora__jin_parser* p, qlora__jin_node** out) {
    QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_ASSIGN, out));
    qlora__jin_step(p);
    QLORA__TRY(qlora__jin_parse_target(p, true, NULL, &(*out)->a));
    if (qlora__jin_skip_operator(p, "=")) {
        return qlora__jin_parse_tuple(p, true, false, NULL, &(*out)->b);
    }
    (*out)->kind = QLORA__JIN_N_ASSIGN_BLOCK;
    QLORA__TRY(qlora__jin_parse_filter(p, false, &(*out)->b));
    return qlora__jin_parse_whole(p, "endset ", &(*out)->c);
}

static qlora_result qlora__jin_parse_for(qlora__jin_parser* p, qlora__jin_node** out) {
    QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_FOR, out));
    qlora__jin_step(p);
    QLORA__TRY(qlora__jin_parse_target(p, false, "in", &(*out)->a));
    if (!qlora__jin_skip_name(p, "in")) {
        return qlora__jin_unexpected(p, "in");
    }
    QLORA__TRY(qlora__jin_parse_tuple(p, false, false, "recursive", &(*out)->b));
    if (qlora__jin_skip_name(p, "if")) {
        QLORA__TRY(p->expression(p, true, &(*out)->e));
    }
    if (qlora__jin_at_name(p, "recursive")) {
        p->m->line = p->token->line;
        return qlora__jin_fail(p->m, "recursive loops are not supported");
    }
    p->loops++;
    QLORA__TRY(qlora__jin_parse_body(p, "endfor else ", &(*out)->c));
    p->loops--;
    if (qlora__jin_skip_name(p, "else")) {
        return qlora__jin_parse_whole(p, "endfor ", &(*out)->d);
    }
    qlora__jin_step(p);
    return QLORA_OK;
}

// An elif is an if in the else part, without an end of its own. It is linked at the end, so that a
// long chain is not a deep tree.
static qlora_result qlora__jin_parse_if(qlora__jin_parser* p, qlora__jin_node** out) {
    QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_IF, out));
    qlora__jin_node* node = *out;
    qlora__jin_step(p);
    for (;;) {
        QLORA__TRY(qlora__jin_parse_tuple(p, false, false, NULL, &node->a));
        QLORA__TRY(qlora__jin_parse_body(p, "elif else endif ", &node->b));
        QLORA__TRY(qlora__jin_node_done(p, node));
        if (qlora__jin_skip_name(p, "elif")) {
            QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_IF, &node->d));
            node = node->d;
            continue;
        }
        if (qlora__jin_skip_name(p, "else")) {
            return qlora__jin_parse_whole(p, "endif ", &node->c);
        }
        qlora__jin_step(p);
        return QLORA_OK;
    }
}

// (a, b=1): a list of names, each with its default.
static qlora_result qlora__jin_parse_signature(qlora__jin_parser* p, qlora__jin_node** out) {
    qlora__jin_chain names;
    bool defaults = false;
    memset(&names, 0, sizeof names);
    QLORA__TRY(qlora__jin_need_operator(p, "("));
    while (!qlora__jin_at_operator(p, ")")) {
        qlora__jin_node* name = NULL;
        if (names.first != NULL) {
            QLORA__TRY(qlora__jin_need_operator(p, ","));
        }
        QLORA__TRY(qlora__jin_parse_target_name(p, false, &name));
        for (const qlora__jin_node* n = names.first; n != NULL; n = n->next) {
            if (n->size == name->size && memcmp(n->name, name->name, n->size) == 0) {
                p->m->line = name->line;
                return qlora__jin_fail(p->m, "an argument of a macro is named twice");
            }
        }
        if (qlora__jin_skip_operator(p, "=")) {
            QLORA__TRY(p->expression(p, true, &name->a));
            defaults = true;
        } else if (defaults) {
            return qlora__jin_unexpected(p, "a default, as the argument before it has one");
        }
        QLORA__TRY(qlora__jin_node_done(p, name));
        qlora__jin_chain_add(&names, name);
    }
    qlora__jin_step(p);
    *out = names.first;
    return QLORA_OK;
}

// The body of a macro or call block is a function of its own: a break cannot leave it.
static qlora_result qlora__jin_parse_function(qlora__jin_parser* p, const char* end,
                                              qlora__jin_node* node) {
    uint32_t loops = p->loops;
    p->loops = 0;
    QLORA__TRY(qlora__jin_parse_whole(p, end, &node->c));
    p->loops = loops;
    return QLORA_OK;
}

static qlora_result qlora__jin_parse_macro(qlora__jin_parser* p, qlora__jin_node** out) {
    QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_MACRO, out));
    qlora__jin_step(p);
    const qlora__jin_token* name = p->token;
    qlora__jin_node* target = NULL;
    QLORA__TRY(qlora__jin_parse_target_name(p, false, &target));
    (*out)->name = name->text;
    (*out)->size = name->size;
    QLORA__TRY(qlora__jin_parse_signature(p, &(*out)->b));
    return qlora__jin_parse_function(p, "endmacro ", *out);
}

static qlora_result qlora__jin_parse_call_block(qlora__jin_parser* p, qlora__jin_node** out) {
    QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_CALL_BLOCK, out));
    qlora__jin_step(p);
    if (qlora__jin_at_operator(p, "(")) {
        QLORA__TRY(qlora__jin_parse_signature(p, &(*out)->b));
    }
    QLORA__TRY(p->expression(p, true, &(*out)->a));
    if ((*out)->a->kind != QLORA__JIN_N_CALL) {
        return qlora__jin_unexpected(p, "a call");
    }
    return qlora__jin_parse_function(p, "endcall ", *out);
}

static qlora_result qlora__jin_parse_generation(qlora__jin_parser* p, qlora__jin_node** out) {
    QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_GENERATION, out));
    qlora__jin_step(p);
    return qlora__jin_parse_function(p, "endgeneration ", *out);
}

static qlora_result qlora__jin_parse_filter_block(qlora__jin_parser* p, qlora__jin_node** out) {
    QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_FILTER_BLOCK, out));
    qlora__jin_step(p);
    QLORA__TRY(qlora__jin_parse_filter(p, true, &(*out)->b));
    return qlora__jin_parse_whole(p, "endfilter ", &(*out)->c);
}

static qlora_result qlora__jin_parse_with(qlora__jin_parser* p, qlora__jin_node** out) {
    qlora__jin_chain targets;
    qlora__jin_chain values;
    memset(&targets, 0, sizeof targets);
    memset(&values, 0, sizeof values);
    QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_WITH, out));
    qlora__jin_step(p);
    while (p->token->kind != QLORA__JIN_T_BLOCK_END) {
        qlora__jin_node* item = NULL;
        if (targets.first != NULL) {
            QLORA__TRY(qlora__jin_need_operator(p, ","));
        }
        QLORA__TRY(qlora__jin_parse_target(p, false, NULL, &item));
        qlora__jin_chain_add(&targets, item);
        QLORA__TRY(qlora__jin_need_operator(p, "="));
        QLORA__TRY(p->expression(p, true, &item));
        qlora__jin_chain_add(&values, item);
    }
    (*out)->a = targets.first;
    (*out)->b = values.first;
    return qlora__jin_parse_whole(p, "endwith ", &(*out)->c);
}

static qlora_result qlora__jin_parse_jump(qlora__jin_parser* p, qlora__jin_node** out) {
    bool leave = qlora__jin_at_name(p, "break");
    if (p->loops == 0) {
        return qlora__jin_unexpected(p, "a loop around break or continue");
    }
    QLORA__TRY(qlora__jin_node_make(p, leave ? QLORA__JIN_N_BREAK : QLORA__JIN_N_CONTINUE, out));
    qlora__jin_step(p);
    return QLORA_OK;
}

static qlora_result qlora__jin_parse_print(qlora__jin_parser* p, qlora__jin_node** out) {
    qlora__jin_chain items;
    memset(&items, 0, sizeof items);
    QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_OUTPUT, out));
    qlora__jin_step(p);
    while (p->token->kind != QLORA__JIN_T_BLOCK_END) {
        qlora__jin_node* item = NULL;
        if (items.first != NULL) {
            QLORA__TRY(qlora__jin_need_operator(p, ","));
        }
        QLORA__TRY(p->expression(p, true, &item));
        qlora__jin_chain_add(&items, item);
    }
    (*out)->a = items.first;
    return QLORA_OK;
}

// Known to jinja2 but without a meaning for a chat template: there is no other template to load.
static qlora_result qlora__jin_parse_other(qlora__jin_parser* p, qlora__jin_node** out) {
    p->m->line = p->token->line;
    (void)out;
    return qlora__jin_fail(p->m, "the tag \"%.*s\" is not supported",
                           (int)(p->token->size < 60 ? p->token->size : 60), p->token->text);
}

typedef struct qlora__jin_tag {
    const char* name;
    qlora__jin_parse_fn parse;
} qlora__jin_tag;

static const qlora__jin_tag qlora__jin_tags[] = {
    {"if", qlora__jin_parse_if},           {"for", qlora__jin_parse_for},
    {"set", qlora__jin_parse_set},         {"macro", qlora__jin_parse_macro},
    {"call", qlora__jin_parse_call_block}, {"filter", qlora__jin_parse_filter_block},
    {"with", qlora__jin_parse_with},       {"generation", qlora__jin_parse_generation},
    {"break", qlora__jin_parse_jump},      {"continue", qlora__jin_parse_jump},
    {"print", qlora__jin_parse_print},     {"block", qlora__jin_parse_other},
    {"include", qlora__jin_parse_other},   {"import", qlora__jin_parse_other},
    {"from", qlora__jin_parse_other},      {"extends", qlora__jin_parse_other},
    {"autoescape", qlora__jin_parse_other}};

static qlora_result qlora__jin_parse_tag(qlora__jin_parser* p, qlora__jin_node** out) {
    if (p->token->kind != QLORA__JIN_T_NAME) {
        return qlora__jin_unexpected(p, "the name of a tag");
    }
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__jin_tags); i++) {
        if (qlora__jin_at_name(p, qlora__jin_tags[i].name)) {
            QLORA__TRY(qlora__jin_tags[i].parse(p, out));
            return qlora__jin_node_done(p, *out);
        }
    }
    p->m->line = p->token->line;
    return qlora__jin_fail(p->m, "unknown tag \"%.*s\"",
                           (int)(p->token->size < 60 ? p->token->size : 60), p->token->text);
}

// Whether the current token is one of the names in "endif else ".
static bool qlora__jin_at_end(const qlora__jin_parser* p, const char* ends) {
    while (ends != NULL && *ends != '\0') {
        size_t size = strcspn(ends, " ");
        if (p->token->kind == QLORA__JIN_T_NAME && p->token->size == size &&
            memcmp(p->token->text, ends, size) == 0) {
            return true;
        }
        ends += size + 1;
    }
    return false;
}

static qlora_result qlora__jin_parse_data(qlora__jin_parser* p, qlora__jin_node** out) {
    QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_CONST, out));
    QLORA__TRY(qlora__jin_string_share(p->m, p->token->text, p->token->size, &(*out)->value));
    qlora__jin_step(p);
    return QLORA_OK;
}

// Text and expressions in a row are one output statement.
static qlora_result qlora__jin_parse_output(qlora__jin_parser* p, qlora__jin_node** out) {
    qlora__jin_chain items;
    memset(&items, 0, sizeof items);
    QLORA__TRY(qlora__jin_node_make(p, QLORA__JIN_N_OUTPUT, out));
    for (;;) {
        qlora__jin_node* item = NULL;
        if (p->token->kind == QLORA__JIN_T_DATA) {
            QLORA__TRY(qlora__jin_parse_data(p, &item));
        } else if (p->token->kind == QLORA__JIN_T_VARIABLE) {
            qlora__jin_step(p);
            QLORA__TRY(qlora__jin_parse_tuple(p, true, false, NULL, &item));
            QLORA__TRY(qlora__jin_need_kind(p, QLORA__JIN_T_VARIABLE_END, "}}"));
        } else {
            break;
        }
        qlora__jin_chain_add(&items, item);
    }
    (*out)->a = items.first;
    return qlora__jin_node_done(p, *out);
}

static qlora_result qlora__jin_parse_statements(qlora__jin_parser* p, const char* ends,
                                                qlora__jin_node** out) {
    qlora__jin_chain body;
    memset(&body, 0, sizeof body);
    while (p->token->kind != QLORA__JIN_T_END) {
        qlora__jin_node* node = NULL;
        if (p->token->kind == QLORA__JIN_T_BLOCK) {
            qlora__jin_step(p);
            if (qlora__jin_at_end(p, ends)) {
                break;
            }
            QLORA__TRY(qlora__jin_parse_tag(p, &node));
            QLORA__TRY(qlora__jin_need_kind(p, QLORA__JIN_T_BLOCK_END, "the end of the tag"));
        } else {
            QLORA__TRY(qlora__jin_parse_output(p, &node));
        }
        qlora__jin_chain_add(&body, node);
    }
    *out = body.first;
    return QLORA_OK;
}

// The root is a node with the template in c.
static qlora_result qlora__jin_parse(qlora__jin_machine* m, const char* source, size_t size,
                                     qlora__jin_node** out) {
    qlora__jin_lexer lexer;
    qlora__jin_parser parser;
    memset(&parser, 0, sizeof parser);
    QLORA__TRY(qlora__jin_lex(&lexer, m, source, size));
    parser.m = m;
    parser.token = lexer.tokens;
    parser.expression = qlora__jin_parse_expression;
    parser.unary = qlora__jin_parse_unary;
    parser.negation = qlora__jin_parse_not;
    parser.statements = qlora__jin_parse_statements;
    QLORA__TRY(qlora__jin_node_make(&parser, QLORA__JIN_N_BLOCK, out));
    return qlora__jin_parse_statements(&parser, NULL, &(*out)->c);
}

//@@ src/text/jinja_scope.h

// Which variable a name means. jinja2 decides this when it compiles: each scope (the template, the
// body of a loop, a macro, ...) has a table of the names it uses, and each name is loaded when the
// scope is entered: from the scope around it, from the values given to the rendering, or not at
// all. The rules are those of jinja2's idtracking, so that its oddities are the same.

enum {
    QLORA__JIN_LOAD_PARAMETER, // set by a loop or a call
    QLORA__JIN_LOAD_RESOLVE,   // from what is given to the rendering
    QLORA__JIN_LOAD_ALIAS,     // a copy of the variable outside
    QLORA__JIN_LOAD_UNDEFINED
};

typedef struct qlora__jin_symbol {
    struct qlora__jin_symbol* next;
    const char* name;
    size_t size;
    uint32_t slot;
    int load;
    uint32_t hops; // of an alias: where the variable outside is
    uint32_t from;
} qlora__jin_symbol;

typedef struct qlora__jin_scope {
    struct qlora__jin_scope* outer;
    qlora__jin_symbol* symbols;
    qlora__jin_symbol** tail;
    uint32_t function; // how many functions are around it
    uint32_t* slots;   // of that function, counted
} qlora__jin_scope;

typedef struct qlora__jin_binder {
    qlora__jin_machine* m;
    const void* (*filter)(const char* name, size_t size, bool test);
} qlora__jin_binder;

static qlora__jin_symbol* qlora__jin_symbol_here(const qlora__jin_scope* scope, const char* name,
                                                 size_t size) {
    for (qlora__jin_symbol* s = scope->symbols; s != NULL; s = s->next) {
        if (s->size == size && memcmp(s->name, name, size) == 0) {
            return s;
        }
    }
    return NULL;
}

// The symbol in this scope or around it; *function says whose variable it is.
static qlora__jin_symbol* qlora__jin_symbol_find(const qlora__jin_scope* scope, const char* name,
                                                 size_t size, uint32_t* function) {
    for (; scope != NULL; scope = scope->outer) {
        qlora__jin_symbol* symbol = qlora__jin_symbol_here(scope, name, size);
        if (symbol != NULL) {
            *function = scope->function;
            return symbol;
        }
    }
    return NULL;
}

static qlora_result qlora__jin_symbol_add(qlora__jin_binder* b, qlora__jin_scope* scope,
                                          const char* name, size_t size, int load,
                                          qlora__jin_symbol** out) {
    void* memory = NULL;
    QLORA__TRY(qlora__jin_get(b->m, sizeof(qlora__jin_symbol), &memory));
    memset(memory, 0, sizeof(qlora__jin_symbol));
    qlora__jin_symbol* symbol = (qlora__jin_symbol*)memory;
    symbol->name = name;
    symbol->size = size;
    symbol->load = load;
    symbol->slot = (*scope->slots)++;
    *scope->tail = symbol;
    scope->tail = &symbol->next;
    *out = symbol;
    return QLORA_OK;
}

static qlora_result qlora__jin_scope_make(qlora__jin_binder* b, qlora__jin_scope* outer,
                                          uint32_t* slots, qlora__jin_scope** out) {
    void* memory = NULL;
    QLORA__TRY(qlora__jin_get(b->m, sizeof(qlora__jin_scope), &memory));
    memset(memory, 0, sizeof(qlora__jin_scope));
    *out = (qlora__jin_scope*)memory;
    (*out)->outer = outer;
    (*out)->tail = &(*out)->symbols;
    (*out)->function = outer == NULL ? 0 : outer->function + (slots != NULL ? 1 : 0);
    (*out)->slots = slots != NULL ? slots : outer->slots;
    return QLORA_OK;
}

static qlora_result qlora__jin_declare(qlora__jin_binder* b, qlora__jin_scope* scope,
                                       const char* name, size_t size) {
    qlora__jin_symbol* symbol = qlora__jin_symbol_here(scope, name, size);
    if (symbol != NULL) {
        symbol->load = QLORA__JIN_LOAD_PARAMETER;
        return QLORA_OK;
    }
    return qlora__jin_symbol_add(b, scope, name, size, QLORA__JIN_LOAD_PARAMETER, &symbol);
}

static qlora_result qlora__jin_loads(qlora__jin_binder* b, qlora__jin_scope* scope,
                                     const char* name, size_t size) {
    uint32_t function = 0;
    qlora__jin_symbol* symbol = qlora__jin_symbol_find(scope, name, size, &function);
    return symbol != NULL
               ? QLORA_OK
               : qlora__jin_symbol_add(b, scope, name, size, QLORA__JIN_LOAD_RESOLVE, &symbol);
}

// A name that is set. `branch`: perhaps not, because it stands in an if.
static qlora_result qlora__jin_stores(qlora__jin_binder* b, qlora__jin_scope* scope,
                                      const char* name, size_t size, bool branch) {
    uint32_t function = 0;
    qlora__jin_symbol* symbol = qlora__jin_symbol_here(scope, name, size);
    if (symbol != NULL) {
        return QLORA_OK;
    }
    const qlora__jin_symbol* outside =
        scope->outer != NULL ? qlora__jin_symbol_find(scope->outer, name, size, &function) : NULL;
    int load = branch ? QLORA__JIN_LOAD_RESOLVE : QLORA__JIN_LOAD_UNDEFINED;
    load = outside != NULL ? QLORA__JIN_LOAD_ALIAS : load;
    QLORA__TRY(qlora__jin_symbol_add(b, scope, name, size, load, &symbol));
    if (outside != NULL) {
        symbol->hops = scope->function - function;
        symbol->from = outside->slot;
    }
    return QLORA_OK;
}

// ---- first pass over a scope: which names does it use, in the order jinja2 sees them

enum { QLORA__JIN_AS_LOAD, QLORA__JIN_AS_STORE, QLORA__JIN_AS_PARAMETER };

// A list of expressions. Recursive in the tree, whose nesting the parser has limited.
static qlora_result qlora__jin_note_expressions(qlora__jin_binder* b, qlora__jin_scope* scope,
                                                const qlora__jin_node* first, int as, bool branch) {
    for (const qlora__jin_node* n = first; n != NULL; n = n->next) {
        if (n->kind == QLORA__JIN_N_NAME && as != QLORA__JIN_AS_LOAD) {
            QLORA__TRY(as == QLORA__JIN_AS_STORE
                           ? qlora__jin_stores(b, scope, n->name, n->size, branch)
                           : qlora__jin_declare(b, scope, n->name, n->size));
            continue;
        }
        if (n->kind == QLORA__JIN_N_NAME || n->kind == QLORA__JIN_N_NSREF) {
            QLORA__TRY(qlora__jin_loads(b, scope, n->name, n->size));
            continue;
        }
        // jinja2 visits a condition before the two values; the order does not matter for loads
        const qlora__jin_node* parts[5] = {n->a, n->b, n->c, n->d, n->e};
        for (size_t i = 0; i < 5; i++) {
            if (parts[i] != NULL) {
                QLORA__TRY(qlora__jin_note_expressions(b, scope, parts[i], as, branch));
            }
        }
    }
    return QLORA_OK;
}

// Statements of one scope; what is inside loops, macros and blocks belongs to their own scopes.
static qlora_result qlora__jin_note_statements(qlora__jin_binder* b, qlora__jin_scope* scope,
                                               const qlora__jin_node* first, bool branch) {
    for (const qlora__jin_node* n = first; n != NULL; n = n->next) {
        int load = QLORA__JIN_AS_LOAD;
        switch (n->kind) {
        case QLORA__JIN_N_OUTPUT:
        case QLORA__JIN_N_CALL_BLOCK:
            QLORA__TRY(qlora__jin_note_expressions(b, scope, n->a, load, branch));
            break;
        case QLORA__JIN_N_FOR:
        case QLORA__JIN_N_FILTER_BLOCK:
        case QLORA__JIN_N_WITH:
            QLORA__TRY(qlora__jin_note_expressions(b, scope, n->b, load, branch));
            break;
        case QLORA__JIN_N_ASSIGN:
            QLORA__TRY(qlora__jin_note_expressions(b, scope, n->b, load, branch));
            QLORA__TRY(qlora__jin_note_expressions(b, scope, n->a, QLORA__JIN_AS_STORE, branch));
            break;
        case QLORA__JIN_N_ASSIGN_BLOCK:
            QLORA__TRY(qlora__jin_note_expressions(b, scope, n->a, QLORA__JIN_AS_STORE, branch));
            break;
        case QLORA__JIN_N_MACRO:
            QLORA__TRY(qlora__jin_stores(b, scope, n->name, n->size, branch));
            break;
        case QLORA__JIN_N_IF:
            for (const qlora__jin_node* part = n; part != NULL; part = part->d) {
                QLORA__TRY(
                    qlora__jin_note_expressions(b, scope, part->a, load, branch || part != n));
                QLORA__TRY(qlora__jin_note_statements(b, scope, part->b, true));
                QLORA__TRY(qlora__jin_note_statements(b, scope, part->c, true));
            }
            break;
        default:
            break;
        }
    }
    return QLORA_OK;
}

// ---- second pass: every name gets its variable

static qlora_result qlora__jin_bind_name(qlora__jin_binder* b, const qlora__jin_scope* scope,
                                         qlora__jin_node* node) {
    uint32_t function = 0;
    const qlora__jin_symbol* symbol =
        qlora__jin_symbol_find(scope, node->name, node->size, &function);
    if (symbol == NULL) {
        b->m->line = node->line;
        return qlora__jin_fail(b->m, "internal: no variable for \"%.*s\"", (int)node->size,
                               node->name);
    }
    node->hops = scope->function - function;
    node->slot = symbol->slot;
    return QLORA_OK;
}

// A filter that does not exist is an error at once, unless it stands in an if (`soft`).
static qlora_result qlora__jin_bind_filter(qlora__jin_binder* b, qlora__jin_node* node, bool soft) {
    bool test = node->kind == QLORA__JIN_N_TEST;
    node->found = b->filter(node->name, node->size, test);
    if (node->found == NULL && !soft) {
        b->m->line = node->line;
        return qlora__jin_fail(b->m, "there is no %s named \"%.*s\"", test ? "test" : "filter",
                               (int)(node->size < 60 ? node->size : 60), node->name);
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_bind_expressions(qlora__jin_binder* b, const qlora__jin_scope* scope,
                                                qlora__jin_node* first, bool soft) {
    for (qlora__jin_node* n = first; n != NULL; n = n->next) {
        if (n->kind == QLORA__JIN_N_NAME || n->kind == QLORA__JIN_N_NSREF) {
            QLORA__TRY(qlora__jin_bind_name(b, scope, n));
            continue;
        }
        if (n->kind == QLORA__JIN_N_FILTER || n->kind == QLORA__JIN_N_TEST) {
            QLORA__TRY(qlora__jin_bind_filter(b, n, soft));
        }
        bool inside = soft || n->kind == QLORA__JIN_N_COND;
        qlora__jin_node* parts[5] = {n->a, n->b, n->c, n->d, n->e};
        for (size_t i = 0; i < 5; i++) {
            if (parts[i] != NULL) {
                QLORA__TRY(qlora__jin_bind_expressions(b, scope, parts[i], inside));
            }
        }
    }
    return QLORA_OK;
}

// Whether the names in the list, which are not set there first, contain `name`. jinja2 looks this
// up to know whether a loop needs `loop`, or a macro `caller`.
static bool qlora__jin_mentions(const qlora__jin_node* first, const char* name, bool* stored) {
    bool found = false;
    for (const qlora__jin_node* n = first; n != NULL && !found && !*stored; n = n->next) {
        bool named =
            n->size == strlen(name) && n->name != NULL && memcmp(n->name, name, n->size) == 0;
        if (n->kind == QLORA__JIN_N_NAME) {
            found = named;
            continue;
        }
        if (n->kind == QLORA__JIN_N_ASSIGN) {
            found = qlora__jin_mentions(n->b, name, stored);
            const qlora__jin_node* target = n->a;
            bool tuple = target->kind == QLORA__JIN_N_TUPLE;
            for (const qlora__jin_node* t = tuple ? target->a : target; t != NULL && !found;
                 t = t->next) {
                *stored = *stored || (t->kind == QLORA__JIN_N_NAME && t->size == strlen(name) &&
                                      memcmp(t->name, name, t->size) == 0);
            }
            continue;
        }
        const qlora__jin_node* parts[5] = {n->a, n->b, n->c, n->d, n->e};
        for (size_t i = 0; i < 5 && !found; i++) {
            found = parts[i] != NULL && qlora__jin_mentions(parts[i], name, stored);
        }
    }
    return found;
}

static bool qlora__jin_uses(const qlora__jin_node* body, const char* name) {
    bool stored = false;
    return qlora__jin_mentions(body, name, &stored);
}

typedef struct qlora__jin_bind_next {
    qlora_result (*statements)(qlora__jin_binder* b, qlora__jin_scope* scope,
                               qlora__jin_node* first, bool soft,
                               const struct qlora__jin_bind_next* next);
} qlora__jin_bind_next;

static qlora_result qlora__jin_bind_for(qlora__jin_binder* b, qlora__jin_scope* scope,
                                        qlora__jin_node* n, bool soft,
                                        const qlora__jin_bind_next* next) {
    QLORA__TRY(qlora__jin_bind_expressions(b, scope, n->b, soft));
    QLORA__TRY(qlora__jin_scope_make(b, scope, NULL, &n->scope));
    n->flag = qlora__jin_uses(n->c, "loop");
    n->slot = UINT32_MAX;
    if (n->flag) {
        QLORA__TRY(qlora__jin_declare(b, n->scope, "loop", 4));
        n->slot = n->scope->symbols->slot;
    }
    if (n->e != NULL) {
        QLORA__TRY(qlora__jin_scope_make(b, scope, NULL, &n->scope_test));
        QLORA__TRY(
            qlora__jin_note_expressions(b, n->scope_test, n->a, QLORA__JIN_AS_PARAMETER, false));
        QLORA__TRY(qlora__jin_note_expressions(b, n->scope_test, n->e, QLORA__JIN_AS_LOAD, false));
        QLORA__TRY(qlora__jin_bind_expressions(b, n->scope_test, n->e, false));
    }
    QLORA__TRY(qlora__jin_note_expressions(b, n->scope, n->a, QLORA__JIN_AS_PARAMETER, false));
    QLORA__TRY(qlora__jin_note_statements(b, n->scope, n->c, false));
    QLORA__TRY(qlora__jin_bind_expressions(b, n->scope, n->a, false));
    QLORA__TRY(next->statements(b, n->scope, n->c, false, next));
    if (n->d != NULL) {
        QLORA__TRY(qlora__jin_scope_make(b, scope, NULL, &n->scope_else));
        QLORA__TRY(qlora__jin_note_statements(b, n->scope_else, n->d, false));
        QLORA__TRY(next->statements(b, n->scope_else, n->d, false, next));
    }
    return QLORA_OK;
}

// The body of a macro, call block or generation block: a function with its own variables.
static qlora_result qlora__jin_bind_function(qlora__jin_binder* b, qlora__jin_scope* scope,
                                             qlora__jin_node* n, const qlora__jin_bind_next* next) {
    static const char* const special[] = {"caller", "kwargs", "varargs"};
    bool* uses[3] = {&n->flag, &n->uses_kwargs, &n->uses_varargs};
    QLORA__TRY(qlora__jin_scope_make(b, scope, &n->slots, &n->scope));
    for (qlora__jin_node* name = n->b; name != NULL; name = name->next) {
        QLORA__TRY(qlora__jin_declare(b, n->scope, name->name, name->size));
        QLORA__TRY(qlora__jin_bind_name(b, n->scope, name));
    }
    for (size_t i = 0; i < 3; i++) {
        *uses[i] = qlora__jin_uses(n->c, special[i]);
        size_t size = strlen(special[i]);
        if (*uses[i] && qlora__jin_symbol_here(n->scope, special[i], size) == NULL) {
            QLORA__TRY(qlora__jin_declare(b, n->scope, special[i], size));
        } else if (*uses[i]) { // an argument of that name is an ordinary one
            *uses[i] = false;
        }
    }
    for (qlora__jin_node* name = n->b; name != NULL; name = name->next) {
        QLORA__TRY(qlora__jin_note_expressions(b, n->scope, name->a, QLORA__JIN_AS_LOAD, false));
    }
    QLORA__TRY(qlora__jin_note_statements(b, n->scope, n->c, false));
    for (qlora__jin_node* name = n->b; name != NULL; name = name->next) {
        QLORA__TRY(qlora__jin_bind_expressions(b, n->scope, name->a, false));
    }
    return next->statements(b, n->scope, n->c, false, next);
}

// A body in a scope of its own, in the same function.
static qlora_result qlora__jin_bind_body(qlora__jin_binder* b, qlora__jin_scope* scope,
                                         qlora__jin_node* n, const qlora__jin_bind_next* next) {
    QLORA__TRY(qlora__jin_scope_make(b, scope, NULL, &n->scope));
    if (n->kind == QLORA__JIN_N_WITH) {
        QLORA__TRY(qlora__jin_note_expressions(b, n->scope, n->a, QLORA__JIN_AS_PARAMETER, false));
    }
    if (n->kind == QLORA__JIN_N_FILTER_BLOCK) {
        QLORA__TRY(qlora__jin_note_expressions(b, n->scope, n->b, QLORA__JIN_AS_LOAD, false));
    }
    QLORA__TRY(qlora__jin_note_statements(b, n->scope, n->c, false));
    if (n->kind == QLORA__JIN_N_WITH) {
        QLORA__TRY(qlora__jin_bind_expressions(b, n->scope, n->a, false));
    } else if (n->b != NULL) { // the filter of a set or filter block
        if (n->kind == QLORA__JIN_N_ASSIGN_BLOCK) {
            QLORA__TRY(qlora__jin_note_expressions(b, n->scope, n->b, QLORA__JIN_AS_LOAD, false));
        }
        QLORA__TRY(qlora__jin_bind_expressions(b, n->scope, n->b, false));
    }
    return next->statements(b, n->scope, n->c, false, next);
}

static qlora_result qlora__jin_bind_statements(qlora__jin_binder* b, qlora__jin_scope* scope,
                                               qlora__jin_node* first, bool soft,
                                               const qlora__jin_bind_next* next) {
    for (qlora__jin_node* n = first; n != NULL; n = n->next) {
        switch (n->kind) {
        case QLORA__JIN_N_IF:
            for (qlora__jin_node* part = n; part != NULL; part = part->d) {
                QLORA__TRY(qlora__jin_bind_expressions(b, scope, part->a, true));
                QLORA__TRY(next->statements(b, scope, part->b, true, next));
                QLORA__TRY(next->statements(b, scope, part->c, true, next));
            }
            break;
        case QLORA__JIN_N_FOR:
            QLORA__TRY(qlora__jin_bind_for(b, scope, n, soft, next));
            break;
        case QLORA__JIN_N_OUTPUT:
            QLORA__TRY(qlora__jin_bind_expressions(b, scope, n->a, soft));
            break;
        case QLORA__JIN_N_ASSIGN:
            QLORA__TRY(qlora__jin_bind_expressions(b, scope, n->a, soft));
            QLORA__TRY(qlora__jin_bind_expressions(b, scope, n->b, soft));
            break;
        case QLORA__JIN_N_MACRO:
            QLORA__TRY(qlora__jin_bind_name(b, scope, n));
            QLORA__TRY(qlora__jin_bind_function(b, scope, n, next));
            break;
        case QLORA__JIN_N_CALL_BLOCK:
            QLORA__TRY(qlora__jin_bind_expressions(b, scope, n->a, soft));
            QLORA__TRY(qlora__jin_bind_function(b, scope, n, next));
            break;
        case QLORA__JIN_N_GENERATION:
            QLORA__TRY(qlora__jin_bind_function(b, scope, n, next));
            break;
        case QLORA__JIN_N_ASSIGN_BLOCK:
            QLORA__TRY(qlora__jin_bind_expressions(b, scope, n->a, soft));
            QLORA__TRY(qlora__jin_bind_body(b, scope, n, next));
            break;
        case QLORA__JIN_N_WITH:
            QLORA__TRY(qlora__jin_bind_expressions(b, scope, n->b, soft));
            QLORA__TRY(qlora__jin_bind_body(b, scope, n, next));
            break;
        case QLORA__JIN_N_FILTER_BLOCK:
            QLORA__TRY(qlora__jin_bind_body(b, scope, n, next));
            break;
        default:
            break;
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_bind(qlora__jin_machine* m, qlora__jin_node* root,
                                    const void* (*filter)(const char*, size_t, bool)) {
    qlora__jin_binder binder;
    qlora__jin_bind_next next;
    binder.m = m;
    binder.filter = filter;
    next.statements = qlora__jin_bind_statements;
    QLORA__TRY(qlora__jin_scope_make(&binder, NULL, &root->slots, &root->scope));
    QLORA__TRY(qlora__jin_note_statements(&binder, root->scope, root->c, false));
    return qlora__jin_bind_statements(&binder, root->scope, root->c, false, &next);
}

//@@ src/text/jinja_value.h

// What Python does with values: truth, text, comparison, iteration, items.

// ---- text ---------------------------------------------------------------------------------------

// Digits with their decimal point, as Python places it: an exponent only below -4 or above 15.
static void qlora__jin_place_point(bool negative, const char* digits, int count, int exponent,
                                   char out[48]) {
    size_t n = 0;
    if (negative) {
        out[n++] = '-';
    }
    if (exponent < -4 || exponent >= 16) {
        out[n++] = digits[0];
        if (count > 1) {
            out[n++] = '.';
            memcpy(out + n, digits + 1, (size_t)(count - 1));
            n += (size_t)(count - 1);
        }
        snprintf(out + n, 48 - n, "e%c%02d", exponent < 0 ? '-' : '+', abs(exponent));
        return;
    }
    if (exponent < 0) {
        out[n++] = '0';
    }
    for (int i = 0; i <= exponent; i++) {
        out[n++] = i < count ? digits[i] : '0';
    }
    out[n++] = '.';
    for (int i = -1; i > exponent; i--) {
        out[n++] = '0';
    }
    int rest = exponent < 0 ? 0 : exponent + 1;
    for (int i = rest; i < count; i++) {
        out[n++] = digits[i];
    }
    if (rest >= count) {
        out[n++] = '0';
    }
    out[n] = '\0';
}

// The shortest digits that read back as the same number, as Python's repr writes them.
static void qlora__jin_format_double(double x, char out[48]) {
    uint64_t bits = 0;
    char digits[32];
    char printed[40];
    int count = 0;
    int exponent = 0;
    memcpy(&bits, &x, sizeof bits);
    if ((bits >> 52 & 0x7FF) == 0x7FF) {
        bool nan = (bits & 0xFFFFFFFFFFFFFu) != 0;
        snprintf(out, 48, "%s", nan ? "nan" : (bits >> 63) != 0 ? "-inf" : "inf");
        return;
    }
    for (int precision = 1; precision <= 17; precision++) {
        snprintf(printed, sizeof printed, "%.*e", precision - 1, x);
        count = 0;
        const char* c = printed;
        for (; *c != 'e' && *c != '\0'; c++) { // the decimal point may be the locale's
            if (*c >= '0' && *c <= '9' && count < 31) {
                digits[count++] = *c;
            }
        }
        exponent = *c == 'e' ? atoi(c + 1) : 0;
        char back[48];
        digits[count] = '\0';
        snprintf(back, sizeof back, "%s%se%d", printed[0] == '-' ? "-" : "", digits,
                 exponent - count + 1);
        double again = qlora__number_parse(back, strlen(back));
        if (memcmp(&again, &x, sizeof x) == 0) {
            break;
        }
    }
    while (count > 1 && digits[count - 1] == '0') {
        count--;
    }
    qlora__jin_place_point((bits >> 63) != 0, digits, count, exponent, out);
}

static bool qlora__jin_is_printable(uint32_t code) {
    if (code < 0x7F) {
        return code >= 0x20;
    }
    uint32_t kind = qlora__jin_class(code);
    return kind != QLORA__TEXT_C_OTHER && kind != QLORA__TEXT_C_SPACE &&
           kind != QLORA__TEXT_C_JOINER;
}

// A string in quotes, as repr prints it.
static qlora_result qlora__jin_repr_string(qlora__jin_machine* m, const qlora__jin_string* s,
                                           qlora__jin_buffer* out) {
    bool single = memchr(s->bytes > 0 ? s->data : "", '\'', s->bytes) != NULL;
    bool twice = memchr(s->bytes > 0 ? s->data : "", '"', s->bytes) != NULL;
    char quote = single && !twice ? '"' : '\'';
    QLORA__TRY(qlora__jin_work(m, s->bytes / 16));
    QLORA__TRY(qlora__jin_put(m, out, &quote, 1));
    for (size_t at = 0, step = 0; at < s->bytes; at += step) {
        char escaped[16];
        uint32_t code = qlora__jin_code_at(s->data, s->bytes, at, &step);
        if (code == (uint32_t)quote || code == '\\') {
            snprintf(escaped, sizeof escaped, "\\%c", (char)code);
        } else if (code == '\n' || code == '\r' || code == '\t') {
            snprintf(escaped, sizeof escaped, "\\%c",
                     code == '\n'   ? 'n'
                     : code == '\r' ? 'r'
                                    : 't');
        } else if (!qlora__jin_is_printable(code)) {
            const char* format = code < 0x100 ? "\\x%02x" : code < 0x10000 ? "\\u%04x" : "\\U%08x";
            snprintf(escaped, sizeof escaped, format, (unsigned)code);
        } else {
            QLORA__TRY(qlora__jin_put(m, out, s->data + at, step));
            continue;
        }
        QLORA__TRY(qlora__jin_puts(m, out, escaped));
    }
    return qlora__jin_put(m, out, &quote, 1);
}

// (a, b), [a, b], or what a view shows.
static qlora_result qlora__jin_repr_items(qlora__jin_machine* m, const char* open,
                                          const qlora__jin_value* items, size_t count,
                                          const char* close, qlora__jin_buffer* out) {
    QLORA__TRY(qlora__jin_puts(m, out, open));
    for (size_t i = 0; i < count; i++) {
        QLORA__TRY(i > 0 ? qlora__jin_puts(m, out, ", ") : QLORA_OK);
        QLORA__TRY(m->hooks->repr(m, items[i], out));
    }
    return qlora__jin_puts(m, out, close);
}

static qlora_result qlora__jin_repr_dict(qlora__jin_machine* m, const qlora__jin_dict* dict,
                                         const char* between, bool pairs, qlora__jin_buffer* out) {
    for (size_t i = 0; i < dict->count; i++) {
        QLORA__TRY(i > 0 ? qlora__jin_puts(m, out, ", ") : QLORA_OK);
        QLORA__TRY(pairs ? qlora__jin_puts(m, out, "(") : QLORA_OK);
        QLORA__TRY(m->hooks->repr(m, dict->keys[i], out));
        QLORA__TRY(qlora__jin_puts(m, out, between));
        QLORA__TRY(m->hooks->repr(m, dict->values[i], out));
        QLORA__TRY(pairs ? qlora__jin_puts(m, out, ")") : QLORA_OK);
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_repr_view(qlora__jin_machine* m, qlora__jin_value v,
                                         qlora__jin_buffer* out) {
    const qlora__jin_dict* dict = v.as.dict;
    if (v.flag == 2) {
        QLORA__TRY(qlora__jin_puts(m, out, "dict_items(["));
        QLORA__TRY(qlora__jin_repr_dict(m, dict, ", ", true, out));
        return qlora__jin_puts(m, out, "])");
    }
    return qlora__jin_repr_items(m, v.flag == 0 ? "dict_keys([" : "dict_values([",
                                 v.flag == 0 ? dict->keys : dict->values, dict->count, "])", out);
}

// What is neither a number nor a string.
static qlora_result qlora__jin_repr_inner(qlora__jin_machine* m, qlora__jin_value v,
                                          qlora__jin_buffer* out) {
    char text[96];
    switch (v.kind) {
    case QLORA__JIN_LIST:
        return qlora__jin_repr_items(m, "[", v.as.list->items, v.as.list->count, "]", out);
    case QLORA__JIN_TUPLE:
        return qlora__jin_repr_items(m, "(", v.as.list->items, v.as.list->count,
                                     v.as.list->count == 1 ? ",)" : ")", out);
    case QLORA__JIN_DICT:
        QLORA__TRY(qlora__jin_puts(m, out, "{"));
        QLORA__TRY(qlora__jin_repr_dict(m, v.as.dict, ": ", false, out));
        return qlora__jin_puts(m, out, "}");
    case QLORA__JIN_NAMESPACE:
        QLORA__TRY(qlora__jin_puts(m, out, "<Namespace {"));
        QLORA__TRY(qlora__jin_repr_dict(m, v.as.dict, ": ", false, out));
        return qlora__jin_puts(m, out, "}>");
    case QLORA__JIN_VIEW:
        return qlora__jin_repr_view(m, v, out);
    case QLORA__JIN_RANGE:
        snprintf(text, sizeof text,
                 v.as.range->step == 1 ? "range(%lld, %lld)" : "range(%lld, %lld, %lld)",
                 (long long)v.as.range->start, (long long)v.as.range->stop,
                 (long long)v.as.range->step);
        return qlora__jin_puts(m, out, text);
    default:
        // Python prints an address here, which is different each time
        return qlora__jin_fail(m, "a %s cannot be printed%s", qlora__jin_type(v),
                               v.kind == QLORA__JIN_ITER ? "; make a list of it" : "");
    }
}

static qlora_result qlora__jin_repr(qlora__jin_machine* m, qlora__jin_value v,
                                    qlora__jin_buffer* out) {
    char text[64];
    switch (v.kind) {
    case QLORA__JIN_UNDEFINED:
        return qlora__jin_puts(m, out, "Undefined");
    case QLORA__JIN_NONE:
        return qlora__jin_puts(m, out, "None");
    case QLORA__JIN_BOOL:
        return qlora__jin_puts(m, out, v.as.truth ? "True" : "False");
    case QLORA__JIN_INT:
        snprintf(text, sizeof text, "%lld", (long long)v.as.integer);
        return qlora__jin_puts(m, out, text);
    case QLORA__JIN_BIG:
        return qlora__jin_put(m, out, v.as.string->data, v.as.string->bytes);
    case QLORA__JIN_FLOAT:
        qlora__jin_format_double(v.as.real, text);
        return qlora__jin_puts(m, out, text);
    case QLORA__JIN_STRING:
        if (v.flag != 0) {
            QLORA__TRY(qlora__jin_puts(m, out, "Markup("));
            QLORA__TRY(qlora__jin_repr_string(m, v.as.string, out));
            return qlora__jin_puts(m, out, ")");
        }
        return qlora__jin_repr_string(m, v.as.string, out);
    default:
        QLORA__TRY(qlora__jin_enter(m));
        QLORA__TRY(qlora__jin_repr_inner(m, v, out));
        m->depth--;
        return QLORA_OK;
    }
}

// str(): appends.
static qlora_result qlora__jin_print(qlora__jin_machine* m, qlora__jin_value v,
                                     qlora__jin_buffer* out) {
    if (v.kind == QLORA__JIN_STRING) {
        return qlora__jin_put(m, out, v.as.string->data, v.as.string->bytes);
    }
    return v.kind == QLORA__JIN_UNDEFINED ? QLORA_OK : qlora__jin_repr(m, v, out);
}

// str() as a value; a string stays what it is, Markup too.
static qlora_result qlora__jin_text(qlora__jin_machine* m, qlora__jin_value v,
                                    qlora__jin_value* out) {
    qlora__jin_buffer buffer;
    if (v.kind == QLORA__JIN_STRING) {
        *out = v;
        return QLORA_OK;
    }
    memset(&buffer, 0, sizeof buffer);
    QLORA__TRY(qlora__jin_print(m, v, &buffer));
    return qlora__jin_buffer_string(m, &buffer, out);
}

// ---- truth, numbers, equality, order ------------------------------------------------------------

static bool qlora__jin_is_nan(double x) {
    return !(x <= 0.0 || x >= 0.0);
}

static bool qlora__jin_truth(qlora__jin_value v) {
    switch (v.kind) {
    case QLORA__JIN_MISSING:
    case QLORA__JIN_UNDEFINED:
    case QLORA__JIN_NONE:
        return false;
    case QLORA__JIN_BOOL:
        return v.as.truth;
    case QLORA__JIN_INT:
        return v.as.integer != 0;
    case QLORA__JIN_FLOAT:
        return v.as.real < 0.0 || v.as.real > 0.0 || qlora__jin_is_nan(v.as.real);
    case QLORA__JIN_STRING:
        return v.as.string->bytes > 0;
    case QLORA__JIN_LIST:
    case QLORA__JIN_TUPLE:
        return v.as.list->count > 0;
    case QLORA__JIN_DICT:
    case QLORA__JIN_VIEW:
        return v.as.dict->count > 0;
    case QLORA__JIN_RANGE:
        return v.as.range->count > 0;
    default:
        return true;
    }
}

static bool qlora__jin_is_number(qlora__jin_value v) {
    return v.kind == QLORA__JIN_BOOL || v.kind == QLORA__JIN_INT || v.kind == QLORA__JIN_FLOAT;
}

static bool qlora__jin_is_integer(qlora__jin_value v) {
    return v.kind == QLORA__JIN_BOOL || v.kind == QLORA__JIN_INT;
}

static int64_t qlora__jin_integer_of(qlora__jin_value v) {
    return v.kind == QLORA__JIN_BOOL ? (v.as.truth ? 1 : 0) : v.as.integer;
}

static double qlora__jin_real_of(qlora__jin_value v) {
    return v.kind == QLORA__JIN_FLOAT ? v.as.real : (double)qlora__jin_integer_of(v);
}

// -1, 0, 1, or 2 when one of them is not a number (NaN).
static int qlora__jin_compare_numbers(qlora__jin_value a, qlora__jin_value b) {
    if (qlora__jin_is_integer(a) && qlora__jin_is_integer(b)) {
        int64_t x = qlora__jin_integer_of(a);
        int64_t y = qlora__jin_integer_of(b);
        return x < y ? -1 : x > y ? 1 : 0;
    }
    double x = qlora__jin_real_of(a);
    double y = qlora__jin_real_of(b);
    return x < y ? -1 : x > y ? 1 : qlora__jin_is_nan(x) || qlora__jin_is_nan(y) ? 2 : 0;
}

static int qlora__jin_compare_strings(const qlora__jin_string* a, const qlora__jin_string* b) {
    size_t common = a->bytes < b->bytes ? a->bytes : b->bytes;
    int order = common > 0 ? memcmp(a->data, b->data, common) : 0; // UTF-8 sorts as code points do
    return order != 0 ? order : a->bytes < b->bytes ? -1 : a->bytes > b->bytes ? 1 : 0;
}

static qlora_result qlora__jin_equal_dicts(qlora__jin_machine* m, const qlora__jin_dict* a,
                                           const qlora__jin_dict* b, bool* out) {
    *out = a->count == b->count;
    for (size_t i = 0; i < a->count && *out; i++) {
        bool found = false;
        QLORA__TRY(qlora__jin_work(m, b->count / 4));
        for (size_t k = 0; k < b->count && !found; k++) {
            QLORA__TRY(m->hooks->equal(m, a->keys[i], b->keys[k], &found));
            if (found) {
                QLORA__TRY(m->hooks->equal(m, a->values[i], b->values[k], out));
            }
        }
        *out = *out && found;
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_equal_lists(qlora__jin_machine* m, const qlora__jin_list* a,
                                           const qlora__jin_list* b, bool* out) {
    *out = a->count == b->count;
    for (size_t i = 0; i < a->count && *out; i++) {
        QLORA__TRY(m->hooks->equal(m, a->items[i], b->items[i], out));
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_equal(qlora__jin_machine* m, qlora__jin_value a, qlora__jin_value b,
                                     bool* out) {
    *out = false;
    if (qlora__jin_is_number(a) && qlora__jin_is_number(b)) {
        *out = qlora__jin_compare_numbers(a, b) == 0;
        return QLORA_OK;
    }
    if (a.kind != b.kind) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__jin_enter(m));
    switch (a.kind) {
    case QLORA__JIN_UNDEFINED:
    case QLORA__JIN_NONE:
        *out = true;
        break;
    case QLORA__JIN_STRING:
    case QLORA__JIN_BIG:
        *out = a.as.string->bytes == b.as.string->bytes &&
               qlora__jin_compare_strings(a.as.string, b.as.string) == 0;
        break;
    case QLORA__JIN_LIST:
    case QLORA__JIN_TUPLE:
        QLORA__TRY(qlora__jin_equal_lists(m, a.as.list, b.as.list, out));
        break;
    case QLORA__JIN_DICT:
        QLORA__TRY(qlora__jin_equal_dicts(m, a.as.dict, b.as.dict, out));
        break;
    case QLORA__JIN_RANGE:
        *out = a.as.range->count == b.as.range->count &&
               (a.as.range->count == 0 ||
                (a.as.range->start == b.as.range->start &&
                 (a.as.range->count == 1 || a.as.range->step == b.as.range->step)));
        break;
    default:
        *out = a.as.list == b.as.list && a.flag == b.flag;
        break;
    }
    m->depth--;
    return QLORA_OK;
}

// a < b, or a <= b.
static qlora_result qlora__jin_less(qlora__jin_machine* m, qlora__jin_value a, qlora__jin_value b,
                                    bool or_equal, bool* out) {
    QLORA__TRY(qlora__jin_work(m, 1));
    if (a.kind == QLORA__JIN_UNDEFINED || b.kind == QLORA__JIN_UNDEFINED) {
        return qlora__jin_undefined_error(m, a.kind == QLORA__JIN_UNDEFINED ? a : b);
    }
    if (qlora__jin_is_number(a) && qlora__jin_is_number(b)) {
        int order = qlora__jin_compare_numbers(a, b);
        *out = order < 0 || (order == 0 && or_equal);
        return QLORA_OK;
    }
    if (a.kind == QLORA__JIN_STRING && b.kind == QLORA__JIN_STRING) {
        int order = qlora__jin_compare_strings(a.as.string, b.as.string);
        *out = order < 0 || (order == 0 && or_equal);
        return QLORA_OK;
    }
    if (a.kind != b.kind || (a.kind != QLORA__JIN_LIST && a.kind != QLORA__JIN_TUPLE)) {
        return qlora__jin_fail(m, "a %s and a %s cannot be ordered", qlora__jin_type(a),
                               qlora__jin_type(b));
    }
    QLORA__TRY(qlora__jin_enter(m));
    const qlora__jin_list* x = a.as.list;
    const qlora__jin_list* y = b.as.list;
    size_t i = 0;
    bool same = true;
    while (i < x->count && i < y->count && same) {
        QLORA__TRY(m->hooks->equal(m, x->items[i], y->items[i], &same));
        i += same ? 1 : 0;
    }
    if (i == x->count || i == y->count) {
        *out = x->count < y->count || (x->count == y->count && or_equal);
    } else {
        QLORA__TRY(m->hooks->less(m, x->items[i], y->items[i], or_equal, out));
    }
    m->depth--;
    return QLORA_OK;
}

// Lists, dictionaries and what contains them cannot be keys.
static bool qlora__jin_hashable(qlora__jin_value v) {
    if (v.kind == QLORA__JIN_TUPLE) {
        for (size_t i = 0; i < v.as.list->count; i++) {
            qlora__jin_kind kind = v.as.list->items[i].kind;
            if (kind == QLORA__JIN_LIST || kind == QLORA__JIN_DICT) {
                return false;
            }
        }
    }
    return v.kind != QLORA__JIN_LIST && v.kind != QLORA__JIN_DICT && v.kind != QLORA__JIN_VIEW;
}

// The place of any key in a dictionary, or the count.
static qlora_result qlora__jin_dict_find(qlora__jin_machine* m, const qlora__jin_dict* dict,
                                         qlora__jin_value key, size_t* at) {
    if (!qlora__jin_hashable(key)) {
        return qlora__jin_fail(m, "a %s cannot be the key of a dictionary", qlora__jin_type(key));
    }
    QLORA__TRY(qlora__jin_work(m, dict->count / 8));
    if (key.kind == QLORA__JIN_STRING) {
        *at = qlora__jin_dict_at(dict, key.as.string->data, key.as.string->bytes);
        return QLORA_OK;
    }
    bool same = false;
    for (*at = 0; *at < dict->count; (*at)++) {
        QLORA__TRY(qlora__jin_equal(m, dict->keys[*at], key, &same));
        if (same) {
            break;
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_dict_set(qlora__jin_machine* m, qlora__jin_dict* dict,
                                        qlora__jin_value key, qlora__jin_value value) {
    size_t at = 0;
    QLORA__TRY(qlora__jin_dict_find(m, dict, key, &at));
    if (at < dict->count) {
        dict->values[at] = value;
        return QLORA_OK;
    }
    return qlora__jin_dict_add(m, dict, key, value);
}

// ---- iteration ----------------------------------------------------------------------------------

// How an iterator makes its values from those of `source`.
enum {
    QLORA__JIN_PLAIN,
    QLORA__JIN_MAP_FILTER,
    QLORA__JIN_MAP_ATTRIBUTE,
    QLORA__JIN_SELECT, // with `attribute`, the attribute is tested
    QLORA__JIN_LAZY,   // `late` makes the whole list when the first value is asked for
    QLORA__JIN_TESTED  // the values that pass the test of a loop
};

typedef struct qlora__jin_iter {
    int how;
    qlora__jin_value source;
    size_t at;      // items, or bytes of a string
    bool backwards; // a list from its end
    struct qlora__jin_iter* inner;
    qlora__jin_value function; // the name of a filter or test; missing: truth
    qlora__jin_value attribute;
    qlora__jin_value fallback;
    bool wanted; // select keeps what is true, reject what is false
    qlora__jin_args args;
    qlora__jin_filter_fn late;
    qlora__jin_value* late_in;
    const struct qlora__jin_node* node; // of a loop with a test
    qlora__jin_record* record;
    qlora_result (*tested)(qlora__jin_machine* m, struct qlora__jin_iter* iter,
                           qlora__jin_value item, bool* out);
} qlora__jin_iter;

static bool qlora__jin_is_iterable(qlora__jin_value v) {
    switch (v.kind) {
    case QLORA__JIN_UNDEFINED:
    case QLORA__JIN_STRING:
    case QLORA__JIN_LIST:
    case QLORA__JIN_TUPLE:
    case QLORA__JIN_DICT:
    case QLORA__JIN_VIEW:
    case QLORA__JIN_RANGE:
    case QLORA__JIN_ITER:
    case QLORA__JIN_LOOP:
        return true;
    default:
        return false;
    }
}

static qlora_result qlora__jin_iter_make(qlora__jin_machine* m, qlora__jin_value source,
                                         qlora__jin_iter** out) {
    void* memory = NULL;
    if (source.kind == QLORA__JIN_ITER) {
        *out = source.as.iter;
        return QLORA_OK;
    }
    if (!qlora__jin_is_iterable(source) || source.kind == QLORA__JIN_LOOP) {
        return qlora__jin_fail(m, "a %s is not a list or anything else to loop over",
                               qlora__jin_type(source));
    }
    QLORA__TRY(qlora__jin_get(m, sizeof(qlora__jin_iter), &memory));
    memset(memory, 0, sizeof(qlora__jin_iter));
    *out = (qlora__jin_iter*)memory;
    (*out)->source = source;
    return QLORA_OK;
}

// The next value of something that is not computed.
static qlora_result qlora__jin_next_plain(qlora__jin_machine* m, qlora__jin_iter* iter,
                                          qlora__jin_value* out, bool* more) {
    qlora__jin_value source = iter->source;
    size_t at = iter->at;
    size_t step = 1;
    switch (source.kind) {
    case QLORA__JIN_LIST:
    case QLORA__JIN_TUPLE:
        *more = at < source.as.list->count;
        if (*more) {
            *out = source.as.list->items[iter->backwards ? source.as.list->count - 1 - at : at];
        }
        break;
    case QLORA__JIN_DICT:
    case QLORA__JIN_VIEW:
        *more = at < source.as.dict->count;
        if (*more && source.kind == QLORA__JIN_VIEW && source.flag == 2) {
            QLORA__TRY(
                qlora__jin_pair_make(m, source.as.dict->keys[at], source.as.dict->values[at], out));
        } else if (*more) {
            bool values = source.kind == QLORA__JIN_VIEW && source.flag == 1;
            *out = values ? source.as.dict->values[at] : source.as.dict->keys[at];
        }
        break;
    case QLORA__JIN_RANGE:
        *more = (int64_t)at < source.as.range->count;
        *out = qlora__jin_int(source.as.range->start + (int64_t)at * source.as.range->step);
        break;
    case QLORA__JIN_STRING:
        *more = at < source.as.string->bytes;
        if (*more) {
            qlora__jin_code_at(source.as.string->data, source.as.string->bytes, at, &step);
            QLORA__TRY(qlora__jin_string_share(m, source.as.string->data + at, step, out));
        }
        break;
    default:
        *more = false;
        break;
    }
    iter->at += *more ? step : 0;
    return QLORA_OK;
}

// ---- length, items, attributes ------------------------------------------------------------------

static qlora_result qlora__jin_length(qlora__jin_machine* m, qlora__jin_value v, int64_t* out) {
    switch (v.kind) {
    case QLORA__JIN_UNDEFINED:
        *out = 0;
        return QLORA_OK;
    case QLORA__JIN_STRING:
        *out = (int64_t)v.as.string->chars;
        return QLORA_OK;
    case QLORA__JIN_LIST:
    case QLORA__JIN_TUPLE:
        *out = (int64_t)v.as.list->count;
        return QLORA_OK;
    case QLORA__JIN_DICT:
    case QLORA__JIN_VIEW:
        *out = (int64_t)v.as.dict->count;
        return QLORA_OK;
    case QLORA__JIN_RANGE:
        *out = v.as.range->count;
        return QLORA_OK;
    default:
        return qlora__jin_fail(m, "a %s has no length", qlora__jin_type(v));
    }
}

// The byte at which character `index` of a string starts.
static size_t qlora__jin_byte_of(const qlora__jin_string* s, size_t index) {
    if (s->bytes == s->chars) {
        return index;
    }
    size_t at = 0;
    while (index > 0 && at < s->bytes) {
        at++;
        while (at < s->bytes && ((unsigned char)s->data[at] & 0xC0) == 0x80) {
            at++;
        }
        index--;
    }
    return at;
}

static qlora_result qlora__jin_char_at(qlora__jin_machine* m, const qlora__jin_string* s,
                                       size_t index, qlora__jin_value* out) {
    size_t step = 0;
    QLORA__TRY(qlora__jin_work(m, s->bytes == s->chars ? 0 : s->bytes / 32));
    size_t at = qlora__jin_byte_of(s, index);
    qlora__jin_code_at(s->data, s->bytes, at, &step);
    return qlora__jin_string_share(m, s->data + at, step, out);
}

// v[key] without attributes; *found is false where Python raises a TypeError or LookupError.
static qlora_result qlora__jin_item(qlora__jin_machine* m, qlora__jin_value v, qlora__jin_value key,
                                    qlora__jin_value* out, bool* found) {
    *found = false;
    if (v.kind == QLORA__JIN_DICT) {
        size_t at = 0;
        if (!qlora__jin_hashable(key)) {
            return QLORA_OK;
        }
        QLORA__TRY(qlora__jin_dict_find(m, v.as.dict, key, &at));
        *found = at < v.as.dict->count;
        *out = *found ? v.as.dict->values[at] : *out;
        return QLORA_OK;
    }
    bool sequence = v.kind == QLORA__JIN_LIST || v.kind == QLORA__JIN_TUPLE ||
                    v.kind == QLORA__JIN_STRING || v.kind == QLORA__JIN_RANGE;
    if (!sequence || !qlora__jin_is_integer(key)) {
        return QLORA_OK;
    }
    int64_t count = 0;
    int64_t index = qlora__jin_integer_of(key);
    QLORA__TRY(qlora__jin_length(m, v, &count));
    index += index < 0 ? count : 0;
    if (index < 0 || index >= count) {
        return QLORA_OK;
    }
    *found = true;
    if (v.kind == QLORA__JIN_STRING) {
        QLORA__TRY(qlora__jin_char_at(m, v.as.string, (size_t)index, out));
        out->flag = v.flag;
        return QLORA_OK;
    }
    *out = v.kind == QLORA__JIN_RANGE ? qlora__jin_int(v.as.range->start + index * v.as.range->step)
                                      : v.as.list->items[index];
    return QLORA_OK;
}

typedef struct qlora__jin_method {
    qlora__jin_value self;
    const void* found;
} qlora__jin_method;

// An attribute in Python's sense: a method, or a field of a namespace, loop or macro.
static qlora_result qlora__jin_attribute(qlora__jin_machine* m, qlora__jin_value v,
                                         const char* name, size_t size, qlora__jin_value* out,
                                         bool* found) {
    bool unsafe = false;
    const void* method = NULL;
    if (v.kind == QLORA__JIN_NAMESPACE) {
        size_t at = qlora__jin_dict_at(v.as.dict, name, size);
        *found = at < v.as.dict->count;
        *out = *found ? v.as.dict->values[at] : *out;
        return QLORA_OK;
    }
    QLORA__TRY(m->hooks->field(m, v, name, size, out, found));
    if (*found) {
        return QLORA_OK;
    }
    *found = m->hooks->method(v, name, size, &unsafe, &method);
    if (!*found) {
        return QLORA_OK;
    }
    if (unsafe) {
        return qlora__jin_undefined(m, qlora__jin_type(v), name, size, true, out);
    }
    void* memory = NULL;
    QLORA__TRY(qlora__jin_get(m, sizeof(qlora__jin_method), &memory));
    qlora__jin_method* bound = (qlora__jin_method*)memory;
    bound->self = v;
    bound->found = method;
    *out = qlora__jin_of(QLORA__JIN_METHOD);
    out->as.method = bound;
    return QLORA_OK;
}

// v[key], as a template sees it: the item, else the attribute, else undefined.
static qlora_result qlora__jin_getitem(qlora__jin_machine* m, qlora__jin_value v,
                                       qlora__jin_value key, qlora__jin_value* out) {
    bool found = false;
    if (v.kind == QLORA__JIN_UNDEFINED) {
        return qlora__jin_undefined_error(m, v);
    }
    QLORA__TRY(qlora__jin_item(m, v, key, out, &found));
    if (found) {
        return QLORA_OK;
    }
    if (key.kind == QLORA__JIN_STRING) {
        const qlora__jin_string* name = key.as.string;
        QLORA__TRY(qlora__jin_attribute(m, v, name->data, name->bytes, out, &found));
        return found ? QLORA_OK
                     : qlora__jin_undefined(m, qlora__jin_type(v), name->data, name->bytes, false,
                                            out);
    }
    qlora__jin_buffer text;
    memset(&text, 0, sizeof text);
    if (key.kind == QLORA__JIN_INT) {
        QLORA__TRY(qlora__jin_repr(m, key, &text));
    }
    return qlora__jin_undefined(m, qlora__jin_type(v), text.data, text.count, false, out);
}

// v.name: the attribute, else the item, else undefined.
static qlora_result qlora__jin_getattr(qlora__jin_machine* m, qlora__jin_value v, const char* name,
                                       size_t size, qlora__jin_value* out) {
    bool found = false;
    if (v.kind == QLORA__JIN_UNDEFINED) {
        bool dunder =
            size > 3 && memcmp(name, "__", 2) == 0 && memcmp(name + size - 2, "__", 2) == 0;
        return dunder ? qlora__jin_undefined(m, qlora__jin_type(v), name, size, true, out)
                      : qlora__jin_undefined_error(m, v);
    }
    QLORA__TRY(qlora__jin_attribute(m, v, name, size, out, &found));
    if (found) {
        return QLORA_OK;
    }
    if (v.kind == QLORA__JIN_DICT) {
        size_t at = qlora__jin_dict_at(v.as.dict, name, size);
        QLORA__TRY(qlora__jin_work(m, v.as.dict->count / 8));
        if (at < v.as.dict->count) {
            *out = v.as.dict->values[at];
            return QLORA_OK;
        }
    }
    return qlora__jin_undefined(m, qlora__jin_type(v), name, size, false, out);
}

//@@ src/text/jinja_number.h

// Operators: arithmetic, concatenation, repetition, slices, membership.

static qlora_result qlora__jin_too_big(qlora__jin_machine* m) {
    return qlora__jin_fail(m, "an integer does not fit 64 bits");
}

// The largest whole number that is not above x.
static double qlora__jin_floor(double x) {
    if (x >= 4503599627370496.0 || x <= -4503599627370496.0 || qlora__jin_is_nan(x)) {
        return x; // 2 to the 52: no fraction is left
    }
    double whole = (double)(int64_t)x;
    return whole > x ? whole - 1.0 : whole;
}

static bool qlora__jin_is_zero(double x) {
    return x <= 0.0 && x >= 0.0;
}

static bool qlora__jin_multiply(int64_t a, int64_t b, int64_t* out) {
    if (a != 0 && b != 0) {
        bool same = (a < 0) == (b < 0);
        uint64_t x = a < 0 ? 0 - (uint64_t)a : (uint64_t)a;
        uint64_t y = b < 0 ? 0 - (uint64_t)b : (uint64_t)b;
        uint64_t limit = same ? (uint64_t)INT64_MAX : (uint64_t)INT64_MAX + 1;
        if (x > limit / y) {
            return false;
        }
        uint64_t product = x * y;
        *out = same ? (int64_t)product : (int64_t)(0 - product);
        return true;
    }
    *out = 0;
    return true;
}

static bool qlora__jin_add_integers(int64_t a, int64_t b, int64_t* out) {
    if ((b > 0 && a > INT64_MAX - b) || (b < 0 && a < INT64_MIN - b)) {
        return false;
    }
    *out = a + b;
    return true;
}

static qlora_result qlora__jin_power(qlora__jin_machine* m, qlora__jin_value a, qlora__jin_value b,
                                     qlora__jin_value* out) {
    if (!qlora__jin_is_integer(b)) {
        double whole = qlora__jin_floor(b.as.real);
        if (whole < b.as.real || whole > 1024.0 || whole < -1024.0) {
            return qlora__jin_fail(m, "a power whose exponent is not a whole number from -1024 to "
                                      "1024 is not supported");
        }
    }
    int64_t times = qlora__jin_is_integer(b) ? qlora__jin_integer_of(b) : (int64_t)b.as.real;
    if (qlora__jin_is_integer(a) && qlora__jin_is_integer(b) && times >= 0) {
        int64_t base = qlora__jin_integer_of(a);
        int64_t result = 1;
        for (int64_t i = 0; i < times && !((base == 0 || base == 1) && i > 0); i++) {
            QLORA__TRY(qlora__jin_work(m, 1));
            if (!qlora__jin_multiply(result, base, &result)) {
                return qlora__jin_too_big(m);
            }
        }
        *out = qlora__jin_int(result);
        return QLORA_OK;
    }
    double base = qlora__jin_real_of(a);
    double result = 1.0;
    if (qlora__jin_is_zero(base) && times < 0) {
        return qlora__jin_fail(m, "division by zero");
    }
    for (int64_t i = 0; i < (times < 0 ? -times : times) && i < 100000; i++) {
        result *= base;
    }
    *out = qlora__jin_float(times < 0 ? 1.0 / result : result);
    return QLORA_OK;
}

static qlora_result qlora__jin_divide(qlora__jin_machine* m, char op, qlora__jin_value a,
                                      qlora__jin_value b, qlora__jin_value* out) {
    double y = qlora__jin_real_of(b);
    if (qlora__jin_is_zero(y)) {
        return qlora__jin_fail(m, "division by zero");
    }
    if (op == '/') {
        *out = qlora__jin_float(qlora__jin_real_of(a) / y);
        return QLORA_OK;
    }
    if (qlora__jin_is_integer(a) && qlora__jin_is_integer(b)) {
        int64_t p = qlora__jin_integer_of(a);
        int64_t q = qlora__jin_integer_of(b);
        if (q == -1) { // the one quotient that can overflow
            if (p == INT64_MIN) {
                return qlora__jin_too_big(m);
            }
            *out = qlora__jin_int(op == 'f' ? -p : 0);
            return QLORA_OK;
        }
        int64_t quotient = p / q;
        int64_t rest = p % q;
        bool below = rest != 0 && (rest < 0) != (q < 0);
        *out = qlora__jin_int(op == 'f' ? quotient - (below ? 1 : 0) : rest + (below ? q : 0));
        return QLORA_OK;
    }
    double x = qlora__jin_real_of(a);
    double quotient = qlora__jin_floor(x / y);
    *out = qlora__jin_float(op == 'f' ? quotient : x - quotient * y);
    return QLORA_OK;
}

// + - * on numbers
static qlora_result qlora__jin_arithmetic(qlora__jin_machine* m, char op, qlora__jin_value a,
                                          qlora__jin_value b, qlora__jin_value* out) {
    if (qlora__jin_is_integer(a) && qlora__jin_is_integer(b)) {
        int64_t x = qlora__jin_integer_of(a);
        int64_t y = qlora__jin_integer_of(b);
        int64_t result = 0;
        bool fits = op == '*' ? qlora__jin_multiply(x, y, &result)
                    : op == '-' && y == INT64_MIN
                        ? false
                        : qlora__jin_add_integers(x, op == '-' ? -y : y, &result);
        *out = qlora__jin_int(result);
        return fits ? QLORA_OK : qlora__jin_too_big(m);
    }
    double x = qlora__jin_real_of(a);
    double y = qlora__jin_real_of(b);
    *out = qlora__jin_float(op == '+' ? x + y : op == '-' ? x - y : x * y);
    return QLORA_OK;
}

// ---- strings and lists

// Markup: & < > ' " become entities.
static qlora_result qlora__jin_escape_html(qlora__jin_machine* m, qlora__jin_value v,
                                           qlora__jin_buffer* out) {
    static const char* const entities[] = {"&amp;", "&lt;", "&gt;", "&#39;", "&#34;"};
    static const char marks[] = "&<>'\"";
    qlora__jin_value text;
    QLORA__TRY(qlora__jin_text(m, v, &text));
    const qlora__jin_string* s = text.as.string;
    if (text.flag != 0) {
        return qlora__jin_put(m, out, s->data, s->bytes);
    }
    for (size_t i = 0; i < s->bytes; i++) {
        const char* mark = s->data[i] != '\0' ? strchr(marks, s->data[i]) : NULL;
        QLORA__TRY(mark != NULL ? qlora__jin_puts(m, out, entities[mark - marks])
                                : qlora__jin_put(m, out, s->data + i, 1));
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_join_strings(qlora__jin_machine* m, qlora__jin_value a,
                                            qlora__jin_value b, qlora__jin_value* out) {
    qlora__jin_buffer buffer;
    memset(&buffer, 0, sizeof buffer);
    bool markup = a.flag != 0 || b.flag != 0;
    if (markup) {
        QLORA__TRY(qlora__jin_escape_html(m, a, &buffer));
        QLORA__TRY(qlora__jin_escape_html(m, b, &buffer));
    } else {
        QLORA__TRY(qlora__jin_buffer_room(m, &buffer, a.as.string->bytes + b.as.string->bytes));
        QLORA__TRY(qlora__jin_print(m, a, &buffer));
        QLORA__TRY(qlora__jin_print(m, b, &buffer));
    }
    QLORA__TRY(qlora__jin_buffer_string(m, &buffer, out));
    out->flag = markup ? 1 : 0;
    return QLORA_OK;
}

static qlora_result qlora__jin_repeat(qlora__jin_machine* m, qlora__jin_value v, int64_t times,
                                      qlora__jin_value* out) {
    times = times < 0 ? 0 : times;
    if (v.kind == QLORA__JIN_STRING) {
        const qlora__jin_string* s = v.as.string;
        qlora__jin_buffer buffer;
        memset(&buffer, 0, sizeof buffer);
        for (int64_t i = 0; i < times && s->bytes > 0; i++) {
            QLORA__TRY(qlora__jin_work(m, 1));
            QLORA__TRY(qlora__jin_put(m, &buffer, s->data, s->bytes));
        }
        QLORA__TRY(qlora__jin_buffer_string(m, &buffer, out));
        out->flag = v.flag;
        return QLORA_OK;
    }
    const qlora__jin_list* list = v.as.list;
    QLORA__TRY(qlora__jin_list_make(m, v.kind, 0, out));
    for (int64_t i = 0; i < times && list->count > 0; i++) {
        for (size_t k = 0; k < list->count; k++) {
            QLORA__TRY(qlora__jin_list_add(m, out->as.list, list->items[k]));
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_append_lists(qlora__jin_machine* m, qlora__jin_value a,
                                            qlora__jin_value b, qlora__jin_value* out) {
    size_t first = a.as.list->count;
    size_t second = b.as.list->count;
    QLORA__TRY(qlora__jin_work(m, (first + second) / 4));
    QLORA__TRY(qlora__jin_list_make(m, a.kind, first + second, out));
    qlora__jin_list* list = out->as.list;
    if (first > 0) {
        memcpy(list->items, a.as.list->items, first * sizeof(qlora__jin_value));
    }
    if (second > 0) {
        memcpy(list->items + first, b.as.list->items, second * sizeof(qlora__jin_value));
    }
    list->count = first + second;
    return QLORA_OK;
}

static bool qlora__jin_is_sequence(qlora__jin_value v) {
    return v.kind == QLORA__JIN_STRING || v.kind == QLORA__JIN_LIST || v.kind == QLORA__JIN_TUPLE;
}

// a op b, where op is + - * / f (//) % p (**). % on a string is for the caller.
static qlora_result qlora__jin_binary(qlora__jin_machine* m, char op, qlora__jin_value a,
                                      qlora__jin_value b, qlora__jin_value* out) {
    if (a.kind == QLORA__JIN_UNDEFINED || b.kind == QLORA__JIN_UNDEFINED) {
        return qlora__jin_undefined_error(m, a.kind == QLORA__JIN_UNDEFINED ? a : b);
    }
    if (qlora__jin_is_number(a) && qlora__jin_is_number(b)) {
        return op == 'p'                             ? qlora__jin_power(m, a, b, out)
               : op == '/' || op == 'f' || op == '%' ? qlora__jin_divide(m, op, a, b, out)
                                                     : qlora__jin_arithmetic(m, op, a, b, out);
    }
    if (a.kind == QLORA__JIN_BIG || b.kind == QLORA__JIN_BIG) {
        return qlora__jin_too_big(m);
    }
    if (op == '+' && a.kind == b.kind && qlora__jin_is_sequence(a)) {
        return a.kind == QLORA__JIN_STRING ? qlora__jin_join_strings(m, a, b, out)
                                           : qlora__jin_append_lists(m, a, b, out);
    }
    if (op == '*' && qlora__jin_is_sequence(a) && qlora__jin_is_integer(b)) {
        return qlora__jin_repeat(m, a, qlora__jin_integer_of(b), out);
    }
    if (op == '*' && qlora__jin_is_sequence(b) && qlora__jin_is_integer(a)) {
        return qlora__jin_repeat(m, b, qlora__jin_integer_of(a), out);
    }
    char name[3] = {op, '\0', '\0'};
    if (op == 'f' || op == 'p') {
        name[0] = op == 'f' ? '/' : '*';
        name[1] = name[0];
    }
    return qlora__jin_fail(m, "a %s %s a %s is not possible", qlora__jin_type(a), name,
                           qlora__jin_type(b));
}

// ---- slices

// One end of a slice, as Python limits it.
static int64_t qlora__jin_slice_end(qlora__jin_value end, int64_t count, bool backwards,
                                    bool start) {
    if (end.kind == QLORA__JIN_NONE || end.kind == QLORA__JIN_MISSING) {
        return start == backwards ? (backwards ? count - 1 : count) : (backwards ? -1 : 0);
    }
    int64_t at = qlora__jin_integer_of(end);
    at += at < 0 ? count : 0;
    int64_t low = backwards ? -1 : 0;
    int64_t high = backwards ? count - 1 : count;
    return at < low ? low : at > high ? high : at;
}

static qlora_result qlora__jin_slice_string(qlora__jin_machine* m, qlora__jin_value v,
                                            int64_t start, int64_t stop, int64_t step,
                                            qlora__jin_value* out) {
    const qlora__jin_string* s = v.as.string;
    qlora__jin_buffer buffer;
    memset(&buffer, 0, sizeof buffer);
    QLORA__TRY(qlora__jin_work(m, s->bytes / 32));
    if (step == 1) {
        size_t begin = qlora__jin_byte_of(s, (size_t)start);
        size_t end = stop > start ? qlora__jin_byte_of(s, (size_t)stop) : begin;
        QLORA__TRY(qlora__jin_string_share(m, s->data + begin, end - begin, out));
        out->flag = v.flag;
        return QLORA_OK;
    }
    for (int64_t i = start; step > 0 ? i < stop : i > stop; i += step) {
        size_t size = 0;
        QLORA__TRY(qlora__jin_work(m, s->bytes == s->chars ? 1 : 1 + s->bytes / 32));
        size_t at = qlora__jin_byte_of(s, (size_t)i);
        qlora__jin_code_at(s->data, s->bytes, at, &size);
        QLORA__TRY(qlora__jin_put(m, &buffer, s->data + at, size));
        if (step > 0 ? i > INT64_MAX - step : i < INT64_MIN - step) {
            break;
        }
    }
    QLORA__TRY(qlora__jin_buffer_string(m, &buffer, out));
    out->flag = v.flag;
    return QLORA_OK;
}

static qlora_result qlora__jin_range_make(qlora__jin_machine* m, int64_t start, int64_t stop,
                                          int64_t step, qlora__jin_value* out) {
    void* memory = NULL;
    QLORA__TRY(qlora__jin_get(m, sizeof(qlora__jin_range), &memory));
    qlora__jin_range* range = (qlora__jin_range*)memory;
    range->start = start;
    range->stop = stop;
    range->step = step;
    range->count = 0;
    // unsigned, because the distance may be more than an int64_t holds
    uint64_t way = step > 0 ? (uint64_t)stop - (uint64_t)start : (uint64_t)start - (uint64_t)stop;
    uint64_t stride = step > 0 ? (uint64_t)step : 0 - (uint64_t)step;
    if (step > 0 ? start < stop : start > stop) {
        uint64_t count = (way - 1) / stride + 1;
        if (count > QLORA__JIN_MAX_RANGE) {
            return qlora__jin_fail(m, "a range of %llu numbers; the sandbox allows %d",
                                   (unsigned long long)count, (int)QLORA__JIN_MAX_RANGE);
        }
        range->count = (int64_t)count;
    }
    *out = qlora__jin_of(QLORA__JIN_RANGE);
    out->as.range = range;
    return QLORA_OK;
}

// v[start:stop:step]; missing parts are of kind MISSING or NONE. *found is false where Python
// raises a TypeError.
static qlora_result qlora__jin_slice(qlora__jin_machine* m, qlora__jin_value v,
                                     const qlora__jin_value parts[3], qlora__jin_value* out,
                                     bool* found) {
    int64_t count = 0;
    *found = qlora__jin_is_sequence(v) || v.kind == QLORA__JIN_RANGE;
    for (int i = 0; i < 3; i++) {
        *found = *found && (parts[i].kind == QLORA__JIN_MISSING ||
                            parts[i].kind == QLORA__JIN_NONE || qlora__jin_is_integer(parts[i]));
    }
    if (!*found) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__jin_length(m, v, &count));
    int64_t step = qlora__jin_is_integer(parts[2]) ? qlora__jin_integer_of(parts[2]) : 1;
    if (step == 0) {
        return qlora__jin_fail(m, "the step of a slice is zero");
    }
    step = step > INT32_MAX ? INT32_MAX : step < -INT32_MAX ? -INT32_MAX : step;
    int64_t start = qlora__jin_slice_end(parts[0], count, step < 0, true);
    int64_t stop = qlora__jin_slice_end(parts[1], count, step < 0, false);
    if (v.kind == QLORA__JIN_STRING) {
        return qlora__jin_slice_string(m, v, start, stop, step, out);
    }
    if (v.kind == QLORA__JIN_RANGE) {
        const qlora__jin_range* r = v.as.range;
        return qlora__jin_range_make(m, r->start + start * r->step, r->start + stop * r->step,
                                     r->step * step, out);
    }
    QLORA__TRY(qlora__jin_list_make(m, v.kind, 0, out));
    for (int64_t i = start; step > 0 ? i < stop : i > stop; i += step) {
        QLORA__TRY(qlora__jin_list_add(m, out->as.list, v.as.list->items[i]));
    }
    return QLORA_OK;
}

// ---- membership

// Where `part` starts in s at or after `from`, in bytes; SIZE_MAX when it is not there.
static size_t qlora__jin_find_bytes(const char* data, size_t size, size_t from, const char* part,
                                    size_t length) {
    if (length == 0) {
        return from;
    }
    while (from < size && size - from >= length) {
        const char* hit = (const char*)memchr(data + from, part[0], size - from - length + 1);
        if (hit == NULL) {
            return SIZE_MAX;
        }
        from = (size_t)(hit - data);
        if (memcmp(hit, part, length) == 0) {
            return from;
        }
        from++;
    }
    return SIZE_MAX;
}

// item in v
static qlora_result qlora__jin_contains(qlora__jin_machine* m, qlora__jin_value v,
                                        qlora__jin_value item, bool* out) {
    qlora__jin_iter* iter = NULL;
    qlora__jin_value next;
    bool more = true;
    *out = false;
    if (v.kind == QLORA__JIN_STRING) {
        if (item.kind != QLORA__JIN_STRING) {
            return item.kind == QLORA__JIN_UNDEFINED
                       ? qlora__jin_fail(m, "an undefined value cannot be in a string")
                       : qlora__jin_fail(m, "a %s cannot be in a string", qlora__jin_type(item));
        }
        const qlora__jin_string* s = v.as.string;
        QLORA__TRY(qlora__jin_work(m, s->bytes / 16));
        *out = qlora__jin_find_bytes(s->data, s->bytes, 0, item.as.string->data,
                                     item.as.string->bytes) != SIZE_MAX;
        return QLORA_OK;
    }
    if (v.kind == QLORA__JIN_DICT || (v.kind == QLORA__JIN_VIEW && v.flag == 0)) {
        size_t at = 0;
        QLORA__TRY(qlora__jin_dict_find(m, v.as.dict, item, &at));
        *out = at < v.as.dict->count;
        return QLORA_OK;
    }
    if (!qlora__jin_is_iterable(v)) {
        return qlora__jin_fail(m, "a %s contains nothing: \"in\" is not possible",
                               qlora__jin_type(v));
    }
    QLORA__TRY(qlora__jin_iter_make(m, v, &iter));
    while (!*out) {
        QLORA__TRY(m->hooks->next(m, iter, &next, &more));
        if (!more) {
            break;
        }
        QLORA__TRY(qlora__jin_equal(m, next, item, out));
    }
    return QLORA_OK;
}

//@@ src/text/jinja_json.h

// JSON to values and back: json.loads for the conversation, json.dumps for the filter tojson.

// The value of a JSON token. Its depth is limited by the JSON reader; containers are kept on an
// explicit stack.
typedef struct qlora__jin_level {
    qlora__jin_value value;
    const qlora__json_token* end; // behind the last token inside
} qlora__jin_level;

static qlora_result qlora__jin_from_number(qlora__jin_machine* m, const qlora__json* json,
                                           const qlora__json_token* token, qlora__jin_value* out) {
    int64_t integer = 0;
    const char* text = json->text + token->begin;
    size_t size = token->end - token->begin;
    for (size_t i = 0; i < size; i++) {
        if (text[i] == '.' || text[i] == 'e' || text[i] == 'E') {
            *out = qlora__jin_float(qlora__number_parse(text, size));
            return QLORA_OK;
        }
    }
    if (qlora__text_json_integer(json, token, &integer)) {
        *out = qlora__jin_int(integer);
        return QLORA_OK;
    }
    QLORA__TRY(qlora__jin_string_share(m, text, size, out));
    out->kind = QLORA__JIN_BIG;
    return QLORA_OK;
}

// One token; of a container, the empty container.
static qlora_result qlora__jin_from_token(qlora__jin_machine* m, const qlora__json* json,
                                          const qlora__json_token* token, qlora__jin_value* out) {
    switch (token->kind) {
    case QLORA__JSON_TRUE:
    case QLORA__JSON_FALSE:
        *out = qlora__jin_bool(token->kind == QLORA__JSON_TRUE);
        return QLORA_OK;
    case QLORA__JSON_NUMBER:
        return qlora__jin_from_number(m, json, token, out);
    case QLORA__JSON_STRING:
        return qlora__jin_string_share(m, qlora__text_json_text(json, token),
                                       qlora__text_json_size(token), out);
    case QLORA__JSON_ARRAY:
        return qlora__jin_list_make(m, QLORA__JIN_LIST, token->count, out);
    case QLORA__JSON_OBJECT:
        return qlora__jin_dict_make(m, QLORA__JIN_DICT, token->count, out);
    default:
        *out = qlora__jin_none();
        return QLORA_OK;
    }
}

// The strings of the result share the memory of `json`, which must have been decoded.
static qlora_result qlora__jin_from_json(qlora__jin_machine* m, const qlora__json* json,
                                         const qlora__json_token* root, qlora__jin_value* out) {
    qlora__jin_level levels[QLORA__JSON_MAX_DEPTH + 1];
    size_t depth = 0;
    const qlora__json_token* token = root;
    const qlora__json_token* end = qlora__text_json_next(json, root);
    while (token < end) {
        qlora__jin_value value;
        const qlora__json_token* key = NULL;
        bool in_dict = depth > 0 && levels[depth - 1].value.kind == QLORA__JIN_DICT;
        if (in_dict) {
            key = token++;
        }
        QLORA__TRY(qlora__jin_from_token(m, json, token, &value));
        if (in_dict) {
            qlora__jin_value name;
            QLORA__TRY(qlora__jin_from_token(m, json, key, &name));
            QLORA__TRY(qlora__jin_dict_set(m, levels[depth - 1].value.as.dict, name, value));
        } else if (depth > 0) {
            QLORA__TRY(qlora__jin_list_add(m, levels[depth - 1].value.as.list, value));
        } else {
            *out = value;
        }
        bool container = value.kind == QLORA__JIN_LIST || value.kind == QLORA__JIN_DICT;
        if (container && depth <= QLORA__JSON_MAX_DEPTH) {
            levels[depth].value = value;
            levels[depth++].end = qlora__text_json_next(json, token);
        }
        token++;
        while (depth > 0 && token >= levels[depth - 1].end) {
            depth--;
        }
    }
    return QLORA_OK;
}

// ---- tojson -------------------------------------------------------------------------------------

typedef struct qlora__jin_dump {
    qlora__jin_buffer* out;
    bool ascii;
    bool sorted;
    bool indented;
    qlora__jin_value indent; // a string for each level
    qlora__jin_value item_separator;
    qlora__jin_value key_separator;
    qlora_result (*value)(qlora__jin_machine* m, const struct qlora__jin_dump* dump,
                          qlora__jin_value v, size_t level);
} qlora__jin_dump;

static qlora_result qlora__jin_dump_string(qlora__jin_machine* m, const qlora__jin_string* s,
                                           bool ascii, qlora__jin_buffer* out) {
    static const char plain[] = "\"\\\b\f\n\r\t";
    static const char letters[] = "\"\\bfnrt";
    QLORA__TRY(qlora__jin_work(m, s->bytes / 32));
    QLORA__TRY(qlora__jin_put(m, out, "\"", 1));
    size_t good = 0;
    for (size_t at = 0; at < s->bytes;) {
        char escaped[16];
        unsigned char c = (unsigned char)s->data[at];
        size_t step = 1;
        const char* hit = c != 0 && c < 0x80 ? strchr(plain, (char)c) : NULL;
        if (hit != NULL) {
            snprintf(escaped, sizeof escaped, "\\%c", letters[hit - plain]);
        } else if (c < 0x20) {
            snprintf(escaped, sizeof escaped, "\\u%04x", (unsigned)c);
        } else if (c >= 0x80 && ascii) {
            uint32_t code = qlora__jin_code_at(s->data, s->bytes, at, &step);
            if (code >= 0x10000) {
                code -= 0x10000;
                snprintf(escaped, sizeof escaped, "\\u%04x\\u%04x",
                         (unsigned)(0xD800 + (code >> 10)), (unsigned)(0xDC00 + (code & 0x3FF)));
            } else {
                snprintf(escaped, sizeof escaped, "\\u%04x", (unsigned)code);
            }
        } else if (c == 0x7F && ascii) {
            at++; // json.dumps leaves it
            continue;
        } else {
            at++;
            continue;
        }
        QLORA__TRY(qlora__jin_put(m, out, s->data + good, at - good));
        QLORA__TRY(qlora__jin_puts(m, out, escaped));
        at += step;
        good = at;
    }
    QLORA__TRY(qlora__jin_put(m, out, s->data + good, s->bytes - good));
    return qlora__jin_put(m, out, "\"", 1);
}

static qlora_result qlora__jin_dump_number(qlora__jin_machine* m, qlora__jin_value v,
                                           qlora__jin_buffer* out) {
    if (v.kind == QLORA__JIN_FLOAT) {
        double x = v.as.real;
        if (qlora__jin_is_nan(x) || x > 1.7976931348623157e308 || x < -1.7976931348623157e308) {
            return qlora__jin_puts(m, out,
                                   qlora__jin_is_nan(x) ? "NaN"
                                   : x > 0.0            ? "Infinity"
                                                        : "-Infinity");
        }
    }
    if (v.kind == QLORA__JIN_BOOL || v.kind == QLORA__JIN_NONE) {
        return qlora__jin_puts(m, out,
                               v.kind == QLORA__JIN_NONE ? "null"
                               : v.as.truth              ? "true"
                                                         : "false");
    }
    return qlora__jin_repr(m, v, out);
}

static qlora_result qlora__jin_dump_newline(qlora__jin_machine* m, const qlora__jin_dump* d,
                                            size_t level) {
    if (!d->indented) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__jin_put(m, d->out, "\n", 1));
    for (size_t i = 0; i < level; i++) {
        QLORA__TRY(qlora__jin_print(m, d->indent, d->out));
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_dump_list(qlora__jin_machine* m, const qlora__jin_dump* d,
                                         const qlora__jin_list* list, size_t level) {
    QLORA__TRY(qlora__jin_put(m, d->out, "[", 1));
    for (size_t i = 0; i < list->count; i++) {
        QLORA__TRY(i > 0 ? qlora__jin_print(m, d->item_separator, d->out) : QLORA_OK);
        QLORA__TRY(qlora__jin_dump_newline(m, d, level + 1));
        QLORA__TRY(d->value(m, d, list->items[i], level + 1));
    }
    QLORA__TRY(list->count > 0 ? qlora__jin_dump_newline(m, d, level) : QLORA_OK);
    return qlora__jin_put(m, d->out, "]", 1);
}

// The order of the keys: as they are, or sorted (by insertion, stable). Python compares the keys
// themselves, so keys of different types are an error.
static qlora_result qlora__jin_sort_keys(qlora__jin_machine* m, const qlora__jin_dict* dict,
                                         bool sorted, size_t** out) {
    void* memory = NULL;
    QLORA__TRY(qlora__jin_get(m, dict->count * sizeof(size_t), &memory));
    size_t* order = (size_t*)memory;
    for (size_t i = 0; i < dict->count; i++) {
        size_t at = i;
        while (sorted && at > 0) {
            bool less = false;
            QLORA__TRY(qlora__jin_less(m, dict->keys[i], dict->keys[order[at - 1]], false, &less));
            if (!less) {
                break;
            }
            order[at] = order[at - 1];
            at--;
        }
        order[at] = i;
    }
    *out = order;
    return QLORA_OK;
}

static qlora_result qlora__jin_dump_dict(qlora__jin_machine* m, const qlora__jin_dump* d,
                                         const qlora__jin_dict* dict, size_t level) {
    size_t* order = NULL;
    QLORA__TRY(qlora__jin_sort_keys(m, dict, d->sorted, &order));
    QLORA__TRY(qlora__jin_put(m, d->out, "{", 1));
    for (size_t i = 0; i < dict->count; i++) {
        qlora__jin_value key = dict->keys[order[i]];
        QLORA__TRY(i > 0 ? qlora__jin_print(m, d->item_separator, d->out) : QLORA_OK);
        QLORA__TRY(qlora__jin_dump_newline(m, d, level + 1));
        if (key.kind == QLORA__JIN_STRING) {
            QLORA__TRY(qlora__jin_dump_string(m, key.as.string, d->ascii, d->out));
        } else if (qlora__jin_is_number(key) || key.kind == QLORA__JIN_NONE) {
            QLORA__TRY(qlora__jin_put(m, d->out, "\"", 1));
            QLORA__TRY(qlora__jin_dump_number(m, key, d->out));
            QLORA__TRY(qlora__jin_put(m, d->out, "\"", 1));
        } else {
            return qlora__jin_fail(m, "tojson: a %s cannot be a key", qlora__jin_type(key));
        }
        QLORA__TRY(qlora__jin_print(m, d->key_separator, d->out));
        QLORA__TRY(d->value(m, d, dict->values[order[i]], level + 1));
    }
    QLORA__TRY(dict->count > 0 ? qlora__jin_dump_newline(m, d, level) : QLORA_OK);
    return qlora__jin_put(m, d->out, "}", 1);
}

static qlora_result qlora__jin_dump_value(qlora__jin_machine* m, const qlora__jin_dump* d,
                                          qlora__jin_value v, size_t level) {
    QLORA__TRY(qlora__jin_enter(m));
    switch (v.kind) {
    case QLORA__JIN_NONE:
    case QLORA__JIN_BOOL:
    case QLORA__JIN_INT:
    case QLORA__JIN_BIG:
    case QLORA__JIN_FLOAT:
        QLORA__TRY(qlora__jin_dump_number(m, v, d->out));
        break;
    case QLORA__JIN_STRING:
        QLORA__TRY(qlora__jin_dump_string(m, v.as.string, d->ascii, d->out));
        break;
    case QLORA__JIN_LIST:
    case QLORA__JIN_TUPLE:
        QLORA__TRY(qlora__jin_dump_list(m, d, v.as.list, level));
        break;
    case QLORA__JIN_DICT:
        QLORA__TRY(qlora__jin_dump_dict(m, d, v.as.dict, level));
        break;
    default:
        return qlora__jin_fail(m, "tojson: a %s cannot be written as JSON", qlora__jin_type(v));
    }
    m->depth--;
    return QLORA_OK;
}

// in: value, ensure_ascii, indent, separators, sort_keys
static qlora_result qlora__jin_tojson(qlora__jin_machine* m, qlora__jin_value* in,
                                      qlora__jin_value* out) {
    qlora__jin_buffer buffer;
    qlora__jin_dump d;
    memset(&buffer, 0, sizeof buffer);
    memset(&d, 0, sizeof d);
    d.out = &buffer;
    d.value = qlora__jin_dump_value;
    d.ascii = qlora__jin_truth(in[1]);
    d.sorted = qlora__jin_truth(in[4]);
    d.indented = in[2].kind != QLORA__JIN_MISSING && in[2].kind != QLORA__JIN_NONE;
    QLORA__TRY(qlora__jin_string_of(m, "", &d.indent));
    if (in[2].kind == QLORA__JIN_STRING) {
        d.indent = in[2];
    } else if (d.indented && qlora__jin_is_integer(in[2])) {
        qlora__jin_value space;
        QLORA__TRY(qlora__jin_string_of(m, " ", &space));
        QLORA__TRY(qlora__jin_repeat(m, space, qlora__jin_integer_of(in[2]), &d.indent));
    } else if (d.indented) {
        return qlora__jin_fail(m, "tojson: indent is a %s", qlora__jin_type(in[2]));
    }
    QLORA__TRY(qlora__jin_string_of(m, d.indented ? "," : ", ", &d.item_separator));
    QLORA__TRY(qlora__jin_string_of(m, ": ", &d.key_separator));
    if (in[3].kind != QLORA__JIN_MISSING && in[3].kind != QLORA__JIN_NONE) {
        bool pair = (in[3].kind == QLORA__JIN_TUPLE || in[3].kind == QLORA__JIN_LIST) &&
                    in[3].as.list->count == 2 &&
                    in[3].as.list->items[0].kind == QLORA__JIN_STRING &&
                    in[3].as.list->items[1].kind == QLORA__JIN_STRING;
        if (!pair) {
            return qlora__jin_fail(m, "tojson: separators must be two strings");
        }
        d.item_separator = in[3].as.list->items[0];
        d.key_separator = in[3].as.list->items[1];
    }
    QLORA__TRY(qlora__jin_dump_value(m, &d, in[0], 0));
    return qlora__jin_buffer_string(m, &buffer, out);
}

//@@ src/text/jinja_format.h

// Text from a format: the operator %, str.format, strftime.

typedef struct qlora__jin_spec {
    uint32_t fill;
    char align; // < > ^ = or 0
    char sign;  // + - or a space
    bool alternate;
    bool zero;
    int64_t width;
    char group;        // , or _ or 0
    int64_t precision; // -1: none
    char type;
} qlora__jin_spec;

// Appends text, padded to the width in characters.
static qlora_result qlora__jin_pad(qlora__jin_machine* m, const char* text, size_t size,
                                   const qlora__jin_spec* spec, char align,
                                   qlora__jin_buffer* out) {
    int64_t chars = (int64_t)qlora__jin_count_chars(text, size);
    int64_t room = spec->width > chars ? spec->width - chars : 0;
    int64_t left = align == '>' ? room : align == '^' ? room / 2 : 0;
    for (int64_t i = 0; i < room; i++) {
        if (i == left) {
            QLORA__TRY(qlora__jin_put(m, out, text, size));
        }
        QLORA__TRY(qlora__jin_work(m, 1));
        QLORA__TRY(qlora__jin_put_code(m, out, spec->fill));
    }
    return left == room ? qlora__jin_put(m, out, text, size) : QLORA_OK;
}

// Digits in groups of three, from the right, up to a point or exponent.
static void qlora__jin_group(const char* digits, char separator, char* out, size_t room) {
    size_t whole = strspn(digits, "0123456789");
    size_t n = 0;
    for (size_t i = 0; digits[i] != '\0' && n + 2 < room; i++) {
        if (separator != '\0' && i > 0 && i < whole && (whole - i) % 3 == 0) {
            out[n++] = separator;
        }
        out[n++] = digits[i];
    }
    out[n] = '\0';
}

// A number without its sign, as text.
static qlora_result qlora__jin_format_digits(qlora__jin_machine* m, qlora__jin_value v,
                                             const qlora__jin_spec* spec, char* out, size_t room) {
    char type = spec->type;
    if (strchr("eEfFgG%", type) != NULL && type != '\0') {
        char format[8];
        double x = qlora__jin_real_of(v);
        x = type == '%' ? x * 100.0 : x;
        x = x < 0.0 ? -x : x;
        int64_t precision = spec->precision < 0 ? 6 : spec->precision;
        if (precision > 100) {
            return qlora__jin_fail(m, "a precision above 100 is not supported");
        }
        snprintf(format, sizeof format, "%%.*%c", type == '%' || type == 'F' ? 'f' : type);
        // the formats differ only in their last letter, and all take an int and a double
        int wrote = format[3] == 'f'   ? snprintf(out, room, "%.*f", (int)precision, x)
                    : format[3] == 'e' ? snprintf(out, room, "%.*e", (int)precision, x)
                    : format[3] == 'E' ? snprintf(out, room, "%.*E", (int)precision, x)
                    : format[3] == 'g' ? snprintf(out, room, "%.*g", (int)precision, x)
                                       : snprintf(out, room, "%.*G", (int)precision, x);
        for (char* c = out; *c != '\0'; c++) {
            *c = *c == ',' ? '.' : *c; // the locale's decimal point
        }
        if (type == '%' && wrote > 0 && (size_t)wrote + 1 < room) {
            out[wrote] = '%';
            out[wrote + 1] = '\0';
        }
        return QLORA_OK;
    }
    int64_t integer = qlora__jin_integer_of(v);
    uint64_t size = integer < 0 ? 0 - (uint64_t)integer : (uint64_t)integer;
    if (type == 'b') {
        size_t n = 0;
        int top = 63;
        while (top > 0 && (size >> top & 1) == 0) {
            top--;
        }
        for (; top >= 0; top--) {
            out[n++] = (size >> top & 1) != 0 ? '1' : '0';
        }
        out[n] = '\0';
        return QLORA_OK;
    }
    const char* format = type == 'x'   ? "%llx"
                         : type == 'X' ? "%llX"
                         : type == 'o' ? "%llo"
                                       : "%llu";
    snprintf(out, room, format, (unsigned long long)size);
    return QLORA_OK;
}

static qlora_result qlora__jin_format_number(qlora__jin_machine* m, qlora__jin_value v,
                                             const qlora__jin_spec* given, qlora__jin_buffer* out) {
    char digits[512];
    char grouped[700];
    char text[720];
    qlora__jin_spec spec = *given;
    bool real = v.kind == QLORA__JIN_FLOAT;
    bool negative = real ? v.as.real < 0.0 : qlora__jin_integer_of(v) < 0;
    if (spec.type == '\0' && real && spec.precision < 0) {
        char shortest[48];
        qlora__jin_format_double(v.as.real, shortest);
        negative = shortest[0] == '-';
        snprintf(digits, sizeof digits, "%s", shortest + (negative ? 1 : 0));
    } else {
        spec.type = spec.type != '\0' ? spec.type : real ? 'g' : 'd';
        spec.type = spec.type == 'i' || spec.type == 'u' || spec.type == 'n' ? 'd' : spec.type;
        if (strchr("dxXobeEfFgG%", spec.type) == NULL || (real && strchr("dxXob", spec.type))) {
            return qlora__jin_fail(m, "the format \"%c\" does not fit a %s", spec.type,
                                   qlora__jin_type(v));
        }
        QLORA__TRY(qlora__jin_format_digits(m, v, &spec, digits, sizeof digits));
    }
    qlora__jin_group(digits, spec.group, grouped, sizeof grouped);
    const char* sign = negative ? "-" : spec.sign == '+' ? "+" : spec.sign == ' ' ? " " : "";
    const char* prefix = !spec.alternate    ? ""
                         : spec.type == 'x' ? "0x"
                         : spec.type == 'X' ? "0X"
                         : spec.type == 'o' ? "0o"
                         : spec.type == 'b' ? "0b"
                                            : "";
    char align = spec.align != '\0' ? spec.align : '>';
    if (spec.zero && spec.align == '\0') {
        align = '=';
        spec.fill = '0';
    }
    if (align == '=') {
        QLORA__TRY(qlora__jin_puts(m, out, sign));
        QLORA__TRY(qlora__jin_puts(m, out, prefix));
        int64_t used = (int64_t)(strlen(sign) + strlen(prefix));
        spec.width = spec.width > used ? spec.width - used : 0;
        return qlora__jin_pad(m, grouped, strlen(grouped), &spec, '>', out);
    }
    snprintf(text, sizeof text, "%s%s%s", sign, prefix, grouped);
    return qlora__jin_pad(m, text, strlen(text), &spec, align, out);
}

static qlora_result qlora__jin_format_string(qlora__jin_machine* m, qlora__jin_value v,
                                             const qlora__jin_spec* spec, qlora__jin_buffer* out) {
    const qlora__jin_string* s = v.as.string;
    size_t bytes = s->bytes;
    if (spec->precision >= 0 && (uint64_t)spec->precision < s->chars) {
        bytes = qlora__jin_byte_of(s, (size_t)spec->precision);
    }
    return qlora__jin_pad(m, s->data, bytes, spec, spec->align != '\0' ? spec->align : '<', out);
}

static int64_t qlora__jin_read_number(const char* text, size_t size, size_t* at) {
    int64_t value = 0;
    while (*at < size && text[*at] >= '0' && text[*at] <= '9') {
        value = value < 100000000 ? value * 10 + (text[*at] - '0') : value;
        *at += 1;
    }
    return value;
}

// ---- the operator %

static qlora_result qlora__jin_percent_one(qlora__jin_machine* m, qlora__jin_value v,
                                           qlora__jin_spec* spec, qlora__jin_buffer* out) {
    qlora__jin_value text;
    if (spec->type == 's' || spec->type == 'r' || spec->type == 'a') {
        qlora__jin_buffer buffer;
        memset(&buffer, 0, sizeof buffer);
        QLORA__TRY(spec->type == 's' ? qlora__jin_print(m, v, &buffer)
                                     : qlora__jin_repr(m, v, &buffer));
        QLORA__TRY(qlora__jin_buffer_string(m, &buffer, &text));
        spec->align = spec->align != '\0' ? spec->align : '>';
        return qlora__jin_format_string(m, text, spec, out);
    }
    if (spec->type == 'c') {
        if (v.kind == QLORA__JIN_STRING && v.as.string->chars == 1) {
            return qlora__jin_format_string(m, v, spec, out);
        }
        return qlora__jin_fail(m, "%%c needs one character");
    }
    if (v.kind == QLORA__JIN_UNDEFINED) {
        return qlora__jin_undefined_error(m, v);
    }
    if (strchr("diuxXoeEfFgG", spec->type) == NULL || spec->type == '\0') {
        return qlora__jin_fail(m, "the format %%%c is not supported", spec->type);
    }
    if (!qlora__jin_is_number(v)) {
        return qlora__jin_fail(m, "the format %%%c needs a number, not a %s", spec->type,
                               qlora__jin_type(v));
    }
    if (v.kind == QLORA__JIN_FLOAT && strchr("diu", spec->type) != NULL) {
        v = qlora__jin_int((int64_t)v.as.real);
    }
    if (spec->precision >= 0 && strchr("diuxXo", spec->type) != NULL) {
        return qlora__jin_fail(m, "a precision with %%%c is not supported", spec->type);
    }
    return qlora__jin_format_number(m, v, spec, out);
}

// A width or precision: digits, or a star that takes the next argument.
static qlora_result qlora__jin_percent_size(qlora__jin_machine* m, const qlora__jin_string* s,
                                            size_t* at, const qlora__jin_list* args, size_t* used,
                                            int64_t* out) {
    if (*at < s->bytes && s->data[*at] == '*') {
        *at += 1;
        if (args == NULL || *used >= args->count || !qlora__jin_is_integer(args->items[*used])) {
            return qlora__jin_fail(m, "a * in a format needs a whole number");
        }
        *out = qlora__jin_integer_of(args->items[(*used)++]);
        return QLORA_OK;
    }
    *out = qlora__jin_read_number(s->data, s->bytes, at);
    return QLORA_OK;
}

typedef struct qlora__jin_percent_state {
    qlora__jin_value given;
    const qlora__jin_list* args; // of a tuple
    size_t used;
} qlora__jin_percent_state;

// One % at s->data[*at], behind the sign.
static qlora_result qlora__jin_percent_part(qlora__jin_machine* m, const qlora__jin_string* s,
                                            size_t* at, qlora__jin_percent_state* p,
                                            qlora__jin_buffer* out) {
    qlora__jin_spec spec;
    qlora__jin_value value = qlora__jin_of(QLORA__JIN_MISSING);
    memset(&spec, 0, sizeof spec);
    spec.fill = ' ';
    spec.precision = -1;
    if (*at < s->bytes && s->data[*at] == '(') {
        size_t close = qlora__jin_find_bytes(s->data, s->bytes, *at, ")", 1);
        size_t place = 0;
        if (close == SIZE_MAX || p->given.kind != QLORA__JIN_DICT) {
            return qlora__jin_fail(m, "a format with (name) needs a dictionary");
        }
        place = qlora__jin_dict_at(p->given.as.dict, s->data + *at + 1, close - *at - 1);
        if (place == p->given.as.dict->count) {
            return qlora__jin_fail(m, "a format names a key that is not there");
        }
        value = p->given.as.dict->values[place];
        *at = close + 1;
    }
    for (; *at < s->bytes && s->data[*at] != '\0' && strchr("-+ #0", s->data[*at]) != NULL;
         *at += 1) {
        char c = s->data[*at];
        spec.align = c == '-' ? '<' : spec.align;
        spec.sign = c == '+' || (c == ' ' && spec.sign == '\0') ? c : spec.sign;
        spec.alternate = spec.alternate || c == '#';
        spec.zero = spec.zero || c == '0';
    }
    QLORA__TRY(qlora__jin_percent_size(m, s, at, p->args, &p->used, &spec.width));
    if (*at < s->bytes && s->data[*at] == '.') {
        *at += 1;
        QLORA__TRY(qlora__jin_percent_size(m, s, at, p->args, &p->used, &spec.precision));
    }
    if (*at >= s->bytes) {
        return qlora__jin_fail(m, "a format ends inside %%");
    }
    spec.type = s->data[(*at)++];
    if (spec.type == '%') {
        return qlora__jin_put(m, out, "%", 1);
    }
    if (value.kind == QLORA__JIN_MISSING) {
        size_t count = p->args != NULL ? p->args->count : 1;
        if (p->used >= count) {
            return qlora__jin_fail(m, "not enough values for a format");
        }
        value = p->args != NULL ? p->args->items[p->used] : p->given;
        p->used++;
    }
    return qlora__jin_percent_one(m, value, &spec, out);
}

static qlora_result qlora__jin_percent(qlora__jin_machine* m, qlora__jin_value format,
                                       qlora__jin_value given, qlora__jin_value* out) {
    const qlora__jin_string* s = format.as.string;
    qlora__jin_buffer buffer;
    qlora__jin_percent_state p;
    memset(&buffer, 0, sizeof buffer);
    memset(&p, 0, sizeof p);
    p.given = given;
    p.args = given.kind == QLORA__JIN_TUPLE ? given.as.list : NULL;
    if (format.flag != 0) {
        return qlora__jin_fail(m, "%% on a safe string is not supported");
    }
    for (size_t at = 0; at < s->bytes;) {
        size_t sign = qlora__jin_find_bytes(s->data, s->bytes, at, "%", 1);
        size_t end = sign == SIZE_MAX ? s->bytes : sign;
        QLORA__TRY(qlora__jin_put(m, &buffer, s->data + at, end - at));
        at = end;
        if (sign != SIZE_MAX) {
            at++;
            QLORA__TRY(qlora__jin_percent_part(m, s, &at, &p, &buffer));
        }
    }
    bool mapping = given.kind == QLORA__JIN_DICT || given.kind == QLORA__JIN_LIST;
    if (p.args != NULL ? p.used < p.args->count : p.used == 0 && !mapping) {
        return qlora__jin_fail(m, "a format does not use all its values");
    }
    return qlora__jin_buffer_string(m, &buffer, out);
}

// ---- str.format

static qlora_result qlora__jin_read_spec(qlora__jin_machine* m, const char* text, size_t size,
                                         qlora__jin_spec* spec) {
    size_t at = 0;
    size_t step = 0;
    memset(spec, 0, sizeof *spec);
    spec->fill = ' ';
    spec->precision = -1;
    if (size > 0) {
        uint32_t fill = qlora__jin_code_at(text, size, 0, &step);
        if (step < size && strchr("<>^=", text[step]) != NULL && text[step] != '\0') {
            spec->fill = fill;
            spec->align = text[step];
            at = step + 1;
        } else if (strchr("<>^=", text[0]) != NULL && text[0] != '\0') {
            spec->align = text[0];
            at = 1;
        }
    }
    if (at < size && (text[at] == '+' || text[at] == '-' || text[at] == ' ')) {
        spec->sign = text[at++];
    }
    if (at < size && text[at] == '#') {
        spec->alternate = true;
        at++;
    }
    if (at < size && text[at] == '0') {
        spec->zero = true;
        at++;
    }
    spec->width = qlora__jin_read_number(text, size, &at);
    if (at < size && (text[at] == ',' || text[at] == '_')) {
        spec->group = text[at++];
    }
    if (at < size && text[at] == '.') {
        at++;
        size_t digits = at;
        spec->precision = qlora__jin_read_number(text, size, &at);
        if (at == digits) {
            return qlora__jin_fail(m, "a format has a point without a precision");
        }
    }
    if (at < size) {
        spec->type = text[at++];
    }
    return at == size ? QLORA_OK : qlora__jin_fail(m, "a format has an unknown ending");
}

static qlora_result qlora__jin_format_value(qlora__jin_machine* m, qlora__jin_value v,
                                            const char* text, size_t size, qlora__jin_buffer* out) {
    qlora__jin_spec spec;
    if (size == 0) {
        return qlora__jin_print(m, v, out);
    }
    QLORA__TRY(qlora__jin_read_spec(m, text, size, &spec));
    if (v.kind == QLORA__JIN_STRING && (spec.type == '\0' || spec.type == 's')) {
        if (spec.zero && spec.align == '\0') {
            spec.fill = '0';
        }
        return spec.align == '=' || spec.sign != '\0'
                   ? qlora__jin_fail(m, "a format for numbers is used for a string")
                   : qlora__jin_format_string(m, v, &spec, out);
    }
    if (qlora__jin_is_number(v) && spec.type != 's') {
        if (v.kind == QLORA__JIN_BOOL) {
            v = qlora__jin_int(qlora__jin_integer_of(v));
        }
        return qlora__jin_format_number(m, v, &spec, out);
    }
    return qlora__jin_fail(m, "a %s cannot be printed with a format", qlora__jin_type(v));
}

// The value that {name.attribute[item]} means.
static qlora_result qlora__jin_format_field(qlora__jin_machine* m, const char* text, size_t size,
                                            const qlora__jin_args* args, size_t* automatic,
                                            qlora__jin_value* out) {
    size_t at = 0;
    while (at < size && text[at] != '.' && text[at] != '[') {
        at++;
    }
    size_t digits = 0;
    int64_t index = qlora__jin_read_number(text, at, &digits);
    if (at == 0 || digits == at) {
        index = at == 0 ? (int64_t)(*automatic)++ : index;
        if ((uint64_t)index >= args->positional) {
            return qlora__jin_fail(m, "format: there is no value number %lld", (long long)index);
        }
        *out = args->items[index];
    } else {
        size_t k = 0;
        while (k < args->named &&
               !(args->names[k]->bytes == at && memcmp(args->names[k]->data, text, at) == 0)) {
            k++;
        }
        if (k == args->named) {
            return qlora__jin_fail(m, "format: there is no value named \"%.*s\"",
                                   (int)(at < 60 ? at : 60), text);
        }
        *out = args->items[args->positional + k];
    }
    while (at < size) {
        bool item = text[at] == '[';
        size_t begin = ++at;
        while (at < size && (item ? text[at] != ']' : text[at] != '.' && text[at] != '[')) {
            at++;
        }
        digits = begin;
        index = qlora__jin_read_number(text, at, &digits);
        qlora__jin_value key = qlora__jin_int(index);
        if (!item || digits != at) {
            QLORA__TRY(qlora__jin_string_share(m, text + begin, at - begin, &key));
        }
        QLORA__TRY(item ? qlora__jin_getitem(m, *out, key, out)
                        : qlora__jin_getattr(m, *out, text + begin, at - begin, out));
        at += item ? 1 : 0;
    }
    return QLORA_OK;
}

// One {...}, without its braces.
static qlora_result qlora__jin_format_part(qlora__jin_machine* m, const char* text, size_t size,
                                           const qlora__jin_args* args, size_t* automatic,
                                           qlora__jin_buffer* out) {
    size_t colon = 0;
    size_t bang = SIZE_MAX;
    qlora__jin_value value;
    qlora__jin_buffer shown;
    memset(&shown, 0, sizeof shown);
    while (colon < size && text[colon] != ':') {
        bang = text[colon] == '!' && bang == SIZE_MAX ? colon : bang;
        colon++;
    }
    if (memchr(text, '{', size) != NULL) {
        return qlora__jin_fail(m, "format: braces inside braces are not supported");
    }
    size_t name = bang != SIZE_MAX ? bang : colon;
    QLORA__TRY(qlora__jin_format_field(m, text, name, args, automatic, &value));
    if (bang != SIZE_MAX) {
        char how = bang + 1 < colon ? text[bang + 1] : '\0';
        if (bang + 2 != colon || (how != 'r' && how != 's')) {
            return qlora__jin_fail(m, "format: unknown conversion after !");
        }
        QLORA__TRY(how == 'r' ? qlora__jin_repr(m, value, &shown)
                              : qlora__jin_print(m, value, &shown));
        QLORA__TRY(qlora__jin_buffer_string(m, &shown, &value));
    }
    size_t spec = colon < size ? colon + 1 : size;
    return qlora__jin_format_value(m, value, text + spec, size - spec, out);
}

static qlora_result qlora__jin_format(qlora__jin_machine* m, qlora__jin_value format,
                                      const qlora__jin_args* args, qlora__jin_value* out) {
    const qlora__jin_string* s = format.as.string;
    qlora__jin_buffer buffer;
    size_t automatic = 0;
    memset(&buffer, 0, sizeof buffer);
    if (format.flag != 0) {
        return qlora__jin_fail(m, "format of a safe string is not supported");
    }
    for (size_t at = 0; at < s->bytes;) {
        char c = s->data[at];
        bool twice = at + 1 < s->bytes && s->data[at + 1] == c;
        if ((c == '{' || c == '}') && twice) {
            QLORA__TRY(qlora__jin_put(m, &buffer, &c, 1));
            at += 2;
        } else if (c == '{') {
            size_t close = qlora__jin_find_bytes(s->data, s->bytes, at, "}", 1);
            if (close == SIZE_MAX) {
                return qlora__jin_fail(m, "format: a { is not closed");
            }
            QLORA__TRY(qlora__jin_format_part(m, s->data + at + 1, close - at - 1, args, &automatic,
                                              &buffer));
            at = close + 1;
        } else if (c == '}') {
            return qlora__jin_fail(m, "format: a } without a {");
        } else {
            QLORA__TRY(qlora__jin_put(m, &buffer, &c, 1));
            at++;
        }
    }
    return qlora__jin_buffer_string(m, &buffer, out);
}

// ---- strftime_now

static const char* const qlora__jin_days[] = {"Sunday",   "Monday", "Tuesday", "Wednesday",
                                              "Thursday", "Friday", "Saturday"};
static const char* const qlora__jin_months[] = {"January",   "February", "March",    "April",
                                                "May",       "June",     "July",     "August",
                                                "September", "October",  "November", "December"};

typedef struct qlora__jin_date {
    int64_t year;
    int month; // from 1
    int day;
    int hour;
    int minute;
    int second;
    int weekday; // 0 is Sunday
    int yearday; // from 1
} qlora__jin_date;

// From seconds since 1970, without time zones: the clock is given in local time.
static void qlora__jin_date_of(int64_t clock, qlora__jin_date* d) {
    int64_t days = clock / 86400 - (clock % 86400 < 0 ? 1 : 0);
    int64_t seconds = clock - days * 86400;
    // days since 0000-03-01, so that a leap day is the last of its year
    int64_t shifted = days + 719468;
    int64_t era = (shifted >= 0 ? shifted : shifted - 146096) / 146097;
    int64_t of_era = shifted - era * 146097;
    int64_t year = (of_era - of_era / 1460 + of_era / 36524 - of_era / 146096) / 365;
    int64_t of_year = of_era - (365 * year + year / 4 - year / 100);
    int64_t shifted_month = (5 * of_year + 2) / 153;
    d->day = (int)(of_year - (153 * shifted_month + 2) / 5 + 1);
    d->month = (int)(shifted_month < 10 ? shifted_month + 3 : shifted_month - 9);
    d->year = year + era * 400 + (d->month <= 2 ? 1 : 0);
    d->hour = (int)(seconds / 3600);
    d->minute = (int)(seconds / 60 % 60);
    d->second = (int)(seconds % 60);
    d->weekday = (int)(((days + 4) % 7 + 7) % 7);
    bool leap = (d->year % 4 == 0 && d->year % 100 != 0) || d->year % 400 == 0;
    static const int before[] = {0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334};
    d->yearday = before[d->month - 1] + d->day + (leap && d->month > 2 ? 1 : 0);
}

// One letter of strftime in the C locale; NULL when it is not known. It is long because each letter
// is a case.
static const char* qlora__jin_date_part(const qlora__jin_date* d, char letter, char out[64]) {
    static const char* const repeated[] = {
        "D%m/%d/%y", "F%Y-%m-%d", "T%H:%M:%S",   "R%H:%M", "c%a %b %e %H:%M:%S %Y",
        "x%m/%d/%y", "X%H:%M:%S", "r%I:%M:%S %p"};
    int hour12 = d->hour % 12 == 0 ? 12 : d->hour % 12;
    switch (letter) {
    case 'Y':
        snprintf(out, 64, "%lld", (long long)d->year);
        return out;
    case 'y':
        snprintf(out, 64, "%02d", (int)(d->year % 100));
        return out;
    case 'm':
        snprintf(out, 64, "%02d", d->month);
        return out;
    case 'd':
        snprintf(out, 64, "%02d", d->day);
        return out;
    case 'e':
        snprintf(out, 64, "%2d", d->day);
        return out;
    case 'H':
        snprintf(out, 64, "%02d", d->hour);
        return out;
    case 'I':
        snprintf(out, 64, "%02d", hour12);
        return out;
    case 'l':
        snprintf(out, 64, "%2d", hour12);
        return out;
    case 'k':
        snprintf(out, 64, "%2d", d->hour);
        return out;
    case 'M':
        snprintf(out, 64, "%02d", d->minute);
        return out;
    case 'S':
        snprintf(out, 64, "%02d", d->second);
        return out;
    case 'f':
        return "000000";
    case 'p':
        return d->hour < 12 ? "AM" : "PM";
    case 'j':
        snprintf(out, 64, "%03d", d->yearday);
        return out;
    case 'w':
        snprintf(out, 64, "%d", d->weekday);
        return out;
    case 'u':
        snprintf(out, 64, "%d", d->weekday == 0 ? 7 : d->weekday);
        return out;
    case 'A':
        return qlora__jin_days[d->weekday];
    case 'B':
        return qlora__jin_months[d->month - 1];
    case 'a':
        snprintf(out, 64, "%.3s", qlora__jin_days[d->weekday]);
        return out;
    case 'b':
    case 'h':
        snprintf(out, 64, "%.3s", qlora__jin_months[d->month - 1]);
        return out;
    case 'Z':
    case 'z':
        return ""; // the clock has no time zone
    case 'n':
        return "\n";
    case 't':
        return "\t";
    case '%':
        return "%";
    default:
        break;
    }
    for (size_t i = 0; i < QLORA__TEXT_COUNT(repeated); i++) {
        if (repeated[i][0] == letter) {
            return repeated[i] + 1;
        }
    }
    return NULL;
}

static qlora_result qlora__jin_strftime(qlora__jin_machine* m, const char* format, size_t size,
                                        bool inside, qlora__jin_buffer* out) {
    qlora__jin_date date;
    qlora__jin_date_of(m->clock, &date);
    for (size_t i = 0; i < size; i++) {
        char text[64];
        if (format[i] != '%' || i + 1 == size) {
            QLORA__TRY(qlora__jin_put(m, out, format + i, 1));
            continue;
        }
        char letter = format[++i];
        bool unpadded = letter == '-' && i + 1 < size; // %-d: without the zero
        letter = unpadded ? format[++i] : letter;
        const char* part = qlora__jin_date_part(&date, letter, text);
        if (part == NULL) {
            return qlora__jin_fail(m, "strftime_now: %%%c is not supported", letter);
        }
        if (unpadded) {
            while ((*part == '0' || *part == ' ') && part[1] != '\0') {
                part++;
            }
        }
        bool nested = strchr(part, '%') != NULL && letter != '%' && !inside;
        QLORA__TRY(nested ? qlora__jin_strftime(m, part, strlen(part), true, out)
                          : qlora__jin_puts(m, out, part));
    }
    return QLORA_OK;
}

//@@ src/text/jinja_strings.h

// What strings can do: the parts of Python's str that templates use.

// ---- arguments ----------------------------------------------------------------------------------

// Puts the arguments of a call in the order of `names` ("sep maxsplit"; with a slash at the start,
// keywords are not allowed). What is not given is MISSING.
static qlora_result qlora__jin_bind_args(qlora__jin_machine* m, const char* what, const char* names,
                                         size_t required, const qlora__jin_args* args,
                                         qlora__jin_value* out) {
    bool keywords = names[0] != '/';
    const char* at = names + (keywords ? 0 : 1);
    size_t count = 0;
    size_t taken = 0;
    while (*at != '\0') {
        size_t size = strcspn(at, " ");
        out[count] = qlora__jin_of(QLORA__JIN_MISSING);
        if (count < args->positional) {
            out[count] = args->items[count];
        }
        for (size_t i = 0; i < args->named && keywords; i++) {
            if (args->names[i]->bytes == size && memcmp(args->names[i]->data, at, size) == 0) {
                if (count < args->positional) {
                    return qlora__jin_fail(m, "%s: the argument \"%.*s\" is given twice", what,
                                           (int)size, at);
                }
                out[count] = args->items[args->positional + i];
                taken++;
            }
        }
        if (out[count].kind == QLORA__JIN_MISSING && count < required) {
            return qlora__jin_fail(m, "%s: the argument \"%.*s\" is missing", what, (int)size, at);
        }
        count++;
        at += size + (at[size] == ' ' ? 1 : 0);
    }
    if (args->positional > count) {
        return qlora__jin_fail(m, "%s: %llu arguments are given, at most %llu are possible", what,
                               (unsigned long long)args->positional, (unsigned long long)count);
    }
    if (taken < args->named) {
        return qlora__jin_fail(m, "%s: an argument is given by a name that is unknown", what);
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_need_string(qlora__jin_machine* m, const char* what,
                                           qlora__jin_value v) {
    if (v.kind == QLORA__JIN_STRING) {
        return QLORA_OK;
    }
    return v.kind == QLORA__JIN_UNDEFINED
               ? qlora__jin_undefined_error(m, v)
               : qlora__jin_fail(m, "%s: a string is needed, not a %s", what, qlora__jin_type(v));
}

static qlora_result qlora__jin_need_integer(qlora__jin_machine* m, const char* what,
                                            qlora__jin_value v, int64_t* out) {
    if (v.kind == QLORA__JIN_MISSING) {
        return QLORA_OK; // the default stays
    }
    if (!qlora__jin_is_integer(v)) {
        return v.kind == QLORA__JIN_UNDEFINED
                   ? qlora__jin_undefined_error(m, v)
                   : qlora__jin_fail(m, "%s: a whole number is needed, not a %s", what,
                                     qlora__jin_type(v));
    }
    *out = qlora__jin_integer_of(v);
    return QLORA_OK;
}

// A part of a string that shares its memory and stays Markup.
static qlora_result qlora__jin_part(qlora__jin_machine* m, qlora__jin_value s, size_t begin,
                                    size_t end, qlora__jin_value* out) {
    qlora__jin_value whole = s;
    QLORA__TRY(qlora__jin_string_share(m, whole.as.string->data + begin, end - begin, out));
    out->flag = whole.flag;
    return QLORA_OK;
}

// ---- case ---------------------------------------------------------------------------------------

static bool qlora__jin_is_cased(uint32_t code) {
    uint32_t kind = qlora__jin_class(code);
    return kind == QLORA__TEXT_C_UPPER || kind == QLORA__TEXT_C_LOWER;
}

// A capital sigma at the end of a word has a lower case of its own.
static bool qlora__jin_final_sigma(const qlora__jin_string* s, size_t at) {
    size_t step = 0;
    size_t before = at;
    do {
        if (before == 0) {
            return false;
        }
        before--;
        while (before > 0 && ((unsigned char)s->data[before] & 0xC0) == 0x80) {
            before--;
        }
    } while (qlora__jin_class(qlora__jin_code_at(s->data, s->bytes, before, &step)) ==
             QLORA__TEXT_C_MARK);
    if (!qlora__jin_is_cased(qlora__jin_code_at(s->data, s->bytes, before, &step))) {
        return false;
    }
    size_t after = at + 2;
    return after >= s->bytes ||
           !qlora__jin_is_cased(qlora__jin_code_at(s->data, s->bytes, after, &step));
}

static qlora_result qlora__jin_put_case(qlora__jin_machine* m, const qlora__jin_string* s,
                                        size_t at, uint32_t code, qlora__text_case to,
                                        qlora__jin_buffer* out) {
    uint32_t codes[3];
    if (code == 0x3A3 && to == QLORA__TEXT_LOWER_CASE) {
        return qlora__jin_put_code(m, out, qlora__jin_final_sigma(s, at) ? 0x3C2 : 0x3C3);
    }
    size_t count = qlora__text_case_of(code, to, codes);
    for (size_t i = 0; i < count; i++) {
        QLORA__TRY(qlora__jin_put_code(m, out, codes[i]));
    }
    return QLORA_OK;
}

// How the case of each character is chosen.
enum {
    QLORA__JIN_ALL_LOWER,
    QLORA__JIN_ALL_UPPER,
    QLORA__JIN_SWAP,
    QLORA__JIN_FIRST,     // capitalize()
    QLORA__JIN_EACH_WORD, // title()
    QLORA__JIN_TITLE_FILTER
};

static qlora_result qlora__jin_recase(qlora__jin_machine* m, qlora__jin_value v, int how,
                                      qlora__jin_value* out) {
    const qlora__jin_string* s = v.as.string;
    qlora__jin_buffer buffer;
    bool inside = false; // of a word
    memset(&buffer, 0, sizeof buffer);
    QLORA__TRY(qlora__jin_work(m, s->bytes / 8));
    QLORA__TRY(qlora__jin_buffer_room(m, &buffer, s->bytes));
    for (size_t at = 0, step = 0; at < s->bytes; at += step) {
        uint32_t code = qlora__jin_code_at(s->data, s->bytes, at, &step);
        qlora__text_case to = QLORA__TEXT_LOWER_CASE;
        if (how == QLORA__JIN_ALL_UPPER) {
            to = QLORA__TEXT_UPPER_CASE;
        } else if (how == QLORA__JIN_SWAP) {
            to = qlora__jin_class(code) == QLORA__TEXT_C_UPPER ? QLORA__TEXT_LOWER_CASE
                                                               : QLORA__TEXT_UPPER_CASE;
        } else if (how == QLORA__JIN_FIRST) {
            to = at == 0 ? QLORA__TEXT_TITLE_CASE : QLORA__TEXT_LOWER_CASE;
        } else if (how == QLORA__JIN_EACH_WORD) {
            to = inside ? QLORA__TEXT_LOWER_CASE : QLORA__TEXT_TITLE_CASE;
            inside = qlora__jin_is_cased(code);
        } else if (how == QLORA__JIN_TITLE_FILTER) {
            bool border = qlora__jin_is_space(code) ||
                          (code < 0x80 && code > 0 && strchr("-({[<", (char)code) != NULL);
            to = inside && !border ? QLORA__TEXT_LOWER_CASE : QLORA__TEXT_UPPER_CASE;
            inside = !border;
        }
        QLORA__TRY(qlora__jin_put_case(m, s, at, code, to, &buffer));
    }
    QLORA__TRY(qlora__jin_buffer_string(m, &buffer, out));
    out->flag = v.flag;
    return QLORA_OK;
}

#define QLORA__JIN_RECASE(name, how)                                                               \
    static qlora_result qlora__jin_str_##name(qlora__jin_machine* m, qlora__jin_value* in,         \
                                              qlora__jin_value* out) {                             \
        return qlora__jin_recase(m, in[0], how, out);                                              \
    }
QLORA__JIN_RECASE(lower, QLORA__JIN_ALL_LOWER)
QLORA__JIN_RECASE(upper, QLORA__JIN_ALL_UPPER)
QLORA__JIN_RECASE(swapcase, QLORA__JIN_SWAP)
QLORA__JIN_RECASE(capitalize, QLORA__JIN_FIRST)
QLORA__JIN_RECASE(title, QLORA__JIN_EACH_WORD)

// ---- strip --------------------------------------------------------------------------------------

// Whether the character is to be stripped: one of `set`, or whitespace.
static bool qlora__jin_strips(const qlora__jin_string* set, const char* data, size_t size,
                              uint32_t code) {
    return set == NULL ? qlora__jin_is_space(code)
                       : qlora__jin_find_bytes(set->data, set->bytes, 0, data, size) != SIZE_MAX;
}

static qlora_result qlora__jin_strip(qlora__jin_machine* m, qlora__jin_value v,
                                     qlora__jin_value chars, bool left, bool right,
                                     qlora__jin_value* out) {
    const qlora__jin_string* s = v.as.string;
    size_t begin = 0;
    size_t end = s->bytes;
    bool given = chars.kind != QLORA__JIN_MISSING && chars.kind != QLORA__JIN_NONE;
    if (given) {
        QLORA__TRY(qlora__jin_need_string(m, "strip", chars));
    }
    const qlora__jin_string* set = given ? chars.as.string : NULL;
    QLORA__TRY(qlora__jin_work(m, s->bytes / 32));
    while (left && begin < end) {
        size_t step = 0;
        uint32_t code = qlora__jin_code_at(s->data, end, begin, &step);
        if (!qlora__jin_strips(set, s->data + begin, step, code)) {
            break;
        }
        begin += step;
    }
    while (right && end > begin) {
        size_t step = 0;
        size_t at = end - 1;
        while (at > begin && ((unsigned char)s->data[at] & 0xC0) == 0x80) {
            at--;
        }
        uint32_t code = qlora__jin_code_at(s->data, end, at, &step);
        if (!qlora__jin_strips(set, s->data + at, step, code)) {
            break;
        }
        end = at;
    }
    return qlora__jin_part(m, v, begin, end, out);
}

static qlora_result qlora__jin_str_strip(qlora__jin_machine* m, qlora__jin_value* in,
                                         qlora__jin_value* out) {
    return qlora__jin_strip(m, in[0], in[1], true, true, out);
}

static qlora_result qlora__jin_str_lstrip(qlora__jin_machine* m, qlora__jin_value* in,
                                          qlora__jin_value* out) {
    return qlora__jin_strip(m, in[0], in[1], true, false, out);
}

static qlora_result qlora__jin_str_rstrip(qlora__jin_machine* m, qlora__jin_value* in,
                                          qlora__jin_value* out) {
    return qlora__jin_strip(m, in[0], in[1], false, true, out);
}

// ---- split --------------------------------------------------------------------------------------

static qlora_result qlora__jin_add_part(qlora__jin_machine* m, qlora__jin_value v, size_t begin,
                                        size_t end, qlora__jin_value* list) {
    qlora__jin_value part;
    QLORA__TRY(qlora__jin_part(m, v, begin, end, &part));
    return qlora__jin_list_add(m, list->as.list, part);
}

static qlora_result qlora__jin_split_space(qlora__jin_machine* m, qlora__jin_value v, int64_t limit,
                                           qlora__jin_value* out) {
    const qlora__jin_string* s = v.as.string;
    size_t at = qlora__jin_skip_space(s->data, s->bytes, 0);
    int64_t done = 0;
    while (at < s->bytes) {
        size_t end = at;
        size_t step = 0;
        if (limit >= 0 && done == limit) {
            return qlora__jin_add_part(m, v, at, qlora__jin_back_space(s->data, at, s->bytes), out);
        }
        while (end < s->bytes &&
               !qlora__jin_is_space(qlora__jin_code_at(s->data, s->bytes, end, &step))) {
            end += step;
        }
        QLORA__TRY(qlora__jin_add_part(m, v, at, end, out));
        at = qlora__jin_skip_space(s->data, s->bytes, end);
        done++;
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_split(qlora__jin_machine* m, qlora__jin_value v,
                                     qlora__jin_value separator, int64_t limit,
                                     qlora__jin_value* out) {
    const qlora__jin_string* s = v.as.string;
    QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_LIST, 4, out));
    QLORA__TRY(qlora__jin_work(m, s->bytes / 16));
    if (separator.kind == QLORA__JIN_MISSING || separator.kind == QLORA__JIN_NONE) {
        return qlora__jin_split_space(m, v, limit, out);
    }
    QLORA__TRY(qlora__jin_need_string(m, "split", separator));
    const qlora__jin_string* by = separator.as.string;
    if (by->bytes == 0) {
        return qlora__jin_fail(m, "split: the separator is empty");
    }
    size_t at = 0;
    for (int64_t done = 0; limit < 0 || done < limit; done++) {
        size_t hit = qlora__jin_find_bytes(s->data, s->bytes, at, by->data, by->bytes);
        if (hit == SIZE_MAX) {
            break;
        }
        QLORA__TRY(qlora__jin_add_part(m, v, at, hit, out));
        at = hit + by->bytes;
    }
    return qlora__jin_add_part(m, v, at, s->bytes, out);
}

// The last place of `part` in s[begin..end), in bytes; SIZE_MAX when it is not there.
static size_t qlora__jin_rfind_bytes(const char* data, size_t begin, size_t end, const char* part,
                                     size_t length) {
    if (length > end - begin) {
        return SIZE_MAX;
    }
    for (size_t at = end - length + 1; at > begin; at--) {
        if (length == 0 || memcmp(data + at - 1, part, length) == 0) {
            return at - 1;
        }
    }
    return SIZE_MAX;
}

static void qlora__jin_reverse(qlora__jin_list* list) {
    for (size_t i = 0; i < list->count / 2; i++) {
        qlora__jin_value swap = list->items[i];
        list->items[i] = list->items[list->count - 1 - i];
        list->items[list->count - 1 - i] = swap;
    }
}

static qlora_result qlora__jin_rsplit(qlora__jin_machine* m, qlora__jin_value v,
                                      qlora__jin_value separator, int64_t limit,
                                      qlora__jin_value* out) {
    const qlora__jin_string* s = v.as.string;
    bool space = separator.kind == QLORA__JIN_MISSING || separator.kind == QLORA__JIN_NONE;
    if (limit < 0) {
        return qlora__jin_split(m, v, separator, limit, out);
    }
    QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_LIST, 4, out));
    QLORA__TRY(qlora__jin_work(m, s->bytes / 16));
    if (!space) {
        QLORA__TRY(qlora__jin_need_string(m, "rsplit", separator));
        if (separator.as.string->bytes == 0) {
            return qlora__jin_fail(m, "rsplit: the separator is empty");
        }
    }
    size_t end = space ? qlora__jin_back_space(s->data, 0, s->bytes) : s->bytes;
    for (int64_t done = 0; done < limit && (!space || end > 0); done++) {
        size_t hit = end;
        size_t next = 0;
        if (space) {
            while (hit > 0 && qlora__jin_back_space(s->data, 0, hit) == hit) {
                hit--;
                while (hit > 0 && ((unsigned char)s->data[hit] & 0xC0) == 0x80) {
                    hit--;
                }
            }
            next = qlora__jin_back_space(s->data, 0, hit);
            QLORA__TRY(qlora__jin_add_part(m, v, hit, end, out));
            end = next;
            continue;
        }
        const qlora__jin_string* by = separator.as.string;
        hit = qlora__jin_rfind_bytes(s->data, 0, end, by->data, by->bytes);
        if (hit == SIZE_MAX) {
            break;
        }
        QLORA__TRY(qlora__jin_add_part(m, v, hit + by->bytes, end, out));
        end = hit;
    }
    if (!space || end > 0) {
        size_t begin = space ? qlora__jin_skip_space(s->data, end, 0) : 0;
        QLORA__TRY(qlora__jin_add_part(m, v, begin, end, out));
    }
    qlora__jin_reverse(out->as.list);
    return QLORA_OK;
}

static qlora_result qlora__jin_str_split(qlora__jin_machine* m, qlora__jin_value* in,
                                         qlora__jin_value* out) {
    int64_t limit = -1;
    QLORA__TRY(qlora__jin_need_integer(m, "split", in[2], &limit));
    return qlora__jin_split(m, in[0], in[1], limit, out);
}

static qlora_result qlora__jin_str_rsplit(qlora__jin_machine* m, qlora__jin_value* in,
                                          qlora__jin_value* out) {
    int64_t limit = -1;
    QLORA__TRY(qlora__jin_need_integer(m, "rsplit", in[2], &limit));
    return qlora__jin_rsplit(m, in[0], in[1], limit, out);
}

static bool qlora__jin_is_line_end(uint32_t code) {
    return (code >= 10 && code <= 13) || (code >= 0x1C && code <= 0x1E) || code == 0x85 ||
           code == 0x2028 || code == 0x2029;
}

static qlora_result qlora__jin_str_splitlines(qlora__jin_machine* m, qlora__jin_value* in,
                                              qlora__jin_value* out) {
    const qlora__jin_string* s = in[0].as.string;
    bool keep = qlora__jin_truth(in[1]);
    size_t begin = 0;
    QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_LIST, 4, out));
    QLORA__TRY(qlora__jin_work(m, s->bytes / 16));
    for (size_t at = 0, step = 0; at < s->bytes; at += step) {
        uint32_t code = qlora__jin_code_at(s->data, s->bytes, at, &step);
        if (qlora__jin_is_line_end(code)) {
            bool two = code == '\r' && at + 1 < s->bytes && s->data[at + 1] == '\n';
            step += two ? 1 : 0;
            QLORA__TRY(qlora__jin_add_part(m, in[0], begin, keep ? at + step : at, out));
            begin = at + step;
        }
    }
    return begin < s->bytes ? qlora__jin_add_part(m, in[0], begin, s->bytes, out) : QLORA_OK;
}

static qlora_result qlora__jin_partition(qlora__jin_machine* m, qlora__jin_value* in, bool last,
                                         qlora__jin_value* out) {
    const qlora__jin_string* s = in[0].as.string;
    QLORA__TRY(qlora__jin_need_string(m, "partition", in[1]));
    const qlora__jin_string* by = in[1].as.string;
    if (by->bytes == 0) {
        return qlora__jin_fail(m, "partition: the separator is empty");
    }
    QLORA__TRY(qlora__jin_work(m, s->bytes / 16));
    size_t hit = last ? qlora__jin_rfind_bytes(s->data, 0, s->bytes, by->data, by->bytes)
                      : qlora__jin_find_bytes(s->data, s->bytes, 0, by->data, by->bytes);
    size_t first = hit != SIZE_MAX ? hit : last ? 0 : s->bytes;
    size_t second = hit != SIZE_MAX ? hit + by->bytes : first;
    QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_TUPLE, 3, out));
    QLORA__TRY(qlora__jin_add_part(m, in[0], 0, first, out));
    QLORA__TRY(qlora__jin_add_part(m, in[0], first, second, out));
    return qlora__jin_add_part(m, in[0], second, s->bytes, out);
}

static qlora_result qlora__jin_str_partition(qlora__jin_machine* m, qlora__jin_value* in,
                                             qlora__jin_value* out) {
    return qlora__jin_partition(m, in, false, out);
}

static qlora_result qlora__jin_str_rpartition(qlora__jin_machine* m, qlora__jin_value* in,
                                              qlora__jin_value* out) {
    return qlora__jin_partition(m, in, true, out);
}

// ---- searching ----------------------------------------------------------------------------------

// s[start:end] of find, count, startswith: in bytes. False when start is behind the end.
static qlora_result qlora__jin_limits(qlora__jin_machine* m, qlora__jin_value* in, size_t* begin,
                                      size_t* end, bool* valid) {
    const qlora__jin_string* s = in[0].as.string;
    int64_t count = (int64_t)s->chars;
    int64_t from = 0;
    int64_t to = count;
    if (in[2].kind != QLORA__JIN_NONE) {
        QLORA__TRY(qlora__jin_need_integer(m, "start", in[2], &from));
    }
    if (in[3].kind != QLORA__JIN_NONE) {
        QLORA__TRY(qlora__jin_need_integer(m, "end", in[3], &to));
    }
    QLORA__TRY(qlora__jin_work(m, s->bytes / 16));
    from += from < 0 ? count : 0;
    to += to < 0 ? count : 0;
    from = from < 0 ? 0 : from;
    to = to < 0 ? 0 : to > count ? count : to;
    *valid = from <= to;
    *begin = *valid ? qlora__jin_byte_of(s, (size_t)from) : 0;
    *end = *valid ? qlora__jin_byte_of(s, (size_t)to) : 0;
    return QLORA_OK;
}

// The index in characters, or -1.
static qlora_result qlora__jin_find(qlora__jin_machine* m, qlora__jin_value* in, bool last,
                                    int64_t* out) {
    const qlora__jin_string* s = in[0].as.string;
    size_t begin = 0;
    size_t end = 0;
    bool valid = false;
    QLORA__TRY(qlora__jin_need_string(m, "find", in[1]));
    QLORA__TRY(qlora__jin_limits(m, in, &begin, &end, &valid));
    const qlora__jin_string* part = in[1].as.string;
    size_t hit = !valid ? SIZE_MAX
                 : last ? qlora__jin_rfind_bytes(s->data, begin, end, part->data, part->bytes)
                        : qlora__jin_find_bytes(s->data, end, begin, part->data, part->bytes);
    *out = hit == SIZE_MAX ? -1 : (int64_t)qlora__jin_count_chars(s->data, hit);
    return QLORA_OK;
}

#define QLORA__JIN_FIND(name, last, must)                                                          \
    static qlora_result qlora__jin_str_##name(qlora__jin_machine* m, qlora__jin_value* in,         \
                                              qlora__jin_value* out) {                             \
        int64_t at = 0;                                                                            \
        QLORA__TRY(qlora__jin_find(m, in, last, &at));                                             \
        *out = qlora__jin_int(at);                                                                 \
        return at >= 0 || !(must) ? QLORA_OK : qlora__jin_fail(m, "the text is not found");        \
    }
QLORA__JIN_FIND(find, false, false)
QLORA__JIN_FIND(rfind, true, false)
QLORA__JIN_FIND(index, false, true)
QLORA__JIN_FIND(rindex, true, true)

static qlora_result qlora__jin_str_count(qlora__jin_machine* m, qlora__jin_value* in,
                                         qlora__jin_value* out) {
    const qlora__jin_string* s = in[0].as.string;
    size_t begin = 0;
    size_t end = 0;
    bool valid = false;
    int64_t count = 0;
    QLORA__TRY(qlora__jin_need_string(m, "count", in[1]));
    QLORA__TRY(qlora__jin_limits(m, in, &begin, &end, &valid));
    const qlora__jin_string* part = in[1].as.string;
    if (part->bytes == 0) {
        *out = qlora__jin_int(
            valid ? (int64_t)qlora__jin_count_chars(s->data + begin, end - begin) + 1 : 0);
        return QLORA_OK;
    }
    while (valid && (begin = qlora__jin_find_bytes(s->data, end, begin, part->data, part->bytes)) !=
                        SIZE_MAX) {
        QLORA__TRY(qlora__jin_work(m, 1));
        begin += part->bytes;
        count++;
    }
    *out = qlora__jin_int(count);
    return QLORA_OK;
}

// startswith or endswith, for one string or a tuple of them
static qlora_result qlora__jin_edge(qlora__jin_machine* m, qlora__jin_value* in, bool end_wanted,
                                    qlora__jin_value* out) {
    const qlora__jin_string* s = in[0].as.string;
    size_t begin = 0;
    size_t end = 0;
    bool valid = false;
    bool found = false;
    QLORA__TRY(qlora__jin_limits(m, in, &begin, &end, &valid));
    bool many = in[1].kind == QLORA__JIN_TUPLE;
    size_t count = many ? in[1].as.list->count : 1;
    for (size_t i = 0; i < count; i++) {
        qlora__jin_value part = many ? in[1].as.list->items[i] : in[1];
        QLORA__TRY(qlora__jin_need_string(m, "startswith or endswith", part));
        size_t size = part.as.string->bytes;
        size_t at = end_wanted ? end - size : begin;
        found = found || (valid && size <= end - begin &&
                          (size == 0 || memcmp(s->data + at, part.as.string->data, size) == 0));
    }
    *out = qlora__jin_bool(found);
    return QLORA_OK;
}

static qlora_result qlora__jin_str_startswith(qlora__jin_machine* m, qlora__jin_value* in,
                                              qlora__jin_value* out) {
    return qlora__jin_edge(m, in, false, out);
}

static qlora_result qlora__jin_str_endswith(qlora__jin_machine* m, qlora__jin_value* in,
                                            qlora__jin_value* out) {
    return qlora__jin_edge(m, in, true, out);
}

static qlora_result qlora__jin_str_removeprefix(qlora__jin_machine* m, qlora__jin_value* in,
                                                qlora__jin_value* out) {
    const qlora__jin_string* s = in[0].as.string;
    QLORA__TRY(qlora__jin_need_string(m, "removeprefix", in[1]));
    size_t size = in[1].as.string->bytes;
    bool there = size <= s->bytes && size > 0 && memcmp(s->data, in[1].as.string->data, size) == 0;
    return qlora__jin_part(m, in[0], there ? size : 0, s->bytes, out);
}

static qlora_result qlora__jin_str_removesuffix(qlora__jin_machine* m, qlora__jin_value* in,
                                                qlora__jin_value* out) {
    const qlora__jin_string* s = in[0].as.string;
    QLORA__TRY(qlora__jin_need_string(m, "removesuffix", in[1]));
    size_t size = in[1].as.string->bytes;
    bool there = size <= s->bytes && size > 0 &&
                 memcmp(s->data + s->bytes - size, in[1].as.string->data, size) == 0;
    return qlora__jin_part(m, in[0], 0, there ? s->bytes - size : s->bytes, out);
}

static qlora_result qlora__jin_replace(qlora__jin_machine* m, qlora__jin_value v,
                                       const qlora__jin_string* from, const qlora__jin_string* to,
                                       int64_t limit, qlora__jin_value* out) {
    const qlora__jin_string* s = v.as.string;
    qlora__jin_buffer buffer;
    size_t at = 0;
    memset(&buffer, 0, sizeof buffer);
    QLORA__TRY(qlora__jin_work(m, s->bytes / 16));
    for (int64_t done = 0; limit < 0 || done < limit; done++) {
        size_t hit = qlora__jin_find_bytes(s->data, s->bytes, at, from->data, from->bytes);
        if (hit == SIZE_MAX) {
            break;
        }
        QLORA__TRY(qlora__jin_work(m, 1));
        QLORA__TRY(qlora__jin_put(m, &buffer, s->data + at, hit - at));
        QLORA__TRY(qlora__jin_put(m, &buffer, to->data, to->bytes));
        at = hit + from->bytes;
        if (from->bytes == 0) { // between all characters, and at both ends
            size_t step = 0;
            if (at >= s->bytes) {
                break;
            }
            qlora__jin_code_at(s->data, s->bytes, at, &step);
            QLORA__TRY(qlora__jin_put(m, &buffer, s->data + at, step));
            at += step;
        }
    }
    QLORA__TRY(qlora__jin_put(m, &buffer, s->data + at, s->bytes - at));
    QLORA__TRY(qlora__jin_buffer_string(m, &buffer, out));
    out->flag = v.flag;
    return QLORA_OK;
}

static qlora_result qlora__jin_str_replace(qlora__jin_machine* m, qlora__jin_value* in,
                                           qlora__jin_value* out) {
    int64_t limit = -1;
    QLORA__TRY(qlora__jin_need_string(m, "replace", in[1]));
    QLORA__TRY(qlora__jin_need_string(m, "replace", in[2]));
    QLORA__TRY(qlora__jin_need_integer(m, "replace", in[3], &limit));
    qlora__jin_value to = in[2];
    if (in[0].flag != 0) {
        qlora__jin_buffer escaped;
        memset(&escaped, 0, sizeof escaped);
        QLORA__TRY(qlora__jin_escape_html(m, to, &escaped));
        QLORA__TRY(qlora__jin_buffer_string(m, &escaped, &to));
    }
    return qlora__jin_replace(m, in[0], in[1].as.string, to.as.string, limit, out);
}

//@@ src/text/jinja_methods.h

// The methods of all kinds of values, and what the sandbox does not allow.

static qlora_result qlora__jin_str_join(qlora__jin_machine* m, qlora__jin_value* in,
                                        qlora__jin_value* out) {
    qlora__jin_buffer buffer;
    qlora__jin_iter* iter = NULL;
    qlora__jin_value item;
    bool more = true;
    memset(&buffer, 0, sizeof buffer);
    QLORA__TRY(qlora__jin_iter_make(m, in[1], &iter));
    for (size_t i = 0;; i++) {
        QLORA__TRY(m->hooks->next(m, iter, &item, &more));
        if (!more) {
            break;
        }
        if (item.kind != QLORA__JIN_STRING) {
            return qlora__jin_fail(m, "join: element %llu is a %s, not a string",
                                   (unsigned long long)i, qlora__jin_type(item));
        }
        QLORA__TRY(i > 0 ? qlora__jin_print(m, in[0], &buffer) : QLORA_OK);
        QLORA__TRY(in[0].flag != 0 ? qlora__jin_escape_html(m, item, &buffer)
                                   : qlora__jin_print(m, item, &buffer));
    }
    QLORA__TRY(qlora__jin_buffer_string(m, &buffer, out));
    out->flag = in[0].flag;
    return QLORA_OK;
}

static qlora_result qlora__jin_justify(qlora__jin_machine* m, qlora__jin_value* in, char align,
                                       qlora__jin_value* out) {
    qlora__jin_spec spec;
    qlora__jin_buffer buffer;
    memset(&spec, 0, sizeof spec);
    memset(&buffer, 0, sizeof buffer);
    spec.fill = ' ';
    QLORA__TRY(qlora__jin_need_integer(m, "width", in[1], &spec.width));
    if (in[2].kind != QLORA__JIN_MISSING) {
        size_t step = 0;
        QLORA__TRY(qlora__jin_need_string(m, "fill", in[2]));
        if (in[2].as.string->chars != 1) {
            return qlora__jin_fail(m, "the fill must be one character");
        }
        spec.fill = qlora__jin_code_at(in[2].as.string->data, in[2].as.string->bytes, 0, &step);
    }
    int64_t room = spec.width - (int64_t)in[0].as.string->chars;
    // Python's center puts the odd space to the left when the width is odd
    if (align == '^' && room > 0 && room % 2 != 0 && spec.width % 2 != 0) {
        QLORA__TRY(qlora__jin_put_code(m, &buffer, spec.fill));
        spec.width--;
    }
    QLORA__TRY(
        qlora__jin_pad(m, in[0].as.string->data, in[0].as.string->bytes, &spec, align, &buffer));
    QLORA__TRY(qlora__jin_buffer_string(m, &buffer, out));
    out->flag = in[0].flag;
    return QLORA_OK;
}

static qlora_result qlora__jin_str_center(qlora__jin_machine* m, qlora__jin_value* in,
                                          qlora__jin_value* out) {
    return qlora__jin_justify(m, in, '^', out);
}

static qlora_result qlora__jin_str_ljust(qlora__jin_machine* m, qlora__jin_value* in,
                                         qlora__jin_value* out) {
    return qlora__jin_justify(m, in, '<', out);
}

static qlora_result qlora__jin_str_rjust(qlora__jin_machine* m, qlora__jin_value* in,
                                         qlora__jin_value* out) {
    return qlora__jin_justify(m, in, '>', out);
}

static qlora_result qlora__jin_str_zfill(qlora__jin_machine* m, qlora__jin_value* in,
                                         qlora__jin_value* out) {
    const qlora__jin_string* s = in[0].as.string;
    qlora__jin_spec spec;
    qlora__jin_buffer buffer;
    memset(&spec, 0, sizeof spec);
    memset(&buffer, 0, sizeof buffer);
    spec.fill = '0';
    QLORA__TRY(qlora__jin_need_integer(m, "zfill", in[1], &spec.width));
    size_t sign = s->bytes > 0 && (s->data[0] == '-' || s->data[0] == '+') ? 1 : 0;
    QLORA__TRY(qlora__jin_put(m, &buffer, s->data, sign));
    spec.width -= (int64_t)sign;
    QLORA__TRY(qlora__jin_pad(m, s->data + sign, s->bytes - sign, &spec, '>', &buffer));
    return qlora__jin_buffer_string(m, &buffer, out);
}

static qlora_result qlora__jin_str_expandtabs(qlora__jin_machine* m, qlora__jin_value* in,
                                              qlora__jin_value* out) {
    const qlora__jin_string* s = in[0].as.string;
    qlora__jin_buffer buffer;
    int64_t size = 8;
    int64_t column = 0;
    memset(&buffer, 0, sizeof buffer);
    QLORA__TRY(qlora__jin_need_integer(m, "expandtabs", in[1], &size));
    for (size_t at = 0, step = 0; at < s->bytes; at += step) {
        uint32_t code = qlora__jin_code_at(s->data, s->bytes, at, &step);
        if (code != '\t') {
            column = code == '\n' || code == '\r' ? 0 : column + 1;
            QLORA__TRY(qlora__jin_put(m, &buffer, s->data + at, step));
            continue;
        }
        for (int64_t n = size > 0 ? size - column % size : 0; n > 0; n--) {
            QLORA__TRY(qlora__jin_work(m, 1));
            QLORA__TRY(qlora__jin_put(m, &buffer, " ", 1));
            column++;
        }
    }
    return qlora__jin_buffer_string(m, &buffer, out);
}

// ---- questions about characters

static bool qlora__jin_is_decimal(uint32_t code) {
    return qlora__text_digit_in(qlora__text_decimal_runs,
                                QLORA__TEXT_COUNT(qlora__text_decimal_runs), code);
}

static bool qlora__jin_is_digit(uint32_t code) {
    return qlora__text_digit_in(qlora__text_digit_runs, QLORA__TEXT_COUNT(qlora__text_digit_runs),
                                code);
}

static bool qlora__jin_is_numeric(uint32_t code) {
    return qlora__text_digit_in(qlora__text_numeric_runs,
                                QLORA__TEXT_COUNT(qlora__text_numeric_runs), code);
}

static bool qlora__jin_is_alpha(uint32_t code) {
    return (1u << qlora__jin_class(code) & QLORA__TEXT_L) != 0;
}

static bool qlora__jin_is_alnum(uint32_t code) {
    return qlora__jin_is_alpha(code) || qlora__jin_is_numeric(code);
}

static bool qlora__jin_is_ascii(uint32_t code) {
    return code < 0x80;
}

// Whether all characters pass, and how many there are.
static qlora_result qlora__jin_all(qlora__jin_machine* m, const qlora__jin_string* s,
                                   bool (*test)(uint32_t), bool empty, qlora__jin_value* out) {
    bool all = s->bytes > 0 || empty;
    QLORA__TRY(qlora__jin_work(m, s->bytes / 8));
    for (size_t at = 0, step = 0; at < s->bytes && all; at += step) {
        all = test(qlora__jin_code_at(s->data, s->bytes, at, &step));
    }
    *out = qlora__jin_bool(all);
    return QLORA_OK;
}

#define QLORA__JIN_ALL(name, test, empty)                                                          \
    static qlora_result qlora__jin_str_##name(qlora__jin_machine* m, qlora__jin_value* in,         \
                                              qlora__jin_value* out) {                             \
        return qlora__jin_all(m, in[0].as.string, test, empty, out);                               \
    }
QLORA__JIN_ALL(isalpha, qlora__jin_is_alpha, false)
QLORA__JIN_ALL(isalnum, qlora__jin_is_alnum, false)
QLORA__JIN_ALL(isascii, qlora__jin_is_ascii, true)
QLORA__JIN_ALL(isdecimal, qlora__jin_is_decimal, false)
QLORA__JIN_ALL(isdigit, qlora__jin_is_digit, false)
QLORA__JIN_ALL(isnumeric, qlora__jin_is_numeric, false)
QLORA__JIN_ALL(isspace, qlora__jin_is_space, false)
QLORA__JIN_ALL(isprintable, qlora__jin_is_printable, true)

// Whether there are cased characters and all of them are of this class.
static qlora_result qlora__jin_all_case(qlora__jin_machine* m, const qlora__jin_string* s,
                                        uint32_t kind, bool* out) {
    bool any = false;
    bool all = true;
    QLORA__TRY(qlora__jin_work(m, s->bytes / 8));
    for (size_t at = 0, step = 0; at < s->bytes && all; at += step) {
        uint32_t code = qlora__jin_code_at(s->data, s->bytes, at, &step);
        bool cased = qlora__jin_is_cased(code);
        any = any || cased;
        all = !cased || qlora__jin_class(code) == kind;
    }
    *out = any && all;
    return QLORA_OK;
}

static qlora_result qlora__jin_str_isupper(qlora__jin_machine* m, qlora__jin_value* in,
                                           qlora__jin_value* out) {
    bool is = false;
    QLORA__TRY(qlora__jin_all_case(m, in[0].as.string, QLORA__TEXT_C_UPPER, &is));
    *out = qlora__jin_bool(is);
    return QLORA_OK;
}

static qlora_result qlora__jin_str_islower(qlora__jin_machine* m, qlora__jin_value* in,
                                           qlora__jin_value* out) {
    bool is = false;
    QLORA__TRY(qlora__jin_all_case(m, in[0].as.string, QLORA__TEXT_C_LOWER, &is));
    *out = qlora__jin_bool(is);
    return QLORA_OK;
}

static qlora_result qlora__jin_str_istitle(qlora__jin_machine* m, qlora__jin_value* in,
                                           qlora__jin_value* out) {
    const qlora__jin_string* s = in[0].as.string;
    bool before = false;
    bool any = false;
    bool good = true;
    QLORA__TRY(qlora__jin_work(m, s->bytes / 8));
    for (size_t at = 0, step = 0; at < s->bytes && good; at += step) {
        uint32_t kind = qlora__jin_class(qlora__jin_code_at(s->data, s->bytes, at, &step));
        bool upper = kind == QLORA__TEXT_C_UPPER;
        bool lower = kind == QLORA__TEXT_C_LOWER;
        good = upper ? !before : lower ? before : true;
        any = any || upper || lower;
        before = upper || lower;
    }
    *out = qlora__jin_bool(any && good);
    return QLORA_OK;
}

// ---- lists and dictionaries

static qlora_result qlora__jin_list_copy(qlora__jin_machine* m, qlora__jin_value* in,
                                         qlora__jin_value* out) {
    qlora__jin_value empty;
    QLORA__TRY(qlora__jin_list_make(m, in[0].kind, 0, &empty));
    return qlora__jin_append_lists(m, in[0], empty, out);
}

static qlora_result qlora__jin_list_count(qlora__jin_machine* m, qlora__jin_value* in,
                                          qlora__jin_value* out) {
    int64_t count = 0;
    for (size_t i = 0; i < in[0].as.list->count; i++) {
        bool same = false;
        QLORA__TRY(qlora__jin_equal(m, in[0].as.list->items[i], in[1], &same));
        count += same ? 1 : 0;
    }
    *out = qlora__jin_int(count);
    return QLORA_OK;
}

static qlora_result qlora__jin_list_index(qlora__jin_machine* m, qlora__jin_value* in,
                                          qlora__jin_value* out) {
    int64_t count = (int64_t)in[0].as.list->count;
    int64_t from = 0;
    int64_t to = count;
    QLORA__TRY(qlora__jin_need_integer(m, "index", in[2], &from));
    QLORA__TRY(qlora__jin_need_integer(m, "index", in[3], &to));
    from += from < 0 ? count : 0;
    to += to < 0 ? count : 0;
    for (int64_t i = from < 0 ? 0 : from; i < to && i < count; i++) {
        bool same = false;
        QLORA__TRY(qlora__jin_equal(m, in[0].as.list->items[i], in[1], &same));
        if (same) {
            *out = qlora__jin_int(i);
            return QLORA_OK;
        }
    }
    return qlora__jin_fail(m, "index: the value is not in the list");
}

static qlora_result qlora__jin_dict_get(qlora__jin_machine* m, qlora__jin_value* in,
                                        qlora__jin_value* out) {
    size_t at = 0;
    QLORA__TRY(qlora__jin_dict_find(m, in[0].as.dict, in[1], &at));
    *out = at < in[0].as.dict->count          ? in[0].as.dict->values[at]
           : in[2].kind != QLORA__JIN_MISSING ? in[2]
                                              : qlora__jin_none();
    return QLORA_OK;
}

static qlora_result qlora__jin_dict_view(qlora__jin_value* in, int which, qlora__jin_value* out) {
    *out = qlora__jin_of(QLORA__JIN_VIEW);
    out->flag = which;
    out->as.dict = in[0].as.dict;
    return QLORA_OK;
}

static qlora_result qlora__jin_dict_keys(qlora__jin_machine* m, qlora__jin_value* in,
                                         qlora__jin_value* out) {
    (void)m;
    return qlora__jin_dict_view(in, 0, out);
}

static qlora_result qlora__jin_dict_values(qlora__jin_machine* m, qlora__jin_value* in,
                                           qlora__jin_value* out) {
    (void)m;
    return qlora__jin_dict_view(in, 1, out);
}

static qlora_result qlora__jin_dict_items(qlora__jin_machine* m, qlora__jin_value* in,
                                          qlora__jin_value* out) {
    (void)m;
    return qlora__jin_dict_view(in, 2, out);
}

static qlora_result qlora__jin_dict_copy(qlora__jin_machine* m, qlora__jin_value* in,
                                         qlora__jin_value* out) {
    const qlora__jin_dict* from = in[0].as.dict;
    QLORA__TRY(qlora__jin_dict_make(m, QLORA__JIN_DICT, from->count, out));
    for (size_t i = 0; i < from->count; i++) {
        QLORA__TRY(qlora__jin_dict_add(m, out->as.dict, from->keys[i], from->values[i]));
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_float_is_integer(qlora__jin_machine* m, qlora__jin_value* in,
                                                qlora__jin_value* out) {
    double x = in[0].as.real;
    (void)m;
    *out = qlora__jin_bool(qlora__jin_is_zero(x - qlora__jin_floor(x)));
    return QLORA_OK;
}

// ---- the table

// A method without a function exists in Python and is not supported here; `unsafe`: the sandbox
// forbids it, as it changes the value.
typedef struct qlora__jin_method_row {
    qlora__jin_kind kind;
    const char* name;
    const char* arguments; // NULL: any, for format
    size_t required;
    qlora__jin_filter_fn call;
    bool unsafe;
} qlora__jin_method_row;

#define QLORA__JIN_STR(name, arguments, required)                                                  \
    { QLORA__JIN_STRING, #name, arguments, required, qlora__jin_str_##name, false }
#define QLORA__JIN_NOT_YET(kind, name)                                                             \
    { QLORA__JIN_##kind, name, "", 0, NULL, false }
#define QLORA__JIN_UNSAFE(kind, name)                                                              \
    { QLORA__JIN_##kind, name, "", 0, NULL, true }

static const qlora__jin_method_row qlora__jin_methods[] = {
    QLORA__JIN_STR(strip, "/chars", 0),
    QLORA__JIN_STR(lstrip, "/chars", 0),
    QLORA__JIN_STR(rstrip, "/chars", 0),
    QLORA__JIN_STR(split, "sep maxsplit", 0),
    QLORA__JIN_STR(rsplit, "sep maxsplit", 0),
    QLORA__JIN_STR(splitlines, "keepends", 0),
    QLORA__JIN_STR(startswith, "/prefix start end", 1),
    QLORA__JIN_STR(endswith, "/suffix start end", 1),
    QLORA__JIN_STR(replace, "/old new count", 2),
    QLORA__JIN_STR(lower, "", 0),
    QLORA__JIN_STR(upper, "", 0),
    QLORA__JIN_STR(title, "", 0),
    QLORA__JIN_STR(capitalize, "", 0),
    QLORA__JIN_STR(swapcase, "", 0),
    QLORA__JIN_STR(join, "/iterable", 1),
    QLORA__JIN_STR(find, "/sub start end", 1),
    QLORA__JIN_STR(rfind, "/sub start end", 1),
    QLORA__JIN_STR(index, "/sub start end", 1),
    QLORA__JIN_STR(rindex, "/sub start end", 1),
    QLORA__JIN_STR(count, "/sub start end", 1),
    QLORA__JIN_STR(partition, "/sep", 1),
    QLORA__JIN_STR(rpartition, "/sep", 1),
    QLORA__JIN_STR(removeprefix, "/prefix", 1),
    QLORA__JIN_STR(removesuffix, "/suffix", 1),
    QLORA__JIN_STR(center, "/width fill", 1),
    QLORA__JIN_STR(ljust, "/width fill", 1),
    QLORA__JIN_STR(rjust, "/width fill", 1),
    QLORA__JIN_STR(zfill, "/width", 1),
    QLORA__JIN_STR(expandtabs, "tabsize", 0),
    QLORA__JIN_STR(isalpha, "", 0),
    QLORA__JIN_STR(isalnum, "", 0),
    QLORA__JIN_STR(isascii, "", 0),
    QLORA__JIN_STR(isdecimal, "", 0),
    QLORA__JIN_STR(isdigit, "", 0),
    QLORA__JIN_STR(isnumeric, "", 0),
    QLORA__JIN_STR(isspace, "", 0),
    QLORA__JIN_STR(isprintable, "", 0),
    QLORA__JIN_STR(isupper, "", 0),
    QLORA__JIN_STR(islower, "", 0),
    QLORA__JIN_STR(istitle, "", 0),
    {QLORA__JIN_STRING, "format", NULL, 0, NULL, false},
    QLORA__JIN_NOT_YET(STRING, "format_map"),
    QLORA__JIN_NOT_YET(STRING, "encode"),
    QLORA__JIN_NOT_YET(STRING, "casefold"),
    QLORA__JIN_NOT_YET(STRING, "translate"),
    QLORA__JIN_NOT_YET(STRING, "maketrans"),
    QLORA__JIN_NOT_YET(STRING, "isidentifier"),
    {QLORA__JIN_LIST, "copy", "", 0, qlora__jin_list_copy, false},
    {QLORA__JIN_LIST, "count", "/value", 1, qlora__jin_list_count, false},
    {QLORA__JIN_LIST, "index", "/value start stop", 1, qlora__jin_list_index, false},
    QLORA__JIN_UNSAFE(LIST, "append"),
    QLORA__JIN_UNSAFE(LIST, "clear"),
    QLORA__JIN_UNSAFE(LIST, "pop"),
    QLORA__JIN_UNSAFE(LIST, "reverse"),
    QLORA__JIN_UNSAFE(LIST, "insert"),
    QLORA__JIN_UNSAFE(LIST, "sort"),
    QLORA__JIN_UNSAFE(LIST, "extend"),
    QLORA__JIN_UNSAFE(LIST, "remove"),
    {QLORA__JIN_TUPLE, "count", "/value", 1, qlora__jin_list_count, false},
    {QLORA__JIN_TUPLE, "index", "/value start stop", 1, qlora__jin_list_index, false},
    {QLORA__JIN_DICT, "get", "/key default", 1, qlora__jin_dict_get, false},
    {QLORA__JIN_DICT, "keys", "", 0, qlora__jin_dict_keys, false},
    {QLORA__JIN_DICT, "values", "", 0, qlora__jin_dict_values, false},
    {QLORA__JIN_DICT, "items", "", 0, qlora__jin_dict_items, false},
    {QLORA__JIN_DICT, "copy", "", 0, qlora__jin_dict_copy, false},
    QLORA__JIN_NOT_YET(DICT, "fromkeys"),
    QLORA__JIN_UNSAFE(DICT, "clear"),
    QLORA__JIN_UNSAFE(DICT, "pop"),
    QLORA__JIN_UNSAFE(DICT, "popitem"),
    QLORA__JIN_UNSAFE(DICT, "setdefault"),
    QLORA__JIN_UNSAFE(DICT, "update"),
    QLORA__JIN_NOT_YET(INT, "bit_length"),
    QLORA__JIN_NOT_YET(INT, "bit_count"),
    QLORA__JIN_NOT_YET(INT, "to_bytes"),
    {QLORA__JIN_FLOAT, "is_integer", "", 0, qlora__jin_float_is_integer, false},
    QLORA__JIN_NOT_YET(FLOAT, "hex"),
    QLORA__JIN_NOT_YET(RANGE, "count"),
    QLORA__JIN_NOT_YET(RANGE, "index")};

static bool qlora__jin_method_find(qlora__jin_value self, const char* name, size_t size,
                                   bool* unsafe, const void** found) {
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__jin_methods) && size > 0; i++) {
        const qlora__jin_method_row* row = &qlora__jin_methods[i];
        if (row->kind == self.kind && row->name[0] == name[0] && strlen(row->name) == size &&
            memcmp(row->name, name, size) == 0) {
            *unsafe = row->unsafe;
            *found = row;
            return true;
        }
    }
    *unsafe = true;
    return size > 4 && memcmp(name, "__", 2) == 0 && memcmp(name + size - 2, "__", 2) == 0;
}

static qlora_result qlora__jin_method_call(qlora__jin_machine* m, qlora__jin_value self,
                                           const void* method, const qlora__jin_args* args,
                                           qlora__jin_value* out) {
    const qlora__jin_method_row* row = (const qlora__jin_method_row*)method;
    qlora__jin_value in[8];
    if (row->arguments == NULL) {
        return qlora__jin_format(m, self, args, out);
    }
    if (row->call == NULL) {
        return qlora__jin_fail(m, "the method \"%s\" of a %s is not supported", row->name,
                               qlora__jin_type(self));
    }
    in[0] = self;
    for (size_t i = 1; i < 8; i++) {
        in[i] = qlora__jin_of(QLORA__JIN_MISSING);
    }
    QLORA__TRY(qlora__jin_bind_args(m, row->name, row->arguments, row->required, args, in + 1));
    return row->call(m, in, out);
}

//@@ src/text/jinja_iterate.h

// Iterators that compute: map, select and their kin. As in jinja2 they do nothing, not even check
// their arguments, until a value is asked for.

// Follows "a.b.0" (or a number) from an item. `fallback` replaces an undefined value.
static qlora_result qlora__jin_follow(qlora__jin_machine* m, qlora__jin_value item,
                                      qlora__jin_value path, qlora__jin_value fallback,
                                      qlora__jin_value* out) {
    *out = item;
    if (path.kind == QLORA__JIN_NONE || path.kind == QLORA__JIN_MISSING) {
        return QLORA_OK;
    }
    if (path.kind != QLORA__JIN_STRING) {
        QLORA__TRY(qlora__jin_getitem(m, item, path, out));
    }
    size_t at = 0;
    while (path.kind == QLORA__JIN_STRING && at <= path.as.string->bytes) {
        const qlora__jin_string* s = path.as.string;
        size_t dot = qlora__jin_find_bytes(s->data, s->bytes, at, ".", 1);
        size_t end = dot == SIZE_MAX ? s->bytes : dot;
        size_t digits = at;
        qlora__jin_value key = qlora__jin_int(qlora__jin_read_number(s->data, end, &digits));
        if (digits != end || end == at) {
            QLORA__TRY(qlora__jin_string_share(m, s->data + at, end - at, &key));
        }
        QLORA__TRY(qlora__jin_getitem(m, *out, key, out));
        if (out->kind == QLORA__JIN_UNDEFINED && fallback.kind != QLORA__JIN_MISSING &&
            fallback.kind != QLORA__JIN_NONE) {
            *out = fallback;
        }
        at = end + 1;
    }
    if (out->kind == QLORA__JIN_UNDEFINED && fallback.kind != QLORA__JIN_MISSING &&
        fallback.kind != QLORA__JIN_NONE) {
        *out = fallback;
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_next_mapped(qlora__jin_machine* m, qlora__jin_iter* iter,
                                           qlora__jin_value* out) {
    qlora__jin_value item = *out;
    if (iter->how == QLORA__JIN_MAP_ATTRIBUTE) {
        return qlora__jin_follow(m, item, iter->attribute, iter->fallback, out);
    }
    if (iter->function.kind != QLORA__JIN_STRING) {
        return iter->function.kind == QLORA__JIN_MISSING
                   ? qlora__jin_fail(m, "map needs the name of a filter, or attribute=")
                   : qlora__jin_fail(m, "map: the name of a filter is a %s",
                                     qlora__jin_type(iter->function));
    }
    const qlora__jin_string* name = iter->function.as.string;
    return m->hooks->filter(m, name->data, name->bytes, item, &iter->args, out);
}

static qlora_result qlora__jin_selects(qlora__jin_machine* m, qlora__jin_iter* iter,
                                       qlora__jin_value item, bool* out) {
    qlora__jin_value tested = item;
    bool truth = false;
    if (iter->attribute.kind != QLORA__JIN_MISSING) {
        QLORA__TRY(qlora__jin_follow(m, item, iter->attribute, iter->fallback, &tested));
    }
    if (iter->function.kind == QLORA__JIN_MISSING) {
        truth = qlora__jin_truth(tested);
    } else if (iter->function.kind != QLORA__JIN_STRING) {
        return qlora__jin_fail(m, "the name of a test is a %s", qlora__jin_type(iter->function));
    } else {
        const qlora__jin_string* name = iter->function.as.string;
        QLORA__TRY(m->hooks->test(m, name->data, name->bytes, tested, &iter->args, &truth));
    }
    *out = truth == iter->wanted;
    return QLORA_OK;
}

static qlora_result qlora__jin_next_computed(qlora__jin_machine* m, qlora__jin_iter* iter,
                                             qlora__jin_value* out, bool* more) {
    if (iter->how == QLORA__JIN_LAZY) {
        QLORA__TRY(iter->late(m, iter->late_in, &iter->source));
        iter->how = QLORA__JIN_PLAIN;
        return qlora__jin_next_plain(m, iter, out, more);
    }
    if (iter->inner == NULL) {
        // jinja2's filters: nothing, even for None
        if (!qlora__jin_truth(iter->source) && iter->how != QLORA__JIN_TESTED) {
            iter->source = qlora__jin_of(QLORA__JIN_UNDEFINED);
        }
        QLORA__TRY(qlora__jin_iter_make(m, iter->source, &iter->inner));
    }
    for (;;) {
        bool keep = true;
        QLORA__TRY(m->hooks->next(m, iter->inner, out, more));
        if (!*more) {
            return QLORA_OK;
        }
        if (iter->how != QLORA__JIN_SELECT && iter->how != QLORA__JIN_TESTED) {
            return qlora__jin_next_mapped(m, iter, out);
        }
        QLORA__TRY(iter->how == QLORA__JIN_SELECT ? qlora__jin_selects(m, iter, *out, &keep)
                                                  : iter->tested(m, iter, *out, &keep));
        if (keep) {
            return QLORA_OK;
        }
    }
}

static qlora_result qlora__jin_next(qlora__jin_machine* m, qlora__jin_iter* iter,
                                    qlora__jin_value* out, bool* more) {
    QLORA__TRY(qlora__jin_enter(m));
    QLORA__TRY(iter->how == QLORA__JIN_PLAIN ? qlora__jin_next_plain(m, iter, out, more)
                                             : qlora__jin_next_computed(m, iter, out, more));
    m->depth--;
    return QLORA_OK;
}

// list(value)
static qlora_result qlora__jin_to_list(qlora__jin_machine* m, qlora__jin_value v,
                                       qlora__jin_value* out) {
    qlora__jin_iter* iter = NULL;
    qlora__jin_value item;
    qlora__jin_value list;
    bool more = true;
    QLORA__TRY(qlora__jin_iter_make(m, v, &iter));
    QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_LIST, 4, &list));
    for (;;) {
        QLORA__TRY(qlora__jin_next(m, iter, &item, &more));
        if (!more) {
            *out = list;
            return QLORA_OK;
        }
        QLORA__TRY(qlora__jin_list_add(m, list.as.list, item));
    }
}

static qlora_result qlora__jin_iter_of(qlora__jin_machine* m, int how, qlora__jin_value source,
                                       qlora__jin_value* out) {
    void* memory = NULL;
    QLORA__TRY(qlora__jin_get(m, sizeof(qlora__jin_iter), &memory));
    memset(memory, 0, sizeof(qlora__jin_iter));
    qlora__jin_iter* iter = (qlora__jin_iter*)memory;
    iter->how = how;
    iter->source = source;
    *out = qlora__jin_of(QLORA__JIN_ITER);
    out->as.iter = iter;
    return QLORA_OK;
}

// A generator whose values are those of the list that `late` makes.
static qlora_result qlora__jin_lazy(qlora__jin_machine* m, qlora__jin_filter_fn late,
                                    const qlora__jin_value* in, size_t count,
                                    qlora__jin_value* out) {
    QLORA__TRY(qlora__jin_iter_of(m, QLORA__JIN_LAZY, qlora__jin_of(QLORA__JIN_MISSING), out));
    qlora__jin_iter* iter = out->as.iter;
    iter->late = late;
    QLORA__TRY(qlora__jin_get_values(m, count, &iter->late_in));
    memcpy(iter->late_in, in, count * sizeof *in);
    return QLORA_OK;
}

static qlora_result qlora__jin_copy_args(qlora__jin_machine* m, const qlora__jin_args* from,
                                         size_t skip, qlora__jin_args* out) {
    memset(out, 0, sizeof *out);
    skip = skip < from->positional ? skip : from->positional;
    out->positional = from->positional - skip;
    out->named = from->named;
    size_t count = out->positional + out->named;
    QLORA__TRY(qlora__jin_get_values(m, count, &out->items));
    if (count > 0) {
        memcpy(out->items, from->items + skip, count * sizeof *out->items);
    }
    if (out->named > 0) {
        void* names = NULL;
        QLORA__TRY(qlora__jin_get(m, out->named * sizeof *out->names, &names));
        memcpy(names, from->names, out->named * sizeof *out->names);
        out->names = (const qlora__jin_string**)names;
    }
    return QLORA_OK;
}

// The keyword argument of that name, or NULL.
static const qlora__jin_value* qlora__jin_keyword(const qlora__jin_args* args, const char* name) {
    for (size_t i = 0; i < args->named; i++) {
        if (args->names[i]->bytes == strlen(name) &&
            memcmp(args->names[i]->data, name, args->names[i]->bytes) == 0) {
            return &args->items[args->positional + i];
        }
    }
    return NULL;
}

static qlora_result qlora__jin_filter_map(qlora__jin_machine* m, qlora__jin_value v,
                                          const qlora__jin_args* args, qlora__jin_value* out) {
    const qlora__jin_value* attribute = qlora__jin_keyword(args, "attribute");
    const qlora__jin_value* fallback = qlora__jin_keyword(args, "default");
    if (args->positional == 0 && attribute != NULL) {
        if (args->named > (fallback != NULL ? 2u : 1u)) {
            return qlora__jin_fail(m, "map: an argument is given by a name that is unknown");
        }
        QLORA__TRY(qlora__jin_iter_of(m, QLORA__JIN_MAP_ATTRIBUTE, v, out));
        out->as.iter->attribute = *attribute;
        out->as.iter->fallback = fallback != NULL ? *fallback : qlora__jin_none();
        return QLORA_OK;
    }
    QLORA__TRY(qlora__jin_iter_of(m, QLORA__JIN_MAP_FILTER, v, out));
    out->as.iter->function =
        args->positional > 0 ? args->items[0] : qlora__jin_of(QLORA__JIN_MISSING);
    return qlora__jin_copy_args(m, args, 1, &out->as.iter->args);
}

static qlora_result qlora__jin_select(qlora__jin_machine* m, qlora__jin_value v,
                                      const qlora__jin_args* args, bool wanted, bool attribute,
                                      qlora__jin_value* out) {
    size_t skip = attribute ? 1 : 0;
    if (attribute && args->positional == 0) {
        return qlora__jin_fail(m, "selectattr and rejectattr need the name of an attribute");
    }
    QLORA__TRY(qlora__jin_iter_of(m, QLORA__JIN_SELECT, v, out));
    qlora__jin_iter* iter = out->as.iter;
    iter->wanted = wanted;
    if (attribute) {
        iter->attribute = args->items[0];
    }
    if (args->positional > skip) {
        iter->function = args->items[skip];
    }
    return qlora__jin_copy_args(m, args, skip + 1, &iter->args);
}

static qlora_result qlora__jin_filter_select(qlora__jin_machine* m, qlora__jin_value v,
                                             const qlora__jin_args* args, qlora__jin_value* out) {
    return qlora__jin_select(m, v, args, true, false, out);
}

static qlora_result qlora__jin_filter_reject(qlora__jin_machine* m, qlora__jin_value v,
                                             const qlora__jin_args* args, qlora__jin_value* out) {
    return qlora__jin_select(m, v, args, false, false, out);
}

static qlora_result qlora__jin_filter_selectattr(qlora__jin_machine* m, qlora__jin_value v,
                                                 const qlora__jin_args* args,
                                                 qlora__jin_value* out) {
    return qlora__jin_select(m, v, args, true, true, out);
}

static qlora_result qlora__jin_filter_rejectattr(qlora__jin_machine* m, qlora__jin_value v,
                                                 const qlora__jin_args* args,
                                                 qlora__jin_value* out) {
    return qlora__jin_select(m, v, args, false, true, out);
}

// ---- sorting ------------------------------------------------------------------------------------

// The keys by which items are compared: an attribute, in lower case unless the case counts.
static qlora_result qlora__jin_sort_key(qlora__jin_machine* m, qlora__jin_value item,
                                        qlora__jin_value path, bool case_sensitive,
                                        qlora__jin_value* out) {
    QLORA__TRY(qlora__jin_follow(m, item, path, qlora__jin_of(QLORA__JIN_MISSING), out));
    if (!case_sensitive && out->kind == QLORA__JIN_STRING) {
        qlora__jin_value text = *out;
        return qlora__jin_recase(m, text, QLORA__JIN_ALL_LOWER, out);
    }
    return QLORA_OK;
}

// Merges two runs of `order`, which has been sorted by keys so far, stably.
static qlora_result qlora__jin_merge(qlora__jin_machine* m, const qlora__jin_value* keys,
                                     const size_t* from, size_t* to, size_t begin, size_t middle,
                                     size_t end, bool reverse) {
    size_t left = begin;
    size_t right = middle;
    for (size_t i = begin; i < end; i++) {
        bool second = left == middle;
        if (left < middle && right < end) {
            QLORA__TRY(
                reverse ? m->hooks->less(m, keys[from[left]], keys[from[right]], false, &second)
                        : m->hooks->less(m, keys[from[right]], keys[from[left]], false, &second));
        }
        to[i] = second ? from[right++] : from[left++];
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_sort(qlora__jin_machine* m, qlora__jin_list* list,
                                    const qlora__jin_value* keys, bool reverse) {
    size_t count = list->count;
    void* memory = NULL;
    qlora__jin_value* sorted = NULL;
    QLORA__TRY(qlora__jin_get(m, 2 * count * sizeof(size_t), &memory));
    QLORA__TRY(qlora__jin_get_values(m, count, &sorted));
    size_t* from = (size_t*)memory;
    size_t* to = from + count;
    for (size_t i = 0; i < count; i++) {
        from[i] = i;
    }
    for (size_t width = 1; width < count; width *= 2) {
        for (size_t begin = 0; begin < count; begin += 2 * width) {
            size_t middle = begin + width < count ? begin + width : count;
            size_t end = begin + 2 * width < count ? begin + 2 * width : count;
            QLORA__TRY(qlora__jin_merge(m, keys, from, to, begin, middle, end, reverse));
        }
        size_t* swap = from;
        from = to;
        to = swap;
    }
    for (size_t i = 0; i < count; i++) {
        sorted[i] = list->items[from[i]];
    }
    list->items = sorted;
    list->capacity = count;
    return QLORA_OK;
}

// Python compares the keys of several attributes, "a,b", as a list.
static qlora_result qlora__jin_sort_keys_of(qlora__jin_machine* m, const qlora__jin_list* list,
                                            qlora__jin_value path, bool case_sensitive,
                                            qlora__jin_value** out) {
    QLORA__TRY(qlora__jin_get_values(m, list->count, out));
    bool several = path.kind == QLORA__JIN_STRING && path.as.string->bytes > 0 &&
                   memchr(path.as.string->data, ',', path.as.string->bytes) != NULL;
    for (size_t i = 0; i < list->count; i++) {
        if (!several) {
            QLORA__TRY(qlora__jin_sort_key(m, list->items[i], path, case_sensitive, &(*out)[i]));
            continue;
        }
        qlora__jin_value parts;
        qlora__jin_value comma;
        QLORA__TRY(qlora__jin_string_of(m, ",", &comma));
        QLORA__TRY(qlora__jin_split(m, path, comma, -1, &parts));
        for (size_t k = 0; k < parts.as.list->count; k++) {
            qlora__jin_value one = parts.as.list->items[k];
            QLORA__TRY(qlora__jin_sort_key(m, list->items[i], one, case_sensitive,
                                           &parts.as.list->items[k]));
        }
        (*out)[i] = parts;
    }
    return QLORA_OK;
}

//@@ src/text/jinja_filters.h

// The filters. in[0] is the value, the arguments follow in the order of the table below.

#define QLORA__JIN_FILTER(name)                                                                    \
    static qlora_result qlora__jin_filter_##name(qlora__jin_machine* m, qlora__jin_value* in,      \
                                                 qlora__jin_value* out)

static bool qlora__jin_given(qlora__jin_value v) {
    return v.kind != QLORA__JIN_MISSING && v.kind != QLORA__JIN_NONE;
}

// ---- strings

QLORA__JIN_FILTER(trim) {
    QLORA__TRY(qlora__jin_text(m, in[0], &in[0]));
    return qlora__jin_strip(m, in[0], in[1], true, true, out);
}

QLORA__JIN_FILTER(string) {
    return qlora__jin_text(m, in[0], out);
}

QLORA__JIN_FILTER(lower) {
    QLORA__TRY(qlora__jin_text(m, in[0], &in[0]));
    return qlora__jin_recase(m, in[0], QLORA__JIN_ALL_LOWER, out);
}

QLORA__JIN_FILTER(upper) {
    QLORA__TRY(qlora__jin_text(m, in[0], &in[0]));
    return qlora__jin_recase(m, in[0], QLORA__JIN_ALL_UPPER, out);
}

QLORA__JIN_FILTER(capitalize) {
    QLORA__TRY(qlora__jin_text(m, in[0], &in[0]));
    return qlora__jin_recase(m, in[0], QLORA__JIN_FIRST, out);
}

QLORA__JIN_FILTER(title) {
    QLORA__TRY(qlora__jin_text(m, in[0], &in[0]));
    QLORA__TRY(qlora__jin_recase(m, in[0], QLORA__JIN_TITLE_FILTER, out));
    out->flag = 0; // joined from its words
    return QLORA_OK;
}

QLORA__JIN_FILTER(safe) {
    QLORA__TRY(qlora__jin_text(m, in[0], out));
    out->flag = 1;
    return QLORA_OK;
}

QLORA__JIN_FILTER(escape) {
    qlora__jin_buffer buffer;
    memset(&buffer, 0, sizeof buffer);
    QLORA__TRY(qlora__jin_escape_html(m, in[0], &buffer));
    QLORA__TRY(qlora__jin_buffer_string(m, &buffer, out));
    out->flag = 1;
    return QLORA_OK;
}

QLORA__JIN_FILTER(forceescape) {
    QLORA__TRY(qlora__jin_text(m, in[0], &in[0]));
    in[0].flag = 0;
    return qlora__jin_filter_escape(m, in, out);
}

QLORA__JIN_FILTER(center) {
    qlora__jin_value call[3];
    QLORA__TRY(qlora__jin_text(m, in[0], &call[0]));
    call[1] = in[1].kind == QLORA__JIN_MISSING ? qlora__jin_int(80) : in[1];
    call[2] = qlora__jin_of(QLORA__JIN_MISSING);
    return qlora__jin_justify(m, call, '^', out);
}

QLORA__JIN_FILTER(replace) {
    int64_t limit = -1;
    qlora__jin_value s;
    qlora__jin_value from;
    qlora__jin_value to;
    QLORA__TRY(qlora__jin_text(m, in[0], &s));
    QLORA__TRY(qlora__jin_text(m, in[1], &from));
    QLORA__TRY(qlora__jin_text(m, in[2], &to));
    if (qlora__jin_given(in[3])) {
        QLORA__TRY(qlora__jin_need_integer(m, "replace", in[3], &limit));
    }
    s.flag = 0;
    return qlora__jin_replace(m, s, from.as.string, to.as.string, limit, out);
}

QLORA__JIN_FILTER(indent) {
    qlora__jin_value lines;
    qlora__jin_value by = in[1];
    qlora__jin_buffer buffer;
    memset(&buffer, 0, sizeof buffer);
    QLORA__TRY(qlora__jin_need_string(m, "indent", in[0]));
    if (by.kind != QLORA__JIN_STRING) {
        int64_t width = 4;
        qlora__jin_value space;
        QLORA__TRY(qlora__jin_need_integer(m, "indent", by, &width));
        QLORA__TRY(qlora__jin_string_of(m, " ", &space));
        QLORA__TRY(qlora__jin_repeat(m, space, width, &by));
    }
    bool blank = qlora__jin_truth(in[3]);
    qlora__jin_value split[2];
    qlora__jin_value newline;
    QLORA__TRY(qlora__jin_string_of(m, "\n", &newline));
    QLORA__TRY(qlora__jin_join_strings(m, in[0], newline, &split[0]));
    split[1] = qlora__jin_of(QLORA__JIN_MISSING);
    QLORA__TRY(qlora__jin_str_splitlines(m, split, &lines));
    for (size_t i = 0; i < lines.as.list->count; i++) {
        qlora__jin_value line = lines.as.list->items[i];
        bool indented = i == 0 ? qlora__jin_truth(in[2]) : blank || line.as.string->bytes > 0;
        QLORA__TRY(i > 0 ? qlora__jin_put(m, &buffer, "\n", 1) : QLORA_OK);
        QLORA__TRY(indented ? qlora__jin_print(m, by, &buffer) : QLORA_OK);
        QLORA__TRY(qlora__jin_print(m, line, &buffer));
    }
    QLORA__TRY(qlora__jin_buffer_string(m, &buffer, out));
    out->flag = in[0].flag;
    return QLORA_OK;
}

QLORA__JIN_FILTER(truncate) {
    int64_t length = 255;
    int64_t leeway = 5;
    qlora__jin_value end = in[3];
    qlora__jin_value cut;
    int64_t count = 0;
    QLORA__TRY(qlora__jin_length(m, in[0], &count));
    QLORA__TRY(qlora__jin_need_integer(m, "truncate", in[1], &length));
    if (qlora__jin_given(in[4])) {
        QLORA__TRY(qlora__jin_need_integer(m, "truncate", in[4], &leeway));
    }
    if (end.kind == QLORA__JIN_MISSING) {
        QLORA__TRY(qlora__jin_string_of(m, "...", &end));
    }
    QLORA__TRY(qlora__jin_need_string(m, "truncate", end));
    int64_t keep = length - (int64_t)end.as.string->chars;
    if (keep < 0 || leeway < 0) {
        return qlora__jin_fail(m, "truncate: the length is shorter than the end");
    }
    if (count <= length + leeway) {
        *out = in[0];
        return QLORA_OK;
    }
    QLORA__TRY(qlora__jin_need_string(m, "truncate", in[0]));
    QLORA__TRY(
        qlora__jin_part(m, in[0], 0, qlora__jin_byte_of(in[0].as.string, (size_t)keep), &cut));
    if (!qlora__jin_truth(in[2])) {
        const qlora__jin_string* s = cut.as.string;
        size_t space = qlora__jin_rfind_bytes(s->data, 0, s->bytes, " ", 1);
        QLORA__TRY(qlora__jin_part(m, cut, 0, space == SIZE_MAX ? s->bytes : space, &cut));
    }
    return qlora__jin_join_strings(m, cut, end, out);
}

QLORA__JIN_FILTER(wordcount) {
    qlora__jin_value text;
    int64_t count = 0;
    bool inside = false;
    QLORA__TRY(qlora__jin_text(m, in[0], &text));
    const qlora__jin_string* s = text.as.string;
    QLORA__TRY(qlora__jin_work(m, s->bytes / 8));
    for (size_t at = 0, step = 0; at < s->bytes; at += step) {
        uint32_t code = qlora__jin_code_at(s->data, s->bytes, at, &step);
        bool word = code == '_' || qlora__jin_is_alnum(code); // Python's \w
        count += word && !inside ? 1 : 0;
        inside = word;
    }
    *out = qlora__jin_int(count);
    return QLORA_OK;
}

QLORA__JIN_FILTER(urlencode) {
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                "_.-~/";
    qlora__jin_buffer buffer;
    memset(&buffer, 0, sizeof buffer);
    if (in[0].kind != QLORA__JIN_STRING) {
        return qlora__jin_fail(m, "urlencode of a %s is not supported", qlora__jin_type(in[0]));
    }
    for (size_t i = 0; i < in[0].as.string->bytes; i++) {
        char c = in[0].as.string->data[i];
        char escaped[4];
        snprintf(escaped, sizeof escaped, "%%%02X", (unsigned)(unsigned char)c);
        QLORA__TRY(c != '\0' && strchr(plain, c) != NULL ? qlora__jin_put(m, &buffer, &c, 1)
                                                         : qlora__jin_puts(m, &buffer, escaped));
    }
    return qlora__jin_buffer_string(m, &buffer, out);
}

static qlora_result qlora__jin_filter_format(qlora__jin_machine* m, qlora__jin_value v,
                                             const qlora__jin_args* args, qlora__jin_value* out) {
    qlora__jin_value values;
    QLORA__TRY(qlora__jin_text(m, v, &v));
    if (args->positional > 0 && args->named > 0) {
        return qlora__jin_fail(m, "format: arguments by position and by name at once");
    }
    if (args->named > 0) {
        QLORA__TRY(qlora__jin_dict_make(m, QLORA__JIN_DICT, args->named, &values));
        for (size_t i = 0; i < args->named; i++) {
            qlora__jin_value key = qlora__jin_of(QLORA__JIN_STRING);
            key.as.string = args->names[i];
            QLORA__TRY(qlora__jin_dict_add(m, values.as.dict, key, args->items[i]));
        }
    } else {
        QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_TUPLE, args->positional, &values));
        for (size_t i = 0; i < args->positional; i++) {
            QLORA__TRY(qlora__jin_list_add(m, values.as.list, args->items[i]));
        }
    }
    return qlora__jin_percent(m, v, values, out);
}

// ---- numbers

QLORA__JIN_FILTER(abs) {
    if (!qlora__jin_is_number(in[0])) {
        return qlora__jin_fail(m, "abs: a number is needed, not a %s", qlora__jin_type(in[0]));
    }
    if (in[0].kind == QLORA__JIN_FLOAT) {
        *out = qlora__jin_float(in[0].as.real < 0.0 || qlora__jin_is_zero(in[0].as.real)
                                    ? 0.0 - in[0].as.real
                                    : in[0].as.real);
        return QLORA_OK;
    }
    int64_t x = qlora__jin_integer_of(in[0]);
    *out = qlora__jin_int(x < 0 && x > INT64_MIN ? -x : x);
    return x == INT64_MIN ? qlora__jin_too_big(m) : QLORA_OK;
}

// A number as int() or float() reads it from a text: sign, digits, and for floats point and
// exponent. False when it is none.
static bool qlora__jin_read_text_number(const qlora__jin_string* s, bool real, double* x,
                                        int64_t* n, bool* big) {
    size_t at = qlora__jin_skip_space(s->data, s->bytes, 0);
    size_t end = qlora__jin_back_space(s->data, at, s->bytes);
    char digits[400];
    size_t count = 0;
    bool minus = at < end && s->data[at] == '-';
    at += minus || (at < end && s->data[at] == '+') ? 1 : 0;
    bool digit = false;
    bool point = false;
    bool power = false;
    uint64_t value = 0;
    for (; at < end && count + 4 < sizeof digits; at++) {
        char c = s->data[at];
        bool number = c >= '0' && c <= '9';
        bool under = c == '_' && digit && s->data[at - 1] != '_' && at + 1 < end &&
                     s->data[at + 1] >= '0' && s->data[at + 1] <= '9';
        if (under) {
            continue;
        }
        bool exponent = real && (c == 'e' || c == 'E') && digit && !power;
        bool dot = real && c == '.' && !point && !power;
        bool sign = power && (c == '+' || c == '-') && (s->data[at - 1] | 0x20) == 'e';
        if (!number && !exponent && !dot && !sign) {
            return false;
        }
        if (number) {
            *big = *big || value > (INT64_MAX - (uint64_t)(c - '0')) / 10;
            value = value * 10 + (uint64_t)(c - '0');
        }
        digit = digit || number;
        point = point || dot;
        power = power || exponent;
        digits[count++] = c;
    }
    if (!digit || at < end || digits[count - 1] == 'e' || digits[count - 1] == 'E' ||
        digits[count - 1] == '+' || digits[count - 1] == '-') {
        return false;
    }
    double parsed = qlora__number_parse(digits, count);
    *x = minus ? -parsed : parsed;
    *n = minus ? -(int64_t)(value & INT64_MAX) : (int64_t)(value & INT64_MAX);
    return true;
}

QLORA__JIN_FILTER(float) {
    double x = 0.0;
    int64_t n = 0;
    bool big = false;
    *out = in[1].kind == QLORA__JIN_MISSING ? qlora__jin_float(0.0) : in[1];
    if (in[0].kind == QLORA__JIN_UNDEFINED) {
        return qlora__jin_undefined_error(m, in[0]);
    }
    if (qlora__jin_is_number(in[0])) {
        *out = qlora__jin_float(qlora__jin_real_of(in[0]));
    } else if (in[0].kind == QLORA__JIN_STRING &&
               qlora__jin_read_text_number(in[0].as.string, true, &x, &n, &big)) {
        *out = qlora__jin_float(x);
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_truncate_double(qlora__jin_machine* m, double x,
                                               qlora__jin_value* out) {
    if (!(x > -9223372036854775808.0 && x < 9223372036854775808.0)) {
        return qlora__jin_too_big(m);
    }
    *out = qlora__jin_int((int64_t)x);
    return QLORA_OK;
}

QLORA__JIN_FILTER(int) {
    double x = 0.0;
    int64_t n = 0;
    bool big = false;
    int64_t base = 10;
    *out = in[1].kind == QLORA__JIN_MISSING ? qlora__jin_int(0) : in[1];
    QLORA__TRY(qlora__jin_need_integer(m, "int", in[2], &base));
    if (in[0].kind == QLORA__JIN_UNDEFINED) {
        return qlora__jin_undefined_error(m, in[0]);
    }
    if (in[0].kind == QLORA__JIN_BIG) {
        *out = in[0];
        return QLORA_OK;
    }
    if (qlora__jin_is_integer(in[0])) {
        *out = qlora__jin_int(qlora__jin_integer_of(in[0]));
        return QLORA_OK;
    }
    if (in[0].kind == QLORA__JIN_FLOAT) {
        bool finite = in[0].as.real - in[0].as.real <= 0.0;
        return finite ? qlora__jin_truncate_double(m, in[0].as.real, out) : QLORA_OK;
    }
    if (in[0].kind != QLORA__JIN_STRING) {
        return QLORA_OK;
    }
    if (base != 10) {
        return qlora__jin_fail(m, "int: a base other than 10 is not supported");
    }
    if (qlora__jin_read_text_number(in[0].as.string, false, &x, &n, &big)) {
        *out = qlora__jin_int(n);
        return big ? qlora__jin_too_big(m) : QLORA_OK;
    }
    big = false;
    if (qlora__jin_read_text_number(in[0].as.string, true, &x, &n, &big)) {
        return qlora__jin_truncate_double(m, x, out);
    }
    return QLORA_OK;
}

QLORA__JIN_FILTER(round) {
    int64_t precision = 0;
    char text[420];
    QLORA__TRY(qlora__jin_need_integer(m, "round", in[1], &precision));
    bool common = in[2].kind == QLORA__JIN_MISSING || qlora__jin_is(in[2], "common", 6);
    bool down = qlora__jin_is(in[2], "floor", 5);
    if (!common && !down && !qlora__jin_is(in[2], "ceil", 4)) {
        return qlora__jin_fail(m, "round: the method must be common, ceil or floor");
    }
    if (!qlora__jin_is_number(in[0])) {
        return qlora__jin_fail(m, "round: a number is needed, not a %s", qlora__jin_type(in[0]));
    }
    if (common && qlora__jin_is_integer(in[0]) && precision >= 0) {
        *out = qlora__jin_int(qlora__jin_integer_of(in[0]));
        return QLORA_OK;
    }
    if (precision < 0 || precision > 60) {
        return qlora__jin_fail(m, "round: a precision of %lld is not supported",
                               (long long)precision);
    }
    double x = qlora__jin_real_of(in[0]);
    if (common) {
        size_t n = 0;
        snprintf(text, sizeof text, "%.*f", (int)precision, x);
        for (char* c = text; *c != '\0'; c++) { // the locale's decimal point
            bool plain = (*c >= '0' && *c <= '9') || *c == '-';
            if (plain || (n > 0 && text[n - 1] != '.')) {
                text[n++] = plain ? *c : '.';
            }
        }
        *out = qlora__jin_float(qlora__number_parse(text, n));
        return QLORA_OK;
    }
    double scale = 1.0;
    for (int64_t i = 0; i < precision; i++) {
        scale *= 10.0;
    }
    double whole = qlora__jin_floor(x * scale);
    whole += !down && whole < x * scale ? 1.0 : 0.0;
    *out = qlora__jin_float(whole / scale);
    return QLORA_OK;
}

// ---- sequences

QLORA__JIN_FILTER(length) {
    int64_t count = 0;
    QLORA__TRY(qlora__jin_length(m, in[0], &count));
    *out = qlora__jin_int(count);
    return QLORA_OK;
}

QLORA__JIN_FILTER(list) {
    return qlora__jin_to_list(m, in[0], out);
}

QLORA__JIN_FILTER(default) {
    (void)m;
    bool replace =
        in[0].kind == QLORA__JIN_UNDEFINED || (qlora__jin_truth(in[2]) && !qlora__jin_truth(in[0]));
    *out = replace ? in[1] : in[0];
    return replace && in[1].kind == QLORA__JIN_MISSING ? qlora__jin_string_of(m, "", out)
                                                       : QLORA_OK;
}

QLORA__JIN_FILTER(first) {
    qlora__jin_iter* iter = NULL;
    bool more = false;
    QLORA__TRY(qlora__jin_iter_make(m, in[0], &iter));
    QLORA__TRY(qlora__jin_next(m, iter, out, &more));
    if (!more) {
        return qlora__jin_undefined(m, NULL, "the first item of nothing", 25, false, out);
    }
    return QLORA_OK;
}

// reversed(value): for what has an order and a length.
static qlora_result qlora__jin_reversed(qlora__jin_machine* m, qlora__jin_value v,
                                        qlora__jin_value* out) {
    qlora__jin_value list = v;
    if (v.kind != QLORA__JIN_LIST && v.kind != QLORA__JIN_TUPLE) {
        QLORA__TRY(qlora__jin_to_list(m, v, &list));
    }
    QLORA__TRY(qlora__jin_iter_of(m, QLORA__JIN_PLAIN, list, out));
    out->as.iter->backwards = true;
    return QLORA_OK;
}

QLORA__JIN_FILTER(last) {
    qlora__jin_value back;
    bool more = false;
    if (in[0].kind == QLORA__JIN_ITER) {
        return qlora__jin_fail(m, "last: a generator has no last item; make a list of it");
    }
    QLORA__TRY(qlora__jin_reversed(m, in[0], &back));
    QLORA__TRY(qlora__jin_next(m, back.as.iter, out, &more));
    if (!more) {
        return qlora__jin_undefined(m, NULL, "the last item of nothing", 24, false, out);
    }
    return QLORA_OK;
}

QLORA__JIN_FILTER(reverse) {
    if (in[0].kind == QLORA__JIN_STRING) {
        qlora__jin_value parts[3];
        bool found = false;
        parts[0] = qlora__jin_none();
        parts[1] = qlora__jin_none();
        parts[2] = qlora__jin_int(-1);
        return qlora__jin_slice(m, in[0], parts, out, &found);
    }
    if (in[0].kind == QLORA__JIN_ITER) {
        QLORA__TRY(qlora__jin_to_list(m, in[0], out));
        qlora__jin_reverse(out->as.list);
        return QLORA_OK;
    }
    return qlora__jin_reversed(m, in[0], out);
}

QLORA__JIN_FILTER(join) {
    qlora__jin_buffer buffer;
    qlora__jin_iter* iter = NULL;
    qlora__jin_value item;
    bool more = true;
    memset(&buffer, 0, sizeof buffer);
    QLORA__TRY(qlora__jin_iter_make(m, in[0], &iter));
    for (size_t i = 0;; i++) {
        QLORA__TRY(qlora__jin_next(m, iter, &item, &more));
        if (!more) {
            return qlora__jin_buffer_string(m, &buffer, out);
        }
        QLORA__TRY(qlora__jin_follow(m, item, in[2], qlora__jin_of(QLORA__JIN_MISSING), &item));
        if (i > 0 && in[1].kind != QLORA__JIN_MISSING) {
            QLORA__TRY(qlora__jin_print(m, in[1], &buffer));
        }
        QLORA__TRY(qlora__jin_print(m, item, &buffer));
    }
}

QLORA__JIN_FILTER(items_late) {
    if (in[0].kind == QLORA__JIN_UNDEFINED) {
        return qlora__jin_list_make(m, QLORA__JIN_LIST, 0, out);
    }
    if (in[0].kind != QLORA__JIN_DICT) {
        return qlora__jin_fail(m, "items: a dictionary is needed, not a %s",
                               qlora__jin_type(in[0]));
    }
    qlora__jin_value view;
    QLORA__TRY(qlora__jin_dict_view(in, 2, &view));
    return qlora__jin_to_list(m, view, out);
}

QLORA__JIN_FILTER(items) {
    return qlora__jin_lazy(m, qlora__jin_filter_items_late, in, 1, out);
}

QLORA__JIN_FILTER(batch_late) {
    qlora__jin_value all;
    int64_t size = 0;
    QLORA__TRY(qlora__jin_need_integer(m, "batch", in[1], &size));
    QLORA__TRY(qlora__jin_to_list(m, in[0], &all));
    QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_LIST, 4, out));
    qlora__jin_value row = qlora__jin_of(QLORA__JIN_MISSING);
    for (size_t i = 0; i < all.as.list->count; i++) {
        if (row.kind == QLORA__JIN_MISSING || (int64_t)row.as.list->count == size) {
            QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_LIST, 4, &row));
            QLORA__TRY(qlora__jin_list_add(m, out->as.list, row));
        }
        QLORA__TRY(qlora__jin_list_add(m, row.as.list, all.as.list->items[i]));
    }
    while (row.kind == QLORA__JIN_LIST && qlora__jin_given(in[2]) &&
           (int64_t)row.as.list->count < size) {
        QLORA__TRY(qlora__jin_list_add(m, row.as.list, in[2]));
    }
    return QLORA_OK;
}

QLORA__JIN_FILTER(batch) {
    return qlora__jin_lazy(m, qlora__jin_filter_batch_late, in, 3, out);
}

QLORA__JIN_FILTER(slice_late) {
    qlora__jin_value all;
    int64_t slices = 0;
    QLORA__TRY(qlora__jin_need_integer(m, "slice", in[1], &slices));
    QLORA__TRY(qlora__jin_to_list(m, in[0], &all));
    if (slices == 0) {
        return qlora__jin_fail(m, "slice: division by zero");
    }
    int64_t count = (int64_t)all.as.list->count;
    int64_t each = slices > 0 ? count / slices : 0;
    int64_t longer = slices > 0 ? count % slices : 0;
    int64_t at = 0;
    QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_LIST, 4, out));
    for (int64_t i = 0; i < slices; i++) {
        qlora__jin_value row;
        QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_LIST, 4, &row));
        for (int64_t k = 0; k < each + (i < longer ? 1 : 0); k++) {
            QLORA__TRY(qlora__jin_list_add(m, row.as.list, all.as.list->items[at++]));
        }
        if (qlora__jin_given(in[2]) && i >= longer) {
            QLORA__TRY(qlora__jin_list_add(m, row.as.list, in[2]));
        }
        QLORA__TRY(qlora__jin_list_add(m, out->as.list, row));
    }
    return QLORA_OK;
}

QLORA__JIN_FILTER(slice) {
    return qlora__jin_lazy(m, qlora__jin_filter_slice_late, in, 3, out);
}

QLORA__JIN_FILTER(unique_late) {
    qlora__jin_value all;
    qlora__jin_value seen;
    QLORA__TRY(qlora__jin_to_list(m, in[0], &all));
    QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_LIST, 4, out));
    QLORA__TRY(qlora__jin_dict_make(m, QLORA__JIN_DICT, 4, &seen));
    for (size_t i = 0; i < all.as.list->count; i++) {
        qlora__jin_value key;
        size_t at = 0;
        QLORA__TRY(
            qlora__jin_sort_key(m, all.as.list->items[i], in[2], qlora__jin_truth(in[1]), &key));
        QLORA__TRY(qlora__jin_dict_find(m, seen.as.dict, key, &at));
        if (at == seen.as.dict->count) {
            QLORA__TRY(qlora__jin_dict_add(m, seen.as.dict, key, key));
            QLORA__TRY(qlora__jin_list_add(m, out->as.list, all.as.list->items[i]));
        }
    }
    return QLORA_OK;
}

QLORA__JIN_FILTER(unique) {
    return qlora__jin_lazy(m, qlora__jin_filter_unique_late, in, 3, out);
}

QLORA__JIN_FILTER(sort) {
    qlora__jin_value* keys = NULL;
    QLORA__TRY(qlora__jin_to_list(m, in[0], out));
    QLORA__TRY(qlora__jin_sort_keys_of(m, out->as.list, in[3], qlora__jin_truth(in[2]), &keys));
    return qlora__jin_sort(m, out->as.list, keys, qlora__jin_truth(in[1]));
}

static qlora_result qlora__jin_extreme(qlora__jin_machine* m, qlora__jin_value* in, bool largest,
                                       qlora__jin_value* out) {
    qlora__jin_value all;
    qlora__jin_value best;
    QLORA__TRY(qlora__jin_to_list(m, in[0], &all));
    const qlora__jin_list* list = all.as.list;
    if (list->count == 0) {
        return qlora__jin_undefined(m, NULL, "an item of nothing", 18, false, out);
    }
    bool cased = qlora__jin_truth(in[1]);
    QLORA__TRY(qlora__jin_sort_key(m, list->items[0], in[2], cased, &best));
    *out = list->items[0];
    for (size_t i = 1; i < list->count; i++) {
        qlora__jin_value key;
        bool better = false;
        QLORA__TRY(qlora__jin_sort_key(m, list->items[i], in[2], cased, &key));
        QLORA__TRY(largest ? qlora__jin_less(m, best, key, false, &better)
                           : qlora__jin_less(m, key, best, false, &better));
        best = better ? key : best;
        *out = better ? list->items[i] : *out;
    }
    return QLORA_OK;
}

QLORA__JIN_FILTER(max) {
    return qlora__jin_extreme(m, in, true, out);
}

QLORA__JIN_FILTER(min) {
    return qlora__jin_extreme(m, in, false, out);
}

QLORA__JIN_FILTER(sum) {
    qlora__jin_value all;
    QLORA__TRY(qlora__jin_to_list(m, in[0], &all));
    *out = in[2].kind == QLORA__JIN_MISSING ? qlora__jin_int(0) : in[2];
    if (out->kind == QLORA__JIN_STRING) {
        return qlora__jin_fail(m, "sum: strings are joined, not added");
    }
    for (size_t i = 0; i < all.as.list->count; i++) {
        qlora__jin_value item;
        QLORA__TRY(qlora__jin_follow(m, all.as.list->items[i], in[1],
                                     qlora__jin_of(QLORA__JIN_MISSING), &item));
        QLORA__TRY(qlora__jin_binary(m, '+', *out, item, out));
    }
    return QLORA_OK;
}

QLORA__JIN_FILTER(dictsort) {
    bool by_value = qlora__jin_is(in[2], "value", 5);
    if (!by_value && in[2].kind != QLORA__JIN_MISSING && !qlora__jin_is(in[2], "key", 3)) {
        return qlora__jin_fail(m, "dictsort: by must be key or value");
    }
    if (in[0].kind != QLORA__JIN_DICT) {
        return in[0].kind == QLORA__JIN_UNDEFINED
                   ? qlora__jin_undefined_error(m, in[0])
                   : qlora__jin_fail(m, "dictsort: a dictionary is needed, not a %s",
                                     qlora__jin_type(in[0]));
    }
    qlora__jin_value view;
    qlora__jin_value* keys = NULL;
    QLORA__TRY(qlora__jin_dict_view(in, 2, &view));
    QLORA__TRY(qlora__jin_to_list(m, view, out));
    QLORA__TRY(qlora__jin_sort_keys_of(m, out->as.list, qlora__jin_int(by_value ? 1 : 0),
                                       qlora__jin_truth(in[1]), &keys));
    return qlora__jin_sort(m, out->as.list, keys, qlora__jin_truth(in[3]));
}

QLORA__JIN_FILTER(groupby) {
    qlora__jin_value all;
    qlora__jin_value* keys = NULL;
    bool cased = qlora__jin_truth(in[3]);
    QLORA__TRY(qlora__jin_to_list(m, in[0], &all));
    qlora__jin_list* list = all.as.list;
    for (int pass = 0; pass < 2; pass++) { // the keys, before and after sorting
        QLORA__TRY(qlora__jin_get_values(m, list->count, &keys));
        for (size_t i = 0; i < list->count; i++) {
            QLORA__TRY(qlora__jin_follow(m, list->items[i], in[1], in[2], &keys[i]));
            QLORA__TRY(qlora__jin_sort_key(m, keys[i], qlora__jin_none(), cased, &keys[i]));
        }
        QLORA__TRY(pass == 0 ? qlora__jin_sort(m, list, keys, false) : QLORA_OK);
    }
    QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_LIST, 4, out));
    qlora__jin_value group = qlora__jin_of(QLORA__JIN_MISSING);
    for (size_t i = 0; i < list->count; i++) {
        bool same = false;
        QLORA__TRY(i > 0 ? qlora__jin_equal(m, keys[i - 1], keys[i], &same) : QLORA_OK);
        if (!same) {
            qlora__jin_value pair;
            qlora__jin_value shown;
            QLORA__TRY(qlora__jin_follow(m, list->items[i], in[1], in[2], &shown));
            QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_LIST, 4, &group));
            QLORA__TRY(qlora__jin_pair_make(m, shown, group, &pair));
            pair.flag = 1; // has the attributes grouper and list
            QLORA__TRY(qlora__jin_list_add(m, out->as.list, pair));
        }
        QLORA__TRY(qlora__jin_list_add(m, group.as.list, list->items[i]));
    }
    return QLORA_OK;
}

QLORA__JIN_FILTER(attr) {
    bool found = false;
    QLORA__TRY(qlora__jin_need_string(m, "attr", in[1]));
    const qlora__jin_string* name = in[1].as.string;
    if (in[0].kind == QLORA__JIN_UNDEFINED) {
        return qlora__jin_undefined_error(m, in[0]);
    }
    QLORA__TRY(qlora__jin_attribute(m, in[0], name->data, name->bytes, out, &found));
    return found ? QLORA_OK
                 : qlora__jin_undefined(m, qlora__jin_type(in[0]), name->data, name->bytes, false,
                                        out);
}

//@@ src/text/jinja_tables.h

// The tables of filters and tests, and how they are called.

typedef qlora_result (*qlora__jin_many_fn)(qlora__jin_machine* m, qlora__jin_value v,
                                           const qlora__jin_args* args, qlora__jin_value* out);

// A filter without functions exists in jinja2 and is not supported here.
typedef struct qlora__jin_filter_row {
    const char* name;
    const char* arguments;
    size_t required;
    qlora__jin_filter_fn call;
    qlora__jin_many_fn many; // takes any arguments
} qlora__jin_filter_row;

static const qlora__jin_filter_row qlora__jin_filters[] = {
    {"trim", "chars", 0, qlora__jin_filter_trim, NULL},
    {"tojson", "ensure_ascii indent separators sort_keys", 0, qlora__jin_tojson, NULL},
    {"length", "", 0, qlora__jin_filter_length, NULL},
    {"count", "", 0, qlora__jin_filter_length, NULL},
    {"string", "", 0, qlora__jin_filter_string, NULL},
    {"default", "default_value boolean", 0, qlora__jin_filter_default, NULL},
    {"d", "default_value boolean", 0, qlora__jin_filter_default, NULL},
    {"join", "d attribute", 0, qlora__jin_filter_join, NULL},
    {"list", "", 0, qlora__jin_filter_list, NULL},
    {"items", "", 0, qlora__jin_filter_items, NULL},
    {"upper", "", 0, qlora__jin_filter_upper, NULL},
    {"lower", "", 0, qlora__jin_filter_lower, NULL},
    {"title", "", 0, qlora__jin_filter_title, NULL},
    {"capitalize", "", 0, qlora__jin_filter_capitalize, NULL},
    {"safe", "", 0, qlora__jin_filter_safe, NULL},
    {"escape", "", 0, qlora__jin_filter_escape, NULL},
    {"e", "", 0, qlora__jin_filter_escape, NULL},
    {"forceescape", "", 0, qlora__jin_filter_forceescape, NULL},
    {"replace", "old new count", 2, qlora__jin_filter_replace, NULL},
    {"indent", "width first blank", 0, qlora__jin_filter_indent, NULL},
    {"truncate", "length killwords end leeway", 0, qlora__jin_filter_truncate, NULL},
    {"wordcount", "", 0, qlora__jin_filter_wordcount, NULL},
    {"urlencode", "", 0, qlora__jin_filter_urlencode, NULL},
    {"center", "width", 0, qlora__jin_filter_center, NULL},
    {"abs", "", 0, qlora__jin_filter_abs, NULL},
    {"int", "default base", 0, qlora__jin_filter_int, NULL},
    {"float", "default", 0, qlora__jin_filter_float, NULL},
    {"round", "precision method", 0, qlora__jin_filter_round, NULL},
    {"first", "", 0, qlora__jin_filter_first, NULL},
    {"last", "", 0, qlora__jin_filter_last, NULL},
    {"reverse", "", 0, qlora__jin_filter_reverse, NULL},
    {"batch", "linecount fill_with", 1, qlora__jin_filter_batch, NULL},
    {"slice", "slices fill_with", 1, qlora__jin_filter_slice, NULL},
    {"unique", "case_sensitive attribute", 0, qlora__jin_filter_unique, NULL},
    {"sort", "reverse case_sensitive attribute", 0, qlora__jin_filter_sort, NULL},
    {"max", "case_sensitive attribute", 0, qlora__jin_filter_max, NULL},
    {"min", "case_sensitive attribute", 0, qlora__jin_filter_min, NULL},
    {"sum", "attribute start", 0, qlora__jin_filter_sum, NULL},
    {"dictsort", "case_sensitive by reverse", 0, qlora__jin_filter_dictsort, NULL},
    {"groupby", "attribute default case_sensitive", 1, qlora__jin_filter_groupby, NULL},
    {"attr", "name", 1, qlora__jin_filter_attr, NULL},
    {"map", NULL, 0, NULL, qlora__jin_filter_map},
    {"select", NULL, 0, NULL, qlora__jin_filter_select},
    {"reject", NULL, 0, NULL, qlora__jin_filter_reject},
    {"selectattr", NULL, 0, NULL, qlora__jin_filter_selectattr},
    {"rejectattr", NULL, 0, NULL, qlora__jin_filter_rejectattr},
    {"format", NULL, 0, NULL, qlora__jin_filter_format},
    {"filesizeformat", NULL, 0, NULL, NULL},
    {"pprint", NULL, 0, NULL, NULL},
    {"random", NULL, 0, NULL, NULL},
    {"striptags", NULL, 0, NULL, NULL},
    {"urlize", NULL, 0, NULL, NULL},
    {"wordwrap", NULL, 0, NULL, NULL},
    {"xmlattr", NULL, 0, NULL, NULL}};

static bool qlora__jin_named(const char* row, const char* name, size_t size) {
    return strlen(row) == size && memcmp(row, name, size) == 0;
}

static qlora_result qlora__jin_filter_run(qlora__jin_machine* m, const qlora__jin_filter_row* row,
                                          qlora__jin_value v, const qlora__jin_args* args,
                                          qlora__jin_value* out) {
    qlora__jin_value in[8];
    if (row->many != NULL) {
        return row->many(m, v, args, out);
    }
    if (row->call == NULL) {
        return qlora__jin_fail(m, "the filter \"%s\" is not supported", row->name);
    }
    in[0] = v;
    for (size_t i = 1; i < 8; i++) {
        in[i] = qlora__jin_of(QLORA__JIN_MISSING);
    }
    QLORA__TRY(qlora__jin_bind_args(m, row->name, row->arguments, row->required, args, in + 1));
    return row->call(m, in, out);
}

// ---- tests --------------------------------------------------------------------------------------

typedef qlora_result (*qlora__jin_test_fn)(qlora__jin_machine* m, qlora__jin_value v,
                                           qlora__jin_value other, bool* out);

typedef struct qlora__jin_test_row {
    const char* name;
    const char* arguments;
    qlora__jin_test_fn call;
} qlora__jin_test_row;

#define QLORA__JIN_TEST(name)                                                                      \
    static qlora_result qlora__jin_test_##name(qlora__jin_machine* m, qlora__jin_value v,          \
                                               qlora__jin_value other, bool* out)
#define QLORA__JIN_KIND_TEST(name, condition)                                                      \
    QLORA__JIN_TEST(name) {                                                                        \
        (void)m;                                                                                   \
        (void)other;                                                                               \
        *out = condition;                                                                          \
        return QLORA_OK;                                                                           \
    }

QLORA__JIN_KIND_TEST(defined, v.kind != QLORA__JIN_UNDEFINED)
QLORA__JIN_KIND_TEST(undefined, v.kind == QLORA__JIN_UNDEFINED)
QLORA__JIN_KIND_TEST(none, v.kind == QLORA__JIN_NONE)
QLORA__JIN_KIND_TEST(string, v.kind == QLORA__JIN_STRING)
QLORA__JIN_KIND_TEST(boolean, v.kind == QLORA__JIN_BOOL)
QLORA__JIN_KIND_TEST(is_true, v.kind == QLORA__JIN_BOOL && v.as.truth)
QLORA__JIN_KIND_TEST(is_false, v.kind == QLORA__JIN_BOOL && !v.as.truth)
QLORA__JIN_KIND_TEST(integer, v.kind == QLORA__JIN_INT || v.kind == QLORA__JIN_BIG)
QLORA__JIN_KIND_TEST(float, v.kind == QLORA__JIN_FLOAT)
QLORA__JIN_KIND_TEST(number, qlora__jin_is_number(v) || v.kind == QLORA__JIN_BIG)
QLORA__JIN_KIND_TEST(mapping, v.kind == QLORA__JIN_DICT)
QLORA__JIN_KIND_TEST(iterable, qlora__jin_is_iterable(v))
QLORA__JIN_KIND_TEST(escaped, v.kind == QLORA__JIN_STRING && v.flag != 0)
// what has a length and items by number
QLORA__JIN_KIND_TEST(sequence, qlora__jin_is_sequence(v) || v.kind == QLORA__JIN_DICT ||
                                   v.kind == QLORA__JIN_RANGE || v.kind == QLORA__JIN_UNDEFINED)
QLORA__JIN_KIND_TEST(callable, v.kind == QLORA__JIN_MACRO || v.kind == QLORA__JIN_METHOD ||
                                   v.kind == QLORA__JIN_FUNCTION || v.kind == QLORA__JIN_JOINER ||
                                   v.kind == QLORA__JIN_LOOP || v.kind == QLORA__JIN_UNDEFINED)
QLORA__JIN_KIND_TEST(sameas, v.kind == other.kind &&
                                 (qlora__jin_is_integer(v)
                                      ? qlora__jin_integer_of(v) == qlora__jin_integer_of(other)
                                      : v.kind == QLORA__JIN_NONE || v.as.list == other.as.list))

QLORA__JIN_TEST(eq) {
    return qlora__jin_equal(m, v, other, out);
}

QLORA__JIN_TEST(ne) {
    QLORA__TRY(qlora__jin_equal(m, v, other, out));
    *out = !*out;
    return QLORA_OK;
}

QLORA__JIN_TEST(lt) {
    return qlora__jin_less(m, v, other, false, out);
}

QLORA__JIN_TEST(le) {
    return qlora__jin_less(m, v, other, true, out);
}

QLORA__JIN_TEST(gt) {
    return qlora__jin_less(m, other, v, false, out);
}

QLORA__JIN_TEST(ge) {
    return qlora__jin_less(m, other, v, true, out);
}

QLORA__JIN_TEST(in) {
    return qlora__jin_contains(m, other, v, out);
}

QLORA__JIN_TEST(divisibleby) {
    qlora__jin_value rest;
    QLORA__TRY(qlora__jin_binary(m, '%', v, other, &rest));
    QLORA__TRY(qlora__jin_equal(m, rest, qlora__jin_int(0), out));
    return QLORA_OK;
}

QLORA__JIN_TEST(even) {
    (void)other;
    return qlora__jin_test_divisibleby(m, v, qlora__jin_int(2), out);
}

QLORA__JIN_TEST(odd) {
    qlora__jin_value rest;
    (void)other;
    QLORA__TRY(qlora__jin_binary(m, '%', v, qlora__jin_int(2), &rest));
    return qlora__jin_equal(m, rest, qlora__jin_int(1), out);
}

QLORA__JIN_TEST(lower) {
    qlora__jin_value text;
    (void)other;
    QLORA__TRY(qlora__jin_text(m, v, &text));
    return qlora__jin_all_case(m, text.as.string, QLORA__TEXT_C_LOWER, out);
}

QLORA__JIN_TEST(upper) {
    qlora__jin_value text;
    (void)other;
    QLORA__TRY(qlora__jin_text(m, v, &text));
    return qlora__jin_all_case(m, text.as.string, QLORA__TEXT_C_UPPER, out);
}

static const qlora__jin_filter_row* qlora__jin_filter_find(const char* name, size_t size) {
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__jin_filters); i++) {
        if (qlora__jin_named(qlora__jin_filters[i].name, name, size)) {
            return &qlora__jin_filters[i];
        }
    }
    return NULL;
}

QLORA__JIN_TEST(filter) {
    (void)m;
    (void)other;
    *out = v.kind == QLORA__JIN_STRING &&
           qlora__jin_filter_find(v.as.string->data, v.as.string->bytes) != NULL;
    return QLORA_OK;
}

static const qlora__jin_test_row qlora__jin_tests[] = {
    {"defined", "", qlora__jin_test_defined},
    {"undefined", "", qlora__jin_test_undefined},
    {"none", "", qlora__jin_test_none},
    {"string", "", qlora__jin_test_string},
    {"mapping", "", qlora__jin_test_mapping},
    {"iterable", "", qlora__jin_test_iterable},
    {"sequence", "", qlora__jin_test_sequence},
    {"boolean", "", qlora__jin_test_boolean},
    {"true", "", qlora__jin_test_is_true},
    {"false", "", qlora__jin_test_is_false},
    {"number", "", qlora__jin_test_number},
    {"integer", "", qlora__jin_test_integer},
    {"float", "", qlora__jin_test_float},
    {"callable", "", qlora__jin_test_callable},
    {"escaped", "", qlora__jin_test_escaped},
    {"odd", "", qlora__jin_test_odd},
    {"even", "", qlora__jin_test_even},
    {"lower", "", qlora__jin_test_lower},
    {"upper", "", qlora__jin_test_upper},
    {"filter", "", qlora__jin_test_filter},
    {"test", "", NULL},
    {"divisibleby", "num", qlora__jin_test_divisibleby},
    {"sameas", "other", qlora__jin_test_sameas},
    {"in", "/seq", qlora__jin_test_in},
    {"eq", "/other", qlora__jin_test_eq},
    {"equalto", "/other", qlora__jin_test_eq},
    {"==", "/other", qlora__jin_test_eq},
    {"ne", "/other", qlora__jin_test_ne},
    {"!=", "/other", qlora__jin_test_ne},
    {"lt", "/other", qlora__jin_test_lt},
    {"lessthan", "/other", qlora__jin_test_lt},
    {"<", "/other", qlora__jin_test_lt},
    {"le", "/other", qlora__jin_test_le},
    {"<=", "/other", qlora__jin_test_le},
    {"gt", "/other", qlora__jin_test_gt},
    {"greaterthan", "/other", qlora__jin_test_gt},
    {">", "/other", qlora__jin_test_gt},
    {"ge", "/other", qlora__jin_test_ge},
    {">=", "/other", qlora__jin_test_ge}};

static const qlora__jin_test_row* qlora__jin_test_find(const char* name, size_t size) {
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__jin_tests); i++) {
        if (qlora__jin_named(qlora__jin_tests[i].name, name, size)) {
            return &qlora__jin_tests[i];
        }
    }
    return NULL;
}

static qlora_result qlora__jin_test_run(qlora__jin_machine* m, const qlora__jin_test_row* row,
                                        qlora__jin_value v, const qlora__jin_args* args,
                                        bool* out) {
    qlora__jin_value in[2];
    in[0] = qlora__jin_of(QLORA__JIN_MISSING);
    QLORA__TRY(qlora__jin_bind_args(m, row->name, row->arguments, row->arguments[0] != '\0' ? 1 : 0,
                                    args, in));
    if (row->call == NULL) { // "test": whether there is a test of that name
        *out = v.kind == QLORA__JIN_STRING &&
               qlora__jin_test_find(v.as.string->data, v.as.string->bytes) != NULL;
        return QLORA_OK;
    }
    return row->call(m, v, in[0], out);
}

// ---- by name

static const void* qlora__jin_find_named(const char* name, size_t size, bool test) {
    return test ? (const void*)qlora__jin_test_find(name, size)
                : (const void*)qlora__jin_filter_find(name, size);
}

static qlora_result qlora__jin_unknown(qlora__jin_machine* m, const char* what, const char* name,
                                       size_t size) {
    return qlora__jin_fail(m, "there is no %s named \"%.*s\"", what, (int)(size < 60 ? size : 60),
                           name);
}

static qlora_result qlora__jin_filter_by_name(qlora__jin_machine* m, const char* name, size_t size,
                                              qlora__jin_value v, const qlora__jin_args* args,
                                              qlora__jin_value* out) {
    const qlora__jin_filter_row* row = qlora__jin_filter_find(name, size);
    return row != NULL ? qlora__jin_filter_run(m, row, v, args, out)
                       : qlora__jin_unknown(m, "filter", name, size);
}

static qlora_result qlora__jin_test_by_name(qlora__jin_machine* m, const char* name, size_t size,
                                            qlora__jin_value v, const qlora__jin_args* args,
                                            bool* out) {
    const qlora__jin_test_row* row = qlora__jin_test_find(name, size);
    return row != NULL ? qlora__jin_test_run(m, row, v, args, out)
                       : qlora__jin_unknown(m, "test", name, size);
}

//@@ src/text/jinja_eval.h

// Executing expressions.

// ---- functions that are always there ------------------------------------------------------------

enum {
    QLORA__JIN_F_RANGE,
    QLORA__JIN_F_NAMESPACE,
    QLORA__JIN_F_DICT,
    QLORA__JIN_F_CYCLER,
    QLORA__JIN_F_JOINER,
    QLORA__JIN_F_RAISE,
    QLORA__JIN_F_STRFTIME,
    QLORA__JIN_F_LIPSUM,
    QLORA__JIN_F_CYCLER_NEXT,
    QLORA__JIN_F_CYCLER_RESET,
    QLORA__JIN_F_LOOP_CYCLE,
    QLORA__JIN_F_LOOP_CHANGED
};

static const char* const qlora__jin_functions[] = {
    "range", "namespace", "dict", "cycler", "joiner", "raise_exception", "strftime_now", "lipsum"};

typedef struct qlora__jin_loop {
    qlora__jin_value iterable;
    qlora__jin_iter* iter;
    int64_t index0;
    int64_t length; // -1: not asked for yet
    qlora__jin_value before;
    qlora__jin_value current;
    qlora__jin_value after; // peeked; MISSING when not
    bool peeked;
    bool ended; // the peek found nothing
    qlora__jin_value changed;
} qlora__jin_loop;

static qlora_result qlora__jin_call_range(qlora__jin_machine* m, const qlora__jin_args* args,
                                          qlora__jin_value* out) {
    qlora__jin_value in[3];
    int64_t n[3] = {0, 0, 1};
    QLORA__TRY(qlora__jin_bind_args(m, "range", "/start stop step", 1, args, in));
    for (int i = 0; i < 3; i++) {
        QLORA__TRY(qlora__jin_need_integer(m, "range", in[i], &n[i]));
    }
    if (in[1].kind == QLORA__JIN_MISSING) {
        n[1] = n[0];
        n[0] = 0;
    }
    if (n[2] == 0) {
        return qlora__jin_fail(m, "range: the step is zero");
    }
    return qlora__jin_range_make(m, n[0], n[1], n[2], out);
}

// dict(...) and namespace(...): a mapping or pairs, then keyword arguments.
static qlora_result qlora__jin_call_dict(qlora__jin_machine* m, qlora__jin_kind kind,
                                         const qlora__jin_args* args, qlora__jin_value* out) {
    QLORA__TRY(qlora__jin_dict_make(m, kind, args->named, out));
    if (args->positional > 1) {
        return qlora__jin_fail(m, "dict: at most one argument without a name");
    }
    if (args->positional == 1 && args->items[0].kind == QLORA__JIN_DICT) {
        const qlora__jin_dict* from = args->items[0].as.dict;
        for (size_t i = 0; i < from->count; i++) {
            QLORA__TRY(qlora__jin_dict_add(m, out->as.dict, from->keys[i], from->values[i]));
        }
    } else if (args->positional == 1) {
        qlora__jin_value pairs;
        QLORA__TRY(qlora__jin_to_list(m, args->items[0], &pairs));
        for (size_t i = 0; i < pairs.as.list->count; i++) {
            qlora__jin_value pair;
            QLORA__TRY(qlora__jin_to_list(m, pairs.as.list->items[i], &pair));
            if (pair.as.list->count != 2) {
                return qlora__jin_fail(m, "dict: an element is not a pair");
            }
            QLORA__TRY(qlora__jin_dict_set(m, out->as.dict, pair.as.list->items[0],
                                           pair.as.list->items[1]));
        }
    }
    for (size_t i = 0; i < args->named; i++) {
        qlora__jin_value key = qlora__jin_of(QLORA__JIN_STRING);
        key.as.string = args->names[i];
        QLORA__TRY(qlora__jin_dict_set(m, out->as.dict, key, args->items[args->positional + i]));
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_call_cycler(qlora__jin_machine* m, bool joiner,
                                           const qlora__jin_args* args, qlora__jin_value* out) {
    void* memory = NULL;
    QLORA__TRY(qlora__jin_get(m, sizeof(qlora__jin_cycler), &memory));
    qlora__jin_cycler* cycler = (qlora__jin_cycler*)memory;
    memset(cycler, 0, sizeof *cycler);
    if (joiner) {
        QLORA__TRY(qlora__jin_bind_args(m, "joiner", "sep", 0, args, &cycler->items));
        if (cycler->items.kind == QLORA__JIN_MISSING) {
            QLORA__TRY(qlora__jin_string_of(m, ", ", &cycler->items));
        }
    } else {
        if (args->positional == 0 || args->named > 0) {
            return qlora__jin_fail(m, "cycler needs items, without names");
        }
        QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_LIST, args->positional, &cycler->items));
        for (size_t i = 0; i < args->positional; i++) {
            QLORA__TRY(qlora__jin_list_add(m, cycler->items.as.list, args->items[i]));
        }
    }
    *out = qlora__jin_of(joiner ? QLORA__JIN_JOINER : QLORA__JIN_CYCLER);
    out->as.cycler = cycler;
    return QLORA_OK;
}

static qlora_result qlora__jin_call_raise(qlora__jin_machine* m, const qlora__jin_args* args) {
    qlora__jin_value message;
    qlora__jin_buffer text;
    memset(&text, 0, sizeof text);
    QLORA__TRY(qlora__jin_bind_args(m, "raise_exception", "message", 1, args, &message));
    QLORA__TRY(qlora__jin_print(m, message, &text));
    return qlora__jin_fail(m, "%.*s", (int)(text.count < 400 ? text.count : 400),
                           text.count > 0 ? text.data : "");
}

static qlora_result qlora__jin_call_strftime(qlora__jin_machine* m, const qlora__jin_args* args,
                                             qlora__jin_value* out) {
    qlora__jin_value format;
    qlora__jin_buffer text;
    memset(&text, 0, sizeof text);
    QLORA__TRY(qlora__jin_bind_args(m, "strftime_now", "format", 1, args, &format));
    QLORA__TRY(qlora__jin_need_string(m, "strftime_now", format));
    QLORA__TRY(
        qlora__jin_strftime(m, format.as.string->data, format.as.string->bytes, false, &text));
    return qlora__jin_buffer_string(m, &text, out);
}

static qlora_result qlora__jin_call_loop(qlora__jin_machine* m, qlora__jin_value callee,
                                         const qlora__jin_args* args, qlora__jin_value* out) {
    qlora__jin_loop* loop = callee.as.loop;
    if (args->named > 0) {
        return qlora__jin_fail(m, "loop: arguments have no names here");
    }
    if (callee.flag == QLORA__JIN_F_LOOP_CYCLE) {
        if (args->positional == 0) {
            return qlora__jin_fail(m, "loop.cycle: no items are given");
        }
        *out = args->items[(size_t)loop->index0 % args->positional];
        return QLORA_OK;
    }
    bool same = false;
    qlora__jin_value now;
    QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_TUPLE, args->positional, &now));
    for (size_t i = 0; i < args->positional; i++) {
        QLORA__TRY(qlora__jin_list_add(m, now.as.list, args->items[i]));
    }
    if (loop->changed.kind == QLORA__JIN_TUPLE) {
        QLORA__TRY(qlora__jin_equal(m, loop->changed, now, &same));
    }
    loop->changed = now;
    *out = qlora__jin_bool(!same);
    return QLORA_OK;
}

static qlora_result qlora__jin_call_function(qlora__jin_machine* m, qlora__jin_value callee,
                                             const qlora__jin_args* args, qlora__jin_value* out) {
    switch (callee.flag) {
    case QLORA__JIN_F_RANGE:
        return qlora__jin_call_range(m, args, out);
    case QLORA__JIN_F_NAMESPACE:
        return qlora__jin_call_dict(m, QLORA__JIN_NAMESPACE, args, out);
    case QLORA__JIN_F_DICT:
        return qlora__jin_call_dict(m, QLORA__JIN_DICT, args, out);
    case QLORA__JIN_F_CYCLER:
    case QLORA__JIN_F_JOINER:
        return qlora__jin_call_cycler(m, callee.flag == QLORA__JIN_F_JOINER, args, out);
    case QLORA__JIN_F_RAISE:
        return qlora__jin_call_raise(m, args);
    case QLORA__JIN_F_STRFTIME:
        return qlora__jin_call_strftime(m, args, out);
    case QLORA__JIN_F_CYCLER_NEXT:
        *out = callee.as.cycler->items.as.list->items[callee.as.cycler->at];
        callee.as.cycler->at = (callee.as.cycler->at + 1) % callee.as.cycler->items.as.list->count;
        return QLORA_OK;
    case QLORA__JIN_F_CYCLER_RESET:
        callee.as.cycler->at = 0;
        *out = qlora__jin_none();
        return QLORA_OK;
    case QLORA__JIN_F_LOOP_CYCLE:
    case QLORA__JIN_F_LOOP_CHANGED:
        return qlora__jin_call_loop(m, callee, args, out);
    default:
        return qlora__jin_fail(m, "the function \"lipsum\" is not supported");
    }
}

// ---- fields of loops, cyclers, macros -----------------------------------------------------------

static qlora_result qlora__jin_loop_peek(qlora__jin_machine* m, qlora__jin_loop* loop) {
    if (!loop->peeked) {
        bool more = false;
        QLORA__TRY(qlora__jin_next(m, loop->iter, &loop->after, &more));
        loop->peeked = true;
        loop->ended = !more;
    }
    return QLORA_OK;
}

// A generator is read to its end to know its length, as in jinja2.
static qlora_result qlora__jin_loop_length(qlora__jin_machine* m, qlora__jin_loop* loop) {
    if (loop->length >= 0) {
        return QLORA_OK;
    }
    if (loop->iterable.kind != QLORA__JIN_ITER) {
        return qlora__jin_length(m, loop->iterable, &loop->length);
    }
    qlora__jin_value rest;
    qlora__jin_value source = qlora__jin_of(QLORA__JIN_ITER);
    source.as.iter = loop->iter;
    QLORA__TRY(qlora__jin_to_list(m, source, &rest));
    QLORA__TRY(qlora__jin_iter_make(m, rest, &loop->iter));
    loop->length =
        (int64_t)rest.as.list->count + loop->index0 + 1 + (loop->peeked && !loop->ended ? 1 : 0);
    return QLORA_OK;
}

// long because every field is a line
static qlora_result qlora__jin_loop_field(qlora__jin_machine* m, qlora__jin_loop* loop,
                                          const char* name, size_t size, qlora__jin_value* out,
                                          bool* found) {
    static const char* const names[] = {"index",    "index0",    "first",    "last",     "length",
                                        "revindex", "revindex0", "previtem", "nextitem", "depth",
                                        "depth0",   "cycle",     "changed"};
    size_t which = 0;
    while (which < QLORA__TEXT_COUNT(names) && !qlora__jin_named(names[which], name, size)) {
        which++;
    }
    *found = which < QLORA__TEXT_COUNT(names);
    if (which == 3 || which == 8) {
        QLORA__TRY(qlora__jin_loop_peek(m, loop));
    }
    if (which >= 4 && which <= 6) {
        QLORA__TRY(qlora__jin_loop_length(m, loop));
    }
    switch (which) {
    case 0:
        *out = qlora__jin_int(loop->index0 + 1);
        break;
    case 1:
        *out = qlora__jin_int(loop->index0);
        break;
    case 2:
        *out = qlora__jin_bool(loop->index0 == 0);
        break;
    case 3:
        *out = qlora__jin_bool(loop->ended);
        break;
    case 4:
        *out = qlora__jin_int(loop->length);
        break;
    case 5:
        *out = qlora__jin_int(loop->length - loop->index0);
        break;
    case 6:
        *out = qlora__jin_int(loop->length - loop->index0 - 1);
        break;
    case 7:
        *out = loop->before;
        return loop->index0 == 0
                   ? qlora__jin_undefined(m, NULL, "the previous item", 17, false, out)
                   : QLORA_OK;
    case 8:
        *out = loop->after;
        return loop->ended ? qlora__jin_undefined(m, NULL, "the next item", 13, false, out)
                           : QLORA_OK;
    case 9:
        *out = qlora__jin_int(1);
        break;
    case 10:
        *out = qlora__jin_int(0);
        break;
    case 11:
    case 12:
        *out = qlora__jin_of(QLORA__JIN_FUNCTION);
        out->flag = which == 11 ? QLORA__JIN_F_LOOP_CYCLE : QLORA__JIN_F_LOOP_CHANGED;
        out->as.loop = loop;
        break;
    default:
        break;
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_macro_field(qlora__jin_machine* m, const qlora__jin_node* node,
                                           const char* name, size_t size, qlora__jin_value* out,
                                           bool* found) {
    *found = true;
    if (qlora__jin_named("name", name, size)) {
        return qlora__jin_string_share(m, node->name, node->size, out);
    }
    if (qlora__jin_named("arguments", name, size)) {
        QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_TUPLE, 4, out));
        for (const qlora__jin_node* n = node->b; n != NULL; n = n->next) {
            qlora__jin_value text;
            QLORA__TRY(qlora__jin_string_share(m, n->name, n->size, &text));
            QLORA__TRY(qlora__jin_list_add(m, out->as.list, text));
        }
        return QLORA_OK;
    }
    *out = qlora__jin_bool(qlora__jin_named("caller", name, size)         ? node->flag
                           : qlora__jin_named("catch_kwargs", name, size) ? node->uses_kwargs
                                                                          : node->uses_varargs);
    *found = qlora__jin_named("caller", name, size) ||
             qlora__jin_named("catch_kwargs", name, size) ||
             qlora__jin_named("catch_varargs", name, size);
    return QLORA_OK;
}

static qlora_result qlora__jin_field(qlora__jin_machine* m, qlora__jin_value v, const char* name,
                                     size_t size, qlora__jin_value* out, bool* found) {
    *found = false;
    switch (v.kind) {
    case QLORA__JIN_LOOP:
        return qlora__jin_loop_field(m, v.as.loop, name, size, out, found);
    case QLORA__JIN_MACRO:
        return qlora__jin_macro_field(m, v.as.macro->node, name, size, out, found);
    case QLORA__JIN_CYCLER:
        *found = qlora__jin_named("current", name, size) || qlora__jin_named("next", name, size) ||
                 qlora__jin_named("reset", name, size);
        if (*found && name[0] == 'c') {
            *out = v.as.cycler->items.as.list->items[v.as.cycler->at];
        } else if (*found) {
            *out = qlora__jin_of(QLORA__JIN_FUNCTION);
            out->flag = name[0] == 'n' ? QLORA__JIN_F_CYCLER_NEXT : QLORA__JIN_F_CYCLER_RESET;
            out->as.cycler = v.as.cycler;
        }
        return QLORA_OK;
    case QLORA__JIN_RANGE:
        *found = qlora__jin_named("start", name, size) || qlora__jin_named("stop", name, size) ||
                 qlora__jin_named("step", name, size);
        *out = qlora__jin_int(size == 5                  ? v.as.range->start
                              : *found && name[2] == 'o' ? v.as.range->stop
                                                         : v.as.range->step);
        return QLORA_OK;
    case QLORA__JIN_TUPLE: // of groupby
        *found = v.flag == 1 &&
                 (qlora__jin_named("grouper", name, size) || qlora__jin_named("list", name, size));
        *out = *found ? v.as.list->items[name[0] == 'g' ? 0 : 1] : *out;
        return QLORA_OK;
    default:
        return QLORA_OK;
    }
}

// ---- expressions --------------------------------------------------------------------------------

#define QLORA__JIN_EVAL(name)                                                                      \
    static qlora_result qlora__jin_eval_##name(qlora__jin_machine* m, const qlora__jin_node* node, \
                                               qlora__jin_value* out)

static qlora__jin_value* qlora__jin_slot(qlora__jin_machine* m, const qlora__jin_node* node) {
    qlora__jin_record* record = m->record;
    for (uint32_t i = 0; i < node->hops; i++) {
        record = record->outer;
    }
    return &record->slots[node->slot];
}

QLORA__JIN_EVAL(const) {
    (void)m;
    *out = node->value;
    return QLORA_OK;
}

QLORA__JIN_EVAL(name) {
    const qlora__jin_value* value = qlora__jin_slot(m, node);
    if (value->kind == QLORA__JIN_MISSING) {
        return qlora__jin_undefined(m, NULL, node->name, node->size, false, out);
    }
    *out = *value;
    return QLORA_OK;
}

QLORA__JIN_EVAL(list) {
    qlora__jin_kind kind = node->kind == QLORA__JIN_N_TUPLE ? QLORA__JIN_TUPLE : QLORA__JIN_LIST;
    qlora__jin_value list;
    QLORA__TRY(qlora__jin_list_make(m, kind, 0, &list));
    for (const qlora__jin_node* n = node->a; n != NULL; n = n->next) {
        qlora__jin_value item;
        QLORA__TRY(m->hooks->eval(m, n, &item));
        QLORA__TRY(qlora__jin_list_add(m, list.as.list, item));
    }
    *out = list;
    return QLORA_OK;
}

QLORA__JIN_EVAL(dict) {
    qlora__jin_value dict;
    QLORA__TRY(qlora__jin_dict_make(m, QLORA__JIN_DICT, 0, &dict));
    for (const qlora__jin_node* n = node->a; n != NULL; n = n->next->next) {
        qlora__jin_value key;
        qlora__jin_value value;
        QLORA__TRY(m->hooks->eval(m, n, &key));
        QLORA__TRY(m->hooks->eval(m, n->next, &value));
        QLORA__TRY(qlora__jin_dict_set(m, dict.as.dict, key, value));
    }
    *out = dict;
    return QLORA_OK;
}

QLORA__JIN_EVAL(getattr) {
    qlora__jin_value v;
    QLORA__TRY(m->hooks->eval(m, node->a, &v));
    m->line = node->line;
    return qlora__jin_getattr(m, v, node->name, node->size, out);
}

QLORA__JIN_EVAL(getitem) {
    qlora__jin_value v;
    qlora__jin_value key;
    QLORA__TRY(m->hooks->eval(m, node->a, &v));
    if (node->b->kind != QLORA__JIN_N_SLICE) {
        QLORA__TRY(m->hooks->eval(m, node->b, &key));
        m->line = node->line;
        return qlora__jin_getitem(m, v, key, out);
    }
    const qlora__jin_node* slice[3] = {node->b->a, node->b->b, node->b->c};
    qlora__jin_value parts[3];
    bool found = false;
    for (int i = 0; i < 3; i++) {
        parts[i] = qlora__jin_of(QLORA__JIN_MISSING);
        if (slice[i] != NULL) {
            QLORA__TRY(m->hooks->eval(m, slice[i], &parts[i]));
        }
    }
    m->line = node->line;
    if (v.kind == QLORA__JIN_UNDEFINED) {
        return qlora__jin_undefined_error(m, v);
    }
    QLORA__TRY(qlora__jin_slice(m, v, parts, out, &found));
    return found ? QLORA_OK
                 : qlora__jin_fail(m, "a %s cannot be sliced like this", qlora__jin_type(v));
}

// Room for one more argument at the end of what has been collected.
static qlora_result qlora__jin_args_add(qlora__jin_machine* m, qlora__jin_list* items,
                                        qlora__jin_value value) {
    return qlora__jin_list_add(m, items, value);
}

// *list and **dict of a call
static qlora_result qlora__jin_args_spread(qlora__jin_machine* m, const qlora__jin_node* node,
                                           qlora__jin_list* items, qlora__jin_value* mapping) {
    qlora__jin_value value;
    if (node->d != NULL) {
        QLORA__TRY(m->hooks->eval(m, node->d, &value));
        QLORA__TRY(qlora__jin_to_list(m, value, &value));
        for (size_t i = 0; i < value.as.list->count; i++) {
            QLORA__TRY(qlora__jin_args_add(m, items, value.as.list->items[i]));
        }
    }
    if (node->e != NULL) {
        QLORA__TRY(m->hooks->eval(m, node->e, mapping));
        bool strings = mapping->kind == QLORA__JIN_DICT;
        for (size_t i = 0; strings && i < mapping->as.dict->count; i++) {
            strings = mapping->as.dict->keys[i].kind == QLORA__JIN_STRING;
        }
        if (!strings) {
            return qlora__jin_fail(m, "** needs a dictionary whose keys are strings");
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_args_eval(qlora__jin_machine* m, const qlora__jin_node* node,
                                         const qlora__jin_value* caller, qlora__jin_args* out) {
    static const qlora__jin_string caller_name = {"caller", 6, 6};
    qlora__jin_value list;
    qlora__jin_value mapping = qlora__jin_of(QLORA__JIN_MISSING);
    size_t named = caller != NULL ? 1 : 0;
    void* memory = NULL;
    memset(out, 0, sizeof *out);
    if (node->b == NULL && node->c == NULL && node->d == NULL && node->e == NULL && named == 0) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_LIST, 4, &list));
    qlora__jin_list* items = list.as.list;
    for (const qlora__jin_node* n = node->b; n != NULL; n = n->next) {
        qlora__jin_value value;
        QLORA__TRY(m->hooks->eval(m, n, &value));
        QLORA__TRY(qlora__jin_args_add(m, items, value));
    }
    QLORA__TRY(qlora__jin_args_spread(m, node, items, &mapping));
    out->positional = items->count;
    for (const qlora__jin_node* n = node->c; n != NULL; n = n->next) {
        named++;
    }
    named += mapping.kind == QLORA__JIN_DICT ? mapping.as.dict->count : 0;
    QLORA__TRY(qlora__jin_get(m, (named + 1) * sizeof *out->names, &memory));
    out->names = (const qlora__jin_string**)memory;
    for (const qlora__jin_node* n = node->c; n != NULL; n = n->next) {
        qlora__jin_value value;
        QLORA__TRY(m->hooks->eval(m, n->a, &value));
        QLORA__TRY(qlora__jin_args_add(m, items, value));
        out->names[out->named++] = n->value.as.string;
    }
    if (caller != NULL) {
        QLORA__TRY(qlora__jin_args_add(m, items, *caller));
        out->names[out->named++] = &caller_name;
    }
    for (size_t i = 0; mapping.kind == QLORA__JIN_DICT && i < mapping.as.dict->count; i++) {
        const qlora__jin_string* name = mapping.as.dict->keys[i].as.string;
        for (size_t k = 0; k < out->named; k++) {
            if (qlora__jin_compare_strings(out->names[k], name) == 0) {
                return qlora__jin_fail(m, "an argument is given twice by its name");
            }
        }
        QLORA__TRY(qlora__jin_args_add(m, items, mapping.as.dict->values[i]));
        out->names[out->named++] = name;
    }
    out->items = items->items;
    return QLORA_OK;
}

QLORA__JIN_EVAL(call) {
    qlora__jin_value callee;
    qlora__jin_args args;
    QLORA__TRY(m->hooks->eval(m, node->a, &callee));
    QLORA__TRY(qlora__jin_args_eval(m, node, NULL, &args));
    m->line = node->line;
    return m->hooks->call(m, callee, &args, out);
}

QLORA__JIN_EVAL(filter) {
    qlora__jin_value v;
    qlora__jin_args args;
    QLORA__TRY(m->hooks->eval(m, node->a, &v));
    QLORA__TRY(qlora__jin_args_eval(m, node, NULL, &args));
    m->line = node->line;
    if (node->found == NULL) {
        return qlora__jin_unknown(m, "filter", node->name, node->size);
    }
    return qlora__jin_filter_run(m, (const qlora__jin_filter_row*)node->found, v, &args, out);
}

QLORA__JIN_EVAL(test) {
    qlora__jin_value v;
    qlora__jin_args args;
    bool truth = false;
    QLORA__TRY(m->hooks->eval(m, node->a, &v));
    QLORA__TRY(qlora__jin_args_eval(m, node, NULL, &args));
    m->line = node->line;
    if (node->found == NULL) {
        return qlora__jin_unknown(m, "test", node->name, node->size);
    }
    QLORA__TRY(qlora__jin_test_run(m, (const qlora__jin_test_row*)node->found, v, &args, &truth));
    *out = qlora__jin_bool(truth);
    return QLORA_OK;
}

QLORA__JIN_EVAL(negate) {
    qlora__jin_value v;
    QLORA__TRY(m->hooks->eval(m, node->a, &v));
    *out = qlora__jin_bool(!qlora__jin_truth(v));
    return QLORA_OK;
}

QLORA__JIN_EVAL(sign) {
    qlora__jin_value v;
    QLORA__TRY(m->hooks->eval(m, node->a, &v));
    m->line = node->line;
    if (v.kind == QLORA__JIN_UNDEFINED) {
        return qlora__jin_undefined_error(m, v);
    }
    if (!qlora__jin_is_number(v)) {
        return qlora__jin_fail(m, "a %s has no sign", qlora__jin_type(v));
    }
    if (v.kind == QLORA__JIN_FLOAT) {
        *out = qlora__jin_float(node->kind == QLORA__JIN_N_NEG ? -v.as.real : v.as.real);
        return QLORA_OK;
    }
    int64_t n = qlora__jin_integer_of(v);
    if (node->kind == QLORA__JIN_N_NEG && n == INT64_MIN) {
        return qlora__jin_too_big(m);
    }
    *out = qlora__jin_int(node->kind == QLORA__JIN_N_NEG ? -n : n);
    return QLORA_OK;
}

QLORA__JIN_EVAL(and_or) {
    QLORA__TRY(m->hooks->eval(m, node->a, out));
    bool enough = qlora__jin_truth(*out) == (node->kind == QLORA__JIN_N_OR);
    return enough ? QLORA_OK : m->hooks->eval(m, node->b, out);
}

QLORA__JIN_EVAL(binary) {
    qlora__jin_value a;
    qlora__jin_value b;
    QLORA__TRY(m->hooks->eval(m, node->a, &a));
    QLORA__TRY(m->hooks->eval(m, node->b, &b));
    m->line = node->line;
    char op = node->op[1] == '\0' ? node->op[0] : node->op[0] == '/' ? 'f' : 'p';
    if (op == '%' && a.kind == QLORA__JIN_STRING) {
        return qlora__jin_percent(m, a, b, out);
    }
    return qlora__jin_binary(m, op, a, b, out);
}

static qlora_result qlora__jin_compare(qlora__jin_machine* m, const char op[2], qlora__jin_value a,
                                       qlora__jin_value b, bool* out) {
    switch (op[0]) {
    case '=':
        return qlora__jin_equal(m, a, b, out);
    case '!':
        QLORA__TRY(qlora__jin_equal(m, a, b, out));
        *out = !*out;
        return QLORA_OK;
    case '<':
        return qlora__jin_less(m, a, b, op[1] == '=', out);
    case '>':
        return qlora__jin_less(m, b, a, op[1] == '=', out);
    default:
        QLORA__TRY(qlora__jin_contains(m, b, a, out));
        *out = *out == (op[0] == 'i');
        return QLORA_OK;
    }
}

QLORA__JIN_EVAL(compare) {
    qlora__jin_value left;
    bool truth = true;
    QLORA__TRY(m->hooks->eval(m, node->a, &left));
    for (const qlora__jin_node* n = node->b; n != NULL && truth; n = n->next) {
        qlora__jin_value right;
        QLORA__TRY(m->hooks->eval(m, n->a, &right));
        m->line = n->line;
        QLORA__TRY(qlora__jin_compare(m, n->op, left, right, &truth));
        left = right;
    }
    *out = qlora__jin_bool(truth);
    return QLORA_OK;
}

QLORA__JIN_EVAL(concat) {
    qlora__jin_buffer buffer;
    memset(&buffer, 0, sizeof buffer);
    for (const qlora__jin_node* n = node->a; n != NULL; n = n->next) {
        qlora__jin_value part;
        QLORA__TRY(m->hooks->eval(m, n, &part));
        m->line = node->line;
        QLORA__TRY(qlora__jin_print(m, part, &buffer));
    }
    return qlora__jin_buffer_string(m, &buffer, out);
}

QLORA__JIN_EVAL(cond) {
    qlora__jin_value v;
    QLORA__TRY(m->hooks->eval(m, node->a, &v));
    if (qlora__jin_truth(v)) {
        return m->hooks->eval(m, node->b, out);
    }
    return node->c != NULL ? m->hooks->eval(m, node->c, out)
                           : qlora__jin_undefined(m, NULL, "an if without an else", 21, false, out);
}

QLORA__JIN_EVAL(wrong) {
    (void)out;
    m->line = node->line;
    return qlora__jin_fail(m, "this is not an expression");
}

typedef qlora_result (*qlora__jin_eval_fn)(qlora__jin_machine* m, const qlora__jin_node* node,
                                           qlora__jin_value* out);

// In the order of the kinds; statements are not expressions.
static const qlora__jin_eval_fn qlora__jin_evals[QLORA__JIN_N_OUTPUT] = {
    qlora__jin_eval_const,   qlora__jin_eval_name,    qlora__jin_eval_wrong,
    qlora__jin_eval_list,    qlora__jin_eval_list,    qlora__jin_eval_dict,
    qlora__jin_eval_getattr, qlora__jin_eval_getitem, qlora__jin_eval_wrong,
    qlora__jin_eval_call,    qlora__jin_eval_filter,  qlora__jin_eval_test,
    qlora__jin_eval_wrong,   qlora__jin_eval_negate,  qlora__jin_eval_sign,
    qlora__jin_eval_sign,    qlora__jin_eval_and_or,  qlora__jin_eval_and_or,
    qlora__jin_eval_binary,  qlora__jin_eval_compare, qlora__jin_eval_wrong,
    qlora__jin_eval_concat,  qlora__jin_eval_cond};

static qlora_result qlora__jin_eval(qlora__jin_machine* m, const qlora__jin_node* node,
                                    qlora__jin_value* out) {
    if (node->kind == QLORA__JIN_N_CONST) {
        *out = node->value;
        return QLORA_OK;
    }
    QLORA__TRY(qlora__jin_enter(m));
    QLORA__TRY(node->kind < QLORA__JIN_N_OUTPUT ? qlora__jin_evals[node->kind](m, node, out)
                                                : qlora__jin_eval_wrong(m, node, out));
    m->depth--;
    return QLORA_OK;
}

//@@ src/text/jinja_run.h

// Executing statements, calling macros, and the rendering as a whole.

// Loads the variables of a scope, as jinja2 does when it enters one.
static qlora_result qlora__jin_scope_enter(qlora__jin_machine* m, const qlora__jin_scope* scope) {
    for (const qlora__jin_symbol* s = scope->symbols; s != NULL; s = s->next) {
        qlora__jin_value value = qlora__jin_of(QLORA__JIN_MISSING);
        QLORA__TRY(qlora__jin_work(m, 1));
        if (s->load == QLORA__JIN_LOAD_PARAMETER) {
            continue;
        }
        if (s->load == QLORA__JIN_LOAD_RESOLVE) {
            size_t at = qlora__jin_dict_at(m->globals, s->name, s->size);
            value = at < m->globals->count ? m->globals->values[at] : value;
        } else if (s->load == QLORA__JIN_LOAD_ALIAS) {
            const qlora__jin_record* record = m->record;
            for (uint32_t i = 0; i < s->hops; i++) {
                record = record->outer;
            }
            value = record->slots[s->from];
        }
        m->record->slots[s->slot] = value;
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_record_make(qlora__jin_machine* m, const qlora__jin_node* function,
                                           qlora__jin_record* outer, qlora__jin_record** out) {
    void* memory = NULL;
    QLORA__TRY(qlora__jin_get(m, sizeof(qlora__jin_record), &memory));
    *out = (qlora__jin_record*)memory;
    (*out)->outer = outer;
    QLORA__TRY(qlora__jin_get_values(m, function->slots, &(*out)->slots));
    for (uint32_t i = 0; i < function->slots; i++) {
        (*out)->slots[i] = qlora__jin_of(QLORA__JIN_MISSING);
    }
    return QLORA_OK;
}

// ---- macros -------------------------------------------------------------------------------------

static void qlora__jin_set_special(qlora__jin_machine* m, const qlora__jin_node* node,
                                   const char* name, qlora__jin_value value) {
    const qlora__jin_symbol* symbol = qlora__jin_symbol_here(node->scope, name, strlen(name));
    if (symbol != NULL) {
        m->record->slots[symbol->slot] = value;
    }
}

// caller, kwargs and varargs, and what is left over.
static qlora_result qlora__jin_macro_special(qlora__jin_machine* m, const qlora__jin_node* node,
                                             const qlora__jin_args* args, const bool* taken,
                                             size_t count) {
    qlora__jin_value kwargs = qlora__jin_of(QLORA__JIN_MISSING);
    qlora__jin_value varargs = qlora__jin_of(QLORA__JIN_MISSING);
    bool called = false;
    if (node->uses_kwargs) {
        QLORA__TRY(qlora__jin_dict_make(m, QLORA__JIN_DICT, 0, &kwargs));
    }
    for (size_t i = 0; i < args->named; i++) {
        const qlora__jin_string* name = args->names[i];
        qlora__jin_value value = args->items[args->positional + i];
        bool caller = name->bytes == 6 && memcmp(name->data, "caller", 6) == 0;
        if (taken[i]) {
            continue;
        }
        if (node->flag && caller) {
            called = value.kind != QLORA__JIN_NONE;
            qlora__jin_set_special(m, node, "caller", value);
        } else if (node->uses_kwargs) {
            qlora__jin_value key = qlora__jin_of(QLORA__JIN_STRING);
            key.as.string = name;
            QLORA__TRY(qlora__jin_dict_add(m, kwargs.as.dict, key, value));
        } else {
            return qlora__jin_fail(m, "the macro \"%.*s\" has no argument \"%.*s\"",
                                   (int)node->size, node->name != NULL ? node->name : "",
                                   (int)(name->bytes < 60 ? name->bytes : 60), name->data);
        }
    }
    if (node->flag && !called) {
        qlora__jin_value none;
        QLORA__TRY(qlora__jin_undefined(m, NULL, "caller", 6, false, &none));
        qlora__jin_set_special(m, node, "caller", none);
    }
    if (node->uses_varargs) {
        QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_TUPLE, 0, &varargs));
        for (size_t i = count; i < args->positional; i++) {
            QLORA__TRY(qlora__jin_list_add(m, varargs.as.list, args->items[i]));
        }
    } else if (args->positional > count) {
        return qlora__jin_fail(m, "the macro \"%.*s\" takes %llu arguments, %llu are given",
                               (int)node->size, node->name != NULL ? node->name : "",
                               (unsigned long long)count, (unsigned long long)args->positional);
    }
    if (node->uses_kwargs) {
        qlora__jin_set_special(m, node, "kwargs", kwargs);
    }
    if (node->uses_varargs) {
        qlora__jin_set_special(m, node, "varargs", varargs);
    }
    return QLORA_OK;
}

// Fills the arguments of a macro in the record that has just been made.
static qlora_result qlora__jin_macro_args(qlora__jin_machine* m, const qlora__jin_node* node,
                                          const qlora__jin_args* args) {
    size_t count = 0;
    void* memory = NULL;
    QLORA__TRY(qlora__jin_get(m, args->named + 1, &memory));
    bool* taken = (bool*)memory;
    memset(taken, 0, (args->named + 1) * sizeof(bool));
    for (const qlora__jin_node* n = node->b; n != NULL; n = n->next, count++) {
        qlora__jin_value value = qlora__jin_of(QLORA__JIN_MISSING);
        if (count < args->positional) {
            value = args->items[count];
        } else {
            for (size_t i = 0; i < args->named; i++) {
                if (args->names[i]->bytes == n->size &&
                    memcmp(args->names[i]->data, n->name, n->size) == 0) {
                    value = args->items[args->positional + i];
                    taken[i] = true;
                }
            }
        }
        m->record->slots[n->slot] = value;
    }
    QLORA__TRY(qlora__jin_macro_special(m, node, args, taken, count));
    QLORA__TRY(qlora__jin_scope_enter(m, node->scope));
    for (const qlora__jin_node* n = node->b; n != NULL; n = n->next) {
        qlora__jin_value* slot = &m->record->slots[n->slot];
        if (slot->kind == QLORA__JIN_MISSING) {
            QLORA__TRY(n->a != NULL ? m->hooks->eval(m, n->a, slot)
                                    : qlora__jin_undefined(m, NULL, n->name, n->size, false, slot));
        }
    }
    return QLORA_OK;
}

// The text that a macro, call block or generation block writes.
static qlora_result qlora__jin_macro_call(qlora__jin_machine* m, const qlora__jin_node* node,
                                          qlora__jin_record* outer, const qlora__jin_args* args,
                                          qlora__jin_value* out) {
    qlora__jin_record* record = m->record;
    qlora__jin_buffer* before = m->out;
    qlora__jin_buffer buffer;
    qlora__jin_record* inner = NULL;
    memset(&buffer, 0, sizeof buffer);
    QLORA__TRY(qlora__jin_enter(m));
    QLORA__TRY(qlora__jin_record_make(m, node, outer, &inner));
    m->record = inner;
    QLORA__TRY(qlora__jin_macro_args(m, node, args));
    m->out = &buffer;
    QLORA__TRY(m->hooks->run(m, node->c));
    m->out = before;
    m->record = record;
    m->depth--;
    return qlora__jin_buffer_string(m, &buffer, out);
}

static qlora_result qlora__jin_call(qlora__jin_machine* m, qlora__jin_value callee,
                                    const qlora__jin_args* args, qlora__jin_value* out) {
    switch (callee.kind) {
    case QLORA__JIN_UNDEFINED:
        return qlora__jin_undefined_error(m, callee);
    case QLORA__JIN_METHOD:
        return qlora__jin_method_call(m, callee.as.method->self, callee.as.method->found, args,
                                      out);
    case QLORA__JIN_FUNCTION:
        return qlora__jin_call_function(m, callee, args, out);
    case QLORA__JIN_MACRO:
        return qlora__jin_macro_call(m, callee.as.macro->node, callee.as.macro->outer, args, out);
    case QLORA__JIN_JOINER:
        if (args->positional + args->named > 0) {
            return qlora__jin_fail(m, "a joiner takes no arguments");
        }
        if (callee.as.cycler->at == 0) {
            callee.as.cycler->at = 1;
            return qlora__jin_string_of(m, "", out);
        }
        *out = callee.as.cycler->items;
        return QLORA_OK;
    default:
        return qlora__jin_fail(m, "a %s cannot be called", qlora__jin_type(callee));
    }
}

static qlora_result qlora__jin_macro_value(qlora__jin_machine* m, const qlora__jin_node* node,
                                           qlora__jin_value* out) {
    void* memory = NULL;
    QLORA__TRY(qlora__jin_get(m, sizeof(qlora__jin_macro), &memory));
    qlora__jin_macro* macro = (qlora__jin_macro*)memory;
    macro->node = node;
    macro->outer = m->record;
    *out = qlora__jin_of(QLORA__JIN_MACRO);
    out->as.macro = macro;
    return QLORA_OK;
}

// ---- statements ---------------------------------------------------------------------------------

#define QLORA__JIN_RUN(name)                                                                       \
    static qlora_result qlora__jin_run_##name(qlora__jin_machine* m, const qlora__jin_node* node)

QLORA__JIN_RUN(output) {
    for (const qlora__jin_node* n = node->a; n != NULL; n = n->next) {
        qlora__jin_value value;
        QLORA__TRY(m->hooks->eval(m, n, &value));
        QLORA__TRY(qlora__jin_print(m, value, m->out));
    }
    return QLORA_OK;
}

QLORA__JIN_RUN(if) {
    for (const qlora__jin_node* part = node; part != NULL; part = part->d) {
        qlora__jin_value test;
        QLORA__TRY(m->hooks->eval(m, part->a, &test));
        if (qlora__jin_truth(test)) {
            return m->hooks->run(m, part->b);
        }
        if (part->c != NULL) {
            return m->hooks->run(m, part->c);
        }
    }
    return QLORA_OK;
}

// One target: a name, ns.attribute, or a tuple, which is unpacked. Targets nest as deep as the
// parser allows.
static qlora_result qlora__jin_assign(qlora__jin_machine* m, const qlora__jin_node* target,
                                      qlora__jin_value value) {
    if (target->kind == QLORA__JIN_N_NAME) {
        *qlora__jin_slot(m, target) = value;
        return QLORA_OK;
    }
    if (target->kind == QLORA__JIN_N_NSREF) {
        qlora__jin_value* space = qlora__jin_slot(m, target);
        if (space->kind != QLORA__JIN_NAMESPACE) {
            return qlora__jin_fail(m, "only a namespace can get an attribute, not a %s",
                                   space->kind == QLORA__JIN_MISSING ? "undefined value"
                                                                     : qlora__jin_type(*space));
        }
        return qlora__jin_dict_set(m, space->as.dict, target->value, value);
    }
    qlora__jin_value list;
    size_t i = 0;
    QLORA__TRY(qlora__jin_to_list(m, value, &list));
    for (const qlora__jin_node* n = target->a; n != NULL; n = n->next, i++) {
        if (i < list.as.list->count) {
            QLORA__TRY(qlora__jin_assign(m, n, list.as.list->items[i]));
        }
    }
    if (i != list.as.list->count) {
        return qlora__jin_fail(m, "%llu values cannot be unpacked into %llu names",
                               (unsigned long long)list.as.list->count, (unsigned long long)i);
    }
    return QLORA_OK;
}

QLORA__JIN_RUN(assign) {
    qlora__jin_value value;
    QLORA__TRY(m->hooks->eval(m, node->b, &value));
    m->line = node->line;
    return qlora__jin_assign(m, node->a, value);
}

// The text of a body, in a scope of its own.
static qlora_result qlora__jin_capture(qlora__jin_machine* m, const qlora__jin_node* node,
                                       qlora__jin_value* out) {
    qlora__jin_buffer* before = m->out;
    qlora__jin_buffer buffer;
    memset(&buffer, 0, sizeof buffer);
    QLORA__TRY(qlora__jin_scope_enter(m, node->scope));
    m->out = &buffer;
    QLORA__TRY(m->hooks->run(m, node->c));
    m->out = before;
    return qlora__jin_buffer_string(m, &buffer, out);
}

// The filters of a set or filter block: the innermost has no value of its own.
static qlora_result qlora__jin_filter_text(qlora__jin_machine* m, const qlora__jin_node* filter,
                                           qlora__jin_value text, qlora__jin_value* out) {
    qlora__jin_args args;
    qlora__jin_value value = text;
    if (filter->a != NULL) {
        QLORA__TRY(qlora__jin_filter_text(m, filter->a, text, &value));
    }
    QLORA__TRY(qlora__jin_args_eval(m, filter, NULL, &args));
    m->line = filter->line;
    return filter->found != NULL
               ? qlora__jin_filter_run(m, (const qlora__jin_filter_row*)filter->found, value, &args,
                                       out)
               : qlora__jin_unknown(m, "filter", filter->name, filter->size);
}

QLORA__JIN_RUN(assign_block) {
    qlora__jin_value text;
    QLORA__TRY(qlora__jin_capture(m, node, &text));
    if (m->jump != QLORA__JIN_NO_JUMP) {
        return QLORA_OK;
    }
    if (node->b != NULL) {
        QLORA__TRY(qlora__jin_filter_text(m, node->b, text, &text));
    }
    return qlora__jin_assign(m, node->a, text);
}

QLORA__JIN_RUN(filter_block) {
    qlora__jin_value text;
    QLORA__TRY(qlora__jin_capture(m, node, &text));
    if (m->jump != QLORA__JIN_NO_JUMP) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__jin_filter_text(m, node->b, text, &text));
    return qlora__jin_print(m, text, m->out);
}

QLORA__JIN_RUN(with) {
    const qlora__jin_node* value = node->b;
    QLORA__TRY(qlora__jin_scope_enter(m, node->scope));
    for (const qlora__jin_node* n = node->a; n != NULL; n = n->next, value = value->next) {
        qlora__jin_value v;
        QLORA__TRY(m->hooks->eval(m, value, &v));
        QLORA__TRY(qlora__jin_assign(m, n, v));
    }
    return m->hooks->run(m, node->c);
}

QLORA__JIN_RUN(macro) {
    return qlora__jin_macro_value(m, node, qlora__jin_slot(m, node));
}

QLORA__JIN_RUN(call_block) {
    qlora__jin_value caller;
    qlora__jin_value callee;
    qlora__jin_value text;
    qlora__jin_args args;
    QLORA__TRY(qlora__jin_macro_value(m, node, &caller));
    QLORA__TRY(m->hooks->eval(m, node->a->a, &callee));
    QLORA__TRY(qlora__jin_args_eval(m, node->a, &caller, &args));
    m->line = node->line;
    QLORA__TRY(qlora__jin_call(m, callee, &args, &text));
    if (text.kind != QLORA__JIN_STRING) {
        return qlora__jin_fail(m, "a call block gives a %s, not text", qlora__jin_type(text));
    }
    return qlora__jin_print(m, text, m->out);
}

QLORA__JIN_RUN(generation) {
    qlora__jin_value text;
    qlora__jin_args none;
    memset(&none, 0, sizeof none);
    QLORA__TRY(qlora__jin_macro_call(m, node, m->record, &none, &text));
    if (m->span_count == m->span_capacity) {
        void* moved = NULL;
        size_t grown = m->span_capacity < 8 ? 8 : m->span_capacity * 2;
        QLORA__TRY(qlora__jin_get(m, grown * sizeof(qlora__jin_span), &moved));
        if (m->span_count > 0) {
            memcpy(moved, m->spans, m->span_count * sizeof(qlora__jin_span));
        }
        m->spans = (qlora__jin_span*)moved;
        m->span_capacity = grown;
    }
    m->spans[m->span_count].begin = m->top->count;
    m->spans[m->span_count++].end = m->top->count + text.as.string->bytes;
    return qlora__jin_print(m, text, m->out);
}

// ---- loops

typedef struct qlora__jin_turn {
    const qlora__jin_node* node;
    qlora__jin_iter* iter;
    qlora__jin_loop* loop; // NULL when the body does not use it
    bool done;             // an iteration reached its end
} qlora__jin_turn;

static qlora_result qlora__jin_assign_test(qlora__jin_machine* m, const qlora__jin_scope* scope,
                                           const qlora__jin_node* target, qlora__jin_value value) {
    if (target->kind == QLORA__JIN_N_NAME) {
        const qlora__jin_symbol* s = qlora__jin_symbol_here(scope, target->name, target->size);
        if (s != NULL) {
            m->record->slots[s->slot] = value;
        }
        return QLORA_OK;
    }
    qlora__jin_value list;
    size_t i = 0;
    QLORA__TRY(qlora__jin_to_list(m, value, &list));
    for (const qlora__jin_node* n = target->a; n != NULL; n = n->next, i++) {
        if (i < list.as.list->count) {
            QLORA__TRY(qlora__jin_assign_test(m, scope, n, list.as.list->items[i]));
        }
    }
    return i == list.as.list->count
               ? QLORA_OK
               : qlora__jin_fail(m, "%llu values cannot be unpacked into %llu names",
                                 (unsigned long long)list.as.list->count, (unsigned long long)i);
}

// Whether a value passes. The loop may be advanced from inside a macro (loop.last), whose variables
// are others.
static qlora_result qlora__jin_loop_test(qlora__jin_machine* m, qlora__jin_iter* iter,
                                         qlora__jin_value item, bool* out) {
    const qlora__jin_node* node = iter->node;
    qlora__jin_record* record = m->record;
    qlora__jin_value test;
    m->record = iter->record;
    if (iter->at == 0) {
        QLORA__TRY(qlora__jin_scope_enter(m, node->scope_test));
        iter->at = 1;
    }
    QLORA__TRY(qlora__jin_assign_test(m, node->scope_test, node->a, item));
    QLORA__TRY(m->hooks->eval(m, node->e, &test));
    m->record = record;
    *out = qlora__jin_truth(test);
    return QLORA_OK;
}

// The next value of a loop, through `loop` where there is one.
static qlora_result qlora__jin_turn_next(qlora__jin_machine* m, qlora__jin_turn* turn,
                                         qlora__jin_value* item, bool* more) {
    qlora__jin_loop* loop = turn->loop;
    if (loop == NULL) {
        return qlora__jin_next(m, turn->iter, item, more);
    }
    if (loop->peeked) {
        *item = loop->after;
        *more = !loop->ended;
        loop->peeked = false;
    } else {
        QLORA__TRY(qlora__jin_next(m, loop->iter, item, more));
    }
    loop->index0++;
    loop->before = loop->current;
    loop->current = *item;
    return QLORA_OK;
}

static qlora_result qlora__jin_loop_make(qlora__jin_machine* m, qlora__jin_turn* turn,
                                         qlora__jin_value iterable) {
    void* memory = NULL;
    QLORA__TRY(qlora__jin_get(m, sizeof(qlora__jin_loop), &memory));
    memset(memory, 0, sizeof(qlora__jin_loop));
    qlora__jin_loop* loop = (qlora__jin_loop*)memory;
    loop->iterable = iterable;
    loop->iter = turn->iter;
    loop->index0 = -1;
    loop->length = -1;
    turn->loop = loop;
    return QLORA_OK;
}

static qlora_result qlora__jin_turn_run(qlora__jin_machine* m, qlora__jin_turn* turn) {
    const qlora__jin_node* node = turn->node;
    for (;;) {
        qlora__jin_value item;
        bool more = false;
        m->line = node->line;
        QLORA__TRY(qlora__jin_turn_next(m, turn, &item, &more));
        if (!more) {
            return QLORA_OK;
        }
        QLORA__TRY(qlora__jin_assign(m, node->a, item));
        if (turn->loop != NULL) {
            qlora__jin_value loop = qlora__jin_of(QLORA__JIN_LOOP);
            loop.as.loop = turn->loop;
            m->record->slots[node->slot] = loop;
        }
        QLORA__TRY(qlora__jin_scope_enter(m, node->scope));
        QLORA__TRY(m->hooks->run(m, node->c));
        int jump = m->jump;
        m->jump = QLORA__JIN_NO_JUMP;
        if (jump == QLORA__JIN_BREAK) {
            return QLORA_OK;
        }
        turn->done = turn->done || jump == QLORA__JIN_NO_JUMP;
    }
}

QLORA__JIN_RUN(for) {
    qlora__jin_value iterable;
    qlora__jin_turn turn;
    memset(&turn, 0, sizeof turn);
    turn.node = node;
    QLORA__TRY(m->hooks->eval(m, node->b, &iterable));
    m->line = node->line;
    if (node->e != NULL) {
        qlora__jin_value source = iterable;
        QLORA__TRY(qlora__jin_iter_of(m, QLORA__JIN_TESTED, source, &iterable));
        QLORA__TRY(qlora__jin_iter_make(m, source, &iterable.as.iter->inner));
        iterable.as.iter->node = node;
        iterable.as.iter->record = m->record;
        iterable.as.iter->tested = qlora__jin_loop_test;
    }
    QLORA__TRY(qlora__jin_iter_make(m, iterable, &turn.iter));
    if (node->flag) {
        QLORA__TRY(qlora__jin_loop_make(m, &turn, iterable));
    }
    QLORA__TRY(qlora__jin_turn_run(m, &turn));
    if (node->d != NULL && !turn.done) {
        QLORA__TRY(qlora__jin_scope_enter(m, node->scope_else));
        return m->hooks->run(m, node->d);
    }
    return QLORA_OK;
}

// ---- all statements

static qlora_result qlora__jin_run_one(qlora__jin_machine* m, const qlora__jin_node* node) {
    m->line = node->line;
    switch (node->kind) {
    case QLORA__JIN_N_OUTPUT:
        return qlora__jin_run_output(m, node);
    case QLORA__JIN_N_IF:
        return qlora__jin_run_if(m, node);
    case QLORA__JIN_N_FOR:
        return qlora__jin_run_for(m, node);
    case QLORA__JIN_N_ASSIGN:
        return qlora__jin_run_assign(m, node);
    case QLORA__JIN_N_ASSIGN_BLOCK:
        return qlora__jin_run_assign_block(m, node);
    case QLORA__JIN_N_MACRO:
        return qlora__jin_run_macro(m, node);
    case QLORA__JIN_N_CALL_BLOCK:
        return qlora__jin_run_call_block(m, node);
    case QLORA__JIN_N_FILTER_BLOCK:
        return qlora__jin_run_filter_block(m, node);
    case QLORA__JIN_N_WITH:
        return qlora__jin_run_with(m, node);
    case QLORA__JIN_N_GENERATION:
        return qlora__jin_run_generation(m, node);
    case QLORA__JIN_N_BREAK:
    case QLORA__JIN_N_CONTINUE:
        m->jump = node->kind == QLORA__JIN_N_BREAK ? QLORA__JIN_BREAK : QLORA__JIN_CONTINUE;
        return QLORA_OK;
    default:
        return qlora__jin_fail(m, "internal: an unknown statement");
    }
}

static qlora_result qlora__jin_run(qlora__jin_machine* m, const qlora__jin_node* first) {
    QLORA__TRY(qlora__jin_enter(m));
    for (const qlora__jin_node* n = first; n != NULL && m->jump == QLORA__JIN_NO_JUMP;
         n = n->next) {
        QLORA__TRY(qlora__jin_work(m, 1));
        QLORA__TRY(qlora__jin_run_one(m, n));
    }
    m->depth--;
    return QLORA_OK;
}

static const qlora__jin_hooks qlora__jin_hook_table = {
    qlora__jin_eval,         qlora__jin_run,         qlora__jin_call,  qlora__jin_filter_by_name,
    qlora__jin_test_by_name, qlora__jin_method_find, qlora__jin_field, qlora__jin_method_call,
    qlora__jin_next,         qlora__jin_repr,        qlora__jin_equal, qlora__jin_less};

//@@ src/text/jinja_api.h

// Templates as objects: compiled once, rendered often.

struct qlora_text_template {
    qlora_text* text;
    char* name;
    size_t name_size;
    qlora__jin_arena arena; // the tree
    qlora__jin_arena work;  // of renderings; kept between them
    qlora__jin_node* root;
    bool generation; // has generation blocks
};

static void qlora__jin_machine_start(qlora__env* env, const char* name, uint64_t input,
                                     qlora__jin_arena arena, qlora__jin_machine* m) {
    memset(m, 0, sizeof *m);
    m->env = env;
    m->hooks = &qlora__jin_hook_table;
    m->name = name;
    m->line = 1;
    m->step_limit = QLORA__JIN_MAX_STEPS + 2 * input;
    m->arena = arena;
    m->arena.env = env;
    m->arena.limit = QLORA__JIN_MAX_MEMORY + 64 * (size_t)input;
}

static void qlora__jin_template_free(qlora__env* env, qlora_text_template* t) {
    qlora__jin_arena_free(&t->arena);
    qlora__jin_arena_free(&t->work);
    qlora__env_free(env, t->name, t->name_size + 1);
    qlora__env_free(env, t, sizeof *t);
}

static bool qlora__jin_has_generation(const qlora__jin_node* first) {
    for (const qlora__jin_node* n = first; n != NULL; n = n->next) {
        const qlora__jin_node* parts[3] = {n->b, n->c, n->d};
        if (n->kind == QLORA__JIN_N_GENERATION) {
            return true;
        }
        bool body = n->kind >= QLORA__JIN_N_OUTPUT;
        for (int i = 0; i < 3 && body; i++) {
            if (qlora__jin_has_generation(parts[i])) {
                return true;
            }
        }
    }
    return false;
}

static qlora_result qlora__jin_compile_into(qlora__env* env, const char* source, size_t size,
                                            qlora_text_template* t) {
    qlora__jin_machine m;
    qlora__jin_machine_start(env, t->name, 64 * (uint64_t)size, t->arena, &m);
    qlora_result r = qlora__jin_parse(&m, source, size, &t->root);
    r = r == QLORA_OK ? qlora__jin_bind(&m, t->root, qlora__jin_find_named) : r;
    t->arena = m.arena;
    if (r == QLORA_OK) {
        t->generation = qlora__jin_has_generation(t->root->c);
    }
    return r;
}

static qlora_result qlora__jin_compile(qlora_text* text, const char* name, const char* source,
                                       size_t size, qlora_text_template** out) {
    qlora__env* env = &text->env;
    qlora_text_template* t =
        (qlora_text_template*)qlora__text_zalloc(env, 1, sizeof(qlora_text_template));
    if (t == NULL) {
        return QLORA_ERR_MEMORY;
    }
    t->text = text;
    t->arena.env = env;
    t->work.env = env;
    qlora_result r = qlora__text_copy(env, name, strlen(name), &t->name, &t->name_size);
    r = r == QLORA_OK ? qlora__jin_compile_into(env, source, size, t) : r;
    if (r != QLORA_OK) {
        qlora__jin_template_free(env, t);
        return r;
    }
    *out = t;
    return QLORA_OK;
}

// ---- a rendering

static qlora_result qlora__jin_globals_make(qlora__jin_machine* m) {
    qlora__jin_value dict;
    QLORA__TRY(qlora__jin_dict_make(m, QLORA__JIN_DICT, 32, &dict));
    m->globals = dict.as.dict;
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__jin_functions); i++) {
        qlora__jin_value function = qlora__jin_of(QLORA__JIN_FUNCTION);
        function.flag = (int32_t)i;
        QLORA__TRY(qlora__jin_dict_put(m, m->globals, qlora__jin_functions[i], function));
    }
    return QLORA_OK;
}

// Starts a rendering: afterwards the variables can be set with qlora__jin_set.
static qlora_result qlora__jin_begin(qlora_text_template* t, uint64_t input,
                                     qlora__jin_machine* m) {
    qlora__jin_machine_start(&t->text->env, t->name, input, t->work, m);
    memset(&t->work, 0, sizeof t->work);
    return qlora__jin_globals_make(m);
}

static qlora_result qlora__jin_set(qlora__jin_machine* m, const char* name,
                                   qlora__jin_value value) {
    return qlora__jin_dict_put(m, m->globals, name, value);
}

// Sets a variable that is a string, or nothing for NULL.
static qlora_result qlora__jin_set_text(qlora__jin_machine* m, const char* name, const char* text) {
    qlora__jin_value value;
    if (text == NULL) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__jin_string_of(m, text, &value));
    return qlora__jin_set(m, name, value);
}

static qlora_result qlora__jin_execute(const qlora_text_template* t, qlora__jin_machine* m,
                                       qlora__jin_buffer* out) {
    memset(out, 0, sizeof *out);
    m->out = out;
    m->top = out;
    QLORA__TRY(qlora__jin_record_make(m, t->root, NULL, &m->record));
    QLORA__TRY(qlora__jin_scope_enter(m, t->root->scope));
    return qlora__jin_run(m, t->root->c);
}

static void qlora__jin_end(qlora_text_template* t, qlora__jin_machine* m) {
    t->work = m->arena;
    qlora__jin_arena_reset(&t->work);
}

// ---- the public functions

qlora_result qlora_text_template_compile(qlora_text* text, const char* name, const char* source,
                                         size_t size, qlora_text_template** out) {
    if (text == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__text_enter(text, "qlora_text_template_compile");
    QLORA__TEXT_NEED(&text->env, name);
    QLORA__TEXT_NEED(&text->env, out);
    if (source == NULL && size > 0) {
        return qlora__env_fail(&text->env, QLORA_ERR_ARGUMENT, "source is NULL");
    }
    QLORA__TRY(qlora__jin_compile(text, name, source, size, out));
    text->templates++;
    return QLORA_OK;
}

qlora_result qlora_text_template_close(qlora_text_template* source) {
    if (source != NULL) {
        qlora_text* text = source->text;
        qlora__text_enter(text, "qlora_text_template_close");
        text->templates--;
        qlora__jin_template_free(&text->env, source);
    }
    return QLORA_OK;
}

void qlora_text_spans_free(qlora_text* text, qlora_text_spans* spans) {
    if (text != NULL && spans != NULL) {
        qlora__env_free(&text->env, spans->data, spans->capacity * sizeof(qlora_text_span));
        memset(spans, 0, sizeof *spans);
    }
}

static qlora_result qlora__jin_spans_add(qlora__env* env, qlora_text_spans* spans, size_t begin,
                                         size_t end) {
    void* data = spans->data;
    qlora_result r =
        qlora__text_reserve(env, &data, &spans->capacity, spans->count, 1, sizeof(qlora_text_span));
    spans->data = (qlora_text_span*)data;
    QLORA__TRY(r);
    spans->data[spans->count].begin = begin;
    spans->data[spans->count++].end = end;
    return QLORA_OK;
}

// The variables of a rendering: special tokens, then the conversation's keys.
static qlora_result qlora__jin_set_all(qlora__jin_machine* m, const qlora_text_render_desc* desc,
                                       const qlora__json* json) {
    qlora__jin_value root;
    QLORA__TRY(qlora__jin_set(m, "tools", qlora__jin_none()));
    QLORA__TRY(qlora__jin_set(m, "documents", qlora__jin_none()));
    QLORA__TRY(qlora__jin_set_text(m, "bos_token", desc->bos_token));
    QLORA__TRY(qlora__jin_set_text(m, "eos_token", desc->eos_token));
    QLORA__TRY(qlora__jin_set_text(m, "pad_token", desc->pad_token));
    QLORA__TRY(qlora__jin_set_text(m, "unk_token", desc->unk_token));
    QLORA__TRY(qlora__jin_from_json(m, json, json->tokens, &root));
    for (size_t i = 0; i < root.as.dict->count; i++) {
        QLORA__TRY(
            qlora__jin_dict_set(m, m->globals, root.as.dict->keys[i], root.as.dict->values[i]));
    }
    return qlora__jin_set(m, "add_generation_prompt", qlora__jin_bool(desc->generation_prompt));
}

static qlora_result qlora__jin_render(qlora__env* env, qlora_text_template* t,
                                      const qlora_text_render_desc* desc, const qlora__json* json,
                                      qlora_text_bytes* out, qlora_text_spans* spans) {
    qlora__jin_machine m;
    qlora__jin_buffer text;
    size_t before = out->count;
    memset(&text, 0, sizeof text);
    qlora_result r = qlora__jin_begin(t, desc->conversation_size, &m);
    m.clock = desc->clock;
    r = r == QLORA_OK ? qlora__jin_set_all(&m, desc, json) : r;
    r = r == QLORA_OK ? qlora__jin_execute(t, &m, &text) : r;
    r = r == QLORA_OK ? qlora__text_bytes_add(env, out, text.data, text.count) : r;
    for (size_t i = 0; r == QLORA_OK && spans != NULL && i < m.span_count; i++) {
        r = qlora__jin_spans_add(env, spans, before + m.spans[i].begin, before + m.spans[i].end);
    }
    qlora__jin_end(t, &m);
    return r;
}

qlora_result qlora_text_template_render(qlora_text_template* source,
                                        const qlora_text_render_desc* desc, qlora_text_bytes* out,
                                        qlora_text_spans* spans) {
    if (source == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__env* env = &source->text->env;
    qlora__json json;
    qlora__text_enter(source->text, "qlora_text_template_render");
    QLORA__TEXT_NEED(env, desc);
    QLORA__TEXT_NEED(env, desc->conversation);
    QLORA__TEXT_NEED(env, out);
    if (desc->reserved_must_be_zero0 != 0 || desc->reserved_must_be_zero1 != 0) {
        return qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                               "desc was not zeroed: a reserved field is set");
    }
    size_t spans_before = spans != NULL ? spans->count : 0;
    size_t before = out->count;
    QLORA__TRY(qlora__text_json(env, "the conversation", desc->conversation,
                                desc->conversation_size, &json));
    qlora_result r = QLORA_OK;
    if (json.tokens[0].kind != QLORA__JSON_OBJECT) {
        r = qlora__env_fail(env, QLORA_ERR_FORMAT,
                            "the conversation must be an object {\"messages\": [...]}");
    }
    r = r == QLORA_OK ? qlora__jin_render(env, source, desc, &json, out, spans) : r;
    qlora__json_free(env, &json);
    if (r != QLORA_OK) {
        out->count = before;
        if (spans != NULL) {
            spans->count = spans_before;
        }
    }
    return r;
}

//@@ src/text/chat_formats.h

// The built-in chat formats, as templates: for models without one, and on request. Their
// generation blocks say what is trained.

enum { QLORA__TEXT_MAX_STOPS = QLORA__MAX_STOP_IDS + 2 };

// For records of the form alpaca with an input.
static const char qlora__text_alpaca_system_input[] =
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.";

typedef struct qlora__text_format {
    const char* name;
    const char* end; // tokens that a tokenizer for this format has
    const char* marker;
    const char* source;
} qlora__text_format;

// Every template starts with this: only three roles have a place in these formats.
#define QLORA__TEXT_ROLES                                                                          \
    "{%- for m in messages %}"                                                                     \
    "{%- if m.role not in ['system', 'user', 'assistant'] %}"                                      \
    "{{- raise_exception('the role \"' ~ m.role ~ '\" is not supported; use system, user or "      \
    "assistant') }}"                                                                               \
    "{%- endif %}"                                                                                 \
    "{%- endfor %}"
// A format without system messages puts them before the next user message.
#define QLORA__TEXT_MERGED "{%- set ns = namespace(system='') %}"
#define QLORA__TEXT_MERGE                                                                          \
    "{%- if m.role == 'system' %}{%- set ns.system = m.content ~ '\n\n' if m.content else '' %}"
#define QLORA__TEXT_EOS "{{- eos_token if eos_token is defined else '' }}"

static const qlora__text_format qlora__text_formats[] = {
    {"chatml", "<|im_end|>", "<|im_start|>",
     QLORA__TEXT_ROLES
     "{%- for m in messages %}{{- '<|im_start|>' ~ m.role ~ '\n' }}"
     "{%- if m.role == 'assistant' %}"
     "{%- generation %}{{- m.content ~ '<|im_end|>' }}{%- endgeneration %}"
     "{%- else %}{{- m.content ~ '<|im_end|>' }}{%- endif %}{{- '\n' }}"
     "{%- endfor %}"
     "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"},
    {"llama3", "<|eot_id|>", "<|start_header_id|>",
     QLORA__TEXT_ROLES "{%- for m in messages %}"
                       "{{- '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\n\n' }}"
                       "{%- if m.role == 'assistant' %}"
                       "{%- generation %}{{- m.content | trim ~ '<|eot_id|>' }}{%- endgeneration %}"
                       "{%- else %}{{- m.content | trim ~ '<|eot_id|>' }}{%- endif %}{%- endfor %}"
                       "{%- if add_generation_prompt %}"
                       "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"},
    {"mistral", NULL, NULL,
     QLORA__TEXT_ROLES QLORA__TEXT_MERGED
     "{%- for m in messages %}" QLORA__TEXT_MERGE "{%- elif m.role == 'user' %}"
     "{{- '[INST] ' ~ ns.system ~ m.content ~ ' [/INST]' }}{%- set ns.system = '' %}"
     "{%- else %}{%- generation %}{{- ' ' ~ m.content }}" QLORA__TEXT_EOS
     "{%- endgeneration %}{%- endif %}{%- endfor %}"},
    {"gemma", NULL, NULL,
     QLORA__TEXT_ROLES QLORA__TEXT_MERGED
     "{%- for m in messages %}" QLORA__TEXT_MERGE "{%- elif m.role == 'user' %}"
     "{{- '<start_of_turn>user\n' ~ ns.system ~ m.content | trim ~ '<end_of_turn>\n' }}"
     "{%- set ns.system = '' %}"
     "{%- else %}{{- '<start_of_turn>model\n' }}"
     "{%- generation %}{{- m.content | trim ~ '<end_of_turn>' }}{%- endgeneration %}{{- '\n' }}"
     "{%- endif %}{%- endfor %}"
     "{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"},
    {"phi3", NULL, NULL,
     QLORA__TEXT_ROLES "{%- for m in messages %}{{- '<|' ~ m.role ~ '|>\n' }}"
                       "{%- if m.role == 'assistant' %}"
                       "{%- generation %}{{- m.content ~ '<|end|>' }}{%- endgeneration %}"
                       "{%- else %}{{- m.content ~ '<|end|>' }}{%- endif %}{{- '\n' }}{%- endfor %}"
                       "{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}"},
    {"zephyr", NULL, NULL,
     QLORA__TEXT_ROLES
     "{%- for m in messages %}{{- '<|' ~ m.role ~ '|>\n' }}{%- if m.role == 'assistant' %}"
     "{%- generation %}{{- m.content }}" QLORA__TEXT_EOS
     "{%- endgeneration %}{%- else %}{{- m.content }}" QLORA__TEXT_EOS
     "{%- endif %}{{- '\n' }}{%- endfor %}"
     "{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}"},
    {"alpaca", NULL, NULL,
     QLORA__TEXT_ROLES
     "{%- if not messages or messages[0].role != 'system' %}"
     "{{- 'Below is an instruction that describes a task. Write a response that appropriately "
     "completes the request.\n\n' }}{%- endif %}"
     "{%- for m in messages %}{%- if m.role == 'system' %}{{- m.content ~ '\n\n' }}"
     "{%- elif m.role == 'user' %}{{- '### Instruction:\n' ~ m.content ~ '\n\n' }}"
     "{%- else %}{{- '### Response:\n' }}{%- generation %}{{- m.content }}" QLORA__TEXT_EOS
     "{%- endgeneration %}{{- '\n\n' }}{%- endif %}{%- endfor %}"
     "{%- if add_generation_prompt %}{{- '### Response:\n' }}{%- endif %}"},
    {"plain", NULL, NULL,
     QLORA__TEXT_ROLES "{%- for m in messages %}{%- if m.role == 'assistant' %}"
                       "{%- generation %}{{- m.content }}" QLORA__TEXT_EOS
                       "{%- endgeneration %}{%- else %}{{- m.content }}{%- endif %}{{- '\n' }}"
                       "{%- endfor %}"}};

enum { QLORA__TEXT_ALPACA = 6 };

static const char* qlora__text_find(const char* text, size_t size, const char* what) {
    size_t length = strlen(what);
    while (size >= length) {
        const char* hit = (const char*)memchr(text, what[0], size - length + 1);
        if (hit == NULL) {
            return NULL;
        }
        if (memcmp(hit, what, length) == 0) {
            return hit;
        }
        size -= (size_t)(hit + 1 - text);
        text = hit + 1;
    }
    return NULL;
}

//@@ src/text/chat.h

// Chats: which template a model has, and its special tokens.

// A string that is freed with the chat.
typedef struct qlora__text_owned {
    char* data;
    size_t size; // one byte more is allocated
} qlora__text_owned;

struct qlora_text_chat {
    qlora_text* text;
    qlora_text_tok* tok;
    qlora_text_template* template_;  // renders conversations
    qlora_text_template* with_tools; // for those with tools, where the model has one; may be NULL
    const char* name;                // of a built-in format, or "model"
    const char* source;
    bool built_in;
    bool keeps_strings;          // the template asks whether arguments are a string
    qlora__text_owned tokens[4]; // the texts of bos_token, eos_token, pad_token, unk_token
    int64_t clock;
    int32_t bos;
    int32_t eos;
    int32_t stops[QLORA__TEXT_MAX_STOPS];
    size_t stop_count;
    qlora__json* parsed; // arguments that were strings, during a rendering
    size_t parsed_count;
    size_t parsed_capacity;
};

static const char* const qlora__text_token_names[4] = {"bos_token", "eos_token", "pad_token",
                                                       "unk_token"};
// 2024-07-26T12:00:00. A fixed day, so that training does not depend on when it happens.
#define QLORA__TEXT_CLOCK 1721995200

static void qlora__text_owned_free(qlora__env* env, qlora__text_owned* owned) {
    qlora__env_free(env, owned->data, owned->size + 1);
    memset(owned, 0, sizeof(*owned));
}

static qlora_result qlora__text_owned_set(qlora__env* env, qlora__text_owned* owned,
                                          const char* data, size_t size) {
    return qlora__text_copy(env, data, size, &owned->data, &owned->size);
}

static void qlora__text_chat_free(qlora__env* env, qlora_text_chat* chat) {
    for (size_t i = 0; i < 4; i++) {
        qlora__text_owned_free(env, &chat->tokens[i]);
    }
    if (chat->template_ != NULL) {
        qlora__jin_template_free(env, chat->template_);
    }
    if (chat->with_tools != NULL) {
        qlora__jin_template_free(env, chat->with_tools);
    }
    qlora__env_free(env, chat->parsed, chat->parsed_capacity * sizeof *chat->parsed);
    qlora__env_free(env, chat, sizeof *chat);
}

static bool qlora__text_chat_stops(const qlora_text_chat* chat, int32_t id) {
    for (size_t i = 0; i < chat->stop_count; i++) {
        if (chat->stops[i] == id) {
            return true;
        }
    }
    return false;
}

// An id that the tokenizer does not have cannot be generated, and is not kept.
static void qlora__text_chat_add_stop(qlora_text_chat* chat, int64_t id) {
    if (id >= 0 && id < (int64_t)chat->tok->count && chat->stop_count < QLORA__TEXT_MAX_STOPS &&
        !qlora__text_chat_stops(chat, (int32_t)id)) {
        chat->stops[chat->stop_count++] = (int32_t)id;
    }
}

// Whether a template asks if arguments of a tool call are a string: then they stay one.
static bool qlora__text_asks_string(const qlora__jin_node* first) {
    for (const qlora__jin_node* n = first; n != NULL; n = n->next) {
        const qlora__jin_node* parts[5] = {n->a, n->b, n->c, n->d, n->e};
        if (n->kind == QLORA__JIN_N_TEST && qlora__jin_named("string", n->name, n->size) &&
            n->a != NULL) {
            const qlora__jin_node* of = n->a;
            bool item = of->kind == QLORA__JIN_N_GETITEM && of->b->kind == QLORA__JIN_N_CONST &&
                        qlora__jin_is(of->b->value, "arguments", 9);
            bool named = (of->kind == QLORA__JIN_N_GETATTR || of->kind == QLORA__JIN_N_NAME) &&
                         qlora__jin_named("arguments", of->name, of->size);
            if (item || named) {
                return true;
            }
        }
        for (size_t i = 0; i < 5; i++) {
            if (qlora__text_asks_string(parts[i])) {
                return true;
            }
        }
    }
    return false;
}

static qlora_result qlora__text_chat_compile(qlora_text_chat* chat, const char* source,
                                             const char* text, size_t size) {
    chat->source = source;
    chat->name = "model";
    QLORA__TRY(qlora__jin_compile(chat->text, source, text, size, &chat->template_));
    chat->keeps_strings = qlora__text_asks_string(chat->template_->root->c);
    return QLORA_OK;
}

static qlora_result qlora__text_chat_built_in(qlora_text_chat* chat,
                                              const qlora__text_format* format,
                                              const char* source) {
    QLORA__TRY(qlora__jin_compile(chat->text, format->name, format->source, strlen(format->source),
                                  &chat->template_));
    chat->name = format->name;
    chat->source = source;
    chat->built_in = true;
    return QLORA_OK;
}

// ---- the model's folder

// A token given as "x" or {"content": "x"}: its text, or NULL.
static const char* qlora__text_config_text(const qlora__json* json, const char* name) {
    const qlora__json_token* value = qlora__text_json_get(json, json->tokens, name);
    if (value != NULL && value->kind == QLORA__JSON_OBJECT) {
        value = qlora__text_json_get(json, value, "content");
    }
    return qlora__text_json_cstring(json, value);
}

// chat_template: a string, or [{"name", "template"}]: the one with that name, or NULL. `any`: else
// the first.
static const qlora__json_token* qlora__text_config_template(const qlora__json* json,
                                                            const char* wanted, bool any) {
    const qlora__json_token* value = qlora__text_json_get(json, json->tokens, "chat_template");
    if (value == NULL || value->kind != QLORA__JSON_ARRAY) {
        return any && qlora__text_json_string(value) ? value : NULL;
    }
    const qlora__json_token* item = value + 1;
    const qlora__json_token* found = NULL;
    for (uint32_t i = 0; i < value->count; i++) {
        const qlora__json_token* name = qlora__text_json_get(json, item, "name");
        if ((found == NULL && any) || qlora__text_json_is(json, name, wanted)) {
            found = qlora__text_json_get(json, item, "template");
        }
        item = qlora__text_json_next(json, item);
    }
    return qlora__text_json_string(found) ? found : NULL;
}

// tokenizer_config.json (or chat_template.json): special tokens, and the template unless it has a
// file of its own.
static qlora_result qlora__text_config_tokenizer(qlora__env* env, qlora_text_chat* chat,
                                                 const qlora__json* json, const char* source,
                                                 bool wanted) {
    for (size_t i = 0; i < 4; i++) {
        const char* token = qlora__text_config_text(json, qlora__text_token_names[i]);
        if (token != NULL) {
            qlora__text_owned_free(env, &chat->tokens[i]);
            QLORA__TRY(qlora__text_owned_set(env, &chat->tokens[i], token, strlen(token)));
        }
    }
    const qlora__json_token* found = qlora__text_config_template(json, "default", true);
    if (found == NULL || chat->template_ != NULL || !wanted) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__text_chat_compile(chat, source, qlora__text_json_text(json, found),
                                        qlora__text_json_size(found)));
    const qlora__json_token* tools = qlora__text_config_template(json, "tool_use", false);
    if (tools == NULL) {
        return QLORA_OK;
    }
    return qlora__jin_compile(chat->text, source, qlora__text_json_text(json, tools),
                              qlora__text_json_size(tools), &chat->with_tools);
}

// config.json and generation_config.json, read in this order: see formats/stop_ids.h.
static qlora_result qlora__text_config_stops(qlora__env* env, const qlora__json* json,
                                             qlora__stop_ids* stops) {
    uint32_t inner = qlora__json_find(json, 0, "text_config");
    bool nested = inner != 0 && qlora__json_kind_of(json, inner) == QLORA__JSON_OBJECT;
    return qlora__stop_ids_read(env, json, nested ? inner : 0, INT32_MAX, stops);
}

typedef struct qlora__text_folder {
    qlora_text_chat* chat;
    const char* path;
    bool wanted; // take the template
    qlora__stop_ids stops;
} qlora__text_folder;

enum {
    QLORA__TEXT_FILE_TEMPLATE,
    QLORA__TEXT_FILE_TEMPLATE_JSON,
    QLORA__TEXT_FILE_TOKENIZER,
    QLORA__TEXT_FILE_CONFIG
};

static qlora_result qlora__text_folder_file(qlora__env* env, qlora__text_folder* folder, int which,
                                            const char* name, const qlora_text_bytes* file) {
    qlora_text_chat* chat = folder->chat;
    if (which == QLORA__TEXT_FILE_TEMPLATE) {
        return folder->wanted
                   ? qlora__text_chat_compile(chat, "chat_template.jinja", file->data, file->count)
                   : QLORA_OK;
    }
    qlora__json json;
    QLORA__TRY(qlora__text_json(env, name, file->data, file->count, &json));
    qlora_result r =
        which >= QLORA__TEXT_FILE_CONFIG
            ? qlora__text_config_stops(env, &json, &folder->stops)
            : qlora__text_config_tokenizer(env, chat, &json,
                                           which == QLORA__TEXT_FILE_TOKENIZER
                                               ? "the chat_template in tokenizer_config.json"
                                               : "chat_template.json",
                                           folder->wanted);
    qlora__json_free(env, &json);
    return r;
}

static qlora_result qlora__text_folder_load(qlora__env* env, qlora__text_folder* folder) {
    static const char* const names[] = {"chat_template.jinja", "chat_template.json",
                                        "tokenizer_config.json", "config.json",
                                        "generation_config.json"};
    qlora_result r = QLORA_OK;
    for (size_t i = 0; r == QLORA_OK && i < QLORA__TEXT_COUNT(names); i++) {
        qlora_text_bytes file;
        bool found = false;
        memset(&file, 0, sizeof(file));
        r = qlora__text_folder_read(env, folder->path, names[i], &file, &found);
        if (r == QLORA_OK && found) {
            r = qlora__text_folder_file(env, folder, (int)i, names[i], &file);
        }
        qlora__text_bytes_free(env, &file);
    }
    for (int32_t i = 0; i < folder->stops.count; i++) {
        qlora__text_chat_add_stop(folder->chat, folder->stops.id[i]);
    }
    return r;
}

// ---- opening

// Neither the caller nor the model has a template: the tokens of the tokenizer decide.
static qlora_result qlora__text_chat_guess(qlora_text_chat* chat) {
    const qlora__text_format* format = &qlora__text_formats[QLORA__TEXT_ALPACA];
    const char* source = "the default";
    for (size_t i = 0; i < 2; i++) {
        if (qlora__text_tok_find(chat->tok, qlora__text_formats[i].end) >= 0 &&
            qlora__text_tok_find(chat->tok, qlora__text_formats[i].marker) >= 0) {
            format = &qlora__text_formats[i];
            source = "the tokens of the tokenizer";
        }
    }
    return qlora__text_chat_built_in(chat, format, source);
}

static qlora_result qlora__text_chat_named(qlora__env* env, qlora_text_chat* chat,
                                           const char* name) {
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__text_formats); i++) {
        if (strcmp(name, qlora__text_formats[i].name) == 0) {
            return qlora__text_chat_built_in(chat, &qlora__text_formats[i], "asked for");
        }
    }
    return qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                           "unknown chat format \"%.60s\"; use chatml, llama3, mistral, gemma, "
                           "phi3, zephyr, alpaca or plain",
                           name);
}

// The text of a special token that the configuration does not name: as the tokenizer spells it.
static qlora_result qlora__text_chat_spell(qlora__env* env, qlora_text_chat* chat, size_t which,
                                           int32_t id) {
    const qlora_text_tok* tok = chat->tok;
    if (chat->tokens[which].data != NULL || !qlora__text_tok_has(tok, id, QLORA__TEXT_K_EXISTS)) {
        return QLORA_OK;
    }
    return qlora__text_owned_set(env, &chat->tokens[which], tok->names.data + tok->spans[id].at,
                                 tok->spans[id].size);
}

// The EOS token: the configuration's, else the first stop id, else one with a usual name.
static qlora_result qlora__text_chat_finish(qlora__env* env, qlora_text_chat* chat) {
    static const char* const names[] = {"</s>",       "<|end_of_text|>", "<|endoftext|>",
                                        "<|im_end|>", "<eos>",           "<|eot_id|>"};
    if (chat->tokens[1].data != NULL) {
        chat->eos = qlora__text_tok_find(chat->tok, chat->tokens[1].data);
    }
    if (chat->eos < 0 && chat->stop_count > 0) {
        chat->eos = chat->stops[0];
    }
    for (size_t i = 0; chat->eos < 0 && i < QLORA__TEXT_COUNT(names); i++) {
        chat->eos = qlora__text_tok_find(chat->tok, names[i]);
    }
    qlora__text_chat_add_stop(chat, chat->eos);
    QLORA__TRY(qlora__text_chat_spell(env, chat, 0, chat->bos));
    return qlora__text_chat_spell(env, chat, 1, chat->eos);
}

// The template of the caller's own file.
static qlora_result qlora__text_chat_file(qlora__env* env, qlora_text_chat* chat,
                                          const char* path) {
    qlora_text_bytes file;
    memset(&file, 0, sizeof file);
    qlora_result r = qlora__text_file_read(env, path, &file, NULL);
    r = r == QLORA_OK ? qlora__text_chat_compile(chat, "a file of its own", file.data, file.count)
                      : r;
    qlora__text_bytes_free(env, &file);
    return r;
}

static qlora_result qlora__text_chat_fill(qlora__env* env, qlora_text_chat* chat,
                                          const qlora_text_chat_desc* desc) {
    qlora__text_folder folder;
    memset(&folder, 0, sizeof(folder));
    folder.chat = chat;
    folder.path = desc->folder;
    folder.wanted = desc->name == NULL && desc->template_file == NULL;
    if (desc->template_file != NULL) {
        QLORA__TRY(qlora__text_chat_file(env, chat, desc->template_file));
    } else if (desc->name != NULL) {
        QLORA__TRY(qlora__text_chat_named(env, chat, desc->name));
    }
    if (desc->folder != NULL) {
        QLORA__TRY(qlora__text_folder_load(env, &folder));
    }
    if (chat->template_ == NULL) {
        QLORA__TRY(qlora__text_chat_guess(chat));
    }
    return qlora__text_chat_finish(env, chat);
}

//@@ src/text/chat_encode.h

// From a conversation to ids, and what of it is trained.
//
// With generation blocks, the template says what the assistant wrote. Otherwise a turn is what the
// rendering up to it has more than the rendering before it with the generation prompt: what a model
// continues. A template that changes earlier turns when later ones follow (it drops their thoughts,
// say) cannot be trained on one text: then each turn is a sample of its own, as inference sees it.

// One message of a conversation. `node` is the whole message in `json`, or NULL: then it has only a
// role and a content.
typedef struct qlora__text_turn {
    const char* role;
    const char* content; // NULL: null
    size_t length;
    bool masked; // an assistant turn that is not trained
    bool parts;  // the content is not in place yet
    const qlora__json_token* node;
} qlora__text_turn;

typedef struct qlora__text_talk {
    qlora_text_chat* chat;
    const qlora__text_turn* turns;
    size_t count;
    const qlora__json* json;         // of the nodes, and of:
    const qlora__json_token* record; // other keys are variables of the template; may be NULL
    bool literal; // nothing is changed: neither roles, nor contents, nor arguments
    // work, reused from turn to turn
    qlora_text_bytes whole;
    qlora_text_bytes before;
    qlora_text_bytes after;
    qlora_text_bytes next;
    qlora_text_spans spans;
    bool asks;   // a question follows the turns
    bool stable; // one text has all turns
} qlora__text_talk;

static void qlora__text_talk_free(qlora__env* env, qlora__text_talk* talk) {
    qlora__text_bytes_free(env, &talk->whole);
    qlora__text_bytes_free(env, &talk->before);
    qlora__text_bytes_free(env, &talk->after);
    qlora__text_bytes_free(env, &talk->next);
    qlora__env_free(env, talk->spans.data, talk->spans.capacity * sizeof(qlora_text_span));
}

// ---- values of a conversation

// Arguments that are a string become what the string says, if it is JSON.
static qlora_result qlora__text_arguments(qlora__jin_machine* m, qlora_text_chat* chat,
                                          qlora__jin_value* arguments) {
    const qlora__jin_string* s = arguments->as.string;
    void* data = chat->parsed;
    qlora__json json;
    qlora_result r = qlora__text_reserve(m->env, &data, &chat->parsed_capacity, chat->parsed_count,
                                         1, sizeof(qlora__json));
    chat->parsed = (qlora__json*)data;
    QLORA__TRY(r);
    r = qlora__text_json(m->env, "arguments", s->data, s->bytes, &json);
    if (r != QLORA_OK) {
        return r == QLORA_ERR_MEMORY ? r : QLORA_OK; // not JSON: it stays the string
    }
    chat->parsed[chat->parsed_count++] = json;
    return qlora__jin_from_json(m, &json, json.tokens, arguments);
}

static qlora_result qlora__text_tool_calls(qlora__jin_machine* m, qlora_text_chat* chat,
                                           qlora__jin_value calls) {
    for (size_t i = 0; calls.kind == QLORA__JIN_LIST && i < calls.as.list->count; i++) {
        qlora__jin_value call = calls.as.list->items[i];
        if (call.kind != QLORA__JIN_DICT) {
            continue;
        }
        size_t at = qlora__jin_dict_at(call.as.dict, "function", 8);
        bool inner = at < call.as.dict->count && call.as.dict->values[at].kind == QLORA__JIN_DICT;
        qlora__jin_dict* function = inner ? call.as.dict->values[at].as.dict : call.as.dict;
        at = qlora__jin_dict_at(function, "arguments", 9);
        if (at < function->count && function->values[at].kind == QLORA__JIN_STRING) {
            QLORA__TRY(qlora__text_arguments(m, chat, &function->values[at]));
        }
    }
    return QLORA_OK;
}

// The message as the template sees it.
static qlora_result qlora__text_turn_value(qlora__jin_machine* m, const qlora__text_talk* talk,
                                           const qlora__text_turn* turn, qlora__jin_value* out) {
    qlora__jin_value content = qlora__jin_none();
    qlora__jin_value role;
    if (talk->literal && turn->node != NULL) {
        return qlora__jin_from_json(m, talk->json, turn->node, out);
    }
    QLORA__TRY(qlora__jin_string_of(m, turn->role, &role));
    if (turn->content != NULL) {
        QLORA__TRY(qlora__jin_string_share(m, turn->content, turn->length, &content));
    }
    QLORA__TRY(qlora__jin_dict_make(m, QLORA__JIN_DICT, 4, out));
    QLORA__TRY(qlora__jin_dict_put(m, out->as.dict, "role", role));
    QLORA__TRY(qlora__jin_dict_put(m, out->as.dict, "content", content));
    if (turn->node == NULL) {
        return QLORA_OK;
    }
    static const char* const ours[] = {"role", "content", "from", "value", "weight", "train"};
    qlora__jin_value all;
    QLORA__TRY(qlora__jin_from_json(m, talk->json, turn->node, &all));
    for (size_t i = 0; all.kind == QLORA__JIN_DICT && i < all.as.dict->count; i++) {
        qlora__jin_value key = all.as.dict->keys[i];
        bool known = false;
        for (size_t k = 0; k < QLORA__TEXT_COUNT(ours); k++) {
            known = known || qlora__jin_is(key, ours[k], strlen(ours[k]));
        }
        if (!known) {
            QLORA__TRY(qlora__jin_dict_add(m, out->as.dict, key, all.as.dict->values[i]));
        }
        if (qlora__jin_is(key, "tool_calls", 10) && !talk->chat->keeps_strings) {
            QLORA__TRY(qlora__text_tool_calls(m, talk->chat, all.as.dict->values[i]));
        }
    }
    return QLORA_OK;
}

// Keys of a record that are variables of the template. chat_template_kwargs has them in an object.
static qlora_result qlora__text_talk_extras(qlora__jin_machine* m, const qlora__text_talk* talk,
                                            bool* tools) {
    static const char* const used[] = {"tools", "documents", "enable_thinking", "thinking"};
    qlora__jin_value all;
    *tools = false;
    if (talk->record == NULL) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__jin_from_json(m, talk->json, talk->record, &all));
    for (size_t i = 0; i < all.as.dict->count; i++) {
        qlora__jin_value key = all.as.dict->keys[i];
        qlora__jin_value value = all.as.dict->values[i];
        bool known = talk->literal;
        for (size_t k = 0; k < QLORA__TEXT_COUNT(used); k++) {
            known = known || qlora__jin_is(key, used[k], strlen(used[k]));
        }
        if (known && !qlora__jin_is(key, "messages", 8)) {
            QLORA__TRY(qlora__jin_dict_set(m, m->globals, key, value));
        }
        *tools = *tools || (qlora__jin_is(key, "tools", 5) && qlora__jin_truth(value));
        if (qlora__jin_is(key, "chat_template_kwargs", 20) && value.kind == QLORA__JIN_DICT) {
            for (size_t k = 0; k < value.as.dict->count; k++) {
                QLORA__TRY(qlora__jin_dict_set(m, m->globals, value.as.dict->keys[k],
                                               value.as.dict->values[k]));
            }
        }
    }
    return QLORA_OK;
}

// The variables of a rendering of the first `count` turns.
static qlora_result qlora__text_talk_set(qlora__jin_machine* m, const qlora__text_talk* talk,
                                         size_t count, bool prompt) {
    qlora__jin_value list;
    bool tools = false;
    QLORA__TRY(qlora__jin_set(m, "tools", qlora__jin_none()));
    QLORA__TRY(qlora__jin_set(m, "documents", qlora__jin_none()));
    for (size_t i = 0; i < 4; i++) {
        QLORA__TRY(qlora__jin_set_text(m, qlora__text_token_names[i], talk->chat->tokens[i].data));
    }
    QLORA__TRY(qlora__text_talk_extras(m, talk, &tools));
    QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_LIST, count, &list));
    for (size_t i = 0; i < count; i++) {
        qlora__jin_value turn;
        QLORA__TRY(qlora__text_turn_value(m, talk, &talk->turns[i], &turn));
        QLORA__TRY(qlora__jin_list_add(m, list.as.list, turn));
    }
    if (talk->asks) {
        qlora__text_turn question;
        qlora__jin_value turn;
        memset(&question, 0, sizeof question);
        question.role = "user";
        question.content = "a";
        question.length = 1;
        QLORA__TRY(qlora__text_turn_value(m, talk, &question, &turn));
        QLORA__TRY(qlora__jin_list_add(m, list.as.list, turn));
    }
    QLORA__TRY(qlora__jin_set(m, "messages", list));
    return qlora__jin_set(m, "add_generation_prompt", qlora__jin_bool(prompt));
}

static bool qlora__text_talk_has_tools(const qlora__text_talk* talk) {
    const qlora__json_token* tools =
        talk->record != NULL ? qlora__text_json_get(talk->json, talk->record, "tools") : NULL;
    return tools != NULL && tools->kind == QLORA__JSON_ARRAY && tools->count > 0;
}

static qlora_text_template* qlora__text_talk_template(const qlora__text_talk* talk) {
    bool tools = talk->chat->with_tools != NULL && qlora__text_talk_has_tools(talk);
    return tools ? talk->chat->with_tools : talk->chat->template_;
}

// Renders the first `count` turns into `out`, which is emptied first.
static qlora_result qlora__text_talk_render(qlora__env* env, const qlora__text_talk* talk,
                                            size_t count, bool prompt, qlora_text_bytes* out,
                                            qlora_text_spans* spans) {
    qlora_text_chat* chat = talk->chat;
    qlora_text_template* source = qlora__text_talk_template(talk);
    qlora__jin_machine m;
    qlora__jin_buffer text;
    uint64_t input = 4096;
    memset(&text, 0, sizeof text);
    out->count = 0;
    for (size_t i = 0; i < count; i++) {
        const qlora__text_turn* turn = &talk->turns[i];
        input += turn->node != NULL ? turn->node->end - turn->node->begin : 0;
        input += turn->length;
    }
    qlora_result r = qlora__jin_begin(source, input, &m);
    m.clock = chat->clock;
    r = r == QLORA_OK ? qlora__text_talk_set(&m, talk, count, prompt) : r;
    r = r == QLORA_OK ? qlora__jin_execute(source, &m, &text) : r;
    r = r == QLORA_OK ? qlora__text_bytes_add(env, out, text.data, text.count) : r;
    for (size_t i = 0; r == QLORA_OK && spans != NULL && i < m.span_count; i++) {
        r = qlora__jin_spans_add(env, spans, m.spans[i].begin, m.spans[i].end);
    }
    qlora__jin_end(source, &m);
    while (chat->parsed_count > 0) {
        qlora__json_free(env, &chat->parsed[--chat->parsed_count]);
    }
    return r;
}

// ---- text to ids

typedef struct qlora__text_output {
    qlora_text_ids* ids;
    qlora_text_ids* labels; // may be NULL
    size_t start;           // of this sample, in both
    size_t labels_start;
} qlora__text_output;

static qlora__text_output qlora__text_output_start(qlora_text_ids* ids, qlora_text_ids* labels) {
    qlora__text_output o;
    o.ids = ids;
    o.labels = labels;
    o.start = ids->count;
    o.labels_start = labels != NULL ? labels->count : 0;
    return o;
}

static qlora_result qlora__text_output_label(qlora__env* env, const qlora__text_output* o,
                                             bool trained) {
    while (o->labels != NULL && o->labels->count - o->labels_start < o->ids->count - o->start) {
        int32_t id = o->ids->data[o->start + (o->labels->count - o->labels_start)];
        QLORA__TRY(qlora__text_ids_add(env, o->labels, trained ? id : -100));
    }
    return QLORA_OK;
}

static bool qlora__text_is_marker(const qlora_text_tok* tok, int32_t id) {
    return qlora__text_tok_has(tok, id, QLORA__TEXT_K_ADDED | QLORA__TEXT_K_SPECIAL);
}

// One piece of the text, all trained or all not.
static qlora_result qlora__text_output_piece(qlora__env* env, const qlora__text_output* o,
                                             const qlora_text_chat* chat, const char* text,
                                             size_t size, bool trained) {
    qlora_text_tok* tok = chat->tok;
    size_t from = o->ids->count;
    if (size > 0) {
        // Text that follows plain text continues it: no space is prepended.
        bool fresh = from == o->start || qlora__text_is_marker(tok, o->ids->data[from - 1]);
        QLORA__TRY(qlora__text_encode(env, tok, text, size,
                                      fresh ? 0u : (uint32_t)QLORA_TEXT_CONTINUE, o->ids));
    }
    bool first = from == o->start;
    if (first && chat->bos >= 0 && (o->ids->count == from || o->ids->data[from] != chat->bos)) {
        QLORA__TRY(qlora__text_ids_add(env, o->ids, chat->bos));
        memmove(o->ids->data + from + 1, o->ids->data + from,
                (o->ids->count - from - 1) * sizeof(int32_t));
        o->ids->data[from] = chat->bos;
    }
    if (first && trained && o->ids->count > from && o->ids->data[from] == chat->bos &&
        o->labels != NULL) {
        QLORA__TRY(qlora__text_ids_add(env, o->labels, -100)); // BOS is never generated
    }
    // a built-in format may end with a marker that this tokenizer does not have
    size_t count = o->ids->count;
    if (trained && chat->built_in && chat->eos >= 0 &&
        (count == from || !qlora__text_is_marker(tok, o->ids->data[count - 1]))) {
        QLORA__TRY(qlora__text_ids_add(env, o->ids, chat->eos));
    }
    return qlora__text_output_label(env, o, trained);
}

// The markers in a text: how many, whether there is nothing else but whitespace, whether it ends
// with one, and the first one if the text starts with it.
typedef struct qlora__text_marks_seen {
    size_t count;
    bool alone;
    bool last;
    int32_t first; // -1: something else comes first
} qlora__text_marks_seen;

static qlora_result qlora__text_see_markers(qlora__env* env, const qlora_text_chat* chat,
                                            const char* text, size_t size,
                                            qlora__text_marks_seen* seen) {
    const qlora_text_tok* tok = chat->tok;
    qlora_text_ids ids;
    size_t at = 0;
    memset(&ids, 0, sizeof ids);
    memset(seen, 0, sizeof *seen);
    seen->first = -1;
    seen->alone = true;
    qlora_result r = size == 0 ? QLORA_OK
                               : qlora__text_encode(env, chat->tok, text, size,
                                                    (uint32_t)QLORA_TEXT_CONTINUE, &ids);
    for (size_t i = 0; r == QLORA_OK && i < ids.count; i++) {
        if (!qlora__text_is_marker(tok, ids.data[i])) {
            continue;
        }
        qlora__text_span name = tok->spans[ids.data[i]];
        size_t hit = qlora__jin_find_bytes(text, size, at, tok->names.data + name.at, name.size);
        if (hit == SIZE_MAX) {
            continue;
        }
        seen->alone = seen->alone && qlora__jin_skip_space(text, hit, at) == hit;
        seen->first = seen->count == 0 && hit == 0 ? ids.data[i] : seen->first;
        seen->count++;
        at = hit + name.size;
    }
    seen->alone = seen->alone && qlora__jin_skip_space(text, size, at) == size;
    seen->last = seen->count > 0 && at == size;
    qlora__text_ids_free(env, &ids);
    return r;
}

// A whole text. Spans are in order and do not overlap.
static qlora_result qlora__text_output_text(qlora__env* env, const qlora__text_output* o,
                                            const qlora_text_chat* chat,
                                            const qlora_text_bytes* text,
                                            const qlora_text_spans* spans) {
    size_t at = 0;
    for (size_t i = 0; i < spans->count; i++) {
        size_t begin = spans->data[i].begin;
        size_t end = spans->data[i].end;
        if (begin < at || end > text->count) {
            return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                   "the template's generation blocks overlap");
        }
        QLORA__TRY(qlora__text_output_piece(env, o, chat, text->data + at, begin - at, false));
        if (end > begin) {
            QLORA__TRY(
                qlora__text_output_piece(env, o, chat, text->data + begin, end - begin, true));
        }
        at = end;
    }
    size_t last = text->count;
    if (o->labels != NULL && spans->count == 0 && last > 0) { // no whitespace after the last marker
        qlora__text_marks_seen seen;
        size_t cut = qlora__jin_back_space(text->data, 0, last);
        QLORA__TRY(qlora__text_see_markers(env, chat, text->data, cut, &seen));
        last = seen.last ? cut : last;
    }
    if (at < last || o->ids->count == o->start) {
        QLORA__TRY(qlora__text_output_piece(env, o, chat, text->data + at, last - at, false));
    }
    // what follows the last trained token teaches nothing
    size_t count = o->ids->count - o->start;
    while (o->labels != NULL && count > 0 && o->labels->data[o->labels_start + count - 1] == -100) {
        count--;
    }
    if (o->labels != NULL && count > 0) {
        o->ids->count = o->start + count;
        o->labels->count = o->labels_start + count;
    }
    return QLORA_OK;
}

// ---- what is trained

static size_t qlora__text_common(const qlora_text_bytes* a, const qlora_text_bytes* b) {
    size_t same = 0;
    while (same < a->count && same < b->count && a->data[same] == b->data[same]) {
        same++;
    }
    while (same > 0 && same < a->count && ((unsigned char)a->data[same] & 0xC0) == 0x80) {
        same--; // not inside a character
    }
    return same;
}

static bool qlora__text_starts(const qlora_text_bytes* text, const qlora_text_bytes* start,
                               size_t size) {
    return text->count >= size && start->count >= size &&
           (size == 0 || memcmp(text->data, start->data, size) == 0);
}

// Where the answer ends in talk->after. What follows its end marker is not generated: whitespace,
// and what the template writes only at the end of a conversation (such as EOS). A template that
// writes the end marker only when something follows gets it here. `next` is a longer rendering.
static qlora_result qlora__text_answer_end(qlora__env* env, qlora__text_talk* talk, size_t begin,
                                           const qlora_text_bytes* next, size_t* end) {
    const qlora_text_chat* chat = talk->chat;
    qlora_text_bytes* after = &talk->after;
    qlora__text_marks_seen seen;
    size_t same = qlora__text_common(after, next);
    *end = after->count;
    // two markers may start alike, so the difference may begin inside one
    for (size_t back = 0; back < 24 && same > begin + back && same < after->count; back++) {
        size_t from = same - back;
        QLORA__TRY(
            qlora__text_see_markers(env, chat, after->data + from, after->count - from, &seen));
        if (seen.alone) {
            *end = from;
            break;
        }
    }
    size_t cut = qlora__jin_back_space(after->data, begin, *end);
    QLORA__TRY(qlora__text_see_markers(env, chat, after->data + begin, cut - begin, &seen));
    if (seen.last) {
        *end = cut;
        return QLORA_OK;
    }
    if (same < after->count || next->count == same) {
        *end = after->count;
        return QLORA_OK;
    }
    QLORA__TRY(qlora__text_see_markers(env, chat, next->data + same, next->count - same, &seen));
    if (seen.first >= 0 && seen.count > 1) {
        qlora__text_span name = chat->tok->spans[seen.first];
        QLORA__TRY(qlora__text_bytes_add(env, after, chat->tok->names.data + name.at, name.size));
        *end = after->count;
    }
    return QLORA_OK;
}

// A rendering that goes on after turn k: the whole conversation, or with a question added.
static qlora_result qlora__text_talk_next(qlora__env* env, qlora__text_talk* talk, size_t k,
                                          const qlora_text_bytes** out) {
    *out = &talk->whole;
    if (k + 1 < talk->count) {
        return QLORA_OK;
    }
    char error[QLORA__ERROR_SIZE];
    memcpy(error, env->error, sizeof error);
    talk->asks = true;
    qlora_result r = qlora__text_talk_render(env, talk, k + 1, false, &talk->next, NULL);
    talk->asks = false;
    *out = &talk->next;
    if (r == QLORA_ERR_FORMAT) { // not every turn may be followed by a question
        memcpy(env->error, error, sizeof error);
        talk->next.count = 0;
        return QLORA_OK;
    }
    return r;
}

// A template that ignores tool calls would train an empty answer.
static qlora_result qlora__text_turn_calls(qlora__env* env, const qlora__text_talk* talk, size_t k,
                                           size_t begin, size_t end) {
    const qlora__json_token* node = talk->turns[k].node;
    const qlora__json_token* calls =
        node != NULL ? qlora__text_json_get(talk->json, node, "tool_calls") : NULL;
    qlora__text_marks_seen seen;
    if (calls == NULL || calls->kind != QLORA__JSON_ARRAY || calls->count == 0) {
        return QLORA_OK;
    }
    QLORA__TRY(
        qlora__text_see_markers(env, talk->chat, talk->after.data + begin, end - begin, &seen));
    return seen.alone && talk->turns[k].length == 0
               ? qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                 "message %lu has tool_calls, which the template does not render",
                                 (unsigned long)k + 1)
               : QLORA_OK;
}

// The answer of turn k: talk->after is the text up to it, *begin and *end its place there.
static qlora_result qlora__text_turn_span(qlora__env* env, qlora__text_talk* talk, size_t k,
                                          size_t* begin, size_t* end) {
    const qlora_text_bytes* next = NULL;
    QLORA__TRY(qlora__text_talk_render(env, talk, k, true, &talk->before, NULL));
    QLORA__TRY(qlora__text_talk_render(env, talk, k + 1, false, &talk->after, NULL));
    size_t size = talk->before.count;
    if (!qlora__text_starts(&talk->after, &talk->before, size)) {
        size_t same = qlora__text_common(&talk->before, &talk->after);
        size_t shown = size - same < 40 ? size - same : 40;
        return qlora__env_fail(
            env, QLORA_ERR_UNSUPPORTED,
            "message %lu: the template's generation prompt goes on with \"%.*s\", but its answer "
            "does not start like that, so what to train is unclear; use a template with "
            "{%% generation %%} blocks (--chat-template)",
            (unsigned long)k + 1, (int)shown, talk->before.data + same);
    }
    *begin = size;
    QLORA__TRY(qlora__text_talk_next(env, talk, k, &next));
    QLORA__TRY(qlora__text_answer_end(env, talk, size, next, end));
    return qlora__text_turn_calls(env, talk, k, *begin, *end);
}

static bool qlora__text_is_trained(const qlora__text_turn* turn) {
    return strcmp(turn->role, "assistant") == 0 && !turn->masked;
}

// Generation blocks: one span for each assistant turn, unless nothing has to be left out.
static qlora_result qlora__text_talk_blocks(qlora__env* env, qlora__text_talk* talk) {
    size_t answers = 0;
    size_t masked = 0;
    size_t kept = 0;
    size_t at = 0;
    for (size_t i = 0; i < talk->count; i++) {
        bool assistant = strcmp(talk->turns[i].role, "assistant") == 0;
        answers += assistant ? 1 : 0;
        masked += assistant && talk->turns[i].masked ? 1 : 0;
    }
    if (masked > 0 && talk->spans.count != answers) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "the template has %lu generation blocks for %lu answers, so it is "
                               "unclear which of them are not to be trained",
                               (unsigned long)talk->spans.count, (unsigned long)answers);
    }
    for (size_t i = 0; masked > 0 && i < talk->count; i++) {
        if (strcmp(talk->turns[i].role, "assistant") == 0) {
            if (!talk->turns[i].masked) {
                talk->spans.data[kept++] = talk->spans.data[at];
            }
            at++;
        }
    }
    talk->spans.count = masked > 0 ? kept : talk->spans.count;
    return QLORA_OK;
}

// Renders the whole conversation and finds its trained spans; talk->stable is false when one text
// cannot have them all.
static qlora_result qlora__text_talk_plan(qlora__env* env, qlora__text_talk* talk) {
    bool blocks = qlora__text_talk_template(talk)->generation;
    talk->spans.count = 0;
    talk->stable = true;
    QLORA__TRY(qlora__text_talk_render(env, talk, talk->count, false, &talk->whole,
                                       blocks ? &talk->spans : NULL));
    if (blocks) {
        return qlora__text_talk_blocks(env, talk);
    }
    for (size_t k = 0; k < talk->count && talk->stable; k++) {
        size_t begin = 0;
        size_t end = 0;
        if (!qlora__text_is_trained(&talk->turns[k])) {
            continue;
        }
        QLORA__TRY(qlora__text_turn_span(env, talk, k, &begin, &end));
        if (k + 1 == talk->count &&
            qlora__text_starts(&talk->after, &talk->whole, talk->whole.count)) {
            // the last answer may have got its end marker
            QLORA__TRY(qlora__text_bytes_add(env, &talk->whole,
                                             talk->after.data + talk->whole.count,
                                             talk->after.count - talk->whole.count));
        }
        talk->stable = qlora__text_starts(&talk->whole, &talk->after, end);
        QLORA__TRY(qlora__jin_spans_add(env, &talk->spans, begin, end));
    }
    return QLORA_OK;
}

// The sample of turn k alone, for templates that change earlier turns.
static qlora_result qlora__text_talk_turn(qlora__env* env, qlora__text_talk* talk, size_t k,
                                          const qlora__text_output* o) {
    size_t begin = 0;
    size_t end = 0;
    QLORA__TRY(qlora__text_turn_span(env, talk, k, &begin, &end));
    talk->spans.count = 0;
    QLORA__TRY(qlora__jin_spans_add(env, &talk->spans, begin, end));
    return qlora__text_output_text(env, o, talk->chat, &talk->after, &talk->spans);
}

// Appends ids and labels of the whole conversation.
static qlora_result qlora__text_talk_encode(qlora__env* env, qlora__text_talk* talk, bool prompt,
                                            qlora_text_ids* ids, qlora_text_ids* labels) {
    qlora__text_output o = qlora__text_output_start(ids, labels);
    if (prompt || labels == NULL) {
        talk->spans.count = 0;
        QLORA__TRY(qlora__text_talk_render(env, talk, talk->count, prompt, &talk->whole, NULL));
        return qlora__text_output_text(env, &o, talk->chat, &talk->whole, &talk->spans);
    }
    QLORA__TRY(qlora__text_talk_plan(env, talk));
    if (!talk->stable) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "the template renders earlier turns differently when later ones "
                               "follow, so one text cannot train them all");
    }
    return qlora__text_output_text(env, &o, talk->chat, &talk->whole, &talk->spans);
}

// ---- the public functions

// The marker that ends an answer also ends generation: found by rendering one.
static qlora_result qlora__text_chat_probe(qlora__env* env, qlora_text_chat* chat) {
    qlora__text_turn turns[2];
    qlora__text_talk talk;
    qlora_text_ids ids;
    qlora_text_ids labels;
    memset(turns, 0, sizeof turns);
    memset(&talk, 0, sizeof talk);
    memset(&ids, 0, sizeof ids);
    memset(&labels, 0, sizeof labels);
    for (int i = 0; i < 2; i++) {
        turns[i].role = i == 0 ? "user" : "assistant";
        turns[i].content = "a";
        turns[i].length = 1;
    }
    talk.chat = chat;
    talk.turns = turns;
    talk.count = 2;
    qlora_result r = qlora__text_talk_encode(env, &talk, false, &ids, &labels);
    if (r == QLORA_OK && ids.count > 0 && labels.data[ids.count - 1] != -100 &&
        qlora__text_is_marker(chat->tok, ids.data[ids.count - 1])) {
        qlora__text_chat_add_stop(chat, ids.data[ids.count - 1]);
    }
    qlora__text_talk_free(env, &talk);
    qlora__text_ids_free(env, &ids);
    qlora__text_ids_free(env, &labels);
    // a template that cannot render this may well render others
    return r == QLORA_ERR_MEMORY ? r : QLORA_OK;
}

qlora_result qlora_text_chat_open(qlora_text* text, const qlora_text_chat_desc* desc,
                                  qlora_text_chat** out) {
    if (text == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__env* env = &text->env;
    qlora__text_enter(text, "qlora_text_chat_open");
    QLORA__TEXT_NEED(env, desc);
    QLORA__TEXT_NEED(env, out);
    QLORA__TEXT_NEED(env, desc->tok);
    if (desc->reserved_must_be_zero0 != 0 || desc->reserved_must_be_zero1 != 0) {
        return qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                               "desc was not zeroed: a reserved field is set");
    }
    if (desc->tok->text != text) {
        return qlora__env_fail(env, QLORA_ERR_ARGUMENT, "desc->tok belongs to another text object");
    }
    qlora_text_chat* chat = (qlora_text_chat*)qlora__text_zalloc(env, 1, sizeof(qlora_text_chat));
    if (chat == NULL) {
        return QLORA_ERR_MEMORY;
    }
    chat->text = text;
    chat->tok = desc->tok;
    chat->eos = -1;
    chat->bos = qlora__text_tok_bos(desc->tok);
    chat->clock = desc->clock != 0 ? desc->clock : QLORA__TEXT_CLOCK;
    qlora_result r = qlora__text_chat_fill(env, chat, desc);
    r = r == QLORA_OK ? qlora__text_chat_probe(env, chat) : r;
    if (r != QLORA_OK) {
        qlora__text_chat_free(env, chat);
        return r;
    }
    QLORA__TEXT_LOG(env, INFO, "chat format %s (%s)", chat->name, chat->source);
    text->chats++;
    chat->tok->users++;
    *out = chat;
    return QLORA_OK;
}

qlora_result qlora_text_chat_close(qlora_text_chat* chat) {
    if (chat != NULL) {
        qlora_text* text = chat->text;
        qlora__text_enter(text, "qlora_text_chat_close");
        chat->tok->users--;
        text->chats--;
        qlora__text_chat_free(&text->env, chat);
    }
    return QLORA_OK;
}

const char* qlora_text_chat_names(size_t index) {
    return index < QLORA__TEXT_COUNT(qlora__text_formats) ? qlora__text_formats[index].name : NULL;
}

qlora_result qlora_text_chat_query(qlora_text_chat* chat, qlora_text_chat_info* out) {
    if (chat == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__text_enter(chat->text, "qlora_text_chat_query");
    QLORA__TEXT_NEED(&chat->text->env, out);
    out->name = chat->name;
    out->source = chat->source;
    out->eos = chat->eos;
    out->stops = chat->stops;
    out->stop_count = chat->stop_count;
    return QLORA_OK;
}

qlora_result qlora_text_chat_set_clock(qlora_text_chat* chat, int64_t clock) {
    if (chat == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__text_enter(chat->text, "qlora_text_chat_set_clock");
    chat->clock = clock;
    return QLORA_OK;
}

qlora_result qlora_text_chat_encode(qlora_text_chat* chat, const qlora_text_message* messages,
                                    size_t count, bool prompt, qlora_text_ids* ids,
                                    qlora_text_ids* labels) {
    if (chat == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__env* env = &chat->text->env;
    qlora__text_enter(chat->text, "qlora_text_chat_encode");
    QLORA__TEXT_NEED(env, ids);
    for (size_t i = 0; i < count; i++) {
        if (messages == NULL || messages[i].role == NULL ||
            (messages[i].content == NULL && messages[i].length > 0)) {
            return qlora__env_fail(env, QLORA_ERR_ARGUMENT, "message %lu: %s is NULL",
                                   (unsigned long)i,
                                   messages == NULL           ? "messages"
                                   : messages[i].role == NULL ? "role"
                                                              : "content");
        }
    }
    size_t before = ids->count;
    size_t labels_before = labels != NULL ? labels->count : 0;
    qlora__text_talk talk;
    void* memory = NULL;
    memset(&talk, 0, sizeof talk);
    memory = qlora__text_zalloc(env, count, sizeof(qlora__text_turn));
    if (memory == NULL && count > 0) {
        return QLORA_ERR_MEMORY;
    }
    qlora__text_turn* turns = (qlora__text_turn*)memory;
    for (size_t i = 0; i < count; i++) {
        turns[i].role = messages[i].role;
        turns[i].content = messages[i].content != NULL ? messages[i].content : "";
        turns[i].length = messages[i].length;
        turns[i].masked = messages[i].masked;
    }
    talk.chat = chat;
    talk.turns = turns;
    talk.count = count;
    qlora_result r = qlora__text_talk_encode(env, &talk, prompt, ids, labels);
    qlora__text_talk_free(env, &talk);
    qlora__env_free(env, turns, count * sizeof(qlora__text_turn));
    if (r != QLORA_OK) {
        ids->count = before;
        if (labels != NULL) {
            labels->count = labels_before;
        }
    }
    return r;
}

// The messages of a conversation in JSON, as they are.
static qlora_result qlora__text_json_turns(qlora__env* env, const qlora__json* json,
                                           qlora__text_turn** out, size_t* count) {
    const qlora__json_token* list = qlora__text_json_get(json, json->tokens, "messages");
    if (list == NULL || list->kind != QLORA__JSON_ARRAY) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "the conversation must be an object {\"messages\": [...]}");
    }
    qlora__text_turn* turns =
        (qlora__text_turn*)qlora__text_zalloc(env, list->count, sizeof(qlora__text_turn));
    if (turns == NULL && list->count > 0) {
        return QLORA_ERR_MEMORY;
    }
    const qlora__json_token* node = list + 1;
    for (uint32_t i = 0; i < list->count; i++) {
        const char* role = qlora__text_json_cstring(json, qlora__text_json_get(json, node, "role"));
        turns[i].role = role != NULL ? role : "";
        turns[i].node = node;
        node = qlora__text_json_next(json, node);
    }
    *out = turns;
    *count = list->count;
    return QLORA_OK;
}

qlora_result qlora_text_chat_encode_json(qlora_text_chat* chat, const char* conversation,
                                         size_t size, bool prompt, qlora_text_bytes* text,
                                         qlora_text_ids* ids, qlora_text_ids* labels) {
    if (chat == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__env* env = &chat->text->env;
    qlora__text_talk talk;
    qlora__json json;
    qlora__text_turn* turns = NULL;
    memset(&talk, 0, sizeof talk);
    qlora__text_enter(chat->text, "qlora_text_chat_encode_json");
    QLORA__TEXT_NEED(env, conversation);
    QLORA__TEXT_NEED(env, ids);
    size_t before = ids->count;
    size_t labels_before = labels != NULL ? labels->count : 0;
    QLORA__TRY(qlora__text_json(env, "the conversation", conversation, size, &json));
    qlora_result r = qlora__text_json_turns(env, &json, &turns, &talk.count);
    talk.chat = chat;
    talk.turns = turns;
    talk.json = &json;
    talk.record = json.tokens;
    talk.literal = true;
    r = r == QLORA_OK ? qlora__text_talk_encode(env, &talk, prompt, ids, labels) : r;
    if (r == QLORA_OK && text != NULL) {
        r = qlora__text_bytes_add(env, text, talk.whole.data, talk.whole.count);
    }
    qlora__env_free(env, turns, talk.count * sizeof(qlora__text_turn));
    qlora__text_talk_free(env, &talk);
    qlora__json_free(env, &json);
    if (r != QLORA_OK) {
        ids->count = before;
        if (labels != NULL) {
            labels->count = labels_before;
        }
    }
    return r;
}

//@@ src/text/data.h

typedef struct qlora__text_record {
    size_t begin;
    size_t count;
    size_t trained;
    size_t line;
} qlora__text_record;

struct qlora_text_data {
    qlora_text* text;
    qlora_text_ids ids;
    qlora_text_ids labels;
    qlora__text_record* records;
    size_t count;
    size_t capacity;
    qlora_text_bytes
        ignored; // names that no sample used, each with ", " after it; ends with a zero
};

// The state of reading one file.
typedef struct qlora__text_loader {
    const qlora_text_data_desc* desc;
    qlora_text_tok* tok;
    qlora_text_data* data;
    const char* name; // of the file
    const char* form; // the only form of record that is read, or NULL
    qlora__json* json;
    qlora__text_turn* messages;
    size_t message_count;
    size_t message_capacity;
    const qlora__json_token* record; // what the messages belong to
    size_t begin;                    // where its sample starts in the ids
    size_t line;
    qlora_text_bytes work;  // contents that were joined from parts, one after another
    qlora_text_ids numbers; // a list that belongs to the ids of one record
} qlora__text_loader;

static void qlora__text_data_free(qlora__env* env, qlora_text_data* data) {
    qlora__text_ids_free(env, &data->ids);
    qlora__text_ids_free(env, &data->labels);
    qlora__text_bytes_free(env, &data->ignored);
    qlora__env_free(env, data->records, data->capacity * sizeof *data->records);
    qlora__env_free(env, data, sizeof *data);
}

// Everything from `begin` becomes one sample.
static qlora_result qlora__text_data_close_record(qlora__env* env, qlora_text_data* data,
                                                  size_t begin, size_t line) {
    void* records = data->records;
    qlora_result r = qlora__text_reserve(env, &records, &data->capacity, data->count, 1,
                                         sizeof(qlora__text_record));
    data->records = (qlora__text_record*)records;
    QLORA__TRY(r);
    // even a file of empty records has arrays to point into
    QLORA__TRY(qlora__text_ids_room(env, &data->ids, 1));
    QLORA__TRY(qlora__text_ids_room(env, &data->labels, 1));
    qlora__text_record* record = &data->records[data->count++];
    record->begin = begin;
    record->count = data->ids.count - begin;
    record->line = line;
    record->trained = 0;
    for (size_t i = begin + 1; i < data->ids.count; i++) {
        record->trained += data->labels.data[i] != -100 ? 1 : 0;
    }
    return QLORA_OK;
}

static qlora_result qlora__text_label_rest(qlora__env* env, qlora_text_data* data, bool trained) {
    while (data->labels.count < data->ids.count) {
        int32_t id = data->ids.data[data->labels.count];
        QLORA__TRY(qlora__text_ids_add(env, &data->labels, trained ? id : -100));
    }
    return QLORA_OK;
}

// BOS before ids[begin..), unless the text itself starts with it.
static qlora_result qlora__text_data_bos(qlora__env* env, const qlora__text_loader* loader,
                                         size_t begin) {
    qlora_text_ids* ids = &loader->data->ids;
    int32_t bos = loader->desc->chat->bos;
    if (bos >= 0 && (ids->count == begin || ids->data[begin] != bos)) {
        QLORA__TRY(qlora__text_ids_add(env, ids, bos));
        memmove(ids->data + begin + 1, ids->data + begin,
                (ids->count - begin - 1) * sizeof(int32_t));
        ids->data[begin] = bos;
    }
    return bos < 0 ? QLORA_OK : qlora__text_ids_add(env, &loader->data->labels, -100);
}

static qlora_result qlora__text_data_eos(qlora__env* env, const qlora__text_loader* loader) {
    qlora_text_data* data = loader->data;
    int32_t eos = loader->desc->chat->eos;
    bool there = data->ids.count > 0 && data->ids.data[data->ids.count - 1] == eos;
    if (eos >= 0 && !there) {
        QLORA__TRY(qlora__text_ids_add(env, &data->ids, eos));
    }
    return qlora__text_label_rest(env, data, true);
}

// {"text"} and {"prompt", "completion"}: the first part, which may be empty, is not trained.
static qlora_result qlora__text_data_plain(qlora__env* env, const qlora__text_loader* loader,
                                           const char* prompt, size_t prompt_size, const char* text,
                                           size_t size) {
    qlora_text_data* data = loader->data;
    qlora_text_tok* tok = loader->tok;
    size_t begin = data->ids.count;
    if (prompt_size + size == 0) {
        return QLORA_OK; // an empty sample, which the caller can count
    }
    if (prompt_size > 0) {
        QLORA__TRY(qlora__text_encode(env, tok, prompt, prompt_size, 0, &data->ids));
        QLORA__TRY(qlora__text_data_bos(env, loader, begin));
        QLORA__TRY(qlora__text_label_rest(env, data, loader->desc->train_prompt));
        QLORA__TRY(qlora__text_encode(env, tok, text, size, QLORA_TEXT_CONTINUE, &data->ids));
    } else {
        QLORA__TRY(qlora__text_encode(env, tok, text, size, 0, &data->ids));
        QLORA__TRY(qlora__text_data_bos(env, loader, begin));
    }
    QLORA__TRY(qlora__text_label_rest(env, data, true));
    return qlora__text_data_eos(env, loader);
}

// ---- messages

static qlora_result qlora__text_message_add(qlora__env* env, qlora__text_loader* loader,
                                            const char* role, const char* content, size_t length,
                                            bool masked) {
    void* data = loader->messages;
    qlora_result r = qlora__text_reserve(env, &data, &loader->message_capacity,
                                         loader->message_count, 1, sizeof(qlora__text_turn));
    loader->messages = (qlora__text_turn*)data;
    QLORA__TRY(r);
    qlora__text_turn* message = &loader->messages[loader->message_count++];
    memset(message, 0, sizeof *message);
    message->parts = content == NULL;
    message->role = role;
    message->content = content;
    message->length = length;
    message->masked = masked;
    return QLORA_OK;
}

// The names that data sets use.
static const char* qlora__text_role_of(const char* name) {
    static const char* const names[][2] = {
        {"system", "system"},     {"developer", "system"}, {"user", "user"},
        {"human", "user"},        {"prompter", "user"},    {"assistant", "assistant"},
        {"gpt", "assistant"},     {"model", "assistant"},  {"bot", "assistant"},
        {"chatgpt", "assistant"}, {"tool", "tool"},        {"observation", "tool"},
        {"ipython", "tool"},      {"function", "tool"}};
    for (size_t i = 0; i < QLORA__TEXT_COUNT(names); i++) {
        if (strcmp(name, names[i][0]) == 0) {
            return names[i][1];
        }
    }
    return NULL;
}

// Joins a content in parts, [{"type": "text", "text": ...}, ...], in loader->work.
static qlora_result qlora__text_message_parts(qlora__env* env, qlora__text_loader* loader,
                                              const qlora__json_token* parts, size_t* at) {
    const qlora__json* json = loader->json;
    const qlora__json_token* part = parts + 1;
    *at = loader->work.count;
    for (uint32_t i = 0; i < parts->count; i++) {
        const qlora__json_token* type = qlora__text_json_get(json, part, "type");
        const qlora__json_token* text = qlora__text_json_get(json, part, "text");
        const char* kind = qlora__text_json_cstring(json, type);
        if (kind != NULL && strcmp(kind, "text") != 0) {
            return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                   "has a content part of the type \"%.60s\"; only \"text\" is "
                                   "supported",
                                   kind);
        }
        if (!qlora__text_json_string(text)) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "has a content part without a string in \"text\"");
        }
        QLORA__TRY(qlora__text_bytes_add(env, &loader->work, qlora__text_json_text(json, text),
                                         qlora__text_json_size(text)));
        part = qlora__text_json_next(json, part);
    }
    return QLORA_OK;
}

// Neither absent, null, false nor empty.
static bool qlora__text_is_filled(const qlora__json_token* value) {
    if (qlora__text_json_absent(value) || value->kind == QLORA__JSON_FALSE) {
        return false;
    }
    if (value->kind == QLORA__JSON_STRING) {
        return qlora__text_json_size(value) > 0;
    }
    bool list = value->kind == QLORA__JSON_ARRAY || value->kind == QLORA__JSON_OBJECT;
    return !list || value->count > 0;
}

// ---- names that are not used

enum { QLORA__TEXT_IGNORED_BYTES = 1024 }; // the list ends with "..." when it gets longer

// Adds a name to the list of ignored ones. A name that is there already changes nothing.
static qlora_result qlora__text_ignore(qlora__env* env, qlora_text_data* data, const char* before,
                                       const char* name) {
    char clean[48];
    char entry[80];
    qlora_text_bytes* list = &data->ignored;
    snprintf(clean, sizeof clean, "%s", name);
    qlora__env_clean(env, clean, sizeof clean);
    snprintf(entry, sizeof entry, "%s%s, ", before, clean);
    size_t size = strlen(entry);
    for (size_t at = 0; at < list->count; at++) {
        bool start = at == 0 || list->data[at - 1] == ' ';
        if (start && list->count - at >= size && memcmp(list->data + at, entry, size) == 0) {
            return QLORA_OK;
        }
    }
    if (list->count > QLORA__TEXT_IGNORED_BYTES) {
        return QLORA_OK;
    }
    return list->count + size > QLORA__TEXT_IGNORED_BYTES
               ? qlora__text_bytes_add(env, list, "..., ", 5)
               : qlora__text_bytes_add(env, list, entry, size);
}

// Reads "weight" or "train": 0 and false switch training off, 1 and true on.
static qlora_result qlora__text_switch(qlora__env* env, const qlora__json* json,
                                       const qlora__json_token* node, const char* name,
                                       bool* masked) {
    const qlora__json_token* value = qlora__text_json_get(json, node, name);
    double number = 1.0;
    if (qlora__text_json_absent(value) || value->kind == QLORA__JSON_TRUE) {
        return QLORA_OK;
    }
    if (value->kind == QLORA__JSON_FALSE) {
        *masked = true;
        return QLORA_OK;
    }
    bool read = value->kind == QLORA__JSON_NUMBER &&
                qlora__json_double(json, (uint32_t)(value - json->tokens), &number);
    if (!read) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "has a \"%s\" that is neither a number nor true or false", name);
    }
    if (number != 0.0 && number != 1.0) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "has the \"%s\" %g; only 0 and 1 are supported", name, number);
    }
    *masked = *masked || number == 0.0;
    return QLORA_OK;
}

// Refuses what would change the text or its training, and lists the names that have no effect.
static qlora_result qlora__text_message_names(qlora__env* env, qlora__text_loader* loader,
                                              const qlora__json_token* node, bool* extra) {
    static const char* const used[] = {"role", "from", "content", "value", "weight", "train"};
    // names that a model's own template knows what to do with; a built-in one does not
    static const char* const passed[] = {"reasoning_content", "reasoning", "thinking",
                                         "tool_calls",        "name",      "tool_call_id"};
    static const char* const refused[] = {
        "reasoning_content", "reasoning",    "thinking", "tool_calls", "function_call",
        "tool_call_id",      "train_detail", "images",   "audio",      "videos"};
    bool built_in = loader->desc->chat->built_in;
    const qlora__json* json = loader->json;
    const qlora__json_token* key = node + 1;
    for (uint32_t i = 0; node->kind == QLORA__JSON_OBJECT && i < node->count; i++) {
        const char* name = qlora__text_json_text(json, key);
        const qlora__json_token* value = qlora__text_json_next(json, key);
        bool known = !qlora__text_is_filled(value);
        for (size_t k = 0; k < QLORA__TEXT_COUNT(used); k++) {
            known = known || strcmp(name, used[k]) == 0;
        }
        for (size_t k = 0; k < QLORA__TEXT_COUNT(passed) && !built_in && !known; k++) {
            known = strcmp(name, passed[k]) == 0;
            *extra = *extra || known;
        }
        for (size_t k = 0; k < QLORA__TEXT_COUNT(refused) && !known; k++) {
            if (strcmp(name, refused[k]) == 0) {
                return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                       "has \"%s\", which is not supported", name);
            }
        }
        if (!known) {
            QLORA__TRY(qlora__text_ignore(env, loader->data, "messages/", name));
        }
        key = qlora__text_json_next(json, value);
    }
    return QLORA_OK;
}

static qlora_result qlora__text_message_read(qlora__env* env, qlora__text_loader* loader,
                                             const qlora__json_token* node, bool masked) {
    const qlora__json* json = loader->json;
    const qlora__json_token* role = qlora__text_json_get(json, node, "role");
    const qlora__json_token* content = qlora__text_json_get(json, node, "content");
    role = role != NULL ? role : qlora__text_json_get(json, node, "from");
    content = content != NULL ? content : qlora__text_json_get(json, node, "value");
    const char* name = qlora__text_json_cstring(json, role);
    if (name == NULL) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "has no \"role\" (or \"from\")");
    }
    const char* known = qlora__text_role_of(name);
    bool tool = known != NULL && strcmp(known, "tool") == 0;
    if (known == NULL || (tool && loader->desc->chat->built_in)) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "has the role \"%.60s\", which is not supported", name);
    }
    bool extra = false;
    QLORA__TRY(qlora__text_message_names(env, loader, node, &extra));
    QLORA__TRY(qlora__text_switch(env, json, node, "weight", &masked));
    QLORA__TRY(qlora__text_switch(env, json, node, "train", &masked));
    size_t at = 0;
    if (qlora__text_json_string(content)) {
        QLORA__TRY(qlora__text_message_add(env, loader, known, qlora__text_json_text(json, content),
                                           qlora__text_json_size(content), masked));
    } else if (content != NULL && content->kind == QLORA__JSON_ARRAY) {
        QLORA__TRY(qlora__text_message_parts(env, loader, content, &at));
        // the parts may still move: their place is known when all messages are read
        QLORA__TRY(
            qlora__text_message_add(env, loader, known, NULL, loader->work.count - at, masked));
    } else if (qlora__text_json_absent(content) &&
               qlora__text_is_filled(qlora__text_json_get(json, node, "tool_calls"))) {
        QLORA__TRY(qlora__text_message_add(env, loader, known, "", 0, masked));
        loader->messages[loader->message_count - 1].content = NULL; // None, as it is given
    } else {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "has no text in \"content\" (or \"value\")");
    }
    loader->messages[loader->message_count - 1].node = extra ? node : NULL;
    return QLORA_OK;
}

static qlora_result qlora__text_messages_read(qlora__env* env, qlora__text_loader* loader,
                                              const qlora__json_token* array, const char* name,
                                              bool masked) {
    if (array->kind != QLORA__JSON_ARRAY) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "\"%s\" is not a list", name);
    }
    const qlora__json_token* node = array + 1;
    for (uint32_t i = 0; i < array->count; i++) {
        qlora_result r = qlora__text_message_read(env, loader, node, masked);
        if (r != QLORA_OK) {
            return qlora__env_wrap(env, r, "\"%s\": message %lu ", name, (unsigned long)i + 1);
        }
        node = qlora__text_json_next(loader->json, node);
    }
    return QLORA_OK;
}

// Where the contents in parts are, and which turns are trained.
static void qlora__text_data_turns(const qlora__text_loader* loader) {
    size_t at = 0;
    size_t last = 0;
    for (size_t i = 0; i < loader->message_count; i++) {
        qlora__text_turn* message = &loader->messages[i];
        if (message->parts) {
            message->content = message->length > 0 ? loader->work.data + at : "";
            at += message->length;
        }
        last = strcmp(message->role, "assistant") == 0 ? i : last;
    }
    for (size_t i = 0; i < loader->message_count; i++) {
        qlora__text_turn* message = &loader->messages[i];
        message->masked = message->masked || (loader->desc->last_turn_only && i != last);
    }
}

static void qlora__text_data_train_all(const qlora__text_loader* loader, size_t begin) {
    qlora_text_data* data = loader->data;
    for (size_t i = begin; loader->desc->train_prompt && i < data->ids.count; i++) {
        bool bos = i == begin && data->ids.data[i] == loader->desc->chat->bos;
        data->labels.data[i] = bos ? -100 : data->ids.data[i];
    }
}

// A template that changes earlier turns: one sample for each turn that is trained.
static qlora_result qlora__text_data_by_turn(qlora__env* env, qlora__text_loader* loader,
                                             qlora__text_talk* talk) {
    qlora_text_data* data = loader->data;
    bool first = true;
    for (size_t k = 0; k < talk->count; k++) {
        if (!qlora__text_is_trained(&talk->turns[k])) {
            continue;
        }
        if (!first) {
            QLORA__TRY(qlora__text_data_close_record(env, data, loader->begin, loader->line));
            loader->begin = data->ids.count;
        }
        first = false;
        qlora__text_output o = qlora__text_output_start(&data->ids, &data->labels);
        QLORA__TRY(qlora__text_talk_turn(env, talk, k, &o));
        qlora__text_data_train_all(loader, o.start);
    }
    return QLORA_OK;
}

// Makes the sample, or the samples, from the collected messages.
static qlora_result qlora__text_data_chat(qlora__env* env, qlora__text_loader* loader) {
    qlora_text_data* data = loader->data;
    qlora__text_talk talk;
    memset(&talk, 0, sizeof talk);
    if (loader->message_count == 0) {
        return QLORA_OK;
    }
    qlora__text_data_turns(loader);
    talk.chat = loader->desc->chat;
    talk.turns = loader->messages;
    talk.count = loader->message_count;
    talk.json = loader->json;
    talk.record = loader->record;
    qlora__text_output o = qlora__text_output_start(&data->ids, &data->labels);
    qlora_result r = qlora__text_talk_plan(env, &talk);
    if (r == QLORA_OK && talk.stable) {
        r = qlora__text_output_text(env, &o, talk.chat, &talk.whole, &talk.spans);
        qlora__text_data_train_all(loader, o.start);
    } else if (r == QLORA_OK) {
        r = qlora__text_data_by_turn(env, loader, &talk);
    }
    qlora__text_talk_free(env, &talk);
    return r;
}

//@@ src/text/records.h

// The forms of a record: the names that it must have. The first column is its name in desc.format.
typedef enum qlora__text_kind {
    QLORA__TEXT_R_IDS = 1,
    QLORA__TEXT_R_CHAT = 2,
    QLORA__TEXT_R_COMPLETION = 4,
    QLORA__TEXT_R_PAIR = 8,
    QLORA__TEXT_R_TEXT = 16
} qlora__text_kind;

typedef struct qlora__text_form {
    const char* name;
    const char* first;
    const char* second; // or NULL
    qlora__text_kind kind;
} qlora__text_form;

static const qlora__text_form qlora__text_forms[] = {
    {"ids", "input_ids", NULL, QLORA__TEXT_R_IDS},
    {"messages", "messages", NULL, QLORA__TEXT_R_CHAT},
    {"conversations", "conversations", NULL, QLORA__TEXT_R_CHAT},
    {"prompt", "prompt", "completion", QLORA__TEXT_R_COMPLETION},
    {"prompt", "prompt", "response", QLORA__TEXT_R_COMPLETION},
    {"instruction", "instruction", "output", QLORA__TEXT_R_PAIR},
    {"instruction", "instruction", "response", QLORA__TEXT_R_PAIR},
    {"question", "question", "answer", QLORA__TEXT_R_PAIR},
    {"question", "question", "response", QLORA__TEXT_R_PAIR},
    {"text", "text", NULL, QLORA__TEXT_R_TEXT},
    {"input", "input", "output", QLORA__TEXT_R_PAIR}}; // only if nothing else fits

enum { QLORA__TEXT_INPUT_FORM = QLORA__TEXT_COUNT(qlora__text_forms) - 1 };

// Names that are used beside those of the form.
static const struct {
    const char* name;
    int kinds;
} qlora__text_extras[] = {
    {"labels", QLORA__TEXT_R_IDS},
    {"attention_mask", QLORA__TEXT_R_IDS},
    {"position_ids", QLORA__TEXT_R_IDS},
    {"system", QLORA__TEXT_R_CHAT | QLORA__TEXT_R_COMPLETION | QLORA__TEXT_R_PAIR},
    {"input", QLORA__TEXT_R_PAIR},
    {"context", QLORA__TEXT_R_PAIR},
    {"history", QLORA__TEXT_R_PAIR},
    {"tools", QLORA__TEXT_R_CHAT | QLORA__TEXT_R_COMPLETION},
    {"documents", QLORA__TEXT_R_CHAT | QLORA__TEXT_R_COMPLETION},
    {"enable_thinking", QLORA__TEXT_R_CHAT | QLORA__TEXT_R_COMPLETION},
    {"thinking", QLORA__TEXT_R_CHAT | QLORA__TEXT_R_COMPLETION},
    {"chat_template_kwargs", QLORA__TEXT_R_CHAT | QLORA__TEXT_R_COMPLETION}};

// Names that say which tokens are trained, in ways that are not read here.
static const char* const qlora__text_masks[] = {"loss_mask", "completion_mask", "assistant_masks",
                                                "assistant_mask", "loss_weights"};

// A string, *out = NULL if it is absent, or an error that names it.
static qlora_result qlora__text_record_string(qlora__env* env, const qlora__text_loader* loader,
                                              const qlora__json_token* record, const char* name,
                                              const qlora__json_token** out) {
    const qlora__json_token* node = qlora__text_json_get(loader->json, record, name);
    *out = qlora__text_json_absent(node) ? NULL : node;
    return *out == NULL || qlora__text_json_string(node)
               ? QLORA_OK
               : qlora__env_fail(env, QLORA_ERR_FORMAT, "\"%s\" is not a string", name);
}

// Starts the messages with "system", if the record has it.
static qlora_result qlora__text_record_system(qlora__env* env, qlora__text_loader* loader,
                                              const qlora__json_token* record) {
    const qlora__json_token* system = NULL;
    QLORA__TRY(qlora__text_record_string(env, loader, record, "system", &system));
    if (system == NULL || qlora__text_json_size(system) == 0) {
        return QLORA_OK;
    }
    return qlora__text_message_add(env, loader, "system",
                                   qlora__text_json_text(loader->json, system),
                                   qlora__text_json_size(system), false);
}

// A list of messages, after "system".
static qlora_result qlora__text_record_chat(qlora__env* env, qlora__text_loader* loader,
                                            const qlora__json_token* record, const char* name) {
    QLORA__TRY(qlora__text_record_system(env, loader, record));
    size_t own = loader->message_count;
    QLORA__TRY(qlora__text_messages_read(
        env, loader, qlora__text_json_get(loader->json, record, name), name, false));
    if (own > 0 && loader->message_count > own &&
        strcmp(loader->messages[own].role, "system") == 0) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "\"system\" is given beside a system message in \"%s\"", name);
    }
    return qlora__text_data_chat(env, loader);
}

// history: [[user, assistant], ...]
static qlora_result qlora__text_record_history(qlora__env* env, qlora__text_loader* loader,
                                               const qlora__json_token* record) {
    const qlora__json* json = loader->json;
    const qlora__json_token* history = qlora__text_json_get(json, record, "history");
    if (!qlora__text_is_filled(history)) {
        return QLORA_OK;
    }
    static const char wanted[] = "\"history\" is not a list of [user, assistant]";
    if (history->kind != QLORA__JSON_ARRAY) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s", wanted);
    }
    const qlora__json_token* turn = history + 1;
    for (uint32_t i = 0; i < history->count; i++) {
        const qlora__json_token* user = turn + 1;
        if (turn->kind != QLORA__JSON_ARRAY || turn->count != 2 || !qlora__text_json_string(user) ||
            !qlora__text_json_string(qlora__text_json_next(json, user))) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s", wanted);
        }
        const qlora__json_token* reply = qlora__text_json_next(json, user);
        QLORA__TRY(qlora__text_message_add(env, loader, "user", qlora__text_json_text(json, user),
                                           qlora__text_json_size(user), false));
        QLORA__TRY(qlora__text_message_add(env, loader, "assistant",
                                           qlora__text_json_text(json, reply),
                                           qlora__text_json_size(reply), false));
        turn = qlora__text_json_next(json, turn);
    }
    return QLORA_OK;
}

// The text beside a question: "input" or "context". NULL if there is none.
static qlora_result qlora__text_record_input(qlora__env* env, const qlora__text_loader* loader,
                                             const qlora__json_token* record, bool question,
                                             const qlora__json_token** out) {
    const qlora__json_token* context = NULL;
    *out = NULL;
    if (!question) {
        QLORA__TRY(qlora__text_record_string(env, loader, record, "input", out));
    }
    QLORA__TRY(qlora__text_record_string(env, loader, record, "context", &context));
    bool input = *out != NULL && qlora__text_json_size(*out) > 0;
    if (context == NULL || qlora__text_json_size(context) == 0) {
        *out = input ? *out : NULL;
        return QLORA_OK;
    }
    if (input) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "has both \"input\" and \"context\"");
    }
    *out = context;
    return QLORA_OK;
}

// Alpaca and similar records. In the alpaca format the input has its own heading; elsewhere it
// follows the instruction on a new line.
static qlora_result qlora__text_record_pair(qlora__env* env, qlora__text_loader* loader,
                                            const qlora__json_token* record,
                                            const qlora__text_form* form) {
    const qlora__json* json = loader->json;
    const qlora__json_token* question = NULL;
    const qlora__json_token* answer = NULL;
    const qlora__json_token* input = NULL;
    QLORA__TRY(qlora__text_record_string(env, loader, record, form->first, &question));
    QLORA__TRY(qlora__text_record_string(env, loader, record, form->second, &answer));
    QLORA__TRY(
        qlora__text_record_input(env, loader, record, strcmp(form->first, "input") == 0, &input));
    bool alpaca = strcmp(loader->desc->chat->name, "alpaca") == 0;
    QLORA__TRY(qlora__text_record_system(env, loader, record));
    if (alpaca && input != NULL && loader->message_count == 0) {
        QLORA__TRY(qlora__text_message_add(env, loader, "system", qlora__text_alpaca_system_input,
                                           sizeof(qlora__text_alpaca_system_input) - 1, false));
    }
    QLORA__TRY(qlora__text_record_history(env, loader, record));
    if (input != NULL) {
        const char* between = alpaca ? "\n\n### Input:\n" : "\n";
        size_t at = loader->work.count;
        QLORA__TRY(qlora__text_bytes_add(env, &loader->work, qlora__text_json_text(json, question),
                                         qlora__text_json_size(question)));
        if (qlora__text_json_size(question) > 0) {
            QLORA__TRY(qlora__text_bytes_add(env, &loader->work, between, strlen(between)));
        }
        QLORA__TRY(qlora__text_bytes_add(env, &loader->work, qlora__text_json_text(json, input),
                                         qlora__text_json_size(input)));
        QLORA__TRY(
            qlora__text_message_add(env, loader, "user", NULL, loader->work.count - at, false));
    } else {
        QLORA__TRY(qlora__text_message_add(env, loader, "user",
                                           qlora__text_json_text(json, question),
                                           qlora__text_json_size(question), false));
    }
    QLORA__TRY(qlora__text_message_add(env, loader, "assistant",
                                       qlora__text_json_text(json, answer),
                                       qlora__text_json_size(answer), false));
    return qlora__text_data_chat(env, loader);
}

// Both as strings: plain text. Both as lists: messages.
static qlora_result qlora__text_record_completion(qlora__env* env, qlora__text_loader* loader,
                                                  const qlora__json_token* record,
                                                  const qlora__text_form* form) {
    const qlora__json* json = loader->json;
    const qlora__json_token* prompt = qlora__text_json_get(json, record, form->first);
    const qlora__json_token* completion = qlora__text_json_get(json, record, form->second);
    QLORA__TRY(qlora__text_record_system(env, loader, record));
    if (prompt->kind == QLORA__JSON_STRING && completion->kind == QLORA__JSON_STRING) {
        if (loader->message_count > 0) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "\"system\" cannot be used with a \"prompt\" that is a string; "
                                   "use messages");
        }
        return qlora__text_data_plain(
            env, loader, qlora__text_json_text(json, prompt), qlora__text_json_size(prompt),
            qlora__text_json_text(json, completion), qlora__text_json_size(completion));
    }
    if (prompt->kind == QLORA__JSON_ARRAY && completion->kind == QLORA__JSON_ARRAY) {
        QLORA__TRY(qlora__text_messages_read(env, loader, prompt, form->first, true));
        QLORA__TRY(qlora__text_messages_read(env, loader, completion, form->second, false));
        return qlora__text_data_chat(env, loader);
    }
    return qlora__env_fail(env, QLORA_ERR_FORMAT,
                           "\"%s\" and \"%s\" must be two strings or two lists of messages",
                           form->first, form->second);
}

// ---- token ids

static qlora_result qlora__text_record_labels(qlora__env* env, qlora__text_loader* loader,
                                              const qlora__json_token* labels, size_t begin) {
    qlora_text_data* data = loader->data;
    if (qlora__text_json_absent(labels)) {
        return qlora__text_label_rest(env, data, true);
    }
    qlora_result r = qlora__text_json_ids(env, loader->json, labels, &data->labels);
    if (r != QLORA_OK) {
        return qlora__env_wrap(env, r, "\"labels\": ");
    }
    if (data->labels.count != data->ids.count) {
        return qlora__env_fail(
            env, QLORA_ERR_FORMAT, "\"labels\" has %lu elements, \"input_ids\" %lu",
            (unsigned long)(data->labels.count - begin), (unsigned long)(data->ids.count - begin));
    }
    for (size_t i = begin; i < data->labels.count; i++) {
        if (data->labels.data[i] < 0 && data->labels.data[i] != -100) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "\"labels\": %d is neither an id nor -100",
                                   (int)data->labels.data[i]);
        }
    }
    return QLORA_OK;
}

// Reads a list with one number per token into loader->numbers; nothing if it is absent.
static qlora_result qlora__text_record_numbers(qlora__env* env, qlora__text_loader* loader,
                                               const qlora__json_token* record, const char* name,
                                               size_t wanted) {
    const qlora__json_token* list = qlora__text_json_get(loader->json, record, name);
    loader->numbers.count = 0;
    if (qlora__text_json_absent(list)) {
        return QLORA_OK;
    }
    qlora_result r = qlora__text_json_ids(env, loader->json, list, &loader->numbers);
    if (r != QLORA_OK) {
        return qlora__env_wrap(env, r, "\"%s\": ", name);
    }
    return loader->numbers.count == wanted
               ? QLORA_OK
               : qlora__env_fail(env, QLORA_ERR_FORMAT,
                                 "\"%s\" has %lu elements, \"input_ids\" %lu", name,
                                 (unsigned long)loader->numbers.count, (unsigned long)wanted);
}

// Drops the padding that an attention mask marks: zeros before and after the ones, not trained.
static qlora_result qlora__text_record_unpad(qlora__env* env, qlora__text_loader* loader,
                                             size_t begin, bool labelled) {
    qlora_text_data* data = loader->data;
    const int32_t* mask = loader->numbers.data;
    size_t count = loader->numbers.count;
    size_t first = 0;
    size_t end = count;
    while (end > 0 && mask[end - 1] == 0) {
        end--;
    }
    while (first < end && mask[first] == 0) {
        first++;
    }
    for (size_t i = 0; i < count; i++) {
        bool inside = i >= first && i < end;
        if (inside && mask[i] != 1) {
            return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                   "\"attention_mask\": element %lu is %d; only padding at the "
                                   "start or the end can be masked",
                                   (unsigned long)i, (int)mask[i]);
        }
        if (!inside && labelled && data->labels.data[begin + i] != -100) {
            return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                   "\"attention_mask\": element %lu is 0, but its label is not "
                                   "-100",
                                   (unsigned long)i);
        }
    }
    if (count > 0) {
        size_t bytes = (end - first) * sizeof(int32_t);
        memmove(data->ids.data + begin, data->ids.data + begin + first, bytes);
        memmove(data->labels.data + begin, data->labels.data + begin + first, bytes);
        data->ids.count = begin + end - first;
        data->labels.count = data->ids.count;
    }
    return QLORA_OK;
}

static qlora_result qlora__text_record_ids(qlora__env* env, qlora__text_loader* loader,
                                           const qlora__json_token* record) {
    qlora_text_data* data = loader->data;
    const qlora__json* json = loader->json;
    size_t begin = data->ids.count;
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__text_masks); i++) {
        if (qlora__text_is_filled(qlora__text_json_get(json, record, qlora__text_masks[i]))) {
            return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                   "\"%s\" is not supported; use \"labels\"", qlora__text_masks[i]);
        }
    }
    qlora_result r = qlora__text_json_ids(
        env, json, qlora__text_json_get(json, record, "input_ids"), &data->ids);
    if (r != QLORA_OK) {
        return qlora__env_wrap(env, r, "\"input_ids\": ");
    }
    size_t count = data->ids.count - begin;
    for (size_t i = begin; i < data->ids.count; i++) {
        if (data->ids.data[i] < 0) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT, "\"input_ids\": %d is negative",
                                   (int)data->ids.data[i]);
        }
    }
    const qlora__json_token* labels = qlora__text_json_get(json, record, "labels");
    QLORA__TRY(qlora__text_record_labels(env, loader, labels, begin));
    QLORA__TRY(qlora__text_record_numbers(env, loader, record, "position_ids", count));
    for (size_t i = 0; i < loader->numbers.count; i++) {
        if (loader->numbers.data[i] != (int32_t)i) {
            return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                   "\"position_ids\": element %lu is %d; only 0, 1, 2, ... is "
                                   "supported",
                                   (unsigned long)i, (int)loader->numbers.data[i]);
        }
    }
    QLORA__TRY(qlora__text_record_numbers(env, loader, record, "attention_mask", count));
    return qlora__text_record_unpad(env, loader, begin, !qlora__text_json_absent(labels));
}

// ---- one record

// Names the keys that the record has.
static qlora_result qlora__text_record_unknown(qlora__env* env, const qlora__text_loader* loader,
                                               const qlora__json_token* record) {
    char names[200];
    size_t used = 0;
    const qlora__json* json = loader->json;
    const qlora__json_token* key = record + 1;
    names[0] = 0;
    for (uint32_t i = 0; i < record->count && used + 40 < sizeof(names); i++) {
        const qlora__json_token* value = qlora__text_json_next(json, key);
        int wrote = snprintf(names + used, sizeof(names) - used, "%s%.30s%s", i > 0 ? ", " : "",
                             qlora__text_json_text(json, key),
                             value->kind == QLORA__JSON_NULL ? " (null)" : "");
        used += wrote > 0 ? (size_t)wrote : 0;
        key = qlora__text_json_next(json, value);
    }
    if (loader->form != NULL) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "the record does not have the format \"%s\"; found %s", loader->form,
                               names[0] != 0 ? names : "no keys");
    }
    return qlora__env_fail(env, QLORA_ERR_FORMAT,
                           "unrecognised record: expected text, prompt and completion, messages, "
                           "conversations, instruction and output, question and answer, or "
                           "input_ids; found %s",
                           names[0] != 0 ? names : "no keys");
}

static bool qlora__text_form_fits(const qlora__text_loader* loader, const qlora__json_token* record,
                                  const qlora__text_form* form) {
    const qlora__json* json = loader->json;
    return (loader->form == NULL || strcmp(loader->form, form->name) == 0) &&
           !qlora__text_json_absent(qlora__text_json_get(json, record, form->first)) &&
           (form->second == NULL ||
            !qlora__text_json_absent(qlora__text_json_get(json, record, form->second)));
}

// The one form that a record has; *out = NULL if it has none.
static qlora_result qlora__text_form_find(qlora__env* env, const qlora__text_loader* loader,
                                          const qlora__json_token* record,
                                          const qlora__text_form** out) {
    *out = NULL;
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__text_forms); i++) {
        const qlora__text_form* form = &qlora__text_forms[i];
        if (!qlora__text_form_fits(loader, record, form) ||
            (i == QLORA__TEXT_INPUT_FORM && *out != NULL && (*out)->kind == form->kind)) {
            continue;
        }
        if (*out != NULL) {
            const char* one = (*out)->second != NULL ? (*out)->second : (*out)->first;
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   strcmp((*out)->name, form->name) == 0
                                       ? "the record has both \"%s\" and \"%s\""
                                       : "the record has both \"%s\" and \"%s\"; set the format "
                                         "to say which one is used",
                                   one, form->second != NULL ? form->second : form->first);
        }
        *out = form;
    }
    return QLORA_OK;
}

// Lists the names that the form does not use.
static qlora_result qlora__text_record_names(qlora__env* env, qlora__text_loader* loader,
                                             const qlora__json_token* record,
                                             const qlora__text_form* form) {
    const qlora__json* json = loader->json;
    const qlora__json_token* key = record + 1;
    for (uint32_t i = 0; i < record->count; i++) {
        const char* name = qlora__text_json_text(json, key);
        const qlora__json_token* value = qlora__text_json_next(json, key);
        bool used = !qlora__text_is_filled(value) || strcmp(name, form->first) == 0 ||
                    (form->second != NULL && strcmp(name, form->second) == 0);
        for (size_t k = 0; k < QLORA__TEXT_COUNT(qlora__text_extras); k++) {
            used = used || ((qlora__text_extras[k].kinds & (int)form->kind) != 0 &&
                            strcmp(name, qlora__text_extras[k].name) == 0);
        }
        if (!used) {
            QLORA__TRY(qlora__text_ignore(env, loader->data, "", name));
        }
        key = qlora__text_json_next(json, value);
    }
    return QLORA_OK;
}

static qlora_result qlora__text_record_read(qlora__env* env, qlora__text_loader* loader,
                                            const qlora__json_token* record) {
    const qlora__json* json = loader->json;
    const qlora__text_form* form = NULL;
    const qlora__json_token* text = NULL;
    if (record->kind != QLORA__JSON_OBJECT) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "a record must be an object {...}");
    }
    loader->record = record;
    if (loader->desc->chat->built_in &&
        qlora__text_is_filled(qlora__text_json_get(json, record, "tools"))) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "\"tools\" are not supported by the chat format %s",
                               loader->desc->chat->name);
    }
    QLORA__TRY(qlora__text_form_find(env, loader, record, &form));
    if (form == NULL) {
        return qlora__text_record_unknown(env, loader, record);
    }
    QLORA__TRY(qlora__text_record_names(env, loader, record, form));
    switch (form->kind) {
    case QLORA__TEXT_R_IDS:
        return qlora__text_record_ids(env, loader, record);
    case QLORA__TEXT_R_CHAT:
        return qlora__text_record_chat(env, loader, record, form->first);
    case QLORA__TEXT_R_COMPLETION:
        return qlora__text_record_completion(env, loader, record, form);
    case QLORA__TEXT_R_PAIR:
        return qlora__text_record_pair(env, loader, record, form);
    default:
        QLORA__TRY(qlora__text_record_string(env, loader, record, form->first, &text));
        return qlora__text_data_plain(env, loader, NULL, 0, qlora__text_json_text(json, text),
                                      qlora__text_json_size(text));
    }
}

static qlora_result qlora__text_record_take(qlora__env* env, qlora__text_loader* loader,
                                            const qlora__json_token* record, size_t line) {
    loader->begin = loader->data->ids.count;
    loader->line = line;
    loader->message_count = 0;
    loader->work.count = 0;
    qlora_result r = qlora__text_record_read(env, loader, record);
    if (r != QLORA_OK) {
        return qlora__env_wrap(env, r, "%s:%lu: ", loader->name, (unsigned long)line);
    }
    return qlora__text_data_close_record(env, loader->data, loader->begin, line);
}

//@@ src/text/data_files.h

// How many lines end in these bytes.
static size_t qlora__text_lines(const char* text, size_t size) {
    size_t lines = 0;
    const char* p = text;
    const char* end = text + size;
    while (p < end && (p = (const char*)memchr(p, '\n', (size_t)(end - p))) != NULL) {
        lines++;
        p++;
    }
    return lines;
}

// The records of an array. `line` is the line of the first byte of json->text.
static qlora_result qlora__text_data_elements(qlora__env* env, qlora__text_loader* loader,
                                              const qlora__json_token* array, size_t line) {
    const qlora__json* json = loader->json;
    const qlora__json_token* record = array + 1;
    size_t seen = 0;
    for (uint32_t i = 0; i < array->count; i++) {
        size_t at = record->kind == QLORA__JSON_STRING ? seen : record->begin;
        line += qlora__text_lines(json->text + seen, at - seen);
        seen = at;
        QLORA__TRY(qlora__text_record_take(env, loader, record, line));
        record = qlora__text_json_next(json, record);
    }
    return QLORA_OK;
}

// {"data": [record, ...]}: the array, or NULL if this is an ordinary record.
static const qlora__json_token* qlora__text_data_inside(const qlora__text_loader* loader,
                                                        const qlora__json_token* record) {
    const qlora__json_token* list = qlora__text_json_get(loader->json, record, "data");
    if (list == NULL || list->kind != QLORA__JSON_ARRAY || list->count == 0 ||
        list[1].kind != QLORA__JSON_OBJECT) {
        return NULL;
    }
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__text_forms); i++) {
        if (qlora__text_form_fits(loader, record, &qlora__text_forms[i])) {
            return NULL;
        }
    }
    return list;
}

// A record, or an object around many of them.
static qlora_result qlora__text_data_value(qlora__env* env, qlora__text_loader* loader,
                                           size_t line) {
    static const qlora__text_form outer = {"", "data", NULL, QLORA__TEXT_R_TEXT};
    const qlora__json_token* record = loader->json->tokens;
    const qlora__json_token* list = qlora__text_data_inside(loader, record);
    if (list == NULL) {
        return qlora__text_record_take(env, loader, record, line);
    }
    QLORA__TRY(qlora__text_record_names(env, loader, record, &outer));
    return qlora__text_data_elements(env, loader, list, line);
}

// [record, record, ...]
static qlora_result qlora__text_data_array(qlora__env* env, qlora__text_loader* loader,
                                           const char* source, size_t size) {
    QLORA__TRY(qlora__text_json(env, loader->name, source, size, loader->json));
    return qlora__text_data_elements(env, loader, loader->json->tokens, 1);
}

static bool qlora__text_is_space(char c) {
    return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

// Parses the record at the start of json->text. A record may span several lines, so the end of a
// truncated one is looked for in the next line; the fault is then reported where it is.
static qlora_result qlora__text_data_parse(qlora__env* env, qlora__json* json, uint32_t* end) {
    qlora_result r = qlora__json_parse_one(env, json, true, end);
    const char* newline = (const char*)memchr(json->text, '\n', json->size);
    if (r != QLORA_ERR_FORMAT || newline == NULL) {
        return r == QLORA_OK ? qlora__json_decode(env, json) : r;
    }
    size_t line = (size_t)(newline - json->text);
    size_t next = line;
    while (next < json->size && qlora__text_is_space(json->text[next])) {
        next++;
    }
    bool starts = next == json->size || (json->text[next] == '{' && json->text[next - 1] == '\n');
    if (starts) {
        json->size = (uint32_t)line;
        r = qlora__json_parse_one(env, json, true, end);
        r = r == QLORA_OK ? QLORA_ERR_FORMAT : r; // unreachable: the whole was not valid
    }
    return r;
}

// One record per line. A record may span several lines, but a line never holds two.
static qlora_result qlora__text_data_lines(qlora__env* env, qlora__text_loader* loader,
                                           const char* source, size_t size) {
    qlora__json* json = loader->json;
    json->label = loader->name;
    size_t line = 1;
    size_t at = 0;
    for (;;) {
        size_t start = at;
        while (at < size && qlora__text_is_space(source[at])) {
            at++;
        }
        line += qlora__text_lines(source + start, at - start);
        if (at == size) {
            return QLORA_OK;
        }
        size_t left = size - at;
        uint32_t end = 0;
        json->text = source + at;
        // the limit is that of one record, not of the file
        json->size = left < QLORA__JSON_MAX_BYTES ? (uint32_t)left : QLORA__JSON_MAX_BYTES;
        json->line = (uint32_t)(line - 1);
        QLORA__TRY(qlora__text_data_parse(env, json, &end));
        QLORA__TRY(qlora__text_data_value(env, loader, line));
        line += qlora__text_lines(source + at, end);
        at += end;
    }
}

static qlora_result qlora__text_data_json(qlora__env* env, qlora__text_loader* loader,
                                          const char* source, size_t size) {
    qlora__json json;
    memset(&json, 0, sizeof(json));
    if (size >= 3 && memcmp(source, "\xEF\xBB\xBF", 3) == 0) {
        source += 3;
        size -= 3;
    }
    size_t at = 0;
    while (at < size && qlora__text_is_space(source[at])) {
        at++;
    }
    loader->json = &json;
    bool array = at < size && source[at] == '[';
    qlora_result r = array ? qlora__text_data_array(env, loader, source, size)
                           : qlora__text_data_lines(env, loader, source, size);
    qlora__json_free(env, &json);
    loader->json = NULL;
    return r;
}

// Splits the ids of one document, which start at `begin` without BOS, into samples of at most
// chunk_tokens. Without a BOS, every sample starts with the last token of the previous one, so that
// each token is a target once. The ids are moved in place, because a copy would cost as much memory
// as the samples themselves.
static qlora_result qlora__text_data_chunk(qlora__env* env, const qlora__text_loader* loader,
                                           size_t begin, size_t line) {
    qlora_text_data* data = loader->data;
    int32_t bos = loader->desc->chat->bos;
    size_t count = data->ids.count - begin;
    size_t head = bos >= 0 ? 1 : 0;
    size_t limit = loader->desc->chunk_tokens > 0 ? loader->desc->chunk_tokens : SIZE_MAX;
    size_t room = limit - head; // tokens of the document in one sample
    size_t stride = bos >= 0 ? room : room - 1;
    size_t samples = count > room ? 1 + (count - room + stride - 1) / stride : 1;
    size_t extra = bos >= 0 ? samples : samples - 1;
    QLORA__TRY(qlora__text_ids_room(env, &data->ids, extra + 1));
    QLORA__TRY(qlora__text_ids_room(env, &data->labels, count + extra + 1));
    int32_t* ids = data->ids.data + begin;
    for (size_t i = samples; i-- > 0;) {
        size_t part = count - i * stride < room ? count - i * stride : room;
        size_t to = samples > 1 ? i * limit : 0;
        memmove(ids + to + head, ids + i * stride, part * sizeof(int32_t));
        if (bos >= 0) {
            ids[to] = bos;
        }
    }
    data->ids.count = begin;
    for (size_t i = 0; i < samples; i++) {
        size_t start = data->ids.count;
        size_t part = count - i * stride < room ? count - i * stride : room;
        data->ids.count = start + head;
        QLORA__TRY(qlora__text_label_rest(env, data, false));
        data->ids.count += part;
        QLORA__TRY(qlora__text_label_rest(env, data, true));
        QLORA__TRY(qlora__text_data_close_record(env, data, start, line));
    }
    return QLORA_OK;
}

static qlora_result qlora__text_data_document(qlora__env* env, const qlora__text_loader* loader,
                                              const char* text, size_t size, size_t line) {
    int32_t bos = loader->desc->chat->bos;
    int32_t eos = loader->desc->chat->eos;
    qlora_text_ids* ids = &loader->data->ids;
    size_t begin = ids->count;
    QLORA__TRY(qlora__text_encode(env, loader->tok, text, size, 0, ids));
    if (bos >= 0 && ids->count > begin && ids->data[begin] == bos) {
        ids->count--; // spelt out in the text: it still comes exactly once
        memmove(ids->data + begin, ids->data + begin + 1, (ids->count - begin) * sizeof(int32_t));
    }
    bool there = ids->count > begin && ids->data[ids->count - 1] == eos;
    if (eos >= 0 && !there) {
        QLORA__TRY(qlora__text_ids_add(env, ids, eos));
    }
    return ids->count > begin ? qlora__text_data_chunk(env, loader, begin, line) : QLORA_OK;
}

// The line <|endoftext|> at or after `at`: its start, or `size`.
static size_t qlora__text_find_separator(const char* text, size_t size, size_t at) {
    static const char word[] = "<|endoftext|>";
    size_t length = sizeof(word) - 1;
    const char* hit;
    while ((hit = qlora__text_find(text + at, size - at, word)) != NULL) {
        size_t start = (size_t)(hit - text);
        size_t end = start + length;
        while (end < size && (text[end] == ' ' || text[end] == '\r')) {
            end++;
        }
        if ((start == 0 || text[start - 1] == '\n') && (end == size || text[end] == '\n')) {
            return start;
        }
        at = start + 1;
    }
    return size;
}

// Documents of a plain text, separated by lines of <|endoftext|>, or the whole text.
static qlora_result qlora__text_data_text(qlora__env* env, const qlora__text_loader* loader,
                                          const char* text, size_t size) {
    if (size >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0) {
        text += 3;
        size -= 3;
    }
    for (size_t at = 0; at < size;) {
        uint32_t code = 0;
        size_t length = qlora__text_utf8((const unsigned char*)text + at, size - at, &code);
        if (length == 0) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s:%lu: not UTF-8", loader->name,
                                   (unsigned long)qlora__text_lines(text, at) + 1);
        }
        at += length;
    }
    bool separated = qlora__text_find_separator(text, size, 0) < size;
    size_t line = 1;
    size_t at = 0;
    while (at < size) {
        size_t stop = qlora__text_find_separator(text, size, at);
        size_t begin = at;
        size_t end = stop;
        while (separated && begin < end && (text[begin] == '\n' || text[begin] == '\r')) {
            begin++;
        }
        while (separated && end > begin && (text[end - 1] == '\n' || text[end - 1] == '\r')) {
            end--;
        }
        size_t start = line + qlora__text_lines(text + at, begin - at);
        if (end > begin) {
            QLORA__TRY(qlora__text_data_document(env, loader, text + begin, end - begin, start));
        }
        const char* newline = (const char*)memchr(text + stop, '\n', size - stop);
        size_t next = newline != NULL ? (size_t)(newline - text) + 1 : size;
        line += qlora__text_lines(text + at, next - at);
        at = next;
    }
    return QLORA_OK;
}

// ---- formats

enum { QLORA__TEXT_FILE_UNKNOWN = 0, QLORA__TEXT_FILE_JSON, QLORA__TEXT_FILE_PLAIN };

// The formats of whole files: names in desc.format and, with a dot, endings.
static const struct {
    const char* name;
    int file;
} qlora__text_files[] = {{"jsonl", QLORA__TEXT_FILE_JSON},
                         {"ndjson", QLORA__TEXT_FILE_JSON},
                         {"json", QLORA__TEXT_FILE_JSON},
                         {"txt", QLORA__TEXT_FILE_PLAIN}};

const char* qlora_text_data_formats(size_t index) {
    const size_t files = QLORA__TEXT_COUNT(qlora__text_files);
    if (index < files) {
        return qlora__text_files[index].name;
    }
    for (size_t i = 0, number = files; i < QLORA__TEXT_COUNT(qlora__text_forms); i++) {
        const char* name = qlora__text_forms[i].name;
        bool again = i > 0 && strcmp(name, qlora__text_forms[i - 1].name) == 0;
        if (!again && number++ == index) {
            return name;
        }
    }
    return NULL;
}

static char qlora__text_lower(char c) {
    return c >= 'A' && c <= 'Z' ? (char)(c - 'A' + 'a') : c;
}

// Whether a name ends in a dot and `ending`, in any case.
static bool qlora__text_ends_with(const char* name, const char* ending) {
    size_t length = strlen(name);
    size_t size = strlen(ending);
    if (length <= size || name[length - size - 1] != '.') {
        return false;
    }
    for (size_t i = 0; i < size; i++) {
        if (qlora__text_lower(name[length - size + i]) != ending[i]) {
            return false;
        }
    }
    return true;
}

// What the file is: desc.format if it is set, else its ending. Standard input ("-") is JSON.
static qlora_result qlora__text_data_format(qlora__env* env, qlora__text_loader* loader,
                                            int* file) {
    const char* format = loader->desc->format;
    *file = format == NULL && strcmp(loader->desc->path, "-") == 0 ? QLORA__TEXT_FILE_JSON
                                                                   : QLORA__TEXT_FILE_UNKNOWN;
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__text_files); i++) {
        const char* name = qlora__text_files[i].name;
        if (format != NULL ? strcmp(format, name) == 0
                           : qlora__text_ends_with(loader->name, name)) {
            *file = qlora__text_files[i].file;
        }
    }
    for (size_t i = 0; format != NULL && i < QLORA__TEXT_COUNT(qlora__text_forms); i++) {
        if (strcmp(format, qlora__text_forms[i].name) == 0) {
            *file = QLORA__TEXT_FILE_JSON;
            loader->form = qlora__text_forms[i].name;
        }
    }
    if (*file != QLORA__TEXT_FILE_UNKNOWN) {
        return QLORA_OK;
    }
    if (format == NULL) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "%s: unknown data format; the file name must end in .jsonl, .json "
                               "or .txt, or the format must be given",
                               loader->name);
    }
    char names[160];
    size_t used = 0;
    for (size_t i = 0; qlora_text_data_formats(i) != NULL && used < sizeof names; i++) {
        int wrote = snprintf(names + used, sizeof names - used, "%s%s", i > 0 ? ", " : "",
                             qlora_text_data_formats(i));
        used += wrote > 0 ? (size_t)wrote : 0;
    }
    return qlora__env_fail(env, QLORA_ERR_ARGUMENT, "unknown data format \"%.60s\"; use one of %s",
                           format, names);
}

static qlora_result qlora__text_data_read(qlora__env* env, qlora__text_loader* loader,
                                          const char* source, size_t size) {
    int file = QLORA__TEXT_FILE_UNKNOWN;
    qlora_text_bytes* ignored = &loader->data->ignored;
    QLORA__TRY(qlora__text_data_format(env, loader, &file));
    QLORA__TRY(file == QLORA__TEXT_FILE_PLAIN ? qlora__text_data_text(env, loader, source, size)
                                              : qlora__text_data_json(env, loader, source, size));
    if (loader->data->count == 0) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: the file contains no records",
                               loader->name);
    }
    ignored->count -= ignored->count > 0 ? 2 : 0; // the last ", "
    return qlora__text_bytes_add(env, ignored, "", 1);
}

static qlora_result qlora__text_data_need(qlora_text* text, const qlora_text_data_desc* desc,
                                          qlora_text_data** out) {
    qlora__env* env = &text->env;
    QLORA__TEXT_NEED(env, desc);
    QLORA__TEXT_NEED(env, out);
    QLORA__TEXT_NEED(env, desc->path);
    QLORA__TEXT_NEED(env, desc->chat);
    if (desc->reserved_must_be_zero0 != 0 || desc->reserved_must_be_zero1 != 0) {
        return qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                               "desc was not zeroed: a reserved field is set");
    }
    if (desc->chat->text != text) {
        return qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                               "desc->chat belongs to another text object");
    }
    if (desc->chunk_tokens == 1) { // a sample would consist of BOS alone
        return qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                               "desc->chunk_tokens is 1; it must be 0 or at least 2");
    }
    return QLORA_OK;
}

static qlora_result qlora__text_data_load(qlora_text* text, const qlora_text_data_desc* desc,
                                          const char* source, size_t size, qlora_text_data** out) {
    qlora__env* env = &text->env;
    qlora__text_loader loader;
    memset(&loader, 0, sizeof(loader));
    loader.desc = desc;
    loader.tok = desc->chat->tok;
    loader.name = strcmp(desc->path, "-") == 0 ? "standard input" : desc->path;
    loader.data = (qlora_text_data*)qlora__text_zalloc(env, 1, sizeof(qlora_text_data));
    if (loader.data == NULL) {
        return QLORA_ERR_MEMORY;
    }
    loader.data->text = text;
    qlora_result r = qlora__text_data_read(env, &loader, source, size);
    qlora__env_free(env, loader.messages, loader.message_capacity * sizeof *loader.messages);
    qlora__text_bytes_free(env, &loader.work);
    qlora__text_ids_free(env, &loader.numbers);
    if (r != QLORA_OK) {
        qlora__text_data_free(env, loader.data);
        return r;
    }
    QLORA__TEXT_LOG(env, INFO, "%s: %llu samples", loader.name,
                    (unsigned long long)loader.data->count);
    if (loader.data->ignored.data[0] != 0) {
        QLORA__TEXT_LOG(env, WARN, "%s: ignored names: %s", loader.name, loader.data->ignored.data);
    }
    text->datas++;
    *out = loader.data;
    return QLORA_OK;
}

qlora_result qlora_text_data_load(qlora_text* text, const qlora_text_data_desc* desc,
                                  const void* data, size_t size, qlora_text_data** out) {
    if (text == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__text_enter(text, "qlora_text_data_load");
    QLORA__TRY(qlora__text_data_need(text, desc, out));
    if (data == NULL && size > 0) {
        return qlora__env_fail(&text->env, QLORA_ERR_ARGUMENT, "data is NULL");
    }
    return qlora__text_data_load(text, desc, (const char*)data, size, out);
}

qlora_result qlora_text_data_open(qlora_text* text, const qlora_text_data_desc* desc,
                                  qlora_text_data** out) {
    if (text == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__text_enter(text, "qlora_text_data_open");
    QLORA__TRY(qlora__text_data_need(text, desc, out));
    qlora_text_bytes file;
    memset(&file, 0, sizeof(file));
    qlora_result r = qlora__text_file_read(&text->env, desc->path, &file, NULL);
    r = r == QLORA_OK ? qlora__text_data_load(text, desc, file.data, file.count, out) : r;
    qlora__text_bytes_free(&text->env, &file);
    return r;
}

qlora_result qlora_text_data_close(qlora_text_data* data) {
    if (data != NULL) {
        qlora_text* text = data->text;
        qlora__text_enter(text, "qlora_text_data_close");
        text->datas--;
        qlora__text_data_free(&text->env, data);
    }
    return QLORA_OK;
}

qlora_result qlora_text_data_query(qlora_text_data* data, qlora_text_data_info* out) {
    if (data == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__text_enter(data->text, "qlora_text_data_query");
    QLORA__TEXT_NEED(&data->text->env, out);
    out->count = data->count;
    out->ignored = data->ignored.data;
    return QLORA_OK;
}

size_t qlora_text_data_count(const qlora_text_data* data) {
    return data != NULL ? data->count : 0;
}

qlora_result qlora_text_sample_read(qlora_text_data* data, size_t index, qlora_text_sample* out) {
    if (data == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__text_enter(data->text, "qlora_text_sample_read");
    QLORA__TEXT_NEED(&data->text->env, out);
    if (index >= data->count) {
        return qlora__env_fail(&data->text->env, QLORA_ERR_ARGUMENT,
                               "index is %llu; it must be below %llu", (unsigned long long)index,
                               (unsigned long long)data->count);
    }
    const qlora__text_record* record = &data->records[index];
    out->ids = data->ids.data + record->begin;
    out->labels = data->labels.data + record->begin;
    out->count = record->count;
    out->trained = record->trained;
    out->line = record->line;
    return QLORA_OK;
}

//@@ src/qlora_text.h

#if defined(__clang__)
#pragma clang diagnostic pop
#endif

#endif // QLORA_TEXT_IMPLEMENTATION_DONE
#endif // QLORA_TEXT_IMPLEMENTATION

/*
    Licence: MIT No Attribution, or the Unlicense, at your choice. See LICENSE for the texts. The
    Unicode tables are under the Unicode License V3, which is quoted where they start.
*/
//@@ end 341f80d48a5c7dbb
