// Saving, loading and copying adapters, in PEFT format and as GGUF.

// ---- lists of tensors to be written -------------------------------------------------------------

// One tensor of a file: floats of an arena (device memory on CUDA) or bytes in host memory.
typedef struct qlora__save_item {
    char name[224];
    int64_t shape[2];
    const qlora_tensor* arena; // NULL if `bytes` is used
    int64_t at;
    const void* bytes;
    size_t size;
    const void* moments; // bytes or floats in device memory
    int64_t experts;     // B of so many experts, which is written as PEFT has it
    float offset;        // subtracted from the values
} qlora__save_item;

typedef struct qlora__save_list {
    qlora__save_item* items;
    qlora__st_entry* entries;
    uint32_t count;
    uint32_t room;
    int64_t longest; // floats of the largest item in an arena
} qlora__save_list;

static void qlora__save_close(qlora_ctx* ctx, qlora__save_list* list) {
    qlora__free(ctx, list->items, list->room * sizeof *list->items);
    qlora__free(ctx, list->entries, list->room * sizeof *list->entries);
    memset(list, 0, sizeof *list);
}

static qlora_result qlora__save_open(qlora_ctx* ctx, int64_t room, qlora__save_list* list) {
    memset(list, 0, sizeof *list);
    list->room = (uint32_t)room;
    list->items = (qlora__save_item*)qlora__alloc_zero(ctx, list->room * sizeof *list->items);
    if (list->items != NULL) {
        list->entries =
            (qlora__st_entry*)qlora__alloc_zero(ctx, list->room * sizeof *list->entries);
    }
    if (list->entries == NULL) {
        qlora__save_close(ctx, list);
        return QLORA_ERR_MEMORY;
    }
    return QLORA_OK;
}

static qlora__save_item* qlora__save_next(qlora__save_list* list, qlora__st_dtype dtype,
                                          uint32_t rank) {
    QLORA_ASSERT(list->count < list->room);
    qlora__save_item* item = &list->items[list->count];
    qlora__st_entry* entry = &list->entries[list->count++];
    entry->name = item->name;
    entry->shape = item->shape;
    entry->dtype = dtype;
    entry->rank = rank;
    return item;
}

// Adds the part of an arena (parameters or moments) that belongs to a trained tensor. Its name in
// the file is prefix + name.
static void qlora__save_add(qlora__save_list* list, const char* prefix, const qlora_tensor* arena,
                            const qlora__trained* t) {
    bool vector = t->is_magnitude || t->is_norm;
    qlora__save_item* item = qlora__save_next(list, QLORA__ST_F32, vector ? 1 : 2);
    snprintf(item->name, sizeof item->name, "%.24s%s", prefix, t->name);
    item->shape[0] = vector ? t->cols : t->rows;
    item->shape[1] = t->cols;
    item->arena = arena;
    item->at = t->at;
    item->size = (size_t)(t->rows * t->cols) * 4;
    list->longest = qlora__max(list->longest, t->rows * t->cols);
}

static QLORA__UNUSED void qlora__save_add_bytes(qlora__save_list* list, const char* name,
                                                qlora__st_dtype dtype, const void* bytes,
                                                size_t size) {
    qlora__save_item* item = qlora__save_next(list, dtype, 1);
    snprintf(item->name, sizeof item->name, "%s", name);
    item->shape[0] = (int64_t)(size * 8 / qlora__st_dtypes[dtype].bits);
    item->bytes = bytes;
    item->size = size;
}

// Adds part of the 8-bit moments, which are in device memory: `count` codes or floats.
static QLORA__UNUSED void qlora__save_add_moments(qlora__save_list* list, const char* name,
                                                  qlora__st_dtype dtype, const void* data,
                                                  int64_t count) {
    qlora__save_item* item = qlora__save_next(list, dtype, 1);
    snprintf(item->name, sizeof item->name, "%s", name);
    item->shape[0] = count;
    item->moments = data;
    item->size = (size_t)count * (dtype == QLORA__ST_F32 ? 4 : 1);
    list->longest = qlora__max(list->longest, count);
}

// Copies the contents of an item to host memory, unless they are there; returns their place.
static qlora_result qlora__save_fetch(qlora_ctx* ctx, const qlora__save_item* item, bool floats,
                                      float* values, const void** out) {
    int64_t n = (int64_t)(item->size / 4);
    *out = item->bytes;
    if (item->bytes != NULL || (item->arena == NULL && item->moments == NULL)) {
        return QLORA_OK;
    }
    *out = values;
    if (item->arena != NULL) {
        qlora_tensor window;
        qlora__arena_window(item->arena, item->at, 1, n, &window);
        QLORA__TRY(qlora__floats_out(ctx, window.data, n, values));
        for (int64_t i = 0; i < n && item->offset > 0.0f; i++) {
            values[i] -= item->offset;
        }
        if (item->experts > 0) {
            qlora__trained t;
            memset(&t, 0, sizeof t);
            t.experts = item->experts;
            t.rows = item->shape[0];
            t.cols = item->shape[1];
            return qlora__trained_mix(ctx, &t, true, values);
        }
        return QLORA_OK;
    }
    return floats ? qlora__floats_out(ctx, item->moments, n, values)
                  : qlora__copy_out(ctx, values, item->moments, item->size);
}

// Writes the list under the temporary name of its file, with only one tensor in host memory at a
// time. The file is on disk then, and *w can publish it.
static qlora_result qlora__save_prepare(qlora_ctx* ctx, const qlora__save_list* list,
                                        const char* path, const char* const* metadata,
                                        bool checksum, qlora__st_writer* w) {
    size_t room = (size_t)list->longest * 4;
    float* values = (float*)qlora__alloc(ctx, room + 4);
    if (values == NULL) {
        return QLORA_ERR_MEMORY;
    }
    qlora_result r =
        qlora__st_write_begin(&ctx->env, path, list->entries, list->count, metadata, checksum, w);
    bool begun = r == QLORA_OK;
    for (uint32_t i = 0; i < list->count && r == QLORA_OK; i++) {
        const qlora__save_item* item = &list->items[w->order[i]];
        const void* bytes = NULL;
        bool floats = list->entries[w->order[i]].dtype == QLORA__ST_F32;
        r = qlora__save_fetch(ctx, item, floats, values, &bytes);
        r = r == QLORA_OK ? qlora__st_write(&ctx->env, w, bytes, item->size) : r;
    }
    if (r == QLORA_OK) {
        r = qlora__st_write_finish(&ctx->env, w);
    } else if (begun) {
        qlora__st_write_abort(&ctx->env, w);
    }
    qlora__free(ctx, values, room + 4);
    return r;
}

// Writes the list as one file, atomically.
static QLORA__UNUSED qlora_result qlora__save_write(qlora_ctx* ctx, const qlora__save_list* list,
                                                    const char* path, const char* const* metadata,
                                                    bool checksum) {
    qlora__st_writer w;
    QLORA__TRY(qlora__save_prepare(ctx, list, path, metadata, checksum, &w));
    return qlora__st_write_publish(&ctx->env, &w);
}

// ---- PEFT folders -------------------------------------------------------------------------------

typedef struct qlora__module_name {
    char text[80];
} qlora__module_name;

// The contents of adapter_config.json and the memory that stores them.
typedef struct qlora__peft_tables {
    qlora__peft_desc desc;
    qlora__module_name* names;
    const char** targets;
    const char** parameters;
    qlora__peft_override* overrides;
    int64_t* layers;
    size_t modules;
    size_t layer_room;
    char pattern[192];
    const char** saved; // embedding and head up to three times, and norms
    qlora__module_name* norms;
    size_t saved_room;
} qlora__peft_tables;

#define QLORA__PEFT_SAVED 3

static void qlora__peft_tables_free(qlora_ctx* ctx, qlora__peft_tables* t) {
    qlora__free(ctx, t->names, t->modules * sizeof *t->names);
    qlora__free(ctx, t->targets, t->modules * sizeof *t->targets);
    qlora__free(ctx, t->parameters, t->modules * sizeof *t->parameters);
    qlora__free(ctx, t->overrides, t->modules * sizeof *t->overrides);
    qlora__free(ctx, t->layers, t->layer_room * sizeof *t->layers);
    qlora__free(ctx, t->saved, t->saved_room * sizeof *t->saved);
    qlora__free(ctx, t->norms, t->saved_room * sizeof *t->norms);
}

// The default rank and alpha of the adapter: those of the model desc if a module uses them,
// otherwise those of the first module.
static void qlora__adapter_defaults(const qlora_model* m, int64_t* rank, double* alpha) {
    bool found = false;
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        for (int u = 0; u < qlora__unit_count(&m->layers[l]); u++) {
            const qlora__projection* p =
                &m->layers[l].projections[qlora__unit_at(&m->layers[l], u)];
            float off = (float)p->alpha - m->desc.alpha;
            bool usual = p->rank == m->desc.rank && off <= 0.0f && off >= 0.0f;
            if (p->rank > 0 && (!found || usual)) {
                *rank = p->rank;
                *alpha = p->alpha;
                found = true;
            }
            if (p->rank > 0 && usual) {
                return;
            }
        }
    }
}

// The adapted modules of a layer, a bit each.
static uint32_t qlora__adapted_mask(const qlora_model* m, int64_t l) {
    const qlora__layer* layer = &m->layers[l];
    uint32_t mask = 0;
    for (int u = 0; u < qlora__unit_count(layer); u++) {
        int i = qlora__unit_at(layer, u);
        bool adapted = layer->projections[i].rank > 0 && !qlora__is_parameter(m, l, i);
        mask |= adapted ? 1u << qlora__row_of(layer, i)->bit : 0u;
    }
    return mask;
}

// What follows "layers.N." in a name.
static const char* qlora__name_in_layer(const char* name) {
    const char* at = strstr(name, "layers.");
    at = at != NULL ? strchr(at + 7, '.') : NULL;
    return at != NULL ? at + 1 : name;
}

// Fills target_parameters: the part of a name that is the same in all layers, if all layers that
// have it are adapted, or else full names.
static void qlora__peft_parameters(const qlora_model* m, qlora__peft_tables* t) {
    int64_t count = m->plan.config.layers * QLORA__UNITS;
    for (int64_t n = 0; n < count; n++) {
        const qlora__layer* layer = &m->layers[n / QLORA__UNITS];
        int i = qlora__unit_at(layer, (int)(n % QLORA__UNITS));
        if (t->names[n].text[0] == '\0' || layer->projections[i].rank == 0 ||
            !qlora__is_parameter(m, n / QLORA__UNITS, i)) {
            continue;
        }
        const char* name = qlora__name_in_layer(t->names[n].text);
        bool all = true;
        bool known = false;
        for (int64_t k = 0; k < count; k++) {
            const qlora__layer* other = &m->layers[k / QLORA__UNITS];
            bool same = strcmp(qlora__name_in_layer(t->names[k].text), name) == 0;
            int j = qlora__unit_at(other, (int)(k % QLORA__UNITS));
            all = all && (!same || other->projections[j].rank > 0);
            known = known || (same && k < n);
        }
        if (!all || !known) {
            t->parameters[t->desc.parameter_count++] = all ? name : t->names[n].text;
        }
    }
    t->desc.parameters = t->parameters;
}

// Fills target_modules and layers_to_transform: short names if every adapted layer has the same
// modules, otherwise the full name of each module. In a multimodal model, short names would also
// select modules of the vision part, so that a pattern replaces them.
static void qlora__peft_targets(const qlora_model* m, qlora__peft_tables* t) {
    uint32_t all = 0;
    bool uniform = true;
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        uint32_t mask = qlora__adapted_mask(m, l);
        if (mask != 0) {
            uniform = uniform && (all == 0 || all == mask);
            all |= mask;
            t->layers[t->desc.layer_count++] = l;
        }
    }
    bool wrapped = m->plan.config.wrapped;
    bool some = t->desc.layer_count < (uint32_t)m->plan.config.layers;
    // PEFT does not apply layers_to_transform to parameters, so that it is not written beside them.
    uniform = uniform && (!some || (!wrapped && t->desc.parameter_count == 0));
    for (int64_t l = 0; l < m->plan.config.layers && !uniform; l++) {
        for (int u = 0; u < qlora__unit_count(&m->layers[l]); u++) {
            int i = qlora__unit_at(&m->layers[l], u);
            if (m->layers[l].projections[i].rank > 0 && !qlora__is_parameter(m, l, i)) {
                t->targets[t->desc.target_count++] = t->names[l * QLORA__UNITS + u].text;
            }
        }
    }
    const qlora__layer* first = &m->layers[t->desc.layer_count > 0 ? t->layers[0] : 0];
    for (int u = 0; u < qlora__unit_count(first) && uniform; u++) {
        const qlora__projection_row* row = qlora__row_of(first, qlora__unit_at(first, u));
        if ((all >> row->bit & 1u) != 0) {
            t->targets[t->desc.target_count++] = strrchr(row->module, '.') + 1;
        }
    }
    if (!uniform || t->desc.layer_count == (uint32_t)m->plan.config.layers) {
        t->desc.layer_count = 0;
    }
    t->desc.layers = t->layers;
    t->desc.targets = t->targets;
    if (wrapped && uniform) {
        size_t used = 0;
        qlora__append(t->pattern, sizeof t->pattern, &used, ".*language_model.*\\.(");
        for (uint32_t i = 0; i < t->desc.target_count; i++) {
            qlora__append(t->pattern, sizeof t->pattern, &used, "%s%s", i > 0 ? "|" : "",
                          t->targets[i]);
        }
        qlora__append(t->pattern, sizeof t->pattern, &used, ")");
        t->desc.pattern = t->pattern;
    }
}

static void qlora__peft_overrides(const qlora_model* m, qlora__peft_tables* t) {
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        for (int u = 0; u < qlora__unit_count(&m->layers[l]); u++) {
            const qlora__projection* p =
                &m->layers[l].projections[qlora__unit_at(&m->layers[l], u)];
            bool other_alpha = p->alpha < t->desc.alpha || p->alpha > t->desc.alpha;
            if (p->rank > 0 && (p->rank != t->desc.rank || other_alpha)) {
                qlora__peft_override* o = &t->overrides[t->desc.override_count++];
                o->module = t->names[l * QLORA__UNITS + u].text;
                o->rank = p->rank != t->desc.rank ? p->rank : 0;
                o->alpha = other_alpha ? p->alpha : 0.0;
            }
        }
    }
    t->desc.overrides = t->overrides;
}

// The norms of modules_to_save: the last parts of their names, which are the same in every layer,
// and model.norm. In a multimodal model, whose vision part has norms as well, complete names.
static void qlora__peft_saved_norms(const qlora_model* m, qlora__peft_tables* t) {
    char name[192];
    char next[192];
    bool wrapped = m->plan.config.wrapped;
    uint32_t count = 0;
    for (int64_t i = 0; m->desc.train_norms && qlora__norm_name_at(m, i, name); i++) {
        name[strlen(name) - 7] = '\0'; // .weight
        bool last = !qlora__norm_name_at(m, i + 1, next);
        const char* shown = wrapped || last ? name : strrchr(name, '.') + 1;
        bool known = false;
        for (uint32_t k = 0; k < count && !known; k++) {
            known = strcmp(t->norms[k].text, shown) == 0;
        }
        if (!known) {
            snprintf(t->norms[count].text, sizeof t->norms[count].text, "%.79s", shown);
            t->saved[t->desc.saved_count++] = t->norms[count++].text;
        }
    }
}

// modules_to_save and trainable_token_indices, as PEFT writes them.
static void qlora__peft_saved(const qlora_model* m, qlora__peft_tables* t) {
    if (m->tables.saved_embed) {
        t->saved[t->desc.saved_count++] = "embed_tokens";
    }
    if (m->tables.saved_tied) {
        t->saved[t->desc.saved_count++] =
            m->plan.config.wrapped ? "model.language_model.embed_tokens" : "model.embed_tokens";
    }
    if (m->tables.saved_head) {
        t->saved[t->desc.saved_count++] = "lm_head";
    }
    qlora__peft_saved_norms(m, t);
    t->desc.saved = t->saved;
    t->desc.tied = m->tables.saved_tied;
    t->desc.token_rows = m->tables.token_ids;
    t->desc.token_row_count = (uint32_t)m->tables.token_count;
    t->desc.head_rows = m->tables.head_rows;
}

static qlora_result qlora__peft_describe(qlora_ctx* ctx, const qlora_model* m,
                                         const char* base_name, qlora__peft_tables* t) {
    memset(t, 0, sizeof *t);
    t->layer_room = (size_t)m->plan.config.layers;
    t->modules = t->layer_room * QLORA__UNITS;
    t->names = (qlora__module_name*)qlora__alloc_zero(ctx, t->modules * sizeof *t->names);
    t->targets =
        t->names == NULL ? NULL : (const char**)qlora__alloc(ctx, t->modules * sizeof *t->targets);
    t->parameters = t->targets == NULL
                        ? NULL
                        : (const char**)qlora__alloc(ctx, t->modules * sizeof *t->parameters);
    t->overrides =
        t->parameters == NULL
            ? NULL
            : (qlora__peft_override*)qlora__alloc_zero(ctx, t->modules * sizeof *t->overrides);
    t->layers = t->overrides == NULL
                    ? NULL
                    : (int64_t*)qlora__alloc(ctx, t->layer_room * sizeof *t->layers);
    t->saved_room = QLORA__PEFT_SAVED + t->layer_room * QLORA__NORMS + 2;
    t->saved = t->layers == NULL
                   ? NULL
                   : (const char**)qlora__alloc_zero(ctx, t->saved_room * sizeof *t->saved);
    t->norms = t->saved == NULL
                   ? NULL
                   : (qlora__module_name*)qlora__alloc_zero(ctx, t->saved_room * sizeof *t->norms);
    if (t->norms == NULL) {
        return QLORA_ERR_MEMORY;
    }
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        for (int u = 0; u < qlora__unit_count(&m->layers[l]); u++) {
            qlora__module_name* name = &t->names[l * QLORA__UNITS + u];
            qlora__module_of(m, l, qlora__unit_at(&m->layers[l], u), name->text, sizeof name->text);
        }
    }
    t->desc.base_name = base_name;
    t->desc.dropout = (double)m->desc.dropout;
    t->desc.rslora = m->desc.rslora;
    t->desc.dora = m->dora;
    qlora__peft_saved(m, t);
    qlora__adapter_defaults(m, &t->desc.rank, &t->desc.alpha);
    qlora__peft_parameters(m, t);
    qlora__peft_targets(m, t);
    qlora__peft_overrides(m, t);
    return QLORA_OK;
}

// Whether a file of a folder exists.
static qlora_result qlora__adapter_has(qlora_ctx* ctx, const char* dir, const char* name,
                                       bool* out) {
    char path[QLORA__PATH_ROOM];
    QLORA__TRY(qlora__path_join(&ctx->env, dir, name, path));
    return qlora__file_exists(&ctx->env, path, out);
}

// Removes a file of a folder if it exists, and waits until that is on disk.
static qlora_result qlora__adapter_retire(qlora_ctx* ctx, const char* dir, const char* name) {
    char path[QLORA__PATH_ROOM];
    bool exists = false;
    QLORA__TRY(qlora__path_join(&ctx->env, dir, name, path));
    QLORA__TRY(qlora__file_exists(&ctx->env, path, &exists));
    if (!exists) {
        return QLORA_OK;
    }
    int code = ctx->env.files.remove(path, ctx->env.files.user);
    return code == 0 ? qlora__dir_sync(&ctx->env, dir)
                     : qlora__fail(ctx, QLORA_ERR_FILE, "cannot remove %s: %s (%d)", path,
                                   qlora__errno_text(code), code);
}

// Whether adapter_config.json exists and has the text that would be written.
static qlora_result qlora__peft_config_stays(qlora_ctx* ctx, const char* dir,
                                             const qlora__peft_desc* desc, bool* out) {
    char path[QLORA__PATH_ROOM];
    *out = false;
    QLORA__TRY(qlora__adapter_has(ctx, dir, "adapter_config.json", out));
    if (!*out) {
        return QLORA_OK;
    }
    qlora__map map;
    qlora__string text;
    QLORA__TRY(qlora__path_join(&ctx->env, dir, "adapter_config.json", path));
    QLORA__TRY(qlora__map_open(&ctx->env, path, &map));
    qlora__string_begin(&ctx->env, &text);
    qlora__peft_write_text(&text, desc);
    *out = text.result == QLORA_OK && text.size == map.size && text.size > 0 &&
           memcmp(text.data, map.data, text.size) == 0;
    qlora_result r = text.result;
    qlora__string_free(&text);
    qlora__map_close(&ctx->env, &map);
    return r;
}

// Prepares adapter_model.safetensors with the matrices, or the file with the norms.
static qlora_result qlora__adapter_prepare(qlora_ctx* ctx, const qlora_model* m, const char* dir,
                                           bool norms, qlora__st_writer* w) {
    char path[QLORA__PATH_ROOM];
    qlora__save_list list;
    QLORA__TRY(qlora__path_join(&ctx->env, dir,
                                norms ? QLORA__NORMS_FILE : "adapter_model.safetensors", path));
    QLORA__TRY(qlora__save_open(ctx, m->range_count + 1, &list));
    qlora__trained t;
    for (int64_t i = 0; qlora__trained_at(m, i, &t); i++) {
        if (t.is_norm || !norms) {
            qlora__save_add(&list, norms ? "" : "base_model.model.", &m->parameters, &t);
        }
        if (t.experts > 0 && !norms) {
            list.items[list.count - 1].experts = t.experts;
        }
        if (t.is_norm && !norms) { // as the base stores it
            list.items[list.count - 1].offset = (float)m->plan.config.norm_offset;
        }
        if (!norms && m->tables.saved_tied && t.projection == NULL && t.at == m->tables.embed_at &&
            !t.is_norm) {
            snprintf(t.name, sizeof t.name, "lm_head.weight"); // the same values once more
            qlora__save_add(&list, "base_model.model.", &m->parameters, &t);
        }
    }
    // A model that does not train saves what it has loaded.
    bool loaded = m->trained_base[0] != '\0' && !qlora__trains(m);
    const char* metadata[7] = {NULL, NULL, NULL, NULL, NULL, NULL, NULL};
    int count = 0;
    const char* const pairs[3][2] = {
        {QLORA__BASE_KEY, loaded ? m->trained_base : qlora__base_name(m)},
        {QLORA__SCALE_KEY, m->rope_scale},
        {QLORA__LAYOUT_KEY, m->plan.config.experts > 0 ? "peft" : ""}};
    for (int i = 0; i < 3; i++) {
        if (pairs[i][1][0] != '\0') {
            metadata[count++] = pairs[i][0];
            metadata[count++] = pairs[i][1];
        }
    }
    qlora_result r =
        qlora__save_prepare(ctx, &list, path, !norms && count > 0 ? metadata : NULL, false, w);
    qlora__save_close(ctx, &list);
    return r;
}

// The files of an adapter that is being written: the matrices and the norms, complete under
// temporary names.
typedef struct qlora__adapter_files {
    qlora__st_writer writers[2];
    bool ready[2];
} qlora__adapter_files;

static const char* const qlora__adapter_names[2] = {"adapter_model.safetensors", QLORA__NORMS_FILE};

// Exchanges the files of a folder. As long as several of them change, there is no config, and
// without it the folder does not load: a crash leaves the old adapter, the new one, or none, but
// never a mixture. Where only the matrices change, one rename is enough.
static qlora_result qlora__adapter_publish(qlora_ctx* ctx, const char* dir,
                                           const qlora__peft_desc* desc, qlora__adapter_files* f) {
    bool stays = false;
    bool norms = false;
    bool lora = f->ready[0];
    if (lora) {
        QLORA__TRY(qlora__peft_config_stays(ctx, dir, desc, &stays));
        QLORA__TRY(qlora__adapter_has(ctx, dir, QLORA__NORMS_FILE, &norms));
    }
    bool alone = stays && !norms && !f->ready[1];
    if (!alone) {
        QLORA__TRY(qlora__adapter_retire(ctx, dir, "adapter_config.json"));
    }
    for (int i = 1; i >= 0; i--) {
        if (f->ready[i]) {
            f->ready[i] = false;
            QLORA__TRY(qlora__st_write_publish(&ctx->env, &f->writers[i]));
        } else {
            QLORA__TRY(qlora__adapter_retire(ctx, dir, qlora__adapter_names[i]));
        }
    }
    return lora && !alone ? qlora__peft_write_config(&ctx->env, dir, desc) : QLORA_OK;
}

// Writes an adapter folder, which is one unit. Trained norms are in PEFT's file, as the base stores
// them, and in a separate file, as exact factors; that of an earlier save is removed.
static qlora_result qlora__adapter_write(qlora_ctx* ctx, const qlora_model* m, const char* dir,
                                         const char* base_name) {
    qlora__peft_tables tables;
    qlora__adapter_files files;
    const bool wanted[2] = {qlora__has_lora(m), m->desc.train_norms};
    memset(&files, 0, sizeof files);
    QLORA__TRY(qlora__dir_make(&ctx->env, dir));
    qlora_result r = qlora__peft_describe(ctx, m, base_name, &tables);
    for (int i = 0; i < 2 && r == QLORA_OK; i++) {
        if (wanted[i]) {
            r = qlora__adapter_prepare(ctx, m, dir, i == 1, &files.writers[i]);
            files.ready[i] = r == QLORA_OK;
            if (files.ready[i] && i == 0) {
                r = qlora__check_experts(ctx, m, files.writers[i].out.temporary);
            }
        }
    }
    if (r == QLORA_OK) {
        r = qlora__adapter_publish(ctx, dir, &tables.desc, &files);
    }
    for (int i = 0; i < 2; i++) {
        if (files.ready[i]) {
            qlora__st_write_abort(&ctx->env, &files.writers[i]);
        }
    }
    qlora__peft_tables_free(ctx, &tables);
    return r;
}

static qlora_result qlora__adapter_need(qlora_ctx* ctx, const qlora_model* m, const char* path,
                                        bool norms_suffice) {
    if (path == NULL || path[0] == '\0') {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "the path is %s",
                           path == NULL ? "NULL" : "empty");
    }
    if (!qlora__has_lora(m) && !(norms_suffice && m->desc.train_norms)) {
        return qlora__fail(ctx, QLORA_ERR_STATE, "the model has no adapters");
    }
    return qlora__not_in_capture(ctx, "reading or writing an adapter");
}

static qlora_result qlora__adapter_desc_check(qlora_ctx* ctx, const qlora_adapter_desc* desc) {
    if (desc != NULL && (desc->reserved_must_be_zero0 != 0 || desc->reserved_must_be_zero1 != 0)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "the adapter desc was not zeroed before its fields were set");
    }
    return QLORA_OK;
}

static qlora_result qlora__adapter_save(qlora_ctx* ctx, qlora_model* m, const char* dir,
                                        const qlora_adapter_desc* desc) {
    QLORA__TRY(qlora__adapter_desc_check(ctx, desc));
    QLORA__TRY(qlora__adapter_need(ctx, m, dir, true));
    QLORA__TRY(qlora__model_settle(m));
    const char* base_name = desc != NULL ? desc->base_name : NULL;
    if (m->desc.train_norms && !qlora__has_lora(m)) {
        QLORA__LOG(ctx, WARN, CHECKPOINT,
                   "only norms are trained, without which matrices PEFT has no adapter: they are "
                   "in %s/%s, which PEFT does not read",
                   dir, QLORA__NORMS_FILE);
    }
    return qlora__adapter_write(ctx, m, dir, base_name != NULL ? base_name : m->dir);
}

qlora_result qlora_adapter_save(qlora_model* model, const char* dir,
                                const qlora_adapter_desc* desc) {
    qlora_ctx* ctx = qlora__model_ctx(model);
    QLORA__ENTER(ctx, "qlora_adapter_save");
    return qlora__leave(ctx, qlora__adapter_save(ctx, model, dir, desc));
}

static qlora_result qlora__adapter_load(qlora_ctx* ctx, qlora_model* m, const char* dir,
                                        const qlora_adapter_desc* desc) {
    QLORA__TRY(qlora__adapter_desc_check(ctx, desc));
    QLORA__TRY(qlora__model_idle(ctx, m, "loading an adapter"));
    QLORA__TRY(qlora__adapter_need(ctx, m, dir, true));
    return qlora__adapter_read(ctx, m, dir,
                               desc != NULL ? desc->expert_layout : QLORA_EXPERT_LAYOUT_AUTO);
}

qlora_result qlora_adapter_load(qlora_model* model, const char* dir,
                                const qlora_adapter_desc* desc) {
    qlora_ctx* ctx = qlora__model_ctx(model);
    QLORA__ENTER(ctx, "qlora_adapter_load");
    return qlora__leave(ctx, qlora__adapter_load(ctx, model, dir, desc));
}

// Graphs are not affected: those of updates belong to a trainer, and others need one adapter.
static qlora_result qlora__adapter_select(qlora_ctx* ctx, qlora_model* m, int64_t index) {
    QLORA__TRY(qlora__need_whole(ctx, "index", index, 0, m->adapters - 1));
    QLORA__TRY(qlora__model_idle(ctx, m, "selecting an adapter"));
    if (m->followers > 0 && index != m->chosen) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "the model has a text that uses the selected adapter, %d; end it with "
                           "qlora_generate_end before selecting another one, or begin such texts "
                           "with desc.adapters = QLORA_CHOICE_ON or QLORA_CHOICE_OFF",
                           (int)m->chosen);
    }
    m->chosen = (int32_t)index;
    qlora__adapter_focus(m, m->chosen);
    return QLORA_OK;
}

qlora_result qlora_adapter_select(qlora_model* model, int64_t index) {
    qlora_ctx* ctx = qlora__model_ctx(model);
    QLORA__ENTER(ctx, "qlora_adapter_select");
    return qlora__leave(ctx, qlora__adapter_select(ctx, model, index));
}

static qlora_result qlora__adapter_renew(qlora_ctx* ctx, qlora_model* m, uint64_t seed) {
    QLORA__TRY(qlora__model_idle(ctx, m, "renewing an adapter"));
    if (qlora__has_several(m) ? m->owns[m->adapter].trainers > 0 : m->trainers > 0) {
        return qlora__fail(ctx, QLORA_ERR_STATE,
                           "the adapter has a trainer; destroy it before renewing the adapter");
    }
    // What replaces weights of the base would start with its trained values.
    const char* fault = m->desc.train_norms         ? "the norms are trained"
                        : m->tables.token_count > 0 ? "rows of tokens are trained"
                        : m->tables.saved_embed     ? "the embedding is trained"
                        : m->tables.saved_head      ? "the head is trained"
                        : !qlora__computes(m)       ? "the model has no weights"
                                                    : NULL;
    if (fault != NULL) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED, "%s, so the adapter cannot be renewed",
                           fault);
    }
    m->adapter_seed = seed;
    QLORA__TRY(qlora__adapters_start(ctx, m));
    QLORA__TRY(qlora__parameters_changed(ctx, m));
    // The start above took DoRA's magnitudes with the old B, which was still in the shadow.
    QLORA__TRY(qlora__dora_refresh(ctx, m, true));
    return qlora__sync(ctx);
}

qlora_result qlora_adapter_renew(qlora_model* model, uint64_t seed) {
    qlora_ctx* ctx = qlora__model_ctx(model);
    QLORA__ENTER(ctx, "qlora_adapter_renew");
    return qlora__leave(ctx, qlora__adapter_renew(ctx, model, seed));
}

qlora_result qlora_adapter_use(qlora_model* model, bool on) {
    qlora_ctx* ctx = qlora__model_ctx(model);
    QLORA__ENTER(ctx, "qlora_adapter_use");
    qlora_result r = qlora__model_idle(ctx, model, "switching the adapters");
    if (r == QLORA_OK && model->use_adapters != on) {
        qlora__graphs_invalidate(ctx, 0, "adapters were switched on or off");
        model->use_adapters = on;
    }
    return qlora__leave(ctx, r);
}

// ---- from one model to another ------------------------------------------------------------------

// Checks what names and shapes of the trained tensors do not say.
static qlora_result qlora__adapter_compare_saved(qlora_ctx* ctx, const qlora_model* from,
                                                 const qlora_model* to) {
    // There are as many in `to`: the shapes are equal.
    for (int64_t i = 0; i < from->tables.token_count; i++) {
        if (from->tables.token_ids[i] != to->tables.token_ids[i]) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "token row %lld is %d in `from` but %d in `to`", (long long)i,
                               (int)from->tables.token_ids[i], (int)to->tables.token_ids[i]);
        }
    }
    if (from->tables.saved_tied != to->tables.saved_tied) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "the trained embedding is also the head in `%s` only",
                           from->tables.saved_tied ? "from" : "to");
    }
    return QLORA_OK;
}

// Checks that the two models have the same trained tensors; *same_places is set if they are also at
// the same offsets.
static qlora_result qlora__adapter_compare(qlora_ctx* ctx, const qlora_model* from,
                                           const qlora_model* to, bool* same_places) {
    qlora__trained a;
    qlora__trained b;
    *same_places = from->elements == to->elements;
    if (from->range_count != to->range_count) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "`from` has %lld trained tensors but `to` has %lld",
                           (long long)from->range_count, (long long)to->range_count);
    }
    for (int64_t i = 0; qlora__trained_at(from, i, &a) && qlora__trained_at(to, i, &b); i++) {
        if (strcmp(a.name, b.name) != 0 || a.rows != b.rows || a.cols != b.cols) {
            return qlora__fail(
                ctx, QLORA_ERR_ARGUMENT,
                "trained tensor %lld is %s [%lld, %lld] in `from` but %s [%lld, %lld] "
                "in `to`",
                (long long)i, a.name, (long long)a.rows, (long long)a.cols, b.name,
                (long long)b.rows, (long long)b.cols);
        }
        float scale = a.shadow_scale - b.shadow_scale;
        if (scale < 0.0f || scale > 0.0f) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "%s has scale %g in `from` but %g in `to`",
                               a.name, (double)a.shadow_scale, (double)b.shadow_scale);
        }
        *same_places = *same_places && a.at == b.at;
    }
    return qlora__adapter_compare_saved(ctx, from, to);
}

// Copies through host memory, because the models may be on different devices. ctx is the context of
// `to`.
static qlora_result qlora__adapter_carry(qlora_ctx* ctx, qlora_model* from, qlora_model* to) {
    size_t bytes = (size_t)from->elements * sizeof(float);
    float* values = (float*)qlora__alloc(ctx, bytes);
    qlora_result r = values != NULL ? QLORA_OK : QLORA_ERR_MEMORY;
    qlora__trained t;
    // Everything is read before anything is written, so that a failure leaves `to` as it was.
    for (int64_t i = 0; r == QLORA_OK && qlora__trained_at(from, i, &t); i++) {
        r = qlora_parameter_read(from, i, values + t.at);
        if (r != QLORA_OK && from->ctx != ctx) {
            r = qlora__fail(ctx, r, "%.400s", qlora_last_error(from->ctx));
        }
    }
    for (int64_t i = 0; r == QLORA_OK && qlora__trained_at(from, i, &t); i++) {
        qlora__trained target;
        if (qlora__trained_at(to, i, &target)) {
            qlora_tensor window;
            qlora__arena_window(&to->parameters, target.at, target.rows, target.cols, &window);
            r = qlora__trained_mix(ctx, &t, false, values + t.at);
            r = r == QLORA_OK
                    ? qlora__floats_in(ctx, window.data, target.rows * target.cols, values + t.at)
                    : r;
        }
    }
    qlora__free(ctx, values, bytes);
    return r;
}

static qlora_result qlora__adapter_copy(qlora_ctx* ctx, qlora_model* from, qlora_model* to) {
    bool same_places = false;
    if (from == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "from is NULL");
    }
    if (from == to) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__model_idle(ctx, to, "receiving an adapter"));
    QLORA__TRY(qlora__adapter_compare(ctx, from, to, &same_places));
    if (from->range_count == 0) {
        return QLORA_OK;
    }
    qlora_result settled = qlora__model_settle(from);
    if (settled != QLORA_OK) {
        return qlora__fail(ctx, settled, "the update of `from`: %.400s",
                           qlora__env_reason(&from->ctx->env));
    }
    if (from->ctx == ctx && same_places) {
        QLORA__TRY(qlora_scale(ctx, 1.0f, &from->parameters, &to->parameters));
    } else {
        QLORA__TRY(qlora__adapter_carry(ctx, from, to));
    }
    return qlora__parameters_changed(ctx, to);
}

qlora_result qlora_adapter_copy(qlora_model* from, qlora_model* to) {
    qlora_ctx* ctx = qlora__model_ctx(to);
    QLORA__ENTER(ctx, "qlora_adapter_copy");
    return qlora__leave(ctx, qlora__adapter_copy(ctx, from, to));
}

// ---- GGUF ---------------------------------------------------------------------------------------

// The row of the projection that a trained matrix belongs to.
static const qlora__projection_row* qlora__trained_row(const qlora_model* m,
                                                       const qlora__trained* t) {
    const qlora__layer* layer = &m->layers[t->layer];
    return qlora__row_of(layer, (int)(t->projection - layer->projections));
}

// Arranges B of one module: rows in the order of llama.cpp, multiplied by the ratio of the module's
// scale to that of the file.
static void qlora__gguf_arrange(const qlora_model* m, const qlora__trained* t, double file_alpha,
                                const float* in, float* out) {
    const qlora_model_config* c = &m->plan.config;
    bool rotated = qlora__trained_row(m, t)->rotated;
    double fold = qlora__gguf_fold((double)t->projection->scale, file_alpha, t->projection->rank);
    // The scale is a float: a ratio that differs from 1 only by rounding counts as 1.
    bool plain = fold > 1.0 - 1e-6 && fold < 1.0 + 1e-6;
    for (int64_t row = 0; row < t->rows; row++) {
        int64_t from = rotated ? qlora__gguf_source_row(m->arch, row, c->head_dim) : row;
        for (int64_t i = 0; i < t->cols; i++) {
            float x = in[from * t->cols + i];
            out[row * t->cols + i] = plain ? x : (float)((double)x * fold);
        }
    }
}

// The tensors that a trained matrix belongs to: two if the file splits what is one matrix for us.
static int qlora__trained_gguf(const qlora_model* m, const qlora__trained* t,
                               const char* names[2]) {
    const qlora__layer* layer = &m->layers[t->layer];
    const qlora__projection_row* row = qlora__trained_row(m, t);
    int number = (int)(t->projection - layer->projections);
    bool both = qlora__is_stack(layer, number) == 1 && row->gguf_second == NULL;
    names[0] = row->gguf;
    names[1] = both ? layer->layout->experts->rows[1].gguf : row->gguf_second;
    return names[1] != NULL ? 2 : 1;
}

// The experts that it has matrices of; 0 = it is one matrix.
static int64_t qlora__trained_experts(const qlora_model* m, const qlora__trained* t) {
    const qlora__layer* layer = &m->layers[t->layer];
    int number = (int)(t->projection - layer->projections);
    return qlora__is_stack(layer, number) != 0 ? m->plan.config.experts : 0;
}

// The tensors of the file. Where it splits a matrix that is one for us, both halves have the same A
// and each has its rows of B.
static uint32_t qlora__gguf_entries(const qlora_model* m, qlora__gguf_entry* entries) {
    qlora__trained t;
    uint32_t count = 0;
    for (int64_t i = 0; qlora__trained_at(m, i, &t); i++) {
        if (t.projection == NULL) {
            continue;
        }
        const char* names[2];
        int halves = qlora__trained_gguf(m, &t, names);
        int64_t experts = qlora__trained_experts(m, &t);
        int64_t each = experts > 0 ? experts : 1;
        for (int half = 0; half < halves; half++) {
            qlora__gguf_entry* e = &entries[count++];
            qlora__gguf_name(t.layer, names[half], t.is_b ? 'b' : 'a', e->name);
            e->rows = t.is_b ? t.rows / halves : t.rows / each;
            e->cols = t.is_b ? t.cols / each : t.cols;
            e->experts = experts;
        }
    }
    return count;
}

// The matrices of one tensor after the other. The halves of B follow each other, in every expert; A
// is the same in both.
static qlora_result qlora__gguf_save_one(qlora_ctx* ctx, const qlora_model* m,
                                         const qlora__trained* t, const float* values,
                                         qlora__gguf_writer* w) {
    const char* names[2];
    int halves = qlora__trained_gguf(m, t, names);
    int64_t experts = qlora__trained_experts(m, t);
    int64_t all = t->rows * t->cols;
    if (!t->is_b || halves == 1 || experts == 0) {
        for (int half = 0; half < (t->is_b ? 1 : halves); half++) {
            QLORA__TRY(qlora__gguf_write(&ctx->env, w, values, (size_t)all * 4));
        }
        return QLORA_OK;
    }
    int64_t part = all / experts / 2;
    for (int half = 0; half < 2; half++) {
        for (int64_t e = 0; e < experts; e++) {
            QLORA__TRY(
                qlora__gguf_write(&ctx->env, w, values + (2 * e + half) * part, (size_t)part * 4));
        }
    }
    return QLORA_OK;
}

// `buffers` has room for the longest tensor twice.
static qlora_result qlora__gguf_save_tensors(qlora_ctx* ctx, const qlora_model* m, double alpha,
                                             float* buffers, qlora__gguf_writer* w) {
    qlora__trained t;
    for (int64_t i = 0; qlora__trained_at(m, i, &t); i++) {
        if (t.projection == NULL) {
            continue;
        }
        qlora_tensor window;
        const float* values = buffers;
        qlora__arena_window(&m->parameters, t.at, t.rows, t.cols, &window);
        QLORA__TRY(qlora__floats_out(ctx, window.data, t.rows * t.cols, buffers));
        if (t.is_b) {
            qlora__gguf_arrange(m, &t, alpha, buffers, buffers + m->longest_range);
            values = buffers + m->longest_range;
        }
        QLORA__TRY(qlora__gguf_save_one(ctx, m, &t, values, w));
    }
    return QLORA_OK;
}

static qlora_result qlora__adapter_save_gguf(qlora_ctx* ctx, const qlora_model* m,
                                             const char* path) {
    QLORA__TRY(qlora__adapter_need(ctx, m, path, false));
    if (m->dora || m->desc.train_norms || m->tables.saved_embed || m->tables.saved_head ||
        m->tables.token_count > 0) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "a GGUF adapter cannot contain %s; merge the adapter instead",
                           m->dora               ? "the magnitudes of DoRA"
                           : m->desc.train_norms ? "trained norms"
                                                 : "trained embeddings or heads");
    }
    size_t entry_bytes = 2 * (size_t)m->range_count * sizeof(qlora__gguf_entry);
    size_t buffer_bytes = (size_t)m->longest_range * 2 * sizeof(float);
    qlora__gguf_entry* entries = (qlora__gguf_entry*)qlora__alloc(ctx, entry_bytes);
    float* buffers = entries != NULL ? (float*)qlora__alloc(ctx, buffer_bytes) : NULL;
    qlora_result r = buffers != NULL ? QLORA_OK : QLORA_ERR_MEMORY;
    if (r == QLORA_OK) {
        uint32_t count = qlora__gguf_entries(m, entries);
        int64_t rank = 0;
        double alpha = 0.0;
        qlora__gguf_writer w;
        qlora__adapter_defaults(m, &rank, &alpha);
        alpha = qlora__gguf_alpha(alpha, rank, m->desc.rslora);
        // llama.cpp compares the architecture with that of the base.
        r = qlora__gguf_begin(&ctx->env, path, qlora__arch_gguf(m->arch, &m->plan.config), alpha,
                              entries, count, &w);
        if (r == QLORA_OK) {
            r = qlora__gguf_save_tensors(ctx, m, alpha, buffers, &w);
            if (r == QLORA_OK) {
                r = qlora__gguf_commit(&ctx->env, &w);
            } else {
                qlora__gguf_abort(&ctx->env, &w);
            }
        }
    }
    qlora__free(ctx, buffers, buffer_bytes);
    qlora__free(ctx, entries, entry_bytes);
    return r;
}

qlora_result qlora_adapter_save_gguf(qlora_model* model, const char* path,
                                     const qlora_adapter_desc* desc) {
    qlora_ctx* ctx = qlora__model_ctx(model);
    QLORA__ENTER(ctx, "qlora_adapter_save_gguf");
    qlora_result r = qlora__adapter_desc_check(ctx, desc);
    r = r == QLORA_OK ? qlora__model_settle(model) : r;
    if (!QLORA__GGUF && r == QLORA_OK) {
        r = qlora__gguf_refuse(&ctx->env, path != NULL ? path : "path");
    }
    r = QLORA__GGUF && r == QLORA_OK ? qlora__adapter_save_gguf(ctx, model, path) : r;
    return qlora__leave(ctx, r);
}
