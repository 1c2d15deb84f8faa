// samples.h - the samples: read, counted, split.
#ifndef FINETUNE_SAMPLES_H
#define FINETUNE_SAMPLES_H

static bool tokenizer_open(app* a) {
    char error[1024] = "";
    qlora_text_tok_info info;
    qlora_text_chat_desc desc;
    qlora_text_chat_info chat;
    memset(&desc, 0, sizeof desc);
    if (!text_open(a)) {
        return false;
    }
    const char* folder = a->o.demo ? a->o.model.path : tokenizer_folder(a);
    if (a->tok == NULL &&
        (a->new_tokens.row_count > 0
             ? qlora_text_tok_open_with(a->text, a->o.model.path, a->new_tokens.tokens,
                                        a->new_tokens.count, &a->tok)
             : qlora_text_tok_open(a->text, folder, &a->tok)) != QLORA_OK) {
        return text_fail(a, folder == a->o.model.path ? "the model's tokenizer: "
                                                      : "the adapter's tokenizer: ");
    }
    if (qlora_text_tok_query(a->tok, &info) != QLORA_OK) {
        return text_fail(a, "");
    }
    if (a->o.adapter.from != NULL && adapter_has_rows(a->o.adapter.from) &&
        info.count > a->config.vocab) {
        a->config.vocab = info.count; // the adapter has their rows; without them, it is refused
    }
    if (info.count > a->config.vocab) {
        // Ids beyond the model's vocabulary would read past its embedding; found sample by sample.
        snprintf(error, sizeof error, "the tokenizer has %d tokens, the model %lld",
                 (int)info.count, (long long)a->config.vocab);
        say(a, "note: %s\n", error);
    }
    desc.tok = a->tok;
    desc.folder = a->o.demo ? NULL : a->o.model.path;
    desc.tokenizer_folder = a->o.adapter.from;
    desc.name = a->o.data.template_name;
    desc.template_file = a->o.data.chat_template;
    if (qlora_text_chat_open(a->text, &desc, &a->chat) != QLORA_OK ||
        qlora_text_chat_query(a->chat, &chat) != QLORA_OK) {
        return text_fail(a, "the chat format (see --template): ");
    }
    if (chat.missing != NULL) {
        say(a, "note: %s %s: the tokenizer has no token %s; it is written as text\n",
            a->o.data.template_name != NULL ? "--template" : "chat format", chat.name,
            chat.missing);
    }
    if (chat.replaced) {
        say(a, "note: --%s %s is used; %s was trained with another chat format\n",
            a->o.data.template_name != NULL ? "template" : "chat-template",
            a->o.data.template_name != NULL ? a->o.data.template_name : a->o.data.chat_template,
            a->o.adapter.from);
    }
    return true;
}

// Names in the records that nothing was done with are told, so that no column is lost unnoticed.
static bool ignored_tell(app* a, const char* path, qlora_text_data* data) {
    qlora_text_data_info info;
    if (data == NULL || qlora_text_data_query(data, &info) != QLORA_OK) {
        return data == NULL || text_fail(a, "");
    }
    if (info.ignored[0] != '\0') {
        say(a, "note: %s: not used: %s\n", data_name(path), info.ignored);
    }
    return true;
}

// A file that is larger than this is not kept in memory.
#define STREAM_BYTES 1073741824.0

static bool data_stream(const app* a, const char* path) {
    return a->o.data.stream == STREAM_ON ||
           (a->o.data.stream == STREAM_AUTO && path_size(path) > STREAM_BYTES);
}

// Then a name in --columns must be in one of them, not in each.
static bool several_files(const app* a) {
    return a->data.inputs.count + a->data.eval_inputs.count > 1 || a->o.data.eval_files.count > 0;
}

static bool data_open(app* a, input* one) {
    blob text;
    const char* path = one->path;
    bool piped = strcmp(path, "-") == 0;
    memset(&text, 0, sizeof text);
    qlora_text_data_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.path = path;
    desc.format = a->o.data.format;
    desc.columns = a->o.data.columns;
    desc.columns_partial = !piped && several_files(a);
    desc.chat = a->chat;
    desc.chunk_tokens = (size_t)a->o.data.length;
    desc.train_prompt = a->o.data.train_prompt;
    desc.last_turn_only = a->o.data.last_turn;
    desc.stream = !piped && data_stream(a, path);
    desc.bad = a->o.doctor ? record_note : NULL;
    desc.bad_user = a;
    desc.preference = method_of(a->o.method.kind)->records;
    a->data.reading = data_name(path);
    int code = piped ? blob_read(&text, stdin) : 0;
    if (code != 0) {
        return error_set(a->error, "cannot read standard input: %s", strerror(code));
    }
    qlora_result result =
        piped ? qlora_text_data_load(a->text, &desc, text.data, text.count, &one->data)
              : qlora_text_data_open(a->text, &desc, &one->data);
    blob_free(&text);
    return (result == QLORA_OK || text_fail(a, "")) && ignored_tell(a, path, one->data);
}

static size_t trained_count(const int32_t* labels, size_t length) {
    size_t trained = 0;
    for (size_t i = 1; i < length; i++) {
        trained += labels[i] != -100 ? 1 : 0;
    }
    return trained;
}

static bool ids_check(app* a, const qlora_text_sample* s, const char* path) {
    for (size_t i = 0; i < s->count; i++) {
        bool id = s->ids[i] < 0 || s->ids[i] >= a->config.vocab;
        if (id || s->labels[i] >= a->config.vocab) {
            return error_set(a->error,
                             "%s:%zu: %s %d is out of range; the model's ids are 0 to %lld", path,
                             s->line, id ? "token id" : "label",
                             (int)(id ? s->ids[i] : s->labels[i]), (long long)a->config.vocab - 1);
        }
    }
    return true;
}

// Whether an answer in the sample is empty: a run of trained tokens without any text, after
// something that is not trained. Plain text, which has only BOS before it, answers nothing.
static bool sample_silent(app* a, const qlora_text_sample* s, int32_t bos, bool* out) {
    qlora_text_bytes text;
    memset(&text, 0, sizeof text);
    *out = false;
    size_t first = s->count > 0 && s->ids[0] == bos ? 1 : 0;
    while (first < s->count && s->labels[first] != -100) {
        first++;
    }
    for (size_t begin = first + 1; begin < s->count && !*out;) {
        size_t end = begin;
        while (end < s->count && s->labels[end] != -100) {
            end++;
        }
        if (end > begin && end - begin <= 8) { // longer ones have text
            text.count = 0;
            if (qlora_text_decode(a->tok, s->ids + begin, end - begin, QLORA_TEXT_SKIP, &text) !=
                QLORA_OK) {
                return text_fail(a, "");
            }
            size_t blank = 0;
            while (blank < text.count && strchr(" \t\r\n", text.data[blank]) != NULL) {
                blank++;
            }
            *out = blank == text.count;
        }
        begin = end + 1;
    }
    qlora_text_bytes_free(a->text, &text);
    return true;
}

// Counts one sample; *length and *trained are what is left of it for training. *length is 0 if that
// is nothing.
static bool sample_count(app* a, const qlora_text_sample* s, int32_t bos, counts* c, size_t* length,
                         size_t* trained) {
    bool silent = false;
    size_t all = s->count;
    bool too_long = all > (size_t)a->o.data.length;
    if (!sample_silent(a, s, bos, &silent)) {
        return false;
    }
    c->all++;
    c->longest = all > c->longest ? all : c->longest;
    c->too_long += too_long ? 1 : 0;
    c->empty += all < 2 ? 1 : 0;
    c->silent += silent ? 1 : 0;
    // What is cut off is not trained, so the model does not see the end.
    bool cut = s->labels[all > 0 ? all - 1 : 0] == -100 || (too_long && a->o.data.truncate);
    c->no_end += all >= 2 && (cut || s->endless) ? 1 : 0;
    c->endless += all >= 2 && s->endless ? 1 : 0;
    c->two_bos += all >= 2 && bos >= 0 && s->ids[0] == bos && s->ids[1] == bos ? 1 : 0;
    *length = too_long ? (size_t)a->o.data.length : all;
    *trained = trained_count(s->labels, *length);
    bool skipped = too_long && !a->o.data.truncate;
    c->masked += !skipped && *length >= 2 && *trained == 0 ? 1 : 0;
    if (*length < 2 || *trained == 0 || skipped) {
        *length = 0;
    }
    return true;
}

static bool samples_room(app* a, samples* out, size_t more) {
    sample* grown = (sample*)realloc(out->data, (out->count + more + 1) * sizeof *grown);
    if (grown == NULL) {
        return error_set(a->error, "out of memory");
    }
    out->data = grown;
    return true;
}

static uint64_t sample_key(const int32_t* ids, size_t length) {
    return mix(hash_more(HASH_START, ids, length * sizeof *ids));
}

// The texts of a sample.
static size_t sample_texts(const app* a) {
    return method_of(a->o.method.kind)->texts;
}

static int32_t prompt_length(const qlora_text_sample* s) {
    int32_t length = 0;
    while ((size_t)length < s->count && (length == 0 || s->labels[length] == -100)) {
        length++;
    }
    return length;
}

// Of what comes before the first trained token.
static uint64_t prompt_key(const qlora_text_sample* s) {
    bool has_prompt = s->count > 0 && s->labels[0] == -100;
    return sample_key(s->ids, has_prompt ? (size_t)prompt_length(s) : 0);
}

// Adds a text to a sample; *usable is cleared if it cannot be trained.
static bool text_take(app* a, const qlora_text_sample* s, int32_t bos, counts* c, sample* t,
                      bool* usable) {
    size_t length = 0;
    size_t trained = 0;
    if (!sample_count(a, s, bos, c, &length, &trained)) {
        return false;
    }
    *usable = *usable && length > 0;
    t->first = t->length == 0 ? (int32_t)length : t->first;
    t->length += (int32_t)length;
    t->trained += (int32_t)trained;
    t->prompt = prompt_length(s);
    t->desirable = s->desirable;
    t->key ^= sample_key(s->ids, length);
    if (length > 0) {
        a->data.data_hash = hash_more(a->data.data_hash, s->ids, length * sizeof *s->ids);
        a->data.data_hash = hash_more(a->data.data_hash, s->labels, length * sizeof *s->labels);
        a->data.data_hash = method_of(a->o.method.kind)->preferences
                                ? hash_more(a->data.data_hash, &s->desirable, sizeof s->desirable)
                                : a->data.data_hash;
    }
    return true;
}

// Of a record's first sample, up to the end of its first answer.
static uint64_t opening_key(const qlora_text_sample* s) {
    size_t end = (size_t)prompt_length(s);
    while (end < s->count && s->labels[end] != -100) {
        end++;
    }
    return sample_key(s->ids, end);
}

// Counts the record that a sample is made of. A conversation gives a sample for each turn if its
// template changes earlier turns when others follow.
static void record_count(app* a, const qlora_text_sample* s, counts* c, sample* t) {
    if (!s->continues) {
        c->records++;
        c->opening = opening_key(s);
    } else { // a run that held out single turns is not resumed
        a->data.data_hash = hash_more(a->data.data_hash, "record", 6);
    }
    t->record = (uint32_t)(c->records - 1);
    t->opening = c->opening;
}

// Reads sample number i of a file; *usable = whether it can be trained.
static bool sample_take(app* a, const input_list* list, size_t number, size_t i, int32_t bos,
                        counts* c, sample* t, bool* usable) {
    const char* path = data_name(list->data[number].path);
    memset(t, 0, sizeof *t);
    t->input = (uint32_t)number;
    t->index = (uint32_t)i;
    *usable = true;
    uint64_t prompts[2] = {0, 0};
    for (size_t k = 0; k < sample_texts(a); k++) {
        qlora_text_sample s;
        if (qlora_text_sample_read(list->data[number].data, i + k, &s) != QLORA_OK) {
            return text_fail(a, "");
        }
        if (k == 0) {
            record_count(a, &s, c, t);
        }
        if (!ids_check(a, &s, path)) {
            if (!a->o.doctor) {
                return false;
            }
            bad_add(a, path, s.line, place_skip(a->error, path));
            a->error[0] = '\0';
            *usable = false;
        } else if (!text_take(a, &s, bos, c, t, usable)) {
            return false;
        }
        prompts[k] = prompt_key(&s);
    }
    c->other_prompts += *usable && sample_texts(a) == 2 && prompts[0] != prompts[1] ? 1 : 0;
    t->number = (int32_t)(c->all - 1);
    if (t->length > a->o.training.tokens) { // both texts of a pair are in one micro-batch
        c->no_room += *usable ? 1 : 0;
        *usable = false;
    }
    return true;
}

// Whether sample number i of a file belongs to a record beyond --max-samples.
static bool sample_over(app* a, qlora_text_data* data, size_t i, const counts* c, bool* over) {
    qlora_text_sample s;
    *over = a->o.data.max_samples > 0 && c->records == (size_t)a->o.data.max_samples;
    if (*over) {
        if (qlora_text_sample_read(data, i, &s) != QLORA_OK) {
            return text_fail(a, "");
        }
        *over = !s.continues;
    }
    return true;
}

// Collects the samples of a file that can be used for training and counts the others.
static bool samples_take(app* a, const input_list* list, size_t number, samples* out, counts* c) {
    qlora_text_tok_info info;
    qlora_text_data* data = list->data[number].data;
    size_t count = qlora_text_data_count(data);
    if (!samples_room(a, out, count)) {
        return false;
    }
    if (qlora_text_tok_query(a->tok, &info) != QLORA_OK) {
        return text_fail(a, "");
    }
    for (size_t i = 0; i < count; i += sample_texts(a)) {
        bool usable = true;
        bool over = false;
        sample* t = &out->data[out->count];
        if (!sample_over(a, data, i, c, &over)) {
            return false;
        }
        if (over) {
            break;
        }
        if (!sample_take(a, list, number, i, info.bos, c, t, &usable)) {
            return false;
        }
        if (usable) {
            c->tokens += (uint64_t)t->length;
            c->trained += (uint64_t)t->trained;
            c->used_records += out->count == 0 || t->record != t[-1].record ? 1 : 0;
            out->count++;
        }
    }
    c->used = out->count;
    return true;
}

// The end of the samples that are made of the same record as sample i.
static size_t record_end(const samples* s, size_t i) {
    size_t end = i + 1;
    while (end < s->count && s->data[end].record == s->data[i].record) {
        end++;
    }
    return end;
}

static size_t records_count(const samples* s) {
    size_t count = 0;
    for (size_t i = 0; i < s->count; i = record_end(s, i)) {
        count++;
    }
    return count;
}

static void shuffle(uint32_t* order, size_t count, uint64_t key) {
    for (size_t i = count; i > 1; i--) {
        size_t j = (size_t)(mix(key ^ mix(i)) % i);
        uint32_t keep = order[i - 1];
        order[i - 1] = order[j];
        order[j] = keep;
    }
}

static bool sample_among(const samples* s, const sample* one) {
    for (size_t i = 0; i < s->count; i++) {
        if (s->data[i].length == one->length && s->data[i].key == one->key) {
            return true;
        }
    }
    return false;
}

// How many records are held out; 0 if none.
static size_t records_held(const app* a, size_t all) {
    double wish =
        a->o.eval.share < 1.0 ? fmin(200.0, ceil(a->o.eval.share * (double)all)) : a->o.eval.share;
    size_t held = (size_t)wish;
    if (held == 1 && a->o.eval.share < 1.0 && method_of(a->o.method.kind)->mismatched) {
        held = 2; // one text cannot be mismatched
    }
    return a->o.data.eval_files.count > 0 || all < 2 ? 0 : held;
}

// Moves the held-out records from a->data.train to a->data.eval: all samples of a record are on one
// side. The demo's text has few sentences, so their other copies are dropped.
static bool samples_split(app* a) {
    size_t all = records_count(&a->data.train);
    size_t held = records_held(a, all);
    if (held == 0) {
        return true;
    }
    if (held >= all) {
        return error_set(a->error, "--eval %g would hold out all %zu %ss, leaving none to train on",
                         a->o.eval.share, all, all != a->data.train.count ? "record" : "sample");
    }
    uint32_t* order = (uint32_t*)take(a, all, sizeof *order);
    sample* kept = (sample*)take(a, a->data.train.count, sizeof *kept);
    a->data.eval.data = (sample*)take(a, a->data.train.count, sizeof *kept);
    if (order == NULL || kept == NULL || a->data.eval.data == NULL) {
        free(order);
        free(kept);
        return false;
    }
    for (size_t i = 0, at = 0; i < all; i++, at = record_end(&a->data.train, at)) {
        order[i] = (uint32_t)at;
    }
    shuffle(order, all, mix((uint64_t)a->o.training.seed ^ 0x6576616cu));
    size_t count = 0;
    size_t records = 0; // held out
    for (size_t i = 0; i < all; i++) {
        const sample* s = &a->data.train.data[order[i]];
        size_t size = record_end(&a->data.train, order[i]) - order[i];
        if (a->o.demo && sample_among(&a->data.eval, s)) {
            continue;
        }
        samples to = {records < held ? a->data.eval.data + a->data.eval.count : kept + count, size};
        memcpy(to.data, s, size * sizeof *s);
        a->data.eval.count += records < held ? size : 0;
        count += records < held ? 0 : size;
        records += records < held ? 1 : 0;
    }
    free(order);
    free(a->data.train.data);
    a->data.train.data = kept;
    a->data.train.count = count;
    return count > 0 || error_set(a->error, "--eval %g leaves no sentence of the demo to train on",
                                  a->o.eval.share);
}

static int key_compare(const void* a, const void* b) {
    uint64_t x = *(const uint64_t*)a;
    uint64_t y = *(const uint64_t*)b;
    return x < y ? -1 : x > y ? 1 : 0;
}

// Counts the held-out samples that also occur in the training data, and those whose conversation
// starts like one there: their loss says little.
static bool shared_count(app* a) {
    size_t count = a->data.train.count;
    uint64_t* keys = (uint64_t*)take(a, 2 * count, sizeof *keys);
    if (keys == NULL) {
        return false;
    }
    uint64_t* openings = keys + count;
    for (size_t i = 0; i < count; i++) {
        keys[i] = a->data.train.data[i].key;
        openings[i] = a->data.train.data[i].opening;
    }
    qsort(keys, count, sizeof *keys, key_compare);
    qsort(openings, count, sizeof *keys, key_compare);
    for (size_t i = 0; i < a->data.eval.count; i++) {
        const sample* s = &a->data.eval.data[i];
        bool whole = bsearch(&s->key, keys, count, sizeof *keys, key_compare) != NULL;
        bool start = bsearch(&s->opening, openings, count, sizeof *keys, key_compare) != NULL;
        a->data.shared += whole ? 1 : 0;
        a->data.shared_start += !whole && start ? 1 : 0;
    }
    free(keys);
    return true;
}

static void problems_print(app* a, const counts* c) {
    if (c->too_long > 0) {
        say(a, "  %zu too long for --length %lld (the longest has %zu tokens): %s\n", c->too_long,
            (long long)a->o.data.length, c->longest,
            a->o.data.truncate ? "truncated" : "skipped; use --truncate to shorten them instead");
    }
    if (c->no_room > 0) {
        say(a, "  %zu too long for --tokens %lld, which must hold both texts: skipped\n",
            c->no_room, (long long)a->o.training.tokens);
    }
    if (c->other_prompts > 0) {
        say(a, "  %zu whose texts differ before the answers: only the last answers are trained\n",
            c->other_prompts);
    }
    if (c->empty > 0) {
        say(a, "  %zu empty: skipped\n", c->empty);
    }
    if (c->masked > 0) {
        say(a, "  %zu with nothing to train on: skipped\n", c->masked);
    }
    if (c->endless > 0) {
        say(a,
            "  %zu whose answers have no end marker: the model will not learn to stop; see "
            "--chat-template\n",
            c->endless);
    }
    if (c->silent > 0) {
        say(a, "  %zu with an empty answer: the model learns to say nothing\n", c->silent);
    }
}

static void samples_print(app* a, const char* name, const samples* s) {
    unsigned long long tokens = 0;
    unsigned long long trained = 0;
    for (size_t i = 0; i < s->count; i++) {
        tokens += (unsigned long long)s->data[i].length;
        trained += (unsigned long long)s->data[i].trained;
    }
    char of[64] = "";
    size_t records = records_count(s);
    if (records != s->count) {
        snprintf(of, sizeof of, " from %zu record%s", records, records == 1 ? "" : "s");
    }
    say(a, "%s: %zu %s%s%s, %llu tokens, %llu of them %s\n", name, s->count,
        method_of(a->o.method.kind)->unit, s->count == 1 ? "" : "s", of, tokens, trained,
        s == &a->data.eval ? "evaluated" : "trained");
}

static void counts_print(app* a) {
    if (a->data.train.count > 0) {
        samples_print(a, "data", &a->data.train);
        problems_print(a, &a->data.counted);
    }
    if (a->data.eval.count > 0) {
        bool given = a->o.data.eval_files.count > 0 || a->o.eval.only;
        samples_print(a, given ? "evaluation data" : "held out", &a->data.eval);
        problems_print(a, &a->data.eval_counted);
    }
    if (a->data.shared > 0) {
        say(a, "note: %lld of %zu evaluation samples also found in the training data\n",
            (long long)a->data.shared, a->data.eval.count);
    }
    if (a->data.shared_start > 0) {
        say(a,
            "note: %lld of %zu evaluation samples are from conversations that start like some in "
            "the training data\n",
            (long long)a->data.shared_start, a->data.eval.count);
    }
    size_t records = a->data.counted.used_records;
    double wish = ceil(a->o.eval.share * (double)records);
    if (a->o.data.eval_files.count == 0 && a->o.eval.share < 1.0 && wish > 200.0) {
        say(a, "note: --eval %g would be %.0f %ss; 200 are held out, the most for a fraction\n",
            a->o.eval.share, wish, records != a->data.counted.used ? "record" : "sample");
    }
}

static bool samples_need(app* a, const samples* s, const counts* c, const input_list* list) {
    if (s->count > 0 || a->o.doctor) {
        return true;
    }
    char which[64] = "the only sample cannot";
    size_t all = c->all / sample_texts(a);
    if (all != 1) {
        snprintf(which, sizeof which, "none of the %zu samples can", all);
    }
    return error_set(a->error,
                     "%s%s: %s be used: %zu too long for --length %lld, "
                     "%zu for --tokens %lld, %zu empty, %zu with nothing to train on; see --doctor",
                     data_name(list->data[0].path), list->count > 1 ? " and others" : "", which,
                     c->too_long, (long long)a->o.data.length, c->no_room,
                     (long long)a->o.training.tokens, c->empty, c->masked);
}

// Reads every file of an option.
static bool files_take(app* a, const option_texts* texts, bool weighted, input_list* list,
                       samples* out, counts* c) {
    if (!inputs_make(a, texts, weighted, list)) {
        return false;
    }
    for (size_t i = 0; i < list->count; i++) {
        if (!data_open(a, &list->data[i]) || !samples_take(a, list, i, out, c)) {
            return false;
        }
    }
    return samples_need(a, out, c, list);
}

// What each file has to train on, once the held-out samples are gone. Weights decide the order of
// the samples, so a run with other ones cannot be resumed.
static void weights_count(app* a) {
    for (size_t i = 0; i < a->data.train.count; i++) {
        input* one = &a->data.inputs.data[a->data.train.data[i].input];
        bool first = i == 0 || a->data.train.data[i].record != a->data.train.data[i - 1].record;
        one->samples++;
        one->records += first ? 1 : 0;
        one->tokens += (uint64_t)a->data.train.data[i].length;
    }
    for (size_t i = 0; i < a->data.inputs.count && weights_used(a); i++) {
        a->data.data_hash =
            hash_more(a->data.data_hash, &a->data.inputs.data[i].weight, sizeof(double));
    }
}

// Counts the files that lack a column; *example is one of them.
static size_t files_lacking(const input_list* list, const char* name, size_t size,
                            const char** example) {
    size_t count = 0;
    for (size_t i = 0; i < list->count; i++) {
        qlora_text_data_info info;
        if (list->data[i].data == NULL ||
            qlora_text_data_query(list->data[i].data, &info) != QLORA_OK) {
            continue;
        }
        for (const char* at = info.lacking; *at != '\0';) {
            size_t length = strcspn(at, ",");
            bool same = length == size && memcmp(at, name, size) == 0;
            count += same ? 1 : 0;
            *example = same ? data_name(list->data[i].path) : *example;
            at += length;
            at += at[0] == ',' ? 2 : 0;
        }
    }
    return count;
}

// Every name in --columns must be in one of the files. That others lack it is told once.
static bool columns_check(app* a) {
    size_t files = a->data.inputs.count + a->data.eval_inputs.count;
    for (const char* at = a->o.data.columns; at != NULL && *at != '\0' && several_files(a);) {
        const char* example = "";
        size_t to = strcspn(at, "=");
        const char* name = at + to + (at[to] == '=' ? 1 : 0);
        size_t size = strcspn(name, ",");
        size_t lacking = files_lacking(&a->data.inputs, name, size, &example) +
                         files_lacking(&a->data.eval_inputs, name, size, &example);
        if (lacking == files) {
            return error_set(a->error,
                             "--columns: no file has \"%.*s\", which is given for \"%.*s\"",
                             (int)size, name, (int)to, at);
        }
        if (lacking > 0) {
            say(a,
                "note: --columns: %zu of %zu files lack \"%.*s\" and are read without it: %s%s\n",
                lacking, files, (int)size, name, example, lacking > 1 ? ", ..." : "");
        }
        at = name + size + (name[size] == ',' ? 1 : 0);
    }
    return true;
}

static bool samples_open(app* a) {
    a->data.data_hash = new_tokens_hash(a, HASH_START);
    if (a->o.demo ? !samples_take(a, &a->data.inputs, 0, &a->data.train, &a->data.counted)
                  : !files_take(a, &a->o.data.files, true, &a->data.inputs, &a->data.train,
                                &a->data.counted)) {
        return false;
    }
    if ((a->o.data.eval_files.count > 0 &&
         !files_take(a, &a->o.data.eval_files, false, &a->data.eval_inputs, &a->data.eval,
                     &a->data.eval_counted)) ||
        !columns_check(a) || !samples_split(a) || !shared_count(a)) {
        return false;
    }
    weights_count(a);
    return true;
}

// The files that samples come from.
static const input_list* inputs_of(const app* a, const samples* s) {
    return s == &a->data.eval && a->o.data.eval_files.count > 0 && !a->o.eval.only
               ? &a->data.eval_inputs
               : &a->data.inputs;
}

#endif
