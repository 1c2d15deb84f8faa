// bench_slices.h - how long slices take on the CPU: SmolLM2 135M with random weights.
//
//     build/bench slices [--budget MS] [--tokens N] [--steps N] [--prompt N] [--threads N]
//
// Prints, for the slices of training and of generation, how many there were, the median, the
// 99th percentile and the longest. With one thread, CPU time is measured, because others may use
// the core; the library itself goes by the clock, so slices are shorter on a busy machine.
#ifndef QLORA_BENCH_SLICES_H
#define QLORA_BENCH_SLICES_H

enum { SLICES_MOST = 200000 };

typedef struct slices_bench {
    double budget;
    int tokens;
    int steps;
    int prompt;
    int threads;
    bool sliced; // generation
    double* took; // milliseconds of each slice
    int count;
} slices_bench;

static int slices_order(const void* a, const void* b) {
    double x = *(const double*)a;
    double y = *(const double*)b;
    return (x > y) - (x < y);
}

static void slices_print(slices_bench* b, const char* what) {
    qsort(b->took, (size_t)b->count, sizeof *b->took, slices_order);
    if (b->count > 0) {
        printf("%-14s %6d of %g ms: median %.2f, p99 %.2f, longest %.2f ms\n", what, b->count,
               b->budget, b->took[b->count / 2], b->took[(int)(0.99 * (b->count - 1))],
               b->took[b->count - 1]);
    }
    b->count = 0;
}

static void slices_note(slices_bench* b, double start) {
    double ms = 1e3 * (cpu_seconds(b->threads > 1) - start);
    if (b->count < SLICES_MOST) {
        b->took[b->count++] = ms;
    }
}

// The first two steps are not counted: they touch memory for the first time.
static bool slices_train(slices_bench* b, qlora_model* model) {
    static int32_t ids[4096];
    qlora_train_desc desc;
    qlora_train_info info;
    qlora_batch batch;
    qlora_trainer* trainer = NULL;
    int32_t length = b->tokens;
    memset(&desc, 0, sizeof desc);
    memset(&batch, 0, sizeof batch);
    for (int i = 0; i < b->tokens; i++) {
        ids[i] = (int32_t)((int64_t)i * 7919 % 49152);
    }
    batch.ids = ids;
    batch.labels = ids;
    batch.lengths = &length;
    batch.count = 1;
    bool ok = qlora_trainer_create(model, &desc, &trainer) == QLORA_OK;
    for (int step = 0; ok && step < b->steps + 2; step++) {
        bool done = false;
        b->count = step <= 2 ? 0 : b->count;
        ok = qlora_train_begin(trainer, &batch, 1) == QLORA_OK;
        while (ok && !done) {
            double start = cpu_seconds(b->threads > 1);
            ok = qlora_train_slice(trainer, b->budget, &done) == QLORA_OK;
            slices_note(b, start);
        }
    }
    slices_print(b, "training");
    printf("%-14s %6.2f ms\n", "longest piece",
           ok && qlora_train_query(trainer, &info) == QLORA_OK ? info.longest_piece : 0.0);
    for (int step = 0; ok && step < 4; step++) {
        double start = cpu_seconds(b->threads > 1);
        ok = qlora_train_step(trainer, &batch, 1, &info) == QLORA_OK;
        slices_note(b, start);
    }
    if (ok) {
        qsort(b->took, (size_t)b->count, sizeof *b->took, slices_order);
        printf("a whole step: %.1f ms\n", b->took[0]);
    }
    b->count = 0;
    return qlora_trainer_destroy(trainer) == QLORA_OK && ok;
}

static bool slices_generate(slices_bench* b, qlora_model* model) {
    static int32_t ids[4096];
    const int32_t no_stop = -1;
    qlora_generate_desc desc;
    qlora_generation* text = NULL;
    memset(&desc, 0, sizeof desc);
    for (int i = 0; i < b->prompt; i++) {
        ids[i] = (int32_t)((int64_t)i * 104729 % 49152);
    }
    desc.prompt = ids;
    desc.prompt_tokens = b->prompt;
    desc.stops = &no_stop;
    desc.stop_count = 1;
    desc.in_slices = b->sliced;
    double start = cpu_seconds(b->threads > 1);
    bool ok = qlora_generate_begin(model, &desc, &text) == QLORA_OK;
    if (!b->sliced) {
        slices_note(b, start);
        slices_print(b, "a whole prompt");
    }
    for (int i = 0; ok && i < 16; i++) {
        int32_t token = 0;
        bool stopped = false;
        bool done = !b->sliced;
        start = cpu_seconds(b->threads > 1);
        ok = b->sliced || qlora_generate_next(text, &token, &stopped) == QLORA_OK;
        while (ok && !done) {
            start = cpu_seconds(b->threads > 1);
            ok = qlora_generate_slice(text, b->budget, &token, &stopped, &done) == QLORA_OK;
            slices_note(b, start);
        }
        if (!b->sliced) {
            slices_note(b, start);
        } else if (i == 0) {
            slices_print(b, "prompt");
        }
    }
    slices_print(b, b->sliced ? "tokens" : "whole tokens");
    return qlora_generate_end(text) == QLORA_OK && ok;
}

static bool slices_run(slices_bench* b, qlora_ctx* ctx) {
    qlora_model_config config = shape_config(shape_find("smollm2-135m"));
    qlora_model* model = NULL;
    qlora_model_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.config = &config;
    desc.tokens = b->tokens;
    desc.generate_tokens = b->prompt + 32;
    bool ok = qlora_model_open(ctx, &desc, &model) == QLORA_OK && slices_train(b, model) &&
              slices_generate(b, model);
    b->sliced = true;
    ok = ok && slices_generate(b, model);
    if (!ok) {
        fprintf(stderr, "bench slices: %s\n", qlora_last_error(ctx));
    }
    return qlora_model_close(model) == QLORA_OK && ok;
}

static bool slices_parse(slices_bench* b, int argc, char** argv) {
    memset(b, 0, sizeof *b);
    b->budget = 4.0;
    b->tokens = 64;
    b->steps = 8;
    b->prompt = 200;
    b->threads = 1;
    for (int i = 1; i < argc; i += 2) {
        double value = i + 1 < argc ? atof(argv[i + 1]) : -1.0;
        int* whole = strcmp(argv[i], "--tokens") == 0    ? &b->tokens
                     : strcmp(argv[i], "--steps") == 0   ? &b->steps
                     : strcmp(argv[i], "--prompt") == 0  ? &b->prompt
                     : strcmp(argv[i], "--threads") == 0 ? &b->threads
                                                         : NULL;
        bool budget = strcmp(argv[i], "--budget") == 0;
        if ((whole == NULL && !budget) || value < (budget ? 0.0 : 2.0 - (whole == &b->threads)) ||
            value > (whole == &b->threads ? 64.0 : 4096.0)) {
            fprintf(stderr, "usage: bench slices [--budget MS] [--tokens 2 to 4096] [--steps 2 to "
                            "4096] [--prompt 2 to 4096] [--threads 1 to 64]\n");
            return false;
        }
        if (whole != NULL) {
            *whole = (int)value;
        } else {
            b->budget = value;
        }
    }
    return true;
}

static int bench_slices_main(int argc, char** argv) {
    slices_bench b;
    char why[512] = "";
    qlora_ctx* ctx = NULL;
    qlora_ctx_desc desc;
    if (!slices_parse(&b, argc, argv)) {
        return 2;
    }
    memset(&desc, 0, sizeof desc);
    desc.require_backend = QLORA_BACKEND_CPU;
    desc.threads = b.threads;
    desc.error_text = why;
    desc.error_text_size = sizeof why;
    b.took = (double*)malloc(SLICES_MOST * sizeof *b.took);
    if (b.took == NULL || qlora_ctx_create(&desc, &ctx) != QLORA_OK) {
        fprintf(stderr, "bench slices: %s\n", b.took == NULL ? "out of memory" : why);
        free(b.took);
        return 1;
    }
    bool ok = slices_run(&b, ctx);
    ok = qlora_ctx_destroy(ctx) == QLORA_OK && ok;
    free(b.took);
    return ok ? 0 : 1;
}

#endif
