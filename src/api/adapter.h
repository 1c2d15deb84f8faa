// ---- adapters -----------------------------------------------------------------------------------
// Zero it before setting fields.
typedef struct qlora_adapter_desc {
    uint32_t reserved_must_be_zero0;
    const char* base_name; // base_model_name_or_path of the saved config; NULL = the model's folder
    qlora_expert_layout expert_layout; // of a folder that is loaded
    uint32_t reserved_must_be_zero1;
} qlora_adapter_desc;

// Switches the adapters on (as after opening) or off. With adapters off, the model behaves like its
// base; training requires them on. A change invalidates all graphs. Does not wait for the device.
QLORA_API qlora_result qlora_adapter_use(qlora_model* model, bool on);
// Chooses one of several adapters, by its index in desc.slots; 0 after opening. The calls for
// parameters, saving, loading, copying and merging, texts whose desc names no adapter, and
// evaluations of batches without `adapters` use the chosen one. Refused while there is a text that
// uses it (qlora_generate_desc.adapters = AUTO). Does not wait for the device.
QLORA_API qlora_result qlora_adapter_select(qlora_model* model, int64_t index);
// Gives the chosen adapter the values of a new one with this seed: A random, B zero, magnitudes of
// the base. Destroy its trainer before. Waits for the device.
QLORA_API qlora_result qlora_adapter_renew(qlora_model* model, uint64_t seed);
// Copies the trained tensors of one model to another that has the same ones. The models may belong
// to different contexts; within one context the call does not wait for the device. The optimizer
// state is left unchanged.
QLORA_API qlora_result qlora_adapter_copy(qlora_model* from, qlora_model* to);
// Writes a PEFT folder: adapter_model.safetensors (f32) and adapter_config.json. Trained norms are
// in it as PEFT's modules_to_save, and once more in trained_norms.safetensors, as exact factors:
// for Gemma, PEFT's file and the base store them minus 1, which rounds, this file does not. The
// metadata of the file name the format of the base that it was trained on.
// The folder is one unit: files of an earlier adapter that the new one does not have are removed,
// and a crash leaves the old adapter, the new one, or a folder without a config, which does not
// load. Waits for the device. desc NULL = all defaults, here and below.
QLORA_API qlora_result qlora_adapter_save(qlora_model* model, const char* dir,
                                          const qlora_adapter_desc* desc);
// Loads a PEFT folder, whose modules, ranks and scales must be those of the model; trained norms in
// it need a model that was opened with train_norms or with such an adapter. The optimizer state is
// left unchanged. Waits for the device.
QLORA_API qlora_result qlora_adapter_load(qlora_model* model, const char* dir,
                                          const qlora_adapter_desc* desc);
// Writes an f32 adapter for llama.cpp; what the format cannot contain, such as trained norms, is
// refused. Waits for the device. With QLORA_NO_GGUF beside the implementation, it always fails.
QLORA_API qlora_result qlora_adapter_save_gguf(qlora_model* model, const char* path,
                                               const qlora_adapter_desc* desc);
