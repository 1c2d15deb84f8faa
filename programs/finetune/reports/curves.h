// curves.h - the curves of a run as SVG, for the plot and the page.
#ifndef FINETUNE_CURVES_H
#define FINETUNE_CURVES_H

// ---- text ----

// Appends a text as content of XML or HTML. It may contain anything: it comes from paths, data and
// the model.
static void put_text(blob* out, const char* text, size_t size) {
    for (size_t i = 0; i < size;) {
        size_t step = character_size((const unsigned char*)text + i, size - i);
        const char* entity = step == 0        ? "\xEF\xBF\xBD" // U+FFFD
                             : text[i] == '&' ? "&amp;"
                             : text[i] == '<' ? "&lt;"
                             : text[i] == '>' ? "&gt;"
                             : text[i] == '"' ? "&quot;"
                                              : NULL;
        blob_add(out, entity != NULL ? entity : text + i, entity != NULL ? strlen(entity) : step);
        i += step > 0 ? step : 1;
    }
}

// Where a text of at most `most` bytes can end without cutting a character.
static size_t text_cut(const char* text, size_t size, size_t most) {
    if (size <= most) {
        return size;
    }
    while (most > 0 && ((unsigned char)text[most] & 0xc0u) == 0x80u) {
        most--;
    }
    return most;
}

// The last name of a path, shortened.
static void put_name(blob* out, const char* path) {
    size_t end = strlen(path);
    while (end > 1 && strchr(FOLDER_SEPARATORS, path[end - 1]) != NULL) {
        end--;
    }
    size_t start = end;
    while (start > 0 && strchr(FOLDER_SEPARATORS, path[start - 1]) == NULL) {
        start--;
    }
    size_t shown = text_cut(path + start, end - start, 36);
    put_text(out, path + start, shown);
    put(out, "%s", shown < end - start ? "..." : "");
}

// "MODEL on DATA"
static void put_title(const app* a, blob* out) {
    if (a->o.demo) {
        put(out, "finetune --demo");
        return;
    }
    put_name(out, a->o.model.path);
    if (a->data.inputs.count > 0) {
        put(out, " on ");
        put_name(out, data_name(a->data.inputs.data[0].path));
    }
    if (a->data.inputs.count > 1) {
        put(out, " and %zu more file%s", a->data.inputs.count - 1,
            a->data.inputs.count > 2 ? "s" : "");
    }
}

static void put_progress(const app* a, blob* out) {
    char epochs[40];
    int64_t span = summary_span(a);
    double loss = loss_mean(a, true);
    put(out, "step %lld of %lld", (long long)a->progress.step, (long long)a->progress.total_steps);
    if (epoch_text(a, epochs)[0] != '\0') {
        put(out, ", epoch %s", epochs);
    }
    if (known(loss)) {
        put(out, ", loss %.4f", loss);
    }
    if (known(loss) && span > 1) {
        put(out, " (mean of %lld steps)", (long long)span);
    }
    if (known(a->progress.last_eval)) {
        put(out, ", held out %.4f", a->progress.last_eval);
    }
}

// ---- colours ----

static const struct {
    const char* what; // a selector and a property
    const char* light;
    const char* dark;
} colours[] = {
    {"text { fill", "#555", "#a9b1bb"},    {".h, .t { fill", "#1a1a1a", "#e9ebee"},
    {".b { fill", "#fff", "#14171b"},      {".g { stroke", "#e4e4e4", "#2d333a"},
    {".r { stroke", "#a9c8ea", "#2f5b87"}, {".s { stroke", "#1f6fc0", "#5caaf6"},
    {".e { stroke", "#d9622b", "#f28b55"}, {".d { fill", "#d9622b", "#f28b55"},
    {".l { stroke", "#3f8f58", "#65c285"}, {".p { stroke", "#8a63b5", "#b795e3"},
    {".j { stroke", "#b8325c", "#ee7f9d"},
};

// The rules for curves. Not with variables, which some viewers of SVG do not know.
static void put_colours(blob* out) {
    size_t count = sizeof colours / sizeof colours[0];
    put(out,
        "text { font: 12px sans-serif }\n.h { font: bold 13px sans-serif }\n"
        ".t { font: bold 17px sans-serif }\n.g { stroke-width: 1 }\n"
        "polyline { fill: none; stroke-linejoin: round; stroke-width: 2 }\n"
        "polyline.r { stroke-width: 1 }\nline { stroke-width: 2 }\nline.g { stroke-width: 1 }\n");
    for (size_t i = 0; i < count; i++) {
        put(out, "%s: %s }\n", colours[i].what, colours[i].light);
    }
    put(out, "@media (prefers-color-scheme: dark) {\n");
    for (size_t i = 0; i < count; i++) {
        put(out, "%s: %s }\n", colours[i].what, colours[i].dark);
    }
    put(out, "}\n");
}

// ---- what is drawn ----

typedef struct curve {
    int which; // TRACE_
    const char* kind;
    const char* label;
    bool smooth;
} curve;

typedef struct panel {
    const char* title;
    double height; // in training.svg
    bool from_zero;
    curve curves[3];
} panel;

static const panel panels[] = {
    {"loss",
     290.0,
     false,
     {{TRACE_LOSS, "r", "training", false},
      {TRACE_LOSS, "s", "smoothed", true},
      {TRACE_EVAL_LOSS, "e", "held out", false}}},
    {"rewards",
     120.0,
     false,
     {{TRACE_CHOSEN, "l", "chosen", true},
      {TRACE_REJECTED, "j", "rejected", true},
      {TRACE_MARGINS, "p", "margin", true}}},
    {"accuracy",
     70.0,
     true,
     {{TRACE_ACCURACY, "r", "training", false},
      {TRACE_ACCURACY, "s", "smoothed", true},
      {TRACE_EVAL_ACCURACY, "e", "held out", false}}},
    {"load of experts",
     70.0,
     true,
     {{TRACE_LOAD_MOST, "l", "most", true},
      {TRACE_LOAD_LEAST, "j", "least", true},
      {TRACE_LOAD_ENTROPY, "p", "entropy", true}}},
    {"load-balancing loss",
     60.0,
     false,
     {{TRACE_ROUTER_AUX_LOSS, "r", "training", false},
      {TRACE_ROUTER_AUX_LOSS, "s", "smoothed", true},
      {0, NULL, NULL, false}}},
    {"learning rate",
     60.0,
     true,
     {{TRACE_LR, "l", "", false}, {0, NULL, NULL, false}, {0, NULL, NULL, false}}},
    {"gradient norm",
     60.0,
     true,
     {{TRACE_GRAD_NORM, "r", "training", false},
      {TRACE_GRAD_NORM, "s", "smoothed", true},
      {0, NULL, NULL, false}}},
    {"tokens per second",
     50.0,
     true,
     {{TRACE_SPEED, "p", "", false}, {0, NULL, NULL, false}, {0, NULL, NULL, false}}},
};
#define PANELS ((int)(sizeof panels / sizeof panels[0]))

typedef struct series {
    double x[TRACE_ROOM];
    double y[TRACE_ROOM];
    int count;
} series;

static void series_make(const trace* t, series* out) {
    out->count = 0;
    for (int i = 0; i < TRACE_ROOM; i++) {
        if (t->counts[i] > 0) {
            out->x[out->count] = t->steps[i] / (double)t->counts[i];
            out->y[out->count++] = t->sums[i] / (double)t->counts[i];
        }
    }
}

static bool trace_empty(const trace* t) {
    for (int i = 0; i < TRACE_ROOM; i++) {
        if (t->counts[i] > 0) {
            return false;
        }
    }
    return true;
}

// Whether the run measures what a panel shows.
static bool panel_used(const history* h, const panel* p) {
    for (int i = 0; i < 3; i++) {
        if (p->curves[i].kind != NULL && !trace_empty(&h->traces[p->curves[i].which])) {
            return true;
        }
    }
    return false;
}

// The value at point `i` of the line that fits the points from `first` to `last` best, the near
// ones most. At the ends of a curve the points are on one side: a mean would lag behind the curve
// there, or follow its last point.
static double series_fit(const series* s, int i, int first, int last) {
    double reach = fmax(s->x[i] - s->x[first], s->x[last] - s->x[i]) + 1.0;
    double sums[5] = {0.0, 0.0, 0.0, 0.0, 0.0}; // of w, w x, w x x, w y, w x y
    for (int k = first; k <= last; k++) {
        double x = s->x[k] - s->x[i];
        double d = fabs(x) / reach;
        double w = pow(1.0 - d * d * d, 3.0);
        sums[0] += w;
        sums[1] += w * x;
        sums[2] += w * x * x;
        sums[3] += w * s->y[k];
        sums[4] += w * x * s->y[k];
    }
    double det = sums[0] * sums[2] - sums[1] * sums[1];
    return det > 1e-9 * sums[0] * sums[2] ? (sums[2] * sums[3] - sums[1] * sums[4]) / det
                                          : sums[3] / sums[0];
}

static void series_smooth(series* s) {
    series raw = *s;
    int reach = s->count / 25 + 2;
    for (int i = 0; i < s->count; i++) {
        int last = i + reach > 2 * reach ? i + reach : 2 * reach; // as many points at both ends
        last = last < s->count - 1 ? last : s->count - 1;
        int first = last - 2 * reach > 0 ? last - 2 * reach : 0;
        s->y[i] = series_fit(&raw, i, first, last);
    }
}

// ---- axes ----

typedef struct area { // where a panel is drawn, and the range of its values
    double left;
    double width;
    double top;
    double height;
    double low;
    double high;
    double steps; // the x axis ends here
} area;

static double area_x(const area* r, double step) {
    return r->left + r->width * step / (r->steps > 0.0 ? r->steps : 1.0);
}

static double area_y(const area* r, double value) {
    double range = r->high > r->low ? r->high - r->low : 1.0;
    return r->top + r->height * (1.0 - (value - r->low) / range);
}

static double tick_size(double range, int wanted) {
    double raw = range / wanted;
    double power = pow(10.0, floor(log10(raw > 0.0 ? raw : 1.0)));
    double lead = raw / power;
    return power * (lead <= 1.0 ? 1.0 : lead <= 2.0 ? 2.0 : lead <= 5.0 ? 5.0 : 10.0);
}

// The range of all curves. A curve that is constant, or nearly, gets an axis that includes zero:
// the gap between two ticks must be one that a number of this size can resolve.
static void area_range(const history* h, const panel* p, area* r) {
    series s;
    r->low = 1e300;
    r->high = -1e300;
    for (int c = 0; c < 3 && p->curves[c].kind != NULL; c++) {
        series_make(&h->traces[p->curves[c].which], &s);
        for (int i = 0; i < s.count; i++) {
            r->low = fmin(r->low, s.y[i]);
            r->high = fmax(r->high, s.y[i]);
        }
    }
    if (r->low > r->high) {
        r->low = 0.0;
        r->high = 1.0;
    }
    if (p->from_zero || (r->low > 0.0 && r->low < 0.3 * r->high)) {
        r->low = fmin(0.0, r->low);
    }
    if (!(r->high - r->low > 1e-6 * fmax(fabs(r->low), fabs(r->high)))) {
        r->low = fmin(0.0, r->low);
        r->high = fmax(0.0, r->high);
    }
    r->high = r->high > r->low ? r->high : r->low + 1.0;
}

#define MOST_TICKS 24 // no range, however odd, can keep the loop running

// A value at the axis, in six characters or so.
static void tick_label(double value, double tick, char label[32]) {
    if (fabs(value) < tick * 1e-6) {
        snprintf(label, 32, "0");
    } else if (fabs(value) >= 1000.0) {
        short_number(value, label);
    } else if (fabs(value) < 0.001) { // 1.5e-4 is shorter than 0.00015
        int power = (int)floor(log10(fabs(value)) + 1e-9);
        snprintf(label, 32, "%.3ge%d", value / pow(10.0, power), power);
    } else {
        snprintf(label, 32, "%.3g", value);
    }
}

static void put_values_axis(blob* out, const area* r) {
    double tick = tick_size(r->high - r->low, r->height > 150.0 ? 7 : 4);
    double first = ceil(r->low / tick - 1e-9);
    for (int i = 0; i < MOST_TICKS; i++) {
        double v = (first + i) * tick;
        if (!(v <= r->high + tick * 1e-6)) {
            break;
        }
        double y = area_y(r, v);
        char label[32];
        tick_label(v, tick, label);
        put(out, "<line x1=\"%.0f\" y1=\"%.1f\" x2=\"%.0f\" y2=\"%.1f\" class=\"g\"/>\n", r->left,
            y, r->left + r->width, y);
        put(out, "<text x=\"%.0f\" y=\"%.1f\" text-anchor=\"end\">%s</text>\n", r->left - 8.0,
            y + 4.0, label);
    }
}

static void put_steps_axis(blob* out, const area* r, double y, int ticks) {
    double tick = fmax(1.0, tick_size(r->steps, ticks));
    for (int i = 0; i < MOST_TICKS && i * tick <= r->steps; i++) {
        char label[32];
        double v = i * tick;
        snprintf(label, sizeof label, "%.0f", v);
        put(out, "<text x=\"%.1f\" y=\"%.0f\" text-anchor=\"%s\">%s</text>\n", area_x(r, v), y,
            v > 0.97 * r->steps ? "end" : "middle", v >= 10000.0 ? short_number(v, label) : label);
    }
}

static void put_series(blob* out, const area* r, const series* s, const char* kind) {
    if (s->count == 0) {
        return;
    }
    put(out, "<polyline class=\"%s\" points=\"", kind);
    for (int i = 0; i < s->count; i++) {
        double y = fmax(r->low, fmin(r->high, s->y[i])); // a fit may leave the range
        put(out, "%.1f,%.1f ", area_x(r, s->x[i]), area_y(r, y));
    }
    put(out, "\"/>\n");
    for (int i = 0; strcmp(kind, "e") == 0 && i < s->count; i++) {
        put(out, "<circle class=\"d\" cx=\"%.1f\" cy=\"%.1f\" r=\"%.1f\"/>\n", area_x(r, s->x[i]),
            area_y(r, s->y[i]), s->count > 60 ? 2.0 : 4.0);
    }
}

static void put_curves(const history* h, blob* out, const panel* p, const area* r) {
    series s;
    for (int i = 0; i < 3 && p->curves[i].kind != NULL; i++) {
        series_make(&h->traces[p->curves[i].which], &s);
        if (p->curves[i].smooth) {
            series_smooth(&s);
        }
        put_series(out, r, &s, p->curves[i].kind);
    }
}

#define HOVER_PLACES 200 // per panel

// The values of a curve by place: smoothed ones are those of the line that is drawn.
static void values_by_place(const history* h, const curve* c, double out[TRACE_ROOM]) {
    const trace* t = &h->traces[c->which];
    series s;
    int at = 0;
    series_make(t, &s);
    if (c->smooth) {
        series_smooth(&s);
    }
    for (int i = 0; i < TRACE_ROOM; i++) {
        out[i] = t->counts[i] > 0 ? s.y[at++] : (double)NAN;
    }
}

// What the browser shows over a place: its steps and the values of all curves.
static void put_hover_text(blob* out, const panel* p, double values[3][TRACE_ROOM], int place,
                           int64_t width) {
    long long first = (long long)(place * width);
    put(out, "<title>step %lld", first);
    if (width > 1) {
        put(out, " to %lld", first + (long long)width - 1);
    }
    for (int c = 0; c < 3 && p->curves[c].kind != NULL; c++) {
        const char* label = p->curves[c].label;
        if (known(values[c][place])) {
            put(out, ", %s %.5g", label[0] != '\0' ? label : p->title, values[c][place]);
        }
    }
    put(out, "</title>");
}

// Invisible columns over a panel, one per place or per few of them. Evaluations always have one.
static void put_hover(const history* h, blob* out, const panel* p, const area* r) {
    double values[3][TRACE_ROOM];
    bool any[TRACE_ROOM] = {false};
    int curves = 0;
    int count = 0;
    for (; curves < 3 && p->curves[curves].kind != NULL; curves++) {
        values_by_place(h, &p->curves[curves], values[curves]);
    }
    for (int i = 0; i < TRACE_ROOM; i++) {
        for (int c = 0; c < curves; c++) {
            any[i] = any[i] || known(values[c][i]);
        }
        count += any[i] ? 1 : 0;
    }
    int every = (count + HOVER_PLACES - 1) / HOVER_PLACES;
    double end = r->left - 3.0;
    for (int i = 0, seen = 0; i < TRACE_ROOM; i++) {
        if (!any[i] || (seen++ % every != 0 && !known(values[curves - 1][i]))) {
            continue;
        }
        double left = fmax(end, area_x(r, (double)(i * h->width) - 0.5));
        end = fmin(r->left + r->width + 3.0, area_x(r, (double)((i + every) * h->width) - 0.5));
        if (end > left) {
            put(out, "<rect class=\"v\" x=\"%.1f\" y=\"%.0f\" width=\"%.1f\" height=\"%.0f\">",
                left, r->top, end - left, r->height);
            put_hover_text(out, p, values, i, h->width);
            put(out, "</rect>\n");
        }
    }
}

// Whether a curve has an entry in the legend.
static bool curve_named(const history* h, const curve* c) {
    return c->kind != NULL && c->label[0] != '\0' && !trace_empty(&h->traces[c->which]);
}

static void put_key(blob* out, double x, double y, const char* kind) {
    put(out, "<line x1=\"%.0f\" y1=\"%.0f\" x2=\"%.0f\" y2=\"%.0f\" class=\"%s\"/>", x, y, x + 24.0,
        y, kind);
    if (strcmp(kind, "e") == 0) {
        put(out, "<circle class=\"d\" cx=\"%.0f\" cy=\"%.0f\" r=\"4\"/>", x + 12.0, y);
    }
}

#endif
