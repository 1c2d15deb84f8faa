// ---- checks and launch shapes shared by the operators -------------------------------------------

// Returns the mask for a single dtype, for qlora__need.
static unsigned qlora__is(qlora_dtype dtype) {
    return 1u << (unsigned)dtype;
}

#define QLORA__IS_F32_BF16 (QLORA__IS_F32 | QLORA__IS_BF16)

// An output may share memory with an input only if both have exactly the same elements.
static qlora_result qlora__need_same_or_apart(qlora_ctx* ctx, const char* name,
                                              const qlora_tensor* t, const char* other_name,
                                              const qlora_tensor* other) {
    if (t->data == other->data && t->ld == other->ld && t->cols == other->cols &&
        t->dtype == other->dtype) {
        return QLORA_OK;
    }
    return qlora__need_apart(ctx, name, t, other_name, other);
}

// Checks a vector: one row of `count` elements.
static qlora_result qlora__need_vector(qlora_ctx* ctx, const qlora_tensor* t, const char* name,
                                       unsigned mask, int64_t count) {
    return qlora__need(ctx, t, name, mask, 1, count);
}

// Returns the number of elements in the 16-byte piece that a thread of the vector kernels handles.
static int64_t qlora__piece(qlora_dtype dtype) {
    return dtype == QLORA_F32 || dtype == QLORA_I32 ? 4 : 8;
}

static uint32_t qlora__grid_cap(int64_t blocks) {
    return (uint32_t)(blocks < 65535 ? blocks : 65535);
}

// Launch shape of an element-wise kernel: blocks per row, threads per block.
typedef struct qlora__point_shape {
    uint32_t blocks;
    uint32_t threads;
} qlora__point_shape;

static qlora__point_shape qlora__point_shape_of(int64_t cols, int64_t piece) {
    int64_t pieces = qlora__ceil_div(cols, piece);
    int64_t threads = pieces < 256 ? qlora__ceil_div(pieces, 32) * 32 : 256;
    qlora__point_shape shape;
    shape.threads = (uint32_t)(threads > 0 ? threads : 32);
    shape.blocks = (uint32_t)qlora__ceil_div(pieces, (int64_t)shape.threads);
    return shape;
}

// Launch shape of a kernel that reduces rows: `width` threads per row, `rows` rows per block.
typedef struct qlora__row_shape {
    int32_t width;
    uint32_t threads;
    int64_t rows;
} qlora__row_shape;

static qlora__row_shape qlora__row_shape_of(int64_t cols, int64_t piece, int64_t max_threads) {
    int64_t owners = qlora__ceil_div(cols, piece);
    qlora__row_shape shape;
    if (owners <= 32) {
        shape.width = 1;
        while (shape.width < owners) {
            shape.width *= 2;
        }
        shape.threads = 256;
    } else {
        int64_t threads = qlora__ceil_div(owners, 32) * 32;
        shape.width = (int32_t)(threads < max_threads ? threads : max_threads);
        shape.threads = (uint32_t)shape.width;
    }
    shape.rows = (int64_t)shape.threads / shape.width;
    return shape;
}

// Rows and columns for a kernel. Matrices of the same shape without padding are treated as one long
// row, whose leading dimension is irrelevant; it is passed as 0 so that it cannot prevent 16-byte
// accesses.
typedef struct qlora__extent {
    int64_t rows;
    int64_t cols;
    int64_t ld[6]; // of each tensor
} qlora__extent;

static qlora__extent qlora__extent_of(const qlora_tensor* const* tensors, int count) {
    qlora__extent e;
    memset(&e, 0, sizeof e);
    e.rows = tensors[0]->rows;
    e.cols = tensors[0]->cols;
    bool flat = true;
    for (int i = 0; i < count; i++) {
        e.ld[i] = tensors[i] != NULL ? tensors[i]->ld : 0;
        flat = flat && (tensors[i] == NULL || tensors[i]->ld == e.cols || e.rows == 1);
    }
    if (flat) {
        e.cols *= e.rows;
        e.rows = e.rows > 0 ? 1 : 0;
        memset(e.ld, 0, sizeof e.ld);
    }
    return e;
}

// Returns the caller's error flag, or a word in scratch if there is none.
static qlora_result qlora__flag_pointer(qlora_ctx* ctx, const qlora_tensor* flag, void** out) {
    if (flag != NULL) {
        *out = flag->data;
        return QLORA_OK;
    }
    return qlora__scratch(ctx, sizeof(int32_t), out);
}

static qlora_result qlora__need_flag(qlora_ctx* ctx, const qlora_tensor* flag) {
    return flag == NULL ? QLORA_OK : qlora__need(ctx, flag, "flag", QLORA__IS_I32, 1, 1);
}

// Returns element i of an I32 vector, on the CPU.
static int32_t qlora__index_at(const qlora_tensor* t, int64_t i) {
    return ((const int32_t*)t->data)[i];
}

// Returns matrix b of a batch.
static qlora_tensor qlora__batch_at(const qlora_tensor* t, int64_t b) {
    qlora_tensor view = *t;
    view.data = (char*)t->data + (size_t)(b * t->batch_stride) * qlora_dtype_bytes(t->dtype);
    view.batch = 1;
    view.batch_stride = 0;
    return view;
}

// ---- element-wise -------------------------------------------------------------------------------
//
//   silu      y = a / (1 + e^-a)              silu'     y = b s (1 + a (1 - s)), s = 1 / (1 + e^-a)
//   swiglu    y = silu(a) b                   mul, add  y = a b, y = a + b
//   scale     y = alpha a                     fill      y = alpha
//   geglu     y = gelu(a) b, gelu(a) = a (1 + tanh(w)) / 2 = a / (1 + e^-2w),
//             w = sqrt(2 / pi) (a + 0.044715 a^3)
//   cap       y = alpha tanh(a / alpha)

typedef struct qlora__point_op {
    qlora__kernel_id kernel_f32;
    qlora__kernel_id kernel_bf16;
    int inputs;
    bool has_alpha;
} qlora__point_op;

// Indexed by qlora__point_kind.
static const qlora__point_op qlora__point_ops[] = {
    {QLORA__K_elementwise_silu_f32, QLORA__K_elementwise_silu_bf16, 1, false},
    {QLORA__K_elementwise_silu_bwd_f32, QLORA__K_elementwise_silu_bwd_bf16, 2, false},
    {QLORA__K_elementwise_swiglu_f32, QLORA__K_elementwise_swiglu_bf16, 2, false},
    {QLORA__K_elementwise_geglu_f32, QLORA__K_elementwise_geglu_bf16, 2, false},
    {QLORA__K_elementwise_cap_f32, QLORA__K_elementwise_cap_bf16, 1, true},
    {QLORA__K_elementwise_mul_f32, QLORA__K_elementwise_mul_bf16, 2, false},
    {QLORA__K_elementwise_add_f32, QLORA__K_elementwise_add_bf16, 2, false},
    {QLORA__K_elementwise_scale_f32, QLORA__K_elementwise_scale_bf16, 1, true},
    {QLORA__K_elementwise_fill_f32, QLORA__K_elementwise_fill_bf16, 0, true}};

typedef struct qlora__point_job {
    qlora__point_kind kind;
    const qlora_tensor* a; // or NULL
    const qlora_tensor* b; // or NULL
    const qlora_tensor* y;
    QLORA__REAL alpha;
} qlora__point_job;

static void qlora__point_rows(void* user, int64_t begin, int64_t end) {
    const qlora__point_job* job = (const qlora__point_job*)user;
    const qlora_tensor* y = job->y;
    const qlora__cpu_rows* rows = qlora__rows_of(y->owner);
    QLORA__REAL a_room[QLORA__ROW_CHUNK];
    QLORA__REAL b_room[QLORA__ROW_CHUNK];
    for (int64_t r = begin; r < end; r++) {
        for (int64_t c = 0; c < y->cols; c += QLORA__ROW_CHUNK) {
            int64_t n = qlora__min(QLORA__ROW_CHUNK, y->cols - c);
            const QLORA__REAL* a = NULL;
            const QLORA__REAL* b = NULL;
            if (job->a != NULL) {
                a = qlora__row_in(rows, job->a, r, c, n, a_room);
            }
            if (job->b != NULL) {
                b = qlora__row_in(rows, job->b, r, c, n, b_room);
            }
            QLORA__REAL* to = qlora__row_target(y, r, c, a_room);
            rows->point[job->kind](a, b, job->alpha, n, to);
            qlora__row_done(rows, y, r, c, n, to);
        }
    }
}

// y = op(a, b, alpha); inputs that the operator does not read are NULL.
static qlora_result qlora__point(qlora_ctx* ctx, qlora__point_kind kind, const qlora_tensor* a,
                                 const qlora_tensor* b, float alpha, const qlora_tensor* y) {
    const qlora__point_op* op = &qlora__point_ops[kind];
    QLORA__TRY(qlora__need(ctx, y, "output", QLORA__IS_F32_BF16, -1, -1));
    const qlora_tensor* inputs[2];
    inputs[0] = a;
    inputs[1] = b;
    for (int i = 0; i < op->inputs; i++) {
        const char* name = i == 0 ? "first input" : "second input";
        QLORA__TRY(qlora__need(ctx, inputs[i], name, qlora__is(y->dtype), y->rows, y->cols));
        QLORA__TRY(qlora__need_same_or_apart(ctx, "output", y, name, inputs[i]));
    }
    if (qlora__on_cpu(ctx)) {
        qlora__point_job job;
        job.kind = kind;
        job.a = a;
        job.b = b;
        job.y = y;
        job.alpha = (QLORA__REAL)alpha;
        qlora__parallel(ctx, y->rows, 1 + 4096 / (1 + y->cols), qlora__point_rows, &job);
        return QLORA_OK;
    }
    const qlora_tensor* all[3];
    all[op->inputs] = y;
    for (int i = 0; i < op->inputs; i++) {
        all[i] = inputs[i];
    }
    qlora__extent e = qlora__extent_of(all, op->inputs + 1);
    qlora__point_shape shape = qlora__point_shape_of(e.cols, qlora__piece(y->dtype));
    void* args[9];
    int n = 0;
    for (int i = 0; i <= op->inputs; i++) {
        args[n++] = (void*)&all[i]->data;
        args[n++] = &e.ld[i];
    }
    args[n++] = &e.rows;
    args[n++] = &e.cols;
    if (op->has_alpha) {
        args[n++] = &alpha;
    }
    return qlora__launch(ctx, y->dtype == QLORA_F32 ? op->kernel_f32 : op->kernel_bf16,
                         shape.blocks, qlora__grid_cap(e.rows), 1, shape.threads, 0, args);
}

qlora_result qlora_silu_forward(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* y) {
    QLORA__ENTER(ctx, "qlora_silu_forward");
    return qlora__leave(ctx, qlora__point(ctx, QLORA__POINT_SILU, x, NULL, 0, y));
}

qlora_result qlora_silu_backward(qlora_ctx* ctx, const qlora_tensor* x, const qlora_tensor* dy,
                                 const qlora_tensor* dx) {
    QLORA__ENTER(ctx, "qlora_silu_backward");
    return qlora__leave(ctx, qlora__point(ctx, QLORA__POINT_SILU_GRAD, x, dy, 0, dx));
}

qlora_result qlora_swiglu_forward(qlora_ctx* ctx, const qlora_tensor* gate, const qlora_tensor* up,
                                  const qlora_tensor* h) {
    QLORA__ENTER(ctx, "qlora_swiglu_forward");
    return qlora__leave(ctx, qlora__point(ctx, QLORA__POINT_SWIGLU, gate, up, 0, h));
}

qlora_result qlora_geglu_forward(qlora_ctx* ctx, const qlora_tensor* gate, const qlora_tensor* up,
                                 const qlora_tensor* h) {
    QLORA__ENTER(ctx, "qlora_geglu_forward");
    return qlora__leave(ctx, qlora__point(ctx, QLORA__POINT_GEGLU, gate, up, 0, h));
}

qlora_result qlora_cap(qlora_ctx* ctx, float cap, const qlora_tensor* x, const qlora_tensor* y) {
    QLORA__ENTER(ctx, "qlora_cap");
    qlora_result r =
        cap > 0.0f && cap <= 1e30f
            ? qlora__point(ctx, QLORA__POINT_CAP, x, NULL, cap, y)
            : qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                          "cap is %g; it must be positive and at most 1e30", (double)cap);
    return qlora__leave(ctx, r);
}

qlora_result qlora_mul(qlora_ctx* ctx, const qlora_tensor* a, const qlora_tensor* b,
                       const qlora_tensor* y) {
    QLORA__ENTER(ctx, "qlora_mul");
    return qlora__leave(ctx, qlora__point(ctx, QLORA__POINT_MUL, a, b, 0, y));
}

qlora_result qlora_add(qlora_ctx* ctx, const qlora_tensor* a, const qlora_tensor* b,
                       const qlora_tensor* y) {
    QLORA__ENTER(ctx, "qlora_add");
    return qlora__leave(ctx, qlora__point(ctx, QLORA__POINT_ADD, a, b, 0, y));
}

qlora_result qlora_scale(qlora_ctx* ctx, float alpha, const qlora_tensor* x,
                         const qlora_tensor* y) {
    QLORA__ENTER(ctx, "qlora_scale");
    return qlora__leave(ctx, qlora__point(ctx, QLORA__POINT_SCALE, x, NULL, alpha, y));
}

// Whether rows of bf16 on a GPU are whole pieces, aligned to 16 bytes.
static bool qlora__is_narrow(const qlora_tensor* t) {
    return t->dtype == QLORA_BF16 && t->cols % 8 == 0 && t->cols > 0 && t->ld % 8 == 0 &&
           (uintptr_t)t->data % 16 == 0;
}

// y = x, for a few columns of long matrices.
static QLORA__UNUSED qlora_result qlora__copy_narrow(qlora_ctx* ctx, const qlora_tensor* x,
                                                     const qlora_tensor* y) {
    if (qlora__on_cpu(ctx) || !qlora__is_narrow(x) || !qlora__is_narrow(y)) {
        return qlora_scale(ctx, 1.0f, x, y);
    }
    qlora_tensor from = *x; // parameters are passed by address
    qlora_tensor to = *y;
    int32_t pieces = (int32_t)(x->cols / 8);
    void* args[] = {&from.data, &from.ld, &to.data, &to.ld, &from.rows, &pieces};
    return qlora__launch(ctx, QLORA__K_elementwise_narrow_bf16,
                         qlora__ceil_div(x->rows * pieces, 256), 1, 1, 256, 0, args);
}

qlora_result qlora_fill(qlora_ctx* ctx, float value, const qlora_tensor* y) {
    QLORA__ENTER(ctx, "qlora_fill");
    return qlora__leave(ctx, qlora__point(ctx, QLORA__POINT_FILL, NULL, NULL, value, y));
}

// ---- backward of SwiGLU and GeGLU ---------------------------------------------------------------
//
// With s = 1 / (1 + e^-g), or s = 1 / (1 + e^-2w) for GeGLU:
//   du = dh g s,  h = g s u,  dg = dh u s (1 + g (1 - s)), or dh u (s + g s (1 - s) 2 w')

typedef struct qlora__gated_job {
    const qlora_tensor* dh;
    const qlora_tensor* gate;
    const qlora_tensor* up;
    const qlora_tensor* dgate;
    const qlora_tensor* dup;
    const qlora_tensor* h;
    bool gelu;
} qlora__gated_job;

static void qlora__gated_backward_rows(void* user, int64_t begin, int64_t end) {
    const qlora__gated_job* job = (const qlora__gated_job*)user;
    const qlora_tensor* dh = job->dh;
    const qlora__cpu_rows* rows = qlora__rows_of(dh->owner);
    QLORA__REAL room[4][QLORA__ROW_CHUNK];
    for (int64_t r = begin; r < end; r++) {
        for (int64_t c = 0; c < dh->cols; c += QLORA__ROW_CHUNK) {
            qlora__gated_row row;
            row.n = qlora__min(QLORA__ROW_CHUNK, dh->cols - c);
            row.dh = qlora__row_in(rows, dh, r, c, row.n, room[0]);
            row.gate = qlora__row_in(rows, job->gate, r, c, row.n, room[1]);
            row.up = qlora__row_in(rows, job->up, r, c, row.n, room[2]);
            row.dgate = qlora__row_target(job->dgate, r, c, room[1]);
            row.dup = qlora__row_target(job->dup, r, c, room[2]);
            row.h = job->h != NULL ? qlora__row_target(job->h, r, c, room[3]) : NULL;
            (job->gelu ? rows->geglu_grad : rows->swiglu_grad)(&row);
            qlora__row_done(rows, job->dgate, r, c, row.n, row.dgate);
            qlora__row_done(rows, job->dup, r, c, row.n, row.dup);
            if (job->h != NULL) {
                qlora__row_done(rows, job->h, r, c, row.n, row.h);
            }
        }
    }
}

static qlora_result qlora__gated_backward(qlora_ctx* ctx, qlora__gated_job* job) {
    const qlora_tensor* dh = job->dh;
    QLORA__TRY(qlora__need(ctx, dh, "dh", QLORA__IS_F32_BF16, -1, -1));
    unsigned type = qlora__is(dh->dtype);
    const qlora_tensor* in[3];
    in[0] = dh;
    in[1] = job->gate;
    in[2] = job->up;
    const qlora_tensor* out[3];
    out[0] = job->h;
    out[1] = job->dgate;
    out[2] = job->dup;
    static const char* const in_names[3] = {"dh", "gate", "up"};
    static const char* const out_names[3] = {"h", "dgate", "dup"};
    for (int i = 0; i < 3; i++) {
        QLORA__TRY(qlora__need(ctx, in[i], in_names[i], type, dh->rows, dh->cols));
    }
    for (int o = job->h == NULL ? 1 : 0; o < 3; o++) {
        QLORA__TRY(qlora__need(ctx, out[o], out_names[o], type, dh->rows, dh->cols));
    }
    for (int o = job->h == NULL ? 1 : 0; o < 3; o++) {
        for (int i = 0; i < 3; i++) {
            // An output may overwrite only its own input: h dh, dgate gate, and dup up.
            QLORA__TRY(
                o == i ? qlora__need_same_or_apart(ctx, out_names[o], out[o], in_names[i], in[i])
                       : qlora__need_apart(ctx, out_names[o], out[o], in_names[i], in[i]));
        }
        for (int other = o + 1; other < 3; other++) {
            QLORA__TRY(qlora__need_apart(ctx, out_names[o], out[o], out_names[other], out[other]));
        }
    }
    if (qlora__on_cpu(ctx)) {
        qlora__parallel(ctx, dh->rows, 1 + 4096 / (1 + dh->cols), qlora__gated_backward_rows, job);
        return QLORA_OK;
    }
    const qlora_tensor* all[6] = {dh, in[1], in[2], out[1], out[2], out[0]};
    qlora__extent e = qlora__extent_of(all, 6);
    qlora__point_shape shape = qlora__point_shape_of(e.cols, qlora__piece(dh->dtype));
    void* h_data = job->h != NULL ? job->h->data : NULL;
    void* args[14];
    for (int i = 0; i < 5; i++) {
        args[2 * i] = (void*)&all[i]->data;
        args[2 * i + 1] = &e.ld[i];
    }
    args[10] = &h_data;
    args[11] = &e.ld[5];
    args[12] = &e.rows;
    args[13] = &e.cols;
    static const qlora__kernel_id kernels[2][2] = {
        {QLORA__K_elementwise_swiglu_bwd_f32, QLORA__K_elementwise_swiglu_bwd_bf16},
        {QLORA__K_elementwise_geglu_bwd_f32, QLORA__K_elementwise_geglu_bwd_bf16}};
    return qlora__launch(ctx, kernels[job->gelu][dh->dtype == QLORA_BF16], shape.blocks,
                         qlora__grid_cap(e.rows), 1, shape.threads, 0, args);
}

// Both public functions: the tensors of a job.
static qlora_result qlora__gated_run(qlora_ctx* ctx, const qlora_tensor* dh,
                                     const qlora_tensor* gate, const qlora_tensor* up,
                                     const qlora_tensor* dgate, const qlora_tensor* dup,
                                     const qlora_tensor* h, bool gelu) {
    qlora__gated_job job;
    job.dh = dh;
    job.gate = gate;
    job.up = up;
    job.dgate = dgate;
    job.dup = dup;
    job.h = h;
    job.gelu = gelu;
    return qlora__gated_backward(ctx, &job);
}

qlora_result qlora_swiglu_backward(qlora_ctx* ctx, const qlora_tensor* dh, const qlora_tensor* gate,
                                   const qlora_tensor* up, const qlora_tensor* dgate,
                                   const qlora_tensor* dup, const qlora_tensor* h) {
    QLORA__ENTER(ctx, "qlora_swiglu_backward");
    return qlora__leave(ctx, qlora__gated_run(ctx, dh, gate, up, dgate, dup, h, false));
}

qlora_result qlora_geglu_backward(qlora_ctx* ctx, const qlora_tensor* dh, const qlora_tensor* gate,
                                  const qlora_tensor* up, const qlora_tensor* dgate,
                                  const qlora_tensor* dup, const qlora_tensor* h) {
    QLORA__ENTER(ctx, "qlora_geglu_backward");
    return qlora__leave(ctx, qlora__gated_run(ctx, dh, gate, up, dgate, dup, h, true));
}
