// The math of a model in QLORA_MODE_BF16 on the CPU: operands of products are rounded to bf16.
#define QLORA__MATH_BF16 ((qlora_math)(QLORA_MATH_TF32_ALL + 1))

// One matrix product whose arguments have been checked: row-major C[M,N] = alpha alpha_dev op(A)
// op(B) + beta C for each of `batch` matrices.
typedef struct qlora__gemm {
    bool ta; // A is stored [K,M]
    bool tb; // B is stored [N,K]
    int64_t M;
    int64_t N;
    int64_t K;
    const void* A;
    const void* B;
    void* C;
    int64_t lda;
    int64_t ldb;
    int64_t ldc;
    int64_t batch;
    int64_t sA; // batch strides; 0 if all products share one matrix
    int64_t sB;
    int64_t sC;
    qlora_dtype a_type; // equal to b_type once mixed operands have been cast
    qlora_dtype b_type;
    qlora_dtype out;
    float alpha;
    float beta;
    const float* alpha_dev; // NULL: 1
    const float* beta_dev;  // set together with alpha_dev
    bool tf32;
    bool bf16; // A times alpha, and B, are rounded to bf16; only on the CPU
    // If one is not NULL, B is this weight, in bf16 values; only on the CPU.
    const qlora_nf4* nf4;
    const qlora__fp8_weight* fp8;
} qlora__gemm;

static bool qlora__gemm_is_coded(const qlora__gemm* g) {
    return g->nf4 != NULL || g->fp8 != NULL;
}

// ---- products on the CPU ------------------------------------------------------------------------

// A panel of 64 rows is multiplied by four tiles of 16 columns, in steps of 64 along K, packed as
// QLORA__REAL. Each element of C is one sum in ascending k, however the threads share the work.
#define QLORA__PANEL 64
#define QLORA__TILE 16
#define QLORA__TILES 4
#define QLORA__STEP 64

// op(A) or op(B): where its element (i, k) is, for row i of C, or column i.
typedef struct qlora__gemm_side {
    const void* data;
    qlora_dtype dtype;
    int64_t k; // from one step to the next
    int64_t i;
} qlora__gemm_side;

// Packs `count` lines of some steps, from element `base` on.
static void qlora__gemm_pack(qlora__gemm_side side, int64_t base, int64_t steps, int64_t count,
                             int64_t width, QLORA__REAL* out) {
    const QLORA__REAL* real = (const QLORA__REAL*)side.data;
    for (int64_t k = 0; k < steps; k++) {
        int64_t from = base + k * side.k;
        QLORA__REAL* to = out + k * width;
        if (side.dtype != QLORA_F32) {
            for (int64_t i = 0; i < count; i++) {
                to[i] = qlora__load(side.data, side.dtype, from + i * side.i);
            }
        } else if (side.i == 1) {
            memcpy(to, real + from, (size_t)count * sizeof *to);
        } else {
            for (int64_t i = 0; i < count; i++) {
                to[i] = real[from + i * side.i];
            }
        }
        for (int64_t i = count; i < width; i++) {
            to[i] = (QLORA__REAL)0;
        }
    }
}

// Rounds packed operands, times a factor, to bf16.
static void qlora__gemm_round(QLORA__REAL* packed, int64_t n, float factor) {
    for (int64_t i = 0; i < n; i++) {
        float value = (float)(packed[i] * (QLORA__REAL)factor);
        packed[i] = (QLORA__REAL)qlora__bf16_to(qlora__bf16_from(value));
    }
}

// acc[4][16] += a[k][4 of 64] b[k][16] over the packed steps, eight columns at a time, so that four
// rows of two vectors stay in registers on every processor.
#if defined(__GNUC__)
typedef QLORA__REAL qlora__real4 __attribute__((vector_size(4 * sizeof(QLORA__REAL))));

static void qlora__gemm_micro(const QLORA__REAL* a, const QLORA__REAL* b, int64_t steps,
                              QLORA__REAL* acc) {
    for (int half = 0; half < QLORA__TILE; half += 8) {
        qlora__real4 c[8];
        for (int r = 0; r < 4; r++) {
            memcpy(&c[2 * r], acc + r * QLORA__TILE + half, sizeof c[0]);
            memcpy(&c[2 * r + 1], acc + r * QLORA__TILE + half + 4, sizeof c[0]);
        }
        qlora__real4 c00 = c[0], c01 = c[1], c10 = c[2], c11 = c[3];
        qlora__real4 c20 = c[4], c21 = c[5], c30 = c[6], c31 = c[7];
        for (int64_t k = 0; k < steps; k++) {
            const QLORA__REAL* ak = a + k * QLORA__PANEL;
            qlora__real4 b0;
            qlora__real4 b1;
            memcpy(&b0, b + k * QLORA__TILE + half, sizeof b0);
            memcpy(&b1, b + k * QLORA__TILE + half + 4, sizeof b1);
            qlora__real4 a0 = {ak[0], ak[0], ak[0], ak[0]};
            qlora__real4 a1 = {ak[1], ak[1], ak[1], ak[1]};
            qlora__real4 a2 = {ak[2], ak[2], ak[2], ak[2]};
            qlora__real4 a3 = {ak[3], ak[3], ak[3], ak[3]};
            c00 += a0 * b0;
            c01 += a0 * b1;
            c10 += a1 * b0;
            c11 += a1 * b1;
            c20 += a2 * b0;
            c21 += a2 * b1;
            c30 += a3 * b0;
            c31 += a3 * b1;
        }
        const qlora__real4 done[8] = {c00, c01, c10, c11, c20, c21, c30, c31};
        for (int r = 0; r < 4; r++) {
            memcpy(acc + r * QLORA__TILE + half, &done[2 * r], sizeof done[0]);
            memcpy(acc + r * QLORA__TILE + half + 4, &done[2 * r + 1], sizeof done[0]);
        }
    }
}
#else
static void qlora__gemm_micro(const QLORA__REAL* a, const QLORA__REAL* b, int64_t steps,
                              QLORA__REAL* acc) {
    for (int64_t k = 0; k < steps; k++) {
        const QLORA__REAL* bk = b + k * QLORA__TILE;
        const QLORA__REAL* ak = a + k * QLORA__PANEL;
        for (int r = 0; r < 4; r++) {
            for (int j = 0; j < QLORA__TILE; j++) {
                acc[r * QLORA__TILE + j] += ak[r] * bk[j];
            }
        }
    }
}
#endif

// Writes alpha times the sums of one tile plus beta times the old values. Operands that have been
// rounded have the factor already.
static void qlora__gemm_write(const qlora__gemm* g, int64_t batch, int64_t i0, int64_t j0,
                              const QLORA__REAL* acc) {
    int64_t rows = qlora__min(QLORA__PANEL, g->M - i0);
    int64_t cols = qlora__min(QLORA__TILE, g->N - j0);
    QLORA__REAL alpha = (QLORA__REAL)(g->bf16 ? 1.0f : g->alpha);
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t j = 0; j < cols; j++) {
            int64_t at = batch * g->sC + (i0 + i) * g->ldc + j0 + j;
            QLORA__REAL y = alpha * acc[i * QLORA__TILE + j];
            if (g->beta != 0.0f) {
                y += (QLORA__REAL)g->beta * qlora__load(g->C, g->out, at);
            }
            qlora__store(g->C, g->out, at, y);
        }
    }
}

// A unit is one (matrix, panel, group of tiles), numbered in that order. A is packed once per group
// of tiles.
static void qlora__gemm_cpu_range(void* user, int64_t begin, int64_t end) {
    const qlora__gemm* g = (const qlora__gemm*)user;
    int64_t groups = qlora__ceil_div(g->N, QLORA__TILE * QLORA__TILES);
    int64_t panels = qlora__ceil_div(g->M, QLORA__PANEL);
    qlora__gemm_side left = {g->A, g->a_type, g->ta ? g->lda : 1, g->ta ? 1 : g->lda};
    qlora__gemm_side right = {g->B, g->b_type, g->tb ? 1 : g->ldb, g->tb ? g->ldb : 1};
    QLORA__REAL a[QLORA__STEP * QLORA__PANEL];
    QLORA__REAL b[QLORA__STEP * QLORA__TILE];
    QLORA__REAL acc[QLORA__TILES][QLORA__PANEL * QLORA__TILE];
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t j0 = unit % groups * QLORA__TILE * QLORA__TILES;
        int64_t i0 = unit / groups % panels * QLORA__PANEL;
        int64_t batch = unit / groups / panels;
        int64_t rows = qlora__min(QLORA__PANEL, g->M - i0);
        int64_t tiles = qlora__min(QLORA__TILES, qlora__ceil_div(g->N - j0, QLORA__TILE));
        memset(acc, 0, sizeof acc);
        for (int64_t k0 = 0; k0 < g->K; k0 += QLORA__STEP) {
            int64_t steps = qlora__min(QLORA__STEP, g->K - k0);
            qlora__gemm_pack(left, batch * g->sA + i0 * left.i + k0 * left.k, steps, rows,
                             QLORA__PANEL, a);
            if (g->bf16) {
                qlora__gemm_round(a, steps * QLORA__PANEL, g->alpha);
            }
            for (int64_t t = 0; t < tiles; t++) {
                int64_t j = j0 + t * QLORA__TILE;
                qlora__gemm_pack(right, batch * g->sB + j * right.i + k0 * right.k, steps,
                                 qlora__min(QLORA__TILE, g->N - j), QLORA__TILE, b);
                if (g->bf16) {
                    qlora__gemm_round(b, steps * QLORA__TILE, 1.0f);
                }
                for (int64_t i = 0; i < rows; i += 4) {
                    qlora__gemm_micro(a + i, b, steps, acc[t] + i * QLORA__TILE);
                }
            }
        }
        for (int64_t t = 0; t < tiles; t++) {
            qlora__gemm_write(g, batch, i0, j0 + t * QLORA__TILE, acc[t]);
        }
    }
}

static void qlora__gemm_portable(qlora_ctx* ctx, const qlora__gemm* g) {
    int64_t units = qlora__ceil_div(g->M, QLORA__PANEL) *
                    qlora__ceil_div(g->N, QLORA__TILE * QLORA__TILES) * g->batch;
    qlora__gemm copy = *g;
    qlora__parallel(ctx, units, 1, qlora__gemm_cpu_range, &copy);
}

#undef QLORA__PANEL
#undef QLORA__TILES
#undef QLORA__TILE
#undef QLORA__STEP
