// ---- the tokenizer in a GGUF file ---------------------------------------------------------------

// ---- tokens -------------------------------------------------------------------------------------

typedef struct qlora__text_gguf {
    qlora__env* env;
    qlora_text_tok* tok;
    qlora__gguf_vocab v;
} qlora__text_gguf;

static qlora_result qlora__text_gguf_token_add(qlora__text_gguf* t, int32_t id, const char* name,
                                               size_t size) {
    qlora_text_tok* tok = t->tok;
    qlora__gguf_token token;
    QLORA__TRY(qlora__gguf_vocab_token(t->env, &t->v, (uint64_t)id, name, size, &token));
    if (token.added && size > QLORA__TEXT_MAX_ADDED) {
        return qlora__env_fail(t->env, QLORA_ERR_FORMAT,
                               "token %d is special and has %llu bytes; the limit is %d", (int)id,
                               (unsigned long long)size, QLORA__TEXT_MAX_ADDED);
    }
    if (token.word && size > 0) {
        QLORA__TRY(qlora__text_tok_word(t->env, tok, name, size, id));
    } else {
        QLORA__TRY(qlora__text_tok_name(t->env, tok, id, name, size, 0));
    }
    if (token.added) {
        QLORA__TRY(qlora__text_tok_add(t->env, tok, id, token.special));
        tok->added[tok->added_count - 1].strip_right = token.strip_right;
    }
    return QLORA_OK;
}

static qlora_result qlora__text_gguf_tokens(qlora__text_gguf* t) {
    uint64_t at = 0;
    QLORA__TRY(qlora__text_words_reserve(t->env, &t->tok->words, (size_t)t->v.tokens->count));
    for (uint64_t i = 0; i < t->v.tokens->count; i++) {
        size_t size = 0;
        const char* name = qlora__gguf_next_string(t->v.tokens, &at, &size);
        QLORA__TRY(qlora__text_gguf_token_add(t, (int32_t)i, name, size));
    }
    for (unsigned b = 0; b < 256; b++) {
        char byte = (char)(unsigned char)b;
        t->tok->byte_ids[b] = qlora__text_words_find(&t->tok->words, &byte, 1);
    }
    return QLORA_OK;
}

// ---- models -------------------------------------------------------------------------------------

// SentencePiece: any two neighbours whose text is a token are joined, the best score first.
static qlora_result qlora__text_gguf_scores(const qlora__text_gguf* t, qlora__text_scored* scored) {
    size_t count = 0;
    for (uint64_t i = 0; i < t->v.tokens->count; i++) {
        float score = 0.0f;
        QLORA__TRY(qlora__gguf_vocab_score(t->env, &t->v, i, &score));
        if (t->tok->spans[i].size > 0 && (t->tok->kinds[i] & QLORA__TEXT_K_BYTE) == 0) {
            scored[count].score = score;
            scored[count].id = (int32_t)i;
            count++;
        }
    }
    return qlora__text_load_scored_merges(t->env, t->tok, scored, count);
}

static qlora_result qlora__text_gguf_pieces(qlora__text_gguf* t) {
    size_t room = (size_t)t->v.tokens->count;
    qlora__text_scored* scored =
        (qlora__text_scored*)qlora__text_zalloc(t->env, room, sizeof *scored);
    if (scored == NULL) {
        return QLORA_ERR_MEMORY;
    }
    qlora_result r = qlora__text_gguf_scores(t, scored);
    qlora__env_free(t->env, scored, room * sizeof *scored);
    return r;
}

// Byte-level BPE: "left right", divided at the first blank that is not the first character.
static qlora_result qlora__text_gguf_merges(qlora__text_gguf* t) {
    const qlora__gguf_value* merges = NULL;
    uint64_t at = 0;
    QLORA__TRY(qlora__gguf_get_array(t->env, t->v.g, "tokenizer.ggml.merges", QLORA__GGUF_STRING,
                                     true, &merges));
    if (merges->count > UINT32_MAX) {
        return qlora__env_fail(t->env, QLORA_ERR_FORMAT, "tokenizer.ggml.merges is too long");
    }
    QLORA__TRY(qlora__text_pairs_reserve(t->env, &t->tok->merges, (size_t)merges->count));
    for (uint64_t i = 0; i < merges->count; i++) {
        size_t size = 0;
        const char* merge = qlora__gguf_next_string(merges, &at, &size);
        const char* blank = size > 1 ? (const char*)memchr(merge + 1, ' ', size - 1) : NULL;
        qlora_result r = QLORA_OK;
        if (blank == NULL) {
            r = qlora__env_fail(t->env, QLORA_ERR_FORMAT, "has no blank between its two parts");
        } else {
            const char* const halves[2] = {merge, blank + 1};
            const size_t sizes[2] = {(size_t)(blank - merge), size - (size_t)(blank - merge) - 1};
            r = qlora__text_put_merge(t->env, t->tok, halves, sizes, (uint32_t)i);
        }
        if (r != QLORA_OK) {
            return qlora__env_wrap(t->env, r, "tokenizer.ggml.merges[%llu] ",
                                   (unsigned long long)i);
        }
    }
    return QLORA_OK;
}

// ---- the steps around the model -----------------------------------------------------------------

// Blanks become U+2581; one is put in front of a text and after a special token.
static qlora_result qlora__text_gguf_piece_steps(qlora__text_gguf* t) {
    qlora__env* env = t->env;
    qlora_text_tok* tok = t->tok;
    qlora__text_step* step = NULL;
    bool prefix = true;
    QLORA__TRY(qlora__gguf_get_bool(env, t->v.g, "tokenizer.ggml.add_space_prefix", true, &prefix));
    if (prefix) {
        QLORA__TRY(qlora__text_steps_add(env, &tok->normalizer, QLORA__TEXT_N_PREPEND, &step));
        QLORA__TRY(qlora__text_copy(env, " ", 1, &step->a, &step->a_size));
    }
    QLORA__TRY(qlora__text_steps_add(env, &tok->normalizer, QLORA__TEXT_N_REPLACE, &step));
    QLORA__TRY(qlora__text_copy(env, " ", 1, &step->a, &step->a_size));
    QLORA__TRY(qlora__text_copy(env, "\xE2\x96\x81", 3, &step->b, &step->b_size));
    QLORA__TRY(qlora__text_steps_add(env, &tok->decoder, QLORA__TEXT_D_REPLACE, &step));
    QLORA__TRY(qlora__text_copy(env, "\xE2\x96\x81", 3, &step->a, &step->a_size));
    QLORA__TRY(qlora__text_copy(env, " ", 1, &step->b, &step->b_size));
    QLORA__TRY(qlora__text_steps_add(env, &tok->decoder, QLORA__TEXT_D_BYTE_FALLBACK, &step));
    QLORA__TRY(qlora__text_steps_add(env, &tok->decoder, QLORA__TEXT_D_FUSE, &step));
    if (!prefix) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__text_steps_add(env, &tok->decoder, QLORA__TEXT_D_STRIP, &step));
    step->start = 1;
    return qlora__text_copy(env, " ", 1, &step->a, &step->a_size);
}

static qlora_result qlora__text_gguf_byte_steps(qlora__text_gguf* t, const qlora__gguf_pre* pre) {
    qlora__env* env = t->env;
    qlora_text_tok* tok = t->tok;
    qlora__text_step* step = NULL;
    bool prefix = false;
    QLORA__TRY(
        qlora__gguf_get_bool(env, t->v.g, "tokenizer.ggml.add_space_prefix", false, &prefix));
    if (prefix) {
        QLORA__TRY(qlora__text_steps_add(env, &tok->splitter, QLORA__TEXT_P_PREFIX_SPACE, &step));
    }
    for (int i = 0; i < QLORA__GGUF_PATTERNS && pre->patterns[i] != NULL; i++) {
        QLORA__TRY(qlora__text_steps_add(env, &tok->splitter, QLORA__TEXT_P_REGEX, &step));
        QLORA__TRY(
            qlora__text_step_regex(env, tok, pre->patterns[i], strlen(pre->patterns[i]), step));
    }
    tok->byte_level = true;
    QLORA__TRY(qlora__text_steps_add(env, &tok->splitter, QLORA__TEXT_P_BYTES, &step));
    return qlora__text_steps_add(env, &tok->decoder, QLORA__TEXT_D_BYTES, &step);
}

// What is added before and after a text.
static qlora_result qlora__text_gguf_ends(qlora__text_gguf* t, const qlora__gguf_pre* pre) {
    int64_t ends[2];
    QLORA__TRY(qlora__gguf_vocab_ends(t->env, &t->v, pre, ends));
    if (ends[0] >= 0) {
        QLORA__TRY(qlora__text_ids_add(t->env, &t->tok->prefix, (int32_t)ends[0]));
    }
    return ends[1] < 0 ? QLORA_OK : qlora__text_ids_add(t->env, &t->tok->suffix, (int32_t)ends[1]);
}

static qlora_result qlora__text_gguf_begin(qlora__text_gguf* t, const qlora__gguf* g) {
    const char* type = NULL;
    const char* model = NULL;
    size_t size = 0;
    QLORA__TRY(qlora__gguf_get_string(t->env, g, "general.type", false, &type, &size));
    if (type != NULL && qlora__gguf_is(type, size, "adapter")) {
        return qlora__env_fail(t->env, QLORA_ERR_FORMAT,
                               "%s is an adapter: it contains no tokenizer", g->label);
    }
    QLORA__TRY(qlora__gguf_get_string(t->env, g, "tokenizer.ggml.model", true, &model, &size));
    return !qlora__gguf_is(model, size, "no_vocab")
               ? qlora__gguf_vocab_open(t->env, g, &t->v)
               : qlora__env_fail(t->env, QLORA_ERR_FORMAT,
                                 "%s contains no tokenizer; use that of the original model",
                                 g->label);
}

static qlora_result qlora__text_gguf_fill(qlora__text_gguf* t, const qlora__gguf* g) {
    qlora_text_tok* tok = t->tok;
    const qlora__gguf_pre* pre = NULL;
    QLORA__TRY(qlora__text_gguf_begin(t, g));
    if (t->v.pieces) {
        int64_t unknown = 0;
        memcpy(tok->cut, "\xE2\x96\x81", 3);
        tok->cut_size = 3;
        tok->byte_fallback = true;
        QLORA__TRY(qlora__gguf_vocab_unknown(t->env, &t->v, &unknown));
        tok->unknown = (int32_t)unknown;
        QLORA__TRY(qlora__text_gguf_piece_steps(t));
        QLORA__TRY(qlora__text_gguf_tokens(t));
        QLORA__TRY(qlora__text_gguf_pieces(t));
        tok->cut_safe = qlora__text_cut_is_safe(tok);
        return qlora__text_gguf_ends(t, NULL);
    }
    QLORA__TRY(qlora__gguf_vocab_pre(t->env, &t->v, &pre));
    tok->ignore_merges = pre->ignore_merges;
    QLORA__TRY(qlora__text_gguf_byte_steps(t, pre));
    QLORA__TRY(qlora__text_gguf_tokens(t));
    QLORA__TRY(qlora__text_gguf_merges(t));
    return qlora__text_gguf_ends(t, pre);
}

// Reads the tokenizer of a GGUF file in memory.
static qlora_result qlora__text_load_gguf(qlora__env* env, qlora_text_tok* tok, const char* label,
                                          const void* data, uint64_t size) {
    qlora__gguf g;
    qlora__text_gguf t;
    QLORA__TRY(qlora__gguf_parse(env, label, data, size, &g));
    memset(&t, 0, sizeof t);
    t.env = env;
    t.tok = tok;
    qlora_result r = qlora__text_gguf_fill(&t, &g);
    qlora__gguf_free(env, &g);
    return r;
}
