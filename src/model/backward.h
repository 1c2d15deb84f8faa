// ---- backward -----------------------------------------------------------------------------------
//
// The gradient of the residual stream passes through the layers on the main stream. The gradients
// of the adapters (their inputs normalised again, z, dA, dB) do not affect it, so they run in
// parallel, on the second stream; the work of stack g uses slot g. A buffer that the second stream
// reads must not be overwritten before it has been read:
//
//   buffer                    read for               overwritten by
//   d_out and last columns    down and o             the next norm; if it is not dh itself, the
//                                                    gradient of the next output
//   dqkv                      qkv                    the attention of the next layer
//   output of attention       o                      recomputation of a layer; that of labelled
//                                                    rows (qlora__labelled_o), their way back
//   s                         down                   d_o, and ds of the next layer, after that norm
//   x                         written there as well  recomputation; with DoRA, the next stack
//   gradients of gate and up  gate_up                recomputation of a layer
//   parts of sums             dA of down, dB of      the activation of the next layer, after that
//                             gate and up            norm
//   rstd                      dA of qkv, gate_up     the norm of the next layer
//   the shared operand        z that was not kept    placing other weights: qlora__operand_wait
//   last columns of x and s   keeping z, forward     the next norm; z of the next layer; the head
//
// The main stream uses some memory for one thing after another (qlora__layout_x and _turns):
//
//   x, while the head begins | gradients of its rows, until dh is there | x
//   rows and logits of the head | s for the MLP, d_o for attention, operand, delta, dh and others

// Recomputes the activations after attention: everything except down_proj, unless the backward pass
// of a norm needs its output.
static qlora_result qlora__layer_again_mlp(const qlora__pass* pass, qlora__layer* layer) {
    QLORA__TRY(qlora__layer_middle(pass, layer));
    if (!qlora__has_norm(pass->m, QLORA__NORM_MLP_OUT)) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__layer_down(pass, layer));
    return qlora__beside_wait(pass->ctx, 1u << QLORA__DOWN); // z in s
}

// Recomputes the activations that a layer did not keep; with tiles, only up to attention. The
// attention of a long sequence takes as long as all products of its layer, and its output is as
// small as the layer's input, so that is kept first where there is memory. after: the pass after
// attention.
static qlora_result qlora__layer_again(const qlora__pass* pass, const qlora__pass* after,
                                       qlora__layer* layer) {
    QLORA__TRY(qlora__beside_wait(pass->ctx, ~0u));
    if (!layer->keeps_heads) {
        QLORA__TRY(qlora__layer_heads(pass, layer, true));
    }
    if (!layer->keeps_attention) {
        QLORA__TRY(qlora__layer_attention(pass, layer));
    }
    return pass->m->plan.tile > 0 ? QLORA_OK : qlora__layer_again_mlp(after, layer);
}

// Computes z again, into the last columns of x, for the gradient of B, unless it was kept.
static qlora_result qlora__stack_z(const qlora__pass* pass, const qlora__stack* stack, int group,
                                   const qlora_tensor* x) {
    if (stack->pad == 0 || stack->z.cols > 0) {
        return QLORA_OK;
    }
    const qlora__layer* layer = &pass->m->layers[stack->linear.layer];
    qlora_tensor inner = qlora__window(x, pass->rows, 0, stack->linear.in);
    if (group == QLORA__DOWN && qlora__z_comes(pass, layer)) {
        return qlora__layer_tail(pass, layer, NULL, NULL, &inner);
    }
    pass->m->readers |= 1u << group;
    return qlora__linear_z(pass->ctx, pass->math, &stack->linear, x, &inner);
}

// Which gradients of a stack are left if the activation comes with the others.
static unsigned qlora__gradients_left(const qlora__pass* pass, const qlora__layer* layer,
                                      int group) {
    bool gated = (group == QLORA__GATE_UP || group == QLORA__DOWN) &&
                 qlora__gated_ranks(pass->m, layer, NULL);
    return !gated                   ? QLORA__GRADIENT_A | QLORA__GRADIENT_B
           : group == QLORA__GATE_UP ? QLORA__GRADIENT_A
                                     : QLORA__GRADIENT_B;
}

// Computes dA and dB of a stack from u, and first z if wants_z. None of this needs scratch.
static qlora_result qlora__stack_gradients(const qlora__pass* pass, const qlora__stack* stack,
                                           int group, const qlora_tensor* x, const qlora_tensor* dy,
                                           bool wants_z) {
    qlora_ctx* ctx = pass->ctx;
    if (stack->pad == 0) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__beside_begin(ctx));
    const qlora__layer* layer = &pass->m->layers[stack->linear.layer];
    qlora_result r = wants_z ? qlora__stack_z(pass, stack, group, x) : QLORA_OK;
    if (r == QLORA_OK) {
        r = qlora__linear_gradients(ctx, pass->math, &stack->linear, x,
                                    stack->z.cols > 0 ? &stack->z : NULL, dy, NULL,
                                    stack->linear.owners != NULL ? 0.0f : 1.0f,
                                    qlora__gradients_left(pass, layer, group),
                                    &pass->m->skinny_parts);
    }
    if (r == QLORA_OK && stack->linear.owners != NULL) { // to each adapter its own
        const qlora__wide_layer* wide = &pass->m->wide[stack->linear.layer];
        r = qlora__collect(ctx, &wide->shares[group], wide->share_count[group], wide->most[group],
                           &pass->m->batch.states);
    }
    return qlora__beside_end(ctx, group, r);
}

// Computes all gradients of a stack with dropout, whose masks need scratch.
static qlora_result qlora__stack_backward_masked(const qlora__pass* pass, const qlora__stack* stack,
                                                 const qlora_tensor* x, const qlora_tensor* dy,
                                                 const qlora_tensor* dx) {
    QLORA__ENTER(pass->ctx, "qlora_linear_backward");
    return qlora__leave(
        pass->ctx, qlora__linear_backward(pass->ctx, pass->math, &stack->linear, x, dy, dx, 0));
}

// Whether u of gate and up comes with the codes of their gradients for FP8 products, whose largest
// magnitudes the activation found: see ops/fp8_tails.h. The sums of the pieces are in the memory of
// ds, which the activation has read.
static bool qlora__u_is_coded(const qlora_model* m, const qlora__layer* layer) {
    const qlora_linear_desc* l = &layer->linears[QLORA__GATE_UP];
    int64_t part = qlora_linear_out(l) / l->count;
    int64_t room = qlora__fp8_u_room(qlora__tile_rows(m), part, l->count);
    return qlora__is_fp8(m) && qlora__gated_ranks(m, layer, NULL) &&
           layer->pads[QLORA__GATE_UP] > 0 && (uint64_t)room * sizeof(float) <= m->ds.bytes;
}

// Computes u of a stack in the last columns of dy, unless it came with the activation. *coded:
// whether the codes of dy are there then.
static qlora_result qlora__stack_u(const qlora__pass* pass, const qlora__stack* stack, int group,
                                   const qlora_tensor* dy, const qlora_tensor* inner, bool* coded) {
    const qlora_model* m = pass->m;
    const qlora__layer* layer = &m->layers[stack->linear.layer];
    const qlora_linear_desc* l = &stack->linear;
    qlora_tensor a;
    qlora_tensor sb;
    *coded = stack->coded;
    if (group == QLORA__GATE_UP && qlora__u_is_coded(m, layer) &&
        qlora__linear_joined(l, stack->pad, &a, &sb)) {
        *coded = true;
        int64_t ranks[2] = {l->parts[0].rank, l->parts[l->count - 1].rank};
        qlora_tensor u = qlora__window(dy, pass->rows, stack->out, stack->pad);
        return qlora__fp8_u(pass->ctx, l->fp8, inner, &sb, ranks, l->count, &u, m->ds.data);
    }
    bool there = group == QLORA__GATE_UP && qlora__u_comes(pass, layer);
    return stack->pad > 0 && !there ? qlora__linear_u(pass->ctx, pass->math, l, dy, inner)
                                    : QLORA_OK;
}

// dy (with space for u) and x (with z) -> dx (may be NULL), dA and dB. With dropout, the adapters
// are added to dx one by one, which needs scratch.
static qlora_result qlora__stack_backward(const qlora__pass* pass, const qlora__stack* stack,
                                          int group, const qlora_tensor* x, const qlora_tensor* dy,
                                          const qlora_tensor* dx) {
    qlora_ctx* ctx = pass->ctx;
    if (stack->linear.dropout > 0.0f) {
        return qlora__stack_backward_masked(pass, stack, x, dy, dx);
    }
    qlora_tensor inner = qlora__window(dy, pass->rows, 0, stack->out);
    if (qlora__on_cpu(ctx)) { // both at once
        QLORA__TRY(qlora__linear_u_dx(ctx, pass->math, &stack->linear, dy, &inner, false, dx));
        return qlora__stack_gradients(pass, stack, group, x, dy, false);
    }
    bool coded = false;
    QLORA__TRY(qlora__stack_u(pass, stack, group, dy, &inner, &coded));
    QLORA__TRY(qlora__stack_gradients(pass, stack, group, x, dy, false));
    return dx != NULL ? qlora__linear_dx(ctx, pass->math, &stack->linear, dy, &inner, coded, dx)
                      : QLORA_OK;
}

// The part of a stack's backward pass that belongs to DoRA: the gradients of the magnitudes, which
// need the output before the gains once more, and then the gains on dy. Writes z into the last
// columns of x.
static qlora_result qlora__stack_gains_backward(const qlora__pass* pass, qlora__layer* layer,
                                                int group, const qlora__stack* stack,
                                                const qlora_tensor* x, const qlora_tensor* dy) {
    qlora_ctx* ctx = pass->ctx;
    qlora_model* m = pass->m;
    qlora_tensor raw = qlora__window(&m->raw, pass->rows, 0, stack->out);
    qlora_tensor inner = qlora__window(dy, pass->rows, 0, stack->out);
    QLORA__ENTER(ctx, "qlora_linear_forward"); // frees the scratch on return
    QLORA__TRY(qlora__leave(
        ctx, qlora__linear_forward(ctx, pass->math, &stack->linear, 0u, x, &raw)));
    int64_t at = 0;
    for (int i = 0; i < layer->layout->groups[group].count; i++) {
        qlora__projection* p = &layer->projections[layer->layout->groups[group].first + i];
        qlora_tensor a = qlora__window(&inner, pass->rows, at, p->out);
        qlora_tensor b = qlora__window(&raw, pass->rows, at, p->out);
        qlora_tensor inverse;
        qlora__arena_window(&layer->inverses[group], at, 1, p->out, &inverse);
        if (qlora__is_dora(m, p)) {
            QLORA__TRY(qlora__dot_columns(ctx, &a, &b, &inverse, &p->dm));
        }
        at += p->out;
    }
    return qlora__scale_columns(ctx, &layer->gains[group], &inner);
}

// The first columns of the gradient of the output of attention or MLP, which is that of the
// residual stream unless something comes between.
static qlora_tensor qlora__layer_d_out(const qlora__pass* pass, int64_t cols) {
    const qlora_model* m = pass->m;
    return qlora__has_own_d_out(m) ? qlora__local(pass, &m->d_out, 0, cols)
                                   : qlora__slice(pass, &m->d_out, 0, cols);
}

// The gradient of the output of attention (0) or MLP (1) in m->d_out, from that of the residual
// stream: through the factor or the norm that comes between.
static qlora_result qlora__layer_out_backward(const qlora__pass* pass, qlora__layer* layer,
                                              int part) {
    qlora_model* m = pass->m;
    const qlora_model_config* c = &m->plan.config;
    int norm = part == 0 ? QLORA__NORM_ATTENTION_OUT : QLORA__NORM_MLP_OUT;
    const qlora_tensor* after = qlora__layer_norm(m, layer, norm);
    qlora_tensor dh = qlora__slice(pass, &m->dh, 0, c->hidden);
    qlora_tensor d_out = qlora__layer_d_out(pass, c->hidden);
    if (after != NULL) {
        qlora_tensor out = qlora__window(&layer->kept.out[part], pass->rows, 0, c->hidden);
        return qlora_rmsnorm_backward(pass->ctx, &dh, &out, after, (float)c->rms_eps, NULL, &d_out,
                                      m->desc.train_norms ? &layer->d_norms[norm] : NULL);
    }
    return qlora__has_own_d_out(m) ? qlora_scale(pass->ctx, (float)c->residual_scale, &dh, &d_out)
                                   : QLORA_OK;
}

static qlora_result qlora__layer_gated_backward(const qlora__pass* pass, const qlora_tensor* ds,
                                                const qlora_tensor* gate, const qlora_tensor* up,
                                                const qlora_tensor* s) {
    return (pass->m->arch->has & QLORA__HAS_GELU) != 0
               ? qlora_geglu_backward(pass->ctx, ds, gate, up, gate, up, s)
               : qlora_swiglu_backward(pass->ctx, ds, gate, up, gate, up, s);
}

// Whether ds lacks what the adapter of down adds to it, which the activation's backward pass then
// adds: in FP8, where it is a product of its own that writes a matrix as large as the activation.
static bool qlora__ds_lacks_share(const qlora__pass* pass, const qlora__layer* layer,
                                  const qlora__stack* down) {
    int64_t ranks[3];
    return QLORA__GATED_SHARE && down->linear.fp8 != NULL &&
           qlora__gated_ranks(pass->m, layer, ranks) && ranks[2] > 0;
}

// The gradients of gate and up from ds, and with them dB of gate and up and dA of down, which are
// added up on the second stream: dy has u of down.
static qlora_result qlora__layer_gated_gradients(const qlora__pass* pass, qlora__layer* layer,
                                                 const qlora__stack* down, const qlora_tensor* ds,
                                                 const qlora_tensor* dy) {
    qlora_model* m = pass->m;
    int64_t width = m->plan.config.intermediate;
    qlora_linear_desc l = qlora__linear_of(m, layer, QLORA__GATE_UP, pass->adapter);
    qlora_tensor gate = qlora__local(pass, &layer->kept.gu, 0, width);
    qlora_tensor up = qlora__local(pass, &layer->kept.gu, width, width);
    bool kept = layer->kept.z[QLORA__GATE_UP].cols > 0; // otherwise it is in x
    qlora__gated g;
    qlora_tensor halves[2]; // of dB, if gate and up are one projection
    int64_t ranks[3];
    int64_t at = 0;
    memset(&g, 0, sizeof g);
    qlora__gated_ranks(m, layer, ranks);
    g.dh = ds;
    g.gate = &gate;
    g.up = &up;
    g.gelu = (m->arch->has & QLORA__HAS_GELU) != 0;
    g.parts = &m->gated_parts;
    for (int i = 0; i < 2; i++) {
        const qlora_linear_part* part = &l.parts[l.count == 1 ? 0 : i];
        qlora__gated_factor* f = &g.factors[i];
        if (ranks[i] == 0) {
            continue;
        }
        halves[i] = *part->db;
        halves[i].rows = width;
        halves[i].data = (float*)part->db->data + (l.count == 1 ? i * width * part->db->ld : 0);
        f->z = kept ? qlora__slice(pass, &layer->kept.z[QLORA__GATE_UP], at, ranks[i])
                    : qlora__local(pass, &m->x, l.in + at, ranks[i]);
        f->d = &halves[i];
        f->scale = part->scale;
        at += l.count == 1 ? 0 : ranks[i];
    }
    if (ranks[2] > 0) {
        g.factors[2].z = qlora__window(dy, pass->rows, down->out, ranks[2]);
        g.factors[2].d = down->linear.parts[0].da;
    }
    qlora_tensor a;
    qlora_tensor sb;
    if (qlora__ds_lacks_share(pass, layer, down)) {
        bool joined = qlora__linear_joined(&down->linear, down->pad, &a, &sb);
        QLORA_ASSERT(joined); // or ds would lose the share
        g.a = joined ? &a : NULL;
    }
    qlora_tensor most;
    if (qlora__u_is_coded(m, layer)) {
        most = qlora__window(&m->fp8_most, 1, 0, pass->rows);
        QLORA__TRY(qlora__tensor_zero(pass->ctx, &most));
        g.most = &most;
    }
    QLORA__TRY(qlora__gated_tiles(pass->ctx, &g));
    QLORA__TRY(qlora__beside_begin(pass->ctx));
    return qlora__beside_end(pass->ctx, QLORA__DOWN, qlora__gated_sum(pass->ctx, &g));
}

// Backward pass of down_proj and the activation: d_out -> the gradient of gate and up in kept.gu.
static qlora_result qlora__down_backward_run(const qlora__pass* pass, qlora__layer* layer) {
    qlora_ctx* ctx = pass->ctx;
    qlora_model* m = pass->m;
    int64_t width = m->plan.config.intermediate;
    qlora__stack stack;
    QLORA__TRY(qlora__stack_ready(pass, layer, QLORA__DOWN, true, &stack));
    qlora_tensor gate = qlora__local(pass, &layer->kept.gu, 0, width);
    qlora_tensor up = qlora__local(pass, &layer->kept.gu, width, width);
    qlora_tensor x = qlora__local(pass, &m->s, 0, width + stack.pad);
    qlora_tensor s = qlora__local(pass, &m->s, 0, width);
    qlora_tensor ds = qlora__local(pass, &m->ds, 0, width);
    qlora_tensor dy = qlora__layer_d_out(pass, stack.out + stack.pad);
    qlora_tensor dy_inner = qlora__layer_d_out(pass, stack.out);
    if (stack.linear.dropout > 0.0f) { // the masked branch adds to ds, so s comes first
        QLORA__TRY(qlora__layer_gated(pass, &gate, &up, &s));
        QLORA__TRY(qlora__stack_z(pass, &stack, QLORA__DOWN, &x));
        QLORA__TRY(qlora__stack_backward_masked(pass, &stack, &x, &dy, &ds));
        return qlora__layer_gated_backward(pass, &ds, &gate, &up, NULL);
    }
    if (qlora__stack_is_dora(m, layer, QLORA__DOWN)) { // its output is computed again from s
        QLORA__TRY(qlora__layer_gated(pass, &gate, &up, &s));
        QLORA__TRY(qlora__stack_gains_backward(pass, layer, QLORA__DOWN, &stack, &x, &dy));
        QLORA__TRY(qlora__stack_backward(pass, &stack, QLORA__DOWN, &x, &dy, &ds));
        return qlora__layer_gated_backward(pass, &ds, &gate, &up, NULL);
    }
    // The activation is computed again, over its gradient, in the same pass over gate and up.
    if (qlora__ds_lacks_share(pass, layer, &stack)) {
        QLORA__TRY(qlora__linear_u(ctx, pass->math, &stack.linear, &dy, &dy_inner));
        QLORA__TRY(qlora__fp8_product(ctx, stack.linear.fp8, true, stack.coded, &dy_inner, &ds,
                                      false));
    } else {
        QLORA__TRY(qlora__linear_u_dx(ctx, pass->math, &stack.linear, &dy, &dy_inner, stack.coded,
                                      &ds));
    }
    if (qlora__gated_ranks(m, layer, NULL)) {
        QLORA__TRY(qlora__layer_gated_gradients(pass, layer, &stack, &ds, &dy));
    } else if (qlora__u_comes(pass, layer)) {
        qlora_linear_desc l = qlora__linear_of(m, layer, QLORA__GATE_UP, pass->adapter);
        qlora_tensor u =
            qlora__local(pass, &layer->kept.gu, 2 * width, layer->pads[QLORA__GATE_UP]);
        QLORA__TRY(qlora__tails_backward(ctx, (m->arch->has & QLORA__HAS_GELU) != 0, &l, &ds, &gate,
                                         &up, &s, &u));
    } else {
        QLORA__TRY(qlora__layer_gated_backward(pass, &ds, &gate, &up, &s));
    }
    return qlora__stack_gradients(pass, &stack, QLORA__DOWN, &x, &dy, true);
}

static qlora_result qlora__layer_down_backward(const qlora__pass* pass, qlora__layer* layer) {
    qlora__pass run;
    for (int64_t i = 0; qlora__run_at(pass, i, &run); i++) {
        if (run.rows > 0) {
            QLORA__TRY(qlora__down_backward_run(&run, layer));
        }
    }
    return QLORA_OK;
}

// Computes the input of a stack that reads the residual stream again, with z.
static qlora_result qlora__stack_input(const qlora__pass* pass, const qlora__stack* stack,
                                       int group, const qlora_tensor* in, const qlora_tensor* norm,
                                       const qlora_tensor* x) {
    qlora_tensor inner = qlora__window(x, pass->rows, 0, pass->m->plan.config.hidden);
    QLORA__TRY(qlora__rows_input(pass, in, norm, &inner));
    return qlora__stack_z(pass, stack, group, x);
}

// Whether m->x still has the input of a stack, with z: that of gate and up is the last thing that
// recomputing a layer writes there.
static bool qlora__x_is_there(const qlora_model* m, const qlora__layer* layer, int group) {
    return qlora__keeps_z(m) && layer->recompute && group == QLORA__GATE_UP;
}

// A stack whose dA is computed from h, the input of its norm, once the backward pass of the norm
// has its factors: k is that launch, and *has tells whether there is one. Otherwise the norm is
// computed again, if m->x does not have its output, and dA comes before.
static qlora_result qlora__input_skinny(const qlora__pass* pass, const qlora__layer* layer,
                                        int group, const qlora__stack* stack, const qlora_tensor* h,
                                        const qlora_tensor* dy, const qlora_tensor* norm,
                                        qlora__skinny* k, bool* has) {
    qlora_model* m = pass->m;
    qlora_tensor z = stack->z;
    if (qlora__x_is_there(m, layer, group)) {
        z = qlora__local(pass, &m->x, stack->linear.in, stack->pad);
    }
    *has = false;
    if (z.cols == 0 || norm == NULL || !qlora__keeps_z(m)) {
        return QLORA_OK;
    }
    unsigned which = qlora__gradients_left(pass, layer, group);
    int64_t room = qlora__linear_parts_of(&stack->linear, pass->rows, which);
    if (room == 0 || room > m->skinny_parts.cols) {
        return QLORA_OK;
    }
    return qlora__linear_skinny(pass->ctx, &stack->linear, h, &z, dy, 1.0f, which, k, has);
}

// Where the norm of a stack writes the codes of its result, which is dy of the product after it: of
// o of the same layer, or of down of the layer below, unless that is computed again before; NULL if
// nowhere.
static const qlora__fp8* qlora__dh_codes(const qlora__pass* pass, const qlora__layer* layer,
                                         int group) {
    const qlora_model* m = pass->m;
    bool below = group != QLORA__GATE_UP;
    if (below && layer == m->layers) {
        return NULL;
    }
    const qlora__layer* next = below ? layer - 1 : layer;
    int to = below ? QLORA__DOWN : QLORA__O;
    bool any = !qlora__has_own_d_out(m) && m->desc.dropout == 0.0f &&
               (!below || (m->plan.tile == 0 && !next->recompute));
    return any ? qlora__codes_of_norm(pass, next, to, true) : NULL;
}

// The backward pass of such a stack.
static qlora_result qlora__input_backward_skinny(const qlora__pass* pass, qlora__layer* layer,
                                                 int group, int above, const qlora__stack* stack,
                                                 const qlora_tensor* dy, const qlora_tensor* h,
                                                 int number, qlora__skinny* k) {
    qlora_ctx* ctx = pass->ctx;
    qlora_model* m = pass->m;
    const qlora_model_config* c = &m->plan.config;
    qlora_tensor inner = qlora__window(dy, pass->rows, 0, stack->out);
    qlora_tensor dx = qlora__local(pass, &m->delta, 0, c->hidden);
    qlora_tensor dh = qlora__slice(pass, &m->dh, 0, c->hidden);
    qlora_tensor rstd = qlora__window(&m->rstd[group == QLORA__QKV ? 0 : 1], 1, 0, pass->rows);
    qlora__norm_job job;
    memset(&job, 0, sizeof job);
    job.x = h;
    job.w = qlora__layer_norm(m, layer, number);
    job.dy = &dx;
    job.dres = &dh;
    job.dx = &dh;
    job.dw = m->desc.train_norms ? &layer->d_norms[number] : NULL;
    job.eps = (float)c->rms_eps;
    job.rstd_out = &rstd;
    bool coded = false;
    QLORA__TRY(qlora__stack_u(pass, stack, group, dy, &inner, &coded));
    QLORA__TRY(qlora__linear_dx(ctx, pass->math, &stack->linear, dy, &inner, coded, &dx));
    QLORA__TRY(qlora__beside_wait(ctx, 1u << above | 1u << group));
    job.fp8 = qlora__dh_codes(pass, layer, group);
    QLORA__ENTER(ctx, "qlora_rmsnorm_backward"); // frees the scratch on return
    QLORA__TRY(qlora__leave(ctx, qlora__norm_backward(ctx, &job)));
    qlora__skinny_norm(k, &rstd, job.w);
    QLORA__TRY(qlora__beside_begin(ctx));
    return qlora__beside_end(ctx, group, qlora__skinny_launch(ctx, k, m->skinny_parts.data));
}

// Backward pass of a stack that reads the residual stream h through norm number `number`, or
// without one: dy (with space for u) -> gradients of its adapters, and dh += norm'(dx). Waits first
// for the stack `above`, which reads dh on the second stream.
static qlora_result qlora__input_backward_run(const qlora__pass* pass, qlora__layer* layer,
                                              int group, int above, const qlora_tensor* dy,
                                              const qlora_tensor* h, int number, bool wants_dx) {
    qlora_ctx* ctx = pass->ctx;
    qlora_model* m = pass->m;
    const qlora_model_config* c = &m->plan.config;
    const qlora_tensor* norm = qlora__layer_norm(m, layer, number);
    qlora__stack stack;
    QLORA__TRY(qlora__stack_ready(pass, layer, group, true, &stack));
    qlora_tensor in = qlora__local(pass, h, 0, c->hidden);
    qlora_tensor x = qlora__local(pass, &m->x, 0, c->hidden + stack.pad);
    qlora_tensor up = qlora__local(pass, dy, 0, stack.out + stack.pad);
    qlora_tensor dx = qlora__local(pass, &m->delta, 0, c->hidden);
    qlora_tensor dh = qlora__slice(pass, &m->dh, 0, c->hidden);
    bool dora = qlora__stack_is_dora(m, layer, group);
    qlora__skinny k;
    bool skinny = false;
    if (wants_dx) {
        QLORA__TRY(qlora__input_skinny(pass, layer, group, &stack, &in, &up, norm, &k, &skinny));
    }
    if (skinny) {
        return qlora__input_backward_skinny(pass, layer, group, above, &stack, &up, &in, number,
                                            &k);
    }
    if (stack.pad > 0 && (stack.linear.dropout > 0.0f || dora)) { // masks need scratch
        // Unlike below, x is written on the main stream, and the stack before may still read it.
        QLORA__TRY(qlora__beside_wait(ctx, ~0u));
        QLORA__TRY(qlora__stack_input(pass, &stack, group, &in, norm, &x));
        if (dora) {
            QLORA__TRY(qlora__stack_gains_backward(pass, layer, group, &stack, &x, &up));
        }
    } else if (stack.pad > 0 && !qlora__x_is_there(m, layer, group)) {
        QLORA__TRY(qlora__beside_begin(ctx));
        QLORA__TRY(qlora__beside_end(ctx, group,
                                     qlora__stack_input(pass, &stack, group, &in, norm, &x)));
    }
    QLORA__TRY(qlora__stack_backward(pass, &stack, group, &x, &up, wants_dx ? &dx : NULL));
    QLORA__TRY(qlora__beside_wait(ctx, 1u << above));
    if (!wants_dx) {
        return QLORA_OK;
    }
    if (norm == NULL) {
        return qlora_add(ctx, &dh, &dx, &dh);
    }
    qlora__norm_job job;
    memset(&job, 0, sizeof job);
    job.x = &in;
    job.w = norm;
    job.dy = &dx;
    job.dres = &dh;
    job.dx = &dh;
    job.dw = m->desc.train_norms ? &layer->d_norms[number] : NULL;
    job.eps = (float)c->rms_eps;
    job.fp8 = qlora__dh_codes(pass, layer, group);
    QLORA__ENTER(ctx, "qlora_rmsnorm_backward");
    return qlora__leave(ctx, qlora__norm_backward(ctx, &job));
}

static qlora_result qlora__layer_input_backward(const qlora__pass* pass, qlora__layer* layer,
                                                int group, int above, const qlora_tensor* dy,
                                                const qlora_tensor* h, int number, bool wants_dx) {
    qlora__pass run;
    for (int64_t i = 0; qlora__run_at(pass, i, &run); i++) {
        if (run.rows > 0) {
            QLORA__TRY(
                qlora__input_backward_run(&run, layer, group, above, dy, h, number, wants_dx));
        }
    }
    return QLORA_OK;
}

// Backward pass of the norms of q and k, in m->dqkv. With a weight gradient, the result must not
// overwrite dy, so it is computed in d_o and copied.
static qlora_result qlora__layer_qk_backward(const qlora__pass* pass, qlora__layer* layer) {
    qlora_ctx* ctx = pass->ctx;
    qlora_model* m = pass->m;
    const qlora_model_config* c = &m->plan.config;
    int64_t q = qlora__q_width(c);
    int64_t kv = qlora__kv_width(c);
    float eps = (float)c->rms_eps;
    const struct {
        int norm;
        int64_t at;
        int64_t width;
    } parts[] = {{QLORA__NORM_Q, 0, q}, {QLORA__NORM_K, q, kv}};
    for (int i = 0; i < 2; i++) {
        const qlora_tensor* w = &layer->norms[parts[i].norm];
        qlora_tensor raw = qlora__slice(pass, &layer->kept.qkv, parts[i].at, parts[i].width);
        qlora_tensor d = qlora__slice(pass, &m->dqkv, parts[i].at, parts[i].width);
        if (!m->desc.train_norms) {
            QLORA__TRY(qlora_rmsnorm_backward(ctx, &d, &raw, w, eps, NULL, &d, NULL));
            continue;
        }
        qlora_tensor through = qlora__slice(pass, &m->d_o, 0, parts[i].width);
        QLORA__TRY(qlora_rmsnorm_backward(ctx, &d, &raw, w, eps, NULL, &through,
                                          &layer->d_norms[parts[i].norm]));
        QLORA__TRY(qlora_scale(ctx, 1.0f, &through, &d));
    }
    return QLORA_OK;
}

// Backward pass of o_proj: d_out -> the gradient of the output of attention in m->d_o.
static qlora_result qlora__o_backward_run(const qlora__pass* pass, qlora__layer* layer) {
    qlora_model* m = pass->m;
    int64_t q = qlora__q_width(&m->plan.config);
    qlora__stack stack;
    QLORA__TRY(qlora__stack_ready(pass, layer, QLORA__O, true, &stack));
    qlora_tensor x = qlora__slice(pass, &layer->kept.o, 0, q + stack.pad);
    qlora_tensor dy = qlora__layer_d_out(pass, stack.out + stack.pad);
    qlora_tensor d_o = qlora__slice(pass, &m->d_o, 0, q);
    if (pass->gathered) {
        qlora_tensor o = qlora__labelled_o(m, pass->labelled);
        x = qlora__slice(pass, &o, 0, q + stack.pad);
    }
    if (qlora__stack_is_dora(m, layer, QLORA__O)) {
        QLORA__TRY(qlora__stack_gains_backward(pass, layer, QLORA__O, &stack, &x, &dy));
    }
    if (stack.linear.owners != NULL) { // this z is that of the forward pass
        qlora_tensor inner = qlora__window(&x, pass->rows, 0, q);
        qlora_tensor z = qlora__window(&x, pass->rows, q, stack.pad);
        QLORA__TRY(qlora__linear_keep_own(pass->ctx, &stack.linear, &inner, &z));
    }
    return qlora__stack_backward(pass, &stack, QLORA__O, &x, &dy, &d_o);
}

static qlora_result qlora__layer_o_backward(const qlora__pass* pass, qlora__layer* layer) {
    qlora__pass run;
    QLORA__TRY(qlora__layer_out_backward(pass, layer, 0));
    for (int64_t i = 0; qlora__run_at(pass, i, &run); i++) {
        if (run.rows > 0) {
            QLORA__TRY(qlora__o_backward_run(&run, layer));
        }
    }
    return QLORA_OK;
}

// Backward pass of o_proj of the last layer if it has only the labelled rows after attention: their
// gradients go back to their tokens, those of the output of attention, in m->d_o, and of the
// residual stream, in m->dh.
static qlora_result qlora__backward_labelled(const qlora__pass* pass, int64_t index) {
    qlora_ctx* ctx = pass->ctx;
    qlora_model* m = pass->m;
    qlora__pass after = qlora__pass_after(pass, index);
    QLORA__TRY(qlora__layer_o_backward(&after, &m->layers[index]));
    // It still reads dh, and the output of attention in dqkv.
    QLORA__TRY(qlora__beside_wait(ctx, 1u << QLORA__O));
    qlora_tensor d_o = qlora__window(&m->d_o, pass->rows, 0, qlora__q_width(&m->plan.config));
    qlora_tensor dh = qlora__window(&m->dh, pass->rows, 0, m->plan.config.hidden);
    QLORA__TRY(qlora__labelled_spread(ctx, m, pass->labelled, &m->dqkv, &d_o));
    return qlora__labelled_spread(ctx, m, pass->labelled, &m->delta, &dh);
}

// d_o -> gradients of q, k and v, normalised and rotated, in m->dqkv.
static qlora_result qlora__layer_attention_backward(const qlora__pass* pass, qlora__layer* layer) {
    qlora_ctx* ctx = pass->ctx;
    qlora_model* m = pass->m;
    const qlora_model_config* c = &m->plan.config;
    int64_t q = qlora__q_width(c);
    int64_t kv = qlora__kv_width(c);
    QLORA__TRY(qlora__beside_wait(ctx, 1u << QLORA__QKV));
    qlora__heads heads = qlora__heads_of(pass, layer);
    qlora_tensor o = qlora__window(&layer->kept.o, pass->rows, 0, q);
    qlora_tensor d_o = qlora__window(&m->d_o, pass->rows, 0, q);
    qlora_tensor lse = layer->kept.lse;
    lse.cols = pass->rows;
    lse.ld = pass->rows;
    qlora_tensor dq = qlora__window(&m->dqkv, pass->rows, 0, q);
    qlora_tensor dk = qlora__window(&m->dqkv, pass->rows, q, kv);
    qlora_tensor dv = qlora__window(&m->dqkv, pass->rows, q + kv, kv);
    qlora_tensor seqs = qlora__pass_seqs(pass);
    qlora__attention a;
    memset(&a, 0, sizeof a);
    a.q = &heads.q;
    a.k = &heads.k;
    a.v = &heads.v;
    a.seqs = &seqs;
    a.o = &o;
    a.lse = &lse;
    a.d_o = &d_o;
    a.dq = &dq;
    a.dk = &dk;
    a.dv = &dv;
    a.stats = m->stats.data;
    QLORA__ENTER(ctx, "qlora_attention_backward"); // frees the scratch on return
    return qlora__leave(ctx, qlora__attention_backward(ctx, &heads.desc, &a));
}

// Whether the rotation writes the codes of dy of q, k and v for the product after it: it is the
// last thing before that and takes all columns of a head, in pairs half of it apart.
static bool qlora__rotation_writes_codes(const qlora__pass* pass, const qlora__layer* layer) {
    const qlora_model* m = pass->m;
    const qlora_model_config* c = &m->plan.config;
    int64_t turned = qlora__q_width(c) + qlora__kv_width(c);
    return m->on_gpu && qlora__is_fp8(m) && m->compute == QLORA_BF16 && !m->dora &&
           m->desc.dropout == 0.0f && !qlora__pass_has_runs(pass) && !c->qk_norm &&
           !layer->no_rope && !qlora__scales_queries(m) &&
           (m->arch->has & QLORA__HAS_PAIRED_ROPE) == 0 && m->rope.cols == c->head_dim &&
           c->head_dim % 16 == 0 && turned / 2 <= QLORA__ROPE_CODED;
}

// Gradients of q, k and v -> those before norm and rotation.
static qlora_result qlora__layer_heads_backward(const qlora__pass* pass, qlora__layer* layer) {
    qlora_model* m = pass->m;
    const qlora_model_config* c = &m->plan.config;
    if (qlora__rotation_writes_codes(pass, layer)) {
        int64_t cols = qlora__q_width(c) + 2 * qlora__kv_width(c);
        qlora_tensor all = qlora__slice(pass, &m->dqkv, 0, cols);
        qlora_tensor angles = qlora__window(&m->batch.angles, 1, pass->row, pass->rows);
        return qlora__rope_coded(pass->ctx, &all, c->heads + c->kv_heads, &angles,
                                 layer->sliding ? &m->rope_sliding : &m->rope, &m->flag,
                                 qlora__codes_note(pass, layer, QLORA__QKV, true));
    }
    qlora_tensor turned =
        qlora__slice(pass, &pass->m->dqkv, 0, qlora__q_width(c) + qlora__kv_width(c));
    QLORA__TRY(qlora__layer_rotate(pass, layer, &turned, NULL, true));
    return c->qk_norm ? qlora__layer_qk_backward(pass, layer) : QLORA_OK;
}

// The backward pass in pieces, in the order in which they run: begin; then, from the last layer to
// the first, its MLP and its attention; then end.

// If the last layer has only the labelled rows after attention: gradient of the final norm's output
// in m->rows_dx -> gradient of the residual stream in the first rows of m->dh. The head has not
// written the rows that fill up the number of chunks.
static qlora_result qlora__backward_begin_labelled(const qlora__pass* pass) {
    qlora_model* m = pass->m;
    int64_t width = m->plan.config.hidden;
    int64_t end = pass->chunks * m->plan.head_chunk;
    qlora_tensor dx;
    qlora__arena_window(&m->rows_dx, 0, pass->labelled, width, &dx);
    if (end < pass->labelled) {
        qlora_tensor rest;
        qlora__arena_window(&m->rows_dx, end * width, pass->labelled - end, width, &rest);
        QLORA__TRY(qlora__tensor_zero(pass->ctx, &rest));
    }
    qlora_tensor h = qlora__window(&m->last_h, pass->labelled, 0, width);
    qlora_tensor dh = qlora__window(&m->dh, pass->labelled, 0, width);
    return qlora_rmsnorm_backward(pass->ctx, &dx, &h, &m->final_norm,
                                  (float)m->plan.config.rms_eps, NULL, &dh,
                                  m->desc.train_norms ? &m->d_final_norm : NULL);
}

// Gradient of the final norm's output in m->delta -> gradient of the residual stream in m->dh. With
// tiles, that of the output comes from the labelled rows here, and not from qlora__head_end.
static qlora_result qlora__backward_begin(const qlora__pass* pass) {
    qlora_model* m = pass->m;
    int64_t width = m->plan.config.hidden;
    QLORA__TRY(qlora__beside_wait(pass->ctx, ~0u)); // z of the last layer, in s
    if (pass->labelled > 0) {
        return qlora__backward_begin_labelled(pass);
    }
    if (m->plan.tile > 0) {
        QLORA__TRY(qlora__head_clear(pass));
    }
    for (int64_t at = 0; at < pass->rows; at += qlora__tile_rows(m)) {
        qlora__pass tile = qlora__tile_at(pass, at);
        qlora_tensor dx = qlora__window(&m->delta, tile.rows, 0, width);
        qlora_tensor h = qlora__slice(&tile, &m->last_h, 0, width);
        qlora_tensor dh = qlora__slice(&tile, &m->dh, 0, width);
        if (m->plan.tile > 0) {
            QLORA__TRY(qlora__head_spread(&tile));
        }
        QLORA__TRY(qlora_rmsnorm_backward(pass->ctx, &dx, &h, &m->final_norm,
                                          (float)m->plan.config.rms_eps, NULL, &dh,
                                          m->desc.train_norms ? &m->d_final_norm : NULL));
    }
    return QLORA_OK;
}

// Waits for the input of a layer if it is offloaded, and starts the copies of that of the one below
// it, and of what it keeps of attention, in the memory of the one above, which is no longer needed.
static qlora_result qlora__input_back(const qlora__pass* pass, int64_t index) {
    qlora_model* m = pass->m;
    QLORA__TRY(qlora__away_wait(pass->ctx, 1u << index % 2));
    if (index == 0 || m->layers[index - 1].away == NULL) {
        return QLORA_OK;
    }
    qlora__layer* below = &m->layers[index - 1];
    QLORA__TRY(qlora__beside_wait(pass->ctx, ~0u)); // it may still read that memory
    QLORA__TRY(
        qlora__away_copy(pass->ctx, (int)((index - 1) % 2), true, &below->kept.h, below->away));
    return qlora__turn_back(pass, below);
}

// The same for what a layer keeps of attention and is not recomputed: the layer below it is the one
// whose turn was before. The second stream no longer reads that memory: it has finished the
// gradients of o of the layer above, and is waited for here with those of q, k and v.
static qlora_result qlora__attention_back(const qlora__pass* pass, const qlora__layer* layer) {
    const qlora__layer* below = layer;
    QLORA__TRY(qlora__turn_wait(pass, layer));
    if (layer->turn < 1 || layer->recompute) {
        return QLORA_OK;
    }
    while (below->turn != layer->turn - 1) {
        below--;
    }
    if (below->away_attention == NULL) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__beside_wait(pass->ctx, 1u << QLORA__QKV));
    return qlora__turn_back(pass, below);
}

// Whether the backward pass enters a group of layers of which only the first has its input on the
// host: at its last layer, unless it is the last group.
static bool qlora__group_begins(const qlora_model* m, int64_t index) {
    int64_t every = m->plan.offload_every;
    return m->plan.offloaded_layers > 0 && every > 1 && index % every == every - 1 &&
           index / every != (m->plan.config.layers - 1) / every;
}

// Computes the inputs of the layers of a group once more, from that of its first layer up to that
// of its last one, number `top`. The same operations on the same numbers give the same bits. Of the
// layer above, nothing is needed any more but the gradient of the residual stream.
static qlora_result qlora__group_again(const qlora__pass* pass, int64_t top) {
    qlora_model* m = pass->m;
    int64_t first = top - top % m->plan.offload_every;
    qlora__layer* layer = &m->layers[first];
    qlora__pass again = *pass;
    again.group = true;
    QLORA__TRY(qlora__beside_wait(pass->ctx, ~0u));
    QLORA__TRY(qlora__away_wait(pass->ctx, ~0u));
    QLORA__TRY(
        qlora__away_copy(pass->ctx, (int)(first % 2), true, &layer->kept.h, layer->away));
    QLORA__TRY(qlora__away_wait(pass->ctx, 1u << first % 2));
    if (m->plan.tile == 0) {
        qlora_tensor h = qlora__window(&layer->kept.h, pass->rows, 0, m->plan.config.hidden);
        QLORA__TRY(qlora__layer_input(&again, &h, qlora__norm_before(m, first)));
    }
    size_t scratch = qlora__scratch_mark(pass->ctx);
    for (int64_t l = first; l < top; l++) {
        QLORA__TRY(qlora__forward_attention(&again, l));
        QLORA__TRY(qlora__forward_mlp(&again, l));
        qlora__scratch_release(pass->ctx, scratch);
    }
    return QLORA_OK;
}

// With tiles, everything between attention and the end of the layer is done for one tile before the
// next: first what was not kept, then its gradients down to the output of attention.
static qlora_result qlora__backward_mlp(const qlora__pass* pass, int64_t index) {
    qlora_model* m = pass->m;
    qlora__layer* layer = &m->layers[index];
    bool tiled = m->plan.tile > 0;
    qlora__pass after = qlora__pass_after(pass, index);
    if (qlora__group_begins(m, index)) {
        QLORA__TRY(qlora__group_again(pass, index));
    }
    QLORA__TRY(qlora__input_back(pass, index));
    if (layer->recompute) {
        QLORA__TRY(qlora__turn_wait(pass, layer));
        QLORA__TRY(qlora__layer_again(pass, &after, layer));
    }
    qlora__tiles_begin(pass);
    for (int64_t at = 0; at < after.rows; at += qlora__tile_rows(m)) {
        qlora__pass tile = qlora__tile_at(&after, at);
        if (tiled) {
            QLORA__TRY(qlora__beside_wait(pass->ctx, ~0u)); // it uses the memory of a tile
            QLORA__TRY(qlora__layer_again_mlp(&tile, layer));
        }
        qlora_tensor h2 = qlora__layer_h2(&tile, layer);
        QLORA__TRY(qlora__layer_out_backward(&tile, layer, 1));
        QLORA__TRY(qlora__layer_down_backward(&tile, layer));
        QLORA__TRY(qlora__layer_input_backward(&tile, layer, QLORA__GATE_UP, QLORA__DOWN,
                                               &layer->kept.gu, &h2, QLORA__NORM_MLP, true));
        if (tiled) {
            QLORA__TRY(qlora__layer_o_backward(&tile, layer));
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__backward_attention(const qlora__pass* pass, int64_t index) {
    qlora_model* m = pass->m;
    qlora__layer* layer = &m->layers[index];
    bool tiled = m->plan.tile > 0;
    bool gathered = qlora__pass_after(pass, index).gathered;
    QLORA__TRY(qlora__attention_back(pass, layer));
    if (gathered) {
        QLORA__TRY(qlora__backward_labelled(pass, index));
    } else if (!tiled) {
        QLORA__TRY(qlora__layer_o_backward(pass, layer));
    }
    QLORA__TRY(qlora__layer_attention_backward(pass, layer));
    // Below layer 0, at most its norm and the embedding are trained.
    bool below = index > 0 || m->desc.train_norms || qlora__trains_embedding(m);
    qlora__tiles_begin(pass);
    for (int64_t at = 0; at < pass->rows; at += qlora__tile_rows(m)) {
        qlora__pass tile = qlora__tile_at(pass, at);
        qlora_tensor h = qlora__slice(&tile, &layer->kept.h, 0, m->plan.config.hidden);
        qlora_tensor dy = qlora__slice(&tile, &m->dqkv, 0, m->dqkv.cols);
        if (tiled) {
            QLORA__TRY(qlora__beside_wait(pass->ctx, ~0u));
        }
        QLORA__TRY(qlora__layer_heads_backward(&tile, layer));
        QLORA__TRY(qlora__layer_input_backward(&tile, layer, QLORA__QKV, QLORA__O, &dy, &h,
                                               QLORA__NORM_ATTENTION, below));
    }
    return QLORA_OK;
}

static qlora_result qlora__backward_end(const qlora__pass* pass) {
    qlora_model* m = pass->m;
    QLORA__TRY(qlora__beside_wait(pass->ctx, ~0u));
    QLORA__TRY(qlora__away_wait(pass->ctx, ~0u));
    if (!qlora__trains_embedding(m)) {
        return QLORA_OK;
    }
    qlora_tensor dh = qlora__window(&m->dh, pass->rows, 0, m->plan.config.hidden);
    qlora_tensor ids = qlora__window(&m->batch.ids, 1, 0, pass->rows);
    return qlora__embed_gradient(pass->ctx, &dh, &ids, m->saved_embed ? NULL : &m->token_rows,
                                 (float)m->plan.config.embedding_scale,
                                 m->saved_embed ? &m->d_embed : &m->d_tokens);
}

static qlora_result qlora__backward(const qlora__pass* pass) {
    QLORA__TRY(qlora__backward_begin(pass));
    for (int64_t l = pass->m->plan.config.layers - 1; l >= 0; l--) {
        if (pass->dry && pass->m->layers[l].like_another) {
            continue;
        }
        QLORA__TRY(qlora__backward_mlp(pass, l));
        QLORA__TRY(qlora__backward_attention(pass, l));
    }
    return qlora__backward_end(pass);
}
