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
