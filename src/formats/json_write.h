// ---- text and JSON, written

// A growing text. The first failure sticks; later additions do nothing, so callers check once.
typedef struct qlora__text {
    qlora_ctx* ctx;
    char* data;
    size_t size;
    size_t capacity;
    qlora_result result;
} qlora__text;

static void qlora__text_begin(qlora_ctx* ctx, qlora__text* t) {
    memset(t, 0, sizeof *t);
    t->ctx = ctx;
    t->result = QLORA_OK;
}

static void qlora__text_free(qlora__text* t) {
    qlora__free(t->ctx, t->data, t->capacity);
    t->data = NULL;
    t->size = 0;
    t->capacity = 0;
}

static void qlora__text_add(qlora__text* t, const void* bytes, size_t size) {
    size_t need = 0;
    if (t->result != QLORA_OK || size == 0) {
        return;
    }
    if (!qlora__add(t->size, size, &need)) {
        t->result = qlora__fail(t->ctx, QLORA_ERR_MEMORY, "text too large");
        return;
    }
    if (need > t->capacity) {
        size_t capacity = t->capacity < 256 ? 256 : t->capacity;
        while (capacity < need) {
            capacity = capacity > SIZE_MAX / 2 ? need : capacity * 2;
        }
        char* data = (char*)qlora__alloc(t->ctx, capacity);
        if (data == NULL) {
            t->result = QLORA_ERR_MEMORY;
            return;
        }
        if (t->data != NULL) {
            memcpy(data, t->data, t->size);
            qlora__free(t->ctx, t->data, t->capacity);
        }
        t->data = data;
        t->capacity = capacity;
    }
    memcpy(t->data + t->size, bytes, size);
    t->size = need;
}

static void qlora__text_puts(qlora__text* t, const char* string) {
    qlora__text_add(t, string, strlen(string));
}

// Writes a whole small file, atomically.
static qlora_result qlora__file_write(qlora_ctx* ctx, const char* path, const void* bytes,
                                      size_t size) {
    qlora__out out;
    QLORA__TRY(qlora__out_begin(ctx, path, &out));
    QLORA__TRY(qlora__out_write(ctx, &out, bytes, size));
    return qlora__out_commit(ctx, &out);
}

// JSON into a text. Keys come in the caller's order; `key` is NULL inside arrays and for the root.
// indent 0 writes no spaces at all, otherwise one line per value, as Python's json.dumps does.
typedef struct qlora__json_writer {
    qlora__text* text;
    int indent;
    int depth;
    bool empty; // nothing was written yet into the innermost container
} qlora__json_writer;

static void qlora__json_write_begin(qlora__json_writer* w, qlora__text* text, int indent) {
    w->text = text;
    w->indent = indent;
    w->depth = 0;
    w->empty = true;
}

static void qlora__json_write_line(qlora__json_writer* w) {
    if (w->indent > 0) {
        qlora__text_add(w->text, "\n", 1);
        for (int i = 0; i < w->depth * w->indent; i++) {
            qlora__text_add(w->text, " ", 1);
        }
    }
}

static void qlora__json_write_quoted(qlora__text* t, const char* string, size_t size) {
    static const char hex[] = "0123456789abcdef";
    qlora__text_add(t, "\"", 1);
    for (size_t i = 0; i < size; i++) {
        uint8_t c = (uint8_t)string[i];
        if (c == '"' || c == '\\') {
            qlora__text_add(t, "\\", 1);
            qlora__text_add(t, string + i, 1);
        } else if (c < 0x20) {
            char escape[6] = {'\\', 'u', '0', '0', hex[c >> 4], hex[c & 15]};
            qlora__text_add(t, escape, 6);
        } else {
            // a path may hold any bytes; the file must be UTF-8
            uint32_t left = size - i < 4 ? (uint32_t)(size - i) : 4;
            uint32_t step = qlora__utf8_size(string + i, left);
            qlora__text_add(t, step > 0 ? string + i : "\\ufffd", step > 0 ? step : 6);
            i += step > 0 ? step - 1 : 0;
        }
    }
    qlora__text_add(t, "\"", 1);
}

// What stands before every value: comma, line, key.
static void qlora__json_write_key(qlora__json_writer* w, const char* key) {
    if (!w->empty) {
        qlora__text_add(w->text, ",", 1);
    }
    if (w->depth > 0) {
        qlora__json_write_line(w);
    }
    if (key != NULL) {
        qlora__json_write_quoted(w->text, key, strlen(key));
        qlora__text_puts(w->text, w->indent > 0 ? ": " : ":");
    }
    w->empty = false;
}

static void qlora__json_write_open(qlora__json_writer* w, const char* key, char bracket) {
    qlora__json_write_key(w, key);
    qlora__text_add(w->text, &bracket, 1);
    w->depth++;
    w->empty = true;
}

static void qlora__json_write_close(qlora__json_writer* w, char bracket) {
    w->depth--;
    if (!w->empty) {
        qlora__json_write_line(w);
    }
    qlora__text_add(w->text, &bracket, 1);
    w->empty = false;
}

// A word as it stands: null, true, false, or a number that is text already.
static void qlora__json_write_word(qlora__json_writer* w, const char* key, const char* word) {
    qlora__json_write_key(w, key);
    qlora__text_puts(w->text, word);
}

static void qlora__json_write_string(qlora__json_writer* w, const char* key, const char* string) {
    qlora__json_write_key(w, key);
    qlora__json_write_quoted(w->text, string, strlen(string));
}

static void qlora__json_write_int(qlora__json_writer* w, const char* key, int64_t value) {
    char digits[24];
    snprintf(digits, sizeof digits, "%lld", (long long)value);
    qlora__json_write_word(w, key, digits);
}

// The shortest digits that read back as the same double, with a point or an exponent so that it
// stays a float in Python. The locale's decimal point, whatever it is, becomes a point.
static void qlora__json_write_double(qlora__json_writer* w, const char* key, double value) {
    char digits[40];
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof bits);
    if ((bits >> 52 & 0x7FF) == 0x7FF) {
        w->text->result = qlora__fail(w->text->ctx, QLORA_ERR_ARGUMENT, "%s is not a finite number",
                                      key != NULL ? key : "value");
        return;
    }
    for (int precision = 1; precision <= 17; precision++) {
        char printed[40];
        size_t n = 0;
        bool plain = true;
        snprintf(printed, sizeof printed, "%.*g", precision, value);
        for (const char* c = printed; *c != '\0'; c++) {
            bool usual = (*c >= '0' && *c <= '9') || *c == '-' || *c == '+' || *c == 'e';
            if (usual) {
                digits[n++] = *c;
            } else if (n > 0 && digits[n - 1] != '.') {
                digits[n++] = '.';
            }
            plain = plain && ((*c >= '0' && *c <= '9') || *c == '-');
        }
        if (plain) {
            digits[n++] = '.';
            digits[n++] = '0';
        }
        digits[n] = '\0';
        double back = qlora__number_parse(digits, n);
        if (memcmp(&back, &value, sizeof back) == 0) {
            break;
        }
    }
    qlora__json_write_word(w, key, digits);
}
