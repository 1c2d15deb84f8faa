// ---- dropout ------------------------------------------------------------------------------------
//
//   y = x keep / (1 - p)
//
// keep is 1 if the element's random word is at least p 2^32, and 0 otherwise. The word of column c
// is number c % 4 of philox(counter, key), with
//   counter = (c / 4, position, sequence, layer 2^8 + projection)
//   key = seed + step * 0x9e3779b97f4a7c15

typedef struct qlora__dropout_job {
    const qlora_dropout_desc* args;
    uint32_t threshold;
    uint32_t where;
    float scale;
} qlora__dropout_job;

// Dropped elements are 0 even where x is not finite.
static void qlora__dropout_row(const qlora__dropout_job* job, const uint32_t key[2], int64_t row) {
    const qlora_dropout_desc* a = job->args;
    const qlora__cpu_rows* rows = qlora__rows_of(a->x->owner);
    QLORA__REAL x_room[QLORA__ROW_CHUNK];
    QLORA__REAL y_room[QLORA__ROW_CHUNK];
    QLORA__REAL factor[QLORA__ROW_CHUNK];
    qlora__keep_row keep;
    keep.counter[1] = (uint32_t)qlora__index_at(a->positions, row);
    keep.counter[2] = (uint32_t)qlora__index_at(a->sequences, row);
    keep.counter[3] = job->where;
    keep.key[0] = key[0];
    keep.key[1] = key[1];
    keep.threshold = job->threshold;
    keep.scale = job->scale;
    keep.factor = factor;
    for (int64_t c = 0; c < a->x->cols; c += QLORA__ROW_CHUNK) {
        int64_t n = qlora__min(QLORA__ROW_CHUNK, a->x->cols - c);
        const QLORA__REAL* x = qlora__row_in(rows, a->x, row, c, n, x_room);
        keep.counter[0] = (uint32_t)(c / 4); // a chunk is a multiple of 4
        keep.n = n;
        rows->keep(&keep);
        for (int64_t i = 0; i < n; i++) {
            factor[i] = factor[i] != 0 ? x[i] * factor[i] : 0;
        }
        QLORA__REAL* y = qlora__row_target(a->y, row, c, y_room);
        if (a->accumulate) {
            const QLORA__REAL* old = qlora__row_in(rows, a->y, row, c, n, y_room);
            rows->point[QLORA__POINT_ADD](factor, old, 0, n, y);
        } else {
            memcpy(y, factor, (size_t)n * sizeof *y);
        }
        qlora__row_done(rows, a->y, row, c, n, y);
    }
}

static void qlora__dropout_rows(void* user, int64_t begin, int64_t end) {
    const qlora__dropout_job* job = (const qlora__dropout_job*)user;
    const qlora_dropout_desc* a = job->args;
    uint64_t seed = (uint64_t)(uint32_t)qlora__index_at(a->state, 1) << 32 |
                    (uint32_t)qlora__index_at(a->state, 0);
    uint64_t mixed = seed + (uint64_t)(uint32_t)qlora__index_at(a->state, 2) * 0x9e3779b97f4a7c15u;
    uint32_t key[2];
    key[0] = (uint32_t)mixed;
    key[1] = (uint32_t)(mixed >> 32);
    for (int64_t row = begin; row < end; row++) {
        qlora__dropout_row(job, key, row);
    }
}

static qlora_result qlora__dropout(qlora_ctx* ctx, const qlora_dropout_desc* a) {
    if (a == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "args is NULL");
    }
    const qlora_tensor* x = a->x;
    QLORA__TRY(qlora__need(ctx, x, "x", QLORA__IS_F32_BF16, -1, -1));
    QLORA__TRY(qlora__need(ctx, a->y, "y", qlora__is(x->dtype), x->rows, x->cols));
    QLORA__TRY(qlora__need_same_or_apart(ctx, "y", a->y, "x", x));
    QLORA__TRY(qlora__need_vector(ctx, a->positions, "positions", QLORA__IS_I32, x->rows));
    QLORA__TRY(qlora__need_vector(ctx, a->sequences, "sequences", QLORA__IS_I32, x->rows));
    QLORA__TRY(qlora__need_vector(ctx, a->state, "state", QLORA__IS_I32, 4));
    QLORA__TRY(qlora__need_real(ctx, "args.p", (double)a->p, 0, 1));
    QLORA__TRY(qlora__need_whole(ctx, "args.layer", a->layer, 0, (1 << 23) - 1));
    QLORA__TRY(qlora__need_whole(ctx, "args.projection", a->projection, 0, 255));
    qlora__dropout_job job;
    job.args = a;
    job.threshold = (uint32_t)((double)a->p * 4294967296.0);
    job.where = (uint32_t)a->layer << 8 | (uint32_t)a->projection;
    job.scale = (float)(1 / (1 - (double)a->p));
    if (qlora__on_cpu(ctx)) {
        qlora__parallel(ctx, x->rows, 1 + 1024 / (1 + x->cols), qlora__dropout_rows, &job);
        return QLORA_OK;
    }
    int32_t accumulate = a->accumulate ? 1 : 0;
    qlora__point_shape shape = qlora__point_shape_of(x->cols, qlora__piece(x->dtype));
    void* args[] = {(void*)&x->data,
                    (void*)&x->ld,
                    (void*)&a->y->data,
                    (void*)&a->y->ld,
                    (void*)&a->positions->data,
                    (void*)&a->sequences->data,
                    (void*)&a->state->data,
                    &job.where,
                    (void*)&x->rows,
                    (void*)&x->cols,
                    &job.threshold,
                    &job.scale,
                    &accumulate};
    return qlora__launch(ctx, x->dtype == QLORA_F32 ? QLORA__K_dropout_f32 : QLORA__K_dropout_bf16,
                         shape.blocks, qlora__min(x->rows, 65535), 1, shape.threads, 0, args);
}

qlora_result qlora_dropout(qlora_ctx* ctx, const qlora_dropout_desc* args) {
    QLORA__ENTER(ctx, "qlora_dropout");
    return qlora__leave(ctx, qlora__dropout(ctx, args));
}
