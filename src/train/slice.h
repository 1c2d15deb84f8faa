// ---- steps in slices ----------------------------------------------------------------------------
//
// Runs the pieces of qlora__piece_at one by one, without graphs, and then the update: the same work
// in the same order as a whole step. On the CPU, an errand does so, slice by slice. On a GPU, and
// for several processes, a slice waits for each piece, so that the device is idle when it returns,
// and to measure how long pieces of that kind take.

// Passes over the batches of other processes.
static void qlora__slice_pass(qlora_trainer* t) {
    qlora__sliced* s = &t->sliced;
    while (s->at < s->count && qlora__leaf_skip(t, &s->batches[s->at])) {
        s->at++;
    }
}

static qlora_result qlora__train_begin(qlora_trainer* t, const qlora_batch* batches,
                                       int64_t count) {
    QLORA__TRY(qlora__batches_check(t, batches, count));
    t->sliced.begun = true;
    t->sliced.batches = batches;
    t->sliced.count = count;
    t->sliced.at = 0;
    t->sliced.piece = 0;
    t->sliced.longest = 0.0;
    qlora__slice_pass(t);
    return QLORA_OK;
}

qlora_result qlora_train_begin(qlora_trainer* trainer, const qlora_batch* batches, int64_t count) {
    QLORA__TRY(qlora__trainer_enter(trainer, "qlora_train_begin"));
    return qlora__trainer_leave(trainer, qlora__train_begin(trainer, batches, count));
}

// The kind of the next piece.
static int qlora__slice_kind(const qlora_trainer* t) {
    qlora__piece_of piece;
    if (t->sliced.at == t->sliced.count) {
        return QLORA__PIECE_UPDATE;
    }
    if (t->sliced.piece == 0) {
        return QLORA__PIECE_BEGIN; // t->micro is still that of the previous batch
    }
    qlora__piece_at(t, t->sliced.piece, &piece);
    return piece.kind;
}

// Moves to the next piece.
static void qlora__slice_advance(qlora_trainer* t) {
    qlora__sliced* s = &t->sliced;
    qlora__piece_of piece;
    s->piece++;
    if (!qlora__piece_at(t, s->piece, &piece)) {
        s->at++;
        s->piece = 0;
        qlora__slice_pass(t);
    }
    t->m->stepping = s->piece > 0 ? t : NULL;
}

static qlora_result qlora__slice_piece(qlora_trainer* t, int kind, bool* done) {
    qlora__sliced* s = &t->sliced;
    if (kind == QLORA__PIECE_UPDATE) {
        QLORA__TRY(qlora__update_send(t, false));
        *done = true;
        QLORA__TRY(qlora__comm_wait(t, t->reports[qlora__record_of(t->step)].event));
        return qlora__sync(t->ctx);
    }
    if (s->piece == 0) { // the caller's memory may have changed since the step began
        int64_t tokens = 0;
        qlora__step_counts ignored;
        memset(&ignored, 0, sizeof ignored);
        QLORA__TRY(qlora__batch_check(t->ctx, t->m, &s->batches[s->at], &tokens));
        QLORA__TRY(qlora__batch_owned(t, &s->batches[s->at]));
        QLORA__TRY(qlora__method_check(t, &s->batches[s->at], &ignored));
        if (qlora__batch_is_leaf(t, &s->batches[s->at])) {
            QLORA__TRY(qlora__leaf_begin(t));
        }
        QLORA__TRY(qlora__micro_send(t, &s->batches[s->at]));
    }
    qlora__piece_of piece;
    qlora__piece_at(t, s->piece, &piece);
    t->m->flow.coded = NULL; // something else may have run since the last piece
    QLORA__TRY(qlora__piece_run(t, &piece));
    QLORA__TRY(qlora__sync(t->ctx));
    qlora__slice_advance(t);
    return QLORA_OK;
}

// The step from where it is to its end, as an errand.
static qlora_result qlora__slice_all(void* user) {
    qlora_trainer* t = (qlora_trainer*)user;
    qlora_model* m = t->m;
    qlora__errand* e = t->ctx->errand;
    for (bool done = false; !done && !e->dropped;) {
        int kind = qlora__slice_kind(t);
        m->stepping = t;
        m->updating = kind == QLORA__PIECE_UPDATE ? e : NULL;
        qlora_result r = qlora__slice_piece(t, kind, &done);
        m->updating = NULL;
        m->stepping = t->sliced.piece > 0 ? t : NULL;
        QLORA__TRY(r);
        if (m->stepping == NULL && !done) {
            qlora__breathe(t->ctx);
        }
    }
    return QLORA_OK;
}

// A slice of the errand.
static qlora_result qlora__slice_errand(qlora_trainer* t, double until, bool* done) {
    qlora__sliced* s = &t->sliced;
    qlora__errand* e = s->errand;
    if (e->under_way) { // otherwise another call has finished the update
        qlora__model_slice(t->m, e, until);
    }
    s->longest = e->longest > s->longest ? e->longest : s->longest;
    t->failed = !e->under_way && e->result != QLORA_OK;
    if (e->under_way) {
        return QLORA_OK;
    }
    s->errand = NULL;
    e->taken = false;
    QLORA__TRY(e->result);
    *done = true;
    return QLORA_OK;
}

// How long a piece of a kind takes: the median of the last three, or the shorter of two, so that
// one during which another program had the processor does not count; 0 = not known.
static double qlora__slice_expected(const qlora__sliced* s, int kind) {
    const double* times = s->times[kind];
    double low = times[0] < times[1] ? times[0] : times[1];
    double high = times[0] < times[1] ? times[1] : times[0];
    if (s->timed[kind] < QLORA__TIMES) {
        return s->timed[kind] == 2 ? low : times[0];
    }
    return times[2] < low ? low : times[2] > high ? high : times[2];
}

static void qlora__slice_time(qlora__sliced* s, int kind, double took) {
    s->times[kind][s->timed[kind]++ % QLORA__TIMES] = took;
    s->longest = took > s->longest ? took : s->longest;
}

// Piece by piece.
static qlora_result qlora__slice_pieces(qlora_trainer* t, double start, double milliseconds,
                                        bool* done) {
    for (double now = start; !*done;) {
        int kind = qlora__slice_kind(t);
        double expected = qlora__slice_expected(&t->sliced, kind);
        // A piece of a kind that has not been timed yet gets its own slice.
        if (now > start && (!(expected > 0.0) || now - start + expected > milliseconds)) {
            break;
        }
        t->failed = true;
        QLORA__TRY(qlora__slice_piece(t, kind, done));
        t->failed = false;
        double end = qlora__clock_ms();
        qlora__slice_time(&t->sliced, kind, end - now > 1e-6 ? end - now : 1e-6);
        now = end > start ? end : start + 1e-6;
    }
    QLORA__TRY(qlora__away_wait(t->ctx, ~0u)); // copies may outlast their piece, but not the slice
    return qlora__sync(t->ctx);
}

static qlora_result qlora__train_slice(qlora_trainer* t, double milliseconds, bool* out) {
    qlora_ctx* ctx = t->ctx;
    qlora__sliced* s = &t->sliced;
    double start = qlora__clock_ms();
    bool done = false;
    if (out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "done is NULL");
    }
    if (!s->begun) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "no step has been started; call qlora_train_begin first");
    }
    QLORA__TRY(qlora__step_need(ctx, t));
    if (s->errand == NULL && t->world == 1) {
        QLORA__TRY(qlora__model_errand(t->m, qlora__slice_all, t, &s->errand));
    }
    QLORA__TRY(s->errand != NULL ? qlora__slice_errand(t, start + milliseconds, &done)
                                 : qlora__slice_pieces(t, start, milliseconds, &done));
    if (done) {
        s->begun = false;
        t->reports[qlora__record_of(t->step)].longest = s->longest;
    }
    *out = done;
    return QLORA_OK;
}

qlora_result qlora_train_slice(qlora_trainer* trainer, double milliseconds, bool* done) {
    QLORA__TRY(qlora__trainer_enter(trainer, "qlora_train_slice"));
    return qlora__trainer_leave(trainer, qlora__train_slice(trainer, milliseconds, done));
}

static qlora_result qlora__train_cancel(qlora_trainer* t) {
    qlora_ctx* ctx = t->ctx;
    qlora_model* m = t->m;
    QLORA__TRY(qlora__not_in_capture(ctx, "a training call"));
    qlora_result stopped = qlora__sliced_stop(t);
    QLORA__TRY(qlora__tensor_zero(ctx, &m->gradients));
    QLORA__TRY(qlora__sums_clear(ctx, m));
    QLORA__TRY(qlora__tensor_zero(ctx, &m->flag));
    t->sliced.begun = false;
    t->tokens = 0;
    t->failed = false;
    qlora__tree_reset(t);
    return stopped;
}

qlora_result qlora_train_cancel(qlora_trainer* trainer) {
    QLORA__TRY(qlora__trainer_enter(trainer, "qlora_train_cancel"));
    return qlora__trainer_leave(trainer, qlora__train_cancel(trainer));
}
