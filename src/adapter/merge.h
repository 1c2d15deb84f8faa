// ---- export of merged models --------------------------------------------------------------------

// One tensor of the merged model.
typedef struct qlora__merge_item {
    const qlora__st_tensor* tensor;      // of the folder; the codes if the weight is 4-bit or FP8
    const qlora__projection* projection; // NULL if it is not a projection
    int64_t layer;                       // of a tensor of all experts, -1 = it is none
    int stack; // the projection that its first rows are, of the first expert
    int parts; // projections of an expert that follow each other in it
    int64_t norm_at;                     // offset in the parameter arena; -1 if not a trained norm
    int64_t saved_at;                    // the same for a whole trained matrix
    int64_t rows_at;                     // the same for trained rows; -1 if it has none
    int64_t grown;                       // its rows with those of new tokens; 0 = no new ones
    int64_t norm_width;
    bool coded;                  // the weight of the model, which is 4-bit or FP8
    bool foreign;                // a 4-bit or FP8 weight that the model has not loaded
    qlora__linear_source source; // of a foreign weight
    bool raw;                    // not floats: the bytes are copied
    int64_t shape[2];
    int64_t rows; // the tensor as a matrix
    int64_t cols;
    uint64_t bytes; // in the output file
    uint32_t shard;
} qlora__merge_item;

typedef struct qlora__merge {
    qlora_ctx* ctx;
    const qlora_model* m;
    const char* dir;
    const char* tokenizer; // folder of the tokenizer's files; NULL = that of the model
    qlora_dtype dtype;
    bool trained; // merge into the dequantised 4-bit or FP8 weights
    qlora__folder folder;
    qlora__merge_item* items;
    qlora__st_entry* entries; // of the current shard
    uint32_t* members;        // their items
    const char** names;       // for the index
    uint32_t* shard_of;
    uint32_t room;
    uint32_t count;
    uint32_t shards;
    uint64_t done;
    uint64_t total;
    int64_t most_cols;
    qlora_progress_fn progress;
    void* user;
    // buffers for one block of rows
    size_t elements;
    float* values;
    uint8_t* packed;
} qlora__merge;

// The adapter of one module and, if it is 4-bit or FP8, its weight, in host memory.
typedef struct qlora__merge_module {
    float* a;
    float* b;
    float* magnitude; // DoRA, otherwise NULL
    size_t ab_bytes;
    uint8_t* memory;
    size_t memory_bytes;
    qlora_nf4 nf4; // addresses in memory
    qlora__fp8_weight fp8;
} qlora__merge_module;

typedef struct qlora__merge_rows {
    const qlora__merge_item* item;
    const qlora__merge_module* module;
    bool via_bf16;
    int64_t first;
    float* values;
} qlora__merge_rows;

// Computes W + s B A in f32, row by row.
static void qlora__merge_range(void* user, int64_t begin, int64_t end) {
    const qlora__merge_rows* job = (const qlora__merge_rows*)user;
    const qlora__projection* p = job->item->projection;
    const qlora_nf4* w = &job->module->nf4;
    int64_t cols = job->item->cols;
    for (int64_t row = begin; row < end; row++) {
        float* values = job->values + row * cols;
        if (job->item->coded && p->is_fp8) {
            qlora__fp8_widen(&job->module->fp8, job->first + row, 0, cols, values);
        }
        for (int64_t i = 0; i < cols && job->item->coded && p->is_nf4; i++) {
            int64_t e = (job->first + row) * cols + i;
            values[i] =
                w->maps[qlora__nf4_code_at(w->codes, e)] * qlora__nf4_absmax(w, e / w->block);
        }
        for (int64_t i = 0; i < cols && job->via_bf16; i++) {
            values[i] = qlora__bf16_to(qlora__bf16_from(values[i]));
        }
        for (int64_t i = 0; i < cols && p->rank > 0; i++) {
            const float* b = job->module->b + (job->first + row) * p->rank;
            float sum = 0.0f;
            for (int64_t k = 0; k < p->rank; k++) {
                sum += b[k] * job->module->a[k * cols + i];
            }
            values[i] += p->scale * sum;
        }
        if (job->module->magnitude != NULL) {
            double sum = 0.0;
            for (int64_t i = 0; i < cols; i++) {
                sum += (double)values[i] * (double)values[i];
            }
            float gain = (float)((double)job->module->magnitude[job->first + row] / sqrt(sum));
            for (int64_t i = 0; i < cols; i++) {
                values[i] *= gain;
            }
        }
    }
}

static void qlora__merge_module_close(qlora_ctx* ctx, qlora__merge_module* module) {
    qlora__free(ctx, module->a, module->ab_bytes);
    qlora__free(ctx, module->memory, module->memory_bytes);
}

static qlora_result qlora__merge_module_open(qlora_ctx* ctx, const qlora_model* m,
                                             const qlora__merge_item* item,
                                             qlora__merge_module* out) {
    const qlora__projection* p = item->projection;
    memset(out, 0, sizeof *out);
    bool dora = m->dora && p->rank > 0;
    out->ab_bytes = (size_t)(p->rank * (p->in + p->out) + (dora ? p->out : 0)) * 4;
    if (p->rank > 0) {
        qlora_tensor a;
        qlora_tensor b;
        out->a = (float*)qlora__alloc(ctx, out->ab_bytes);
        if (out->a == NULL) {
            return QLORA_ERR_MEMORY;
        }
        out->b = out->a + p->rank * p->in;
        qlora__arena_window(&m->parameters, p->a_at, p->rank, p->in, &a);
        qlora__arena_window(&m->parameters, p->b_at, p->out, p->rank, &b);
        QLORA__TRY(qlora__floats_out(ctx, a.data, p->rank * p->in, out->a));
        QLORA__TRY(qlora__floats_out(ctx, b.data, p->out * p->rank, out->b));
        if (dora) {
            out->magnitude = out->b + p->out * p->rank;
            QLORA__TRY(qlora__floats_out(ctx, p->magnitude.data, p->out, out->magnitude));
        }
    }
    if (item->coded) {
        const char* from = (const char*)qlora__codes_memory(p)->data;
        out->memory_bytes = qlora__codes_memory(p)->bytes;
        out->memory = (uint8_t*)qlora__alloc(ctx, out->memory_bytes);
        if (out->memory == NULL) {
            return QLORA_ERR_MEMORY;
        }
        QLORA__TRY(qlora__copy_out(ctx, out->memory, from, out->memory_bytes));
        if (p->is_fp8) {
            qlora_tensor memory = p->fp8.memory;
            memory.data = out->memory;
            qlora__fp8_weight_wrap(ctx, p->out, p->in, &memory, &out->fp8);
            return QLORA_OK;
        }
        out->nf4 = p->nf4;
        struct {
            const void* device;
            void* host;
        } parts[] = {{p->nf4.codes, NULL},        {p->nf4.absmax, NULL},
                     {p->nf4.absmax_codes, NULL}, {p->nf4.absmax_scales, NULL},
                     {p->nf4.offset, NULL},       {p->nf4.maps, NULL}};
        for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
            if (parts[i].device != NULL) {
                parts[i].host = out->memory + ((const char*)parts[i].device - from);
            }
        }
        out->nf4.codes = (uint8_t*)parts[0].host;
        out->nf4.absmax = (float*)parts[1].host;
        out->nf4.absmax_codes = (uint8_t*)parts[2].host;
        out->nf4.absmax_scales = (float*)parts[3].host;
        out->nf4.offset = (float*)parts[4].host;
        out->nf4.maps = (float*)parts[5].host;
    }
    return QLORA_OK;
}

// Converts floats to the type of the file; a finite value that F16 cannot represent is an error.
static qlora_result qlora__merge_pack(const qlora__merge* g, const qlora__merge_item* item,
                                      int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint16_t half =
            g->dtype == QLORA_F16 ? qlora__f16_from(g->values[i]) : qlora__bf16_from(g->values[i]);
        if (g->dtype == QLORA_F16 && qlora__finite(g->values[i]) && (half & 0x7c00u) == 0x7c00u) {
            return qlora__fail(g->ctx, QLORA_ERR_LIMIT,
                               "%s contains %g, which F16 cannot represent; "
                               "export as BF16 or F32",
                               item->tensor->name, (double)g->values[i]);
        }
        memcpy(g->packed + (size_t)i * 2, &half, 2);
    }
    return QLORA_OK;
}

// The same of an FP8 weight.
static void qlora__merge_foreign_fp8(const qlora__merge_item* item, int64_t first, int64_t rows,
                                     float* values) {
    const qlora__linear_source* s = &item->source;
    float scale = 0.0f;
    for (int64_t i = 0; i < rows * item->cols; i++) {
        int64_t row = first + i / item->cols;
        int64_t col = i % item->cols;
        if (col % QLORA__FP8_BLOCK == 0) {
            qlora__st_read_f32(
                s->scales,
                (uint64_t)(row / QLORA__FP8_BLOCK * s->scales->shape[1] + col / QLORA__FP8_BLOCK),
                1, &scale);
        }
        float value = qlora__e4m3_to(s->weight->data[row * item->cols + col]) * scale;
        values[i] = qlora__bf16_to(qlora__bf16_from(value));
    }
}

// Dequantises rows [first, first + rows) of a 4-bit weight that is only in the folder.
static void qlora__merge_foreign(const qlora__merge_item* item, int64_t first, int64_t rows,
                                 float* values) {
    const qlora__linear_source* s = &item->source;
    float scale = 0.0f;
    int64_t last = -1;
    for (int64_t i = 0; i < rows * item->cols; i++) {
        int64_t e = first * item->cols + i;
        int64_t block = e / s->block;
        if (block != last && s->nested) {
            float outer = 0.0f;
            qlora__st_read_f32(s->map2, s->absmax->data[block], 1, &scale);
            qlora__st_read_f32(s->absmax2, (uint64_t)(block / s->block2), 1, &outer);
            volatile float product = scale * outer; // rounded before the sum, as in training
            scale = product + s->offset;
        } else if (block != last) {
            qlora__st_read_f32(s->absmax, (uint64_t)block, 1, &scale);
        }
        last = block;
        float level = 0.0f;
        qlora__st_read_f32(s->map, qlora__nf4_code_at(s->weight->data, e), 1, &level);
        values[i] = level * scale;
        if (item->projection == NULL && s->dtype == QLORA_BF16) { // as bitsandbytes does
            values[i] = qlora__bf16_to(qlora__bf16_from(values[i]));
        } else if (item->projection == NULL && s->dtype == QLORA_F16) {
            values[i] = qlora__f16_to(qlora__f16_from(values[i]));
        }
    }
}

// Computes rows [first, first + rows) of an item in f32.
static qlora_result qlora__merge_rows_make(const qlora__merge* g, const qlora__merge_item* item,
                                           const qlora__merge_module* module, int64_t first,
                                           int64_t rows) {
    if (item->norm_at >= 0) {
        qlora_tensor norm;
        qlora__arena_window(&g->m->parameters, item->norm_at, 1, item->cols, &norm);
        QLORA__TRY(qlora__floats_out(g->ctx, norm.data, item->cols, g->values));
        for (int64_t i = 0; i < item->cols; i++) {
            g->values[i] -= (float)g->m->plan.config.norm_offset;
        }
        return QLORA_OK;
    }
    if (item->saved_at >= 0) {
        qlora_tensor own;
        qlora__arena_window(&g->m->parameters, item->saved_at + first * item->cols, 1,
                            rows * item->cols, &own);
        return qlora__floats_out(g->ctx, own.data, rows * item->cols, g->values);
    }
    if (item->foreign && item->source.fp8) {
        qlora__merge_foreign_fp8(item, first, rows, g->values);
    } else if (item->foreign) {
        qlora__merge_foreign(item, first, rows, g->values);
    } else if (!item->coded) {
        // Rows of new tokens are not in the file; all of them are trained.
        int64_t has = item->grown > 0 ? g->m->plan.base_vocab : item->rows;
        int64_t here = qlora__max(0, qlora__min(rows, has - first));
        qlora__st_read_f32(item->tensor, (uint64_t)(first * item->cols),
                           (uint64_t)(here * item->cols), g->values);
    }
    if (item->projection != NULL) {
        qlora__merge_rows job;
        job.item = item;
        job.module = module;
        // As in a training step, values of codes are rounded to bf16 in every mode.
        job.via_bf16 = item->coded || item->foreign || (g->trained && g->m->compute == QLORA_BF16);
        job.first = first;
        job.values = g->values;
        qlora__parallel(g->ctx, rows, 1 + 4096 / item->cols, qlora__merge_range, &job);
    }
    for (int64_t i = 0; i < g->m->tables.token_count && item->rows_at >= 0; i++) {
        int64_t row = g->m->tables.token_ids[i] - first;
        qlora_tensor own;
        if (row >= 0 && row < rows) {
            qlora__arena_window(&g->m->parameters, item->rows_at + i * item->cols, 1, item->cols,
                                &own);
            QLORA__TRY(
                qlora__floats_out(g->ctx, own.data, item->cols, g->values + row * item->cols));
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__merge_matrix_write(qlora__merge* g, const qlora__merge_item* item,
                                              qlora__st_writer* w) {
    qlora_ctx* ctx = g->ctx;
    qlora__merge_module module;
    memset(&module, 0, sizeof module);
    if (item->raw) {
        return qlora__st_write(&ctx->env, w, item->tensor->data, (size_t)item->tensor->bytes);
    }
    qlora_result r =
        item->projection != NULL ? qlora__merge_module_open(ctx, g->m, item, &module) : QLORA_OK;
    int64_t most = item->cols > 0 ? (int64_t)g->elements / item->cols : 1;
    for (int64_t row = 0; row < item->rows && item->cols > 0 && r == QLORA_OK; row += most) {
        int64_t rows = qlora__min(most, item->rows - row);
        int64_t n = rows * item->cols;
        r = qlora__merge_rows_make(g, item, &module, row, rows);
        if (r == QLORA_OK && g->dtype != QLORA_F32) {
            r = qlora__merge_pack(g, item, n);
        }
        if (r == QLORA_OK) {
            r = g->dtype == QLORA_F32 ? qlora__st_write(&ctx->env, w, g->values, (size_t)n * 4)
                                      : qlora__st_write(&ctx->env, w, g->packed, (size_t)n * 2);
        }
    }
    qlora__merge_module_close(ctx, &module);
    return r;
}

// One matrix of a tensor of all experts.
typedef struct qlora__merge_slice {
    qlora__st_tensor tensor;
    qlora__gguf_view view; // if it is made from others
} qlora__merge_slice;

// Matrix number `i` of a tensor of all experts, as an item of its own; `slice` becomes its tensor.
static void qlora__merge_stack_one(const qlora__merge* g, const qlora__merge_item* item, int64_t i,
                                   qlora__merge_slice* slice, qlora__merge_item* one) {
    const qlora__layer* layer = &g->m->layers[item->layer];
    int count = layer->layout->experts->count;
    int number = item->stack + (int)(i / item->parts) * count + (int)(i % item->parts);
    const qlora__projection* p = &layer->projections[number];
    slice->tensor = *item->tensor;
    *one = *item;
    one->layer = -1;
    one->projection = p;
    one->coded = qlora__computes(g->m) && qlora__is_coded(p) && g->trained;
    one->rows = p->out;
    one->cols = p->in;
    one->tensor = &slice->tensor;
    slice->tensor.bytes =
        (uint64_t)(p->out * p->in) * (qlora__st_dtypes[slice->tensor.dtype].bits / 8);
    if (item->tensor->view != NULL) {
        slice->view = *item->tensor->view;
        slice->view.first = i * (p->out / slice->view.count);
        slice->view.rows = p->out;
        slice->tensor.view = &slice->view;
    } else {
        slice->tensor.data = item->tensor->data + (uint64_t)i * slice->tensor.bytes;
    }
}

// A tensor of all experts, matrix after matrix.
static qlora_result qlora__merge_stack_write(qlora__merge* g, const qlora__merge_item* item,
                                             qlora__st_writer* w) {
    for (int64_t i = 0; i < g->m->plan.config.experts * item->parts; i++) {
        qlora__merge_slice slice;
        qlora__merge_item one;
        qlora__merge_stack_one(g, item, i, &slice, &one);
        QLORA__TRY(qlora__merge_matrix_write(g, &one, w));
    }
    return QLORA_OK;
}

static qlora_result qlora__merge_item_write(qlora__merge* g, const qlora__merge_item* item,
                                            qlora__st_writer* w) {
    return item->layer >= 0 ? qlora__merge_stack_write(g, item, w)
                            : qlora__merge_matrix_write(g, item, w);
}

// Whether a tensor is an auxiliary part of a bitsandbytes or FP8 weight, which the merged weight
// does not need.
static bool qlora__is_code_part(const char* name) {
    static const char* const ends[] = {".absmax",           ".quant_map",      ".nested_absmax",
                                       ".nested_quant_map", qlora__bnb_suffix, QLORA__FP8_SUFFIX};
    size_t length = strlen(name);
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++) {
        size_t n = strlen(ends[i]);
        if (length > n + 7 && strcmp(name + length - n, ends[i]) == 0 &&
            strncmp(name + length - n - 7, ".weight", 7) == 0) {
            return true;
        }
    }
    return false;
}

// Finds the projection of a layer that a tensor is, or those of all experts. Of the experts, only
// the one that the name has can be it.
static void qlora__merge_find_projection(const qlora_model* m, int64_t l, const char* plain,
                                         qlora__merge_item* item) {
    const qlora__layer* layer = &m->layers[l];
    const qlora__expert_rows* experts = layer->layout->experts;
    int few = experts != NULL ? qlora__first_expert(layer->layout) : layer->count;
    const char* at = strstr(plain, ".experts.");
    long named = at != NULL && experts != NULL ? strtol(at + 9, NULL, 10) : 0;
    int expert = named >= 0 && named < (long)m->plan.config.experts ? (int)named : 0;
    int first = few + (experts != NULL ? expert * experts->count : 0);
    char name[224];
    for (int k = 0; k < few + (experts != NULL ? experts->count : 0); k++) {
        int i = k < few ? k : first + k - few;
        if (i < 0 || i >= layer->count) {
            continue;
        }
        qlora__base_weight(m, l, i, ".weight", name, sizeof name);
        if (strcmp(qlora__plain_name(name), plain) == 0) {
            item->projection = &layer->projections[i];
        }
    }
    for (int k = 0; experts != NULL && k < experts->count; k++) {
        for (int n = 0; n < 2 && experts->stacked[k].names[n] != NULL; n++) {
            snprintf(name, sizeof name, "layers.%lld.%s", (long long)l,
                     experts->stacked[k].names[n]);
            if (strcmp(name, plain) == 0) {
                item->stack = item->layer < 0 ? few + k : item->stack;
                item->layer = l;
                item->parts++;
            }
        }
    }
}

// Finds the role of a tensor of the folder: a projection, a trained norm, or neither.
static void qlora__merge_recognise(const qlora_model* m, const char* plain,
                                   qlora__merge_item* item) {
    qlora__trained norm;
    item->layer = -1;
    item->norm_at = -1;
    item->saved_at = -1;
    item->rows_at = -1;
    bool embed = strcmp(plain, "embed_tokens.weight") == 0;
    bool head = strcmp(plain, "lm_head.weight") == 0;
    if (embed && m->tables.saved_embed) {
        item->saved_at = m->tables.embed_at;
    } else if (head && m->tables.saved_head) {
        item->saved_at = m->tables.head_at;
    }
    if ((embed || (head && m->tables.tokens_twice)) && m->tables.token_count > 0) {
        item->rows_at = m->tables.tokens_at;
    } else if (head && m->tables.head_rows) {
        item->rows_at = m->tables.head_tokens_at;
    }
    if ((embed || head) && m->plan.config.vocab > m->plan.base_vocab) {
        item->grown = m->plan.config.vocab;
        item->shape[0] = m->plan.config.vocab;
        item->shape[1] = m->plan.config.hidden;
    }
    if (m->desc.train_norms && strcmp(plain, "norm.weight") == 0) {
        item->norm_at = m->tables.final_norm_at;
        item->norm_width = m->plan.config.hidden;
    }
    if (strncmp(plain, "layers.", 7) != 0) {
        return;
    }
    int64_t layer = 0;
    for (const char* at = plain + 7; *at >= '0' && *at <= '9' && layer < QLORA_MAX_LAYERS; at++) {
        layer = layer * 10 + (*at - '0');
    }
    if (layer < m->plan.config.layers) {
        qlora__merge_find_projection(m, layer, plain, item);
    }
    memset(&norm, 0, sizeof norm);
    for (int i = 0; layer < m->plan.config.layers && i < QLORA__NORMS; i++) {
        if (qlora__trained_norm(m, layer, i, &norm) &&
            strcmp(qlora__plain_name(norm.name), plain) == 0) {
            item->norm_at = norm.at;
            item->norm_width = norm.cols;
        }
    }
}

// Whether a tensor that the model has not loaded is the codes of a 4-bit or FP8 weight.
static qlora_result qlora__merge_find_foreign(const qlora__merge* g,
                                              const qlora__folder_entry* entry,
                                              qlora__merge_item* item) {
    char state[320];
    snprintf(state, sizeof state, "%.280s%s", entry->name, qlora__bnb_suffix);
    bool fp8 = entry->tensor->dtype == QLORA__ST_F8_E4M3;
    if (!fp8 && qlora__folder_find(&g->folder, state) == NULL) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__folder_linear(&g->ctx->env, &g->folder, entry->name, -1, -1, &item->source));
    if (fp8) {
        QLORA__TRY(qlora__fp8_values(&g->ctx->env, &g->folder, &item->source));
    }
    item->foreign = true;
    item->shape[0] = item->source.rows;
    item->shape[1] = item->source.cols;
    return QLORA_OK;
}

// Describes one tensor. The folder may have changed since the model was opened, so shapes are
// checked.
static qlora_result qlora__merge_describe(const qlora__merge* g, const qlora__folder_entry* entry,
                                          qlora__merge_item* item) {
    const qlora__st_tensor* t = entry->tensor;
    memset(item, 0, sizeof *item);
    item->tensor = t;
    qlora__merge_recognise(g->m, entry->name, item);
    const qlora__projection* p = item->projection;
    bool is_float = qlora__st_is_float(t);
    bool loaded = p != NULL && qlora__computes(g->m);
    item->coded = loaded && qlora__is_coded(p) && (g->trained || !is_float);
    if (!loaded && !is_float) {
        QLORA__TRY(qlora__merge_find_foreign(g, entry, item));
    }
    item->raw = !item->coded && !item->foreign && !is_float;
    bool moved =
        item->foreign && p != NULL && (item->shape[0] != p->out || item->shape[1] != p->in);
    if (p != NULL) {
        item->shape[0] = p->out;
        item->shape[1] = p->in;
    }
    bool changed =
        moved ||
        (p != NULL && !item->coded && !item->foreign &&
         (item->raw || t->rank != 2 || t->shape[0] != p->out || t->shape[1] != p->in)) ||
        ((item->saved_at >= 0 || item->rows_at >= 0) &&
         (item->raw || t->rank != 2 || t->shape[0] != g->m->plan.base_vocab ||
          t->shape[1] != g->m->plan.config.hidden)) ||
        (item->norm_at >= 0 && (item->raw || t->rank != 1 || t->shape[0] != item->norm_width));
    if (item->layer >= 0) {
        p = &g->m->layers[item->layer].projections[item->stack];
        changed = !is_float || t->rank != 3 || t->shape[0] != g->m->plan.config.experts ||
                  t->shape[1] != item->parts * p->out || t->shape[2] != p->in;
        p = NULL;
    }
    if (changed) {
        return qlora__fail(g->ctx, QLORA_ERR_FORMAT,
                           "%s: tensor %s has changed since the model was opened", g->m->dir,
                           t->name);
    }
    bool reshaped = p != NULL || item->foreign || item->grown > 0;
    item->cols = reshaped ? item->shape[1] : t->rank > 0 ? t->shape[t->rank - 1] : 1;
    int64_t n = reshaped ? item->shape[0] * item->shape[1] : (int64_t)qlora__st_elements(t);
    item->rows = item->cols > 0 ? n / item->cols : 0;
    item->bytes = item->raw ? t->bytes : (uint64_t)n * qlora_dtype_bytes(g->dtype);
    return QLORA_OK;
}

// Lists the tensors by name and distributes them over the shards.
static qlora_result qlora__merge_plan(qlora__merge* g, uint64_t shard_bytes) {
    uint64_t filled = 0;
    for (uint32_t i = 0; i < g->folder.count; i++) {
        const qlora__folder_entry* entry = &g->folder.entries[g->folder.by_name[i]];
        if (qlora__is_code_part(entry->name)) {
            continue;
        }
        qlora__merge_item* item = &g->items[g->count];
        QLORA__TRY(qlora__merge_describe(g, entry, item));
        if (filled > 0 && (item->bytes > shard_bytes || filled > shard_bytes - item->bytes)) {
            filled = 0;
            g->shards++;
        }
        item->shard = g->shards;
        filled += item->bytes;
        g->total += item->bytes;
        g->most_cols = qlora__max(g->most_cols, item->cols);
        g->count++;
    }
    g->shards++;
    return QLORA_OK;
}

static qlora_result qlora__merge_tell(const qlora__merge* g) {
    if (g->progress != NULL && !g->progress(g->user, "merging", g->done, g->total)) {
        return qlora__fail(g->ctx, QLORA_ERR_STOPPED, "merging was stopped");
    }
    return QLORA_OK;
}

static void qlora__merge_shard_name(const qlora__merge* g, uint32_t shard,
                                    qlora__module_name* out) {
    if (g->shards == 1) {
        snprintf(out->text, sizeof out->text, "model.safetensors");
    } else {
        snprintf(out->text, sizeof out->text, "model-%05u-of-%05u.safetensors", shard + 1,
                 g->shards);
    }
}

static qlora_result qlora__merge_shard(qlora__merge* g, uint32_t shard) {
    char path[QLORA__PATH_ROOM];
    qlora__module_name name;
    uint32_t count = 0;
    qlora__merge_shard_name(g, shard, &name);
    QLORA__TRY(qlora__path_join(&g->ctx->env, g->dir, name.text, path));
    for (uint32_t i = 0; i < g->count; i++) {
        const qlora__merge_item* item = &g->items[i];
        if (item->shard == shard) {
            qlora__st_entry* e = &g->entries[count];
            e->name = item->tensor->name;
            bool reshaped = item->projection != NULL || item->foreign || item->grown > 0;
            e->shape = reshaped ? item->shape : item->tensor->shape;
            e->rank = reshaped ? 2 : item->tensor->rank;
            e->dtype = item->raw ? item->tensor->dtype : qlora__st_dtype_for(g->dtype);
            g->members[count++] = i;
        }
    }
    qlora__st_writer w;
    QLORA__TRY(qlora__st_write_begin(&g->ctx->env, path, g->entries, count, NULL, false, &w));
    qlora_result r = QLORA_OK;
    for (uint32_t i = 0; i < count && r == QLORA_OK; i++) {
        const qlora__merge_item* item = &g->items[g->members[w.order[i]]];
        r = qlora__merge_item_write(g, item, &w);
        g->done += item->bytes;
        r = r == QLORA_OK ? qlora__merge_tell(g) : r;
    }
    if (r != QLORA_OK) {
        qlora__st_write_abort(&g->ctx->env, &w);
        return r;
    }
    return qlora__st_write_commit(&g->ctx->env, &w);
}

static qlora_result qlora__merge_index(qlora__merge* g) {
    qlora_ctx* ctx = g->ctx;
    size_t bytes = g->shards * (sizeof(qlora__module_name) + sizeof(char*));
    qlora__module_name* shards = (qlora__module_name*)qlora__alloc(ctx, bytes);
    if (shards == NULL) {
        return QLORA_ERR_MEMORY;
    }
    const char** names = (const char**)(void*)(shards + g->shards);
    for (uint32_t i = 0; i < g->shards; i++) {
        qlora__merge_shard_name(g, i, &shards[i]);
        names[i] = shards[i].text;
    }
    for (uint32_t i = 0; i < g->count; i++) {
        g->names[i] = g->items[i].tensor->name;
        g->shard_of[i] = g->items[i].shard;
    }
    qlora_result r =
        qlora__index_write(&ctx->env, g->dir, g->names, g->shard_of, g->count, names, g->total);
    qlora__free(ctx, shards, bytes);
    return r;
}

// Copies the other files of a model folder, such as those of the tokenizer. A GGUF file has none
// beside it.
static qlora_result qlora__merge_copy_files(const qlora__merge* g) {
    static const char* const files[] = {"generation_config.json",
                                        "tokenizer.json",
                                        "tokenizer_config.json",
                                        "special_tokens_map.json",
                                        "added_tokens.json",
                                        "vocab.json",
                                        "merges.txt",
                                        "tokenizer.model",
                                        "chat_template.jinja",
                                        "chat_template.json"};
    bool own = false; // the tokenizer's folder has a template
    QLORA__TRY(qlora__merge_write_template(&g->ctx->env, g->tokenizer, g->m->dir, g->dir, &own));
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        char from[QLORA__PATH_ROOM];
        char to[QLORA__PATH_ROOM];
        bool exists = false;
        QLORA__TRY(qlora__path_join(&g->ctx->env, g->dir, files[i], to));
        if (g->tokenizer != NULL && i > 0) { // the first one is not the tokenizer's
            QLORA__TRY(qlora__path_join(&g->ctx->env, g->tokenizer, files[i], from));
            QLORA__TRY(qlora__file_exists(&g->ctx->env, from, &exists));
        }
        // two templates would contradict each other
        if (!exists && !qlora__gguf_path(g->m->dir) &&
            !(own && strncmp(files[i], "chat_template", 13) == 0)) {
            QLORA__TRY(qlora__path_join(&g->ctx->env, g->m->dir, files[i], from));
            QLORA__TRY(qlora__file_exists(&g->ctx->env, from, &exists));
        }
        if (exists) {
            QLORA__TRY(qlora__file_copy(&g->ctx->env, from, to));
        }
    }
    return QLORA_OK;
}

static void qlora__merge_close(qlora__merge* g) {
    qlora_ctx* ctx = g->ctx;
    qlora__free(ctx, g->items, g->room * sizeof *g->items);
    qlora__free(ctx, g->entries, g->room * sizeof *g->entries);
    qlora__free(ctx, g->members, g->room * sizeof *g->members);
    qlora__free(ctx, g->names, g->room * sizeof *g->names);
    qlora__free(ctx, g->shard_of, g->room * sizeof *g->shard_of);
    qlora__free(ctx, g->values, g->elements * 4);
    qlora__free(ctx, g->packed, g->elements * 2);
    qlora__folder_close(&ctx->env, &g->folder);
}

static qlora_result qlora__merge_open(qlora__merge* g, uint64_t shard_bytes) {
    qlora_ctx* ctx = g->ctx;
    uint32_t n = g->folder.count;
    g->items = (qlora__merge_item*)qlora__alloc(ctx, n * sizeof *g->items);
    g->room = n;
    g->entries =
        g->items != NULL ? (qlora__st_entry*)qlora__alloc(ctx, n * sizeof *g->entries) : NULL;
    g->members = g->entries != NULL ? (uint32_t*)qlora__alloc(ctx, n * sizeof *g->members) : NULL;
    g->names = g->members != NULL ? (const char**)qlora__alloc(ctx, n * sizeof *g->names) : NULL;
    g->shard_of = g->names != NULL ? (uint32_t*)qlora__alloc(ctx, n * sizeof *g->shard_of) : NULL;
    if (g->shard_of == NULL) {
        return QLORA_ERR_MEMORY;
    }
    QLORA__TRY(qlora__merge_plan(g, shard_bytes));
    // A GGUF file may need the rows of a whole head at a time.
    int64_t rows = qlora__gguf_path(g->dir) ? g->m->plan.config.head_dim : 1;
    g->elements = (size_t)qlora__max((int64_t)1 << 20, g->most_cols * rows);
    g->values = (float*)qlora__alloc(ctx, g->elements * 4);
    g->packed = g->values != NULL ? (uint8_t*)qlora__alloc(ctx, g->elements * 2) : NULL;
    return g->packed != NULL ? QLORA_OK : QLORA_ERR_MEMORY;
}

static qlora_result qlora__merge_weights(qlora__merge* g, uint64_t shard_bytes) {
    QLORA__TRY(qlora__merge_open(g, shard_bytes));
    QLORA__TRY(qlora__merge_tell(g));
    QLORA__TRY(qlora__dir_make(&g->ctx->env, g->dir));
    for (uint32_t i = 0; i < g->shards; i++) {
        QLORA__TRY(qlora__merge_shard(g, i));
    }
    // Such a file, left by an earlier attempt with a different number of shards, would be read
    // first.
    qlora__file_remove(&g->ctx->env, g->dir,
                       g->shards > 1 ? "model.safetensors" : "model.safetensors.index.json");
    return g->shards > 1 ? qlora__merge_index(g) : QLORA_OK;
}

// The name of a type in config.json.
static const char* qlora__merge_dtype(const qlora__merge* g) {
    return g->dtype == QLORA_F32 ? "float32" : g->dtype == QLORA_BF16 ? "bfloat16" : "float16";
}

// Writes config.json last: without it, the folder is not a model.
static qlora_result qlora__merge_run(qlora__merge* g, uint64_t shard_bytes) {
    QLORA__TRY(qlora__merge_weights(g, shard_bytes));
    QLORA__TRY(qlora__merge_copy_files(g));
    bool grown = g->m->plan.config.vocab > g->m->plan.base_vocab;
    return qlora__config_export(&g->ctx->env, g->m->dir, g->dir, qlora__merge_dtype(g),
                                grown ? g->m->plan.config.vocab : 0,
                                g->m->rope_scale[0] != '\0' ? &g->m->plan.config : NULL);
}

// Trained embeddings and heads must have a place in the merged model.
static qlora_result qlora__merge_need_saved(qlora_ctx* ctx, const qlora_model* m, const char* dir) {
    if (m->plan.config.tied && (m->tables.saved_embed || m->tables.saved_head) &&
        !m->tables.saved_tied) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "the adapter has an embedding or a head of its own, but the model has "
                           "one matrix for both; such a model cannot be merged");
    }
    if (qlora__gguf_path(dir) &&
        (m->tables.saved_embed || m->tables.saved_head || m->tables.token_count > 0)) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "trained embeddings and heads cannot be merged into a GGUF file; merge "
                           "them into a folder");
    }
    // The values of a GGUF file are copied into another one.
    bool copied = m->dir != NULL && qlora__gguf_path(m->dir) && qlora__gguf_path(dir);
    if (m->rope_scale[0] != '\0' && copied) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "the rotation is scaled (desc.rope_scale is \"%s\"); a model in a GGUF "
                           "file can only be merged into a folder with that",
                           m->rope_scale);
    }
    if (m->plan.config.wrapped && m->plan.config.vocab > m->plan.base_vocab) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "the adapter has new tokens, and the model is the text part of another "
                           "one; such a model cannot be merged");
    }
    return QLORA_OK;
}

static qlora_result qlora__merge_need(qlora_ctx* ctx, const qlora_model* m,
                                      const qlora_merge_desc* d) {
    char path[QLORA__PATH_ROOM];
    bool exists = false;
    if (d == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "the merge desc is NULL");
    }
    if (d->reserved_must_be_zero0 != 0 || d->reserved_must_be_zero1 != 0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "the merge desc was not zeroed before its fields were set");
    }
    if (d->dir == NULL || d->dir[0] == '\0') {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "desc.dir is %s",
                           d->dir == NULL ? "NULL" : "empty");
    }
    if (d->dtype != QLORA_F32 && d->dtype != QLORA_BF16 && d->dtype != QLORA_F16) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "desc.dtype is %d; it must be QLORA_F32, QLORA_BF16 or QLORA_F16",
                           (int)d->dtype);
    }
    if (d->base != QLORA_MERGE_ORIGINAL && d->base != QLORA_MERGE_TRAINED) {
        return qlora__fail(
            ctx, QLORA_ERR_ARGUMENT,
            "desc.base is %d; it must be QLORA_MERGE_ORIGINAL or QLORA_MERGE_TRAINED",
            (int)d->base);
    }
    if (m->dir == NULL) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "the model has random weights and no folder to merge into");
    }
    QLORA__TRY(qlora__not_in_capture(ctx, "merging"));
    QLORA__TRY(qlora__merge_need_saved(ctx, m, d->dir));
    // This also protects the base from being overwritten, however its path is written.
    bool file = qlora__gguf_path(d->dir);
    QLORA__TRY(
        qlora__path_join(&ctx->env, file ? "" : d->dir, file ? d->dir : "config.json", path));
    QLORA__TRY(qlora__file_exists(&ctx->env, path, &exists));
    if (exists) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s already exists; choose %s", path,
                           file ? "another name" : "a folder that does not contain a model");
    }
    if (!file && d->gguf != QLORA_GGUF_AS_DTYPE) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "desc.gguf is set, but desc.dir (%s) does not end in .gguf", d->dir);
    }
    if ((int)d->gguf < 0 || d->gguf > QLORA_GGUF_Q4_0) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "desc.gguf is %d; it must be 0 to %d",
                           (int)d->gguf, (int)QLORA_GGUF_Q4_0);
    }
    return QLORA_OK;
}
