// ---- the passes of experts ----------------------------------------------------------------------
//
// On the CPU (experts.h) or the GPU (experts_gpu.h), and what is the same for both.

// Input of the branch in m->work.x -> the scores, and gate and up of every expert.
static qlora_result qlora__experts_in(const qlora__pass* pass, qlora__layer* layer) {
#ifndef QLORA_NO_CUDA
    if (pass->m->on_gpu) {
        return qlora__device_experts_in(pass, layer);
    }
#endif
    return qlora__host_experts_in(pass, layer);
}

// Gate and up -> the output of the branch.
static qlora_result qlora__experts_out(const qlora__pass* pass, qlora__layer* layer) {
#ifndef QLORA_NO_CUDA
    if (pass->m->on_gpu) {
        return qlora__device_experts_out(pass, layer);
    }
#endif
    return qlora__host_experts_out(pass, layer);
}

// The gradient of the output of the branch -> those of gate and up, in their places, and of the
// scores, in m->work.experts.dz.
static qlora_result qlora__experts_out_backward(const qlora__pass* pass, qlora__layer* layer) {
#ifndef QLORA_NO_CUDA
    if (pass->m->on_gpu) {
        return qlora__device_experts_out_backward(pass, layer);
    }
#endif
    return qlora__host_experts_out_backward(pass, layer);
}

static qlora_result qlora__experts_dx(const qlora__pass* pass, qlora__layer* layer,
                                      const qlora_tensor* inputs, const qlora_tensor* dx) {
#ifndef QLORA_NO_CUDA
    if (pass->m->on_gpu) {
        return qlora__device_experts_dx(pass, layer, inputs, dx);
    }
#endif
    return qlora__host_experts_dx(pass, layer, inputs, dx);
}

// The same beside an MLP that all tokens use: in m->work.d_beside, which its backward pass adds.
// dx: the gradient of the input of all experts, there.
static qlora_result qlora__experts_beside_backward(const qlora__pass* pass, qlora__layer* layer,
                                                   const qlora_tensor* h, const qlora_tensor* dx) {
    qlora_model* m = pass->m;
    const qlora__experts* experts = layer->experts;
    const qlora__routed_work* w = &m->work.experts;
    qlora_tensor y = qlora__window(&w->y, pass->rows, 0, m->plan.config.hidden);
    QLORA__TRY(qlora__experts_all_backward(pass, &experts->router, &w->dz, &y));
    QLORA__TRY(qlora_add(pass->ctx, dx, &y, dx));
    if (experts->shared_gate.count > 0) {
        QLORA__TRY(qlora__experts_all_backward(pass, &experts->shared_gate, &w->d_gate, &y));
        QLORA__TRY(qlora_add(pass->ctx, dx, &y, dx));
    }
    return qlora__branch_input_backward(pass, layer, QLORA__MLP, &layer->kept.gu, h, true);
}

// The gradients of gate and up and of the scores -> that of the residual stream.
static qlora_result qlora__experts_in_backward(const qlora__pass* pass, qlora__layer* layer,
                                               const qlora_tensor* h) {
    qlora_model* m = pass->m;
    int64_t width = m->plan.config.hidden;
    qlora_tensor in = qlora__local(pass, h, 0, width);
    qlora_tensor inputs = qlora__local(pass, &m->work.x, 0, width);
    qlora_tensor others = qlora__slice(pass, &m->work.d_beside, 0, width);
    qlora_tensor dx = qlora__local(pass, &m->work.delta, 0, width);
    QLORA__TRY(qlora__beside_wait(pass->ctx, ~0u)); // the stack before may still read x
    QLORA__TRY(qlora__rows_input(pass, &in, qlora__branch_norm(m, layer, QLORA__MLP), &inputs));
    if (layer->layout->groups[QLORA__GATE_UP].count > 0) {
        QLORA__TRY(qlora__experts_dx(pass, layer, &inputs, &others));
        return qlora__experts_beside_backward(pass, layer, h, &others);
    }
    QLORA__TRY(qlora__experts_dx(pass, layer, &inputs, &dx));
    QLORA__TRY(
        qlora__experts_all_backward(pass, &layer->experts->router, &m->work.experts.dz, &others));
    return qlora__input_norm_backward(pass, layer, QLORA__MLP, &in, &dx);
}
