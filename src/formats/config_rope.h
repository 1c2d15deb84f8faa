// ---- the rotation in config.json ----------------------------------------------------------------

// original_max_position_embeddings: that at the top of the file counts before that of the rope
// dictionary.
static qlora_result qlora__config_original(const qlora__config_reader* r,
                                           const qlora__config_reader* top, double fallback,
                                           double* out) {
    const char* key = "original_max_position_embeddings";
    return qlora__config_positive(qlora__config_find(top, key) != 0 ? top : r, key, fallback, out);
}

static qlora_result qlora__config_yarn(const qlora__config_reader* r,
                                       const qlora__config_reader* top, const qlora_model_config* c,
                                       qlora_rope_desc* rope) {
    bool truncate = true;
    QLORA__TRY(
        qlora__config_original(r, top, (double)c->max_positions, &rope->original_max_position));
    double stretch = (double)c->max_positions / rope->original_max_position;
    QLORA__TRY(qlora__config_positive(r, "factor", stretch > 1.0 ? stretch : -1.0, &rope->factor));
    QLORA__TRY(qlora__config_positive(r, "beta_fast", 32.0, &rope->beta_fast));
    QLORA__TRY(qlora__config_positive(r, "beta_slow", 1.0, &rope->beta_slow));
    QLORA__TRY(qlora__config_positive(r, "mscale", 0.0, &rope->mscale));
    QLORA__TRY(qlora__config_positive(r, "mscale_all_dim", 0.0, &rope->mscale_all_dim));
    QLORA__TRY(qlora__config_positive(r, "attention_factor", 0.0, &rope->attention_factor));
    QLORA__TRY(qlora__config_bool(r, "truncate", true, &truncate));
    rope->no_truncate = !truncate;
    return QLORA_OK;
}

static qlora_result qlora__config_llama3(const qlora__config_reader* r,
                                         const qlora__config_reader* top, qlora_rope_desc* rope) {
    QLORA__TRY(qlora__config_positive(r, "factor", -1.0, &rope->factor));
    QLORA__TRY(qlora__config_positive(r, "low_freq_factor", -1.0, &rope->low_freq_factor));
    QLORA__TRY(qlora__config_positive(r, "high_freq_factor", -1.0, &rope->high_freq_factor));
    QLORA__TRY(qlora__config_original(r, top, -1.0, &rope->original_max_position));
    if (!(rope->high_freq_factor > rope->low_freq_factor)) {
        return qlora__env_fail(
            r->env, QLORA_ERR_FORMAT,
            "%s: high_freq_factor is %g; it must be greater than low_freq_factor (%g)",
            r->json->label, rope->high_freq_factor, rope->low_freq_factor);
    }
    return QLORA_OK;
}

// One list of longrope: a positive divisor for each pair of rotated columns.
static qlora_result qlora__config_factors(const qlora__config_reader* r, const char* key,
                                          int64_t count, float* out) {
    uint32_t list = qlora__config_find(r, key);
    if (list == 0) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT, "%s: %s is missing", r->json->label, key);
    }
    if (qlora__json_kind_of(r->json, list) != QLORA__JSON_ARRAY ||
        r->json->tokens[list].count != count) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT,
                               "%s: %s must be a list of %lld numbers, one for each pair of "
                               "rotated columns",
                               r->json->label, key, (long long)count);
    }
    for (int64_t i = 0; i < count; i++) {
        double x = 0.0;
        if (!qlora__json_double(r->json, qlora__json_at(r->json, list, (uint32_t)i), &x) ||
            !(x > 0.0) || x > 1e30) {
            return qlora__env_fail(r->env, QLORA_ERR_FORMAT,
                                   "%s: %s[%lld] must be positive and at most 1e30", r->json->label,
                                   key, (long long)i);
        }
        out[i] = (float)x;
    }
    return QLORA_OK;
}

// The original maximum stands at the top of the file; the class default is 4096.
static qlora_result qlora__config_longrope(const qlora__config_reader* r,
                                           const qlora__config_reader* top,
                                           const qlora_model_config* c, qlora_rope_desc* rope) {
    QLORA__TRY(qlora__config_positive(top, "original_max_position_embeddings", 4096.0,
                                      &rope->original_max_position));
    QLORA__TRY(qlora__config_positive(
        r, "factor", (double)c->max_positions / rope->original_max_position, &rope->factor));
    QLORA__TRY(qlora__config_positive(r, "attention_factor", 0.0, &rope->attention_factor));
    QLORA__TRY(qlora__config_factors(r, "short_factor", c->rope_dims / 2, rope->short_factor));
    return qlora__config_factors(r, "long_factor", c->rope_dims / 2, rope->long_factor);
}

// The type of a rope dictionary. For text, mrope is the plain rotation.
static qlora_result qlora__config_rope_type(const qlora__config_reader* r, const qlora__arch* arch,
                                            qlora_rope_type* out) {
    static const struct {
        const char* name;
        int usual;    // a qlora_rope_type; -1 = unknown
        int longrope; // in families with longrope
    } kinds[] = {{"default", QLORA_ROPE_DEFAULT, QLORA_ROPE_DEFAULT},
                 {"linear", QLORA_ROPE_LINEAR, -1},
                 {"llama3", QLORA_ROPE_LLAMA3, -1},
                 {"yarn", QLORA_ROPE_YARN, QLORA_ROPE_LONGROPE},
                 {"mrope", QLORA_ROPE_DEFAULT, -1},
                 {"longrope", -1, QLORA_ROPE_LONGROPE},
                 {"su", -1, QLORA_ROPE_LONGROPE}};
    bool longrope = (arch->reads & QLORA__READS_LONGROPE) != 0;
    uint32_t type = qlora__config_find(r, "rope_type");
    type = type != 0 ? type : qlora__config_find(r, "type");
    *out = QLORA_ROPE_DEFAULT;
    if (type == 0) {
        return QLORA_OK;
    }
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        int found = longrope ? kinds[k].longrope : kinds[k].usual;
        if (found >= 0 && qlora__json_is(r->json, type, kinds[k].name)) {
            *out = (qlora_rope_type)found;
            return QLORA_OK;
        }
    }
    return qlora__config_refuse(r, "rope_type", type,
                                longrope ? "supported values in this family: default, longrope"
                                         : "supported values: default, linear, llama3, yarn");
}

// One set of rotary parameters from the object `dict` (0 = none: all defaults), with the theta that
// applies if it has none.
static qlora_result qlora__config_rope(const qlora__config_reader* top, const qlora__arch* arch,
                                       uint32_t dict, double theta, const qlora_model_config* c,
                                       qlora_rope_desc* rope) {
    qlora__config_reader r = *top;
    bool per_kind = (arch->reads & QLORA__READS_ROPE_PER_KIND) != 0;
    const qlora__config_reader* outer = per_kind ? &r : top; // no key at the top reaches the sets
    memset(rope, 0, sizeof *rope);
    rope->factor = 1.0;
    rope->theta = theta;
    if (dict != 0) {
        r.object = dict;
        QLORA__TRY(qlora__config_positive(&r, "rope_theta", theta, &rope->theta));
        QLORA__TRY(qlora__config_rope_type(&r, arch, &rope->type));
    }
    if (!(rope->theta > 1.0)) {
        return qlora__env_fail(r.env, QLORA_ERR_FORMAT,
                               "%s: rope_theta is %g; it must be greater than 1", r.json->label,
                               rope->theta);
    }
    switch (rope->type) {
    case QLORA_ROPE_LINEAR:
        return qlora__config_positive(&r, "factor", -1.0, &rope->factor);
    case QLORA_ROPE_LLAMA3:
        return qlora__config_llama3(&r, outer, rope);
    case QLORA_ROPE_YARN:
        return qlora__config_yarn(&r, outer, c, rope);
    case QLORA_ROPE_LONGROPE:
        return qlora__config_longrope(&r, top, c, rope);
    case QLORA_ROPE_DEFAULT:
        break;
    }
    return QLORA_OK;
}

static qlora_result qlora__config_need_object(const qlora__config_reader* r, const char* key,
                                              uint32_t value) {
    char shown[48];
    if (qlora__json_kind_of(r->json, value) != QLORA__JSON_OBJECT) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT, "%s: %s is %s; it must be an object",
                               r->json->label, key, qlora__config_show(r, value, shown));
    }
    return QLORA_OK;
}

// How many columns of a head are rotated: all, unless the family reads partial_rotary_factor.
static qlora_result qlora__config_partial(const qlora__config_reader* r, const qlora__arch* arch,
                                          uint32_t dict, qlora_model_config* c) {
    qlora__config_reader inner = *r;
    double partial = arch->defaults.partial;
    QLORA__TRY(qlora__config_positive(r, "partial_rotary_factor", partial, &partial));
    if (dict != 0) {
        inner.object = dict;
        QLORA__TRY(qlora__config_positive(&inner, "partial_rotary_factor", partial, &partial));
    }
    bool reads = (arch->reads & QLORA__READS_PARTIAL) != 0;
    if (!reads && (partial < 1.0 || partial > 1.0)) {
        return qlora__env_fail(r->env, QLORA_ERR_UNSUPPORTED,
                               "%s: partial_rotary_factor is %g; only 1 is supported",
                               r->json->label, partial);
    }
    c->rope_dims = (int64_t)((double)c->head_dim * (partial <= 1.0 ? partial : 2.0));
    if (c->rope_dims < 2 || c->rope_dims > c->head_dim || c->rope_dims % 2 != 0) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT,
                               "%s: partial_rotary_factor is %g, which rotates %lld of %lld "
                               "columns of a head; they must be an even number from 2 to %lld",
                               r->json->label, partial, (long long)c->rope_dims,
                               (long long)c->head_dim, (long long)c->head_dim);
    }
    return QLORA_OK;
}

// The factor of q by position.
static qlora_result qlora__config_query_beta(const qlora__config_reader* r, uint32_t dict,
                                             qlora_model_config* c) {
    qlora__config_reader inner = *r;
    if (dict == 0) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT, "%s: rope_parameters is missing",
                               r->json->label);
    }
    inner.object = dict;
    QLORA__TRY(qlora__config_positive(&inner, "llama_4_scaling_beta", -1.0, &c->query_beta));
    return qlora__config_original(&inner, r, -1.0, &c->query_period);
}

// Refuses what transformers does not read in a file with separate sets for the kinds of layers, or
// reads differently from version to version: a type without rope_type in rope_scaling, both
// spellings at once, and truncate, which it looks for outside the sets.
static qlora_result qlora__config_check_kinds(const qlora__config_reader* r, uint32_t scaling,
                                              uint32_t both) {
    const char* names[2] = {"full_attention", "sliding_attention"};
    uint32_t places[3] = {scaling, 0, 0};
    if (scaling != 0 && both != 0) {
        return qlora__env_fail(r->env, QLORA_ERR_UNSUPPORTED,
                               "%s: rope_scaling and rope_parameters are both given; only one of "
                               "them is supported",
                               r->json->label);
    }
    uint32_t type = scaling != 0 ? qlora__json_find(r->json, scaling, "type") : 0;
    if (type != 0 && qlora__json_find(r->json, scaling, "rope_type") == 0 &&
        !qlora__json_is(r->json, type, "default")) {
        return qlora__config_refuse(r, "rope_scaling with the type", type,
                                    "transformers ignores it in this family; call it rope_type if "
                                    "it applies");
    }
    for (int i = 0; both != 0 && i < 2; i++) {
        places[i] = qlora__json_find(r->json, both, names[i]);
    }
    places[2] = both;
    for (int i = 0; i < 3; i++) {
        uint32_t value = places[i] != 0 ? qlora__json_find(r->json, places[i], "truncate") : 0;
        if (value != 0 && qlora__json_kind_of(r->json, value) != QLORA__JSON_TRUE) {
            return qlora__config_refuse(r, "truncate", value,
                                        "only true is supported in this family");
        }
    }
    return QLORA_OK;
}

// Families whose layers with and without a window are rotated differently: rope_parameters has one
// set for each kind; in older files, rope_scaling belongs to full attention.
static qlora_result qlora__config_ropes_per_kind(const qlora__config_reader* r,
                                                 const qlora__arch* arch, qlora_model_config* c) {
    double theta = arch->defaults.theta;
    double sliding = arch->defaults.theta_sliding;
    uint32_t full = qlora__config_find(r, "rope_scaling");
    uint32_t slide = 0;
    uint32_t both = qlora__config_find(r, "rope_parameters");
    QLORA__TRY(qlora__config_positive(r, "rope_theta", theta, &theta));
    if ((arch->reads & QLORA__READS_LOCAL_THETA) != 0) {
        QLORA__TRY(qlora__config_positive(r, "rope_local_base_freq", sliding, &sliding));
    }
    if (full != 0) {
        QLORA__TRY(qlora__config_need_object(r, "rope_scaling", full));
    }
    full = full != 0 && r->json->tokens[full].count == 0 ? 0 : full;
    if (both != 0) {
        QLORA__TRY(qlora__config_need_object(r, "rope_parameters", both));
    }
    QLORA__TRY(qlora__config_check_kinds(r, full, both));
    if (both != 0) {
        full = qlora__json_find(r->json, both, "full_attention");
        slide = qlora__json_find(r->json, both, "sliding_attention");
        if (full == 0 && slide == 0) {
            return qlora__env_fail(r->env, QLORA_ERR_FORMAT,
                                   "%s: rope_parameters must contain full_attention and "
                                   "sliding_attention",
                                   r->json->label);
        }
    }
    if (full != 0) {
        QLORA__TRY(qlora__config_need_object(r, "full_attention", full));
    }
    if (slide != 0) {
        QLORA__TRY(qlora__config_need_object(r, "sliding_attention", slide));
    }
    QLORA__TRY(qlora__config_partial(r, arch, full, c));
    QLORA__TRY(qlora__config_rope(r, arch, full, theta, c, &c->rope));
    return qlora__config_rope(r, arch, slide, sliding, c, &c->rope_sliding);
}

// Refuses separate sets for the kinds of layers where a family has one set: transformers either
// ignores them or cannot read the file.
static qlora_result qlora__config_check_flat(const qlora__config_reader* r, const char* key,
                                             uint32_t dict) {
    static const char* const names[2] = {"full_attention", "sliding_attention"};
    QLORA__TRY(qlora__config_need_object(r, key, dict));
    for (int i = 0; i < 2; i++) {
        uint32_t value = qlora__json_find(r->json, dict, names[i]);
        if (value != 0) {
            return qlora__config_refuse(r, key, value - 1,
                                        "all layers of this family are rotated alike");
        }
    }
    return QLORA_OK;
}

// rope_scaling (old files) or rope_parameters (new files).
static qlora_result qlora__config_ropes(const qlora__config_reader* r, const qlora__arch* arch,
                                        qlora_model_config* c) {
    if ((arch->reads & QLORA__READS_ROPE_PER_KIND) != 0) {
        return qlora__config_ropes_per_kind(r, arch, c);
    }
    const char* key = "rope_scaling";
    uint32_t dict = qlora__config_find(r, key);
    bool empty = dict != 0 && qlora__json_kind_of(r->json, dict) == QLORA__JSON_OBJECT &&
                 r->json->tokens[dict].count == 0;
    if (dict == 0 || empty) {
        key = "rope_parameters";
        dict = qlora__config_find(r, key);
    }
    double theta = arch->defaults.theta;
    if (dict != 0) {
        QLORA__TRY(qlora__config_check_flat(r, key, dict));
    }
    QLORA__TRY(qlora__config_positive(r, "rope_theta", theta, &theta));
    QLORA__TRY(qlora__config_partial(r, arch, dict, c));
    if ((arch->reads & QLORA__READS_QUERY_BETA) != 0) {
        QLORA__TRY(qlora__config_query_beta(r, dict, c));
    }
    QLORA__TRY(qlora__config_rope(r, arch, dict, theta, c, &c->rope));
    c->rope_sliding = c->rope;
    return QLORA_OK;
}
