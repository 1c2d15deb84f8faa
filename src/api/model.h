// ---- models -------------------------------------------------------------------------------------
#define QLORA_MAX_LAYERS 256
#define QLORA_MAX_STOP_IDS 16

typedef enum qlora_base_format {
    QLORA_BASE_NF4 = 0,
    QLORA_BASE_16BIT = 1,
    QLORA_BASE_32BIT = 2
} qlora_base_format;

typedef enum qlora_rope_type {
    QLORA_ROPE_DEFAULT = 0,
    QLORA_ROPE_LINEAR,
    QLORA_ROPE_LLAMA3,
    QLORA_ROPE_YARN
} qlora_rope_type;

// How a model scales its rotary frequencies; the names are those of config.json.
typedef struct qlora_rope_desc {
    qlora_rope_type type;
    double theta;                 // 0 = 10000
    double factor;                // 0 = 1
    double low_freq_factor;       // llama3; 0 = 1
    double high_freq_factor;      // llama3; 0 = 4
    double original_max_position; // llama3, yarn: original_max_position_embeddings; 0 = error
    double beta_fast;             // yarn; 0 = 32
    double beta_slow;             // yarn; 0 = 1
    double attention_factor;      // yarn, on cosine and sine; 0 = from factor and mscale
    double mscale;                // yarn; 0 = not given
    double mscale_all_dim;        // yarn; 0 = not given
    bool no_truncate;             // yarn: "truncate": false
} qlora_rope_desc;

typedef enum qlora_family {
    QLORA_FAMILY_NONE = 0,
    QLORA_FAMILY_LLAMA,
    QLORA_FAMILY_MISTRAL,
    QLORA_FAMILY_QWEN2,
    QLORA_FAMILY_QWEN3
} qlora_family;

typedef struct qlora_model_config {
    qlora_family family;
    int64_t vocab;
    int64_t hidden;
    int64_t intermediate;
    int64_t layers;
    int64_t heads;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t max_positions;
    double rms_eps;
    qlora_rope_desc rope;         // layers with full attention; nothing left to default
    qlora_rope_desc rope_sliding; // layers with a sliding window; the same unless the file says so
    int64_t window; // a token sees itself and window - 1 before it; 0 = no layer has one
    bool tied;      // the output head is the embedding
    bool qkv_bias;
    bool o_bias;
    bool mlp_bias;
    bool qk_norm;
    bool quantized; // config.json has a quantization_config (bitsandbytes, 4-bit)
    int32_t dtype;  // a qlora_dtype, or -1 where the file does not say
    int32_t bos_id; // -1 = none
    int32_t pad_id; // -1 = none
    int32_t stop_count;
    int32_t stop_ids[QLORA_MAX_STOP_IDS];
    uint8_t sliding[QLORA_MAX_LAYERS]; // 1 where the layer's attention is limited by `window`
} qlora_model_config;

// What a model computes in. Weights keep their own format.
typedef enum qlora_mode {
    QLORA_MODE_AUTO = 0, // BF16 on compute capability 8.0 and up, else F32
    QLORA_MODE_F32 = 1,  // fp32; the context's math decides between exact and TF32 products
    QLORA_MODE_BF16 = 3  // 2 is not used: checkpoints hold these numbers
} qlora_mode;

typedef enum qlora_target { // the projections of a layer, one bit each
    QLORA_TARGET_Q = 1,
    QLORA_TARGET_K = 2,
    QLORA_TARGET_V = 4,
    QLORA_TARGET_O = 8,
    QLORA_TARGET_GATE = 16,
    QLORA_TARGET_UP = 32,
    QLORA_TARGET_DOWN = 64,
    QLORA_TARGET_ALL = 127
} qlora_target;

typedef enum qlora_choice {
    QLORA_CHOICE_AUTO = 0,
    QLORA_CHOICE_ON = 1,
    QLORA_CHOICE_OFF = 2
} qlora_choice;

// What the memory of a model is laid out for.
typedef enum qlora_purpose {
    QLORA_PURPOSE_TRAIN = 0,   // gradients, optimizer state and activations are part of the plan
    QLORA_PURPOSE_EVALUATE = 1 // evaluation and generation only
} qlora_purpose;

// Called with the progress of long operations. Return false to stop the operation, which then
// returns QLORA_ERR_STOPPED.
typedef bool (*qlora_progress_fn)(void* user, const char* what, uint64_t done, uint64_t total);

typedef struct qlora_plan qlora_plan;

typedef struct qlora_model_desc {
    uint32_t reserved_must_be_zero0;
    // The model.
    const char* dir;                  // Hugging Face folder; NULL = random weights of *config
    const qlora_model_config* config; // only without dir
    uint64_t seed;                    // for random weights and new adapters
    float weight_std;                 // standard deviation of random weights; 0 = 0.02
    qlora_base_format base;           // 0 = NF4; tensors that are 4-bit in the folder stay so
    bool single_quant;                // keep the fp32 block scales instead of quantising them
    qlora_mode mode;                  // 0 = AUTO
    // Its adapters.
    const char* adapter; // PEFT folder: ranks, targets, scales and weights come from there
    int32_t rank;        // 0 = 16; negative = no adapters
    float alpha;         // 0 = 2 * rank
    bool rslora;         // scale alpha / sqrt(rank) instead of alpha / rank
    float dropout;       // on the input of the adapters; 0 = none
    uint32_t targets;    // qlora_target bits; 0 = all seven
    bool train_norms;    // also train the RMSNorm weights
    // Its memory.
    qlora_purpose purpose;   // 0 = TRAIN
    int64_t tokens;          // maximum tokens per micro-batch; 0 = 2048
    int64_t max_sequences;   // maximum sequences per micro-batch; 0 = tokens / 8, at least 1
    int64_t max_length;      // maximum length of a sequence; 0 = tokens
    int64_t head_chunk;      // rows of logits computed at a time; 0 = 1024, at most tokens
    int64_t generate_tokens; // maximum length of a generated text, prompt included; 0 = none
    qlora_choice recompute;  // ON = every layer, OFF = none, AUTO = as few as fit the memory
    qlora_choice cache;      // 16-bit copies of 4-bit weights; AUTO = as many as fit the memory
    const qlora_plan* plan;  // made earlier by qlora_plan_make; NULL = planned on opening
    qlora_progress_fn progress;
    void* progress_user;
    uint32_t reserved_must_be_zero1;
} qlora_model_desc;

// The machine a plan is made for; zero = the context's own device and the memory that is free there.
typedef struct qlora_plan_desc {
    uint64_t bytes;     // memory to stay within
    int32_t capability; // compute capability of the device: 90 is 9.0
} qlora_plan_desc;

struct qlora_plan {
    qlora_model_config config;
    uint64_t source; // hash of the names of the model folder and the adapter
    qlora_mode mode;
    // Bytes of the one arena that holds the model.
    uint64_t base;        // frozen weights, embedding, head, norms, tables
    uint64_t cache;       // 16-bit copies of 4-bit weights
    uint64_t adapters;    // parameters and their 16-bit shadow
    uint64_t optimizer;   // gradients, moments, clip tables
    uint64_t activations; // kept between forward and backward
    uint64_t workspace;   // shared by the layers
    uint64_t head;        // logits of a chunk and their losses
    uint64_t generation;  // key/value cache
    uint64_t batches;     // ids, labels and positions of a micro-batch
    uint64_t total;       // sum of the above
    uint64_t context;     // scratch and cuBLAS workspaces that the context already holds
    int64_t tokens;
    int64_t max_sequences;
    int64_t max_length;
    int64_t head_chunk;
    int64_t parameters;       // number of trained parameters
    int64_t recompute_layers; // the first n layers keep only their input
    int64_t cached_layers;    // the first n layers have 16-bit copies of their weights
};

// Needs no GPU: a CPU context can plan for any device. desc NULL = this machine. Fails with
// QLORA_ERR_DEVICE_MEMORY if the model cannot fit.
QLORA_API qlora_result qlora_plan_make(qlora_ctx* ctx, const qlora_model_desc* model,
                                       const qlora_plan_desc* desc, qlora_plan* out);
// Formats the plan as a table. Returns the number of bytes needed, including the final NUL.
QLORA_API size_t qlora_plan_describe(const qlora_plan* plan, char* buffer, size_t size);
// Reads config.json and generation_config.json of a folder.
QLORA_API qlora_result qlora_config_read(qlora_ctx* ctx, const char* dir, qlora_model_config* out);

typedef struct qlora_model qlora_model;

// Plans unless desc->plan is given, compiles the kernels, allocates the plan's arena, runs every
// planned product once, seals the kernel cache, and only then loads the weights.
QLORA_API qlora_result qlora_model_open(qlora_ctx* ctx, const qlora_model_desc* desc,
                                        qlora_model** out);
// Fails while a trainer or a generation of the model exists, and frees nothing then.
QLORA_API qlora_result qlora_model_close(qlora_model* model);

typedef struct qlora_model_info {
    qlora_ctx* ctx;
    const qlora_plan* plan; // with the config; valid while the model is open
    qlora_purpose purpose;
    int64_t generate_tokens;
    int64_t parameters;  // number of trained tensors
    bool use_adapters;
    int64_t trainers;    // that exist
    int64_t generations; // that exist
} qlora_model_info;
// Leaves the device and qlora_last_error alone.
QLORA_API qlora_result qlora_model_query(const qlora_model* model, qlora_model_info* out);

// The trained tensors, with PEFT's names, shapes and order: A [rank, in], B [out, rank].
typedef struct qlora_parameter_info {
    char name[192];
    int64_t rows;
    int64_t cols;
} qlora_parameter_info;
QLORA_API qlora_result qlora_parameter_query(const qlora_model* model, int64_t index,
                                             qlora_parameter_info* out);
// Copies rows * cols floats. Both calls wait for the device.
QLORA_API qlora_result qlora_parameter_read(qlora_model* model, int64_t index, float* out);
QLORA_API qlora_result qlora_parameter_write(qlora_model* model, int64_t index, const float* in);

// ---- batches and evaluation ---------------------------------------------------------------------
// Sequences, concatenated. As in transformers, labels[i] belongs to ids[i], and the loss at token i
// is that of predicting labels[i + 1] of the same sequence; -100 = not trained.
typedef struct qlora_batch {
    const int32_t* ids;
    const int32_t* labels;
    const float* weights;     // one per label; NULL = 1
    const int32_t* lengths;   // tokens in each sequence
    const int32_t* sequences; // number of each sequence in the data, for dropout; NULL = 0, 1, ...
    int64_t count;            // number of sequences
} qlora_batch;
// Sum of the weights of a batch's labels: its share of total_labels.
QLORA_API double qlora_batch_labels(const qlora_batch* batch);

typedef struct qlora_eval_info {
    double loss;   // sum of weighted losses
    double labels; // sum of weights
    int64_t tokens;
} qlora_eval_info;
// Runs the forward pass only, with adapters on or off as set; waits for the result. Does not
// disturb a step that is being accumulated.
QLORA_API qlora_result qlora_eval(qlora_model* model, const qlora_batch* batch,
                                  qlora_eval_info* out);
// Writes the logits of every token, tokens * vocab floats; for tests and tools. Waits.
QLORA_API qlora_result qlora_eval_logits(qlora_model* model, const qlora_batch* batch, float* out);
