#if defined(__GNUC__) || defined(__clang__)
#define TEXT__PRINTF __attribute__((format(printf, 2, 3)))
#else
#define TEXT__PRINTF
#endif

#define TEXT__TRY(expression)                                                                      \
    do {                                                                                           \
        if (!(expression)) {                                                                       \
            return false;                                                                          \
        }                                                                                          \
    } while (0)

// Always false, so that a function can end with `return text__fail(...)`. Messages quote what files
// contain: control characters become '?' and a character cut at the end is dropped.
static bool text__fail(text_error* error, const char* format, ...) TEXT__PRINTF;

static bool text__fail(text_error* error, const char* format, ...) {
    if (error == NULL) {
        return false;
    }
    va_list list;
    va_start(list, format);
    int length = vsnprintf(error->text, sizeof(error->text), format, list);
    va_end(list);
    if (length < 0) {
        error->text[0] = 0;
    }
    size_t count = strlen(error->text);
    if (count + 1 == sizeof(error->text)) {
        while (count > 0 && ((unsigned char)error->text[count - 1] & 0xC0) == 0x80) {
            count--;
        }
        if (count > 0 && (unsigned char)error->text[count - 1] >= 0xC0) {
            count--;
        }
        error->text[count] = 0;
    }
    for (size_t i = 0; i < count; i++) {
        unsigned char c = (unsigned char)error->text[i];
        if (c < 0x20 || c == 0x7F) {
            error->text[i] = '?';
        }
    }
    return false;
}

// Makes room for `extra` more elements.
static bool text__reserve(void** data, size_t* capacity, size_t count, size_t extra, size_t element,
                          text_error* error) {
    if (extra <= *capacity - count) {
        return true;
    }
    size_t limit = SIZE_MAX / 2 / element;
    if (extra > limit || count > limit - extra) {
        return text__fail(error, "out of memory: more than %lu elements", (unsigned long)limit);
    }
    size_t wanted = count + extra;
    size_t grown = *capacity <= limit / 2 ? *capacity * 2 : limit;
    if (grown < wanted) {
        grown = wanted;
    }
    if (grown < 16) {
        grown = 16;
    }
    void* moved = TEXT_REALLOC(*data, grown * element);
    if (moved == NULL) {
        return text__fail(error, "out of memory (%lu bytes)", (unsigned long)(grown * element));
    }
    *data = moved;
    *capacity = grown;
    return true;
}

static void* text__zalloc(size_t count, size_t element, text_error* error) {
    void* data = NULL;
    if (element != 0 && count <= SIZE_MAX / 2 / element) {
        size_t bytes = count * element;
        data = TEXT_REALLOC(NULL, bytes > 0 ? bytes : 1);
        if (data != NULL) {
            memset(data, 0, bytes);
        }
    }
    if (data == NULL) {
        (void)text__fail(error, "out of memory (%lu x %lu bytes)", (unsigned long)count,
                         (unsigned long)element);
    }
    return data;
}

static bool text__bytes_room(text_bytes* bytes, size_t extra, text_error* error) {
    void* data = bytes->data;
    bool good = text__reserve(&data, &bytes->capacity, bytes->count, extra, 1, error);
    bytes->data = (char*)data;
    return good;
}

static bool text__ids_room(text_ids* ids, size_t extra, text_error* error) {
    void* data = ids->data;
    bool good = text__reserve(&data, &ids->capacity, ids->count, extra, sizeof(int32_t), error);
    ids->data = (int32_t*)data;
    return good;
}

void text_bytes_free(text_bytes* bytes) {
    TEXT_FREE(bytes->data);
    memset(bytes, 0, sizeof(*bytes));
}

void text_ids_free(text_ids* ids) {
    TEXT_FREE(ids->data);
    memset(ids, 0, sizeof(*ids));
}

bool text_bytes_add(text_bytes* bytes, const void* data, size_t size, text_error* error) {
    TEXT__TRY(text__bytes_room(bytes, size, error));
    if (size > 0) {
        memcpy(bytes->data + bytes->count, data, size);
        bytes->count += size;
    }
    return true;
}

bool text_ids_add(text_ids* ids, int32_t id, text_error* error) {
    TEXT__TRY(text__ids_room(ids, 1, error));
    ids->data[ids->count++] = id;
    return true;
}

static bool text__bytes_add_string(text_bytes* bytes, const char* string, text_error* error) {
    return text_bytes_add(bytes, string, strlen(string), error);
}

static bool text__file_append(FILE* file, const char* path, text_bytes* out, text_error* error) {
    for (;;) {
        size_t step = out->count < 65536 ? 65536 : out->count;
        TEXT__TRY(text__bytes_room(out, step, error));
        size_t got = fread(out->data + out->count, 1, step, file);
        out->count += got;
        if (got < step) {
            if (ferror(file)) {
                return text__fail(error, "%s: cannot be read: %s", path, strerror(errno));
            }
            out->data[out->count] = 0; // there is room: less than `step` came
            return true;
        }
    }
}

bool text_file_read(const char* path, text_bytes* out, text_error* error) {
    FILE* file = fopen(path, "rb");
    if (file == NULL) {
        return text__fail(error, "%s: cannot be opened: %s", path, strerror(errno));
    }
    bool good = text__file_append(file, path, out, error);
    fclose(file);
    return good;
}

// folder/name if such a file can be opened. *found tells; false only when out of memory or
// unreadable.
static bool text__folder_read(const char* folder, const char* name, text_bytes* out, bool* found,
                              text_error* error) {
    text_bytes path;
    memset(&path, 0, sizeof(path));
    *found = false;
    bool good = text__bytes_add_string(&path, folder, error) &&
                text_bytes_add(&path, "/", 1, error) &&
                text_bytes_add(&path, name, strlen(name) + 1, error);
    if (good) {
        FILE* file = fopen(path.data, "rb");
        if (file != NULL) {
            *found = true;
            good = text__file_append(file, path.data, out, error);
            fclose(file);
        }
    }
    text_bytes_free(&path);
    return good;
}
