typedef struct qlora__text_record {
    size_t begin;
    size_t count;
    size_t trained;
    size_t line;
} qlora__text_record;

struct qlora_text_data {
    qlora_text* text;
    qlora_text_ids ids;
    qlora_text_ids labels;
    qlora__text_record* records;
    size_t count;
    size_t capacity;
};

// The state of reading one file.
typedef struct qlora__text_loader {
    const qlora_text_data_desc* desc;
    qlora_text_tok* tok;
    qlora_text_data* data;
    const char* name; // of the file
    qlora__json* json;
    qlora_text_message* messages;
    size_t message_count;
    size_t message_capacity;
    qlora_text_bytes work; // contents that were joined from parts, one after another
} qlora__text_loader;

static void qlora__text_data_free(qlora__env* env, qlora_text_data* data) {
    qlora__text_ids_free(env, &data->ids);
    qlora__text_ids_free(env, &data->labels);
    qlora__env_free(env, data->records, data->capacity * sizeof *data->records);
    qlora__env_free(env, data, sizeof *data);
}

// Everything from `begin` becomes one sample.
static qlora_result qlora__text_data_close_record(qlora__env* env, qlora_text_data* data,
                                                  size_t begin, size_t line) {
    void* records = data->records;
    qlora_result r = qlora__text_reserve(env, &records, &data->capacity, data->count, 1,
                                         sizeof(qlora__text_record));
    data->records = (qlora__text_record*)records;
    QLORA__TRY(r);
    // even a file of empty records has arrays to point into
    QLORA__TRY(qlora__text_ids_room(env, &data->ids, 1));
    QLORA__TRY(qlora__text_ids_room(env, &data->labels, 1));
    qlora__text_record* record = &data->records[data->count++];
    record->begin = begin;
    record->count = data->ids.count - begin;
    record->line = line;
    record->trained = 0;
    for (size_t i = begin + 1; i < data->ids.count; i++) {
        record->trained += data->labels.data[i] != -100 ? 1 : 0;
    }
    return QLORA_OK;
}

static qlora_result qlora__text_label_rest(qlora__env* env, qlora_text_data* data, bool trained) {
    while (data->labels.count < data->ids.count) {
        int32_t id = data->ids.data[data->labels.count];
        QLORA__TRY(qlora__text_ids_add(env, &data->labels, trained ? id : -100));
    }
    return QLORA_OK;
}

// BOS before ids[begin..), unless the text itself starts with it.
static qlora_result qlora__text_data_bos(qlora__env* env, const qlora__text_loader* loader,
                                         size_t begin) {
    qlora_text_ids* ids = &loader->data->ids;
    int32_t bos = loader->desc->chat->bos;
    if (bos >= 0 && (ids->count == begin || ids->data[begin] != bos)) {
        QLORA__TRY(qlora__text_ids_add(env, ids, bos));
        memmove(ids->data + begin + 1, ids->data + begin,
                (ids->count - begin - 1) * sizeof(int32_t));
        ids->data[begin] = bos;
    }
    return bos < 0 ? QLORA_OK : qlora__text_ids_add(env, &loader->data->labels, -100);
}

static qlora_result qlora__text_data_eos(qlora__env* env, const qlora__text_loader* loader) {
    qlora_text_data* data = loader->data;
    int32_t eos = loader->desc->chat->eos;
    bool there = data->ids.count > 0 && data->ids.data[data->ids.count - 1] == eos;
    if (eos >= 0 && !there) {
        QLORA__TRY(qlora__text_ids_add(env, &data->ids, eos));
    }
    return qlora__text_label_rest(env, data, true);
}

// {"text"} and {"prompt", "completion"}: the first part, which may be empty, is not trained.
static qlora_result qlora__text_data_plain(qlora__env* env, const qlora__text_loader* loader,
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
                                         loader->message_count, 1, sizeof(qlora_text_message));
    loader->messages = (qlora_text_message*)data;
    QLORA__TRY(r);
    qlora_text_message* message = &loader->messages[loader->message_count++];
    message->role = role;
    message->content = content;
    message->length = length;
    message->masked = masked;
    return QLORA_OK;
}

// The names that data sets use.
static const char* qlora__text_role_of(const char* name) {
    static const char* const names[][2] = {{"system", "system"}, {"developer", "system"},
                                           {"user", "user"},     {"human", "user"},
                                           {"prompter", "user"}, {"assistant", "assistant"},
                                           {"gpt", "assistant"}, {"model", "assistant"},
                                           {"bot", "assistant"}, {"chatgpt", "assistant"}};
    for (size_t i = 0; i < QLORA__TEXT_COUNT(names); i++) {
        if (strcmp(name, names[i][0]) == 0) {
            return names[i][1];
        }
    }
    return NULL;
}

// Joins a content in parts, [{"type": "text", "text": ...}, ...], in loader->work.
static qlora_result qlora__text_message_parts(qlora__env* env, qlora__text_loader* loader,
                                              const qlora__json_token* parts, size_t* at) {
    const qlora__json* json = loader->json;
    const qlora__json_token* part = parts + 1;
    *at = loader->work.count;
    for (uint32_t i = 0; i < parts->count; i++) {
        const qlora__json_token* text = qlora__text_json_get(json, part, "text");
        if (!qlora__text_json_string(text)) {
            return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                   "contains a content part that is not text");
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

static qlora_result qlora__text_message_read(qlora__env* env, qlora__text_loader* loader,
                                             const qlora__json_token* node, bool masked) {
    const qlora__json* json = loader->json;
    const qlora__json_token* role = qlora__text_json_get(json, node, "role");
    const qlora__json_token* content = qlora__text_json_get(json, node, "content");
    role = role != NULL ? role : qlora__text_json_get(json, node, "from");
    content = content != NULL ? content : qlora__text_json_get(json, node, "value");
    const char* name = qlora__text_json_cstring(json, role);
    if (name == NULL) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "has no \"role\" (or \"from\")");
    }
    const char* known = qlora__text_role_of(name);
    if (known == NULL || qlora__text_is_filled(qlora__text_json_get(json, node, "tool_calls"))) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "has the role \"%.60s\"%s, which is not supported", name,
                               known == NULL ? "" : " with tool_calls");
    }
    const qlora__json_token* weight = qlora__text_json_get(json, node, "weight");
    const qlora__json_token* train = qlora__text_json_get(json, node, "train");
    int64_t number = 1;
    masked = masked || qlora__text_json_false(train) ||
             (qlora__text_json_integer(json, weight, &number) && number == 0);
    if (qlora__text_json_string(content)) {
        return qlora__text_message_add(env, loader, known, qlora__text_json_text(json, content),
                                       qlora__text_json_size(content), masked);
    }
    if (content == NULL || content->kind != QLORA__JSON_ARRAY) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "has no text in \"content\" (or \"value\")");
    }
    size_t at = 0;
    QLORA__TRY(qlora__text_message_parts(env, loader, content, &at));
    // the parts may still move: NULL until all messages are read, and the size in `length`
    return qlora__text_message_add(env, loader, known, NULL, loader->work.count - at, masked);
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

// Makes the sample from the collected messages.
static qlora_result qlora__text_data_chat(qlora__env* env, qlora__text_loader* loader) {
    const qlora_text_data_desc* desc = loader->desc;
    qlora_text_data* data = loader->data;
    size_t at = 0;
    size_t last = 0;
    for (size_t i = 0; i < loader->message_count; i++) {
        qlora_text_message* message = &loader->messages[i];
        if (message->content == NULL) {
            message->content = message->length > 0 ? loader->work.data + at : "";
            at += message->length;
        }
        last = strcmp(message->role, "assistant") == 0 ? i : last;
    }
    for (size_t i = 0; i < loader->message_count; i++) {
        qlora_text_message* message = &loader->messages[i];
        message->masked = message->masked || (desc->last_turn_only && i != last);
    }
    if (loader->message_count == 0) {
        return QLORA_OK;
    }
    size_t begin = data->ids.count;
    QLORA__TRY(qlora__text_chat_encode(env, desc->chat, loader->messages, loader->message_count,
                                       false, &data->ids, &data->labels));
    for (size_t i = begin; desc->train_prompt && i < data->ids.count; i++) {
        bool bos = i == begin && data->ids.data[i] == desc->chat->bos;
        data->labels.data[i] = bos ? -100 : data->ids.data[i];
    }
    return QLORA_OK;
}

// ---- one record

static const qlora__json_token* qlora__text_record_string(const qlora__text_loader* loader,
                                                          const qlora__json_token* record,
                                                          const char* name) {
    const qlora__json_token* node = qlora__text_json_get(loader->json, record, name);
    return qlora__text_json_string(node) ? node : NULL;
}

static qlora_result qlora__text_record_system(qlora__env* env, qlora__text_loader* loader,
                                              const qlora__json_token* record) {
    const qlora__json_token* system = qlora__text_record_string(loader, record, "system");
    if (system == NULL || qlora__text_json_size(system) == 0) {
        return QLORA_OK;
    }
    return qlora__text_message_add(env, loader, "system",
                                   qlora__text_json_text(loader->json, system),
                                   qlora__text_json_size(system), false);
}

// history: [[user, assistant], ...]
static qlora_result qlora__text_record_history(qlora__env* env, qlora__text_loader* loader,
                                               const qlora__json_token* record) {
    const qlora__json* json = loader->json;
    const qlora__json_token* history = qlora__text_json_get(json, record, "history");
    if (!qlora__text_is_filled(history)) {
        return QLORA_OK;
    }
    static const char wanted[] = "\"history\" is not a list of [user, assistant]";
    if (history->kind != QLORA__JSON_ARRAY) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s", wanted);
    }
    const qlora__json_token* turn = history + 1;
    for (uint32_t i = 0; i < history->count; i++) {
        const qlora__json_token* user = turn + 1;
        if (turn->kind != QLORA__JSON_ARRAY || turn->count != 2 || !qlora__text_json_string(user) ||
            !qlora__text_json_string(qlora__text_json_next(json, user))) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s", wanted);
        }
        const qlora__json_token* reply = qlora__text_json_next(json, user);
        QLORA__TRY(qlora__text_message_add(env, loader, "user", qlora__text_json_text(json, user),
                                           qlora__text_json_size(user), false));
        QLORA__TRY(qlora__text_message_add(env, loader, "assistant",
                                           qlora__text_json_text(json, reply),
                                           qlora__text_json_size(reply), false));
        turn = qlora__text_json_next(json, turn);
    }
    return QLORA_OK;
}

// Alpaca and similar records. In the alpaca format the input has its own heading; elsewhere it
// follows the instruction on a new line.
static qlora_result qlora__text_record_pair(qlora__env* env, qlora__text_loader* loader,
                                            const qlora__json_token* record,
                                            const qlora__json_token* question,
                                            const qlora__json_token* answer) {
    const qlora__json* json = loader->json;
    const qlora__json_token* input = qlora__text_record_string(loader, record, "input");
    bool alpaca = strcmp(loader->desc->chat->format.name, "alpaca") == 0;
    bool more = input != NULL && input != question && qlora__text_json_size(input) > 0;
    QLORA__TRY(qlora__text_record_system(env, loader, record));
    if (alpaca && more && loader->message_count == 0) {
        QLORA__TRY(qlora__text_message_add(env, loader, "system", qlora__text_alpaca_system_input,
                                           sizeof(qlora__text_alpaca_system_input) - 1, false));
    }
    QLORA__TRY(qlora__text_record_history(env, loader, record));
    if (more) {
        const char* between = alpaca ? "\n\n### Input:\n" : "\n";
        size_t at = loader->work.count;
        QLORA__TRY(qlora__text_bytes_add(env, &loader->work, qlora__text_json_text(json, question),
                                         qlora__text_json_size(question)));
        if (qlora__text_json_size(question) > 0) {
            QLORA__TRY(qlora__text_bytes_add(env, &loader->work, between, strlen(between)));
        }
        QLORA__TRY(qlora__text_bytes_add(env, &loader->work, qlora__text_json_text(json, input),
                                         qlora__text_json_size(input)));
        QLORA__TRY(
            qlora__text_message_add(env, loader, "user", NULL, loader->work.count - at, false));
    } else {
        QLORA__TRY(qlora__text_message_add(env, loader, "user",
                                           qlora__text_json_text(json, question),
                                           qlora__text_json_size(question), false));
    }
    QLORA__TRY(qlora__text_message_add(env, loader, "assistant",
                                       qlora__text_json_text(json, answer),
                                       qlora__text_json_size(answer), false));
    return qlora__text_data_chat(env, loader);
}

static qlora_result qlora__text_record_ids(qlora__env* env, qlora__text_loader* loader,
                                           const qlora__json_token* ids,
                                           const qlora__json_token* labels) {
    qlora_text_data* data = loader->data;
    size_t begin = data->ids.count;
    qlora_result r = qlora__text_json_ids(env, loader->json, ids, &data->ids);
    if (r != QLORA_OK) {
        return qlora__env_wrap(env, r, "\"input_ids\": ");
    }
    for (size_t i = begin; i < data->ids.count; i++) {
        if (data->ids.data[i] < 0) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT, "\"input_ids\": %d is negative",
                                   (int)data->ids.data[i]);
        }
    }
    if (qlora__text_json_absent(labels)) {
        return qlora__text_label_rest(env, data, true);
    }
    r = qlora__text_json_ids(env, loader->json, labels, &data->labels);
    if (r != QLORA_OK) {
        return qlora__env_wrap(env, r, "\"labels\": ");
    }
    if (data->labels.count != data->ids.count) {
        return qlora__env_fail(
            env, QLORA_ERR_FORMAT, "\"labels\" has %lu elements, \"input_ids\" %lu",
            (unsigned long)(data->labels.count - begin), (unsigned long)(data->ids.count - begin));
    }
    for (size_t i = begin; i < data->labels.count; i++) {
        if (data->labels.data[i] < 0 && data->labels.data[i] != -100) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "\"labels\": %d is neither an id nor -100",
                                   (int)data->labels.data[i]);
        }
    }
    return QLORA_OK;
}

// Names the keys that the record has.
static qlora_result qlora__text_record_unknown(qlora__env* env, const qlora__text_loader* loader,
                                               const qlora__json_token* record) {
    char names[200];
    size_t used = 0;
    const qlora__json* json = loader->json;
    const qlora__json_token* key = record + 1;
    names[0] = 0;
    for (uint32_t i = 0; i < record->count && used + 40 < sizeof(names); i++) {
        int wrote = snprintf(names + used, sizeof(names) - used, "%s%.30s", i > 0 ? ", " : "",
                             qlora__text_json_text(json, key));
        used += wrote > 0 ? (size_t)wrote : 0;
        key = qlora__text_json_next(json, qlora__text_json_next(json, key));
    }
    return qlora__env_fail(env, QLORA_ERR_FORMAT,
                           "unrecognised record: expected text, prompt and completion, messages, "
                           "conversations, instruction and output, question and answer, or "
                           "input_ids; found %s",
                           names[0] != 0 ? names : "no keys");
}

// Both as strings: plain text. Both as lists: messages.
static qlora_result qlora__text_record_completion(qlora__env* env, qlora__text_loader* loader,
                                                  const qlora__json_token* prompt,
                                                  const qlora__json_token* completion) {
    const qlora__json* json = loader->json;
    if (prompt->kind == QLORA__JSON_STRING && completion->kind == QLORA__JSON_STRING) {
        return qlora__text_data_plain(
            env, loader, qlora__text_json_text(json, prompt), qlora__text_json_size(prompt),
            qlora__text_json_text(json, completion), qlora__text_json_size(completion));
    }
    if (prompt->kind == QLORA__JSON_ARRAY && completion->kind == QLORA__JSON_ARRAY) {
        QLORA__TRY(qlora__text_messages_read(env, loader, prompt, "prompt", true));
        QLORA__TRY(qlora__text_messages_read(env, loader, completion, "completion", false));
        return qlora__text_data_chat(env, loader);
    }
    return qlora__env_fail(env, QLORA_ERR_FORMAT,
                           "prompt and completion must be two strings or two lists of messages");
}

static qlora_result qlora__text_record_read(qlora__env* env, qlora__text_loader* loader,
                                            const qlora__json_token* record) {
    static const char* const pairs[][2] = {{"instruction", "output"},
                                           {"instruction", "response"},
                                           {"question", "answer"},
                                           {"input", "output"}};
    const qlora__json* json = loader->json;
    if (record->kind != QLORA__JSON_OBJECT) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "a record must be an object {...}");
    }
    if (qlora__text_is_filled(qlora__text_json_get(json, record, "tools"))) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "\"tools\" are not supported");
    }
    const qlora__json_token* ids = qlora__text_json_get(json, record, "input_ids");
    if (ids != NULL) {
        return qlora__text_record_ids(env, loader, ids,
                                      qlora__text_json_get(json, record, "labels"));
    }
    const qlora__json_token* list = qlora__text_json_get(json, record, "messages");
    if (list != NULL) {
        QLORA__TRY(qlora__text_messages_read(env, loader, list, "messages", false));
        return qlora__text_data_chat(env, loader);
    }
    list = qlora__text_json_get(json, record, "conversations");
    if (list != NULL) {
        QLORA__TRY(qlora__text_record_system(env, loader, record));
        QLORA__TRY(qlora__text_messages_read(env, loader, list, "conversations", false));
        return qlora__text_data_chat(env, loader);
    }
    const qlora__json_token* prompt = qlora__text_json_get(json, record, "prompt");
    const qlora__json_token* completion = qlora__text_json_get(json, record, "completion");
    completion = completion != NULL ? completion : qlora__text_json_get(json, record, "response");
    if (prompt != NULL && completion != NULL) {
        return qlora__text_record_completion(env, loader, prompt, completion);
    }
    for (size_t i = 0; i < QLORA__TEXT_COUNT(pairs); i++) {
        const qlora__json_token* question = qlora__text_record_string(loader, record, pairs[i][0]);
        const qlora__json_token* answer = qlora__text_record_string(loader, record, pairs[i][1]);
        if (question != NULL && answer != NULL) {
            return qlora__text_record_pair(env, loader, record, question, answer);
        }
    }
    const qlora__json_token* text = qlora__text_record_string(loader, record, "text");
    if (text != NULL) {
        return qlora__text_data_plain(env, loader, NULL, 0, qlora__text_json_text(json, text),
                                      qlora__text_json_size(text));
    }
    return qlora__text_record_unknown(env, loader, record);
}

static qlora_result qlora__text_record_take(qlora__env* env, qlora__text_loader* loader,
                                            const qlora__json_token* record, size_t line) {
    size_t begin = loader->data->ids.count;
    loader->message_count = 0;
    loader->work.count = 0;
    qlora_result r = qlora__text_record_read(env, loader, record);
    if (r != QLORA_OK) {
        return qlora__env_wrap(env, r, "%s:%lu: ", loader->name, (unsigned long)line);
    }
    return qlora__text_data_close_record(env, loader->data, begin, line);
}

// ---- files

// How many lines end in these bytes.
static size_t qlora__text_lines(const char* text, size_t size) {
    size_t lines = 0;
    const char* p = text;
    const char* end = text + size;
    while (p < end && (p = (const char*)memchr(p, '\n', (size_t)(end - p))) != NULL) {
        lines++;
        p++;
    }
    return lines;
}

// [record, record, ...]
static qlora_result qlora__text_data_array(qlora__env* env, qlora__text_loader* loader,
                                           const char* source, size_t size) {
    qlora__json* json = loader->json;
    QLORA__TRY(qlora__text_json(env, loader->name, source, size, json));
    const qlora__json_token* record = json->tokens + 1;
    size_t line = 1;
    size_t seen = 0;
    for (uint32_t i = 0; i < json->tokens[0].count; i++) {
        size_t at = record->kind == QLORA__JSON_STRING ? seen : record->begin;
        line += qlora__text_lines(json->text + seen, at - seen);
        seen = at;
        QLORA__TRY(qlora__text_record_take(env, loader, record, line));
        record = qlora__text_json_next(json, record);
    }
    return QLORA_OK;
}

static bool qlora__text_is_space(char c) {
    return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

// One record per line. A record may span several lines, but a line never holds two.
static qlora_result qlora__text_data_lines(qlora__env* env, qlora__text_loader* loader,
                                           const char* source, size_t size) {
    qlora__json* json = loader->json;
    json->label = loader->name;
    size_t line = 1;
    size_t at = 0;
    for (;;) {
        size_t start = at;
        while (at < size && qlora__text_is_space(source[at])) {
            at++;
        }
        line += qlora__text_lines(source + start, at - start);
        if (at == size) {
            return QLORA_OK;
        }
        size_t left = size - at;
        uint32_t end = 0;
        json->text = source + at;
        // the limit is that of one record, not of the file
        json->size = left < QLORA__JSON_MAX_BYTES ? (uint32_t)left : QLORA__JSON_MAX_BYTES;
        json->line = (uint32_t)(line - 1);
        QLORA__TRY(qlora__json_parse_one(env, json, true, &end));
        QLORA__TRY(qlora__json_decode(env, json));
        QLORA__TRY(qlora__text_record_take(env, loader, json->tokens, line));
        line += qlora__text_lines(source + at, end);
        at += end;
    }
}

static qlora_result qlora__text_data_json(qlora__env* env, qlora__text_loader* loader,
                                          const char* source, size_t size) {
    qlora__json json;
    memset(&json, 0, sizeof(json));
    if (size >= 3 && memcmp(source, "\xEF\xBB\xBF", 3) == 0) {
        source += 3;
        size -= 3;
    }
    size_t at = 0;
    while (at < size && qlora__text_is_space(source[at])) {
        at++;
    }
    loader->json = &json;
    bool array = at < size && source[at] == '[';
    qlora_result r = array ? qlora__text_data_array(env, loader, source, size)
                           : qlora__text_data_lines(env, loader, source, size);
    qlora__json_free(env, &json);
    loader->json = NULL;
    return r;
}

// Splits the ids of one document, without BOS, into samples of at most chunk_tokens. Without a BOS,
// every sample starts with the last token of the previous one, so that each token is a target once.
static qlora_result qlora__text_data_chunk(qlora__env* env, const qlora__text_loader* loader,
                                           const qlora_text_ids* document, size_t line) {
    qlora_text_data* data = loader->data;
    int32_t bos = loader->desc->chat->bos;
    size_t limit = loader->desc->chunk_tokens > 0 ? loader->desc->chunk_tokens : SIZE_MAX;
    size_t room = bos >= 0 ? limit - 1 : limit;
    size_t at = 0;
    for (;;) {
        size_t begin = data->ids.count;
        size_t count = document->count - at < room ? document->count - at : room;
        if (bos >= 0) {
            QLORA__TRY(qlora__text_ids_add(env, &data->ids, bos));
        }
        QLORA__TRY(qlora__text_label_rest(env, data, false));
        qlora_text_ids part;
        part.data = document->data + at;
        part.count = count;
        part.capacity = count;
        QLORA__TRY(qlora__text_ids_append(env, &data->ids, &part));
        QLORA__TRY(qlora__text_label_rest(env, data, true));
        QLORA__TRY(qlora__text_data_close_record(env, data, begin, line));
        at += count;
        if (at == document->count) {
            return QLORA_OK;
        }
        at -= bos >= 0 ? 0 : 1;
    }
}

static qlora_result qlora__text_data_document(qlora__env* env, const qlora__text_loader* loader,
                                              const char* text, size_t size, size_t line) {
    int32_t bos = loader->desc->chat->bos;
    int32_t eos = loader->desc->chat->eos;
    qlora_text_ids ids;
    memset(&ids, 0, sizeof(ids));
    qlora_result r = qlora__text_encode(env, loader->tok, text, size, 0, &ids);
    if (r == QLORA_OK && bos >= 0 && ids.count > 0 && ids.data[0] == bos) {
        ids.count--; // spelt out in the text: it still comes exactly once
        memmove(ids.data, ids.data + 1, ids.count * sizeof(int32_t));
    }
    bool there = ids.count > 0 && ids.data[ids.count - 1] == eos;
    if (r == QLORA_OK && eos >= 0 && !there) {
        r = qlora__text_ids_add(env, &ids, eos);
    }
    if (r == QLORA_OK && ids.count > 0) {
        r = qlora__text_data_chunk(env, loader, &ids, line);
    }
    qlora__text_ids_free(env, &ids);
    return r;
}

// The line <|endoftext|> at or after `at`: its start, or `size`.
static size_t qlora__text_find_separator(const char* text, size_t size, size_t at) {
    static const char word[] = "<|endoftext|>";
    size_t length = sizeof(word) - 1;
    const char* hit;
    while ((hit = qlora__text_find(text + at, size - at, word)) != NULL) {
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

// Documents of a plain text, separated by lines of <|endoftext|>, or the whole text.
static qlora_result qlora__text_data_text(qlora__env* env, const qlora__text_loader* loader,
                                          const char* text, size_t size) {
    if (size >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0) {
        text += 3;
        size -= 3;
    }
    for (size_t at = 0; at < size;) {
        uint32_t code = 0;
        size_t length = qlora__text_utf8((const unsigned char*)text + at, size - at, &code);
        if (length == 0) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s:%lu: not UTF-8", loader->name,
                                   (unsigned long)qlora__text_lines(text, at) + 1);
        }
        at += length;
    }
    bool separated = qlora__text_find_separator(text, size, 0) < size;
    size_t line = 1;
    size_t at = 0;
    while (at < size) {
        size_t stop = qlora__text_find_separator(text, size, at);
        size_t begin = at;
        size_t end = stop;
        while (separated && begin < end && (text[begin] == '\n' || text[begin] == '\r')) {
            begin++;
        }
        while (separated && end > begin && (text[end - 1] == '\n' || text[end - 1] == '\r')) {
            end--;
        }
        size_t start = line + qlora__text_lines(text + at, begin - at);
        if (end > begin) {
            QLORA__TRY(qlora__text_data_document(env, loader, text + begin, end - begin, start));
        }
        const char* newline = (const char*)memchr(text + stop, '\n', size - stop);
        size_t next = newline != NULL ? (size_t)(newline - text) + 1 : size;
        line += qlora__text_lines(text + at, next - at);
        at = next;
    }
    return QLORA_OK;
}

static bool qlora__text_ends_with(const char* name, const char* ending) {
    size_t length = strlen(name);
    size_t size = strlen(ending);
    return length >= size && strcmp(name + length - size, ending) == 0;
}

static qlora_result qlora__text_data_read(qlora__env* env, qlora__text_loader* loader,
                                          const char* source, size_t size) {
    const char* name = loader->name;
    if (qlora__text_ends_with(name, ".txt")) {
        QLORA__TRY(qlora__text_data_text(env, loader, source, size));
    } else if (qlora__text_ends_with(name, ".jsonl") || qlora__text_ends_with(name, ".json") ||
               qlora__text_ends_with(name, ".ndjson")) {
        QLORA__TRY(qlora__text_data_json(env, loader, source, size));
    } else {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "%s: unknown data format; the file name must end in .jsonl, .json "
                               "or .txt",
                               name);
    }
    if (loader->data->count == 0) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: the file contains no records", name);
    }
    return QLORA_OK;
}

static qlora_result qlora__text_data_need(qlora_text* text, const qlora_text_data_desc* desc,
                                          qlora_text_data** out) {
    qlora__env* env = &text->env;
    QLORA__TEXT_NEED(env, desc);
    QLORA__TEXT_NEED(env, out);
    QLORA__TEXT_NEED(env, desc->path);
    QLORA__TEXT_NEED(env, desc->chat);
    if (desc->reserved_must_be_zero0 != 0 || desc->reserved_must_be_zero1 != 0) {
        return qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                               "desc was not zeroed: a reserved field is set");
    }
    if (desc->chat->text != text) {
        return qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                               "desc->chat belongs to another text object");
    }
    if (desc->chunk_tokens == 1) { // a sample would consist of BOS alone
        return qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                               "desc->chunk_tokens is 1; it must be 0 or at least 2");
    }
    return QLORA_OK;
}

static qlora_result qlora__text_data_load(qlora_text* text, const qlora_text_data_desc* desc,
                                          const char* source, size_t size, qlora_text_data** out) {
    qlora__env* env = &text->env;
    qlora__text_loader loader;
    memset(&loader, 0, sizeof(loader));
    loader.desc = desc;
    loader.tok = desc->chat->tok;
    loader.name = desc->path;
    loader.data = (qlora_text_data*)qlora__text_zalloc(env, 1, sizeof(qlora_text_data));
    if (loader.data == NULL) {
        return QLORA_ERR_MEMORY;
    }
    loader.data->text = text;
    qlora_result r = qlora__text_data_read(env, &loader, source, size);
    qlora__env_free(env, loader.messages, loader.message_capacity * sizeof *loader.messages);
    qlora__text_bytes_free(env, &loader.work);
    if (r != QLORA_OK) {
        qlora__text_data_free(env, loader.data);
        return r;
    }
    QLORA__TEXT_LOG(env, INFO, "%s: %llu samples", loader.name,
                    (unsigned long long)loader.data->count);
    text->datas++;
    *out = loader.data;
    return QLORA_OK;
}

qlora_result qlora_text_data_load(qlora_text* text, const qlora_text_data_desc* desc,
                                  const void* data, size_t size, qlora_text_data** out) {
    if (text == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__text_enter(text, "qlora_text_data_load");
    QLORA__TRY(qlora__text_data_need(text, desc, out));
    if (data == NULL && size > 0) {
        return qlora__env_fail(&text->env, QLORA_ERR_ARGUMENT, "data is NULL");
    }
    return qlora__text_data_load(text, desc, (const char*)data, size, out);
}

qlora_result qlora_text_data_open(qlora_text* text, const qlora_text_data_desc* desc,
                                  qlora_text_data** out) {
    if (text == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__text_enter(text, "qlora_text_data_open");
    QLORA__TRY(qlora__text_data_need(text, desc, out));
    qlora_text_bytes file;
    memset(&file, 0, sizeof(file));
    qlora_result r = qlora__text_file_read(&text->env, desc->path, &file, NULL);
    r = r == QLORA_OK ? qlora__text_data_load(text, desc, file.data, file.count, out) : r;
    qlora__text_bytes_free(&text->env, &file);
    return r;
}

qlora_result qlora_text_data_close(qlora_text_data* data) {
    if (data != NULL) {
        qlora_text* text = data->text;
        qlora__text_enter(text, "qlora_text_data_close");
        text->datas--;
        qlora__text_data_free(&text->env, data);
    }
    return QLORA_OK;
}

size_t qlora_text_data_count(const qlora_text_data* data) {
    return data != NULL ? data->count : 0;
}

qlora_result qlora_text_sample_read(qlora_text_data* data, size_t index, qlora_text_sample* out) {
    if (data == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__text_enter(data->text, "qlora_text_sample_read");
    QLORA__TEXT_NEED(&data->text->env, out);
    if (index >= data->count) {
        return qlora__env_fail(&data->text->env, QLORA_ERR_ARGUMENT,
                               "index is %llu; it must be below %llu", (unsigned long long)index,
                               (unsigned long long)data->count);
    }
    const qlora__text_record* record = &data->records[index];
    out->ids = data->ids.data + record->begin;
    out->labels = data->labels.data + record->begin;
    out->count = record->count;
    out->trained = record->trained;
    out->line = record->line;
    return QLORA_OK;
}
