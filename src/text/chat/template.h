// The chat template of a folder: which of its files has it.

// A string that is freed with what has it.
typedef struct qlora__text_owned {
    char* data;
    size_t size; // one byte more is allocated
} qlora__text_owned;

static void qlora__text_owned_free(qlora__env* env, qlora__text_owned* owned) {
    qlora__env_free(env, owned->data, owned->size + 1);
    memset(owned, 0, sizeof(*owned));
}

static qlora_result qlora__text_owned_set(qlora__env* env, qlora__text_owned* owned,
                                          const char* data, size_t size) {
    return qlora__text_copy(env, data, size, &owned->data, &owned->size);
}

static bool qlora__text_owned_same(const qlora__text_owned* a, const qlora__text_owned* b) {
    return (a->data == NULL) == (b->data == NULL) && a->size == b->size &&
           (a->size == 0 || memcmp(a->data, b->data, a->size) == 0);
}

typedef struct qlora__text_found {
    qlora__text_owned text;  // data is NULL: the folder has no template
    qlora__text_owned tools; // for conversations with tools; data is NULL: the same
    const char* source;      // in words
    const char* tools_source;
} qlora__text_found;

static void qlora__text_found_free(qlora__env* env, qlora__text_found* found) {
    qlora__text_owned_free(env, &found->text);
    qlora__text_owned_free(env, &found->tools);
}

// chat_template: a string, or [{"name", "template"}]: the one with that name, or NULL. `any`: else
// the first.
static const qlora__json_token* qlora__text_config_template(const qlora__json* json,
                                                            const char* wanted, bool any) {
    const qlora__json_token* value = qlora__text_json_get(json, json->tokens, "chat_template");
    if (value == NULL || value->kind != QLORA__JSON_ARRAY) {
        return any && qlora__text_json_string(value) ? value : NULL;
    }
    const qlora__json_token* item = value + 1;
    const qlora__json_token* found = NULL;
    for (uint32_t i = 0; i < value->count; i++) {
        const qlora__json_token* name = qlora__text_json_get(json, item, "name");
        if ((found == NULL && any) || qlora__text_json_is(json, name, wanted)) {
            found = qlora__text_json_get(json, item, "template");
        }
        item = qlora__text_json_next(json, item);
    }
    return qlora__text_json_string(found) ? found : NULL;
}

// chat_template.jinja, and that for tools beside it.
static qlora_result qlora__text_found_jinja(qlora__env* env, const char* folder,
                                            qlora__text_found* out) {
    static const char* const names[2] = {"chat_template.jinja", QLORA__TEXT_TOOLS_FILE};
    qlora__text_owned* texts[2] = {&out->text, &out->tools};
    bool found = true;
    for (size_t i = 0; i < 2 && found; i++) {
        qlora_text_bytes file;
        memset(&file, 0, sizeof(file));
        found = false;
        qlora_result r = qlora__text_folder_read(env, folder, names[i], &file, &found);
        if (r == QLORA_OK && found) {
            r = qlora__text_owned_set(env, texts[i], file.data, file.count);
        }
        qlora__text_bytes_free(env, &file);
        QLORA__TRY(r);
    }
    out->source = names[0];
    out->tools_source = names[1];
    return QLORA_OK;
}

// Those in a JSON file.
static qlora_result qlora__text_found_json(qlora__env* env, const char* folder, const char* name,
                                           const char* source, qlora__text_found* out) {
    qlora_text_bytes file;
    qlora__json json;
    bool found = false;
    memset(&file, 0, sizeof(file));
    qlora_result r = qlora__text_folder_read(env, folder, name, &file, &found);
    if (r == QLORA_OK && found) {
        r = qlora__text_json(env, name, file.data, file.count, &json);
        found = r == QLORA_OK;
    }
    qlora__text_bytes_free(env, &file);
    if (r != QLORA_OK || !found) {
        return r;
    }
    const qlora__json_token* text = qlora__text_config_template(&json, "default", true);
    const qlora__json_token* tools = qlora__text_config_template(&json, "tool_use", false);
    if (text != NULL) {
        out->source = source;
        out->tools_source = source;
        r = qlora__text_owned_set(env, &out->text, qlora__text_json_text(&json, text),
                                  qlora__text_json_size(text));
    }
    if (r == QLORA_OK && text != NULL && tools != NULL) {
        r = qlora__text_owned_set(env, &out->tools, qlora__text_json_text(&json, tools),
                                  qlora__text_json_size(tools));
    }
    qlora__json_free(env, &json);
    return r;
}

// The first file that has one. `folder` may also be a GGUF file. Free the result also on failure.
static qlora_result qlora__text_found_read(qlora__env* env, const char* folder,
                                           qlora__text_found* out) {
    memset(out, 0, sizeof(*out));
    QLORA__TRY(qlora__text_found_jinja(env, folder, out));
    if (out->text.data == NULL) {
        QLORA__TRY(
            qlora__text_found_json(env, folder, "chat_template.json", "chat_template.json", out));
    }
    return out->text.data != NULL
               ? QLORA_OK
               : qlora__text_found_json(env, folder, "tokenizer_config.json",
                                        "the chat_template in tokenizer_config.json", out);
}
