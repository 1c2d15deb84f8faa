// ---- LoRA linear: the gradients of A and B, and the backward pass -------------------------------

// For one part with dropout: dA = u^T (masked x), and dx += masked u A.
static qlora_result qlora__linear_masked_gradients(qlora_ctx* ctx, qlora_math math,
                                                   const qlora_linear_desc* l, int32_t i,
                                                   const qlora_tensor* x, const qlora_tensor* u,
                                                   const qlora_tensor* dx, float beta) {
    const qlora_linear_part* p = &l->parts[i];
    qlora__masked m;
    QLORA__TRY(qlora__masked_begin(ctx, l, x, &m));
    for (int64_t done = 0; done < x->rows; done += m.slice) {
        int64_t now = qlora__min(m.slice, x->rows - done);
        qlora_tensor from;
        qlora_tensor some;
        qlora_tensor to;
        m.rows.rows = now;
        QLORA__TRY(qlora__tensor_view(ctx, x, done, now, 0, l->in, &from));
        QLORA__TRY(qlora__tensor_view(ctx, u, done, now, 0, u->cols, &some));
        QLORA__TRY(qlora__linear_mask(ctx, l, i, done, &from, &m.rows, false));
        QLORA__TRY(qlora__linear_gemm(ctx, math, QLORA__LINEAR_GRADIENT, 1.0f,
                                      done > 0 ? 1.0f : beta, &some, &m.rows, p->da));
        if (dx != NULL) {
            QLORA__TRY(qlora__tensor_view(ctx, dx, done, now, 0, l->in, &to));
            QLORA__TRY(qlora__linear_gemm(ctx, math, QLORA__LINEAR_BACKWARD, 1.0f, 0.0f, &some,
                                          p->a, &m.rows));
            QLORA__TRY(qlora__linear_mask(ctx, l, i, done, &m.rows, &to, true));
        }
    }
    qlora__scratch_release(ctx, m.scratch_before);
    return QLORA_OK;
}

// Joins dA of all parts into one matrix if they are consecutive in memory, so that x is read once.
static bool qlora__linear_da_joined(const qlora_linear_desc* l, qlora_tensor* joined) {
    memset(joined, 0, sizeof *joined);
    for (int32_t i = 0; i < l->count; i++) {
        const qlora_linear_part* p = &l->parts[i];
        if (p->rank == 0) {
            continue;
        }
        if (joined->rows == 0) {
            *joined = *p->da;
            continue;
        }
        size_t before = (size_t)(joined->rows * joined->ld) * qlora_dtype_bytes(QLORA_F32);
        if (p->da->ld != joined->ld || (char*)p->da->data != (char*)joined->data + before) {
            return false;
        }
        joined->rows += p->rank;
        joined->bytes = before + p->da->bytes;
    }
    return joined->rows > 0;
}

// Which gradients are computed.
#define QLORA__GRADIENT_A 1u
#define QLORA__GRADIENT_B 2u

// What the gradients of a stack are products of, and which of them are computed.
typedef struct qlora__linear_factors {
    const qlora_tensor* x;
    const qlora_tensor* z;  // NULL: in the last columns of x
    const qlora_tensor* dy; // with u in its last columns
    float beta;             // 1 adds to the gradients, 0 overwrites them
    unsigned which;
} qlora__linear_factors;

static qlora__linear_factors qlora__linear_factors_of(const qlora_tensor* x, const qlora_tensor* z,
                                                      const qlora_tensor* dy, float beta,
                                                      unsigned which) {
    qlora__linear_factors f;
    f.x = x;
    f.z = z;
    f.dy = dy;
    f.beta = beta;
    f.which = which;
    return f;
}

// The columns of z that belong to the part whose rank begins in column `at` of it.
static qlora_result qlora__linear_z_of(qlora_ctx* ctx, const qlora_linear_desc* l,
                                       const qlora__linear_factors* f, int64_t at, int64_t rank,
                                       qlora_tensor* z) {
    return f->z != NULL ? qlora__tensor_view(ctx, f->z, 0, f->x->rows, at, rank, z)
                        : qlora__tensor_view(ctx, f->x, 0, f->x->rows, l->in + at, rank, z);
}

// Sets k to the launch of all gradients, dA first, if there is one: without dropout, in bf16 on a
// GPU. *has: whether there is.
static qlora_result qlora__linear_skinny(qlora_ctx* ctx, const qlora_linear_desc* l,
                                         const qlora__linear_factors* f, qlora__skinny* k,
                                         bool* has) {
    const qlora_tensor* x = f->x;
    const qlora_tensor* dy = f->dy;
    qlora_tensor w;
    qlora_tensor s;
    qlora_tensor all;
    int64_t col = 0;
    int64_t at = 0;
    bool joined = qlora__linear_da_joined(l, &all);
    *has = false;
    if (qlora__on_cpu(ctx) || x->dtype != QLORA_BF16 || l->dropout > 0.0f || !joined ||
        x->rows * l->in < QLORA__SKINNY_FROM) {
        return QLORA_OK;
    }
    memset(k, 0, sizeof *k);
    k->add = f->beta != 0.0f;
    if ((f->which & QLORA__GRADIENT_A) != 0) {
        QLORA__TRY(qlora__tensor_view(ctx, x, 0, x->rows, 0, l->in, &w));
        QLORA__TRY(qlora__tensor_view(ctx, dy, 0, x->rows, qlora_linear_out(l), all.rows, &s));
        if (!qlora__skinny_add(k, &s, &w, &all, false, 1.0f)) {
            return QLORA_OK;
        }
    }
    for (int32_t i = 0; i < l->count && (f->which & QLORA__GRADIENT_B) != 0; i++) {
        const qlora_linear_part* p = &l->parts[i];
        QLORA__TRY(qlora__tensor_view(ctx, dy, 0, x->rows, col, p->out, &w));
        QLORA__TRY(qlora__linear_z_of(ctx, l, f, at, p->rank, &s));
        if (p->rank > 0 && !qlora__skinny_add(k, &s, &w, p->db, true, p->scale)) {
            return QLORA_OK;
        }
        col += p->out;
        at += p->rank;
    }
    *has = true;
    return QLORA_OK;
}

// f32 elements of parts that one launch of these gradients needs; 0 if there is none.
static int64_t qlora__linear_parts_of(const qlora_linear_desc* l, int64_t rows, unsigned which) {
    int64_t strips = 0;
    int64_t numbers = 0;
    int64_t rank = 0;
    bool fits = rows * l->in >= QLORA__SKINNY_FROM;
    for (int32_t i = 0; i < l->count; i++) {
        const qlora_linear_part* p = &l->parts[i];
        rank += p->rank;
        if ((which & QLORA__GRADIENT_B) != 0 && p->rank > 0) {
            fits = fits && rows * p->out <= QLORA__SKINNY_MOST;
            strips += qlora__ceil_div(p->out, QLORA__SKINNY_STRIP);
            numbers += p->out * p->rank;
        }
    }
    if ((which & QLORA__GRADIENT_A) != 0) {
        fits = fits && rows * l->in <= QLORA__SKINNY_MOST;
        strips += qlora__ceil_div(l->in, QLORA__SKINNY_STRIP);
        numbers += l->in * rank;
    }
    fits = fits && rank > 0 && rank <= QLORA__SKINNY_RANK;
    return fits ? qlora__skinny_splits(rows, strips) * numbers : 0;
}

// The same of any of them.
static QLORA__UNUSED int64_t qlora__linear_parts(const qlora_linear_desc* l, int64_t rows) {
    int64_t most = 0;
    for (unsigned which = QLORA__GRADIENT_A; which <= (QLORA__GRADIENT_A | QLORA__GRADIENT_B);
         which++) {
        most = qlora__max(most, qlora__linear_parts_of(l, rows, which));
    }
    return most;
}

// Also dx += u A, if there is dropout. parts: memory for parts of sums; NULL: scratch. If it is too
// small, the gradients are products one by one, which need none.
static qlora_result qlora__linear_gradients(qlora_ctx* ctx, qlora_math math,
                                            const qlora_linear_desc* l,
                                            const qlora__linear_factors* f, const qlora_tensor* dx,
                                            const qlora_tensor* parts) {
    const qlora_tensor* x = f->x;
    const qlora_tensor* dy = f->dy;
    int64_t col = 0;
    int64_t at = 0;
    int64_t out = qlora_linear_out(l);
    bool wants_a = (f->which & QLORA__GRADIENT_A) != 0;
    bool wants_b = (f->which & QLORA__GRADIENT_B) != 0;
    bool has = false;
    qlora__skinny k;
    qlora_tensor inner;
    qlora_tensor all;
    QLORA__TRY(qlora__linear_skinny(ctx, l, f, &k, &has));
    int64_t room = qlora__linear_parts_of(l, x->rows, f->which);
    int64_t most = parts != NULL ? parts->cols
                                 : (int64_t)(qlora__scratch_free(ctx) / sizeof(float));
    if (has && room > 0 && room <= most) {
        void* memory = parts != NULL ? parts->data : NULL;
        if (memory == NULL) {
            QLORA__TRY(qlora__scratch(ctx, (size_t)room * sizeof(float), &memory));
        }
        return qlora__skinny_launch(ctx, &k, memory);
    }
    QLORA__TRY(qlora__tensor_view(ctx, x, 0, x->rows, 0, l->in, &inner));
    bool joined = l->dropout == 0.0f && qlora__linear_da_joined(l, &all);
    if (joined && wants_a) {
        qlora_tensor u;
        QLORA__TRY(qlora__tensor_view(ctx, dy, 0, dy->rows, out, all.rows, &u));
        QLORA__TRY(
            qlora__linear_gemm(ctx, math, QLORA__LINEAR_GRADIENT, 1.0f, f->beta, &u, &inner, &all));
    }
    for (int32_t i = 0; i < l->count; i++) {
        const qlora_linear_part* p = &l->parts[i];
        qlora_tensor part;
        qlora_tensor z;
        qlora_tensor u;
        QLORA__TRY(qlora__tensor_view(ctx, dy, 0, dy->rows, col, p->out, &part));
        QLORA__TRY(qlora__tensor_view(ctx, dy, 0, dy->rows, out + at, p->rank, &u));
        QLORA__TRY(qlora__linear_z_of(ctx, l, f, at, p->rank, &z));
        if (p->rank > 0 && l->dropout > 0.0f) {
            QLORA__TRY(qlora__linear_masked_gradients(ctx, math, l, i, &inner, &u, dx, f->beta));
        } else if (p->rank > 0 && !joined && wants_a) {
            QLORA__TRY(qlora__linear_gemm(ctx, math, QLORA__LINEAR_GRADIENT, 1.0f, f->beta, &u,
                                          &inner, p->da));
        }
        if (p->rank > 0 && wants_b) {
            QLORA__TRY(qlora__linear_gemm(ctx, math, QLORA__LINEAR_GRADIENT, p->scale, f->beta,
                                          &part, &z, p->db));
        }
        col += p->out;
        at += p->rank;
    }
    return QLORA_OK;
}

static qlora_result qlora__linear_backward(qlora_ctx* ctx, qlora_math math,
                                           const qlora_linear_desc* l, const qlora_tensor* x,
                                           const qlora_tensor* dy, const qlora_tensor* dx,
                                           uint32_t flags) {
    unsigned types = QLORA__IS_F32 | QLORA__IS_BF16;
    QLORA__TRY(qlora__need(ctx, x, "x", types, -1, -1));
    QLORA__TRY(qlora__linear_check(ctx, l, x->dtype, true));
    int64_t pad = qlora_linear_pad(l);
    int64_t out = qlora_linear_out(l);
    QLORA__TRY(qlora__need(ctx, x, "x", types, -1, l->in + pad));
    QLORA__TRY(qlora__need(ctx, dy, "dy", 1u << x->dtype, x->rows, out + pad));
    QLORA__TRY(qlora__need_apart(ctx, "dy", dy, "x", x));
    if (dx != NULL) {
        QLORA__TRY(qlora__need(ctx, dx, "dx", 1u << x->dtype, x->rows, l->in));
        QLORA__TRY(qlora__need_apart(ctx, "dx", dx, "x", x));
        QLORA__TRY(qlora__need_apart(ctx, "dx", dx, "dy", dy));
    }
    if ((flags & ~(uint32_t)QLORA_LINEAR_OVERWRITE) != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "flags is %u; only QLORA_LINEAR_OVERWRITE is allowed", flags);
    }
    QLORA__TRY(qlora__linear_dropout_check(ctx, l, x->rows));
    qlora_tensor inner;
    QLORA__TRY(qlora__tensor_view(ctx, dy, 0, dy->rows, 0, out, &inner));
    QLORA__TRY(qlora__linear_u_dx(ctx, math, l, dy, &inner, false, dx));
    float beta = (flags & QLORA_LINEAR_OVERWRITE) != 0 ? 0.0f : 1.0f;
    qlora__linear_factors all =
        qlora__linear_factors_of(x, NULL, dy, beta, QLORA__GRADIENT_A | QLORA__GRADIENT_B);
    return qlora__linear_gradients(ctx, math, l, &all, dx, NULL);
}

qlora_result qlora_linear_backward(qlora_ctx* ctx, const qlora_linear_desc* linear,
                                   const qlora_tensor* x, const qlora_tensor* dy,
                                   const qlora_tensor* dx, uint32_t flags) {
    QLORA__ENTER(ctx, "qlora_linear_backward");
    return qlora__leave(ctx, qlora__linear_backward(ctx, ctx->desc.math, linear, x, dy, dx, flags));
}
