// ---- few rows -----------------------------------------------------------------------------------

// Products with at most QLORA__FEW rows of A, as in decoding: B is not packed. Four lines of B (its
// rows, if B is stored [N,K]) are converted in registers and multiplied by each row of A; if B is
// stored [K,N], its rows are added up. Every element of C has one order of summation, whatever the
// threads do.

#define QLORA__FEW 8          // rows
#define QLORA__FEW_STREAMED 3 // rows up to which dequantising for each row costs least
#define QLORA__FEW_ROWS 64    // rows of B that are added up at a time
#define QLORA__FEW_STEPS 512  // steps of a line whose scales are decoded at a time
#define QLORA__FEW_PART 384   // coded weights of a line that are dequantised at a time otherwise

typedef struct qlora__few {
    const qlora__gemm* g;
    const qlora__cpu_gemm* cpu;
    const qlora__cpu_stream* stream;
    const float* x; // rows of A as f32: of matrix `batch`, row `i` at x + batch * step + i * ld
    int64_t step;
    int64_t ld;
    bool ordered; // x is in the order of stream->nf4
} qlora__few;

// C = alpha sums + beta C for the element at `at`.
static void qlora__few_write(const qlora__gemm* g, int64_t at, float sum) {
    float* c = (float*)g->C + at;
    *c = g->beta != 0.0f ? g->beta * *c + g->alpha * sum : g->alpha * sum;
}

// The sums of four lines of a weight with codes with each row: the lines are dequantised in parts
// that stay in the first-level cache.
static void qlora__few_coded(const qlora__few* f, const int64_t* lines,
                             float sums[QLORA__FEW][QLORA__STREAM_LINES]) {
    const qlora__gemm* g = f->g;
    float stage[QLORA__STREAM_LINES][QLORA__FEW_PART];
    qlora__operand b = qlora__operand_coded(g->nf4, g->fp8, true);
    memset(sums, 0, (size_t)g->M * sizeof sums[0]);
    for (int64_t k = 0; k < g->K; k += QLORA__FEW_PART) {
        int64_t n = qlora__min(QLORA__FEW_PART, g->K - k);
        const void* wide[QLORA__STREAM_LINES];
        for (int j = 0; j < QLORA__STREAM_LINES; j++) {
            wide[j] = qlora__operand_run(f->cpu, &b, lines[j] + k, n, stage[j]);
        }
        for (int64_t i = 0; i < g->M; i++) {
            float part[QLORA__STREAM_LINES];
            f->stream->dense(wide, QLORA_F32, n, f->x + i * f->ld + k, part);
            for (int j = 0; j < QLORA__STREAM_LINES; j++) {
                sums[i][j] += part[j];
            }
        }
    }
}

// The same for few rows: x is in the order of the kernel, which reads the codes as they are stored.
// The scales of the four lines are decoded first.
static void qlora__few_streamed(const qlora__few* f, const int64_t* lines,
                                float sums[QLORA__FEW][QLORA__STREAM_LINES]) {
    const qlora__gemm* g = f->g;
    float scales[QLORA__STREAM_LINES * QLORA__FEW_STEPS];
    qlora__nf4_line line[QLORA__STREAM_LINES];
    int64_t steps = g->K / QLORA__STREAM_STEP;
    if (g->nf4->ready != NULL) {
        for (int j = 0; j < QLORA__STREAM_LINES; j++) {
            line[j].codes = g->nf4->codes + lines[j] / 2;
            line[j].scales = g->nf4->ready + lines[j] / QLORA__STREAM_STEP;
        }
        for (int64_t i = 0; i < g->M; i++) {
            f->stream->ready(g->nf4->maps, line, steps, f->x + i * f->ld, sums[i]);
        }
        return;
    }
    if (steps <= QLORA__FEW_STEPS && lines[3] == lines[0] + 3 * g->K) {
        // The blocks of the four lines follow each other.
        qlora__stream_scales(f->stream, g->nf4, lines[0], QLORA__STREAM_LINES * steps, scales);
        for (int j = 0; j < QLORA__STREAM_LINES; j++) {
            line[j].codes = g->nf4->codes + lines[j] / 2;
            line[j].scales = scales + j * steps;
        }
        for (int64_t i = 0; i < g->M; i++) {
            f->stream->nf4(g->nf4->maps, line, steps, f->x + i * f->ld, sums[i]);
        }
        return;
    }
    memset(sums, 0, (size_t)g->M * sizeof sums[0]);
    for (int64_t at = 0; at < steps; at += QLORA__FEW_STEPS) {
        int64_t now = qlora__min(QLORA__FEW_STEPS, steps - at);
        for (int j = 0; j < QLORA__STREAM_LINES; j++) {
            int64_t first = lines[j] + at * QLORA__STREAM_STEP;
            line[j].codes = g->nf4->codes + first / 2;
            line[j].scales = scales + j * now;
            qlora__stream_scales(f->stream, g->nf4, first, now, scales + j * now);
        }
        for (int64_t i = 0; i < g->M; i++) {
            float part[QLORA__STREAM_LINES];
            f->stream->nf4(g->nf4->maps, line, now, f->x + i * f->ld + at * QLORA__STREAM_STEP,
                           part);
            for (int j = 0; j < QLORA__STREAM_LINES; j++) {
                sums[i][j] += part[j];
            }
        }
    }
}

// Groups of four lines, numbered over all matrices. The last group of a matrix may be smaller: it
// repeats its last line.
static void qlora__few_lines(void* user, int64_t begin, int64_t end) {
    const qlora__few* f = (const qlora__few*)user;
    const qlora__gemm* g = f->g;
    int64_t groups = qlora__ceil_div(g->N, QLORA__STREAM_LINES);
    bool coded = qlora__gemm_is_coded(g);
    int64_t ld = coded ? g->K : g->ldb; // the rows of a weight with codes are contiguous
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t batch = unit / groups;
        int64_t first = unit % groups * QLORA__STREAM_LINES;
        int64_t count = qlora__min(QLORA__STREAM_LINES, g->N - first);
        int64_t at[QLORA__STREAM_LINES];
        const void* lines[QLORA__STREAM_LINES];
        float sums[QLORA__FEW][QLORA__STREAM_LINES];
        for (int64_t j = 0; j < QLORA__STREAM_LINES; j++) {
            at[j] = (first + qlora__min(j, count - 1)) * ld;
        }
        for (int64_t j = 0; !coded && j < QLORA__STREAM_LINES; j++) {
            lines[j] = qlora__operand_at(g->B, g->b_type, batch * g->sB + at[j]);
        }
        if (f->ordered) {
            qlora__few_streamed(f, at, sums);
        } else if (coded) {
            qlora__few_coded(f, at, sums);
        }
        for (int64_t i = 0; i < g->M; i++) {
            const float* x = f->x + batch * f->step + i * f->ld;
            if (!coded) {
                f->stream->dense(lines, g->b_type, g->K, x, sums[i]);
            }
            for (int64_t j = 0; j < count; j++) {
                qlora__few_write(g, batch * g->sC + i * g->ldc + first + j, sums[i][j]);
            }
        }
    }
}

// Rows [first, first + n) of 16 columns of B as f32: where they are, or in `stage`. Returns the
// distance from row to row.
static int64_t qlora__few_rows(const qlora__few* f, int64_t first, int64_t n, const float** rows,
                               float* stage) {
    const qlora__gemm* g = f->g;
    if (g->b_type == QLORA_F32) {
        *rows = (const float*)g->B + first;
        return g->ldb;
    }
    for (int64_t k = 0; k < n; k++) {
        f->cpu->widen((const uint16_t*)g->B + first + k * g->ldb, g->b_type, QLORA__STREAM_COLS,
                      stage + k * QLORA__STREAM_COLS);
    }
    *rows = stage;
    return QLORA__STREAM_COLS;
}

// Columns of C in groups of 16, numbered over all matrices, for B stored [K,N]. The sums of each
// part of K are added up, so that the bits do not depend on the type of B.
static void qlora__few_cols(void* user, int64_t begin, int64_t end) {
    const qlora__few* f = (const qlora__few*)user;
    const qlora__gemm* g = f->g;
    int64_t groups = g->N / QLORA__STREAM_COLS;
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t batch = unit / groups;
        int64_t col = unit % groups * QLORA__STREAM_COLS;
        float sums[QLORA__FEW][QLORA__STREAM_COLS];
        float stage[QLORA__FEW_ROWS * QLORA__STREAM_COLS];
        memset(sums, 0, (size_t)g->M * sizeof sums[0]);
        for (int64_t k = 0; k < g->K; k += QLORA__FEW_ROWS) {
            int64_t n = qlora__min(QLORA__FEW_ROWS, g->K - k);
            const float* rows = NULL;
            int64_t ld = qlora__few_rows(f, batch * g->sB + k * g->ldb + col, n, &rows, stage);
            for (int64_t i = 0; i < g->M; i++) {
                float part[QLORA__STREAM_COLS];
                f->stream->blend(f->x + batch * f->step + i * f->ld + k, rows, ld, n, part);
                for (int j = 0; j < QLORA__STREAM_COLS; j++) {
                    sums[i][j] += part[j];
                }
            }
        }
        for (int64_t i = 0; i < g->M; i++) {
            for (int64_t j = 0; j < QLORA__STREAM_COLS; j++) {
                qlora__few_write(g, batch * g->sC + i * g->ldc + col + j, sums[i][j]);
            }
        }
    }
}

// Whether the kernel can read the codes of the weight as they are stored.
static bool qlora__few_streams(const qlora__gemm* g) {
    return g->nf4 != NULL && g->M <= QLORA__FEW_STREAMED && g->K % QLORA__STREAM_STEP == 0 &&
           g->nf4->block % QLORA__STREAM_STEP == 0;
}

// Copies the rows of A to the working memory, as f32 and, for the kernel that reads NF4, in its
// order.
static void qlora__few_copy(qlora__few* f, float* room) {
    const qlora__gemm* g = f->g;
    const uint8_t* order = f->stream->order;
    for (int64_t row = 0; row < g->batch * g->M; row++) {
        int64_t from = row / g->M * g->sA + row % g->M * g->lda;
        float* to = room + row * g->K;
        const float* x = (const float*)g->A + from;
        if (g->a_type != QLORA_F32) {
            f->cpu->widen((const uint16_t*)g->A + from, g->a_type, g->K, to);
            x = to;
        }
        for (int64_t k = 0; f->ordered && k < g->K; k += QLORA__STREAM_STEP) {
            float step[QLORA__STREAM_STEP];
            for (int i = 0; i < QLORA__STREAM_STEP; i++) {
                step[i] = x[k + order[i]];
            }
            memcpy(to + k, step, sizeof step);
        }
    }
    f->x = room;
    f->ld = g->K;
    f->step = g->M * g->K;
}

// Whether a product goes this way.
static bool qlora__few_takes(const qlora__gemm* g) {
    bool rows = g->tb || (!qlora__gemm_is_coded(g) && g->N % QLORA__STREAM_COLS == 0);
    return rows && g->M <= QLORA__FEW && !g->ta && g->out == QLORA_F32 &&
           g->M * g->batch <= qlora__packing_room() / g->K;
}

static void qlora__gemm_few(qlora_ctx* ctx, const qlora__gemm* g) {
    qlora__few f;
    memset(&f, 0, sizeof f);
    f.g = g;
    f.cpu = ctx->cpu->gemm;
    f.stream = ctx->cpu->stream;
    f.x = (const float*)g->A;
    f.ld = g->lda;
    f.step = g->sA;
    f.ordered = qlora__few_streams(g);
    if (f.ordered || g->a_type != QLORA_F32) {
        qlora__few_copy(&f, ctx->packing->a);
    }
    int64_t width = g->tb ? QLORA__STREAM_LINES : QLORA__STREAM_COLS;
    int64_t grain = 1 + 16384 / (g->K * width);
    qlora__parallel(ctx, g->batch * qlora__ceil_div(g->N, width), grain,
                    g->tb ? qlora__few_lines : qlora__few_cols, &f);
}

static qlora_result qlora__gemm_cpu(qlora_ctx* ctx, const qlora__gemm* g) {
    bool empty = g->M == 0 || g->N == 0 || g->K == 0 || g->batch == 0;
    QLORA__TRY(qlora__working_need(ctx));
    if (ctx->cpu->gemm == NULL || empty || g->alpha == 0.0f) {
        qlora__gemm_portable(ctx, g);
    } else if (qlora__few_takes(g)) {
        qlora__gemm_few(ctx, g);
    } else if (qlora__outer_takes(ctx, g)) {
        qlora__gemm_outer(ctx, g);
    } else {
        qlora__gemm_packed(ctx, g);
    }
    return QLORA_OK;
}

#undef QLORA__FEW
#undef QLORA__FEW_STREAMED
#undef QLORA__FEW_ROWS
#undef QLORA__FEW_STEPS
#undef QLORA__FEW_PART
