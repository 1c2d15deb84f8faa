// ahead.c - steps of decoding that are launched before they are asked for: whatever a caller does
// between two tokens, the texts are those of a model that never runs ahead, to the bit. Models and
// prompts are those of step.c and texts.c.

#define AHEAD_ROOM 48

// What the texts of a scene were, and how often a step was under way that nobody had asked for.
typedef struct ahead_log {
    int32_t tokens[128];
    double logprobs[128];
    int made;
    int used;
} ahead_log;

// How a scene is played: never ahead, or always; and whether the device is done before the host
// looks again.
static int32_t ahead_credit;
static bool ahead_fast;

static bool ahead_says(qlora_ctx* ctx, bool ok) {
    if (!ok) {
        printf("%s\n", qlora_last_error(ctx));
    }
    return ok;
}

// Whether a step is under way that the next token can come from.
static bool ahead_is(const qlora_model* m) {
    return m->decode.ahead && m->decode.calls == m->ctx->calls;
}

// Lets the device finish, without a call that the context counts.
static bool ahead_wait(qlora_ctx* ctx) {
    bool ok = qlora__enter(ctx, "ahead_wait") == QLORA_OK;
    ok = ok && qlora__leave(ctx, qlora__sync(ctx)) == QLORA_OK;
    ctx->calls--;
    return ok;
}

// A token of each text, and what the caller asks about it.
static bool ahead_next(qlora_generation* const* list, int count, ahead_log* log, bool* stopped) {
    int32_t tokens[4];
    bool ends[4];
    qlora_generation_info info;
    qlora_ctx* ctx = list[0]->ctx;
    list[0]->m->decode.credit = ahead_credit;
    bool ok = (count == 1 ? qlora_generate_next(list[0], tokens, ends)
                          : qlora_generate_next_each(list, count, tokens, ends)) == QLORA_OK;
    for (int i = 0; ok && i < count; i++) {
        log->tokens[log->made] = tokens[i];
        log->logprobs[log->made] = 0.0;
        ok = qlora_generate_query(list[i], &info) == QLORA_OK &&
             (tokens[i] < 0 ||
              qlora_generate_logprob(list[i], &log->logprobs[log->made]) == QLORA_OK);
        log->made++;
        if (stopped != NULL) {
            stopped[i] = ends[i];
        }
    }
    log->used += ahead_is(list[0]->m) ? 1 : 0;
    return ahead_says(ctx, ok) && (!ahead_fast || ahead_wait(ctx));
}

static bool ahead_run(qlora_generation* g, int tokens, ahead_log* log) {
    bool ok = true;
    for (int i = 0; ok && i < tokens; i++) {
        ok = ahead_next(&g, 1, log, NULL);
    }
    return ok;
}

static bool ahead_begin(qlora_model* m, int way, int first, int64_t most, qlora_generation** g) {
    int32_t prompt[16];
    step_prompt(prompt, 16);
    qlora_generate_desc d = texts_desc(way, prompt + first, 5);
    d.max_tokens = most;
    return ahead_says(m->ctx, qlora_generate_begin(m, &d, g) == QLORA_OK);
}

typedef bool (*ahead_scene)(qlora_model* m, ahead_log* log);

// Plays a scene in each way, and compares. On a GPU, a step was under way `used` times.
static enum greatest_test_res ahead_play(const test_machine* machine, ahead_scene scene,
                                         int64_t texts, int used) {
    static ahead_log logs[3];
    int first = test_checked(machine) ? 1 : 0; // one way is enough for a sanitizer
    memset(logs, 0, sizeof logs);
    for (int way = first; way < 3 - first; way++) {
        qlora_ctx* ctx = test_open(machine, NULL);
        if (!ctx) {
            SKIPm(test_open_reason());
        }
        bool bf16 = qlora_ctx_backend(ctx) == QLORA_BACKEND_CUDA;
        qlora_model* m = NULL;
        ahead_credit = way == 0 ? 0 : QLORA__AHEAD_MOST;
        ahead_fast = way == 2;
        step_room = AHEAD_ROOM;
        step_now = step_ways[4];
        qlora_result r = step_open_texts(ctx, &step_kinds[5],
                                         bf16 ? QLORA_MODE_BF16 : QLORA_MODE_F32, 16, texts, &m);
        step_now = step_ways[0];
        step_room = STEP_ROOM;
        ASSERT(ahead_says(ctx, r == QLORA_OK));
        ASSERT(scene(m, &logs[way]));
        ASSERT_EQ(logs[first].made, logs[way].made);
        ASSERT_MEM_EQ(logs[first].tokens, logs[way].tokens, sizeof logs[0].tokens);
        ASSERT_MEM_EQ(logs[first].logprobs, logs[way].logprobs, sizeof logs[0].logprobs);
        ASSERT_EQ(way == 0 || !qlora__decode_ready(m) ? 0 : used, logs[way].used);
        ASSERT_EQ(QLORA_OK, qlora_model_close(m));
        ASSERT(test_close_ctx(machine, ctx));
    }
    PASS();
}

// ---- texts and their ends

// Three texts, sampled in three ways. The first token comes from the prompt.
static bool ahead_plain(qlora_model* m, ahead_log* log) {
    bool ok = true;
    for (int way = 0; ok && way < 3; way++) {
        qlora_generation* g = NULL;
        ok = ahead_begin(m, way, 0, 0, &g) && ahead_run(g, 8, log) &&
             qlora_generate_end(g) == QLORA_OK;
    }
    return ok;
}

TEST a_text_is_the_same_ahead(const test_machine* machine) {
    return ahead_play(machine, ahead_plain, 1, 3 * 7);
}

// A stop token ends the turn while the step after it is under way; then the next turn.
static bool ahead_stops(qlora_model* m, ahead_log* log) {
    qlora_generation* g = NULL;
    bool ok = ahead_begin(m, 1, 0, 0, &g) && ahead_run(g, 4, log);
    int32_t stop = log->tokens[3];
    ok = ok && qlora_generate_end(g) == QLORA_OK;
    for (int turn = 0; ok && turn < 2; turn++) { // at once, and after more ids
        int32_t prompt[16];
        bool stopped = false;
        step_prompt(prompt, 16);
        qlora_generate_desc d = texts_desc(1, prompt, 5);
        d.stops = &stop;
        ok = qlora_generate_begin(m, &d, &g) == QLORA_OK;
        for (int i = 0; ok && i < 4 && !stopped; i++) {
            ok = ahead_next(&g, 1, log, &stopped);
        }
        ok = ok && stopped && ahead_is(m) == (ahead_credit > 0 && qlora__decode_ready(m));
        ok = ok && (turn == 0 || (qlora_generate_feed(g, prompt + 5, 2) == QLORA_OK &&
                                  ahead_next(&g, 1, log, &stopped) &&
                                  (stopped || ahead_next(&g, 1, log, &stopped))));
        ok = qlora_generate_end(g) == QLORA_OK && ok;
    }
    return ok;
}

TEST a_stop_ends_a_text_ahead(const test_machine* machine) {
    return ahead_play(machine, ahead_stops, 1, 3 + 3 + 3 + 1);
}

// Texts that end by their length: the last token is known to be the last, and no step follows it.
static bool ahead_ends(qlora_model* m, ahead_log* log) {
    bool ok = true;
    for (int by_room = 0; ok && by_room < 2; by_room++) {
        qlora_generation* g = NULL;
        bool stopped = false;
        int made = 0;
        ok = ahead_begin(m, 0, by_room, by_room ? 0 : 5, &g);
        while (ok && !stopped) {
            ok = ahead_next(&g, 1, log, &stopped);
            made += stopped ? 0 : 1;
            int last = by_room ? AHEAD_ROOM - 5 : 5;
            bool ahead = made > 1 && made < last && qlora__decode_ready(m);
            ok = ok && ahead_is(m) == (ahead && ahead_credit > 0);
        }
        ok = qlora_generate_end(g) == QLORA_OK && ok && made == (by_room ? AHEAD_ROOM - 5 : 5);
    }
    return ok;
}

TEST nothing_runs_past_the_room(const test_machine* machine) {
    return ahead_play(machine, ahead_ends, 1, 3 + AHEAD_ROOM - 5 - 2);
}

// One of two texts ends while both have a step under way; the other goes on, then with a third.
static bool ahead_two(qlora_model* m, ahead_log* log) {
    qlora_generation* list[2] = {NULL, NULL};
    bool stopped[2] = {false, false};
    bool ok = ahead_begin(m, 1, 0, 0, &list[0]) && ahead_run(list[0], 4, log);
    int32_t prompt[16];
    int32_t stop = log->tokens[3];
    ok = ok && qlora_generate_end(list[0]) == QLORA_OK;
    step_prompt(prompt, 16);
    qlora_generate_desc d = texts_desc(1, prompt, 5);
    d.stops = &stop;
    ok = ok && qlora_generate_begin(m, &d, &list[0]) == QLORA_OK &&
         ahead_begin(m, 2, 3, 0, &list[1]);
    while (ok && !stopped[0]) {
        ok = ahead_next(list, 2, log, stopped);
    }
    ok = ok && ahead_run(list[1], 3, log); // the first of them is under way
    ok = ok && qlora_generate_end(list[0]) == QLORA_OK && ahead_begin(m, 0, 2, 0, &list[0]);
    for (int i = 0; ok && i < 4; i++) {
        ok = ahead_next(list, 2, log, stopped);
    }
    // In turns, and then the one that rested while a step of both was under way.
    ok = ok && ahead_run(list[0], 2, log) && ahead_run(list[1], 1, log) &&
         ahead_run(list[0], 1, log) && ahead_next(list, 2, log, stopped) &&
         ahead_next(list, 2, log, stopped) && ahead_run(list[1], 2, log);
    // One that rests since a time when nothing ran ahead, so that the device still has it.
    int32_t credit = ahead_credit;
    ahead_credit = 0;
    ok = ok && ahead_next(list, 2, log, stopped) && ahead_run(list[0], 1, log);
    ahead_credit = credit;
    ok = ok && ahead_run(list[0], 1, log) && ahead_run(list[1], 1, log);
    return qlora_generate_end(list[0]) == QLORA_OK && qlora_generate_end(list[1]) == QLORA_OK &&
           ok;
}

TEST one_of_two_texts_ends(const test_machine* machine) {
    return ahead_play(machine, ahead_two, 2, 3 + 3 + 2 + 3 + 1 + 1 + 1 + 2 + 1 + 2);
}

// ---- what else a caller does between two tokens

static bool ahead_write(qlora_model* m, float value) {
    qlora_parameter_info p;
    bool ok = qlora_parameter_query(m, 0, &p) == QLORA_OK;
    float* values = (float*)malloc((size_t)(p.rows * p.cols) * 4);
    for (int64_t i = 0; ok && i < p.rows * p.cols; i++) {
        values[i] = value * (float)(i % 7 - 3);
    }
    ok = ok && qlora_parameter_write(m, 0, values) == QLORA_OK;
    free(values);
    return ok;
}

static bool ahead_train(qlora_model* m) {
    static const int32_t ids[6] = {1, 17, 42, 3, 3, 58};
    static const int32_t count = 6;
    qlora_trainer* t = NULL;
    qlora_train_desc how;
    qlora_batch b;
    memset(&how, 0, sizeof how);
    memset(&b, 0, sizeof b);
    how.lr = 0.05f;
    b.ids = ids;
    b.labels = ids;
    b.lengths = &count;
    b.count = 1;
    bool ok = qlora_trainer_create(m, &how, &t) == QLORA_OK &&
              qlora_train_micro(t, &b, 5.0) == QLORA_OK && qlora_train_update(t) == QLORA_OK;
    return qlora_trainer_destroy(t) == QLORA_OK && ok;
}

static bool ahead_evaluate(qlora_model* m) {
    static const int32_t ids[6] = {1, 17, 42, 3, 3, 58};
    static const int32_t count = 6;
    qlora_batch b;
    qlora_eval_info info;
    memset(&b, 0, sizeof b);
    b.ids = ids;
    b.labels = ids;
    b.lengths = &count;
    b.count = 1;
    return qlora_eval(m, &b, &info) == QLORA_OK;
}

// Another text in between: with a prompt, one that goes back, and one that goes on.
static bool ahead_other(qlora_model* m, qlora_generation** other, int turn, ahead_log* log) {
    int32_t prompt[16];
    step_prompt(prompt, 16);
    if (turn == 0) {
        return ahead_begin(m, 2, 4, 0, other) && ahead_run(*other, 3, log);
    }
    bool ok = turn == 1 ? qlora_generate_feed(*other, prompt, 2) == QLORA_OK
                        : qlora_generate_prompt(*other, prompt + 4, 3, NULL) == QLORA_OK;
    return ok && ahead_run(*other, 2, log) && (turn < 2 || qlora_generate_end(*other) == QLORA_OK);
}

// One of everything, each while a step is under way that it makes worthless.
static bool ahead_between(qlora_model* m, ahead_log* log) {
    qlora_generation* g = NULL;
    qlora_generation* other = NULL;
    bool ok = ahead_begin(m, 1, 0, 0, &g) && ahead_run(g, 3, log);
    for (int turn = 0; ok && turn < 8; turn++) {
        ok = ahead_is(m) == (ahead_credit > 0 && qlora__decode_ready(m));
        ok = ok && (turn < 3    ? ahead_other(m, &other, turn, log)
                    : turn == 3 ? qlora_adapter_use(m, false) == QLORA_OK
                    : turn == 4 ? qlora_adapter_use(m, true) == QLORA_OK
                    : turn == 5 ? ahead_write(m, 0.05f)
                    : turn == 6 ? ahead_train(m)
                                : ahead_evaluate(m));
        ok = ahead_says(m->ctx, ok) && ahead_run(g, 2, log);
    }
    return qlora_generate_end(g) == QLORA_OK && ok;
}

TEST whatever_is_called_in_between(const test_machine* machine) {
    step_purpose = QLORA_PURPOSE_TRAIN;
    enum greatest_test_res r = ahead_play(machine, ahead_between, 2, 2 + 8 * 2 + 2 + 1 + 1);
    step_purpose = QLORA_PURPOSE_EVALUATE;
    return r;
}

// ---- pages of a pool

// A text ends while a step for it is under way, and another one gets its page.
static bool ahead_pages(qlora_model* m, ahead_log* log) {
    qlora_generation* g[3] = {NULL, NULL, NULL};
    bool ok = true;
    for (int i = 0; ok && i < 3; i++) {
        ok = ahead_begin(m, i, i, i == 1 ? 9 : 20, &g[i]) && ahead_run(g[i], 2, log);
    }
    int32_t page = ok ? g[2]->pages[0] : -1;
    ok = ok && ahead_run(g[2], 2, log) && qlora_generate_end(g[2]) == QLORA_OK;
    g[2] = NULL;
    ok = ok && ahead_begin(m, 1, 7, 30, &g[2]) && g[2]->pages[0] == page &&
         ahead_run(g[2], 3, log) && ahead_run(g[0], 2, log);
    for (int i = 0; i < 3; i++) {
        ok = qlora_generate_end(g[i]) == QLORA_OK && ok;
    }
    return ok;
}

TEST a_page_changes_hands(const test_machine* machine) {
    step_positions = 3 * 128;
    enum greatest_test_res r = ahead_play(machine, ahead_pages, 3, 1 + 1 + 1 + 2 + 2 + 2);
    step_positions = 0;
    return r;
}

// ---- when it pays

// Texts in turns would drop every step: after a few, none is launched. Long texts make up for it.
TEST running_ahead_must_pay(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    qlora_model* m = NULL;
    qlora_generation* g[2];
    int32_t token = 0;
    bool stopped = false;
    ASSERT_EQ(QLORA_OK, step_open_texts(ctx, &step_kinds[5], QLORA_MODE_BF16, 16, 2, &m));
    ASSERT(ahead_begin(m, 0, 0, 0, &g[0]));
    ASSERT(ahead_begin(m, 0, 1, 0, &g[1]));
    for (int i = 0; i < 10; i++) { // the first two tokens come from the prompts
        ASSERT_EQ(QLORA_OK, qlora_generate_next(g[i % 2], &token, &stopped));
        ASSERT_EQ(i == 2 || i == 3, ahead_is(m));
    }
    ASSERT_EQ(0, m->decode.credit);
    m->decode.credit = QLORA__AHEAD_COST - 6; // after so many tokens
    for (int i = 0; i < 10; i++) {
        ASSERT_EQ(QLORA_OK, qlora_generate_next(g[1], &token, &stopped));
        ASSERT_EQ(i >= 5, ahead_is(m));
    }
    ASSERT_EQ(QLORA_OK, qlora_generate_end(g[0]));
    ASSERT_EQ(QLORA_OK, qlora_generate_end(g[1]));
    ASSERT_EQ(QLORA_OK, qlora_model_close(m));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// ---- failures

// Every driver call fails once while steps are launched ahead: the text ends or goes on with the
// right tokens, and another one of the model has its own.
TEST failures_ahead_are_clean(const test_machine* machine) {
    enum { FRESH = 4 };
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    static ahead_log good[2];
    qlora_model* m = NULL;
    qlora_generation* g[2];
    memset(good, 0, sizeof good);
    ahead_credit = QLORA__AHEAD_MOST;
    ahead_fast = false;
    ASSERT_EQ(QLORA_OK, step_open_texts(ctx, &step_kinds[5], QLORA_MODE_BF16, 16, 2, &m));
    for (int i = 0; i < 2; i++) {
        ASSERT(ahead_begin(m, i, i, 0, &g[i]));
        ASSERT(ahead_run(g[i], 40, &good[i]));
        ASSERT_EQ(QLORA_OK, qlora_generate_end(g[i]));
    }
    ASSERT(ahead_begin(m, 1, 1, 0, &g[1]));
    int others = 0;
    int kept = 0; // that nobody needed
    bool reached = true;
    for (uint64_t nth = 1; reached; nth += test_brief() ? 2 : 1) {
        int32_t token = -1;
        bool stopped = false;
        bool ok = true;
        ASSERT(ahead_begin(m, 0, 0, 0, &g[0]));
        uint64_t before = test_fake()->calls("ANY");
        test_fake()->fail_at("ANY", nth, 2, false);
        for (int i = 0; ok && i < FRESH; i++) {
            m->decode.credit = QLORA__AHEAD_MOST;
            ok = qlora_generate_next(g[0], &token, &stopped) == QLORA_OK;
            ASSERT(ok ? token == good[0].tokens[i] : strlen(qlora_last_error(ctx)) > 0);
        }
        reached = test_fake()->calls("ANY") >= before + nth;
        test_fake()->fail_clear();
        kept += reached && ok ? 1 : 0;
        for (int i = 0; i < (others < 38 ? 1 : 0); i++) {
            ASSERT_EQ(QLORA_OK, qlora_generate_next(g[1], &token, &stopped));
            ASSERT_EQ(good[1].tokens[others++], token);
        }
        ASSERT_EQ(QLORA_OK, qlora_generate_end(g[0]));
    }
    ASSERT(others > 5);
    ASSERT(kept > 0);
    for (uint64_t nth = 2; nth < 4; nth++) { // only a step ahead: the text goes on to its end
        ASSERT(ahead_begin(m, 0, 0, FRESH, &g[0]));
        test_fake()->fail_at("cuGraphLaunch", nth, 2, false);
        static ahead_log log;
        memset(&log, 0, sizeof log);
        ASSERT(ahead_run(g[0], FRESH, &log));
        test_fake()->fail_clear();
        ASSERT_MEM_EQ(good[0].tokens, log.tokens, FRESH * sizeof(int32_t));
        ASSERT_MEM_EQ(good[0].logprobs, log.logprobs, FRESH * sizeof(double));
        ASSERT_EQ(QLORA_OK, qlora_generate_end(g[0]));
    }
    ASSERT_EQ(QLORA_OK, qlora_generate_end(g[1]));
    ASSERT_EQ(QLORA_OK, qlora_model_close(m));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// ---- longrope: texts that outgrow their factors

// A text outgrows its factors while a step for another one is under way. That is dropped, and costs
// credit: when a text is computed again, pages of a pool may be moved, without what it wrote.
static bool ahead_outgrown(qlora_model* m, ahead_log* log) {
    qlora_generation* g[2] = {NULL, NULL};
    bool ok = ahead_begin(m, 1, 0, 0, &g[0]) && ahead_begin(m, 2, 1, 0, &g[1]) &&
              ahead_run(g[1], 1, log) && ahead_run(g[0], 3, log) && g[0]->is_long &&
              !g[1]->is_long;
    bool ahead = ok && ahead_is(m);
    ok = ok && ahead_next(g, 2, log, NULL) && g[1]->is_long &&
         (!ahead || m->decode.credit == QLORA__AHEAD_MOST - QLORA__AHEAD_COST);
    return qlora_generate_end(g[0]) == QLORA_OK && qlora_generate_end(g[1]) == QLORA_OK && ok;
}

TEST a_text_outgrows_its_factors_ahead(const test_machine* machine) {
    step_short = 5; // the prompt
    enum greatest_test_res r = ahead_play(machine, ahead_outgrown, 2, 1);
    step_short = 0;
    return r;
}

SUITE(ahead_suite) {
    RUN_ON(TEST_ONE_EACH, a_text_outgrows_its_factors_ahead);
    RUN_ON(TEST_ONE_EACH, a_text_is_the_same_ahead);
    RUN_ON(TEST_ONE_EACH, a_stop_ends_a_text_ahead);
    RUN_ON(TEST_ONE_EACH, nothing_runs_past_the_room);
    RUN_ON(TEST_ONE_EACH, one_of_two_texts_ends);
    RUN_ON(TEST_ONE_EACH, whatever_is_called_in_between);
    RUN_ON(TEST_ONE_EACH, a_page_changes_hands);
    RUN_ON(TEST_ONE_FAKE, running_ahead_must_pay);
    RUN_ON(TEST_ONE_FAKE, failures_ahead_are_clean);
}
