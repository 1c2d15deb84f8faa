// ---- reading PEFT adapters ----------------------------------------------------------------------

typedef struct qlora__peft {
    qlora__map map;
    qlora__json json;
    int64_t rank;
    double alpha;
    double dropout;
    bool rslora;
    bool dora;
    bool saves_embed; // modules_to_save
    bool saves_head;
    uint32_t saves_norms; // the list, if it names norms
    bool tied;            // ensure_weight_tying
    uint32_t token_rows;  // trainable_token_indices, a list; 0 = none
    bool head_rows;       // the same rows of lm_head are trained as well
    uint32_t targets;     // tokens of the config; 0 if absent
    uint32_t excludes;
    uint32_t parameters; // target_parameters, a list
    uint32_t layers;
    uint32_t rank_pattern;
    uint32_t alpha_pattern;
    bool numbered; // experts are modules with numbers, as transformers 4 had them
    qlora__folder tensors;
    char path[QLORA__PATH_ROOM];
} qlora__peft;

// The adapter of one module; rank 0 means that the module is not adapted.
typedef struct qlora__peft_module {
    int64_t rank;
    double alpha;
    double scale;              // alpha / rank, or alpha / sqrt(rank) with rsLoRA
    const qlora__st_tensor* a; // [rank, in]; NULL if only a config was read
    const qlora__st_tensor* b; // [out, rank]
    const qlora__st_tensor* m; // [out], only with DoRA
} qlora__peft_module;

static void qlora__peft_close(qlora__env* env, qlora__peft* p) {
    qlora__folder_close(env, &p->tensors);
    qlora__json_free(env, &p->json);
    qlora__map_close(env, &p->map);
}

// Matches a pattern of the config, with `before` and `after` added around it, against the complete
// name of a module.
static qlora_result qlora__peft_regex(qlora__env* env, const qlora__json* json, uint32_t pattern,
                                      const char* before, const char* after, const char* module,
                                      bool* matches) {
    char text[QLORA__RE_MAX + 32];
    qlora__re re;
    size_t head = strlen(before);
    memcpy(text, before, head);
    size_t length = qlora__json_string(json, pattern, text + head, QLORA__RE_MAX);
    if (length >= QLORA__RE_MAX) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "%s: a pattern has %llu bytes; the maximum is %d", json->label,
                               (unsigned long long)length, QLORA__RE_MAX - 1);
    }
    if (strlen(text + head) != length) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "%s: the pattern \"%.200s\" contains a NUL byte", json->label,
                               text + head);
    }
    memcpy(text + head + length, after, strlen(after) + 1);
    qlora__re_compile(&re, text);
    if (re.wrong != NULL) {
        text[head + length] = '\0';
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED, "%s: the pattern \"%.200s\" has %s",
                               json->label, text + head, re.wrong);
    }
    *matches = qlora__re_match(&re, module);
    return QLORA_OK;
}

// "all-linear", in any case.
static bool qlora__peft_is_all_linear(const qlora__json* json, uint32_t value) {
    static const char word[] = "all-linear";
    char text[16];
    bool same = qlora__json_string(json, value, text, sizeof text) == sizeof word - 1;
    for (size_t i = 0; same && word[i] != '\0'; i++) {
        same = text[i] == word[i] || (text[i] >= 'A' && text[i] <= 'Z' && text[i] + 32 == word[i]);
    }
    return same;
}

// Evaluates target_modules or exclude_modules: a list of names (complete, or the part after a dot)
// or a regular expression; only target_modules may be "all-linear". *by_full_name: a list has the
// complete name.
static qlora_result qlora__peft_selects(qlora__env* env, const qlora__peft* p, uint32_t select,
                                        const char* module, bool* selected, bool* by_full_name) {
    const qlora__json* json = &p->json;
    const qlora__json_token* t = &json->tokens[select];
    *selected = false;
    *by_full_name = false;
    if (select == 0) {
        return QLORA_OK;
    }
    if (t->kind == QLORA__JSON_STRING) {
        if (select == p->targets && qlora__peft_is_all_linear(json, select)) {
            *selected = strcmp(qlora__plain_name(module), "lm_head") != 0;
            return QLORA_OK;
        }
        return qlora__peft_regex(env, json, select, "", "", module, selected);
    }
    size_t length = strlen(module);
    for (uint32_t k = select + 1; k < t->next && !*by_full_name; k = json->tokens[k].next) {
        size_t n = qlora__json_string(json, k, NULL, 0);
        bool whole = n == length || (n < length && module[length - n - 1] == '.');
        if (whole && qlora__json_equals(json, k, module + length - n, n)) {
            *selected = true;
            *by_full_name = n == length;
        }
    }
    return QLORA_OK;
}

// Evaluates layers_to_transform, a number or a list; the layer of a module is the number after
// "layers.".
static bool qlora__peft_layer_selected(const qlora__json* json, uint32_t select,
                                       const char* module) {
    const char* at = strstr(module, "layers.");
    int64_t layer = 0;
    if (at == NULL) {
        return false;
    }
    for (at += 7; *at >= '0' && *at <= '9' && layer < 100000; at++) {
        layer = layer * 10 + (*at - '0');
    }
    int64_t wanted = 0;
    if (qlora__json_kind_of(json, select) != QLORA__JSON_ARRAY) {
        return qlora__json_int(json, select, &wanted) && wanted == layer;
    }
    for (uint32_t k = select + 1; k < json->tokens[select].next; k = json->tokens[k].next) {
        if (qlora__json_int(json, k, &wanted) && wanted == layer) {
            return true;
        }
    }
    return false;
}

// Finds the value of the first key of a rank_pattern or alpha_pattern that matches; 0 if none does.
static qlora_result qlora__peft_pattern(qlora__env* env, const qlora__json* json, uint32_t pattern,
                                        const char* module, uint32_t* value) {
    *value = 0;
    if (pattern == 0) {
        return QLORA_OK;
    }
    for (uint32_t k = pattern + 1; k < json->tokens[pattern].next; k = json->tokens[k + 1].next) {
        bool matches = false;
        QLORA__TRY(qlora__peft_regex(env, json, k, "(.*\\.)?(", ")$", module, &matches));
        if (matches) {
            *value = k + 1;
            return QLORA_OK;
        }
    }
    return QLORA_OK;
}

// The rank, alpha and scale of a module or parameter that is adapted.
static qlora_result qlora__peft_rank(qlora__env* env, const qlora__peft* p, const char* module,
                                     qlora__peft_module* out) {
    const qlora__json* json = &p->json;
    qlora__config_reader r;
    char shown[48];
    uint32_t value = 0;
    int64_t rank = p->rank;
    double alpha = p->alpha;
    r.env = env;
    r.json = json;
    r.object = 0;
    QLORA__TRY(qlora__peft_pattern(env, json, p->rank_pattern, module, &value));
    if (value != 0 && (!qlora__json_int(json, value, &rank) || rank < 1 || rank > 65536)) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: rank_pattern: rank %s must be an integer from 1 to 65536",
                               json->label, qlora__config_show(&r, value, shown));
    }
    QLORA__TRY(qlora__peft_pattern(env, json, p->alpha_pattern, module, &value));
    if (value != 0 && (!qlora__json_double(json, value, &alpha) || !(alpha > 0.0))) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: alpha_pattern: alpha %s must be greater than 0", json->label,
                               qlora__config_show(&r, value, shown));
    }
    out->rank = rank;
    out->alpha = alpha;
    out->scale = alpha / (p->rslora ? sqrt((double)rank) : (double)rank);
    return QLORA_OK;
}

// Finds the rank, alpha and scale of a module by its full name, such as
// "model.layers.3.self_attn.q_proj".
static qlora_result qlora__peft_lookup(qlora__env* env, const qlora__peft* p, const char* module,
                                       qlora__peft_module* out) {
    const qlora__json* json = &p->json;
    bool selected = false;
    bool excluded = false;
    bool full = false;
    bool ignored = false;
    memset(out, 0, sizeof *out);
    QLORA__TRY(qlora__peft_selects(env, p, p->targets, module, &selected, &full));
    if (p->excludes != 0) {
        QLORA__TRY(qlora__peft_selects(env, p, p->excludes, module, &excluded, &ignored));
    }
    // As in PEFT, a module that is listed by its full name is adapted whatever its layer is.
    if (!selected || excluded ||
        (!full && p->layers != 0 && !qlora__peft_layer_selected(json, p->layers, module))) {
        return QLORA_OK;
    }
    return qlora__peft_rank(env, p, module, out);
}

// Whether target_parameters names a parameter by its path, such as
// "model.layers.3.mlp.experts.down_proj", and with what rank, alpha and scale.
static qlora_result qlora__peft_parameter(qlora__env* env, const qlora__peft* p, const char* path,
                                          qlora__peft_module* out) {
    const qlora__json* json = &p->json;
    size_t length = strlen(path);
    bool selected = false;
    memset(out, 0, sizeof *out);
    for (uint32_t k = p->parameters + 1;
         p->parameters != 0 && !selected && k < json->tokens[p->parameters].next;
         k = json->tokens[k].next) {
        size_t n = qlora__json_string(json, k, NULL, 0);
        bool whole = n == length || (n < length && path[length - n - 1] == '.');
        selected = whole && qlora__json_equals(json, k, path + length - n, n);
    }
    return selected ? qlora__peft_rank(env, p, path, out) : QLORA_OK;
}

// What becomes of each field of PEFT's LoraConfig (0.21). Fields that it does not list are refused,
// too, unless they are switched off: a later PEFT may compute something else with them.
typedef enum qlora__peft_field_kind {
    QLORA__PEFT_USED,   // read elsewhere
    QLORA__PEFT_NO_USE, // changes nothing that is computed from a saved adapter
    QLORA__PEFT_OFF     // must be absent, null, false or empty
} qlora__peft_field_kind;

static const struct {
    const char* name;
    qlora__peft_field_kind kind;
} qlora__peft_fields[] = {
    {"alpha_pattern", QLORA__PEFT_USED},
    {"alora_invocation_tokens", QLORA__PEFT_OFF},
    {"arrow_config", QLORA__PEFT_OFF},
    {"auto_mapping", QLORA__PEFT_NO_USE},
    {"base_model_name_or_path", QLORA__PEFT_NO_USE},
    {"bias", QLORA__PEFT_USED},
    {"corda_config", QLORA__PEFT_NO_USE}, // these four only with the init_lora_weights of their
    {"eva_config", QLORA__PEFT_NO_USE},   // name
    {"loftq_config", QLORA__PEFT_NO_USE},
    {"lora_ga_config", QLORA__PEFT_NO_USE},
    {"ensure_weight_tying", QLORA__PEFT_USED},
    {"exclude_modules", QLORA__PEFT_USED},
    {"fan_in_fan_out", QLORA__PEFT_OFF},
    {"inference_mode", QLORA__PEFT_NO_USE},
    {"init_lora_weights", QLORA__PEFT_USED},
    {"kasa_config", QLORA__PEFT_OFF},
    {"layer_replication", QLORA__PEFT_OFF},
    {"layers_pattern", QLORA__PEFT_USED},
    {"layers_to_transform", QLORA__PEFT_USED},
    {"lora_alpha", QLORA__PEFT_USED},
    {"lora_bias", QLORA__PEFT_OFF},
    {"lora_dropout", QLORA__PEFT_USED},
    {"megatron_config", QLORA__PEFT_OFF},
    {"megatron_core", QLORA__PEFT_NO_USE}, // only with megatron_config
    {"modules_to_save", QLORA__PEFT_USED},
    {"monteclora_config", QLORA__PEFT_OFF},
    {"peft_type", QLORA__PEFT_USED},
    {"peft_version", QLORA__PEFT_NO_USE},
    {"qalora_group_size", QLORA__PEFT_NO_USE}, // only with use_qalora
    {"r", QLORA__PEFT_USED},
    {"rank_pattern", QLORA__PEFT_USED},
    {"revision", QLORA__PEFT_NO_USE},
    {"runtime_config", QLORA__PEFT_NO_USE}, // where PEFT keeps its tensors
    {"target_modules", QLORA__PEFT_USED},
    {"target_parameters", QLORA__PEFT_USED},
    {"task_type", QLORA__PEFT_NO_USE},
    {"trainable_token_indices", QLORA__PEFT_USED},
    {"use_bdlora", QLORA__PEFT_OFF},
    {"use_dora", QLORA__PEFT_USED},
    {"use_qalora", QLORA__PEFT_OFF},
    {"use_rslora", QLORA__PEFT_USED},
    {"velora_config", QLORA__PEFT_OFF},
};

static qlora_result qlora__peft_check_field(const qlora__config_reader* r, uint32_t key) {
    uint32_t value = key + 1;
    const qlora__json_token* t = &r->json->tokens[value];
    bool nested = t->kind == QLORA__JSON_ARRAY || t->kind == QLORA__JSON_OBJECT;
    bool off =
        t->kind == QLORA__JSON_NULL || t->kind == QLORA__JSON_FALSE || (nested && t->count == 0);
    for (size_t i = 0; i < sizeof qlora__peft_fields / sizeof qlora__peft_fields[0]; i++) {
        if (qlora__json_is(r->json, key, qlora__peft_fields[i].name)) {
            return off || qlora__peft_fields[i].kind != QLORA__PEFT_OFF
                       ? QLORA_OK
                       : qlora__config_refuse(r, qlora__peft_fields[i].name, value,
                                              "only plain LoRA is supported");
        }
    }
    char name[64];
    qlora__json_string(r->json, key, name, sizeof name);
    return off ? QLORA_OK : qlora__config_refuse(r, name, value, "the field is not known");
}

// How the adapter was initialised. Some ways also change the weights of the base, and PEFT changes
// them again when it loads such an adapter: without that, its numbers mean another model. PEFT
// itself turns them into plain LoRA adapters, whose file says true.
static qlora_result qlora__peft_check_init(const qlora__config_reader* r) {
    static const char* const plain[] = {"gaussian", "eva", "orthogonal", "mica"};
    uint32_t value = qlora__config_find(r, "init_lora_weights");
    if (value == 0 || qlora__json_kind_of(r->json, value) == QLORA__JSON_TRUE ||
        qlora__json_kind_of(r->json, value) == QLORA__JSON_FALSE) {
        return QLORA_OK;
    }
    for (size_t i = 0; i < sizeof plain / sizeof plain[0]; i++) {
        if (qlora__json_is(r->json, value, plain[i])) {
            return QLORA_OK;
        }
    }
    return qlora__config_refuse(r, "init_lora_weights", value,
                                "it changes the base; save the adapter with PEFT's "
                                "path_initial_model_for_weight_conversion");
}

// Rejects what changes the computation in ways that are not supported.
static qlora_result qlora__peft_check_switches(const qlora__config_reader* r) {
    for (uint32_t k = 1; k < r->json->tokens[0].next; k = r->json->tokens[k + 1].next) {
        QLORA__TRY(qlora__peft_check_field(r, k));
    }
    QLORA__TRY(qlora__peft_check_init(r));
    uint32_t bias = qlora__config_find(r, "bias");
    if (bias != 0 && !qlora__json_is(r->json, bias, "none")) {
        return qlora__config_refuse(r, "bias", bias, "only \"none\" is supported");
    }
    uint32_t pattern = qlora__config_find(r, "layers_pattern");
    if (pattern != 0 && r->json->tokens[pattern].count != 0 &&
        r->json->tokens[pattern].kind == QLORA__JSON_ARRAY) {
        pattern = qlora__json_at(r->json, pattern, 0);
    }
    if (pattern != 0 && r->json->tokens[pattern].end - r->json->tokens[pattern].begin > 0 &&
        r->json->tokens[pattern].kind == QLORA__JSON_STRING &&
        !qlora__json_is(r->json, pattern, "layers")) {
        return qlora__config_refuse(r, "layers_pattern", pattern, "only \"layers\" is supported");
    }
    return QLORA_OK;
}

// Checks a list of strings or a single string.
static qlora_result qlora__peft_check_names(const qlora__config_reader* r, const char* key,
                                            uint32_t* out) {
    char shown[48];
    uint32_t value = qlora__config_find(r, key);
    *out = value;
    if (value == 0) {
        return QLORA_OK;
    }
    const qlora__json_token* t = &r->json->tokens[value];
    bool good = t->kind == QLORA__JSON_STRING || t->kind == QLORA__JSON_ARRAY;
    for (uint32_t k = value + 1; good && k < t->next; k = r->json->tokens[k].next) {
        good = r->json->tokens[k].kind == QLORA__JSON_STRING;
    }
    if (!good) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT,
                               "%s: %s is %s; it must be a list of names or a "
                               "regular expression",
                               r->json->label, key, qlora__config_show(r, value, shown));
    }
    return QLORA_OK;
}

static qlora_result qlora__peft_check_object(const qlora__config_reader* r, const char* key,
                                             uint32_t* out) {
    *out = qlora__config_find(r, key);
    return *out != 0 ? qlora__config_need_object(r, key, *out) : QLORA_OK;
}

// layers_to_transform, a number or a list of numbers, only beside a list of modules. An empty list
// means all layers, as in PEFT.
static qlora_result qlora__peft_check_layers(const qlora__config_reader* r, qlora__peft* p) {
    char shown[48];
    uint32_t layers = qlora__config_find(r, "layers_to_transform");
    const qlora__json_token* t = &r->json->tokens[layers];
    bool list = layers != 0 && t->kind == QLORA__JSON_ARRAY;
    int64_t ignored = 0;
    bool good = list || layers == 0 || qlora__json_int(r->json, layers, &ignored);
    for (uint32_t k = layers + 1; list && good && k < t->next; k = r->json->tokens[k].next) {
        good = qlora__json_int(r->json, k, &ignored);
    }
    if (!good) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT,
                               "%s: layers_to_transform is %s; it must be an integer or a list of "
                               "integers",
                               r->json->label, qlora__config_show(r, layers, shown));
    }
    if (layers != 0 && qlora__json_kind_of(r->json, p->targets) == QLORA__JSON_STRING) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT,
                               "%s: layers_to_transform is set, but target_modules is not a list",
                               r->json->label);
    }
    p->layers = list && t->count == 0 ? 0 : layers;
    return QLORA_OK;
}

// Whether a name is that of a module, or ends in it.
static bool qlora__peft_named(const qlora__json* json, uint32_t value, const char* module) {
    size_t length = strlen(module);
    char name[96];
    size_t n = qlora__json_string(json, value, name, sizeof name);
    return n < sizeof name && n >= length && strcmp(name + n - length, module) == 0 &&
           (n == length || name[n - length - 1] == '.');
}

// Whether modules_to_save selects a norm: as in PEFT, its name ends in one of the list.
static bool qlora__peft_saves_norm(const qlora__peft* p, const char* module, size_t length) {
    const qlora__json* json = &p->json;
    bool found = false;
    for (uint32_t k = p->saves_norms + 1;
         p->saves_norms != 0 && !found && k < json->tokens[p->saves_norms].next;
         k = json->tokens[k].next) {
        size_t n = qlora__json_string(json, k, NULL, 0);
        found = n > 0 && n <= length && qlora__json_equals(json, k, module + length - n, n);
    }
    return found;
}

// Whether a name that is not that of embedding or head can only select norms.
static bool qlora__peft_is_norm(const qlora__json* json, uint32_t value) {
    char name[160];
    size_t n = qlora__json_string(json, value, name, sizeof name);
    return n >= 4 && n < sizeof name && strlen(name) == n && strcmp(name + n - 4, "norm") == 0;
}

// modules_to_save: of the modules that are not projections, only embedding, head and norms.
static qlora_result qlora__peft_check_saved(const qlora__config_reader* r, qlora__peft* p) {
    uint32_t list = 0;
    QLORA__TRY(qlora__config_bool(r, "ensure_weight_tying", false, &p->tied));
    QLORA__TRY(qlora__peft_check_names(r, "modules_to_save", &list));
    if (list != 0 && r->json->tokens[list].kind != QLORA__JSON_ARRAY) {
        return qlora__config_refuse(r, "modules_to_save", list, "it must be a list");
    }
    for (uint32_t k = list + 1; list != 0 && k < r->json->tokens[list].next;
         k = r->json->tokens[k].next) {
        bool embed = qlora__peft_named(r->json, k, "embed_tokens");
        bool head = qlora__peft_named(r->json, k, "lm_head");
        bool norm = !embed && !head && qlora__peft_is_norm(r->json, k);
        if (!embed && !head && !norm) {
            return qlora__config_refuse(r, "modules_to_save", k,
                                        "only embed_tokens, lm_head and norms are supported");
        }
        p->saves_norms = norm ? list : p->saves_norms;
        p->saves_embed = p->saves_embed || embed;
        p->saves_head = p->saves_head || head;
    }
    return QLORA_OK;
}

// Whether two lists of trainable_token_indices are equal.
static bool qlora__peft_same_lists(const qlora__json* json, uint32_t a, uint32_t b) {
    bool same = json->tokens[a].kind == QLORA__JSON_ARRAY &&
                json->tokens[b].kind == QLORA__JSON_ARRAY &&
                json->tokens[a].count == json->tokens[b].count;
    for (uint32_t i = 0; same && i < json->tokens[a].count; i++) {
        int64_t x = -1;
        int64_t y = -2;
        same = qlora__json_int(json, qlora__json_at(json, a, i), &x) &&
               qlora__json_int(json, qlora__json_at(json, b, i), &y) && x == y;
    }
    return same;
}

// The list of embed_tokens in an object, which may have the same one for lm_head; 0 if it has
// anything else.
static uint32_t qlora__peft_token_object(const qlora__json* json, uint32_t object, bool* head) {
    uint32_t rows = qlora__json_find(json, object, "embed_tokens");
    uint32_t more = qlora__json_find(json, object, "lm_head");
    uint32_t count = json->tokens[object].count;
    *head = more != 0;
    bool good = rows != 0 &&
                (more == 0 ? count == 1 : count == 2 && qlora__peft_same_lists(json, rows, more));
    return good ? rows : 0;
}

// trainable_token_indices: a list, or an object with that of embed_tokens and perhaps of lm_head.
static qlora_result qlora__peft_check_tokens(const qlora__config_reader* r, qlora__peft* p) {
    static const char name[] = "trainable_token_indices";
    uint32_t list = qlora__config_find(r, name);
    const qlora__json* json = r->json;
    if (list != 0 && json->tokens[list].kind == QLORA__JSON_OBJECT) {
        uint32_t rows = qlora__peft_token_object(json, list, &p->head_rows);
        if (rows == 0) {
            return qlora__config_refuse(r, name, list,
                                        "only embed_tokens is supported, or the same list for "
                                        "embed_tokens and lm_head");
        }
        list = rows;
    }
    if (list == 0 ||
        (json->tokens[list].kind == QLORA__JSON_ARRAY && json->tokens[list].count == 0)) {
        return QLORA_OK;
    }
    bool good = json->tokens[list].kind == QLORA__JSON_ARRAY;
    for (uint32_t k = list + 1; good && k < json->tokens[list].next; k = json->tokens[k].next) {
        int64_t id = -1;
        good = qlora__json_int(json, k, &id) && id >= 0 && id <= INT32_MAX;
    }
    if (!good) {
        return qlora__config_refuse(r, name, list, "it must be a list of token ids");
    }
    if (p->saves_embed) {
        return qlora__config_refuse(r, name, list,
                                    "modules_to_save already trains the whole embedding");
    }
    p->token_rows = list;
    return QLORA_OK;
}

// target_parameters: a list of names, without what PEFT refuses beside it or applies in other ways.
static qlora_result qlora__peft_check_parameters(const qlora__config_reader* r, qlora__peft* p) {
    uint32_t list = p->parameters;
    if (list != 0 && r->json->tokens[list].kind != QLORA__JSON_ARRAY) {
        return qlora__config_refuse(r, "target_parameters", list, "it must be a list");
    }
    p->parameters = list != 0 && r->json->tokens[list].count > 0 ? list : 0;
    const char* other = p->parameters == 0 ? NULL
                        : p->layers != 0   ? "layers_to_transform"
                        : p->excludes != 0 ? "exclude_modules"
                        : p->dora          ? "use_dora"
                        : p->dropout > 0.0 ? "lora_dropout"
                                           : NULL;
    return other == NULL
               ? QLORA_OK
               : qlora__env_fail(r->env, QLORA_ERR_UNSUPPORTED,
                                 "%s: target_parameters together with %s is not supported",
                                 r->json->label, other);
}

static qlora_result qlora__peft_from_json(qlora__env* env, qlora__peft* p) {
    qlora__config_reader r;
    char shown[48];
    r.env = env;
    r.json = &p->json;
    r.object = 0;
    if (qlora__json_kind_of(r.json, 0) != QLORA__JSON_OBJECT) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: expected a JSON object", r.json->label);
    }
    uint32_t type = qlora__config_find(&r, "peft_type");
    if (type == 0) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: peft_type is missing", r.json->label);
    }
    if (!qlora__json_is(r.json, type, "LORA")) {
        return qlora__config_refuse(&r, "peft_type", type, "only LORA is supported");
    }
    QLORA__TRY(qlora__peft_check_switches(&r));
    QLORA__TRY(qlora__config_int(&r, "r", 8, 1, 65536, &p->rank));
    QLORA__TRY(qlora__config_positive(&r, "lora_alpha", 8.0, &p->alpha));
    QLORA__TRY(qlora__config_bool(&r, "use_rslora", false, &p->rslora));
    QLORA__TRY(qlora__config_bool(&r, "use_dora", false, &p->dora));
    QLORA__TRY(qlora__peft_check_saved(&r, p));
    QLORA__TRY(qlora__peft_check_tokens(&r, p));
    uint32_t dropout = qlora__config_find(&r, "lora_dropout");
    if (dropout != 0 && (!qlora__json_double(r.json, dropout, &p->dropout) || p->dropout < 0.0 ||
                         p->dropout >= 1.0)) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: lora_dropout is %s; it must be at least 0 and less than 1",
                               r.json->label, qlora__config_show(&r, dropout, shown));
    }
    QLORA__TRY(qlora__peft_check_names(&r, "target_modules", &p->targets));
    QLORA__TRY(qlora__peft_check_names(&r, "exclude_modules", &p->excludes));
    QLORA__TRY(qlora__peft_check_names(&r, "target_parameters", &p->parameters));
    if (p->targets == 0 && p->parameters == 0) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: target_modules is missing",
                               r.json->label);
    }
    QLORA__TRY(qlora__peft_check_layers(&r, p));
    QLORA__TRY(qlora__peft_check_parameters(&r, p));
    QLORA__TRY(qlora__peft_check_object(&r, "rank_pattern", &p->rank_pattern));
    return qlora__peft_check_object(&r, "alpha_pattern", &p->alpha_pattern);
}

// Parses adapter_config.json from memory, which must outlive *p. Call qlora__peft_close afterwards.
static QLORA__UNUSED qlora_result qlora__peft_parse(qlora__env* env, const char* label,
                                                    const void* text, uint64_t size,
                                                    qlora__peft* p) {
    memset(p, 0, sizeof *p);
    QLORA__TRY(qlora__json_parse(env, label, text, size, QLORA__JSON_UNIQUE, &p->json));
    qlora_result result = qlora__peft_from_json(env, p);
    if (result != QLORA_OK) {
        qlora__peft_close(env, p);
    }
    return result;
}

// The name of a module's tensor in adapter_model.safetensors; `which` is 'A' or 'B'.
static qlora_result qlora__peft_key(qlora__env* env, const char* module, char which,
                                    char out[320]) {
    int n = snprintf(out, 320, "base_model.model.%s.lora_%c.weight", module, which);
    return n > 0 && n < 320 ? QLORA_OK
                            : qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                                              "the module name %.60s... is too long", module);
}

// Checks the type and shape of lora_A (which = 0) or lora_B (which = 1).
static qlora_result qlora__peft_check_matrix(qlora__env* env, const qlora__peft* p,
                                             const qlora__st_tensor* t, int which, int64_t rank) {
    char shape[96];
    if (!qlora__st_is_float(t)) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: %s has dtype %s; supported are F32, BF16 and F16",
                               p->tensors.dir, t->name, qlora__st_dtypes[t->dtype].name);
    }
    if (t->rank != 2 || t->shape[which] != rank) {
        return qlora__env_fail(
            env, QLORA_ERR_FORMAT, "%s: %s has shape %s; adapter_config.json gives it rank %lld",
            p->tensors.dir, t->name, qlora__shape_text(t->shape, t->rank, shape), (long long)rank);
    }
    return QLORA_OK;
}

// Whether a tensor is the weight of a norm that the config announces.
static bool qlora__peft_norm_tensor(const qlora__peft* p, const char* name) {
    size_t length = strlen(name);
    return length > 7 && strcmp(name + length - 7, ".weight") == 0 && length < 300 &&
           strstr(name, ".lora_") == NULL && qlora__peft_saves_norm(p, name, length - 7);
}

// Whether a tensor of the file is a whole trained matrix, rows of the embedding, a norm, or a
// magnitude, as the config announces them. Their shapes are checked when they are read.
static qlora_result qlora__peft_other_tensor(qlora__env* env, const qlora__peft* p,
                                             const qlora__st_tensor* t, bool* known) {
    static const char magnitude[] = ".lora_magnitude_vector";
    static const char prefix[] = "base_model.model.";
    const char* plain = qlora__plain_name(t->name);
    size_t length = strlen(t->name);
    size_t end = sizeof magnitude - 1;
    bool shared = p->tied && p->saves_embed;
    bool head = p->saves_head || shared;
    *known = (p->saves_embed && strcmp(plain, "embed_tokens.weight") == 0) ||
             (head && strcmp(plain, "lm_head.weight") == 0) ||
             (p->token_rows != 0 &&
              strcmp(plain, "embed_tokens.token_adapter.trainable_tokens_delta") == 0) ||
             (p->token_rows != 0 &&
              (strcmp(plain, "lm_head.token_adapter.trainable_tokens_delta") == 0 ||
               strcmp(plain, "lm_head.token_adapter.base_layer.weight") == 0 ||
               strcmp(plain, "embed_tokens.token_adapter.base_layer.weight") == 0)) ||
             (p->saves_embed && (strcmp(plain, "embed_tokens.modules_to_save.weight") == 0 ||
                                 strcmp(plain, "embed_tokens.original_module.weight") == 0)) ||
             (head && (strcmp(plain, "lm_head.modules_to_save.weight") == 0 ||
                       strcmp(plain, "lm_head.original_module.weight") == 0)) ||
             qlora__peft_norm_tensor(p, t->name);
    if (*known || !p->dora || length <= end || length >= 320 ||
        strcmp(t->name + length - end, magnitude) != 0) {
        return QLORA_OK;
    }
    char module[320];
    qlora__peft_module found;
    size_t front = strncmp(t->name, prefix, sizeof prefix - 1) == 0 ? sizeof prefix - 1 : 0;
    memcpy(module, t->name + front, length - front - end);
    module[length - front - end] = '\0';
    QLORA__TRY(qlora__peft_lookup(env, p, module, &found));
    *known = found.rank > 0;
    return QLORA_OK;
}

// Finds the parameter whose matrices a module has: its weight, or a matrix of experts, of which
// PEFT wraps the second one around the first. Rank 0 if there is none.
static qlora_result qlora__peft_of_parameter(qlora__env* env, const qlora__peft* p,
                                             const char* module, bool* experts,
                                             qlora__peft_module* out) {
    static const char inner[] = ".base_layer";
    static const char* const names[3] = {".weight", ".gate_up_proj", ".down_proj"};
    qlora__peft_module found[3];
    char path[360];
    size_t n = strlen(module);
    size_t end = sizeof inner - 1;
    bool first = n > end && strcmp(module + n - end, inner) == 0;
    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%.*s%s", (int)(first ? n - end : n), module, names[i]);
        QLORA__TRY(qlora__peft_parameter(env, p, path, &found[i]));
    }
    bool both = found[1].rank > 0 && found[2].rank > 0;
    int which = found[0].rank > 0 && !first ? 0
                : first                     ? (both ? 1 : -1)
                : found[2].rank > 0         ? 2
                : found[1].rank > 0         ? 1
                                            : -1;
    memset(out, 0, sizeof *out);
    if (which >= 0) {
        *out = found[which];
    }
    *experts = which > 0;
    return QLORA_OK;
}

// Checks one tensor of the adapter: a matrix of a module that the config targets, with the rank of
// the config, whose partner exists.
static qlora_result qlora__peft_check_tensor(qlora__env* env, const qlora__peft* p,
                                             const qlora__st_tensor* t) {
    static const char prefix[] = "base_model.model.";
    static const char* const ends[2] = {".lora_A.weight", ".lora_B.weight"};
    char module[320];
    char partner[320];
    qlora__peft_module found;
    size_t length = strlen(t->name);
    size_t front = strncmp(t->name, prefix, sizeof prefix - 1) == 0 ? sizeof prefix - 1 : 0;
    bool known = false;
    QLORA__TRY(qlora__peft_other_tensor(env, p, t, &known));
    if (known) {
        return QLORA_OK;
    }
    int which = 0;
    while (which < 2 && (length < front + 14 || strcmp(t->name + length - 14, ends[which]) != 0)) {
        which++;
    }
    if (which == 2 || length >= sizeof module) {
        return qlora__env_fail(
            env, QLORA_ERR_UNSUPPORTED,
            "%s: %s: only lora_A and lora_B matrices of linear layers are supported",
            p->tensors.dir, t->name);
    }
    memcpy(module, t->name + front, length - front - 14);
    module[length - front - 14] = '\0';
    bool experts = false; // of which the config does not say how many there are
    QLORA__TRY(qlora__peft_lookup(env, p, module, &found));
    if (found.rank == 0 && p->parameters != 0) {
        QLORA__TRY(qlora__peft_of_parameter(env, p, module, &experts, &found));
    }
    if (found.rank == 0) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "%s: %s is not targeted by adapter_config.json", p->tensors.dir,
                               t->name);
    }
    memcpy(partner, t->name, length + 1);
    partner[length - 8] = which == 0 ? 'B' : 'A';
    if (qlora__folder_find(&p->tensors, partner) == NULL) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: %s is missing", p->tensors.dir, partner);
    }
    if (experts && t->rank == 2 && t->shape[which] % found.rank == 0) {
        found.rank = t->shape[which];
    }
    return qlora__peft_check_matrix(env, p, t, which, found.rank);
}

static qlora_result qlora__peft_open_files(qlora__env* env, const char* dir, qlora__peft* p) {
    char path[QLORA__PATH_ROOM];
    QLORA__TRY(qlora__path_join(env, dir, "adapter_config.json", p->path));
    QLORA__TRY(qlora__map_open(env, p->path, &p->map));
    QLORA__TRY(
        qlora__json_parse(env, p->path, p->map.data, p->map.size, QLORA__JSON_UNIQUE, &p->json));
    QLORA__TRY(qlora__peft_from_json(env, p));
    QLORA__TRY(qlora__path_join(env, dir, "adapter_model.safetensors", path));
    QLORA__TRY(qlora__path_join(env, "", dir, p->tensors.dir));
    QLORA__TRY(qlora__folder_open_single(env, &p->tensors, path));
    for (uint32_t i = 0; i < p->tensors.count; i++) {
        const char* at = strstr(p->tensors.entries[i].name, ".experts.");
        p->numbered = p->numbered || (at != NULL && at[9] >= '0' && at[9] <= '9');
        QLORA__TRY(qlora__peft_check_tensor(env, p, p->tensors.entries[i].tensor));
    }
    return QLORA_OK;
}

// Opens an adapter folder and checks its consistency: every tensor is half of a pair, is targeted
// by the config and has its rank. After a failure there is nothing to close.
static QLORA__UNUSED qlora_result qlora__peft_open(qlora__env* env, const char* dir,
                                                   qlora__peft* p) {
    memset(p, 0, sizeof *p);
    qlora_result result = qlora__peft_open_files(env, dir, p);
    if (result != QLORA_OK) {
        qlora__peft_close(env, p);
    }
    return result;
}

// Finds the matrices of the adapter for a module [out, in]; the rank is 0 if the config does not
// target it.
static QLORA__UNUSED qlora_result qlora__peft_find(qlora__env* env, const qlora__peft* p,
                                                   const char* module, int64_t out_size,
                                                   int64_t in_size, qlora__peft_module* out) {
    // The rank was checked when the adapter was opened.
    static const char other[] = "; the adapter was trained on another model";
    const qlora__folder* f = &p->tensors;
    char key[320];
    qlora__peft_module m;
    QLORA__TRY(qlora__peft_lookup(env, p, module, &m));
    if (m.rank > 0) {
        QLORA__TRY(qlora__peft_key(env, module, 'A', key));
        QLORA__TRY(qlora__folder_need_hint(env, f, key, m.rank, in_size, other, &m.a));
        QLORA__TRY(qlora__peft_key(env, module, 'B', key));
        QLORA__TRY(qlora__folder_need_hint(env, f, key, out_size, m.rank, other, &m.b));
        snprintf(key, sizeof key, "base_model.model.%.270s.lora_magnitude_vector", module);
        if (p->dora) {
            QLORA__TRY(qlora__folder_need_hint(env, f, key, out_size, -1, other, &m.m));
        }
    }
    *out = m;
    return QLORA_OK;
}

// ---- writing PEFT adapters ----------------------------------------------------------------------

typedef struct qlora__peft_override {
    const char* module; // full name or a suffix of it
    int64_t rank;       // 0 = no override
    double alpha;       // 0 = no override
} qlora__peft_override;

typedef struct qlora__peft_desc {
    const char* base_name; // name or folder of the base model; NULL = null in the file
    int64_t rank;
    double alpha;
    double dropout;
    bool rslora;
    bool dora;
    const char* const* saved; // modules_to_save
    uint32_t saved_count;
    bool tied;
    const int32_t* token_rows; // trainable_token_indices
    uint32_t token_row_count;
    bool head_rows;      // of lm_head as well
    const char* pattern; // target_modules as a regular expression; NULL = the list `targets`
    const char* const* targets;
    uint32_t target_count;
    const char* const* parameters; // target_parameters
    uint32_t parameter_count;
    const int64_t* layers; // layers_to_transform; layer_count 0 = all
    uint32_t layer_count;
    const qlora__peft_override* overrides;
    uint32_t override_count;
} qlora__peft_desc;

// PEFT declares alpha as an integer but accepts a float.
static void qlora__peft_write_alpha(qlora__json_writer* w, const char* key, double alpha) {
    if (alpha >= 0.0 && alpha < 1e15 && (double)(int64_t)alpha == alpha) {
        qlora__json_write_int(w, key, (int64_t)alpha);
    } else {
        qlora__json_write_double(w, key, alpha);
    }
}

// The keys of a pattern are regular expressions, so dots in a name are escaped.
static void qlora__peft_write_pattern(qlora__json_writer* w, const char* name,
                                      const qlora__peft_desc* d, bool ranks) {
    qlora__json_write_open(w, name, '{');
    for (uint32_t i = 0; i < d->override_count; i++) {
        const qlora__peft_override* o = &d->overrides[i];
        char key[640];
        size_t n = 0;
        for (const char* c = o->module; *c != '\0' && n < sizeof key - 2; c++) {
            if (*c == '.') {
                key[n++] = '\\';
            }
            key[n++] = *c;
        }
        key[n] = '\0';
        if (ranks && o->rank > 0) {
            qlora__json_write_int(w, key, o->rank);
        } else if (!ranks && o->alpha > 0.0) {
            qlora__peft_write_alpha(w, key, o->alpha);
        }
    }
    qlora__json_write_close(w, '}');
}

// A list of names, or null if it is empty.
static void qlora__peft_write_names(qlora__json_writer* w, const char* key,
                                    const char* const* names, uint32_t count) {
    if (count == 0) {
        qlora__json_write_word(w, key, "null");
        return;
    }
    qlora__json_write_open(w, key, '[');
    for (uint32_t i = 0; i < count; i++) {
        qlora__json_write_string(w, NULL, names[i]);
    }
    qlora__json_write_close(w, ']');
}

static void qlora__peft_write_rows(qlora__json_writer* w, const char* key,
                                   const qlora__peft_desc* d) {
    qlora__json_write_open(w, key, '[');
    for (uint32_t i = 0; i < d->token_row_count; i++) {
        qlora__json_write_int(w, NULL, d->token_rows[i]);
    }
    qlora__json_write_close(w, ']');
}

// Writes the text of adapter_config.json: the keys that every version of PEFT knows, sorted, with
// an indent of two spaces.
static void qlora__peft_write_text(qlora__string* text, const qlora__peft_desc* d) {
    qlora__json_writer w;
    qlora__json_write_begin(&w, text, 2);
    qlora__json_write_open(&w, NULL, '{');
    qlora__peft_write_pattern(&w, "alpha_pattern", d, false);
    if (d->base_name != NULL) {
        qlora__json_write_string(&w, "base_model_name_or_path", d->base_name);
    } else {
        qlora__json_write_word(&w, "base_model_name_or_path", "null");
    }
    qlora__json_write_string(&w, "bias", "none");
    if (d->tied) { // older versions do not know it
        qlora__json_write_word(&w, "ensure_weight_tying", "true");
    }
    qlora__json_write_word(&w, "fan_in_fan_out", "false");
    qlora__json_write_word(&w, "inference_mode", "true");
    qlora__json_write_word(&w, "init_lora_weights", "true");
    qlora__json_write_word(&w, "layers_pattern", "null");
    if (d->layer_count > 0) {
        qlora__json_write_open(&w, "layers_to_transform", '[');
        for (uint32_t i = 0; i < d->layer_count; i++) {
            qlora__json_write_int(&w, NULL, d->layers[i]);
        }
        qlora__json_write_close(&w, ']');
    } else {
        qlora__json_write_word(&w, "layers_to_transform", "null");
    }
    qlora__peft_write_alpha(&w, "lora_alpha", d->alpha);
    qlora__json_write_double(&w, "lora_dropout", d->dropout);
    qlora__peft_write_names(&w, "modules_to_save", d->saved, d->saved_count);
    qlora__json_write_string(&w, "peft_type", "LORA");
    qlora__json_write_int(&w, "r", d->rank);
    qlora__peft_write_pattern(&w, "rank_pattern", d, true);
    qlora__json_write_word(&w, "revision", "null");
    if (d->pattern != NULL) {
        qlora__json_write_string(&w, "target_modules", d->pattern);
    } else {
        qlora__peft_write_names(&w, "target_modules", d->targets, d->target_count);
    }
    if (d->parameter_count > 0) { // older versions do not know it
        qlora__peft_write_names(&w, "target_parameters", d->parameters, d->parameter_count);
    }
    qlora__json_write_string(&w, "task_type", "CAUSAL_LM");
    if (d->head_rows) {
        qlora__json_write_open(&w, "trainable_token_indices", '{');
        qlora__peft_write_rows(&w, "embed_tokens", d);
        qlora__peft_write_rows(&w, "lm_head", d);
        qlora__json_write_close(&w, '}');
    } else if (d->token_row_count > 0) {
        qlora__peft_write_rows(&w, "trainable_token_indices", d);
    }
    qlora__json_write_word(&w, "use_dora", d->dora ? "true" : "false");
    qlora__json_write_word(&w, "use_rslora", d->rslora ? "true" : "false");
    qlora__json_write_close(&w, '}');
}

// Writes adapter_config.json into `dir`. The matrices are written to the same folder with
// qlora__st_write_*, under the names of qlora__peft_key; write them first, so that a config is
// never written before its weights.
static QLORA__UNUSED qlora_result qlora__peft_write_config(qlora__env* env, const char* dir,
                                                           const qlora__peft_desc* d) {
    char path[QLORA__PATH_ROOM];
    qlora__string text;
    QLORA__TRY(qlora__path_join(env, dir, "adapter_config.json", path));
    qlora__string_begin(env, &text);
    qlora__peft_write_text(&text, d);
    qlora_result result = text.result;
    if (result == QLORA_OK) {
        result = qlora__file_write(env, path, text.data, text.size);
    }
    qlora__string_free(&text);
    return result;
}
