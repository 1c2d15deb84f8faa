// ---- the gated MLP ------------------------------------------------------------------------------
//
// gate and up, their product through the activation, down.

// Input of the MLP in m->work.x -> gate and up.
static qlora_result qlora__gated_in(const qlora__pass* pass, qlora__layer* layer) {
    qlora_model* m = pass->m;
    QLORA__TRY(qlora__stack_forward(pass, layer, QLORA__GATE_UP, &m->work.x, &layer->kept.gu));
    return qlora__stack_keep_z(pass, layer, QLORA__GATE_UP, &m->work.x);
}

// s = act(gate) up.
static qlora_result qlora__gated_activation(const qlora__pass* pass, const qlora_tensor* gate,
                                            const qlora_tensor* up, const qlora_tensor* s) {
    return (pass->m->arch->has & QLORA__HAS_GELU) != 0
               ? qlora_geglu_forward(pass->ctx, gate, up, s)
               : qlora_swiglu_forward(pass->ctx, gate, up, s);
}

// Whether the activation's kernel writes its codes for the product of down instead of the
// activation, which the backward pass computes again.
static bool qlora__activation_is_coded(const qlora__pass* pass, const qlora__layer* layer) {
    const qlora_model* m = pass->m;
    return qlora__is_fp8(m) && qlora__z_comes(pass, layer) &&
           !qlora__pass_reads_codes(pass, layer) &&
           m->plan.config.intermediate <= QLORA__FP8_GATED_WIDTH;
}

// The gated activation in m->work.s, or its codes, and z of down if the activation comes with it.
static qlora_result qlora__gated_hidden(const qlora__pass* pass, const qlora__layer* layer) {
    qlora_model* m = pass->m;
    int64_t width = layer->linears[QLORA__DOWN].in;
    qlora_tensor gate = qlora__window(&layer->kept.gu, pass->rows, 0, width);
    qlora_tensor up = qlora__window(&layer->kept.gu, pass->rows, width, width);
    qlora_tensor s = qlora__window(&m->work.s, pass->rows, 0, width);
    if (qlora__activation_is_coded(pass, layer)) {
        qlora_tensor z = qlora__window(&m->work.s, pass->rows, width, layer->pads[QLORA__DOWN]);
        return qlora__fp8_gated(pass->ctx, qlora__codes_note(pass, layer, QLORA__DOWN, false),
                                (m->arch->has & QLORA__HAS_GELU) != 0, &gate, &up,
                                layer->linears[QLORA__DOWN].parts[0].a, &z);
    }
    return qlora__z_comes(pass, layer) ? qlora__layer_tail(pass, layer, &gate, &up, &s)
                                       : qlora__gated_activation(pass, &gate, &up, &s);
}

// The gated activation and down_proj.
static qlora_result qlora__gated_out(const qlora__pass* pass, qlora__layer* layer) {
    qlora_model* m = pass->m;
    QLORA__TRY(qlora__beside_wait(pass->ctx, 1u << QLORA__DOWN)); // z of the layer before, in s
    QLORA__TRY(qlora__gated_hidden(pass, layer));
    QLORA__TRY(qlora__stack_forward(pass, layer, QLORA__DOWN, &m->work.s,
                                    qlora__branch_out(m, layer, QLORA__MLP)));
    return qlora__stack_keep_z(pass, layer, QLORA__DOWN, &m->work.s);
}

static qlora_result qlora__gated_activation_backward(const qlora__pass* pass,
                                                     const qlora_tensor* ds,
                                                     const qlora_tensor* gate,
                                                     const qlora_tensor* up,
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
    return QLORA__GATED_SHARE && down->linear.fp8 != NULL && qlora__ffn_sums(pass->m, layer) &&
           qlora__gated_ranks(pass->m, layer, ranks) && ranks[2] > 0;
}

// The gradients of gate and up from ds, and with them dB of gate and up and dA of down, which are
// added up on the second stream: dy has u of down.
static qlora_result qlora__gated_fused_backward(const qlora__pass* pass, qlora__layer* layer,
                                                const qlora__stack* down, const qlora_tensor* ds,
                                                const qlora_tensor* dy) {
    qlora_model* m = pass->m;
    int64_t width = layer->linears[QLORA__DOWN].in;
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
    g.parts = &m->work.gated_parts;
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
                    : qlora__local(pass, &m->work.x, l.in + at, ranks[i]);
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
        most = qlora__window(&m->work.fp8_most, 1, 0, pass->rows);
        QLORA__TRY(qlora__tensor_zero(pass->ctx, &most));
        g.most = &most;
    }
    QLORA__TRY(qlora__gated_tiles(pass->ctx, &g));
    QLORA__TRY(qlora__beside_begin(pass->ctx));
    return qlora__beside_end(pass->ctx, QLORA__DOWN, qlora__gated_sum(pass->ctx, &g));
}

// Backward pass of down_proj and the activation: d_out -> the gradient of gate and up in kept.gu.
static qlora_result qlora__gated_out_run(const qlora__pass* pass, qlora__layer* layer) {
    qlora_ctx* ctx = pass->ctx;
    qlora_model* m = pass->m;
    int64_t width = layer->linears[QLORA__DOWN].in;
    qlora__stack stack;
    QLORA__TRY(qlora__stack_ready(pass, layer, QLORA__DOWN, true, &stack));
    qlora_tensor gate = qlora__local(pass, &layer->kept.gu, 0, width);
    qlora_tensor up = qlora__local(pass, &layer->kept.gu, width, width);
    qlora_tensor x = qlora__local(pass, &m->work.s, 0, width + stack.pad);
    qlora_tensor s = qlora__local(pass, &m->work.s, 0, width);
    qlora_tensor ds = qlora__local(pass, &m->work.ds, 0, width);
    qlora_tensor dy = qlora__layer_d_out(pass, stack.out + stack.pad);
    qlora_tensor dy_inner = qlora__layer_d_out(pass, stack.out);
    if (stack.linear.dropout > 0.0f) { // the masked branch adds to ds, so s comes first
        QLORA__TRY(qlora__gated_activation(pass, &gate, &up, &s));
        QLORA__TRY(qlora__stack_z(pass, &stack, QLORA__DOWN, &x));
        QLORA__TRY(qlora__stack_backward_masked(pass, &stack, &x, &dy, &ds));
        return qlora__gated_activation_backward(pass, &ds, &gate, &up, NULL);
    }
    if (qlora__stack_is_dora(m, layer, QLORA__DOWN)) { // its output is computed again from s
        QLORA__TRY(qlora__gated_activation(pass, &gate, &up, &s));
        QLORA__TRY(qlora__stack_gains_backward(pass, layer, QLORA__DOWN, &stack, &x, &dy));
        QLORA__TRY(qlora__stack_backward(pass, &stack, QLORA__DOWN, &x, &dy, &ds));
        return qlora__gated_activation_backward(pass, &ds, &gate, &up, NULL);
    }
    // The activation is computed again, over its gradient, in the same pass over gate and up.
    if (qlora__ds_lacks_share(pass, layer, &stack)) {
        QLORA__TRY(qlora__linear_u(ctx, pass->math, &stack.linear, &dy, &dy_inner));
        QLORA__TRY(
            qlora__fp8_product(ctx, stack.linear.fp8, true, stack.coded, &dy_inner, &ds, false));
    } else {
        QLORA__TRY(
            qlora__linear_u_dx(ctx, pass->math, &stack.linear, &dy, &dy_inner, stack.coded, &ds));
    }
    if (qlora__ffn_sums(m, layer)) { // not beside experts
        QLORA__TRY(qlora__gated_fused_backward(pass, layer, &stack, &ds, &dy));
    } else if (qlora__u_comes(pass, layer)) {
        qlora_linear_desc l = qlora__linear_of(m, layer, QLORA__GATE_UP, pass->adapter);
        qlora_tensor u =
            qlora__local(pass, &layer->kept.gu, 2 * width, layer->pads[QLORA__GATE_UP]);
        QLORA__TRY(qlora__tails_backward(ctx, (m->arch->has & QLORA__HAS_GELU) != 0, &l, &ds, &gate,
                                         &up, &s, &u));
    } else {
        QLORA__TRY(qlora__gated_activation_backward(pass, &ds, &gate, &up, &s));
    }
    return qlora__stack_gradients(pass, &stack, QLORA__DOWN, &x, &dy, true);
}

static qlora_result qlora__gated_out_backward(const qlora__pass* pass, qlora__layer* layer) {
    qlora__pass run;
    for (int64_t i = 0; qlora__run_at(pass, i, &run); i++) {
        if (run.rows > 0) {
            QLORA__TRY(qlora__gated_out_run(&run, layer));
        }
    }
    return QLORA_OK;
}

#ifndef QLORA_NO_CUDA
// The activation comes with the product.
static qlora_result qlora__gated_step(const qlora_model* m, const qlora__layer* layer) {
    return qlora__decode_product_run(m, layer, QLORA__GATE_UP, &m->decode.x, &m->decode.s);
}
#endif
