// Where records come from: the interface that every kind of data file implements.

struct qlora__text_source {
    qlora__text_loader* loader;
    qlora__text_input input;
    // Reads the next record into `json`, with its line and its place; *more = false after the last
    // one. What it points to is valid until the next call. After an error in one record, the call
    // after it goes on with the next one, unless `lost` is set.
    qlora_result (*next)(qlora__env* env, qlora__text_source* source, bool* more);
    // Reads a record again from its bytes in the file; NULL: records cannot be found again.
    qlora_result (*again)(qlora__env* env, qlora__text_source* source, const char* text,
                          size_t size);
    void (*close)(qlora__env* env, qlora__text_source* source); // frees `state`; may be NULL
    void* state;
    bool headed; // all names are known once it is open
    // the record: an object as the JSON parser leaves it, decoded strings included, or
    qlora__json json;
    const char* document; // plain text, a part of a document; then there is no `json`
    size_t document_size;
    bool begins; // it starts the document
    bool ends;
    bool skip;      // what is left of the document
    size_t line;    // where it starts
    uint64_t place; // its bytes in the file
    uint64_t size;
    bool lost; // after an error: nothing more can be read
    // bookkeeping of what was consumed
    size_t at_line;   // the line of the next byte of the input, from 1
    size_t at_column; // bytes before it in this line
    size_t strings;   // bytes in use in json.decoded; 0 = not known
    int stage;        // of a source's own
    bool inside;      // JSON: the records are those of a list in an object
};

// Moves on by `size` bytes of the input.
static void qlora__text_source_pass(qlora__text_source* source, size_t size) {
    const char* p = source->input.data + source->input.at;
    const char* end = p + size;
    const char* newline;
    while (p < end && (newline = (const char*)memchr(p, '\n', (size_t)(end - p))) != NULL) {
        source->at_line++;
        source->at_column = 0;
        p = newline + 1;
    }
    source->at_column += (size_t)(end - p);
    source->input.at += size;
}

// Notes where the record is that starts at the next byte.
static void qlora__text_source_mark(qlora__text_source* source, size_t size) {
    source->line = source->at_line;
    source->place = source->input.base + source->input.at;
    source->size = size;
}

static bool qlora__text_is_space(char c) {
    return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

static qlora_result qlora__text_source_skip_space(qlora__env* env, qlora__text_source* source) {
    qlora__text_input* input = &source->input;
    for (;;) {
        size_t size = 0;
        while (input->at + size < input->count &&
               qlora__text_is_space(input->data[input->at + size])) {
            size++;
        }
        qlora__text_source_pass(source, size);
        if (input->at < input->count || input->ended) {
            return QLORA_OK;
        }
        QLORA__TRY(qlora__text_input_more(env, input));
    }
}

// ---- columns

// Whether a record may have a value of this name that is used. Returns our own copy of it.
static const char* qlora__text_name_known(const char* name) {
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__text_forms); i++) {
        const qlora__text_form* form = &qlora__text_forms[i];
        if (strcmp(form->first, name) == 0) {
            return form->first;
        }
        if (form->second != NULL && strcmp(form->second, name) == 0) {
            return form->second;
        }
    }
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__text_extras); i++) {
        if (strcmp(qlora__text_extras[i].name, name) == 0) {
            return qlora__text_extras[i].name;
        }
    }
    return NULL;
}

static qlora_result qlora__text_columns_fail(qlora__env* env, const char* name) {
    char names[320];
    size_t used = 0;
    names[0] = 0;
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__text_forms) && used < sizeof names; i++) {
        const qlora__text_form* form = &qlora__text_forms[i];
        bool again = i > 0 && strcmp(form->first, qlora__text_forms[i - 1].first) == 0;
        if (!again) {
            int wrote = snprintf(names + used, sizeof names - used, "%s%s", used > 0 ? ", " : "",
                                 form->first);
            used += wrote > 0 ? (size_t)wrote : 0;
        }
        if (form->second != NULL && strcmp(form->second, "response") != 0) {
            int wrote = used < sizeof names
                            ? snprintf(names + used, sizeof names - used, ", %s", form->second)
                            : 0;
            used += wrote > 0 ? (size_t)wrote : 0;
        }
    }
    return qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                           "columns: \"%.60s\" is not a name of a record; use one of %s, ...", name,
                           names);
}

// Reads desc.columns, "prompt=question,completion=answer".
static qlora_result qlora__text_columns_read(qlora__env* env, qlora__text_loader* loader) {
    if (loader->desc->columns == NULL) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__text_copy(env, loader->desc->columns, strlen(loader->desc->columns),
                                &loader->column_text, &loader->column_size));
    for (char* at = loader->column_text; at != NULL;) {
        char* comma = strchr(at, ',');
        char* equals = strchr(at, '=');
        if (comma != NULL) {
            *comma = 0;
        }
        if (equals == NULL || (comma != NULL && equals > comma) || equals == at || equals[1] == 0) {
            return qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                                   "columns: \"%.60s\" is not of the form NAME=COLUMN", at);
        }
        *equals = 0;
        qlora__text_column* column = &loader->columns[loader->column_count];
        for (size_t i = 0; i < loader->column_count; i++) {
            bool to = strcmp(loader->columns[i].to, at) == 0;
            if (to || strcmp(loader->columns[i].from, equals + 1) == 0) {
                return qlora__env_fail(env, QLORA_ERR_ARGUMENT, "columns: \"%.60s\" occurs twice",
                                       to ? at : equals + 1);
            }
        }
        if (loader->column_count == QLORA__TEXT_COLUMNS) {
            return qlora__env_fail(env, QLORA_ERR_ARGUMENT, "columns: more than %d names",
                                   (int)QLORA__TEXT_COLUMNS);
        }
        column->to = qlora__text_name_known(at);
        column->from = equals + 1;
        if (column->to == NULL) {
            return qlora__text_columns_fail(env, at);
        }
        loader->column_count++;
        at = comma != NULL ? comma + 1 : NULL;
    }
    return QLORA_OK;
}

// The name under which a column of the file is read. A column that has this name in the file, but
// is not the one that desc.columns gives, must not be taken for it.
static const char* qlora__text_column_name(qlora__text_loader* loader, const char* name,
                                           char room[64]) {
    for (size_t i = 0; i < loader->column_count; i++) {
        if (strcmp(loader->columns[i].from, name) == 0) {
            loader->columns[i].seen = true;
            return loader->columns[i].to;
        }
    }
    for (size_t i = 0; i < loader->column_count; i++) {
        if (strcmp(loader->columns[i].to, name) == 0) {
            snprintf(room, 64, "%.40s (of the file)", name);
            return room;
        }
    }
    return name;
}

// Columns that no record had are refused: a misspelt name must not go unnoticed.
static qlora_result qlora__text_columns_check(qlora__env* env, const qlora__text_loader* loader) {
    for (size_t i = 0; i < loader->column_count && !loader->searching; i++) {
        if (!loader->columns[i].seen) {
            return qlora__env_fail(
                env, QLORA_ERR_FORMAT,
                "%s: no record has the column \"%.60s\", which desc.columns reads "
                "as \"%s\"",
                loader->name, loader->columns[i].from, loader->columns[i].to);
        }
    }
    return QLORA_OK;
}

// Gives the keys of a record the names that desc.columns says. Their new spelling is added to the
// decoded strings.
static qlora_result qlora__text_columns_apply(qlora__env* env, qlora__text_source* source,
                                              uint32_t record) {
    qlora__json* json = &source->json;
    char room[64];
    if (source->loader->column_count == 0 || json->tokens[record].kind != QLORA__JSON_OBJECT) {
        return QLORA_OK;
    }
    for (uint32_t i = json->count; i > 0 && source->strings == 0; i--) {
        if (json->tokens[i - 1].kind == QLORA__JSON_STRING) {
            source->strings = (size_t)json->tokens[i - 1].end + 1;
        }
    }
    uint32_t key = record + 1;
    for (uint32_t k = 0; k < json->tokens[record].count; k++) {
        const char* name = json->strings + json->tokens[key].begin;
        const char* to = qlora__text_column_name(source->loader, name, room);
        size_t size = strlen(to);
        if (to != name) {
            if (json->decoded_capacity - source->strings < size + 1) {
                size_t need = source->strings + source->strings / 4 + size + 64;
                char* grown = (char*)qlora__env_realloc(env, json->decoded, source->strings,
                                                        json->decoded_capacity, need);
                if (grown == NULL) {
                    return QLORA_ERR_MEMORY;
                }
                json->decoded = grown;
                json->strings = grown;
                json->decoded_capacity = need;
            }
            memcpy(json->decoded + source->strings, to, size + 1);
            json->tokens[key].begin = (uint32_t)source->strings;
            json->tokens[key].end = (uint32_t)(source->strings + size);
            source->strings += size + 1;
        }
        key = json->tokens[key + 1].next;
    }
    return QLORA_OK;
}
