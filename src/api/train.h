// ---- training -----------------------------------------------------------------------------------
typedef struct qlora_trainer qlora_trainer;

typedef enum qlora_schedule {
    QLORA_SCHEDULE_COSINE = 0, // to zero at total_steps
    QLORA_SCHEDULE_LINEAR = 1, // to zero at total_steps
    QLORA_SCHEDULE_CONSTANT = 2
} qlora_schedule;

typedef struct qlora_train_desc {
    uint32_t reserved_must_be_zero0;
    double lr;                // peak learning rate; 0 = 2e-4, negative = 0
    double beta1;             // 0 = 0.9
    double beta2;             // 0 = 0.999
    double eps;               // 0 = 1e-8
    double weight_decay;      // 0 = none
    double max_norm;          // gradient norm to clip to; 0 = 1, negative = no clipping
    qlora_schedule schedule;  // 0 = cosine
    int64_t warmup_steps;     // linear from 0
    int64_t total_steps;      // 0 = the learning rate stays at lr after the warm-up
    uint64_t seed;            // for dropout
    bool eager;               // no CUDA graphs
    bool require_graph;       // a failed capture is an error instead of a fallback
    int32_t keep_checkpoints; // number that qlora_checkpoint_save keeps; 0 = 2, at most 64
    uint32_t reserved_must_be_zero1;
} qlora_train_desc;

// A model has at most one trainer at a time. desc NULL = the defaults. The optimizer starts from
// zero; the adapters stay as they are.
QLORA_API qlora_result qlora_trainer_create(qlora_model* model, const qlora_train_desc* desc,
                                            qlora_trainer** out);
QLORA_API qlora_result qlora_trainer_destroy(qlora_trainer* trainer);
// Changes the optimizer settings, the clip limit, the schedule or keep_checkpoints between two
// steps. Fields that cannot change (seed, eager, require_graph) must be as before.
QLORA_API qlora_result qlora_train_set(qlora_trainer* trainer, const qlora_train_desc* desc);

typedef struct qlora_train_info {
    int64_t step;    // number of this step: updates so far, including skipped ones
    int64_t pending; // later steps that the device has not finished (qlora_train_poll)
    int64_t skipped; // updates skipped so far because a gradient was not finite
    bool last_skipped;
    double loss;     // mean over the labels of the step
    double labels;   // their total weight
    int64_t tokens;  // in the step
    float grad_norm; // before clipping
    double lr;       // learning rate of the step
    bool graphs;     // steps are replayed graphs
    int64_t waits;   // times the host has waited for a free staging slot
} qlora_train_info;

// One optimizer step over micro-batches. out NULL = does not wait for the device; otherwise waits
// and reports the step. Every batch is checked before anything is computed.
QLORA_API qlora_result qlora_train_step(qlora_trainer* trainer, const qlora_batch* batches,
                                        int64_t count, qlora_train_info* out);
// The same step by halves. micro adds the gradients of one micro-batch; total_labels is the sum of
// qlora_batch_labels over the whole step, so that any split gives the same step. update clips,
// updates the adapters, zeroes the gradients and advances the schedule. Neither waits.
QLORA_API qlora_result qlora_train_micro(qlora_trainer* trainer, const qlora_batch* batch,
                                         double total_labels);
QLORA_API qlora_result qlora_train_update(qlora_trainer* trainer);
// The same step in slices, for programs that have a frame to draw: begin, then slice until *done.
// The batches must stay valid until then. A slice runs pieces of the step (half a layer each, no
// graphs), waits for them, and returns before the next piece would exceed the time; it runs at
// least one. Results are bitwise those of qlora_train_step. cancel drops a step that was begun.
QLORA_API qlora_result qlora_train_begin(qlora_trainer* trainer, const qlora_batch* batches,
                                         int64_t count);
QLORA_API qlora_result qlora_train_slice(qlora_trainer* trainer, double milliseconds, bool* done);
QLORA_API qlora_result qlora_train_cancel(qlora_trainer* trainer);

// Waits for the last step and reports it.
QLORA_API qlora_result qlora_train_query(qlora_trainer* trainer, qlora_train_info* out);
// Never waits: reports the newest step that the device has finished; out->pending counts the later
// ones.
QLORA_API qlora_result qlora_train_poll(qlora_trainer* trainer, qlora_train_info* out);
// The gradient of parameter index as accumulated since the last update. Waits.
QLORA_API qlora_result qlora_gradient_read(qlora_trainer* trainer, int64_t index, float* out);

// Saves adapter, optimizer state, step, random state and position (whatever the caller needs back,
// such as its place in the data) as dir/step-N, which PEFT can load, with dir/latest naming it: a
// crash leaves the old checkpoint or the new one. Older ones beyond keep_checkpoints are removed.
// Call it between steps.
QLORA_API qlora_result qlora_checkpoint_save(qlora_trainer* trainer, const char* dir,
                                             const void* position, size_t position_bytes);
// Loads the newest complete checkpoint. position receives what was saved; *position_bytes is its
// capacity, then its size (NULL: not wanted). The following steps are bitwise those of a run that
// never stopped. A checkpoint whose settings make that impossible (mode, base, dropout, on the GPU
// also tokens) is refused; other differences (learning rate, driver) are logged. Returns
// QLORA_ERR_FILE when there is none.
QLORA_API qlora_result qlora_checkpoint_load(qlora_trainer* trainer, const char* dir,
                                             void* position, size_t* position_bytes);
QLORA_API qlora_result qlora_checkpoint_exists(qlora_ctx* ctx, const char* dir, bool* out);
