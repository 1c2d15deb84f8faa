// reports.h - reports: --doctor, --plan, --prompt, the summary.
#ifndef FINETUNE_REPORTS_H
#define FINETUNE_REPORTS_H

// Escapes control characters, which would disturb the terminal, and starts each line with a margin.
static void text_print(const char* text, size_t size, const char* margin) {
    size_t width = strlen(margin);
    printf("%s", margin);
    for (size_t i = 0; i < size; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c == '\n') {
            printf("\n%*s%s", (int)width - 2, "", margin + width - 2);
        } else if (c < 32 || c == 127) {
            printf("\\x%02x", c);
        } else {
            putchar(c);
        }
    }
    printf("\n");
}

// Prints runs of trained and untrained tokens. Each run is decoded on its own, so that partial
// characters remain visible.
static bool sample_print(app* a, const qlora_text_sample* s, const char* path, size_t number) {
    size_t count = s->count;
    const char* then = "";
    if (count > (size_t)a->o.data.length) {
        then = a->o.data.truncate ? " (truncated)" : " (too long: skipped)";
        count = a->o.data.truncate ? (size_t)a->o.data.length : count;
    }
    printf("sample %zu (%s:%zu): %zu tokens%s, %zu trained\n", number, path, s->line, s->count,
           then, trained_count(s->labels, count));
    for (size_t begin = 0; begin < count;) {
        bool trained = begin > 0 && s->labels[begin] != -100;
        size_t end = begin + 1;
        while (end < count && (s->labels[end] != -100) == trained) {
            end++;
        }
        qlora_text_bytes text;
        memset(&text, 0, sizeof text);
        if (qlora_text_decode(a->tok, s->ids + begin, end - begin, QLORA_TEXT_REPLACE, &text) !=
            QLORA_OK) {
            return text_fail(a, "");
        }
        text_print(text.data, text.count, trained ? "  TRAINED > " : "          | ");
        qlora_text_bytes_free(a->text, &text);
        begin = end;
    }
    if (count < s->count) {
        printf("            (%zu more tokens are cut off)\n", s->count - count);
    }
    return true;
}

static bool doctor_samples(app* a) {
    size_t shown = 0;
    for (size_t f = 0; f < a->data.inputs.count; f++) {
        qlora_text_data* data = a->data.inputs.data[f].data;
        const char* path = a->o.demo ? "demo" : data_name(a->data.inputs.data[f].path);
        size_t count = qlora_text_data_count(data);
        for (size_t i = 0; i < count && shown < (size_t)a->o.doctor_samples; i++) {
            qlora_text_sample s;
            if (qlora_text_sample_read(data, i, &s) != QLORA_OK) {
                return text_fail(a, "");
            }
            if (!sample_print(a, &s, path, ++shown)) {
                return false;
            }
        }
    }
    return true;
}

typedef struct doctor_row {
    const char* key; // in JSON
    const char* what;
    uint64_t count;
    const char* then;
} doctor_row;

#define DOCTOR_ROWS 17

static bool doctor_rows(app* a, doctor_row rows[DOCTOR_ROWS]) {
    const counts* c = &a->data.counted;
    packs p;
    memset(&p, 0, sizeof p);
    bool ok = a->data.train.count == 0 || epoch_make(a, 0, &p);
    const doctor_row all[DOCTOR_ROWS] = {
        {"samples", "samples", c->all / sample_texts(a), ""},
        {"bad", "bad records", a->data.bad.count, "cannot be read"},
        {"too_long", "too long for --length", c->too_long,
         a->o.data.truncate ? "truncated" : "skipped"},
        {"no_room", "pairs over --tokens", c->no_room, "skipped"},
        {"other_prompts", "pairs with two prompts", c->other_prompts, "only answers are trained"},
        {"empty", "empty", c->empty, "skipped"},
        {"masked", "nothing to train on", c->masked, "skipped"},
        {"empty_answers", "empty answers", c->silent, "the model learns to say nothing"},
        {"no_end", "end not trained", c->no_end, "the model will not learn to stop"},
        {"two_bos", "duplicate BOS at start", c->two_bos, "the text itself starts with one"},
        {"used", "used", c->used, ""},
        {"held_out", "of these held out", a->o.data.eval_files.count == 0 ? a->data.eval.count : 0,
         ""},
        {"longest", "longest, in tokens", c->longest, ""},
        {"tokens", "tokens used", c->tokens, ""},
        {"trained", "of these trained", c->trained, ""},
        {"micro_batches", "micro-batches per epoch", p.count, ""},
        {"steps", "total steps", (uint64_t)a->progress.total_steps, ""},
    };
    memcpy(rows, all, sizeof all);
    packs_free(&p);
    return ok;
}

static void json_text(blob* out, const char* text) {
    put(out, "\"");
    for (; *text != '\0'; text++) {
        unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\') {
            put(out, "\\%c", c);
        } else if (c < 32) {
            put(out, "\\u%04x", c);
        } else {
            put(out, "%c", c);
        }
    }
    put(out, "\"");
}

// What a file adds to an epoch.
typedef struct share {
    size_t records;
    double part;       // of the records of the epoch
    double token_part; // of its tokens
} share;

static share share_of(const app* a, const input* one) {
    share s = {input_takes(one), 0.0, 0.0};
    double taken = 0.0;
    double tokens = 0.0;
    for (size_t i = 0; i < a->data.inputs.count; i++) {
        const input* other = &a->data.inputs.data[i];
        taken += (double)input_takes(other);
        tokens += (double)other->tokens * other->weight;
    }
    s.part = taken > 0.0 ? (double)s.records / taken : 0.0;
    s.token_part = tokens > 0.0 ? (double)one->tokens * one->weight / tokens : 0.0;
    return s;
}

static void doctor_shares(const app* a) {
    if (a->data.inputs.count < 2 && !weights_used(a)) {
        return;
    }
    printf("\nfiles, and what they add to an epoch:\n");
    for (size_t i = 0; i < a->data.inputs.count; i++) {
        const input* one = &a->data.inputs.data[i];
        share s = share_of(a, one);
        const char* what = one->records != one->samples ? "records" : "samples";
        printf("  %s: weight %g, %zu of %zu %s, %.1f%% of the %s, %.1f%% of the tokens\n",
               data_name(one->path), one->weight, s.records, one->records, what, 100.0 * s.part,
               what, 100.0 * s.token_part);
    }
}

static void doctor_json(const app* a, const doctor_row* rows) {
    blob out;
    memset(&out, 0, sizeof out);
    for (size_t i = 0; i < DOCTOR_ROWS; i++) {
        put(&out, "%s\"%s\": %llu", i == 0 ? "{" : ", ", rows[i].key,
            (unsigned long long)rows[i].count);
    }
    put(&out, ", \"bad_records\": [");
    for (size_t i = 0; i < a->data.bad.count && i < BAD_SHOWN; i++) {
        put(&out, "%s{\"file\": ", i > 0 ? ", " : "");
        json_text(&out, a->data.bad.shown[i].path);
        put(&out, ", \"line\": %zu, \"error\": ", a->data.bad.shown[i].line);
        json_text(&out, a->data.bad.shown[i].what);
        put(&out, "}");
    }
    put(&out, "], \"files\": [");
    for (size_t i = 0; i < a->data.inputs.count; i++) {
        const input* one = &a->data.inputs.data[i];
        share part = share_of(a, one);
        put(&out, "%s{\"file\": ", i > 0 ? ", " : "");
        json_text(&out, data_name(one->path));
        put(&out,
            ", \"weight\": %g, \"samples\": %zu, \"per_epoch\": %zu, \"records\": %zu, "
            "\"share\": %.6g, \"token_share\": %.6g}",
            one->weight, one->samples, part.records, one->records, part.part, part.token_part);
    }
    put(&out, "]}\n");
    fwrite(out.data, 1, out.count, stdout);
    blob_free(&out);
}

static void doctor_text(const app* a, const doctor_row* rows) {
    if (a->data.bad.count > 0) {
        printf("\nrecords that cannot be read:\n");
    }
    for (size_t i = 0; i < a->data.bad.count && i < BAD_SHOWN; i++) {
        const bad_record* b = &a->data.bad.shown[i];
        printf("  %s:%zu: %s\n", b->path, b->line, b->what);
    }
    if (a->data.bad.count > BAD_SHOWN) {
        printf("  and %zu more\n", a->data.bad.count - BAD_SHOWN);
    }
    printf("\n");
    for (size_t i = 0; i < DOCTOR_ROWS; i++) {
        bool remark = rows[i].then[0] != '\0' && rows[i].count > 0;
        printf("  %-24s %10llu%s%s\n", rows[i].what, (unsigned long long)rows[i].count,
               remark ? "   " : "", remark ? rows[i].then : "");
    }
    doctor_shares(a);
}

static bool doctor_print(app* a) {
    doctor_row rows[DOCTOR_ROWS];
    qlora_text_chat_info chat;
    if (qlora_text_chat_query(a->chat, &chat) != QLORA_OK) {
        return text_fail(a, "");
    }
    say(a, "chat format: %s (%s)\n\n", chat.name, chat.source);
    if ((!a->o.json && !doctor_samples(a)) || !doctor_rows(a, rows)) {
        return false;
    }
    if (a->o.json) {
        doctor_json(a, rows);
    } else {
        doctor_text(a, rows);
        estimate_print(a);
    }
    return a->data.bad.count == 0 ||
           error_set(a->error, "%zu record%s cannot be read", a->data.bad.count,
                     a->data.bad.count == 1 ? "" : "s");
}

static void plan_show(app* a) {
    char text[4096];
    qlora_plan_describe(&a->plan, text, sizeof text);
    printf("%s", text);
}

typedef struct shown {
    qlora_text* text;
    qlora_text_ids ids;
} shown;

static bool token_show(void* user, int32_t token) {
    shown* s = (shown*)user;
    return qlora_text_ids_add(s->text, &s->ids, token) == QLORA_OK && stop_asked == 0;
}

// Generates greedily, so that the same model always gives the same text.
static bool prompt_show(app* a, const char* when) {
    shown all;
    qlora_text_bytes text;
    qlora_generate_desc desc;
    memset(&all, 0, sizeof all);
    all.text = a->text;
    memset(&text, 0, sizeof text);
    memset(&desc, 0, sizeof desc);
    if (a->o.sampling.prompt == NULL) {
        return true;
    }
    bool ok = qlora_text_encode(a->tok, a->o.sampling.prompt, strlen(a->o.sampling.prompt),
                                QLORA_TEXT_BOS, &all.ids) == QLORA_OK ||
              text_fail(a, "--prompt: ");
    size_t given = all.ids.count;
    int32_t* prompt = ok ? (int32_t*)take(a, given, sizeof *prompt) : NULL;
    if (prompt != NULL) {
        memcpy(prompt, all.ids.data, given * sizeof *prompt);
        desc.prompt = prompt;
        desc.prompt_tokens = (int64_t)given;
        ok = lib(a, qlora_generate(a->model, &desc, token_show, &all), "generating") &&
             (qlora_text_decode(a->tok, all.ids.data, all.ids.count,
                                QLORA_TEXT_REPLACE | QLORA_TEXT_SKIP, &text) == QLORA_OK ||
              text_fail(a, ""));
        if (ok) {
            say(a, "%s training:\n", when);
            text_print(text.data, text.count, "  | ");
        }
    }
    free(prompt);
    qlora_text_ids_free(a->text, &all.ids);
    qlora_text_bytes_free(a->text, &text);
    return ok && prompt != NULL;
}

// The answers to each prompt: the first one and the last one. Those to --prompt have been shown.
static void answers_print(app* a) {
    size_t asked = a->o.sampling.prompt != NULL ? strlen(a->o.sampling.prompt) : 0;
    for (size_t i = 0; i < a->prompts.count; i++) {
        const sample_prompt* p = &a->prompts.data[i];
        if (p->answer_count == 0 || (asked > 0 && p->text.count == asked &&
                                     memcmp(p->text.data, a->o.sampling.prompt, asked) == 0)) {
            continue;
        }
        const sample_answer* ends[2] = {&p->answers[0], &p->answers[p->answer_count - 1]};
        say(a, "sample %zu:\n", i + 1);
        text_print(p->text.data, p->text.count, "  prompt     | ");
        for (int k = p->answer_count > 1 ? 0 : 1; k < 2; k++) {
            char margin[64];
            snprintf(margin, sizeof margin, "  step %-5lld | ", (long long)ends[k]->step);
            text_print(ends[k]->text.data, ends[k]->text.count, margin);
        }
    }
}

// Rewards, margins and accuracy of preferences, as means: single steps are noisy.
static void summary_preferences(app* a) {
    static const struct {
        int which;
        const char* format;
    } rows[] = {{TRACE_MARGINS, "; margin %.4f -> %.4f"},
                {TRACE_ACCURACY, ", accuracy %.3f -> %.3f"}};
    int64_t span = summary_span(a);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        double first = history_mean(&a->history, rows[i].which, 1, span);
        double last =
            history_mean(&a->history, rows[i].which, a->progress.step - span + 1, a->progress.step);
        if (known(first) && known(last)) {
            say(a, rows[i].format, first, last);
        }
    }
}

// Compares means of steps: single steps are noisy.
static void summary_loss(app* a) {
    int64_t span = summary_span(a);
    double first = loss_mean(a, false);
    double last = loss_mean(a, true);
    if (!known(last)) { // the log is missing
        say(a, "the losses are not known: they are not in %s/log.jsonl", a->o.output.folder);
    } else {
        say(a, "loss %.4f -> %.4f", first, last);
    }
    if (known(last)) {
        summary_preferences(a);
    }
    if (known(last) && span > 1) {
        say(a, " (means of %lld steps)", (long long)span);
    }
    if (known(a->progress.first_eval) && known(a->progress.last_eval)) {
        say(a, "; held out %.4f -> %.4f", a->progress.first_eval, a->progress.last_eval);
    }
    if (known(a->progress.first_eval) && known(a->progress.last_eval) &&
        !method_of(a->o.method.kind)->preferences) {
        say(a, ", perplexity %.4g -> %.4g", exp(a->progress.first_eval),
            exp(a->progress.last_eval));
    }
}

static void summary_print(app* a) {
    char tokens[32];
    char time_taken[32];
    char pace[32];
    char epochs[40];
    char memory[160];
    bool counted = epoch_text(a, epochs)[0] != '\0';
    say(a, "\n%lld step%s, %s%s%s%s tokens in %s (%s tokens/s)\n", (long long)a->progress.step,
        a->progress.step == 1 ? "" : "s", counted ? "epoch " : "", epochs, counted ? ", " : "",
        short_number((double)a->progress.tokens_seen, tokens),
        short_time(a->progress.seconds, time_taken),
        short_number(
            a->progress.seconds > 0.0 ? (double)a->progress.tokens_seen / a->progress.seconds : 0.0,
            pace));
    summary_loss(a);
    say(a, "\n%s", memory_text(a, memory));
    say(a, "\n\n  %s/adapter        the adapter in PEFT format\n", a->o.output.folder);
    if (!a->no_gguf) {
        say(a, "  %s/adapter.gguf   the adapter for llama.cpp\n", a->o.output.folder);
    }
    char saved[PATH_SIZE];
    out_path(a, "best/adapter_config.json", saved);
    const history* h = &a->history;
    if (a->o.eval.keep_best && h->kept_step > 0 && !a->folder.best_lost && path_exists(saved)) {
        say(a,
            "  %s/best           the adapter of step %lld, with the lowest held-out loss%s, %.4f\n",
            a->o.output.folder, (long long)h->kept_step,
            h->kept_step == h->best_step ? "" : " since --keep-best", h->kept_loss);
    }
    say(a,
        "  %s/training.html  page with plots, samples and settings\n"
        "  %s/training.svg   plot of the run\n"
        "  %s/log.jsonl      metrics, one line per step\n",
        a->o.output.folder, a->o.output.folder, a->o.output.folder);
    if (a->o.demo) {
        say(a, "  %s/model          the model\n", a->o.output.folder);
    }
    say(a, "\n");
    try_print(a);
    if (!a->o.demo) {
        if (a->plan.config.vocab > a->plan.base_vocab) {
            say(a, "PEFT:       base.resize_token_embeddings(%lld)\n",
                (long long)a->plan.config.vocab);
        }
        say(a, "%s  model = PeftModel.from_pretrained(base, \"%s/adapter\")\n",
            a->plan.config.vocab > a->plan.base_vocab ? "          " : "PEFT:     ",
            a->o.output.folder);
        if (!a->no_gguf) {
            say(a, "llama.cpp:  llama-cli -m BASE.gguf --lora %s/adapter.gguf\n",
                a->o.output.folder);
        }
        if (a->o.model.rope_scale != NULL) { // neither reads it from the adapter
            say(a,
                "note: the adapter was trained with --rope-scale %s, and its base needs the same "
                "scaling:\n      rope_scaling in the config of the base for PEFT; --rope-scaling, "
                "--rope-scale and, for yarn,\n      --yarn-orig-ctx for llama.cpp\n",
                a->o.model.rope_scale);
        }
    }
}

#endif
