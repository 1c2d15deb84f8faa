// page.h - training.html: curves, samples, settings and plan on one page, without scripts.
//
// It refreshes itself while the run goes on. Everything that comes from elsewhere is escaped.
#ifndef FINETUNE_PAGE_H
#define FINETUNE_PAGE_H

#define PAGE_REFRESH 5    // seconds
#define PAGE_ANSWER 2000u // bytes of a text that are shown

static const char page_style[] =
    "body { margin: 0; font: 16px/1.5 system-ui, sans-serif; background: #fff; color: #222 }\n"
    "main { max-width: 960px; margin: 0 auto; padding: 16px }\n"
    "h1 { font-size: 1.5em; line-height: 1.2; margin: 0.5em 0; overflow-wrap: anywhere }\n"
    "h2 { font-size: 1.15em; margin: 1.6em 0 0.3em }\n"
    "h3 { font-size: 1em; margin: 1.2em 0 0.2em }\n"
    "p { margin: 0.3em 0; overflow-wrap: anywhere }\n";
static const char page_style_parts[] =
    ".quiet, .key { color: #666; font-size: 0.9em }\n"
    ".key span { white-space: nowrap; margin-right: 1em }\n"
    ".key svg { width: 24px; height: 10px; margin-right: 4px }\n"
    "svg.curves { display: block; width: 100%; height: auto }\n"
    "svg.curves * { vector-effect: non-scaling-stroke }\n"
    ".v { fill: #888; fill-opacity: 0 }\n.v:hover { fill-opacity: 0.25 }\n"
    "pre { margin: 0; font: 0.9em/1.45 monospace; white-space: pre-wrap; overflow-wrap: anywhere "
    "}\n"
    "pre.wide { white-space: pre; overflow-x: auto }\n"
    "table { border-collapse: collapse; width: 100%; table-layout: fixed }\n";
static const char page_style_table[] =
    "th, td { text-align: left; vertical-align: top; padding: 4px 8px 4px 0; font-weight: normal; "
    "border-top: 1px solid #e4e4e4; overflow-wrap: anywhere }\n"
    "th { width: 11em; color: #666 }\n"
    "@media (max-width: 600px) { svg.curves text { font-size: 22px } main { padding: 10px }\n"
    "th { width: 30% } }\n"
    "@media (prefers-color-scheme: dark) {\n"
    "body { background: #14171b; color: #dfe3e7 }\n"
    ".quiet, .key, th { color: #9aa3ad }\nth, td { border-color: #2d333a }\n}\n";

static void put_all(blob* out, const char* text) { // `put` has a limit
    blob_add(out, text, strlen(text));
}

static void page_head(const app* a, blob* out, bool over) {
    put(out, "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
             "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
             "<meta name=\"color-scheme\" content=\"light dark\">\n");
    if (!over) {
        put(out, "<meta http-equiv=\"refresh\" content=\"%d\">\n", PAGE_REFRESH);
    }
    put(out, "<title>%.0f%% - ",
        floor(100.0 * (double)a->progress.step /
              (double)(a->progress.total_steps > 0 ? a->progress.total_steps : 1)));
    put_title(a, out);
    put(out, "</title>\n<style>\n");
    put_all(out, page_style);
    put_all(out, page_style_parts);
    put_colours(out);
    put_all(out, page_style_table);
    put(out, "</style>\n</head>\n<body>\n<main>\n<h1>");
    put_title(a, out);
    put(out, "</h1>\n");
}

static void page_state(const app* a, blob* out, bool over) {
    char text[32];
    char why[512];
    char when[32] = "";
    time_t now = time(NULL);
    const struct tm* local = localtime(&now);
    if (local != NULL) {
        strftime(when, sizeof when, "%Y-%m-%d %H:%M:%S", local);
    }
    const char* state = !over                                         ? "Running"
                        : a->progress.step == a->progress.total_steps ? "Finished"
                        : patience_over(a)                            ? "Stopped early"
                                           : "Stopped; the same command resumes it";
    put(out, "<p id=\"state\">%s: ", state);
    put_progress(a, out);
    if (a->progress.seconds > 0.0) {
        put(out, ", %s tokens/s",
            short_number((double)a->progress.tokens_seen / a->progress.seconds, text));
        put(out, ", %s", short_time(a->progress.seconds, text));
    }
    if (!over && a->progress.pace > 0.0) {
        put(out, ", %s left",
            short_time(a->progress.pace * (double)(a->progress.total_steps - a->progress.step),
                       text));
    }
    put(out, "</p>\n<p class=\"quiet\">");
    const char* reason = backend_reason(a, why);
    put_text(out, reason, strlen(reason));
    put(out, "</p>\n<p class=\"quiet\">Written at %s%s.</p>\n", when,
        over ? "" : "; this page refreshes itself");
}

static void page_panel(const app* a, blob* out, const panel* p) {
    double height = p->height > 150.0 ? 260.0 : 110.0;
    area r = {84.0, 546.0, 18.0, height, 0.0, 0.0, (double)a->progress.total_steps};
    area_range(&a->history, p, &r);
    put(out, "<h2>%s</h2>\n<p class=\"key\">", p->title);
    for (int i = 0; i < 3; i++) {
        if (curve_named(&a->history, &p->curves[i])) {
            put(out, "<span><svg viewBox=\"0 0 24 10\" aria-hidden=\"true\">");
            put_key(out, 0.0, 5.0, p->curves[i].kind);
            put(out, "</svg>%s</span>", p->curves[i].label);
        }
    }
    put(out,
        "</p>\n<svg class=\"curves\" viewBox=\"0 0 640 %.0f\" role=\"img\" "
        "aria-label=\"%s by step\">\n<title>%s by step</title>\n",
        height + 66.0, p->title, p->title);
    put_values_axis(out, &r);
    put_curves(&a->history, out, p, &r);
    put_steps_axis(out, &r, height + 41.0, 5);
    put(out, "<text x=\"%.0f\" y=\"%.0f\" text-anchor=\"end\">step</text>\n", r.left + r.width,
        height + 61.0);
    put_hover(&a->history, out, p, &r);
    put(out, "</svg>\n");
}

static void page_curves(const app* a, blob* out) {
    for (int i = 0; i < PANELS; i++) {
        if (panel_used(&a->history, &panels[i])) {
            page_panel(a, out, &panels[i]);
        }
    }
    if (a->history.width > 1) {
        put(out,
            "<p class=\"quiet\" id=\"thinning\">Each point is the mean of %lld steps; log.jsonl "
            "has all of them.</p>\n",
            (long long)a->history.width);
    }
}

// A text in a block of its own, whatever its direction.
static void page_text(blob* out, const blob* text) {
    size_t shown = text_cut(text->data, text->count, PAGE_ANSWER);
    put(out, "<pre dir=\"auto\">");
    put_text(out, text->data, shown);
    put(out, shown < text->count ? "... (the rest is in log.jsonl)</pre>" : "</pre>");
}

static void page_samples(const app* a, blob* out) {
    if (a->prompts.step < 0) {
        return;
    }
    put(out, "<h2>samples</h2>\n");
    for (size_t i = 0; i < a->prompts.count; i++) {
        const sample_prompt* p = &a->prompts.data[i];
        put(out, "<h3>sample %zu</h3>\n<table class=\"sample\">\n<tr><th>prompt</th><td>", i + 1);
        page_text(out, &p->text);
        put(out, "</td></tr>\n");
        for (int k = 0; k < p->answer_count; k++) {
            put(out, "<tr><th>step %lld</th><td>", (long long)p->answers[k].step);
            page_text(out, &p->answers[k].text);
            put(out, "</td></tr>\n");
        }
        put(out, "</table>\n");
    }
}

static void page_row(blob* out, const char* name, const char* text) {
    put(out, "<tr><th>%s</th><td>", name);
    put_text(out, text, strlen(text));
    put(out, "</td></tr>\n");
}

static void page_machine(const app* a, blob* out) {
    char all[4096];
    char tier[64];
    char threads[64];
    char text[200];
    qlora_describe(a->ctx, all, sizeof all);
    described(all, "CPU tier: ", tier);
    described(all, "threads: ", threads);
    if (qlora_ctx_backend(a->ctx) == QLORA_BACKEND_CPU) {
        snprintf(text, sizeof text, "CPU, %s thread%s, %s", threads,
                 strcmp(threads, "1") == 0 ? "" : "s", tier);
    } else {
        snprintf(text, sizeof text, "%.190s", qlora_ctx_reason(a->ctx));
    }
    page_row(out, "machine", text);
    page_row(out, "version", "qlora.h " QLORA_VERSION_STRING);
}

// What the options do not say, or only by their defaults.
static void page_facts(const app* a, blob* out) {
    const options* o = &a->o;
    const counts* c = &a->data.counted;
    char text[200];
    char number[32];
    if (o->adapter.from == NULL && o->adapter.alpha == 0.0) {
        real_text(2.0 * (double)o->adapter.rank, number);
        page_row(out, "alpha", number);
    }
    if (o->optimizer.warmup < 0) {
        snprintf(text, sizeof text, "%lld step%s", (long long)a->train_desc.warmup_steps,
                 a->train_desc.warmup_steps == 1 ? "" : "s");
        page_row(out, "warmup", text);
    }
    snprintf(text, sizeof text, "%s", mode_name(o, &a->plan));
    page_row(out, "arithmetic", text);
    double share = 100.0 * (double)a->plan.parameters / model_parameters(&a->plan);
    snprintf(text, sizeof text, "%lld, %.2g%% of the model's %s", (long long)a->plan.parameters,
             share, short_number(model_parameters(&a->plan), number));
    page_row(out, "trained parameters", text);
    if (c->tokens > 0) {
        snprintf(text, sizeof text, "%llu in %zu samples, %llu of them trained (%.3g%%)",
                 (unsigned long long)c->tokens, a->data.train.count + a->data.eval.count,
                 (unsigned long long)c->trained, 100.0 * (double)c->trained / (double)c->tokens);
        page_row(out, "tokens of the data", text);
    }
    page_machine(a, out);
}

// The options as in settings.txt, one row each.
static void page_options(const app* a, blob* out) {
    blob text;
    memset(&text, 0, sizeof text);
    bool ok = settings_write(&a->set, SETTINGS_ALL, &text) && parts_write(a, &text);
    const char* end = text.data != NULL ? text.data + text.count : NULL;
    for (const char* line = text.data; ok && line < end;) {
        const char* stop = (const char*)memchr(line, '\n', (size_t)(end - line));
        stop = stop != NULL ? stop : end;
        const char* space = (const char*)memchr(line, ' ', (size_t)(stop - line));
        const char* name_end = space != NULL ? space : stop;
        name_end -= name_end > line && name_end[-1] == ':' ? 1 : 0;
        put(out, "<tr><th>");
        put_text(out, line, (size_t)(name_end - line));
        put(out, "</th><td>");
        if (space != NULL) {
            put_text(out, space + 1, (size_t)(stop - space - 1));
        } else {
            put(out, "yes");
        }
        put(out, "</td></tr>\n");
        line = stop + 1;
    }
    blob_free(&text);
}

static void page_settings(const app* a, blob* out) {
    put(out, "<h2>settings</h2>\n<table id=\"settings\">\n");
    page_facts(a, out);
    page_options(a, out);
    put(out, "</table>\n");
}

static void page_plan(const app* a, blob* out) {
    char text[4096];
    qlora_plan_describe(&a->plan, text, sizeof text);
    put(out, "<h2>memory plan</h2>\n<pre class=\"wide\" id=\"plan\">");
    put_text(out, text, strlen(text));
    put(out, "</pre>\n<p class=\"quiet\">");
    (void)memory_text(a, text);
    put_text(out, text, strlen(text));
    put(out, "</p>\n");
}

static void page_make(const app* a, blob* out, bool over) {
    page_head(a, out, over);
    page_state(a, out, over);
    page_curves(a, out);
    page_samples(a, out);
    page_settings(a, out);
    page_plan(a, out);
    put(out, "</main>\n</body>\n</html>\n");
}

// Writes the plot and the page if they are due, or if the run is `over`; this takes at most 2% of
// the time. If it fails, training goes on.
static void picture_write(app* a, bool over) {
    double start = seconds_now();
    if (a->history.entries == 0 || (!over && start - a->svg_at < fmax(2.0, 50.0 * a->svg_cost))) {
        return;
    }
    blob out;
    memset(&out, 0, sizeof out);
    picture_make(a, &out);
    bear(a, TOLD_PICTURE, file_replace(a, "training.svg", out.data, out.count));
    out.count = 0;
    page_make(a, &out, over);
    bear(a, TOLD_PAGE, file_replace(a, "training.html", out.data, out.count));
    blob_free(&out);
    a->svg_at = seconds_now();
    a->svg_cost = a->svg_at - start;
}

#endif
