static bool text__replace(const char* text, size_t size, const text__step* step, text_bytes* out,
                          text_error* error) {
    size_t copied = 0;
    size_t at = 0;
    while (size - at >= step->a_size) {
        const char* hit = (const char*)memchr(text + at, step->a[0], size - at - step->a_size + 1);
        if (hit == NULL) {
            break;
        }
        at = (size_t)(hit - text);
        if (memcmp(hit, step->a, step->a_size) != 0) {
            at++;
            continue;
        }
        TEXT__TRY(text_bytes_add(out, text + copied, at - copied, error));
        TEXT__TRY(text_bytes_add(out, step->b, step->b_size, error));
        at += step->a_size;
        copied = at;
    }
    return text_bytes_add(out, text + copied, size - copied, error);
}

static text__view text__view_of(const text_tok* tok, const char* text, size_t end) {
    text__view view;
    view.s = (const unsigned char*)text;
    view.end = end;
    view.classes = tok->classes;
    view.code_of_byte = NULL;
    return view;
}

// The start of the white space that ends text[floor..end).
static size_t text__space_before(const text_tok* tok, const char* text, size_t floor, size_t end) {
    while (end > floor) {
        size_t start = end - 1;
        while (start > floor && end - start < 4 && ((unsigned char)text[start] & 0xC0) == 0x80) {
            start--;
        }
        text__view view = text__view_of(tok, text, end);
        size_t length;
        if (!(text__class_at(&view, start, &length) & TEXT__WS) || start + length != end) {
            break;
        }
        end = start;
    }
    return end;
}

static bool text__normalizer_step(text_tok* tok, const text__step* step, const char* text,
                                  size_t size, bool front, text_bytes* out, text_error* error) {
    switch (step->kind) {
    case TEXT__N_NFC:
    case TEXT__N_NFD:
        return text__normalize(tok->classes, step->kind == TEXT__N_NFC, text, size, &tok->marks,
                               out, error);
    case TEXT__N_PREPEND:
        TEXT__TRY(!front || size == 0 || text_bytes_add(out, step->a, step->a_size, error));
        return text_bytes_add(out, text, size, error);
    case TEXT__N_REPLACE:
        return text__replace(text, size, step, out, error);
    default: { // TEXT__N_STRIP
        text__view view = text__view_of(tok, text, size);
        size_t begin = step->start > 0 ? text__run(&view, 0, TEXT__WS) : 0;
        size_t end = step->stop > 0 ? text__space_before(tok, text, 0, size) : size;
        return begin >= end || text_bytes_add(out, text + begin, end - begin, error);
    }
    }
}

// All steps; *out is one of the tokenizer's buffers. `front`: something may be put in front.
static bool text__apply_normalizer(text_tok* tok, const char* text, size_t size, bool front,
                                   text_bytes** out, text_error* error) {
    *out = &tok->buffers[1];
    if (tok->normalizer.count == 0) {
        tok->buffers[1].count = 0;
        return text_bytes_add(&tok->buffers[1], text, size, error);
    }
    for (size_t i = 0; i < tok->normalizer.count; i++) {
        *out = &tok->buffers[1 + i % 2];
        (*out)->count = 0;
        TEXT__TRY(
            text__normalizer_step(tok, &tok->normalizer.data[i], text, size, front, *out, error));
        text = (*out)->data;
        size = (*out)->count;
    }
    return true;
}
