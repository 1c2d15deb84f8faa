// BPE models: pairs of tokens are joined, the best first.

static bool qlora__text_job_before(const qlora__text_job* a, const qlora__text_job* b) {
    return a->rank < b->rank || (a->rank == b->rank && a->at < b->at);
}

static qlora_result qlora__text_jobs_push(qlora__env* env, qlora_text_tok* tok,
                                          qlora__text_job job) {
    void* data = tok->jobs;
    qlora_result r = qlora__text_reserve(env, &data, &tok->job_capacity, tok->job_count, 1,
                                         sizeof(qlora__text_job));
    tok->jobs = (qlora__text_job*)data;
    QLORA__TRY(r);
    size_t i = tok->job_count++;
    while (i > 0 && qlora__text_job_before(&job, &tok->jobs[(i - 1) / 2])) {
        tok->jobs[i] = tok->jobs[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    tok->jobs[i] = job;
    return QLORA_OK;
}

static qlora__text_job qlora__text_jobs_pop(qlora_text_tok* tok) {
    qlora__text_job top = tok->jobs[0];
    qlora__text_job last = tok->jobs[--tok->job_count];
    size_t i = 0;
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= tok->job_count) {
            break;
        }
        if (child + 1 < tok->job_count &&
            qlora__text_job_before(&tok->jobs[child + 1], &tok->jobs[child])) {
            child++;
        }
        if (!qlora__text_job_before(&tok->jobs[child], &last)) {
            break;
        }
        tok->jobs[i] = tok->jobs[child];
        i = child;
    }
    tok->jobs[i] = last;
    return top;
}

// Puts the merge of the symbols at a and b on the heap, if there is one.
static qlora_result qlora__text_jobs_try(qlora__env* env, qlora_text_tok* tok, uint32_t a,
                                         uint32_t b) {
    const qlora__text_pair* pair = qlora__text_pairs_find(
        &tok->merges, (uint32_t)tok->symbols[a].id, (uint32_t)tok->symbols[b].id);
    if (pair == NULL) {
        return QLORA_OK;
    }
    qlora__text_job job;
    job.rank = pair->first;
    job.at = a;
    job.id = pair->second;
    return qlora__text_jobs_push(env, tok, job);
}

// Joins pairs, lowest rank first, the leftmost among equals, in n log n steps.
static qlora_result qlora__text_merge_many(qlora__env* env, qlora_text_tok* tok, size_t count) {
    const uint32_t none = UINT32_MAX;
    qlora__text_symbol* s = tok->symbols;
    tok->job_count = 0;
    for (size_t i = 0; i < count; i++) {
        s[i].previous = i > 0 ? (uint32_t)i - 1 : none;
        s[i].next = i + 1 < count ? (uint32_t)i + 1 : none;
        if (i > 0) {
            QLORA__TRY(qlora__text_jobs_try(env, tok, (uint32_t)i - 1, (uint32_t)i));
        }
    }
    while (tok->job_count > 0) {
        qlora__text_job job = qlora__text_jobs_pop(tok);
        uint32_t a = job.at;
        uint32_t b = s[a].next;
        if (s[a].id < 0 || b == none) {
            continue;
        }
        // the pair is gone if these two now join to something else
        const qlora__text_pair* pair =
            qlora__text_pairs_find(&tok->merges, (uint32_t)s[a].id, (uint32_t)s[b].id);
        if (pair == NULL || pair->second != job.id) {
            continue;
        }
        s[a].id = (int32_t)job.id;
        s[a].next = s[b].next;
        s[b].id = -1;
        if (s[a].next != none) {
            s[s[a].next].previous = a;
            QLORA__TRY(qlora__text_jobs_try(env, tok, a, s[a].next));
        }
        if (s[a].previous != none) {
            QLORA__TRY(qlora__text_jobs_try(env, tok, s[a].previous, a));
        }
    }
    return QLORA_OK;
}

// The same for few symbols: looks at all pairs each time. Symbols stay packed; returns their count.
enum { QLORA__TEXT_FEW = 24 };

static size_t qlora__text_merge_few(qlora_text_tok* tok, size_t count) {
    uint32_t ranks[QLORA__TEXT_FEW];
    uint32_t joined[QLORA__TEXT_FEW];
    qlora__text_symbol* s = tok->symbols;
    for (size_t i = 0; i + 1 < count; i++) {
        const qlora__text_pair* pair =
            qlora__text_pairs_find(&tok->merges, (uint32_t)s[i].id, (uint32_t)s[i + 1].id);
        ranks[i] = pair != NULL ? pair->first : UINT32_MAX;
        joined[i] = pair != NULL ? pair->second : 0;
    }
    while (count > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < count; i++) {
            if (ranks[i] < ranks[best]) {
                best = i;
            }
        }
        if (ranks[best] == UINT32_MAX) {
            break;
        }
        s[best].id = (int32_t)joined[best];
        count--;
        for (size_t i = best + 1; i < count; i++) {
            s[i].id = s[i + 1].id;
            ranks[i - 1] = ranks[i];
            joined[i - 1] = joined[i];
        }
        for (size_t i = best > 0 ? best - 1 : 0; i <= best && i + 1 < count; i++) {
            const qlora__text_pair* pair =
                qlora__text_pairs_find(&tok->merges, (uint32_t)s[i].id, (uint32_t)s[i + 1].id);
            ranks[i] = pair != NULL ? pair->first : UINT32_MAX;
            joined[i] = pair != NULL ? pair->second : 0;
        }
    }
    return count;
}

// Characters to symbols. A character without an id is spelt in bytes, else becomes unknown, else is
// dropped, as far as the file allows. Unknown ones wait for the next known one, because the file
// may fuse neighbours into one. Returns the number of symbols; there is room for `size`.
static size_t qlora__text_symbols_make(qlora_text_tok* tok, const char* word, size_t size) {
    size_t count = 0;
    bool waiting = false;
    for (size_t at = 0; at < size;) {
        size_t length = qlora__text_symbol_size(tok, word + at, size - at);
        int32_t id = length == 1 ? tok->byte_ids[(unsigned char)word[at]]
                                 : qlora__text_words_find(&tok->words, word + at, length);
        if (id >= 0) {
            if (waiting) {
                tok->symbols[count++].id = tok->unknown;
                waiting = false;
            }
            tok->symbols[count++].id = id;
            at += length;
            continue;
        }
        bool bytes = tok->byte_fallback;
        for (size_t i = 0; i < length; i++) {
            bytes = bytes && tok->fallback_ids[(unsigned char)word[at + i]] >= 0;
        }
        if (bytes) {
            for (size_t i = 0; i < length; i++) {
                tok->symbols[count++].id = tok->fallback_ids[(unsigned char)word[at + i]];
            }
        } else if (tok->unknown >= 0) {
            if (waiting && !tok->fuse_unknown) {
                tok->symbols[count++].id = tok->unknown;
            }
            waiting = true;
        }
        at += length;
    }
    if (waiting) {
        tok->symbols[count++].id = tok->unknown;
    }
    return count;
}

static qlora_result qlora__text_word_merge(qlora__env* env, qlora_text_tok* tok, const char* word,
                                           size_t size, qlora_text_ids* out) {
    if (size >= UINT32_MAX / 2) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "one word of 2 GiB or more");
    }
    void* data = tok->symbols;
    qlora_result r = qlora__text_reserve(env, &data, &tok->symbol_capacity, 0, size + 1,
                                         sizeof(qlora__text_symbol));
    tok->symbols = (qlora__text_symbol*)data;
    QLORA__TRY(r);
    size_t count = qlora__text_symbols_make(tok, word, size);
    if (count <= QLORA__TEXT_FEW) {
        count = qlora__text_merge_few(tok, count);
    } else {
        QLORA__TRY(qlora__text_merge_many(env, tok, count));
    }
    QLORA__TRY(qlora__text_ids_room(env, out, count));
    for (size_t i = 0; i < count; i++) {
        if (tok->symbols[i].id >= 0) {
            out->data[out->count++] = tok->symbols[i].id;
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__text_word_split(qlora__env* env, qlora_text_tok* tok, const char* word,
                                           size_t size, qlora_text_ids* out) {
    return tok->unigram ? qlora__text_unigram_word(env, tok, word, size, out)
                        : qlora__text_word_merge(env, tok, word, size, out);
}

// Encodes one word, through the cache.
static qlora_result qlora__text_word_encode(qlora__env* env, qlora_text_tok* tok, const char* word,
                                            size_t size, qlora_text_ids* out) {
    if (tok->ignore_merges) {
        int32_t id = qlora__text_words_find(&tok->words, word, size);
        if (id >= 0) {
            return qlora__text_ids_add(env, out, id);
        }
    }
    if (size > QLORA__TEXT_CACHE_KEY) {
        return qlora__text_word_split(env, tok, word, size, out);
    }
    qlora__text_cached* cached =
        &tok->cache[qlora__text_hash(word, size) % QLORA__TEXT_CACHE_PLACES];
    if (cached->size == size && memcmp(cached->key, word, size) == 0) {
        QLORA__TRY(qlora__text_ids_room(env, out, cached->count));
        memcpy(out->data + out->count, cached->ids, cached->count * sizeof(int32_t));
        out->count += cached->count;
        return QLORA_OK;
    }
    size_t before = out->count;
    QLORA__TRY(qlora__text_word_split(env, tok, word, size, out));
    size_t count = out->count - before;
    if (count > 0 && count <= QLORA__TEXT_CACHE_IDS) {
        cached->size = (uint8_t)size;
        cached->count = (uint8_t)count;
        memcpy(cached->key, word, size);
        memcpy(cached->ids, out->data + before, cached->count * sizeof(int32_t));
    }
    return QLORA_OK;
}

// Encodes one pre-token. Where it is safe, it is split before each word mark (the space or its
// stand-in) that follows another character: no merge crosses it, so the ids are the same and the
// cache is useful.
static qlora_result qlora__text_piece_encode(qlora__env* env, qlora_text_tok* tok, const char* text,
                                             size_t size, qlora_text_ids* out) {
    if (!tok->cut_safe) {
        return size == 0 ? QLORA_OK : qlora__text_word_encode(env, tok, text, size, out);
    }
    size_t begin = 0;
    bool before = true; // the previous character is a mark, or there is none
    for (size_t at = 0; at < size;) {
        bool mark = size - at >= tok->cut_size && memcmp(text + at, tok->cut, tok->cut_size) == 0;
        if (mark && !before) {
            QLORA__TRY(qlora__text_word_encode(env, tok, text + begin, at - begin, out));
            begin = at;
        }
        before = mark;
        at += mark ? tok->cut_size : 1;
    }
    return begin == size ? QLORA_OK
                         : qlora__text_word_encode(env, tok, text + begin, size - begin, out);
}
