// The steps that write text: a space (or Metaspace's stand-in) in front of the pieces.
// `open` is false when nothing may be put in front of the first piece; `first` says that it starts
// the whole text.
static bool text__rewrite(const text__step* step, const char* text, text__pieces* pieces,
                          bool first, bool open, text_bytes* out, text_error* error) {
    text__step spaces;
    memset(&spaces, 0, sizeof(spaces));
    char space[] = " ";
    spaces.a = space;
    spaces.a_size = 1;
    spaces.b = step->a;
    spaces.b_size = step->a_size;
    const char* put = step->kind == TEXT__P_METASPACE ? step->a : " ";
    size_t put_size = step->kind == TEXT__P_METASPACE ? step->a_size : 1;
    out->count = 0;
    for (size_t i = 0; i < pieces->count; i++) {
        text__piece* piece = &pieces->data[i];
        const char* from = text + piece->begin;
        size_t size = piece->end - piece->begin;
        bool there =
            size > 0 && (*from == ' ' || (size >= put_size && memcmp(from, put, put_size) == 0));
        bool want =
            step->kind == TEXT__P_PREFIX_SPACE || step->always || (!step->never && first && i == 0);
        piece->begin = out->count;
        if (want && !there && (open || i > 0)) {
            TEXT__TRY(text_bytes_add(out, put, put_size, error));
        }
        if (step->kind == TEXT__P_METASPACE) {
            TEXT__TRY(text__replace(from, size, &spaces, out, error));
        } else {
            TEXT__TRY(text_bytes_add(out, from, size, error));
        }
        piece->end = out->count;
    }
    return true;
}

// One splitting step over all pieces.
static bool text__resplit(text_tok* tok, const text__step* step, text__view view,
                          const text__pieces* in, text__pieces* out, text_error* error) {
    text__pieces* found = &tok->pieces[2];
    out->count = 0;
    for (size_t i = 0; i < in->count; i++) {
        view.end = in->data[i].end;
        if (step->behavior == TEXT__B_ISOLATED) {
            TEXT__TRY(text__step_find(step, &view, in->data[i].begin, out, error));
            continue;
        }
        found->count = 0;
        TEXT__TRY(text__step_find(step, &view, in->data[i].begin, found, error));
        TEXT__TRY(text__step_merge(step->behavior, found, out, error));
    }
    return true;
}

// Text without added tokens, normalised: split and encode.
static bool text__plain_encode(text_tok* tok, const char* text, size_t size, bool first, bool open,
                               text_ids* out, text_error* error) {
    text__view view = text__view_of(tok, text, size);
    text__pieces* now = &tok->pieces[0];
    text__pieces* then = &tok->pieces[1];
    now->count = 0;
    TEXT__TRY(text__pieces_add(now, 0, size, false, error));
    size_t written = 0;
    for (size_t i = 0; i < tok->splitter.count; i++) {
        const text__step* step = &tok->splitter.data[i];
        if (step->kind == TEXT__P_BYTES) {
            view.code_of_byte = tok->code_of_byte;
            continue;
        }
        text__step after = *step;
        bool split = true;
        if (step->kind == TEXT__P_METASPACE || step->kind == TEXT__P_PREFIX_SPACE) {
            text_bytes* buffer = &tok->buffers[written++ % 2 == 0 ? 3 : 0];
            TEXT__TRY(text__rewrite(step, (const char*)view.s, now, first, open, buffer, error));
            view.s = (const unsigned char*)buffer->data;
            split = step->kind == TEXT__P_METASPACE && step->invert;
            after.kind = TEXT__P_STRING;
            after.behavior = TEXT__B_NEXT;
            after.invert = false;
        }
        if (split) {
            TEXT__TRY(text__resplit(tok, &after, view, now, then, error));
            text__pieces* swap = now;
            now = then;
            then = swap;
        }
    }
    for (size_t i = 0; i < now->count; i++) {
        const text__piece* piece = &now->data[i];
        TEXT__TRY(text__piece_encode(tok, (const char*)view.s + piece->begin,
                                     piece->end - piece->begin, out, error));
    }
    return true;
}

// Walks over a text and finds added tokens: the leftmost, the longest.
typedef struct text__scan {
    const text__trie* trie;
    const char* text;
    size_t size;
    size_t at;
    size_t done;   // everything before was handed out
    size_t spaces; // end of the white space seen last
    const text__added* waiting;
    size_t waiting_end;
    bool literal;
} text__scan;

// The longest token that starts here, and its length.
static const text__added* text__scan_here(const text_tok* tok, const text__scan* scan,
                                          size_t* length) {
    const text__added* found = NULL;
    uint32_t node = 0;
    for (size_t i = scan->at; i < scan->size; i++) {
        const text__pair* edge =
            text__pairs_find(&scan->trie->edges, node, (unsigned char)scan->text[i]);
        if (edge == NULL) {
            break;
        }
        node = edge->first;
        if (edge->second != 0) {
            found = &tok->added[edge->second - 1];
            *length = i + 1 - scan->at;
        }
    }
    return found;
}

// single_word: no word character on either side.
static bool text__scan_alone(const text_tok* tok, const text__scan* scan, size_t begin,
                             size_t end) {
    const unsigned word = TEXT__W | TEXT__BIT(JOINER);
    text__view view = text__view_of(tok, scan->text, scan->size);
    size_t length;
    if (text__class_at(&view, end, &length) & word) {
        return false;
    }
    size_t start = begin;
    while (start > 0 && begin - start < 4) {
        start--;
        if (((unsigned char)scan->text[start] & 0xC0) != 0x80) {
            break;
        }
    }
    return begin == 0 || !(text__class_at(&view, start, &length) & word);
}

// The next stretch: plain text (*added is NULL) or a token. False at the end.
static bool text__scan_next(const text_tok* tok, text__scan* scan, size_t* begin, size_t* end,
                            const text__added** added) {
    *added = scan->waiting;
    if (scan->waiting != NULL) {
        scan->waiting = NULL;
        *begin = scan->done;
        *end = scan->done = scan->waiting_end;
        return true;
    }
    while (scan->at < scan->size) {
        size_t length = 0;
        const text__added* found = NULL;
        if (scan->trie->starts[(unsigned char)scan->text[scan->at]]) {
            found = text__scan_here(tok, scan, &length);
        }
        if (found == NULL) {
            scan->at++;
            continue;
        }
        size_t start = scan->at;
        size_t stop = scan->at + length;
        scan->at = stop;
        if ((scan->literal && found->special) ||
            (found->single_word && !text__scan_alone(tok, scan, start, stop))) {
            continue;
        }
        if (found->strip_left) {
            start = text__space_before(tok, scan->text, scan->done, start);
        }
        if (found->strip_right) {
            if (stop >= scan->spaces) { // white space is looked at once only
                text__view view = text__view_of(tok, scan->text, scan->size);
                scan->spaces = text__run(&view, stop, TEXT__WS);
            }
            stop = scan->spaces > stop ? scan->spaces : stop;
        }
        // White space that was stripped may hold the next token. The library then goes back to the
        // end of that one, and so do we.
        *begin = scan->done;
        if (start > scan->done) {
            scan->waiting = found;
            scan->waiting_end = stop;
            *end = scan->done = start;
            return true;
        }
        *added = found;
        *end = scan->done = stop;
        return true;
    }
    *begin = scan->done;
    *end = scan->done = scan->size;
    return *end > *begin;
}

static text__scan text__scan_of(const text__trie* trie, const char* text, size_t size,
                                unsigned flags) {
    text__scan scan;
    memset(&scan, 0, sizeof(scan));
    scan.trie = trie;
    scan.text = text;
    scan.size = size;
    scan.literal = (flags & TEXT_LITERAL) != 0;
    return scan;
}

// A stretch between tokens that are found in the text as given. `first`: it starts the text.
static bool text__stretch_encode(text_tok* tok, const char* text, size_t size, bool first,
                                 unsigned flags, text_ids* out, text_error* error) {
    bool open = !(first && (flags & TEXT_CONTINUE));
    if (tok->normalizer.count > 0) {
        text_bytes* normal;
        TEXT__TRY(text__apply_normalizer(tok, text, size, open, &normal, error));
        text = normal->data;
        size = normal->count;
    }
    if (tok->normalized_trie.nodes == 0) {
        return size == 0 || text__plain_encode(tok, text, size, first, open, out, error);
    }
    text__scan scan = text__scan_of(&tok->normalized_trie, text, size, flags);
    size_t begin;
    size_t end;
    const text__added* added;
    while (text__scan_next(tok, &scan, &begin, &end, &added)) {
        if (added != NULL) {
            TEXT__TRY(text_ids_add(out, added->id, error));
        } else {
            bool start = begin == 0;
            TEXT__TRY(text__plain_encode(tok, text + begin, end - begin, first && start,
                                         open || !start, out, error));
        }
    }
    return true;
}

static bool text__ids_append(text_ids* ids, const text_ids* more, text_error* error) {
    TEXT__TRY(text__ids_room(ids, more->count, error));
    if (more->count > 0) {
        memcpy(ids->data + ids->count, more->data, more->count * sizeof(int32_t));
        ids->count += more->count;
    }
    return true;
}

bool text_encode(text_tok* tok, const char* text, size_t length, unsigned flags, text_ids* out,
                 text_error* error) {
    TEXT__TRY(!(flags & TEXT_SPECIAL) || text__ids_append(out, &tok->prefix, error));
    text__scan scan = text__scan_of(&tok->raw_trie, text, length, flags);
    size_t begin;
    size_t end;
    const text__added* added;
    while (text__scan_next(tok, &scan, &begin, &end, &added)) {
        if (added != NULL) {
            TEXT__TRY(text_ids_add(out, added->id, error));
        } else {
            TEXT__TRY(text__stretch_encode(tok, text + begin, end - begin, begin == 0, flags, out,
                                           error));
        }
    }
    return !(flags & TEXT_SPECIAL) || text__ids_append(out, &tok->suffix, error);
}
