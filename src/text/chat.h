// How each role is written. "\1" stands for the EOS token. The assistant's text is trained from
// `lead` to `end`. Without system_open a system message goes in front of the next user message.
typedef struct text__format {
    const char* name;
    const char* marker; // in the model's template: it is this format
    const char* system_open;
    const char* system_close;
    const char* user_open;
    const char* user_close;
    const char* assistant_open;
    const char* lead;
    const char* end;
    const char* tail;
    bool trim; // white space around the contents goes away
} text__format;

// The first marker that is found decides.
static const text__format text__formats[] = {
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

enum { TEXT__ALPACA = 6, TEXT__MAX_STOPS = 16 };

static const char text__alpaca_system[] =
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.";
static const char text__alpaca_system_input[] =
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.";
static const char text__think[] = "<think>\n\n</think>\n\n";

struct text_chat {
    text__format format; // a row of the table, changed where the model's template differs
    const char* source;
    char* owned[2]; // user_open and user_close from a template
    char* default_system;
    char* date;
    bool dated; // the system message starts with two dates
    bool think; // an empty thought stands before the last answers
    int32_t bos;
    int32_t eos;
    int32_t stops[TEXT__MAX_STOPS];
    size_t stop_count;
};

void text_chat_close(text_chat* chat) {
    if (chat != NULL) {
        TEXT_FREE(chat->owned[0]);
        TEXT_FREE(chat->owned[1]);
        TEXT_FREE(chat->default_system);
        TEXT_FREE(chat->date);
        TEXT_FREE(chat);
    }
}

const char* text_chat_name(const text_chat* chat) {
    return chat->format.name;
}

const char* text_chat_source(const text_chat* chat) {
    return chat->source;
}

const char* text_chat_names(size_t index) {
    return index < TEXT__COUNT(text__formats) ? text__formats[index].name : NULL;
}

int32_t text_chat_eos(const text_chat* chat) {
    return chat->eos;
}

bool text_chat_stops(const text_chat* chat, int32_t id) {
    for (size_t i = 0; i < chat->stop_count; i++) {
        if (chat->stops[i] == id) {
            return true;
        }
    }
    return false;
}

bool text_chat_set_date(text_chat* chat, const char* date, text_error* error) {
    size_t size;
    return text__copy(date, strlen(date), &chat->date, &size, error);
}

static void text__chat_add_stop(text_chat* chat, const text_tok* tok, int64_t id) {
    if (id >= 0 && id < (int64_t)tok->count && chat->stop_count < TEXT__MAX_STOPS &&
        !text_chat_stops(chat, (int32_t)id)) {
        chat->stops[chat->stop_count++] = (int32_t)id;
    }
}

// ---- the model's template, only looked at, never run

static const char* text__find(const char* text, size_t size, const char* what) {
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

static bool text__unescape(const char* text, size_t size, text_bytes* out, text_error* error) {
    for (size_t i = 0; i < size; i++) {
        char c = text[i];
        if (c == '\\' && i + 1 < size) {
            i++;
            c = text[i] == 'n' ? '\n' : text[i] == 't' ? '\t' : text[i];
        }
        TEXT__TRY(text_bytes_add(out, &c, 1, error));
    }
    return true;
}

static bool text__copy_unescaped(const char* text, size_t size, char** out, text_error* error) {
    text_bytes work;
    memset(&work, 0, sizeof(work));
    size_t length;
    bool good = text__unescape(text, size, &work, error) &&
                text__copy(work.data, work.count, out, &length, error);
    text_bytes_free(&work);
    return good;
}

// ChatML: a system message that is written out in the template is what the model gets by default.
static bool text__chat_find_system(text_chat* chat, const char* text, size_t size,
                                   text_error* error) {
    static const char open[] = "<|im_start|>system";
    const char* end = text + size;
    const char* at = text;
    while ((at = text__find(at, (size_t)(end - at), open)) != NULL) {
        at += sizeof(open) - 1;
        size_t newline = end - at >= 2 && memcmp(at, "\\n", 2) == 0 ? 2
                         : end - at >= 1 && *at == '\n'             ? 1
                                                                    : 0;
        const char* close = text__find(at, (size_t)(end - at), "<|im_end|>");
        if (newline == 0 || close == NULL) {
            continue;
        }
        const char* start = at + newline;
        bool literal = close > start;
        for (const char* p = start; p < close; p++) {
            literal = literal && *p != '{' && *p != '}' && *p != '"' && *p != '\'';
        }
        if (literal) {
            return text__copy_unescaped(start, (size_t)(close - start), &chat->default_system,
                                        error);
        }
    }
    return true;
}

// The quoted string of the template that holds `what`.
static bool text__find_literal(const char* text, size_t size, const char* what, char** out,
                               text_error* error) {
    const char* hit = text__find(text, size, what);
    const char* start = hit;
    while (start > text && start[-1] != '\'' && start[-1] != '"' && start[-1] != '\n') {
        start--;
    }
    if (start == text || start[-1] == '\n') {
        return true;
    }
    const char* stop = hit;
    while (stop < text + size && *stop != start[-1] && *stop != '\n') {
        stop++;
    }
    bool good = stop < text + size && *stop == start[-1];
    return !good || text__copy_unescaped(start, (size_t)(stop - start), out, error);
}

// Mistral's versions differ in the spaces around [INST].
static bool text__chat_find_spaces(text_chat* chat, const char* text, size_t size,
                                   text_error* error) {
    static const char* const leads[] = {"' ' + message", "\" \" + message", "' ' + content",
                                        "\" \" + content"};
    if (text__find(text, size, "[/INST]") != NULL) {
        TEXT__TRY(text__find_literal(text, size, "[INST]", &chat->owned[0], error));
        TEXT__TRY(text__find_literal(text, size, "[/INST]", &chat->owned[1], error));
    }
    chat->format.lead = "";
    for (size_t i = 0; i < TEXT__COUNT(leads); i++) {
        if (text__find(text, size, leads[i]) != NULL) {
            chat->format.lead = " ";
        }
    }
    if (chat->owned[0] != NULL && chat->owned[1] != NULL) {
        chat->format.user_open = chat->owned[0];
        chat->format.user_close = chat->owned[1];
    }
    return true;
}

static bool text__chat_recognise(text_chat* chat, const char* text, size_t size,
                                 text_error* error) {
    for (size_t i = 0; i < TEXT__COUNT(text__formats); i++) {
        const char* marker = text__formats[i].marker;
        if (marker == NULL || text__find(text, size, marker) == NULL) {
            continue;
        }
        chat->format = text__formats[i];
        if (strcmp(chat->format.name, "chatml") == 0) {
            chat->think = text__find(text, size, "reasoning_content") != NULL &&
                          text__find(text, size, "enable_thinking") != NULL;
            return text__chat_find_system(chat, text, size, error);
        }
        if (strcmp(chat->format.name, "llama3") == 0) {
            chat->dated = text__find(text, size, "Cutting Knowledge Date: December 2023") != NULL;
            return true;
        }
        return strcmp(chat->format.name, "mistral") != 0 ||
               text__chat_find_spaces(chat, text, size, error);
    }
    return text__fail(error,
                      "the model's chat_template is not a format known here; choose one with "
                      "--template (chatml, llama3, mistral, alpaca, plain, ...)");
}

// ---- the model's folder

// A token given as "x" or {"content": "x"}: its id, or -1.
static int32_t text__config_token(const text_tok* tok, const text__json* json, const char* name) {
    const text__node* node = text__json_get(json, json->nodes, name);
    if (node != NULL && node->type == TEXT__J_OBJECT) {
        node = text__json_get(json, node, "content");
    }
    const char* token = text__json_cstring(json, node);
    return token != NULL ? text_tok_find(tok, token) : -1;
}

// chat_template: a string, or [{"name", "template"}]: the one named default, or the first.
static const text__node* text__config_template(const text__json* json) {
    const text__node* node = text__json_get(json, json->nodes, "chat_template");
    const text__node* found = node;
    if (node != NULL && node->type == TEXT__J_ARRAY) {
        const text__node* item = node + 1;
        found = NULL;
        for (uint32_t i = 0; i < node->size; i++) {
            if (found == NULL ||
                text__json_is(json, text__json_get(json, item, "name"), "default")) {
                found = text__json_get(json, item, "template");
            }
            item = text__json_next(json, item);
        }
    }
    return found != NULL && found->type == TEXT__J_STRING ? found : NULL;
}

// eos_token_id of generation_config.json and config.json: a number or a list.
static void text__config_stops(text_chat* chat, const text_tok* tok, const text__json* json) {
    const text__node* node = text__json_get(json, json->nodes, "eos_token_id");
    uint32_t count = 1;
    if (node != NULL && node->type == TEXT__J_ARRAY) {
        count = node->size;
        node++;
    }
    for (uint32_t i = 0; node != NULL && i < count; i++) {
        if (node->type == TEXT__J_INTEGER) {
            text__chat_add_stop(chat, tok, node->integer);
        }
        node = text__json_next(json, node);
    }
}

typedef struct text__folder {
    text_chat* chat;
    const text_tok* tok;
    const char* path;
    bool recognise; // take the format from the template
} text__folder;

static bool text__folder_config(const text__folder* folder, const char* name, const char* source,
                                size_t size, text_error* error) {
    text_chat* chat = folder->chat;
    text__json json;
    bool good = text__json_open(&json, name, source, size, error);
    if (good) {
        text__config_stops(chat, folder->tok, &json);
        int32_t eos = text__config_token(folder->tok, &json, "eos_token");
        chat->eos = eos >= 0 ? eos : chat->eos;
        const text__node* node = text__config_template(&json);
        if (node != NULL && chat->source == NULL && folder->recognise) {
            const char* text = text__json_text(&json, node);
            chat->source = "the chat_template in tokenizer_config.json";
            good = text__chat_recognise(chat, text, node->size, error);
            if (chat->bos < 0 && text__find(text, node->size, "bos_token") != NULL) {
                chat->bos = text__config_token(folder->tok, &json, "bos_token");
            }
        }
    }
    text__json_free(&json);
    return good;
}

static bool text__folder_load(const text__folder* folder, text_error* error) {
    static const char* const names[] = {"chat_template.jinja", "tokenizer_config.json",
                                        "generation_config.json", "config.json"};
    bool good = true;
    for (size_t i = 0; good && i < TEXT__COUNT(names); i++) {
        text_bytes file;
        memset(&file, 0, sizeof(file));
        bool found;
        good = text__folder_read(folder->path, names[i], &file, &found, error);
        if (good && found && i > 0) {
            good = text__folder_config(folder, names[i], file.data, file.count, error);
        } else if (good && found && folder->recognise) {
            folder->chat->source = "chat_template.jinja";
            good = text__chat_recognise(folder->chat, file.data, file.count, error);
        }
        text_bytes_free(&file);
    }
    return good;
}

// Nobody said: the tokens that the tokenizer has decide.
static void text__chat_guess(text_chat* chat, const text_tok* tok) {
    chat->format = text__formats[TEXT__ALPACA];
    chat->source = "the default";
    for (size_t i = 0; i < 2; i++) {
        if (text_tok_find(tok, text__formats[i].end) >= 0 &&
            text_tok_find(tok, text__formats[i].marker) >= 0) {
            chat->format = text__formats[i];
            chat->source = "the tokens of the tokenizer";
        }
    }
}

static void text__chat_finish(text_chat* chat, const text_tok* tok) {
    static const char* const names[] = {"</s>",       "<|end_of_text|>", "<|endoftext|>",
                                        "<|im_end|>", "<eos>",           "<|eot_id|>"};
    if (chat->eos < 0 && chat->stop_count > 0) {
        chat->eos = chat->stops[0];
    }
    for (size_t i = 0; chat->eos < 0 && i < TEXT__COUNT(names); i++) {
        chat->eos = text_tok_find(tok, names[i]);
    }
    text__chat_add_stop(chat, tok, chat->eos);
    if (chat->format.end[0] != 1) {
        text__chat_add_stop(chat, tok, text_tok_find(tok, chat->format.end));
    }
}

static bool text__chat_named(text_chat* chat, const char* name, text_error* error) {
    for (size_t i = 0; i < TEXT__COUNT(text__formats); i++) {
        if (strcmp(name, text__formats[i].name) == 0) {
            chat->format = text__formats[i];
            chat->source = "asked for";
            return true;
        }
    }
    return text__fail(error,
                      "unknown chat format \"%.60s\"; there are chatml, llama3, mistral, "
                      "gemma, phi3, zephyr, alpaca, plain",
                      name);
}

bool text_chat_open(const text_tok* tok, const char* folder, const char* name, text_chat** out,
                    text_error* error) {
    *out = NULL;
    text_chat* chat = (text_chat*)text__zalloc(1, sizeof(text_chat), error);
    TEXT__TRY(chat != NULL);
    chat->eos = -1;
    chat->bos = text_tok_bos(tok);
    text__folder from;
    from.chat = chat;
    from.tok = tok;
    from.path = folder;
    from.recognise = name == NULL;
    bool good = (name == NULL || text__chat_named(chat, name, error)) &&
                (folder == NULL || text__folder_load(&from, error)) &&
                text_chat_set_date(chat, "26 Jul 2024", error);
    if (!good) {
        text_chat_close(chat);
        return false;
    }
    if (chat->source == NULL) {
        text__chat_guess(chat, tok);
    }
    text__chat_finish(chat, tok);
    *out = chat;
    return true;
}

// ---- from messages to ids

// Text of the same kind (trained or not) is gathered and encoded in one go.
typedef struct text__render {
    const text_chat* chat;
    text_tok* tok;
    text_ids* ids;
    text_ids* labels;
    size_t start; // where this sample starts in ids
    text_bytes text;
    bool trained;
} text__render;

static bool text__render_label(text__render* r, size_t from, bool trained, text_error* error) {
    for (size_t i = from; r->labels != NULL && i < r->ids->count; i++) {
        TEXT__TRY(text_ids_add(r->labels, trained ? r->ids->data[i] : -100, error));
    }
    return true;
}

static bool text__render_flush(text__render* r, text_error* error) {
    size_t from = r->ids->count;
    if (r->text.count == 0) {
        return true;
    }
    // Text after plain text goes on in the same line: no space is put in front of it.
    bool fresh = from == r->start || text_tok_is_added(r->tok, r->ids->data[from - 1]) ||
                 text_tok_is_special(r->tok, r->ids->data[from - 1]);
    TEXT__TRY(text_encode(r->tok, r->text.data, r->text.count, fresh ? 0u : (unsigned)TEXT_CONTINUE,
                          r->ids, error));
    r->text.count = 0;
    return text__render_label(r, from, r->trained, error);
}

static bool text__render_text(text__render* r, const char* text, size_t size, bool trained,
                              text_error* error) {
    if (size == 0) {
        return true;
    }
    if (r->trained != trained) {
        TEXT__TRY(text__render_flush(r, error));
        r->trained = trained;
    }
    return text_bytes_add(&r->text, text, size, error);
}

static bool text__render_id(text__render* r, int32_t id, bool trained, text_error* error) {
    TEXT__TRY(text__render_flush(r, error));
    if (id < 0) {
        return true;
    }
    TEXT__TRY(text_ids_add(r->ids, id, error));
    return text__render_label(r, r->ids->count - 1, trained, error);
}

// A string of the format; "\1" is the EOS token.
static bool text__render_put(text__render* r, const char* text, bool trained, text_error* error) {
    while (*text != 0) {
        size_t length = strcspn(text, "\1");
        TEXT__TRY(text__render_text(r, text, length, trained, error));
        text += length;
        if (*text != 0) {
            TEXT__TRY(text__render_id(r, r->chat->eos, trained, error));
            text++;
        }
    }
    return true;
}

static bool text__render_content(text__render* r, const text_message* message, bool trained,
                                 text_error* error) {
    size_t begin = 0;
    size_t end = message->length;
    if (r->chat->format.trim && end > 0) {
        text__view view = text__view_of(r->tok, message->content, end);
        begin = text__run(&view, 0, TEXT__WS);
        end = text__space_before(r->tok, message->content, begin, end);
    }
    return end <= begin ||
           text__render_text(r, message->content + begin, end - begin, trained, error);
}

static bool text__role_is(const text_message* message, const char* role) {
    return strcmp(message->role, role) == 0;
}

static bool text__render_system(text__render* r, const text_message* message, text_error* error) {
    const text__format* format = &r->chat->format;
    if (format->system_open == NULL) {
        return true; // with the next user message
    }
    TEXT__TRY(text__render_put(r, format->system_open, false, error));
    if (message != NULL) {
        TEXT__TRY(text__render_content(r, message, false, error));
    }
    return text__render_put(r, format->system_close, false, error);
}

// What stands before the first message: BOS, and the system message that the model gets by default.
static bool text__render_start(text__render* r, const text_message* first, text_error* error) {
    const text_chat* chat = r->chat;
    TEXT__TRY(text__render_id(r, chat->bos, false, error));
    bool given = first != NULL && text__role_is(first, "system");
    if (chat->dated) {
        TEXT__TRY(text__render_put(r, chat->format.system_open, false, error));
        TEXT__TRY(text__render_put(r, "Cutting Knowledge Date: December 2023\nToday Date: ", false,
                                   error));
        TEXT__TRY(text__render_put(r, chat->date, false, error));
        TEXT__TRY(text__render_put(r, "\n\n", false, error));
        TEXT__TRY(!given || text__render_content(r, first, false, error));
        return text__render_put(r, chat->format.system_close, false, error);
    }
    const char* system = chat->default_system;
    if (strcmp(chat->format.name, "alpaca") == 0) {
        system = text__alpaca_system;
    }
    if (given || system == NULL) {
        return !given || text__render_system(r, first, error);
    }
    text_message message;
    memset(&message, 0, sizeof(message));
    message.content = system;
    message.length = strlen(system);
    return text__render_system(r, &message, error);
}

static bool text__render_user(text__render* r, const text_message* message,
                              const text_message* system, text_error* error) {
    const text__format* format = &r->chat->format;
    TEXT__TRY(text__render_put(r, format->user_open, false, error));
    if (system != NULL && format->system_open == NULL && system->length > 0) {
        TEXT__TRY(text__render_content(r, system, false, error));
        TEXT__TRY(text__render_put(r, "\n\n", false, error));
    }
    TEXT__TRY(text__render_content(r, message, false, error));
    return text__render_put(r, format->user_close, false, error);
}

static bool text__render_assistant(text__render* r, const text_message* message, bool last,
                                   text_error* error) {
    const text__format* format = &r->chat->format;
    bool trained = message != NULL && !message->masked;
    TEXT__TRY(text__render_put(r, format->assistant_open, false, error));
    bool thought = message != NULL && message->length > 0 &&
                   text__find(message->content, message->length, "</think>") != NULL;
    if (r->chat->think && last && !thought) {
        TEXT__TRY(text__render_put(r, text__think, false, error));
    }
    if (message == NULL) {
        return true;
    }
    TEXT__TRY(text__render_put(r, format->lead, trained, error));
    TEXT__TRY(text__render_content(r, message, trained, error));
    TEXT__TRY(text__render_put(r, format->end, trained, error));
    if (format->end[0] != 1 && text_tok_find(r->tok, format->end) < 0) {
        TEXT__TRY(text__render_id(r, r->chat->eos, trained, error));
    }
    return true;
}

static bool text__render_all(text__render* r, const text_message* messages, size_t count,
                             bool prompt, text_error* error) {
    size_t last_user = 0;
    const text_message* system = NULL;
    for (size_t i = 0; i < count; i++) {
        last_user = text__role_is(&messages[i], "user") ? i : last_user;
    }
    TEXT__TRY(text__render_start(r, count > 0 ? &messages[0] : NULL, error));
    for (size_t i = 0; i < count; i++) {
        const text_message* message = &messages[i];
        if (text__role_is(message, "system")) {
            system = message;
            TEXT__TRY(i == 0 || text__render_system(r, message, error));
        } else if (text__role_is(message, "user")) {
            TEXT__TRY(text__render_user(r, message, system, error));
            system = NULL;
        } else if (text__role_is(message, "assistant")) {
            TEXT__TRY(text__render_assistant(r, message, i > last_user, error));
            if (i + 1 < count || prompt) { // nothing untrained at the very end
                TEXT__TRY(text__render_put(r, r->chat->format.tail, false, error));
            }
        } else {
            return text__fail(error,
                              "the role \"%.60s\" is not supported; there are system, user, "
                              "assistant",
                              message->role);
        }
    }
    TEXT__TRY(!prompt || text__render_assistant(r, NULL, true, error));
    return text__render_flush(r, error);
}

bool text_chat_encode(const text_chat* chat, text_tok* tok, const text_message* messages,
                      size_t count, bool prompt, text_ids* ids, text_ids* labels,
                      text_error* error) {
    text__render render;
    memset(&render, 0, sizeof(render));
    render.chat = chat;
    render.tok = tok;
    render.ids = ids;
    render.labels = labels;
    render.start = ids->count;
    bool good = text__render_all(&render, messages, count, prompt, error);
    text_bytes_free(&render.text);
    return good;
}
