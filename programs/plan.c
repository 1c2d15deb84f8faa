// plan: prints which models, sequence lengths and batch sizes can be trained in a given memory.
//
//   cc -O2 -I. -o plan programs/plan.c -ldl -lm -lpthread
//   ./plan --memory 8G                          (all built-in shapes)
//   ./plan --shape llama-3.1-8b --memory 24G    (one of them)
//   ./plan --model DIR                          (a folder, on this machine's GPU)
//
// It calls only the public functions of qlora.h; planning does not need a GPU.
#define QLORA_IMPLEMENTATION
#include "qlora.h"

#define PROGRAM "plan"
#include "tool.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- shapes of public models ------------------------------------------------------------------

typedef struct shape {
    const char* name;
    bool qwen; // q, k and v have biases
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
    c.rope.theta = 1e6; // does not affect the memory needed
    c.rope_sliding = c.rope;
    c.tied = s->tied;
    c.qkv_bias = s->qwen;
    return c;
}

// ---- the program ------------------------------------------------------------------------------

typedef struct options {
    const char* model;
    const char* shape;
    int64_t memory;
    int64_t rank;
    double capability;
    int64_t length;
    int64_t batch;
    int64_t base;
    int64_t mode;
    int64_t recompute;
    bool train_norms;
    bool help;
    bool version;
} options;

#define AT(field) offsetof(options, field)
// clang-format off
static const option option_table[] = {
    {"model", OPT_TEXT, AT(model), false, 0, 0, "DIR", "model to plan for: folder or GGUF file"},
    {"shape", OPT_TEXT, AT(shape), false, 0, 0, "NAME", "public model to plan for, see below"},
    {"memory", OPT_SIZE, AT(memory), false, 1048576.0, 1125899906842624.0, "SIZE",
        "memory to plan for; 8G and 8GiB are binary, 8GB is decimal (default: free GPU memory)"},
    {"batch", OPT_WHOLE, AT(batch), false, 1, 65536, "N",
        "with --length: detailed plan for one size"},
    {"length", OPT_WHOLE, AT(length), false, 1, 1048576, "N", "tokens per sequence"},
    {"rank", OPT_WHOLE, AT(rank), false, 1, 1024, "N", "LoRA rank (default 16)"},
    {"base", OPT_CHOICE, AT(base), false, 0, 0, "nf4|16bit|32bit",
        "storage format of the frozen weights (default nf4)"},
    {"mode", OPT_CHOICE, AT(mode), false, 0, 0, "auto|f32|tf32|bf16",
        "arithmetic precision; auto uses bf16 from compute capability 8.0 on, otherwise f32 "
        "(default auto)"},
    {"recompute", OPT_CHOICE, AT(recompute), false, 0, 0, "auto|on|off",
        "recompute activations in the backward pass; auto recomputes as few layers as "
        "possible (default auto)"},
    {"train-norms", OPT_FLAG, AT(train_norms), false, 0, 0, "", "also train the RMSNorm weights"},
    {"capability", OPT_REAL, AT(capability), false, 7.5, 99, "X",
        "compute capability of the GPU (default 9.0)"},
    {"help", OPT_FLAG, AT(help), false, 0, 0, "", "show this help"},
    {"version", OPT_FLAG, AT(version), false, 0, 0, "", "print the version"},
};
// clang-format on

typedef struct app {
    options o;
    qlora_ctx* ctx;
    qlora_plan_desc budget;
} app;

static const int64_t lengths[] = {512, 1024, 2048, 4096, 8192, 16384};
static const int64_t batches[] = {1, 2, 4, 8, 16, 32};
enum { LENGTHS = sizeof lengths / sizeof lengths[0], BATCHES = sizeof batches / sizeof batches[0] };

// Plans one batch; *fits tells whether it fits. Returns false, with a message, for any error other
// than too little memory.
static bool try_plan(app* a, const shape* s, int64_t batch, int64_t length, qlora_choice cache,
                     qlora_plan* out, bool* fits) {
    const options* o = &a->o;
    qlora_model_config config;
    qlora_model_desc m;
    memset(&m, 0, sizeof m);
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
    m.tokens = batch * length;
    m.max_sequences = batch;
    m.max_length = length;
    m.recompute = (qlora_choice)o->recompute;
    m.cache = cache;
    qlora_result r = qlora_plan_make(a->ctx, &m, &a->budget, out);
    *fits = r == QLORA_OK;
    return r == QLORA_OK || r == QLORA_ERR_DEVICE_MEMORY ||
           fail("%s", message_text(qlora_last_error(a->ctx)));
}

static double gib(uint64_t bytes) {
    return (double)bytes / 1073741824.0;
}

// The mark after a number: '*' if every layer is recomputed in the backward pass, '+' if some are.
static char mark(const qlora_plan* p) {
    return p->recompute_layers == 0 ? ' ' : p->recompute_layers == p->config.layers ? '*' : '+';
}

static const char* const mark_help =
    "GiB for one micro-batch; + some layers, * all layers recomputed in the backward\n"
    "pass; - does not fit. For larger batches, accumulate several micro-batches.\n";

// The table of one model: batch sizes by sequence lengths.
static bool model_table(app* a, const shape* s, const char* name) {
    printf("%s, rank %lld, in %.1f GiB\n\n  %-12s", name, (long long)a->o.rank,
           gib(a->budget.bytes), "batch \\ seq");
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

// The table of all models: the largest batch for each sequence length.
static bool all_table(app* a) {
    printf("largest batch, rank %lld, in %.1f GiB\n\n  %-16s", (long long)a->o.rank,
           gib(a->budget.bytes), "model \\ seq");
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
    printf("\nSequences per micro-batch, as powers of two; + some layers, * all layers\n"
           "recomputed in the backward pass; - does not fit. Use --shape or --model for the\n"
           "details of one model.\n");
    return true;
}

// The plan for one size, with a breakdown of the memory.
static bool one_plan(app* a, const shape* s, const char* name) {
    qlora_plan p;
    bool fits = false;
    char text[4096];
    if (!try_plan(a, s, a->o.batch, a->o.length, QLORA_CHOICE_AUTO, &p, &fits)) {
        return false;
    }
    if (!fits) {
        return fail("not enough memory: %s", message_text(qlora_last_error(a->ctx)));
    }
    qlora_plan_describe(&p, text, sizeof text);
    printf("%s, %lld x %lld tokens, rank %lld, in %.1f GiB\n%s", name, (long long)a->o.batch,
           (long long)a->o.length, (long long)a->o.rank, gib(a->budget.bytes), text);
    return true;
}

// Fills in the free memory of this machine's GPU unless --memory was given.
static bool budget_fill(app* a) {
    static char why[512];
    qlora_ctx_desc d;
    qlora_ctx* gpu = NULL;
    qlora_ctx_info info;
    a->budget.capability = (int32_t)(a->o.capability * 10.0 + 0.5);
    a->budget.bytes = (uint64_t)a->o.memory;
    if (a->o.memory > 0) {
        return true;
    }
    memset(&d, 0, sizeof d);
    d.require_backend = QLORA_BACKEND_CUDA;
    d.error_text = why;
    d.error_text_size = sizeof why;
    if (qlora_ctx_create(&d, &gpu) != QLORA_OK) {
        return fail("no GPU found (%s); give the memory to plan for, e.g. --memory 8G",
                    message_text(why));
    }
    bool ok =
        qlora_ctx_query(gpu, &info) == QLORA_OK || fail("%s", message_text(qlora_last_error(gpu)));
    qlora_ctx_destroy(gpu);
    const uint64_t margin = (uint64_t)512 << 20; // for the driver, cuBLAS and graphs
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
        fail("unknown shape '%s'; available shapes:", o->shape);
        for (int i = 0; i < SHAPES; i++) {
            fprintf(stderr, "  %s\n", shapes[i].name);
        }
        return false;
    }
    if (o->model != NULL && s != NULL) {
        return fail("--model and --shape cannot be used together");
    }
    bool one = o->batch > 0 || o->length > 0;
    if (one && (o->batch < 1 || o->length < 1 || (o->model == NULL && s == NULL))) {
        return fail("--batch and --length must be given together, with --model or --shape");
    }
    if (o->model != NULL && model_fault(o->model) != NULL) {
        return fail("--model %s: %s", o->model, model_fault(o->model));
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
        return fail("%s", message_text(why));
    }
    const char* name = s != NULL ? s->name : o->model;
    qlora_plan p;
    bool fits = false; // planned once up front, so that an error is reported before a table starts
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
    const option_set set = {option_table, sizeof option_table / sizeof option_table[0], o};
    int status = 0;
    if (!tool_start(&set, argc, argv, &o->version, &status)) {
        return status;
    }
    if (o->help) {
        printf("usage: plan [--model DIR | --shape NAME] [--memory SIZE] [options]\n\n");
        options_print(&set, 31);
        printf("\nShapes:\n");
        for (int i = 0; i < SHAPES; i++) {
            printf("  %s\n", shapes[i].name);
        }
        printf("Exit status: 0 on success, 1 on error.\n");
        return tool_end(true);
    }
    return tool_end(run(&a));
}
