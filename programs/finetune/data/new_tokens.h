// new_tokens.h - --add-tokens: tokens that the model does not know yet, and the tokenizer's files.
#ifndef FINETUNE_NEW_TOKENS_H
#define FINETUNE_NEW_TOKENS_H

static void new_tokens_free(app* a) {
    new_tokens* n = &a->new_tokens;
    for (size_t i = 0; i < n->count; i++) {
        blob_free(&n->texts[i]);
        blob_free(&n->inits[i]);
        qlora_text_ids_free(a->text, &n->from[i]);
    }
    free(n->texts);
    free(n->inits);
    free(n->from);
    free(n->tokens);
    free(n->rows);
    memset(n, 0, sizeof *n);
}

static bool new_tokens_room(app* a) {
    new_tokens* n = &a->new_tokens;
    n->texts = (blob*)take(a, MAX_NEW_TOKENS, sizeof *n->texts);
    n->inits = n->texts != NULL ? (blob*)take(a, MAX_NEW_TOKENS, sizeof *n->inits) : NULL;
    n->from = n->inits != NULL ? (qlora_text_ids*)take(a, MAX_NEW_TOKENS, sizeof *n->from) : NULL;
    n->tokens =
        n->from != NULL ? (qlora_text_new_token*)take(a, MAX_NEW_TOKENS, sizeof *n->tokens) : NULL;
    n->rows = n->tokens != NULL ? (qlora_new_token*)take(a, MAX_NEW_TOKENS, sizeof *n->rows) : NULL;
    return n->rows != NULL;
}

// ---- the file ----

// Adds a token; `what` names its place in the file.
static bool new_token_add(app* a, const char* what, const char* text, size_t size, bool special,
                          const blob* init) {
    new_tokens* n = &a->new_tokens;
    if (n->count == MAX_NEW_TOKENS) {
        return error_set(a->error, "%s: there are more than %d tokens", what, MAX_NEW_TOKENS);
    }
    if (size == 0 || memchr(text, '\0', size) != NULL) {
        return error_set(a->error, "%s: the token %s", what,
                         size == 0 ? "is empty" : "contains a zero byte");
    }
    size_t at = n->count++;
    n->tokens[at].special = special;
    bool ok = blob_add(&n->texts[at], text, size) && blob_add(&n->texts[at], "", 1);
    if (init != NULL && init->count > 0) {
        ok = ok && blob_add(&n->inits[at], init->data, init->count);
    }
    return ok || error_set(a->error, "out of memory");
}

// true or false.
static bool json_flag(json_reader* r, bool* out) {
    size_t left = (size_t)(r->end - r->at);
    *out = left >= 4 && memcmp(r->at, "true", 4) == 0;
    bool off = left >= 5 && memcmp(r->at, "false", 5) == 0;
    r->at += *out ? 4 : off ? 5 : 0;
    return *out || off || json_wrong(r, "true or false was expected");
}

typedef struct token_fields {
    blob name;
    blob text;
    blob init;
    bool special;
} token_fields;

static bool token_field_read(json_reader* r, token_fields* f) {
    f->name.count = 0;
    json_space(r);
    if (!json_string(r, &f->name) || !blob_add(&f->name, "", 1)) {
        return false;
    }
    if (!json_take(r, ':')) {
        return json_wrong(r, "':' was expected");
    }
    json_space(r);
    if (strcmp(f->name.data, "token") == 0) {
        f->text.count = 0;
        return json_string(r, &f->text);
    }
    if (strcmp(f->name.data, "init") == 0) {
        f->init.count = 0;
        return json_string(r, &f->init);
    }
    return strcmp(f->name.data, "special") == 0
               ? json_flag(r, &f->special)
               : json_wrong(r, "the names are \"token\", \"special\" and \"init\"");
}

// One token as JSON: a string, or an object.
static bool token_value(app* a, const char* what, json_reader* r) {
    token_fields f;
    bool more = true;
    memset(&f, 0, sizeof f);
    json_space(r);
    bool object = r->at < r->end && *r->at != '"';
    bool ok = object ? json_take(r, '{') || json_wrong(r, "a string or an object was expected")
                     : json_string(r, &f.text);
    while (ok && object && more) {
        ok = token_field_read(r, &f);
        more = ok && json_take(r, ',');
    }
    ok = ok && (!object || json_take(r, '}') || json_wrong(r, "',' or '}' was expected"));
    if (!ok) {
        error_set(a->error, "%s: %s", what, r->wrong != NULL ? r->wrong : "out of memory");
    }
    ok = ok && new_token_add(a, what, f.text.data != NULL ? f.text.data : "", f.text.count,
                             f.special, &f.init);
    blob_free(&f.name);
    blob_free(&f.text);
    blob_free(&f.init);
    return ok;
}

// A .json file: a list.
static bool tokens_list(app* a, const char* path, const blob* text) {
    char what[FOLDER_PATH + 32];
    json_reader r = json_start(text->data != NULL ? text->data : "", text->count);
    bool more = true;
    json_space(&r);
    for (size_t i = 0; more; i++) {
        snprintf(what, sizeof what, "--add-tokens %.800s: token %zu", path, i);
        if (!json_next(&r, i, &more) || (!more && !json_end(&r))) {
            return error_set(a->error, "%s: %s", what, r.wrong);
        }
        if (more && !token_value(a, what, &r)) {
            return false;
        }
    }
    return true;
}

// Any other file: one token per line, as JSON if the name ends in .jsonl, otherwise as it is.
static bool tokens_lines(app* a, const char* path, const blob* text, bool json) {
    char what[FOLDER_PATH + 32];
    bool mark = text->count >= 3 && memcmp(text->data, "\xEF\xBB\xBF", 3) == 0;
    const char* line = text->data != NULL ? text->data + (mark ? 3 : 0) : NULL;
    const char* end = text->data != NULL ? text->data + text->count : NULL;
    bool ok = true;
    for (size_t number = 1; ok && line != NULL && line < end; number++) {
        const char* stop = (const char*)memchr(line, '\n', (size_t)(end - line));
        stop = stop != NULL ? stop : end;
        size_t size = (size_t)(stop - line);
        size -= size > 0 && line[size - 1] == '\r' ? 1 : 0;
        snprintf(what, sizeof what, "--add-tokens %.800s:%zu", path, number);
        if (size > 0 && json) {
            json_reader r = json_start(line, size);
            ok = token_value(a, what, &r) &&
                 (json_end(&r) || error_set(a->error, "%s: %s", what, r.wrong));
        } else if (size > 0) {
            ok = new_token_add(a, what, line, size, false, NULL);
        }
        line = stop + 1;
    }
    return ok;
}

static bool tokens_read(app* a) {
    const char* path = a->o.adapter.add_tokens;
    blob text;
    memset(&text, 0, sizeof text);
    int code = blob_read_path(&text, path);
    bool ok = code == 0 || error_set(a->error, "--add-tokens %s: %s", path, strerror(code));
    ok = ok && new_tokens_room(a) &&
         (ends_in(path, ".json") ? tokens_list(a, path, &text)
                                 : tokens_lines(a, path, &text, ends_in(path, ".jsonl")));
    blob_free(&text);
    return ok && (a->new_tokens.count > 0 ||
                  error_set(a->error, "--add-tokens %s: the file has no tokens", path));
}

// ---- ids and rows ----

// The folder whose tokenizer is used: the adapter's, if it has one, for it may have more tokens.
static const char* tokenizer_folder(const app* a) {
    const char* adapter = a->o.adapter.from;
    return adapter != NULL && !file_missing(adapter, "tokenizer.json") ? adapter : a->o.model.path;
}

// The rows that the row of a token starts from: those of its text in "init".
static bool token_init(app* a, qlora_text_tok* known, size_t i) {
    new_tokens* n = &a->new_tokens;
    char what[160];
    snprintf(what, sizeof what, "--add-tokens: \"init\" of %.100s", n->texts[i].data);
    if (n->inits[i].count == 0) {
        return true;
    }
    if (qlora_text_encode(known, n->inits[i].data, n->inits[i].count, 0, &n->from[i]) != QLORA_OK) {
        return text_fail(a, "--add-tokens: ");
    }
    for (size_t k = 0; k < n->from[i].count; k++) {
        if (n->from[i].data[k] >= a->config.vocab) {
            return error_set(a->error, "%s has token %d; the model's ids are 0 to %lld", what,
                             (int)n->from[i].data[k], (long long)a->config.vocab - 1);
        }
    }
    return n->from[i].count > 0 || error_set(a->error, "%s has no tokens", what);
}

// Names the tokens that exist already.
static void tokens_tell(app* a) {
    const new_tokens* n = &a->new_tokens;
    char names[200] = "";
    size_t known = 0;
    for (size_t i = 0; i < n->count; i++) {
        if (n->tokens[i].known) {
            name_append(names, n->tokens[i].text);
            known++;
        }
    }
    say(a, "tokens: %zu added%s", n->count - known, known == 0 ? "\n" : "");
    if (known > 0) {
        say(a, "; the tokenizer already has %s\n", names);
    }
}

// Describes the new rows to the model.
static void tokens_describe(app* a) {
    new_tokens* n = &a->new_tokens;
    for (size_t i = 0; i < n->count; i++) {
        if (!n->tokens[i].known) {
            qlora_new_token* row = &n->rows[n->row_count++];
            row->id = n->tokens[i].id;
            row->from = n->from[i].data;
            row->from_count = (int64_t)n->from[i].count;
            a->config.vocab = row->id >= a->config.vocab ? row->id + 1 : a->config.vocab;
        }
    }
    a->model_desc.new_tokens = n->row_count > 0 ? n->rows : NULL;
    a->model_desc.new_token_count = (int64_t)n->row_count;
}

// Reads --add-tokens and gives the tokens their ids.
static bool new_tokens_open(app* a) {
    new_tokens* n = &a->new_tokens;
    qlora_text_tok* known = NULL;
    qlora_text_tok* grown = NULL;
    if (a->o.adapter.add_tokens == NULL) {
        return true;
    }
    if (!text_open(a) || !tokens_read(a)) {
        return false;
    }
    for (size_t i = 0; i < n->count; i++) {
        n->tokens[i].text = n->texts[i].data;
    }
    bool ok = qlora_text_tok_open_with(a->text, a->o.model.path, n->tokens, n->count, &grown) ==
                  QLORA_OK ||
              text_fail(a, "--add-tokens: ");
    ok = ok && (qlora_text_tok_open(a->text, a->o.model.path, &known) == QLORA_OK ||
                text_fail(a, "the model's tokenizer: "));
    for (size_t i = 0; ok && i < n->count; i++) {
        ok = token_init(a, known, i);
    }
    qlora_text_tok_close(grown);
    qlora_text_tok_close(known);
    if (ok) {
        tokens_tell(a);
        tokens_describe(a);
    }
    return ok;
}

// What the tokens add to the identity of the data.
static uint64_t new_tokens_hash(const app* a, uint64_t hash) {
    const new_tokens* n = &a->new_tokens;
    for (size_t i = 0; i < n->count; i++) {
        unsigned char special = n->tokens[i].special ? 1 : 0;
        hash = hash_more(hash, n->texts[i].data, n->texts[i].count);
        hash = hash_more(hash, &special, 1);
        hash = hash_more(hash, n->from[i].data, n->from[i].count * sizeof *n->from[i].data);
    }
    return hash;
}

// ---- the files ----

// The tokenizer and the chat template of the training are kept with the adapter: what uses it has
// to form the same prompts.
static bool tokenizer_save(app* a, const char* to) {
    const new_tokens* n = &a->new_tokens;
    char demo[PATH_SIZE];
    out_path(a, "model", demo);
    const char* folder = a->o.demo ? demo : tokenizer_folder(a);
    if (qlora_text_chat_save(a->chat, folder, n->tokens, n->count, to) != QLORA_OK) {
        return text_fail(a, "saving the adapter: its tokenizer: ");
    }
    if (a->no_tokenizer || n->count > 0 || !file_is_gguf(folder)) {
        return true;
    }
    qlora_result r = qlora_adapter_save_tokenizer(a->model, to);
    if (r != QLORA_ERR_UNSUPPORTED) {
        return lib(a, r, "saving the adapter: its tokenizer");
    }
    a->no_tokenizer = true;
    say(a, "note: no tokenizer.json with the adapter: %s\n",
        message_text(qlora_last_error(a->ctx)));
    return true;
}

#endif
