// ---- the work of a step -------------------------------------------------------------------------
//
// The one place that adds up what the parts of layers and the head cost: plans, the choice of what
// is copied to the host, estimates of time and benchmarks ask it.

#define QLORA__CODED_BYTES 0.516 // of a weight in 4 bits, with its scales

// What the parts of a layer cost.
static void qlora__layer_cost(const qlora_model* m, const qlora__layer* layer,
                              qlora__part_cost parts[QLORA__BRANCHES]) {
    memset(parts, 0, QLORA__BRANCHES * sizeof *parts);
    qlora__mixer_plan_of(layer)->cost(m, layer, &parts[QLORA__ATTENTION]);
    qlora__ffn_plan_of(layer)->cost(m, layer, &parts[QLORA__MLP]);
}

// Pairs of tokens of which one sees the other, half of each token's own counted.
static double qlora__cost_pairs(double length, double window) {
    return window > 0.0 && window < length ? window * (length - 0.5 * window)
                                           : 0.5 * length * length;
}

// The window of a layer, or 0.
static double qlora__layer_window(const qlora_model* m, const qlora__layer* layer) {
    return layer->sliding ? (double)m->plan.config.window : 0.0;
}

// FLOPs of the forward pass of a layer for each token of the longest sequence: those of the layer
// that has the fewest.
static double qlora__least_layer(const qlora_model* m) {
    double longest = (double)qlora__max(m->plan.max_length, 1);
    double least = 0.0;
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        const qlora__layer* layer = &m->layers[l];
        qlora__part_cost parts[QLORA__BRANCHES];
        double flops = 0.0;
        qlora__layer_cost(m, layer, parts);
        for (int b = 0; b < QLORA__BRANCHES; b++) {
            double pairs = qlora__cost_pairs(longest, qlora__layer_window(m, layer));
            flops += 2.0 * (parts[b].in.used + parts[b].out.used);
            flops += parts[b].pair * pairs / longest;
        }
        least = l == 0 || flops < least ? flops : least;
    }
    return least;
}

// Adds what a recomputed layer computes once more: all but the matrices out of its last part and
// what is kept of its mixer.
static void qlora__work_again(const qlora_model* m, const qlora__layer* layer,
                              const qlora__part_cost* parts, qlora_plan_work* w) {
    int window = layer->sliding ? 1 : 0;
    double wide = (double)qlora_dtype_bytes(m->compute);
    for (int b = 0; b < QLORA__BRANCHES; b++) {
        const qlora__part_cost* p = &parts[b];
        bool in = b > 0 || !layer->keeps_heads;
        bool out = b + 1 < QLORA__BRANCHES;
        double coded = p->in.coded + (out ? p->out.coded : 0.0);
        bool copies = layer->cached && p->uncached < coded;
        w->again += in ? 2.0 * (p->in.used + p->in.adapters) : 0.0;
        w->again += out ? 2.0 * (p->out.used + p->out.adapters) : 0.0;
        w->pairs_again[window] += b > 0 || !layer->keeps_attention ? p->pair : 0.0;
        w->moved[2] += p->moved;
        w->widened[2] += (copies ? p->uncached : coded) * (QLORA__CODED_BYTES + wide);
    }
}

static void qlora__work_layer(const qlora_model* m, int64_t number, qlora_plan_work* w) {
    const qlora__layer* layer = &m->layers[number];
    qlora__part_cost parts[QLORA__BRANCHES];
    double wide = (double)qlora_dtype_bytes(m->compute);
    qlora__layer_cost(m, layer, parts);
    for (int b = 0; b < QLORA__BRANCHES; b++) {
        const qlora__part_cost* p = &parts[b];
        double coded = layer->cached ? p->uncached : p->in.coded + p->out.coded;
        w->weights += p->in.held + p->out.held;
        w->routed += p->routed;
        w->products += 2.0 * (p->in.used + p->out.used);
        w->adapters += 2.0 * (p->in.adapters + p->out.adapters);
        // Nothing below the first layer has a gradient.
        w->gradients += 2.0 * ((number == 0 && b == 0 ? 0.0 : p->in.used) + p->out.used);
        w->pairs[layer->sliding ? 1 : 0] += p->pair;
        w->moved[0] += p->moved;
        w->moved[1] += p->moved_back;
        w->widened[0] += coded * (QLORA__CODED_BYTES + wide);
        w->widened[1] += coded * (QLORA__CODED_BYTES + wide);
    }
    if (layer->recompute) {
        qlora__work_again(m, layer, parts, w);
    }
}

// Fills in plan.work, from the other fields of the plan.
static void qlora__work_sum(qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    qlora_plan_work* w = &m->plan.work;
    memset(w, 0, sizeof *w);
    for (int64_t l = 0; l < c->layers; l++) {
        qlora__work_layer(m, l, w);
    }
    w->element = (double)qlora_dtype_bytes(m->compute);
    w->label = 2.0 * (double)c->hidden * (double)c->vocab;
    // Parameters and gradients in f32, the shadow, and the moments, each read and written.
    bool coded = m->desc.optimizer == QLORA_OPTIMIZER_ADAMW_8BIT;
    w->update = (16.0 + w->element + (coded ? 4.0 : 16.0)) * (double)m->plan.parameters;
}

void qlora_plan_cost(const qlora_plan* plan, const int32_t* lengths, int64_t count, double labels,
                     qlora_cost* out) {
    double tokens = 0.0;
    double pairs[2] = {0.0, 0.0};
    if (out == NULL) {
        return;
    }
    memset(out, 0, sizeof *out);
    if (plan == NULL || lengths == NULL) {
        return;
    }
    const qlora_plan_work* w = &plan->work;
    for (int64_t i = 0; i < count; i++) {
        tokens += (double)lengths[i];
        pairs[0] += qlora__cost_pairs((double)lengths[i], 0.0);
        pairs[1] += qlora__cost_pairs((double)lengths[i], (double)plan->config.window);
    }
    double seen = w->pairs[0] * pairs[0] + w->pairs[1] * pairs[1];
    double logits = (double)plan->config.vocab * labels;
    out->forward = tokens * w->products + seen + labels * w->label;
    out->forward_bytes = w->widened[0] + w->element * (tokens * w->moved[0] + 2.0 * logits);
    // The backward pass of attention computes five products instead of two.
    out->flops = tokens * (w->products + w->gradients + 3.0 * w->adapters) + 3.5 * seen +
                 2.0 * labels * w->label;
    out->again = tokens * w->again + w->pairs_again[0] * pairs[0] + w->pairs_again[1] * pairs[1];
    out->bytes = w->widened[0] + w->widened[1] + w->widened[2] +
                 w->element * (tokens * (w->moved[0] + w->moved[1] + w->moved[2]) + 3.0 * logits);
    out->moved = tokens * w->moved[0];
}
