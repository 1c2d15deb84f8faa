// How each role is written. "\1" is the EOS token. The assistant's text is trained from `lead` to
// `end`. Without system_open, a system message becomes the start of the next user message.
typedef struct qlora__text_format {
    const char* name;
    const char* marker; // a model's template that contains it is in this format
    const char* system_open;
    const char* system_close;
    const char* user_open;
    const char* user_close;
    const char* assistant_open;
    const char* lead;
    const char* end;
    const char* tail;
    bool trim; // white space around the contents is removed
} qlora__text_format;

// The first marker that is found decides.
static const qlora__text_format qlora__text_formats[] = {
    {"chatml", "<|im_start|>", "<|im_start|>system\n", "<|im_end|>\n", "<|im_start|>user\n",
     "<|im_end|>\n", "<|im_start|>assistant\n", "", "<|im_end|>", "\n", false},
    {"llama3", "<|start_header_id|>", "<|start_header_id|>system<|end_header_id|>\n\n",
     "<|eot_id|>", "<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>",
     "<|start_header_id|>assistant<|end_header_id|>\n\n", "", "<|eot_id|>", "", true},
    {"mistral", "[INST]", NULL, NULL, "[INST] ", " [/INST]", "", " ", "\1", "", false},
    {"gemma", "<start_of_turn>", NULL, NULL, "<start_of_turn>user\n", "<end_of_turn>\n",
     "<start_of_turn>model\n", "", "<end_of_turn>", "\n", true},
    {"phi3", "<|end|>", "<|system|>\n", "<|end|>\n", "<|user|>\n", "<|end|>\n", "<|assistant|>\n",
     "", "<|end|>", "\n", false},
    {"zephyr", "<|user|>", "<|system|>\n", "\1\n", "<|user|>\n", "\1\n", "<|assistant|>\n", "",
     "\1", "\n", false},
    {"alpaca", "### Instruction:", "", "\n\n", "### Instruction:\n", "\n\n", "### Response:\n", "",
     "\1", "\n\n", false},
    {"plain", NULL, "", "\n", "", "\n", "", "", "\1", "\n", false}};

enum { QLORA__TEXT_ALPACA = 6, QLORA__TEXT_MAX_STOPS = QLORA__MAX_STOP_IDS + 2 };

static const char qlora__text_alpaca_system[] =
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.";
static const char qlora__text_alpaca_system_input[] =
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.";
static const char qlora__text_think[] = "<think>\n\n</think>\n\n";

// A string that is freed with the chat.
typedef struct qlora__text_owned {
    char* data;
    size_t size; // one byte more is allocated
} qlora__text_owned;

struct qlora_text_chat {
    qlora_text* text;
    qlora_text_tok* tok;
    qlora__text_format format; // a row of the table, changed where the model's template differs
    const char* source;
    qlora__text_owned user_open; // from a template
    qlora__text_owned user_close;
    qlora__text_owned default_system;
    qlora__text_owned date;
    bool dated; // the system message starts with two dates
    bool think; // an empty thought precedes the last answers
    int32_t bos;
    int32_t eos;
    int32_t stops[QLORA__TEXT_MAX_STOPS];
    size_t stop_count;
};

static void qlora__text_owned_free(qlora__env* env, qlora__text_owned* owned) {
    qlora__env_free(env, owned->data, owned->size + 1);
    memset(owned, 0, sizeof(*owned));
}

static qlora_result qlora__text_owned_set(qlora__env* env, qlora__text_owned* owned,
                                          const char* data, size_t size) {
    return qlora__text_copy(env, data, size, &owned->data, &owned->size);
}

static void qlora__text_chat_free(qlora__env* env, qlora_text_chat* chat) {
    qlora__text_owned_free(env, &chat->user_open);
    qlora__text_owned_free(env, &chat->user_close);
    qlora__text_owned_free(env, &chat->default_system);
    qlora__text_owned_free(env, &chat->date);
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

// ---- the model's template: searched, not executed

static const char* qlora__text_find(const char* text, size_t size, const char* what) {
    size_t length = strlen(what);
    while (size >= length) {
        const char* hit = (const char*)memchr(text, what[0], size - length + 1);
        if (hit == NULL) {
            return NULL;
        }
        if (memcmp(hit, what, length) == 0) {
            return hit;
        }
        size -= (size_t)(hit + 1 - text);
        text = hit + 1;
    }
    return NULL;
}

static qlora_result qlora__text_unescape(qlora__env* env, const char* text, size_t size,
                                         qlora_text_bytes* out) {
    for (size_t i = 0; i < size; i++) {
        char c = text[i];
        if (c == '\\' && i + 1 < size) {
            i++;
            c = text[i] == 'n' ? '\n' : text[i] == 't' ? '\t' : text[i];
        }
        QLORA__TRY(qlora__text_bytes_add(env, out, &c, 1));
    }
    return QLORA_OK;
}

static qlora_result qlora__text_owned_unescape(qlora__env* env, qlora__text_owned* owned,
                                               const char* text, size_t size) {
    qlora_text_bytes work;
    memset(&work, 0, sizeof(work));
    qlora_result r = qlora__text_unescape(env, text, size, &work);
    r = r == QLORA_OK ? qlora__text_owned_set(env, owned, work.data, work.count) : r;
    qlora__text_bytes_free(env, &work);
    return r;
}

// ChatML: a system message that is spelt out in the template is the model's default.
static qlora_result qlora__text_chat_find_system(qlora__env* env, qlora_text_chat* chat,
                                                 const char* text, size_t size) {
    static const char open[] = "<|im_start|>system";
    const char* end = text + size;
    const char* at = text;
    while ((at = qlora__text_find(at, (size_t)(end - at), open)) != NULL) {
        at += sizeof(open) - 1;
        size_t newline = end - at >= 2 && memcmp(at, "\\n", 2) == 0 ? 2
                         : end - at >= 1 && *at == '\n'             ? 1
                                                                    : 0;
        const char* close = qlora__text_find(at, (size_t)(end - at), "<|im_end|>");
        if (newline == 0 || close == NULL) {
            continue;
        }
        const char* start = at + newline;
        bool literal = close > start;
        for (const char* p = start; p < close; p++) {
            literal = literal && *p != '{' && *p != '}' && *p != '"' && *p != '\'';
        }
        if (literal) {
            return qlora__text_owned_unescape(env, &chat->default_system, start,
                                              (size_t)(close - start));
        }
    }
    return QLORA_OK;
}

// The quoted string of the template that contains `what`.
static qlora_result qlora__text_find_literal(qlora__env* env, const char* text, size_t size,
                                             const char* what, qlora__text_owned* out) {
    const char* hit = qlora__text_find(text, size, what);
    const char* start = hit;
    while (start > text && start[-1] != '\'' && start[-1] != '"' && start[-1] != '\n') {
        start--;
    }
    if (start == text || start[-1] == '\n') {
        return QLORA_OK;
    }
    const char* stop = hit;
    while (stop < text + size && *stop != start[-1] && *stop != '\n') {
        stop++;
    }
    bool closed = stop < text + size && *stop == start[-1];
    return closed ? qlora__text_owned_unescape(env, out, start, (size_t)(stop - start)) : QLORA_OK;
}

// Mistral's versions differ in the spaces around [INST].
static qlora_result qlora__text_chat_find_spaces(qlora__env* env, qlora_text_chat* chat,
                                                 const char* text, size_t size) {
    static const char* const leads[] = {"' ' + message", "\" \" + message", "' ' + content",
                                        "\" \" + content"};
    if (qlora__text_find(text, size, "[/INST]") != NULL) {
        QLORA__TRY(qlora__text_find_literal(env, text, size, "[INST]", &chat->user_open));
        QLORA__TRY(qlora__text_find_literal(env, text, size, "[/INST]", &chat->user_close));
    }
    chat->format.lead = "";
    for (size_t i = 0; i < QLORA__TEXT_COUNT(leads); i++) {
        if (qlora__text_find(text, size, leads[i]) != NULL) {
            chat->format.lead = " ";
        }
    }
    if (chat->user_open.data != NULL && chat->user_close.data != NULL) {
        chat->format.user_open = chat->user_open.data;
        chat->format.user_close = chat->user_close.data;
    }
    return QLORA_OK;
}

static qlora_result qlora__text_chat_recognise(qlora__env* env, qlora_text_chat* chat,
                                               const char* text, size_t size) {
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__text_formats); i++) {
        const char* marker = qlora__text_formats[i].marker;
        if (marker == NULL || qlora__text_find(text, size, marker) == NULL) {
            continue;
        }
        chat->format = qlora__text_formats[i];
        if (strcmp(chat->format.name, "chatml") == 0) {
            chat->think = qlora__text_find(text, size, "reasoning_content") != NULL &&
                          qlora__text_find(text, size, "enable_thinking") != NULL;
            return qlora__text_chat_find_system(env, chat, text, size);
        }
        if (strcmp(chat->format.name, "llama3") == 0) {
            chat->dated =
                qlora__text_find(text, size, "Cutting Knowledge Date: December 2023") != NULL;
            return QLORA_OK;
        }
        return strcmp(chat->format.name, "mistral") == 0
                   ? qlora__text_chat_find_spaces(env, chat, text, size)
                   : QLORA_OK;
    }
    return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                           "the model's chat_template is not recognised; choose a format "
                           "(chatml, llama3, mistral, alpaca, plain, ...)");
}

// ---- the model's folder

// A token given as "x" or {"content": "x"}: its id, or -1.
static int32_t qlora__text_config_token(const qlora_text_tok* tok, const qlora__json* json,
                                        const char* name) {
    const qlora__json_token* value = qlora__text_json_get(json, json->tokens, name);
    if (value != NULL && value->kind == QLORA__JSON_OBJECT) {
        value = qlora__text_json_get(json, value, "content");
    }
    const char* token = qlora__text_json_cstring(json, value);
    return token != NULL ? qlora__text_tok_find(tok, token) : -1;
}

// chat_template: a string, or [{"name", "template"}]: the one named default, or the first.
static const qlora__json_token* qlora__text_config_template(const qlora__json* json) {
    const qlora__json_token* value = qlora__text_json_get(json, json->tokens, "chat_template");
    const qlora__json_token* found = value;
    if (value != NULL && value->kind == QLORA__JSON_ARRAY) {
        const qlora__json_token* item = value + 1;
        found = NULL;
        for (uint32_t i = 0; i < value->count; i++) {
            const qlora__json_token* name = qlora__text_json_get(json, item, "name");
            if (found == NULL || qlora__text_json_is(json, name, "default")) {
                found = qlora__text_json_get(json, item, "template");
            }
            item = qlora__text_json_next(json, item);
        }
    }
    return qlora__text_json_string(found) ? found : NULL;
}

// tokenizer_config.json: the EOS token, and the template unless it has a file of its own.
static qlora_result qlora__text_config_tokenizer(qlora__env* env, qlora_text_chat* chat,
                                                 const qlora__json* json, bool recognise) {
    int32_t eos = qlora__text_config_token(chat->tok, json, "eos_token");
    chat->eos = eos >= 0 ? eos : chat->eos;
    const qlora__json_token* found = qlora__text_config_template(json);
    if (found == NULL || chat->source != NULL || !recognise) {
        return QLORA_OK;
    }
    const char* text = qlora__text_json_text(json, found);
    size_t size = qlora__text_json_size(found);
    chat->source = "the chat_template in tokenizer_config.json";
    QLORA__TRY(qlora__text_chat_recognise(env, chat, text, size));
    if (chat->bos < 0 && qlora__text_find(text, size, "bos_token") != NULL) {
        chat->bos = qlora__text_config_token(chat->tok, json, "bos_token");
    }
    return QLORA_OK;
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
    bool recognise; // take the format from the template
    qlora__stop_ids stops;
} qlora__text_folder;

enum {
    QLORA__TEXT_FILE_TEMPLATE,
    QLORA__TEXT_FILE_TOKENIZER,
    QLORA__TEXT_FILE_CONFIG,
    QLORA__TEXT_FILE_GENERATION
};

static qlora_result qlora__text_folder_file(qlora__env* env, qlora__text_folder* folder, int which,
                                            const char* name, const qlora_text_bytes* file) {
    qlora_text_chat* chat = folder->chat;
    if (which == QLORA__TEXT_FILE_TEMPLATE) {
        if (!folder->recognise) {
            return QLORA_OK;
        }
        chat->source = "chat_template.jinja";
        return qlora__text_chat_recognise(env, chat, file->data, file->count);
    }
    qlora__json json;
    QLORA__TRY(qlora__text_json(env, name, file->data, file->count, &json));
    qlora_result r = which == QLORA__TEXT_FILE_TOKENIZER
                         ? qlora__text_config_tokenizer(env, chat, &json, folder->recognise)
                         : qlora__text_config_stops(env, &json, &folder->stops);
    qlora__json_free(env, &json);
    return r;
}

static qlora_result qlora__text_folder_load(qlora__env* env, qlora__text_folder* folder) {
    static const char* const names[] = {"chat_template.jinja", "tokenizer_config.json",
                                        "config.json", "generation_config.json"};
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

// Neither the caller nor the model names a format: the tokens of the tokenizer decide.
static void qlora__text_chat_guess(qlora_text_chat* chat) {
    chat->format = qlora__text_formats[QLORA__TEXT_ALPACA];
    chat->source = "the default";
    for (size_t i = 0; i < 2; i++) {
        if (qlora__text_tok_find(chat->tok, qlora__text_formats[i].end) >= 0 &&
            qlora__text_tok_find(chat->tok, qlora__text_formats[i].marker) >= 0) {
            chat->format = qlora__text_formats[i];
            chat->source = "the tokens of the tokenizer";
        }
    }
}

static void qlora__text_chat_finish(qlora_text_chat* chat) {
    static const char* const names[] = {"</s>",       "<|end_of_text|>", "<|endoftext|>",
                                        "<|im_end|>", "<eos>",           "<|eot_id|>"};
    if (chat->eos < 0 && chat->stop_count > 0) {
        chat->eos = chat->stops[0];
    }
    for (size_t i = 0; chat->eos < 0 && i < QLORA__TEXT_COUNT(names); i++) {
        chat->eos = qlora__text_tok_find(chat->tok, names[i]);
    }
    qlora__text_chat_add_stop(chat, chat->eos);
    if (chat->format.end[0] != 1) {
        qlora__text_chat_add_stop(chat, qlora__text_tok_find(chat->tok, chat->format.end));
    }
}

static qlora_result qlora__text_chat_named(qlora__env* env, qlora_text_chat* chat,
                                           const char* name) {
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__text_formats); i++) {
        if (strcmp(name, qlora__text_formats[i].name) == 0) {
            chat->format = qlora__text_formats[i];
            chat->source = "asked for";
            return QLORA_OK;
        }
    }
    return qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                           "unknown chat format \"%.60s\"; use chatml, llama3, mistral, gemma, "
                           "phi3, zephyr, alpaca or plain",
                           name);
}

static qlora_result qlora__text_chat_fill(qlora__env* env, qlora_text_chat* chat,
                                          const qlora_text_chat_desc* desc) {
    qlora__text_folder folder;
    memset(&folder, 0, sizeof(folder));
    folder.chat = chat;
    folder.path = desc->folder;
    folder.recognise = desc->name == NULL;
    if (desc->name != NULL) {
        QLORA__TRY(qlora__text_chat_named(env, chat, desc->name));
    }
    if (desc->folder != NULL) {
        QLORA__TRY(qlora__text_folder_load(env, &folder));
    }
    const char* date = desc->date != NULL ? desc->date : "26 Jul 2024"; // as in Llama's template
    QLORA__TRY(qlora__text_owned_set(env, &chat->date, date, strlen(date)));
    if (chat->source == NULL) {
        qlora__text_chat_guess(chat);
    }
    qlora__text_chat_finish(chat);
    return QLORA_OK;
}

qlora_result qlora_text_chat_open(qlora_text* text, const qlora_text_chat_desc* desc,
                                  qlora_text_chat** out) {
    if (text == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__env* env = &text->env;
    qlora__text_enter(text, "qlora_text_chat_open");
    QLORA__TEXT_NEED(env, desc);
    QLORA__TEXT_NEED(env, out);
    QLORA__TEXT_NEED(env, desc->tok);
    if (desc->reserved_must_be_zero0 != 0 || desc->reserved_must_be_zero1 != 0) {
        return qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                               "desc was not zeroed: a reserved field is set");
    }
    if (desc->tok->text != text) {
        return qlora__env_fail(env, QLORA_ERR_ARGUMENT, "desc->tok belongs to another text object");
    }
    qlora_text_chat* chat = (qlora_text_chat*)qlora__text_zalloc(env, 1, sizeof(qlora_text_chat));
    if (chat == NULL) {
        return QLORA_ERR_MEMORY;
    }
    chat->text = text;
    chat->tok = desc->tok;
    chat->eos = -1;
    chat->bos = qlora__text_tok_bos(desc->tok);
    qlora_result r = qlora__text_chat_fill(env, chat, desc);
    if (r != QLORA_OK) {
        qlora__text_chat_free(env, chat);
        return r;
    }
    QLORA__TEXT_LOG(env, INFO, "chat format %s (%s)", chat->format.name, chat->source);
    text->chats++;
    chat->tok->users++;
    *out = chat;
    return QLORA_OK;
}

qlora_result qlora_text_chat_close(qlora_text_chat* chat) {
    if (chat != NULL) {
        qlora_text* text = chat->text;
        qlora__text_enter(text, "qlora_text_chat_close");
        chat->tok->users--;
        text->chats--;
        qlora__text_chat_free(&text->env, chat);
    }
    return QLORA_OK;
}

const char* qlora_text_chat_names(size_t index) {
    return index < QLORA__TEXT_COUNT(qlora__text_formats) ? qlora__text_formats[index].name : NULL;
}

qlora_result qlora_text_chat_query(qlora_text_chat* chat, qlora_text_chat_info* out) {
    if (chat == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__text_enter(chat->text, "qlora_text_chat_query");
    QLORA__TEXT_NEED(&chat->text->env, out);
    out->name = chat->format.name;
    out->source = chat->source;
    out->eos = chat->eos;
    out->stops = chat->stops;
    out->stop_count = chat->stop_count;
    return QLORA_OK;
}

qlora_result qlora_text_chat_set_date(qlora_text_chat* chat, const char* date) {
    if (chat == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__text_enter(chat->text, "qlora_text_chat_set_date");
    QLORA__TEXT_NEED(&chat->text->env, date);
    return qlora__text_owned_set(&chat->text->env, &chat->date, date, strlen(date));
}

// ---- from messages to ids

// Text of the same kind (trained or not) is collected and encoded at once.
typedef struct qlora__text_render {
    qlora_text_chat* chat;
    qlora_text_tok* tok;
    qlora_text_ids* ids;
    qlora_text_ids* labels;
    size_t start; // where this sample starts in ids
    qlora_text_bytes text;
    bool trained;
} qlora__text_render;

static qlora_result qlora__text_render_label(qlora__env* env, qlora__text_render* r, size_t from,
                                             bool trained) {
    for (size_t i = from; r->labels != NULL && i < r->ids->count; i++) {
        QLORA__TRY(qlora__text_ids_add(env, r->labels, trained ? r->ids->data[i] : -100));
    }
    return QLORA_OK;
}

static qlora_result qlora__text_render_flush(qlora__env* env, qlora__text_render* r) {
    size_t from = r->ids->count;
    if (r->text.count == 0) {
        return QLORA_OK;
    }
    // Text that follows plain text continues it: no space is prepended.
    bool fresh =
        from == r->start || qlora__text_tok_has(r->tok, r->ids->data[from - 1],
                                                QLORA__TEXT_K_ADDED | QLORA__TEXT_K_SPECIAL);
    QLORA__TRY(qlora__text_encode(env, r->tok, r->text.data, r->text.count,
                                  fresh ? 0u : (uint32_t)QLORA_TEXT_CONTINUE, r->ids));
    r->text.count = 0;
    return qlora__text_render_label(env, r, from, r->trained);
}

static qlora_result qlora__text_render_text(qlora__env* env, qlora__text_render* r,
                                            const char* text, size_t size, bool trained) {
    if (size == 0) {
        return QLORA_OK;
    }
    if (r->trained != trained) {
        QLORA__TRY(qlora__text_render_flush(env, r));
        r->trained = trained;
    }
    return qlora__text_bytes_add(env, &r->text, text, size);
}

static qlora_result qlora__text_render_id(qlora__env* env, qlora__text_render* r, int32_t id,
                                          bool trained) {
    QLORA__TRY(qlora__text_render_flush(env, r));
    if (id < 0) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__text_ids_add(env, r->ids, id));
    return qlora__text_render_label(env, r, r->ids->count - 1, trained);
}

// A string of the format; "\1" is the EOS token.
static qlora_result qlora__text_render_put(qlora__env* env, qlora__text_render* r, const char* text,
                                           bool trained) {
    while (*text != 0) {
        size_t length = strcspn(text, "\1");
        QLORA__TRY(qlora__text_render_text(env, r, text, length, trained));
        text += length;
        if (*text != 0) {
            QLORA__TRY(qlora__text_render_id(env, r, r->chat->eos, trained));
            text++;
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__text_render_content(qlora__env* env, qlora__text_render* r,
                                               const qlora_text_message* message, bool trained) {
    size_t begin = 0;
    size_t end = message->length;
    if (r->chat->format.trim && end > 0) {
        qlora__text_view view = qlora__text_view_of(r->tok, message->content, end);
        begin = qlora__text_run(&view, 0, QLORA__TEXT_WS);
        end = qlora__text_space_before(r->tok, message->content, begin, end);
    }
    return end <= begin
               ? QLORA_OK
               : qlora__text_render_text(env, r, message->content + begin, end - begin, trained);
}

static bool qlora__text_role_is(const qlora_text_message* message, const char* role) {
    return strcmp(message->role, role) == 0;
}

static qlora_result qlora__text_render_system(qlora__env* env, qlora__text_render* r,
                                              const qlora_text_message* message) {
    const qlora__text_format* format = &r->chat->format;
    if (format->system_open == NULL) {
        return QLORA_OK; // it goes with the next user message
    }
    QLORA__TRY(qlora__text_render_put(env, r, format->system_open, false));
    if (message != NULL) {
        QLORA__TRY(qlora__text_render_content(env, r, message, false));
    }
    return qlora__text_render_put(env, r, format->system_close, false);
}

// What precedes the first message: BOS, and the system message that the model gets by default.
static qlora_result qlora__text_render_start(qlora__env* env, qlora__text_render* r,
                                             const qlora_text_message* first) {
    const qlora_text_chat* chat = r->chat;
    QLORA__TRY(qlora__text_render_id(env, r, chat->bos, false));
    bool given = first != NULL && qlora__text_role_is(first, "system");
    if (chat->dated) {
        QLORA__TRY(qlora__text_render_put(env, r, chat->format.system_open, false));
        QLORA__TRY(qlora__text_render_put(
            env, r, "Cutting Knowledge Date: December 2023\nToday Date: ", false));
        QLORA__TRY(qlora__text_render_put(env, r, chat->date.data, false));
        QLORA__TRY(qlora__text_render_put(env, r, "\n\n", false));
        if (given) {
            QLORA__TRY(qlora__text_render_content(env, r, first, false));
        }
        return qlora__text_render_put(env, r, chat->format.system_close, false);
    }
    const char* system = chat->default_system.data;
    if (strcmp(chat->format.name, "alpaca") == 0) {
        system = qlora__text_alpaca_system;
    }
    if (given || system == NULL) {
        return given ? qlora__text_render_system(env, r, first) : QLORA_OK;
    }
    qlora_text_message message;
    memset(&message, 0, sizeof(message));
    message.content = system;
    message.length = strlen(system);
    return qlora__text_render_system(env, r, &message);
}

static qlora_result qlora__text_render_user(qlora__env* env, qlora__text_render* r,
                                            const qlora_text_message* message,
                                            const qlora_text_message* system) {
    const qlora__text_format* format = &r->chat->format;
    QLORA__TRY(qlora__text_render_put(env, r, format->user_open, false));
    if (system != NULL && format->system_open == NULL && system->length > 0) {
        QLORA__TRY(qlora__text_render_content(env, r, system, false));
        QLORA__TRY(qlora__text_render_put(env, r, "\n\n", false));
    }
    QLORA__TRY(qlora__text_render_content(env, r, message, false));
    return qlora__text_render_put(env, r, format->user_close, false);
}

static qlora_result qlora__text_render_assistant(qlora__env* env, qlora__text_render* r,
                                                 const qlora_text_message* message, bool last) {
    const qlora__text_format* format = &r->chat->format;
    bool trained = message != NULL && !message->masked;
    QLORA__TRY(qlora__text_render_put(env, r, format->assistant_open, false));
    bool thought = message != NULL && message->length > 0 &&
                   qlora__text_find(message->content, message->length, "</think>") != NULL;
    if (r->chat->think && last && !thought) {
        QLORA__TRY(qlora__text_render_put(env, r, qlora__text_think, false));
    }
    if (message == NULL) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__text_render_put(env, r, format->lead, trained));
    QLORA__TRY(qlora__text_render_content(env, r, message, trained));
    QLORA__TRY(qlora__text_render_put(env, r, format->end, trained));
    if (format->end[0] != 1 && qlora__text_tok_find(r->tok, format->end) < 0) {
        QLORA__TRY(qlora__text_render_id(env, r, r->chat->eos, trained));
    }
    return QLORA_OK;
}

static qlora_result qlora__text_render_all(qlora__env* env, qlora__text_render* r,
                                           const qlora_text_message* messages, size_t count,
                                           bool prompt) {
    size_t last_user = 0;
    const qlora_text_message* system = NULL;
    for (size_t i = 0; i < count; i++) {
        last_user = qlora__text_role_is(&messages[i], "user") ? i : last_user;
    }
    QLORA__TRY(qlora__text_render_start(env, r, count > 0 ? &messages[0] : NULL));
    for (size_t i = 0; i < count; i++) {
        const qlora_text_message* message = &messages[i];
        if (qlora__text_role_is(message, "system")) {
            system = message;
            if (i > 0) {
                QLORA__TRY(qlora__text_render_system(env, r, message));
            }
        } else if (qlora__text_role_is(message, "user")) {
            QLORA__TRY(qlora__text_render_user(env, r, message, system));
            system = NULL;
        } else if (qlora__text_role_is(message, "assistant")) {
            QLORA__TRY(qlora__text_render_assistant(env, r, message, i > last_user));
            if (i + 1 < count || prompt) { // no untrained text at the very end
                QLORA__TRY(qlora__text_render_put(env, r, r->chat->format.tail, false));
            }
        } else {
            return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                   "the role \"%.60s\" is not supported; use system, user or "
                                   "assistant",
                                   message->role);
        }
    }
    if (prompt) {
        QLORA__TRY(qlora__text_render_assistant(env, r, NULL, true));
    }
    return qlora__text_render_flush(env, r);
}

static qlora_result qlora__text_chat_encode(qlora__env* env, qlora_text_chat* chat,
                                            const qlora_text_message* messages, size_t count,
                                            bool prompt, qlora_text_ids* ids,
                                            qlora_text_ids* labels) {
    qlora__text_render render;
    memset(&render, 0, sizeof(render));
    render.chat = chat;
    render.tok = chat->tok;
    render.ids = ids;
    render.labels = labels;
    render.start = ids->count;
    qlora_result r = qlora__text_render_all(env, &render, messages, count, prompt);
    qlora__text_bytes_free(env, &render.text);
    return r;
}

qlora_result qlora_text_chat_encode(qlora_text_chat* chat, const qlora_text_message* messages,
                                    size_t count, bool prompt, qlora_text_ids* ids,
                                    qlora_text_ids* labels) {
    if (chat == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__env* env = &chat->text->env;
    qlora__text_enter(chat->text, "qlora_text_chat_encode");
    QLORA__TEXT_NEED(env, ids);
    for (size_t i = 0; i < count; i++) {
        if (messages == NULL || messages[i].role == NULL ||
            (messages[i].content == NULL && messages[i].length > 0)) {
            return qlora__env_fail(env, QLORA_ERR_ARGUMENT, "message %lu: %s is NULL",
                                   (unsigned long)i,
                                   messages == NULL           ? "messages"
                                   : messages[i].role == NULL ? "role"
                                                              : "content");
        }
    }
    size_t before = ids->count;
    size_t labels_before = labels != NULL ? labels->count : 0;
    qlora_result r = qlora__text_chat_encode(env, chat, messages, count, prompt, ids, labels);
    if (r != QLORA_OK) {
        ids->count = before;
        if (labels != NULL) {
            labels->count = labels_before;
        }
    }
    return r;
}
