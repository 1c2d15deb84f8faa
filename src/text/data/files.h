// Training files: what kind of file it is, reading it, reading single samples again.

// ---- records

static void qlora__text_data_rewind(qlora_text_data* data, size_t count) {
    data->count = count;
    data->ids.count = 0;
    data->labels.count = 0;
}

// Whether an error is one of the record, which desc.bad is told about, so that reading goes on.
static bool qlora__text_data_bad(qlora__env* env, qlora__text_loader* loader, qlora_result r,
                                 size_t line) {
    const qlora_text_data_desc* desc = loader->desc;
    bool record = r == QLORA_ERR_FORMAT || r == QLORA_ERR_UNSUPPORTED;
    if (!record || desc->bad == NULL || !desc->bad(desc->bad_user, line, env->error)) {
        return false;
    }
    loader->bad++;
    env->error[0] = 0;
    return true;
}

// One record. What it has left behind when it fails is removed.
static qlora_result qlora__text_data_record(qlora__env* env, qlora__text_loader* loader,
                                            const qlora__json_token* record, size_t line) {
    size_t before = loader->data->count;
    qlora_result r = qlora__text_record_take(env, loader, record, line);
    if (r != QLORA_OK) {
        qlora__text_data_rewind(loader->data, before);
    }
    return r != QLORA_OK && qlora__text_data_bad(env, loader, r, line) ? QLORA_OK : r;
}

// How many lines end in these bytes.
static size_t qlora__text_lines(const char* text, size_t size) {
    size_t lines = 0;
    const char* p = text;
    const char* end = text + size;
    while (p < end && (p = (const char*)memchr(p, '\n', (size_t)(end - p))) != NULL) {
        lines++;
        p++;
    }
    return lines;
}

// {"data": [record, ...]}: the array, or NULL if this is an ordinary record.
static const qlora__json_token* qlora__text_data_inside(const qlora__text_loader* loader,
                                                        const qlora__json_token* record) {
    const qlora__json_token* list = qlora__text_json_get(loader->json, record, "data");
    if (list == NULL || list->kind != QLORA__JSON_ARRAY || list->count == 0 ||
        list[1].kind != QLORA__JSON_OBJECT) {
        return NULL;
    }
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__text_forms); i++) {
        if (qlora__text_form_fits(loader, record, &qlora__text_forms[i])) {
            return NULL;
        }
    }
    return list;
}

// Where the record is that is being read; `text` is its bytes.
static void qlora__text_data_place(qlora_text_data* data, uint64_t place, const char* text,
                                   uint64_t size) {
    data->place = place;
    data->size = (uint32_t)size;
    data->part = 0;
    data->placed = data->loader != NULL && size <= UINT32_MAX;
    if (data->placed && !data->again) {
        data->hash = qlora__text_hash(text, (size_t)size);
    }
}

// The records of an array inside the object that was read.
static qlora_result qlora__text_data_elements(qlora__env* env, qlora__text_source* source,
                                              uint32_t array) {
    static const qlora__text_form outer = {"", "data", NULL, QLORA__TEXT_R_TEXT};
    const qlora__json* json = &source->json;
    size_t line = source->line;
    size_t seen = 0;
    uint32_t record = array + 1;
    QLORA__TRY(qlora__text_record_names(env, source->loader, json->tokens, &outer));
    for (uint32_t i = 0; i < json->tokens[array].count; i++) {
        const qlora__json_token* token = &json->tokens[record];
        size_t at = token->kind == QLORA__JSON_STRING ? seen : token->begin;
        line += qlora__text_lines(json->text + seen, at - seen);
        seen = at;
        if (token->kind == QLORA__JSON_OBJECT) { // anything else is refused
            qlora__text_data_place(source->loader->data, source->place + token->begin,
                                   json->text + token->begin, token->end - token->begin);
        }
        QLORA__TRY(qlora__text_columns_apply(env, source, record));
        QLORA__TRY(qlora__text_data_record(env, source->loader, &json->tokens[record], line));
        record = json->tokens[record].next;
    }
    return QLORA_OK;
}

// Makes the samples of what a source has read.
static qlora_result qlora__text_data_take(qlora__env* env, qlora__text_source* source) {
    qlora__text_loader* loader = source->loader;
    qlora_text_data* data = loader->data;
    if (source->document != NULL) {
        return data->again ? qlora__text_document_again(env, source)
                           : qlora__text_document_take(env, source);
    }
    const qlora__text_input* input = &source->input;
    const char* text =
        data->again || input->data == NULL ? NULL : input->data + (source->place - input->base);
    qlora__text_data_place(data, source->place, text, source->size);
    loader->json = &source->json;
    // a record of a list is not itself one, also when it is read again
    const qlora__json_token* list =
        data->again || source->inside ? NULL : qlora__text_data_inside(loader, source->json.tokens);
    return list != NULL
               ? qlora__text_data_elements(env, source, (uint32_t)(list - source->json.tokens))
               : qlora__text_data_record(env, loader, source->json.tokens, source->line);
}

static qlora_result qlora__text_data_take_all(qlora__env* env, qlora__text_source* source) {
    qlora__text_loader* loader = source->loader;
    for (;;) {
        bool more = false;
        qlora_result r = source->next(env, source, &more);
        if (r == QLORA_OK && !more) {
            return QLORA_OK;
        }
        if (r == QLORA_OK) {
            QLORA__TRY(qlora__text_data_take(env, source));
            continue;
        }
        if (source->skip && !source->begins) { // what was read of the document does not count
            qlora__text_data_rewind(loader->data, loader->document_count);
        }
        if (!qlora__text_data_bad(env, loader, r, source->line)) {
            return r;
        }
        if (source->lost) {
            return QLORA_OK;
        }
    }
}

// ---- streams

// Whether a file that has just been opened can be read anywhere: a pipe cannot.
static bool qlora__text_stream_seeks(qlora__env* env, const qlora__text_input* input) {
    char byte;
    return env->files.read_at(input->file, &byte, 1, 0, env->files.user) >= 0;
}

static qlora_result qlora__text_stream_changed(qlora__env* env, const qlora_text_data* data,
                                               const qlora__text_record* record) {
    return qlora__env_fail(env, QLORA_ERR_FILE, "%s:%llu: the file has changed since it was opened",
                           data->loader->name, (unsigned long long)record->line);
}

// Reads the bytes of a record from a file that is open. Fewer come if the file has become shorter.
static qlora_result qlora__text_stream_fill(qlora__env* env, qlora_text_data* data, void* file,
                                            const qlora__text_record* record) {
    qlora_text_bytes* bytes = &data->bytes;
    bytes->count = 0;
    QLORA__TRY(qlora__text_bytes_room(env, bytes, (size_t)record->size + 1));
    while (bytes->count < record->size) {
        size_t left = record->size - bytes->count;
        int64_t got = env->files.read_at(file, bytes->data + bytes->count, left,
                                         record->place + bytes->count, env->files.user);
        if (got < 0 || (uint64_t)got > left) {
            int code = got < 0 ? (int)-got : EIO;
            return qlora__env_fail(env, QLORA_ERR_FILE, "cannot read %s: %s (%d)",
                                   data->loader->name, qlora__errno_text(code), code);
        }
        if (got == 0) {
            return QLORA_OK;
        }
        bytes->count += (size_t)got;
    }
    return QLORA_OK;
}

// Reads the bytes of a record. The file is read, not mapped: another process may make it shorter,
// and a map that then lacks its pages ends the process. It is opened for each record, because
// thousands of streams may be open, but not thousands of files.
static qlora_result qlora__text_stream_bytes(qlora__env* env, qlora_text_data* data,
                                             const qlora__text_record* record) {
    const char* path = data->loader->desc->path;
    void* file = NULL;
    int code = env->files.open(path, QLORA_FILE_READ, &file, env->files.user);
    if (code != 0) {
        return qlora__env_fail(env, QLORA_ERR_FILE, "cannot read %s: %s (%d)", path,
                               qlora__errno_text(code), code);
    }
    qlora_result r = qlora__text_stream_fill(env, data, file, record);
    env->files.close(file, env->files.user); // nothing was written: a failure loses nothing
    QLORA__TRY(r);
    return data->bytes.count == record->size &&
                   qlora__text_hash(data->bytes.data, record->size) == record->as.hash
               ? QLORA_OK
               : qlora__text_stream_changed(env, data, record);
}

// Makes the sample from its record in the file; afterwards it is in data->shown.
static qlora_result qlora__text_stream_read(qlora__env* env, qlora_text_data* data,
                                            const qlora__text_record* record) {
    qlora__text_source* source = data->loader->source;
    QLORA__TRY(qlora__text_stream_bytes(env, data, record));
    source->line = (size_t)record->line;
    data->again = true;
    data->found = false;
    data->wanted = record->part;
    data->wanted_count = record->count;
    data->begins = record->begins != 0;
    data->ends = record->ends != 0;
    qlora_result r = source->again(env, source, data->bytes.data, record->size);
    if (r == QLORA_OK) {
        source->place = record->place;
        source->size = record->size;
        r = qlora__text_data_take(env, source);
    }
    data->again = data->begins = data->ends = false;
    qlora__text_data_rewind(data, data->count);
    if (r == QLORA_OK && (!data->found || data->shown[0].count != record->count)) {
        return qlora__env_fail(env, QLORA_ERR_STATE,
                               "%s:%llu: the record gives another sample than before; has the "
                               "chat's clock been set?",
                               data->loader->name, (unsigned long long)record->line);
    }
    return r;
}

// ---- formats

typedef struct qlora__text_opener {
    const char* name; // in desc.format and, after a dot, at the end of a file name
    bool records;     // has records: desc.format may say which form they have
    qlora_result (*open)(qlora__env* env, qlora__text_source* source);
} qlora__text_opener;

// Every kind of data file.
static const qlora__text_opener qlora__text_openers[] = {
    {"jsonl", true, qlora__text_json_open},     {"ndjson", true, qlora__text_json_open},
    {"json", true, qlora__text_json_open},      {"txt", false, qlora__text_txt_open},
    {"csv", true, qlora__text_csv_open},        {"tsv", true, qlora__text_tsv_open},
    {"parquet", true, qlora__text_parquet_open}};

const char* qlora_text_data_formats(size_t index) {
    const size_t files = QLORA__TEXT_COUNT(qlora__text_openers);
    if (index < files) {
        return qlora__text_openers[index].name;
    }
    for (size_t i = 0, number = files; i < QLORA__TEXT_COUNT(qlora__text_forms); i++) {
        const char* name = qlora__text_forms[i].name;
        bool again = i > 0 && strcmp(name, qlora__text_forms[i - 1].name) == 0;
        if (!again && number++ == index) {
            return name;
        }
    }
    return NULL;
}

static char qlora__text_lower(char c) {
    return c >= 'A' && c <= 'Z' ? (char)(c - 'A' + 'a') : c;
}

// Whether the first `length` bytes of a name end in a dot and `ending`, in any case.
static bool qlora__text_ends_with(const char* name, size_t length, const char* ending) {
    size_t size = strlen(ending);
    if (length <= size || name[length - size - 1] != '.') {
        return false;
    }
    for (size_t i = 0; i < size; i++) {
        if (qlora__text_lower(name[length - size + i]) != ending[i]) {
            return false;
        }
    }
    return true;
}

// The kind of file that a name ends in, or NULL. Every kind may be inside gzip: NAME.jsonl.gz.
static const qlora__text_opener* qlora__text_opener_of(const char* name) {
    size_t length = strlen(name);
    length -= qlora__text_ends_with(name, length, "gz") ? (size_t)3 : 0;
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__text_openers); i++) {
        if (qlora__text_ends_with(name, length, qlora__text_openers[i].name)) {
            return &qlora__text_openers[i];
        }
    }
    return NULL;
}

bool qlora_text_data_known(const char* path) {
    return path != NULL && qlora__text_opener_of(path) != NULL;
}

static qlora_result qlora__text_format_fail(qlora__env* env, const qlora__text_loader* loader) {
    char names[240];
    size_t used = 0;
    const char* format = loader->desc->format;
    names[0] = 0;
    for (size_t i = 0; qlora_text_data_formats(i) != NULL && used < sizeof names; i++) {
        bool file = i < QLORA__TEXT_COUNT(qlora__text_openers);
        if (file || format != NULL) {
            int wrote = snprintf(names + used, sizeof names - used, "%s%s%s", i > 0 ? ", " : "",
                                 format == NULL ? "." : "", qlora_text_data_formats(i));
            used += wrote > 0 ? (size_t)wrote : 0;
        }
    }
    return format == NULL
               ? qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                 "%s: unknown data format; the file name must end in one of %s "
                                 "(and may end in .gz after that), or the format must be given",
                                 loader->name, names)
               : qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                                 "unknown data format \"%.60s\"; use one of %s", format, names);
}

// What the file is: desc.format if it is set, else its ending. A form of record decides only what
// the records are. Standard input ("-") is JSON.
static qlora_result qlora__text_data_format(qlora__env* env, qlora__text_loader* loader,
                                            const qlora__text_opener** out) {
    const char* format = loader->desc->format;
    bool input = strcmp(loader->desc->path, "-") == 0;
    *out = input ? &qlora__text_openers[0] : qlora__text_opener_of(loader->desc->path);
    for (size_t i = 0; format != NULL && i < QLORA__TEXT_COUNT(qlora__text_forms); i++) {
        if (strcmp(format, qlora__text_forms[i].name) == 0) {
            loader->form = qlora__text_forms[i].name;
        }
    }
    if (loader->form != NULL) {
        *out = *out != NULL && (*out)->records ? *out : &qlora__text_openers[0];
        return QLORA_OK;
    }
    if (format != NULL) {
        *out = NULL;
        for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__text_openers); i++) {
            if (strcmp(format, qlora__text_openers[i].name) == 0) {
                *out = &qlora__text_openers[i];
            }
        }
    }
    return *out != NULL ? QLORA_OK : qlora__text_format_fail(env, loader);
}

// ---- reading a file

static void qlora__text_source_free(qlora__env* env, qlora__text_source* source) {
    if (source != NULL) {
        if (source->close != NULL) {
            source->close(env, source);
        }
        qlora__text_input_close(env, &source->input);
        qlora__json_free(env, &source->json);
        qlora__env_free(env, source, sizeof *source);
    }
}

// What only reading from start to end needs.
static void qlora__text_document_free(qlora__env* env, qlora__text_loader* loader) {
    qlora__text_bytes_free(env, &loader->document);
    qlora__env_free(env, loader->slices, loader->slice_capacity * sizeof *loader->slices);
    loader->slices = NULL;
    loader->slice_capacity = 0;
}

static void qlora__text_loader_free(qlora__env* env, qlora__text_loader* loader) {
    qlora__text_document_free(env, loader);
    qlora__text_source_free(env, loader->source);
    qlora__env_free(env, loader->messages, loader->message_capacity * sizeof *loader->messages);
    qlora__text_bytes_free(env, &loader->work);
    qlora__text_ids_free(env, &loader->numbers);
    qlora__env_free(env, loader->path, loader->path_size + 1);
    qlora__env_free(env, loader->column_text, loader->column_size + 1);
    qlora__env_free(env, loader, sizeof *loader);
}

static void qlora__text_data_free(qlora__env* env, qlora_text_data* data) {
    if (data->loader != NULL) {
        data->loader->desc->chat->users--;
        qlora__text_loader_free(env, data->loader);
    }
    qlora__text_bytes_free(env, &data->bytes);
    qlora__text_ids_free(env, &data->ids);
    qlora__text_ids_free(env, &data->labels);
    qlora__text_ids_free(env, &data->shown[0]);
    qlora__text_ids_free(env, &data->shown[1]);
    qlora__text_bytes_free(env, &data->ignored);
    qlora__text_bytes_free(env, &data->lacking);
    qlora__text_bytes_free(env, &data->references);
    for (size_t i = 0; i < data->block_count; i++) {
        qlora__env_free(env, data->blocks[i].data, data->blocks[i].capacity * sizeof(int32_t));
    }
    qlora__env_free(env, data->blocks, data->block_capacity * sizeof *data->blocks);
    qlora__env_free(env, data->records, data->capacity * sizeof *data->records);
    qlora__env_free(env, data, sizeof *data);
}

// ---- columns that only some of several files have

static bool qlora__text_columns_seen(const qlora__text_loader* loader) {
    bool all = true;
    for (size_t i = 0; i < loader->column_count; i++) {
        all = all && loader->columns[i].seen;
    }
    return all;
}

// Reads records until every name in desc.columns has been seen. Faults in them are reported later,
// when they are read again.
static qlora_result qlora__text_columns_look(qlora__env* env, qlora__text_source* source,
                                             const qlora__text_opener* opener) {
    qlora__text_loader* loader = source->loader;
    bool more = true;
    QLORA__TRY(opener->open(env, source));
    while (more && !source->headed && opener->records && !qlora__text_columns_seen(loader)) {
        qlora_result r = source->next(env, source, &more);
        if (r == QLORA_OK && more) {
            loader->json = &source->json;
            const qlora__json_token* list = qlora__text_data_inside(loader, source->json.tokens);
            uint32_t record = list != NULL ? (uint32_t)(list - source->json.tokens) + 1 : 0;
            for (uint32_t left = list != NULL ? list->count : 0; left > 0; left--) {
                QLORA__TRY(qlora__text_columns_apply(env, source, record));
                record = source->json.tokens[record].next;
            }
        } else if (r != QLORA_OK && r != QLORA_ERR_FORMAT && r != QLORA_ERR_UNSUPPORTED) {
            return r;
        }
        more = more && !(r != QLORA_OK && source->lost);
    }
    return QLORA_OK;
}

// Whether the file can be read twice.
static bool qlora__text_columns_twice(qlora__env* env, const qlora__text_input* input) {
    void* file = NULL;
    if (input->path == NULL) {
        return true;
    }
    char byte;
    bool opened = env->files.open(input->path, QLORA_FILE_READ, &file, env->files.user) == 0;
    bool twice = opened && env->files.read_at(file, &byte, 1, 0, env->files.user) >= 0;
    if (opened) {
        env->files.close(file, env->files.user);
    }
    return twice;
}

// Forgets the names in desc.columns that the file does not have.
static qlora_result qlora__text_columns_reduce(qlora__env* env, qlora__text_loader* loader,
                                               const qlora__text_opener* opener) {
    size_t kept = 0;
    qlora_text_bytes* lacking = &loader->data->lacking;
    if (!loader->desc->columns_partial || loader->column_count == 0 ||
        !qlora__text_columns_twice(env, &loader->source->input)) {
        return QLORA_OK;
    }
    qlora__text_source* source = (qlora__text_source*)qlora__text_zalloc(env, 1, sizeof *source);
    if (source == NULL) {
        return QLORA_ERR_MEMORY;
    }
    source->loader = loader;
    source->input = loader->source->input;
    source->at_line = 1;
    loader->searching = true;
    qlora_result r = qlora__text_columns_look(env, source, opener);
    loader->searching = false;
    loader->data->ignored.count = 0;
    qlora__text_source_free(env, source);
    QLORA__TRY(r);
    env->error[0] = 0;
    for (size_t i = 0; i < loader->column_count; i++) {
        qlora__text_column column = loader->columns[i];
        if (column.seen) {
            column.seen = false;
            loader->columns[kept++] = column;
            continue;
        }
        QLORA__TRY(qlora__text_bytes_add(env, lacking, ", ", lacking->count > 0 ? 2 : 0));
        QLORA__TRY(qlora__text_bytes_add(env, lacking, column.from, strlen(column.from)));
    }
    loader->column_count = kept;
    return QLORA_OK;
}

// Opens the source and reads everything.
static qlora_result qlora__text_data_read(qlora__env* env, qlora__text_loader* loader) {
    const qlora__text_opener* opener = NULL;
    qlora__text_source* source = loader->source;
    qlora_text_data* data = loader->data;
    qlora_text_bytes* ignored = &data->ignored;
    QLORA__TRY(qlora__text_columns_read(env, loader));
    QLORA__TRY(qlora__text_data_format(env, loader, &opener));
    if (qlora__text_ends_with(loader->path, strlen(loader->path), "gz")) {
        source->input.unpack = qlora__text_gzip_open;
    }
    QLORA__TRY(qlora__text_columns_reduce(env, loader, opener));
    QLORA__TRY(qlora__text_bytes_add(env, &data->lacking, "", 1));
    QLORA__TRY(opener->open(env, source));
    // only bytes that are in the file as they are can be found again
    bool stream = loader->desc->stream && !qlora__text_asks(loader) && source->again != NULL &&
                  source->input.path != NULL && source->input.read == qlora__text_input_file &&
                  qlora__text_stream_seeks(env, &source->input);
    data->loader = stream ? loader : NULL;
    qlora_result r = qlora__text_data_take_all(env, source);
    if (r == QLORA_OK && data->count == 0 && loader->bad == 0) {
        r = qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: the file contains no records",
                            loader->name);
    }
    r = r == QLORA_OK ? qlora__text_columns_check(env, loader) : r;
    qlora__text_input_close(env, &source->input);
    qlora__text_document_free(env, loader);
    QLORA__TRY(r);
    qlora__text_samples_fit(env, data);
    ignored->count -= ignored->count > 0 ? 2 : 0; // the last ", "
    return qlora__text_bytes_add(env, ignored, "", 1);
}

static qlora_result qlora__text_data_need(qlora_text* text, const qlora_text_data_desc* desc,
                                          qlora_text_data** out) {
    qlora__env* env = &text->env;
    QLORA__TEXT_NEED(env, desc);
    QLORA__TEXT_NEED(env, out);
    QLORA__TEXT_NEED(env, desc->path);
    QLORA__TEXT_NEED(env, desc->chat);
    if (desc->reserved_must_be_zero0 != 0 || desc->reserved_must_be_zero1 != 0) {
        return qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                               "desc was not zeroed: a reserved field is set");
    }
    if ((int)desc->preference < 0 || desc->preference > QLORA_TEXT_JUDGED) {
        return qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                               "desc->preference is %d; it must be 0, 1 or 2",
                               (int)desc->preference);
    }
    if ((int)desc->prompts < 0 || desc->prompts > QLORA_TEXT_ASK_CHAT) {
        return qlora__env_fail(env, QLORA_ERR_ARGUMENT, "desc->prompts is %d; it must be 0, 1 or 2",
                               (int)desc->prompts);
    }
    if (desc->prompts != QLORA_TEXT_LEARN && desc->preference != QLORA_TEXT_ANSWERS) {
        return qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                               "desc->prompts and desc->preference cannot be used together");
    }
    if (desc->chat->text != text) {
        return qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                               "desc->chat belongs to another text object");
    }
    if (desc->chunk_tokens == 1) { // a sample would consist of BOS alone
        return qlora__env_fail(env, QLORA_ERR_ARGUMENT,
                               "desc->chunk_tokens is 1; it must be 0 or at least 2");
    }
    return QLORA_OK;
}

// The state of reading, which a stream keeps. `memory` is NULL for a file.
static qlora_result qlora__text_loader_make(qlora__env* env, const qlora_text_data_desc* desc,
                                            const char* memory, size_t size,
                                            qlora__text_loader** out) {
    qlora__text_loader* loader = (qlora__text_loader*)qlora__text_zalloc(env, 1, sizeof *loader);
    if (loader == NULL) {
        return QLORA_ERR_MEMORY;
    }
    *out = loader;
    QLORA__TRY(
        qlora__text_copy(env, desc->path, strlen(desc->path), &loader->path, &loader->path_size));
    loader->own = *desc;
    loader->own.path = loader->path;
    loader->desc = &loader->own;
    loader->tok = desc->chat->tok;
    loader->name = strcmp(desc->path, "-") == 0 ? "standard input" : loader->path;
    loader->source = (qlora__text_source*)qlora__text_zalloc(env, 1, sizeof *loader->source);
    loader->data = (qlora_text_data*)qlora__text_zalloc(env, 1, sizeof *loader->data);
    if (loader->source == NULL || loader->data == NULL) {
        return QLORA_ERR_MEMORY;
    }
    loader->source->loader = loader;
    loader->source->at_line = 1;
    loader->source->input.name = loader->name;
    loader->source->input.path = memory == NULL ? loader->path : NULL;
    loader->source->input.memory = memory;
    loader->source->input.memory_size = size;
    return QLORA_OK;
}

static qlora_result qlora__text_data_load(qlora_text* text, const qlora_text_data_desc* desc,
                                          const char* memory, size_t size, qlora_text_data** out) {
    qlora__env* env = &text->env;
    qlora__text_loader* loader = NULL;
    qlora_result r = qlora__text_loader_make(env, desc, memory, size, &loader);
    qlora_text_data* data = loader != NULL ? loader->data : NULL;
    if (r == QLORA_OK) {
        data->text = text;
        r = qlora__text_data_read(env, loader);
    }
    if (r == QLORA_OK) {
        QLORA__TEXT_LOG(env, INFO, "%s: %llu samples", loader->name,
                        (unsigned long long)data->count);
        if (data->ignored.data[0] != 0) {
            QLORA__TEXT_LOG(env, WARN, "%s: ignored names: %s", loader->name, data->ignored.data);
        }
    }
    bool keep = r == QLORA_OK && data->loader != NULL;
    if (keep) {
        desc->chat->users++;
        loader->own.bad = NULL; // told once
    } else {
        if (data != NULL) {
            data->loader = NULL;
        }
        if (loader != NULL) {
            qlora__text_loader_free(env, loader);
        }
    }
    if (r != QLORA_OK) {
        if (data != NULL) {
            qlora__text_data_free(env, data);
        }
        return r;
    }
    text->datas++;
    *out = data;
    return QLORA_OK;
}

qlora_result qlora_text_data_load(qlora_text* text, const qlora_text_data_desc* desc,
                                  const void* data, size_t size, qlora_text_data** out) {
    if (text == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__text_enter(text, "qlora_text_data_load");
    QLORA__TRY(qlora__text_data_need(text, desc, out));
    if (data == NULL && size > 0) {
        return qlora__env_fail(&text->env, QLORA_ERR_ARGUMENT, "data is NULL");
    }
    return qlora__text_data_load(text, desc, data != NULL ? (const char*)data : "", size, out);
}

qlora_result qlora_text_data_open(qlora_text* text, const qlora_text_data_desc* desc,
                                  qlora_text_data** out) {
    if (text == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__text_enter(text, "qlora_text_data_open");
    QLORA__TRY(qlora__text_data_need(text, desc, out));
    return qlora__text_data_load(text, desc, NULL, 0, out);
}

qlora_result qlora_text_data_close(qlora_text_data* data) {
    if (data != NULL) {
        qlora_text* text = data->text;
        qlora__text_enter(text, "qlora_text_data_close");
        text->datas--;
        qlora__text_data_free(&text->env, data);
    }
    return QLORA_OK;
}

qlora_result qlora_text_data_query(qlora_text_data* data, qlora_text_data_info* out) {
    if (data == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__text_enter(data->text, "qlora_text_data_query");
    QLORA__TEXT_NEED(&data->text->env, out);
    out->count = data->count;
    out->ignored = data->ignored.data;
    out->lacking = data->lacking.data;
    out->chat = data->any_chat;
    out->own_bos = data->own_bos;
    return QLORA_OK;
}

size_t qlora_text_data_count(const qlora_text_data* data) {
    return data != NULL ? data->count : 0;
}

qlora_result qlora_text_sample_read(qlora_text_data* data, size_t index, qlora_text_sample* out) {
    if (data == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__env* env = &data->text->env;
    qlora__text_enter(data->text, "qlora_text_sample_read");
    QLORA__TEXT_NEED(env, out);
    if (index >= data->count) {
        return qlora__env_fail(env, QLORA_ERR_ARGUMENT, "index is %llu; it must be below %llu",
                               (unsigned long long)index, (unsigned long long)data->count);
    }
    const qlora__text_record* record = &data->records[index];
    const int32_t* labels = NULL;
    if (record->kept != 0) {
        QLORA__TRY(qlora__text_sample_labels(env, data, record, &labels));
        out->ids = record->as.ids;
    } else {
        QLORA__TRY(qlora__text_stream_read(env, data, record));
        out->ids = data->shown[0].data;
        labels = data->shown[1].data;
    }
    out->labels = labels;
    out->count = record->count;
    out->trained = record->trained;
    out->line = (size_t)record->line;
    out->desirable = record->desirable != 0;
    out->continues = record->continues != 0;
    out->chat = record->chat != 0;
    out->reference = record->answered != 0 ? data->references.data + record->place : NULL;
    out->reference_size = record->answered != 0 ? record->size : 0;
    out->endless = record->endless != 0;
    return QLORA_OK;
}
