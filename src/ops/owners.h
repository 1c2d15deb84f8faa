// ---- rows of several adapters -------------------------------------------------------------------
//
// Adapters that stand side by side share their products: the columns of z and u belong to one
// adapter each, and so does every row. What a row has in the columns of another adapter is set to
// zero, so that a product of all rows gives each adapter its own.

// See qlora_linear_desc.owners.
struct qlora_linear_owners {
    qlora_tensor rows;         // I32 [1, T]: the adapter of a row; -1 = none
    qlora_tensor columns;      // I32 [1, pad]: the adapter of a column of z or u; -2 = none
    const qlora_tensor* state; // in the backward pass: I32 [1, adapters], see qlora__keep_own
};
typedef struct qlora_linear_owners qlora__linear_owners;

typedef struct qlora__owned_job {
    const qlora_tensor* x;
    const qlora_tensor* inner;
    const qlora__linear_owners* owners;
} qlora__owned_job;

static void qlora__keep_own_rows(void* user, int64_t begin, int64_t end) {
    const qlora__owned_job* job = (const qlora__owned_job*)user;
    for (int64_t r = begin; r < end; r++) {
        int32_t own = qlora__index_at(&job->owners->rows, r);
        bool bad = false;
        for (int64_t c = 0; c < job->x->cols; c++) {
            bool others = qlora__index_at(&job->owners->columns, c) != own;
            bool wrong = !others && job->owners->state != NULL &&
                         !qlora__finite((float)qlora__at(job->x, r, c));
            if (others || wrong) {
                qlora__put(job->x, r, c, 0);
            }
            bad = bad || wrong;
        }
        for (int64_t c = 0; c < job->inner->cols && bad; c++) {
            qlora__put(job->inner, r, c, 0);
        }
        if (bad) {
            ((int32_t*)job->owners->state->data)[own] = 2;
        }
    }
}

// Sets the columns of z or u, the last ones of a matrix, that do not belong to the adapter of their
// row to zero. In a product over all rows, a zero does not stop a value in the columns before them,
// `inner`, that is not finite, and that shows in z and u. With a state, such a row is therefore set
// to zero as a whole, and the state of its adapter becomes 2, which makes its gradients NaN; those
// of other adapters are as if it had no such row.
static qlora_result qlora__keep_own(qlora_ctx* ctx, const qlora__linear_owners* owners,
                                    const qlora_tensor* inner, const qlora_tensor* x) {
    QLORA__TRY(qlora__need(ctx, x, "x", QLORA__IS_F32_BF16, -1, -1));
    QLORA__TRY(qlora__need(ctx, inner, "inner", 1u << x->dtype, x->rows, -1));
    QLORA__TRY(qlora__need_vector(ctx, &owners->rows, "owners.rows", QLORA__IS_I32, x->rows));
    QLORA__TRY(qlora__need_vector(ctx, &owners->columns, "owners.columns", QLORA__IS_I32, x->cols));
    if (qlora__on_cpu(ctx)) {
        qlora__owned_job job;
        job.x = x;
        job.inner = inner;
        job.owners = owners;
        qlora__keep_own_rows(&job, 0, x->rows);
        return QLORA_OK;
    }
    qlora_tensor t = *x;
    qlora_tensor front = *inner;
    void* state = owners->state != NULL ? owners->state->data : NULL;
    QLORA_ASSERT(front.ld == t.ld);
    int32_t cols = (int32_t)t.cols;
    void* rows_of = owners->rows.data;
    void* columns = owners->columns.data;
    void* args[] = {&t.data,  &t.ld,       &t.rows,     &cols, &rows_of,
                    &columns, &front.data, &front.cols, &state};
    return qlora__launch(
        ctx, t.dtype == QLORA_F32 ? QLORA__K_linear_keep_own_f32 : QLORA__K_linear_keep_own_bf16,
        qlora__ceil_div(t.rows * t.cols, 2048), 1, 1, 256, 0, args);
}

// What one adapter has of a gradient of all of them; same layout as share in
// kernels/adapter/linear.cu.
typedef struct qlora__share {
    void* to; // [rows, cols], contiguous
    const void* from;
    int64_t rows;
    int64_t cols;
    int64_t ld; // of from
    float scale;
    int32_t adapter;
} qlora__share;

// Adds every share to the gradient of its adapter: to += scale from. state, as in
// qlora__linear_owners, is 0 for an adapter without rows, whose gradient stays, and 1 or 2 for
// others. shares is a table of `count`; the largest has `most` elements.
static QLORA__UNUSED qlora_result qlora__collect(qlora_ctx* ctx, const qlora_tensor* shares,
                                                 int64_t count, int64_t most,
                                                 const qlora_tensor* state) {
    if (!qlora__on_cpu(ctx)) {
        void* table = shares->data;
        void* flags = state->data;
        void* args[] = {&table, &flags};
        int64_t blocks = qlora__min(qlora__max(qlora__ceil_div(most, 4096), 1), 64);
        return qlora__launch(ctx, QLORA__K_linear_collect, count > 0 ? blocks : 0, count, 1, 256,
                             0, args);
    }
    for (int64_t i = 0; i < count; i++) {
        const qlora__share* s = (const qlora__share*)shares->data + i;
        int32_t how = qlora__index_at(state, s->adapter);
        QLORA__REAL scale = how == 2 ? (QLORA__REAL)NAN : (QLORA__REAL)s->scale;
        if (how == 0) {
            continue;
        }
        for (int64_t j = 0; j < s->rows * s->cols; j++) {
            QLORA__REAL* to = (QLORA__REAL*)s->to + j;
            const QLORA__REAL* from = (const QLORA__REAL*)s->from + j / s->cols * s->ld;
            *to = *to + scale * from[j % s->cols];
        }
    }
    return QLORA_OK;
}
