// dpo_side.c - the loss and the gradients of one DPO step, for tests/trl_check.py, or of an ordinary
// one (beta is 0), for tests/rope_check.py.
//
//     build/dpo_side MODEL ADAPTER IN OUT [TYPE:F]
//
// The last argument scales the rotation. IN: double beta, sft_alpha; int64 sequences, which alternate between chosen and rejected texts,
// tokens; int32 lengths[sequences], ids[tokens], labels[tokens]. OUT: double loss; then for every
// trained tensor its name (192 bytes), int64 rows, cols and float gradients[rows][cols].
#define QLORA_IMPLEMENTATION
#include "qlora.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct step {
    double numbers[2];
    int64_t sizes[2];
    int32_t* ints; // lengths, ids, labels
} step;

static bool step_read(const char* path, step* s) {
    FILE* f = fopen(path, "rb");
    bool good = f != NULL && fread(s->numbers, 1, 16, f) == 16 && fread(s->sizes, 1, 16, f) == 16;
    size_t count = good ? (size_t)(s->sizes[0] + 2 * s->sizes[1]) : 0;
    s->ints = (int32_t*)malloc(count * sizeof *s->ints + 4);
    good = good && s->ints != NULL && fread(s->ints, sizeof *s->ints, count, f) == count;
    if (f != NULL) {
        fclose(f);
    }
    return good;
}

static bool gradients_write(qlora_model* model, qlora_trainer* trainer, FILE* f) {
    qlora_model_info info;
    bool good = qlora_model_query(model, &info) == QLORA_OK;
    for (int64_t i = 0; good && i < info.parameters; i++) {
        qlora_parameter_info p;
        good = qlora_parameter_query(model, i, &p) == QLORA_OK;
        size_t n = good ? (size_t)(p.rows * p.cols) : 0;
        float* values = (float*)malloc(n * sizeof *values + 4);
        good = good && values != NULL && qlora_gradient_read(trainer, i, values) == QLORA_OK &&
               fwrite(p.name, 1, sizeof p.name, f) == sizeof p.name &&
               fwrite(&p.rows, 8, 1, f) == 1 && fwrite(&p.cols, 8, 1, f) == 1 &&
               fwrite(values, sizeof *values, n, f) == n;
        free(values);
    }
    return good;
}

// The gradients are read before the update, the loss after it.
static bool run(qlora_model* model, const step* s, FILE* f) {
    qlora_train_desc d;
    qlora_train_info info;
    qlora_batch b;
    qlora_trainer* trainer = NULL;
    memset(&d, 0, sizeof d);
    memset(&b, 0, sizeof b);
    d.method = s->numbers[0] > 0.0 ? QLORA_METHOD_DPO : QLORA_METHOD_SFT;
    d.beta = s->numbers[0];
    d.sft_alpha = s->numbers[1];
    b.lengths = s->ints;
    b.ids = s->ints + s->sizes[0];
    b.labels = b.ids + s->sizes[1];
    b.count = s->sizes[0];
    double loss = 0.0;
    bool good = qlora_trainer_create(model, &d, &trainer) == QLORA_OK &&
                qlora_train_gradients(trainer, &b, 1) == QLORA_OK &&
                fwrite(&loss, sizeof loss, 1, f) == 1 && gradients_write(model, trainer, f) &&
                qlora_train_update(trainer) == QLORA_OK &&
                qlora_train_query(trainer, &info) == QLORA_OK;
    loss = good ? info.loss : 0.0;
    good = good && fseek(f, 0, SEEK_SET) == 0 && fwrite(&loss, sizeof loss, 1, f) == 1;
    return qlora_trainer_destroy(trainer) == QLORA_OK && good;
}

int main(int argc, char** argv) {
    qlora_ctx* ctx = NULL;
    qlora_model* model = NULL;
    qlora_ctx_desc c;
    qlora_model_desc d;
    step s;
    memset(&c, 0, sizeof c);
    memset(&d, 0, sizeof d);
    memset(&s, 0, sizeof s);
    if (argc < 5 || argc > 6 || !step_read(argv[3], &s)) {
        fprintf(stderr, "usage: dpo_side MODEL ADAPTER IN OUT [TYPE:F]\n");
        return 2;
    }
    c.require_backend = QLORA_BACKEND_CPU;
    d.dir = argv[1];
    d.adapter = argv[2];
    d.rope_scale = argc == 6 ? argv[5] : NULL;
    d.base = QLORA_BASE_32BIT;
    d.tokens = s.sizes[1];
    d.max_sequences = s.sizes[0];
    FILE* f = fopen(argv[4], "wb");
    bool good = f != NULL && qlora_ctx_create(&c, &ctx) == QLORA_OK &&
                qlora_model_open(ctx, &d, &model) == QLORA_OK && run(model, &s, f);
    if (!good && ctx != NULL) {
        fprintf(stderr, "%s\n", qlora_last_error(ctx));
    }
    good = f != NULL && fclose(f) == 0 && good;
    qlora_model_close(model);
    qlora_ctx_destroy(ctx);
    free(s.ints);
    return good ? 0 : 1;
}
