// ---- export of merged models as GGUF ------------------------------------------------------------

// One tensor of the file: rows of an item of the merge, or bytes that are copied.
typedef struct qlora__merge_part {
    const qlora__merge_item* item;
    const void* raw;              // if item is NULL
    const qlora__gguf_type* type; // in the file
    char name[QLORA__GGUF_NAME];
    uint32_t rank;
    int64_t rows; // a vector is a matrix of one column
    int64_t cols;
    int64_t experts;  // matrices of the tensor, if its rank is 3
    int64_t expert;   // of which the part is this one; the others follow it. -1 = all of it
    int64_t matrix;   // of an item that is a tensor of all experts: the one; -1 = it is none
    int64_t first;    // row of the item where the part begins
    int64_t head_dim; // > 0: rows of q or k, which the file orders for pairs of neighbours
    bool plus_one;    // the file holds w + 1
    uint64_t bytes;
} qlora__merge_part;

typedef struct qlora__merge_file {
    qlora__merge* g;
    const qlora__gguf_type* type; // of matrices
    qlora__merge_part* parts;
    uint32_t count;
    uint32_t room;
    qlora__string values; // the metadata
    uint64_t value_count;
    float factors[2][QLORA_MAX_ROPE_FACTORS]; // of the rotation
    uint8_t* buffer;                          // packed rows that are not written yet
    size_t room_bytes;
    size_t filled;
    qlora__out out;
} qlora__merge_file;

// Vectors and routers stay F32, as llama.cpp expects. A matrix whose rows are no multiple of the
// block becomes F16; with Q4_0, the embedding and the head become Q8_0, because they suffer most.
static const qlora__gguf_type* qlora__merge_type_for(const qlora__merge_file* f,
                                                     const qlora__merge_part* part) {
    const qlora__gguf_type* type = f->type;
    bool outer =
        strcmp(part->name, "token_embd.weight") == 0 || strcmp(part->name, "output.weight") == 0;
    if (part->rank == 1 || strstr(part->name, ".ffn_gate_inp") != NULL) {
        return qlora__gguf_type_named("F32");
    }
    if (outer && strcmp(type->name, "Q4_0") == 0) {
        type = qlora__gguf_type_named("Q8_0");
    }
    return part->cols % type->block == 0 ? type : qlora__gguf_type_named("F16");
}

// Adds a part; the caller sets what is not the default: head_dim, plus_one, first.
static qlora__merge_part* qlora__merge_part_add(qlora__merge_file* f, const char* name,
                                                const qlora__merge_item* item, uint32_t rank,
                                                int64_t rows, int64_t cols) {
    qlora__merge_part* part = &f->parts[f->count++];
    memset(part, 0, sizeof *part);
    snprintf(part->name, sizeof part->name, "%s", name);
    part->item = item;
    part->rank = rank;
    part->rows = rows;
    part->cols = cols;
    part->expert = -1;
    part->matrix = -1;
    part->type = qlora__merge_type_for(f, part);
    part->bytes = (uint64_t)(rows * cols) / part->type->block * part->type->bytes;
    return part;
}

// One part per expert for a tensor of all experts, or of what is one matrix for us and two for the
// file. *done is false if no item was made from it in such a way.
static void qlora__merge_part_split(qlora__merge_file* f, const qlora__gguf_tensor* t, bool* done) {
    const qlora__merge* g = f->g;
    int64_t count = t->rank == 3 ? (int64_t)t->shape[2] : 1;
    qlora__merge_part* parts = &f->parts[f->count];
    *done = false;
    for (uint32_t n = 0; n < g->count; n++) {
        const qlora__folder_made* made = (const qlora__folder_made*)(const void*)g->items[n].tensor;
        const qlora__gguf_view* view = &made->view;
        for (uint32_t k = 0; k < view->count && view->each > 0; k++) {
            if (view->parts[k] != t) {
                continue;
            }
            int64_t matrices = view->rows / (view->each * view->count);
            f->count = (uint32_t)(parts - f->parts) + (uint32_t)(view->first / view->each);
            for (int64_t e = 0; e < matrices; e++) {
                qlora__merge_part* part = qlora__merge_part_add(f, t->name, &g->items[n], t->rank,
                                                                view->each, view->cols);
                part->first = (int64_t)k * view->each;
                part->experts = count;
                part->expert = t->rank == 3 ? view->first / view->each + e : -1;
                part->matrix = matrices > 1 ? e : -1;
            }
            *done = true;
        }
    }
    f->count = (uint32_t)(parts - f->parts) + (*done ? (uint32_t)count : 0);
}

// A tensor of the source file, with the item that was made from it.
static qlora_result qlora__merge_part_copy(qlora__merge_file* f, const qlora__gguf_tensor* t) {
    const qlora__merge* g = f->g;
    bool done = false;
    qlora__merge_part_split(f, t, &done);
    for (uint32_t n = 0; n < g->count && !done; n++) {
        const qlora__folder_made* made = (const qlora__folder_made*)(const void*)g->items[n].tensor;
        if (made->view.parts[0] != t) {
            continue;
        }
        if (made->view.rows * made->view.cols != (int64_t)t->elements) {
            return qlora__fail(g->ctx, QLORA_ERR_UNSUPPORTED,
                               "%s: %s holds several matrices in one tensor; such a file cannot "
                               "be merged",
                               g->m->dir, t->name);
        }
        bool vector = t->rank == 1;
        qlora__merge_part* part = qlora__merge_part_add(
            f, t->name, &g->items[n], t->rank, vector ? (int64_t)t->elements : made->view.rows,
            vector ? 1 : made->view.cols);
        part->head_dim = made->view.head_dim;
        part->plus_one = made->view.minus_one;
        return QLORA_OK;
    }
    if (done) {
        return QLORA_OK;
    }
    qlora__merge_part* part = qlora__merge_part_add(
        f, t->name, NULL, t->rank, t->rank == 1 ? qlora__gguf_rows(t) : (int64_t)t->shape[1],
        t->rank == 1 ? 1 : (int64_t)t->shape[0]);
    part->experts = (int64_t)t->shape[2];
    part->type = t->type;
    part->bytes = t->bytes;
    part->raw = t->data;
    return QLORA_OK;
}

// At most this many tensors: a fused matrix may become two, and the rotation needs two.
static qlora_result qlora__merge_parts_reserve(qlora__merge_file* f, uint64_t count) {
    f->parts = (qlora__merge_part*)qlora__alloc(f->g->ctx, (size_t)count * sizeof *f->parts);
    f->room = f->parts != NULL ? (uint32_t)count : 0;
    return f->parts != NULL ? QLORA_OK : QLORA_ERR_MEMORY;
}

// The tensors of the source file, in its order.
static qlora_result qlora__merge_parts_copy(qlora__merge_file* f) {
    const qlora__gguf_model* files = &f->g->folder.gguf;
    uint64_t count = 0;
    for (uint32_t i = 0; i < files->count; i++) {
        for (uint32_t k = 0; k < files->files[i].count; k++) {
            const qlora__gguf_tensor* t = &files->files[i].tensors[k];
            bool stack = t->rank == 3 && (int64_t)t->shape[2] == f->g->m->plan.config.experts;
            count += stack ? t->shape[2] : 1;
        }
    }
    QLORA__TRY(qlora__merge_parts_reserve(f, count));
    for (uint32_t i = 0; i < files->count; i++) {
        for (uint32_t k = 0; k < files->files[i].count; k++) {
            QLORA__TRY(qlora__merge_part_copy(f, &files->files[i].tensors[k]));
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

static void qlora__merge_key(qlora__merge_file* f, const char* key, qlora__gguf_kind kind) {
    qlora__gguf_string(&f->values, key);
    qlora__gguf_u32(&f->values, (uint32_t)kind);
    f->value_count++;
}

static void qlora__merge_put_u32(qlora__merge_file* f, const char* key, int64_t value) {
    qlora__merge_key(f, key, QLORA__GGUF_U32);
    qlora__gguf_u32(&f->values, (uint32_t)value);
}

static void qlora__merge_copy_value(qlora__merge_file* f, const qlora__gguf_value* v) {
    qlora__string* t = &f->values;
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
    f->value_count++;
}

#define QLORA__MERGE_TEMPLATE_KEY "tokenizer.chat_template"

// The chat template: that of the adapter's folder, else of the model's. *found = false if neither
// has one; a model in a GGUF file brings its own.
static qlora_result qlora__merge_put_template(qlora__merge_file* f, bool* found) {
    const qlora__merge* g = f->g;
    qlora__env* env = &g->ctx->env;
    qlora__string text;
    int which = -1;
    qlora__string_begin(env, &text);
    qlora_result r =
        g->tokenizer != NULL ? qlora__merge_template(env, g->tokenizer, &text, &which) : QLORA_OK;
    if (r == QLORA_OK && which < 0 && !qlora__gguf_path(g->m->dir)) {
        r = qlora__merge_template(env, g->m->dir, &text, &which);
    }
    *found = r == QLORA_OK && text.size > 0;
    if (*found) {
        qlora__merge_key(f, QLORA__MERGE_TEMPLATE_KEY, QLORA__GGUF_STRING);
        qlora__gguf_u64(&f->values, text.size);
        qlora__string_add(&f->values, text.data, text.size);
    }
    qlora__string_free(&text);
    return r;
}

// The metadata of the source file. `skip`: without its chat template.
static void qlora__merge_values_copy(qlora__merge_file* f, bool skip) {
    const qlora__gguf* g = &f->g->folder.gguf.files[0].meta;
    for (uint32_t i = 0; i < g->count; i++) {
        const qlora__gguf_value* v = &g->values[i];
        bool form = qlora__gguf_is(v->key, v->key_size, QLORA__MERGE_TEMPLATE_KEY);
        if (!qlora__merge_skips_key(v) && !(skip && form)) {
            qlora__merge_copy_value(f, &g->values[i]);
        }
    }
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

// Bytes of the tensor that begins with a part.
static uint64_t qlora__merge_tensor_bytes(const qlora__merge_part* part) {
    return part->expert >= 0 ? part->bytes * (uint64_t)part->experts : part->bytes;
}

static void qlora__merge_put_header(qlora__merge_file* f, qlora__string* t) {
    uint64_t at = 0;
    uint32_t count = 0; // tensors
    for (uint32_t i = 0; i < f->count; i++) {
        count += f->parts[i].expert <= 0 ? 1 : 0;
    }
    qlora__merge_put_u32(f, "general.file_type", qlora__merge_file_type(f->type));
    qlora__merge_put_u32(f, "general.quantization_version", 2);
    qlora__merge_put_u32(f, "general.alignment", QLORA__GGUF_ALIGN);
    qlora__string_puts(t, "GGUF");
    qlora__gguf_u32(t, 3);
    qlora__gguf_u64(t, count);
    qlora__gguf_u64(t, f->value_count);
    qlora__string_add(t, f->values.data, f->values.size);
    t->result = t->result == QLORA_OK ? f->values.result : t->result;
    for (uint32_t i = 0; i < f->count; i++) {
        const qlora__merge_part* part = &f->parts[i];
        if (part->expert > 0) {
            continue;
        }
        qlora__gguf_string(t, part->name);
        qlora__gguf_u32(t, part->rank);
        if (part->rank >= 2) {
            qlora__gguf_u64(t, (uint64_t)part->cols);
        }
        qlora__gguf_u64(t, (uint64_t)part->rows);
        if (part->rank == 3) {
            qlora__gguf_u64(t, (uint64_t)part->experts);
        }
        qlora__gguf_u32(t, part->type->id);
        qlora__gguf_u64(t, at);
        at += qlora__gguf_padded(qlora__merge_tensor_bytes(part));
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
    int64_t cols = part->cols;
    int64_t from = row;
    if (part->head_dim > 0) { // the inverse of qlora__gguf_stored_row
        int64_t in_head = row % part->head_dim;
        from = row - in_head + in_head % 2 * (part->head_dim / 2) + in_head / 2;
    }
    float* values = f->g->values + (from - first) * cols;
    for (int64_t i = 0; i < cols; i++) {
        values[i] = part->plus_one ? values[i] + 1.0f : values[i];
        bool too_large = part->type->id == 1 && fabsf(values[i]) > 65504.0f;
        if (too_large) {
            return qlora__fail(f->g->ctx, QLORA_ERR_LIMIT,
                               "%s contains %g, which F16 cannot represent; export as BF16 or F32",
                               part->name, (double)values[i]);
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
    const qlora__merge_item* item = part->item;
    qlora__merge_module module;
    qlora__merge_item one;
    qlora__merge_slice slice;
    memset(&module, 0, sizeof module);
    if (part->matrix >= 0) {
        qlora__merge_stack_one(g, item, part->matrix, &slice, &one);
        item = &one;
    }
    // Rows move only within a head, so that whole heads are made at a time.
    int64_t unit = part->head_dim > 0 ? part->head_dim : 1;
    int64_t most = (int64_t)g->elements / (part->cols * unit) * unit;
    int64_t all = part->rows;
    if (part->rank == 1) { // one row of the merge, one column here
        most = all;
    }
    qlora_result r =
        item->projection != NULL ? qlora__merge_module_open(g->ctx, g->m, item, &module) : QLORA_OK;
    for (int64_t row = 0; row < all && r == QLORA_OK; row += most) {
        int64_t rows = qlora__min(most, all - row);
        r = qlora__merge_rows_make(g, item, &module, part->first + row, part->rank == 1 ? 1 : rows);
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
        QLORA__TRY(part->item != NULL
                       ? qlora__merge_write_item(f, part)
                       : qlora__out_write(env, &f->out, part->raw, (size_t)part->bytes));
        if (part->expert < 0 || part->expert == part->experts - 1) {
            uint64_t bytes = qlora__merge_tensor_bytes(part);
            QLORA__TRY(
                qlora__out_write(env, &f->out, zeros, (size_t)(qlora__gguf_padded(bytes) - bytes)));
        }
        if (part->item != NULL) { // the part of the item that this one is
            f->g->done += (uint64_t)(part->rows * part->cols) * part->item->bytes /
                          (uint64_t)(part->item->rows * part->item->cols);
        }
        QLORA__TRY(qlora__merge_tell(f->g));
    }
    return QLORA_OK;
}

static qlora_result qlora__merge_file_write(qlora__merge_file* f, const char* path) {
    qlora__env* env = &f->g->ctx->env;
    qlora__string text;
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
