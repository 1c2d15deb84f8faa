// ---- head ---------------------------------------------------------------------------------------

// Chunks of labelled rows: gather, logits, loss; in training their gradient, back into m->delta.
static qlora_result qlora__head(const qlora__pass* pass, int64_t chunks, const qlora_tensor* totals,
                                bool gradient) {
    qlora_ctx* ctx = pass->ctx;
    qlora_model* m = pass->m;
    const qlora_model_config* c = &m->plan.config;
    int64_t C = m->plan.head_chunk;
    qlora_tensor x = qlora__window(&m->x, pass->rows, 0, c->hidden);
    for (int64_t i = 0; i < chunks; i++) {
        qlora_tensor rows = qlora__window(&m->batch.rows, 1, i * C, C);
        qlora_tensor labels = qlora__window(&m->batch.labels, 1, i * C, C);
        qlora_tensor weights = qlora__window(&m->batch.weights, 1, i * C, C);
        qlora_tensor losses = qlora__window(&m->losses, 1, i * C, C);
        QLORA__TRY(qlora_embed(ctx, &x, &rows, &m->rows_x, &m->flag));
        QLORA__TRY(qlora__gemm_named(ctx, pass->math, false, true, false, 0, &m->rows_x, &m->head,
                                     &m->logits));
        qlora_cross_entropy_desc args;
        memset(&args, 0, sizeof args);
        args.logits = &m->logits;
        args.labels = &labels;
        args.weights = &weights;
        args.scale = &m->batch.scale;
        args.losses = &losses;
        args.total = totals;
        args.flag = &m->flag;
        args.forward_only = !gradient;
        QLORA__TRY(qlora_cross_entropy(ctx, &args));
        if (gradient) {
            qlora_tensor dx = m->rows_dx;
            dx.data = (char*)dx.data + (size_t)(i * C * dx.ld) * qlora_dtype_bytes(dx.dtype);
            dx.bytes -= (size_t)(i * C * dx.ld) * qlora_dtype_bytes(dx.dtype);
            dx.rows = C;
            QLORA__TRY(qlora__gemm_named(ctx, pass->math, false, false, true, 0, &m->logits,
                                         &m->head, &dx));
        }
    }
    if (!gradient) {
        return QLORA_OK;
    }
    qlora_tensor inverse = qlora__window(&m->batch.inverse, 1, 0, pass->rows);
    qlora_tensor dx = qlora__window(&m->delta, pass->rows, 0, c->hidden);
    return qlora_embed(ctx, &m->rows_dx, &inverse, &dx, &m->flag);
}

// ---- decoding -----------------------------------------------------------------------------------

// The keys and values of a layer's cache: row p is position p, keys first.
static qlora_tensor qlora__cache_rows(const qlora_model* m, int64_t layer, int64_t first,
                                      int64_t rows) {
    qlora_tensor t = m->kv_cache;
    size_t offset =
        (size_t)((layer * m->train.generate_tokens + first) * t.ld) * qlora_dtype_bytes(t.dtype);
    t.data = (char*)t.data + offset;
    t.bytes -= offset;
    t.rows = rows;
    return t;
}

static qlora_result qlora__cache_store(const qlora__pass* pass, int64_t index, int64_t first) {
    qlora__heads heads = qlora__heads_of(pass, &pass->m->layers[index]);
    qlora_tensor rows = qlora__cache_rows(pass->m, index, first, pass->rows);
    int64_t kv = heads.k.cols;
    qlora_tensor keys = qlora__window(&rows, pass->rows, 0, kv);
    qlora_tensor values = qlora__window(&rows, pass->rows, kv, kv);
    QLORA__TRY(qlora_scale(pass->ctx, 1.0f, &heads.k, &keys));
    return qlora_scale(pass->ctx, 1.0f, &heads.v, &values);
}

// `heads` matrices [rows, cols] that lie `stride` elements apart.
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

// Attention of one query, at `position`, over the cache. Query heads that share a key head are the
// rows of one matrix, so a product per key head serves them all:
//   s = scale q K^T, p = softmax(s), o = p V, over the positions inside the layer's window.
static qlora_result qlora__cache_attention(const qlora__pass* pass, int64_t index,
                                           int64_t position) {
    qlora_ctx* ctx = pass->ctx;
    qlora_model* m = pass->m;
    qlora__layer* layer = &m->layers[index];
    const qlora_model_config* c = &m->plan.config;
    int64_t d = c->head_dim;
    int64_t group = c->heads / c->kv_heads;
    qlora__heads heads = qlora__heads_of(pass, layer);
    int64_t window = heads.desc.window > 0 ? heads.desc.window : position + 1;
    int64_t seen = qlora__min(position + 1, window);
    qlora_tensor rows = qlora__cache_rows(m, index, position + 1 - seen, seen);
    qlora_tensor values = qlora__window(&rows, seen, heads.k.cols, heads.k.cols);
    qlora_tensor k = qlora__as_heads(&rows, c->kv_heads, d, seen, d, rows.ld);
    qlora_tensor v = qlora__as_heads(&values, c->kv_heads, d, seen, d, rows.ld);
    qlora_tensor q = qlora__as_heads(&heads.q, c->kv_heads, group * d, group, d, d);
    qlora_tensor o = qlora__as_heads(&layer->kept.o, c->kv_heads, group * d, group, d, d);
    qlora_tensor s =
        qlora__as_heads(&m->scores, c->kv_heads, group * m->scores.ld, group, seen, m->scores.ld);
    qlora_tensor p = qlora__as_heads(&m->chances, c->kv_heads, group * m->chances.ld, group, seen,
                                     m->chances.ld);
    qlora_gemm_desc gemm;
    memset(&gemm, 0, sizeof gemm);
    gemm.trans_b = true;
    gemm.alpha = 1.0f / sqrtf((float)d);
    // Exact, as attention over many rows is.
    QLORA__TRY(qlora__gemm_run(ctx, QLORA_MATH_F32, false, &gemm, &q, &k, &s));
    qlora_tensor flat_s = qlora__window(&m->scores, c->heads, 0, seen);
    qlora_tensor flat_p = qlora__window(&m->chances, c->heads, 0, seen);
    QLORA__TRY(qlora_softmax_forward(ctx, &flat_s, &flat_s));
    if (m->compute != QLORA_F32) { // otherwise they are the same memory
        QLORA__TRY(qlora_cast(ctx, &flat_s, &flat_p));
    }
    gemm.trans_b = false;
    gemm.alpha = 1.0f;
    return qlora__gemm_run(ctx, QLORA_MATH_F32, false, &gemm, &p, &v, &o);
}

// pass->rows tokens in m->batch, the first one at position `first`, through the layers; their keys
// and values stay in the cache. Many rows are the beginning of a text and see each other only; one
// row sees the cache.
static qlora_result qlora__generate_pass(const qlora__pass* pass, int64_t first) {
    qlora_ctx* ctx = pass->ctx;
    qlora_model* m = pass->m;
    const qlora_model_config* c = &m->plan.config;
    float eps = (float)c->rms_eps;
    QLORA_ASSERT(first == 0 || pass->rows == 1);
    size_t scratch = qlora__scratch_mark(ctx);
    qlora_tensor ids = qlora__window(&m->batch.ids, 1, 0, pass->rows);
    qlora_tensor h = qlora__window(qlora__stream_before(m, 0), pass->rows, 0, c->hidden);
    qlora_tensor x = qlora__window(&m->x, pass->rows, 0, c->hidden);
    QLORA__TRY(qlora_embed(ctx, &m->embed, &ids, &h, &m->flag));
    QLORA__TRY(qlora_rmsnorm_forward(ctx, &h, qlora__norm_before(m, 0), eps, &x));
    for (int64_t l = 0; l < c->layers; l++) {
        qlora__layer* layer = &m->layers[l];
        QLORA__TRY(qlora__layer_qkv(pass, layer));
        QLORA__TRY(qlora__cache_store(pass, l, first));
        QLORA__TRY(pass->rows > 1 ? qlora__layer_attention(pass, layer)
                                  : qlora__cache_attention(pass, l, first));
        QLORA__TRY(qlora__layer_middle(pass, layer));
        QLORA__TRY(qlora__layer_down(pass, layer));
        qlora_tensor h2 = qlora__window(&layer->kept.h2, pass->rows, 0, c->hidden);
        qlora_tensor delta = qlora__window(&m->delta, pass->rows, 0, c->hidden);
        qlora_tensor next = qlora__window(qlora__stream_before(m, l + 1), pass->rows, 0, c->hidden);
        QLORA__TRY(qlora_rmsnorm_residual_forward(ctx, &h2, &delta, qlora__norm_before(m, l + 1),
                                                  eps, &next, &x));
        qlora__scratch_release(ctx, scratch);
    }
    return QLORA_OK;
}

// Logits of the pass's last row, in the first row of m->logits.
static qlora_result qlora__generate_head(const qlora__pass* pass) {
    qlora_model* m = pass->m;
    qlora_tensor x;
    QLORA__TRY(
        qlora__tensor_view(pass->ctx, &m->x, pass->rows - 1, 1, 0, m->plan.config.hidden, &x));
    qlora_tensor logits = qlora__window(&m->logits, 1, 0, m->plan.config.vocab);
    return qlora__gemm_named(pass->ctx, pass->math, false, true, false, 0, &x, &m->head, &logits);
}
