// ---- training data ------------------------------------------------------------------------------

// With QLORA_TEXT_NO_DATA beside the implementation, these functions are declared but left out: a
// program that calls one does not link.

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
    // Whether a text begins with BOS, which was then not added a second time. Of a stream, so far.
    bool own_bos;
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
