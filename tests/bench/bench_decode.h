// bench_decode.h - tokens per second of generation on the CPU; part of bench_cpu.h.
//
//     build/bench decode [--model PATH] [--base nf4|16bit|32bit] [--tier NAME] [--threads N]
//                        [--prompt N] [--tokens N] [--json]
//
// Without a model, random weights in the shape of SmolLM2 135M; its embedding is f32 then, while a
// model in bf16 keeps it in bf16. The time of a token is the best of all, that of the prompt is of
// one run. With one thread CPU time is measured. Loading is not counted.
#ifndef QLORA_BENCH_DECODE_H
#define QLORA_BENCH_DECODE_H

#include "programs/shapes.h"

typedef struct decode_bench {
    const char* model;
    int base; // a qlora_base_format
    int tier;
    int threads;
    int prompt;
    int tokens;
    bool json;
    double load_s; // results
    double token_s;
    double prompt_s;
} decode_bench;

static bool decode_times(decode_bench* d, qlora_ctx* ctx, qlora_model* model, int on) {
    enum { MOST = 4096 };
    static int32_t ids[MOST];
    const int32_t no_stop = -1;
    qlora_generate_desc desc;
    qlora_generation* text = NULL;
    qlora_model_info info;
    (void)ctx;
    memset(&desc, 0, sizeof desc);
    bool ok = qlora_model_query(model, &info) == QLORA_OK;
    for (int i = 0; ok && i < d->prompt; i++) {
        ids[i] = (int32_t)((int64_t)i * 7919 % info.plan->config.vocab);
    }
    desc.prompt = ids;
    desc.prompt_tokens = d->prompt;
    desc.stops = &no_stop;
    desc.stop_count = 1;
    double start = cpu_seconds(on > 1);
    ok = ok && qlora_generate_begin(model, &desc, &text) == QLORA_OK;
    d->prompt_s = cpu_seconds(on > 1) - start;
    d->token_s = 1e30;
    for (int i = 0; ok && i <= d->tokens; i++) { // the first token only chooses from the prompt
        int32_t token = 0;
        bool stopped = false;
        start = cpu_seconds(on > 1);
        ok = qlora_generate_next(text, &token, &stopped) == QLORA_OK && !stopped;
        double seconds = cpu_seconds(on > 1) - start;
        d->token_s = i > 0 && seconds < d->token_s ? seconds : d->token_s;
    }
    return qlora_generate_end(text) == QLORA_OK && ok;
}

// Runs on a context; prints why if it fails.
static bool decode_run(decode_bench* d, qlora_ctx* ctx, int on) {
    qlora_model_config config = shape_config(shape_find("smollm2-135m"));
    qlora_model* model = NULL;
    qlora_model_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.dir = d->model;
    desc.config = d->model == NULL ? &config : NULL;
    desc.base = (qlora_base_format)d->base;
    desc.rank = -1;
    desc.purpose = QLORA_PURPOSE_EVALUATE;
    desc.tokens = d->prompt > 512 ? 512 : d->prompt;
    desc.head_chunk = 1;
    desc.generate_tokens = d->prompt + d->tokens + 2;
    double start = cpu_seconds(on > 1);
    bool ok = qlora_model_open(ctx, &desc, &model) == QLORA_OK;
    d->load_s = cpu_seconds(on > 1) - start;
    ok = ok && decode_times(d, ctx, model, on);
    if (!ok) {
        fprintf(stderr, "bench decode: %s\n", qlora_last_error(ctx));
    }
    return qlora_model_close(model) == QLORA_OK && ok;
}

// The rows of `build/bench cpu`.
static bool cpu_decode_run(cpu_bench* b) {
    decode_bench d;
    memset(&d, 0, sizeof d);
    d.prompt = b->quick ? 16 : 256;
    d.tokens = b->quick ? 3 : 16;
    bool ok = decode_run(&d, b->ctx, b->on);
    // Two operations per weight: 106 million in the projections, 28 million in the head.
    if (ok) {
        cpu_print(b, "decoding, smollm2-135m NF4, per token", d.token_s, 2.0 * 134.5e6);
        cpu_print(b, "prompt, smollm2-135m NF4, per token", d.prompt_s / d.prompt, 2.0 * 106.2e6);
    }
    return ok;
}

static bool decode_choice(const char* value, const char* const* names, int count, int* out) {
    for (int i = 0; i < count; i++) {
        if (strcmp(value, names[i]) == 0) {
            *out = i;
            return true;
        }
    }
    return false;
}

static bool decode_parse(decode_bench* d, int argc, char** argv) {
    static const char* const bases[] = {"nf4", "16bit", "32bit"};
    memset(d, 0, sizeof *d);
    d->threads = 1;
    d->prompt = 512;
    d->tokens = 32;
    for (int i = 1; i < argc; i++) {
        const char* name = argv[i];
        const char* value = i + 1 < argc ? argv[i + 1] : "";
        bool known = true;
        if (strcmp(name, "--json") == 0) {
            d->json = true;
            continue;
        }
        if (strcmp(name, "--model") == 0) {
            d->model = value;
        } else if (strcmp(name, "--base") == 0) {
            known = decode_choice(value, bases, 3, &d->base);
        } else if (strcmp(name, "--tier") == 0) {
            for (int t = 1; t < QLORA_CPU_TIER_COUNT; t++) {
                d->tier = strcmp(value, qlora_cpu_tier_name((qlora_cpu_tier)t)) == 0 ? t : d->tier;
            }
            known = d->tier != 0;
        } else if (strcmp(name, "--threads") == 0) {
            d->threads = atoi(value);
        } else if (strcmp(name, "--prompt") == 0) {
            d->prompt = atoi(value);
        } else if (strcmp(name, "--tokens") == 0) {
            d->tokens = atoi(value);
        } else {
            known = false;
        }
        i++;
        if (!known || d->threads < 1 || d->prompt < 2 || d->prompt > 4096 || d->tokens < 1 ||
            d->tokens > 4096) {
            fprintf(stderr, "usage: bench decode [--model PATH] [--base nf4|16bit|32bit] [--tier "
                            "NAME] [--threads N] [--prompt 2 to 4096] [--tokens 1 to 4096] "
                            "[--json]\n");
            return false;
        }
    }
    return true;
}

static int bench_decode_main(int argc, char** argv) {
    decode_bench d;
    char why[512] = "";
    qlora_ctx* ctx = NULL;
    qlora_ctx_desc desc;
    if (!decode_parse(&d, argc, argv)) {
        return 2;
    }
    memset(&desc, 0, sizeof desc);
    desc.require_backend = QLORA_BACKEND_CPU;
    desc.cpu_tier = (qlora_cpu_tier)d.tier;
    desc.threads = d.threads;
    desc.error_text = why;
    desc.error_text_size = sizeof why;
    if (qlora_ctx_create(&desc, &ctx) != QLORA_OK) {
        fprintf(stderr, "bench decode: %s\n", why);
        return 1;
    }
    bool ok = decode_run(&d, ctx, d.threads);
    ok = qlora_ctx_destroy(ctx) == QLORA_OK && ok;
    if (ok && d.json) {
        printf("{\"threads\": %d, \"prompt\": %d, \"load_s\": %.3f, \"prompt_tokens_per_s\": %.2f, "
               "\"tokens_per_s\": %.2f}\n",
               d.threads, d.prompt, d.load_s, d.prompt / d.prompt_s, 1.0 / d.token_s);
    } else if (ok) {
        printf("load %.2f s, prompt of %d %.1f tokens/s, decoding %.1f tokens/s\n", d.load_s,
               d.prompt, d.prompt / d.prompt_s, 1.0 / d.token_s);
    }
    return ok ? 0 : 1;
}

#endif
