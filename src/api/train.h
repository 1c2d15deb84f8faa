// ---- training -----------------------------------------------------------------------------------
// Sequences one behind the other. Labels are those of the tokens themselves, as transformers has
// them: the loss of token i is that of predicting labels[i + 1], inside its sequence; -100 = not
// trained.
typedef struct qlora_batch {
    const int32_t* ids;
    const int32_t* labels;
    const float* weights;     // per label, as labels; NULL = 1
    const int32_t* lengths;   // tokens of each sequence
    const int32_t* sequences; // number of each sequence in the data (for dropout); NULL = 0, 1, ...
    int64_t count;            // of sequences
} qlora_batch;
// Sum of the weights of a batch's labels: what counts towards total_labels.
QLORA_API double qlora_batch_labels(const qlora_batch* batch);

QLORA_API qlora_result qlora_trainer_create(qlora_model* model, qlora_trainer** out);
QLORA_API qlora_result qlora_trainer_destroy(qlora_trainer* trainer);
// Adds one micro-batch's gradients; total_labels = sum of qlora_batch_labels over the whole step,
// so that any split gives the same step. Does not wait for the device.
QLORA_API qlora_result qlora_train_micro(qlora_trainer* trainer, const qlora_batch* batch,
                                         double total_labels);
// Clips, updates, zeroes the gradients, and advances the schedule. Does not wait either.
QLORA_API qlora_result qlora_train_update(qlora_trainer* trainer);

typedef struct qlora_train_info {
    int64_t step;       // updates asked for so far, skipped ones included
    int64_t skipped;    // left out because a gradient was not finite
    bool last_skipped;
    double loss;        // of the last step: mean over its labels
    double labels;      // their weight
    int64_t tokens;     // of the last step
    float grad_norm;    // before clipping
    double lr;          // used by the last step
    bool graphs;        // steps are replayed graphs
    int64_t waits;      // times the host waited for a free staging slot
} qlora_train_info;
// Waits for the last step: the only call of a step that does.
QLORA_API qlora_result qlora_train_info_read(qlora_trainer* trainer, qlora_train_info* out);
// Gradient of parameter index, as accumulated since the last update.
QLORA_API qlora_result qlora_train_gradient_read(qlora_trainer* trainer, int64_t index, float* out);

typedef struct qlora_eval_info {
    double loss;   // sum of weighted losses
    double labels; // sum of weights
    int64_t tokens;
} qlora_eval_info;
// Forward only, adapters as they are used. Waits.
QLORA_API qlora_result qlora_eval(qlora_trainer* trainer, const qlora_batch* batch,
                                  qlora_eval_info* out);
// Logits of every token, tokens * vocab floats. For tests and tools; waits.
QLORA_API qlora_result qlora_eval_logits(qlora_trainer* trainer, const qlora_batch* batch,
                                         float* out);

// Adapter, optimizer state, step, random state and what the caller wants back (a data position), as
// dir/step-N (PEFT loads that folder) with dir/latest naming it: a crash leaves the old checkpoint
// or the new one. Older ones beyond desc.keep_checkpoints are removed. Between updates only.
QLORA_API qlora_result qlora_checkpoint_save(qlora_trainer* trainer, const char* dir,
                                             const void* position, size_t position_bytes);
// The newest one that is whole. position gets what was saved; *position_bytes is its room, then its
// size (NULL: not wanted). Steps after it are bitwise those of a run that never stopped; a
// checkpoint whose settings forbid that (mode, base, dropout, on the GPU also tokens) is refused,
// other differences (learning rate, driver) are logged. QLORA_ERR_FILE when there is none.
QLORA_API qlora_result qlora_checkpoint_load(qlora_trainer* trainer, const char* dir,
                                             void* position, size_t* position_bytes);
QLORA_API qlora_result qlora_checkpoint_exists(qlora_ctx* ctx, const char* dir, bool* out);
