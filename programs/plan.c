// plan: prints which models, sequence lengths and batch sizes can be trained in a given memory.
//
//   cc -O2 -I. -o plan programs/plan.c -ldl -lm -lpthread
//   ./plan --memory 8G                          (all built-in shapes)
//   ./plan --shape llama-3.1-8b --memory 24G    (one of them)
//   ./plan --shape llama-3.1-8b --memory 24GB --longest
//   ./plan --model DIR                          (a folder, on this machine)
//
// It calls only the public functions of qlora.h; planning does not need a GPU.
#define QLORA_IMPLEMENTATION
#include "qlora.h"

#define PROGRAM "plan"
#include "advice.h"
#include "folders.h"
#include "shapes.h"
#include "tool.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- the program ------------------------------------------------------------------------------

typedef struct options {
    const char* model;
    const char* shape;
    const char* rope_scale;
    int64_t memory;
    int64_t host_budget;
    int64_t rank;
    int64_t layers;
    int64_t targets;
    double capability;
    int64_t length;
    int64_t batch;
    int64_t base;
    int64_t head;
    int64_t mode;
    int64_t recompute;
    int64_t offload;
    int64_t tile;
    bool longest;
    int64_t optimizer;
    bool train_norms;
    bool help;
    bool version;
} options;

enum { MODE_TF32 = 2, MODE_FP8 = 4 }; // their places in the list of --mode

#define AT(field) offsetof(options, field)
// clang-format off
static const option option_table[] = {
    {"model", OPT_TEXT, AT(model), false, 0, 0, "DIR",
        "model to plan for: folder (config.json is enough) or GGUF file"},
    {"shape", OPT_TEXT, AT(shape), false, 0, 0, "NAME", "public model to plan for, see below"},
    {"memory", OPT_SIZE, AT(memory), false, 1048576.0, 1125899906842624.0, "SIZE",
        "memory of the GPU to plan for; 8G and 8GiB are binary, 8GB is decimal (default: what is "
        "free on this machine's GPU, or without one on its CPU)"},
    {"host-budget", OPT_SIZE, AT(host_budget), false, 1048576.0, 1125899906842624.0, "SIZE",
        "host memory for offloading; less of it means more to compute (default: no limit)"},
    {"batch", OPT_WHOLE, AT(batch), false, 1, 65536, "N",
        "with --length: detailed plan for one size"},
    {"length", OPT_WHOLE, AT(length), false, 1, 16777216, "N", "tokens per sequence"},
    {"longest", OPT_FLAG, AT(longest), false, 0, 0, "",
        "find the longest sequence that fits, with --batch sequences (default 1)"},
    {"rope-scale", OPT_TEXT, AT(rope_scale), false, 0, 0, "TYPE:F",
        "scale the rotary positions for texts longer than the model's limit: yarn:F or linear:F "
        "with a factor, as in yarn:4 (default: none, and longer texts are refused)"},
    {"layers", OPT_WHOLE, AT(layers), false, 1, 1024, "N",
        "plan for the first N layers of the shape (default: all)"},
    {"rank", OPT_WHOLE, AT(rank), false, 1, 1024, "N", "LoRA rank (default 16)"},
    {"targets", OPT_TARGETS, AT(targets), false, 0, 0, "LIST",
        "projections with adapters, in the words of finetune, as in attention or q,v; all leaves "
        "out router and shared_gate (default all)"},
    {"base", OPT_CHOICE, AT(base), false, 0, 0, "nf4|16bit|32bit|fp8",
        "storage format of the frozen weights; fp8 has less than a third of the error of nf4 and "
        "twice its size (default nf4)"},
    {"head", OPT_CHOICE, AT(head), false, 0, 0, "full|nf4",
        "nf4 stores the output head in 4 bits if it is neither trained nor tied to the embedding "
        "(default full)"},
    {"mode", OPT_CHOICE, AT(mode), false, 0, 0, "auto|f32|tf32|bf16|fp8",
        "arithmetic precision; auto uses bf16 from compute capability 8.0 on, otherwise f32; fp8 "
        "needs compute capability 9.0 (default auto)"},
    {"recompute", OPT_CHOICE, AT(recompute), false, 0, 0, "auto|on|off",
        "recompute activations in the backward pass; auto recomputes as few layers as "
        "possible, but from 4,096 tokens on first keeps what attention computed (default auto)"},
    {"offload", OPT_CHOICE, AT(offload), false, 0, 0, "auto|on|off",
        "keep the inputs of recomputed layers, what they keep of attention, and an embedding that "
        "is not the head, in host memory; auto does it only if the memory requires it, or if more "
        "copies of weights fit then (default auto)"},
    {"tile", OPT_WHOLE, AT(tile), false, 1, 16777216, "N",
        "compute everything but attention for N tokens at a time (default: only if the memory "
        "requires it)"},
    {"optimizer", OPT_CHOICE, AT(optimizer), false, 0, 0, "adamw|adamw8bit",
        "adamw8bit keeps the moments in 8 bits (default adamw)"},
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
    bool cpu; // no GPU and no --memory: the plan is for this machine's CPU
    const char* name;
    qlora_model_config config; // of the model, or of the shape that is planned
    bool weights;              // --model has weights, whose format counts
} app;

static const int64_t lengths[] = {512, 1024, 2048, 4096, 8192, 16384};
static const int64_t batches[] = {1, 2, 4, 8, 16, 32};
enum { LENGTHS = sizeof lengths / sizeof lengths[0], BATCHES = sizeof batches / sizeof batches[0] };

static qlora_model_desc desc_of(const app* a, int64_t batch, int64_t length, qlora_choice cache) {
    const options* o = &a->o;
    qlora_model_desc m;
    memset(&m, 0, sizeof m);
    if (a->weights) {
        m.dir = o->model;
        m.rope_scale = o->rope_scale;
    } else {
        m.config = &a->config;
    }
    m.rank = (int32_t)o->rank;
    m.targets = (uint32_t)o->targets;
    m.base = (qlora_base_format)o->base;
    m.head = (qlora_head_format)o->head;
    m.mode = o->mode == MODE_TF32 ? QLORA_MODE_F32 : (qlora_mode)o->mode; // tf32 is stored as f32
    m.train_norms = o->train_norms;
    m.optimizer = (qlora_optimizer)o->optimizer;
    m.tokens = batch * length;
    m.max_sequences = batch;
    m.max_length = length;
    m.recompute = (qlora_choice)o->recompute;
    m.offload = (qlora_choice)o->offload;
    m.tile = o->tile;
    m.cache = cache;
    return m;
}

// Plans one batch; *fits tells whether it fits. Returns false, with a message, for any error other
// than too little memory.
static bool try_plan(app* a, int64_t batch, int64_t length, qlora_choice cache, qlora_plan* out,
                     bool* fits) {
    qlora_model_desc m = desc_of(a, batch, length, cache);
    qlora_result r = qlora_plan_make(a->ctx, &m, &a->budget, out);
    *fits = r == QLORA_OK;
    if (r == QLORA_OK || r == QLORA_ERR_DEVICE_MEMORY || r == QLORA_ERR_MEMORY) {
        return true;
    }
    return fail_library(qlora_last_error(a->ctx));
}

// The mark after a number: '+' if some layers are recomputed in the backward pass, '*' if every one
// is, '#' if memory of the host is used or tokens are computed in tiles as well.
static char mark(const qlora_plan* p) {
    return p->host > 0 || p->tile > 0                ? '#'
           : p->recompute_layers == 0                ? ' '
           : p->recompute_layers == p->config.layers ? '*'
                                                     : '+';
}

// The columns of a table: the lengths that the model can have, or its limit if that is shorter.
static int columns_of(const app* a, int64_t out[LENGTHS]) {
    int64_t limit = a->config.max_positions > 0 ? a->config.max_positions : INT64_MAX;
    int count = 0;
    for (int j = 0; j < LENGTHS; j++) {
        if (lengths[j] <= limit) {
            out[count++] = lengths[j];
        }
    }
    if (count == 0) {
        out[count++] = limit;
    }
    return count;
}

static void heading(const app* a, const char* what) {
    char size[32];
    printf("%s, rank %lld, in %s%s\n\n", what, (long long)a->o.rank,
           bytes_text(a->budget.bytes, size), a->cpu ? " (free memory of this machine, CPU)" : "");
}

// The table of one model: batch sizes by sequence lengths. Small models are shown in MiB.
static bool model_table(app* a) {
    int64_t columns[LENGTHS];
    int count = columns_of(a, columns);
    qlora_plan p;
    bool fits = false;
    if (!try_plan(a, 1, columns[0], QLORA_CHOICE_OFF, &p, &fits)) {
        return false;
    }
    bool small = fits && p.total + p.context < (uint64_t)1 << 30;
    double unit = small ? 1048576.0 : 1073741824.0;
    heading(a, a->name);
    printf("  %-12s", "batch \\ seq");
    for (int j = 0; j < count; j++) {
        printf("%10lld", (long long)columns[j]);
    }
    printf("\n");
    for (int i = 0; i < BATCHES; i++) {
        printf("  %-12lld", (long long)batches[i]);
        for (int j = 0; j < count; j++) {
            fits = false;
            if (batches[i] * columns[j] <= (1 << 24) &&
                !try_plan(a, batches[i], columns[j], QLORA_CHOICE_OFF, &p, &fits)) {
                return false;
            }
            if (fits) {
                printf("%9.*f%c", small ? 1 : 2, (double)(p.total + p.context) / unit, mark(&p));
            } else {
                printf("%9s ", "-");
            }
        }
        printf("\n");
    }
    printf("\n%s for one micro-batch; + some layers, * all layers recomputed in the backward\n"
           "pass; # also host memory or tiles of tokens; - does not fit. For larger batches,\n"
           "accumulate several micro-batches.\n"
           "With +, only as many layers are recomputed as the memory requires: the plan\n"
           "fills the memory, so a longer sequence can show a smaller number.\n",
           small ? "MiB" : "GiB");
    return true;
}

// The largest power of two of sequences that fits, or 0; at most *best, that of shorter sequences.
static bool largest_batch(app* a, int64_t length, int64_t* best, char* how) {
    int64_t batch = *best;
    *best = 0;
    *how = ' ';
    while (batch * length > (1 << 20)) {
        batch /= 2;
    }
    for (; batch > 0 && *best == 0; batch /= 2) {
        qlora_plan p;
        bool fits = false;
        if (!try_plan(a, batch, length, QLORA_CHOICE_OFF, &p, &fits)) {
            return false;
        }
        if (fits) {
            *best = batch;
            *how = mark(&p);
        }
    }
    return true;
}

// Why a shape cannot have these settings on this machine, or NULL.
static const char* shape_refused(app* a) {
    qlora_model_desc m = desc_of(a, 1, 1, QLORA_CHOICE_OFF);
    qlora_plan p;
    return qlora_plan_make(a->ctx, &m, &a->budget, &p) == QLORA_ERR_UNSUPPORTED
               ? message_text(qlora_last_error(a->ctx))
               : NULL;
}

// The table of all models: the largest batch for each sequence length.
static bool all_table(app* a) {
    heading(a, "largest batch");
    printf("  %-22s", "model \\ seq");
    for (int j = 0; j < LENGTHS; j++) {
        printf("%9lld", (long long)lengths[j]);
    }
    printf("\n");
    for (int i = 0; i < MODEL_SHAPES; i++) {
        a->config = shape_config(&model_shapes[i]);
        printf("  %-22s", model_shapes[i].name);
        const char* refused = shape_refused(a);
        if (refused != NULL) {
            printf(" %s\n", refused);
        }
        int64_t best = 1024;
        for (int j = 0; j < LENGTHS && refused == NULL; j++) {
            char how = ' ';
            if (!largest_batch(a, lengths[j], &best, &how)) {
                return false;
            }
            if (best > 0) {
                printf("%8lld%c", (long long)best, how);
            } else {
                printf("%8s ", "-");
            }
        }
        printf("%s", refused == NULL ? "\n" : "");
    }
    printf("\nSequences per micro-batch, as powers of two; + some layers, * all layers\n"
           "recomputed in the backward pass; # also host memory or tiles of tokens; - does not\n"
           "fit. Use --shape or --model for the details of one model.\n");
    return true;
}

// What a plan takes of the host, if this machine has less.
static void host_note(app* a, const qlora_plan* p) {
    qlora_ctx_info info;
    char need[32];
    char have[32];
    if (p->host > 0 && qlora_ctx_query(a->ctx, &info) == QLORA_OK &&
        p->host > info.memory.host_free) {
        printf("note: the plan uses %s of host memory; this machine has %s free "
               "(--host-budget limits it)\n",
               bytes_text(p->host, need), bytes_text(info.memory.host_free, have));
    }
}

// What a micro-batch of full sequences computes.
static void work_print(const app* a, const qlora_plan* p) {
    int32_t length = (int32_t)a->o.length;
    qlora_cost one;
    qlora_plan_cost(p, &length, 1, (double)(length - 1), &one);
    double flops = (double)a->o.batch * (one.flops + one.again);
    printf("  %.4g TFLOP in a micro-batch", flops * 1e-12);
    if (one.again > 0.0) {
        printf(", %.0f%% of them in layers that are recomputed",
               100.0 * one.again / (one.flops + one.again));
    }
    printf("\n");
}

// One size in detail, or what would fit instead.
static bool one_plan(app* a) {
    qlora_plan p;
    bool fits = false;
    char text[4096];
    char size[32];
    if (a->config.max_positions > 0 && a->o.length > a->config.max_positions) {
        return fail("--length %lld exceeds the model's limit of %lld tokens%s",
                    (long long)a->o.length, (long long)a->config.max_positions,
                    a->o.rope_scale == NULL && a->config.rope.type == QLORA_ROPE_DEFAULT
                        ? "; --rope-scale extends it"
                        : "");
    }
    if (!try_plan(a, a->o.batch, a->o.length, QLORA_CHOICE_AUTO, &p, &fits)) {
        return false;
    }
    if (!fits) {
        qlora_model_desc wanted = desc_of(a, a->o.batch, a->o.length, QLORA_CHOICE_AUTO);
        char why[512];
        char hint[256];
        snprintf(why, sizeof why, "%s", message_text(qlora_last_error(a->ctx)));
        advice_find(a->ctx, &wanted, &a->budget, ADVICE_BATCH, hint);
        return fail("not enough memory: %s; %s", why, hint);
    }
    qlora_plan_describe(&p, text, sizeof text);
    printf("%s, %lld x %lld tokens, rank %lld, in %s\n%s", a->name, (long long)a->o.batch,
           (long long)a->o.length, (long long)a->o.rank, bytes_text(a->budget.bytes, size), text);
    work_print(a, &p);
    host_note(a, &p);
    return true;
}

// The longest sequence that fits: every length that is printed was planned. A shape has no limit of
// positions, so that the answer is that of the memory.
static bool longest_plan(app* a) {
    int64_t batch = a->o.batch > 0 ? a->o.batch : 1;
    int64_t positions = a->config.max_positions > 0 ? a->config.max_positions : INT64_MAX;
    int64_t room = ((int64_t)1 << 24) / batch;
    int64_t low = 0; // fits
    int64_t high = a->o.model != NULL && positions < room ? positions : room;
    qlora_plan best;
    char text[4096];
    char size[32];
    a->config.max_positions = 0;
    memset(&best, 0, sizeof best);
    while (low < high) {
        qlora_plan p;
        bool fits = false;
        int64_t middle = low + (high - low + 1) / 2;
        if (!try_plan(a, batch, middle, QLORA_CHOICE_OFF, &p, &fits)) {
            return false;
        }
        low = fits ? middle : low;
        high = fits ? high : middle - 1;
        best = fits ? p : best;
    }
    if (low == 0) {
        return fail("not enough memory for a sequence of one token: %s",
                    message_text(qlora_last_error(a->ctx)));
    }
    qlora_plan_describe(&best, text, sizeof text);
    printf("%s, rank %lld, in %s: ", a->name, (long long)a->o.rank,
           bytes_text(a->budget.bytes, size));
    if (batch == 1) {
        printf("one sequence");
    } else {
        printf("each of %lld sequences", (long long)batch);
    }
    printf(" can have up to %lld tokens\n%s", (long long)low, text);
    if (low > positions) {
        bool own = a->config.rope.type != QLORA_ROPE_DEFAULT;
        printf("note: the model has %lld positions%s\n", (long long)positions,
               own ? ", already scaled ones; longer sequences are refused"
                   : "; longer sequences need --rope-scale");
    }
    host_note(a, &best);
    return true;
}

// Fills in the free memory of this machine unless --memory was given: that of its GPU, or of its
// CPU if it has none.
static bool budget_fill(app* a) {
    qlora_ctx_desc d;
    qlora_ctx* gpu = NULL;
    qlora_ctx_info info;
    a->budget.capability = (int32_t)(a->o.capability * 10.0 + 0.5);
    a->budget.bytes = (uint64_t)a->o.memory;
    a->budget.host_bytes = (uint64_t)a->o.host_budget;
    if (a->o.memory > 0) {
        return true;
    }
    memset(&d, 0, sizeof d);
    d.require_backend = QLORA_BACKEND_CUDA;
    a->cpu = qlora_ctx_create(&d, &gpu) != QLORA_OK;
    qlora_ctx* machine = a->cpu ? a->ctx : gpu;
    bool ok = qlora_ctx_query(machine, &info) == QLORA_OK ||
              fail("%s", message_text(qlora_last_error(machine)));
    qlora_ctx_destroy(gpu);
    const uint64_t margin = (uint64_t)512 << 20; // for the driver, cuBLAS and graphs
    uint64_t left = a->cpu ? info.memory.host_free : info.memory.device_free;
    if (ok && left == 0) {
        return fail("the free memory is unknown; give the memory to plan for, e.g. --memory 8G");
    }
    a->budget.bytes = a->cpu ? left : left > margin ? left - margin : 1;
    a->budget.capability = a->cpu ? 0 : a->budget.capability;
    return ok && (!a->cpu || a->o.mode != MODE_FP8 ||
                  fail("--mode fp8 needs a GPU; give the memory of one, e.g. --memory 8G"));
}

static bool weights_seen(void* user, const char* name) {
    *(bool*)user = name_ends(name, ".safetensors") || name_ends(name, ".safetensors.index.json");
    return !*(bool*)user;
}

// Applies --rope-scale to the config.
static bool scale(app* a) {
    return a->o.rope_scale == NULL ||
           qlora_config_scale(a->ctx, a->o.rope_scale, &a->config) == QLORA_OK ||
           fail_library(qlora_last_error(a->ctx));
}

// Finds the model or shape that was asked for; its config is then in a->config.
static bool model_find(app* a) {
    const options* o = &a->o;
    char why[HUB_ADVICE];
    const char* fault = o->model != NULL ? model_fault(o->model, why) : NULL;
    if (fault != NULL) {
        return fail("--model %s: %s", o->model, fault);
    }
    a->name = o->model;
    if (o->model != NULL) {
        a->weights = file_is_gguf(o->model);
        folder_each(o->model, weights_seen, &a->weights);
        return (qlora_config_read(a->ctx, o->model, &a->config) == QLORA_OK ||
                fail_library(qlora_last_error(a->ctx))) &&
               scale(a);
    }
    const model_shape* s = o->shape != NULL ? shape_find(o->shape) : NULL;
    if (s != NULL) {
        model_shape cut;
        char fault_of_layers[128];
        const char* wrong = shape_cut(s, o->layers, &cut, fault_of_layers);
        if (wrong != NULL) {
            return fail("%s", wrong);
        }
        a->name = s->name;
        a->config = shape_config(&cut);
    } else if (o->shape != NULL) {
        fail("unknown shape '%s'; available shapes:", o->shape);
        for (int i = 0; i < MODEL_SHAPES; i++) {
            fprintf(stderr, "  %s\n", model_shapes[i].name);
        }
    }
    return o->shape == NULL || (s != NULL && scale(a));
}

static bool options_check(const options* o) {
    static const char* const modes[] = {"auto", "f32", "tf32", "bf16", "fp8"};
    if (o->rope_scale != NULL && o->model == NULL && o->shape == NULL) {
        return fail("--rope-scale needs --model or --shape");
    }
    if (o->head != 0 && o->model == NULL && o->shape == NULL) {
        return fail("--head nf4 needs --model or --shape"); // many shapes have no head of their own
    }
    if (o->targets != 0 && o->model == NULL && o->shape == NULL) {
        return fail("--targets needs --model or --shape"); // not all have the same projections
    }
    if (o->layers != 0 && o->shape == NULL) {
        return fail("--layers needs --shape");
    }
    if (o->model != NULL && o->shape != NULL) {
        return fail("--model and --shape cannot be used together");
    }
    if (o->longest && (o->length > 0 || (o->model == NULL && o->shape == NULL))) {
        return fail("--longest needs --model or --shape, and no --length");
    }
    bool one = (o->batch > 0 || o->length > 0) && !o->longest;
    if (one && (o->batch < 1 || o->length < 1 || (o->model == NULL && o->shape == NULL))) {
        return fail("--batch and --length must be given together, with --model or --shape");
    }
    if (o->mode >= MODE_TF32 && o->capability < 8.0) {
        return fail("--mode %s needs compute capability 8.0 or higher; --capability is %g",
                    modes[o->mode], o->capability);
    }
    if (o->mode == MODE_FP8 && (int)(o->capability * 10.0 + 0.5) != 90) {
        return fail("--mode fp8 needs compute capability 9.0; --capability is %g", o->capability);
    }
    return true;
}

static bool run(app* a) {
    const options* o = &a->o;
    static char why[512];
    qlora_ctx_desc d;
    memset(&d, 0, sizeof d);
    d.require_backend = QLORA_BACKEND_CPU;
    d.threads = 1;
    d.error_text = why;
    d.error_text_size = sizeof why;
    if (qlora_ctx_create(&d, &a->ctx) != QLORA_OK) {
        return fail("%s", message_text(why));
    }
    bool ok = model_find(a) && budget_fill(a);
    qlora_plan p;
    bool fits = false; // planned once up front, so that an error is reported before a table starts
    ok = ok && (a->name == NULL || try_plan(a, 1, 1, QLORA_CHOICE_OFF, &p, &fits));
    ok = ok && (o->longest        ? longest_plan(a)
                : o->batch > 0    ? one_plan(a)
                : a->name != NULL ? model_table(a)
                                  : all_table(a));
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
        options_print(&set, NULL, 31);
        printf("\nShapes:\n");
        for (int i = 0; i < MODEL_SHAPES; i++) {
            printf("  %s\n", model_shapes[i].name);
        }
        printf("Exit status: 0 on success, 1 on error.\n");
        return tool_end(true);
    }
    return tool_end(options_check(o) && run(&a));
}
