// texts.c - several texts of a model: prompts that are shared, and one text that fails. Models and
// prompts are those of step.c.

#define TEXTS_LONG 130 // tokens of a prompt: a page and a little more
#define TEXTS_FRESH 3

static const int32_t texts_no_stops[1] = {-1};

// The n-th way of sampling.
static qlora_generate_desc texts_desc(int n, const int32_t* prompt, int64_t count) {
    qlora_generate_desc d;
    memset(&d, 0, sizeof d);
    d.prompt = prompt;
    d.prompt_tokens = count;
    d.stops = texts_no_stops;
    d.stop_count = 1;
    d.temperature = n == 0 ? 0.0f : 1.0f;
    d.top_k = n == 2 ? 9 : 0;
    d.repetition_penalty = n == 2 ? 1.3f : 0.0f;
    d.seed = (uint64_t)n * 77;
    return d;
}

typedef struct texts_run {
    int32_t tokens[3 * TEXTS_FRESH];
    double logprobs[3 * TEXTS_FRESH];
    int made;
} texts_run;

static bool texts_next(qlora_generation* const* list, texts_run* const* runs, int count) {
    int32_t tokens[4];
    bool stopped[4];
    bool ok = qlora_generate_next_each(list, count, tokens, stopped) == QLORA_OK;
    for (int i = 0; ok && i < count; i++) {
        texts_run* run = runs[i];
        run->tokens[run->made] = tokens[i];
        ok = qlora_generate_logprob(list[i], &run->logprobs[run->made++]) == QLORA_OK;
    }
    if (!ok) {
        printf("%s\n", qlora_last_error(list[0]->ctx));
    }
    return ok;
}

static bool texts_more(qlora_generation* g, texts_run* run) {
    bool ok = true;
    for (int i = 0; ok && i < TEXTS_FRESH; i++) {
        ok = texts_next(&g, &run, 1);
    }
    return ok;
}

static bool texts_same(const texts_run* a, const texts_run* b) {
    return a->made == b->made && memcmp(a->tokens, b->tokens, (size_t)a->made * 4) == 0 &&
           memcmp(a->logprobs, b->logprobs, (size_t)a->made * 8) == 0;
}

static qlora_model* texts_open(qlora_ctx* ctx, bool bf16, int64_t texts) {
    qlora_model* m = NULL;
    step_now = step_ways[4];
    qlora_result r = step_open_texts(ctx, &step_kinds[5], bf16 ? QLORA_MODE_BF16 : QLORA_MODE_F32,
                                     TEXTS_LONG, texts, &m);
    step_now = step_ways[0];
    if (r != QLORA_OK) {
        printf("%s\n", qlora_last_error(ctx));
    }
    return m;
}

// A text of its own: three tokens, three after a changed prompt, three after more ids.
static bool texts_alone(qlora_model* m, int n, const int32_t* prompt, const int32_t* other,
                        texts_run* run) {
    qlora_generation* g = NULL;
    qlora_generate_desc d = texts_desc(n, prompt, TEXTS_LONG);
    memset(run, 0, sizeof *run);
    bool ok = qlora_generate_begin(m, &d, &g) == QLORA_OK && texts_more(g, run);
    if (ok && n == 1) {
        ok = qlora_generate_prompt(g, other, TEXTS_LONG - 20, NULL) == QLORA_OK &&
             texts_more(g, run);
    } else if (ok && n == 2) {
        ok = qlora_generate_feed(g, other, 2) == QLORA_OK && texts_more(g, run);
    }
    return qlora_generate_end(g) == QLORA_OK && ok;
}

// k samples of a prompt cost one prompt, and have the tokens of texts that computed it themselves:
// while others end, begin in their place, go back or go on.
static enum greatest_test_res texts_share(const test_machine* machine, bool bf16) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    qlora_model* m = texts_open(ctx, bf16, 3);
    ASSERT(m != NULL);
    bool pages = qlora__decode_ready(m);
    ASSERT_EQ(bf16 && qlora_ctx_backend(ctx) == QLORA_BACKEND_CUDA, pages);
    int32_t prompt[TEXTS_LONG];
    int32_t other[TEXTS_LONG];
    step_prompt(prompt, TEXTS_LONG);
    memcpy(other, prompt, sizeof other);
    other[50] = (other[50] + 1) % STEP_VOCAB; // where the second prompt goes another way
    texts_run alone[3];
    texts_run runs[3];
    for (int n = 0; n < 3; n++) {
        ASSERT(texts_alone(m, n, prompt, other, &alone[n]));
    }
    ASSERT(memcmp(alone[0].tokens, alone[1].tokens, TEXTS_FRESH * 4) != 0);
    memset(runs, 0, sizeof runs);
    qlora_generation* list[3];
    texts_run* const to[3] = {&runs[0], &runs[1], &runs[2]};
    qlora_generation_info info;
    for (int n = 0; n < 3; n++) { // the third one shares what the second one shares
        qlora_generate_desc d = texts_desc(n, prompt, TEXTS_LONG);
        d.share = n == 0 ? NULL : list[n - 1];
        ASSERT_EQ(QLORA_OK, qlora_generate_begin(m, &d, &list[n]));
        ASSERT_EQ(QLORA_OK, qlora_generate_query(list[n], &info));
        ASSERT_EQ(TEXTS_LONG, (int)info.tokens);
        ASSERT_EQ(n == 0 ? TEXTS_LONG : 0, (int)info.computed);
        ASSERT_EQ(pages ? 0 : n, (int)list[n]->owners[0]);
        ASSERT_EQ(n, (int)list[n]->owners[1]);
        ASSERT(texts_next(&list[n], &to[n], 1)); // so that the texts are not in step
    }
    ASSERT(texts_next(list, to, 3));
    ASSERT(texts_next(list, to, 3));
    // The first one ends, and a text with another prompt takes its place in the cache.
    ASSERT_EQ(QLORA_OK, qlora_generate_end(list[0]));
    qlora_generate_desc d = texts_desc(0, other + 1, TEXTS_LONG - 1);
    ASSERT_EQ(QLORA_OK, qlora_generate_begin(m, &d, &list[0]));
    ASSERT_EQ(0, (int)list[0]->slot);
    ASSERT_EQ(pages ? 1 : 2, (int)list[2]->owners[0]);
    // The second one, whose page the third one uses now, goes back to the first tokens.
    ASSERT_EQ(QLORA_OK, qlora_generate_prompt(list[1], other, TEXTS_LONG - 20, NULL));
    ASSERT_EQ(2, (int)list[2]->owners[0]);
    ASSERT(texts_more(list[1], &runs[1]));
    ASSERT_EQ(QLORA_OK, qlora_generate_feed(list[2], other, 2));
    ASSERT(texts_more(list[2], &runs[2]));
    for (int n = 0; n < 3; n++) {
        ASSERT(texts_same(&alone[n], &runs[n]));
        ASSERT_EQ(QLORA_OK, qlora_generate_end(list[n]));
    }
    ASSERT_EQ(QLORA_OK, qlora_model_close(m));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

TEST samples_share_a_prompt(const test_machine* machine) {
    return texts_share(machine, false);
}

TEST samples_share_pages(const test_machine* machine) {
    return texts_share(machine, true);
}

// A prompt that goes on differently shares what is the same.
TEST a_part_of_a_prompt_is_shared(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    bool bf16 = qlora_ctx_backend(ctx) == QLORA_BACKEND_CUDA;
    qlora_model* m = texts_open(ctx, bf16, 2);
    ASSERT(m != NULL);
    int32_t prompt[TEXTS_LONG + 3];
    step_prompt(prompt, TEXTS_LONG + 3);
    texts_run runs[3];
    memset(runs, 0, sizeof runs);
    // What is computed after the shared part has the bits of a text that goes on.
    qlora_generation* a = NULL;
    qlora_generation* b = NULL;
    qlora_generation_info info;
    qlora_generate_desc d = texts_desc(1, prompt, TEXTS_LONG);
    ASSERT_EQ(QLORA_OK, qlora_generate_begin(m, &d, &a));
    d = texts_desc(1, prompt, TEXTS_LONG + 3);
    d.share = a;
    ASSERT_EQ(QLORA_OK, qlora_generate_begin(m, &d, &b));
    ASSERT_EQ(QLORA_OK, qlora_generate_query(b, &info));
    ASSERT_EQ(3, (int)info.computed);
    ASSERT(texts_more(b, &runs[0]));
    ASSERT_EQ(QLORA_OK, qlora_generate_end(b));
    ASSERT_EQ(QLORA_OK, qlora_generate_prompt(a, prompt, TEXTS_LONG + 3, NULL));
    ASSERT(texts_more(a, &runs[1]));
    ASSERT(texts_same(&runs[0], &runs[1]));
    // The text as it was when its turn began is shared as a whole, whatever followed; less of it is
    // computed from the last token on.
    d.share = a;
    ASSERT_EQ(QLORA_OK, qlora_generate_begin(m, &d, &b));
    ASSERT_EQ(QLORA_OK, qlora_generate_query(b, &info));
    ASSERT_EQ(0, (int)info.computed);
    ASSERT_EQ(QLORA_OK, qlora_generate_end(a));
    ASSERT(texts_more(b, &runs[2]));
    ASSERT(texts_same(&runs[0], &runs[2]));
    d = texts_desc(1, prompt, TEXTS_LONG);
    d.share = b;
    ASSERT_EQ(QLORA_OK, qlora_generate_begin(m, &d, &a));
    ASSERT_EQ(QLORA_OK, qlora_generate_query(a, &info));
    ASSERT_EQ(1, (int)info.computed);
    ASSERT_EQ(QLORA_OK, qlora_generate_end(a));
    ASSERT_EQ(QLORA_OK, qlora_generate_end(b));
    ASSERT_EQ(QLORA_OK, qlora_model_close(m));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// A text that shares a page and is fed while it does gets it for itself, one that ends leaves its
// slot as others need it, and what cannot be shared is refused.
TEST shared_pages_come_and_go(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    bool bf16 = qlora_ctx_backend(ctx) == QLORA_BACKEND_CUDA;
    qlora_model* m = texts_open(ctx, bf16, 2);
    ASSERT(m != NULL);
    int32_t prompt[TEXTS_LONG + 3];
    step_prompt(prompt, TEXTS_LONG + 3);
    texts_run runs[5];
    qlora_generation* a = NULL;
    qlora_generation* b = NULL;
    qlora_generation_info info;
    qlora_generate_desc d;
    memset(runs, 0, sizeof runs);
    for (int shares = 0; shares < 2; shares++) {
        d = texts_desc(1, prompt, TEXTS_LONG);
        ASSERT_EQ(QLORA_OK, qlora_generate_begin(m, &d, &a));
        d.prompt = prompt + 1; // the page must not be there from an earlier text
        ASSERT_EQ(QLORA_OK, qlora_generate_begin(m, &d, &b));
        ASSERT_EQ(QLORA_OK, qlora_generate_end(b));
        d.prompt = prompt;
        d.share = a;
        ASSERT_EQ(QLORA_OK, qlora_generate_begin(m, &d, &b));
        ASSERT_EQ(bf16 ? 0 : 1, (int)b->owners[0]);
        qlora_generation* fed = shares == 1 ? b : a;
        ASSERT_EQ(QLORA_OK, qlora_generate_feed(fed, prompt, 2));
        ASSERT_EQ(fed->slot, (int64_t)fed->owners[0]);
        ASSERT(texts_more(fed, &runs[shares]));
        ASSERT_EQ(QLORA_OK, qlora_generate_end(a));
        ASSERT_EQ(QLORA_OK, qlora_generate_end(b));
    }
    ASSERT(texts_same(&runs[0], &runs[1]));
    d = texts_desc(1, prompt, TEXTS_LONG);
    ASSERT_EQ(QLORA_OK, qlora_generate_begin(m, &d, &b));
    // Nothing in common: all of it is computed.
    d = texts_desc(1, prompt + 1, 2);
    ASSERT_EQ(QLORA_OK, qlora_generate_begin(m, &d, &a));
    ASSERT(texts_more(a, &runs[3]));
    ASSERT_EQ(QLORA_OK, qlora_generate_end(a));
    // The same in a slot whose last text ended while it used pages of another one, and then with a
    // prompt that is shared but shorter than a page.
    qlora_generation* c = NULL;
    for (int whole = 0; whole < 2; whole++) {
        qlora_generate_desc lent = texts_desc(1, prompt, TEXTS_LONG);
        lent.share = b;
        ASSERT_EQ(QLORA_OK, qlora_generate_begin(m, &lent, &a));
        ASSERT_EQ(bf16 ? 1 : 0, (int)m->decode.lent[1]);
        ASSERT_EQ(QLORA_OK, qlora_generate_end(a));
        if (whole == 1) {
            ASSERT_EQ(QLORA_OK, qlora_generate_end(b));
            ASSERT_EQ(QLORA_OK, qlora_generate_begin(m, &d, &b));
        }
        memset(&runs[4], 0, sizeof runs[4]);
        d.share = b;
        ASSERT_EQ(QLORA_OK, qlora_generate_begin(m, &d, &c));
        ASSERT_EQ(1, (int)c->slot);
        ASSERT_EQ(0, (int)m->decode.lent[1]);
        ASSERT(texts_more(c, &runs[4]));
        ASSERT(texts_same(&runs[3], &runs[4]));
        ASSERT_EQ(QLORA_OK, qlora_generate_end(c));
        d.share = NULL;
    }
    // What is not a text of the model is refused without being read, and so is a broken text.
    d.share = (qlora_generation*)(void*)&info;
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_generate_begin(m, &d, &a));
    ASSERT(strstr(qlora_last_error(ctx), "desc.share is not a text of this model") != NULL);
    b->broken = true;
    d.share = b;
    ASSERT_EQ(QLORA_ERR_STATE, qlora_generate_begin(m, &d, &a));
    ASSERT(strstr(qlora_last_error(ctx), "desc.share failed") != NULL);
    ASSERT_EQ(QLORA_OK, qlora_generate_end(b));
    ASSERT_EQ(QLORA_OK, qlora_model_close(m));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// The device gets a row of the table with pages of slot 0, in a call that reports an error.
static qlora_result texts_spoil(qlora_generation* g) {
    qlora_ctx* ctx = g->ctx;
    int32_t wrong[QLORA__MOST_PAGES];
    for (int32_t i = 0; i < QLORA__MOST_PAGES; i++) {
        wrong[i] = i;
    }
    size_t bytes = (size_t)g->m->decode.pages * 4;
    char* row = (char*)g->m->decode.table.data + (size_t)g->slot * bytes;
    g->m->decode.lent[g->slot] = QLORA__PAGES_UNKNOWN;
    QLORA__ENTER(ctx, "texts_spoil");
    return qlora__leave(ctx, qlora__copy_in(ctx, row, wrong, bytes));
}

// Every driver call of a text that shares a prompt, or begins where others have pages, fails once.
// The others keep their tokens, and the next attempt succeeds.
TEST sharing_survives_failures(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    const fake_api* fake = test_fake();
    qlora_model* m = texts_open(ctx, true, 3);
    ASSERT(m != NULL);
    int32_t prompt[TEXTS_LONG];
    texts_run alone[2];
    texts_run runs[2];
    qlora_generation* list[3] = {NULL, NULL, NULL};
    texts_run* const to[2] = {&runs[0], &runs[1]};
    memset(alone, 0, sizeof alone);
    memset(runs, 0, sizeof runs);
    step_prompt(prompt, TEXTS_LONG);
    for (int n = 0; n < 2; n++) {
        qlora_generate_desc d = texts_desc(n, prompt, TEXTS_LONG);
        ASSERT_EQ(QLORA_OK, qlora_generate_begin(m, &d, &list[0]));
        ASSERT(texts_more(list[0], &alone[n]));
        ASSERT_EQ(QLORA_OK, qlora_generate_end(list[0]));
    }
    for (int turn = 0; turn < 3; turn++) {
        // The first text, and two that share its prompt.
        qlora_generate_desc d = texts_desc(turn % 2, prompt, TEXTS_LONG);
        d.share = turn == 0 ? NULL : list[0];
        if (turn == 0) {
            ASSERT_EQ(QLORA_OK, qlora_generate_begin(m, &d, &list[0]));
            continue;
        }
        bool done = false;
        for (uint64_t nth = 1; !done; nth++) {
            fake->fail_at("ANY", nth, 2, false);
            done = qlora_generate_begin(m, &d, &list[turn]) == QLORA_OK;
            fake->fail_clear();
            ASSERT(done || strlen(qlora_last_error(ctx)) > 0);
            ASSERT(nth > 3 || !done);
        }
    }
    ASSERT_EQ(0, (int)list[2]->owners[0]);
    ASSERT_EQ(QLORA_OK, qlora_generate_end(list[0]));
    qlora_generate_desc d = texts_desc(0, prompt + 1, 20); // overwrites what was shared
    bool done = false;
    for (uint64_t nth = 1; !done; nth++) {
        fake->fail_at("ANY", nth, 2, false);
        done = qlora_generate_begin(m, &d, &list[0]) == QLORA_OK;
        fake->fail_clear();
    }
    ASSERT_EQ(0, (int)list[0]->slot);
    ASSERT(list[1]->owners[0] != 0 && list[2]->owners[0] != 0);
    // A row of the table that the device may or may not have is sent again.
    ASSERT_EQ(QLORA_OK, texts_spoil(list[1]));
    // list[1] samples as alone[1] did, list[2] as alone[0].
    qlora_generation* const both[2] = {list[2], list[1]};
    for (int i = 0; i < TEXTS_FRESH; i++) {
        ASSERT(texts_next(both, to, 2));
    }
    for (int n = 0; n < 2; n++) {
        ASSERT(texts_same(&alone[n], &runs[n]));
    }
    for (int n = 0; n < 3; n++) {
        ASSERT_EQ(QLORA_OK, qlora_generate_end(list[n]));
    }
    ASSERT_EQ(QLORA_OK, qlora_model_close(m));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// ---- a text that fails

// One of three texts meets a token whose embedding is not finite. The others have the tokens that
// they have without it, in the same call and afterwards.
static enum greatest_test_res texts_fail(const test_machine* machine, bool bf16) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    qlora_model* m = texts_open(ctx, bf16, 3);
    ASSERT(m != NULL);
    ASSERT_EQ(bf16 && qlora_ctx_backend(ctx) == QLORA_BACKEND_CUDA, qlora__decode_ready(m));
    int32_t prompt[8];
    step_prompt(prompt, 8);
    texts_run alone[3];
    memset(alone, 0, sizeof alone);
    for (int n = 0; n < 3; n++) {
        qlora_generation* g = NULL;
        qlora_generate_desc d = texts_desc(n, prompt + n, 4);
        ASSERT_EQ(QLORA_OK, qlora_generate_begin(m, &d, &g));
        ASSERT(texts_more(g, &alone[n]));
        ASSERT_EQ(QLORA_OK, qlora_generate_end(g));
    }
    int32_t poison = STEP_VOCAB - 1;
    for (int n = 0; n < 3; n++) { // a token that the others do not meet
        for (int i = 0; i < TEXTS_FRESH; i++) {
            ASSERT(alone[n].tokens[i] != poison);
        }
    }
    for (int bad = 0; bad < 3; bad++) {
        texts_run runs[3];
        qlora_generation* list[3];
        memset(runs, 0, sizeof runs);
        texts_run* const to[3] = {&runs[0], &runs[1], &runs[2]};
        for (int n = 0; n < 3; n++) {
            qlora_generate_desc d = texts_desc(n, prompt + n, 4);
            ASSERT_EQ(QLORA_OK, qlora_generate_begin(m, &d, &list[n]));
        }
        ASSERT(texts_next(list, to, 3));
        size_t size = qlora_dtype_bytes(m->base.embed.dtype);
        char* row = (char*)m->base.embed.data + (size_t)(poison * m->base.embed.ld) * size;
        char kept[4];
        char broken_row[4] = {(char)0xff, (char)0xff, (char)0xff, (char)0xff};
        ASSERT_EQ(QLORA_OK, qlora__enter(ctx, "test"));
        ASSERT_EQ(QLORA_OK, qlora__copy_out(ctx, kept, row, size));
        ASSERT_EQ(QLORA_OK, qlora__copy_in(ctx, row, broken_row, size));
        ASSERT_EQ(QLORA_OK, qlora__leave(ctx, QLORA_OK));
        list[bad]->waiting = poison;
        list[bad]->on_device = false;
        int32_t tokens[3] = {-7, -7, -7};
        bool stopped[3];
        ASSERT_EQ(QLORA_ERR_STATE, qlora_generate_next_each(list, 3, tokens, stopped));
        ASSERT(strstr(qlora_last_error(ctx), "is not finite") != NULL);
        int others[2] = {bad == 0 ? 1 : 0, bad == 2 ? 1 : 2};
        for (int i = 0; i < 2; i++) {
            texts_run* run = &runs[others[i]];
            run->tokens[run->made] = tokens[others[i]];
            ASSERT_EQ(QLORA_OK,
                      qlora_generate_logprob(list[others[i]], &run->logprobs[run->made++]));
        }
        ASSERT_EQ(QLORA_OK, qlora__enter(ctx, "test"));
        ASSERT_EQ(QLORA_OK, qlora__copy_in(ctx, row, kept, size));
        ASSERT_EQ(QLORA_OK, qlora__leave(ctx, QLORA_OK));
        // The text itself can only end; a call that contains it is refused before anything runs.
        ASSERT_EQ(QLORA_ERR_STATE, qlora_generate_next_each(list, 3, tokens, stopped));
        ASSERT(strstr(qlora_last_error(ctx), "end it and begin again") != NULL);
        ASSERT_EQ(QLORA_OK, qlora_generate_end(list[bad]));
        qlora_generation* const rest[2] = {list[others[0]], list[others[1]]};
        texts_run* const rest_runs[2] = {&runs[others[0]], &runs[others[1]]};
        ASSERT(texts_next(rest, rest_runs, 2));
        for (int i = 0; i < 2; i++) {
            ASSERT(texts_same(&alone[others[i]], rest_runs[i]));
            ASSERT_EQ(QLORA_OK, qlora_generate_end(rest[i]));
        }
    }
    ASSERT_EQ(QLORA_OK, qlora_model_close(m));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

TEST a_text_fails_alone(const test_machine* machine) {
    return texts_fail(machine, false);
}

TEST a_text_fails_alone_on_the_device(const test_machine* machine) {
    return texts_fail(machine, true);
}

// ---- adapters on or off for each text

typedef struct texts_worn {
    qlora_choice adapters;
    bool model; // what the model is set to
} texts_worn;

// A text with its adapters, or four of them together; texts and logits after the prompt.
static bool texts_wear(qlora_model* m, const texts_worn* worn, int count, texts_run* runs,
                       float (*logits)[STEP_VOCAB]) {
    int32_t prompt[8];
    qlora_generation* list[4];
    texts_run* to[4];
    step_prompt(prompt, 8);
    memset(runs, 0, (size_t)count * sizeof *runs);
    bool ok = qlora_adapter_use(m, worn[0].model) == QLORA_OK;
    for (int i = 0; ok && i < count; i++) {
        qlora_generate_desc d = texts_desc(1, prompt, 5);
        d.adapters = worn[i].adapters;
        to[i] = &runs[i];
        ok = qlora_generate_begin(m, &d, &list[i]) == QLORA_OK;
        if (ok) {
            memcpy(logits[i], list[i]->logits, sizeof logits[i]);
        }
    }
    for (int i = 0; ok && i < TEXTS_FRESH; i++) {
        ok = texts_next(list, to, count);
    }
    for (int i = 0; ok && i < count; i++) {
        ok = qlora_generate_feed(list[i], prompt, 2) == QLORA_OK;
    }
    for (int i = 0; ok && i < TEXTS_FRESH; i++) {
        ok = texts_next(list, to, count);
    }
    for (int i = 0; ok && i < count; i++) {
        ok = qlora_generate_end(list[i]) == QLORA_OK;
    }
    if (!ok) {
        printf("%s\n", qlora_last_error(m->ctx));
    }
    return ok;
}

// A text without adapters is that of the base, to the bit, next to others that have them.
static enum greatest_test_res texts_adapters(const test_machine* machine, bool bf16) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    qlora_model* m = texts_open(ctx, bf16, 4);
    ASSERT(m != NULL);
    static const texts_worn alone[2] = {{QLORA_CHOICE_AUTO, false}, {QLORA_CHOICE_AUTO, true}};
    texts_run want[2];
    float want_logits[2][STEP_VOCAB];
    for (int on = 0; on < 2; on++) {
        ASSERT(texts_wear(m, &alone[on], 1, &want[on], &want_logits[on]));
    }
    ASSERT(!texts_same(&want[0], &want[1]));
    for (int i = 0; i < 4; i++) { // also judged by evaluation, with and without adapters
        int32_t ids[5 + TEXTS_FRESH];
        double below = 0.0;
        step_prompt(ids, 5);
        memcpy(ids + 5, want[i / 2].tokens, TEXTS_FRESH * 4);
        ASSERT_EQ(QLORA_OK, qlora_adapter_use(m, i % 2 == 1));
        // The first token, which comes from the prompt, is not judged here.
        double off = step_off(m, ids, 6, TEXTS_FRESH - 1, want[i / 2].logprobs + 1, &below);
        ASSERT(i / 2 == i % 2 ? off <= 0.02 : off > 0.03);
    }
    ASSERT(memcmp(want_logits[0], want_logits[1], sizeof want_logits[0]) != 0);
    for (int model = 0; model < 2; model++) {
        texts_worn mixed[4] = {{QLORA_CHOICE_OFF, false},
                               {QLORA_CHOICE_ON, false},
                               {QLORA_CHOICE_AUTO, false},
                               {QLORA_CHOICE_OFF, false}};
        const int on[4] = {0, 1, model, 0};
        texts_run runs[4];
        float logits[4][STEP_VOCAB];
        mixed[0].model = model == 1;
        ASSERT(texts_wear(m, mixed, 4, runs, logits));
        for (int i = 0; i < 4; i++) {
            ASSERT_MEM_EQ(want_logits[on[i]], logits[i], sizeof logits[i]);
            ASSERT(texts_same(&want[on[i]], &runs[i]));
        }
        ASSERT_EQ(model == 1, m->use_adapters);
    }
    // What is refused.
    int32_t prompt[4] = {1, 2, 3, 4};
    qlora_generation* a = NULL;
    qlora_generation* b = NULL;
    qlora_generate_desc d = texts_desc(0, prompt, 4);
    d.adapter = 1;
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_generate_begin(m, &d, &a));
    ASSERT(strstr(qlora_last_error(ctx), "desc.adapter is 1; without") != NULL);
    d.adapters = QLORA_CHOICE_ON;
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_generate_begin(m, &d, &a));
    ASSERT(strstr(qlora_last_error(ctx), "desc.adapter is 1; ") != NULL);
    d.adapter = 0;
    d.adapters = (qlora_choice)3;
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_generate_begin(m, &d, &a));
    ASSERT(strstr(qlora_last_error(ctx), "desc.adapters is 3; ") != NULL);
    d.adapters = QLORA_CHOICE_OFF;
    ASSERT_EQ(QLORA_OK, qlora_generate_begin(m, &d, &a));
    d.share = a;
    d.adapters = QLORA_CHOICE_ON;
    ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_generate_begin(m, &d, &b));
    ASSERT(strstr(qlora_last_error(ctx), "desc.share was computed with another adapter") != NULL);
    ASSERT_EQ(QLORA_OK, qlora_generate_end(a));
    ASSERT_EQ(QLORA_OK, qlora_model_close(m));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// What a text was computed with decides whether its prompt can be shared, not what it would be
// computed with now.
static enum greatest_test_res texts_switched(const test_machine* machine, bool bf16) {
    static const struct {
        qlora_choice adapters;
        bool shares;
    } rows[] = {{QLORA_CHOICE_AUTO, false}, {QLORA_CHOICE_OFF, false}, {QLORA_CHOICE_ON, true}};
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    qlora_model* m = texts_open(ctx, bf16, 2);
    ASSERT(m != NULL);
    int32_t prompt[5];
    int32_t token = -1;
    bool stopped = false;
    qlora_generation* a = NULL;
    qlora_generation* b = NULL;
    step_prompt(prompt, 5);
    qlora_generate_desc d = texts_desc(0, prompt, 5);
    ASSERT_EQ(QLORA_OK, qlora_generate_begin(m, &d, &a)); // with adapters
    ASSERT_EQ(QLORA_OK, qlora_adapter_use(m, false));
    d.share = a;
    for (int i = 0; i < 3; i++) {
        d.adapters = rows[i].adapters;
        qlora_result r = qlora_generate_begin(m, &d, &b);
        ASSERT_EQ(rows[i].shares ? QLORA_OK : QLORA_ERR_ARGUMENT, r);
        ASSERT_EQ(QLORA_OK, rows[i].shares ? qlora_generate_end(b) : QLORA_OK);
    }
    for (int i = 0; i < 2; i++) { // the second one is run without
        ASSERT_EQ(QLORA_OK, qlora_generate_next(a, &token, &stopped));
    }
    for (int i = 0; i < 3; i++) {
        d.adapters = rows[i].adapters;
        ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_generate_begin(m, &d, &b));
        ASSERT(strstr(qlora_last_error(ctx), "was computed with another adapter") != NULL);
    }
    ASSERT_EQ(QLORA_OK, qlora_generate_end(a));
    ASSERT_EQ(QLORA_OK, qlora_model_close(m));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

TEST adapters_are_switched_between_texts(const test_machine* machine) {
    return texts_switched(machine, false);
}

TEST adapters_are_switched_on_the_device(const test_machine* machine) {
    return texts_switched(machine, true);
}

TEST adapters_belong_to_texts(const test_machine* machine) {
    return texts_adapters(machine, false);
}

TEST adapters_belong_to_texts_on_the_device(const test_machine* machine) {
    return texts_adapters(machine, true);
}

// The texts with adapters and those without take turns on the device: one copy tells it which.
TEST one_copy_enlists_all_texts(const test_machine* machine) {
    enum { TEXTS = 4 };
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    qlora_model* m = texts_open(ctx, true, TEXTS);
    ASSERT(m != NULL);
    int32_t prompt[8];
    qlora_generation* list[TEXTS];
    texts_run alone[TEXTS];
    texts_run runs[TEXTS];
    texts_run* to[TEXTS];
    memset(alone, 0, sizeof alone);
    memset(runs, 0, sizeof runs);
    step_prompt(prompt, 8);
    for (int turn = 0; turn < 2; turn++) {
        for (int i = 0; i < TEXTS; i++) {
            qlora_generate_desc d = texts_desc(1, prompt + i, 5);
            d.adapters = i % 2 == 0 ? QLORA_CHOICE_ON : QLORA_CHOICE_OFF;
            to[i] = &runs[i];
            ASSERT_EQ(QLORA_OK, qlora_generate_begin(m, &d, &list[i]));
            if (turn == 0) {
                ASSERT(texts_more(list[i], &alone[i]));
                ASSERT_EQ(QLORA_OK, qlora_generate_end(list[i]));
            }
        }
    }
    ASSERT(texts_next(list, to, TEXTS)); // from the prompt
    ASSERT(texts_next(list, to, TEXTS));
    uint64_t before = test_fake()->calls("cuMemcpyHtoDAsync_v2");
    ASSERT(texts_next(list, to, TEXTS));
    ASSERT_EQ(2, (int)(test_fake()->calls("cuMemcpyHtoDAsync_v2") - before));
    for (int i = 0; i < TEXTS; i++) {
        ASSERT(texts_same(&alone[i], &runs[i]));
        ASSERT_EQ(QLORA_OK, qlora_generate_end(list[i]));
    }
    ASSERT_EQ(QLORA_OK, qlora_model_close(m));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// ---- longrope: texts that outgrow their factors

#define OUTGROWN_SHORT 12 // tokens of the longest text with short factors
#define OUTGROWN_FRESH 7

static qlora_model* outgrown_open(qlora_ctx* ctx, bool bf16) {
    qlora_model* m = NULL;
    step_short = OUTGROWN_SHORT;
    step_now = step_ways[4];
    qlora_result r = step_open_texts(ctx, &step_kinds[5], bf16 ? QLORA_MODE_BF16 : QLORA_MODE_F32,
                                     16, 3, &m);
    step_now = step_ways[0];
    step_short = 0;
    if (r != QLORA_OK) {
        printf("%s\n", qlora_last_error(ctx));
    }
    return m;
}

// The log-probability of the last token of a text in a pass over what comes before it.
static double outgrown_logprob(qlora_model* m, const int32_t* ids, int32_t count) {
    static float logits[16 * STEP_VOCAB];
    qlora_batch b;
    double sum = 0.0;
    int32_t before = count - 1;
    memset(&b, 0, sizeof b);
    b.ids = ids;
    b.labels = ids;
    b.lengths = &before;
    b.count = 1;
    if (qlora_eval_logits(m, &b, logits) != QLORA_OK) {
        return NAN;
    }
    const float* row = logits + (before - 1) * STEP_VOCAB;
    for (int v = 0; v < STEP_VOCAB; v++) {
        sum += exp((double)row[v]);
    }
    return (double)row[ids[before]] - log(sum);
}

// Of two texts, the second one outgrows its factors. Every token comes from its text as a pass over
// all of it computes it: with short factors as long as it is short, with long factors from then on.
// What is in the cache is computed again once.
static bool outgrown_judge(qlora_model* m, int prompt, int fresh, double limit) {
    int32_t ids[2][OUTGROWN_SHORT + OUTGROWN_FRESH];
    const int counts[2] = {3, prompt};
    qlora_generation* g[2] = {NULL, NULL};
    bool ok = true;
    for (int n = 0; ok && n < 2; n++) {
        step_prompt(ids[n], counts[n]);
        qlora_generate_desc d = texts_desc(n + 1, ids[n], counts[n]);
        ok = qlora_generate_begin(m, &d, &g[n]) == QLORA_OK;
    }
    for (int i = 0; ok && i < fresh; i++) {
        int32_t tokens[2];
        bool stopped[2];
        ok = qlora_generate_next_each(g, 2, tokens, stopped) == QLORA_OK;
        for (int n = 0; ok && n < 2; n++) {
            double logprob = 0.0;
            qlora_generation_info info;
            int count = counts[n] + i;
            int again = count > OUTGROWN_SHORT ? OUTGROWN_SHORT : 0;
            ids[n][count] = tokens[n];
            ok = qlora_generate_logprob(g[n], &logprob) == QLORA_OK &&
                 qlora_generate_query(g[n], &info) == QLORA_OK;
            double off = fabs(logprob - outgrown_logprob(m, ids[n], count + 1));
            if (!ok || !(off <= limit) || info.computed != count + again) {
                printf("token %d: %g off, %d positions computed\n", i, off, (int)info.computed);
                ok = false;
            }
        }
    }
    return qlora_generate_end(g[0]) == QLORA_OK && qlora_generate_end(g[1]) == QLORA_OK && ok;
}

// Texts that stay short, outgrow the short factors and are long from the beginning have the same
// bits alone and with the others.
static bool outgrown_together(qlora_model* m, texts_run* alone) {
    static const int64_t counts[3] = {3, 9, 20};
    int32_t prompt[20];
    texts_run runs[3];
    qlora_generation* list[3] = {NULL, NULL, NULL};
    texts_run* const to[3] = {&runs[0], &runs[1], &runs[2]};
    bool ok = true;
    step_prompt(prompt, 20);
    memset(runs, 0, sizeof runs);
    memset(alone, 0, 3 * sizeof *alone);
    for (int n = 0; ok && n < 3; n++) {
        qlora_generate_desc d = texts_desc(n, prompt, counts[n]);
        ok = qlora_generate_begin(m, &d, &list[0]) == QLORA_OK;
        for (int i = 0; ok && i < OUTGROWN_FRESH; i++) {
            texts_run* own = &alone[n];
            ok = texts_next(list, &own, 1);
        }
        ok = qlora_generate_end(list[0]) == QLORA_OK && ok;
        list[0] = NULL;
    }
    for (int n = 0; ok && n < 3; n++) {
        qlora_generate_desc d = texts_desc(n, prompt, counts[n]);
        ok = qlora_generate_begin(m, &d, &list[n]) == QLORA_OK;
    }
    for (int i = 0; ok && i < OUTGROWN_FRESH; i++) {
        ok = texts_next(list, to, 3);
    }
    for (int n = 0; n < 3; n++) {
        ok = ok && texts_same(&alone[n], &runs[n]);
        ok = qlora_generate_end(list[n]) == QLORA_OK && ok;
    }
    return ok;
}

// What was rotated otherwise is never kept: not for a shorter prompt, not for a text that shares
// one, not when ids are appended. `alone` is the text of 9 tokens that has outgrown its factors.
static bool outgrown_kept(qlora_model* m, const texts_run* alone) {
    int32_t ids[20];
    int64_t kept = -1;
    texts_run runs[4];
    qlora_generation* g = NULL;
    qlora_generation* other = NULL;
    qlora_generation_info info;
    texts_run* run = &runs[0];
    step_prompt(ids, 9);
    memset(runs, 0, sizeof runs);
    qlora_generate_desc d = texts_desc(1, ids, 9);
    bool ok = qlora_generate_begin(m, &d, &g) == QLORA_OK;
    for (int i = 0; ok && i < OUTGROWN_FRESH; i++) {
        ok = texts_next(&g, &run, 1);
    }
    d.share = g; // the prompt of a text that is long now
    ok = ok && qlora_generate_begin(m, &d, &other) == QLORA_OK && texts_more(other, &runs[1]) &&
         qlora_generate_query(other, &info) == QLORA_OK && info.computed == 9 + TEXTS_FRESH - 1;
    ok = qlora_generate_end(other) == QLORA_OK && ok;
    memcpy(ids + 9, run->tokens, sizeof *ids * (OUTGROWN_FRESH - 1));
    ids[15] = (ids[15] + 1) % STEP_VOCAB;
    d.prompt_tokens = 16; // both are long, and differ in the last token
    other = NULL;
    ok = ok && qlora_generate_begin(m, &d, &other) == QLORA_OK &&
         qlora_generate_query(other, &info) == QLORA_OK && info.computed == 1;
    ok = qlora_generate_end(other) == QLORA_OK && ok;
    ok = ok && qlora_generate_prompt(g, ids, 9, &kept) == QLORA_OK && kept == 0 &&
         texts_more(g, &runs[2]) && memcmp(runs[1].tokens, alone->tokens, TEXTS_FRESH * 4) == 0 &&
         texts_same(&runs[1], &runs[2]);
    // Three tokens after the prompt, and two more: a text of 14 tokens, like a prompt of them.
    ok = ok && qlora_generate_feed(g, ids, 2) == QLORA_OK && texts_next(&g, &run, 1);
    memcpy(ids + 12, ids, 2 * sizeof *ids);
    memcpy(ids + 9, runs[2].tokens, TEXTS_FRESH * sizeof *ids);
    ok = qlora_generate_end(g) == QLORA_OK && ok;
    d.share = NULL;
    d.prompt_tokens = 14;
    g = NULL;
    ok = ok && qlora_generate_begin(m, &d, &g) == QLORA_OK && texts_more(g, &runs[3]) &&
         run->tokens[OUTGROWN_FRESH] == runs[3].tokens[0] &&
         memcmp(&run->logprobs[OUTGROWN_FRESH], &runs[3].logprobs[0], sizeof(double)) == 0;
    return qlora_generate_end(g) == QLORA_OK && ok;
}

static enum greatest_test_res texts_outgrow(const test_machine* machine, bool bf16) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    texts_run alone[3];
    qlora_model* m = outgrown_open(ctx, bf16);
    ASSERT(m != NULL);
    ASSERT_EQ(bf16 && qlora_ctx_backend(ctx) == QLORA_BACKEND_CUDA, qlora__decode_ready(m));
    if (bf16 && strcmp(machine->backend, "fake") == 0) { // a step takes long there
        ASSERT(outgrown_judge(m, OUTGROWN_SHORT - 1, 4, 0.1));
    } else {
        ASSERT(outgrown_judge(m, 9, OUTGROWN_FRESH, bf16 ? 0.1 : 1e-4));
        ASSERT(outgrown_together(m, alone));
        ASSERT(outgrown_kept(m, &alone[1]));
    }
    ASSERT_EQ(QLORA_OK, qlora_model_close(m));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

TEST texts_outgrow_their_factors(const test_machine* machine) {
    return texts_outgrow(machine, false);
}

TEST texts_outgrow_them_on_the_device(const test_machine* machine) {
    return texts_outgrow(machine, true);
}

SUITE(texts_suite) {
    RUN_ON(TEST_CPU | TEST_ONE_GPU, texts_outgrow_their_factors);
    RUN_ON(TEST_ONE_GPU, texts_outgrow_them_on_the_device);
    RUN_ON(TEST_ONE_FAKE, one_copy_enlists_all_texts);
    RUN_ON(TEST_EVERYWHERE, samples_share_a_prompt);
    RUN_ON(TEST_TENSOR_CORES, samples_share_pages);
    RUN_ON(TEST_ONE_EACH, a_part_of_a_prompt_is_shared);
    RUN_ON(TEST_ONE_EACH, shared_pages_come_and_go);
    RUN_ON(TEST_ONE_FAKE, sharing_survives_failures);
    RUN_ON(TEST_CPU | TEST_FAKES, a_text_fails_alone);
    RUN_ON(TEST_ONE_FAKE, a_text_fails_alone_on_the_device);
    RUN_ON(TEST_EVERYWHERE, adapters_belong_to_texts);
    RUN_ON(TEST_TENSOR_CORES, adapters_belong_to_texts_on_the_device);
    RUN_ON(TEST_ONE_EACH, adapters_are_switched_between_texts);
    RUN_ON(TEST_TENSOR_CORES, adapters_are_switched_on_the_device);
}
