// ---- the choice of a token ----------------------------------------------------------------------

typedef struct qlora__generator {
    qlora__pass pass;
    const qlora_generate_desc* desc;
    int64_t most; // new tokens
    const int32_t* stops;
    int64_t stop_count;
    char* memory; // holds the four below
    size_t bytes;
    float* logits;  // [V]; become weights
    int32_t* order; // [V]
    uint16_t* raw;  // [V]
    int32_t* ints;
} qlora__generator;

// The larger weight first, of equals the smaller number.
static bool qlora__sample_before(const float* w, int32_t a, int32_t b) {
    return w[a] > w[b] || (!(w[a] < w[b]) && a < b);
}

static void qlora__sample_sift(const float* w, int32_t* heap, int64_t count, int64_t at) {
    int32_t moved = heap[at];
    for (int64_t child = 2 * at + 1; child < count; child = 2 * at + 1) {
        if (child + 1 < count && qlora__sample_before(w, heap[child + 1], heap[child])) {
            child++;
        }
        if (!qlora__sample_before(w, heap[child], moved)) {
            break;
        }
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = moved;
}

// The kept tokens, largest weight first, at the end of g->order, backwards: the top_k largest, and
// of these the fewest whose weights make up top_p of the whole. Returns how many.
static int64_t qlora__sample_keep(const qlora__generator* g, int64_t vocab, double* sum) {
    const float* w = g->logits;
    int32_t* heap = g->order;
    int64_t most = g->desc->top_k > 0 ? qlora__min(g->desc->top_k, vocab) : vocab;
    double part = g->desc->top_p > 0.0f ? (double)g->desc->top_p : 1.0;
    double whole = 0.0;
    for (int64_t i = 0; i < vocab; i++) {
        heap[i] = (int32_t)i;
        whole += (double)w[i];
    }
    for (int64_t i = vocab / 2 - 1; i >= 0; i--) {
        qlora__sample_sift(w, heap, vocab, i);
    }
    // The weights of the top_k are only known when all of them are out; without top_k we can stop
    // early.
    double stop_at = g->desc->top_k > 0 ? 1e300 : part * whole;
    int64_t kept = 0;
    double out = 0.0;
    while (kept < most && (kept == 0 || out < stop_at)) {
        int64_t last = vocab - 1 - kept;
        int32_t top = heap[0];
        heap[0] = heap[last];
        heap[last] = top;
        qlora__sample_sift(w, heap, last, 0);
        out += (double)w[top];
        kept++;
    }
    double run = 0.0;
    int64_t count = 0;
    while (count < kept && (count == 0 || run < (g->desc->top_k > 0 ? part * out : stop_at))) {
        run += (double)w[heap[vocab - 1 - count]];
        count++;
    }
    *sum = run;
    return count;
}

// A number in [0, 1) that depends on the seed and the position alone.
static double qlora__sample_number(uint64_t seed, int64_t position) {
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    const uint32_t counter[4] = {(uint32_t)position, (uint32_t)((uint64_t)position >> 32),
                                 0x67656eu, 0};
    uint32_t words[4];
    qlora__philox(counter, key, words);
    return ((double)(words[0] >> 5) * 67108864.0 + (double)(words[1] >> 6)) / 9007199254740992.0;
}

// The token that follows, from g->logits.
static int32_t qlora__sample(const qlora__generator* g, int64_t vocab, int64_t position) {
    float* w = g->logits;
    int32_t best = 0;
    for (int64_t i = 1; i < vocab; i++) {
        best = w[i] > w[best] ? (int32_t)i : best;
    }
    if (!(g->desc->temperature > 0.0f)) {
        return best;
    }
    double top = (double)w[best];
    double sum = 0.0;
    for (int64_t i = 0; i < vocab; i++) {
        w[i] = (float)exp(((double)w[i] - top) / (double)g->desc->temperature);
        sum += (double)w[i];
    }
    bool all = g->desc->top_k == 0 && !(g->desc->top_p > 0.0f);
    int64_t count = all ? vocab : qlora__sample_keep(g, vocab, &sum);
    double left = qlora__sample_number(g->desc->seed, position) * sum;
    int32_t token = best;
    for (int64_t i = 0; i < count; i++) {
        int32_t candidate = all ? (int32_t)i : g->order[vocab - 1 - i];
        if (w[candidate] > 0.0f) {
            token = candidate;
            left -= (double)w[candidate];
        }
        if (left < 0.0) {
            break;
        }
    }
    return token; // rounding may leave a rest: then the last one that can be chosen
}

// ---- texts --------------------------------------------------------------------------------------

static qlora_result qlora__generate_need(qlora_ctx* ctx, const qlora_model* m,
                                         const qlora_generate_desc* d, qlora_token_fn fn) {
    int64_t room = m->train.generate_tokens;
    if (d == NULL || fn == NULL || d->reserved_must_be_zero0 != 0 ||
        d->reserved_must_be_zero1 != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s",
                           fn == NULL ? "the function that takes the tokens is NULL"
                                      : "the desc is NULL or was not zeroed");
    }
    QLORA__TRY(qlora__not_in_capture(ctx, "generating"));
    if (room == 0) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "the model was opened without a key/value cache; set the train desc's "
                           "generate_tokens to the longest text");
    }
    if (d->prompt == NULL || d->prompt_tokens <= 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "the prompt is NULL or has %lld tokens; one is the least",
                           (long long)d->prompt_tokens);
    }
    if (d->max_tokens < 0 || d->prompt_tokens >= room || d->max_tokens > room - d->prompt_tokens) {
        return qlora__fail(
            ctx, QLORA_ERR_ARGUMENT,
            "%lld tokens of prompt and %lld new ones; the train desc's generate_tokens has "
            "room for %lld in all",
            (long long)d->prompt_tokens, (long long)d->max_tokens, (long long)room);
    }
    for (int64_t i = 0; i < d->prompt_tokens; i++) {
        if (d->prompt[i] < 0 || d->prompt[i] >= m->plan.config.vocab) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "token %lld of the prompt is %d; the vocabulary has %lld",
                               (long long)i, (int)d->prompt[i], (long long)m->plan.config.vocab);
        }
    }
    if (!(d->temperature >= 0.0f) || !qlora__finite(d->temperature) || d->top_k < 0 ||
        !(d->top_p >= 0.0f && d->top_p <= 1.0f)) {
        return qlora__fail(
            ctx, QLORA_ERR_ARGUMENT,
            "temperature %g (0 or more), top_k %d (0 or more) or top_p %g (0 to 1) is not "
            "valid",
            (double)d->temperature, (int)d->top_k, (double)d->top_p);
    }
    bool none = d->stops != NULL && d->stop_count == 1 && d->stops[0] == -1;
    for (int32_t i = 0; i < d->stop_count && d->stops != NULL && !none; i++) {
        if (d->stops[i] < 0) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "stop %d is %d, which is no token", (int)i,
                               (int)d->stops[i]);
        }
    }
    if (d->stop_count < 0 || (d->stops == NULL && d->stop_count > 0)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "%d stops, but the list is NULL or the count negative",
                           (int)d->stop_count);
    }
    return QLORA_OK;
}

static qlora_result qlora__generator_open(qlora_ctx* ctx, qlora_model* m,
                                          const qlora_generate_desc* d, qlora__generator* g) {
    size_t vocab = (size_t)m->plan.config.vocab;
    size_t ints = (size_t)qlora__max(m->plan.tokens, m->plan.max_sequences + 1);
    memset(g, 0, sizeof *g);
    g->pass = qlora__pass_of(m, 0, false);
    g->desc = d;
    g->most = d->max_tokens > 0 ? d->max_tokens : m->train.generate_tokens - d->prompt_tokens;
    g->stops = d->stops != NULL ? d->stops : m->plan.config.stop_ids;
    g->stop_count = d->stops != NULL ? d->stop_count : m->plan.config.stop_count;
    g->bytes = (vocab * 2 + ints) * 4 + vocab * 2;
    g->memory = (char*)qlora__alloc(ctx, g->bytes);
    if (g->memory == NULL) {
        return QLORA_ERR_MEMORY;
    }
    g->logits = (float*)(void*)g->memory;
    g->order = (int32_t*)(void*)(g->logits + vocab);
    g->ints = g->order + vocab;
    g->raw = (uint16_t*)(void*)(g->ints + ints);
    return QLORA_OK;
}

// Runs the next tokens of a text, which begin at position `first`.
static qlora_result qlora__generate_tokens(qlora__generator* g, const int32_t* ids, int64_t first,
                                           int64_t rows) {
    qlora_ctx* ctx = g->pass.ctx;
    qlora_model* m = g->pass.m;
    QLORA__TRY(qlora__copy_in(ctx, m->batch.ids.data, ids, (size_t)rows * 4));
    for (int64_t i = 0; i < rows; i++) {
        g->ints[i] = (int32_t)(first + i);
    }
    QLORA__TRY(qlora__copy_in(ctx, m->batch.positions.data, g->ints, (size_t)rows * 4));
    if (rows > 1) { // one sequence
        int64_t count = m->plan.max_sequences + 1;
        for (int64_t i = 0; i < count; i++) {
            g->ints[i] = i > 0 ? (int32_t)rows : 0;
        }
        QLORA__TRY(qlora__copy_in(ctx, m->batch.seqs.data, g->ints, (size_t)count * 4));
    }
    g->pass.rows = rows;
    return qlora__generate_pass(&g->pass, first);
}

// The token after `position`, which the last pass ended with.
static qlora_result qlora__generate_choose(qlora__generator* g, int64_t position, int32_t* token) {
    qlora_ctx* ctx = g->pass.ctx;
    const qlora_tensor* logits = &g->pass.m->logits;
    int64_t vocab = logits->cols;
    QLORA__TRY(qlora__generate_head(&g->pass));
    if (logits->dtype == QLORA_F32) {
        QLORA__TRY(qlora__floats_out(ctx, logits->data, vocab, g->logits));
    } else {
        QLORA__TRY(qlora__copy_out(ctx, g->raw, logits->data, (size_t)vocab * 2));
        for (int64_t i = 0; i < vocab; i++) {
            g->logits[i] = qlora__bf16_to(g->raw[i]);
        }
    }
    for (int64_t i = 0; i < vocab; i++) {
        if (!qlora__finite(g->logits[i])) {
            return qlora__fail(
                ctx, QLORA_ERR_STATE,
                "the logit of token %lld after position %lld is not finite; the weights or "
                "the adapters are damaged",
                (long long)i, (long long)position);
        }
    }
    *token = qlora__sample(g, vocab, position);
    return QLORA_OK;
}

static bool qlora__generate_stops(const qlora__generator* g, int32_t token) {
    for (int64_t i = 0; i < g->stop_count; i++) {
        if (g->stops[i] == token) {
            return true;
        }
    }
    return false;
}

static qlora_result qlora__generate_text(qlora__generator* g, qlora_token_fn fn, void* user) {
    const qlora_generate_desc* d = g->desc;
    int64_t at = qlora__min(d->prompt_tokens, g->pass.m->plan.tokens);
    QLORA__TRY(qlora__generate_tokens(g, d->prompt, 0, at));
    for (; at < d->prompt_tokens; at++) {
        QLORA__TRY(qlora__generate_tokens(g, d->prompt + at, at, 1));
    }
    for (int64_t made = 0; made < g->most; made++) {
        int32_t token = 0;
        QLORA__TRY(qlora__generate_choose(g, at - 1, &token));
        if (qlora__generate_stops(g, token) || !fn(user, token) || made + 1 == g->most) {
            break;
        }
        QLORA__TRY(qlora__generate_tokens(g, &token, at, 1));
        at++;
    }
    return QLORA_OK;
}

static qlora_result qlora__generate(qlora_ctx* ctx, qlora_model* m, const qlora_generate_desc* desc,
                                    qlora_token_fn fn, void* user) {
    QLORA__TRY(qlora__generate_need(ctx, m, desc, fn));
    qlora__generator g;
    QLORA__TRY(qlora__generator_open(ctx, m, desc, &g));
    qlora_result r = qlora__generate_text(&g, fn, user);
    qlora__free(ctx, g.memory, g.bytes);
    return r;
}

qlora_result qlora_generate(qlora_model* model, const qlora_generate_desc* desc, qlora_token_fn fn,
                            void* user) {
    qlora_ctx* ctx = qlora_model_ctx(model);
    QLORA__ENTER(ctx, "qlora_generate");
    return qlora__leave(ctx, qlora__generate(ctx, model, desc, fn, user));
}
