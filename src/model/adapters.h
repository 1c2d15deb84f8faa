// ---- several adapters ---------------------------------------------------------------------------
//
// Everything that an adapter has of its own, from its matrices to the state of its optimizer, is in
// fields of the model, so that the code for one adapter also serves one of several: it works on the
// current one, whose values are in those fields. The values of the others are in m->owns and
// m->loras. Between two calls of the library, the current adapter is the chosen one.

#define QLORA__MOST_ADAPTERS 64

static bool qlora__has_several(const qlora_model* m) {
    return m->adapters > 1;
}

static qlora__lora* qlora__lora_at(const qlora_model* m, int32_t adapter, int64_t layer, int i) {
    int64_t layers = m->plan.config.layers;
    return &m->loras[(adapter * layers + layer) * QLORA__PROJECTIONS + i];
}

// Copies the fields of the current adapter to its entry, or, with `back`, from it.
static void qlora__own_copy(qlora_model* m, bool back) {
    qlora__own* own = &m->owns[m->adapter];
    const struct {
        void* model;
        void* own;
        size_t bytes;
    } fields[] = {{&m->desc.rank, &own->rank, sizeof own->rank},
                  {&m->desc.alpha, &own->alpha, sizeof own->alpha},
                  {&m->adapter_seed, &own->adapter_seed, sizeof own->adapter_seed},
                  {&m->elements, &own->elements, sizeof own->elements},
                  {&m->range_count, &own->range_count, sizeof own->range_count},
                  {&m->longest_range, &own->longest_range, sizeof own->longest_range},
                  {&m->moment_bytes, &own->moment_bytes, sizeof own->moment_bytes},
                  {&m->parameters, &own->parameters, sizeof own->parameters},
                  {&m->shadow, &own->shadow, sizeof own->shadow},
                  {&m->ranges, &own->ranges, sizeof own->ranges},
                  {&m->gradients, &own->gradients, sizeof own->gradients},
                  {&m->partials, &own->partials, sizeof own->partials},
                  {&m->moment1, &own->moment1, sizeof own->moment1},
                  {&m->moment2, &own->moment2, sizeof own->moment2},
                  {&m->moments, &own->moments, sizeof own->moments},
                  {&m->adamw, &own->adamw, sizeof own->adamw},
                  {&m->totals, &own->totals, sizeof own->totals},
                  {&m->clip, &own->clip, sizeof own->clip}};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        memcpy(back ? fields[i].model : fields[i].own, back ? fields[i].own : fields[i].model,
               fields[i].bytes);
    }
}

// Keeps the matrices of the current adapter in its entries.
static void qlora__loras_keep(const qlora_model* m) {
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        for (int i = 0; i < m->layers[l].layout->count; i++) {
            const qlora__projection* p = &m->layers[l].projections[i];
            qlora__lora* lora = qlora__lora_at(m, m->adapter, l, i);
            lora->rank = p->rank;
            lora->alpha = p->alpha;
            lora->scale = p->scale;
            lora->a_at = p->a_at;
            lora->b_at = p->b_at;
            lora->a = p->a;
            lora->sb = p->sb;
            lora->da = p->da;
            lora->db = p->db;
        }
    }
}

static void qlora__loras_take(qlora_model* m) {
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        for (int i = 0; i < m->layers[l].layout->count; i++) {
            qlora__projection* p = &m->layers[l].projections[i];
            const qlora__lora* lora = qlora__lora_at(m, m->adapter, l, i);
            int group = m->layers[l].layout->rows[i].group;
            qlora_linear_part* part =
                &m->layers[l].linears[group].parts[i - m->layers[l].layout->groups[group].first];
            p->rank = lora->rank;
            p->alpha = lora->alpha;
            p->scale = lora->scale;
            p->a_at = lora->a_at;
            p->b_at = lora->b_at;
            p->a = lora->a;
            p->sb = lora->sb;
            p->da = lora->da;
            p->db = lora->db;
            part->rank = p->rank;
            part->scale = p->scale;
        }
    }
}

// Keeps what the current adapter has.
static void qlora__adapter_keep(qlora_model* m) {
    if (qlora__has_several(m)) {
        qlora__own_copy(m, false);
        qlora__loras_keep(m);
    }
}

// Makes an adapter the current one.
static void qlora__adapter_focus(qlora_model* m, int32_t adapter) {
    if (m->adapter == adapter) {
        return;
    }
    qlora__adapter_keep(m);
    m->adapter = adapter;
    qlora__own_copy(m, true);
    qlora__loras_take(m);
}

// Ends a call that may have made another adapter the current one.
static QLORA__UNUSED qlora_result qlora__adapter_leave(qlora_model* m, qlora_result r) {
    qlora__adapter_focus(m, m->chosen);
    return r;
}

#define QLORA__ALL_ADAPTERS (-1)

// The stack of an adapter, which need not be the current one, or of all of them side by side.
static qlora_linear_desc qlora__linear_of(const qlora_model* m, const qlora__layer* layer,
                                          int group, int32_t adapter) {
    qlora_linear_desc linear = layer->linears[group];
    int64_t index = layer - m->layers;
    for (int i = 0; i < linear.count && adapter != m->adapter; i++) {
        int number = layer->layout->groups[group].first + i;
        const qlora__lora* lora = adapter == QLORA__ALL_ADAPTERS
                                      ? &m->wide[index].loras[number]
                                      : qlora__lora_at(m, adapter, index, number);
        linear.parts[i].rank = lora->rank;
        linear.parts[i].scale = lora->scale;
        linear.parts[i].a = &lora->a;
        linear.parts[i].sb = &lora->sb;
        linear.parts[i].da = &lora->da;
        linear.parts[i].db = &lora->db;
    }
    return linear;
}
