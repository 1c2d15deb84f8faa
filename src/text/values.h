// JSON values as the loaders use them: pointers to tokens, NULL for a value that is not there.
// Strings are decoded and end with a zero byte.

// Parses a text that holds one value. A byte order mark before it is allowed.
static qlora_result qlora__text_json(qlora__env* env, const char* name, const char* source,
                                     size_t size, qlora__json* json) {
    if (size >= 3 && memcmp(source, "\xEF\xBB\xBF", 3) == 0) {
        source += 3;
        size -= 3;
    }
    memset(json, 0, sizeof *json);
    QLORA__TRY(qlora__json_parse(env, name, source, size, 0, json));
    qlora_result r = qlora__json_decode(env, json);
    if (r != QLORA_OK) {
        qlora__json_free(env, json);
    }
    return r;
}

// The value of a key (the last one if there are several), or NULL.
static const qlora__json_token*
qlora__text_json_get(const qlora__json* json, const qlora__json_token* object, const char* key) {
    uint32_t found =
        object != NULL ? qlora__json_find(json, (uint32_t)(object - json->tokens), key) : 0;
    return found != 0 ? &json->tokens[found] : NULL;
}

// The value after this one and everything inside it; the first element of an array is array + 1.
static const qlora__json_token* qlora__text_json_next(const qlora__json* json,
                                                      const qlora__json_token* value) {
    return json->tokens + value->next;
}

static bool qlora__text_json_string(const qlora__json_token* value) {
    return value != NULL && value->kind == QLORA__JSON_STRING;
}

static const char* qlora__text_json_text(const qlora__json* json, const qlora__json_token* value) {
    return json->strings + value->begin;
}

static size_t qlora__text_json_size(const qlora__json_token* value) {
    return value->end - value->begin;
}

// The string, or NULL when the value is not one.
static const char* qlora__text_json_cstring(const qlora__json* json,
                                            const qlora__json_token* value) {
    return qlora__text_json_string(value) ? qlora__text_json_text(json, value) : NULL;
}

static bool qlora__text_json_is(const qlora__json* json, const qlora__json_token* value,
                                const char* string) {
    return value != NULL && qlora__json_is(json, (uint32_t)(value - json->tokens), string);
}

static bool qlora__text_json_absent(const qlora__json_token* value) {
    return value == NULL || value->kind == QLORA__JSON_NULL;
}

// A member that is true or false; *out stays as it is if there is none, or null. `tokenizers`
// refuses other types.
static qlora_result qlora__text_json_switch(qlora__env* env, const qlora__json* json,
                                            const qlora__json_token* node, const char* name,
                                            bool* out) {
    const qlora__json_token* value = qlora__text_json_get(json, node, name);
    if (qlora__text_json_absent(value)) {
        return QLORA_OK;
    }
    if (value->kind != QLORA__JSON_TRUE && value->kind != QLORA__JSON_FALSE) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "\"%s\" is neither true nor false", name);
    }
    *out = value->kind == QLORA__JSON_TRUE;
    return QLORA_OK;
}

// A whole number without a point and without an exponent.
static bool qlora__text_json_integer(const qlora__json* json, const qlora__json_token* value,
                                     int64_t* out) {
    if (value == NULL || value->kind != QLORA__JSON_NUMBER) {
        return false;
    }
    for (uint32_t i = value->begin; i < value->end; i++) {
        if (json->text[i] != '-' && (json->text[i] < '0' || json->text[i] > '9')) {
            return false;
        }
    }
    return qlora__json_int(json, (uint32_t)(value - json->tokens), out);
}

static qlora_result qlora__text_json_ids(qlora__env* env, const qlora__json* json,
                                         const qlora__json_token* array, qlora_text_ids* out) {
    if (array->kind != QLORA__JSON_ARRAY) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "an array of whole numbers was expected");
    }
    const qlora__json_token* value = array + 1;
    for (uint32_t i = 0; i < array->count; i++) {
        int64_t id = 0;
        if (!qlora__text_json_integer(json, value, &id) || id > INT32_MAX || id < INT32_MIN) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "element %lu is not a whole number of 32 bits",
                                   (unsigned long)i);
        }
        QLORA__TRY(qlora__text_ids_add(env, out, (int32_t)id));
        value = qlora__text_json_next(json, value);
    }
    return QLORA_OK;
}
