// history.h - what a run keeps of its steps, however many they are: curves, means, the best one.
#ifndef FINETUNE_HISTORY_H
#define FINETUNE_HISTORY_H

// The names of a value in the log and as a tag of TensorBoard, which are those of other trainers.
static const struct {
    const char* name;
    const char* tag;
} trace_names[TRACES] = {{"loss", "train/loss"},
                         {"grad_norm", "train/grad_norm"},
                         {"lr", "train/learning_rate"},
                         {"tokens_per_s", "train/tokens_per_second"},
                         {"epoch", "train/epoch"},
                         {"memory_bytes", "train/memory_bytes"},
                         {"eval_loss", "eval/loss"},
                         {"rewards_chosen", "train/rewards/chosen"},
                         {"rewards_rejected", "train/rewards/rejected"},
                         {"margins", "train/rewards/margins"},
                         {"accuracy", "train/rewards/accuracies"},
                         {"eval_accuracy", "eval/rewards/accuracies"},
                         {"router_aux_loss", "train/aux_loss"},
                         {"load_least", "train/load/least"},
                         {"load_most", "train/load/most"},
                         {"load_entropy", "train/load/entropy"}};

// Whether a run measures a value.
static bool trace_measured(const app* a, int which) {
    bool preferences = method_of(a->o.method.kind)->preferences;
    return which < TRACE_CHOSEN             ? true
           : which <= TRACE_EVAL_ACCURACY   ? preferences
           : which == TRACE_ROUTER_AUX_LOSS ? a->o.training.router_aux_loss > 0.0
                                            : a->config.experts > 0;
}

static point point_none(int64_t step) {
    point p;
    p.step = step;
    for (int i = 0; i < TRACES; i++) {
        p.values[i] = (double)NAN;
    }
    return p;
}

static void history_clear(history* h) {
    memset(h, 0, sizeof *h);
    h->width = 1;
    h->eval_step = -1;
}

// Joins two places each into one, so that twice as many steps have room.
static void trace_halve(trace* t) {
    for (int i = 0; i < TRACE_ROOM; i++) {
        int left = 2 * i;
        bool both = left + 1 < TRACE_ROOM;
        t->sums[i] = both ? t->sums[left] + t->sums[left + 1] : 0.0;
        t->steps[i] = both ? t->steps[left] + t->steps[left + 1] : 0.0;
        t->counts[i] = both ? t->counts[left] + t->counts[left + 1] : 0;
    }
}

static void trace_add(trace* t, int64_t place, int64_t step, double value) {
    t->sums[place] += value;
    t->steps[place] += (double)step;
    t->counts[place]++;
}

static void history_eval(history* h, int64_t step, double loss) {
    h->eval_step = step;
    if (step == 0) { // the untrained adapter is not worth keeping
        return;
    }
    bool lower = h->best_step == 0 || loss < h->best_eval_loss;
    h->evals_since = lower ? 0 : h->evals_since + (step > h->patience_from ? 1 : 0);
    h->best_step = lower ? step : h->best_step;
    h->best_eval_loss = lower ? loss : h->best_eval_loss;
}

// Adds an entry; its step must not be lower than that of the one before.
static void history_add(history* h, const point* p) {
    while (p->step / h->width >= TRACE_ROOM) {
        for (int i = 0; i < TRACES; i++) {
            trace_halve(&h->traces[i]);
        }
        h->width *= 2;
    }
    for (int i = 0; i < TRACES; i++) {
        if (known(p->values[i])) {
            trace_add(&h->traces[i], p->step / h->width, p->step, p->values[i]);
        }
    }
    if (known(p->values[TRACE_EVAL_LOSS])) {
        history_eval(h, p->step, p->values[TRACE_EVAL_LOSS]);
    }
    if (known(p->values[TRACE_LOSS])) {
        if (p->step >= 1 && p->step <= SPAN) {
            h->first[p->step - 1] = *p;
        }
        h->latest[p->step % SPAN] = *p;
    }
    h->entries++;
    h->last = p->step;
}

// The mean of a value over the steps from `first` to `last`, which must be among the first SPAN
// steps or among the latest; NAN if none of them is known.
static double history_mean(const history* h, int which, int64_t first, int64_t last) {
    double sum = 0.0;
    int64_t counted = 0;
    for (int64_t step = first > 1 ? first : 1; step <= last; step++) {
        const point* p = step <= SPAN ? &h->first[step - 1] : &h->latest[step % SPAN];
        if (p->step == step && known(p->values[which])) {
            sum += p->values[which];
            counted++;
        }
    }
    return counted > 0 ? sum / (double)counted : (double)NAN;
}

// The steps that the summary compares: the first tenth, at most SPAN, and as many at the end.
static int64_t summary_span(const app* a) {
    int64_t tenth = a->progress.step / 10 < SPAN ? a->progress.step / 10 : SPAN;
    return tenth > 1 ? tenth : 1;
}

// The loss of a run, at its start or now: the mean over these steps, as single ones are noisy.
static double loss_mean(const app* a, bool now) {
    int64_t span = summary_span(a);
    double mean =
        now ? history_mean(&a->history, TRACE_LOSS, a->progress.step - span + 1, a->progress.step)
            : history_mean(&a->history, TRACE_LOSS, 1, span);
    return known(mean) ? mean : now ? a->progress.last_loss : a->progress.first_loss;
}

// "1.5" or "1.5 of 3"; "" if it is not known.
static const char* epoch_text(const app* a, char out[40]) {
    bool of = a->o.training.steps == 0 && a->o.training.epochs > 0.0;
    out[0] = '\0';
    if (known(a->progress.epochs_done)) {
        int used = snprintf(out, 40, "%.4g", a->progress.epochs_done);
        if (of && used > 0 && used < 20) {
            snprintf(out + used, 40 - (size_t)used, " of %.4g", a->o.training.epochs);
        }
    }
    return out;
}

static bool patience_over(const app* a) {
    return a->o.eval.patience > 0 && a->history.best_step > 0 &&
           a->history.evals_since >= a->o.eval.patience;
}

#endif
