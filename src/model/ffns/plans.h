// ---- what the kinds of feed-forward parts need --------------------------------------------------
//
// What plan and memory ask; what the passes call is in kinds.h.

typedef struct qlora__ffn_plan {
    const char* name;
    // Adds what a layer keeps for the backward pass.
    void (*keep)(const qlora_model* m, const qlora__layer* layer, qlora__kept_slots* slots);
    // Memory that all layers use, in training and in every pass; NULL = none.
    void (*share)(qlora__arena* arena, qlora_model* m);
    void (*work)(qlora__arena* arena, qlora_model* m);
    // The same, of which the head may have what is in it: layers do not run then.
    void (*lend)(qlora__arena* arena, qlora_model* m);
    // What a model with such a part cannot do; NULL = nothing, or returns NULL.
    const char* (*refuse)(const qlora_model* m);
    // The kernels of a layer that others do not need.
    qlora__needs (*needs)(const qlora_model* m, const qlora__layer* layer);
    // Whether the backward pass of the activation computes dB of the stack before it and dA of the
    // one after it as well; NULL = never.
    bool (*sums)(const qlora_model* m, const qlora__layer* layer);
    bool adds;              // parts stand side by side: their gradients meet in d_beside
    bool steps;             // the kernels of a decoding step take it
    bool joins;             // the activation has kernels with parts of the products beside it
    unsigned z;             // stacks (one bit each) whose z is kept, as x is overwritten
    unsigned z_sums;        // of recomputed layers, if it sums
    int64_t fp8_multiple;   // that the width must be for aligned rows of FP8 products
    const char* activation; // in config.json; NULL = it depends on the family
    // What it costs: model/cost.h.
    void (*cost)(const qlora_model* m, const qlora__layer* layer, qlora__part_cost* out);
} qlora__ffn_plan;

// The output of the first stack, with room for u.
static void qlora__stack_keep(const qlora_model* m, const qlora__layer* layer,
                              qlora__kept_slots* slots) {
    const qlora__kept_slot gu = {
        QLORA__KEPT_TILE, offsetof(qlora__kept, gu), m->compute, qlora__tile_rows(m),
        qlora_linear_out(&layer->linears[QLORA__GATE_UP]) + layer->pads[QLORA__GATE_UP]};
    qlora__kept_add(slots, &gu);
}

// Whether the backward pass of the activation computes dB of gate and up and dA of down as well.
// ranks: of gate, up and down; may be NULL.
static bool qlora__gated_ranks(const qlora_model* m, const qlora__layer* layer, int64_t* ranks) {
    const qlora_model_config* c = &m->plan.config;
    const qlora_linear_desc* l = &layer->linears[QLORA__GATE_UP];
    int64_t own[3] = {l->parts[0].rank, l->parts[l->count - 1].rank,
                      layer->linears[QLORA__DOWN].parts[0].rank};
    if (ranks != NULL) {
        memcpy(ranks, own, sizeof own);
    }
    return qlora__gated_takes(own) && qlora__keeps_z(m) && m->compute == QLORA_BF16 &&
           qlora__tile_rows(m) * c->intermediate >= QLORA__GATED_FROM && c->hidden % 8 == 0 &&
           c->intermediate % 8 == 0;
}

static bool qlora__gated_sums(const qlora_model* m, const qlora__layer* layer) {
    return qlora__gated_ranks(m, layer, NULL);
}

static qlora__needs qlora__gated_needs(const qlora_model* m, const qlora__layer* layer) {
    return qlora__gated_sums(m, layer) ? QLORA__NEED_GATED : 0;
}

static qlora__needs qlora__plain_needs(const qlora_model* m, const qlora__layer* layer) {
    (void)m;
    (void)layer;
    return QLORA__NEED_RELU2;
}

static void qlora__gated_share(qlora__arena* arena, qlora_model* m) {
    int64_t parts = 0;
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        const qlora__layer* layer = &m->layers[l];
        if (layer->layout->ffn == QLORA__FFN_GATED && qlora__gated_sums(m, layer)) {
            parts = qlora__gated_room(qlora__tile_rows(m), m->plan.config.intermediate);
        }
    }
    qlora__arena_tensor(arena, QLORA_F32, 1, parts, &m->work.gated_parts);
}

// The columns that adapters of experts need beside a row, at most.
static int64_t qlora__experts_pad(const qlora_model* m) {
    int64_t pad = 0;
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        const qlora__experts* experts = m->layers[l].experts;
        pad = experts != NULL ? qlora__max(pad, experts->pad) : pad;
    }
    return pad;
}

// Columns beside x of a linear of experts, on a GPU: its parts have one A there.
static int64_t qlora__expert_pad(const qlora_linear_desc* linear) {
    return (linear->parts[0].rank + 7) / 8 * 8;
}

// Gate and up of the rows that experts get, and what chose them.
static void qlora__experts_keep(const qlora_model* m, const qlora__layer* layer,
                                qlora__kept_slots* slots) {
    const qlora_model_config* c = &m->plan.config;
    int64_t some = qlora__tile_rows(m);
    int64_t pad = qlora__experts_pad(m);
    int64_t routed = some * c->experts_per_token;
    int64_t one = m->on_gpu ? qlora__expert_pad(&layer->experts->linears[0]) : pad;
    const qlora__kept_slot all[] = {
        {QLORA__KEPT_TILE, offsetof(qlora__kept, routed), m->compute, routed,
         2 * c->expert_intermediate + one},
        {QLORA__KEPT_TILE, offsetof(qlora__kept, routed_z), m->compute, routed,
         m->on_gpu && qlora__trains(m) ? one : 0},
        {QLORA__KEPT_TILE, offsetof(qlora__kept, scores), m->on_gpu ? QLORA_F32 : m->compute, some,
         c->experts},
        {QLORA__KEPT_TILE, offsetof(qlora__kept, shared), m->compute, some, 1 + pad}};
    qlora__stack_keep(m, layer, slots);
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        qlora__kept_add(slots, &all[i]);
    }
}

// The type of what chooses: scores and weights are f32 on a GPU.
static qlora_dtype qlora__routing_type(const qlora_model* m) {
    return m->on_gpu ? QLORA_F32 : m->compute;
}

// Sums of choices and probabilities.
static void qlora__balance_work(qlora__arena* arena, qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    qlora__balance* b = &m->work.experts.balance;
    int64_t some = qlora__tile_rows(m);
    memset(b, 0, sizeof *b);
    for (int64_t l = 0; l < c->layers; l++) {
        b->layers += m->layers[l].experts != NULL ? 1 : 0;
    }
    b->experts = c->experts;
    b->chosen = c->experts_per_token;
    b->ranges = qlora__min(qlora__ceil_div(some, QLORA__BALANCE_ROWS), QLORA__BALANCE_RANGES);
    b->slots = b->ranges * qlora__ceil_div(m->plan.tokens, some);
    qlora__arena_tensor(arena, QLORA_F32, b->layers * b->slots, c->experts, &b->sums);
    qlora__arena_tensor(arena, QLORA_I32, b->layers * b->slots, c->experts, &b->counts);
    qlora__arena_tensor(arena, QLORA_F32, 1, c->experts, &b->weights);
    qlora__arena_tensor(arena, QLORA_I32, 1, c->experts, &b->taken);
    qlora__arena_tensor(arena, QLORA_F32, 1, c->experts, &b->slopes);
    qlora__arena_tensor(arena, QLORA_I32, b->layers, c->experts, &b->load);
    qlora__arena_tensor(arena, QLORA_F32, 1, QLORA__LOADS, &b->report);
}

static void qlora__experts_work(qlora__arena* arena, qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    qlora__routed_work* w = &m->work.experts;
    qlora_dtype type = qlora__routing_type(m);
    int64_t some = qlora__tile_rows(m);
    int64_t pad = qlora__experts_pad(m);
    int64_t routed = some * c->experts_per_token;
    qlora__arena_tensor(arena, m->compute, some, c->hidden, &w->y);
    m->work.gathered = w->y;
    qlora__arena_tensor(arena, type, 1, routed, &w->weights);
    qlora__arena_tensor(arena, type, 1, routed, &w->sorted);
    qlora__arena_tensor(arena, QLORA_I32, 1, routed, &w->choice);
    qlora__arena_tensor(arena, QLORA_I32, 1, routed, &w->place);
    qlora__arena_tensor(arena, QLORA_I32, 1, routed, &w->tokens);
    qlora__arena_tensor(arena, QLORA_I32, 1, c->experts + 1, &w->starts);
    if (m->on_gpu || qlora__trains(m)) { // scores of a router with an adapter come this way
        qlora__arena_tensor(arena, m->compute, some, c->experts + pad, &w->dz);
    }
    if (qlora__trains(m)) {
        qlora__arena_tensor(arena, type, 1, routed, &w->dw);
        qlora__arena_tensor(arena, m->compute, some, 1 + pad, &w->d_gate);
        qlora__balance_work(arena, m);
    }
    if (!m->on_gpu) {
        qlora__arena_tensor(arena, m->compute, some, c->hidden + pad, &w->x);
        qlora__arena_tensor(arena, m->compute, some, c->expert_intermediate + pad, &w->s);
        qlora__arena_tensor(arena, m->compute, qlora__trains(m) ? some : 0, c->expert_intermediate,
                            &w->ds);
        return;
    }
    qlora__arena_tensor(arena, QLORA_I32, qlora__routing_chunks(routed), c->experts, &w->counts);
    qlora__arena_tensor(arena, QLORA_I32, 1, qlora__routing_tiles(c->experts, routed), &w->tiles);
}

// Elements of the operands of all experts of a layer: into their activation (0), or out of it (1).
static int64_t qlora__experts_operands(const qlora_model* m, const qlora__layer* layer, int which) {
    if (layer->experts == NULL) {
        return 0;
    }
    const qlora_linear_desc* linear = &layer->experts->linears[which];
    int64_t pad = qlora__expert_pad(linear);
    return m->plan.config.experts * qlora__expert_height(qlora_linear_out(linear) + pad) *
           (linear->in + pad);
}

// What a GPU needs only while a layer runs.
static void qlora__experts_lend(qlora__arena* arena, qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    qlora__routed_work* w = &m->work.experts;
    int64_t pad = qlora__experts_pad(m);
    int64_t routed = qlora__tile_rows(m) * c->experts_per_token;
    for (int i = 0; i < 2 && m->on_gpu; i++) {
        int64_t most = 0;
        for (int64_t l = 0; l < c->layers; l++) {
            most = qlora__max(most, qlora__experts_operands(m, &m->layers[l], i));
        }
        qlora__arena_tensor(arena, m->compute, 1, most, &w->operands[i]);
    }
    if (m->on_gpu) {
        qlora__arena_tensor(arena, m->compute, routed, c->hidden + pad, &w->x);
        qlora__arena_tensor(arena, m->compute, routed, c->expert_intermediate + pad, &w->s);
    }
}

// Whether the matrices of all experts have one form, as the kernels of a GPU want it.
static bool qlora__experts_alike(const qlora_model* m) {
    bool alike = true;
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        const qlora__layer* layer = &m->layers[l];
        int count = layer->experts != NULL ? layer->layout->experts->count : 0;
        int first = count > 0 ? qlora__first_expert(layer->layout) : 0;
        for (int i = first; count > 0 && i < layer->count; i++) {
            const qlora__projection* a = &layer->projections[first + (i - first) % count];
            const qlora__projection* b = &layer->projections[i];
            alike = alike && a->is_nf4 == b->is_nf4 && a->nf4_desc.block == b->nf4_desc.block &&
                    a->nf4_desc.block2 == b->nf4_desc.block2 &&
                    a->nf4_desc.plain_scales == b->nf4_desc.plain_scales;
        }
    }
    return alike;
}

// Whether dropout would be left out: PEFT has none on parameters, and the router and the gate of
// the shared MLP have none here.
static bool qlora__experts_drop(const qlora_model* m) {
    bool any = false;
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        const qlora__layer* layer = &m->layers[l];
        for (int u = 0; u < qlora__unit_count(layer); u++) {
            int i = qlora__unit_at(layer, u);
            any = any || (layer->projections[i].rank > 0 &&
                          (qlora__is_parameter(m, l, i) || i >= layer->layout->count));
        }
    }
    return any && qlora__trains(m) && m->desc.dropout > 0.0f;
}

static bool qlora__experts_fp8(const qlora_model* m) {
    bool any = m->plan.mode == QLORA_MODE_FP8;
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        for (int i = 0; i < m->layers[l].count; i++) {
            any = any || m->layers[l].projections[i].is_fp8;
        }
    }
    return any;
}

static const char* qlora__experts_refuse(const qlora_model* m) {
    return m->on_gpu && !qlora__experts_alike(m)
               ? "has experts in different formats, which do not run on a GPU; open a context for "
                 "the CPU"
           : qlora__has_several(m) ? "has experts, without support for several adapters"
           : m->dora               ? "has experts, without support for DoRA"
           : qlora__experts_fp8(m) ? "has experts, without support for FP8"
           : qlora__experts_drop(m)
               ? "has experts, without support for dropout on experts, as in PEFT, on the router "
                 "and on MLPs that PEFT names as parameters; set desc.dropout to 0"
               : NULL;
}

static qlora__needs qlora__experts_needs(const qlora_model* m, const qlora__layer* layer) {
    (void)m;
    (void)layer;
    return QLORA__NEED_EXPERTS;
}

// What an MLP with a gate, or without one, costs if all tokens use it. Beside products: the norm
// and the residual stream, four times; the activation reads and writes its columns, and backward
// those of the gradients as well.
static void qlora__mlp_cost(const qlora_model* m, const qlora__layer* layer, double in,
                            qlora__part_cost* out) {
    int number = layer->layout->groups[QLORA__DOWN].first;
    bool none = layer->layout->groups[QLORA__DOWN].count == 0;
    double width = none ? 0.0 : (double)layer->projections[number].in;
    qlora__cost_stack(layer, QLORA__GATE_UP, &out->in);
    qlora__cost_stack(layer, QLORA__DOWN, &out->out);
    out->moved = 4.0 * (double)m->plan.config.hidden + (in + 1.0) * width;
    out->moved_back = 4.0 * (double)m->plan.config.hidden + 2.0 * (in + 1.0) * width;
}

static void qlora__gated_cost(const qlora_model* m, const qlora__layer* layer,
                              qlora__part_cost* out) {
    qlora__mlp_cost(m, layer, 2.0, out);
}

static void qlora__plain_cost(const qlora_model* m, const qlora__layer* layer,
                              qlora__part_cost* out) {
    qlora__mlp_cost(m, layer, 1.0, out);
}

// A token uses some of the experts; the products dequantise those that any token uses, counted here
// as all, in every pass. The outputs of those that it uses are read once more, for their sum, and
// so are the gradients of their inputs.
static void qlora__experts_cost(const qlora_model* m, const qlora__layer* layer,
                                qlora__part_cost* out) {
    const qlora_model_config* c = &m->plan.config;
    const qlora__expert_rows* rows = layer->layout->experts;
    int first = qlora__first_expert(layer->layout);
    double all = (double)c->experts;
    double chosen = (double)c->experts_per_token;
    double width = chosen * (double)c->expert_intermediate;
    qlora__stack_cost into;
    qlora__stack_cost from;
    memset(&into, 0, sizeof into);
    memset(&from, 0, sizeof from);
    qlora__mlp_cost(m, layer, 2.0, out);
    for (int i = layer->layout->count; i < first; i++) { // the router and the gate beside it
        qlora__cost_add(&layer->projections[i], 1.0, 1.0, &out->in);
    }
    for (int i = 0; i + 1 < rows->count; i++) {
        qlora__cost_add(&layer->projections[first + i], all, chosen, &into);
        // Gate and up have one A.
        const qlora__projection* p = &layer->projections[first + i];
        into.adapters -= i > 0 ? chosen * (double)(p->rank * p->in) : 0.0;
    }
    qlora__cost_add(&layer->projections[first + rows->count - 1], all, chosen, &from);
    out->routed = into.held + from.held;
    out->uncached = into.coded + from.coded;
    out->moved += 3.0 * width + chosen * (double)c->hidden;
    out->moved_back += 6.0 * width + chosen * (double)c->hidden;
    qlora__cost_join(&into, &out->in);
    qlora__cost_join(&from, &out->out);
}

// Indexed by qlora__ffn. Of the gated one, gate and up are next to each other in rows of FP8.
static const qlora__ffn_plan qlora__ffn_plans[] = {
    {"gated", qlora__stack_keep, qlora__gated_share, NULL, NULL, NULL, qlora__gated_needs,
     qlora__gated_sums, false, true, true, 1u << QLORA__GATE_UP | 1u << QLORA__DOWN,
     1u << QLORA__DOWN, 4, NULL, QLORA__TRAINS ? qlora__gated_cost : NULL},
    {"plain", qlora__stack_keep, NULL, NULL, NULL, NULL, qlora__plain_needs, NULL, false, true,
     false, 1u << QLORA__GATE_UP | 1u << QLORA__DOWN, 0, 8, "relu2",
     QLORA__TRAINS ? qlora__plain_cost : NULL},
    {"experts", qlora__experts_keep, NULL, qlora__experts_work, qlora__experts_lend,
     qlora__experts_refuse, qlora__experts_needs, NULL, true, false, false,
     1u << QLORA__GATE_UP | 1u << QLORA__DOWN, 0, 8, NULL,
     QLORA__TRAINS ? qlora__experts_cost : NULL}};

static const qlora__ffn_plan* qlora__ffn_plan_of(const qlora__layer* layer) {
    return &qlora__ffn_plans[layer->layout->ffn];
}

// When memory is used that parts share: in all passes, in training, or only while layers run.
typedef enum qlora__shared_use {
    QLORA__SHARED_ALWAYS,
    QLORA__SHARED_TRAINING,
    QLORA__SHARED_LAYERS
} qlora__shared_use;

// Lays that memory out: for each kind that a model has, once.
static void qlora__ffns_share(qlora__arena* arena, qlora_model* m, qlora__shared_use use) {
    bool done[QLORA__FFNS];
    memset(done, 0, sizeof done);
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        const qlora__ffn_plan* plan = qlora__ffn_plan_of(&m->layers[l]);
        void (*lay)(qlora__arena * arena, qlora_model * m) =
            use == QLORA__SHARED_ALWAYS     ? plan->work
            : use == QLORA__SHARED_TRAINING ? plan->share
                                            : plan->lend;
        if (!done[plan - qlora__ffn_plans] && lay != NULL) {
            lay(arena, m);
        }
        done[plan - qlora__ffn_plans] = true;
    }
}

// Whether any layer has parts side by side.
static bool qlora__any_ffn_adds(const qlora_model* m) {
    bool any = false;
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        any = any || qlora__ffn_plan_of(&m->layers[l])->adds;
    }
    return any;
}

// Whether the activation of a layer computes gradients of adapters, or that of any layer.
static bool qlora__ffn_sums(const qlora_model* m, const qlora__layer* layer) {
    const qlora__ffn_plan* plan = qlora__ffn_plan_of(layer);
    return plan->sums != NULL && plan->sums(m, layer);
}

static bool qlora__any_ffn_sums(const qlora_model* m) {
    bool any = false;
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        any = any || qlora__ffn_sums(m, &m->layers[l]);
    }
    return any;
}
