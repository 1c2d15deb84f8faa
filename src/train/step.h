// ---- steps --------------------------------------------------------------------------------------

// A piece of a micro-batch: its kind, the number of its layer or chunk, and whether it belongs to
// the pass of the base, which comes first if a micro-batch has one.
typedef struct qlora__piece_of {
    int kind;
    int64_t index;
    bool reference;
} qlora__piece_of;

// Piece number n of a forward pass; the one after the last is of the given kind.
static void qlora__piece_forward(const qlora_trainer* t, int64_t n, int last,
                                 qlora__piece_of* out) {
    int64_t layers = t->m->plan.config.layers;
    if (n == 0) {
        out->kind = QLORA__PIECE_BEGIN;
    } else if (n <= 2 * layers) {
        out->kind = n % 2 == 1 ? QLORA__PIECE_FORWARD_ATTENTION : QLORA__PIECE_FORWARD_MLP;
        out->index = (n - 1) / 2;
    } else if (n <= 2 * layers + t->micro.chunks) {
        out->kind = QLORA__PIECE_HEAD;
        out->index = n - 1 - 2 * layers;
    } else {
        out->kind = last;
    }
}

// A micro-batch is computed in pieces. Sets piece number n; false past the last one.
static bool qlora__piece_at(const qlora_trainer* t, int64_t n, qlora__piece_of* out) {
    int64_t layers = t->m->plan.config.layers;
    int64_t forward = 1 + 2 * layers + t->micro.chunks;
    memset(out, 0, sizeof *out);
    if (t->micro.reference && n <= forward) {
        out->reference = true;
        qlora__piece_forward(t, n, QLORA__PIECE_LOGPS, out);
        return true;
    }
    n -= t->micro.reference ? forward + 1 : 0;
    if (n <= forward) {
        qlora__piece_forward(t, n, t->micro.mismatched ? QLORA__PIECE_LOGPS : QLORA__PIECE_TURN,
                             out);
        return true;
    }
    int64_t back = n - forward - 1;
    out->kind = back % 2 == 0 ? QLORA__PIECE_BACKWARD_MLP : QLORA__PIECE_BACKWARD_ATTENTION;
    out->index = layers - 1 - back / 2;
    return !t->micro.mismatched && back < 2 * layers;
}

// The factors of the sequences, applied to the gradients of their rows.
static qlora_result qlora__piece_preference(const qlora__method* method, const qlora__pass* pass) {
    qlora_model* m = pass->m;
    qlora_tensor rows = m->work.rows_dx;
    rows.rows -= 1; // without the zero row
    QLORA__TRY(qlora__preference_logps(pass->ctx, &m->work.preference, &m->work.losses,
                                       &m->work.preference.logps));
    QLORA__TRY(method->factors(pass->ctx, &m->work.preference));
    return qlora__preference_scale(pass->ctx, &m->work.preference, &rows);
}

static qlora_result qlora__piece_logps(const qlora__method* method, const qlora__pass* pass,
                                       bool reference) {
    const qlora__preference* p = &pass->m->work.preference;
    QLORA__TRY(qlora__preference_logps(pass->ctx, p, &pass->m->work.losses,
                                       reference ? &p->references : &p->logps));
    return reference ? QLORA_OK : method->factors(pass->ctx, p);
}

static qlora_result qlora__piece_kind_run(const qlora_trainer* t, const qlora__pass* pass,
                                          const qlora__piece_of* piece) {
    qlora_tensor totals = qlora__window(&pass->m->totals, 1, 0, 3);
    bool trained = !piece->reference && !t->micro.mismatched;
    switch (piece->kind) {
    case QLORA__PIECE_BEGIN:
        return qlora__forward_begin(pass);
    case QLORA__PIECE_FORWARD_ATTENTION:
        return qlora__forward_attention(pass, piece->index);
    case QLORA__PIECE_FORWARD_MLP:
        return qlora__forward_mlp(pass, piece->index);
    case QLORA__PIECE_HEAD:
        return qlora__head_chunk(pass, piece->index, trained ? &totals : NULL, trained);
    case QLORA__PIECE_LOGPS:
        return qlora__piece_logps(t->method, pass, piece->reference);
    case QLORA__PIECE_TURN:
        if (t->micro.preference) {
            QLORA__TRY(qlora__piece_preference(t->method, pass));
        }
        QLORA__TRY(qlora__head_end(pass));
        return qlora__backward_begin(pass);
    case QLORA__PIECE_BACKWARD_MLP:
        return qlora__backward_mlp(pass, piece->index);
    default:
        QLORA__TRY(qlora__backward_attention(pass, piece->index));
        return piece->index == 0 ? qlora__backward_end(pass) : QLORA_OK;
    }
}

// Only what is trained has dropout.
static qlora_result qlora__piece_run(qlora_trainer* t, const qlora__piece_of* piece) {
    qlora_model* m = t->m;
    qlora__pass pass =
        qlora__pass_of_micro(m, &t->micro, !piece->reference && !t->micro.mismatched);
    m->use_adapters = !piece->reference;
    qlora_result r = qlora__piece_kind_run(t, &pass, piece);
    m->use_adapters = true; // a step is refused while they are off
    return r;
}

static qlora_result qlora__micro_run(qlora_ctx* ctx, void* user) {
    qlora_trainer* t = (qlora_trainer*)user;
    qlora__piece_of piece;
    (void)ctx;
    for (int64_t n = 0; qlora__piece_at(t, n, &piece); n++) {
        QLORA__TRY(qlora__piece_run(t, &piece));
    }
    return QLORA_OK;
}

static qlora_result qlora__update_run(qlora_ctx* ctx, void* user) {
    return qlora__update(ctx, ((qlora_trainer*)user)->m);
}

// Replays the graph, captures it the first time, or runs without graphs. After a failed capture, a
// warning is logged once, and no further capture is tried.
static qlora_result qlora__run(qlora_trainer* t, uint64_t key, qlora_graph_fn fn,
                               qlora_graph** graph) {
    qlora_ctx* ctx = t->ctx;
    if (!t->use_graphs) {
        return fn(ctx, t);
    }
    if (*graph != NULL && !qlora__graph_is_valid(*graph)) {
        QLORA__TRY(qlora__graph_destroy(ctx, *graph));
        *graph = NULL;
    }
    if (*graph != NULL) {
        return qlora__graph_replay(ctx, *graph, key);
    }
    qlora_result r = qlora__graph_capture(ctx, key, fn, t, graph);
    if (r == QLORA_OK || r == QLORA_ERR_DEVICE_LOST || t->desc.require_graph) {
        return r;
    }
    QLORA__LOG(ctx, WARN, GRAPH, "steps run without graphs from now on: %.400s", ctx->env.error);
    t->use_graphs = false;
    return fn(ctx, t);
}

// A step in slices accepts no other call that changes it.
static qlora_result qlora__not_sliced(qlora_ctx* ctx, const qlora_trainer* t) {
    if (t->sliced.begun) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "a step is running in slices; finish it with qlora_train_slice or drop "
                           "it with qlora_train_cancel");
    }
    return QLORA_OK;
}

// The sequences of a step belong to the adapter of its trainer.
static qlora_result qlora__batch_owned(const qlora_trainer* t, const qlora_batch* b) {
    for (int64_t s = 0; s < b->count; s++) {
        int32_t adapter = qlora__batch_adapter(b, s, t->desc.adapter);
        if (adapter != t->desc.adapter) {
            return qlora__fail(t->ctx, QLORA_ERR_ARGUMENT,
                               "sequence %lld has adapter %d, but the trainer trains adapter %d; "
                               "to train several together, use qlora_train_step_each",
                               (long long)s, (int)adapter, (int)t->desc.adapter);
        }
    }
    return QLORA_OK;
}

// What every call that computes part of a step needs.
static qlora_result qlora__step_need(qlora_ctx* ctx, const qlora_trainer* t) {
    if (!t->m->use_adapters) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "the adapters are off; switch them on with qlora_adapter_use");
    }
    QLORA__TRY(qlora__trainer_sound(ctx, t));
    if (t->failed) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "an earlier call of this step failed, and its gradients are incomplete; "
                           "drop the step with qlora_train_cancel");
    }
    if (t->m->stepping != NULL && t->m->stepping != t) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "another trainer of the model is in the middle of a micro-batch; finish "
                           "it with qlora_train_slice or drop it with qlora_train_cancel");
    }
    if (t->m->speaking != NULL || t->m->evaluation.begun) {
        return qlora__model_idle(ctx, t->m, "training");
    }
    return qlora__not_in_capture(ctx, "a training call");
}

static qlora_result qlora__trainer_need(qlora_ctx* ctx, const qlora_trainer* t) {
    QLORA__TRY(qlora__step_need(ctx, t));
    return qlora__not_sliced(ctx, t);
}

static qlora_result qlora__labels_check(qlora_ctx* ctx, double total_labels) {
    if (total_labels > 1e15) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "total_labels is %g; the maximum is 1e15",
                           total_labels);
    }
    if (!(total_labels > 0.0)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "total_labels is %g; a step needs at least one label with a positive "
                           "weight",
                           total_labels);
    }
    return QLORA_OK;
}

// What a batch is of its step, in a mean of batches: by its labels, pairs or sequences.
static double qlora__micro_share(const qlora_trainer* t, const qlora_batch* batch) {
    double pair = t->method->unit == QLORA__UNIT_PAIR ? 2.0 : 1.0;
    if (!qlora__batch_is_leaf(t, batch)) {
        return 0.0;
    }
    return t->method->unit == QLORA__UNIT_ROW ? qlora_batch_labels(batch) / t->counts.labels
                                              : (double)batch->count / pair / t->counts.units;
}

// t->counts is that of the step.
static qlora_result qlora__micro_send(qlora_trainer* t, const qlora_batch* batch) {
    bool plain = t->method->factors == NULL;
    qlora__preference_numbers numbers = qlora__preference_numbers_of(t);
    qlora__micro_desc desc = {plain ? t->counts.labels : 1.0, t->desc.seed,    t->step,
                              plain ? NULL : &numbers,        t->desc.adapter, NULL,
                              qlora__micro_share(t, batch)};
    QLORA__TRY(qlora__comm_slot(t));
    QLORA__TRY(qlora__batch_send(t->ctx, t->m, batch, &desc, &t->micro));
    t->tokens += t->micro.mismatched ? 0 : t->micro.tokens;
    return QLORA_OK;
}

// The graph of the micro-batch t->micro: one for each kind, size class and number of
// head chunks.
static int64_t qlora__micro_graph(const qlora_trainer* t) {
    int64_t kind = (t->micro.reference ? 1 : 0) + (t->micro.mismatched ? 2 : 0);
    return (kind * QLORA__SIZE_CLASSES + t->micro.size_class) * t->chunk_room + t->micro.chunks;
}

// Runs the micro-batch t->micro. If the rows of several adapters are computed run by run, the
// shapes of the products depend on which rows belong to which of them, so there is no graph of it.
static qlora_result qlora__micro_send_off(qlora_trainer* t) {
    int64_t graph = qlora__micro_graph(t);
    return qlora__has_several(t->m) && t->m->wide == NULL
               ? qlora__micro_run(t->ctx, t)
               : qlora__run(t, (uint64_t)graph, qlora__micro_run, &t->graphs[graph]);
}

// Queues a micro-batch that has been checked.
static qlora_result qlora__micro_queue(qlora_trainer* t, const qlora_batch* batch) {
    t->failed = true;
    if (qlora__batch_is_leaf(t, batch)) {
        QLORA__TRY(qlora__leaf_begin(t));
    }
    QLORA__TRY(qlora__micro_send(t, batch));
    QLORA__TRY(qlora__micro_send_off(t));
    t->failed = false;
    return QLORA_OK;
}

static qlora_result qlora__train_micro(qlora_trainer* t, const qlora_batch* batch,
                                       double total_labels) {
    int64_t tokens = 0;
    QLORA__TRY(qlora__trainer_need(t->ctx, t));
    if (t->method->unit != QLORA__UNIT_ROW) {
        return qlora__fail(t->ctx, QLORA_ERR_STATE,
                           "the loss of %s depends on the whole step; use qlora_train_step, "
                           "qlora_train_gradients or qlora_train_begin",
                           t->method->name);
    }
    if (t->world > 1) {
        return qlora__fail(t->ctx, QLORA_ERR_STATE,
                           "a step of %d processes is divided between them; use qlora_train_step, "
                           "qlora_train_gradients or qlora_train_begin",
                           (int)t->world);
    }
    QLORA__TRY(qlora__labels_check(t->ctx, total_labels));
    QLORA__TRY(qlora__batch_check(t->ctx, t->m, batch, &tokens));
    QLORA__TRY(qlora__batch_owned(t, batch));
    t->counts.labels = total_labels;
    return qlora__micro_queue(t, batch);
}

qlora_result qlora_train_micro(qlora_trainer* trainer, const qlora_batch* batch,
                               double total_labels) {
    QLORA__TRY(qlora__trainer_enter(trainer, "qlora_train_micro"));
    return qlora__trainer_leave(trainer, qlora__train_micro(trainer, batch, total_labels));
}

static double qlora__schedule_lr(const qlora_train_desc* d, int64_t step) {
    if (step < d->warmup_steps) {
        return d->lr * (double)(step + 1) / (double)d->warmup_steps;
    }
    if (d->schedule == QLORA_SCHEDULE_CONSTANT || d->total_steps <= d->warmup_steps) {
        return d->lr;
    }
    double done = (double)(step - d->warmup_steps) / (double)(d->total_steps - d->warmup_steps);
    done = done < 1.0 ? done : 1.0;
    return d->schedule == QLORA_SCHEDULE_LINEAR
               ? d->lr * (1.0 - done)
               : d->lr * 0.5 * (1.0 + cos(3.14159265358979323846 * done));
}

// Queues the copies of the results of a step to the host, without waiting for them.
static qlora_result qlora__record_send(qlora_trainer* t, double lr) {
    qlora_ctx* ctx = t->ctx;
    qlora_model* m = t->m;
    int at = qlora__record_of(t->step + 1);
    int32_t numbers = 2 * m->clip.groups;
    qlora__record* record = &t->records[at];
    const struct {
        void* to;
        const void* from;
        size_t bytes;
    } copies[] = {{record->totals, m->totals.data, sizeof record->totals},
                  {record->loads, m->work.experts.balance.report.data,
                   qlora__balances(m) ? sizeof record->loads : 0},
                  {record->results, qlora__clip_results(&m->clip), (size_t)numbers * sizeof(float)},
                  {&record->adamw, m->adamw.data, sizeof(qlora_adamw_state)},
                  {record->preference, m->work.preference.sums.data, sizeof record->preference},
                  {&record->flag, m->flag.data, sizeof(int32_t)}};
    for (size_t i = 0; i < sizeof copies / sizeof copies[0]; i++) {
        if (copies[i].bytes > 0) {
            QLORA__TRY(qlora__copy_out_later(ctx, copies[i].to, copies[i].from, copies[i].bytes));
        }
    }
    // The CPU in double precision, for tests.
    if (qlora__on_cpu(ctx) && sizeof(QLORA__REAL) != sizeof(float)) {
        for (int i = 0; i < QLORA__LOADS && qlora__balances(m); i++) {
            record->loads[i] = (float)qlora__at(&m->work.experts.balance.report, 0, i);
        }
        for (int i = 0; i < 4; i++) {
            record->totals[i] = (float)qlora__load(m->totals.data, QLORA_F32, i);
        }
        for (int32_t i = 0; i < numbers; i++) {
            record->results[i] = (float)qlora__clip_results(&m->clip)[i];
        }
    }
    QLORA__TRY(qlora__event_record(ctx, t->reports[at].event));
    t->reports[at].step = t->step + 1;
    t->reports[at].tokens = t->tokens;
    t->reports[at].lr = lr;
    t->reports[at].sent = t->sent;
    t->reports[at].longest = 0.0; // a step in slices sets it in the end
    t->reports[at].total = t->counts.units;
    t->reports[at].chosen_labels = t->counts.chosen_labels;
    t->reports[at].sft_alpha = t->desc.sft_alpha;
    memset(&t->counts, 0, sizeof t->counts);
    return qlora__sums_clear(ctx, m);
}

// Queues the update, as a graph if steps are graphs, and the copies of its results.
static qlora_result qlora__update_send(qlora_trainer* t, bool graph) {
    qlora_ctx* ctx = t->ctx;
    qlora_model* m = t->m;
    qlora__slot* slot = NULL;
    t->failed = true;
    QLORA__TRY(qlora__tree_fold(t, t->world > 1 ? t->leaves : t->leaf));
    qlora_result summed = qlora__comm_sum(t);
    // An exchange that breaks ends those before it, whose updates may be queued already.
    t->spoilt = t->spoilt || (summed != QLORA_OK && t->world > 1 && t->comm.device);
    QLORA__TRY(summed);
    QLORA__TRY(qlora__ring_take(ctx, t->ring.count > 0 ? &t->ring : &m->ring, &slot));
    char* memory = slot->memory + (t->ring.count > 0 ? 0 : m->batch.all.bytes);
    const qlora__adamw_numbers numbers = {qlora__schedule_lr(&t->desc, t->step), t->desc.beta1,
                                          t->desc.beta2, t->desc.eps, t->desc.weight_decay};
    memcpy(memory, &numbers, sizeof numbers);
    QLORA__TRY(qlora__slot_send(ctx, slot, m->adamw.data, memory, sizeof numbers));
    QLORA__TRY(graph ? qlora__run(t, (uint64_t)t->graph_room, qlora__update_run, &t->update_graph)
                     : qlora__update(ctx, m));
    QLORA__TRY(qlora__record_send(t, numbers.lr));
    t->step++;
    t->tokens = 0;
    t->failed = false;
    qlora__tree_reset(t);
    return QLORA_OK;
}

static qlora_result qlora__train_update(qlora_trainer* t) {
    QLORA__TRY(qlora__trainer_need(t->ctx, t));
    return qlora__update_send(t, true);
}

qlora_result qlora_train_update(qlora_trainer* trainer) {
    QLORA__TRY(qlora__trainer_enter(trainer, "qlora_train_update"));
    return qlora__trainer_leave(trainer, qlora__train_update(trainer));
}

// ---- information --------------------------------------------------------------------------------

// The norm of all gradients, from those of the groups.
static float qlora__record_norm(const qlora_trainer* t, const qlora__record* r) {
    double sum = 0.0;
    if (t->m->clip.groups == 1) {
        return r->results[0];
    }
    for (int32_t g = 0; g < t->m->clip.groups; g++) {
        sum += (double)r->results[2 * g] * (double)r->results[2 * g];
    }
    return (float)sqrt(sum);
}

// Reports step number `step`, whose results have arrived.
static void qlora__info_fill(const qlora_trainer* t, int64_t step, qlora_train_info* out) {
    const qlora__record* r = &t->records[qlora__record_of(step)];
    const qlora__report* report = &t->reports[qlora__record_of(step)];
    memset(out, 0, sizeof *out);
    out->step = step;
    out->pending = t->step - step;
    out->graphs = t->use_graphs && t->update_graph != NULL && !qlora__on_cpu(t->ctx) &&
                  (!qlora__has_several(t->m) || t->m->wide != NULL);
    out->waits = t->m->ring.waits + t->ring.waits;
    if (step == 0 || report->step != step) {
        return;
    }
    out->skipped = r->adamw.skipped;
    out->last_skipped = r->adamw.skip != 0;
    out->labels = (double)r->totals[2];
    out->loss = r->totals[2] > 0.0f
                    ? ((double)r->totals[0] + (double)r->totals[1]) / (double)r->totals[2]
                    : 0.0;
    out->router_aux_loss = (double)r->totals[3];
    out->load_least = (double)r->loads[QLORA__LOAD_LEAST];
    out->load_most = (double)r->loads[QLORA__LOAD_MOST];
    out->load_entropy = (double)r->loads[QLORA__LOAD_ENTROPY];
    out->tokens = report->tokens;
    out->grad_norm = qlora__record_norm(t, r);
    out->lr = report->lr;
    out->sent = report->sent;
    out->longest_piece = report->longest;
    out->exchange_ms = t->world > 1 ? qlora__comm_ms(t, report) : 0.0;
    out->exchange_graph = t->world > 1 && report->exchange_graph;
    if (t->method->report != NULL && report->total > 0.0) {
        t->method->report(report, r->preference, out);
    }
    out->loss += t->desc.router_aux_loss * out->router_aux_loss;
}

static qlora_result qlora__train_query(qlora_trainer* t, qlora_train_info* out) {
    qlora_ctx* ctx = t->ctx;
    if (out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    QLORA__TRY(qlora__not_in_capture(ctx, "waiting for a step"));
    QLORA__TRY(qlora__comm_wait(t, t->reports[qlora__record_of(t->step)].event));
    QLORA__TRY(qlora__sync(ctx));
    QLORA__TRY(qlora__flag_read(ctx, t->m));
    qlora__info_fill(t, t->step, out);
    return QLORA_OK;
}

qlora_result qlora_train_query(qlora_trainer* trainer, qlora_train_info* out) {
    QLORA__TRY(qlora__trainer_enter(trainer, "qlora_train_query"));
    return qlora__trainer_leave(trainer, qlora__train_query(trainer, out));
}

static qlora_result qlora__train_poll(qlora_trainer* t, qlora_train_info* out) {
    if (out == NULL) {
        return qlora__fail(t->ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    QLORA__TRY(qlora__not_in_capture(t->ctx, "polling a step"));
    int64_t step = t->step;
    for (bool done = step == 0; !done;) {
        QLORA__TRY(qlora__event_poll(t->ctx, t->reports[qlora__record_of(step)].event, &done));
        if (!done) {
            step--;
            done = step == 0 || step == t->step - QLORA__RECORDS;
        }
    }
    if (step > 0 && t->reports[qlora__record_of(step)].step == step) {
        QLORA__TRY(qlora__flag_check(t->ctx, t->records[qlora__record_of(step)].flag));
    }
    QLORA__TRY(qlora__trainer_sound(t->ctx, t));
    qlora__info_fill(t, step, out);
    return QLORA_OK;
}

qlora_result qlora_train_poll(qlora_trainer* trainer, qlora_train_info* out) {
    QLORA__TRY(qlora__trainer_enter(trainer, "qlora_train_poll"));
    return qlora__trainer_leave(trainer, qlora__train_poll(trainer, out));
}

// The partial sums are added on the host, because the step may go on.
static qlora_result qlora__gradient_read(qlora_trainer* t, int64_t index, float* out) {
    qlora_ctx* ctx = t->ctx;
    qlora_parameter_info info;
    QLORA__TRY(qlora__model_settle(t->m));
    QLORA__TRY(qlora__parameter_read(ctx, t->m, &t->m->gradients, index, out));
    if (t->tree.levels == 0) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__parameter_query(ctx, t->m, index, &info));
    int64_t n = info.rows * info.cols;
    float* part = (float*)qlora__alloc(ctx, (size_t)n * sizeof *part);
    qlora_result r = part != NULL ? QLORA_OK : QLORA_ERR_MEMORY;
    for (int level = t->tree.levels - 1; level >= 0 && r == QLORA_OK; level--) {
        qlora_tensor entry = t->m->gradients;
        QLORA__REAL* data = NULL;
        r = qlora__tree_entry(t, level, &data);
        entry.data = data;
        r = r == QLORA_OK ? qlora__parameter_read(ctx, t->m, &entry, index, part) : r;
        for (int64_t i = 0; i < n && r == QLORA_OK; i++) {
            out[i] = part[i] + out[i];
        }
    }
    qlora__free(ctx, part, (size_t)n * sizeof *part);
    return r;
}

qlora_result qlora_gradient_read(qlora_trainer* trainer, int64_t index, float* out) {
    QLORA__TRY(qlora__trainer_enter(trainer, "qlora_gradient_read"));
    return qlora__trainer_leave(trainer, qlora__gradient_read(trainer, index, out));
}

// ---- whole steps --------------------------------------------------------------------------------

// Checks every batch of a step before anything is computed, and counts what it consists of.
static qlora_result qlora__batches_check(qlora_trainer* t, const qlora_batch* batches,
                                         int64_t count) {
    qlora_ctx* ctx = t->ctx;
    QLORA__TRY(qlora__trainer_need(ctx, t));
    if (t->tokens > 0) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "a step was started with qlora_train_micro or qlora_train_gradients; "
                           "finish it with qlora_train_update or drop it with qlora_train_cancel");
    }
    if (batches == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "batches is NULL");
    }
    QLORA__TRY(qlora__need_whole(ctx, "count", count, 1, INT64_MAX));
    qlora__step_counts counts;
    int64_t leaves = 0;
    memset(&counts, 0, sizeof counts);
    for (int64_t i = 0; i < count; i++) {
        int64_t tokens = 0;
        QLORA__TRY(qlora__batch_check(ctx, t->m, &batches[i], &tokens));
        QLORA__TRY(qlora__batch_owned(t, &batches[i]));
        QLORA__TRY(qlora__method_check(t, &batches[i], &counts));
        counts.labels += qlora_batch_labels(&batches[i]);
        leaves += qlora__batch_is_leaf(t, &batches[i]) ? 1 : 0;
    }
    QLORA__TRY(qlora__method_check_step(t, &counts));
    QLORA__TRY(qlora__labels_check(ctx, counts.labels));
    t->counts = counts;
    t->leaves = leaves;
    t->share = qlora__comm_share(t);
    return QLORA_OK;
}

static qlora_result qlora__train_gradients(qlora_trainer* t, const qlora_batch* batches,
                                           int64_t count) {
    QLORA__TRY(qlora__batches_check(t, batches, count));
    for (int64_t i = 0; i < count; i++) {
        if (!qlora__leaf_skip(t, &batches[i])) {
            QLORA__TRY(qlora__micro_queue(t, &batches[i]));
        }
    }
    return QLORA_OK;
}

qlora_result qlora_train_gradients(qlora_trainer* trainer, const qlora_batch* batches,
                                   int64_t count) {
    QLORA__TRY(qlora__trainer_enter(trainer, "qlora_train_gradients"));
    return qlora__trainer_leave(trainer, qlora__train_gradients(trainer, batches, count));
}

static qlora_result qlora__train_step(qlora_trainer* t, const qlora_batch* batches, int64_t count,
                                      qlora_train_info* out) {
    QLORA__TRY(qlora__train_gradients(t, batches, count));
    QLORA__TRY(qlora__update_send(t, true));
    return out != NULL ? qlora__train_query(t, out) : QLORA_OK;
}

qlora_result qlora_train_step(qlora_trainer* trainer, const qlora_batch* batches, int64_t count,
                              qlora_train_info* out) {
    QLORA__TRY(qlora__trainer_enter(trainer, "qlora_train_step"));
    return qlora__trainer_leave(trainer, qlora__train_step(trainer, batches, count, out));
}
