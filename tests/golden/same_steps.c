// same_steps.c - what the options of the programs cannot reach, for tests/gates/same_bits.sh:
// gradients, logits, ways to run a step, ways to generate.
//
//   build/same_steps MODEL OUT STEPS [SETTING...]
//
// Evaluates, trains and generates with a model of tests/golden/same_models.c, and writes the bits
// of all results to files in the folder OUT, which exists. Uses only what qlora.h declares, so that
// it can be compiled with the header of another commit. Exit status 0, 1 with a message, or 2:
// usage.
//
// same_bits.sh also compiles it with the implementation and with lower thresholds, so that models
// this small take the kernels of large ones.
#include "qlora.h" // first: with the implementation in it, it chooses what the system declares

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SEQUENCES = 3, MICRO = 2, LENGTH = 23, TEXTS = 3, NEW_TOKENS = 12 };

typedef enum way { WAY_GRAPH, WAY_EAGER, WAY_MICRO, WAY_SLICES, WAY_PARTS } way;

typedef struct run {
    const char* out;
    qlora_ctx_desc ctx_desc;
    qlora_model_desc model_desc;
    qlora_train_desc train_desc;
    way how;
    long steps;
    qlora_ctx* ctx;
    qlora_model* model;
    qlora_trainer* trainer;
    int32_t ids[MICRO][SEQUENCES * LENGTH];
    int32_t labels[MICRO][SEQUENCES * LENGTH];
    int32_t lengths[MICRO][SEQUENCES];
    qlora_batch batches[MICRO];
    float* values;
    size_t room;
} run;

static bool ok(run* r, qlora_result result) {
    if (result != QLORA_OK) {
        fprintf(stderr, "same_steps: %s\n", qlora_last_error(r->ctx));
    }
    return result == QLORA_OK;
}

// Appends to OUT/NAME.
static bool keep(run* r, const char* name, const void* data, size_t bytes) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", r->out, name);
    FILE* f = fopen(path, "ab");
    bool fine = f != NULL && fwrite(data, 1, bytes, f) == bytes;
    fine = f != NULL && fclose(f) == 0 && fine;
    if (!fine) {
        fprintf(stderr, "same_steps: cannot write %s\n", path);
    }
    return fine;
}

static bool keep_number(run* r, const char* name, double value) {
    return keep(r, name, &value, sizeof value);
}

static bool room(run* r, size_t count) {
    if (count > r->room) {
        free(r->values);
        r->values = (float*)malloc(count * sizeof *r->values);
        r->room = r->values != NULL ? count : 0;
    }
    return count <= r->room;
}

// ---- settings -----------------------------------------------------------------------------------

static const struct {
    const char* word;
    way how;
} ways[] = {{"graph", WAY_GRAPH},
            {"eager", WAY_EAGER},
            {"micro", WAY_MICRO},
            {"slices", WAY_SLICES},
            {"parts", WAY_PARTS}};

static bool setting(run* r, const char* word) {
    for (size_t i = 0; i < sizeof ways / sizeof ways[0]; i++) {
        if (strcmp(word, ways[i].word) == 0) {
            r->how = ways[i].how;
            return true;
        }
    }
    if (strcmp(word, "cpu") == 0) {
        r->ctx_desc.require_backend = QLORA_BACKEND_CPU;
    } else if (strcmp(word, "cuda") == 0) {
        r->ctx_desc.require_backend = QLORA_BACKEND_CUDA;
    } else if (strcmp(word, "no-cublas") == 0) {
        r->ctx_desc.cublas_library = "none";
    } else if (strcmp(word, "tf32") == 0) {
        r->ctx_desc.math = QLORA_MATH_TF32;
    } else if (strcmp(word, "tf32-all") == 0) {
        r->ctx_desc.math = QLORA_MATH_TF32_ALL;
    } else if (strcmp(word, "one-thread") == 0) {
        r->ctx_desc.threads = 1;
    } else if (strcmp(word, "bf16") == 0) {
        r->model_desc.mode = QLORA_MODE_BF16;
    } else if (strcmp(word, "fp8") == 0) {
        r->model_desc.mode = QLORA_MODE_FP8;
    } else if (strcmp(word, "base-fp8") == 0) {
        r->model_desc.base = QLORA_BASE_FP8;
    } else if (strcmp(word, "rank-8") == 0) {
        r->model_desc.rank = 8;
    } else if (strcmp(word, "single-quant") == 0) {
        r->model_desc.single_quant = true;
    } else if (strcmp(word, "dropout") == 0) {
        r->model_desc.dropout = 0.25f;
    } else if (strcmp(word, "chunks") == 0) {
        r->model_desc.head_chunk = 16;
    } else if (strcmp(word, "again") == 0) {
        r->model_desc.recompute = QLORA_CHOICE_ON;
    } else if (strcmp(word, "clip-layers") == 0) {
        r->train_desc.clip = QLORA_CLIP_LAYERS;
    } else {
        return false;
    }
    return true;
}

// ---- training -----------------------------------------------------------------------------------

// Sequences of several lengths; every fourth label is left out.
static void batches_make(run* r) {
    for (int b = 0; b < MICRO; b++) {
        int at = 0;
        for (int s = 0; s < SEQUENCES; s++) {
            int length = LENGTH - 5 * s - 2 * b;
            r->lengths[b][s] = length;
            for (int i = 0; i < length; i++, at++) {
                r->ids[b][at] = 32 + (i * i + 7 * s + 13 * b) % 90;
                r->labels[b][at] = i % 4 == 0 ? -100 : r->ids[b][at];
            }
        }
        memset(&r->batches[b], 0, sizeof r->batches[b]);
        r->batches[b].ids = r->ids[b];
        r->batches[b].labels = r->labels[b];
        r->batches[b].lengths = r->lengths[b];
        r->batches[b].count = SEQUENCES;
    }
}

static bool model_open(run* r, const char* model) {
    r->model_desc.dir = model;
    r->model_desc.rank = r->model_desc.rank != 0 ? r->model_desc.rank : 5;
    r->model_desc.tokens = SEQUENCES * LENGTH;
    r->model_desc.max_sequences = SEQUENCES;
    r->model_desc.accumulate = MICRO;
    r->model_desc.generate_tokens = 3 * LENGTH;
    r->model_desc.generate_sequences = TEXTS;
    r->train_desc.lr = 5e-3;
    r->train_desc.weight_decay = 0.01;
    r->train_desc.warmup_steps = 2;
    r->train_desc.total_steps = r->steps;
    r->train_desc.eager = r->how == WAY_EAGER;
    if (r->model_desc.mode == QLORA_MODE_AUTO) {
        r->model_desc.mode = QLORA_MODE_F32;
    }
    qlora_result made = qlora_ctx_create(&r->ctx_desc, &r->ctx);
    return ok(r, made) && ok(r, qlora_model_open(r->ctx, &r->model_desc, &r->model)) &&
           ok(r, qlora_trainer_create(r->model, &r->train_desc, &r->trainer));
}

static bool gradients(run* r) {
    qlora_model_info info;
    bool fine = ok(r, qlora_model_query(r->model, &info));
    for (int64_t i = 0; fine && i < info.parameters; i++) {
        qlora_parameter_info p;
        fine = ok(r, qlora_parameter_query(r->model, i, &p)) &&
               room(r, (size_t)(p.rows * p.cols)) &&
               ok(r, qlora_gradient_read(r->trainer, i, r->values)) &&
               keep(r, "gradients", r->values, (size_t)(p.rows * p.cols) * sizeof *r->values);
    }
    return fine;
}

// The same step in all ways; they may differ in how the sums of micro-batches are made.
static bool step(run* r) {
    double labels = 0.0;
    bool done = false;
    switch (r->how) {
    case WAY_MICRO:
        for (int b = 0; b < MICRO; b++) {
            labels += qlora_batch_labels(&r->batches[b]);
        }
        for (int b = 0; b < MICRO; b++) {
            if (!ok(r, qlora_train_micro(r->trainer, &r->batches[b], labels))) {
                return false;
            }
        }
        return gradients(r) && ok(r, qlora_train_update(r->trainer));
    case WAY_SLICES:
        if (!ok(r, qlora_train_begin(r->trainer, r->batches, MICRO))) {
            return false;
        }
        while (!done) {
            if (!ok(r, qlora_train_slice(r->trainer, 0.5, &done))) {
                return false;
            }
        }
        return true;
    case WAY_PARTS:
        return ok(r, qlora_train_gradients(r->trainer, r->batches, MICRO)) && gradients(r) &&
               ok(r, qlora_train_update(r->trainer));
    default:
        return ok(r, qlora_train_step(r->trainer, r->batches, MICRO, NULL));
    }
}

static bool train(run* r) {
    bool fine = true;
    for (long i = 0; fine && i < r->steps; i++) {
        qlora_train_info info;
        fine = step(r) && ok(r, qlora_train_query(r->trainer, &info)) &&
               keep_number(r, "steps", info.loss) &&
               keep_number(r, "steps", (double)info.grad_norm) && keep_number(r, "steps", info.lr);
    }
    char path[4096];
    snprintf(path, sizeof path, "%s/checkpoint", r->out);
    return fine && ok(r, qlora_checkpoint_save(r->trainer, path, "here", 4));
}

// ---- evaluation and generation ------------------------------------------------------------------

static bool evaluate(run* r) {
    const qlora_batch* b = &r->batches[0];
    qlora_eval_info info;
    qlora_model_info model;
    double sums[SEQUENCES];
    size_t count = 0;
    bool fine = ok(r, qlora_eval(r->model, b, &info)) &&
                ok(r, qlora_model_query(r->model, &model)) &&
                ok(r, qlora_eval_sequences(r->model, b, sums));
    for (int s = 0; s < SEQUENCES; s++) {
        count += (size_t)r->lengths[0][s];
    }
    count *= fine ? (size_t)model.plan->config.vocab : 0;
    return fine && room(r, count) && ok(r, qlora_eval_logits(r->model, b, r->values)) &&
           keep_number(r, "evaluation", info.loss) && keep(r, "evaluation", sums, sizeof sums) &&
           keep(r, "logits", r->values, count * sizeof *r->values);
}

// The tokens of some texts, one pass for all of them, with their log-probabilities.
static bool texts_run(run* r, qlora_generation** texts) {
    bool ended[TEXTS] = {false, false, false};
    bool fine = true;
    for (int i = 0; fine && i < NEW_TOKENS; i++) {
        qlora_generation* each[TEXTS];
        int32_t tokens[TEXTS];
        bool stopped[TEXTS];
        int place[TEXTS];
        int count = 0;
        for (int t = 0; t < TEXTS; t++) {
            if (!ended[t]) {
                place[count] = t;
                each[count++] = texts[t];
            }
        }
        fine = count == 0 || ok(r, qlora_generate_next_each(each, count, tokens, stopped));
        for (int k = 0; fine && k < count; k++) {
            double log = 0.0;
            ended[place[k]] = stopped[k];
            fine = keep(r, "texts", &tokens[k], sizeof tokens[k]) &&
                   (stopped[k] ||
                    (ok(r, qlora_generate_logprob(each[k], &log)) && keep_number(r, "texts", log)));
        }
    }
    return fine;
}

// Greedily; with a sampler, from the first one's prompt; with a penalty, and another turn.
static bool generate(run* r) {
    qlora_generation* texts[TEXTS] = {NULL, NULL, NULL};
    bool fine = true;
    for (int t = 0; fine && t < TEXTS; t++) {
        qlora_generate_desc desc;
        memset(&desc, 0, sizeof desc);
        desc.prompt = r->ids[0];
        desc.prompt_tokens = LENGTH - (t == 2 ? 4 : 0);
        desc.max_tokens = NEW_TOKENS;
        desc.seed = 11;
        if (t == 1) {
            desc.temperature = 0.75f;
            desc.top_k = 40;
            desc.top_p = 0.875f;
            desc.min_p = 0.03125f;
            desc.share = texts[0];
        } else if (t == 2) {
            desc.repetition_penalty = 1.25f;
        }
        fine = ok(r, qlora_generate_begin(r->model, &desc, &texts[t]));
    }
    fine = fine && texts_run(r, texts);
    for (int t = 0; fine && t < TEXTS; t++) {
        fine = ok(r, qlora_generate_feed(texts[t], r->ids[1], 5 + t));
    }
    fine = fine && texts_run(r, texts);
    for (int t = 0; t < TEXTS; t++) {
        fine = ok(r, qlora_generate_end(texts[t])) && fine;
    }
    return fine;
}

int main(int argc, char** argv) {
    static run r;
    bool known = argc >= 4;
    for (int i = 4; i < argc; i++) {
        known = setting(&r, argv[i]) && known;
    }
    r.steps = known ? atol(argv[3]) : 0;
    if (r.steps < 1) {
        fprintf(stderr, "usage: same_steps MODEL OUT STEPS [SETTING...]\n");
        return 2;
    }
    r.out = argv[2];
    batches_make(&r);
    bool fine =
        model_open(&r, argv[1]) && evaluate(&r) && train(&r) && evaluate(&r) && generate(&r);
    qlora_trainer_destroy(r.trainer);
    qlora_model_close(r.model);
    qlora_ctx_destroy(r.ctx);
    free(r.values);
    return fine ? 0 : 1;
}
