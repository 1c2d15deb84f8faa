// ---- branches -----------------------------------------------------------------------------------
//
// What stands between the residual stream and the parts of a layer: the norms before and after a
// branch, the sum, and their backward pass.

// A norm of rows of the residual stream, by the kind of the family.
static qlora_result qlora__stream_norm(const qlora__pass* pass, const qlora_tensor* h,
                                       const qlora_tensor* norm, const qlora_tensor* x) {
    float eps = (float)pass->m->plan.config.rms_eps;
    if (!qlora__norms_mean(pass->m)) {
        return qlora_rmsnorm_forward(pass->ctx, h, norm, eps, x);
    }
    qlora__mean_norm job;
    memset(&job, 0, sizeof job);
    job.x = h;
    job.w = norm;
    job.y = x;
    job.eps = eps;
    QLORA__ENTER(pass->ctx, "qlora__mean_norm_forward");
    return qlora__leave(pass->ctx, qlora__mean_norm_forward(pass->ctx, &job));
}

// Its backward pass: dx = dres + norm'(dy), and dw if it is not NULL.
static qlora_result qlora__stream_norm_backward(const qlora__pass* pass,
                                                const qlora__norm_job* norm) {
    if (!qlora__norms_mean(pass->m)) {
        qlora__norm_job own = *norm;
        QLORA__ENTER(pass->ctx, "qlora_rmsnorm_backward"); // frees the scratch on return
        return qlora__leave(pass->ctx, qlora__norm_backward(pass->ctx, &own));
    }
    qlora__mean_norm job;
    memset(&job, 0, sizeof job);
    job.x = norm->x;
    job.w = norm->w;
    job.dy = norm->dy;
    job.dres = norm->dres;
    job.dx = norm->dx;
    job.dw = norm->dw;
    job.eps = norm->eps;
    QLORA__ENTER(pass->ctx, "qlora__mean_norm_backward");
    return qlora__leave(pass->ctx, qlora__mean_norm_backward(pass->ctx, &job));
}

// That of the final norm.
static qlora_result qlora__final_norm_backward(const qlora__pass* pass, const qlora_tensor* dy,
                                               const qlora_tensor* h, const qlora_tensor* dh) {
    qlora_model* m = pass->m;
    qlora__norm_job job;
    memset(&job, 0, sizeof job);
    job.x = h;
    job.w = &m->base.final_norm;
    job.dy = dy;
    job.dx = dh;
    job.dw = m->desc.train_norms ? &m->tables.d_final_norm : NULL;
    job.eps = (float)m->plan.config.rms_eps;
    return qlora__stream_norm_backward(pass, &job);
}

// The input of a stack: the normalised residual stream, or the stream itself.
static qlora_result qlora__rows_input(const qlora__pass* pass, const qlora_tensor* h,
                                      const qlora_tensor* norm, const qlora_tensor* x) {
    return norm != NULL ? qlora__stream_norm(pass, h, norm, x) : qlora_scale(pass->ctx, 1.0f, h, x);
}

// The input of a stack in m->work.x.
static qlora_result qlora__layer_input(const qlora__pass* pass, const qlora_tensor* stream,
                                       const qlora_tensor* norm) {
    int64_t width = pass->m->plan.config.hidden;
    qlora_tensor h = qlora__window(stream, pass->rows, 0, width);
    qlora_tensor x = qlora__window(&pass->m->work.x, pass->rows, 0, width);
    return qlora__rows_input(pass, &h, norm, &x);
}

// Norm number `norm` of a layer; NULL if it has none.
static const qlora_tensor* qlora__layer_norm(const qlora_model* m, const qlora__layer* layer,
                                             int norm) {
    return qlora__has_norm(m, norm) ? &layer->norms[norm] : NULL;
}

// The norm before a branch; NULL if it has none.
static const qlora_tensor* qlora__branch_norm(const qlora_model* m, const qlora__layer* layer,
                                              int branch) {
    return qlora__layer_norm(m, layer, qlora__norm_of_branch(m, branch));
}

// Where a branch puts its output: where the backward pass of the norm that follows finds it, if
// there is one.
static qlora_tensor* qlora__branch_out(qlora_model* m, qlora__layer* layer, int branch) {
    bool kept = qlora__has_norm(m, qlora__branches[branch].after);
    return kept ? &layer->kept.out[branch] : &m->work.delta;
}

// The rows of a pass of the residual stream between attention and MLP. It is that of a tile, unless
// the stream is updated in place.
static qlora_tensor qlora__layer_h2(const qlora__pass* pass, const qlora__layer* layer) {
    int64_t width = pass->m->plan.config.hidden;
    return qlora__trains(pass->m) ? qlora__window(&layer->kept.h2, pass->rows, 0, width)
                                  : qlora__slice(pass, &layer->kept.h2, 0, width);
}

// The rows of the residual stream that the MLP reads.
static qlora_tensor qlora__mlp_stream(const qlora__pass* pass, const qlora__layer* layer) {
    return qlora__stands_beside(pass->m)
               ? qlora__slice(pass, &layer->kept.h, 0, pass->m->plan.config.hidden)
               : qlora__layer_h2(pass, layer);
}

// Notes that the next kernel writes the codes of an operand of a stack: of its input or,
// transposed, of dy.
static const qlora__fp8* qlora__codes_note(const qlora__pass* pass, const qlora__layer* layer,
                                           int group, bool transposed) {
    pass->flow->coded = &layer->fp8[group];
    pass->flow->coded_transposed = transposed;
    return pass->flow->coded;
}

// Has the norm before or after a product of a stack write such codes, where it can: returns where
// to, or NULL. Codes that were noted before are no longer there.
static const qlora__fp8* qlora__codes_offer(const qlora__pass* pass, const qlora__layer* layer,
                                            int group, bool transposed) {
    const qlora_model* m = pass->m;
    bool writes = m->on_gpu && qlora__is_fp8(m) && !qlora__norms_mean(m) &&
                  m->compute == QLORA_BF16 && !m->dora && !qlora__pass_has_runs(pass) &&
                  m->plan.config.hidden % 8 == 0 && m->plan.config.hidden <= QLORA__NORM_CODED &&
                  (transposed || !qlora__pass_reads_codes(pass, layer));
    pass->flow->coded = NULL;
    return writes ? qlora__codes_note(pass, layer, group, transposed) : NULL;
}

// The norm of stream + delta in m->work.x, for the branch that follows: the next one of the same
// layer, or the first one of the layer above, if there is one.
static qlora_result qlora__branch_norm_add(const qlora__pass* pass, const qlora__layer* layer,
                                           int branch, qlora__norm_job* job) {
    const qlora_model* m = pass->m;
    bool last = branch == QLORA__BRANCHES - 1;
    const qlora__layer* next = last ? layer + 1 : layer;
    int group = qlora__branches[last ? 0 : branch + 1].in;
    bool any = next < m->layers + m->plan.config.layers;
    job->fp8 = any ? qlora__codes_offer(pass, next, group, false) : NULL;
    QLORA__ENTER(pass->ctx, "qlora_rmsnorm_residual_forward");
    return qlora__leave(pass->ctx, qlora__norm_forward(pass->ctx, job));
}

// Adds the output of a branch, through its own norm and with the factor of the family, to `stream`,
// giving `next`; then, unless that is left to the next loop over tiles, prepares the input of the
// branch that follows, whose norm is `before` (NULL = none), in m->work.x.
static qlora_result qlora__branch_add(const qlora__pass* pass, qlora__layer* layer, int branch,
                                      const qlora_tensor* stream, const qlora_tensor* next,
                                      const qlora_tensor* before, bool wants_x) {
    qlora_model* m = pass->m;
    const qlora_model_config* c = &m->plan.config;
    float eps = (float)c->rms_eps;
    const qlora_tensor* after = qlora__layer_norm(m, layer, qlora__branches[branch].after);
    qlora_tensor h = qlora__window(stream, pass->rows, 0, c->hidden);
    qlora_tensor sum = qlora__window(next, pass->rows, 0, c->hidden);
    qlora_tensor delta = qlora__window(&m->work.delta, pass->rows, 0, c->hidden);
    qlora_tensor x = qlora__window(&m->work.x, pass->rows, 0, c->hidden);
    if (after != NULL) {
        qlora_tensor out = qlora__window(&layer->kept.out[branch], pass->rows, 0, c->hidden);
        QLORA__TRY(qlora__stream_norm(pass, &out, after, &delta));
    }
    if (c->residual_scale != 1.0) {
        QLORA__TRY(qlora_scale(pass->ctx, (float)c->residual_scale, &delta, &delta));
    }
    bool beside = qlora__stands_beside(m) && branch + 1 < QLORA__BRANCHES;
    if (beside && wants_x) { // x before the stream changes, which may be updated in place
        QLORA__TRY(qlora__layer_input(pass, stream, before));
        return qlora_add(pass->ctx, &h, &delta, &sum);
    }
    if (before != NULL && wants_x && !qlora__norms_mean(m)) {
        qlora__norm_job job;
        memset(&job, 0, sizeof job);
        job.x = &h;
        job.delta = &delta;
        job.sum = &sum;
        job.w = before;
        job.y = &x;
        job.eps = eps;
        return qlora__branch_norm_add(pass, layer, branch, &job);
    }
    QLORA__TRY(qlora_add(pass->ctx, &h, &delta, &sum));
    return wants_x ? qlora__layer_input(pass, next, before) : QLORA_OK;
}

// The norm before layer number `index`, or NULL; after the last layer, the final norm.
static const qlora_tensor* qlora__norm_before(const qlora_model* m, int64_t index) {
    return index < m->plan.config.layers
               ? qlora__layer_norm(m, &m->layers[index], qlora__branches[0].before)
               : &m->base.final_norm;
}

// The residual stream before layer number `index`; after the last layer, last_h.
static const qlora_tensor* qlora__stream_before(const qlora_model* m, int64_t index) {
    return index < m->plan.config.layers ? &m->layers[index].kept.h : &m->work.last_h;
}

// The first columns of the gradient of the output of attention or MLP, which is that of the
// residual stream unless something comes between.
static qlora_tensor qlora__layer_d_out(const qlora__pass* pass, int64_t cols) {
    const qlora_model* m = pass->m;
    return qlora__has_own_d_out(m) ? qlora__local(pass, &m->work.d_out, 0, cols)
                                   : qlora__slice(pass, &m->work.d_out, 0, cols);
}

// The gradient of the output of a branch in m->work.d_out, from that of the residual stream:
// through the factor or the norm that comes between.
static qlora_result qlora__branch_out_backward(const qlora__pass* pass, qlora__layer* layer,
                                               int branch) {
    qlora_model* m = pass->m;
    const qlora_model_config* c = &m->plan.config;
    int norm = qlora__branches[branch].after;
    const qlora_tensor* after = qlora__layer_norm(m, layer, norm);
    qlora_tensor dh = qlora__slice(pass, &m->work.dh, 0, c->hidden);
    qlora_tensor d_out = qlora__layer_d_out(pass, c->hidden);
    if (after != NULL) {
        qlora_tensor out = qlora__window(&layer->kept.out[branch], pass->rows, 0, c->hidden);
        qlora__norm_job job;
        memset(&job, 0, sizeof job);
        job.x = &out;
        job.w = after;
        job.dy = &dh;
        job.dx = &d_out;
        job.dw = m->desc.train_norms ? &layer->d_norms[norm] : NULL;
        job.eps = (float)c->rms_eps;
        return qlora__stream_norm_backward(pass, &job);
    }
    return qlora__has_own_d_out(m) ? qlora_scale(pass->ctx, (float)c->residual_scale, &dh, &d_out)
                                   : QLORA_OK;
}

// Computes the input of a stack that reads the residual stream again, with z.
static qlora_result qlora__stack_input(const qlora__pass* pass, const qlora__stack* stack,
                                       int group, const qlora_tensor* in, const qlora_tensor* norm,
                                       const qlora_tensor* x) {
    qlora_tensor inner = qlora__window(x, pass->rows, 0, pass->m->plan.config.hidden);
    QLORA__TRY(qlora__rows_input(pass, in, norm, &inner));
    return qlora__stack_z(pass, stack, group, x);
}

// Whether m->work.x still has the input of a branch, with z: that of the last one is the last thing
// that recomputing a layer writes there.
static bool qlora__x_is_there(const qlora_model* m, const qlora__layer* layer, int branch) {
    return qlora__keeps_z(m) && layer->recompute && branch == QLORA__BRANCHES - 1;
}

// A branch whose dA is computed from h, the input of its norm, once the backward pass of the norm
// has its factors: k is that launch, and *has tells whether there is one. Otherwise the norm is
// computed again, if m->work.x does not have its output, and dA comes before.
static qlora_result qlora__input_skinny(const qlora__pass* pass, const qlora__layer* layer,
                                        int branch, const qlora__stack* stack,
                                        const qlora_tensor* h, const qlora_tensor* dy,
                                        qlora__skinny* k, bool* has) {
    qlora_model* m = pass->m;
    const qlora_tensor* norm = qlora__branch_norm(m, layer, branch);
    qlora_tensor z = stack->z;
    if (qlora__x_is_there(m, layer, branch)) {
        z = qlora__local(pass, &m->work.x, stack->linear.in, stack->pad);
    }
    *has = false;
    if (z.cols == 0 || norm == NULL || !qlora__keeps_z(m) || qlora__norms_mean(m) ||
        qlora__stands_beside(m) || (branch == QLORA__MLP && qlora__ffn_plan_of(layer)->adds)) {
        return QLORA_OK;
    }
    unsigned which = qlora__gradients_left(pass, layer, qlora__branches[branch].in);
    int64_t room = qlora__linear_parts_of(&stack->linear, pass->rows, which);
    if (room == 0 || room > m->work.skinny_parts.cols) {
        return QLORA_OK;
    }
    qlora__linear_factors factors = qlora__linear_factors_of(h, &z, dy, 1.0f, which);
    return qlora__linear_skinny(pass->ctx, &stack->linear, &factors, k, has);
}

// Has the norm before a branch write the codes of its result, which is dy of the product after it:
// of the branch before in the same layer, or of the last one of the layer below, unless that is
// computed again before; NULL if nowhere.
static const qlora__fp8* qlora__codes_offer_dh(const qlora__pass* pass, const qlora__layer* layer,
                                               int branch) {
    const qlora_model* m = pass->m;
    bool below = branch == 0;
    if (below && layer == m->layers) {
        return NULL;
    }
    const qlora__layer* next = below ? layer - 1 : layer;
    int to = qlora__branches[below ? QLORA__BRANCHES - 1 : branch - 1].out;
    bool any = !qlora__has_own_d_out(m) && m->desc.dropout == 0.0f &&
               (!below || (m->plan.tile == 0 && !next->recompute));
    return any ? qlora__codes_offer(pass, next, to, true) : NULL;
}

// The backward pass of the input of such a branch.
static qlora_result qlora__input_backward_skinny(const qlora__pass* pass, qlora__layer* layer,
                                                 int branch, const qlora__stack* stack,
                                                 const qlora_tensor* dy, const qlora_tensor* h,
                                                 qlora__skinny* k) {
    qlora_ctx* ctx = pass->ctx;
    qlora_model* m = pass->m;
    const qlora_model_config* c = &m->plan.config;
    const qlora__branch* b = &qlora__branches[branch];
    qlora_tensor inner = qlora__window(dy, pass->rows, 0, stack->out);
    qlora_tensor dx = qlora__local(pass, &m->work.delta, 0, c->hidden);
    qlora_tensor dh = qlora__slice(pass, &m->work.dh, 0, c->hidden);
    qlora_tensor rstd = qlora__window(&m->work.rstd[branch], 1, 0, pass->rows);
    qlora__norm_job job;
    memset(&job, 0, sizeof job);
    job.x = h;
    job.w = qlora__layer_norm(m, layer, b->before);
    job.dy = &dx;
    job.dres = &dh;
    job.dx = &dh;
    job.dw = m->desc.train_norms ? &layer->d_norms[b->before] : NULL;
    job.eps = (float)c->rms_eps;
    job.rstd_out = &rstd;
    bool coded = false;
    QLORA__TRY(qlora__stack_u(pass, stack, b->in, dy, &inner, &coded));
    QLORA__TRY(qlora__linear_dx(ctx, pass->math, &stack->linear, dy, &inner, coded, &dx));
    QLORA__TRY(qlora__beside_wait(ctx, 1u << b->out | 1u << b->in));
    job.fp8 = qlora__codes_offer_dh(pass, layer, branch);
    QLORA__ENTER(ctx, "qlora_rmsnorm_backward"); // frees the scratch on return
    QLORA__TRY(qlora__leave(ctx, qlora__norm_backward(ctx, &job)));
    qlora__skinny_norm(k, &rstd, job.w);
    QLORA__TRY(qlora__beside_begin(ctx));
    return qlora__beside_end(ctx, b->in, qlora__skinny_launch(ctx, k, m->work.skinny_parts.data));
}

// dh += norm'(dx) of a branch, after those of the branches beside it. in: what the norm read.
static qlora_result qlora__input_norm_backward(const qlora__pass* pass, qlora__layer* layer,
                                               int branch, const qlora_tensor* in,
                                               const qlora_tensor* dx) {
    qlora_model* m = pass->m;
    int64_t width = m->plan.config.hidden;
    const qlora_tensor* norm = qlora__branch_norm(m, layer, branch);
    qlora_tensor dh = qlora__slice(pass, &m->work.dh, 0, width);
    if (qlora__stands_beside(m) || (branch == QLORA__MLP && qlora__ffn_plan_of(layer)->adds)) {
        qlora_tensor others = qlora__slice(pass, &m->work.d_beside, 0, width);
        QLORA__TRY(qlora_add(pass->ctx, dx, &others, dx));
    }
    if (norm == NULL) {
        return qlora_add(pass->ctx, &dh, dx, &dh);
    }
    qlora__norm_job job;
    memset(&job, 0, sizeof job);
    job.x = in;
    job.w = norm;
    job.dy = dx;
    job.dres = &dh;
    job.dx = &dh;
    job.dw = m->desc.train_norms ? &layer->d_norms[qlora__norm_of_branch(m, branch)] : NULL;
    job.eps = (float)m->plan.config.rms_eps;
    job.fp8 = qlora__codes_offer_dh(pass, layer, branch);
    return qlora__stream_norm_backward(pass, &job);
}

// Backward pass of the stack that a branch begins with, which reads the residual stream h through
// the norm of the branch, or without one: dy (with space for u) -> gradients of its adapters, and
// dh += norm'(dx); of branches side by side, the first one does that with the sum of all their dx.
// Waits first for the stack that it ends with: that reads dh on the second stream.
static qlora_result qlora__input_backward_run(const qlora__pass* pass, qlora__layer* layer,
                                              int branch, const qlora_tensor* dy,
                                              const qlora_tensor* h, bool wants_dx) {
    qlora_ctx* ctx = pass->ctx;
    qlora_model* m = pass->m;
    const qlora_model_config* c = &m->plan.config;
    const qlora__branch* b = &qlora__branches[branch];
    const qlora_tensor* norm = qlora__branch_norm(m, layer, branch);
    bool later = qlora__stands_beside(m) && branch > 0; // leaves dx to the first branch
    int group = b->in;
    qlora__stack stack;
    QLORA__TRY(qlora__stack_ready(pass, layer, group, true, &stack));
    qlora_tensor in = qlora__local(pass, h, 0, c->hidden);
    qlora_tensor x = qlora__local(pass, &m->work.x, 0, c->hidden + stack.pad);
    qlora_tensor up = qlora__local(pass, dy, 0, stack.out + stack.pad);
    qlora_tensor dx = later ? qlora__slice(pass, &m->work.d_beside, 0, c->hidden)
                            : qlora__local(pass, &m->work.delta, 0, c->hidden);
    bool dora = qlora__stack_is_dora(m, layer, group);
    qlora__skinny k;
    bool skinny = false;
    if (wants_dx) {
        QLORA__TRY(qlora__input_skinny(pass, layer, branch, &stack, &in, &up, &k, &skinny));
    }
    if (skinny) {
        return qlora__input_backward_skinny(pass, layer, branch, &stack, &up, &in, &k);
    }
    if (stack.pad > 0 && (stack.linear.dropout > 0.0f || dora)) { // masks need scratch
        // Unlike below, x is written on the main stream, and the stack before may still read it.
        QLORA__TRY(qlora__beside_wait(ctx, ~0u));
        QLORA__TRY(qlora__stack_input(pass, &stack, group, &in, norm, &x));
        if (dora) {
            QLORA__TRY(qlora__stack_gains_backward(pass, layer, group, &stack, &x, &up));
        }
    } else if (stack.pad > 0 && !qlora__x_is_there(m, layer, branch)) {
        QLORA__TRY(qlora__beside_begin(ctx));
        QLORA__TRY(qlora__beside_end(ctx, group,
                                     qlora__stack_input(pass, &stack, group, &in, norm, &x)));
    }
    QLORA__TRY(qlora__stack_backward(pass, &stack, group, &x, &up, wants_dx ? &dx : NULL));
    QLORA__TRY(qlora__beside_wait(ctx, 1u << b->out));
    return wants_dx && !later ? qlora__input_norm_backward(pass, layer, branch, &in, &dx)
                              : QLORA_OK;
}

// h: the residual stream that the branch reads.
static qlora_result qlora__branch_input_backward(const qlora__pass* pass, qlora__layer* layer,
                                                 int branch, const qlora_tensor* dy,
                                                 const qlora_tensor* h, bool wants_dx) {
    qlora__pass run;
    for (int64_t i = 0; qlora__run_at(pass, i, &run); i++) {
        if (run.rows > 0) {
            QLORA__TRY(qlora__input_backward_run(&run, layer, branch, dy, h, wants_dx));
        }
    }
    return QLORA_OK;
}
