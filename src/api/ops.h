// ---- gradient clip ------------------------------------------------------------------------------
typedef struct qlora_clip qlora_clip;

// Clips n f32 tensors in place by their common norm: scale = min(1, max_norm / (norm + 1e-6)).
// groups (n numbers from 0 up, or NULL for one group) gives several norms. Norms, scales and
// max_norm live on the device; nothing waits for it. A non-finite norm leaves its gradients alone
// and sets a flag. The tensors must outlive the clip.
QLORA_API qlora_result qlora_clip_create(qlora_ctx* ctx, const qlora_tensor* const* tensors,
                                         const int32_t* groups, size_t n, qlora_clip** out);
QLORA_API qlora_result qlora_clip_destroy(qlora_clip* clip);
QLORA_API qlora_result qlora_clip_set(qlora_clip* clip, float max_norm); // 1 at first
QLORA_API qlora_result qlora_clip_apply(qlora_clip* clip);
// Norms, scales and flags only: the gradients stay as they are, for an AdamW that is given the
// scale.
QLORA_API qlora_result qlora_clip_measure(qlora_clip* clip);

typedef struct qlora_clip_info {
    float norm;
    float scale;
    bool finite;
} qlora_clip_info;
// Waits for the device. group counts from 0.
QLORA_API qlora_result qlora_clip_query(qlora_clip* clip, int32_t group, qlora_clip_info* out);
// Where a group's scale (f32) and flag (I32, 1 = not finite) are in the backend's memory, as
// tensors of one element that are valid as long as the clip. qlora_adamw_desc takes them: both
// after qlora_clip_measure, only the flag after qlora_clip_apply, which has scaled the gradients
// already. Group -1 is the flag of all groups together, which qlora_clip_apply sets; it has no
// scale. Either pointer may be NULL.
QLORA_API qlora_result qlora_clip_device(qlora_clip* clip, int32_t group, qlora_tensor* scale,
                                         qlora_tensor* not_finite);

// ---- operators-----------------------------------------------------------------------------------
// ------------------------------------------------------------------------------------ f32 and bf16
// storage (all tensors of a call in the same one, unless said), f32 arithmetic, rows and columns of
// any size with zero included, leading dimensions respected. An output may be the very tensor of an
// input where the comment says so; any other overlap is an error. Vectors are tensors of one row.
// Gradients that other calls add to (dw) are added to.

// y = silu(x) = x / (1 + e^-x); y may be x. dx = dy silu'(x); dx may be x or dy.
QLORA_API qlora_result qlora_silu_forward(qlora_ctx* ctx, const qlora_tensor* x,
                                          const qlora_tensor* y);
QLORA_API qlora_result qlora_silu_backward(qlora_ctx* ctx, const qlora_tensor* x,
                                           const qlora_tensor* dy, const qlora_tensor* dx);
// h = silu(gate) up; h may be gate or up. gate and up may be two column ranges of one buffer.
QLORA_API qlora_result qlora_swiglu_forward(qlora_ctx* ctx, const qlora_tensor* gate,
                                            const qlora_tensor* up, const qlora_tensor* h);
// dgate, dup from dh, and h again where it is not NULL. dgate may be gate, dup up, h dh.
QLORA_API qlora_result qlora_swiglu_backward(qlora_ctx* ctx, const qlora_tensor* dh,
                                             const qlora_tensor* gate, const qlora_tensor* up,
                                             const qlora_tensor* dgate, const qlora_tensor* dup,
                                             const qlora_tensor* h);
// y = a b, y = a + b, y = alpha x, y = value; y may be an input.
QLORA_API qlora_result qlora_mul(qlora_ctx* ctx, const qlora_tensor* a, const qlora_tensor* b,
                                 const qlora_tensor* y);
QLORA_API qlora_result qlora_add(qlora_ctx* ctx, const qlora_tensor* a, const qlora_tensor* b,
                                 const qlora_tensor* y);
QLORA_API qlora_result qlora_scale(qlora_ctx* ctx, float alpha, const qlora_tensor* x,
                                   const qlora_tensor* y);
QLORA_API qlora_result qlora_fill(qlora_ctx* ctx, float value, const qlora_tensor* y);
// y (f32 or bf16, no gaps) = normal random numbers, the same on every backend; streams of one seed
// are independent of each other.
QLORA_API qlora_result qlora_random_normal(qlora_ctx* ctx, uint64_t seed, uint32_t stream,
                                           float deviation, const qlora_tensor* y);
// y = x in y's type: f32, bf16, f16, rounded to nearest even.
QLORA_API qlora_result qlora_cast(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* y);

// RMSNorm: y = x / sqrt(mean(x^2) + eps) w. w is f32 or bf16 with w->cols dividing x->cols: where
// it is narrower than x, every run of w->cols columns (a head) is normalised by itself. y may be x.
QLORA_API qlora_result qlora_rmsnorm_forward(qlora_ctx* ctx, const qlora_tensor* x,
                                             const qlora_tensor* w, float eps,
                                             const qlora_tensor* y);
// sum = h + delta, rounded to storage, then y = RMSNorm(sum). sum may be h.
QLORA_API qlora_result qlora_rmsnorm_residual_forward(qlora_ctx* ctx, const qlora_tensor* h,
                                                      const qlora_tensor* delta,
                                                      const qlora_tensor* w, float eps,
                                                      const qlora_tensor* sum,
                                                      const qlora_tensor* y);
// dx = dres + (RMSNorm backward of dy at x); dres may be NULL, dx may be dy or dres. Where dw (f32,
// as wide as w) is not NULL the weight's gradient is added to it; then dx must be neither dy nor x.
QLORA_API qlora_result qlora_rmsnorm_backward(qlora_ctx* ctx, const qlora_tensor* dy,
                                              const qlora_tensor* x, const qlora_tensor* w,
                                              float eps, const qlora_tensor* dres,
                                              const qlora_tensor* dx, const qlora_tensor* dw);

// Fills out[positions][head_dim] in host memory: cosines of the head_dim / 2 frequencies, then
// their sines. ctx is for the error text only and may be NULL.
QLORA_API qlora_result qlora_rope_table(qlora_ctx* ctx, const qlora_rope_desc* desc,
                                        int64_t head_dim, int64_t positions, float* out);
// Rotates heads 0 .. rotated-1 of x [T, heads * head_dim] in place, pairs (i, i + head_dim / 2),
// by the angles of positions [1, T] in table [max_pos, head_dim]; head_dim = table->cols. bias
// [1, x->cols] (f32 or bf16, may be NULL) is added first, to every head. backward turns back (no
// bias). A position outside the table is an error; on CUDA it leaves the row alone and writes 1 to
// flag (one I32, may be NULL).
QLORA_API qlora_result qlora_rope_forward(qlora_ctx* ctx, const qlora_tensor* x, int64_t rotated,
                                          const qlora_tensor* positions, const qlora_tensor* table,
                                          const qlora_tensor* bias, const qlora_tensor* flag);
QLORA_API qlora_result qlora_rope_backward(qlora_ctx* ctx, const qlora_tensor* dx, int64_t rotated,
                                           const qlora_tensor* positions, const qlora_tensor* table,
                                           const qlora_tensor* flag);

// Attention in pieces. split: x [S, H*d] -> y, a batch of H [S, d]; join the other way round; any
// 16- or 32-bit type. transpose: y[b] = x[b]^T.
QLORA_API qlora_result qlora_heads_split(qlora_ctx* ctx, const qlora_tensor* x,
                                         const qlora_tensor* y);
QLORA_API qlora_result qlora_heads_join(qlora_ctx* ctx, const qlora_tensor* x,
                                        const qlora_tensor* y);
QLORA_API qlora_result qlora_transpose(qlora_ctx* ctx, const qlora_tensor* x,
                                       const qlora_tensor* y);
// s[b, q, k] = scale s, or -3e38 where query q, the (cols - rows + q)-th position, may not see key
// k: later keys if causal, and keys `window` or more positions back if window > 0. In place.
QLORA_API qlora_result qlora_scores_mask(qlora_ctx* ctx, const qlora_tensor* s, float scale,
                                         bool causal, int64_t window);
// y = softmax of each row; y may be x. dx = y (dy - sum(y dy)); dx may be dy or y.
QLORA_API qlora_result qlora_softmax_forward(qlora_ctx* ctx, const qlora_tensor* x,
                                             const qlora_tensor* y);
QLORA_API qlora_result qlora_softmax_backward(qlora_ctx* ctx, const qlora_tensor* y,
                                              const qlora_tensor* dy, const qlora_tensor* dx);

// y[t] = table[ids[t]]; table f32, bf16 or f16, ids I32 [1, T]. An id outside the table is an
// error; on CUDA it gives a row of zeros and writes 1 to flag (one I32, may be NULL).
QLORA_API qlora_result qlora_embed(qlora_ctx* ctx, const qlora_tensor* table,
                                   const qlora_tensor* ids, const qlora_tensor* y,
                                   const qlora_tensor* flag);

// Rows of logits [R, V] against labels I32 [1, R]; everything may be NULL but logits, labels,
// losses.
typedef struct qlora_cross_entropy_desc {
    const qlora_tensor* logits;
    const qlora_tensor* labels;  // -100 = no label: loss 0, gradient 0
    const qlora_tensor* weights; // f32 [1, R], per row
    const qlora_tensor* scale;   // f32, one: multiplies the gradient, not the loss
    const qlora_tensor* losses;  // f32 [1, R]: weight (log sum e^x - x[label])
    const qlora_tensor* total;   // f32 [1, 3], added to: losses, their rounding rest, weights
    const qlora_tensor* flag;    // I32, one: 1 where a label is outside [0, V) and not -100 (CUDA)
    bool forward_only;           // leave the logits; otherwise they become their gradient
} qlora_cross_entropy_desc;
QLORA_API qlora_result qlora_cross_entropy(qlora_ctx* ctx, const qlora_cross_entropy_desc* args);
// ids[r] = column of the largest value in row r (the first of equals); ids I32 [1, R].
QLORA_API qlora_result qlora_argmax(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* ids);

// AdamW as torch.optim.AdamW, over one flat f32 arena. The state lives in the backend's memory, so
// that a captured update sees each step's own values.
typedef struct qlora_adamw_state {
    double lr; // the host writes the first five
    double beta1;
    double beta2;
    double eps;
    double weight_decay;
    int64_t updates;  // applied so far: the t of the bias corrections
    int64_t skipped;  // left out so far, because a gradient was not finite
    int32_t skip;     // the latest one was left out
    float derived[7]; // private
} qlora_adamw_state;

// Part of the arena with its own decay factor and its own scale of the shadow copy.
typedef struct qlora_adamw_range {
    int64_t begin; // element; vector speed wants a multiple of 4
    int64_t count;
    float decay;        // times weight_decay: 1, or 0 for norm weights
    float shadow_scale; // shadow = shadow_scale * parameter
    // Where the shadow of this range is needed once more, in the backend's memory: element i goes
    // to copy[i / copy_cols * copy_ld + i % copy_cols]. NULL for nowhere.
    void* copy;
    int64_t copy_cols;
    int64_t copy_ld;
} qlora_adamw_range;

typedef struct qlora_adamw_desc {
    const qlora_tensor* param;      // f32 [1, n]
    const qlora_tensor* grad;       // f32 [1, n]; zero afterwards
    const qlora_tensor* m;          // f32 [1, n]
    const qlora_tensor* v;          // f32 [1, n]
    const qlora_tensor* shadow;     // bf16 or f32 [1, n], or NULL
    const qlora_tensor* ranges;     // U8: qlora_adamw_range[count], disjoint, inside [0, n)
    const qlora_tensor* state;      // U8: one qlora_adamw_state
    const qlora_tensor* clip_scale; // f32, one: multiplies the gradient; NULL = 1
    const qlora_tensor* not_finite; // I32, one: not 0 = leave this update out; NULL = never
    int64_t longest_range;          // elements of the longest range; 0 = n
} qlora_adamw_desc;
// advance counts the update (or the skip) and forms the corrections, then every range is updated.
QLORA_API qlora_result qlora_adamw_step(qlora_ctx* ctx, const qlora_adamw_desc* args);
// shadow = shadow_scale * param in every range, and its copies: after parameters were set. Uses
// param, shadow, ranges.
QLORA_API qlora_result qlora_adamw_shadow(qlora_ctx* ctx, const qlora_adamw_desc* args);

// y = x keep / (1 - p), or y += that. Whether element (row, column) is kept depends on nothing but
// (seed, step, sequences[row], positions[row], layer, projection, column): the same in the backward
// pass, after a resume and when a batch is cut differently. y may be x.
typedef struct qlora_dropout_desc {
    const qlora_tensor* x;
    const qlora_tensor* y;
    const qlora_tensor* positions; // I32 [1, rows]
    const qlora_tensor* sequences; // I32 [1, rows]
    const qlora_tensor* state;     // I32 [1, 4]: seed low, seed high, step, 0
    float p;                       // 0 <= p < 1
    int32_t layer;                 // 0 .. 2^23 - 1
    int32_t projection;            // 0 .. 255
    bool accumulate;
} qlora_dropout_desc;
QLORA_API qlora_result qlora_dropout(qlora_ctx* ctx, const qlora_dropout_desc* args);

// ---- LoRA linear
// ---------------------------------------------------------------------------------- y_i = x W_i^T
// + bias_i + s_i (x A_i^T) B_i^T for a stack of projections that share x: q, k and v, gate and up,
// or one alone. Every part has its own rank (0: no adapter) and its own columns of y, in order.
#define QLORA_LINEAR_PARTS 3

typedef struct qlora_linear_part {
    int64_t out;
    int64_t rank;
    float scale;               // s_i
    int32_t projection;        // its number in the dropout's counter
    const qlora_nf4* nf4;      // the frozen weight [out, in]: this
    const qlora_tensor* dense; // or this, in x's type
    const qlora_tensor* bias;  // [1, out] in x's type, or NULL
    const qlora_tensor* a;     // A_i [rank, in] in x's type
    const qlora_tensor* sb;    // s_i B_i [out, rank] in x's type
    const qlora_tensor* da;    // f32 [rank, in]; needed by backward
    const qlora_tensor* db;    // f32 [out, rank], the gradient of B_i itself
} qlora_linear_part;

// `pad` is the sum of the ranks rounded up to a multiple of 8. With an operand, a matrix of x's
// type of [sum of out + pad, in + pad] that qlora_linear_place fills, forward and backward are one
// large product each: y = [x z] [W sB]^T, dx = [dy u] [W ; A]. Without, the weights pass through
// the scratch part by part.
typedef struct qlora_linear_desc {
    int64_t in;
    int32_t count;
    qlora_linear_part parts[QLORA_LINEAR_PARTS];
    const qlora_tensor* operand; // or NULL
    // Dropout of the adapters' input, each projection with a mask of its own; p = 0: none, the rest
    // unused.
    float dropout;
    int32_t layer;
    const qlora_tensor* positions; // as qlora_dropout has them
    const qlora_tensor* sequences;
    const qlora_tensor* state;
} qlora_linear_desc;

typedef enum qlora_linear_flags {
    QLORA_LINEAR_WEIGHTS = 1,  // place: the frozen weights
    QLORA_LINEAR_ADAPTERS = 2, // place: A, sB and the zeros around them
    QLORA_LINEAR_OVERWRITE = 4 // backward: da and db are set, not added to
} qlora_linear_flags;

QLORA_API int64_t qlora_linear_out(const qlora_linear_desc* linear); // sum of the parts' out
QLORA_API int64_t qlora_linear_pad(const qlora_linear_desc* linear);
// Fills the operand: the weights when they are not there yet, the adapters after every update.
QLORA_API qlora_result qlora_linear_place(qlora_ctx* ctx, const qlora_linear_desc* linear,
                                          uint32_t flags);
// x is [T, in + pad]: z = x A^T is left in its last columns, for backward. y is [T, out].
QLORA_API qlora_result qlora_linear_forward(qlora_ctx* ctx, const qlora_linear_desc* linear,
                                            const qlora_tensor* x, const qlora_tensor* y);
// dy is [T, out + pad]: u = dy sB is left in its last columns. dx is [T, in], or NULL when it is
// not wanted. da_i += u_i^T x, db_i += s_i dy_i^T z_i.
QLORA_API qlora_result qlora_linear_backward(qlora_ctx* ctx, const qlora_linear_desc* linear,
                                             const qlora_tensor* x, const qlora_tensor* dy,
                                             const qlora_tensor* dx, uint32_t flags);

// ---- attention ----------------------------------------------------------------------------------
typedef struct qlora_attention_desc {
    int64_t heads;
    int64_t kv_heads; // 0 = heads; must divide them
    int64_t head_dim; // 1 to 256
    int64_t window; // query i sees the keys j with i - window < j <= i; 0 = every key up to its own
    float scale;    // above 0; 0 = 1 / sqrt(head_dim)
    // Compose it from the separate operators (split, GEMM, mask, softmax, join), to compare with.
    // The n sequences then have tokens / n tokens each, seqs is not read and lse not touched; the
    // scratch holds the scores of a whole sequence, 2 heads length^2 elements in backward.
    bool unfused;
} qlora_attention_desc;

// Causal attention inside each packed sequence. q, o [tokens, heads * head_dim], k, v [tokens,
// kv_heads * head_dim], all f32 or all bf16; windows of one packed buffer will do. seqs: i32 [1, n
// + 1], ascending token offsets from 0 of n sequences; unused entries repeat the last one, so one n
// serves any packing. Tokens after the last sequence get zeros. lse: f32 [heads, tokens], rows
// without gaps.
QLORA_API qlora_result qlora_attention_forward(qlora_ctx* ctx, const qlora_attention_desc* desc,
                                               const qlora_tensor* q, const qlora_tensor* k,
                                               const qlora_tensor* v, const qlora_tensor* seqs,
                                               const qlora_tensor* o, const qlora_tensor* lse);
// Gradients from d_o, with o and lse of the forward call. Needs 8 bytes of scratch per head and
// token; when there are few keys and few key heads it uses what scratch there is to keep a large
// GPU busy.
QLORA_API qlora_result qlora_attention_backward(qlora_ctx* ctx, const qlora_attention_desc* desc,
                                                const qlora_tensor* q, const qlora_tensor* k,
                                                const qlora_tensor* v, const qlora_tensor* seqs,
                                                const qlora_tensor* o, const qlora_tensor* lse,
                                                const qlora_tensor* d_o, const qlora_tensor* dq,
                                                const qlora_tensor* dk, const qlora_tensor* dv);

// ---- graphs -------------------------------------------------------------------------------------
typedef struct qlora_graph qlora_graph;
typedef qlora_result (*qlora_graph_fn)(qlora_ctx* ctx, void* user);

// Records what fn launches on the context's stream, then runs it once. fn must not wait, allocate,
// copy to or from host memory or compile: what breaks the capture is named and the stream stays
// usable. key says what the graph is for (a shape): replay demands the same. On the CPU fn is
// called at once and again at each replay, so user must stay valid.
QLORA_API qlora_result qlora_graph_capture(qlora_ctx* ctx, uint64_t key, qlora_graph_fn fn,
                                           void* user, qlora_graph** out);
QLORA_API qlora_result qlora_graph_replay(qlora_graph* graph, uint64_t key);
QLORA_API qlora_result qlora_graph_destroy(qlora_graph* graph);

typedef struct qlora_graph_info {
    uint64_t key;
    uint64_t replays;
    size_t nodes; // 0 on the CPU
    bool valid;   // false after a buffer it uses was freed or the stream changed
} qlora_graph_info;
QLORA_API qlora_result qlora_graph_query(const qlora_graph* graph, qlora_graph_info* out);
