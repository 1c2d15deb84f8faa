// ---- texts that share a prompt ------------------------------------------------------------------
//
// The cache of a text is made of pages. Page i of a text is page i of its own slot or, if it shares
// a prompt, of the slot of another text: owners[i]. Steps on the device find pages by a table.
// Passes of operators need the rows of a text one after the other, in its own slot, so a text that
// is changed by such a pass gets copies of the pages that it shares. Pages that are shared are
// full, and nobody writes to them: a text that begins in a slot, or goes back to fewer tokens,
// first leaves a copy of the pages that others use to one of those. A text never needs more pages
// than its slot has, so the plan has room for all of this.

// Positions of a page.
static int64_t qlora__page_size(const qlora_model* m) {
    return m->decode.planned && m->desc.generate_sequences > 1 ? m->decode.chunk
                                                               : m->texts.cache_rows;
}

static int64_t qlora__page_count(const qlora_model* m) {
    return qlora__ceil_div(m->texts.cache_rows, qlora__page_size(m));
}

// Copies the first `rows` rows of page `page` from one slot to another, in every layer.
static qlora_result qlora__page_copy(qlora_model* m, int64_t page, int64_t rows, int64_t from,
                                     int64_t to) {
    int64_t first = page * qlora__page_size(m);
    int64_t source_row = from * m->texts.cache_rows + first;
    int64_t target_row = to * m->texts.cache_rows + first;
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        qlora_tensor source = qlora__cache_rows(m, l, source_row, rows);
        qlora_tensor target = qlora__cache_rows(m, l, target_row, rows);
        size_t bytes = (size_t)(rows * source.ld) * qlora_dtype_bytes(source.dtype);
        QLORA__TRY(qlora__copy_within(m->ctx, target.data, source.data, bytes));
    }
    return QLORA_OK;
}

// Sends a row of the table to the device.
static qlora_result qlora__pages_send(qlora_model* m, int64_t slot, const int32_t* pages,
                                      bool lent) {
    qlora__decode* d = &m->decode;
    size_t bytes = (size_t)d->pages * 4;
    d->lent[slot] = QLORA__PAGES_UNKNOWN; // until the device is known to have the new row
    QLORA__TRY(qlora__copy_in(m->ctx, (char*)d->table.data + (size_t)slot * bytes, pages, bytes));
    d->lent[slot] = lent ? QLORA__PAGES_LENT : QLORA__PAGES_OWN;
    return QLORA_OK;
}

// Tells the device where the pages of the text in `slot` are.
static qlora_result qlora__pages_upload(qlora_model* m, int64_t slot, const int32_t* owners) {
    const qlora__decode* d = &m->decode;
    int32_t pages[QLORA__MOST_PAGES];
    bool lent = false;
    if (!d->planned) {
        return QLORA_OK;
    }
    for (int64_t i = 0; i < d->pages; i++) {
        pages[i] = (int32_t)(owners[i] * d->pages + i);
        lent = lent || owners[i] != slot;
    }
    return qlora__pages_send(m, slot, pages, lent);
}

// The same, if the device may not know it.
static qlora_result qlora__pages_ensure(qlora_generation* g) {
    int32_t pages[QLORA__MOST_PAGES];
    if (g->m->decode.lent[g->slot] != QLORA__PAGES_UNKNOWN) {
        return QLORA_OK;
    }
    if (!qlora__paged(g->m)) {
        return qlora__pages_upload(g->m, g->slot, g->owners);
    }
    for (int64_t i = 0; i < QLORA__MOST_PAGES; i++) { // pages that it does not have are not used
        pages[i] = i < g->page_count ? g->pages[i] : 0;
    }
    return qlora__pages_send(g->m, g->slot, pages, true);
}

// The row of the cache that position 0 has, if the pages follow each other.
static int64_t qlora__pages_row(const qlora_generation* g) {
    return qlora__paged(g->m) ? g->pages[0] * g->m->texts.paging.size
                              : g->slot * g->m->texts.cache_rows;
}

// Whether the text uses page `page` of another text's slot.
static bool qlora__page_is_of(const qlora_generation* g, int64_t page, int64_t slot) {
    return g != NULL && g->slot != slot && g->owners[page] == slot;
}

// A text that uses a page of a slot and is not the one of that slot; NULL if there is none.
static qlora_generation* qlora__page_user(const qlora_model* m, int64_t page, int64_t slot) {
    for (int64_t i = 0; i < m->desc.generate_sequences; i++) {
        if (qlora__page_is_of(m->texts.in_flight[i], page, slot)) {
            return m->texts.in_flight[i];
        }
    }
    return NULL;
}

// Makes the pages of a slot, from number `first` on, free to be written: one of the texts that use
// a page gets a copy, which the others use from then on.
static qlora_result qlora__pages_vacate(qlora_model* m, int64_t slot, int64_t first) {
    int64_t count = qlora__page_count(m);
    for (int64_t page = first; page < count; page++) {
        qlora_generation* heir = qlora__page_user(m, page, slot);
        if (heir == NULL) {
            continue;
        }
        QLORA__TRY(qlora__page_copy(m, page, qlora__page_size(m), slot, heir->slot));
        for (qlora_generation* g = heir; g != NULL; g = qlora__page_user(m, page, slot)) {
            int32_t owners[QLORA__MOST_PAGES];
            memcpy(owners, g->owners, sizeof owners);
            owners[page] = (int32_t)heir->slot;
            QLORA__TRY(qlora__pages_upload(m, g->slot, owners));
            g->owners[page] = owners[page];
        }
    }
    return QLORA_OK;
}

// Prepares a text for a pass of operators that writes from its end on: its pages are in its slot,
// and those that are written belong to it alone.
static qlora_result qlora__pages_settle(qlora_generation* g) {
    qlora_model* m = g->m;
    if (qlora__paged(m)) { // the turn has its pages
        return qlora__paging_reserve(g, g->length, g->length, g->page_count * m->texts.paging.size,
                                     true);
    }
    int64_t size = qlora__page_size(m);
    int64_t count = qlora__page_count(m);
    bool moved = false;
    QLORA__TRY(qlora__pages_vacate(m, g->slot, g->length / size));
    for (int64_t page = 0; page < count; page++) {
        int64_t rows = qlora__min(g->length - page * size, size);
        if (g->owners[page] != g->slot && rows > 0) {
            QLORA__TRY(qlora__page_copy(m, page, rows, g->owners[page], g->slot));
        }
        moved = moved || g->owners[page] != g->slot;
        g->owners[page] = (int32_t)g->slot;
    }
    return moved || m->decode.lent[g->slot] != QLORA__PAGES_OWN
               ? qlora__pages_upload(m, g->slot, g->owners)
               : QLORA_OK;
}

// Gives a new text the first `count` positions of another one. With `refer`, it uses the pages that
// are full; what remains is copied.
static qlora_result qlora__pages_share(qlora_generation* g, const qlora_generation* from,
                                       int64_t count, bool refer) {
    qlora_model* m = g->m;
    int64_t size = qlora__page_size(m);
    int64_t full = refer ? count / size : 0;
    QLORA__TRY(qlora__pages_vacate(m, g->slot, 0));
    for (int64_t page = 0; page * size < count; page++) {
        if (page < full) {
            g->owners[page] = from->owners[page];
        } else {
            QLORA__TRY(qlora__page_copy(m, page, qlora__min(count - page * size, size),
                                        from->owners[page], g->slot));
        }
    }
    return full > 0 || m->decode.lent[g->slot] != QLORA__PAGES_OWN
               ? qlora__pages_upload(m, g->slot, g->owners)
               : QLORA_OK;
}

// The slot of a new text; there is one. Best is one whose pages nobody uses.
static int64_t qlora__pages_slot(const qlora_model* m) {
    int64_t count = qlora__page_count(m);
    int64_t first = -1;
    for (int64_t slot = 0; slot < m->desc.generate_sequences; slot++) {
        bool used = false;
        for (int64_t page = 0; page < count && m->texts.in_flight[slot] == NULL && !used; page++) {
            used = qlora__page_user(m, page, slot) != NULL;
        }
        if (m->texts.in_flight[slot] == NULL && !used) {
            return slot;
        }
        first = first < 0 && m->texts.in_flight[slot] == NULL ? slot : first;
    }
    return first;
}
