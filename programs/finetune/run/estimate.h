// estimate.h - how long a run takes on the CPU: its work, and products that are timed.
#ifndef FINETUNE_ESTIMATE_H
#define FINETUNE_ESTIMATE_H

// Times a small product of operands of a type for a tenth of a second. Returns FLOP/s of the
// fastest, or 0 if it could not be measured.
static double probe_rate(app* a, qlora_dtype dtype) {
    enum { ROWS = 256 };
    int64_t k = a->config.hidden < 1024 ? a->config.hidden : 1024;
    int64_t n = a->config.intermediate < 1024 ? a->config.intermediate : 1024;
    qlora_tensor t[3];
    memset(t, 0, sizeof t);
    bool ok = qlora_tensor_create(a->ctx, dtype, ROWS, k, &t[0]) == QLORA_OK &&
              qlora_tensor_create(a->ctx, dtype, k, n, &t[1]) == QLORA_OK &&
              qlora_tensor_create(a->ctx, QLORA_F32, ROWS, n, &t[2]) == QLORA_OK;
    for (int i = 0; i < 2; i++) {
        ok = ok && qlora_fill(a->ctx, 0.5f, &t[i]) == QLORA_OK;
    }
    double start = seconds_now();
    double best = 0.0;
    for (double now = start; ok && now - start < 0.1;) {
        double before = now;
        ok = qlora_gemm_forward(a->ctx, &t[0], &t[1], &t[2], 0) == QLORA_OK;
        now = seconds_now();
        best =
            ok && now > before ? fmax(best, 2.0 * ROWS * (double)(n * k) / (now - before)) : best;
    }
    for (int i = 0; i < 3; i++) {
        qlora_result ignored = qlora_tensor_destroy(a->ctx, &t[i]);
        (void)ignored;
    }
    return best;
}

// The work of a step, on average over the first epoch, with the layers that are recomputed.
static double step_work(app* a) {
    packs p;
    memset(&p, 0, sizeof p);
    double flop = 0.0;
    if (a->data.train.count > 0 && epoch_make(a, 0, &p)) {
        for (size_t i = 0; i < p.count; i++) {
            flop += pack_flop(a, &a->data.train, &p, i);
        }
        flop /= (double)epoch_steps(a, &p);
    }
    packs_free(&p);
    double again = (double)a->plan.recompute_layers / (double)a->config.layers;
    return flop * (1.0 + 0.5 * again);
}

// The rest of a step, beside its products, as a share of their time in f32: an estimate, not a
// measurement.
#define ESTIMATE_REST 0.25

// What the time of a run follows from.
typedef struct estimate {
    double rates[2];  // FLOP/s in f32 and in bf16
    double step_work; // FLOP
    double eval_work;
    int64_t steps; // to come
    int64_t evals;
} estimate;

static int64_t evals_left(const app* a, int64_t every) {
    int64_t left = a->progress.total_steps / every - a->progress.step / every;
    bool last = a->progress.total_steps % every != 0;
    return a->data.eval.count == 0 ? 0 : left + (last ? 1 : 0) + (a->progress.step == 0 ? 1 : 0);
}

// An evaluation computes the forward pass alone: half of the work of a step. False if the rates are
// not known, or nothing is left.
static bool estimate_make(app* a, estimate* e) {
    memset(e, 0, sizeof *e);
    if (qlora_ctx_backend(a->ctx) != QLORA_BACKEND_CPU ||
        a->progress.total_steps <= a->progress.step) {
        return false;
    }
    e->rates[0] = probe_rate(a, QLORA_F32);
    e->rates[1] = probe_rate(a, QLORA_BF16);
    e->steps = a->progress.total_steps - a->progress.step;
    e->evals = evals_left(a, interval(a, a->o.eval.every));
    e->step_work = step_work(a);
    for (size_t p = 0; p < a->progress.eval_packs.count; p++) {
        e->eval_work += 0.5 * pack_flop(a, &a->data.eval, &a->progress.eval_packs, p);
    }
    return e->rates[0] > 0.0 && e->rates[1] > 0.0;
}

static double estimate_seconds(const estimate* e, bool bf16, int64_t steps, int64_t evals) {
    double work = (double)steps * e->step_work + (double)evals * e->eval_work;
    return work / e->rates[bf16 ? 1 : 0] + ESTIMATE_REST * work / e->rates[0];
}

static bool estimate_bf16(const app* a) {
    return a->plan.mode == QLORA_MODE_BF16;
}

// For --plan and --doctor.
static void estimate_print(app* a) {
    char text[32];
    estimate e;
    if (estimate_make(a, &e)) {
        printf("time: about %s on this CPU for %lld step%s, without evaluation\n",
               short_time(estimate_seconds(&e, estimate_bf16(a), e.steps, 0), text),
               (long long)a->progress.total_steps, a->progress.total_steps == 1 ? "" : "s");
    }
}

#define ESTIMATE_SHORT 20.0 // seconds: not worth a line
#define ESTIMATE_LONG 600.0 // worth advice

// What would shorten the run: each is computed like the run, and told if it takes a tenth off.
static void estimate_advise(app* a, const estimate* e, double seconds) {
    const options* o = &a->o;
    bool bf16 = estimate_bf16(a);
    char fewer[64];
    char evals[64];
    int64_t steps = e->steps;
    if (o->training.steps == 0 && o->training.epochs > 1.0 &&
        a->progress.step == 0) { // the first epoch
        steps = (int64_t)((double)a->progress.total_steps / o->training.epochs);
    }
    int64_t short_steps = (int64_t)((double)e->steps * ESTIMATE_LONG / seconds);
    int64_t halves = (a->progress.total_steps + 1) / 2;
    snprintf(fewer, sizeof fewer, "--steps %lld", (long long)(a->progress.step + short_steps));
    snprintf(evals, sizeof evals, "--eval-every %lld", (long long)halves);
    const struct {
        const char* what;
        bool can;
        double seconds;
    } rows[] = {
        {"--mode bf16", !bf16 && o->model.mode == QLORA_MODE_F32 && a->progress.step == 0,
         estimate_seconds(e, true, e->steps, e->evals)},
        {evals, e->evals > 3, estimate_seconds(e, bf16, e->steps, evals_left(a, halves))},
        {"--epochs 1", steps < e->steps, estimate_seconds(e, bf16, steps, e->evals)},
        {fewer, short_steps >= 1, estimate_seconds(e, bf16, short_steps, 0)},
    };
    const char* between = "      shorter: ";
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char text[32];
        if (rows[i].can && rows[i].seconds < 0.9 * seconds) {
            say(a, "%s%s (about %s)", between, rows[i].what, short_time(rows[i].seconds, text));
            between = ", ";
        }
    }
    if (between[0] == ',') {
        say(a, "\n");
    }
}

// Before the first step: how long it takes, and what would shorten it.
static void estimate_tell(app* a) {
    char text[32];
    char evals[64] = "";
    estimate e;
    if (!estimate_make(a, &e)) {
        return;
    }
    double seconds = estimate_seconds(&e, estimate_bf16(a), e.steps, e.evals);
    if (seconds < ESTIMATE_SHORT) {
        return;
    }
    if (e.evals > 0) {
        snprintf(evals, sizeof evals, " and %lld evaluation%s", (long long)e.evals,
                 e.evals == 1 ? "" : "s");
    }
    (void)short_time(seconds, text);
    if (seconds > 86400.0) {
        snprintf(text, sizeof text, "%.1f days", seconds / 86400.0);
    }
    say(a, "note: the %lld step%s%s to come take%s about %s on this CPU%s\n", (long long)e.steps,
        e.steps == 1 ? "" : "s", evals, e.steps == 1 && e.evals == 0 ? "s" : "", text,
        seconds > ESTIMATE_LONG ? "; Ctrl-C saves and stops, the same command resumes" : "");
    if (seconds > ESTIMATE_LONG) {
        estimate_advise(a, &e, seconds);
    }
}

#endif
