// One name of --columns: the column `from` of the file is read as `to`.
typedef struct qlora__text_column {
    const char* to;
    const char* from; // in the loader's copy of desc.columns
    bool seen;
} qlora__text_column;

enum { QLORA__TEXT_COLUMNS = 24 };

// Bytes of a document that were encoded together.
typedef struct qlora__text_slice {
    uint64_t place; // in the file
    size_t at;      // in the loader's bytes
    int64_t first;  // the first of their ids, among those that are waiting; it may be gone
    bool begins;    // they start the document
} qlora__text_slice;

typedef struct qlora__text_source qlora__text_source;

// The state of reading one file.
struct qlora__text_loader {
    const qlora_text_data_desc* desc;
    qlora_text_tok* tok;
    qlora_text_data* data;
    const char* name; // of the file
    const char* form; // the only form of record that is read, or NULL
    const qlora__json* json;
    qlora__text_turn* messages;
    size_t message_count;
    size_t message_capacity;
    const qlora__json_token* record; // what the messages belong to
    size_t begin;                    // where its sample starts in the ids
    size_t line;
    qlora_text_bytes work;  // contents that were joined from parts, one after another
    qlora_text_ids numbers; // a list that belongs to the ids of one record
    qlora__text_column columns[QLORA__TEXT_COLUMNS];
    size_t column_count;
    bool searching; // for the names in desc.columns: it is not known yet which of them exist
    size_t bad;     // records that desc.bad was called for
    qlora__text_source* source;
    // the .txt document that is being read
    qlora__text_lines_kind lines; // where it can be split
    size_t document_line;
    size_t document_count;     // samples before it
    qlora_text_bytes document; // its bytes that samples are still made of, if it is a stream
    qlora__text_slice* slices; // how they were encoded
    size_t slice_count;
    size_t slice_capacity;
    // copies, for streams
    qlora_text_data_desc own;
    char* path;
    size_t path_size;
    char* column_text;
    size_t column_size;
};

// BOS before ids[begin..), unless the text itself starts with it.
static qlora_result qlora__text_data_bos(qlora__env* env, qlora__text_loader* loader,
                                         size_t begin) {
    qlora_text_ids* ids = &loader->data->ids;
    int32_t bos = loader->desc->chat->bos;
    bool own = bos >= 0 && ids->count > begin && ids->data[begin] == bos;
    loader->data->own_bos = loader->data->own_bos || own;
    QLORA__TRY(qlora__text_bos_first(env, bos, ids, begin));
    return bos < 0 ? QLORA_OK : qlora__text_ids_add(env, &loader->data->labels, -100);
}

static qlora_result qlora__text_data_eos(qlora__env* env, qlora__text_loader* loader) {
    qlora_text_data* data = loader->data;
    int32_t eos = loader->desc->chat->eos;
    bool there = data->ids.count > 0 && data->ids.data[data->ids.count - 1] == eos;
    if (eos >= 0 && !there) {
        QLORA__TRY(qlora__text_ids_add(env, &data->ids, eos));
    }
    return qlora__text_label_rest(env, data, true);
}

// ---- prompts

static bool qlora__text_asks(const qlora__text_loader* loader) {
    return loader->desc->prompts != QLORA_TEXT_LEARN;
}

// A text to be continued. `answer` is the record's, or NULL.
static qlora_result qlora__text_ask_plain(qlora__env* env, qlora__text_loader* loader,
                                          const char* prompt, size_t size, const char* answer,
                                          size_t answer_size) {
    qlora_text_data* data = loader->data;
    size_t begin = data->ids.count;
    data->reference = answer;
    data->reference_size = answer_size;
    QLORA__TRY(qlora__text_encode(env, loader->tok, prompt, size, 0, &data->ids));
    QLORA__TRY(qlora__text_data_bos(env, loader, begin));
    return qlora__text_label_rest(env, data, false);
}

// A conversation to be continued: without its last message, if that is an answer.
static qlora_result qlora__text_ask_talk(qlora__env* env, qlora__text_loader* loader,
                                         qlora__text_talk* talk) {
    qlora_text_data* data = loader->data;
    const qlora__text_turn* last = &talk->turns[talk->count - 1];
    if (strcmp(last->role, "assistant") == 0) {
        talk->count--;
        data->reference = last->content; // NULL: it only calls tools
        data->reference_size = last->length;
    }
    if (talk->count == 0) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "the record has an answer, but nothing before it");
    }
    data->chat = true;
    data->any_chat = true;
    QLORA__TRY(qlora__text_talk_encode(env, talk, true, &data->ids, NULL));
    return qlora__text_label_rest(env, data, false);
}

// {"text"} and {"prompt", "completion"}: the first part, which may be empty, is not trained.
static qlora_result qlora__text_data_plain(qlora__env* env, qlora__text_loader* loader,
                                           const char* prompt, size_t prompt_size, const char* text,
                                           size_t size) {
    qlora_text_data* data = loader->data;
    qlora_text_tok* tok = loader->tok;
    size_t begin = data->ids.count;
    if (prompt_size + size == 0) {
        return QLORA_OK; // an empty sample, which the caller can count
    }
    if (prompt_size > 0) {
        QLORA__TRY(qlora__text_encode(env, tok, prompt, prompt_size, 0, &data->ids));
        QLORA__TRY(qlora__text_data_bos(env, loader, begin));
        QLORA__TRY(qlora__text_label_rest(env, data, loader->desc->train_prompt));
        QLORA__TRY(qlora__text_encode(env, tok, text, size, QLORA_TEXT_CONTINUE, &data->ids));
    } else {
        QLORA__TRY(qlora__text_encode(env, tok, text, size, 0, &data->ids));
        QLORA__TRY(qlora__text_data_bos(env, loader, begin));
    }
    QLORA__TRY(qlora__text_label_rest(env, data, true));
    return qlora__text_data_eos(env, loader);
}

// ---- messages

static qlora_result qlora__text_message_add(qlora__env* env, qlora__text_loader* loader,
                                            const char* role, const char* content, size_t length,
                                            bool masked) {
    void* data = loader->messages;
    qlora_result r = qlora__text_reserve(env, &data, &loader->message_capacity,
                                         loader->message_count, 1, sizeof(qlora__text_turn));
    loader->messages = (qlora__text_turn*)data;
    QLORA__TRY(r);
    qlora__text_turn* message = &loader->messages[loader->message_count++];
    memset(message, 0, sizeof *message);
    message->parts = content == NULL;
    message->role = role;
    message->content = content;
    message->length = length;
    message->masked = masked;
    return QLORA_OK;
}

// Joins a content in parts, [{"type": "text", "text": ...}, ...], in loader->work.
static qlora_result qlora__text_message_parts(qlora__env* env, qlora__text_loader* loader,
                                              const qlora__json_token* parts) {
    const qlora__json* json = loader->json;
    const qlora__json_token* part = parts + 1;
    for (uint32_t i = 0; i < parts->count; i++) {
        const qlora__json_token* type = qlora__text_json_get(json, part, "type");
        const qlora__json_token* text = qlora__text_json_get(json, part, "text");
        const char* kind = qlora__text_json_cstring(json, type);
        if (!qlora__text_json_absent(type) && !qlora__text_json_is(json, type, "text")) {
            return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                   "has a content part of the type \"%.60s\"; only \"text\" is "
                                   "supported",
                                   kind != NULL ? kind : "(not a string)");
        }
        if (!qlora__text_json_string(text)) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "has a content part without a string in \"text\"");
        }
        QLORA__TRY(qlora__text_bytes_add(env, &loader->work, qlora__text_json_text(json, text),
                                         qlora__text_json_size(text)));
        part = qlora__text_json_next(json, part);
    }
    return QLORA_OK;
}

// Neither absent, null, false nor empty.
static bool qlora__text_is_filled(const qlora__json_token* value) {
    if (qlora__text_json_absent(value) || value->kind == QLORA__JSON_FALSE) {
        return false;
    }
    if (value->kind == QLORA__JSON_STRING) {
        return qlora__text_json_size(value) > 0;
    }
    bool list = value->kind == QLORA__JSON_ARRAY || value->kind == QLORA__JSON_OBJECT;
    return !list || value->count > 0;
}

// ---- names that are not used

enum { QLORA__TEXT_IGNORED_BYTES = 1024 }; // the list ends with "..." when it gets longer

// Adds a name to the list of ignored ones. A name that is there already changes nothing.
static qlora_result qlora__text_ignore(qlora__env* env, qlora_text_data* data, const char* before,
                                       const char* name) {
    char clean[48];
    char entry[80];
    qlora_text_bytes* list = &data->ignored;
    if (data->again) { // the list is complete
        return QLORA_OK;
    }
    snprintf(clean, sizeof clean, "%s", name);
    qlora__env_clean(env, clean, sizeof clean);
    snprintf(entry, sizeof entry, "%s%s, ", before, clean);
    size_t size = strlen(entry);
    for (size_t at = 0; at < list->count; at++) {
        bool start = at == 0 || list->data[at - 1] == ' ';
        if (start && list->count - at >= size && memcmp(list->data + at, entry, size) == 0) {
            return QLORA_OK;
        }
    }
    if (list->count > QLORA__TEXT_IGNORED_BYTES) {
        return QLORA_OK;
    }
    return list->count + size > QLORA__TEXT_IGNORED_BYTES
               ? qlora__text_bytes_add(env, list, "..., ", 5)
               : qlora__text_bytes_add(env, list, entry, size);
}

// Reads "weight" or "train": 0 and false switch training off, 1 and true on.
static qlora_result qlora__text_switch(qlora__env* env, const qlora__json* json,
                                       const qlora__json_token* node, const char* name,
                                       bool* masked) {
    const qlora__json_token* value = qlora__text_json_get(json, node, name);
    double number = 1.0;
    if (qlora__text_json_absent(value) || value->kind == QLORA__JSON_TRUE) {
        return QLORA_OK;
    }
    if (value->kind == QLORA__JSON_FALSE) {
        *masked = true;
        return QLORA_OK;
    }
    bool read = value->kind == QLORA__JSON_NUMBER &&
                qlora__json_double(json, (uint32_t)(value - json->tokens), &number);
    if (!read) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "has a \"%s\" that is neither a number nor true or false", name);
    }
    if (number != 0.0 && number != 1.0) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "has the \"%s\" %g; only 0 and 1 are supported", name, number);
    }
    *masked = *masked || number == 0.0;
    return QLORA_OK;
}

// Refuses what would change the text or its training, and lists the names that have no effect: a
// model's own template gets them all.
static qlora_result qlora__text_message_names(qlora__env* env, qlora__text_loader* loader,
                                              const qlora__json_token* node) {
    static const char* const used[] = {"role", "from", "content", "value", "weight", "train"};
    // names that a model's own template knows what to do with; a built-in one does not
    static const char* const passed[] = {"reasoning_content", "reasoning", "thinking",
                                         "tool_calls",        "name",      "tool_call_id"};
    static const char* const refused[] = {
        "reasoning_content", "reasoning",    "thinking", "tool_calls", "function_call",
        "tool_call_id",      "train_detail", "images",   "audio",      "videos"};
    bool built_in = loader->desc->chat->built_in;
    const qlora__json* json = loader->json;
    const qlora__json_token* key = node + 1;
    for (uint32_t i = 0; node->kind == QLORA__JSON_OBJECT && i < node->count; i++) {
        const char* name = qlora__text_json_text(json, key);
        const qlora__json_token* value = qlora__text_json_next(json, key);
        bool known = !qlora__text_is_filled(value);
        for (size_t k = 0; k < QLORA__TEXT_COUNT(used); k++) {
            known = known || strcmp(name, used[k]) == 0;
        }
        for (size_t k = 0; k < QLORA__TEXT_COUNT(passed) && !built_in && !known; k++) {
            known = strcmp(name, passed[k]) == 0;
        }
        for (size_t k = 0; k < QLORA__TEXT_COUNT(refused) && !known; k++) {
            if (strcmp(name, refused[k]) == 0) {
                return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                       "has \"%s\", which is not supported", name);
            }
        }
        if (!known && built_in) {
            QLORA__TRY(qlora__text_ignore(env, loader->data, "messages/", name));
        }
        key = qlora__text_json_next(json, value);
    }
    return QLORA_OK;
}

// A value with two names: the one that is there. With both it is unclear which of them counts.
static qlora_result qlora__text_message_either(qlora__env* env, const qlora__json* json,
                                               const qlora__json_token* node, const char* name,
                                               const char* other, const qlora__json_token** out) {
    const qlora__json_token* second = qlora__text_json_get(json, node, other);
    *out = qlora__text_json_get(json, node, name);
    if (!qlora__text_json_absent(*out) && !qlora__text_json_absent(second)) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "has both \"%s\" and \"%s\"", name, other);
    }
    *out = qlora__text_json_absent(*out) ? second : *out;
    return QLORA_OK;
}

static qlora_result qlora__text_message_read(qlora__env* env, qlora__text_loader* loader,
                                             const qlora__json_token* node, bool masked) {
    const qlora__json* json = loader->json;
    const qlora__json_token* role = NULL;
    const qlora__json_token* content = NULL;
    const char* name = NULL;
    QLORA__TRY(qlora__text_message_either(env, json, node, "role", "from", &role));
    QLORA__TRY(qlora__text_message_either(env, json, node, "content", "value", &content));
    QLORA__TRY(qlora__text_message_role(env, json, node, &name));
    if (loader->desc->chat->built_in && strcmp(name, "system") != 0 && strcmp(name, "user") != 0 &&
        strcmp(name, "assistant") != 0) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "has the role \"%.60s\", which is not supported by the chat format "
                               "%s",
                               name, loader->desc->chat->name);
    }
    QLORA__TRY(qlora__text_message_names(env, loader, node));
    QLORA__TRY(qlora__text_switch(env, json, node, "weight", &masked));
    QLORA__TRY(qlora__text_switch(env, json, node, "train", &masked));
    if (qlora__text_json_string(content)) {
        QLORA__TRY(qlora__text_message_add(env, loader, name, qlora__text_json_text(json, content),
                                           qlora__text_json_size(content), masked));
    } else if (content != NULL && content->kind == QLORA__JSON_ARRAY) {
        size_t at = loader->work.count;
        QLORA__TRY(qlora__text_message_parts(env, loader, content));
        // the parts may still move: their place is known when all messages are read
        QLORA__TRY(
            qlora__text_message_add(env, loader, name, NULL, loader->work.count - at, masked));
    } else if (qlora__text_json_absent(content) &&
               qlora__text_is_filled(qlora__text_json_get(json, node, "tool_calls"))) {
        QLORA__TRY(qlora__text_message_add(env, loader, name, "", 0, masked));
        loader->messages[loader->message_count - 1].content = NULL; // None, as it is given
    } else {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "has no text in \"content\" (or \"value\")");
    }
    loader->messages[loader->message_count - 1].node = node;
    return QLORA_OK;
}

static qlora_result qlora__text_messages_read(qlora__env* env, qlora__text_loader* loader,
                                              const qlora__json_token* array, const char* name,
                                              bool masked) {
    if (array->kind != QLORA__JSON_ARRAY) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "\"%s\" is not a list", name);
    }
    const qlora__json_token* node = array + 1;
    for (uint32_t i = 0; i < array->count; i++) {
        qlora_result r = qlora__text_message_read(env, loader, node, masked);
        if (r != QLORA_OK) {
            return qlora__env_wrap(env, r, "\"%s\": message %lu ", name, (unsigned long)i + 1);
        }
        node = qlora__text_json_next(loader->json, node);
    }
    return QLORA_OK;
}

// Where the contents in parts are, and which turns are trained.
static void qlora__text_data_turns(const qlora__text_loader* loader) {
    size_t at = 0;
    size_t last = 0;
    for (size_t i = 0; i < loader->message_count; i++) {
        qlora__text_turn* message = &loader->messages[i];
        if (message->parts) {
            message->content = message->length > 0 ? loader->work.data + at : "";
            at += message->length;
        }
        last = strcmp(message->role, "assistant") == 0 ? i : last;
    }
    for (size_t i = 0; i < loader->message_count; i++) {
        qlora__text_turn* message = &loader->messages[i];
        bool only = loader->desc->last_turn_only || loader->desc->preference != QLORA_TEXT_ANSWERS;
        message->masked = message->masked || (only && i != last);
    }
}

static void qlora__text_data_train_all(qlora__text_loader* loader, size_t begin) {
    qlora_text_data* data = loader->data;
    for (size_t i = begin; loader->desc->train_prompt && i < data->ids.count; i++) {
        bool bos = i == begin && data->ids.data[i] == loader->desc->chat->bos;
        data->labels.data[i] = bos ? -100 : data->ids.data[i];
    }
}

// How many bytes at the end of two texts are the same.
static size_t qlora__text_common_end(const qlora_text_bytes* a, const qlora_text_bytes* b) {
    size_t same = 0;
    while (same < a->count && same < b->count &&
           a->data[a->count - 1 - same] == b->data[b->count - 1 - same]) {
        same++;
    }
    return same;
}

// Where the answer of turn `done` ends in talk->after: what follows it stays the same when the
// answer is another one. Two others are tried, as one may end like it. `limit` if the template
// refuses them.
static qlora_result qlora__text_data_done(qlora__env* env, qlora__text_loader* loader,
                                          qlora__text_talk* talk, size_t done, size_t count,
                                          size_t limit, size_t* out) {
    static const char* const others[] = {"a", "b"};
    qlora__text_turn* turn = &loader->messages[done];
    qlora__text_marks_seen seen;
    size_t same = SIZE_MAX;
    *out = limit;
    for (size_t i = 0; i < QLORA__TEXT_COUNT(others); i++) {
        qlora__text_turn kept = *turn;
        turn->content = others[i];
        turn->length = 1;
        turn->node = NULL;
        qlora_result r = qlora__text_talk_render(env, talk, count, false, &talk->next, NULL);
        *turn = kept;
        if (r == QLORA_ERR_FORMAT) {
            env->error[0] = 0;
            return QLORA_OK;
        }
        QLORA__TRY(r);
        size_t end = qlora__text_common_end(&talk->after, &talk->next);
        same = end < same ? end : same;
    }
    size_t at = talk->after.count - same;
    if (at < limit) { // its end marker was trained with it
        QLORA__TRY(
            qlora__text_see_markers(env, talk->chat, talk->after.data + at, limit - at, &seen));
        at += seen.first >= 0 ? talk->chat->tok->spans[seen.first].size : 0;
        *out = at < limit ? at : limit;
    }
    return QLORA_OK;
}

// desc.train_prompt, in a later sample of a record: what the sample before it, up to turn `done`,
// has not trained yet.
static qlora_result qlora__text_data_train_rest(qlora__env* env, qlora__text_loader* loader,
                                                qlora__text_talk* talk, size_t done, size_t count,
                                                size_t start) {
    qlora_text_data* data = loader->data;
    qlora_text_ids* before = &loader->numbers;
    qlora_text_bytes head = talk->after;
    size_t same = 0;
    QLORA__TRY(qlora__text_data_done(env, loader, talk, done, count, talk->spans.data[0].begin,
                                     &head.count));
    talk->spans.count = 0;
    before->count = 0;
    qlora__text_output o = qlora__text_output_start(before, NULL);
    QLORA__TRY(qlora__text_output_text(env, &o, talk->chat, &head, &talk->spans));
    const int32_t* ids = data->ids.data + start;
    while (same < before->count && same < data->ids.count - start &&
           before->data[same] == ids[same]) {
        same++;
    }
    for (size_t i = start + same; i < data->ids.count; i++) {
        data->labels.data[i] = data->ids.data[i];
    }
    return QLORA_OK;
}

// Notes whether what is trained from ids[begin] on ends with neither a stop id nor a marker.
// Whitespace after an end marker does not count.
static qlora_result qlora__text_data_ended(qlora__env* env, qlora__text_loader* loader,
                                           size_t begin) {
    qlora_text_data* data = loader->data;
    const qlora_text_chat* chat = loader->desc->chat;
    qlora_text_bytes bytes;
    qlora_result r = QLORA_OK;
    size_t whole = 0;
    bool ended = false;
    memset(&bytes, 0, sizeof bytes);
    data->endless = false; // if nothing is trained
    for (size_t i = data->labels.count; r == QLORA_OK && i > begin && !ended; i--) {
        int32_t id = data->labels.data[i - 1];
        ended = id >= 0 && (qlora__text_chat_marker(chat, id) || qlora__text_chat_stops(chat, id));
        if (id >= 0 && !ended) {
            bytes.count = 0;
            r = qlora__text_token_decode(env, loader->tok, id, false, &bytes, &whole);
            data->endless = r == QLORA_OK && bytes.count > 0 &&
                            qlora__jin_skip_space(bytes.data, bytes.count, 0) < bytes.count;
            ended = data->endless;
        }
    }
    qlora__text_bytes_free(env, &bytes);
    return r;
}

// A template that changes earlier turns: one sample for each turn that is trained.
static qlora_result qlora__text_data_by_turn(qlora__env* env, qlora__text_loader* loader,
                                             qlora__text_talk* talk) {
    qlora_text_data* data = loader->data;
    size_t done = SIZE_MAX; // the turn of the sample before
    for (size_t k = 0; k < talk->count; k++) {
        if (!qlora__text_is_trained(&talk->turns[k])) {
            continue;
        }
        if (done != SIZE_MAX) {
            QLORA__TRY(qlora__text_data_close_record(env, data, loader->begin, loader->line));
            loader->begin = data->ids.count;
        }
        qlora__text_output o = qlora__text_output_start(&data->ids, &data->labels);
        QLORA__TRY(qlora__text_talk_turn(env, talk, k, &o));
        QLORA__TRY(qlora__text_data_ended(env, loader, o.start));
        if (done == SIZE_MAX) {
            qlora__text_data_train_all(loader, o.start);
        } else if (loader->desc->train_prompt) {
            QLORA__TRY(qlora__text_data_train_rest(env, loader, talk, done, k + 1, o.start));
        }
        done = k;
    }
    return QLORA_OK;
}

// A conversation without an answer is not trained. Where it has one under another name, that would
// be a surprise.
static qlora_result qlora__text_data_answers(qlora__env* env, qlora__text_loader* loader) {
    size_t other = loader->message_count;
    for (size_t i = loader->message_count; i-- > 0;) {
        const char* role = loader->messages[i].role;
        const char* meant = qlora__text_role_of(role);
        if (strcmp(role, "assistant") == 0) {
            return QLORA_OK;
        }
        other = meant != NULL && strcmp(meant, "assistant") == 0 ? i : other;
    }
    return other == loader->message_count
               ? QLORA_OK
               : qlora__env_fail(
                     env, QLORA_ERR_FORMAT,
                     "message %lu has the \"role\" \"%.60s\", and none is \"assistant\", "
                     "whose messages are trained; such names are understood after "
                     "\"from\"",
                     (unsigned long)other + 1, loader->messages[other].role);
}

// Makes the sample, or the samples, from the collected messages.
static qlora_result qlora__text_data_chat(qlora__env* env, qlora__text_loader* loader) {
    qlora_text_data* data = loader->data;
    qlora__text_talk talk;
    memset(&talk, 0, sizeof talk);
    if (loader->message_count == 0) {
        return QLORA_OK;
    }
    qlora__text_data_turns(loader);
    data->any_chat = true;
    talk.chat = loader->desc->chat;
    talk.turns = loader->messages;
    talk.count = loader->message_count;
    talk.json = loader->json;
    talk.record = loader->record;
    if (qlora__text_asks(loader)) {
        qlora_result asked = qlora__text_ask_talk(env, loader, &talk);
        qlora__text_talk_free(env, &talk);
        return asked;
    }
    QLORA__TRY(qlora__text_data_answers(env, loader));
    qlora__text_output o = qlora__text_output_start(&data->ids, &data->labels);
    qlora_result r = qlora__text_talk_plan(env, &talk);
    if (r == QLORA_OK && talk.stable) {
        r = qlora__text_output_text(env, &o, talk.chat, &talk.whole, &talk.spans);
        r = r == QLORA_OK ? qlora__text_data_ended(env, loader, o.start) : r;
        qlora__text_data_train_all(loader, o.start);
    } else if (r == QLORA_OK) {
        r = qlora__text_data_by_turn(env, loader, &talk);
    }
    qlora__text_talk_free(env, &talk);
    return r;
}
