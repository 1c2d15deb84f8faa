// log.h - log.jsonl: one line per step, evaluation or set of samples; log.csv.
#ifndef FINETUNE_LOG_H
#define FINETUNE_LOG_H

// ---- writing ----

static void log_line(app* a, const blob* line) {
    growing_add(a, &a->folder.log, TOLD_LOG, line);
}

static void log_step(app* a, const point* p, const qlora_train_info* info) {
    const method_row* method = method_of(a->o.method.kind);
    blob line;
    memset(&line, 0, sizeof line);
    put(&line, "{\"step\":%lld", (long long)p->step);
    put_number(&line, "loss", p->values[TRACE_LOSS], "%.9g");
    put_number(&line, "grad_norm", p->values[TRACE_GRAD_NORM], "%.9g");
    put_number(&line, "lr", p->values[TRACE_LR], "%.9g");
    put_number(&line, "tokens_per_s", p->values[TRACE_SPEED], "%.1f");
    put_number(&line, "epoch", p->values[TRACE_EPOCH], "%.9g");
    put_number(&line, "seconds", a->progress.seconds, "%.3f");
    if (method->preferences) {
        for (int i = TRACE_CHOSEN; i <= TRACE_ACCURACY; i++) {
            put_number(&line, trace_names[i].name, p->values[i], "%.9g");
        }
    }
    for (int i = TRACE_ROUTER_AUX_LOSS; i < TRACES; i++) {
        if (trace_measured(a, i)) {
            put_number(&line, trace_names[i].name, p->values[i], "%.9g");
        }
    }
    for (int i = 0; i < METHOD_NUMBERS && method->numbers[i].name != NULL; i++) {
        const method_number* number = &method->numbers[i];
        put_number(&line, number->name, method_number_at(info, number), "%.9g");
    }
    if (a->ranks.world > 1) {
        put(&line, ",\"ranks\":%d,\"slowest_rank\":%d,\"sent_bytes\":%lld", (int)a->ranks.world,
            (int)a->ranks.slowest, (long long)info->sent);
        put_number(&line, "exchange_ms", a->ranks.exchange_ms, "%.3f");
        put_number(&line, "waited_ms", a->ranks.waited_ms, "%.3f");
        put(&line, "%s", info->exchange_graph ? ",\"exchange_graph\":true" : "");
    }
    put(&line, ",\"tokens\":%lld,\"labels\":%.0f,\"memory_bytes\":%llu%s}\n",
        (long long)info->tokens, info->labels, (unsigned long long)p->values[TRACE_MEMORY],
        info->last_skipped ? ",\"skipped\":true" : "");
    log_line(a, &line);
    blob_free(&line);
}

static void log_eval(app* a, const point* p) {
    blob line;
    memset(&line, 0, sizeof line);
    put(&line, "{\"step\":%lld", (long long)p->step);
    put_number(&line, "eval_loss", p->values[TRACE_EVAL_LOSS], "%.9g");
    if (known(p->values[TRACE_EVAL_ACCURACY])) {
        put_number(&line, "eval_accuracy", p->values[TRACE_EVAL_ACCURACY], "%.9g");
    } else { // the loss of answers, which has a perplexity
        put_number(&line, "perplexity", exp(p->values[TRACE_EVAL_LOSS]), "%.9g");
    }
    put(&line, "}\n");
    log_line(a, &line);
    blob_free(&line);
}

#define LOG_SAMPLES ",\"samples\":"

// All answers of a step in one line, so that a step has all of them or none.
static void log_samples(app* a, int64_t step) {
    blob line;
    memset(&line, 0, sizeof line);
    put(&line, "{\"step\":%lld" LOG_SAMPLES "[", (long long)step);
    bool ok = true;
    for (size_t i = 0; ok && i < a->prompts.count; i++) {
        const sample_prompt* p = &a->prompts.data[i];
        const sample_answer* last = &p->answers[p->answer_count - 1];
        put(&line, "%s{\"prompt\":", i > 0 ? "," : "");
        ok = json_quote(p->text.data, p->text.count, &line) && blob_add(&line, ",\"text\":", 8) &&
             json_quote(last->text.data, last->text.count, &line) && blob_add(&line, "}", 1);
    }
    if (ok && blob_add(&line, "]}\n", 3)) {
        log_line(a, &line);
    } else {
        bear(a, TOLD_LOG, error_set(a->error, "cannot write the samples: out of memory"));
    }
    blob_free(&line);
}

// ---- the answers that are kept ----

static void answer_free(sample_answer* one) {
    blob_free(&one->text);
}

// Takes the text. Of more than ANSWERS, the first one and the latest ones are kept.
static void answer_keep(sample_prompt* p, int64_t step, blob* text) {
    if (p->answer_count == ANSWERS) {
        answer_free(&p->answers[1]);
        memmove(&p->answers[1], &p->answers[2], (ANSWERS - 2) * sizeof p->answers[0]);
        p->answer_count--;
    }
    sample_answer* one = &p->answers[p->answer_count++];
    one->step = step;
    one->text = *text;
    memset(text, 0, sizeof *text);
}

// The prompt of this text that has no answer at this step yet: two may have the same text.
static sample_prompt* prompt_find(const app* a, int64_t step, const blob* text) {
    for (size_t i = 0; i < a->prompts.count; i++) {
        sample_prompt* p = &a->prompts.data[i];
        bool answered = p->answer_count > 0 && p->answers[p->answer_count - 1].step == step;
        if (!answered && p->text.count == text->count && text->count > 0 &&
            memcmp(p->text.data, text->data, text->count) == 0) {
            return p;
        }
    }
    return NULL;
}

// ---- reading ----

static double log_value(const char* line, const char* end, const char* name) {
    char key[40];
    int n = snprintf(key, sizeof key, "\"%s\":", name);
    for (const char* at = line; at + n < end; at++) {
        if (strncmp(at, key, (size_t)n) == 0) {
            return at[n] == 'n' ? (double)NAN : strtod(at + n, NULL);
        }
    }
    return (double)NAN;
}

// Reads one line of the log. False if it is damaged: the numbers come from a file that anything may
// have happened to, and steps index the plot's tables.
static bool log_point(const char* line, const char* stop, int64_t before, point* out) {
    double step = log_value(line, stop, "step");
    if (stop - line < 2 || line[0] != '{' || stop[-1] != '}' || !(step >= (double)before) ||
        step != floor(step) || step > 1e15) {
        return false;
    }
    *out = point_none((int64_t)step);
    for (int i = 0; i < TRACES; i++) {
        out->values[i] = log_value(line, stop, trace_names[i].name);
    }
    return true;
}

// Where the samples of a line begin; NULL if it has none.
static const char* log_samples_at(const char* line, const char* stop) {
    size_t size = strlen(LOG_SAMPLES);
    const char* at = line;
    while (at < stop && *at != ',') { // they follow the step
        at++;
    }
    return (size_t)(stop - at) > size && memcmp(at, LOG_SAMPLES, size) == 0 ? at + size : NULL;
}

// {"prompt": ..., "text": ...}
static bool log_sample(json_reader* r, blob* prompt, blob* text) {
    blob* const fields[2] = {prompt, text};
    static const char* const names[2] = {"prompt", "text"};
    blob name;
    memset(&name, 0, sizeof name);
    bool ok = json_take(r, '{');
    for (int i = 0; ok && i < 2; i++) {
        name.count = 0;
        ok = (i == 0 || json_take(r, ',')) && json_string(r, &name) &&
             name.count == strlen(names[i]) && memcmp(name.data, names[i], name.count) == 0 &&
             json_take(r, ':') && json_string(r, fields[i]);
    }
    blob_free(&name);
    return ok && json_take(r, '}');
}

// Restores the answers of a line for the prompts that are still there. False if it is damaged.
static bool log_samples_read(app* a, int64_t step, const char* at, const char* stop) {
    json_reader r = json_start(at, (size_t)(stop - at));
    bool more = false;
    bool ok = true;
    for (size_t i = 0; ok; i++) {
        blob prompt;
        blob text;
        memset(&prompt, 0, sizeof prompt);
        memset(&text, 0, sizeof text);
        ok = json_next(&r, i, &more) && (!more || log_sample(&r, &prompt, &text));
        sample_prompt* found = ok && more ? prompt_find(a, step, &prompt) : NULL;
        if (found != NULL) {
            answer_keep(found, step, &text);
            a->prompts.step = step;
        }
        blob_free(&prompt);
        blob_free(&text);
        if (!more) {
            break;
        }
    }
    return ok;
}

// One line of an earlier session. False if it is damaged.
static bool log_restore(app* a, const char* line, const char* stop, bool* keep) {
    point p;
    if (!log_point(line, stop, a->history.last, &p)) {
        return false;
    }
    *keep = p.step <= a->progress.step; // later steps will be taken again
    const char* texts = log_samples_at(line, stop);
    if (!*keep || texts != NULL) {
        return !*keep || log_samples_read(a, p.step, texts, stop);
    }
    a->progress.last_loss =
        known(p.values[TRACE_LOSS]) ? p.values[TRACE_LOSS] : a->progress.last_loss;
    a->progress.epochs_done =
        known(p.values[TRACE_EPOCH]) ? p.values[TRACE_EPOCH] : a->progress.epochs_done;
    a->progress.last_eval =
        known(p.values[TRACE_EVAL_LOSS]) ? p.values[TRACE_EVAL_LOSS] : a->progress.last_eval;
    history_add(&a->history, &p);
    return true;
}

// Keeps the log's lines up to a->progress.step and restores the plot and the samples from them.
static bool log_trim(app* a) {
    size_t damaged = 0;
    blob text;
    blob kept;
    memset(&text, 0, sizeof text);
    memset(&kept, 0, sizeof kept);
    out_path(a, "log.jsonl", a->folder.log.path);
    bool ok = a->progress.step == 0 || file_read(a, a->folder.log.path, &text);
    const char* end = text.data != NULL ? text.data + text.count : NULL;
    for (const char* line = text.data; ok && line < end;) {
        const char* stop = (const char*)memchr(line, '\n', (size_t)(end - line));
        bool keep = false;
        if (stop == NULL) {
            break; // the last line of a run that was killed
        }
        bool read = log_restore(a, line, stop, &keep);
        damaged += read ? 0 : 1;
        ok = !read || !keep || blob_add(&kept, line, (size_t)(stop + 1 - line)) ||
             error_set(a->error, "out of memory");
        line = stop + 1;
    }
    if (damaged > 0) {
        say(a, "note: %s: %zu damaged line%s removed\n", a->folder.log.path, damaged,
            damaged == 1 ? " was" : "s were");
    }
    ok = ok && file_replace(a, "log.jsonl", kept.data, kept.count);
    blob_free(&text);
    blob_free(&kept);
    return ok;
}

// ---- log.csv ----

static void csv_line(const app* a, const point* p, blob* out) {
    put(out, "%lld", (long long)p->step);
    for (int i = 0; i < TRACES; i++) {
        if (trace_measured(a, i)) {
            put(out, ",");
        }
        if (trace_measured(a, i) && known(p->values[i])) { // otherwise an empty field
            put(out, "%.9g", p->values[i]);
        }
    }
    put(out, "\n");
}

// log.csv: one line per step or evaluation, as in log.jsonl.
static bool csv_write(app* a) {
    blob text;
    blob out;
    memset(&text, 0, sizeof text);
    memset(&out, 0, sizeof out);
    bool ok = file_read(a, a->folder.log.path, &text);
    const char* end = text.data != NULL ? text.data + text.count : NULL;
    put(&out, "step");
    for (int i = 0; i < TRACES; i++) {
        if (trace_measured(a, i)) {
            put(&out, ",%s", trace_names[i].name);
        }
    }
    put(&out, "\n");
    for (const char* line = text.data; ok && line < end;) {
        const char* stop = (const char*)memchr(line, '\n', (size_t)(end - line));
        point p;
        if (stop == NULL) {
            break;
        }
        if (log_samples_at(line, stop) == NULL && log_point(line, stop, 0, &p)) {
            csv_line(a, &p, &out);
        }
        line = stop + 1;
    }
    ok = ok && file_replace(a, "log.csv", out.data, out.count);
    blob_free(&text);
    blob_free(&out);
    return ok;
}

#endif
