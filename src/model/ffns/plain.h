// ---- the MLP without a gate ---------------------------------------------------------------------
//
// up, squared ReLU, down. up is the stack that gate and up are elsewhere, and its output has their
// memory.

// Input of the MLP in m->work.x -> up.
static qlora_result qlora__plain_in(const qlora__pass* pass, qlora__layer* layer) {
    qlora_model* m = pass->m;
    QLORA__TRY(qlora__stack_forward(pass, layer, QLORA__GATE_UP, &m->work.x, &layer->kept.gu));
    return qlora__stack_keep_z(pass, layer, QLORA__GATE_UP, &m->work.x);
}

// The activation and down_proj.
static qlora_result qlora__plain_out(const qlora__pass* pass, qlora__layer* layer) {
    qlora_model* m = pass->m;
    int64_t width = m->plan.config.intermediate;
    qlora_tensor up = qlora__window(&layer->kept.gu, pass->rows, 0, width);
    qlora_tensor s = qlora__window(&m->work.s, pass->rows, 0, width);
    QLORA__TRY(qlora__beside_wait(pass->ctx, 1u << QLORA__DOWN)); // z of the layer before, in s
    QLORA__TRY(qlora__relu2_forward(pass->ctx, &up, &s));
    QLORA__TRY(qlora__stack_forward(pass, layer, QLORA__DOWN, &m->work.s,
                                    qlora__branch_out(m, layer, QLORA__MLP)));
    return qlora__stack_keep_z(pass, layer, QLORA__DOWN, &m->work.s);
}

// Backward pass of down_proj and the activation: d_out -> the gradient of up in kept.gu.
static qlora_result qlora__plain_out_run(const qlora__pass* pass, qlora__layer* layer) {
    qlora_model* m = pass->m;
    int64_t width = m->plan.config.intermediate;
    qlora__stack stack;
    QLORA__TRY(qlora__stack_ready(pass, layer, QLORA__DOWN, true, &stack));
    qlora_tensor up = qlora__local(pass, &layer->kept.gu, 0, width);
    qlora_tensor x = qlora__local(pass, &m->work.s, 0, width + stack.pad);
    qlora_tensor s = qlora__local(pass, &m->work.s, 0, width);
    qlora_tensor ds = qlora__local(pass, &m->work.ds, 0, width);
    qlora_tensor dy = qlora__layer_d_out(pass, stack.out + stack.pad);
    qlora_tensor dy_inner = qlora__layer_d_out(pass, stack.out);
    qlora__relu2 job;
    memset(&job, 0, sizeof job);
    job.ds = &ds;
    job.u = &up;
    job.du = &up;
    if (stack.linear.dropout > 0.0f) { // the masked branch adds to ds, so s comes first
        QLORA__TRY(qlora__relu2_forward(pass->ctx, &up, &s));
        QLORA__TRY(qlora__stack_z(pass, &stack, QLORA__DOWN, &x));
        QLORA__TRY(qlora__stack_backward_masked(pass, &stack, &x, &dy, &ds));
        return qlora__relu2_backward(pass->ctx, &job);
    }
    if (qlora__stack_is_dora(m, layer, QLORA__DOWN)) { // its output is computed again from s
        QLORA__TRY(qlora__relu2_forward(pass->ctx, &up, &s));
        QLORA__TRY(qlora__stack_gains_backward(pass, layer, QLORA__DOWN, &stack, &x, &dy));
        QLORA__TRY(qlora__stack_backward(pass, &stack, QLORA__DOWN, &x, &dy, &ds));
        return qlora__relu2_backward(pass->ctx, &job);
    }
    // The activation is computed again, over its gradient, in the same pass over up.
    QLORA__TRY(
        qlora__linear_u_dx(pass->ctx, pass->math, &stack.linear, &dy, &dy_inner, stack.coded, &ds));
    job.s = &s;
    QLORA__TRY(qlora__relu2_backward(pass->ctx, &job));
    return qlora__stack_gradients(pass, &stack, QLORA__DOWN, &x, &dy, true);
}

static qlora_result qlora__plain_out_backward(const qlora__pass* pass, qlora__layer* layer) {
    qlora__pass run;
    for (int64_t i = 0; qlora__run_at(pass, i, &run); i++) {
        if (run.rows > 0) {
            QLORA__TRY(qlora__plain_out_run(&run, layer));
        }
    }
    return QLORA_OK;
}

#ifndef QLORA_NO_CUDA
static qlora_result qlora__plain_step(const qlora_model* m, const qlora__layer* layer) {
    const qlora_tensor* s = &m->decode.s;
    QLORA__TRY(qlora__decode_product_run(m, layer, QLORA__GATE_UP, &m->decode.x, s));
    return qlora__relu2_forward(m->ctx, s, s);
}
#endif
