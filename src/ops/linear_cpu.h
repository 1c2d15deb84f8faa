// ---- LoRA linear on the CPU ---------------------------------------------------------------------
//
// In tiers with packed products, the rows of x, or of dy, are packed once for all products that
// read them, and the product with an adapter continues the sum of the product with its weight:
//
//   z_i = x A_i^T      y_i = [x z_i] [W_i sB_i]^T
//   u_i = dy_i sB_i    dx  = sum over i of [dy_i u_i] [W_i ; A_i]
//
// Every sum has the same terms in the same order as in separate products that add to C, so the bits
// are the same.

// Whether panels with `steps` steps are used for x, or for dy. If only few rows fit at a time, the
// weights would be widened too often.
static bool qlora__linear_in_panels(const qlora_ctx* ctx, const qlora_linear_desc* l,
                                    const qlora_tensor* x, int64_t steps, bool bf16) {
    for (int32_t i = 0; i < l->count; i++) {
        if (l->parts[i].out == 0) {
            return false;
        }
    }
    bool halved = bf16 && qlora__on_cpu(ctx) && ctx->cpu->bf16 != NULL;
    return qlora__on_cpu(ctx) && ctx->cpu->gemm != NULL && l->operand == NULL &&
           l->fp8 == NULL && l->owners == NULL && l->in > 0 && x->dtype == QLORA_F32 &&
           x->rows >= 16 &&
           qlora__panels_rows(x->rows, (halved ? steps / 2 : steps) + 4) >=
               qlora__min(x->rows, 384);
}

static qlora__operand qlora__operand_matrix(const qlora_tensor* t, bool lines) {
    return qlora__operand_of(t->data, t->dtype, t->ld, lines);
}

static qlora__segment qlora__segment_of(qlora__operand from, int64_t steps) {
    qlora__segment s;
    s.from = from;
    s.k = 0;
    s.steps = steps;
    return s;
}

// The weight of a part: its rows are lines forward.
static qlora__operand qlora__linear_weight(const qlora_linear_part* p, bool lines) {
    return p->dense == NULL ? qlora__operand_coded(p->nf4, p->fp8, lines)
                            : qlora__operand_matrix(p->dense, lines);
}

// Where the sums of a product with the panels are: in an f32 matrix, from column `col` on.
static qlora__sums qlora__linear_at(const qlora__panels* p, const qlora_tensor* t, int64_t col) {
    return qlora__sums_at((float*)t->data + p->row * t->ld + col, t->ld, false);
}

// With what panels in bf16 add to each part.
static int64_t qlora__linear_forward_steps(const qlora_ctx* ctx, const qlora_linear_desc* l,
                                           bool bf16) {
    int64_t rank = 0;
    for (int32_t i = 0; i < l->count; i++) {
        rank = qlora__max(rank, l->parts[i].rank);
    }
    return qlora__panels_padded(ctx, bf16, l->in) + rank;
}

// The sum of the ranks of part i and of those after it whose A follow in memory; *next is the first
// part that is not among them. Their products with x are one, which reads the panels once.
static int64_t qlora__linear_ranks(const qlora_linear_desc* l, int32_t i, int32_t* next) {
    const qlora_tensor* first = l->parts[i].a;
    int64_t rank = l->parts[i].rank;
    for (*next = i + 1; *next < l->count && rank > 0; (*next)++) {
        const qlora_linear_part* p = &l->parts[*next];
        if (p->rank == 0 || p->a->ld != first->ld || p->a->dtype != first->dtype ||
            (const char*)p->a->data !=
                (const char*)first->data +
                    (size_t)(rank * first->ld) * qlora_dtype_bytes(first->dtype)) {
            break;
        }
        rank += p->rank;
    }
    return rank;
}

// y, for one slice of rows; with `adapters`, also z, in the columns of x after l->in.
static void qlora__linear_forward_slice(const qlora_linear_desc* l, const qlora__panels* p,
                                        const qlora_tensor* x, const qlora_tensor* y,
                                        bool adapters) {
    qlora__operand rows = qlora__operand_matrix(x, true);
    int64_t at = l->in;
    int32_t next = 0;
    int64_t first = adapters ? qlora__linear_ranks(l, 0, &next) : 0;
    if (qlora__panels_takes_columns(p, l->in, first)) {
        qlora__segment a = qlora__segment_of(qlora__operand_matrix(l->parts[0].a, true), l->in);
        qlora__panels_shift whole = {0, 0};
        qlora__panels_pack_product(p, &rows, whole, &a, first, qlora__linear_at(p, x, at), NULL);
        at += first;
    } else {
        qlora__panels_pack(p, &rows, 0, l->in, 0, 1.0f);
        next = 0;
    }
    for (int32_t i = next; i < l->count && adapters; i = next) {
        int64_t rank = qlora__linear_ranks(l, i, &next);
        if (rank > 0) {
            qlora__segment a = qlora__segment_of(qlora__operand_matrix(l->parts[i].a, true), l->in);
            qlora__panels_multiply(p, 0, &a, 1, 0, rank, qlora__linear_at(p, x, at));
        }
        at += rank;
    }
    int64_t col = 0;
    at = l->in;
    for (int32_t i = 0; i < l->count; i++) {
        const qlora_linear_part* part = &l->parts[i];
        qlora__segment right[2];
        right[0] = qlora__segment_of(qlora__linear_weight(part, true), l->in);
        if (part->rank > 0) {
            right[1] = qlora__segment_of(qlora__operand_matrix(part->sb, true), part->rank);
            qlora__panels_pack(p, &rows, at, part->rank, qlora__panels_steps(p, l->in), 1.0f);
        }
        qlora__panels_multiply(p, 0, right, part->rank > 0 ? 2 : 1, 0, part->out,
                               qlora__linear_at(p, y, col));
        col += part->out;
        at += part->rank;
    }
}

static void qlora__linear_forward_panels(qlora_ctx* ctx, const qlora_linear_desc* l,
                                         const qlora_tensor* x, const qlora_tensor* y,
                                         bool adapters, bool bf16) {
    qlora__panels p;
    qlora__panels_open(ctx, qlora__linear_forward_steps(ctx, l, bf16), bf16, &p);
    int64_t height = qlora__panels_rows(x->rows, p.stride);
    for (p.row = 0; p.row < x->rows; p.row += height) {
        p.rows = qlora__min(height, x->rows - p.row);
        qlora__linear_forward_slice(l, &p, x, y, adapters);
    }
    ctx->last_path = QLORA_PATH_CPU;
}

static int64_t qlora__linear_backward_steps(const qlora_ctx* ctx, const qlora_linear_desc* l,
                                            bool bf16) {
    int64_t steps = 0;
    for (int32_t i = 0; i < l->count; i++) {
        steps += qlora__panels_padded(ctx, bf16, l->parts[i].out);
        steps += qlora__panels_padded(ctx, bf16, l->parts[i].rank);
    }
    return steps;
}

// Packs dy of a part, which starts in column `col`, as steps from `at` on, and after it u, which is
// computed in the columns from `tail` on.
static void qlora__linear_pack_dy(const qlora__panels* p, const qlora_linear_part* part,
                                  const qlora__operand* dy, int64_t col, int64_t tail, int64_t at,
                                  qlora__sums u) {
    int64_t after = at + qlora__panels_steps(p, part->out);
    qlora__panels_shift pack = {col, at};
    qlora__panels_shift back = {tail, after};
    qlora__segment sb;
    memset(&sb, 0, sizeof sb);
    if (part->rank > 0) {
        sb = qlora__segment_of(qlora__operand_matrix(part->sb, false), part->out);
    }
    if (qlora__panels_takes_columns(p, part->out, part->rank)) {
        qlora__panels_pack_product(p, dy, pack, &sb, part->rank, u, &back);
        return;
    }
    qlora__panels_pack(p, dy, col, part->out, at, 1.0f);
    if (part->rank > 0) {
        qlora__panels_multiply(p, at, &sb, 1, 0, part->rank, u);
        qlora__panels_pack(p, dy, tail, part->rank, after, 1.0f);
    }
}

// u, in the columns of dy after `out`, and dx, for one slice of rows. In the panels, the columns of
// u_i are after those of dy_i.
static void qlora__linear_dx_slice(const qlora_linear_desc* l, const qlora__panels* p,
                                   const qlora_tensor* dy, int64_t out, const qlora_tensor* dx) {
    qlora__operand rows = qlora__operand_matrix(dy, true);
    qlora__segment right[2 * QLORA_LINEAR_PARTS];
    int segments = 0;
    int64_t at = 0;
    int64_t col = 0;
    int64_t tail = out;
    for (int32_t i = 0; i < l->count; i++) {
        const qlora_linear_part* part = &l->parts[i];
        qlora__linear_pack_dy(p, part, &rows, col, tail, at, qlora__linear_at(p, dy, tail));
        right[segments] = qlora__segment_of(qlora__linear_weight(part, false), part->out);
        segments++;
        if (part->rank > 0) {
            right[segments] = qlora__segment_of(qlora__operand_matrix(part->a, false), part->rank);
            segments++;
        }
        at += qlora__panels_steps(p, part->out) + qlora__panels_steps(p, part->rank);
        col += part->out;
        tail += part->rank;
    }
    qlora__panels_multiply(p, 0, right, segments, 0, l->in, qlora__linear_at(p, dx, 0));
}

static void qlora__linear_dx_panels(qlora_ctx* ctx, const qlora_linear_desc* l,
                                    const qlora_tensor* dy, int64_t out, const qlora_tensor* dx,
                                    bool bf16) {
    qlora__panels p;
    qlora__panels_open(ctx, qlora__linear_backward_steps(ctx, l, bf16), bf16, &p);
    int64_t height = qlora__panels_rows(dy->rows, p.stride);
    for (p.row = 0; p.row < dy->rows; p.row += height) {
        p.rows = qlora__min(height, dy->rows - p.row);
        qlora__linear_dx_slice(l, &p, dy, out, dx);
    }
    ctx->last_path = QLORA_PATH_CPU;
}
