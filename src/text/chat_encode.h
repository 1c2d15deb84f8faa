// From a conversation to ids, and what of it is trained.
//
// With generation blocks, the template says what the assistant wrote. Otherwise a turn is what the
// rendering up to it has more than the rendering before it with the generation prompt: what a model
// continues. A template that changes earlier turns when later ones follow (it drops their thoughts,
// say) cannot be trained on one text: then each turn is a sample of its own, as inference sees it.

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
static qlora_result qlora__text_talk_render(qlora__env* env, const qlora__text_talk* talk,
                                            size_t count, bool prompt, qlora_text_bytes* out,
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

// ---- what is trained

static size_t qlora__text_common(const qlora_text_bytes* a, const qlora_text_bytes* b) {
    size_t same = 0;
    while (same < a->count && same < b->count && a->data[same] == b->data[same]) {
        same++;
    }
    while (same > 0 && same < a->count && ((unsigned char)a->data[same] & 0xC0) == 0x80) {
        same--; // not inside a character
    }
    return same;
}

static bool qlora__text_starts(const qlora_text_bytes* text, const qlora_text_bytes* start,
                               size_t size) {
    return text->count >= size && start->count >= size &&
           (size == 0 || memcmp(text->data, start->data, size) == 0);
}

// Whether the answer talk->after[begin, end) ends with an end marker: not with the one before its
// content, if it has none.
static qlora_result qlora__text_answer_ended(qlora__env* env, const qlora__text_talk* talk,
                                             size_t begin, size_t end, bool* ended) {
    const qlora_text_chat* chat = talk->chat;
    qlora__text_marks_seen seen;
    QLORA__TRY(qlora__text_see_markers(env, chat, talk->after.data + begin, end - begin, &seen));
    *ended = seen.last && (seen.final != chat->opens || qlora__text_chat_stops(chat, seen.final));
    return QLORA_OK;
}

// The end marker of an answer that the template writes without one. A marker that follows it in a
// longer rendering, `next`, counts if generation stops at it, or if another one follows at once:
// then it ends the turn and does not begin the next one. If the answer is the `last` of the text,
// it gets what follows answers elsewhere, or EOS. `same`: the bytes that both texts start with.
static qlora_result qlora__text_answer_mark(qlora__env* env, qlora__text_talk* talk,
                                            const qlora_text_bytes* next, size_t same, bool last) {
    const qlora_text_chat* chat = talk->chat;
    qlora_text_bytes* after = &talk->after;
    qlora__text_marks_seen seen;
    if (same == after->count && next->count > same) {
        QLORA__TRY(
            qlora__text_see_markers(env, chat, next->data + same, next->count - same, &seen));
        bool closes = seen.first >= 0 && seen.first != chat->bos &&
                      (seen.run > 1 || qlora__text_chat_stops(chat, seen.first));
        if (closes) {
            return qlora__text_bytes_add(env, after, next->data + same, seen.first_end);
        }
    }
    if (!last) {
        return QLORA_OK;
    }
    if (chat->closes.size > 0) {
        return qlora__text_bytes_add(env, after, chat->closes.data, chat->closes.size);
    }
    const qlora__text_owned* eos = &chat->tokens[1];
    return chat->eos >= 0 && qlora__text_is_marker(chat->tok, chat->eos) && eos->size > 0
               ? qlora__text_bytes_add(env, after, eos->data, eos->size)
               : QLORA_OK;
}

// Where the answer ends in talk->after. What follows its end marker is not generated: whitespace,
// and what the template writes only at the end of a conversation (such as EOS). A template that
// writes no end marker gets it here. `next` is a longer rendering.
static qlora_result qlora__text_answer_end(qlora__env* env, qlora__text_talk* talk, size_t begin,
                                           const qlora_text_bytes* next, bool last, size_t* end) {
    const qlora_text_chat* chat = talk->chat;
    qlora_text_bytes* after = &talk->after;
    qlora__text_marks_seen seen;
    bool ended = false;
    size_t same = qlora__text_common(after, next);
    *end = after->count;
    // two markers may start alike, so the difference may begin inside one
    for (size_t back = 0; back < 24 && same > begin + back && same < after->count; back++) {
        size_t from = same - back;
        QLORA__TRY(
            qlora__text_see_markers(env, chat, after->data + from, after->count - from, &seen));
        if (seen.alone) {
            *end = from;
            break;
        }
    }
    for (int i = 0; i < 2 && !ended; i++) { // without what only the last answer has, or with it
        size_t cut = qlora__jin_back_space(after->data, begin, i == 0 ? *end : after->count);
        QLORA__TRY(qlora__text_answer_ended(env, talk, begin, cut, &ended));
        *end = ended ? cut : after->count;
    }
    if (!ended) {
        QLORA__TRY(qlora__text_answer_mark(env, talk, next, same, last));
        *end = after->count;
    }
    return QLORA_OK;
}

// A rendering that goes on after turn k: the whole conversation, or with a question added.
static qlora_result qlora__text_talk_next(qlora__env* env, qlora__text_talk* talk, size_t k,
                                          const qlora_text_bytes** out) {
    *out = &talk->whole;
    if (k + 1 < talk->count) {
        return QLORA_OK;
    }
    char error[QLORA__ERROR_SIZE];
    memcpy(error, env->error, sizeof error);
    talk->asks = true;
    qlora_result r = qlora__text_talk_render(env, talk, k + 1, false, &talk->next, NULL);
    talk->asks = false;
    *out = &talk->next;
    if (r == QLORA_ERR_FORMAT) { // not every turn may be followed by a question
        memcpy(env->error, error, sizeof error);
        talk->next.count = 0;
        return QLORA_OK;
    }
    return r;
}

// A template that ignores tool calls would train an empty answer.
static qlora_result qlora__text_turn_calls(qlora__env* env, const qlora__text_talk* talk, size_t k,
                                           size_t begin, size_t end) {
    const qlora__json_token* node = talk->turns[k].node;
    const qlora__json_token* calls =
        node != NULL ? qlora__text_json_get(talk->json, node, "tool_calls") : NULL;
    qlora__text_marks_seen seen;
    if (calls == NULL || calls->kind != QLORA__JSON_ARRAY || calls->count == 0) {
        return QLORA_OK;
    }
    QLORA__TRY(
        qlora__text_see_markers(env, talk->chat, talk->after.data + begin, end - begin, &seen));
    return seen.alone && talk->turns[k].length == 0
               ? qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                 "message %lu has tool_calls, which the template does not render",
                                 (unsigned long)k + 1)
               : QLORA_OK;
}

// The answer of turn k: talk->after is the text up to it, *begin and *end its place there.
// `last`: no turn follows in the text that is made of it.
static qlora_result qlora__text_turn_span(qlora__env* env, qlora__text_talk* talk, size_t k,
                                          bool last, size_t* begin, size_t* end) {
    const qlora_text_bytes* next = NULL;
    QLORA__TRY(qlora__text_talk_render(env, talk, k, true, &talk->before, NULL));
    QLORA__TRY(qlora__text_talk_render(env, talk, k + 1, false, &talk->after, NULL));
    size_t size = talk->before.count;
    if (!qlora__text_starts(&talk->after, &talk->before, size)) {
        size_t same = qlora__text_common(&talk->before, &talk->after);
        size_t shown = size - same < 40 ? size - same : 40;
        return qlora__env_fail(
            env, QLORA_ERR_UNSUPPORTED,
            "message %lu: the template's generation prompt goes on with \"%.*s\", but its answer "
            "does not start like that, so what to train is unclear; use a template with "
            "{%% generation %%} blocks (--chat-template)",
            (unsigned long)k + 1, (int)shown, talk->before.data + same);
    }
    *begin = size;
    QLORA__TRY(qlora__text_talk_next(env, talk, k, &next));
    QLORA__TRY(qlora__text_answer_end(env, talk, size, next, last, end));
    return qlora__text_turn_calls(env, talk, k, *begin, *end);
}

static bool qlora__text_is_trained(const qlora__text_turn* turn) {
    return strcmp(turn->role, "assistant") == 0 && !turn->masked;
}

// Generation blocks: one span for each assistant turn, unless nothing has to be left out.
static qlora_result qlora__text_talk_blocks(qlora__env* env, qlora__text_talk* talk) {
    size_t answers = 0;
    size_t masked = 0;
    size_t kept = 0;
    size_t at = 0;
    for (size_t i = 0; i < talk->count; i++) {
        bool assistant = strcmp(talk->turns[i].role, "assistant") == 0;
        answers += assistant ? 1 : 0;
        masked += assistant && talk->turns[i].masked ? 1 : 0;
    }
    if (masked > 0 && talk->spans.count != answers) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "the template has %lu generation blocks for %lu answers, so it is "
                               "unclear which of them are not to be trained",
                               (unsigned long)talk->spans.count, (unsigned long)answers);
    }
    for (size_t i = 0; masked > 0 && i < talk->count; i++) {
        if (strcmp(talk->turns[i].role, "assistant") == 0) {
            if (!talk->turns[i].masked) {
                talk->spans.data[kept++] = talk->spans.data[at];
            }
            at++;
        }
    }
    talk->spans.count = masked > 0 ? kept : talk->spans.count;
    return QLORA_OK;
}

// Renders the whole conversation and finds its trained spans; talk->stable is false when one text
// cannot have them all.
static qlora_result qlora__text_talk_plan(qlora__env* env, qlora__text_talk* talk) {
    bool blocks = qlora__text_talk_template(talk)->generation;
    talk->spans.count = 0;
    talk->stable = true;
    talk->chat->blocks = blocks;
    QLORA__TRY(qlora__text_talk_render(env, talk, talk->count, false, &talk->whole,
                                       blocks ? &talk->spans : NULL));
    if (blocks) {
        return qlora__text_talk_blocks(env, talk);
    }
    for (size_t k = 0; k < talk->count && (talk->stable || talk->literal); k++) {
        size_t begin = 0;
        size_t end = 0;
        if (!qlora__text_is_trained(&talk->turns[k])) {
            continue;
        }
        QLORA__TRY(qlora__text_turn_span(env, talk, k, k + 1 == talk->count, &begin, &end));
        if (k + 1 == talk->count &&
            qlora__text_starts(&talk->after, &talk->whole, talk->whole.count)) {
            // the last answer may have got its end marker
            QLORA__TRY(qlora__text_bytes_add(env, &talk->whole,
                                             talk->after.data + talk->whole.count,
                                             talk->after.count - talk->whole.count));
        }
        bool same = qlora__text_starts(&talk->whole, &talk->after, end);
        talk->stable = talk->stable && same;
        QLORA__TRY(same ? qlora__jin_spans_add(env, &talk->spans, begin, end) : QLORA_OK);
    }
    return QLORA_OK;
}

// The sample of turn k alone, for templates that change earlier turns.
static qlora_result qlora__text_talk_turn(qlora__env* env, qlora__text_talk* talk, size_t k,
                                          const qlora__text_output* o) {
    size_t begin = 0;
    size_t end = 0;
    QLORA__TRY(qlora__text_turn_span(env, talk, k, true, &begin, &end));
    talk->spans.count = 0;
    QLORA__TRY(qlora__jin_spans_add(env, &talk->spans, begin, end));
    return qlora__text_output_text(env, o, talk->chat, &talk->after, &talk->spans);
}

// Appends ids and labels of the whole conversation.
static qlora_result qlora__text_talk_encode(qlora__env* env, qlora__text_talk* talk, bool prompt,
                                            qlora_text_ids* ids, qlora_text_ids* labels) {
    qlora__text_output o = qlora__text_output_start(ids, labels);
    o.complete = talk->literal;
    // a built-in format adds EOS to answers that have no end marker, with labels and without
    if (prompt || (labels == NULL && !talk->chat->built_in)) {
        talk->spans.count = 0;
        QLORA__TRY(qlora__text_talk_render(env, talk, talk->count, prompt, &talk->whole, NULL));
        return qlora__text_output_text(env, &o, talk->chat, &talk->whole, &talk->spans);
    }
    QLORA__TRY(qlora__text_talk_plan(env, talk));
    if (!talk->stable && !talk->literal) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "the template renders earlier turns differently when later ones "
                               "follow, so one text cannot train them all");
    }
    return qlora__text_output_text(env, &o, talk->chat, &talk->whole, &talk->spans);
}

// ---- the public functions

// What stands around the content of an answer: the marker before it, and what follows it where
// generation stops with the next turn (GLM 4.5).
static qlora_result qlora__text_chat_around(qlora__env* env, qlora__text_talk* talk,
                                            const qlora__text_turn* answer) {
    qlora_text_chat* chat = talk->chat;
    qlora__text_marks_seen seen;
    QLORA__TRY(qlora__text_talk_render(env, talk, 1, true, &talk->before, NULL));
    for (size_t count = 2; count < 4; count++) {
        QLORA__TRY(qlora__text_talk_render(env, talk, count, false, &talk->after, NULL));
        const qlora_text_bytes* text = &talk->after;
        size_t begin = talk->before.count;
        size_t at =
            qlora__jin_find_bytes(text->data, text->count, 0, answer->content, answer->length);
        if (at == SIZE_MAX || at < begin || !qlora__text_starts(text, &talk->before, begin)) {
            continue;
        }
        if (count == 2) {
            QLORA__TRY(qlora__text_see_markers(env, chat, text->data + begin, at - begin, &seen));
            chat->opens = seen.final;
            continue;
        }
        at += answer->length;
        QLORA__TRY(qlora__text_see_markers(env, chat, text->data + at, text->count - at, &seen));
        if (seen.first >= 0 && qlora__text_chat_stops(chat, seen.first)) {
            QLORA__TRY(qlora__text_owned_set(env, &chat->closes, text->data + at, seen.first_end));
        }
    }
    return QLORA_OK;
}

// Whether a template, without and with tools, renders a content in parts as it renders the text in
// them. Others print a list as Python does.
static qlora_result qlora__text_chat_parts(qlora__env* env, qlora__text_talk* talk) {
    static const char source[] = "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":"
                                 "\"text\",\"text\":\"QLORA0PARTS\"}]}],\"tools\":[]}";
    qlora_text_chat* chat = talk->chat;
    const qlora__text_turn* before = talk->turns;
    qlora__text_turn turn;
    qlora__json json;
    QLORA__TRY(qlora__text_json(env, "parts", source, sizeof source - 1, &json));
    memset(&turn, 0, sizeof turn);
    turn.role = "user";
    turn.node = qlora__text_json_get(&json, json.tokens, "messages") + 1;
    talk->turns = &turn;
    talk->json = &json;
    qlora_result r = QLORA_OK;
    for (int i = 0; i < (chat->with_tools != NULL ? 2 : 1) && r != QLORA_ERR_MEMORY; i++) {
        qlora_text_bytes* texts[2] = {&talk->before, &talk->after}; // of the parts joined, and not
        talk->record = i == 1 ? json.tokens : NULL;
        r = QLORA_OK;
        for (int k = 0; k < 2 && r == QLORA_OK; k++) {
            chat->takes_parts[i] = k == 1;
            r = qlora__text_talk_render(env, talk, 1, false, texts[k], NULL);
        }
        chat->takes_parts[i] = r == QLORA_OK && talk->before.count == talk->after.count &&
                               qlora__text_starts(&talk->before, &talk->after, talk->after.count);
    }
    talk->turns = before;
    talk->json = NULL;
    talk->record = NULL;
    qlora__json_free(env, &json);
    return r;
}

// The marker that ends an answer also ends generation: found by rendering one.
static qlora_result qlora__text_chat_probe(qlora__env* env, qlora_text_chat* chat) {
    static const char* const contents[3] = {"a", "QLORA0ANSWER", "a"};
    qlora__text_turn turns[3];
    qlora__text_talk talk;
    qlora_text_ids ids;
    qlora_text_ids labels;
    memset(turns, 0, sizeof turns);
    memset(&talk, 0, sizeof talk);
    memset(&ids, 0, sizeof ids);
    memset(&labels, 0, sizeof labels);
    for (int i = 0; i < 3; i++) {
        turns[i].role = i == 1 ? "assistant" : "user";
        turns[i].content = contents[i];
        turns[i].length = strlen(contents[i]);
    }
    talk.chat = chat;
    talk.turns = turns;
    talk.count = 2;
    chat->opens = -1;
    if (qlora__text_chat_parts(env, &talk) == QLORA_ERR_MEMORY ||
        (!chat->template_->generation &&
         qlora__text_chat_around(env, &talk, &turns[1]) == QLORA_ERR_MEMORY)) {
        qlora__text_talk_free(env, &talk);
        return QLORA_ERR_MEMORY;
    }
    qlora_result r = qlora__text_talk_encode(env, &talk, false, &ids, &labels);
    if (r == QLORA_OK && ids.count > 0 && labels.data[ids.count - 1] != -100 &&
        qlora__text_is_marker(chat->tok, ids.data[ids.count - 1])) {
        qlora__text_chat_add_stop(chat, ids.data[ids.count - 1]);
    }
    qlora__text_talk_free(env, &talk);
    qlora__text_ids_free(env, &ids);
    qlora__text_ids_free(env, &labels);
    // a template that cannot render this may well render others
    return r == QLORA_ERR_MEMORY ? r : QLORA_OK;
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
    if (desc->name != NULL && desc->template_file != NULL) {
        return qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                               "a template file and the built-in format \"%.60s\" cannot be used "
                               "together",
                               desc->name);
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
    chat->clock = desc->clock != 0 ? desc->clock : QLORA__TEXT_CLOCK;
    qlora_result r = qlora__text_chat_fill(env, chat, desc);
    r = r == QLORA_OK ? qlora__text_chat_probe(env, chat) : r;
    chat->used = false;
    if (r != QLORA_OK) {
        qlora__text_chat_free(env, chat);
        return r;
    }
    QLORA__TEXT_LOG(env, INFO, "chat format %s (%s)", chat->name, chat->source);
    text->chats++;
    chat->tok->users++;
    *out = chat;
    return QLORA_OK;
}

qlora_result qlora_text_chat_close(qlora_text_chat* chat) {
    if (chat != NULL) {
        qlora_text* text = chat->text;
        qlora__text_enter(text, "qlora_text_chat_close");
        if (chat->users > 0) {
            return qlora__env_fail(&text->env, QLORA_ERR_STATE,
                                   "%lld stream%s of data still use%s the chat; close %s first",
                                   (long long)chat->users, chat->users == 1 ? "" : "s",
                                   chat->users == 1 ? "s" : "", chat->users == 1 ? "it" : "them");
        }
        chat->tok->users--;
        text->chats--;
        qlora__text_chat_free(&text->env, chat);
    }
    return QLORA_OK;
}

const char* qlora_text_chat_names(size_t index) {
    return index < QLORA__TEXT_COUNT(qlora__text_formats) ? qlora__text_formats[index].name : NULL;
}

const char* qlora_text_chat_template(const char* name) {
    for (size_t i = 0; name != NULL && i < QLORA__TEXT_COUNT(qlora__text_formats); i++) {
        if (strcmp(name, qlora__text_formats[i].name) == 0) {
            return qlora__text_formats[i].source;
        }
    }
    return NULL;
}

qlora_result qlora_text_chat_query(qlora_text_chat* chat, qlora_text_chat_info* out) {
    if (chat == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__text_enter(chat->text, "qlora_text_chat_query");
    QLORA__TEXT_NEED(&chat->text->env, out);
    out->name = chat->name;
    out->source = chat->source;
    out->eos = chat->eos;
    out->stops = chat->stops;
    out->stop_count = chat->stop_count;
    out->missing = chat->missing;
    out->own = chat->own;
    out->replaced = chat->replaced;
    return QLORA_OK;
}

qlora_result qlora_text_chat_set_clock(qlora_text_chat* chat, int64_t clock) {
    if (chat == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__text_enter(chat->text, "qlora_text_chat_set_clock");
    chat->clock = clock;
    return QLORA_OK;
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
    qlora__text_talk talk;
    void* memory = NULL;
    memset(&talk, 0, sizeof talk);
    memory = qlora__text_zalloc(env, count, sizeof(qlora__text_turn));
    if (memory == NULL && count > 0) {
        return QLORA_ERR_MEMORY;
    }
    qlora__text_turn* turns = (qlora__text_turn*)memory;
    for (size_t i = 0; i < count; i++) {
        turns[i].role = messages[i].role;
        turns[i].content = messages[i].content != NULL ? messages[i].content : "";
        turns[i].length = messages[i].length;
        turns[i].masked = messages[i].masked;
    }
    talk.chat = chat;
    talk.turns = turns;
    talk.count = count;
    qlora_result r = qlora__text_talk_encode(env, &talk, prompt, ids, labels);
    qlora__text_talk_free(env, &talk);
    qlora__env_free(env, turns, count * sizeof(qlora__text_turn));
    if (r != QLORA_OK) {
        ids->count = before;
        if (labels != NULL) {
            labels->count = labels_before;
        }
    }
    return r;
}

// "weight" and "train" of a message: 0 and false switch training off.
static bool qlora__text_node_off(const qlora__json* json, const qlora__json_token* node,
                                 const char* name) {
    const qlora__json_token* value = qlora__text_json_get(json, node, name);
    double number = 1.0;
    if (value == NULL || value->kind == QLORA__JSON_FALSE) {
        return value != NULL;
    }
    return value->kind == QLORA__JSON_NUMBER &&
           qlora__json_double(json, (uint32_t)(value - json->tokens), &number) && number == 0.0;
}

// The messages of a conversation in JSON, as they are.
static qlora_result qlora__text_json_turns(qlora__env* env, const qlora__json* json,
                                           qlora__text_turn** out, size_t* count) {
    const qlora__json_token* list = qlora__text_json_get(json, json->tokens, "messages");
    if (list == NULL || list->kind != QLORA__JSON_ARRAY) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "the conversation must be an object {\"messages\": [...]}");
    }
    qlora__text_turn* turns =
        (qlora__text_turn*)qlora__text_zalloc(env, list->count, sizeof(qlora__text_turn));
    if (turns == NULL && list->count > 0) {
        return QLORA_ERR_MEMORY;
    }
    const qlora__json_token* node = list + 1;
    for (uint32_t i = 0; i < list->count; i++) {
        const qlora__json_token* from = qlora__text_json_get(json, node, "from");
        const char* role = qlora__text_json_cstring(json, qlora__text_json_get(json, node, "role"));
        turns[i].role = role != NULL ? role : "";
        turns[i].node = node;
        if (role == NULL && !qlora__text_json_absent(from)) {
            qlora_result r = qlora__text_message_role(env, json, node, &turns[i].role);
            if (r != QLORA_OK) {
                qlora__env_free(env, turns, list->count * sizeof(qlora__text_turn));
                return qlora__env_wrap(env, r, "message %lu ", (unsigned long)i + 1);
            }
        }
        turns[i].masked =
            qlora__text_node_off(json, node, "weight") || qlora__text_node_off(json, node, "train");
        node = qlora__text_json_next(json, node);
    }
    *out = turns;
    *count = list->count;
    return QLORA_OK;
}

qlora_result qlora_text_chat_encode_json(qlora_text_chat* chat, const char* conversation,
                                         size_t size, bool prompt, qlora_text_bytes* text,
                                         qlora_text_ids* ids, qlora_text_ids* labels) {
    if (chat == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__env* env = &chat->text->env;
    qlora__text_talk talk;
    qlora__json json;
    qlora__text_turn* turns = NULL;
    memset(&talk, 0, sizeof talk);
    qlora__text_enter(chat->text, "qlora_text_chat_encode_json");
    QLORA__TEXT_NEED(env, conversation);
    QLORA__TEXT_NEED(env, ids);
    size_t before = ids->count;
    size_t labels_before = labels != NULL ? labels->count : 0;
    QLORA__TRY(qlora__text_json(env, "the conversation", conversation, size, &json));
    qlora_result r = qlora__text_json_turns(env, &json, &turns, &talk.count);
    talk.chat = chat;
    talk.turns = turns;
    talk.json = &json;
    talk.record = json.tokens;
    talk.literal = true;
    r = r == QLORA_OK ? qlora__text_talk_encode(env, &talk, prompt, ids, labels) : r;
    if (r == QLORA_OK && !prompt && labels != NULL && !talk.stable) {
        QLORA__TEXT_LOG(env, WARN, "%s",
                        "the template renders some earlier answers differently once later turns "
                        "follow; each of them is trained in a sample of its own, and is not marked "
                        "here");
    }
    if (r == QLORA_OK && text != NULL) {
        r = qlora__text_bytes_add(env, text, talk.whole.data, talk.whole.count);
    }
    qlora__env_free(env, turns, talk.count * sizeof(qlora__text_turn));
    qlora__text_talk_free(env, &talk);
    qlora__json_free(env, &json);
    if (r != QLORA_OK) {
        ids->count = before;
        if (labels != NULL) {
            labels->count = labels_before;
        }
    }
    return r;
}
