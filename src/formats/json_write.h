#ifndef QLORA__PART_JSON_WRITE
#define QLORA__PART_JSON_WRITE

// ---- writing JSON -------------------------------------------------------------------------------

// Writes JSON into a string. Keys are written in the order of the calls; `key` is NULL inside
// arrays and for the root. With indent 0, no spaces are written; otherwise each value has its own
// line, as in Python's json.dumps.
typedef struct qlora__json_writer {
    qlora__string* text;
    int indent;
    int depth;
    bool empty; // nothing has been written into the innermost container
} qlora__json_writer;

static QLORA__UNUSED void qlora__json_write_begin(qlora__json_writer* w, qlora__string* text,
                                                  int indent) {
    w->text = text;
    w->indent = indent;
    w->depth = 0;
    w->empty = true;
}

static QLORA__UNUSED void qlora__json_write_line(qlora__json_writer* w) {
    if (w->indent > 0) {
        qlora__string_add(w->text, "\n", 1);
        for (int i = 0; i < w->depth * w->indent; i++) {
            qlora__string_add(w->text, " ", 1);
        }
    }
}

static QLORA__UNUSED void qlora__json_write_quoted(qlora__string* t, const char* string,
                                                   size_t size) {
    static const char hex[] = "0123456789abcdef";
    qlora__string_add(t, "\"", 1);
    for (size_t i = 0; i < size; i++) {
        uint8_t c = (uint8_t)string[i];
        if (c == '"' || c == '\\') {
            qlora__string_add(t, "\\", 1);
            qlora__string_add(t, string + i, 1);
        } else if (c < 0x20) {
            char escape[6] = {'\\', 'u', '0', '0', hex[c >> 4], hex[c & 15]};
            qlora__string_add(t, escape, 6);
        } else {
            // A path may contain any bytes, but the file must be UTF-8.
            uint32_t left = size - i < 4 ? (uint32_t)(size - i) : 4;
            uint32_t step = qlora__utf8_size(string + i, left);
            qlora__string_add(t, step > 0 ? string + i : "\\ufffd", step > 0 ? step : 6);
            i += step > 0 ? step - 1 : 0;
        }
    }
    qlora__string_add(t, "\"", 1);
}

// Writes the prefix of a value: comma, line break and key.
static QLORA__UNUSED void qlora__json_write_key(qlora__json_writer* w, const char* key) {
    if (!w->empty) {
        qlora__string_add(w->text, ",", 1);
    }
    if (w->depth > 0) {
        qlora__json_write_line(w);
    }
    if (key != NULL) {
        qlora__json_write_quoted(w->text, key, strlen(key));
        qlora__string_puts(w->text, w->indent > 0 ? ": " : ":");
    }
    w->empty = false;
}

// Writes the prefix of a value whose key is not terminated.
static QLORA__UNUSED void qlora__json_write_name(qlora__json_writer* w, const char* key,
                                                 size_t size) {
    qlora__json_write_key(w, NULL);
    qlora__json_write_quoted(w->text, key, size);
    qlora__string_puts(w->text, w->indent > 0 ? ": " : ":");
}

// Begins an array or an object after its prefix.
static QLORA__UNUSED void qlora__json_write_bracket(qlora__json_writer* w, char bracket) {
    qlora__string_add(w->text, &bracket, 1);
    w->depth++;
    w->empty = true;
}

static QLORA__UNUSED void qlora__json_write_open(qlora__json_writer* w, const char* key,
                                                 char bracket) {
    qlora__json_write_key(w, key);
    qlora__json_write_bracket(w, bracket);
}

static QLORA__UNUSED void qlora__json_write_close(qlora__json_writer* w, char bracket) {
    w->depth--;
    if (!w->empty) {
        qlora__json_write_line(w);
    }
    qlora__string_add(w->text, &bracket, 1);
    w->empty = false;
}

// Writes a word unchanged: null, true, false, or a number that is already text.
static QLORA__UNUSED void qlora__json_write_word(qlora__json_writer* w, const char* key,
                                                 const char* word) {
    qlora__json_write_key(w, key);
    qlora__string_puts(w->text, word);
}

static QLORA__UNUSED void qlora__json_write_string(qlora__json_writer* w, const char* key,
                                                   const char* string) {
    qlora__json_write_key(w, key);
    qlora__json_write_quoted(w->text, string, strlen(string));
}

static QLORA__UNUSED void qlora__json_write_int(qlora__json_writer* w, const char* key,
                                                int64_t value) {
    char digits[24];
    snprintf(digits, sizeof digits, "%lld", (long long)value);
    qlora__json_write_word(w, key, digits);
}

// Writes the shortest digits that read back as the same double, with a decimal point or an exponent
// so that Python reads a float. The decimal point of the locale is replaced by a point.
static QLORA__UNUSED void qlora__json_write_double(qlora__json_writer* w, const char* key,
                                                   double value) {
    char digits[40];
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof bits);
    if ((bits >> 52 & 0x7FF) == 0x7FF) {
        w->text->result = qlora__env_fail(w->text->env, QLORA_ERR_ARGUMENT,
                                          "%s is not a finite number", key != NULL ? key : "value");
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

#endif // QLORA__PART_JSON_WRITE
