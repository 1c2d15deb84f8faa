// train_folder.c - fine-tunes a model folder in Hugging Face format on a data file, with the
// model's own tokenizer and chat format, and saves a PEFT adapter. programs/finetune.c adds
// packing, evaluation, checkpoints and plots; this is its core.
//
//     cc -O2 -I. examples/train_folder.c -o train_folder -ldl -lm -lpthread
//     ./train_folder MODEL data.jsonl adapter
// check: needs a model folder and a data file
#define QLORA_IMPLEMENTATION
#include "qlora.h"
#define QLORA_TEXT_IMPLEMENTATION
#include "qlora_text.h"

#include <stdio.h>
#include <string.h>

enum { TOKENS = 512, PER_STEP = 8, STEPS = 50 };

typedef struct work {
    qlora_ctx* ctx;
    qlora_model* model;
    qlora_trainer* trainer;
    qlora_text* text;
    qlora_text_tok* tok;
    qlora_text_chat* chat;
    qlora_text_data* data;
} work;

// Tokenizer, chat format and samples.
static qlora_result data_open(work* w, const char* folder, const char* file) {
    qlora_text_chat_desc chat = {.folder = folder};
    qlora_text_data_desc data = {.path = file, .chunk_tokens = TOKENS};
    qlora_result r = qlora_text_create(NULL, &w->text);
    r = r == QLORA_OK ? qlora_text_tok_open(w->text, folder, &w->tok) : r;
    chat.tok = w->tok;
    r = r == QLORA_OK ? qlora_text_chat_open(w->text, &chat, &w->chat) : r;
    data.chat = w->chat;
    return r == QLORA_OK ? qlora_text_data_open(w->text, &data, &w->data) : r;
}

static qlora_result model_open(work* w, const char* folder) {
    qlora_ctx_desc desc = {.log = qlora_log_stderr};
    qlora_model_desc model = {.dir = folder, .rank = 16, .tokens = TOKENS};
    qlora_train_desc train = {.lr = 2e-4, .warmup_steps = 3, .total_steps = STEPS};
    qlora_result r = qlora_ctx_create(&desc, &w->ctx);
    r = r == QLORA_OK ? qlora_model_open(w->ctx, &model, &w->model) : r;
    return r == QLORA_OK ? qlora_trainer_create(w->model, &train, &w->trainer) : r;
}

// A sample is valid until the next one is read; a step needs several, so they are copied.
typedef struct sample {
    int32_t ids[TOKENS];
    int32_t labels[TOKENS];
    int32_t length;
} sample;

// The next sample that fits and has something to train on, as a batch of its own.
static bool batch_next(work* w, size_t* at, sample* to, qlora_batch* out) {
    size_t count = qlora_text_data_count(w->data);
    for (size_t tried = 0; tried < count; tried++) {
        qlora_text_sample s;
        if (qlora_text_sample_read(w->data, (*at)++ % count, &s) == QLORA_OK && s.trained > 0 &&
            s.count <= TOKENS) {
            memcpy(to->ids, s.ids, s.count * sizeof to->ids[0]);
            memcpy(to->labels, s.labels, s.count * sizeof to->labels[0]);
            to->length = (int32_t)s.count;
            *out = (qlora_batch){
                .ids = to->ids, .labels = to->labels, .lengths = &to->length, .count = 1};
            return true;
        }
    }
    fprintf(stderr, "train_folder: no sample of at most %d tokens has an answer\n", TOKENS);
    return false;
}

static bool train(work* w) {
    size_t at = 0;
    for (int step = 1; step <= STEPS; step++) {
        qlora_batch batches[PER_STEP];
        sample samples[PER_STEP];
        qlora_train_info info;
        for (int i = 0; i < PER_STEP; i++) {
            if (!batch_next(w, &at, &samples[i], &batches[i])) {
                return false;
            }
        }
        if (qlora_train_step(w->trainer, batches, PER_STEP, &info) != QLORA_OK) {
            return false;
        }
        printf("step %d/%d  loss %.4f\n", step, STEPS, info.loss);
    }
    return true;
}

int main(int argc, char** argv) {
    work w = {0};
    if (argc != 4) {
        fprintf(stderr, "usage: train_folder MODEL DATA ADAPTER\n");
        return 2;
    }
    bool ok = data_open(&w, argv[1], argv[2]) == QLORA_OK;
    if (!ok) {
        fprintf(stderr, "train_folder: %s\n", qlora_text_last_error(w.text));
    } else {
        ok = model_open(&w, argv[1]) == QLORA_OK && train(&w) &&
             qlora_adapter_save(w.model, argv[3], NULL) == QLORA_OK;
        if (ok) {
            printf("saved the adapter in %s\n", argv[3]);
        } else if (qlora_last_error(w.ctx)[0] != '\0') {
            fprintf(stderr, "train_folder: %s\n", qlora_last_error(w.ctx));
        }
    }
    qlora_text_data_close(w.data);
    qlora_text_chat_close(w.chat);
    qlora_text_tok_close(w.tok);
    qlora_text_destroy(w.text);
    qlora_trainer_destroy(w.trainer);
    qlora_model_close(w.model);
    qlora_ctx_destroy(w.ctx);
    return ok ? 0 : 1;
}
