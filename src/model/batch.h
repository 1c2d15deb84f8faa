// ---- batches ------------------------------------------------------------------------------------

// What a step adds to the caller's tokens.
typedef struct qlora__micro_desc {
    double total_labels;
    uint64_t seed; // for dropout
    int64_t step;
    const qlora__preference_numbers* preference; // NULL = none
    int32_t adapter;                             // of batches that do not name one
    const double* totals; // labels of each adapter; NULL = total_labels for all of them
    double share;         // of the step, in its load-balancing loss; 0 without gradients
} qlora__micro_desc;

double qlora_batch_labels(const qlora_batch* batch) {
    double sum = 0.0;
    int64_t at = 0;
    if (batch == NULL || batch->lengths == NULL || batch->labels == NULL) {
        return 0.0;
    }
    for (int64_t s = 0; s < batch->count; s++) {
        for (int64_t i = 1; i < batch->lengths[s]; i++) {
            if (batch->labels[at + i] != -100) {
                sum += batch->weights != NULL ? (double)batch->weights[at + i] : 1.0;
            }
        }
        at += batch->lengths[s];
    }
    return sum;
}

static qlora_result qlora__batch_token_check(qlora_ctx* ctx, const qlora_plan* plan,
                                             const qlora_batch* b, int64_t i) {
    int64_t vocab = plan->config.vocab;
    int32_t id = b->ids[i];
    int32_t label = b->labels[i];
    if (id < 0 || id >= vocab) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "token %lld has id %d; it must be 0 to %lld",
                           (long long)i, (int)id, (long long)vocab - 1);
    }
    if (label != -100 && (label < 0 || label >= vocab)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "token %lld has label %d; it must be -100 or 0 to %lld", (long long)i,
                           (int)label, (long long)vocab - 1);
    }
    if (b->weights != NULL && (!qlora__finite(b->weights[i]) || b->weights[i] < 0.0f)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "the weight of label %lld is %g; it must be finite and not negative",
                           (long long)i, (double)b->weights[i]);
    }
    return QLORA_OK;
}

static qlora_result qlora__batch_check(qlora_ctx* ctx, const qlora_model* m, const qlora_batch* b,
                                       int64_t* tokens) {
    const qlora_plan* plan = &m->plan;
    if (b == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "the batch is NULL");
    }
    const char* missing = b->count <= 0        ? NULL
                          : b->ids == NULL     ? "ids"
                          : b->labels == NULL  ? "labels"
                          : b->lengths == NULL ? "lengths"
                                               : NULL;
    if (missing != NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "batch->%s is NULL", missing);
    }
    if (b->count < 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "batch->count is %lld; it must not be negative",
                           (long long)b->count);
    }
    if (b->count > plan->max_sequences) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "the batch has %lld sequences; the model was opened with "
                           "max_sequences = %lld",
                           (long long)b->count, (long long)plan->max_sequences);
    }
    int64_t sum = 0;
    for (int64_t s = 0; s < b->count; s++) {
        if (b->lengths[s] <= 0 || b->lengths[s] > plan->max_length) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "sequence %lld has %d tokens; it must have 1 to %lld "
                               "(max_length of the model)",
                               (long long)s, (int)b->lengths[s], (long long)plan->max_length);
        }
        if (b->adapters != NULL && (b->adapters[s] < 0 || b->adapters[s] >= m->adapters)) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "sequence %lld has adapter %d; it must be 0 to %d", (long long)s,
                               (int)b->adapters[s], (int)m->adapters - 1);
        }
        sum += b->lengths[s];
    }
    if (sum > plan->tokens) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "the batch has %lld tokens; the model was opened with tokens = %lld",
                           (long long)sum, (long long)plan->tokens);
    }
    for (int64_t i = 0; i < sum; i++) {
        QLORA__TRY(qlora__batch_token_check(ctx, plan, b, i));
    }
    *tokens = sum;
    return QLORA_OK;
}

// Attention starts blocks for every sequence that a pass has memory for, by default for sequences
// of 8 tokens. So passes have several size classes, each of half as many sequences as the one
// before, unless there are few: a micro-batch takes the smallest that it fits in.
#define QLORA__SIZE_CLASSES 4
#define QLORA__SIZE_CLASS_SMALL 7

static int64_t qlora__size_class_sequences(const qlora_model* m, int64_t size) {
    return qlora__ceil_div(m->plan.max_sequences, (int64_t)1 << size);
}

static int64_t qlora__size_class_of(const qlora_model* m, int64_t count) {
    int64_t size = m->plan.max_sequences <= QLORA__SIZE_CLASS_SMALL ? 0 : QLORA__SIZE_CLASSES - 1;
    while (size > 0 && count > qlora__size_class_sequences(m, size)) {
        size--;
    }
    return size;
}

// The place of a view of the batch block in a slot.
static int32_t* qlora__slot_ints(const qlora_model* m, char* memory, const qlora_tensor* window) {
    size_t offset = (size_t)((char*)window->data - (char*)m->batch.all.data);
    return (int32_t*)(void*)(memory + offset);
}

// Writes tokens, positions and sequence bounds. Rows after the batch belong to no sequence.
static void qlora__slot_tokens(const qlora_model* m, char* memory, const qlora_batch* b) {
    int32_t* ids = qlora__slot_ints(m, memory, &m->batch.ids);
    int32_t* positions = qlora__slot_ints(m, memory, &m->batch.positions);
    int32_t* sequences = qlora__slot_ints(m, memory, &m->batch.sequences);
    int32_t* seqs = qlora__slot_ints(m, memory, &m->batch.seqs);
    int32_t at = 0;
    seqs[0] = 0;
    for (int64_t s = 0; s < m->plan.max_sequences; s++) {
        int32_t length = s < b->count ? b->lengths[s] : 0;
        for (int32_t i = 0; i < length; i++) {
            ids[at + i] = b->ids[at + i];
            positions[at + i] = i;
            sequences[at + i] = b->sequences != NULL ? b->sequences[s] : (int32_t)s;
        }
        at += length;
        seqs[s + 1] = at;
    }
    for (int64_t i = at; i < m->plan.tokens; i++) {
        ids[i] = 0;
        positions[i] = 0;
        sequences[i] = 0;
    }
}

// Writes how the tokens are rotated, if the length of a sequence decides. Rows after the batch have
// any row of the tables.
static void qlora__slot_angles(const qlora_model* m, char* memory, const qlora_batch* b) {
    int32_t* angles = qlora__slot_ints(m, memory, &m->batch.angles);
    int64_t at = 0;
    for (int64_t s = 0; s < b->count; s++) {
        bool is_long = qlora__is_long(m, b->lengths[s]);
        for (int64_t i = 0; i < b->lengths[s]; i++) {
            angles[at++] = (int32_t)qlora__angle_row(m, i, is_long);
        }
    }
    for (; at < m->plan.tokens; at++) {
        angles[at] = 0;
    }
}

// Writes where the labelled rows are among the tokens, and, for dropout, the other way round.
static void qlora__slot_places(const qlora_model* m, char* memory, int64_t count,
                               const qlora__micro* micro) {
    const int32_t* rows = qlora__slot_ints(m, memory, &m->batch.rows);
    int32_t* inverse = qlora__slot_ints(m, memory, &m->batch.inverse);
    const struct {
        const qlora_tensor* of_rows;
        const qlora_tensor* of_tokens;
    } copies[] = {{&m->batch.row_positions, &m->batch.positions},
                  {&m->batch.row_sequences, &m->batch.sequences}};
    // The zero row, which follows those that the last layer has.
    int32_t none = (int32_t)(micro->labelled > 0 ? micro->labelled : m->batch.rows.cols);
    for (int64_t i = 0; i < m->plan.tokens; i++) {
        inverse[i] = none;
    }
    for (int64_t i = 0; i < count; i++) {
        inverse[rows[i]] = (int32_t)i;
    }
    for (size_t k = 0; k < sizeof copies / sizeof copies[0]; k++) {
        if (copies[k].of_rows->data != NULL) {
            int32_t* to = qlora__slot_ints(m, memory, copies[k].of_rows);
            const int32_t* from = qlora__slot_ints(m, memory, copies[k].of_tokens);
            for (int64_t i = 0; i < m->batch.rows.cols; i++) {
                to[i] = from[rows[i]];
            }
        }
    }
}

// Writes the labelled rows without gaps: token i must predict label i + 1 of its sequence. Sets
// what the micro-batch has of them; its rows are set.
static void qlora__slot_labels(const qlora_model* m, char* memory, const qlora_batch* b,
                               qlora__micro* micro) {
    int32_t* rows = qlora__slot_ints(m, memory, &m->batch.rows);
    int32_t* labels = qlora__slot_ints(m, memory, &m->batch.labels);
    QLORA__REAL* weights = (QLORA__REAL*)(void*)qlora__slot_ints(m, memory, &m->batch.weights);
    int32_t* starts = qlora__slot_ints(m, memory, &m->batch.starts);
    int64_t count = 0;
    int64_t at = 0;
    starts[0] = 0;
    for (int64_t s = 0; s < b->count; s++) {
        for (int64_t i = at; i + 1 < at + b->lengths[s]; i++) {
            if (b->labels[i + 1] != -100) {
                rows[count] = (int32_t)i;
                labels[count] = b->labels[i + 1];
                weights[count] = b->weights != NULL ? (QLORA__REAL)b->weights[i + 1] : 1;
                count++;
            }
        }
        at += b->lengths[s];
        starts[s + 1] = (int32_t)count;
    }
    for (int64_t s = b->count; s < m->plan.max_sequences; s++) {
        starts[s + 1] = (int32_t)count;
    }
    for (int64_t i = count; i < m->batch.rows.cols; i++) {
        rows[i] = 0;
        labels[i] = -100;
        weights[i] = 0;
    }
    micro->chunks = qlora__ceil_div(count, m->plan.head_chunk);
    micro->labelled = micro->balanced ? 0 : qlora__labelled_rows(m, count, micro->rows);
    qlora__slot_places(m, memory, count, micro);
}

// Writes what the loss of whole sequences needs: without roles, the sequences are pairs.
static void qlora__slot_preference(const qlora_model* m, char* memory, const qlora_batch* b,
                                   const qlora__preference_numbers* numbers) {
    int32_t* roles = qlora__slot_ints(m, memory, &m->batch.roles);
    char* references = (char*)qlora__slot_ints(m, memory, &m->batch.references);
    for (int64_t s = 0; s < m->plan.max_sequences; s++) {
        bool used = numbers != NULL && s < b->count;
        double reference = used && b->references != NULL ? b->references[s] : 0.0;
        roles[s] = !used              ? QLORA__ROLE_NONE
                   : b->roles != NULL ? b->roles[s]
                   : s % 2 == 0       ? QLORA__ROLE_CHOSEN
                                      : QLORA__ROLE_REJECTED;
        memcpy(references + (size_t)s * sizeof reference, &reference, sizeof reference);
    }
    if (numbers != NULL) {
        memcpy(qlora__slot_ints(m, memory, &m->batch.numbers), numbers, sizeof *numbers);
    }
}

static int32_t qlora__batch_adapter(const qlora_batch* b, int64_t sequence, int32_t usual) {
    return b->adapters != NULL ? b->adapters[sequence] : usual;
}

// Writes which rows belong to which of several adapters that stand side by side.
static void qlora__slot_owners(const qlora_model* m, char* memory, const qlora_batch* b,
                               int32_t usual) {
    int32_t* owners = qlora__slot_ints(m, memory, &m->batch.owners);
    int32_t* claims = qlora__slot_ints(m, memory, &m->batch.claims);
    int32_t* states = qlora__slot_ints(m, memory, &m->batch.states);
    const int32_t* starts = qlora__slot_ints(m, memory, &m->batch.starts);
    int64_t row = 0;
    int64_t label = 0;
    memset(states, 0, (size_t)m->adapters * sizeof *states);
    for (int64_t s = 0; s < b->count; s++) {
        int32_t adapter = qlora__batch_adapter(b, s, usual);
        states[adapter] = 1;
        for (int64_t end = row + b->lengths[s]; row < end; row++) {
            owners[row] = adapter;
        }
        for (; label < starts[s + 1]; label++) {
            claims[label] = adapter;
        }
    }
    for (; row < m->plan.tokens; row++) { // the rows that fill the micro-batch up
        owners[row] = -1;
    }
    for (; label < m->batch.claims.cols; label++) {
        claims[label] = 0; // it has no label
    }
}

// Notes which rows belong to which adapter, and writes the scale of each.
static void qlora__slot_adapters(qlora_model* m, char* memory, const qlora_batch* b,
                                 const qlora__micro_desc* desc) {
    QLORA__REAL* scale = (QLORA__REAL*)(void*)qlora__slot_ints(m, memory, &m->batch.scale);
    const int32_t* starts = qlora__slot_ints(m, memory, &m->batch.starts);
    for (int32_t k = 0; k < m->adapters; k++) {
        double total = desc->totals != NULL ? desc->totals[k] : desc->total_labels;
        scale[k] = total > 0.0 ? (QLORA__REAL)(1.0 / total) : 0;
    }
    m->work.run_count = 0;
    if (m->wide != NULL) {
        qlora__slot_owners(m, memory, b, desc->adapter);
        return;
    }
    int64_t row = 0;
    for (int64_t s = 0; s < b->count && qlora__has_several(m); s++) {
        int32_t adapter = qlora__batch_adapter(b, s, desc->adapter);
        qlora__owned_rows* run = &m->work.runs[m->work.run_count > 0 ? m->work.run_count - 1 : 0];
        if (m->work.run_count == 0 || run->adapter != adapter) {
            run = &m->work.runs[m->work.run_count++];
            run->adapter = adapter;
            run->row = row;
            run->label = starts[s];
        }
        row += b->lengths[s];
        run->end = row;
        run->label_end = starts[s + 1];
    }
    // On the GPU, the rows that fill the micro-batch up have no gradients, but finite values.
    if (m->work.run_count > 0 && !qlora__on_cpu(m->ctx)) {
        m->work.runs[m->work.run_count - 1].end = m->plan.tokens;
    }
}

// Writes what a micro-batch is of the load-balancing loss of its step.
static void qlora__slot_balance(const qlora_model* m, char* memory, double share) {
    QLORA__REAL* to = (QLORA__REAL*)(void*)qlora__slot_ints(m, memory, &m->batch.balance);
    to[0] = (QLORA__REAL)share;
    to[1] = (QLORA__REAL)(share * m->work.experts.balance.coefficient);
}

// Writes a batch that has been checked into a slot and sends it to the device.
static qlora_result qlora__batch_send(qlora_ctx* ctx, qlora_model* m, const qlora_batch* batch,
                                      const qlora__micro_desc* desc, qlora__micro* out) {
    qlora__slot* slot = NULL;
    QLORA__TRY(qlora__ring_take(ctx, &m->ring, &slot));
    out->tokens = 0;
    for (int64_t i = 0; i < batch->count; i++) {
        out->tokens += batch->lengths[i];
    }
    // On the GPU, every micro-batch has the planned size, so that few graphs fit any packing.
    out->rows = qlora__on_cpu(ctx) ? out->tokens : m->plan.tokens;
    out->size_class = qlora__size_class_of(m, batch->count);
    qlora__slot_tokens(m, slot->memory, batch);
    if (qlora__has_two_rotations(m)) {
        qlora__slot_angles(m, slot->memory, batch);
    }
    out->balanced = desc->share > 0.0 && m->work.experts.balance.coefficient > 0.0;
    if (m->batch.balance.data != NULL) {
        qlora__slot_balance(m, slot->memory, desc->share);
    }
    qlora__slot_labels(m, slot->memory, batch, out);
    qlora__slot_adapters(m, slot->memory, batch, desc);
    qlora__slot_preference(m, slot->memory, batch, desc->preference);
    out->preference = desc->preference != NULL;
    out->reference = out->preference && batch->references == NULL;
    out->mismatched = out->preference && batch->count > 0 && batch->roles != NULL &&
                      batch->roles[0] == QLORA__ROLE_MISMATCHED;
    uint32_t* dropout = (uint32_t*)(void*)qlora__slot_ints(m, slot->memory, &m->batch.dropout);
    dropout[0] = (uint32_t)desc->seed;
    dropout[1] = (uint32_t)(desc->seed >> 32);
    dropout[2] = (uint32_t)desc->step;
    dropout[3] = 0;
    return qlora__slot_send(ctx, slot, m->batch.all.data, slot->memory, m->batch.all.bytes);
}

// Fails while the activations of the model are in use by something that runs in slices.
static qlora_result qlora__model_idle(qlora_ctx* ctx, const qlora_model* m, const char* what) {
    if (m->stepping != NULL) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "a training step is in the middle of %s; finish it with "
                           "qlora_train_slice or drop it with qlora_train_cancel before %s",
                           m->updating != NULL ? "its update" : "a micro-batch", what);
    }
    if (m->speaking != NULL) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "a text of the model is in the middle of a pass; finish it with "
                           "qlora_generate_slice or end it with qlora_generate_end before %s",
                           what);
    }
    if (m->evaluation.begun) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "an evaluation of the model is in the middle of a micro-batch; finish "
                           "it with qlora_eval_slice or drop it with qlora_eval_cancel before %s",
                           what);
    }
    return qlora__not_in_capture(ctx, what);
}

static qlora_result qlora__model_has_weights(qlora_ctx* ctx, const qlora_model* m,
                                             const char* what) {
    return qlora__computes(m) ? QLORA_OK
                              : qlora__fail(ctx, QLORA_ERR_STATE,
                                            "%s needs weights, but the model was opened with "
                                            "QLORA_PURPOSE_ADAPTER",
                                            what);
}

// Kernels cannot return an error: they set a flag, which is read when the host waits anyway.
// Batches are also checked on the host, so this is not expected to happen.
static qlora_result qlora__flag_check(qlora_ctx* ctx, int32_t flag) {
    if (flag != 0) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "a kernel found a token id, position or label out of range");
    }
    return QLORA_OK;
}
