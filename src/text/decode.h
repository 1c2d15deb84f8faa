// Replaces in the end of `out`, from `begin`.
static bool text__replace_tail(const text__step* step, text_bytes* out, size_t begin,
                               text_error* error) {
    size_t size = out->count - begin;
    if (size < step->a_size || memchr(out->data + begin, step->a[0], size) == NULL) {
        return true;
    }
    text_bytes work;
    memset(&work, 0, sizeof(work));
    bool good = text__replace(out->data + begin, size, step, &work, error);
    out->count = begin;
    good = good && text_bytes_add(out, work.data, work.count, error);
    text_bytes_free(&work);
    return good;
}

// Takes up to `start` copies of a away at `begin`, and up to `stop` at the end.
static void text__strip_tail(const text__step* step, text_bytes* out, size_t begin) {
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

static bool text__bytes_tail(const text_tok* tok, text_bytes* out, size_t begin,
                             text_error* error) {
    text_bytes work;
    memset(&work, 0, sizeof(work));
    bool known;
    bool good = text__unstand(tok, out->data + begin, out->count - begin, &work, &known, error);
    if (good && known) {
        out->count = begin;
        good = text_bytes_add(out, work.data, work.count, error);
    }
    text_bytes_free(&work);
    return good;
}

static bool text__metaspace_tail(const text__step* step, text_bytes* out, size_t begin, bool first,
                                 text_error* error) {
    text__step replace = *step;
    char space[] = " ";
    replace.b = space;
    replace.b_size = first && !step->never ? 0 : 1; // all of them, as the library does
    return text__replace_tail(&replace, out, begin, error);
}

// The steps that look at one token, until everything is put together. Returns in *whole the first
// step that looks at the whole text.
static bool text__token_decode(const text_tok* tok, int32_t id, bool first, text_bytes* out,
                               size_t* whole, text_error* error) {
    size_t begin = out->count;
    bool fused = false;
    size_t i;
    if (tok->decoder.count > 0 && tok->decoder.data[0].kind == TEXT__D_JOIN && !first) {
        TEXT__TRY(text_bytes_add(out, " ", 1, error));
    }
    TEXT__TRY(text_bytes_add(out, tok->names.data + tok->spans[id].at, tok->spans[id].size, error));
    for (i = 0; i < tok->decoder.count && !fused; i++) {
        const text__step* step = &tok->decoder.data[i];
        if (step->kind == TEXT__D_REPLACE) {
            TEXT__TRY(text__replace_tail(step, out, begin, error));
        } else if (step->kind == TEXT__D_BYTE_FALLBACK) {
            int byte = text__byte_token(out->data + begin, out->count - begin);
            if (byte >= 0) {
                out->data[begin] = (char)(unsigned char)byte;
                out->count = begin + 1;
            }
        } else if (step->kind == TEXT__D_BYTES) {
            TEXT__TRY(text__bytes_tail(tok, out, begin, error));
        } else if (step->kind == TEXT__D_STRIP) {
            text__strip_tail(step, out, begin);
        } else if (step->kind == TEXT__D_METASPACE) {
            TEXT__TRY(text__metaspace_tail(step, out, begin, first, error));
        }
        fused = step->kind == TEXT__D_FUSE || step->kind == TEXT__D_BYTES;
    }
    *whole = i;
    return true;
}

static bool text__decoder_has(const text_tok* tok, int kind) {
    for (size_t i = 0; i < tok->decoder.count; i++) {
        if (tok->decoder.data[i].kind == kind) {
            return true;
        }
    }
    return false;
}

// Repairs out[begin..): one U+FFFD for each start of a character, or for every byte of a run of
// byte tokens that is not UTF-8.
static bool text__repair_tail(text_bytes* out, size_t begin, bool each_byte, text_error* error) {
    text_bytes work;
    memset(&work, 0, sizeof(work));
    size_t used;
    size_t size = out->count - begin;
    if (size == 0) {
        return true; // and out->data may be NULL
    }
    bool good = text__utf8_repair(out->data + begin, size, false, &used, &work, error);
    bool same = good && work.count == size && memcmp(work.data, out->data + begin, size) == 0;
    if (good && !same) {
        out->count = begin;
        if (each_byte) {
            for (size_t i = 0; good && i < size; i++) {
                good = text_bytes_add(out, "\xEF\xBF\xBD", 3, error);
            }
        } else {
            good = text_bytes_add(out, work.data, work.count, error);
        }
    }
    text_bytes_free(&work);
    return good;
}

bool text_decode(const text_tok* tok, const int32_t* ids, size_t count, unsigned flags,
                 text_bytes* out, text_error* error) {
    size_t begin = out->count;
    size_t run = SIZE_MAX; // start of a run of byte tokens
    size_t whole = tok->decoder.count;
    bool first = true;
    bool replace = (flags & TEXT_REPLACE) != 0;
    bool runs = replace && text__decoder_has(tok, TEXT__D_BYTE_FALLBACK);
    for (size_t i = 0; i < count; i++) {
        if (!text__tok_has(tok, ids[i], TEXT__K_EXISTS) ||
            ((flags & TEXT_SKIP) && text_tok_is_special(tok, ids[i]))) {
            continue;
        }
        bool byte = (tok->kinds[ids[i]] & TEXT__K_BYTE) != 0;
        if (runs && !byte && run != SIZE_MAX) {
            TEXT__TRY(text__repair_tail(out, run, true, error));
            run = SIZE_MAX;
        }
        if (byte && run == SIZE_MAX) {
            run = out->count;
        }
        TEXT__TRY(text__token_decode(tok, ids[i], first, out, &whole, error));
        first = false;
    }
    if (runs && run != SIZE_MAX) {
        TEXT__TRY(text__repair_tail(out, run, true, error));
    }
    for (; !first && whole < tok->decoder.count; whole++) {
        if (tok->decoder.data[whole].kind == TEXT__D_STRIP) {
            text__strip_tail(&tok->decoder.data[whole], out, begin);
        }
    }
    return !replace || text__repair_tail(out, begin, false, error);
}

// Takes away what the whole-text Strip steps take at the start, as it comes.
static void text__stream_strip(const text_tok* tok, text_stream* stream, size_t whole,
                               text_bytes* work) {
    for (size_t i = whole; i < tok->decoder.count; i++) {
        const text__step* step = &tok->decoder.data[i];
        size_t unit = step->a_size;
        if (step->kind != TEXT__D_STRIP) {
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
        return; // one such step: more are not in use
    }
}

bool text_stream_push(const text_tok* tok, text_stream* stream, int32_t id, unsigned flags,
                      text_bytes* out, text_error* error) {
    if (!text__tok_has(tok, id, TEXT__K_EXISTS) ||
        ((flags & TEXT_SKIP) && text_tok_is_special(tok, id))) {
        return true;
    }
    text_bytes work;
    text_bytes joined;
    memset(&work, 0, sizeof(work));
    memset(&joined, 0, sizeof(joined));
    size_t whole;
    size_t used = 0;
    bool good = text__token_decode(tok, id, stream->emitted == 0, &work, &whole, error);
    if (good) {
        stream->emitted++;
        if (work.count > 0) {
            text__stream_strip(tok, stream, whole, &work);
        }
        good = text_bytes_add(&joined, stream->held, stream->held_count, error) &&
               text_bytes_add(&joined, work.data, work.count, error) &&
               text__utf8_repair(joined.data, joined.count, true, &used, out, error);
    }
    if (good) {
        stream->held_count = joined.count - used; // at most three
        if (stream->held_count > 0) {
            memcpy(stream->held, joined.data + used, stream->held_count);
        }
    }
    text_bytes_free(&work);
    text_bytes_free(&joined);
    return good;
}

bool text_stream_end(text_stream* stream, text_bytes* out, text_error* error) {
    size_t used;
    bool good = text__utf8_repair(stream->held, stream->held_count, false, &used, out, error);
    memset(stream, 0, sizeof(*stream));
    return good;
}
