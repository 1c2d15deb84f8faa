// The forms of a record: the names that it must have. The first column is its name in desc.format.
typedef enum qlora__text_kind {
    QLORA__TEXT_R_IDS = 1,
    QLORA__TEXT_R_CHAT = 2,
    QLORA__TEXT_R_COMPLETION = 4,
    QLORA__TEXT_R_PAIR = 8,
    QLORA__TEXT_R_TEXT = 16,
    QLORA__TEXT_R_PREFERENCE = 32
} qlora__text_kind;

typedef struct qlora__text_form {
    const char* name;
    const char* first;
    const char* second; // or NULL
    qlora__text_kind kind;
} qlora__text_form;

static const qlora__text_form qlora__text_forms[] = {
    {"ids", "input_ids", NULL, QLORA__TEXT_R_IDS},
    {"messages", "messages", NULL, QLORA__TEXT_R_CHAT},
    {"conversations", "conversations", NULL, QLORA__TEXT_R_CHAT},
    {"prompt", "prompt", "completion", QLORA__TEXT_R_COMPLETION},
    {"prompt", "prompt", "response", QLORA__TEXT_R_COMPLETION},
    {"instruction", "instruction", "output", QLORA__TEXT_R_PAIR},
    {"instruction", "instruction", "response", QLORA__TEXT_R_PAIR},
    {"question", "question", "answer", QLORA__TEXT_R_PAIR},
    {"question", "question", "response", QLORA__TEXT_R_PAIR},
    {"text", "text", NULL, QLORA__TEXT_R_TEXT},
    {"preference", "chosen", "rejected", QLORA__TEXT_R_PREFERENCE},
    {"input", "input", "output", QLORA__TEXT_R_PAIR}}; // only if nothing else fits

enum { QLORA__TEXT_INPUT_FORM = QLORA__TEXT_COUNT(qlora__text_forms) - 1 };

// Names that are used beside those of the form.
static const struct {
    const char* name;
    int kinds;
} qlora__text_extras[] = {
    {"labels", QLORA__TEXT_R_IDS},
    {"attention_mask", QLORA__TEXT_R_IDS},
    {"position_ids", QLORA__TEXT_R_IDS},
    {"system",
     QLORA__TEXT_R_CHAT | QLORA__TEXT_R_COMPLETION | QLORA__TEXT_R_PREFERENCE | QLORA__TEXT_R_PAIR},
    {"input", QLORA__TEXT_R_PAIR},
    {"context", QLORA__TEXT_R_PAIR},
    {"history", QLORA__TEXT_R_PAIR},
    {"prompt", QLORA__TEXT_R_PREFERENCE},
    {"tools", QLORA__TEXT_R_CHAT | QLORA__TEXT_R_COMPLETION | QLORA__TEXT_R_PREFERENCE},
    {"documents", QLORA__TEXT_R_CHAT | QLORA__TEXT_R_COMPLETION | QLORA__TEXT_R_PREFERENCE},
    {"enable_thinking", QLORA__TEXT_R_CHAT | QLORA__TEXT_R_COMPLETION | QLORA__TEXT_R_PREFERENCE},
    {"thinking", QLORA__TEXT_R_CHAT | QLORA__TEXT_R_COMPLETION | QLORA__TEXT_R_PREFERENCE},
    {"chat_template_kwargs",
     QLORA__TEXT_R_CHAT | QLORA__TEXT_R_COMPLETION | QLORA__TEXT_R_PREFERENCE}};

// Names that say which tokens are trained, in ways that are not read here.
static const char* const qlora__text_masks[] = {"loss_mask", "completion_mask", "assistant_masks",
                                                "assistant_mask", "loss_weights"};

// A string, *out = NULL if it is absent, or an error that names it.
static qlora_result qlora__text_record_string(qlora__env* env, const qlora__text_loader* loader,
                                              const qlora__json_token* record, const char* name,
                                              const qlora__json_token** out) {
    const qlora__json_token* node = qlora__text_json_get(loader->json, record, name);
    *out = qlora__text_json_absent(node) ? NULL : node;
    return *out == NULL || qlora__text_json_string(node)
               ? QLORA_OK
               : qlora__env_fail(env, QLORA_ERR_FORMAT, "\"%s\" is not a string", name);
}

// Starts the messages with "system", if the record has it.
static qlora_result qlora__text_record_system(qlora__env* env, qlora__text_loader* loader,
                                              const qlora__json_token* record) {
    const qlora__json_token* system = NULL;
    const char* given = qlora__text_asks(loader) ? loader->desc->system : NULL;
    QLORA__TRY(qlora__text_record_string(env, loader, record, "system", &system));
    if (system == NULL || qlora__text_json_size(system) == 0) {
        return given == NULL
                   ? QLORA_OK
                   : qlora__text_message_add(env, loader, "system", given, strlen(given), false);
    }
    if (given != NULL) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "the record has a \"system\", and desc.system is given");
    }
    return qlora__text_message_add(env, loader, "system",
                                   qlora__text_json_text(loader->json, system),
                                   qlora__text_json_size(system), false);
}

// A list of messages, which may follow "system".
static qlora_result qlora__text_record_messages(qlora__env* env, qlora__text_loader* loader,
                                                const qlora__json_token* list, const char* name,
                                                bool masked) {
    size_t before = loader->message_count;
    QLORA__TRY(qlora__text_messages_read(env, loader, list, name, masked));
    if (before == 1 && loader->message_count > 1 &&
        strcmp(loader->messages[0].role, "system") == 0 &&
        strcmp(loader->messages[1].role, "system") == 0) {
        bool given = qlora__text_asks(loader) && loader->desc->system != NULL;
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s is given beside a system message in \"%s\"",
                               given ? "desc.system" : "\"system\"", name);
    }
    return QLORA_OK;
}

// A conversation, after "system".
static qlora_result qlora__text_record_chat(qlora__env* env, qlora__text_loader* loader,
                                            const qlora__json_token* record, const char* name) {
    QLORA__TRY(qlora__text_record_system(env, loader, record));
    QLORA__TRY(qlora__text_record_messages(
        env, loader, qlora__text_json_get(loader->json, record, name), name, false));
    return qlora__text_data_chat(env, loader);
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

// The text beside a question: "input" or "context". NULL if there is none.
static qlora_result qlora__text_record_input(qlora__env* env, const qlora__text_loader* loader,
                                             const qlora__json_token* record, bool question,
                                             const qlora__json_token** out) {
    const qlora__json_token* context = NULL;
    *out = NULL;
    if (!question) {
        QLORA__TRY(qlora__text_record_string(env, loader, record, "input", out));
    }
    QLORA__TRY(qlora__text_record_string(env, loader, record, "context", &context));
    bool input = *out != NULL && qlora__text_json_size(*out) > 0;
    if (context == NULL || qlora__text_json_size(context) == 0) {
        *out = input ? *out : NULL;
        return QLORA_OK;
    }
    if (input) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "has both \"input\" and \"context\"");
    }
    *out = context;
    return QLORA_OK;
}

// Alpaca and similar records. In the alpaca format the input has its own heading; elsewhere it
// follows the instruction on a new line.
static qlora_result qlora__text_record_pair(qlora__env* env, qlora__text_loader* loader,
                                            const qlora__json_token* record,
                                            const qlora__text_form* form) {
    const qlora__json* json = loader->json;
    const qlora__json_token* question = NULL;
    const qlora__json_token* answer = NULL;
    const qlora__json_token* input = NULL;
    QLORA__TRY(qlora__text_record_string(env, loader, record, form->first, &question));
    QLORA__TRY(qlora__text_record_string(env, loader, record, form->second, &answer));
    QLORA__TRY(
        qlora__text_record_input(env, loader, record, strcmp(form->first, "input") == 0, &input));
    bool alpaca = strcmp(loader->desc->chat->name, "alpaca") == 0;
    QLORA__TRY(qlora__text_record_system(env, loader, record));
    if (alpaca && input != NULL && loader->message_count == 0) {
        QLORA__TRY(qlora__text_message_add(env, loader, "system", qlora__text_alpaca_system_input,
                                           sizeof(qlora__text_alpaca_system_input) - 1, false));
    }
    QLORA__TRY(qlora__text_record_history(env, loader, record));
    if (input != NULL) {
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
    if (answer != NULL) { // only a prompt may lack it
        QLORA__TRY(qlora__text_message_add(env, loader, "assistant",
                                           qlora__text_json_text(json, answer),
                                           qlora__text_json_size(answer), false));
    }
    return qlora__text_data_chat(env, loader);
}

// A system message, of the record or of desc.system, has no place in plain text.
static qlora_result qlora__text_system_plain(qlora__env* env, const qlora__text_loader* loader) {
    bool given = qlora__text_asks(loader) && loader->desc->system != NULL;
    return qlora__env_fail(env, QLORA_ERR_FORMAT,
                           "%s cannot be used with a \"prompt\" that is a string; use %smessages",
                           given ? "desc.system" : "\"system\"",
                           given ? "desc.prompts ASK_CHAT, or " : "");
}

// "prompt" as a string or as messages, and the answer `name`, which may be absent: what to ask.
static qlora_result qlora__text_record_ask(qlora__env* env, qlora__text_loader* loader,
                                           const qlora__json_token* record, const char* name) {
    const qlora__json* json = loader->json;
    const char* const names[2] = {"prompt", name};
    static const char* const roles[2] = {"user", "assistant"};
    const qlora__json_token* parts[2];
    bool plain = loader->desc->prompts == QLORA_TEXT_ASK;
    for (int i = 0; i < 2; i++) {
        parts[i] = qlora__text_json_get(json, record, names[i]);
        parts[i] = qlora__text_json_absent(parts[i]) ? NULL : parts[i];
        plain = plain && (i == 1 && parts[i] == NULL ? true : qlora__text_json_string(parts[i]));
    }
    QLORA__TRY(qlora__text_record_system(env, loader, record));
    if (plain) {
        return loader->message_count > 0
                   ? qlora__text_system_plain(env, loader)
                   : qlora__text_ask_plain(env, loader, qlora__text_json_text(json, parts[0]),
                                           qlora__text_json_size(parts[0]),
                                           parts[1] != NULL ? qlora__text_json_text(json, parts[1])
                                                            : NULL,
                                           parts[1] != NULL ? qlora__text_json_size(parts[1]) : 0);
    }
    for (int i = 0; i < 2; i++) {
        if (parts[i] != NULL && parts[i]->kind == QLORA__JSON_ARRAY) {
            QLORA__TRY(qlora__text_record_messages(env, loader, parts[i], names[i], false));
        } else if (qlora__text_json_string(parts[i])) {
            QLORA__TRY(qlora__text_message_add(env, loader, roles[i],
                                               qlora__text_json_text(json, parts[i]),
                                               qlora__text_json_size(parts[i]), false));
        } else if (parts[i] != NULL) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "\"%s\" is neither a string nor a list of messages", names[i]);
        }
    }
    return qlora__text_data_chat(env, loader);
}

// Both as strings: plain text. Both as lists: messages.
static qlora_result qlora__text_record_completion(qlora__env* env, qlora__text_loader* loader,
                                                  const qlora__json_token* record,
                                                  const qlora__text_form* form) {
    const qlora__json* json = loader->json;
    const qlora__json_token* prompt = qlora__text_json_get(json, record, form->first);
    const qlora__json_token* completion = qlora__text_json_get(json, record, form->second);
    QLORA__TRY(qlora__text_record_system(env, loader, record));
    if (prompt->kind == QLORA__JSON_STRING && completion->kind == QLORA__JSON_STRING) {
        if (loader->message_count > 0) {
            return qlora__text_system_plain(env, loader);
        }
        return qlora__text_data_plain(
            env, loader, qlora__text_json_text(json, prompt), qlora__text_json_size(prompt),
            qlora__text_json_text(json, completion), qlora__text_json_size(completion));
    }
    if (prompt->kind == QLORA__JSON_ARRAY && completion->kind == QLORA__JSON_ARRAY) {
        QLORA__TRY(qlora__text_record_messages(env, loader, prompt, form->first, true));
        QLORA__TRY(qlora__text_record_messages(env, loader, completion, form->second, false));
        return qlora__text_data_chat(env, loader);
    }
    return qlora__env_fail(env, QLORA_ERR_FORMAT,
                           "\"%s\" and \"%s\" must be two strings or two lists of messages",
                           form->first, form->second);
}

// ---- token ids

static qlora_result qlora__text_record_labels(qlora__env* env, qlora__text_loader* loader,
                                              const qlora__json_token* labels, size_t begin) {
    qlora_text_data* data = loader->data;
    if (qlora__text_json_absent(labels)) {
        return qlora__text_label_rest(env, data, true);
    }
    qlora_result r = qlora__text_json_ids(env, loader->json, labels, &data->labels);
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

// Reads a list with one number per token into loader->numbers; nothing if it is absent.
static qlora_result qlora__text_record_numbers(qlora__env* env, qlora__text_loader* loader,
                                               const qlora__json_token* record, const char* name,
                                               size_t wanted) {
    const qlora__json_token* list = qlora__text_json_get(loader->json, record, name);
    loader->numbers.count = 0;
    if (qlora__text_json_absent(list)) {
        return QLORA_OK;
    }
    qlora_result r = qlora__text_json_ids(env, loader->json, list, &loader->numbers);
    if (r != QLORA_OK) {
        return qlora__env_wrap(env, r, "\"%s\": ", name);
    }
    return loader->numbers.count == wanted
               ? QLORA_OK
               : qlora__env_fail(env, QLORA_ERR_FORMAT,
                                 "\"%s\" has %lu elements, \"input_ids\" %lu", name,
                                 (unsigned long)loader->numbers.count, (unsigned long)wanted);
}

// Drops the padding that an attention mask marks: zeros before and after the ones, not trained.
static qlora_result qlora__text_record_unpad(qlora__env* env, qlora__text_loader* loader,
                                             size_t begin, bool labelled) {
    qlora_text_data* data = loader->data;
    const int32_t* mask = loader->numbers.data;
    size_t count = loader->numbers.count;
    size_t first = 0;
    size_t end = count;
    while (end > 0 && mask[end - 1] == 0) {
        end--;
    }
    while (first < end && mask[first] == 0) {
        first++;
    }
    for (size_t i = 0; i < count; i++) {
        bool inside = i >= first && i < end;
        if (inside && mask[i] != 1) {
            return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                   "\"attention_mask\": element %lu is %d; only padding at the "
                                   "start or the end can be masked",
                                   (unsigned long)i, (int)mask[i]);
        }
        if (!inside && labelled && data->labels.data[begin + i] != -100) {
            return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                   "\"attention_mask\": element %lu is 0, but its label is not "
                                   "-100",
                                   (unsigned long)i);
        }
    }
    if (count > 0) {
        size_t bytes = (end - first) * sizeof(int32_t);
        memmove(data->ids.data + begin, data->ids.data + begin + first, bytes);
        memmove(data->labels.data + begin, data->labels.data + begin + first, bytes);
        data->ids.count = begin + end - first;
        data->labels.count = data->ids.count;
    }
    return QLORA_OK;
}

static qlora_result qlora__text_record_ids(qlora__env* env, qlora__text_loader* loader,
                                           const qlora__json_token* record) {
    qlora_text_data* data = loader->data;
    const qlora__json* json = loader->json;
    size_t begin = data->ids.count;
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__text_masks); i++) {
        if (qlora__text_is_filled(qlora__text_json_get(json, record, qlora__text_masks[i]))) {
            return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                   "\"%s\" is not supported; use \"labels\"", qlora__text_masks[i]);
        }
    }
    qlora_result r = qlora__text_json_ids(
        env, json, qlora__text_json_get(json, record, "input_ids"), &data->ids);
    if (r != QLORA_OK) {
        return qlora__env_wrap(env, r, "\"input_ids\": ");
    }
    size_t count = data->ids.count - begin;
    for (size_t i = begin; i < data->ids.count; i++) {
        if (data->ids.data[i] < 0) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT, "\"input_ids\": %d is negative",
                                   (int)data->ids.data[i]);
        }
    }
    const qlora__json_token* labels = qlora__text_json_get(json, record, "labels");
    QLORA__TRY(qlora__text_record_labels(env, loader, labels, begin));
    QLORA__TRY(qlora__text_record_numbers(env, loader, record, "position_ids", count));
    for (size_t i = 0; i < loader->numbers.count; i++) {
        if (loader->numbers.data[i] != (int32_t)i) {
            return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                   "\"position_ids\": element %lu is %d; only 0, 1, 2, ... is "
                                   "supported",
                                   (unsigned long)i, (int)loader->numbers.data[i]);
        }
    }
    QLORA__TRY(qlora__text_record_numbers(env, loader, record, "attention_mask", count));
    return qlora__text_record_unpad(env, loader, begin, !qlora__text_json_absent(labels));
}

// ---- preferences

// One side of a pair as a sample: after "prompt", as plain text or as messages, or a conversation
// that contains its prompt.
static qlora_result qlora__text_record_side(qlora__env* env, qlora__text_loader* loader,
                                            const qlora__json_token* record, const char* name) {
    const qlora__json* json = loader->json;
    const qlora__json_token* prompt = qlora__text_json_get(json, record, "prompt");
    const qlora__json_token* side = qlora__text_json_get(json, record, name);
    bool given = !qlora__text_json_absent(prompt);
    loader->message_count = 0;
    loader->work.count = 0;
    QLORA__TRY(qlora__text_record_system(env, loader, record));
    if (given && prompt->kind == QLORA__JSON_STRING && side->kind == QLORA__JSON_STRING) {
        if (loader->message_count > 0) {
            return qlora__text_system_plain(env, loader);
        }
        return qlora__text_data_plain(
            env, loader, qlora__text_json_text(json, prompt), qlora__text_json_size(prompt),
            qlora__text_json_text(json, side), qlora__text_json_size(side));
    }
    if (side->kind != QLORA__JSON_ARRAY || (given && prompt->kind != QLORA__JSON_ARRAY)) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "\"prompt\" and \"%s\" must be two strings or two lists of "
                               "messages, or \"%s\" a list of messages without a \"prompt\"",
                               name, name);
    }
    if (given) {
        QLORA__TRY(qlora__text_record_messages(env, loader, prompt, "prompt", true));
    }
    QLORA__TRY(qlora__text_record_messages(env, loader, side, name, false));
    return qlora__text_data_chat(env, loader);
}

// Pairs of a better and a worse answer: two samples, of which the caller closes the second.
static qlora_result qlora__text_record_preference(qlora__env* env, qlora__text_loader* loader,
                                                  const qlora__json_token* record) {
    qlora_text_data* data = loader->data;
    if (loader->desc->preference != QLORA_TEXT_PAIRS) {
        return qlora__env_fail(
            env, QLORA_ERR_UNSUPPORTED,
            "the record is a preference pair (\"chosen\" and \"rejected\"), and supervised "
            "training needs one answer; use desc.columns completion=chosen (or messages=chosen) to "
            "take the better one, or desc.preference PAIRS to train on both");
    }
    data->desirable = true;
    QLORA__TRY(qlora__text_record_side(env, loader, record, "chosen"));
    QLORA__TRY(qlora__text_data_close_record(env, data, loader->begin, loader->line));
    loader->begin = data->ids.count;
    data->desirable = false;
    return qlora__text_record_side(env, loader, record, "rejected");
}

// true or false beside an answer says whether it is a good one: training on both would teach the
// bad ones as well. A form that is given says that this is meant.
static qlora_result qlora__text_record_judged(qlora__env* env, qlora__text_loader* loader,
                                              const qlora__json_token* record,
                                              const qlora__text_form* form) {
    const qlora__json_token* label = qlora__text_json_get(loader->json, record, "label");
    bool answer = form->kind == QLORA__TEXT_R_COMPLETION || form->kind == QLORA__TEXT_R_CHAT ||
                  form->kind == QLORA__TEXT_R_PAIR;
    bool judged =
        label != NULL && (label->kind == QLORA__JSON_TRUE || label->kind == QLORA__JSON_FALSE);
    qlora_text_preference wanted = loader->desc->preference;
    loader->data->desirable = judged && label->kind == QLORA__JSON_TRUE;
    if (qlora__text_asks(loader)) {
        return QLORA_OK;
    }
    if (wanted == QLORA_TEXT_PAIRS && form->kind != QLORA__TEXT_R_PREFERENCE) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "the record is not a pair; it needs \"chosen\" and \"rejected\"");
    }
    if (wanted == QLORA_TEXT_JUDGED && !(answer && judged)) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "the record is not a judged answer; it needs a \"label\" that is "
                               "true or false beside prompt and completion, or messages");
    }
    if (!answer || !judged || loader->form != NULL || wanted == QLORA_TEXT_JUDGED) {
        return QLORA_OK;
    }
    return qlora__env_fail(
        env, QLORA_ERR_UNSUPPORTED,
        "the record is a judged answer (\"label\" is true or false), and "
        "supervised training would learn the bad ones as well; set the format to "
        "\"%s\" to train on all of them, and KTO trains on what they say",
        form->name);
}

// ---- one record

// Names the keys that the record has.
static qlora_result qlora__text_record_unknown(qlora__env* env, const qlora__text_loader* loader,
                                               const qlora__json_token* record) {
    char names[200];
    size_t used = 0;
    const qlora__json* json = loader->json;
    const qlora__json_token* key = record + 1;
    names[0] = 0;
    for (uint32_t i = 0; i < record->count && used + 40 < sizeof(names); i++) {
        const qlora__json_token* value = qlora__text_json_next(json, key);
        int wrote = snprintf(names + used, sizeof(names) - used, "%s%.30s%s", i > 0 ? ", " : "",
                             qlora__text_json_text(json, key),
                             value->kind == QLORA__JSON_NULL ? " (null)" : "");
        used += wrote > 0 ? (size_t)wrote : 0;
        key = qlora__text_json_next(json, value);
    }
    if (loader->form != NULL) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "the record does not have the format \"%s\"; found %s", loader->form,
                               names[0] != 0 ? names : "no keys");
    }
    return qlora__env_fail(env, QLORA_ERR_FORMAT, "unrecognised record: expected %s; found %s",
                           qlora__text_asks(loader)
                               ? "prompt, messages, conversations, instruction or question"
                               : "text, prompt and completion, messages, conversations, "
                                 "instruction and output, question and answer, or input_ids",
                           names[0] != 0 ? names : "no keys");
}

// `half`: a prompt that lacks its answer.
static bool qlora__text_form_has(const qlora__text_loader* loader, const qlora__json_token* record,
                                 const qlora__text_form* form, bool half) {
    const qlora__json* json = loader->json;
    const int mute = QLORA__TEXT_R_IDS | QLORA__TEXT_R_TEXT; // what asks nothing
    bool whole = form->second == NULL ||
                 !qlora__text_json_absent(qlora__text_json_get(json, record, form->second));
    return (loader->form == NULL || strcmp(loader->form, form->name) == 0) &&
           !(qlora__text_asks(loader) && ((int)form->kind & mute) != 0) &&
           !qlora__text_json_absent(qlora__text_json_get(json, record, form->first)) &&
           (whole || (half && form->kind != QLORA__TEXT_R_PREFERENCE));
}

static bool qlora__text_form_fits(const qlora__text_loader* loader, const qlora__json_token* record,
                                  const qlora__text_form* form) {
    return qlora__text_form_has(loader, record, form, false);
}

// The one form that a record has; *out = NULL if it has none. A prompt may have half of one.
static qlora_result qlora__text_form_find(qlora__env* env, const qlora__text_loader* loader,
                                          const qlora__json_token* record, bool half,
                                          const qlora__text_form** out) {
    *out = NULL;
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__text_forms); i++) {
        const qlora__text_form* form = &qlora__text_forms[i];
        bool again = half && *out != NULL && strcmp((*out)->first, form->first) == 0;
        if (!qlora__text_form_has(loader, record, form, half) || again ||
            (i == QLORA__TEXT_INPUT_FORM && *out != NULL && (*out)->kind == form->kind)) {
            continue;
        }
        if (*out != NULL) {
            const char* one = (*out)->second != NULL && !half ? (*out)->second : (*out)->first;
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   strcmp((*out)->name, form->name) == 0
                                       ? "the record has both \"%s\" and \"%s\""
                                       : "the record has both \"%s\" and \"%s\"; set the format "
                                         "to say which one is used",
                                   one, form->second != NULL && !half ? form->second : form->first);
        }
        *out = form;
    }
    return QLORA_OK;
}

// Lists the names that the form does not use.
static qlora_result qlora__text_record_names(qlora__env* env, qlora__text_loader* loader,
                                             const qlora__json_token* record,
                                             const qlora__text_form* form) {
    const qlora__json* json = loader->json;
    const qlora__json_token* key = record + 1;
    for (uint32_t i = 0; i < record->count; i++) {
        const char* name = qlora__text_json_text(json, key);
        const qlora__json_token* value = qlora__text_json_next(json, key);
        bool used = !qlora__text_is_filled(value) || strcmp(name, form->first) == 0 ||
                    (form->second != NULL && strcmp(name, form->second) == 0);
        for (size_t k = 0; k < QLORA__TEXT_COUNT(qlora__text_extras); k++) {
            used = used || ((qlora__text_extras[k].kinds & (int)form->kind) != 0 &&
                            strcmp(name, qlora__text_extras[k].name) == 0);
        }
        bool judged = loader->desc->preference == QLORA_TEXT_JUDGED || qlora__text_asks(loader);
        used = used || (judged && strcmp(name, "label") == 0);
        if (!used) {
            QLORA__TRY(qlora__text_ignore(env, loader->data, "", name));
        }
        key = qlora__text_json_next(json, value);
    }
    return QLORA_OK;
}

static qlora_result qlora__text_record_read(qlora__env* env, qlora__text_loader* loader,
                                            const qlora__json_token* record) {
    const qlora__json* json = loader->json;
    const qlora__text_form* form = NULL;
    const qlora__json_token* text = NULL;
    loader->data->reference = NULL;
    loader->data->chat = false;
    if (record->kind != QLORA__JSON_OBJECT) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "a record must be an object {...}");
    }
    loader->record = record;
    if (loader->desc->chat->built_in &&
        qlora__text_is_filled(qlora__text_json_get(json, record, "tools"))) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "\"tools\" are not supported by the chat format %s",
                               loader->desc->chat->name);
    }
    QLORA__TRY(qlora__text_form_find(env, loader, record, false, &form));
    if (form == NULL && qlora__text_asks(loader)) {
        QLORA__TRY(qlora__text_form_find(env, loader, record, true, &form));
    }
    if (form == NULL) {
        return qlora__text_record_unknown(env, loader, record);
    }
    QLORA__TRY(qlora__text_record_judged(env, loader, record, form));
    // Of the wrong type, it is an error in every form, also in those that do not use it.
    QLORA__TRY(qlora__text_record_string(env, loader, record, "system", &text));
    QLORA__TRY(qlora__text_record_names(env, loader, record, form));
    switch (form->kind) {
    case QLORA__TEXT_R_IDS:
        return qlora__text_record_ids(env, loader, record);
    case QLORA__TEXT_R_CHAT:
        return qlora__text_record_chat(env, loader, record, form->first);
    case QLORA__TEXT_R_COMPLETION:
        return qlora__text_asks(loader) ? qlora__text_record_ask(env, loader, record, form->second)
                                        : qlora__text_record_completion(env, loader, record, form);
    case QLORA__TEXT_R_PAIR:
        return qlora__text_record_pair(env, loader, record, form);
    case QLORA__TEXT_R_PREFERENCE:
        return qlora__text_asks(loader) ? qlora__text_record_ask(env, loader, record, "chosen")
                                        : qlora__text_record_preference(env, loader, record);
    default:
        QLORA__TRY(qlora__text_record_string(env, loader, record, form->first, &text));
        return qlora__text_data_plain(env, loader, NULL, 0, qlora__text_json_text(json, text),
                                      qlora__text_json_size(text));
    }
}

static qlora_result qlora__text_record_take(qlora__env* env, qlora__text_loader* loader,
                                            const qlora__json_token* record, size_t line) {
    loader->begin = loader->data->ids.count;
    loader->line = line;
    loader->message_count = 0;
    loader->work.count = 0;
    loader->data->endless = false;
    qlora_result r = qlora__text_record_read(env, loader, record);
    if (r != QLORA_OK) {
        return qlora__env_wrap(env, r, "%s:%lu: ", loader->name, (unsigned long)line);
    }
    const qlora__json_token* label = qlora__text_json_get(loader->json, record, "label");
    if (label != NULL && label->kind == QLORA__JSON_FALSE) {
        loader->data->reference = NULL; // a bad answer is nothing to compare with
    }
    return qlora__text_data_close_record(env, loader->data, loader->begin, line);
}
