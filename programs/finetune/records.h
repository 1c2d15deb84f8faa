// records.h - records that cannot be used: --doctor lists them instead of stopping at the first.
#ifndef FINETUNE_RECORDS_H
#define FINETUNE_RECORDS_H

static const char* data_name(const char* path) { // as messages call it
    return strcmp(path, "-") == 0 ? "standard input" : path;
}

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

static bool record_load(app* a, const qlora_text_data_desc* desc, const char* record, size_t size) {
    qlora_text_data* one = NULL;
    bool ok = qlora_text_data_load(a->text, desc, record, size, &one) == QLORA_OK;
    if (ok) {
        qlora_text_data_close(one);
    }
    return ok;
}

// Notes a record with the library's last error. Its bytes are replaced by spaces; its line ends
// stay, so that the lines after it keep their numbers.
static void record_drop(app* a, const qlora_text_data_desc* desc, const char* label, char* record,
                        size_t size, size_t line) {
    bad_add(a, data_name(desc->path), line,
            place_skip(message_text(qlora_text_last_error(a->text)), label));
    if (a->bad.count <= BAD_SHOWN) {
        message_options(a->bad.shown[a->bad.count - 1].what);
    }
    for (size_t i = 0; i < size; i++) {
        record[i] = record[i] == '\n' ? '\n' : ' ';
    }
}

static bool is_blank(char c) {
    return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

static size_t lines_in(const blob* text, size_t from, size_t to) {
    size_t lines = 0;
    for (size_t i = from; i < to; i++) {
        lines += text->data[i] == '\n' ? 1 : 0;
    }
    return lines;
}

static size_t line_end(const blob* text, size_t at) {
    while (at < text->count && text->data[at] != '\n') {
        at++;
    }
    return at;
}

// The end of a JSON value, judged by brackets and quotes only: that of an element of an array, or,
// with `object`, of the object that starts at `at`. A string ends with its line at the latest.
static size_t value_end(const blob* text, size_t at, bool object) {
    int depth = 0;
    bool quoted = false;
    for (; at < text->count; at++) {
        char c = text->data[at];
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
    return text->count;
}

// Tries one element of an array, as an array of its own.
static bool element_try(app* a, const qlora_text_data_desc* desc, char* record, size_t size,
                        size_t line) {
    qlora_text_data_desc single = *desc;
    blob copy;
    memset(&copy, 0, sizeof copy);
    single.path = "record.json";
    bool good = !blob_add(&copy, "[", 1) || !blob_add(&copy, record, size) ||
                !blob_add(&copy, "]", 1) || record_load(a, &single, copy.data, copy.count);
    blob_free(&copy);
    if (!good) {
        record_drop(a, desc, single.path, record, size, line);
    }
    return good;
}

// The records of the array that starts at `at`, one by one. The comma after a bad record, or before
// it if it is the last, is removed with it.
static void array_try(app* a, const qlora_text_data_desc* desc, blob* text, size_t at,
                      size_t line) {
    size_t comma = SIZE_MAX; // after the last good record
    for (at++; at < text->count;) {
        size_t start = at;
        while (at < text->count && is_blank(text->data[at])) {
            at++;
        }
        line += lines_in(text, start, at);
        size_t end = value_end(text, at, false);
        if (end == at) {
            return;
        }
        size_t lines = lines_in(text, at, end);
        bool good = element_try(a, desc, text->data + at, end - at, line);
        bool more = end < text->count && text->data[end] == ',';
        line += lines;
        if (good) {
            comma = more ? end : SIZE_MAX;
        } else if (more) {
            text->data[end] = ' ';
        } else if (comma != SIZE_MAX) {
            text->data[comma] = ' ';
        }
        at = end + 1;
        if (!more) {
            return;
        }
    }
}

// {"data": [{...}, ...]}: where the array starts in the object at `at`, or SIZE_MAX. A line that
// starts with a record ends the search.
static size_t list_inside(const blob* text, size_t at) {
    int depth = 0;
    for (; at < text->count; at++) {
        char c = text->data[at];
        if (c == '"') {
            size_t name = at;
            for (at++; at < text->count && text->data[at] != '"' && text->data[at] != '\n'; at++) {
                at += text->data[at] == '\\' ? 1 : 0;
            }
            size_t to = at + 1;
            while (to < text->count && (is_blank(text->data[to]) || text->data[to] == ':')) {
                to++;
            }
            size_t first = to + 1;
            while (first < text->count && is_blank(text->data[first])) {
                first++;
            }
            if (depth == 1 && first < text->count && text->data[to] == '[' &&
                text->data[first] == '{' && strncmp(text->data + name, "\"data\"", 6) == 0) {
                return to;
            }
        } else if (c == '{' || c == '[') {
            depth++;
        } else if ((c == '}' || c == ']') && --depth <= 0) {
            return SIZE_MAX;
        } else if (c == '\n' && at + 1 < text->count && text->data[at + 1] == '{') {
            return SIZE_MAX;
        }
    }
    return SIZE_MAX;
}

// Whether the next line with anything in it starts with a record.
static bool record_follows(const blob* text, size_t end) {
    while (end < text->count && is_blank(text->data[end])) {
        end++;
    }
    return end < text->count && text->data[end] == '{' && text->data[end - 1] == '\n';
}

// One record after the other, as the library reads them: one per line, but a record may span
// several lines, and an object may contain an array of them.
static void lines_try(app* a, const qlora_text_data_desc* desc, blob* text, size_t at) {
    size_t line = 1;
    while (at < text->count) {
        if (is_blank(text->data[at])) {
            line += text->data[at++] == '\n' ? 1 : 0;
            continue;
        }
        size_t end = line_end(text, at);
        size_t list = SIZE_MAX;
        size_t close = text->data[at] == '{' ? value_end(text, at, true) : at;
        if (close > end) {
            list = list_inside(text, at);
            end = list != SIZE_MAX || !record_follows(text, end) ? line_end(text, close) : end;
        } else if (text->data[at] == '{') {
            list = list_inside(text, at);
        }
        size_t lines = lines_in(text, at, end);
        if (!record_load(a, desc, text->data + at, end - at)) {
            if (list < end) {
                array_try(a, desc, text, list, line + lines_in(text, at, list));
            } else {
                record_drop(a, desc, data_name(desc->path), text->data + at, end - at, line);
            }
        }
        line += lines;
        at = end;
    }
}

// Reads data that contains bad records: notes them and keeps the others. False if the fault is not
// in single records; the library's error is then still the one to print.
static bool records_open(app* a, const qlora_text_data_desc* desc, blob* text,
                         qlora_text_data** out) {
    char error[1024];
    size_t before = a->bad.count;
    const char* kind = desc->format != NULL ? desc->format : desc->path;
    if (ends_in(kind, "txt")) {
        return false;
    }
    snprintf(error, sizeof error, "%s", a->error);
    size_t at = text->count >= 3 && memcmp(text->data, "\xEF\xBB\xBF", 3) == 0 ? 3 : 0;
    size_t first = at;
    while (first < text->count && is_blank(text->data[first])) {
        first++;
    }
    if (first < text->count && text->data[first] == '[') { // the library's rule, too
        array_try(a, desc, text, first, 1 + lines_in(text, at, first));
    } else {
        lines_try(a, desc, text, at);
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
