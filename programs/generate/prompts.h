// prompts.h - the prompts of a file, as tokens, with the answers that the file has for them.
#ifndef GENERATE_PROMPTS_H
#define GENERATE_PROMPTS_H

#define BATCH_ID_SIZE 17

// A prompt of the file; with --samples, one of its answers.
typedef struct asked {
    size_t line;
    size_t twin; // how many records before it start on the same line
    int64_t sample;
    qlora_text_ids ids;
    char* reference; // NULL = the file has none
    size_t reference_size;
    char id[BATCH_ID_SIZE]; // of the prompt and the options, to recognise its answer
    bool too_long;          // it gets a line that says so
    bool done;              // its line is in the file of answers
    bool failed;            // and that line says that it is too long
} asked;

// A text in the making.
typedef struct spoken {
    qlora_generation* generation; // NULL = free
    size_t index;
    int64_t made;
    qlora_text_stream stream;
    qlora_text_bytes text;
} spoken;

typedef struct asked_place { // to find a prompt by its id
    char id[BATCH_ID_SIZE];
    size_t index;
} asked_place;

typedef struct batch {
    asked* prompts;
    size_t count;
    size_t room;
    asked_place* places; // in the order of the ids
    size_t too_long;     // prompts
    size_t references;
    size_t next;    // prompt to begin
    size_t written; // answers in the file
    size_t before;  // those of an earlier start
    size_t last;    // the prompt of the last answer in the file
    bool mixed;     // the answers are not in the order of their prompts
    spoken* texts;
    size_t width;
    FILE* out;
    int64_t tokens; // made by this start
    double start;
    double shown; // when progress was printed last
    size_t told;  // tenths of the answers that were told
} batch;

static void batch_free(app* a, batch* b) {
    for (size_t i = 0; i < b->count; i++) {
        qlora_text_ids_free(a->text, &b->prompts[i].ids);
        free(b->prompts[i].reference);
    }
    for (size_t i = 0; b->texts != NULL && i < b->width; i++) {
        (void)qlora_generate_end(b->texts[i].generation);
        qlora_text_bytes_free(a->text, &b->texts[i].text);
    }
    free(b->prompts);
    free(b->places);
    free(b->texts);
    if (b->out != NULL) {
        fclose(b->out);
    }
}

static uint64_t id_add(uint64_t hash, const void* data, size_t size) { // FNV-1a
    const unsigned char* bytes = (const unsigned char*)data;
    for (size_t i = 0; i < size; i++) {
        hash = (hash ^ bytes[i]) * 1099511628211u;
    }
    return hash;
}

// Distinguishes models and adapters: their config, the bytes of the adapter, the size of the model.
static uint64_t files_identity(const app* a) {
    const struct {
        const char* folder;
        const char* name;
        bool whole;
    } rows[] = {{a->o.model, "config.json", true},
                {a->o.model, "model.safetensors", false},
                {a->o.model, "model.safetensors.index.json", true},
                {a->o.adapter, "adapter_config.json", true},
                {a->o.adapter, "adapter_model.safetensors", true},
                {a->o.adapter, "trained_norms.safetensors", true}};
    double size = path_size(a->o.model);
    uint64_t hash = id_add(14695981039346656037u, &size, sizeof size);
    if (a->o.expert_layout != 0) {
        hash = id_add(hash, &a->o.expert_layout, sizeof a->o.expert_layout);
    }
    if (a->o.rope_scale != NULL) {
        hash = id_add(hash, a->o.rope_scale, strlen(a->o.rope_scale));
    }
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char path[FOLDER_PATH];
        blob text;
        memset(&text, 0, sizeof text);
        snprintf(path, sizeof path, "%s/%s", rows[i].folder != NULL ? rows[i].folder : "",
                 rows[i].name);
        size = rows[i].folder != NULL ? path_size(path) : 0.0;
        hash = id_add(hash, &size, sizeof size);
        if (size > 0.0 && rows[i].whole && blob_read_path(&text, path) == 0) {
            hash = id_add(hash, text.data, text.count);
        }
        blob_free(&text);
    }
    return hash;
}

// What an answer depends on: the prompt's tokens, the options of sampling and where it stops.
static void asked_name(const app* a, asked* p) {
    const options* o = &a->o;
    const double numbers[] = {o->temperature, o->top_p, o->min_p, o->penalty};
    const int64_t whole[] = {o->max_tokens, o->top_k, o->seed, (int64_t)p->line, o->base, o->mode};
    uint64_t hash = a->identity;
    hash = id_add(hash, p->ids.data, p->ids.count * sizeof *p->ids.data);
    hash = id_add(hash, numbers, sizeof numbers);
    hash = id_add(hash, whole, sizeof whole);
    if (o->samples > 1) { // so that answers of earlier versions are recognised
        const int64_t sample[] = {o->samples, p->sample};
        hash = id_add(hash, sample, sizeof sample);
    }
    if (p->twin > 0) {
        hash = id_add(hash, &p->twin, sizeof p->twin);
    }
    for (int64_t i = 0; i < o->stops.count; i++) {
        hash = id_add(hash, o->stops.items[i], strlen(o->stops.items[i]) + 1);
    }
    snprintf(p->id, sizeof p->id, "%016llx", (unsigned long long)hash);
}

// Room for one more; NULL if there is no memory.
static asked* asked_next(batch* b, size_t line) {
    if (b->count == b->room) {
        size_t room = b->room > 0 ? 2 * b->room : 64;
        asked* more = (asked*)realloc(b->prompts, room * sizeof *more);
        if (more == NULL) {
            return NULL;
        }
        b->prompts = more;
        b->room = room;
    }
    asked* p = &b->prompts[b->count++];
    memset(p, 0, sizeof *p);
    p->line = line;
    return p;
}

// Why there is no answer to a prompt of `count` tokens; false if there can be one. Positions are
// given out in pages of 16 or more.
static bool asked_too_long(const app* a, size_t count, char why[160]) {
    int64_t room = a->limit - (int64_t)count;
    int64_t most = a->o.max_tokens < room ? a->o.max_tokens : room;
    if (room <= 0) {
        snprintf(why, 160,
                 "the prompt has %zu tokens; the model's limit is %lld, and the text needs at "
                 "least one more",
                 count, (long long)a->limit);
    } else if (a->o.positions > 0 && (int64_t)count + most > (a->o.positions + 15) / 16 * 16) {
        snprintf(why, 160,
                 "--positions %lld is too small: the prompt and its answer can have %lld tokens; "
                 "raise it, or lower --max-tokens",
                 (long long)a->o.positions, (long long)((int64_t)count + most));
    } else {
        return false;
    }
    return true;
}

// One of the answers to a prompt.
static bool asked_add(app* a, batch* b, const qlora_text_sample* s, int64_t sample) {
    asked* p = asked_next(b, s->line);
    bool ok = p != NULL;
    for (size_t i = 0; ok && i < s->count; i++) {
        ok = qlora_text_ids_add(a->text, &p->ids, s->ids[i]) == QLORA_OK;
    }
    if (ok && s->reference != NULL) {
        p->reference = (char*)malloc(s->reference_size + 1);
        ok = p->reference != NULL;
        p->reference_size = s->reference_size;
    }
    if (!ok) {
        return fail("out of memory");
    }
    if (s->reference != NULL && s->reference_size > 0) {
        memcpy(p->reference, s->reference, s->reference_size);
    }
    p->sample = sample;
    char why[160];
    p->too_long = asked_too_long(a, s->count, why);
    const asked* before = b->count > (size_t)a->o.samples ? p - a->o.samples : NULL;
    p->twin = before != NULL && before->line == p->line ? before->twin + 1 : 0;
    b->too_long += p->too_long && sample == 0 ? 1 : 0;
    b->references += p->reference != NULL ? 1 : 0;
    asked_name(a, p);
    return true;
}

static bool sample_add(app* a, batch* b, const qlora_text_sample* s) {
    if (s->count == 0) {
        return fail("%s:%zu: the prompt has no tokens", a->o.data, s->line);
    }
    for (int64_t sample = 0; sample < a->o.samples; sample++) {
        if (!asked_add(a, b, s, sample)) {
            return false;
        }
    }
    a->talks = a->talks || s->chat;
    return tokenizer_check(a, &b->prompts[b->count - 1].ids);
}

static int place_compare(const void* a, const void* b) {
    return strcmp(((const asked_place*)a)->id, ((const asked_place*)b)->id);
}

static bool places_make(batch* b) {
    b->places = (asked_place*)calloc(b->count, sizeof *b->places);
    if (b->places == NULL) {
        return fail("out of memory");
    }
    for (size_t i = 0; i < b->count; i++) {
        memcpy(b->places[i].id, b->prompts[i].id, sizeof b->places[i].id);
        b->places[i].index = i;
    }
    qsort(b->places, b->count, sizeof *b->places, place_compare);
    return true;
}

static bool data_fail(const app* a) {
    return fail_library(qlora_text_last_error(a->text));
}

// Opens the file with the reader that finetune has.
static bool data_open(app* a, qlora_text_data** out) {
    qlora_text_data_desc desc;
    qlora_text_data_info info;
    char why[HUB_ADVICE];
    const char* hub = hub_advice(a->o.data, "--data", why);
    if (hub[0] != '\0') {
        return fail("--data %s: no such file%s", a->o.data, hub);
    }
    memset(&desc, 0, sizeof desc);
    desc.path = a->o.data;
    desc.chat = a->chat;
    desc.format = a->o.format;
    if (desc.format == NULL && !qlora_text_data_known(a->o.data)) {
        desc.format = "jsonl";
    }
    desc.columns = a->o.columns;
    desc.prompts = a->o.chat ? QLORA_TEXT_ASK_CHAT : QLORA_TEXT_ASK;
    desc.system = a->o.system;
    blob text;
    memset(&text, 0, sizeof text);
    bool piped = strcmp(a->o.data, "-") == 0;
    int code = piped ? blob_read(&text, stdin) : 0;
    if (code != 0) {
        return fail("cannot read standard input: %s", strerror(code));
    }
    qlora_result r = piped ? qlora_text_data_load(a->text, &desc, text.data, text.count, out)
                           : qlora_text_data_open(a->text, &desc, out);
    blob_free(&text);
    if (r != QLORA_OK || qlora_text_data_query(*out, &info) != QLORA_OK) {
        return data_fail(a);
    }
    if (info.ignored[0] != '\0') {
        fprintf(stderr, "[%s: not used: %s]\n", a->o.data, info.ignored);
    }
    return true;
}

// The texts that are too long get a line of their own; if all are, there is nothing to do.
static bool prompts_check(const app* a, const batch* b) {
    const asked* first = &b->prompts[0];
    size_t all = b->count / (size_t)a->o.samples;
    char rest[64] = "";
    char why[160];
    if (b->too_long == all && all > 1) {
        snprintf(rest, sizeof rest, "; the other %zu are too long as well", all - 1);
    }
    if (b->too_long == all && asked_too_long(a, first->ids.count, why)) {
        return fail("%s:%zu: %s%s", a->o.data, first->line, why, rest);
    }
    return (a->o.score == NULL || b->references > 0) ||
           fail("--score needs answers to compare with, and --data %s has none", a->o.data);
}

static bool batch_read(app* a, batch* b) {
    qlora_text_data* data = NULL;
    bool ok = data_open(a, &data);
    size_t count = qlora_text_data_count(data);
    for (size_t i = 0; ok && i < count; i++) {
        qlora_text_sample s;
        ok = qlora_text_sample_read(data, i, &s) == QLORA_OK ? sample_add(a, b, &s) : data_fail(a);
    }
    qlora_text_data_info info;
    qlora_text_tok_info tok;
    if (ok && qlora_text_data_query(data, &info) == QLORA_OK && info.own_bos &&
        qlora_text_tok_query(a->tok, &tok) == QLORA_OK) {
        bos_tell(a, tok.bos, "a prompt");
    }
    qlora_text_data_close(data);
    return ok && prompts_check(a, b) && places_make(b);
}

#endif
