// Regular expressions as objects.

struct qlora_text_pattern {
    qlora_text* text;
    uint8_t* classes;
    qlora__pattern* program;
};

static void qlora__text_pattern_free(qlora__env* env, qlora_text_pattern* pattern) {
    qlora__pattern_free(env, pattern->program);
    QLORA__TEXT_FREE(env, pattern->classes, QLORA__TEXT_CODES);
    qlora__env_free(env, pattern, sizeof *pattern);
}

qlora_result qlora_text_pattern_compile(qlora_text* text, const char* source, size_t size,
                                        qlora_text_pattern** out) {
    if (text == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__env* env = &text->env;
    qlora__text_enter(text, "qlora_text_pattern_compile");
    QLORA__TEXT_NEED(env, source);
    QLORA__TEXT_NEED(env, out);
    qlora_text_pattern* pattern =
        (qlora_text_pattern*)qlora__text_zalloc(env, 1, sizeof(qlora_text_pattern));
    char* copy = NULL; // that messages can print
    size_t copied = 0;
    if (pattern == NULL) {
        return QLORA_ERR_MEMORY;
    }
    pattern->text = text;
    pattern->classes = qlora__text_classes_make(env);
    qlora_result r = pattern->classes == NULL ? QLORA_ERR_MEMORY
                                              : qlora__text_copy(env, source, size, &copy, &copied);
    r = r == QLORA_OK
            ? qlora__pattern_make(env, copy, size, pattern->classes, true, &pattern->program)
            : r;
    if (copy != NULL) {
        qlora__env_free(env, copy, copied + 1);
    }
    if (r != QLORA_OK) {
        qlora__text_pattern_free(env, pattern);
        return r;
    }
    text->patterns++;
    *out = pattern;
    return QLORA_OK;
}

qlora_result qlora_text_pattern_close(qlora_text_pattern* pattern) {
    if (pattern != NULL) {
        qlora_text* text = pattern->text;
        qlora__text_enter(text, "qlora_text_pattern_close");
        text->patterns--;
        qlora__text_pattern_free(&text->env, pattern);
    }
    return QLORA_OK;
}

qlora_result qlora_text_pattern_find(qlora_text_pattern* pattern, const char* text, size_t size,
                                     size_t from, qlora_text_match* out) {
    if (pattern == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__env* env = &pattern->text->env;
    qlora__pattern* p = pattern->program;
    qlora__text_view view;
    qlora__text_enter(pattern->text, "qlora_text_pattern_find");
    QLORA__TEXT_NEED(env, out);
    memset(out, 0, sizeof *out);
    if (text == NULL && size > 0) {
        return qlora__env_fail(env, QLORA_ERR_ARGUMENT, "text is NULL");
    }
    memset(&view, 0, sizeof view);
    view.s = (const unsigned char*)text;
    view.end = size;
    view.classes = pattern->classes;
    qlora__pattern_allow(p, size);
    for (size_t at = from, length = 0; at<size; at += length> 0 ? length : 1) {
        size_t end = at;
        QLORA__TRY(qlora__pattern_match(env, p, &view, 0, at, &end));
        if (end > at) {
            bool kept = p->kept[0] <= p->kept[1] && p->kept[1] <= end;
            out->found = true;
            out->whole.begin = at;
            out->whole.end = end;
            out->group.begin = kept ? p->kept[0] : at;
            out->group.end = kept ? p->kept[1] : end;
            return QLORA_OK;
        }
        (void)qlora__text_class_at(&view, at, &length);
    }
    return QLORA_OK;
}
