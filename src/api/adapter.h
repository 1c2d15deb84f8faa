// ---- adapters -----------------------------------------------------------------------------------
typedef struct qlora_adapter_desc {
    uint32_t reserved_must_be_zero0;
    const char* base_name; // base_model_name_or_path of the saved config; NULL = the model's folder
    uint32_t reserved_must_be_zero1;
} qlora_adapter_desc;

// With adapters off, the bare base model answers; training needs them on.
QLORA_API qlora_result qlora_adapter_use(qlora_model* model, bool on);
// Copies the trained tensors of one model to another that has the same ones. The models may belong
// to different contexts. The optimizer state stays as it is.
QLORA_API qlora_result qlora_adapter_copy(qlora_model* from, qlora_model* to);
// PEFT folder: adapter_model.safetensors (f32) and adapter_config.json. Trained norms, which a LoRA
// adapter of PEFT cannot hold, are written to trained_norms.safetensors next to them. desc NULL =
// the defaults, here and below.
QLORA_API qlora_result qlora_adapter_save(qlora_model* model, const char* dir,
                                          const qlora_adapter_desc* desc);
// Modules, ranks and scales must be the model's. The optimizer state stays as it is.
QLORA_API qlora_result qlora_adapter_load(qlora_model* model, const char* dir,
                                          const qlora_adapter_desc* desc);
// The adapter file of llama.cpp, in f32; it cannot hold trained norms.
QLORA_API qlora_result qlora_adapter_save_gguf(qlora_model* model, const char* path,
                                               const qlora_adapter_desc* desc);

typedef enum qlora_merge_base {
    QLORA_MERGE_ORIGINAL = 0, // onto the folder's own weights
    QLORA_MERGE_TRAINED = 1   // onto the dequantised 4-bit weights, which the adapter was trained on
} qlora_merge_base;

typedef struct qlora_merge_desc {
    uint32_t reserved_must_be_zero0;
    const char* dir;      // folder to write
    qlora_dtype dtype;    // of the merged weights: F32, BF16 or F16
    qlora_merge_base base;
    uint64_t shard_bytes; // maximum size of a file; 0 = 5 GB
    qlora_progress_fn progress;
    void* progress_user;
    uint32_t reserved_must_be_zero1;
} qlora_merge_desc;
// Writes the folder's model with the adapter merged in, as safetensors shards with config.json and
// the tokenizer files. Holds one tensor in memory at a time. config.json is written last, so that
// an interrupted export is not mistaken for a model; a folder that already has one is refused.
QLORA_API qlora_result qlora_merge_save(qlora_model* model, const qlora_merge_desc* desc);
