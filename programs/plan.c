// plan: which models, sequence lengths and batch sizes can be trained in how much memory.
//
//   cc -O2 -I. -o plan programs/plan.c -ldl -lm -lpthread
//   ./plan --memory 8G                          (every model it knows)
//   ./plan --shape llama-3.1-8b --memory 24G    (one of them)
//   ./plan --model DIR                          (a folder, on the card at hand)
//
// It calls the public functions of qlora.h only; planning needs no GPU.
#define QLORA_IMPLEMENTATION
#include "qlora.h"

#define PROGRAM "plan"
#include "options.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- models of public shape -------------------------------------------------------------------

typedef struct shape {
    const char* name;
    bool qwen; // biases of q, k and v
    int64_t hidden;
    int64_t layers;
    int64_t heads;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t intermediate;
    int64_t vocab;
    bool tied;
} shape;

static const shape shapes[] = {
    {"qwen2.5-0.5b", true, 896, 24, 14, 2, 64, 4864, 151936, true},
    {"llama-3.2-1b", false, 2048, 16, 32, 8, 64, 8192, 128256, true},
    {"qwen2.5-1.5b", true, 1536, 28, 12, 2, 128, 8960, 151936, true},
    {"qwen2.5-7b", true, 3584, 28, 28, 4, 128, 18944, 152064, false},
    {"llama-3.1-8b", false, 4096, 32, 32, 8, 128, 14336, 128256, false},
    {"llama-3.1-70b", false, 8192, 80, 64, 8, 128, 28672, 128256, false},
};
enum { SHAPES = sizeof shapes / sizeof shapes[0] };

static qlora_model_config config_of(const shape* s) {
    qlora_model_config c;
    memset(&c, 0, sizeof c);
    c.family = s->qwen ? QLORA_FAMILY_QWEN2 : QLORA_FAMILY_LLAMA;
    c.vocab = s->vocab;
    c.hidden = s->hidden;
    c.intermediate = s->intermediate;
    c.layers = s->layers;
    c.heads = s->heads;
    c.kv_heads = s->kv_heads;
    c.head_dim = s->head_dim;
    c.max_positions = 131072;
    c.rms_eps = 1e-6;
    c.rope.theta = 1e6; // plays no part in how much memory is needed
    c.rope_sliding = c.rope;
    c.tied = s->tied;
    c.qkv_bias = s->qwen;
    return c;
}

// ---- the program ------------------------------------------------------------------------------

typedef struct options {
    const char* model;
    const char* shape;
    double memory;
    double rank;
    double capability;
    double length;
    double batch;
    int base;
    int mode;
    int recompute;
    bool train_norms;
    bool help;
} options;

typedef struct app {
    options o;
    qlora_ctx* ctx;
    qlora_budget budget;
} app;

static const int64_t lengths[] = {512, 1024, 2048, 4096, 8192, 16384};
static const int64_t batches[] = {1, 2, 4, 8, 16, 32};
enum { LENGTHS = sizeof lengths / sizeof lengths[0], BATCHES = sizeof batches / sizeof batches[0] };

// Whether a batch fits, and with what; an error that is not want of memory is told and ends the
// program.
static bool try_plan(app* a, const shape* s, int64_t batch, int64_t length, qlora_choice cache,
                     qlora_plan* out, bool* fits) {
    const options* o = &a->o;
    qlora_model_config config;
    qlora_model_desc m;
    qlora_train_desc t;
    memset(&m, 0, sizeof m);
    memset(&t, 0, sizeof t);
    if (s != NULL) {
        config = config_of(s);
        m.config = &config;
    } else {
        m.dir = o->model;
    }
    m.rank = (int32_t)o->rank;
    m.base = (qlora_base_format)o->base;
    m.mode = o->mode == 2 ? QLORA_MODE_F32 : (qlora_mode)o->mode; // tf32 is stored as f32
    m.train_norms = o->train_norms;
    t.tokens = batch * length;
    t.max_sequences = batch;
    t.max_length = length;
    t.recompute = (qlora_choice)o->recompute;
    t.cache = cache;
    qlora_result r = qlora_plan_make(a->ctx, &m, &t, &a->budget, out);
    *fits = r == QLORA_OK;
    return r == QLORA_OK || r == QLORA_ERR_DEVICE_MEMORY || fail("%s", qlora_last_error(a->ctx));
}

static double gib(uint64_t bytes) {
    return (double)bytes / 1073741824.0;
}

// '*' after a number: every layer is computed again in the backward pass; '+': some are.
static char mark(const qlora_plan* p) {
    return p->recompute_layers == 0 ? ' ' : p->recompute_layers == p->config.layers ? '*' : '+';
}

static const char* const mark_help =
    "GiB of one micro-batch; + some layers, * every layer recomputed in the backward pass;\n"
    "- does not fit. Longer steps: accumulate several micro-batches.\n";

// One model: batch sizes by lengths.
static bool model_table(app* a, const shape* s, const char* name) {
    printf("%s, rank %g, in %.1f GiB\n\n  %-12s", name, a->o.rank, gib(a->budget.bytes),
           "batch \\ seq");
    for (int j = 0; j < LENGTHS; j++) {
        printf("%10lld", (long long)lengths[j]);
    }
    printf("\n");
    for (int i = 0; i < BATCHES; i++) {
        printf("  %-12lld", (long long)batches[i]);
        for (int j = 0; j < LENGTHS; j++) {
            qlora_plan p;
            bool fits = false;
            if (batches[i] * lengths[j] > (1 << 24)) {
                printf("%9s ", "-");
                continue;
            }
            if (!try_plan(a, s, batches[i], lengths[j], QLORA_CHOICE_OFF, &p, &fits)) {
                return false;
            }
            if (fits) {
                printf("%9.2f%c", gib(p.total + p.context), mark(&p));
            } else {
                printf("%9s ", "-");
            }
        }
        printf("\n");
    }
    printf("\n%s", mark_help);
    return true;
}

// Every model: the largest batch of each length.
static bool all_table(app* a) {
    printf("largest batch, rank %g, in %.1f GiB\n\n  %-16s", a->o.rank, gib(a->budget.bytes),
           "model \\ seq");
    for (int j = 0; j < LENGTHS; j++) {
        printf("%9lld", (long long)lengths[j]);
    }
    printf("\n");
    for (int i = 0; i < SHAPES; i++) {
        printf("  %-16s", shapes[i].name);
        for (int j = 0; j < LENGTHS; j++) {
            int64_t best = 0;
            char how = ' ';
            for (int64_t batch = 1; batch <= 1024 && batch * lengths[j] <= (1 << 20); batch *= 2) {
                qlora_plan p;
                bool fits = false;
                if (!try_plan(a, &shapes[i], batch, lengths[j], QLORA_CHOICE_OFF, &p, &fits)) {
                    return false;
                }
                if (!fits) {
                    break;
                }
                best = batch;
                how = mark(&p);
            }
            if (best > 0) {
                printf("%8lld%c", (long long)best, how);
            } else {
                printf("%8s ", "-");
            }
        }
        printf("\n");
    }
    printf("\nsequences of one micro-batch, in powers of two; + some layers, * every layer "
           "recomputed\n"
           "in the backward pass; - does not fit. --shape or --model shows one model in full.\n");
    return true;
}

// One size in full, with what the memory goes to.
static bool one_plan(app* a, const shape* s, const char* name) {
    qlora_plan p;
    bool fits = false;
    char text[4096];
    if (!try_plan(a, s, (int64_t)a->o.batch, (int64_t)a->o.length, QLORA_CHOICE_AUTO, &p, &fits)) {
        return false;
    }
    if (!fits) {
        return fail("%s", qlora_last_error(a->ctx));
    }
    qlora_plan_print(&p, text, sizeof text);
    printf("%s, %g x %g tokens, rank %g, in %.1f GiB\n%s", name, a->o.batch, a->o.length, a->o.rank,
           gib(a->budget.bytes), text);
    return true;
}

// The memory of the card at hand, when none was named.
static bool budget_fill(app* a) {
    static char why[512];
    qlora_ctx_desc d;
    qlora_ctx* gpu = NULL;
    qlora_ctx_info info;
    a->budget.capability = (int32_t)(a->o.capability * 10.0 + 0.5);
    a->budget.bytes = (uint64_t)a->o.memory;
    if (a->o.memory > 0.0) {
        return true;
    }
    memset(&d, 0, sizeof d);
    d.require_backend = QLORA_BACKEND_CUDA;
    d.error_text = why;
    d.error_text_size = sizeof why;
    if (qlora_ctx_create(&d, &gpu) != QLORA_OK) {
        return fail("no GPU to plan for (%s); say --memory 8G", why);
    }
    bool ok = qlora_ctx_query(gpu, &info) == QLORA_OK || fail("%s", qlora_last_error(gpu));
    qlora_ctx_destroy(gpu);
    const uint64_t margin = (uint64_t)512 << 20; // the driver's own, cuBLAS, graphs
    a->budget.bytes = ok && info.memory.device_free > margin ? info.memory.device_free - margin : 1;
    return ok;
}

static bool run(app* a) {
    const options* o = &a->o;
    const shape* s = NULL;
    for (int i = 0; i < SHAPES && o->shape != NULL; i++) {
        s = strcmp(o->shape, shapes[i].name) == 0 ? &shapes[i] : s;
    }
    if (o->shape != NULL && s == NULL) {
        fail("--shape %s is not known; there are:", o->shape);
        for (int i = 0; i < SHAPES; i++) {
            fprintf(stderr, "  %s\n", shapes[i].name);
        }
        return false;
    }
    if (o->model != NULL && s != NULL) {
        return fail("give --model or --shape, not both");
    }
    bool one = o->batch > 0.0 || o->length > 0.0;
    if (one && (o->batch < 1.0 || o->length < 1.0 || (o->model == NULL && s == NULL))) {
        return fail("--batch and --length go together, with --model or --shape");
    }
    static char why[512];
    qlora_ctx_desc d;
    memset(&d, 0, sizeof d);
    d.require_backend = QLORA_BACKEND_CPU;
    d.threads = 1;
    d.error_text = why;
    d.error_text_size = sizeof why;
    if (!budget_fill(a)) {
        return false;
    }
    if (qlora_ctx_create(&d, &a->ctx) != QLORA_OK) {
        return fail("%s", why);
    }
    const char* name = s != NULL ? s->name : o->model;
    qlora_plan p;
    bool fits = false; // first of all, so that a wrong folder is told before a table begins
    bool ok = name == NULL || try_plan(a, s, 1, 1, QLORA_CHOICE_OFF, &p, &fits);
    ok = !ok            ? false
         : one          ? one_plan(a, s, name)
         : name != NULL ? model_table(a, s, name)
                        : all_table(a);
    qlora_ctx_destroy(a->ctx);
    return ok;
}

int main(int argc, char** argv) {
    app a;
    memset(&a, 0, sizeof a);
    options* o = &a.o;
    o->rank = 16;
    o->capability = 9.0;
    // clang-format off
    const option table[] = {
        TEXT("model", "DIR", &o->model, "a model's folder"),
        TEXT("shape", "NAME", &o->shape, "or a public model by its name"),
        NUMBER("memory", "SIZE", &o->memory, 1048576, 1e15, "such as 8G; what is free on the GPU"),
        NUMBER("batch", "N", &o->batch, 1, 65536, "with --length: one size, in full"),
        NUMBER("length", "N", &o->length, 1, 1048576, "tokens of a sequence"),
        NUMBER("rank", "N", &o->rank, 1, 1024, "of the adapters: 16"),
        CHOICE("base", "nf4|16bit|32bit", &o->base, "how the frozen weights are kept: nf4"),
        CHOICE("mode", "auto|f32|tf32|bf16", &o->mode, "auto: bf16 from compute capability 8.0 on"),
        CHOICE("recompute", "auto|on|off", &o->recompute, "auto: as many layers as needed"),
        FLAG("train-norms", &o->train_norms, "the norms are trained, too"),
        NUMBER("capability", "X", &o->capability, 7.5, 99, "compute capability of the GPU: 9.0"),
        FLAG("help", &o->help, "this text"),
    };
    // clang-format on
    const size_t count = sizeof table / sizeof table[0];
    if (!options_read(table, count, argc, argv)) {
        return 1;
    }
    if (o->help) {
        printf("usage: plan [--model DIR | --shape NAME] [--memory SIZE] [options]\n\n");
        options_print(table, count);
        printf("\nShapes:");
        for (int i = 0; i < SHAPES; i++) {
            printf(" %s", shapes[i].name);
        }
        printf("\nExit status: 0, or 1 after an error.\n");
        return 0;
    }
    return run(&a) ? 0 : 1;
}
