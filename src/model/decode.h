// ---- the key/value cache of decoding ------------------------------------------------------------

// Rows of the cache of a layer: each has the keys, then the values, of a position of a text.
static qlora_tensor qlora__cache_rows(const qlora_model* m, int64_t layer, int64_t first,
                                      int64_t rows) {
    qlora_tensor t = m->texts.kv_cache;
    int64_t row = layer * m->texts.cache_all + first;
    size_t offset = (size_t)(row * t.ld) * qlora_dtype_bytes(t.dtype);
    t.data = (char*)t.data + offset;
    t.bytes -= offset;
    t.rows = rows;
    return t;
}

static qlora_result qlora__cache_store(const qlora__pass* pass, int64_t index) {
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
static qlora_result qlora__cache_attention_rows(const qlora__pass* pass, int64_t index) {
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
static qlora_result qlora__cache_attention(const qlora__pass* pass, int64_t index) {
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
