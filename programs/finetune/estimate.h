// estimate.h - how long a run takes on the CPU: its work, and a product that is timed.
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
    if (a->train.count > 0 && epoch_make(a, 0, &p)) {
        for (size_t i = 0; i < p.count; i++) {
            flop += pack_flop(a, &a->train, &p, i);
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

// Seconds that the steps still to be done take on the CPU; 0 if that is not known.
static double run_seconds(app* a) {
    if (qlora_ctx_backend(a->ctx) != QLORA_BACKEND_CPU || a->total_steps <= a->step) {
        return 0.0;
    }
    double exact = probe_rate(a, QLORA_F32);
    double rate = a->plan.mode == QLORA_MODE_BF16 ? probe_rate(a, QLORA_BF16) : exact;
    double work = (double)(a->total_steps - a->step) * step_work(a);
    return exact > 0.0 && rate > 0.0 ? work / rate + ESTIMATE_REST * work / exact : 0.0;
}

// For --plan and --doctor.
static void estimate_print(app* a) {
    char text[32];
    double seconds = run_seconds(a);
    if (seconds > 0.0) {
        printf("time: about %s on this CPU for %lld step%s, without evaluation\n",
               short_time(seconds, text), (long long)a->total_steps,
               a->total_steps == 1 ? "" : "s");
    }
}

// Before the first step of a run that takes more than a day.
static void estimate_warn(app* a) {
    double seconds = run_seconds(a);
    if (seconds > 86400.0) {
        say(a,
            "note: the %lld steps to come take about %.1f days on this CPU; Ctrl-C saves and "
            "stops, the same command resumes\n",
            (long long)(a->total_steps - a->step), seconds / 86400.0);
    }
}

#endif
