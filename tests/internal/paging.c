// paging.c - a cache with fewer positions than all texts together could have: the same tokens as
// with a full cache, texts that wait, and what moves of pages leave in them. Models and prompts are
// those of step.c, texts those of texts.c.

// ---- pages alone

enum { PAGES_TEXTS = 6, PAGES_POSITIONS = 200, PAGES_LENGTH = 96 };

// What a position of a text has in the cache: rows are stamped with a number of their own.
typedef struct pages_world {
    qlora_model* m;
    qlora_generation* list[PAGES_TEXTS];
    float stamps[PAGES_TEXTS][PAGES_LENGTH];
    float last;
    test_random random;
} pages_world;

static float* pages_row(pages_world* w, const qlora_generation* g, int64_t layer,
                        int64_t position) {
    int64_t size = w->m->texts.paging.size;
    int64_t row = g->pages[position / size] * size + position % size;
    return (float*)qlora__cache_rows(w->m, layer, row, 1).data;
}

static void pages_write(pages_world* w, qlora_generation* g, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        w->last += 1.0f;
        w->stamps[g->slot][g->length] = w->last;
        for (int64_t l = 0; l < 2; l++) {
            *pages_row(w, g, l, g->length) = w->last + 0.5f * (float)l;
        }
        g->length++;
    }
}

// What is wrong: a row that has changed, or a count. NULL if nothing is.
static const char* pages_fault(pages_world* w) {
    const qlora__paging* p = &w->m->texts.paging;
    int64_t used = 0;
    for (int32_t page = 0; page <= p->pages; page++) {
        int32_t users = 0;
        int writers = 0;
        for (int n = 0; n < PAGES_TEXTS; n++) {
            const qlora_generation* g = w->list[n];
            for (int64_t i = 0; g != NULL && i < g->page_count; i++) {
                users += g->pages[i] == page ? 1 : 0;
                writers += g->pages[i] == page && (i + 1) * p->size > g->length ? 1 : 0;
            }
        }
        if (users != p->users[page]) {
            return "the users of a page";
        }
        if (writers > 0 && users > 1) {
            return "a page that is written to has two users";
        }
        used += users > 0 ? 1 : 0;
    }
    if (used != p->pages - p->free || p->free < 0) {
        return "the number of free pages";
    }
    for (int n = 0; n < PAGES_TEXTS; n++) {
        const qlora_generation* g = w->list[n];
        for (int64_t i = 0; g != NULL && i < g->length; i++) {
            for (int64_t l = 0; l < 2; l++) {
                float want = w->stamps[n][i] + 0.5f * (float)l;
                if (memcmp(pages_row(w, g, l, i), &want, sizeof want) != 0) {
                    return "the contents of a text";
                }
            }
        }
    }
    return NULL;
}

// A new text, alone or with the beginning of another one. False if there was no room.
static bool pages_begin(pages_world* w, int slot) {
    const qlora_generation* from = w->list[test_random_below(&w->random, PAGES_TEXTS)];
    int64_t size = w->m->texts.paging.size;
    qlora_generation* g = (qlora_generation*)calloc(1, sizeof *g);
    g->ctx = w->m->ctx;
    g->m = w->m;
    g->slot = slot;
    int64_t same = from != NULL ? (int64_t)test_random_below(&w->random, 2) * from->length : 0;
    int64_t full = same / size * (int64_t)test_random_below(&w->random, 2);
    int64_t tokens = same > 0 ? same : 1 + (int64_t)test_random_below(&w->random, 40);
    g->desc.max_tokens = 1 + (int64_t)test_random_below(&w->random, 30);
    qlora__generate_count(g, true);
    w->list[slot] = g;
    if (qlora__paging_begin(g, from, same, full, tokens) != QLORA_OK) {
        qlora__generate_count(g, false);
        w->list[slot] = NULL;
        free(g);
        return false;
    }
    for (; g->length < same; g->length++) {
        w->stamps[slot][g->length] = w->stamps[from->slot][g->length];
    }
    if (full == 0) {
        pages_write(w, g, qlora__min(tokens - same, PAGES_LENGTH - g->length));
    }
    return true;
}

// The next turn: more tokens, or fewer of the earlier ones.
static void pages_turn(pages_world* w, qlora_generation* g) {
    int64_t keep = g->length;
    int64_t more = 1 + (int64_t)test_random_below(&w->random, 20);
    if (test_random_below(&w->random, 2) == 1) {
        keep = (int64_t)test_random_below(&w->random, (uint32_t)keep + 1);
    }
    g->desc.max_tokens = 1 + (int64_t)test_random_below(&w->random, 30);
    more = qlora__min(more, PAGES_LENGTH - keep);
    int64_t own = (int64_t)test_random_below(&w->random, 2) * keep; // or all, as longrope needs
    if (qlora__paging_reserve(g, keep, own, qlora__paging_need(g, keep + more), true) == QLORA_OK) {
        g->length = keep;
        pages_write(w, g, more);
    }
}

static bool pages_open(pages_world* w, qlora_ctx* ctx) {
    memset(w, 0, sizeof *w);
    w->random = test_random_start("pages of texts");
    step_room = PAGES_LENGTH;
    step_positions = PAGES_POSITIONS;
    w->m = texts_open(ctx, false, PAGES_TEXTS);
    step_room = STEP_ROOM;
    step_positions = 0;
    return w->m != NULL;
}

// Thousands of texts that begin, go on, go back and end.
TEST pages_keep_their_texts(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    pages_world w;
    int begun = 0;
    int refused = 0;
    int shared = 0;
    ASSERT(pages_open(&w, ctx));
    ASSERT_EQ(16, (int)w.m->texts.paging.size);
    ASSERT_EQ(13, (int)w.m->texts.paging.pages);
    for (int i = 0; i < 20000; i++) {
        int slot = (int)test_random_below(&w.random, PAGES_TEXTS);
        qlora_generation* g = w.list[slot];
        uint64_t what = test_random_below(&w.random, 8);
        ASSERT_EQ(QLORA_OK, qlora__enter(ctx, "test"));
        if (g == NULL) {
            bool room = pages_begin(&w, slot);
            begun += room ? 1 : 0;
            refused += room ? 0 : 1;
        } else if (what < 2) {
            qlora__generate_count(g, false);
            free(g);
            w.list[slot] = NULL;
        } else if (what < 4) {
            pages_turn(&w, g);
        } else if (g->length < g->page_count * w.m->texts.paging.size && g->length < PAGES_LENGTH) {
            pages_write(&w, g, 1); // as a step on the device does, wherever the page is
        }
        for (int64_t page = 0; page <= w.m->texts.paging.pages; page++) {
            shared += w.m->texts.paging.users[page] > 1 ? 1 : 0;
        }
        (void)qlora__leave(ctx, QLORA_OK);
        const char* fault = pages_fault(&w);
        ASSERTm(fault, fault == NULL);
    }
    printf("%d begun, %d refused, %d shared pages\n", begun, refused, shared);
    ASSERT(begun > 1000 && refused > 100 && shared > 1000);
    // The check itself: two texts with the same page, and a page that was not copied.
    int slot = 0;
    while (w.list[slot] == NULL || w.list[slot]->length == 0) {
        slot++;
    }
    int32_t page = w.list[slot]->pages[0];
    int32_t other = (page + 1) % (int32_t)w.m->texts.paging.pages;
    w.list[slot]->pages[0] = other;
    ASSERT(pages_fault(&w) != NULL);
    w.m->texts.paging.users[page]--;
    w.m->texts.paging.users[other]++;
    ASSERT(pages_fault(&w) != NULL);
    for (int n = 0; n < PAGES_TEXTS; n++) {
        if (w.list[n] != NULL) {
            qlora__generate_count(w.list[n], false);
            free(w.list[n]);
        }
    }
    ASSERT_EQ(QLORA_OK, qlora_model_close(w.m));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// ---- texts

enum { PAGING_TEXTS = 5, PAGING_FRESH = 6, PAGING_ROOM = 400 };

// Texts that begin in this order, each as soon as there is room for it.
typedef struct paging_text {
    int64_t prompt;
    int64_t fresh;
    int64_t share; // the text before it that it shares with; -1 = none
    int64_t fed;   // tokens with which its second turn begins; 0 = it has one turn
} paging_text;

static const paging_text paging_texts[PAGING_TEXTS] = {
    {140, 5, -1, 0}, {30, 3, -1, 120}, {260, 6, -1, 0}, {260, 3, 2, 2}, {9, 6, -1, 0}};

typedef struct paging_run {
    int32_t tokens[2 * PAGING_FRESH];
    double logprobs[2 * PAGING_FRESH];
    int made;
    bool second; // its second turn has begun
    bool done;
} paging_run;

static qlora_result paging_begin(qlora_model* m, int n, const int32_t* prompt,
                                 qlora_generation* const* list, qlora_generation** out) {
    const paging_text* t = &paging_texts[n];
    int64_t other = t->share >= 0 ? t->share : n; // prompts differ by where they begin
    qlora_generate_desc d = texts_desc(n % 3, prompt + other, t->prompt);
    d.max_tokens = t->fresh;
    d.share = t->share >= 0 ? list[t->share] : NULL;
    return qlora_generate_begin(m, &d, out);
}

// A step of all texts; those whose turn has ended end, or have their second turn if there is room.
static bool paging_step(const int32_t* prompt, qlora_generation** list, paging_run* runs,
                        int* full) {
    qlora_generation* now[PAGING_TEXTS];
    int which[PAGING_TEXTS];
    int32_t tokens[PAGING_TEXTS];
    bool stopped[PAGING_TEXTS];
    int count = 0;
    for (int n = 0; n < PAGING_TEXTS; n++) {
        if (list[n] != NULL && !list[n]->stopped) {
            which[count] = n;
            now[count++] = list[n];
        }
    }
    if (count > 0 && qlora_generate_next_each(now, count, tokens, stopped) != QLORA_OK) {
        return false;
    }
    for (int i = 0; i < count; i++) {
        paging_run* run = &runs[which[i]];
        if (tokens[i] >= 0) {
            run->tokens[run->made] = tokens[i];
            if (qlora_generate_logprob(now[i], &run->logprobs[run->made++]) != QLORA_OK) {
                return false;
            }
        }
    }
    for (int n = 0; n < PAGING_TEXTS; n++) {
        if (list[n] == NULL || !list[n]->stopped) {
            continue;
        }
        qlora_result r = QLORA_OK;
        if (paging_texts[n].fed > 0 && !runs[n].second) {
            r = qlora_generate_feed(list[n], prompt + 7, paging_texts[n].fed);
            runs[n].second = r == QLORA_OK;
            *full += r == QLORA_ERR_FULL ? 1 : 0;
            r = r == QLORA_ERR_FULL ? QLORA_OK : r;
        } else {
            r = qlora_generate_end(list[n]);
            list[n] = NULL;
            runs[n].done = true;
        }
        if (r != QLORA_OK) {
            return false;
        }
    }
    return true;
}

// Runs all texts; *full counts how often one had to wait, *shared is whether one had pages of
// another.
static bool paging_all(qlora_model* m, paging_run* runs, int* full, bool* shared) {
    int32_t prompt[PAGING_ROOM];
    qlora_generation* list[PAGING_TEXTS] = {NULL, NULL, NULL, NULL, NULL};
    int next = 0;
    bool ok = true;
    step_prompt(prompt, PAGING_ROOM);
    memset(runs, 0, PAGING_TEXTS * sizeof *runs);
    *full = 0;
    *shared = false;
    for (int i = 0; ok && i < 100; i++) {
        while (ok && next < PAGING_TEXTS) {
            qlora_result r = paging_begin(m, next, prompt, list, &list[next]);
            if (r == QLORA_ERR_FULL) {
                ++*full;
                break;
            }
            ok = r == QLORA_OK;
            next++;
        }
        for (int64_t page = 0; page < m->texts.paging.pages; page++) {
            *shared = *shared || m->texts.paging.users[page] > 1;
        }
        ok = ok && paging_step(prompt, list, runs, full);
    }
    for (int n = 0; n < PAGING_TEXTS; n++) {
        ok = qlora_generate_end(list[n]) == QLORA_OK && ok && runs[n].done;
    }
    if (!ok) {
        printf("%s\n", qlora_last_error(m->ctx));
    }
    return ok;
}

static qlora_model* paging_open(qlora_ctx* ctx, bool bf16, int64_t positions) {
    step_room = PAGING_ROOM;
    step_positions = positions;
    qlora_model* m = texts_open(ctx, bf16, PAGING_TEXTS);
    step_room = STEP_ROOM;
    step_positions = 0;
    return m;
}

static bool paging_same(const paging_run* a, const paging_run* b) {
    for (int n = 0; n < PAGING_TEXTS; n++) {
        if (a[n].made != b[n].made || a[n].made < 3 ||
            memcmp(a[n].tokens, b[n].tokens, (size_t)a[n].made * 4) != 0 ||
            memcmp(a[n].logprobs, b[n].logprobs, (size_t)a[n].made * 8) != 0) {
            printf("text %d differs\n", n);
            return false;
        }
    }
    return true;
}

// The tokens are those of texts with a full cache, to the bit, however small the pool is.
static enum greatest_test_res paging_tokens(const test_machine* machine, bool bf16) {
    static const int64_t positions[] = {384, 512, 640};
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    paging_run want[PAGING_TEXTS];
    paging_run runs[PAGING_TEXTS];
    qlora_model_info info;
    int full = 0;
    bool shared = false;
    qlora_model* m = paging_open(ctx, bf16, 0);
    ASSERT(m != NULL);
    ASSERT_EQ(bf16 && qlora_ctx_backend(ctx) == QLORA_BACKEND_CUDA, qlora__decode_ready(m));
    uint64_t bytes = m->plan.generation;
    ASSERT(paging_all(m, want, &full, &shared));
    ASSERT_EQ(0, full);
    ASSERT_EQ(QLORA_OK, qlora_model_query(m, &info));
    ASSERT_EQ(PAGING_TEXTS * PAGING_ROOM, (int)info.free_positions);
    ASSERT_EQ(QLORA_OK, qlora_model_close(m));
    for (size_t i = 0; i < (test_brief() ? 1 : sizeof positions / sizeof positions[0]); i++) {
        m = paging_open(ctx, bf16, positions[i]);
        ASSERT(m != NULL);
        ASSERT(m->plan.generation < bytes);
        ASSERT(paging_all(m, runs, &full, &shared));
        ASSERT(full > 0);
        ASSERT_EQ(qlora__decode_ready(m) && positions[i] >= 512, shared);
        ASSERT(paging_same(want, runs));
        ASSERT_EQ(QLORA_OK, qlora_model_query(m, &info));
        ASSERT_EQ(info.generate_positions, info.free_positions);
        ASSERT_EQ(positions[i], info.generate_positions);
        ASSERT_EQ(QLORA_OK, qlora_model_close(m));
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

TEST a_pool_has_the_tokens_of_a_full_cache(const test_machine* machine) {
    return paging_tokens(machine, false);
}

TEST a_pool_has_the_tokens_on_the_device(const test_machine* machine) {
    return paging_tokens(machine, true);
}

// ---- failures

// A text that is short, of one page; number 3 has two.
static qlora_generate_desc paging_desc(const qlora_model* m, int n, const int32_t* prompt) {
    qlora_generate_desc d = texts_desc(n % 3, prompt + n, 10);
    d.max_tokens = (n == 3 ? 2 : 1) * m->texts.paging.size - 10;
    return d;
}

// Begins a text, or feeds one if `fed` is not NULL, while every call of a kind fails once. Returns
// how many attempts failed, or -1 if one left pages behind.
static int paging_fail(qlora_model* m, const char* what, const qlora_generate_desc* d,
                       qlora_generation* fed, qlora_generation** out) {
    const fake_api* fake = qlora_ctx_backend(m->ctx) == QLORA_BACKEND_CUDA ? test_fake() : NULL;
    int64_t before = m->texts.paging.free;
    for (uint64_t nth = 1;; nth++) {
        if (fake != NULL) {
            fake->fail_at(what, nth, 2, false);
        }
        qlora_result r =
            fed != NULL ? qlora_generate_feed(fed, d->prompt, 2) : qlora_generate_begin(m, d, out);
        if (fake != NULL) {
            fake->fail_clear();
        }
        if (r == QLORA_OK) {
            return (int)nth - 1;
        }
        if (fake == NULL || (fed == NULL && m->texts.paging.free != before)) {
            printf("%s\n", qlora_last_error(m->ctx));
            return -1;
        }
    }
}

// Pages are moved while other texts use them, and every driver call fails once: the others keep
// their tokens. Without room, nothing changes.
static enum greatest_test_res paging_faults(const test_machine* machine, bool bf16) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    bool on_gpu = qlora_ctx_backend(ctx) == QLORA_BACKEND_CUDA;
    int32_t prompt[16];
    texts_run alone[4];
    texts_run runs[4];
    qlora_generation* list[5];
    qlora_generation* gaps[2];
    qlora_generation* none = NULL;
    int64_t size = bf16 ? 128 : 16;
    qlora_model* m = paging_open(ctx, bf16, 5 * size);
    ASSERT(m != NULL);
    ASSERT_EQ(size, m->texts.paging.size);
    step_prompt(prompt, 16);
    memset(alone, 0, sizeof alone);
    memset(runs, 0, sizeof runs);
    for (int n = 0; n < 4; n++) {
        qlora_generate_desc d = paging_desc(m, n, prompt);
        ASSERT_EQ(QLORA_OK, qlora_generate_begin(m, &d, &list[n]));
        ASSERT(texts_more(list[n], &alone[n]));
        ASSERT(texts_more(list[n], &alone[n]));
        if (n == 0) {
            ASSERT_EQ(QLORA_OK, qlora_generate_feed(list[n], prompt, 2));
            ASSERT(texts_more(list[n], &alone[n]));
        }
        ASSERT_EQ(QLORA_OK, qlora_generate_end(list[n]));
    }
    for (int n = 0; n < 3; n++) { // three texts with a gap after each
        qlora_generate_desc d = paging_desc(m, n, prompt);
        ASSERT_EQ(QLORA_OK, qlora_generate_begin(m, &d, &list[n]));
        ASSERT(texts_more(list[n], &runs[n]));
        ASSERT_EQ(QLORA_OK, n < 2 ? qlora_generate_begin(m, &d, &gaps[n]) : QLORA_OK);
    }
    ASSERT_EQ(0, (int)m->texts.paging.free);
    ASSERT_EQ(QLORA_OK, qlora_generate_end(gaps[0]));
    ASSERT_EQ(QLORA_OK, qlora_generate_end(gaps[1]));
    // Too long for now, and too long at all.
    qlora_generate_desc d = paging_desc(m, 3, prompt);
    d.max_tokens += size;
    ASSERT_EQ(QLORA_ERR_FULL, qlora_generate_begin(m, &d, &none));
    ASSERT(strstr(qlora_last_error(ctx), "needs 3 more pages") != NULL);
    ASSERT(strstr(qlora_last_error(ctx), "2 of 5 are free") != NULL);
    if (!bf16) {
        d.max_tokens += 3 * size;
        ASSERT_EQ(QLORA_ERR_ARGUMENT, qlora_generate_begin(m, &d, &none));
        ASSERT(strstr(qlora_last_error(ctx), "but the model has 5 pages") != NULL);
    }
    ASSERT_EQ(NULL, none);
    ASSERT_EQ(2, (int)m->texts.paging.free);
    // Two pages that are not next to each other: others make room.
    d = paging_desc(m, 3, prompt);
    ASSERT(list[0]->pages[0] + 1 != list[1]->pages[0]);
    int failed = paging_fail(m, "ANY", &d, NULL, &list[3]);
    ASSERT(on_gpu ? failed > 4 : failed == 0);
    ASSERT_EQ(list[0]->pages[0] + 1, list[1]->pages[0]);
    ASSERT_EQ(0, (int)m->texts.paging.free);
    qlora_generation* const both[2] = {list[0], list[3]};
    texts_run* const to[2] = {&runs[0], &runs[3]};
    for (int i = 0; i < TEXTS_FRESH; i++) {
        ASSERT(texts_next(both, to, 2));
    }
    ASSERT(texts_more(list[3], &runs[3]));
    // The next turn of the first text needs another page, which is the next one's at first.
    d.prompt = prompt;
    ASSERT_EQ(QLORA_ERR_FULL, qlora_generate_feed(list[0], prompt, 2));
    ASSERT_EQ(QLORA_ERR_FULL, qlora_generate_prompt(list[0], prompt, 12, NULL));
    ASSERT(texts_more(list[2], &runs[2]));
    ASSERT(texts_same(&alone[2], &runs[2]));
    ASSERT_EQ(QLORA_OK, qlora_generate_end(list[2]));
    failed = paging_fail(m, "cuMemcpyDtoDAsync_v2", &d, list[0], NULL);
    ASSERT(on_gpu ? failed > 1 : failed == 0);
    ASSERT(texts_more(list[0], &runs[0]));
    ASSERT(texts_more(list[1], &runs[1]));
    for (int n = 0; n < 4; n++) {
        ASSERT(texts_same(&alone[n], &runs[n]));
        ASSERT_EQ(QLORA_OK, n != 2 ? qlora_generate_end(list[n]) : QLORA_OK);
    }
    ASSERT_EQ(m->texts.paging.pages, m->texts.paging.free);
    ASSERT_EQ(QLORA_OK, qlora_model_close(m));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// A prompt that replaces a page which another text uses, and whose copy fails, ends its text; the
// other one keeps its tokens.
TEST a_failed_prompt_ends_its_text(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    qlora_generation* first = NULL;
    qlora_generation* second = NULL;
    qlora_model* m = paging_open(ctx, true, 5 * 128);
    int32_t prompt[130];
    int32_t other[10];
    int32_t token = 0;
    bool stopped = false;
    texts_run alone;
    texts_run run;
    ASSERT(m != NULL);
    memset(&alone, 0, sizeof alone);
    memset(&run, 0, sizeof run);
    step_prompt(prompt, 130);
    memcpy(other, prompt, sizeof other);
    other[9] = (prompt[9] + 1) % 7;
    qlora_generate_desc d = texts_desc(0, prompt, 130);
    d.max_tokens = 20;
    ASSERT_EQ(QLORA_OK, qlora_generate_begin(m, &d, &first));
    ASSERT(texts_more(first, &alone));
    d.share = first;
    ASSERT_EQ(QLORA_OK, qlora_generate_begin(m, &d, &second));
    ASSERT_EQ(2, (int)m->texts.paging.users[first->pages[0]]);
    test_fake()->fail_at("cuMemcpyDtoDAsync_v2", 1, 2, false);
    ASSERT(qlora_generate_prompt(first, other, 10, NULL) != QLORA_OK);
    test_fake()->fail_clear();
    ASSERT_EQ(QLORA_ERR_STATE, qlora_generate_next(first, &token, &stopped));
    ASSERT(texts_more(second, &run));
    ASSERT(texts_same(&alone, &run));
    ASSERT_EQ(QLORA_OK, qlora_generate_end(first));
    ASSERT_EQ(QLORA_OK, qlora_generate_end(second));
    ASSERT_EQ(m->texts.paging.pages, m->texts.paging.free);
    ASSERT_EQ(QLORA_OK, qlora_model_close(m));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

TEST a_pool_survives_failures(const test_machine* machine) {
    return paging_faults(machine, false);
}

TEST a_pool_survives_failures_on_the_device(const test_machine* machine) {
    return paging_faults(machine, true);
}

// ---- longrope: texts that outgrow their factors

static qlora_result outgrown_begin(qlora_model* m, const int32_t* prompt, int64_t most,
                                   qlora_generation* share, qlora_generation** out) {
    qlora_generate_desc d = texts_desc(1, prompt, TEXTS_LONG);
    d.max_tokens = most;
    d.share = share;
    return qlora_generate_begin(m, &d, out);
}

// A text that can outgrow its factors in its turn has all of its pages for itself from the
// beginning of the turn: it will write to them, and must not stop in the middle.
static enum greatest_test_res paging_outgrown(const test_machine* machine, bool bf16) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    int32_t prompt[TEXTS_LONG + 2];
    qlora_generation* a = NULL;
    qlora_generation* b = NULL;
    qlora_generation_info info;
    texts_run runs[2];
    texts_run* run = runs;
    qlora_model* m = NULL;
    memset(runs, 0, sizeof runs);
    step_prompt(prompt, TEXTS_LONG + 2);
    step_short = TEXTS_LONG + 1;
    step_positions = 2 * 144; // two texts; on the device, two pages and one
    step_now = step_ways[4];
    qlora_result r = step_open_texts(ctx, &step_kinds[5], bf16 ? QLORA_MODE_BF16 : QLORA_MODE_F32,
                                     TEXTS_LONG, 3, &m);
    step_now = step_ways[0];
    step_positions = 0;
    step_short = 0;
    ASSERT_EQm(qlora_last_error(ctx), QLORA_OK, r);
    bool pages = qlora__decode_ready(m);
    ASSERT_EQ(bf16 && qlora_ctx_backend(ctx) == QLORA_BACKEND_CUDA, pages);
    ASSERT_EQ(QLORA_OK, outgrown_begin(m, prompt, 1, NULL, &a));
    if (pages) {
        ASSERT_EQ(QLORA_ERR_FULL, outgrown_begin(m, prompt, 2, a, &b));
    }
    ASSERT_EQ(QLORA_OK, outgrown_begin(m, prompt, 1, a, &b));
    ASSERT_EQ(pages ? 2 : 1, m->texts.paging.users[a->pages[0]]);
    ASSERT_EQ(QLORA_OK, qlora_generate_query(b, &info));
    ASSERT_EQ(0, (int)info.computed);
    ASSERT(texts_next(&b, &run, 1));
    if (pages) { // the feed makes it long
        ASSERT_EQ(QLORA_ERR_FULL, qlora_generate_feed(b, prompt, 1));
        ASSERT(!b->broken && !b->is_long && b->length == TEXTS_LONG);
    }
    ASSERT_EQ(QLORA_OK, qlora_generate_end(a));
    ASSERT_EQ(QLORA_OK, qlora_generate_feed(b, prompt, 1));
    ASSERT(b->is_long);
    ASSERT(texts_next(&b, &run, 1));
    prompt[TEXTS_LONG] = run->tokens[0];
    prompt[TEXTS_LONG + 1] = prompt[0];
    ASSERT_EQ(QLORA_OK, qlora_generate_end(b));
    qlora_generate_desc d = texts_desc(1, prompt, TEXTS_LONG + 2);
    d.max_tokens = 1;
    run = &runs[1];
    ASSERT_EQ(QLORA_OK, qlora_generate_begin(m, &d, &a));
    ASSERT(texts_next(&a, &run, 1));
    ASSERT(runs[0].tokens[1] == runs[1].tokens[0]);
    ASSERT_MEM_EQ(&runs[0].logprobs[1], &runs[1].logprobs[0], sizeof(double));
    ASSERT_EQ(QLORA_OK, qlora_generate_end(a));
    ASSERT_EQ(QLORA_OK, qlora_model_close(m));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

TEST a_pool_has_room_for_what_outgrows(const test_machine* machine) {
    return paging_outgrown(machine, false);
}

TEST a_pool_has_room_for_it_on_the_device(const test_machine* machine) {
    return paging_outgrown(machine, true);
}

SUITE(paging_suite) {
    RUN_ON(TEST_CPU, a_pool_has_room_for_what_outgrows);
    RUN_ON(TEST_ONE_GPU, a_pool_has_room_for_it_on_the_device);
    RUN_ON(TEST_CPU, pages_keep_their_texts);
    RUN_ON(TEST_CPU | TEST_ONE_FAKE, a_pool_has_the_tokens_of_a_full_cache);
    RUN_ON(TEST_ONE_FAKE, a_pool_has_the_tokens_on_the_device);
    RUN_ON(TEST_CPU | TEST_ONE_FAKE, a_pool_survives_failures);
    RUN_ON(TEST_ONE_FAKE, a_pool_survives_failures_on_the_device);
    RUN_ON(TEST_ONE_FAKE, a_failed_prompt_ends_its_text);
}
