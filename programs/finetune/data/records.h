// records.h - records that cannot be used: --doctor lists them instead of stopping at the first.
#ifndef FINETUNE_RECORDS_H
#define FINETUNE_RECORDS_H

static const char* data_name(const char* path) { // as messages call it
    return strcmp(path, "-") == 0 ? "standard input" : path;
}

static void bad_add(app* a, const char* path, size_t line, const char* what) {
    bad_records* b = &a->data.bad;
    if (b->count < BAD_SHOWN) {
        b->shown[b->count].path = path;
        b->shown[b->count].line = line;
        size_t room = sizeof b->shown[b->count].what;
        snprintf(b->shown[b->count].what, room, "%.*s", (int)room - 1, what); // what fits
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

// The library's callback for a record that cannot be used.
static bool record_note(void* user, size_t line, const char* what) {
    app* a = (app*)user;
    bad_add(a, a->data.reading, line, place_skip(message_text(what), a->data.reading));
    if (a->data.bad.count <= BAD_SHOWN) {
        message_options(a->data.bad.shown[a->data.bad.count - 1].what);
    }
    return true;
}

#endif
