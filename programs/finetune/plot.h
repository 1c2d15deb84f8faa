// plot.h - the plot.
#ifndef FINETUNE_PLOT_H
#define FINETUNE_PLOT_H

#define PICTURE_BUCKETS 300

typedef struct panel {
    const char* title;
    double top;
    double height;
    double low; // range of the values
    double high;
} panel;

typedef struct series {
    double x[PICTURE_BUCKETS];
    double y[PICTURE_BUCKETS];
    int count;
} series;

static double point_value(const point* p, int which) {
    return which == 0 ? p->loss : which == 1 ? p->lr : which == 2 ? p->tokens_per_s : p->eval_loss;
}

// Averages the points into at most PICTURE_BUCKETS buckets, so that long runs give small files.
static void series_make(const app* a, int which, series* out) {
    double sum_x[PICTURE_BUCKETS] = {0.0};
    double sum_y[PICTURE_BUCKETS] = {0.0};
    int64_t counted[PICTURE_BUCKETS] = {0};
    int64_t last = a->point_count > 0 ? a->points[a->point_count - 1].step : 0;
    for (size_t i = 0; i < a->point_count; i++) {
        double y = point_value(&a->points[i], which);
        if (known(y)) {
            double place = (double)a->points[i].step / (double)(last > 0 ? last : 1);
            int bucket = (int)(fmax(0.0, fmin(1.0, place)) * (PICTURE_BUCKETS - 1));
            sum_x[bucket] += (double)a->points[i].step;
            sum_y[bucket] += y;
            counted[bucket]++;
        }
    }
    out->count = 0;
    for (int b = 0; b < PICTURE_BUCKETS; b++) {
        if (counted[b] > 0) {
            out->x[out->count] = sum_x[b] / (double)counted[b];
            out->y[out->count++] = sum_y[b] / (double)counted[b];
        }
    }
}

static void series_range(const series* s, double* low, double* high) {
    for (int i = 0; i < s->count; i++) {
        *low = fmin(*low, s->y[i]);
        *high = fmax(*high, s->y[i]);
    }
}

static void series_smooth(series* s) { // centred moving average
    series raw = *s;
    int reach = s->count / 40;
    for (int i = 0; i < s->count; i++) {
        int left = reach < i ? reach : i;
        int right = left < s->count - 1 - i ? left : s->count - 1 - i;
        double sum = 0.0;
        for (int j = i - left; j <= i + right; j++) {
            sum += raw.y[j];
        }
        s->y[i] = sum / (double)(left + right + 1);
    }
}

#define PLOT_LEFT 76.0
#define PLOT_WIDTH 780.0

static double plot_x(const app* a, double step) {
    return PLOT_LEFT + PLOT_WIDTH * step / (double)(a->total_steps > 0 ? a->total_steps : 1);
}

static double plot_y(const panel* p, double value) {
    double range = p->high > p->low ? p->high - p->low : 1.0;
    return p->top + p->height * (1.0 - (value - p->low) / range);
}

static double tick_size(double range, int wanted) {
    double raw = range / wanted;
    double power = pow(10.0, floor(log10(raw > 0.0 ? raw : 1.0)));
    double lead = raw / power;
    return power * (lead <= 1.0 ? 1.0 : lead <= 2.0 ? 2.0 : lead <= 5.0 ? 5.0 : 10.0);
}

// Gives a curve that is constant, or nearly, an axis that includes zero: the gap between two ticks
// must be one that a number of this size can resolve.
static void panel_widen(panel* p) {
    if (!(p->high - p->low > 1e-6 * fmax(fabs(p->low), fabs(p->high)))) {
        p->low = fmin(0.0, p->low);
        p->high = fmax(0.0, p->high);
    }
    p->high = p->high > p->low ? p->high : p->low + 1.0;
}

#define MOST_TICKS 24 // no range, however odd, can keep the loop running

static void panel_frame(blob* out, const panel* p) {
    double tick = tick_size(p->high - p->low, p->height > 150.0 ? 7 : 2);
    double first = ceil(p->low / tick - 1e-9);
    put(out, "<text x=\"%.0f\" y=\"%.1f\" class=\"h\">%s</text>\n", PLOT_LEFT, p->top - 8.0,
        p->title);
    for (int i = 0; i < MOST_TICKS; i++) {
        double v = (first + i) * tick;
        if (!(v <= p->high + tick * 1e-6)) {
            break;
        }
        double y = plot_y(p, v);
        char label[32];
        if (fabs(v) >= 1000.0) {
            short_number(v, label);
        } else {
            snprintf(label, sizeof label, "%.3g", fabs(v) < tick * 1e-6 ? 0.0 : v);
        }
        put(out, "<line x1=\"%.0f\" y1=\"%.1f\" x2=\"%.0f\" y2=\"%.1f\" class=\"g\"/>\n", PLOT_LEFT,
            y, PLOT_LEFT + PLOT_WIDTH, y);
        put(out, "<text x=\"%.0f\" y=\"%.1f\" text-anchor=\"end\">%s</text>\n", PLOT_LEFT - 8.0,
            y + 4.0, label);
    }
}

static void series_draw(const app* a, blob* out, const panel* p, const series* s,
                        const char* kind) {
    if (s->count == 0) {
        return;
    }
    put(out, "<polyline class=\"%s\" points=\"", kind);
    for (int i = 0; i < s->count; i++) {
        put(out, "%.1f,%.1f ", plot_x(a, s->x[i]), plot_y(p, s->y[i]));
    }
    put(out, "\"/>\n");
    for (int i = 0; strcmp(kind, "e") == 0 && i < s->count; i++) {
        put(out, "<circle class=\"d\" cx=\"%.1f\" cy=\"%.1f\" r=\"4\"/>\n", plot_x(a, s->x[i]),
            plot_y(p, s->y[i]));
    }
}

static void steps_axis(const app* a, blob* out, double y) {
    double tick = fmax(1.0, tick_size((double)a->total_steps, 8));
    for (int i = 0; i < MOST_TICKS && i * tick <= (double)a->total_steps; i++) {
        double v = i * tick;
        put(out, "<text x=\"%.1f\" y=\"%.0f\" text-anchor=\"middle\">%.0f</text>\n", plot_x(a, v),
            y, v);
    }
    put(out, "<text x=\"%.0f\" y=\"%.0f\" text-anchor=\"end\">step</text>\n",
        PLOT_LEFT + PLOT_WIDTH, y + 18.0);
}

static void picture_head(const app* a, blob* out) {
    put(out, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 880 600\" width=\"880\" "
             "height=\"600\">\n<style>\n"
             "text { font: 12px sans-serif; fill: #555 }\n"
             ".h { font: bold 13px sans-serif; fill: #222 }\n"
             ".t { font: bold 17px sans-serif; fill: #111 }\n");
    put(out, ".g { stroke: #e4e4e4; stroke-width: 1 }\n"
             "polyline { fill: none; stroke-linejoin: round }\n"
             ".r { stroke: #a9c8ea; stroke-width: 1 }\n"
             ".s { stroke: #1f6fc0; stroke-width: 2.2 }\n"
             ".e { stroke: #d9622b; stroke-width: 2 }\n"
             ".d { fill: #d9622b }\n"
             ".l { stroke: #4a9a62; stroke-width: 2 }\n"
             ".p { stroke: #8a63b5; stroke-width: 1.6 }\n</style>\n"
             "<rect width=\"880\" height=\"600\" fill=\"#fff\"/>\n");
    put(out, "<text x=\"%.0f\" y=\"30\" class=\"t\">step %lld of %lld", PLOT_LEFT,
        (long long)a->step, (long long)a->total_steps);
    if (known(a->last_loss)) {
        put(out, ", loss %.4f", a->last_loss);
    }
    if (known(a->last_eval)) {
        put(out, ", held out %.4f", a->last_eval);
    }
    put(out, "</text>\n");
    put(out, "<line x1=\"600\" y1=\"52\" x2=\"630\" y2=\"52\" class=\"s\"/>"
             "<text x=\"636\" y=\"56\">training</text>"
             "<line x1=\"712\" y1=\"52\" x2=\"742\" y2=\"52\" class=\"e\"/>"
             "<circle class=\"d\" cx=\"727\" cy=\"52\" r=\"4\"/>"
             "<text x=\"748\" y=\"56\">held out</text>\n");
}

static void picture_panels(const app* a, blob* out) {
    series s;
    series eval;
    panel p = {"loss", 64.0, 290.0, 1e30, -1e30};
    series_make(a, 0, &s);
    series_make(a, 3, &eval);
    series_range(&s, &p.low, &p.high);
    series_range(&eval, &p.low, &p.high);
    p.low = p.low > 1e29 || p.low < 0.3 * p.high ? 0.0 : p.low;
    p.high = p.high < p.low ? p.low : p.high;
    panel_widen(&p);
    panel_frame(out, &p);
    series_draw(a, out, &p, &s, "r");
    series_smooth(&s);
    series_draw(a, out, &p, &s, "s");
    series_draw(a, out, &p, &eval, "e");

    panel lr = {"learning rate", 398.0, 60.0, 0.0, 0.0};
    series_make(a, 1, &s);
    series_range(&s, &lr.low, &lr.high);
    panel_widen(&lr);
    panel_frame(out, &lr);
    series_draw(a, out, &lr, &s, "l");

    panel speed = {"tokens per second", 500.0, 50.0, 0.0, 1.0};
    series_make(a, 2, &s);
    series_range(&s, &speed.low, &speed.high);
    panel_widen(&speed);
    panel_frame(out, &speed);
    series_draw(a, out, &speed, &s, "p");
    steps_axis(a, out, 572.0);
}

// Writes the plot if it is due, or `now`; plotting takes at most 2% of the time.
static void picture_write(app* a, bool now) {
    double start = seconds_now();
    if (a->point_count == 0 || (!now && start - a->svg_at < fmax(2.0, 50.0 * a->svg_cost))) {
        return;
    }
    blob out;
    memset(&out, 0, sizeof out);
    picture_head(a, &out);
    picture_panels(a, &out);
    put(&out, "</svg>\n");
    bear(a, TOLD_PICTURE, file_replace(a, "training.svg", out.data, out.count));
    blob_free(&out);
    a->svg_at = seconds_now();
    a->svg_cost = a->svg_at - start;
}

#endif
