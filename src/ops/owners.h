// ---- rows of several adapters -------------------------------------------------------------------
//
// Adapters that stand side by side share their products: the columns of z and u belong to one
// adapter each, and so does every row. What a row has in the columns of another adapter is set to
// zero, so that a product of all rows gives each adapter its own.

// See qlora_linear_desc.owners.
struct qlora_linear_owners {
    qlora_tensor rows;    // I32 [1, T]: the adapter of a row; -1 = none
    qlora_tensor columns; // I32 [1, pad]: the adapter of a column of z or u; -2 = none
};
typedef struct qlora_linear_owners qlora__linear_owners;

typedef struct qlora__owned_job {
    const qlora_tensor* x;
    const qlora__linear_owners* owners;
} qlora__owned_job;

static void qlora__keep_own_rows(void* user, int64_t begin, int64_t end) {
    const qlora__owned_job* job = (const qlora__owned_job*)user;
    for (int64_t r = begin; r < end; r++) {
        int32_t own = qlora__index_at(&job->owners->rows, r);
        for (int64_t c = 0; c < job->x->cols; c++) {
            if (qlora__index_at(&job->owners->columns, c) != own) {
                qlora__put(job->x, r, c, 0);
            }
        }
    }
}

// Sets the columns of z or u that do not belong to the adapter of their row to zero.
static qlora_result qlora__keep_own(qlora_ctx* ctx, const qlora__linear_owners* owners,
                                    const qlora_tensor* x) {
    QLORA__TRY(qlora__need(ctx, x, "x", QLORA__IS_F32_BF16, -1, -1));
    QLORA__TRY(qlora__need_vector(ctx, &owners->rows, "owners.rows", QLORA__IS_I32, x->rows));
    QLORA__TRY(qlora__need_vector(ctx, &owners->columns, "owners.columns", QLORA__IS_I32, x->cols));
    if (qlora__on_cpu(ctx)) {
        qlora__owned_job job;
        job.x = x;
        job.owners = owners;
        qlora__parallel(ctx, x->rows, 1 + 4096 / (1 + x->cols), qlora__keep_own_rows, &job);
        return QLORA_OK;
    }
    qlora_tensor t = *x;
    int32_t cols = (int32_t)t.cols;
    void* rows_of = owners->rows.data;
    void* columns = owners->columns.data;
    void* args[] = {&t.data, &t.ld, &t.rows, &cols, &rows_of, &columns};
    return qlora__launch(
        ctx, t.dtype == QLORA_F32 ? QLORA__K_linear_keep_own_f32 : QLORA__K_linear_keep_own_bf16,
        qlora__ceil_div(t.rows * t.cols, 2048), 1, 1, 256, 0, args);
}

// What one adapter has of a gradient of all of them; same layout as share in kernels/linear.cu.
typedef struct qlora__share {
    void* to; // [rows, cols], contiguous
    const void* from;
    int64_t rows;
    int64_t cols;
    int64_t ld; // of from
    float scale;
    int32_t adapter;
} qlora__share;

// Adds every share to the gradient of its adapter, unless the adapter has no rows: to += scale
// from. shares is a table of `count`; the largest has `most` elements.
static QLORA__UNUSED qlora_result qlora__collect(qlora_ctx* ctx, const qlora_tensor* shares,
                                                 int64_t count, int64_t most,
                                                 const qlora_tensor* present) {
    if (!qlora__on_cpu(ctx)) {
        void* table = shares->data;
        void* flags = present->data;
        void* args[] = {&table, &flags};
        int64_t blocks = qlora__min(qlora__max(qlora__ceil_div(most, 4096), 1), 64);
        return qlora__launch(ctx, QLORA__K_linear_collect, count > 0 ? blocks : 0, count, 1, 256,
                             0, args);
    }
    for (int64_t i = 0; i < count; i++) {
        const qlora__share* s = (const qlora__share*)shares->data + i;
        if (qlora__index_at(present, s->adapter) == 0) {
            continue;
        }
        for (int64_t j = 0; j < s->rows * s->cols; j++) {
            QLORA__REAL* to = (QLORA__REAL*)s->to + j;
            const QLORA__REAL* from = (const QLORA__REAL*)s->from + j / s->cols * s->ld;
            *to = *to + (QLORA__REAL)s->scale * from[j % s->cols];
        }
    }
    return QLORA_OK;
}
