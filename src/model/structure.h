// ---- the parts of a model -----------------------------------------------------------------------

// A weight that is used where its file is mapped; data is NULL if it is copied.
typedef struct qlora__mapped {
    const void* data;
    qlora_dtype dtype;
} qlora__mapped;

typedef struct qlora__projection {
    int64_t in;
    int64_t out;
    bool is_nf4;
    bool is_fp8;
    bool stored; // it is 4-bit, or FP8, in the files
    qlora_nf4_desc nf4_desc;
    qlora_nf4 nf4;
    qlora__fp8_weight fp8;
    qlora_tensor ready; // f32: scales for products with few rows on the CPU; may be empty
    qlora_tensor dense; // unless is_nf4 or is_fp8; in the compute type, unless it is mapped
    qlora__mapped mapped;
    bool has_bias;
    qlora_tensor bias;
    int64_t rank; // 0 = no adapter
    double alpha;
    float scale;
    int64_t a_at; // first element in the parameter arena
    int64_t b_at;
    qlora_tensor a; // views of the shadow: A, s B
    qlora_tensor sb;
    qlora_tensor da; // views of the gradients
    qlora_tensor db;
    int64_t m_at;           // DoRA's magnitude
    qlora_tensor magnitude; // [1, out]: views of the parameters and the gradients
    qlora_tensor dm;
} qlora__projection;

// Whether the weight has codes, which products dequantise.
static bool qlora__is_coded(const qlora__projection* p) {
    return p->is_nf4 || p->is_fp8;
}

static qlora__coded qlora__codes_of(const qlora__projection* p) {
    return qlora__coded_of(p->is_nf4 ? &p->nf4 : NULL, p->is_fp8 ? &p->fp8 : NULL);
}

// The memory of the codes and their scales.
static const qlora_tensor* qlora__codes_memory(const qlora__projection* p) {
    return p->is_nf4 ? &p->nf4.memory : &p->fp8.memory;
}

// The activations of a layer that the backward pass needs. Which of them a layer has, and with how
// many columns, its kinds of parts say: model/slots.h.
typedef struct qlora__kept {
    qlora_tensor h;   // [T, H] residual stream at the layer's input
    qlora_tensor qkv; // [T, q + 2 kv] after the rotation; with q/k norm, before norm and rotation
    qlora_tensor qk;  // [T, q + kv] normalised and rotated; only with q/k norm
    qlora_tensor o;   // [T, q + pad] output of attention, and z of o_proj
    qlora_tensor lse; // [heads, T]
    qlora_tensor h2;  // [T, H] residual stream after attention
    qlora_tensor gu;  // [T, 2 I + pad] gate and up; their gradients in the backward pass
    qlora_tensor routed;               // [T k, 2 I + pad] the same of the rows that experts get
    qlora_tensor routed_z;             // [T k, pad] z of gate and up of the experts, on a GPU
    qlora_tensor scores;               // [T, experts] of the router
    qlora_tensor shared;               // [T, 1 + pad] the gate of the MLP beside the experts
    qlora_tensor out[QLORA__BRANCHES]; // [T, H] their outputs; only if a norm follows them
    qlora_tensor z[QLORA__GROUPS]; // [T, pad] of stacks whose x is overwritten; without columns if
                                   // it is computed again
} qlora__kept;

// The experts of a layer (model/ffns/experts.h).
typedef struct qlora__experts {
    qlora_tensor correction; // f32 [1, experts], added to scores for the choice; may be empty
    qlora_linear_desc router;
    qlora_linear_desc shared_gate;
    qlora_linear_desc* linears; // of expert e: 2 e into it, 2 e + 1 out of it
    int64_t pad;                // the largest of theirs, and of the router's
} qlora__experts;

typedef struct qlora__layer {
    const qlora__layout* layout;    // of its projections, without those of experts
    qlora__projection* projections; // those of the layout, then those of experts
    int count;                      // of both
    qlora__experts* experts;        // NULL = none
    qlora_linear_desc linears[QLORA__GROUPS];
    qlora_tensor operands[QLORA__GROUPS]; // cached, or views of the shared one
    qlora__fp8 fp8[QLORA__GROUPS];        // in FP8 mode, instead of the operands
    int64_t pads[QLORA__GROUPS];
    qlora_tensor gains[QLORA__GROUPS];    // DoRA: f32 [1, out], magnitude / norm, 1 without one
    qlora_tensor inverses[QLORA__GROUPS]; // 1 / norm
    bool cached;
    bool recompute;
    bool keeps_attention; // of a recomputed layer: its output and row statistics
    bool keeps_heads;     // and q, k and v
    bool sliding;
    bool no_rope;
    bool like_another; // an earlier one, beside layers alike, runs the same kernels and products
    qlora_tensor qkv_bias;              // [1, q + 2 kv]; the rope kernel adds it
    qlora_tensor norms[QLORA__NORMS];   // [1, width] f32; without data if the layer lacks the norm
    qlora_tensor d_norms[QLORA__NORMS]; // gradients, if norms are trained
    int64_t norms_at[QLORA__NORMS];     // first elements in the parameter arena
    qlora__kept kept;
    void* away; // pinned host memory of its input, if that is offloaded
    void* away_attention; // and of what it keeps of attention
    int64_t offload_number; // among the layers that have that in slots; -1: in memory of its own
} qlora__layer;

// The inputs of a micro-batch: views of one block, which is filled on the host and copied as a
// whole.
typedef struct qlora__batch_block {
    qlora_tensor all;       // U8, the whole block
    qlora_tensor ids;       // [1, T]
    qlora_tensor positions; // [1, T]
    qlora_tensor angles;    // [1, T]: rows of the rotary tables; `positions` if they are the same
    qlora_tensor sequences; // [1, T]: index of the sequence in the data
    qlora_tensor seqs;      // [1, max_sequences + 1]
    qlora_tensor rows;      // [1, R]: token of labelled row r
    qlora_tensor labels;    // [1, R]
    qlora_tensor weights;   // [1, R] f32
    qlora_tensor inverse;   // [1, T]: labelled row of token t, or the zero row
    qlora_tensor row_positions; // [1, R]: that of labelled row r; only with dropout
    qlora_tensor row_sequences; // the same
    qlora_tensor scale;     // [1, adapters] f32: 1 / total labels
    qlora_tensor owners;    // [1, T]: adapter of token t, or -1; only if they stand side by side
    qlora_tensor claims;    // [1, R]: adapter of labelled row r; the same
    qlora_tensor states;    // [1, adapters]: 1 if it has rows, see qlora__keep_own; the same
    qlora_tensor balance;   // [1, 2] f32: qlora__balance_use.shares; only with experts
    qlora_tensor dropout;   // [1, 4]: seed low, seed high, step, 0
    qlora_tensor starts;    // these four are views for qlora__preference
    qlora_tensor roles;
    qlora_tensor numbers;
    qlora_tensor references;
} qlora__batch_block;

// The files of a model and its adapter, each opened once for planning and loading.
typedef struct qlora__source {
    qlora__peft peft;
    bool has_peft;
    qlora__folder folder;
    bool has_folder;
} qlora__source;

// Where a weight is in the files: a tensor, or a part of one.
typedef struct qlora__weight_source {
    qlora__linear_source linear;
    qlora__st_tensor slice; // linear.weight, if it is a part
    qlora__gguf_view view;  // of that, if it is made from others
    int64_t shape[2];       // of that
} qlora__weight_source;

// The matrices of one of several adapters for a projection: the fields of qlora__projection.
typedef struct qlora__lora {
    int64_t rank;
    double alpha;
    float scale;
    int64_t a_at;
    int64_t b_at;
    qlora_tensor a;
    qlora_tensor sb;
    qlora_tensor da;
    qlora_tensor db;
} qlora__lora;

// The adapters of a layer side by side (model/wide.h).
typedef struct qlora__wide_layer {
    qlora__lora loras[QLORA__PROJECTIONS]; // of all adapters: the rank is the sum of theirs
    qlora_tensor columns[QLORA__GROUPS];   // I32 [1, pad]: adapter of a column of z and u, or -2
    qlora_tensor shares[QLORA__GROUPS];    // U8: one qlora__share per adapter and matrix
    int64_t share_count[QLORA__GROUPS];
    int64_t most[QLORA__GROUPS]; // elements of the largest share
} qlora__wide_layer;

// What each of several adapters has of its own: the fields of a model that have the same names.
typedef struct qlora__own {
    int32_t rank; // of the desc
    float alpha;
    uint64_t adapter_seed;
    int64_t trainers; // number that exist, 0 or 1
    int64_t elements;
    int64_t range_count;
    int64_t longest_range;
    size_t moment_bytes;
    qlora_tensor parameters;
    qlora_tensor shadow;
    qlora_tensor ranges;
    qlora_tensor gradients;
    qlora_tensor partials;
    qlora_tensor moment1;
    qlora_tensor moment2;
    qlora_tensor moments;
    qlora_tensor adamw;
    qlora_tensor totals;
    qlora_clip clip;
} qlora__own;

// Neighbouring rows of a micro-batch that belong to the same adapter.
typedef struct qlora__owned_rows {
    int32_t adapter;
    int64_t row; // tokens [row, end)
    int64_t end;
    int64_t label; // labelled rows [label, label_end)
    int64_t label_end;
} qlora__owned_rows;

#define QLORA__MOST_TEXTS 1024 // that are generated at the same time
#define QLORA__MOST_PAGES 64   // of a text

// What the device knows of the pages of a text, in its row of the table.
enum {
    QLORA__PAGES_OWN,
    QLORA__PAGES_LENT,   // some belong to other texts
    QLORA__PAGES_UNKNOWN // a copy to the device failed
};

// Pages that texts share, see generate/paging.h.
typedef struct qlora__paging {
    int64_t size;   // positions of a page; 0 = every text has rows of its own
    int64_t pages;  // that texts can have; there is one more, so that pages can always be moved
    int64_t free;   // how many of them nobody uses
    int32_t* users; // [pages + 1]: how many texts use a page
} qlora__paging;

// A text in flight, on the device; same layout as decode_text in kernels/decode/decode_text.cuh.
typedef struct qlora__decode_text {
    int32_t token;    // to be run
    int32_t position; // of that token
    int32_t alive;
    int32_t top_k;
    float temperature;
    float top_p;
    float min_p;
    float penalty;
    uint32_t seed[2];
    int32_t chosen; // the results of the step
    int32_t bad;    // a logit that is not finite, or -1
    double logprob;
} qlora__decode_text;

// A step that is computed and not asked for costs as much time as running ahead saves in this many
// steps (llama-3.1-8b: 150, llama-3.2-1b: 55), and what is saved counts up to a limit.
enum { QLORA__AHEAD_COST = 128, QLORA__AHEAD_MOST = 4 * QLORA__AHEAD_COST };

// What a step tells the host about a text, in pinned memory; same layout as decode_result. The host
// sets `done` to 0 before the step, and the device writes it last.
typedef struct qlora__decode_result {
    uint64_t done; // the position after the token that was run << 32 | the token that was chosen
    double logprob;
    int32_t bad;
    int32_t unused;
} qlora__decode_result;

// What a step of decoding on the device uses (model/step.h): the state of the texts in flight and
// the activations of one row of each.
typedef struct qlora__decode {
    bool planned;                     // the model has the memory below
    bool works;                       // nothing in the weights is against it
    bool alike;                       // the tables of all weights are the same
    bool eager;                       // a graph could not be captured
    bool refused;                     // blocks that wait for each other cannot be launched
    int64_t texts;                    // rows
    int64_t chunk;                    // positions of a page of the cache
    int64_t pages;                    // of a text
    int64_t z_rank;                   // columns of z
    int64_t wide;                     // columns of z in decode_layers
    uint32_t variants;                // of the kernels and launches: QLORA__DECODE_...
    qlora_tensor h[2];                // [texts, H] residual stream, in turn
    qlora_tensor x;                   // [texts, H + pad] input of qkv, gate/up and the head, with z
    qlora_tensor qkv;                 // [texts, q + 2 kv]
    qlora_tensor o;                   // [texts, q]
    qlora_tensor s;                   // [texts, I]
    qlora_tensor y;                   // f32 [texts, H]: output of o and down, of several texts
                                      // without the adapter; not of many with split_sums
    qlora_tensor z;                   // f32 [slices * texts, z_rank]
    qlora_tensor logits;              // [texts, V]
    qlora_tensor partials;            // f32 [texts * heads * pages, head_dim + 2]
    qlora_tensor counters;            // I32 [texts, blocks of a row]
    qlora_tensor marks;               // I32: see qlora__decode_marks
    qlora_tensor params;              // U8: qlora__decode_layer of all layers, without and with
                                      // adapters
    qlora_tensor table;               // I32 [texts, pages]: where the pages of a text are
    qlora_tensor split_sums;          // f32 [texts, ...]: sums of products whose columns are split
    qlora_tensor arrivals;            // I32: counters of their blocks
    qlora_tensor state;               // U8: one qlora__decode_text per text
    qlora_tensor parts;               // U8: qlora__sample_part
    qlora_tensor seen;                // U8 [texts, V]: 1 if the text contains the token
    qlora__decode_text* host;         // a copy of `state`
    uint8_t* sent;                    // a copy of `params`
    qlora__decode_result* results;    // pinned [2, texts]: of even and odd positions
    uint64_t calls;                   // of the context when the last step was launched
    int32_t credit;                   // whether running ahead pays, see generate/ahead.h
    bool ahead;                       // that step has not been asked for yet
    bool could;                       // there could be such a step
    uint8_t last[QLORA__MOST_TEXTS];  // by slot: the text is in that step
    uint8_t stale[QLORA__MOST_TEXTS]; // by slot: the device does not have this row of it yet
    uint8_t lent[QLORA__MOST_TEXTS];  // by slot: QLORA__PAGES_*
    qlora_graph* graphs[2]; // of a step, without and with adapters; NULL until the first one
} qlora__decode;

// The weights of the base that are in no layer.
typedef struct qlora__model_base {
    uint64_t base_config; // hashes that tell one base model from another
    uint64_t base_weights;
    qlora__mapped embed_mapped;
    qlora__mapped head_mapped;
    qlora_tensor embed; // [V, H]
    qlora_tensor head;  // [V, H]; the embedding if tied; none if it is 4-bit
    bool head_is_nf4;
    qlora_nf4_desc head_desc;
    qlora_nf4 head_nf4;
    qlora_tensor final_norm;
    qlora_tensor rope; // [angle_rows, rope_dims] f32
    qlora_tensor rope_sliding;
    qlora_tensor rope_query; // the same for q, if it is scaled by position
} qlora__model_base;

// The trained embedding, head and rows: own_ are views of the shadow, d_ of the gradients.
typedef struct qlora__model_tables {
    int64_t final_norm_at;
    qlora_tensor d_final_norm;
    bool saved_embed;
    bool saved_head;
    bool saved_tied; // the trained embedding is also the head
    int64_t token_count;
    int32_t* token_ids; // of the trained rows, on the host
    int64_t embed_at;   // first elements in the parameter arena
    int64_t head_at;
    int64_t tokens_at;
    qlora_tensor own_embed;
    qlora_tensor own_head;
    qlora_tensor own_tokens;
    qlora_tensor d_embed;
    qlora_tensor d_head;
    qlora_tensor d_tokens;
    bool head_rows;         // the same rows of a head that is not tied are trained as well
    int64_t head_tokens_at; // in the parameter arena
    qlora_tensor own_head_tokens;
    qlora_tensor d_head_tokens;
    qlora_tensor token_rows;  // I32 [1, count]
    qlora_tensor base_tokens; // [count, H], the rows of the base
    bool tokens_twice;        // their values are also rows of a head that is a matrix of its own
    qlora_tensor head_tokens; // [count, H], the base's rows of the head in both cases
} qlora__model_tables;

// What the experts of a layer use while they run.
typedef struct qlora__routed_work {
    qlora_tensor x;       // [T, H + pad] rows of an expert, and of the router
    qlora_tensor y;       // [T, H] its output, or the gradient of its input
    qlora_tensor s;       // [T, I + pad] the activation
    qlora_tensor ds;      // [T, I]
    qlora_tensor dz;      // [T, experts + pad] gradients of scores
    qlora_tensor weights; // [1, T k], see qlora__route
    qlora_tensor sorted;  // [1, T k] the same by sorted row
    qlora_tensor dw;      // [1, T k] their gradients, by sorted row
    qlora_tensor d_gate;  // [T, 1 + pad] of the gate of the shared MLP
    qlora_tensor choice;  // I32 [1, T k]
    qlora_tensor place;   // I32 [1, T k]
    qlora_tensor tokens;  // I32 [1, T k]
    qlora_tensor starts;  // I32 [1, experts + 1]
    // On a GPU, x, s and routed have the rows of all experts, and ds is s.
    qlora_tensor counts;  // I32 [blocks of choices, experts], see ops/routed.h
    qlora_tensor tiles;   // I32 [1, ...]
    qlora_tensor operands[2]; // W, s B and A of all experts: into their activation, and out of it
    qlora__balance balance;
} qlora__routed_work;

// The activations of a pass, of layers and of the head. x, delta, s, ds, raw, an own d_out, and of
// a layer h2, gu and out have one row per token of a tile; everything else has one per token of the
// micro-batch.
typedef struct qlora__model_work {
    qlora_tensor last_h;     // [T, H] after the last layer
    qlora_tensor streams[2]; // [T, H] inputs of layers in turn, if they are offloaded
    qlora_tensor x;       // [T, H + pad] normalised input of qkv and gate/up
    qlora_tensor delta;   // [T, H] output of o and down; gradient of x in the backward pass
    qlora_tensor d_beside; // [T, H] of parts side by side: gradient of x from those before
    qlora_tensor s;       // [T, I + pad] output of SwiGLU
    qlora_tensor ds;      // its gradient; the same memory unless there is dropout
    qlora_tensor operand; // shared by the layers without a copy of their own
    int64_t operand_at[QLORA__GROUPS]; // where the stacks have theirs in it
    bool places_layers;   // all stacks of a layer have theirs there at the same time
    qlora_tensor dh;      // [T, H + pad]
    qlora_tensor d_out;   // [T, H + pad] gradient of the output of attention or MLP; dh itself
                          // unless a norm or a factor comes between
    qlora_tensor dqkv;    // [T, q + 2 kv + pad]
    qlora_tensor d_o;     // [T, q]
    qlora__routed_work experts;
    qlora_tensor gathered; // room for the stream of labelled rows, if kept.gu has too little
    qlora_tensor gated_parts; // f32: see ops/gated.h
    qlora_tensor skinny_parts; // f32: see ops/skinny.h; used on the second stream alone
    qlora_tensor rstd[QLORA__BRANCHES]; // f32 [1, T]: of the norms before them, backward
    qlora_tensor stats;   // f32 [heads, 2 T] of attention, if they are too large for the scratch
    qlora_tensor raw;     // DoRA: [T, widest stack], its output before the gains
    qlora__kept again;    // activations of a recomputed layer
    qlora__kept offload_slots[2]; // what layers have of attention in turn, if it is offloaded
    size_t offload_bytes[3]; // output and row statistics; with z of q, k and v; with those
    // FP8 mode
    qlora_tensor fp8_factors; // f32 [layers * groups, 2]: qlora__fp8.factors of every stack
    qlora_tensor fp8_codes;   // U8: rows of x or dy
    qlora_tensor fp8_scales;  // f32 [1, T]
    qlora_tensor fp8_most;    // f32 [1, T]
    qlora_tensor fp8_ones;    // f32 [1, widest result]
    // head
    size_t head_place;    // of rows_x and logits in the arena, see qlora__layout_overlaid
    qlora_tensor rows_x;  // [chunk, H]
    qlora_tensor logits;  // [chunk, V]
    qlora_tensor rows_dx; // [R + 1, H]; the last row is zero
    qlora_tensor losses;  // f32 [1, R]
    qlora__preference preference;
    // several adapters
    qlora__owned_rows* runs; // of the last micro-batch, max_sequences of them
    int64_t run_count;
    qlora_tensor wide_grads; // f32: the gradients of one stack, all adapters
} qlora__model_work;

// The sizes of a micro-batch.
typedef struct qlora__micro {
    int64_t rows;     // rows of the pass, including padding
    int64_t chunks;   // chunks of the head
    int64_t labelled; // rows of the last layer after attention, 0 = all: qlora__labelled_rows
    int64_t size_class; // of the number of sequences: qlora__size_class_of
    int64_t tokens;   // tokens of the caller
    bool balanced;    // all rows of the last layer are needed, for the load-balancing loss
    bool preference;  // the loss is that of whole sequences
    bool reference;   // the log-probabilities of the base are computed first
    bool mismatched;  // the sequences are those of KTO's kl, which have no gradient
} qlora__micro;

// An evaluation in slices.
typedef struct qlora__evaluation {
    bool begun;             // the model is in the middle of it
    qlora__errand* errand;  // that computes it on the CPU; NULL = none
    qlora__micro micro;
    int64_t sequences;
    qlora_eval_info info;   // the result
} qlora__evaluation;

// What a pass in flight has placed, and who reads it: qlora__pass.flow. It is of the model only
// because a step in slices goes on with it.
typedef struct qlora__flow {
    // With tiles, the stacks of a loop over tiles have their operands at the same time; placed
    // tells which weights of a layer are there. If places_layers is set, all stacks of a layer do,
    // and placed_layer tells which layer it is.
    int64_t placed[QLORA__GROUPS];
    int64_t placed_layer;
    unsigned readers; // slots of the second stream in which the shared operand is read
    // The stack whose next product has its codes already, by the kernel that wrote its operand, or
    // the codes in its place; that is dy if `coded_transposed`. NULL if there is none.
    const qlora__fp8* coded;
    bool coded_transposed;
    int64_t passed; // layers of the last pass, and then chunks of the head, that have been computed
    int64_t placed_experts; // whose operands into the activation are there: see experts_gpu.h
} qlora__flow;

// Keys and values of the texts in flight.
typedef struct qlora__model_texts {
    qlora_tensor kv_cache;                          // [layers * cache_all, 2 kv]
    int64_t cache_rows;                             // of a text, unless there is a pool
    int64_t cache_all;                              // of all texts
    qlora__paging paging;
    qlora_generation* in_flight[QLORA__MOST_TEXTS]; // by slot; NULL = free
    qlora_tensor scores;                            // f32 [heads, generate_tokens]
    qlora_tensor chances; // their softmax in the compute type; the same memory if that is f32
} qlora__model_texts;

struct qlora_model {
    qlora_ctx* ctx;
    qlora_model_desc desc; // defaults resolved; of its pointers, only dir remains valid
    qlora_plan plan;
    char* dir;             // copy of desc.dir, or NULL
    qlora__source* source; // while the model is being opened, and if weights are mapped
    const qlora__arch* arch;
    qlora_dtype compute;
    qlora_math math; // that of the context when the model was opened
    bool use_adapters;
    int64_t trainers;    // number that exist
    float neftune;       // of the trainer
    int64_t generations; // number that exist
    int64_t followers;   // those among them that use the selected adapter
    // The trainer in the middle of a micro-batch or an update in slices: it uses the activations;
    // NULL = none
    const struct qlora_trainer* stepping;
    qlora__errand* updating; // the errand that is in the middle of that update; NULL = none
    const struct qlora_generation* speaking; // a text in the middle of a pass; NULL = none
    qlora__evaluation evaluation;
    int64_t elements;    // of the parameter arena, including gaps
    int64_t positions;   // that a text can have
    int64_t short_texts; // tokens of the longest text with short factors, see qlora__is_long
    int64_t angle_rows;  // of the rotary tables, see qlora__angle_row
    char rope_scale[QLORA__SCALE_ROOM]; // that was asked for; empty = none
    char trained_base[8];               // of the adapter that was loaded last; empty = not known
    bool on_gpu;         // the plan is for a GPU
    bool own_chunk;      // desc.head_chunk was set by the caller
    bool every_row;      // for tests: model/labelled.h is off
    qlora__buffer* arena;
    qlora__away_memory host; // pinned: the embedding and the inputs of layers that are offloaded
    qlora__layer* layers;
    // adapters and optimizer
    bool dora;
    qlora_tensor parameters; // f32 [1, elements]
    qlora_tensor shadow;     // compute type [1, elements]
    qlora_tensor ranges;     // one qlora_adamw_range per trained tensor
    int64_t range_count;
    int64_t longest_range;
    qlora_tensor gradients;
    qlora_tensor partials; // f32 [levels, qlora__partial_stride]: the stack of qlora__tree
    qlora_tensor moment1;  // without 8-bit moments
    qlora_tensor moment2;
    qlora_tensor moments; // U8: 8-bit moments, see qlora__adamw8_step
    size_t moment_bytes;  // of those, without maps and places
    qlora_tensor adamw;   // one qlora_adamw_state
    qlora_clip clip;      // its tables are in the arena
    // micro-batch
    qlora__ring ring; // host copies of batch blocks, each followed by the AdamW settings of a step
    qlora__batch_block batch;
    qlora_tensor flag;   // I32: an id, a position or a label was out of range
    qlora_tensor totals; // f32 [1, 7]: losses, their rounding error, weights, loss of routers; then
                         // the first three for evaluation
    qlora__decode decode;
    // several adapters, see model/adapters.h
    int32_t adapters; // number, at least 1
    int32_t adapter;  // the current one, whose values are in the fields of this struct
    int32_t chosen;   // the one that is current between two calls
    uint64_t adapter_seed;
    qlora__own* owns;        // one per adapter; NULL if there is only one
    qlora__lora* loras;      // adapters * layers * QLORA__PROJECTIONS
    qlora__wide_layer* wide; // one per layer; NULL unless the adapters stand side by side
    qlora__model_base base;
    qlora__model_tables tables;
    qlora__model_work work;
    qlora__flow flow;
    qlora__model_texts texts;
};

// Where the projections of experts begin, after the router and the gate of the shared MLP.
static int qlora__first_expert(const qlora__layout* layout) {
    return layout->count + (layout->experts->shared_gate.module != NULL ? 2 : 1);
}

// The row of projection number `i` of a layer.
static const qlora__projection_row* qlora__row_of(const qlora__layer* layer, int i) {
    const qlora__layout* layout = layer->layout;
    if (i < layout->count) {
        return &layout->rows[i];
    }
    int first = qlora__first_expert(layout);
    return i == layout->count ? &layout->experts->router
           : i < first        ? &layout->experts->shared_gate
                              : &layout->experts->rows[(i - first) % layout->experts->count];
}

static bool qlora__is_router(const qlora__layer* layer, int i) {
    return i == layer->layout->count && i < layer->count;
}

// The expert that a projection belongs to, or -1.
static int qlora__expert_of(const qlora__layer* layer, int i) {
    const qlora__layout* layout = layer->layout;
    bool any = i >= layout->count && i >= qlora__first_expert(layout);
    return any ? (i - qlora__first_expert(layout)) / layout->experts->count : -1;
}

#define QLORA__UNITS (QLORA__PROJECTIONS + 4) // at most, per layer

// What an adapter sees of a layer: its projections, but one matrix into all experts, gate and up
// together, and one out of them. Returns how many there are.
static int qlora__unit_count(const qlora__layer* layer) {
    return layer->experts == NULL ? layer->count : qlora__first_expert(layer->layout) + 2;
}

// The projection that stands for unit number `unit`: of experts, that of the first one.
static int qlora__unit_at(const qlora__layer* layer, int unit) {
    bool out = layer->experts != NULL && unit == qlora__unit_count(layer) - 1;
    return out ? unit + layer->layout->experts->count - 2 : unit;
}

// Whether a projection stands for those of all experts, into them (1) or out of them (2).
static int qlora__is_stack(const qlora__layer* layer, int i) {
    if (layer->experts == NULL || i < qlora__first_expert(layer->layout)) {
        return 0;
    }
    return i == qlora__first_expert(layer->layout) ? 1 : 2;
}

// Rows of the matrix that a unit stands for, of one expert.
static int64_t qlora__unit_out(const qlora__layer* layer, int i) {
    const qlora__projection* p = &layer->projections[i];
    bool both = qlora__is_stack(layer, i) == 1 && layer->layout->experts->count == 3;
    return both ? 2 * p->out : p->out;
}

// The module of projection number `i` of layer number `layer` in the files of the base.
static void qlora__base_module(const qlora_model* m, int64_t layer, int i, char* out, size_t size) {
    const char* module = qlora__row_of(&m->layers[layer], i)->module;
    const char* star = strchr(module, '*');
    if (star == NULL) {
        snprintf(out, size, "model.layers.%lld.%s", (long long)layer, module);
    } else {
        snprintf(out, size, "model.layers.%lld.%.*s%d%s", (long long)layer, (int)(star - module),
                 module, qlora__expert_of(&m->layers[layer], i), star + 1);
    }
}

// The name of a tensor of it, such as ".weight".
static void qlora__base_weight(const qlora_model* m, int64_t layer, int i, const char* end,
                               char* out, size_t size) {
    char module[160];
    qlora__base_module(m, layer, i, module, sizeof module);
    snprintf(out, size, "%s%s", module, end);
}

// Whether PEFT addresses a unit as a parameter, not as a module: what experts have, and other MLPs
// of families whose names it gives to experts.
static bool qlora__is_parameter(const qlora_model* m, int64_t layer, int i) {
    const qlora__layer* l = &m->layers[layer];
    const qlora__layout* experts = m->arch->experts;
    int group = qlora__row_of(l, i)->group;
    bool mlp = i < l->layout->count && (group == QLORA__GATE_UP || group == QLORA__DOWN);
    return qlora__is_router(l, i) || qlora__is_stack(l, i) != 0 ||
           (mlp && experts != NULL && experts->experts->converts);
}

// The same as PEFT names it, without "base_model.model.": a module, or a parameter.
static void qlora__module_of(const qlora_model* m, int64_t layer, int i, char* out, size_t size) {
    const qlora__layer* l = &m->layers[layer];
    const char* module = qlora__row_of(l, i)->module;
    const char* parameter = "";
    if (qlora__is_router(l, i)) {
        module = l->layout->experts->peft_router;
        parameter = ".weight";
    } else if (qlora__is_stack(l, i) != 0) {
        module = l->layout->experts->peft;
        parameter = qlora__is_stack(l, i) == 1 ? ".gate_up_proj" : ".down_proj";
    } else if (qlora__is_parameter(m, layer, i)) {
        parameter = ".weight";
    }
    snprintf(out, size, "model.%slayers.%lld.%s%s", m->plan.config.wrapped ? "language_model." : "",
             (long long)layer, module, parameter);
}

// The module that has the matrices of unit number `i` of a layer in PEFT files. Of the two
// parameters of experts, PEFT wraps the second one around the first.
static void qlora__matrices_of(const qlora_model* m, int64_t layer, int i, char* out, size_t size) {
    const qlora__layer* l = &m->layers[layer];
    int stack = qlora__is_stack(l, i);
    qlora__module_of(m, layer, i, out, size);
    if (!qlora__is_parameter(m, layer, i)) {
        return;
    }
    *strrchr(out, '.') = '\0';
    int other = qlora__unit_at(l, qlora__unit_count(l) - 1);
    if (stack == 1 && l->projections[other].rank > 0) {
        size_t used = strlen(out);
        snprintf(out + used, size - used, ".base_layer");
    }
}

// Whether norm number `norm` exists in every layer.
static bool qlora__has_norm(const qlora_model* m, int norm) {
    return qlora__arch_norm(m->arch, &m->plan.config, norm) != NULL;
}

// Whether the branches of a layer stand side by side: all read the stream before the first one.
static bool qlora__stands_beside(const qlora_model* m) {
    return (m->arch->has & QLORA__HAS_SIDE_BY_SIDE) != 0;
}

// The norm before a branch, which those that stand side by side share.
static int qlora__norm_of_branch(const qlora_model* m, int branch) {
    return qlora__branches[qlora__stands_beside(m) ? 0 : branch].before;
}

// Whether norms of the residual stream subtract its mean.
static bool qlora__norms_mean(const qlora_model* m) {
    return (m->arch->has & QLORA__HAS_MEAN_NORM) != 0;
}

// Whether the model has weights to compute with.
static bool qlora__computes(const qlora_model* m) {
    return m->desc.purpose != QLORA_PURPOSE_ADAPTER;
}

// Whether the model has gradients and an optimizer.
static bool qlora__trains(const qlora_model* m) {
    return QLORA__TRAINS && m->desc.purpose == QLORA_PURPOSE_TRAIN;
}

// The math of products with weights. On the CPU, mode BF16 rounds their operands; everything else
// is f32 there.
static qlora_math qlora__model_math(const qlora_model* m) {
    return m->plan.mode == QLORA_MODE_BF16 && m->compute == QLORA_F32 ? QLORA__MATH_BF16 : m->math;
}

// Longrope has two sets of factors, one for texts of up to short_texts tokens and one for longer
// ones, as transformers chooses between them in every pass over a text. Other rotations, and texts
// that cannot be longer, have one set.
static bool qlora__has_two_rotations(const qlora_model* m) {
    return m->short_texts < m->positions;
}

// Whether a text of so many tokens is rotated by the long factors.
static bool qlora__is_long(const qlora_model* m, int64_t tokens) {
    return tokens > m->short_texts;
}

// The row of a position in the rotary tables. Row p < positions is for the last token of a text of
// p + 1 tokens, with the factors that such a text has: steps of decoding on the device need no
// other. The rows after that are those of the first positions of long texts.
static int64_t qlora__angle_row(const qlora_model* m, int64_t position, bool is_long) {
    return is_long && position < m->short_texts ? m->positions + position : position;
}

// Whether base products are computed in FP8.
static bool qlora__is_fp8(const qlora_model* m) {
    return m->plan.mode == QLORA_MODE_FP8;
}
