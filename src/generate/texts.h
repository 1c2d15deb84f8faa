// ---- a text, token by token ---------------------------------------------------------------------

// Checks ids that are to follow `length` tokens of a text.
static qlora_result qlora__generate_ids_check(qlora_ctx* ctx, const qlora_model* m,
                                              const char* what, const int32_t* ids, int64_t count,
                                              int64_t length) {
    int64_t room = m->desc.generate_tokens;
    if (ids == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is NULL", what);
    }
    if (count < 1) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s has %lld tokens; it must have at least 1",
                           what, (long long)count);
    }
    if (count > room - length - 1) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "%s has %lld tokens; the maximum here is %lld, because the text has "
                           "%lld and the model was opened with generate_tokens = %lld",
                           what, (long long)count, (long long)qlora__max(room - length - 1, 0),
                           (long long)length, (long long)room);
    }
    for (int64_t i = 0; i < count; i++) {
        if (ids[i] < 0 || ids[i] >= m->plan.config.vocab) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "token %lld of %s is %d; it must be 0 to %lld", (long long)i, what,
                               (int)ids[i], (long long)m->plan.config.vocab - 1);
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__generate_stops_check(qlora_ctx* ctx, const qlora_generate_desc* d) {
    QLORA__TRY(qlora__need_whole(ctx, "desc.stop_count", d->stop_count, 0, INT32_MAX));
    if (d->stops == NULL && d->stop_count > 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "desc.stops is NULL and desc.stop_count is %d",
                           (int)d->stop_count);
    }
    bool none = d->stops != NULL && d->stop_count == 1 && d->stops[0] == -1;
    for (int32_t i = 0; i < d->stop_count && !none; i++) {
        if (d->stops[i] < 0) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "desc.stops[%d] is %d; it must not be negative", (int)i,
                               (int)d->stops[i]);
        }
    }
    return QLORA_OK;
}

// What a text is computed with next: the adapter with this number, or QLORA__WORN_NONE.
static int32_t qlora__generate_adapter(const qlora_model* m, const qlora_generate_desc* d) {
    bool on = d->adapters == QLORA_CHOICE_AUTO ? m->use_adapters : d->adapters == QLORA_CHOICE_ON;
    return !on ? QLORA__WORN_NONE : d->adapters == QLORA_CHOICE_ON ? d->adapter : m->chosen;
}

static qlora_result qlora__generate_adapter_check(qlora_ctx* ctx, const qlora_model* m,
                                                  const qlora_generate_desc* d) {
    QLORA__TRY(qlora__need_whole(ctx, "desc.adapters", (int64_t)d->adapters, 0, QLORA_CHOICE_OFF));
    if (d->adapters != QLORA_CHOICE_ON && d->adapter != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "desc.adapter is %d; without desc.adapters = QLORA_CHOICE_ON it must "
                           "be 0",
                           (int)d->adapter);
    }
    return qlora__need_whole(ctx, "desc.adapter", d->adapter, 0, m->adapters - 1);
}

// A text whose prompt is shared exists, belongs to the model, and its cache is known.
static qlora_result qlora__generate_share_check(qlora_ctx* ctx, const qlora_model* m,
                                                const qlora_generate_desc* d) {
    bool found = d->share == NULL;
    for (int64_t i = 0; i < m->desc.generate_sequences && !found; i++) {
        found = m->texts.in_flight[i] == d->share;
    }
    if (!found) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "desc.share is not a text of this model; it must be one that was begun "
                           "and has not ended, or NULL");
    }
    if (d->share != NULL && d->share->broken) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "an earlier call on desc.share failed, so its prompt cannot be shared");
    }
    if (d->share != NULL && d->share->due > 0) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "the prompt of desc.share has not been run; call qlora_generate_slice "
                           "for it first");
    }
    if (d->share != NULL && qlora__generate_adapter(m, d) != d->share->worn) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "desc.share was computed with another adapter; begin without it, or "
                           "with the same desc.adapters and desc.adapter");
    }
    return QLORA_OK;
}

static qlora_result qlora__generate_need(qlora_ctx* ctx, const qlora_model* m,
                                         const qlora_generate_desc* d) {
    if (d == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "the generate desc is NULL");
    }
    if (d->reserved_must_be_zero0 != 0 || d->reserved_must_be_zero1 != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "the generate desc was not zeroed before its fields were set");
    }
    QLORA__TRY(qlora__model_has_weights(ctx, m, "generating"));
    QLORA__TRY(qlora__model_idle(ctx, m, "generating"));
    if (m->desc.generate_tokens == 0) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "the model was opened with generate_tokens = 0; set it to the maximum "
                           "length of a text");
    }
    if (m->generations >= m->desc.generate_sequences) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "the model already has %s; end %s with qlora_generate_end, or open the "
                           "model with a larger generate_sequences (%lld)",
                           m->generations == 1 ? "a generation" : "as many generations as it can",
                           m->generations == 1 ? "it" : "one",
                           (long long)m->desc.generate_sequences);
    }
    QLORA__TRY(qlora__generate_ids_check(ctx, m, "the prompt", d->prompt, d->prompt_tokens, 0));
    int64_t room = m->desc.generate_tokens - d->prompt_tokens;
    if (d->max_tokens < 0 || d->max_tokens > room) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "desc.max_tokens is %lld; it must be from 0 to %lld, because the prompt "
                           "has %lld tokens and the model was opened with generate_tokens = %lld",
                           (long long)d->max_tokens, (long long)room, (long long)d->prompt_tokens,
                           (long long)m->desc.generate_tokens);
    }
    QLORA__TRY(qlora__need_real(ctx, "desc.temperature", (double)d->temperature, 0.0, 1e300));
    QLORA__TRY(qlora__need_whole(ctx, "desc.top_k", d->top_k, 0, INT32_MAX));
    if (!(d->top_p >= 0.0f && d->top_p <= 1.0f)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "desc.top_p is %g; it must be from 0 to 1",
                           (double)d->top_p);
    }
    if (!(d->min_p >= 0.0f && d->min_p <= 1.0f)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "desc.min_p is %g; it must be from 0 to 1",
                           (double)d->min_p);
    }
    QLORA__TRY(
        qlora__need_real(ctx, "desc.repetition_penalty", (double)d->repetition_penalty, 0.0, 1e6));
    QLORA__TRY(qlora__generate_adapter_check(ctx, m, d));
    QLORA__TRY(qlora__generate_share_check(ctx, m, d));
    return qlora__generate_stops_check(ctx, d);
}

// Counts a generation that has begun, or one that ends.
static void qlora__generate_count(qlora_generation* g, bool begins) {
    qlora__paging_release(g, 0);
    g->m->texts.in_flight[g->slot] = begins ? g : NULL;
    g->m->generations += begins ? 1 : -1;
    g->m->followers += g->desc.adapters != QLORA_CHOICE_AUTO ? 0 : begins ? 1 : -1;
    g->ctx->living[QLORA__GENERATIONS] += begins ? 1 : -1;
}

static void qlora__generation_free(qlora_generation* g) {
    qlora__free(g->ctx, g->memory, g->bytes);
    qlora__free(g->ctx, g, sizeof *g);
}

static qlora_result qlora__generation_create(qlora_ctx* ctx, qlora_model* m,
                                             const qlora_generate_desc* d, qlora_generation** out) {
    size_t vocab = (size_t)m->plan.config.vocab;
    size_t ints = (size_t)qlora__max(m->plan.tokens, 2);
    const int32_t* stops = d->stops != NULL ? d->stops : m->plan.config.stop_ids;
    size_t stop_count = (size_t)(d->stops != NULL ? d->stop_count : m->plan.config.stop_count);
    qlora_generation* g = (qlora_generation*)qlora__alloc_zero(ctx, sizeof *g);
    if (g == NULL) {
        return QLORA_ERR_MEMORY;
    }
    g->ctx = ctx;
    g->m = m;
    g->slot = qlora__pages_slot(m);
    g->desc = *d;
    g->desc.prompt = NULL;
    g->desc.stops = NULL;
    g->desc.share = NULL;
    for (int64_t i = 0; i < QLORA__MOST_PAGES; i++) {
        g->owners[i] = (int32_t)g->slot;
    }
    g->waiting = -1;
    g->chosen = -1;
    size_t room = (size_t)m->desc.generate_tokens;
    size_t shared = m->desc.generate_sequences > 1 ? vocab : 0;
    g->bytes = (vocab * 3 + shared + ints + room + stop_count) * 4 + vocab * 3;
    g->memory = (char*)qlora__alloc(ctx, g->bytes);
    if (g->memory == NULL) {
        qlora__generation_free(g);
        return QLORA_ERR_MEMORY;
    }
    g->logits = (float*)(void*)g->memory;
    g->first = shared > 0 ? g->logits + vocab : NULL;
    g->weights = g->logits + vocab + shared;
    g->order = (int32_t*)(void*)(g->weights + vocab);
    g->ints = g->order + vocab;
    g->text = g->ints + ints;
    g->stops = g->text + room;
    g->raw = (uint16_t*)(void*)(g->stops + stop_count);
    g->seen = (uint8_t*)(g->raw + vocab);
    memset(g->seen, 0, vocab);
    g->stop_count = (int64_t)stop_count;
    for (size_t i = 0; i < stop_count; i++) {
        g->stops[i] = stops[i];
    }
    *out = g;
    return QLORA_OK;
}

// Runs the next tokens of the text; their output is then in m->work.x.
static qlora_result qlora__generate_run(qlora_generation* g, const int32_t* ids, int64_t rows) {
    qlora_ctx* ctx = g->ctx;
    qlora_model* m = g->m;
    QLORA__TRY(qlora__copy_in(ctx, m->batch.ids.data, ids, (size_t)rows * 4));
    for (int64_t i = 0; i < rows; i++) {
        g->ints[i] = (int32_t)(g->length + i);
    }
    QLORA__TRY(qlora__copy_in(ctx, m->batch.positions.data, g->ints, (size_t)rows * 4));
    if (qlora__has_two_rotations(m)) {
        for (int64_t i = 0; i < rows; i++) {
            g->ints[i] = (int32_t)qlora__angle_row(m, g->length + i, g->is_long);
        }
        QLORA__TRY(qlora__copy_in(ctx, m->batch.angles.data, g->ints, (size_t)rows * 4));
    }
    if (rows > 1) {
        g->ints[0] = 0;
        g->ints[1] = (int32_t)rows;
        QLORA__TRY(qlora__copy_in(ctx, m->batch.seqs.data, g->ints, 8));
    }
    qlora__pass pass = qlora__pass_of(m, rows, false);
    pass.sequences = 1;
    pass.decoding = true;
    pass.first = g->length;
    pass.cache = qlora__pages_row(g);
    QLORA__TRY(qlora__forward(&pass));
    g->length += rows;
    g->computed += rows;
    return QLORA_OK;
}

static qlora_result qlora__generate_not_finite(const qlora_generation* g, int64_t token) {
    return qlora__fail(g->ctx, QLORA_ERR_STATE,
                       "the logit of token %lld after position %lld is not finite; check the "
                       "weights and the adapter",
                       (long long)token, (long long)(g->length - 1));
}

// Copies the logits after the last row of a pass to the host.
static qlora_result qlora__generate_logits(qlora_generation* g, int64_t rows) {
    qlora_ctx* ctx = g->ctx;
    qlora_model* m = g->m;
    int64_t vocab = m->plan.config.vocab;
    qlora__pass pass = qlora__pass_of(m, rows, false);
    QLORA__TRY(qlora__head_logits(&pass, rows - 1, 1));
    if (m->work.logits.dtype == QLORA_F32) {
        QLORA__TRY(qlora__floats_out(ctx, m->work.logits.data, vocab, g->logits));
    } else {
        QLORA__TRY(qlora__copy_out(ctx, g->raw, m->work.logits.data, (size_t)vocab * 2));
        for (int64_t i = 0; i < vocab; i++) {
            g->logits[i] = qlora__bf16_to(g->raw[i]);
        }
    }
    for (int64_t i = 0; i < vocab; i++) {
        if (!qlora__finite(g->logits[i])) {
            return qlora__generate_not_finite(g, i);
        }
    }
    return QLORA_OK;
}

// The next positions are run with this adapter, or with none.
static void qlora__generate_worn(qlora_generation* g, int32_t adapter) {
    g->worn = g->length == 0 || g->worn == adapter ? adapter : QLORA__WORN_MIXED;
}

// Switches the model to an adapter, or to none. Returns whether adapters were on.
static bool qlora__generate_wear(qlora_model* m, int32_t adapter) {
    bool before = m->use_adapters;
    m->use_adapters = adapter >= 0;
    qlora__adapter_focus(m, adapter >= 0 ? adapter : m->chosen);
    return before;
}

// Ends what qlora__generate_wear began.
static qlora_result qlora__generate_bare(qlora_model* m, bool before, qlora_result r) {
    m->use_adapters = before;
    return qlora__adapter_leave(m, r);
}

// Appends the token that was returned last, if it is not in the cache, and `count` more to a text
// of `end` tokens, and runs those that are not in the cache: as many as fit in each pass.
static qlora_result qlora__generate_extend(qlora_generation* g, int64_t end, const int32_t* ids,
                                           int64_t count) {
    int64_t rows = 0;
    g->broken = true;
    g->chosen = -1;
    g->chose = false;
    g->on_device = false;
    if (g->waiting >= 0) {
        g->text[end++] = g->waiting;
        g->waiting = -1;
    }
    for (int64_t i = 0; i < count; i++) {
        g->text[end++] = ids[i];
    }
    for (int64_t i = g->length; i < end; i++) {
        g->seen[g->text[i]] = 1;
    }
    QLORA__TRY(qlora__pages_settle(g));
    while (g->length < end) {
        rows = qlora__min(end - g->length, g->m->plan.tokens);
        QLORA__TRY(qlora__generate_run(g, g->text + g->length, rows));
    }
    QLORA__TRY(qlora__generate_logits(g, rows));
    g->broken = false;
    return QLORA_OK;
}

// Prepares a text for having `tokens` tokens. If it is rotated otherwise than before, nothing in
// the cache can be kept: transformers drops its cache then, too.
static void qlora__generate_rotate(qlora_generation* g, int64_t tokens) {
    bool is_long = qlora__is_long(g->m, tokens);
    g->length = g->is_long == is_long ? g->length : 0;
    g->is_long = is_long;
}

// The tokens of a text between two steps.
static int64_t qlora__generate_tokens(const qlora_generation* g) {
    return g->length + (g->waiting >= 0 ? 1 : 0) + g->due;
}

// Whether the next step of a text must compute all of it again.
static bool qlora__generate_outgrows(const qlora_generation* g) {
    return g->waiting >= 0 && g->is_long != qlora__is_long(g->m, g->length + 1);
}

static qlora_result qlora__generate_append(qlora_generation* g, const int32_t* ids, int64_t count) {
    int32_t adapter = qlora__generate_adapter(g->m, &g->desc);
    int64_t end = g->length;
    qlora__generate_rotate(g, end + (g->waiting >= 0 ? 1 : 0) + count);
    qlora__generate_worn(g, adapter);
    bool before = qlora__generate_wear(g->m, adapter);
    return qlora__generate_bare(g->m, before, qlora__generate_extend(g, end, ids, count));
}

// The state of the text, with the token that was returned last, for the steps on the device.
static qlora_result qlora__generate_upload(qlora_generation* g) {
    qlora__decode* d = &g->m->decode;
    size_t vocab = (size_t)g->m->plan.config.vocab;
    qlora__decode_text* text = &d->host[g->slot];
    memset(text, 0, sizeof *text);
    text->token = g->waiting;
    text->position = (int32_t)g->length;
    text->top_k = g->desc.top_k;
    text->temperature = g->desc.temperature;
    text->top_p = g->desc.top_p;
    text->min_p = g->desc.min_p;
    text->penalty = g->desc.repetition_penalty > 0.0f ? g->desc.repetition_penalty : 1.0f;
    text->seed[0] = (uint32_t)g->desc.seed;
    text->seed[1] = (uint32_t)(g->desc.seed >> 32);
    d->stale[g->slot] = 1; // qlora__generate_enlist sends it
    return qlora__copy_in(g->ctx, (uint8_t*)d->seen.data + (size_t)g->slot * vocab, g->seen, vocab);
}

// Tells the device which texts take part in the next step, and what it does not know of them: one
// copy of the rows from the first that has changed to the last.
static qlora_result qlora__generate_enlist(qlora_ctx* ctx, qlora_model* m) {
    qlora__decode* d = &m->decode;
    int64_t first = d->texts;
    int64_t end = 0;
    for (int64_t i = 0; i < d->texts; i++) {
        int32_t value = m->texts.in_flight[i] != NULL && m->texts.in_flight[i]->pending ? 1 : 0;
        if (d->host[i].alive != value || d->stale[i] != 0) {
            d->host[i].alive = value;
            d->stale[i] = 1;
            first = qlora__min(first, i);
            end = i + 1;
        }
    }
    if (first >= end) {
        return QLORA_OK;
    }
    qlora__decode_text* rows = (qlora__decode_text*)d->state.data + first;
    size_t count = (size_t)(end - first);
    QLORA__TRY(qlora__copy_in(ctx, rows, d->host + first, count * sizeof *rows));
    memset(d->stale + first, 0, count);
    return QLORA_OK;
}

// Whether a text can be run now, with the tokens that are due.
static qlora_result qlora__generate_usable(const qlora_generation* g) {
    QLORA__TRY(qlora__model_idle(g->ctx, g->m, "generating"));
    if (g->broken) {
        return qlora__fail(g->ctx, QLORA_ERR_STATE,
                           "an earlier call on this generation failed; end it and begin again");
    }
    return QLORA_OK;
}

static qlora_result qlora__generate_ready(const qlora_generation* g) {
    QLORA__TRY(qlora__generate_usable(g));
    if (g->due > 0) {
        return qlora__fail(g->ctx, QLORA_ERR_STATE,
                           "%lld tokens of the text have not been run; call qlora_generate_slice "
                           "until it has a token",
                           (long long)g->due);
    }
    return QLORA_OK;
}

// Starts a turn: others may share the text as it is now.
static void qlora__generate_turn(qlora_generation* g) {
    g->made = 0;
    g->stopped = false;
    g->asked = g->length;
    if (g->first != NULL) {
        memcpy(g->first, g->logits, (size_t)g->m->plan.config.vocab * sizeof *g->first);
    }
}

// Appends ids to the text and starts a turn; or qlora_generate_slice will.
static qlora_result qlora__generate_give(qlora_generation* g, const int32_t* ids, int64_t count) {
    if (g->desc.in_slices) {
        int64_t at = g->length + (g->waiting >= 0 ? 1 : 0);
        memmove(g->text + at, ids, (size_t)count * sizeof *ids);
        g->due = count;
        g->chosen = -1;
        return QLORA_OK;
    }
    QLORA__TRY(qlora__generate_append(g, ids, count));
    qlora__generate_turn(g);
    return QLORA_OK;
}

// Runs the prompt of a new text, except what it shares with another one.
static qlora_result qlora__generate_start(qlora_generation* g, const qlora_generate_desc* d) {
    const qlora_generation* from = d->share;
    bool alike = from != NULL && from->is_long == qlora__is_long(g->m, d->prompt_tokens);
    int64_t most = alike ? qlora__min(from->length, d->prompt_tokens) : 0;
    int64_t same = 0;
    while (same < most && from->text[same] == d->prompt[same]) {
        same++;
    }
    bool whole = same == d->prompt_tokens && same == from->asked; // `same` is not 0 then
    same = whole ? same : qlora__min(same, d->prompt_tokens - 1);
    bool refer = whole && qlora__decode_ready(g->m);
    if (qlora__paged(g->m)) {
        refer = refer && !qlora__paging_may_outgrow(g, d->prompt_tokens) &&
                !qlora__paging_may_outgrow(from, from->asked);
        int64_t full = refer ? same / g->m->texts.paging.size : 0;
        QLORA__TRY(qlora__paging_begin(g, from, same, full, d->prompt_tokens));
    } else if (same > 0) {
        QLORA__TRY(qlora__pages_share(g, from, same, refer));
    }
    for (int64_t i = 0; i < same; i++) {
        g->text[i] = d->prompt[i];
        g->seen[d->prompt[i]] = 1;
    }
    g->length = same;
    g->worn = same > 0 ? from->worn : g->worn;
    g->is_long = same > 0 && from->is_long;
    if (whole) {
        memcpy(g->logits, from->first, (size_t)g->m->plan.config.vocab * sizeof *g->logits);
        qlora__generate_turn(g);
        return QLORA_OK;
    }
    return qlora__generate_give(g, d->prompt + same, d->prompt_tokens - same);
}

static qlora_result qlora__generate_begin(qlora_ctx* ctx, qlora_model* m,
                                          const qlora_generate_desc* desc, qlora_generation** out) {
    if (out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    QLORA__TRY(qlora__generate_need(ctx, m, desc));
    qlora_generation* g = NULL;
    QLORA__TRY(qlora__generation_create(ctx, m, desc, &g));
    qlora__generate_count(g, true); // so that its pages are known
    qlora_result r = qlora__generate_start(g, desc);
    if (r != QLORA_OK) {
        qlora__generate_count(g, false);
        qlora__generation_free(g);
        return r;
    }
    *out = g;
    return QLORA_OK;
}

qlora_result qlora_generate_begin(qlora_model* model, const qlora_generate_desc* desc,
                                  qlora_generation** out) {
    qlora_ctx* ctx = qlora__model_ctx(model);
    QLORA__ENTER(ctx, "qlora_generate_begin");
    return qlora__leave(ctx, qlora__generate_begin(ctx, model, desc, out));
}

static qlora_ctx* qlora__generation_ctx(const qlora_generation* g) {
    return g != NULL ? g->ctx : NULL;
}

static bool qlora__generate_stops(const qlora_generation* g, int32_t token) {
    for (int64_t i = 0; i < g->stop_count; i++) {
        if (g->stops[i] == token) {
            return true;
        }
    }
    return false;
}

// What begins a step of a text: whether it can have one, and whether its turn ends instead.
static qlora_result qlora__generate_may(qlora_generation* g, int32_t* token, bool* stopped) {
    QLORA__TRY(qlora__generate_ready(g));
    if (g->stopped) {
        return qlora__fail(g->ctx, QLORA_ERR_STATE,
                           "the turn has ended; start the next one with qlora_generate_feed");
    }
    int64_t length = g->length + (g->waiting >= 0 ? 1 : 0);
    bool full = length >= g->m->desc.generate_tokens ||
                (g->desc.max_tokens > 0 && g->made == g->desc.max_tokens);
    *token = -1;
    *stopped = full;
    return QLORA_OK;
}

// Returns the token that was chosen.
static void qlora__generate_take(qlora_generation* g, int32_t chosen, int32_t* token,
                                 bool* stopped) {
    g->waiting = chosen;
    g->chosen = chosen;
    g->made++;
    g->stopped = qlora__generate_stops(g, chosen);
    *token = chosen;
    *stopped = g->stopped;
}

// One token of a text by the operators of a pass, chosen on the host. The token that was returned
// last is run only when its logits are needed, so the last token of a text is never run.
static qlora_result qlora__generate_alone(qlora_generation* g, int32_t* token, bool* stopped) {
    if (g->waiting >= 0) {
        QLORA__TRY(qlora__generate_append(g, NULL, 0));
    }
    g->chose = false;
    qlora__generate_take(g, qlora__sample(g, g->m->plan.config.vocab, g->length - 1), token,
                         stopped);
    return QLORA_OK;
}

// The results of a step for one text.
static qlora_result qlora__generate_result(qlora_generation* g, const qlora__decode_text* text,
                                           int32_t* token, bool* stopped) {
    g->length++;
    g->computed++;
    if (text->bad >= 0) {
        return qlora__generate_not_finite(g, text->bad);
    }
    g->on_device = true;
    g->chose = true;
    g->logprob = text->logprob;
    g->broken = false;
    qlora__generate_take(g, text->chosen, token, stopped);
    return QLORA_OK;
}

// One step on the device for the pending texts of `list`, which have the same adapter; all others
// of the model rest.
static qlora_result qlora__generate_together(qlora_generation* const* list, int64_t count,
                                             int32_t adapter, int32_t* tokens, bool* stopped) {
    qlora_ctx* ctx = list[0]->ctx;
    qlora_model* m = list[0]->m;
    bool follows = qlora__ahead_follows(list, count);
    bool there = follows && m->decode.ahead;
    qlora__ahead_count(&m->decode, follows);
    if (m->decode.ahead && !there) {
        qlora__ahead_forget(m, false);
    }
    for (int64_t i = 0; i < count; i++) {
        qlora_generation* g = list[i];
        if (g->pending) {
            g->broken = true;
            qlora__generate_worn(g, adapter);
            g->text[g->length] = g->waiting;
            g->seen[g->waiting] = 1;
            if (!g->on_device) {
                QLORA__TRY(qlora__generate_upload(g));
            }
            QLORA__TRY(qlora__pages_ensure(g));
        }
    }
    if (!there) {
        QLORA__TRY(qlora__generate_enlist(ctx, m));
    }
    bool before = qlora__generate_wear(m, adapter);
    qlora_result launched = qlora__ahead_launch(list, count, there);
    QLORA__TRY(qlora__generate_bare(m, before, launched));
    qlora_result collected = qlora__ahead_collect(list, count);
    if (collected != QLORA_OK) {
        qlora__ahead_forget(m, false);
        return collected;
    }
    const qlora__decode_text* state = m->decode.host;
    qlora_result r = QLORA_OK;
    for (int64_t i = 0; i < count; i++) { // every text, even if one of them failed
        qlora_generation* g = list[i];
        if (g->pending) {
            qlora_result own = qlora__generate_result(g, &state[g->slot], &tokens[i], &stopped[i]);
            g->pending = false;
            r = r != QLORA_OK ? r : own;
        }
    }
    return r;
}

// Marks the texts that take part in a step on the device with this adapter. Returns their number.
static int64_t qlora__generate_mark(qlora_generation* const* list, int64_t count, int32_t adapter,
                                    const bool* stopped) {
    const qlora_model* m = list[0]->m;
    int64_t pending = 0;
    for (int64_t i = 0; i < m->desc.generate_sequences; i++) {
        if (m->texts.in_flight[i] != NULL) { // a step that failed may have left it
            m->texts.in_flight[i]->pending = false;
        }
    }
    for (int64_t i = 0; i < count && qlora__decode_ready(m); i++) {
        qlora_generation* g = list[i];
        g->pending = !stopped[i] && g->waiting >= 0 && !g->stepped &&
                     qlora__generate_adapter(m, &g->desc) == adapter;
        pending += g->pending ? 1 : 0;
    }
    return pending;
}

static qlora_result qlora__generate_step(qlora_generation* const* list, int64_t count,
                                         int32_t* tokens, bool* stopped) {
    const qlora_model* m = list[0]->m;
    qlora_result r = QLORA_OK; // the first error; texts after it still get their tokens
    for (int64_t i = 0; i < count; i++) {
        QLORA__TRY(qlora__generate_may(list[i], &tokens[i], &stopped[i]));
    }
    for (int64_t i = 0; i < count; i++) {
        qlora_generation* g = list[i];
        g->stopped = stopped[i];
        g->stepped = false;
        bool outgrows = !stopped[i] && qlora__generate_outgrows(g);
        if (!stopped[i] && (g->waiting < 0 || outgrows || !qlora__decode_ready(m))) {
            qlora_result own = qlora__generate_alone(g, &tokens[i], &stopped[i]);
            g->stepped = true;
            r = r != QLORA_OK ? r : own;
        }
    }
    // On the device there are two ways: with the one adapter, and without.
    for (int32_t adapter = 0; adapter >= -1; adapter--) {
        qlora_result own = qlora__generate_mark(list, count, adapter, stopped) > 0
                               ? qlora__generate_together(list, count, adapter, tokens, stopped)
                               : QLORA_OK;
        r = r != QLORA_OK ? r : own;
    }
    return r;
}

static qlora_result qlora__generate_next(qlora_generation* g, int32_t* token, bool* stopped) {
    if (token == NULL || stopped == NULL) {
        return qlora__fail(g->ctx, QLORA_ERR_ARGUMENT, "%s is NULL",
                           token == NULL ? "token" : "stopped");
    }
    return qlora__generate_step(&g, 1, token, stopped);
}

static qlora_result qlora__generate_next_each(qlora_ctx* ctx, qlora_generation* const* list,
                                              int64_t count, int32_t* tokens, bool* stopped) {
    const char* missing = tokens == NULL ? "tokens" : stopped == NULL ? "stopped" : NULL;
    if (missing != NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is NULL", missing);
    }
    for (int64_t i = 0; i < count; i++) {
        if (list[i] == NULL || list[i]->m != list[0]->m) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "generations[%lld] %s", (long long)i,
                               list[i] == NULL ? "is NULL" : "belongs to another model");
        }
        for (int64_t j = 0; j < i; j++) {
            if (list[j] == list[i]) {
                return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                                   "generations[%lld] and generations[%lld] are the same",
                                   (long long)j, (long long)i);
            }
        }
    }
    return qlora__generate_step(list, count, tokens, stopped);
}

qlora_result qlora_generate_next_each(qlora_generation* const* generations, int64_t count,
                                      int32_t* tokens, bool* stopped) {
    if (generations == NULL || count < 1 || generations[0] == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora_ctx* ctx = generations[0]->ctx;
    QLORA__ENTER(ctx, "qlora_generate_next_each");
    qlora__ahead_carry(generations[0]);
    return qlora__leave(ctx, qlora__generate_next_each(ctx, generations, count, tokens, stopped));
}

qlora_result qlora_generate_next(qlora_generation* generation, int32_t* token, bool* stopped) {
    QLORA__ENTER(qlora__generation_ctx(generation), "qlora_generate_next");
    qlora__ahead_carry(generation);
    return qlora__leave(generation->ctx, qlora__generate_next(generation, token, stopped));
}

// Reserves the pages of a turn of a text that has `tokens` tokens when it begins, and keeps the
// first `keep` of those in the cache.
static qlora_result qlora__generate_reserve(qlora_generation* g, int64_t keep, int64_t tokens) {
    if (!qlora__paged(g->m)) {
        return QLORA_OK;
    }
    int64_t need = qlora__paging_need(g, tokens);
    int64_t own = g->is_long == qlora__is_long(g->m, need) ? keep : 0;
    return qlora__paging_reserve(g, keep, own, need, true);
}

static qlora_result qlora__generate_feed(qlora_generation* g, const int32_t* ids, int64_t count) {
    int64_t length = g->length + (g->waiting >= 0 ? 1 : 0);
    QLORA__TRY(qlora__generate_ready(g));
    QLORA__TRY(qlora__generate_ids_check(g->ctx, g->m, "ids", ids, count, length));
    QLORA__TRY(qlora__generate_reserve(g, g->length, length + count));
    return qlora__generate_give(g, ids, count);
}

qlora_result qlora_generate_feed(qlora_generation* generation, const int32_t* ids, int64_t count) {
    QLORA__ENTER(qlora__generation_ctx(generation), "qlora_generate_feed");
    return qlora__leave(generation->ctx, qlora__generate_feed(generation, ids, count));
}

// The last token of a prompt is always run: its logits are needed.
static qlora_result qlora__generate_prompt(qlora_generation* g, const int32_t* ids, int64_t count,
                                           int64_t* kept) {
    QLORA__TRY(qlora__generate_ready(g));
    QLORA__TRY(qlora__generate_ids_check(g->ctx, g->m, "the prompt", ids, count, 0));
    bool alike = g->is_long == qlora__is_long(g->m, count);
    int64_t most = alike ? qlora__min(g->length, count - 1) : 0;
    int64_t same = 0;
    while (same < most && g->text[same] == ids[same]) {
        same++;
    }
    QLORA__TRY(qlora__generate_reserve(g, same, count));
    g->length = same;
    g->waiting = -1;
    memset(g->seen, 0, (size_t)g->m->plan.config.vocab);
    for (int64_t i = 0; i < same; i++) {
        g->seen[g->text[i]] = 1;
    }
    QLORA__TRY(qlora__generate_give(g, ids + same, count - same));
    if (kept != NULL) {
        *kept = same;
    }
    return QLORA_OK;
}

qlora_result qlora_generate_prompt(qlora_generation* generation, const int32_t* ids, int64_t count,
                                   int64_t* kept) {
    QLORA__ENTER(qlora__generation_ctx(generation), "qlora_generate_prompt");
    return qlora__leave(generation->ctx, qlora__generate_prompt(generation, ids, count, kept));
}

static qlora_result qlora__generate_logprob(const qlora_generation* g, double* out) {
    int64_t vocab = g->m->plan.config.vocab;
    double top = (double)g->logits[0];
    double sum = 0.0;
    if (out == NULL) {
        return qlora__fail(g->ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    if (g->chosen < 0) {
        return qlora__fail(g->ctx, QLORA_ERR_STATE,
                           "no token was returned since the text was last changed; call "
                           "qlora_generate_next first");
    }
    if (g->chose) {
        *out = g->logprob;
        return QLORA_OK;
    }
    for (int64_t i = 1; i < vocab; i++) {
        top = (double)g->logits[i] > top ? (double)g->logits[i] : top;
    }
    for (int64_t i = 0; i < vocab; i++) {
        sum += exp((double)g->logits[i] - top);
    }
    *out = (double)g->logits[g->chosen] - top - log(sum);
    return QLORA_OK;
}

qlora_result qlora_generate_logprob(qlora_generation* generation, double* out) {
    QLORA__ENTER(qlora__generation_ctx(generation), "qlora_generate_logprob");
    qlora__ahead_carry(generation);
    return qlora__leave(generation->ctx, qlora__generate_logprob(generation, out));
}

qlora_result qlora_generate_query(qlora_generation* generation, qlora_generation_info* out) {
    QLORA__ENTER(qlora__generation_ctx(generation), "qlora_generate_query");
    qlora__ahead_carry(generation);
    qlora_ctx* ctx = generation->ctx;
    if (out == NULL) {
        return qlora__leave(ctx, qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL"));
    }
    out->tokens = generation->errand != NULL ? generation->slice_tokens
                                             : qlora__generate_tokens(generation);
    out->computed = generation->computed;
    return qlora__leave(ctx, QLORA_OK);
}

qlora_result qlora_generate_end(qlora_generation* generation) {
    if (generation == NULL) {
        return QLORA_OK;
    }
    qlora_ctx* ctx = generation->ctx;
    QLORA__TRY(qlora__enter_destroy(ctx, "qlora_generate_end"));
    if (generation->errand != NULL) {
        generation->m->speaking = NULL;
        qlora__model_errand_end(generation->m, generation->errand, true);
    }
    qlora__generate_count(generation, false);
    qlora__generation_free(generation);
    return qlora__leave(ctx, QLORA_OK);
}

// ---- a whole text -------------------------------------------------------------------------------

static qlora_result qlora__generate(qlora_ctx* ctx, qlora_model* m, const qlora_generate_desc* desc,
                                    qlora_token_fn fn, void* user) {
    if (fn == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "fn is NULL");
    }
    if (desc != NULL && desc->in_slices) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "desc.in_slices is set; begin the text with qlora_generate_begin and "
                           "call qlora_generate_slice");
    }
    qlora_generation* g = NULL;
    QLORA__TRY(qlora__generate_begin(ctx, m, desc, &g));
    qlora_result r = QLORA_OK;
    for (bool stopped = false; r == QLORA_OK && !stopped;) {
        int32_t token = 0;
        r = qlora__generate_next(g, &token, &stopped);
        stopped = stopped || (r == QLORA_OK && !fn(user, token));
    }
    qlora__generate_count(g, false);
    qlora__generation_free(g);
    return r;
}

qlora_result qlora_generate(qlora_model* model, const qlora_generate_desc* desc, qlora_token_fn fn,
                            void* user) {
    qlora_ctx* ctx = qlora__model_ctx(model);
    QLORA__ENTER(ctx, "qlora_generate");
    return qlora__leave(ctx, qlora__generate(ctx, model, desc, fn, user));
}
