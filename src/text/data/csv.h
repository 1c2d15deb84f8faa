// .csv and .tsv: RFC 4180 with a header. Every row is a record whose values are strings.
//
// Quotes have a meaning at the start of a field only. Line ends are LF, CRLF or CR; empty lines are
// skipped. A field is text as it stands: neither "NA" nor an empty field is turned into null.

typedef struct qlora__text_csv {
    char separator;
    qlora_text_bytes row;  // the fields of a row, each with a zero byte after it
    qlora_text_ids places; // where each starts in the row, and where it ends
    qlora_text_bytes names;
    qlora_text_ids name_places;
    size_t columns;
} qlora__text_csv;

static void qlora__text_csv_close(qlora__env* env, qlora__text_source* source) {
    qlora__text_csv* csv = (qlora__text_csv*)source->state;
    if (csv != NULL) {
        qlora__text_bytes_free(env, &csv->row);
        qlora__text_bytes_free(env, &csv->names);
        qlora__text_ids_free(env, &csv->places);
        qlora__text_ids_free(env, &csv->name_places);
        qlora__env_free(env, csv, sizeof *csv);
        source->state = NULL;
    }
}

// Adds text[from..to) to the field that is being read.
static qlora_result qlora__text_csv_put(qlora__env* env, qlora__text_csv* csv, const char* text,
                                        size_t from, size_t to) {
    if (csv->row.count + (to - from) >= INT32_MAX) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "a row is limited to 2 GiB");
    }
    return qlora__text_bytes_add(env, &csv->row, text + from, to - from);
}

// A field in quotes; *at is on the quote. Afterwards *at is behind the closing one, or *cut is set:
// the text ends before.
static qlora_result qlora__text_csv_quoted(qlora__env* env, qlora__text_csv* csv, const char* text,
                                           size_t size, size_t* at, bool ended, bool* cut) {
    size_t from = *at + 1;
    for (;;) {
        const char* quote = from < size ? (const char*)memchr(text + from, '"', size - from) : NULL;
        size_t to = quote != NULL ? (size_t)(quote - text) : size;
        *cut = quote == NULL || (to + 1 == size && !ended);
        if (*cut) {
            return QLORA_OK;
        }
        QLORA__TRY(qlora__text_csv_put(env, csv, text, from, to));
        if (to + 1 == size || text[to + 1] != '"') {
            *at = to + 1;
            return QLORA_OK;
        }
        QLORA__TRY(qlora__text_csv_put(env, csv, text, to, to + 1));
        from = to + 2;
    }
}

enum { QLORA__TEXT_CSV_CUT = 0, QLORA__TEXT_CSV_ROW, QLORA__TEXT_CSV_STRAY, QLORA__TEXT_CSV_OPEN };

// Splits the row at the start of a text into csv->row; *used is its size with the line end. The
// state says whether it is whole: CUT means that more text is needed, STRAY that something follows
// a closing quote at *used, OPEN that the closing quote of the field at *used is missing.
static qlora_result qlora__text_csv_split(qlora__env* env, qlora__text_csv* csv, const char* text,
                                          size_t size, bool ended, size_t* used, int* state) {
    csv->row.count = 0;
    csv->places.count = 0;
    *state = QLORA__TEXT_CSV_CUT;
    for (size_t at = 0;;) {
        size_t begin = csv->row.count;
        *used = at;
        if (at < size && text[at] == '"') {
            bool cut = false;
            QLORA__TRY(qlora__text_csv_quoted(env, csv, text, size, &at, ended, &cut));
            if (cut) {
                *state = ended ? QLORA__TEXT_CSV_OPEN : QLORA__TEXT_CSV_CUT;
                return QLORA_OK;
            }
        } else {
            size_t from = at;
            while (at < size && text[at] != csv->separator && text[at] != '\n' &&
                   text[at] != '\r') {
                at++;
            }
            QLORA__TRY(qlora__text_csv_put(env, csv, text, from, at));
        }
        if ((at == size || (text[at] == '\r' && at + 1 == size)) && !ended) {
            return QLORA_OK;
        }
        QLORA__TRY(qlora__text_ids_add(env, &csv->places, (int32_t)begin));
        QLORA__TRY(qlora__text_ids_add(env, &csv->places, (int32_t)csv->row.count));
        QLORA__TRY(qlora__text_bytes_add(env, &csv->row, "", 1));
        if (at < size && text[at] == csv->separator) {
            at++;
            continue;
        }
        *used = at;
        bool line = at == size || text[at] == '\n' || text[at] == '\r';
        *state = line ? QLORA__TEXT_CSV_ROW : QLORA__TEXT_CSV_STRAY;
        *used += at < size && line ? 1 : 0;
        *used += at + 1 < size && text[at] == '\r' && text[at + 1] == '\n' ? 1 : 0;
        return QLORA_OK;
    }
}

// How many line ends of any kind there are.
static size_t qlora__text_csv_lines(const char* text, size_t size) {
    size_t lines = 0;
    for (size_t i = 0; i < size; i++) {
        lines += text[i] == '\n' || (text[i] == '\r' && (i + 1 == size || text[i + 1] != '\n'));
    }
    return lines;
}

static qlora_result qlora__text_csv_utf8(qlora__env* env, const qlora__text_csv* csv) {
    size_t at = 0;
    while (at < csv->row.count) {
        uint32_t code = 0;
        const unsigned char* p = (const unsigned char*)csv->row.data + at;
        size_t length = *p < 0x80 ? 1 : qlora__text_utf8(p, csv->row.count - at, &code);
        if (length == 0) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT, "not UTF-8");
        }
        at += length;
    }
    return QLORA_OK;
}

// Reads the next row that is not empty; *more = false after the last. After a fault in it, the next
// call reads the row after it, or nothing if its end is not known.
static qlora_result qlora__text_csv_row(qlora__env* env, qlora__text_source* source, bool* more) {
    qlora__text_csv* csv = (qlora__text_csv*)source->state;
    qlora__text_input* input = &source->input;
    for (;;) {
        size_t used = 0;
        int state = QLORA__TEXT_CSV_CUT;
        const char* text = input->data + input->at;
        size_t size = input->count - input->at;
        *more = size > 0;
        if (size == 0 && input->ended) {
            return QLORA_OK;
        }
        QLORA__TRY(qlora__text_csv_split(env, csv, text, size, input->ended, &used, &state));
        if (state == QLORA__TEXT_CSV_CUT) {
            QLORA__TRY(qlora__text_input_more(env, input));
            continue;
        }
        qlora__text_source_mark(source, used);
        size_t lines = qlora__text_csv_lines(text, used);
        if (state != QLORA__TEXT_CSV_ROW) {
            bool open = state == QLORA__TEXT_CSV_OPEN;
            source->lost = true;
            return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s:%lu: %s", source->loader->name,
                                   (unsigned long)(source->line + lines),
                                   open ? "a field has no closing quote"
                                        : "text after the closing quote of a field");
        }
        input->at += used;
        source->at_line += lines;
        if (csv->places.count == 2 && csv->row.count == 1 && used > 0 && text[0] != '"') {
            continue; // an empty line
        }
        qlora_result r = qlora__text_csv_utf8(env, csv);
        return r == QLORA_OK ? r
                             : qlora__env_wrap(env, r, "%s:%lu: ", source->loader->name,
                                               (unsigned long)source->line);
    }
}

// ---- the header

static const char* qlora__text_csv_name(const qlora__text_csv* csv, size_t column) {
    return csv->names.data + csv->name_places.data[2 * column];
}

// The names of the columns, as they are read. One without a name is called "Unnamed: N", as in
// pandas.
static qlora_result qlora__text_csv_header(qlora__env* env, qlora__text_source* source) {
    qlora__text_csv* csv = (qlora__text_csv*)source->state;
    bool more = false;
    QLORA__TRY(qlora__text_input_skip_mark(env, &source->input));
    QLORA__TRY(qlora__text_csv_row(env, source, &more));
    size_t columns = more ? csv->places.count / 2 : 0;
    for (size_t i = 0; i < columns; i++) {
        char unnamed[32];
        char room[64];
        const char* name = csv->row.data + csv->places.data[2 * i];
        size_t length = (size_t)(csv->places.data[2 * i + 1] - csv->places.data[2 * i]);
        if (strlen(name) != length) { // what is behind it would be lost
            return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                   "%s:%lu: the name of column %lu has a zero byte",
                                   source->loader->name, (unsigned long)source->line,
                                   (unsigned long)i + 1);
        }
        snprintf(unnamed, sizeof unnamed, "Unnamed: %lu", (unsigned long)i);
        name = qlora__text_column_name(source->loader, name[0] != 0 ? name : unnamed, room);
        for (size_t k = 0; k < i; k++) {
            if (strcmp(qlora__text_csv_name(csv, k), name) == 0) {
                return qlora__env_fail(env, QLORA_ERR_FORMAT,
                                       "%s:%lu: the header has two columns \"%.60s\"",
                                       source->loader->name, (unsigned long)source->line, name);
            }
        }
        size_t size = strlen(name);
        QLORA__TRY(qlora__text_ids_add(env, &csv->name_places, (int32_t)csv->names.count));
        QLORA__TRY(qlora__text_bytes_add(env, &csv->names, name, size + 1));
        QLORA__TRY(qlora__text_ids_add(env, &csv->name_places, (int32_t)csv->names.count - 1));
    }
    csv->columns = columns;
    source->headed = true;
    return columns > 0 ? qlora__text_columns_check(env, source->loader) : QLORA_OK;
}

// ---- records

static void qlora__text_csv_token(qlora__json_token* token, qlora__json_kind kind, size_t begin,
                                  size_t end, size_t next) {
    token->kind = (uint32_t)kind & 7u;
    token->begin = (uint32_t)begin;
    token->end = (uint32_t)end;
    token->next = (uint32_t)next;
    token->count = 0;
}

// The row as an object. Names and fields are in one memory, the row's.
static qlora_result qlora__text_csv_record(qlora__env* env, qlora__text_source* source) {
    qlora__text_csv* csv = (qlora__text_csv*)source->state;
    qlora__json* json = &source->json;
    size_t fields = csv->places.count / 2;
    uint32_t count = (uint32_t)(1 + 2 * csv->columns);
    if (fields != csv->columns) {
        return qlora__env_fail(
            env, QLORA_ERR_FORMAT, "%s:%lu: the row has %lu field%s, the header %lu",
            source->loader->name, (unsigned long)source->line, (unsigned long)fields,
            fields == 1 ? "" : "s", (unsigned long)csv->columns);
    }
    if (json->capacity < count) {
        qlora__json_token* tokens = (qlora__json_token*)qlora__env_realloc(
            env, json->tokens, 0, json->capacity * sizeof *tokens, count * sizeof *tokens);
        if (tokens == NULL) {
            return QLORA_ERR_MEMORY;
        }
        json->tokens = tokens;
        json->capacity = count;
    }
    size_t names = csv->row.count;
    QLORA__TRY(qlora__text_csv_put(env, csv, csv->names.data, 0, csv->names.count));
    json->label = source->loader->name;
    json->text = csv->row.data;
    json->strings = csv->row.data;
    json->size = (uint32_t)csv->row.count;
    json->count = count;
    qlora__text_csv_token(&json->tokens[0], QLORA__JSON_OBJECT, 0, csv->row.count, count);
    json->tokens[0].count = (uint32_t)csv->columns & QLORA__JSON_MAX_COUNT;
    for (size_t i = 0; i < csv->columns; i++) {
        const int32_t* name = &csv->name_places.data[2 * i];
        const int32_t* field = &csv->places.data[2 * i];
        qlora__text_csv_token(&json->tokens[1 + 2 * i], QLORA__JSON_STRING, names + (size_t)name[0],
                              names + (size_t)name[1], 2 + 2 * i);
        qlora__text_csv_token(&json->tokens[2 + 2 * i], QLORA__JSON_STRING, (size_t)field[0],
                              (size_t)field[1], 3 + 2 * i);
    }
    return QLORA_OK;
}

static qlora_result qlora__text_csv_next(qlora__env* env, qlora__text_source* source, bool* more) {
    QLORA__TRY(qlora__text_csv_row(env, source, more));
    return *more ? qlora__text_csv_record(env, source) : QLORA_OK;
}

static qlora_result qlora__text_csv_again(qlora__env* env, qlora__text_source* source,
                                          const char* text, size_t size) {
    size_t used = 0;
    int state = QLORA__TEXT_CSV_CUT;
    QLORA__TRY(qlora__text_csv_split(env, (qlora__text_csv*)source->state, text, size, true, &used,
                                     &state));
    return qlora__text_csv_record(env, source);
}

static qlora_result qlora__text_separated_open(qlora__env* env, qlora__text_source* source,
                                               char separator) {
    qlora__text_csv* csv = (qlora__text_csv*)qlora__text_zalloc(env, 1, sizeof *csv);
    if (csv == NULL) {
        return QLORA_ERR_MEMORY;
    }
    csv->separator = separator;
    source->state = csv;
    source->next = qlora__text_csv_next;
    source->again = qlora__text_csv_again;
    source->close = qlora__text_csv_close;
    QLORA__TRY(qlora__text_input_open(env, &source->input));
    return qlora__text_csv_header(env, source);
}

static qlora_result qlora__text_csv_open(qlora__env* env, qlora__text_source* source) {
    return qlora__text_separated_open(env, source, ',');
}

static qlora_result qlora__text_tsv_open(qlora__env* env, qlora__text_source* source) {
    return qlora__text_separated_open(env, source, '\t');
}
