// reference.c - small models against the layer of reference.h: the loss, and the gradient of every
// trained tensor; and its own gradients against differences. Compiled twice, with the loops of the
// CPU in float (library.c) and in double (double.c).
#include "test.h"

#include "reference.h"

#define REFERENCE_LIMIT (sizeof(QLORA__REAL) == 8 ? 2e-6 : 3e-5) // factors and tables are float

enum { REFERENCE_VOCAB = 19, REFERENCE_TOKENS = 15, REFERENCE_SEQUENCES = 3, REFERENCE_LAYERS = 2 };

enum { REFERENCE_EXPERTS = 4, REFERENCE_WEIGHTS = 8 + 3 * REFERENCE_EXPERTS };

static const int32_t reference_lengths[REFERENCE_SEQUENCES] = {9, 1, 5};

typedef struct reference_case {
    const char* name;
    qlora_family family;
    int64_t heads;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t rope_dims;
    int64_t window; // of the second layer
    bool biases;
    bool qk_norm;
    int64_t no_rope; // 1: the first layer is not rotated
    int64_t experts; // of the second layer
} reference_case;

static const reference_case reference_cases[] = {
    {"llama", QLORA_FAMILY_LLAMA, 2, 2, 8, 0, 0, true, false, 0, 0},
    {"mistral", QLORA_FAMILY_MISTRAL, 4, 1, 6, 0, 3, false, false, 0, 0}, // one head for all of q
    {"qwen3", QLORA_FAMILY_QWEN3, 4, 2, 8, 0, 0, true, true, 0, 0},       // norm of each head
    {"gemma2", QLORA_FAMILY_GEMMA2, 6, 2, 8, 0, 4, false, false, 0, 0},   // GELU, caps, four norms
    {"olmo2", QLORA_FAMILY_OLMO2, 4, 2, 8, 0, 0, false, true, 0, 0}, // norms after, wide q/k norm
    {"phi3", QLORA_FAMILY_PHI3, 4, 4, 8, 6, 5, false, false, 0, 0},  // fused matrices
    {"glm4", QLORA_FAMILY_GLM4, 4, 2, 12, 8, 0, true, false, 0, 0},  // pairs of neighbours
    {"granite", QLORA_FAMILY_GRANITE, 4, 2, 8, 0, 0, true, false, 0, 0}, // factors everywhere
    {"exaone4", QLORA_FAMILY_EXAONE4, 4, 2, 8, 0, 3, false, true, 1, 0},
    {"arcee", QLORA_FAMILY_ARCEE, 4, 2, 8, 0, 0, true, false, 0, 0},      // no gate
    {"cohere2", QLORA_FAMILY_COHERE2, 4, 2, 8, 0, 3, false, false, 1, 0}, // side by side, LayerNorm
    {"mixtral", QLORA_FAMILY_MIXTRAL, 4, 2, 8, 0, 0, false, false, 0, 4},
    {"qwen3_moe", QLORA_FAMILY_QWEN3_MOE, 4, 2, 8, 0, 0, false, true, 0, 4},
    {"olmoe", QLORA_FAMILY_OLMOE, 4, 2, 8, 0, 0, false, true, 0, 4},
};

// A model, and all that the reference needs of it in double.
typedef struct reference_rig {
    qlora_ctx* ctx;
    qlora_model* model;
    qlora_trainer* trainer;
    int32_t ids[REFERENCE_TOKENS];
    int32_t labels[REFERENCE_TOKENS];
    qlora_batch batch;
    ref_layer layers[REFERENCE_LAYERS];
    ref_norm final_norm;
    ref_kept memory;                                       // of the weights and their gradients
    double* weights[REFERENCE_LAYERS][REFERENCE_WEIGHTS];  // W + s B A
    double* gradients[REFERENCE_LAYERS][REFERENCE_WEIGHTS];
    ref_layer experts[REFERENCE_LAYERS][REFERENCE_EXPERTS];
} reference_rig;

static void reference_fill(test_random* random, const qlora_tensor* t, double mean,
                           double deviation) {
    for (int64_t i = 0; t->data != NULL && i < t->rows * t->cols; i++) {
        double x = mean + deviation * test_random_normal(random);
        ((QLORA__REAL*)t->data)[i] = (QLORA__REAL)x;
    }
}

// Random weights leave biases and B at 0, and norms at 1.
static void reference_stir(reference_rig* r, const char* name) {
    qlora_model* m = r->model;
    test_random random = test_random_start(name);
    for (int64_t l = 0; l < REFERENCE_LAYERS; l++) {
        qlora__layer* layer = &m->layers[l];
        for (int i = 0; i < layer->count; i++) {
            qlora_tensor b;
            const qlora__projection* p = &layer->projections[i];
            reference_fill(&random, &p->bias, 0.0, 0.3);
            qlora__arena_window(&m->parameters, p->b_at, p->out, p->rank, &b);
            reference_fill(&random, &b, 0.0, 0.2);
        }
        reference_fill(&random, &layer->qkv_bias, 0.0, 0.3);
        for (int i = 0; i < QLORA__NORMS; i++) {
            reference_fill(&random, &layer->norms[i], 1.0, 0.2);
        }
    }
    reference_fill(&random, &m->base.final_norm, 1.0, 0.2);
    for (int i = 0; i < REFERENCE_TOKENS; i++) {
        r->ids[i] = (int32_t)test_random_below(&random, REFERENCE_VOCAB);
        r->labels[i] = i % 5 == 3 ? -100 : (int32_t)test_random_below(&random, REFERENCE_VOCAB);
    }
}

static void reference_config(const reference_case* k, qlora_model_config* c) {
    memset(c, 0, sizeof *c);
    c->family = k->family;
    c->vocab = REFERENCE_VOCAB;
    c->hidden = 24;
    c->intermediate = 20;
    c->layers = REFERENCE_LAYERS;
    c->heads = k->heads;
    c->kv_heads = k->kv_heads;
    c->head_dim = k->head_dim;
    c->rms_eps = 1e-5;
    c->rope.theta = 100.0;
    c->rope_dims = k->rope_dims;
    c->qkv_bias = k->biases;
    c->o_bias = k->biases && (k->family == QLORA_FAMILY_LLAMA || k->family == QLORA_FAMILY_ARCEE);
    c->mlp_bias = c->o_bias;
    c->qk_norm = k->qk_norm;
    c->window = k->window;
    c->sliding[1] = k->window > 0 ? 1 : 0;
    c->no_rope[0] = (uint8_t)k->no_rope;
    c->experts = k->experts;
    c->experts_per_token = k->experts > 0 ? 2 : 0;
    c->expert_intermediate = k->experts > 0 ? 12 : 0;
    c->renormalise = k->family == QLORA_FAMILY_QWEN3_MOE;
    c->dense[0] = k->family == QLORA_FAMILY_QWEN3_MOE;
    if (k->family == QLORA_FAMILY_GEMMA2) {
        c->attention_scale = 0.7;
        c->attention_cap = 1.5;
        c->logits_cap = 2.0;
    } else if (k->family == QLORA_FAMILY_GRANITE) {
        c->embedding_scale = 3.0;
        c->residual_scale = 0.4;
        c->attention_scale = 0.2;
        c->logits_divisor = 1.7;
    } else if (k->family == QLORA_FAMILY_COHERE2) {
        c->logits_divisor = 4.0;
    }
}

static bool reference_open(reference_rig* r, const reference_case* k) {
    qlora_model_config c;
    qlora_ctx_desc desc;
    qlora_model_desc model;
    qlora_train_desc train;
    memset(r, 0, sizeof *r);
    memset(&desc, 0, sizeof desc);
    memset(&model, 0, sizeof model);
    memset(&train, 0, sizeof train);
    reference_config(k, &c);
    desc.require_backend = QLORA_BACKEND_CPU;
    desc.threads = 1;
    model.config = &c;
    model.weight_std = 0.3f;
    model.base = QLORA_BASE_32BIT;
    model.mode = QLORA_MODE_F32;
    model.rank = 3;
    model.targets = k->experts > 0 ? QLORA_TARGET_ATTENTION | QLORA_TARGET_EXPERTS_IN |
                                         QLORA_TARGET_EXPERTS_OUT | QLORA_TARGET_ROUTER
                                   : 0;
    model.train_norms = true;
    model.tokens = REFERENCE_TOKENS + 3;
    model.max_sequences = REFERENCE_SEQUENCES + 1;
    model.head_chunk = 5;
    if (qlora_ctx_create(&desc, &r->ctx) != QLORA_OK ||
        qlora_model_open(r->ctx, &model, &r->model) != QLORA_OK ||
        qlora_trainer_create(r->model, &train, &r->trainer) != QLORA_OK) {
        fprintf(stderr, "%s\n", r->ctx != NULL ? qlora_last_error(r->ctx) : "no context");
        return false;
    }
    reference_stir(r, k->name);
    r->batch.ids = r->ids;
    r->batch.labels = r->labels;
    r->batch.lengths = reference_lengths;
    r->batch.count = REFERENCE_SEQUENCES;
    return qlora__parameters_changed(r->ctx, r->model) == QLORA_OK;
}

static bool reference_close(reference_rig* r) {
    ref_free(&r->memory);
    return qlora_trainer_destroy(r->trainer) == QLORA_OK &&
           qlora_model_close(r->model) == QLORA_OK && qlora_ctx_destroy(r->ctx) == QLORA_OK;
}

// ---- from the model to the reference ------------------------------------------------------------

static const double* reference_vector(reference_rig* r, const qlora_tensor* t) {
    double* x = ref_new(&r->memory, t->cols);
    for (int64_t i = 0; i < t->cols; i++) {
        x[i] = (double)qlora__at(t, 0, i);
    }
    return x;
}

static double reference_parameter(const reference_rig* r, int64_t at) {
    return (double)((const QLORA__REAL*)r->model->parameters.data)[at];
}

// W + s B A of projection number i of a layer, and room for its gradient.
static void reference_weight(reference_rig* r, int64_t layer, int i) {
    const qlora__projection* p = &r->model->layers[layer].projections[i];
    double* w = ref_new(&r->memory, p->out * p->in);
    for (int64_t at = 0; at < p->out * p->in; at++) {
        int64_t row = at / p->in;
        int64_t col = at % p->in;
        w[at] = (double)qlora__at(&p->dense, row, col);
        for (int64_t k = 0; k < p->rank; k++) {
            w[at] += (double)p->scale * reference_parameter(r, p->b_at + row * p->rank + k) *
                     reference_parameter(r, p->a_at + k * p->in + col);
        }
    }
    r->weights[layer][i] = w;
    r->gradients[layer][i] = ref_new(&r->memory, p->out * p->in);
}

// Rows of a projection, which may have several matrices, from `first` on.
static void reference_matrix(reference_rig* r, int64_t layer, int i, int64_t first, int64_t rows,
                             ref_matrix* to) {
    const qlora__layer* from = &r->model->layers[layer];
    const qlora__projection* p = &from->projections[i];
    const qlora_tensor* bias = &p->bias;
    to->in = p->in;
    to->out = rows;
    to->w = r->weights[layer][i] + first * p->in;
    to->dw = r->gradients[layer][i] + first * p->in;
    if (bias->data != NULL) {
        to->bias = reference_vector(r, bias) + first;
    }
}

static void reference_norm(reference_rig* r, const qlora_tensor* w, ref_norm* to) {
    if (w->data == NULL) {
        return;
    }
    to->width = w->cols;
    to->w = reference_vector(r, w);
    to->dw = ref_new(&r->memory, w->cols);
    to->eps = r->model->plan.config.rms_eps;
}

// The matrices of a layer, from projections that may contain several of them.
static void reference_matrices(reference_rig* r, int64_t layer) {
    const qlora_model_config* c = &r->model->plan.config;
    const qlora__layer* from = &r->model->layers[layer];
    const qlora__layout* layout = from->layout;
    ref_layer* l = &r->layers[layer];
    int64_t q = qlora__q_width(c);
    int64_t kv = qlora__kv_width(c);
    ref_matrix* single[] = {&l->q, &l->k, &l->v, &l->o, &l->gate, &l->up, &l->down};
    for (int i = 0; i < layout->count; i++) {
        int bit = layout->rows[i].bit;
        reference_weight(r, layer, i);
        if (bit < 7) {
            reference_matrix(r, layer, i, 0, from->projections[i].out, single[bit]);
        } else if (bit == 7) {
            reference_matrix(r, layer, i, 0, q, &l->q);
            reference_matrix(r, layer, i, q, kv, &l->k);
            reference_matrix(r, layer, i, q + kv, kv, &l->v);
        } else {
            reference_matrix(r, layer, i, 0, c->intermediate, &l->gate);
            reference_matrix(r, layer, i, c->intermediate, c->intermediate, &l->up);
        }
    }
    if (from->qkv_bias.data != NULL) {
        l->q.bias = reference_vector(r, &from->qkv_bias);
        l->k.bias = l->q.bias + q;
        l->v.bias = l->q.bias + q + kv;
    }
}

// The experts of a layer: gate, up and down of each.
static void reference_experts(reference_rig* r, int64_t layer) {
    const qlora_model_config* c = &r->model->plan.config;
    const qlora__layer* from = &r->model->layers[layer];
    ref_layer* l = &r->layers[layer];
    if (from->experts == NULL) {
        return;
    }
    int router = from->layout->count;
    l->experts = c->experts;
    l->chosen = c->experts_per_token;
    l->divided = c->renormalise || from->layout->experts->score == QLORA__ROUTER_SOFTMAX_CHOSEN;
    l->expert = r->experts[layer];
    for (int i = router; i < from->count; i++) {
        ref_layer* own = &l->expert[qlora__max(qlora__expert_of(from, i), 0)];
        ref_matrix* parts[] = {&own->gate, &own->up, &own->down};
        reference_weight(r, layer, i);
        reference_matrix(r, layer, i, 0, from->projections[i].out,
                         i == router ? &l->router : parts[(i - router - 1) % 3]);
        own->activation = l->activation;
    }
}

static void reference_layer(reference_rig* r, int64_t layer) {
    const qlora_model* m = r->model;
    const qlora_model_config* c = &m->plan.config;
    const qlora__layer* from = &m->layers[layer];
    ref_layer* l = &r->layers[layer];
    l->hidden = c->hidden;
    l->heads = c->heads;
    l->kv_heads = c->kv_heads;
    l->head_dim = c->head_dim;
    l->window = from->sliding ? c->window : 0;
    l->scale = c->attention_scale > 0.0 ? (double)(float)c->attention_scale
                                        : (double)(1.0f / sqrtf((float)c->head_dim));
    l->cap = (double)(float)c->attention_cap;
    l->residual = (double)(float)c->residual_scale;
    l->rotated = from->no_rope ? 0 : c->rope_dims > 0 ? c->rope_dims : c->head_dim;
    l->theta = c->rope.theta;
    l->neighbours = (m->arch->has & QLORA__HAS_PAIRED_ROPE) != 0;
    l->plain = from->layout->ffn == QLORA__FFN_PLAIN;
    l->beside = qlora__stands_beside(m);
    l->activation = l->plain                                 ? REF_SQUARED_RELU
                    : (m->arch->has & QLORA__HAS_GELU) != 0 ? REF_GELU
                                                            : REF_SILU;
    ref_norm* norms[QLORA__NORMS] = {&l->before_attention,
                                     &l->after_attention,
                                     &l->before_mlp,
                                     &l->after_mlp,
                                     &l->of_q,
                                     &l->of_k};
    for (int i = 0; i < QLORA__NORMS; i++) {
        reference_norm(r, &from->norms[i], norms[i]);
        norms[i]->centred = i < QLORA__NORM_Q && qlora__norms_mean(m);
    }
    reference_matrices(r, layer);
    reference_experts(r, layer);
}

// ---- the whole model by the reference -----------------------------------------------------------

// The sum of the losses of the tokens of one sequence, and d loss / d x behind the last layer,
// before the final norm. scale: 1 / labels.
static double reference_head(const reference_rig* r, ref_kept* kept, int32_t first, double scale,
                             const double* x, double* dx) {
    const qlora_model* m = r->model;
    const qlora_model_config* c = &m->plan.config;
    double* y = ref_norm_forward(kept, &r->final_norm, c->hidden, x);
    double* dy = ref_new(kept, kept->n * c->hidden);
    double* logits = ref_new(kept, c->vocab);
    double loss = 0.0;
    for (int64_t t = 0; t + 1 < kept->n; t++) {
        int32_t label = r->labels[first + t + 1];
        double sum = 0.0;
        for (int64_t i = 0; i < c->vocab && label >= 0; i++) {
            double dot = 0.0;
            for (int64_t j = 0; j < c->hidden; j++) {
                dot += (double)qlora__at(qlora__head_table(m), i, j) * y[t * c->hidden + j];
            }
            dot /= c->logits_divisor;
            logits[i] = c->logits_cap > 0.0 ? c->logits_cap * tanh(dot / c->logits_cap) : dot;
            sum += exp(logits[i]);
        }
        for (int64_t i = 0; i < c->vocab && label >= 0; i++) {
            double capped = c->logits_cap > 0.0 ? logits[i] / c->logits_cap : 0.0;
            double d = (exp(logits[i]) / sum - (i == label ? 1.0 : 0.0)) * (1.0 - capped * capped);
            for (int64_t j = 0; j < c->hidden; j++) {
                dy[t * c->hidden + j] +=
                    scale * d / c->logits_divisor * (double)qlora__at(qlora__head_table(m), i, j);
            }
        }
        loss += label >= 0 ? log(sum) - logits[label] : 0.0;
    }
    memcpy(dx, ref_norm_backward(kept, &r->final_norm, c->hidden, x, dy),
           (size_t)(kept->n * c->hidden) * sizeof *dx);
    return loss;
}

// One sequence, forward and backward; returns the sum of its losses.
static double reference_sequence(const reference_rig* r, int32_t first, int32_t n, double scale) {
    const qlora_model_config* c = &r->model->plan.config;
    ref_kept kept[REFERENCE_LAYERS + 1]; // the last one is of the embedding and the head
    memset(kept, 0, sizeof kept);
    ref_kept* head = &kept[REFERENCE_LAYERS];
    head->n = n;
    double* x = ref_new(head, n * c->hidden);
    for (int64_t i = 0; i < n * c->hidden; i++) {
        int32_t id = r->ids[first + i / c->hidden];
        x[i] = (double)(float)c->embedding_scale *
               (double)qlora__at(&r->model->base.embed, id, i % c->hidden);
    }
    for (int l = 0; l < REFERENCE_LAYERS; l++) {
        x = ref_layer_forward(&kept[l], &r->layers[l], n, x);
    }
    double* dx = ref_new(head, n * c->hidden);
    double loss = reference_head(r, head, first, scale, x, dx);
    for (int l = REFERENCE_LAYERS - 1; l >= 0; l--) {
        dx = ref_layer_backward(&kept[l], &r->layers[l], dx);
    }
    for (int l = 0; l <= REFERENCE_LAYERS; l++) {
        ref_free(&kept[l]);
    }
    return loss;
}

// ---- comparison ---------------------------------------------------------------------------------

// The gradient of A is s B^T dW, that of B s dW A^T.
static void reference_lora_of(const reference_rig* r, const qlora__trained* t, int i, double* out) {
    const qlora__projection* p = &r->model->layers[t->layer].projections[i];
    const double* dw = r->gradients[t->layer][i];
    out += t->is_b ? p->b_at - t->at : p->a_at - t->at;
    for (int64_t at = 0; at < p->out * p->in; at++) {
        int64_t row = at / p->in;
        int64_t col = at % p->in;
        for (int64_t k = 0; k < p->rank; k++) {
            double a = reference_parameter(r, p->a_at + k * p->in + col);
            double b = reference_parameter(r, p->b_at + row * p->rank + k);
            if (t->is_b) {
                out[row * p->rank + k] += (double)p->scale * dw[at] * a;
            } else {
                out[k * p->in + col] += (double)p->scale * dw[at] * b;
            }
        }
    }
}

// The same for all projections that the tensor belongs to, which may be those of experts.
static void reference_lora(const reference_rig* r, const qlora__trained* t, double* out) {
    const qlora__layer* layer = &r->model->layers[t->layer];
    int first = (int)(t->projection - layer->projections);
    int stack = qlora__is_stack(layer, first);
    memset(out, 0, (size_t)(t->rows * t->cols) * sizeof *out);
    for (int i = first; i < (stack != 0 ? layer->count : first + 1); i++) {
        bool down = stack != 0 && (i - qlora__first_expert(layer->layout)) % 3 == 2;
        if (stack == 0 || down == (stack == 2)) {
            reference_lora_of(r, t, i, out);
        }
    }
}

// The gradient of a norm by its place in the parameters.
static const double* reference_norm_at(const reference_rig* r, int64_t at) {
    for (int l = 0; l < REFERENCE_LAYERS; l++) {
        const ref_layer* from = &r->layers[l];
        const ref_norm* norms[QLORA__NORMS] = {&from->before_attention,
                                               &from->after_attention,
                                               &from->before_mlp,
                                               &from->after_mlp,
                                               &from->of_q,
                                               &from->of_k};
        for (int i = 0; i < QLORA__NORMS; i++) {
            if (norms[i]->w != NULL && r->model->layers[l].norms_at[i] == at) {
                return norms[i]->dw;
            }
        }
    }
    return r->final_norm.dw;
}

// Whether the gradient of one trained tensor is that of the reference.
static bool reference_holds(const reference_rig* r, const qlora__trained* t) {
    const QLORA__REAL* gradient = (const QLORA__REAL*)r->model->gradients.data + t->at;
    int64_t n = t->rows * t->cols;
    ref_kept memory;
    memset(&memory, 0, sizeof memory);
    double* expected = ref_new(&memory, n);
    double* got = ref_new(&memory, n);
    if (t->projection != NULL) {
        reference_lora(r, t, expected);
    } else {
        ref_add(n, 1.0, reference_norm_at(r, t->at), expected);
    }
    for (int64_t i = 0; i < n; i++) {
        got[i] = (double)gradient[i];
    }
    bool holds = test_rel_l2_double(expected, got, (size_t)n, REFERENCE_LIMIT);
    ref_free(&memory);
    return holds;
}

TEST model_is_the_reference(const reference_case* k) {
    reference_rig r;
    ASSERT(reference_open(&r, k));
    for (int l = 0; l < REFERENCE_LAYERS; l++) {
        reference_layer(&r, l);
    }
    reference_norm(&r, &r.model->base.final_norm, &r.final_norm);
    r.final_norm.centred = qlora__norms_mean(r.model);
    double labels = qlora_batch_labels(&r.batch);
    double loss = 0.0;
    int32_t first = 0;
    for (int s = 0; s < REFERENCE_SEQUENCES; s++) {
        loss += reference_sequence(&r, first, reference_lengths[s], 1.0 / labels);
        first += reference_lengths[s];
    }
    qlora_result result = qlora_train_micro(r.trainer, &r.batch, labels);
    ASSERT_EQm(qlora_last_error(r.ctx), QLORA_OK, result);
    qlora__trained t;
    int64_t count = 0;
    for (; qlora__trained_at(r.model, count, &t); count++) {
        ASSERTm(t.name, reference_holds(&r, &t));
    }
    ASSERT(count > REFERENCE_LAYERS * 2 * r.model->layers[1].layout->count);
    qlora_train_info info;
    ASSERT_EQ(QLORA_OK, qlora_train_update(r.trainer));
    ASSERT_EQ(QLORA_OK, qlora_train_query(r.trainer, &info));
    ASSERT(fabs(info.loss - loss / labels) <= REFERENCE_LIMIT * loss / labels);
    ASSERT(reference_close(&r));
    PASS();
}

// ---- the reference itself -----------------------------------------------------------------------

enum { KIND_TOKENS = 5, KIND_HIDDEN = 6, KIND_HEAD = 4, KIND_WIDTH = 5, KIND_PLACES = 32 };

// A kind of layer, with all the norms that it may have.
typedef struct layer_kind {
    const char* name;
    ref_activation activation;
    bool plain;
    bool beside;
    bool centred;
    bool neighbours;
    double cap;
} layer_kind;

static const layer_kind layer_kinds[] = {
    {"gated_silu", REF_SILU, false, false, false, false, 0.0},
    {"gated_gelu", REF_GELU, false, false, false, true, 1.5},
    {"plain", REF_SQUARED_RELU, true, false, false, false, 0.0},
    {"beside", REF_GELU, true, true, true, false, 0.0},
    {"beside_gated", REF_SILU, false, true, false, true, 2.0},
    {"layer_norm", REF_SQUARED_RELU, false, false, true, false, 0.0},
};

// The values that a layer reads, and their gradients.
typedef struct layer_places {
    ref_kept memory;
    test_random random;
    double* values[KIND_PLACES];
    double* gradients[KIND_PLACES];
    int64_t counts[KIND_PLACES];
    int count;
} layer_places;

static double* layer_place(layer_places* p, int64_t n, double mean, double** gradient) {
    double* x = ref_new(&p->memory, n);
    for (int64_t i = 0; i < n; i++) {
        x[i] = mean + 0.5 * test_random_normal(&p->random);
    }
    *gradient = ref_new(&p->memory, n);
    p->values[p->count] = x;
    p->gradients[p->count] = *gradient;
    p->counts[p->count++] = n;
    return x;
}

static void layer_of_kind(const layer_kind* k, layer_places* p, ref_layer* l) {
    memset(l, 0, sizeof *l);
    l->hidden = KIND_HIDDEN;
    l->heads = 4;
    l->kv_heads = 2;
    l->head_dim = KIND_HEAD;
    l->window = 3;
    l->scale = 0.6;
    l->cap = k->cap;
    l->residual = 0.7;
    l->rotated = 2;
    l->theta = 10.0;
    l->neighbours = k->neighbours;
    l->activation = k->activation;
    l->plain = k->plain;
    l->beside = k->beside;
    ref_norm* const norms[] = {
        &l->before_attention, &l->after_attention, &l->after_mlp, &l->of_q, &l->of_k,
        &l->before_mlp};
    for (int i = 0; i < (k->beside ? 5 : 6); i++) {
        norms[i]->width = i == 3 || i == 4 ? KIND_HEAD : KIND_HIDDEN;
        norms[i]->eps = 1e-3;
        norms[i]->centred = k->centred;
        norms[i]->w = layer_place(p, norms[i]->width, 1.0, &norms[i]->dw);
        if (k->centred) {
            norms[i]->bias = layer_place(p, norms[i]->width, 0.0, &norms[i]->dbias);
        }
    }
    const int64_t q = 4 * KIND_HEAD;
    const struct {
        ref_matrix* m;
        int64_t out;
        int64_t in;
    } rows[] = {{&l->q, q, KIND_HIDDEN},
                {&l->k, q / 2, KIND_HIDDEN},
                {&l->v, q / 2, KIND_HIDDEN},
                {&l->o, KIND_HIDDEN, q},
                {&l->up, KIND_WIDTH, KIND_HIDDEN},
                {&l->down, KIND_HIDDEN, KIND_WIDTH},
                {&l->gate, KIND_WIDTH, KIND_HIDDEN}};
    for (int i = 0; i < (k->plain ? 6 : 7); i++) {
        rows[i].m->out = rows[i].out;
        rows[i].m->in = rows[i].in;
        rows[i].m->w = layer_place(p, rows[i].out * rows[i].in, 0.0, &rows[i].m->dw);
    }
}

// What the layer returns, times fixed numbers.
static double layer_loss(const ref_layer* l, const double* x, const double* dy) {
    ref_kept kept;
    memset(&kept, 0, sizeof kept);
    double* y = ref_layer_forward(&kept, l, KIND_TOKENS, x);
    double loss = ref_dot(KIND_TOKENS * KIND_HIDDEN, y, dy);
    ref_free(&kept);
    return loss;
}

TEST reference_gradients_are_differences(const layer_kind* k) {
    layer_places p;
    ref_layer l;
    double* dx = NULL;
    double* unused = NULL;
    const double step = 1e-5;
    memset(&p, 0, sizeof p);
    p.random = test_random_start(k->name);
    layer_of_kind(k, &p, &l);
    double* x = layer_place(&p, KIND_TOKENS * KIND_HIDDEN, 0.0, &dx);
    int places = p.count;
    double* dy = layer_place(&p, KIND_TOKENS * KIND_HIDDEN, 0.0, &unused);
    ref_kept kept;
    memset(&kept, 0, sizeof kept);
    (void)ref_layer_forward(&kept, &l, KIND_TOKENS, x);
    ref_add(KIND_TOKENS * KIND_HIDDEN, 1.0, ref_layer_backward(&kept, &l, dy), dx);
    ref_free(&kept);
    for (int i = 0; i < places; i++) {
        for (int64_t j = 0; j < p.counts[i]; j++) {
            double before = p.values[i][j];
            p.values[i][j] = before + step;
            double up = layer_loss(&l, x, dy);
            p.values[i][j] = before - step;
            double difference = (up - layer_loss(&l, x, dy)) / (2.0 * step);
            p.values[i][j] = before;
            ASSERT(fabs(difference - p.gradients[i][j]) <= 1e-6 + 1e-6 * fabs(difference));
        }
    }
    ref_free(&p.memory);
    PASS();
}

SUITE(REFERENCE_SUITE) {
    if (!test_wants("cpu")) {
        return;
    }
    for (size_t i = 0; i < sizeof layer_kinds / sizeof layer_kinds[0]; i++) {
        greatest_set_test_suffix(layer_kinds[i].name);
        RUN_TESTp(reference_gradients_are_differences, &layer_kinds[i]);
    }
    for (size_t i = 0; i < sizeof reference_cases / sizeof reference_cases[0]; i++) {
        greatest_set_test_suffix(reference_cases[i].name);
        RUN_TESTp(model_is_the_reference, &reference_cases[i]);
    }
}
