// peft_side.c - for tests/peft_diff.py, rope_check.py and fp8_check.py: our side of the comparison.
//
//   peft_side [--rope-scale TYPE:F] MODEL ADAPTER|- OUT ID...
//
// Opens a model with its adapter in float32, writes OUT/logits.bin (tokens and vocab as int64, then
// the logits of the ids as float) and merges both into OUT/merged, also in float32. The status is 3
// if the model or the adapter is refused; the reason is then on standard output.
#define QLORA_IMPLEMENTATION
#include "qlora.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST 256

static int fail(qlora_ctx* ctx, int status) {
    printf("%s\n", qlora_last_error(ctx));
    return status;
}

static bool logits_write(const char* dir, int32_t tokens, int64_t vocab, const float* logits) {
    char path[600];
    snprintf(path, sizeof path, "%.500s/logits.bin", dir);
    FILE* f = fopen(path, "wb");
    int64_t head[2] = {tokens, vocab};
    size_t count = (size_t)(tokens * vocab);
    bool ok =
        f != NULL && fwrite(head, sizeof head, 1, f) == 1 && fwrite(logits, 4, count, f) == count;
    return f != NULL && fclose(f) == 0 && ok;
}

static bool merge(qlora_model* model, const char* dir) {
    char path[600];
    qlora_merge_desc d;
    memset(&d, 0, sizeof d);
    snprintf(path, sizeof path, "%.500s/merged", dir);
    d.dir = path;
    d.dtype = QLORA_F32;
    return qlora_merge_save(model, &d) == QLORA_OK;
}

int main(int argc, char** argv) {
    int32_t ids[MOST];
    const char* scale = NULL;
    if (argc > 3 && strcmp(argv[1], "--rope-scale") == 0) {
        scale = argv[2];
        argv += 2;
        argc -= 2;
    }
    int32_t count = argc - 4;
    if (argc < 5 || count > MOST) {
        fprintf(stderr, "usage: peft_side [--rope-scale TYPE:F] MODEL ADAPTER|- OUT ID...\n");
        return 2;
    }
    for (int32_t i = 0; i < count; i++) {
        ids[i] = (int32_t)strtol(argv[4 + i], NULL, 10);
    }
    qlora_ctx* ctx = NULL;
    qlora_ctx_desc c;
    qlora_model_desc d;
    memset(&c, 0, sizeof c);
    memset(&d, 0, sizeof d);
    c.require_backend = QLORA_BACKEND_CPU;
    c.threads = 1;
    if (qlora_ctx_create(&c, &ctx) != QLORA_OK) {
        return 1;
    }
    bool bare = strcmp(argv[2], "-") == 0;
    d.dir = argv[1];
    d.rope_scale = scale;
    d.adapter = bare ? NULL : argv[2];
    d.rank = bare ? -1 : 0;
    d.base = QLORA_BASE_32BIT;
    d.mode = QLORA_MODE_F32;
    d.purpose = QLORA_PURPOSE_EVALUATE;
    d.tokens = count;
    d.max_length = count;
    d.max_sequences = 1;
    qlora_model* model = NULL;
    if (qlora_model_open(ctx, &d, &model) != QLORA_OK) {
        return fail(ctx, 3);
    }
    qlora_model_info info;
    qlora_batch b;
    memset(&b, 0, sizeof b);
    b.ids = ids;
    b.labels = ids;
    b.lengths = &count;
    b.count = 1;
    if (qlora_model_query(model, &info) != QLORA_OK) {
        return fail(ctx, 1);
    }
    int64_t vocab = info.plan->config.vocab;
    float* logits = (float*)malloc((size_t)(count * vocab) * 4);
    if (logits == NULL || qlora_eval_logits(model, &b, logits) != QLORA_OK ||
        !logits_write(argv[3], count, vocab, logits) || (!bare && !merge(model, argv[3]))) {
        return fail(ctx, 1);
    }
    free(logits);
    qlora_model_close(model);
    return qlora_ctx_destroy(ctx) == QLORA_OK ? 0 : 1;
}
