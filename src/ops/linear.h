// ---- LoRA linear --------------------------------------------------------------------------------
//
//   z_i = x A_i^T (the masked x with dropout)         u_i = dy_i (s_i B_i)
//   y_i = x W_i^T + bias_i + z_i (s_i B_i)^T          dx  = sum over i of dy_i W_i + u_i A_i
//   dA_i += u_i^T x (the masked x)                    dB_i += s_i dy_i^T z_i
//
// z and u are rounded to the storage type and stored after the columns of x and dy. There are two
// forms. The plain form (without an operand), which the CPU uses, runs the products one by one, or
// from shared panels (ops/linear_cpu.h). In the concatenated form the operand is W with sB to its
// right and A below it, so that a single product of length in + pad, or out + pad, is enough. The
// columns of z and u that pad the sum of the ranks are zero. With dropout each part has its own
// mask, so z is computed part by part, and the masked u_i A_i are added to dx one at a time.

int64_t qlora_linear_out(const qlora_linear_desc* linear) {
    int64_t out = 0;
    for (int32_t i = 0; linear != NULL && i < linear->count && i < QLORA_LINEAR_PARTS; i++) {
        out += linear->parts[i].out;
    }
    return out;
}

static int64_t qlora__linear_rank(const qlora_linear_desc* linear) {
    int64_t rank = 0;
    for (int32_t i = 0; i < linear->count; i++) {
        rank += linear->parts[i].rank;
    }
    return rank;
}

int64_t qlora_linear_pad(const qlora_linear_desc* linear) {
    return linear != NULL && linear->count >= 0 && linear->count <= QLORA_LINEAR_PARTS
               ? (qlora__linear_rank(linear) + 7) / 8 * 8
               : 0;
}

static qlora_result qlora__linear_part_check(qlora_ctx* ctx, const qlora_linear_desc* l, int32_t i,
                                             qlora_dtype dtype, bool backward) {
    const qlora_linear_part* p = &l->parts[i];
    unsigned type = 1u << dtype;
    char name[32];
    snprintf(name, sizeof name, "parts[%d].out", (int)i);
    QLORA__TRY(qlora__need_whole(ctx, name, p->out, 0, INT64_MAX));
    snprintf(name, sizeof name, "parts[%d].rank", (int)i);
    QLORA__TRY(qlora__need_whole(ctx, name, p->rank, 0, 1 << 20));
    if (p->fp8 == NULL && (p->nf4 == NULL) == (p->dense == NULL)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "parts[%d].nf4 and parts[%d].dense are both %s; set exactly one", (int)i,
                           (int)i, p->nf4 == NULL ? "NULL" : "set");
    }
    if (p->fp8 != NULL) {
        QLORA_ASSERT(p->nf4 == NULL && p->dense == NULL && p->fp8->owner == ctx &&
                     p->fp8->rows == p->out && p->fp8->cols == l->in);
    } else if (p->nf4 != NULL) {
        QLORA__TRY(qlora__nf4_need(ctx, p->nf4, "nf4"));
        if (p->nf4->rows != p->out || p->nf4->cols != l->in) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "parts[%d].nf4 is %lld x %lld; expected %lld x %lld", (int)i,
                               (long long)p->nf4->rows, (long long)p->nf4->cols, (long long)p->out,
                               (long long)l->in);
        }
    } else {
        unsigned mixed = qlora__on_cpu(ctx) && dtype == QLORA_F32 ? QLORA__IS_FLOAT : type;
        QLORA__TRY(qlora__need(ctx, p->dense, "dense", mixed, p->out, l->in));
    }
    if (p->bias != NULL) {
        QLORA__TRY(qlora__need(ctx, p->bias, "bias", type, 1, p->out));
    }
    if (p->rank > 0) {
        QLORA__TRY(qlora__need(ctx, p->a, "a", type, p->rank, l->in));
        QLORA__TRY(qlora__need(ctx, p->sb, "sb", type, p->out, p->rank));
        if (backward) {
            QLORA__TRY(qlora__need(ctx, p->da, "da", QLORA__IS_F32, p->rank, l->in));
            QLORA__TRY(qlora__need(ctx, p->db, "db", QLORA__IS_F32, p->out, p->rank));
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__linear_check(qlora_ctx* ctx, const qlora_linear_desc* l,
                                        qlora_dtype dtype, bool backward) {
    if (l == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "linear is NULL");
    }
    QLORA__TRY(qlora__need_whole(ctx, "linear.count", l->count, 1, QLORA_LINEAR_PARTS));
    QLORA__TRY(qlora__need_whole(ctx, "linear.in", l->in, 0, INT64_MAX));
    QLORA__TRY(qlora__need_real(ctx, "linear.dropout", (double)l->dropout, 0, 1));
    for (int32_t i = 0; i < l->count; i++) {
        QLORA__TRY(qlora__linear_part_check(ctx, l, i, dtype, backward));
    }
    if (l->operand != NULL) {
        int64_t pad = qlora_linear_pad(l);
        QLORA__TRY(qlora__need(ctx, l->operand, "operand", 1u << dtype, qlora_linear_out(l) + pad,
                               l->in + pad));
    }
    return QLORA_OK;
}

// The joined adapters of a stack with an operand, as views: A [pad, in] and sB [out, pad].
static bool qlora__linear_joined(const qlora_linear_desc* l, int64_t pad, qlora_tensor* a,
                                 qlora_tensor* sb) {
    if (l->fp8 != NULL) {
        *a = l->fp8->a;
        *sb = l->fp8->sb;
    } else if (l->operand != NULL) {
        size_t size = qlora_dtype_bytes(l->operand->dtype);
        int64_t out = qlora_linear_out(l);
        *a = *l->operand;
        *sb = *l->operand;
        a->data = (char*)a->data + (size_t)(out * a->ld) * size;
        a->bytes -= (size_t)(out * a->ld) * size;
        sb->data = (char*)sb->data + (size_t)l->in * size;
        sb->bytes -= (size_t)l->in * size;
    } else {
        return false;
    }
    a->rows = pad;
    a->cols = l->in;
    sb->rows = qlora_linear_out(l);
    sb->cols = pad;
    return true;
}

// The products of a layer.
typedef enum qlora__linear_product {
    QLORA__LINEAR_FORWARD,  // C = A B^T, forward: z = x A^T, y = x W^T + z (sB)^T
    QLORA__LINEAR_WEIGHT,   // C = A B, forward: W + sB A
    QLORA__LINEAR_BACKWARD, // C = A B, backward: u = dy sB, dx = dy W + u A
    QLORA__LINEAR_GRADIENT  // C = A^T B, backward: dA = u^T x, dB = dy^T z
} qlora__linear_product;

// C = alpha times the product + beta C, with the precision of forward or backward products.
static qlora_result qlora__linear_gemm(qlora_ctx* ctx, qlora_math math,
                                       qlora__linear_product product, float alpha, float beta,
                                       const qlora_tensor* a, const qlora_tensor* b,
                                       const qlora_tensor* c) {
    qlora_gemm_desc d;
    memset(&d, 0, sizeof d);
    d.trans_a = product == QLORA__LINEAR_GRADIENT;
    d.trans_b = product == QLORA__LINEAR_FORWARD;
    d.alpha = alpha;
    d.beta = beta;
    return qlora__gemm_run(ctx, math, product >= QLORA__LINEAR_BACKWARD, &d, a, b, c);
}

// y = x W^T, or dx = dy W, of a part whose weight has codes.
static qlora_result qlora__linear_coded(qlora_ctx* ctx, qlora_math math, bool backward,
                                        const qlora_tensor* x, const qlora_linear_part* p,
                                        const qlora_tensor* y, uint32_t flags) {
    const qlora__coded_way way = {math, backward, flags, 1.0f, NULL};
    return p->nf4 != NULL ? qlora__nf4_multiply(ctx, &way, x, p->nf4, y)
                          : qlora__coded_product(ctx, &way, x, qlora__coded_of(NULL, p->fp8), y);
}

// ---- bias and placement -------------------------------------------------------------------------

typedef struct qlora__linear_job {
    const qlora_tensor* bias;
    const qlora_tensor* y;
    bool add;
} qlora__linear_job;

static void qlora__linear_bias_rows(void* user, int64_t begin, int64_t end) {
    const qlora__linear_job* job = (const qlora__linear_job*)user;
    const qlora_tensor* y = job->y;
    const qlora__cpu_rows* rows = qlora__rows_of(y->owner);
    QLORA__REAL y_room[QLORA__ROW_CHUNK];
    QLORA__REAL b_room[QLORA__ROW_CHUNK];
    for (int64_t r = begin; r < end; r++) {
        for (int64_t c = 0; c < y->cols; c += QLORA__ROW_CHUNK) {
            int64_t n = qlora__min(QLORA__ROW_CHUNK, y->cols - c);
            const QLORA__REAL* bias = qlora__row_in(rows, job->bias, 0, c, n, b_room);
            const QLORA__REAL* before = y_room;
            if (job->add) {
                before = qlora__row_in(rows, y, r, c, n, y_room);
            } else {
                memset(y_room, 0, (size_t)n * sizeof y_room[0]);
            }
            QLORA__REAL* to = qlora__row_target(y, r, c, y_room);
            rows->point[QLORA__POINT_ADD](before, bias, 0, n, to);
            qlora__row_done(rows, y, r, c, n, to);
        }
    }
}

// Sets every row of y to the bias, or adds the bias to it.
static qlora_result qlora__linear_bias(qlora_ctx* ctx, const qlora_tensor* bias,
                                       const qlora_tensor* y, bool add) {
    qlora__linear_job job;
    job.bias = bias;
    job.y = y;
    job.add = add;
    if (qlora__on_cpu(ctx)) {
        qlora__parallel(ctx, y->rows, 1 + 4096 / (1 + y->cols), qlora__linear_bias_rows, &job);
        return QLORA_OK;
    }
    qlora_tensor t = *y;
    void* source = bias->data;
    int32_t adds = add ? 1 : 0;
    void* args[] = {&source, &t.data, &t.rows, &t.cols, &t.ld, &adds};
    return qlora__launch(
        ctx, t.dtype == QLORA_F32 ? QLORA__K_linear_bias_f32 : QLORA__K_linear_bias_bf16,
        qlora__ceil_div(t.cols, 256), qlora__min(t.rows, 65535), 1, 256, 0, args);
}

static void qlora__linear_place_cpu(const qlora_linear_desc* l) {
    const qlora_tensor* operand = l->operand;
    int64_t pad = qlora_linear_pad(l);
    int64_t out = qlora_linear_out(l);
    const qlora__cpu_rows* rows = qlora__rows_of(operand->owner);
    size_t size = qlora_dtype_bytes(operand->dtype);
    for (int64_t r = 0; r < out + pad; r++) {
        int64_t c = r < out ? l->in : 0;
        memset((char*)operand->data + (size_t)(r * operand->ld + c) * size, 0,
               (size_t)(l->in + pad - c) * size);
    }
    int64_t row = 0;
    int64_t at = 0;
    for (int32_t i = 0; i < l->count; i++) {
        const qlora_linear_part* p = &l->parts[i];
        for (int64_t r = 0; r < p->out && p->rank > 0; r++) {
            qlora__row_convert(rows, p->sb, r, 0, p->rank, operand, row + r, l->in + at);
        }
        for (int64_t k = 0; k < p->rank; k++) {
            qlora__row_convert(rows, p->a, k, 0, l->in, operand, out + at + k, 0);
        }
        row += p->out;
        at += p->rank;
    }
}

static qlora_result qlora__linear_place_adapters(qlora_ctx* ctx, const qlora_linear_desc* l) {
    if (qlora__on_cpu(ctx)) {
        qlora__linear_place_cpu(l);
        return QLORA_OK;
    }
    qlora_tensor operand = *l->operand;
    int64_t in = l->in;
    int32_t pad = (int32_t)qlora_linear_pad(l);
    if (pad == 0) {
        return QLORA_OK;
    }
    const void* data[QLORA_LINEAR_PARTS][2];
    int64_t sizes[QLORA_LINEAR_PARTS][3];
    int32_t ranks[QLORA_LINEAR_PARTS];
    void* args[4 + 6 * QLORA_LINEAR_PARTS] = {&operand.data, &operand.ld, &in, &pad};
    memset(data, 0, sizeof data);
    memset(sizes, 0, sizeof sizes);
    memset(ranks, 0, sizeof ranks);
    for (int i = 0; i < QLORA_LINEAR_PARTS; i++) {
        const qlora_linear_part* p = &l->parts[i];
        if (i < l->count) {
            sizes[i][2] = p->out;
        }
        if (i < l->count && p->rank > 0) {
            data[i][0] = p->a->data;
            data[i][1] = p->sb->data;
            sizes[i][0] = p->a->ld;
            sizes[i][1] = p->sb->ld;
            ranks[i] = (int32_t)p->rank;
        }
        void* own[6] = {(void*)&data[i][0], &sizes[i][0], (void*)&data[i][1],
                        &sizes[i][1],       &sizes[i][2], &ranks[i]};
        memcpy(args + 4 + 6 * i, own, sizeof own);
    }
    return qlora__launch(
        ctx, operand.dtype == QLORA_F32 ? QLORA__K_linear_place_f32 : QLORA__K_linear_place_bf16,
        qlora__ceil_div(qlora_linear_out(l) * pad, 2048) + pad * qlora__ceil_div(in + pad, 2048), 1,
        1, 256, 0, args);
}

// The adapters of a stack with FP8 weights. The code for an operand writes both parts: sB as that
// of an operand without W, A as that of one without rows of W.
static QLORA__UNUSED qlora_result qlora__linear_place_fp8(qlora_ctx* ctx,
                                                          const qlora_linear_desc* l) {
    qlora_linear_desc part = *l;
    part.operand = &l->fp8->sb;
    part.in = 0;
    QLORA__TRY(qlora__linear_place_adapters(ctx, &part));
    part = *l;
    part.operand = &l->fp8->a;
    for (int32_t i = 0; i < part.count; i++) {
        part.parts[i].out = 0;
    }
    return qlora__linear_place_adapters(ctx, &part);
}

// ---- operands of several stacks in one launch ---------------------------------------------------

// Same layout as place_part in kernels/nf4/nf4_bf16.cu.
typedef struct qlora__place_part {
    const void* codes;
    const void* absmax;
    const void* q;
    const void* scales;
    const void* offset;
    const void* maps;
    const void* a;
    const void* sb;
    int64_t lda;
    int64_t ldsb;
    int32_t out;
    int32_t rank;
    int32_t block_shift;
    int32_t group_shift;
    int32_t row;
    int32_t first;
} qlora__place_part;

// Same layout as place_stack.
typedef struct qlora__place_stack {
    qlora__place_part parts[QLORA_LINEAR_PARTS];
    void* operand;
    int64_t ld;
    int64_t in;
    int32_t pad;
    int32_t width;
    int32_t across;
    int32_t first;
    int32_t adapters;
    int32_t unused;
} qlora__place_stack;

#define QLORA__PLACE_STACKS 4
typedef char qlora__place_size[sizeof(qlora__place_stack) == 360 ? 1 : -1];

// Whether the operand of a stack can be written by that launch: NF4 weights, on a GPU, as bf16.
static bool qlora__linear_places_at_once(qlora_ctx* ctx, const qlora_linear_desc* l) {
    bool can = !qlora__on_cpu(ctx) && l->operand->dtype == QLORA_BF16;
    for (int32_t i = 0; i < l->count; i++) {
        can = can && l->parts[i].dense == NULL && l->parts[i].nf4 != NULL;
    }
    return can;
}

// Describes a stack whose first block is number `at` of the launch; returns the number of the block
// after its last one.
static int64_t qlora__place_describe(const qlora_linear_desc* l, int64_t at,
                                     qlora__place_stack* out) {
    int64_t pad = qlora_linear_pad(l);
    int64_t rows = qlora_linear_out(l);
    int64_t blocks = 0;
    int64_t row = 0;
    out->operand = l->operand->data;
    out->ld = l->operand->ld;
    out->in = l->in;
    out->pad = (int32_t)pad;
    out->width = qlora__nf4_width(l->in);
    out->across = (int32_t)qlora__ceil_div(l->in, 8 * out->width);
    out->first = (int32_t)at;
    for (int32_t i = 0; i < QLORA_LINEAR_PARTS; i++) {
        qlora__place_part* to = &out->parts[i];
        const qlora_linear_part* p = &l->parts[i];
        to->first = INT32_MAX;
        if (i >= l->count) {
            continue;
        }
        to->codes = p->nf4->codes;
        to->absmax = p->nf4->absmax;
        to->q = p->nf4->absmax_codes;
        to->scales = p->nf4->absmax_scales;
        to->offset = p->nf4->offset;
        to->maps = p->nf4->maps;
        to->block_shift = qlora__log2(p->nf4->block);
        to->group_shift = qlora__log2(p->nf4->block2);
        to->out = (int32_t)p->out;
        to->row = (int32_t)row;
        to->first = (int32_t)blocks;
        if (p->rank > 0) {
            to->a = p->a->data;
            to->sb = p->sb->data;
            to->lda = p->a->ld;
            to->ldsb = p->sb->ld;
            to->rank = (int32_t)p->rank;
        }
        row += p->out;
        blocks += qlora__ceil_div(p->out, 4 * 256 / out->width) * out->across;
    }
    out->adapters = (int32_t)blocks;
    blocks += qlora__ceil_div(rows * pad, 2048) + pad * qlora__ceil_div(l->in + pad, 2048);
    return at + blocks;
}

// Writes the operands of up to QLORA__PLACE_STACKS stacks, for which
// qlora__linear_places_at_once holds.
static qlora_result qlora__linear_place_at_once(qlora_ctx* ctx, const qlora_linear_desc* stacks,
                                                int32_t count) {
    qlora__place_stack all[QLORA__PLACE_STACKS];
    int64_t blocks = 0;
    memset(all, 0, sizeof all);
    for (int32_t i = 0; i < QLORA__PLACE_STACKS; i++) {
        all[i].first = INT32_MAX;
        blocks = i < count ? qlora__place_describe(&stacks[i], blocks, &all[i]) : blocks;
    }
    void* args[] = {all};
    return qlora__launch(ctx, QLORA__K_nf4_place_bf16, blocks, 1, 1, 256, 0, args);
}

static qlora_result qlora__linear_place(qlora_ctx* ctx, const qlora_linear_desc* l,
                                        uint32_t flags) {
    if (l == NULL || l->operand == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is NULL",
                           l == NULL ? "linear" : "linear.operand");
    }
    if (flags == 0 || flags > (QLORA_LINEAR_WEIGHTS | QLORA_LINEAR_ADAPTERS)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "flags is %u; use QLORA_LINEAR_WEIGHTS, QLORA_LINEAR_ADAPTERS or both",
                           flags);
    }
    qlora_dtype dtype = l->operand->dtype;
    if (dtype != QLORA_F32 && dtype != QLORA_BF16) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "linear.operand.dtype is %s; it must be f32 or bf16",
                           qlora_dtype_name(dtype));
    }
    QLORA__TRY(qlora__linear_check(ctx, l, dtype, false));
    if (flags == (QLORA_LINEAR_WEIGHTS | QLORA_LINEAR_ADAPTERS) &&
        qlora__linear_places_at_once(ctx, l)) {
        return qlora__linear_place_at_once(ctx, l, 1);
    }
    int64_t row = 0;
    for (int32_t i = 0; i < l->count && (flags & QLORA_LINEAR_WEIGHTS) != 0; i++) {
        const qlora_linear_part* p = &l->parts[i];
        qlora_tensor rows;
        QLORA__TRY(qlora__tensor_view(ctx, l->operand, row, p->out, 0, l->in, &rows));
        if (p->dense == NULL) {
            QLORA__TRY(qlora__coded_window(ctx, qlora__coded_of(p->nf4, p->fp8), 0, 0, &rows));
        } else if (p->dense->dtype == dtype) {
            QLORA__TRY(qlora__point(ctx, QLORA__POINT_SCALE, p->dense, NULL, 1.0f, &rows));
        }
        for (int64_t r = 0; p->dense != NULL && p->dense->dtype != dtype && r < p->out; r++) {
            qlora__row_convert(qlora__rows_of(ctx), p->dense, r, 0, l->in, &rows, r, 0);
        }
        row += p->out;
    }
    return (flags & QLORA_LINEAR_ADAPTERS) != 0 ? qlora__linear_place_adapters(ctx, l) : QLORA_OK;
}

qlora_result qlora_linear_place(qlora_ctx* ctx, const qlora_linear_desc* linear, uint32_t flags) {
    QLORA__ENTER(ctx, "qlora_linear_place");
    return qlora__leave(ctx, qlora__linear_place(ctx, linear, flags));
}

// ---- dropout: the mask of one part, on as many rows at a time as fit in scratch -----------------

typedef struct qlora__masked {
    qlora_tensor rows; // in scratch
    int64_t slice;
    size_t scratch_before;
} qlora__masked;

static qlora_result qlora__masked_begin(qlora_ctx* ctx, const qlora_linear_desc* l,
                                        const qlora_tensor* x, qlora__masked* m) {
    QLORA__TRY(qlora__tensor_shape(ctx, x->dtype, 1, 0, l->in, l->in, &m->rows));
    m->scratch_before = qlora__scratch_mark(ctx);
    // Uses half of the free scratch, because products may need some.
    size_t all = qlora__scratch_free(ctx);
    int64_t fit = (int64_t)(all / 2 / ((size_t)l->in * qlora_dtype_bytes(x->dtype) + 1));
    m->slice = qlora__min(x->rows, qlora__max(1, fit));
    m->rows.bytes = (size_t)(m->slice * l->in) * qlora_dtype_bytes(x->dtype);
    return qlora__scratch(ctx, m->rows.bytes, &m->rows.data);
}

// Applies the mask of part i to rows [first, first + count) of `from`; stores or adds to `to`.
static qlora_result qlora__linear_mask(qlora_ctx* ctx, const qlora_linear_desc* l, int32_t i,
                                       int64_t first, const qlora_tensor* from,
                                       const qlora_tensor* to, bool accumulate) {
    qlora_tensor positions;
    qlora_tensor sequences;
    QLORA__TRY(qlora__tensor_view(ctx, l->positions, 0, 1, first, from->rows, &positions));
    QLORA__TRY(qlora__tensor_view(ctx, l->sequences, 0, 1, first, from->rows, &sequences));
    qlora_dropout_desc d;
    memset(&d, 0, sizeof d);
    d.x = from;
    d.y = to;
    d.positions = &positions;
    d.sequences = &sequences;
    d.state = l->state;
    d.p = l->dropout;
    d.layer = l->layer;
    d.projection = l->parts[i].projection;
    d.accumulate = accumulate;
    return qlora__dropout(ctx, &d);
}

static qlora_result qlora__linear_dropout_check(qlora_ctx* ctx, const qlora_linear_desc* l,
                                                int64_t rows) {
    if (l->dropout > 0.0f) {
        QLORA__TRY(qlora__need(ctx, l->positions, "positions", QLORA__IS_I32, 1, rows));
        QLORA__TRY(qlora__need(ctx, l->sequences, "sequences", QLORA__IS_I32, 1, rows));
        QLORA__TRY(qlora__need(ctx, l->state, "state", QLORA__IS_I32, 1, 4));
    }
    return QLORA_OK;
}

// ---- forward ------------------------------------------------------------------------------------

// Computes z of one part from the masked x, several rows at a time.
static qlora_result qlora__linear_z_masked(qlora_ctx* ctx, qlora_math math,
                                           const qlora_linear_desc* l, int32_t i,
                                           const qlora_tensor* x, const qlora_tensor* z) {
    qlora__masked m;
    QLORA__TRY(qlora__masked_begin(ctx, l, x, &m));
    for (int64_t done = 0; done < x->rows; done += m.slice) {
        int64_t now = qlora__min(m.slice, x->rows - done);
        qlora_tensor from;
        qlora_tensor to;
        m.rows.rows = now;
        QLORA__TRY(qlora__tensor_view(ctx, x, done, now, 0, l->in, &from));
        QLORA__TRY(qlora__tensor_view(ctx, z, done, now, 0, z->cols, &to));
        QLORA__TRY(qlora__linear_mask(ctx, l, i, done, &from, &m.rows, false));
        QLORA__TRY(qlora__linear_gemm(ctx, math, QLORA__LINEAR_FORWARD, 1.0f, 0.0f, &m.rows,
                                      l->parts[i].a, &to));
    }
    qlora__scratch_release(ctx, m.scratch_before);
    return QLORA_OK;
}

// Sets the columns of z or u that pad the sum of the ranks to zero: from column `used` of tail on.
static qlora_result qlora__linear_pad_zero(qlora_ctx* ctx, const qlora_tensor* tail, int64_t used) {
    qlora_tensor rest;
    QLORA__TRY(qlora__tensor_view(ctx, tail, 0, tail->rows, used, tail->cols - used, &rest));
    return qlora__tensor_zero(ctx, &rest);
}

// Sets what belongs to other adapters than the row to zero, if there are several.
static qlora_result qlora__linear_keep_own(qlora_ctx* ctx, const qlora_linear_desc* l,
                                           const qlora_tensor* inner, const qlora_tensor* tail) {
    return l->owners != NULL ? qlora__keep_own(ctx, l->owners, inner, tail) : QLORA_OK;
}

// Computes z in the last columns of x.
static qlora_result qlora__linear_z(qlora_ctx* ctx, qlora_math math, const qlora_linear_desc* l,
                                    const qlora_tensor* x, const qlora_tensor* inner) {
    int64_t pad = x->cols - l->in;
    qlora_tensor tail;
    if (pad == 0) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__tensor_view(ctx, x, 0, x->rows, l->in, pad, &tail));
    qlora_tensor a;
    qlora_tensor sb;
    // all parts at once, including the zero columns
    if (l->dropout == 0.0f && qlora__linear_joined(l, pad, &a, &sb)) {
        QLORA__TRY(
            qlora__linear_gemm(ctx, math, QLORA__LINEAR_FORWARD, 1.0f, 0.0f, inner, &a, &tail));
        return qlora__linear_keep_own(ctx, l, inner, &tail);
    }
    int64_t at = 0;
    for (int32_t i = 0; i < l->count; i++) {
        qlora_tensor z;
        QLORA__TRY(qlora__tensor_view(ctx, &tail, 0, x->rows, at, l->parts[i].rank, &z));
        if (z.cols > 0 && l->dropout > 0.0f) {
            QLORA__TRY(qlora__linear_z_masked(ctx, math, l, i, inner, &z));
        } else if (z.cols > 0) {
            QLORA__TRY(qlora__linear_gemm(ctx, math, QLORA__LINEAR_FORWARD, 1.0f, 0.0f, inner,
                                          l->parts[i].a, &z));
        }
        at += z.cols;
    }
    QLORA__TRY(qlora__linear_pad_zero(ctx, &tail, at));
    return qlora__linear_keep_own(ctx, l, inner, &tail);
}

static qlora_result qlora__linear_forward_plain(qlora_ctx* ctx, qlora_math math,
                                                const qlora_linear_desc* l, const qlora_tensor* x,
                                                const qlora_tensor* inner, const qlora_tensor* y) {
    int64_t col = 0;
    int64_t at = l->in;
    for (int32_t i = 0; i < l->count; i++) {
        const qlora_linear_part* p = &l->parts[i];
        qlora_tensor part;
        qlora_tensor z;
        size_t scratch_before = qlora__scratch_mark(ctx);
        QLORA__TRY(qlora__tensor_view(ctx, y, 0, y->rows, col, p->out, &part));
        QLORA__TRY(qlora__tensor_view(ctx, x, 0, x->rows, at, p->rank, &z));
        QLORA__TRY(p->dense == NULL ? qlora__linear_coded(ctx, math, false, inner, p, &part, 0)
                                    : qlora__linear_gemm(ctx, math, QLORA__LINEAR_FORWARD, 1.0f,
                                                         0.0f, inner, p->dense, &part));
        qlora__scratch_release(ctx, scratch_before);
        if (p->rank > 0) {
            QLORA__TRY(
                qlora__linear_gemm(ctx, math, QLORA__LINEAR_FORWARD, 1.0f, 1.0f, &z, p->sb, &part));
        }
        if (p->bias != NULL) {
            QLORA__TRY(qlora__linear_bias(ctx, p->bias, &part, true));
        }
        col += p->out;
        at += p->rank;
    }
    return QLORA_OK;
}

// What of a stack's input is there.
#define QLORA__THERE_Z 1u
#define QLORA__THERE_CODES 2u // its codes and scales for FP8 products

// y (+)= z (sB)^T in the type of x, and the base in FP8 on top of it.
static qlora_result qlora__linear_forward_fp8(qlora_ctx* ctx, qlora_math math,
                                              const qlora_linear_desc* l, const qlora_tensor* x,
                                              const qlora_tensor* y, bool biased, bool coded) {
    qlora_tensor inner;
    qlora_tensor z;
    qlora_tensor a;
    qlora_tensor sb;
    int64_t pad = x->cols - l->in;
    QLORA__TRY(qlora__tensor_view(ctx, x, 0, x->rows, 0, l->in, &inner));
    QLORA__TRY(qlora__tensor_view(ctx, x, 0, x->rows, l->in, pad, &z));
    if (pad > 0 && qlora__linear_joined(l, pad, &a, &sb)) {
        QLORA__TRY(qlora__linear_gemm(ctx, math, QLORA__LINEAR_FORWARD, 1.0f, biased ? 1.0f : 0.0f,
                                      &z, &sb, y));
    }
    return qlora__fp8_product(ctx, l->fp8, false, coded, &inner, y, biased || pad > 0);
}

static qlora_result qlora__linear_forward_joined(qlora_ctx* ctx, qlora_math math,
                                                 const qlora_linear_desc* l, const qlora_tensor* x,
                                                 const qlora_tensor* y, bool coded) {
    int64_t out = qlora_linear_out(l);
    bool biased = false;
    for (int32_t i = 0; i < l->count; i++) {
        biased = biased || l->parts[i].bias != NULL;
    }
    int64_t col = 0;
    for (int32_t i = 0; i < l->count && biased; i++) {
        const qlora_linear_part* p = &l->parts[i];
        qlora_tensor part;
        QLORA__TRY(qlora__tensor_view(ctx, y, 0, y->rows, col, p->out, &part));
        QLORA__TRY(p->bias != NULL ? qlora__linear_bias(ctx, p->bias, &part, false)
                                   : qlora__tensor_zero(ctx, &part));
        col += p->out;
    }
    if (l->fp8 != NULL) {
        return qlora__linear_forward_fp8(ctx, math, l, x, y, biased, coded);
    }
    qlora_tensor upper; // [W sB]
    QLORA__TRY(qlora__tensor_view(ctx, l->operand, 0, out, 0, l->operand->cols, &upper));
    return qlora__linear_gemm(ctx, math, QLORA__LINEAR_FORWARD, 1.0f, biased ? 1.0f : 0.0f, x,
                              &upper, y);
}

// The plain form with panels that the products share; with dropout, z is computed before.
static qlora_result qlora__linear_forward_shared(qlora_ctx* ctx, qlora_math math,
                                                 const qlora_linear_desc* l, const qlora_tensor* x,
                                                 const qlora_tensor* inner, const qlora_tensor* y) {
    bool dropped = l->dropout > 0.0f;
    qlora_tensor tail;
    if (dropped) {
        QLORA__TRY(qlora__linear_z(ctx, math, l, x, inner));
    }
    QLORA__TRY(qlora__tensor_view(ctx, x, 0, x->rows, l->in, x->cols - l->in, &tail));
    QLORA__TRY(qlora__working_need(ctx));
    qlora__linear_forward_panels(ctx, l, x, y, !dropped, math == QLORA__MATH_BF16);
    QLORA__TRY(qlora__linear_pad_zero(ctx, &tail, qlora__linear_rank(l)));
    int64_t col = 0;
    for (int32_t i = 0; i < l->count; i++) {
        const qlora_linear_part* p = &l->parts[i];
        qlora_tensor part;
        QLORA__TRY(qlora__tensor_view(ctx, y, 0, y->rows, col, p->out, &part));
        if (p->bias != NULL) {
            QLORA__TRY(qlora__linear_bias(ctx, p->bias, &part, true));
        }
        col += p->out;
    }
    return QLORA_OK;
}

// there: z, and codes with it.
static qlora_result qlora__linear_forward(qlora_ctx* ctx, qlora_math math,
                                          const qlora_linear_desc* l, unsigned there,
                                          const qlora_tensor* x, const qlora_tensor* y) {
    unsigned types = QLORA__IS_F32 | QLORA__IS_BF16;
    QLORA__TRY(qlora__need(ctx, x, "x", types, -1, -1));
    QLORA__TRY(qlora__linear_check(ctx, l, x->dtype, false));
    QLORA__TRY(qlora__need(ctx, x, "x", types, -1, l->in + qlora_linear_pad(l)));
    QLORA__TRY(qlora__need(ctx, y, "y", 1u << x->dtype, x->rows, qlora_linear_out(l)));
    QLORA__TRY(qlora__need_apart(ctx, "y", y, "x", x));
    QLORA__TRY(qlora__linear_dropout_check(ctx, l, x->rows));
    qlora_tensor inner;
    QLORA__TRY(qlora__tensor_view(ctx, x, 0, x->rows, 0, l->in, &inner));
    bool bf16 = math == QLORA__MATH_BF16;
    if (qlora__linear_in_panels(ctx, l, x, qlora__linear_forward_steps(ctx, l, bf16), bf16)) {
        return qlora__linear_forward_shared(ctx, math, l, x, &inner, y);
    }
    bool has_z = (there & QLORA__THERE_Z) != 0;
    bool coded = (there & QLORA__THERE_CODES) != 0;
    QLORA_ASSERT(!coded || l->fp8 != NULL);
    if (!has_z) {
        QLORA__TRY(qlora__linear_z(ctx, math, l, x, &inner));
    }
    return l->operand != NULL || l->fp8 != NULL
               ? qlora__linear_forward_joined(ctx, math, l, x, y, coded)
               : qlora__linear_forward_plain(ctx, math, l, x, &inner, y);
}

qlora_result qlora_linear_forward(qlora_ctx* ctx, const qlora_linear_desc* linear,
                                  const qlora_tensor* x, const qlora_tensor* y) {
    QLORA__ENTER(ctx, "qlora_linear_forward");
    return qlora__leave(ctx, qlora__linear_forward(ctx, ctx->desc.math, linear, 0u, x, y));
}

// ---- backward -----------------------------------------------------------------------------------

// Whether the parts of a stack of several adapters are alike, so that a batched product computes
// their u without the zeros beside them. With one adapter those cost next to nothing.
static bool qlora__linear_parts_alike(const qlora_linear_desc* l) {
    bool alike = l->owners != NULL && l->count > 1;
    for (int32_t i = 1; i < l->count; i++) {
        alike = alike && l->parts[i].out == l->parts[0].out && l->parts[i].rank == l->parts[0].rank;
    }
    return alike;
}

// Computes u of a joined stack: all parts at once, including the zero columns.
static qlora_result qlora__linear_u_joined(qlora_ctx* ctx, qlora_math math,
                                           const qlora_linear_desc* l, const qlora_tensor* inner,
                                           const qlora_tensor* sb, const qlora_tensor* tail) {
    qlora_tensor dy = *inner;
    qlora_tensor b = *sb;
    qlora_tensor u = *tail;
    if (qlora__linear_parts_alike(l)) { // the columns that pad the ranks are zeroed with the others
        dy.cols = l->parts[0].out;
        dy.batch_stride = dy.cols;
        u.cols = l->parts[0].rank;
        u.batch_stride = u.cols;
        b.rows = dy.cols;
        b.cols = u.cols;
        b.batch_stride = b.rows * b.ld + b.cols;
        dy.batch = l->count;
        b.batch = l->count;
        u.batch = l->count;
    }
    QLORA__TRY(qlora__linear_gemm(ctx, math, QLORA__LINEAR_BACKWARD, 1.0f, 0.0f, &dy, &b, &u));
    return qlora__linear_keep_own(ctx, l, inner, tail);
}

// Computes u in the last columns of dy.
static qlora_result qlora__linear_u(qlora_ctx* ctx, qlora_math math, const qlora_linear_desc* l,
                                    const qlora_tensor* dy, const qlora_tensor* inner) {
    int64_t out = inner->cols;
    int64_t pad = dy->cols - out;
    qlora_tensor tail;
    QLORA__TRY(qlora__tensor_view(ctx, dy, 0, dy->rows, out, pad, &tail));
    qlora_tensor a;
    qlora_tensor sb;
    if (qlora__linear_joined(l, pad, &a, &sb)) {
        return qlora__linear_u_joined(ctx, math, l, inner, &sb, &tail);
    }
    int64_t col = 0;
    int64_t at = 0;
    for (int32_t i = 0; i < l->count; i++) {
        const qlora_linear_part* p = &l->parts[i];
        qlora_tensor part;
        qlora_tensor u;
        QLORA__TRY(qlora__tensor_view(ctx, inner, 0, dy->rows, col, p->out, &part));
        QLORA__TRY(qlora__tensor_view(ctx, &tail, 0, dy->rows, at, p->rank, &u));
        if (p->rank > 0) {
            QLORA__TRY(qlora__linear_gemm(ctx, math, QLORA__LINEAR_BACKWARD, 1.0f, 0.0f, &part,
                                          p->sb, &u));
        }
        col += p->out;
        at += p->rank;
    }
    QLORA__TRY(qlora__linear_pad_zero(ctx, &tail, at));
    return qlora__linear_keep_own(ctx, l, inner, &tail);
}

// dx = u A in the type of dy, unless there is dropout, and the base in FP8 on top of it.
static qlora_result qlora__linear_dx_fp8(qlora_ctx* ctx, qlora_math math,
                                         const qlora_linear_desc* l, const qlora_tensor* dy,
                                         const qlora_tensor* inner, bool coded,
                                         const qlora_tensor* dx) {
    int64_t pad = dy->cols - inner->cols;
    bool adds = pad > 0 && l->dropout == 0.0f;
    qlora_tensor u;
    qlora_tensor a;
    qlora_tensor sb;
    QLORA__TRY(qlora__tensor_view(ctx, dy, 0, dy->rows, inner->cols, pad, &u));
    if (adds && qlora__linear_joined(l, pad, &a, &sb)) {
        QLORA__TRY(qlora__linear_gemm(ctx, math, QLORA__LINEAR_BACKWARD, 1.0f, 0.0f, &u, &a, dx));
    }
    return qlora__fp8_product(ctx, l->fp8, true, coded, inner, dx, adds);
}

// dx = sum of dy_i W_i, plus u_i A_i unless there is dropout. coded: the codes of dy for FP8
// products are there.
static qlora_result qlora__linear_dx(qlora_ctx* ctx, qlora_math math, const qlora_linear_desc* l,
                                     const qlora_tensor* dy, const qlora_tensor* inner, bool coded,
                                     const qlora_tensor* dx) {
    if (l->fp8 != NULL) {
        return qlora__linear_dx_fp8(ctx, math, l, dy, inner, coded, dx);
    }
    if (l->operand != NULL) {
        const qlora_tensor* left = l->dropout > 0.0f ? inner : dy;
        qlora_tensor below; // [W ; A], or W alone
        QLORA__TRY(qlora__tensor_view(ctx, l->operand, 0, left->cols, 0, l->in, &below));
        return qlora__linear_gemm(ctx, math, QLORA__LINEAR_BACKWARD, 1.0f, 0.0f, left, &below, dx);
    }
    int64_t col = 0;
    int64_t at = inner->cols;
    for (int32_t i = 0; i < l->count; i++) {
        const qlora_linear_part* p = &l->parts[i];
        qlora_tensor part;
        qlora_tensor u;
        size_t scratch_before = qlora__scratch_mark(ctx);
        float beta = i > 0 ? 1.0f : 0.0f;
        QLORA__TRY(qlora__tensor_view(ctx, inner, 0, dy->rows, col, p->out, &part));
        QLORA__TRY(qlora__tensor_view(ctx, dy, 0, dy->rows, at, p->rank, &u));
        QLORA__TRY(p->dense == NULL
                       ? qlora__linear_coded(ctx, math, true, &part, p, dx,
                                             i > 0 ? (uint32_t)QLORA_PRODUCT_ACCUMULATE : 0u)
                       : qlora__linear_gemm(ctx, math, QLORA__LINEAR_BACKWARD, 1.0f, beta, &part,
                                            p->dense, dx));
        qlora__scratch_release(ctx, scratch_before);
        if (p->rank > 0 && l->dropout == 0.0f) {
            QLORA__TRY(
                qlora__linear_gemm(ctx, math, QLORA__LINEAR_BACKWARD, 1.0f, 1.0f, &u, p->a, dx));
        }
        col += p->out;
        at += p->rank;
    }
    return QLORA_OK;
}

// Computes u, in the last columns of dy, and dx unless it is NULL. coded: as above.
static qlora_result qlora__linear_u_dx(qlora_ctx* ctx, qlora_math math, const qlora_linear_desc* l,
                                       const qlora_tensor* dy, const qlora_tensor* inner,
                                       bool coded, const qlora_tensor* dx) {
    bool bf16 = math == QLORA__MATH_BF16;
    if (dx != NULL && l->dropout == 0.0f &&
        qlora__linear_in_panels(ctx, l, dy, qlora__linear_backward_steps(ctx, l, bf16), bf16)) {
        qlora_tensor tail;
        QLORA__TRY(
            qlora__tensor_view(ctx, dy, 0, dy->rows, inner->cols, dy->cols - inner->cols, &tail));
        QLORA__TRY(qlora__working_need(ctx));
        qlora__linear_dx_panels(ctx, l, dy, inner->cols, dx, bf16);
        return qlora__linear_pad_zero(ctx, &tail, qlora__linear_rank(l));
    }
    if (dy->cols > inner->cols) {
        QLORA__TRY(qlora__linear_u(ctx, math, l, dy, inner));
    }
    return dx != NULL ? qlora__linear_dx(ctx, math, l, dy, inner, coded, dx) : QLORA_OK;
}
