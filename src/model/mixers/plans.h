// ---- what the kinds of mixers need --------------------------------------------------------------
//
// What plan and memory ask; what the passes call is in kinds.h.

typedef struct qlora__mixer_plan {
    const char* name;
    // Adds what a layer keeps for the backward pass.
    void (*keep)(const qlora_model* m, const qlora__layer* layer, qlora__kept_slots* slots);
    // Memory that all layers use, in training; NULL = none.
    void (*share)(qlora__arena* arena, qlora_model* m);
    unsigned z; // stacks (one bit each) whose z leaves no other trace, as x is overwritten
    // What it costs: model/cost.h.
    void (*cost)(const qlora_model* m, const qlora__layer* layer, qlora__part_cost* out);
} qlora__mixer_plan;

// q, k and v, also before their norms; the output, with room for z of o_proj, and its statistics.
static void qlora__softmax_keep(const qlora_model* m, const qlora__layer* layer,
                                qlora__kept_slots* slots) {
    const qlora_model_config* c = &m->plan.config;
    int64_t T = m->plan.tokens;
    int64_t q = qlora__q_width(c);
    int64_t kv = qlora__kv_width(c);
    const qlora__kept_slot all[] = {
        {QLORA__KEPT_IN, offsetof(qlora__kept, qkv), m->compute, T, q + 2 * kv},
        {QLORA__KEPT_MIXED, offsetof(qlora__kept, o), m->compute, T, q + layer->pads[QLORA__O]},
        {QLORA__KEPT_MIXED, offsetof(qlora__kept, lse), QLORA_F32, c->heads, T},
        {QLORA__KEPT_IN, offsetof(qlora__kept, qk), m->compute, T, q + kv}};
    for (int i = 0; i < (c->qk_norm ? 4 : 3); i++) {
        qlora__kept_add(slots, &all[i]);
    }
}

// The backward pass keeps two numbers per head and token, in the scratch buffer unless they would
// fill it.
static bool qlora__has_own_stats(const qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    return m->on_gpu && (uint64_t)(c->heads * m->plan.tokens) * 8 > ((uint64_t)32 << 20);
}

static void qlora__softmax_share(qlora__arena* arena, qlora_model* m) {
    if (qlora__has_own_stats(m)) {
        qlora__arena_tensor(arena, QLORA_F32, m->plan.config.heads, 2 * m->plan.tokens,
                            &m->work.stats);
    }
}

// Two products for each pair. Beside products: the norm and the residual stream, four times; what
// the rotation and attention read and write.
static void qlora__softmax_cost(const qlora_model* m, const qlora__layer* layer,
                                qlora__part_cost* out) {
    const qlora_model_config* c = &m->plan.config;
    double q = (double)qlora__q_width(c);
    double kv = (double)qlora__kv_width(c);
    qlora__cost_stack(layer, QLORA__QKV, &out->in);
    qlora__cost_stack(layer, QLORA__O, &out->out);
    out->pair = 4.0 * q;
    out->moved = 4.0 * (double)c->hidden + 2.0 * (q + kv);
    out->moved_back = out->moved + 2.0 * q;
}

// Indexed by qlora__mixer.
static const qlora__mixer_plan qlora__mixer_plans[] = {
    {"softmax", qlora__softmax_keep, qlora__softmax_share, 1u << QLORA__QKV,
     QLORA__TRAINS ? qlora__softmax_cost : NULL}};

static const qlora__mixer_plan* qlora__mixer_plan_of(const qlora__layer* layer) {
    return &qlora__mixer_plans[layer->layout->mixer];
}

// The memory that the mixers of a model share: each kind that it has, once.
static void qlora__mixers_share(qlora__arena* arena, qlora_model* m) {
    bool done[QLORA__MIXERS];
    memset(done, 0, sizeof done);
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        const qlora__mixer_plan* plan = qlora__mixer_plan_of(&m->layers[l]);
        if (!done[plan - qlora__mixer_plans] && plan->share != NULL) {
            plan->share(arena, m);
        }
        done[plan - qlora__mixer_plans] = true;
    }
}
