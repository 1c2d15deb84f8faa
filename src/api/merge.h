// ---- merging ------------------------------------------------------------------------------------

// With QLORA_NO_MERGE beside the implementation, the functions are declared but left out: a program
// that calls one does not link.

typedef enum qlora_merge_base {
    QLORA_MERGE_ORIGINAL = 0, // into the original weights of the model folder
    QLORA_MERGE_TRAINED = 1   // into the dequantised 4-bit or FP8 weights that it was trained on
} qlora_merge_base;

typedef enum qlora_gguf_format {
    QLORA_GGUF_AS_DTYPE = 0,
    QLORA_GGUF_Q8_0 = 1,
    QLORA_GGUF_Q4_0 = 2
} qlora_gguf_format;

typedef struct qlora_merge_desc {
    uint32_t reserved_must_be_zero0;
    const char* dir;       // folder or, if the name ends in .gguf, file to write; required
    qlora_dtype dtype;     // type of the merged weights: F32, BF16 or F16; 0 = F32
    qlora_merge_base base; // 0 = ORIGINAL
    uint64_t shard_bytes;  // maximum size of a weight file; 0 = 5 GB
    qlora_progress_fn progress; // NULL = none
    void* progress_user;
    qlora_gguf_format gguf; // of the matrices in a GGUF file; 0 = dtype
    // Folder with tokenizer files or a chat template that come before the model's, such as the
    // adapter's. If its tokenizer has more tokens, each needs a row in the merged model. A GGUF
    // file gets the template, BOS, EOS and padding from it. NULL = only those of the model's
    // folder.
    const char* tokenizer_dir;
    // Reads what was written and compares it: a random token must give the same through every
    // matrix, of every expert, as through the base and the adapter, but for rounding. Not for DoRA.
    bool verify;
    uint32_t reserved_must_be_zero1;
} qlora_merge_desc;
// Writes the model with the adapter merged into its weights, as safetensors shards with config.json
// and the tokenizer files. Holds one tensor in memory at a time. config.json is written last, so
// that an interrupted export is not mistaken for a model; a folder that already contains one is
// rejected. The model must have been opened from files.
//
// For a model in a GGUF file, config.json, tokenizer.json, tokenizer_config.json and the chat
// templates are made from its metadata. What they cannot express is refused before anything is
// written. Where llama.cpp and transformers differ, the folder does what llama.cpp does.
//
// If dir ends in .gguf, one GGUF file is written: metadata, tokenizer and names are those of the
// model's own GGUF file, or made from config.json and tokenizer.json of its folder. Vectors are
// F32, and with Q4_0 the embedding and the head are Q8_0. What llama.cpp would compute differently
// is refused, an existing file as well.
QLORA_API qlora_result qlora_merge_save(qlora_model* model, const qlora_merge_desc* desc);

// For a model in a GGUF file: writes tokenizer.json and tokenizer_config.json, made of its metadata
// as by qlora_merge_save, to a folder, which can be that of an adapter: users of PEFT expect them
// there. A file without a tokenizer writes nothing. Fails with QLORA_ERR_UNSUPPORTED for what they
// cannot express, and for a model in a folder, whose files can be copied.
QLORA_API qlora_result qlora_adapter_save_tokenizer(qlora_model* model, const char* dir);
