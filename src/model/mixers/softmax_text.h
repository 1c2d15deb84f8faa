// ---- softmax attention of texts -----------------------------------------------------------------
//
// What it needs of a text in flight: the keys and values of its positions, in the cache. Passes of
// operators attend to them, and steps on the device.

static qlora_result qlora__softmax_store(const qlora__pass* pass, int64_t index) {
    qlora__heads heads = qlora__heads_of(pass, &pass->m->layers[index]);
    qlora_tensor rows = qlora__cache_rows(pass->m, index, pass->cache + pass->first, pass->rows);
    int64_t kv = heads.k.cols;
    qlora_tensor keys = qlora__window(&rows, pass->rows, 0, kv);
    qlora_tensor values = qlora__window(&rows, pass->rows, kv, kv);
    QLORA__TRY(qlora_scale(pass->ctx, 1.0f, &heads.k, &keys));
    return qlora_scale(pass->ctx, 1.0f, &heads.v, &values);
}

// A batch of `heads` matrices [rows, cols], `stride` elements apart.
static qlora_tensor qlora__as_heads(const qlora_tensor* t, int64_t heads, int64_t stride,
                                    int64_t rows, int64_t cols, int64_t ld) {
    qlora_tensor v = *t;
    v.batch = heads;
    v.batch_stride = stride;
    v.rows = rows;
    v.cols = cols;
    v.ld = ld;
    return v;
}

// Attention of all rows of the pass over the cache.
static qlora_result qlora__softmax_text_rows(const qlora__pass* pass, int64_t index) {
    qlora_model* m = pass->m;
    qlora__layer* layer = &m->layers[index];
    int64_t keys = pass->first + pass->rows;
    qlora__heads heads = qlora__heads_of(pass, layer);
    qlora_tensor rows = qlora__cache_rows(m, index, pass->cache, keys);
    qlora_tensor k = qlora__window(&rows, keys, 0, heads.k.cols);
    qlora_tensor v = qlora__window(&rows, keys, heads.k.cols, heads.k.cols);
    qlora_tensor o = qlora__window(&layer->kept.o, pass->rows, 0, heads.q.cols);
    qlora_tensor lse = layer->kept.lse;
    lse.cols = pass->rows;
    lse.ld = pass->rows;
    qlora_tensor seqs = qlora__pass_seqs(pass);
    qlora__attention a;
    memset(&a, 0, sizeof a);
    a.before = pass->first;
    a.q = &heads.q;
    a.k = &k;
    a.v = &v;
    a.seqs = &seqs;
    a.o = &o;
    a.lse = &lse;
    return qlora__attention_forward(pass->ctx, &heads.desc, &a);
}

// Attention of the only query of the pass over the cache. Query heads that share a key head are the
// rows of one matrix, so that one product per key head is enough:
//
//   s = scale q K^T, with the cap of the family; p = softmax(s), o = p V
//
// over the positions within the window of the layer.
static qlora_result qlora__softmax_text_row(const qlora__pass* pass, int64_t index) {
    qlora_ctx* ctx = pass->ctx;
    int64_t position = pass->first;
    qlora_model* m = pass->m;
    qlora__layer* layer = &m->layers[index];
    const qlora_model_config* c = &m->plan.config;
    int64_t d = c->head_dim;
    int64_t group = c->heads / c->kv_heads;
    qlora__heads heads = qlora__heads_of(pass, layer);
    int64_t window = heads.desc.window > 0 ? heads.desc.window : position + 1;
    int64_t seen = qlora__min(position + 1, window);
    qlora_tensor rows = qlora__cache_rows(m, index, pass->cache + position + 1 - seen, seen);
    qlora_tensor values = qlora__window(&rows, seen, heads.k.cols, heads.k.cols);
    qlora_tensor k = qlora__as_heads(&rows, c->kv_heads, d, seen, d, rows.ld);
    qlora_tensor v = qlora__as_heads(&values, c->kv_heads, d, seen, d, rows.ld);
    qlora_tensor q = qlora__as_heads(&heads.q, c->kv_heads, group * d, group, d, d);
    qlora_tensor o = qlora__as_heads(&layer->kept.o, c->kv_heads, group * d, group, d, d);
    qlora_tensor s = qlora__as_heads(&m->texts.scores, c->kv_heads, group * m->texts.scores.ld,
                                     group, seen, m->texts.scores.ld);
    qlora_tensor p = qlora__as_heads(&m->texts.chances, c->kv_heads, group * m->texts.chances.ld,
                                     group, seen, m->texts.chances.ld);
    qlora_gemm_desc gemm;
    memset(&gemm, 0, sizeof gemm);
    gemm.trans_b = true;
    gemm.alpha = heads.desc.scale > 0.0f ? heads.desc.scale : 1.0f / sqrtf((float)d);
    // Exact fp32, as in attention over many rows.
    QLORA__TRY(qlora__gemm_run(ctx, QLORA_MATH_F32, false, &gemm, &q, &k, &s));
    qlora_tensor flat_s = qlora__window(&m->texts.scores, c->heads, 0, seen);
    qlora_tensor flat_p = qlora__window(&m->texts.chances, c->heads, 0, seen);
    if (heads.desc.cap > 0.0f) {
        QLORA__TRY(qlora_cap(ctx, heads.desc.cap, &flat_s, &flat_s));
    }
    QLORA__TRY(qlora_softmax_forward(ctx, &flat_s, &flat_s));
    if (m->compute != QLORA_F32) { // otherwise both are the same memory
        QLORA__TRY(qlora_cast(ctx, &flat_s, &flat_p));
    }
    gemm.trans_b = false;
    gemm.alpha = 1.0f;
    return qlora__gemm_run(ctx, QLORA_MATH_F32, false, &gemm, &p, &v, &o);
}

// Rows that continue a text: they see the cache, which already has the keys and values of all of
// them.
static qlora_result qlora__softmax_text(const qlora__pass* pass, int64_t index) {
    return pass->rows > 1 ? qlora__softmax_text_rows(pass, index)
                          : qlora__softmax_text_row(pass, index);
}

#ifndef QLORA_NO_CUDA

// Attention of many texts. A block takes several pages, unless blocks would be too few.
static qlora_result qlora__softmax_step_all(const qlora_model* m, const qlora__layer* layer,
                                             const qlora__decode_attention* p) {
    const qlora__decode* d = &m->decode;
    const qlora_linear_part* next = &layer->linears[QLORA__O].parts[0];
    int64_t spans = qlora__ceil_div(2 * m->ctx->gpu->sm_count, d->counters.cols * d->texts);
    qlora__decode_many_attention many;
    memset(&many, 0, sizeof many);
    many.p = *p;
    many.each = (int32_t)qlora__ceil_div(d->pages, qlora__min(spans, d->pages));
    many.all_pages = (int32_t)d->pages;
    many.rows = (int32_t)d->texts;
    many.splits = (int32_t)qlora__decode_apart(m, layer, QLORA__QKV);
    if (many.splits > 1) {
        many.sums = d->split_sums.data;
        many.p.ld = qlora__q_width(&m->plan.config) + 2 * qlora__kv_width(&m->plan.config);
    }
    if (m->use_adapters && next->rank > 0 && qlora__decode_slices(m, QLORA__O) > 1) {
        many.p.a = next->a->data;
        many.p.a_rank = (int32_t)next->rank;
        many.p.z = d->z.data;
    }
    void* args[] = {&many};
    // Of four warps, three stages of 16 keys and values each.
    uint32_t shared = 4 * 3 * 16 * 4 * (uint32_t)p->dim;
    return qlora__decode_launch(m,
                                p->dim == 64 ? QLORA__K_decode_many_attention_64
                                             : QLORA__K_decode_many_attention_128,
                                d->counters.cols, qlora__ceil_div(d->pages, many.each), d->texts,
                                128, shared, args);
}

static qlora__decode_attention qlora__softmax_layers(const qlora_model* m, int64_t index) {
    const qlora_model_config* c = &m->plan.config;
    const qlora__decode* d = &m->decode;
    const qlora__layer* layer = &m->layers[index];
    const qlora_tensor* table = layer->sliding ? &m->base.rope_sliding : &m->base.rope;
    qlora_tensor rows = qlora__cache_rows(m, index, 0, 1);
    qlora__decode_attention p;
    memset(&p, 0, sizeof p);
    p.qkv = d->qkv.data;
    p.ld = d->qkv.ld;
    p.bias = c->qkv_bias && !c->qk_norm ? layer->qkv_bias.data : NULL;
    p.q_norm = c->qk_norm ? layer->norms[QLORA__NORM_Q].data : NULL;
    p.k_norm = c->qk_norm ? layer->norms[QLORA__NORM_K].data : NULL;
    p.norm_heads = (m->arch->has & QLORA__HAS_WIDE_QK_NORM) != 0 ? 0 : 1;
    p.rotary = layer->no_rope ? NULL : table->data; // rows by position: qlora__angle_row
    p.rotary_q = qlora__scales_queries(m) ? m->base.rope_query.data : table->data;
    p.cache = rows.data;
    p.ld_cache = rows.ld;
    p.pages = d->table.data;
    p.texts = d->state.data;
    p.partials = d->partials.data;
    p.counters = d->counters.data;
    p.o = d->o.data;
    p.ldo = d->o.ld;
    p.heads = (int32_t)c->heads;
    p.kv_heads = (int32_t)c->kv_heads;
    p.dim = (int32_t)c->head_dim;
    p.half = (int32_t)c->rope_dims / 2;
    p.neighbours = (m->arch->has & QLORA__HAS_PAIRED_ROPE) != 0 ? 1 : 0;
    p.window = layer->sliding ? (int32_t)qlora__min(c->window, INT32_MAX) : 0;
    p.chunk = (int32_t)d->chunk;
    p.scale =
        c->attention_scale > 0.0 ? (float)c->attention_scale : 1.0f / sqrtf((float)c->head_dim);
    p.cap = (float)c->attention_cap;
    p.eps = (float)c->rms_eps;
    return p;
}

static qlora_result qlora__softmax_step_mix(const qlora_model* m, int64_t index) {
    const qlora__decode* d = &m->decode;
    const qlora__layer* layer = &m->layers[index];
    qlora__decode_attention p = qlora__softmax_layers(m, index);
    if (qlora__decode_attends_many(m)) {
        return qlora__softmax_step_all(m, layer, &p);
    }
    const qlora_linear_part* o = &layer->linears[QLORA__O].parts[0];
    if (m->use_adapters && o->rank > 0 && qlora__decode_row_fits(m, layer)) {
        p.a = o->a->data;
        p.a_rank = (int32_t)o->rank;
        p.z = d->z.data;
    }
    void* args[] = {&p};
    return qlora__decode_launch(m, QLORA__K_decode_attention, d->counters.cols, d->pages, d->texts,
                                256, (uint32_t)qlora__decode_tiles_shared(m), args);
}

// A step on the device: x -> y.
static qlora_result qlora__softmax_step(qlora_model* m, int64_t index) {
    const qlora__decode* d = &m->decode;
    const qlora__layer* layer = &m->layers[index];
    QLORA__TRY(qlora__decode_product_run(m, layer, QLORA__QKV, &d->x, &d->qkv));
    QLORA__TRY(qlora__softmax_step_mix(m, index));
    return qlora__decode_product_run(m, layer, QLORA__O, &d->o, &d->y);
}

#endif // QLORA_NO_CUDA
