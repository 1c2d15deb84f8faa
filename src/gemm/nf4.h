// ---- NF4 weights --------------------------------------------------------------------------------

static bool qlora__is_power_of_two(int64_t n) {
    return n > 0 && (n & (n - 1)) == 0;
}

static QLORA__UNUSED int32_t qlora__log2(int64_t power) {
    int32_t shift = 0;
    while (power > 1) {
        power /= 2;
        shift++;
    }
    return shift;
}

// Sizes and offsets of the parts in a weight's memory: codes, absmax, absmax_codes, absmax_scales,
// offset, maps.
typedef struct qlora__nf4_layout {
    int64_t blocks;
    int64_t groups;
    int32_t block;
    int32_t block2;
    size_t size[6];
    size_t at[6];
    size_t total;
} qlora__nf4_layout;

#define QLORA__NF4_FAULT 96 // bytes for the text of a fault

// Describes what is wrong with the sizes; the text is empty if nothing is.
static void qlora__nf4_fault(const qlora_nf4_desc* d, char* text, size_t size) {
    size_t n = 0;
    text[0] = '\0';
    if (d->rows < 0) {
        snprintf(text, size, "desc.rows is %lld; it must not be negative", (long long)d->rows);
    } else if (d->cols < 0) {
        snprintf(text, size, "desc.cols is %lld; it must not be negative", (long long)d->cols);
    } else if (d->block != 0 &&
               (!qlora__is_power_of_two(d->block) || d->block < 32 || d->block > 4096)) {
        snprintf(text, size, "desc.block is %d; it must be a power of two from 32 to 4096",
                 (int)d->block);
    } else if (d->block2 != 0 && (!qlora__is_power_of_two(d->block2) || d->block2 > (1 << 20))) {
        snprintf(text, size, "desc.block2 is %d; it must be a power of two, at most 1048576",
                 (int)d->block2);
    } else if (!qlora__mul((size_t)d->rows, (size_t)d->cols, &n) || n > (size_t)INT64_MAX / 2) {
        snprintf(text, size, "%lld x %lld elements are too many", (long long)d->rows,
                 (long long)d->cols);
    }
}

static bool qlora__nf4_lay_out(const qlora_nf4_desc* desc, qlora__nf4_layout* out) {
    char fault[QLORA__NF4_FAULT];
    memset(out, 0, sizeof *out);
    qlora__nf4_fault(desc, fault, sizeof fault);
    if (fault[0] != '\0') {
        return false;
    }
    out->block = desc->block != 0 ? desc->block : 64;
    out->block2 = desc->block2 != 0 ? desc->block2 : 256;
    size_t n = (size_t)desc->rows * (size_t)desc->cols;
    out->blocks = qlora__ceil_div((int64_t)n, out->block);
    out->groups = desc->plain_scales ? 0 : qlora__ceil_div(out->blocks, out->block2);
    out->size[0] = (n + 1) / 2;
    out->size[1] = desc->plain_scales ? (size_t)out->blocks * 4 : 0;
    out->size[2] = desc->plain_scales ? 0 : (size_t)out->blocks;
    out->size[3] = (size_t)out->groups * 4;
    out->size[4] = desc->plain_scales ? 0 : 4;
    out->size[5] = QLORA__NF4_MAPS * 4;
    for (int i = 0; i < 6; i++) {
        out->at[i] = out->total;
        out->total += qlora__align_up(out->size[i], 256);
    }
    return true;
}

size_t qlora_nf4_bytes(const qlora_nf4_desc* desc) {
    qlora__nf4_layout layout;
    return desc != NULL && qlora__nf4_lay_out(desc, &layout) ? layout.total : 0;
}

static qlora_result qlora__nf4_wrap(qlora_ctx* ctx, const qlora_nf4_desc* desc,
                                    const qlora_tensor* memory, qlora_nf4* out) {
    qlora__nf4_layout layout;
    if (desc == NULL || out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is NULL", desc == NULL ? "desc" : "out");
    }
    if (!qlora__nf4_lay_out(desc, &layout)) {
        char fault[QLORA__NF4_FAULT];
        qlora__nf4_fault(desc, fault, sizeof fault);
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s", fault);
    }
    QLORA__TRY(qlora__need(ctx, memory, "memory", QLORA__IS_U8, -1, -1));
    if (memory->bytes < layout.total) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "memory has %llu bytes; an NF4 weight of %lld x %lld needs %llu",
                           (unsigned long long)memory->bytes, (long long)desc->rows,
                           (long long)desc->cols, (unsigned long long)layout.total);
    }
    if ((uintptr_t)memory->data % 16 != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "memory must be aligned to 16 bytes");
    }
    char* base = (char*)memory->data;
    qlora_nf4 w;
    memset(&w, 0, sizeof w);
    w.codes = (uint8_t*)base;
    if (desc->plain_scales) {
        w.absmax = (float*)(void*)(base + layout.at[1]);
    } else {
        w.absmax_codes = (uint8_t*)(base + layout.at[2]);
        w.absmax_scales = (float*)(void*)(base + layout.at[3]);
        w.offset = (float*)(void*)(base + layout.at[4]);
    }
    w.maps = (float*)(void*)(base + layout.at[5]);
    w.rows = desc->rows;
    w.cols = desc->cols;
    w.block = layout.block;
    w.block2 = layout.block2;
    w.memory = *memory;
    w.owner = ctx;
    float maps[QLORA__NF4_MAPS];
    qlora__nf4_default_maps(maps);
    QLORA__TRY(qlora__copy_in(ctx, w.maps, maps, sizeof maps));
    *out = w;
    return QLORA_OK;
}

qlora_result qlora_nf4_wrap(qlora_ctx* ctx, const qlora_nf4_desc* desc, const qlora_tensor* memory,
                            qlora_nf4* out) {
    QLORA__ENTER(ctx, "qlora_nf4_wrap");
    return qlora__leave(ctx, qlora__nf4_wrap(ctx, desc, memory, out));
}

static qlora_result qlora__nf4_create(qlora_ctx* ctx, const qlora_nf4_desc* desc, qlora_nf4* out) {
    size_t bytes = qlora_nf4_bytes(desc);
    qlora_tensor memory;
    QLORA__TRY(qlora__tensor_create(ctx, QLORA_U8, 1, 1, (int64_t)bytes, &memory));
    qlora_result r = qlora__nf4_wrap(ctx, desc, &memory, out);
    if (r != QLORA_OK) {
        qlora_result ignored = qlora__tensor_destroy(ctx, &memory);
        (void)ignored;
        return r;
    }
    out->owns_memory = true;
    return QLORA_OK;
}

qlora_result qlora_nf4_create(qlora_ctx* ctx, const qlora_nf4_desc* desc, qlora_nf4* out) {
    QLORA__ENTER(ctx, "qlora_nf4_create");
    return qlora__leave(ctx, qlora__nf4_create(ctx, desc, out));
}

static qlora_result qlora__nf4_destroy(qlora_ctx* ctx, qlora_nf4* weight) {
    if (weight == NULL || weight->owner == NULL) {
        return QLORA_OK;
    }
    if (weight->owner != ctx) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "weight belongs to another context");
    }
    if (weight->owns_memory) {
        QLORA__TRY(qlora__tensor_destroy(ctx, &weight->memory));
    }
    memset(weight, 0, sizeof *weight);
    return QLORA_OK;
}

qlora_result qlora_nf4_destroy(qlora_ctx* ctx, qlora_nf4* weight) {
    QLORA__TRY(qlora__enter_destroy(ctx, "qlora_nf4_destroy"));
    return qlora__leave(ctx, qlora__nf4_destroy(ctx, weight));
}

static qlora_result qlora__nf4_need(qlora_ctx* ctx, const qlora_nf4* w, const char* name) {
    if (w == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is NULL", name);
    }
    if (w->owner != ctx) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s belongs to %s", name,
                           w->owner == NULL ? "no context; use qlora_nf4_create or _wrap"
                                            : "another context");
    }
    if (w->codes == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s.codes is NULL", name);
    }
    return qlora__capture_note(ctx, w->memory.data);
}

static qlora_nf4_desc qlora__nf4_describe(const qlora_nf4* w) {
    qlora_nf4_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rows = w->rows;
    desc.cols = w->cols;
    desc.block = w->block;
    desc.block2 = w->block2;
    desc.plain_scales = w->absmax != NULL;
    return desc;
}

// Copies parts in or out. Parts that the weight does not have must be NULL.
static qlora_result qlora__nf4_copy(qlora_ctx* ctx, const qlora_nf4* w,
                                    const qlora_nf4_parts* parts, bool in) {
    QLORA__TRY(qlora__nf4_need(ctx, w, "the weight"));
    if (parts == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "parts is NULL");
    }
    qlora_nf4_desc desc = qlora__nf4_describe(w);
    qlora__nf4_layout layout;
    bool valid = qlora__nf4_lay_out(&desc, &layout);
    QLORA_ASSERT(valid);
    (void)valid;
    static const char* const names[] = {"codes",  "absmax", "absmax_codes", "absmax_scales",
                                        "offset", "levels", "map"};
    void* host[] = {parts->codes,  parts->absmax, parts->absmax_codes, parts->absmax_scales,
                    parts->offset, parts->levels, parts->map};
    void* device[] = {w->codes,  w->absmax, w->absmax_codes, w->absmax_scales,
                      w->offset, w->maps,   w->maps + 16};
    const size_t sizes[] = {layout.size[0], layout.size[1], layout.size[2], layout.size[3],
                            layout.size[4], 16 * 4,         256 * 4};
    for (int i = 0; i < 7; i++) {
        if (host[i] != NULL && device[i] == NULL) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "parts.%s must be NULL: the weight has %s scales", names[i],
                               w->absmax != NULL ? "plain" : "double-quantised");
        }
    }
    for (int i = 0; i < 7; i++) {
        if (host[i] != NULL) {
            QLORA__TRY(in ? qlora__copy_in(ctx, device[i], host[i], sizes[i])
                          : qlora__copy_out(ctx, host[i], device[i], sizes[i]));
        }
    }
    return QLORA_OK;
}

qlora_result qlora_nf4_write(qlora_ctx* ctx, const qlora_nf4* weight,
                             const qlora_nf4_parts* parts) {
    QLORA__ENTER(ctx, "qlora_nf4_write");
    return qlora__leave(ctx, qlora__nf4_copy(ctx, weight, parts, true));
}

qlora_result qlora_nf4_read(qlora_ctx* ctx, const qlora_nf4* weight, const qlora_nf4_parts* parts) {
    QLORA__ENTER(ctx, "qlora_nf4_read");
    return qlora__leave(ctx, qlora__nf4_copy(ctx, weight, parts, false));
}

// ---- NF4 quantise and dequantise (formulas: numbers/nf4.h) --------------------------------------

// Threads of a block side by side, each with eight columns, when it dequantises.
static int32_t qlora__nf4_width(int64_t cols) {
    int32_t width = 1;
    while (width < 256 && 8 * width < cols) {
        width *= 2;
    }
    return width;
}

typedef struct qlora__nf4_job {
    const qlora_nf4* w;
    const qlora_tensor* source;
    float* absmax;
    // only for dequantise: the part of the weight
    const qlora_tensor* out;
    int64_t row0;
    int64_t col0;
    bool via_bf16;
} qlora__nf4_job;

static void qlora__nf4_quantise_range(void* user, int64_t begin, int64_t end) {
    const qlora__nf4_job* job = (const qlora__nf4_job*)user;
    const qlora_nf4* w = job->w;
    qlora__nf4_quantise_blocks(job->source->data, job->source->dtype, w->rows * w->cols, w->block,
                               w->codes, job->absmax, begin, end);
}

// Dequantises elements [e, e + n) of the weight, counted from its first one.
static void qlora__nf4_decode(const qlora__cpu_rows* rows, const qlora_nf4* w, int64_t e, int64_t n,
                              QLORA__REAL* y) {
    while (n > 0) {
        int64_t part = qlora__min(n, w->block - e % w->block);
        float scale = qlora__nf4_absmax(w, e / w->block);
        if (e % 2 != 0) { // the second half of a byte, which `rows` does not start with
            part = 1;
            *y = (QLORA__REAL)(w->maps[qlora__nf4_code_at(w->codes, e)] * scale);
        } else {
            rows->nf4(w->codes + e / 2, w->maps, scale, part, y);
        }
        e += part;
        y += part;
        n -= part;
    }
}

static void qlora__nf4_dequantise_rows(void* user, int64_t begin, int64_t end) {
    const qlora__nf4_job* job = (const qlora__nf4_job*)user;
    const qlora_tensor* out = job->out;
    const qlora__cpu_rows* rows = qlora__rows_of(out->owner);
    QLORA__REAL room[QLORA__ROW_CHUNK];
    uint16_t narrow[QLORA__ROW_CHUNK];
    for (int64_t r = begin; r < end; r++) {
        int64_t e = (job->row0 + r) * job->w->cols + job->col0;
        for (int64_t c = 0; c < out->cols; c += QLORA__ROW_CHUNK) {
            int64_t n = qlora__min(QLORA__ROW_CHUNK, out->cols - c);
            QLORA__REAL* y = qlora__row_target(out, r, c, room);
            qlora__nf4_decode(rows, job->w, e + c, n, y);
            if (job->via_bf16) {
                rows->store(y, n, narrow, QLORA_BF16);
                rows->load(narrow, QLORA_BF16, n, y);
            }
            qlora__row_done(rows, out, r, c, n, y);
        }
    }
}

#ifndef QLORA_NO_CUDA

static qlora_result qlora__nf4_quantise_gpu(qlora_ctx* ctx, const qlora_tensor* source,
                                            const qlora_nf4* weight, float* absmax,
                                            int64_t blocks) {
    qlora_nf4 w = *weight; // parameters are passed by address
    int64_t n = w.rows * w.cols;
    void* data = source->data;
    qlora__kernel_id kernel = source->dtype == QLORA_F32    ? QLORA__K_nf4_quantise_f32
                              : source->dtype == QLORA_BF16 ? QLORA__K_nf4_quantise_bf16
                                                            : QLORA__K_nf4_quantise_f16;
    void* args[] = {&data, &n, &w.block, &w.codes, &absmax};
    QLORA__TRY(qlora__launch(ctx, kernel, qlora__ceil_div(blocks, 8), 1, 1, 256, 0, args));
    if (w.absmax != NULL || blocks == 0) {
        return QLORA_OK;
    }
    float inverse = 1.0f / (float)blocks;
    void* sum[] = {&absmax, &blocks, &inverse, &w.offset};
    QLORA__TRY(qlora__launch(ctx, QLORA__K_nf4_offset, 1, 1, 1, 1024, 0, sum));
    void* scales[] = {&absmax, &blocks,         &w.block2,       &w.offset,
                      &w.maps, &w.absmax_codes, &w.absmax_scales};
    return qlora__launch(ctx, QLORA__K_nf4_quantise_scales,
                         qlora__ceil_div(qlora__ceil_div(blocks, w.block2), 8), 1, 1, 256, 0,
                         scales);
}

static qlora_result qlora__nf4_dequantise_gpu(qlora_ctx* ctx, const qlora__nf4_job* job) {
    qlora_nf4 w = *job->w;
    qlora_tensor out = *job->out;
    int64_t row0 = job->row0;
    int64_t col0 = job->col0;
    int32_t block_shift = qlora__log2(w.block);
    int32_t group_shift = qlora__log2(w.block2);
    int32_t via_bf16 = job->via_bf16 ? 1 : 0;
    int32_t width = qlora__nf4_width(out.cols);
    qlora__kernel_id kernel = out.dtype == QLORA_F32    ? QLORA__K_nf4_dequantise_f32
                              : out.dtype == QLORA_BF16 ? QLORA__K_nf4_dequantise_bf16
                                                        : QLORA__K_nf4_dequantise_f16;
    void* args[] = {&w.codes, &w.absmax,    &w.absmax_codes, &w.absmax_scales, &w.offset, &w.maps,
                    &w.cols,  &row0,        &col0,           &out.data,        &out.rows, &out.cols,
                    &out.ld,  &block_shift, &group_shift,    &width,           &via_bf16};
    return qlora__launch(ctx, kernel, qlora__ceil_div(out.rows, 4 * 256 / width),
                         qlora__ceil_div(out.cols, 8 * width), 1, 256, 0, args);
}

#else

static qlora_result qlora__nf4_quantise_gpu(qlora_ctx* ctx, const qlora_tensor* source,
                                            const qlora_nf4* weight, float* absmax,
                                            int64_t blocks) {
    (void)source;
    (void)weight;
    (void)absmax;
    (void)blocks;
    return qlora__no_kernels(ctx);
}

static qlora_result qlora__nf4_dequantise_gpu(qlora_ctx* ctx, const qlora__nf4_job* job) {
    (void)job;
    return qlora__no_kernels(ctx);
}

#endif

static qlora_result qlora__nf4_quantise(qlora_ctx* ctx, const qlora_tensor* source,
                                        const qlora_nf4* w) {
    QLORA__TRY(qlora__nf4_need(ctx, w, "the weight"));
    QLORA__TRY(qlora__need(ctx, source, "source", QLORA__IS_FLOAT, w->rows, w->cols));
    if (source->ld != source->cols && source->rows > 1) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "source.ld is %lld; it must be equal to cols (%lld)",
                           (long long)source->ld, (long long)source->cols);
    }
    int64_t blocks = qlora__ceil_div(w->rows * w->cols, w->block);
    void* scratch = NULL;
    float* absmax = w->absmax;
    if (absmax == NULL && blocks == 0) {
        return qlora__zero(ctx, w->offset, sizeof(float), sizeof(float), 1);
    }
    if (absmax == NULL) {
        QLORA__TRY(qlora__scratch(ctx, (size_t)blocks * 4, &scratch));
        absmax = (float*)scratch;
    }
    if (!qlora__on_cpu(ctx)) {
        return qlora__nf4_quantise_gpu(ctx, source, w, absmax, blocks);
    }
    qlora__nf4_job job;
    memset(&job, 0, sizeof job);
    job.w = w;
    job.source = source;
    job.absmax = absmax;
    qlora__parallel(ctx, blocks, 64, qlora__nf4_quantise_range, &job);
    if (w->absmax == NULL) {
        w->offset[0] = qlora__nf4_offset(absmax, blocks);
        qlora__nf4_quantise_scales(absmax, blocks, w->block2, w->offset[0], w->maps + 16,
                                   w->absmax_codes, w->absmax_scales);
    }
    return QLORA_OK;
}

qlora_result qlora_nf4_quantise(qlora_ctx* ctx, const qlora_tensor* source,
                                const qlora_nf4* weight) {
    QLORA__ENTER(ctx, "qlora_nf4_quantise");
    return qlora__leave(ctx, qlora__nf4_quantise(ctx, source, weight));
}

// Dequantises the part of the weight that starts at (row0, col0) and has the size of out.
static qlora_result qlora__nf4_window(qlora_ctx* ctx, const qlora_nf4* w, int64_t row0,
                                      int64_t col0, const qlora_tensor* out, bool via_bf16) {
    qlora__nf4_job job;
    memset(&job, 0, sizeof job);
    job.w = w;
    job.out = out;
    job.row0 = row0;
    job.col0 = col0;
    job.via_bf16 = via_bf16;
    if (out->rows == 0 || out->cols == 0) {
        return QLORA_OK;
    }
    if (!qlora__on_cpu(ctx)) {
        return qlora__nf4_dequantise_gpu(ctx, &job);
    }
    qlora__parallel(ctx, out->rows, 1 + 4096 / out->cols, qlora__nf4_dequantise_rows, &job);
    return QLORA_OK;
}

static qlora_result qlora__nf4_dequantise(qlora_ctx* ctx, const qlora_nf4* w,
                                          const qlora_tensor* out, bool via_bf16) {
    QLORA__TRY(qlora__nf4_need(ctx, w, "the weight"));
    QLORA__TRY(qlora__need(ctx, out, "out", QLORA__IS_FLOAT, w->rows, w->cols));
    return qlora__nf4_window(ctx, w, 0, 0, out, via_bf16);
}

qlora_result qlora_nf4_dequantise(qlora_ctx* ctx, const qlora_nf4* weight, const qlora_tensor* out,
                                  bool via_bf16) {
    QLORA__ENTER(ctx, "qlora_nf4_dequantise");
    return qlora__leave(ctx, qlora__nf4_dequantise(ctx, weight, out, via_bf16));
}
