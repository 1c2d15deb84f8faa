// The steps that change the text: a space (or Metaspace's stand-in) before the pieces. `open` is
// false when nothing may be prepended to the first piece; `first`: it starts the whole text.
static qlora_result qlora__text_rewrite(qlora__env* env, const qlora__text_step* step,
                                        const char* text, qlora__text_pieces* pieces, bool first,
                                        bool open, qlora_text_bytes* out) {
    qlora__text_step spaces;
    memset(&spaces, 0, sizeof(spaces));
    char space[] = " ";
    spaces.a = space;
    spaces.a_size = 1;
    spaces.b = step->a;
    spaces.b_size = step->a_size;
    const char* put = step->kind == QLORA__TEXT_P_METASPACE ? step->a : " ";
    size_t put_size = step->kind == QLORA__TEXT_P_METASPACE ? step->a_size : 1;
    out->count = 0;
    for (size_t i = 0; i < pieces->count; i++) {
        qlora__text_piece* piece = &pieces->data[i];
        const char* from = text + piece->begin;
        size_t size = piece->end - piece->begin;
        bool there =
            size > 0 && (*from == ' ' || (size >= put_size && memcmp(from, put, put_size) == 0));
        bool want = step->kind == QLORA__TEXT_P_PREFIX_SPACE || step->always ||
                    (!step->never && first && i == 0);
        piece->begin = out->count;
        if (want && !there && (open || i > 0)) {
            QLORA__TRY(qlora__text_bytes_add(env, out, put, put_size));
        }
        if (step->kind == QLORA__TEXT_P_METASPACE) {
            QLORA__TRY(qlora__text_replace(env, from, size, &spaces, out));
        } else {
            QLORA__TRY(qlora__text_bytes_add(env, out, from, size));
        }
        piece->end = out->count;
    }
    return QLORA_OK;
}

// One splitting step over all pieces.
static qlora_result qlora__text_resplit(qlora__env* env, qlora_text_tok* tok,
                                        const qlora__text_step* step, qlora__text_view view,
                                        const qlora__text_pieces* in, qlora__text_pieces* out) {
    qlora__text_pieces* found = &tok->pieces[2];
    out->count = 0;
    for (size_t i = 0; i < in->count; i++) {
        view.end = in->data[i].end;
        size_t at = in->data[i].begin;
        if (step->behavior == QLORA__TEXT_B_ISOLATED) {
            QLORA__TRY(
                qlora__text_step_find(env, step, &view, in->data[i].begin, &at, view.end, out));
            continue;
        }
        found->count = 0;
        QLORA__TRY(
            qlora__text_step_find(env, step, &view, in->data[i].begin, &at, view.end, found));
        QLORA__TRY(qlora__text_step_merge(env, step->behavior, found, out));
    }
    return QLORA_OK;
}

// Applies the splitting steps from number `from` on to the pieces in tok->pieces[0], and encodes
// what results.
static qlora_result qlora__text_pieces_encode(qlora__env* env, qlora_text_tok* tok,
                                              qlora__text_view view, size_t from, bool first,
                                              bool open, qlora_text_ids* out) {
    qlora__text_pieces* now = &tok->pieces[0];
    qlora__text_pieces* then = &tok->pieces[1];
    size_t written = 0;
    for (size_t i = from; i < tok->splitter.count; i++) {
        const qlora__text_step* step = &tok->splitter.data[i];
        if (step->kind == QLORA__TEXT_P_BYTES) {
            view.code_of_byte = tok->code_of_byte;
            continue;
        }
        qlora__text_step after = *step;
        bool split = true;
        if (step->kind == QLORA__TEXT_P_METASPACE || step->kind == QLORA__TEXT_P_PREFIX_SPACE) {
            qlora_text_bytes* buffer = &tok->buffers[written++ % 2 == 0 ? 3 : 0];
            first = first && now->count > 0 && now->data[0].begin == 0; // not if it was removed
            QLORA__TRY(
                qlora__text_rewrite(env, step, (const char*)view.s, now, first, open, buffer));
            view.s = (const unsigned char*)buffer->data;
            split = step->kind == QLORA__TEXT_P_METASPACE && step->invert;
            after.kind = QLORA__TEXT_P_STRING;
            after.behavior = QLORA__TEXT_B_NEXT;
            after.invert = false;
        }
        if (split) {
            QLORA__TRY(qlora__text_resplit(env, tok, &after, view, now, then));
            qlora__text_pieces* swap = now;
            now = then;
            then = swap;
        }
    }
    for (size_t i = 0; i < now->count; i++) {
        const qlora__text_piece* piece = &now->data[i];
        QLORA__TRY(qlora__text_piece_encode(env, tok, (const char*)view.s + piece->begin,
                                            piece->end - piece->begin, out));
    }
    return QLORA_OK;
}

enum { QLORA__TEXT_WINDOW = 1 << 16 }; // bytes that are split at a time

// Splits and encodes normalised text without added tokens. If the first step only cuts, later steps
// see each of its pieces alone; a long text is then split in windows, whose pieces would otherwise
// take more memory than the ids.
static qlora_result qlora__text_plain_encode(qlora__env* env, qlora_text_tok* tok, const char* text,
                                             size_t size, bool first, bool open,
                                             qlora_text_ids* out) {
    qlora__text_view view = qlora__text_view_of(tok, text, size);
    qlora__text_pieces* pieces = &tok->pieces[0];
    const qlora__text_step* cut = tok->splitter.count > 0 ? &tok->splitter.data[0] : NULL;
    if (cut == NULL || cut->behavior != QLORA__TEXT_B_ISOLATED ||
        cut->kind == QLORA__TEXT_P_METASPACE || cut->kind == QLORA__TEXT_P_PREFIX_SPACE ||
        cut->kind == QLORA__TEXT_P_BYTES) {
        pieces->count = 0;
        QLORA__TRY(qlora__text_pieces_add(env, pieces, 0, size, false));
        return qlora__text_pieces_encode(env, tok, view, 0, first, open, out);
    }
    for (size_t at = 0; at < size;) {
        bool start = at == 0;
        size_t stop = size - at < QLORA__TEXT_WINDOW ? size : at + QLORA__TEXT_WINDOW;
        pieces->count = 0;
        QLORA__TRY(qlora__text_step_find(env, cut, &view, 0, &at, stop, pieces));
        QLORA__TRY(
            qlora__text_pieces_encode(env, tok, view, 1, first && start, open || !start, out));
    }
    return QLORA_OK;
}

// Finds added tokens in a text: leftmost first, longest first.
typedef struct qlora__text_scan {
    const qlora__text_trie* trie;
    const char* text;
    size_t size;
    size_t at;
    size_t done;   // everything before it was returned
    size_t spaces; // end of the last white space seen
    const qlora__text_added* waiting;
    size_t waiting_end;
    bool literal;
} qlora__text_scan;

// The longest token that starts here, and its length.
static const qlora__text_added*
qlora__text_scan_here(const qlora_text_tok* tok, const qlora__text_scan* scan, size_t* length) {
    const qlora__text_added* found = NULL;
    uint32_t node = 0;
    for (size_t i = scan->at; i < scan->size; i++) {
        const qlora__text_pair* edge =
            qlora__text_pairs_find(&scan->trie->edges, node, (unsigned char)scan->text[i]);
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
static bool qlora__text_scan_alone(const qlora_text_tok* tok, const qlora__text_scan* scan,
                                   size_t begin, size_t end) {
    const unsigned word = QLORA__TEXT_W | QLORA__TEXT_BIT(JOINER);
    qlora__text_view view = qlora__text_view_of(tok, scan->text, scan->size);
    size_t length;
    if (qlora__text_class_at(&view, end, &length) & word) {
        return false;
    }
    size_t start = begin;
    while (start > 0 && begin - start < 4) {
        start--;
        if (((unsigned char)scan->text[start] & 0xC0) != 0x80) {
            break;
        }
    }
    return begin == 0 || !(qlora__text_class_at(&view, start, &length) & word);
}

// The next stretch: plain text (*added is NULL) or a token. False at the end.
static bool qlora__text_scan_next(const qlora_text_tok* tok, qlora__text_scan* scan, size_t* begin,
                                  size_t* end, const qlora__text_added** added) {
    *added = scan->waiting;
    if (scan->waiting != NULL) {
        scan->waiting = NULL;
        *begin = scan->done;
        *end = scan->done = scan->waiting_end;
        return true;
    }
    while (scan->at < scan->size) {
        size_t length = 0;
        const qlora__text_added* found = NULL;
        if (scan->trie->starts[(unsigned char)scan->text[scan->at]]) {
            found = qlora__text_scan_here(tok, scan, &length);
        }
        if (found == NULL) {
            scan->at++;
            continue;
        }
        size_t start = scan->at;
        size_t stop = scan->at + length;
        scan->at = stop;
        if ((scan->literal && found->special) ||
            (found->single_word && !qlora__text_scan_alone(tok, scan, start, stop))) {
            continue;
        }
        if (found->strip_left) { // what was returned already is not taken again
            start = qlora__text_space_before(tok, scan->text, scan->done, start);
            start = start > scan->done ? start : scan->done;
        }
        if (found->strip_right) {
            if (stop >= scan->spaces) { // white space is scanned only once
                qlora__text_view view = qlora__text_view_of(tok, scan->text, scan->size);
                scan->spaces = qlora__text_run(&view, stop, QLORA__TEXT_WS);
            }
            stop = scan->spaces > stop ? scan->spaces : stop;
        }
        if (start >= stop) { // nothing is left of it
            continue;
        }
        // Stripped white space may contain the next token. The library then returns to the end of
        // this one; so does this function.
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

static qlora__text_scan qlora__text_scan_of(const qlora__text_trie* trie, const char* text,
                                            size_t size, uint32_t flags) {
    qlora__text_scan scan;
    memset(&scan, 0, sizeof(scan));
    scan.trie = trie;
    scan.text = text;
    scan.size = size;
    scan.literal = (flags & QLORA_TEXT_LITERAL) != 0;
    return scan;
}

// Encodes the text between two tokens that were found in the original. `first`: it starts the text.
static qlora_result qlora__text_stretch_encode(qlora__env* env, qlora_text_tok* tok,
                                               const char* text, size_t size, bool first,
                                               uint32_t flags, qlora_text_ids* out) {
    bool open = !(first && (flags & QLORA_TEXT_CONTINUE));
    if (tok->normalizer.count > 0) {
        qlora_text_bytes* normal;
        QLORA__TRY(qlora__text_apply_normalizer(env, tok, text, size, open, &normal));
        text = normal->data;
        size = normal->count;
        first = first && !tok->moved;
    }
    if (tok->normalized_trie.nodes == 0) {
        return size == 0 ? QLORA_OK
                         : qlora__text_plain_encode(env, tok, text, size, first, open, out);
    }
    qlora__text_scan scan = qlora__text_scan_of(&tok->normalized_trie, text, size, flags);
    size_t begin;
    size_t end;
    const qlora__text_added* added;
    while (qlora__text_scan_next(tok, &scan, &begin, &end, &added)) {
        if (added != NULL) {
            QLORA__TRY(qlora__text_ids_add(env, out, added->id));
        } else {
            bool start = begin == 0;
            QLORA__TRY(qlora__text_plain_encode(env, tok, text + begin, end - begin, first && start,
                                                open || !start, out));
        }
    }
    return QLORA_OK;
}

static qlora_result qlora__text_ids_append(qlora__env* env, qlora_text_ids* ids,
                                           const qlora_text_ids* more) {
    QLORA__TRY(qlora__text_ids_room(env, ids, more->count));
    if (more->count > 0) {
        memcpy(ids->data + ids->count, more->data, more->count * sizeof(int32_t));
        ids->count += more->count;
    }
    return QLORA_OK;
}

// BOS before ids[begin..), unless they start with it: a text may bring its own.
static qlora_result qlora__text_bos_first(qlora__env* env, int32_t bos, qlora_text_ids* ids,
                                          size_t begin) {
    if (bos < 0 || (ids->count > begin && ids->data[begin] == bos)) {
        return QLORA_OK;
    }
    QLORA__TRY(qlora__text_ids_add(env, ids, bos));
    memmove(ids->data + begin + 1, ids->data + begin, (ids->count - begin - 1) * sizeof(int32_t));
    ids->data[begin] = bos;
    return QLORA_OK;
}

// Text to ids, for the public call and for chats and data.
static qlora_result qlora__text_encode(qlora__env* env, qlora_text_tok* tok, const char* text,
                                       size_t length, uint32_t flags, qlora_text_ids* out) {
    if ((flags & QLORA_TEXT_SPECIAL) != 0) {
        QLORA__TRY(qlora__text_ids_append(env, out, &tok->prefix));
    }
    qlora__text_scan scan = qlora__text_scan_of(&tok->raw_trie, text, length, flags);
    size_t begin;
    size_t end;
    const qlora__text_added* added;
    while (qlora__text_scan_next(tok, &scan, &begin, &end, &added)) {
        if (added != NULL) {
            QLORA__TRY(qlora__text_ids_add(env, out, added->id));
        } else {
            QLORA__TRY(qlora__text_stretch_encode(env, tok, text + begin, end - begin, begin == 0,
                                                  flags, out));
        }
    }
    return (flags & QLORA_TEXT_SPECIAL) != 0 ? qlora__text_ids_append(env, out, &tok->suffix)
                                             : QLORA_OK;
}

qlora_result qlora_text_encode(qlora_text_tok* tok, const char* text, size_t length, uint32_t flags,
                               qlora_text_ids* out) {
    if (tok == NULL) {
        return QLORA_ERR_ARGUMENT;
    }
    qlora__env* env = &tok->text->env;
    qlora__text_enter(tok->text, "qlora_text_encode");
    QLORA__TEXT_NEED(env, out);
    if (text == NULL && length > 0) {
        return qlora__env_fail(env, QLORA_ERR_ARGUMENT, "text is NULL");
    }
    size_t before = out->count;
    qlora_result r = qlora__text_encode(env, tok, text, length, flags, out);
    if (r == QLORA_OK && (flags & QLORA_TEXT_BOS) != 0) {
        r = qlora__text_bos_first(env, qlora__text_tok_bos(tok), out, before);
    }
    out->count = r == QLORA_OK ? out->count : before;
    return r;
}
