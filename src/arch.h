// ---- architectures ------------------------------------------------------------------------------
//
// One description of a decoder block, and one row per family that says which parts of it exist.
// The config reader, the loader, the planner, the adapters' names, GGUF and the passes through the
// model read the row; none of them contains the name of a family.
//
//   x = E[token] embedding_scale
//   per layer
//     a = norm 1 of x, or x
//     q, k, v = a Wq^T + bq, ...                          separate or one fused matrix
//     q, k = their norm, per head or over the whole width; then rotated
//     o = Wo softmax(cap(attention_scale q k^T)) v        within the window of the layer
//     x = x + residual_scale (norm 2 of o, or o)
//     b = norm 3 of x, or x; of some families a
//     f = Wdown (act(Wgate b) Wup b)                      gate and up separate or fused, or
//     f = Wdown relu(Wup b)^2
//     x = x + residual_scale (norm 4 of f, or f)
//   logits = cap(head (final norm of x) / logits_divisor),  cap(y) = c tanh(y / c)

// The stacks of projections that share an input.
#define QLORA__GROUPS 4
enum { QLORA__QKV, QLORA__O, QLORA__GATE_UP, QLORA__DOWN };

// The norms of a layer, in the order of their places in the parameter arena.
enum {
    QLORA__NORM_ATTENTION,     // before attention
    QLORA__NORM_ATTENTION_OUT, // on its output
    QLORA__NORM_MLP,           // before the MLP
    QLORA__NORM_MLP_OUT,       // on its output
    QLORA__NORM_Q,
    QLORA__NORM_K,
    QLORA__NORMS
};

// A branch of a layer: the residual stream, through the norm `before`, enters the stack `in`; what
// leaves the stack `out`, through the norm `after`, is added to the stream. The branches of a layer
// follow each other; if they stand side by side (QLORA__HAS_SIDE_BY_SIDE), all of them read the
// stream before the first one, through its norm.
typedef struct qlora__branch {
    int before;
    int after;
    int in;
    int out;
} qlora__branch;

enum { QLORA__ATTENTION, QLORA__MLP, QLORA__BRANCHES };
static const qlora__branch qlora__branches[QLORA__BRANCHES] = {
    {QLORA__NORM_ATTENTION, QLORA__NORM_ATTENTION_OUT, QLORA__QKV, QLORA__O},
    {QLORA__NORM_MLP, QLORA__NORM_MLP_OUT, QLORA__GATE_UP, QLORA__DOWN}};

// The numbers of rows and columns of projections, which follow from the config.
typedef enum qlora__width {
    QLORA__WIDTH_HIDDEN,
    QLORA__WIDTH_Q,       // heads * head_dim
    QLORA__WIDTH_KV,      // kv_heads * head_dim
    QLORA__WIDTH_QKV,     // q + 2 kv
    QLORA__WIDTH_MLP,     // intermediate
    QLORA__WIDTH_GATE_UP, // 2 intermediate
    QLORA__WIDTH_SHARED,  // of the MLP beside the experts
    QLORA__WIDTH_SHARED_GATE_UP,
    QLORA__WIDTH_EXPERT, // of one expert
    QLORA__WIDTH_EXPERT_GATE_UP,
    QLORA__WIDTH_EXPERTS, // their number
    QLORA__WIDTH_ONE,
    QLORA__WIDTHS
} qlora__width;

// The setting of the config that gives a projection its bias.
typedef enum qlora__bias {
    QLORA__BIAS_QKV,
    QLORA__BIAS_O,
    QLORA__BIAS_MLP,
    QLORA__BIAS_NONE
} qlora__bias;

// A projection: the number of its bit in qlora_target, which is also its number for dropout; its
// stack; its columns and rows; its bias; whether all its rows are rotated by position; its module
// within a layer; its tensor in GGUF files. A second GGUF name means that those files split the
// matrix into two halves of its rows.
typedef struct qlora__projection_row {
    int bit;
    int group;
    qlora__width in;
    qlora__width out;
    qlora__bias bias;
    bool rotated;
    const char* module;
    const char* gguf;
    const char* gguf_second;
} qlora__projection_row;

#define QLORA__PROJECTIONS 7 // at most, per layer

// The kinds of mixers, the parts in which tokens look at each other.
typedef enum qlora__mixer {
    QLORA__MIXER_SOFTMAX, // o(softmax attention of q, k and v)
    QLORA__MIXERS
} qlora__mixer;

// The kinds of feed-forward parts.
typedef enum qlora__ffn {
    QLORA__FFN_GATED,   // down(act(gate) up)
    QLORA__FFN_PLAIN,   // down(relu(up)^2); up is the stack QLORA__GATE_UP
    QLORA__FFN_EXPERTS, // such MLPs that a router chooses from, and one for all tokens or none
    QLORA__FFNS
} qlora__ffn;

// What a router makes of its scores.
typedef enum qlora__router {
    QLORA__ROUTER_SOFTMAX,        // weights: the softmax over all experts
    QLORA__ROUTER_SOFTMAX_CHOSEN, // over those that are chosen
    QLORA__ROUTER_SIGMOID         // sigmoids; a correction and groups decide the choice
} qlora__router;

// The projections of the experts of a layer. They follow those of its layout: the router, the gate
// of the MLP that all tokens use, if it has one, and `count` per expert, in whose modules * is the
// number of the expert. Files may have one matrix of all experts instead: `stacked`, in which a
// matrix is number `row` of those that an expert has in it.
typedef struct qlora__expert_rows {
    qlora__router score;
    qlora__projection_row router;
    qlora__projection_row shared_gate; // module NULL = none
    const char* correction;            // the tensor; NULL = none
    // PEFT turns modules of that name into matrices of experts, also those of other MLPs, which
    // are therefore addressed as parameters.
    bool converts;
    const char* peft_router; // the module of the router in PEFT files
    const char* peft;        // that of all experts
    int count;               // 2, or 3 if gate and up are matrices of their own
    qlora__projection_row rows[3];
    struct {
        const char* names[2]; // of which a file may have one
        int row;
    } stacked[3];
} qlora__expert_rows;

// The projections of a layer, stack by stack.
typedef struct qlora__layout {
    qlora__mixer mixer;
    qlora__ffn ffn;
    const qlora__expert_rows* experts; // NULL unless ffn is QLORA__FFN_EXPERTS
    int count;
    qlora__projection_row rows[QLORA__PROJECTIONS];
    struct {
        int first;
        int count;
    } groups[QLORA__GROUPS];
} qlora__layout;

// clang-format off
#define QLORA__ROWS_QKV \
    {0, QLORA__QKV, QLORA__WIDTH_HIDDEN, QLORA__WIDTH_Q, QLORA__BIAS_QKV, true, \
     "self_attn.q_proj", "attn_q", NULL}, \
    {1, QLORA__QKV, QLORA__WIDTH_HIDDEN, QLORA__WIDTH_KV, QLORA__BIAS_QKV, true, \
     "self_attn.k_proj", "attn_k", NULL}, \
    {2, QLORA__QKV, QLORA__WIDTH_HIDDEN, QLORA__WIDTH_KV, QLORA__BIAS_QKV, false, \
     "self_attn.v_proj", "attn_v", NULL}
#define QLORA__ROW_O \
    {3, QLORA__O, QLORA__WIDTH_Q, QLORA__WIDTH_HIDDEN, QLORA__BIAS_O, false, \
     "self_attn.o_proj", "attn_output", NULL}
#define QLORA__ROW_MLP(bit, group, in, out, module, gguf, gguf_second) \
    {bit, group, in, out, QLORA__BIAS_MLP, false, module, gguf, gguf_second}
#define QLORA__ROW_GATE_UP(module, gguf, gguf_second) \
    QLORA__ROW_MLP(8, QLORA__GATE_UP, QLORA__WIDTH_HIDDEN, QLORA__WIDTH_GATE_UP, \
                   module, gguf, gguf_second)
#define QLORA__ROW_DOWN(module) \
    QLORA__ROW_MLP(6, QLORA__DOWN, QLORA__WIDTH_MLP, QLORA__WIDTH_HIDDEN, module, "ffn_down", NULL)
#define QLORA__ROW_NONE \
    {0, 0, QLORA__WIDTH_HIDDEN, QLORA__WIDTH_HIDDEN, QLORA__BIAS_MLP, false, NULL, NULL, NULL}

static const qlora__layout qlora__layout_seven = {QLORA__MIXER_SOFTMAX, QLORA__FFN_GATED, NULL, 7,
    {QLORA__ROWS_QKV, QLORA__ROW_O,
     QLORA__ROW_MLP(4, QLORA__GATE_UP, QLORA__WIDTH_HIDDEN, QLORA__WIDTH_MLP,
                    "mlp.gate_proj", "ffn_gate", NULL),
     QLORA__ROW_MLP(5, QLORA__GATE_UP, QLORA__WIDTH_HIDDEN, QLORA__WIDTH_MLP,
                    "mlp.up_proj", "ffn_up", NULL),
     QLORA__ROW_DOWN("mlp.down_proj")},
    {{0, 3}, {3, 1}, {4, 2}, {6, 1}}};
// Phi 3: q, k and v in one matrix, gate and up in another.
static const qlora__layout qlora__layout_fused = {QLORA__MIXER_SOFTMAX, QLORA__FFN_GATED, NULL, 4,
    {{7, QLORA__QKV, QLORA__WIDTH_HIDDEN, QLORA__WIDTH_QKV, QLORA__BIAS_QKV, false,
      "self_attn.qkv_proj", "attn_qkv", NULL},
     QLORA__ROW_O, QLORA__ROW_GATE_UP("mlp.gate_up_proj", "ffn_up", NULL),
     QLORA__ROW_DOWN("mlp.down_proj"), QLORA__ROW_NONE, QLORA__ROW_NONE, QLORA__ROW_NONE},
    {{0, 1}, {1, 1}, {2, 1}, {3, 1}}};
// GLM: only gate and up in one matrix.
static const qlora__layout qlora__layout_gate_up = {QLORA__MIXER_SOFTMAX, QLORA__FFN_GATED, NULL, 6,
    {QLORA__ROWS_QKV, QLORA__ROW_O, QLORA__ROW_GATE_UP("mlp.gate_up_proj", "ffn_up", NULL),
     QLORA__ROW_DOWN("mlp.down_proj"), QLORA__ROW_NONE},
    {{0, 3}, {3, 1}, {4, 1}, {5, 1}}};
// Granite 4: the same under the names of its shared MLP; GGUF files split the matrix.
static const qlora__layout qlora__layout_shared_mlp = {
    QLORA__MIXER_SOFTMAX, QLORA__FFN_GATED, NULL, 6,
    {QLORA__ROWS_QKV, QLORA__ROW_O,
     QLORA__ROW_GATE_UP("shared_mlp.input_linear", "ffn_gate", "ffn_up"),
     QLORA__ROW_DOWN("shared_mlp.output_linear"), QLORA__ROW_NONE},
    {{0, 3}, {3, 1}, {4, 1}, {5, 1}}};
// Arcee: no gate.
static const qlora__layout qlora__layout_plain = {QLORA__MIXER_SOFTMAX, QLORA__FFN_PLAIN, NULL, 6,
    {QLORA__ROWS_QKV, QLORA__ROW_O,
     QLORA__ROW_MLP(5, QLORA__GATE_UP, QLORA__WIDTH_HIDDEN, QLORA__WIDTH_MLP,
                    "mlp.up_proj", "ffn_up", NULL),
     QLORA__ROW_DOWN("mlp.down_proj"), QLORA__ROW_NONE},
    {{0, 3}, {3, 1}, {4, 1}, {5, 1}}};

#define QLORA__ROW_OF_EXPERT(bit, group, in, out, module, gguf) \
    {bit, group, QLORA__WIDTH_##in, QLORA__WIDTH_##out, QLORA__BIAS_NONE, false, module, gguf, NULL}
#define QLORA__ROW_ROUTER(module) \
    QLORA__ROW_OF_EXPERT(13, QLORA__GATE_UP, HIDDEN, EXPERTS, module, "ffn_gate_inp")
#define QLORA__ROWS_EXPERT(gate, up, down) \
    {QLORA__ROW_OF_EXPERT(11, QLORA__GATE_UP, HIDDEN, EXPERT, gate, "ffn_gate_exps"), \
     QLORA__ROW_OF_EXPERT(11, QLORA__GATE_UP, HIDDEN, EXPERT, up, "ffn_up_exps"), \
     QLORA__ROW_OF_EXPERT(12, QLORA__DOWN, EXPERT, HIDDEN, down, "ffn_down_exps")}
#define QLORA__STACKED_MLP \
    {{{"mlp.experts.gate_up_proj", NULL}, 0}, {{"mlp.experts.gate_up_proj", NULL}, 1}, \
     {{"mlp.experts.down_proj", NULL}, 0}}
#define QLORA__EXPERTS_MLP(score, gate, correction, converts) \
    {score, QLORA__ROW_ROUTER("mlp.gate"), gate, correction, converts, "mlp.gate", \
     "mlp.experts", 3, \
     QLORA__ROWS_EXPERT("mlp.experts.*.gate_proj", "mlp.experts.*.up_proj", \
                        "mlp.experts.*.down_proj"), \
     QLORA__STACKED_MLP}
#define QLORA__ATTENTION_ONLY 4, {QLORA__ROWS_QKV, QLORA__ROW_O, QLORA__ROW_NONE, \
     QLORA__ROW_NONE, QLORA__ROW_NONE}, {{0, 3}, {3, 1}, {4, 0}, {4, 0}}
#define QLORA__ROWS_SHARED(gate, up, down) \
    QLORA__ROW_MLP(4, QLORA__GATE_UP, QLORA__WIDTH_HIDDEN, QLORA__WIDTH_SHARED, gate, \
                   "ffn_gate_shexp", NULL), \
    QLORA__ROW_MLP(5, QLORA__GATE_UP, QLORA__WIDTH_HIDDEN, QLORA__WIDTH_SHARED, up, \
                   "ffn_up_shexp", NULL), \
    QLORA__ROW_MLP(6, QLORA__DOWN, QLORA__WIDTH_SHARED, QLORA__WIDTH_HIDDEN, down, \
                   "ffn_down_shexp", NULL)

static const qlora__expert_rows qlora__experts_softmax =
    QLORA__EXPERTS_MLP(QLORA__ROUTER_SOFTMAX, QLORA__ROW_NONE, NULL, true);
static const qlora__expert_rows qlora__experts_gated_mlp = QLORA__EXPERTS_MLP(
    QLORA__ROUTER_SOFTMAX,
    QLORA__ROW_OF_EXPERT(14, QLORA__GATE_UP, HIDDEN, ONE, "mlp.shared_expert_gate",
                         "ffn_gate_inp_shexp"),
    NULL, false);
static const qlora__expert_rows qlora__experts_sigmoid =
    QLORA__EXPERTS_MLP(QLORA__ROUTER_SIGMOID, QLORA__ROW_NONE, "mlp.gate.e_score_correction_bias",
                       true);
// Mixtral: names of its own.
static const qlora__expert_rows qlora__experts_mixtral = {
    QLORA__ROUTER_SOFTMAX_CHOSEN, QLORA__ROW_ROUTER("block_sparse_moe.gate"), QLORA__ROW_NONE,
    NULL, true, "mlp.gate", "mlp.experts", 3,
    QLORA__ROWS_EXPERT("block_sparse_moe.experts.*.w1", "block_sparse_moe.experts.*.w3",
                       "block_sparse_moe.experts.*.w2"),
    QLORA__STACKED_MLP};
// Granite: the matrices of all experts in one tensor, gate and up as one matrix.
static const qlora__expert_rows qlora__experts_granite = {
    QLORA__ROUTER_SOFTMAX_CHOSEN, QLORA__ROW_ROUTER("block_sparse_moe.router.layer"),
    QLORA__ROW_NONE, NULL, false, "block_sparse_moe.router", "block_sparse_moe.experts", 2,
    {{11, QLORA__GATE_UP, QLORA__WIDTH_HIDDEN, QLORA__WIDTH_EXPERT_GATE_UP, QLORA__BIAS_NONE,
      false, "block_sparse_moe.experts.*.gate_up", "ffn_gate_exps", "ffn_up_exps"},
     QLORA__ROW_OF_EXPERT(12, QLORA__DOWN, EXPERT, HIDDEN,
                          "block_sparse_moe.experts.*.down", "ffn_down_exps"),
     QLORA__ROW_NONE},
    {{{"block_sparse_moe.input_linear.weight", "block_sparse_moe.experts.gate_up_proj"}, 0},
     {{"block_sparse_moe.output_linear.weight", "block_sparse_moe.experts.down_proj"}, 0},
     {{NULL, NULL}, 0}}};

static const qlora__layout qlora__layout_moe = {
    QLORA__MIXER_SOFTMAX, QLORA__FFN_EXPERTS, &qlora__experts_softmax, QLORA__ATTENTION_ONLY};
static const qlora__layout qlora__layout_mixtral = {
    QLORA__MIXER_SOFTMAX, QLORA__FFN_EXPERTS, &qlora__experts_mixtral, QLORA__ATTENTION_ONLY};
static const qlora__layout qlora__layout_granite_moe = {
    QLORA__MIXER_SOFTMAX, QLORA__FFN_EXPERTS, &qlora__experts_granite, QLORA__ATTENTION_ONLY};
static const qlora__layout qlora__layout_granite4_moe = {
    QLORA__MIXER_SOFTMAX, QLORA__FFN_EXPERTS, &qlora__experts_granite, 6,
    {QLORA__ROWS_QKV, QLORA__ROW_O,
     QLORA__ROW_MLP(8, QLORA__GATE_UP, QLORA__WIDTH_HIDDEN, QLORA__WIDTH_SHARED_GATE_UP,
                    "shared_mlp.input_linear", "ffn_gate_shexp", "ffn_up_shexp"),
     QLORA__ROW_MLP(6, QLORA__DOWN, QLORA__WIDTH_SHARED, QLORA__WIDTH_HIDDEN,
                    "shared_mlp.output_linear", "ffn_down_shexp", NULL), QLORA__ROW_NONE},
    {{0, 3}, {3, 1}, {4, 1}, {5, 1}}};
static const qlora__layout qlora__layout_qwen2_moe = {
    QLORA__MIXER_SOFTMAX, QLORA__FFN_EXPERTS, &qlora__experts_gated_mlp, 7,
    {QLORA__ROWS_QKV, QLORA__ROW_O,
     QLORA__ROWS_SHARED("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj",
                        "mlp.shared_expert.down_proj")},
    {{0, 3}, {3, 1}, {4, 2}, {6, 1}}};
static const qlora__layout qlora__layout_glm4_moe = {
    QLORA__MIXER_SOFTMAX, QLORA__FFN_EXPERTS, &qlora__experts_sigmoid, 7,
    {QLORA__ROWS_QKV, QLORA__ROW_O,
     QLORA__ROWS_SHARED("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj",
                        "mlp.shared_experts.down_proj")},
    {{0, 3}, {3, 1}, {4, 2}, {6, 1}}};
// clang-format on

// The names of the norms around attention and MLP; NULL = the layer has no such norm.
typedef struct qlora__norm_names {
    const char* module[4];
    const char* gguf[4];
} qlora__norm_names;

static const qlora__norm_names qlora__norms_before = {
    {"input_layernorm", NULL, "post_attention_layernorm", NULL},
    {"attn_norm", NULL, "ffn_norm", NULL}};
static const qlora__norm_names qlora__norms_after = {
    {NULL, "post_attention_layernorm", NULL, "post_feedforward_layernorm"},
    {NULL, "post_attention_norm", NULL, "post_ffw_norm"}};
static const qlora__norm_names qlora__norms_around = {
    {"input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
     "post_feedforward_layernorm"},
    {"attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"}};
static const qlora__norm_names qlora__norms_glm4 = {
    {"input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm",
     "post_mlp_layernorm"},
    {"attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"}};
static const qlora__norm_names qlora__norms_first = {{"input_layernorm", NULL, NULL, NULL},
                                                     {"attn_norm", NULL, NULL, NULL}};
static const qlora__norm_names qlora__norms_seed = {
    {"input_layernorm", NULL, "post_attention_layernorm", NULL},
    {"attn_norm", NULL, "post_attention_norm", NULL}};

// What a block has beyond Llama's.
enum {
    QLORA__HAS_QK_NORM = 1,        // q and k are normalised, per head
    QLORA__HAS_WIDE_QK_NORM = 2,   // over the whole width instead
    QLORA__HAS_NORM_OFFSET = 4,    // safetensors files store norm weights minus 1
    QLORA__HAS_GELU = 8,           // GELU (tanh form) instead of SiLU
    QLORA__HAS_ROOT_SCALE = 16,    // the embedding scales its rows by the root of hidden
    QLORA__HAS_PAIRED_ROPE = 32,   // pairs of neighbours are rotated, not the two halves
    QLORA__HAS_PERMUTED_GGUF = 64, // GGUF files order the rows of q and k for pairs of neighbours
    QLORA__HAS_SECTIONS = 128,     // the rotation has sections for images
    QLORA__HAS_MEAN_NORM = 256,    // LayerNorm without biases instead of RMSNorm
    QLORA__HAS_SIDE_BY_SIDE = 512  // attention and MLP read the same norm
};

// What GGUF files of an architecture leave to llama.cpp.
enum {
    QLORA__GGUF_NEEDS_WINDOW = 1, // of two families with one name, this one has windows
    QLORA__GGUF_LOCAL_THETA = 2,  // rope.freq_base_swa is read
    QLORA__GGUF_OWN_WINDOW = 4,   // a file without a window has the default one
    QLORA__GGUF_RENORMALISES = 8  // weights of experts always sum to 1
};

// What llama.cpp knows of a family by its number of layers; 0 = nothing.
typedef struct qlora__gguf_rule {
    uint32_t flags;
    int32_t window_layers; // only files with so many have windows
    int32_t scalar_layers; // those divide q by the root of hidden / heads, not of head_dim
} qlora__gguf_rule;

// How config.json is read, beyond the keys that all families share.
enum {
    QLORA__READS_QKV_BIAS = 1,         // q, k and v always have biases
    QLORA__READS_ATTENTION_BIAS = 2,   // attention_bias: q, k, v and o
    QLORA__READS_ATTENTION_BIAS_3 = 4, // attention_bias: q, k and v, true by default
    QLORA__READS_OUT_BIAS = 8,         // attention_out_bias: o
    QLORA__READS_MLP_BIAS = 16,        // mlp_bias
    QLORA__READS_PARTIAL = 32,         // partial_rotary_factor
    QLORA__READS_LONGROPE = 64,        // longrope, also under its older names
    QLORA__READS_ROPE_PER_KIND = 128,  // separate rotation of layers with and without a window
    QLORA__READS_MULTIPLIERS = 256,    // embedding, residual and attention multiplier, logits scale
    QLORA__READS_QUERY_SCALAR = 512,   // query_pre_attn_scalar
    QLORA__READS_CAPS = 1024,          // attn_logit_softcapping and final_logit_softcapping
    QLORA__READS_FINAL_CAP = 2048,     // final_logit_softcapping only
    QLORA__READS_QUERY_BETA = 4096,    // llama_4_scaling_beta, which is required
    QLORA__READS_HYBRID = 8192,        // layer types and experts of granitemoehybrid
    QLORA__READS_ACTIVATION = 16384,   // hidden_activation, not hidden_act
    QLORA__READS_LOCAL_THETA = 32768,  // rope_local_base_freq, for layers with a window
    QLORA__READS_PATTERN = 65536,      // sliding_window_pattern
    QLORA__READS_LOGIT_SCALE = 131072, // logit_scale, a factor
    QLORA__READS_NO_HEAD_DIM = 262144, // heads always have hidden / heads columns
    QLORA__READS_EXPERTS = 524288,     // every layer has experts, unless the config says otherwise
    QLORA__READS_RENORMALISE = 1 << 20, // norm_topk_prob, false by default
    QLORA__READS_OWN_WIDTH = 1 << 21,   // moe_intermediate_size, not intermediate_size
    QLORA__READS_QK_NORM = 1 << 22,     // use_qk_norm
    QLORA__READS_BIAS_3_OFF = 1 << 23   // attention_bias: q, k and v, false by default
};

// Which layers have a window.
typedef enum qlora__window_rule {
    QLORA__WINDOW_NONE,
    QLORA__WINDOW_ALL,     // every layer, if sliding_window is given, or those in layer_types
    QLORA__WINDOW_EVERY,   // every layer, if sliding_window is given
    QLORA__WINDOW_QWEN,    // use_sliding_window, from max_window_layers on
    QLORA__WINDOW_USED,    // use_sliding_window, every layer
    QLORA__WINDOW_LISTED,  // use_sliding_window, those in layer_types, which must be given
    QLORA__WINDOW_PATTERN, // layer_types, or all but every n-th
    QLORA__WINDOW_NOPE     // use_sliding_window, on the layers without rotation
} qlora__window_rule;

// Which layers are not rotated.
typedef enum qlora__nope_rule {
    QLORA__NOPE_NONE,
    QLORA__NOPE_LISTED,   // no_rope_layers, or every fourth
    QLORA__NOPE_FULL,     // those without a window, if others have one
    QLORA__NOPE_ALL_FULL, // those without a window
    QLORA__NOPE_UNNAMED   // all, unless position_embedding_type is "rope"
} qlora__nope_rule;

// The values of keys that a config.json leaves out; a size of 0 must be given.
typedef struct qlora__arch_defaults {
    int32_t vocab;
    int32_t hidden;
    int32_t intermediate;
    int32_t layers;
    int32_t heads;
    int32_t kv_heads; // 0 = heads
    int32_t head_dim; // 0 = hidden / heads
    int32_t max_positions;
    int32_t window;
    int32_t pattern;
    double theta;
    double theta_sliding; // only if rotation differs between kinds of layers
    double eps;
    double partial;
    bool tied;
} qlora__arch_defaults;

typedef struct qlora__arch {
    qlora_family family;
    const char* model_type;
    const char* architecture;
    const char* gguf;
    const qlora__layout* layout;
    const qlora__layout* experts; // of layers with experts; NULL = there are none
    const qlora__norm_names* norms;
    uint32_t has;
    uint32_t reads;
    qlora__window_rule window;
    qlora__nope_rule nope;
    qlora__arch_defaults defaults;
    qlora__gguf_rule gguf_rule;
} qlora__arch;

// clang-format off
#define QLORA__SIZES_NONE 0, 0, 0, 0, 0, 0
#define QLORA__GGUF_PLAIN {0, 0, 0}
static const qlora__arch qlora__archs[] = {
    {QLORA_FAMILY_LLAMA, "llama", "LlamaForCausalLM", "llama",
     &qlora__layout_seven, NULL, &qlora__norms_before, QLORA__HAS_PERMUTED_GGUF,
     QLORA__READS_ATTENTION_BIAS | QLORA__READS_MLP_BIAS, QLORA__WINDOW_NONE, QLORA__NOPE_NONE,
     {QLORA__SIZES_NONE, 0, 2048, 0, 0, 1e4, 0, 1e-6, 1, false},
     QLORA__GGUF_PLAIN},
    {QLORA_FAMILY_MISTRAL, "mistral", "MistralForCausalLM", "llama",
     &qlora__layout_seven, NULL, &qlora__norms_before, QLORA__HAS_PERMUTED_GGUF,
     0, QLORA__WINDOW_ALL, QLORA__NOPE_NONE,
     {0, 0, 0, 0, 0, 8, 0, 131072, 4096, 0, 1e4, 0, 1e-6, 1, false},
     QLORA__GGUF_PLAIN},
    {QLORA_FAMILY_QWEN2, "qwen2", "Qwen2ForCausalLM", "qwen2",
     &qlora__layout_seven, NULL, &qlora__norms_before, 0,
     QLORA__READS_QKV_BIAS, QLORA__WINDOW_QWEN, QLORA__NOPE_NONE,
     {0, 0, 0, 0, 0, 32, 0, 32768, 4096, 0, 1e4, 0, 1e-6, 1, false},
     QLORA__GGUF_PLAIN},
    {QLORA_FAMILY_QWEN3, "qwen3", "Qwen3ForCausalLM", "qwen3",
     &qlora__layout_seven, NULL, &qlora__norms_before, QLORA__HAS_QK_NORM,
     QLORA__READS_ATTENTION_BIAS, QLORA__WINDOW_QWEN, QLORA__NOPE_NONE,
     {0, 0, 0, 0, 0, 32, 128, 32768, 4096, 0, 1e4, 0, 1e-6, 1, false},
     QLORA__GGUF_PLAIN},
    {QLORA_FAMILY_GEMMA, "gemma", "GemmaForCausalLM", "gemma",
     &qlora__layout_seven, NULL, &qlora__norms_before,
     QLORA__HAS_NORM_OFFSET | QLORA__HAS_GELU | QLORA__HAS_ROOT_SCALE,
     QLORA__READS_ATTENTION_BIAS, QLORA__WINDOW_NONE, QLORA__NOPE_NONE,
     {256000, 3072, 24576, 28, 16, 16, 256, 8192, 0, 0, 1e4, 0, 1e-6, 1, true},
     QLORA__GGUF_PLAIN},
    {QLORA_FAMILY_GEMMA2, "gemma2", "Gemma2ForCausalLM", "gemma2",
     &qlora__layout_seven, NULL, &qlora__norms_around,
     QLORA__HAS_NORM_OFFSET | QLORA__HAS_GELU | QLORA__HAS_ROOT_SCALE,
     QLORA__READS_ATTENTION_BIAS | QLORA__READS_QUERY_SCALAR | QLORA__READS_CAPS |
         QLORA__READS_ACTIVATION,
     QLORA__WINDOW_PATTERN, QLORA__NOPE_NONE,
     {256000, 2304, 9216, 26, 8, 4, 256, 8192, 4096, 2, 1e4, 0, 1e-6, 1, true},
     {QLORA__GGUF_OWN_WINDOW, 0, 46}},
    {QLORA_FAMILY_GEMMA3, "gemma3_text", "Gemma3ForCausalLM", "gemma3",
     &qlora__layout_seven, NULL, &qlora__norms_around,
     QLORA__HAS_QK_NORM | QLORA__HAS_NORM_OFFSET | QLORA__HAS_GELU | QLORA__HAS_ROOT_SCALE,
     QLORA__READS_ATTENTION_BIAS | QLORA__READS_QUERY_SCALAR | QLORA__READS_FINAL_CAP |
         QLORA__READS_ACTIVATION | QLORA__READS_ROPE_PER_KIND | QLORA__READS_LOCAL_THETA |
         QLORA__READS_PATTERN,
     QLORA__WINDOW_PATTERN, QLORA__NOPE_NONE,
     {262208, 2304, 9216, 26, 8, 4, 256, 131072, 4096, 6, 1e6, 1e4, 1e-6, 1, true},
     {QLORA__GGUF_LOCAL_THETA, 0, 62}},
    {QLORA_FAMILY_PHI3, "phi3", "Phi3ForCausalLM", "phi3",
     &qlora__layout_fused, NULL, &qlora__norms_before, 0,
     QLORA__READS_PARTIAL | QLORA__READS_LONGROPE, QLORA__WINDOW_EVERY, QLORA__NOPE_NONE,
     {32064, 3072, 8192, 32, 32, 0, 0, 4096, 0, 0, 1e4, 0, 1e-5, 1, false},
     QLORA__GGUF_PLAIN},
    {QLORA_FAMILY_SMOLLM3, "smollm3", "SmolLM3ForCausalLM", "smollm3",
     &qlora__layout_seven, NULL, &qlora__norms_before, QLORA__HAS_PERMUTED_GGUF,
     QLORA__READS_ATTENTION_BIAS | QLORA__READS_MLP_BIAS, QLORA__WINDOW_NOPE, QLORA__NOPE_LISTED,
     {128256, 2048, 11008, 36, 16, 4, 0, 32768, 0, 0, 2e6, 0, 1e-6, 1, true},
     QLORA__GGUF_PLAIN},
    {QLORA_FAMILY_OLMO2, "olmo2", "Olmo2ForCausalLM", "olmo2",
     &qlora__layout_seven, NULL, &qlora__norms_after, QLORA__HAS_QK_NORM | QLORA__HAS_WIDE_QK_NORM,
     QLORA__READS_ATTENTION_BIAS, QLORA__WINDOW_NONE, QLORA__NOPE_NONE,
     {50304, 4096, 11008, 32, 32, 0, 0, 2048, 0, 0, 1e4, 0, 1e-5, 1, false},
     QLORA__GGUF_PLAIN},
    {QLORA_FAMILY_OLMO3, "olmo3", "Olmo3ForCausalLM", "olmo2",
     &qlora__layout_seven, NULL, &qlora__norms_after, QLORA__HAS_QK_NORM | QLORA__HAS_WIDE_QK_NORM,
     QLORA__READS_ATTENTION_BIAS | QLORA__READS_ROPE_PER_KIND,
     QLORA__WINDOW_PATTERN, QLORA__NOPE_NONE,
     {50304, 4096, 11008, 32, 32, 0, 0, 2048, 4096, 4, 5e5, 5e5, 1e-5, 1, false},
     {QLORA__GGUF_NEEDS_WINDOW, 0, 0}},
    {QLORA_FAMILY_GRANITE, "granite", "GraniteForCausalLM", "granite",
     &qlora__layout_seven, NULL, &qlora__norms_before, QLORA__HAS_PERMUTED_GGUF,
     QLORA__READS_ATTENTION_BIAS | QLORA__READS_MLP_BIAS | QLORA__READS_MULTIPLIERS,
     QLORA__WINDOW_NONE, QLORA__NOPE_NONE,
     {32000, 4096, 11008, 32, 32, 0, 0, 2048, 0, 0, 1e4, 0, 1e-6, 1, false},
     QLORA__GGUF_PLAIN},
    {QLORA_FAMILY_GRANITE4, "granitemoehybrid", "GraniteMoeHybridForCausalLM", "granite",
     &qlora__layout_shared_mlp, &qlora__layout_granite4_moe, &qlora__norms_before,
     QLORA__HAS_PERMUTED_GGUF,
     QLORA__READS_ATTENTION_BIAS | QLORA__READS_MULTIPLIERS | QLORA__READS_HYBRID,
     QLORA__WINDOW_NONE, QLORA__NOPE_UNNAMED,
     {32000, 4096, 1024, 32, 32, 0, 0, 2048, 0, 0, 1e4, 0, 1e-6, 1, false},
     QLORA__GGUF_PLAIN},
    {QLORA_FAMILY_GLM, "glm", "GlmForCausalLM", "chatglm",
     &qlora__layout_gate_up, NULL, &qlora__norms_before, QLORA__HAS_PAIRED_ROPE,
     QLORA__READS_ATTENTION_BIAS_3 | QLORA__READS_PARTIAL, QLORA__WINDOW_NONE, QLORA__NOPE_NONE,
     {151552, 4096, 13696, 40, 32, 2, 128, 131072, 0, 0, 1e4, 0, 1.5625e-7, 0.5, false},
     QLORA__GGUF_PLAIN},
    {QLORA_FAMILY_GLM4, "glm4", "Glm4ForCausalLM", "glm4",
     &qlora__layout_gate_up, NULL, &qlora__norms_glm4, QLORA__HAS_PAIRED_ROPE,
     QLORA__READS_ATTENTION_BIAS_3 | QLORA__READS_PARTIAL, QLORA__WINDOW_NONE, QLORA__NOPE_NONE,
     {151552, 4096, 13696, 40, 32, 2, 128, 131072, 0, 0, 1e4, 0, 1.5625e-7, 0.5, false},
     QLORA__GGUF_PLAIN},
    {QLORA_FAMILY_MINISTRAL3, "ministral3", "Ministral3ForCausalLM", "mistral3",
     &qlora__layout_seven, NULL, &qlora__norms_before, QLORA__HAS_PERMUTED_GGUF,
     QLORA__READS_QUERY_BETA, QLORA__WINDOW_EVERY, QLORA__NOPE_NONE,
     {131072, 4096, 14336, 34, 32, 8, 128, 262144, 0, 0, 1e6, 0, 1e-5, 1, false},
     QLORA__GGUF_PLAIN},
    {QLORA_FAMILY_EXAONE4, "exaone4", "Exaone4ForCausalLM", "exaone4",
     &qlora__layout_seven, NULL, &qlora__norms_after, QLORA__HAS_QK_NORM,
     QLORA__READS_PATTERN, QLORA__WINDOW_PATTERN, QLORA__NOPE_FULL,
     {102400, 4096, 16384, 32, 32, 32, 0, 2048, 4096, 4, 1e4, 0, 1e-5, 1, false},
     {QLORA__GGUF_OWN_WINDOW, 64, 0}},
    {QLORA_FAMILY_SEED_OSS, "seed_oss", "SeedOssForCausalLM", "seed_oss",
     &qlora__layout_seven, NULL, &qlora__norms_seed, 0,
     QLORA__READS_ATTENTION_BIAS_3 | QLORA__READS_OUT_BIAS | QLORA__READS_MLP_BIAS,
     QLORA__WINDOW_NONE, QLORA__NOPE_NONE,
     {155136, 4096, 27648, 64, 80, 8, 128, 524288, 0, 0, 1e4, 0, 1e-6, 1, false},
     QLORA__GGUF_PLAIN},
    {QLORA_FAMILY_QWEN2_5_VL, "qwen2_5_vl_text", "Qwen2_5_VLTextModel", "qwen2vl",
     &qlora__layout_seven, NULL, &qlora__norms_before, QLORA__HAS_SECTIONS,
     QLORA__READS_QKV_BIAS, QLORA__WINDOW_QWEN, QLORA__NOPE_NONE,
     {152064, 8192, 29568, 80, 64, 8, 0, 32768, 4096, 0, 1e6, 0, 1e-5, 1, false},
     QLORA__GGUF_PLAIN},
    {QLORA_FAMILY_QWEN3_VL, "qwen3_vl_text", "Qwen3VLTextModel", "qwen3vl",
     &qlora__layout_seven, NULL, &qlora__norms_before,
     QLORA__HAS_QK_NORM | QLORA__HAS_SECTIONS,
     QLORA__READS_ATTENTION_BIAS, QLORA__WINDOW_NONE, QLORA__NOPE_NONE,
     {151936, 4096, 22016, 32, 32, 32, 128, 128000, 0, 0, 5e5, 0, 1e-6, 1, false},
     QLORA__GGUF_PLAIN},
    {QLORA_FAMILY_ARCEE, "arcee", "ArceeForCausalLM", "arcee",
     &qlora__layout_plain, NULL, &qlora__norms_before, QLORA__HAS_PERMUTED_GGUF,
     QLORA__READS_ATTENTION_BIAS | QLORA__READS_MLP_BIAS, QLORA__WINDOW_NONE, QLORA__NOPE_NONE,
     {32000, 2560, 18432, 32, 32, 0, 0, 4096, 0, 0, 1e4, 0, 1e-5, 1, false},
     QLORA__GGUF_PLAIN},
    {QLORA_FAMILY_COHERE2, "cohere2", "Cohere2ForCausalLM", "cohere2",
     &qlora__layout_seven, NULL, &qlora__norms_first,
     QLORA__HAS_PAIRED_ROPE | QLORA__HAS_MEAN_NORM | QLORA__HAS_SIDE_BY_SIDE,
     QLORA__READS_ATTENTION_BIAS | QLORA__READS_PATTERN | QLORA__READS_LOGIT_SCALE |
         QLORA__READS_NO_HEAD_DIM,
     QLORA__WINDOW_PATTERN, QLORA__NOPE_ALL_FULL,
     {256000, 8192, 22528, 40, 64, 0, 0, 8192, 4096, 4, 1e4, 0, 1e-5, 1, true},
     QLORA__GGUF_PLAIN},
    {QLORA_FAMILY_MIXTRAL, "mixtral", "MixtralForCausalLM", "llama",
     NULL, &qlora__layout_mixtral, &qlora__norms_before, QLORA__HAS_PERMUTED_GGUF,
     QLORA__READS_EXPERTS, QLORA__WINDOW_EVERY, QLORA__NOPE_NONE,
     {32000, 4096, 14336, 32, 32, 8, 0, 131072, 0, 0, 1e6, 0, 1e-5, 1, false},
     QLORA__GGUF_PLAIN},
    {QLORA_FAMILY_QWEN2_MOE, "qwen2_moe", "Qwen2MoeForCausalLM", "qwen2moe",
     &qlora__layout_seven, &qlora__layout_qwen2_moe, &qlora__norms_before, 0,
     QLORA__READS_QKV_BIAS | QLORA__READS_EXPERTS | QLORA__READS_RENORMALISE |
         QLORA__READS_OWN_WIDTH,
     QLORA__WINDOW_LISTED, QLORA__NOPE_NONE,
     {151936, 2048, 5632, 24, 16, 16, 0, 32768, 4096, 0, 1e4, 0, 1e-6, 1, false},
     QLORA__GGUF_PLAIN},
    {QLORA_FAMILY_QWEN3_MOE, "qwen3_moe", "Qwen3MoeForCausalLM", "qwen3moe",
     &qlora__layout_seven, &qlora__layout_moe, &qlora__norms_before, QLORA__HAS_QK_NORM,
     QLORA__READS_ATTENTION_BIAS | QLORA__READS_EXPERTS | QLORA__READS_RENORMALISE |
         QLORA__READS_OWN_WIDTH,
     QLORA__WINDOW_USED, QLORA__NOPE_NONE,
     {151936, 2048, 6144, 24, 32, 4, 0, 32768, 4096, 0, 1e4, 0, 1e-6, 1, false},
     {QLORA__GGUF_RENORMALISES, 0, 0}},
    {QLORA_FAMILY_OLMOE, "olmoe", "OlmoeForCausalLM", "olmoe",
     NULL, &qlora__layout_moe, &qlora__norms_before, QLORA__HAS_QK_NORM | QLORA__HAS_WIDE_QK_NORM,
     QLORA__READS_ATTENTION_BIAS | QLORA__READS_EXPERTS | QLORA__READS_RENORMALISE,
     QLORA__WINDOW_NONE, QLORA__NOPE_NONE,
     {50304, 2048, 2048, 16, 16, 0, 0, 4096, 0, 0, 1e4, 0, 1e-5, 1, false},
     QLORA__GGUF_PLAIN},
    {QLORA_FAMILY_GRANITE_MOE, "granitemoe", "GraniteMoeForCausalLM", "granitemoe",
     NULL, &qlora__layout_granite_moe, &qlora__norms_before, QLORA__HAS_PERMUTED_GGUF,
     QLORA__READS_ATTENTION_BIAS | QLORA__READS_MULTIPLIERS | QLORA__READS_EXPERTS,
     QLORA__WINDOW_NONE, QLORA__NOPE_NONE,
     {32000, 4096, 11008, 32, 32, 0, 0, 2048, 0, 0, 1e4, 0, 1e-6, 1, false},
     QLORA__GGUF_PLAIN},
    {QLORA_FAMILY_GLM4_MOE, "glm4_moe", "Glm4MoeForCausalLM", "glm4moe",
     &qlora__layout_seven, &qlora__layout_glm4_moe, &qlora__norms_seed, 0,
     QLORA__READS_BIAS_3_OFF | QLORA__READS_PARTIAL | QLORA__READS_EXPERTS |
         QLORA__READS_RENORMALISE | QLORA__READS_OWN_WIDTH | QLORA__READS_QK_NORM,
     QLORA__WINDOW_NONE, QLORA__NOPE_NONE,
     {151552, 4096, 10944, 46, 96, 8, 128, 131072, 0, 0, 1e4, 0, 1e-5, 0.5, false},
     QLORA__GGUF_PLAIN},
};
// clang-format on
#define QLORA__ARCH_COUNT ((int)(sizeof qlora__archs / sizeof qlora__archs[0]))

// What a config.json with experts may leave out. shared: the width of the MLP beside them or, if
// that follows from the experts, how many it stands for; 0 = there is none.
#define QLORA__MAX_EXPERTS 1024

typedef struct qlora__expert_defaults {
    qlora_family family;
    int32_t count;
    int32_t per_token;
    int32_t width;
    int32_t shared;
} qlora__expert_defaults;

static const qlora__expert_defaults qlora__all_expert_defaults[] = {
    {QLORA_FAMILY_MIXTRAL, 8, 2, 14336, 0},     {QLORA_FAMILY_QWEN2_MOE, 60, 4, 1408, 5632},
    {QLORA_FAMILY_QWEN3_MOE, 128, 8, 768, 0},   {QLORA_FAMILY_OLMOE, 64, 8, 2048, 0},
    {QLORA_FAMILY_GRANITE_MOE, 8, 2, 11008, 0}, {QLORA_FAMILY_GRANITE4, 8, 2, 11008, 0},
    {QLORA_FAMILY_GLM4_MOE, 128, 8, 1408, 1}};

static const qlora__expert_defaults* qlora__arch_expert_defaults(const qlora__arch* arch) {
    size_t at = 0;
    while (qlora__all_expert_defaults[at].family != arch->family &&
           at + 1 < sizeof qlora__all_expert_defaults / sizeof qlora__all_expert_defaults[0]) {
        at++;
    }
    return &qlora__all_expert_defaults[at];
}

// Multimodal folders whose text part is one of the families. Its settings are in text_config or, in
// older files of some, beside those of the vision part.
typedef struct qlora__wrapper {
    const char* model_type;
    const char* architecture;
    const char* texts[2]; // model_type of the text part; the first is the default
} qlora__wrapper;

static const qlora__wrapper qlora__wrappers[] = {
    {"gemma3", "Gemma3ForConditionalGeneration", {"gemma3_text", NULL}},
    {"mistral3", "Mistral3ForConditionalGeneration", {"mistral", "ministral3"}},
    {"qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", {"qwen2_5_vl_text", NULL}},
    {"qwen3_vl", "Qwen3VLForConditionalGeneration", {"qwen3_vl_text", NULL}}};
#define QLORA__WRAPPER_COUNT ((int)(sizeof qlora__wrappers / sizeof qlora__wrappers[0]))

// Families that are known and not supported, with what the description of a block lacks for them.
static const struct {
    const char* reason;
    const char* model_types; // separated and surrounded by spaces
} qlora__refused_archs[] = {
    {"it is a mixture of experts",
     " qwen3_vl_moe qwen3_5_moe phimoe granitemoeshared llama4_text minimax_m2 ernie4_5_moe "
     "hunyuan_v1_moe dots1 exaone_moe solar_open "},
    {"it is a mixture of experts with attention sinks", " gpt_oss "},
    {"it has multi-head latent attention",
     " deepseek_v2 deepseek_v3 deepseek_v32 kimi_k2 glm4_moe_lite mistral4 minicpm3 "},
    {"it has linear attention (gated delta-net) layers",
     " qwen3_next qwen3_5 kimi_linear olmo_hybrid "},
    {"it has short-convolution layers", " lfm2 lfm2_moe "},
    {"it has recurrent (state-space) layers",
     " nemotron_h falcon_h1 jamba bamba zamba2 mamba mamba2 recurrent_gemma rwkv "},
    {"it has per-layer embeddings, shared keys and values, and AltUp streams", " gemma3n "},
    {"it has per-layer embeddings, shared keys and values, and proportional rope",
     " gemma4 gemma4_text "},
    {"it has LayerNorm and parallel attention and MLP", " cohere "},
    {"it has LayerNorm instead of RMSNorm",
     " starcoder2 stablelm gpt_neox gpt2 phi falcon bloom mpt nemotron olmo "},
    {"its MLP has no gate", " apertus "},
    {"it has cross attention to images", " mllama "},
    {"it has prefix attention", " paligemma "},
    {"it has adapters inside the base model", " phi4mm phi4_multimodal "},
    {"it needs remote code; a converted folder (such as glm-4-9b-hf) is required",
     " chatglm phi3small exaone internlm2 baichuan "},
    {"it is not a decoder-only language model",
     " t5gemma t5 bert roberta xlm-roberta mt5 bart whisper "}};

// The row of a family. A config made by hand may have none: its block is Llama's.
static const qlora__arch* qlora__arch_of(qlora_family family) {
    for (int i = 0; i < QLORA__ARCH_COUNT; i++) {
        if (qlora__archs[i].family == family) {
            return &qlora__archs[i];
        }
    }
    return &qlora__archs[0];
}

// The row of a folder with the language part of a model alone: that of a Qwen-VL file computes what
// a Qwen model does, and that of a Mistral 3 file, unless q is scaled by position, what a Mistral
// model does.
static QLORA__UNUSED const qlora__arch* qlora__arch_of_text(const qlora_model_config* c) {
    return qlora__arch_of(c->family == QLORA_FAMILY_QWEN2_5_VL ? QLORA_FAMILY_QWEN2
                          : c->family == QLORA_FAMILY_QWEN3_VL ? QLORA_FAMILY_QWEN3
                          : c->family == QLORA_FAMILY_MINISTRAL3 && !(c->query_beta > 0.0)
                              ? QLORA_FAMILY_MISTRAL
                              : c->family);
}

// The projections of a layer, without those of its experts.
static const qlora__layout* qlora__arch_layout(const qlora__arch* arch, const qlora_model_config* c,
                                               int64_t layer) {
    bool has = arch->experts != NULL && c->experts > 0 && c->dense[layer] == 0;
    return has || arch->layout == NULL ? arch->experts : arch->layout;
}

// The rows of the layout that says what all layers of a family have in common.
static const qlora__layout* qlora__arch_first(const qlora__arch* arch) {
    return arch->layout != NULL ? arch->layout : arch->experts;
}

// The architecture of GGUF files of a family, whose layers may have experts; NULL if it has no such
// layers, or only such layers.
static const char* qlora__arch_gguf_of(const qlora__arch* arch, bool experts) {
    bool only = (arch->reads & QLORA__READS_EXPERTS) != 0;
    if (experts ? arch->experts == NULL : only) {
        return NULL;
    }
    return experts && !only ? "granitemoe" : arch->gguf;
}

// That of a model. The text part of a multimodal folder has that of its wrapper, where the two
// differ.
static const char* qlora__arch_gguf(const qlora__arch* arch, const qlora_model_config* c) {
    return c->wrapped && arch->family == QLORA_FAMILY_MISTRAL
               ? "mistral3"
               : qlora__arch_gguf_of(arch, c->experts > 0);
}

// The module of norm number `norm` of a layer; NULL if the layer has no such norm.
static const char* qlora__arch_norm(const qlora__arch* arch, const qlora_model_config* c,
                                    int norm) {
    if (norm == QLORA__NORM_Q || norm == QLORA__NORM_K) {
        const char* name = norm == QLORA__NORM_Q ? "self_attn.q_norm" : "self_attn.k_norm";
        return c->qk_norm ? name : NULL;
    }
    return arch->norms->module[norm];
}

// The number of weights of a norm.
static int64_t qlora__arch_norm_width(const qlora__arch* arch, const qlora_model_config* c,
                                      int norm) {
    bool wide = (arch->has & QLORA__HAS_WIDE_QK_NORM) != 0;
    return norm == QLORA__NORM_Q   ? (wide ? c->heads : 1) * c->head_dim
           : norm == QLORA__NORM_K ? (wide ? c->kv_heads : 1) * c->head_dim
                                   : c->hidden;
}

static int64_t qlora__arch_width(const qlora_model_config* c, qlora__width width) {
    const int64_t q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    const int64_t widths[QLORA__WIDTHS] = {c->hidden,
                                           q,
                                           kv,
                                           q + 2 * kv,
                                           c->intermediate,
                                           2 * c->intermediate,
                                           c->shared_intermediate,
                                           2 * c->shared_intermediate,
                                           c->expert_intermediate,
                                           2 * c->expert_intermediate,
                                           c->experts,
                                           1};
    return widths[width];
}

static bool qlora__arch_bias(const qlora_model_config* c, qlora__bias bias) {
    return bias == QLORA__BIAS_QKV   ? c->qkv_bias
           : bias == QLORA__BIAS_O   ? c->o_bias
           : bias == QLORA__BIAS_MLP ? c->mlp_bias
                                     : false;
}

// The rotated columns of a head, for configs that do not say it.
static int64_t qlora__arch_rope_dims(const qlora__arch* arch, int64_t head_dim) {
    return (int64_t)((double)head_dim * arch->defaults.partial) / 2 * 2;
}

// Fills in the fields of a config whose zero means the default of the family.
static void qlora__config_resolve(qlora_model_config* c) {
    const qlora__arch* arch = qlora__arch_of(c->family);
    bool root = (arch->has & QLORA__HAS_ROOT_SCALE) != 0;
    c->qk_norm = c->qk_norm || (arch->has & QLORA__HAS_QK_NORM) != 0;
    if (c->rope_dims == 0) {
        c->rope_dims = qlora__arch_rope_dims(arch, c->head_dim);
    }
    if (c->embedding_scale == 0.0) {
        c->embedding_scale = root ? (double)sqrtf((float)c->hidden) : 1.0;
    }
    c->residual_scale = c->residual_scale != 0.0 ? c->residual_scale : 1.0;
    c->logits_divisor = c->logits_divisor != 0.0 ? c->logits_divisor : 1.0;
}
