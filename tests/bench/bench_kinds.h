// bench_kinds.h - where a training step goes: the time of each kind of work, measured on its own
// with the operators that a step calls, times how often a step calls them; part of
// `build/bench cpu`, with --kinds.
//
// The shape is smollm2-135m with 4 x 256 tokens and rank 16. Adapters are what the products take
// longer with them than without. The last rows are a whole step, and what the kinds do not explain.
#ifndef QLORA_BENCH_KINDS_H
#define QLORA_BENCH_KINDS_H

enum { KIND_LAYERS = 30, KIND_RANK = 16, KIND_ROUNDS = 5 };

// A stack of projections with one input.
typedef struct kind_stack {
    const char* name;
    int64_t in;
    int32_t parts;
    int64_t out[QLORA_LINEAR_PARTS];
} kind_stack;

static const kind_stack kind_stacks[] = {
    {"q, k, v", 576, 3, {576, 192, 192}},
    {"o", 576, 1, {576, 0, 0}},
    {"gate, up", 576, 2, {1536, 1536, 0}},
    {"down", 1536, 1, {576, 0, 0}},
};

static const kind_stack kind_head = {"head", 576, 1, {49152, 0, 0}};

typedef struct kind_rig {
    cpu_bench* b;
    qlora_linear_desc linear;
    qlora_tensor dense[QLORA_LINEAR_PARTS];
    qlora_nf4 nf4[QLORA_LINEAR_PARTS];
    qlora_tensor adapters[QLORA_LINEAR_PARTS][4]; // a, sb, da, db
    qlora_tensor x;
    qlora_tensor y; // also dy
    qlora_tensor dx;
} kind_rig;

// Milliseconds of a step by kind.
typedef struct kind_times {
    double forward;
    double backward;
    double adapters;
    double attention;
    double rows;
    double head;
    double optimizer;
} kind_times;

static bool kind_part(kind_rig* r, int i, int64_t in, int64_t out, int64_t rank, bool nf4) {
    cpu_bench* b = r->b;
    qlora_linear_part* p = &r->linear.parts[i];
    p->out = out;
    p->rank = rank;
    p->scale = 2.0f;
    bool ok = cpu_fill(b, QLORA_F32, out, in, &r->dense[i]);
    if (ok && nf4) {
        qlora_nf4_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.rows = out;
        desc.cols = in;
        ok = qlora_nf4_create(b->ctx, &desc, &r->nf4[i]) == QLORA_OK &&
             qlora_nf4_quantise(b->ctx, &r->dense[i], &r->nf4[i]) == QLORA_OK;
        p->nf4 = &r->nf4[i];
    } else {
        p->dense = &r->dense[i];
    }
    for (int j = 0; ok && rank > 0 && j < 4; j++) {
        bool wide = j % 2 == 0;
        ok = cpu_fill(b, QLORA_F32, wide ? rank : out, wide ? in : rank, &r->adapters[i][j]);
    }
    p->a = &r->adapters[i][0];
    p->sb = &r->adapters[i][1];
    p->da = &r->adapters[i][2];
    p->db = &r->adapters[i][3];
    return ok;
}

static bool kind_rig_make(cpu_bench* b, const kind_stack* s, int64_t tokens, int64_t rank, bool nf4,
                          kind_rig* r) {
    memset(r, 0, sizeof *r);
    r->b = b;
    r->linear.in = s->in;
    r->linear.count = s->parts;
    bool ok = true;
    for (int i = 0; ok && i < s->parts; i++) {
        ok = kind_part(r, i, s->in, s->out[i], rank, nf4);
    }
    int64_t pad = ok ? qlora_linear_pad(&r->linear) : 0;
    return ok && cpu_fill(b, QLORA_F32, tokens, s->in + pad, &r->x) &&
           cpu_fill(b, QLORA_F32, tokens, qlora_linear_out(&r->linear) + pad, &r->y) &&
           cpu_fill(b, QLORA_F32, tokens, s->in, &r->dx);
}

static void kind_rig_free(kind_rig* r) {
    qlora_ctx* ctx = r->b->ctx;
    for (int i = 0; i < QLORA_LINEAR_PARTS; i++) {
        qlora_nf4_destroy(ctx, &r->nf4[i]);
        qlora_tensor_destroy(ctx, &r->dense[i]);
        for (int j = 0; j < 4; j++) {
            qlora_tensor_destroy(ctx, &r->adapters[i][j]);
        }
    }
    qlora_tensor_destroy(ctx, &r->x);
    qlora_tensor_destroy(ctx, &r->y);
    qlora_tensor_destroy(ctx, &r->dx);
}

static bool kind_forward(kind_rig* r) {
    qlora_tensor y;
    return qlora_tensor_view(r->b->ctx, &r->y, 0, r->y.rows, 0, qlora_linear_out(&r->linear), &y) ==
               QLORA_OK &&
           qlora_linear_forward(r->b->ctx, &r->linear, &r->x, &y) == QLORA_OK;
}

static bool kind_backward(kind_rig* r) {
    return qlora_linear_backward(r->b->ctx, &r->linear, &r->x, &r->y, &r->dx,
                                 QLORA_LINEAR_OVERWRITE) == QLORA_OK;
}

// The best milliseconds of one call.
static bool kind_best(kind_rig* r, bool (*run)(kind_rig* r), double* ms) {
    bool ok = true;
    *ms = 1e30;
    for (int i = 0; ok && i < KIND_ROUNDS; i++) {
        double start = cpu_seconds(r->b->on > 1);
        ok = run(r);
        double taken = (cpu_seconds(r->b->on > 1) - start) * 1e3;
        *ms = taken < *ms ? taken : *ms;
    }
    return ok;
}

// Forward and backward of a stack, with and without adapters: times[rank > 0][backward].
static bool kind_stack_times(cpu_bench* b, const kind_stack* s, bool nf4, double times[2][2]) {
    bool ok = true;
    for (int with = 0; ok && with < 2; with++) {
        kind_rig r;
        ok = kind_rig_make(b, s, ROW_TOKENS, with * KIND_RANK, nf4, &r) &&
             kind_best(&r, kind_forward, &times[with][0]) &&
             kind_best(&r, kind_backward, &times[with][1]);
        kind_rig_free(&r);
    }
    return ok;
}

static bool kind_linears(cpu_bench* b, bool nf4, kind_times* t) {
    bool ok = true;
    for (size_t i = 0; ok && i < sizeof kind_stacks / sizeof kind_stacks[0]; i++) {
        double times[2][2];
        ok = kind_stack_times(b, &kind_stacks[i], nf4, times);
        if (ok && !b->json) {
            printf("    %-10s forward %7.2f ms, with adapters %7.2f; dx %7.2f, with adapters "
                   "%7.2f\n",
                   kind_stacks[i].name, times[0][0], times[1][0], times[0][1], times[1][1]);
        }
        t->forward += ok ? KIND_LAYERS * times[0][0] : 0.0;
        t->backward += ok ? KIND_LAYERS * times[0][1] : 0.0;
        t->adapters +=
            ok ? KIND_LAYERS * (times[1][0] - times[0][0] + times[1][1] - times[0][1]) : 0.0;
    }
    return ok;
}

// Calls of the operators of bench_rows.h in a step, with the field that they are added to. Rope
// turns q and k, which are 12 heads where the row has 9; the loss has 16 times the rows.
typedef struct kind_calls {
    const char* name;
    double calls;
    size_t field;
} kind_calls;

static const kind_calls kind_operators[] = {
    {"norm, residual", 2.0 * KIND_LAYERS, offsetof(kind_times, rows)},
    {"norm backward", 2.0 * KIND_LAYERS, offsetof(kind_times, rows)},
    {"rope", 2.0 * KIND_LAYERS * 12 / 9, offsetof(kind_times, rows)},
    {"swiglu", 1.0 * KIND_LAYERS, offsetof(kind_times, rows)},
    {"swiglu backward", 1.0 * KIND_LAYERS, offsetof(kind_times, rows)},
    {"attention 4 x 256", 1.0 * KIND_LAYERS, offsetof(kind_times, attention)},
    {"attention backward 4 x 256", 1.0 * KIND_LAYERS, offsetof(kind_times, attention)},
    {"cross-entropy", 1.0 * ROW_TOKENS / ROW_LOGITS, offsetof(kind_times, head)},
    {"AdamW", 1.0, offsetof(kind_times, optimizer)},
    {"sum of squares", 4884480.0 / ROW_TOKENS / ROW_WIDE, offsetof(kind_times, optimizer)},
};

static bool kind_rows(cpu_bench* b, kind_times* t) {
    row_set* s = (row_set*)malloc(sizeof *s);
    bool ok = s != NULL && row_set_make(b, s);
    for (size_t i = 0; ok && i < sizeof kind_operators / sizeof kind_operators[0]; i++) {
        const kind_calls* calls = &kind_operators[i];
        for (size_t j = 0; j < sizeof row_operators / sizeof row_operators[0]; j++) {
            double seconds = 0.0;
            if (ok && strcmp(row_operators[j].name, calls->name) == 0) {
                ok = row_best(b, s, &row_operators[j], KIND_ROUNDS, &seconds);
                *(double*)(void*)((char*)t + calls->field) += calls->calls * seconds * 1e3;
            }
        }
    }
    if (s != NULL) {
        row_set_free(b, s);
    }
    free(s);
    return ok;
}

static bool kind_head_time(cpu_bench* b, kind_times* t) {
    kind_rig r;
    double forward = 0.0;
    double backward = 0.0;
    bool ok = kind_rig_make(b, &kind_head, ROW_TOKENS, 0, false, &r) &&
              kind_best(&r, kind_forward, &forward) && kind_best(&r, kind_backward, &backward);
    kind_rig_free(&r);
    t->head += forward + backward;
    return ok;
}

static void kind_print(cpu_bench* b, const char* base, const char* name, double ms, double step) {
    if (b->json) {
        printf("%s\n{\"name\": \"%s, %s\", \"threads\": %d, \"ms\": %.2f, \"step_percent\": %.1f}",
               b->started ? "," : "", name, base, b->on, ms, 100.0 * ms / step);
        b->started = true;
    } else {
        printf("  %-24s %9.1f ms %6.1f %% of a step with a base in %s\n", name, ms,
               100.0 * ms / step, base);
    }
    fflush(stdout);
}

// The kinds of a step with one format of the frozen weights.
static bool cpu_kinds_run(cpu_bench* b, bool nf4) {
    const char* base = nf4 ? "NF4" : "f32";
    kind_times t;
    double step = 0.0;
    memset(&t, 0, sizeof t);
    if (!kind_linears(b, nf4, &t) || !kind_rows(b, &t) || !kind_head_time(b, &t) ||
        !step_seconds_of(b->ctx, "smollm2-135m", nf4 ? 0 : 2, 0, 4, 256, b->on > 1, &step)) {
        fprintf(stderr, "bench cpu: %s\n", qlora_last_error(b->ctx));
        return false;
    }
    step *= 1e3;
    double sum = t.forward + t.backward + t.adapters + t.attention + t.rows + t.head + t.optimizer;
    kind_print(b, base, "products forward", t.forward, step);
    kind_print(b, base, "products for dx", t.backward, step);
    kind_print(b, base, "adapters", t.adapters, step);
    kind_print(b, base, "attention", t.attention, step);
    kind_print(b, base, "norm, rope, SwiGLU", t.rows, step);
    kind_print(b, base, "head and loss", t.head, step);
    kind_print(b, base, "AdamW and clipping", t.optimizer, step);
    kind_print(b, base, "the rest", step - sum, step);
    kind_print(b, base, "the whole step", step, step);
    return true;
}

#endif
