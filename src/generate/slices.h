// ---- a token in slices --------------------------------------------------------------------------

// What qlora_generate_feed and its like have left.
static qlora_result qlora__generate_owed(qlora_generation* g) {
    int64_t count = g->due;
    if (count == 0) {
        return QLORA_OK;
    }
    int64_t at = g->length + (g->waiting >= 0 ? 1 : 0);
    QLORA__TRY(qlora__generate_append(g, g->text + at, count));
    g->due = 0;
    qlora__generate_turn(g);
    return QLORA_OK;
}

// The errand of a text: what is due, and a token.
static qlora_result qlora__generate_errand(void* user) {
    qlora_generation* g = (qlora_generation*)user;
    QLORA__TRY(qlora__generate_owed(g));
    qlora__breathe(g->ctx);
    return g->ctx->errand->dropped
               ? QLORA_OK
               : qlora__generate_step(&g, 1, &g->slice_token, &g->slice_stopped);
}

// Without an errand: what is due, or a token, or both if there is time.
static qlora_result qlora__generate_whole(qlora_generation* g, double until, bool* done) {
    bool owed = g->due > 0;
    QLORA__TRY(qlora__generate_owed(g));
    if (owed && !(qlora__clock_ms() < until)) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__generate_step(&g, 1, &g->slice_token, &g->slice_stopped));
    *done = true;
    return QLORA_OK;
}

static qlora_result qlora__generate_turns(qlora_generation* g, double until, bool* done) {
    qlora_model* m = g->m;
    if (g->errand == NULL) {
        QLORA__TRY(qlora__generate_usable(g));
        g->slice_tokens = qlora__generate_tokens(g);
        QLORA__TRY(qlora__model_errand(m, qlora__generate_errand, g, &g->errand));
    }
    qlora__errand* e = g->errand;
    if (e == NULL) {
        return qlora__generate_whole(g, until, done);
    }
    m->speaking = NULL;
    qlora__model_slice(m, e, until);
    if (e->under_way) {
        m->speaking = g;
        return QLORA_OK;
    }
    g->errand = NULL;
    e->taken = false;
    QLORA__TRY(e->result);
    *done = true;
    return QLORA_OK;
}

static qlora_result qlora__generate_slice(qlora_generation* g, double milliseconds, int32_t* token,
                                          bool* stopped, bool* out) {
    double start = qlora__clock_ms();
    bool done = false;
    if (token == NULL || stopped == NULL || out == NULL) {
        return qlora__fail(g->ctx, QLORA_ERR_ARGUMENT, "%s is NULL",
                           token == NULL     ? "token"
                           : stopped == NULL ? "stopped"
                                             : "done");
    }
    QLORA__TRY(qlora__generate_turns(g, start + milliseconds, &done));
    *token = done ? g->slice_token : -1;
    *stopped = done && g->slice_stopped;
    *out = done;
    return QLORA_OK;
}

qlora_result qlora_generate_slice(qlora_generation* generation, double milliseconds, int32_t* token,
                                  bool* stopped, bool* done) {
    QLORA__ENTER(qlora__generation_ctx(generation), "qlora_generate_slice");
    qlora__ahead_carry(generation);
    return qlora__leave(generation->ctx,
                        qlora__generate_slice(generation, milliseconds, token, stopped, done));
}
