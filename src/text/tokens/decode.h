// Replaces in out[begin..).
static qlora_result qlora__text_replace_tail(qlora__env* env, const qlora__text_step* step,
                                             qlora_text_bytes* out, size_t begin) {
    size_t size = out->count - begin;
    if (size < step->a_size || memchr(out->data + begin, step->a[0], size) == NULL) {
        return QLORA_OK;
    }
    qlora_text_bytes work;
    memset(&work, 0, sizeof(work));
    qlora_result r = qlora__text_replace(env, out->data + begin, size, step, &work);
    out->count = begin;
    r = r == QLORA_OK ? qlora__text_bytes_add(env, out, work.data, work.count) : r;
    qlora__text_bytes_free(env, &work);
    return r;
}

// Removes up to `start` copies of a at `begin`, and up to `stop` at the end.
static void qlora__text_strip_tail(const qlora__text_step* step, qlora_text_bytes* out,
                                   size_t begin) {
    size_t unit = step->a_size;
    size_t from = begin;
    for (size_t i = 0; i < step->start && out->count - from >= unit &&
                       memcmp(out->data + from, step->a, unit) == 0;
         i++) {
        from += unit;
    }
    for (size_t i = 0; i < step->stop && out->count - from >= unit &&
                       memcmp(out->data + out->count - unit, step->a, unit) == 0;
         i++) {
        out->count -= unit;
    }
    if (from > begin) {
        memmove(out->data + begin, out->data + from, out->count - from);
        out->count -= from - begin;
    }
}

static qlora_result qlora__text_bytes_tail(qlora__env* env, const qlora_text_tok* tok,
                                           qlora_text_bytes* out, size_t begin) {
    qlora_text_bytes work;
    memset(&work, 0, sizeof(work));
    bool known = false;
    qlora_result r =
        qlora__text_unstand(env, tok, out->data + begin, out->count - begin, &work, &known);
    if (r == QLORA_OK && known) {
        out->count = begin;
        r = qlora__text_bytes_add(env, out, work.data, work.count);
    }
    qlora__text_bytes_free(env, &work);
    return r;
}

static qlora_result qlora__text_metaspace_tail(qlora__env* env, const qlora__text_step* step,
                                               qlora_text_bytes* out, size_t begin, bool first) {
    qlora__text_step replace = *step;
    char space[] = " ";
    replace.b = space;
    replace.b_size = first && !step->never ? 0 : 1; // all of them, as the library does
    return qlora__text_replace_tail(env, &replace, out, begin);
}

// The steps that look at one token, up to the one that joins them. *whole is the first step that
// looks at the whole text.
static qlora_result qlora__text_token_decode(qlora__env* env, const qlora_text_tok* tok, int32_t id,
                                             bool first, qlora_text_bytes* out, size_t* whole) {
    size_t begin = out->count;
    bool fused = false;
    size_t i;
    if (tok->decoder.count > 0 && tok->decoder.data[0].kind == QLORA__TEXT_D_JOIN && !first) {
        QLORA__TRY(qlora__text_bytes_add(env, out, " ", 1));
    }
    QLORA__TRY(
        qlora__text_bytes_add(env, out, tok->names.data + tok->spans[id].at, tok->spans[id].size));
    for (i = 0; i < tok->decoder.count && !fused; i++) {
        const qlora__text_step* step = &tok->decoder.data[i];
        if (step->kind == QLORA__TEXT_D_REPLACE) {
            QLORA__TRY(qlora__text_replace_tail(env, step, out, begin));
        } else if (step->kind == QLORA__TEXT_D_BYTE_FALLBACK) {
            int byte = qlora__text_byte_token(out->data + begin, out->count - begin);
            if (byte >= 0) {
                out->data[begin] = (char)(unsigned char)byte;
                out->count = begin + 1;
            }
        } else if (step->kind == QLORA__TEXT_D_BYTES) {
            QLORA__TRY(qlora__text_bytes_tail(env, tok, out, begin));
        } else if (step->kind == QLORA__TEXT_D_STRIP) {
            qlora__text_strip_tail(step, out, begin);
        } else if (step->kind == QLORA__TEXT_D_METASPACE) {
            QLORA__TRY(qlora__text_metaspace_tail(env, step, out, begin, first));
        }
        fused = step->kind == QLORA__TEXT_D_FUSE || step->kind == QLORA__TEXT_D_BYTES;
    }
    *whole = i;
    return QLORA_OK;
}

static bool qlora__text_decoder_has(const qlora_text_tok* tok, int kind) {
    for (size_t i = 0; i < tok->decoder.count; i++) {
        if (tok->decoder.data[i].kind == kind) {
            return true;
        }
    }
    return false;
}

// Repairs out[begin..): one U+FFFD for each broken character or, with `each_byte`, for every byte
// of an invalid run of byte tokens.
static qlora_result qlora__text_repair_tail(qlora__env* env, qlora_text_bytes* out, size_t begin,
                                            bool each_byte) {
    qlora_text_bytes work;
    memset(&work, 0, sizeof(work));
    size_t used;
    size_t size = out->count - begin;
    if (size == 0) {
        return QLORA_OK; // out->data may be NULL
    }
    qlora_result r = qlora__text_utf8_repair(env, out->data + begin, size, false, &used, &work);
    bool same =
        r == QLORA_OK && work.count == size && memcmp(work.data, out->data + begin, size) == 0;
    if (r == QLORA_OK && !same) {
        out->count = begin;
        if (each_byte) {
            for (size_t i = 0; r == QLORA_OK && i < size; i++) {
                r = qlora__text_bytes_add(env, out, "\xEF\xBF\xBD", 3);
            }
        } else {
            r = qlora__text_bytes_add(env, out, work.data, work.count);
        }
    }
    qlora__text_bytes_free(env, &work);
    return r;
}

static qlora_result qlora__text_decode(qlora__env* env, const qlora_text_tok* tok,
                                       const int32_t* ids, size_t count, uint32_t flags,
                                       qlora_text_bytes* out) {
    size_t begin = out->count;
    size_t run = SIZE_MAX; // start of a run of byte tokens
    size_t whole = tok->decoder.count;
    bool first = true;
    bool replace = (flags & QLORA_TEXT_REPLACE) != 0;
    bool runs = replace && qlora__text_decoder_has(tok, QLORA__TEXT_D_BYTE_FALLBACK);
    for (size_t i = 0; i < count; i++) {
        if (!qlora__text_tok_has(tok, ids[i], QLORA__TEXT_K_EXISTS) ||
            ((flags & QLORA_TEXT_SKIP) &&
             qlora__text_tok_has(tok, ids[i], QLORA__TEXT_K_SPECIAL))) {
            continue;
        }
        bool byte = (tok->kinds[ids[i]] & QLORA__TEXT_K_BYTE) != 0;
        if (runs && !byte && run != SIZE_MAX) {
            QLORA__TRY(qlora__text_repair_tail(env, out, run, true));
            run = SIZE_MAX;
        }
        if (byte && run == SIZE_MAX) {
            run = out->count;
        }
        QLORA__TRY(qlora__text_token_decode(env, tok, ids[i], first, out, &whole));
        first = false;
    }
    if (runs && run != SIZE_MAX) {
        QLORA__TRY(qlora__text_repair_tail(env, out, run, true));
    }
    for (; !first && whole < tok->decoder.count; whole++) {
        if (tok->decoder.data[whole].kind == QLORA__TEXT_D_STRIP) {
            qlora__text_strip_tail(&tok->decoder.data[whole], out, begin);
        }
    }
    return replace ? qlora__text_repair_tail(env, out, begin, false) : QLORA_OK;
}

qlora_result qlora_text_decode(qlora_text_tok* tok, const int32_t* ids, size_t count,
                               uint32_t flags, qlora_text_bytes* out) {
    if (tok == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__env* env = &tok->text->env;
    qlora__text_enter(tok->text, "qlora_text_decode");
    QLORA__TEXT_NEED(env, out);
    if (ids == NULL && count > 0) {
        return qlora__env_fail(env, QLORA_ERR_ARGUMENT, "ids is NULL");
    }
    size_t before = out->count;
    qlora_result r = qlora__text_decode(env, tok, ids, count, flags, out);
    out->count = r == QLORA_OK ? out->count : before;
    return r;
}

// Removes, piece by piece, what the whole-text Strip steps remove at the start.
static void qlora__text_stream_strip(const qlora_text_tok* tok, qlora_text_stream* stream,
                                     size_t whole, qlora_text_bytes* work) {
    for (size_t i = whole; i < tok->decoder.count; i++) {
        const qlora__text_step* step = &tok->decoder.data[i];
        size_t unit = step->a_size;
        if (step->kind != QLORA__TEXT_D_STRIP) {
            continue;
        }
        size_t cut = 0;
        while (stream->stripped < step->start && work->count - cut >= unit &&
               memcmp(work->data + cut, step->a, unit) == 0) {
            cut += unit;
            stream->stripped++;
        }
        if (work->count > cut) {
            stream->stripped = SIZE_MAX;
        }
        memmove(work->data, work->data + cut, work->count - cut);
        work->count -= cut;
        return; // no known file has more than one such step
    }
}

static qlora_result qlora__text_stream_push(qlora__env* env, const qlora_text_tok* tok,
                                            qlora_text_stream* stream, int32_t id,
                                            qlora_text_bytes* work, qlora_text_bytes* out) {
    size_t whole = 0;
    size_t used = 0;
    // `work` receives the held bytes, followed by those of the token
    QLORA__TRY(qlora__text_token_decode(env, tok, id, stream->emitted == 0, work, &whole));
    qlora_text_stream next = *stream;
    next.emitted++;
    if (work->count > 0) {
        qlora__text_stream_strip(tok, &next, whole, work);
    }
    size_t held = stream->held_count;
    QLORA__TRY(qlora__text_bytes_room(env, work, held));
    if (held > 0) {
        memmove(work->data + held, work->data, work->count);
        memcpy(work->data, stream->held, held);
        work->count += held;
    }
    QLORA__TRY(qlora__text_utf8_repair(env, work->data, work->count, true, &used, out));
    next.held_count = work->count - used; // at most three
    if (next.held_count > 0) {
        memcpy(next.held, work->data + used, next.held_count);
    }
    *stream = next;
    return QLORA_OK;
}

qlora_result qlora_text_stream_push(qlora_text_tok* tok, qlora_text_stream* stream, int32_t id,
                                    uint32_t flags, qlora_text_bytes* out) {
    if (tok == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__env* env = &tok->text->env;
    qlora__text_enter(tok->text, "qlora_text_stream_push");
    QLORA__TEXT_NEED(env, stream);
    QLORA__TEXT_NEED(env, out);
    if (!qlora__text_tok_has(tok, id, QLORA__TEXT_K_EXISTS) ||
        ((flags & QLORA_TEXT_SKIP) && qlora__text_tok_has(tok, id, QLORA__TEXT_K_SPECIAL))) {
        return QLORA_OK;
    }
    size_t before = out->count;
    qlora_text_bytes work;
    memset(&work, 0, sizeof(work));
    qlora_result r = qlora__text_stream_push(env, tok, stream, id, &work, out);
    qlora__text_bytes_free(env, &work);
    out->count = r == QLORA_OK ? out->count : before;
    return r;
}

qlora_result qlora_text_stream_end(qlora_text_tok* tok, qlora_text_stream* stream,
                                   qlora_text_bytes* out) {
    if (tok == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__env* env = &tok->text->env;
    qlora__text_enter(tok->text, "qlora_text_stream_end");
    QLORA__TEXT_NEED(env, stream);
    QLORA__TEXT_NEED(env, out);
    size_t used = 0;
    size_t before = out->count;
    qlora_result r =
        qlora__text_utf8_repair(env, stream->held, stream->held_count, false, &used, out);
    out->count = r == QLORA_OK ? out->count : before;
    if (r == QLORA_OK) {
        memset(stream, 0, sizeof(*stream));
    }
    return r;
}
