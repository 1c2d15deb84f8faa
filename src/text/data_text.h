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

// The next document that is not empty. Line ends around it belong to the separators, if the file
// has any.
static qlora_result qlora__text_plain_next(qlora__env* env, qlora__text_source* source,
                                           bool* more) {
    qlora__text_input* input = &source->input;
    size_t searched = 0;
    if (source->stage == QLORA__TEXT_PLAIN_START) {
        QLORA__TRY(qlora__text_input_skip_mark(env, input));
    }
    for (;;) {
        const char* text = input->data + input->at;
        size_t size = input->count - input->at;
        *more = size > 0;
        if (size == 0 && input->ended) {
            return QLORA_OK;
        }
        size_t stop = qlora__text_find_separator(text, size, searched, !input->ended);
        size_t line = qlora__text_line_size(text + stop, size - stop);
        bool whole = stop < size && stop + line < size;
        if (!whole && !input->ended) { // the separator may begin just before the end
            searched = size > 64 ? size - 64 : 0;
            QLORA__TRY(qlora__text_input_more(env, input));
            continue;
        }
        searched = 0;
        if (source->stage == QLORA__TEXT_PLAIN_START) {
            source->stage = stop < size ? QLORA__TEXT_PLAIN_PARTS : QLORA__TEXT_PLAIN_WHOLE;
        }
        bool separated = source->stage == QLORA__TEXT_PLAIN_PARTS;
        size_t begin = 0;
        size_t end = stop;
        while (separated && begin < end && (text[begin] == '\n' || text[begin] == '\r')) {
            begin++;
        }
        while (separated && end > begin && (text[end - 1] == '\n' || text[end - 1] == '\r')) {
            end--;
        }
        size_t next = stop + line < size ? stop + line + 1 : size;
        qlora__text_source_pass(source, begin);
        qlora__text_source_mark(source, end - begin);
        source->document = text + begin;
        source->document_size = end - begin;
        qlora__text_source_pass(source, next - begin);
        if (end > begin) {
            return qlora__text_plain_check(env, source);
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
    if (source->loader->desc->preference != QLORA_TEXT_ANSWERS) {
        return qlora__env_fail(env, QLORA_ERR_UNSUPPORTED,
                               "%s is plain text, which has no pairs and no labels",
                               source->loader->name);
    }
    source->next = qlora__text_plain_next;
    source->again = qlora__text_plain_again;
    return qlora__text_input_open(env, &source->input);
}

// Splits the ids of one document, which have no BOS yet, into samples of at most chunk_tokens.
// Without a BOS, every sample starts with the last token of the previous one, so that each token is
// a target once.
static qlora_result qlora__text_data_chunk(qlora__env* env, qlora__text_loader* loader,
                                           size_t line) {
    qlora_text_data* data = loader->data;
    int32_t bos = loader->desc->chat->bos;
    size_t count = data->ids.count;
    size_t head = bos >= 0 ? 1 : 0;
    size_t limit = loader->desc->chunk_tokens > 0 ? loader->desc->chunk_tokens : SIZE_MAX;
    size_t room = limit - head; // tokens of the document in one sample
    size_t stride = bos >= 0 ? room : room - 1;
    size_t samples = count > room ? 1 + (count - room + stride - 1) / stride : 1;
    size_t longest = head + (count < room ? count : room);
    loader->numbers.count = 0;
    QLORA__TRY(qlora__text_ids_room(env, &loader->numbers, 2 * longest));
    int32_t* ids = loader->numbers.data;
    int32_t* labels = ids + longest;
    for (size_t i = 0; i < samples; i++) {
        size_t part = count - i * stride < room ? count - i * stride : room;
        if (bos >= 0) {
            ids[0] = bos;
            labels[0] = -100;
        }
        memcpy(ids + head, data->ids.data + i * stride, part * sizeof(int32_t));
        memcpy(labels + head, ids + head, part * sizeof(int32_t));
        QLORA__TRY(qlora__text_sample_close(env, data, ids, labels, head + part, line));
    }
    return QLORA_OK;
}

static qlora_result qlora__text_data_document(qlora__env* env, qlora__text_loader* loader,
                                              const char* text, size_t size, size_t line) {
    int32_t bos = loader->desc->chat->bos;
    int32_t eos = loader->desc->chat->eos;
    qlora_text_ids* ids = &loader->data->ids;
    ids->count = 0;
    QLORA__TRY(qlora__text_encode(env, loader->tok, text, size, 0, ids));
    if (bos >= 0 && ids->count > 0 && ids->data[0] == bos) {
        ids->count--; // spelt out in the text: it still comes exactly once
        memmove(ids->data, ids->data + 1, ids->count * sizeof(int32_t));
    }
    bool there = ids->count > 0 && ids->data[ids->count - 1] == eos;
    if (eos >= 0 && !there) {
        QLORA__TRY(qlora__text_ids_add(env, ids, eos));
    }
    qlora_result r = ids->count > 0 ? qlora__text_data_chunk(env, loader, line) : QLORA_OK;
    ids->count = 0;
    return r;
}
