// ---- operands -----------------------------------------------------------------------------------

// The operands of packed products, and how lines of them are packed into panels.

#define QLORA__KC 640   // steps per range, at most
#define QLORA__MC 1024  // rows per slice, at most
#define QLORA__NC 192   // columns per block of QLORA__KC steps; more if the ranges are shorter
#define QLORA__PART 512 // columns per slice if the sums cannot stay in C
#define QLORA__CHUNK 96 // rows whose panels stay in the second-level cache: whole tiles
#define QLORA__PANELS 0x320000 // elements in panels: QLORA__MC rows of 3200 steps
#define QLORA__BLOCKS ((QLORA__KC + 4) * QLORA__NC) // elements of a block of columns
#define QLORA__MOST_TILE 1024                       // elements of the largest tile
#define QLORA__UNIT 0x600000 // multiplications per unit of an errand: a tenth of a millisecond

// Working memory of the packed products, allocated with the context.
struct qlora__packing {
    float* a;    // [PANELS]
    float* c;    // [MC][PART]: sums that cannot stay in C, or a right side with few columns
    float* b;    // [BLOCKS] per slot
    float* zero; // [KC]
    size_t bytes;
};

// *out is NULL if the tier needs none.
static qlora_result qlora__packing_create(qlora_ctx* ctx, qlora__packing** out) {
    size_t slots = (size_t)qlora__slots(ctx);
    size_t floats =
        (size_t)QLORA__PANELS + (size_t)QLORA__MC * QLORA__PART + QLORA__KC + slots * QLORA__BLOCKS;
    size_t bytes = sizeof(qlora__packing) + 64 + floats * sizeof(float);
    *out = NULL;
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
    *out = p;
    return QLORA_OK;
}

static QLORA__UNUSED uint64_t qlora__packing_bytes(const qlora_ctx* ctx) {
    return ctx->packing != NULL ? ctx->packing->bytes : 0;
}

static void qlora__packing_destroy(qlora_ctx* ctx, qlora__packing* packing) {
    if (packing != NULL) {
        qlora__free(ctx, packing, packing->bytes);
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

// How many elements from `e` on, at most n, a kernel can make at a time, and their scale. 0 if the
// first is made alone: kernels start at a whole byte and need a finite scale.
static int64_t qlora__nf4_together(const qlora_nf4* w, int64_t e, int64_t n, float* scale) {
    *scale = qlora__nf4_absmax(w, e / w->block);
    return e % 2 == 0 && qlora__finite(*scale) ? qlora__min(n, w->block - e % w->block) : 0;
}

static uint16_t qlora__nf4_alone(const qlora_nf4* w, int64_t e, float scale) {
    return qlora__bf16_from(w->maps[qlora__nf4_code_at(w->codes, e)] * scale);
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
        float scale = 0.0f;
        int64_t now = qlora__nf4_together(w, e, n - done, &scale);
        if (now > 0) {
            cpu->nf4(w->maps, scale, w->codes + e / 2, now, stage + done);
        } else {
            stage[done] = qlora__bf16_to(qlora__nf4_alone(w, e, scale));
        }
        done += qlora__max(now, 1);
    }
    return stage;
}

// Part of an operand: lines [first, first + count) and steps [k, k + steps).
typedef struct qlora__lines_piece {
    const qlora__operand* from;
    int64_t first;
    int64_t count;
    int64_t k;
    int64_t steps;
    bool round; // to bf16, after the factor
    float factor;
} qlora__lines_piece;

// Whether elements have to be rounded; codes have bf16 values.
static bool qlora__lines_rounded(const qlora__lines_piece* p) {
    const qlora__operand* o = p->from;
    bool coded = o->nf4 != NULL || o->fp8 != NULL;
    return p->round && (p->factor != 1.0f || (!coded && o->dtype != QLORA_BF16));
}

// 16 elements times a factor, rounded to bf16; a fixed number and no branches, so that compilers
// use vectors. The values are those of qlora__bf16_from. `from` may be `out`.
static void qlora__lines_round16(const float* from, float factor, float* out) {
    for (int i = 0; i < 16; i++) {
        uint32_t u = qlora__bits(from[i] * factor);
        uint32_t rounded = (u + 0x7fffu + (u >> 16 & 1u)) & 0xffff0000u;
        out[i] = qlora__from_bits((u & 0x7fffffffu) > 0x7f800000u ? 0x7fff0000u : rounded);
    }
}

// n elements of a piece as f32: where they are, or in `stage`.
static const float* qlora__lines_run(const qlora__cpu_gemm* cpu, const qlora__lines_piece* p,
                                     int64_t first, int64_t n, float* stage) {
    const float* from = qlora__operand_run(cpu, p->from, first, n, stage);
    if (!qlora__lines_rounded(p)) {
        return from;
    }
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        qlora__lines_round16(from + i, p->factor, stage + i);
    }
    for (; i < n; i++) {
        stage[i] = qlora__bf16_to(qlora__bf16_from(from[i] * p->factor));
    }
    return stage;
}

// Packs a piece into panels of `width` lines and `stride` steps, from step `at` on; lines that are
// missing in the last panel are zero.
static void qlora__lines_pack(const qlora__cpu_gemm* cpu, const qlora__lines_piece* p,
                              int64_t width, int64_t stride, int64_t at, const float* zero,
                              float* out) {
    float stage[8 * QLORA__KC];
    const qlora__operand* o = p->from;
    bool in_place = o->dtype == QLORA_F32 && !p->round; // codes have bf16 values
    int64_t padded = qlora__ceil_div(p->count, width) * width;
    int64_t group = cpu->pack8 != NULL && width % 8 == 0 ? 8 : 4;
    for (int64_t i = 0; o->lines && i < padded; i += group) {
        float* to = out + (i / width * stride + at) * width + i % width;
        for (int64_t k = 0; k < p->steps; k += QLORA__KC) {
            const float* lines[8];
            int64_t n = qlora__min(QLORA__KC, p->steps - k);
            for (int64_t j = 0; j < group; j++) {
                int64_t line = p->first + i + j;
                lines[j] = i + j < p->count ? qlora__lines_run(cpu, p, line * o->ld + p->k + k, n,
                                                               stage + j * QLORA__KC)
                                            : zero;
            }
            (group == 8 ? cpu->pack8 : cpu->pack4)(lines, n, width, to + k * width);
        }
    }
    for (int64_t k = 0; !o->lines && k < p->steps; k++) {
        const float* from =
            qlora__lines_run(cpu, p, (p->k + k) * o->ld + p->first, p->count, stage);
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
