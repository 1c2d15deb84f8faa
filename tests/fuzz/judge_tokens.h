// judge_tokens.h - what an accepted tokenizer.json means, said a second time: the ids of tokens and
// of a few texts, by a slow and simple BPE. Include it after judge_data.h.
//
// Judged are the models and the steps of the two files that files.c changes. Where a change leads
// to other steps, only the tables are judged; see judged.
#ifndef QLORA_FUZZ_JUDGE_TOKENS_H
#define QLORA_FUZZ_JUDGE_TOKENS_H

static const char* const token_texts[] = {"The first differ, they'll be 12345 theirs!",
                                          "\n\n  And so\tit's  DON'T been before \r\n x ",
                                          " a  b   c",
                                          "(def f(x): return x**2)\n\n\n#end",
                                          "zZ9",
                                          ""};

enum { TOKEN_TEXTS = sizeof token_texts / sizeof token_texts[0], TOKEN_ROOM = 256 };

typedef struct id_list {
    long long data[TOKEN_ROOM];
    size_t count;
    bool lost; // a character has no token
} id_list;

typedef struct merge {
    long long left;
    long long right;
    long long joined;
} merge;

// The tokenizer as it is judged.
typedef struct slow_tok {
    second* vocab;
    second* added;
    size_t words; // different ones
    bool shared;  // an added token has the id of one of them: either may come back
    merge* merges;
    size_t merge_count;
    bool byte_level;
    bool prefix_space;
    bool byte_fallback;
    bool fuse;
    bool whole; // ignore_merges
    long long unknown;
    bool steps; // are those that are judged
    bool decoder;
} slow_tok;

static bool second_same(const second* a, const second* b) {
    if (a == NULL || b == NULL) {
        return a == b;
    }
    bool same = a->kind == b->kind && a->size == b->size && a->name_size == b->name_size &&
                (a->name == NULL || memcmp(a->name, b->name, a->name_size) == 0) &&
                (a->text == NULL || memcmp(a->text, b->text, a->size) == 0);
    const second* x = a->first;
    const second* y = b->first;
    for (; same && x != NULL && y != NULL; x = x->next, y = y->next) {
        same = second_same(x, y);
    }
    return same && x == NULL && y == NULL;
}

// The id of a token of the vocabulary, the last one of this name; -1 if there is none.
static long long word_id(const slow_tok* t, const char* name, size_t size) {
    long long id = -1;
    for (const second* v = t->vocab->first; v != NULL; v = v->next) {
        if (v->name_size == size && v->name[0] == name[0] && memcmp(v->name, name, size) == 0) {
            (void)second_int(v, &id);
        }
    }
    return id;
}

// The two halves of a merge, of which one has a space or both are given.
static bool merge_halves(const second* v, const char* half[2], size_t size[2]) {
    if (v->kind == SECOND_STRING) {
        const char* space = (const char*)memchr(v->text, ' ', v->size);
        half[0] = v->text;
        half[1] = space != NULL ? space + 1 : v->text;
        size[0] = space != NULL ? (size_t)(space - v->text) : 0;
        size[1] = space != NULL ? v->size - size[0] - 1 : 0;
        return space != NULL && memchr(half[1], ' ', size[1]) == NULL;
    }
    bool two = v->kind == SECOND_ARRAY && v->size == 2 && v->first->kind == SECOND_STRING &&
               v->first->next->kind == SECOND_STRING;
    for (int i = 0; two && i < 2; i++) {
        const second* one = i == 0 ? v->first : v->first->next;
        half[i] = one->text;
        size[i] = one->size;
    }
    return two;
}

static void merges_read(slow_tok* t, second* list) {
    finding(second_is(list, SECOND_ARRAY), "merges that are not a list were accepted", "");
    t->merges = (merge*)calloc(list->size + 1, sizeof *t->merges);
    if (t->merges == NULL) {
        abort();
    }
    for (const second* v = list->first; v != NULL; v = v->next) {
        const char* half[2] = {"", ""};
        size_t size[2] = {0, 0};
        char joined[512];
        finding(merge_halves(v, half, size) && size[0] + size[1] <= sizeof joined,
                "something else than a merge was accepted", "");
        memcpy(joined, half[0], size[0]);
        memcpy(joined + size[0], half[1], size[1]);
        merge* one = &t->merges[t->merge_count++];
        one->left = word_id(t, half[0], size[0]);
        one->right = word_id(t, half[1], size[1]);
        one->joined = word_id(t, joined, size[0] + size[1]);
        finding(one->left >= 0 && one->right >= 0 && one->joined >= 0,
                "a merge of other tokens was accepted", half[0]);
    }
}

// A switch of the model, which `tokenizers` takes only as true or false.
static bool switch_of(second* node, const char* name) {
    const second* v = second_find(node, name);
    finding(v == NULL || v->kind == SECOND_TRUE || v->kind == SECOND_FALSE,
            "a switch that is neither true nor false was accepted", name);
    return second_is(v, SECOND_TRUE);
}

// How many words the vocabulary has, and whether an id is that of two tokens.
static void words_count(slow_tok* t) {
    for (const second* v = t->vocab->first; v != NULL; v = v->next) {
        bool first = true;
        for (const second* other = t->vocab->first; other != v; other = other->next) {
            bool same =
                other->name_size == v->name_size && memcmp(other->name, v->name, v->name_size) == 0;
            first = first && !same;
        }
        t->words += first ? 1 : 0;
    }
    for (second* v = t->added != NULL ? t->added->first : NULL; v != NULL; v = v->next) {
        const second* content = second_find(v, "content");
        const second* id = second_find(v, "id");
        for (const second* word = t->vocab->first; word != NULL && id != NULL; word = word->next) {
            t->shared =
                t->shared || (word->text != NULL && id->text != NULL &&
                              strcmp(word->text, id->text) == 0 && !is_word(content, word->name));
        }
    }
}

// Whether the steps before the model are those that are judged.
static void steps_read(slow_tok* t, second* file, second* valid) {
    second* before = second_find(valid, "pre_tokenizer");
    second* steps = second_find(second_find(file, "pre_tokenizer"), "pretokenizers");
    second* normal = second_find(file, "normalizer");
    t->byte_level = before != NULL;
    bool simple = normal == NULL || is_word(second_find(normal, "type"), "NFC") ||
                  is_word(second_find(normal, "type"), "NFD");
    simple = simple && t->byte_level; // the texts are ASCII
    t->steps = (simple || second_same(normal, second_find(valid, "normalizer"))) &&
               second_same(second_find(file, "pre_tokenizer"), before);
    // ByteLevel may get a space in front of every piece
    if (t->byte_level && !t->steps && second_is(steps, SECOND_ARRAY) && steps->size == 2) {
        second* flag = second_find(steps->first->next, "add_prefix_space");
        if (second_is(flag, SECOND_TRUE)) {
            flag->kind = SECOND_FALSE;
            t->steps = simple && second_same(second_find(file, "pre_tokenizer"), before);
            flag->kind = SECOND_TRUE;
            t->prefix_space = t->steps;
        }
    }
    t->decoder = second_same(second_find(file, "decoder"), second_find(valid, "decoder"));
}

static void slow_read(slow_tok* t, second* file, second* valid) {
    second* model = second_find(file, "model");
    const second* type = second_find(model, "type");
    const second* unknown = second_find(model, "unk_token");
    memset(t, 0, sizeof *t);
    t->vocab = second_find(model, "vocab");
    t->added = second_find(file, "added_tokens");
    finding(type == NULL || is_word(type, "BPE"), "another model was accepted", "");
    finding(second_is(t->vocab, SECOND_OBJECT), "a vocabulary that is not an object", "");
    words_count(t);
    merges_read(t, second_find(model, "merges"));
    t->byte_fallback = switch_of(model, "byte_fallback");
    t->fuse = switch_of(model, "fuse_unk");
    t->whole = switch_of(model, "ignore_merges");
    t->unknown = -1;
    if (unknown != NULL) {
        finding(unknown->kind == SECOND_STRING, "an unknown token that is not a string", "");
        t->unknown = word_id(t, unknown->text, unknown->size);
        finding(t->unknown >= 0, "an unknown token that does not exist", unknown->text);
    }
    steps_read(t, file, valid);
}

// ---- a text to ids

static bool is_letter(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

static bool is_digit(char c) {
    return c >= '0' && c <= '9';
}

static bool is_line(char c) {
    return c == '\r' || c == '\n';
}

// 's, 't, 're, 've, 'm, 'll or 'd, in any case: its size, or 0.
static size_t short_word(const char* text) {
    static const char* const ends[] = {"s", "t", "re", "ve", "m", "ll", "d"};
    for (size_t i = 0; text[0] == '\'' && i < 7; i++) {
        size_t n = strlen(ends[i]);
        size_t k = 0;
        while (k < n && (text[1 + k] | 32) == ends[i][k]) {
            k++;
        }
        if (k == n) {
            return n + 1;
        }
    }
    return 0;
}

// The size of the next piece of a text in ASCII, as the pattern of the file splits it.
static size_t piece_size(const char* text) {
    size_t n = short_word(text);
    size_t lead = text[0] != '\0' && !is_line(text[0]) && !is_letter(text[0]) && !is_digit(text[0]);
    if (n > 0) {
        return n;
    }
    for (n = lead; is_letter(text[n]); n++) {
    }
    if (n > lead) {
        return n;
    }
    for (n = 0; n < 3 && is_digit(text[n]); n++) {
    }
    if (n > 0) {
        return n;
    }
    lead = text[0] == ' ' ? 1 : 0;
    for (n = lead;
         text[n] != '\0' && !is_space(text[n]) && !is_letter(text[n]) && !is_digit(text[n]); n++) {
    }
    if (n > lead) {
        for (; is_line(text[n]); n++) {
        }
        return n;
    }
    size_t spaces = 0;
    size_t lines = 0; // up to the last line end among them
    for (; text[spaces] != '\0' && is_space(text[spaces]); spaces++) {
        lines = is_line(text[spaces]) ? spaces + 1 : lines;
    }
    if (lines > 0) {
        return lines;
    }
    return text[spaces] != '\0' && spaces > 1 ? spaces - 1 : spaces;
}

static void id_add(id_list* ids, long long id) {
    finding(ids->count < TOKEN_ROOM, "more ids than there is room for", "");
    ids->data[ids->count++] = id;
}

// The characters of a word as ids.
static void word_start(const slow_tok* t, const char* word, size_t size, id_list* ids) {
    long long pending = -1; // an unknown token
    for (size_t at = 0; at < size;) {
        size_t n = 1;
        while (at + n < size && ((unsigned char)word[at + n] & 0xc0) == 0x80) {
            n++;
        }
        long long id = word_id(t, word + at, n);
        long long bytes[4] = {-1, -1, -1, -1};
        bool all = t->byte_fallback && id < 0 && n <= 4;
        for (size_t i = 0; all && i < n; i++) {
            char name[8];
            snprintf(name, sizeof name, "<0x%02X>", (unsigned)(unsigned char)word[at + i]);
            bytes[i] = word_id(t, name, 6);
            all = bytes[i] >= 0;
        }
        if (id >= 0) {
            if (pending >= 0) {
                id_add(ids, pending);
            }
            pending = -1;
            id_add(ids, id);
        } else if (all) {
            for (size_t i = 0; i < n; i++) {
                id_add(ids, bytes[i]);
            }
        } else {
            if (pending >= 0 && !t->fuse) {
                id_add(ids, pending);
            }
            pending = t->unknown;
            ids->lost = true;
        }
        at += n;
    }
    if (pending >= 0) {
        id_add(ids, pending);
    }
}

// Joins the two neighbours of the first merge in the list until there is none. Of two merges of the
// same tokens, the last one counts.
static void word_encode(const slow_tok* t, const char* word, size_t size, id_list* out) {
    id_list ids;
    memset(&ids, 0, sizeof ids);
    long long whole = t->whole ? word_id(t, word, size) : -1;
    if (whole >= 0) {
        id_add(out, whole);
        return;
    }
    word_start(t, word, size, &ids);
    for (;;) {
        size_t best = t->merge_count;
        size_t place = 0;
        for (size_t i = 0; i + 1 < ids.count; i++) {
            size_t rank = t->merge_count;
            for (size_t k = 0; k < t->merge_count; k++) {
                const merge* one = &t->merges[k];
                rank = one->left == ids.data[i] && one->right == ids.data[i + 1] ? k : rank;
            }
            place = rank < best ? i : place;
            best = rank < best ? rank : best;
        }
        if (best == t->merge_count) {
            break;
        }
        ids.data[place] = t->merges[best].joined;
        memmove(&ids.data[place + 1], &ids.data[place + 2],
                (ids.count - place - 2) * sizeof ids.data[0]);
        ids.count--;
    }
    for (size_t i = 0; i < ids.count; i++) {
        id_add(out, ids.data[i]);
    }
    out->lost = out->lost || ids.lost;
}

static size_t char_of_byte(unsigned char byte, char* out) {
    long code = 0;
    while (byte_of(code) != byte) {
        code++;
    }
    return second_utf8(code, out);
}

static void text_encode(const slow_tok* t, const char* text, id_list* ids) {
    char word[4 * TOKEN_ROOM];
    size_t size = 0;
    memset(ids, 0, sizeof *ids);
    if (t->byte_level) {
        for (size_t n = 0; *text != '\0'; text += n) {
            n = piece_size(text);
            size = t->prefix_space && text[0] != ' ' ? char_of_byte(' ', word) : 0;
            for (size_t i = 0; i < n; i++) {
                size += char_of_byte((unsigned char)text[i], word + size);
            }
            word_encode(t, word, size, ids);
        }
    } else if (*text != '\0') {
        memcpy(word, "\xE2\x96\x81", 3);
        for (size = 3; *text != '\0'; text++) {
            bool space = *text == ' ';
            memcpy(word + size, space ? "\xE2\x96\x81" : text, space ? 3 : 1);
            size += space ? 3 : 1;
        }
        word_encode(t, word, size, ids);
    }
}

// ---- judging

// `tokenizers` numbers added tokens in their order, whatever "id" says, unless the vocabulary has
// them: after the last one, and after as many as the vocabulary has.
static long long added_next(const slow_tok* t, const id_list* ids) {
    long long next = (long long)t->words;
    for (size_t i = 0; i < ids->count; i++) {
        next = ids->data[i] >= next ? ids->data[i] + 1 : next;
    }
    return next;
}

static void added_judge(const slow_tok* t, qlora_text* text, qlora_text_tok* tok) {
    static const char* const flags[] = {"special", "normalized", "lstrip", "rstrip", "single_word"};
    id_list seen;
    seen.count = 0;
    for (second* v = t->added != NULL ? t->added->first : NULL; v != NULL; v = v->next) {
        long long given = 0;
        qlora_text_token_info info;
        const second* content = second_find(v, "content");
        finding(second_int(second_find(v, "id"), &given) && second_is(content, SECOND_STRING),
                "an added token without id or content was accepted", "");
        for (size_t i = 0; i < 5; i++) {
            (void)switch_of(v, flags[i]);
        }
        if (content->odd || content->size == 0 || seen.count == TOKEN_ROOM) {
            continue;
        }
        long long id = word_id(t, content->text, content->size);
        bool again = false;
        for (second* w = t->added->first; w != v; w = w->next) {
            again = again || is_word(second_find(w, "content"), content->text);
        }
        id = id >= 0 || again ? id : added_next(t, &seen);
        if (id < 0) {
            continue; // a second one of the same content
        }
        id_add(&seen, id);
        finding(qlora_text_tok_find(tok, content->text) == id, "an added token has another id",
                content->text);
        memset(&info, 0, sizeof info);
        finding(qlora_text_token_query(tok, (int32_t)id, &info) == QLORA_OK && info.added,
                "an added token is missing", content->text);
        // alone, it is found, unless its spelling changes before
        bool normal = switch_of(v, "normalized");
        qlora_text_ids ids;
        memset(&ids, 0, sizeof ids);
        finding(qlora_text_encode(tok, content->text, content->size, 0, &ids) == QLORA_OK, "", "");
        finding(normal || (ids.count == 1 && ids.data[0] == id), "an added token is not found",
                content->text);
        qlora_text_ids_free(text, &ids);
    }
}

static void vocab_judge(const slow_tok* t, qlora_text_tok* tok) {
    for (const second* v = t->vocab->first; v != NULL; v = v->next) {
        long long id = 0;
        finding(second_int(v, &id), "an id that is not a whole number was accepted", v->name);
        finding(id >= 0 && id <= INT32_MAX, "an id out of range was accepted", v->name);
        for (const second* other = t->vocab->first; other != v; other = other->next) {
            bool same = other->size == v->size && memcmp(other->text, v->text, v->size) == 0;
            finding(!same || strcmp(other->name, v->name) == 0,
                    "two words with the same id were accepted", v->name);
        }
        if (strlen(v->name) == v->name_size && second_is_utf8(v->name, v->name_size)) {
            finding(qlora_text_tok_find(tok, v->name) == word_id(t, v->name, v->name_size),
                    "a token has another id", v->name);
        }
    }
}

// What the post-processor adds before (side 0) or behind a text. False if it is not known here.
static bool frame_of(second* file, int side, id_list* out) {
    second* post = second_find(file, "post_processor");
    second* single = second_find(post, "single");
    second* tokens = second_find(post, "special_tokens");
    bool behind = false;
    out->count = 0;
    if (post != NULL && !is_word(second_find(post, "type"), "TemplateProcessing")) {
        return false;
    }
    for (second* v = second_is(single, SECOND_ARRAY) ? single->first : NULL; v; v = v->next) {
        const second* name = second_find(second_find(v, "SpecialToken"), "id");
        second* ids = second_is(name, SECOND_STRING)
                          ? second_find(second_find(tokens, name->text), "ids")
                          : NULL;
        behind = behind || name == NULL;
        for (second* id = ids != NULL ? ids->first : NULL; id != NULL; id = id->next) {
            long long x = 0;
            finding(second_int(id, &x), "an id of a special token", name->text);
            if (behind == (side == 1)) {
                id_add(out, x);
            }
        }
    }
    return true;
}

// Whether an added token, or something that may be one, is in a text.
static bool text_has_added(const slow_tok* t, const char* text) {
    bool has = false;
    for (second* v = t->added != NULL ? t->added->first : NULL; v != NULL; v = v->next) {
        const second* content = second_find(v, "content");
        has = has || (content->size > 0 && strstr(text, content->text) != NULL);
    }
    return has;
}

static bool texts_judge(const slow_tok* t, second* file, qlora_text* text, qlora_text_tok* tok) {
    bool all = t->steps && t->decoder;
    for (size_t i = 0; i < TOKEN_TEXTS && t->steps; i++) {
        const char* source = token_texts[i];
        id_list wanted;
        id_list frame[2];
        qlora_text_ids ids;
        qlora_text_bytes back;
        memset(&ids, 0, sizeof ids);
        memset(&back, 0, sizeof back);
        bool framed = frame_of(file, 0, &frame[0]) && frame_of(file, 1, &frame[1]);
        all = all && framed && !text_has_added(t, source);
        if (text_has_added(t, source)) {
            continue;
        }
        text_encode(t, source, &wanted);
        size_t before = framed ? frame[0].count : 0;
        uint32_t flags = framed ? (uint32_t)QLORA_TEXT_SPECIAL : 0u;
        finding(qlora_text_encode(tok, source, strlen(source), flags, &ids) == QLORA_OK, "", "");
        finding(ids.count == wanted.count + before + (framed ? frame[1].count : 0),
                "another number of ids", source);
        for (size_t k = 0; k < ids.count; k++) {
            long long id = k < before                  ? frame[0].data[k]
                           : k < before + wanted.count ? wanted.data[k - before]
                                                       : frame[1].data[k - before - wanted.count];
            finding(ids.data[k] == id, "another id", source);
        }
        const int32_t* first = ids.data != NULL ? ids.data + before : NULL; // NULL: no ids
        finding(qlora_text_decode(tok, first, wanted.count, 0, &back) == QLORA_OK, "", "");
        bool same = back.count == strlen(source) &&
                    (back.count == 0 || memcmp(back.data, source, back.count) == 0);
        finding(!t->decoder || wanted.lost || t->prefix_space || t->shared || same,
                "decoding gives another text", source);
        qlora_text_ids_free(text, &ids);
        qlora_text_bytes_free(text, &back);
    }
    return all;
}

static void tokenizer_judge(qlora_text* text, qlora_text_tok* tok, const buffer* b,
                            const buffer* valid_file, judge_count* count) {
    second* file = second_read(b->data, b->size);
    second* valid = second_read(valid_file->data, valid_file->size);
    slow_tok t;
    finding(second_is(file, SECOND_OBJECT), "a tokenizer that is not an object was accepted", "");
    slow_read(&t, file, valid);
    vocab_judge(&t, tok);
    added_judge(&t, text, tok);
    count->accepted++;
    count->judged += texts_judge(&t, file, text, tok) ? 1 : 0;
    free(t.merges);
    second_free(file);
    second_free(valid);
}

#endif
