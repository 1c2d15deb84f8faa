// .parquet: every row is a record. Pages are read one after another, never a whole row group.

typedef struct qlora__text_parquet {
    qlora__map map;
    qlora__parquet file;
    qlora__string row;
    bool opened;
} qlora__text_parquet;

static void qlora__text_parquet_close(qlora__env* env, qlora__text_source* source) {
    qlora__text_parquet* state = (qlora__text_parquet*)source->state;
    if (state != NULL) {
        if (state->opened) {
            qlora__parquet_close(env, &state->file);
        }
        qlora__string_free(&state->row);
        qlora__map_close(env, &state->map);
        qlora__env_free(env, state, sizeof *state);
        source->state = NULL;
    }
}

// Whether a column holds something that cannot be read, fractions, which may be NaN, or lists of
// numbers, which cost much time.
static bool qlora__text_parquet_odd(const qlora__parquet* p, uint32_t column) {
    for (uint32_t i = column; i < p->nodes[column].end; i++) {
        const qlora__parquet_node* n = &p->nodes[i];
        if (n->why != NULL) {
            return true;
        }
        if (n->kind != QLORA__PARQUET_LEAF) {
            continue;
        }
        const qlora__parquet_leaf* leaf = &p->leaves[n->leaf];
        if ((leaf->max_repetition > 0 && leaf->form != QLORA__PARQUET_AS_STRING) ||
            leaf->form == QLORA__PARQUET_AS_FLOAT || leaf->form == QLORA__PARQUET_AS_DOUBLE ||
            leaf->form == QLORA__PARQUET_AS_HALF) {
            return true;
        }
    }
    return false;
}

// Chooses the columns that are read. One whose name has no meaning in a record is left out if it
// could be the reason that the file is refused; its name is kept, so that it is listed as ignored.
static qlora_result qlora__text_parquet_columns(qlora__env* env, qlora__text_source* source) {
    qlora__text_parquet* state = (qlora__text_parquet*)source->state;
    qlora__parquet* p = &state->file;
    for (uint32_t i = 1; i < p->node_count; i = p->nodes[i].end) {
        char name[256];
        char room[64];
        qlora__parquet_node* n = &p->nodes[i];
        size_t size = n->name_size < sizeof name - 1 ? n->name_size : sizeof name - 1;
        memcpy(name, n->name, size);
        name[size] = '\0';
        const char* to = qlora__text_column_name(source->loader, name, room);
        bool known = qlora__text_name_known(to) != NULL;
        for (size_t k = 0; k < QLORA__TEXT_COUNT(qlora__text_masks); k++) {
            known = known || strcmp(qlora__text_masks[k], to) == 0;
        }
        n->skip = !known && qlora__text_parquet_odd(p, i);
        for (uint32_t k = 1; known && k < i; k = p->nodes[k].end) {
            if (p->nodes[k].name_size == n->name_size &&
                memcmp(p->nodes[k].name, n->name, n->name_size) == 0) {
                return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                       "%s: two columns are called \"%.60s\"", p->label, name);
            }
        }
    }
    return QLORA_OK;
}

// A fault in a row is that of the file: the columns no longer agree on where the next row starts.
static qlora_result qlora__text_parquet_next(qlora__env* env, qlora__text_source* source,
                                             bool* more) {
    qlora__text_parquet* state = (qlora__text_parquet*)source->state;
    qlora__json* json = &source->json;
    uint32_t end = 0;
    source->line = (size_t)state->file.row + 1;
    qlora_result r = qlora__parquet_next(env, &state->file, &state->row, more);
    if (r != QLORA_OK || !*more) {
        return r == QLORA_ERR_FORMAT || r == QLORA_ERR_UNSUPPORTED ? QLORA_ERR_FILE : r;
    }
    json->label = source->loader->name;
    json->text = state->row.data;
    json->size = (uint32_t)state->row.size;
    json->line = (uint32_t)(source->line - 1);
    json->column = 0;
    source->strings = 0;
    QLORA__TRY(qlora__json_parse_one(env, json, false, &end));
    QLORA__TRY(qlora__json_decode(env, json));
    return qlora__text_columns_apply(env, source, 0);
}

static qlora_result qlora__text_parquet_open(qlora__env* env, qlora__text_source* source) {
    const qlora__text_input* input = &source->input;
    if (input->unpack != NULL) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "%s: Parquet inside gzip is not supported; decompress the file",
                               input->name);
    }
    qlora__text_parquet* state = (qlora__text_parquet*)qlora__text_zalloc(env, 1, sizeof *state);
    if (state == NULL) {
        return QLORA_ERR_MEMORY;
    }
    const void* data = input->memory;
    uint64_t size = input->memory_size;
    source->state = state;
    source->next = qlora__text_parquet_next;
    source->close = qlora__text_parquet_close;
    qlora__string_begin(env, &state->row);
    if (input->path != NULL) {
        QLORA__TRY(qlora__map_open(env, input->path, &state->map));
        data = state->map.data;
        size = state->map.size;
    }
    QLORA__TRY(qlora__parquet_open(env, source->loader->name, data, size, &state->file));
    state->opened = true;
    source->headed = true;
    return qlora__text_parquet_columns(env, source);
}
