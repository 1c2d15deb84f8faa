// qlora.h with rooms left out: what is left works, and what is not there says so. Prints what it
// generates, which does not depend on what is left out, and the errors. Status 0: all that is left
// works.
//
//     parts_left_out FOLDER     for the adapter that it writes
#define QLORA_IMPLEMENTATION
#include "qlora.h"

#include <stdio.h>

enum { TOKENS = 16, ROOM = 1 << 15 };

static int failures;

static void expect(const qlora_ctx* ctx, bool ok, const char* what) {
    if (!ok) {
        printf("failed: %s: %s\n", what, qlora_last_error(ctx));
        failures++;
    }
}

// Every call that gets here fails, with all rooms as well: the files are not there.
static void refused(const char* what, const qlora_ctx* ctx, qlora_result r) {
    expect(ctx, r != QLORA_OK, what);
    printf("%s: %s: %s\n", what, r == QLORA_ERR_UNSUPPORTED ? "unsupported" : "error",
           qlora_last_error(ctx));
}

static const qlora_model_config* config(void) {
    static qlora_model_config tiny; // zeroed
    tiny.family = QLORA_FAMILY_LLAMA;
    tiny.vocab = 128;
    tiny.hidden = 64;
    tiny.intermediate = 128;
    tiny.layers = 2;
    tiny.heads = 4;
    tiny.max_positions = 64;
    tiny.rms_eps = 1e-5;
    tiny.rope.theta = 1e4;
    return &tiny;
}

static void what(qlora_model_desc* desc) {
    memset(desc, 0, sizeof *desc);
    desc->config = config();
    desc->weight_std = 0.5f;
    desc->tokens = 64;
    desc->rank = 4;
    desc->purpose = QLORA_PURPOSE_EVALUATE;
#ifndef QLORA_NO_GENERATE
    desc->generate_tokens = 32;
#endif
}

// Gives the adapter values, as if it had been trained.
static void fill(const qlora_ctx* ctx, qlora_model* model) {
    static float values[ROOM];
    qlora_parameter_info info;
    for (int64_t i = 0; qlora_parameter_query(model, i, &info) == QLORA_OK; i++) {
        bool fits = info.rows * info.cols <= ROOM;
        for (int64_t k = 0; fits && k < info.rows * info.cols; k++) {
            values[k] = (float)((k * 37 + i * 11) % 64 - 32) / 64.0f;
        }
        expect(ctx, fits && qlora_parameter_write(model, i, values) == QLORA_OK, "a parameter");
    }
}

static void evaluate(const qlora_ctx* ctx, qlora_model* model) {
    int32_t ids[TOKENS];
    int32_t length = TOKENS;
    qlora_batch batch;
    qlora_eval_info info;
    memset(&batch, 0, sizeof batch);
    memset(&info, 0, sizeof info);
    for (int32_t i = 0; i < TOKENS; i++) {
        ids[i] = i * 5 % 128;
    }
    batch.ids = ids;
    batch.labels = ids;
    batch.lengths = &length;
    batch.count = 1;
    expect(ctx, qlora_eval(model, &batch, &info) == QLORA_OK && info.loss > 0.0, "an evaluation");
    printf("loss %.3f\n", info.loss);
}

#ifndef QLORA_NO_GENERATE
static void speak(const qlora_ctx* ctx, qlora_model* model, const char* name) {
    static const int32_t prompt[4] = {72, 101, 108, 112};
    qlora_generate_desc desc;
    qlora_generation* text = NULL;
    memset(&desc, 0, sizeof desc);
    desc.prompt = prompt;
    desc.prompt_tokens = 4;
    bool stopped = qlora_generate_begin(model, &desc, &text) != QLORA_OK;
    expect(ctx, !stopped, "a prompt");
    printf("%s:", name);
    for (int i = 0; i < TOKENS && !stopped; i++) {
        int32_t token = -1;
        expect(ctx, qlora_generate_next(text, &token, &stopped) == QLORA_OK, "a token");
        printf(" %d", (int)token);
    }
    printf("\n");
    expect(ctx, qlora_generate_end(text) == QLORA_OK, "the end of a text");
}
#endif // QLORA_NO_GENERATE

#ifndef QLORA_NO_TRAIN
static void train(qlora_ctx* ctx, qlora_model_desc* desc) {
    int32_t ids[TOKENS] = {1, 2, 3};
    int32_t length = TOKENS;
    qlora_batch batch;
    qlora_train_info info;
    qlora_model* model = NULL;
    qlora_trainer* trainer = NULL;
    memset(&batch, 0, sizeof batch);
    batch.ids = ids;
    batch.labels = ids;
    batch.lengths = &length;
    batch.count = 1;
    desc->purpose = QLORA_PURPOSE_TRAIN;
    expect(ctx,
           qlora_model_open(ctx, desc, &model) == QLORA_OK &&
               qlora_trainer_create(model, NULL, &trainer) == QLORA_OK &&
               qlora_train_step(trainer, &batch, 1, &info) == QLORA_OK,
           "a step");
    qlora_trainer_destroy(trainer);
    expect(ctx, qlora_model_close(model) == QLORA_OK, "closing what was trained");
}
#endif // QLORA_NO_TRAIN

// What a macro may have left out, by name.
static void missing(qlora_ctx* ctx, qlora_model* model, const char* folder) {
    qlora_model_desc desc;
    qlora_model* other = NULL;
    qlora_model_config read;
    char path[300];
    what(&desc);
    desc.purpose = QLORA_PURPOSE_TRAIN;
    desc.dir = "nowhere";
    desc.config = NULL;
    refused("train", ctx, qlora_model_open(ctx, &desc, &other));
    desc.purpose = QLORA_PURPOSE_EVALUATE;
    desc.generate_tokens = 8;
    refused("generate", ctx, qlora_model_open(ctx, &desc, &other));
    desc.generate_tokens = 0;
    desc.dir = "nowhere.gguf";
    refused("gguf", ctx, qlora_model_open(ctx, &desc, &other));
    refused("config", ctx, qlora_config_read(ctx, "nowhere.gguf", &read));
    snprintf(path, sizeof path, "%s/none/adapter.gguf", folder);
    refused("export", ctx, qlora_adapter_save_gguf(model, path, NULL));
#ifndef QLORA_NO_MERGE
    qlora_merge_desc merge;
    memset(&merge, 0, sizeof merge);
    merge.dir = folder;
    refused("merge", ctx, qlora_merge_save(model, &merge)); // it has no folder to be merged into
#endif
}

int main(int argc, char** argv) {
    const char* folder = argc > 1 ? argv[1] : "adapter";
    qlora_ctx_desc machine;
    qlora_model_desc desc;
    qlora_ctx* ctx = NULL;
    qlora_model* model = NULL;
    memset(&machine, 0, sizeof machine);
    machine.threads = 1;
    what(&desc);
    if (qlora_ctx_create(&machine, &ctx) != QLORA_OK ||
        qlora_model_open(ctx, &desc, &model) != QLORA_OK) {
        printf("no model: %s\n", qlora_last_error(ctx));
        return 1;
    }
    fill(ctx, model);
    evaluate(ctx, model);
    expect(ctx, qlora_adapter_save(model, folder, NULL) == QLORA_OK, "saving the adapter");
    expect(ctx, qlora_model_close(model) == QLORA_OK, "closing the model");
    desc.rank = 0; // the adapter's
    desc.adapter = folder;
    expect(ctx, qlora_model_open(ctx, &desc, &model) == QLORA_OK, "a model with an adapter");
    evaluate(ctx, model);
#ifndef QLORA_NO_GENERATE
    speak(ctx, model, "with");
    expect(ctx, qlora_adapter_use(model, false) == QLORA_OK, "the base alone");
    speak(ctx, model, "without");
#endif
    missing(ctx, model, folder);
    expect(ctx, qlora_model_close(model) == QLORA_OK, "closing the model with an adapter");
#ifndef QLORA_NO_TRAIN
    train(ctx, &desc);
#endif
    expect(ctx, qlora_ctx_destroy(ctx) == QLORA_OK, "destroying the context");
    return failures == 0 ? 0 : 1;
}
