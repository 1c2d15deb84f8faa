// ---- gradient clipping --------------------------------------------------------------------------
//
//   norm[g]  = sqrt(sum over the gradients of group g of x^2)
//   scale[g] = min(1, max_norm / (norm[g] + 1e-6)), or 1 when norm[g] is not finite or max_norm < 0
//   x       *= scale of its group
//
// All of it stays on the device: the host never waits for the norm. Gradients are split into chunks
// of 8192 elements, which are summed in double in a fixed order. (On the GPU the squares are f32,
// so only gradients between 1e-18 and 1e18 contribute fully to the norm.)

#define QLORA__CLIP_CHUNK 8192

typedef struct qlora__clip_part { // the same as struct clip_tensor in kernels/train/clip.cu
    float* data;
    int64_t count;
} qlora__clip_part;

typedef struct qlora__clip_chunk { // the same as struct clip_chunk in kernels/train/clip.cu
    int32_t part;
    int32_t group;
    int64_t index;
} qlora__clip_chunk;

struct qlora_clip {
    qlora_ctx* owner;
    int32_t groups;
    int64_t parts;
    int64_t chunks;
    int32_t group_room; // the tables have room for at least groups, parts and chunks
    int64_t part_room;
    int64_t chunk_room;
    const void** uses; // the gradients' memory, on which a graph with this clip depends
    size_t use_count;
    qlora__buffer* memory; // holds everything below; device memory on CUDA
    qlora__clip_part* part_table;
    qlora__clip_chunk* chunk_table;
    int64_t* first;       // [groups + 1]: index of each group's first chunk
    double* partials;     // [chunks]
    QLORA__REAL* results; // [groups][2]: norm, scale; f32 for AdamW
    uint32_t* flags;      // [groups]: 1 = not finite
    uint32_t* any;        // [1]: 1 = some group was not finite; the optimizer reads it
    float* max_norm;      // [1]
};

// Places the tables one after another, starting at base. With base NULL, only counts the bytes.
static size_t qlora__clip_layout(qlora_clip* clip, char* base) {
    size_t at = 0;
#define QLORA__PLACE(field, type, count)                                                           \
    do {                                                                                           \
        clip->field = base != NULL ? (type*)(void*)(base + at) : NULL;                             \
        at += qlora__align_up((size_t)(count) * sizeof(type), 256);                                \
    } while (0)
    QLORA__PLACE(part_table, qlora__clip_part, clip->part_room);
    QLORA__PLACE(chunk_table, qlora__clip_chunk, clip->chunk_room);
    QLORA__PLACE(first, int64_t, clip->group_room + 1);
    QLORA__PLACE(partials, double, clip->chunk_room);
    QLORA__PLACE(results, QLORA__REAL, 2 * clip->group_room);
    QLORA__PLACE(flags, uint32_t, clip->group_room);
    QLORA__PLACE(any, uint32_t, 1);
    QLORA__PLACE(max_norm, float, 1);
#undef QLORA__PLACE
    return at;
}

// Returns the number of parts: one per row for a tensor with gaps between its rows, otherwise one.
static int64_t qlora__clip_parts_of(const qlora_tensor* t) {
    if (t->rows == 0 || t->cols == 0) {
        return 0;
    }
    return t->ld == t->cols || t->rows == 1 ? 1 : t->rows;
}

static qlora_result qlora__clip_count(qlora_ctx* ctx, const qlora_tensor* const* tensors,
                                      const int32_t* groups, size_t n, qlora_clip* clip) {
    clip->groups = 1;
    for (size_t i = 0; i < n; i++) {
        char name[32];
        snprintf(name, sizeof name, "tensor %llu", (unsigned long long)i);
        QLORA__TRY(qlora__need(ctx, tensors[i], name, QLORA__IS_F32, -1, -1));
        int32_t group = groups != NULL ? groups[i] : 0;
        if (group < 0 || (size_t)group >= n) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "%s is in group %d; groups are numbered from 0 to at most %llu",
                               name, (int)group, (unsigned long long)n - 1);
        }
        clip->groups = group >= clip->groups ? group + 1 : clip->groups;
        int64_t parts = qlora__clip_parts_of(tensors[i]);
        int64_t length = parts == 1 ? tensors[i]->rows * tensors[i]->cols : tensors[i]->cols;
        clip->parts += parts;
        clip->chunks += parts * qlora__ceil_div(length, QLORA__CLIP_CHUNK);
    }
    if (clip->parts > INT32_MAX || clip->chunks > INT32_MAX) {
        bool rows = clip->parts > INT32_MAX;
        return qlora__fail(ctx, QLORA_ERR_LIMIT, "the tensors have %lld %s; the maximum is %d",
                           (long long)(rows ? clip->parts : clip->chunks),
                           rows ? "separate rows" : "chunks", INT32_MAX);
    }
    return QLORA_OK;
}

// Fills the tables in host memory. The chunks of a group are consecutive.
static void qlora__clip_fill(const qlora_tensor* const* tensors, const int32_t* groups, size_t n,
                             qlora_clip* image) {
    int64_t chunk = 0;
    for (int32_t group = 0; group < image->groups; group++) {
        image->first[group] = chunk;
        int64_t part = 0;
        for (size_t i = 0; i < n; i++) {
            const qlora_tensor* t = tensors[i];
            int64_t parts = qlora__clip_parts_of(t);
            int64_t length = parts == 1 ? t->rows * t->cols : t->cols;
            for (int64_t p = 0; p < parts; p++, part++) {
                image->part_table[part].data = (float*)t->data + p * t->ld;
                image->part_table[part].count = length;
                for (int64_t j = 0;
                     (groups != NULL ? groups[i] : 0) == group && j * QLORA__CLIP_CHUNK < length;
                     j++) {
                    image->chunk_table[chunk].part = (int32_t)part;
                    image->chunk_table[chunk].group = group;
                    image->chunk_table[chunk].index = j;
                    chunk++;
                }
            }
        }
    }
    image->first[image->groups] = chunk;
    *image->max_norm = 1.0f;
}

static qlora_result qlora__clip_build(qlora_ctx* ctx, const qlora_tensor* const* tensors,
                                      const int32_t* groups, size_t n, qlora_clip* clip) {
    QLORA__TRY(qlora__clip_count(ctx, tensors, groups, n, clip));
    size_t list_bytes = 0;
    if (!qlora__mul(n, sizeof *clip->uses, &list_bytes)) {
        return qlora__fail(ctx, QLORA_ERR_LIMIT, "n is %llu; a list of that size overflows",
                           (unsigned long long)n);
    }
    clip->uses = (const void**)qlora__alloc(ctx, list_bytes);
    if (clip->uses == NULL) {
        return QLORA_ERR_MEMORY;
    }
    clip->use_count = n;
    for (size_t i = 0; i < n; i++) {
        clip->uses[i] = tensors[i]->data;
    }
    clip->group_room = clip->groups;
    clip->part_room = clip->parts;
    clip->chunk_room = clip->chunks;
    size_t bytes = qlora__clip_layout(clip, NULL);
    char* host = (char*)qlora__alloc_zero(ctx, bytes);
    if (host == NULL) {
        return QLORA_ERR_MEMORY;
    }
    qlora__clip_layout(clip, host);
    qlora__clip_fill(tensors, groups, n, clip);
    qlora_result r = qlora__buffer_create(ctx, bytes, &clip->memory);
    if (r == QLORA_OK) {
        r = qlora__copy_in(ctx, clip->memory->data, host, bytes);
        qlora__clip_layout(clip, (char*)clip->memory->data);
    }
    qlora__free(ctx, host, bytes);
    return r;
}

static void qlora__clip_free(qlora_ctx* ctx, qlora_clip* clip) {
    qlora__buffer_destroy(ctx, clip->memory);
    qlora__free(ctx, (void*)clip->uses, clip->use_count * sizeof *clip->uses);
    qlora__free(ctx, clip, sizeof *clip);
}

static qlora_result qlora__clip_create(qlora_ctx* ctx, const qlora_tensor* const* tensors,
                                       const int32_t* groups, size_t n, qlora_clip** out) {
    if (out == NULL || (tensors == NULL && n > 0)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s is NULL", out == NULL ? "out" : "tensors");
    }
    QLORA__TRY(qlora__not_in_capture(ctx, "making a clip"));
    qlora_clip* clip = (qlora_clip*)qlora__alloc_zero(ctx, sizeof *clip);
    if (clip == NULL) {
        return QLORA_ERR_MEMORY;
    }
    clip->owner = ctx;
    qlora_result r = qlora__clip_build(ctx, tensors, groups, n, clip);
    if (r != QLORA_OK) {
        qlora__clip_free(ctx, clip);
        return r;
    }
    ctx->living[QLORA__CLIPS]++;
    *out = clip;
    return QLORA_OK;
}

qlora_result qlora_clip_create(qlora_ctx* ctx, const qlora_tensor* const* tensors,
                               const int32_t* groups, size_t n, qlora_clip** out) {
    QLORA__ENTER(ctx, "qlora_clip_create");
    return qlora__leave(ctx, qlora__clip_create(ctx, tensors, groups, n, out));
}

static qlora_ctx* qlora__clip_ctx(const qlora_clip* clip) {
    return clip != NULL ? clip->owner : NULL;
}

static qlora_result qlora__clip_destroy(qlora_ctx* ctx, qlora_clip* clip) {
    QLORA__TRY(qlora__not_in_capture(ctx, "freeing memory"));
    qlora__clip_free(ctx, clip);
    ctx->living[QLORA__CLIPS]--;
    return QLORA_OK;
}

qlora_result qlora_clip_destroy(qlora_clip* clip) {
    if (clip == NULL) {
        return QLORA_OK;
    }
    qlora_ctx* ctx = clip->owner;
    QLORA__TRY(qlora__enter_destroy(ctx, "qlora_clip_destroy"));
    return qlora__leave(ctx, qlora__clip_destroy(ctx, clip));
}

static qlora_result qlora__clip_set(qlora_ctx* ctx, qlora_clip* clip, float max_norm) {
    if ((qlora__bits(max_norm) & 0x7fffffffu) > 0x7f800000u) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "max_norm is not a number (NaN)");
    }
#ifndef QLORA_NO_CUDA
    if (!qlora__on_cpu(ctx)) {
        qlora__CUdeviceptr at = (qlora__CUdeviceptr)(uintptr_t)clip->max_norm;
        int code = ctx->gpu->cu.MemsetD32Async(at, qlora__bits(max_norm), 1, ctx->gpu->stream);
        return qlora__cu(ctx, code, "cuMemsetD32Async");
    }
#endif
    *clip->max_norm = max_norm;
    return QLORA_OK;
}

qlora_result qlora_clip_set(qlora_clip* clip, float max_norm) {
    qlora_ctx* ctx = qlora__clip_ctx(clip);
    QLORA__ENTER(ctx, "qlora_clip_set");
    return qlora__leave(ctx, qlora__clip_set(ctx, clip, max_norm));
}

static void qlora__clip_squares_cpu(void* user, int64_t begin, int64_t end) {
    const qlora_clip* clip = (const qlora_clip*)user;
    const qlora__cpu_rows* rows = qlora__rows_of(clip->owner);
    for (int64_t i = begin; i < end; i++) {
        const qlora__clip_chunk* c = &clip->chunk_table[i];
        const qlora__clip_part* part = &clip->part_table[c->part];
        int64_t from = c->index * QLORA__CLIP_CHUNK;
        int64_t to = qlora__min(from + QLORA__CLIP_CHUNK, part->count);
        const QLORA__REAL* x = (const QLORA__REAL*)(const void*)part->data;
        clip->partials[i] = rows->squares(x + from, to - from, 0.0);
    }
}

static void qlora__clip_apply_cpu(void* user, int64_t begin, int64_t end) {
    const qlora_clip* clip = (const qlora_clip*)user;
    const qlora__cpu_rows* rows = qlora__rows_of(clip->owner);
    for (int64_t i = begin; i < end; i++) {
        const qlora__clip_chunk* c = &clip->chunk_table[i];
        const qlora__clip_part* part = &clip->part_table[c->part];
        float scale = (float)clip->results[2 * c->group + 1];
        int64_t from = c->index * QLORA__CLIP_CHUNK;
        int64_t to = qlora__min(from + QLORA__CLIP_CHUNK, part->count);
        QLORA__REAL* x = (QLORA__REAL*)(void*)part->data;
        if (scale != 1.0f) {
            rows->point[QLORA__POINT_SCALE](x + from, NULL, (QLORA__REAL)scale, to - from,
                                            x + from);
        }
    }
}

static void qlora__clip_measure_cpu(qlora_ctx* ctx, qlora_clip* clip) {
    qlora__parallel(ctx, clip->chunks, 8, qlora__clip_squares_cpu, clip);
    *clip->any = 0;
    for (int32_t g = 0; g < clip->groups; g++) {
        double sum = 0.0;
        for (int64_t i = clip->first[g]; i < clip->first[g + 1]; i++) {
            sum += clip->partials[i];
        }
        float norm = (float)sqrt(sum);
        float limit = *clip->max_norm;
        float scale = limit / (norm + 1e-6f);
        bool finite = qlora__finite(norm);
        clip->results[2 * g] = norm;
        clip->results[2 * g + 1] = finite && limit >= 0.0f && scale < 1.0f ? scale : 1.0f;
        clip->flags[g] = finite ? 0 : 1;
        *clip->any |= clip->flags[g];
    }
}

// Computes norms, scales and flags but leaves the gradients unchanged, for an AdamW that applies
// the scale itself.
static qlora_result qlora__clip_measure(qlora_ctx* ctx, qlora_clip* clip) {
    QLORA__TRY(qlora__capture_note(ctx, clip->part_table));
    if (qlora__on_cpu(ctx)) {
        qlora__clip_measure_cpu(ctx, clip);
        return QLORA_OK;
    }
    for (size_t i = 0; i < clip->use_count && ctx->capture != NULL; i++) {
        QLORA__TRY(qlora__capture_note(ctx, clip->uses[i]));
    }
    qlora_clip c = *clip; // parameters are passed by address
    void* squares[] = {&c.part_table, &c.chunk_table, &c.partials};
    QLORA__TRY(qlora__launch(ctx, QLORA__K_clip_squares, clip->chunks, 1, 1, 256, 0, squares));
    void* scale[] = {&c.partials, &c.first, &c.max_norm, &c.results, &c.flags};
    return qlora__launch(ctx, QLORA__K_clip_scale, clip->groups, 1, 1, 256, 0, scale);
}

qlora_result qlora_clip_measure(qlora_clip* clip) {
    qlora_ctx* ctx = qlora__clip_ctx(clip);
    QLORA__ENTER(ctx, "qlora_clip_measure");
    return qlora__leave(ctx, qlora__clip_measure(ctx, clip));
}

static qlora_result qlora__clip_apply(qlora_ctx* ctx, qlora_clip* clip) {
    QLORA__TRY(qlora__clip_measure(ctx, clip));
    if (qlora__on_cpu(ctx)) {
        qlora__parallel(ctx, clip->chunks, 8, qlora__clip_apply_cpu, clip);
        return QLORA_OK;
    }
    qlora_clip c = *clip; // parameters are passed by address
    void* apply[] = {&c.part_table, &c.chunk_table, &c.chunks, &c.results,
                     &c.flags,      &c.groups,      &c.any};
    return qlora__launch(ctx, QLORA__K_clip_apply, qlora__max(clip->chunks, 1), 1, 1, 256, 0,
                         apply);
}

qlora_result qlora_clip_apply(qlora_clip* clip) {
    qlora_ctx* ctx = qlora__clip_ctx(clip);
    QLORA__ENTER(ctx, "qlora_clip_apply");
    return qlora__leave(ctx, qlora__clip_apply(ctx, clip));
}

static qlora_result qlora__clip_group_check(qlora_ctx* ctx, const qlora_clip* clip, int32_t group,
                                            int32_t least) {
    if (group < least || group >= clip->groups) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "group %d does not exist; use %d to %d",
                           (int)group, (int)least, (int)clip->groups - 1);
    }
    return QLORA_OK;
}

static qlora_result qlora__clip_query(qlora_ctx* ctx, qlora_clip* clip, int32_t group,
                                      qlora_clip_info* out) {
    if (out == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "out is NULL");
    }
    QLORA__TRY(qlora__clip_group_check(ctx, clip, group, 0));
    QLORA__REAL result[2];
    uint32_t flag = 0;
    QLORA__TRY(qlora__copy_out(ctx, result, clip->results + 2 * group, sizeof result));
    QLORA__TRY(qlora__copy_out(ctx, &flag, clip->flags + group, sizeof flag));
    out->norm = (float)result[0];
    out->scale = (float)result[1];
    out->finite = flag == 0;
    return QLORA_OK;
}

qlora_result qlora_clip_query(qlora_clip* clip, int32_t group, qlora_clip_info* out) {
    qlora_ctx* ctx = qlora__clip_ctx(clip);
    QLORA__ENTER(ctx, "qlora_clip_query");
    return qlora__leave(ctx, qlora__clip_query(ctx, clip, group, out));
}

static qlora_tensor qlora__clip_scalar(const qlora_clip* clip, void* data, qlora_dtype dtype) {
    qlora_tensor t;
    memset(&t, 0, sizeof t);
    t.data = data;
    t.bytes = qlora_dtype_bytes(dtype);
    t.dtype = dtype;
    t.rows = 1;
    t.cols = 1;
    t.ld = 1;
    t.batch = 1;
    t.batch_stride = 1;
    t.owner = clip->owner;
    return t;
}

// Returns a group's scale and flag as tensors for AdamW. Group -1 has the flag of all groups.
static void qlora__clip_device(const qlora_clip* clip, int32_t group, qlora_tensor* scale,
                               qlora_tensor* not_finite) {
    if (scale != NULL) {
        *scale = qlora__clip_scalar(clip, clip->results + 2 * group + 1, QLORA_F32);
    }
    if (not_finite != NULL) {
        uint32_t* flag = group < 0 ? clip->any : clip->flags + group;
        *not_finite = qlora__clip_scalar(clip, flag, QLORA_I32);
    }
}

qlora_result qlora_clip_device(qlora_clip* clip, int32_t group, qlora_tensor* scale,
                               qlora_tensor* not_finite) {
    qlora_ctx* ctx = qlora__clip_ctx(clip);
    QLORA__ENTER(ctx, "qlora_clip_device");
    qlora_result r = qlora__clip_group_check(ctx, clip, group, scale != NULL ? 0 : -1);
    if (r == QLORA_OK) {
        qlora__clip_device(clip, group, scale, not_finite);
    }
    return qlora__leave(ctx, r);
}

// ---- a clip in the caller's memory --------------------------------------------------------------

// Places the tables of a clip at base, with room for n gradients in up to `groups` contiguous
// groups, and returns their size in bytes. With base NULL, only counts the bytes.
static QLORA__UNUSED size_t qlora__clip_place(qlora_ctx* ctx, int64_t n, int32_t groups, char* base,
                                              qlora_clip* clip) {
    memset(clip, 0, sizeof *clip);
    clip->owner = ctx;
    clip->group_room = groups;
    clip->part_room = groups;
    clip->chunk_room = qlora__ceil_div(n, QLORA__CLIP_CHUNK) + groups; // each group's last one
    return qlora__clip_layout(clip, base);
}

// Writes the tables of a placed clip of one contiguous tensor: group g starts at element starts[g],
// and the last one ends with the tensor.
static QLORA__UNUSED qlora_result qlora__clip_start(qlora_ctx* ctx, qlora_clip* clip,
                                                    const qlora_tensor* gradients,
                                                    const int64_t* starts, int32_t groups,
                                                    float max_norm) {
    QLORA_ASSERT(groups >= 1 && groups <= clip->group_room);
    qlora_clip image = *clip;
    size_t bytes = qlora__clip_layout(&image, NULL);
    char* host = (char*)qlora__alloc_zero(ctx, bytes);
    if (host == NULL) {
        return QLORA_ERR_MEMORY;
    }
    qlora__clip_layout(&image, host);
    int64_t chunk = 0;
    for (int32_t g = 0; g < groups; g++) {
        int64_t end = g + 1 < groups ? starts[g + 1] : gradients->cols;
        image.first[g] = chunk;
        image.part_table[g].data =
            (float*)(void*)((QLORA__REAL*)gradients->data + starts[g]); // in double for tests
        image.part_table[g].count = end - starts[g];
        for (int64_t j = 0; j * QLORA__CLIP_CHUNK < end - starts[g]; j++, chunk++) {
            image.chunk_table[chunk].part = g;
            image.chunk_table[chunk].group = g;
            image.chunk_table[chunk].index = j;
        }
    }
    image.first[groups] = chunk;
    *image.max_norm = max_norm;
    clip->groups = groups;
    clip->parts = groups;
    clip->chunks = chunk;
    qlora_result r = qlora__copy_in(ctx, clip->part_table, host, bytes); // the first table
    qlora__free(ctx, host, bytes);
    return r;
}

// Returns norm and scale of each group, in the backend's memory.
static QLORA__UNUSED const QLORA__REAL* qlora__clip_results(const qlora_clip* clip) {
    return clip->results;
}

#define QLORA__PI 3.14159265358979323846
