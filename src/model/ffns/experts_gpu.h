// ---- experts on a GPU ---------------------------------------------------------------------------
//
// As experts.h, for all experts at once: the rows of a pass are gathered in the order of their
// experts, and each product is one launch (ops/grouped.h). The device alone knows how many rows an
// expert has, so nothing waits for it.

#ifndef QLORA_NO_CUDA

// All experts' linears into or out of their activation. W, s B and A are placed as for a stack
// (ops/linear.h); gate and up of an expert are one linear, as they have one adapter.
typedef struct qlora__expert_stack {
    qlora__groups groups;
    const qlora_linear_part* part; // of the first expert
    qlora_tensor operand;          // [qlora__expert_height, in + pad], a batch
    int64_t in;
    int64_t out;
    int64_t rank;
    int64_t pad;
} qlora__expert_stack;

static int64_t qlora__expert_rank(const qlora_model* m, const qlora_linear_desc* linear) {
    return m->use_adapters ? linear->parts[0].rank : 0;
}

// A view of the operands, without the first rows and columns.
static qlora_tensor qlora__expert_operand_at(const qlora__expert_stack* s, int64_t row, int64_t col,
                                             int64_t rows, int64_t cols) {
    qlora_tensor t = s->operand;
    t.data = (char*)t.data + (size_t)(row * t.ld + col) * qlora_dtype_bytes(t.dtype);
    t.rows = rows;
    t.cols = cols;
    return t;
}

// Whether the operands into the activation are those of a layer already, as they are after it was
// recomputed; if not, they are about to be. Only experts that have rows are placed, which depends
// on the tile.
static bool qlora__experts_claim(const qlora__pass* pass, const qlora__layer* layer, int which) {
    int64_t at = pass->row * pass->m->plan.config.layers + (layer - pass->m->layers);
    int64_t key = 1 + 2 * at + (pass->m->use_adapters ? 1 : 0);
    bool there = which == 0 && pass->flow->placed_experts == key;
    pass->flow->placed_experts = which == 0 ? key : pass->flow->placed_experts;
    return there;
}

// Sets up the linear number `which` of a layer's experts, 0 or 1, and places its operands.
static qlora_result qlora__expert_stack_ready(const qlora__pass* pass, const qlora__layer* layer,
                                              const qlora__route* route, int which,
                                              qlora__expert_stack* out) {
    qlora_model* m = pass->m;
    const qlora__routed_work* w = &m->work.experts;
    int64_t experts = m->plan.config.experts;
    const qlora_linear_desc* first = &layer->experts->linears[which];
    const qlora_linear_desc* second = experts > 1 ? first + 2 : first;
    out->groups.starts = route->starts;
    out->groups.tiles = (const int32_t*)w->tiles.data;
    out->groups.experts = experts;
    out->groups.rows = route->rows * route->rule.chosen;
    out->part = &first->parts[0];
    out->in = first->in;
    out->out = qlora_linear_out(first);
    out->rank = qlora__expert_rank(m, first);
    out->pad = (out->rank + 7) / 8 * 8;
    out->operand = w->operands[which];
    out->operand.rows = qlora__expert_height(out->out + out->pad);
    out->operand.cols = out->in + out->pad;
    out->operand.ld = out->operand.cols;
    out->operand.batch = experts;
    out->operand.batch_stride = out->operand.rows * out->operand.ld;
    const qlora__expert_place place = {first, second, out->rank};
    return qlora__experts_claim(pass, layer, which)
               ? QLORA_OK
               : qlora__experts_place(pass->ctx, &out->groups, &place, &out->operand);
}

// z = x A^T, into the columns of x after its own.
static qlora_result qlora__expert_z(const qlora__pass* pass, const qlora__expert_stack* s,
                                    const qlora_tensor* x) {
    qlora_tensor inner = qlora__window(x, x->rows, 0, s->in);
    qlora_tensor z = qlora__window(x, x->rows, s->in, s->pad);
    qlora_tensor a = qlora__expert_operand_at(s, s->out, 0, s->pad, s->in);
    return qlora__grouped_rows(pass->ctx, &s->groups, true, &inner, &a, &z);
}

// y = x W^T + z (s B)^T; x has columns for z.
static qlora_result qlora__expert_forward(const qlora__pass* pass, const qlora__expert_stack* s,
                                          const qlora_tensor* x, const qlora_tensor* y) {
    qlora_tensor in = qlora__window(x, x->rows, 0, s->in + s->pad);
    qlora_tensor upper = qlora__expert_operand_at(s, 0, 0, s->out, s->operand.cols);
    QLORA__TRY(qlora__expert_z(pass, s, x));
    return qlora__grouped_rows(pass->ctx, &s->groups, true, &in, &upper, y);
}

// u = dy s B, into the columns of dy after its own.
static qlora_result qlora__expert_u(const qlora__pass* pass, const qlora__expert_stack* s,
                                    const qlora_tensor* dy) {
    qlora_tensor inner = qlora__window(dy, dy->rows, 0, s->out);
    qlora_tensor u = qlora__window(dy, dy->rows, s->out, s->pad);
    qlora_tensor sb = qlora__expert_operand_at(s, 0, s->in, s->out, s->pad);
    return qlora__grouped_rows(pass->ctx, &s->groups, false, &inner, &sb, &u);
}

// dx = dy W + u A
static qlora_result qlora__expert_dx(const qlora__pass* pass, const qlora__expert_stack* s,
                                     const qlora_tensor* dy, const qlora_tensor* dx) {
    qlora_tensor both = qlora__window(dy, dy->rows, 0, s->out + s->pad);
    qlora_tensor below = qlora__expert_operand_at(s, 0, 0, s->out + s->pad, s->in);
    return qlora__grouped_rows(pass->ctx, &s->groups, false, &both, &below, dx);
}

// dA += u^T x and dB += s dy^T z; u is in the columns of dy after its own. list: the rows of x that
// the sorted ones are, or NULL. A and B of the experts follow each other.
static qlora_result qlora__expert_gradients(const qlora__pass* pass, const qlora__expert_stack* s,
                                            const qlora_tensor* x, const int32_t* list,
                                            const qlora_tensor* z, const qlora_tensor* dy) {
    if (s->rank == 0) {
        return QLORA_OK;
    }
    qlora_tensor x_inner = qlora__window(x, x->rows, 0, s->in);
    qlora_tensor dy_inner = qlora__window(dy, dy->rows, 0, s->out);
    qlora_tensor own = qlora__window(z, z->rows, 0, s->rank);
    qlora_tensor u = qlora__window(dy, dy->rows, s->out, s->rank);
    qlora_tensor da = *s->part->da;
    qlora_tensor db = *s->part->db;
    da.batch_stride = s->rank * s->in;
    db.rows = s->out; // that of up follows that of gate
    db.batch_stride = s->out * s->rank;
    QLORA__TRY(qlora__grouped_sums(pass->ctx, &s->groups, 1.0f, list, &u, &x_inner, &da));
    return qlora__grouped_sums(pass->ctx, &s->groups, s->part->scale, NULL, &dy_inner, &own, &db);
}

// ---- routing ------------------------------------------------------------------------------------

static qlora_result qlora__device_choose(const qlora__pass* pass, const qlora__layer* layer,
                                         qlora__route* route) {
    const qlora__routed_work* w = &pass->m->work.experts;
    *route = qlora__experts_route(pass, layer);
    qlora__routing own = {(float*)w->weights.data, (float*)w->sorted.data, (int32_t*)w->counts.data,
                          (int32_t*)w->tiles.data};
    return qlora__routing_choose(pass->ctx, route, &own);
}

// Adds what the adapter of the router has to the scores.
static qlora_result qlora__device_scores_add(const qlora__pass* pass, const qlora_linear_desc* own,
                                             const qlora_tensor* scores) {
    const qlora_model* m = pass->m;
    int64_t pad = qlora_linear_pad(own);
    qlora_tensor from = qlora__local(pass, &m->work.x, 0, own->in);
    qlora_tensor x = qlora__window(&m->work.experts.x, pass->rows, 0, own->in + pad);
    qlora_tensor inner = qlora__window(&x, pass->rows, 0, own->in);
    qlora_tensor z = qlora__window(&x, pass->rows, own->in, own->parts[0].rank);
    QLORA__TRY(qlora_scale(pass->ctx, 1.0f, &from, &inner));
    QLORA__ENTER(pass->ctx, "qlora_linear_forward"); // frees the scratch on return
    qlora_result r = qlora__linear_z(pass->ctx, m->math, own, &x, &inner);
    if (r == QLORA_OK) {
        r = qlora__linear_gemm(pass->ctx, m->math, QLORA__LINEAR_FORWARD, 1.0f, 1.0f, &z,
                               own->parts[0].sb, scores);
    }
    return qlora__leave(pass->ctx, r);
}

// The scores, in f32. A router with codes has them in the type of x first.
static qlora_result qlora__device_scores(const qlora__pass* pass, const qlora__layer* layer) {
    const qlora_model* m = pass->m;
    qlora_linear_desc own = qlora__experts_linear(pass, &layer->experts->router);
    qlora_tensor scores = qlora__window(&layer->kept.scores, pass->rows, 0, m->plan.config.experts);
    if (own.parts[0].dense == NULL) {
        qlora_tensor narrow = qlora__window(&m->work.experts.dz, pass->rows, 0, scores.cols);
        QLORA__TRY(qlora__experts_all_rows(pass, &own, &narrow));
        return qlora__cast(pass->ctx, &narrow, &scores);
    }
    qlora_tensor x = qlora__local(pass, &m->work.x, 0, own.in);
    QLORA__TRY(qlora__linear_gemm(pass->ctx, m->math, QLORA__LINEAR_FORWARD, 1.0f, 0.0f, &x,
                                  own.parts[0].dense, &scores));
    return own.parts[0].rank > 0 ? qlora__device_scores_add(pass, &own, &scores) : QLORA_OK;
}

// ---- forward ------------------------------------------------------------------------------------

static qlora_result qlora__device_experts_in(const qlora__pass* pass, qlora__layer* layer) {
    qlora_model* m = pass->m;
    const qlora__experts* experts = layer->experts;
    if (layer->layout->groups[QLORA__GATE_UP].count > 0) {
        QLORA__TRY(qlora__gated_in(pass, layer));
    }
    if (experts->shared_gate.count > 0) {
        QLORA__TRY(qlora__experts_all_rows(pass, &experts->shared_gate, &layer->kept.shared));
    }
    QLORA__TRY(qlora__device_scores(pass, layer));
    qlora__route route;
    qlora__expert_stack stack;
    QLORA__TRY(qlora__device_choose(pass, layer, &route));
    QLORA__TRY(qlora__expert_stack_ready(pass, layer, &route, 0, &stack));
    qlora_tensor from = qlora__local(pass, &m->work.x, 0, stack.in);
    qlora_tensor x = qlora__window(&m->work.experts.x, stack.groups.rows, 0, stack.in + stack.pad);
    qlora_tensor inner = qlora__window(&x, x.rows, 0, stack.in);
    qlora_tensor y = qlora__window(&layer->kept.routed, x.rows, 0, stack.out);
    QLORA__TRY(qlora__routed_gather(pass->ctx, &from, route.tokens, &inner));
    QLORA__TRY(qlora__expert_forward(pass, &stack, &x, &y));
    if (stack.rank == 0 || !pass->training) {
        return QLORA_OK;
    }
    qlora_tensor z = qlora__window(&x, x.rows, stack.in, stack.pad);
    qlora_tensor kept = qlora__window(&layer->kept.routed_z, x.rows, 0, stack.pad);
    return qlora__copy_narrow(pass->ctx, &z, &kept);
}

// What the weighted activation of the MLP that all tokens use reads and writes.
static qlora__routed_rows qlora__shared_rows(const qlora__pass* pass, const qlora_tensor* gate,
                                             const qlora_tensor* up, const qlora_tensor* s) {
    const qlora__routed_work* w = &pass->m->work.experts;
    qlora__routed_rows rows;
    rows.gate = gate;
    rows.up = up;
    rows.s = s;
    rows.factors = (const float*)w->weights.data; // the sorted ones are what the experts use
    rows.dots = (float*)w->dw.data;
    rows.gelu = (pass->m->arch->has & QLORA__HAS_GELU) != 0;
    return rows;
}

static qlora_result qlora__device_shared_out(const qlora__pass* pass, qlora__layer* layer) {
    qlora_model* m = pass->m;
    if (layer->experts->shared_gate.count == 0) {
        return qlora__gated_out(pass, layer);
    }
    int64_t width = layer->linears[QLORA__DOWN].in;
    qlora_tensor gate = qlora__local(pass, &layer->kept.gu, 0, width);
    qlora_tensor up = qlora__local(pass, &layer->kept.gu, width, width);
    qlora_tensor s = qlora__local(pass, &m->work.s, 0, width);
    qlora_tensor z = qlora__window(&layer->kept.shared, pass->rows, 0, 1);
    qlora__routed_rows rows = qlora__shared_rows(pass, &gate, &up, &s);
    QLORA__TRY(qlora__beside_wait(pass->ctx, 1u << QLORA__DOWN)); // z of the layer before, in s
    QLORA__TRY(qlora__routed_factors(pass->ctx, &z, (float*)m->work.experts.weights.data));
    QLORA__TRY(qlora__routed_gated(pass->ctx, &rows));
    QLORA__TRY(qlora__stack_forward(pass, layer, QLORA__DOWN, &m->work.s,
                                    qlora__branch_out(m, layer, QLORA__MLP)));
    return qlora__stack_keep_z(pass, layer, QLORA__DOWN, &m->work.s);
}

// After qlora__device_experts_in, whose choice is still there.
static qlora_result qlora__device_experts_out(const qlora__pass* pass, qlora__layer* layer) {
    qlora_model* m = pass->m;
    bool shared = layer->layout->groups[QLORA__DOWN].count > 0;
    qlora__route route = qlora__experts_route(pass, layer);
    qlora__expert_stack stack;
    if (shared) {
        QLORA__TRY(qlora__device_shared_out(pass, layer));
    }
    QLORA__TRY(qlora__expert_stack_ready(pass, layer, &route, 1, &stack));
    int64_t rows = stack.groups.rows;
    qlora_tensor gate = qlora__window(&layer->kept.routed, rows, 0, stack.in);
    qlora_tensor up = qlora__window(&layer->kept.routed, rows, stack.in, stack.in);
    qlora_tensor s = qlora__window(&m->work.experts.s, rows, 0, stack.in);
    qlora_tensor y = qlora__window(&m->work.experts.x, rows, 0, stack.out);
    qlora_tensor sum = qlora__local(pass, qlora__branch_out(m, layer, QLORA__MLP), 0, stack.out);
    qlora__routed_rows job = qlora__shared_rows(pass, &gate, &up, &s);
    job.factors = (const float*)m->work.experts.sorted.data;
    QLORA__TRY(qlora__routed_gated(pass->ctx, &job));
    QLORA__TRY(qlora__expert_forward(pass, &stack, &m->work.experts.s, &y));
    return qlora__routed_sum(pass->ctx, &route, &y, &sum, shared);
}

// ---- backward -----------------------------------------------------------------------------------

// As qlora__shared_out_backward.
static qlora_result qlora__device_shared_out_backward(const qlora__pass* pass,
                                                      qlora__layer* layer) {
    qlora_model* m = pass->m;
    const qlora__routed_work* w = &m->work.experts;
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
    qlora_tensor z = qlora__window(&layer->kept.shared, pass->rows, 0, 1);
    qlora_tensor dz = qlora__window(&w->d_gate, pass->rows, 0, 1);
    float* factors = (float*)w->weights.data;
    qlora__routed_rows rows = qlora__shared_rows(pass, &gate, &up, &s);
    QLORA__TRY(qlora__beside_wait(pass->ctx, ~0u));
    QLORA__TRY(qlora__routed_factors(pass->ctx, &z, factors));
    QLORA__TRY(qlora__routed_gated(pass->ctx, &rows));
    QLORA__TRY(qlora__stack_z(pass, &stack, QLORA__DOWN, &x));
    QLORA__TRY(qlora__stack_backward(pass, &stack, QLORA__DOWN, &x, &dy, &ds));
    rows.s = &ds;
    QLORA__TRY(qlora__routed_gated_backward(pass->ctx, &rows));
    return qlora__routed_factors_backward(pass->ctx, rows.dots, factors, &dz);
}

static qlora_result qlora__device_experts_out_backward(const qlora__pass* pass,
                                                       qlora__layer* layer) {
    qlora_model* m = pass->m;
    const qlora__routed_work* w = &m->work.experts;
    if (layer->layout->groups[QLORA__DOWN].count > 0) {
        QLORA__TRY(qlora__device_shared_out_backward(pass, layer));
    }
    qlora__route route;
    qlora__expert_stack stack;
    QLORA__TRY(qlora__device_choose(pass, layer, &route));
    QLORA__TRY(qlora__expert_stack_ready(pass, layer, &route, 1, &stack));
    int64_t rows = stack.groups.rows;
    qlora_tensor from = qlora__layer_d_out(pass, stack.out);
    qlora_tensor dy = qlora__window(&w->x, rows, 0, stack.out);
    qlora_tensor gate = qlora__window(&layer->kept.routed, rows, 0, stack.in);
    qlora_tensor up = qlora__window(&layer->kept.routed, rows, stack.in, stack.in);
    qlora_tensor s = qlora__window(&w->s, rows, 0, stack.in);
    qlora_tensor dz = qlora__window(&w->dz, pass->rows, 0, m->plan.config.experts);
    qlora__routed_rows job = qlora__shared_rows(pass, &gate, &up, &s);
    job.factors = (const float*)w->sorted.data;
    QLORA__TRY(qlora__routed_gather(pass->ctx, &from, route.tokens, &dy));
    QLORA__TRY(qlora__expert_u(pass, &stack, &dy));
    QLORA__TRY(qlora__expert_dx(pass, &stack, &dy, &s));
    QLORA__TRY(qlora__routed_gated_backward(pass->ctx, &job));
    if (stack.rank > 0) {
        qlora_tensor z = qlora__window(&w->s, rows, stack.in, stack.pad);
        QLORA__TRY(qlora__expert_z(pass, &stack, &s));
        QLORA__TRY(qlora__expert_gradients(pass, &stack, &s, NULL, &z, &dy));
    }
    return qlora__routing_backward(pass->ctx, &route, w->dw.data, &dz);
}

// After qlora__device_experts_out_backward, whose choice is still there: the gradient of the input
// of all experts, and of the router, in `dx`. inputs: the input itself.
static qlora_result qlora__device_experts_dx(const qlora__pass* pass, qlora__layer* layer,
                                             const qlora_tensor* inputs, const qlora_tensor* dx) {
    qlora_model* m = pass->m;
    const qlora__routed_work* w = &m->work.experts;
    qlora__route route = qlora__experts_route(pass, layer);
    qlora__expert_stack stack;
    QLORA__TRY(qlora__expert_stack_ready(pass, layer, &route, 0, &stack));
    int64_t rows = stack.groups.rows;
    qlora_tensor x = qlora__window(&w->x, rows, 0, stack.in);
    qlora_tensor dy = qlora__window(&layer->kept.routed, rows, 0, stack.out);
    if (stack.rank > 0) {
        qlora_tensor u = qlora__window(&dy, rows, stack.out, stack.rank);
        bool listed = qlora__grouped_takes_list(pass->ctx, &u, inputs);
        qlora_tensor z = qlora__window(&layer->kept.routed_z, rows, 0, stack.pad);
        if (!listed) {
            QLORA__TRY(qlora__routed_gather(pass->ctx, inputs, route.tokens, &x));
        }
        QLORA__TRY(qlora__expert_u(pass, &stack, &dy));
        QLORA__TRY(qlora__expert_gradients(pass, &stack, listed ? inputs : &x,
                                           listed ? route.tokens : NULL, &z, &dy));
    }
    QLORA__TRY(qlora__expert_dx(pass, &stack, &dy, &x)); // the gradient of x in its place
    return qlora__routed_sum(pass->ctx, &route, &x, dx, false);
}

#endif // QLORA_NO_CUDA
