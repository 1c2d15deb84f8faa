// ---- gradient clip ------------------------------------------------------------------------------
typedef struct qlora_clip qlora_clip;

// Clips n f32 tensors in place by their common norm: scale = min(1, max_norm / (norm + 1e-6)). With
// groups (n numbers from 0; NULL = one group), each group has its own norm. Norms, scales and
// max_norm are stored on the device, so that only creation and qlora_clip_query wait for it. If a
// norm is not finite, its gradients are left unchanged and a flag is set. The tensors must outlive
// the clip. Destroying a clip does not free the tensors; clip may be NULL.
QLORA_API qlora_result qlora_clip_create(qlora_ctx* ctx, const qlora_tensor* const* tensors,
                                         const int32_t* groups, size_t n, qlora_clip** out);
QLORA_API qlora_result qlora_clip_destroy(qlora_clip* clip);
// Initially 1; negative = no clipping.
QLORA_API qlora_result qlora_clip_set(qlora_clip* clip, float max_norm);
// Computes norms, scales and flags, and scales the gradients.
QLORA_API qlora_result qlora_clip_apply(qlora_clip* clip);
// Computes norms, scales and flags only; for qlora_adamw_step, which can apply the scale itself.
QLORA_API qlora_result qlora_clip_measure(qlora_clip* clip);

typedef struct qlora_clip_info {
    float norm;
    float scale; // 1 if the norm is not finite
    bool finite;
} qlora_clip_info;
// Reports the last norm of a group. Waits for the device.
QLORA_API qlora_result qlora_clip_query(qlora_clip* clip, int32_t group, qlora_clip_info* out);
// Returns a group's scale (f32) and flag (I32, 1 = not finite) in the backend's memory, as tensors
// of one element that are valid until the clip is destroyed. They are for qlora_adamw_desc: pass
// both after qlora_clip_measure, but only the flag after qlora_clip_apply, which has already scaled
// the gradients. Group -1 is the flag of all groups together, which only qlora_clip_apply sets; it
// has no scale. Either pointer may be NULL.
QLORA_API qlora_result qlora_clip_device(qlora_clip* clip, int32_t group, qlora_tensor* scale,
                                         qlora_tensor* not_finite);

// ---- operators ----------------------------------------------------------------------------------
// Tensors are f32 or bf16, and all tensors of a call have the same type unless noted; arithmetic is
// f32. Sizes may be anything, including 0, and leading dimensions are respected. An output may be
// the same tensor as an input where the comment allows it; any other overlap is an error. A vector
// is a tensor with one row. dw is accumulated into, because several calls may contribute to it.
// Operators run on the context's stream and do not wait for the device; their results do not depend
// on the number of CPU threads.

// y = silu(x) = x / (1 + e^-x); y may be x. dx = dy silu'(x); dx may be x or dy.
QLORA_API qlora_result qlora_silu_forward(qlora_ctx* ctx, const qlora_tensor* x,
                                          const qlora_tensor* y);
QLORA_API qlora_result qlora_silu_backward(qlora_ctx* ctx, const qlora_tensor* x,
                                           const qlora_tensor* dy, const qlora_tensor* dx);
// h = silu(gate) up; h may be gate or up. gate and up may be column ranges of one buffer.
QLORA_API qlora_result qlora_swiglu_forward(qlora_ctx* ctx, const qlora_tensor* gate,
                                            const qlora_tensor* up, const qlora_tensor* h);
// Computes dgate and dup from dh, and also h unless it is NULL. dgate may be gate, dup may be up,
// and h may be dh.
QLORA_API qlora_result qlora_swiglu_backward(qlora_ctx* ctx, const qlora_tensor* dh,
                                             const qlora_tensor* gate, const qlora_tensor* up,
                                             const qlora_tensor* dgate, const qlora_tensor* dup,
                                             const qlora_tensor* h);
// The same with the tanh form of GELU instead of SiLU.
QLORA_API qlora_result qlora_geglu_forward(qlora_ctx* ctx, const qlora_tensor* gate,
                                           const qlora_tensor* up, const qlora_tensor* h);
QLORA_API qlora_result qlora_geglu_backward(qlora_ctx* ctx, const qlora_tensor* dh,
                                            const qlora_tensor* gate, const qlora_tensor* up,
                                            const qlora_tensor* dgate, const qlora_tensor* dup,
                                            const qlora_tensor* h);
// y = cap * tanh(x / cap), element by element; y may be x.
QLORA_API qlora_result qlora_cap(qlora_ctx* ctx, float cap, const qlora_tensor* x,
                                 const qlora_tensor* y);
// Element by element: y = a b, y = a + b, y = alpha x, y = value. y may be an input.
QLORA_API qlora_result qlora_mul(qlora_ctx* ctx, const qlora_tensor* a, const qlora_tensor* b,
                                 const qlora_tensor* y);
QLORA_API qlora_result qlora_add(qlora_ctx* ctx, const qlora_tensor* a, const qlora_tensor* b,
                                 const qlora_tensor* y);
QLORA_API qlora_result qlora_scale(qlora_ctx* ctx, float alpha, const qlora_tensor* x,
                                   const qlora_tensor* y);
QLORA_API qlora_result qlora_fill(qlora_ctx* ctx, float value, const qlora_tensor* y);
// Fills y (f32 or bf16, contiguous) with normally distributed random numbers of mean 0 and standard
// deviation `deviation`; they are the same on every backend. Streams of a seed are independent.
QLORA_API qlora_result qlora_random_normal(qlora_ctx* ctx, uint64_t seed, uint32_t stream,
                                           float deviation, const qlora_tensor* y);
// y = x converted to the type of y: f32, bf16 or f16, rounded to nearest even.
QLORA_API qlora_result qlora_cast(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* y);

// RMSNorm: y = x / sqrt(mean(x^2) + eps) w. w is f32 or bf16, and w->cols must divide x->cols: if w
// is narrower than x, each group of w->cols columns (a head) is normalised separately. y may be x.
QLORA_API qlora_result qlora_rmsnorm_forward(qlora_ctx* ctx, const qlora_tensor* x,
                                             const qlora_tensor* w, float eps,
                                             const qlora_tensor* y);
// sum = h + delta, rounded to the type of sum; then y = RMSNorm(sum). sum may be h.
QLORA_API qlora_result qlora_rmsnorm_residual_forward(qlora_ctx* ctx, const qlora_tensor* h,
                                                      const qlora_tensor* delta,
                                                      const qlora_tensor* w, float eps,
                                                      const qlora_tensor* sum,
                                                      const qlora_tensor* y);
// dx = dres + (gradient of RMSNorm at x for dy). dres may be NULL; dx may be dy or dres. Unless dw
// (f32, as wide as w) is NULL, the gradient of w is added to it, and dx must be neither dy nor x.
QLORA_API qlora_result qlora_rmsnorm_backward(qlora_ctx* ctx, const qlora_tensor* dy,
                                              const qlora_tensor* x, const qlora_tensor* w,
                                              float eps, const qlora_tensor* dres,
                                              const qlora_tensor* dx, const qlora_tensor* dw);

// Fills out[positions][head_dim] in host memory: for each position the cosines of the head_dim / 2
// angles, then their sines. ctx is used only for the error text and may be NULL.
QLORA_API qlora_result qlora_rope_table(qlora_ctx* ctx, const qlora_rope_desc* desc,
                                        int64_t head_dim, int64_t positions, float* out);
// Rotates the first `rotated` heads of x [T, heads * head_dim] in place, in pairs
// (i, i + head_dim / 2), by the angles of positions (I32 [1, T]) in table (f32
// [max_pos, head_dim]); head_dim is table->cols. bias [1, x->cols] (f32 or bf16, may be NULL) is
// first added to all heads. The backward call rotates in the opposite direction, without a bias. A
// position outside the table is an error; on CUDA, the row is left unchanged and 1 is written to
// flag (one I32, may be NULL).
QLORA_API qlora_result qlora_rope_forward(qlora_ctx* ctx, const qlora_tensor* x, int64_t rotated,
                                          const qlora_tensor* positions, const qlora_tensor* table,
                                          const qlora_tensor* bias, const qlora_tensor* flag);
QLORA_API qlora_result qlora_rope_backward(qlora_ctx* ctx, const qlora_tensor* dx, int64_t rotated,
                                           const qlora_tensor* positions, const qlora_tensor* table,
                                           const qlora_tensor* flag);
// The general form: heads may be wider than the table, and pairs may be neighbours. All fields are
// required; zero the struct first.
typedef struct qlora_rotation_desc {
    int64_t head_dim; // columns of a head, at least table->cols; the columns after them only get
                      // the bias
    int64_t heads;    // rotated heads
    bool neighbours;  // pairs (2 i, 2 i + 1) instead of (i, i + table->cols / 2)
    bool backward;    // rotate in the opposite direction; bias must be NULL
} qlora_rotation_desc;
QLORA_API qlora_result qlora_rope_apply(qlora_ctx* ctx, const qlora_rotation_desc* desc,
                                        const qlora_tensor* x, const qlora_tensor* positions,
                                        const qlora_tensor* table, const qlora_tensor* bias,
                                        const qlora_tensor* flag);

// The steps of unfused attention, for any 16-bit or 32-bit type. split copies x [S, H * d] to y, a
// batch of H matrices [S, d]; join is its inverse; transpose computes y[b] = x[b]^T.
QLORA_API qlora_result qlora_heads_split(qlora_ctx* ctx, const qlora_tensor* x,
                                         const qlora_tensor* y);
QLORA_API qlora_result qlora_heads_join(qlora_ctx* ctx, const qlora_tensor* x,
                                        const qlora_tensor* y);
QLORA_API qlora_result qlora_transpose(qlora_ctx* ctx, const qlora_tensor* x,
                                       const qlora_tensor* y);
// In place: s[b, q, k] = scale * s[b, q, k], or -3e38 if query q, which is at position
// cols - rows + q, must not see key k: later keys if causal, and keys that are `window` or more
// positions back if window > 0.
QLORA_API qlora_result qlora_scores_mask(qlora_ctx* ctx, const qlora_tensor* s, float scale,
                                         bool causal, int64_t window);
// y = softmax of each row; y may be x. dx = y (dy - sum(y dy)); dx may be dy or y.
QLORA_API qlora_result qlora_softmax_forward(qlora_ctx* ctx, const qlora_tensor* x,
                                             const qlora_tensor* y);
QLORA_API qlora_result qlora_softmax_backward(qlora_ctx* ctx, const qlora_tensor* y,
                                              const qlora_tensor* dy, const qlora_tensor* dx);

// y[t] = table[ids[t]]; table is f32, bf16 or f16, ids is I32 [1, T]. An id outside the table is an
// error; on CUDA, the row is set to zero and 1 is written to flag (one I32, may be NULL).
QLORA_API qlora_result qlora_embed(qlora_ctx* ctx, const qlora_tensor* table,
                                   const qlora_tensor* ids, const qlora_tensor* y,
                                   const qlora_tensor* flag);

// Cross-entropy of the rows of logits [R, V] with labels. logits, labels and losses are required;
// the other tensors may be NULL.
typedef struct qlora_cross_entropy_desc {
    const qlora_tensor* logits;  // replaced by their gradient unless forward_only
    const qlora_tensor* labels;  // I32 [1, R]; -100 = no label: loss 0, gradient 0
    const qlora_tensor* weights; // f32 [1, R], one per row; NULL = 1
    const qlora_tensor* scale;   // f32 [1, 1], multiplies the gradient, not the loss; NULL = 1
    const qlora_tensor* losses;  // f32 [1, R], set to weight * (log sum e^x - x[label])
    const qlora_tensor* total;   // f32 [1, 3], adds up losses, their rounding error, and weights
    const qlora_tensor* flag;    // I32 [1, 1], on CUDA set to 1 if a label is invalid
    bool forward_only;           // leave the logits unchanged
    float cap;                   // the loss of cap * tanh(logits / cap) instead; 0 = none
} qlora_cross_entropy_desc;
QLORA_API qlora_result qlora_cross_entropy(qlora_ctx* ctx, const qlora_cross_entropy_desc* args);
// ids[r] = column of the largest value in row r, the first one if several are equal; ids is I32
// [1, R].
QLORA_API qlora_result qlora_argmax(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* ids);

// AdamW as in torch.optim.AdamW, over one flat f32 arena. The state is stored in the backend's
// memory, so that a captured update uses the values of the current step.
typedef struct qlora_adamw_state {
    double lr; // the caller writes the first five fields
    double beta1;
    double beta2;
    double eps;
    double weight_decay;
    int64_t updates;  // updates so far, the t of the bias corrections
    int64_t skipped;  // updates skipped so far because a gradient was not finite
    int32_t skip;     // 1 if the last update was skipped
    float derived[7]; // private
} qlora_adamw_state;

// Part of the arena with its own weight decay and its own scale of the shadow copy.
typedef struct qlora_adamw_range {
    int64_t begin; // first element; a multiple of 4 is faster
    int64_t count;
    float decay;        // factor for weight_decay: 1, or 0 for norm weights
    float shadow_scale; // shadow = shadow_scale * parameter
    // A second copy of this range of the shadow, in the backend's memory: element i is written to
    // copy[i / copy_cols * copy_ld + i % copy_cols]. NULL = none.
    void* copy;
    int64_t copy_cols;
    int64_t copy_ld;
    double lr; // factor for the learning rate, also where it multiplies weight_decay; 0 = 1
} qlora_adamw_range;

typedef struct qlora_adamw_desc {
    const qlora_tensor* param;      // f32 [1, n]
    const qlora_tensor* grad;       // f32 [1, n]; zero afterwards
    const qlora_tensor* m;          // f32 [1, n], first moments
    const qlora_tensor* v;          // f32 [1, n], second moments
    const qlora_tensor* shadow;     // bf16 or f32 [1, n], a scaled copy of param; NULL = none
    const qlora_tensor* ranges;     // U8, an array of qlora_adamw_range, disjoint, within [0, n)
    const qlora_tensor* state;      // U8, one qlora_adamw_state
    const qlora_tensor* clip_scale; // f32 [1, 1], multiplies the gradient; NULL = 1
    const qlora_tensor* not_finite; // I32 [1, 1]; if not 0, the update is skipped; NULL = never
    int64_t longest_range;          // number of elements of the longest range; 0 = n
} qlora_adamw_desc;
// Counts the update, or the skip, in the state, and updates every range.
QLORA_API qlora_result qlora_adamw_step(qlora_ctx* ctx, const qlora_adamw_desc* args);
// Brings shadow and its copies up to date after param has been changed by other means. Uses only
// param, shadow and ranges.
QLORA_API qlora_result qlora_adamw_shadow(qlora_ctx* ctx, const qlora_adamw_desc* args);

// y = x keep / (1 - p), or y += that if accumulate is set. Whether element (row, column) is kept
// depends only on (seed, step, sequences[row], positions[row], layer, projection, column): it is
// the same in the backward pass, after resuming, and when a batch is split differently. y may be x.
typedef struct qlora_dropout_desc {
    const qlora_tensor* x;
    const qlora_tensor* y;
    const qlora_tensor* positions; // I32 [1, rows]
    const qlora_tensor* sequences; // I32 [1, rows]
    const qlora_tensor* state;     // I32 [1, 4]: seed low, seed high, step, 0
    float p;                       // at least 0 and less than 1
    int32_t layer;                 // 0 to 2^23 - 1
    int32_t projection;            // 0 to 255
    bool accumulate;
} qlora_dropout_desc;
QLORA_API qlora_result qlora_dropout(qlora_ctx* ctx, const qlora_dropout_desc* args);

// ---- LoRA linear --------------------------------------------------------------------------------
// A stack of projections that share their input x (q, k and v; gate and up; or a single one):
//
//   y_i = x W_i^T + bias_i + s_i (x A_i^T) B_i^T
//
// Each part has its own rank and its own columns of y, in order.
#define QLORA_LINEAR_PARTS 3

typedef struct qlora_linear_part {
    int64_t out;
    int64_t rank;              // 0 = no adapter
    float scale;               // s_i
    int32_t projection;        // qlora_dropout_desc.projection of the part
    const qlora_nf4* nf4;      // the frozen weight W_i [out, in]: either this
    const qlora_tensor* dense; // or this, in the type of x; on the CPU, bf16 and f16 go with f32
    const struct qlora_fp8_weight* fp8; // only models with FP8 weights set it, instead; NULL
    const qlora_tensor* bias;  // [1, out] in the type of x; NULL = none
    const qlora_tensor* a;     // A_i [rank, in] in the type of x
    const qlora_tensor* sb;    // s_i B_i [out, rank] in the type of x
    const qlora_tensor* da;    // f32 [rank, in]; used only by backward
    const qlora_tensor* db;    // f32 [out, rank], the gradient of B_i itself; used only by backward
} qlora_linear_part;

// `pad` is the sum of the ranks, rounded up to a multiple of 8. The operand is a matrix in the type
// of x, with [sum of out + pad, in + pad] elements, that qlora_linear_place fills. With it, forward
// and backward are one large product each: y = [x z] [W sB]^T and dx = [dy u] [W ; A]. Without it,
// 4-bit weights are dequantised into the scratch buffer, part by part.
typedef struct qlora_linear_desc {
    int64_t in;
    int32_t count; // number of parts, 1 to 3
    qlora_linear_part parts[QLORA_LINEAR_PARTS];
    const qlora_tensor* operand; // may be NULL
    const struct qlora_fp8_operand* fp8; // only models in FP8 mode set it; NULL
    const struct qlora_linear_owners* owners; // only models with several adapters set it; NULL
    // Dropout on the input of the adapters, with a separate mask for each projection. The other
    // fields are as in qlora_dropout_desc and are used only if dropout is not 0.
    float dropout; // 0 = none
    int32_t layer;
    const qlora_tensor* positions;
    const qlora_tensor* sequences;
    const qlora_tensor* state;
} qlora_linear_desc;

typedef enum qlora_linear_flags {
    QLORA_LINEAR_WEIGHTS = 1,  // place: write the frozen weights
    QLORA_LINEAR_ADAPTERS = 2, // place: write A, sB and the zeros around them
    QLORA_LINEAR_OVERWRITE = 4 // backward: overwrite da and db instead of adding to them
} qlora_linear_flags;

QLORA_API int64_t qlora_linear_out(const qlora_linear_desc* linear); // sum of the parts' out
QLORA_API int64_t qlora_linear_pad(const qlora_linear_desc* linear);
// Fills the operand. Write the weights once, and the adapters after every update.
QLORA_API qlora_result qlora_linear_place(qlora_ctx* ctx, const qlora_linear_desc* linear,
                                          uint32_t flags);
// y is [T, out]. x is [T, in + pad]; z = x A^T is written to its last columns, for backward.
QLORA_API qlora_result qlora_linear_forward(qlora_ctx* ctx, const qlora_linear_desc* linear,
                                            const qlora_tensor* x, const qlora_tensor* y);
// Adds u_i^T x to da_i and s_i dy_i^T z_i to db_i. dy is [T, out + pad]; u = dy sB is written to
// its last columns. x must hold z from the forward call. dx is [T, in]; NULL = not computed. flags:
// 0 or QLORA_LINEAR_OVERWRITE.
QLORA_API qlora_result qlora_linear_backward(qlora_ctx* ctx, const qlora_linear_desc* linear,
                                             const qlora_tensor* x, const qlora_tensor* dy,
                                             const qlora_tensor* dx, uint32_t flags);

// ---- attention ----------------------------------------------------------------------------------
typedef struct qlora_attention_desc {
    int64_t heads;
    int64_t kv_heads; // must divide heads; 0 = heads
    int64_t head_dim; // 1 to 256
    int64_t window;   // query i sees keys j with i - window < j <= i; 0 = all keys j <= i
    float scale;      // positive; 0 = 1 / sqrt(head_dim)
    float cap;        // scores become cap * tanh(score / cap); 0 = no cap
    // Computes attention from separate operators (split, GEMM, mask, softmax, join), for
    // comparison. Each of the n sequences then has tokens / n tokens, seqs is not read and lse is
    // not written. The scratch buffer must hold the scores of a whole sequence:
    // 2 * heads * length^2 elements in the backward pass.
    bool unfused;
    // Tokens of the longest sequence, if it is known: how work is divided on a GPU depends on it,
    // and so does the rounding of results. 0 = all sequences are about as long.
    int64_t longest;
} qlora_attention_desc;

// Causal attention within each packed sequence. q and o are [tokens, heads * head_dim], k and v are
// [tokens, kv_heads * head_dim], all f32 or all bf16; q, k and v may be views of one buffer. seqs
// is I32 [1, n + 1]: the token offsets of n sequences in ascending order, starting with 0; unused
// entries repeat the last one, so that any packing fits one n. Rows of o after the last sequence
// are set to zero. lse is f32 [heads, tokens], contiguous, and is needed by backward.
//
// bf16 runs on the tensor cores of GPUs from compute capability 8.0 on if head_dim is a multiple of
// 8 and rows start at multiples of 16 bytes. Its kernels have head sizes 32, 64, 80, 96, 128, 192
// and 256, for capped scores 128 and 256; another head_dim takes the time of a larger one. On
// compute capability 9.0, sizes 64, 96, 128 and 256 (also with capped scores) have faster ones.
// Everything else is f32 arithmetic.
QLORA_API qlora_result qlora_attention_forward(qlora_ctx* ctx, const qlora_attention_desc* desc,
                                               const qlora_tensor* q, const qlora_tensor* k,
                                               const qlora_tensor* v, const qlora_tensor* seqs,
                                               const qlora_tensor* o, const qlora_tensor* lse);
// Computes the gradients from d_o, with o and lse from the forward call. Needs 8 bytes of scratch
// per head and token. If there are few keys and few key heads, it also uses the rest of the free
// scratch to keep a large GPU busy.
QLORA_API qlora_result qlora_attention_backward(qlora_ctx* ctx, const qlora_attention_desc* desc,
                                                const qlora_tensor* q, const qlora_tensor* k,
                                                const qlora_tensor* v, const qlora_tensor* seqs,
                                                const qlora_tensor* o, const qlora_tensor* lse,
                                                const qlora_tensor* d_o, const qlora_tensor* dq,
                                                const qlora_tensor* dk, const qlora_tensor* dv);

// ---- graphs -------------------------------------------------------------------------------------
typedef struct qlora_graph qlora_graph;
typedef qlora_result (*qlora_graph_fn)(qlora_ctx* ctx, void* user);

// Records the work that fn launches on the context's stream, then runs it once. fn must not wait
// for the device, allocate, copy to or from host memory, or compile: a call that breaks the capture
// is named in the error (QLORA_ERR_CAPTURE), and the stream remains usable. key identifies what the
// graph is for, such as a shape; replay must be given the same key. On the CPU, fn is called now
// and again at every replay, so user must stay valid. Neither capture nor replay waits for the
// device. Destroying a graph does not free the buffers it uses; graph may be NULL.
QLORA_API qlora_result qlora_graph_capture(qlora_ctx* ctx, uint64_t key, qlora_graph_fn fn,
                                           void* user, qlora_graph** out);
QLORA_API qlora_result qlora_graph_replay(qlora_graph* graph, uint64_t key);
QLORA_API qlora_result qlora_graph_destroy(qlora_graph* graph);

typedef struct qlora_graph_info {
    uint64_t key;
    uint64_t replays;
    size_t nodes; // 0 on the CPU
    bool valid;   // false once a buffer it uses was freed, or the stream or a workspace changed
} qlora_graph_info;
QLORA_API qlora_result qlora_graph_query(const qlora_graph* graph, qlora_graph_info* out);
