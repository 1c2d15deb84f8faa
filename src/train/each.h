// ---- a step of several adapters -----------------------------------------------------------------
//
// One pass over the base serves the sequences of all adapters; each trainer then has the gradients
// of its own, whose partial sums and update are those of a step of its own.

// What a step consists of, by adapter.
typedef struct qlora__each {
    qlora_ctx* ctx;
    qlora_model* m;
    qlora_trainer* owners[QLORA__MOST_ADAPTERS]; // NULL = none
    double labels[QLORA__MOST_ADAPTERS];
    int64_t tokens[QLORA__MOST_ADAPTERS];
} qlora__each;

// Counts a batch, or, with a step in progress, only its tokens.
static void qlora__each_count(const qlora_batch* b, int64_t tokens[QLORA__MOST_ADAPTERS],
                              double labels[QLORA__MOST_ADAPTERS], int32_t usual) {
    double own[QLORA__MOST_ADAPTERS];
    int64_t at = 0;
    memset(own, 0, sizeof own);
    for (int64_t s = 0; s < b->count; s++) {
        int32_t k = qlora__batch_adapter(b, s, usual);
        for (int64_t i = 1; i < b->lengths[s]; i++) {
            if (b->labels[at + i] != -100) {
                own[k] += b->weights != NULL ? (double)b->weights[at + i] : 1.0;
            }
        }
        at += b->lengths[s];
        tokens[k] += b->lengths[s];
    }
    for (int k = 0; k < QLORA__MOST_ADAPTERS; k++) { // batch by batch, as for one adapter
        labels[k] += own[k];
    }
}

static qlora_result qlora__each_trainers(qlora_ctx* ctx, qlora_trainer* const* trainers,
                                         int64_t count, qlora__each* each) {
    memset(each, 0, sizeof *each);
    each->ctx = ctx;
    each->m = trainers[0]->m;
    QLORA__TRY(qlora__need_whole(ctx, "count", count, 1, each->m->adapters));
    for (int64_t i = 0; i < count; i++) {
        qlora_trainer* t = trainers[i];
        if (t == NULL || t->m != each->m) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "trainers[%lld] %s", (long long)i,
                               t == NULL ? "is NULL" : "belongs to another model");
        }
        if (each->owners[t->desc.adapter] != NULL) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "trainers[%lld] is given twice",
                               (long long)i);
        }
        each->owners[t->desc.adapter] = t;
        QLORA__TRY(qlora__trainer_need(ctx, t));
        if (t->method->unit != QLORA__UNIT_ROW || t->world > 1) {
            return qlora__fail(
                ctx, QLORA_ERR_UNSUPPORTED, "trainers[%lld] %s; use qlora_train_step", (long long)i,
                t->world > 1 ? "trains together with other processes" : "trains with preferences");
        }
        // The pass of all adapters is one graph, or none.
        if (t->desc.eager != trainers[0]->desc.eager ||
            t->desc.require_graph != trainers[0]->desc.require_graph) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "trainers[%lld] has another desc.%s than trainers[0]", (long long)i,
                               t->desc.eager != trainers[0]->desc.eager ? "eager"
                                                                        : "require_graph");
        }
        if (t->tokens > 0) {
            return qlora__fail(ctx, QLORA_ERR_STATE,
                               "trainers[%lld] has a step in progress; finish it with "
                               "qlora_train_update or drop it with qlora_train_cancel",
                               (long long)i);
        }
    }
    return QLORA_OK;
}

// Checks every batch before anything is computed.
static qlora_result qlora__each_batches(qlora__each* each, int64_t trainers, int32_t usual,
                                        const qlora_batch* batches, int64_t count) {
    qlora_ctx* ctx = each->ctx;
    if (batches == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "batches is NULL");
    }
    QLORA__TRY(qlora__need_whole(ctx, "batch_count", count, 1, INT64_MAX));
    for (int64_t i = 0; i < count; i++) {
        const qlora_batch* b = &batches[i];
        int64_t tokens = 0;
        QLORA__TRY(qlora__batch_check(ctx, each->m, b, &tokens));
        if (b->adapters == NULL && trainers > 1) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "batches[%lld].adapters is NULL",
                               (long long)i);
        }
        for (int64_t s = 0; s < b->count; s++) {
            int32_t k = qlora__batch_adapter(b, s, usual);
            if (each->owners[k] == NULL) {
                return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                                   "sequence %lld of batch %lld has adapter %d, which none of the "
                                   "trainers trains",
                                   (long long)s, (long long)i, (int)k);
            }
        }
        qlora__each_count(b, each->tokens, each->labels, usual);
    }
    int64_t all = 0;
    for (int k = 0; k < QLORA__MOST_ADAPTERS; k++) {
        if (each->tokens[k] > 0) {
            QLORA__TRY(qlora__labels_check(ctx, each->labels[k]));
        }
        all += each->tokens[k];
    }
    return all > 0 ? QLORA_OK
                   : qlora__fail(ctx, QLORA_ERR_ARGUMENT, "the batches have no sequences");
}

// Queues a micro-batch: its gradients become a leaf of each adapter that has sequences in it.
static qlora_result qlora__each_queue(const qlora__each* each, qlora_trainer* lead,
                                      const qlora_batch* batch) {
    int64_t tokens[QLORA__MOST_ADAPTERS];
    double labels[QLORA__MOST_ADAPTERS];
    memset(tokens, 0, sizeof tokens);
    memset(labels, 0, sizeof labels);
    qlora__each_count(batch, tokens, labels, lead->desc.adapter);
    for (int k = 0; k < QLORA__MOST_ADAPTERS; k++) {
        if (tokens[k] > 0) {
            qlora__adapter_focus(each->m, k);
            QLORA__TRY(qlora__leaf_begin(each->owners[k]));
            each->owners[k]->tokens += tokens[k];
        }
    }
    qlora__adapter_focus(each->m, lead->desc.adapter);
    qlora__micro_desc desc = {1.0, 0, 0, NULL, lead->desc.adapter, each->labels, 0.0};
    QLORA__TRY(qlora__batch_send(each->ctx, each->m, batch, &desc, &lead->micro));
    return qlora__micro_send_off(lead);
}

static qlora_result qlora__each_step(qlora__each* each, qlora_trainer* lead,
                                     const qlora_batch* batches, int64_t count) {
    for (int k = 0; k < QLORA__MOST_ADAPTERS; k++) {
        if (each->tokens[k] > 0) {
            each->owners[k]->failed = true;
        }
    }
    for (int64_t i = 0; i < count; i++) {
        QLORA__TRY(qlora__each_queue(each, lead, &batches[i]));
    }
    for (int k = 0; k < QLORA__MOST_ADAPTERS; k++) {
        if (each->tokens[k] > 0) {
            qlora__adapter_focus(each->m, k);
            QLORA__TRY(qlora__update_send(each->owners[k], true));
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__train_step_each(qlora_ctx* ctx, qlora_trainer* const* trainers,
                                           int64_t count, const qlora_batch* batches,
                                           int64_t batch_count, qlora_train_info* out) {
    qlora__each each;
    qlora_trainer* lead = trainers[0];
    QLORA__TRY(qlora__each_trainers(ctx, trainers, count, &each));
    if (!qlora__has_several(lead->m)) { // dropout and noise follow from its seed and step
        return qlora__train_step(lead, batches, batch_count, out);
    }
    QLORA__TRY(qlora__each_batches(&each, count, lead->desc.adapter, batches, batch_count));
    QLORA__TRY(qlora__each_step(&each, lead, batches, batch_count));
    for (int64_t i = 0; i < count && out != NULL; i++) {
        qlora__adapter_focus(each.m, trainers[i]->desc.adapter);
        QLORA__TRY(qlora__train_query(trainers[i], &out[i]));
    }
    return QLORA_OK;
}

qlora_result qlora_train_step_each(qlora_trainer* const* trainers, int64_t count,
                                   const qlora_batch* batches, int64_t batch_count,
                                   qlora_train_info* out) {
    const qlora_trainer* lead = trainers != NULL && count > 0 ? trainers[0] : NULL;
    QLORA__TRY(qlora__trainer_enter(lead, "qlora_train_step_each"));
    return qlora__trainer_leave(
        lead, qlora__train_step_each(lead->ctx, trainers, count, batches, batch_count, out));
}
