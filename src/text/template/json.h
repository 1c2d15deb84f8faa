// JSON to values and back: json.loads for the conversation, json.dumps for the filter tojson.

// The value of a JSON token. Its depth is limited by the JSON reader; containers are kept on an
// explicit stack.
typedef struct qlora__jin_level {
    qlora__jin_value value;
    const qlora__json_token* end; // behind the last token inside
} qlora__jin_level;

static qlora_result qlora__jin_from_number(qlora__jin_machine* m, const qlora__json* json,
                                           const qlora__json_token* token, qlora__jin_value* out) {
    int64_t integer = 0;
    const char* text = json->text + token->begin;
    size_t size = token->end - token->begin;
    for (size_t i = 0; i < size; i++) {
        if (text[i] == '.' || text[i] == 'e' || text[i] == 'E') {
            *out = qlora__jin_float(qlora__number_parse(text, size));
            return QLORA_OK;
        }
    }
    if (qlora__text_json_integer(json, token, &integer)) {
        *out = qlora__jin_int(integer);
        return QLORA_OK;
    }
    QLORA__TRY(qlora__jin_string_share(m, text, size, out));
    out->kind = QLORA__JIN_BIG;
    return QLORA_OK;
}

// One token; of a container, the empty container.
static qlora_result qlora__jin_from_token(qlora__jin_machine* m, const qlora__json* json,
                                          const qlora__json_token* token, qlora__jin_value* out) {
    switch (token->kind) {
    case QLORA__JSON_TRUE:
    case QLORA__JSON_FALSE:
        *out = qlora__jin_bool(token->kind == QLORA__JSON_TRUE);
        return QLORA_OK;
    case QLORA__JSON_NUMBER:
        return qlora__jin_from_number(m, json, token, out);
    case QLORA__JSON_STRING:
        return qlora__jin_string_share(m, qlora__text_json_text(json, token),
                                       qlora__text_json_size(token), out);
    case QLORA__JSON_ARRAY:
        return qlora__jin_list_make(m, QLORA__JIN_LIST, token->count, out);
    case QLORA__JSON_OBJECT:
        return qlora__jin_dict_make(m, QLORA__JIN_DICT, token->count, out);
    default:
        *out = qlora__jin_none();
        return QLORA_OK;
    }
}

// The strings of the result share the memory of `json`, which must have been decoded.
static qlora_result qlora__jin_from_json(qlora__jin_machine* m, const qlora__json* json,
                                         const qlora__json_token* root, qlora__jin_value* out) {
    qlora__jin_level levels[QLORA__JSON_MAX_DEPTH + 1];
    size_t depth = 0;
    const qlora__json_token* token = root;
    const qlora__json_token* end = qlora__text_json_next(json, root);
    while (token < end) {
        qlora__jin_value value;
        const qlora__json_token* key = NULL;
        bool in_dict = depth > 0 && levels[depth - 1].value.kind == QLORA__JIN_DICT;
        if (in_dict) {
            key = token++;
        }
        QLORA__TRY(qlora__jin_from_token(m, json, token, &value));
        if (in_dict) {
            qlora__jin_value name;
            QLORA__TRY(qlora__jin_from_token(m, json, key, &name));
            QLORA__TRY(qlora__jin_dict_set(m, levels[depth - 1].value.as.dict, name, value));
        } else if (depth > 0) {
            QLORA__TRY(qlora__jin_list_add(m, levels[depth - 1].value.as.list, value));
        } else {
            *out = value;
        }
        bool container = value.kind == QLORA__JIN_LIST || value.kind == QLORA__JIN_DICT;
        if (container && depth <= QLORA__JSON_MAX_DEPTH) {
            levels[depth].value = value;
            levels[depth++].end = qlora__text_json_next(json, token);
        }
        token++;
        while (depth > 0 && token >= levels[depth - 1].end) {
            depth--;
        }
    }
    return QLORA_OK;
}

// ---- tojson -------------------------------------------------------------------------------------

typedef struct qlora__jin_dump {
    qlora__jin_buffer* out;
    bool ascii;
    bool sorted;
    bool indented;
    qlora__jin_value indent; // a string for each level
    qlora__jin_value item_separator;
    qlora__jin_value key_separator;
    qlora_result (*value)(qlora__jin_machine* m, const struct qlora__jin_dump* dump,
                          qlora__jin_value v, size_t level);
} qlora__jin_dump;

static qlora_result qlora__jin_dump_string(qlora__jin_machine* m, const qlora__jin_string* s,
                                           bool ascii, qlora__jin_buffer* out) {
    static const char plain[] = "\"\\\b\f\n\r\t";
    static const char letters[] = "\"\\bfnrt";
    QLORA__TRY(qlora__jin_work(m, s->bytes / 32));
    QLORA__TRY(qlora__jin_put(m, out, "\"", 1));
    size_t good = 0;
    for (size_t at = 0; at < s->bytes;) {
        char escaped[16];
        unsigned char c = (unsigned char)s->data[at];
        size_t step = 1;
        const char* hit = c != 0 && c < 0x80 ? strchr(plain, (char)c) : NULL;
        if (hit != NULL) {
            snprintf(escaped, sizeof escaped, "\\%c", letters[hit - plain]);
        } else if (c < 0x20 || (c == 0x7F && ascii)) {
            snprintf(escaped, sizeof escaped, "\\u%04x", (unsigned)c);
        } else if (c >= 0x80 && ascii) {
            uint32_t code = qlora__jin_code_at(s->data, s->bytes, at, &step);
            if (code >= 0x10000) {
                code -= 0x10000;
                snprintf(escaped, sizeof escaped, "\\u%04x\\u%04x",
                         (unsigned)(0xD800 + (code >> 10)), (unsigned)(0xDC00 + (code & 0x3FF)));
            } else {
                snprintf(escaped, sizeof escaped, "\\u%04x", (unsigned)code);
            }
        } else {
            at++;
            continue;
        }
        QLORA__TRY(qlora__jin_put(m, out, s->data + good, at - good));
        QLORA__TRY(qlora__jin_puts(m, out, escaped));
        at += step;
        good = at;
    }
    QLORA__TRY(qlora__jin_put(m, out, s->data + good, s->bytes - good));
    return qlora__jin_put(m, out, "\"", 1);
}

static qlora_result qlora__jin_dump_number(qlora__jin_machine* m, qlora__jin_value v,
                                           qlora__jin_buffer* out) {
    if (v.kind == QLORA__JIN_FLOAT) {
        double x = v.as.real;
        if (qlora__jin_is_nan(x) || x > 1.7976931348623157e308 || x < -1.7976931348623157e308) {
            return qlora__jin_puts(m, out,
                                   qlora__jin_is_nan(x) ? "NaN"
                                   : x > 0.0            ? "Infinity"
                                                        : "-Infinity");
        }
    }
    if (v.kind == QLORA__JIN_BOOL || v.kind == QLORA__JIN_NONE) {
        return qlora__jin_puts(m, out,
                               v.kind == QLORA__JIN_NONE ? "null"
                               : v.as.truth              ? "true"
                                                         : "false");
    }
    return qlora__jin_repr(m, v, out);
}

static qlora_result qlora__jin_dump_newline(qlora__jin_machine* m, const qlora__jin_dump* d,
                                            size_t level) {
    if (!d->indented) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__jin_put(m, d->out, "\n", 1));
    for (size_t i = 0; i < level; i++) {
        QLORA__TRY(qlora__jin_print(m, d->indent, d->out));
    }
    return QLORA_OK;
}

static qlora_result qlora__jin_dump_list(qlora__jin_machine* m, const qlora__jin_dump* d,
                                         const qlora__jin_list* list, size_t level) {
    QLORA__TRY(qlora__jin_put(m, d->out, "[", 1));
    for (size_t i = 0; i < list->count; i++) {
        if (i > 0) {
            QLORA__TRY(qlora__jin_print(m, d->item_separator, d->out));
        }
        QLORA__TRY(qlora__jin_dump_newline(m, d, level + 1));
        QLORA__TRY(d->value(m, d, list->items[i], level + 1));
    }
    if (list->count > 0) {
        QLORA__TRY(qlora__jin_dump_newline(m, d, level));
    }
    return qlora__jin_put(m, d->out, "]", 1);
}

// The order of the keys: as they are, or sorted (by insertion, stable). Python compares the keys
// themselves, so keys of different types are an error.
static qlora_result qlora__jin_sort_keys(qlora__jin_machine* m, const qlora__jin_dict* dict,
                                         bool sorted, size_t** out) {
    void* memory = NULL;
    QLORA__TRY(qlora__jin_get(m, dict->count * sizeof(size_t), &memory));
    size_t* order = (size_t*)memory;
    for (size_t i = 0; i < dict->count; i++) {
        size_t at = i;
        while (sorted && at > 0) {
            bool less = false;
            QLORA__TRY(qlora__jin_less(m, dict->keys[i], dict->keys[order[at - 1]], false, &less));
            if (!less) {
                break;
            }
            order[at] = order[at - 1];
            at--;
        }
        order[at] = i;
    }
    *out = order;
    return QLORA_OK;
}

static qlora_result qlora__jin_dump_dict(qlora__jin_machine* m, const qlora__jin_dump* d,
                                         const qlora__jin_dict* dict, size_t level) {
    size_t* order = NULL;
    QLORA__TRY(qlora__jin_sort_keys(m, dict, d->sorted, &order));
    QLORA__TRY(qlora__jin_put(m, d->out, "{", 1));
    for (size_t i = 0; i < dict->count; i++) {
        qlora__jin_value key = dict->keys[order[i]];
        if (i > 0) {
            QLORA__TRY(qlora__jin_print(m, d->item_separator, d->out));
        }
        QLORA__TRY(qlora__jin_dump_newline(m, d, level + 1));
        if (key.kind == QLORA__JIN_STRING) {
            QLORA__TRY(qlora__jin_dump_string(m, key.as.string, d->ascii, d->out));
        } else if (qlora__jin_is_number(key) || key.kind == QLORA__JIN_NONE) {
            QLORA__TRY(qlora__jin_put(m, d->out, "\"", 1));
            QLORA__TRY(qlora__jin_dump_number(m, key, d->out));
            QLORA__TRY(qlora__jin_put(m, d->out, "\"", 1));
        } else {
            return qlora__jin_fail(m, "tojson: a %s cannot be a key", qlora__jin_type(key));
        }
        QLORA__TRY(qlora__jin_print(m, d->key_separator, d->out));
        QLORA__TRY(d->value(m, d, dict->values[order[i]], level + 1));
    }
    if (dict->count > 0) {
        QLORA__TRY(qlora__jin_dump_newline(m, d, level));
    }
    return qlora__jin_put(m, d->out, "}", 1);
}

static qlora_result qlora__jin_dump_value(qlora__jin_machine* m, const qlora__jin_dump* d,
                                          qlora__jin_value v, size_t level) {
    QLORA__TRY(qlora__jin_enter(m));
    switch (v.kind) {
    case QLORA__JIN_NONE:
    case QLORA__JIN_BOOL:
    case QLORA__JIN_INT:
    case QLORA__JIN_BIG:
    case QLORA__JIN_FLOAT:
        QLORA__TRY(qlora__jin_dump_number(m, v, d->out));
        break;
    case QLORA__JIN_STRING:
        QLORA__TRY(qlora__jin_dump_string(m, v.as.string, d->ascii, d->out));
        break;
    case QLORA__JIN_LIST:
    case QLORA__JIN_TUPLE:
        QLORA__TRY(qlora__jin_dump_list(m, d, v.as.list, level));
        break;
    case QLORA__JIN_DICT:
        QLORA__TRY(qlora__jin_dump_dict(m, d, v.as.dict, level));
        break;
    default:
        return qlora__jin_fail(m, "tojson: a %s cannot be written as JSON", qlora__jin_type(v));
    }
    m->depth--;
    return QLORA_OK;
}

// in: value, ensure_ascii, indent, separators, sort_keys
static qlora_result qlora__jin_tojson(qlora__jin_machine* m, qlora__jin_value* in,
                                      qlora__jin_value* out) {
    qlora__jin_buffer buffer;
    qlora__jin_dump d;
    memset(&buffer, 0, sizeof buffer);
    memset(&d, 0, sizeof d);
    d.out = &buffer;
    d.value = qlora__jin_dump_value;
    d.ascii = qlora__jin_truth(in[1]);
    d.sorted = qlora__jin_truth(in[4]);
    d.indented = in[2].kind != QLORA__JIN_MISSING && in[2].kind != QLORA__JIN_NONE;
    QLORA__TRY(qlora__jin_string_of(m, "", &d.indent));
    if (in[2].kind == QLORA__JIN_STRING) {
        d.indent = in[2];
    } else if (d.indented && qlora__jin_is_integer(in[2])) {
        qlora__jin_value space;
        QLORA__TRY(qlora__jin_string_of(m, " ", &space));
        QLORA__TRY(qlora__jin_repeat(m, space, qlora__jin_integer_of(in[2]), &d.indent));
    } else if (d.indented) {
        return qlora__jin_fail(m, "tojson: indent is a %s", qlora__jin_type(in[2]));
    }
    QLORA__TRY(qlora__jin_string_of(m, d.indented ? "," : ", ", &d.item_separator));
    QLORA__TRY(qlora__jin_string_of(m, ": ", &d.key_separator));
    if (in[3].kind != QLORA__JIN_MISSING && in[3].kind != QLORA__JIN_NONE) {
        bool pair = (in[3].kind == QLORA__JIN_TUPLE || in[3].kind == QLORA__JIN_LIST) &&
                    in[3].as.list->count == 2 &&
                    in[3].as.list->items[0].kind == QLORA__JIN_STRING &&
                    in[3].as.list->items[1].kind == QLORA__JIN_STRING;
        if (!pair) {
            return qlora__jin_fail(m, "tojson: separators must be two strings");
        }
        d.item_separator = in[3].as.list->items[0];
        d.key_separator = in[3].as.list->items[1];
    }
    QLORA__TRY(qlora__jin_dump_value(m, &d, in[0], 0));
    return qlora__jin_buffer_string(m, &buffer, out);
}
