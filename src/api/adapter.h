// ---- adapters -----------------------------------------------------------------------------------
// PEFT folder: adapter_model.safetensors (f32) and adapter_config.json. base_name goes into the
// config; NULL = the model's folder. Trained norms, which a LoRA adapter of PEFT cannot hold, go
// into trained_norms.safetensors beside them.
QLORA_API qlora_result qlora_adapter_save(qlora_model* model, const char* dir,
                                          const char* base_name);
// Modules, ranks and scales must be the model's. Optimizer state stays as it is.
QLORA_API qlora_result qlora_adapter_load(qlora_model* model, const char* dir);
// llama.cpp's adapter file, f32; it has no room for trained norms.
QLORA_API qlora_result qlora_adapter_save_gguf(qlora_model* model, const char* path);

typedef enum qlora_merge_base {
    QLORA_MERGE_ORIGINAL = 0, // onto the folder's own weights
    QLORA_MERGE_TRAINED = 1   // onto what the 4-bit weights stand for, which is what was trained on
} qlora_merge_base;
// The folder's model with the adapter merged in, as safetensors shards of at most shard_bytes (0 =
// 5 GB) in dtype (BF16, F16, F32), with its config.json and tokenizer files. Streams: one tensor in
// memory at a time. config.json comes last, so that an interrupted export is not taken for a model;
// a folder that has one already is refused.
QLORA_API qlora_result qlora_merge_save(qlora_model* model, const char* dir, qlora_dtype dtype,
                                        qlora_merge_base base, uint64_t shard_bytes,
                                        qlora_progress_fn progress, void* user);
