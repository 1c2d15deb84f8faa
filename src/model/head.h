// ---- head ---------------------------------------------------------------------------------------

// logits = x head^T / divisor, or, backward, dx = dlogits head / divisor.
static qlora_result qlora__head_product(const qlora__pass* pass, bool backward,
                                        const qlora_tensor* from, const qlora_tensor* to) {
    const qlora_model* m = pass->m;
    float alpha = (float)(1.0 / m->plan.config.logits_divisor);
    if (m->base.head_is_nf4) {
        // No weights of a layer are needed until the next layer begins.
        const qlora__coded_way way = {pass->math, backward, 0, alpha, &m->work.operand};
        QLORA__TRY(qlora__operand_wait(pass));
        size_t before = qlora__scratch_mark(pass->ctx);
        qlora_result r = qlora__nf4_multiply(pass->ctx, &way, from, &m->base.head_nf4, to);
        qlora__scratch_release(pass->ctx, before);
        return r;
    }
    qlora_gemm_desc gemm;
    memset(&gemm, 0, sizeof gemm);
    gemm.trans_b = !backward;
    gemm.alpha = alpha;
    return qlora__gemm_run(pass->ctx, pass->math, backward, &gemm, from, qlora__head_table(m), to);
}

// The gradient of a trained head: of the matrix, or of some rows of it. The gradients of the logits
// and the rows that they belong to are in m->work.logits and m->work.rows_x.
static qlora_result qlora__head_gradients(const qlora__pass* pass) {
    const qlora_model* m = pass->m;
    float alpha = (float)(1.0 / m->plan.config.logits_divisor);
    if (m->tables.saved_head || m->tables.saved_tied) {
        return qlora__linear_gemm(pass->ctx, pass->math, QLORA__LINEAR_GRADIENT, alpha, 1.0f,
                                  &m->work.logits, &m->work.rows_x,
                                  m->tables.saved_head ? &m->tables.d_head : &m->tables.d_embed);
    }
    return qlora__head_gradient(
        pass->ctx, &m->work.logits, &m->work.rows_x, &m->tables.token_rows, alpha,
        m->tables.head_rows ? &m->tables.d_head_tokens : &m->tables.d_tokens);
}

// Losses of a chunk whose first labelled row is number `first`: the rows of each adapter have their
// own scale and their own sums. The rows after the last label have none.
static qlora_result qlora__head_runs(const qlora__pass* pass, int64_t first,
                                     const qlora_cross_entropy_desc* all) {
    qlora_model* m = pass->m;
    int64_t count = all->logits->rows;
    for (int64_t i = 0; i <= m->work.run_count; i++) {
        bool rest = i == m->work.run_count;
        const qlora__owned_rows* run = &m->work.runs[rest ? i - 1 : i];
        int64_t from = qlora__max((rest ? run->label_end : run->label) - first, 0);
        int64_t to = rest ? count : qlora__min(run->label_end - first, count);
        if (from >= to) {
            continue;
        }
        qlora_cross_entropy_desc args = *all;
        qlora_tensor logits =
            qlora__window(all->logits, to - from, from * all->logits->ld, all->logits->cols);
        qlora_tensor labels = qlora__window(all->labels, 1, from, to - from);
        qlora_tensor weights = qlora__window(all->weights, 1, from, to - from);
        qlora_tensor losses = qlora__window(all->losses, 1, from, to - from);
        qlora_tensor scale = qlora__window(all->scale, 1, run->adapter, 1);
        const qlora_tensor* sums =
            run->adapter == m->adapter ? &m->totals : &m->owns[run->adapter].totals;
        qlora_tensor totals = qlora__window(sums, 1, 0, 3);
        args.logits = &logits;
        args.labels = &labels;
        args.weights = &weights;
        args.losses = &losses;
        args.scale = &scale;
        args.total = rest ? NULL : &totals;
        QLORA__TRY(qlora_cross_entropy(pass->ctx, &args));
    }
    return QLORA_OK;
}

// The same for adapters that stand side by side, of all rows at once.
static qlora_result qlora__head_owned(const qlora__pass* pass, int64_t first,
                                      const qlora_cross_entropy_desc* all) {
    qlora_model* m = pass->m;
    qlora_cross_entropy_desc args = *all;
    qlora_tensor claims = qlora__window(&m->batch.claims, 1, first, all->logits->rows);
    const qlora_tensor* sums = m->adapter == 0 ? &m->totals : &m->owns[0].totals;
    qlora_tensor totals = qlora__window(sums, 1, 0, 3);
    const qlora__loss_owners owners = {&claims, m->adapters, QLORA__TOTALS_STRIDE};
    args.total = &totals;
    QLORA__ENTER(pass->ctx, "qlora_cross_entropy"); // frees the scratch on return
    return qlora__leave(pass->ctx, qlora__cross_entropy(pass->ctx, &args, &owners));
}

// Chunk i of the labelled rows, from the output of the final norm, which may have only those. With
// tiles, only the rows of the chunk are normalised.
static qlora_result qlora__head_gather(const qlora__pass* pass, int64_t i) {
    qlora_model* m = pass->m;
    const qlora_model_config* c = &m->plan.config;
    int64_t C = m->plan.head_chunk;
    bool tiled = m->plan.tile > 0;
    if (pass->labelled > 0) {
        int64_t rows = qlora__min(C, pass->labelled - i * C);
        qlora_tensor some = qlora__window(&m->work.x, rows, i * C * m->work.x.ld, c->hidden);
        qlora_tensor copy = qlora__window(&m->work.rows_x, rows, 0, c->hidden);
        if (rows < C) { // the others have no label
            QLORA__TRY(qlora__tensor_zero(pass->ctx, &m->work.rows_x));
        }
        return qlora_scale(pass->ctx, 1.0f, &some, &copy);
    }
    qlora_tensor x = qlora__window(tiled ? &m->work.last_h : &m->work.x, pass->rows, 0, c->hidden);
    qlora_tensor rows = qlora__window(&m->batch.rows, 1, i * C, C);
    QLORA__TRY(qlora_embed(pass->ctx, &x, &rows, &m->work.rows_x, &m->flag));
    return tiled ? qlora__stream_norm(pass, &m->work.rows_x, &m->base.final_norm, &m->work.rows_x)
                 : QLORA_OK;
}

// Chunk i of the labelled rows: gathers them and computes logits and losses, whose sums are added
// to totals; with `gradient`, also computes the gradient of the rows, in rows_dx.
static qlora_result qlora__head_chunk(const qlora__pass* pass, int64_t i,
                                      const qlora_tensor* totals, bool gradient) {
    qlora_ctx* ctx = pass->ctx;
    qlora_model* m = pass->m;
    const qlora_model_config* c = &m->plan.config;
    int64_t C = m->plan.head_chunk;
    qlora_tensor labels = qlora__window(&m->batch.labels, 1, i * C, C);
    qlora_tensor weights = qlora__window(&m->batch.weights, 1, i * C, C);
    qlora_tensor losses = qlora__window(&m->work.losses, 1, i * C, C);
    pass->flow->placed_layer = 0;             // the logits are in the memory of the operand
    QLORA__TRY(qlora__beside_wait(ctx, ~0u)); // z of the last layer is in that of s
    QLORA__TRY(qlora__head_gather(pass, i));
    QLORA__TRY(qlora__head_product(pass, false, &m->work.rows_x, &m->work.logits));
    qlora_cross_entropy_desc args;
    memset(&args, 0, sizeof args);
    args.logits = &m->work.logits;
    args.labels = &labels;
    args.weights = &weights;
    qlora_tensor scale = qlora__window(&m->batch.scale, 1, 0, 1);
    args.scale = gradient && qlora__pass_is_shared(pass) ? &m->batch.scale : &scale;
    args.losses = &losses;
    args.total = totals;
    args.flag = &m->flag;
    args.forward_only = !gradient;
    args.cap = (float)c->logits_cap;
    bool own = QLORA__TRAINS && gradient;
    QLORA__TRY(own && qlora__pass_is_wide(pass)    ? qlora__head_owned(pass, i * C, &args)
               : own && qlora__pass_has_runs(pass) ? qlora__head_runs(pass, i * C, &args)
                                                   : qlora_cross_entropy(ctx, &args));
    if (QLORA__TRAINS && gradient) {
        qlora_tensor dx = m->work.rows_dx;
        dx.data = (char*)dx.data + (size_t)(i * C * dx.ld) * qlora_dtype_bytes(dx.dtype);
        dx.bytes -= (size_t)(i * C * dx.ld) * qlora_dtype_bytes(dx.dtype);
        dx.rows = C;
        QLORA__TRY(qlora__head_product(pass, true, &m->work.logits, &dx));
        if (qlora__trains_head(m)) {
            QLORA__TRY(qlora__head_gradients(pass));
        }
    }
    return QLORA_OK;
}

// Copies the gradients of the labelled rows to their tokens in m->work.delta; other tokens get
// zero.
static qlora_result qlora__head_spread(const qlora__pass* pass) {
    qlora_model* m = pass->m;
    qlora_tensor inverse = qlora__window(&m->batch.inverse, 1, pass->row, pass->rows);
    qlora_tensor dx = qlora__window(&m->work.delta, pass->rows, 0, m->plan.config.hidden);
    return qlora_embed(pass->ctx, &m->work.rows_dx, &inverse, &dx, &m->flag);
}

// Zeroes the row of tokens without a label: the memory has had another use since.
static qlora_result qlora__head_clear(const qlora__pass* pass) {
    const qlora_tensor* all = &pass->m->work.rows_dx;
    qlora_tensor row = qlora__window(all, 1, (all->rows - 1) * all->ld, all->cols);
    return qlora__tensor_zero(pass->ctx, &row);
}

static qlora_result qlora__head_end(const qlora__pass* pass) {
    if (pass->m->plan.tile > 0 || pass->labelled > 0) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__head_clear(pass));
    return qlora__head_spread(pass);
}

static qlora_result qlora__head(const qlora__pass* pass, int64_t chunks, const qlora_tensor* totals,
                                bool gradient) {
    for (int64_t i = 0; i < chunks; i++) {
        QLORA__TRY(qlora__head_chunk(pass, i, totals, gradient));
        pass->flow->passed++;
    }
    return QLORA__TRAINS && gradient ? qlora__head_end(pass) : QLORA_OK;
}

// Computes the logits of some rows of the pass, into the first rows of m->work.logits.
static qlora_result qlora__head_logits(const qlora__pass* pass, int64_t first, int64_t rows) {
    qlora_model* m = pass->m;
    qlora_tensor x;
    const qlora_tensor* from = m->plan.tile > 0 ? &m->work.last_h : &m->work.x;
    QLORA__TRY(qlora__tensor_view(pass->ctx, from, first, rows, 0, m->plan.config.hidden, &x));
    if (m->plan.tile > 0) {
        qlora_tensor h = x;
        x = qlora__window(&m->work.rows_x, rows, 0, m->plan.config.hidden);
        QLORA__TRY(qlora__stream_norm(pass, &h, &m->base.final_norm, &x));
    }
    qlora_tensor logits = qlora__window(&m->work.logits, rows, 0, m->plan.config.vocab);
    pass->flow->placed_layer = 0; // the logits may be where the operands were
    QLORA__TRY(qlora__head_product(pass, false, &x, &logits));
    float cap = (float)m->plan.config.logits_cap;
    return cap > 0.0f ? qlora_cap(pass->ctx, cap, &logits, &logits) : QLORA_OK;
}
