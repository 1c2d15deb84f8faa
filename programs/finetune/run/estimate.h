// estimate.h - how long a run takes on the CPU: its work, and products that are timed.
#ifndef FINETUNE_ESTIMATE_H
#define FINETUNE_ESTIMATE_H

// Times a small product of operands of a type for a twentieth of a second. Returns FLOP/s, beside
// what other programs take of the processor, or 0 if it could not be measured.
static double probe_rate(app* a, qlora_dtype dtype) {
    enum { ROWS = 256 };
    int64_t k = a->config.hidden < 64 ? 64 : a->config.hidden < 1024 ? a->config.hidden : 1024;
    int64_t n = a->config.intermediate < 1024 ? a->config.intermediate : 1024;
    n = n < 64 ? 64 : n;
    qlora_tensor t[3];
    memset(t, 0, sizeof t);
    bool ok = qlora_tensor_create(a->ctx, dtype, ROWS, k, &t[0]) == QLORA_OK &&
              qlora_tensor_create(a->ctx, dtype, k, n, &t[1]) == QLORA_OK &&
              qlora_tensor_create(a->ctx, QLORA_F32, ROWS, n, &t[2]) == QLORA_OK;
    for (int i = 0; i < 2; i++) {
        ok = ok && qlora_fill(a->ctx, 0.5f, &t[i]) == QLORA_OK;
    }
    double flop = -1.0; // the first product also touches the memory
    double start = 0.0;
    double now = 0.0;
    while (ok && (flop <= 0.0 || now - start < 0.05)) {
        ok = qlora_gemm_forward(a->ctx, &t[0], &t[1], &t[2], 0) == QLORA_OK;
        now = seconds_now();
        start = flop < 0.0 ? now : start;
        flop = flop < 0.0 ? 0.0 : flop + 2.0 * ROWS * (double)(n * k);
    }
    for (int i = 0; i < 3; i++) {
        qlora_result ignored = qlora_tensor_destroy(a->ctx, &t[i]);
        (void)ignored;
    }
    return ok && now > start ? flop / (now - start) : 0.0;
}

// What is computed: products, and all the rest.
typedef struct work {
    double flop;
    double rest; // what takes as long as so many FLOP of products in f32
} work;

// The rest follows from what is read and written: norms, rotations, activations, and the packing of
// operands. It takes 5 to 6 ns per token and element that a layer reads and writes beside products,
// where a core has 84 GFLOP/s, and as many elements of AdamW in a hundredth of that: measured with
// stories260K, which spends three quarters of its time so, and models of 2 layers. For widths of
// 576 (SmolLM2-135M), it is a quarter.
#define ESTIMATE_ELEMENT 478.0
#define ESTIMATE_PARAMETER 150.0

static work pack_work(const app* a, const samples* s, const packs* p, size_t pack) {
    work w = {0.0, 0.0};
    for (size_t i = p->starts[pack]; i < p->starts[pack + 1]; i++) {
        const sample* one = &s->data[p->order[i]];
        int32_t length = (int32_t)one->length;
        qlora_cost cost;
        qlora_plan_cost(&a->plan, &length, 1, (double)one->trained, &cost);
        w.flop += cost.flops;
        w.rest += ESTIMATE_ELEMENT * cost.moved;
    }
    return w;
}

// The work of a step, on average over the first epoch, with the layers that are recomputed.
static work step_work(app* a) {
    packs p;
    memset(&p, 0, sizeof p);
    work sum = {0.0, 0.0};
    double steps = 1.0;
    if (a->data.train.count > 0 && epoch_make(a, 0, &p)) {
        for (size_t i = 0; i < p.count; i++) {
            work w = pack_work(a, &a->data.train, &p, i);
            sum.flop += w.flop;
            sum.rest += w.rest;
        }
        steps = (double)epoch_steps(a, &p);
    }
    packs_free(&p);
    double again = 1.0 + 0.5 * (double)a->plan.recompute_layers / (double)a->config.layers;
    sum.flop *= again / steps;
    sum.rest *= again / steps;
    sum.rest += ESTIMATE_PARAMETER * (double)a->plan.parameters;
    return sum;
}

// What the time of a run follows from.
typedef struct estimate {
    double rates[2]; // FLOP/s in f32 and in bf16
    work step;
    work eval;
    int64_t steps; // to come
    int64_t evals;
} estimate;

static int64_t evals_left(const app* a, int64_t every) {
    int64_t left = a->progress.total_steps / every - a->progress.step / every;
    bool last = a->progress.total_steps % every != 0;
    return a->data.eval.count == 0 ? 0 : left + (last ? 1 : 0) + (a->progress.step == 0 ? 1 : 0);
}

// FLOP/s of products on the CPU, in turns, so that both types have the same other programs beside
// them. False if they are not known.
static bool estimate_rates(app* a, double rates[2]) {
    bool there = qlora_ctx_backend(a->ctx) == QLORA_BACKEND_CPU;
    rates[0] = 0.0;
    rates[1] = 0.0;
    for (int turn = 0; turn < 4 && there; turn++) {
        double rate = probe_rate(a, turn % 2 == 0 ? QLORA_F32 : QLORA_BF16);
        rates[turn % 2] += 0.5 * rate;
        there = rate > 0.0;
    }
    return there;
}

// An evaluation computes the forward pass alone: half of the work of a step. False if nothing is
// left.
static bool estimate_make(app* a, const double rates[2], estimate* e) {
    memset(e, 0, sizeof *e);
    if (a->progress.total_steps <= a->progress.step) {
        return false;
    }
    e->rates[0] = rates[0];
    e->rates[1] = rates[1];
    e->steps = a->progress.total_steps - a->progress.step;
    e->evals = evals_left(a, interval(a, a->o.eval.every));
    e->step = step_work(a);
    for (size_t p = 0; p < a->progress.eval_packs.count; p++) {
        work w = pack_work(a, &a->data.eval, &a->progress.eval_packs, p);
        e->eval.flop += 0.5 * w.flop;
        e->eval.rest += 0.5 * w.rest;
    }
    return true;
}

static double estimate_seconds(const estimate* e, bool bf16, int64_t steps, int64_t evals) {
    double flop = (double)steps * e->step.flop + (double)evals * e->eval.flop;
    double rest = (double)steps * e->step.rest + (double)evals * e->eval.rest;
    return flop / e->rates[bf16 ? 1 : 0] + rest / e->rates[0];
}

static bool estimate_bf16(const app* a) {
    return a->plan.mode == QLORA_MODE_BF16;
}

// For --plan and --doctor.
static void estimate_print(app* a) {
    char text[32];
    double rates[2];
    estimate e;
    if (a->progress.total_steps > a->progress.step && estimate_rates(a, rates) &&
        estimate_make(a, rates, &e)) {
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

// How long `steps` steps `of` the run take; nothing is said about short ones.
static void estimate_say(app* a, int64_t steps, const char* of, int64_t evals, double seconds) {
    char text[32];
    char more[64] = "";
    if (seconds < ESTIMATE_SHORT) {
        return;
    }
    if (evals > 0) {
        snprintf(more, sizeof more, " and %lld evaluation%s", (long long)evals,
                 evals == 1 ? "" : "s");
    }
    (void)short_time(seconds, text);
    if (seconds > 86400.0) {
        snprintf(text, sizeof text, "%.1f days", seconds / 86400.0);
    }
    say(a, "note: the %lld step%s%s%s to come take%s about %s on this CPU%s\n", (long long)steps,
        steps == 1 ? "" : "s", of, more, steps == 1 && evals == 0 ? "s" : "", text,
        seconds > ESTIMATE_LONG ? "; Ctrl-C saves and stops, the same command resumes" : "");
}

// Before the first step: how long it takes, and what would shorten it.
static void estimate_tell(app* a) {
    double rates[2];
    estimate e;
    if (a->progress.total_steps <= a->progress.step || !estimate_rates(a, rates) ||
        !estimate_make(a, rates, &e)) {
        return;
    }
    double seconds = estimate_seconds(&e, estimate_bf16(a), e.steps, e.evals);
    estimate_say(a, e.steps, "", e.evals, seconds);
    if (seconds > ESTIMATE_LONG) {
        estimate_advise(a, &e, seconds);
    }
}

#endif
