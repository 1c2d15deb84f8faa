// ---- scaling of the rotation on request ---------------------------------------------------------

#define QLORA__SCALE_ROOM 40 // of a text such as "yarn:4"

// A scaling that is asked for as TYPE:FACTOR.
typedef struct qlora__scale {
    qlora_rope_type type;
    double factor;
} qlora__scale;

static const struct {
    const char* name;
    qlora_rope_type type;
} qlora__scales[] = {{"yarn", QLORA_ROPE_YARN}, {"linear", QLORA_ROPE_LINEAR}};

#define QLORA__SCALES (sizeof qlora__scales / sizeof qlora__scales[0])

// The name of a type in config.json.
static const char* qlora__rope_name(qlora_rope_type type) {
    static const char* const names[] = {"default", "linear", "llama3", "yarn", "longrope"};
    return names[type];
}

// Whether a text is digits with at most one point between them.
static bool qlora__scale_is_number(const char* text) {
    size_t digits = strspn(text, "0123456789");
    if (digits == 0 || digits > 12) {
        return false;
    }
    if (text[digits] == '\0') {
        return true;
    }
    size_t rest = strspn(text + digits + 1, "0123456789");
    return text[digits] == '.' && rest > 0 && rest <= 12 && text[digits + 1 + rest] == '\0';
}

static qlora_result qlora__scale_parse(qlora__env* env, const char* text, qlora__scale* out) {
    size_t length = strcspn(text, ":");
    memset(out, 0, sizeof *out);
    for (size_t i = 0; i < QLORA__SCALES; i++) {
        if (strlen(qlora__scales[i].name) == length &&
            memcmp(text, qlora__scales[i].name, length) == 0) {
            out->type = qlora__scales[i].type;
        }
    }
    if (length == 7 && memcmp(text, "dynamic", 7) == 0) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "desc.rope_scale is \"%.40s\"; dynamic scaling is not supported, "
                               "because it gives a text another meaning as it grows; use yarn:F or "
                               "linear:F",
                               text);
    }
    bool number = text[length] == ':' && qlora__scale_is_number(text + length + 1);
    if (out->type == QLORA_ROPE_DEFAULT || !number) {
        return qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                               "desc.rope_scale is \"%.40s\"; it must be yarn:F or linear:F with a "
                               "factor F, for example yarn:4",
                               text);
    }
    const char* factor = text + length + 1;
    out->factor = qlora__number_parse(factor, strlen(factor));
    if (!(out->factor > 1.0) || out->factor > 1024.0) {
        return qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                               "desc.rope_scale is \"%.40s\"; the factor must be greater than 1 "
                               "and at most 1024",
                               text);
    }
    return QLORA_OK;
}

// Why the rotation of a model cannot be scaled, or NULL: where transformers would do something
// else, or would not accept the file.
static const char* qlora__scale_fault(const qlora_model_config* c) {
    const qlora__arch* arch = qlora__arch_of(c->family);
    uint32_t reads = arch->reads;
    bool sections = (arch->has & QLORA__HAS_SECTIONS) != 0;
    return c->wrapped || sections ? "it is part of a multimodal model"
           : (reads & QLORA__READS_LONGROPE) != 0
               ? "its family supports longrope only, with factors from its config"
           : (reads & QLORA__READS_ROPE_PER_KIND) != 0
               ? "its layers with and without a window are rotated differently"
           : (reads & QLORA__READS_QUERY_BETA) != 0 ? "its family has a scaling of its own"
           : c->max_positions <= 0                  ? "its config has no max_position_embeddings"
                                                    : NULL;
}

// Scales the rotation of a model as transformers does with
//   max_position_embeddings: positions * factor
//   rope_scaling: {rope_type, factor, original_max_position_embeddings: positions}
// The positions grow by exactly the factor, because some versions of transformers compute the
// factor of yarn from the two numbers and others read it.
static qlora_result qlora__config_scale(qlora__env* env, const char* text, qlora_model_config* c) {
    qlora__scale scale;
    QLORA__TRY(qlora__scale_parse(env, text, &scale));
    const char* fault = qlora__scale_fault(c);
    if (fault != NULL) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "desc.rope_scale is \"%.40s\", but the model cannot be scaled: %s",
                               text, fault);
    }
    if (c->rope.type != QLORA_ROPE_DEFAULT || c->rope_sliding.type != QLORA_ROPE_DEFAULT) {
        qlora_rope_type own =
            c->rope.type != QLORA_ROPE_DEFAULT ? c->rope.type : c->rope_sliding.type;
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "desc.rope_scale is \"%.40s\", but the model already has a scaled "
                               "rotation (rope_type %s), which this would replace",
                               text, qlora__rope_name(own));
    }
    double positions = (double)c->max_positions * scale.factor;
    if (positions > (double)INT32_MAX || floor(positions) < positions) {
        return qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                               "desc.rope_scale is \"%.40s\", which makes %.17g of the model's "
                               "%lld positions; it must be a whole number of at most %d",
                               text, positions, (long long)c->max_positions, INT32_MAX);
    }
    qlora_rope_desc* ropes[2] = {&c->rope, &c->rope_sliding};
    for (int i = 0; i < 2; i++) {
        ropes[i]->type = scale.type;
        ropes[i]->factor = scale.factor;
        if (scale.type == QLORA_ROPE_YARN) {
            ropes[i]->original_max_position = (double)c->max_positions;
            ropes[i]->beta_fast = 32.0;
            ropes[i]->beta_slow = 1.0;
        }
    }
    c->max_positions = (int64_t)positions;
    return QLORA_OK;
}

// Whether a config is scaled as a text says, whoever did it.
static bool qlora__scale_is(qlora__env* env, const char* text, const qlora_model_config* c) {
    qlora__scale scale;
    return qlora__scale_parse(env, text, &scale) == QLORA_OK && c->rope.type == scale.type &&
           c->rope.factor >= scale.factor && c->rope.factor <= scale.factor;
}

// The members of rope_scaling for a scaled config.
static void qlora__scale_write(qlora__json_writer* w, const qlora_model_config* c) {
    qlora__json_write_string(w, "rope_type", qlora__rope_name(c->rope.type));
    qlora__json_write_double(w, "factor", c->rope.factor);
    if (c->rope.type == QLORA_ROPE_YARN) {
        qlora__json_write_int(w, "original_max_position_embeddings",
                              (int64_t)c->rope.original_max_position);
    }
}
