// ---- trained embeddings and heads ---------------------------------------------------------------

// table[ids[i]] = rows[i]; both have the same type and no gaps between rows, and the ids differ.
static qlora_result qlora__put_rows(qlora_ctx* ctx, const qlora_tensor* rows,
                                    const qlora_tensor* ids, const qlora_tensor* table) {
    if (!qlora__on_cpu(ctx)) {
        void* args[] = {(void*)&rows->data, (void*)&ids->data, (void*)&table->data,
                        (void*)&table->cols};
        return qlora__launch(ctx,
                             table->dtype == QLORA_F32 ? QLORA__K_methods_put_rows_f32
                                                       : QLORA__K_methods_put_rows_bf16,
                             rows->rows, 1, 1, 256, 0, args);
    }
    size_t bytes = (size_t)table->cols * qlora_dtype_bytes(table->dtype);
    for (int64_t i = 0; i < rows->rows; i++) {
        memcpy((char*)table->data + (size_t)qlora__index_at(ids, i) * bytes,
               (const char*)rows->data + (size_t)i * bytes, bytes);
    }
    return QLORA_OK;
}

// The row of d that the gradient of token `id` belongs to; -1 = none.
static int64_t qlora__embed_row(const qlora_tensor* rows, int32_t id) {
    for (int64_t i = 0; rows != NULL && i < rows->cols; i++) {
        if (qlora__index_at(rows, i) == id) {
            return i;
        }
    }
    return rows == NULL ? (int64_t)id : -1;
}

// d[id] += scale * dy[t] for every token t of that id; with rows, row i of d belongs to id rows[i],
// and other tokens have no gradient. d is f32.
static qlora_result qlora__embed_gradient(qlora_ctx* ctx, const qlora_tensor* dy,
                                          const qlora_tensor* ids, const qlora_tensor* rows,
                                          float scale, const qlora_tensor* d) {
    if (!qlora__on_cpu(ctx)) {
        void* wanted = rows != NULL ? rows->data : NULL;
        void* args[] = {(void*)&dy->data, (void*)&dy->ld, (void*)&ids->data, (void*)&dy->rows,
                        &wanted,          &scale,         (void*)&d->data,   (void*)&dy->cols};
        return qlora__launch(ctx,
                             dy->dtype == QLORA_F32 ? QLORA__K_methods_embed_gradient_f32
                                                    : QLORA__K_methods_embed_gradient_bf16,
                             rows != NULL ? rows->cols : dy->rows, 1, 1, 256, 0, args);
    }
    for (int64_t t = 0; t < dy->rows; t++) {
        int64_t row = qlora__embed_row(rows, qlora__index_at(ids, t));
        for (int64_t c = 0; c < dy->cols && row >= 0; c++) {
            QLORA__REAL x = qlora__at(dy, t, c) * (QLORA__REAL)scale;
            qlora__put(d, row, c, qlora__at(d, row, c) + x);
        }
    }
    return QLORA_OK;
}

// d[i] += scale * (sum over r of g[r, rows[i]] x[r]): the gradient of some rows of the head. d is
// f32.
static qlora_result qlora__head_gradient(qlora_ctx* ctx, const qlora_tensor* g,
                                         const qlora_tensor* x, const qlora_tensor* rows,
                                         float scale, const qlora_tensor* d) {
    if (!qlora__on_cpu(ctx)) {
        void* args[] = {(void*)&g->data, (void*)&g->ld,   (void*)&x->data,
                        (void*)&x->ld,   (void*)&g->rows, (void*)&rows->data,
                        &scale,          (void*)&d->data, (void*)&x->cols};
        return qlora__launch(ctx,
                             g->dtype == QLORA_F32 ? QLORA__K_methods_head_gradient_f32
                                                   : QLORA__K_methods_head_gradient_bf16,
                             rows->cols, 1, 1, 256, 0, args);
    }
    for (int64_t i = 0; i < rows->cols; i++) {
        int64_t id = qlora__index_at(rows, i);
        for (int64_t c = 0; c < x->cols; c++) {
            double sum = 0.0;
            for (int64_t r = 0; r < g->rows; r++) {
                sum += (double)qlora__at(g, r, id) * (double)qlora__at(x, r, c);
            }
            double before = (double)qlora__at(d, i, c);
            qlora__put(d, i, c, (QLORA__REAL)(before + sum * (double)scale));
        }
    }
    return QLORA_OK;
}
