// step_parts.c - where the time of a decoding step goes: every kernel of a step on its own, with
// the weights of all layers in turn, and whole steps, on the current GPU.
//
//     make build/step_parts && build/step_parts SHAPE TEXTS PROMPT [VARIANTS...]
//
// A part is captured as a graph of one kernel per layer, which is replayed; the weights of all
// layers together do not fit in the second-level cache. VARIANTS are numbers (src/model/layout.h);
// without them, that of the library is measured.
#define _POSIX_C_SOURCE 200809L
#define QLORA_IMPLEMENTATION
#include "qlora.h"

#include "programs/shapes.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { PART_FIRST, PART_QKV, PART_ATTENTION, PART_O, PART_NORM, PART_UP, PART_DOWN, PART_HEAD,
       PART_PICK, PARTS };

static const char* const part_names[PARTS] = {"norm qkv",  "qkv",     "attention", "o", "norm mlp",
                                              "gate, up",  "down",    "head",      "pick"};

typedef struct part_rig {
    qlora_model* m;
    int part;
} part_rig;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// The norm before a stack of layer `index`; both read the output of the stack before.
static qlora_result norm_run(qlora_model* m, int64_t index, bool mlp) {
    qlora__layer* layer = &m->layers[index];
    qlora__decode_between b;
    memset(&b, 0, sizeof b);
    b.layer = mlp || index == 0 ? layer : &m->layers[index - 1];
    b.before = mlp ? QLORA__O : QLORA__DOWN;
    b.norm = qlora__layer_norm(m, layer, mlp ? QLORA__NORM_MLP : QLORA__NORM_ATTENTION);
    b.next = &layer->linears[mlp ? QLORA__GATE_UP : QLORA__QKV];
    return qlora__decode_norm_run(m, &b);
}

static qlora_result part_enqueue(qlora_ctx* ctx, void* user) {
    const part_rig* rig = (const part_rig*)user;
    qlora_model* m = rig->m;
    const qlora__decode* d = &m->decode;
    QLORA__TRY(qlora__capture_note(ctx, d->state.data));
    for (int64_t l = 0; l < m->plan.config.layers && rig->part < PART_HEAD; l++) {
        qlora__layer* layer = &m->layers[l];
        switch (rig->part) {
        case PART_FIRST:
        case PART_NORM:
            QLORA__TRY(norm_run(m, l, rig->part == PART_NORM));
            break;
        case PART_QKV:
            QLORA__TRY(qlora__decode_product_run(m, layer, QLORA__QKV, &d->x, &d->qkv));
            break;
        case PART_ATTENTION:
            QLORA__TRY(qlora__softmax_step_mix(m, l));
            break;
        case PART_O:
            QLORA__TRY(qlora__decode_product_run(m, layer, QLORA__O, &d->o, &d->y));
            break;
        case PART_UP:
            QLORA__TRY(qlora__decode_product_run(m, layer, QLORA__GATE_UP, &d->x, &d->s));
            break;
        default:
            QLORA__TRY(qlora__decode_product_run(m, layer, QLORA__DOWN, &d->s, &d->y));
            break;
        }
    }
    if (rig->part == PART_HEAD) {
        return qlora__decode_head(m);
    }
    return rig->part == PART_PICK ? qlora__decode_pick(m) : QLORA_OK;
}

// Bytes that the part reads per layer.
static double part_bytes(const qlora_model* m, int part, double length) {
    const qlora_model_config* c = &m->plan.config;
    double q = (double)qlora__q_width(c);
    double kv = (double)qlora__kv_width(c);
    double h = (double)c->hidden;
    double wide = (double)c->intermediate;
    double unit = 0.5 + 1.0 / 64.0 + 4.0 / (64.0 * 256.0);
    double texts = (double)m->decode.texts;
    double bytes[PARTS] = {0.0};
    bytes[PART_QKV] = h * (q + 2.0 * kv) * unit;
    bytes[PART_ATTENTION] = texts * length * 4.0 * kv;
    bytes[PART_O] = q * h * unit;
    bytes[PART_UP] = 2.0 * h * wide * unit;
    bytes[PART_DOWN] = h * wide * unit;
    bytes[PART_HEAD] = 2.0 * h * (double)c->vocab;
    bytes[PART_PICK] = 2.0 * texts * (double)c->vocab;
    return bytes[part];
}

// Microseconds of a part per layer.
static double part_time(qlora_model* m, int part) {
    qlora_ctx* ctx = m->ctx;
    part_rig rig = {m, part};
    qlora_graph* graph = NULL;
    int64_t count = part < PART_HEAD ? m->plan.config.layers : 1;
    int replays = 20;
    bool ok = qlora__graph_capture(ctx, 1, part_enqueue, &rig, &graph) == QLORA_OK;
    ok = ok && qlora__sync(ctx) == QLORA_OK;
    double start = now();
    for (int i = 0; ok && i < replays; i++) {
        ok = qlora__graph_replay(ctx, graph, 1) == QLORA_OK;
    }
    ok = ok && qlora__sync(ctx) == QLORA_OK;
    double us = (now() - start) * 1e6 / (double)(count * replays);
    ok = graph == NULL || (qlora__graph_destroy(ctx, graph) == QLORA_OK && ok);
    return ok ? us : -1.0;
}

// Tokens per second of all texts, after their prompts.
static double texts_time(qlora_model* m, qlora_generation** list, int64_t texts, int fresh) {
    static int32_t tokens[1024];
    static bool stopped[1024];
    bool ok = qlora_generate_next_each(list, texts, tokens, stopped) == QLORA_OK;
    ok = ok && qlora_generate_next_each(list, texts, tokens, stopped) == QLORA_OK;
    double start = now();
    for (int i = 0; ok && i < fresh; i++) {
        ok = qlora_generate_next_each(list, texts, tokens, stopped) == QLORA_OK;
    }
    double seconds = now() - start;
    if (!ok) {
        printf("%s\n", qlora_last_error(m->ctx));
        return -1.0;
    }
    return (double)(texts * fresh) / seconds;
}

static bool variant_run(qlora_model* m, qlora_generation** list, int64_t texts, int64_t prompt,
                        uint32_t variant, bool whole) {
    qlora_ctx* ctx = m->ctx;
    double sum = 0.0;
    m->decode.variants = variant;
    for (int i = 0; i < 2; i++) {
        if (qlora__enter(ctx, "step_parts") != QLORA_OK ||
            qlora__leave(ctx, qlora__graph_destroy(ctx, m->decode.graphs[i])) != QLORA_OK) {
            return false;
        }
        m->decode.graphs[i] = NULL;
    }
    double rate = texts_time(m, list, texts, 48);
    printf("variant %u: %.0f tokens/s, %.1f us per step\n", variant, rate,
           1e6 * (double)texts / rate);
    fflush(stdout);
    if (!whole || rate < 0.0 || qlora__enter(ctx, "step_parts") != QLORA_OK) {
        return rate > 0.0;
    }
    for (int part = 0; part < PART_PICK; part++) { // which would advance the texts
        double us = part_time(m, part);
        double bytes = part_bytes(m, part, (double)prompt);
        sum += us * (double)(part < PART_HEAD ? m->plan.config.layers : 1);
        printf("  %-10s %8.2f us %8.0f GB/s\n", part_names[part], us, bytes / us * 1e-3);
        if (us < 0.0) {
            printf("  %s\n", ctx->env.error);
        }
    }
    printf("  sum        %8.2f us\n", sum);
    fflush(stdout);
    return qlora__leave(ctx, QLORA_OK) == QLORA_OK;
}

int main(int argc, char** argv) {
    static qlora_generation* list[1024];
    static int32_t ids[65536];
    const model_shape* shape = argc > 3 ? shape_find(argv[1]) : NULL;
    int64_t texts = argc > 3 ? atoll(argv[2]) : 0;
    int64_t prompt = argc > 3 ? atoll(argv[3]) : 0;
    if (shape == NULL || texts < 1 || texts > 1024 || prompt < 1 || prompt > 65536) {
        fprintf(stderr, "usage: step_parts SHAPE TEXTS PROMPT [VARIANTS...]\n");
        return 2;
    }
    qlora_ctx_desc ctx_desc;
    qlora_ctx* ctx = NULL;
    memset(&ctx_desc, 0, sizeof ctx_desc);
    ctx_desc.require_backend = QLORA_BACKEND_CUDA;
    qlora_model_config config = shape_config(shape);
    qlora_model_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.config = &config;
    desc.rank = 16;
    desc.purpose = QLORA_PURPOSE_EVALUATE;
    desc.tokens = prompt;
    desc.head_chunk = 1;
    desc.generate_tokens = prompt + 256 + 8;
    desc.generate_sequences = texts;
    qlora_model* m = NULL;
    bool ok = qlora_ctx_create(&ctx_desc, &ctx) == QLORA_OK;
    ok = ok && qlora_model_open(ctx, &desc, &m) == QLORA_OK;
    for (int64_t i = 0; i < prompt; i++) {
        ids[i] = (int32_t)(i * 7919 % config.vocab);
    }
    for (int64_t i = 0; ok && i < texts; i++) {
        static const int32_t none[1] = {-1};
        qlora_generate_desc g;
        memset(&g, 0, sizeof g);
        g.prompt = ids;
        g.prompt_tokens = prompt;
        g.stops = none;
        g.stop_count = 1;
        ok = qlora_generate_begin(m, &g, &list[i]) == QLORA_OK;
    }
    if (!ok) {
        fprintf(stderr, "step_parts: %s\n", ctx != NULL ? qlora_last_error(ctx) : "no GPU");
        return 1;
    }
    printf("%s, %d texts after %d tokens\n", shape->name, (int)texts, (int)prompt);
    uint32_t own = m->decode.variants;
    ok = argc > 4 || variant_run(m, list, texts, prompt, own, true);
    for (int i = 4; ok && i < argc; i++) {
        // "3" measures the parts as well, "+3" only whole steps.
        ok = variant_run(m, list, texts, prompt, (uint32_t)atoi(argv[i]), argv[i][0] != '+');
    }
    return ok ? 0 : 1;
}
