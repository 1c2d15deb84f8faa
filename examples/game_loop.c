// game_loop.c - a game that trains and talks without missing a frame: one model learns in slices of
// 4 ms; another one speaks in slices of 2 ms and takes over the adapter when it has changed.
//
//     cc -O2 -I. examples/game_loop.c -o game_loop -ldl -lm -lpthread
//     ./game_loop                 (a tiny model; ./game_loop 0.5b takes the shape of Qwen2.5-0.5B)
#define QLORA_IMPLEMENTATION
#include "qlora.h"
#include <stdio.h>
#include <string.h>
#include <time.h>

#define TRY(call) do { qlora_result r_ = (call); if (r_ != QLORA_OK) return r_; } while (0)
enum { LINE = 96, STEPS = 24 };

typedef struct game {
    qlora_ctx* ctx;
    qlora_model* learner;
    qlora_model* speaker;
    qlora_trainer* trainer;
    qlora_generation* voice; // the text in progress, or NULL
    bool learned; // a step since the last token
    int frames;
    double longest_slice, longest_words; // ms
    char said[LINE];
} game;

static const char line[] = "The dragon asks: who woke me? The knight says: it was the rain.";

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static qlora_result start(game* g, bool large) {
    qlora_model_config tiny = {.family = QLORA_FAMILY_LLAMA, .vocab = 128, .hidden = 64,
        .intermediate = 160, .layers = 3, .heads = 4, .max_positions = 512, .rms_eps = 1e-6,
        .rope = {.theta = 1e4}, .tied = true};
    qlora_model_config half = {.family = QLORA_FAMILY_LLAMA, .vocab = 151936, .hidden = 896,
        .intermediate = 4864, .layers = 24, .heads = 14, .kv_heads = 2, .max_positions = 512,
        .rms_eps = 1e-6, .rope = {.theta = 1e4}, .tied = true};
    qlora_model_desc desc = {.config = large ? &half : &tiny, .weight_std = large ? 0.02f : 0.1f,
        .tokens = large ? 512 : 64, .generate_tokens = LINE};
    qlora_train_desc train = {.lr = large ? 1e-3 : 1e-2};
    TRY(qlora_model_open(g->ctx, &desc, &g->learner));
    desc.purpose = QLORA_PURPOSE_EVALUATE;
    TRY(qlora_model_open(g->ctx, &desc, &g->speaker));
    return qlora_trainer_create(g->learner, &train, &g->trainer);
}

// Part of a token of the dragon's line; a new line begins when the last one is finished.
static qlora_result speak(game* g, const int32_t* ids) {
    qlora_generate_desc d = {.prompt = ids, .prompt_tokens = 4, .max_tokens = sizeof line - 5,
        .in_slices = true};
    if (g->voice == NULL) {
        snprintf(g->said, sizeof g->said, "%.4s", line);
        return qlora_generate_begin(g->speaker, &d, &g->voice);
    }
    int32_t token = 0;
    bool stopped = false, done = false;
    TRY(qlora_generate_slice(g->voice, 2.0, &token, &stopped, &done));
    if (!done) return QLORA_OK; // the rest in the next frame
    if (g->learned) TRY(qlora_adapter_copy(g->learner, g->speaker)); // between two tokens
    g->learned = false;
    if (stopped) {
        TRY(qlora_generate_end(g->voice));
        g->voice = NULL;
        return QLORA_OK;
    }
    snprintf(g->said + strlen(g->said), 2, "%c", token >= 32 && token < 127 ? token : '?');
    return QLORA_OK;
}

// A frame: a slice of training, some of a token, and whatever else the game does.
static qlora_result frame(game* g, const int32_t* ids, double budget, bool* done) {
    double begin = now_ms();
    TRY(qlora_train_slice(g->trainer, budget, done));
    double took = now_ms() - begin;
    g->longest_slice = took > g->longest_slice ? took : g->longest_slice;
    g->frames++;
    begin = now_ms();
    TRY(speak(g, ids));
    took = now_ms() - begin;
    g->longest_words = took > g->longest_words ? took : g->longest_words;
    return QLORA_OK;
}

static qlora_result play(game* g) {
    int32_t ids[sizeof line], length = sizeof line - 1;
    qlora_batch batch = {.ids = ids, .labels = ids, .lengths = &length, .count = 1};
    qlora_train_info info;
    for (int i = 0; i < length; i++) ids[i] = line[i]; // one token per byte
    for (int step = 1; step <= STEPS; step++) {
        bool done = false;
        TRY(qlora_train_begin(g->trainer, &batch, 1));
        while (!done) TRY(frame(g, ids, 4.0, &done));
        g->learned = true;
        TRY(qlora_train_poll(g->trainer, &info));
        if (step == 2) g->longest_slice = g->longest_words = 0.0; // the first steps time the pieces
        if (step % 8 == 0)
            printf("step %2d  loss %.3f  longest piece %.2f ms  frame %d  \"%s\"\n", step,
                info.loss, info.longest_piece, g->frames, g->said);
    }
    return QLORA_OK;
}

int main(int argc, char** argv) {
    game g = {0};
    qlora_ctx_desc desc = {0}; // stream_priority makes the game's own GPU work go first
    if (qlora_ctx_create(&desc, &g.ctx) != QLORA_OK) return 1;
    bool ok = !start(&g, argc > 1 && !strcmp(argv[1], "0.5b")) && !play(&g);
    if (!ok) fprintf(stderr, "game_loop: %s\n", qlora_last_error(g.ctx));
    printf("%d frames, longest slice %.2f ms of 4, longest words %.2f ms of 2\n", g.frames,
        g.longest_slice, g.longest_words);
    qlora_generate_end(g.voice);
    qlora_trainer_destroy(g.trainer);
    qlora_model_close(g.speaker);
    qlora_model_close(g.learner);
    return qlora_ctx_destroy(g.ctx) == QLORA_OK && ok ? 0 : 1;
}
