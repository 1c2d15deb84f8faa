// gradient.c - whole models compiled in double: the gradient of every trained tensor against
// central differences of the loss, with the special features of each family.
#include "test.h"

#include <math.h>
#include <stdlib.h>

// What a mixture of experts can adapt.
#define EVERYTHING                                                                                 \
    (QLORA_TARGET_ATTENTION | QLORA_TARGET_GATE | QLORA_TARGET_UP | QLORA_TARGET_DOWN |            \
     QLORA_TARGET_EXPERTS_IN | QLORA_TARGET_EXPERTS_OUT | QLORA_TARGET_ROUTER |                    \
     QLORA_TARGET_SHARED_GATE)

enum { VOCAB = 29, TOKENS = 17, SEQUENCES = 3, SAMPLES = 5 };

typedef struct variant {
    const char* name;
    qlora_family family;
    bool tied;
    bool qkv_bias;
    bool other_bias;
    bool qk_norm;
    int64_t window;
    qlora_base_format base;
    bool train_norms;
    bool rslora;
    float dropout;
    uint32_t targets;
    qlora_choice recompute;
    qlora_choice cache;
    bool dora;
    uint32_t save_modules;
    int64_t token_rows;
} variant;

static const variant variants[] = {
    {"llama", QLORA_FAMILY_LLAMA, false, false, false, false, 0, QLORA_BASE_NF4, false, false, 0.0f,
     0, QLORA_CHOICE_OFF, QLORA_CHOICE_OFF, false, 0, 0},
    {"fp8_base", QLORA_FAMILY_QWEN3, false, false, false, true, 0, QLORA_BASE_FP8, false, false,
     0.0f, 0, QLORA_CHOICE_OFF, QLORA_CHOICE_OFF, false, 0, 0},
    {"fp8_base_dora", QLORA_FAMILY_LLAMA, false, false, false, false, 0, QLORA_BASE_FP8, false,
     false, 0.0f, 0, QLORA_CHOICE_ON, QLORA_CHOICE_ON, true, 0, 0},
    {"llama_biases", QLORA_FAMILY_LLAMA, true, true, true, false, 0, QLORA_BASE_32BIT, false, false,
     0.0f, 0, QLORA_CHOICE_ON, QLORA_CHOICE_OFF, false, 0, 0},
    {"qwen2_tied", QLORA_FAMILY_QWEN2, true, true, false, false, 0, QLORA_BASE_NF4, true, false,
     0.0f, QLORA_TARGET_Q | QLORA_TARGET_V, QLORA_CHOICE_OFF, QLORA_CHOICE_ON, false, 0, 0},
    {"qwen3", QLORA_FAMILY_QWEN3, false, false, false, true, 0, QLORA_BASE_NF4, false, true, 0.0f,
     0, QLORA_CHOICE_OFF, QLORA_CHOICE_ON, false, 0, 0},
    {"qwen3_norms", QLORA_FAMILY_QWEN3, false, true, false, true, 0, QLORA_BASE_16BIT, true, true,
     0.0f, 0, QLORA_CHOICE_ON, QLORA_CHOICE_OFF, false, 0, 0},
    {"mistral_window", QLORA_FAMILY_MISTRAL, false, false, false, false, 3, QLORA_BASE_NF4, true,
     false, 0.0f, QLORA_TARGET_K | QLORA_TARGET_O | QLORA_TARGET_UP, QLORA_CHOICE_ON,
     QLORA_CHOICE_ON, false, 0, 0},
    {"dropout", QLORA_FAMILY_LLAMA, false, false, false, false, 0, QLORA_BASE_NF4, false, false,
     0.3f, 0, QLORA_CHOICE_OFF, QLORA_CHOICE_OFF, false, 0, 0},
    {"dropout_recompute", QLORA_FAMILY_QWEN3, true, false, false, true, 4, QLORA_BASE_NF4, true,
     false, 0.3f, QLORA_TARGET_V | QLORA_TARGET_GATE | QLORA_TARGET_DOWN, QLORA_CHOICE_ON,
     QLORA_CHOICE_ON, false, 0, 0},
    {"gemma2", QLORA_FAMILY_GEMMA2, true, false, false, false, 4, QLORA_BASE_NF4, true, false, 0.0f,
     0, QLORA_CHOICE_ON, QLORA_CHOICE_OFF, false, 0, 0},
    {"gemma2_kept", QLORA_FAMILY_GEMMA2, true, true, true, false, 0, QLORA_BASE_32BIT, false, false,
     0.2f, 0, QLORA_CHOICE_OFF, QLORA_CHOICE_OFF, false, 0, 0},
    {"olmo2", QLORA_FAMILY_OLMO2, false, true, false, true, 0, QLORA_BASE_NF4, true, false, 0.0f, 0,
     QLORA_CHOICE_ON, QLORA_CHOICE_ON, false, 0, 0},
    {"exaone4", QLORA_FAMILY_EXAONE4, true, false, false, true, 3, QLORA_BASE_16BIT, false, false,
     0.0f, QLORA_TARGET_K | QLORA_TARGET_O, QLORA_CHOICE_OFF, QLORA_CHOICE_ON, false, 0, 0},
    {"granite", QLORA_FAMILY_GRANITE, true, true, true, false, 0, QLORA_BASE_NF4, true, false, 0.0f,
     0, QLORA_CHOICE_ON, QLORA_CHOICE_OFF, false, 0, 0},
    {"granite4", QLORA_FAMILY_GRANITE4, false, false, false, false, 0, QLORA_BASE_NF4, false, false,
     0.3f, QLORA_TARGET_GATE_UP | QLORA_TARGET_V, QLORA_CHOICE_OFF, QLORA_CHOICE_OFF, false, 0, 0},
    {"phi3", QLORA_FAMILY_PHI3, false, false, false, false, 5, QLORA_BASE_NF4, false, true, 0.0f, 0,
     QLORA_CHOICE_ON, QLORA_CHOICE_OFF, false, 0, 0},
    {"glm4", QLORA_FAMILY_GLM4, false, true, false, false, 0, QLORA_BASE_NF4, true, false, 0.0f, 0,
     QLORA_CHOICE_OFF, QLORA_CHOICE_ON, false, 0, 0},
    {"ministral3", QLORA_FAMILY_MINISTRAL3, false, true, false, false, 0, QLORA_BASE_NF4, false,
     false, 0.0f, 0, QLORA_CHOICE_ON, QLORA_CHOICE_OFF, false, 0, 0},
    {"arcee", QLORA_FAMILY_ARCEE, false, false, false, false, 0, QLORA_BASE_NF4, true, false, 0.0f,
     0, QLORA_CHOICE_ON, QLORA_CHOICE_OFF, false, 0, 0},
    {"arcee_dropout", QLORA_FAMILY_ARCEE, true, true, true, false, 0, QLORA_BASE_32BIT, false, true,
     0.3f, QLORA_TARGET_UP | QLORA_TARGET_DOWN | QLORA_TARGET_V, QLORA_CHOICE_OFF, QLORA_CHOICE_ON,
     false, 0, 0},
    {"arcee_dora", QLORA_FAMILY_ARCEE, false, false, false, false, 0, QLORA_BASE_NF4, true, false,
     0.0f, 0, QLORA_CHOICE_OFF, QLORA_CHOICE_OFF, true, 0, 0},
    {"cohere2", QLORA_FAMILY_COHERE2, true, false, false, false, 4, QLORA_BASE_NF4, true, false,
     0.0f, 0, QLORA_CHOICE_OFF, QLORA_CHOICE_ON, false, 0, 0},
    {"cohere2_recompute", QLORA_FAMILY_COHERE2, true, true, false, false, 3, QLORA_BASE_32BIT,
     false, false, 0.3f, QLORA_TARGET_Q | QLORA_TARGET_O | QLORA_TARGET_GATE, QLORA_CHOICE_ON,
     QLORA_CHOICE_OFF, false, QLORA_SAVE_EMBED, 0},
    {"cohere2_dora", QLORA_FAMILY_COHERE2, true, false, false, false, 0, QLORA_BASE_NF4, true, true,
     0.0f, 0, QLORA_CHOICE_ON, QLORA_CHOICE_OFF, true, 0, 0},
    {"mixtral", QLORA_FAMILY_MIXTRAL, false, false, false, false, 0, QLORA_BASE_NF4, true, false,
     0.0f, 0, QLORA_CHOICE_OFF, QLORA_CHOICE_OFF, false, 0, 0},
    {"mixtral_router", QLORA_FAMILY_MIXTRAL, true, false, false, false, 4, QLORA_BASE_32BIT, false,
     true, 0.0f, QLORA_TARGET_ROUTER | QLORA_TARGET_EXPERTS_OUT, QLORA_CHOICE_ON, QLORA_CHOICE_ON,
     false, 0, 0},
    {"qwen3_moe", QLORA_FAMILY_QWEN3_MOE, false, false, false, true, 0, QLORA_BASE_NF4, true, true,
     0.0f, 0, QLORA_CHOICE_ON, QLORA_CHOICE_OFF, false, 0, 0},
    {"qwen2_moe", QLORA_FAMILY_QWEN2_MOE, false, true, false, false, 0, QLORA_BASE_NF4, false,
     false, 0.0f, EVERYTHING, QLORA_CHOICE_OFF, QLORA_CHOICE_ON, false, 0, 0},
    {"qwen2_moe_dropout", QLORA_FAMILY_QWEN2_MOE, false, true, false, false, 0, QLORA_BASE_16BIT,
     true, false, 0.3f, QLORA_TARGET_ATTENTION | QLORA_TARGET_GATE | QLORA_TARGET_DOWN,
     QLORA_CHOICE_ON, QLORA_CHOICE_OFF, false, 0, 0},
    {"olmoe", QLORA_FAMILY_OLMOE, false, false, false, true, 0, QLORA_BASE_NF4, true, false, 0.0f,
     QLORA_TARGET_ROUTER | QLORA_TARGET_EXPERTS_IN | QLORA_TARGET_K, QLORA_CHOICE_ON,
     QLORA_CHOICE_OFF, false, 0, 0},
    {"granite_moe", QLORA_FAMILY_GRANITE_MOE, true, false, false, false, 0, QLORA_BASE_NF4, false,
     false, 0.0f, 0, QLORA_CHOICE_OFF, QLORA_CHOICE_OFF, false, QLORA_SAVE_EMBED, 0},
    {"granite4_moe", QLORA_FAMILY_GRANITE4, false, false, false, false, 0, QLORA_BASE_NF4, true,
     true, 0.0f, 0, QLORA_CHOICE_ON, QLORA_CHOICE_OFF, false, 0, 0},
    {"glm4_moe", QLORA_FAMILY_GLM4_MOE, false, true, false, true, 0, QLORA_BASE_NF4, true, false,
     0.0f, EVERYTHING & ~QLORA_TARGET_SHARED_GATE, QLORA_CHOICE_OFF, QLORA_CHOICE_OFF, false, 0, 0},
    {"norms_alone", QLORA_FAMILY_QWEN3, true, false, false, true, 0, QLORA_BASE_NF4, true, false,
     0.0f, 0, QLORA_CHOICE_OFF, QLORA_CHOICE_OFF, false, 0, 0},
    {"dora", QLORA_FAMILY_LLAMA, false, true, false, false, 0, QLORA_BASE_NF4, true, false, 0.0f, 0,
     QLORA_CHOICE_OFF, QLORA_CHOICE_ON, true, 0, 0},
    {"dora_recompute", QLORA_FAMILY_GEMMA2, true, false, false, false, 4, QLORA_BASE_32BIT, false,
     true, 0.0f, QLORA_TARGET_V | QLORA_TARGET_O | QLORA_TARGET_UP | QLORA_TARGET_DOWN,
     QLORA_CHOICE_ON, QLORA_CHOICE_OFF, true, 0, 0},
    {"saved", QLORA_FAMILY_LLAMA, false, false, false, false, 0, QLORA_BASE_NF4, false, false, 0.0f,
     0, QLORA_CHOICE_OFF, QLORA_CHOICE_OFF, false, QLORA_SAVE_EMBED | QLORA_SAVE_HEAD, 0},
    {"saved_tied", QLORA_FAMILY_GRANITE, true, false, false, false, 0, QLORA_BASE_NF4, true, false,
     0.3f, 0, QLORA_CHOICE_ON, QLORA_CHOICE_OFF, false, QLORA_SAVE_EMBED, 0},
    {"saved_copies", QLORA_FAMILY_GRANITE, true, false, false, false, 0, QLORA_BASE_NF4, false,
     false, 0.0f, 0, QLORA_CHOICE_OFF, QLORA_CHOICE_OFF, false, QLORA_SAVE_EMBED | QLORA_SAVE_HEAD,
     0},
    {"rows_tied", QLORA_FAMILY_GRANITE, true, false, false, false, 0, QLORA_BASE_NF4, false, false,
     0.0f, 0, QLORA_CHOICE_OFF, QLORA_CHOICE_OFF, true, 0, 4},
    {"rows_untied", QLORA_FAMILY_LLAMA, false, false, false, false, 0, QLORA_BASE_NF4, false, false,
     0.0f, QLORA_TARGET_V, QLORA_CHOICE_OFF, QLORA_CHOICE_OFF, false, 0, 4},
};

typedef struct rig {
    qlora_ctx* ctx;
    qlora_model* model;
    qlora_trainer* trainer;
    int32_t ids[TOKENS];
    int32_t labels[TOKENS];
    float weights[TOKENS];
    qlora_batch batch;
    double total;
} rig;

static const int32_t lengths[SEQUENCES] = {7, 1, 9};

static void fill(test_random* random, const qlora_tensor* t, double mean, double deviation) {
    for (int64_t i = 0; t->data != NULL && i < t->rows * t->cols; i++) {
        ((double*)t->data)[i] = mean + deviation * test_random_normal(random);
    }
}

// Fills the tensors that random weights leave at 0 and 1: biases, norms, B.
static void rig_stir(rig* r, test_random* random) {
    qlora_model* m = r->model;
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        qlora__layer* layer = &m->layers[l];
        for (int i = 0; i < layer->count; i++) {
            fill(random, &layer->projections[i].bias, 0.0, 0.3);
        }
        if (layer->experts != NULL) {
            fill(random, &layer->experts->correction, 0.0, 0.3);
        }
        fill(random, &layer->qkv_bias, 0.0, 0.3);
        for (int i = 0; i < QLORA__NORMS; i++) {
            fill(random, &layer->norms[i], 1.0, 0.2);
        }
    }
    fill(random, &m->base.final_norm, 1.0, 0.2);
    qlora__trained t;
    for (int64_t i = 0; qlora__trained_at(m, i, &t); i++) {
        qlora_tensor window;
        qlora__arena_window(&m->parameters, t.at, t.rows, t.cols, &window);
        if (t.projection != NULL) {
            fill(random, &window, 0.0, 0.2);
        }
    }
}

// Six experts, of which two run; of the last family, chosen from two of three groups.
static void rig_experts(qlora_model_config* c, const variant* v) {
    c->experts = 6;
    c->experts_per_token = 2;
    c->expert_intermediate = 10;
    c->renormalise = v->family == QLORA_FAMILY_QWEN3_MOE || v->family == QLORA_FAMILY_GLM4_MOE;
    bool shared = v->family == QLORA_FAMILY_QWEN2_MOE || v->family == QLORA_FAMILY_GRANITE4 ||
                  v->family == QLORA_FAMILY_GLM4_MOE;
    c->shared_intermediate = shared ? 12 : 0;
    c->dense[0] = v->family == QLORA_FAMILY_QWEN3_MOE || v->family == QLORA_FAMILY_GLM4_MOE;
    if (v->family == QLORA_FAMILY_GLM4_MOE) {
        c->expert_groups = 3;
        c->expert_groups_used = 2;
        c->routed_scale = 1.7;
    }
}

// Numbers for what families have beyond the fields of a variant, with caps near the values they
// limit.
static void rig_family(qlora_model_config* c, qlora_family family) {
    if (family == QLORA_FAMILY_GEMMA2) {
        c->attention_scale = 0.7;
        c->attention_cap = 1.5;
        c->logits_cap = 2.0;
    } else if (family == QLORA_FAMILY_EXAONE4) {
        c->no_rope[0] = 1;
    } else if (family == QLORA_FAMILY_GRANITE || family == QLORA_FAMILY_GRANITE4 ||
               family == QLORA_FAMILY_GRANITE_MOE) {
        c->embedding_scale = 3.0;
        c->residual_scale = 0.4;
        c->attention_scale = 0.2;
        c->logits_divisor = 1.7;
    } else if (family == QLORA_FAMILY_PHI3) {
        c->rope_dims = 6;
        c->rope.type = QLORA_ROPE_LONGROPE;
        c->rope.original_max_position = 4.0;
        c->rope.factor = 3.0;
        for (int i = 0; i < 3; i++) {
            c->rope.short_factor[i] = 1.0f;
            c->rope.long_factor[i] = 1.5f + (float)i;
        }
    } else if (family == QLORA_FAMILY_MINISTRAL3) {
        c->query_beta = 0.3;
        c->query_period = 2.0;
    }
}

// Whether the load-balancing loss is on, which routers with sigmoids do not have.
static bool rig_balances(const variant* v) {
    bool experts = strstr(v->name, "moe") != NULL || strstr(v->name, "mixtral_") != NULL;
    return experts && v->family != QLORA_FAMILY_GLM4_MOE;
}

// With a tile, every layer is recomputed.
static bool rig_open(rig* r, const variant* v, int64_t tile) {
    qlora_model_config c;
    qlora_ctx_desc desc;
    qlora_model_desc model;
    qlora_train_desc train;
    memset(r, 0, sizeof *r);
    memset(&c, 0, sizeof c);
    memset(&desc, 0, sizeof desc);
    memset(&model, 0, sizeof model);
    memset(&train, 0, sizeof train);
    desc.require_backend = QLORA_BACKEND_CPU;
    desc.threads = 1;
    c.family = v->family;
    c.vocab = VOCAB;
    c.hidden = 24;
    c.intermediate = 20;
    c.layers = 2;
    c.heads = 4;
    c.kv_heads = 2;
    c.head_dim = 8;
    c.rms_eps = 1e-5;
    c.rope.theta = 100.0;
    c.tied = v->tied;
    c.qkv_bias = v->qkv_bias;
    c.o_bias = v->other_bias;
    c.mlp_bias = v->other_bias;
    c.qk_norm = v->qk_norm;
    c.window = v->window;
    c.sliding[1] = v->window > 0 ? 1 : 0;
    rig_family(&c, v->family);
    if (strstr(v->name, "moe") != NULL || strstr(v->name, "mixtral") != NULL) {
        rig_experts(&c, v);
    }
    model.config = &c;
    model.weight_std = 0.3f;
    model.base = v->base;
    model.mode = QLORA_MODE_F32;
    model.rank = strcmp(v->name, "norms_alone") == 0 ? -1 : 3;
    model.rslora = v->rslora;
    model.dropout = v->dropout;
    model.targets = v->targets;
    model.train_norms = v->train_norms;
    model.tokens = TOKENS + 3;
    model.max_sequences = SEQUENCES + 1;
    model.head_chunk = 5;
    model.recompute = tile > 0 ? QLORA_CHOICE_ON : v->recompute;
    model.tile = tile;
    model.cache = v->cache;
    model.dora = v->dora;
    model.save_modules = v->save_modules;
    static const int32_t token_rows[] = {20, 3, 28, 11};
    model.token_rows = token_rows;
    model.token_row_count = v->token_rows;
    train.router_aux_loss = rig_balances(v) ? 0.25 : 0.0;
    if (qlora_ctx_create(&desc, &r->ctx) != QLORA_OK ||
        qlora_model_open(r->ctx, &model, &r->model) != QLORA_OK ||
        qlora_trainer_create(r->model, &train, &r->trainer) != QLORA_OK) {
        fprintf(stderr, "%s\n", r->ctx != NULL ? qlora_last_error(r->ctx) : "no context");
        return false;
    }
    test_random random = test_random_start(v->name);
    rig_stir(r, &random);
    for (int i = 0; i < TOKENS; i++) {
        r->ids[i] = (int32_t)test_random_below(&random, VOCAB);
        r->ids[i] = v->token_rows > 0 && i % 3 == 0 ? token_rows[i / 3 % 3] : r->ids[i];
        r->labels[i] = i % 4 == 3 ? -100 : (int32_t)test_random_below(&random, VOCAB);
        r->weights[i] = 0.5f + 0.25f * (float)(i % 3);
    }
    r->batch.ids = r->ids;
    r->batch.labels = r->labels;
    r->batch.weights = r->weights;
    r->batch.lengths = lengths;
    r->batch.count = SEQUENCES;
    r->total = qlora_batch_labels(&r->batch) + 1.5; // as if another micro-batch had more labels
    return true;
}

static bool rig_close(rig* r) {
    return qlora_trainer_destroy(r->trainer) == QLORA_OK &&
           qlora_model_close(r->model) == QLORA_OK && qlora_ctx_destroy(r->ctx) == QLORA_OK;
}

// Brings everything up to date with the parameters, except for DoRA's norms, which are constants
// for the gradient.
static qlora_result parameters_moved(rig* r) {
    qlora_model* m = r->model;
    qlora_adamw_desc args = qlora__adamw_desc_of(m);
    for (int64_t l = 0; l < m->plan.config.layers && m->dora; l++) {
        for (int g = 0; g < QLORA__GROUPS; g++) {
            double* gain = (double*)m->layers[l].gains[g].data;
            const double* inverse = (const double*)m->layers[l].inverses[g].data;
            for (int i = 0; i < m->layers[l].layout->groups[g].count; i++) {
                const qlora__projection* p =
                    &m->layers[l].projections[m->layers[l].layout->groups[g].first + i];
                for (int64_t k = 0; k < p->out; k++, gain++, inverse++) {
                    *gain = p->rank > 0 ? ((double*)p->magnitude.data)[k] * *inverse : 1.0;
                }
            }
        }
    }
    return qlora_adamw_shadow(r->ctx, &args);
}

// The loss in double, as computed by the training pass (including dropout); NaN if a call fails.
static double loss_at(rig* r) {
    qlora_model* m = r->model;
    qlora_trainer* t = r->trainer;
    qlora_tensor totals = qlora__window(&m->totals, 1, 4, 3);
    t->counts.labels = r->total;
    ((double*)m->totals.data)[3] = 0.0;
    if (parameters_moved(r) != QLORA_OK || qlora__micro_send(t, &r->batch) != QLORA_OK ||
        qlora__tensor_zero(r->ctx, &totals) != QLORA_OK) {
        return (double)NAN;
    }
    qlora__pass pass = qlora__pass_of(m, t->micro.rows, true);
    if (qlora__forward(&pass) != QLORA_OK ||
        qlora__head(&pass, t->micro.chunks, &totals, false) != QLORA_OK ||
        (qlora__balances(m) && qlora__balance_turn(&pass) != QLORA_OK)) {
        return (double)NAN;
    }
    const double* sums = (const double*)totals.data;
    double balance = m->work.experts.balance.coefficient * ((const double*)m->totals.data)[3];
    return (sums[0] + sums[1]) / r->total + balance;
}

// Checks some elements of one tensor; the limit is 1e-5 of the largest of them, plus 1e-9.
static bool tensor_holds(rig* r, const qlora__trained* t, test_random* random) {
    double difference[SAMPLES];
    double gradient[SAMPLES];
    double largest = 0.0;
    const double h = 1e-4;
    int64_t n = t->rows * t->cols;
    for (int s = 0; s < SAMPLES; s++) {
        int64_t at = t->at + (int64_t)test_random_below(random, (uint64_t)n);
        double* p = (double*)r->model->parameters.data + at;
        double before = *p;
        *p = before + h;
        double up = loss_at(r);
        *p = before - h;
        double down = loss_at(r);
        *p = before;
        gradient[s] = ((const double*)r->model->gradients.data)[at];
        difference[s] = (up - down) / (2.0 * h);
        largest = fabs(difference[s]) > largest ? fabs(difference[s]) : largest;
    }
    for (int s = 0; s < SAMPLES; s++) {
        if (!(fabs(gradient[s] - difference[s]) <= 1e-5 * largest + 1e-9)) {
            fprintf(stderr, "%s: gradient %.12g, difference %.12g\n", t->name, gradient[s],
                    difference[s]);
            return false;
        }
    }
    return true;
}

TEST gradients_are_differences(const variant* v) {
    rig r;
    ASSERT(rig_open(&r, v, 0));
    ASSERT_EQ(QLORA_OK, qlora__parameters_changed(r.ctx, r.model));
    qlora_result result = qlora_train_micro(r.trainer, &r.batch, r.total);
    ASSERT_EQm(qlora_last_error(r.ctx), QLORA_OK, result);
    test_random random = test_random_start("elements");
    qlora__trained t;
    int64_t tensors = 0;
    bool holds = true;
    for (; qlora__trained_at(r.model, tensors, &t); tensors++) {
        holds = holds && tensor_holds(&r, &t, &random);
    }
    ASSERT(holds);
    int matrices = 0;
    int norms = 0;
    uint32_t targets = v->targets != 0 ? v->targets : (uint32_t)QLORA_TARGET_ALL;
    targets |= (targets & (uint32_t)QLORA_TARGET_ATTENTION) != 0 ? 15u : 0u;
    for (int64_t l = 0; l < r.model->plan.config.layers; l++) {
        const qlora__layer* layer = &r.model->layers[l];
        for (int u = 0; u < qlora__unit_count(layer); u++) {
            uint32_t bit = 1u << qlora__row_of(layer, qlora__unit_at(layer, u))->bit;
            matrices += (targets & bit) != 0 ? (v->dora ? 3 : 2) : 0;
        }
    }
    matrices = strcmp(v->name, "norms_alone") == 0 ? 0 : matrices;
    for (int i = 0; i < QLORA__NORMS && v->train_norms; i++) {
        norms += qlora__has_norm(r.model, i) ? 1 : 0;
    }
    int64_t expected = matrices + 2 * norms + (v->train_norms ? 1 : 0) +
                       (v->token_rows > 0 ? 1 : 0) +
                       (v->save_modules == 3   ? 2
                        : v->save_modules != 0 ? 1
                                               : 0);
    ASSERT_EQ_FMT((long long)expected, (long long)tensors, "%lld");
    ASSERT(rig_close(&r));
    PASS();
}

// With tiles, that of all tokens being no multiple of it, gradients and losses of every variant are
// the same up to the order of sums.
TEST tiles_change_nothing(const variant* v) {
    double* gradients[2] = {NULL, NULL};
    double losses[2];
    size_t n = 0;
    for (int i = 0; i < 2; i++) {
        rig r;
        ASSERT(rig_open(&r, v, i == 0 ? 0 : 5));
        n = (size_t)r.model->elements;
        gradients[i] = (double*)malloc(n * sizeof(double));
        ASSERT_EQ(QLORA_OK, qlora__parameters_changed(r.ctx, r.model));
        ASSERT_EQ(QLORA_OK, qlora_train_micro(r.trainer, &r.batch, r.total));
        ASSERT_EQ(QLORA_OK, qlora_train_micro(r.trainer, &r.batch, r.total));
        memcpy(gradients[i], r.model->gradients.data, n * sizeof(double));
        losses[i] = loss_at(&r);
        ASSERT(rig_close(&r));
    }
    ASSERT_REL_L2_DOUBLE(gradients[0], gradients[1], n, 1e-12);
    ASSERT(fabs(losses[0] - losses[1]) <= 1e-12 * losses[0]);
    free(gradients[0]);
    free(gradients[1]);
    PASS();
}

// The gradient is zero where the loss does not depend on the parameter: a sequence of one token has
// no loss.
TEST gradients_add_up(void) {
    rig r;
    ASSERT(rig_open(&r, &variants[3], 0));
    ASSERT_EQ(QLORA_OK, qlora__parameters_changed(r.ctx, r.model));
    ASSERT_EQ(QLORA_OK, qlora_train_micro(r.trainer, &r.batch, r.total));
    size_t n = (size_t)r.model->elements;
    double* once = (double*)malloc(n * sizeof *once);
    double* twice = (double*)malloc(n * sizeof *twice);
    memcpy(once, r.model->gradients.data, n * sizeof *once);
    ASSERT_EQ(QLORA_OK, qlora_train_micro(r.trainer, &r.batch, r.total));
    ASSERT_EQ(QLORA_OK, qlora__tree_fold(r.trainer, 2));
    memcpy(twice, r.model->gradients.data, n * sizeof *twice);
    for (size_t i = 0; i < n; i++) {
        once[i] *= 2.0;
    }
    ASSERT_REL_L2_DOUBLE(once, twice, n, 1e-12);
    // The three sequences one by one give the same step as all at once.
    ASSERT_EQ(QLORA_OK, qlora_train_cancel(r.trainer));
    int32_t at = 0;
    for (int s = 0; s < SEQUENCES; s++) {
        qlora_batch one = r.batch;
        one.ids += at;
        one.labels += at;
        one.weights += at;
        one.lengths += s;
        one.count = 1;
        at += lengths[s];
        ASSERT_EQ(QLORA_OK, qlora_train_micro(r.trainer, &one, r.total));
    }
    ASSERT_EQ(QLORA_OK, qlora__tree_fold(r.trainer, SEQUENCES));
    for (size_t i = 0; i < n; i++) {
        once[i] *= 0.5;
    }
    ASSERT_REL_L2_DOUBLE(once, (double*)r.model->gradients.data, n, 1e-11);
    free(once);
    free(twice);
    ASSERT(rig_close(&r));
    PASS();
}

SUITE(gradient_suite) {
    if (!test_wants("cpu")) {
        return;
    }
    for (size_t i = 0; i < sizeof variants / sizeof variants[0]; i++) {
        greatest_set_test_suffix(variants[i].name);
        RUN_TESTp(gradients_are_differences, &variants[i]);
        RUN_TESTp(tiles_change_nothing, &variants[i]);
    }
    RUN_TEST(gradients_add_up);
}
