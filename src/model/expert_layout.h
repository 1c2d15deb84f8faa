// ---- matrices of experts in adapter files -------------------------------------------------------
//
// PEFT has one A and one B for the matrices of all experts, with r rows and columns for each:
//
//   peft       A [E r, in], rows e r + j; B [out, r E], columns j E + e
//   peft-0.18  the roles of in and out exchanged, and so A and B
//   unsloth    A as peft; B [out, E r], columns e r + j
//
// With transformers 4, experts were modules with numbers, and A and B matrices of each.

static const char* const qlora__layout_names[] = {"auto", "peft", "peft-0.18", "unsloth"};
#define QLORA__LAYOUTS ((int)(sizeof qlora__layout_names / sizeof qlora__layout_names[0]))

// In the metadata of what is written here.
#define QLORA__LAYOUT_KEY "expert_layout"

// Whether a text names the program that has written B of experts in another order.
static bool qlora__names_unsloth(const char* text, size_t size) {
    static const char word[] = "unsloth";
    for (size_t at = 0; at + sizeof word - 1 <= size; at++) {
        size_t i = 0;
        while (i < sizeof word - 1 && (text[at + i] | 0x20) == word[i]) {
            i++;
        }
        if (i == sizeof word - 1) {
            return true;
        }
    }
    return false;
}

// Whether a string in `object`, or below it, names it.
static bool qlora__json_names_unsloth(const qlora__json* json, uint32_t object) {
    bool named = false;
    for (uint32_t k = object + 1; object != 0 && k < json->tokens[object].next && !named; k++) {
        char text[512];
        if (json->tokens[k].kind == QLORA__JSON_STRING) {
            size_t n = qlora__json_string(json, k, text, sizeof text);
            named = qlora__names_unsloth(text, n < sizeof text ? n : sizeof text - 1);
        }
    }
    return named;
}

// Whether base_model_name_or_path, the metadata or README.md of a folder name it.
static qlora_result qlora__adapter_names_unsloth(qlora_ctx* ctx, const qlora__peft* peft,
                                                 const char* dir, bool* named) {
    const qlora__json* header = &peft->tensors.shards[0].json;
    char text[512];
    char path[QLORA__PATH_ROOM];
    bool exists = false;
    uint32_t base = qlora__json_find(&peft->json, 0, "base_model_name_or_path");
    *named = qlora__json_names_unsloth(header, qlora__json_find(header, 0, "__metadata__"));
    if (base != 0 && qlora__json_kind_of(&peft->json, base) == QLORA__JSON_STRING) {
        size_t n = qlora__json_string(&peft->json, base, text, sizeof text);
        *named = *named || qlora__names_unsloth(text, n < sizeof text ? n : sizeof text - 1);
    }
    QLORA__TRY(qlora__path_join(&ctx->env, dir, "README.md", path));
    QLORA__TRY(qlora__file_exists(&ctx->env, path, &exists));
    if (exists && !*named) {
        qlora__map map;
        QLORA__TRY(qlora__map_open(&ctx->env, path, &map));
        *named = qlora__names_unsloth((const char*)map.data, (size_t)map.size);
        qlora__map_close(&ctx->env, &map);
    }
    return QLORA_OK;
}

// Whether the shapes of all matrices of experts fit: as now, and with exchanged roles. *any: there
// are such matrices.
static void qlora__layout_fits(const qlora_model* m, const qlora__peft* peft, bool fits[2],
                               bool* any) {
    char module[160];
    char name[224];
    fits[0] = true;
    fits[1] = true;
    *any = false;
    for (int64_t l = 0; l < m->plan.config.layers; l++) {
        const qlora__layer* layer = &m->layers[l];
        for (int u = 0; u < qlora__unit_count(layer); u++) {
            int i = qlora__unit_at(layer, u);
            const qlora__projection* p = &layer->projections[i];
            const qlora__st_tensor* t[2] = {NULL, NULL};
            if (qlora__is_stack(layer, i) == 0 || p->rank == 0) {
                continue;
            }
            qlora__matrices_of(m, l, i, module, sizeof module);
            for (int k = 0; k < 2; k++) {
                snprintf(name, sizeof name, "base_model.model.%s.lora_%c.weight", module, "AB"[k]);
                t[k] = qlora__folder_find(&peft->tensors, name);
            }
            if (t[0] == NULL || t[1] == NULL || t[0]->rank != 2 || t[1]->rank != 2) {
                continue; // reported when it is read
            }
            int64_t out = qlora__unit_out(layer, i);
            *any = true;
            fits[0] = fits[0] && t[0]->shape[1] == p->in && t[1]->shape[0] == out;
            fits[1] = fits[1] && t[0]->shape[1] == out && t[1]->shape[0] == p->in;
        }
    }
}

// The layout that a folder says it has in its metadata; AUTO if it says nothing.
static qlora_result qlora__layout_said(qlora_ctx* ctx, const qlora__peft* peft, const char* dir,
                                       int* out) {
    char text[64];
    *out = QLORA_EXPERT_LAYOUT_AUTO;
    if (!qlora__st_metadata(&peft->tensors.shards[0], QLORA__LAYOUT_KEY, text, sizeof text)) {
        return QLORA_OK;
    }
    for (int i = 1; i < QLORA__LAYOUTS; i++) {
        if (strcmp(text, qlora__layout_names[i]) == 0) {
            *out = i;
            return QLORA_OK;
        }
    }
    return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                       "%s: %s is \"%.40s\"; known are \"peft\", \"peft-0.18\" and \"unsloth\"",
                       dir, QLORA__LAYOUT_KEY, text);
}

// Which layout a folder has. What the caller gives, the metadata say or only one layout has shapes
// for decides; what may be one of two is refused, as both give an adapter, but not the same.
static qlora_result qlora__layout_find(qlora_ctx* ctx, const qlora_model* m,
                                       const qlora__peft* peft, const char* dir, int given,
                                       int* out) {
    bool fits[2];
    bool any = false;
    int said = 0;
    *out = QLORA_EXPERT_LAYOUT_PEFT;
    if (given < 0 || given >= QLORA__LAYOUTS) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT, "desc.expert_layout is %d; it must be 0 to %d",
                           given, QLORA__LAYOUTS - 1);
    }
    qlora__layout_fits(m, peft, fits, &any);
    if (!any || peft->tensors.shard_count == 0) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__layout_said(ctx, peft, dir, &said));
    if (said != 0 && given != 0 && said != given) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "desc.expert_layout is %s, but the metadata of %s say %s",
                           qlora__layout_names[given], dir, qlora__layout_names[said]);
    }
    int known = given != 0 ? given : said;
    bool exchanged = known == QLORA_EXPERT_LAYOUT_PEFT_018;
    if (known != 0 && !fits[exchanged ? 1 : 0] && fits[exchanged ? 0 : 1]) {
        return qlora__fail(ctx, QLORA_ERR_ARGUMENT,
                           "%s: the layout of experts is %s, but the shapes of their matrices are "
                           "those of %s",
                           dir, qlora__layout_names[known], exchanged ? "peft" : "peft-0.18");
    }
    if (known != 0 || fits[0] != fits[1]) {
        *out = known != 0 ? known
               : fits[0]  ? (int)QLORA_EXPERT_LAYOUT_PEFT
                          : (int)QLORA_EXPERT_LAYOUT_PEFT_018;
    } else if (fits[0]) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "%s: the matrices of experts have shapes that fit PEFT 0.20 and later "
                           "(peft) and PEFT up to 0.19 (peft-0.18); set desc.expert_layout to one "
                           "of them",
                           dir);
    }
    bool named = false;
    if (known == 0 && *out == QLORA_EXPERT_LAYOUT_PEFT) {
        QLORA__TRY(qlora__adapter_names_unsloth(ctx, peft, dir, &named));
    }
    return !named ? QLORA_OK
                  : qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                                "%s names Unsloth, so that lora_B of experts may be [out, rank, "
                                "experts] (peft) or [out, experts, rank] (unsloth), which have the "
                                "same shape; set desc.expert_layout to one of them",
                                dir);
}

// ---- experts with numbers -----------------------------------------------------------------------

// The matrices of an expert that a unit has: gate and up, or down.
static int qlora__numbered_parts(const qlora__layer* layer, int i) {
    return qlora__is_stack(layer, i) == 1 ? layer->layout->experts->count - 1 : 1;
}

// Rank and scale of a unit whose experts are modules: gate and up share the rows of the A that PEFT
// would make of theirs. All experts must have the same.
static qlora_result qlora__numbered_unit(qlora_ctx* ctx, const qlora_model* m,
                                         const qlora__peft* peft, int64_t l, int i,
                                         qlora__peft_module* out) {
    const qlora__layer* layer = &m->layers[l];
    int count = layer->layout->experts->count;
    int parts = qlora__numbered_parts(layer, i);
    char module[160];
    qlora__peft_module found;
    memset(out, 0, sizeof *out);
    for (int64_t k = 0; k < m->plan.config.experts * parts; k++) {
        qlora__base_module(m, l, i + (int)(k / parts) * count + (int)(k % parts), module,
                           sizeof module);
        QLORA__TRY(qlora__peft_lookup(&ctx->env, peft, module, &found));
        double difference = k == 0 ? 0.0 : found.scale - out->scale;
        if (k > 0 && (found.rank != out->rank || difference < 0.0 || difference > 0.0)) {
            return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                               "%s: %s has rank %lld and scale %g, but another matrix of these "
                               "experts %lld and %g; all of them must have the same",
                               peft->path, module, (long long)found.rank, found.scale,
                               (long long)out->rank, out->scale);
        }
        *out = found;
    }
    if (peft->rslora && parts > 1 && out->rank > 0) {
        return qlora__fail(ctx, QLORA_ERR_UNSUPPORTED,
                           "%s: use_rslora with an adapter for each expert is not supported: PEFT "
                           "0.21 makes another scale of it",
                           peft->path);
    }
    out->rank *= parts;
    out->alpha *= parts;
    return QLORA_OK;
}

// Whether a tensor of the file, under its plain name, is A or B of a numbered expert.
static bool qlora__numbered_names(const qlora_model* m, const char* name) {
    const char* at = strstr(name, ".experts.");
    char* end = NULL;
    long l = strncmp(name, "layers.", 7) == 0 ? strtol(name + 7, &end, 10) : -1;
    long e = at != NULL ? strtol(at + 9, NULL, 10) : -1;
    if (l < 0 || l >= (long)m->plan.config.layers || m->layers[l].experts == NULL || e < 0 ||
        e >= (long)m->plan.config.experts) {
        return false;
    }
    const qlora__layout* layout = m->layers[l].layout;
    int count = layout->experts->count;
    bool known = false;
    for (int k = 0; k < count && !known; k++) {
        char module[160];
        qlora__base_module(m, l, qlora__first_expert(layout) + (int)e * count + k, module,
                           sizeof module);
        const char* plain = qlora__plain_name(module);
        size_t n = strlen(plain);
        known = strncmp(name, plain, n) == 0 && (strcmp(name + n, ".lora_A.weight") == 0 ||
                                                 strcmp(name + n, ".lora_B.weight") == 0);
    }
    return known;
}
