// merge: merges a LoRA adapter into its model, or converts it to a GGUF adapter for llama.cpp.
//
//   cc -O2 -I. -o merge programs/merge.c -ldl -lm -lpthread
//   ./merge --model DIR --adapter DIR --out DIR
//   ./merge --model DIR --adapter DIR --gguf FILE
//
// It calls only the public functions of qlora.h.
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

// Prints one line per 10% of a long operation.
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
    return r == QLORA_OK || fail("%s", message_text(qlora_last_error(ctx)));
}

// Trained norms are stored next to the adapter.
static bool norms_exist(const char* adapter) {
    char path[1024];
    snprintf(path, sizeof path, "%s/trained_norms.safetensors", adapter != NULL ? adapter : "");
    FILE* file = adapter != NULL ? fopen(path, "rb") : NULL;
    if (file != NULL) {
        fclose(file);
    }
    return file != NULL;
}

// An existing file is replaced only if it is a GGUF file itself, so that a mistaken --gguf cannot
// destroy the model or the data.
static bool gguf_free(const char* path) {
    char magic[4];
    FILE* file = fopen(path, "rb");
    if (file == NULL) {
        return true; // other faults are reported when the file is written
    }
    bool ours = fread(magic, 1, sizeof magic, file) == sizeof magic &&
                memcmp(magic, "GGUF", sizeof magic) == 0;
    fclose(file);
    return ours || fail("--gguf %s: the file exists and is not a GGUF file", path);
}

static bool options_check(const options* o) {
    if (o->model == NULL || o->adapter == NULL) {
        return fail("%s DIR is required; see --help", o->model == NULL ? "--model" : "--adapter");
    }
    if ((o->out != NULL) == (o->gguf != NULL)) {
        return fail(o->out != NULL ? "--out and --gguf cannot be used together"
                                   : "either --out DIR (a merged model) or --gguf FILE (an adapter "
                                     "for llama.cpp) is required");
    }
    if (o->gguf != NULL && !gguf_free(o->gguf)) {
        return false;
    }
    if (file_missing(o->model, "config.json")) {
        return fail("--model %s: config.json not found", o->model);
    }
    if (file_missing(o->adapter, "adapter_config.json")) {
        return fail("--adapter %s: adapter_config.json not found", o->adapter);
    }
    return true;
}

static bool run(const options* o, qlora_ctx* ctx) {
    static const qlora_dtype types[] = {QLORA_BF16, QLORA_F16, QLORA_F32};
    progress p;
    qlora_model_desc m;
    qlora_merge_desc d;
    qlora_model* model = NULL;
    memset(&p, 0, sizeof p);
    p.start = time(NULL);
    memset(&m, 0, sizeof m);
    memset(&d, 0, sizeof d);
    m.dir = o->model;
    m.adapter = o->adapter;
    m.train_norms = norms_exist(o->adapter);
    m.mode = QLORA_MODE_F32;
    m.base = QLORA_BASE_NF4;
    m.progress = on_progress;
    m.progress_user = &p;
    m.purpose = QLORA_PURPOSE_EVALUATE; // nothing is computed, so the smallest plan will do
    m.tokens = 1;
    m.cache = QLORA_CHOICE_OFF;
    bool ok = lib(ctx, qlora_model_open(ctx, &m, &model));
    if (ok && o->gguf != NULL) {
        ok = lib(ctx, qlora_adapter_save_gguf(model, o->gguf, NULL));
    } else if (ok) {
        d.dir = o->out;
        d.dtype = types[o->dtype];
        d.base = (qlora_merge_base)o->base;
        d.shard_bytes = (uint64_t)o->shard;
        d.progress = on_progress;
        d.progress_user = &p;
        ok = lib(ctx, qlora_merge_save(model, &d));
    }
    ok = lib(ctx, qlora_model_close(model)) && ok;
    if (ok) {
        printf("wrote %s\n", o->gguf != NULL ? o->gguf : o->out);
    }
    return ok;
}

int main(int argc, char** argv) {
    options o;
    memset(&o, 0, sizeof o);
    o.backend = QLORA_BACKEND_CPU;
    // clang-format off
    const option table[] = {
        TEXT("model", "DIR", &o.model, "folder of the base model (required)"),
        TEXT("adapter", "DIR", &o.adapter, "folder of the PEFT adapter (required)"),
        TEXT("out", "DIR", &o.out, "output folder; must not already contain a model"),
        TEXT("gguf", "FILE", &o.gguf, "write a GGUF adapter for llama.cpp (--lora) instead"),
        CHOICE("base", "original|trained", &o.base,
               "weights to merge into, see below (default original)"),
        CHOICE("dtype", "bf16|f16|f32", &o.dtype, "data type of the merged weights (default bf16)"),
        NUMBER("shard", "SIZE", &o.shard, 1048576.0, 1125899906842624.0,
               "maximum file size in bytes, e.g. 2G for 2 GiB (default 5 GB)"),
        CHOICE("backend", "auto|cpu|cuda", &o.backend, "where the base is quantised (default cpu)"),
        NUMBER("threads", "N", &o.threads, 1, 64, "CPU threads (default: one per core)"),
        FLAG("verbose", &o.verbose, "print the library's log messages"),
        FLAG("help", &o.help, "show this help"),
    };
    // clang-format on
    const size_t count = sizeof table / sizeof table[0];
    if (!options_read(table, count, argc, argv)) {
        return 1;
    }
    if (o.help) {
        printf("usage: merge --model DIR --adapter DIR --out DIR | --gguf FILE [options]\n\n");
        options_print(table, count);
        printf("\n--base original merges into the weights in --model; --base trained merges into\n"
               "the dequantised 4-bit weights that the adapter was trained on.\n"
               "An interrupted export has no config.json.\n"
               "Exit status: 0 on success, 1 on error.\n");
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
        fail("%s", message_text(why));
        return 1;
    }
    bool ok = run(&o, ctx);
    qlora_ctx_destroy(ctx);
    return ok ? 0 : 1;
}
