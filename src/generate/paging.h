// ---- a pool of pages for the texts --------------------------------------------------------------
//
// With desc.generate_positions, the texts of a model share a pool of pages that need not have room
// for all of them at full length. A text gets the pages for its tokens and those of a turn when the
// turn begins, so it never stops in the middle; if they are not free, the call fails and nothing
// has changed. Steps on the device find pages by a table. Passes of operators need the pages of
// their text in a row, so pages are moved to make room: a move is a copy to a free page, after
// which all texts that use the page find it there. If the copy fails, they still have the page that
// they had. There is always a free page, because the pool has one more than texts can have.

static bool qlora__paged(const qlora_model* m) {
    return m->texts.paging.size > 0;
}

// Positions that a text of `tokens` tokens can need before its turn ends.
static int64_t qlora__paging_need(const qlora_generation* g, int64_t tokens) {
    int64_t most = g->m->desc.generate_tokens;
    return g->desc.max_tokens > 0 ? qlora__min(tokens + g->desc.max_tokens, most) : most;
}

// Whether a text of `tokens` tokens may be computed again before its turn ends, because it is
// rotated otherwise then. It writes to all of its pages in this case.
static bool qlora__paging_may_outgrow(const qlora_generation* g, int64_t tokens) {
    return qlora__is_long(g->m, tokens) != qlora__is_long(g->m, qlora__paging_need(g, tokens));
}

static void qlora__paging_use(qlora_model* m, int32_t page) {
    m->texts.paging.free -= m->texts.paging.users[page] == 0 ? 1 : 0;
    m->texts.paging.users[page]++;
}

static void qlora__paging_leave(qlora_model* m, int32_t page) {
    m->texts.paging.users[page]--;
    m->texts.paging.free += m->texts.paging.users[page] == 0 ? 1 : 0;
}

// Changes a page of a text. The device is told before its next step.
static void qlora__paging_set(qlora_generation* g, int64_t index, int32_t page) {
    g->pages[index] = page;
    g->m->decode.lent[g->slot] = QLORA__PAGES_UNKNOWN;
}

// Ends the use of all pages from number `count` on.
static void qlora__paging_release(qlora_generation* g, int64_t count) {
    while (g->page_count > count) {
        qlora__paging_leave(g->m, g->pages[--g->page_count]);
    }
}

// Copies the first rows of a page to another page, in every layer.
static qlora_result qlora__paging_copy(qlora_model* m, int32_t from, int32_t to, int64_t rows) {
    int64_t size = m->texts.paging.size;
    for (int64_t l = 0; l < m->plan.config.layers && rows > 0; l++) {
        qlora_tensor source = qlora__cache_rows(m, l, from * size, rows);
        qlora_tensor target = qlora__cache_rows(m, l, to * size, rows);
        size_t bytes = (size_t)(rows * source.ld) * qlora_dtype_bytes(source.dtype);
        QLORA__TRY(qlora__copy_within(m->ctx, target.data, source.data, bytes));
    }
    return QLORA_OK;
}

// Moves a page that is used to one that is free.
static qlora_result qlora__paging_move(qlora_model* m, int32_t from, int32_t to) {
    int64_t rows = 0; // that have keys and values
    for (int64_t n = 0; n < m->desc.generate_sequences; n++) {
        const qlora_generation* g = m->texts.in_flight[n];
        for (int64_t i = 0; g != NULL && i < g->page_count; i++) {
            int64_t own = qlora__min(g->length - i * m->texts.paging.size, m->texts.paging.size);
            rows = g->pages[i] == from ? qlora__max(rows, own) : rows;
        }
    }
    QLORA__TRY(qlora__paging_copy(m, from, to, rows));
    for (int64_t n = 0; n < m->desc.generate_sequences; n++) {
        qlora_generation* g = m->texts.in_flight[n];
        for (int64_t i = 0; g != NULL && i < g->page_count; i++) {
            if (g->pages[i] == from) {
                qlora__paging_set(g, i, to);
            }
        }
    }
    m->texts.paging.users[to] = m->texts.paging.users[from];
    m->texts.paging.users[from] = 0;
    return QLORA_OK;
}

// The first of `count` free pages in a row: of the shortest such row. -1 if there is none.
static int32_t qlora__paging_row(const qlora_model* m, int64_t count) {
    int64_t best = INT64_MAX;
    int32_t found = -1;
    int64_t length = 0;
    for (int64_t page = 0; page <= m->texts.paging.pages + 1; page++) {
        if (page <= m->texts.paging.pages && m->texts.paging.users[page] == 0) {
            length++;
            continue;
        }
        if (length >= count && length < best) {
            best = length;
            found = (int32_t)(page - length);
        }
        length = 0;
    }
    return found;
}

// The last free page; there is one.
static int32_t qlora__paging_last(const qlora_model* m) {
    int32_t page = (int32_t)m->texts.paging.pages;
    while (page > 0 && m->texts.paging.users[page] > 0) {
        page--;
    }
    return page;
}

static bool qlora__paging_has(const qlora_generation* g, int32_t page) {
    for (int64_t i = 0; i < g->page_count; i++) {
        if (g->pages[i] == page) {
            return true;
        }
    }
    return false;
}

static bool qlora__paging_in_a_row(const qlora_generation* g) {
    for (int64_t i = 1; i < g->page_count; i++) {
        if (g->pages[i] != g->pages[0] + i) {
            return false;
        }
    }
    return true;
}

// The text after `g` by the place of its first page, other than `last`; NULL if there is none.
static qlora_generation* qlora__paging_after(const qlora_model* m, const qlora_generation* g,
                                             const qlora_generation* last) {
    qlora_generation* best = NULL;
    for (int64_t n = 0; n < m->desc.generate_sequences; n++) {
        qlora_generation* t = m->texts.in_flight[n];
        if (t == NULL || t == last || t->page_count == 0) {
            continue;
        }
        bool later =
            g == NULL || t->placed > g->placed || (t->placed == g->placed && t->slot > g->slot);
        if (later && (best == NULL || t->placed < best->placed)) {
            best = t;
        }
    }
    return best;
}

// Moves the pages of all texts to the beginning of the pool, those of a text one after the other,
// and those of `last`, of which the others skip what they share with it, after all others.
static qlora_result qlora__paging_compact(qlora_model* m, qlora_generation* last) {
    int32_t end = 0; // of the pages that are in their places
    for (int64_t n = 0; n < m->desc.generate_sequences; n++) {
        qlora_generation* g = m->texts.in_flight[n];
        if (g != NULL && g->page_count > 0) {
            g->placed = g->pages[0]; // where it was: moves change it
        }
    }
    qlora_generation* g = NULL;
    while (g != last) {
        qlora_generation* next = qlora__paging_after(m, g, last);
        g = next != NULL ? next : last;
        for (int64_t i = 0; i < g->page_count; i++) {
            int32_t page = g->pages[i];
            if (page < end || (g != last && qlora__paging_has(last, page))) {
                continue;
            }
            if (page != end) {
                if (m->texts.paging.users[end] > 0) {
                    QLORA__TRY(qlora__paging_move(m, end, qlora__paging_last(m)));
                }
                QLORA__TRY(qlora__paging_move(m, g->pages[i], end));
            }
            end++;
        }
    }
    return QLORA_OK;
}

// Puts the pages of a text in a row.
static qlora_result qlora__paging_arrange(qlora_generation* g) {
    qlora_model* m = g->m;
    if (qlora__paging_in_a_row(g)) {
        return QLORA_OK;
    }
    int32_t row = qlora__paging_row(m, g->page_count);
    for (int64_t i = 0; row >= 0 && i < g->page_count; i++) {
        QLORA__TRY(qlora__paging_move(m, g->pages[i], row + (int32_t)i));
    }
    return row >= 0 ? QLORA_OK : qlora__paging_compact(m, g);
}

static qlora_result qlora__paging_short(const qlora_generation* g, int64_t need, int64_t count,
                                        int64_t wanted, int64_t room) {
    const qlora__paging* pool = &g->m->texts.paging;
    if (count > pool->pages) {
        return qlora__fail(g->ctx, QLORA_ERR_ARGUMENT,
                           "the text can need %lld positions, %lld pages of %lld, but the model "
                           "has %lld pages; begin the text with a smaller desc.max_tokens, or open "
                           "the model with a larger generate_positions (%lld)",
                           (long long)need, (long long)count, (long long)pool->size,
                           (long long)pool->pages, (long long)g->m->desc.generate_positions);
    }
    return qlora__fail(g->ctx, QLORA_ERR_FULL,
                       "the text needs %lld more pages of %lld positions, and %lld of %lld are "
                       "free; try again when other texts have ended",
                       (long long)wanted, (long long)pool->size, (long long)room,
                       (long long)pool->pages);
}

// Pages that a text must get to have `count` of them, those from number `first` on for itself
// alone; *freed are those that it gives back.
static int64_t qlora__paging_wanted(const qlora_generation* g, int64_t first, int64_t count,
                                    int64_t* freed) {
    int64_t wanted = qlora__max(count - g->page_count, 0);
    *freed = 0;
    for (int64_t i = first; i < g->page_count; i++) {
        bool alone = g->m->texts.paging.users[g->pages[i]] == 1;
        wanted += i < count && !alone ? 1 : 0;
        *freed += i >= count && alone ? 1 : 0;
    }
    return wanted;
}

// Gives a text the pages for `need` positions, of which it keeps the first `keep` as they are and
// may write to those from `own` on, at most `keep`; with `row`, one after the other. If too few are
// free, nothing changes.
static qlora_result qlora__paging_reserve(qlora_generation* g, int64_t keep, int64_t own,
                                          int64_t need, bool row) {
    qlora_model* m = g->m;
    int64_t size = m->texts.paging.size;
    int64_t count = qlora__ceil_div(need, size);
    int64_t freed = 0;
    int64_t wanted = qlora__paging_wanted(g, own / size, count, &freed);
    if (count > m->texts.paging.pages || wanted > m->texts.paging.free + freed) {
        return qlora__paging_short(g, need, count, wanted, m->texts.paging.free + freed);
    }
    // From here on, the tokens after the ones that are kept may be lost if a copy fails.
    g->broken = g->broken || keep < g->length;
    qlora__paging_release(g, count);
    for (int64_t i = own / size; i < g->page_count; i++) {
        int32_t old = g->pages[i];
        if (m->texts.paging.users[old] > 1) {
            int32_t page = qlora__paging_last(m);
            QLORA__TRY(qlora__paging_copy(m, old, page, qlora__min(keep - i * size, size)));
            qlora__paging_use(m, page);
            qlora__paging_set(g, i, page);
            qlora__paging_leave(m, old);
        }
    }
    int32_t next =
        g->page_count == 0 ? qlora__paging_row(m, count) : g->pages[g->page_count - 1] + 1;
    for (; g->page_count < count; next++) {
        bool taken = next < 0 || next > m->texts.paging.pages || m->texts.paging.users[next] > 0;
        next = taken ? qlora__paging_last(m) : next;
        qlora__paging_use(m, next);
        qlora__paging_set(g, g->page_count++, next);
    }
    return row ? qlora__paging_arrange(g) : QLORA_OK;
}

// Reserves the pages of a new text, whose first `full` pages are those of `from`, and copies the
// other rows of the `same` positions that both have.
static qlora_result qlora__paging_begin(qlora_generation* g, const qlora_generation* from,
                                        int64_t same, int64_t full, int64_t tokens) {
    qlora_model* m = g->m;
    int64_t size = m->texts.paging.size;
    for (int64_t i = 0; i < full; i++) {
        qlora__paging_use(m, from->pages[i]);
        qlora__paging_set(g, g->page_count++, from->pages[i]);
    }
    // A text that shares its whole prompt is not run by operators.
    QLORA__TRY(qlora__paging_reserve(g, full * size, full * size, qlora__paging_need(g, tokens),
                                     full == 0));
    for (int64_t i = full; i * size < same; i++) {
        QLORA__TRY(
            qlora__paging_copy(m, from->pages[i], g->pages[i], qlora__min(same - i * size, size)));
    }
    return QLORA_OK;
}
