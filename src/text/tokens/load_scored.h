// ---- vocabularies whose tokens have scores: SentencePiece models --------------------------------

typedef struct qlora__text_scored {
    float score;
    int32_t id;
} qlora__text_scored;

static int qlora__text_scored_compare(const void* a, const void* b) {
    float x = ((const qlora__text_scored*)a)->score;
    float y = ((const qlora__text_scored*)b)->score;
    return x > y ? -1 : x < y ? 1 : 0;
}

// Every split of a token into two others is a merge; a better score is a lower rank.
static qlora_result qlora__text_load_scored_merges(qlora__env* env, qlora_text_tok* tok,
                                                   qlora__text_scored* scored, size_t count) {
    qsort(scored, count, sizeof(scored[0]), qlora__text_scored_compare);
    uint32_t rank = 0;
    for (size_t i = 0; i < count; i++) {
        rank += i > 0 && scored[i].score < scored[i - 1].score ? 1 : 0;
        qlora__text_span span = tok->spans[scored[i].id];
        for (uint32_t left = 1; left < span.size; left++) {
            const char* name = tok->names.data + span.at;
            int32_t a = qlora__text_words_find(&tok->words, name, left);
            int32_t b =
                a < 0 ? -1 : qlora__text_words_find(&tok->words, name + left, span.size - left);
            if (b >= 0) {
                QLORA__TRY(qlora__text_pairs_put(env, &tok->merges, (uint32_t)a, (uint32_t)b, rank,
                                                 (uint32_t)scored[i].id));
            }
        }
    }
    return QLORA_OK;
}

// From now on, a token is found in a text before the model splits it.
static qlora_result qlora__text_tok_add(qlora__env* env, qlora_text_tok* tok, int32_t id,
                                        bool special) {
    void* data = tok->added;
    qlora_result r = qlora__text_reserve(env, &data, &tok->added_capacity, tok->added_count, 1,
                                         sizeof *tok->added);
    tok->added = (qlora__text_added*)data;
    QLORA__TRY(r);
    qlora__text_added* added = &tok->added[tok->added_count];
    memset(added, 0, sizeof *added);
    added->special = special;
    added->id = id;
    added->name = tok->spans[id];
    tok->kinds[id] =
        (uint8_t)(tok->kinds[id] | QLORA__TEXT_K_ADDED | (special ? QLORA__TEXT_K_SPECIAL : 0));
    tok->added_count++;
    return qlora__text_trie_add(env, &tok->raw_trie, tok->names.data + added->name.at,
                                added->name.size, (uint32_t)tok->added_count - 1);
}
