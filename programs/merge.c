// merge: a model and a LoRA adapter become one model, or a GGUF adapter for llama.cpp.
//
//   cc -O2 -I. -o merge programs/merge.c -ldl -lm -lpthread
//   ./merge --model DIR --adapter DIR --out DIR
//   ./merge --model DIR --adapter DIR --gguf FILE
//
// It calls the public functions of qlora.h only.
#define QLORA_IMPLEMENTATION
#include "qlora.h"

#define PROGRAM "merge"
#include "options.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

// ---- the program ------------------------------------------------------------------------------

typedef struct options {
    const char* model;
    const char* adapter;
    const char* out;
    const char* gguf;
    double shard;
    double threads;
    int backend;
    int base;
    int dtype;
    bool verbose;
    bool help;
} options;

typedef struct progress {
    time_t start;
    const char* what;
    int percent;
} progress;

// One line for each tenth of what takes long.
static bool on_progress(void* user, const char* what, uint64_t done, uint64_t total) {
    progress* p = (progress*)user;
    int percent = total > 0 ? (int)(100.0 * (double)done / (double)total) / 10 * 10 : 100;
    bool next = p->what == NULL || strcmp(p->what, what) != 0 || percent > p->percent;
    if (next && difftime(time(NULL), p->start) > 2.0) {
        fprintf(stderr, "%s: %d%%\n", what, percent);
        p->percent = percent;
    }
    p->what = what;
    return true;
}

static bool lib(qlora_ctx* ctx, qlora_result r) {
    return r == QLORA_OK || fail("%s", qlora_last_error(ctx));
}

// Norms that were trained lie beside the adapter.
static bool norms_exist(const char* adapter) {
    char path[1024];
    snprintf(path, sizeof path, "%s/trained_norms.safetensors", adapter != NULL ? adapter : "");
    FILE* file = adapter != NULL ? fopen(path, "rb") : NULL;
    if (file != NULL) {
        fclose(file);
    }
    return file != NULL;
}

// A file that is there is replaced only when it is a GGUF itself: --gguf given by mistake must not
// cost the model or the data.
static bool gguf_free(const char* path) {
    char magic[4];
    FILE* file = fopen(path, "rb");
    if (file == NULL) {
        return true; // what stands in the way of writing is told later
    }
    bool ours = fread(magic, 1, sizeof magic, file) == sizeof magic &&
                memcmp(magic, "GGUF", sizeof magic) == 0;
    fclose(file);
    return ours || fail("--gguf: %s is there already and is not a GGUF file", path);
}

static bool options_check(const options* o) {
    if (o->model == NULL || o->adapter == NULL) {
        return fail("%s DIR is missing; --help lists the options",
                    o->model == NULL ? "--model" : "--adapter");
    }
    if ((o->out != NULL) == (o->gguf != NULL)) {
        return fail(
            "give --out DIR for a merged model, or --gguf FILE for an adapter of llama.cpp");
    }
    return o->gguf == NULL || gguf_free(o->gguf);
}

static bool run(const options* o, qlora_ctx* ctx) {
    static const qlora_dtype types[] = {QLORA_BF16, QLORA_F16, QLORA_F32};
    progress p;
    qlora_model_desc m;
    qlora_train_desc t;
    qlora_model* model = NULL;
    memset(&p, 0, sizeof p);
    p.start = time(NULL);
    memset(&m, 0, sizeof m);
    memset(&t, 0, sizeof t);
    m.dir = o->model;
    m.adapter = o->adapter;
    m.train_norms = norms_exist(o->adapter);
    m.mode = QLORA_MODE_F32;
    m.base = QLORA_BASE_NF4;
    m.progress = on_progress;
    m.progress_user = &p;
    t.no_training = true; // the model computes nothing here: the smallest plan will do
    t.tokens = 1;
    t.cache = QLORA_CHOICE_OFF;
    bool ok = lib(ctx, qlora_model_open(ctx, &m, &t, NULL, &model));
    if (ok && o->gguf != NULL) {
        ok = lib(ctx, qlora_adapter_save_gguf(model, o->gguf));
    } else if (ok) {
        ok = lib(ctx, qlora_merge_save(model, o->out, types[o->dtype], (qlora_merge_base)o->base,
                                       (uint64_t)o->shard, on_progress, &p));
    }
    ok = lib(ctx, qlora_model_close(model)) && ok;
    if (ok) {
        printf("%s is ready\n", o->gguf != NULL ? o->gguf : o->out);
    }
    return ok;
}

int main(int argc, char** argv) {
    options o;
    memset(&o, 0, sizeof o);
    o.backend = QLORA_BACKEND_CPU;
    // clang-format off
    const option table[] = {
        TEXT("model", "DIR", &o.model, "the base model's folder"),
        TEXT("adapter", "DIR", &o.adapter, "the PEFT adapter"),
        TEXT("out", "DIR", &o.out, "where the merged model goes: a folder without one"),
        TEXT("gguf", "FILE", &o.gguf, "instead, the adapter for llama.cpp --lora"),
        CHOICE("base", "original|trained", &o.base, "which weights are added to (below): original"),
        CHOICE("dtype", "bf16|f16|f32", &o.dtype, "of the merged weights: bf16"),
        NUMBER("shard", "SIZE", &o.shard, 1048576, 1e15, "largest file: 5 GB"),
        CHOICE("backend", "auto|cpu|cuda", &o.backend, "where 4-bit weights are made: cpu"),
        NUMBER("threads", "N", &o.threads, 1, 64, "of the CPU; one a core"),
        FLAG("verbose", &o.verbose, "show what the library logs"),
        FLAG("help", &o.help, "this text"),
    };
    // clang-format on
    const size_t count = sizeof table / sizeof table[0];
    if (!options_read(table, count, argc, argv)) {
        return 1;
    }
    if (o.help) {
        printf("usage: merge --model DIR --adapter DIR --out DIR | --gguf FILE [options]\n\n");
        options_print(table, count);
        printf("\n--base trained: onto what the 4-bit weights stand for, which is what was trained "
               "on.\n"
               "An interrupted export has no config.json. Exit status: 0, or 1 after an error.\n");
        return 0;
    }
    if (!options_check(&o)) {
        return 1;
    }
    static char why[512];
    qlora_ctx_desc d;
    memset(&d, 0, sizeof d);
    d.require_backend = (qlora_backend)o.backend;
    d.threads = (int32_t)o.threads;
    d.log = o.verbose ? qlora_log_stderr : NULL;
    d.error_text = why;
    d.error_text_size = sizeof why;
    qlora_ctx* ctx = NULL;
    if (qlora_ctx_create(&d, &ctx) != QLORA_OK) {
        fail("%s", why);
        return 1;
    }
    bool ok = run(&o, ctx);
    qlora_ctx_destroy(ctx);
    return ok ? 0 : 1;
}
