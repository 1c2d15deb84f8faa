// picture.h - training.svg: all panels in one picture.
#ifndef FINETUNE_PICTURE_H
#define FINETUNE_PICTURE_H

#define PICTURE_WIDTH 880.0
#define PICTURE_HEAD 86.0
#define PICTURE_GAP 44.0

// The legend of a panel, on the line of its title, from the right to the left.
static void picture_legend(const app* a, blob* out, const panel* p, const area* r) {
    double x = r->left + r->width;
    for (int i = 2; i >= 0; i--) {
        const curve* c = &p->curves[i];
        if (curve_named(&a->history, c)) {
            x -= 7.2 * (double)strlen(c->label) + 14.0;
            put(out, "<text x=\"%.0f\" y=\"%.0f\">%s</text>", x, r->top - 8.0, c->label);
            x -= 30.0;
            put_key(out, x, r->top - 12.0, c->kind);
        }
    }
    put(out, "\n");
}

static double picture_height(const app* a) {
    double height = PICTURE_HEAD;
    for (int i = 0; i < PANELS; i++) {
        height += panel_used(&a->history, &panels[i]) ? panels[i].height + PICTURE_GAP : 0.0;
    }
    return height;
}

static void picture_head(const app* a, blob* out, double height) {
    put(out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" "
        "height=\"%.0f\" role=\"img\" aria-labelledby=\"title\">\n<title id=\"title\">",
        PICTURE_WIDTH, height, PICTURE_WIDTH, height);
    put_title(a, out);
    put(out, ": ");
    put_progress(a, out);
    put(out, "</title>\n<style>\n");
    put_colours(out);
    put(out, "</style>\n<rect width=\"%.0f\" height=\"%.0f\" class=\"b\"/>\n", PICTURE_WIDTH,
        height);
    put(out, "<text x=\"76\" y=\"26\" class=\"t\">");
    put_title(a, out);
    put(out, "</text>\n<text x=\"76\" y=\"45\">");
    put_progress(a, out);
    if (a->history.width > 1) {
        put(out, "; each point is the mean of %lld steps", (long long)a->history.width);
    }
    put(out, "</text>\n");
}

static void picture_make(const app* a, blob* out) {
    double height = picture_height(a);
    double top = PICTURE_HEAD;
    picture_head(a, out, height);
    for (int i = 0; i < PANELS; i++) {
        const panel* p = &panels[i];
        if (!panel_used(&a->history, p)) {
            continue;
        }
        area r = {76.0, 780.0, top, p->height, 0.0, 0.0, (double)a->progress.total_steps};
        area_range(&a->history, p, &r);
        put(out, "<text x=\"%.0f\" y=\"%.1f\" class=\"h\">%s</text>\n", r.left, r.top - 8.0,
            p->title);
        picture_legend(a, out, p, &r);
        put_values_axis(out, &r);
        put_curves(&a->history, out, p, &r);
        top += p->height + PICTURE_GAP;
        if (top >= height) {
            put_steps_axis(out, &r, height - 24.0, 8);
            put(out, "<text x=\"%.0f\" y=\"%.0f\" text-anchor=\"end\">step</text>\n",
                r.left + r.width, height - 8.0);
        }
    }
    put(out, "</svg>\n");
}

#endif
