// From a rendering to ids and labels.

typedef struct qlora__text_output {
    qlora_text_ids* ids;
    qlora_text_ids* labels; // may be NULL
    size_t start;           // of this sample, in both
    size_t labels_start;
    bool complete; // keep what follows the last trained token
} qlora__text_output;

static qlora__text_output qlora__text_output_start(qlora_text_ids* ids, qlora_text_ids* labels) {
    qlora__text_output o;
    o.ids = ids;
    o.labels = labels;
    o.start = ids->count;
    o.labels_start = labels != NULL ? labels->count : 0;
    o.complete = false;
    return o;
}

static qlora_result qlora__text_output_label(qlora__env* env, qlora__text_output* o, bool trained) {
    while (o->labels != NULL && o->labels->count - o->labels_start < o->ids->count - o->start) {
        int32_t id = o->ids->data[o->start + (o->labels->count - o->labels_start)];
        QLORA__TRY(qlora__text_ids_add(env, o->labels, trained ? id : -100));
    }
    return QLORA_OK;
}

static bool qlora__text_is_marker(const qlora_text_tok* tok, int32_t id) {
    return qlora__text_tok_has(tok, id, QLORA__TEXT_K_ADDED | QLORA__TEXT_K_SPECIAL);
}

// Whether EOS is a mere word of the vocabulary, which no text is searched for. A configuration may
// also name any other word by mistake, so it must look like a marker.
static bool qlora__text_chat_eos_word(const qlora_text_chat* chat) {
    const qlora__text_owned* name = &chat->tokens[1];
    return name->size > 2 && (name->data[0] == '<' || name->data[0] == '[') &&
           !qlora__text_is_marker(chat->tok, chat->eos) &&
           qlora__text_name_is(chat->tok, chat->eos, name->data, name->size);
}

static bool qlora__text_chat_marker(const qlora_text_chat* chat, int32_t id) {
    return qlora__text_is_marker(chat->tok, id) ||
           (id == chat->eos && qlora__text_chat_eos_word(chat));
}

// The ids of one piece of the text of a built-in format: EOS is its id, never its letters.
static qlora_result qlora__text_output_ids(qlora__env* env, qlora__text_output* o,
                                           const qlora_text_chat* chat, const char* text,
                                           size_t size) {
    const qlora__text_owned* name = &chat->tokens[1];
    bool word = qlora__text_chat_eos_word(chat);
    for (size_t at = 0; at < size;) {
        size_t hit = SIZE_MAX;
        if (word) {
            hit = qlora__jin_find_bytes(text, size, at, name->data, name->size);
        }
        size_t end = hit != SIZE_MAX ? hit : size;
        size_t count = o->ids->count;
        // Text that follows plain text continues it: no space is prepended.
        bool fresh = count == o->start || qlora__text_chat_marker(chat, o->ids->data[count - 1]);
        if (end > at) {
            QLORA__TRY(qlora__text_encode(env, chat->tok, text + at, end - at,
                                          fresh ? 0u : (uint32_t)QLORA_TEXT_CONTINUE, o->ids));
        }
        if (hit != SIZE_MAX) {
            QLORA__TRY(qlora__text_ids_add(env, o->ids, chat->eos));
        }
        at = hit != SIZE_MAX ? hit + name->size : size;
    }
    return QLORA_OK;
}

// One piece of the text of a built-in format, all trained or all not.
static qlora_result qlora__text_output_piece(qlora__env* env, qlora__text_output* o,
                                             const qlora_text_chat* chat, const char* text,
                                             size_t size, bool trained) {
    size_t from = o->ids->count;
    QLORA__TRY(qlora__text_output_ids(env, o, chat, text, size));
    bool first = from == o->start;
    if (first) {
        QLORA__TRY(qlora__text_bos_first(env, chat->bos, o->ids, from));
    }
    if (first && trained && o->ids->count > from && o->ids->data[from] == chat->bos &&
        o->labels != NULL) {
        QLORA__TRY(qlora__text_ids_add(env, o->labels, -100)); // BOS is never generated
    }
    // a built-in format may end with a marker that this tokenizer does not have
    size_t count = o->ids->count;
    if (trained && chat->built_in && chat->eos >= 0 &&
        (count == from || !qlora__text_chat_marker(chat, o->ids->data[count - 1]))) {
        QLORA__TRY(qlora__text_ids_add(env, o->ids, chat->eos));
    }
    return qlora__text_output_label(env, o, trained);
}

// The markers in a text: how many, whether there is nothing else but whitespace, whether it ends
// with one, and the first one if nothing but whitespace comes before it.
typedef struct qlora__text_marks_seen {
    size_t count;
    size_t run; // at the start of the text, with nothing but whitespace between them
    bool alone;
    bool last;
    int32_t first; // -1: something else comes first
    size_t first_end;
    int32_t final; // the last one, or -1
} qlora__text_marks_seen;

static qlora_result qlora__text_see_markers(qlora__env* env, const qlora_text_chat* chat,
                                            const char* text, size_t size,
                                            qlora__text_marks_seen* seen) {
    const qlora_text_tok* tok = chat->tok;
    qlora_text_ids ids;
    size_t at = 0;
    memset(&ids, 0, sizeof ids);
    memset(seen, 0, sizeof *seen);
    seen->first = -1;
    seen->final = -1;
    seen->alone = true;
    qlora_result r = size == 0 ? QLORA_OK
                               : qlora__text_encode(env, chat->tok, text, size,
                                                    (uint32_t)QLORA_TEXT_CONTINUE, &ids);
    for (size_t i = 0; r == QLORA_OK && i < ids.count; i++) {
        if (!qlora__text_is_marker(tok, ids.data[i])) {
            continue;
        }
        qlora__text_span name = tok->spans[ids.data[i]];
        size_t hit = qlora__jin_find_bytes(text, size, at, tok->names.data + name.at, name.size);
        if (hit == SIZE_MAX) {
            continue;
        }
        seen->alone = seen->alone && qlora__jin_skip_space(text, hit, at) == hit;
        if (seen->count == 0 && seen->alone) {
            seen->first = ids.data[i];
            seen->first_end = hit + name.size;
        }
        seen->final = ids.data[i];
        seen->count++;
        seen->run += seen->alone ? 1 : 0;
        at = hit + name.size;
    }
    seen->alone = seen->alone && qlora__jin_skip_space(text, size, at) == size;
    seen->last = seen->count > 0 && at == size;
    qlora__text_ids_free(env, &ids);
    return r;
}

// ---- a whole text

// A stretch of plain text between two added tokens, and the spans from `at` on.
typedef struct qlora__text_stretch {
    const char* text;
    size_t begin;
    size_t end;
    const qlora_text_spans* spans;
    size_t at; // the first span that ends behind `begin`
} qlora__text_stretch;

// Whether [begin, end) overlaps a span, and whether it also has something outside of that span.
static bool qlora__text_stretch_marked(const qlora__text_stretch* s, size_t begin, size_t end,
                                       bool* mixed) {
    bool marked = false;
    *mixed = false;
    for (size_t i = s->at; i < s->spans->count && s->spans->data[i].begin < end; i++) {
        const qlora_text_span* span = &s->spans->data[i];
        if (span->end > begin && span->end > span->begin) {
            *mixed = *mixed || marked || span->begin > begin || span->end < end;
            marked = true;
        }
    }
    return marked;
}

// The last place in the stretch where a span begins or ends.
static size_t qlora__text_stretch_last(const qlora__text_stretch* s) {
    size_t last = s->begin;
    for (size_t i = s->at; i < s->spans->count && s->spans->data[i].begin < s->end; i++) {
        const qlora_text_span* span = &s->spans->data[i];
        last = span->begin > last ? span->begin : last;
        last = span->end > last && span->end < s->end ? span->end : last;
    }
    return last;
}

// Labels the tokens of a stretch by the bytes they stand for; the first `skip` bytes are a space
// that the tokenizer prepended. *fits is false if they are not the bytes of the text (it was
// normalised), or if a token is mixed and that is not wanted.
static qlora_result qlora__text_stretch_label(qlora__env* env, const qlora__text_stretch* s,
                                              qlora__text_output* o, const qlora_text_chat* chat,
                                              size_t from, size_t skip, bool* fits) {
    qlora_text_bytes bytes;
    size_t at = s->begin;
    size_t last = qlora__text_stretch_last(s);
    size_t whole = 0;
    bool mixed = false;
    qlora_result r = QLORA_OK;
    memset(&bytes, 0, sizeof bytes);
    *fits = true;
    for (size_t i = from; r == QLORA_OK && *fits && at < last && i < o->ids->count; i++) {
        bytes.count = 0;
        r = qlora__text_token_decode(env, chat->tok, o->ids->data[i], false, &bytes, &whole);
        size_t size = r == QLORA_OK && bytes.count >= skip ? bytes.count - skip : SIZE_MAX;
        *fits = size <= s->end - at && (skip == 0 || bytes.data[0] == ' ') &&
                (size == 0 || memcmp(s->text + at, bytes.data + skip, size) == 0);
        bool marked = *fits && qlora__text_stretch_marked(s, at, at + size, &mixed);
        *fits = *fits && (chat->blocks || !mixed);
        at += *fits ? size : 0;
        skip = 0;
        if (*fits && o->labels != NULL) {
            r = qlora__text_ids_add(env, o->labels, marked ? o->ids->data[i] : -100);
        }
    }
    *fits = *fits && at >= last;
    qlora__text_bytes_free(env, &bytes);
    QLORA__TRY(r);
    return *fits
               ? qlora__text_output_label(env, o, qlora__text_stretch_marked(s, at, s->end, &mixed))
               : QLORA_OK;
}

// Encodes a stretch in which a span begins or ends. As one text, like the rest; a token with both
// trained and other text is trained if the template has generation blocks, as in transformers.
// Otherwise the text is encoded in parts: at inference, the prompt ends where the span begins.
static qlora_result qlora__text_stretch_cut(qlora__env* env, const qlora__text_stretch* s,
                                            qlora__text_output* o, const qlora_text_chat* chat) {
    size_t from = o->ids->count;
    size_t labels = o->labels != NULL ? o->labels->count : 0;
    bool fits = false;
    bool mixed = false;
    QLORA__TRY(qlora__text_stretch_encode(env, chat->tok, s->text + s->begin, s->end - s->begin,
                                          s->begin == 0, 0u, o->ids));
    for (size_t skip = 0; skip < 2; skip++) {
        QLORA__TRY(qlora__text_stretch_label(env, s, o, chat, from, skip, &fits));
        if (fits) {
            return QLORA_OK;
        }
        if (o->labels != NULL) {
            o->labels->count = labels;
        }
    }
    o->ids->count = from;
    for (size_t begin = s->begin, end = 0; begin < s->end; begin = end) {
        end = s->end;
        for (size_t i = s->at; i < s->spans->count && s->spans->data[i].begin < end; i++) {
            const qlora_text_span* span = &s->spans->data[i];
            size_t cut = span->begin > begin ? span->begin : span->end > begin ? span->end : end;
            end = cut < end ? cut : end;
        }
        bool first = begin == s->begin;
        QLORA__TRY(qlora__text_stretch_encode(env, chat->tok, s->text + begin, end - begin,
                                              !first || begin == 0,
                                              first ? 0u : (uint32_t)QLORA_TEXT_CONTINUE, o->ids));
        QLORA__TRY(
            qlora__text_output_label(env, o, qlora__text_stretch_marked(s, begin, end, &mixed)));
    }
    return QLORA_OK;
}

// The whole text at once, as transformers encodes it.
static qlora_result qlora__text_output_marked(qlora__env* env, qlora__text_output* o,
                                              const qlora_text_chat* chat, const char* text,
                                              size_t size, const qlora_text_spans* spans) {
    qlora_text_tok* tok = chat->tok;
    qlora__text_scan scan = qlora__text_scan_of(&tok->raw_trie, text, size, 0u);
    const qlora__text_added* added = NULL;
    qlora__text_stretch s;
    memset(&s, 0, sizeof s);
    s.text = text;
    s.spans = spans;
    while (qlora__text_scan_next(tok, &scan, &s.begin, &s.end, &added)) {
        bool mixed = false;
        while (s.at < spans->count && spans->data[s.at].end <= s.begin) {
            s.at++;
        }
        bool marked = qlora__text_stretch_marked(&s, s.begin, s.end, &mixed);
        if (added != NULL) {
            QLORA__TRY(qlora__text_ids_add(env, o->ids, added->id));
        } else if (mixed) {
            QLORA__TRY(qlora__text_stretch_cut(env, &s, o, chat));
        } else {
            QLORA__TRY(qlora__text_stretch_encode(env, tok, text + s.begin, s.end - s.begin,
                                                  s.begin == 0, 0u, o->ids));
        }
        QLORA__TRY(qlora__text_output_label(env, o, marked));
    }
    size_t count = o->ids->count - o->start;
    if (chat->bos >= 0 && (count == 0 || o->ids->data[o->start] != chat->bos)) {
        QLORA__TRY(qlora__text_ids_add(env, o->ids, chat->bos));
        QLORA__TRY(qlora__text_output_label(env, o, false));
        memmove(o->ids->data + o->start + 1, o->ids->data + o->start, count * sizeof(int32_t));
        o->ids->data[o->start] = chat->bos;
        if (o->labels != NULL) {
            int32_t* labels = o->labels->data + o->labels_start;
            memmove(labels + 1, labels, count * sizeof(int32_t));
        }
    }
    if (chat->bos >= 0 && o->labels != NULL) {
        o->labels->data[o->labels_start] = -100; // BOS is never generated
    }
    return QLORA_OK;
}

// The text of a built-in format, piece by piece: an answer without an end marker gets one.
static qlora_result qlora__text_output_pieces(qlora__env* env, qlora__text_output* o,
                                              const qlora_text_chat* chat, const char* text,
                                              size_t size, const qlora_text_spans* spans) {
    size_t at = 0;
    for (size_t i = 0; i < spans->count; i++) {
        size_t begin = spans->data[i].begin;
        size_t end = spans->data[i].end;
        QLORA__TRY(qlora__text_output_piece(env, o, chat, text + at, begin - at, false));
        if (end > begin) {
            QLORA__TRY(qlora__text_output_piece(env, o, chat, text + begin, end - begin, true));
        }
        at = end;
    }
    return at < size || o->ids->count == o->start
               ? qlora__text_output_piece(env, o, chat, text + at, size - at, false)
               : QLORA_OK;
}

// A whole text. Spans are in order and do not overlap.
static qlora_result qlora__text_output_text(qlora__env* env, qlora__text_output* o,
                                            const qlora_text_chat* chat,
                                            const qlora_text_bytes* text,
                                            const qlora_text_spans* spans) {
    const char* data = text->count > 0 ? text->data : "";
    size_t last = text->count;
    size_t before = 0;
    for (size_t i = 0; i < spans->count; i++) {
        if (spans->data[i].begin < before || spans->data[i].end > text->count) {
            return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                                   "the template's generation blocks overlap");
        }
        before = spans->data[i].end;
    }
    bool cuts = o->labels != NULL && !o->complete;
    if (cuts && spans->count == 0 && last > 0) { // no whitespace after the last marker
        qlora__text_marks_seen seen;
        size_t cut = qlora__jin_back_space(data, 0, last);
        QLORA__TRY(qlora__text_see_markers(env, chat, data, cut, &seen));
        last = seen.last ? cut : last;
    }
    QLORA__TRY(chat->built_in ? qlora__text_output_pieces(env, o, chat, data, last, spans)
                              : qlora__text_output_marked(env, o, chat, data, last, spans));
    // what follows the last trained token teaches nothing
    size_t count = o->ids->count - o->start;
    while (cuts && count > 0 && o->labels->data[o->labels_start + count - 1] == -100) {
        count--;
    }
    if (cuts && count > 0) {
        o->ids->count = o->start + count;
        o->labels->count = o->labels_start + count;
    }
    return QLORA_OK;
}
