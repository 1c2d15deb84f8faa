#define QLORA__SLOTS 4

// A staging slot: the host's image of a batch block, and AdamW's numbers for an update behind it.
typedef struct qlora__slot {
    char* memory; // pinned on CUDA
    void* event;  // the copy out of it is done
    bool busy;
} qlora__slot;

// What the device says of a finished step.
typedef struct qlora__record {
    float totals[4];  // losses, their rounding rest, weights
    float results[2]; // norm, scale
    qlora_adamw_state adamw;
} qlora__record;

struct qlora_trainer {
    qlora_ctx* ctx;
    qlora_model* m;
    qlora__slot slots[QLORA__SLOTS];
    size_t slot_bytes;
    int next_slot;
    int64_t waits;
    qlora__record* record; // pinned on CUDA: where the last step's numbers arrive
    bool use_graphs;
    qlora_graph** graphs; // one for each number of head chunks
    int64_t graph_room;
    qlora_graph* update_graph;
    int64_t step;        // updates asked for
    int64_t tokens;      // of the step that is being accumulated
    int64_t last_tokens; // of the last one
    double last_lr;
    int64_t rows;   // of the micro-batch at hand
    int64_t chunks; // of the head
};

// ---- staging ------------------------------------------------------------------------------------

static void* qlora__pinned_alloc(qlora_ctx* ctx, size_t bytes) {
#ifndef QLORA_NO_CUDA
    if (!qlora__on_cpu(ctx)) {
        void* p = NULL;
        int code = ctx->gpu->cu.MemHostAlloc(&p, bytes, 0);
        return qlora__cu(ctx, code, "cuMemHostAlloc") == QLORA_OK ? p : NULL;
    }
#endif
    return qlora__alloc(ctx, bytes);
}

static void qlora__pinned_free(qlora_ctx* ctx, void* p, size_t bytes) {
#ifndef QLORA_NO_CUDA
    if (!qlora__on_cpu(ctx)) {
        if (p != NULL) {
            ctx->gpu->cu.MemFreeHost(p);
        }
        return;
    }
#endif
    qlora__free(ctx, p, bytes);
}

// The next slot that no copy reads from any more; waiting for one is counted.
static qlora_result qlora__slot_take(qlora_trainer* t, qlora__slot** out) {
    qlora__slot* slot = &t->slots[t->next_slot];
    t->next_slot = (t->next_slot + 1) % QLORA__SLOTS;
#ifndef QLORA_NO_CUDA
    if (slot->busy) {
        const qlora__cuda_table* cu = &t->ctx->gpu->cu;
        if (cu->EventQuery(slot->event) != 0) {
            t->waits++;
            QLORA__TRY(qlora__cu(t->ctx, cu->EventSynchronize(slot->event), "cuEventSynchronize"));
        }
    }
#endif
    slot->busy = false;
    *out = slot;
    return QLORA_OK;
}

static qlora_result qlora__slot_send(qlora_trainer* t, qlora__slot* slot, void* target,
                                     const void* source, size_t bytes) {
#ifndef QLORA_NO_CUDA
    qlora_ctx* ctx = t->ctx;
    if (!qlora__on_cpu(ctx)) {
        const qlora__cuda_table* cu = &ctx->gpu->cu;
        qlora__CUdeviceptr to = (qlora__CUdeviceptr)(uintptr_t)target;
        QLORA__TRY(qlora__cu(ctx, cu->MemcpyHtoDAsync(to, source, bytes, ctx->gpu->stream),
                             "cuMemcpyHtoDAsync"));
        QLORA__TRY(qlora__cu(ctx, cu->EventRecord(slot->event, ctx->gpu->stream), "cuEventRecord"));
        slot->busy = true;
        return QLORA_OK;
    }
#else
    (void)t;
    (void)slot;
#endif
    memcpy(target, source, bytes);
    return QLORA_OK;
}

// ---- batches ------------------------------------------------------------------------------------

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

static qlora_result qlora__batch_check(qlora_ctx* ctx, const qlora_model* m, const qlora_batch* b,
                                       int64_t* tokens) {
    const qlora_plan* plan = &m->plan;
    if (b == NULL || b->count < 0 || (b->count > 0 && (b->ids == NULL || b->lengths == NULL)) ||
        (b->count > 0 && b->labels == NULL)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "batch, its ids, labels or lengths are NULL");
    }
    if (b->count > plan->max_sequences) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%lld sequences, the plan has room for %lld",
                           (long long)b->count, (long long)plan->max_sequences);
    }
    int64_t sum = 0;
    for (int64_t s = 0; s < b->count; s++) {
        if (b->lengths[s] <= 0 || b->lengths[s] > plan->max_length) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "sequence %lld has %d tokens; 1 to %lld are possible (train desc, "
                               "max_length)",
                               (long long)s, (int)b->lengths[s], (long long)plan->max_length);
        }
        sum += b->lengths[s];
    }
    if (sum > plan->tokens) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%lld tokens, the plan has room for %lld",
                           (long long)sum, (long long)plan->tokens);
    }
    for (int64_t i = 0; i < sum; i++) {
        int32_t label = b->labels[i];
        if (b->ids[i] < 0 || b->ids[i] >= plan->config.vocab ||
            (label != -100 && (label < 0 || label >= plan->config.vocab))) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "token %lld has id %d and label %d; the vocabulary has %lld",
                               (long long)i, (int)b->ids[i], (int)label,
                               (long long)plan->config.vocab);
        }
        if (b->weights != NULL && (!qlora__finite(b->weights[i]) || b->weights[i] < 0.0f)) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "the weight of label %lld is %g",
                               (long long)i, (double)b->weights[i]);
        }
    }
    *tokens = sum;
    return QLORA_OK;
}

// Where a window of the batch block lies in a slot.
static int32_t* qlora__slot_ints(const qlora_model* m, char* memory, const qlora_tensor* window) {
    size_t offset = (size_t)((char*)window->data - (char*)m->batch.all.data);
    return (int32_t*)(void*)(memory + offset);
}

// Tokens, positions and sequence bounds; what the batch does not fill belongs to no sequence.
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

// Labelled rows one behind the other: token i is to predict label i + 1 of its sequence. Returns
// how many.
static int64_t qlora__slot_labels(const qlora_model* m, char* memory, const qlora_batch* b) {
    int32_t* rows = qlora__slot_ints(m, memory, &m->batch.rows);
    int32_t* labels = qlora__slot_ints(m, memory, &m->batch.labels);
    QLORA__REAL* weights = (QLORA__REAL*)(void*)qlora__slot_ints(m, memory, &m->batch.weights);
    int32_t* inverse = qlora__slot_ints(m, memory, &m->batch.inverse);
    int32_t none = (int32_t)m->batch.rows.cols; // the row of zeros
    for (int64_t i = 0; i < m->plan.tokens; i++) {
        inverse[i] = none;
    }
    int64_t count = 0;
    int64_t at = 0;
    for (int64_t s = 0; s < b->count; s++) {
        for (int64_t i = at; i + 1 < at + b->lengths[s]; i++) {
            if (b->labels[i + 1] != -100) {
                rows[count] = (int32_t)i;
                labels[count] = b->labels[i + 1];
                weights[count] = b->weights != NULL ? (QLORA__REAL)b->weights[i + 1] : 1;
                inverse[i] = (int32_t)count;
                count++;
            }
        }
        at += b->lengths[s];
    }
    for (int64_t i = count; i < none; i++) {
        rows[i] = 0;
        labels[i] = -100;
        weights[i] = 0;
    }
    return count;
}

// Checks a batch, writes it into a slot and sends it on its way.
static qlora_result qlora__batch_send(qlora_trainer* t, const qlora_batch* batch,
                                      double total_labels) {
    qlora_model* m = t->m;
    int64_t tokens = 0;
    QLORA__TRY(qlora__batch_check(t->ctx, m, batch, &tokens));
    qlora__slot* slot = NULL;
    QLORA__TRY(qlora__slot_take(t, &slot));
    qlora__slot_tokens(m, slot->memory, batch);
    int64_t labels = qlora__slot_labels(m, slot->memory, batch);
    QLORA__REAL* scale = (QLORA__REAL*)(void*)qlora__slot_ints(m, slot->memory, &m->batch.scale);
    *scale = (QLORA__REAL)(1.0 / total_labels);
    uint32_t* dropout = (uint32_t*)(void*)qlora__slot_ints(m, slot->memory, &m->batch.dropout);
    dropout[0] = (uint32_t)m->train.seed;
    dropout[1] = (uint32_t)(m->train.seed >> 32);
    dropout[2] = (uint32_t)t->step;
    dropout[3] = 0;
    t->chunks = qlora__ceil_div(labels, m->plan.head_chunk);
    // On the GPU a micro-batch always has the planned size, so that one graph serves any packing.
    t->rows = qlora__on_cpu(t->ctx) ? tokens : m->plan.tokens;
    t->tokens += tokens;
    return qlora__slot_send(t, slot, m->batch.all.data, slot->memory, m->batch.all.bytes);
}
