// ---- the files of a model -----------------------------------------------------------------------

static void qlora__source_close(qlora_model* m) {
    qlora__source* source = m->source;
    if (source != NULL && source->has_peft) {
        qlora__peft_close(&m->ctx->env, &source->peft);
    }
    if (source != NULL && source->has_folder) {
        qlora__folder_close(&m->ctx->env, &source->folder);
    }
    qlora__free(m->ctx, source, source != NULL ? sizeof *source : 0);
    m->source = NULL;
}

// What a model that was opened still needs: the files that its weights are mapped from.
static void qlora__source_settle(qlora_model* m) {
    if (m->plan.mapped == 0) {
        qlora__source_close(m);
        return;
    }
    qlora__source* source = m->source;
    if (source->has_peft) {
        qlora__peft_close(&m->ctx->env, &source->peft);
        source->has_peft = false;
    }
    qlora__folder_cache* cache = source->folder.cache;
    if (cache != NULL) { // values that were converted
        qlora__env_free(&m->ctx->env, cache->data, cache->bytes);
        cache->data = NULL;
        cache->bytes = 0;
    }
}

// Whether the folder has weights, or is a GGUF file.
static qlora_result qlora__source_exists(qlora_ctx* ctx, const char* dir, bool* exists) {
    static const char* const names[] = {"model.safetensors", "model.safetensors.index.json"};
    *exists = qlora__gguf_path(dir);
    for (size_t i = 0; i < sizeof names / sizeof names[0] && !*exists; i++) {
        char path[QLORA__PATH_ROOM];
        QLORA__TRY(qlora__path_join(&ctx->env, dir, names[i], path));
        QLORA__TRY(qlora__file_exists(&ctx->env, path, exists));
    }
    return QLORA_OK;
}

// The folder with the weights, opened when it is first needed.
static qlora_result qlora__source_folder(qlora_ctx* ctx, qlora_model* m, const char* dir,
                                         const qlora__folder** out) {
    if (!m->source->has_folder) {
        QLORA__TRY(qlora__folder_open(&ctx->env, dir, &m->source->folder));
        m->source->has_folder = true;
    }
    *out = &m->source->folder;
    return QLORA_OK;
}

// ---- where weights are in the files -------------------------------------------------------------

// The rows of one expert in a tensor of all of them.
static qlora_result qlora__stacked_source(qlora_ctx* ctx, const qlora__folder* folder,
                                          const qlora_model* m, int64_t l, int i,
                                          qlora__weight_source* out) {
    const qlora__layer* layer = &m->layers[l];
    const qlora__projection* p = &layer->projections[i];
    const qlora__expert_rows* experts = layer->layout->experts;
    int number = (i - qlora__first_expert(layer->layout)) % experts->count;
    const qlora__st_tensor* all = NULL;
    char name[192];
    for (int k = 0; k < 2 && all == NULL && experts->stacked[number].names[k] != NULL; k++) {
        snprintf(name, sizeof name, "model.layers.%lld.%s", (long long)l,
                 experts->stacked[number].names[k]);
        all = qlora__folder_find(folder, name);
    }
    if (all == NULL) {
        return QLORA_OK;
    }
    int64_t parts = 1; // matrices of an expert that follow each other in it
    for (int k = 0; k < experts->count && experts->count > 2; k++) {
        parts = k != number &&
                        strcmp(experts->stacked[k].names[0], experts->stacked[number].names[0]) == 0
                    ? 2
                    : parts;
    }
    int64_t shape[3] = {m->plan.config.experts, parts * p->out, p->in};
    char have[96];
    char want[96];
    if (!qlora__st_is_float(all) || all->rank != 3 ||
        memcmp(all->shape, shape, sizeof shape) != 0) {
        return qlora__fail(ctx, QLORA_ERR_FORMAT,
                           "%s: %s has dtype %s and shape %s; expected F32, BF16 or F16 and %s",
                           folder->dir, name, qlora__st_dtypes[all->dtype].name,
                           qlora__shape_text(all->shape, all->rank, have),
                           qlora__shape_text(shape, 3, want));
    }
    uint64_t bytes = (uint64_t)(p->out * p->in) * (qlora__st_dtypes[all->dtype].bits / 8);
    uint64_t at = (uint64_t)(qlora__expert_of(layer, i) * parts + experts->stacked[number].row);
    out->slice = *all;
    out->shape[0] = p->out;
    out->shape[1] = p->in;
    out->slice.rank = 2;
    out->slice.shape = out->shape;
    if (all->view != NULL) { // all of an expert
        out->view = *all->view;
        out->view.first = (int64_t)at * (p->out / out->view.count);
        out->view.rows = p->out;
        out->slice.view = &out->view;
    } else {
        out->slice.data = all->data + at * bytes;
    }
    out->slice.bytes = bytes;
    out->linear.weight = &out->slice;
    out->linear.rows = p->out;
    out->linear.cols = p->in;
    out->linear.dtype = qlora__st_dtype_of(all);
    return QLORA_OK;
}

// Finds the weight of a projection, which may be a part of the tensor of all experts.
static qlora_result qlora__projection_source(qlora_ctx* ctx, const qlora__folder* folder,
                                             const qlora_model* m, int64_t l, int i,
                                             qlora__weight_source* out) {
    const qlora__projection* p = &m->layers[l].projections[i];
    char name[192];
    memset(out, 0, sizeof *out);
    qlora__base_weight(m, l, i, ".weight", name, sizeof name);
    if (qlora__expert_of(&m->layers[l], i) >= 0 && qlora__folder_find(folder, name) == NULL) {
        QLORA__TRY(qlora__stacked_source(ctx, folder, m, l, i, out));
        if (out->linear.weight != NULL) {
            return QLORA_OK;
        }
    }
    return qlora__folder_linear(&ctx->env, folder, name, p->out, p->in, &out->linear);
}

// ---- weights that are used where their file is mapped -------------------------------------------

// On the CPU, weights that a file has in f32, bf16 or f16 are not copied: products convert them
// while they read them. The model then keeps the files mapped.
static bool qlora__maps_weights(const qlora_ctx* ctx, const qlora_model_desc* desc,
                                const qlora_plan_desc* machine) {
    return qlora__on_cpu(ctx) && machine->capability == 0 && desc->dir != NULL &&
           desc->base != QLORA_BASE_32BIT && desc->purpose != QLORA_PURPOSE_ADAPTER;
}

// Sets `out` if the tensor is a matrix of this size whose values can be read where they are.
static void qlora__map_weight(const qlora__folder* folder, const char* name, int64_t rows,
                              int64_t cols, qlora_model* m, qlora__mapped* out) {
    const qlora__st_tensor* t = qlora__folder_find(folder, name);
    bool fits =
        t != NULL && t->rank == 2 && t->shape[0] == rows && t->shape[1] == cols &&
        (t->dtype == QLORA__ST_F32 || t->dtype == QLORA__ST_BF16 || t->dtype == QLORA__ST_F16);
    if (!fits) {
        return; // a wrong size is reported when the weights are loaded
    }
    qlora_dtype dtype = qlora__st_dtype_of(t);
    size_t size = dtype == QLORA_F32 ? 4 : 2;
    const uint8_t* data = t->data;
    // A GGUF file may store it in blocks or in another order.
    if (QLORA__GGUF && t->view != NULL) {
        const qlora__gguf_type* type = t->view->parts[0]->type;
        bool plain = qlora__gguf_view_is_plain(t->view) && type->block == 1 && type->bytes == size;
        data = plain ? qlora__gguf_view_bytes(t->view, 0) : NULL;
    }
    if (data == NULL || (uintptr_t)data % size != 0 ||
        (dtype == QLORA_F32 && sizeof(QLORA__REAL) != 4)) {
        return;
    }
    out->data = data;
    out->dtype = dtype;
    m->plan.mapped += (uint64_t)rows * (uint64_t)cols * size;
}

static qlora_result qlora__map_weights(qlora_ctx* ctx, const char* dir, qlora_model* m) {
    const qlora_model_config* c = &m->plan.config;
    const qlora__folder* folder = NULL;
    bool exists = false;
    QLORA__TRY(qlora__source_exists(ctx, dir, &exists));
    if (!exists) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__source_folder(ctx, m, dir, &folder));
    // Trained rows are written into the embedding, and trained copies start from it.
    bool frozen = !m->tables.saved_embed && !m->tables.saved_head && m->tables.token_count == 0;
    if (frozen) {
        qlora__map_weight(folder, "model.embed_tokens.weight", c->vocab, c->hidden, m,
                          &m->base.embed_mapped);
    }
    if (frozen && !c->tied && !m->base.head_is_nf4) {
        qlora__map_weight(folder, "lm_head.weight", c->vocab, c->hidden, m, &m->base.head_mapped);
    }
    for (int64_t l = 0; l < c->layers; l++) {
        for (int i = 0; i < m->layers[l].count; i++) {
            qlora__projection* p = &m->layers[l].projections[i];
            char name[192];
            qlora__base_weight(m, l, i, ".weight", name, sizeof name);
            // DoRA adds adapters to a copy of the weight; experts may be part of a tensor.
            if (!qlora__is_coded(p) && !m->dora && qlora__expert_of(&m->layers[l], i) < 0) {
                qlora__map_weight(folder, name, p->out, p->in, m, &p->mapped);
            }
        }
    }
    return QLORA_OK;
}
