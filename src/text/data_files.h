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

// The records of an array. `line` is the line of the first byte of json->text.
static qlora_result qlora__text_data_elements(qlora__env* env, qlora__text_loader* loader,
                                              const qlora__json_token* array, size_t line) {
    const qlora__json* json = loader->json;
    const qlora__json_token* record = array + 1;
    size_t seen = 0;
    for (uint32_t i = 0; i < array->count; i++) {
        size_t at = record->kind == QLORA__JSON_STRING ? seen : record->begin;
        line += qlora__text_lines(json->text + seen, at - seen);
        seen = at;
        QLORA__TRY(qlora__text_record_take(env, loader, record, line));
        record = qlora__text_json_next(json, record);
    }
    return QLORA_OK;
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

// A record, or an object around many of them.
static qlora_result qlora__text_data_value(qlora__env* env, qlora__text_loader* loader,
                                           size_t line) {
    static const qlora__text_form outer = {"", "data", NULL, QLORA__TEXT_R_TEXT};
    const qlora__json_token* record = loader->json->tokens;
    const qlora__json_token* list = qlora__text_data_inside(loader, record);
    if (list == NULL) {
        return qlora__text_record_take(env, loader, record, line);
    }
    QLORA__TRY(qlora__text_record_names(env, loader, record, &outer));
    return qlora__text_data_elements(env, loader, list, line);
}

// [record, record, ...]
static qlora_result qlora__text_data_array(qlora__env* env, qlora__text_loader* loader,
                                           const char* source, size_t size) {
    QLORA__TRY(qlora__text_json(env, loader->name, source, size, loader->json));
    return qlora__text_data_elements(env, loader, loader->json->tokens, 1);
}

static bool qlora__text_is_space(char c) {
    return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

// Parses the record at the start of json->text. A record may span several lines, so the end of a
// truncated one is looked for in the next line; the fault is then reported where it is.
static qlora_result qlora__text_data_parse(qlora__env* env, qlora__json* json, uint32_t* end) {
    qlora_result r = qlora__json_parse_one(env, json, true, end);
    const char* newline = (const char*)memchr(json->text, '\n', json->size);
    if (r != QLORA_ERR_FORMAT || newline == NULL) {
        return r == QLORA_OK ? qlora__json_decode(env, json) : r;
    }
    size_t line = (size_t)(newline - json->text);
    size_t next = line;
    while (next < json->size && qlora__text_is_space(json->text[next])) {
        next++;
    }
    bool starts = next == json->size || (json->text[next] == '{' && json->text[next - 1] == '\n');
    if (starts) {
        json->size = (uint32_t)line;
        r = qlora__json_parse_one(env, json, true, end);
        r = r == QLORA_OK ? QLORA_ERR_FORMAT : r; // unreachable: the whole was not valid
    }
    return r;
}

// One record per line. A record may span several lines, but a line never holds two.
static qlora_result qlora__text_data_lines(qlora__env* env, qlora__text_loader* loader,
                                           const char* source, size_t size) {
    qlora__json* json = loader->json;
    json->label = loader->name;
    size_t line = 1;
    size_t at = 0;
    for (;;) {
        size_t start = at;
        while (at < size && qlora__text_is_space(source[at])) {
            at++;
        }
        line += qlora__text_lines(source + start, at - start);
        if (at == size) {
            return QLORA_OK;
        }
        size_t left = size - at;
        uint32_t end = 0;
        json->text = source + at;
        // the limit is that of one record, not of the file
        json->size = left < QLORA__JSON_MAX_BYTES ? (uint32_t)left : QLORA__JSON_MAX_BYTES;
        json->line = (uint32_t)(line - 1);
        QLORA__TRY(qlora__text_data_parse(env, json, &end));
        QLORA__TRY(qlora__text_data_value(env, loader, line));
        line += qlora__text_lines(source + at, end);
        at += end;
    }
}

static qlora_result qlora__text_data_json(qlora__env* env, qlora__text_loader* loader,
                                          const char* source, size_t size) {
    qlora__json json;
    memset(&json, 0, sizeof(json));
    if (size >= 3 && memcmp(source, "\xEF\xBB\xBF", 3) == 0) {
        source += 3;
        size -= 3;
    }
    size_t at = 0;
    while (at < size && qlora__text_is_space(source[at])) {
        at++;
    }
    loader->json = &json;
    bool array = at < size && source[at] == '[';
    qlora_result r = array ? qlora__text_data_array(env, loader, source, size)
                           : qlora__text_data_lines(env, loader, source, size);
    qlora__json_free(env, &json);
    loader->json = NULL;
    return r;
}

// Splits the ids of one document, which start at `begin` without BOS, into samples of at most
// chunk_tokens. Without a BOS, every sample starts with the last token of the previous one, so that
// each token is a target once. The ids are moved in place, because a copy would cost as much memory
// as the samples themselves.
static qlora_result qlora__text_data_chunk(qlora__env* env, const qlora__text_loader* loader,
                                           size_t begin, size_t line) {
    qlora_text_data* data = loader->data;
    int32_t bos = loader->desc->chat->bos;
    size_t count = data->ids.count - begin;
    size_t head = bos >= 0 ? 1 : 0;
    size_t limit = loader->desc->chunk_tokens > 0 ? loader->desc->chunk_tokens : SIZE_MAX;
    size_t room = limit - head; // tokens of the document in one sample
    size_t stride = bos >= 0 ? room : room - 1;
    size_t samples = count > room ? 1 + (count - room + stride - 1) / stride : 1;
    size_t extra = bos >= 0 ? samples : samples - 1;
    QLORA__TRY(qlora__text_ids_room(env, &data->ids, extra + 1));
    QLORA__TRY(qlora__text_ids_room(env, &data->labels, count + extra + 1));
    int32_t* ids = data->ids.data + begin;
    for (size_t i = samples; i-- > 0;) {
        size_t part = count - i * stride < room ? count - i * stride : room;
        size_t to = samples > 1 ? i * limit : 0;
        memmove(ids + to + head, ids + i * stride, part * sizeof(int32_t));
        if (bos >= 0) {
            ids[to] = bos;
        }
    }
    data->ids.count = begin;
    for (size_t i = 0; i < samples; i++) {
        size_t start = data->ids.count;
        size_t part = count - i * stride < room ? count - i * stride : room;
        data->ids.count = start + head;
        QLORA__TRY(qlora__text_label_rest(env, data, false));
        data->ids.count += part;
        QLORA__TRY(qlora__text_label_rest(env, data, true));
        QLORA__TRY(qlora__text_data_close_record(env, data, start, line));
    }
    return QLORA_OK;
}

static qlora_result qlora__text_data_document(qlora__env* env, const qlora__text_loader* loader,
                                              const char* text, size_t size, size_t line) {
    int32_t bos = loader->desc->chat->bos;
    int32_t eos = loader->desc->chat->eos;
    qlora_text_ids* ids = &loader->data->ids;
    size_t begin = ids->count;
    QLORA__TRY(qlora__text_encode(env, loader->tok, text, size, 0, ids));
    if (bos >= 0 && ids->count > begin && ids->data[begin] == bos) {
        ids->count--; // spelt out in the text: it still comes exactly once
        memmove(ids->data + begin, ids->data + begin + 1, (ids->count - begin) * sizeof(int32_t));
    }
    bool there = ids->count > begin && ids->data[ids->count - 1] == eos;
    if (eos >= 0 && !there) {
        QLORA__TRY(qlora__text_ids_add(env, ids, eos));
    }
    return ids->count > begin ? qlora__text_data_chunk(env, loader, begin, line) : QLORA_OK;
}

// The line <|endoftext|> at or after `at`: its start, or `size`.
static size_t qlora__text_find_separator(const char* text, size_t size, size_t at) {
    static const char word[] = "<|endoftext|>";
    size_t length = sizeof(word) - 1;
    const char* hit;
    while ((hit = qlora__text_find(text + at, size - at, word)) != NULL) {
        size_t start = (size_t)(hit - text);
        size_t end = start + length;
        while (end < size && (text[end] == ' ' || text[end] == '\r')) {
            end++;
        }
        if ((start == 0 || text[start - 1] == '\n') && (end == size || text[end] == '\n')) {
            return start;
        }
        at = start + 1;
    }
    return size;
}

// Documents of a plain text, separated by lines of <|endoftext|>, or the whole text.
static qlora_result qlora__text_data_text(qlora__env* env, const qlora__text_loader* loader,
                                          const char* text, size_t size) {
    if (size >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0) {
        text += 3;
        size -= 3;
    }
    for (size_t at = 0; at < size;) {
        uint32_t code = 0;
        size_t length = qlora__text_utf8((const unsigned char*)text + at, size - at, &code);
        if (length == 0) {
            return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s:%lu: not UTF-8", loader->name,
                                   (unsigned long)qlora__text_lines(text, at) + 1);
        }
        at += length;
    }
    bool separated = qlora__text_find_separator(text, size, 0) < size;
    size_t line = 1;
    size_t at = 0;
    while (at < size) {
        size_t stop = qlora__text_find_separator(text, size, at);
        size_t begin = at;
        size_t end = stop;
        while (separated && begin < end && (text[begin] == '\n' || text[begin] == '\r')) {
            begin++;
        }
        while (separated && end > begin && (text[end - 1] == '\n' || text[end - 1] == '\r')) {
            end--;
        }
        size_t start = line + qlora__text_lines(text + at, begin - at);
        if (end > begin) {
            QLORA__TRY(qlora__text_data_document(env, loader, text + begin, end - begin, start));
        }
        const char* newline = (const char*)memchr(text + stop, '\n', size - stop);
        size_t next = newline != NULL ? (size_t)(newline - text) + 1 : size;
        line += qlora__text_lines(text + at, next - at);
        at = next;
    }
    return QLORA_OK;
}

// ---- formats

enum { QLORA__TEXT_FILE_UNKNOWN = 0, QLORA__TEXT_FILE_JSON, QLORA__TEXT_FILE_PLAIN };

// The formats of whole files: names in desc.format and, with a dot, endings.
static const struct {
    const char* name;
    int file;
} qlora__text_files[] = {{"jsonl", QLORA__TEXT_FILE_JSON},
                         {"ndjson", QLORA__TEXT_FILE_JSON},
                         {"json", QLORA__TEXT_FILE_JSON},
                         {"txt", QLORA__TEXT_FILE_PLAIN}};

const char* qlora_text_data_formats(size_t index) {
    const size_t files = QLORA__TEXT_COUNT(qlora__text_files);
    if (index < files) {
        return qlora__text_files[index].name;
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

// Whether a name ends in a dot and `ending`, in any case.
static bool qlora__text_ends_with(const char* name, const char* ending) {
    size_t length = strlen(name);
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

// What the file is: desc.format if it is set, else its ending. Standard input ("-") is JSON.
static qlora_result qlora__text_data_format(qlora__env* env, qlora__text_loader* loader,
                                            int* file) {
    const char* format = loader->desc->format;
    *file = format == NULL && strcmp(loader->desc->path, "-") == 0 ? QLORA__TEXT_FILE_JSON
                                                                   : QLORA__TEXT_FILE_UNKNOWN;
    for (size_t i = 0; i < QLORA__TEXT_COUNT(qlora__text_files); i++) {
        const char* name = qlora__text_files[i].name;
        if (format != NULL ? strcmp(format, name) == 0
                           : qlora__text_ends_with(loader->name, name)) {
            *file = qlora__text_files[i].file;
        }
    }
    for (size_t i = 0; format != NULL && i < QLORA__TEXT_COUNT(qlora__text_forms); i++) {
        if (strcmp(format, qlora__text_forms[i].name) == 0) {
            *file = QLORA__TEXT_FILE_JSON;
            loader->form = qlora__text_forms[i].name;
        }
    }
    if (*file != QLORA__TEXT_FILE_UNKNOWN) {
        return QLORA_OK;
    }
    if (format == NULL) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "%s: unknown data format; the file name must end in .jsonl, .json "
                               "or .txt, or the format must be given",
                               loader->name);
    }
    char names[160];
    size_t used = 0;
    for (size_t i = 0; qlora_text_data_formats(i) != NULL && used < sizeof names; i++) {
        int wrote = snprintf(names + used, sizeof names - used, "%s%s", i > 0 ? ", " : "",
                             qlora_text_data_formats(i));
        used += wrote > 0 ? (size_t)wrote : 0;
    }
    return qlora__env_fail(env, QLORA_ERR_ARGUMENT, "unknown data format \"%.60s\"; use one of %s",
                           format, names);
}

static qlora_result qlora__text_data_read(qlora__env* env, qlora__text_loader* loader,
                                          const char* source, size_t size) {
    int file = QLORA__TEXT_FILE_UNKNOWN;
    qlora_text_bytes* ignored = &loader->data->ignored;
    QLORA__TRY(qlora__text_data_format(env, loader, &file));
    QLORA__TRY(file == QLORA__TEXT_FILE_PLAIN ? qlora__text_data_text(env, loader, source, size)
                                              : qlora__text_data_json(env, loader, source, size));
    if (loader->data->count == 0) {
        return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s: the file contains no records",
                               loader->name);
    }
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

static qlora_result qlora__text_data_load(qlora_text* text, const qlora_text_data_desc* desc,
                                          const char* source, size_t size, qlora_text_data** out) {
    qlora__env* env = &text->env;
    qlora__text_loader loader;
    memset(&loader, 0, sizeof(loader));
    loader.desc = desc;
    loader.tok = desc->chat->tok;
    loader.name = strcmp(desc->path, "-") == 0 ? "standard input" : desc->path;
    loader.data = (qlora_text_data*)qlora__text_zalloc(env, 1, sizeof(qlora_text_data));
    if (loader.data == NULL) {
        return QLORA_ERR_MEMORY;
    }
    loader.data->text = text;
    qlora_result r = qlora__text_data_read(env, &loader, source, size);
    qlora__env_free(env, loader.messages, loader.message_capacity * sizeof *loader.messages);
    qlora__text_bytes_free(env, &loader.work);
    qlora__text_ids_free(env, &loader.numbers);
    if (r != QLORA_OK) {
        qlora__text_data_free(env, loader.data);
        return r;
    }
    QLORA__TEXT_LOG(env, INFO, "%s: %llu samples", loader.name,
                    (unsigned long long)loader.data->count);
    if (loader.data->ignored.data[0] != 0) {
        QLORA__TEXT_LOG(env, WARN, "%s: ignored names: %s", loader.name, loader.data->ignored.data);
    }
    text->datas++;
    *out = loader.data;
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
    return qlora__text_data_load(text, desc, (const char*)data, size, out);
}

qlora_result qlora_text_data_open(qlora_text* text, const qlora_text_data_desc* desc,
                                  qlora_text_data** out) {
    if (text == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__text_enter(text, "qlora_text_data_open");
    QLORA__TRY(qlora__text_data_need(text, desc, out));
    qlora_text_bytes file;
    memset(&file, 0, sizeof(file));
    qlora_result r = qlora__text_file_read(&text->env, desc->path, &file, NULL);
    r = r == QLORA_OK ? qlora__text_data_load(text, desc, file.data, file.count, out) : r;
    qlora__text_bytes_free(&text->env, &file);
    return r;
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
    return QLORA_OK;
}

size_t qlora_text_data_count(const qlora_text_data* data) {
    return data != NULL ? data->count : 0;
}

qlora_result qlora_text_sample_read(qlora_text_data* data, size_t index, qlora_text_sample* out) {
    if (data == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__text_enter(data->text, "qlora_text_sample_read");
    QLORA__TEXT_NEED(&data->text->env, out);
    if (index >= data->count) {
        return qlora__env_fail(&data->text->env, QLORA_ERR_ARGUMENT,
                               "index is %llu; it must be below %llu", (unsigned long long)index,
                               (unsigned long long)data->count);
    }
    const qlora__text_record* record = &data->records[index];
    out->ids = data->ids.data + record->begin;
    out->labels = data->labels.data + record->begin;
    out->count = record->count;
    out->trained = record->trained;
    out->line = record->line;
    return QLORA_OK;
}
