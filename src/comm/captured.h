// ---- the sum as a graph -------------------------------------------------------------------------
//
// All processes run an exchange in the same way, so what they do depends only on what they all
// know: the numbers of leaves of the steps so far, and what they told each other.

// Times what follows: by the device where the exchange is queued on its stream.
static qlora_result qlora__swap_clock(qlora_trainer* t, int which, double* start) {
    qlora__report* report = &t->reports[qlora__record_of(t->step + 1)];
    if (t->comm.device) {
        report->exchange_ms = -1.0;
        return qlora__event_record(t->ctx, report->exchange_events[which]);
    }
    if (which == 0) {
        QLORA__TRY(qlora__sync(t->ctx)); // the messages are read when the step so far is complete
        *start = qlora__clock_ms();
    }
    report->exchange_ms = qlora__clock_ms() - *start;
    return QLORA_OK;
}

static void qlora__swaps_drop(qlora_trainer* t) {
    for (int i = 0; i < QLORA__SWAPS; i++) {
        if (t->swaps[i].graph != NULL) {
            qlora_result ignored = qlora__graph_destroy(t->ctx, t->swaps[i].graph);
            (void)ignored;
            t->swaps[i].graph = NULL;
        }
    }
}

// The exchange of steps like this one, or NULL if this is the first one of them. The memory may
// then be allocated again, and the graphs that use it are dropped.
static qlora__swap* qlora__swap_find(qlora_trainer* t) {
    for (int i = 0; i < QLORA__SWAPS; i++) {
        if (t->swaps[i].leaves == t->leaves) {
            return &t->swaps[i];
        }
    }
    qlora__swaps_drop(t);
    t->swaps[t->swap_count++ % QLORA__SWAPS].leaves = t->leaves;
    return NULL;
}

static qlora_result qlora__swap_record(qlora_ctx* ctx, void* user) {
    qlora_trainer* t = (qlora_trainer*)user;
    QLORA__TRY(qlora__capture_note(ctx, t->m->gradients.data));
    QLORA__TRY(qlora__capture_note(ctx, t->m->partials.data));
    QLORA__TRY(qlora__capture_note(ctx, t->received != NULL ? t->received->data : NULL));
    return qlora__sum_all(t);
}

static qlora_result qlora__swap_make(qlora_trainer* t, qlora__swap* swap) {
    uint64_t key = (uint64_t)t->graph_room + 1 + (uint64_t)t->leaves;
    qlora_result r = qlora__graph_make(t->ctx, key, qlora__swap_record, t, false, &swap->graph);
    swap->sent = t->sent;
    return r;
}

// Captures the exchange without running it. If one process cannot, none of them uses graphs.
static qlora_result qlora__swap_capture(qlora_trainer* t, qlora__swap* swap) {
    qlora_ctx* ctx = t->ctx;
    char why[300] = "";
    qlora_result made = qlora__swap_make(t, swap);
    if (made == QLORA_ERR_DEVICE_LOST) {
        return made;
    }
    snprintf(why, sizeof why, "%.290s", made != QLORA_OK ? ctx->env.error : "");
    int32_t mine = made == QLORA_OK ? 1 : 0;
    size_t bytes = (size_t)t->world * sizeof mine;
    int32_t* all = (int32_t*)qlora__alloc(ctx, bytes);
    if (all == NULL) {
        return QLORA_ERR_MEMORY;
    }
    qlora_result r = qlora__comm_gather(ctx, &t->comm, &mine, sizeof mine, all);
    for (int32_t i = 0; i < t->world && r == QLORA_OK; i++) {
        if (all[i] == 0 && why[0] == '\0') {
            snprintf(why, sizeof why, "rank %d could not capture one", (int)i);
        }
        t->swap_graphs = t->swap_graphs && all[i] != 0;
    }
    qlora__free(ctx, all, bytes);
    if (r == QLORA_OK && !t->swap_graphs) {
        qlora__swaps_drop(t);
        if (t->desc.require_graph) {
            return qlora__fail(ctx, QLORA_ERR_CAPTURE, "the exchange is not a graph: %s", why);
        }
        QLORA__LOG(ctx, WARN, GRAPH, "exchanges run without graphs from now on: %s", why);
    }
    return r;
}

static qlora_result qlora__swap_replay(qlora_trainer* t, qlora__swap* swap) {
    char why[400] = "";
    if (!t->comm.exchange(NULL, 0, qlora__comm_stream(t->ctx), why, sizeof why, t->comm.user)) {
        return qlora__comm_fail(t->ctx, &t->comm, why);
    }
    if (!qlora__graph_is_valid(swap->graph)) { // the stream has changed, for example
        QLORA__TRY(qlora__graph_destroy(t->ctx, swap->graph));
        swap->graph = NULL;
        QLORA__TRY(qlora__swap_make(t, swap));
    }
    t->sent = swap->sent;
    return qlora__graph_replay(t->ctx, swap->graph, swap->graph->watch.key);
}

// Replaces the nodes of this process by the sum of the step over all processes.
static qlora_result qlora__comm_sum(qlora_trainer* t) {
    double start = 0.0;
    t->sent = 0;
    if (t->world <= 1 || t->leaves == 0) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__comm_wait(t, t->reports[qlora__record_of(t->step)].exchange_events[1]));
    qlora__swap* swap = t->swap_graphs ? qlora__swap_find(t) : NULL;
    if (swap != NULL && swap->graph == NULL) {
        QLORA__TRY(qlora__swap_capture(t, swap));
    }
    bool graph = swap != NULL && t->swap_graphs;
    t->reports[qlora__record_of(t->step + 1)].exchange_graph = graph;
    QLORA__TRY(qlora__swap_clock(t, 0, &start));
    QLORA__TRY(graph ? qlora__swap_replay(t, swap) : qlora__sum_all(t));
    return qlora__swap_clock(t, 1, &start);
}

static double qlora__comm_ms(const qlora_trainer* t, const qlora__report* report) {
    return report->exchange_ms < 0.0 ? qlora__event_ms(t->ctx, report->exchange_events)
                                     : report->exchange_ms;
}

static qlora_result qlora__comm_start(qlora_trainer* t) {
    t->world = 1;
    if (t->desc.comm == NULL) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__comm_check(t->ctx, t->desc.comm));
    t->comm = *t->desc.comm;
    t->world = t->comm.world > 1 ? t->comm.world : 1;
    t->swap_graphs = t->use_graphs && t->world > 1 && t->comm.device && t->comm.graph;
    for (int i = 0; i < 2 * QLORA__RECORDS && t->world > 1 && t->comm.device; i++) {
        QLORA__TRY(qlora__event_create_timed(t->ctx, &t->reports[i / 2].exchange_events[i % 2]));
    }
    return t->world > 1 ? qlora__comm_agree(t) : QLORA_OK;
}

static void qlora__comm_stop(qlora_trainer* t) {
    qlora__swaps_drop(t);
    for (int i = 0; i < 2 * QLORA__RECORDS; i++) {
        qlora__event_destroy(t->ctx, t->reports[i / 2].exchange_events[i % 2]);
    }
    qlora__buffer_destroy(t->ctx, t->received);
}
