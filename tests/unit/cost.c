// cost.c - what a step computes and moves: the sums of the parts of layers against formulas for
// whole models.
#include "machines.h"
#include "programs/shapes.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

// Sizes of a model, and of a step with `batch` sequences of `length` tokens.
typedef struct sizes {
    double L, H, q, kv, V; // layers, widths, vocabulary
    double T;              // tokens
    double labels;
    double seen; // pairs of tokens of which one sees the other, of all layers
    double rank;
    double attention; // weights
} sizes;

static double pairs_of(double length, double window) {
    double all = 0.0;
    for (int64_t i = 0; i < (int64_t)length; i++) { // each token sees half of itself
        double before = (double)i + 0.5;
        all += window > 0.0 && before > window ? window : before;
    }
    return all;
}

static sizes sizes_of(const qlora_model_config* c, int64_t batch, int64_t length) {
    sizes s;
    memset(&s, 0, sizeof s);
    s.L = (double)c->layers;
    s.H = (double)c->hidden;
    s.q = (double)(c->heads * c->head_dim);
    s.kv = (double)(c->kv_heads * c->head_dim);
    s.V = (double)c->vocab;
    s.T = (double)(batch * length);
    s.labels = (double)(batch * (length - 1));
    s.rank = 16.0;
    s.attention = 2.0 * s.H * (s.q + s.kv);
    for (int64_t l = 0; l < c->layers; l++) {
        double window = c->sliding[l] != 0 ? (double)c->window : 0.0;
        s.seen += (double)batch * pairs_of((double)length, window);
    }
    return s;
}

static bool close_to(double expected, double got, double within) {
    bool ok = fabs(expected - got) <= within * fabs(expected);
    if (!ok) {
        printf("expected %.12g, got %.12g\n", expected, got);
    }
    return ok;
}

static bool planned(qlora_ctx* ctx, const char* shape, const qlora_model_desc* how,
                    int32_t capability, qlora_plan* out) {
    qlora_model_config config = shape_config(shape_find(shape));
    qlora_model_desc desc = *how;
    qlora_plan_desc machine;
    memset(&machine, 0, sizeof machine);
    machine.bytes = (uint64_t)1 << 50;
    machine.capability = capability;
    config.max_positions = 0;
    desc.config = &config;
    desc.tokens = 4 * 2048;
    desc.max_sequences = 4;
    desc.max_length = 2048;
    if (qlora_plan_make(ctx, &desc, &machine, out) != QLORA_OK) {
        printf("%s: %s\n", shape, qlora_last_error(ctx));
        return false;
    }
    return true;
}

static qlora_cost cost_of(const qlora_plan* plan, int64_t batch, int64_t length) {
    int32_t lengths[16];
    qlora_cost cost;
    for (int64_t i = 0; i < batch; i++) {
        lengths[i] = (int32_t)length;
    }
    qlora_plan_cost(plan, lengths, batch, (double)(batch * (length - 1)), &cost);
    return cost;
}

// Models whose layers are all alike: `mlp` matrices of hidden by intermediate, with adapters.
TEST dense_models_cost_what_they_compute(const test_machine* machine) {
    static const struct {
        const char* shape;
        double mlp;
        int64_t batch;
        int64_t length;
    } rows[] = {{"llama-3.1-8b", 3.0, 4, 2048},
                {"gemma-2-2b", 3.0, 1, 8192}, // with windows of half of that
                {"afm-4.5b", 2.0, 4, 2048},   // no gate
                {"command-r7b", 3.0, 2, 512}};
    qlora_ctx* ctx = test_open(machine, NULL);
    ASSERTm(test_open_reason(), ctx != NULL);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        qlora_model_desc how;
        qlora_plan plan;
        memset(&how, 0, sizeof how);
        ASSERT(planned(ctx, rows[i].shape, &how, 90, &plan));
        sizes s = sizes_of(&plan.config, rows[i].batch, rows[i].length);
        qlora_cost cost = cost_of(&plan, rows[i].batch, rows[i].length);
        double I = (double)plan.config.intermediate;
        double weights = s.L * (s.attention + rows[i].mlp * s.H * I);
        double columns = s.L * (rows[i].mlp * (s.H + I) + 4.0 * s.H + 2.0 * (s.q + s.kv));
        double qkv = s.H * (s.q + 2.0 * s.kv);
        double flops = s.T * (4.0 * weights - 2.0 * qkv + 6.0 * s.rank * columns) +
                       3.5 * 4.0 * s.q * s.seen + 4.0 * s.labels * s.H * s.V;
        ASSERT(close_to(weights, plan.work.weights, 1e-14));
        ASSERT(close_to(s.rank * columns, (double)plan.parameters, 1e-14));
        ASSERT(close_to(flops, cost.flops, 1e-12));
        ASSERT(cost.again <= 0.0 && plan.recompute_layers == 0);
        // All layers have 16-bit copies, so nothing is dequantised.
        double moved = s.L * (8.0 * s.H + 2.0 * (s.q + s.kv) + rows[i].mlp * I);
        double back = moved + s.L * (2.0 * s.q + rows[i].mlp * I);
        ASSERT_EQ_FMT((long long)plan.config.layers, (long long)plan.cached_layers, "%lld");
        ASSERT(close_to(s.T * moved, cost.moved, 1e-14));
        ASSERT(close_to(2.0 * (s.T * (moved + back) + 3.0 * s.labels * s.V), cost.bytes, 1e-12));
        ASSERT(close_to(34.0 * s.rank * columns, plan.work.update, 1e-14));
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// A recomputed layer computes everything again but down and what it has kept of attention.
TEST recomputation_is_counted(const test_machine* machine) {
    qlora_ctx* ctx = test_open(machine, NULL);
    qlora_model_desc how;
    qlora_plan plan;
    ASSERTm(test_open_reason(), ctx != NULL);
    memset(&how, 0, sizeof how);
    how.recompute = QLORA_CHOICE_ON;
    how.cache = QLORA_CHOICE_OFF;
    how.optimizer = QLORA_OPTIMIZER_ADAMW_8BIT;
    ASSERT(planned(ctx, "llama-3.1-8b", &how, 90, &plan));
    sizes s = sizes_of(&plan.config, 4, 2048);
    qlora_cost cost = cost_of(&plan, 4, 2048);
    double I = (double)plan.config.intermediate;
    double weights = s.attention + 2.0 * s.H * I;
    double columns = 2.0 * (s.H + I) + 4.0 * s.H + 2.0 * (s.q + s.kv);
    double again = s.T * s.L * 2.0 * (weights + s.rank * columns) + 4.0 * s.q * s.seen;
    ASSERT_EQ_FMT((long long)plan.config.layers, (long long)plan.recompute_layers, "%lld");
    ASSERT_EQ_FMT(0LL, (long long)plan.attention_layers, "%lld");
    ASSERT(close_to(again, cost.again, 1e-12));
    double widened = s.L * 2.516 * (3.0 * weights + 2.0 * s.H * I);
    ASSERT(close_to(widened, plan.work.widened[0] + plan.work.widened[1] + plan.work.widened[2],
                    1e-12));
    ASSERT(close_to(22.0 * (double)plan.parameters, plan.work.update, 1e-14));
    qlora_cost base = cost_of(&plan, 1, 2048);
    double forward = 2048.0 * 2.0 * s.L * (s.attention + 3.0 * s.H * I) +
                     4.0 * s.q * s.seen / 4.0 + 2.0 * s.labels / 4.0 * s.H * s.V;
    ASSERT(close_to(forward, base.forward, 1e-12));
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

// Of experts, those that a token uses are computed, and all are dequantised.
TEST experts_cost_what_a_token_uses(const test_machine* machine) {
    static const struct {
        const char* shape;
        double chosen;
        double experts;
        double parameters; // of the whole model, in billions
    } rows[] = {{"mixtral-8x7b", 2.0, 8.0, 46.70},
                {"qwen3-30b-a3b", 8.0, 128.0, 30.53},
                {"olmoe-1b-7b", 8.0, 64.0, 6.92},
                {"granite-3.1-3b-a800m", 8.0, 40.0, 3.30},
                {"glm-4.5-air", 8.0, 128.0, 106.85}};
    qlora_ctx* ctx = test_open(machine, NULL);
    ASSERTm(test_open_reason(), ctx != NULL);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        qlora_model_desc how;
        qlora_plan plan;
        memset(&how, 0, sizeof how);
        how.cache = QLORA_CHOICE_OFF;
        ASSERT(planned(ctx, rows[i].shape, &how, 0, &plan));
        const qlora_model_config* c = &plan.config;
        sizes s = sizes_of(c, 4, 2048);
        qlora_cost cost = cost_of(&plan, 4, 2048);
        double dense = c->dense[0] != 0 ? 1.0 : 0.0;
        double mixed = s.L - dense;
        double I = (double)c->expert_intermediate;
        double all = (double)c->shared_intermediate + rows[i].experts * I;
        double used = (double)c->shared_intermediate + rows[i].chosen * I;
        double rest = s.L * s.attention + dense * 3.0 * s.H * (double)c->intermediate +
                      mixed * s.H * rows[i].experts;
        double held = rest + mixed * 3.0 * s.H * all;
        double model = held + s.H * s.V * (c->tied ? 1.0 : 2.0);
        ASSERT(close_to(rows[i].parameters * 1e9, model, 2e-3));
        ASSERT(close_to(held, plan.work.weights, 1e-14));
        ASSERT(close_to(mixed * 3.0 * s.H * rows[i].experts * I, plan.work.routed, 1e-14));
        double share = rows[i].chosen / rows[i].experts;
        double lora = (double)(plan.trained[QLORA_PLACE_ATTENTION] +
                               plan.trained[QLORA_PLACE_MLP]) +
                      share * (double)plan.trained[QLORA_PLACE_EXPERTS];
        double flops = s.T * (4.0 * (rest + mixed * 3.0 * s.H * used) -
                              2.0 * s.H * (s.q + 2.0 * s.kv) + 6.0 * lora) +
                       3.5 * 4.0 * s.q * s.seen + 4.0 * s.labels * s.H * s.V;
        ASSERT(close_to(flops, cost.flops, 1e-12));
        // The router is not in 4 bits; the CPU dequantises into f32.
        double coded = held - mixed * s.H * rows[i].experts;
        ASSERT(close_to(4.516 * coded, plan.work.widened[0], 1e-12));
    }
    ASSERT(test_close_ctx(machine, ctx));
    PASS();
}

TEST nothing_costs_nothing(void) {
    qlora_cost cost;
    memset(&cost, 1, sizeof cost);
    qlora_plan_cost(NULL, NULL, 1, 1.0, &cost);
    ASSERT(cost.flops <= 0.0 && cost.bytes <= 0.0 && cost.moved <= 0.0);
    qlora_plan_cost(NULL, NULL, 0, 0.0, NULL);
    PASS();
}

SUITE(cost_suite) {
    RUN_ON(TEST_CPU, dense_models_cost_what_they_compute);
    RUN_ON(TEST_CPU, recomputation_is_counted);
    RUN_ON(TEST_CPU, experts_cost_what_a_token_uses);
    RUN_TEST(nothing_costs_nothing);
}
