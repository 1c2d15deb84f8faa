// Chats: which template a model has, and its special tokens.

struct qlora_text_chat {
    qlora_text* text;
    qlora_text_tok* tok;
    qlora_text_template* template_;  // renders conversations
    qlora_text_template* with_tools; // for those with tools, where the model has one; may be NULL
    const char* name;                // of a built-in format, or "model"
    const char* source;
    const char* missing; // the end marker of the format, if the tokenizer lacks it
    int32_t opens;       // the marker before the content of an answer, or -1
    qlora__text_owned closes; // what ends an answer that another turn follows, or ""
    bool built_in;
    bool guessed;                // nobody chose the format: neither the caller nor a folder
    bool used;                   // a conversation was rendered
    bool own;                    // the template is that of tokenizer_folder
    bool replaced;               // tokenizer_folder has another one
    qlora__text_owned shown[2];  // the source of the template (with tools)
    bool takes_parts[2];         // the template (with tools) takes a content in parts
    bool keeps_strings[2];       // the template (with tools) asks whether arguments are a string
    bool blocks;                 // what is trained comes from generation blocks
    qlora__text_owned tokens[4]; // the texts of bos_token, eos_token, pad_token, unk_token
    int64_t clock;
    int64_t users; // streams of data that use it
    int32_t bos;
    int32_t eos;
    int32_t stops[QLORA__TEXT_MAX_STOPS];
    size_t stop_count;
    qlora__stop_ids config_stops; // while it is opened
    qlora__json* parsed; // arguments that were strings, during a rendering
    size_t parsed_count;
    size_t parsed_capacity;
};

static const char* const qlora__text_token_names[4] = {"bos_token", "eos_token", "pad_token",
                                                       "unk_token"};
// 2024-07-26T12:00:00. A fixed day, so that training does not depend on when it happens.
#define QLORA__TEXT_CLOCK 1721995200

static void qlora__text_chat_free(qlora__env* env, qlora_text_chat* chat) {
    for (size_t i = 0; i < 4; i++) {
        qlora__text_owned_free(env, &chat->tokens[i]);
    }
    qlora__text_owned_free(env, &chat->shown[0]);
    qlora__text_owned_free(env, &chat->shown[1]);
    qlora__text_owned_free(env, &chat->closes);
    if (chat->template_ != NULL) {
        qlora__jin_template_free(env, chat->template_);
    }
    if (chat->with_tools != NULL) {
        qlora__jin_template_free(env, chat->with_tools);
    }
    qlora__env_free(env, chat->parsed, chat->parsed_capacity * sizeof *chat->parsed);
    qlora__env_free(env, chat, sizeof *chat);
}

static bool qlora__text_chat_stops(const qlora_text_chat* chat, int32_t id) {
    for (size_t i = 0; i < chat->stop_count; i++) {
        if (chat->stops[i] == id) {
            return true;
        }
    }
    return false;
}

// An id that the tokenizer does not have cannot be generated, and is not kept.
static void qlora__text_chat_add_stop(qlora_text_chat* chat, int64_t id) {
    if (id >= 0 && id < (int64_t)chat->tok->count && chat->stop_count < QLORA__TEXT_MAX_STOPS &&
        !qlora__text_chat_stops(chat, (int32_t)id)) {
        chat->stops[chat->stop_count++] = (int32_t)id;
    }
}

// Whether a template asks if arguments of a tool call are a string: then they stay one.
static bool qlora__text_asks_string(const qlora__jin_node* first) {
    const qlora__jin_node* rest = NULL;
    for (const qlora__jin_node* n = first; n != NULL; n = qlora__jin_walk(n, &rest)) {
        const qlora__jin_node* parts[5] = {n->a, n->b, n->c, qlora__jin_below(n), n->e};
        if (n->kind == QLORA__JIN_N_TEST && qlora__jin_named("string", n->name, n->size) &&
            n->a != NULL) {
            const qlora__jin_node* of = n->a;
            bool item = of->kind == QLORA__JIN_N_GETITEM && of->b->kind == QLORA__JIN_N_CONST &&
                        qlora__jin_is(of->b->value, "arguments", 9);
            bool named = (of->kind == QLORA__JIN_N_GETATTR || of->kind == QLORA__JIN_N_NAME) &&
                         qlora__jin_named("arguments", of->name, of->size);
            if (item || named) {
                return true;
            }
        }
        for (size_t i = 0; i < 5; i++) {
            if (qlora__text_asks_string(parts[i])) {
                return true;
            }
        }
    }
    return false;
}

static qlora_result qlora__text_chat_built_in(qlora_text_chat* chat,
                                              const qlora__text_format* format,
                                              const char* source) {
    size_t size = strlen(format->source);
    QLORA__TRY(qlora__text_owned_set(&chat->text->env, &chat->shown[0], format->source, size));
    QLORA__TRY(
        qlora__jin_compile(chat->text, format->name, format->source, size, &chat->template_));
    chat->name = format->name;
    chat->source = source;
    chat->built_in = true;
    if (format->end != NULL && qlora__text_tok_find(chat->tok, format->end) < 0) {
        chat->missing = format->end;
    }
    return QLORA_OK;
}

// A file with the text of a built-in format is that format: it was written with an adapter, and is
// to be tokenized as in training.
static qlora_result qlora__text_chat_compile(qlora_text_chat* chat, const char* source,
                                             const char* text, size_t size) {
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__text_formats); i++) {
        const qlora__text_format* format = &qlora__text_formats[i];
        if (strlen(format->source) == size && memcmp(format->source, text, size) == 0) {
            return qlora__text_chat_built_in(chat, format, source);
        }
    }
    chat->source = source;
    chat->name = "model";
    QLORA__TRY(qlora__text_owned_set(&chat->text->env, &chat->shown[0], text, size));
    QLORA__TRY(qlora__jin_compile(chat->text, source, text, size, &chat->template_));
    chat->keeps_strings[0] = qlora__text_asks_string(chat->template_->root->c);
    return QLORA_OK;
}

// The template for conversations with tools, where a model has two.
static qlora_result qlora__text_chat_compile_tools(qlora_text_chat* chat, const char* source,
                                                   const char* text, size_t size) {
    QLORA__TRY(qlora__text_owned_set(&chat->text->env, &chat->shown[1], text, size));
    QLORA__TRY(qlora__jin_compile(chat->text, source, text, size, &chat->with_tools));
    chat->keeps_strings[1] = qlora__text_asks_string(chat->with_tools->root->c);
    return QLORA_OK;
}

// ---- the model's folder

// A token given as "x" or {"content": "x"}: its text, or NULL.
static const char* qlora__text_config_text(const qlora__json* json, const char* name) {
    const qlora__json_token* value = qlora__text_json_get(json, json->tokens, name);
    if (value != NULL && value->kind == QLORA__JSON_OBJECT) {
        value = qlora__text_json_get(json, value, "content");
    }
    return qlora__text_json_cstring(json, value);
}

// tokenizer_config.json (or chat_template.json): special tokens.
static qlora_result qlora__text_config_tokens(qlora__env* env, qlora_text_chat* chat,
                                              const qlora__json* json) {
    for (size_t i = 0; i < 4; i++) {
        const char* token = qlora__text_config_text(json, qlora__text_token_names[i]);
        if (token != NULL) {
            qlora__text_owned_free(env, &chat->tokens[i]);
            QLORA__TRY(qlora__text_owned_set(env, &chat->tokens[i], token, strlen(token)));
        }
    }
    return QLORA_OK;
}

// config.json and generation_config.json, read in this order: see formats/stop_ids.h.
static qlora_result qlora__text_config_stops(qlora__env* env, qlora_text_chat* chat,
                                             const qlora__json* json) {
    uint32_t inner = qlora__json_find(json, 0, "text_config");
    bool nested = inner != 0 && qlora__json_kind_of(json, inner) == QLORA__JSON_OBJECT;
    return qlora__stop_ids_read(env, json, nested ? inner : 0, INT32_MAX, &chat->config_stops);
}

// Calls `read` with a JSON file of a folder, if there is such a file.
typedef qlora_result (*qlora__text_read_fn)(qlora__env* env, qlora_text_chat* chat,
                                            const qlora__json* json);
static qlora_result qlora__text_folder_json(qlora__env* env, qlora_text_chat* chat,
                                            const char* path, const char* name,
                                            qlora__text_read_fn read, bool* found) {
    qlora_text_bytes file;
    qlora__json json;
    memset(&file, 0, sizeof(file));
    *found = false;
    qlora_result r = qlora__text_folder_read(env, path, name, &file, found);
    if (r == QLORA_OK && *found) {
        r = qlora__text_json(env, name, file.data, file.count, &json);
        if (r == QLORA_OK) {
            r = read(env, chat, &json);
            qlora__json_free(env, &json);
        }
    }
    qlora__text_bytes_free(env, &file);
    return r;
}

// The special tokens: where the tokenizer is configured. The ids at which generation ends are the
// model's.
static qlora_result qlora__text_folder_load(qlora__env* env, qlora_text_chat* chat,
                                            const char* const folders[2]) {
    static const char* const names[] = {"chat_template.json", "tokenizer_config.json"};
    static const char* const configs[] = {"config.json", "generation_config.json"};
    bool found = false;
    for (size_t i = 0; i < 2 && !found; i++) {
        for (size_t k = 0; k < 2 && folders[i] != NULL; k++) {
            QLORA__TRY(qlora__text_folder_json(env, chat, folders[i], names[k],
                                               qlora__text_config_tokens, &found));
        }
    }
    for (size_t k = 0; k < 2 && folders[1] != NULL; k++) {
        QLORA__TRY(qlora__text_folder_json(env, chat, folders[1], configs[k],
                                           qlora__text_config_stops, &found));
    }
    for (int32_t i = 0; i < chat->config_stops.count; i++) {
        qlora__text_chat_add_stop(chat, chat->config_stops.id[i]);
    }
    return QLORA_OK;
}

// The template: that of the folder with the tokenizer, else the model's. One that the caller has
// chosen replaces both.
static qlora_result qlora__text_folder_template(qlora__env* env, qlora_text_chat* chat,
                                                const char* const folders[2]) {
    qlora__text_found found;
    for (size_t i = 0; i < 2; i++) {
        if (folders[i] == NULL || (i == 1 && chat->template_ != NULL)) {
            continue;
        }
        qlora_result r = qlora__text_found_read(env, folders[i], &found);
        const qlora__text_owned* text = &found.text;
        if (r == QLORA_OK && text->data != NULL && chat->template_ != NULL) {
            chat->replaced = !qlora__text_owned_same(text, &chat->shown[0]);
        } else if (r == QLORA_OK && text->data != NULL) {
            chat->own = i == 0;
            r = qlora__text_chat_compile(chat, found.source, text->data, text->size);
            if (r == QLORA_OK && found.tools.data != NULL) {
                r = qlora__text_chat_compile_tools(chat, found.tools_source, found.tools.data,
                                                   found.tools.size);
            }
        }
        qlora__text_found_free(env, &found);
        QLORA__TRY(r);
    }
    return QLORA_OK;
}

// ---- opening

// Neither the caller nor the model has a template: the tokens of the tokenizer decide.
static qlora_result qlora__text_chat_guess(qlora_text_chat* chat) {
    const qlora__text_format* format = &qlora__text_formats[QLORA__TEXT_ALPACA];
    const char* source = "the default";
    for (size_t i = 0; i < 2; i++) {
        if (qlora__text_tok_find(chat->tok, qlora__text_formats[i].end) >= 0 &&
            qlora__text_tok_find(chat->tok, qlora__text_formats[i].marker) >= 0) {
            format = &qlora__text_formats[i];
            source = "the tokens of the tokenizer";
        }
    }
    return qlora__text_chat_built_in(chat, format, source);
}

static qlora_result qlora__text_chat_named(qlora__env* env, qlora_text_chat* chat,
                                           const char* name) {
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__text_formats); i++) {
        if (strcmp(name, qlora__text_formats[i].name) == 0) {
            return qlora__text_chat_built_in(chat, &qlora__text_formats[i], "chosen by name");
        }
    }
    return qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                           "unknown chat format \"%.60s\"; use chatml, llama3, mistral, gemma, "
                           "phi3, zephyr, alpaca or plain",
                           name);
}

// The text of a special token that the configuration does not name: as the tokenizer spells it.
static qlora_result qlora__text_chat_spell(qlora__env* env, qlora_text_chat* chat, size_t which,
                                           int32_t id) {
    const qlora_text_tok* tok = chat->tok;
    if (chat->tokens[which].data != NULL || !qlora__text_tok_has(tok, id, QLORA__TEXT_K_EXISTS)) {
        return QLORA_OK;
    }
    return qlora__text_owned_set(env, &chat->tokens[which], tok->names.data + tok->spans[id].at,
                                 tok->spans[id].size);
}

// The EOS token: the configuration's, else the first stop id, else one with a usual name.
static qlora_result qlora__text_chat_finish(qlora__env* env, qlora_text_chat* chat) {
    static const char* const names[] = {"</s>",       "<|end_of_text|>", "<|endoftext|>",
                                        "<|im_end|>", "<eos>",           "<|eot_id|>"};
    if (chat->tokens[1].data != NULL) {
        chat->eos = qlora__text_tok_find(chat->tok, chat->tokens[1].data);
    }
    if (chat->eos < 0 && chat->stop_count > 0) {
        chat->eos = chat->stops[0];
    }
    for (size_t i = 0; chat->eos < 0 && i < QLORA__TEXT_COUNT(names); i++) {
        chat->eos = qlora__text_tok_find(chat->tok, names[i]);
    }
    qlora__text_chat_add_stop(chat, chat->eos);
    QLORA__TRY(qlora__text_chat_spell(env, chat, 0, chat->bos));
    return qlora__text_chat_spell(env, chat, 1, chat->eos);
}

// The template of the caller's own file.
static qlora_result qlora__text_chat_file(qlora__env* env, qlora_text_chat* chat,
                                          const char* path) {
    qlora_text_bytes file;
    memset(&file, 0, sizeof file);
    qlora_result r = qlora__text_file_read(env, path, &file, NULL);
    r = r == QLORA_OK ? qlora__text_chat_compile(chat, "a file of its own", file.data, file.count)
                      : r;
    qlora__text_bytes_free(env, &file);
    return r;
}

static qlora_result qlora__text_chat_fill(qlora__env* env, qlora_text_chat* chat,
                                          const qlora_text_chat_desc* desc) {
    const char* const folders[2] = {desc->tokenizer_folder, desc->folder};
    if (desc->template_file != NULL) {
        QLORA__TRY(qlora__text_chat_file(env, chat, desc->template_file));
    } else if (desc->name != NULL) {
        QLORA__TRY(qlora__text_chat_named(env, chat, desc->name));
    }
    QLORA__TRY(qlora__text_folder_template(env, chat, folders));
    QLORA__TRY(qlora__text_folder_load(env, chat, folders));
    if (chat->template_ == NULL) {
        chat->guessed = true;
        QLORA__TRY(qlora__text_chat_guess(chat));
    }
    return qlora__text_chat_finish(env, chat);
}
