/* qlora_text.h - v0.3.0-dev - tokenizers, chat templates, training data - SPDX: MIT-0 OR Unlicense

   Do this in ONE C or C++ file:

       #define QLORA_TEXT_IMPLEMENTATION
       #include "qlora_text.h"

   and include "qlora_text.h" without the macro everywhere else. It needs no other file; a program
   may include qlora.h of the same version as well, in either order.

   CONTENTS  (grep -n '^//@@' qlora_text.h lists every part)

       api                           linkage, results and hooks; shared with qlora.h
       text/api                      declarations: text, arrays, tokenizers
       text/api_chat                 declarations: templates and chats
       text/api_data                 declarations: data
       platform                      files and memory of the operating system; shared with qlora.h
       core                          errors, log, memory, files; shared with qlora.h
       formats                       JSON, regular expressions, stop ids, GGUF metadata; shared with
                                     qlora.h. gzip, Snappy, Zstandard, Parquet
       text/base                     the text object, growing arrays, whole files
       text/gguf_folder              files of a model folder, made from a GGUF file
       text/no_gguf                  the error in its place, if GGUF files are left out
       text/folder                   files of a model folder, or of a GGUF file
       text/unicode/classes          classes of characters
       text/unicode/tables           generated tables
       text/unicode/characters       UTF-8, normalisation
       text/unicode/case_tables      generated tables of upper and lower case
       text/unicode/case             upper and lower case, digits
       text/values                   JSON values as the loaders use them
       text/maps                     hash tables: byte strings, pairs of numbers
       text/pattern/view             a text to be split, by characters
       text/pattern/compile          regular expressions: compiling
       text/pattern/match            regular expressions: matching
       text/tokens/split             pre-tokenizers
       text/tokens/tokenizer         a tokenizer
       text/tokens/unigram           one word to ids: Unigram
       text/tokens/bpe               one word to ids: BPE
       text/unicode/grapheme_tables  generated tables of graphemes
       text/unicode/graphemes        borders between graphemes
       text/tokens/charsmap          the map of SentencePiece's normalizer
       text/tokens/normalize         normalizers
       text/tokens/load_model        tokenizer.json: tokens and merges
       text/tokens/load              tokenizer.json: the steps around them
       text/pattern/api              regular expressions as objects
       text/tokens/load_scored       vocabularies whose tokens have scores
       text/tokens/load_gguf         the tokenizer in a GGUF file
       text/tokens/load_bin          tokenizer.bin of llama2.c; opening and asking
       text/tokens/new_tokens        tokenizers with more tokens, and their files
       text/tokens/encode            text to ids
       text/tokens/lines             where a long text can be split
       text/tokens/decode            ids to text
       text/template/base            values of templates, memory, limits
       text/template/lex             templates: tokens
       text/template/parse           templates: expressions to a tree
       text/template/parse_tags      templates: statements to a tree
       text/template/scope           templates: which variable a name means
       text/template/value           text, comparison, iteration of values
       text/template/number          operators
       text/template/json            JSON to values and back
       text/template/format          formats and dates
       text/template/strings         what strings can do
       text/template/methods         methods of values
       text/template/iterate         map, select, sorting
       text/template/filters         filters
       text/template/filters_number  filters of numbers
       text/template/layout          filters that lay text out
       text/template/html            filters for HTML
       text/template/tables          tables of filters and tests
       text/template/eval            expressions
       text/template/run             statements and macros
       text/template/api             templates as objects
       text/chat/formats             built-in chat templates
       text/chat/template            which file of a folder has the template
       text/chat/chat                which template a model has
       text/chat/output              rendered texts to ids and labels
       text/chat/turns               conversations as values of a template
       text/chat/trained             what of a conversation is trained
       text/chat/encode              conversations to ids
       text/chat/save                the format of a chat, kept with an adapter
       text/data/samples             samples in memory, or found again in a file
       text/data/input               the bytes of a data file, in order
       text/data/input_gzip          those inside gzip
       text/data/messages            messages
       text/data/records             one record to a sample
       text/data/source              where records come from; columns
       text/data/json                .jsonl and .json to records
       text/data/csv                 .csv and .tsv to records
       text/data/text                .txt to samples
       text/data/parquet             .parquet to records
       text/data/no_parquet          the error in its place, if Parquet is left out
       text/data/files               training files to samples

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

       Macros that leave parts out, for the file with the implementation; none of them changes a
       declaration. A program that calls what is left out does not link, or gets an error:
       QLORA_TEXT_NO_DATA       leave out training data, also in Parquet: the functions
                                qlora_text_data_* and qlora_text_sample_read do not link
       QLORA_TEXT_NO_TEMPLATES  leave out chat templates, and so chats and training data, which need
                                them: the functions qlora_text_template_*, qlora_text_spans_free,
                                qlora_text_chat_* and those of QLORA_TEXT_NO_DATA do not link
       QLORA_TEXT_NO_GGUF       leave out GGUF files: tokenizers and chat templates in them are
                                refused with an error that names this macro
       QLORA_TEXT_NO_PARQUET    leave out data files in Parquet: opening one is an error that names
                                this macro

   TOKENIZERS
       BPE models of tokenizer.json, byte-level (GPT-2, Llama 3, Qwen, SmolLM, ...) and
       SentencePiece style with byte fallback (Llama 2, Mistral, TinyLlama, Gemma, ...), Unigram
       models (T5, XLM-R, Japanese Llama models, ...) with SentencePiece's map of characters
       (Precompiled), and the tokenizer.bin of llama2.c. For valid UTF-8 the ids are those of the
       `tokenizers` library.
       GGUF files: the models "llama" (SentencePiece with scores) and "gpt2" (byte-level BPE, with
       the pattern that tokenizer.ggml.pre names); the ids are those of llama.cpp.
       Anything in the file that is not supported is reported by name and rejected when it is
       loaded: a model other than BPE and Unigram, a normalizer other than NFC, NFD, Prepend,
       Replace, Strip, Precompiled, Nmt and Lowercase, a part of a regular expression, an expression
       that can match between two characters. Also rejected is what would have other ids in
       `tokenizers`: an added token that the vocabulary does not have, with another id than the next
       one, and two words with one id.
       The file's "truncation" and "padding" settings are ignored: text is encoded in full.

   DATA
       .jsonl or .ndjson (one object per line), .json (an array of objects, {"data": [...]}, or as
       .jsonl), .csv and .tsv with a header, .txt, .parquet, and .gz of all but the last;
       desc.format overrides the ending.

       {"text"}                            all of it is trained
       {"prompt", "completion"}            two strings, joined as they are; the completion is
                                           trained (two lists of messages: see messages)
       {"messages": [{"role", "content"}]} rendered by the chat template; assistant turns are
                                           trained
       {"conversations": [{"from", "value"}]}                 the same (ShareGPT)
       {"instruction", "input", "output", "history"}          the same (Alpaca)
       {"question", "answer"}, {"input", "output"}            the same
       {"input_ids", "labels"}             taken as they are

       {"prompt", "chosen", "rejected"}    preference pairs, for desc.preference; otherwise they are
                                           refused, as is a "label" of true or false beside an
                                           answer

       "response" is accepted for "completion", "output" and "answer", and "context" for "input"
       (Dolly, SQuAD). "system" becomes the first message. In a message, "weight" or "train" 0 or
       false means that this turn is not trained. Padding that an "attention_mask" marks is
       dropped. null is the same as no value. A name that a form uses is an error with another type,
       "system" in every form; so is a record that fits two forms, unless desc.format names one of
       them, and a message with both "role" and "from", or both "content" and "value". All other
       names have no effect and are listed by qlora_text_data_query. What would
       change the text or its training but is not supported (other weights, images) is an error.
       With a model's own template, messages may have tool_calls, tool_call_id, name,
       reasoning_content and thinking, roles may be "tool", and "tools", "documents",
       "enable_thinking" and "chat_template_kwargs" of a record are variables of the template.
       Arguments of a tool call that are a string are parsed before rendering, unless the template
       itself asks whether they are a string. Contents in parts are joined.

       .csv, .tsv: RFC 4180. The names in the header are those of a record, and all values are
       strings: neither an empty field nor "NA" becomes null. Quotes have a meaning at the start
       of a field; line ends are LF, CRLF or CR; empty lines are skipped; a column without a name
       is called "Unnamed: N". A row with more or fewer fields than the header is an error.

       desc.columns gives names of the file for those above: "prompt=question,completion=answer".
       The name on the left must be one that records have, and the one on the right must occur in
       the file. A column of the file that has a name on the left, but is not the one that is
       given for it, is not used. With desc.columns_partial, for one of several files, a name on
       the right that the file lacks is left alone, and listed by qlora_text_data_query.

       .txt: documents are separated by lines that contain only <|endoftext|>; a file without
       such a line is one document. A document longer than desc.chunk_tokens is split into
       samples of that length, and no token is lost.

       .parquet: every row is a record; lists and structs are those of JSON. Strings, JSON and
       enums, booleans, integers and floats are read, in the encodings PLAIN, RLE, dictionaries,
       DELTA_* and BYTE_STREAM_SPLIT, pages of both versions, uncompressed, Snappy, gzip and
       Zstandard; lists of all layouts. Types without a standard form in JSON (dates, times,
       decimals, maps, binary data, INT96), other codecs and encryption are an error in a column
       whose name is listed above; other such columns are skipped. One page and one dictionary per
       column are held, 4 GiB at most (1 GiB per page); a row has at most 256 MiB of JSON, all rows
       4 GiB and 1024 bytes per byte of the file. A line in a message is then the number of the row.

       .gz after any other ending but .parquet: decompressed while it is read, through a window;
       checksums and lengths are compared. A stream (desc.stream) keeps the samples of compressed
       and Parquet files in memory.

       Files are read through a window: only the record that is being read is in memory, not the
       file. The records in {"data": [...]} are read one by one; a name of a record after a "data"
       that is longer than the window is an error. A long .txt document is read in parts, at lines
       that start with a letter, if the tokenizer joins nothing there: byte-level BPE with the
       patterns of GPT-2, Llama 3, Qwen, GPT-4o, Tekken and DeepSeek, and SentencePiece BPE; the
       ids are those of the whole. A sample takes 4.125 bytes per token (8 if its labels are
       neither -100 nor the ids) and 40 bytes. With desc.stream it takes 40 bytes alone, whatever
       its length: qlora_text_sample_read finds its record in the file, which it reads and does not
       map, and builds the sample again. Samples and their order are the same. A stream keeps a .txt
       document that it cannot split in memory, and refuses one of 16 MiB or more.

       A sample gets BOS exactly once: from the template, or where the tokenizer's post-processor
       adds it. Its end is trained: the end marker of the template, otherwise EOS; `endless` says
       that a conversation has neither.

   CHAT TEMPLATES
       A conversation is rendered by the model's own Jinja template, in chat_template.jinja,
       chat_template.json, tokenizer_config.json or a GGUF file, as transformers executes it; that
       of an adapter's folder (desc.tokenizer_folder) comes before the model's, and a built-in one
       is used on request, or when there is none.
       Statements: if, for (not recursive), set, macro, call, filter, with, break, continue, print,
       raw, generation. Filters, tests and methods are those of jinja2 and Python's str, list and
       dict. What is not supported is an error that names it: include, import, block, extends,
       autoescape, recursive loops; the filter random and the function lipsum, whose results cannot
       be repeated; encode, isidentifier and maketrans of str, methods with bytes; integers beyond
       64 bits, unless they are only printed; powers with a fraction in the exponent; printing an
       object that Python shows with its address; in striptags, character references beyond those
       of Latin-1 and usual punctuation. A template stops with an error at limits for steps, memory
       and depth. strftime_now prints desc.clock.

       Which tokens are trained is derived from the template: the contents of its {% generation %}
       blocks if it has any. Otherwise the conversation is rendered twice, up to an answer (with the
       generation prompt) and including it; what the second rendering adds, up to its end marker, is
       the answer. If a template renders earlier turns differently when later ones follow (it drops
       their thoughts), each turn becomes a sample of its own, as inference sees it; `continues`
       says that samples are of one record, so that data can be held out by record. If an answer
       does not continue its prompt, the record is refused. Text is split into tokens where an
       answer begins and ends, as in generation.

   PROMPTS
       With desc.prompts, the same files say what to ask: a sample is a record without its answer,
       encoded as in training, and the answer is the sample's reference.

   STOP IDS
       As in transformers: where there is a generation_config.json, the "eos_token_id" in it, and
       none if it has none; without that file, the one in config.json. Also EOS and the marker with
       which the template ends an answer.

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
