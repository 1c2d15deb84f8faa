// ---- a step that nobody has asked for yet -------------------------------------------------------
//
// The kernel that chooses the tokens also writes them to pinned memory of the host, where the host
// looks for them: no copy and no event is between two steps. A step needs nothing from the host, so
// the next one is launched before the host waits for the tokens of this one, and runs while the
// caller looks at them. It counts only if the next call is for texts that are in it and nothing
// else was called in between: the context counts its calls. Otherwise it is dropped: the texts are
// sent to the device again as the host knows them. What it wrote to the cache is one row after the
// end of each text, which the next step writes again; there is room for it, because no step is
// launched for a text that could not have one.
//
// A step that is dropped costs its time, and one that counts saves about 15 us (H200), so a model
// runs ahead only while the calls before would have made it pay.

// The calls of a text that change nothing but the text are no reason to drop a step.
static void qlora__ahead_carry(const qlora_generation* g) {
    uint64_t* calls = &g->m->decode.calls;
    *calls = *calls + 1 == g->ctx->calls ? g->ctx->calls : *calls;
}

// Whether a step for the pending texts would be the one after the last. Their adapter is the same
// then: it takes a call to change it.
static bool qlora__ahead_follows(qlora_generation* const* list, int64_t count) {
    const qlora__decode* d = &list[0]->m->decode;
    bool follows = d->calls == list[0]->ctx->calls;
    for (int64_t i = 0; i < count && follows; i++) {
        follows = !list[i]->pending || (d->last[list[i]->slot] != 0 && list[i]->on_device);
    }
    return follows;
}

// Whether the same texts can have another step after the one that is being made, if they go on.
static bool qlora__ahead_fits(qlora_generation* const* list, int64_t count) {
    bool fits = true;
    for (int64_t i = 0; i < count && fits; i++) {
        const qlora_generation* g = list[i];
        fits = g->pending && g->length + 2 < g->m->desc.generate_tokens &&
               g->is_long == qlora__is_long(g->m, g->length + 2) &&
               (g->desc.max_tokens == 0 || g->made + 1 < g->desc.max_tokens);
    }
    return fits;
}

// The device has something else than the host knows of the texts of the last step, unless they are
// pending and `keep` is set.
static void qlora__ahead_forget(qlora_model* m, bool keep) {
    for (int64_t i = 0; i < m->decode.texts; i++) {
        qlora_generation* g = m->texts.in_flight[i];
        if (m->decode.last[i] != 0 && g != NULL && !(keep && g->pending)) {
            g->on_device = false;
        }
    }
    m->decode.ahead = false;
}

// Where the device writes the result of a text for the token at `position`.
static qlora__decode_result* qlora__ahead_result(const qlora_generation* g, int64_t position) {
    const qlora__decode* d = &g->m->decode;
    return d->results + (position & 1) * d->texts + g->slot;
}

// Launches a step for the pending texts: their next one, or with `after` = 1 the one after it. No
// step that was dropped can still write to their results: its texts were sent again, which waits.
static qlora_result qlora__ahead_step(qlora_generation* const* list, int64_t count,
                                      int64_t after) {
    qlora_model* m = list[0]->m;
    for (int64_t i = 0; i < count; i++) {
        if (list[i]->pending) {
            qlora__spin_store(&qlora__ahead_result(list[i], list[i]->length + after)->done, 0);
        }
    }
    return qlora__decode_step(list[0]->ctx, m);
}

#if QLORA__SPINS > 0 && !defined(QLORA_NO_CUDA)
#define QLORA__CAN_RUN_AHEAD 1

// Waits for the result of a text. The driver is asked now and then: it knows what went wrong. It
// also waits, as the program has told it to, if nothing runs after the step.
static qlora_result qlora__ahead_wait(const qlora_generation* g) {
    const qlora__decode_result* result = qlora__ahead_result(g, g->length);
    bool done = false;
    if (!g->m->decode.ahead) {
        return qlora__sync(g->ctx);
    }
    while (!done && qlora__spin_load(&result->done) == 0) {
        QLORA__TRY(qlora__stream_poll(g->ctx, &done));
        for (int i = 0; i < QLORA__SPINS && !done && qlora__spin_load(&result->done) == 0; i++) {
            qlora__spin_pause();
        }
    }
    return QLORA_OK;
}

#else // the order of loads is not known: the host waits for the end of the step
#define QLORA__CAN_RUN_AHEAD 0

static qlora_result qlora__ahead_wait(const qlora_generation* g) {
    return qlora__sync(g->ctx);
}

#endif

// Waits for the results of the pending texts and copies them to what the host knows.
static qlora_result qlora__ahead_collect(qlora_generation* const* list, int64_t count) {
    qlora__decode* d = &list[0]->m->decode;
    for (int64_t i = 0; i < count; i++) {
        const qlora_generation* g = list[i];
        if (g->pending) {
            QLORA__TRY(qlora__ahead_wait(g));
            const qlora__decode_result* from = qlora__ahead_result(g, g->length);
            if (qlora__spin_load(&from->done) == 0) {
                return qlora__fail(g->ctx, QLORA_ERR_CUDA, "a step ended without a token");
            }
            qlora__decode_text* to = &d->host[g->slot];
            to->token = (int32_t)(uint32_t)from->done;
            to->position = (int32_t)(from->done >> 32);
            to->chosen = to->token;
            to->bad = from->bad;
            to->logprob = from->logprob;
        }
    }
    return QLORA_OK;
}

// Counts whether running ahead would have paid.
static void qlora__ahead_count(qlora__decode* d, bool follows) {
    int32_t change = follows ? 1 : d->could ? -QLORA__AHEAD_COST : 0;
    d->credit = (int32_t)qlora__min(qlora__max(d->credit + change, 0), QLORA__AHEAD_MOST);
}

// Launches the step of the pending texts, unless it is `there`, and the one after it if that pays.
static qlora_result qlora__ahead_launch(qlora_generation* const* list, int64_t count,
                                        bool there) {
    qlora_model* m = list[0]->m;
    qlora__decode* d = &m->decode;
    bool whole = true; // the device goes on with the pending texts and no others
    if (!there) {
        QLORA__TRY(qlora__ahead_step(list, count, 0));
    }
    if (there) {
        qlora__ahead_forget(m, true);
    }
    for (int64_t i = 0; i < d->texts; i++) {
        uint8_t pending = m->texts.in_flight[i] != NULL && m->texts.in_flight[i]->pending ? 1 : 0;
        whole = whole && (!there || d->last[i] == pending);
        d->last[i] = pending;
    }
    // A graph is launched as a whole or not at all; kernel by kernel, a step could end halfway.
    bool graph = d->graphs[m->use_adapters ? 1 : 0] != NULL;
    d->could = QLORA__CAN_RUN_AHEAD && whole && graph && qlora__ahead_fits(list, count);
    if (d->could && d->credit >= QLORA__AHEAD_COST) {
        // If it fails, the next call tries again, and reports what is wrong.
        d->ahead = qlora__ahead_step(list, count, 1) == QLORA_OK;
    }
    d->calls = list[0]->ctx->calls;
    return QLORA_OK;
}
