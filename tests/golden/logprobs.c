// logprobs.c - prints the log-probability of each token of a text, for tests/llama_check.py.
//
//   build/logprobs MODEL [--adapter DIR] [--base 16|32|nf4] [--length N] < ids
//
// Reads whole numbers from standard input. They are cut into sequences of N (256); for each token
// but the first of a sequence, a line with its natural log-probability is printed.
#define QLORA_STATIC
#define QLORA_IMPLEMENTATION
#include "qlora.h"

static int fail(const char* what) {
    fprintf(stderr, "logprobs: %s\n", what);
    return 1;
}

// The log-probability of each token given those before it.
static bool print_sequence(qlora_model* model, const int32_t* ids, int32_t count, int64_t vocab,
                           float* logits) {
    qlora_batch batch;
    memset(&batch, 0, sizeof batch);
    batch.ids = ids;
    batch.labels = ids;
    batch.lengths = &count;
    batch.count = 1;
    if (qlora_eval_logits(model, &batch, logits) != QLORA_OK) {
        return false;
    }
    for (int32_t i = 0; i + 1 < count; i++) {
        const float* row = logits + (int64_t)i * vocab;
        double most = (double)row[0];
        double sum = 0.0;
        for (int64_t k = 1; k < vocab; k++) {
            most = (double)row[k] > most ? (double)row[k] : most;
        }
        for (int64_t k = 0; k < vocab; k++) {
            sum += exp((double)row[k] - most);
        }
        printf("%.6f\n", (double)row[ids[i + 1]] - most - log(sum));
    }
    return true;
}

int main(int argc, char** argv) {
    qlora_ctx_desc machine;
    qlora_model_desc desc;
    qlora_ctx* ctx = NULL;
    qlora_model* model = NULL;
    qlora_model_info info;
    static int32_t ids[1 << 20];
    int32_t count = 0;
    int length = 256;
    memset(&machine, 0, sizeof machine);
    memset(&desc, 0, sizeof desc);
    desc.base = QLORA_BASE_16BIT;
    desc.rank = -1;
    desc.purpose = QLORA_PURPOSE_EVALUATE;
    for (int i = 1; i < argc; i++) {
        bool more = i + 1 < argc;
        if (more && strcmp(argv[i], "--adapter") == 0) {
            desc.adapter = argv[++i];
            desc.rank = 0;
        } else if (more && strcmp(argv[i], "--base") == 0) {
            const char* base = argv[++i];
            desc.base = strcmp(base, "nf4") == 0  ? QLORA_BASE_NF4
                        : strcmp(base, "32") == 0 ? QLORA_BASE_32BIT
                                                  : QLORA_BASE_16BIT;
        } else if (more && strcmp(argv[i], "--length") == 0) {
            length = atoi(argv[++i]);
        } else {
            desc.dir = argv[i];
        }
    }
    if (desc.dir == NULL || length < 2) {
        return fail("usage: logprobs MODEL [--adapter DIR] [--base 16|32|nf4] [--length N] < ids");
    }
    int value = 0;
    while (count < 1 << 20 && scanf("%d", &value) == 1) {
        ids[count++] = value;
    }
    desc.tokens = length;
    if (qlora_ctx_create(&machine, &ctx) != QLORA_OK) {
        return fail("cannot create a context");
    }
    if (qlora_model_open(ctx, &desc, &model) != QLORA_OK ||
        qlora_model_query(model, &info) != QLORA_OK) {
        return fail(qlora_last_error(ctx));
    }
    int64_t vocab = info.plan->config.vocab;
    float* logits = (float*)malloc((size_t)(length * vocab) * sizeof *logits);
    for (int32_t at = 0; logits != NULL && at < count; at += length) {
        int32_t n = count - at < length ? count - at : length;
        if (!print_sequence(model, ids + at, n, vocab, logits)) {
            return fail(qlora_last_error(ctx));
        }
    }
    free(logits);
    qlora_model_close(model);
    qlora_ctx_destroy(ctx);
    return 0;
}
