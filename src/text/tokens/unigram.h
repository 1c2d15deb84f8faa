// Unigram models: the sequence of tokens with the best sum of scores.

static void qlora__text_path_offer(qlora__text_path* path, double score, size_t start, int32_t id) {
    if (path->start == QLORA__TEXT_PATH_NONE || score > path->score) {
        path->score = score;
        path->start = (int64_t)start;
        path->id = id;
    }
}

// Fills tok->paths. A character that is not a token of its own may be unknown.
static qlora_result qlora__text_unigram_search(qlora__env* env, qlora_text_tok* tok,
                                               const char* word, size_t size) {
    qlora__text_path* paths = tok->paths;
    for (size_t i = 0; i <= size; i++) {
        paths[i].start = QLORA__TEXT_PATH_NONE;
        paths[i].score = 0;
    }
    for (size_t at = 0; at < size;) {
        size_t length = qlora__text_symbol_size(tok, word + at, size - at);
        double here = paths[at].score;
        bool single = false;
        uint32_t node = 0;
        for (size_t end = at; end < size;) {
            const qlora__text_pair* edge =
                qlora__text_pairs_find(&tok->words_trie.edges, node, (unsigned char)word[end]);
            if (edge == NULL) {
                break;
            }
            node = edge->first;
            end++;
            if (edge->second != 0) {
                int32_t id = (int32_t)(edge->second - 1);
                qlora__text_path_offer(&paths[end], here + tok->scores[id], at, id);
                single = single || end - at == length;
            }
        }
        qlora__text_path* next = &paths[at + length];
        double unknown = here + tok->unknown_score;
        if (!single && tok->unknown < 0 &&
            (next->start == QLORA__TEXT_PATH_NONE || unknown > next->score)) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "the tokenizer has neither a token for \"%.*s\" nor an unknown "
                                   "token (model.unk_id)",
                                   (int)length, word + at);
        }
        if (!single) {
            qlora__text_path_offer(next, unknown, at, tok->unknown);
        }
        at += length;
    }
    return QLORA_OK;
}

// Adds what is unknown: its bytes, if the file allows that and has them all, else one token.
static qlora_result qlora__text_unigram_unknown(qlora__env* env, const qlora_text_tok* tok,
                                                const char* text, size_t size,
                                                qlora_text_ids* out) {
    int32_t id = qlora__text_words_find(&tok->words, text, size);
    bool bytes = tok->byte_fallback;
    for (size_t i = 0; i < size && bytes; i++) {
        bytes = tok->fallback_ids[(unsigned char)text[i]] >= 0;
    }
    if (id >= 0 || !bytes) {
        return qlora__text_ids_add(env, out, id >= 0 ? id : tok->unknown);
    }
    for (size_t i = 0; i < size; i++) {
        QLORA__TRY(qlora__text_ids_add(env, out, tok->fallback_ids[(unsigned char)text[i]]));
    }
    return QLORA_OK;
}

// Encodes one word.
static qlora_result qlora__text_unigram_word(qlora__env* env, qlora_text_tok* tok, const char* word,
                                             size_t size, qlora_text_ids* out) {
    void* paths = tok->paths;
    qlora_result r = qlora__text_reserve(env, &paths, &tok->path_capacity, 0, size + 1,
                                         sizeof(qlora__text_path));
    tok->paths = (qlora__text_path*)paths;
    QLORA__TRY(r);
    QLORA__TRY(qlora__text_unigram_search(env, tok, word, size));
    // from the end to the start: each position on the best way gets the end of its token
    int64_t end = (int64_t)size;
    int32_t id = tok->paths[size].id;
    for (int64_t at = tok->paths[size].start; end > 0;) {
        int64_t before = tok->paths[at].start;
        int32_t before_id = tok->paths[at].id;
        tok->paths[at].start = end;
        tok->paths[at].id = id;
        end = at;
        at = before;
        id = before_id;
    }
    for (size_t at = 0; at < size;) {
        const qlora__text_path* path = &tok->paths[at];
        size_t stop = (size_t)path->start;
        if (tok->unknown < 0 || path->id != tok->unknown) {
            QLORA__TRY(qlora__text_ids_add(env, out, path->id));
            at = stop;
            continue;
        }
        while (stop < size && tok->paths[stop].id == tok->unknown) { // neighbours are one
            stop = (size_t)tok->paths[stop].start;
        }
        QLORA__TRY(qlora__text_unigram_unknown(env, tok, word + at, stop - at, out));
        at = stop;
    }
    return QLORA_OK;
}
