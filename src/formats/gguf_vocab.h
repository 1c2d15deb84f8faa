#ifndef QLORA__PART_GGUF_VOCAB
#define QLORA__PART_GGUF_VOCAB

// ---- the vocabulary of a GGUF file --------------------------------------------------------------

// What a tokenizer and the export of one have to know alike: which tokens are found in a text
// before the model splits it, and the patterns behind the names of pre-tokenizers.

// The patterns behind the names of tokenizer.ggml.pre. Several patterns of one name are applied in
// turn, each to the pieces that the one before left.
#define QLORA__GGUF_PATTERNS 6

typedef struct qlora__gguf_pre {
    const char* names; // separated and surrounded by blanks
    const char* patterns[QLORA__GGUF_PATTERNS];
    bool ignore_merges;
    bool add_bos;
} qlora__gguf_pre;

#define QLORA__PRETOK_GPT2 "'s|'t|'re|'ve|'m|'ll|'d" QLORA__SPLITS_GPT2
#define QLORA__PRETOK_LLAMA3 QLORA__SPLITS_ASCII QLORA__SPLITS_WORD "\\p{N}{1,3}" QLORA__SPLITS_REST
#define QLORA__PRETOK_CJK "[\\x{4e00}-\\x{9fa5}\\x{800}-\\x{4e00}\\x{ac00}-\\x{d7ff}]+"
#define QLORA__PRETOK_KANA "[\\x{4e00}-\\x{9fa5}\\x{3040}-\\x{309f}\\x{30a0}-\\x{30ff}]+"
// Cased letters, as the pattern of the first DeepSeek models lists them.
#define QLORA__PRETOK_CASED                                                                        \
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

static const qlora__gguf_pre qlora__gguf_pres[] = {
    {" llama-bpe llama3 llama-v3 falcon3 pixtral lfm2 ",
     {QLORA__PRETOK_LLAMA3, NULL, NULL, NULL, NULL, NULL},
     true,
     true},
    {" smaug-bpe dbrx glm4 chatglm-bpe ",
     {QLORA__PRETOK_LLAMA3, NULL, NULL, NULL, NULL, NULL},
     false,
     false},
    {" qwen2 deepseek-r1-qwen stablelm2 ",
     {QLORA__SPLITS_ASCII QLORA__SPLITS_WORD "\\p{N}" QLORA__SPLITS_REST, NULL, NULL, NULL, NULL,
      NULL},
     false,
     false},
    {" qwen35 ",
     {QLORA__SPLITS_ASCII QLORA__SPLITS_MARKS, NULL, NULL, NULL, NULL, NULL},
     false,
     false},
    {" tekken ",
     {QLORA__SPLITS_CASED("") "\\p{N}" QLORA__SPLITS_REST3, NULL, NULL, NULL, NULL, NULL},
     true,
     true},
    {" gpt-4o llama4 ",
     {QLORA__SPLITS_CASED(QLORA__SPLITS_ASCII "?") "\\p{N}{1,3}" QLORA__SPLITS_REST3, NULL, NULL,
      NULL, NULL, NULL},
     false,
     false},
    {" gpt-2 phi-2 olmo exaone4 jais mpt ",
     {QLORA__PRETOK_GPT2, NULL, NULL, NULL, NULL, NULL},
     false,
     false},
    {" refact starcoder smollm command-r exaone codeshell ",
     {"\\p{N}", QLORA__PRETOK_GPT2, NULL, NULL, NULL, NULL},
     false,
     false},
    {" seed-coder ",
     {QLORA__SPLITS_ASCII QLORA__SPLITS_WORD
      "\\p{N}{1}| ?[^\\s\\p{L}\\p{N}\\r\\n]+" QLORA__SPLITS_LINES,
      NULL, NULL, NULL, NULL, NULL},
     false,
     false},
    {" deepseek-v3 ",
     {"\\p{N}{1,3}", QLORA__PRETOK_KANA, QLORA__SPLITS_DEEPSEEK3, NULL, NULL, NULL},
     false,
     false},
    {" deepseek-llm ",
     {"[\\r\\n]", "\\s?[" QLORA__PRETOK_CASED "]+",
      "\\s?[!-/:-~\\x{ff01}-\\x{ff0f}\\x{ff1a}-\\x{ff5e}\\x{2018}-\\x{201f}\\x{3000}-\\x{3002}]+",
      "\\s+$", QLORA__PRETOK_CJK, "\\p{N}+"},
     false,
     false},
    {" deepseek-coder ",
     {"[\\r\\n]", "\\s?\\p{L}+", "\\s?\\p{P}+", QLORA__PRETOK_CJK, "\\p{N}", NULL},
     false,
     false},
    {" default ",
     {"[\\p{P}\\$\\+<=>\\^~\\|]+", QLORA__PRETOK_GPT2, "\\p{N}+", "[0-9][0-9][0-9]", NULL, NULL},
     false,
     false},
};

// NULL if the name is not known; no name is "default".
static QLORA__UNUSED const qlora__gguf_pre* qlora__gguf_pre_find(const char* name, size_t size) {
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
    for (size_t i = 0; i < sizeof qlora__gguf_pres / sizeof qlora__gguf_pres[0]; i++) {
        const char* at = qlora__gguf_pres[i].names;
        size_t room = strlen(at);
        for (size_t k = 0; k + size + 2 <= room; k++) {
            if (memcmp(at + k, word, size + 2) == 0) {
                return &qlora__gguf_pres[i];
            }
        }
    }
    return NULL;
}

// ---- tokens -------------------------------------------------------------------------------------

// tokenizer.ggml.token_type
enum {
    QLORA__GGUF_T_NORMAL = 1,
    QLORA__GGUF_T_UNKNOWN = 2,
    QLORA__GGUF_T_CONTROL = 3,
    QLORA__GGUF_T_USER = 4,
    QLORA__GGUF_T_UNUSED = 5,
    QLORA__GGUF_T_BYTE = 6
};

#define QLORA__GGUF_MAX_TOKENS ((uint64_t)1 << 24)

typedef struct qlora__gguf_vocab {
    const qlora__gguf* g;
    const qlora__gguf_value* tokens;
    const qlora__gguf_value* types;  // NULL: all normal
    const qlora__gguf_value* scores; // NULL: none
    bool pieces;                     // SentencePiece, not byte-level BPE
    bool phi3;
} qlora__gguf_vocab;

// What a token is.
typedef struct qlora__gguf_token {
    int64_t type;
    bool word;        // of the model
    bool added;       // found in a text before the model splits it
    bool special;     // if it is added
    bool strip_right; // the same: with the blanks behind it
} qlora__gguf_token;

// llama.cpp takes these ends of a text or a turn for special tokens, whatever their type is.
static bool qlora__gguf_is_end(const char* name, size_t size) {
    static const char* const ends[] = {
        "</s>",       "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>",
        "<|eom_id|>", "<|end|>",       "<end_of_turn>",   "<EOT>",      "[EOT]"};
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++) {
        if (qlora__gguf_is(name, size, ends[i])) {
            return true;
        }
    }
    return false;
}

static bool qlora__gguf_has_word(const char* text, size_t size, const char* word) {
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

// Whether the file has a vocabulary that can be read: its lists, of the right lengths.
static QLORA__UNUSED qlora_result qlora__gguf_vocab_open(qlora__env* env, const qlora__gguf* g,
                                                         qlora__gguf_vocab* v) {
    const char* model = NULL;
    const char* name = NULL;
    size_t size = 0;
    memset(v, 0, sizeof *v);
    v->g = g;
    QLORA__TRY(qlora__gguf_get_string(env, g, "tokenizer.ggml.model", true, &model, &size));
    v->pieces = qlora__gguf_is(model, size, "llama");
    if (!v->pieces && !qlora__gguf_is(model, size, "gpt2")) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "%s: tokenizer.ggml.model \"%.*s\" is not supported; supported are "
                               "llama (SentencePiece) and gpt2 (byte-level BPE)",
                               g->label, qlora__gguf_shown(size), model);
    }
    QLORA__TRY(qlora__gguf_get_array(env, g, "tokenizer.ggml.tokens", QLORA__GGUF_STRING, true,
                                     &v->tokens));
    if (v->tokens->count == 0 || v->tokens->count >= QLORA__GGUF_MAX_TOKENS) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: tokenizer.ggml.tokens has %llu tokens; it must have 1 to %llu",
                               g->label, (unsigned long long)v->tokens->count,
                               (unsigned long long)QLORA__GGUF_MAX_TOKENS - 1);
    }
    v->types = qlora__gguf_find(g, "tokenizer.ggml.token_type");
    v->scores = v->pieces ? qlora__gguf_find(g, "tokenizer.ggml.scores") : NULL;
    const struct {
        const char* key;
        const qlora__gguf_value* value;
    } lists[] = {{"tokenizer.ggml.token_type", v->types}, {"tokenizer.ggml.scores", v->scores}};
    for (int i = 0; i < 2; i++) {
        const qlora__gguf_value* list = lists[i].value;
        if (list != NULL && (list->kind != QLORA__GGUF_ARRAY || list->count != v->tokens->count)) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "%s: %s must be an array with one number for each of the %llu "
                                   "tokens",
                                   g->label, lists[i].key, (unsigned long long)v->tokens->count);
        }
    }
    if (v->pieces && v->scores == NULL) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: tokenizer.ggml.scores is missing",
                               g->label);
    }
    QLORA__TRY(qlora__gguf_get_string(env, g, "general.name", false, &name, &size));
    v->phi3 = v->pieces && (qlora__gguf_has_word(name, size, "phi-3") ||
                            qlora__gguf_has_word(name, size, "phi3"));
    return QLORA_OK;
}

// What token `id` is, whose text is `name`.
static QLORA__UNUSED qlora_result qlora__gguf_vocab_token(qlora__env* env,
                                                          const qlora__gguf_vocab* v, uint64_t id,
                                                          const char* name, size_t size,
                                                          qlora__gguf_token* out) {
    int64_t type = QLORA__GGUF_T_NORMAL;
    if (v->types != NULL && (!qlora__gguf_integer(v->types, id, &type) ||
                             type < QLORA__GGUF_T_NORMAL || type > QLORA__GGUF_T_BYTE)) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "tokenizer.ggml.token_type[%llu] is %lld; it must be 1 to 6",
                               (unsigned long long)id, (long long)type);
    }
    memset(out, 0, sizeof *out);
    // In byte-level files, added tokens are spelt plainly, so they are not words of the model.
    out->word = v->pieces || type == QLORA__GGUF_T_NORMAL || type == QLORA__GGUF_T_BYTE;
    type = qlora__gguf_is_end(name, size) ? (int64_t)QLORA__GGUF_T_CONTROL : type;
    out->type = type;
    out->added = size > 0 && (type == QLORA__GGUF_T_CONTROL || type == QLORA__GGUF_T_USER ||
                              type == QLORA__GGUF_T_UNKNOWN);
    out->special = type != QLORA__GGUF_T_USER;
    // llama.cpp treats files of this name so, whatever they say; their tokenizer.json agrees.
    out->strip_right = v->phi3 && !qlora__gguf_is(name, size, "<unk>") &&
                       !qlora__gguf_is(name, size, "<s>") &&
                       !qlora__gguf_is(name, size, "<|endoftext|>");
    return QLORA_OK;
}

static QLORA__UNUSED qlora_result qlora__gguf_vocab_score(qlora__env* env,
                                                          const qlora__gguf_vocab* v, uint64_t id,
                                                          float* out) {
    double score = 0.0;
    int64_t whole = 0;
    if (qlora__gguf_integer(v->scores, id, &whole)) { // some files have integers
        score = (double)whole;
    } else if (!qlora__gguf_real(v->scores, id, &score) || !(score > -1e30 && score < 1e30)) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "tokenizer.ggml.scores[%llu] is not a finite number",
                               (unsigned long long)id);
    }
    *out = (float)score;
    return QLORA_OK;
}

// The pre-tokenizer of a byte-level vocabulary.
static QLORA__UNUSED qlora_result qlora__gguf_vocab_pre(qlora__env* env, const qlora__gguf_vocab* v,
                                                        const qlora__gguf_pre** out) {
    const char* name = NULL;
    size_t size = 0;
    QLORA__TRY(qlora__gguf_get_string(env, v->g, "tokenizer.ggml.pre", false, &name, &size));
    *out = qlora__gguf_pre_find(name, size);
    return *out != NULL ? QLORA_OK
                        : qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                          "%s: tokenizer.ggml.pre \"%.*s\" is not known",
                                          v->g->label, qlora__gguf_shown(size), name);
}

// The ids that are put before and behind a text; -1 if there is none. `pre`: of a byte-level
// vocabulary.
static QLORA__UNUSED qlora_result qlora__gguf_vocab_ends(qlora__env* env,
                                                         const qlora__gguf_vocab* v,
                                                         const qlora__gguf_pre* pre,
                                                         int64_t out[2]) {
    const struct {
        const char* flag;
        const char* key;
        bool fallback;
        int64_t id; // if the key is absent
    } ends[] = {
        {"tokenizer.ggml.add_bos_token", "tokenizer.ggml.bos_token_id", v->pieces || pre->add_bos,
         v->pieces ? 1 : -1},
        {"tokenizer.ggml.add_eos_token", "tokenizer.ggml.eos_token_id", false, v->pieces ? 2 : -1}};
    for (int i = 0; i < 2; i++) {
        bool add = false;
        out[i] = -1;
        QLORA__TRY(qlora__gguf_get_bool(env, v->g, ends[i].flag, ends[i].fallback, &add));
        if (add) {
            QLORA__TRY(qlora__gguf_get_int(env, v->g, ends[i].key, ends[i].id, 0,
                                           (int64_t)v->tokens->count - 1, &out[i]));
        }
    }
    return QLORA_OK;
}

// The id of the token for what is unknown to a SentencePiece vocabulary.
static QLORA__UNUSED qlora_result qlora__gguf_vocab_unknown(qlora__env* env,
                                                            const qlora__gguf_vocab* v,
                                                            int64_t* out) {
    return qlora__gguf_get_int(env, v->g, "tokenizer.ggml.unknown_token_id", 0, 0,
                               (int64_t)v->tokens->count - 1, out);
}

// The text of the token whose id a key holds, as a member of a JSON object; nothing if there is no
// such key or token.
static QLORA__UNUSED void qlora__gguf_named_token(const qlora__gguf* g, const char* key,
                                                  const char* name, qlora__json_writer* w) {
    const qlora__gguf_value* id = qlora__gguf_find(g, key);
    const qlora__gguf_value* tokens = qlora__gguf_find(g, "tokenizer.ggml.tokens");
    int64_t number = 0;
    uint64_t at = 0;
    size_t size = 0;
    if (id == NULL || tokens == NULL || tokens->element != QLORA__GGUF_STRING ||
        !qlora__gguf_integer(id, 0, &number) || number < 0 || (uint64_t)number >= tokens->count) {
        return;
    }
    const char* token = NULL;
    for (int64_t i = 0; i <= number; i++) {
        token = qlora__gguf_next_string(tokens, &at, &size);
    }
    qlora__json_write_key(w, name);
    qlora__json_write_quoted(w->text, token, size);
}

// The members of tokenizer_config.json that name special tokens.
static QLORA__UNUSED void qlora__gguf_named_tokens(const qlora__gguf* g, qlora__json_writer* w) {
    qlora__gguf_named_token(g, "tokenizer.ggml.bos_token_id", "bos_token", w);
    qlora__gguf_named_token(g, "tokenizer.ggml.eos_token_id", "eos_token", w);
    qlora__gguf_named_token(g, "tokenizer.ggml.unknown_token_id", "unk_token", w);
    qlora__gguf_named_token(g, "tokenizer.ggml.padding_token_id", "pad_token", w);
}

#endif // QLORA__PART_GGUF_VOCAB
