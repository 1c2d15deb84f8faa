// .txt: documents, separated by lines of <|endoftext|>, or the whole text.

// The line <|endoftext|> at or after `at`: its start, or `size`. With `more`, the text may go on,
// so that a line at its end is not taken for a whole one.
static size_t qlora__text_find_separator(const char* text, size_t size, size_t at, bool more) {
    static const char word[] = "<|endoftext|>";
    size_t length = sizeof(word) - 1;
    const char* hit;
    while (at < size && (hit = qlora__text_find(text + at, size - at, word)) != NULL) {
        size_t start = (size_t)(hit - text);
        size_t end = start + length;
        while (end < size && (text[end] == ' ' || text[end] == '\r')) {
            end++;
        }
        bool line = end == size ? !more : text[end] == '\n';
        if ((start == 0 || text[start - 1] == '\n') && line) {
            return start;
        }
        at = start + 1;
    }
    return size;
}

enum { QLORA__TEXT_PLAIN_START = 0, QLORA__TEXT_PLAIN_WHOLE, QLORA__TEXT_PLAIN_PARTS };

static qlora_result qlora__text_plain_check(qlora__env* env, const qlora__text_source* source) {
    const unsigned char* text = (const unsigned char*)source->document;
    for (size_t at = 0; at < source->document_size;) {
        uint32_t code = 0;
        size_t left = source->document_size - at;
        size_t length = text[at] < 0x80 ? 1 : qlora__text_utf8(text + at, left, &code);
        if (length == 0) {
            size_t line = source->line;
            for (size_t i = 0; i < at; i++) {
                line += text[i] == '\n' ? 1 : 0;
            }
            return qlora__env_fail(env, QLORA_ERR_FORMAT, "%s:%lu: not UTF-8", source->loader->name,
                                   (unsigned long)line);
        }
        at += length;
    }
    return QLORA_OK;
}

// A document longer than this is read in parts, where that is possible. Without such a place within
// the other length it is held whole; a stream refuses it then.
enum { QLORA__TEXT_PART = 1 << 12, QLORA__TEXT_PART_MOST = 1 << 24 };

// A part at the start of the text, which contains no separator: its size, or 0 if there is none. At
// first it is not known whether the file has separators, so not whether line ends at the start of
// the document count.
static size_t qlora__text_plain_part(const qlora__text_source* source, const char* text,
                                     size_t size) {
    const qlora__text_loader* loader = source->loader;
    bool open = source->begins && source->stage == QLORA__TEXT_PLAIN_START;
    if (size < 4 * QLORA__TEXT_PART || (open && (text[0] == '\n' || text[0] == '\r'))) {
        return 0;
    }
    size_t end = size - 64; // a separator may begin after it
    size_t cut = qlora__text_lines_cut(loader->tok, loader->lines, text, end, QLORA__TEXT_PART);
    return cut < end ? cut : 0;
}

static qlora_result qlora__text_plain_whole(qlora__env* env, qlora__text_source* source,
                                            size_t size) {
    if (source->loader->data->loader == NULL || size < QLORA__TEXT_PART_MOST) {
        return QLORA_OK;
    }
    source->lost = true;
    return qlora__env_fail(
        env, QLORA_ERR_UNSUPPORTED,
        "%s:%lu: a document of more than %d MiB that %s; it can be read only "
        "when it is kept in memory, without a stream",
        source->loader->name, (unsigned long)source->at_line, QLORA__TEXT_PART_MOST >> 20,
        source->loader->lines == QLORA__TEXT_LINES_NONE ? "this tokenizer cannot split"
                                                        : "has no line that starts with a letter");
}

// The document text[0..stop), or the rest of it, which `next` bytes end. Line ends around it belong
// to the separators, if the file has any.
static void qlora__text_plain_take(qlora__text_source* source, const char* text, size_t stop,
                                   size_t next) {
    bool separated = source->stage == QLORA__TEXT_PLAIN_PARTS;
    size_t begin = 0;
    size_t end = stop;
    while (separated && source->begins && begin < end &&
           (text[begin] == '\n' || text[begin] == '\r')) {
        begin++;
    }
    while (separated && source->ends && end > begin &&
           (text[end - 1] == '\n' || text[end - 1] == '\r')) {
        end--;
    }
    qlora__text_source_pass(source, begin);
    qlora__text_source_mark(source, end - begin);
    source->document = text + begin;
    source->document_size = end - begin;
    qlora__text_source_pass(source, next - begin);
}

// Finds the next part of a document, in the window, and passes it. *more = false: there is none.
static qlora_result qlora__text_plain_find(qlora__env* env, qlora__text_source* source,
                                           bool* more) {
    qlora__text_input* input = &source->input;
    size_t searched = 0;
    for (;;) {
        const char* text = input->data + input->at;
        size_t size = input->count - input->at;
        *more = size > 0;
        if (size == 0 && input->ended) {
            return QLORA_OK;
        }
        size_t stop = qlora__text_find_separator(text, size, searched, !input->ended);
        size_t line = qlora__text_line_size(text + stop, size - stop);
        bool whole = input->ended || (stop < size && stop + line < size);
        size_t part = qlora__text_plain_part(source, text, stop);
        if (part > 0) {
            source->ends = false;
            qlora__text_plain_take(source, text, part, part);
            return QLORA_OK;
        }
        if (!whole) { // the separator may begin just before the end
            searched = size > 64 ? size - 64 : 0;
            QLORA__TRY(qlora__text_plain_whole(env, source, size));
            QLORA__TRY(qlora__text_input_more(env, input));
            continue;
        }
        if (source->stage == QLORA__TEXT_PLAIN_START) {
            source->stage = stop < size ? QLORA__TEXT_PLAIN_PARTS : QLORA__TEXT_PLAIN_WHOLE;
        }
        source->ends = true;
        qlora__text_plain_take(source, text, stop, stop + line < size ? stop + line + 1 : size);
        return QLORA_OK;
    }
}

// The next part of a document that is not empty. After a fault, what is left of the document is
// skipped.
static qlora_result qlora__text_plain_next(qlora__env* env, qlora__text_source* source,
                                           bool* more) {
    if (source->stage == QLORA__TEXT_PLAIN_START && source->document == NULL) {
        QLORA__TRY(qlora__text_input_skip_mark(env, &source->input));
        source->ends = true;
    }
    for (;;) {
        source->begins = source->ends;
        QLORA__TRY(qlora__text_plain_find(env, source, more));
        if (!*more) {
            return QLORA_OK;
        }
        bool skip = source->skip && !source->begins;
        source->skip = skip;
        if (!skip && source->document_size > 0) {
            qlora_result r = qlora__text_plain_check(env, source);
            source->skip = r != QLORA_OK;
            if (r != QLORA_OK && !source->begins) {
                source->line = source->loader->document_line;
            }
            return r;
        }
    }
}

static qlora_result qlora__text_plain_again(qlora__env* env, qlora__text_source* source,
                                            const char* text, size_t size) {
    (void)env;
    source->document = text;
    source->document_size = size;
    return QLORA_OK;
}

static qlora_result qlora__text_txt_open(qlora__env* env, qlora__text_source* source) {
    if (qlora__text_asks(source->loader)) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "%s is plain text, which has no prompts; use .jsonl or .csv",
                               source->loader->name);
    }
    if (source->loader->desc->preference != QLORA_TEXT_ANSWERS) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "%s is plain text, which has no pairs and no labels",
                               source->loader->name);
    }
    source->next = qlora__text_plain_next;
    source->again = qlora__text_plain_again;
    source->loader->lines = qlora__text_lines_of(source->loader->tok);
    return qlora__text_input_open(env, &source->input);
}

// ---- documents to samples

// How many ids of a document are in one sample, and how far apart the samples start. Without a BOS,
// every sample starts with the last token of the previous one, so that each token is a target once.
typedef struct qlora__text_chunk {
    size_t head; // a BOS
    size_t room;
    size_t stride;
} qlora__text_chunk;

static qlora__text_chunk qlora__text_chunk_of(const qlora__text_loader* loader) {
    qlora__text_chunk chunk;
    size_t limit = loader->desc->chunk_tokens > 0 ? loader->desc->chunk_tokens : SIZE_MAX;
    chunk.head = loader->desc->chat->bos >= 0 ? 1 : 0;
    chunk.room = limit - chunk.head;
    chunk.stride = chunk.head > 0 ? chunk.room : chunk.room - 1;
    return chunk;
}

// Where the bytes are that ids[from..from + count) come from. A sample can be read again if these
// are not many more than its own.
static void qlora__text_document_place(qlora__text_loader* loader, size_t from, size_t count,
                                       bool ends) {
    qlora_text_data* data = loader->data;
    data->placed = false;
    data->begins = data->ends = false;
    if (data->loader == NULL) {
        return;
    }
    size_t i = loader->slice_count - 1;
    while (loader->slices[i].first > (int64_t)from) {
        i--;
    }
    const qlora__text_slice* slice = &loader->slices[i];
    while (i < loader->slice_count && loader->slices[i].first < (int64_t)(from + count)) {
        i++;
    }
    size_t end = ends || i == loader->slice_count ? loader->document.count : loader->slices[i].at;
    size_t size = end - slice->at;
    int64_t part = (int64_t)from - slice->first;
    data->placed = size <= 8 * (size_t)QLORA__TEXT_PART + 16 * count && size <= UINT32_MAX &&
                   part <= (int64_t)UINT32_MAX;
    if (data->placed) {
        data->place = slice->place;
        data->size = (uint32_t)size;
        data->part = (uint32_t)part;
        data->hash = qlora__text_hash(loader->document.data + slice->at, size);
        data->begins = slice->begins;
        data->ends = ends;
    }
}

// Makes a sample of ids[from..from + count).
static qlora_result qlora__text_document_emit(qlora__env* env, qlora__text_loader* loader,
                                              size_t from, size_t count, bool ends) {
    qlora_text_data* data = loader->data;
    size_t head = qlora__text_chunk_of(loader).head;
    loader->numbers.count = 0;
    QLORA__TRY(qlora__text_ids_room(env, &loader->numbers, 2 * (head + count)));
    int32_t* ids = loader->numbers.data;
    int32_t* labels = ids + head + count;
    if (head > 0) {
        ids[0] = loader->desc->chat->bos;
        labels[0] = -100;
    }
    memcpy(ids + head, data->ids.data + from, count * sizeof(int32_t));
    memcpy(labels + head, ids + head, count * sizeof(int32_t));
    qlora__text_document_place(loader, from, count, ends);
    qlora_result r = qlora__text_sample_close(env, data, ids, labels, head + count,
                                              loader->document_line, false);
    data->begins = data->ends = false;
    return r;
}

// Drops the first ids and the bytes that only they come from.
static void qlora__text_document_drop(qlora__text_loader* loader, size_t count) {
    qlora_text_ids* ids = &loader->data->ids;
    size_t gone = loader->slice_count;
    if (count == 0) {
        return;
    }
    ids->count -= count;
    memmove(ids->data, ids->data + count, ids->count * sizeof(int32_t));
    while (gone > 0 && loader->slices[gone - 1].first > (int64_t)count) {
        gone--;
    }
    gone -= gone > 0 ? 1 : 0; // the slice of the first id that is left
    size_t bytes = gone > 0 ? loader->slices[gone].at : 0;
    if (bytes > 0) {
        loader->document.count -= bytes;
        memmove(loader->document.data, loader->document.data + bytes, loader->document.count);
    }
    loader->slice_count -= gone;
    for (size_t i = 0; i < loader->slice_count; i++) {
        qlora__text_slice* slice = &loader->slices[i];
        *slice = loader->slices[i + gone];
        slice->at -= bytes;
        slice->first -= (int64_t)count;
    }
}

// Encodes a part of a document: without BOS, and with the EOS that ends it.
static qlora_result qlora__text_document_encode(qlora__env* env, const qlora__text_loader* loader,
                                                const char* text, size_t size, bool begins,
                                                bool ends) {
    int32_t bos = loader->desc->chat->bos;
    int32_t eos = loader->desc->chat->eos;
    qlora_text_ids* ids = &loader->data->ids;
    size_t before = ids->count;
    QLORA__TRY(qlora__text_encode(env, loader->tok, text, size,
                                  begins ? 0 : (uint32_t)QLORA_TEXT_CONTINUE, ids));
    if (begins && bos >= 0 && ids->count > before && ids->data[before] == bos) {
        ids->count--; // spelt out in the text: it still comes exactly once
        memmove(ids->data + before, ids->data + before + 1,
                (ids->count - before) * sizeof(int32_t));
    }
    bool there = ids->count > 0 && ids->data[ids->count - 1] == eos;
    return ends && eos >= 0 && !there ? qlora__text_ids_add(env, ids, eos) : QLORA_OK;
}

// Notes where the ids come from that are encoded next.
static qlora_result qlora__text_document_slice(qlora__env* env, qlora__text_source* source) {
    qlora__text_loader* loader = source->loader;
    void* slices = loader->slices;
    qlora_result r = qlora__text_reserve(env, &slices, &loader->slice_capacity, loader->slice_count,
                                         1, sizeof(qlora__text_slice));
    loader->slices = (qlora__text_slice*)slices;
    QLORA__TRY(r);
    qlora__text_slice* slice = &loader->slices[loader->slice_count++];
    slice->place = source->place;
    slice->at = loader->document.count;
    slice->first = (int64_t)loader->data->ids.count;
    slice->begins = source->begins;
    return qlora__text_bytes_add(env, &loader->document, source->document, source->document_size);
}

// Encodes the part of a document that was read and makes the samples that are full.
static qlora_result qlora__text_document_take(qlora__env* env, qlora__text_source* source) {
    qlora__text_loader* loader = source->loader;
    qlora_text_data* data = loader->data;
    qlora__text_chunk chunk = qlora__text_chunk_of(loader);
    size_t from = 0;
    if (source->begins) {
        data->ids.count = 0;
        loader->document.count = 0;
        loader->slice_count = 0;
        loader->document_line = source->line;
        loader->document_count = data->count;
    }
    if (data->loader != NULL) {
        QLORA__TRY(qlora__text_document_slice(env, source));
    }
    QLORA__TRY(qlora__text_document_encode(env, loader, source->document, source->document_size,
                                           source->begins, source->ends));
    while (data->ids.count - from > chunk.room) {
        QLORA__TRY(qlora__text_document_emit(env, loader, from, chunk.room, false));
        from += chunk.stride;
    }
    if (source->ends && data->ids.count > from) {
        QLORA__TRY(qlora__text_document_emit(env, loader, from, data->ids.count - from, true));
        from = data->ids.count;
    }
    qlora__text_document_drop(loader, from);
    return QLORA_OK;
}

// Makes a sample again from its bytes.
static qlora_result qlora__text_document_again(qlora__env* env, qlora__text_source* source) {
    qlora__text_loader* loader = source->loader;
    qlora_text_data* data = loader->data;
    size_t head = qlora__text_chunk_of(loader).head;
    data->ids.count = 0;
    QLORA__TRY(qlora__text_document_encode(env, loader, source->document, source->document_size,
                                           data->begins, data->ends));
    data->found = data->wanted_count >= head && data->wanted <= data->ids.count &&
                  data->wanted_count - head <= data->ids.count - data->wanted;
    for (int i = 0; i < 2 && data->found; i++) {
        qlora_text_ids* shown = &data->shown[i];
        shown->count = 0;
        QLORA__TRY(qlora__text_ids_room(env, shown, (size_t)data->wanted_count + 1));
        if (head > 0) {
            shown->data[0] = i == 0 ? loader->desc->chat->bos : -100;
        }
        memcpy(shown->data + head, data->ids.data + data->wanted,
               (data->wanted_count - head) * sizeof(int32_t));
        shown->count = data->wanted_count;
    }
    return QLORA_OK;
}
