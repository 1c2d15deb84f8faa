// soak_kill.c - a small training run that saves after every step, for soak_kill.sh to kill.
//
//   soak_kill DIR STEPS [nosave]
//
// Resumes from DIR if it contains a checkpoint, and reports it; trains up to STEPS and prints a
// hash of the trained parameters. Exits with 1 if anything is wrong.
#include "qlora.h"

#include "model_info.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int fail(qlora_ctx* ctx, const char* what) {
    printf("FAILED %s: %s\n", what, qlora_last_error(ctx));
    return 1;
}

static bool step(qlora_trainer* t, int64_t number) {
    int32_t ids[24];
    int32_t lengths[2] = {14, 10};
    uint64_t state = (uint64_t)(number + 1) * 0x9E3779B97F4A7C15u;
    for (int i = 0; i < 24; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        ids[i] = (int32_t)(state >> 33) % 64;
    }
    qlora_batch b;
    memset(&b, 0, sizeof b);
    b.ids = ids;
    b.labels = ids;
    b.lengths = lengths;
    b.count = 2;
    return qlora_train_micro(t, &b, qlora_batch_labels(&b)) == QLORA_OK &&
           qlora_train_update(t) == QLORA_OK;
}

static bool print_hash(qlora_model* m) {
    uint64_t hash = 14695981039346656037u;
    for (int64_t i = 0; i < model_parameters(m); i++) {
        qlora_parameter_info p;
        float values[4096];
        if (qlora_parameter_query(m, i, &p) != QLORA_OK || p.rows * p.cols > 4096 ||
            qlora_parameter_read(m, i, values) != QLORA_OK) {
            return false;
        }
        const unsigned char* bytes = (const unsigned char*)values;
        for (size_t k = 0; k < (size_t)(p.rows * p.cols) * 4; k++) {
            hash = (hash ^ bytes[k]) * 1099511628211u;
        }
    }
    printf("hash %016llx\n", (unsigned long long)hash);
    return true;
}

static int train(qlora_ctx* ctx, qlora_model* m, qlora_trainer* t, const char* dir, int64_t steps,
                 bool save) {
    int64_t at = 0;
    size_t size = sizeof at;
    bool exists = false;
    qlora_train_info info;
    if (save && qlora_checkpoint_exists(ctx, dir, &exists) != QLORA_OK) {
        return fail(ctx, "exists");
    }
    if (exists && qlora_checkpoint_load(t, dir, &at, &size) != QLORA_OK) {
        return fail(ctx, "load");
    }
    if (qlora_train_query(t, &info) != QLORA_OK || info.step != at || size != sizeof at) {
        return fail(ctx, "the step differs from the saved one");
    }
    printf("resumed at %lld\n", (long long)at);
    fflush(stdout);
    while (at < steps) {
        if (!step(t, at)) {
            return fail(ctx, "step");
        }
        at++;
        if (save && qlora_checkpoint_save(t, dir, &at, sizeof at) != QLORA_OK) {
            return fail(ctx, "save");
        }
    }
    return print_hash(m) ? 0 : fail(ctx, "reading");
}

int main(int argc, char** argv) {
    if (argc < 3 || strcmp(argv[1], "--help") == 0) {
        fprintf(stderr, "usage: soak_kill DIR STEPS [nosave]\n");
        return 2;
    }
    char why[256] = "";
    qlora_ctx_desc desc;
    qlora_model_config config;
    qlora_model_desc model;
    qlora_train_desc training;
    memset(&desc, 0, sizeof desc);
    memset(&config, 0, sizeof config);
    memset(&model, 0, sizeof model);
    memset(&training, 0, sizeof training);
    desc.require_backend = QLORA_BACKEND_CPU;
    desc.threads = 1;
    desc.error_text = why;
    desc.error_text_size = sizeof why;
    config.family = QLORA_FAMILY_LLAMA;
    config.vocab = 64;
    config.hidden = 32;
    config.intermediate = 48;
    config.layers = 2;
    config.heads = 4;
    config.kv_heads = 2;
    config.head_dim = 8;
    config.max_positions = 64;
    config.rms_eps = 1e-5;
    config.rope.theta = 10000.0;
    model.config = &config;
    model.seed = 3;
    model.rank = 4;
    model.dropout = 0.1f;
    model.tokens = 24;
    training.seed = 9;
    training.lr = 1e-3;
    qlora_ctx* ctx = NULL;
    qlora_model* m = NULL;
    qlora_trainer* t = NULL;
    if (qlora_ctx_create(&desc, &ctx) != QLORA_OK) {
        printf("FAILED %s\n", why);
        return 1;
    }
    if (qlora_model_open(ctx, &model, &m) != QLORA_OK ||
        qlora_trainer_create(m, &training, &t) != QLORA_OK) {
        return fail(ctx, "model");
    }
    int status = train(ctx, m, t, argv[1], strtoll(argv[2], NULL, 10), argc == 3);
    qlora_trainer_destroy(t);
    qlora_model_close(m);
    qlora_ctx_destroy(ctx);
    return status;
}
