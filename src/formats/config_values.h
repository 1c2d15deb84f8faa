// ---- the values of a config file ----------------------------------------------------------------

// One object of a config file, with the environment for its messages.
typedef struct qlora__config_reader {
    qlora__env* env;
    const qlora__json* json;
    uint32_t object;
} qlora__config_reader;

// The value of a key; null counts as absent, as in transformers.
static uint32_t qlora__config_find(const qlora__config_reader* r, const char* key) {
    uint32_t value = qlora__json_find(r->json, r->object, key);
    return value != 0 && qlora__json_kind_of(r->json, value) == QLORA__JSON_NULL ? 0 : value;
}

// The value as written in the file, for messages.
static const char* qlora__config_show(const qlora__config_reader* r, uint32_t value, char out[48]) {
    const qlora__json_token* t = &r->json->tokens[value];
    uint32_t n = t->end - t->begin < 44 ? t->end - t->begin : 44;
    memcpy(out, r->json->text + t->begin, n);
    memcpy(out + n, t->end - t->begin > n ? "..." : "", t->end - t->begin > n ? 4 : 1);
    return out;
}

// An integer within [least, most]. If it is absent, the result is `fallback`; a negative fallback
// makes that an error.
static qlora_result qlora__config_int(const qlora__config_reader* r, const char* key,
                                      int64_t fallback, int64_t least, int64_t most, int64_t* out) {
    char shown[48];
    uint32_t value = qlora__config_find(r, key);
    if (value == 0) {
        if (fallback < 0) {
            return qlora__env_fail(r->env, QLORA_ERR_FORMAT, "%s: %s is missing", r->json->label,
                                   key);
        }
        *out = fallback;
        return QLORA_OK;
    }
    int64_t number = 0;
    if (!qlora__json_int(r->json, value, &number) || number < least || number > most) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT,
                               "%s: %s is %s; it must be an integer from %lld to %lld",
                               r->json->label, key, qlora__config_show(r, value, shown),
                               (long long)least, (long long)most);
    }
    *out = number;
    return QLORA_OK;
}

// A positive number. If it is absent, the result is `fallback`; a negative fallback makes that an
// error.
static qlora_result qlora__config_positive(const qlora__config_reader* r, const char* key,
                                           double fallback, double* out) {
    char shown[48];
    uint32_t value = qlora__config_find(r, key);
    if (value == 0) {
        if (fallback < 0.0) {
            return qlora__env_fail(r->env, QLORA_ERR_FORMAT, "%s: %s is missing", r->json->label,
                                   key);
        }
        *out = fallback;
        return QLORA_OK;
    }
    double number = 0.0;
    if (!qlora__json_double(r->json, value, &number) || !(number > 0.0) || number > 1e30) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT,
                               "%s: %s is %s; it must be positive and at most 1e30", r->json->label,
                               key, qlora__config_show(r, value, shown));
    }
    *out = number;
    return QLORA_OK;
}

static qlora_result qlora__config_bool(const qlora__config_reader* r, const char* key,
                                       bool fallback, bool* out) {
    char shown[48];
    uint32_t value = qlora__config_find(r, key);
    qlora__json_kind kind = value != 0 ? qlora__json_kind_of(r->json, value) : QLORA__JSON_NULL;
    if (value != 0 && kind != QLORA__JSON_TRUE && kind != QLORA__JSON_FALSE) {
        return qlora__env_fail(r->env, QLORA_ERR_FORMAT, "%s: %s is %s; it must be true or false",
                               r->json->label, key, qlora__config_show(r, value, shown));
    }
    *out = value != 0 ? kind == QLORA__JSON_TRUE : fallback;
    return QLORA_OK;
}

// A token id below `vocab`, or -1 if it is absent; some old files contain -1 itself.
static qlora_result qlora__config_id(const qlora__config_reader* r, const char* key, int64_t vocab,
                                     int32_t* out) {
    int64_t id = -1;
    if (qlora__config_find(r, key) != 0) {
        QLORA__TRY(qlora__config_int(r, key, -1, -1, vocab - 1, &id));
    }
    *out = (int32_t)id;
    return QLORA_OK;
}

typedef char qlora__config_stop_ids_fit[QLORA__MAX_STOP_IDS <= QLORA_MAX_STOP_IDS ? 1 : -1];

// eos_token_id: one id, a list of ids, or none.
static qlora_result qlora__config_stops(const qlora__config_reader* r, qlora_model_config* c) {
    qlora__stop_ids ids;
    ids.count = 0;
    QLORA__TRY(qlora__stop_ids_read(r->env, r->json, r->object, c->vocab, &ids));
    memset(c->stop_ids, 0, sizeof c->stop_ids);
    memcpy(c->stop_ids, ids.id, (size_t)ids.count * sizeof ids.id[0]);
    c->stop_count = ids.count;
    return QLORA_OK;
}

static qlora_result qlora__config_refuse(const qlora__config_reader* r, const char* key,
                                         uint32_t value, const char* advice) {
    char shown[48];
    return qlora__env_fail(r->env, QLORA_ERR_UNSUPPORTED, "%s: %s \"%s\" is not supported; %s",
                           r->json->label, key, qlora__config_show(r, value, shown), advice);
}

// Whether a key is written, if only as null.
static bool qlora__config_has(const qlora__config_reader* r, const char* key) {
    return qlora__json_find(r->json, r->object, key) != 0;
}
