// judge_data.h - what an accepted data file means, said a second time: the text of every sample and
// which bytes of it are trained, byte for byte. Include it after second.h.
//
// A record with text whose spelling a tokenizer may change (beyond ASCII, added tokens), or with
// what only a template knows, is not judged; see judged.
#ifndef QLORA_FUZZ_JUDGE_DATA_H
#define QLORA_FUZZ_JUDGE_DATA_H

enum { CHATML, PLAIN, ALPACA, LLAMA3, OWN, CHATS }; // OWN: answers.jinja
enum { TURNS = 64 };

typedef struct judge_options {
    int chat;
    bool train_prompt;
    bool last_only;
    qlora_text_preference preference;
    bool text_only; // values are strings, as in CSV
} judge_options;

typedef struct judge_count {
    size_t accepted;
    size_t judged;
} judge_count;

// The text of a sample.
typedef struct meaning {
    char* text;
    unsigned char* trained; // for each byte
    size_t size;
    const char* refused; // why the record must not be accepted
    bool unsure;         // what the sample must be is not known here
    bool ids;            // it is a list of ids
} meaning;

// Stops with a reason, which libFuzzer prints together with the input.
static void finding(bool ok, const char* what, const char* which) {
    if (!ok) {
        fprintf(stderr, "finding: %s: %s\n", what, which);
        abort();
    }
}

static void meaning_free(meaning* m) {
    free(m->text);
    free(m->trained);
    memset(m, 0, sizeof *m);
}

static void refuse(meaning* m, bool ok, const char* why) {
    m->refused = ok || m->refused != NULL ? m->refused : why;
}

static void say(meaning* m, const char* text, size_t size, bool trained) {
    m->text = (char*)realloc(m->text, m->size + size + 1);
    m->trained = (unsigned char*)realloc(m->trained, m->size + size + 1);
    if (m->text == NULL || m->trained == NULL) {
        abort();
    }
    if (size > 0) {
        memcpy(m->text + m->size, text, size);
        memset(m->trained + m->size, trained ? 1 : 0, size);
    }
    m->size += size;
}

static void says(meaning* m, const char* text, bool trained) {
    say(m, text, strlen(text), trained);
}

static bool is_word(const second* v, const char* word) {
    return second_is(v, SECOND_STRING) && v->size == strlen(word) && strcmp(v->text, word) == 0;
}

// Neither missing, false nor empty.
static bool is_filled(const second* v) {
    return v != NULL && v->kind != SECOND_FALSE &&
           (v->kind == SECOND_TRUE || v->kind == SECOND_NUMBER || v->size > 0);
}

static bool is_space(char c) {
    return c == ' ' || (c >= '\t' && c <= '\r') || (c >= '\x1c' && c <= '\x1f');
}

// Notes whether a text is one that is judged.
static void look(meaning* m, const second* v) {
    static const char* const added[] = {"here", "[INST]"};
    for (size_t i = 0; i < v->size; i++) {
        m->unsure = m->unsure || v->text[i] < 0 || v->text[i] == '<';
    }
    for (size_t i = 0; i < 2; i++) {
        m->unsure = m->unsure || strstr(v->text, added[i]) != NULL;
    }
    m->unsure = m->unsure || v->odd || memchr(v->text, 0, v->size) != NULL;
}

// ---- turns of a conversation

typedef struct turn {
    char role[64];
    char* text;
    size_t size;
    const second* thought; // reasoning_content
    bool trained;
} turn;

typedef struct talk {
    turn list[TURNS];
    size_t count;
} talk;

static void talk_free(talk* t) {
    for (size_t i = 0; i < t->count; i++) {
        free(t->list[i].text);
    }
}

static turn* talk_add(meaning* m, talk* t, const char* role, bool trained) {
    if (t->count == TURNS) {
        m->unsure = true;
        t->count--;
        free(t->list[t->count].text);
    }
    turn* one = &t->list[t->count++];
    memset(one, 0, sizeof *one);
    snprintf(one->role, sizeof one->role, "%s", role);
    one->trained = trained && strcmp(role, "assistant") == 0;
    return one;
}

// Adds a text to a turn.
static void turn_text(meaning* m, turn* one, const char* before, const second* v) {
    size_t size = strlen(before);
    one->text = (char*)realloc(one->text, one->size + size + v->size + 1);
    if (one->text == NULL) {
        abort();
    }
    memcpy(one->text + one->size, before, size);
    memcpy(one->text + one->size + size, v->text, v->size);
    one->size += size + v->size;
    look(m, v);
}

static void talk_text(meaning* m, talk* t, const char* role, const second* v) {
    refuse(m, second_is(v, SECOND_STRING), "a text that is not a string");
    if (second_is(v, SECOND_STRING)) {
        turn_text(m, talk_add(m, t, role, true), "", v);
    }
}

// What "from" means. "role" is passed on as it is.
static const char* role_of(const second* v) {
    static const char* const names[] = {"system",
                                        "system",
                                        "developer",
                                        "system",
                                        "user",
                                        "user",
                                        "human",
                                        "user",
                                        "input",
                                        "user",
                                        "prompter",
                                        "user",
                                        "assistant",
                                        "assistant",
                                        "gpt",
                                        "assistant",
                                        "model",
                                        "assistant",
                                        "bot",
                                        "assistant",
                                        "chatgpt",
                                        "assistant",
                                        "bing",
                                        "assistant",
                                        "bard",
                                        "assistant",
                                        "output",
                                        "assistant",
                                        "tool",
                                        "tool",
                                        "observation",
                                        "tool",
                                        "ipython",
                                        "tool",
                                        "function",
                                        "tool",
                                        "function_response",
                                        "tool",
                                        "tool_response",
                                        "tool",
                                        "tool_results",
                                        "tool"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i += 2) {
        if (is_word(v, names[i])) {
            return names[i + 1];
        }
    }
    return NULL;
}

// Whether "weight" and "train" leave a turn trained.
static bool turn_is_on(meaning* m, second* node) {
    static const char* const names[] = {"weight", "train"};
    bool on = true;
    for (int i = 0; i < 2; i++) {
        const second* v = second_find(node, names[i]);
        double x = second_is(v, SECOND_NUMBER) ? strtod(v->text, NULL) : -1.0;
        bool truth = v == NULL || v->kind == SECOND_TRUE || v->kind == SECOND_FALSE;
        refuse(m, truth || x == 0.0 || x == 1.0, "a weight other than 0 and 1");
        on = on && (v == NULL || v->kind == SECOND_TRUE || x == 1.0);
    }
    return on;
}

// Names of a message that change its text, or what is trained of it.
static void turn_names(meaning* m, const judge_options* o, second* node) {
    static const char* const never[] = {"function_call", "train_detail", "images", "audio",
                                        "videos"};
    static const char* const own[] = {"reasoning_content", "reasoning", "thinking", "tool_calls",
                                      "tool_call_id"};
    for (size_t i = 0; i < 5; i++) {
        refuse(m, !is_filled(second_find(node, never[i])), never[i]);
        refuse(m, o->chat == OWN || !is_filled(second_find(node, own[i])), own[i]);
    }
    m->unsure = m->unsure || is_filled(second_find(node, "tool_calls"));
}

static void turn_read(meaning* m, const judge_options* o, talk* t, second* node, bool prompt) {
    second* role = second_find(node, "role");
    second* from = second_find(node, "from");
    second* content = second_find(node, "content");
    second* value = second_find(node, "value");
    refuse(m, role == NULL || from == NULL, "\"role\" beside \"from\"");
    refuse(m, content == NULL || value == NULL, "\"content\" beside \"value\"");
    content = content != NULL ? content : value;
    bool plain =
        second_is(role, SECOND_STRING) && role->size > 0 && strlen(role->text) == role->size;
    const char* name = role == NULL ? role_of(from) : plain ? role->text : NULL;
    refuse(m, name != NULL, "a role that is not known");
    bool usual = name == NULL || strcmp(name, "system") == 0 || strcmp(name, "user") == 0 ||
                 strcmp(name, "assistant") == 0;
    refuse(m, usual || o->chat == OWN, "a role that this format does not have");
    if (role != NULL && plain) {
        look(m, role);
        m->unsure = m->unsure || role->size >= 64;
    }
    bool on = turn_is_on(m, node);
    turn_names(m, o, node);
    turn* one = talk_add(m, t, name != NULL ? name : "", on && !prompt);
    const second* thought = second_find(node, "reasoning_content");
    one->thought = is_filled(thought) ? thought : NULL;
    if (one->thought != NULL && !second_is(thought, SECOND_STRING)) {
        m->unsure = true;
    } else if (one->thought != NULL) {
        look(m, thought);
    }
    if (second_is(content, SECOND_STRING)) {
        turn_text(m, one, "", content);
        return;
    }
    bool parts = second_is(content, SECOND_ARRAY);
    refuse(m, parts || is_filled(second_find(node, "tool_calls")), "a content that is no text");
    for (second* part = parts ? content->first : NULL; part != NULL; part = part->next) {
        const second* type = second_find(part, "type");
        const second* text = second_find(part, "text");
        refuse(m, type == NULL || is_word(type, "text"), "a part that is not a text");
        refuse(m, second_is(text, SECOND_STRING), "a part without a text");
        if (second_is(text, SECOND_STRING)) {
            turn_text(m, one, "", text);
        }
    }
}

static void talk_read(meaning* m, const judge_options* o, talk* t, second* list, bool prompt) {
    refuse(m, second_is(list, SECOND_ARRAY), "messages that are not a list");
    second* node = second_is(list, SECOND_ARRAY) ? list->first : NULL;
    size_t before = t->count;
    for (; node != NULL; node = node->next) {
        turn_read(m, o, t, node, prompt);
    }
    refuse(m,
           before != 1 || t->count < 2 || strcmp(t->list[0].role, "system") != 0 ||
               strcmp(t->list[1].role, "system") != 0,
           "two system messages");
}

// ---- how a conversation is written

static void say_turn(meaning* m, int chat, const turn* one) {
    const char* text = one->text != NULL ? one->text : "";
    size_t size = one->size;
    bool answer = strcmp(one->role, "assistant") == 0;
    bool system = strcmp(one->role, "system") == 0;
    if (chat == LLAMA3) {
        for (; size > 0 && is_space(text[size - 1]); size--) {
        }
        for (; size > 0 && is_space(text[0]); size--) {
            text++;
        }
        says(m, "<|start_header_id|>", false);
        says(m, one->role, false);
        says(m, "<|end_header_id|>\n\n", false);
        say(m, text, size, one->trained);
        says(m, "<|eot_id|>", one->trained);
        says(m, one->trained ? "</s>" : "", true); // the tokenizer does not have the other marker
    } else if (chat == CHATML || chat == OWN) {
        says(m, "<|im_start|>", false);
        says(m, one->role, false);
        says(m, "\n", false);
        if (chat == OWN && one->thought != NULL && one->thought->kind == SECOND_STRING) {
            says(m, "(", one->trained);
            say(m, one->thought->text, one->thought->size, one->trained);
            says(m, ")", one->trained);
        }
        say(m, text, size, one->trained);
        says(m, "<|im_end|>", one->trained);
        says(m, "\n", false);
    } else {
        const char* head = answer ? "### Response:\n" : system ? "" : "### Instruction:\n";
        says(m, chat == ALPACA ? head : "", false);
        say(m, text, size, one->trained);
        says(m, answer ? "</s>" : "", one->trained);
        says(m, chat == ALPACA ? "\n\n" : "\n", false);
    }
}

static bool ends_with(const meaning* m, size_t size, const char* word) {
    size_t length = strlen(word);
    return size >= length && memcmp(m->text + size - length, word, length) == 0;
}

// Another name of the assistant, which is trained only if it was given as "from".
static bool is_answer(const char* role) {
    static const char* const names[] = {"gpt", "model", "bot", "chatgpt", "bing", "bard", "output"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (strcmp(role, names[i]) == 0) {
            return true;
        }
    }
    return false;
}

// A conversation ends with its last trained byte; without one, with its last marker.
static void talk_say(meaning* m, const judge_options* o, talk* t) {
    size_t answer = 0;
    size_t answers = 0;
    size_t others = 0;
    if (t->count == 0) {
        return;
    }
    for (size_t i = 0; i < t->count; i++) {
        answer = strcmp(t->list[i].role, "assistant") == 0 ? i : answer;
        answers += strcmp(t->list[i].role, "assistant") == 0 ? 1 : 0;
        others += is_answer(t->list[i].role) ? 1 : 0;
    }
    refuse(m, answers > 0 || others == 0, "answers with another role");
    says(m, "<s>", false);
    if (o->chat == ALPACA && strcmp(t->list[0].role, "system") != 0) {
        says(m,
             "Below is an instruction that describes a task. Write a response that appropriately "
             "completes the request.\n\n",
             false);
    }
    for (size_t i = 0; i < t->count; i++) {
        bool only = o->last_only || o->preference != QLORA_TEXT_ANSWERS;
        t->list[i].trained = t->list[i].trained && (!only || i == answer);
        say_turn(m, o->chat, &t->list[i]);
    }
    size_t end = m->size;
    while (end > 0 && m->trained[end - 1] == 0) {
        end--;
    }
    if (end == 0) {
        for (end = m->size; end > 0 && is_space(m->text[end - 1]); end--) {
        }
        bool marked = ends_with(m, end, "<|im_end|>") || ends_with(m, end, "</s>");
        end = marked ? end : m->size;
    }
    m->size = end;
    if (o->train_prompt) {
        memset(m->trained + 3, 1, m->size - 3);
    }
}

// ---- the forms of a record

typedef enum form_kind {
    FORM_NONE,
    FORM_IDS,
    FORM_CHAT,
    FORM_TWO,
    FORM_PAIR,
    FORM_TEXT,
    FORM_SIDES,
    FORM_SEVERAL
} form_kind;

typedef struct form {
    form_kind kind;
    second* first;
    second* last;
} form;

static form form_of(second* record) {
    static const struct {
        form_kind kind;
        const char* first;
        const char* last;
    } forms[] = {{FORM_IDS, "input_ids", ""},
                 {FORM_CHAT, "messages", ""},
                 {FORM_CHAT, "conversations", ""},
                 {FORM_TWO, "prompt", "completion"},
                 {FORM_TWO, "prompt", "response"},
                 {FORM_PAIR, "instruction", "output"},
                 {FORM_PAIR, "instruction", "response"},
                 {FORM_PAIR, "question", "answer"},
                 {FORM_PAIR, "question", "response"},
                 {FORM_TEXT, "text", ""},
                 {FORM_SIDES, "chosen", "rejected"},
                 {FORM_PAIR, "input", "output"}};
    form f = {FORM_NONE, NULL, NULL};
    for (size_t i = 0; i < sizeof forms / sizeof forms[0]; i++) {
        second* first = second_find(record, forms[i].first);
        second* last = second_find(record, forms[i].last);
        bool question = strcmp(forms[i].first, "input") == 0 && f.kind == FORM_PAIR;
        if (first == NULL || (last == NULL && forms[i].last[0] != '\0') || question) {
            continue;
        }
        f.kind = f.kind == FORM_NONE ? forms[i].kind : FORM_SEVERAL;
        f.first = first;
        f.last = last;
    }
    return f;
}

static void pair_mean(meaning* m, const judge_options* o, second* record, const form* f, talk* t) {
    const second* input = second_find(record, "input");
    const second* context = second_find(record, "context");
    second* history = second_find(record, "history");
    input = input == f->first ? NULL : input;
    refuse(m, input == NULL || input->kind == SECOND_STRING, "an input that is not a string");
    refuse(m, context == NULL || context->kind == SECOND_STRING, "a context that is not a string");
    refuse(m, !is_filled(input) || !is_filled(context), "both input and context");
    input = is_filled(input) ? input : is_filled(context) ? context : NULL;
    if (m->refused != NULL) {
        return;
    }
    if (o->chat == ALPACA && input != NULL && t->count == 0) {
        static char words[] =
            "Below is an instruction that describes a task, paired with an input that provides "
            "further context. Write a response that appropriately completes the request.";
        second v;
        memset(&v, 0, sizeof v);
        v.kind = SECOND_STRING;
        v.text = words;
        v.size = sizeof words - 1;
        talk_text(m, t, "system", &v);
    }
    refuse(m, !is_filled(history) || history->kind == SECOND_ARRAY, "a history that is no list");
    for (second* v = second_is(history, SECOND_ARRAY) ? history->first : NULL; v; v = v->next) {
        refuse(m, v->kind == SECOND_ARRAY && v->size == 2, "a history of other turns");
        if (m->refused == NULL) {
            talk_text(m, t, "user", v->first);
            talk_text(m, t, "assistant", v->first->next);
        }
    }
    talk_text(m, t, "user", f->first);
    if (input != NULL && m->refused == NULL) {
        const char* between = o->chat == ALPACA ? "\n\n### Input:\n" : "\n";
        turn_text(m, &t->list[t->count - 1], f->first->size > 0 ? between : "", input);
    }
    talk_text(m, t, "assistant", f->last);
}

// A question and an answer, as two texts or as two lists of messages.
static void two_mean(meaning* m, const judge_options* o, talk* t, second* first, second* last) {
    if (second_is(first, SECOND_STRING) && second_is(last, SECOND_STRING)) {
        refuse(m, t->count == 0, "\"system\" beside a text");
        look(m, first);
        look(m, last);
        if (first->size + last->size > 0) {
            says(m, "<s>", false);
            say(m, first->text, first->size, o->train_prompt);
            say(m, last->text, last->size, true);
            says(m, "</s>", true);
        }
        return;
    }
    refuse(m, first == NULL || (first->kind == SECOND_ARRAY && last->kind == SECOND_ARRAY),
           "something else than two texts or two lists");
    if (m->refused == NULL && first != NULL) {
        talk_read(m, o, t, first, true);
    }
    if (m->refused == NULL) {
        talk_read(m, o, t, last, false);
        talk_say(m, o, t);
    }
}

// What sample `side` of a record means (1: the rejected one of a pair).
static meaning meaning_of(second* record, const judge_options* o, size_t side) {
    meaning m;
    memset(&m, 0, sizeof m);
    form f = form_of(record);
    const second* system = second_find(record, "system");
    const second* label = second_find(record, "label");
    talk t;
    memset(&t, 0, sizeof t);
    bool answer = f.kind == FORM_CHAT || f.kind == FORM_TWO || f.kind == FORM_PAIR;
    bool judged = second_is(label, SECOND_TRUE) || second_is(label, SECOND_FALSE);
    refuse(&m, second_is(record, SECOND_OBJECT), "a record that is not an object");
    refuse(&m, f.kind != FORM_NONE && f.kind != FORM_SEVERAL, "a record of no form, or of several");
    refuse(&m, system == NULL || system->kind == SECOND_STRING, "a system that is not a string");
    refuse(&m, o->chat == OWN || !is_filled(second_find(record, "tools")), "tools");
    refuse(&m, (o->preference == QLORA_TEXT_PAIRS) == (f.kind == FORM_SIDES), "a pair, or not");
    refuse(&m, (o->preference == QLORA_TEXT_JUDGED) == (answer && judged), "judged, or not");
    m.ids = f.kind == FORM_IDS;
    bool empty = f.kind == FORM_TEXT || f.kind == FORM_IDS;
    if (m.refused != NULL || m.ids) {
        return m;
    }
    if (is_filled(system) && !empty) {
        talk_text(&m, &t, "system", system);
    }
    if (f.kind == FORM_TEXT) {
        static char nothing[1];
        second none;
        memset(&none, 0, sizeof none);
        none.kind = SECOND_STRING;
        none.text = nothing;
        refuse(&m, second_is(f.first, SECOND_STRING), "a text that is not a string");
        if (m.refused == NULL) {
            two_mean(&m, o, &t, &none, f.first);
        }
    } else if (f.kind == FORM_PAIR) {
        pair_mean(&m, o, record, &f, &t);
        if (m.refused == NULL) {
            talk_say(&m, o, &t);
        }
    } else if (f.kind == FORM_CHAT) {
        talk_read(&m, o, &t, f.first, false);
        talk_say(&m, o, &t);
    } else {
        second* prompt = second_find(record, "prompt");
        two_mean(&m, o, &t, prompt, side == 1 || f.kind == FORM_TWO ? f.last : f.first);
    }
    talk_free(&t);
    return m;
}

// ---- ids

static bool ids_list(second* record, const char* name, size_t size, second** out) {
    second* v = second_find(record, name);
    finding(v == NULL || (v->kind == SECOND_ARRAY && v->size == size),
            "another list beside the ids", name);
    *out = v != NULL ? v->first : NULL;
    return v != NULL;
}

static long long ids_next(second** v, const char* name) {
    long long x = 0;
    finding(second_int(*v, &x), "something else than a whole number", name);
    *v = (*v)->next;
    return x;
}

static void ids_judge(second* record, const qlora_text_sample* s) {
    static const char* const masks[] = {"loss_mask", "completion_mask", "assistant_masks",
                                        "assistant_mask", "loss_weights"};
    second* id = second_find(record, "input_ids");
    second* label = NULL;
    second* bit = NULL;
    second* place = NULL;
    finding(second_is(id, SECOND_ARRAY), "ids that are not a list were accepted", "");
    for (size_t i = 0; i < 5; i++) {
        finding(!is_filled(second_find(record, masks[i])), "another mask was accepted", masks[i]);
    }
    size_t count = id->size;
    bool labelled = ids_list(record, "labels", count, &label);
    bool masked = ids_list(record, "attention_mask", count, &bit);
    bool placed = ids_list(record, "position_ids", count, &place);
    size_t at = 0;
    bool over = false; // a zero after a one
    id = id->first;
    for (size_t i = 0; i < count; i++) {
        long long x = ids_next(&id, "input_ids");
        long long y = labelled ? ids_next(&label, "labels") : x;
        long long on = masked ? ids_next(&bit, "attention_mask") : 1;
        finding(!placed || ids_next(&place, "position_ids") == (long long)i, "another position",
                "");
        finding(x >= 0 && (y >= 0 || y == -100), "a negative id or label", "");
        finding((on == 1 && !over) || (on == 0 && (!labelled || y == -100)), "another mask", "");
        over = over || (on == 0 && at > 0);
        if (on != 0) {
            finding(at < s->count && s->ids[at] == x && s->labels[at] == y,
                    "another id or label was read", "");
            at++;
        }
    }
    finding(at == s->count, "ids were added or lost", "");
}

// ---- samples

// The bytes of every token of tests/golden/text_byte.json, read here once more.
typedef struct spelling {
    char text[32];
    size_t size;
} spelling;

// The byte that a character of a byte-level file stands for.
static int byte_of(long code) {
    int next = 256;
    for (int b = 0; b < 256; b++) {
        bool shown = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        if (code == (shown ? b : next)) {
            return b;
        }
        next += shown ? 0 : 1;
    }
    return -1;
}

static size_t bytes_of(const char* name, size_t size, char* out) {
    size_t count = 0;
    for (size_t i = 0; i < size; i++) {
        long code = (unsigned char)name[i];
        if (code >= 0xc0 && i + 1 < size) { // two bytes: no other length occurs
            code = (code & 0x1f) << 6 | (name[++i] & 0x3f);
        }
        out[count++] = (char)byte_of(code);
    }
    return count;
}

enum { SPELLINGS = 512 };

static const spelling* spellings(void) {
    static spelling all[SPELLINGS];
    static bool ready;
    if (!ready) {
        buffer b;
        if (!buffer_file("tests/golden/text_byte.json", &b)) {
            abort();
        }
        second* file = second_read(b.data, b.size);
        second* vocab = second_find(second_find(file, "model"), "vocab");
        second* added = second_find(file, "added_tokens");
        long long id = 0;
        for (second* v = vocab->first; v != NULL; v = v->next) {
            if (second_int(v, &id) && id < SPELLINGS && v->name_size < sizeof all[0].text) {
                all[id].size = bytes_of(v->name, v->name_size, all[id].text);
            }
        }
        for (second* v = added->first; v != NULL; v = v->next) {
            const second* content = second_find(v, "content");
            if (second_int(second_find(v, "id"), &id) && id < SPELLINGS) {
                all[id].size = content->size;
                memcpy(all[id].text, content->text, content->size);
            }
        }
        second_free(file);
        free(b.data);
        ready = true;
    }
    return all;
}

// Compares a sample with what it must be.
static void text_judge(const meaning* m, const qlora_text_sample* s) {
    const spelling* all = spellings();
    size_t at = 0;
    for (size_t i = 0; i < s->count; i++) {
        finding(s->ids[i] >= 0 && s->ids[i] < SPELLINGS, "an id that does not exist", "");
        const spelling* one = &all[s->ids[i]];
        bool trained = s->labels[i] != -100;
        finding(!trained || s->labels[i] == s->ids[i], "a label that is not the id", "");
        finding(at + one->size <= m->size && memcmp(m->text + at, one->text, one->size) == 0,
                "another text, from here on",
                at < m->size ? m->text + at : "something after the end");
        for (size_t k = 0; k < one->size; k++) {
            finding(m->trained[at + k] == (trained ? 1 : 0),
                    trained ? "this is not to be trained" : "this is to be trained", m->text + at);
        }
        at += one->size;
    }
    finding(at == m->size, "text is missing", m->text + at);
}

static void sample_judge(second* record, const judge_options* o, size_t side,
                         const qlora_text_sample* s, judge_count* count) {
    meaning m = meaning_of(record, o, side);
    const second* label = second_find(record, "label");
    const char* outer = o->text_only ? NULL : "data"; // a list of records in an object
    bool unsure = m.unsure || (outer != NULL && second_find(record, outer) != NULL) ||
                  (o->chat == OWN && second_find(record, "chat_template_kwargs") != NULL);
    finding(m.refused == NULL || (outer != NULL && second_find(record, outer) != NULL),
            "this was accepted", m.refused != NULL ? m.refused : "");
    count->accepted++;
    count->judged += unsure ? 0 : 1;
    if (!unsure) {
        finding(s->line == record->line, "another line", "");
        finding(s->desirable == (o->preference == QLORA_TEXT_PAIRS    ? side == 0
                                 : o->preference == QLORA_TEXT_JUDGED ? label->kind == SECOND_TRUE
                                                                      : s->desirable),
                "the other side of a pair", "");
        if (m.ids) {
            ids_judge(record, s);
        } else {
            say(&m, "", 1, false); // a zero for messages
            m.size--;
            text_judge(&m, s);
        }
    }
    meaning_free(&m);
}

// Every record is a sample, or two of a pair.
static void records_judge(second* records, const judge_options* o, qlora_text_data* data,
                          judge_count* count) {
    size_t index = 0;
    for (second* record = records; record != NULL; record = record->next) {
        if (second_find(record, "data") != NULL) { // perhaps a list of records
            count->accepted++;
            return;
        }
        for (size_t side = 0; side < (o->preference == QLORA_TEXT_PAIRS ? 2u : 1u); side++) {
            qlora_text_sample s;
            finding(qlora_text_sample_read(data, index++, &s) == QLORA_OK, "a sample is missing",
                    "");
            sample_judge(record, o, side, &s, count);
        }
    }
    finding(index == qlora_text_data_count(data), "more samples than records", "");
}

// ---- plain text

// Whether a line is a separator, up to its end.
static bool is_separator(const char* line, size_t size) {
    static const char word[] = "<|endoftext|>";
    size_t length = sizeof word - 1;
    bool same = size >= length && memcmp(line, word, length) == 0;
    for (size_t i = length; same && i < size; i++) {
        same = line[i] == ' ' || line[i] == '\r';
    }
    return same;
}

// One document: all of it is trained.
static void document_judge(qlora_text_data* data, size_t* index, const char* text, size_t size,
                           bool separated, judge_count* count) {
    while (separated && size > 0 && memchr("\r\n", text[0], 2) != NULL) {
        text++;
        size--;
    }
    while (separated && size > 0 && memchr("\r\n", text[size - 1], 2) != NULL) {
        size--;
    }
    if (size == 0) {
        return;
    }
    qlora_text_sample s;
    meaning m;
    second v;
    memset(&m, 0, sizeof m);
    memset(&v, 0, sizeof v);
    finding(qlora_text_sample_read(data, (*index)++, &s) == QLORA_OK, "a document is missing", "");
    v.text = second_copy(text, size);
    v.size = size;
    look(&m, &v);
    says(&m, "<s>", false);
    say(&m, text, size, true);
    says(&m, "</s>", true);
    count->accepted++;
    count->judged += m.unsure ? 0 : 1;
    if (!m.unsure) {
        text_judge(&m, &s);
    }
    free(v.text);
    meaning_free(&m);
}

static void documents_judge(const buffer* b, qlora_text_data* data, judge_count* count) {
    const char* text = (const char*)b->data;
    size_t size = b->size;
    if (size >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0) {
        text += 3;
        size -= 3;
    }
    size_t index = 0;
    bool separated = false;
    for (int pass = 0; pass < 2; pass++) {
        size_t from = 0;
        for (size_t at = 0; at < size;) {
            const char* stop = (const char*)memchr(text + at, '\n', size - at);
            size_t end = stop != NULL ? (size_t)(stop - text) : size;
            if (is_separator(text + at, end - at)) {
                if (pass == 1) {
                    document_judge(data, &index, text + from, at - from, true, count);
                }
                separated = true;
                from = end + 1;
            }
            at = end + 1;
        }
        if (pass == 1 && from < size) {
            document_judge(data, &index, text + from, size - from, separated, count);
        }
    }
    finding(index == qlora_text_data_count(data), "more samples than documents", "");
}

#endif
