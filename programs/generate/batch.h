// batch.h - answers to the prompts of a file, many at a time.
#ifndef GENERATE_BATCH_H
#define GENERATE_BATCH_H

#include "prompts.h"

#include "answers.h"

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
    char head[96];
    snprintf(head, sizeof head, "\"new_tokens\":%lld,\"end\":\"%s\",\"text\":", (long long)s->made,
             ends[end]);
    qlora_generation* done = s->generation;
    s->generation = NULL;
    return answer_write(a, b, s->index, head, s->text.data != NULL ? s->text.data : "",
                        s->text.count) &&
           lib(a, qlora_generate_end(done));
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

// How far it is: on a terminal in one line that changes, otherwise in a line after every tenth of
// the answers, and after half a minute without one.
static void batch_progress(batch* b) {
    bool live = terminal_live();
    double now = seconds_now();
    double seconds = now - b->start;
    size_t done = b->written - b->before;
    size_t tenths = 10 * done / (b->count - b->before);
    bool due = live ? now - b->shown >= 0.5 : tenths > b->told || now - b->shown >= 30.0;
    if (!due || b->written == b->count) {
        return;
    }
    b->told = tenths;
    b->shown = now;
    fprintf(stderr, "%s%zu of %zu, %.1f tokens/s", live ? "\r\033[K" : "[", b->written, b->count,
            per_second(b->tokens, seconds));
    if (done > 0) {
        fprintf(stderr, ", %.0f s left", seconds * (double)(b->count - b->written) / (double)done);
    }
    fprintf(stderr, "%s", live ? "" : "]\n");
    fflush(stderr);
}

// How many answers are there, and how many prompts have none.
static const char* batch_counts(const batch* b, char out[128]) {
    size_t answers = b->written;
    for (size_t i = 0; i < b->count; i++) {
        answers -= b->prompts[i].too_long && b->prompts[i].done ? 1 : 0;
    }
    int used = snprintf(out, 128, "%zu answer%s", answers, answers == 1 ? "" : "s");
    if (b->too_long > 0 && used > 0) {
        snprintf(out + used, 128 - (size_t)used, ", %zu prompt%s too long", b->too_long,
                 b->too_long == 1 ? "" : "s");
    }
    return out;
}

static void batch_tell(const batch* b) {
    char counts[128];
    double seconds = seconds_now() - b->start;
    fprintf(stderr, "%s[%s, %lld new tokens, %.1f s, %.1f tokens/s]\n",
            terminal_live() ? "\r\033[K" : "", batch_counts(b, counts), (long long)b->tokens,
            seconds, per_second(b->tokens, seconds));
}

// One token for every text, after free places were given to the next prompts.
static bool batch_step(app* a, batch* b, qlora_generation** generations, int32_t* tokens,
                       bool* stopped, spoken** active) {
    int64_t count = 0;
    bool full = false; // texts begin in the order of their prompts, so the others wait as well
    for (size_t i = 0; i < b->width; i++) {
        spoken* s = &b->texts[i];
        while (b->next < b->count && b->prompts[b->next].done) {
            b->next++;
        }
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
    return true;
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
    b->shown = b->start;
    interrupted = 0;
    void (*before)(int) = signal(SIGINT, on_interrupt);
    while (ok && b->written < b->count && !interrupted) {
        ok = batch_step(a, b, generations, tokens, stopped, active);
        batch_progress(b);
    }
    signal(SIGINT, before == SIG_ERR ? SIG_DFL : before);
    a->interrupted = interrupted != 0;
    if (ok) {
        batch_tell(b);
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
    size_t count = 0;
    for (size_t i = 0; i < b->count; i++) {
        const asked* p = &b->prompts[i];
        longest = !p->too_long && p->ids.count > longest ? p->ids.count : longest;
        count += p->too_long ? 0 : 1;
    }
    // As many as without an interruption: on a GPU, the bits depend on this number.
    b->width = count < (size_t)a->o.batch ? count : (size_t)a->o.batch;
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
    qlora_text_pattern* pattern = NULL;
    memset(&b, 0, sizeof b);
    a->identity = files_identity(a);
    bool ok = score_open(a, &pattern); // before hours of work
    qlora_text_pattern_close(pattern);
    ok = ok && chat_format_open(a) && batch_read(a, &b) && batch_resume(a, &b);
    if (ok && b.written == b.count) {
        char counts[128];
        fprintf(stderr, "[nothing to do: %s in --out already]\n", batch_counts(&b, counts));
    } else {
        ok = ok && batch_open(a, &b) && errors_write(a, &b) && batch_run(a, &b);
    }
    if (b.out != NULL && fclose(b.out) != 0 && ok) {
        ok = fail("--out %s: %s", a->o.out, strerror(errno));
    }
    b.out = NULL;
    ok = ok && (b.written < b.count || answers_finish(a, &b));
    batch_free(a, &b);
    return ok;
}

#endif
