// ---- what the kinds of feed-forward parts need --------------------------------------------------
//
// What plan and memory ask; what the passes call is in kinds.h.

typedef struct qlora__ffn_plan {
    const char* name;
    // Adds what a layer keeps for the backward pass.
    void (*keep)(const qlora_model* m, const qlora__layer* layer, qlora__kept_slots* slots);
    // Memory that all layers use, in training; NULL = none.
    void (*share)(qlora__arena* arena, qlora_model* m);
    // The kernels of a layer that others do not need.
    qlora__needs (*needs)(const qlora_model* m, const qlora__layer* layer);
    // Whether the backward pass of the activation computes dB of the stack before it and dA of the
    // one after it as well; NULL = never.
    bool (*sums)(const qlora_model* m, const qlora__layer* layer);
    bool joins;             // the activation has kernels with parts of the products beside it
    unsigned z;             // stacks (one bit each) whose z is kept, as x is overwritten
    unsigned z_sums;        // of recomputed layers, if it sums
    int64_t fp8_multiple;   // that the width must be for aligned rows of FP8 products
    const char* activation; // in config.json; NULL = it depends on the family
} qlora__ffn_plan;

// The output of the first stack, with room for u.
static void qlora__stack_keep(const qlora_model* m, const qlora__layer* layer,
                              qlora__kept_slots* slots) {
    const qlora__kept_slot gu = {QLORA__KEPT_TILE, offsetof(qlora__kept, gu), m->compute,
                            qlora__tile_rows(m),
                            qlora_linear_out(&layer->linears[QLORA__GATE_UP]) +
                                layer->pads[QLORA__GATE_UP]};
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
    return qlora__gated_takes(own) && qlora__keeps_z(m) &&
           m->compute == QLORA_BF16 && qlora__tile_rows(m) * c->intermediate >= QLORA__GATED_FROM &&
           c->hidden % 8 == 0 && c->intermediate % 8 == 0;
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

// Indexed by qlora__ffn. Of the gated one, gate and up are next to each other in rows of FP8.
static const qlora__ffn_plan qlora__ffn_plans[] = {
    {"gated", qlora__stack_keep, qlora__gated_share, qlora__gated_needs, qlora__gated_sums, true,
     1u << QLORA__GATE_UP | 1u << QLORA__DOWN, 1u << QLORA__DOWN, 4, NULL},
    {"plain", qlora__stack_keep, NULL, qlora__plain_needs, NULL, false,
     1u << QLORA__GATE_UP | 1u << QLORA__DOWN, 0, 8, "relu2"}};

static const qlora__ffn_plan* qlora__ffn_plan_of(const qlora__layer* layer) {
    return &qlora__ffn_plans[layer->layout->ffn];
}

// The memory that the feed-forward parts of a model share: each kind that it has, once.
static void qlora__ffns_share(qlora__arena* arena, qlora_model* m) {
    bool done[QLORA__FFNS];
    memset(done, 0, sizeof done);
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        const qlora__ffn_plan* plan = qlora__ffn_plan_of(&m->layers[l]);
        if (!done[plan - qlora__ffn_plans] && plan->share != NULL) {
            plan->share(arena, m);
        }
        done[plan - qlora__ffn_plans] = true;
    }
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
