// bench_generate.h - time to the first token and tokens per second of generation on the current GPU
// (or CPU).
//
//     build/bench generate --shape NAME --prompt P --new N [options]     (see --help)
//
// Random weights of a public shape, NF4 with double quantisation, adapters on all projections, no
// stop tokens. Each run generates whole texts; the best of all runs is printed. The roofline is the
// time in which the bytes that a token needs can be read: the weights, the adapters, the head and
// the keys and values of the text so far (half of the new tokens on average).
#ifndef QLORA_BENCH_GENERATE_H
#define QLORA_BENCH_GENERATE_H

#include "programs/shapes.h"

typedef struct generate_bench {
    const model_shape* shape;
    model_shape cut; // what it points to
    int64_t layers;  // 0 = all
    int64_t targets; // 0 = all
    int64_t prompt;
    int64_t fresh;
    int64_t rank;
    int64_t sequences;
    int64_t piece; // 0 = the whole prompt
    int64_t runs;
    int64_t threads;
    int64_t pause;
    double temperature;
    double tbps; // 0 = measured
    int backend;
    bool json;
    double first_s; // results
    double token_s;
    double open_s;
    qlora_plan plan;
} generate_bench;

static const char generate_help[] =
    "usage: bench generate --shape NAME --prompt P --new N [options]\n"
    "  --layers N       the first N layers of the shape (default: all)\n"
    "  --targets LIST   projections with adapters, in the words of finetune (default all)\n"
    "  --sequences S    texts at the same time (default 1)\n"
    "  --piece N        tokens of the prompt that are computed at a time (default: all)\n"
    "  --rank N         LoRA rank; -1 = no adapters (default 16)\n"
    "  --runs N         number of runs; the best is reported (default 3)\n"
    "  --temperature T  sample instead of choosing the most likely token (default 0)\n"
    "  --pause US       time that the program takes for each token (default 0 us)\n"
    "  --backend NAME   cuda or cpu (default: CUDA if there is a GPU)\n"
    "  --threads N      CPU threads (default: one per core)\n"
    "  --tbps X         memory bandwidth in TB/s for the roofline (default 4.3 on a GPU, measured\n"
    "                   on a CPU)\n"
    "  --json           print a JSON object\n";

static double generate_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// One run: all texts begin, then they advance together.
static bool generate_once(generate_bench* b, qlora_model* model, int32_t* ids, double* first,
                          double* each) {
    enum { MOST = 1024 };
    static qlora_generation* texts[MOST];
    static int32_t tokens[MOST];
    static bool stopped[MOST];
    const int32_t none = -1;
    qlora_generate_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.prompt = ids;
    desc.prompt_tokens = b->prompt;
    desc.max_tokens = b->fresh;
    desc.temperature = (float)b->temperature;
    desc.stops = &none;
    desc.stop_count = 1;
    int64_t begun = 0;
    bool ok = true;
    double start = generate_now();
    while (ok && begun < b->sequences) {
        ids[0] = (int32_t)(begun % b->shape->vocab);
        desc.seed = (uint64_t)begun;
        ok = qlora_generate_begin(model, &desc, &texts[begun]) == QLORA_OK;
        begun += ok ? 1 : 0;
    }
    ok = ok && qlora_generate_next_each(texts, begun, tokens, stopped) == QLORA_OK;
    *first = generate_now() - start;
    double later = generate_now();
    for (int64_t i = 1; ok && i < b->fresh; i++) {
        if (i == 2) { // the first step on a device captures its graph
            later = generate_now();
        }
        ok = qlora_generate_next_each(texts, begun, tokens, stopped) == QLORA_OK && !stopped[0];
        double until = generate_now() + 1e-6 * (double)b->pause;
        while (b->pause > 0 && generate_now() < until) { // the program is busy
        }
    }
    *each = (generate_now() - later) / (double)((b->fresh > 2 ? b->fresh - 2 : 1) * b->sequences);
    while (begun > 0) {
        ok = qlora_generate_end(texts[--begun]) == QLORA_OK && ok;
    }
    return ok;
}

static bool generate_times(generate_bench* b, qlora_model* model) {
    int32_t* ids = (int32_t*)malloc((size_t)b->prompt * 4);
    for (int64_t i = 0; ids != NULL && i < b->prompt; i++) {
        ids[i] = (int32_t)((7 + i * 131) % b->shape->vocab);
    }
    b->first_s = 1e30;
    b->token_s = 1e30;
    bool ok = ids != NULL;
    for (int64_t i = 0; ok && i < b->runs; i++) {
        double first = 0.0;
        double each = 0.0;
        ok = generate_once(b, model, ids, &first, &each);
        b->first_s = first < b->first_s ? first : b->first_s;
        b->token_s = each < b->token_s ? each : b->token_s;
    }
    free(ids);
    return ok;
}

// Bytes that one token reads; several texts share the weights. Of experts, those that a step of all
// texts uses if each chooses at random.
static double generate_bytes(const generate_bench* b, const qlora_plan* plan, bool f32) {
    const qlora_model_config* c = &plan->config;
    double kv = (double)(c->kv_heads * c->head_dim);
    double unit = f32 ? 4.0 : 2.0;
    double chosen = c->experts > 0 ? (double)c->experts_per_token / (double)c->experts : 0.0;
    double unread = pow(1.0 - chosen, (double)b->sequences);
    double weights = plan->work.weights - unread * plan->work.routed;
    double routed = (double)plan->trained[QLORA_PLACE_EXPERTS];
    double adapters = (double)plan->parameters - unread * routed;
    double length = (double)b->prompt + (double)b->fresh / 2.0;
    double scales = 1.0 / 64.0 + 4.0 / (64.0 * 256.0);
    double shared = weights * (0.5 + scales) + adapters * unit;
    shared += (double)c->vocab * (double)c->hidden * unit;
    return shared / (double)b->sequences + (double)c->layers * length * 2.0 * kv * unit;
}

// The bandwidth of a long pass over memory, in bytes per second.
static double generate_bandwidth(qlora_ctx* ctx) {
    qlora_tensor from;
    qlora_tensor to;
    const int64_t n = (int64_t)1 << 26;
    double best = 1e30;
    if (qlora_tensor_create(ctx, QLORA_F32, 1, n, &from) != QLORA_OK) {
        return 0.0;
    }
    bool ok = qlora_tensor_create(ctx, QLORA_F32, 1, n, &to) == QLORA_OK;
    for (int i = 0; ok && i < 4; i++) {
        double start = generate_now();
        ok = qlora_scale(ctx, 1.0f, &from, &to) == QLORA_OK && qlora_ctx_sync(ctx) == QLORA_OK;
        double seconds = generate_now() - start;
        best = i > 0 && seconds < best ? seconds : best;
    }
    qlora_tensor_destroy(ctx, &to);
    qlora_tensor_destroy(ctx, &from);
    return ok ? 2.0 * 4.0 * (double)n / best : 0.0;
}

static bool generate_run(generate_bench* b, qlora_ctx* ctx) {
    qlora_model_config config = shape_config(b->shape);
    qlora_model* model = NULL;
    qlora_model_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.config = &config;
    desc.rank = (int32_t)b->rank;
    desc.targets = (uint32_t)b->targets;
    desc.purpose = QLORA_PURPOSE_EVALUATE;
    desc.tokens = b->piece > 0 && b->piece < b->prompt ? b->piece : b->prompt;
    desc.head_chunk = 1;
    desc.generate_tokens = b->prompt + b->fresh + 8;
    desc.generate_sequences = b->sequences;
    double start = generate_now();
    bool ok = qlora_model_open(ctx, &desc, &model) == QLORA_OK;
    qlora_model_info info;
    ok = ok && qlora_model_query(model, &info) == QLORA_OK;
    if (ok) {
        b->plan = *info.plan;
    }
    b->open_s = generate_now() - start;
    ok = ok && generate_times(b, model);
    if (!ok) {
        fprintf(stderr, "bench generate: %s\n", qlora_last_error(ctx));
    }
    return qlora_model_close(model) == QLORA_OK && ok;
}

static bool generate_parse(generate_bench* b, int argc, char** argv) {
    memset(b, 0, sizeof *b);
    b->prompt = 512;
    b->fresh = 256;
    b->rank = 16;
    b->sequences = 1;
    b->runs = 3;
    for (int i = 1; i < argc; i++) {
        const char* value = i + 1 < argc ? argv[i + 1] : "";
        const struct {
            const char* name;
            int64_t* number;
        } numbers[] = {{"--prompt", &b->prompt},       {"--new", &b->fresh},
                       {"--rank", &b->rank},           {"--runs", &b->runs},
                       {"--layers", &b->layers},
                       {"--piece", &b->piece},         {"--pause", &b->pause},
                       {"--sequences", &b->sequences}, {"--threads", &b->threads}};
        bool known = strcmp(argv[i], "--json") == 0;
        if (known) {
            b->json = true;
            continue;
        }
        for (size_t j = 0; j < sizeof numbers / sizeof numbers[0]; j++) {
            if (strcmp(argv[i], numbers[j].name) == 0) {
                *numbers[j].number = atoll(value);
                known = true;
            }
        }
        if (strcmp(argv[i], "--shape") == 0) {
            b->shape = step_shape(value);
            known = b->shape != NULL;
        } else if (strcmp(argv[i], "--targets") == 0) {
            known = step_targets("bench generate", value, &b->targets);
        } else if (strcmp(argv[i], "--temperature") == 0) {
            b->temperature = atof(value);
            known = true;
        } else if (strcmp(argv[i], "--tbps") == 0) {
            b->tbps = atof(value);
            known = true;
        } else if (strcmp(argv[i], "--backend") == 0) {
            b->backend = strcmp(value, "cpu") == 0 ? QLORA_BACKEND_CPU : QLORA_BACKEND_CUDA;
            known = strcmp(value, "cpu") == 0 || strcmp(value, "cuda") == 0;
        }
        if (!known) {
            return false;
        }
        i++;
    }
    return b->shape != NULL && step_cut("bench generate", &b->shape, b->layers, &b->cut) &&
           b->prompt >= 1 && b->fresh >= 2 && b->runs >= 1 &&
           b->sequences >= 1 && b->sequences <= 1024;
}

static int bench_generate_main(int argc, char** argv) {
    generate_bench b;
    char why[512] = "";
    qlora_ctx* ctx = NULL;
    qlora_ctx_desc desc;
    if (!generate_parse(&b, argc, argv)) {
        fprintf(stderr, "%s", generate_help);
        return 2;
    }
    memset(&desc, 0, sizeof desc);
    desc.require_backend = (qlora_backend)b.backend;
    desc.threads = (int32_t)b.threads;
    desc.error_text = why;
    desc.error_text_size = sizeof why;
    if (qlora_ctx_create(&desc, &ctx) != QLORA_OK) {
        fprintf(stderr, "bench generate: %s\n", why);
        return 1;
    }
    bool gpu = qlora_ctx_backend(ctx) == QLORA_BACKEND_CUDA;
    bool ok = generate_run(&b, ctx);
    double tbps = b.tbps > 0.0 ? b.tbps : gpu ? 4.3 : generate_bandwidth(ctx) * 1e-12;
    ok = qlora_ctx_destroy(ctx) == QLORA_OK && ok;
    double bytes = generate_bytes(&b, &b.plan, !gpu);
    double share = tbps > 0.0 ? 100.0 * bytes / (tbps * 1e12) / b.token_s : 0.0;
    if (ok) {
        printf(
            b.json
                ? "{\"shape\": \"%s\", \"prompt\": %lld, \"new\": %lld, \"sequences\": %lld, "
                  "\"first_token_ms\": %.3f, \"tokens_per_s\": %.2f, \"bytes_per_token\": "
                  "%.0f, \"tbps\": %.3f, \"roofline_percent\": %.1f, \"open_s\": %.2f}\n"
                : "%s, prompt of %lld, %lld new, %lld texts: first token after %.2f ms, then %.1f "
                  "tokens/s (%.0f bytes per token at %.3f TB/s: %.1f %% of the roofline), "
                  "opened in %.2f s\n",
            b.shape->name, (long long)b.prompt, (long long)b.fresh, (long long)b.sequences,
            1e3 * b.first_s, 1.0 / b.token_s, bytes, tbps, share, b.open_s);
    }
    return ok ? 0 : 1;
}

#endif
