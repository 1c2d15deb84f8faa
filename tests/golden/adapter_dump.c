// adapter_dump.c - for tests/peft_check.py: trains an adapter on a fixture's base for a few steps,
// saves it as a PEFT folder, and writes the resulting logits.
//
//   adapter_dump FIXTURE OUT plain|rslora|dora|embed|both|rows|norms|ADAPTER
//
// plain, rslora, dora: a new adapter; embed, both, rows, norms: with a trained embedding, also the
// head, some rows, or the norms; ADAPTER: continues from a PEFT folder. The status is 3 if the model
// is refused. The adapter is written to OUT, with logits.bin: tokens and vocab as int64, the ids of
// one sequence as int32, their logits as float.
#define QLORA_STATIC
#define QLORA_IMPLEMENTATION
#include "qlora.h"

#include <stdio.h>
#include <stdlib.h>

#define MOST 32

static int fail(qlora_ctx* ctx, const char* what) {
    printf("adapter_dump: %s: %s\n", what, qlora_last_error(ctx));
    return 1;
}

// One projection of each stack: the first, but the last of gate and up.
static uint32_t some_targets(qlora_ctx* ctx, const char* dir) {
    qlora_model_config config;
    uint32_t targets = 0;
    if (qlora_config_read(ctx, dir, &config) != QLORA_OK) {
        return 0;
    }
    const qlora__layout* layout = qlora__arch_of(config.family)->layout;
    for (int g = 0; g < QLORA__GROUPS; g++) {
        int last = g == QLORA__GATE_UP ? layout->groups[g].count - 1 : 0;
        targets |= 1u << layout->rows[layout->groups[g].first + last].bit;
    }
    return targets;
}

static bool train(qlora_trainer* t, const qlora_batch* b) {
    for (int i = 0; i < 5; i++) {
        if (qlora_train_micro(t, b, qlora_batch_labels(b)) != QLORA_OK ||
            qlora_train_update(t) != QLORA_OK) {
            return false;
        }
    }
    return true;
}

static bool write_logits(const char* dir, const qlora_batch* b, int64_t vocab,
                         const float* logits) {
    char path[600];
    snprintf(path, sizeof path, "%.500s/logits.bin", dir);
    FILE* f = fopen(path, "wb");
    if (f == NULL) {
        return false;
    }
    int64_t head[2] = {b->lengths[0], vocab};
    size_t n = (size_t)head[0];
    bool good = fwrite(head, sizeof head, 1, f) == 1 && fwrite(b->ids, 4, n, f) == n &&
                fwrite(logits, 4, n * (size_t)vocab, f) == n * (size_t)vocab;
    return fclose(f) == 0 && good;
}

int main(int argc, char** argv) {
    if (argc != 4) {
        fprintf(stderr,
                "usage: adapter_dump FIXTURE OUT "
                "plain|rslora|dora|embed|both|rows|norms|ADAPTER\n");
        return 2;
    }
    static const char* const kinds[] = {"plain", "rslora", "dora", "embed", "both", "rows", "norms"};
    int kind = 0;
    while (kind < 7 && strcmp(argv[3], kinds[kind]) != 0) {
        kind++;
    }
    bool rslora = kind == 1;
    bool made = kind < 7;
    char path[600];
    qlora_ctx_desc desc;
    qlora_model_desc model;
    qlora_train_desc training;
    memset(&desc, 0, sizeof desc);
    memset(&model, 0, sizeof model);
    memset(&training, 0, sizeof training);
    desc.require_backend = QLORA_BACKEND_CPU;
    qlora_ctx* ctx = NULL;
    if (qlora_ctx_create(&desc, &ctx) != QLORA_OK) {
        return fail(ctx, "context");
    }
    snprintf(path, sizeof path, "%.500s/golden.safetensors", argv[1]);
    static qlora__st golden;
    if (qlora__st_open(&ctx->env, path, &golden) != QLORA_OK) {
        return fail(ctx, "golden");
    }
    const qlora__st_tensor* given = qlora__st_find(&golden, "input_ids");
    if (given == NULL || given->dtype != QLORA__ST_I32 || given->rank != 3) {
        printf("adapter_dump: the fixture has no input_ids\n");
        return 1;
    }
    int32_t ids[MOST];
    int32_t length = given->shape[2] < MOST ? (int32_t)given->shape[2] : MOST;
    memcpy(ids, given->data, (size_t)length * 4);
    qlora_batch b;
    memset(&b, 0, sizeof b);
    b.ids = ids;
    b.labels = ids;
    b.lengths = &length;
    b.count = 1;
    snprintf(path, sizeof path, "%.500s/model", argv[1]);
    model.dir = path;
    model.adapter = made ? NULL : argv[3];
    model.base = QLORA_BASE_32BIT;
    model.mode = QLORA_MODE_F32;
    model.rank = rslora ? 6 : 8;
    model.alpha = rslora ? 3.5f : 16.0f;
    model.rslora = rslora;
    model.targets = rslora ? some_targets(ctx, path) : 0;
    model.tokens = MOST;
    model.dora = kind == 2;
    model.train_norms = kind == 6;
    model.save_modules = kind == 3   ? QLORA_SAVE_EMBED
                         : kind == 4 ? QLORA_SAVE_EMBED | QLORA_SAVE_HEAD
                                     : 0;
    int32_t rows[2] = {ids[3], ids[0] != ids[3] ? ids[0] : ids[3] + 1};
    model.token_rows = rows;
    model.token_row_count = kind == 5 ? 2 : 0;
    training.lr = 0.02;
    qlora_model* m = NULL;
    qlora_trainer* t = NULL;
    qlora_result opened = qlora_model_open(ctx, &model, &m);
    if (opened == QLORA_ERR_UNSUPPORTED) {
        fail(ctx, "opening");
        return 3;
    }
    if (opened != QLORA_OK || qlora_trainer_create(m, &training, &t) != QLORA_OK || !train(t, &b)) {
        return fail(ctx, "training");
    }
    qlora_model_info info;
    if (qlora_model_query(m, &info) != QLORA_OK) {
        return fail(ctx, "query");
    }
    int64_t vocab = info.plan->config.vocab;
    qlora_adapter_desc saved;
    memset(&saved, 0, sizeof saved);
    saved.base_name = path;
    float* logits = (float*)malloc((size_t)(length * vocab) * 4);
    if (qlora_eval_logits(m, &b, logits) != QLORA_OK ||
        qlora_adapter_save(m, argv[2], &saved) != QLORA_OK) {
        return fail(ctx, "saving");
    }
    bool written = write_logits(argv[2], &b, vocab, logits);
    free(logits);
    qlora__st_close(&ctx->env, &golden);
    qlora_trainer_destroy(t);
    qlora_model_close(m);
    return qlora_ctx_destroy(ctx) == QLORA_OK && written ? 0 : 1;
}
