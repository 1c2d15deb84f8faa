// A conversation as values of a template, and its rendering.

// One message of a conversation. `node` is the whole message in `json`, or NULL: then it has only a
// role and a content. Otherwise the template gets the message, and the content is here for others.
typedef struct qlora__text_turn {
    const char* role;
    const char* content; // NULL: null
    size_t length;
    bool masked; // an assistant turn that is not trained
    bool parts;  // the content is not in place yet
    const qlora__json_token* node;
} qlora__text_turn;

typedef struct qlora__text_talk {
    qlora_text_chat* chat;
    const qlora__text_turn* turns;
    size_t count;
    const qlora__json* json;         // of the nodes, and of:
    const qlora__json_token* record; // other keys are variables of the template; may be NULL
    bool literal; // what is rendered is shown whole: every key of the record, and every turn
    // work, reused from turn to turn
    qlora_text_bytes whole;
    qlora_text_bytes before;
    qlora_text_bytes after;
    qlora_text_bytes next;
    qlora_text_spans spans;
    bool asks;   // a question follows the turns
    bool stable; // one text has all turns
} qlora__text_talk;

static void qlora__text_talk_free(qlora__env* env, qlora__text_talk* talk) {
    qlora__text_bytes_free(env, &talk->whole);
    qlora__text_bytes_free(env, &talk->before);
    qlora__text_bytes_free(env, &talk->after);
    qlora__text_bytes_free(env, &talk->next);
    qlora__env_free(env, talk->spans.data, talk->spans.capacity * sizeof(qlora_text_span));
}

// ---- values of a conversation

// Arguments that are a string become what the string says, if it is JSON.
static qlora_result qlora__text_arguments(qlora__jin_machine* m, qlora_text_chat* chat,
                                          qlora__jin_value* arguments) {
    const qlora__jin_string* s = arguments->as.string;
    void* data = chat->parsed;
    qlora__json json;
    qlora_result r = qlora__text_reserve(m->env, &data, &chat->parsed_capacity, chat->parsed_count,
                                         1, sizeof(qlora__json));
    chat->parsed = (qlora__json*)data;
    QLORA__TRY(r);
    r = qlora__text_json(m->env, "arguments", s->data, s->bytes, &json);
    if (r != QLORA_OK) {
        return r == QLORA_ERR_MEMORY ? r : QLORA_OK; // not JSON: it stays the string
    }
    chat->parsed[chat->parsed_count++] = json;
    return qlora__jin_from_json(m, &json, json.tokens, arguments);
}

static qlora_result qlora__text_tool_calls(qlora__jin_machine* m, qlora_text_chat* chat,
                                           qlora__jin_value calls) {
    for (size_t i = 0; calls.kind == QLORA__JIN_LIST && i < calls.as.list->count; i++) {
        qlora__jin_value call = calls.as.list->items[i];
        if (call.kind != QLORA__JIN_DICT) {
            continue;
        }
        size_t at = qlora__jin_dict_at(call.as.dict, "function", 8);
        bool inner = at < call.as.dict->count && call.as.dict->values[at].kind == QLORA__JIN_DICT;
        qlora__jin_dict* function = inner ? call.as.dict->values[at].as.dict : call.as.dict;
        at = qlora__jin_dict_at(function, "arguments", 9);
        if (at < function->count && function->values[at].kind == QLORA__JIN_STRING) {
            QLORA__TRY(qlora__text_arguments(m, chat, &function->values[at]));
        }
    }
    return QLORA_OK;
}

static bool qlora__text_talk_has_tools(const qlora__text_talk* talk) {
    const qlora__json_token* tools =
        talk->record != NULL ? qlora__text_json_get(talk->json, talk->record, "tools") : NULL;
    return tools != NULL && tools->kind == QLORA__JSON_ARRAY;
}

static bool qlora__text_talk_second(const qlora__text_talk* talk) {
    return talk->chat->with_tools != NULL && qlora__text_talk_has_tools(talk);
}

static qlora_text_template* qlora__text_talk_template(const qlora__text_talk* talk) {
    return qlora__text_talk_second(talk) ? talk->chat->with_tools : talk->chat->template_;
}

static bool qlora__text_talk_takes(const qlora__text_talk* talk) {
    return talk->chat->takes_parts[qlora__text_talk_second(talk) ? 1 : 0];
}

static bool qlora__text_talk_keeps(const qlora__text_talk* talk) {
    return talk->chat->keeps_strings[qlora__text_talk_second(talk) ? 1 : 0];
}

// What the names mean that ShareGPT data has in "from". "role" is passed on as it is.
static const char* qlora__text_role_of(const char* name) {
    static const char* const names[][2] = {{"system", "system"},
                                           {"developer", "system"},
                                           {"user", "user"},
                                           {"human", "user"},
                                           {"prompter", "user"},
                                           {"input", "user"},
                                           {"assistant", "assistant"},
                                           {"gpt", "assistant"},
                                           {"model", "assistant"},
                                           {"bot", "assistant"},
                                           {"chatgpt", "assistant"},
                                           {"bing", "assistant"},
                                           {"bard", "assistant"},
                                           {"output", "assistant"},
                                           {"tool", "tool"},
                                           {"observation", "tool"},
                                           {"ipython", "tool"},
                                           {"function", "tool"},
                                           {"function_response", "tool"},
                                           {"tool_response", "tool"},
                                           {"tool_results", "tool"}};
    for (size_t i = 0; i < QLORA__TEXT_COUNT(names); i++) {
        if (strcmp(name, names[i][0]) == 0) {
            return names[i][1];
        }
    }
    return NULL;
}

// The role of a message in JSON: "role" as it is, or what "from" means.
static qlora_result qlora__text_message_role(qlora__env* env, const qlora__json* json,
                                             const qlora__json_token* node, const char** out) {
    const qlora__json_token* role = qlora__text_json_get(json, node, "role");
    bool plain = !qlora__text_json_absent(role);
    role = plain ? role : qlora__text_json_get(json, node, "from");
    const char* name = qlora__text_json_cstring(json, role);
    if (name == NULL || name[0] == '\0') {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "has no \"role\" (or \"from\")");
    }
    if (!plain && (strcmp(name, "function_call") == 0 || strcmp(name, "tool_call") == 0)) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "has the role \"%s\", a tool call as plain text; give it as "
                               "\"tool_calls\" of an assistant message",
                               name);
    }
    bool whole = strlen(name) == qlora__text_json_size(role); // it has no zero inside
    *out = !whole ? NULL : plain ? name : qlora__text_role_of(name);
    return *out != NULL ? QLORA_OK
                        : qlora__env_fail(env, QLORA_ERR_FORMAT,
                                          "has the role \"%.60s\", which is not supported", name);
}

// A content in parts as one string, if all of them are texts.
static qlora_result qlora__text_parts_join(qlora__jin_machine* m, qlora__jin_value* content) {
    const qlora__jin_list* list = content->as.list;
    void* memory = NULL;
    size_t size = 0;
    for (int pass = 0; pass < 2; pass++) {
        size_t at = 0;
        for (size_t i = 0; i < list->count; i++) {
            const qlora__jin_dict* part =
                list->items[i].kind == QLORA__JIN_DICT ? list->items[i].as.dict : NULL;
            size_t text = part != NULL ? qlora__jin_dict_at(part, "text", 4) : 0;
            size_t type = part != NULL ? qlora__jin_dict_at(part, "type", 4) : 0;
            if (part == NULL || text == part->count ||
                part->values[text].kind != QLORA__JIN_STRING ||
                (type < part->count && !qlora__jin_is(part->values[type], "text", 4))) {
                return QLORA_OK;
            }
            const qlora__jin_string* s = part->values[text].as.string;
            if (pass == 1 && s->bytes > 0) {
                memcpy((char*)memory + at, s->data, s->bytes);
            }
            at += s->bytes;
        }
        if (pass == 0) {
            size = at;
            QLORA__TRY(qlora__jin_get(m, size + 1, &memory));
        }
    }
    return qlora__jin_string_share(m, (const char*)memory, size, content);
}

// The message as the template sees it: as it is given. Only a content in parts becomes one string
// where the template does not take parts, arguments that are JSON in a string become the object, as
// servers do it, and ShareGPT's names those of everybody else.
static qlora_result qlora__text_turn_value(qlora__jin_machine* m, const qlora__text_talk* talk,
                                           const qlora__text_turn* turn, qlora__jin_value* out) {
    qlora__jin_value content = qlora__jin_none();
    qlora__jin_value role;
    qlora__jin_value all;
    bool shared = turn->node != NULL &&
                  qlora__text_json_absent(qlora__text_json_get(talk->json, turn->node, "role"));
    QLORA__TRY(qlora__jin_string_of(m, turn->role, &role));
    QLORA__TRY(qlora__jin_dict_make(m, QLORA__JIN_DICT, 4, out));
    if (turn->node == NULL) {
        if (turn->content != NULL) {
            QLORA__TRY(qlora__jin_string_share(m, turn->content, turn->length, &content));
        }
        QLORA__TRY(qlora__jin_dict_put(m, out->as.dict, "role", role));
        return qlora__jin_dict_put(m, out->as.dict, "content", content);
    }
    QLORA__TRY(qlora__jin_from_json(m, talk->json, turn->node, &all));
    if (all.kind != QLORA__JIN_DICT) {
        *out = all;
        return QLORA_OK;
    }
    for (size_t i = 0; i < all.as.dict->count; i++) {
        qlora__jin_value key = all.as.dict->keys[i];
        qlora__jin_value value = all.as.dict->values[i];
        if (shared && qlora__jin_is(key, "from", 4)) {
            QLORA__TRY(qlora__jin_dict_put(m, out->as.dict, "role", role));
            continue;
        }
        bool body = qlora__jin_is(key, "content", 7) || (shared && qlora__jin_is(key, "value", 5));
        if (body && value.kind == QLORA__JIN_LIST && !qlora__text_talk_takes(talk)) {
            QLORA__TRY(qlora__text_parts_join(m, &value));
        }
        if (qlora__jin_is(key, "tool_calls", 10) && !qlora__text_talk_keeps(talk)) {
            QLORA__TRY(qlora__text_tool_calls(m, talk->chat, value));
        }
        QLORA__TRY(body ? qlora__jin_dict_put(m, out->as.dict, "content", value)
                        : qlora__jin_dict_add(m, out->as.dict, key, value));
    }
    return QLORA_OK;
}

// Keys of a record that are variables of the template. chat_template_kwargs has them in an object.
static qlora_result qlora__text_talk_extras(qlora__jin_machine* m, const qlora__text_talk* talk,
                                            bool* tools) {
    static const char* const used[] = {"tools", "documents", "enable_thinking", "thinking"};
    qlora__jin_value all;
    *tools = false;
    if (talk->record == NULL) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__jin_from_json(m, talk->json, talk->record, &all));
    for (size_t i = 0; i < all.as.dict->count; i++) {
        qlora__jin_value key = all.as.dict->keys[i];
        qlora__jin_value value = all.as.dict->values[i];
        bool known = talk->literal;
        for (size_t k = 0; k < QLORA__TEXT_COUNT(used); k++) {
            known = known || qlora__jin_is(key, used[k], strlen(used[k]));
        }
        if (known && !qlora__jin_is(key, "messages", 8)) {
            QLORA__TRY(qlora__jin_dict_set(m, m->globals, key, value));
        }
        *tools = *tools || (qlora__jin_is(key, "tools", 5) && qlora__jin_truth(value));
        if (qlora__jin_is(key, "chat_template_kwargs", 20) && value.kind == QLORA__JIN_DICT) {
            for (size_t k = 0; k < value.as.dict->count; k++) {
                QLORA__TRY(qlora__jin_dict_set(m, m->globals, value.as.dict->keys[k],
                                               value.as.dict->values[k]));
            }
        }
    }
    return QLORA_OK;
}

// The variables of a rendering of the first `count` turns.
static qlora_result qlora__text_talk_set(qlora__jin_machine* m, const qlora__text_talk* talk,
                                         size_t count, bool prompt) {
    qlora__jin_value list;
    bool tools = false;
    QLORA__TRY(qlora__jin_set(m, "tools", qlora__jin_none()));
    QLORA__TRY(qlora__jin_set(m, "documents", qlora__jin_none()));
    for (size_t i = 0; i < 4; i++) {
        QLORA__TRY(qlora__jin_set_text(m, qlora__text_token_names[i], talk->chat->tokens[i].data));
    }
    QLORA__TRY(qlora__text_talk_extras(m, talk, &tools));
    QLORA__TRY(qlora__jin_list_make(m, QLORA__JIN_LIST, count, &list));
    for (size_t i = 0; i < count; i++) {
        qlora__jin_value turn;
        QLORA__TRY(qlora__text_turn_value(m, talk, &talk->turns[i], &turn));
        QLORA__TRY(qlora__jin_list_add(m, list.as.list, turn));
    }
    if (talk->asks) {
        qlora__text_turn question;
        qlora__jin_value turn;
        memset(&question, 0, sizeof question);
        question.role = "user";
        question.content = "a";
        question.length = 1;
        QLORA__TRY(qlora__text_turn_value(m, talk, &question, &turn));
        QLORA__TRY(qlora__jin_list_add(m, list.as.list, turn));
    }
    QLORA__TRY(qlora__jin_set(m, "messages", list));
    return qlora__jin_set(m, "add_generation_prompt", qlora__jin_bool(prompt));
}

// Renders the first `count` turns into `out`, which is emptied first.
static qlora_result qlora__text_talk_render(qlora__env* env, qlora__text_talk* talk, size_t count,
                                            bool prompt, qlora_text_bytes* out,
                                            qlora_text_spans* spans) {
    qlora_text_chat* chat = talk->chat;
    qlora_text_template* source = qlora__text_talk_template(talk);
    qlora__jin_machine m;
    qlora__jin_buffer text;
    uint64_t input = 4096;
    memset(&text, 0, sizeof text);
    chat->used = true;
    out->count = 0;
    QLORA__TRY(qlora__text_bytes_room(env, out, 1)); // so that offsets are always those of memory
    for (size_t i = 0; i < count; i++) {
        const qlora__text_turn* turn = &talk->turns[i];
        input += turn->node != NULL ? turn->node->end - turn->node->begin : 0;
        input += turn->length;
    }
    qlora_result r = qlora__jin_begin(source, input, &m);
    m.clock = chat->clock;
    r = r == QLORA_OK ? qlora__text_talk_set(&m, talk, count, prompt) : r;
    r = r == QLORA_OK ? qlora__jin_execute(source, &m, &text) : r;
    r = r == QLORA_OK ? qlora__text_bytes_add(env, out, text.data, text.count) : r;
    for (size_t i = 0; r == QLORA_OK && spans != NULL && i < m.span_count; i++) {
        r = qlora__jin_spans_add(env, spans, m.spans[i].begin, m.spans[i].end);
    }
    qlora__jin_end(source, &m);
    while (chat->parsed_count > 0) {
        qlora__json_free(env, &chat->parsed[--chat->parsed_count]);
    }
    return r;
}
