// hello.c - trains a small model on one sentence and lets it continue the first word. The model has
// random weights, so that the program runs anywhere; for a real one, set .dir instead of .config.
//
//     cc -O2 -I. examples/hello.c -o hello -ldl -lm -lpthread
//     ./hello
#define QLORA_IMPLEMENTATION
#include "qlora.h"
#include <stdio.h>
#define TRY(call) if ((call) != QLORA_OK) { puts(qlora_last_error(ctx)); return 1; }

static bool show(void* user, int32_t token) { (void)user; return putchar(token) != EOF; }

int main(void) {
    static const char text[] = "Forty-two small hens sat on the old red barn and sang.";
    int32_t ids[sizeof text - 1], length = sizeof text - 1;      // one token per byte
    for (int i = 0; i < length; i++) ids[i] = text[i];
    qlora_model_config tiny = {.family = QLORA_FAMILY_LLAMA, .vocab = 128, .hidden = 64,
        .intermediate = 128, .layers = 2, .heads = 4, .max_positions = 64, .rms_eps = 1e-5,
        .rope = {.theta = 1e4}};
    qlora_model_desc what = {.config = &tiny, .weight_std = 0.1f, .rank = 16,    // 4-bit base
        .tokens = 64, .generate_tokens = 64};
    qlora_train_desc how = {.lr = 1e-2};
    qlora_batch batch = {.ids = ids, .labels = ids, .lengths = &length, .count = 1};
    qlora_generate_desc ask = {.prompt = ids, .prompt_tokens = 5, .max_tokens = length - 5};
    qlora_ctx_desc desc = {0};                                   // a GPU if there is one
    qlora_ctx* ctx = NULL; qlora_model* model = NULL; qlora_trainer* trainer = NULL;
    qlora_train_info info;
    TRY(qlora_ctx_create(&desc, &ctx));
    TRY(qlora_model_open(ctx, &what, &model));
    TRY(qlora_trainer_create(model, &how, &trainer));
    for (int step = 1; step <= 60; step++) {
        TRY(qlora_train_step(trainer, &batch, 1, &info));
        if (step % 20 == 0) printf("step %d  loss %.4f\n", step, info.loss);
    }
    printf("%.5s|", text);
    TRY(qlora_generate(model, &ask, show, NULL));
    puts("");
    TRY(qlora_trainer_destroy(trainer));
    TRY(qlora_model_close(model));
    return qlora_ctx_destroy(ctx) != QLORA_OK;
}
