enum { TEXT__MAX_ID = 1 << 24, TEXT__MAX_ADDED = 1024, TEXT__MAX_LIST = 64, TEXT__MAX_STEP = 64 };

static void text__steps_free(text__steps* steps) {
    for (size_t i = 0; i < steps->count; i++) {
        TEXT_FREE(steps->data[i].a);
        TEXT_FREE(steps->data[i].b);
    }
    steps->count = 0;
}

void text_tok_close(text_tok* tok) {
    if (tok == NULL) {
        return;
    }
    text_bytes_free(&tok->names);
    TEXT_FREE(tok->spans);
    TEXT_FREE(tok->kinds);
    text__words_free(&tok->words);
    TEXT_FREE(tok->merges.data);
    TEXT_FREE(tok->added);
    TEXT_FREE(tok->raw_trie.edges.data);
    TEXT_FREE(tok->normalized_trie.edges.data);
    text__steps_free(&tok->normalizer);
    text__steps_free(&tok->splitter);
    text__steps_free(&tok->decoder);
    text_ids_free(&tok->prefix);
    text_ids_free(&tok->suffix);
    TEXT_FREE(tok->classes);
    TEXT_FREE(tok->cache);
    for (size_t i = 0; i < TEXT__COUNT(tok->buffers); i++) {
        text_bytes_free(&tok->buffers[i]);
    }
    for (size_t i = 0; i < TEXT__COUNT(tok->pieces); i++) {
        TEXT_FREE(tok->pieces[i].data);
    }
    TEXT_FREE(tok->marks.data);
    TEXT_FREE(tok->marks.sorted);
    TEXT_FREE(tok->symbols);
    TEXT_FREE(tok->jobs);
    TEXT_FREE(tok);
}

// The stand-ins of byte-level files: printable Latin-1 bytes are themselves, the others 256 + n.
static void text__byte_tables(text_tok* tok) {
    uint16_t next = 256;
    for (size_t i = 0; i < TEXT__COUNT(tok->byte_of_code); i++) {
        tok->byte_of_code[i] = -1;
    }
    for (unsigned b = 0; b < 256; b++) {
        bool printable = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        tok->code_of_byte[b] = printable ? (uint16_t)b : next++;
        tok->byte_of_code[tok->code_of_byte[b]] = (int16_t)b;
        tok->byte_ids[b] = -1;
        tok->fallback_ids[b] = -1;
    }
}

static bool text__tok_new(text_tok** out, text_error* error) {
    text_tok* tok = (text_tok*)text__zalloc(1, sizeof(text_tok), error);
    *out = tok;
    TEXT__TRY(tok != NULL);
    tok->unknown = -1;
    text__byte_tables(tok);
    tok->classes = text__classes_make(error);
    tok->cache = (text__cached*)text__zalloc(TEXT__CACHE_PLACES, sizeof(text__cached), error);
    return tok->classes != NULL && tok->cache != NULL;
}

// The stand-ins back to bytes, appended; false (and nothing appended) when one is not a stand-in.
static bool text__unstand(const text_tok* tok, const char* text, size_t size, text_bytes* out,
                          bool* known, text_error* error) {
    size_t before = out->count;
    TEXT__TRY(text__bytes_room(out, size, error));
    *known = true;
    for (size_t at = 0; at < size;) {
        uint32_t code = 0;
        size_t length = text__utf8((const unsigned char*)text + at, size - at, &code);
        if (length == 0 || code >= TEXT__COUNT(tok->byte_of_code) || tok->byte_of_code[code] < 0) {
            out->count = before;
            *known = false;
            return true;
        }
        out->data[out->count++] = (char)(unsigned char)tok->byte_of_code[code];
        at += length;
    }
    return true;
}

// The id of a word as the file spells it, or -1.
static int32_t text__model_find(const text_tok* tok, const char* name, size_t size) {
    char raw[TEXT__MAX_ADDED];
    if (!tok->byte_level) {
        return text__words_find(&tok->words, name, size);
    }
    text_bytes bytes;
    bytes.data = raw;
    bytes.count = 0;
    bytes.capacity = sizeof(raw);
    bool known = false;
    if (size > sizeof(raw) || !text__unstand(tok, name, size, &bytes, &known, NULL) || !known) {
        return -1;
    }
    return text__words_find(&tok->words, raw, bytes.count);
}

// Gives an id its name. The id is made if it is new.
static bool text__tok_name(text_tok* tok, int64_t id, const char* name, size_t size, unsigned kind,
                           text_error* error) {
    if (id < 0 || id >= TEXT__MAX_ID) {
        return text__fail(error, "token \"%.60s\" has id %lld; ids must be 0 to %d", name,
                          (long long)id, TEXT__MAX_ID - 1);
    }
    size_t index = (size_t)id;
    if (index >= tok->count) {
        size_t extra = index + 1 - tok->count;
        void* spans = tok->spans;
        bool good = text__reserve(&spans, &tok->span_capacity, tok->count, extra,
                                  sizeof(text__span), error);
        tok->spans = (text__span*)spans;
        TEXT__TRY(good);
        void* kinds = tok->kinds;
        good = text__reserve(&kinds, &tok->kind_capacity, tok->count, extra, 1, error);
        tok->kinds = (uint8_t*)kinds;
        TEXT__TRY(good);
        memset(tok->spans + tok->count, 0, extra * sizeof(text__span));
        memset(tok->kinds + tok->count, 0, extra);
        tok->count = index + 1;
    }
    if (tok->names.count + size >= UINT32_MAX) {
        return text__fail(error, "the vocabulary is larger than 4 GiB");
    }
    tok->spans[index].at = (uint32_t)tok->names.count;
    tok->spans[index].size = (uint32_t)size;
    tok->kinds[index] = (uint8_t)(tok->kinds[index] | kind | TEXT__K_EXISTS);
    return text_bytes_add(&tok->names, name, size, error);
}

// <0x00> to <0xFF>: the byte, or -1.
static int text__byte_token(const char* name, size_t size) {
    if (size != 6 || memcmp(name, "<0x", 3) != 0 || name[5] != '>') {
        return -1;
    }
    int value = 0;
    for (size_t i = 3; i < 5; i++) {
        char c = name[i];
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                           : -1;
        if (digit < 0) {
            return -1;
        }
        value = value * 16 + digit;
    }
    return value;
}

// A word of the vocabulary: named, and found by the model.
static bool text__tok_word(text_tok* tok, const char* name, size_t size, int64_t id,
                           text_error* error) {
    int byte = text__byte_token(name, size);
    TEXT__TRY(text__tok_name(tok, id, name, size, byte >= 0 ? TEXT__K_BYTE : 0, error));
    if (byte >= 0 && name[3] < 'a' && name[4] < 'a') {
        tok->fallback_ids[byte] = (int32_t)id;
    }
    if (!tok->byte_level) {
        return text__words_put(&tok->words, name, size, (int32_t)id, error);
    }
    text_bytes* raw = &tok->buffers[0];
    bool known;
    raw->count = 0;
    TEXT__TRY(text__unstand(tok, name, size, raw, &known, error));
    return !known || text__words_put(&tok->words, raw->data, raw->count, (int32_t)id, error);
}

static bool text__load_vocab(text_tok* tok, const text__json* json, const text__node* vocab,
                             text_error* error) {
    if (vocab == NULL || vocab->type != TEXT__J_OBJECT) {
        return text__fail(error, "model.vocab is not an object");
    }
    const text__node* key = vocab + 1;
    for (uint32_t i = 0; i < vocab->size; i++) {
        const text__node* value = text__json_next(json, key);
        const char* name = text__json_text(json, key);
        if (value->type != TEXT__J_INTEGER) {
            return text__fail(error, "model.vocab: the id of \"%.60s\" is not a whole number",
                              name);
        }
        TEXT__TRY(text__tok_word(tok, name, key->size, value->integer, error));
        key = text__json_next(json, value);
    }
    for (unsigned b = 0; b < 256; b++) {
        char byte = (char)(unsigned char)b;
        tok->byte_ids[b] = text__words_find(&tok->words, &byte, 1);
    }
    return true;
}

// The two halves of a merge, "a b" or ["a", "b"].
static bool text__merge_halves(const text__json* json, const text__node* merge,
                               text__span halves[2], text_error* error) {
    if (merge->type == TEXT__J_ARRAY && merge->size == 2) {
        const text__node* a = merge + 1;
        const text__node* b = text__json_next(json, a);
        if (a->type == TEXT__J_STRING && b->type == TEXT__J_STRING) {
            halves[0].at = a->at;
            halves[0].size = a->size;
            halves[1].at = b->at;
            halves[1].size = b->size;
            return true;
        }
    }
    if (merge->type == TEXT__J_STRING) {
        const char* text = text__json_text(json, merge);
        const char* space = (const char*)memchr(text, ' ', merge->size);
        size_t left = space != NULL ? (size_t)(space - text) : 0;
        if (space != NULL && memchr(space + 1, ' ', merge->size - left - 1) == NULL) {
            halves[0].at = merge->at;
            halves[0].size = (uint32_t)left;
            halves[1].at = merge->at + (uint32_t)left + 1;
            halves[1].size = merge->size - (uint32_t)left - 1;
            return true;
        }
    }
    return text__fail(error, "is neither \"a b\" nor [\"a\", \"b\"]");
}

static bool text__load_merge(text_tok* tok, const text__json* json, const text__node* merge,
                             uint32_t rank, text_error* error) {
    text__span halves[2];
    memset(halves, 0, sizeof(halves));
    TEXT__TRY(text__merge_halves(json, merge, halves, error));
    text_bytes* raw = &tok->buffers[0];
    raw->count = 0;
    int32_t ids[2];
    size_t begin = 0;
    for (size_t i = 0; i < 2; i++) {
        const char* half = json->strings.data + halves[i].at;
        bool known = true;
        if (tok->byte_level) {
            TEXT__TRY(text__unstand(tok, half, halves[i].size, raw, &known, error));
        } else {
            TEXT__TRY(text_bytes_add(raw, half, halves[i].size, error));
        }
        if (!known) {
            return true; // never comes up: no text has such characters at this point
        }
        ids[i] = raw->count > begin
                     ? text__words_find(&tok->words, raw->data + begin, raw->count - begin)
                     : -1;
        if (ids[i] < 0) {
            return text__fail(error, "\"%.*s\" is not in the vocabulary",
                              (int)(halves[i].size < 60 ? halves[i].size : 60), half);
        }
        begin = raw->count;
    }
    int32_t joined = text__words_find(&tok->words, raw->data, raw->count);
    if (joined < 0) {
        return text__fail(error, "what it makes is not in the vocabulary");
    }
    return text__pairs_put(&tok->merges, (uint32_t)ids[0], (uint32_t)ids[1], rank, (uint32_t)joined,
                           error);
}

static bool text__load_merges(text_tok* tok, const text__json* json, const text__node* merges,
                              text_error* error) {
    if (merges == NULL || merges->type != TEXT__J_ARRAY) {
        return text__fail(error, "model.merges is not an array");
    }
    const text__node* merge = merges + 1;
    for (uint32_t i = 0; i < merges->size; i++) {
        text_error why;
        why.text[0] = 0;
        if (!text__load_merge(tok, json, merge, i, &why)) {
            return text__fail(error, "model.merges: number %lu %s", (unsigned long)i, why.text);
        }
        merge = text__json_next(json, merge);
    }
    return true;
}

// Is the word mark never found after another character, in any word that merging can make?
static bool text__cut_is_safe(const text_tok* tok) {
    size_t size = tok->cut_size;
    if (tok->byte_level || tok->ignore_merges || size == 0 ||
        text__words_find(&tok->words, tok->cut, size) < 0) {
        return false;
    }
    for (size_t place = 0; place < tok->merges.places; place++) {
        const text__pair* pair = &tok->merges.data[place];
        if (pair->key == UINT64_MAX) {
            continue;
        }
        const char* name = tok->names.data + tok->spans[pair->second].at;
        size_t count = tok->spans[pair->second].size;
        bool before = true;
        for (size_t at = 0; at < count;) {
            bool mark = count - at >= size && memcmp(name + at, tok->cut, size) == 0;
            if (mark && !before) {
                return false;
            }
            before = mark;
            at += mark ? size : 1;
        }
    }
    return true;
}

static bool text__load_model(text_tok* tok, const text__json* json, const text__node* model,
                             text_error* error) {
    const text__node* type = text__json_get(json, model, "type");
    if (model == NULL || model->type != TEXT__J_OBJECT) {
        return text__fail(error, "it has no \"model\"");
    }
    if (!text__json_absent(type) && !text__json_is(json, type, "BPE")) {
        const char* name = text__json_cstring(json, type);
        return text__fail(error, "the model type is %.60s; only BPE is supported",
                          name != NULL ? name : "not a string");
    }
    static const char* const refused[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    for (size_t i = 0; i < TEXT__COUNT(refused); i++) {
        const text__node* node = text__json_get(json, model, refused[i]);
        if (!text__json_absent(node) && !text__json_is(json, node, "")) {
            return text__fail(error, "model.%s is not supported", refused[i]);
        }
    }
    const text__node* dropout = text__json_get(json, model, "dropout");
    if (!text__json_absent(dropout) &&
        !(dropout->type == TEXT__J_INTEGER && dropout->integer == 0)) {
        return text__fail(error, "model.dropout is not supported");
    }
    tok->byte_fallback = text__json_true(text__json_get(json, model, "byte_fallback"));
    tok->fuse_unknown = text__json_true(text__json_get(json, model, "fuse_unk"));
    tok->ignore_merges = text__json_true(text__json_get(json, model, "ignore_merges"));
    TEXT__TRY(text__load_vocab(tok, json, text__json_get(json, model, "vocab"), error));
    TEXT__TRY(text__load_merges(tok, json, text__json_get(json, model, "merges"), error));
    const text__node* unknown = text__json_get(json, model, "unk_token");
    if (!text__json_absent(unknown)) {
        const char* name = text__json_cstring(json, unknown);
        tok->unknown = name != NULL ? text__model_find(tok, name, unknown->size) : -1;
        if (tok->unknown < 0) {
            return text__fail(error, "model.unk_token is not in the vocabulary");
        }
    }
    return true;
}

// "Sequence" and what is in it, flattened in order. `list` is the name of its array.
static bool text__flatten(const text__json* json, const text__node* root, const char* list,
                          const text__node** out, size_t* count, text_error* error) {
    *count = 0;
    if (text__json_absent(root)) {
        return true;
    }
    const text__node* stack[TEXT__MAX_LIST];
    size_t depth = 0;
    stack[depth++] = root;
    while (depth > 0) {
        const text__node* node = stack[--depth];
        const text__node* type = text__json_get(json, node, "type");
        if (!text__json_is(json, type, "Sequence")) {
            if (type == NULL || type->type != TEXT__J_STRING) {
                return text__fail(error, "%s: a step without a \"type\"", list);
            }
            if (*count == TEXT__MAX_LIST) {
                return text__fail(error, "%s: too many steps", list);
            }
            out[(*count)++] = node;
            continue;
        }
        const text__node* array = text__json_get(json, node, list);
        if (array == NULL || array->type != TEXT__J_ARRAY) {
            return text__fail(error, "%s: a Sequence without its list", list);
        }
        if (array->size > TEXT__MAX_LIST - depth) {
            return text__fail(error, "%s: too many steps", list);
        }
        const text__node* child = array + 1;
        for (uint32_t i = 0; i < array->size; i++) { // the first child on top
            stack[depth + array->size - 1 - i] = child;
            child = text__json_next(json, child);
        }
        depth += array->size;
    }
    return true;
}

static bool text__copy(const char* data, size_t size, char** out, size_t* out_size,
                       text_error* error) {
    char* copy = (char*)text__zalloc(size + 1, 1, error);
    TEXT__TRY(copy != NULL);
    if (size > 0) {
        memcpy(copy, data, size);
    }
    TEXT_FREE(*out);
    *out = copy;
    *out_size = size;
    return true;
}

static text__step* text__steps_add(text__steps* steps, int kind, text_error* error) {
    if (steps->count == TEXT__STEPS) {
        (void)text__fail(error, "more than %d steps", TEXT__STEPS);
        return NULL;
    }
    text__step* step = &steps->data[steps->count++];
    memset(step, 0, sizeof(*step));
    step->kind = kind;
    return step;
}

// A string member into a step.
static bool text__step_string(const text__json* json, const text__node* node, const char* name,
                              char** out, size_t* size, text_error* error) {
    const text__node* value = text__json_get(json, node, name);
    if (value == NULL || value->type != TEXT__J_STRING) {
        return text__fail(error, "a step without the string \"%s\"", name);
    }
    if (value->size > TEXT__MAX_STEP) { // a text could grow out of all bounds
        return text__fail(error, "\"%s\" is longer than %d bytes", name, TEXT__MAX_STEP);
    }
    return text__copy(text__json_text(json, value), value->size, out, size, error);
}

// {"String": x} into a; {"Regex": x} into the pattern if it is known and allowed here.
static bool text__step_pattern(const text__json* json, const text__node* node, bool regex,
                               text__step* step, text_error* error) {
    const text__node* pattern = text__json_get(json, node, "pattern");
    const text__node* string = text__json_get(json, pattern, "String");
    const text__node* expression = text__json_get(json, pattern, "Regex");
    if (pattern != NULL && pattern->type == TEXT__J_STRING) {
        string = pattern;
    }
    if (string != NULL && string->type == TEXT__J_STRING && string->size > 0) {
        return text__copy(text__json_text(json, string), string->size, &step->a, &step->a_size,
                          error);
    }
    if (expression != NULL && expression->type == TEXT__J_STRING) {
        const char* text = text__json_text(json, expression);
        if (regex && strlen(text) == expression->size) {
            step->pattern = text__pattern_find(text);
        }
        return step->pattern != NULL ||
               text__fail(error, "unknown regular expression: %.300s", text);
    }
    return text__fail(error, "a step without a \"pattern\"");
}

static bool text__load_normalizer(text_tok* tok, const text__json* json, const text__node* root,
                                  text_error* error) {
    const text__node* nodes[TEXT__MAX_LIST];
    size_t count;
    TEXT__TRY(text__flatten(json, root, "normalizers", nodes, &count, error));
    static const struct {
        const char* name;
        int kind;
    } kinds[] = {{"NFC", TEXT__N_NFC},
                 {"NFD", TEXT__N_NFD},
                 {"Prepend", TEXT__N_PREPEND},
                 {"Replace", TEXT__N_REPLACE},
                 {"Strip", TEXT__N_STRIP}};
    for (size_t i = 0; i < count; i++) {
        const text__node* type = text__json_get(json, nodes[i], "type");
        size_t k = 0;
        while (k < TEXT__COUNT(kinds) && !text__json_is(json, type, kinds[k].name)) {
            k++;
        }
        if (k == TEXT__COUNT(kinds)) {
            return text__fail(error, "the normalizer %.60s is not supported",
                              text__json_text(json, type));
        }
        text__step* step = text__steps_add(&tok->normalizer, kinds[k].kind, error);
        TEXT__TRY(step != NULL);
        if (step->kind == TEXT__N_PREPEND) {
            TEXT__TRY(text__step_string(json, nodes[i], "prepend", &step->a, &step->a_size, error));
        } else if (step->kind == TEXT__N_REPLACE) {
            TEXT__TRY(text__step_pattern(json, nodes[i], false, step, error));
            TEXT__TRY(text__step_string(json, nodes[i], "content", &step->b, &step->b_size, error));
        } else if (step->kind == TEXT__N_STRIP) {
            step->start = text__json_true(text__json_get(json, nodes[i], "strip_left"));
            step->stop = text__json_true(text__json_get(json, nodes[i], "strip_right"));
        }
    }
    return true;
}

static bool text__load_behavior(const text__json* json, const text__node* node, int* out,
                                text_error* error) {
    static const char* const names[] = {"Isolated", "Removed", "MergedWithPrevious",
                                        "MergedWithNext", "Contiguous"};
    const text__node* value = text__json_get(json, node, "behavior");
    for (size_t i = 0; i < TEXT__COUNT(names); i++) {
        if (text__json_is(json, value, names[i])) {
            *out = (int)i;
            return true;
        }
    }
    return text__fail(error, "pre_tokenizer: unknown behavior");
}

static bool text__load_metaspace(const text__json* json, const text__node* node, text__step* step,
                                 bool decoder, text_error* error) {
    const text__node* scheme = text__json_get(json, node, "prepend_scheme");
    const text__node* legacy = text__json_get(json, node, "add_prefix_space");
    const text__node* split = text__json_get(json, node, "split");
    TEXT__TRY(text__step_string(json, node, "replacement", &step->a, &step->a_size, error));
    if (step->a_size == 0) {
        return text__fail(error, "Metaspace: the replacement is empty");
    }
    step->always = text__json_absent(scheme) || text__json_is(json, scheme, "always");
    step->never = text__json_is(json, scheme, "never");
    if (!step->always && !step->never && !text__json_is(json, scheme, "first")) {
        return text__fail(error, "Metaspace: unknown prepend_scheme");
    }
    if (scheme == NULL && legacy != NULL && legacy->type == TEXT__J_FALSE) {
        step->always = false;
        step->never = true;
    }
    step->invert = !decoder && (split == NULL || split->type != TEXT__J_FALSE); // splits
    return true;
}

static bool text__load_bytelevel(text_tok* tok, const text__json* json, const text__node* node,
                                 text_error* error) {
    const text__node* prefix = text__json_get(json, node, "add_prefix_space");
    const text__node* regex = text__json_get(json, node, "use_regex");
    if (prefix == NULL || prefix->type != TEXT__J_FALSE) {
        TEXT__TRY(text__steps_add(&tok->splitter, TEXT__P_PREFIX_SPACE, error) != NULL);
    }
    if (regex == NULL || regex->type != TEXT__J_FALSE) {
        text__step* step = text__steps_add(&tok->splitter, TEXT__P_REGEX, error);
        TEXT__TRY(step != NULL);
        step->pattern = &text__patterns[0];
    }
    tok->byte_level = true;
    return text__steps_add(&tok->splitter, TEXT__P_BYTES, error) != NULL;
}

// The steps that only look at characters: Digits, Punctuation, Whitespace, WhitespaceSplit.
static bool text__load_classes(text_tok* tok, const text__json* json, const text__node* node,
                               bool* found, text_error* error) {
    const text__node* type = text__json_get(json, node, "type");
    static const struct {
        const char* name;
        int kind;
        unsigned mask;
        int behavior;
    } kinds[] = {{"Digits", TEXT__P_CLASS, TEXT__N, TEXT__B_CONTIGUOUS},
                 {"Punctuation", TEXT__P_PUNCTUATION, 0, TEXT__B_ISOLATED},
                 {"WhitespaceSplit", TEXT__P_CLASS, TEXT__WS, TEXT__B_REMOVED},
                 {"Whitespace", TEXT__P_REGEX, 0, TEXT__B_REMOVED}};
    size_t k = 0;
    while (k < TEXT__COUNT(kinds) && !text__json_is(json, type, kinds[k].name)) {
        k++;
    }
    *found = k < TEXT__COUNT(kinds);
    if (!*found) {
        return true;
    }
    text__step* step = text__steps_add(&tok->splitter, kinds[k].kind, error);
    TEXT__TRY(step != NULL);
    step->mask = kinds[k].mask;
    step->behavior = kinds[k].behavior;
    if (step->kind == TEXT__P_REGEX) {
        step->pattern = text__pattern_find("\\w+|[^\\w\\s]+");
        step->invert = true;
    }
    if (text__json_true(text__json_get(json, node, "individual_digits"))) {
        step->behavior = TEXT__B_ISOLATED;
    }
    if (step->kind == TEXT__P_PUNCTUATION && text__json_get(json, node, "behavior") != NULL) {
        return text__load_behavior(json, node, &step->behavior, error);
    }
    return true;
}

static bool text__load_splitter_step(text_tok* tok, const text__json* json, const text__node* node,
                                     text_error* error) {
    const text__node* type = text__json_get(json, node, "type");
    if (text__json_is(json, type, "ByteLevel")) {
        return tok->byte_level ? text__fail(error, "pre_tokenizer: ByteLevel is there twice")
                               : text__load_bytelevel(tok, json, node, error);
    }
    if (text__json_is(json, type, "Metaspace")) {
        text__step* step = text__steps_add(&tok->splitter, TEXT__P_METASPACE, error);
        TEXT__TRY(step != NULL);
        return text__load_metaspace(json, node, step, false, error);
    }
    if (text__json_is(json, type, "Split")) {
        text__step* step = text__steps_add(&tok->splitter, TEXT__P_REGEX, error);
        TEXT__TRY(step != NULL);
        TEXT__TRY(text__step_pattern(json, node, true, step, error));
        step->kind = step->pattern != NULL ? TEXT__P_REGEX : TEXT__P_STRING;
        step->invert = text__json_true(text__json_get(json, node, "invert"));
        // after ByteLevel the characters are others: only this expression means the same
        if (tok->byte_level &&
            (step->pattern == NULL || step->pattern->match != text__match_ascii3)) {
            return text__fail(error, "pre_tokenizer: a Split after ByteLevel is not supported");
        }
        return text__load_behavior(json, node, &step->behavior, error);
    }
    bool found;
    TEXT__TRY(text__load_classes(tok, json, node, &found, error));
    return found || text__fail(error, "the pre_tokenizer %.60s is not supported",
                               text__json_text(json, type));
}

static bool text__load_splitter(text_tok* tok, const text__json* json, const text__node* root,
                                text_error* error) {
    const text__node* nodes[TEXT__MAX_LIST];
    size_t count;
    TEXT__TRY(text__flatten(json, root, "pretokenizers", nodes, &count, error));
    for (size_t i = 0; i < count; i++) {
        TEXT__TRY(text__load_splitter_step(tok, json, nodes[i], error));
    }
    return true;
}

static bool text__load_decoder_step(text_tok* tok, const text__json* json, const text__node* node,
                                    text_error* error) {
    const text__node* type = text__json_get(json, node, "type");
    static const struct {
        const char* name;
        int kind;
    } kinds[] = {{"Replace", TEXT__D_REPLACE}, {"ByteFallback", TEXT__D_BYTE_FALLBACK},
                 {"Fuse", TEXT__D_FUSE},       {"Strip", TEXT__D_STRIP},
                 {"ByteLevel", TEXT__D_BYTES}, {"Metaspace", TEXT__D_METASPACE}};
    size_t k = 0;
    while (k < TEXT__COUNT(kinds) && !text__json_is(json, type, kinds[k].name)) {
        k++;
    }
    if (k == TEXT__COUNT(kinds)) {
        return text__fail(error, "the decoder %.60s is not supported", text__json_text(json, type));
    }
    text__step* step = text__steps_add(&tok->decoder, kinds[k].kind, error);
    TEXT__TRY(step != NULL);
    if (step->kind == TEXT__D_REPLACE) {
        TEXT__TRY(text__step_pattern(json, node, false, step, error));
        return text__step_string(json, node, "content", &step->b, &step->b_size, error);
    }
    if (step->kind == TEXT__D_METASPACE) {
        return text__load_metaspace(json, node, step, true, error);
    }
    if (step->kind == TEXT__D_STRIP) {
        const text__node* start = text__json_get(json, node, "start");
        const text__node* stop = text__json_get(json, node, "stop");
        bool numbers = start != NULL && start->type == TEXT__J_INTEGER && start->integer >= 0 &&
                       stop != NULL && stop->type == TEXT__J_INTEGER && stop->integer >= 0;
        if (!numbers || start->integer > 1000 || stop->integer > 1000) {
            return text__fail(error, "decoder Strip: bad start or stop");
        }
        step->start = (size_t)start->integer;
        step->stop = (size_t)stop->integer;
        TEXT__TRY(text__step_string(json, node, "content", &step->a, &step->a_size, error));
        return step->a_size > 0 || text__fail(error, "decoder Strip: the content is empty");
    }
    return true;
}

static bool text__load_decoder(text_tok* tok, const text__json* json, const text__node* root,
                               text_error* error) {
    const text__node* nodes[TEXT__MAX_LIST];
    size_t count;
    TEXT__TRY(text__flatten(json, root, "decoders", nodes, &count, error));
    if (text__json_absent(root)) { // then the library puts a space between tokens
        return text__steps_add(&tok->decoder, TEXT__D_JOIN, error) != NULL;
    }
    bool fused = false;
    for (size_t i = 0; i < count; i++) {
        TEXT__TRY(text__load_decoder_step(tok, json, nodes[i], error));
        int kind = tok->decoder.data[tok->decoder.count - 1].kind;
        if (fused && kind != TEXT__D_STRIP && kind != TEXT__D_FUSE) {
            return text__fail(error, "decoder: only Strip is supported after Fuse and ByteLevel");
        }
        fused = fused || kind == TEXT__D_FUSE || kind == TEXT__D_BYTES;
    }
    return true;
}

// The ids of one element of a template: {"SpecialToken": {"id": name}}.
static bool text__load_template_token(const text__json* json, const text__node* tokens,
                                      const text__node* item, text_ids* out, text_error* error) {
    const char* name = text__json_cstring(json, text__json_get(json, item, "id"));
    const text__node* ids = NULL;
    if (name != NULL) {
        ids = text__json_get(json, text__json_get(json, tokens, name), "ids");
    }
    if (ids == NULL) {
        return text__fail(error, "post_processor: a special token without its ids");
    }
    return text__json_ids(json, ids, out, error);
}

// Puts `front` in front of ids.
static bool text__ids_prepend(text_ids* ids, const text_ids* front, text_error* error) {
    TEXT__TRY(text__ids_room(ids, front->count, error));
    if (front->count > 0) {
        memmove(ids->data + front->count, ids->data, ids->count * sizeof(int32_t));
        memcpy(ids->data, front->data, front->count * sizeof(int32_t));
        ids->count += front->count;
    }
    return true;
}

static bool text__load_template(text_tok* tok, const text__json* json, const text__node* node,
                                text_ids* front, text_error* error) {
    const text__node* single = text__json_get(json, node, "single");
    const text__node* tokens = text__json_get(json, node, "special_tokens");
    if (single == NULL || single->type != TEXT__J_ARRAY || single->size > TEXT__MAX_LIST) {
        return text__fail(error, "post_processor: TemplateProcessing without a good \"single\"");
    }
    bool before = true;
    const text__node* item = single + 1;
    for (uint32_t i = 0; i < single->size; i++) {
        const text__node* special = text__json_get(json, item, "SpecialToken");
        const text__node* sequence = text__json_get(json, item, "Sequence");
        if (special != NULL) {
            TEXT__TRY(text__load_template_token(json, tokens, special,
                                                before ? front : &tok->suffix, error));
        } else if (sequence != NULL && before &&
                   text__json_is(json, text__json_get(json, sequence, "id"), "A")) {
            before = false;
        } else {
            return text__fail(error, "post_processor: this template is not supported");
        }
        item = text__json_next(json, item);
    }
    return !before || text__fail(error, "post_processor: the template has no text");
}

// [token, id] of the Roberta and Bert kinds.
static bool text__load_framing(const text__json* json, const text__node* node, const char* name,
                               text_ids* out, text_error* error) {
    const text__node* pair = text__json_get(json, node, name);
    if (pair != NULL && pair->type == TEXT__J_ARRAY && pair->size == 2) {
        const text__node* id = text__json_next(json, pair + 1);
        if (id->type == TEXT__J_INTEGER && id->integer >= 0 && id->integer < TEXT__MAX_ID) {
            return text_ids_add(out, (int32_t)id->integer, error);
        }
    }
    return text__fail(error, "post_processor: \"%s\" is not [token, id]", name);
}

static bool text__load_post_step(text_tok* tok, const text__json* json, const text__node* node,
                                 text_ids* front, text_error* error) {
    const text__node* type = text__json_get(json, node, "type");
    if (text__json_is(json, type, "ByteLevel")) {
        return true; // it only changes offsets
    }
    if (text__json_is(json, type, "TemplateProcessing")) {
        return text__load_template(tok, json, node, front, error);
    }
    if (text__json_is(json, type, "RobertaProcessing") ||
        text__json_is(json, type, "BertProcessing")) {
        return text__load_framing(json, node, "cls", front, error) &&
               text__load_framing(json, node, "sep", &tok->suffix, error);
    }
    return text__fail(error, "the post_processor %.60s is not supported",
                      text__json_text(json, type));
}

static bool text__load_post(text_tok* tok, const text__json* json, const text__node* root,
                            text_error* error) {
    const text__node* nodes[TEXT__MAX_LIST];
    size_t count;
    TEXT__TRY(text__flatten(json, root, "processors", nodes, &count, error));
    bool good = true;
    for (size_t i = 0; good && i < count; i++) {
        text_ids front;
        memset(&front, 0, sizeof(front));
        good = text__load_post_step(tok, json, nodes[i], &front, error) &&
               text__ids_prepend(&tok->prefix, &front, error);
        text_ids_free(&front);
    }
    return good;
}

static bool text__trie_add(text__trie* trie, const char* text, size_t size, uint32_t token,
                           text_error* error) {
    uint32_t node = 0;
    for (size_t i = 0; i < size; i++) {
        unsigned char c = (unsigned char)text[i];
        const text__pair* edge = text__pairs_find(&trie->edges, node, c);
        uint32_t next = edge != NULL ? edge->first : ++trie->nodes;
        uint32_t ends = edge != NULL ? edge->second : 0;
        if (i + 1 == size) {
            ends = token + 1;
        }
        TEXT__TRY(text__pairs_put(&trie->edges, node, c, next, ends, error));
        trie->starts[c] = trie->starts[c] || i == 0;
        node = next;
    }
    return true;
}

static bool text__load_added_token(text_tok* tok, const text__json* json, const text__node* node,
                                   text_error* error) {
    const text__node* content = text__json_get(json, node, "content");
    const text__node* id = text__json_get(json, node, "id");
    if (content == NULL || content->type != TEXT__J_STRING || id == NULL ||
        id->type != TEXT__J_INTEGER) {
        return text__fail(error, "added_tokens: an element without \"content\" or \"id\"");
    }
    if (content->size == 0) {
        return true;
    }
    const char* text = text__json_text(json, content);
    if (content->size > TEXT__MAX_ADDED) {
        return text__fail(error, "added_tokens: \"%.60s...\" is longer than %d bytes", text,
                          TEXT__MAX_ADDED);
    }
    text__added* added = &tok->added[tok->added_count];
    // the id of the vocabulary goes before the one given here
    int32_t known = text__model_find(tok, text, content->size);
    int64_t use = known >= 0 ? known : id->integer;
    added->special = text__json_true(text__json_get(json, node, "special"));
    added->single_word = text__json_true(text__json_get(json, node, "single_word"));
    added->strip_left = text__json_true(text__json_get(json, node, "lstrip"));
    added->strip_right = text__json_true(text__json_get(json, node, "rstrip"));
    unsigned kind = TEXT__K_ADDED | (added->special ? (unsigned)TEXT__K_SPECIAL : 0u);
    TEXT__TRY(text__tok_name(tok, use, text, content->size, kind, error));
    added->id = (int32_t)use;
    added->name = tok->spans[use];
    tok->added_count++;
    if (!text__json_true(text__json_get(json, node, "normalized"))) {
        return text__trie_add(&tok->raw_trie, text, content->size, (uint32_t)tok->added_count - 1,
                              error);
    }
    text_bytes* normal;
    TEXT__TRY(text__apply_normalizer(tok, text, content->size, true, &normal, error));
    // decoding gives the normalised form, as the library does
    TEXT__TRY(text__tok_name(tok, use, normal->data, normal->count, kind, error));
    return text__trie_add(&tok->normalized_trie, normal->data, normal->count,
                          (uint32_t)tok->added_count - 1, error);
}

static bool text__load_added(text_tok* tok, const text__json* json, const text__node* list,
                             text_error* error) {
    if (text__json_absent(list)) {
        return true;
    }
    if (list->type != TEXT__J_ARRAY) {
        return text__fail(error, "added_tokens is not an array");
    }
    tok->added = (text__added*)text__zalloc(list->size, sizeof(text__added), error);
    TEXT__TRY(tok->added != NULL);
    const text__node* node = list + 1;
    for (uint32_t i = 0; i < list->size; i++) {
        TEXT__TRY(text__load_added_token(tok, json, node, error));
        node = text__json_next(json, node);
    }
    return true;
}

static bool text__load_parts(text_tok* tok, const text__json* json, text_error* error) {
    const text__node* root = json->nodes;
    if (root->type != TEXT__J_OBJECT) {
        return text__fail(error, "it is not a JSON object");
    }
    memcpy(tok->cut, "\xE2\x96\x81", 3); // U+2581, the stand-in for a space
    tok->cut_size = 3;
    TEXT__TRY(text__load_normalizer(tok, json, text__json_get(json, root, "normalizer"), error));
    TEXT__TRY(text__load_splitter(tok, json, text__json_get(json, root, "pre_tokenizer"), error));
    TEXT__TRY(text__load_model(tok, json, text__json_get(json, root, "model"), error));
    TEXT__TRY(text__load_added(tok, json, text__json_get(json, root, "added_tokens"), error));
    TEXT__TRY(text__load_post(tok, json, text__json_get(json, root, "post_processor"), error));
    TEXT__TRY(text__load_decoder(tok, json, text__json_get(json, root, "decoder"), error));
    tok->cut_safe = text__cut_is_safe(tok);
    return true;
}

static bool text__load_json(text_tok* tok, const char* name, const char* data, size_t size,
                            text_error* error) {
    text__json json;
    text_error why;
    why.text[0] = 0;
    bool good = text__json_open(&json, name, data, size, error);
    if (good && !text__load_parts(tok, &json, &why)) {
        good = text__fail(error, "%s: %s", name, why.text);
    }
    text__json_free(&json);
    return good;
}
