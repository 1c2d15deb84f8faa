// ---- loading ------------------------------------------------------------------------------------

#define QLORA__STAGE_BYTES ((size_t)16 << 20)

// Two buffers: one is filled from the file while the other is copied to the device.
typedef struct qlora__stager {
    qlora_model* m;
    qlora__keep* keep;
    qlora__ring ring;
    uint64_t done; // bytes, for the progress
    uint64_t total;
} qlora__stager;

static qlora_result qlora__stager_open(qlora_ctx* ctx, qlora__stager* s) {
    return qlora__on_cpu(ctx) ? QLORA_OK : qlora__ring_create(ctx, 2, QLORA__STAGE_BYTES, &s->ring);
}

static qlora_result qlora__stage_piece(qlora_ctx* ctx, qlora__stager* s, char* target,
                                       const uint8_t* source, size_t bytes) {
    qlora__slot* slot = NULL;
    QLORA__TRY(qlora__ring_take(ctx, &s->ring, &slot));
    memcpy(slot->memory, source, bytes);
    return qlora__slot_send(ctx, slot, target, slot->memory, bytes);
}

static qlora_result qlora__stage(qlora_ctx* ctx, qlora__stager* s, void* target,
                                 const uint8_t* source, uint64_t bytes) {
    const qlora_model_desc* desc = &s->m->desc;
    bool on_host = s->m->plan.offloaded_embedding && target == s->m->base.embed.data;
    for (uint64_t at = 0; at < bytes; at += QLORA__STAGE_BYTES) {
        size_t n = bytes - at < QLORA__STAGE_BYTES ? (size_t)(bytes - at) : QLORA__STAGE_BYTES;
        if (qlora__on_cpu(ctx) || on_host) {
            memcpy((char*)target + at, source + at, n);
        } else {
            QLORA__TRY(qlora__stage_piece(ctx, s, (char*)target + at, source + at, n));
        }
        s->done += n;
        if (desc->progress != NULL &&
            !desc->progress(desc->progress_user, "loading weights", s->done, s->total)) {
            return qlora__fail(ctx, QLORA_ERR_STOPPED, "desc.progress returned false");
        }
    }
    return QLORA_OK;
}

// Loads a matrix, in the type it has in the file, into the memory of the shared operand.
static qlora_result qlora__load_raw(qlora_ctx* ctx, qlora__stager* s, const qlora__st_tensor* t,
                                    int64_t rows, int64_t cols, qlora_tensor* out) {
    qlora_tensor area = s->m->work.operand;
    qlora_dtype dtype = qlora__st_dtype_of(t);
    QLORA_ASSERT((uint64_t)rows * (uint64_t)cols * qlora_dtype_bytes(dtype) <= area.bytes);
    memset(out, 0, sizeof *out);
    out->data = area.data;
    out->bytes = area.bytes;
    out->dtype = dtype;
    out->rows = rows;
    out->cols = cols;
    out->ld = cols;
    out->batch = 1;
    out->owner = ctx;
    if (sizeof(QLORA__REAL) != 4 && dtype == QLORA_F32) { // the CPU in double precision, for tests
        for (int64_t i = 0; i < rows * cols; i++) {
            float x = 0.0f;
            qlora__st_read_f32(t, (uint64_t)i, 1, &x);
            qlora__store(out->data, QLORA_F32, i, (QLORA__REAL)x);
        }
        return QLORA_OK;
    }
    return qlora__stage(ctx, s, out->data, t->data, t->bytes);
}

// Loads a matrix of any size, converted to the type of out. If it needs a conversion and is larger
// than the shared operand, it is loaded in slices.
static qlora_result qlora__load_dense(qlora_ctx* ctx, qlora__stager* s, const qlora__st_tensor* t,
                                      const qlora_tensor* out) {
    if (qlora__st_dtype_of(t) == out->dtype && sizeof(QLORA__REAL) == 4) {
        return qlora__stage(ctx, s, out->data, t->data, t->bytes);
    }
    size_t row_bytes = (size_t)out->cols * qlora_dtype_bytes(qlora__st_dtype_of(t));
    int64_t most = (int64_t)(s->m->work.operand.bytes / row_bytes);
    for (int64_t row = 0; row < out->rows; row += most) {
        int64_t rows = qlora__min(most, out->rows - row);
        qlora__st_tensor slice = *t;
        qlora_tensor raw;
        qlora_tensor to;
        uint64_t element = qlora__st_dtypes[t->dtype].bits / 8;
        slice.data = t->data + (uint64_t)row * (uint64_t)out->cols * element;
        slice.bytes = (uint64_t)rows * (uint64_t)out->cols * element;
        QLORA__TRY(qlora__load_raw(ctx, s, &slice, rows, out->cols, &raw));
        QLORA__TRY(qlora__tensor_view(ctx, out, row, rows, 0, out->cols, &to));
        QLORA__TRY(qlora__cast(ctx, &raw, &to));
    }
    return QLORA_OK;
}

static qlora_result qlora__load_named(qlora_ctx* ctx, qlora__stager* s, const qlora__folder* folder,
                                      const char* name, const qlora_tensor* out) {
    const qlora__st_tensor* t = NULL;
    QLORA__TRY(qlora__folder_need(&ctx->env, folder, name, out->rows == 1 ? out->cols : out->rows,
                                  out->rows == 1 ? -1 : out->cols, &t));
    QLORA__TRY(qlora__folder_make(&ctx->env, folder, &t));
    return qlora__load_dense(ctx, s, t, out);
}

// Norm weights are kept as factors: what a file stores minus 1 is raised by 1.
static qlora_result qlora__load_norm(qlora_ctx* ctx, qlora__stager* s, const qlora__folder* folder,
                                     const char* name, const qlora_tensor* out) {
    double offset = s->m->plan.config.norm_offset;
    if (offset == 0.0) {
        return qlora__load_named(ctx, s, folder, name, out);
    }
    const qlora__st_tensor* t = NULL;
    QLORA__TRY(qlora__folder_need(&ctx->env, folder, name, out->cols, -1, &t));
    size_t bytes = (size_t)out->cols * sizeof(QLORA__REAL);
    QLORA__REAL* values = (QLORA__REAL*)qlora__alloc(ctx, bytes);
    if (values == NULL) {
        return QLORA_ERR_MEMORY;
    }
    for (int64_t i = 0; i < out->cols; i++) {
        float x = 0.0f;
        qlora__st_read_f32(t, (uint64_t)i, 1, &x);
        values[i] = (QLORA__REAL)(x + (float)offset);
    }
    qlora_result r = qlora__copy_in(ctx, out->data, values, bytes);
    qlora__free(ctx, values, bytes);
    s->done += t->bytes;
    return r;
}

static qlora_result qlora__load_bnb(qlora_ctx* ctx, qlora__stager* s,
                                    const qlora__linear_source* source,
                                    const qlora__projection* p) {
    uint64_t blocks = source->absmax->bytes / (source->nested ? 1 : 4);
    float* plain = NULL;
    qlora_nf4_parts parts;
    memset(&parts, 0, sizeof parts);
    float offset = source->offset;
    parts.codes = (uint8_t*)(uintptr_t)source->weight->data; // only read
    parts.levels = (float*)(uintptr_t)source->map->data;
    if (source->nested) {
        parts.absmax_codes = (uint8_t*)(uintptr_t)source->absmax->data;
        parts.absmax_scales = (float*)(uintptr_t)source->absmax2->data;
        parts.map = (float*)(uintptr_t)source->map2->data;
        parts.offset = &offset;
    } else {
        blocks = qlora__st_elements(source->absmax);
        plain = (float*)qlora__alloc(ctx, (size_t)blocks * 4);
        if (plain == NULL) {
            return QLORA_ERR_MEMORY;
        }
        qlora__st_read_f32(source->absmax, 0, blocks, plain);
        parts.absmax = plain;
    }
    qlora_result r = qlora_nf4_write(ctx, &p->nf4, &parts);
    qlora__free(ctx, plain, (size_t)blocks * 4);
    s->done += source->weight->bytes;
    return r;
}

// FP8 codes and scales, as the file has them.
static qlora_result qlora__load_fp8(qlora_ctx* ctx, qlora__stager* s, const qlora__folder* folder,
                                    const qlora__linear_source* source,
                                    const qlora__projection* p) {
    uint64_t count = qlora__st_elements(source->scales);
    QLORA__TRY(qlora__fp8_values(&ctx->env, folder, source));
    float* scales = (float*)qlora__alloc(ctx, (size_t)count * sizeof *scales);
    if (scales == NULL) {
        return QLORA_ERR_MEMORY;
    }
    qlora__st_read_f32(source->scales, 0, count, scales);
    qlora_result r = qlora__copy_in(ctx, p->fp8.scales, scales, (size_t)count * sizeof *scales);
    qlora__free(ctx, scales, (size_t)count * sizeof *scales);
    s->done += source->scales->bytes;
    return r == QLORA_OK
               ? qlora__stage(ctx, s, p->fp8.codes, source->weight->data, source->weight->bytes)
               : r;
}

// Refuses a weight with values that are not finite: they have made a scale that is not.
static qlora_result qlora__load_fp8_check(qlora_ctx* ctx, const char* name,
                                          const qlora__fp8_weight* w) {
    int64_t across = qlora__fp8_blocks(w->cols);
    int64_t count = qlora__fp8_blocks(w->rows) * across;
    float* scales = (float*)qlora__alloc(ctx, (size_t)count * sizeof *scales);
    if (scales == NULL) {
        return QLORA_ERR_MEMORY;
    }
    qlora_result r = qlora__copy_out(ctx, scales, w->scales, (size_t)count * sizeof *scales);
    for (int64_t i = 0; i < count && r == QLORA_OK; i++) {
        int64_t row = i / across * QLORA__FP8_BLOCK;
        int64_t col = i % across * QLORA__FP8_BLOCK;
        if (!qlora__finite(scales[i])) {
            r = qlora__fail(ctx, QLORA_ERR_FORMAT,
                            "%s has a value that is not finite between [%lld,%lld] and "
                            "[%lld,%lld]; FP8 cannot represent it",
                            name, (long long)row, (long long)col,
                            (long long)(qlora__min(w->rows, row + QLORA__FP8_BLOCK) - 1),
                            (long long)(qlora__min(w->cols, col + QLORA__FP8_BLOCK) - 1));
        }
    }
    qlora__free(ctx, scales, (size_t)count * sizeof *scales);
    return r;
}

// Quantises a matrix.
static qlora_result qlora__load_codes(qlora_ctx* ctx, const char* name, const qlora_tensor* w,
                                      qlora__coded to) {
    if (to.nf4 != NULL) {
        return qlora_nf4_quantise(ctx, w, to.nf4);
    }
    QLORA__TRY(qlora__fp8_weight_quantise(ctx, w, to.fp8));
    return qlora__load_fp8_check(ctx, name, to.fp8);
}

// Weights in f32 are first rounded to bf16, as transformers does for bitsandbytes, so that the
// codes are the same.
static qlora_result qlora__load_quantised(qlora_ctx* ctx, qlora__stager* s,
                                          const qlora__st_tensor* t, qlora__coded to) {
    int64_t rows = to.nf4 != NULL ? to.nf4->rows : to.fp8->rows;
    int64_t cols = to.nf4 != NULL ? to.nf4->cols : to.fp8->cols;
    qlora__st_tensor rounded = *t;
    uint16_t* half = NULL;
    size_t n = (size_t)(rows * cols);
    if (t->dtype == QLORA__ST_F32) {
        half = (uint16_t*)qlora__alloc(ctx, n * 2);
        if (half == NULL) {
            return QLORA_ERR_MEMORY;
        }
        for (size_t i = 0; i < n; i++) {
            float x = 0.0f;
            memcpy(&x, t->data + 4 * i, sizeof x);
            half[i] = qlora__bf16_from(x);
        }
        rounded.dtype = QLORA__ST_BF16;
        rounded.data = (const uint8_t*)half;
        rounded.bytes = n * 2;
    }
    qlora_tensor raw;
    qlora_result r = qlora__load_raw(ctx, s, &rounded, rows, cols, &raw);
    if (r == QLORA_OK) {
        r = qlora__load_codes(ctx, t->name, &raw, to);
    }
    qlora__free(ctx, half, n * 2);
    return r;
}

static qlora_result qlora__load_projection(qlora_ctx* ctx, qlora__stager* s,
                                           const qlora__folder* folder, int64_t l, int i) {
    qlora__projection* p = &s->m->layers[l].projections[i];
    char name[200];
    qlora__weight_source found;
    QLORA__TRY(qlora__projection_source(ctx, folder, s->m, l, i, &found));
    qlora__linear_source source = found.linear;
    bool kept = s->keep->usable && qlora__keep_takes(p);
    if (p->mapped.data == NULL && !kept) {
        QLORA__TRY(qlora__folder_make(&ctx->env, folder, &source.weight));
    }
    if (kept) {
        const qlora_tensor* to = qlora__codes_memory(p);
        QLORA__TRY(qlora__stage(ctx, s, to->data, qlora__keep_next(s->keep, to->bytes), to->bytes));
    } else if (source.nf4) {
        QLORA__TRY(qlora__load_bnb(ctx, s, &source, p));
    } else if (source.fp8) {
        QLORA__TRY(qlora__load_fp8(ctx, s, folder, &source, p));
    } else if (qlora__is_coded(p)) {
        QLORA__TRY(qlora__load_quantised(ctx, s, source.weight, qlora__codes_of(p)));
    } else if (p->mapped.data == NULL) {
        QLORA__TRY(qlora__load_dense(ctx, s, source.weight, &p->dense));
    } else {
        s->done += source.weight->bytes;
    }
    if (p->has_bias) {
        qlora__base_weight(s->m, l, i, ".bias", name, sizeof name);
        QLORA__TRY(qlora__load_named(ctx, s, folder, name, &p->bias));
    }
    return QLORA_OK;
}

// Refuses a vector with values that are not finite, of at most QLORA__MAX_EXPERTS.
static qlora_result qlora__load_finite(qlora_ctx* ctx, const qlora__folder* folder,
                                       const char* name, const qlora_tensor* t) {
    QLORA__REAL values[QLORA__MAX_EXPERTS];
    QLORA_ASSERT(t->cols <= QLORA__MAX_EXPERTS);
    QLORA__TRY(qlora__copy_out(ctx, values, t->data, (size_t)t->cols * sizeof values[0]));
    for (int64_t i = 0; i < t->cols; i++) {
        if (!qlora__finite((float)values[i])) {
            return qlora__fail(ctx, QLORA_ERR_FORMAT, "%s: %s[%lld] is not finite", folder->dir,
                               name, (long long)i);
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__load_layer(qlora_ctx* ctx, qlora__stager* s, const qlora__folder* folder,
                                      int64_t index) {
    const qlora_model_config* c = &s->m->plan.config;
    qlora__layer* layer = &s->m->layers[index];
    char name[200];
    int64_t bias_at = 0;
    const qlora__arch* arch = s->m->arch;
    for (int i = 0; i < layer->count; i++) {
        qlora__projection* p = &layer->projections[i];
        const qlora__projection_row* row = qlora__row_of(layer, i);
        QLORA__TRY(qlora__load_projection(ctx, s, folder, index, i));
        if (row->bias == QLORA__BIAS_QKV && c->qkv_bias && !c->qk_norm) {
            qlora_tensor part;
            QLORA__TRY(qlora__tensor_view(ctx, &layer->qkv_bias, 0, 1, bias_at, p->out, &part));
            snprintf(name, sizeof name, "model.layers.%lld.%s.bias", (long long)index, row->module);
            QLORA__TRY(qlora__load_named(ctx, s, folder, name, &part));
            bias_at += p->out;
        }
    }
    if (layer->experts != NULL && layer->layout->experts->correction != NULL) {
        snprintf(name, sizeof name, "model.layers.%lld.%s", (long long)index,
                 layer->layout->experts->correction);
        QLORA__TRY(qlora__load_named(ctx, s, folder, name, &layer->experts->correction));
        QLORA__TRY(qlora__load_finite(ctx, folder, name, &layer->experts->correction));
    }
    for (int i = 0; i < QLORA__NORMS; i++) {
        const char* module = qlora__arch_norm(arch, c, i);
        if (module != NULL) {
            snprintf(name, sizeof name, "model.layers.%lld.%s.weight", (long long)index, module);
            QLORA__TRY(qlora__load_norm(ctx, s, folder, name, &layer->norms[i]));
        }
    }
    return QLORA_OK;
}

// The rows of the embedding or the head that the files have; those of new tokens follow.
static qlora_result qlora__load_table(qlora_ctx* ctx, const qlora_model* m,
                                      const qlora_tensor* table, qlora_tensor* rows) {
    return qlora__tensor_view(ctx, table, 0, m->plan.base_vocab, 0, m->plan.config.hidden, rows);
}

// Rows of a 4-bit head; they start with a block, and their scales are their own.
static qlora_nf4 qlora__head_slice(const qlora_model* m, int64_t first, int64_t rows) {
    qlora_nf4 w = m->base.head_nf4;
    int64_t at = first * w.cols;
    w.codes += at / 2;
    w.absmax += at / w.block;
    w.rows = rows;
    return w;
}

static qlora_result qlora__load_head(qlora_ctx* ctx, qlora__stager* s,
                                     const qlora__folder* folder) {
    const qlora_nf4* head = &s->m->base.head_nf4;
    const qlora__st_tensor* t = NULL;
    QLORA__TRY(qlora__folder_need(&ctx->env, folder, "lm_head.weight", head->rows, head->cols, &t));
    QLORA__TRY(qlora__folder_make(&ctx->env, folder, &t));
    uint64_t row_bytes = (uint64_t)head->cols * (qlora__st_dtypes[t->dtype].bits / 8);
    int64_t most =
        (int64_t)(s->m->work.operand.bytes / row_bytes) / QLORA__HEAD_ROWS * QLORA__HEAD_ROWS;
    for (int64_t row = 0; row < head->rows; row += most) {
        qlora_nf4 to = qlora__head_slice(s->m, row, qlora__min(most, head->rows - row));
        qlora__st_tensor slice = *t;
        slice.data = t->data + (uint64_t)row * row_bytes;
        slice.bytes = (uint64_t)to.rows * row_bytes;
        QLORA__TRY(qlora__load_quantised(ctx, s, &slice, qlora__coded_of(&to, NULL)));
    }
    return QLORA_OK;
}

static qlora_result qlora__load_folder(qlora_ctx* ctx, qlora__stager* s,
                                       const qlora__folder* folder) {
    qlora_model* m = s->m;
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        QLORA__TRY(qlora__load_layer(ctx, s, folder, l));
    }
    QLORA__TRY(qlora__load_norm(ctx, s, folder, "model.norm.weight", &m->base.final_norm));
    qlora_tensor rows;
    if (m->base.embed_mapped.data == NULL) {
        QLORA__TRY(qlora__load_table(ctx, m, &m->base.embed, &rows));
        QLORA__TRY(qlora__load_named(ctx, s, folder, "model.embed_tokens.weight", &rows));
    }
    if (m->base.head_is_nf4) {
        QLORA__TRY(qlora__load_head(ctx, s, folder));
    } else if (!m->plan.config.tied && m->base.head_mapped.data == NULL) {
        QLORA__TRY(qlora__load_table(ctx, m, &m->base.head, &rows));
        QLORA__TRY(qlora__load_named(ctx, s, folder, "lm_head.weight", &rows));
    }
    return qlora__sync(ctx);
}

// Checks the large tensors before memory for them is allocated: a config that promises more than
// its files contain must not cost anything.
static qlora_result qlora__load_check(qlora_ctx* ctx, qlora_model* m) {
    const qlora__folder* folder = NULL;
    const qlora__st_tensor* t = NULL;
    const qlora_model_config* c = &m->plan.config;
    QLORA__TRY(qlora__source_folder(ctx, m, m->dir, &folder));
    QLORA__TRY(qlora__folder_need(&ctx->env, folder, "model.embed_tokens.weight",
                                  m->plan.base_vocab, c->hidden, &t));
    for (int64_t l = 0; l < c->layers; l++) {
        for (int i = 0; i < m->layers[l].count; i++) {
            const qlora__projection* p = &m->layers[l].projections[i];
            qlora__weight_source found;
            QLORA__TRY(qlora__projection_source(ctx, folder, m, l, i, &found));
            if (found.linear.fp8 && !(p->stored && p->is_fp8)) {
                char name[200];
                qlora__base_module(m, l, i, name, sizeof name);
                return qlora__fail(ctx, QLORA_ERR_FORMAT,
                                   "%s: %s is in FP8, but config.json has no quantization_config",
                                   m->dir, name);
            }
        }
    }
    return QLORA_OK;
}

static uint64_t qlora__folder_bytes(const qlora__folder* folder) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < folder->count; i++) {
        bytes += folder->entries[i].tensor->bytes;
    }
    return bytes;
}

// New tokens do not make another base.
static uint64_t qlora__load_identity(const qlora_model* m) {
    qlora_model_config base = m->plan.config;
    base.vocab = m->plan.base_vocab;
    return qlora__identity_config(&base);
}

static qlora_result qlora__load_files(qlora_ctx* ctx, qlora_model* m) {
    const qlora__folder* folder = NULL;
    QLORA__TRY(qlora__source_folder(ctx, m, m->dir, &folder));
    qlora__keep keep;
    qlora__stager stager;
    memset(&stager, 0, sizeof stager);
    stager.m = m;
    stager.keep = &keep;
    stager.total = qlora__folder_bytes(folder);
    m->base.base_config = qlora__load_identity(m);
    m->base.base_weights = qlora__identity_folder(folder);
    qlora_result r = qlora__keep_open(ctx, m, &keep);
    r = r == QLORA_OK ? qlora__stager_open(ctx, &stager) : r;
    r = r == QLORA_OK ? qlora__load_folder(ctx, &stager, folder) : r;
    r = r == QLORA_OK ? qlora__keep_write(ctx, m, &keep) : r;
    qlora__keep_close(ctx, &keep);
    qlora__ring_destroy(ctx, &stager.ring);
    return r;
}

// A random 4-bit head, in slices of one size, each with its own stream of random numbers.
static qlora_result qlora__load_random_head(qlora_ctx* ctx, qlora_model* m, uint64_t seed,
                                            float deviation) {
    for (int64_t row = 0; row < m->base.head_nf4.rows; row += QLORA__HEAD_ROWS) {
        qlora_nf4 to =
            qlora__head_slice(m, row, qlora__min(QLORA__HEAD_ROWS, m->base.head_nf4.rows - row));
        uint32_t stream = 0x80000000u + (uint32_t)(row / QLORA__HEAD_ROWS);
        qlora_tensor w;
        qlora__arena_window(&m->work.operand, 0, to.rows, to.cols, &w);
        QLORA__TRY(qlora__random_normal(ctx, seed, stream, deviation, &w));
        QLORA__TRY(qlora_nf4_quantise(ctx, &w, &to));
    }
    return QLORA_OK;
}

// Random weights: each matrix has its own stream of random numbers; norms are 1 and biases 0.
static qlora_result qlora__load_random(qlora_ctx* ctx, qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    float deviation = m->desc.weight_std > 0.0f ? m->desc.weight_std : 0.02f;
    uint64_t seed = m->desc.seed;
    qlora_tensor rows;
    m->base.base_config = qlora__load_identity(m);
    m->base.base_weights = qlora__identity_random(seed, deviation);
    QLORA__TRY(qlora__load_table(ctx, m, &m->base.embed, &rows));
    QLORA__TRY(qlora__random_normal(ctx, seed, 0, deviation, &rows));
    if (m->base.head_is_nf4) {
        QLORA__TRY(qlora__load_random_head(ctx, m, seed, deviation));
    } else if (!c->tied) {
        QLORA__TRY(qlora__load_table(ctx, m, &m->base.head, &rows));
        QLORA__TRY(qlora__random_normal(ctx, seed, 1, deviation, &rows));
    }
    QLORA__TRY(qlora_fill(ctx, 1.0f, &m->base.final_norm));
    for (int64_t l = 0; l < c->layers; l++) {
        qlora__layer* layer = &m->layers[l];
        for (int i = 0; i < layer->count; i++) {
            qlora__projection* p = &layer->projections[i];
            qlora_tensor w;
            qlora__arena_window(&m->work.operand, 0, p->out, p->in, &w);
            const qlora_tensor* to = qlora__is_coded(p) ? &w : &p->dense;
            uint32_t stream = (uint32_t)(2 + l * QLORA__PROJECTIONS + i);
            if (i >= layer->layout->count) { // those of experts are numbered apart
                stream = 0x40000000u + (uint32_t)((int64_t)l * layer->count + i);
            }
            QLORA__TRY(qlora__random_normal(ctx, seed, stream, deviation, to));
            if (qlora__is_coded(p)) {
                QLORA__TRY(qlora__load_codes(ctx, "a random weight", &w, qlora__codes_of(p)));
            }
            if (p->has_bias) {
                QLORA__TRY(qlora__tensor_zero(ctx, &p->bias));
            }
        }
        for (int i = 0; i < QLORA__NORMS; i++) {
            if (qlora__has_norm(m, i)) {
                QLORA__TRY(qlora_fill(ctx, 1.0f, &layer->norms[i]));
            }
        }
        if (c->qkv_bias && !c->qk_norm) {
            QLORA__TRY(qlora__tensor_zero(ctx, &layer->qkv_bias));
        }
        if (m->desc.progress != NULL &&
            !m->desc.progress(m->desc.progress_user, "generating weights", (uint64_t)l + 1,
                              (uint64_t)c->layers)) {
            return qlora__fail(ctx, QLORA_ERR_STOPPED, "desc.progress returned false");
        }
    }
    return qlora__sync(ctx);
}
