// ---- the chat template of a merged model --------------------------------------------------------

// The value of chat_template in a JSON file: a string, or the one that is called "default" in a
// list of {"name", "template"}. *found = false if it has none.
static qlora_result qlora__merge_template_json(qlora__env* env, const char* path,
                                               const qlora__map* map, qlora__string* out,
                                               bool* found) {
    qlora__json json;
    QLORA__TRY(qlora__json_parse(env, path, map->data, map->size, 0, &json));
    qlora_result r = qlora__json_decode(env, &json);
    uint32_t value = r == QLORA_OK ? qlora__json_find(&json, 0, "chat_template") : 0;
    if (value != 0 && qlora__json_kind_of(&json, value) == QLORA__JSON_ARRAY) {
        uint32_t list = value;
        value = 0;
        for (uint32_t i = list + 1; i < json.tokens[list].next; i = json.tokens[i].next) {
            uint32_t name = qlora__json_find(&json, i, "name");
            bool main = name != 0 && qlora__json_is(&json, name, "default");
            value = value == 0 || main ? qlora__json_find(&json, i, "template") : value;
        }
    }
    *found = value != 0 && qlora__json_kind_of(&json, value) == QLORA__JSON_STRING;
    if (*found) {
        const qlora__json_token* text = &json.tokens[value];
        qlora__string_add(out, json.strings + text->begin, text->end - text->begin);
        r = out->result;
    }
    qlora__json_free(env, &json);
    return r;
}

// The chat template of a folder, from the first of its files that has one. *which is its number, or
// -1 if there is none.
enum { QLORA__MERGE_TEMPLATE_CONFIG = 2 };
static qlora_result qlora__merge_template(qlora__env* env, const char* dir, qlora__string* out,
                                          int* which) {
    static const char* const names[] = {"chat_template.jinja", "chat_template.json",
                                        "tokenizer_config.json"};
    bool found = false;
    *which = -1;
    for (int i = 0; i < 3 && !found; i++) {
        char path[QLORA__PATH_ROOM];
        qlora__map map;
        bool exists = false;
        QLORA__TRY(qlora__path_join(env, dir, names[i], path));
        QLORA__TRY(qlora__file_exists(env, path, &exists));
        if (!exists) {
            continue;
        }
        QLORA__TRY(qlora__map_open(env, path, &map));
        qlora_result r = QLORA_OK;
        if (i > 0) {
            r = qlora__merge_template_json(env, path, &map, out, &found);
        } else {
            qlora__string_add(out, map.data, (size_t)map.size);
            r = out->result;
            found = true;
        }
        qlora__map_close(env, &map);
        QLORA__TRY(r);
        *which = found ? i : -1;
    }
    return QLORA_OK;
}

// Whether the folder of the tokenizer (NULL: none) has a template. If only the model has one, in
// its tokenizer_config.json, which that of the tokenizer replaces, writes it into the merged
// folder.
static qlora_result qlora__merge_write_template(qlora__env* env, const char* tokenizer,
                                                const char* model, const char* dir, bool* own) {
    char path[QLORA__PATH_ROOM];
    qlora__string text;
    bool exists = false;
    int which = -1;
    *own = false;
    if (tokenizer == NULL) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__path_join(env, tokenizer, "tokenizer_config.json", path));
    QLORA__TRY(qlora__file_exists(env, path, &exists));
    qlora__string_begin(env, &text);
    qlora_result r = qlora__merge_template(env, tokenizer, &text, &which);
    *own = which >= 0;
    if (r == QLORA_OK && !*own && exists && !qlora__gguf_path(model)) {
        r = qlora__merge_template(env, model, &text, &which);
        r = r == QLORA_OK ? qlora__path_join(env, dir, "chat_template.jinja", path) : r;
        if (r == QLORA_OK && which == QLORA__MERGE_TEMPLATE_CONFIG) {
            r = qlora__file_write(env, path, text.data, text.size);
        }
    }
    qlora__string_free(&text);
    return r;
}
