// ---- training -----------------------------------------------------------------------------------

// With QLORA_NO_TRAIN beside the implementation, these functions are declared but left out: a
// program that calls one does not link.

typedef struct qlora_trainer qlora_trainer;

// The learning rate after the warm-up.
typedef enum qlora_schedule {
    QLORA_SCHEDULE_COSINE = 0, // to zero at total_steps
    QLORA_SCHEDULE_LINEAR = 1, // to zero at total_steps
    QLORA_SCHEDULE_CONSTANT = 2
} qlora_schedule;

// The gradients whose common norm is limited.
typedef enum qlora_clip_scope {
    QLORA_CLIP_ALL = 0,   // all of them together, as in PyTorch's clip_grad_norm_
    QLORA_CLIP_LAYERS = 1 // those of each layer separately; the final norm is a group of its own
} qlora_clip_scope;

// What is minimised. The formulas of DPO and KTO, in which the reference is the model with adapters
// off, are in docs/methods.md. Their steps are computed as a whole, with qlora_train_step,
// qlora_train_gradients or qlora_train_begin: the result does not depend on how a step is divided
// into batches. Batches have no weights, and every sequence has at least one label.
typedef enum qlora_method {
    QLORA_METHOD_SFT = 0, // mean loss of the labels
    // Sequences 2 i and 2 i + 1 of a batch are a pair, the chosen text and the rejected one;
    // batch.roles is NULL.
    QLORA_METHOD_DPO = 1,
    // batch.roles gives the role of every sequence. The first batches of a step consist of
    // mismatched sequences only, as many as there are sequences in the others.
    QLORA_METHOD_KTO = 2
} qlora_method;

// What lr_factors of qlora_train_desc apply to: number i is the projection of bit i of
// qlora_target; the two numbers that have no bit are the norms, and embedding, head and token rows.
#define QLORA_LR_NORMS 9
#define QLORA_LR_EMBEDDINGS 10
#define QLORA_LR_FACTORS 15

// Zero it before setting fields: 0 is the default of every field.
typedef struct qlora_train_desc {
    uint32_t reserved_must_be_zero0;
    double lr;                 // peak learning rate; 0 = 2e-4, negative = 0
    double beta1;              // 0 = 0.9
    double beta2;              // 0 = 0.999
    double eps;                // 0 = 1e-8
    double weight_decay;       // 0 = none
    double max_norm;           // gradient norm to clip to; 0 = 1, negative = no clipping
    qlora_clip_scope clip;     // what max_norm applies to; 0 = all gradients together
    qlora_schedule schedule;   // 0 = cosine
    int64_t warmup_steps;      // steps over which the learning rate rises linearly; 0 = none
    int64_t total_steps;       // 0 = constant learning rate after the warm-up
    uint64_t seed;             // for dropout and noise
    bool eager;                // do not use CUDA graphs
    bool require_graph;        // fail if a graph cannot be captured, instead of running without
    int32_t keep_checkpoints;  // number of checkpoints to keep, at most 64; 0 = 2
    qlora_method method;       // 0 = SFT
    double beta;               // DPO and KTO; 0 = 0.1
    double label_smoothing;    // DPO: probability that a pair is labelled wrongly, less than 1
    double sft_alpha;          // DPO: weight of the mean loss of the chosen texts, which is added
    double desirable_weight;   // KTO; 0 = 1
    double undesirable_weight; // KTO; 0 = 1
    double loraplus_ratio;     // LoRA+: factor for the learning rate of B and of vectors; 0 = 1
    double lr_factors[QLORA_LR_FACTORS]; // factors for the learning rate; 0 = 1
    // NEFTune: noise on the embeddings while training, neftune / sqrt(L hidden) times a uniform
    // number in [-1, 1), with L the length of the sequence; 0 = none
    double neftune;
    // Coefficient of the load-balancing loss of routers, which is added as transformers does with
    // output_router_logits; 0 = none, and so is a negative value, which a config that sets that key
    // needs. A step of several batches has the mean of theirs, by labels, pairs or sequences. TRL
    // adds it unasked, with the coefficient of the config (mostly 0.001); the Trainer of
    // transformers with PEFT does not.
    double router_aux_loss;
    const qlora_comm* comm; // processes that train together; NULL = this one alone. Every process
                            // passes all batches of a step and computes its share of them
    int32_t adapter;        // index of the adapter that it trains, if the model has several
    uint32_t reserved_must_be_zero1;
} qlora_train_desc;

// Starts the optimizer from zero and leaves the adapters as they are. desc NULL = all defaults. An
// adapter has at most one trainer at a time, and its model must have been opened with
// QLORA_PURPOSE_TRAIN. Compiles the kernels of desc.method and desc.neftune, which a model does not
// have from the start, even if the cache is sealed. Waits for the device.
QLORA_API qlora_result qlora_trainer_create(qlora_model* model, const qlora_train_desc* desc,
                                            qlora_trainer** out);
// The model keeps the trained adapters. trainer may be NULL.
QLORA_API qlora_result qlora_trainer_destroy(qlora_trainer* trainer);
// Changes settings between two steps. clip, seed, eager, require_graph, method, loraplus_ratio,
// lr_factors, neftune, router_aux_loss, comm and adapter cannot change and must be as before. Does
// not wait for the device.
QLORA_API qlora_result qlora_train_set(qlora_trainer* trainer, const qlora_train_desc* desc);

typedef struct qlora_train_info {
    int64_t step;      // number of this step: updates so far, including skipped ones
    int64_t pending;   // number of later steps that the device has not finished
    int64_t skipped;   // updates skipped so far because a gradient was not finite
    bool last_skipped; // whether this one was
    double loss;     // mean over the labels of the step, or its pairs or sequences for DPO and KTO;
                     // with router_aux_loss, what that adds is in it
    double labels;   // their total weight
    int64_t tokens;  // number of tokens in the step
    float grad_norm; // before clipping, of all gradients together
    double lr;       // learning rate of the step
    bool graphs;     // steps are run as CUDA graphs
    int64_t waits;   // number of times the host had to wait for a free staging buffer
    int64_t sent;    // bytes that this process sent to others for the step
    double exchange_ms; // time of the exchange with others, including waiting for them
    bool exchange_graph; // it was run as a CUDA graph
    // Of a step in slices: milliseconds of its longest piece, which no budget can divide
    double longest_piece;
    // DPO and KTO; r is the log-probability of a sequence less its reference.
    double preference_loss; // the loss without the likelihood term
    double chosen_nll;      // DPO: mean loss of the labels of the chosen texts
    double rewards_chosen;  // mean of beta r over the chosen or desirable sequences; NaN: none
    double rewards_rejected;
    double margins;  // mean difference of the rewards of a pair; KTO: difference of the means, or
                     // NaN if one is missing
    double accuracy; // share of the pairs with a positive difference; KTO: of sequences whose r is
                     // positive if and only if they are desirable
    double kl;       // KTO: mean of r over the mismatched sequences, at least 0
    double kl_raw;   // the same before 0 takes the place of negative values
    // Mixtures of experts. Loads are relative to an even one, and those of the micro-batches that
    // this process computed; all are 0 in a report of a checkpoint's step.
    double router_aux_loss; // the load-balancing loss, without its coefficient; 0 if that is 0
    double load_least;      // of any expert of any layer
    double load_most;
    double load_entropy; // of a layer, as the mean of the layers; 1 = even
} qlora_train_info;

// Runs one optimizer step over `count` micro-batches. Every batch is checked before anything is
// computed. Waits for the device and reports the step, unless out is NULL.
QLORA_API qlora_result qlora_train_step(qlora_trainer* trainer, const qlora_batch* batches,
                                        int64_t count, qlora_train_info* out);
// Runs one step of each of `count` trainers of the same model, which train different adapters, over
// the same micro-batches: batch.adapters gives the adapter of every sequence. A trainer's step
// consists of the sequences of its adapter; one without sequences stays as it is. out is NULL or
// has room for `count` reports. See SEVERAL ADAPTERS in the manual for what the results depend on.
QLORA_API qlora_result qlora_train_step_each(qlora_trainer* const* trainers, int64_t count,
                                             const qlora_batch* batches, int64_t batch_count,
                                             qlora_train_info* out);
// The gradients of a step without its update: qlora_train_step is this call and then
// qlora_train_update. Does not wait for the device.
QLORA_API qlora_result qlora_train_gradients(qlora_trainer* trainer, const qlora_batch* batches,
                                             int64_t count);
// The same step in separate calls, for QLORA_METHOD_SFT. micro adds the gradients of one
// micro-batch; total_labels is the sum of qlora_batch_labels over the whole step, so that the step
// does not depend on how it is split. update clips the gradients, updates the adapters, zeroes the
// gradients and advances the schedule. Neither call waits for the device, except for a free staging
// buffer when the host is several calls ahead.
QLORA_API qlora_result qlora_train_micro(qlora_trainer* trainer, const qlora_batch* batch,
                                         double total_labels);
QLORA_API qlora_result qlora_train_update(qlora_trainer* trainer);
// The same step in slices, for programs that have a frame to draw: call begin, then slice until
// *done is true. The batches must stay valid until then. A slice runs pieces of the step, waits for
// them, and returns before the next piece would exceed the time; it runs at least one. Results are
// bitwise identical to those of qlora_train_step. Pieces are parts of about 0.1 ms of any loop on
// the CPU, on a thread of its own that waits between two slices; half a layer on a GPU, without
// graphs, or with several processes. On the CPU, what is computed between two slices of a step
// allocates working memory, once; see MEMORY. qlora_train_info.longest_piece tells how long pieces
// were. cancel discards a step that was begun with begin or micro; it does not wait for the device.
// If slices have begun to change parameters, cancel finishes the update instead, and so does what
// reads or saves parameters. After a call of a step has failed on the device, its gradients are
// incomplete: every call of the step is then refused until it is cancelled or a checkpoint is
// loaded.
QLORA_API qlora_result qlora_train_begin(qlora_trainer* trainer, const qlora_batch* batches,
                                         int64_t count);
QLORA_API qlora_result qlora_train_slice(qlora_trainer* trainer, double milliseconds, bool* done);
QLORA_API qlora_result qlora_train_cancel(qlora_trainer* trainer);

// Waits for the device and reports the last step.
QLORA_API qlora_result qlora_train_query(qlora_trainer* trainer, qlora_train_info* out);
// Reports the newest step that the device has finished, without waiting; out->pending is the number
// of later ones.
QLORA_API qlora_result qlora_train_poll(qlora_trainer* trainer, qlora_train_info* out);
// Copies the gradient of parameter number `index`, accumulated since the last update. Waits for the
// device.
QLORA_API qlora_result qlora_gradient_read(qlora_trainer* trainer, int64_t index, float* out);

// Saves the adapter, the optimizer state, the step number and `position` (data of the caller's
// choice, such as its place in the data) as dir/step-N, which PEFT can load, and then names it in
// dir/latest: a crash leaves either the old checkpoint or the new one. Removes the oldest
// checkpoints beyond keep_checkpoints. Call it between steps. Waits for the device and for the
// disk.
QLORA_API qlora_result qlora_checkpoint_save(qlora_trainer* trainer, const char* dir,
                                             const void* position, size_t position_bytes);
// Loads the newest complete checkpoint; fails with QLORA_ERR_FILE if there is none. position
// receives the saved data; on entry *position_bytes is the size of the buffer, on return that of
// the data (NULL = not needed). The following steps are bitwise identical to those of a run that
// never stopped. A checkpoint whose settings make that impossible (mode, base, dropout, on the GPU
// also tokens, another base model) is rejected with QLORA_ERR_STATE; other differences (learning
// rate, driver, CPU tier, on the GPU also max_length) are logged. The base is known by its
// contents, not by its path: a checkpoint records a hash of what the config computes and one of all
// tensors, by name, type, shape and bytes (of a tensor above 1 MiB, 64 blocks of 4 KiB, evenly
// spread, the first and the last included). Everything is checked before anything is changed.
// Waits for the device.
QLORA_API qlora_result qlora_checkpoint_load(qlora_trainer* trainer, const char* dir,
                                             void* position, size_t* position_bytes);
// *out = whether dir contains a checkpoint; an absent folder contains none.
QLORA_API qlora_result qlora_checkpoint_exists(qlora_ctx* ctx, const char* dir, bool* out);
