// bench_step.h - speed, memory and start-up time of a whole training step on the current GPU
// (or CPU).
//
//     build/bench step --shape NAME --batch B --seq S [options]     (see --help)
//
// The setup is random weights of a public shape, created on the device and quantised by the
// library, random tokens, adapters on all projections but the router, NF4 with double quantisation,
// AdamW, and gradients clipped to 1. The median is over steps that are waited for one by one, the
// mean over a run without waiting. The roofline counts what this plan computes and moves (including
// its recomputed and cached layers): products at --tflops, and dequantisation, elementwise passes,
// loss and optimizer at --tbps, with no overlap. Of experts, it counts the products of those that a
// token uses, and the weights of all of them. The defaults are the rates that an H200 reaches in a
// large product and in a device copy.
#ifndef QLORA_BENCH_STEP_H
#define QLORA_BENCH_STEP_H

#include "qlora.h"

#include "programs/options.h"
#include "programs/shapes.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

// ---- shapes -------------------------------------------------------------------------------------

// To check that everything runs.
static const model_shape step_tiny_shapes[] = {
    {"tiny", QLORA_FAMILY_QWEN2, 64, 2, 4, 2, 16, 96, 128, true, 1e4, 0, 0, 0},
    {"tiny-experts", QLORA_FAMILY_GLM4_MOE, 64, 3, 4, 2, 16, 96, 128, false, 1e4, 0, 0, 0}};

static const model_shape* step_shape(const char* name) {
    for (int i = 0; i < 2; i++) {
        if (strcmp(name, step_tiny_shapes[i].name) == 0) {
            return &step_tiny_shapes[i];
        }
    }
    return shape_find(name);
}

// The shape with its first `layers` layers.
static bool step_cut(const char* program, const model_shape** shape, int64_t layers,
                     model_shape* room) {
    char why[128];
    const char* fault = shape_cut(*shape, layers, room, why);
    if (fault != NULL) {
        fprintf(stderr, "%s: %s\n", program, fault);
        return false;
    }
    *shape = room;
    return true;
}

// Bits of qlora_target from the words that finetune takes.
static bool step_targets(const char* program, const char* words, int64_t* bits) {
    option row;
    char error[1024];
    memset(&row, 0, sizeof row);
    row.name = "targets";
    if (!targets_read(&row, words, bits, error)) {
        fprintf(stderr, "%s: %s\n", program, error);
        return false;
    }
    return true;
}

// ---- options ------------------------------------------------------------------------------------

#define STEP_ADAPTERS 64

typedef struct step_options {
    const model_shape* shape;
    model_shape cut; // what it points to
    int64_t layers;  // 0 = all
    int64_t targets; // 0 = all
    int64_t batch;
    int64_t seq;
    int64_t rank;
    int64_t adapters;
    int64_t steps;
    int64_t accumulate; // micro-batches per step
    int64_t head_chunk;
    int64_t tile;
    int64_t threads;
    double budget; // GiB
    double host_budget;
    double tflops;
    double tbps;
    double labels;       // share of a sequence, at its end
    const char* lengths; // file; NULL = all sequences have seq tokens
    int recompute;       // a qlora_choice
    int cache;
    int offload;
    int graph; // 1 = on, 2 = off
    int backend;
    int mode;
    int optimizer; // a qlora_optimizer
    int base; // a qlora_base_format
    int head; // a qlora_head_format
    int method; // a qlora_method: SFT or DPO
    int reference; // of DPO: 1 = given with the batch, 2 = computed in the step
    int tier; // a qlora_cpu_tier; 0 = the best
    bool no_cublas;
    bool compare_graph;
    bool compare_adapters;
    bool compare_sft;
    bool once;
    bool json;
    bool verbose;
} step_options;

static const char step_help[] =
    "usage: bench step --shape NAME --batch B --seq S [options]\n"
    "  --shape NAME              a shape that `plan --help` names, such as llama-3.1-8b or\n"
    "                            gemma-3-4b, or tiny or tiny-experts (required)\n"
    "  --layers N                the first N layers of the shape (default: all)\n"
    "  --batch B, --seq S        sequences per step and tokens per sequence (required)\n"
    "  --labels X                share of each sequence, at its end, that has labels (default 1)\n"
    "  --lengths FILE            lengths of sequences, one per line, at most S each; as many as\n"
    "                            fit are packed into B * S tokens, as finetune does; tokens per\n"
    "                            second are those of sequences, without padding\n"
    "  --accumulate N            micro-batches of B sequences per step (default 1)\n"
    "  --rank R                  LoRA rank (default 16)\n"
    "  --targets LIST            projections with adapters, in the words of finetune, such as\n"
    "                            attention, experts or all (default all)\n"
    "  --optimizer adamw|adamw8bit\n"
    "                            adamw8bit keeps the moments in 8 bits (default adamw)\n"
    "  --adapters N              train N adapters at once, B / N sequences each (default 1)\n"
    "  --compare-adapters        then run one adapter with the same batch, and one with the\n"
    "                            sequences of one adapter, and print the ratios\n"
    "  --method sft|dpo          what is trained (default sft); with dpo, sequences are pairs\n"
    "  --reference precompute|beside\n"
    "                            the references of dpo: given, or computed in every step\n"
    "                            (default precompute)\n"
    "  --compare-sft             then run sft with the same batch, and print the ratio\n"
    "  --recompute auto|none|full\n"
    "                            layers to recompute (default auto)\n"
    "  --cache auto|on|off       keep 16-bit copies of the 4-bit weights (default auto)\n"
    "  --offload auto|on|off     keep inputs of layers in host memory (default auto)\n"
    "  --tile N                  everything but attention for N tokens at a time\n"
    "  --budget GIB              memory limit (default: free device memory)\n"
    "  --host-budget GIB         limit of host memory for offloading\n"
    "  --once                    one step and no warm-up, for steps that take minutes\n"
    "  --graph on|off            use CUDA graphs (default on)\n"
    "  --compare-graph           run with and without graphs, and print the ratio\n"
    "  --steps N                 steps, timed one by one, then without waiting (default 20)\n"
    "  --head-chunk N            rows of logits computed at a time\n"
    "  --backend any|cpu|cuda    backend (default any)\n"
    "  --mode auto|f32|tf32|bf16|fp8\n"
    "                            arithmetic (default auto)\n"
    "  --base nf4|16bit|32bit|fp8  format of the frozen weights (default nf4)\n"
    "  --head full|nf4           format of the output head (default full)\n"
    "  --threads N               CPU threads (default: one per core)\n"
    "  --tier NAME               CPU tier, such as avx2 (default: the best)\n"
    "  --no-cublas               use the library's own products\n"
    "  --tflops X, --tbps X      the roofline's two rates (default 790 and 4.3)\n"
    "  --json                    print one line of JSON\n"
    "  --verbose                 print the library's log on standard error\n";

static int step_choice(const char* value, const char* words) {
    size_t n = strlen(value);
    int index = 0;
    for (const char* w = words; *w != '\0'; index++) {
        size_t length = strcspn(w, "|");
        if (length == n && n > 0 && strncmp(w, value, n) == 0) {
            return index;
        }
        w += length + (w[length] == '|' ? 1 : 0);
    }
    return -1;
}

static bool step_number(const char* value, double low, double high, double* out) {
    char* end = NULL;
    *out = strtod(value, &end);
    return end != value && *end == '\0' && *out >= low && *out <= high;
}

// Parses one option with its value; returns false if either is invalid.
static bool step_option(step_options* o, const char* name, const char* value) {
    const struct {
        const char* name;
        int64_t* to;
        double most;
    } wholes[] = {{"--batch", &o->batch, 65536},
                  {"--seq", &o->seq, 1 << 24},
                  {"--rank", &o->rank, 1024},
                  {"--adapters", &o->adapters, STEP_ADAPTERS},
                  {"--steps", &o->steps, 100000},
                  {"--accumulate", &o->accumulate, 65536},
                  {"--layers", &o->layers, 1 << 20},
                  {"--head-chunk", &o->head_chunk, 1 << 24},
                  {"--tile", &o->tile, 1 << 24},
                  {"--threads", &o->threads, 64}};
    const struct {
        const char* name;
        double* to;
    } reals[] = {{"--budget", &o->budget},
                 {"--host-budget", &o->host_budget},
                 {"--tflops", &o->tflops},
                 {"--tbps", &o->tbps},
                 {"--labels", &o->labels}};
    const struct {
        const char* name;
        int* to;
        const char* words;
        int first;
    } choices[] = {{"--recompute", &o->recompute, "auto|full|none", 0},
                   {"--cache", &o->cache, "auto|on|off", 0},
                   {"--offload", &o->offload, "auto|on|off", 0},
                   {"--graph", &o->graph, "on|off", 1},
                   {"--optimizer", &o->optimizer, "adamw|adamw8bit", 0},
                   {"--backend", &o->backend, "any|cpu|cuda", 0},
                   {"--mode", &o->mode, "auto|f32|tf32|bf16|fp8", 0},
                   {"--base", &o->base, "nf4|16bit|32bit|fp8", 0},
                   {"--head", &o->head, "full|nf4", 0},
                   {"--method", &o->method, "sft|dpo", 0},
                   {"--reference", &o->reference, "precompute|beside", 1}};
    double number = 0.0;
    for (size_t i = 0; i < sizeof wholes / sizeof wholes[0]; i++) {
        if (strcmp(name, wholes[i].name) == 0) {
            bool ok = step_number(value, 1, wholes[i].most, &number) && number == floor(number);
            *wholes[i].to = ok ? (int64_t)number : 0;
            return ok;
        }
    }
    for (size_t i = 0; i < sizeof reals / sizeof reals[0]; i++) {
        if (strcmp(name, reals[i].name) == 0) {
            return step_number(value, 1e-6, 1e9, reals[i].to);
        }
    }
    for (size_t i = 0; i < sizeof choices / sizeof choices[0]; i++) {
        if (strcmp(name, choices[i].name) == 0) {
            *choices[i].to = step_choice(value, choices[i].words) + choices[i].first;
            return *choices[i].to >= choices[i].first;
        }
    }
    for (int t = 1; strcmp(name, "--tier") == 0 && t < QLORA_CPU_TIER_COUNT; t++) {
        o->tier = strcmp(value, qlora_cpu_tier_name((qlora_cpu_tier)t)) == 0 ? t : o->tier;
    }
    if (strcmp(name, "--tier") == 0) {
        return o->tier != 0;
    }
    if (strcmp(name, "--lengths") == 0) {
        o->lengths = value;
        return value[0] != '\0';
    }
    if (strcmp(name, "--targets") == 0) {
        return step_targets("bench step", value, &o->targets);
    }
    if (strcmp(name, "--shape") == 0) {
        o->shape = step_shape(value);
        return o->shape != NULL;
    }
    return false;
}

static bool step_parse(step_options* o, int argc, char** argv) {
    memset(o, 0, sizeof *o);
    o->rank = 16;
    o->adapters = 1;
    o->steps = 20;
    o->accumulate = 1;
    o->tflops = 790.0;
    o->tbps = 4.3;
    o->labels = 1.0;
    o->graph = 1;
    for (int i = 1; i < argc; i++) {
        bool* flag = strcmp(argv[i], "--json") == 0            ? &o->json
                     : strcmp(argv[i], "--verbose") == 0       ? &o->verbose
                     : strcmp(argv[i], "--once") == 0          ? &o->once
                     : strcmp(argv[i], "--no-cublas") == 0     ? &o->no_cublas
                     : strcmp(argv[i], "--compare-graph") == 0 ? &o->compare_graph
                     : strcmp(argv[i], "--compare-sft") == 0   ? &o->compare_sft
                     : strcmp(argv[i], "--compare-adapters") == 0
                         ? &o->compare_adapters
                         : NULL;
        if (flag != NULL) {
            *flag = true;
            continue;
        }
        const char* value = i + 1 < argc ? argv[i + 1] : "";
        if (!step_option(o, argv[i], value)) {
            fprintf(stderr, "bench step: invalid option or value: %s %s; see --help\n", argv[i],
                    value);
            return false;
        }
        i++;
    }
    o->steps = o->once ? 1 : o->steps;
    if (o->shape == NULL || o->batch == 0 || o->seq == 0) {
        fprintf(stderr, "bench step: --shape, --batch and --seq are required; see --help\n");
        return false;
    }
    if (!step_cut("bench step", &o->shape, o->layers, &o->cut)) {
        return false;
    }
    if (o->labels > 1.0 || (o->lengths != NULL && o->adapters > 1)) {
        fprintf(stderr,
                "bench step: --labels must be at most 1, and --lengths needs one adapter\n");
        return false;
    }
    if (o->batch % o->adapters != 0) {
        fprintf(stderr, "bench step: --batch must be a multiple of --adapters\n");
        return false;
    }
    bool dpo = o->method == QLORA_METHOD_DPO;
    if (dpo && (o->batch % 2 != 0 || o->adapters > 1 || o->accumulate > 1 || o->lengths != NULL)) {
        fprintf(stderr, "bench step: --method dpo needs an even --batch, one adapter, and no "
                        "--accumulate or --lengths\n");
        return false;
    }
    if (!dpo && (o->reference != 0 || o->compare_sft)) {
        fprintf(stderr, "bench step: --reference and --compare-sft need --method dpo\n");
        return false;
    }
    return true;
}

// ---- one run ------------------------------------------------------------------------------------

enum { STEP_BATCHES = 4, STEP_WARM_UP = 3, STEP_LINES = 65536 };

typedef struct step_run {
    const step_options* o;
    bool graph;
    qlora_ctx* ctx;
    qlora_model* model;
    qlora_trainer* trainer; // the first one
    qlora_trainer* trainers[STEP_ADAPTERS];
    int32_t* ids;    // STEP_BATCHES different batches
    int32_t* labels; // of them; -100 = none
    int32_t* lengths;
    int64_t most;                 // sequences of a batch; those of batch i are from i * most on
    int64_t counts[STEP_BATCHES]; // of each batch: sequences
    double used[STEP_BATCHES];    // tokens
    double weights[STEP_BATCHES]; // labels that count
    int32_t* adapters;            // of the sequences
    double* references;           // of the sequences of all batches
    double* times;
    double* host;
    double open_start;
    double weights_start; // time of the first progress report of the weights
    // results
    qlora_plan plan;
    double first_step_s; // since the process started
    double prewarm_s;
    double open_s;
    double median_ms;
    double best_ms;
    double best_cpu_ms; // CPU time of all threads, which other programs disturb less
    double mean_ms;
    double host_us;
    uint64_t allocations;
    qlora_memory_info memory;
    qlora_cache_info cache;
    qlora_train_info first;
    qlora_train_info last;
} step_run;

static double step_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double step_cpu_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static bool step_ok(const step_run* s, qlora_result r) {
    if (r != QLORA_OK) {
        fprintf(stderr, "bench step: %s: %s\n", qlora_result_name(r), qlora_last_error(s->ctx));
    }
    return r == QLORA_OK;
}

static bool step_progress(void* user, const char* what, uint64_t done, uint64_t total) {
    step_run* s = (step_run*)user;
    (void)what;
    (void)done;
    (void)total;
    if (s->weights_start == 0.0) {
        s->weights_start = step_seconds();
    }
    return true;
}

static bool step_planned(step_run* s, qlora_model_desc* desc) {
    desc->plan = &s->plan;
    return step_ok(s, qlora_model_open(s->ctx, desc, &s->model));
}

static bool step_trainers(step_run* s, qlora_train_desc* train) {
    for (int64_t i = 0; i < s->o->adapters; i++) {
        train->adapter = (int32_t)i;
        if (!step_ok(s, qlora_trainer_create(s->model, train, &s->trainers[i]))) {
            return false;
        }
    }
    s->trainer = s->trainers[0];
    return true;
}

// The log-probabilities of all batches by the base.
static bool step_references(step_run* s) {
    const step_options* o = s->o;
    bool ok = step_ok(s, qlora_adapter_use(s->model, false));
    for (int64_t i = 0; i < STEP_BATCHES && ok; i++) {
        qlora_batch b;
        memset(&b, 0, sizeof b);
        b.ids = s->ids + i * o->batch * o->seq;
        b.labels = b.ids;
        b.lengths = s->lengths;
        b.count = o->batch;
        ok = step_ok(s, qlora_eval_sequences(s->model, &b, s->references + i * o->batch));
    }
    return ok && step_ok(s, qlora_adapter_use(s->model, true));
}

static bool step_open(step_run* s) {
    const step_options* o = s->o;
    qlora_adapter_slot slots[STEP_ADAPTERS];
    qlora_model_config config = shape_config(o->shape);
    qlora_model_desc desc;
    qlora_train_desc train;
    qlora_plan_desc budget;
    memset(&desc, 0, sizeof desc);
    memset(&train, 0, sizeof train);
    memset(&budget, 0, sizeof budget);
    config.max_positions = 0; // the weights are random: no length is too long for them
    desc.config = &config;
    desc.seed = 1;
    desc.weight_std = 0.02f;
    desc.mode = o->mode == 2 ? QLORA_MODE_F32 : (qlora_mode)o->mode; // 2: tf32, of the context
    desc.base = (qlora_base_format)o->base;
    desc.head = (qlora_head_format)o->head;
    desc.rank = (int32_t)o->rank;
    desc.targets = (uint32_t)o->targets;
    desc.optimizer = (qlora_optimizer)o->optimizer;
    memset(slots, 0, sizeof slots);
    for (int64_t i = 0; i < o->adapters; i++) {
        slots[i].seed = (uint64_t)i + 1;
    }
    desc.slots = slots;
    desc.slot_count = o->adapters;
    desc.progress = step_progress;
    desc.progress_user = s;
    desc.tokens = o->batch * o->seq;
    desc.max_sequences = s->most;
    desc.max_length = o->seq;
    desc.head_chunk = o->head_chunk;
    train.schedule = QLORA_SCHEDULE_CONSTANT;
    desc.recompute = (qlora_choice)o->recompute;
    desc.cache = (qlora_choice)o->cache;
    desc.offload = (qlora_choice)o->offload;
    desc.tile = o->tile;
    desc.accumulate = o->accumulate;
    train.method = (qlora_method)o->method;
    train.eager = !s->graph;
    // Adapters whose ranks are too large to stand side by side have no graphs.
    bool wide = o->adapters * o->rank <= (config.hidden > 1024 ? config.hidden / 8 : 128);
    train.require_graph = s->graph && (o->adapters == 1 || wide) &&
                          qlora_ctx_backend(s->ctx) == QLORA_BACKEND_CUDA;
    budget.bytes = (uint64_t)(o->budget * 1073741824.0);
    budget.host_bytes = (uint64_t)(o->host_budget * 1073741824.0);
    s->open_start = step_seconds();
    s->weights_start = 0.0;
    if (!step_ok(s, qlora_plan_make(s->ctx, &desc, &budget, &s->plan)) ||
        !step_planned(s, &desc) || !step_trainers(s, &train)) {
        return false;
    }
    s->open_s = step_seconds() - s->open_start;
    s->prewarm_s = s->weights_start - s->open_start;
    bool given = o->method == QLORA_METHOD_DPO && o->reference != 2;
    return !given || step_references(s);
}

// Reads the lengths of a file; 0 if there are none, or if one is not a number from 2 on.
static int64_t step_lines(const step_options* o, int32_t* out) {
    FILE* f = fopen(o->lengths, "r");
    long value = 0;
    int64_t count = 0;
    int got = 1;
    while (f != NULL && count < STEP_LINES && (got = fscanf(f, "%ld", &value)) == 1 && value >= 2) {
        out[count++] = (int32_t)(value < o->seq ? value : o->seq);
    }
    bool good = f != NULL && got != 0 && value >= 2;
    if (f != NULL) {
        fclose(f);
    }
    return good ? count : 0;
}

// The sequences of each batch: as many of the file as fit, in its order, which is repeated.
static bool step_pack(step_run* s) {
    static int32_t lines[STEP_LINES];
    int64_t tokens = s->o->batch * s->o->seq;
    int64_t count = s->o->lengths != NULL ? step_lines(s->o, lines) : 1;
    int64_t next = 0;
    if (count == 0) {
        fprintf(stderr, "bench step: %s has no lengths, or one that is below 2\n", s->o->lengths);
        return false;
    }
    for (int64_t b = 0; b < STEP_BATCHES; b++) {
        int64_t at = 0;
        int32_t* labels = s->labels + b * tokens;
        for (; s->counts[b] < s->most; s->counts[b]++, next++) {
            int64_t length = s->o->lengths != NULL ? lines[next % count] : s->o->seq;
            if (at + length > tokens) {
                break;
            }
            int64_t first = length - (int64_t)ceil(s->o->labels * (double)length);
            for (int64_t i = 0; i < first; i++) {
                labels[at + i] = -100;
            }
            s->lengths[b * s->most + s->counts[b]] = (int32_t)length;
            s->weights[b] += (double)(length - (first > 1 ? first : 1)); // the first predicts none
            at += length;
        }
        s->used[b] = (double)at;
    }
    return true;
}

static bool step_data(step_run* s) {
    int64_t tokens = s->o->batch * s->o->seq;
    s->most = s->o->lengths != NULL && tokens / 8 > s->o->batch ? tokens / 8 : s->o->batch;
    s->labels = (int32_t*)malloc((size_t)(tokens * STEP_BATCHES) * sizeof *s->labels);
    s->ids = (int32_t*)malloc((size_t)(tokens * STEP_BATCHES) * sizeof *s->ids);
    s->lengths = (int32_t*)malloc((size_t)(s->most * STEP_BATCHES) * sizeof *s->lengths);
    s->adapters = (int32_t*)malloc((size_t)s->o->batch * sizeof *s->adapters);
    s->references =
        (double*)malloc((size_t)(s->o->batch * STEP_BATCHES) * sizeof *s->references);
    s->times = (double*)malloc((size_t)s->o->steps * sizeof *s->times);
    s->host = (double*)malloc((size_t)s->o->steps * sizeof *s->host);
    if (s->ids == NULL || s->labels == NULL || s->lengths == NULL || s->adapters == NULL ||
        s->references == NULL || s->times == NULL || s->host == NULL) {
        fprintf(stderr, "bench step: out of memory\n");
        return false;
    }
    uint64_t state = 0x9e3779b97f4a7c15u;
    for (int64_t i = 0; i < tokens * STEP_BATCHES; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        s->ids[i] = (int32_t)((state >> 33) % (uint64_t)s->o->shape->vocab);
        s->labels[i] = s->ids[i];
    }
    for (int64_t i = 0; i < s->o->batch; i++) {
        s->adapters[i] = (int32_t)(i * s->o->adapters / s->o->batch);
    }
    return step_pack(s);
}

static qlora_batch step_batch(const step_run* s, int64_t number) {
    qlora_batch b;
    memset(&b, 0, sizeof b);
    b.ids = s->ids + number * s->o->batch * s->o->seq;
    b.labels = s->labels + number * s->o->batch * s->o->seq;
    b.lengths = s->lengths + number * s->most;
    b.count = s->counts[number];
    return b;
}

// The calls of a step; they do not wait for the device.
static bool step_once(step_run* s, int64_t number) {
    if (s->o->adapters > 1) {
        qlora_batch b = step_batch(s, number % STEP_BATCHES);
        b.adapters = s->adapters;
        return step_ok(s, qlora_train_step_each(s->trainers, s->o->adapters, &b, 1, NULL));
    }
    if (s->o->method == QLORA_METHOD_DPO) {
        int64_t batch = number % STEP_BATCHES;
        qlora_batch b = step_batch(s, batch);
        b.references = s->o->reference == 2 ? NULL : s->references + batch * s->o->batch;
        return step_ok(s, qlora_train_step(s->trainer, &b, 1, NULL));
    }
    double labels = 0.0;
    for (int64_t i = 0; i < s->o->accumulate; i++) {
        labels += s->weights[(number * s->o->accumulate + i) % STEP_BATCHES];
    }
    for (int64_t i = 0; i < s->o->accumulate; i++) {
        qlora_batch b = step_batch(s, (number * s->o->accumulate + i) % STEP_BATCHES);
        if (!step_ok(s, qlora_train_micro(s->trainer, &b, labels))) {
            return false;
        }
    }
    return step_ok(s, qlora_train_update(s->trainer));
}

static int step_ascending(const void* a, const void* b) {
    double x = *(const double*)a;
    double y = *(const double*)b;
    return x < y ? -1 : x > y ? 1 : 0;
}

static double step_median(double* values, int64_t n) {
    qsort(values, (size_t)n, sizeof *values, step_ascending);
    return n % 2 == 1 ? values[n / 2] : 0.5 * (values[n / 2 - 1] + values[n / 2]);
}

static bool step_measure(step_run* s, double process_start) {
    int64_t n = s->o->steps;
    qlora_ctx_info before;
    qlora_ctx_info after;
    if (!step_ok(s, qlora_ctx_query(s->ctx, &before))) {
        return false;
    }
    bool cpu = qlora_ctx_backend(s->ctx) == QLORA_BACKEND_CPU;
    s->best_cpu_ms = 1e30;
    int64_t warm = s->o->lengths != NULL ? STEP_BATCHES : STEP_WARM_UP; // each has its own graph
    for (int64_t i = 0; i < (s->o->once ? 0 : cpu ? 1 : warm); i++) {
        if (!step_once(s, i) || !step_ok(s, qlora_train_query(s->trainer, &s->last))) {
            return false;
        }
        if (i == 0) {
            s->first = s->last;
            s->first_step_s = step_seconds() - process_start;
        }
    }
    for (int64_t i = 0; i < n; i++) {
        double start = step_seconds();
        double cpu_start = step_cpu_seconds();
        bool ok = step_once(s, i);
        double called = step_seconds();
        if (!ok || !step_ok(s, qlora_train_query(s->trainer, &s->last))) {
            return false;
        }
        s->times[i] = step_seconds() - start;
        s->host[i] = called - start;
        s->best_cpu_ms = fmin(s->best_cpu_ms, (step_cpu_seconds() - cpu_start) * 1e3);
        if (s->o->once) {
            s->first = s->last;
            s->first_step_s = step_seconds() - process_start;
        }
    }
    bool alone = cpu || s->o->once; // on the CPU every call waits
    double start = step_seconds();
    for (int64_t i = 0; i < n && !alone; i++) {
        if (!step_once(s, i)) {
            return false;
        }
    }
    if (!step_ok(s, qlora_train_query(s->trainer, &s->last))) {
        return false;
    }
    s->mean_ms = (step_seconds() - start) * 1e3 / (double)n;
    s->median_ms = step_median(s->times, n) * 1e3;
    s->best_ms = s->times[0] * 1e3; // sorted
    s->mean_ms = alone ? s->median_ms : s->mean_ms;
    s->host_us = step_median(s->host, n) * 1e6;
    if (!step_ok(s, qlora_ctx_query(s->ctx, &after)) ||
        !step_ok(s, qlora_cache_query(s->ctx, &s->cache))) {
        return false;
    }
    s->memory = after.memory;
    s->allocations = s->memory.device_allocations - before.memory.device_allocations;
    return true;
}

// ---- roofline -----------------------------------------------------------------------------------

typedef struct step_floor {
    double flops;
    double bytes;
    double ms;
} step_floor;

// On average over the batches, whose lengths differ.
static step_floor step_roofline(const step_run* s) {
    const step_options* o = s->o;
    double more = (double)o->accumulate;
    step_floor f = {0.0, 0.0, 0.0};
    for (int64_t b = 0; b < STEP_BATCHES; b++) {
        qlora_cost cost;
        qlora_plan_cost(&s->plan, s->lengths + b * s->most, s->counts[b], s->weights[b], &cost);
        // With dpo, the base may compute its references first.
        bool twice = o->method == QLORA_METHOD_DPO && o->reference == 2;
        f.flops += cost.flops + cost.again + (twice ? cost.forward : 0.0);
        f.bytes += cost.bytes + (twice ? cost.forward_bytes : 0.0);
    }
    f.flops *= more / STEP_BATCHES;
    f.bytes *= more / STEP_BATCHES;
    f.bytes += 12.0 * (more - 1.0) * (double)s->plan.parameters; // sums of gradients
    f.bytes += s->plan.work.update;
    f.ms = f.flops / (o->tflops * 1e9) + f.bytes / (o->tbps * 1e9);
    return f;
}

// ---- report -------------------------------------------------------------------------------------

static const char* step_method(const step_options* o) {
    return o->method == QLORA_METHOD_SFT ? "sft"
           : o->reference == 2           ? "dpo with references beside the step"
                                         : "dpo with given references";
}

// How many parameters are trained, and where.
static void step_print_trained(const step_run* s) {
    char places[256];
    qlora_places_describe(&s->plan, places, sizeof places);
    printf(s->o->json ? ", \"trained\": %lld, \"trained_where\": \"%s\""
                      : "  %lld trained parameters: %s\n",
           (long long)s->plan.parameters, places);
}

static void step_print(const step_run* s) {
    const step_options* o = s->o;
    const double gib = 1073741824.0;
    double tokens = 0.0; // mean of the batches
    double weights = 0.0;
    for (int i = 0; i < STEP_BATCHES; i++) {
        tokens += s->used[i] * (double)o->accumulate / STEP_BATCHES;
        weights += s->weights[i] * (double)o->accumulate / STEP_BATCHES;
    }
    step_floor f = step_roofline(s);
    double used = (double)(s->memory.device_total - s->memory.device_free);
    bool cuda = qlora_ctx_backend(s->ctx) == QLORA_BACKEND_CUDA;
    const struct {
        const char* key;
        const char* text;
        int digits;
        double value;
    } rows[] = {
        {"tokens_per_s", "tokens/s, median step", 0, tokens / s->median_ms * 1e3},
        {"tokens_per_s_mean", "tokens/s, not waiting", 0, tokens / s->mean_ms * 1e3},
        {"step_ms", "ms, median step", 3, s->median_ms},
        {"step_ms_mean", "ms, mean, not waiting", 3, s->mean_ms},
        {"step_ms_best", "ms, best step", 3, s->best_ms},
        {"step_cpu_ms_best", "ms of CPU time, best step", 3, s->best_cpu_ms},
        {"tokens_per_s_best", "tokens/s, best step", 1, tokens / s->best_ms * 1e3},
        {"tokens", "tokens of a step, without padding", 1, tokens},
        {"labels", "labels of a step", 1, weights},
        {"peak_gib", "peak GiB allocated by the library", 3, (double)s->memory.device_peak / gib},
        {"device_used_gib", "GiB used on the device", 3, used / gib},
        {"plan_gib", "GiB planned", 3, (double)(s->plan.total + s->plan.context) / gib},
        {"peak_bytes", "bytes allocated by the library", 0, (double)s->memory.device_peak},
        {"plan_bytes", "bytes planned", 0, (double)(s->plan.total + s->plan.context)},
        {"first_step_s", "s, process start to first step", 3, s->first_step_s},
        {"open_s", "s, opening model and trainer", 3, s->open_s},
        {"prewarm_s", "s, of which pre-warm", 3, s->prewarm_s},
        {"jit_ms", "ms compiling kernels", 1, s->cache.jit_ms},
        {"roofline_ms", "ms, roofline of this step", 3, f.ms},
        {"roofline_percent", "% of the roofline", 1, 100.0 * f.ms / s->median_ms},
        {"tflop", "TFLOP of this step", 3, f.flops * 1e-12},
        {"gbytes", "GB moved by this step", 3, f.bytes * 1e-9},
        {"loss_first", "loss, first step", 5, s->first.loss},
        {"loss_last", "loss, last step", 5, s->last.loss},
        {"grad_norm_first", "gradient norm, first step", 5, (double)s->first.grad_norm},
        {"grad_norm_last", "gradient norm, last step", 5, (double)s->last.grad_norm},
        {"skipped", "skipped steps", 0, (double)s->last.skipped},
        {"host_us", "us of host time per step", 1, s->host_us},
        {"waits", "waits for a staging slot", 0, (double)s->last.waits},
        {"jit_after_seal", "compilations after sealing", 0, (double)s->cache.jit_after_seal},
        {"cublas_unplanned", "unplanned cuBLAS shapes", 0, (double)s->cache.cublas_unplanned},
        {"allocations", "device allocations in training", 0, (double)s->allocations},
        {"recompute_layers", "layers recomputed", 0, (double)s->plan.recompute_layers},
        {"attention_layers", "of which keep attention", 0, (double)s->plan.attention_layers},
        {"heads_layers", "of which keep q, k and v", 0, (double)s->plan.heads_layers},
        {"cached_layers", "layers with 16-bit weights", 0, (double)s->plan.cached_layers},
        {"offloaded_layers", "layers with inputs on the host", 0, (double)s->plan.offloaded_layers},
        {"offloaded_attention", "layers with attention on the host", 0,
         (double)s->plan.offloaded_attention},
        {"host_gib", "GiB of pinned host memory", 3, (double)s->plan.host / 1073741824.0},
        {"offload_every", "one input kept in so many layers", 0, (double)s->plan.offload_every},
        {"tile", "tokens in a tile (0 = all)", 0, (double)s->plan.tile},
    };
    if (o->json) {
        printf("{\"shape\": \"%s\", \"batch\": %lld, \"seq\": %lld, \"accumulate\": %lld, "
               "\"rank\": %lld, \"adapters\": %lld, \"method\": \"%s\", \"backend\": \"%s\", "
               "\"graph\": %s",
               o->shape->name, (long long)o->batch, (long long)o->seq, (long long)o->accumulate,
               (long long)o->rank, (long long)o->adapters, step_method(o), cuda ? "cuda" : "cpu",
               s->last.graphs ? "true" : "false");
    } else {
        printf("%s, %lld x %lld x %lld tokens, rank %lld, adapters %lld, %s, %s, graph %s\n",
               o->shape->name, (long long)o->accumulate, (long long)o->batch, (long long)o->seq,
               (long long)o->rank, (long long)o->adapters, step_method(o), cuda ? "CUDA" : "CPU",
               s->last.graphs ? "on" : "off");
    }
    step_print_trained(s);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        bool number = rows[i].value - rows[i].value == 0.0; // JSON has neither NaN nor infinity
        if (o->json && number) {
            printf(", \"%s\": %.*f", rows[i].key, rows[i].digits, rows[i].value);
        } else if (o->json) {
            printf(", \"%s\": null", rows[i].key);
        } else {
            printf("  %-34s %14.*f\n", rows[i].text, rows[i].digits, rows[i].value);
        }
    }
    printf(o->json ? "}\n" : "\n");
    fflush(stdout);
}

static bool step_run_all(step_run* s, const step_options* o, qlora_ctx* ctx, bool graph,
                         double process_start) {
    memset(s, 0, sizeof *s);
    s->o = o;
    s->ctx = ctx;
    s->graph = graph;
    return step_data(s) && step_open(s) && step_measure(s, process_start);
}

static bool step_close(step_run* s) {
    bool ok = true;
    for (int64_t i = 0; i < s->o->adapters; i++) {
        ok = step_ok(s, qlora_trainer_destroy(s->trainers[i])) && ok;
    }
    ok = step_ok(s, qlora_model_close(s->model)) && ok;
    free(s->ids);
    free(s->labels);
    free(s->lengths);
    free(s->adapters);
    free(s->references);
    free(s->times);
    free(s->host);
    return ok;
}

static bool step_go(const step_options* o, qlora_ctx* ctx, bool graph, double process_start,
                    double* median_ms) {
    step_run s;
    bool ok = step_run_all(&s, o, ctx, graph, process_start);
    if (ok) {
        step_print(&s);
        *median_ms = s.median_ms;
    }
    return step_close(&s) && ok;
}

// The best of two steps on the CPU with a context of one thread (CPU time) or more (wall clock).
static bool step_seconds_of(qlora_ctx* ctx, const char* shape, int base, int mode, int64_t batch,
                            int64_t seq, bool wall, double* seconds) {
    step_options o;
    step_run s;
    memset(&o, 0, sizeof o);
    o.shape = shape_find(shape);
    o.batch = batch;
    o.seq = seq;
    o.rank = 16;
    o.adapters = 1;
    o.steps = 2;
    o.accumulate = 1;
    o.labels = 1.0;
    o.base = base;
    o.mode = mode;
    bool ok = o.shape != NULL && step_run_all(&s, &o, ctx, false, step_seconds());
    *seconds = ok ? (wall ? s.best_ms : s.best_cpu_ms) * 1e-3 : 0.0;
    return o.shape != NULL && step_close(&s) && ok;
}

// Compares the adapters at once, whose step took ms, with one adapter that has all tokens, and with
// trainings of each adapter one after another.
static bool step_compare_adapters(const step_options* all, qlora_ctx* ctx, double process_start,
                                  double ms) {
    step_options one = *all;
    double same_ms = 0.0;
    double each_ms = 0.0;
    one.adapters = 1;
    if (!step_go(&one, ctx, all->graph == 1, process_start, &same_ms)) {
        return false;
    }
    one.batch = all->batch / all->adapters;
    if (!step_go(&one, ctx, all->graph == 1, process_start, &each_ms)) {
        return false;
    }
    printf(all->json ? "{\"of_one_adapter\": %.4f, \"of_one_after_another\": %.4f}\n"
                     : "speed: %.3f x that of one adapter with the same tokens, %.3f x that of "
                       "trainings one after another\n",
           same_ms / ms, (double)all->adapters * each_ms / ms);
    return true;
}

static int bench_step_main(int argc, char** argv) {
    double process_start = step_seconds();
    step_options o;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0) {
            fputs(step_help, stdout);
            return 0;
        }
    }
    if (!step_parse(&o, argc, argv)) {
        return 1;
    }
    char why[512] = "";
    qlora_ctx_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.require_backend = (qlora_backend)o.backend;
    desc.threads = (int32_t)o.threads;
    desc.cpu_tier = (qlora_cpu_tier)o.tier;
    desc.cublas_library = o.no_cublas ? "none" : NULL;
    desc.math = o.mode == 2 ? QLORA_MATH_TF32 : QLORA_MATH_F32;
    desc.log = o.verbose ? qlora_log_stderr : NULL;
    desc.error_text = why;
    desc.error_text_size = sizeof why;
    qlora_ctx* ctx = NULL;
    if (qlora_ctx_create(&desc, &ctx) != QLORA_OK) {
        fprintf(stderr, "bench step: %s\n", why);
        return 1;
    }
    double first_ms = 0.0;
    double second_ms = 0.0;
    bool ok = step_go(&o, ctx, o.compare_graph || o.graph == 1, process_start, &first_ms);
    if (ok && o.compare_graph) {
        ok = step_go(&o, ctx, false, process_start, &second_ms);
        printf(o.json ? "{\"graph_speedup\": %.4f}\n" : "speed-up by graphs: %.3f x\n",
               second_ms / first_ms);
    }
    if (ok && o.compare_adapters) {
        ok = step_compare_adapters(&o, ctx, process_start, first_ms);
    }
    if (ok && o.compare_sft) {
        o.method = QLORA_METHOD_SFT;
        ok = step_go(&o, ctx, o.graph == 1, process_start, &second_ms);
        printf(o.json ? "{\"of_sft\": %.4f}\n" : "speed: %.3f x that of sft\n",
               second_ms / first_ms);
    }
    if (qlora_ctx_destroy(ctx) != QLORA_OK) {
        fprintf(stderr, "bench step: the context could not be destroyed\n");
        ok = false;
    }
    return ok ? 0 : 1;
}

#endif
