// ---- packed products ----------------------------------------------------------------------------

// Products of the tiers with kernels of their own. The rows of A are packed into panels in memory
// that the threads share, then each thread packs a block of columns of B, widening them from
// whatever type they have, and multiplies it by all rows: a weight is widened once for all rows.
// K is cut into ranges, the outermost loop. Sums continue where the last range ended, and every
// element of C is one sum in ascending k, so the bits depend on nothing but the values.

#define QLORA__KC 384        // steps per range
#define QLORA__MC 1024       // rows per slice
#define QLORA__NC 48         // columns per block
#define QLORA__PART 512      // columns per slice if the sums cannot stay in C
#define QLORA__CHUNK 96      // rows whose panels stay in the second-level cache
#define QLORA__MOST_TILE 384 // elements of the largest tile

// Working memory of the packed products, allocated with the context.
struct qlora__packing {
    float* a;    // [MC][KC]
    float* c;    // [MC][PART]
    float* b;    // [KC][NC] per slot
    float* zero; // [KC]
    size_t bytes;
};

static qlora_result qlora__packing_create(qlora_ctx* ctx) {
    size_t slots = (size_t)qlora__slots(ctx);
    size_t floats =
        (size_t)QLORA__MC * (QLORA__KC + QLORA__PART) + QLORA__KC + slots * QLORA__KC * QLORA__NC;
    size_t head = qlora__align_up(sizeof(qlora__packing), 64);
    if (ctx->cpu->gemm == NULL) {
        return QLORA_OK;
    }
    qlora__packing* p = (qlora__packing*)qlora__alloc(ctx, head + floats * sizeof(float));
    if (p == NULL) {
        return QLORA_ERR_MEMORY;
    }
    p->a = (float*)(void*)((char*)p + head);
    p->c = p->a + (size_t)QLORA__MC * QLORA__KC;
    p->zero = p->c + (size_t)QLORA__MC * QLORA__PART;
    p->b = p->zero + QLORA__KC;
    p->bytes = head + floats * sizeof(float);
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
    int64_t ld;
    bool lines; // the elements of a line are next to each other; otherwise those of one k
} qlora__operand;

// Returns n elements from `first` on as f32: where they are, or in `stage`.
static const float* qlora__operand_run(const qlora__cpu_gemm* cpu, const qlora__operand* o,
                                       int64_t first, int64_t n, float* stage) {
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

// Packs lines [first, first + count) and steps [k0, k0 + steps) into panels of `width` lines; what
// is missing in the last panel is zero.
static void qlora__operand_pack(const qlora__cpu_gemm* cpu, const qlora__operand* o, int64_t first,
                                int64_t count, int64_t k0, int64_t steps, int64_t width,
                                const float* zero, float* out) {
    float stage[4 * QLORA__KC];
    int64_t padded = qlora__ceil_div(count, width) * width;
    for (int64_t i = 0; o->lines && i < padded; i += 4) {
        const float* lines[4];
        for (int64_t j = 0; j < 4; j++) {
            lines[j] = i + j < count ? qlora__operand_run(cpu, o, (first + i + j) * o->ld + k0,
                                                          steps, stage + j * QLORA__KC)
                                     : zero;
        }
        cpu->pack4(lines, steps, width, out + i / width * width * steps + i % width);
    }
    for (int64_t k = 0; !o->lines && k < steps; k++) {
        const float* from = qlora__operand_run(cpu, o, (k0 + k) * o->ld + first, count, stage);
        int64_t i = 0;
        for (; i + width <= count; i += width) {
            float* to = out + i * steps + k * width;
            for (int64_t j = 0; j < width; j += 4) {
                memcpy(to + j, from + i + j, 4 * sizeof *to);
            }
        }
        for (int64_t j = 0; i < count && j < width; j++) {
            out[i * steps + k * width + j] = i + j < count ? from[i + j] : 0.0f;
        }
    }
}

// The part of a product that is being computed: one slice of rows and columns, one range of K.
typedef struct qlora__packed {
    const qlora__gemm* g;
    const qlora__cpu_gemm* cpu;
    const qlora__packing* memory;
    qlora__operand a;
    qlora__operand b;
    float* c; // the first element of the slice
    int64_t ldc;
    int64_t row;
    int64_t rows;
    int64_t col;
    int64_t cols;
    int64_t k;
    int64_t steps;
    bool add;           // to what C contains
    int64_t block;      // columns per block
    int64_t unit_rows;  // rows per unit, a multiple of the rows of a panel
    int64_t unit_parts; // units per block
} qlora__packed;

// Packs chunks of rows of A and multiplies them by alpha.
static void qlora__packed_rows(void* user, int64_t begin, int64_t end) {
    const qlora__packed* p = (const qlora__packed*)user;
    for (int64_t chunk = begin; chunk < end; chunk++) {
        int64_t first = chunk * QLORA__CHUNK;
        int64_t count = qlora__min(QLORA__CHUNK, p->rows - first);
        float* out = p->memory->a + first * p->steps;
        qlora__operand_pack(p->cpu, &p->a, p->row + first, count, p->k, p->steps, p->cpu->rows,
                            p->memory->zero, out);
        int64_t n = qlora__ceil_div(count, p->cpu->rows) * p->cpu->rows * p->steps;
        for (int64_t i = 0; p->g->alpha != 1.0f && i < n; i++) {
            out[i] *= p->g->alpha;
        }
    }
}

// One tile of C at (row, col) of the slice. At the edges it is computed in a copy.
static void qlora__packed_tile(const qlora__packed* p, const float* a, const float* b, int64_t row,
                               int64_t col) {
    const qlora__cpu_gemm* cpu = p->cpu;
    float* c = p->c + row * p->ldc + col;
    int64_t rows = qlora__min(cpu->rows, p->rows - row);
    int64_t cols = qlora__min(cpu->cols, p->cols - col);
    if (rows == cpu->rows && cols == cpu->cols) {
        cpu->tile(p->steps, a, b, c, p->ldc, p->add);
        return;
    }
    float copy[QLORA__MOST_TILE];
    memset(copy, 0, sizeof copy);
    for (int64_t i = 0; p->add && i < rows; i++) {
        memcpy(copy + i * cpu->cols, c + i * p->ldc, (size_t)cols * sizeof *c);
    }
    cpu->tile(p->steps, a, b, copy, cpu->cols, p->add);
    for (int64_t i = 0; i < rows; i++) {
        memcpy(c + i * p->ldc, copy + i * cpu->cols, (size_t)cols * sizeof *c);
    }
}

// A unit is a block of columns and some of the rows.
static void qlora__packed_units(void* user, int slot, int64_t begin, int64_t end) {
    const qlora__packed* p = (const qlora__packed*)user;
    const qlora__cpu_gemm* cpu = p->cpu;
    float* b = p->memory->b + (size_t)slot * QLORA__KC * QLORA__NC;
    int64_t packed = -1;
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t block = unit / p->unit_parts;
        int64_t col0 = block * p->block;
        int64_t cols = qlora__min(p->block, p->cols - col0);
        int64_t row0 = unit % p->unit_parts * p->unit_rows;
        int64_t last = qlora__min(row0 + p->unit_rows, p->rows);
        if (packed != block) {
            qlora__operand_pack(cpu, &p->b, p->col + col0, cols, p->k, p->steps, cpu->cols,
                                p->memory->zero, b);
            packed = block;
        }
        for (int64_t top = row0; top < last; top += QLORA__CHUNK) {
            int64_t bottom = qlora__min(top + QLORA__CHUNK, last);
            for (int64_t col = 0; col < cols; col += cpu->cols) {
                for (int64_t row = top; row < bottom; row += cpu->rows) {
                    qlora__packed_tile(p, p->memory->a + row * p->steps, b + col * p->steps, row,
                                       col0 + col);
                }
            }
        }
    }
}

// Enough units for all threads: many blocks of columns, or several units per block.
static void qlora__packed_share(qlora_ctx* ctx, qlora__packed* p) {
    int64_t slots = qlora__slots(ctx);
    p->block = QLORA__NC / p->cpu->cols * p->cpu->cols;
    int64_t blocks = qlora__ceil_div(p->cols, p->block);
    int64_t chunks = qlora__ceil_div(p->rows, QLORA__CHUNK);
    int64_t parts = slots > 1 ? qlora__min(chunks, qlora__ceil_div(4 * slots, blocks)) : 1;
    p->unit_rows = qlora__ceil_div(chunks, qlora__max(parts, 1)) * QLORA__CHUNK;
    p->unit_parts = qlora__ceil_div(p->rows, p->unit_rows);
}

// Moves the slice of C to or from the sums, if they are not in C itself. beta is applied to C when
// it is read, and not again.
static void qlora__packed_move(const qlora__packed* p, void* C, bool in) {
    const qlora__gemm* g = p->g;
    for (int64_t i = 0; i < p->rows; i++) {
        float* sums = p->c + i * p->ldc;
        int64_t at = (p->row + i) * g->ldc + p->col;
        for (int64_t j = 0; j < p->cols && in; j++) {
            sums[j] = g->beta * (float)qlora__load(C, g->out, at + j);
        }
        for (int64_t j = 0; j < p->cols && !in; j++) {
            qlora__store(C, g->out, at + j, (QLORA__REAL)sums[j]);
        }
    }
}

// One slice, over all ranges of K.
static void qlora__packed_slice(qlora_ctx* ctx, qlora__packed* p, void* C) {
    const qlora__gemm* g = p->g;
    bool in_place = g->out == QLORA_F32;
    p->c = in_place ? (float*)C + p->row * g->ldc + p->col : p->memory->c;
    p->ldc = in_place ? g->ldc : QLORA__PART;
    if (g->beta != 0.0f && (!in_place || g->beta != 1.0f)) {
        qlora__packed_move(p, C, true);
    }
    qlora__packed_share(ctx, p);
    int64_t units = qlora__ceil_div(p->cols, p->block) * p->unit_parts;
    for (p->k = 0; p->k < g->K; p->k += QLORA__KC) {
        p->steps = qlora__min(QLORA__KC, g->K - p->k);
        p->add = p->k > 0 || g->beta != 0.0f;
        qlora__parallel(ctx, qlora__ceil_div(p->rows, QLORA__CHUNK), 1, qlora__packed_rows, p);
        qlora__parallel_slots(ctx, units, 1, qlora__packed_units, p);
    }
    if (!in_place) {
        qlora__packed_move(p, C, false);
    }
}

static const void* qlora__operand_at(const void* data, qlora_dtype dtype, int64_t element) {
    return data != NULL ? (const char*)data + (size_t)element * qlora_dtype_bytes(dtype) : NULL;
}

static qlora__operand qlora__operand_of(const void* data, qlora_dtype dtype, const qlora_nf4* nf4,
                                        int64_t ld, bool lines) {
    qlora__operand o;
    o.data = data;
    o.dtype = dtype;
    o.nf4 = nf4;
    o.ld = nf4 != NULL ? nf4->cols : ld;
    o.lines = lines;
    return o;
}

static void qlora__gemm_packed(qlora_ctx* ctx, const qlora__gemm* g) {
    qlora__packed p;
    memset(&p, 0, sizeof p);
    p.g = g;
    p.cpu = ctx->cpu->gemm;
    p.memory = ctx->packing;
    int64_t width = g->out == QLORA_F32 ? g->N : QLORA__PART / p.cpu->cols * p.cpu->cols;
    int64_t height = QLORA__MC / p.cpu->rows * p.cpu->rows;
    for (int64_t i = 0; i < g->batch; i++) {
        p.a = qlora__operand_of(qlora__operand_at(g->A, g->a_type, i * g->sA), g->a_type, NULL,
                                g->lda, !g->ta);
        p.b = qlora__operand_of(qlora__operand_at(g->B, g->b_type, i * g->sB), g->b_type, g->nf4,
                                g->ldb, g->tb);
        void* C = (char*)g->C + (size_t)(i * g->sC) * qlora_dtype_bytes(g->out);
        for (p.row = 0; p.row < g->M; p.row += height) {
            p.rows = qlora__min(height, g->M - p.row);
            for (p.col = 0; p.col < g->N; p.col += width) {
                p.cols = qlora__min(width, g->N - p.col);
                qlora__packed_slice(ctx, &p, C);
            }
        }
    }
}

// Floats of the shared working memory, for products that are not packed.
static int64_t qlora__packing_room(void) {
    return (int64_t)QLORA__MC * QLORA__KC;
}

#undef QLORA__KC
#undef QLORA__MC
#undef QLORA__NC
#undef QLORA__PART
#undef QLORA__CHUNK
#undef QLORA__MOST_TILE
