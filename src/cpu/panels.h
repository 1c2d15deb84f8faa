// ---- panels -------------------------------------------------------------------------------------
//
// What the products of the tiers with kernels of their own consist of. Rows of the left side are
// packed into panels in memory that the threads share; then each thread packs a block of columns of
// the right side, widening them from whatever type they have, and multiplies it by all rows: a
// weight is widened once for all rows. Panels that are packed once can be multiplied several times,
// and the right side may consist of several matrices, one below the other. Every element of C is
// one sum in ascending k, so the bits depend on nothing but the values: not on the number of
// threads, nor on how rows, columns and k are divided.

#define QLORA__KC 640   // steps per range, at most
#define QLORA__MC 1024  // rows per slice, at most
#define QLORA__NC 192   // columns per block of QLORA__KC steps; more if the ranges are shorter
#define QLORA__PART 512 // columns per slice if the sums cannot stay in C
#define QLORA__CHUNK 96 // rows whose panels stay in the second-level cache: whole tiles
#define QLORA__PANELS 0x320000 // elements in panels: QLORA__MC rows of 3200 steps
#define QLORA__BLOCKS ((QLORA__KC + 4) * QLORA__NC) // elements of a block of columns
#define QLORA__MOST_TILE 384                        // elements of the largest tile

// Working memory of the packed products, allocated with the context.
struct qlora__packing {
    float* a;    // [PANELS]
    float* c;    // [MC][PART]
    float* b;    // [BLOCKS] per slot
    float* zero; // [KC]
    size_t bytes;
};

static qlora_result qlora__packing_create(qlora_ctx* ctx) {
    size_t slots = (size_t)qlora__slots(ctx);
    size_t floats =
        (size_t)QLORA__PANELS + (size_t)QLORA__MC * QLORA__PART + QLORA__KC + slots * QLORA__BLOCKS;
    size_t bytes = sizeof(qlora__packing) + 64 + floats * sizeof(float);
    if (ctx->cpu->gemm == NULL) {
        return QLORA_OK;
    }
    qlora__packing* p = (qlora__packing*)qlora__alloc(ctx, bytes);
    if (p == NULL) {
        return QLORA_ERR_MEMORY;
    }
    // Panels start at a cache line, so that no vector crosses one.
    uintptr_t first = (uintptr_t)(p + 1);
    p->a = (float*)(void*)((char*)(p + 1) + (64 - first % 64) % 64);
    p->c = p->a + QLORA__PANELS;
    p->zero = p->c + (size_t)QLORA__MC * QLORA__PART;
    p->b = p->zero + QLORA__KC;
    p->bytes = bytes;
    memset(p->zero, 0, QLORA__KC * sizeof(float));
    ctx->packing = p;
    return QLORA_OK;
}

static void qlora__packing_destroy(qlora_ctx* ctx) {
    if (ctx->packing != NULL) {
        qlora__free(ctx, ctx->packing, ctx->packing->bytes);
        ctx->packing = NULL;
    }
}

// An operand: a line is a row of A or a column of B.
typedef struct qlora__operand {
    const void* data;
    qlora_dtype dtype;
    const qlora_nf4* nf4;
    const qlora__fp8_weight* fp8;
    int64_t ld;
    bool lines; // the elements of a line are next to each other; otherwise those of one k
} qlora__operand;

static qlora__operand qlora__operand_of(const void* data, qlora_dtype dtype, int64_t ld,
                                        bool lines) {
    qlora__operand o;
    o.data = data;
    o.dtype = dtype;
    o.nf4 = NULL;
    o.fp8 = NULL;
    o.ld = ld;
    o.lines = lines;
    return o;
}

// A weight with codes: one of the two is not NULL.
static qlora__operand qlora__operand_coded(const qlora_nf4* nf4, const qlora__fp8_weight* fp8,
                                           bool lines) {
    qlora__operand o =
        qlora__operand_of(NULL, QLORA_BF16, nf4 != NULL ? nf4->cols : fp8->cols, lines);
    o.nf4 = nf4;
    o.fp8 = fp8;
    return o;
}

// Returns n elements of a row or column from `first` on as f32: where they are, or in `stage`.
static const float* qlora__operand_run(const qlora__cpu_gemm* cpu, const qlora__operand* o,
                                       int64_t first, int64_t n, float* stage) {
    if (o->fp8 != NULL) {
        qlora__fp8_widen(o->fp8, first / o->ld, first % o->ld, n, stage);
        return stage;
    }
    if (o->nf4 == NULL && o->dtype == QLORA_F32) {
        return (const float*)o->data + first;
    }
    if (o->nf4 == NULL) {
        cpu->widen((const uint16_t*)o->data + first, o->dtype, n, stage);
        return stage;
    }
    const qlora_nf4* w = o->nf4;
    for (int64_t done = 0; done < n;) {
        int64_t e = first + done;
        int64_t now = qlora__min(n - done, w->block - e % w->block);
        float scale = qlora__nf4_absmax(w, e / w->block);
        bool single = e % 2 != 0 || !qlora__finite(scale); // kernels start at a whole byte
        now = single ? 1 : now;
        if (single) {
            float value = w->maps[qlora__nf4_code_at(w->codes, e)] * scale;
            stage[done] = qlora__bf16_to(qlora__bf16_from(value));
        } else {
            cpu->nf4(w->maps, scale, w->codes + e / 2, now, stage + done);
        }
        done += now;
    }
    return stage;
}

// Steps of panels that are next to each other, at least `steps` and at most 7 more: such that the
// panels are an odd number of cache lines apart. Otherwise many would share few sets of the cache.
static int64_t qlora__panel_stride(int64_t steps, int64_t width) {
    while (steps * width % 32 != 16) {
        steps++;
    }
    return steps;
}

// Part of an operand: lines [first, first + count) and steps [k, k + steps).
typedef struct qlora__lines_piece {
    const qlora__operand* from;
    int64_t first;
    int64_t count;
    int64_t k;
    int64_t steps;
} qlora__lines_piece;

// Packs a piece into panels of `width` lines and `stride` steps, from step `at` on; lines that are
// missing in the last panel are zero.
static void qlora__lines_pack(const qlora__cpu_gemm* cpu, const qlora__lines_piece* p,
                              int64_t width, int64_t stride, int64_t at, const float* zero,
                              float* out) {
    float stage[8 * QLORA__KC];
    const qlora__operand* o = p->from;
    bool in_place = o->dtype == QLORA_F32; // codes have bf16 values
    int64_t padded = qlora__ceil_div(p->count, width) * width;
    int64_t group = cpu->pack8 != NULL && width % 8 == 0 ? 8 : 4;
    for (int64_t i = 0; o->lines && i < padded; i += group) {
        float* to = out + (i / width * stride + at) * width + i % width;
        for (int64_t k = 0; k < p->steps; k += QLORA__KC) {
            const float* lines[8];
            int64_t n = qlora__min(QLORA__KC, p->steps - k);
            for (int64_t j = 0; j < group; j++) {
                int64_t line = p->first + i + j;
                lines[j] = i + j < p->count ? qlora__operand_run(cpu, o, line * o->ld + p->k + k, n,
                                                                 stage + j * QLORA__KC)
                                            : zero;
            }
            (group == 8 ? cpu->pack8 : cpu->pack4)(lines, n, width, to + k * width);
        }
    }
    for (int64_t k = 0; !o->lines && k < p->steps; k++) {
        const float* from =
            qlora__operand_run(cpu, o, (p->k + k) * o->ld + p->first, p->count, stage);
        float* to = out + (at + k) * width;
        int64_t i = 0;
        // The rows of a wide matrix are in different pages, where processors do not look ahead.
        for (int64_t j = 0; in_place && k + 8 < p->steps && j < p->count; j += 16) {
            QLORA__WILL_READ(from + 8 * o->ld + j);
        }
        if (cpu->spread != NULL) {
            cpu->spread(from, p->count, width, stride * width, to);
            i = p->count / width * width;
        }
        for (; i + width <= p->count; i += width) {
            for (int64_t j = 0; j < width; j += 4) {
                memcpy(to + i * stride + j, from + i + j, 4 * sizeof *to);
            }
        }
        for (int64_t j = 0; i < p->count && j < width; j++) {
            to[i * stride + j] = i + j < p->count ? from[i + j] : 0.0f;
        }
    }
}

// ---- the left side ------------------------------------------------------------------------------

// A slice of rows. Its panels are in the context's working memory until the next slice is packed.
typedef struct qlora__panels {
    qlora_ctx* ctx;
    const qlora__cpu_gemm* cpu;
    const qlora__packing* memory;
    int64_t row;
    int64_t rows;
    int64_t stride; // steps of a panel
} qlora__panels;

// Rows of a slice whose panels have `stride` steps.
static int64_t qlora__panels_rows(int64_t rows, int64_t stride) {
    int64_t most = QLORA__PANELS / qlora__max(stride, 1) / QLORA__CHUNK * QLORA__CHUNK;
    return qlora__min(rows, qlora__min(QLORA__MC, most));
}

static void qlora__panels_open(qlora_ctx* ctx, int64_t stride, qlora__panels* p) {
    p->ctx = ctx;
    p->cpu = ctx->cpu->gemm;
    p->memory = ctx->packing;
    p->row = 0;
    p->rows = 0;
    p->stride = qlora__panel_stride(stride, p->cpu->rows);
}

typedef struct qlora__panels_job {
    const qlora__panels* panels;
    const qlora__operand* from;
    int64_t k;
    int64_t steps;
    int64_t at;
    float alpha;
} qlora__panels_job;

static void qlora__panels_chunks(void* user, int64_t begin, int64_t end) {
    const qlora__panels_job* job = (const qlora__panels_job*)user;
    const qlora__panels* p = job->panels;
    int64_t width = p->cpu->rows;
    for (int64_t chunk = begin; chunk < end; chunk++) {
        qlora__lines_piece piece;
        int64_t first = chunk * QLORA__CHUNK;
        piece.from = job->from;
        piece.first = p->row + first;
        piece.count = qlora__min(QLORA__CHUNK, p->rows - first);
        piece.k = job->k;
        piece.steps = job->steps;
        float* out = p->memory->a + first * p->stride;
        qlora__lines_pack(p->cpu, &piece, width, p->stride, job->at, p->memory->zero, out);
        for (int64_t i = 0; job->alpha != 1.0f && i < piece.count; i += width) {
            float* panel = out + i * p->stride + job->at * width;
            for (int64_t j = 0; j < job->steps * width; j++) {
                panel[j] *= job->alpha;
            }
        }
    }
}

// Packs steps [k, k + steps) of an operand, times alpha, as steps [at, at + steps) of the panels.
static void qlora__panels_pack(const qlora__panels* p, const qlora__operand* from, int64_t k,
                               int64_t steps, int64_t at, float alpha) {
    qlora__panels_job job;
    job.panels = p;
    job.from = from;
    job.k = k;
    job.steps = steps;
    job.at = at;
    job.alpha = alpha;
    qlora__parallel(p->ctx, qlora__ceil_div(p->rows, QLORA__CHUNK), 1, qlora__panels_chunks, &job);
}

// ---- products -----------------------------------------------------------------------------------

// Steps [k, k + steps) of an operand on the right side.
typedef struct qlora__segment {
    qlora__operand from;
    int64_t k;
    int64_t steps;
} qlora__segment;

// C (+)= the panels' steps from `at` on, times the segments, one below the other.
typedef struct qlora__multiply {
    const qlora__panels* left;
    int64_t at;
    const qlora__segment* right;
    int segments;
    int64_t col; // the first column of the right side
    int64_t cols;
    float* c; // row 0 of the slice, column 0
    int64_t ldc;
    bool add;
    // How the work is divided
    qlora__tile_fn tile;
    int64_t width;  // columns of a tile
    int64_t steps;  // of all segments
    int64_t range;  // steps per range
    int64_t stride; // steps from one panel of columns to the next
    int64_t block;  // columns per block
    int64_t unit_rows;
    int64_t unit_parts; // units per block
} qlora__multiply;

// Packs a block of columns for steps [k, k + steps).
static void qlora__multiply_pack(const qlora__multiply* m, int64_t col, int64_t cols, int64_t k,
                                 int64_t steps, float* b) {
    int64_t begin = 0;
    for (int i = 0; i < m->segments; i++) {
        const qlora__segment* s = &m->right[i];
        int64_t from = qlora__max(k, begin);
        int64_t to = qlora__min(k + steps, begin + s->steps);
        if (to > from) {
            qlora__lines_piece piece;
            piece.from = &s->from;
            piece.first = m->col + col;
            piece.count = cols;
            piece.k = s->k + from - begin;
            piece.steps = to - from;
            qlora__lines_pack(m->left->cpu, &piece, m->width, m->stride, from - k,
                              m->left->memory->zero, b);
        }
        begin += s->steps;
    }
}

// One tile of C at (row, col). At the edges it is computed in a copy.
static void qlora__multiply_tile(const qlora__multiply* m, int64_t steps, const float* a,
                                 const float* b, int64_t row, int64_t col, bool add) {
    int64_t height = m->left->cpu->rows;
    float* c = m->c + row * m->ldc + col;
    int64_t rows = qlora__min(height, m->left->rows - row);
    int64_t cols = qlora__min(m->width, m->cols - col);
    if (rows == height && cols == m->width) {
        m->tile(steps, a, b, c, m->ldc, add);
        return;
    }
    float copy[QLORA__MOST_TILE];
    memset(copy, 0, sizeof copy);
    for (int64_t i = 0; add && i < rows; i++) {
        memcpy(copy + i * m->width, c + i * m->ldc, (size_t)cols * sizeof *c);
    }
    m->tile(steps, a, b, copy, m->width, add);
    for (int64_t i = 0; i < rows; i++) {
        memcpy(c + i * m->ldc, copy + i * m->width, (size_t)cols * sizeof *c);
    }
}

// The next tile of C is on its way from memory while this one is computed.
static void qlora__multiply_expect(const qlora__multiply* m, int64_t row, int64_t col) {
    int64_t last = qlora__min(row + m->left->cpu->rows, m->left->rows);
    int64_t cols = qlora__min(m->width, m->cols - col);
    for (int64_t i = row; i < last; i++) {
        const float* c = m->c + i * m->ldc + col;
        for (int64_t j = 0; j < cols; j += 16) {
            QLORA__WILL_WRITE(c + j);
        }
        QLORA__WILL_WRITE(c + cols - 1);
    }
}

// A block of columns that has been packed, and the rows [first, last).
static void qlora__multiply_block(const qlora__multiply* m, int64_t k, int64_t steps,
                                  const float* b, int64_t col0, int64_t first, int64_t last) {
    const qlora__panels* left = m->left;
    int64_t height = left->cpu->rows;
    int64_t end = qlora__min(col0 + m->block, m->cols);
    const float* a = left->memory->a + (m->at + k) * height;
    for (int64_t top = first; top < last; top += QLORA__CHUNK) {
        int64_t bottom = qlora__min(top + QLORA__CHUNK, last);
        for (int64_t col = col0; col < end; col += m->width) {
            qlora__multiply_expect(m, top, col);
            for (int64_t row = top; row < bottom; row += height) {
                qlora__multiply_expect(m, row + height, col);
                qlora__multiply_tile(m, steps, a + row * left->stride, b + (col - col0) * m->stride,
                                     row, col, m->add || k > 0);
            }
        }
    }
}

// A unit is a block of columns and some of the rows.
static void qlora__multiply_units(void* user, int slot, int64_t begin, int64_t end) {
    const qlora__multiply* m = (const qlora__multiply*)user;
    float* b = m->left->memory->b + (size_t)slot * QLORA__BLOCKS;
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t col = unit / m->unit_parts * m->block;
        int64_t row = unit % m->unit_parts * m->unit_rows;
        for (int64_t k = 0; k < m->steps; k += m->range) {
            int64_t steps = qlora__min(m->range, m->steps - k);
            qlora__multiply_pack(m, col, qlora__min(m->block, m->cols - col), k, steps, b);
            qlora__multiply_block(m, k, steps, b, col, row,
                                  qlora__min(row + m->unit_rows, m->left->rows));
        }
    }
}

// Divides the work: ranges of about the same length, tiles that waste few columns, and enough units
// for all threads, from many blocks of columns or several units per block.
static void qlora__multiply_divide(qlora__multiply* m) {
    const qlora__cpu_gemm* cpu = m->left->cpu;
    int64_t ranges = qlora__ceil_div(m->steps, cpu->steps);
    m->range = qlora__ceil_div(qlora__ceil_div(m->steps, ranges), 4) * 4;
    bool narrow = m->cols <= cpu->block / 4 && qlora__ceil_div(m->cols, cpu->narrow) * cpu->narrow <
                                                   qlora__ceil_div(m->cols, cpu->cols) * cpu->cols;
    m->width = narrow ? cpu->narrow : cpu->cols;
    m->tile = narrow ? cpu->narrow_tile : cpu->tile;
    m->stride = qlora__panel_stride(m->range, m->width);
    int64_t slots = qlora__slots(m->left->ctx);
    int64_t share = slots > 1 ? qlora__ceil_div(m->cols, 4 * slots) : m->cols;
    int64_t most = qlora__min(cpu->block, QLORA__BLOCKS / m->stride);
    share = qlora__min(most, qlora__max(most / 4, share));
    m->block = qlora__ceil_div(share, m->width) * m->width;
    m->block = m->block > most ? m->block - m->width : m->block;
    // Units of the same columns pack them again, so three for each thread have to do.
    int64_t blocks = qlora__ceil_div(m->cols, m->block);
    int64_t chunks = qlora__ceil_div(m->left->rows, QLORA__CHUNK);
    int64_t parts = slots > 1 ? qlora__min(chunks, qlora__ceil_div(3 * slots, blocks)) : 1;
    m->unit_rows = qlora__ceil_div(chunks, qlora__max(parts, 1)) * QLORA__CHUNK;
    m->unit_parts = qlora__ceil_div(m->left->rows, m->unit_rows);
}

// Multiplies by columns [col, col + cols) of the right side. c is the first element of the result:
// the slice's first row.
static void qlora__panels_multiply(const qlora__panels* p, int64_t at, const qlora__segment* right,
                                   int segments, int64_t col, int64_t cols, float* c, int64_t ldc,
                                   bool add) {
    qlora__multiply m;
    memset(&m, 0, sizeof m);
    m.left = p;
    m.at = at;
    m.right = right;
    m.segments = segments;
    m.col = col;
    m.cols = cols;
    m.c = c;
    m.ldc = ldc;
    m.add = add;
    for (int i = 0; i < segments; i++) {
        m.steps += right[i].steps;
    }
    if (m.steps > 0 && cols > 0 && p->rows > 0) {
        qlora__multiply_divide(&m);
        qlora__parallel_slots(p->ctx, qlora__ceil_div(cols, m.block) * m.unit_parts, 1,
                              qlora__multiply_units, &m);
    }
}
