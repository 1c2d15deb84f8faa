// ---- merging ------------------------------------------------------------------------------------

// What a folder from a GGUF file has beside its weights.
typedef struct qlora__merge_texts {
    const qlora__gguf* g;
    qlora__string config;
    qlora__string tokens;   // tokenizer.json
    qlora__string settings; // tokenizer_config.json
    bool formed;            // the folder of the tokenizer has a chat template of its own
} qlora__merge_texts;

// Whether the folder of the tokenizer has a file, which then is copied.
static qlora_result qlora__merge_given(const qlora__merge* g, const char* name, bool* given) {
    char path[QLORA__PATH_ROOM];
    *given = false;
    if (g->tokenizer == NULL) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__path_join(&g->ctx->env, g->tokenizer, name, path));
    return qlora__file_exists(&g->ctx->env, path, given);
}

static qlora_result qlora__merge_texts_tokenizer(const qlora__merge* g, qlora__merge_texts* t) {
    const qlora__gguf_value* model = qlora__gguf_find(t->g, "tokenizer.ggml.model");
    bool given = false;
    QLORA__TRY(qlora__merge_given(g, "tokenizer.json", &given));
    bool none = model == NULL ||
                (model->kind == QLORA__GGUF_STRING &&
                 qlora__gguf_is((const char*)model->data, (size_t)model->bytes, "no_vocab"));
    if (none && !given) {
        QLORA__LOG(g->ctx, WARN, MODEL, "%s has no tokenizer: the folder has none", g->m->dir);
        return QLORA_OK;
    }
    if (!given) {
        QLORA__TRY(qlora__merge_make_tokens(g->ctx, t->g, &t->tokens));
    }
    QLORA__TRY(qlora__merge_given(g, "tokenizer_config.json", &given));
    return given ? QLORA_OK
                 : qlora__merge_make_settings(t->g, g->m->plan.config.max_positions, &t->settings);
}

// Makes them all, so that what cannot be made is refused before anything is written.
static qlora_result qlora__merge_texts_make(const qlora__merge* g, qlora__merge_texts* t) {
    qlora__string own;
    int which = -1;
    QLORA__TRY(qlora__merge_make_config(g->ctx, g->m, qlora__merge_dtype(g), &t->config));
    QLORA__TRY(qlora__merge_texts_tokenizer(g, t));
    qlora__string_begin(&g->ctx->env, &own);
    qlora_result r = g->tokenizer != NULL
                         ? qlora__merge_template(&g->ctx->env, g->tokenizer, &own, &which)
                         : QLORA_OK;
    t->formed = which >= 0;
    qlora__string_free(&own);
    return r;
}

static qlora_result qlora__merge_put_text(const qlora__merge* g, const char* name, const char* text,
                                          size_t size) {
    char path[QLORA__PATH_ROOM];
    QLORA__TRY(qlora__path_join(&g->ctx->env, g->dir, name, path));
    return qlora__file_write(&g->ctx->env, path, text, size);
}

// The chat templates of the file: the main one, and those with a name, where transformers looks for
// them.
static qlora_result qlora__merge_put_chats(const qlora__merge* g, const qlora__gguf* meta) {
    static const char key[] = QLORA__MERGE_TEMPLATE_KEY;
    const size_t size = sizeof key - 1;
    bool folder = false;
    for (uint32_t i = 0; i < meta->count; i++) {
        const qlora__gguf_value* v = &meta->values[i];
        char path[QLORA__PATH_ROOM];
        char name[128];
        if (v->kind != QLORA__GGUF_STRING || v->key_size < size || memcmp(v->key, key, size) != 0) {
            continue;
        }
        size_t rest = v->key_size - size;
        const char* tail = v->key + size;
        if (rest == 0) {
            QLORA__TRY(qlora__merge_put_text(g, "chat_template.jinja", (const char*)v->data,
                                             (size_t)v->bytes));
        }
        bool plain = rest > 1 && rest <= 64 && tail[0] == '.';
        for (size_t k = 1; k < rest && plain; k++) {
            plain = (tail[k] | 0x20) >= 'a' ? (tail[k] | 0x20) <= 'z' || tail[k] == '_'
                                            : (tail[k] >= '0' && tail[k] <= '9') || tail[k] == '-';
        }
        if (!plain) {
            continue;
        }
        QLORA__TRY(qlora__path_join(&g->ctx->env, g->dir, "additional_chat_templates", path));
        if (!folder) {
            QLORA__TRY(qlora__dir_make(&g->ctx->env, path));
        }
        folder = true;
        snprintf(name, sizeof name, "additional_chat_templates/%.*s.jinja", (int)rest - 1,
                 tail + 1);
        QLORA__TRY(qlora__merge_put_text(g, name, (const char*)v->data, (size_t)v->bytes));
    }
    return QLORA_OK;
}

// A folder from a GGUF file. config.json comes last, as in any merge.
static qlora_result qlora__merge_unpack(qlora__merge* g, uint64_t shard_bytes) {
    qlora__env* env = &g->ctx->env;
    qlora__merge_texts t;
    memset(&t, 0, sizeof t);
    t.g = &g->folder.gguf.files[0].meta;
    qlora__string_begin(env, &t.config);
    qlora__string_begin(env, &t.tokens);
    qlora__string_begin(env, &t.settings);
    qlora_result r = qlora__merge_texts_make(g, &t);
    r = r == QLORA_OK ? qlora__merge_weights(g, shard_bytes) : r;
    if (r == QLORA_OK && t.tokens.size > 0) {
        r = qlora__merge_put_text(g, "tokenizer.json", t.tokens.data, t.tokens.size);
    }
    if (r == QLORA_OK && t.settings.size > 0) {
        r = qlora__merge_put_text(g, "tokenizer_config.json", t.settings.data, t.settings.size);
    }
    r = r == QLORA_OK && !t.formed ? qlora__merge_put_chats(g, t.g) : r;
    r = r == QLORA_OK ? qlora__merge_copy_files(g) : r;
    r = r == QLORA_OK ? qlora__merge_put_text(g, "config.json", t.config.data, t.config.size) : r;
    qlora__string_free(&t.config);
    qlora__string_free(&t.tokens);
    qlora__string_free(&t.settings);
    return r;
}

// Reads back the config.json of a merged folder whose rotation was scaled.
static qlora_result qlora__merge_check_scale(const qlora__merge* g) {
    const qlora_model_config* c = &g->m->plan.config;
    if (g->m->rope_scale[0] == '\0') {
        return QLORA_OK;
    }
    qlora_model_config* file =
        (qlora_model_config*)qlora__alloc(g->ctx, sizeof(qlora_model_config));
    if (file == NULL) {
        return QLORA_ERR_MEMORY;
    }
    qlora_result r = qlora__config_read(&g->ctx->env, g->dir, file);
    if (r == QLORA_OK && (file->max_positions != c->max_positions ||
                          !qlora__merge_same_rope(&c->rope, &file->rope, c->rope_dims) ||
                          memcmp(c->sliding, file->sliding, (size_t)c->layers) != 0)) {
        r = qlora__fail(g->ctx, QLORA_ERR_UNSUPPORTED,
                        "%s: config.json has no place for the scaling \"%s\" of the rotation",
                        g->m->dir, g->m->rope_scale);
    }
    qlora__free(g->ctx, file, sizeof *file);
    if (r != QLORA_OK) {
        qlora__file_remove(&g->ctx->env, g->dir, "config.json");
    }
    return r;
}

static const qlora__gguf_type* qlora__merge_type(const qlora_merge_desc* desc) {
    return qlora__gguf_type_named(desc->gguf == QLORA_GGUF_Q8_0   ? "Q8_0"
                                  : desc->gguf == QLORA_GGUF_Q4_0 ? "Q4_0"
                                  : desc->dtype == QLORA_BF16     ? "BF16"
                                  : desc->dtype == QLORA_F16      ? "F16"
                                                                  : "F32");
}

// The highest id in added_tokens.
static int64_t qlora__merge_highest_of(const qlora__json* json) {
    uint32_t added = qlora__json_find(json, 0, "added_tokens");
    bool list = added != 0 && qlora__json_kind_of(json, added) == QLORA__JSON_ARRAY;
    int64_t highest = -1;
    for (uint32_t i = list ? added + 1 : 0; list && i < json->tokens[added].next;
         i = json->tokens[i].next) {
        uint32_t value = qlora__json_find(json, i, "id");
        int64_t id = -1;
        if (value != 0 && qlora__json_int(json, value, &id)) {
            highest = qlora__max(highest, id);
        }
    }
    return highest;
}

// The same of a folder; -1 if it has no tokenizer.json.
static qlora_result qlora__merge_highest(qlora__env* env, const char* dir, int64_t* out) {
    char path[QLORA__PATH_ROOM];
    bool exists = false;
    qlora__map map;
    qlora__json json;
    *out = -1;
    QLORA__TRY(qlora__path_join(env, dir, "tokenizer.json", path));
    QLORA__TRY(qlora__file_exists(env, path, &exists));
    if (!exists) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__map_open(env, path, &map));
    qlora_result r = qlora__json_parse(env, path, map.data, map.size, 0, &json);
    if (r == QLORA_OK) {
        *out = qlora__merge_highest_of(&json);
        qlora__json_free(env, &json);
    }
    qlora__map_close(env, &map);
    return r;
}

// A tokenizer of another adapter may have tokens for which the merged model has no rows. Some
// models come with such a tokenizer, so that only ids count that theirs does not have either.
static qlora_result qlora__merge_need_rows(qlora_ctx* ctx, const qlora_model* m, const char* dir) {
    int64_t highest = -1;
    int64_t usual = -1;
    if (dir == NULL) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__merge_highest(&ctx->env, dir, &highest));
    if (highest < m->plan.config.vocab) {
        return QLORA_OK;
    }
    if (!qlora__gguf_path(m->dir)) {
        QLORA__TRY(qlora__merge_highest(&ctx->env, m->dir, &usual));
    }
    return highest <= usual
               ? QLORA_OK
               : qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                             "%s/tokenizer.json has a token with id %lld, but the model with this "
                             "adapter has rows 0 to %lld; it belongs to another adapter",
                             dir, (long long)highest, (long long)m->plan.config.vocab - 1);
}

static qlora_result qlora__merge_save(qlora_ctx* ctx, const qlora_model* m,
                                      const qlora_merge_desc* desc) {
    QLORA__TRY(qlora__merge_need(ctx, m, desc));
    QLORA__TRY(qlora__merge_need_rows(ctx, m, desc->tokenizer_dir));
    bool file = qlora__gguf_path(desc->dir);
    if (!QLORA__GGUF && file) {
        return qlora__gguf_refuse(&ctx->env, desc->dir);
    }
    if (desc->base == QLORA_MERGE_TRAINED) {
        QLORA__TRY(qlora__model_has_weights(ctx, m, "merging into the trained weights"));
    }
    qlora__merge g;
    memset(&g, 0, sizeof g);
    g.ctx = ctx;
    g.m = m;
    g.dir = desc->dir;
    g.tokenizer = desc->tokenizer_dir;
    g.dtype = desc->dtype;
    g.trained = desc->base == QLORA_MERGE_TRAINED;
    g.progress = desc->progress;
    g.user = desc->progress_user;
    QLORA__TRY(qlora__folder_open(&ctx->env, m->dir, &g.folder));
    uint64_t shard = desc->shard_bytes != 0 ? desc->shard_bytes : (uint64_t)5000000000u;
    bool unpacks = g.folder.gguf.count > 0;
    qlora_result r = QLORA__GGUF && file ? qlora__merge_gguf(&g, desc->dir, qlora__merge_type(desc))
                     : QLORA__GGUF && unpacks ? qlora__merge_unpack(&g, shard)
                                              : qlora__merge_run(&g, shard);
    r = r == QLORA_OK && !file ? qlora__merge_check_scale(&g) : r;
    r = r == QLORA_OK && desc->verify ? qlora__merge_verify(&g, desc) : r;
    qlora__merge_close(&g);
    return r;
}

qlora_result qlora_merge_save(qlora_model* model, const qlora_merge_desc* desc) {
    qlora_ctx* ctx = qlora__model_ctx(model);
    QLORA__ENTER(ctx, "qlora_merge_save");
    qlora_result r = qlora__model_settle(model);
    return qlora__leave(ctx, r == QLORA_OK ? qlora__merge_save(ctx, model, desc) : r);
}

// ---- the tokenizer of a GGUF file, beside an adapter ----

static qlora_result qlora__adapter_put_tokenizer(qlora_ctx* ctx, const qlora_model* m,
                                                 const char* dir) {
    qlora__merge_texts t;
    qlora__merge g;
    memset(&t, 0, sizeof t);
    memset(&g, 0, sizeof g);
    g.ctx = ctx;
    g.m = m;
    g.dir = dir;
    QLORA__TRY(qlora__folder_open(&ctx->env, m->dir, &g.folder));
    t.g = &g.folder.gguf.files[0].meta;
    qlora__string_begin(&ctx->env, &t.tokens);
    qlora__string_begin(&ctx->env, &t.settings);
    qlora_result r = qlora__merge_texts_tokenizer(&g, &t);
    r = r == QLORA_OK ? qlora__dir_make(&ctx->env, dir) : r;
    if (r == QLORA_OK && t.tokens.size > 0) {
        r = qlora__merge_put_text(&g, "tokenizer.json", t.tokens.data, t.tokens.size);
    }
    if (r == QLORA_OK && t.settings.size > 0) {
        r = qlora__merge_put_text(&g, "tokenizer_config.json", t.settings.data, t.settings.size);
    }
    qlora__string_free(&t.tokens);
    qlora__string_free(&t.settings);
    qlora__merge_close(&g);
    return r;
}

static qlora_result qlora__adapter_tokenizer(qlora_ctx* ctx, const qlora_model* m,
                                             const char* dir) {
    if (dir == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "dir is NULL");
    }
    if (!qlora__gguf_path(m->dir)) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "the model is not in a GGUF file; the files of its tokenizer can be "
                           "copied");
    }
    return QLORA__GGUF ? qlora__adapter_put_tokenizer(ctx, m, dir)
                       : qlora__gguf_refuse(&ctx->env, m->dir);
}

qlora_result qlora_adapter_save_tokenizer(qlora_model* model, const char* dir) {
    qlora_ctx* ctx = qlora__model_ctx(model);
    QLORA__ENTER(ctx, "qlora_adapter_save_tokenizer");
    return qlora__leave(ctx, qlora__adapter_tokenizer(ctx, model, dir));
}
