// New tokens: the tokenizer's files with more tokens.

#define QLORA__TEXT_TOOLS_FOLDER "additional_chat_templates"
#define QLORA__TEXT_TOOLS_FILE QLORA__TEXT_TOOLS_FOLDER "/tool_use.jinja"

// One edit of a JSON text: `insert` replaces the bytes from `at` to `end`.
typedef struct qlora__text_edit {
    size_t at;
    size_t end;
    qlora__string insert;
} qlora__text_edit;

static void qlora__text_edit_apply(const qlora__text_edit* e, const qlora_text_bytes* file,
                                   qlora__string* out) {
    qlora__string_add(out, file->data, e->at);
    qlora__string_add(out, e->insert.data, e->insert.size);
    qlora__string_add(out, file->data + e->end, file->count - e->end);
    out->result = out->result == QLORA_OK ? e->insert.result : out->result;
}

// The flags of a token, as the tokenizers library writes them. The text is found as it is spelt,
// before it is normalised.
static void qlora__text_new_flags(const qlora_text_new_token* token, qlora__json_writer* w) {
    qlora__json_write_string(w, "content", token->text);
    qlora__json_write_word(w, "single_word", "false");
    qlora__json_write_word(w, "lstrip", "false");
    qlora__json_write_word(w, "rstrip", "false");
    qlora__json_write_word(w, "normalized", "false");
    qlora__json_write_word(w, "special", token->special ? "true" : "false");
}

// Writes the members that the tokens are in one of the files.
typedef void (*qlora__text_member_fn)(const qlora_text_new_token* token, qlora__json_writer* w);

static void qlora__text_member_list(const qlora_text_new_token* token, qlora__json_writer* w) {
    qlora__json_write_open(w, NULL, '{');
    qlora__json_write_int(w, "id", token->id);
    qlora__text_new_flags(token, w);
    qlora__json_write_close(w, '}');
}

static void qlora__text_member_decoder(const qlora_text_new_token* token, qlora__json_writer* w) {
    char id[16];
    snprintf(id, sizeof id, "%d", (int)token->id);
    qlora__json_write_open(w, id, '{');
    qlora__text_new_flags(token, w);
    qlora__json_write_close(w, '}');
}

static void qlora__text_member_map(const qlora_text_new_token* token, qlora__json_writer* w) {
    qlora__json_write_int(w, token->text, token->id);
}

// The files that name added tokens: the path of the list or object in them ("" = the root), and
// whether they must have it.
typedef struct qlora__text_token_file {
    const char* name;
    const char* member;
    char bracket;
    bool needed;
    qlora__text_member_fn write;
} qlora__text_token_file;

static const qlora__text_token_file qlora__text_token_files[] = {
    {"tokenizer.json", "added_tokens", '[', true, qlora__text_member_list},
    {"tokenizer_config.json", "added_tokens_decoder", '{', false, qlora__text_member_decoder},
    {"added_tokens.json", "", '{', false, qlora__text_member_map},
};

// Where the tokens go: into the list or object, or, if it is missing or null but needed, as a new
// member of the root. *has = false if the file stays as it is.
static qlora_result qlora__text_edit_place(qlora__env* env, const qlora__json* json,
                                           const qlora__text_token_file* kind, qlora__text_edit* e,
                                           bool* empty, bool* has) {
    uint32_t at = kind->member[0] != '\0' ? qlora__json_find(json, 0, kind->member) : 0;
    bool whole = kind->member[0] == '\0';
    if (qlora__json_kind_of(json, 0) != QLORA__JSON_OBJECT) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: expected a JSON object", json->label);
    }
    bool none = !whole && (at == 0 || qlora__json_kind_of(json, at) == QLORA__JSON_NULL);
    *has = !none || kind->needed;
    if (!*has) {
        return QLORA_OK;
    }
    if (none) {
        e->at = at == 0 ? json->tokens[0].begin + 1u : json->tokens[at].begin;
        e->end = at == 0 ? e->at : json->tokens[at].end;
        *empty = true;
        return QLORA_OK;
    }
    qlora__json_kind wanted = kind->bracket == '[' ? QLORA__JSON_ARRAY : QLORA__JSON_OBJECT;
    if (qlora__json_kind_of(json, at) != wanted) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: %s is not %s", json->label,
                               kind->member[0] != '\0' ? kind->member : "the file",
                               kind->bracket == '[' ? "an array" : "an object");
    }
    e->at = json->tokens[at].end - 1u;
    e->end = e->at;
    *empty = json->tokens[at].count == 0;
    return QLORA_OK;
}

// The text to insert: the members, inside new brackets if there were none.
static void qlora__text_edit_fill(const qlora__text_token_file* kind, const qlora__json* json,
                                  const qlora_text_new_token* tokens, size_t count, bool empty,
                                  qlora__text_edit* e) {
    qlora__json_writer w;
    uint32_t at = kind->member[0] != '\0' ? qlora__json_find(json, 0, kind->member) : 0;
    bool fresh =
        kind->member[0] != '\0' && (at == 0 || qlora__json_kind_of(json, at) == QLORA__JSON_NULL);
    char bracket[2] = {kind->bracket, '\0'};
    if (fresh && at == 0) {
        qlora__json_write_quoted(&e->insert, kind->member, strlen(kind->member));
        qlora__string_puts(&e->insert, ":");
    }
    qlora__string_puts(&e->insert, fresh ? bracket : "");
    qlora__json_write_begin(&w, &e->insert, 0);
    w.empty = empty;
    for (size_t i = 0; i < count; i++) {
        if (!tokens[i].known) {
            kind->write(&tokens[i], &w);
        }
    }
    bracket[0] = kind->bracket == '[' ? ']' : '}';
    qlora__string_puts(&e->insert, fresh ? bracket : "");
    if (fresh && at == 0 && json->tokens[0].count > 0) {
        qlora__string_puts(&e->insert, ",");
    }
}

// The text of one of the files with the tokens in it.
static qlora_result qlora__text_file_extend(qlora__env* env, const char* path,
                                            const qlora__text_token_file* kind,
                                            const qlora_text_bytes* file,
                                            const qlora_text_new_token* tokens, size_t count,
                                            qlora__string* out) {
    qlora__json json;
    qlora__text_edit e;
    bool empty = true;
    bool has = false;
    bool any = false;
    for (size_t i = 0; i < count; i++) {
        any = any || !tokens[i].known;
    }
    memset(&e, 0, sizeof e);
    QLORA__TRY(qlora__json_parse(env, path, file->data, file->count, 0, &json));
    qlora__string_begin(env, &e.insert);
    qlora_result r = qlora__text_edit_place(env, &json, kind, &e, &empty, &has);
    if (r == QLORA_OK && has && any) {
        qlora__text_edit_fill(kind, &json, tokens, count, empty, &e);
    }
    if (r == QLORA_OK) {
        e.at = has && any ? e.at : 0;
        e.end = has && any ? e.end : 0;
        qlora__text_edit_apply(&e, file, out);
        r = out->result;
    }
    qlora__string_free(&e.insert);
    qlora__json_free(env, &json);
    return r;
}

// ---- ids ----------------------------------------------------------------------------------------

static qlora_result qlora__text_new_check(qlora__env* env, const qlora_text_new_token* tokens,
                                          size_t count) {
    for (size_t i = 0; i < count; i++) {
        const char* text = tokens[i].text;
        size_t size = text != NULL ? strlen(text) : 0;
        if (size == 0 || size > QLORA__TEXT_MAX_ADDED) {
            return qlora__env_fail(
                env, QLORA_ERR_ARGUMENT, "new token %llu has %llu bytes; it must have 1 to %d",
                (unsigned long long)i, (unsigned long long)size, QLORA__TEXT_MAX_ADDED);
        }
        for (size_t at = 0; at < size;) {
            uint32_t code = 0;
            size_t n = qlora__text_utf8((const unsigned char*)text + at, size - at, &code);
            if (n == 0) {
                return qlora__env_fail(env, QLORA_ERR_ARGUMENT, "new token %llu is not UTF-8",
                                       (unsigned long long)i);
            }
            at += n;
        }
        for (size_t k = 0; k < i; k++) {
            if (strcmp(tokens[k].text, text) == 0) {
                return qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                                       "new token %llu is \"%.60s\", as token %llu is",
                                       (unsigned long long)i, text, (unsigned long long)k);
            }
        }
    }
    return QLORA_OK;
}

// The ids that the tokens have or get: the next ones after the largest, in their order.
static qlora_result qlora__text_new_ids(qlora__env* env, const qlora_text_tok* tok,
                                        qlora_text_new_token* tokens, size_t count) {
    int64_t next = (int64_t)tok->count;
    for (size_t i = 0; i < tok->count; i++) {
        if ((tok->kinds[i] & QLORA__TEXT_K_EXISTS) == 0) {
            return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                   "id %llu has no token; a tokenizer with gaps cannot get new "
                                   "tokens",
                                   (unsigned long long)i);
        }
    }
    for (size_t i = 0; i < count; i++) {
        int32_t id = qlora_text_tok_find(tok, tokens[i].text);
        tokens[i].known = id >= 0;
        tokens[i].id = id >= 0 ? id : (int32_t)next++;
    }
    return next <= (int64_t)QLORA__TEXT_MAX_ID
               ? QLORA_OK
               : qlora__env_fail(env, QLORA_ERR_LIMIT, "too many tokens");
}

// ---- the two functions --------------------------------------------------------------------------

// Reads tokenizer.json of a folder.
static qlora_result qlora__text_new_read(qlora__env* env, const char* folder,
                                         qlora_text_bytes* file) {
    bool found = false;
    bool gguf = qlora__gguf_path(folder);
    if (!gguf) {
        QLORA__TRY(qlora__text_folder_read(env, folder, "tokenizer.json", file, &found));
    }
    return found ? QLORA_OK
                 : qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                   "%s: new tokens need a folder with tokenizer.json", folder);
}

static qlora_result qlora__text_open_with(qlora_text* text, const char* folder,
                                          qlora_text_new_token* tokens, size_t count,
                                          qlora_text_bytes* file, qlora__string* out,
                                          qlora_text_tok** tok) {
    qlora__env* env = &text->env;
    qlora_text_tok* before = NULL;
    QLORA__TRY(qlora__text_new_check(env, tokens, count));
    QLORA__TRY(qlora__text_new_read(env, folder, file));
    QLORA__TRY(qlora__text_tok_load(text, folder, file->data, file->count, &before));
    qlora_result r = qlora__text_new_ids(env, before, tokens, count);
    qlora__text_tok_free(env, before);
    text->toks--;
    QLORA__TRY(r);
    QLORA__TRY(qlora__text_file_extend(env, folder, &qlora__text_token_files[0], file, tokens,
                                       count, out));
    return qlora__text_tok_load(text, folder, out->data, out->size, tok);
}

qlora_result qlora_text_tok_open_with(qlora_text* text, const char* folder,
                                      qlora_text_new_token* tokens, size_t count,
                                      qlora_text_tok** out) {
    if (text == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__text_enter(text, "qlora_text_tok_open_with");
    QLORA__TEXT_NEED(&text->env, folder);
    QLORA__TEXT_NEED(&text->env, out);
    if (tokens == NULL && count > 0) {
        return qlora__env_fail(&text->env, QLORA_ERR_ARGUMENT, "tokens is NULL");
    }
    qlora_text_bytes file;
    qlora__string extended;
    memset(&file, 0, sizeof(file));
    qlora__string_begin(&text->env, &extended);
    qlora_result r = qlora__text_open_with(text, folder, tokens, count, &file, &extended, out);
    qlora__string_free(&extended);
    qlora__text_bytes_free(&text->env, &file);
    return r;
}

// Gives the object in a JSON text a member that is a string, or replaces it.
static qlora_result qlora__text_member_set(qlora__env* env, const char* path,
                                           const qlora_text_bytes* file, const char* name,
                                           const char* value, size_t size, qlora__string* out) {
    qlora__json json;
    qlora__text_edit e;
    memset(&e, 0, sizeof e);
    QLORA__TRY(qlora__json_parse(env, path, file->data, file->count, 0, &json));
    qlora_result r = QLORA_OK;
    if (qlora__json_kind_of(&json, 0) != QLORA__JSON_OBJECT) {
        r = qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: expected a JSON object", path);
    }
    uint32_t at = r == QLORA_OK ? qlora__json_find(&json, 0, name) : 0;
    if (r == QLORA_OK) {
        size_t quotes = qlora__json_kind_of(&json, at) == QLORA__JSON_STRING ? 1 : 0;
        e.at = at != 0 ? json.tokens[at].begin - quotes : json.tokens[0].begin + 1u;
        e.end = at != 0 ? json.tokens[at].end + quotes : e.at;
        qlora__string_begin(env, &e.insert);
        if (at == 0) {
            qlora__json_write_quoted(&e.insert, name, strlen(name));
            qlora__string_puts(&e.insert, ": ");
        }
        qlora__json_write_quoted(&e.insert, value, size);
        qlora__string_puts(&e.insert, at == 0 && json.tokens[0].count > 0 ? ", " : "");
        qlora__text_edit_apply(&e, file, out);
        r = out->result;
        qlora__string_free(&e.insert);
    }
    qlora__json_free(env, &json);
    return r;
}

// The files of a tokenizer, on their way to another folder.
typedef struct qlora__text_carry {
    const char* folder;
    const char* to;
    const qlora_text_new_token* tokens;
    size_t count;
    const char* template_; // replaces that of the folder; NULL: its own
    size_t template_size;
} qlora__text_carry;

// Writes one file of the folder to `to`, if it exists; kind NULL = a copy.
static qlora_result qlora__text_file_carry(qlora__env* env, const qlora__text_carry* c,
                                           const char* name, const qlora__text_token_file* kind) {
    static const char plain[] = "{\n  \"tokenizer_class\": \"PreTrainedTokenizerFast\"\n}";
    char from[QLORA__PATH_ROOM];
    char path[QLORA__PATH_ROOM];
    qlora_text_bytes file;
    qlora__string out;
    bool found = false;
    bool config = strcmp(name, "tokenizer_config.json") == 0;
    memset(&file, 0, sizeof(file));
    QLORA__TRY(qlora__path_join(env, c->folder, name, from));
    QLORA__TRY(qlora__path_join(env, c->to, name, path));
    qlora__string_begin(env, &out);
    qlora_result r = qlora__text_folder_read(env, c->folder, name, &file, &found);
    if (r == QLORA_OK && !found && config) {
        // Without it, transformers would look for the class in a config that adapters lack.
        found = true;
        r = qlora__text_bytes_add(env, &file, plain, sizeof plain - 1);
    }
    if (r == QLORA_OK && found && kind != NULL) {
        r = qlora__text_file_extend(env, from, kind, &file, c->tokens, c->count, &out);
    }
    if (r == QLORA_OK && config && c->template_ != NULL) {
        file.count = 0;
        r = qlora__text_bytes_add(env, &file, out.data, out.size);
        qlora__string_free(&out);
        qlora__string_begin(env, &out);
        r = r == QLORA_OK ? qlora__text_member_set(env, from, &file, "chat_template", c->template_,
                                                   c->template_size, &out)
                          : r;
    }
    if (r == QLORA_OK && found) {
        r = kind != NULL ? qlora__file_write(env, path, out.data, out.size)
                         : qlora__file_write(env, path, file.data, file.count);
    }
    qlora__string_free(&out);
    qlora__text_bytes_free(env, &file);
    return r;
}

// The template for tools of the folder, in a folder of its own.
static qlora_result qlora__text_tools_carry(qlora__env* env, const qlora__text_carry* c) {
    char path[QLORA__PATH_ROOM];
    bool exists = false;
    QLORA__TRY(qlora__path_join(env, c->folder, QLORA__TEXT_TOOLS_FILE, path));
    QLORA__TRY(qlora__file_exists(env, path, &exists));
    if (!exists) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__path_join(env, c->to, QLORA__TEXT_TOOLS_FOLDER, path));
    QLORA__TRY(qlora__dir_make(env, path));
    return qlora__text_file_carry(env, c, QLORA__TEXT_TOOLS_FILE, NULL);
}

static qlora_result qlora__text_tok_save(qlora__env* env, const qlora__text_carry* c) {
    static const char* const copies[] = {"special_tokens_map.json", "chat_template.jinja",
                                         "chat_template.json"};
    qlora_text_bytes file;
    memset(&file, 0, sizeof(file));
    qlora_result r = qlora__text_new_check(env, c->tokens, c->count);
    r = r == QLORA_OK ? qlora__text_new_read(env, c->folder, &file) : r;
    qlora__text_bytes_free(env, &file);
    QLORA__TRY(r);
    for (size_t i = 0; i < (c->template_ == NULL ? QLORA__TEXT_COUNT(copies) : 1); i++) {
        QLORA__TRY(qlora__text_file_carry(env, c, copies[i], NULL));
    }
    if (c->template_ == NULL) {
        QLORA__TRY(qlora__text_tools_carry(env, c));
    }
    // tokenizer.json last: it is what the others belong to
    for (size_t i = QLORA__TEXT_COUNT(qlora__text_token_files); i-- > 0;) {
        const qlora__text_token_file* kind = &qlora__text_token_files[i];
        QLORA__TRY(qlora__text_file_carry(env, c, kind->name, kind));
    }
    return QLORA_OK;
}

static qlora__text_carry qlora__text_carry_of(const char* folder,
                                              const qlora_text_new_token* tokens, size_t count,
                                              const char* to) {
    qlora__text_carry c;
    memset(&c, 0, sizeof c);
    c.folder = folder;
    c.tokens = tokens;
    c.count = count;
    c.to = to;
    return c;
}

qlora_result qlora_text_tok_save(qlora_text* text, const char* folder,
                                 const qlora_text_new_token* tokens, size_t count, const char* to) {
    if (text == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__text_enter(text, "qlora_text_tok_save");
    QLORA__TEXT_NEED(&text->env, folder);
    QLORA__TEXT_NEED(&text->env, to);
    if (tokens == NULL && count > 0) {
        return qlora__env_fail(&text->env, QLORA_ERR_ARGUMENT, "tokens is NULL");
    }
    qlora__text_carry c = qlora__text_carry_of(folder, tokens, count, to);
    return qlora__text_tok_save(&text->env, &c);
}
