// ---- squared ReLU -------------------------------------------------------------------------------
//
// The activation of an MLP without a gate:
//   s = r^2,  du = ds 2 r,  r = max(u, 0)

typedef struct qlora__relu2 {
    const qlora_tensor* ds; // backward only
    const qlora_tensor* u;
    const qlora_tensor* du; // backward only; may be u
    const qlora_tensor* s;  // backward: the activation once more, may be ds, or NULL
} qlora__relu2;

static void qlora__relu2_rows(void* user, int64_t begin, int64_t end) {
    const qlora__relu2* job = (const qlora__relu2*)user;
    const qlora_tensor* u = job->u;
    const qlora__cpu_rows* rows = qlora__rows_of(u->owner);
    QLORA__REAL room[3][QLORA__ROW_CHUNK];
    for (int64_t r = begin; r < end; r++) {
        for (int64_t c = 0; c < u->cols; c += QLORA__ROW_CHUNK) {
            int64_t n = qlora__min(QLORA__ROW_CHUNK, u->cols - c);
            QLORA__REAL d[QLORA__ROW_CHUNK];
            QLORA__REAL act[QLORA__ROW_CHUNK];
            const QLORA__REAL* in = qlora__row_in(rows, u, r, c, n, room[0]);
            const QLORA__REAL* ds =
                job->ds != NULL ? qlora__row_in(rows, job->ds, r, c, n, room[1]) : in;
            for (int64_t i = 0; i < n; i++) { // NaN stays NaN
                QLORA__REAL positive = in[i] < 0 ? 0 : in[i];
                act[i] = positive * positive;
                d[i] = ds[i] * (2 * positive);
            }
            const qlora_tensor* outs[2];
            outs[0] = job->s;
            outs[1] = job->du;
            for (int o = 0; o < 2; o++) {
                if (outs[o] != NULL) {
                    QLORA__REAL* to = qlora__row_target(outs[o], r, c, room[2]);
                    memcpy(to, o == 0 ? act : d, (size_t)n * sizeof *to);
                    qlora__row_done(rows, outs[o], r, c, n, to);
                }
            }
        }
    }
}

static qlora_result qlora__relu2_need(qlora_ctx* ctx, const qlora__relu2* job) {
    const qlora_tensor* u = job->u;
    QLORA__TRY(qlora__need(ctx, u, "u", QLORA__IS_F32_BF16, -1, -1));
    const struct {
        const char* name;
        const qlora_tensor* t;
    } others[] = {{"ds", job->ds}, {"du", job->du}, {"s", job->s}};
    for (int i = 0; i < 3; i++) {
        if (others[i].t != NULL) {
            QLORA__TRY(qlora__need(ctx, others[i].t, others[i].name, qlora__is(u->dtype), u->rows,
                                   u->cols));
        }
    }
    return QLORA_OK;
}

// s = relu(u)^2; s may be u.
static QLORA__UNUSED qlora_result qlora__relu2_forward(qlora_ctx* ctx, const qlora_tensor* u,
                                                       const qlora_tensor* s) {
    qlora__relu2 job;
    memset(&job, 0, sizeof job);
    job.u = u;
    job.s = s;
    QLORA__TRY(qlora__relu2_need(ctx, &job));
    if (qlora__on_cpu(ctx)) {
        qlora__parallel(ctx, u->rows, 1 + 4096 / (1 + u->cols), qlora__relu2_rows, &job);
        return QLORA_OK;
    }
    const qlora_tensor* all[2] = {u, s};
    qlora__extent e = qlora__extent_of(all, 2);
    qlora__point_shape shape = qlora__point_shape_of(e.cols, qlora__piece(u->dtype));
    void* args[] = {(void*)&u->data, &e.ld[0], (void*)&s->data, &e.ld[1], &e.rows, &e.cols};
    return qlora__launch(
        ctx, u->dtype == QLORA_F32 ? QLORA__K_plain_relu2_f32 : QLORA__K_plain_relu2_bf16,
        shape.blocks, qlora__grid_cap(e.rows), 1, shape.threads, 0, args);
}

static QLORA__UNUSED qlora_result qlora__relu2_backward(qlora_ctx* ctx, const qlora__relu2* job) {
    const qlora_tensor* u = job->u;
    QLORA__TRY(qlora__relu2_need(ctx, job));
    if (qlora__on_cpu(ctx)) {
        qlora__relu2 own = *job;
        qlora__parallel(ctx, u->rows, 1 + 4096 / (1 + u->cols), qlora__relu2_rows, &own);
        return QLORA_OK;
    }
    const qlora_tensor* all[4] = {job->ds, u, job->du, job->s};
    qlora__extent e = qlora__extent_of(all, 4);
    qlora__point_shape shape = qlora__point_shape_of(e.cols, qlora__piece(u->dtype));
    void* s = job->s != NULL ? job->s->data : NULL;
    void* args[] = {(void*)&job->ds->data,
                    &e.ld[0],
                    (void*)&u->data,
                    &e.ld[1],
                    (void*)&job->du->data,
                    &e.ld[2],
                    &s,
                    &e.ld[3],
                    &e.rows,
                    &e.cols};
    return qlora__launch(
        ctx, u->dtype == QLORA_F32 ? QLORA__K_plain_relu2_bwd_f32 : QLORA__K_plain_relu2_bwd_bf16,
        shape.blocks, qlora__grid_cap(e.rows), 1, shape.threads, 0, args);
}
