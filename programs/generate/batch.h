// batch.h - answers to the prompts of a file, many at a time, written in their order.
#ifndef GENERATE_BATCH_H
#define GENERATE_BATCH_H

#define BATCH_ID_SIZE 17

typedef enum answer_end { END_STOP, END_LENGTH, END_TEXT } answer_end;

// A prompt of the file, and its answer until that is written; with --samples, one of its answers.
typedef struct asked {
    size_t line;
    int64_t sample;
    qlora_text_ids ids;
    char id[BATCH_ID_SIZE]; // of the prompt and the options, to recognise its answer
    char* answer;           // a line of JSON; NULL = not there yet
    size_t answer_size;
} asked;

// A text in the making.
typedef struct spoken {
    qlora_generation* generation; // NULL = free
    size_t index;
    int64_t made;
    qlora_text_stream stream;
    qlora_text_bytes text;
} spoken;

typedef struct batch {
    asked* prompts;
    size_t count;
    size_t room;
    size_t next;    // prompt to begin
    size_t written; // answers in the file
    size_t before;  // those of an earlier start
    spoken* texts;
    size_t width;
    FILE* out;
    int64_t tokens; // made by this start
    double start;
    double shown; // when progress was printed last
} batch;

static void batch_free(app* a, batch* b) {
    for (size_t i = 0; i < b->count; i++) {
        qlora_text_ids_free(a->text, &b->prompts[i].ids);
        free(b->prompts[i].answer);
    }
    for (size_t i = 0; b->texts != NULL && i < b->width; i++) {
        (void)qlora_generate_end(b->texts[i].generation);
        qlora_text_bytes_free(a->text, &b->texts[i].text);
    }
    free(b->prompts);
    free(b->texts);
    if (b->out != NULL) {
        fclose(b->out);
    }
}

// ---- the prompts ----

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
    for (int64_t i = 0; i < o->stops.count; i++) {
        hash = id_add(hash, o->stops.items[i], strlen(o->stops.items[i]) + 1);
    }
    snprintf(p->id, sizeof p->id, "%016llx", (unsigned long long)hash);
}

static bool asked_encode(app* a, asked* p, prompt_kind kind, const char* text, size_t size) {
    qlora_text_message messages[2];
    size_t count = 0;
    memset(messages, 0, sizeof messages);
    if (kind == PROMPT_CHAT) {
        return qlora_text_chat_encode_json(a->chat, text, size, true, NULL, &p->ids, NULL) ==
               QLORA_OK;
    }
    if (!a->o.chat) { // continued as it is, after BOS
        return text_encode(a, text, size, &p->ids);
    }
    if (a->o.system != NULL) {
        messages[count].role = "system";
        messages[count].content = a->o.system;
        messages[count++].length = strlen(a->o.system);
    }
    messages[count].role = "user";
    messages[count].content = text;
    messages[count++].length = size;
    return qlora_text_chat_encode(a->chat, messages, count, true, &p->ids, NULL) == QLORA_OK;
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

// The other samples of the prompt that was added last.
static bool asked_repeat(app* a, batch* b) {
    size_t first = b->count - 1;
    for (int64_t sample = 1; sample < a->o.samples; sample++) {
        asked* p = asked_next(b, b->prompts[first].line);
        bool ok = p != NULL;
        for (size_t i = 0; ok && i < b->prompts[first].ids.count; i++) {
            ok = qlora_text_ids_add(a->text, &p->ids, b->prompts[first].ids.data[i]) == QLORA_OK;
        }
        if (!ok) {
            return fail("out of memory");
        }
        p->sample = sample;
        asked_name(a, p);
    }
    return true;
}

static bool asked_add(app* a, batch* b, size_t line, prompt_kind kind, const char* text,
                      size_t size) {
    char place[FOLDER_PATH + 32];
    asked* p = asked_next(b, line);
    if (p == NULL) {
        return fail("out of memory");
    }
    snprintf(place, sizeof place, "%.900s:%zu: ", a->o.data, line);
    if (kind == PROMPT_CHAT && a->o.system != NULL) {
        return fail("%s--system cannot be used for a conversation; add it to its messages", place);
    }
    if (kind == PROMPT_CHAT && a->chat == NULL && !chat_format_open(a)) {
        return false;
    }
    if (!asked_encode(a, p, kind, text, size)) {
        return text_fail(a, place);
    }
    if (p->ids.count == 0) {
        return fail("%sthe prompt has no tokens", place);
    }
    if ((int64_t)p->ids.count >= a->limit) {
        return fail("%sthe prompt has %zu tokens; the model's limit is %lld, and the text needs at "
                    "least one more",
                    place, p->ids.count, (long long)a->limit);
    }
    asked_name(a, p);
    return tokenizer_check(a, &p->ids) && asked_repeat(a, b);
}

static bool batch_read(app* a, batch* b) {
    char error[1024];
    blob file;
    blob text;
    memset(&file, 0, sizeof file);
    memset(&text, 0, sizeof text);
    int code = blob_read_path(&file, a->o.data);
    bool ok = code == 0 || fail("--data %s: %s", a->o.data, strerror(code));
    const char* end = file.data != NULL ? file.data + file.count : NULL;
    size_t number = 1;
    for (const char* line = file.data; ok && line < end; number++) {
        const char* stop = (const char*)memchr(line, '\n', (size_t)(end - line));
        stop = stop != NULL ? stop : end;
        size_t size = (size_t)(stop - line);
        text.count = 0;
        prompt_kind kind = prompt_line_read(line, size, &text, error);
        if (kind == PROMPT_WRONG) {
            ok = fail("%s:%zu: %s", a->o.data, number, error);
        } else if (kind == PROMPT_TEXT) {
            ok = asked_add(a, b, number, kind, text.data != NULL ? text.data : "", text.count);
        } else if (kind == PROMPT_CHAT) {
            ok = asked_add(a, b, number, kind, line, size);
        }
        line = stop + 1;
    }
    ok = ok && (b->count > 0 || fail("--data %s: there is no prompt", a->o.data));
    blob_free(&file);
    blob_free(&text);
    return ok;
}

// ---- the answers ----

// The length of the answer that a file has at `line`: with its newline, or 0 if it was cut short.
// False if it is something else.
static bool answer_known(const batch* b, const char* line, size_t left, size_t* length) {
    char begin[32];
    const char* stop = (const char*)memchr(line, '\n', left);
    *length = stop != NULL ? (size_t)(stop + 1 - line) : 0;
    if (b->written == b->count) {
        return false;
    }
    snprintf(begin, sizeof begin, "{\"id\":\"%s\",", b->prompts[b->written].id);
    size_t compared = stop == NULL && left < strlen(begin) ? left : strlen(begin);
    return left >= compared && memcmp(line, begin, compared) == 0;
}

// Takes over the answers that an earlier start has written. One that was cut short is removed.
static bool batch_resume(const app* a, batch* b) {
    blob file;
    memset(&file, 0, sizeof file);
    size_t kept = 0;
    size_t length = 1;
    if (path_exists(a->o.out) && !path_is_file(a->o.out)) {
        return fail("--out %s is not a file", a->o.out);
    }
    int code = path_exists(a->o.out) ? blob_read_path(&file, a->o.out) : 0;
    bool ok = code == 0 || fail("--out %s: %s", a->o.out, strerror(code));
    while (ok && kept < file.count && length > 0) {
        ok = answer_known(b, file.data + kept, file.count - kept, &length) ||
             fail("--out %s has something else in line %zu: answers to other prompts, with other "
                  "options or of another model; use another file",
                  a->o.out, b->written + 1);
        b->written += ok && length > 0 ? 1 : 0;
        kept += ok ? length : 0;
    }
    if (ok && kept < file.count && file_cut(a->o.out, (long)kept) != 0) {
        ok = fail("--out %s: %s", a->o.out, strerror(errno));
    }
    blob_free(&file);
    b->next = b->written;
    b->before = b->written;
    return ok;
}

// Writes the answers that are there, in the order of their prompts.
static bool batch_write(const app* a, batch* b) {
    while (b->written < b->count && b->prompts[b->written].answer != NULL) {
        asked* p = &b->prompts[b->written];
        if (fwrite(p->answer, 1, p->answer_size, b->out) != p->answer_size || fflush(b->out) != 0) {
            return fail("--out %s: %s", a->o.out, strerror(errno));
        }
        free(p->answer);
        p->answer = NULL;
        b->written++;
    }
    return true;
}

// A text in the making that has the same prompt; NULL if there is none.
static qlora_generation* spoken_alike(const batch* b, const asked* p) {
    for (size_t i = 0; i < b->width; i++) {
        const qlora_text_ids* ids = &b->prompts[b->texts[i].index].ids;
        if (b->texts[i].generation != NULL && ids->count == p->ids.count &&
            memcmp(ids->data, p->ids.data, ids->count * sizeof *ids->data) == 0) {
            return b->texts[i].generation;
        }
    }
    return NULL;
}

// Begins the next text. If there is no room for it yet, it stays the next one.
static bool spoken_begin(app* a, batch* b, spoken* s, bool* full) {
    qlora_generate_desc d = generate_desc(a);
    s->index = b->next;
    asked* p = &b->prompts[s->index];
    int64_t room = a->limit - (int64_t)p->ids.count;
    d.prompt = p->ids.data;
    d.prompt_tokens = (int64_t)p->ids.count;
    d.max_tokens = a->o.max_tokens < room ? a->o.max_tokens : room;
    d.seed = (uint64_t)a->o.seed + s->index; // so that equal prompts have different answers
    d.share = spoken_alike(b, p);
    qlora_result r = qlora_generate_begin(a->model, &d, &s->generation);
    *full = r == QLORA_ERR_FULL;
    if (*full || !lib(a, r)) {
        return *full;
    }
    b->next++;
    s->made = 0;
    s->text.count = 0;
    memset(&s->stream, 0, sizeof s->stream);
    // The prompt goes through the stream: it decides whether the first word needs a space.
    for (size_t i = 0; i < p->ids.count; i++) {
        if (!token_push(a, &s->stream, QLORA_TEXT_SKIP, p->ids.data[i])) {
            return fail("out of memory");
        }
        a->out.count = 0;
    }
    return true;
}

static bool spoken_end(app* a, batch* b, spoken* s, answer_end end) {
    static const char* const ends[] = {"stop", "length", "text"};
    asked* p = &b->prompts[s->index];
    char head[192];
    char sample[32] = "";
    blob line;
    memset(&line, 0, sizeof line);
    if (a->o.samples > 1) {
        snprintf(sample, sizeof sample, "\"sample\":%lld,", (long long)p->sample);
    }
    snprintf(head, sizeof head,
             "{\"id\":\"%s\",\"line\":%zu,%s\"prompt_tokens\":%zu,\"new_tokens\":%lld,"
             "\"end\":\"%s\",\"text\":",
             p->id, p->line, sample, p->ids.count, (long long)s->made, ends[end]);
    bool ok = blob_add(&line, head, strlen(head)) &&
              json_quote(s->text.data != NULL ? s->text.data : "", s->text.count, &line) &&
              blob_add(&line, "}\n", 2);
    p->answer = line.data;
    p->answer_size = line.count;
    qlora_generation* done = s->generation;
    s->generation = NULL;
    return (ok || fail("out of memory")) && lib(a, qlora_generate_end(done));
}

// The first --stop text in an answer from `from` on; the end if there is none.
static size_t text_stop(const app* a, const qlora_text_bytes* text, size_t from) {
    for (size_t at = from; at < text->count; at++) {
        for (int64_t i = 0; i < a->o.stops.count; i++) {
            size_t length = strlen(a->o.stops.items[i]);
            if (length <= text->count - at &&
                memcmp(text->data + at, a->o.stops.items[i], length) == 0) {
                return at;
            }
        }
    }
    return text->count;
}

// Adds what the stream has released to the answer; `end` says that nothing follows.
static bool spoken_add(app* a, spoken* s, bool end, bool* found) {
    size_t longest = 0;
    for (int64_t i = 0; i < a->o.stops.count; i++) {
        size_t length = strlen(a->o.stops.items[i]);
        longest = length > longest ? length : longest;
    }
    size_t from = s->text.count > longest ? s->text.count - longest : 0;
    bool ok = !end || qlora_text_stream_end(a->tok, &s->stream, &a->out) == QLORA_OK;
    ok = ok && qlora_text_bytes_add(a->text, &s->text, a->out.data, a->out.count) == QLORA_OK;
    a->out.count = 0;
    size_t at = text_stop(a, &s->text, from);
    *found = at < s->text.count;
    s->text.count = at;
    return ok || fail("out of memory");
}

static bool spoken_take(app* a, batch* b, spoken* s, int32_t token, bool stopped) {
    bool found = false;
    bool ok = true;
    s->made += token >= 0 ? 1 : 0;
    b->tokens += token >= 0 ? 1 : 0;
    if (!stopped) {
        ok = token_push(a, &s->stream, QLORA_TEXT_SKIP, token) || fail("out of memory");
        ok = ok && spoken_add(a, s, false, &found);
    }
    if (!ok || (!stopped && !found)) {
        return ok;
    }
    if (!found && !spoken_add(a, s, true, &found)) {
        return false;
    }
    return spoken_end(a, b, s, found ? END_TEXT : token >= 0 ? END_STOP : END_LENGTH);
}

// ---- the run ----

static void batch_progress(batch* b, bool end) {
    double now = seconds_now();
    double seconds = now - b->start;
    size_t done = b->written - b->before;
    if (end) {
        fprintf(stderr, "%s[%zu answer%s, %lld new tokens, %.1f s, %.1f tokens/s]\n",
                terminal_live() ? "\r\033[K" : "", b->written, b->written == 1 ? "" : "s",
                (long long)b->tokens, seconds, per_second(b->tokens, seconds));
    } else if (terminal_live() && now - b->shown >= 0.5) {
        double left = done > 0 ? seconds * (double)(b->count - b->written) / (double)done : 0.0;
        b->shown = now;
        fprintf(stderr, "\r\033[K%zu of %zu, %.1f tokens/s", b->written, b->count,
                per_second(b->tokens, seconds));
        if (done > 0) {
            fprintf(stderr, ", %.0f s left", left);
        }
        fflush(stderr);
    }
}

// One token for every text, after free places were given to the next prompts.
static bool batch_step(app* a, batch* b, qlora_generation** generations, int32_t* tokens,
                       bool* stopped, spoken** active) {
    int64_t count = 0;
    bool full = false; // texts begin in the order of their prompts, so the others wait as well
    for (size_t i = 0; i < b->width; i++) {
        spoken* s = &b->texts[i];
        if (s->generation == NULL && b->next < b->count && !full && !spoken_begin(a, b, s, &full)) {
            return false;
        }
        if (s->generation != NULL) {
            active[count] = s;
            generations[count++] = s->generation;
        }
    }
    if (!lib(a, qlora_generate_next_each(generations, count, tokens, stopped))) {
        return false;
    }
    for (int64_t i = 0; i < count; i++) {
        if (!spoken_take(a, b, active[i], tokens[i], stopped[i])) {
            return false;
        }
    }
    return batch_write(a, b);
}

static bool batch_run(app* a, batch* b) {
    qlora_generation** generations =
        (qlora_generation**)calloc(b->width, sizeof(qlora_generation*));
    int32_t* tokens = (int32_t*)calloc(b->width, sizeof(int32_t));
    bool* stopped = (bool*)calloc(b->width, sizeof(bool));
    spoken** active = (spoken**)calloc(b->width, sizeof(spoken*));
    bool room = generations != NULL && tokens != NULL && stopped != NULL && active != NULL;
    bool ok = room || fail("out of memory");
    b->start = seconds_now();
    interrupted = 0;
    void (*before)(int) = signal(SIGINT, on_interrupt);
    while (ok && b->written < b->count && !interrupted) {
        ok = batch_step(a, b, generations, tokens, stopped, active);
        batch_progress(b, false);
    }
    signal(SIGINT, before == SIG_ERR ? SIG_DFL : before);
    a->interrupted = interrupted != 0;
    if (ok) {
        batch_progress(b, true);
    }
    if (ok && a->interrupted) {
        fprintf(stderr, "[stopped; run the same command to go on]\n");
    }
    free(generations);
    free(tokens);
    free(stopped);
    free(active);
    return ok;
}

static bool batch_open(app* a, batch* b) {
    size_t longest = 0;
    for (size_t i = 0; i < b->count; i++) {
        longest = b->prompts[i].ids.count > longest ? b->prompts[i].ids.count : longest;
    }
    // As many as without an interruption: on a GPU, the bits depend on this number.
    b->width = b->count < (size_t)a->o.batch ? b->count : (size_t)a->o.batch;
    if (a->o.verbose) {
        fprintf(stderr, "[up to %zu texts at the same time]\n", b->width);
    }
    b->texts = (spoken*)calloc(b->width, sizeof *b->texts);
    (void)folder_parents(a->o.out);
    b->out = fopen(a->o.out, "ab");
    if (b->texts == NULL || b->out == NULL) {
        return b->texts == NULL ? fail("out of memory")
                                : fail("--out %s: %s", a->o.out, strerror(errno));
    }
    int64_t room = a->limit - (int64_t)longest;
    room = (int64_t)longest + (a->o.max_tokens < room ? a->o.max_tokens : room);
    a->sequences = (int64_t)b->width;
    return model_open(a, (int64_t)longest, room);
}

static bool answer_all(app* a) {
    static batch b;
    memset(&b, 0, sizeof b);
    a->identity = files_identity(a);
    bool ok = (!a->o.chat || chat_format_open(a)) && batch_read(a, &b) && batch_resume(a, &b);
    if (ok && b.written == b.count) {
        fprintf(stderr, "[all %zu answers are there already]\n", b.count);
    } else {
        ok = ok && batch_open(a, &b) && batch_run(a, &b);
    }
    if (b.out != NULL && fclose(b.out) != 0 && ok) {
        ok = fail("--out %s: %s", a->o.out, strerror(errno));
    }
    b.out = NULL;
    batch_free(a, &b);
    return ok;
}

#endif
