// ---- softmax attention --------------------------------------------------------------------------
//
// q, k and v, their norms and rotation, attention, o.

// The inputs of attention.
typedef struct qlora__heads {
    qlora_attention_desc desc;
    qlora_tensor q;
    qlora_tensor k;
    qlora_tensor v;
} qlora__heads;

static qlora__heads qlora__heads_of(const qlora__pass* pass, const qlora__layer* layer) {
    const qlora_model_config* c = &pass->m->plan.config;
    int64_t q = qlora__q_width(c);
    int64_t kv = qlora__kv_width(c);
    const qlora_tensor* rotated = c->qk_norm ? &layer->kept.qk : &layer->kept.qkv;
    qlora__heads h;
    memset(&h, 0, sizeof h);
    h.desc.heads = c->heads;
    h.desc.kv_heads = c->kv_heads;
    h.desc.head_dim = c->head_dim;
    h.desc.window = layer->sliding ? c->window : 0;
    h.desc.scale = (float)c->attention_scale;
    h.desc.cap = (float)c->attention_cap;
    h.desc.longest = pass->m->plan.max_length;
    h.q = qlora__window(rotated, pass->rows, 0, q);
    h.k = qlora__window(rotated, pass->rows, q, kv);
    h.v = qlora__window(&layer->kept.qkv, pass->rows, q + kv, kv);
    return h;
}

// Rotates q and k, which are the first columns of x, or, backward, their gradients; before that, a
// bias is added to all columns of x. If q is scaled by its position, its table contains the factor.
static qlora_result qlora__softmax_rotate(const qlora__pass* pass, const qlora__layer* layer,
                                        const qlora_tensor* x, const qlora_tensor* bias,
                                        bool backward) {
    qlora_model* m = pass->m;
    const qlora_model_config* c = &m->plan.config;
    int64_t q = qlora__q_width(c);
    qlora_tensor angles = qlora__window(&m->batch.angles, 1, pass->row, pass->rows);
    const qlora_tensor* table = layer->sliding ? &m->base.rope_sliding : &m->base.rope;
    qlora_rotation_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.head_dim = c->head_dim;
    desc.neighbours = (m->arch->has & QLORA__HAS_PAIRED_ROPE) != 0;
    desc.backward = backward;
    desc.heads = layer->no_rope ? 0 : c->heads + c->kv_heads;
    if (desc.heads == 0 && bias == NULL) {
        return QLORA_OK;
    }
    if (desc.heads == 0 || !qlora__scales_queries(m)) {
        return qlora_rope_apply(pass->ctx, &desc, x, &angles, table, bias, &m->flag);
    }
    qlora_tensor x_q = qlora__window(x, pass->rows, 0, q);
    qlora_tensor x_rest = qlora__window(x, pass->rows, q, x->cols - q);
    qlora_tensor bias_q;
    qlora_tensor bias_rest;
    if (bias != NULL) {
        bias_q = qlora__window(bias, 1, 0, q);
        bias_rest = qlora__window(bias, 1, q, x->cols - q);
    }
    desc.heads = c->heads;
    QLORA__TRY(qlora_rope_apply(pass->ctx, &desc, &x_q, &angles, &m->base.rope_query,
                                bias != NULL ? &bias_q : NULL, &m->flag));
    desc.heads = c->kv_heads;
    return qlora_rope_apply(pass->ctx, &desc, &x_rest, &angles, table,
                            bias != NULL ? &bias_rest : NULL, &m->flag);
}

// Normalised input in m->work.x -> rotated q, k and v.
static qlora_result qlora__softmax_qkv(const qlora__pass* pass, qlora__layer* layer) {
    qlora_ctx* ctx = pass->ctx;
    qlora_model* m = pass->m;
    const qlora_model_config* c = &m->plan.config;
    int64_t q = qlora__q_width(c);
    int64_t kv = qlora__kv_width(c);
    qlora_tensor rotated = qlora__slice(pass, &layer->kept.qkv, 0, q + 2 * kv);
    QLORA__TRY(qlora__stack_forward(pass, layer, QLORA__QKV, &m->work.x, &rotated));
    const qlora_tensor* bias = c->qkv_bias && !c->qk_norm ? &layer->qkv_bias : NULL;
    if (c->qk_norm) {
        const struct {
            int64_t at;
            int64_t width;
            const qlora_tensor* weight;
        } parts[] = {{0, q, &layer->norms[QLORA__NORM_Q]}, {q, kv, &layer->norms[QLORA__NORM_K]}};
        for (int i = 0; i < 2; i++) {
            qlora_tensor from = qlora__slice(pass, &layer->kept.qkv, parts[i].at, parts[i].width);
            qlora_tensor to = qlora__slice(pass, &layer->kept.qk, parts[i].at, parts[i].width);
            QLORA__TRY(qlora_rmsnorm_forward(ctx, &from, parts[i].weight, (float)c->rms_eps, &to));
        }
        rotated = qlora__slice(pass, &layer->kept.qk, 0, q + kv);
    }
    return qlora__softmax_rotate(pass, layer, &rotated, bias, false);
}

// Input of a layer -> rotated q, k and v, tile by tile.
static qlora_result qlora__softmax_in(const qlora__pass* pass, qlora__layer* layer, bool again) {
    qlora_model* m = pass->m;
    qlora__tiles_begin(pass);
    for (int64_t at = 0; at < pass->rows; at += qlora__tile_rows(m)) {
        qlora__pass tile = qlora__tile_at(pass, at);
        if (again || m->plan.tile > 0) {
            qlora_tensor h = qlora__slice(&tile, &layer->kept.h, 0, m->plan.config.hidden);
            QLORA__TRY(qlora__beside_wait(pass->ctx, 1u << QLORA__QKV)); // z in x
            QLORA__TRY(
                qlora__layer_input(&tile, &h, qlora__layer_norm(m, layer, QLORA__NORM_ATTENTION)));
        }
        QLORA__TRY(qlora__softmax_qkv(&tile, layer));
        // Those that are recomputed later share the memory of z.
        if (again || !layer->recompute || layer->keeps_heads) {
            QLORA__TRY(qlora__stack_keep_z(&tile, layer, QLORA__QKV, &m->work.x));
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__softmax_mix(const qlora__pass* pass, qlora__layer* layer) {
    const qlora_model_config* c = &pass->m->plan.config;
    qlora__heads heads = qlora__heads_of(pass, layer);
    qlora_tensor o = qlora__window(&layer->kept.o, pass->rows, 0, qlora__q_width(c));
    qlora_tensor lse = layer->kept.lse;
    lse.cols = pass->rows;
    lse.ld = pass->rows;
    qlora_tensor seqs = qlora__pass_seqs(pass);
    return qlora_attention_forward(pass->ctx, &heads.desc, &heads.q, &heads.k, &heads.v, &seqs, &o,
                                   &lse);
}

// The output of attention -> that of the branch.
static qlora_result qlora__softmax_out(const qlora__pass* pass, qlora__layer* layer,
                                       const qlora_tensor* o) {
    qlora_tensor* out = qlora__branch_out(pass->m, layer, QLORA__ATTENTION);
    QLORA__TRY(qlora__stack_forward(pass, layer, QLORA__O, o, out));
    return qlora__offload_begin(pass, layer, QLORA__OFFLOAD_O);
}

// Backward pass of the norms of q and k, in m->work.dqkv. With a weight gradient, the result must
// not overwrite dy, so it is computed in d_o and copied.
static qlora_result qlora__softmax_norms_backward(const qlora__pass* pass, qlora__layer* layer) {
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
        qlora_tensor d = qlora__slice(pass, &m->work.dqkv, parts[i].at, parts[i].width);
        if (!m->desc.train_norms) {
            QLORA__TRY(qlora_rmsnorm_backward(ctx, &d, &raw, w, eps, NULL, &d, NULL));
            continue;
        }
        qlora_tensor through = qlora__slice(pass, &m->work.d_o, 0, parts[i].width);
        QLORA__TRY(qlora_rmsnorm_backward(ctx, &d, &raw, w, eps, NULL, &through,
                                          &layer->d_norms[parts[i].norm]));
        QLORA__TRY(qlora_scale(ctx, 1.0f, &through, &d));
    }
    return QLORA_OK;
}

// Backward pass of o_proj: d_out -> the gradient of the output of attention in m->work.d_o.
static qlora_result qlora__softmax_out_run(const qlora__pass* pass, qlora__layer* layer) {
    qlora_model* m = pass->m;
    int64_t q = qlora__q_width(&m->plan.config);
    qlora__stack stack;
    QLORA__TRY(qlora__stack_ready(pass, layer, QLORA__O, true, &stack));
    qlora_tensor x = qlora__slice(pass, &layer->kept.o, 0, q + stack.pad);
    qlora_tensor dy = qlora__layer_d_out(pass, stack.out + stack.pad);
    qlora_tensor d_o = qlora__slice(pass, &m->work.d_o, 0, q);
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

static qlora_result qlora__softmax_out_backward(const qlora__pass* pass, qlora__layer* layer) {
    qlora__pass run;
    QLORA__TRY(qlora__branch_out_backward(pass, layer, QLORA__ATTENTION));
    for (int64_t i = 0; qlora__run_at(pass, i, &run); i++) {
        if (run.rows > 0) {
            QLORA__TRY(qlora__softmax_out_run(&run, layer));
        }
    }
    return QLORA_OK;
}

// d_o -> gradients of q, k and v, normalised and rotated, in m->work.dqkv.
static qlora_result qlora__softmax_mix_backward(const qlora__pass* pass, qlora__layer* layer) {
    qlora_ctx* ctx = pass->ctx;
    qlora_model* m = pass->m;
    const qlora_model_config* c = &m->plan.config;
    int64_t q = qlora__q_width(c);
    int64_t kv = qlora__kv_width(c);
    QLORA__TRY(qlora__beside_wait(ctx, 1u << QLORA__QKV));
    qlora__heads heads = qlora__heads_of(pass, layer);
    qlora_tensor o = qlora__window(&layer->kept.o, pass->rows, 0, q);
    qlora_tensor d_o = qlora__window(&m->work.d_o, pass->rows, 0, q);
    qlora_tensor lse = layer->kept.lse;
    lse.cols = pass->rows;
    lse.ld = pass->rows;
    qlora_tensor dq = qlora__window(&m->work.dqkv, pass->rows, 0, q);
    qlora_tensor dk = qlora__window(&m->work.dqkv, pass->rows, q, kv);
    qlora_tensor dv = qlora__window(&m->work.dqkv, pass->rows, q + kv, kv);
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
    a.stats = m->work.stats.data;
    QLORA__ENTER(ctx, "qlora_attention_backward"); // frees the scratch on return
    return qlora__leave(ctx, qlora__attention_backward(ctx, &heads.desc, &a));
}

// Whether the rotation writes the codes of dy of q, k and v for the product after it: it is the
// last thing before that and takes all columns of a head, in pairs half of it apart.
static bool qlora__rotation_writes_codes(const qlora__pass* pass, const qlora__layer* layer) {
    const qlora_model* m = pass->m;
    const qlora_model_config* c = &m->plan.config;
    int64_t rotated = qlora__q_width(c) + qlora__kv_width(c);
    return m->on_gpu && qlora__is_fp8(m) && m->compute == QLORA_BF16 && !m->dora &&
           m->desc.dropout == 0.0f && !qlora__pass_has_runs(pass) && !c->qk_norm &&
           !layer->no_rope && !qlora__scales_queries(m) &&
           (m->arch->has & QLORA__HAS_PAIRED_ROPE) == 0 && m->base.rope.cols == c->head_dim &&
           c->head_dim % 16 == 0 && rotated / 2 <= QLORA__ROPE_CODED;
}

// Gradients of q, k and v -> those before norm and rotation.
static qlora_result qlora__softmax_in_backward(const qlora__pass* pass, qlora__layer* layer) {
    qlora_model* m = pass->m;
    const qlora_model_config* c = &m->plan.config;
    if (qlora__rotation_writes_codes(pass, layer)) {
        int64_t cols = qlora__q_width(c) + 2 * qlora__kv_width(c);
        qlora_tensor all = qlora__slice(pass, &m->work.dqkv, 0, cols);
        qlora_tensor angles = qlora__window(&m->batch.angles, 1, pass->row, pass->rows);
        return qlora__rope_coded(pass->ctx, &all, c->heads + c->kv_heads, &angles,
                                 layer->sliding ? &m->base.rope_sliding : &m->base.rope, &m->flag,
                                 qlora__codes_note(pass, layer, QLORA__QKV, true));
    }
    qlora_tensor rotated =
        qlora__slice(pass, &pass->m->work.dqkv, 0, qlora__q_width(c) + qlora__kv_width(c));
    QLORA__TRY(qlora__softmax_rotate(pass, layer, &rotated, NULL, true));
    return c->qk_norm ? qlora__softmax_norms_backward(pass, layer) : QLORA_OK;
}
