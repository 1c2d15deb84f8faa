// prompts.h - samples: fixed prompts that are completed at every evaluation.
#ifndef FINETUNE_PROMPTS_H
#define FINETUNE_PROMPTS_H

static void prompts_free(app* a) {
    for (size_t i = 0; i < a->prompts.count; i++) {
        sample_prompt* p = &a->prompts.data[i];
        for (int k = 0; k < p->answer_count; k++) {
            answer_free(&p->answers[k]);
        }
        blob_free(&p->text);
        qlora_text_ids_free(a->text, &p->ids);
    }
    free(a->prompts.data);
    memset(&a->prompts, 0, sizeof a->prompts);
}

// Adds an empty prompt; NULL with an error if there are too many. `what` names the option.
static sample_prompt* prompt_new(app* a, const char* what) {
    sample_prompts* list = &a->prompts;
    if (list->count == MAX_PROMPTS) {
        error_set(a->error, "%s: there are more than %d prompts for samples", what, MAX_PROMPTS);
        return NULL;
    }
    if (list->data == NULL) {
        list->data = (sample_prompt*)take(a, MAX_PROMPTS, sizeof *list->data);
        if (list->data == NULL) {
            return NULL;
        }
    }
    return &list->data[list->count++];
}

// The prompt is written to the log as it is, which must be UTF-8.
static bool prompt_utf8(app* a, const char* what, const char* text, size_t size) {
    for (size_t at = 0; at < size;) {
        const unsigned char* byte = (const unsigned char*)text + at;
        size_t step = byte[0] < 0x80 ? 1 : character_size(byte, size - at);
        if (step == 0) {
            return error_set(a->error, "%s: the text is not UTF-8 (byte %zu is %02X)", what, at + 1,
                             (unsigned)byte[0]);
        }
        at += step;
    }
    return true;
}

// The prompt and at least one new token must fit into --length: a longer text could change how the
// model treats positions, and then the training.
static bool prompt_fits(app* a, const sample_prompt* p, const char* what) {
    if (p->ids.count == 0) {
        return error_set(a->error, "%s: the prompt has no tokens", what);
    }
    for (size_t i = 0; i < p->ids.count; i++) {
        if (p->ids.data[i] < 0 || p->ids.data[i] >= a->config.vocab) {
            return error_set(a->error,
                             "%s: token id %d is out of range; the model's ids are 0 to %lld", what,
                             (int)p->ids.data[i], (long long)a->config.vocab - 1);
        }
    }
    return (int64_t)p->ids.count < a->o.data.length ||
           error_set(a->error, "%s: the prompt has %zu tokens; --length %lld allows %lld", what,
                     p->ids.count, (long long)a->o.data.length, (long long)a->o.data.length - 1);
}

// A text to continue as it is, after BOS.
static bool prompt_plain(app* a, const char* what, const char* text, size_t size) {
    sample_prompt* p = prompt_utf8(a, what, text, size) ? prompt_new(a, what) : NULL;
    if (p == NULL) {
        return false;
    }
    if (qlora_text_encode(a->tok, text, size, QLORA_TEXT_BOS, &p->ids) != QLORA_OK) {
        return text_fail(a, "a prompt for samples: ");
    }
    return (blob_add(&p->text, text, size) || error_set(a->error, "out of memory")) &&
           prompt_fits(a, p, what);
}

// A message of the user, in the chat format.
static bool prompt_message(app* a, const char* what, const char* text) {
    qlora_text_message message;
    memset(&message, 0, sizeof message);
    message.role = "user";
    message.content = text;
    message.length = strlen(text);
    sample_prompt* p = prompt_utf8(a, what, text, message.length) ? prompt_new(a, what) : NULL;
    if (p == NULL) {
        return false;
    }
    if (qlora_text_chat_encode(a->chat, &message, 1, true, &p->ids, NULL) != QLORA_OK) {
        return text_fail(a, "--sample-message: ");
    }
    return (blob_add(&p->text, text, message.length) || error_set(a->error, "out of memory")) &&
           prompt_fits(a, p, what);
}

// A prompt of a file: a conversation is shown as the model sees it, a text without BOS.
static bool prompt_sample(app* a, const char* what, const qlora_text_sample* s) {
    qlora_text_tok_info info;
    qlora_text_bytes text;
    memset(&text, 0, sizeof text);
    sample_prompt* p = prompt_new(a, what);
    if (p == NULL) {
        return false;
    }
    bool ok = qlora_text_tok_query(a->tok, &info) == QLORA_OK;
    for (size_t i = 0; i < s->count && ok; i++) {
        ok = qlora_text_ids_add(a->text, &p->ids, s->ids[i]) == QLORA_OK;
    }
    size_t from = !s->chat && s->count > 0 && s->ids[0] == info.bos ? 1 : 0;
    ok = (ok && qlora_text_decode(a->tok, s->ids + from, s->count - from, QLORA_TEXT_REPLACE,
                                  &text) == QLORA_OK) ||
         text_fail(a, "a prompt for samples: ");
    ok = ok && (blob_add(&p->text, text.data != NULL ? text.data : "", text.count) ||
                error_set(a->error, "out of memory"));
    qlora_text_bytes_free(a->text, &text);
    return ok && prompt_fits(a, p, what);
}

// The prompts of --sample-file, which is read like data, without the answers in it.
static bool prompts_file(app* a, const char* path) {
    char what[FOLDER_PATH + 32];
    qlora_text_data_desc desc;
    qlora_text_data* data = NULL;
    memset(&desc, 0, sizeof desc);
    desc.path = path;
    desc.format = qlora_text_data_known(path) ? NULL : "jsonl";
    desc.chat = a->chat;
    desc.prompts = QLORA_TEXT_ASK;
    if (!path_exists(path)) {
        return error_set(a->error, "--sample-file %.800s: %s", path, strerror(errno));
    }
    bool ok = qlora_text_data_open(a->text, &desc, &data) == QLORA_OK || text_fail(a, "");
    for (size_t i = 0; ok && i < qlora_text_data_count(data); i++) {
        qlora_text_sample s;
        ok = qlora_text_sample_read(data, i, &s) == QLORA_OK || text_fail(a, "");
        if (ok) {
            snprintf(what, sizeof what, "%.800s:%zu", path, s.line);
            ok = prompt_sample(a, what, &s);
        }
    }
    qlora_text_data_close(data);
    return ok;
}

// Reads and encodes all prompts, and plans the memory for their answers.
static bool prompts_open(app* a) {
    const options* o = &a->o;
    size_t longest = 0;
    a->prompts.step = -1;
    if (a->tok == NULL || o->doctor || o->eval.only) {
        return true;
    }
    for (int64_t i = 0; i < o->sampling.prompts.count; i++) {
        const char* text = o->sampling.prompts.items[i];
        if (!prompt_plain(a, "--sample-prompt", text, strlen(text))) {
            return false;
        }
    }
    for (int64_t i = 0; i < o->sampling.messages.count; i++) {
        if (!prompt_message(a, "--sample-message", o->sampling.messages.items[i])) {
            return false;
        }
    }
    if (o->sampling.file != NULL && !prompts_file(a, o->sampling.file)) {
        return false;
    }
    for (size_t i = 0; i < a->prompts.count; i++) {
        longest = a->prompts.data[i].ids.count > longest ? a->prompts.data[i].ids.count : longest;
    }
    int64_t need = (int64_t)longest + o->sampling.tokens;
    need = need < o->data.length ? need : o->data.length;
    if (a->prompts.count > 0 && need > a->model_desc.generate_tokens) {
        a->model_desc.generate_tokens = need;
    }
    return true;
}

// ---- the answers ----

typedef struct tokens_taken {
    qlora_text* text;
    qlora_text_ids ids;
    bool full; // out of memory
} tokens_taken;

static bool token_take(void* user, int32_t token) {
    tokens_taken* t = (tokens_taken*)user;
    t->full = qlora_text_ids_add(t->text, &t->ids, token) != QLORA_OK;
    return !t->full && stop_asked == 0;
}

#define MAX_STOPS 64

// The ids that end an answer: the model's and those of the chat format. There is at least one: -1
// stands for none.
static int32_t stops_find(app* a, int32_t stops[MAX_STOPS]) {
    qlora_text_chat_info chat;
    int32_t count = 0;
    for (int32_t i = 0; i < a->config.stop_count && count < MAX_STOPS; i++) {
        stops[count++] = a->config.stop_ids[i];
    }
    if (qlora_text_chat_query(a->chat, &chat) == QLORA_OK) {
        for (size_t i = 0; i < chat.stop_count && count < MAX_STOPS; i++) {
            stops[count++] = chat.stops[i];
        }
    }
    if (count == 0) {
        stops[count++] = -1;
    }
    return count;
}

// The text of the new tokens. Those of the prompt go first through the same stream: it decides
// whether the first word needs a space.
static bool answer_decode(app* a, const qlora_text_ids* prompt, const qlora_text_ids* made,
                          qlora_text_bytes* out) {
    qlora_text_stream stream;
    memset(&stream, 0, sizeof stream);
    for (size_t i = 0; i < prompt->count + made->count; i++) {
        bool given = i < prompt->count;
        int32_t id = given ? prompt->data[i] : made->data[i - prompt->count];
        qlora_text_token_info info;
        out->count = i == prompt->count ? 0 : out->count;
        if (qlora_text_token_query(a->tok, id, &info) != QLORA_OK) {
            continue; // the vocabulary may be larger than the tokenizer
        }
        if (qlora_text_stream_push(a->tok, &stream, id, QLORA_TEXT_SKIP, out) != QLORA_OK) {
            return text_fail(a, "a sample: ");
        }
    }
    out->count = made->count == 0 ? 0 : out->count;
    return made->count == 0 || qlora_text_stream_end(a->tok, &stream, out) == QLORA_OK ||
           text_fail(a, "a sample: ");
}

// One answer. It depends only on the model, the prompt and --seed.
static bool answer_make(app* a, sample_prompt* p, blob* out) {
    int32_t stops[MAX_STOPS];
    tokens_taken taken;
    qlora_text_bytes text;
    qlora_generate_desc desc;
    memset(&taken, 0, sizeof taken);
    memset(&text, 0, sizeof text);
    memset(&desc, 0, sizeof desc);
    taken.text = a->text;
    int64_t room = a->model_desc.generate_tokens - (int64_t)p->ids.count;
    desc.prompt = p->ids.data;
    desc.prompt_tokens = (int64_t)p->ids.count;
    desc.max_tokens = a->o.sampling.tokens < room ? a->o.sampling.tokens : room;
    desc.temperature = (float)a->o.sampling.temperature;
    desc.seed = (uint64_t)a->o.training.seed;
    desc.stops = stops;
    desc.stop_count = stops_find(a, stops);
    bool ok = lib(a, qlora_generate(a->model, &desc, token_take, &taken), "generating a sample") &&
              (!taken.full || error_set(a->error, "out of memory")) &&
              answer_decode(a, &p->ids, &taken.ids, &text);
    ok = ok && (blob_add(out, text.data, text.count) || error_set(a->error, "out of memory"));
    qlora_text_ids_free(a->text, &taken.ids);
    qlora_text_bytes_free(a->text, &text);
    return ok;
}

// Samples that cannot be made, for example because the model gives no finite numbers, must not end
// a training. They are made at the next evaluation again.
static void prompts_warn(app* a) {
    say(a, "warning: no samples after step %lld: %s\n", (long long)a->progress.step, a->error);
    a->error[0] = '\0';
}

// Answers all prompts. Ctrl-C ends this; the answers then are made when the run is resumed.
static void prompts_answer(app* a) {
    blob* made = (blob*)take(a, a->prompts.count, sizeof *made);
    bool ok = made != NULL;
    for (size_t i = 0; ok && i < a->prompts.count && stop_asked == 0; i++) {
        ok = answer_make(a, &a->prompts.data[i], &made[i]);
    }
    if (!ok) {
        prompts_warn(a);
    } else if (stop_asked != 0) {
        a->eval_cut = true;
    } else {
        for (size_t i = 0; i < a->prompts.count; i++) {
            answer_keep(&a->prompts.data[i], a->progress.step, &made[i]);
        }
        a->prompts.step = a->progress.step;
        log_samples(a, a->progress.step);
    }
    for (size_t i = 0; made != NULL && i < a->prompts.count; i++) {
        blob_free(&made[i]);
    }
    free(made);
}

#endif
