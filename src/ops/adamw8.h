// ---- AdamW with 8-bit moments -------------------------------------------------------------------
//
// The formulas are those above. The moments of a range of at least 4096 elements are kept in 8
// bits, as bitsandbytes keeps them on a GPU: a block of 256 elements has the largest magnitude of
// its values as its scale, and an element is the index of the nearest value of a map of 256, which
// is signed for m and not for v. A negative m never becomes 0. The update itself uses the moments
// before they are rounded. Shorter ranges have f32 moments.
//
// All of it is in one piece of memory: both maps, the place of the moments of every range (a 64-bit
// offset), and the moments.

#define QLORA__MOMENTS_BLOCK 256
#define QLORA__MOMENTS_LEAST 4096
#define QLORA__MOMENTS_MAP 256

// Offsets of the moments of a range, m and v.
typedef struct qlora__moments {
    bool coded; // in 8 bits
    int64_t count;
    int64_t blocks;
    size_t values[2]; // codes, or numbers
    size_t scales[2]; // of the blocks
    size_t end;
} qlora__moments;

// The maps and the places of the ranges.
static size_t qlora__moments_head(int64_t range_count) {
    return qlora__align_up(
        2 * QLORA__MOMENTS_MAP * sizeof(QLORA__REAL) + (size_t)range_count * sizeof(int64_t), 256);
}

static qlora__moments qlora__moments_place(size_t at, int64_t count) {
    qlora__moments p;
    memset(&p, 0, sizeof p);
    p.coded = count >= QLORA__MOMENTS_LEAST;
    p.count = count;
    p.blocks = qlora__ceil_div(count, QLORA__MOMENTS_BLOCK);
    size_t size = p.coded ? 1 : sizeof(QLORA__REAL);
    size_t values = qlora__align_up((size_t)count * size, 16);
    size_t scales = p.coded ? (size_t)p.blocks * sizeof(QLORA__REAL) : 0;
    for (int i = 0; i < 2; i++) {
        p.values[i] = at + (size_t)i * values;
        p.scales[i] = at + 2 * values + (size_t)i * scales;
    }
    p.end = qlora__align_up(p.scales[1] + scales, 256);
    return p;
}

// Boundary i of `items` equal parts of [0.1, 1], rounded once, as torch.linspace does.
static float qlora__moments_boundary(int i, int items) {
    double step = (double)((1.0f - 0.1f) / (float)items);
    return i < (items + 1) / 2 ? (float)((double)0.1f + step * i)
                               : (float)(1.0 - step * (items - i));
}

// The dynamic map of bitsandbytes: 0, 1, and the centres of equal parts of seven decades, twice as
// many in each as in the one below it.
static void qlora__moments_map(bool is_signed, QLORA__REAL* map) {
    static const float decades[7] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1.0f};
    int zero = is_signed ? 127 : 0;
    int at = zero;
    map[at++] = 0;
    for (int e = 0; e < 7; e++) {
        int items = is_signed ? 1 << e : 2 << e;
        for (int i = 0; i < items; i++) {
            float low = qlora__moments_boundary(i, items);
            float high = qlora__moments_boundary(i + 1, items);
            float centre = (low + high) / 2.0f;
            map[at++] = (QLORA__REAL)(float)(decades[e] * centre);
        }
    }
    map[at] = 1;
    for (int i = 0; i < zero; i++) {
        map[i] = -map[2 * zero - i];
    }
}

// The index of the value of a map that is nearest to x.
static uint8_t qlora__moments_code(const QLORA__REAL* map, QLORA__REAL x) {
    int low = 0;
    for (int step = QLORA__MOMENTS_MAP / 2; step > 0; step /= 2) {
        int at = low + step;
        low = x > (map[at - 1] + map[at]) * (QLORA__REAL)0.5 ? at : low;
    }
    return (uint8_t)low;
}

typedef struct qlora__adamw8_job {
    qlora__adamw_job adamw;
    char* memory;
    qlora__moments moments;
} qlora__adamw8_job;

// Stores one of the moments of a block.
static void qlora__moments_store(const qlora__adamw8_job* job, int which, int64_t block, int64_t n,
                                 const QLORA__REAL* values) {
    const QLORA__REAL* map = (const QLORA__REAL*)(void*)job->memory + which * QLORA__MOMENTS_MAP;
    uint8_t* codes = (uint8_t*)job->memory + job->moments.values[which];
    QLORA__REAL* scales = (QLORA__REAL*)(void*)(job->memory + job->moments.scales[which]);
    QLORA__REAL most = 0;
    for (int64_t i = 0; i < n; i++) {
        QLORA__REAL size = values[i] < 0 ? -values[i] : values[i];
        most = size > most ? size : most;
    }
    for (int64_t i = 0; i < n; i++) {
        int code = qlora__moments_code(map, most > 0 ? values[i] / most : 0);
        code -= values[i] < 0 && code > 0 && map[code] >= 0 ? 1 : 0;
        codes[block * QLORA__MOMENTS_BLOCK + i] = (uint8_t)code;
    }
    scales[block] = most;
}

static void qlora__adamw8_blocks(void* user, int64_t begin, int64_t end) {
    const qlora__adamw8_job* job = (const qlora__adamw8_job*)user;
    const qlora__cpu_rows* rows = qlora__rows_of(job->adamw.args->param->owner);
    const QLORA__REAL* maps = (const QLORA__REAL*)(void*)job->memory;
    QLORA__REAL room[2][QLORA__MOMENTS_BLOCK];
    for (int64_t block = begin; block < end; block++) {
        int64_t first = block * QLORA__MOMENTS_BLOCK;
        int64_t n = qlora__min(QLORA__MOMENTS_BLOCK, job->moments.count - first);
        for (int k = 0; k < 2; k++) {
            const uint8_t* codes = (const uint8_t*)job->memory + job->moments.values[k] + first;
            QLORA__REAL scale =
                ((const QLORA__REAL*)(void*)(job->memory + job->moments.scales[k]))[block];
            for (int64_t i = 0; i < n; i++) {
                room[k][i] = maps[k * QLORA__MOMENTS_MAP + codes[i]] * scale;
            }
        }
        qlora__adamw_row row = qlora__adamw_row_of(&job->adamw, first, first + n, room[0], room[1]);
        rows->adamw(&row);
        for (int k = 0; k < 2; k++) {
            qlora__moments_store(job, k, block, n, room[k]);
        }
        if (job->adamw.args->shadow != NULL) {
            qlora__adamw_shade(rows, &job->adamw, first, first + n);
        }
    }
}

// A range with f32 moments.
static void qlora__adamw8_elements(void* user, int64_t begin, int64_t end) {
    const qlora__adamw8_job* job = (const qlora__adamw8_job*)user;
    const qlora__cpu_rows* rows = qlora__rows_of(job->adamw.args->param->owner);
    QLORA__REAL* m = (QLORA__REAL*)(void*)(job->memory + job->moments.values[0]);
    QLORA__REAL* v = (QLORA__REAL*)(void*)(job->memory + job->moments.values[1]);
    qlora__adamw_row row = qlora__adamw_row_of(&job->adamw, begin, end, m + begin, v + begin);
    rows->adamw(&row);
    if (job->adamw.args->shadow != NULL) {
        qlora__adamw_shade(rows, &job->adamw, begin, end);
    }
}

static void qlora__adamw8_cpu(qlora_ctx* ctx, const qlora_adamw_desc* a, const qlora_tensor* memory,
                              int64_t range_count) {
    qlora__adamw8_job job;
    memset(&job, 0, sizeof job);
    qlora__adamw_begin(&job.adamw, a);
    job.memory = (char*)memory->data;
    const char* places = job.memory + 2 * QLORA__MOMENTS_MAP * sizeof(QLORA__REAL);
    for (int64_t i = 0; i < range_count; i++) {
        job.adamw.range = qlora__adamw_range_at(a->ranges, i);
        int64_t at = 0;
        memcpy(&at, places + (size_t)i * sizeof at, sizeof at);
        job.moments = qlora__moments_place((size_t)at, job.adamw.range.count);
        if (job.adamw.skip) { // only sets the gradient to 0
            qlora__parallel(ctx, job.moments.count, 4096, qlora__adamw_elements, &job.adamw);
        } else if (job.moments.coded) {
            qlora__parallel(ctx, job.moments.blocks, 16, qlora__adamw8_blocks, &job);
        } else {
            qlora__parallel(ctx, job.moments.count, 4096, qlora__adamw8_elements, &job);
        }
    }
}

// m and v of the desc are NULL; `memory` takes their place.
static qlora_result qlora__adamw8_step(qlora_ctx* ctx, const qlora_adamw_desc* a,
                                       const qlora_tensor* memory) {
    int64_t range_count = 0;
    QLORA__TRY(qlora__adamw_check(ctx, a, &range_count));
    if (qlora__on_cpu(ctx)) {
        qlora__adamw8_cpu(ctx, a, memory, range_count);
        return QLORA_OK;
    }
    void* not_finite = a->not_finite != NULL ? a->not_finite->data : NULL;
    void* clip = a->clip_scale != NULL ? a->clip_scale->data : NULL;
    void* advance[] = {(void*)&a->state->data, &not_finite};
    QLORA__TRY(qlora__launch(ctx, QLORA__K_optim_advance, 1, 1, 1, 32, 0, advance));
    void* args[] = {(void*)&a->param->data,  (void*)&a->grad->data,
                    (void*)&memory->data,    (void*)&a->shadow->data,
                    (void*)&a->ranges->data, &range_count,
                    (void*)&a->state->data,  &clip};
    return qlora__launch(
        ctx, a->shadow->dtype == QLORA_F32 ? QLORA__K_optim_adamw8_f32 : QLORA__K_optim_adamw8_bf16,
        qlora__adamw_blocks(a, range_count, QLORA__MOMENTS_BLOCK), qlora__min(range_count, 65535),
        1, 256, 0, args);
}
