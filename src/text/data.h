typedef struct text__record {
    size_t begin;
    size_t count;
    size_t trained;
    size_t line;
} text__record;

struct text_data {
    text_ids ids;
    text_ids labels;
    text__record* records;
    size_t count;
    size_t capacity;
};

typedef struct text__loader {
    const text_data_desc* desc;
    text_data* data;
    text__json* json;
    text_message* messages;
    size_t message_count;
    size_t message_capacity;
    text_bytes work; // contents that had to be put together, one after another
} text__loader;

void text_data_close(text_data* data) {
    if (data != NULL) {
        text_ids_free(&data->ids);
        text_ids_free(&data->labels);
        TEXT_FREE(data->records);
        TEXT_FREE(data);
    }
}

size_t text_data_count(const text_data* data) {
    return data->count;
}

text_sample text_data_get(const text_data* data, size_t index) {
    text_sample sample;
    memset(&sample, 0, sizeof(sample));
    if (index < data->count && data->ids.data != NULL) {
        const text__record* record = &data->records[index];
        sample.ids = data->ids.data + record->begin;
        sample.labels = data->labels.data + record->begin;
        sample.count = record->count;
        sample.trained = record->trained;
        sample.line = record->line;
    }
    return sample;
}

// Everything from `begin` becomes one sample.
static bool text__data_close_record(text_data* data, size_t begin, size_t line, text_error* error) {
    void* records = data->records;
    bool good =
        text__reserve(&records, &data->capacity, data->count, 1, sizeof(text__record), error) &&
        text__ids_room(&data->ids, 1, error) && text__ids_room(&data->labels, 1, error);
    data->records = (text__record*)records;
    TEXT__TRY(good);
    text__record* record = &data->records[data->count++];
    record->begin = begin;
    record->count = data->ids.count - begin;
    record->line = line;
    record->trained = 0;
    for (size_t i = begin + 1; i < data->ids.count; i++) {
        record->trained += data->labels.data[i] != -100 ? 1 : 0;
    }
    return true;
}

static bool text__label_rest(text_data* data, bool trained, text_error* error) {
    while (data->labels.count < data->ids.count) {
        int32_t id = data->ids.data[data->labels.count];
        TEXT__TRY(text_ids_add(&data->labels, trained ? id : -100, error));
    }
    return true;
}

// BOS in front of ids[begin..), unless the text itself starts with it.
static bool text__data_bos(const text__loader* loader, size_t begin, text_error* error) {
    text_ids* ids = &loader->data->ids;
    int32_t bos = loader->desc->chat->bos;
    if (bos >= 0 && (ids->count == begin || ids->data[begin] != bos)) {
        TEXT__TRY(text_ids_add(ids, bos, error));
        memmove(ids->data + begin + 1, ids->data + begin,
                (ids->count - begin - 1) * sizeof(int32_t));
        ids->data[begin] = bos;
    }
    return bos < 0 || text_ids_add(&loader->data->labels, -100, error);
}

static bool text__data_eos(const text__loader* loader, text_error* error) {
    text_data* data = loader->data;
    int32_t eos = loader->desc->chat->eos;
    bool there = data->ids.count > 0 && data->ids.data[data->ids.count - 1] == eos;
    TEXT__TRY(eos < 0 || there || text_ids_add(&data->ids, eos, error));
    return text__label_rest(data, true, error);
}

// {"text"} and {"prompt", "completion"}: the first part (may be empty) is not trained.
static bool text__data_plain(const text__loader* loader, const char* prompt, size_t prompt_size,
                             const char* text, size_t size, text_error* error) {
    text_data* data = loader->data;
    text_tok* tok = loader->desc->tok;
    size_t begin = data->ids.count;
    if (prompt_size + size == 0) {
        return true; // an empty sample: the caller counts it
    }
    if (prompt_size > 0) {
        TEXT__TRY(text_encode(tok, prompt, prompt_size, 0, &data->ids, error));
        TEXT__TRY(text__data_bos(loader, begin, error));
        TEXT__TRY(text__label_rest(data, loader->desc->train_prompt, error));
        TEXT__TRY(text_encode(tok, text, size, TEXT_CONTINUE, &data->ids, error));
    } else {
        TEXT__TRY(text_encode(tok, text, size, 0, &data->ids, error));
        TEXT__TRY(text__data_bos(loader, begin, error));
    }
    TEXT__TRY(text__label_rest(data, true, error));
    return text__data_eos(loader, error);
}

// ---- messages

static bool text__message_add(text__loader* loader, const char* role, const char* content,
                              size_t length, bool masked, text_error* error) {
    void* data = loader->messages;
    bool good = text__reserve(&data, &loader->message_capacity, loader->message_count, 1,
                              sizeof(text_message), error);
    loader->messages = (text_message*)data;
    TEXT__TRY(good);
    text_message* message = &loader->messages[loader->message_count++];
    message->role = role;
    message->content = content;
    message->length = length;
    message->masked = masked;
    return true;
}

// The names that data sets use.
static const char* text__role_of(const char* name) {
    static const char* const names[][2] = {{"system", "system"}, {"developer", "system"},
                                           {"user", "user"},     {"human", "user"},
                                           {"prompter", "user"}, {"assistant", "assistant"},
                                           {"gpt", "assistant"}, {"model", "assistant"},
                                           {"bot", "assistant"}, {"chatgpt", "assistant"}};
    for (size_t i = 0; i < TEXT__COUNT(names); i++) {
        if (strcmp(name, names[i][0]) == 0) {
            return names[i][1];
        }
    }
    return NULL;
}

// A content in parts: [{"type": "text", "text": ...}, ...], put together in loader->work.
static bool text__message_parts(text__loader* loader, const text__node* parts, size_t* at,
                                text_error* error) {
    const text__json* json = loader->json;
    const text__node* part = parts + 1;
    *at = loader->work.count;
    for (uint32_t i = 0; i < parts->size; i++) {
        const text__node* text = text__json_get(json, part, "text");
        if (text == NULL || text->type != TEXT__J_STRING) {
            return text__fail(error, "a content part that is not text");
        }
        TEXT__TRY(text_bytes_add(&loader->work, text__json_text(json, text), text->size, error));
        part = text__json_next(json, part);
    }
    return true;
}

static bool text__is_filled(const text__node* node) {
    return !text__json_absent(node) && node->type != TEXT__J_FALSE &&
           !((node->type == TEXT__J_STRING || node->type == TEXT__J_ARRAY ||
              node->type == TEXT__J_OBJECT) &&
             node->size == 0);
}

static bool text__message_read(text__loader* loader, const text__node* node, bool masked,
                               text_error* error) {
    const text__json* json = loader->json;
    const text__node* role = text__json_get(json, node, "role");
    const text__node* content = text__json_get(json, node, "content");
    role = role != NULL ? role : text__json_get(json, node, "from");
    content = content != NULL ? content : text__json_get(json, node, "value");
    const char* name = text__json_cstring(json, role);
    if (name == NULL) {
        return text__fail(error, "has no \"role\" (or \"from\")");
    }
    const char* known = text__role_of(name);
    if (known == NULL || text__is_filled(text__json_get(json, node, "tool_calls"))) {
        return text__fail(error, "is of the role \"%.60s\"%s, which is not supported", name,
                          known == NULL ? "" : " with tool_calls");
    }
    const text__node* weight = text__json_get(json, node, "weight");
    const text__node* train = text__json_get(json, node, "train");
    masked = masked || (train != NULL && train->type == TEXT__J_FALSE) ||
             (weight != NULL && weight->type == TEXT__J_INTEGER && weight->integer == 0);
    if (content != NULL && content->type == TEXT__J_STRING) {
        return text__message_add(loader, known, text__json_text(json, content), content->size,
                                 masked, error);
    }
    if (content == NULL || content->type != TEXT__J_ARRAY) {
        return text__fail(error, "has no text in \"content\" (or \"value\")");
    }
    size_t at;
    TEXT__TRY(text__message_parts(loader, content, &at, error));
    // the address comes when everything is put together: NULL, and the place in `length`
    return text__message_add(loader, known, NULL, loader->work.count - at, masked, error);
}

static bool text__messages_read(text__loader* loader, const text__node* array, const char* name,
                                bool masked, text_error* error) {
    if (array->type != TEXT__J_ARRAY) {
        return text__fail(error, "\"%s\" is not a list", name);
    }
    const text__node* node = array + 1;
    for (uint32_t i = 0; i < array->size; i++) {
        text_error why;
        why.text[0] = 0;
        if (!text__message_read(loader, node, masked, &why)) {
            return text__fail(error, "\"%s\": message %lu %s", name, (unsigned long)i + 1,
                              why.text);
        }
        node = text__json_next(loader->json, node);
    }
    return true;
}

// The messages that were gathered become the sample.
static bool text__data_chat(text__loader* loader, text_error* error) {
    const text_data_desc* desc = loader->desc;
    text_data* data = loader->data;
    size_t at = 0;
    size_t last = 0;
    for (size_t i = 0; i < loader->message_count; i++) {
        text_message* message = &loader->messages[i];
        if (message->content == NULL) {
            message->content = message->length > 0 ? loader->work.data + at : "";
            at += message->length;
        }
        last = strcmp(message->role, "assistant") == 0 ? i : last;
    }
    for (size_t i = 0; i < loader->message_count; i++) {
        text_message* message = &loader->messages[i];
        message->masked = message->masked || (desc->last_turn_only && i != last);
    }
    if (loader->message_count == 0) {
        return true;
    }
    size_t begin = data->ids.count;
    TEXT__TRY(text_chat_encode(desc->chat, desc->tok, loader->messages, loader->message_count,
                               false, &data->ids, &data->labels, error));
    for (size_t i = begin; desc->train_prompt && i < data->ids.count; i++) {
        bool bos = i == begin && data->ids.data[i] == desc->chat->bos;
        data->labels.data[i] = bos ? -100 : data->ids.data[i];
    }
    return true;
}

// ---- one record

static const text__node* text__record_string(const text__loader* loader, const text__node* record,
                                             const char* name) {
    const text__node* node = text__json_get(loader->json, record, name);
    return node != NULL && node->type == TEXT__J_STRING ? node : NULL;
}

static bool text__record_system(text__loader* loader, const text__node* record, text_error* error) {
    const text__node* system = text__record_string(loader, record, "system");
    return system == NULL || system->size == 0 ||
           text__message_add(loader, "system", text__json_text(loader->json, system), system->size,
                             false, error);
}

// history: [[user, assistant], ...]
static bool text__record_history(text__loader* loader, const text__node* record,
                                 text_error* error) {
    const text__json* json = loader->json;
    const text__node* history = text__json_get(json, record, "history");
    if (!text__is_filled(history)) {
        return true;
    }
    const text__node* turn = history + 1;
    for (uint32_t i = 0; i < history->size; i++) {
        const text__node* user = turn + 1;
        bool good = history->type == TEXT__J_ARRAY && turn->type == TEXT__J_ARRAY &&
                    turn->size == 2 && user->type == TEXT__J_STRING &&
                    text__json_next(json, user)->type == TEXT__J_STRING;
        if (!good) {
            return text__fail(error, "\"history\" is not a list of [user, assistant]");
        }
        const text__node* reply = text__json_next(json, user);
        TEXT__TRY(text__message_add(loader, "user", text__json_text(json, user), user->size, false,
                                    error));
        TEXT__TRY(text__message_add(loader, "assistant", text__json_text(json, reply), reply->size,
                                    false, error));
        turn = text__json_next(json, turn);
    }
    return true;
}

// Alpaca and its like. In the alpaca format the input has its own heading, elsewhere it follows the
// instruction on a new line.
static bool text__record_pair(text__loader* loader, const text__node* record,
                              const text__node* question, const text__node* answer,
                              text_error* error) {
    const text__json* json = loader->json;
    const text__node* input = text__record_string(loader, record, "input");
    bool alpaca = strcmp(loader->desc->chat->format.name, "alpaca") == 0;
    bool more = input != NULL && input != question && input->size > 0;
    TEXT__TRY(text__record_system(loader, record, error));
    if (alpaca && more && loader->message_count == 0) {
        TEXT__TRY(text__message_add(loader, "system", text__alpaca_system_input,
                                    sizeof(text__alpaca_system_input) - 1, false, error));
    }
    TEXT__TRY(text__record_history(loader, record, error));
    if (more) {
        const char* between = alpaca ? "\n\n### Input:\n" : "\n";
        size_t at = loader->work.count;
        TEXT__TRY(
            text_bytes_add(&loader->work, text__json_text(json, question), question->size, error));
        if (question->size > 0) {
            TEXT__TRY(text__bytes_add_string(&loader->work, between, error));
        }
        TEXT__TRY(text_bytes_add(&loader->work, text__json_text(json, input), input->size, error));
        TEXT__TRY(text__message_add(loader, "user", NULL, loader->work.count - at, false, error));
    } else {
        TEXT__TRY(text__message_add(loader, "user", text__json_text(json, question), question->size,
                                    false, error));
    }
    TEXT__TRY(text__message_add(loader, "assistant", text__json_text(json, answer), answer->size,
                                false, error));
    return text__data_chat(loader, error);
}

static bool text__record_ids(text__loader* loader, const text__node* ids, const text__node* labels,
                             text_error* error) {
    text_data* data = loader->data;
    size_t begin = data->ids.count;
    text_error why;
    why.text[0] = 0;
    if (!text__json_ids(loader->json, ids, &data->ids, &why)) {
        return text__fail(error, "\"input_ids\": %s", why.text);
    }
    for (size_t i = begin; i < data->ids.count; i++) {
        if (data->ids.data[i] < 0) {
            return text__fail(error, "\"input_ids\": %d is negative", (int)data->ids.data[i]);
        }
    }
    if (text__json_absent(labels)) {
        return text__label_rest(data, true, error);
    }
    if (!text__json_ids(loader->json, labels, &data->labels, &why)) {
        return text__fail(error, "\"labels\": %s", why.text);
    }
    if (data->labels.count != data->ids.count) {
        return text__fail(error, "\"labels\" has %lu elements, \"input_ids\" %lu",
                          (unsigned long)(data->labels.count - begin),
                          (unsigned long)(data->ids.count - begin));
    }
    for (size_t i = begin; i < data->labels.count; i++) {
        if (data->labels.data[i] < 0 && data->labels.data[i] != -100) {
            return text__fail(error, "\"labels\": %d is neither an id nor -100",
                              (int)data->labels.data[i]);
        }
    }
    return true;
}

// Says which names the record has.
static bool text__record_unknown(const text__loader* loader, const text__node* record,
                                 text_error* error) {
    char names[200];
    size_t used = 0;
    const text__json* json = loader->json;
    const text__node* key = record + 1;
    names[0] = 0;
    for (uint32_t i = 0; i < record->size && used + 40 < sizeof(names); i++) {
        int wrote = snprintf(names + used, sizeof(names) - used, "%s%.30s", i > 0 ? ", " : "",
                             text__json_text(json, key));
        used += wrote > 0 ? (size_t)wrote : 0;
        key = text__json_next(json, text__json_next(json, key));
    }
    return text__fail(error,
                      "a record needs text, prompt and completion, messages, conversations, "
                      "instruction and output, question and answer, or input_ids; this one "
                      "has: %s",
                      names);
}

// Both as strings: plain text. Both as lists: messages.
static bool text__record_completion(text__loader* loader, const text__node* prompt,
                                    const text__node* completion, text_error* error) {
    const text__json* json = loader->json;
    if (prompt->type == TEXT__J_STRING && completion->type == TEXT__J_STRING) {
        return text__data_plain(loader, text__json_text(json, prompt), prompt->size,
                                text__json_text(json, completion), completion->size, error);
    }
    if (prompt->type == TEXT__J_ARRAY && completion->type == TEXT__J_ARRAY) {
        return text__messages_read(loader, prompt, "prompt", true, error) &&
               text__messages_read(loader, completion, "completion", false, error) &&
               text__data_chat(loader, error);
    }
    return text__fail(error, "prompt and completion must be two strings or two lists of messages");
}

static bool text__record_read(text__loader* loader, const text__node* record, text_error* error) {
    static const char* const pairs[][2] = {{"instruction", "output"},
                                           {"instruction", "response"},
                                           {"question", "answer"},
                                           {"input", "output"}};
    const text__json* json = loader->json;
    if (record->type != TEXT__J_OBJECT) {
        return text__fail(error, "a record must be an object {...}");
    }
    if (text__is_filled(text__json_get(json, record, "tools"))) {
        return text__fail(error, "\"tools\" are not supported");
    }
    const text__node* ids = text__json_get(json, record, "input_ids");
    if (ids != NULL) {
        return text__record_ids(loader, ids, text__json_get(json, record, "labels"), error);
    }
    const text__node* list = text__json_get(json, record, "messages");
    if (list != NULL) {
        return text__messages_read(loader, list, "messages", false, error) &&
               text__data_chat(loader, error);
    }
    list = text__json_get(json, record, "conversations");
    if (list != NULL) {
        return text__record_system(loader, record, error) &&
               text__messages_read(loader, list, "conversations", false, error) &&
               text__data_chat(loader, error);
    }
    const text__node* prompt = text__json_get(json, record, "prompt");
    const text__node* completion = text__json_get(json, record, "completion");
    completion = completion != NULL ? completion : text__json_get(json, record, "response");
    if (prompt != NULL && completion != NULL) {
        return text__record_completion(loader, prompt, completion, error);
    }
    for (size_t i = 0; i < TEXT__COUNT(pairs); i++) {
        const text__node* question = text__record_string(loader, record, pairs[i][0]);
        const text__node* answer = text__record_string(loader, record, pairs[i][1]);
        if (question != NULL && answer != NULL) {
            return text__record_pair(loader, record, question, answer, error);
        }
    }
    const text__node* text = text__record_string(loader, record, "text");
    if (text != NULL) {
        return text__data_plain(loader, NULL, 0, text__json_text(json, text), text->size, error);
    }
    return text__record_unknown(loader, record, error);
}

static bool text__record_take(text__loader* loader, const text__node* record, size_t line,
                              text_error* error) {
    size_t begin = loader->data->ids.count;
    text_error why;
    why.text[0] = 0;
    loader->message_count = 0;
    loader->work.count = 0;
    if (!text__record_read(loader, record, &why)) {
        return text__fail(error, "%s:%lu: %s", loader->json->name, (unsigned long)line, why.text);
    }
    return text__data_close_record(loader->data, begin, line, error);
}

// ---- files

// [record, record, ...]
static bool text__data_array(text__loader* loader, text_error* error) {
    text__json* json = loader->json;
    TEXT__TRY(text__json_parse(json, error));
    text__json_space(json);
    if (json->at < json->size) {
        return text__json_fail(json, "more text after the value", error);
    }
    const text__node* record = json->nodes + 1;
    size_t line = 1;
    size_t seen = 0;
    for (uint32_t i = 0; i < json->nodes[0].size; i++) {
        size_t at = record->type == TEXT__J_STRING ? seen : record->at;
        line += text__line_of(json->source + seen, at - seen) - 1;
        seen = at;
        TEXT__TRY(text__record_take(loader, record, line, error));
        record = text__json_next(json, record);
    }
    return true;
}

// One record a line. A record may go over several lines, but two are never in one.
static bool text__data_lines(text__loader* loader, const char* source, size_t size, size_t at,
                             text_error* error) {
    text__json* json = loader->json;
    size_t line = 1;
    for (;;) {
        size_t start = at;
        while (at < size && source[at] != 0 && strchr(" \t\r\n", source[at]) != NULL) {
            at++;
        }
        line += text__line_of(source + start, at - start) - 1;
        if (at == size) {
            return true;
        }
        json->source = source + at;
        json->size = size - at;
        json->at = 0;
        json->line_offset = line - 1;
        if (json->size >= UINT32_MAX / 2) {
            json->size = UINT32_MAX / 2 - 1; // the limit of one record, not of the file
        }
        TEXT__TRY(text__json_parse(json, error));
        size_t end = json->at;
        while (end < json->size && strchr(" \t\r", json->source[end]) != NULL &&
               json->source[end] != 0) {
            end++;
        }
        if (at + end < size && source[at + end] != '\n') {
            json->at = end;
            return text__json_fail(json, "more text after the record", error);
        }
        TEXT__TRY(text__record_take(loader, json->nodes, line, error));
        line += text__line_of(source + at, end) - 1;
        at += end;
    }
}

static bool text__data_json(text__loader* loader, const char* name, const char* source, size_t size,
                            text_error* error) {
    text__json json;
    memset(&json, 0, sizeof(json));
    json.name = name;
    json.source = source;
    json.size = size;
    size_t start = size >= 3 && memcmp(source, "\xEF\xBB\xBF", 3) == 0 ? 3 : 0;
    json.at = start;
    text__json_space(&json);
    loader->json = &json;
    bool array = json.at < size && source[json.at] == '[';
    bool good = array ? text__data_array(loader, error)
                      : text__data_lines(loader, source, size, start, error);
    text__json_free(&json);
    loader->json = NULL;
    return good;
}

// ids[begin..) of one document, without BOS, become samples of at most chunk_tokens. Without a BOS
// every sample starts with the last token of the one before, so that each token is a target once.
static bool text__data_chunk(const text__loader* loader, const text_ids* document, size_t line,
                             text_error* error) {
    text_data* data = loader->data;
    int32_t bos = loader->desc->chat->bos;
    size_t limit = loader->desc->chunk_tokens > 0 ? loader->desc->chunk_tokens : SIZE_MAX;
    size_t room = bos >= 0 ? limit - 1 : limit;
    size_t at = 0;
    for (;;) {
        size_t begin = data->ids.count;
        size_t count = document->count - at < room ? document->count - at : room;
        TEXT__TRY(bos < 0 || text_ids_add(&data->ids, bos, error));
        TEXT__TRY(text__label_rest(data, false, error));
        text_ids part;
        part.data = document->data + at;
        part.count = count;
        part.capacity = count;
        TEXT__TRY(text__ids_append(&data->ids, &part, error));
        TEXT__TRY(text__label_rest(data, true, error));
        TEXT__TRY(text__data_close_record(data, begin, line, error));
        at += count;
        if (at == document->count) {
            return true;
        }
        at -= bos >= 0 ? 0 : 1;
    }
}

static bool text__data_document(const text__loader* loader, const char* text, size_t size,
                                size_t line, text_error* error) {
    int32_t bos = loader->desc->chat->bos;
    int32_t eos = loader->desc->chat->eos;
    text_ids ids;
    memset(&ids, 0, sizeof(ids));
    bool good = text_encode(loader->desc->tok, text, size, 0, &ids, error);
    if (good && bos >= 0 && ids.count > 0 && ids.data[0] == bos) {
        ids.count--; // written out in the text: exactly once all the same
        memmove(ids.data, ids.data + 1, ids.count * sizeof(int32_t));
    }
    bool there = ids.count > 0 && ids.data[ids.count - 1] == eos;
    good = good && (eos < 0 || there || text_ids_add(&ids, eos, error)) &&
           (ids.count == 0 || text__data_chunk(loader, &ids, line, error));
    text_ids_free(&ids);
    return good;
}

// The line <|endoftext|> at or after `at`: its start, or `size`.
static size_t text__find_separator(const char* text, size_t size, size_t at) {
    static const char word[] = "<|endoftext|>";
    size_t length = sizeof(word) - 1;
    const char* hit;
    while ((hit = text__find(text + at, size - at, word)) != NULL) {
        size_t start = (size_t)(hit - text);
        size_t end = start + length;
        while (end < size && (text[end] == ' ' || text[end] == '\r')) {
            end++;
        }
        if ((start == 0 || text[start - 1] == '\n') && (end == size || text[end] == '\n')) {
            return start;
        }
        at = start + 1;
    }
    return size;
}

static bool text__data_text(const text__loader* loader, const char* name, const char* text,
                            size_t size, text_error* error) {
    if (size >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0) {
        text += 3;
        size -= 3;
    }
    for (size_t at = 0; at < size;) {
        uint32_t code;
        size_t length = text__utf8((const unsigned char*)text + at, size - at, &code);
        if (length == 0) {
            return text__fail(error, "%s:%lu: not UTF-8", name,
                              (unsigned long)text__line_of(text, at));
        }
        at += length;
    }
    bool separated = text__find_separator(text, size, 0) < size;
    size_t line = 1;
    size_t at = 0;
    while (at < size) {
        size_t stop = text__find_separator(text, size, at);
        size_t begin = at;
        size_t end = stop;
        while (separated && begin < end && (text[begin] == '\n' || text[begin] == '\r')) {
            begin++;
        }
        while (separated && end > begin && (text[end - 1] == '\n' || text[end - 1] == '\r')) {
            end--;
        }
        size_t start = line + text__line_of(text + at, begin - at) - 1;
        TEXT__TRY(end == begin ||
                  text__data_document(loader, text + begin, end - begin, start, error));
        const char* newline = (const char*)memchr(text + stop, '\n', size - stop);
        size_t next = newline != NULL ? (size_t)(newline - text) + 1 : size;
        line += text__line_of(text + at, next - at) - 1;
        at = next;
    }
    return true;
}

static bool text__ends_with(const char* name, const char* ending) {
    size_t length = strlen(name);
    size_t size = strlen(ending);
    return length >= size && strcmp(name + length - size, ending) == 0;
}

static bool text__data_read(text__loader* loader, const char* name, const char* source, size_t size,
                            text_error* error) {
    const text_data_desc* desc = loader->desc;
    if (desc->tok == NULL || desc->chat == NULL || desc->chunk_tokens == 1) {
        return text__fail(error, "%s: desc.tok and desc.chat are needed, chunk_tokens may not be 1",
                          name);
    }
    if (text__ends_with(name, ".txt")) {
        TEXT__TRY(text__data_text(loader, name, source, size, error));
    } else if (text__ends_with(name, ".jsonl") || text__ends_with(name, ".json") ||
               text__ends_with(name, ".ndjson")) {
        TEXT__TRY(text__data_json(loader, name, source, size, error));
    } else {
        return text__fail(error, "%s: what is it? Data files end in .jsonl, .json or .txt", name);
    }
    return loader->data->count > 0 || text__fail(error, "%s: there are no records in it", name);
}

bool text_data_load(const text_data_desc* desc, const char* name, const void* source, size_t size,
                    text_data** out, text_error* error) {
    text__loader loader;
    memset(&loader, 0, sizeof(loader));
    *out = NULL;
    loader.desc = desc;
    loader.data = (text_data*)text__zalloc(1, sizeof(text_data), error);
    TEXT__TRY(loader.data != NULL);
    bool good = text__data_read(&loader, name, (const char*)source, size, error);
    TEXT_FREE(loader.messages);
    text_bytes_free(&loader.work);
    if (!good) {
        text_data_close(loader.data);
        return false;
    }
    *out = loader.data;
    return true;
}

bool text_data_open(const text_data_desc* desc, text_data** out, text_error* error) {
    text_bytes file;
    memset(&file, 0, sizeof(file));
    *out = NULL;
    bool good = text_file_read(desc->path, &file, error) &&
                text_data_load(desc, desc->path, file.data, file.count, out, error);
    text_bytes_free(&file);
    return good;
}
