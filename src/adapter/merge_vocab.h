// ---- tokenizer.json of a model in a GGUF file ---------------------------------------------------

// A pair of tokens that make another one.
typedef struct qlora__merge_pair {
    float score; // of what they make
    uint32_t left;
    uint32_t right;
} qlora__merge_pair;

// The vocabulary of a file. Every token becomes a word of tokenizer.json, because the tokenizers
// library numbers added tokens that are no words by itself.
typedef struct qlora__merge_source {
    qlora_ctx* ctx;
    qlora__gguf_vocab v;
    qlora__merge_vocab words; // only its tokens and their order
    size_t words_bytes;
    qlora__merge_pair* pairs; // SentencePiece
    uint32_t* order;          // of the pairs
    size_t pair_count;
    size_t pair_room;
    const qlora__gguf_pre* pre; // byte-level
    bool prefix;                // a blank is put in front of a text
    int64_t ends[2];            // before and behind a text; -1 = none
    int64_t unknown;            // SentencePiece
} qlora__merge_source;

static void qlora__merge_source_close(qlora__merge_source* s) {
    qlora__free(s->ctx, s->words.tokens, s->words_bytes);
    qlora__free(s->ctx, s->pairs, s->pair_room * sizeof *s->pairs);
    qlora__free(s->ctx, s->order, s->pair_room * sizeof *s->order);
}

// JSON is UTF-8, and the lists of the vocabulary must fit 32 bits.
static bool qlora__merge_is_text(const char* name, size_t size) {
    size_t at = 0;
    while (at < size && size <= INT32_MAX) {
        uint32_t left = size - at < 4 ? (uint32_t)(size - at) : 4;
        uint32_t step = qlora__utf8_size(name + at, left);
        if (step == 0) {
            return false;
        }
        at += step;
    }
    return at == size;
}

static qlora_result qlora__merge_read_words(qlora__merge_source* s) {
    qlora__merge_vocab* words = &s->words;
    qlora__env* env = &s->ctx->env;
    const char* label = s->v.g->label;
    uint64_t at = 0;
    words->count = (uint32_t)s->v.tokens->count;
    words->pieces = s->v.pieces;
    s->words_bytes = words->count * (sizeof *words->tokens + sizeof *words->by_name);
    words->tokens = (qlora__merge_token*)qlora__alloc_zero(s->ctx, s->words_bytes);
    if (words->tokens == NULL) {
        return QLORA_ERR_MEMORY;
    }
    words->by_name = (uint32_t*)(void*)(words->tokens + words->count);
    for (uint32_t i = 0; i < words->count; i++) {
        size_t size = 0;
        const char* name = qlora__gguf_next_string(s->v.tokens, &at, &size);
        qlora__merge_token* token = &words->tokens[i];
        if (!qlora__merge_is_text(name, size)) {
            return qlora__fail(s->ctx, QLORA_ERR_UNSUPPORTED,
                               "%s: tokenizer.ggml.tokens[%u] is not UTF-8, which tokenizer.json "
                               "must be",
                               label, i);
        }
        token->name = name;
        token->size = (uint32_t)size;
        qlora_result r =
            s->v.pieces ? qlora__gguf_vocab_score(env, &s->v, i, &token->score) : QLORA_OK;
        if (r != QLORA_OK) {
            return qlora__env_wrap(env, r, "%s: ", label);
        }
        if (size > 0) {
            words->by_name[words->named++] = i;
        }
    }
    qlora__sort(words->by_name, words->named, qlora__merge_name_less, words->tokens);
    for (uint32_t i = 1; i < words->named; i++) {
        const qlora__merge_token* a = &words->tokens[words->by_name[i - 1]];
        const qlora__merge_token* b = &words->tokens[words->by_name[i]];
        if (qlora__merge_name_order(a, b->name, b->size) == 0) {
            return qlora__fail(s->ctx, QLORA_ERR_UNSUPPORTED,
                               "%s: the tokens %u and %u have the same text, which tokenizer.json "
                               "cannot express",
                               label, words->by_name[i - 1], words->by_name[i]);
        }
    }
    return QLORA_OK;
}

// ---- merges -------------------------------------------------------------------------------------

// SentencePiece: every split of a token into two others. Counts them if there is no room for them
// yet. A text has no blanks when it is merged.
static void qlora__merge_find_pairs(qlora__merge_source* s) {
    const qlora__merge_vocab* words = &s->words;
    s->pair_count = 0;
    for (uint32_t i = 0; i < words->named; i++) {
        const qlora__merge_token* whole = &words->tokens[words->by_name[i]];
        bool blank = memchr(whole->name, ' ', whole->size) != NULL;
        bool byte = qlora__merge_is_byte(whole->name, whole->size);
        for (uint32_t n = 1; n < whole->size && !blank && !byte; n++) {
            const qlora__merge_token* left = qlora__merge_find_token(words, whole->name, n);
            const qlora__merge_token* right =
                left != NULL ? qlora__merge_find_token(words, whole->name + n, whole->size - n)
                             : NULL;
            if (right != NULL && s->pairs != NULL) {
                qlora__merge_pair* pair = &s->pairs[s->pair_count];
                pair->score = whole->score;
                pair->left = (uint32_t)(left - words->tokens);
                pair->right = (uint32_t)(right - words->tokens);
                s->order[s->pair_count] = (uint32_t)s->pair_count;
            }
            s->pair_count += right != NULL ? 1 : 0;
        }
    }
}

// Better scores first, then in the order of transformers' converters.
static bool qlora__merge_pair_less(const void* user, uint32_t a, uint32_t b) {
    const qlora__merge_pair* x = &((const qlora__merge_pair*)user)[a];
    const qlora__merge_pair* y = &((const qlora__merge_pair*)user)[b];
    return x->score < y->score || x->score > y->score ? x->score > y->score
           : x->left != y->left                       ? x->left < y->left
                                                      : x->right < y->right;
}

static qlora_result qlora__merge_read_pairs(qlora__merge_source* s) {
    qlora__merge_find_pairs(s);
    if (s->pair_count > UINT32_MAX) {
        return qlora__fail(s->ctx, QLORA_ERR_LIMIT, "%s: the vocabulary has too many merges",
                           s->v.g->label);
    }
    if (s->pair_count == 0) {
        return QLORA_OK;
    }
    s->pair_room = s->pair_count;
    s->pairs = (qlora__merge_pair*)qlora__alloc(s->ctx, s->pair_room * sizeof *s->pairs);
    s->order = (uint32_t*)qlora__alloc(s->ctx, s->pair_room * sizeof *s->order);
    if (s->pairs == NULL || s->order == NULL) {
        return QLORA_ERR_MEMORY;
    }
    qlora__merge_find_pairs(s);
    qlora__sort(s->order, s->pair_count, qlora__merge_pair_less, s->pairs);
    return QLORA_OK;
}

static void qlora__merge_put_pairs(const qlora__merge_source* s, qlora__json_writer* w) {
    qlora__string rule;
    qlora__string_begin(&s->ctx->env, &rule);
    for (size_t i = 0; i < s->pair_count; i++) {
        const qlora__merge_pair* pair = &s->pairs[s->order[i]];
        const qlora__merge_token* left = &s->words.tokens[pair->left];
        const qlora__merge_token* right = &s->words.tokens[pair->right];
        rule.size = 0;
        qlora__string_add(&rule, left->name, left->size);
        qlora__string_add(&rule, " ", 1);
        qlora__string_add(&rule, right->name, right->size);
        qlora__json_write_key(w, NULL);
        qlora__json_write_quoted(w->text, rule.data, rule.size);
    }
    w->text->result = w->text->result == QLORA_OK ? rule.result : w->text->result;
    qlora__string_free(&rule);
}

// Byte-level: the merges of the file, whose parts and results must be tokens.
static qlora_result qlora__merge_put_rules(const qlora__merge_source* s, qlora__json_writer* w) {
    const qlora__gguf_value* merges = NULL;
    uint64_t at = 0;
    qlora__string joined;
    QLORA__TRY(qlora__gguf_get_array(&s->ctx->env, s->v.g, "tokenizer.ggml.merges",
                                     QLORA__GGUF_STRING, true, &merges));
    qlora__string_begin(&s->ctx->env, &joined);
    qlora_result r = QLORA_OK;
    for (uint64_t i = 0; i < merges->count && r == QLORA_OK; i++) {
        size_t size = 0;
        const char* rule = qlora__gguf_next_string(merges, &at, &size);
        const char* blank = (const char*)memchr(rule, ' ', size);
        size_t left = blank != NULL ? (size_t)(blank - rule) : size;
        size_t right = blank != NULL ? size - left - 1 : 0;
        joined.size = 0;
        qlora__string_add(&joined, rule, left);
        qlora__string_add(&joined, rule + size - right, right);
        r = joined.result;
        bool known = r == QLORA_OK && left > 0 && right > 0 &&
                     memchr(rule + left + 1, ' ', right) == NULL &&
                     qlora__merge_find_token(&s->words, rule, left) != NULL &&
                     qlora__merge_find_token(&s->words, rule + left + 1, right) != NULL &&
                     qlora__merge_find_token(&s->words, joined.data, joined.size) != NULL;
        if (r == QLORA_OK && !known) {
            r = qlora__fail(s->ctx, QLORA_ERR_FORMAT,
                            "%s: tokenizer.ggml.merges[%llu] must be two tokens with a blank "
                            "between them that make a third",
                            s->v.g->label, (unsigned long long)i);
        }
        qlora__json_write_key(w, NULL);
        qlora__json_write_quoted(w->text, rule, size);
    }
    qlora__string_free(&joined);
    return r;
}

// ---- the steps around the model -----------------------------------------------------------------

#define QLORA__MERGE_MARK "\xE2\x96\x81" // U+2581, which is a blank in SentencePiece's tokens

static void qlora__merge_put_type(qlora__json_writer* w, const char* key, const char* type) {
    qlora__json_write_open(w, key, '{');
    qlora__json_write_string(w, "type", type);
}

static void qlora__merge_put_replace(qlora__json_writer* w, const char* from, const char* to) {
    qlora__merge_put_type(w, NULL, "Replace");
    qlora__json_write_open(w, "pattern", '{');
    qlora__json_write_string(w, "String", from);
    qlora__json_write_close(w, '}');
    qlora__json_write_string(w, "content", to);
    qlora__json_write_close(w, '}');
}

static void qlora__merge_put_bytes(qlora__json_writer* w, const char* key) {
    qlora__merge_put_type(w, key, "ByteLevel");
    qlora__json_write_word(w, "add_prefix_space", "false");
    qlora__json_write_word(w, "trim_offsets", "true");
    qlora__json_write_word(w, "use_regex", "false");
    qlora__json_write_close(w, '}');
}

static void qlora__merge_put_pieces(const qlora__merge_source* s, qlora__json_writer* w) {
    qlora__merge_put_type(w, "normalizer", "Sequence");
    qlora__json_write_open(w, "normalizers", '[');
    if (s->prefix) {
        qlora__merge_put_type(w, NULL, "Prepend");
        qlora__json_write_string(w, "prepend", QLORA__MERGE_MARK);
        qlora__json_write_close(w, '}');
    }
    qlora__merge_put_replace(w, " ", QLORA__MERGE_MARK);
    qlora__json_write_close(w, ']');
    qlora__json_write_close(w, '}');
    qlora__json_write_word(w, "pre_tokenizer", "null");
    qlora__merge_put_type(w, "decoder", "Sequence");
    qlora__json_write_open(w, "decoders", '[');
    qlora__merge_put_replace(w, QLORA__MERGE_MARK, " ");
    qlora__merge_put_type(w, NULL, "ByteFallback");
    qlora__json_write_close(w, '}');
    qlora__merge_put_type(w, NULL, "Fuse");
    qlora__json_write_close(w, '}');
    if (s->prefix) {
        qlora__merge_put_type(w, NULL, "Strip");
        qlora__json_write_string(w, "content", " ");
        qlora__json_write_int(w, "start", 1);
        qlora__json_write_int(w, "stop", 0);
        qlora__json_write_close(w, '}');
    }
    qlora__json_write_close(w, ']');
    qlora__json_write_close(w, '}');
}

static void qlora__merge_put_splits(const qlora__merge_source* s, qlora__json_writer* w) {
    qlora__json_write_word(w, "normalizer", "null");
    qlora__merge_put_type(w, "pre_tokenizer", "Sequence");
    qlora__json_write_open(w, "pretokenizers", '[');
    for (int i = 0; i < QLORA__GGUF_PATTERNS && s->pre->patterns[i] != NULL; i++) {
        qlora__merge_put_type(w, NULL, "Split");
        qlora__json_write_open(w, "pattern", '{');
        qlora__json_write_string(w, "Regex", s->pre->patterns[i]);
        qlora__json_write_close(w, '}');
        qlora__json_write_string(w, "behavior", "Isolated");
        qlora__json_write_word(w, "invert", "false");
        qlora__json_write_close(w, '}');
    }
    qlora__merge_put_bytes(w, NULL);
    qlora__json_write_close(w, ']');
    qlora__json_write_close(w, '}');
    qlora__merge_put_bytes(w, "decoder");
}

static void qlora__merge_put_word(const qlora__merge_source* s, qlora__json_writer* w,
                                  const char* key, int64_t id) {
    qlora__json_write_key(w, key);
    qlora__json_write_quoted(w->text, s->words.tokens[id].name, s->words.tokens[id].size);
}

// One of the two templates: a text, or two in a row.
static void qlora__merge_put_sequence(const qlora__merge_source* s, qlora__json_writer* w,
                                      const char* key, int texts) {
    static const char* const names[] = {"A", "B"};
    qlora__json_write_open(w, key, '[');
    for (int t = 0; t < texts; t++) {
        for (int part = 0; part < 3; part++) {
            int end = part / 2;
            if (part != 1 && s->ends[end] < 0) {
                continue;
            }
            qlora__json_write_open(w, NULL, '{');
            qlora__json_write_open(w, part == 1 ? "Sequence" : "SpecialToken", '{');
            if (part == 1) {
                qlora__json_write_string(w, "id", names[t]);
            } else {
                qlora__merge_put_word(s, w, "id", s->ends[end]);
            }
            qlora__json_write_int(w, "type_id", t);
            qlora__json_write_close(w, '}');
            qlora__json_write_close(w, '}');
        }
    }
    qlora__json_write_close(w, ']');
}

// What is put before and behind a text.
static void qlora__merge_put_ends(const qlora__merge_source* s, qlora__json_writer* w) {
    if (s->ends[0] < 0 && s->ends[1] < 0) {
        qlora__json_write_word(w, "post_processor", "null");
        return;
    }
    qlora__merge_put_type(w, "post_processor", "TemplateProcessing");
    qlora__merge_put_sequence(s, w, "single", 1);
    qlora__merge_put_sequence(s, w, "pair", 2);
    qlora__json_write_open(w, "special_tokens", '{');
    for (int i = 0; i < 2; i++) {
        if (s->ends[i] < 0 || (i == 1 && s->ends[1] == s->ends[0])) {
            continue;
        }
        const qlora__merge_token* token = &s->words.tokens[s->ends[i]];
        qlora__json_write_name(w, token->name, token->size);
        qlora__json_write_bracket(w, '{');
        qlora__merge_put_word(s, w, "id", s->ends[i]);
        qlora__json_write_open(w, "ids", '[');
        qlora__json_write_int(w, NULL, s->ends[i]);
        qlora__json_write_close(w, ']');
        qlora__json_write_open(w, "tokens", '[');
        qlora__merge_put_word(s, w, NULL, s->ends[i]);
        qlora__json_write_close(w, ']');
        qlora__json_write_close(w, '}');
    }
    qlora__json_write_close(w, '}');
    qlora__json_write_close(w, '}');
}

// ---- the whole files ----------------------------------------------------------------------------

static qlora_result qlora__merge_put_found(const qlora__merge_source* s, qlora__json_writer* w) {
    qlora__json_write_open(w, "added_tokens", '[');
    for (uint32_t i = 0; i < s->words.count; i++) {
        const qlora__merge_token* token = &s->words.tokens[i];
        qlora__gguf_token kind;
        qlora_result r =
            qlora__gguf_vocab_token(&s->ctx->env, &s->v, i, token->name, token->size, &kind);
        if (r != QLORA_OK) {
            return qlora__env_wrap(&s->ctx->env, r, "%s: ", s->v.g->label);
        }
        if (!kind.added) {
            continue;
        }
        qlora__json_write_open(w, NULL, '{');
        qlora__json_write_int(w, "id", i);
        qlora__merge_put_word(s, w, "content", i);
        qlora__json_write_word(w, "single_word", "false");
        qlora__json_write_word(w, "lstrip", "false");
        qlora__json_write_word(w, "rstrip", kind.strip_right ? "true" : "false");
        qlora__json_write_word(w, "normalized", "false");
        qlora__json_write_word(w, "special", kind.special ? "true" : "false");
        qlora__json_write_close(w, '}');
    }
    qlora__json_write_close(w, ']');
    return QLORA_OK;
}

static qlora_result qlora__merge_put_bpe(const qlora__merge_source* s, qlora__json_writer* w) {
    qlora__merge_put_type(w, "model", "BPE");
    qlora__json_write_word(w, "dropout", "null");
    if (s->v.pieces) {
        qlora__merge_put_word(s, w, "unk_token", s->unknown);
    } else {
        qlora__json_write_word(w, "unk_token", "null");
    }
    qlora__json_write_word(w, "continuing_subword_prefix", "null");
    qlora__json_write_word(w, "end_of_word_suffix", "null");
    qlora__json_write_word(w, "fuse_unk", "false");
    qlora__json_write_word(w, "byte_fallback", s->v.pieces ? "true" : "false");
    bool ignore = !s->v.pieces && s->pre->ignore_merges;
    qlora__json_write_word(w, "ignore_merges", ignore ? "true" : "false");
    qlora__json_write_open(w, "vocab", '{');
    for (uint32_t i = 0; i < s->words.count; i++) {
        const qlora__merge_token* token = &s->words.tokens[i];
        if (token->size > 0) {
            char id[16];
            snprintf(id, sizeof id, "%u", i);
            qlora__json_write_name(w, token->name, token->size);
            qlora__string_puts(w->text, id);
        }
    }
    qlora__json_write_close(w, '}');
    qlora__json_write_open(w, "merges", '[');
    if (s->v.pieces) {
        qlora__merge_put_pairs(s, w);
    } else {
        QLORA__TRY(qlora__merge_put_rules(s, w));
    }
    qlora__json_write_close(w, ']');
    qlora__json_write_close(w, '}');
    return w->text->result;
}

// Reads what the file says about its tokenizer, or refuses it by name.
static qlora_result qlora__merge_source_read(qlora__merge_source* s, const qlora__gguf* g) {
    qlora__env* env = &s->ctx->env;
    QLORA__TRY(qlora__gguf_vocab_open(env, g, &s->v));
    QLORA__TRY(s->v.pieces ? qlora__gguf_vocab_unknown(env, &s->v, &s->unknown)
                           : qlora__gguf_vocab_pre(env, &s->v, &s->pre));
    QLORA__TRY(
        qlora__gguf_get_bool(env, g, "tokenizer.ggml.add_space_prefix", s->v.pieces, &s->prefix));
    if (s->prefix && !s->v.pieces) {
        return qlora__fail(s->ctx, QLORA_ERR_UNSUPPORTED,
                           "%s: tokenizer.ggml.add_space_prefix is true, which tokenizer.json "
                           "cannot express for tokenizer.ggml.model \"gpt2\"",
                           g->label);
    }
    QLORA__TRY(qlora__gguf_vocab_ends(env, &s->v, s->pre, s->ends));
    QLORA__TRY(qlora__merge_read_words(s));
    const int64_t named[3] = {s->ends[0], s->ends[1], s->v.pieces ? s->unknown : -1};
    for (int i = 0; i < 3; i++) {
        if (named[i] >= 0 && s->words.tokens[named[i]].size == 0) {
            return qlora__fail(s->ctx, QLORA_ERR_UNSUPPORTED,
                               "%s: the special token %lld has no text, which tokenizer.json "
                               "cannot express",
                               g->label, (long long)named[i]);
        }
    }
    return s->v.pieces ? qlora__merge_read_pairs(s) : QLORA_OK;
}

static qlora_result qlora__merge_put_tokens_json(const qlora__merge_source* s,
                                                 qlora__string* text) {
    qlora__json_writer w;
    qlora__json_write_begin(&w, text, 2);
    qlora__json_write_open(&w, NULL, '{');
    qlora__json_write_string(&w, "version", "1.0");
    qlora__json_write_word(&w, "truncation", "null");
    qlora__json_write_word(&w, "padding", "null");
    QLORA__TRY(qlora__merge_put_found(s, &w));
    if (s->v.pieces) {
        qlora__merge_put_pieces(s, &w);
    } else {
        qlora__merge_put_splits(s, &w);
    }
    qlora__merge_put_ends(s, &w);
    QLORA__TRY(qlora__merge_put_bpe(s, &w));
    qlora__json_write_close(&w, '}');
    qlora__string_add(text, "\n", 1);
    return text->result;
}

// tokenizer.json for the vocabulary of a file.
static qlora_result qlora__merge_make_tokens(qlora_ctx* ctx, const qlora__gguf* g,
                                             qlora__string* text) {
    qlora__merge_source s;
    memset(&s, 0, sizeof s);
    s.ctx = ctx;
    qlora_result r = qlora__merge_source_read(&s, g);
    r = r == QLORA_OK ? qlora__merge_put_tokens_json(&s, text) : r;
    qlora__merge_source_close(&s);
    return r;
}

// tokenizer_config.json: the class that reads tokenizer.json as it is.
static qlora_result qlora__merge_make_settings(const qlora__gguf* g, int64_t positions,
                                               qlora__string* text) {
    qlora__json_writer w;
    qlora__json_write_begin(&w, text, 2);
    qlora__json_write_open(&w, NULL, '{');
    qlora__json_write_string(&w, "tokenizer_class", "PreTrainedTokenizerFast");
    qlora__json_write_word(&w, "clean_up_tokenization_spaces", "false");
    qlora__json_write_int(&w, "model_max_length", positions);
    qlora__gguf_named_tokens(g, &w);
    qlora__json_write_close(&w, '}');
    qlora__string_add(text, "\n", 1);
    return text->result;
}
