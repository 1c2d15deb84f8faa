// ---- the tokenizer in a GGUF file ---------------------------------------------------------------

// The patterns behind the names of tokenizer.ggml.pre. Several patterns of one name are applied in
// turn, each to the pieces that the one before left.
#define QLORA__TEXT_GGUF_PATTERNS 6

typedef struct qlora__text_pre {
    const char* names; // separated and surrounded by blanks
    const char* patterns[QLORA__TEXT_GGUF_PATTERNS];
    bool ignore_merges;
    bool add_bos;
} qlora__text_pre;

#define QLORA__TEXT_G_GPT2 "'s|'t|'re|'ve|'m|'ll|'d" QLORA__TEXT_R_GPT2
#define QLORA__TEXT_G_LLAMA3 QLORA__TEXT_R_ASCII QLORA__TEXT_R_WORD "\\p{N}{1,3}" QLORA__TEXT_R_REST
#define QLORA__TEXT_G_CJK "[\\x{4e00}-\\x{9fa5}\\x{800}-\\x{4e00}\\x{ac00}-\\x{d7ff}]+"
#define QLORA__TEXT_G_KANA "[\\x{4e00}-\\x{9fa5}\\x{3040}-\\x{309f}\\x{30a0}-\\x{30ff}]+"
// Cased letters, as the pattern of the first DeepSeek models lists them.
#define QLORA__TEXT_G_CASED                                                                        \
    "\\x{41}-\\x{5a}\\x{61}-\\x{7a}\\x{b5}\\x{c0}-\\x{d6}\\x{d8}-\\x{f6}\\x{f8}-\\x{1ba}"          \
    "\\x{1bc}-\\x{1bf}\\x{1c4}-\\x{293}\\x{295}-\\x{2af}\\x{370}-\\x{373}\\x{376}\\x{377}"         \
    "\\x{37b}-\\x{37d}\\x{37f}\\x{386}\\x{388}-\\x{38a}\\x{38c}\\x{38e}-\\x{3a1}"                  \
    "\\x{3a3}-\\x{3f5}\\x{3f7}-\\x{481}\\x{48a}-\\x{52f}\\x{531}-\\x{556}\\x{10a0}-\\x{10c5}"      \
    "\\x{13a0}-\\x{13f5}\\x{13f8}-\\x{13fd}\\x{1c90}-\\x{1cba}\\x{1cbd}-\\x{1cbf}"                 \
    "\\x{1d00}-\\x{1d2b}\\x{1d6b}-\\x{1d77}\\x{1d79}-\\x{1d9a}\\x{1e00}-\\x{1f15}"                 \
    "\\x{1f18}-\\x{1f1d}\\x{1f20}-\\x{1f45}\\x{1f48}-\\x{1f4d}\\x{1f50}-\\x{1f57}\\x{1f59}"        \
    "\\x{1f5b}\\x{1f5d}\\x{1f5f}-\\x{1f7d}\\x{1f80}-\\x{1fb4}\\x{1fb6}-\\x{1fbc}\\x{1fbe}"         \
    "\\x{1fc2}-\\x{1fc4}\\x{1fc6}-\\x{1fcc}\\x{1fd0}-\\x{1fd3}\\x{1fd6}-\\x{1fdb}"                 \
    "\\x{1fe0}-\\x{1fec}\\x{1ff2}-\\x{1ff4}\\x{1ff6}-\\x{1ffc}\\x{2102}\\x{2107}"                  \
    "\\x{210a}-\\x{2113}\\x{2115}\\x{2119}-\\x{211d}\\x{2124}\\x{2126}\\x{2128}"                   \
    "\\x{212a}-\\x{212d}\\x{212f}-\\x{2134}\\x{2139}\\x{213c}-\\x{213f}\\x{2145}-\\x{2149}"        \
    "\\x{214e}\\x{2183}\\x{2184}\\x{2c00}-\\x{2c7b}\\x{2c7e}-\\x{2ce4}\\x{2ceb}-\\x{2cee}"         \
    "\\x{2cf2}\\x{2cf3}\\x{a640}-\\x{a66d}\\x{a680}-\\x{a69b}\\x{a722}-\\x{a76f}"                  \
    "\\x{a771}-\\x{a787}\\x{a78b}-\\x{a78e}\\x{ab70}-\\x{abbf}\\x{fb00}-\\x{fb06}"                 \
    "\\x{fb13}-\\x{fb17}\\x{ff21}-\\x{ff3a}\\x{ff41}-\\x{ff5a}\\x{10400}-\\x{1044f}"               \
    "\\x{104b0}-\\x{104d3}\\x{104d8}-\\x{104fb}\\x{10c80}-\\x{10cb2}\\x{10cc0}-\\x{10cf2}"         \
    "\\x{118a0}-\\x{118df}\\x{1e900}-\\x{1e943}"

static const qlora__text_pre qlora__text_pres[] = {
    {" llama-bpe llama3 llama-v3 falcon3 pixtral lfm2 ",
     {QLORA__TEXT_G_LLAMA3, NULL, NULL, NULL, NULL, NULL},
     true,
     true},
    {" smaug-bpe dbrx glm4 chatglm-bpe ",
     {QLORA__TEXT_G_LLAMA3, NULL, NULL, NULL, NULL, NULL},
     false,
     false},
    {" qwen2 deepseek-r1-qwen stablelm2 ",
     {QLORA__TEXT_R_ASCII QLORA__TEXT_R_WORD "\\p{N}" QLORA__TEXT_R_REST, NULL, NULL, NULL, NULL,
      NULL},
     false,
     false},
    {" qwen35 ",
     {QLORA__TEXT_R_ASCII QLORA__TEXT_R_MARKS, NULL, NULL, NULL, NULL, NULL},
     false,
     false},
    {" tekken ",
     {QLORA__TEXT_R_CASED("") "\\p{N}" QLORA__TEXT_R_REST3, NULL, NULL, NULL, NULL, NULL},
     true,
     true},
    {" gpt-4o llama4 ",
     {QLORA__TEXT_R_CASED(QLORA__TEXT_R_ASCII "?") "\\p{N}{1,3}" QLORA__TEXT_R_REST3, NULL, NULL,
      NULL, NULL, NULL},
     false,
     false},
    {" gpt-2 phi-2 olmo exaone4 jais mpt ",
     {QLORA__TEXT_G_GPT2, NULL, NULL, NULL, NULL, NULL},
     false,
     false},
    {" refact starcoder smollm command-r exaone codeshell ",
     {"\\p{N}", QLORA__TEXT_G_GPT2, NULL, NULL, NULL, NULL},
     false,
     false},
    {" seed-coder ",
     {QLORA__TEXT_R_ASCII QLORA__TEXT_R_WORD
      "\\p{N}{1}| ?[^\\s\\p{L}\\p{N}\\r\\n]+" QLORA__TEXT_R_LINES,
      NULL, NULL, NULL, NULL, NULL},
     false,
     false},
    {" deepseek-v3 ",
     {"\\p{N}{1,3}", QLORA__TEXT_G_KANA, QLORA__TEXT_R_DEEPSEEK3, NULL, NULL, NULL},
     false,
     false},
    {" deepseek-llm ",
     {"[\\r\\n]", "\\s?[" QLORA__TEXT_G_CASED "]+",
      "\\s?[!-/:-~\\x{ff01}-\\x{ff0f}\\x{ff1a}-\\x{ff5e}\\x{2018}-\\x{201f}\\x{3000}-\\x{3002}]+",
      "\\s+$", QLORA__TEXT_G_CJK, "\\p{N}+"},
     false,
     false},
    {" deepseek-coder ",
     {"[\\r\\n]", "\\s?\\p{L}+", "\\s?\\p{P}+", QLORA__TEXT_G_CJK, "\\p{N}", NULL},
     false,
     false},
    {" default ",
     {"[\\p{P}\\$\\+<=>\\^~\\|]+", QLORA__TEXT_G_GPT2, "\\p{N}+", "[0-9][0-9][0-9]", NULL, NULL},
     false,
     false},
};

static const qlora__text_pre* qlora__text_pre_find(const char* name, size_t size) {
    char word[66];
    if (name == NULL) {
        name = "default";
        size = 7;
    }
    if (size == 0 || size > 64) {
        return NULL;
    }
    word[0] = ' ';
    memcpy(word + 1, name, size);
    word[size + 1] = ' ';
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__text_pres); i++) {
        const char* at = qlora__text_pres[i].names;
        size_t room = strlen(at);
        for (size_t k = 0; k + size + 2 <= room; k++) {
            if (memcmp(at + k, word, size + 2) == 0) {
                return &qlora__text_pres[i];
            }
        }
    }
    return NULL;
}

// ---- tokens -------------------------------------------------------------------------------------

// tokenizer.ggml.token_type
enum {
    QLORA__TEXT_T_NORMAL = 1,
    QLORA__TEXT_T_UNKNOWN = 2,
    QLORA__TEXT_T_CONTROL = 3,
    QLORA__TEXT_T_USER = 4,
    QLORA__TEXT_T_UNUSED = 5,
    QLORA__TEXT_T_BYTE = 6
};

typedef struct qlora__text_gguf {
    qlora__env* env;
    qlora_text_tok* tok;
    const qlora__gguf* g;
    const qlora__gguf_value* tokens;
    const qlora__gguf_value* types;  // NULL: all normal
    const qlora__gguf_value* scores; // NULL: none
    bool pieces;                     // SentencePiece, not byte-level BPE
    bool phi3;
} qlora__text_gguf;

// A token that is found in a text before the model splits it.
static qlora_result qlora__text_gguf_added(const qlora__text_gguf* t, int32_t id, int64_t type) {
    qlora_text_tok* tok = t->tok;
    QLORA__TRY(qlora__text_tok_add(t->env, tok, id, type != QLORA__TEXT_T_USER));
    qlora__text_added* added = &tok->added[tok->added_count - 1];
    const char* name = tok->names.data + added->name.at;
    // llama.cpp treats files of this name so, whatever they say; their tokenizer.json agrees.
    added->strip_right = t->phi3 && !qlora__gguf_is(name, added->name.size, "<unk>") &&
                         !qlora__gguf_is(name, added->name.size, "<s>") &&
                         !qlora__gguf_is(name, added->name.size, "<|endoftext|>");
    return QLORA_OK;
}

// llama.cpp takes these ends of a text or a turn for special tokens, whatever their type is.
static bool qlora__text_gguf_is_end(const char* name, size_t size) {
    static const char* const ends[] = {
        "</s>",       "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>",
        "<|eom_id|>", "<|end|>",       "<end_of_turn>",   "<EOT>",      "[EOT]"};
    for (size_t i = 0; i < QLORA__TEXT_COUNT(ends); i++) {
        if (qlora__gguf_is(name, size, ends[i])) {
            return true;
        }
    }
    return false;
}

static qlora_result qlora__text_gguf_token_add(const qlora__text_gguf* t, int32_t id,
                                               const char* name, size_t size, int64_t type) {
    qlora_text_tok* tok = t->tok;
    // In byte-level files, added tokens are spelt plainly, so they are not words of the model.
    bool word = t->pieces || type == QLORA__TEXT_T_NORMAL || type == QLORA__TEXT_T_BYTE;
    type = qlora__text_gguf_is_end(name, size) ? (int64_t)QLORA__TEXT_T_CONTROL : type;
    bool added = type == QLORA__TEXT_T_CONTROL || type == QLORA__TEXT_T_USER ||
                 type == QLORA__TEXT_T_UNKNOWN;
    if (added && size > QLORA__TEXT_MAX_ADDED) {
        return qlora__env_fail(t->env, QLORA_ERR_FORMAT,
                               "token %d is special and has %llu bytes; the limit is %d", (int)id,
                               (unsigned long long)size, QLORA__TEXT_MAX_ADDED);
    }
    if (word && size > 0) {
        QLORA__TRY(qlora__text_tok_word(t->env, tok, name, size, id));
    } else {
        QLORA__TRY(qlora__text_tok_name(t->env, tok, id, name, size, 0));
    }
    return added && size > 0 ? qlora__text_gguf_added(t, id, type) : QLORA_OK;
}

static qlora_result qlora__text_gguf_tokens(const qlora__text_gguf* t) {
    uint64_t at = 0;
    QLORA__TRY(qlora__text_words_reserve(t->env, &t->tok->words, (size_t)t->tokens->count));
    for (uint64_t i = 0; i < t->tokens->count; i++) {
        size_t size = 0;
        int64_t type = QLORA__TEXT_T_NORMAL;
        const char* name = qlora__gguf_next_string(t->tokens, &at, &size);
        if (t->types != NULL && (!qlora__gguf_integer(t->types, i, &type) ||
                                 type < QLORA__TEXT_T_NORMAL || type > QLORA__TEXT_T_BYTE)) {
            return qlora__env_fail(t->env, QLORA_ERR_FORMAT,
                                   "tokenizer.ggml.token_type[%llu] is %lld; it must be 1 to 6",
                                   (unsigned long long)i, (long long)type);
        }
        QLORA__TRY(qlora__text_gguf_token_add(t, (int32_t)i, name, size, type));
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
    for (uint64_t i = 0; i < t->tokens->count; i++) {
        double score = 0.0;
        int64_t whole = 0;
        if (qlora__gguf_integer(t->scores, i, &whole)) { // some files have integers
            score = (double)whole;
        } else if (!qlora__gguf_real(t->scores, i, &score) || !(score > -1e30 && score < 1e30)) {
            return qlora__env_fail(t->env, QLORA_ERR_FORMAT,
                                   "tokenizer.ggml.scores[%llu] is not a finite number",
                                   (unsigned long long)i);
        }
        if (t->tok->spans[i].size > 0 && (t->tok->kinds[i] & QLORA__TEXT_K_BYTE) == 0) {
            scored[count].score = (float)score;
            scored[count].id = (int32_t)i;
            count++;
        }
    }
    return qlora__text_load_scored_merges(t->env, t->tok, scored, count);
}

static qlora_result qlora__text_gguf_pieces(const qlora__text_gguf* t) {
    size_t room = (size_t)t->tokens->count;
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
static qlora_result qlora__text_gguf_merges(const qlora__text_gguf* t) {
    const qlora__gguf_value* merges = NULL;
    uint64_t at = 0;
    QLORA__TRY(qlora__gguf_get_array(t->env, t->g, "tokenizer.ggml.merges", QLORA__GGUF_STRING,
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
static qlora_result qlora__text_gguf_piece_steps(const qlora__text_gguf* t) {
    qlora__env* env = t->env;
    qlora_text_tok* tok = t->tok;
    qlora__text_step* step = NULL;
    bool prefix = true;
    QLORA__TRY(qlora__gguf_get_bool(env, t->g, "tokenizer.ggml.add_space_prefix", true, &prefix));
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

static qlora_result qlora__text_gguf_byte_steps(const qlora__text_gguf* t,
                                                const qlora__text_pre* pre) {
    qlora__env* env = t->env;
    qlora_text_tok* tok = t->tok;
    qlora__text_step* step = NULL;
    bool prefix = false;
    QLORA__TRY(qlora__gguf_get_bool(env, t->g, "tokenizer.ggml.add_space_prefix", false, &prefix));
    if (prefix) {
        QLORA__TRY(qlora__text_steps_add(env, &tok->splitter, QLORA__TEXT_P_PREFIX_SPACE, &step));
    }
    for (int i = 0; i < QLORA__TEXT_GGUF_PATTERNS && pre->patterns[i] != NULL; i++) {
        QLORA__TRY(qlora__text_steps_add(env, &tok->splitter, QLORA__TEXT_P_REGEX, &step));
        QLORA__TRY(
            qlora__text_step_regex(env, tok, pre->patterns[i], strlen(pre->patterns[i]), step));
    }
    tok->byte_level = true;
    QLORA__TRY(qlora__text_steps_add(env, &tok->splitter, QLORA__TEXT_P_BYTES, &step));
    return qlora__text_steps_add(env, &tok->decoder, QLORA__TEXT_D_BYTES, &step);
}

// What is added before and after a text.
static qlora_result qlora__text_gguf_ends(const qlora__text_gguf* t, bool bos_by_default) {
    const struct {
        const char* flag;
        const char* key;
        bool fallback;
        int64_t id; // if the key is absent
        qlora_text_ids* out;
    } ends[] = {{"tokenizer.ggml.add_bos_token", "tokenizer.ggml.bos_token_id", bos_by_default,
                 t->pieces ? 1 : -1, &t->tok->prefix},
                {"tokenizer.ggml.add_eos_token", "tokenizer.ggml.eos_token_id", false,
                 t->pieces ? 2 : -1, &t->tok->suffix}};
    for (int i = 0; i < 2; i++) {
        bool add = false;
        int64_t id = ends[i].id;
        QLORA__TRY(qlora__gguf_get_bool(t->env, t->g, ends[i].flag, ends[i].fallback, &add));
        if (!add) {
            continue;
        }
        QLORA__TRY(qlora__gguf_get_int(t->env, t->g, ends[i].key, id, 0,
                                       (int64_t)t->tokens->count - 1, &id));
        QLORA__TRY(qlora__text_ids_add(t->env, ends[i].out, (int32_t)id));
    }
    return QLORA_OK;
}

static bool qlora__text_has_word(const char* text, size_t size, const char* word) {
    size_t n = strlen(word);
    for (size_t i = 0; text != NULL && i + n <= size; i++) {
        size_t k = 0;
        while (k < n && (text[i + k] | 0x20) == word[k]) {
            k++;
        }
        if (k == n) {
            return true;
        }
    }
    return false;
}

static qlora_result qlora__text_gguf_begin(qlora__text_gguf* t) {
    const qlora__gguf* g = t->g;
    const char* model = NULL;
    const char* name = NULL;
    size_t size = 0;
    QLORA__TRY(qlora__gguf_get_string(t->env, g, "general.type", false, &model, &size));
    if (model != NULL && qlora__gguf_is(model, size, "adapter")) {
        return qlora__env_fail(t->env, QLORA_ERR_FORMAT,
                               "%s is an adapter: it contains no tokenizer", g->label);
    }
    QLORA__TRY(qlora__gguf_get_string(t->env, g, "tokenizer.ggml.model", true, &model, &size));
    t->pieces = qlora__gguf_is(model, size, "llama");
    if (qlora__gguf_is(model, size, "no_vocab")) {
        return qlora__env_fail(t->env, QLORA_ERR_FORMAT,
                               "%s contains no tokenizer; use that of the original model",
                               g->label);
    }
    if (!t->pieces && !qlora__gguf_is(model, size, "gpt2")) {
        return qlora__env_fail(t->env, QLORA_ERR_UNSUPPORTED,
                               "%s: tokenizer.ggml.model \"%.*s\" is not supported; supported are "
                               "llama (SentencePiece) and gpt2 (byte-level BPE)",
                               g->label, qlora__gguf_shown(size), model);
    }
    QLORA__TRY(qlora__gguf_get_array(t->env, g, "tokenizer.ggml.tokens", QLORA__GGUF_STRING, true,
                                     &t->tokens));
    if (t->tokens->count == 0 || t->tokens->count >= QLORA__TEXT_MAX_ID) {
        return qlora__env_fail(t->env, QLORA_ERR_FORMAT,
                               "%s: tokenizer.ggml.tokens has %llu tokens; it must have 1 to %d",
                               g->label, (unsigned long long)t->tokens->count,
                               QLORA__TEXT_MAX_ID - 1);
    }
    t->types = qlora__gguf_find(g, "tokenizer.ggml.token_type");
    t->scores = t->pieces ? qlora__gguf_find(g, "tokenizer.ggml.scores") : NULL;
    const struct {
        const char* key;
        const qlora__gguf_value* value;
    } lists[] = {{"tokenizer.ggml.token_type", t->types}, {"tokenizer.ggml.scores", t->scores}};
    for (int i = 0; i < 2; i++) {
        const qlora__gguf_value* v = lists[i].value;
        if (v != NULL && (v->kind != QLORA__GGUF_ARRAY || v->count != t->tokens->count)) {
            return qlora__env_fail(t->env, QLORA_ERR_FORMAT,
                                   "%s: %s must be an array with one number for each of the %llu "
                                   "tokens",
                                   g->label, lists[i].key, (unsigned long long)t->tokens->count);
        }
    }
    if (t->pieces && t->scores == NULL) {
        return qlora__env_fail(t->env, QLORA_ERR_FORMAT, "%s: tokenizer.ggml.scores is missing",
                               g->label);
    }
    QLORA__TRY(qlora__gguf_get_string(t->env, g, "general.name", false, &name, &size));
    t->phi3 = t->pieces && (qlora__text_has_word(name, size, "phi-3") ||
                            qlora__text_has_word(name, size, "phi3"));
    return QLORA_OK;
}

static qlora_result qlora__text_gguf_fill(qlora__text_gguf* t) {
    qlora_text_tok* tok = t->tok;
    const char* name = NULL;
    size_t size = 0;
    QLORA__TRY(qlora__text_gguf_begin(t));
    if (t->pieces) {
        int64_t unknown = 0;
        memcpy(tok->cut, "\xE2\x96\x81", 3);
        tok->cut_size = 3;
        tok->byte_fallback = true;
        QLORA__TRY(qlora__gguf_get_int(t->env, t->g, "tokenizer.ggml.unknown_token_id", 0, 0,
                                       (int64_t)t->tokens->count - 1, &unknown));
        tok->unknown = (int32_t)unknown;
        QLORA__TRY(qlora__text_gguf_piece_steps(t));
        QLORA__TRY(qlora__text_gguf_tokens(t));
        QLORA__TRY(qlora__text_gguf_pieces(t));
        tok->cut_safe = qlora__text_cut_is_safe(tok);
        return qlora__text_gguf_ends(t, true);
    }
    QLORA__TRY(qlora__gguf_get_string(t->env, t->g, "tokenizer.ggml.pre", false, &name, &size));
    const qlora__text_pre* pre = qlora__text_pre_find(name, size);
    if (pre == NULL) {
        return qlora__env_fail(t->env, QLORA_ERR_UNSUPPORTED,
                               "%s: tokenizer.ggml.pre \"%.*s\" is not known", t->g->label,
                               qlora__gguf_shown(size), name);
    }
    tok->ignore_merges = pre->ignore_merges;
    QLORA__TRY(qlora__text_gguf_byte_steps(t, pre));
    QLORA__TRY(qlora__text_gguf_tokens(t));
    QLORA__TRY(qlora__text_gguf_merges(t));
    return qlora__text_gguf_ends(t, pre->add_bos);
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
    t.g = &g;
    qlora_result r = qlora__text_gguf_fill(&t);
    qlora__gguf_free(env, &g);
    return r;
}
