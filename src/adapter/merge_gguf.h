// ---- export of merged models as GGUF ------------------------------------------------------------

// One tensor of the file: an item of the merge, or a tensor that is copied as it is.
typedef struct qlora__merge_part {
    const qlora__merge_item* item;
    const qlora__gguf_tensor* source;
    const qlora__gguf_view* view; // of the item
    const qlora__gguf_type* type;
    uint64_t bytes;
} qlora__merge_part;

typedef struct qlora__merge_file {
    qlora__merge* g;
    const qlora__gguf_type* type; // of matrices
    qlora__merge_part* parts;
    uint32_t count;
    uint32_t room;
    uint8_t* buffer; // packed rows that are not written yet
    size_t room_bytes;
    size_t filled;
    qlora__out out;
} qlora__merge_file;

// Vectors stay F32, as llama.cpp expects. A matrix whose rows are no multiple of the block becomes
// F16; with Q4_0, the embedding and the head become Q8_0, because they suffer most.
static const qlora__gguf_type* qlora__merge_type_for(const qlora__merge_file* f,
                                                     const qlora__gguf_tensor* t) {
    const qlora__gguf_type* type = f->type;
    bool outer = strcmp(t->name, "token_embd.weight") == 0 || strcmp(t->name, "output.weight") == 0;
    if (t->rank == 1) {
        return qlora__gguf_type_named("F32");
    }
    if (outer && strcmp(type->name, "Q4_0") == 0) {
        type = qlora__gguf_type_named("Q8_0");
    }
    return t->shape[0] % type->block == 0 ? type : qlora__gguf_type_named("F16");
}

static void qlora__merge_part_add(qlora__merge_file* f, const qlora__merge_item* item,
                                  const qlora__gguf_view* view, const qlora__gguf_tensor* source) {
    qlora__merge_part* part = &f->parts[f->count++];
    part->item = item;
    part->view = view;
    part->source = source;
    part->type = item != NULL ? qlora__merge_type_for(f, source) : source->type;
    part->bytes = source->elements / part->type->block * part->type->bytes;
}

// Lists the tensors of the source file, in its order, each with its item.
static qlora_result qlora__merge_parts(qlora__merge_file* f) {
    const qlora__merge* g = f->g;
    const qlora__gguf_model* files = &g->folder.gguf;
    uint64_t count = 0;
    for (uint32_t i = 0; i < files->count; i++) {
        count += files->files[i].count;
    }
    f->parts = (qlora__merge_part*)qlora__alloc(g->ctx, (size_t)count * sizeof *f->parts);
    if (f->parts == NULL) {
        return QLORA_ERR_MEMORY;
    }
    f->room = (uint32_t)count;
    for (uint32_t i = 0; i < files->count; i++) {
        for (uint32_t k = 0; k < files->files[i].count; k++) {
            const qlora__gguf_tensor* t = &files->files[i].tensors[k];
            const qlora__merge_item* item = NULL;
            const qlora__gguf_view* view = NULL;
            for (uint32_t n = 0; n < g->count && item == NULL; n++) {
                const qlora__folder_made* made =
                    (const qlora__folder_made*)(const void*)g->items[n].tensor;
                item = made->view.parts[0] == t ? &g->items[n] : NULL;
                view = item != NULL ? &made->view : NULL;
            }
            if (view != NULL && view->rows != qlora__gguf_rows(t)) {
                return qlora__fail(g->ctx, QLORA_ERR_UNSUPPORTED,
                                   "%s: %s holds several matrices in one tensor; such a file "
                                   "cannot be merged",
                                   g->m->dir, t->name);
            }
            qlora__merge_part_add(f, item, view, t);
        }
    }
    return QLORA_OK;
}

// ---- the header ---------------------------------------------------------------------------------

// Keys that describe the old file rather than the model.
static bool qlora__merge_skips_key(const qlora__gguf_value* v) {
    static const char* const keys[] = {"general.file_type", "general.quantization_version",
                                       "general.alignment"};
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        if (qlora__gguf_is(v->key, v->key_size, keys[i])) {
            return true;
        }
    }
    return v->key_size > 6 && memcmp(v->key, "split.", 6) == 0;
}

static void qlora__merge_put_value(qlora__string* t, const qlora__gguf_value* v) {
    qlora__gguf_u64(t, v->key_size);
    qlora__string_add(t, v->key, v->key_size);
    qlora__gguf_u32(t, (uint32_t)v->kind);
    if (v->kind == QLORA__GGUF_ARRAY) {
        qlora__gguf_u32(t, (uint32_t)v->element);
        qlora__gguf_u64(t, v->count);
    } else if (v->kind == QLORA__GGUF_STRING) {
        qlora__gguf_u64(t, v->bytes);
    }
    qlora__string_add(t, v->data, (size_t)v->bytes);
}

static void qlora__merge_put_u32(qlora__string* t, const char* key, uint32_t value) {
    qlora__gguf_string(t, key);
    qlora__gguf_u32(t, (uint32_t)QLORA__GGUF_U32);
    qlora__gguf_u32(t, value);
}

// general.file_type of a type.
static uint32_t qlora__merge_file_type(const qlora__gguf_type* type) {
    static const struct {
        const char* name;
        uint32_t number;
    } numbers[] = {{"F32", 0}, {"F16", 1}, {"Q4_0", 2}, {"Q8_0", 7}, {"BF16", 32}};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        if (strcmp(numbers[i].name, type->name) == 0) {
            return numbers[i].number;
        }
    }
    return 0;
}

static void qlora__merge_put_header(const qlora__merge_file* f, qlora__string* t) {
    const qlora__gguf* g = &f->g->folder.gguf.files[0].meta;
    uint64_t values = 3;
    uint64_t at = 0;
    for (uint32_t i = 0; i < g->count; i++) {
        values += qlora__merge_skips_key(&g->values[i]) ? 0 : 1;
    }
    qlora__string_puts(t, "GGUF");
    qlora__gguf_u32(t, 3);
    qlora__gguf_u64(t, f->count);
    qlora__gguf_u64(t, values);
    for (uint32_t i = 0; i < g->count; i++) {
        if (!qlora__merge_skips_key(&g->values[i])) {
            qlora__merge_put_value(t, &g->values[i]);
        }
    }
    qlora__merge_put_u32(t, "general.file_type", qlora__merge_file_type(f->type));
    qlora__merge_put_u32(t, "general.quantization_version", 2);
    qlora__merge_put_u32(t, "general.alignment", QLORA__GGUF_ALIGN);
    for (uint32_t i = 0; i < f->count; i++) {
        const qlora__merge_part* part = &f->parts[i];
        qlora__gguf_string(t, part->source->name);
        qlora__gguf_u32(t, part->source->rank);
        for (uint32_t d = 0; d < part->source->rank; d++) {
            qlora__gguf_u64(t, part->source->shape[d]);
        }
        qlora__gguf_u32(t, part->type->id);
        qlora__gguf_u64(t, at);
        at += qlora__gguf_padded(part->bytes);
    }
    while (t->result == QLORA_OK && t->size % QLORA__GGUF_ALIGN != 0) {
        qlora__string_add(t, "", 1);
    }
}

// ---- the data -----------------------------------------------------------------------------------

static qlora_result qlora__merge_flush(qlora__merge_file* f) {
    size_t n = f->filled;
    f->filled = 0;
    return qlora__out_write(&f->g->ctx->env, &f->out, f->buffer, n);
}

// Packs and writes row `row` of the file, which is in f->g->values; the values begin at row
// `first` of the model.
static qlora_result qlora__merge_write_row(qlora__merge_file* f, const qlora__merge_part* part,
                                           int64_t first, int64_t row) {
    int64_t cols = part->view->cols;
    int64_t from = row;
    if (part->view->head_dim > 0) {
        // the inverse of qlora__gguf_stored_row
        int64_t in_head = row % part->view->head_dim;
        from = row - in_head + in_head % 2 * (part->view->head_dim / 2) + in_head / 2;
    }
    float* values = f->g->values + (from - first) * cols;
    for (int64_t i = 0; i < cols; i++) {
        values[i] = part->view->minus_one ? values[i] + 1.0f : values[i];
        bool too_large = part->type->id == 1 && fabsf(values[i]) > 65504.0f;
        if (too_large) {
            return qlora__fail(f->g->ctx, QLORA_ERR_LIMIT,
                               "%s contains %g, which F16 cannot represent; export as BF16 or F32",
                               part->source->name, (double)values[i]);
        }
    }
    size_t bytes = (size_t)((uint64_t)cols / part->type->block * part->type->bytes);
    if (bytes > f->room_bytes - f->filled) {
        QLORA__TRY(qlora__merge_flush(f));
    }
    qlora__gguf_pack(part->type, values, (uint64_t)cols, f->buffer + f->filled);
    f->filled += bytes;
    return QLORA_OK;
}

static qlora_result qlora__merge_write_item(qlora__merge_file* f, const qlora__merge_part* part) {
    qlora__merge* g = f->g;
    qlora__merge_module module;
    memset(&module, 0, sizeof module);
    // Rows move only within a head, so that whole heads are made at a time.
    int64_t unit = part->view->head_dim > 0 ? part->view->head_dim : 1;
    int64_t most = (int64_t)g->elements / (part->view->cols * unit) * unit;
    int64_t all = part->view->rows;
    if (part->source->rank == 1) { // the merge sees one row, the view one column
        most = all;
    }
    qlora_result r = part->item->projection != NULL
                         ? qlora__merge_module_open(g->ctx, g->m, part->item, &module)
                         : QLORA_OK;
    for (int64_t row = 0; row < all && r == QLORA_OK; row += most) {
        int64_t rows = qlora__min(most, all - row);
        r = qlora__merge_rows_make(g, part->item, &module, row, part->source->rank == 1 ? 1 : rows);
        for (int64_t i = row; i < row + rows && r == QLORA_OK; i++) {
            r = qlora__merge_write_row(f, part, row, i);
        }
    }
    qlora__merge_module_close(g->ctx, &module);
    return r == QLORA_OK ? qlora__merge_flush(f) : r;
}

static qlora_result qlora__merge_write_parts(qlora__merge_file* f) {
    uint8_t zeros[QLORA__GGUF_ALIGN];
    qlora__env* env = &f->g->ctx->env;
    memset(zeros, 0, sizeof zeros);
    for (uint32_t i = 0; i < f->count; i++) {
        const qlora__merge_part* part = &f->parts[i];
        QLORA__TRY(part->item != NULL ? qlora__merge_write_item(f, part)
                                      : qlora__out_write(env, &f->out, part->source->data,
                                                         (size_t)part->source->bytes));
        QLORA__TRY(qlora__out_write(env, &f->out, zeros,
                                    (size_t)(qlora__gguf_padded(part->bytes) - part->bytes)));
        f->g->done += part->item != NULL ? part->item->bytes : 0;
        QLORA__TRY(qlora__merge_tell(f->g));
    }
    return QLORA_OK;
}

static qlora_result qlora__merge_file_write(qlora__merge_file* f, const char* path) {
    qlora__env* env = &f->g->ctx->env;
    qlora__string text;
    QLORA__TRY(qlora__merge_parts(f));
    qlora__string_begin(env, &text);
    qlora__merge_put_header(f, &text);
    qlora_result r = text.result;
    r = r == QLORA_OK ? qlora__out_begin(env, path, &f->out) : r;
    r = r == QLORA_OK ? qlora__out_write(env, &f->out, text.data, text.size) : r;
    qlora__string_free(&text);
    QLORA__TRY(r);
    r = qlora__merge_write_parts(f);
    if (r != QLORA_OK) {
        qlora__out_abort(env, &f->out);
        return r;
    }
    return qlora__out_commit(env, &f->out);
}

// The whole export.
static qlora_result qlora__merge_gguf(qlora__merge* g, const char* path,
                                      const qlora__gguf_type* type) {
    qlora_ctx* ctx = g->ctx;
    qlora__merge_file f;
    memset(&f, 0, sizeof f);
    f.g = g;
    f.type = type;
    if (g->folder.gguf.count == 0) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "%s: a GGUF file can only be written from a model in a GGUF file, whose "
                           "metadata and tokenizer it takes over",
                           g->m->dir);
    }
    QLORA__TRY(qlora__merge_open(g, UINT64_MAX));
    QLORA__TRY(qlora__merge_tell(g));
    f.room_bytes = (size_t)qlora__max(4 * g->most_cols, (int64_t)1 << 20);
    f.buffer = (uint8_t*)qlora__alloc(ctx, f.room_bytes);
    qlora_result r = f.buffer != NULL ? qlora__merge_file_write(&f, path) : QLORA_ERR_MEMORY;
    qlora__free(ctx, f.buffer, f.room_bytes);
    qlora__free(ctx, f.parts, f.room * sizeof *f.parts);
    return r;
}

static const qlora__gguf_type* qlora__merge_type(const qlora_merge_desc* desc) {
    return qlora__gguf_type_named(desc->gguf == QLORA_GGUF_Q8_0   ? "Q8_0"
                                  : desc->gguf == QLORA_GGUF_Q4_0 ? "Q4_0"
                                  : desc->dtype == QLORA_BF16     ? "BF16"
                                  : desc->dtype == QLORA_F16      ? "F16"
                                                                  : "F32");
}

static qlora_result qlora__merge_save(qlora_ctx* ctx, const qlora_model* m,
                                      const qlora_merge_desc* desc) {
    QLORA__TRY(qlora__merge_need(ctx, m, desc));
    qlora__merge g;
    memset(&g, 0, sizeof g);
    g.ctx = ctx;
    g.m = m;
    g.dir = desc->dir;
    g.dtype = desc->dtype;
    g.trained = desc->base == QLORA_MERGE_TRAINED;
    g.progress = desc->progress;
    g.user = desc->progress_user;
    QLORA__TRY(qlora__folder_open(&ctx->env, m->dir, &g.folder));
    uint64_t shard = desc->shard_bytes != 0 ? desc->shard_bytes : (uint64_t)5000000000u;
    qlora_result r = qlora__gguf_path(desc->dir)
                         ? qlora__merge_gguf(&g, desc->dir, qlora__merge_type(desc))
                         : qlora__merge_run(&g, shard);
    qlora__merge_close(&g);
    return r;
}

qlora_result qlora_merge_save(qlora_model* model, const qlora_merge_desc* desc) {
    qlora_ctx* ctx = qlora__model_ctx(model);
    QLORA__ENTER(ctx, "qlora_merge_save");
    return qlora__leave(ctx, qlora__merge_save(ctx, model, desc));
}
