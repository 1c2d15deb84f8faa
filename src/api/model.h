// ---- models -------------------------------------------------------------------------------------
#define QLORA_MAX_LAYERS 256
#define QLORA_MAX_STOP_IDS 16
#define QLORA_MAX_ROPE_FACTORS 128 // half the largest head

// How the frozen weights of the projections are stored.
typedef enum qlora_base_format {
    QLORA_BASE_NF4 = 0,
    QLORA_BASE_16BIT = 1,
    QLORA_BASE_32BIT = 2,
    QLORA_BASE_FP8 = 3 // e4m3 with a scale per 128 x 128 block
} qlora_base_format;
// "nf4", "16bit", "32bit", "fp8"; the programs' --base and the files of adapters have these words.
QLORA_API const char* qlora_base_format_name(qlora_base_format format);

// The output head, if it is a matrix of its own.
typedef enum qlora_head_format {
    QLORA_HEAD_FULL = 0, // the type of the arithmetic: 16 bits on most GPUs
    // 4 bits in blocks of 64 with f32 scales, 28 % of 16 bits. It must not be trained, and must not
    // be the embedding (a tied head). Its error is that of NF4: 9 % of the logits (relative L2) of
    // models with random weights, 4 % of those of stories260K, whose loss on TinyStories rises from
    // 1.333 to 1.389 (a 4-bit base alone: 1.439).
    QLORA_HEAD_NF4 = 1
} qlora_head_format;

typedef enum qlora_rope_type {
    QLORA_ROPE_DEFAULT = 0,
    QLORA_ROPE_LINEAR,
    QLORA_ROPE_LLAMA3,
    QLORA_ROPE_YARN,
    QLORA_ROPE_LONGROPE
} qlora_rope_type;

// How a model scales its rotary frequencies; the names are those of config.json.
typedef struct qlora_rope_desc {
    qlora_rope_type type;
    double theta;                 // 0 = 10000
    double factor;                // 0 = 1
    double low_freq_factor;       // llama3; 0 = 1
    double high_freq_factor;      // llama3; 0 = 4
    double original_max_position; // all but linear: original_max_position_embeddings; 0 = error
    double beta_fast;             // yarn; 0 = 32
    double beta_slow;             // yarn; 0 = 1
    double attention_factor;      // yarn, longrope, on cosine and sine; 0 = from the other fields
    double mscale;                // yarn; 0 = not given
    double mscale_all_dim;        // yarn; 0 = not given
    bool no_truncate;             // yarn: "truncate": false
    // longrope: the table has long_factor instead of short_factor. A model ignores it and chooses
    // for every text: long_factor if it has more than original_max_position tokens.
    bool use_long;
    float short_factor[QLORA_MAX_ROPE_FACTORS]; // longrope: divisors of the frequencies
    float long_factor[QLORA_MAX_ROPE_FACTORS];
} qlora_rope_desc;

typedef enum qlora_family {
    QLORA_FAMILY_NONE = 0,
    QLORA_FAMILY_LLAMA,
    QLORA_FAMILY_MISTRAL,
    QLORA_FAMILY_QWEN2,
    QLORA_FAMILY_QWEN3,
    QLORA_FAMILY_GEMMA,
    QLORA_FAMILY_GEMMA2,
    QLORA_FAMILY_GEMMA3,
    QLORA_FAMILY_PHI3,
    QLORA_FAMILY_SMOLLM3,
    QLORA_FAMILY_OLMO2,
    QLORA_FAMILY_OLMO3,
    QLORA_FAMILY_GRANITE,
    QLORA_FAMILY_GRANITE4, // granitemoehybrid without recurrent layers
    QLORA_FAMILY_GLM,
    QLORA_FAMILY_GLM4,
    QLORA_FAMILY_MINISTRAL3,
    QLORA_FAMILY_EXAONE4,
    QLORA_FAMILY_SEED_OSS,
    QLORA_FAMILY_QWEN2_5_VL, // the text part of vision-language models
    QLORA_FAMILY_QWEN3_VL,
    QLORA_FAMILY_ARCEE,
    QLORA_FAMILY_COHERE2,
    QLORA_FAMILY_MIXTRAL,
    QLORA_FAMILY_QWEN2_MOE,
    QLORA_FAMILY_QWEN3_MOE,
    QLORA_FAMILY_OLMOE,
    QLORA_FAMILY_GRANITE_MOE,
    QLORA_FAMILY_GLM4_MOE
} qlora_family;

// The architecture of a model, as in its config.json.
typedef struct qlora_model_config {
    qlora_family family;
    int64_t vocab;
    int64_t hidden;
    int64_t intermediate;
    int64_t layers;
    int64_t heads;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t max_positions; // longest text; longer ones are refused; 0 = no limit
    double rms_eps;
    qlora_rope_desc rope;         // layers with full attention; defaults are filled in
    qlora_rope_desc rope_sliding; // layers with a sliding window; usually the same
    int64_t window; // a token sees itself and the window - 1 tokens before it; 0 = no window
    bool tied;      // the output head is the embedding
    bool qkv_bias;
    bool o_bias;
    bool mlp_bias;
    bool qk_norm;
    bool wrapped;   // the text part of a multimodal folder; decides the names in PEFT files
    bool quantized; // config.json has a quantization_config (bitsandbytes 4-bit, or FP8)
    // What a family adds to Llama's block. 0 = the default of the family.
    int64_t rope_dims;      // rotated columns of a head; 0 = all, half of them for GLM
    double embedding_scale; // 0 = 1, the root of the hidden size for Gemma
    double residual_scale;  // of the output of attention and MLP; 0 = 1
    double attention_scale; // of q k^T; 0 = 1 / sqrt(head_dim)
    double logits_divisor;  // 0 = 1
    double attention_cap;   // scores s become cap * tanh(s / cap); 0 = no cap
    double logits_cap;      // the same for logits
    double query_beta;      // q at position p is multiplied by 1 + query_beta * log(1 +
    double query_period;    // floor(p / query_period)); 0 = not at all
    double norm_offset;     // added to norm weights when they are loaded from files
    // Mixtures of experts; without experts, all of this is 0.
    int64_t experts; // in every layer that is not dense
    int64_t experts_per_token;
    int64_t expert_intermediate; // width of one expert
    int64_t shared_intermediate; // width of an MLP beside them for all tokens; 0 = there is none
    int64_t expert_groups;       // of the choice of experts; 0 = 1
    int64_t expert_groups_used;
    double routed_scale;    // factor of the weights of chosen experts; 0 = 1
    bool renormalise;       // the weights of a token are divided by their sum
    bool router_loss;       // transformers adds a load-balancing loss in training, which is refused
    int32_t dtype;          // a qlora_dtype; -1 = not given in the file
    int32_t bos_id;         // -1 = none
    int32_t pad_id;         // -1 = none
    int32_t stop_count;
    int32_t stop_ids[QLORA_MAX_STOP_IDS];
    uint8_t sliding[QLORA_MAX_LAYERS]; // 1 if the attention of the layer is limited by `window`
    uint8_t no_rope[QLORA_MAX_LAYERS]; // 1 if q and k of the layer are not rotated
    uint8_t dense[QLORA_MAX_LAYERS];   // 1 if the layer has an MLP and no experts
} qlora_model_config;

// The type in which a model computes. Frozen weights keep their own format. On the CPU, BF16 is for
// the asking, and only operands of products are bf16; see NUMERICS in the manual.
typedef enum qlora_mode {
    QLORA_MODE_AUTO = 0, // BF16 on compute capability 8.0 and newer, otherwise F32
    QLORA_MODE_F32 = 1,  // fp32; the context's math decides between exact and TF32 products
    QLORA_MODE_BF16 = 3, // 2 is unused; these values are stored in checkpoints
    QLORA_MODE_FP8 = 4   // BF16 with approximate products; see FP8 in the manual
} qlora_mode;

typedef enum qlora_target { // the projections of a layer, one bit each
    QLORA_TARGET_Q = 1,
    QLORA_TARGET_K = 2,
    QLORA_TARGET_V = 4,
    QLORA_TARGET_O = 8,
    QLORA_TARGET_GATE = 16,
    QLORA_TARGET_UP = 32,
    QLORA_TARGET_DOWN = 64,
    QLORA_TARGET_QKV = 128,           // models with one matrix for q, k and v
    QLORA_TARGET_GATE_UP = 256,       // models with one matrix for gate and up
    QLORA_TARGET_EXPERTS_IN = 2048,   // gate and up of every expert, as one matrix each
    QLORA_TARGET_EXPERTS_OUT = 4096,  // down of every expert
    QLORA_TARGET_ROUTER = 8192,       // what chooses the experts
    QLORA_TARGET_SHARED_GATE = 16384, // the gate of the MLP beside the experts
    QLORA_TARGET_ATTENTION = 32768,   // q, k, v and o, or qkv and o, as the model has them
    QLORA_TARGET_ALL = 6655           // those that the model has, but not router and shared gate
} qlora_target;

// Whole matrices that are trained with the adapters, one bit each, as PEFT's modules_to_save. If
// the head is tied, EMBED alone trains one matrix with two uses, and both train two copies.
typedef enum qlora_save { QLORA_SAVE_EMBED = 1, QLORA_SAVE_HEAD = 2 } qlora_save;

// A token that the model does not know yet, for qlora_model_desc.new_tokens. Its row of the
// embedding is trained, and so is its row of a head that is not tied. It starts as the mean of the
// rows `from` of the same matrix.
typedef struct qlora_new_token {
    int32_t id;          // an unused row of the model, or the next one after its last row
    const int32_t* from; // rows of the model, e.g. the tokens of a text with the same meaning
    int64_t from_count;  // 0 = the mean of all rows
} qlora_new_token;

// How the optimizer stores its moments.
typedef enum qlora_optimizer {
    QLORA_OPTIMIZER_ADAMW = 0, // in f32
    // In 8 bits with a scale per 256 elements, as bitsandbytes does on a GPU; tensors of fewer than
    // 4096 elements stay in f32.
    QLORA_OPTIMIZER_ADAMW_8BIT = 1
} qlora_optimizer;

// One of several adapters of a model; see SEVERAL ADAPTERS in the manual.
typedef struct qlora_adapter_slot {
    int32_t rank;  // 0 = desc.rank
    float alpha;   // 0 = desc.alpha, or 2 * rank if that is 0
    uint64_t seed; // for its first values
} qlora_adapter_slot;

typedef enum qlora_choice {
    QLORA_CHOICE_AUTO = 0,
    QLORA_CHOICE_ON = 1,
    QLORA_CHOICE_OFF = 2
} qlora_choice;

// The use that the memory of a model is planned for.
typedef enum qlora_purpose {
    QLORA_PURPOSE_TRAIN = 0,    // gradients, optimizer state and activations are part of the plan
    QLORA_PURPOSE_EVALUATE = 1, // evaluation and generation only
    // The adapter in desc.adapter without the base: it can be saved, exported and merged into the
    // original weights. Nothing is computed, and no weights are loaded.
    QLORA_PURPOSE_ADAPTER = 2
} qlora_purpose;

// How a PEFT folder orders the matrices of experts. Unsloth wrote B in an order of its own, and
// PEFT up to 0.19 exchanged A and B, both under the same names. Folders written here say what they
// have.
typedef enum qlora_expert_layout {
    // What the folder's metadata say, or its shapes; if several are possible, it is refused.
    QLORA_EXPERT_LAYOUT_AUTO = 0,
    QLORA_EXPERT_LAYOUT_PEFT = 1,     // A [experts, rank, in], B [out, rank, experts]
    QLORA_EXPERT_LAYOUT_PEFT_018 = 2, // A [experts, rank, out], B [in, rank, experts]
    QLORA_EXPERT_LAYOUT_UNSLOTH = 3   // A [experts, rank, in], B [out, experts, rank]
} qlora_expert_layout;

// Called with the progress of long operations. Return false to stop the operation, which then
// returns QLORA_ERR_STOPPED.
typedef bool (*qlora_progress_fn)(void* user, const char* what, uint64_t done, uint64_t total);

typedef struct qlora_plan qlora_plan;

// Zero it before setting fields: 0 is the default of every field.
typedef struct qlora_model_desc {
    uint32_t reserved_must_be_zero0;
    // The model.
    const char* dir;                  // Hugging Face folder or FILE.gguf; NULL = random weights
    const qlora_model_config* config; // set exactly one of dir and config
    // Texts longer than max_positions: "yarn:4" or "linear:2.5", see qlora_config_scale. An adapter
    // that was trained with it needs the same. NULL = none.
    const char* rope_scale;
    uint64_t seed;                    // for random weights and new adapters
    float weight_std;                 // standard deviation of random weights; 0 = 0.02
    qlora_base_format base;           // 0 = NF4; a quantised folder stays as it is
    qlora_head_format head;           // 0 = not quantised
    bool single_quant;                // keep the fp32 block scales instead of quantising them
    // Keeps the 4-bit or FP8 weights in a file, and reads them from it next time if dir and these
    // settings are the same: DIR/model.qlora-nf4, or FILE.gguf.qlora-nf4; FP8: ...qlora-fp8.
    bool keep_quantised;
    const char* quantised_dir; // keep NAME.qlora-nf4 (-fp8) in this folder; NULL = next to dir
    qlora_mode mode;           // 0 = AUTO
    // Its adapters.
    const char* adapter;       // PEFT folder: ranks, targets, scales and weights come from there
    int32_t rank;              // at most 1024; 0 = 16, negative = no adapters
    float alpha;               // 0 = 2 * rank
    bool rslora;               // scale alpha / sqrt(rank) instead of alpha / rank
    float dropout;             // on the input of the adapters, less than 1; 0 = that of `adapter`,
                               // or none; negative = none
    qlora_expert_layout expert_layout; // of the matrices of experts in `adapter`
    bool dora;                 // DoRA: also train the magnitude of every row of the weights
    uint32_t save_modules;     // a set of qlora_save: also train these matrices
    const int32_t* token_rows; // also train these rows of the embedding (and of a tied head)
    int64_t token_row_count;
    // Rows for new tokens: trained as token_rows are (if the head is not tied, all of these rows
    // are then trained in both matrices), or with the matrices of save_modules. Ids from the size
    // of the model's vocabulary on make it larger and must be without gaps.
    const qlora_new_token* new_tokens;
    int64_t new_token_count;
    uint32_t targets;                // qlora_target bits that the model has; 0 = all
    bool train_norms;                // also train the RMSNorm weights; adapters with norms set it
    const qlora_adapter_slot* slots; // the adapters of the model, at most 64; NULL = one
    int64_t slot_count;
    // Its memory.
    qlora_purpose purpose;      // 0 = TRAIN
    qlora_optimizer optimizer;  // 0 = ADAMW
    int64_t tokens;             // maximum tokens per micro-batch; 0 = 2048
    int64_t max_sequences;      // maximum sequences per micro-batch; 0 = tokens / 8, at least 1
    int64_t max_length;         // maximum tokens per sequence, for all adapters; 0 = tokens, as far
                                // as the model goes
    // Rows of logits computed at a time, at most tokens. 0 = 1024, or fewer if the model fits only
    // then, or if that leaves much more of a limit set in qlora_plan_desc for copies of weights.
    int64_t head_chunk;
    int64_t generate_tokens;    // maximum tokens of a text, including the prompt; 0 = no generation
    int64_t generate_sequences; // texts that can be generated at the same time; 0 = 1
    // Positions that all texts together can have in the cache, see TEXTS. 0 = all of them can have
    // generate_tokens.
    int64_t generate_positions;
    // Layers to recompute: ON = all, OFF = none, AUTO = as few as possible. With AUTO, recomputed
    // layers keep the output of attention if there is memory for it; long sequences gain more by
    // that than by whole layers, so it comes first from 4,096 tokens on. Same bits.
    qlora_choice recompute;
    qlora_choice cache; // 16-bit copies of 4-bit or FP8 weights; AUTO = as many as fit the memory;
                        // on the CPU only if a budget is given, since copies gain little there:
                        // products widen each weight once, while they pack it
    // Keeps the inputs of recomputed layers, and a frozen embedding that is not the head, in pinned
    // host memory; same bits. AUTO = only if the memory needs it; ON needs a GPU and recomputes all
    // layers. Where the copies are hidden behind the computation, and as far as the host has memory
    // for them, recomputed layers then also keep q, k, v and the output of attention there, unless
    // recompute is ON. With AUTO and a limit set in qlora_plan_desc, layers that are not recomputed
    // have these there if that leaves room for copies of more weights. If the host has too little
    // memory, the input of one layer in n stays there, and the n - 1 layers after it are computed
    // once more; n is chosen by the plan.
    qlora_choice offload;
    // Tokens that everything but attention is computed for at a time, so that its memory does not
    // grow with the micro-batch; recomputes all layers. 0 = all tokens, unless the memory needs
    // tiles; negative = never tiles.
    int64_t tile;
    int64_t accumulate;     // micro-batches per step to plan for; 0 = 1. A longer step allocates
                            // the memory for its partial sums when it needs it
    const qlora_plan* plan; // from qlora_plan_make; NULL = plan when opening
    qlora_progress_fn progress;
    void* progress_user;
    uint32_t reserved_must_be_zero1;
} qlora_model_desc;

// The machine to plan for.
typedef struct qlora_plan_desc {
    uint64_t bytes;     // memory limit; 0 = what is free now, on the GPU or for this process
    int32_t capability; // compute capability, 90 for 9.0; 0 = that of the context's device
    // Limit of pinned host memory; 0 = three quarters of what is free now if this context has the
    // GPU, otherwise no limit.
    uint64_t host_bytes;
} qlora_plan_desc;

// Where trained parameters are.
typedef enum qlora_place {
    QLORA_PLACE_ATTENTION, // q, k, v and o
    QLORA_PLACE_MLP,       // MLPs that all tokens use, also those beside experts
    QLORA_PLACE_EXPERTS,
    QLORA_PLACE_ROUTER, // and the gate of the MLP beside the experts
    QLORA_PLACE_NORMS,
    QLORA_PLACE_TABLES, // embedding and head, or rows of them
    QLORA_PLACES
} qlora_place;

// What qlora_plan_cost multiplies: of all layers and for each token, unless it says otherwise.
typedef struct qlora_plan_work {
    double products;  // FLOPs with frozen weights in the forward pass
    double gradients; // and for the gradients of their inputs
    double adapters;  // FLOPs of adapters in the forward pass
    double again;     // FLOPs of both in layers that are computed once more
    double pairs[2];  // FLOPs of attention for two tokens of which one sees the other, forward: of
                      // layers without a window, and with one
    double pairs_again[2];
    double label;      // FLOPs of the head for each label, forward
    double moved[3];   // elements read and written beside products: forward, backward, again
    double element;    // bytes of such an element
    double widened[3]; // bytes of dequantising the weights for a micro-batch, in the same order
    double weights;    // number of frozen weights in the layers
    double routed;     // of these, those of experts, of which a token uses some
    double update;     // bytes that an update of all parameters reads and writes
} qlora_plan_work;

struct qlora_plan {
    qlora_model_config config;
    uint64_t source; // hash of the paths of the model folder and the adapter
    qlora_mode mode;
    // Bytes of the one arena that holds the model.
    uint64_t base;        // frozen weights, embedding, head, norms, tables
    uint64_t cache;       // 16-bit copies of 4-bit or FP8 weights
    uint64_t adapters;    // parameters and their 16-bit shadow
    uint64_t optimizer;   // gradients and their partial sums, moments, clip tables
    uint64_t activations; // kept between forward and backward
    uint64_t workspace;   // shared by the layers and, in turn, the logits of a chunk
    uint64_t head;        // the rest of the logits, and the losses
    uint64_t generation;  // key/value cache
    uint64_t batches;     // ids, labels and positions of a micro-batch
    uint64_t total;       // sum of the above
    uint64_t context;     // of the context: scratch, and workspaces of cuBLAS or of the CPU
    uint64_t mapped;      // weights that are used where the files are mapped; not in the total
    uint64_t host;        // pinned host memory of what is offloaded; not in the total
    int64_t tokens;
    int64_t max_sequences;
    int64_t max_length;
    int64_t head_chunk;
    int64_t parameters;       // number of trained parameters
    int64_t trained[QLORA_PLACES]; // of these, by place
    qlora_plan_work work;
    int64_t recompute_layers; // the first n layers keep only their input
    int64_t attention_layers; // of these, the first n also keep the output of attention
    int64_t heads_layers;     // of these, the first n also keep q, k and v
    int64_t cached_layers;    // the first n layers have 16-bit copies of their weights
    int64_t offloaded_layers; // the first n layers have their inputs in host memory
    int64_t offload_every; // of these, only one in n stays there during the step, because the host
                           // has too little memory; 1 = all. The others are computed once more
    int64_t offloaded_attention; // n layers have what they keep of attention there: the first ones
                                 // if layers are recomputed, otherwise spread over all
    bool offloaded_embedding;
    int64_t tile;       // tokens at a time, or 0: all at once
    int64_t base_vocab; // rows of the embedding in the files; config.vocab includes new tokens
    int64_t generate_positions; // that all texts together can have; 0 = as many as they can need
};

// Plans the memory of a model without loading it. No GPU is needed: a CPU context can plan for any
// device. desc NULL = this machine; the CPU's limit is the physical memory and the cgroup's limit,
// less what is in use. With a capability but no bytes, a CPU context plans without a limit. Fails
// with QLORA_ERR_DEVICE_MEMORY if the model cannot fit.
QLORA_API qlora_result qlora_plan_make(qlora_ctx* ctx, const qlora_model_desc* model,
                                       const qlora_plan_desc* desc, qlora_plan* out);
// Writes the plan as a table, truncated if the buffer is too small. Returns the number of bytes
// needed, including the final NUL.
QLORA_API size_t qlora_plan_describe(const qlora_plan* plan, char* buffer, size_t size);
// The same for the places of trained parameters, in one line: "attention 98304, MLP 147456".
QLORA_API size_t qlora_places_describe(const qlora_plan* plan, char* buffer, size_t size);
// What a micro-batch of sequences of these lengths, with so many labels, computes and moves. Of
// experts, those that a token uses are computed and all are dequantised; attention ends at windows.
typedef struct qlora_cost {
    double flops;         // forward and backward
    double again;         // of layers that are computed once more
    double bytes;         // read and written beside products and attention
    double forward;       // FLOPs of the forward pass without adapters
    double forward_bytes; // and its bytes
    double moved;         // elements read and written by the layers in the forward pass
} qlora_cost;

// plan must have been filled in by qlora_plan_make, or belong to a model. All of this is 0 with
// QLORA_NO_TRAIN.
QLORA_API void qlora_plan_cost(const qlora_plan* plan, const int32_t* lengths, int64_t count,
                               double labels, qlora_cost* out);
// Reads config.json and, if present, generation_config.json of a model folder, or the metadata of a
// GGUF file.
QLORA_API qlora_result qlora_config_read(qlora_ctx* ctx, const char* dir, qlora_model_config* out);
// Scales the rotation, and with it max_positions, as qlora_model_desc.rope_scale does: TYPE:FACTOR
// with yarn or linear, computed as transformers does with rope_scaling = {rope_type, factor,
// original_max_position_embeddings}. The product of max_positions and the factor must be whole.
// Models that are already scaled, that rotate layers differently, and multimodal ones are refused.
QLORA_API qlora_result qlora_config_scale(qlora_ctx* ctx, const char* scale,
                                          qlora_model_config* config);

typedef struct qlora_model qlora_model;

// On the CPU, embedding, head and, with a 16-bit base, projections are not copied if the files have
// them in f32, bf16 or f16: the files stay mapped until the model is closed. Replacing or deleting
// them is safe (on Windows it fails); a file that is shortened ends the program when the missing
// part is read, and one that is overwritten changes the model. QLORA_BASE_32BIT copies everything.
//
// Plans unless desc->plan is given, compiles the kernels that the model needs, allocates all its
// memory, runs every operation of a step once, loads the weights, and seals the kernel cache. The
// desc and the objects it points to are not needed afterwards. Waits for the device.
QLORA_API qlora_result qlora_model_open(qlora_ctx* ctx, const qlora_model_desc* desc,
                                        qlora_model** out);
// Fails with QLORA_ERR_STATE, and frees nothing, while a trainer or a generation of the model
// exists. model may be NULL.
QLORA_API qlora_result qlora_model_close(qlora_model* model);

typedef struct qlora_model_info {
    qlora_ctx* ctx;
    const qlora_plan* plan; // includes the config; valid while the model is open
    qlora_purpose purpose;
    int64_t generate_tokens;
    int64_t generate_sequences;
    int64_t generate_positions; // that all texts together can have
    int64_t free_positions;     // those that no text has reserved
    int64_t parameters; // number of trained tensors of an adapter
    bool use_adapters;
    int64_t trainers;    // number of trainers that exist, at most one per adapter
    int64_t generations; // number of generations that exist, at most generate_sequences
    int64_t adapters;    // number of adapters, at least 1
    int64_t adapter;     // the one that qlora_adapter_select has chosen
    // The format of the projections of this model, as qlora_base_format_name calls it; "" without
    // weights (QLORA_PURPOSE_ADAPTER).
    const char* base;
    // The format of those that the adapter loaded last was trained on, if they do not have the same
    // values; otherwise, and if the adapter does not say it, "". Its results then are others.
    const char* trained_base;
} qlora_model_info;
// Does not use the device and does not change qlora_last_error.
QLORA_API qlora_result qlora_model_query(const qlora_model* model, qlora_model_info* out);

// The trained tensors, with PEFT's names, shapes and order: A [rank, in], B [out, rank].
typedef struct qlora_parameter_info {
    char name[192];
    int64_t rows;
    int64_t cols;
} qlora_parameter_info;
// index is less than qlora_model_info.parameters.
QLORA_API qlora_result qlora_parameter_query(const qlora_model* model, int64_t index,
                                             qlora_parameter_info* out);
// Copy rows * cols floats. Both calls wait for the device.
QLORA_API qlora_result qlora_parameter_read(qlora_model* model, int64_t index, float* out);
QLORA_API qlora_result qlora_parameter_write(qlora_model* model, int64_t index, const float* in);

// ---- batches and evaluation ---------------------------------------------------------------------
// What a sequence is to QLORA_METHOD_KTO.
typedef enum qlora_role {
    QLORA_ROLE_UNDESIRABLE = 0,
    QLORA_ROLE_DESIRABLE = 1,
    QLORA_ROLE_MISMATCHED = 2 // a prompt with the completion of another one, to estimate kl
} qlora_role;

// A micro-batch of concatenated sequences. As in transformers, labels[i] is the label of ids[i],
// and the loss at token i is that of predicting labels[i + 1] of the same sequence. The label -100
// means that the token is not trained. Batches are read during the call only, unless noted.
typedef struct qlora_batch {
    const int32_t* ids;
    const int32_t* labels;
    const float* weights;     // one per label, finite and not negative; NULL = all 1
    const int32_t* lengths;   // tokens in each sequence
    const int32_t* sequences; // index of each sequence in the data, for dropout; NULL = 0, 1, ...
    int64_t count;            // number of sequences
    // For training with preferences, see qlora_method.
    const int32_t* roles;     // a qlora_role per sequence
    const double* references; // log-probability of each sequence by the base, as returned by
                              // qlora_eval_sequences with adapters off; NULL = computed in the step
    // The adapter of each sequence, if the model has several; NULL = that of the trainer, or the
    // selected one in an evaluation.
    const int32_t* adapters;
} qlora_batch;
// The sum of the weights of the trained labels: the batch's share of total_labels.
QLORA_API double qlora_batch_labels(const qlora_batch* batch);

typedef struct qlora_eval_info {
    double loss;   // sum of weighted losses
    double labels; // sum of weights
    int64_t tokens;
    double share; // of the batch that has been computed, from 0 to 1: see qlora_eval_slice
} qlora_eval_info;
// Runs the forward pass only, with adapters on or off as set, and waits for the result. Does not
// affect gradients that are being accumulated.
QLORA_API qlora_result qlora_eval(qlora_model* model, const qlora_batch* batch,
                                  qlora_eval_info* out);
// Writes the log-probability of the labels of each sequence, batch->count doubles: the sum over the
// labels of the natural logarithm of their probability, with adapters on or off as set. Weights
// multiply their terms. Waits for the device.
QLORA_API qlora_result qlora_eval_sequences(qlora_model* model, const qlora_batch* batch,
                                            double* out);
// Both in slices, for programs that have a frame to draw or a user who may stop: call begin, then
// slice until *done is true; *out is then that of qlora_eval and `sequences`, unless it is NULL,
// the result of qlora_eval_sequences, to the bit. Until then, out->share tells how far it is, and
// the rest of *out is zero. A slice ends before the next piece would exceed the time; it does
// something in any case. Pieces are those of qlora_train_slice on the CPU; on a GPU, the batch is
// one piece. In between, the model accepts no other call that computes with it or changes its
// adapters; other models of the context can be used. cancel drops the evaluation, and so does a
// slice that fails.
QLORA_API qlora_result qlora_eval_begin(qlora_model* model, const qlora_batch* batch);
QLORA_API qlora_result qlora_eval_slice(qlora_model* model, double milliseconds,
                                        qlora_eval_info* out, double* sequences, bool* done);
QLORA_API qlora_result qlora_eval_cancel(qlora_model* model);
// Writes the logits of every token, tokens * vocab floats; for tests and tools. Waits for the
// device.
QLORA_API qlora_result qlora_eval_logits(qlora_model* model, const qlora_batch* batch, float* out);
