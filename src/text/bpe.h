enum { TEXT__CACHE_KEY = 26, TEXT__CACHE_IDS = 8, TEXT__CACHE_PLACES = 32768 };

// One place per hash value, the newest word stays. size 0 is an empty place.
typedef struct text__cached {
    uint8_t size;
    uint8_t count;
    char key[TEXT__CACHE_KEY];
    int32_t ids[TEXT__CACHE_IDS];
} text__cached;

typedef struct text__symbol {
    int32_t id; // -1: joined to the one before
    uint32_t previous;
    uint32_t next;
} text__symbol;

typedef struct text__job { // a possible merge
    uint32_t rank;
    uint32_t at;
    uint32_t id;
} text__job;

typedef struct text__span {
    uint32_t at;
    uint32_t size;
} text__span;

typedef struct text__added {
    int32_t id;
    text__span name; // as the file spells it
    bool special;
    bool single_word;
    bool strip_left;
    bool strip_right;
} text__added;

// A trie of added tokens: (node, byte) -> (next node, 1 + index of the token that ends there).
typedef struct text__trie {
    text__pairs edges;
    uint32_t nodes;
    bool starts[256];
} text__trie;

struct text_tok {
    // vocabulary: names are as the file spells them, by id; `words` is what the model looks up
    text_bytes names;
    text__span* spans;
    size_t span_capacity;
    uint8_t* kinds; // bits TEXT__K_ by id
    size_t kind_capacity;
    size_t count; // one more than the largest id
    text__words words;
    text__pairs merges;        // (left, right) -> (rank, joined)
    int32_t byte_ids[256];     // one-byte words
    int32_t fallback_ids[256]; // <0x00> ..
    int32_t unknown;
    bool byte_level; // words are bytes, not the printable stand-ins of the file
    bool byte_fallback;
    bool fuse_unknown;
    bool ignore_merges;
    bool cut_safe; // no word has `cut` after something else: every word can be cut there
    char cut[4];
    size_t cut_size;
    // added tokens
    text__added* added;
    size_t added_count;
    text__trie raw_trie;        // found in the text as given
    text__trie normalized_trie; // found after normalising
    // steps
    text__steps normalizer;
    text__steps splitter;
    text__steps decoder;
    text_ids prefix; // of the post-processor
    text_ids suffix;
    // tables
    uint8_t* classes;
    uint16_t code_of_byte[256];
    int16_t byte_of_code[512];
    text__cached* cache;
    // scratch
    text_bytes buffers[4];
    text__pieces pieces[3];
    text__marks marks;
    text__symbol* symbols;
    size_t symbol_capacity;
    text__job* jobs;
    size_t job_count;
    size_t job_capacity;
};

enum { TEXT__K_EXISTS = 1, TEXT__K_SPECIAL = 2, TEXT__K_ADDED = 4, TEXT__K_BYTE = 8 };

static bool text__job_before(const text__job* a, const text__job* b) {
    return a->rank < b->rank || (a->rank == b->rank && a->at < b->at);
}

static bool text__jobs_push(text_tok* tok, text__job job, text_error* error) {
    void* data = tok->jobs;
    bool good =
        text__reserve(&data, &tok->job_capacity, tok->job_count, 1, sizeof(text__job), error);
    tok->jobs = (text__job*)data;
    TEXT__TRY(good);
    size_t i = tok->job_count++;
    while (i > 0 && text__job_before(&job, &tok->jobs[(i - 1) / 2])) {
        tok->jobs[i] = tok->jobs[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    tok->jobs[i] = job;
    return true;
}

static text__job text__jobs_pop(text_tok* tok) {
    text__job top = tok->jobs[0];
    text__job last = tok->jobs[--tok->job_count];
    size_t i = 0;
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= tok->job_count) {
            break;
        }
        if (child + 1 < tok->job_count &&
            text__job_before(&tok->jobs[child + 1], &tok->jobs[child])) {
            child++;
        }
        if (!text__job_before(&tok->jobs[child], &last)) {
            break;
        }
        tok->jobs[i] = tok->jobs[child];
        i = child;
    }
    tok->jobs[i] = last;
    return top;
}

// The merge of the symbols at a and b, put on the heap if there is one.
static bool text__jobs_try(text_tok* tok, uint32_t a, uint32_t b, text_error* error) {
    const text__pair* pair =
        text__pairs_find(&tok->merges, (uint32_t)tok->symbols[a].id, (uint32_t)tok->symbols[b].id);
    if (pair == NULL) {
        return true;
    }
    text__job job;
    job.rank = pair->first;
    job.at = a;
    job.id = pair->second;
    return text__jobs_push(tok, job, error);
}

// Joins pairs, the lowest rank first, among equals the leftmost. n log n. Few symbols: see below.
static bool text__merge_many(text_tok* tok, size_t count, text_error* error) {
    const uint32_t none = UINT32_MAX;
    text__symbol* s = tok->symbols;
    tok->job_count = 0;
    for (size_t i = 0; i < count; i++) {
        s[i].previous = i > 0 ? (uint32_t)i - 1 : none;
        s[i].next = i + 1 < count ? (uint32_t)i + 1 : none;
        TEXT__TRY(i == 0 || text__jobs_try(tok, (uint32_t)i - 1, (uint32_t)i, error));
    }
    while (tok->job_count > 0) {
        text__job job = text__jobs_pop(tok);
        uint32_t a = job.at;
        uint32_t b = s[a].next;
        if (s[a].id < 0 || b == none) {
            continue;
        }
        // the pair that was meant is gone when these two join to something else
        const text__pair* pair =
            text__pairs_find(&tok->merges, (uint32_t)s[a].id, (uint32_t)s[b].id);
        if (pair == NULL || pair->second != job.id) {
            continue;
        }
        s[a].id = (int32_t)job.id;
        s[a].next = s[b].next;
        s[b].id = -1;
        if (s[a].next != none) {
            s[s[a].next].previous = a;
            TEXT__TRY(text__jobs_try(tok, a, s[a].next, error));
        }
        if (s[a].previous != none) {
            TEXT__TRY(text__jobs_try(tok, s[a].previous, a, error));
        }
    }
    return true;
}

// The same for few symbols: look at all pairs each time. Symbols stay packed; returns their number.
enum { TEXT__FEW = 24 };

static size_t text__merge_few(text_tok* tok, size_t count) {
    uint32_t ranks[TEXT__FEW];
    uint32_t joined[TEXT__FEW];
    text__symbol* s = tok->symbols;
    for (size_t i = 0; i + 1 < count; i++) {
        const text__pair* pair =
            text__pairs_find(&tok->merges, (uint32_t)s[i].id, (uint32_t)s[i + 1].id);
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
            const text__pair* pair =
                text__pairs_find(&tok->merges, (uint32_t)s[i].id, (uint32_t)s[i + 1].id);
            ranks[i] = pair != NULL ? pair->first : UINT32_MAX;
            joined[i] = pair != NULL ? pair->second : 0;
        }
    }
    return count;
}

// The length of the character at a position: one byte of a byte-level word or of bad UTF-8.
static size_t text__symbol_size(const text_tok* tok, const char* word, size_t left) {
    uint32_t code;
    if (tok->byte_level || (unsigned char)word[0] < 0x80) {
        return 1;
    }
    size_t size = text__utf8((const unsigned char*)word, left, &code);
    return size > 0 ? size : 1;
}

// Characters to symbols. A character without an id is spelt in bytes, or is unknown, or is lost:
// in that order, as the file allows. Unknown ones wait until the next known one; neighbours become
// one if the file says so. Returns the number of symbols; there is room for `size`.
static size_t text__symbols_make(text_tok* tok, const char* word, size_t size) {
    size_t count = 0;
    bool waiting = false;
    for (size_t at = 0; at < size;) {
        size_t length = text__symbol_size(tok, word + at, size - at);
        int32_t id = length == 1 ? tok->byte_ids[(unsigned char)word[at]]
                                 : text__words_find(&tok->words, word + at, length);
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

static bool text__word_merge(text_tok* tok, const char* word, size_t size, text_ids* out,
                             text_error* error) {
    if (size >= UINT32_MAX / 2) {
        return text__fail(error, "one word of 2 GiB or more");
    }
    void* data = tok->symbols;
    bool good =
        text__reserve(&data, &tok->symbol_capacity, 0, size + 1, sizeof(text__symbol), error);
    tok->symbols = (text__symbol*)data;
    TEXT__TRY(good);
    size_t count = text__symbols_make(tok, word, size);
    if (count <= TEXT__FEW) {
        count = text__merge_few(tok, count);
    } else {
        TEXT__TRY(text__merge_many(tok, count, error));
    }
    TEXT__TRY(text__ids_room(out, count, error));
    for (size_t i = 0; i < count; i++) {
        if (tok->symbols[i].id >= 0) {
            out->data[out->count++] = tok->symbols[i].id;
        }
    }
    return true;
}

// One word, through the cache.
static bool text__word_encode(text_tok* tok, const char* word, size_t size, text_ids* out,
                              text_error* error) {
    if (tok->ignore_merges) {
        int32_t id = text__words_find(&tok->words, word, size);
        if (id >= 0) {
            return text_ids_add(out, id, error);
        }
    }
    if (size > TEXT__CACHE_KEY) {
        return text__word_merge(tok, word, size, out, error);
    }
    text__cached* cached = &tok->cache[text__hash(word, size) % TEXT__CACHE_PLACES];
    if (cached->size == size && memcmp(cached->key, word, size) == 0) {
        TEXT__TRY(text__ids_room(out, cached->count, error));
        memcpy(out->data + out->count, cached->ids, cached->count * sizeof(int32_t));
        out->count += cached->count;
        return true;
    }
    size_t before = out->count;
    TEXT__TRY(text__word_merge(tok, word, size, out, error));
    if (out->count - before <= TEXT__CACHE_IDS) {
        cached->size = (uint8_t)size;
        cached->count = (uint8_t)(out->count - before);
        memcpy(cached->key, word, size);
        memcpy(cached->ids, out->data + before, cached->count * sizeof(int32_t));
    }
    return true;
}

// A pre-token. Where it is safe it is cut before each word mark (the space or its stand-in) that
// follows something else: no merge reaches over it, so the ids are the same and the cache works.
static bool text__piece_encode(text_tok* tok, const char* text, size_t size, text_ids* out,
                               text_error* error) {
    if (!tok->cut_safe) {
        return size == 0 || text__word_encode(tok, text, size, out, error);
    }
    size_t begin = 0;
    bool before = true; // the character before is a mark, or there is none
    for (size_t at = 0; at < size;) {
        bool mark = size - at >= tok->cut_size && memcmp(text + at, tok->cut, tok->cut_size) == 0;
        if (mark && !before) {
            TEXT__TRY(text__word_encode(tok, text + begin, at - begin, out, error));
            begin = at;
        }
        before = mark;
        at += mark ? tok->cut_size : 1;
    }
    return begin == size || text__word_encode(tok, text + begin, size - begin, out, error);
}
