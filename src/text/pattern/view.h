// A text to be split. After the ByteLevel step, every byte is one character: code_of_byte is set.
typedef struct qlora__text_view {
    const unsigned char* s;
    size_t end;
    const uint8_t* classes;
    const uint16_t* code_of_byte;
} qlora__text_view;

// The class of the character at a position as a bit, and its length; both are 0 at the end. An
// invalid byte is a character of class OTHER.
static unsigned qlora__text_class_at(const qlora__text_view* v, size_t at, size_t* length) {
    if (at >= v->end) {
        *length = 0;
        return 0;
    }
    unsigned char c = v->s[at];
    *length = 1;
    if (v->code_of_byte != NULL) {
        return 1u << (v->classes[v->code_of_byte[c]] & 15);
    }
    if (c < 0x80) {
        return 1u << (v->classes[c] & 15);
    }
    uint32_t code;
    size_t found = qlora__text_utf8(v->s + at, v->end - at, &code);
    if (found == 0) {
        return QLORA__TEXT_BIT(OTHER);
    }
    *length = found;
    return 1u << (v->classes[code] & 15);
}

// The end of the run of characters of these classes.
static size_t qlora__text_run(const qlora__text_view* v, size_t at, unsigned mask) {
    size_t length;
    while (qlora__text_class_at(v, at, &length) & mask) {
        at += length;
    }
    return at;
}
