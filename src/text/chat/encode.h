// From a conversation to ids: the public functions.

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
