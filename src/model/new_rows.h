// ---- rows of new tokens -------------------------------------------------------------------------

#define QLORA__MEAN_ROWS 64 // copied to the host at a time

// Finds the first values of rows: the means of rows of one matrix, in double.
typedef struct qlora__row_means {
    qlora_ctx* ctx;
    const qlora_model* m;
    const qlora_tensor* table;
    bool has_all;      // the mean of all rows of the base is known
    double* all;       // [H]
    double* mean;      // [H]
    QLORA__REAL* rows; // [QLORA__MEAN_ROWS, H]
} qlora__row_means;

// Adds `count` rows of the table to sums.
static qlora_result qlora__means_add(const qlora__row_means* f, int64_t row, int64_t count,
                                     double* sums) {
    int64_t n = f->table->cols;
    size_t bytes = (size_t)n * qlora_dtype_bytes(f->table->dtype);
    QLORA__TRY(qlora__copy_out(f->ctx, f->rows, (const char*)f->table->data + (size_t)row * bytes,
                               (size_t)count * bytes));
    for (int64_t i = 0; i < count; i++) {
        for (int64_t c = 0; c < n; c++) {
            sums[c] += (double)qlora__load(f->rows, f->table->dtype, i * n + c);
        }
    }
    return QLORA_OK;
}

static void qlora__means_divide(const qlora__row_means* f, int64_t count, double* sums) {
    for (int64_t c = 0; c < f->table->cols; c++) {
        sums[c] /= (double)count;
    }
}

// The first values of the row of a token; those of a row that no new token names are the mean.
static qlora_result qlora__means_find(qlora__row_means* f, int64_t id, const double** out) {
    const qlora_new_token* token = NULL;
    int64_t base = f->m->plan.base_vocab;
    for (int64_t i = 0; i < f->m->desc.new_token_count; i++) {
        token = f->m->desc.new_tokens[i].id == id ? &f->m->desc.new_tokens[i] : token;
    }
    if (token != NULL && token->from_count > 0) {
        memset(f->mean, 0, (size_t)f->table->cols * sizeof *f->mean);
        for (int64_t i = 0; i < token->from_count; i++) {
            QLORA__TRY(qlora__means_add(f, token->from[i], 1, f->mean));
        }
        qlora__means_divide(f, token->from_count, f->mean);
        *out = f->mean;
        return QLORA_OK;
    }
    for (int64_t row = 0; row < base && !f->has_all; row += QLORA__MEAN_ROWS) {
        QLORA__TRY(qlora__means_add(f, row, qlora__min(QLORA__MEAN_ROWS, base - row), f->all));
    }
    if (!f->has_all) {
        qlora__means_divide(f, base, f->all);
        f->has_all = true;
    }
    *out = f->all;
    return QLORA_OK;
}

// Where the parameters of a token's row are; -1 if it has none.
static int64_t qlora__new_row_at(const qlora_model* m, bool head, int64_t id) {
    if (head ? m->tables.saved_head : m->tables.saved_embed) {
        return (head ? m->tables.head_at : m->tables.embed_at) + id * m->plan.config.hidden;
    }
    for (int64_t i = 0; i < m->tables.token_count && (!head || m->tables.head_rows); i++) {
        if (m->tables.token_ids[i] == id) {
            return (head ? m->tables.head_tokens_at : m->tables.tokens_at) +
                   i * m->plan.config.hidden;
        }
    }
    return -1;
}

// Writes the first values of a row: into the matrix of the base if only a new token has that row,
// and into the parameters once they have been started with the base's.
static qlora_result qlora__new_row_write(qlora__row_means* f, bool head, int64_t id, bool trained) {
    const double* values = NULL;
    int64_t n = f->table->cols;
    int64_t at = trained ? qlora__new_row_at(f->m, head, id) : -1;
    qlora_dtype dtype = trained ? QLORA_F32 : f->table->dtype;
    size_t bytes = (size_t)n * (trained ? sizeof *f->rows : qlora_dtype_bytes(dtype));
    if (trained && at < 0) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__means_find(f, id, &values));
    for (int64_t i = 0; i < n; i++) {
        qlora__store(f->rows, dtype, i, (QLORA__REAL)values[i]);
    }
    if (!trained) {
        return qlora__copy_in(f->ctx, (char*)f->table->data + (size_t)id * bytes, f->rows, bytes);
    }
    qlora_tensor to;
    qlora__arena_window(&f->m->parameters, at, 1, n, &to);
    return qlora__copy_in(f->ctx, to.data, f->rows, bytes);
}

// The rows of one matrix.
static qlora_result qlora__new_rows_of(qlora__row_means* f, bool head, bool trained) {
    const qlora_model* m = f->m;
    for (int64_t i = 0; i < m->desc.new_token_count && trained; i++) {
        QLORA__TRY(qlora__new_row_write(f, head, m->desc.new_tokens[i].id, true));
    }
    for (int64_t id = m->plan.base_vocab; id < m->plan.config.vocab && !trained; id++) {
        QLORA__TRY(qlora__new_row_write(f, head, id, false));
    }
    return QLORA_OK;
}

// Starts the rows of new tokens: first those of the base, then the trained ones.
static qlora_result qlora__new_rows_start(qlora_ctx* ctx, const qlora_model* m, bool trained) {
    if (trained ? m->desc.new_token_count == 0 : m->plan.base_vocab == m->plan.config.vocab) {
        return QLORA_OK;
    }
    size_t n = (size_t)m->plan.config.hidden;
    size_t sums = 2 * n * sizeof(double);
    size_t rows = QLORA__MEAN_ROWS * n * sizeof(QLORA__REAL);
    qlora__row_means f;
    memset(&f, 0, sizeof f);
    f.ctx = ctx;
    f.m = m;
    f.rows = (QLORA__REAL*)qlora__alloc(ctx, rows);
    f.all = f.rows != NULL ? (double*)qlora__alloc_zero(ctx, sums) : NULL;
    qlora_result r = f.all != NULL ? QLORA_OK : QLORA_ERR_MEMORY;
    bool own = trained ? m->tables.saved_head || m->tables.head_rows : !m->plan.config.tied;
    for (int head = 0; head < (own ? 2 : 1) && r == QLORA_OK; head++) {
        memset(f.all, 0, sums);
        f.mean = f.all + n;
        f.has_all = false;
        f.table = head == 1 ? &m->base.head : &m->base.embed;
        r = qlora__new_rows_of(&f, head == 1, trained);
    }
    qlora__free(ctx, f.all, sums);
    qlora__free(ctx, f.rows, rows);
    return r;
}
