// generate.c - texts by qlora_generate against qlora_eval_logits of the same texts, on small
// random models of every kind: grouped heads, biases, q/k norms, sliding windows, tied and untied
// heads.
#include "machines.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ROOM 24

typedef struct kind {
    const char* name;
    qlora_family family;
    int64_t heads;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t window; // of every second layer
    bool bias;
    bool qk_norm;
    bool tied;
    qlora_base_format base;
    qlora_choice cache;
} kind;

static const kind kinds[] = {
    {"llama", QLORA_FAMILY_LLAMA, 4, 2, 16, 0, false, false, false, QLORA_BASE_NF4,
     QLORA_CHOICE_OFF},
    {"qwen2, cached", QLORA_FAMILY_QWEN2, 6, 2, 16, 0, true, false, true, QLORA_BASE_NF4,
     QLORA_CHOICE_ON},
    {"qwen3", QLORA_FAMILY_QWEN3, 4, 4, 32, 0, false, true, true, QLORA_BASE_NF4, QLORA_CHOICE_OFF},
    {"mistral", QLORA_FAMILY_MISTRAL, 4, 1, 16, 5, false, false, false, QLORA_BASE_16BIT,
     QLORA_CHOICE_OFF},
    {"head of 64", QLORA_FAMILY_LLAMA, 2, 1, 64, 7, false, false, false, QLORA_BASE_NF4,
     QLORA_CHOICE_OFF},
};

static qlora_model_config config_of(const kind* k) {
    qlora_model_config c;
    memset(&c, 0, sizeof c);
    c.family = k->family;
    c.vocab = 61;
    c.hidden = 64;
    c.intermediate = 96;
    c.layers = 2;
    c.heads = k->heads;
    c.kv_heads = k->kv_heads;
    c.head_dim = k->head_dim;
    c.max_positions = 64;
    c.rms_eps = 1e-5;
    c.rope.theta = 10000.0;
    c.rope.factor = 1.0;
    c.window = k->window;
    c.sliding[1] = k->window > 0 ? 1 : 0;
    c.qkv_bias = k->bias;
    c.qk_norm = k->qk_norm;
    c.tied = k->tied;
    c.stop_count = 1;
    c.stop_ids[0] = 60;
    return c;
}

typedef struct world {
    qlora_model* model;
    qlora_trainer* trainer;
} world;

// Adapters with something in them, the same for every model of a kind.
static bool fill_adapters(qlora_model* model) {
    test_random random = test_random_start("adapters of test_generate");
    for (int64_t i = 0; i < qlora_model_parameters(model); i++) {
        qlora_parameter p;
        if (qlora_model_parameter(model, i, &p) != QLORA_OK) {
            return false;
        }
        float* values = (float*)malloc((size_t)(p.rows * p.cols) * 4);
        test_random_fill(&random, values, (size_t)(p.rows * p.cols), 0.15f);
        qlora_result r = qlora_model_parameter_write(model, i, values);
        free(values);
        if (r != QLORA_OK) {
            return false;
        }
    }
    return true;
}

static bool world_open(qlora_ctx* ctx, const kind* k, qlora_mode mode, int64_t tokens,
                       bool no_training, world* w) {
    qlora_model_config config = config_of(k);
    qlora_model_desc desc;
    qlora_train_desc train;
    memset(&desc, 0, sizeof desc);
    memset(&train, 0, sizeof train);
    memset(w, 0, sizeof *w);
    desc.config = &config;
    desc.seed = 11;
    desc.weight_std = 0.25f;
    desc.base = k->base;
    desc.mode = mode;
    desc.rank = 4;
    train.tokens = tokens;
    train.max_sequences = 2;
    train.generate_tokens = ROOM;
    train.no_training = no_training;
    train.cache = k->cache;
    return qlora_model_open(ctx, &desc, &train, NULL, &w->model) == QLORA_OK &&
           fill_adapters(w->model) && qlora_trainer_create(w->model, &w->trainer) == QLORA_OK;
}

static bool world_close(world* w) {
    return qlora_trainer_destroy(w->trainer) == QLORA_OK && qlora_model_close(w->model) == QLORA_OK;
}

typedef struct text {
    int32_t ids[64];
    int32_t count;
    int32_t stop_after; // tokens; 0 = never
} text;

static bool take(void* user, int32_t token) {
    text* t = (text*)user;
    t->ids[t->count++] = token;
    return t->stop_after == 0 || t->count < t->stop_after;
}

static const int32_t none[1] = {-1};

static qlora_generate_desc desc_of(const int32_t* prompt, int64_t prompt_tokens) {
    qlora_generate_desc d;
    memset(&d, 0, sizeof d);
    d.prompt = prompt;
    d.prompt_tokens = prompt_tokens;
    d.stops = none;
    d.stop_count = 1;
    return d;
}

// How far below the top each generated token lies, relative to the largest logit; the reference
// sees the whole text at once.
static double worst_choice(world* w, const int32_t* ids, int32_t count, int32_t prompt) {
    float* logits = (float*)malloc((size_t)(count * 61) * 4);
    qlora_batch b;
    memset(&b, 0, sizeof b);
    b.ids = ids;
    b.labels = ids;
    b.lengths = &count;
    b.count = 1;
    double worst = NAN;
    if (qlora_eval_logits(w->trainer, &b, logits) == QLORA_OK) {
        worst = 0.0;
        for (int32_t i = prompt - 1; i + 1 < count; i++) {
            const float* row = logits + i * 61;
            double top = -INFINITY;
            double most = 0.0;
            for (int32_t v = 0; v < 61; v++) {
                top = (double)row[v] > top ? (double)row[v] : top;
                most = fabs((double)row[v]) > most ? fabs((double)row[v]) : most;
            }
            double below = (top - (double)row[ids[i + 1]]) / most;
            worst = below <= worst ? worst : below;
        }
    }
    free(logits);
    return worst;
}

// Generates with one world and judges by the other.
static bool greedy_holds(world* w, world* judge, int64_t prompt, int64_t fresh, double limit) {
    static const int32_t start[ROOM] = {1,  17, 42, 3,  3,  58, 20, 9, 31, 44, 5,  12,
                                        50, 2,  27, 33, 19, 8,  46, 7, 13, 55, 21, 30};
    int32_t all[ROOM];
    text t;
    memset(&t, 0, sizeof t);
    qlora_generate_desc d = desc_of(start, prompt);
    d.max_tokens = fresh;
    if (qlora_generate(w->model, &d, take, &t) != QLORA_OK || t.count != fresh) {
        printf("generate: %d of %d tokens, %s\n", (int)t.count, (int)fresh,
               qlora_last_error(qlora_model_ctx(w->model)));
        return false;
    }
    memcpy(all, start, (size_t)prompt * 4);
    memcpy(all + prompt, t.ids, (size_t)fresh * 4);
    double worst = worst_choice(judge, all, (int32_t)(prompt + fresh), (int32_t)prompt);
    if (!(worst <= limit)) {
        printf("prompt of %d: a chosen token lies %g below the top\n", (int)prompt, worst);
        return false;
    }
    return true;
}

static bool kind_holds(qlora_ctx* ctx, const kind* k, qlora_mode mode) {
    double limit = mode == QLORA_MODE_BF16 ? 0.03 : 1e-6;
    world w;
    world small;
    memset(&small, 0, sizeof small);
    bool ok =
        world_open(ctx, k, mode, ROOM, true, &w) && world_open(ctx, k, mode, 6, false, &small);
    if (!ok) {
        printf("%s: %s\n", k->name, qlora_last_error(ctx));
    }
    ok = ok && greedy_holds(&w, &w, 3, 12, limit) && greedy_holds(&w, &w, 1, 5, limit);
    // A prompt longer than one pass takes; its last pass is one token, or its only one is full.
    ok = ok && greedy_holds(&small, &w, 10, 6, limit) && greedy_holds(&small, &w, 6, 3, limit);
    ok = ok && qlora_model_use_adapters(w.model, false) == QLORA_OK &&
         qlora_model_use_adapters(small.model, false) == QLORA_OK &&
         greedy_holds(&small, &w, 8, 4, limit);
    if (!ok) {
        printf("  %s, mode %d\n", k->name, (int)mode);
    }
    bool closed = world_close(&small);
    return world_close(&w) && closed && ok;
}

TEST greedy_is_the_top_of_the_logits(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    // Everything on one fake machine, the first and the last kind on the others; bf16 first, so
    // that no kernel is there from an f32 model that its own pre-warm forgot.
    bool all = (machine->sets & TEST_ONE_EACH) != 0;
    size_t count = sizeof kinds / sizeof kinds[0];
    for (size_t i = 0; i < count; i++) {
        if ((machine->sets & TEST_TENSOR_CORES) != 0 && (all || i + 1 == count)) {
            ASSERT(kind_holds(ctx, &kinds[i], QLORA_MODE_BF16));
        }
        if (all || i == 0) {
            ASSERT(kind_holds(ctx, &kinds[i], QLORA_MODE_F32));
        }
    }
    qlora_cache_info info;
    ASSERT_EQ(QLORA_OK, qlora_cache_query(ctx, &info));
    ASSERT_EQ(0, (int)info.jit_after_seal);
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// What decoding does is run once when the model is opened: its first token meets nothing new.
TEST decoding_is_warmed(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    world w;
    ASSERT(world_open(ctx, &kinds[0], QLORA_MODE_BF16, ROOM, false, &w));
    static const int32_t prompt[] = {9};
    qlora_generate_desc d = desc_of(prompt, 1);
    d.max_tokens = 1;
    text t;
    memset(&t, 0, sizeof t);
    qlora_cache_info before;
    qlora_cache_info after;
    ASSERT_EQ(QLORA_OK, qlora_cache_query(ctx, &before));
    ASSERT(before.sealed);
    ASSERT_EQ(QLORA_OK, qlora_generate(w.model, &d, take, &t));
    ASSERT_EQ(QLORA_OK, qlora_cache_query(ctx, &after));
    ASSERT_EQ(before.cublas_unplanned, after.cublas_unplanned);
    ASSERT_EQ(before.modules, after.modules);
    ASSERT(world_close(&w));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

TEST adapters_change_the_text(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    world w;
    ASSERT(world_open(ctx, &kinds[0], QLORA_MODE_F32, ROOM, true, &w));
    static const int32_t prompt[] = {1, 17, 42};
    text with;
    text without;
    memset(&with, 0, sizeof with);
    memset(&without, 0, sizeof without);
    qlora_generate_desc d = desc_of(prompt, 3);
    ASSERT_EQ(QLORA_OK, qlora_generate(w.model, &d, take, &with));
    ASSERT_EQ(QLORA_OK, qlora_model_use_adapters(w.model, false));
    ASSERT_EQ(QLORA_OK, qlora_generate(w.model, &d, take, &without));
    ASSERT_EQ(ROOM - 3, with.count); // max_tokens 0: as many as there is room for
    ASSERT(memcmp(with.ids, without.ids, (size_t)with.count * 4) != 0);
    // Nothing is left of the longer text when a shorter one follows.
    text again;
    memset(&again, 0, sizeof again);
    ASSERT_EQ(QLORA_OK, qlora_generate(w.model, &d, take, &again));
    ASSERT_MEM_EQ(without.ids, again.ids, (size_t)again.count * 4);
    ASSERT(world_close(&w));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

static text sampled(world* w, float temperature, int32_t top_k, float top_p, uint64_t seed) {
    static const int32_t prompt[] = {5, 6, 7};
    text t;
    memset(&t, 0, sizeof t);
    qlora_generate_desc d = desc_of(prompt, 3);
    d.max_tokens = 16;
    d.temperature = temperature;
    d.top_k = top_k;
    d.top_p = top_p;
    d.seed = seed;
    if (qlora_generate(w->model, &d, take, &t) != QLORA_OK) {
        t.count = -1;
    }
    return t;
}

TEST sampling_repeats_and_narrows(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    world w;
    ASSERT(world_open(ctx, &kinds[0], QLORA_MODE_F32, ROOM, true, &w));
    text greedy = sampled(&w, 0.0f, 0, 0.0f, 1);
    text first = sampled(&w, 1.5f, 0, 0.0f, 7);
    text same = sampled(&w, 1.5f, 0, 0.0f, 7);
    text other = sampled(&w, 1.5f, 0, 0.0f, 8);
    text one = sampled(&w, 1.5f, 1, 0.0f, 7);
    text narrow = sampled(&w, 1.5f, 0, 1e-6f, 7);
    text both = sampled(&w, 1.5f, 5, 1e-6f, 7);
    text cold = sampled(&w, 1e-30f, 0, 0.0f, 7);
    text wide = sampled(&w, 1.5f, 61, 1.0f, 7);
    ASSERT_EQ(16, greedy.count);
    ASSERT_EQ(16, first.count);
    ASSERT_EQ(16, wide.count);
    ASSERT_MEM_EQ(first.ids, same.ids, 64);
    ASSERT(memcmp(first.ids, other.ids, 64) != 0);
    ASSERT(memcmp(first.ids, greedy.ids, 64) != 0);
    ASSERT_MEM_EQ(greedy.ids, one.ids, 64);
    ASSERT_MEM_EQ(greedy.ids, narrow.ids, 64);
    ASSERT_MEM_EQ(greedy.ids, both.ids, 64);
    ASSERT_MEM_EQ(greedy.ids, cold.ids, 64);
    ASSERT(world_close(&w));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// The first token of many seeds against the softmax of its logits: all of it, its top_k, its top_p.
TEST sampling_follows_the_distribution(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    world w;
    ASSERT(world_open(ctx, &kinds[2], QLORA_MODE_F32, ROOM, true, &w));
    static const int32_t prompt[] = {9};
    static const int32_t length = 1;
    float logits[61];
    qlora_batch b;
    memset(&b, 0, sizeof b);
    b.ids = prompt;
    b.labels = prompt;
    b.lengths = &length;
    b.count = 1;
    ASSERT_EQ(QLORA_OK, qlora_eval_logits(w.trainer, &b, logits));
    static const struct {
        int32_t top_k;
        float top_p;
    } cases[] = {{0, 0.0f}, {4, 0.0f}, {0, 0.6f}, {6, 0.5f}};
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        double p[61];
        bool used[61] = {false};
        double sum = 0.0;
        double kept = 0.0;
        double whole = 0.0;
        const double temperature = 4.0;
        int order[61];
        for (int i = 0; i < 61; i++) { // the reference: selection sort
            p[i] = exp((double)logits[i] / temperature);
            sum += p[i];
        }
        int most = cases[k].top_k > 0 ? cases[k].top_k : 61;
        for (int n = 0; n < 61; n++) {
            int best = -1;
            for (int i = 0; i < 61; i++) {
                best = !used[i] && (best < 0 || p[i] > p[best]) ? i : best;
            }
            used[best] = true;
            order[n] = best;
            whole += n < most ? p[best] / sum : 0.0;
        }
        double share = cases[k].top_p > 0.0f ? (double)cases[k].top_p * whole : whole;
        bool in[61] = {false};
        for (int n = 0; n < most && kept < share - 1e-12; n++) {
            in[order[n]] = true;
            kept += p[order[n]] / sum;
        }
        int counts[61] = {0};
        const int draws = 1500;
        for (int i = 0; i < draws; i++) {
            text t;
            memset(&t, 0, sizeof t);
            qlora_generate_desc d = desc_of(prompt, 1);
            d.max_tokens = 1;
            d.temperature = (float)temperature;
            d.top_k = cases[k].top_k;
            d.top_p = cases[k].top_p;
            d.seed = 1000u + (uint64_t)i;
            ASSERT_EQ(QLORA_OK, qlora_generate(w.model, &d, take, &t));
            counts[t.ids[0]]++;
        }
        for (int i = 0; i < 61; i++) {
            double expected = in[i] ? draws * p[i] / sum / kept : 0.0;
            double off = fabs(counts[i] - expected);
            if (!(off <= 5.0 * sqrt(expected)) || (!in[i] && counts[i] > 0)) {
                printf("case %d, token %d: %d draws, %.1f expected\n", (int)k, i, counts[i],
                       expected);
                FAILm("the draws do not follow the distribution");
            }
        }
    }
    ASSERT(world_close(&w));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

TEST stops_end_a_text(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    world w;
    ASSERT(world_open(ctx, &kinds[0], QLORA_MODE_F32, ROOM, true, &w));
    static const int32_t prompt[] = {1, 17, 42};
    text full;
    text cut;
    text own;
    text few;
    memset(&full, 0, sizeof full);
    memset(&cut, 0, sizeof cut);
    memset(&own, 0, sizeof own);
    memset(&few, 0, sizeof few);
    qlora_generate_desc d = desc_of(prompt, 3);
    ASSERT_EQ(QLORA_OK, qlora_generate(w.model, &d, take, &full));
    int32_t stops[2] = {1000000, full.ids[5]};
    int32_t expected = 0;
    while (full.ids[expected] != full.ids[5]) {
        expected++;
    }
    d.stops = stops;
    d.stop_count = 2;
    ASSERT_EQ(QLORA_OK, qlora_generate(w.model, &d, take, &cut));
    ASSERT_EQ(expected, cut.count); // the stop itself is not handed out
    ASSERT_MEM_EQ(full.ids, cut.ids, (size_t)expected * 4);
    // The model's own.
    d.stops = NULL;
    d.stop_count = 0;
    for (uint64_t seed = 0; seed < 40 && (seed == 0 || own.count == ROOM - 3); seed++) {
        memset(&own, 0, sizeof own);
        d.temperature = 8.0f;
        d.seed = seed;
        ASSERT_EQ(QLORA_OK, qlora_generate(w.model, &d, take, &own));
        for (int32_t i = 0; i < own.count; i++) {
            ASSERT(own.ids[i] != 60);
        }
    }
    ASSERT(own.count < ROOM - 3);
    // The callback.
    few.stop_after = 4;
    d.temperature = 0.0f;
    d.stops = none;
    d.stop_count = 1;
    ASSERT_EQ(QLORA_OK, qlora_generate(w.model, &d, take, &few));
    ASSERT_EQ(4, few.count);
    ASSERT(world_close(&w));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

static bool refused(world* w, qlora_generate_desc d, qlora_result expected, const char* word) {
    text t;
    memset(&t, 0, sizeof t);
    qlora_result r = qlora_generate(w->model, &d, take, &t);
    const char* why = qlora_last_error(qlora_model_ctx(w->model));
    bool ok = r == expected && t.count == 0 && strstr(why, word) != NULL;
    if (!ok) {
        printf("expected %s with \"%s\": %s, %s\n", qlora_result_name(expected), word,
               qlora_result_name(r), why);
    }
    return ok;
}

TEST wrong_calls_are_refused(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    world w;
    ASSERT(world_open(ctx, &kinds[0], QLORA_MODE_F32, ROOM, true, &w));
    static const int32_t prompt[ROOM + 1] = {1, 2, 3};
    static const int32_t bad[2] = {1, 61};
    static const int32_t negative[1] = {-2};
    text t;
    memset(&t, 0, sizeof t);
    const qlora_result wrong = QLORA_ERR_ARGUMENT;
    qlora_generate_desc good = desc_of(prompt, 3);
    ASSERT_EQ(wrong, qlora_generate(NULL, &good, take, &t));
    ASSERT_EQ(wrong, qlora_generate(w.model, NULL, take, &t));
    ASSERT_EQ(wrong, qlora_generate(w.model, &good, NULL, &t));
    qlora_generate_desc d = good;
    d.reserved_must_be_zero1 = 1;
    ASSERT(refused(&w, d, wrong, "zeroed"));
    d = good;
    d.prompt = NULL;
    ASSERT(refused(&w, d, wrong, "prompt"));
    d = good;
    d.prompt_tokens = 0;
    ASSERT(refused(&w, d, wrong, "prompt"));
    d.prompt_tokens = ROOM;
    ASSERT(refused(&w, d, wrong, "generate_tokens"));
    d.prompt_tokens = ROOM - 1; // the largest that leaves one
    ASSERT_EQ(QLORA_OK, qlora_generate(w.model, &d, take, &t));
    ASSERT_EQ(1, t.count);
    d = good;
    d.max_tokens = ROOM - 2;
    ASSERT(refused(&w, d, wrong, "generate_tokens"));
    d.max_tokens = -1;
    ASSERT(refused(&w, d, wrong, "generate_tokens"));
    d = desc_of(bad, 2);
    ASSERT(refused(&w, d, wrong, "vocabulary has 61"));
    const struct {
        float temperature;
        int32_t top_k;
        float top_p;
    } numbers[] = {{-1.0f, 0, 0.0f},     {(float)NAN, 0, 0.0f}, {(float)INFINITY, 0, 0.0f},
                   {1.0f, -1, 0.0f},     {1.0f, 0, -0.1f},      {1.0f, 0, 1.1f},
                   {1.0f, 0, (float)NAN}};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        d = good;
        d.temperature = numbers[i].temperature;
        d.top_k = numbers[i].top_k;
        d.top_p = numbers[i].top_p;
        ASSERT(refused(&w, d, wrong, "temperature"));
    }
    d = good;
    d.stops = negative;
    ASSERT(refused(&w, d, wrong, "no token"));
    d.stops = NULL;
    ASSERT(refused(&w, d, wrong, "NULL"));
    // Damaged adapters are named, not sampled from.
    float nan_row[4 * 64];
    for (int i = 0; i < 4 * 64; i++) {
        nan_row[i] = (float)NAN;
    }
    ASSERT_EQ(QLORA_OK, qlora_model_parameter_write(w.model, 0, nan_row));
    ASSERT(refused(&w, good, QLORA_ERR_STATE, "not finite"));
    ASSERT(world_close(&w));
    // A plan without a cache.
    qlora_model_config config = config_of(&kinds[0]);
    qlora_model_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.config = &config;
    desc.rank = -1;
    desc.mode = QLORA_MODE_F32;
    world plain;
    memset(&plain, 0, sizeof plain);
    ASSERT_EQ(QLORA_OK, qlora_model_open(ctx, &desc, NULL, NULL, &plain.model));
    ASSERT(refused(&plain, good, QLORA_ERR_STATE, "generate_tokens"));
    ASSERT(world_close(&plain));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// Every driver call of a generation fails once: a clean error, and the next text is right again.
TEST failing_driver_calls(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx) {
        SKIPm(test_open_reason());
    }
    world w;
    ASSERT(world_open(ctx, &kinds[0], QLORA_MODE_F32, ROOM, true, &w));
    const fake_api* fake = test_fake();
    static const int32_t prompt[] = {1, 17, 42};
    qlora_generate_desc d = desc_of(prompt, 3);
    d.max_tokens = 3;
    text good;
    memset(&good, 0, sizeof good);
    ASSERT_EQ(QLORA_OK, qlora_generate(w.model, &d, take, &good));
    static const char* const calls[] = {"cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2",
                                        "cuLaunchKernel", "cuStreamSynchronize"};
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        for (int n = 1; n < 4; n++) {
            text t;
            memset(&t, 0, sizeof t);
            fake->fail_at(calls[i], (uint64_t)n, 2, false);
            ASSERT(qlora_generate(w.model, &d, take, &t) != QLORA_OK);
            ASSERT(strlen(qlora_last_error(ctx)) > 0);
            fake->fail_clear();
            memset(&t, 0, sizeof t);
            ASSERT_EQ(QLORA_OK, qlora_generate(w.model, &d, take, &t));
            ASSERT_MEM_EQ(good.ids, t.ids, sizeof good.ids);
        }
    }
    ASSERT(world_close(&w));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// Products that the fake cuBLAS was given since its log was cleared: all of them, those in TF32,
// and the batched ones, which are decoding's attention and exact in every mode.
typedef struct products {
    int all;
    int tf32;
    int batched;
    int batched_tf32;
} products;

static products products_count(const fake_api* fake) {
    products p;
    memset(&p, 0, sizeof p);
    for (const char* line = fake->log(); *line != '\0';) {
        const char* end = strchr(line, '\n');
        size_t n = end != NULL ? (size_t)(end - line) : strlen(line);
        char call[512];
        snprintf(call, sizeof call, "%.*s", (int)(n < 500 ? n : 500), line);
        bool tf32 = strstr(call, "compute 77") != NULL;
        bool batched = strstr(call, "cublasGemmStridedBatchedEx") != NULL;
        if (batched || strstr(call, "cublasGemmEx") != NULL) {
            p.all++;
            p.tf32 += tf32;
            p.batched += batched;
            p.batched_tf32 += tf32 && batched;
        }
        line += n + (end != NULL ? 1 : 0);
    }
    return p;
}

// A model keeps the math that its context had when it was opened: evaluation, generation and
// training agree about it, whatever the context says later.
TEST math_is_the_models(const test_machine* machine) {
    static const qlora_math maths[] = {QLORA_MATH_F32, QLORA_MATH_TF32, QLORA_MATH_TF32_ALL};
    static const int32_t ids[6] = {1, 17, 42, 3, 3, 58};
    static const int32_t count = 6;
    const fake_api* fake = test_fake();
    qlora_ctx* ctx = test_open(machine, NULL);
    if (!ctx)
        SKIPm(test_open_reason());
    for (int i = 0; i < 3; i++) {
        world w;
        text t;
        qlora_batch b;
        qlora_eval_info info;
        memset(&t, 0, sizeof t);
        memset(&b, 0, sizeof b);
        b.ids = ids;
        b.labels = ids;
        b.lengths = &count;
        b.count = 1;
        bool rounds = maths[i] != QLORA_MATH_F32;
        ASSERT_EQ(QLORA_OK, qlora_ctx_set_math(ctx, maths[i]));
        ASSERT(world_open(ctx, &kinds[0], QLORA_MODE_F32, ROOM, false, &w));
        ASSERT_EQ(QLORA_OK, qlora_ctx_set_math(ctx, maths[2 - i]));
        fake->log_clear();
        ASSERT_EQ(QLORA_OK, qlora_eval(w.trainer, &b, &info));
        products eval = products_count(fake);
        ASSERT(eval.all > 0 && eval.batched == 0);
        ASSERT_EQ_FMT(rounds ? eval.all : 0, eval.tf32, "%d");
        fake->log_clear();
        qlora_generate_desc d = desc_of(ids, 3);
        d.max_tokens = 2;
        ASSERT_EQ(QLORA_OK, qlora_generate(w.model, &d, take, &t));
        products generate = products_count(fake);
        ASSERT(generate.batched > 0 && generate.all > generate.batched);
        ASSERT_EQ_FMT(0, generate.batched_tf32, "%d");
        ASSERT_EQ_FMT(rounds ? generate.all - generate.batched : 0, generate.tf32, "%d");
        fake->log_clear();
        ASSERT_EQ(QLORA_OK, qlora_train_micro(w.trainer, &b, 5.0));
        products train = products_count(fake);
        ASSERT(train.all > eval.all);
        if (maths[i] == QLORA_MATH_TF32) { // forward products only, some of them computed again
            ASSERT(train.tf32 >= eval.all && train.tf32 < train.all);
        } else {
            ASSERT_EQ_FMT(rounds ? train.all : 0, train.tf32, "%d");
        }
        ASSERT(world_close(&w));
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

SUITE(generate_suite) {
    RUN_ON(TEST_EVERYWHERE, greedy_is_the_top_of_the_logits);
    RUN_ON(TEST_TENSOR_CORES, decoding_is_warmed);
    RUN_ON(TEST_ONE_EACH, adapters_change_the_text);
    RUN_ON(TEST_ONE_EACH, sampling_repeats_and_narrows);
    RUN_ON(TEST_CPU, sampling_follows_the_distribution);
    RUN_ON(TEST_ONE_EACH, stops_end_a_text);
    RUN_ON(TEST_ONE_EACH, wrong_calls_are_refused);
    RUN_ON(TEST_ONE_FAKE, failing_driver_calls);
    RUN_ON(TEST_ONE_FAKE, math_is_the_models);
}
