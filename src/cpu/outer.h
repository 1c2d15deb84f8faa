// ---- sums of outer products ---------------------------------------------------------------------

// C = alpha A^T B + beta C where A is stored [K,M] and B [K,N] and one of the two has few columns,
// as in the gradients of adapters. The wide side is read where it is, once: packing it would take
// longer than multiplying. Every element of C is one sum in ascending k that starts with beta C, so
// the bits depend neither on the threads nor on where K is cut. alpha is multiplied into the side
// with few columns.

#define QLORA__OUTER_FEW 48   // columns of the side with few, at most
#define QLORA__OUTER_COLS 96  // columns of the wide side at a time: whole tiles in every tier
#define QLORA__OUTER_STEPS 48 // steps whose columns stay in the first-level cache
#define QLORA__OUTER_AHEAD 16 // steps ahead of which memory is read

typedef struct qlora__outer {
    const qlora__gemm* g;
    const qlora__cpu_rows* rows;
    bool transposed;             // the wide side is A
    int64_t few;             // columns of the other side
    int64_t padded;          // to a multiple of QLORA__BLOCK_ROWS
    const QLORA__REAL* side; // its columns times alpha [K][padded]
    const QLORA__REAL* wide; // [K][cols]
    int64_t ld;
    int64_t cols;
} qlora__outer;

// Moves n columns of C from `col` on to the sums, times beta, or back.
static void qlora__outer_move(const qlora__outer* o, int64_t col, int64_t n, bool in,
                              QLORA__REAL sums[QLORA__OUTER_FEW][QLORA__OUTER_COLS]) {
    const qlora__gemm* g = o->g;
    QLORA__REAL* c = (QLORA__REAL*)g->C + (o->transposed ? col * g->ldc : col);
    int64_t row = o->transposed ? 1 : g->ldc;
    int64_t step = o->transposed ? g->ldc : 1;
    for (int64_t i = 0; i < o->few; i++) {
        for (int64_t j = 0; j < n; j++) {
            QLORA__REAL* at = c + i * row + j * step;
            if (in) {
                sums[i][j] = (QLORA__REAL)g->beta * *at;
            } else {
                *at = sums[i][j];
            }
        }
    }
}

static void qlora__outer_units(void* user, int64_t begin, int64_t end) {
    const qlora__outer* o = (const qlora__outer*)user;
    QLORA__REAL sums[QLORA__OUTER_FEW][QLORA__OUTER_COLS];
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t col = unit * QLORA__OUTER_COLS;
        qlora__block_product p;
        p.m = o->padded;
        p.n = qlora__min(QLORA__OUTER_COLS, o->cols - col);
        p.lda = o->padded;
        p.ldb = o->ld;
        p.c = sums[0];
        p.ldc = QLORA__OUTER_COLS;
        p.add = true;
        p.transposed = true;
        p.ahead = QLORA__OUTER_AHEAD * o->ld;
        memset(sums, 0, sizeof sums);
        if (o->g->beta != 0.0f) {
            qlora__outer_move(o, col, p.n, true, sums);
        }
        for (int64_t k = 0; k < o->g->K; k += QLORA__OUTER_STEPS) {
            p.k = qlora__min(QLORA__OUTER_STEPS, o->g->K - k);
            p.a = o->side + k * o->padded;
            p.b = o->wide + k * o->ld + col;
            o->rows->product(&p);
        }
        qlora__outer_move(o, col, p.n, false, sums);
    }
}

// Whether a product goes this way.
static bool qlora__outer_takes(const qlora_ctx* ctx, const qlora__gemm* g) {
    int64_t few = qlora__min(g->M, g->N);
    bool plain = g->a_type == QLORA_F32 && g->b_type == QLORA_F32 && g->out == QLORA_F32 &&
                 !qlora__gemm_is_coded(g) && !g->bf16 && g->batch == 1;
    return plain && g->ta && !g->tb && few <= QLORA__OUTER_FEW &&
           qlora__max(g->M, g->N) % QLORA__BLOCK_COLS == 0 && ctx->cpu->rows->product != NULL &&
           g->K <= qlora__packing_room() / QLORA__OUTER_FEW;
}

static void qlora__gemm_outer(qlora_ctx* ctx, const qlora__gemm* g) {
    qlora__outer o;
    o.g = g;
    o.rows = ctx->cpu->rows;
    o.transposed = g->M > g->N;
    o.few = qlora__min(g->M, g->N);
    o.padded = qlora__ceil_div(o.few, QLORA__BLOCK_ROWS) * QLORA__BLOCK_ROWS;
    o.wide = (const QLORA__REAL*)(o.transposed ? g->A : g->B);
    o.ld = o.transposed ? g->lda : g->ldb;
    o.cols = qlora__max(g->M, g->N);
    const QLORA__REAL* from = (const QLORA__REAL*)(o.transposed ? g->B : g->A);
    int64_t ld = o.transposed ? g->ldb : g->lda;
    QLORA__REAL* side = (QLORA__REAL*)(void*)ctx->packing->a;
    for (int64_t k = 0; k < g->K; k++) {
        QLORA__REAL* to = side + k * o.padded;
        for (int64_t i = 0; i < o.few; i++) {
            to[i] = from[k * ld + i] * (QLORA__REAL)g->alpha;
        }
        for (int64_t i = o.few; i < o.padded; i++) {
            to[i] = 0;
        }
    }
    o.side = side;
    qlora__parallel(ctx, qlora__ceil_div(o.cols, QLORA__OUTER_COLS), 1, qlora__outer_units, &o);
}

#undef QLORA__OUTER_FEW
#undef QLORA__OUTER_COLS
#undef QLORA__OUTER_STEPS
#undef QLORA__OUTER_AHEAD
