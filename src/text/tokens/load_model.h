// The model of a tokenizer.json: its tokens, merges and unknown token.

enum {
    QLORA__TEXT_MAX_ID = 1 << 24,
    QLORA__TEXT_MAX_GAP = 4096, // ids without a token, beyond twice the number of tokens
    QLORA__TEXT_MAX_ADDED = 1024,
    QLORA__TEXT_MAX_LIST = 64,
    QLORA__TEXT_MAX_STEP = 64
};

static void qlora__text_steps_free(qlora__env* env, qlora__text_steps* steps) {
    for (size_t i = 0; i < steps->count; i++) {
        qlora__text_step* step = &steps->data[i];
        qlora__env_free(env, step->a, step->a_size + 1);
        qlora__env_free(env, step->b, step->b_size + 1);
        qlora__pattern_free(env, step->program);
    }
    steps->count = 0;
}

#define QLORA__TEXT_FREE(env, array, capacity)                                                     \
    qlora__env_free((env), (array), (capacity) * sizeof *(array))

static void qlora__text_tok_free(qlora__env* env, qlora_text_tok* tok) {
    qlora__text_bytes_free(env, &tok->names);
    QLORA__TEXT_FREE(env, tok->spans, tok->span_capacity);
    QLORA__TEXT_FREE(env, tok->kinds, tok->kind_capacity);
    qlora__text_words_free(env, &tok->words);
    qlora__text_pairs_free(env, &tok->merges);
    qlora__text_pairs_free(env, &tok->words_trie.edges);
    QLORA__TEXT_FREE(env, tok->scores, tok->score_capacity);
    QLORA__TEXT_FREE(env, tok->paths, tok->path_capacity);
    QLORA__TEXT_FREE(env, tok->added, tok->added_capacity);
    qlora__text_pairs_free(env, &tok->raw_trie.edges);
    qlora__text_pairs_free(env, &tok->normalized_trie.edges);
    qlora__text_steps_free(env, &tok->normalizer);
    qlora__text_steps_free(env, &tok->splitter);
    qlora__text_steps_free(env, &tok->decoder);
    qlora__text_ids_free(env, &tok->prefix);
    qlora__text_ids_free(env, &tok->suffix);
    QLORA__TEXT_FREE(env, tok->classes, QLORA__TEXT_CODES);
    QLORA__TEXT_FREE(env, tok->cache, QLORA__TEXT_CACHE_PLACES);
    for (size_t i = 0; i < QLORA__TEXT_COUNT(tok->buffers); i++) {
        qlora__text_bytes_free(env, &tok->buffers[i]);
    }
    for (size_t i = 0; i < QLORA__TEXT_COUNT(tok->pieces); i++) {
        QLORA__TEXT_FREE(env, tok->pieces[i].data, tok->pieces[i].capacity);
    }
    QLORA__TEXT_FREE(env, tok->marks.data, tok->marks.capacity);
    QLORA__TEXT_FREE(env, tok->marks.sorted, tok->marks.sorted_capacity);
    QLORA__TEXT_FREE(env, tok->symbols, tok->symbol_capacity);
    QLORA__TEXT_FREE(env, tok->jobs, tok->job_capacity);
    qlora__env_free(env, tok, sizeof *tok);
}

// The stand-ins of byte-level files: printable Latin-1 bytes for themselves, 256 + n for the rest.
static void qlora__text_byte_tables(qlora_text_tok* tok) {
    uint16_t next = 256;
    for (size_t i = 0; i < QLORA__TEXT_COUNT(tok->byte_of_code); i++) {
        tok->byte_of_code[i] = -1;
    }
    for (unsigned b = 0; b < 256; b++) {
        bool printable = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        tok->code_of_byte[b] = printable ? (uint16_t)b : next++;
        tok->byte_of_code[tok->code_of_byte[b]] = (int16_t)b;
        tok->byte_ids[b] = -1;
        tok->fallback_ids[b] = -1;
    }
}

// On failure, *out is NULL and nothing is left to free.
static qlora_result qlora__text_tok_new(qlora_text* text, qlora_text_tok** out) {
    qlora__env* env = &text->env;
    qlora_text_tok* tok = (qlora_text_tok*)qlora__text_zalloc(env, 1, sizeof(qlora_text_tok));
    *out = NULL;
    if (tok == NULL) {
        return QLORA_ERR_MEMORY;
    }
    tok->text = text;
    tok->unknown = -1;
    qlora__text_byte_tables(tok);
    tok->classes = qlora__text_classes_make(env);
    tok->cache = (qlora__text_cached*)qlora__text_zalloc(env, QLORA__TEXT_CACHE_PLACES,
                                                         sizeof(qlora__text_cached));
    if (tok->classes == NULL || tok->cache == NULL) {
        qlora__text_tok_free(env, tok);
        return QLORA_ERR_MEMORY;
    }
    *out = tok;
    return QLORA_OK;
}

// The stand-ins back to bytes: at most `size` of them. False when a character is not a stand-in.
static bool qlora__text_unstand_to(const qlora_text_tok* tok, const char* text, size_t size,
                                   char* out, size_t* count) {
    *count = 0;
    for (size_t at = 0; at < size;) {
        uint32_t code = 0;
        size_t length = qlora__text_utf8((const unsigned char*)text + at, size - at, &code);
        if (length == 0 || code >= QLORA__TEXT_COUNT(tok->byte_of_code) ||
            tok->byte_of_code[code] < 0) {
            return false;
        }
        out[(*count)++] = (char)(unsigned char)tok->byte_of_code[code];
        at += length;
    }
    return true;
}

// The same, appended; nothing is appended unless *known.
static qlora_result qlora__text_unstand(qlora__env* env, const qlora_text_tok* tok,
                                        const char* text, size_t size, qlora_text_bytes* out,
                                        bool* known) {
    size_t count = 0;
    QLORA__TRY(qlora__text_bytes_room(env, out, size));
    *known = size == 0 || qlora__text_unstand_to(tok, text, size, out->data + out->count, &count);
    out->count += *known ? count : 0;
    return QLORA_OK;
}

// The id of a word as the file spells it, or -1.
static int32_t qlora__text_model_find(const qlora_text_tok* tok, const char* name, size_t size) {
    char raw[QLORA__TEXT_MAX_ADDED];
    size_t count = 0;
    if (!tok->byte_level) {
        return qlora__text_words_find(&tok->words, name, size);
    }
    if (size > sizeof(raw) || !qlora__text_unstand_to(tok, name, size, raw, &count)) {
        return -1;
    }
    return qlora__text_words_find(&tok->words, raw, count);
}

// Gives an id its name. A new id is created.
static qlora_result qlora__text_tok_name(qlora__env* env, qlora_text_tok* tok, int64_t id,
                                         const char* name, size_t size, unsigned kind) {
    int64_t limit = tok->id_limit > 0 ? tok->id_limit : (int64_t)QLORA__TEXT_MAX_ID;
    if (id < 0 || id >= limit) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "token \"%.60s\" has id %lld; ids must be 0 to %lld in a file of "
                               "this size",
                               name, (long long)id, (long long)limit - 1);
    }
    size_t index = (size_t)id;
    if (index >= tok->count) {
        size_t extra = index + 1 - tok->count;
        void* spans = tok->spans;
        qlora_result r = qlora__text_reserve(env, &spans, &tok->span_capacity, tok->count, extra,
                                             sizeof(qlora__text_span));
        tok->spans = (qlora__text_span*)spans;
        QLORA__TRY(r);
        void* kinds = tok->kinds;
        r = qlora__text_reserve(env, &kinds, &tok->kind_capacity, tok->count, extra, 1);
        tok->kinds = (uint8_t*)kinds;
        QLORA__TRY(r);
        memset(tok->spans + tok->count, 0, extra * sizeof(qlora__text_span));
        memset(tok->kinds + tok->count, 0, extra);
        tok->count = index + 1;
    }
    if (tok->names.count + size >= UINT32_MAX) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "the vocabulary is larger than 4 GiB");
    }
    tok->spans[index].at = (uint32_t)tok->names.count;
    tok->spans[index].size = (uint32_t)size;
    tok->kinds[index] = (uint8_t)(tok->kinds[index] | kind | QLORA__TEXT_K_EXISTS);
    return qlora__text_bytes_add(env, &tok->names, name, size);
}

// <0x00> to <0xFF>: the byte, or -1.
static int qlora__text_byte_token(const char* name, size_t size) {
    if (size != 6 || memcmp(name, "<0x", 3) != 0 || name[5] != '>') {
        return -1;
    }
    int value = 0;
    for (size_t i = 3; i < 5; i++) {
        char c = name[i];
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                           : -1;
        if (digit < 0) {
            return -1;
        }
        value = value * 16 + digit;
    }
    return value;
}

// Adds a word of the vocabulary: its name, and its entry in the model's table.
static qlora_result qlora__text_tok_word(qlora__env* env, qlora_text_tok* tok, const char* name,
                                         size_t size, int64_t id) {
    int byte = qlora__text_byte_token(name, size);
    QLORA__TRY(qlora__text_tok_name(env, tok, id, name, size, byte >= 0 ? QLORA__TEXT_K_BYTE : 0));
    if (byte >= 0 && name[3] < 'a' && name[4] < 'a') {
        tok->fallback_ids[byte] = (int32_t)id;
    }
    if (!tok->byte_level) {
        return qlora__text_words_put(env, &tok->words, name, size, (int32_t)id);
    }
    qlora_text_bytes* raw = &tok->buffers[0];
    bool known = false;
    raw->count = 0;
    QLORA__TRY(qlora__text_unstand(env, tok, name, size, raw, &known));
    tok->others += known ? 0 : 1;
    return !known ? QLORA_OK
                  : qlora__text_words_put(env, &tok->words, raw->data, raw->count, (int32_t)id);
}

// Whether an id is that of a word with another spelling. Merges and texts would be ambiguous.
static bool qlora__text_id_taken(const qlora_text_tok* tok, int64_t id, const char* name,
                                 size_t size) {
    if (id < 0 || (uint64_t)id >= tok->count || (tok->kinds[id] & QLORA__TEXT_K_EXISTS) == 0) {
        return false;
    }
    qlora__text_span other = tok->spans[id];
    return other.size != size || memcmp(tok->names.data + other.at, name, size) != 0;
}

static qlora_result qlora__text_load_vocab(qlora__env* env, qlora_text_tok* tok,
                                           const qlora__json* json,
                                           const qlora__json_token* vocab) {
    if (vocab == NULL || vocab->kind != QLORA__JSON_OBJECT) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "model.vocab is not an object");
    }
    const qlora__json_token* key = vocab + 1;
    QLORA__TRY(qlora__text_words_reserve(env, &tok->words, vocab->count));
    for (uint32_t i = 0; i < vocab->count; i++) {
        const qlora__json_token* value = qlora__text_json_next(json, key);
        const char* name = qlora__text_json_text(json, key);
        int64_t id = 0;
        if (!qlora__text_json_integer(json, value, &id)) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "model.vocab: the id of \"%.60s\" is not a whole number", name);
        }
        size_t size = qlora__text_json_size(key);
        if (qlora__text_id_taken(tok, id, name, size)) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "model.vocab: \"%.60s\" has id %lld, as another token does",
                                   name, (long long)id);
        }
        QLORA__TRY(qlora__text_tok_word(env, tok, name, size, id));
        key = qlora__text_json_next(json, value);
    }
    for (unsigned b = 0; b < 256; b++) {
        char byte = (char)(unsigned char)b;
        tok->byte_ids[b] = qlora__text_words_find(&tok->words, &byte, 1);
    }
    return QLORA_OK;
}

// The two halves of a merge, "a b" or ["a", "b"], as places in json->strings.
static bool qlora__text_merge_halves(const qlora__json* json, const qlora__json_token* merge,
                                     qlora__text_span halves[2]) {
    if (merge->kind == QLORA__JSON_ARRAY && merge->count == 2) {
        const qlora__json_token* a = merge + 1;
        const qlora__json_token* b = qlora__text_json_next(json, a);
        if (qlora__text_json_string(a) && qlora__text_json_string(b)) {
            halves[0].at = a->begin;
            halves[0].size = a->end - a->begin;
            halves[1].at = b->begin;
            halves[1].size = b->end - b->begin;
            return true;
        }
    }
    if (merge->kind == QLORA__JSON_STRING) {
        const char* text = qlora__text_json_text(json, merge);
        size_t size = qlora__text_json_size(merge);
        const char* space = (const char*)memchr(text, ' ', size);
        size_t left = space != NULL ? (size_t)(space - text) : 0;
        if (space != NULL && memchr(space + 1, ' ', size - left - 1) == NULL) {
            halves[0].at = merge->begin;
            halves[0].size = (uint32_t)left;
            halves[1].at = merge->begin + (uint32_t)left + 1;
            halves[1].size = (uint32_t)(size - left - 1);
            return true;
        }
    }
    return false;
}

// Adds a merge of two tokens as the file spells them.
static qlora_result qlora__text_put_merge(qlora__env* env, qlora_text_tok* tok,
                                          const char* const halves[2], const size_t sizes[2],
                                          uint32_t rank) {
    qlora_text_bytes* raw = &tok->buffers[0];
    raw->count = 0;
    int32_t ids[2];
    size_t begin = 0;
    for (size_t i = 0; i < 2; i++) {
        bool known = true;
        if (tok->byte_level) {
            QLORA__TRY(qlora__text_unstand(env, tok, halves[i], sizes[i], raw, &known));
        } else {
            QLORA__TRY(qlora__text_bytes_add(env, raw, halves[i], sizes[i]));
        }
        ids[i] =
            known ? qlora__text_words_find(&tok->words, raw->data + begin, raw->count - begin) : -1;
        if (ids[i] < 0) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "uses \"%.*s\", which is not in the vocabulary",
                                   (int)(sizes[i] < 60 ? sizes[i] : 60), halves[i]);
        }
        begin = raw->count;
    }
    int32_t joined = qlora__text_words_find(&tok->words, raw->data, raw->count);
    if (joined < 0) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "joins to a token that is not in the vocabulary");
    }
    return qlora__text_pairs_put(env, &tok->merges, (uint32_t)ids[0], (uint32_t)ids[1], rank,
                                 (uint32_t)joined);
}

static qlora_result qlora__text_load_merge(qlora__env* env, qlora_text_tok* tok,
                                           const qlora__json* json, const qlora__json_token* merge,
                                           uint32_t rank) {
    qlora__text_span halves[2];
    memset(halves, 0, sizeof(halves));
    if (!qlora__text_merge_halves(json, merge, halves)) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "is neither \"a b\" nor [\"a\", \"b\"]");
    }
    const char* const texts[2] = {json->strings + halves[0].at, json->strings + halves[1].at};
    const size_t sizes[2] = {halves[0].size, halves[1].size};
    return qlora__text_put_merge(env, tok, texts, sizes, rank);
}

static qlora_result qlora__text_load_merges(qlora__env* env, qlora_text_tok* tok,
                                            const qlora__json* json,
                                            const qlora__json_token* merges) {
    if (merges == NULL || merges->kind != QLORA__JSON_ARRAY) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "model.merges is not an array");
    }
    const qlora__json_token* merge = merges + 1;
    QLORA__TRY(qlora__text_pairs_reserve(env, &tok->merges, merges->count));
    for (uint32_t i = 0; i < merges->count; i++) {
        qlora_result r = qlora__text_load_merge(env, tok, json, merge, i);
        if (r != QLORA_OK) {
            return qlora__env_wrap(env, r, "model.merges[%lu] ", (unsigned long)i);
        }
        merge = qlora__text_json_next(json, merge);
    }
    return QLORA_OK;
}

// Whether the word mark never follows another character in any word that merging can make.
static bool qlora__text_cut_is_safe(const qlora_text_tok* tok) {
    size_t size = tok->cut_size;
    if (tok->byte_level || tok->ignore_merges || tok->unigram || size == 0 ||
        qlora__text_words_find(&tok->words, tok->cut, size) < 0) {
        return false;
    }
    for (size_t place = 0; place < tok->merges.places; place++) {
        const qlora__text_pair* pair = &tok->merges.data[place];
        if (pair->key == UINT64_MAX) {
            continue;
        }
        const char* name = tok->names.data + tok->spans[pair->second].at;
        size_t count = tok->spans[pair->second].size;
        bool before = true;
        for (size_t at = 0; at < count;) {
            bool mark = count - at >= size && memcmp(name + at, tok->cut, size) == 0;
            if (mark && !before) {
                return false;
            }
            before = mark;
            at += mark ? size : 1;
        }
    }
    return true;
}

// The power of ten of a number in JSON text: what follows its e, and `exponent`.
static int64_t qlora__text_score_exponent(const char* text, size_t size, int64_t exponent) {
    const int64_t most = 1000000000;
    int64_t value = 0;
    size_t at = size > 0 && (text[0] == '+' || text[0] == '-') ? 1 : 0;
    for (size_t i = at; i < size && value < most; i++) {
        value = value * 10 + (text[i] - '0');
    }
    return exponent + (at > 0 && text[0] == '-' ? -value : value);
}

// A score as the `tokenizers` library reads it: 64 bits of digits, rounded, and multiplied or
// divided by a power of ten. This is not always the nearest number, but sums of scores are compared
// to the last bit.
static bool qlora__text_score(const qlora__json* json, const qlora__json_token* token,
                              double* out) {
    if (token->kind != QLORA__JSON_NUMBER) {
        return false;
    }
    const char* text = json->text + token->begin;
    size_t size = token->end - token->begin;
    uint64_t digits = 0;
    int64_t exponent = 0;
    bool full = false;
    bool point = false;
    size_t at = text[0] == '-' ? 1 : 0;
    for (; at < size && text[at] != 'e' && text[at] != 'E'; at++) {
        if (text[at] == '.') {
            point = true;
            full = false; // the fraction may still fit
            continue;
        }
        uint64_t digit = (uint64_t)(text[at] - '0');
        full = full || digits > (UINT64_MAX - digit) / 10;
        digits = full ? digits : digits * 10 + digit;
        exponent += full ? (point ? 0 : 1) : (point ? -1 : 0);
    }
    if (at < size) {
        exponent = qlora__text_score_exponent(text + at + 1, size - at - 1, exponent);
    }
    double x = (double)digits;
    for (; exponent < -308 && x > 0; exponent += 308) {
        x /= 1e308;
    }
    if (x > 0 && exponent <= 308) {
        char power[8];
        int count =
            snprintf(power, sizeof power, "1e%d", (int)(exponent < 0 ? -exponent : exponent));
        double ten = qlora__number_parse(power, (size_t)count);
        x = exponent < 0 ? x / ten : x * ten;
    }
    *out = text[0] == '-' ? -x : x;
    return x <= 1.7976931348623157e308 && (x <= 0 || exponent <= 308);
}

// The vocabulary of a Unigram model: [[token, score], ...]. Of equal tokens the last one counts.
static qlora_result qlora__text_load_scores(qlora__env* env, qlora_text_tok* tok,
                                            const qlora__json* json,
                                            const qlora__json_token* vocab) {
    double least = 0;
    if (vocab == NULL || vocab->kind != QLORA__JSON_ARRAY || vocab->count == 0) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "model.vocab is not a list of tokens");
    }
    tok->scores = (double*)qlora__text_zalloc(env, vocab->count, sizeof(double));
    if (tok->scores == NULL) {
        return QLORA_ERR_MEMORY;
    }
    tok->score_capacity = vocab->count;
    QLORA__TRY(qlora__text_words_reserve(env, &tok->words, vocab->count));
    const qlora__json_token* pair = vocab + 1;
    for (uint32_t i = 0; i < vocab->count; i++) {
        const qlora__json_token* name = pair + 1;
        bool good = pair->kind == QLORA__JSON_ARRAY && pair->count == 2 &&
                    qlora__text_json_string(name) &&
                    qlora__text_score(json, qlora__text_json_next(json, name), &tok->scores[i]);
        if (!good) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT, "model.vocab[%lu] is not [token, score]",
                                   (unsigned long)i);
        }
        const char* text = qlora__text_json_text(json, name);
        size_t size = qlora__text_json_size(name);
        least = i == 0 || tok->scores[i] < least ? tok->scores[i] : least;
        QLORA__TRY(qlora__text_tok_word(env, tok, text, size, i));
        QLORA__TRY(qlora__text_trie_add(env, &tok->words_trie, text, size, i));
        pair = qlora__text_json_next(json, pair);
    }
    tok->unknown_score = least - 10; // as in SentencePiece
    return QLORA_OK;
}

static qlora_result qlora__text_load_unigram(qlora__env* env, qlora_text_tok* tok,
                                             const qlora__json* json,
                                             const qlora__json_token* model) {
    const qlora__json_token* unknown = qlora__text_json_get(json, model, "unk_id");
    static const char* const refused[] = {"alpha", "nbest_size"}; // random tokens
    for (size_t i = 0; i < QLORA__TEXT_COUNT(refused); i++) {
        if (!qlora__text_json_absent(qlora__text_json_get(json, model, refused[i]))) {
            return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED, "model.%s is not supported",
                                   refused[i]);
        }
    }
    if (tok->byte_level) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "a Unigram model after ByteLevel is not supported");
    }
    tok->unigram = true;
    QLORA__TRY(qlora__text_json_switch(env, json, model, "byte_fallback", &tok->byte_fallback));
    QLORA__TRY(qlora__text_load_scores(env, tok, json, qlora__text_json_get(json, model, "vocab")));
    int64_t id = -1;
    if (!qlora__text_json_absent(unknown) && (!qlora__text_json_integer(json, unknown, &id) ||
                                              id < 0 || (uint64_t)id >= tok->score_capacity)) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "model.unk_id is not in the vocabulary");
    }
    tok->unknown = (int32_t)id;
    return QLORA_OK;
}

static qlora_result qlora__text_load_model(qlora__env* env, qlora_text_tok* tok,
                                           const qlora__json* json,
                                           const qlora__json_token* model) {
    const qlora__json_token* type = qlora__text_json_get(json, model, "type");
    if (model == NULL || model->kind != QLORA__JSON_OBJECT) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "missing \"model\"; this is not a tokenizer.json");
    }
    if (qlora__text_json_is(json, type, "Unigram")) {
        return qlora__text_load_unigram(env, tok, json, model);
    }
    if (!qlora__text_json_absent(type) && !qlora__text_json_is(json, type, "BPE")) {
        const char* name = qlora__text_json_cstring(json, type);
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "the model type is %.60s; only BPE and Unigram are supported",
                               name != NULL ? name : "not a string");
    }
    static const char* const refused[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    for (size_t i = 0; i < QLORA__TEXT_COUNT(refused); i++) {
        const qlora__json_token* node = qlora__text_json_get(json, model, refused[i]);
        if (!qlora__text_json_absent(node) && !qlora__text_json_is(json, node, "")) {
            return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED, "model.%s is not supported",
                                   refused[i]);
        }
    }
    const qlora__json_token* dropout = qlora__text_json_get(json, model, "dropout");
    int64_t rate = 1;
    if (!qlora__text_json_absent(dropout) &&
        !(qlora__text_json_integer(json, dropout, &rate) && rate == 0)) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED, "model.dropout is not supported");
    }
    QLORA__TRY(qlora__text_json_switch(env, json, model, "byte_fallback", &tok->byte_fallback));
    QLORA__TRY(qlora__text_json_switch(env, json, model, "fuse_unk", &tok->fuse_unknown));
    QLORA__TRY(qlora__text_json_switch(env, json, model, "ignore_merges", &tok->ignore_merges));
    QLORA__TRY(qlora__text_load_vocab(env, tok, json, qlora__text_json_get(json, model, "vocab")));
    QLORA__TRY(
        qlora__text_load_merges(env, tok, json, qlora__text_json_get(json, model, "merges")));
    const qlora__json_token* unknown = qlora__text_json_get(json, model, "unk_token");
    if (!qlora__text_json_absent(unknown)) {
        const char* name = qlora__text_json_cstring(json, unknown);
        tok->unknown =
            name != NULL ? qlora__text_model_find(tok, name, qlora__text_json_size(unknown)) : -1;
        if (tok->unknown < 0) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "model.unk_token is not in the vocabulary");
        }
    }
    return QLORA_OK;
}
