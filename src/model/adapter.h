// ---- reading adapters ---------------------------------------------------------------------------

// An adapter folder: PEFT's files and, if present, the exact factors of trained norms.
typedef struct qlora__adapter_source {
    const char* dir;
    const qlora__peft* peft; // own, or the one opened for the plan; NULL = none
    qlora__peft own;
    qlora__st norms;
    bool has_norms;
    int layout; // of the matrices of experts
} qlora__adapter_source;

static void qlora__adapter_source_close(qlora_ctx* ctx, qlora__adapter_source* s) {
    if (s->peft == &s->own) {
        qlora__peft_close(&ctx->env, &s->own);
    }
    if (s->has_norms) {
        qlora__st_close(&ctx->env, &s->norms);
    }
}

// Checks that the modules, ranks and scales of the folder are those of the model.
static qlora_result qlora__adapter_match(qlora_ctx* ctx, const qlora_model* m,
                                         const qlora__adapter_source* s) {
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        for (int u = 0; u < qlora__unit_count(&m->layers[l]); u++) {
            int i = qlora__unit_at(&m->layers[l], u);
            const qlora__projection* p = &m->layers[l].projections[i];
            char module[160];
            qlora__peft_module found;
            QLORA__TRY(qlora__adapter_unit(ctx, m, s->peft, l, i, &found));
            qlora__module_of(m, l, i, module, sizeof module);
            float scale = (float)found.scale;
            if (found.rank != p->rank) {
                return qlora__fail(ctx, QLORA_ERR_FORMAT,
                                   "%s: %s has rank %lld, but rank %lld in this model; open the "
                                   "model with desc.adapter",
                                   s->dir, module, (long long)found.rank, (long long)p->rank);
            }
            if (p->rank > 0 && (scale < p->scale || scale > p->scale)) {
                return qlora__fail(ctx, QLORA_ERR_FORMAT,
                                   "%s: %s has scale %g, but scale %g in this model; open the "
                                   "model with desc.adapter",
                                   s->dir, module, found.scale, (double)p->scale);
            }
        }
    }
    return QLORA_OK;
}

// Checks that the folder trains the same magnitudes, matrices and rows as the model.
static qlora_result qlora__adapter_match_saved(qlora_ctx* ctx, const qlora_model* m,
                                               const qlora__adapter_source* s) {
    const qlora__peft* p = s->peft;
    bool shared = m->plan.config.tied && p->tied && p->saves_embed;
    bool same = p->token_rows == 0
                    ? m->tables.token_count == 0
                    : m->tables.token_count == (int64_t)p->json.tokens[p->token_rows].count;
    for (int64_t i = 0; i < m->tables.token_count && same; i++) {
        int64_t id = -1;
        qlora__json_int(&p->json, qlora__json_at(&p->json, p->token_rows, (uint32_t)i), &id);
        same = id == m->tables.token_ids[i];
    }
    same = same && p->head_rows == m->tables.head_rows;
    bool norms = p->saves_norms != 0 && !m->desc.train_norms;
    const char* other = norms                                                ? "modules_to_save"
                        : p->dora != m->dora                                 ? "use_dora"
                        : p->saves_embed != m->tables.saved_embed            ? "modules_to_save"
                        : (p->saves_head && !shared) != m->tables.saved_head ? "modules_to_save"
                        : shared != m->tables.saved_tied                     ? "ensure_weight_tying"
                        : !same ? "trainable_token_indices"
                                : NULL;
    return other == NULL ? QLORA_OK
                         : qlora__fail(ctx, QLORA_ERR_FORMAT,
                                       "%s: %s is not that of this model; open the model with "
                                       "desc.adapter",
                                       s->dir, other);
}

static qlora_result qlora__adapter_source_open(qlora_ctx* ctx, const qlora_model* m,
                                               const char* dir, qlora_expert_layout layout,
                                               qlora__adapter_source* s) {
    memset(s, 0, sizeof *s);
    s->dir = dir;
    qlora_result r = QLORA_OK;
    if (qlora__has_lora(m)) {
        if (m->source != NULL && m->source->has_peft) {
            s->peft = &m->source->peft;
        } else {
            r = qlora__peft_open(&ctx->env, dir, &s->own);
            s->peft = r == QLORA_OK ? &s->own : NULL;
            r = r == QLORA_OK ? qlora__adapter_all_used(ctx, m, s->peft) : r;
            r = r == QLORA_OK ? qlora__adapter_scale(ctx, m, s->peft) : r;
            r = r == QLORA_OK ? qlora__peft_copies_check(ctx, m, m->dir, s->peft) : r;
        }
        r = r == QLORA_OK ? qlora__adapter_match(ctx, m, s) : r;
        r = r == QLORA_OK ? qlora__adapter_match_saved(ctx, m, s) : r;
        if (r == QLORA_OK) {
            r = qlora__layout_find(ctx, m, s->peft, dir, (int)layout, &s->layout);
        }
    }
    char path[QLORA__PATH_ROOM];
    bool exists = false;
    r = r == QLORA_OK ? qlora__path_join(&ctx->env, dir, QLORA__NORMS_FILE, path) : r;
    r = r == QLORA_OK ? qlora__file_exists(&ctx->env, path, &exists) : r;
    if (r == QLORA_OK && exists && !m->desc.train_norms) {
        r = qlora__fail(ctx, QLORA_ERR_FORMAT,
                        "%s holds trained norms, which belong to the adapter; open the model with "
                        "desc.train_norms",
                        path);
    } else if (r == QLORA_OK && exists) {
        r = qlora__st_open(&ctx->env, path, &s->norms);
        s->has_norms = r == QLORA_OK;
    }
    if (r != QLORA_OK) {
        qlora__adapter_source_close(ctx, s);
    }
    return r;
}

// Finds a whole trained matrix in the folder. A tied head is there twice, with equal values.
static qlora_result qlora__adapter_saved(qlora_ctx* ctx, const qlora_model* m,
                                         const qlora__adapter_source* s, const qlora__trained* t,
                                         const qlora__st_tensor** out) {
    char name[224];
    const qlora__st_tensor* twin = NULL;
    snprintf(name, sizeof name, "base_model.model.%s", t->name);
    QLORA__TRY(qlora__folder_need(&ctx->env, &s->peft->tensors, name, t->rows, t->cols, out));
    if (!qlora__st_is_float(*out)) {
        return qlora__fail(ctx, QLORA_ERR_FORMAT, "%s: %s is not floating-point", s->dir, name);
    }
    if (m->tables.saved_tied && t->at == m->tables.embed_at) {
        twin = qlora__folder_find(&s->peft->tensors, "base_model.model.lm_head.weight");
    }
    if (twin != NULL && (twin->bytes != (*out)->bytes ||
                         memcmp(twin->data, (*out)->data, (size_t)twin->bytes) != 0)) {
        return qlora__fail(ctx, QLORA_ERR_FORMAT,
                           "%s: lm_head.weight and embed_tokens.weight differ, but "
                           "ensure_weight_tying is set",
                           s->dir);
    }
    return QLORA_OK;
}

// A norm of PEFT's file must have the value of its exact factor.
static qlora_result qlora__adapter_same_norm(qlora_ctx* ctx, const qlora_model* m,
                                             const qlora__adapter_source* s,
                                             const qlora__st_tensor* exact,
                                             const qlora__st_tensor* stored) {
    float offset = (float)m->plan.config.norm_offset;
    bool same = exact->shape[0] == stored->shape[0];
    for (int64_t i = 0; same && i < exact->shape[0]; i++) {
        float x = 0.0f;
        float y = 0.0f;
        qlora__st_read_f32(exact, (uint64_t)i, 1, &x);
        qlora__st_read_f32(stored, (uint64_t)i, 1, &y);
        x -= offset;
        same = x <= y && x >= y;
    }
    return same ? QLORA_OK
                : qlora__fail(ctx, QLORA_ERR_FORMAT,
                              "%s: %s of adapter_model.safetensors is not that of %s; if the "
                              "former is newer, remove the latter",
                              s->dir, stored->name, QLORA__NORMS_FILE);
}

// Finds a norm in the folder: its factor or what the base stores in its place; NULL if the folder
// has none. *offset is added to the values.
static qlora_result qlora__adapter_norm(qlora_ctx* ctx, const qlora_model* m,
                                        const qlora__adapter_source* s, const qlora__trained* t,
                                        const qlora__st_tensor** out, float* offset) {
    const qlora__st_tensor* exact = s->has_norms ? qlora__st_find(&s->norms, t->name) : NULL;
    const qlora__st_tensor* stored = NULL;
    if (s->has_norms && exact == NULL) {
        return qlora__fail(ctx, QLORA_ERR_FORMAT, "%s/%s: %s is missing", s->dir, QLORA__NORMS_FILE,
                           t->name);
    }
    if (s->peft != NULL && s->peft->saves_norms != 0 &&
        qlora__peft_saves_norm(s->peft, t->name, strlen(t->name) - 7)) {
        char name[224];
        snprintf(name, sizeof name, "base_model.model.%s", t->name);
        QLORA__TRY(qlora__folder_need(&ctx->env, &s->peft->tensors, name, t->cols, -1, &stored));
    }
    const qlora__st_tensor* both[2] = {exact, stored};
    for (int i = 0; i < 2; i++) {
        if (both[i] != NULL &&
            (!qlora__st_is_float(both[i]) || both[i]->rank != 1 || both[i]->shape[0] != t->cols)) {
            return qlora__fail(ctx, QLORA_ERR_FORMAT,
                               "%s/%s: %s is not a vector of %lld floating-point numbers", s->dir,
                               i == 0 ? QLORA__NORMS_FILE : "adapter_model.safetensors",
                               both[i]->name, (long long)t->cols);
        }
    }
    *out = exact != NULL ? exact : stored;
    *offset = exact != NULL ? 0.0f : (float)m->plan.config.norm_offset;
    return exact != NULL && stored != NULL ? qlora__adapter_same_norm(ctx, m, s, exact, stored)
                                           : QLORA_OK;
}

// Finds a trained tensor in the folder; NULL for a norm if the folder does not have it. *offset is
// added to its values.
static qlora_result qlora__adapter_tensor(qlora_ctx* ctx, const qlora_model* m,
                                          const qlora__adapter_source* s, const qlora__trained* t,
                                          const qlora__st_tensor** out, float* offset) {
    *out = NULL;
    *offset = 0.0f;
    if (t->is_norm) {
        return qlora__adapter_norm(ctx, m, s, t, out, offset);
    }
    if (t->projection == NULL) {
        return qlora__adapter_saved(ctx, m, s, t, out);
    }
    char module[192];
    qlora__peft_module found;
    int number = (int)(t->projection - m->layers[t->layer].projections);
    if (qlora__is_parameter(m, t->layer, number)) {
        char name[224];
        bool exchanged = qlora__is_stack(&m->layers[t->layer], number) != 0 &&
                         s->layout == QLORA_EXPERT_LAYOUT_PEFT_018;
        snprintf(name, sizeof name, "base_model.model.%s", t->name);
        if (exchanged) { // A is B, transposed
            name[strlen(name) - 8] = t->is_b ? 'A' : 'B';
        }
        return qlora__folder_need(&ctx->env, &s->peft->tensors, name, exchanged ? t->cols : t->rows,
                                  exchanged ? t->rows : t->cols, out);
    }
    const char* end = t->is_magnitude ? ".lora_magnitude_vector" : ".lora_A.weight";
    snprintf(module, sizeof module, "%.*s", (int)(strlen(t->name) - strlen(end)), t->name);
    QLORA__TRY(qlora__peft_find(&ctx->env, s->peft, module, t->projection->out, t->projection->in,
                                &found));
    *out = t->is_magnitude ? found.m : t->is_b ? found.b : found.a;
    if (t->is_magnitude && !qlora__st_is_float(*out)) {
        return qlora__fail(ctx, QLORA_ERR_FORMAT, "%s: %s is not floating-point", s->dir, t->name);
    }
    return QLORA_OK;
}

// Whether a trained tensor belongs to experts that are modules with numbers in the folder.
static bool qlora__adapter_is_numbered(const qlora_model* m, const qlora__adapter_source* s,
                                       const qlora__trained* t) {
    if (t->projection == NULL || s->peft == NULL || !s->peft->numbered) {
        return false;
    }
    const qlora__layer* layer = &m->layers[t->layer];
    return qlora__is_stack(layer, (int)(t->projection - layer->projections)) != 0;
}

// Reads the values of a trained tensor, in the order that they have in memory; *found is false if
// the folder does not have it. With `values` NULL, only checks.
static qlora_result qlora__adapter_values(qlora_ctx* ctx, const qlora_model* m,
                                          const qlora__adapter_source* s, const qlora__trained* t,
                                          float* values, bool* found) {
    const qlora__st_tensor* tensor = NULL;
    float offset = 0.0f;
    *found = true;
    if (qlora__adapter_is_numbered(m, s, t)) {
        return qlora__numbered_read(ctx, m, s->peft, t, values);
    }
    QLORA__TRY(qlora__adapter_tensor(ctx, m, s, t, &tensor, &offset));
    *found = tensor != NULL;
    if (tensor == NULL || values == NULL) {
        return QLORA_OK;
    }
    qlora__st_read_f32(tensor, 0, (uint64_t)(t->rows * t->cols), values);
    for (int64_t k = 0; k < t->cols && t->is_norm; k++) {
        values[k] += offset;
    }
    int number = t->projection != NULL ? (int)(t->projection - m->layers[t->layer].projections) : 0;
    bool stack = t->projection != NULL && qlora__is_stack(&m->layers[t->layer], number) != 0;
    return stack ? qlora__layout_arrange(ctx, m, t, s->layout, values) : QLORA_OK;
}

// Reads the adapter weights of a folder. Everything is checked before anything is changed.
static qlora_result qlora__adapter_read(qlora_ctx* ctx, qlora_model* m, const char* dir,
                                        qlora_expert_layout layout) {
    qlora__adapter_source source;
    QLORA__TRY(qlora__adapter_source_open(ctx, m, dir, layout, &source));
    size_t room = (size_t)qlora__max(m->longest_range, m->plan.config.hidden) * 4;
    float* values = (float*)qlora__alloc(ctx, room);
    qlora_result r = values != NULL ? QLORA_OK : QLORA_ERR_MEMORY;
    qlora__trained t;
    bool found = false;
    for (int64_t i = 0; r == QLORA_OK && qlora__trained_at(m, i, &t); i++) {
        r = qlora__adapter_values(ctx, m, &source, &t, NULL, &found);
    }
    for (int64_t i = 0; r == QLORA_OK && qlora__trained_at(m, i, &t); i++) {
        r = qlora__adapter_values(ctx, m, &source, &t, values, &found);
        if (r == QLORA_OK && found) {
            qlora_tensor window;
            qlora__arena_window(&m->parameters, t.at, t.rows, t.cols, &window);
            r = qlora__floats_in(ctx, window.data, t.rows * t.cols, values);
        }
    }
    qlora__free(ctx, values, room);
    if (r == QLORA_OK) {
        qlora__trained_base_read(m, source.peft);
    }
    qlora__adapter_source_close(ctx, &source);
    QLORA__TRY(r);
    return qlora__parameters_changed(ctx, m);
}
