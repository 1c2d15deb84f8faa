static qlora_result qlora__text_replace(qlora__env* env, const char* text, size_t size,
                                        const qlora__text_step* step, qlora_text_bytes* out) {
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
        QLORA__TRY(qlora__text_bytes_add(env, out, text + copied, at - copied));
        QLORA__TRY(qlora__text_bytes_add(env, out, step->b, step->b_size));
        at += step->a_size;
        copied = at;
    }
    return qlora__text_bytes_add(env, out, text + copied, size - copied);
}

static qlora__text_view qlora__text_view_of(const qlora_text_tok* tok, const char* text,
                                            size_t end) {
    qlora__text_view view;
    view.s = (const unsigned char*)text;
    view.end = end;
    view.classes = tok->classes;
    view.code_of_byte = NULL;
    return view;
}

// The start of the white space that ends text[floor..end).
static size_t qlora__text_space_before(const qlora_text_tok* tok, const char* text, size_t floor,
                                       size_t end) {
    while (end > floor) {
        size_t start = end - 1;
        while (start > floor && end - start < 4 && ((unsigned char)text[start] & 0xC0) == 0x80) {
            start--;
        }
        qlora__text_view view = qlora__text_view_of(tok, text, end);
        size_t length;
        if (!(qlora__text_class_at(&view, start, &length) & QLORA__TEXT_WS) ||
            start + length != end) {
            break;
        }
        end = start;
    }
    return end;
}

// Replaces every match of an expression.
static qlora_result qlora__text_replace_pattern(qlora__env* env, qlora_text_tok* tok,
                                                const qlora__text_step* step, const char* text,
                                                size_t size, qlora_text_bytes* out) {
    qlora__text_step regex = *step;
    qlora__text_view view = qlora__text_view_of(tok, text, size);
    size_t copied = 0;
    regex.kind = QLORA__TEXT_P_REGEX;
    if (regex.program != NULL) {
        qlora__pattern_allow(regex.program, size);
    }
    for (size_t at = 0; at < size;) {
        size_t end = at;
        size_t length;
        QLORA__TRY(qlora__text_step_end(env, &regex, &view, 0, at, &end));
        if (end == at) {
            (void)qlora__text_class_at(&view, at, &length);
            at += length;
            continue;
        }
        if (at == 0) {
            (void)qlora__text_class_at(&view, at, &length);
            tok->moved = tok->moved || step->b_size == 0 || length < end;
        }
        QLORA__TRY(qlora__text_bytes_add(env, out, text + copied, at - copied));
        QLORA__TRY(qlora__text_bytes_add(env, out, step->b, step->b_size));
        at = end;
        copied = end;
    }
    return qlora__text_bytes_add(env, out, text + copied, size - copied);
}

// What a character becomes in the Nmt step: itself, a space, or 0 for nothing.
static uint32_t qlora__text_nmt(uint32_t code) {
    static const uint32_t dropped[][2] = {{0x1, 0x8},   {0xB, 0xB},   {0xE, 0x1F},
                                          {0x7F, 0x7F}, {0x8F, 0x8F}, {0x9F, 0x9F}};
    static const uint32_t spaces[][2] = {{0x9, 0xA},       {0xC, 0xD},       {0x1680, 0x1680},
                                         {0x200B, 0x200F}, {0x2028, 0x2029}, {0x2581, 0x2581},
                                         {0xFEFF, 0xFEFF}, {0xFFFD, 0xFFFD}};
    for (size_t i = 0; i < QLORA__TEXT_COUNT(dropped); i++) {
        if (code >= dropped[i][0] && code <= dropped[i][1]) {
            return 0;
        }
    }
    for (size_t i = 0; i < QLORA__TEXT_COUNT(spaces); i++) {
        if (code >= spaces[i][0] && code <= spaces[i][1]) {
            return ' ';
        }
    }
    return code;
}

// Letters of Unicode 15 to 17, whose lower case templates do not know.
static uint32_t qlora__text_new_lower(uint32_t code) {
    static const qlora__text_case_run runs[] = {
        {0x1C89, 0x1C89, 1, 1},      {0xA7CB, 0xA7CB, -0xA567, 1}, {0xA7CC, 0xA7CE, 1, 2},
        {0xA7D2, 0xA7D4, 1, 2},      {0xA7DA, 0xA7DA, 1, 1},       {0xA7DC, 0xA7DC, -0xA641, 1},
        {0x10D50, 0x10D65, 0x20, 1}, {0x16EA0, 0x16EB8, 0x1B, 1}};
    return code < 0x1C89 ? code : qlora__text_case_map(runs, QLORA__TEXT_COUNT(runs), code);
}

// The steps that change one character after another. What is not UTF-8 stays.
static qlora_result qlora__text_characters(qlora__env* env, int kind, const char* text, size_t size,
                                           qlora_text_bytes* out) {
    for (size_t at = 0; at < size;) {
        uint32_t code = (unsigned char)text[at];
        uint32_t to[3];
        char bytes[12];
        size_t used = 0;
        size_t count = 1;
        size_t length =
            code < 0x80 ? 1 : qlora__text_utf8((const unsigned char*)text + at, size - at, &code);
        if (length == 0) {
            QLORA__TRY(qlora__text_bytes_add(env, out, text + at, 1));
            at++;
            continue;
        }
        if (kind == QLORA__TEXT_N_LOWER) {
            count = qlora__text_case_of(qlora__text_new_lower(code), QLORA__TEXT_LOWER_CASE, to);
        } else {
            to[0] = qlora__text_nmt(code);
            count = to[0] != 0 || code == 0 ? 1 : 0;
        }
        for (size_t i = 0; i < count; i++) {
            used += qlora__text_utf8_put(to[i], bytes + used);
        }
        QLORA__TRY(qlora__text_bytes_add(env, out, bytes, used));
        at += length;
    }
    return QLORA_OK;
}

static qlora_result qlora__text_normalizer_step(qlora__env* env, qlora_text_tok* tok,
                                                const qlora__text_step* step, const char* text,
                                                size_t size, bool front, qlora_text_bytes* out) {
    switch (step->kind) {
    case QLORA__TEXT_N_NFC:
    case QLORA__TEXT_N_NFD:
        return qlora__text_normalize(env, tok->classes, step->kind == QLORA__TEXT_N_NFC, text, size,
                                     &tok->marks, out);
    case QLORA__TEXT_N_PREPEND:
        if (front && size > 0) {
            QLORA__TRY(qlora__text_bytes_add(env, out, step->a, step->a_size));
        }
        return qlora__text_bytes_add(env, out, text, size);
    case QLORA__TEXT_N_REPLACE:
        return qlora__text_replace(env, text, size, step, out);
    case QLORA__TEXT_N_REPLACE_PATTERN:
        return qlora__text_replace_pattern(env, tok, step, text, size, out);
    case QLORA__TEXT_N_CHARSMAP:
        return qlora__text_charsmap_apply(env, step->a, step->a_size, text, size, out);
    case QLORA__TEXT_N_NMT:
    case QLORA__TEXT_N_LOWER:
        return qlora__text_characters(env, step->kind, text, size, out);
    default: { // QLORA__TEXT_N_STRIP
        qlora__text_view view = qlora__text_view_of(tok, text, size);
        size_t begin = step->start > 0 ? qlora__text_run(&view, 0, QLORA__TEXT_WS) : 0;
        size_t end = step->stop > 0 ? qlora__text_space_before(tok, text, 0, size) : size;
        return begin >= end ? QLORA_OK : qlora__text_bytes_add(env, out, text + begin, end - begin);
    }
    }
}

// Whether a step drops the start of a text. `tokenizers` then aligns the new start with a later
// character, and a Metaspace step that prepends only to the start of a text prepends nothing. A
// replacement is aligned with the last character that it replaces.
static bool qlora__text_step_moves(const qlora_text_tok* tok, const qlora__text_step* step,
                                   const char* text, size_t size) {
    qlora__text_view view = qlora__text_view_of(tok, text, size);
    size_t length = 0;
    uint32_t code = 0;
    if (size == 0) {
        return false;
    }
    unsigned class_of = qlora__text_class_at(&view, 0, &length);
    switch (step->kind) {
    case QLORA__TEXT_N_STRIP:
        return step->start > 0 && (class_of & QLORA__TEXT_WS) != 0;
    case QLORA__TEXT_N_REPLACE:
        return size >= step->a_size && memcmp(text, step->a, step->a_size) == 0 &&
               (step->b_size == 0 || length < step->a_size);
    case QLORA__TEXT_N_NMT:
        code = (unsigned char)text[0];
        return (code < 0x80 || qlora__text_utf8((const unsigned char*)text, size, &code) > 0) &&
               code != 0 && qlora__text_nmt(code) == 0;
    default: // qlora__text_replace_pattern finds out for itself
        return false;
    }
}

// Runs all steps; *out is one of the tokenizer's buffers. `front`: text may be prepended.
static qlora_result qlora__text_apply_normalizer(qlora__env* env, qlora_text_tok* tok,
                                                 const char* text, size_t size, bool front,
                                                 qlora_text_bytes** out) {
    *out = &tok->buffers[1];
    tok->moved = false;
    if (tok->normalizer.count == 0) {
        tok->buffers[1].count = 0;
        return qlora__text_bytes_add(env, &tok->buffers[1], text, size);
    }
    for (size_t i = 0; i < tok->normalizer.count; i++) {
        *out = &tok->buffers[1 + i % 2];
        (*out)->count = 0;
        const qlora__text_step* step = &tok->normalizer.data[i];
        tok->moved = tok->moved || qlora__text_step_moves(tok, step, text, size);
        QLORA__TRY(qlora__text_normalizer_step(env, tok, step, text, size, front, *out));
        text = (*out)->data;
        size = (*out)->count;
    }
    return QLORA_OK;
}
