// ---- the trainer --------------------------------------------------------------------------------

// More than the host can be ahead of the device, since every update also takes a slot of the ring.
#define QLORA__RECORDS 8

// The results of a step, copied from the device; pinned memory on CUDA.
typedef struct qlora__record {
    float totals[4];                           // losses, their rounding error, weights, of routers
    float loads[QLORA__LOADS];                 // of experts
    float results[2 * (QLORA_MAX_LAYERS + 1)]; // norm and scale of each group of the clip
    double preference[QLORA__PREFERENCE_SUMS];
    qlora_adamw_state adamw;
    int32_t flag; // an id, a position or a label was out of range
} qlora__record;

// The facts about the same step that the host knows.
typedef struct qlora__report {
    void* event; // recorded after the copies into the record
    int64_t step;
    int64_t tokens;
    double lr;
    int64_t sent;         // bytes sent to other processes
    double longest;       // piece, in milliseconds
    double exchange_ms;   // measured by the host; negative: by the device, between these events
    void* exchange_events[2];
    bool exchange_graph;
    double total;         // units of the step, 0 if they are rows
    double chosen_labels; // labels of the chosen texts
    double sft_alpha;
} qlora__report;

// What a step consists of, counted over all its batches.
typedef struct qlora__step_counts {
    double labels;        // sum of the weights
    double units;         // pairs, or sequences other than the mismatched ones; 0 for rows
    double mismatched;    // sequences
    double chosen_labels; // of the chosen texts of pairs
} qlora__step_counts;

enum {
    QLORA__PIECE_BEGIN,
    QLORA__PIECE_FORWARD_ATTENTION,
    QLORA__PIECE_FORWARD_MLP,
    QLORA__PIECE_HEAD,
    QLORA__PIECE_LOGPS, // the log-probabilities of the base, or the kl of a step
    QLORA__PIECE_TURN,
    QLORA__PIECE_BACKWARD_MLP,
    QLORA__PIECE_BACKWARD_ATTENTION,
    QLORA__PIECE_UPDATE,
    QLORA__PIECE_KINDS
};

#define QLORA__TIMES 3

// A step that is run in slices.
typedef struct qlora__sliced {
    bool begun;
    const qlora_batch* batches;
    int64_t count;
    int64_t at;             // current batch
    int64_t piece;          // next piece of that batch
    qlora__errand* errand;  // that runs the pieces on the CPU, until the step is done
    double longest;         // milliseconds of a piece of this step
    // Milliseconds of the last pieces of each kind, and how many there have been
    double times[QLORA__PIECE_KINDS][QLORA__TIMES];
    int64_t timed[QLORA__PIECE_KINDS];
} qlora__sliced;

// The exchange of a step with so many leaves, as a graph. The first such step has none: it
// allocates the memory, and NCCL connects.
typedef struct qlora__swap {
    int64_t leaves;
    int64_t sent;
    qlora_graph* graph;
} qlora__swap;

#define QLORA__SWAPS 4

// Micro-batches with and without the pass of the base, of trained and of mismatched sequences.
#define QLORA__MICRO_KINDS 4

struct qlora_trainer {
    qlora_ctx* ctx;
    qlora_model* m;
    qlora_train_desc desc; // defaults resolved
    const struct qlora__method* method; // the row of desc.method
    qlora__ring ring; // for the settings of AdamW; that of the model if it has one adapter
    qlora__record* records;
    qlora__report reports[QLORA__RECORDS];
    bool use_graphs;
    qlora_graph** graphs; // of micro-batches: qlora__micro_graph
    int64_t chunk_room;   // of one kind and size
    int64_t graph_room;
    qlora_graph* update_graph;
    int64_t step;              // number of updates queued so far
    int64_t tokens;            // of the step that is being accumulated
    bool failed;               // a call failed in the middle of the step
    qlora__micro micro;        // current
    qlora__step_counts counts; // of the step that is being accumulated
    qlora__sliced sliced;
    qlora__tree tree;                        // partial sums of the step so far
    int64_t leaf;                            // number of the next micro-batch with gradients
    int64_t leaves;                          // of the whole step, of all processes
    qlora__node share;                       // those of this process
    qlora_comm comm;                         // a copy of desc.comm
    bool spoilt;                             // by an update after an exchange that failed
    int32_t world;                           // number of processes, at least 1
    qlora__buffer* received;                 // for slices of other processes
    int64_t sent;                            // bytes sent to them for the last step
    bool swap_graphs;                        // all processes exchange by graphs
    qlora__swap swaps[QLORA__SWAPS];         // the same in all processes, but for the graphs
    int64_t swap_count;                      // made so far; the oldest are replaced
    qlora__buffer* more[QLORA__TREE_LEVELS]; // entries of the stack that the plan does not have
};

static qlora_ctx* qlora__trainer_ctx(const qlora_trainer* t) {
    return t != NULL ? t->ctx : NULL;
}

// Enters a call of a trainer, whose adapter becomes the current one until the call is left.
static qlora_result qlora__trainer_enter(const qlora_trainer* t, const char* name) {
    QLORA__ENTER(qlora__trainer_ctx(t), name);
    qlora__adapter_focus(t->m, t->desc.adapter);
    return QLORA_OK;
}

static qlora_result qlora__trainer_leave(const qlora_trainer* t, qlora_result r) {
    return qlora__leave(t->ctx, qlora__adapter_leave(t->m, r));
}

// The index of the record of a step.
static int qlora__record_of(int64_t step) {
    return (int)(step % QLORA__RECORDS);
}
