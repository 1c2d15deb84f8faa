// JSON files as a source of records: one per line, or the elements of one array, which may be the
// value of "data" in an object.

enum {
    QLORA__TEXT_JSON_START = 0,
    QLORA__TEXT_JSON_LINES,
    QLORA__TEXT_JSON_OBJECT, // at the start of {"data": [...]}
    QLORA__TEXT_JSON_FIRST,
    QLORA__TEXT_JSON_REST,
    QLORA__TEXT_JSON_OVER
};

// The end of a JSON value, judged by brackets and quotes only: that of an element of an array, or,
// with `object`, of the object that starts at `at`. A string ends with its line at the latest.
static size_t qlora__text_value_end(const char* text, size_t size, size_t at, bool object) {
    size_t depth = 0;
    bool quoted = false;
    for (; at < size; at++) {
        char c = text[at];
        if (quoted) {
            at += c == '\\' ? 1 : 0;
            quoted = c != '"' && c != '\n';
        } else if (c == '"') {
            quoted = true;
        } else if (c == '{' || c == '[') {
            depth++;
        } else if (c == '}' || c == ']') {
            if (depth == 0) {
                return at;
            }
            depth--;
            if (object && depth == 0) {
                return at + 1;
            }
        } else if (c == ',' && depth == 0) {
            return at;
        }
    }
    return size;
}

// Whether a value that cannot be parsed is at fault within these bytes, and not just longer than
// they are: it ends in them, a string contains a line end, or a value follows another without a
// comma, as after a record that lacks its last bracket.
static bool qlora__text_value_faulty(const char* text, size_t size) {
    size_t depth = 0;
    char before = ':'; // the last character that is not a space
    for (size_t at = 0; at < size; at++) {
        char c = text[at];
        if (qlora__text_is_space(c)) {
            continue;
        }
        bool opens = c == '{' || c == '[' || c == '"';
        if (opens && strchr(":,[{", before) == NULL) {
            return true;
        }
        if (c == '"') {
            for (at++; at < size && text[at] != '"' && text[at] != '\n'; at++) {
                at += text[at] == '\\' ? 1 : 0;
            }
            if (at < size && text[at] == '\n') {
                return true;
            }
        }
        depth += c == '{' || c == '[' ? 1 : 0;
        bool closes = c == '}' || c == ']';
        if (closes && depth <= 1) {
            return true;
        }
        depth -= closes ? 1 : 0;
        before = c;
    }
    return false;
}

// Whether the next line with anything in it starts with a record. `end` is the end of a line.
static bool qlora__text_record_follows(const char* text, size_t size, size_t end) {
    while (end < size && qlora__text_is_space(text[end])) {
        end++;
    }
    return end < size && text[end] == '{' && end > 0 && text[end - 1] == '\n';
}

// The size of the line at the start of a text, without its end; `size` if it has none.
static size_t qlora__text_line_size(const char* text, size_t size) {
    const char* newline = size > 0 ? (const char*)memchr(text, '\n', size) : NULL;
    return newline != NULL ? (size_t)(newline - text) : size;
}

static size_t qlora__text_skip_blank(const char* text, size_t size, size_t at) {
    while (at < size && qlora__text_is_space(text[at])) {
        at++;
    }
    return at;
}

// Whether a record may have a value of this name that is used, in the file's own spelling.
static bool qlora__text_json_uses(const qlora__text_loader* loader, const char* name) {
    for (size_t i = 0; i < loader->column_count; i++) {
        if (strcmp(loader->columns[i].from, name) == 0) {
            return true;
        }
    }
    return qlora__text_name_known(name) != NULL;
}

// Whether an object, of which the start is given, is a list of records: its "data" is an array of
// objects, and no name before that is one of a record.
static bool qlora__text_json_lists(const qlora__text_loader* loader, const char* text,
                                   size_t size) {
    for (size_t at = 1;;) {
        char name[64];
        size_t begin = qlora__text_skip_blank(text, size, at) + 1;
        size_t end = begin;
        while (end < size && text[end] != '"' && text[end] != '\\' && text[end] != '\n') {
            end++;
        }
        at = qlora__text_skip_blank(text, size, end + 1);
        if (begin > size || text[begin - 1] != '"' || at >= size || text[end] != '"' ||
            text[at] != ':' || end - begin >= sizeof name) {
            return false;
        }
        memcpy(name, text + begin, end - begin);
        name[end - begin] = 0;
        at = qlora__text_skip_blank(text, size, at + 1);
        if (strcmp(name, "data") == 0) {
            size_t first = qlora__text_skip_blank(text, size, at + 1);
            return first < size && text[at] == '[' && text[first] == '{';
        }
        at = qlora__text_value_end(text, size, at, false);
        if (qlora__text_json_uses(loader, name) || at >= size || text[at] != ',') {
            return false;
        }
        at++;
    }
}

static void qlora__text_json_point(qlora__text_source* source) {
    qlora__json* json = &source->json;
    size_t left = source->input.count - source->input.at;
    json->label = source->loader->name;
    json->text = left > 0 ? source->input.data + source->input.at : "";
    // the limit is that of one record, not of the file
    json->size = left < QLORA__JSON_MAX_BYTES ? (uint32_t)left : QLORA__JSON_MAX_BYTES;
    json->line = (uint32_t)(source->at_line - 1);
    json->column = (uint32_t)source->at_column;
    source->strings = 0;
}

// A fault at the next byte of the file.
static qlora_result qlora__text_json_fault(qlora__env* env, qlora__text_source* source,
                                           const char* what) {
    qlora__json_parser p;
    qlora__text_json_point(source);
    memset(&p, 0, sizeof p);
    p.env = env;
    p.json = &source->json;
    source->line = source->at_line;
    return qlora__json_bad(&p, what);
}

// Moves on to what follows a record that cannot be parsed.
static qlora_result qlora__text_json_recover(qlora__env* env, qlora__text_source* source) {
    qlora__text_input* input = &source->input;
    for (;;) {
        const char* text = input->data + input->at;
        size_t size = input->count - input->at;
        size_t end = qlora__text_line_size(text, size);
        if (source->stage != QLORA__TEXT_JSON_LINES) {
            end = qlora__text_value_end(text, size, 0, false);
            end += end < size && text[end] == '}' ? 1u : 0u; // closes nothing, and must be passed
        } else if (size > 0 && text[0] == '{') {
            size_t close = qlora__text_value_end(text, size, 0, true);
            if (close > end && !qlora__text_record_follows(text, size, end)) {
                end = close + qlora__text_line_size(text + close, size - close);
            }
        }
        if (end < size || input->ended) {
            source->lost = end == size && source->stage != QLORA__TEXT_JSON_LINES;
            qlora__text_source_pass(source, end);
            return QLORA_OK;
        }
        QLORA__TRY(qlora__text_input_more(env, input));
    }
}

// Parses the value at the next byte. One that cannot be parsed may span several lines, so its end
// is looked for in the next line: if a record starts there, the fault is reported where it is.
static qlora_result qlora__text_json_value(qlora__env* env, qlora__text_source* source,
                                           uint32_t* end) {
    qlora__json* json = &source->json;
    qlora__text_input* input = &source->input;
    bool alone = source->stage == QLORA__TEXT_JSON_LINES;
    qlora_result r;
    for (;;) {
        qlora__text_json_point(source);
        // an object that is longer than a window may be a list of records: they are read singly
        if (alone && !input->ended && json->size >= QLORA__TEXT_INPUT_STEP &&
            json->text[0] == '{' &&
            qlora__text_json_lists(source->loader, json->text, json->size) &&
            qlora__text_value_end(json->text, json->size, 0, true) == json->size) {
            source->stage = QLORA__TEXT_JSON_OBJECT;
            return QLORA_OK;
        }
        r = qlora__json_parse_one(env, json, alone, end);
        bool long_enough = r == QLORA_OK ? *end < json->size : json->size == QLORA__JSON_MAX_BYTES;
        if (input->ended || long_enough || (r != QLORA_OK && r != QLORA_ERR_FORMAT) ||
            (r == QLORA_ERR_FORMAT && qlora__text_value_faulty(json->text, json->size))) {
            break;
        }
        QLORA__TRY(qlora__text_input_more(env, input));
    }
    if (r == QLORA_OK) {
        return qlora__json_decode(env, json);
    }
    size_t line = qlora__text_line_size(json->text, json->size);
    size_t next = line;
    while (next < json->size && qlora__text_is_space(json->text[next])) {
        next++;
    }
    bool starts = next == json->size || (json->text[next] == '{' && json->text[next - 1] == '\n');
    if (alone && r == QLORA_ERR_FORMAT && line < json->size && starts) {
        json->size = (uint32_t)line;
        qlora_result shorter = qlora__json_parse_one(env, json, true, end);
        r = shorter == QLORA_OK ? r : shorter; // unreachable: the whole was not valid
    }
    return r;
}

// Passes one character that must be there.
static qlora_result qlora__text_json_expect(qlora__env* env, qlora__text_source* source, char c,
                                            const char* fault) {
    qlora__text_input* input = &source->input;
    QLORA__TRY(qlora__text_source_skip_space(env, source));
    if (input->at == input->count || input->data[input->at] != c) {
        return qlora__text_json_fault(env, source, fault);
    }
    qlora__text_source_pass(source, 1);
    return qlora__text_source_skip_space(env, source);
}

// Reads one member of the object around the list of records, or, if it is "data", up to its first
// record; *inside is then set. The name is listed: it has no effect. One that would make the object
// a record is refused; it follows "data", and the records before it have been read already.
static qlora_result qlora__text_json_member(qlora__env* env, qlora__text_source* source) {
    qlora__json* json = &source->json;
    qlora__text_loader* loader = source->loader;
    uint32_t end = 0;
    QLORA__TRY(qlora__text_json_value(env, source, &end));
    if (json->tokens[0].kind != QLORA__JSON_STRING) {
        return qlora__text_json_fault(env, source, "expected a string");
    }
    const char* name = qlora__text_json_text(json, json->tokens);
    bool data = strcmp(name, "data") == 0;
    if (data || qlora__text_json_uses(loader, name)) {
        if (!data || source->stage != QLORA__TEXT_JSON_OBJECT) {
            source->line = source->at_line;
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "%s:%lu: \"%.60s\" beside \"data\", which is a list of records",
                                   loader->name, (unsigned long)source->line, name);
        }
        qlora__text_source_pass(source, end);
        QLORA__TRY(qlora__text_json_expect(env, source, ':', "expected ':'"));
        source->inside = true;
        source->stage = QLORA__TEXT_JSON_FIRST;
        return qlora__text_json_expect(env, source, '[', "expected '['");
    }
    QLORA__TRY(qlora__text_ignore(env, loader->data, "", name));
    qlora__text_source_pass(source, end);
    QLORA__TRY(qlora__text_json_expect(env, source, ':', "expected ':'"));
    QLORA__TRY(qlora__text_json_value(env, source, &end));
    qlora__text_source_pass(source, end);
    return qlora__text_source_skip_space(env, source);
}

// The object around the list, from its start to the first record.
static qlora_result qlora__text_json_enter(qlora__env* env, qlora__text_source* source) {
    source->lost = true; // a fault in it leaves nothing that could be read
    QLORA__TRY(qlora__text_json_expect(env, source, '{', "expected '{'"));
    QLORA__TRY(qlora__text_json_member(env, source));
    while (!source->inside) {
        QLORA__TRY(qlora__text_json_expect(env, source, ',', "expected ',' or '}'"));
        QLORA__TRY(qlora__text_json_member(env, source));
    }
    source->lost = false;
    return QLORA_OK;
}

// The object from the end of the list on. Its line must end with it.
static qlora_result qlora__text_json_leave(qlora__env* env, qlora__text_source* source) {
    qlora__text_input* input = &source->input;
    source->lost = true;
    QLORA__TRY(qlora__text_source_skip_space(env, source));
    while (input->at < input->count && input->data[input->at] == ',') {
        qlora__text_source_pass(source, 1);
        QLORA__TRY(qlora__text_source_skip_space(env, source));
        QLORA__TRY(qlora__text_json_member(env, source));
    }
    size_t line = source->at_line;
    QLORA__TRY(qlora__text_json_expect(env, source, '}', "expected ',' or '}'"));
    if (input->at < input->count && source->at_line == line) {
        return qlora__text_json_fault(env, source, "unexpected text after the value");
    }
    source->lost = false;
    source->inside = false;
    source->stage = QLORA__TEXT_JSON_LINES;
    return QLORA_OK;
}

// What comes before an element of the array: a comma. *more = false: the array ends here.
static qlora_result qlora__text_json_between(qlora__env* env, qlora__text_source* source,
                                             bool* more) {
    qlora__text_input* input = &source->input;
    bool first = source->stage == QLORA__TEXT_JSON_FIRST;
    char c = input->at < input->count ? input->data[input->at] : '\0';
    *more = true;
    if (c == ']') {
        *more = false;
        qlora__text_source_pass(source, 1);
        source->stage = QLORA__TEXT_JSON_OVER;
        if (source->inside) {
            return qlora__text_json_leave(env, source);
        }
        QLORA__TRY(qlora__text_source_skip_space(env, source));
        source->lost = true;
        return input->at < input->count
                   ? qlora__text_json_fault(env, source, "unexpected text after the value")
                   : QLORA_OK;
    }
    source->stage = QLORA__TEXT_JSON_REST;
    if (first) {
        return QLORA_OK;
    }
    if (c != ',') {
        qlora_result r = qlora__text_json_fault(env, source, "expected ',' or ']'");
        qlora_result moved = qlora__text_json_recover(env, source);
        return moved == QLORA_OK ? r : moved;
    }
    qlora__text_source_pass(source, 1);
    return qlora__text_source_skip_space(env, source);
}

// What the file is: an array, or one record per line.
static qlora_result qlora__text_json_start(qlora__env* env, qlora__text_source* source) {
    qlora__text_input* input = &source->input;
    QLORA__TRY(qlora__text_input_skip_mark(env, input));
    QLORA__TRY(qlora__text_source_skip_space(env, source));
    bool array = input->at < input->count && input->data[input->at] == '[';
    source->stage = array ? QLORA__TEXT_JSON_FIRST : QLORA__TEXT_JSON_LINES;
    if (array) {
        qlora__text_source_pass(source, 1);
    }
    return QLORA_OK;
}

// Reads the value of the next record. *more = false: there is none, or it is in the list that the
// value turned out to be; source->stage tells.
static qlora_result qlora__text_json_try(qlora__env* env, qlora__text_source* source, bool* more) {
    qlora__text_input* input = &source->input;
    uint32_t end = 0;
    QLORA__TRY(qlora__text_source_skip_space(env, source));
    if (source->stage == QLORA__TEXT_JSON_LINES) {
        *more = input->at < input->count;
        source->stage = *more ? source->stage : (int)QLORA__TEXT_JSON_OVER;
    } else {
        QLORA__TRY(qlora__text_json_between(env, source, more));
    }
    if (!*more) {
        return QLORA_OK;
    }
    qlora_result r = qlora__text_json_value(env, source, &end);
    if (source->stage == QLORA__TEXT_JSON_OBJECT) {
        *more = false;
        return r == QLORA_OK ? qlora__text_json_enter(env, source) : r;
    }
    qlora__text_source_mark(source, end);
    if (r == QLORA_OK) {
        qlora__text_source_pass(source, end);
        return qlora__text_columns_apply(env, source, 0);
    }
    if (r == QLORA_ERR_FORMAT) {
        qlora_result moved = qlora__text_json_recover(env, source);
        r = moved == QLORA_OK ? r : moved;
    }
    return r;
}

static qlora_result qlora__text_json_next_record(qlora__env* env, qlora__text_source* source,
                                                 bool* more) {
    *more = false;
    if (source->stage == QLORA__TEXT_JSON_START) {
        QLORA__TRY(qlora__text_json_start(env, source));
    }
    while (!*more && source->stage != QLORA__TEXT_JSON_OVER) {
        QLORA__TRY(qlora__text_json_try(env, source, more));
    }
    return QLORA_OK;
}

static qlora_result qlora__text_json_again(qlora__env* env, qlora__text_source* source,
                                           const char* text, size_t size) {
    qlora__json* json = &source->json;
    uint32_t end = 0;
    json->label = source->loader->name;
    json->text = text;
    json->size = (uint32_t)size;
    json->line = (uint32_t)(source->line - 1);
    json->column = 0;
    source->strings = 0;
    QLORA__TRY(qlora__json_parse_one(env, json, false, &end));
    QLORA__TRY(qlora__json_decode(env, json));
    return qlora__text_columns_apply(env, source, 0);
}

static qlora_result qlora__text_json_open(qlora__env* env, qlora__text_source* source) {
    source->next = qlora__text_json_next_record;
    source->again = qlora__text_json_again;
    return qlora__text_input_open(env, &source->input);
}
