// tokenizer.json: normaliser, splitter, decoder, post-processor and added tokens around the model.

// Flattens a "Sequence" in order. `list` is the name of its array.
static qlora_result qlora__text_flatten(qlora__env* env, const qlora__json* json,
                                        const qlora__json_token* root, const char* list,
                                        const qlora__json_token** out, size_t* count) {
    *count = 0;
    if (qlora__text_json_absent(root)) {
        return QLORA_OK;
    }
    const qlora__json_token* stack[QLORA__TEXT_MAX_LIST];
    size_t depth = 0;
    stack[depth++] = root;
    while (depth > 0) {
        const qlora__json_token* node = stack[--depth];
        const qlora__json_token* type = qlora__text_json_get(json, node, "type");
        if (!qlora__text_json_is(json, type, "Sequence")) {
            if (!qlora__text_json_string(type)) {
                return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: a step has no \"type\"", list);
            }
            if (*count == QLORA__TEXT_MAX_LIST) {
                return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: too many steps", list);
            }
            out[(*count)++] = node;
            continue;
        }
        const qlora__json_token* array = qlora__text_json_get(json, node, list);
        if (array == NULL || array->kind != QLORA__JSON_ARRAY) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: a Sequence has no list of steps",
                                   list);
        }
        if (array->count > QLORA__TEXT_MAX_LIST - depth) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: too many steps", list);
        }
        const qlora__json_token* child = array + 1;
        for (uint32_t i = 0; i < array->count; i++) { // the first child on top
            stack[depth + array->count - 1 - i] = child;
            child = qlora__text_json_next(json, child);
        }
        depth += array->count;
    }
    return QLORA_OK;
}

// Replaces a string of size + 1 bytes by a copy of another one.
static qlora_result qlora__text_copy(qlora__env* env, const char* data, size_t size, char** out,
                                     size_t* out_size) {
    char* copy = (char*)qlora__text_zalloc(env, size + 1, 1);
    if (copy == NULL) {
        return QLORA_ERR_MEMORY;
    }
    if (size > 0) {
        memcpy(copy, data, size);
    }
    qlora__env_free(env, *out, *out_size + 1);
    *out = copy;
    *out_size = size;
    return QLORA_OK;
}

static qlora_result qlora__text_steps_add(qlora__env* env, qlora__text_steps* steps, int kind,
                                          qlora__text_step** out) {
    if (steps->count == QLORA__TEXT_STEPS) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED, "more than %d steps", QLORA__TEXT_STEPS);
    }
    *out = &steps->data[steps->count++];
    memset(*out, 0, sizeof(**out));
    (*out)->kind = kind;
    return QLORA_OK;
}

// Copies a string member into a step.
static qlora_result qlora__text_step_string(qlora__env* env, const qlora__json* json,
                                            const qlora__json_token* node, const char* name,
                                            char** out, size_t* size) {
    const qlora__json_token* value = qlora__text_json_get(json, node, name);
    if (!qlora__text_json_string(value)) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "a step has no string \"%s\"", name);
    }
    if (qlora__text_json_size(value) > QLORA__TEXT_MAX_STEP) { // a text could grow out of bounds
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "\"%s\" is longer than %d bytes", name,
                               QLORA__TEXT_MAX_STEP);
    }
    return qlora__text_copy(env, qlora__text_json_text(json, value), qlora__text_json_size(value),
                            out, size);
}

// A known expression has a function of its own, which is faster; any other one is compiled. After
// ByteLevel, characters stand for bytes: only the compiled form knows that.
static qlora_result qlora__text_step_regex(qlora__env* env, const qlora_text_tok* tok,
                                           const char* text, size_t size, qlora__text_step* step) {
    bool plain = strlen(text) == size;
    step->pattern = plain && !tok->byte_level ? qlora__text_pattern_find(text) : NULL;
    if (step->pattern != NULL) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__pattern_compile(env, text, size, tok->classes, &step->program));
    return !step->program->empty
               ? QLORA_OK
               : qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                 "the regular expression %.*s can match between two characters, "
                                 "which is not supported",
                                 (int)(size < 60 ? size : 60), text);
}

// {"String": x} goes to step->a; {"Regex": x} to the pattern or the program.
static qlora_result qlora__text_step_pattern(qlora__env* env, const qlora__json* json,
                                             const qlora__json_token* node,
                                             const qlora_text_tok* tok, qlora__text_step* step) {
    const qlora__json_token* pattern = qlora__text_json_get(json, node, "pattern");
    const qlora__json_token* string = qlora__text_json_get(json, pattern, "String");
    const qlora__json_token* expression = qlora__text_json_get(json, pattern, "Regex");
    if (qlora__text_json_string(pattern)) {
        string = pattern;
    }
    if (qlora__text_json_string(string) && qlora__text_json_size(string) > 0) {
        return qlora__text_copy(env, qlora__text_json_text(json, string),
                                qlora__text_json_size(string), &step->a, &step->a_size);
    }
    if (qlora__text_json_string(expression)) {
        const char* text = qlora__text_json_text(json, expression);
        size_t size = qlora__text_json_size(expression);
        return qlora__text_step_regex(env, tok, text, size, step);
    }
    return qlora__env_fail(env, QLORA_ERR_FORMAT, "a step has no \"pattern\"");
}

// The value of a base64 digit, or -1.
static int qlora__text_base64(char c) {
    return c >= 'A' && c <= 'Z'   ? c - 'A'
           : c >= 'a' && c <= 'z' ? c - 'a' + 26
           : c >= '0' && c <= '9' ? c - '0' + 52
           : c == '+'             ? 62
           : c == '/'             ? 63
                                  : -1;
}

static qlora_result qlora__text_base64_read(qlora__env* env, const char* text, size_t size,
                                            qlora_text_bytes* out) {
    uint32_t bits = 0;
    QLORA__TRY(qlora__text_bytes_room(env, out, size + 1));
    for (size_t i = 0; i < size; i++) {
        int digit = qlora__text_base64(text[i]);
        bool padding = text[i] == '=' && i + 2 >= size && size % 4 == 0;
        if (digit < 0 && !padding) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "Precompiled: precompiled_charsmap is not base64");
        }
        bits = bits << 6 | (digit < 0 ? 0u : (uint32_t)digit);
        if (i % 4 > 0 && digit >= 0) {
            out->data[out->count++] = (char)(unsigned char)(bits >> (6 - 2 * (i % 4)) & 0xFF);
        }
    }
    return QLORA_OK;
}

// The map of a Precompiled step.
static qlora_result qlora__text_step_charsmap(qlora__env* env, const qlora__json* json,
                                              const qlora__json_token* node,
                                              qlora__text_step* step) {
    const qlora__json_token* value = qlora__text_json_get(json, node, "precompiled_charsmap");
    qlora_text_bytes map;
    memset(&map, 0, sizeof map);
    if (!qlora__text_json_string(value)) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "Precompiled: precompiled_charsmap is not a string");
    }
    qlora_result r = qlora__text_base64_read(env, qlora__text_json_text(json, value),
                                             qlora__text_json_size(value), &map);
    const char* fault = r == QLORA_OK ? qlora__text_charsmap_fault(map.data, map.count) : NULL;
    if (fault != NULL) {
        r = qlora__env_fail(env, QLORA_ERR_FORMAT, "Precompiled: precompiled_charsmap %s", fault);
    }
    r = r == QLORA_OK ? qlora__text_copy(env, map.data, map.count, &step->a, &step->a_size) : r;
    qlora__text_bytes_free(env, &map);
    return r;
}

static qlora_result qlora__text_load_normalizer(qlora__env* env, qlora_text_tok* tok,
                                                const qlora__json* json,
                                                const qlora__json_token* root) {
    const qlora__json_token* nodes[QLORA__TEXT_MAX_LIST];
    size_t count;
    QLORA__TRY(qlora__text_flatten(env, json, root, "normalizers", nodes, &count));
    static const struct {
        const char* name;
        int kind;
    } kinds[] = {{"NFC", QLORA__TEXT_N_NFC},         {"NFD", QLORA__TEXT_N_NFD},
                 {"Prepend", QLORA__TEXT_N_PREPEND}, {"Replace", QLORA__TEXT_N_REPLACE},
                 {"Strip", QLORA__TEXT_N_STRIP},     {"Precompiled", QLORA__TEXT_N_CHARSMAP},
                 {"Nmt", QLORA__TEXT_N_NMT},         {"Lowercase", QLORA__TEXT_N_LOWER}};
    for (size_t i = 0; i < count; i++) {
        const qlora__json_token* type = qlora__text_json_get(json, nodes[i], "type");
        size_t k = 0;
        while (k < QLORA__TEXT_COUNT(kinds) && !qlora__text_json_is(json, type, kinds[k].name)) {
            k++;
        }
        if (k == QLORA__TEXT_COUNT(kinds)) {
            return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                   "the normalizer %.60s is not supported",
                                   qlora__text_json_text(json, type));
        }
        qlora__text_step* step = NULL;
        QLORA__TRY(qlora__text_steps_add(env, &tok->normalizer, kinds[k].kind, &step));
        if (step->kind == QLORA__TEXT_N_PREPEND) {
            QLORA__TRY(
                qlora__text_step_string(env, json, nodes[i], "prepend", &step->a, &step->a_size));
            if (step->a_size == 0) { // the library then repeats the first character
                return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED, "Prepend: the text is empty");
            }
        } else if (step->kind == QLORA__TEXT_N_REPLACE) {
            QLORA__TRY(qlora__text_step_pattern(env, json, nodes[i], tok, step));
            step->kind = step->a != NULL ? QLORA__TEXT_N_REPLACE : QLORA__TEXT_N_REPLACE_PATTERN;
            QLORA__TRY(
                qlora__text_step_string(env, json, nodes[i], "content", &step->b, &step->b_size));
        } else if (step->kind == QLORA__TEXT_N_CHARSMAP) {
            QLORA__TRY(qlora__text_step_charsmap(env, json, nodes[i], step));
        } else if (step->kind == QLORA__TEXT_N_STRIP) {
            bool left = false;
            bool right = false;
            QLORA__TRY(qlora__text_json_switch(env, json, nodes[i], "strip_left", &left));
            QLORA__TRY(qlora__text_json_switch(env, json, nodes[i], "strip_right", &right));
            step->start = left;
            step->stop = right;
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__text_load_behavior(qlora__env* env, const qlora__json* json,
                                              const qlora__json_token* node, int* out) {
    static const char* const names[] = {"Isolated", "Removed", "MergedWithPrevious",
                                        "MergedWithNext", "Contiguous"};
    const qlora__json_token* value = qlora__text_json_get(json, node, "behavior");
    for (size_t i = 0; i < QLORA__TEXT_COUNT(names); i++) {
        if (qlora__text_json_is(json, value, names[i])) {
            *out = (int)i;
            return QLORA_OK;
        }
    }
    return qlora__env_fail(env, QLORA_ERR_FORMAT, "pre_tokenizer: unknown behavior");
}

static qlora_result qlora__text_load_metaspace(qlora__env* env, const qlora__json* json,
                                               const qlora__json_token* node,
                                               qlora__text_step* step, bool decoder) {
    const qlora__json_token* scheme = qlora__text_json_get(json, node, "prepend_scheme");
    bool legacy = true;
    bool split = true;
    QLORA__TRY(qlora__text_json_switch(env, json, node, "add_prefix_space", &legacy));
    QLORA__TRY(qlora__text_json_switch(env, json, node, "split", &split));
    QLORA__TRY(qlora__text_step_string(env, json, node, "replacement", &step->a, &step->a_size));
    if (step->a_size == 0) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "Metaspace: the replacement is empty");
    }
    step->always = qlora__text_json_absent(scheme) || qlora__text_json_is(json, scheme, "always");
    step->never = qlora__text_json_is(json, scheme, "never");
    if (!step->always && !step->never && !qlora__text_json_is(json, scheme, "first")) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "Metaspace: unknown prepend_scheme");
    }
    if (scheme == NULL && !legacy) {
        step->always = false;
        step->never = true;
    }
    step->invert = !decoder && split; // splits
    return QLORA_OK;
}

static qlora_result qlora__text_load_bytelevel(qlora__env* env, qlora_text_tok* tok,
                                               const qlora__json* json,
                                               const qlora__json_token* node) {
    bool prefix = true;
    bool regex = true;
    qlora__text_step* step = NULL;
    QLORA__TRY(qlora__text_json_switch(env, json, node, "add_prefix_space", &prefix));
    QLORA__TRY(qlora__text_json_switch(env, json, node, "use_regex", &regex));
    if (prefix) {
        QLORA__TRY(qlora__text_steps_add(env, &tok->splitter, QLORA__TEXT_P_PREFIX_SPACE, &step));
    }
    if (regex) {
        QLORA__TRY(qlora__text_steps_add(env, &tok->splitter, QLORA__TEXT_P_REGEX, &step));
        step->pattern = &qlora__text_patterns[0];
    }
    tok->byte_level = true;
    return qlora__text_steps_add(env, &tok->splitter, QLORA__TEXT_P_BYTES, &step);
}

// The steps that only look at classes: Digits, Punctuation, Whitespace, WhitespaceSplit.
static qlora_result qlora__text_load_classes(qlora__env* env, qlora_text_tok* tok,
                                             const qlora__json* json, const qlora__json_token* node,
                                             bool* found) {
    const qlora__json_token* type = qlora__text_json_get(json, node, "type");
    static const struct {
        const char* name;
        int kind;
        unsigned mask;
        int behavior;
    } kinds[] = {{"Digits", QLORA__TEXT_P_CLASS, QLORA__TEXT_N, QLORA__TEXT_B_CONTIGUOUS},
                 {"Punctuation", QLORA__TEXT_P_PUNCTUATION, 0, QLORA__TEXT_B_ISOLATED},
                 {"WhitespaceSplit", QLORA__TEXT_P_CLASS, QLORA__TEXT_WS, QLORA__TEXT_B_REMOVED},
                 {"Whitespace", QLORA__TEXT_P_REGEX, 0, QLORA__TEXT_B_REMOVED}};
    size_t k = 0;
    while (k < QLORA__TEXT_COUNT(kinds) && !qlora__text_json_is(json, type, kinds[k].name)) {
        k++;
    }
    *found = k < QLORA__TEXT_COUNT(kinds);
    if (!*found) {
        return QLORA_OK;
    }
    qlora__text_step* step = NULL;
    QLORA__TRY(qlora__text_steps_add(env, &tok->splitter, kinds[k].kind, &step));
    step->mask = kinds[k].mask;
    step->behavior = kinds[k].behavior;
    if (step->kind == QLORA__TEXT_P_REGEX) {
        step->pattern = qlora__text_pattern_find("Whitespace");
        step->invert = true;
    }
    bool digits = false;
    QLORA__TRY(qlora__text_json_switch(env, json, node, "individual_digits", &digits));
    if (digits) {
        step->behavior = QLORA__TEXT_B_ISOLATED;
    }
    if (step->kind == QLORA__TEXT_P_PUNCTUATION &&
        qlora__text_json_get(json, node, "behavior") != NULL) {
        return qlora__text_load_behavior(env, json, node, &step->behavior);
    }
    return QLORA_OK;
}

static qlora_result qlora__text_load_splitter_step(qlora__env* env, qlora_text_tok* tok,
                                                   const qlora__json* json,
                                                   const qlora__json_token* node) {
    const qlora__json_token* type = qlora__text_json_get(json, node, "type");
    if (qlora__text_json_is(json, type, "ByteLevel")) {
        return tok->byte_level ? qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                                 "pre_tokenizer: ByteLevel appears twice")
                               : qlora__text_load_bytelevel(env, tok, json, node);
    }
    if (qlora__text_json_is(json, type, "Metaspace")) {
        qlora__text_step* step = NULL;
        QLORA__TRY(qlora__text_steps_add(env, &tok->splitter, QLORA__TEXT_P_METASPACE, &step));
        return qlora__text_load_metaspace(env, json, node, step, false);
    }
    if (qlora__text_json_is(json, type, "Split")) {
        qlora__text_step* step = NULL;
        QLORA__TRY(qlora__text_steps_add(env, &tok->splitter, QLORA__TEXT_P_REGEX, &step));
        QLORA__TRY(qlora__text_step_pattern(env, json, node, tok, step));
        step->kind = step->a == NULL ? QLORA__TEXT_P_REGEX : QLORA__TEXT_P_STRING;
        QLORA__TRY(qlora__text_json_switch(env, json, node, "invert", &step->invert));
        if (tok->byte_level && step->kind == QLORA__TEXT_P_STRING) {
            return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                   "pre_tokenizer: a Split on a string after ByteLevel is not "
                                   "supported");
        }
        return qlora__text_load_behavior(env, json, node, &step->behavior);
    }
    bool found = false;
    QLORA__TRY(qlora__text_load_classes(env, tok, json, node, &found));
    return found ? QLORA_OK
                 : qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                   "the pre_tokenizer %.60s is not supported",
                                   qlora__text_json_text(json, type));
}

static qlora_result qlora__text_load_splitter(qlora__env* env, qlora_text_tok* tok,
                                              const qlora__json* json,
                                              const qlora__json_token* root) {
    const qlora__json_token* nodes[QLORA__TEXT_MAX_LIST];
    size_t count;
    QLORA__TRY(qlora__text_flatten(env, json, root, "pretokenizers", nodes, &count));
    for (size_t i = 0; i < count; i++) {
        QLORA__TRY(qlora__text_load_splitter_step(env, tok, json, nodes[i]));
    }
    return QLORA_OK;
}

static qlora_result qlora__text_load_decoder_step(qlora__env* env, qlora_text_tok* tok,
                                                  const qlora__json* json,
                                                  const qlora__json_token* node) {
    const qlora__json_token* type = qlora__text_json_get(json, node, "type");
    static const struct {
        const char* name;
        int kind;
    } kinds[] = {{"Replace", QLORA__TEXT_D_REPLACE}, {"ByteFallback", QLORA__TEXT_D_BYTE_FALLBACK},
                 {"Fuse", QLORA__TEXT_D_FUSE},       {"Strip", QLORA__TEXT_D_STRIP},
                 {"ByteLevel", QLORA__TEXT_D_BYTES}, {"Metaspace", QLORA__TEXT_D_METASPACE}};
    size_t k = 0;
    while (k < QLORA__TEXT_COUNT(kinds) && !qlora__text_json_is(json, type, kinds[k].name)) {
        k++;
    }
    if (k == QLORA__TEXT_COUNT(kinds)) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED, "the decoder %.60s is not supported",
                               qlora__text_json_text(json, type));
    }
    qlora__text_step* step = NULL;
    QLORA__TRY(qlora__text_steps_add(env, &tok->decoder, kinds[k].kind, &step));
    if (step->kind == QLORA__TEXT_D_REPLACE) {
        QLORA__TRY(qlora__text_step_pattern(env, json, node, tok, step));
        if (step->a == NULL) {
            return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                   "a decoder with a regular expression is not supported");
        }
        return qlora__text_step_string(env, json, node, "content", &step->b, &step->b_size);
    }
    if (step->kind == QLORA__TEXT_D_METASPACE) {
        return qlora__text_load_metaspace(env, json, node, step, true);
    }
    if (step->kind == QLORA__TEXT_D_STRIP) {
        const qlora__json_token* start = qlora__text_json_get(json, node, "start");
        const qlora__json_token* stop = qlora__text_json_get(json, node, "stop");
        int64_t counts[2] = {-1, -1};
        bool numbers = qlora__text_json_integer(json, start, &counts[0]) &&
                       qlora__text_json_integer(json, stop, &counts[1]);
        if (!numbers || counts[0] < 0 || counts[0] > 1000 || counts[1] < 0 || counts[1] > 1000) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "decoder Strip: start and stop must be numbers from 0 to 1000");
        }
        step->start = (size_t)counts[0];
        step->stop = (size_t)counts[1];
        QLORA__TRY(qlora__text_step_string(env, json, node, "content", &step->a, &step->a_size));
        return step->a_size > 0
                   ? QLORA_OK
                   : qlora__env_fail(env, QLORA_ERR_FORMAT, "decoder Strip: the content is empty");
    }
    return QLORA_OK;
}

static qlora_result qlora__text_load_decoder(qlora__env* env, qlora_text_tok* tok,
                                             const qlora__json* json,
                                             const qlora__json_token* root) {
    const qlora__json_token* nodes[QLORA__TEXT_MAX_LIST];
    size_t count;
    QLORA__TRY(qlora__text_flatten(env, json, root, "decoders", nodes, &count));
    if (qlora__text_json_absent(root)) { // the library then puts a space between tokens
        qlora__text_step* step = NULL;
        return qlora__text_steps_add(env, &tok->decoder, QLORA__TEXT_D_JOIN, &step);
    }
    bool fused = false;
    bool spelt = false;
    for (size_t i = 0; i < count; i++) {
        QLORA__TRY(qlora__text_load_decoder_step(env, tok, json, nodes[i]));
        int kind = tok->decoder.data[tok->decoder.count - 1].kind;
        if (spelt && !fused && kind != QLORA__TEXT_D_FUSE && kind != QLORA__TEXT_D_METASPACE) {
            return qlora__env_fail(
                env, QLORA_ERR_UNSUPPORTED,
                "decoder: only Fuse and Metaspace are supported after ByteFallback");
        }
        spelt = spelt || kind == QLORA__TEXT_D_BYTE_FALLBACK;
        if (fused && kind != QLORA__TEXT_D_STRIP && kind != QLORA__TEXT_D_FUSE) {
            return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                   "decoder: only Strip is supported after Fuse and ByteLevel");
        }
        fused = fused || kind == QLORA__TEXT_D_FUSE || kind == QLORA__TEXT_D_BYTES;
    }
    return QLORA_OK;
}

// The ids of one element of a template: {"SpecialToken": {"id": name}}.
static qlora_result qlora__text_load_template_token(qlora__env* env, const qlora__json* json,
                                                    const qlora__json_token* tokens,
                                                    const qlora__json_token* item,
                                                    qlora_text_ids* out) {
    const char* name = qlora__text_json_cstring(json, qlora__text_json_get(json, item, "id"));
    const qlora__json_token* ids = NULL;
    if (name != NULL) {
        ids = qlora__text_json_get(json, qlora__text_json_get(json, tokens, name), "ids");
    }
    if (ids == NULL) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "post_processor: a special token has no ids");
    }
    return qlora__text_json_ids(env, json, ids, out);
}

// Inserts `front` before ids.
static qlora_result qlora__text_ids_prepend(qlora__env* env, qlora_text_ids* ids,
                                            const qlora_text_ids* front) {
    QLORA__TRY(qlora__text_ids_room(env, ids, front->count));
    if (front->count > 0) {
        memmove(ids->data + front->count, ids->data, ids->count * sizeof(int32_t));
        memcpy(ids->data, front->data, front->count * sizeof(int32_t));
        ids->count += front->count;
    }
    return QLORA_OK;
}

static qlora_result qlora__text_load_template(qlora__env* env, qlora_text_tok* tok,
                                              const qlora__json* json,
                                              const qlora__json_token* node,
                                              qlora_text_ids* front) {
    const qlora__json_token* single = qlora__text_json_get(json, node, "single");
    const qlora__json_token* tokens = qlora__text_json_get(json, node, "special_tokens");
    if (single == NULL || single->kind != QLORA__JSON_ARRAY ||
        single->count > QLORA__TEXT_MAX_LIST) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "post_processor: \"single\" must be a list of up to %d items",
                               QLORA__TEXT_MAX_LIST);
    }
    bool before = true;
    const qlora__json_token* item = single + 1;
    for (uint32_t i = 0; i < single->count; i++) {
        const qlora__json_token* special = qlora__text_json_get(json, item, "SpecialToken");
        const qlora__json_token* sequence = qlora__text_json_get(json, item, "Sequence");
        if (special != NULL) {
            QLORA__TRY(qlora__text_load_template_token(env, json, tokens, special,
                                                       before ? front : &tok->suffix));
        } else if (sequence != NULL && before &&
                   qlora__text_json_is(json, qlora__text_json_get(json, sequence, "id"), "A")) {
            before = false;
        } else {
            return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                   "post_processor: this template is not supported");
        }
        item = qlora__text_json_next(json, item);
    }
    return !before
               ? QLORA_OK
               : qlora__env_fail(env, QLORA_ERR_FORMAT, "post_processor: the template has no text");
}

// [token, id] of the RoBERTa and BERT processors.
static qlora_result qlora__text_load_framing(qlora__env* env, const qlora__json* json,
                                             const qlora__json_token* node, const char* name,
                                             qlora_text_ids* out) {
    const qlora__json_token* pair = qlora__text_json_get(json, node, name);
    if (pair != NULL && pair->kind == QLORA__JSON_ARRAY && pair->count == 2) {
        const qlora__json_token* id = qlora__text_json_next(json, pair + 1);
        int64_t value = 0;
        if (qlora__text_json_integer(json, id, &value) && value >= 0 &&
            value < QLORA__TEXT_MAX_ID) {
            return qlora__text_ids_add(env, out, (int32_t)value);
        }
    }
    return qlora__env_fail(env, QLORA_ERR_FORMAT, "post_processor: \"%s\" is not [token, id]",
                           name);
}

static qlora_result qlora__text_load_post_step(qlora__env* env, qlora_text_tok* tok,
                                               const qlora__json* json,
                                               const qlora__json_token* node,
                                               qlora_text_ids* front) {
    const qlora__json_token* type = qlora__text_json_get(json, node, "type");
    if (qlora__text_json_is(json, type, "ByteLevel")) {
        return QLORA_OK; // it only changes offsets
    }
    if (qlora__text_json_is(json, type, "TemplateProcessing")) {
        return qlora__text_load_template(env, tok, json, node, front);
    }
    if (qlora__text_json_is(json, type, "RobertaProcessing") ||
        qlora__text_json_is(json, type, "BertProcessing")) {
        QLORA__TRY(qlora__text_load_framing(env, json, node, "cls", front));
        return qlora__text_load_framing(env, json, node, "sep", &tok->suffix);
    }
    return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED, "the post_processor %.60s is not supported",
                           qlora__text_json_text(json, type));
}

static qlora_result qlora__text_load_post(qlora__env* env, qlora_text_tok* tok,
                                          const qlora__json* json, const qlora__json_token* root) {
    const qlora__json_token* nodes[QLORA__TEXT_MAX_LIST];
    size_t count;
    QLORA__TRY(qlora__text_flatten(env, json, root, "processors", nodes, &count));
    qlora_result r = QLORA_OK;
    for (size_t i = 0; r == QLORA_OK && i < count; i++) {
        qlora_text_ids front;
        memset(&front, 0, sizeof(front));
        const qlora__json_token* type = qlora__text_json_get(json, nodes[i], "type");
        if (tok->prefix.count + tok->suffix.count > 0 &&
            !qlora__text_json_is(json, type, "ByteLevel")) { // it would frame every added token
            return qlora__env_fail(
                env, QLORA_ERR_UNSUPPORTED,
                "post_processor: %.60s after a step that adds tokens is not supported",
                qlora__text_json_text(json, type));
        }
        r = qlora__text_load_post_step(env, tok, json, nodes[i], &front);
        r = r == QLORA_OK ? qlora__text_ids_prepend(env, &tok->prefix, &front) : r;
        qlora__text_ids_free(env, &front);
    }
    return r;
}

// How added tokens are numbered.
typedef struct qlora__text_numbering {
    qlora__text_words seen; // the added tokens so far
    int64_t next;           // the id of the next one that the vocabulary does not have
} qlora__text_numbering;

// The id of an added token: that of the vocabulary, or of an earlier one with the same content,
// otherwise the next one. The `tokenizers` library does not look at the id in the file: with any
// other one, ids would mean other tokens there.
static qlora_result qlora__text_added_id(qlora__env* env, const qlora_text_tok* tok,
                                         qlora__text_numbering* numbering, const char* text,
                                         size_t size, int64_t given, int64_t* out) {
    *out = qlora__text_model_find(tok, text, size);
    if (*out < 0) {
        *out = qlora__text_words_find(&numbering->seen, text, size);
    }
    // a word of a byte-level vocabulary that does not stand for bytes
    if (*out < 0 && given >= 0 && (uint64_t)given < tok->count && tok->spans[given].size == size &&
        memcmp(tok->names.data + tok->spans[given].at, text, size) == 0) {
        *out = given;
    }
    if (*out < 0 && given != numbering->next) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "added_tokens: \"%.60s\" has id %lld, but added tokens are numbered "
                               "in their order, and this one would be %lld",
                               text, (long long)given, (long long)numbering->next);
    }
    *out = *out < 0 ? given : *out;
    numbering->next = *out >= numbering->next ? *out + 1 : numbering->next;
    return qlora__text_words_put(env, &numbering->seen, text, size, (int32_t)*out);
}

// Lets the last added token be found. Of several that normalizing makes equal, the library finds
// the first one, special ones before others.
static qlora_result qlora__text_added_find(qlora__env* env, const qlora_text_tok* tok,
                                           qlora__text_trie* trie, const char* text, size_t size) {
    const qlora__text_added* added = &tok->added[tok->added_count - 1];
    const qlora__text_pair* edge = NULL;
    uint32_t node = 0;
    if (size == 0) { // the library would find it everywhere
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "added_tokens: the token with id %d is empty when it is normalized, "
                               "which is not supported",
                               (int)added->id);
    }
    for (size_t i = 0; i < size && (i == 0 || edge != NULL); i++) {
        edge = qlora__text_pairs_find(&trie->edges, node, (unsigned char)text[i]);
        node = edge != NULL ? edge->first : 0;
    }
    if (edge != NULL && edge->second != 0) {
        const qlora__text_added* other = &tok->added[edge->second - 1];
        if (other->id != added->id && (other->special || !added->special)) {
            return QLORA_OK;
        }
    }
    return qlora__text_trie_add(env, trie, text, size, (uint32_t)tok->added_count - 1);
}

static qlora_result qlora__text_load_added_token(qlora__env* env, qlora_text_tok* tok,
                                                 const qlora__json* json,
                                                 const qlora__json_token* node, uint32_t number,
                                                 qlora__text_numbering* numbering) {
    const qlora__json_token* content = qlora__text_json_get(json, node, "content");
    const qlora__json_token* id = qlora__text_json_get(json, node, "id");
    int64_t given = -1;
    if (!qlora__text_json_string(content) || !qlora__text_json_integer(json, id, &given)) {
        return qlora__env_fail(
            env, QLORA_ERR_FORMAT,
            "added_tokens[%lu] needs a string \"content\" and a whole number \"id\"",
            (unsigned long)number);
    }
    size_t size = qlora__text_json_size(content);
    if (size == 0) {
        return QLORA_OK;
    }
    const char* text = qlora__text_json_text(json, content);
    if (size > QLORA__TEXT_MAX_ADDED) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT,
                               "added_tokens: \"%.60s...\" is longer than %d bytes", text,
                               QLORA__TEXT_MAX_ADDED);
    }
    qlora__text_added* added = &tok->added[tok->added_count];
    int64_t use = -1;
    bool normalized = false;
    QLORA__TRY(qlora__text_json_switch(env, json, node, "special", &added->special));
    QLORA__TRY(qlora__text_json_switch(env, json, node, "single_word", &added->single_word));
    QLORA__TRY(qlora__text_json_switch(env, json, node, "lstrip", &added->strip_left));
    QLORA__TRY(qlora__text_json_switch(env, json, node, "rstrip", &added->strip_right));
    QLORA__TRY(qlora__text_json_switch(env, json, node, "normalized", &normalized));
    QLORA__TRY(qlora__text_added_id(env, tok, numbering, text, size, given, &use));
    unsigned kind = QLORA__TEXT_K_ADDED | (added->special ? (unsigned)QLORA__TEXT_K_SPECIAL : 0u);
    QLORA__TRY(qlora__text_tok_name(env, tok, use, text, size, kind));
    added->id = (int32_t)use;
    added->name = tok->spans[use];
    tok->added_count++;
    if (!normalized) {
        return qlora__text_added_find(env, tok, &tok->raw_trie, text, size);
    }
    qlora_text_bytes* normal;
    QLORA__TRY(qlora__text_apply_normalizer(env, tok, text, size, true, &normal));
    // decoding gives the normalised form, as the library does
    QLORA__TRY(qlora__text_tok_name(env, tok, use, normal->data, normal->count, kind));
    return qlora__text_added_find(env, tok, &tok->normalized_trie, normal->data, normal->count);
}

static qlora_result qlora__text_load_added(qlora__env* env, qlora_text_tok* tok,
                                           const qlora__json* json, const qlora__json_token* list) {
    if (qlora__text_json_absent(list)) {
        return QLORA_OK;
    }
    if (list->kind != QLORA__JSON_ARRAY) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "added_tokens is not an array");
    }
    tok->added =
        (qlora__text_added*)qlora__text_zalloc(env, list->count, sizeof(qlora__text_added));
    if (tok->added == NULL) {
        return QLORA_ERR_MEMORY;
    }
    tok->added_capacity = list->count;
    const qlora__json_token* node = list + 1;
    qlora_result r = QLORA_OK;
    qlora__text_numbering numbering;
    memset(&numbering, 0, sizeof numbering);
    numbering.next = (int64_t)(tok->unigram ? tok->score_capacity : tok->words.count + tok->others);
    for (uint32_t i = 0; r == QLORA_OK && i < list->count; i++) {
        r = qlora__text_load_added_token(env, tok, json, node, i, &numbering);
        node = qlora__text_json_next(json, node);
    }
    qlora__text_words_free(env, &numbering.seen);
    return r;
}

static qlora_result qlora__text_load_parts(qlora__env* env, qlora_text_tok* tok,
                                           const qlora__json* json) {
    const qlora__json_token* root = json->tokens;
    if (root->kind != QLORA__JSON_OBJECT) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "a JSON object was expected");
    }
    const qlora__json_token* version = qlora__text_json_get(json, root, "version");
    if (version != NULL && !qlora__text_json_is(json, version, "1.0")) {
        const char* text = qlora__text_json_cstring(json, version);
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "the version is \"%.60s\"; only \"1.0\" is supported",
                               text != NULL ? text : "(not a string)");
    }
    memcpy(tok->cut, "\xE2\x96\x81", 3); // U+2581, the stand-in for a space
    tok->cut_size = 3;
    QLORA__TRY(qlora__text_load_normalizer(env, tok, json,
                                           qlora__text_json_get(json, root, "normalizer")));
    QLORA__TRY(qlora__text_load_splitter(env, tok, json,
                                         qlora__text_json_get(json, root, "pre_tokenizer")));
    QLORA__TRY(qlora__text_load_model(env, tok, json, qlora__text_json_get(json, root, "model")));
    QLORA__TRY(
        qlora__text_load_added(env, tok, json, qlora__text_json_get(json, root, "added_tokens")));
    QLORA__TRY(
        qlora__text_load_post(env, tok, json, qlora__text_json_get(json, root, "post_processor")));
    QLORA__TRY(
        qlora__text_load_decoder(env, tok, json, qlora__text_json_get(json, root, "decoder")));
    tok->cut_safe = qlora__text_cut_is_safe(tok);
    return QLORA_OK;
}

static qlora_result qlora__text_load_json(qlora__env* env, qlora_text_tok* tok, const char* name,
                                          const char* data, size_t size) {
    qlora__json json;
    QLORA__TRY(qlora__text_json(env, name, data, size, &json));
    // Each word of the vocabulary has at least two JSON tokens. There is a table entry per id, so
    // that a single large id would cost much more memory than the file.
    tok->id_limit = (int64_t)json.count + QLORA__TEXT_MAX_GAP;
    tok->id_limit =
        tok->id_limit < QLORA__TEXT_MAX_ID ? tok->id_limit : (int64_t)QLORA__TEXT_MAX_ID;
    qlora_result r = qlora__text_load_parts(env, tok, &json);
    qlora__json_free(env, &json);
    return r == QLORA_OK ? r : qlora__env_wrap(env, r, "%s: ", name);
}
