// ---- experts ------------------------------------------------------------------------------------
//
// A router scores the experts for every token, the best ones run, and the sum of their outputs,
// each times its weight, is that of the branch; an MLP that all tokens use may stand beside them.
// The weight of an expert multiplies the activation before down, which is the same and gives the
// gradient of the weight from products that the backward pass has anyway. On the CPU, expert after
// expert gathers its rows; the order of sums is that of the experts.

static qlora_tensor qlora__experts_some(const qlora_tensor* t, int64_t first, int64_t rows,
                                        int64_t cols) {
    return qlora__window(t, rows, first * t->ld, cols);
}

// The linear of a pass: without adapters, its ranks are zero.
static qlora_linear_desc qlora__experts_linear(const qlora__pass* pass,
                                               const qlora_linear_desc* linear) {
    qlora_linear_desc own = *linear;
    for (int32_t i = 0; i < own.count && !pass->m->use_adapters; i++) {
        own.parts[i].rank = 0;
    }
    return own;
}

static qlora_result qlora__experts_forward(const qlora__pass* pass, qlora_math math,
                                           const qlora_linear_desc* linear, const qlora_tensor* x,
                                           const qlora_tensor* y) {
    QLORA__ENTER(pass->ctx, "qlora_linear_forward"); // frees the scratch on return
    return qlora__leave(pass->ctx, qlora__linear_forward(pass->ctx, math, linear, 0u, x, y));
}

// x has space for z, dy for u.
static qlora_result qlora__experts_backward(const qlora__pass* pass, qlora_math math,
                                            const qlora_linear_desc* linear, const qlora_tensor* x,
                                            const qlora_tensor* dy, const qlora_tensor* dx) {
    qlora_ctx* ctx = pass->ctx;
    qlora_tensor inner = qlora__window(x, x->rows, 0, linear->in);
    qlora_tensor gradient = qlora__window(dy, dy->rows, 0, qlora_linear_out(linear));
    QLORA__ENTER(ctx, "qlora_linear_backward");
    qlora_result r = qlora__linear_u_dx(ctx, math, linear, dy, &gradient, false, dx);
    if (r == QLORA_OK && qlora_linear_pad(linear) > 0) {
        r = qlora__linear_z(ctx, math, linear, x, &inner);
    }
    if (r == QLORA_OK && qlora_linear_pad(linear) > 0) {
        qlora__linear_factors all =
            qlora__linear_factors_of(x, NULL, dy, 1.0f, QLORA__GRADIENT_A | QLORA__GRADIENT_B);
        r = qlora__linear_gradients(ctx, math, linear, &all, NULL, NULL);
    }
    return qlora__leave(ctx, r);
}

// The choice of a pass, from the scores in kept.scores.
static qlora__route qlora__experts_route(const qlora__pass* pass, const qlora__layer* layer) {
    const qlora_model* m = pass->m;
    const qlora_model_config* c = &m->plan.config;
    const qlora__routed_work* w = &m->work.experts;
    qlora__route r;
    memset(&r, 0, sizeof r);
    r.rule.score = layer->layout->experts->score;
    r.rule.experts = c->experts;
    r.rule.chosen = c->experts_per_token;
    r.rule.groups = qlora__max(c->expert_groups, 1);
    r.rule.groups_used = qlora__max(c->expert_groups_used, 1);
    r.rule.renormalise = c->renormalise;
    r.rule.scale = c->routed_scale != 0.0 ? c->routed_scale : 1.0;
    r.rule.correction = (const QLORA__REAL*)layer->experts->correction.data;
    r.rows = pass->rows;
    r.scores = &layer->kept.scores;
    r.choice = (int32_t*)w->choice.data;
    r.weights = (QLORA__REAL*)w->weights.data;
    r.place = (int32_t*)w->place.data;
    r.tokens = (int32_t*)w->tokens.data;
    r.starts = (int32_t*)w->starts.data;
    r.first = pass->row;
    if (QLORA__TRAINS && pass->training && w->balance.layers > 0) {
        const qlora_tensor* ends = pass->gathered ? &m->batch.starts : &m->batch.seqs;
        r.bound = (const int32_t*)ends->data + m->plan.max_sequences;
        r.slopes = w->balance.coefficient > 0.0 ? (const QLORA__REAL*)w->balance.slopes.data : NULL;
    }
    return r;
}

// Chooses, and sorts the weights as the rows are.
static qlora__route qlora__experts_choose(const qlora__pass* pass, const qlora__layer* layer) {
    qlora__route r = qlora__experts_route(pass, layer);
    QLORA__REAL* sorted = (QLORA__REAL*)pass->m->work.experts.sorted.data;
    qlora__route_tokens(pass->ctx, &r);
    for (int64_t i = 0; i < r.rows * r.rule.chosen; i++) {
        sorted[r.place[i]] = r.weights[i];
    }
    return r;
}

// A linear that reads all rows of m->work.x, whose last columns belong to stacks: through a copy,
// if it has an adapter.
static qlora_result qlora__experts_all_rows(const qlora__pass* pass,
                                            const qlora_linear_desc* linear,
                                            const qlora_tensor* out) {
    const qlora_model* m = pass->m;
    qlora_linear_desc own = qlora__experts_linear(pass, linear);
    int64_t pad = qlora_linear_pad(&own);
    qlora_tensor from = qlora__local(pass, &m->work.x, 0, own.in);
    qlora_tensor x = qlora__window(&m->work.experts.x, pass->rows, 0, own.in + pad);
    qlora_tensor inner = qlora__window(&x, pass->rows, 0, own.in);
    qlora_tensor y = qlora__window(out, pass->rows, 0, qlora_linear_out(&own));
    if (pad > 0) {
        QLORA__TRY(qlora_scale(pass->ctx, 1.0f, &from, &inner));
    }
    return qlora__experts_forward(pass, m->math, &own, pad > 0 ? &x : &from, &y);
}

// Input of the branch in m->work.x -> the scores, and gate and up of every expert.
static qlora_result qlora__host_experts_in(const qlora__pass* pass, qlora__layer* layer) {
    qlora_model* m = pass->m;
    const qlora__experts* experts = layer->experts;
    if (layer->layout->groups[QLORA__GATE_UP].count > 0) {
        QLORA__TRY(qlora__gated_in(pass, layer));
    }
    if (experts->shared_gate.count > 0) {
        QLORA__TRY(qlora__experts_all_rows(pass, &experts->shared_gate, &layer->kept.shared));
    }
    QLORA__TRY(qlora__experts_all_rows(pass, &experts->router, &layer->kept.scores));
    qlora__route route = qlora__experts_choose(pass, layer);
    for (int64_t e = 0; e < m->plan.config.experts; e++) {
        int64_t first = route.starts[e];
        int64_t rows = route.starts[e + 1] - first;
        if (rows == 0) {
            continue;
        }
        qlora_linear_desc own = qlora__experts_linear(pass, &experts->linears[2 * e]);
        int64_t out = qlora_linear_out(&own);
        qlora_tensor from = qlora__local(pass, &m->work.x, 0, own.in);
        int64_t wide = own.in + qlora_linear_pad(&own);
        qlora_tensor x = qlora__window(&m->work.experts.x, rows, 0, wide);
        qlora_tensor inner = qlora__window(&x, rows, 0, own.in);
        qlora_tensor y = qlora__experts_some(&layer->kept.routed, first, rows, out);
        qlora__rows_gather(pass->ctx, &from, route.tokens + first, &inner);
        QLORA__TRY(qlora__experts_forward(pass, pass->math, &own, &x, &y));
    }
    return QLORA_OK;
}

// The gate of the shared MLP: a factor for every row of its activation.
static void qlora__shared_factors(const qlora__pass* pass, const qlora__layer* layer,
                                  QLORA__REAL* out) {
    const qlora_tensor* t = &layer->kept.shared;
    for (int64_t r = 0; r < pass->rows; r++) {
        double z = (double)((const QLORA__REAL*)t->data)[r * t->ld];
        out[r] = (QLORA__REAL)qlora__route_sigmoid(z);
    }
}

// Output of the MLP that all tokens use, or zero. Its factors have the memory of the weights, which
// the experts choose later.
static qlora_result qlora__shared_out(const qlora__pass* pass, qlora__layer* layer) {
    qlora_model* m = pass->m;
    const qlora_tensor* to = qlora__branch_out(m, layer, QLORA__MLP);
    qlora_tensor out = qlora__local(pass, to, 0, m->plan.config.hidden);
    if (layer->layout->groups[QLORA__DOWN].count == 0) {
        return qlora_fill(pass->ctx, 0.0f, &out);
    }
    if (layer->experts->shared_gate.count == 0) {
        return qlora__gated_out(pass, layer);
    }
    int64_t width = layer->linears[QLORA__DOWN].in;
    qlora_tensor gate = qlora__window(&layer->kept.gu, pass->rows, 0, width);
    qlora_tensor up = qlora__window(&layer->kept.gu, pass->rows, width, width);
    qlora_tensor s = qlora__window(&m->work.s, pass->rows, 0, width);
    QLORA__REAL* factors = (QLORA__REAL*)m->work.experts.weights.data;
    QLORA__TRY(qlora__gated_activation(pass, &gate, &up, &s));
    qlora__shared_factors(pass, layer, factors);
    qlora__rows_scale(pass->ctx, factors, &s);
    return qlora__stack_forward(pass, layer, QLORA__DOWN, &m->work.s, to);
}

// The activation of the rows of expert number `e`, times their weights, in m->work.experts.s.
static qlora_result qlora__expert_hidden(const qlora__pass* pass, qlora__layer* layer,
                                         const qlora__route* route, int64_t e,
                                         const qlora_tensor* s) {
    const qlora_model* m = pass->m;
    int64_t width = m->plan.config.expert_intermediate;
    int64_t first = route->starts[e];
    qlora_tensor gate = qlora__experts_some(&layer->kept.routed, first, s->rows, width);
    qlora_tensor up = gate;
    up.data = (QLORA__REAL*)gate.data + width;
    qlora_tensor inner = qlora__window(s, s->rows, 0, width);
    QLORA__TRY(qlora__gated_activation(pass, &gate, &up, &inner));
    qlora__rows_scale(pass->ctx, (const QLORA__REAL*)m->work.experts.sorted.data + first, &inner);
    return QLORA_OK;
}

// Gate and up -> the output of the branch.
static qlora_result qlora__host_experts_out(const qlora__pass* pass, qlora__layer* layer) {
    qlora_model* m = pass->m;
    QLORA__TRY(qlora__shared_out(pass, layer));
    qlora__route route = qlora__experts_choose(pass, layer);
    qlora_tensor sum =
        qlora__local(pass, qlora__branch_out(m, layer, QLORA__MLP), 0, m->plan.config.hidden);
    for (int64_t e = 0; e < m->plan.config.experts; e++) {
        int64_t first = route.starts[e];
        int64_t rows = route.starts[e + 1] - first;
        if (rows == 0) {
            continue;
        }
        qlora_linear_desc own = qlora__experts_linear(pass, &layer->experts->linears[2 * e + 1]);
        int64_t wide = own.in + qlora_linear_pad(&own);
        qlora_tensor s = qlora__window(&m->work.experts.s, rows, 0, wide);
        qlora_tensor y = qlora__window(&m->work.experts.y, rows, 0, m->plan.config.hidden);
        QLORA__TRY(qlora__expert_hidden(pass, layer, &route, e, &s));
        QLORA__TRY(qlora__experts_forward(pass, pass->math, &own, &s, &y));
        qlora__rows_spread_add(pass->ctx, &y, route.tokens + first, &sum);
    }
    return QLORA_OK;
}

// The backward pass of the MLP that all tokens use, down to its gate and up in kept.gu, and the
// gradient of what its own gate multiplies it by, which is kept in m->work.experts.d_gate.
static qlora_result qlora__shared_out_backward(const qlora__pass* pass, qlora__layer* layer) {
    qlora_model* m = pass->m;
    if (layer->layout->groups[QLORA__DOWN].count == 0) {
        return QLORA_OK;
    }
    if (layer->experts->shared_gate.count == 0) {
        return qlora__gated_out_backward(pass, layer);
    }
    qlora__stack stack;
    QLORA__TRY(qlora__stack_ready(pass, layer, QLORA__DOWN, true, &stack));
    int64_t width = stack.linear.in;
    qlora_tensor gate = qlora__local(pass, &layer->kept.gu, 0, width);
    qlora_tensor up = qlora__local(pass, &layer->kept.gu, width, width);
    qlora_tensor s = qlora__local(pass, &m->work.s, 0, width);
    qlora_tensor x = qlora__local(pass, &m->work.s, 0, width + stack.pad);
    qlora_tensor ds = qlora__local(pass, &m->work.ds, 0, width);
    qlora_tensor dy = qlora__layer_d_out(pass, stack.out + stack.pad);
    QLORA__REAL* factors = (QLORA__REAL*)m->work.experts.weights.data;
    QLORA__REAL* dots = (QLORA__REAL*)m->work.experts.dw.data;
    QLORA__TRY(qlora__gated_activation(pass, &gate, &up, &s));
    qlora__shared_factors(pass, layer, factors);
    qlora__rows_scale(pass->ctx, factors, &s);
    QLORA__TRY(qlora__stack_z(pass, &stack, QLORA__DOWN, &x));
    QLORA__TRY(qlora__stack_backward(pass, &stack, QLORA__DOWN, &x, &dy, &ds));
    QLORA__TRY(qlora__gated_activation_backward(pass, &ds, &gate, &up, &s));
    qlora__rows_dot(pass->ctx, &s, &ds, dots);
    qlora_tensor both = qlora__local(pass, &layer->kept.gu, 0, 2 * width);
    qlora__rows_scale(pass->ctx, factors, &both);
    for (int64_t r = 0; r < pass->rows; r++) {
        double g = (double)factors[r];
        const qlora_tensor* d = &m->work.experts.d_gate;
        ((QLORA__REAL*)d->data)[r * d->ld] = (QLORA__REAL)((double)dots[r] * g * (1.0 - g));
    }
    return QLORA_OK;
}

// The backward pass of down and the activation of one expert: dy has the gradients of its rows.
static qlora_result qlora__expert_out_backward(const qlora__pass* pass, qlora__layer* layer,
                                               const qlora__route* route, int64_t e) {
    qlora_model* m = pass->m;
    const qlora__routed_work* w = &m->work.experts;
    int64_t width = m->plan.config.expert_intermediate;
    int64_t first = route->starts[e];
    int64_t rows = route->starts[e + 1] - first;
    qlora_linear_desc own = qlora__experts_linear(pass, &layer->experts->linears[2 * e + 1]);
    int64_t pad = qlora_linear_pad(&own);
    qlora_tensor from = qlora__layer_d_out(pass, m->plan.config.hidden);
    qlora_tensor dy = qlora__window(&w->x, rows, 0, m->plan.config.hidden + pad);
    qlora_tensor inner = qlora__window(&dy, rows, 0, m->plan.config.hidden);
    qlora_tensor x = qlora__window(&w->s, rows, 0, width + pad);
    qlora_tensor s = qlora__window(&w->s, rows, 0, width);
    qlora_tensor ds = qlora__window(&w->ds, rows, 0, width);
    qlora_tensor gate = qlora__experts_some(&layer->kept.routed, first, rows, width);
    qlora_tensor up = gate;
    up.data = (QLORA__REAL*)gate.data + width;
    qlora_tensor both = gate;
    both.cols = 2 * width;
    const QLORA__REAL* weights = (const QLORA__REAL*)w->sorted.data + first;
    qlora__rows_gather(pass->ctx, &from, route->tokens + first, &inner);
    QLORA__TRY(qlora__expert_hidden(pass, layer, route, e, &x));
    QLORA__TRY(qlora__experts_backward(pass, pass->math, &own, &x, &dy, &ds));
    QLORA__TRY(qlora__gated_activation_backward(pass, &ds, &gate, &up, &s));
    qlora__rows_dot(pass->ctx, &s, &ds, (QLORA__REAL*)w->dw.data + first);
    qlora__rows_scale(pass->ctx, weights, &both);
    return QLORA_OK;
}

// The gradient of the output of the branch -> those of gate and up, in their places, and of the
// scores, in m->work.experts.dz.
static qlora_result qlora__host_experts_out_backward(const qlora__pass* pass, qlora__layer* layer) {
    qlora_model* m = pass->m;
    const qlora_model_config* c = &m->plan.config;
    QLORA__TRY(qlora__shared_out_backward(pass, layer));
    qlora__route route = qlora__experts_choose(pass, layer);
    for (int64_t e = 0; e < c->experts; e++) {
        if (route.starts[e + 1] > route.starts[e]) {
            QLORA__TRY(qlora__expert_out_backward(pass, layer, &route, e));
        }
    }
    qlora_tensor dz = qlora__window(&m->work.experts.dz, pass->rows, 0, c->experts);
    qlora__route_backward(pass->ctx, &route, (const QLORA__REAL*)m->work.experts.dw.data, &dz);
    return QLORA_OK;
}

// Backward pass of a linear that reads all rows of m->work.x.
static qlora_result qlora__experts_all_backward(const qlora__pass* pass,
                                                const qlora_linear_desc* linear,
                                                const qlora_tensor* dy, const qlora_tensor* dx) {
    const qlora_model* m = pass->m;
    qlora_linear_desc own = qlora__experts_linear(pass, linear);
    int64_t pad = qlora_linear_pad(&own);
    qlora_tensor from = qlora__local(pass, &m->work.x, 0, own.in);
    qlora_tensor x = qlora__window(&m->work.experts.x, pass->rows, 0, own.in + pad);
    qlora_tensor inner = qlora__window(&x, pass->rows, 0, own.in);
    qlora_tensor d = qlora__window(dy, pass->rows, 0, qlora_linear_out(&own) + pad);
    if (pad > 0) {
        QLORA__TRY(qlora_scale(pass->ctx, 1.0f, &from, &inner));
    }
    return qlora__experts_backward(pass, m->math, &own, &x, &d, dx);
}

// The gradient of the input of all experts in `dx`. inputs: the input itself.
static qlora_result qlora__host_experts_dx(const qlora__pass* pass, qlora__layer* layer,
                                           const qlora_tensor* inputs, const qlora_tensor* dx) {
    qlora_model* m = pass->m;
    const qlora__routed_work* w = &m->work.experts;
    int64_t width = m->plan.config.hidden;
    QLORA__TRY(qlora_fill(pass->ctx, 0.0f, dx));
    qlora__route route = qlora__experts_choose(pass, layer);
    for (int64_t e = 0; e < m->plan.config.experts; e++) {
        int64_t first = route.starts[e];
        int64_t rows = route.starts[e + 1] - first;
        if (rows == 0) {
            continue;
        }
        qlora_linear_desc own = qlora__experts_linear(pass, &layer->experts->linears[2 * e]);
        int64_t pad = qlora_linear_pad(&own);
        qlora_tensor x = qlora__window(&w->x, rows, 0, width + pad);
        qlora_tensor inner = qlora__window(&x, rows, 0, width);
        qlora_tensor y = qlora__window(&w->y, rows, 0, width);
        qlora_tensor dy =
            qlora__experts_some(&layer->kept.routed, first, rows, qlora_linear_out(&own) + pad);
        qlora__rows_gather(pass->ctx, inputs, route.tokens + first, &inner);
        QLORA__TRY(qlora__experts_backward(pass, pass->math, &own, &x, &dy, &y));
        qlora__rows_spread_add(pass->ctx, &y, route.tokens + first, dx);
    }
    return QLORA_OK;
}
