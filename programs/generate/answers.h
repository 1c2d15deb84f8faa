// answers.h - the file of answers: taken up again, continued, put in order, scored.
#ifndef GENERATE_ANSWERS_H
#define GENERATE_ANSWERS_H

typedef enum answer_end { END_STOP, END_LENGTH, END_TEXT } answer_end;

// ---- lines ----

static bool answer_put(batch* b, size_t index, const blob* line, const char* path) {
    if (fwrite(line->data, 1, line->count, b->out) != line->count || fflush(b->out) != 0) {
        return fail("--out %s: %s", path, strerror(errno));
    }
    b->mixed = b->mixed || (b->written > 0 && index < b->last);
    b->last = index;
    b->prompts[index].done = true;
    b->written++;
    return true;
}

// Appends a line: its answer, or with `error` why there is none.
static bool answer_write(const app* a, batch* b, size_t index, const char* head, const char* text,
                         size_t size) {
    const asked* p = &b->prompts[index];
    char begin[192];
    char sample[32] = "";
    static const char name[] = ",\"reference\":";
    blob line;
    memset(&line, 0, sizeof line);
    if (a->o.samples > 1) {
        snprintf(sample, sizeof sample, "\"sample\":%lld,", (long long)p->sample);
    }
    snprintf(begin, sizeof begin, "{\"id\":\"%s\",\"line\":%zu,%s\"prompt_tokens\":%zu,%s", p->id,
             p->line, sample, p->ids.count, head);
    bool ok = blob_add(&line, begin, strlen(begin)) && json_quote(text, size, &line);
    if (ok && p->reference != NULL) {
        ok = blob_add(&line, name, sizeof name - 1) &&
             json_quote(p->reference, p->reference_size, &line);
    }
    ok = ok && blob_add(&line, "}\n", 2);
    ok = ok ? answer_put(b, index, &line, a->o.out) : fail("out of memory");
    blob_free(&line);
    return ok;
}

// The lines of prompts that cannot be answered.
static bool errors_write(const app* a, batch* b) {
    for (size_t i = 0; i < b->count; i++) {
        char why[160];
        const asked* p = &b->prompts[i];
        if (p->too_long && !p->done && asked_too_long(a, p->ids.count, why) &&
            !answer_write(a, b, i, "\"error\":", why, strlen(why))) {
            return false;
        }
    }
    return true;
}

// ---- an earlier start ----

#define ANSWER_START "{\"id\":\""

// The prompt that a line is the answer to; SIZE_MAX if there is none.
static size_t answer_prompt(const batch* b, const char* line, size_t size) {
    const size_t start = sizeof ANSWER_START - 1;
    asked_place wanted;
    if (size < start + BATCH_ID_SIZE || memcmp(line, ANSWER_START, start) != 0 ||
        line[start + BATCH_ID_SIZE - 1] != '"') {
        return SIZE_MAX;
    }
    memset(&wanted, 0, sizeof wanted);
    memcpy(wanted.id, line + start, BATCH_ID_SIZE - 1);
    const asked_place* found =
        (const asked_place*)bsearch(&wanted, b->places, b->count, sizeof *b->places, place_compare);
    return found != NULL ? found->index : SIZE_MAX;
}

// Whether a line that was cut short may be the start of an answer.
static bool answer_part(const batch* b, const char* line, size_t size) {
    const size_t start = sizeof ANSWER_START - 1;
    size_t shown = size < start ? size : start;
    size_t digits = size - shown < BATCH_ID_SIZE - 1 ? size - shown : BATCH_ID_SIZE - 1;
    bool known = memcmp(line, ANSWER_START, shown) == 0;
    bool fits = false;
    for (size_t i = 0; known && !fits && i < b->count; i++) {
        fits = memcmp(b->prompts[i].id, line + shown, digits) == 0;
    }
    return fits;
}

// Whether a line says that its prompt is too long.
static bool answer_failed(const char* line, size_t size) {
    static const char name[] = "\"prompt_tokens\":";
    static const char error[] = ",\"error\":";
    const char* end = line + size;
    const char* at = line;
    while ((size_t)(end - at) >= sizeof name && memcmp(at, name, sizeof name - 1) != 0) {
        at++;
    }
    at += (size_t)(end - at) >= sizeof name ? sizeof name - 1 : 0;
    while (at < end && *at >= '0' && *at <= '9') {
        at++;
    }
    return (size_t)(end - at) >= sizeof error && memcmp(at, error, sizeof error - 1) == 0;
}

// Takes over what a line says about a prompt, which may have been too long for another --positions:
// then what is there at last is an answer. False if it was answered before.
static bool asked_take(batch* b, size_t index, bool failed) {
    asked* p = &b->prompts[index];
    if (p->done && (!p->failed || failed)) {
        return false;
    }
    if (failed && !p->too_long) {
        b->mixed = true; // the line goes when all answers are there
        return true;
    }
    if (p->too_long && !failed) {
        p->too_long = false;
        b->too_long -= p->sample == 0 ? 1 : 0;
    }
    b->mixed = b->mixed || p->done || (b->written > 0 && index < b->last);
    b->written += p->done ? 0 : 1;
    b->last = index;
    p->done = true;
    p->failed = failed;
    return true;
}

// Takes one line of an earlier start over. *length = 0 if it was cut short; it is to be removed.
static bool answer_take(const app* a, batch* b, const char* line, size_t left, size_t* length) {
    const char* stop = (const char*)memchr(line, '\n', left);
    *length = stop != NULL ? (size_t)(stop + 1 - line) : 0;
    size_t index = stop != NULL ? answer_prompt(b, line, *length) : SIZE_MAX;
    bool known = stop == NULL ? answer_part(b, line, left)
                              : index != SIZE_MAX &&
                                    asked_take(b, index, answer_failed(line, *length));
    return known ||
           fail("--out %s has something else in line %zu: answers to other prompts, with other "
                "options or of another model; use another file",
                a->o.out, b->written + 1);
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
        ok = answer_take(a, b, file.data + kept, file.count - kept, &length);
        kept += ok ? length : 0;
    }
    if (ok && kept < file.count && file_cut(a->o.out, (long)kept) != 0) {
        ok = fail("--out %s: %s", a->o.out, strerror(errno));
    }
    blob_free(&file);
    b->before = b->written;
    return ok;
}

// ---- all answers ----

typedef struct answer_line {
    const char* data;
    size_t size; // with its line end
} answer_line;

// The file of answers, and its lines in the order of the prompts. All of them are there.
static bool answers_read(const app* a, const batch* b, blob* file, answer_line** out) {
    size_t found = 0;
    int code = blob_read_path(file, a->o.out);
    *out = (answer_line*)calloc(b->count, sizeof **out);
    if (code != 0 || *out == NULL) {
        return code != 0 ? fail("--out %s: %s", a->o.out, strerror(code)) : fail("out of memory");
    }
    for (size_t at = 0; at < file->count;) {
        const char* line = file->data + at;
        const char* stop = (const char*)memchr(line, '\n', file->count - at);
        size_t size = stop != NULL ? (size_t)(stop + 1 - line) : file->count - at;
        size_t index = answer_prompt(b, line, size);
        if (index != SIZE_MAX) {
            found += (*out)[index].data == NULL ? 1 : 0;
            (*out)[index].data = line;
            (*out)[index].size = size;
        }
        at += size;
    }
    return found == b->count || fail("--out %s has changed meanwhile", a->o.out);
}

// Puts the answers into the order of their prompts: in another file, which then replaces this one.
static void answers_order(const app* a, const batch* b, const answer_line* lines) {
    char path[FOLDER_PATH];
    qlora_ctx_info info;
    int size = snprintf(path, sizeof path, "%s.new", a->o.out);
    bool fits = size > 0 && (size_t)size < sizeof path;
    FILE* file = fits ? file_create_new(path) : NULL;
    int code = file != NULL ? 0 : fits ? errno : ENAMETOOLONG;
    for (size_t i = 0; i < b->count && code == 0; i++) {
        errno = 0;
        if (fwrite(lines[i].data, 1, lines[i].size, file) != lines[i].size) {
            code = errno != 0 ? errno : EIO;
        }
    }
    if (file != NULL && fclose(file) != 0 && code == 0) {
        code = errno;
    }
    if (code == 0 && qlora_ctx_query(a->ctx, &info) == QLORA_OK) {
        code = info.desc->files.rename(path, a->o.out, info.desc->files.user);
    }
    if (code != 0) {
        if (file != NULL) {
            remove(path);
        }
        fprintf(stderr, "[--out %s has all answers, but not in the order of the prompts: %s]\n",
                a->o.out, strerror(code));
    }
}

// ---- scores ----

// The text of an answer; false if the line has none.
static bool answer_text(const answer_line* line, blob* text) {
    blob name;
    json_reader r = json_start(line->data, line->size);
    bool more = json_take(&r, '{');
    bool found = false;
    memset(&name, 0, sizeof name);
    text->count = 0;
    while (more && !found) {
        name.count = 0;
        json_space(&r);
        more = json_string(&r, &name) && json_take(&r, ':');
        json_space(&r);
        found = more && name.count == 4 && memcmp(name.data, "text", 4) == 0;
        more = more && (found ? json_string(&r, text) : json_skip(&r)) && json_take(&r, ',');
    }
    blob_free(&name);
    return found;
}

// A text without the space around it.
static qlora_text_span text_trim(const char* text, size_t size) {
    qlora_text_span s = {0, size};
    while (s.begin < s.end && strchr(" \t\r\n", text[s.begin]) != NULL && text[s.begin] != 0) {
        s.begin++;
    }
    while (s.end > s.begin && strchr(" \t\r\n", text[s.end - 1]) != NULL && text[s.end - 1] != 0) {
        s.end--;
    }
    return s;
}

// What --score finds in a text: the last match. *found is false if there is none.
static bool score_find(const app* a, qlora_text_pattern* pattern, const char* text, size_t size,
                       qlora_text_span* out, bool* found) {
    qlora_text_match match;
    *found = false;
    for (size_t from = 0;;) {
        if (qlora_text_pattern_find(pattern, text, size, from, &match) != QLORA_OK) {
            return text_fail(a, "--score: ");
        }
        if (!match.found) {
            return true;
        }
        *out = match.group;
        *found = true;
        from = match.whole.end;
    }
}

typedef struct scores {
    size_t all;
    size_t exact;
    size_t scored;
} scores;

// Compares an answer with its reference.
static bool score_add(const app* a, qlora_text_pattern* pattern, const asked* p, const blob* text,
                      scores* s) {
    const char* answer = text->count > 0 ? text->data : "";
    qlora_text_span got = text_trim(answer, text->count);
    qlora_text_span want = text_trim(p->reference, p->reference_size);
    size_t size = want.end - want.begin;
    bool found = true;
    bool given = true;
    s->all++;
    s->exact += got.end - got.begin == size &&
                        memcmp(answer + got.begin, p->reference + want.begin, size) == 0
                    ? 1
                    : 0;
    if (pattern == NULL) {
        return true;
    }
    if (!score_find(a, pattern, answer, text->count, &got, &found) ||
        !score_find(a, pattern, p->reference, p->reference_size, &want, &given)) {
        return false;
    }
    size = want.end - want.begin;
    s->scored += found && got.end - got.begin == size &&
                         memcmp(answer + got.begin, p->reference + want.begin, size) == 0
                     ? 1
                     : 0;
    return true;
}

static void score_print(const char* name, size_t right, const scores* s) {
    printf("%s: %zu of %zu (%.1f%%)\n", name, right, s->all,
           100.0 * (double)right / (double)(s->all > 0 ? s->all : 1));
}

static bool score_open(const app* a, qlora_text_pattern** out) {
    const char* score = a->o.score;
    return score == NULL ||
           qlora_text_pattern_compile(a->text, score, strlen(score), out) == QLORA_OK ||
           text_fail(a, "--score: ");
}

static bool answers_score(const app* a, const batch* b, const answer_line* lines) {
    qlora_text_pattern* pattern = NULL;
    blob text;
    scores s;
    memset(&text, 0, sizeof text);
    memset(&s, 0, sizeof s);
    bool ok = score_open(a, &pattern);
    for (size_t i = 0; ok && i < b->count; i++) {
        const asked* p = &b->prompts[i];
        if (p->reference != NULL && !p->too_long) {
            ok = answer_text(&lines[i], &text) ? score_add(a, pattern, p, &text, &s)
                                               : fail("--out %s has changed meanwhile", a->o.out);
        }
    }
    blob_free(&text);
    qlora_text_pattern_close(pattern);
    if (ok) {
        score_print("exact match", s.exact, &s);
    }
    if (ok && a->o.score != NULL) {
        score_print("score", s.scored, &s);
    }
    return ok;
}

// When all answers are there.
static bool answers_finish(const app* a, const batch* b) {
    blob file;
    answer_line* lines = NULL;
    memset(&file, 0, sizeof file);
    bool ok = true;
    if (b->mixed || b->references > 0) {
        ok = answers_read(a, b, &file, &lines);
    }
    if (ok && b->mixed) {
        answers_order(a, b, lines);
    }
    ok = ok && (b->references == 0 || answers_score(a, b, lines));
    free(lines);
    blob_free(&file);
    return ok;
}

#endif
