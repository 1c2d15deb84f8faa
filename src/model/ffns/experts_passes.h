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

// The gradients of gate and up and of the scores -> that of the residual stream, with that of the
// MLP that all tokens use: those of the experts are in m->work.d_beside when its backward pass adds
// them.
static qlora_result qlora__experts_in_backward(const qlora__pass* pass, qlora__layer* layer,
                                               const qlora_tensor* h) {
    qlora_model* m = pass->m;
    const qlora__experts* experts = layer->experts;
    const qlora__routed_work* w = &m->work.experts;
    int64_t width = m->plan.config.hidden;
    qlora_tensor in = qlora__local(pass, h, 0, width);
    qlora_tensor inputs = qlora__local(pass, &m->work.x, 0, width);
    qlora_tensor dx = qlora__slice(pass, &m->work.d_beside, 0, width);
    QLORA__TRY(qlora__beside_wait(pass->ctx, ~0u)); // the stack before may still read x
    QLORA__TRY(qlora__rows_input(pass, &in, qlora__branch_norm(m, layer, QLORA__MLP), &inputs));
    QLORA__TRY(qlora__experts_dx(pass, layer, &inputs, &dx));
    QLORA__TRY(qlora__experts_all_backward(pass, &experts->router, &w->dz, &dx));
    if (experts->shared_gate.count > 0) {
        QLORA__TRY(qlora__experts_all_backward(pass, &experts->shared_gate, &w->d_gate, &dx));
    }
    if (layer->layout->groups[QLORA__GATE_UP].count > 0) {
        return qlora__branch_input_backward(pass, layer, QLORA__MLP, &layer->kept.gu, h, true);
    }
    qlora_tensor none = qlora__local(pass, &m->work.delta, 0, width);
    QLORA__TRY(qlora_fill(pass->ctx, 0.0f, &none));
    return qlora__input_norm_backward(pass, layer, QLORA__MLP, &in, &none);
}
