// ---- experts in config.json ---------------------------------------------------------------------

// The number of experts, which files have under three names.
static qlora_result qlora__config_expert_count(const qlora__config_reader* r, int32_t fallback,
                                               int64_t* out) {
    static const char* const keys[] = {"num_experts", "num_local_experts", "n_routed_experts"};
    const char* first = NULL;
    *out = fallback;
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        int64_t count = 0;
        if (qlora__config_find(r, keys[i]) == 0) {
            continue;
        }
        QLORA__TRY(qlora__config_int(r, keys[i], -1, 0, QLORA__MAX_EXPERTS, &count));
        if (first != NULL && count != *out) {
            return qlora__env_fail(r->env, QLORA_ERR_FORMAT, "%s: %s is %lld, but %s is %lld",
                                   r->json->label, first, (long long)*out, keys[i],
                                   (long long)count);
        }
        first = keys[i];
        *out = count;
    }
    return QLORA_OK;
}

// Layers without experts, of families whose layers can be either.
static qlora_result qlora__config_dense_list(const qlora__config_reader* r, qlora_model_config* c) {
    int64_t step = 1;
    QLORA__TRY(qlora__config_int(r, "decoder_sparse_step", 1, 1, INT32_MAX, &step));
    for (int64_t l = 0; l < c->layers; l++) {
        c->dense[l] = (l + 1) % step != 0 ? 1 : 0;
    }
    uint32_t list = qlora__config_find(r, "mlp_only_layers");
    if (list == 0) {
        return QLORA_OK;
    }
    if (qlora__json_kind_of(r->json, list) != QLORA__JSON_ARRAY) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT, "%s: mlp_only_layers must be a list",
                               r->json->label);
    }
    uint32_t end = r->json->tokens[list].next;
    unsigned number = 0;
    for (uint32_t k = list + 1; k < end; k = r->json->tokens[k].next, number++) {
        int64_t layer = -1;
        bool whole = qlora__json_int(r->json, k, &layer);
        if (!whole || layer < 0 || layer > INT32_MAX) {
            return qlora__env_fail(r->env, QLORA_ERR_FORMAT,
                                   "%s: mlp_only_layers[%u] must be the number of a layer",
                                   r->json->label, number);
        }
        if (layer < c->layers) {
            c->dense[layer] = 1;
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__config_dense(const qlora__config_reader* r, const qlora__arch* arch,
                                        qlora_model_config* c) {
    uint32_t types = qlora__config_find(r, "mlp_layer_types");
    memset(c->dense, 0, sizeof c->dense);
    if (types != 0) {
        return qlora__config_refuse(r, "mlp_layer_types", types, "it is not known in this family");
    }
    if (arch->layout == NULL || (arch->reads & QLORA__READS_OWN_WIDTH) == 0) {
        return QLORA_OK;
    }
    if (arch->experts->experts->score != QLORA__ROUTER_SIGMOID) {
        return qlora__config_dense_list(r, c);
    }
    int64_t first = 0;
    QLORA__TRY(qlora__config_int(r, "first_k_dense_replace", 1, 0, INT32_MAX, &first));
    for (int64_t l = 0; l < c->layers && l < first; l++) {
        c->dense[l] = 1;
    }
    return QLORA_OK;
}

// How experts are chosen, and what becomes of their scores.
static qlora_result qlora__config_router(const qlora__config_reader* r, const qlora__arch* arch,
                                         qlora_model_config* c) {
    bool sigmoid = arch->experts->experts->score == QLORA__ROUTER_SIGMOID;
    c->renormalise = false;
    if ((arch->reads & QLORA__READS_RENORMALISE) != 0) {
        QLORA__TRY(qlora__config_bool(r, "norm_topk_prob", sigmoid, &c->renormalise));
    }
    c->routed_scale = 1.0;
    c->expert_groups = 1;
    c->expert_groups_used = 1;
    if (!sigmoid) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__config_positive(r, "routed_scaling_factor", 1.0, &c->routed_scale));
    QLORA__TRY(qlora__config_int(r, "n_group", 1, 1, c->experts, &c->expert_groups));
    QLORA__TRY(qlora__config_int(r, "topk_group", 1, 1, c->expert_groups, &c->expert_groups_used));
    int64_t each = c->experts / c->expert_groups;
    if (c->experts % c->expert_groups != 0 || (c->expert_groups > 1 && each < 2)) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT,
                               "%s: n_group is %lld; it must divide the %lld experts into groups "
                               "of at least two",
                               r->json->label, (long long)c->expert_groups, (long long)c->experts);
    }
    if (c->experts_per_token > each * c->expert_groups_used) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT,
                               "%s: num_experts_per_tok is %lld, but topk_group leaves %lld",
                               r->json->label, (long long)c->experts_per_token,
                               (long long)(each * c->expert_groups_used));
    }
    return QLORA_OK;
}

// What experts may not have.
static qlora_result qlora__config_expert_refusals(const qlora__config_reader* r) {
    static const char* const keys[] = {"router_jitter_noise", "clip_qkv"};
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        uint32_t value = qlora__config_find(r, keys[i]);
        double number = 0.0;
        bool zero = value != 0 && qlora__json_double(r->json, value, &number) && number >= 0.0 &&
                    number <= 0.0;
        if (value != 0 && !(zero && i == 0)) {
            return qlora__config_refuse(r, keys[i], value, "only models without it are");
        }
    }
    return QLORA_OK;
}

// The widths of experts and of the MLP beside them.
static qlora_result qlora__config_expert_widths(const qlora__config_reader* r,
                                                const qlora__arch* arch, qlora_model_config* c) {
    const qlora__expert_defaults* d = qlora__arch_expert_defaults(arch);
    bool own = (arch->reads & QLORA__READS_OWN_WIDTH) != 0;
    const char* key = own ? "moe_intermediate_size" : "intermediate_size";
    QLORA__TRY(qlora__config_int(r, key, d->width, 1, 1 << 22, &c->expert_intermediate));
    if (arch->layout == NULL) {
        c->intermediate = c->expert_intermediate; // no layer has an MLP of its own
    }
    if ((arch->reads & QLORA__READS_HYBRID) != 0) {
        c->shared_intermediate = c->intermediate;
        return QLORA_OK;
    }
    if (d->shared == 0) {
        return QLORA_OK;
    }
    if (arch->experts->experts->shared_gate.module != NULL) {
        return qlora__config_int(r, "shared_expert_intermediate_size", d->shared, 1, 1 << 22,
                                 &c->shared_intermediate);
    }
    int64_t count = 0;
    QLORA__TRY(qlora__config_int(r, "n_shared_experts", d->shared, 1, 1 << 10, &count));
    c->shared_intermediate = count * c->expert_intermediate;
    return QLORA_OK;
}

static qlora_result qlora__config_experts(const qlora__config_reader* r, const qlora__arch* arch,
                                          qlora_model_config* c) {
    if (arch->experts == NULL) {
        return QLORA_OK;
    }
    const qlora__expert_defaults* d = qlora__arch_expert_defaults(arch);
    QLORA__TRY(qlora__config_expert_count(r, d->count, &c->experts));
    if (c->experts == 0 && arch->layout != NULL && (arch->reads & QLORA__READS_EXPERTS) == 0) {
        return QLORA_OK; // the dense form
    }
    if (c->experts == 0) {
        return qlora__env_fail(r->env, QLORA_ERR_UNSUPPORTED,
                               "%s: the number of experts is 0; use a file of the dense family",
                               r->json->label);
    }
    QLORA__TRY(qlora__config_int(r, "num_experts_per_tok", d->per_token, 1, c->experts,
                                 &c->experts_per_token));
    QLORA__TRY(qlora__config_expert_refusals(r));
    QLORA__TRY(qlora__config_bool(r, "output_router_logits", false, &c->router_loss));
    QLORA__TRY(qlora__config_expert_widths(r, arch, c));
    QLORA__TRY(qlora__config_dense(r, arch, c));
    return qlora__config_router(r, arch, c);
}
