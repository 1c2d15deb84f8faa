// samples.h - the samples: read, counted, split.
#ifndef FINETUNE_SAMPLES_H
#define FINETUNE_SAMPLES_H

static bool text_fail(app* a, const char* what) {
    return fail(a->error, "%s%s", what, message_text(qlora_text_last_error(a->text)));
}

static bool text_open(app* a) {
    qlora_text_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.files = a->files;
    desc.error_text = a->error;
    desc.error_text_size = sizeof a->error;
    return a->text != NULL || qlora_text_create(&desc, &a->text) == QLORA_OK;
}

static bool tokenizer_open(app* a) {
    char error[1024] = "";
    qlora_text_tok_info info;
    qlora_text_chat_desc desc;
    memset(&desc, 0, sizeof desc);
    if (!text_open(a)) {
        return false;
    }
    if (a->tok == NULL && qlora_text_tok_open(a->text, a->o.model, &a->tok) != QLORA_OK) {
        return text_fail(a, "the model's tokenizer: ");
    }
    if (qlora_text_tok_query(a->tok, &info) != QLORA_OK) {
        return text_fail(a, "");
    }
    if (info.count > a->config.vocab) {
        // Ids beyond the model's vocabulary would read past its embedding; found sample by sample.
        snprintf(error, sizeof error, "the tokenizer has %d tokens, the model %lld",
                 (int)info.count, (long long)a->config.vocab);
        say(a, "note: %s\n", error);
    }
    desc.tok = a->tok;
    desc.folder = a->o.demo ? NULL : a->o.model;
    desc.name = a->o.template_name;
    return qlora_text_chat_open(a->text, &desc, &a->chat) == QLORA_OK ||
           text_fail(a, "the chat format (see --template): ");
}

static bool data_open(app* a, const char* path, qlora_text_data** out) {
    qlora_text_data_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.path = path;
    desc.chat = a->chat;
    desc.chunk_tokens = (size_t)a->o.length;
    desc.train_prompt = a->o.train_prompt;
    desc.last_turn_only = a->o.last_turn;
    return qlora_text_data_open(a->text, &desc, out) == QLORA_OK || text_fail(a, "");
}

static size_t trained_count(const int32_t* labels, size_t length) {
    size_t trained = 0;
    for (size_t i = 1; i < length; i++) {
        trained += labels[i] != -100 ? 1 : 0;
    }
    return trained;
}

static bool ids_check(app* a, const qlora_text_sample* s, size_t number) {
    for (size_t i = 0; i < s->count; i++) {
        if (s->ids[i] < 0 || s->ids[i] >= a->config.vocab || s->labels[i] >= a->config.vocab) {
            return fail(a->error,
                        "sample %zu (line %zu): token id %d is out of range; the model's ids are 0 "
                        "to %lld",
                        number + 1, s->line, (int)s->ids[i], (long long)a->config.vocab - 1);
        }
    }
    return true;
}

// Collects the samples that can be used for training and counts the others.
static bool samples_take(app* a, qlora_text_data* data, samples* out, counts* c) {
    memset(c, 0, sizeof *c);
    c->all = qlora_text_data_count(data);
    out->data = (sample*)take(a, c->all, sizeof *out->data);
    if (out->data == NULL) {
        return false;
    }
    qlora_text_tok_info info;
    if (qlora_text_tok_query(a->tok, &info) != QLORA_OK) {
        return text_fail(a, "");
    }
    int32_t bos = info.bos;
    for (size_t i = 0; i < c->all; i++) {
        qlora_text_sample s;
        if (qlora_text_sample_read(data, i, &s) != QLORA_OK) {
            return text_fail(a, "");
        }
        size_t length = s.count;
        if (!ids_check(a, &s, i)) {
            return false;
        }
        c->longest = length > c->longest ? length : c->longest;
        bool too_long = length > (size_t)a->o.length;
        c->too_long += too_long ? 1 : 0;
        c->empty += length < 2 ? 1 : 0;
        c->no_end += length >= 2 && s.labels[length - 1] == -100 ? 1 : 0;
        c->two_bos += length >= 2 && bos >= 0 && s.ids[0] == bos && s.ids[1] == bos ? 1 : 0;
        length = too_long ? (size_t)a->o.length : length;
        size_t trained = trained_count(s.labels, length);
        c->masked += length >= 2 && trained == 0 ? 1 : 0;
        if (length < 2 || trained == 0 || (too_long && !a->o.truncate)) {
            continue;
        }
        sample* t = &out->data[out->count++];
        t->ids = s.ids;
        t->labels = s.labels;
        t->length = (int32_t)length;
        t->trained = (int32_t)trained;
        t->number = (int32_t)i;
        c->tokens += length;
        c->trained += trained;
    }
    c->used = out->count;
    return true;
}

static void shuffle(uint32_t* order, size_t count, uint64_t key) {
    for (size_t i = count; i > 1; i--) {
        size_t j = (size_t)(mix(key ^ mix(i)) % i);
        uint32_t keep = order[i - 1];
        order[i - 1] = order[j];
        order[j] = keep;
    }
}

// Moves the held-out samples from a->train to a->eval.
static bool samples_split(app* a) {
    size_t all = a->train.count;
    double wish = a->o.eval < 1.0 ? fmin(200.0, ceil(a->o.eval * (double)all)) : a->o.eval;
    size_t held = (size_t)wish;
    if (a->eval_data != NULL || held == 0 || all < 2) {
        return true;
    }
    if (held >= all) {
        return fail(a->error, "--eval %g would hold out all %zu samples, leaving none to train on",
                    a->o.eval, all);
    }
    uint32_t* order = (uint32_t*)take(a, all, sizeof *order);
    sample* kept = (sample*)take(a, all, sizeof *kept);
    a->eval.data = (sample*)take(a, held, sizeof *kept);
    if (order == NULL || kept == NULL || a->eval.data == NULL) {
        free(order);
        free(kept);
        return false;
    }
    for (size_t i = 0; i < all; i++) {
        order[i] = (uint32_t)i;
    }
    shuffle(order, all, mix((uint64_t)a->o.seed ^ 0x6576616cu));
    for (size_t i = 0; i < all; i++) {
        if (i < held) {
            a->eval.data[a->eval.count++] = a->train.data[order[i]];
        } else {
            kept[i - held] = a->train.data[order[i]];
        }
    }
    free(order);
    free(a->train.data);
    a->train.data = kept;
    a->train.count = all - held;
    return true;
}

#define HASH_START 0xcbf29ce484222325u

static uint64_t hash_more(uint64_t hash, const void* data, size_t bytes) {
    const unsigned char* p = (const unsigned char*)data;
    for (size_t i = 0; i < bytes; i++) {
        hash = (hash ^ p[i]) * 0x100000001b3u;
    }
    return hash;
}

static uint64_t samples_hash(const samples* s, uint64_t hash) {
    for (size_t i = 0; i < s->count; i++) {
        size_t bytes = (size_t)s->data[i].length * sizeof(int32_t);
        hash = hash_more(hash, s->data[i].ids, bytes);
        hash = hash_more(hash, s->data[i].labels, bytes);
    }
    return hash;
}

static void counts_print(app* a) {
    const counts* c = &a->counted;
    say(a, "data: %zu samples, %llu tokens, %llu of them trained; %zu held out\n",
        c->used - a->eval.count * (a->eval_data == NULL ? 1 : 0), (unsigned long long)c->tokens,
        (unsigned long long)c->trained, a->eval.count);
    if (c->too_long > 0) {
        say(a, "  %zu too long for --length %lld (the longest has %zu tokens): %s\n", c->too_long,
            (long long)a->o.length, c->longest,
            a->o.truncate ? "truncated" : "skipped; use --truncate to shorten them instead");
    }
    if (c->empty > 0) {
        say(a, "  %zu empty: skipped\n", c->empty);
    }
    if (c->masked > 0) {
        say(a, "  %zu with nothing to train on: skipped\n", c->masked);
    }
}

static bool samples_open(app* a) {
    if (a->data == NULL && !data_open(a, a->o.data, &a->data)) {
        return false;
    }
    if (!samples_take(a, a->data, &a->train, &a->counted)) {
        return false;
    }
    if (a->o.eval_data != NULL) {
        counts unused;
        if (!data_open(a, a->o.eval_data, &a->eval_data) ||
            !samples_take(a, a->eval_data, &a->eval, &unused)) {
            return false;
        }
    }
    if (a->train.count == 0 && !a->o.doctor) {
        const counts* c = &a->counted;
        return fail(a->error,
                    "%s: none of the %zu samples can be used for training: %zu too long for "
                    "--length %lld, %zu empty, %zu with nothing to train on; see --doctor",
                    a->o.data, c->all, c->too_long, (long long)a->o.length, c->empty, c->masked);
    }
    if (!samples_split(a)) {
        return false;
    }
    a->data_hash = samples_hash(&a->eval, samples_hash(&a->train, HASH_START));
    return true;
}

#endif
