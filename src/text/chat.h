// Chats: which template a model has, and its special tokens.

// A string that is freed with the chat.
typedef struct qlora__text_owned {
    char* data;
    size_t size; // one byte more is allocated
} qlora__text_owned;

struct qlora_text_chat {
    qlora_text* text;
    qlora_text_tok* tok;
    qlora_text_template* template_;  // renders conversations
    qlora_text_template* with_tools; // for those with tools, where the model has one; may be NULL
    const char* name;                // of a built-in format, or "model"
    const char* source;
    const char* missing; // the end marker of the format, if the tokenizer lacks it
    bool built_in;
    bool keeps_strings[2];       // the template (with tools) asks whether arguments are a string
    bool blocks;                 // what is trained comes from generation blocks
    qlora__text_owned tokens[4]; // the texts of bos_token, eos_token, pad_token, unk_token
    int64_t clock;
    int64_t users; // streams of data that use it
    int32_t bos;
    int32_t eos;
    int32_t stops[QLORA__TEXT_MAX_STOPS];
    size_t stop_count;
    qlora__json* parsed; // arguments that were strings, during a rendering
    size_t parsed_count;
    size_t parsed_capacity;
};

static const char* const qlora__text_token_names[4] = {"bos_token", "eos_token", "pad_token",
                                                       "unk_token"};
// 2024-07-26T12:00:00. A fixed day, so that training does not depend on when it happens.
#define QLORA__TEXT_CLOCK 1721995200

static void qlora__text_owned_free(qlora__env* env, qlora__text_owned* owned) {
    qlora__env_free(env, owned->data, owned->size + 1);
    memset(owned, 0, sizeof(*owned));
}

static qlora_result qlora__text_owned_set(qlora__env* env, qlora__text_owned* owned,
                                          const char* data, size_t size) {
    return qlora__text_copy(env, data, size, &owned->data, &owned->size);
}

static void qlora__text_chat_free(qlora__env* env, qlora_text_chat* chat) {
    for (size_t i = 0; i < 4; i++) {
        qlora__text_owned_free(env, &chat->tokens[i]);
    }
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

static qlora_result qlora__text_chat_compile(qlora_text_chat* chat, const char* source,
                                             const char* text, size_t size) {
    chat->source = source;
    chat->name = "model";
    QLORA__TRY(qlora__jin_compile(chat->text, source, text, size, &chat->template_));
    chat->keeps_strings[0] = qlora__text_asks_string(chat->template_->root->c);
    return QLORA_OK;
}

// The template for conversations with tools, where a model has two.
static qlora_result qlora__text_chat_compile_tools(qlora_text_chat* chat, const char* source,
                                                   const char* text, size_t size) {
    QLORA__TRY(qlora__jin_compile(chat->text, source, text, size, &chat->with_tools));
    chat->keeps_strings[1] = qlora__text_asks_string(chat->with_tools->root->c);
    return QLORA_OK;
}

static qlora_result qlora__text_chat_built_in(qlora_text_chat* chat,
                                              const qlora__text_format* format,
                                              const char* source) {
    QLORA__TRY(qlora__jin_compile(chat->text, format->name, format->source, strlen(format->source),
                                  &chat->template_));
    chat->name = format->name;
    chat->source = source;
    chat->built_in = true;
    if (format->end != NULL && qlora__text_tok_find(chat->tok, format->end) < 0) {
        chat->missing = format->end;
    }
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

// chat_template: a string, or [{"name", "template"}]: the one with that name, or NULL. `any`: else
// the first.
static const qlora__json_token* qlora__text_config_template(const qlora__json* json,
                                                            const char* wanted, bool any) {
    const qlora__json_token* value = qlora__text_json_get(json, json->tokens, "chat_template");
    if (value == NULL || value->kind != QLORA__JSON_ARRAY) {
        return any && qlora__text_json_string(value) ? value : NULL;
    }
    const qlora__json_token* item = value + 1;
    const qlora__json_token* found = NULL;
    for (uint32_t i = 0; i < value->count; i++) {
        const qlora__json_token* name = qlora__text_json_get(json, item, "name");
        if ((found == NULL && any) || qlora__text_json_is(json, name, wanted)) {
            found = qlora__text_json_get(json, item, "template");
        }
        item = qlora__text_json_next(json, item);
    }
    return qlora__text_json_string(found) ? found : NULL;
}

// tokenizer_config.json (or chat_template.json): special tokens, and the template unless it has a
// file of its own.
static qlora_result qlora__text_config_tokenizer(qlora__env* env, qlora_text_chat* chat,
                                                 const qlora__json* json, const char* source,
                                                 bool wanted) {
    for (size_t i = 0; i < 4; i++) {
        const char* token = qlora__text_config_text(json, qlora__text_token_names[i]);
        if (token != NULL) {
            qlora__text_owned_free(env, &chat->tokens[i]);
            QLORA__TRY(qlora__text_owned_set(env, &chat->tokens[i], token, strlen(token)));
        }
    }
    const qlora__json_token* found = qlora__text_config_template(json, "default", true);
    if (found == NULL || chat->template_ != NULL || !wanted) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__text_chat_compile(chat, source, qlora__text_json_text(json, found),
                                        qlora__text_json_size(found)));
    const qlora__json_token* tools = qlora__text_config_template(json, "tool_use", false);
    return tools == NULL
               ? QLORA_OK
               : qlora__text_chat_compile_tools(chat, source, qlora__text_json_text(json, tools),
                                                qlora__text_json_size(tools));
}

// config.json and generation_config.json, read in this order: see formats/stop_ids.h.
static qlora_result qlora__text_config_stops(qlora__env* env, const qlora__json* json,
                                             qlora__stop_ids* stops) {
    uint32_t inner = qlora__json_find(json, 0, "text_config");
    bool nested = inner != 0 && qlora__json_kind_of(json, inner) == QLORA__JSON_OBJECT;
    return qlora__stop_ids_read(env, json, nested ? inner : 0, INT32_MAX, stops);
}

typedef struct qlora__text_folder {
    qlora_text_chat* chat;
    const char* path;
    bool wanted; // take the template
    qlora__stop_ids stops;
} qlora__text_folder;

enum {
    QLORA__TEXT_FILE_TEMPLATE,
    QLORA__TEXT_FILE_TOOLS,
    QLORA__TEXT_FILE_TEMPLATE_JSON,
    QLORA__TEXT_FILE_TOKENIZER,
    QLORA__TEXT_FILE_CONFIG
};

static qlora_result qlora__text_folder_file(qlora__env* env, qlora__text_folder* folder, int which,
                                            const char* name, const qlora_text_bytes* file) {
    qlora_text_chat* chat = folder->chat;
    if (which == QLORA__TEXT_FILE_TEMPLATE) {
        return folder->wanted
                   ? qlora__text_chat_compile(chat, "chat_template.jinja", file->data, file->count)
                   : QLORA_OK;
    }
    if (which == QLORA__TEXT_FILE_TOOLS) { // beside chat_template.jinja only
        return folder->wanted && chat->template_ != NULL
                   ? qlora__text_chat_compile_tools(chat, name, file->data, file->count)
                   : QLORA_OK;
    }
    qlora__json json;
    QLORA__TRY(qlora__text_json(env, name, file->data, file->count, &json));
    qlora_result r =
        which >= QLORA__TEXT_FILE_CONFIG
            ? qlora__text_config_stops(env, &json, &folder->stops)
            : qlora__text_config_tokenizer(env, chat, &json,
                                           which == QLORA__TEXT_FILE_TOKENIZER
                                               ? "the chat_template in tokenizer_config.json"
                                               : "chat_template.json",
                                           folder->wanted);
    qlora__json_free(env, &json);
    return r;
}

static qlora_result qlora__text_folder_load(qlora__env* env, qlora__text_folder* folder) {
    static const char* const names[] = {
        "chat_template.jinja", "additional_chat_templates/tool_use.jinja",
        "chat_template.json",  "tokenizer_config.json",
        "config.json",         "generation_config.json"};
    qlora_result r = QLORA_OK;
    for (size_t i = 0; r == QLORA_OK && i < QLORA__TEXT_COUNT(names); i++) {
        qlora_text_bytes file;
        bool found = false;
        memset(&file, 0, sizeof(file));
        r = qlora__text_folder_read(env, folder->path, names[i], &file, &found);
        if (r == QLORA_OK && found) {
            r = qlora__text_folder_file(env, folder, (int)i, names[i], &file);
        }
        qlora__text_bytes_free(env, &file);
    }
    for (int32_t i = 0; i < folder->stops.count; i++) {
        qlora__text_chat_add_stop(folder->chat, folder->stops.id[i]);
    }
    return r;
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
    qlora__text_folder folder;
    memset(&folder, 0, sizeof(folder));
    folder.chat = chat;
    folder.path = desc->folder;
    folder.wanted = desc->name == NULL && desc->template_file == NULL;
    if (desc->template_file != NULL) {
        QLORA__TRY(qlora__text_chat_file(env, chat, desc->template_file));
    } else if (desc->name != NULL) {
        QLORA__TRY(qlora__text_chat_named(env, chat, desc->name));
    }
    if (desc->folder != NULL) {
        QLORA__TRY(qlora__text_folder_load(env, &folder));
    }
    if (chat->template_ == NULL) {
        QLORA__TRY(qlora__text_chat_guess(chat));
    }
    return qlora__text_chat_finish(env, chat);
}
