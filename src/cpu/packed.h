// ---- packed products ----------------------------------------------------------------------------

// A product that is being computed in slices of rows, and of columns if the sums cannot stay in C.
typedef struct qlora__packed {
    const qlora__gemm* g;
    qlora__operand a;
    qlora__operand b;
    qlora__panels left;
    float* c; // the first element of the slice
    int64_t ldc;
    int64_t col;
    int64_t cols;
} qlora__packed;

// Moves the slice of C to or from the sums, if they are not in C itself. beta is applied to C when
// it is read, and not again.
static void qlora__packed_move(const qlora__packed* p, void* C, bool in) {
    const qlora__gemm* g = p->g;
    for (int64_t i = 0; i < p->left.rows; i++) {
        float* sums = p->c + i * p->ldc;
        int64_t at = (p->left.row + i) * g->ldc + p->col;
        for (int64_t j = 0; j < p->cols && in; j++) {
            sums[j] = g->beta * (float)qlora__load(C, g->out, at + j);
        }
        for (int64_t j = 0; j < p->cols && !in; j++) {
            qlora__store(C, g->out, at + j, (QLORA__REAL)sums[j]);
        }
    }
}

// One slice, over all of K.
static void qlora__packed_slice(qlora__packed* p, void* C) {
    const qlora__gemm* g = p->g;
    bool in_place = g->out == QLORA_F32;
    p->c = in_place ? (float*)C + p->left.row * g->ldc + p->col : p->left.memory->c;
    p->ldc = in_place ? g->ldc : QLORA__PART;
    if (g->beta != 0.0f && (!in_place || g->beta != 1.0f)) {
        qlora__packed_move(p, C, true);
    }
    int64_t room = qlora__panels_room(&p->left);
    for (int64_t k = 0; k < g->K; k += room) {
        qlora__segment right;
        right.from = p->b;
        right.k = k;
        right.steps = qlora__min(room, g->K - k);
        qlora__panels_pack(&p->left, &p->a, k, right.steps, 0, g->alpha);
        qlora__panels_multiply(&p->left, 0, &right, 1, p->col, p->cols,
                               qlora__sums_at(p->c, p->ldc, k > 0 || g->beta != 0.0f));
    }
    if (!in_place) {
        qlora__packed_move(p, C, false);
    }
}

static const void* qlora__operand_at(const void* data, qlora_dtype dtype, int64_t element) {
    return data != NULL ? (const char*)data + (size_t)element * qlora_dtype_bytes(dtype) : NULL;
}

static void qlora__gemm_packed(qlora_ctx* ctx, const qlora__gemm* g) {
    qlora__packed p;
    memset(&p, 0, sizeof p);
    p.g = g;
    int64_t width = g->out == QLORA_F32 ? g->N : QLORA__PART;
    int64_t height = qlora__min(QLORA__MC, qlora__ceil_div(g->M, QLORA__CHUNK) * QLORA__CHUNK);
    int64_t most = QLORA__PANELS / height - 7; // the panels may be that much longer
    if (qlora__errand_fine(ctx)) { // with the narrowest blocks
        most = qlora__min(most, qlora__max(QLORA__UNIT / (height * QLORA__NC / 4), QLORA__KC));
    }
    // Nothing is rounded if both operands are bf16.
    bool bf16 = g->bf16 || (g->a_type == QLORA_BF16 && g->b_type == QLORA_BF16 && g->alpha == 1.0f);
    qlora__panels_open(ctx, qlora__min(g->K, most), bf16, &p.left);
    for (int64_t i = 0; i < g->batch; i++) {
        p.a = qlora__operand_of(qlora__operand_at(g->A, g->a_type, i * g->sA), g->a_type, g->lda,
                                !g->ta);
        p.b = qlora__gemm_is_coded(g)
                  ? qlora__operand_coded(g->nf4, g->fp8, g->tb)
                  : qlora__operand_of(qlora__operand_at(g->B, g->b_type, i * g->sB), g->b_type,
                                      g->ldb, g->tb);
        void* C = (char*)g->C + (size_t)(i * g->sC) * qlora_dtype_bytes(g->out);
        for (p.left.row = 0; p.left.row < g->M; p.left.row += QLORA__MC) {
            p.left.rows = qlora__min(QLORA__MC, g->M - p.left.row);
            for (p.col = 0; p.col < g->N; p.col += width) {
                p.cols = qlora__min(width, g->N - p.col);
                qlora__packed_slice(&p, C);
            }
        }
    }
}

// Floats of the shared working memory, for products that are not packed.
static int64_t qlora__packing_room(void) {
    return QLORA__PANELS;
}

#undef QLORA__KC
#undef QLORA__MC
#undef QLORA__NC
#undef QLORA__BLOCKS
#undef QLORA__PART
#undef QLORA__CHUNK
#undef QLORA__PANELS
#undef QLORA__MOST_TILE
#undef QLORA__UNIT
