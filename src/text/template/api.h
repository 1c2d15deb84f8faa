// Templates as objects: compiled once, rendered often.

struct qlora_text_template {
    qlora_text* text;
    char* name;
    size_t name_size;
    qlora__jin_arena arena; // the tree
    qlora__jin_arena work;  // of renderings; kept between them
    qlora__jin_node* root;
    bool generation; // has generation blocks
};

static void qlora__jin_machine_start(qlora__env* env, const char* name, uint64_t input,
                                     qlora__jin_arena arena, qlora__jin_machine* m) {
    memset(m, 0, sizeof *m);
    m->env = env;
    m->hooks = &qlora__jin_hook_table;
    m->name = name;
    m->line = 1;
    m->step_limit = QLORA__JIN_MAX_STEPS + 2 * input;
    m->arena = arena;
    m->arena.env = env;
    m->arena.limit = QLORA__JIN_MAX_MEMORY + 64 * (size_t)input;
}

static void qlora__jin_template_free(qlora__env* env, qlora_text_template* t) {
    qlora__jin_arena_free(&t->arena);
    qlora__jin_arena_free(&t->work);
    qlora__env_free(env, t->name, t->name_size + 1);
    qlora__env_free(env, t, sizeof *t);
}

static bool qlora__jin_has_generation(const qlora__jin_node* first) {
    const qlora__jin_node* rest = NULL;
    for (const qlora__jin_node* n = first; n != NULL; n = qlora__jin_walk(n, &rest)) {
        const qlora__jin_node* parts[3] = {n->b, n->c, qlora__jin_below(n)};
        if (n->kind == QLORA__JIN_N_GENERATION) {
            return true;
        }
        bool body = n->kind >= QLORA__JIN_N_OUTPUT;
        for (int i = 0; i < 3 && body; i++) {
            if (qlora__jin_has_generation(parts[i])) {
                return true;
            }
        }
    }
    return false;
}

static qlora_result qlora__jin_compile_into(qlora__env* env, const char* source, size_t size,
                                            qlora_text_template* t) {
    qlora__jin_machine m;
    qlora__jin_machine_start(env, t->name, 64 * (uint64_t)size, t->arena, &m);
    qlora_result r = qlora__jin_parse(&m, source, size, &t->root);
    r = r == QLORA_OK ? qlora__jin_bind(&m, t->root, qlora__jin_find_named) : r;
    t->arena = m.arena;
    if (r == QLORA_OK) {
        t->generation = qlora__jin_has_generation(t->root->c);
    }
    return r;
}

static qlora_result qlora__jin_compile(qlora_text* text, const char* name, const char* source,
                                       size_t size, qlora_text_template** out) {
    qlora__env* env = &text->env;
    qlora_text_template* t =
        (qlora_text_template*)qlora__text_zalloc(env, 1, sizeof(qlora_text_template));
    if (t == NULL) {
        return QLORA_ERR_MEMORY;
    }
    t->text = text;
    t->arena.env = env;
    t->work.env = env;
    qlora_result r = qlora__text_copy(env, name, strlen(name), &t->name, &t->name_size);
    r = r == QLORA_OK ? qlora__jin_compile_into(env, source, size, t) : r;
    if (r != QLORA_OK) {
        qlora__jin_template_free(env, t);
        return r;
    }
    *out = t;
    return QLORA_OK;
}

// ---- a rendering

static qlora_result qlora__jin_globals_make(qlora__jin_machine* m) {
    qlora__jin_value dict;
    QLORA__TRY(qlora__jin_dict_make(m, QLORA__JIN_DICT, 32, &dict));
    m->globals = dict.as.dict;
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__jin_functions); i++) {
        qlora__jin_value function = qlora__jin_of(QLORA__JIN_FUNCTION);
        function.flag = (int32_t)i;
        QLORA__TRY(qlora__jin_dict_put(m, m->globals, qlora__jin_functions[i], function));
    }
    return QLORA_OK;
}

// Starts a rendering: afterwards the variables can be set with qlora__jin_set.
static qlora_result qlora__jin_begin(qlora_text_template* t, uint64_t input,
                                     qlora__jin_machine* m) {
    qlora__jin_machine_start(&t->text->env, t->name, input, t->work, m);
    memset(&t->work, 0, sizeof t->work);
    return qlora__jin_globals_make(m);
}

static qlora_result qlora__jin_set(qlora__jin_machine* m, const char* name,
                                   qlora__jin_value value) {
    return qlora__jin_dict_put(m, m->globals, name, value);
}

// Sets a variable that is a string, or nothing for NULL.
static qlora_result qlora__jin_set_text(qlora__jin_machine* m, const char* name, const char* text) {
    qlora__jin_value value;
    if (text == NULL) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__jin_string_of(m, text, &value));
    return qlora__jin_set(m, name, value);
}

static qlora_result qlora__jin_execute(const qlora_text_template* t, qlora__jin_machine* m,
                                       qlora__jin_buffer* out) {
    memset(out, 0, sizeof *out);
    m->out = out;
    m->top = out;
    QLORA__TRY(qlora__jin_record_make(m, t->root, NULL, &m->record));
    QLORA__TRY(qlora__jin_scope_enter(m, t->root->scope));
    return qlora__jin_run(m, t->root->c);
}

static void qlora__jin_end(qlora_text_template* t, qlora__jin_machine* m) {
    t->work = m->arena;
    qlora__jin_arena_reset(&t->work);
}

// ---- the public functions

qlora_result qlora_text_template_compile(qlora_text* text, const char* name, const char* source,
                                         size_t size, qlora_text_template** out) {
    if (text == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__text_enter(text, "qlora_text_template_compile");
    QLORA__TEXT_NEED(&text->env, name);
    QLORA__TEXT_NEED(&text->env, out);
    if (source == NULL && size > 0) {
        return qlora__env_fail(&text->env, QLORA_ERR_ARGUMENT, "source is NULL");
    }
    QLORA__TRY(qlora__jin_compile(text, name, source, size, out));
    text->templates++;
    return QLORA_OK;
}

qlora_result qlora_text_template_close(qlora_text_template* source) {
    if (source != NULL) {
        qlora_text* text = source->text;
        qlora__text_enter(text, "qlora_text_template_close");
        text->templates--;
        qlora__jin_template_free(&text->env, source);
    }
    return QLORA_OK;
}

void qlora_text_spans_free(qlora_text* text, qlora_text_spans* spans) {
    if (text != NULL && spans != NULL) {
        qlora__env_free(&text->env, spans->data, spans->capacity * sizeof(qlora_text_span));
        memset(spans, 0, sizeof *spans);
    }
}

static qlora_result qlora__jin_spans_add(qlora__env* env, qlora_text_spans* spans, size_t begin,
                                         size_t end) {
    void* data = spans->data;
    qlora_result r =
        qlora__text_reserve(env, &data, &spans->capacity, spans->count, 1, sizeof(qlora_text_span));
    spans->data = (qlora_text_span*)data;
    QLORA__TRY(r);
    spans->data[spans->count].begin = begin;
    spans->data[spans->count++].end = end;
    return QLORA_OK;
}

// The variables of a rendering: special tokens, then the conversation's keys.
static qlora_result qlora__jin_set_all(qlora__jin_machine* m, const qlora_text_render_desc* desc,
                                       const qlora__json* json) {
    qlora__jin_value root;
    QLORA__TRY(qlora__jin_set(m, "tools", qlora__jin_none()));
    QLORA__TRY(qlora__jin_set(m, "documents", qlora__jin_none()));
    QLORA__TRY(qlora__jin_set_text(m, "bos_token", desc->bos_token));
    QLORA__TRY(qlora__jin_set_text(m, "eos_token", desc->eos_token));
    QLORA__TRY(qlora__jin_set_text(m, "pad_token", desc->pad_token));
    QLORA__TRY(qlora__jin_set_text(m, "unk_token", desc->unk_token));
    QLORA__TRY(qlora__jin_from_json(m, json, json->tokens, &root));
    for (size_t i = 0; i < root.as.dict->count; i++) {
        QLORA__TRY(
            qlora__jin_dict_set(m, m->globals, root.as.dict->keys[i], root.as.dict->values[i]));
    }
    return qlora__jin_set(m, "add_generation_prompt", qlora__jin_bool(desc->generation_prompt));
}

static qlora_result qlora__jin_render(qlora__env* env, qlora_text_template* t,
                                      const qlora_text_render_desc* desc, const qlora__json* json,
                                      qlora_text_bytes* out, qlora_text_spans* spans) {
    qlora__jin_machine m;
    qlora__jin_buffer text;
    size_t before = out->count;
    memset(&text, 0, sizeof text);
    qlora_result r = qlora__jin_begin(t, desc->conversation_size, &m);
    m.clock = desc->clock;
    r = r == QLORA_OK ? qlora__jin_set_all(&m, desc, json) : r;
    r = r == QLORA_OK ? qlora__jin_execute(t, &m, &text) : r;
    r = r == QLORA_OK ? qlora__text_bytes_add(env, out, text.data, text.count) : r;
    for (size_t i = 0; r == QLORA_OK && spans != NULL && i < m.span_count; i++) {
        r = qlora__jin_spans_add(env, spans, before + m.spans[i].begin, before + m.spans[i].end);
    }
    qlora__jin_end(t, &m);
    return r;
}

qlora_result qlora_text_template_render(qlora_text_template* source,
                                        const qlora_text_render_desc* desc, qlora_text_bytes* out,
                                        qlora_text_spans* spans) {
    if (source == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__env* env = &source->text->env;
    qlora__json json;
    qlora__text_enter(source->text, "qlora_text_template_render");
    QLORA__TEXT_NEED(env, desc);
    QLORA__TEXT_NEED(env, desc->conversation);
    QLORA__TEXT_NEED(env, out);
    if (desc->reserved_must_be_zero0 != 0 || desc->reserved_must_be_zero1 != 0) {
        return qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                               "desc was not zeroed: a reserved field is set");
    }
    size_t spans_before = spans != NULL ? spans->count : 0;
    size_t before = out->count;
    QLORA__TRY(qlora__text_json(env, "the conversation", desc->conversation,
                                desc->conversation_size, &json));
    qlora_result r = QLORA_OK;
    if (json.tokens[0].kind != QLORA__JSON_OBJECT) {
        r = qlora__env_fail(env, QLORA_ERR_FORMAT,
                            "the conversation must be an object {\"messages\": [...]}");
    }
    r = r == QLORA_OK ? qlora__jin_render(env, source, desc, &json, out, spans) : r;
    qlora__json_free(env, &json);
    if (r != QLORA_OK) {
        out->count = before;
        if (spans != NULL) {
            spans->count = spans_before;
        }
    }
    return r;
}
