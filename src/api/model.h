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

// Long calls tell how far they are; false stops them with QLORA_ERR_STOPPED.
typedef bool (*qlora_progress_fn)(void* user, const char* what, uint64_t done, uint64_t total);

typedef struct qlora_model_desc {
    uint32_t reserved_must_be_zero0;
    const char* dir;                  // Hugging Face folder; NULL = random weights of *config
    const qlora_model_config* config; // only without dir
    uint64_t seed;                    // of random weights and of new adapters
    float weight_std;                 // of random weights; 0 = 0.02
    qlora_base_format base;           // NF4; a folder's own 4-bit tensors stay as they are
    bool single_quant;                // keep fp32 scales instead of quantising them, too
    qlora_mode mode;                  // AUTO
    const char* adapter; // PEFT folder: ranks, targets, scales and weights come from there
    int32_t rank;        // 0 = 16; negative = no adapters
    float alpha;         // 0 = 2 * rank
    bool rslora;         // scale alpha / sqrt(rank) instead of alpha / rank
    float dropout;       // of the adapters' input; 0 = none
    uint32_t targets;    // qlora_target bits; 0 = all seven
    bool train_norms;    // the RMSNorm weights are trained, too
    qlora_progress_fn progress;
    void* progress_user;
    uint32_t reserved_must_be_zero1;
} qlora_model_desc;

typedef enum qlora_schedule {
    QLORA_SCHEDULE_COSINE = 0, // to zero at total_steps
    QLORA_SCHEDULE_LINEAR = 1, // to zero at total_steps
    QLORA_SCHEDULE_CONSTANT = 2
} qlora_schedule;

typedef enum qlora_choice {
    QLORA_CHOICE_AUTO = 0,
    QLORA_CHOICE_ON = 1,
    QLORA_CHOICE_OFF = 2
} qlora_choice;

typedef struct qlora_train_desc {
    uint32_t reserved_must_be_zero0;
    int64_t tokens;          // most tokens of one micro-batch; 0 = 2048
    int64_t max_sequences;   // most sequences of one micro-batch; 0 = tokens / 8, at least 1
    int64_t max_length;      // longest sequence; 0 = tokens
    double lr;               // 0 = 2e-4; negative = 0
    double beta1;            // 0 = 0.9
    double beta2;            // 0 = 0.999
    double eps;              // 0 = 1e-8
    double weight_decay;     // 0 = none
    double max_norm;         // 0 = 1; negative = no clipping
    qlora_schedule schedule; // cosine
    int64_t warmup_steps;    // linear from 0
    int64_t total_steps;     // 0 = schedule stays at lr after the warm-up
    qlora_choice recompute;  // ON = every layer, OFF = none, AUTO = as many as the budget demands
    qlora_choice cache;      // 16-bit copies of 4-bit weights: AUTO = where the budget has room
    int64_t head_chunk;      // rows of logits at a time; 0 = 1024, or fewer for few tokens
    uint64_t seed;           // of the dropout
    bool eager;              // no CUDA graphs
    bool require_graph;      // a failed capture is an error instead of a fallback
    bool no_training;        // evaluation and generation only: no gradients, no optimizer
    int64_t generate_tokens; // longest text of qlora_generate; 0 = none
    int32_t keep_checkpoints; // how many qlora_checkpoint_save leaves; 0 = 2, at most 64
    uint32_t reserved_must_be_zero1;
} qlora_train_desc;

// What a plan is made for; zero = the context's own device, all the memory that is free there.
typedef struct qlora_budget {
    uint64_t bytes;
    int32_t capability; // 90 is 9.0
    int32_t multiprocessors;
} qlora_budget;

typedef struct qlora_plan {
    qlora_model_config config;
    qlora_mode mode;
    // Bytes in one arena, to the byte.
    uint64_t base;        // frozen weights, embedding, head, norms, tables
    uint64_t cache;       // 16-bit copies of 4-bit weights
    uint64_t adapters;    // parameters and their 16-bit shadow
    uint64_t optimizer;   // gradients, moments, clip tables
    uint64_t activations; // kept between forward and backward
    uint64_t workspace;   // shared by the layers
    uint64_t head;        // logits of a chunk and what goes with them
    uint64_t generation;  // key/value cache
    uint64_t batches;     // what a micro-batch brings along
    uint64_t total;
    uint64_t context;     // scratch and cuBLAS workspaces that the context holds already
    int64_t tokens;
    int64_t max_sequences;
    int64_t max_length;
    int64_t head_chunk;
    int64_t parameters;   // that are trained
    uint8_t recompute[QLORA_MAX_LAYERS]; // 1: only the layer's input is kept
    uint8_t cached[QLORA_MAX_LAYERS];    // 1: its weights have a 16-bit copy
    int64_t recompute_layers;
    int64_t cached_layers;
} qlora_plan;

// Needs no GPU: a CPU context plans for any device. Refuses what cannot fit and says what would.
QLORA_API qlora_result qlora_plan_make(qlora_ctx* ctx, const qlora_model_desc* model,
                                       const qlora_train_desc* train, const qlora_budget* budget,
                                       qlora_plan* out);
// The plan as a table for people. Returns the bytes needed with the final NUL.
QLORA_API size_t qlora_plan_print(const qlora_plan* plan, char* buffer, size_t size);
// Reads config.json (and generation_config.json) of a folder.
QLORA_API qlora_result qlora_config_read(qlora_ctx* ctx, const char* dir, qlora_model_config* out);

typedef struct qlora_model qlora_model;
typedef struct qlora_trainer qlora_trainer;

// Compiles, allocates the plan's arena, runs every planned product once, seals the kernel cache,
// and only then loads the weights. train NULL = evaluation only, with its defaults.
QLORA_API qlora_result qlora_model_open(qlora_ctx* ctx, const qlora_model_desc* desc,
                                        const qlora_train_desc* train, const qlora_plan* plan,
                                        qlora_model** out);
QLORA_API qlora_result qlora_model_close(qlora_model* model);
QLORA_API const qlora_plan* qlora_model_plan(const qlora_model* model);
QLORA_API qlora_ctx* qlora_model_ctx(const qlora_model* model);

// What is trained, tensor by tensor, in PEFT's names, shapes and order: A [rank, in], B [out,
// rank].
typedef struct qlora_parameter {
    char name[192];
    int64_t rows;
    int64_t cols;
} qlora_parameter;
QLORA_API int64_t qlora_model_parameters(const qlora_model* model);
QLORA_API qlora_result qlora_model_parameter(qlora_model* model, int64_t index,
                                             qlora_parameter* out);
// rows * cols floats; both wait for the device.
QLORA_API qlora_result qlora_model_parameter_read(qlora_model* model, int64_t index, float* out);
QLORA_API qlora_result qlora_model_parameter_write(qlora_model* model, int64_t index,
                                                   const float* in);
// Without adapters the bare base answers; training needs them on.
QLORA_API qlora_result qlora_model_use_adapters(qlora_model* model, bool on);
