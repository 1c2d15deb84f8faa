// ---- panels -------------------------------------------------------------------------------------
//
// What the products of the tiers with kernels of their own consist of. Rows of the left side are
// packed into panels in memory that the threads share; then each thread packs a block of columns of
// the right side, widening them from whatever type they have, and multiplies it by all rows: a
// weight is widened once for all rows. Panels that are packed once can be multiplied several times,
// and the right side may consist of several matrices, one below the other. Every element of C is
// one sum in ascending k, so the bits depend on nothing but the values: not on the number of
// threads, nor on how rows, columns and k are divided.

// Floats per line of panels that are next to each other, at least `floats` and at most 7 more: such
// that the panels are an odd number of cache lines apart, or of pairs of them if the width is a
// multiple of two. Otherwise many would share few sets of the cache.
static int64_t qlora__panel_stride(int64_t floats, int64_t width) {
    int64_t unit = width % 32 == 0 ? 32 : 16;
    while (floats * width % (2 * unit) != unit) {
        floats++;
    }
    return floats;
}

// ---- the left side ------------------------------------------------------------------------------

// A slice of rows. Its panels are in the context's working memory until the next slice is packed.
typedef struct qlora__panels {
    qlora_ctx* ctx;
    const qlora__cpu_gemm* cpu;
    const qlora__cpu_tiles* tiles;
    const qlora__cpu_bf16* bf16; // kernels for panels in bf16; NULL: the panels are f32
    const qlora__packing* memory;
    bool round; // operands are rounded to bf16
    int64_t row;
    int64_t rows;
    int64_t stride; // floats of a line
} qlora__panels;

// Steps that n steps of an operand take in the panels: those in bf16 have whole groups, so that the
// groups do not depend on what comes before.
static int64_t qlora__panels_steps(const qlora__panels* p, int64_t n) {
    return p->bf16 != NULL ? qlora__ceil_div(n, p->bf16->group) * p->bf16->group : n;
}

// At least as many, before the panels are open.
static int64_t qlora__panels_padded(const qlora_ctx* ctx, bool bf16, int64_t n) {
    bool halved = bf16 && qlora__on_cpu(ctx) && ctx->cpu->bf16 != NULL;
    int64_t group = halved ? ctx->cpu->bf16->group : 4;
    return qlora__ceil_div(n, group) * group;
}

// Floats of a line that `steps` steps take.
static int64_t qlora__panels_floats(const qlora__panels* p, int64_t steps) {
    return p->bf16 != NULL ? steps / 2 : steps;
}

// Steps that the panels have room for.
static int64_t qlora__panels_room(const qlora__panels* p) {
    return p->bf16 != NULL ? p->stride * 2 / p->bf16->group * p->bf16->group : p->stride;
}

// Packs a piece from step `at` of panels with `stride` floats per line on. left: rows
static void qlora__panels_lines(const qlora__panels* p, const qlora__lines_piece* piece, bool left,
                                int64_t width, int64_t stride, int64_t at, float* out) {
    if (p->bf16 != NULL) {
        const uint16_t* zero = (const uint16_t*)(const void*)p->memory->zero;
        uint16_t* to = (uint16_t*)(void*)out + at * width;
        qlora__lines_pack_bf16(p->cpu, p->bf16, piece, left, width, stride, zero, to);
    } else {
        qlora__lines_pack(p->cpu, piece, width, stride, at, p->memory->zero, out);
    }
}

// Rows of a slice whose panels have `stride` floats per line.
static int64_t qlora__panels_rows(int64_t rows, int64_t stride) {
    int64_t most = QLORA__PANELS / qlora__max(stride, 1) / QLORA__CHUNK * QLORA__CHUNK;
    return qlora__min(rows, qlora__min(QLORA__MC, most));
}

// bf16: operands are rounded.
static void qlora__panels_open(qlora_ctx* ctx, int64_t steps, bool bf16, qlora__panels* p) {
    p->ctx = ctx;
    p->cpu = ctx->cpu->gemm;
    p->bf16 = bf16 ? ctx->cpu->bf16 : NULL;
    p->tiles = p->bf16 != NULL ? &p->bf16->tiles : &p->cpu->tiles;
    p->memory = ctx->packing;
    p->round = bf16;
    p->row = 0;
    p->rows = 0;
    p->stride =
        qlora__panel_stride(qlora__panels_floats(p, qlora__panels_steps(p, steps)), p->tiles->rows);
}

typedef struct qlora__panels_job {
    const qlora__panels* panels;
    const qlora__operand* from;
    int64_t k;
    int64_t steps;
    int64_t at;
    float alpha;
} qlora__panels_job;

static void qlora__panels_chunk(const qlora__panels_job* job, int64_t chunk) {
    const qlora__panels* p = job->panels;
    int64_t width = p->tiles->rows;
    qlora__lines_piece piece;
    int64_t first = chunk * QLORA__CHUNK;
    piece.from = job->from;
    piece.first = p->row + first;
    piece.count = qlora__min(QLORA__CHUNK, p->rows - first);
    piece.k = job->k;
    piece.steps = job->steps;
    piece.round = p->round;
    piece.factor = p->round ? job->alpha : 1.0f;
    float* out = p->memory->a + first * p->stride;
    qlora__panels_lines(p, &piece, true, width, p->stride, job->at, out);
    for (int64_t i = 0; !p->round && job->alpha != 1.0f && i < piece.count; i += width) {
        float* panel = out + i * p->stride + job->at * width;
        for (int64_t j = 0; j < job->steps * width; j++) {
            panel[j] *= job->alpha;
        }
    }
}

static void qlora__panels_chunks(void* user, int64_t begin, int64_t end) {
    const qlora__panels_job* job = (const qlora__panels_job*)user;
    for (int64_t chunk = begin; chunk < end; chunk++) {
        qlora__panels_chunk(job, chunk);
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

// Where the sums of a product are: row 0 of the slice, column 0. add: they go on from what is
// there.
typedef struct qlora__sums {
    float* c;
    int64_t ld;
    bool add;
} qlora__sums;

static qlora__sums qlora__sums_at(float* c, int64_t ld, bool add) {
    qlora__sums to;
    to.c = c;
    to.ld = ld;
    to.add = add;
    return to;
}

// C (+)= the panels' steps from `at` on, times the segments, one below the other.
typedef struct qlora__multiply {
    const qlora__panels* left;
    int64_t at;
    const qlora__segment* right;
    int segments;
    int64_t col; // the first column of the right side
    int64_t cols;
    qlora__sums to;
    // How the work is divided
    qlora__tile_fn tile;
    int64_t width;  // columns of a tile
    int64_t steps;  // of all segments
    int64_t range;  // steps per range
    int64_t stride; // floats of a line of the right side
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
            piece.round = m->left->round;
            piece.factor = 1.0f;
            qlora__panels_lines(m->left, &piece, false, m->width, m->stride, from - k, b);
        }
        begin += qlora__panels_steps(m->left, s->steps);
    }
}

// One tile of C at (row, col). At the edges it is computed in a copy.
static void qlora__multiply_tile(const qlora__multiply* m, int64_t steps, const float* a,
                                 const float* b, int64_t row, int64_t col, bool add) {
    int64_t height = m->left->tiles->rows;
    int64_t ldc = m->to.ld;
    float* c = m->to.c + row * ldc + col;
    int64_t rows = qlora__min(height, m->left->rows - row);
    int64_t cols = qlora__min(m->width, m->cols - col);
    if (rows == height && cols == m->width) {
        m->tile(steps, a, b, c, ldc, add);
        return;
    }
    float copy[QLORA__MOST_TILE];
    memset(copy, 0, sizeof copy);
    for (int64_t i = 0; add && i < rows; i++) {
        memcpy(copy + i * m->width, c + i * ldc, (size_t)cols * sizeof *c);
    }
    m->tile(steps, a, b, copy, m->width, add);
    for (int64_t i = 0; i < rows; i++) {
        memcpy(c + i * ldc, copy + i * m->width, (size_t)cols * sizeof *c);
    }
}

// The next tile of C is on its way from memory while this one is computed.
static void qlora__multiply_expect(const qlora__multiply* m, int64_t row, int64_t col) {
    int64_t last = qlora__min(row + m->left->tiles->rows, m->left->rows);
    int64_t cols = qlora__min(m->width, m->cols - col);
    for (int64_t i = row; i < last; i++) {
        const float* c = m->to.c + i * m->to.ld + col;
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
    int64_t height = left->tiles->rows;
    int64_t end = qlora__min(col0 + m->block, m->cols);
    const float* a = left->memory->a + qlora__panels_floats(left, m->at + k) * height;
    for (int64_t top = first; top < last; top += QLORA__CHUNK) {
        int64_t bottom = qlora__min(top + QLORA__CHUNK, last);
        for (int64_t col = col0; col < end; col += m->width) {
            qlora__multiply_expect(m, top, col);
            for (int64_t row = top; row < bottom; row += height) {
                qlora__multiply_expect(m, row + height, col);
                qlora__multiply_tile(m, steps, a + row * left->stride, b + (col - col0) * m->stride,
                                     row, col, m->to.add || k > 0);
            }
        }
    }
}

// A unit is a block of columns and some of the rows.
static void qlora__multiply_units(void* user, int slot, int64_t begin, int64_t end) {
    const qlora__multiply* m = (const qlora__multiply*)user;
    const qlora__cpu_bf16* bf16 = m->left->bf16;
    float* b = m->left->memory->b + (size_t)slot * QLORA__BLOCKS;
    if (bf16 != NULL && bf16->begin != NULL) {
        bf16->begin();
    }
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
    if (bf16 != NULL && bf16->end != NULL) {
        bf16->end();
    }
}

// Divides the work: ranges of about the same length, tiles that waste few columns, and enough units
// for all threads, from many blocks of columns or several units per block.
static void qlora__multiply_divide(qlora__multiply* m) {
    const qlora__cpu_tiles* tiles = m->left->tiles;
    int64_t ranges = qlora__ceil_div(m->steps, tiles->steps);
    int64_t group = m->left->bf16 != NULL ? m->left->bf16->group : 4;
    m->range = qlora__ceil_div(qlora__ceil_div(m->steps, ranges), group) * group;
    bool narrow =
        m->cols <= tiles->block / 4 && qlora__ceil_div(m->cols, tiles->narrow) * tiles->narrow <
                                           qlora__ceil_div(m->cols, tiles->cols) * tiles->cols;
    m->width = narrow ? tiles->narrow : tiles->cols;
    m->tile = narrow ? tiles->narrow_tile : tiles->tile;
    m->stride = qlora__panel_stride(qlora__panels_floats(m->left, m->range), m->width);
    int64_t slots = qlora__slots(m->left->ctx);
    int64_t share = slots > 1 ? qlora__ceil_div(m->cols, 4 * slots) : m->cols;
    if (qlora__errand_fine(m->left->ctx)) {
        share = qlora__min(share, QLORA__UNIT / (m->left->rows * m->steps));
    }
    int64_t most = qlora__min(tiles->block, QLORA__BLOCKS / m->stride);
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

// Multiplies by columns [col, col + cols) of the right side.
static void qlora__panels_multiply(const qlora__panels* p, int64_t at, const qlora__segment* right,
                                   int segments, int64_t col, int64_t cols, qlora__sums to) {
    qlora__multiply m;
    memset(&m, 0, sizeof m);
    m.left = p;
    m.at = at;
    m.right = right;
    m.segments = segments;
    m.col = col;
    m.cols = cols;
    m.to = to;
    for (int i = 0; i < segments; i++) {
        m.steps += qlora__panels_steps(p, right[i].steps);
    }
    if (m.steps > 0 && cols > 0 && p->rows > 0) {
        qlora__multiply_divide(&m);
        qlora__parallel_slots(p->ctx, qlora__ceil_div(cols, m.block) * m.unit_parts, 1,
                              qlora__multiply_units, &m);
    }
}

// ---- products of rows that are being packed -----------------------------------------------------

typedef struct qlora__packed_product {
    qlora__panels_job pack;
    qlora__multiply m;
    const float* b;
    qlora__panels_job back; // of the product, if it has steps
} qlora__packed_product;

static void qlora__packed_product_chunks(void* user, int64_t begin, int64_t end) {
    const qlora__packed_product* job = (const qlora__packed_product*)user;
    const qlora__multiply* m = &job->m;
    for (int64_t chunk = begin; chunk < end; chunk++) {
        int64_t first = chunk * QLORA__CHUNK;
        qlora__panels_chunk(&job->pack, chunk);
        qlora__multiply_block(m, 0, m->steps, job->b, 0, first,
                              qlora__min(first + QLORA__CHUNK, m->left->rows));
        if (job->back.steps > 0) {
            qlora__panels_chunk(&job->back, chunk);
        }
    }
}

// Whether a product with few columns is computed while its rows are packed, and so still in the
// cache: all of the right side must fit into the working memory.
static bool qlora__panels_takes_columns(const qlora__panels* p, int64_t steps, int64_t cols) {
    return p->bf16 == NULL && steps > 0 && cols > 0 && cols <= p->tiles->block / 4 &&
           cols + p->tiles->cols <= QLORA__MC * QLORA__PART / (steps + 8);
}

// Steps of an operand from k on, which are packed as steps of the panels from `at` on.
typedef struct qlora__panels_shift {
    int64_t k;
    int64_t at;
} qlora__panels_shift;

// Packs steps of an operand, as many as the right side has, and multiplies them by the `cols`
// columns of the right side. If `back` is not NULL, the product, which is in the operand's matrix
// from column back->k on, is packed as well.
static void qlora__panels_pack_product(const qlora__panels* p, const qlora__operand* from,
                                       qlora__panels_shift pack, const qlora__segment* right,
                                       int64_t cols, qlora__sums to,
                                       const qlora__panels_shift* back) {
    qlora__packed_product job;
    memset(&job, 0, sizeof job);
    job.pack.panels = p;
    job.pack.from = from;
    job.pack.k = pack.k;
    job.pack.steps = right->steps;
    job.pack.at = pack.at;
    job.pack.alpha = 1.0f;
    job.back = job.pack;
    job.back.steps = 0;
    if (back != NULL) {
        job.back.k = back->k;
        job.back.steps = cols;
        job.back.at = back->at;
    }
    qlora__multiply* m = &job.m;
    m->left = p;
    m->at = pack.at;
    m->right = right;
    m->segments = 1;
    m->cols = cols;
    m->to = to;
    m->steps = right->steps;
    qlora__multiply_divide(m);
    m->range = m->steps;
    m->block = qlora__ceil_div(cols, m->width) * m->width;
    m->stride = qlora__panel_stride(m->steps, m->width);
    qlora__multiply_pack(m, 0, cols, 0, m->steps, p->memory->c);
    job.b = p->memory->c;
    qlora__parallel(p->ctx, qlora__ceil_div(p->rows, QLORA__CHUNK), 1, qlora__packed_product_chunks,
                    &job);
}
