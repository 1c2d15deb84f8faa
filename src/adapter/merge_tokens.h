// ---- the tokenizer of a model folder in a GGUF file ---------------------------------------------

typedef struct qlora__merge_token {
    const char* name;
    uint32_t size;
    int32_t type; // as tokenizer.ggml.token_type; 0 = the id has no token
    float score;
} qlora__merge_token;

typedef struct qlora__merge_vocab {
    qlora__merge_file* f;
    const qlora__json* json; // decoded
    uint32_t model;          // its object in tokenizer.json
    bool pieces;             // SentencePiece: byte fallback instead of bytes
    qlora__merge_token* tokens;
    uint32_t* by_name;
    uint32_t count; // of the model
    uint32_t named; // entries of by_name
} qlora__merge_vocab;

static qlora_result qlora__merge_vocab_refuse(const qlora__merge_vocab* v, const char* what) {
    return qlora__fail(v->f->g->ctx, QLORA_ERR_UNSUPPORTED,
                       "%s: %s; make the file with llama.cpp's converter instead", v->json->label,
                       what);
}

static const char* qlora__merge_text(const qlora__json* json, uint32_t token, uint32_t* size) {
    const qlora__json_token* t = &json->tokens[token];
    *size = t->kind == QLORA__JSON_STRING ? t->end - t->begin : 0;
    return t->kind == QLORA__JSON_STRING ? json->strings + t->begin : "";
}

static bool qlora__merge_true(const qlora__json* json, uint32_t value) {
    return value != 0 && qlora__json_kind_of(json, value) == QLORA__JSON_TRUE;
}

// Gives an id its text. Added tokens come last and win.
static qlora_result qlora__merge_vocab_set(const qlora__merge_vocab* v, uint32_t id_token,
                                           uint32_t name_token, int32_t type) {
    int64_t id = -1;
    uint32_t size = 0;
    if (id_token == 0 || name_token == 0 || !qlora__json_int(v->json, id_token, &id) || id < 0 ||
        id >= (int64_t)v->count) {
        return qlora__fail(v->f->g->ctx, QLORA_ERR_FORMAT,
                           "%s: a token has id %lld; the model has ids 0 to %u", v->json->label,
                           (long long)id, v->count - 1);
    }
    qlora__merge_token* token = &v->tokens[id];
    token->name = qlora__merge_text(v->json, name_token, &size);
    token->size = size;
    token->type = type;
    return QLORA_OK;
}

// <0x00> to <0xFF>
static bool qlora__merge_is_byte(const char* name, uint32_t size) {
    return size == 6 && memcmp(name, "<0x", 3) == 0 && name[5] == '>';
}

static qlora_result qlora__merge_vocab_read(qlora__merge_vocab* v) {
    const qlora__json* json = v->json;
    uint32_t vocab = qlora__json_find(json, v->model, "vocab");
    uint32_t added = qlora__json_find(json, 0, "added_tokens");
    uint32_t unknown = qlora__json_find(json, v->model, "unk_token");
    if (vocab == 0 || qlora__json_kind_of(json, vocab) != QLORA__JSON_OBJECT) {
        return qlora__merge_vocab_refuse(v, "model.vocab is not an object");
    }
    for (uint32_t k = vocab + 1; k < json->tokens[vocab].next; k = json->tokens[k + 1].next) {
        uint32_t size = 0;
        const char* name = qlora__merge_text(json, k, &size);
        bool byte = v->pieces && qlora__merge_is_byte(name, size);
        bool is_unknown = unknown != 0 && qlora__json_is(json, unknown, name);
        QLORA__TRY(qlora__merge_vocab_set(v, k + 1, k, is_unknown ? 2 : byte ? 6 : 1));
    }
    bool list = added != 0 && qlora__json_kind_of(json, added) == QLORA__JSON_ARRAY;
    for (uint32_t i = list ? added + 1 : 0; list && i < json->tokens[added].next;
         i = json->tokens[i].next) {
        bool special = qlora__merge_true(json, qlora__json_find(json, i, "special"));
        uint32_t content = qlora__json_find(json, i, "content");
        bool is_unknown =
            content != 0 && unknown != 0 &&
            qlora__json_is(json, unknown, json->strings + json->tokens[content].begin);
        QLORA__TRY(qlora__merge_vocab_set(v, qlora__json_find(json, i, "id"), content,
                                          is_unknown ? 2
                                          : special  ? 3
                                                     : 4));
    }
    return QLORA_OK;
}

// ---- merges and scores --------------------------------------------------------------------------

static int qlora__merge_name_order(const qlora__merge_token* t, const char* name, size_t size) {
    size_t n = t->size < size ? t->size : size;
    int order = memcmp(t->name, name, n);
    return order != 0 ? order : t->size < size ? -1 : t->size > size ? 1 : 0;
}

static bool qlora__merge_name_less(const void* user, uint32_t a, uint32_t b) {
    const qlora__merge_token* t = (const qlora__merge_token*)user;
    int order = qlora__merge_name_order(&t[a], t[b].name, t[b].size);
    return order != 0 ? order < 0 : a < b;
}

static qlora__merge_token* qlora__merge_find_token(const qlora__merge_vocab* v, const char* name,
                                                   size_t size) {
    uint32_t low = 0;
    uint32_t high = v->named;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        qlora__merge_token* t = &v->tokens[v->by_name[middle]];
        int order = qlora__merge_name_order(t, name, size);
        if (order == 0) {
            return t;
        }
        if (order < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return NULL;
}

// A merge as "left right": a string, or a pair of strings. With `joined`, without the blank.
static void qlora__merge_rule(const qlora__json* json, uint32_t merge, bool joined,
                              qlora__string* out) {
    uint32_t size = 0;
    const char* text = qlora__merge_text(json, merge, &size);
    const char* blank = size > 1 ? (const char*)memchr(text + 1, ' ', size - 1) : NULL;
    uint32_t right = 0;
    out->size = 0;
    if (qlora__json_kind_of(json, merge) == QLORA__JSON_ARRAY && json->tokens[merge].count == 2) {
        text = qlora__merge_text(json, merge + 1, &size);
        qlora__string_add(out, text, size);
        text = qlora__merge_text(json, json->tokens[merge + 1].next, &right);
    } else if (blank != NULL) {
        qlora__string_add(out, text, (size_t)(blank - text));
        right = size - (uint32_t)(blank - text) - 1;
        text = blank + 1;
    }
    qlora__string_add(out, " ", joined ? 0 : 1);
    qlora__string_add(out, text, right);
}

// Byte-level: the merges themselves. SentencePiece: the token that an earlier merge makes has a
// higher score.
static qlora_result qlora__merge_put_merges(qlora__merge_vocab* v) {
    const qlora__json* json = v->json;
    uint32_t merges = qlora__json_find(json, v->model, "merges");
    qlora__string rule;
    if (merges == 0 || qlora__json_kind_of(json, merges) != QLORA__JSON_ARRAY) {
        return qlora__merge_vocab_refuse(v, "model.merges is not an array");
    }
    if (!v->pieces) {
        qlora__merge_key(v->f, "tokenizer.ggml.merges", QLORA__GGUF_ARRAY);
        qlora__gguf_u32(&v->f->values, (uint32_t)QLORA__GGUF_STRING);
        qlora__gguf_u64(&v->f->values, json->tokens[merges].count);
    }
    qlora__string_begin(&v->f->g->ctx->env, &rule);
    float rank = 0.0f;
    for (uint32_t i = merges + 1; i < json->tokens[merges].next; i = json->tokens[i].next) {
        qlora__merge_rule(json, i, v->pieces, &rule);
        if (!v->pieces) {
            qlora__gguf_u64(&v->f->values, rule.size);
            qlora__string_add(&v->f->values, rule.data, rule.size);
            continue;
        }
        qlora__merge_token* token = qlora__merge_find_token(v, rule.data, rule.size);
        rank -= 1.0f;
        if (token != NULL && token->score >= 0.0f) { // the first merge that makes it
            token->score = rank;
        }
    }
    qlora_result r = rule.result;
    qlora__string_free(&rule);
    return r;
}

static void qlora__merge_put_tokens(const qlora__merge_vocab* v) {
    qlora__string* t = &v->f->values;
    qlora__merge_key(v->f, "tokenizer.ggml.tokens", QLORA__GGUF_ARRAY);
    qlora__gguf_u32(t, (uint32_t)QLORA__GGUF_STRING);
    qlora__gguf_u64(t, v->count);
    for (uint32_t i = 0; i < v->count; i++) {
        char none[24];
        snprintf(none, sizeof none, "[PAD%u]", i);
        const qlora__merge_token* token = &v->tokens[i];
        size_t size = token->type != 0 ? token->size : strlen(none);
        qlora__gguf_u64(t, size);
        qlora__string_add(t, token->type != 0 ? token->name : none, size);
    }
    qlora__merge_key(v->f, "tokenizer.ggml.token_type", QLORA__GGUF_ARRAY);
    qlora__gguf_u32(t, (uint32_t)QLORA__GGUF_I32);
    qlora__gguf_u64(t, v->count);
    for (uint32_t i = 0; i < v->count; i++) {
        qlora__gguf_u32(t, v->tokens[i].type != 0 ? (uint32_t)v->tokens[i].type : 5u);
    }
    if (!v->pieces) {
        return;
    }
    qlora__merge_key(v->f, "tokenizer.ggml.scores", QLORA__GGUF_ARRAY);
    qlora__gguf_u32(t, (uint32_t)QLORA__GGUF_F32);
    qlora__gguf_u64(t, v->count);
    for (uint32_t i = 0; i < v->count; i++) {
        qlora__gguf_u32(t, qlora__bits(v->tokens[i].score));
    }
}

// ---- the steps around the model -----------------------------------------------------------------

#define QLORA__MERGE_WORDS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
#define QLORA__MERGE_REST "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

// The name that llama.cpp has for a pre-tokenizer; NULL if none is known.
static const char* qlora__merge_pre(const qlora__json* json, bool ignore_merges) {
    static const char* const any = "(?i:'s|'t|'re|'ve|'m|'ll|'d)";
    uint32_t root = qlora__json_find(json, 0, "pre_tokenizer");
    bool regex = false;
    bool bytes = false;
    bool digits = false;
    const char* found = NULL;
    for (uint32_t i = root; root != 0 && i < json->tokens[root].next; i++) {
        if (qlora__json_kind_of(json, i) != QLORA__JSON_OBJECT) {
            continue;
        }
        uint32_t type = qlora__json_find(json, i, "type");
        uint32_t pattern = qlora__json_find(json, i, "Regex");
        uint32_t use = qlora__json_find(json, i, "use_regex");
        if (type != 0 && qlora__json_is(json, type, "ByteLevel")) {
            bytes = use == 0 || qlora__merge_true(json, use);
        }
        digits = digits || (type != 0 && qlora__json_is(json, type, "Digits"));
        if (pattern != 0) {
            uint32_t size = 0;
            const char* text = qlora__merge_text(json, pattern, &size);
            size_t skip = strncmp(text, any, strlen(any)) == 0 ? strlen(any) : 0;
            bool three =
                strcmp(text + skip, QLORA__MERGE_WORDS "\\p{N}{1,3}" QLORA__MERGE_REST) == 0;
            bool one = strcmp(text + skip, QLORA__MERGE_WORDS "\\p{N}" QLORA__MERGE_REST) == 0;
            regex = true;
            found = skip == 0 ? NULL
                    : three   ? (ignore_merges ? "llama-bpe" : "smaug-bpe")
                    : one     ? "qwen2"
                              : NULL;
        }
    }
    return regex ? found : !bytes ? NULL : digits ? "smollm" : "gpt-2";
}

// Whether any object below `root` has a member of this name and value.
static bool qlora__merge_has(const qlora__json* json, uint32_t root, const char* key,
                             const char* value) {
    for (uint32_t i = root; root != 0 && i < json->tokens[root].next; i++) {
        if (qlora__json_kind_of(json, i) == QLORA__JSON_OBJECT) {
            uint32_t found = qlora__json_find(json, i, key);
            if (found != 0 && (value == NULL || qlora__json_is(json, found, value))) {
                return true;
            }
        }
    }
    return false;
}

static void qlora__merge_put_bool(qlora__merge_file* f, const char* key, bool value) {
    char byte = value ? 1 : 0;
    qlora__merge_key(f, key, QLORA__GGUF_BOOL);
    qlora__string_add(&f->values, &byte, 1);
}

// The id of a special token that the configuration of the adapter's tokenizer names; *id stays as
// it is if it names none that the vocabulary has.
static void qlora__merge_named_id(const qlora__merge_vocab* v, const qlora__json* config,
                                  const char* name, int32_t* id) {
    uint32_t value = qlora__json_find(config, 0, name);
    if (value != 0 && qlora__json_kind_of(config, value) == QLORA__JSON_OBJECT) {
        value = qlora__json_find(config, value, "content");
    }
    uint32_t size = 0;
    const char* text = value != 0 ? qlora__merge_text(config, value, &size) : "";
    for (uint32_t i = 0; size > 0 && i < v->count; i++) {
        const qlora__merge_token* token = &v->tokens[i];
        if (token->type != 0 && token->size == size && memcmp(token->name, text, size) == 0) {
            *id = (int32_t)i;
            return;
        }
    }
}

// BOS, EOS and padding of the adapter's tokenizer_config.json, which come before the model's.
static qlora_result qlora__merge_adapter_ids(const qlora__merge_vocab* v, int32_t* bos,
                                             int32_t* eos, int32_t* pad) {
    qlora__env* env = &v->f->g->ctx->env;
    const char* dir = v->f->g->tokenizer;
    char path[QLORA__PATH_ROOM];
    bool exists = false;
    qlora__map map;
    qlora__json json;
    if (dir == NULL) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__path_join(env, dir, "tokenizer_config.json", path));
    QLORA__TRY(qlora__file_exists(env, path, &exists));
    if (!exists) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__map_open(env, path, &map));
    qlora_result r = qlora__json_parse(env, path, map.data, map.size, 0, &json);
    if (r == QLORA_OK) {
        r = qlora__json_decode(env, &json);
        if (r == QLORA_OK) {
            qlora__merge_named_id(v, &json, "bos_token", bos);
            qlora__merge_named_id(v, &json, "eos_token", eos);
            qlora__merge_named_id(v, &json, "pad_token", pad);
        }
        qlora__json_free(env, &json);
    }
    qlora__map_close(env, &map);
    return r;
}

// The ids that the config names, after EOS of the adapter's tokenizer. llama.cpp ends a text at
// three of them.
static qlora_result qlora__merge_put_ids(qlora__merge_file* f, const qlora__merge_vocab* v) {
    static const char* const keys[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                                       "tokenizer.ggml.eom_token_id"};
    const qlora_model_config* c = &f->g->m->plan.config;
    int32_t bos = c->bos_id;
    int32_t pad = c->pad_id;
    int32_t eos = -1;
    int count = 0;
    if (v != NULL) {
        QLORA__TRY(qlora__merge_adapter_ids(v, &bos, &eos, &pad));
    }
    if (bos >= 0) {
        qlora__merge_put_u32(f, "tokenizer.ggml.bos_token_id", bos);
    }
    for (int32_t i = -1; i < c->stop_count; i++) {
        int32_t id = i < 0 ? eos : c->stop_ids[i];
        if (id < 0 || (i >= 0 && id == eos)) {
            continue;
        }
        if (count < 3) {
            qlora__merge_put_u32(f, keys[count], id);
        }
        count++;
    }
    if (count > 3) {
        QLORA__LOG(f->g->ctx, WARN, MODEL,
                   "the model has %d stop ids; a GGUF file holds three of them", count);
    }
    if (pad >= 0) {
        qlora__merge_put_u32(f, "tokenizer.ggml.padding_token_id", pad);
    }
    return QLORA_OK;
}

// What is added to a text.
static void qlora__merge_put_added(const qlora__merge_vocab* v) {
    const qlora_model_config* c = &v->f->g->m->plan.config;
    const qlora__json* json = v->json;
    uint32_t post = qlora__json_find(json, 0, "post_processor");
    bool bos = c->bos_id >= 0 && qlora__merge_has(json, post, "SpecialToken", NULL);
    qlora__merge_put_bool(v->f, "tokenizer.ggml.add_bos_token", bos);
    if (v->pieces) {
        uint32_t normal = qlora__json_find(json, 0, "normalizer");
        uint32_t before = qlora__json_find(json, 0, "pre_tokenizer");
        bool prefix = qlora__merge_has(json, normal, "type", "Prepend") ||
                      qlora__merge_has(json, before, "prepend_scheme", "first") ||
                      qlora__merge_has(json, before, "prepend_scheme", "always");
        qlora__merge_put_bool(v->f, "tokenizer.ggml.add_space_prefix", prefix);
    }
}

static qlora_result qlora__merge_put_vocab(qlora__merge_vocab* v) {
    const qlora__json* json = v->json;
    v->model = qlora__json_find(json, 0, "model");
    uint32_t type = v->model != 0 ? qlora__json_find(json, v->model, "type") : 0;
    if (v->model == 0 || (type != 0 && !qlora__json_is(json, type, "BPE"))) {
        return qlora__merge_vocab_refuse(v, "the model of the tokenizer is not BPE");
    }
    v->pieces = qlora__merge_true(json, qlora__json_find(json, v->model, "byte_fallback"));
    bool ignore = qlora__merge_true(json, qlora__json_find(json, v->model, "ignore_merges"));
    const char* pre = v->pieces ? "default" : qlora__merge_pre(json, ignore);
    if (pre == NULL) {
        return qlora__merge_vocab_refuse(v, "llama.cpp has no name for this pre-tokenizer");
    }
    QLORA__TRY(qlora__merge_vocab_read(v));
    for (uint32_t i = 0; i < v->count; i++) {
        if (v->tokens[i].type != 0) {
            v->by_name[v->named++] = i;
        }
    }
    qlora__sort(v->by_name, v->named, qlora__merge_name_less, v->tokens);
    qlora__merge_key(v->f, "tokenizer.ggml.model", QLORA__GGUF_STRING);
    qlora__gguf_string(&v->f->values, v->pieces ? "llama" : "gpt2");
    qlora__merge_key(v->f, "tokenizer.ggml.pre", QLORA__GGUF_STRING);
    qlora__gguf_string(&v->f->values, pre);
    QLORA__TRY(qlora__merge_put_merges(v));
    qlora__merge_put_tokens(v);
    QLORA__TRY(qlora__merge_put_ids(v->f, v));
    qlora__merge_put_added(v);
    return QLORA_OK;
}

static qlora_result qlora__merge_parse_tokenizer(qlora__merge_file* f, const char* path,
                                                 const qlora__map* map) {
    qlora_ctx* ctx = f->g->ctx;
    qlora__merge_vocab v;
    qlora__json json;
    memset(&v, 0, sizeof v);
    v.f = f;
    v.json = &json;
    v.count = (uint32_t)f->g->m->plan.config.vocab;
    size_t bytes = v.count * (sizeof *v.tokens + sizeof *v.by_name);
    QLORA__TRY(qlora__json_parse(&ctx->env, path, map->data, map->size, 0, &json));
    qlora_result r = qlora__json_decode(&ctx->env, &json);
    v.tokens = r == QLORA_OK ? (qlora__merge_token*)qlora__alloc_zero(ctx, bytes) : NULL;
    r = r == QLORA_OK && v.tokens == NULL ? QLORA_ERR_MEMORY : r;
    if (r == QLORA_OK) {
        v.by_name = (uint32_t*)(void*)(v.tokens + v.count);
        r = qlora__merge_put_vocab(&v);
    }
    qlora__free(ctx, v.tokens, bytes);
    qlora__json_free(&ctx->env, &json);
    return r;
}

// The tokenizer of the folder. Without one, the file says so: llama.cpp then takes ids, but no
// text.
static qlora_result qlora__merge_put_tokenizer(qlora__merge_file* f) {
    qlora__env* env = &f->g->ctx->env;
    char path[QLORA__PATH_ROOM];
    bool exists = false;
    qlora__map map;
    QLORA__TRY(qlora__path_join(env, f->g->m->dir, "tokenizer.json", path));
    QLORA__TRY(qlora__file_exists(env, path, &exists));
    if (!exists) {
        QLORA__LOG(f->g->ctx, WARN, MODEL, "%s does not exist: the GGUF file has no tokenizer",
                   path);
        qlora__merge_key(f, "tokenizer.ggml.model", QLORA__GGUF_STRING);
        qlora__gguf_string(&f->values, "no_vocab");
        return qlora__merge_put_ids(f, NULL); // generation stops at them all the same
    }
    QLORA__TRY(qlora__map_open(env, path, &map));
    qlora_result r = qlora__merge_parse_tokenizer(f, path, &map);
    qlora__map_close(env, &map);
    return r;
}
