// records.h - records that cannot be used: --doctor lists them instead of stopping at the first.
#ifndef FINETUNE_RECORDS_H
#define FINETUNE_RECORDS_H

static void bad_add(app* a, const char* path, size_t line, const char* what) {
    bad_records* b = &a->bad;
    if (b->count < BAD_SHOWN) {
        b->shown[b->count].path = path;
        b->shown[b->count].line = line;
        snprintf(b->shown[b->count].what, sizeof b->shown[b->count].what, "%s", what);
    }
    b->count++;
}

// A message of the library without the place that it starts with, "PATH:LINE:COLUMN: ".
static const char* place_skip(const char* text, const char* path) {
    size_t length = strlen(path);
    if (strncmp(text, path, length) == 0 && text[length] == ':') {
        text += length + 1;
        text += strspn(text, "0123456789: ");
    }
    return text;
}

// Tries one record alone. A bad one is noted and its bytes are replaced by spaces.
static bool record_try(app* a, const qlora_text_data_desc* desc, char* record, size_t size,
                       size_t line) {
    qlora_text_data* one = NULL;
    if (qlora_text_data_load(a->text, desc, record, size, &one) == QLORA_OK) {
        qlora_text_data_close(one);
        return true;
    }
    const char* name = strcmp(desc->path, "-") == 0 ? "standard input" : desc->path;
    bad_add(a, name, line, place_skip(message_text(qlora_text_last_error(a->text)), name));
    for (size_t i = 0; i < size; i++) {
        record[i] = record[i] == '\n' ? '\n' : ' ';
    }
    return false;
}

static void lines_try(app* a, const qlora_text_data_desc* desc, blob* text) {
    size_t number = 1;
    for (size_t at = 0; at < text->count; number++) {
        size_t end = at;
        bool blank = true;
        for (; end < text->count && text->data[end] != '\n'; end++) {
            blank = blank && strchr(" \t\r", text->data[end]) != NULL;
        }
        if (!blank) {
            record_try(a, desc, text->data + at, end - at, number);
        }
        at = end + 1;
    }
}

// The end of the JSON value that starts at `at`, judged by brackets and quotes only.
static size_t value_end(const blob* text, size_t at) {
    int depth = 0;
    bool quoted = false;
    for (; at < text->count; at++) {
        char c = text->data[at];
        if (quoted) {
            at += c == '\\' ? 1 : 0;
            quoted = c != '"';
        } else if (c == '"') {
            quoted = true;
        } else if (c == '{' || c == '[') {
            depth++;
        } else if (c == '}' || c == ']') {
            if (depth == 0) {
                return at;
            }
            depth--;
        } else if (c == ',' && depth == 0) {
            return at;
        }
    }
    return text->count;
}

static bool format_file(const char* format) { // of a file rather than of its records
    return format != NULL && (strcmp(format, "jsonl") == 0 || strcmp(format, "ndjson") == 0 ||
                              strcmp(format, "json") == 0 || strcmp(format, "txt") == 0);
}

// The records of an array, one by one. The comma after a bad record, or before it if it is the
// last, is removed with it.
static void array_try(app* a, const qlora_text_data_desc* desc, blob* text) {
    qlora_text_data_desc single = *desc;
    size_t line = 1;
    size_t at = 0;
    size_t comma = SIZE_MAX; // after the last good record
    single.path = "record.jsonl";
    single.format = format_file(desc->format) ? NULL : desc->format;
    while (at < text->count && text->data[at] != '[') {
        line += text->data[at++] == '\n' ? 1 : 0;
    }
    for (at++; at < text->count;) {
        size_t end = 0;
        for (; at < text->count && strchr(" \t\r\n", text->data[at]) != NULL; at++) {
            line += text->data[at] == '\n' ? 1 : 0;
        }
        end = value_end(text, at);
        if (end == at) {
            break;
        }
        size_t first = line;
        for (size_t i = at; i < end; i++) { // one record is one line
            line += text->data[i] == '\n' ? 1 : 0;
            text->data[i] = text->data[i] == '\n' ? ' ' : text->data[i];
        }
        size_t before = a->bad.count;
        bool good = record_try(a, &single, text->data + at, end - at, first);
        if (!good && before < BAD_SHOWN) {
            a->bad.shown[before].path =
                strcmp(desc->path, "-") == 0 ? "standard input" : desc->path;
        }
        bool more = end < text->count && text->data[end] == ',';
        if (good) {
            comma = more ? end : SIZE_MAX;
        } else if (more) {
            text->data[end] = ' ';
        } else if (comma != SIZE_MAX) {
            text->data[comma] = ' ';
        }
        at = end + 1;
        if (!more) {
            break;
        }
    }
}

// Whether the data is an array of records (false: one record per line), and whether it has records.
static bool records_array(const qlora_text_data_desc* desc, const blob* text, bool* records) {
    const char* path = desc->format != NULL ? desc->format : desc->path;
    bool lines = ends_in(path, "jsonl") || ends_in(path, "ndjson");
    *records = !ends_in(path, "txt");
    if (lines || ends_in(path, "json")) {
        return !lines;
    }
    size_t blank = 0;
    while (blank < text->count && strchr(" \t\r\n", text->data[blank]) != NULL) {
        blank++;
    }
    return ends_in(desc->path, ".json") || (blank < text->count && text->data[blank] == '[');
}

// Reads data that contains bad records: notes them and keeps the others. False if the fault is not
// in single records; the library's error is then still the one to print.
static bool records_open(app* a, const qlora_text_data_desc* desc, blob* text,
                         qlora_text_data** out) {
    char error[1024];
    size_t before = a->bad.count;
    bool records = false;
    snprintf(error, sizeof error, "%s", a->error);
    bool array = records_array(desc, text, &records);
    if (records && array) {
        array_try(a, desc, text);
    } else if (records) {
        lines_try(a, desc, text);
    }
    bool found = a->bad.count > before;
    if (found) { // nothing is left if every record is bad
        (void)qlora_text_data_load(a->text, desc, text->data, text->count, out);
    }
    memcpy(a->error, error, sizeof error);
    if (found) {
        a->error[0] = '\0';
    }
    return found;
}

#endif
