// ---- what is trained ----------------------------------------------------------------------------

#define QLORA__MAX_VOCAB (1 << 24)

// A new adapter on the modules that the desc names.
static void qlora__adapter_new(const qlora_model* m, int bit, qlora__projection* p) {
    if (m->desc.rank > 0 && (m->desc.targets >> bit & 1u) != 0) {
        p->rank = m->desc.rank;
        p->alpha = (double)m->desc.alpha;
        double divisor = m->desc.rslora ? sqrt((double)p->rank) : (double)p->rank;
        p->scale = (float)(p->alpha / divisor);
    }
}

// Of what is a parameter, target_modules must not name the module: PEFT would make something else
// of it, as it does of the names that transformers 4 had for experts.
static qlora_result qlora__adapter_not_module(qlora_ctx* ctx, const qlora_model* m,
                                              const qlora__peft* peft, int64_t layer, int i) {
    const qlora__expert_rows* rows = m->arch->experts->experts;
    char module[160];
    qlora__peft_module found;
    if (!rows->converts) {
        return QLORA_OK;
    }
    int last = i + (qlora__is_stack(&m->layers[layer], i) == 1 ? rows->count - 2 : 0);
    memset(&found, 0, sizeof found);
    for (int k = i; k <= last && found.rank == 0; k++) {
        qlora__base_module(m, layer, k, module, sizeof module);
        QLORA__TRY(qlora__peft_lookup(&ctx->env, peft, module, &found));
    }
    return found.rank == 0
               ? QLORA_OK
               : qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                             "%s: target_modules selects %s, which PEFT 0.21 gives to the experts "
                             "as transformers 5 has them; load the adapter with it and save it "
                             "again",
                             peft->path, module);
}

// What an adapter folder has of a unit of a layer. Of a parameter, only rank and scale.
static qlora_result qlora__adapter_unit(qlora_ctx* ctx, const qlora_model* m,
                                        const qlora__peft* peft, int64_t layer, int i,
                                        qlora__peft_module* out) {
    const qlora__projection* p = &m->layers[layer].projections[i];
    char module[160];
    memset(out, 0, sizeof *out);
    qlora__module_of(m, layer, i, module, sizeof module);
    if (!qlora__is_parameter(m, layer, i)) {
        return qlora__peft_find(&ctx->env, peft, module, p->out, p->in, out);
    }
    if (peft->numbered && qlora__is_stack(&m->layers[layer], i) != 0) {
        return qlora__numbered_unit(ctx, m, peft, layer, i, out);
    }
    if (peft->numbered) { // a module then, and a parameter now
        qlora__matrices_of(m, layer, i, module, sizeof module);
        return qlora__peft_lookup(&ctx->env, peft, module, out);
    }
    QLORA__TRY(qlora__adapter_not_module(ctx, m, peft, layer, i));
    return qlora__peft_parameter(&ctx->env, peft, module, out);
}

// Gives the adapters of all experts the rank and scale of the first one.
static void qlora__adapter_spread(qlora__layer* layer, int i) {
    int stack = qlora__is_stack(layer, i);
    const qlora__projection* p = &layer->projections[i];
    int count = stack != 0 ? layer->layout->experts->count : 0;
    for (int k = i; stack != 0 && k < layer->count; k++) {
        bool same = stack == 1 ? (k - i) % count < count - 1 : (k - i) % count == 0;
        if (same) {
            layer->projections[k].rank = p->rank;
            layer->projections[k].alpha = p->alpha;
            layer->projections[k].scale = p->scale;
        }
    }
}

// Rank and scale of a module in an adapter folder.
static qlora_result qlora__adapter_found(qlora_ctx* ctx, const qlora_model* m, int64_t layer,
                                         int number, qlora__projection* p) {
    const qlora__peft* peft = &m->source->peft;
    qlora__peft_module found;
    QLORA__TRY(qlora__adapter_unit(ctx, m, peft, layer, number, &found));
    p->rank = found.rank;
    p->alpha = found.alpha;
    p->scale = (float)found.scale;
    return QLORA_OK;
}

// Refuses matrices of a unit that adapter_config.json does not adapt: patterns of a multimodal
// model may be written for its older names, and a parameter is not a module.
static qlora_result qlora__adapter_not_left(qlora_ctx* ctx, const qlora_model* m, int64_t l,
                                            int number) {
    const qlora__peft* peft = &m->source->peft;
    const qlora__layer* layer = &m->layers[l];
    char module[160];
    char key[320];
    // One parameter of experts alone has the name of the other one.
    bool other = qlora__is_stack(layer, number) == 2 &&
                 layer->projections[qlora__first_expert(layer->layout)].rank > 0;
    if (layer->projections[number].rank > 0 || other) {
        return QLORA_OK;
    }
    qlora__matrices_of(m, l, number, module, sizeof module);
    QLORA__TRY(qlora__peft_key(&ctx->env, module, 'A', key));
    return qlora__folder_find(&peft->tensors, key) == NULL
               ? QLORA_OK
               : qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                             "%s has matrices for %s, but %s of adapter_config.json does not "
                             "match this name",
                             peft->tensors.dir, module,
                             qlora__is_parameter(m, l, number) ? "target_parameters"
                                                               : "target_modules");
}

// The exact factors of trained norms, beside PEFT's files: there, families that store norms minus 1
// round what was trained. Without matrices, which PEFT needs, it is the only file.
#define QLORA__NORMS_FILE "trained_norms.safetensors"

// The name of a norm in the base: number `norm` of a layer, or, for layer -1, the last one.
static void qlora__norm_name(const qlora_model* m, int64_t layer, int norm, char out[192]) {
    const qlora_model_config* c = &m->plan.config;
    const char* wrapper = c->wrapped ? "language_model." : "";
    if (layer < 0) {
        snprintf(out, 192, "model.%snorm.weight", wrapper);
    } else {
        snprintf(out, 192, "model.%slayers.%lld.%s.weight", wrapper, (long long)layer,
                 qlora__arch_norm(m->arch, c, norm));
    }
}

// The name of norm number `index` of the model; false past the last one.
static bool qlora__norm_name_at(const qlora_model* m, int64_t index, char out[192]) {
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        for (int i = 0; i < QLORA__NORMS; i++) {
            if (qlora__has_norm(m, i) && index-- == 0) {
                qlora__norm_name(m, l, i, out);
                return true;
            }
        }
    }
    qlora__norm_name(m, -1, 0, out);
    return index == 0;
}

// Whether a name, without what precedes "layers.", is that of a norm.
static bool qlora__names_norm(const qlora_model* m, const char* plain) {
    char name[192];
    for (int64_t i = 0; qlora__norm_name_at(m, i, name); i++) {
        if (strcmp(qlora__plain_name(name), plain) == 0) {
            return true;
        }
    }
    return false;
}

// Every matrix of an adapter folder must belong to a module of the model: what is not used would
// change the results in PEFT. Those of a vision part are left out, with a message: it is not run.
static qlora_result qlora__adapter_all_used(qlora_ctx* ctx, const qlora_model* m,
                                            const qlora__peft* peft) {
    static const char* const vision[] = {"vision_tower.", "visual.", "multi_modal_projector."};
    uint32_t left_out = 0;
    for (uint32_t i = 0; i < peft->tensors.count; i++) {
        const char* name = peft->tensors.entries[i].name;
        bool known = false;
        for (size_t k = 0; k < sizeof vision / sizeof vision[0] && m->plan.config.wrapped; k++) {
            known = known || strncmp(name, vision[k], strlen(vision[k])) == 0;
        }
        left_out += known ? 1u : 0u;
        known = known ||
                ((m->tables.saved_embed || m->tables.saved_tied) &&
                 strcmp(name, "embed_tokens.weight") == 0) ||
                ((m->tables.saved_head || m->tables.saved_tied) &&
                 strcmp(name, "lm_head.weight") == 0) ||
                (m->tables.token_count > 0 &&
                 strcmp(name, "embed_tokens.token_adapter.trainable_tokens_delta") == 0) ||
                (m->tables.head_rows &&
                 strcmp(name, "lm_head.token_adapter.trainable_tokens_delta") == 0) ||
                (peft->saves_norms != 0 && strstr(name, ".lora_") == NULL &&
                 qlora__names_norm(m, name)) ||
                qlora__is_peft_copy(m, name) || (peft->numbered && qlora__numbered_names(m, name));
        for (int64_t l = 0; l < m->plan.config.layers && !known; l++) {
            for (int u = 0; u < qlora__unit_count(&m->layers[l]) && !known; u++) {
                char module[160];
                qlora__matrices_of(m, l, qlora__unit_at(&m->layers[l], u), module, sizeof module);
                const char* plain = qlora__plain_name(module);
                size_t n = strlen(plain);
                known = strncmp(name, plain, n) == 0 &&
                        (strcmp(name + n, ".lora_A.weight") == 0 ||
                         strcmp(name + n, ".lora_B.weight") == 0 ||
                         strcmp(name + n, ".lora_magnitude_vector") == 0);
            }
        }
        if (!known) {
            return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                               "%s: %s does not belong to a projection of this model",
                               peft->tensors.dir, peft->tensors.entries[i].tensor->name);
        }
    }
    if (left_out > 0) {
        QLORA__LOG(ctx, WARN, MODEL, "%s: %u tensors of the vision part are not used",
                   peft->tensors.dir, left_out);
    }
    return QLORA_OK;
}

// The scaling of the rotation that an adapter was trained with is in the metadata of its file: PEFT
// and transformers take it from the config of the base, so that adapter_config.json has no place.
#define QLORA__SCALE_KEY "rope_scale"

static qlora_result qlora__adapter_scale(qlora_ctx* ctx, const qlora_model* m,
                                         const qlora__peft* peft) {
    char text[QLORA__SCALE_ROOM];
    if (peft->tensors.shard_count == 0 ||
        !qlora__st_metadata(&peft->tensors.shards[0], QLORA__SCALE_KEY, text, sizeof text) ||
        qlora__scale_is(&ctx->env, text, &m->plan.config)) {
        return QLORA_OK;
    }
    return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                       "%s: the adapter was trained with the scaling \"%s\" of the rotation; set "
                       "desc.rope_scale to it",
                       peft->tensors.dir, text);
}

// The same for the format of the base that it was trained on.
#define QLORA__BASE_KEY "base_format"

const char* qlora_base_format_name(qlora_base_format format) {
    static const char* const names[] = {"nf4", "16bit", "32bit", "fp8"};
    return (int)format >= 0 && format <= QLORA_BASE_FP8 ? names[format] : "unknown";
}

// The format of the projections; "" without weights.
static const char* qlora__base_name(const qlora_model* m) {
    if (!qlora__computes(m)) {
        return "";
    }
    bool half = m->desc.base == QLORA_BASE_16BIT;
    qlora_base_format found = half ? QLORA_BASE_16BIT : QLORA_BASE_32BIT;
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        for (int i = 0; i < m->layers[l].count; i++) {
            const qlora__projection* p = &m->layers[l].projections[i];
            found = p->is_nf4 ? QLORA_BASE_NF4 : p->is_fp8 ? QLORA_BASE_FP8 : found;
        }
    }
    return qlora_base_format_name(found);
}

static void qlora__trained_base_read(qlora_model* m, const qlora__peft* peft) {
    char text[8];
    m->trained_base[0] = '\0';
    if (peft == NULL || peft->tensors.shard_count == 0 ||
        !qlora__st_metadata(&peft->tensors.shards[0], QLORA__BASE_KEY, text, sizeof text)) {
        return;
    }
    for (int i = QLORA_BASE_NF4; i <= QLORA_BASE_FP8; i++) {
        if (strcmp(text, qlora_base_format_name((qlora_base_format)i)) == 0) {
            memcpy(m->trained_base, text, sizeof text);
        }
    }
}

// The format that the adapter was trained on, if its weights have other values than those here.
static const char* qlora__trained_base(const qlora_model* m) {
    const char* here = qlora__base_name(m);
    bool dense = strstr(here, "bit") != NULL && strstr(m->trained_base, "bit") != NULL;
    // files in bf16 are the same in 32 bits
    bool same = strcmp(here, m->trained_base) == 0 ||
                (dense && m->plan.config.dtype == (int32_t)QLORA_BF16);
    return same ? "" : m->trained_base;
}

// Sets the rank and scale of every module; rank 0 = no adapter.
static qlora_result qlora__adapter_shapes(qlora_ctx* ctx, qlora_model* m,
                                          const qlora_model_desc* desc) {
    qlora__peft* peft = &m->source->peft;
    if (desc->adapter != NULL) {
        QLORA__TRY(qlora__peft_open(&ctx->env, desc->adapter, peft));
        m->source->has_peft = true;
        QLORA__TRY(qlora__adapter_scale(ctx, m, peft));
        m->desc.rslora = peft->rslora;
        m->desc.dropout = desc->dropout < 0.0f   ? 0.0f
                          : desc->dropout > 0.0f ? desc->dropout
                                                 : (float)peft->dropout;
        m->desc.rank = (int32_t)peft->rank;
        m->desc.alpha = (float)peft->alpha;
    }
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        for (int u = 0; u < qlora__unit_count(&m->layers[l]); u++) {
            int i = qlora__unit_at(&m->layers[l], u);
            qlora__projection* p = &m->layers[l].projections[i];
            if (desc->adapter != NULL) {
                QLORA__TRY(qlora__adapter_found(ctx, m, l, i, p));
            } else {
                qlora__adapter_new(m, qlora__row_of(&m->layers[l], i)->bit, p);
            }
            qlora__adapter_spread(&m->layers[l], i);
        }
        for (int u = 0; u < qlora__unit_count(&m->layers[l]) && desc->adapter != NULL; u++) {
            QLORA__TRY(qlora__adapter_not_left(ctx, m, l, qlora__unit_at(&m->layers[l], u)));
        }
    }
    int layout = 0; // refused here, before weights are loaded
    return desc->adapter != NULL
               ? qlora__layout_find(ctx, m, peft, desc->adapter, (int)desc->expert_layout, &layout)
               : QLORA_OK;
}

// An adapter that contains norms decides that they are trained: those of PEFT's modules_to_save, or
// of a file beside it. PEFT may train some of them only, which can be used but not trained further.
static qlora_result qlora__saved_norms(qlora_ctx* ctx, qlora_model* m,
                                       const qlora_model_desc* desc) {
    const qlora__peft* peft = m->source->has_peft ? &m->source->peft : NULL;
    char path[QLORA__PATH_ROOM];
    char name[192];
    bool beside = false;
    if (peft == NULL) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__path_join(&ctx->env, desc->adapter, QLORA__NORMS_FILE, path));
    QLORA__TRY(qlora__file_exists(&ctx->env, path, &beside));
    m->desc.train_norms = m->desc.train_norms || beside || peft->saves_norms != 0;
    for (int64_t i = 0; peft->saves_norms != 0 && qlora__norm_name_at(m, i, name); i++) {
        size_t length = strlen(name) - 7; // without .weight
        if (!qlora__peft_saves_norm(peft, name, length) && qlora__trains(m)) {
            return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                               "%s: modules_to_save has some of the norms, but not %.*s; such an "
                               "adapter can be used and merged, but training needs all or none",
                               peft->path, (int)length, name);
        }
    }
    return QLORA_OK;
}

static bool qlora__has_lora(const qlora_model* m) {
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        for (int i = 0; i < m->layers[l].count; i++) {
            if (m->layers[l].projections[i].rank > 0) {
                return true;
            }
        }
    }
    return false;
}

// Trained row number i: in adapter_config.json, or in the desc, where new tokens come last.
static int64_t qlora__saved_token(const qlora__peft* peft, const qlora_model_desc* desc,
                                  int64_t i) {
    int64_t id = -1;
    if (peft != NULL) {
        qlora__json_int(&peft->json, qlora__json_at(&peft->json, peft->token_rows, (uint32_t)i),
                        &id);
        return id;
    }
    return i < desc->token_row_count ? desc->token_rows[i]
                                     : desc->new_tokens[i - desc->token_row_count].id;
}

// The vocabulary grows by `added` rows; every one of them must be trained, because no file of the
// base has it.
static qlora_result qlora__vocab_grow(qlora_ctx* ctx, qlora_model* m, int64_t added) {
    int64_t grown = m->plan.base_vocab + added;
    if (grown > QLORA__MAX_VOCAB) {
        return qlora__fail(ctx, QLORA_ERR_LIMIT,
                           "with its new tokens, the vocabulary has %lld rows; the maximum is %lld",
                           (long long)grown, (long long)QLORA__MAX_VOCAB);
    }
    m->plan.config.vocab = grown;
    return QLORA_OK;
}

// The rows of a whole embedding in an adapter, which may have more of them than the base.
static int64_t qlora__vocab_saved(const qlora_model* m, const qlora__peft* peft) {
    const qlora__st_tensor* t = NULL;
    for (uint32_t i = 0; peft != NULL && i < peft->tensors.count; i++) {
        const qlora__folder_entry* e = &peft->tensors.entries[i];
        t = strcmp(e->name, "embed_tokens.weight") == 0 ? e->tensor : t;
    }
    return t != NULL && t->rank == 2 && t->shape[0] > m->plan.base_vocab &&
                   t->shape[0] <= QLORA__MAX_VOCAB
               ? t->shape[0] - m->plan.base_vocab
               : 0;
}

// A new token has a row in both matrices, and both must learn.
static qlora_result qlora__new_tokens_halved(qlora_ctx* ctx, const char* whole, const char* other) {
    return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                       "desc.new_tokens is set, and the head is not tied, but desc.save_modules "
                       "has %s without %s; it must be both or none",
                       whole, other);
}

// Finds how many rows follow those of the base.
static qlora_result qlora__vocab_find(qlora_ctx* ctx, qlora_model* m, const qlora_model_desc* desc,
                                      int64_t count) {
    const qlora__peft* peft = m->source->has_peft ? &m->source->peft : NULL;
    int64_t added = m->tables.saved_embed ? qlora__vocab_saved(m, peft) : 0;
    for (int64_t i = 0; i < count && peft != NULL; i++) {
        added += qlora__saved_token(peft, desc, i) >= m->plan.base_vocab ? 1 : 0;
    }
    for (int64_t i = 0; i < desc->new_token_count; i++) {
        added += desc->new_tokens[i].id >= m->plan.base_vocab ? 1 : 0;
    }
    QLORA__TRY(qlora__vocab_grow(ctx, m, added));
    bool own = !m->plan.config.tied && !m->tables.tokens_twice;
    bool head = !own || (m->tables.saved_embed ? m->tables.saved_head : m->tables.head_rows);
    if (added > 0 && peft != NULL && !head) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "the adapter has values for %lld rows after the vocabulary's %lld "
                           "tokens, but not for those of lm_head; train both with PEFT",
                           (long long)added, (long long)m->plan.base_vocab);
    }
    // The same for new tokens in rows that the model has, but that mean nothing yet.
    if (desc->new_token_count > 0 && !head) {
        return qlora__new_tokens_halved(ctx, "the embedding", "lm_head");
    }
    return QLORA_OK;
}

// The ids of new tokens that are trained with the whole matrix; others are trained rows.
static qlora_result qlora__new_tokens_check(qlora_ctx* ctx, const qlora_model* m,
                                            const qlora_model_desc* desc) {
    for (int64_t i = 0; i < desc->new_token_count; i++) {
        const qlora_new_token* t = &desc->new_tokens[i];
        if (t->id < 0 || t->id >= m->plan.config.vocab) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "desc.new_tokens[%lld].id is %d; it must be 0 to %lld, so that no "
                               "row is left out",
                               (long long)i, (int)t->id, (long long)m->plan.config.vocab - 1);
        }
        for (int64_t k = 0; k < i; k++) {
            if (desc->new_tokens[k].id == t->id) {
                return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                                   "desc.new_tokens[%lld].id is %d, as that of token %lld",
                                   (long long)i, (int)t->id, (long long)k);
            }
        }
        for (int64_t k = 0; k < t->from_count; k++) {
            if (t->from[k] < 0 || t->from[k] >= m->plan.base_vocab) {
                return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                                   "desc.new_tokens[%lld].from[%lld] is %d; the model has rows 0 "
                                   "to %lld",
                                   (long long)i, (long long)k, (int)t->from[k],
                                   (long long)m->plan.base_vocab - 1);
            }
        }
    }
    return QLORA_OK;
}

// Takes the ids of the trained rows of the embedding from a list in adapter_config.json, or from
// the desc.
static qlora_result qlora__saved_tokens(qlora_ctx* ctx, qlora_model* m,
                                        const qlora_model_desc* desc) {
    const qlora__peft* peft = m->source->has_peft ? &m->source->peft : NULL;
    int64_t count = desc->token_row_count + (m->tables.saved_embed ? 0 : desc->new_token_count);
    if (peft != NULL) {
        count = peft->token_rows != 0 ? (int64_t)peft->json.tokens[peft->token_rows].count : 0;
    }
    m->desc.token_rows = NULL;
    QLORA__TRY(qlora__vocab_find(ctx, m, desc, count));
    QLORA__TRY(qlora__new_tokens_check(ctx, m, desc));
    if (count == 0) {
        return QLORA_OK;
    }
    m->tables.token_ids = (int32_t*)qlora__alloc(ctx, (size_t)count * sizeof *m->tables.token_ids);
    if (m->tables.token_ids == NULL) {
        return QLORA_ERR_MEMORY;
    }
    m->tables.token_count = count;
    for (int64_t i = 0; i < count; i++) {
        int64_t id = qlora__saved_token(peft, desc, i);
        if (id < 0 || id >= m->plan.config.vocab) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               "token row %lld is %lld; the embedding has rows 0 to %lld",
                               (long long)i, (long long)id, (long long)m->plan.config.vocab - 1);
        }
        m->tables.token_ids[i] = (int32_t)id;
        for (int64_t k = 0; k < i; k++) {
            if (m->tables.token_ids[k] == m->tables.token_ids[i]) {
                return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "token row %lld is given twice",
                                   (long long)id);
            }
        }
    }
    return QLORA_OK;
}

// A head in the files counts for us, as it does for transformers from version 5 on, but PEFT goes
// by the config, where it may be tied. *out: the config ties a head that is a matrix of its own.
static qlora_result qlora__saved_own_head(qlora_ctx* ctx, const qlora_model* m,
                                          const qlora_model_desc* desc, bool* out) {
    qlora_model_config config;
    *out = false;
    if (desc->dir == NULL || m->plan.config.tied) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__config_read(&ctx->env, desc->dir, &config));
    *out = config.tied;
    return QLORA_OK;
}

// Of such a head, PEFT trains the same rows as of the embedding; whole matrices are not supported.
static qlora_result qlora__saved_head_check(qlora_ctx* ctx, qlora_model* m,
                                            const qlora_model_desc* desc, bool rows, bool tied) {
    bool own = false;
    if (!rows && !tied) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__saved_own_head(ctx, m, desc, &own));
    m->tables.tokens_twice = own && rows;
    return !own || !tied ? QLORA_OK
                         : qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                                       "%s has lm_head.weight, but its config ties the head to "
                                       "the embedding (tie_word_embeddings), so that PEFT trains "
                                       "both as one; set it to false to train the embedding alone",
                                       desc->dir);
}

// With a bias, the gain would have to leave it out.
static qlora_result qlora__saved_bias(qlora_ctx* ctx, const qlora_model* m) {
    for (int64_t l = 0; l < m->plan.config.layers && m->dora; l++) {
        for (int i = 0; i < m->layers[l].layout->count; i++) {
            const qlora__projection* p = &m->layers[l].projections[i];
            if (p->has_bias && p->rank > 0) {
                return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                                   "DoRA is not supported for %s, which has a bias",
                                   m->layers[l].layout->rows[i].module);
            }
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__saved_desc_check(qlora_ctx* ctx, const qlora_model_desc* d) {
    const char* name = d->dora                  ? "desc.dora"
                       : d->save_modules != 0   ? "desc.save_modules"
                       : d->token_row_count > 0 ? "desc.token_rows"
                       : d->new_token_count > 0 ? "desc.new_tokens"
                                                : NULL;
    if (d->adapter != NULL && name != NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "%s and desc.adapter are both set; the adapter decides it", name);
    }
    if (d->token_row_count > 0 && d->token_rows == NULL) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "desc.token_rows is NULL, but desc.token_row_count is %lld",
                           (long long)d->token_row_count);
    }
    for (int64_t i = 0; i < d->new_token_count; i++) {
        bool list = d->new_tokens != NULL;
        if (!list || d->new_tokens[i].from_count < 0 ||
            (d->new_tokens[i].from_count > 0 && d->new_tokens[i].from == NULL)) {
            return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                               list ? "desc.new_tokens[%lld].from does not have from_count ids"
                                    : "desc.new_tokens is NULL, but desc.new_token_count is %lld",
                               (long long)(list ? i : d->new_token_count));
        }
    }
    return QLORA_OK;
}

// What is trained beside matrices of low rank must be allowed together.
static qlora_result qlora__saved_check(qlora_ctx* ctx, const qlora_model* m) {
    if (m->tables.token_count > 0 && m->tables.saved_embed) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "desc.token_rows is set, but desc.save_modules trains all rows");
    }
    if ((m->dora || m->tables.saved_embed || m->tables.saved_head || m->tables.token_count > 0) &&
        !qlora__has_lora(m)) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "%s set, but no projection has an adapter, without which PEFT cannot "
                           "store it; set desc.rank to 1 or more",
                           m->dora                     ? "desc.dora is"
                           : m->tables.token_count > 0 ? "desc.token_rows is"
                                                       : "desc.save_modules is");
    }
    if (m->dora && m->desc.dropout > 0.0f && qlora__trains(m)) {
        return qlora__fail(
            ctx, QLORA_ERR_UNSUPPORTED, "the dropout is %g; training with DoRA needs 0%s",
            (double)m->desc.dropout, m->source->has_peft ? " (desc.dropout negative)" : "");
    }
    return qlora__saved_bias(ctx, m);
}

// What is trained beside matrices of low rank: magnitudes, embedding, head, rows of the embedding.
static qlora_result qlora__saved_shapes(qlora_ctx* ctx, qlora_model* m,
                                        const qlora_model_desc* desc) {
    const qlora__peft* peft = m->source->has_peft ? &m->source->peft : NULL;
    bool tied = m->plan.config.tied;
    bool embed = peft != NULL ? peft->saves_embed : (desc->save_modules & QLORA_SAVE_EMBED) != 0;
    bool head = peft != NULL ? peft->saves_head : (desc->save_modules & QLORA_SAVE_HEAD) != 0;
    // As in PEFT, a tied head is trained with the embedding only if that is asked for; a new
    // adapter of ours keeps it tied unless both are to be saved.
    bool shared = tied && (peft != NULL ? peft->tied && (embed || head) : embed && !head);
    bool rows = peft != NULL ? peft->token_rows != 0
                             : desc->token_row_count + desc->new_token_count > 0 && !embed;
    QLORA__TRY(
        qlora__saved_head_check(ctx, m, desc, rows, peft != NULL && peft->tied && (embed || head)));
    if (shared && !embed) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "%s: ensure_weight_tying with lm_head alone is not supported",
                           peft != NULL ? peft->path : "desc");
    }
    m->tables.saved_embed = embed;
    m->tables.saved_head = head && !shared;
    m->tables.saved_tied = shared;
    m->dora = peft != NULL ? peft->dora : desc->dora;
    // PEFT trains rows of a tied head with those of the embedding.
    m->tables.head_rows =
        rows && (peft != NULL ? peft->head_rows
                              : desc->new_token_count > 0 && !tied && !m->tables.tokens_twice);
    if (m->tables.head_rows && m->tables.saved_head && peft == NULL) {
        return qlora__new_tokens_halved(ctx, "lm_head", "the embedding");
    }
    if (m->tables.head_rows && (tied || m->tables.tokens_twice || m->tables.saved_head)) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "%s: trained rows of lm_head are not supported if %s",
                           peft != NULL ? peft->path : "desc",
                           m->tables.saved_head ? "the whole head is trained" : "the head is tied");
    }
    QLORA__TRY(qlora__saved_tokens(ctx, m, desc));
    QLORA__TRY(qlora__saved_norms(ctx, m, desc));
    QLORA__TRY(qlora__saved_check(ctx, m));
    if (peft != NULL) {
        QLORA__TRY(qlora__peft_copies_check(ctx, m, desc->dir, peft));
    }
    return peft != NULL ? qlora__adapter_all_used(ctx, m, peft) : QLORA_OK;
}

// Whether the head has gradients.
static bool qlora__trains_head(const qlora_model* m) {
    return m->tables.saved_head || m->tables.saved_tied ||
           (m->tables.token_count > 0 &&
            (m->plan.config.tied || m->tables.tokens_twice || m->tables.head_rows));
}
