// ---- the .bin form: int32 longest token; then per id float score, int32 length, bytes

static uint32_t qlora__text_little32(const unsigned char* p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

enum { QLORA__TEXT_MAX_SCORED = 1024 };

// Reads names and words; `scored` receives the ids that merging can make. The first three ids are
// <unk>, <s> and </s>, whatever the file calls them. A text that has these names has the tokens, as
// with the tokenizer.json of the same model: templates write them so.
static qlora_result qlora__text_load_scored(qlora__env* env, qlora_text_tok* tok,
                                            const unsigned char* p, size_t size,
                                            qlora__text_scored* scored, size_t* scored_count) {
    static const char* const control[] = {"<unk>", "<s>", "</s>"};
    size_t at = 4;
    for (int32_t id = 0; at < size; id++) {
        uint32_t length = size - at >= 8 ? qlora__text_little32(p + at + 4) : UINT32_MAX;
        if (size - at < 8 || length > QLORA__TEXT_MAX_SCORED || length > size - at - 8) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "token %d: invalid length, or the file is truncated", (int)id);
        }
        uint32_t bits = qlora__text_little32(p + at);
        float score;
        memcpy(&score, &bits, sizeof(score));
        if (!(score > -1e30f && score < 1e30f)) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "token %d: the score is not a finite number", (int)id);
        }
        const char* name = (const char*)p + at + 8;
        if (id < 3) {
            QLORA__TRY(qlora__text_tok_name(env, tok, id, control[id], strlen(control[id]),
                                            QLORA__TEXT_K_SPECIAL));
            QLORA__TRY(qlora__text_tok_add(env, tok, id, true));
        } else {
            QLORA__TRY(qlora__text_tok_word(env, tok, name, length, id));
            if (length > 0 && !(tok->kinds[id] & QLORA__TEXT_K_BYTE)) {
                scored[*scored_count].score = score;
                scored[*scored_count].id = id;
                (*scored_count)++;
            }
        }
        at += 8 + length;
    }
    return tok->count > 3 ? QLORA_OK
                          : qlora__env_fail(env, QLORA_ERR_FORMAT, "the file contains no tokens");
}

static qlora_result qlora__text_load_bin_steps(qlora__env* env, qlora_text_tok* tok) {
    qlora__text_step* step = NULL;
    QLORA__TRY(qlora__text_steps_add(env, &tok->normalizer, QLORA__TEXT_N_PREPEND, &step));
    QLORA__TRY(qlora__text_copy(env, " ", 1, &step->a, &step->a_size));
    QLORA__TRY(qlora__text_steps_add(env, &tok->decoder, QLORA__TEXT_D_BYTE_FALLBACK, &step));
    QLORA__TRY(qlora__text_steps_add(env, &tok->decoder, QLORA__TEXT_D_FUSE, &step));
    QLORA__TRY(qlora__text_steps_add(env, &tok->decoder, QLORA__TEXT_D_STRIP, &step));
    step->start = 1;
    QLORA__TRY(qlora__text_copy(env, " ", 1, &step->a, &step->a_size));
    return qlora__text_ids_add(env, &tok->prefix, 1);
}

static qlora_result qlora__text_load_bin(qlora__env* env, qlora_text_tok* tok, const char* file,
                                         const char* data, size_t size) {
    const unsigned char* p = (const unsigned char*)data;
    if (size < 4 || qlora__text_little32(p) == 0 ||
        qlora__text_little32(p) > QLORA__TEXT_MAX_SCORED) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: neither a tokenizer.json nor a tokenizer.bin of llama2.c",
                               file);
    }
    tok->byte_fallback = true;
    tok->fuse_unknown = true;
    tok->unknown = 0;
    tok->cut[0] = ' ';
    tok->cut_size = 1;
    size_t room = size / 8 + 1;
    qlora__text_scored* scored =
        (qlora__text_scored*)qlora__text_zalloc(env, room, sizeof(qlora__text_scored));
    if (scored == NULL) {
        return QLORA_ERR_MEMORY;
    }
    size_t count = 0;
    qlora_result r = qlora__text_load_scored(env, tok, p, size, scored, &count);
    r = r == QLORA_OK ? qlora__text_load_scored_merges(env, tok, scored, count) : r;
    r = r == QLORA_OK ? qlora__text_load_bin_steps(env, tok) : r;
    qlora__env_free(env, scored, room * sizeof *scored);
    if (r != QLORA_OK) {
        return qlora__env_wrap(env, r, "%s: ", file);
    }
    for (unsigned b = 0; b < 256; b++) {
        char byte = (char)(unsigned char)b;
        tok->byte_ids[b] = qlora__text_words_find(&tok->words, &byte, 1);
    }
    tok->cut_safe = qlora__text_cut_is_safe(tok);
    return QLORA_OK;
}

// ---- opening and asking

static qlora_result qlora__text_tok_load(qlora_text* text, const char* name, const char* data,
                                         size_t size, qlora_text_tok** out) {
    qlora__env* env = &text->env;
    qlora_text_tok* tok = NULL;
    QLORA__TRY(qlora__text_tok_new(text, &tok));
    // the .bin starts with a small number, so its fourth byte is zero
    bool binary = size >= 4 && data[3] == 0;
    bool gguf = size >= 4 && memcmp(data, "GGUF", 4) == 0;
    qlora_result r = gguf     ? qlora__text_load_gguf(env, tok, name, data, size)
                     : binary ? qlora__text_load_bin(env, tok, name, data, size)
                              : qlora__text_load_json(env, tok, name, data, size);
    if (r != QLORA_OK) {
        qlora__text_tok_free(env, tok);
        return r;
    }
    QLORA__TEXT_LOG(env, INFO, "%s: %llu tokens", name, (unsigned long long)tok->count);
    text->toks++;
    *out = tok;
    return QLORA_OK;
}

static qlora_result qlora__text_tok_open(qlora_text* text, const char* path, qlora_text_bytes* file,
                                         qlora_text_tok** out) {
    static const char* const names[] = {"tokenizer.json", "tokenizer.bin", "tok512.bin"};
    qlora__env* env = &text->env;
    bool found = false;
    if (qlora__gguf_path(path)) { // may be large: it is mapped, not read
        qlora__map map;
        QLORA__TRY(qlora__map_open(env, path, &map));
        qlora_result r =
            qlora__text_tok_load(text, path, (const char*)map.data, (size_t)map.size, out);
        qlora__map_close(env, &map);
        return r;
    }
    for (size_t i = 0; !found && i < QLORA__TEXT_COUNT(names); i++) {
        QLORA__TRY(qlora__text_folder_read(env, path, names[i], file, &found));
    }
    if (!found) {
        qlora_result r = qlora__text_file_read(env, path, file, &found);
        if (r == QLORA_OK && !found) {
            r = qlora__env_fail(env, QLORA_ERR_FILE, "cannot read %s: %s (%d)", path,
                                qlora__errno_text(ENOENT), ENOENT);
        } else if (r == QLORA_ERR_FILE && found) { // a folder can be opened, but not read
            r = qlora__env_fail(env, QLORA_ERR_FILE,
                                "%s: no tokenizer found (tokenizer.json, tokenizer.bin or "
                                "tok512.bin)",
                                path);
        }
        QLORA__TRY(r);
    }
    return qlora__text_tok_load(text, path, file->data, file->count, out);
}

qlora_result qlora_text_tok_load(qlora_text* text, const char* name, const void* data, size_t size,
                                 qlora_text_tok** out) {
    if (text == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__text_enter(text, "qlora_text_tok_load");
    QLORA__TEXT_NEED(&text->env, name);
    QLORA__TEXT_NEED(&text->env, out);
    if (data == NULL && size > 0) {
        return qlora__env_fail(&text->env, QLORA_ERR_ARGUMENT, "data is NULL");
    }
    return qlora__text_tok_load(text, name, (const char*)data, size, out);
}

qlora_result qlora_text_tok_open(qlora_text* text, const char* path, qlora_text_tok** out) {
    if (text == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__text_enter(text, "qlora_text_tok_open");
    QLORA__TEXT_NEED(&text->env, path);
    QLORA__TEXT_NEED(&text->env, out);
    qlora_text_bytes file;
    memset(&file, 0, sizeof(file));
    qlora_result r = qlora__text_tok_open(text, path, &file, out);
    qlora__text_bytes_free(&text->env, &file);
    return r;
}

qlora_result qlora_text_tok_close(qlora_text_tok* tok) {
    if (tok == NULL) {
        return QLORA_OK;
    }
    qlora_text* text = tok->text;
    qlora__text_enter(text, "qlora_text_tok_close");
    if (tok->users > 0) {
        return qlora__env_fail(
            &text->env, QLORA_ERR_STATE,
            "chats that use this tokenizer are still open: %lld; close them first",
            (long long)tok->users);
    }
    qlora__text_tok_free(&text->env, tok);
    text->toks--;
    return QLORA_OK;
}

static bool qlora__text_tok_has(const qlora_text_tok* tok, int32_t id, unsigned kind) {
    return id >= 0 && (size_t)id < tok->count && (tok->kinds[id] & kind) != 0;
}

static int32_t qlora__text_tok_bos(const qlora_text_tok* tok) {
    return tok->prefix.count > 0 ? tok->prefix.data[0] : -1;
}

qlora_result qlora_text_tok_query(qlora_text_tok* tok, qlora_text_tok_info* out) {
    if (tok == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__text_enter(tok->text, "qlora_text_tok_query");
    QLORA__TEXT_NEED(&tok->text->env, out);
    out->count = (int32_t)tok->count;
    out->bos = qlora__text_tok_bos(tok);
    return QLORA_OK;
}

qlora_result qlora_text_token_query(qlora_text_tok* tok, int32_t id, qlora_text_token_info* out) {
    if (tok == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__text_enter(tok->text, "qlora_text_token_query");
    QLORA__TEXT_NEED(&tok->text->env, out);
    if (!qlora__text_tok_has(tok, id, QLORA__TEXT_K_EXISTS)) {
        return qlora__env_fail(&tok->text->env, QLORA_ERR_ARGUMENT,
                               "the tokenizer has no token with id %d", (int)id);
    }
    out->name = tok->names.data + tok->spans[id].at;
    out->length = tok->spans[id].size;
    out->special = qlora__text_tok_has(tok, id, QLORA__TEXT_K_SPECIAL);
    out->added = qlora__text_tok_has(tok, id, QLORA__TEXT_K_ADDED);
    return QLORA_OK;
}

static bool qlora__text_name_is(const qlora_text_tok* tok, int32_t id, const char* name,
                                size_t size) {
    return qlora__text_tok_has(tok, id, QLORA__TEXT_K_EXISTS) && tok->spans[id].size == size &&
           memcmp(tok->names.data + tok->spans[id].at, name, size) == 0;
}

static int32_t qlora__text_tok_find(const qlora_text_tok* tok, const char* token) {
    size_t size = strlen(token);
    for (size_t i = 0; i < tok->added_count; i++) {
        qlora__text_span name = tok->added[i].name;
        if (name.size == size && memcmp(tok->names.data + name.at, token, size) == 0) {
            return tok->added[i].id;
        }
    }
    int32_t found = size == 0 ? -1 : qlora__text_model_find(tok, token, size);
    for (size_t id = 0; id < tok->count && found < 0 && tok->others > 0 && size > 0; id++) {
        found = qlora__text_name_is(tok, (int32_t)id, token, size) ? (int32_t)id : -1;
    }
    return found;
}

int32_t qlora_text_tok_find(const qlora_text_tok* tok, const char* token) {
    return tok != NULL && token != NULL ? qlora__text_tok_find(tok, token) : -1;
}
